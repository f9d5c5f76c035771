#!/bin/sh
# test_microgpt.sh - examples/microgpt.c: what it learns, in fp16 and fp32, what it invents, its lines.
# SPDX-License-Identifier: MIT OR Unlicense
cd "$(dirname "$0")/../.." || exit 1
. tests/support/check.sh
program=${BUILD:-build}/microgpt
[ -x "$program" ] || { echo "$program is not built"; echo "0 passed, 1 failed, 0 skipped"; exit 1; }

listed() { sed -n 's/^    "\([a-z ;]*\)".*/\1/p' examples/names.h | tr -s ' ' '\n'; }
# Nats a letter that a table of all pairs of letters needs for the listed names, ends included.
pairs() {
    listed | awk '{ w = "." $0 "."
                    for (i = 1; i < length(w); i++) { n[substr(w, i, 2)]++; of[substr(w, i, 1)]++; all++ } }
                  END { for (p in n) h -= n[p] * log(n[p] / of[substr(p, 1, 1)]); print h / all }'
}
run()     { "$program" "$1" >"$tmp/$1" 2>&1; }
loss()    { awk -v step="$2" '$1 == "step" && $2 == step { print $4 }' "$tmp/$1"; }
between() { awk -v x="$1" -v low="$2" -v high="$3" 'BEGIN { exit !(x != "" && x >= low && x <= high) }'; }
words()   { tail -n 2 "$tmp/fp16" | tr -s ' ' '\n'; }
new()     { listed | sort >"$tmp/known"; words | sort -u | comm -23 - "$tmp/known" | wc -l; }
near()    { between "$(loss fp16 1000)" "$(awk -v x="$(loss fp32 1000)" 'BEGIN { print x - 0.05 }')" \
                    "$(awk -v x="$(loss fp32 1000)" 'BEGIN { print x + 0.05 }')"; }
refused() { ! "$program" "$@" >"$tmp/out" 2>"$tmp/err" && grep -q '^microgpt: no ' "$tmp/err" && test ! -s "$tmp/out"; }

check 'it has at most 150 lines'                  test "$(wc -l <examples/microgpt.c)" -le 150
check 'it trains in fp16'                         run fp16
check 'on all names of the list'                  grep -qx "$(listed | wc -l | tr -d ' ') names, fp16" "$tmp/fp16"
check 'from about ln 27, 3.30'                    between "$(loss fp16 1)" 3.1 3.5
check 'the loss falls'                            between "$(loss fp16 1000)" 1.0 "$(loss fp16 500)"
check 'below what pairs of letters explain'       between "$(loss fp16 1000)" 1.0 "$(pairs)"
check 'it invents 16 names of letters'            test "$(words | grep -cx '[a-z][a-z]*')" -eq 16
check 'some of which are new'                     test "$(new)" -ge 3
check 'it trains in fp32'                         run fp32
check 'fp16 ends within 0.05 of fp32'             near
check 'another dtype is refused'                  refused fp64
check 'and a file that is not there'              refused fp16 "$tmp/nosuch"
report
