# pack.awk - packs the rooms under src/ into one file that users copy: mixprec.h or mixprec_cuda.cu.
# SPDX-License-Identifier: MIT OR Unlicense
#
#   awk -f src/pack.awk src/mixprec.h                 the product, on standard output
#   awk -v lines=1 -f src/pack.awk src/mixprec.h      with #line, so that compilers name the room
#
# The argument is the reading order: each #include "room" in it becomes that room's text. A room's own
# lines `#pragma once` and #include "another room" are dropped; they must name rooms that stand above.

function fail(path, line, what) {
    printf "pack.awk: %s:%d: %s\n", path, line, what >"/dev/stderr"
    failed = 1
    exit 1
}

function folder_of(path) { return match(path, /.*\//) ? substr(path, 1, RLENGTH) : "" }

# The name after #include, as seen from `folder`: src/cpu/../kernels.h is src/kernels.h.
function included(text, folder,    path) {
    sub(/^#include "/, "", text)
    sub(/"$/, "", text)
    path = folder text
    while (sub(/[^\/]+\/\.\.\//, "", path));
    return path
}

function exists(path,    line, answer) {
    if (path in known) return known[path]
    answer = (getline line <path) >= 0
    close(path)
    return known[path] = answer
}

function mark(path, line) { if (lines) printf "#line %d \"%s\"\n", line, path }

# A room: its text without the lines that only its own compilation needs.
function room(path,    line, n, marked, other) {
    if (path in packed) fail(path, 0, "stands twice in the reading order")
    while ((getline line <path) > 0) {
        n++
        if (line == "#pragma once") continue
        if (line ~ /^#include "[^"]*"$/) {
            other = included(line, folder_of(path))
            if (other in packed) continue
            if (exists(other)) fail(path, n, other " stands below this room in the reading order")
        }
        if (!marked++) mark(path, n)
        print line
    }
    close(path)
    packed[path] = 1
}

# No pattern reads a file: the argument is taken here.
BEGIN {
    top = ARGV[1]
    if (!exists(top)) fail(top, 0, "cannot be read")
    mark(top, 1)
    while ((getline line <top) > 0) {
        n++
        if (line !~ /^#include "[^"]*"$/) { print line; continue }
        path = included(line, folder_of(top))
        if (!exists(path)) fail(top, n, path " cannot be read")
        room(path)
        mark(top, n + 1)
    }
    exit failed
}
