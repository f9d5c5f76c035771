#!/bin/sh
# test_tiny_gpt.sh - examples/tiny_gpt.c: what it learns, its lines, sample and report, equal bits with one
# and two threads, and the answer to an option of the trainer.
# SPDX-License-Identifier: MIT OR Unlicense
cd "$(dirname "$0")/../.." || exit 1
. tests/support/check.sh
program=${BUILD:-build}/tiny_gpt
[ -x "$program" ] || { echo "$program is not built"; echo "0 passed, 1 failed, 0 skipped"; exit 1; }

# A text whose bytes are independent, but of unequal frequency: no model beats its entropy of 0.98 nats,
# and a model that learned nothing has ln 4, 1.39.
awk 'BEGIN { srand(7); for (i = 0; i < 20000; i++) { x = rand(); printf "%s", x < 0.6 ? "a" : x < 0.85 ? "b" : x < 0.98 ? "c" : "\n" } }' \
    >"$tmp/text"

run() { # THREADS DTYPE
    mkdir -p "$tmp/$1$2" && OMP_NUM_THREADS=$1 "$program" "$2" "$tmp/text" 60 "$tmp/$1$2" >"$tmp/out.$1$2"
}
steps()   { sed -n 's/^step *//p' "$tmp/out.2fp16"; }
loss()    { steps | awk -v step="$1" '$1 == step { print $3 }'; }
between() { awk -v x="$1" -v low="$2" -v high="$3" 'BEGIN { exit !(x != "" && x >= low && x <= high) }'; }
sampled() { sed '1,/^--- sample/d' "$tmp/out.2fp16" | sed '/^--- /,$d'; }
printed() { grep -v 'CPU time$' "$tmp/out.$1" | sed '/^--- .*html/d' >"$tmp/printed.$1"; }
same()    { printed 1fp16; printed 2fp16
            cmp "$tmp/printed.1fp16" "$tmp/printed.2fp16" && cmp "$tmp/1fp16/metrics.jsonl" "$tmp/2fp16/metrics.jsonl"; }
answers() { # STATUS TEXT ARGUMENT...
    status=$1 words=$2; shift 2
    "$program" "$@" >"$tmp/out" 2>"$tmp/err"; test $? -eq "$status" && test ! -s "$tmp/out" && grep -q -- "$words" "$tmp/err"
}

check 'the file has at most 350 lines'       test "$(wc -l <examples/tiny_gpt.c)" -le 350
check 'it trains in fp16'                    run 2 fp16
check 'from about ln 4'                      between "$(loss 1)" 1.2 1.6
check 'to the entropy of the text'           between "$(steps | awk '$1 == 60 { print $7 }')" 0.93 1.10
check 'the sample has its letters, a most'   test "$(sampled | tr -dc a | wc -c)" -gt "$(sampled | tr -d 'a\n' | wc -c)"
check 'and 500 bytes'                        test "$(sampled | wc -c)" -eq 501
check 'the log has each step'                test "$(grep -c '"loss":' "$tmp/2fp16/metrics.jsonl")" -eq 60
check 'and the gradients'                    grep -q '"exponents":' "$tmp/2fp16/metrics.jsonl"
check 'the page is drawn'                    grep -q '</html>' "$tmp/2fp16/report.html"
if [ -n "$MIXPREC_TEST_QUICK" ]; then skip 'one thread trains the same bits: in make test-long'
else
    check 'it trains on one thread'          run 1 fp16
    check 'with the same bits'               same
fi
check 'an option names the trainer'          answers 2 '"--dtype".*build/trainer --help' --dtype fp16 --steps 10
check 'also behind other arguments'          answers 2 '"--out".*build/trainer' fp16 "$tmp/text" --out run
check 'another dtype is refused'             answers 2 '"fp64"' fp64
check 'steps are a number'                   answers 2 '"many"' fp16 "$tmp/text" many
check 'a text that is not there is refused'  answers 1 'cannot read the text' fp16 "$tmp/nosuch"
report
