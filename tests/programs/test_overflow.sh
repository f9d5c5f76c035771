#!/bin/sh
# test_overflow.sh - overflow.c, an activation above fp16's range, with and without the guard; and
# underflow.c, gradients below that range. The quick tests run one of the three cases of overflow.c.
# SPDX-License-Identifier: MIT OR Unlicense
. tests/support/check.sh
program=${BUILD:-build}/overflow
[ -x "$program" ] || { echo "$program is not built"; echo "0 passed, 1 failed, 0 skipped"; exit 1; }

ran()      { "$program" "$@" --export "$tmp" >"$tmp/out" 2>"$tmp/err"; }
has()      { grep -Eq -e "$1" "$tmp/out" || { cat "$tmp/out"; return 1; }; }
# loss ROW: of the table
loss()     { awk -v row="$1" 'index($0, row) == 1 { print $(NF - 3) }' "$tmp/out"; }
learned()  { awk -v l="$(loss "$1")" 'BEGIN { exit !(l > 0.6931 && l < 0.75) }'; }   # ln 2 and a little
near()     { awk -v a="$(loss f32)" -v b="$(loss "$1")" 'BEGIN { d = a - b; exit !(b > 0 && d <= 0.01 && d >= -0.01) }'; }
one_site() { test "$(grep -c '^    in f32: h\.1\.mlp\.down\.w: linear$' "$tmp/out")" = 2; }
in_f32()   { test "$(grep -c "^    in f32: $1\$" "$tmp/out")" = 2; }
exported() { test "$(wc -c <"$tmp/batches.bin")" -eq $((600 * 2 * 16 * 16 * 4)) && test -s "$tmp/weights.safetensors"; }
usage()    { ! "$program" --nosuch >"$tmp/o" 2>"$tmp/e" && grep -q '^usage: overflow' "$tmp/e"; }

check 'overflow ends well'                                  ran
check 'f32 learns'                                          learned f32
check "fp16 by GradScaler's rule skips every step"          has "^fp16, GradScaler's rule +not finite +0 +[0-9]+ +1.17549e-38$"
check 'the guarded run at level 1 ends within 0.01 of f32'  near 'fp16, guarded, level 1'
check 'at level 2, too'                                     near 'fp16, guarded, level 2'
check 'with one site in f32'                                one_site
check 'which stores 66246 and a little'                     has '^    which stores numbers up to 662(4[6-9]|5[0-9])$'
check 'its weights and batches are there for PyTorch'       exported
check 'its case, and what grows'                            test "$(cat "$tmp/case.txt") $(wc -c <"$tmp/grown.bin")" = 'planted 2400'
if [ -z "$MIXPREC_TEST_QUICK" ]; then
    check 'a product that grows in the middle of training'      ran growth
    check "there GradScaler's rule skips what follows"          has "^fp16, GradScaler's rule +not finite +3[0-9][0-9] +[0-9]+ +1.17549e-38$"
    check 'the guarded runs end near f32'                       near 'fp16, guarded, level 1'
    check 'at level 2, too'                                     near 'fp16, guarded, level 2'
    check 'with that product and what reads it in f32'          in_f32 'h\.1\.mlp\.up\.w: linear, h\.1\.mlp\.up\.w: gelu'
    check 'logits of attention that grow'                   ran logits
    check 'the guarded runs end near f32'                   near 'fp16, guarded, level 1'
    check 'at level 2, too'                                 near 'fp16, guarded, level 2'
    check 'with q, k and v alone in f32'                    in_f32 'h\.1\.attn\.qkv\.w: linear'
fi

# end ROW: the loss that a run of underflow ends at; lost ROW: the share of its gradients that are 0
under()    { "${BUILD:-build}/underflow" >"$tmp/out" 2>"$tmp/err"; }
end()      { sed -n "s/^$1: loss \([0-9.]*\) after.*/\1/p" "$tmp/out"; }
lost()     { sed -n "/^$1: /{n;s/.*: \([0-9.]*\)% of them 0 altogether.*/\1/p;}" "$tmp/out"; }
holds()    { awk "BEGIN { exit !($1) }"; }
f32= forgotten= set=
if [ -x "${BUILD:-build}/underflow" ]; then
    check 'underflow ends well' under
    f32=$(end f32) forgotten=$(end 'fp16, scaler forgotten') set=$(end 'fp16, scale set from the gradients')
    check 'without a scaler most gradients are lost, and told'  holds "$(lost 'fp16, scaler forgotten') > 90"
    check 'and the loss stays behind'                           holds "$forgotten - $f32 > 0.05"
    check 'a scale set from the gradients loses none'           holds "$(lost 'fp16, scale set from the gradients') < 0.1"
    check 'and ends within 0.01 of f32'                         holds "$set - $f32 < 0.01 && $f32 - $set < 0.01"
else skip 'underflow is not built'; fi
check 'a wrong call is told'                                usage
report
