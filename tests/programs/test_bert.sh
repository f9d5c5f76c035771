#!/bin/sh
# test_bert.sh - examples/bert.c: the loss falls, and fp16 at both levels stays beside fp32 in less memory; padding
# changes no bit. In make test-long all 600 steps: the loss is below what letters alone explain.
# SPDX-License-Identifier: MIT OR Unlicense
cd "$(dirname "$0")/../.." || exit 1
. tests/support/check.sh
program=${BUILD:-build}/bert
[ -x "$program" ] || { echo "$program is not built"; echo "0 passed, 1 failed, 0 skipped"; exit 1; }

listed()  { sed -n 's/^    "\([a-z ;]*\)".*/\1/p' examples/names.h | tr -s ' ' '\n'; }
# Nats of a letter by its frequency alone.
letters() { listed | fold -w 1 | awk '/[a-z]/ { n[$0]++; all++ } END { for (c in n) h -= n[c] * log(n[c] / all); print h / all }'; }
# column N ROW: losses of fp32, level 1, level 2
column()  { awk -v n="$1" -v row="$2" '$1 ~ /^[0-9]+$/ && ++k == row { print $n }' "$tmp/out"; }
holds()   { awk "BEGIN { exit !($1) }"; }
near()    { holds "$(column "$1" "$2") - $(column 2 "$2") < $3 && $(column 2 "$2") - $(column "$1" "$2") < $3"; }
refused() { ! "$program" 1 "$tmp/none" >"$tmp/o" 2>"$tmp/err" && grep -q 'none' "$tmp/err"; }

steps=36
[ -n "$MIXPREC_TEST_QUICK" ] || steps=600
check 'it trains in fp32 and in fp16'             eval '"$program" $steps >"$tmp/out" 2>&1'
check 'from about ln 27, 3.30'                    holds "$(column 2 1) < 3.45 && $(column 2 1) > 2.6"
check 'the loss falls'                            holds "$(column 2 6) < $(column 2 2)"
check 'level 1 is beside fp32'                    near 3 6 0.06
check 'level 2 is beside fp32'                    near 4 6 0.06
check 'in less memory'                            awk '$1 == "KiB" { exit !($4 < 0.65 * $2 && $3 < 0.8 * $2 && $4 > 0) }' "$tmp/out"
check 'padding changes no bit'                    test "$(grep -c 'without padding the same bits$' "$tmp/out")" = 3
check 'no such list of names'                     refused
if [ -z "$MIXPREC_TEST_QUICK" ]; then
    check 'it knows more than how often letters are' holds "$(column 2 6) < $(letters) - 0.5"
fi
report
