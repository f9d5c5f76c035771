#!/bin/sh
# coverage.sh - which lines and branches of mixprec.h the C tests reach, by gcov. `make coverage`.
# SPDX-License-Identifier: MIT OR Unlicense
#
#   tests/tools/coverage.sh PROGRAM...        (BUILD, CC, GCOV) writes BUILD/coverage/mixprec.h.gcov:
#                                       #### marks lines that were never reached
#
# The code of several instruction sets is the same lines, so a line has several copies. A line
# counts as reached if any copy was reached, and a branch (of C) if any copy was taken.
. tests/support/check.sh

build=${BUILD:-build}/coverage
case $build in /*) ;; *) build=$PWD/$build ;; esac
gcov=${GCOV:-gcov}
if ! command -v "$gcov" >/dev/null 2>&1 || ! ${CC:-cc} --version 2>/dev/null | grep -q -i 'gcc\|free soft'; then
    skip 'gcov, and gcc as CC'
    report
    exit
fi
targets=; for t; do targets="$targets $build/$t"; done

built() {
    env -u MAKEFLAGS -u MAKELEVEL "${MAKE:-make}" -s BUILD="$build" CC="${CC:-cc}" OPENMP="$OPENMP" \
        CFLAGS='-O0 --coverage -fprofile-update=atomic -fno-inline -DTEST_COVERAGE' $targets
}
check 'the tests are built' built
find "$build" -name '*.gcda' -exec rm -f {} +
for t in $targets; do check "${t##*/} passes" "$t"; done

# One report an object that holds a copy of the implementation; merged by line.
reports() {
    find "$build" -name '*.gcda' | while read -r data; do
        "$gcov" -b -c -t -o "$(dirname "$data")" "$data" 2>/dev/null
    done >"$tmp/gcov"
}
reports
awk -v marked="$build/mixprec.h.gcov" '
    /^ *-: *0:Source:/ { here = /Source:(.*\/)?mixprec\.h$/; line = 0 }
    !here { next }
    /^ *[0-9#=*-]+:/ {
        split($0, part, ":")
        line = part[2] + 0
        count = part[1]
        gsub(/[ *]/, "", count)
        order = 0
        if (!line) next
        if (!(line in text)) text[line] = substr($0, index($0, part[2] ":") + length(part[2]) + 1)
        if (line > last) last = line
        if (count == "-") next
        code[line] = 1
        if (count + 0 > 0) reached[line] = 1
        next
    }
    /^branch / {
        key = line " " order++
        branch[key] = 1
        if (/taken [1-9]/) taken[key] = 1
    }
    /^function |^-----/ { order = 0 }
    END {
        for (i = 1; i <= last; i++) {
            if (i in code) { lines++; if (i in reached) seen++ }
            print (i in code ? (i in reached ? "        " : "    ####") : "       -") ":" i ":" text[i] >marked
        }
        for (key in branch) { branches++; if (key in taken) both++ }
        if (!lines) exit 1
        printf "mixprec.h: %.1f%% of %d lines, %.1f%% of %d branches reached; see %s\n",
               100 * seen / lines, lines, branches ? 100 * both / branches : 0, branches, marked
    }' "$tmp/gcov" >"$tmp/sum"
check 'there is a figure' grep -q reached "$tmp/sum"
cat "$tmp/sum"
report
