#!/bin/sh
# rooms.sh - checks the order of the rooms under src/: each room compiles with only the rooms that
# it includes, no room includes a later room, and the products are the output of src/pack.awk.
# With MIXPREC_TEST_QUICK no room is compiled.
# SPDX-License-Identifier: MIT OR Unlicense
. tests/support/check.sh
CC=${CC:-cc} CXX=${CXX:-c++}

# --- the products ---------------------------------------------------------------------------
packs() { awk -f src/pack.awk "src/$1" | cmp - "$1"; }
for product in mixprec.h mixprec_cuda.cu; do
    check "$product is packed from its rooms"        packs "$product"
done

# --- the packer itself ----------------------------------------------------------------------
mkdir "$tmp/src"
cp src/pack.awk "$tmp/src/"
cd "$tmp" || exit 1
printf '#pragma once\nint low;\n' >src/low.h
printf '#pragma once\n#include "low.h"\n#include "other.h"\nint high;\n' >src/high.h
printf '/* top */\n#include "low.h"\n#include "high.h"\n' >src/right.h
printf '#include "high.h"\n#include "low.h"\n' >src/wrong.h
printf '#include "none.h"\n' >src/missing.h
right() { [ "$(awk -f src/pack.awk src/right.h)" = "$(printf '/* top */\nint low;\n#include "other.h"\nint high;')" ]; }
lines() { awk -v lines=1 -f src/pack.awk src/right.h | grep -x '#line 3 "src/high.h"'; }
refused() {
    awk -f src/pack.awk "src/$1" >out 2>message && return 1
    grep -q "$2" message || { cat message; return 1; }
}
check 'rooms are packed in order, without their own includes' right
check '#line names the room, behind its own includes'         lines
check 'a room that includes a later one is refused'           refused wrong.h 'src/high.h:2: src/low.h stands below'
check 'a room that is not there is refused'                   refused missing.h 'src/none.h cannot be read'
cd - >/dev/null || exit 1

# --- sections -------------------------------------------------------------------------------
# A header's section is that of its banner, "==== 7. TAPE", or of the header before it; a room's section is that of the
# banner in its folder, or of the room before it. A room includes no header of a later section.
sections() {
    (cd "$1" && sed -n 's/^#include "\(.*\)"$/\1/p' mixprec.h | while read -r room; do
        sed -n -e "s,^/\* ==== \([0-9]*\)\. .*,$room banner \1,p" -e "s,^#include \"\(.*\)\"\$,$room includes \1,p" \
            -e "1s,.*,$room room 0,p" "$room"
    done) | awk '
        function folder(name) { return sub(/\/[^\/]*$/, "", name) ? name : "" }
        $2 == "room"          { order[++n] = $1 }
        $2 == "banner"        { of[$1] = of[folder($1) != "" ? folder($1) : $1] = $3 }
        $2 == "includes"      { room[++m] = $1; sub(/.*\//, "", $3); header[m] = $3 }
        END {
            now = 1
            for (i = 1; i <= n; i++) {
                if (order[i] ~ /\.c$/ && order[i - 1] ~ /\.h$/) now = 1
                if (order[i] in of) now = of[order[i]]
                else if (folder(order[i]) in of) now = of[folder(order[i])]
                section[order[i]] = now
            }
            for (i = 1; i <= m; i++)
                if (room[i] ~ /\.c$/ && section[header[i]] > section[room[i]]) {
                    print "src/" room[i] ": section " section[room[i]] "; " header[i] " is of section " section[header[i]]
                    bad = 1
                }
            exit bad
        }'
}
seen() {    # ROOM HEADER: an include that is planted in a copy
    sed -i "1a #include \"../$2\"" "$tmp/copy/$1"
    sections "$tmp/copy" | grep -x "src/$1: section [0-9]*; $2 is of section [0-9]*"
}
cp -r src "$tmp/copy"
check 'no room includes a header of a later section'        sections src
check 'such an include is reported: of a folder'            seen tensors/params.c tape.h
check 'of a room in no folder, and of one without a banner' eval 'seen scaler.c step.h && seen walk/marks.c operators.h'

# --- their size -----------------------------------------------------------------------------
small() { wc -l src/*.[hc] src/*/* | awk '$2 != "total" && $1 > 900 { print; bad = 1 } END { exit bad }'; }
check 'no room is longer than 900 lines'                    small

# --- each room alone ------------------------------------------------------------------------
if [ -n "$MIXPREC_TEST_QUICK" ]; then skip 'each room compiles alone, and calls no later one: in make test-long'; report; exit; fi

# Rooms between #ifdef MIXPI_PASS and its #endif are compiled as the plain C pass.
order() { sed -n 's/^#include "\(.*\)"$/\1/p' "src/$1"; }
sed -n '/^#ifdef MIXPI_PASS/,/^#endif.*MIXPI_PASS/s/^#include "\(.*\)"$/\1/p' src/mixprec.h >"$tmp/of_a_pass"

# The compiler's header of vectors is longer than all rooms: it is compiled once. So is CORE with the rooms that it
# includes, for each room that includes CORE: such a room's text is the same rooms, with those of CORE first.
CORE=operators/cast.c
case $(uname -m) in
x86_64) echo '#include <immintrin.h>' ;;
aarch64) echo '#include <arm_neon.h>' ;;
esac >"$tmp/vectors.h"
{ cat "$tmp/vectors.h"; echo "#include \"src/$CORE\""; } >"$tmp/core.h"
for header in vectors core; do
    $CC -std=c99 -I. -x c-header "$tmp/$header.h" -o "$tmp/$header.h.gch" 2>/dev/null
done

# alone HEADER ROOM
alone() {
    flags=
    grep -qx "$2" "$tmp/of_a_pass" && flags=-DMIXPI_PASS=0
    echo "#include \"src/$2\"" >"$tmp/room.c"
    # shellcheck disable=SC2086
    $CC -std=c99 -fsyntax-only -include "$tmp/$1.h" -I. $flags -Wno-unused -Wno-unused-function \
        -Werror=implicit-function-declaration "$tmp/room.c" 2>"$tmp/room.log" && return
    echo "src/$2:"
    head -n 3 "$tmp/room.log"
}
# A function that a room declares and calls, and a later room defines.
promised() { sed -n "s,.*[‘'\`]\\(mixpi_[a-z0-9_]*\\).* used but never defined.*,\\1,p" "$tmp/room.log"; }
# The rooms to compile, each behind the header to precede it.
rooms_alone() {
    # shellcheck disable=SC2046
    awk -v core="src/$CORE" '
        function add(room, part, n, i) {
            if (index(text, " " room " ")) return
            n = split(includes[room], part, " ")
            for (i = 1; i <= n; i++) add(part[i])
            text = text room " "
        }
        FNR == 1 { rooms[++count] = FILENAME; folder = FILENAME; sub(/[^\/]*$/, "", folder) }
        /^#include "/ {
            split($0, part, "\"")
            name = folder part[2]
            while (sub(/[a-z]+\/\.\.\//, "", name)) {}
            includes[FILENAME] = includes[FILENAME] " " name
        }
        END {
            for (i = 1; i <= count; i++) {
                text = " "
                add(rooms[i])
                print index(text, " " core " ") && rooms[i] != core ? "core" : "vectors", substr(rooms[i], 5)
            }
        }' $(order mixprec.h | sed 's,^,src/,')
}
each_alone() {
    rooms_alone | while read -r header room; do
        alone "$header" "$room" >>"$tmp/alone"
        promised >>"$tmp/promised"
    done
    cat "$tmp/alone"
    [ ! -s "$tmp/alone" ]
}
: >"$tmp/promised"
check "each of $(order mixprec.h | wc -l) rooms of mixprec.h compiles alone"   each_alone
# The tape applies one operator itself, cast, which is applied as all others are.
printf '%s\n' mixpi_cast mixpi_is_cast >"$tmp/known"
upward() { LC_ALL=C sort -u "$tmp/promised" | diff "$tmp/known" -; }
case $($CC --version 2>/dev/null) in
*clang*) skip 'no room calls a later one: gcc says so' ;;
*)       check 'no room calls a later one, but for the cast' upward ;;
esac

companion_alone() {
    for room in $(order mixprec_cuda.cu); do
        echo "#include \"src/$room\"" >"$tmp/room.cpp"
        $CXX -std=c++17 -w -fsyntax-only -DMIXPREC_CUDASIM -isystem "$CUDA/include" -I. -Itests -Itests/support \
            "$tmp/room.cpp" 2>"$tmp/room.log" || { echo "src/$room:"; head -n 3 "$tmp/room.log"; }
    done >"$tmp/alone"
    cat "$tmp/alone"
    [ ! -s "$tmp/alone" ]
}
rooms=$(order mixprec_cuda.cu | wc -l)
if [ -n "$CUDA" ] && command -v "$CXX" >/dev/null; then
    check "each of $rooms rooms of mixprec_cuda.cu compiles alone" companion_alone
else skip 'the rooms of mixprec_cuda.cu compile alone: no C++ compiler, or no CUDA headers'
fi
report
