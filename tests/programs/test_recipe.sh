#!/bin/sh
# test_recipe.sh - how much a program with its own backward pass must change. examples/by_hand.c is
# the example; the script counts the new lines of its versions with loss scaling and with fp16, and
# checks that all three learn equally well.
# SPDX-License-Identifier: MIT OR Unlicense
cd "$(dirname "$0")/../.." || exit 1
. tests/support/check.sh

build=${BUILD:-build}

# new_lines FROM TO MOST: lines of TO that are not in FROM; as many as there are is printed.
new_lines() {
    n=$(diff "examples/$1.c" "examples/$2.c" | grep -c '^>')
    echo "$2: $n new lines beside $1"
    [ "$n" -gt 0 ] && [ "$n" -le "$3" ]
}
check 'loss scaling, clipping and AdamW: at most 40 lines' new_lines by_hand by_hand_scaled 40
check 'and products in fp16: at most 60 in all'            new_lines by_hand by_hand_fp16 60

# losses PROGRAM: the column of numbers that it prints; it ends well.
losses() {
    "$build/$1" >"$tmp/$1.out" && sed 's/.*loss //' "$tmp/$1.out" >"$tmp/$1.losses" && [ -s "$tmp/$1.losses" ]
}
# near A B: their losses differ by at most a hundredth (clipping, fp16 and the order of sums).
near() {
    paste "$tmp/$1.losses" "$tmp/$2.losses" | awk '{ d = $1 - $2; if (d > 0.01 || d < -0.01) bad = 1 } END { exit bad || !NR }'
}
if [ -x "$build/by_hand" ] && [ -x "$build/by_hand_scaled" ] && [ -x "$build/by_hand_fp16" ]; then
    for program in by_hand by_hand_scaled by_hand_fp16; do check "$program learns" losses "$program"; done
    check 'scaled as by hand' near by_hand by_hand_scaled
    check 'fp16 as fp32'      near by_hand by_hand_fp16
else
    skip 'the programs are not built (make examples)'
fi
report
