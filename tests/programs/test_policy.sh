#!/bin/sh
# test_policy.sh - examples/policy.c: returns of the first and the last rounds in fp16 and bf16, and
# how far both policies are from fp32.
# SPDX-License-Identifier: MIT OR Unlicense
cd "$(dirname "$0")/../.." || exit 1
. tests/support/check.sh
program=${BUILD:-build}/policy
[ -x "$program" ] || { echo "$program is not built"; echo "0 passed, 1 failed, 0 skipped"; exit 1; }

# Mean number of random pushes until the pole falls: the same equations again, in double.
by_chance() {
    awk 'BEGIN { srand(7); for (n = 0; n < 1000; n++) {
        x = rand() / 10 - .05; v = rand() / 10 - .05; a = rand() / 10 - .05; w = rand() / 10 - .05
        do { s = sin(a); c = cos(a); f = ((rand() < .5 ? 10 : -10) + .05 * w * w * s) / 1.1
             alpha = (9.8 * s - c * f) / (.5 * (4 / 3 - .1 * c * c / 1.1)); acc = f - .05 * alpha * c / 1.1
             x += .02 * v; v += .02 * acc; a += .02 * w; w += .02 * alpha; total++
        } while (x < 2.4 && x > -2.4 && a < .2095 && a > -.2095) }
        print total / n }'
}
# column N FROM TO: mean of column N over the rounds FROM to TO
column()  { awk -v n="$1" -v from="$2" -v to="$3" '$1 ~ /^[0-9]+$/ && NF == 6 && $1 >= from && $1 <= to { s += $n; k++ }
                                                   END { print k ? s / k : "none" }' "$tmp/out"; }
between() { awk -v x="$1" -v low="$2" -v high="$3" 'BEGIN { exit !(x + 0 == x && x >= low && x <= high) }'; }
ratio()   { awk -v a="$1" -v b="$2" 'BEGIN { print (b > 0 ? a / b : "none") }'; }
again()   { "$program" 3 >"$tmp/again" && diff "$tmp/out" "$tmp/again"; }

chance=$(by_chance)
check 'it runs'                                      eval '"$program" 3 >"$tmp/out" 2>&1'
check 'random pushes balance about 22 times'         between "$chance" 20 25
check 'fp16 begins there'                            between "$(ratio "$(column 2 1 1)" "$chance")" 0.6 1.5
check 'bf16 begins there'                            between "$(ratio "$(column 5 1 1)" "$chance")" 0.6 1.5
check 'fp16 learns to balance nearly 200 times'      between "$(column 2 20 24)" 180 200
check 'bf16 learns it'                               between "$(column 5 20 24)" 180 200
check 'fp16 is about 8 times nearer to fp32'         between "$(ratio "$(column 6 1 24)" "$(column 3 1 24)")" 4 16
check 'a relative error of bf16 is below 2^-7'       between "$(column 6 1 24)" 1e-5 0.0078
check 'no step is skipped'                           grep -qx 'steps skipped in fp16: 0' "$tmp/out"
check 'training and playing have the same bits'      grep -qx 'trained / played policy before each first update: fp16 1 to 1, bf16 1 to 1' "$tmp/out"
check 'the same seed gives the same numbers'         again
report
