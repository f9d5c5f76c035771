#!/bin/sh
# five_minutes.sh - how many bits a byte after five minutes of training on a CPU, from nothing.
# SPDX-License-Identifier: MIT OR Unlicense
#
#   tests/bench/five_minutes.sh TEXT [SECONDS [THREADS [OPTION...]]]
#
# The rule: TEXT's bytes are the tokens; its last tenth is for validation only, in windows of the block's length.
# Training may use any model and any dtype for SECONDS (300) on THREADS (2) cores: SECONDS x THREADS of the
# processor's time, so that a busy machine has the same contest. Reading, validation and compiling do not count.
# Bits a byte are the loss / ln 2. Two short runs measure the time of a step, and so set how many steps the
# schedule has. OPTIONs go to build/trainer, behind the model's.
text=$1 seconds=${2:-300} threads=${3:-2}
[ -r "$text" ] || { echo "usage: tests/bench/five_minutes.sh TEXT [SECONDS [THREADS [OPTION...]]]" >&2; exit 2; }
[ $# -lt 3 ] && shift $# || shift 3
tmp=$(mktemp -d) && trap 'rm -rf "$tmp"' EXIT
model='--layers 6 --heads 6 --width 192 --block 128 --batch 16 --norm rms --positions rope --qk-norm on
       --activation relu2 --zero-init on --optimizer muon --lr 4e-3 --min-lr 0 --dtype bf16 --level 2 --dropout 0.1'
train() { # STEPS OPTION...
    # shellcheck disable=SC2086
    "${BUILD:-build}/trainer" --data "$text" --threads "$threads" $model --sample 0 --eval-every 1000000 --steps "$@"
}
# Seconds of the processor that this shell's children have used so far.
used() {
    times >"$tmp/times"
    tr 'ms' '  ' <"$tmp/times" | awk 'NR == 2 { print 60 * ($1 + $3) + $2 + $4 }'
}
train 5 --eval-batches 1 "$@" >"$tmp/short" || exit 1
used >"$tmp/five"
train 25 --eval-batches 1 "$@" >"$tmp/short" || exit 1
used >"$tmp/both"
step=$(awk -v five="$(cat "$tmp/five")" -v both="$(cat "$tmp/both")" 'BEGIN { print (both - 2 * five) / 20 }')
steps=$(awk -v step="$step" -v s="$seconds" -v n="$threads" 'BEGIN { print int(s * n / step) }')
sed -n 's/^model name[^:]*: //p' /proc/cpuinfo 2>/dev/null | head -n 1
echo "$threads threads, load $(cut -d ' ' -f 1 /proc/loadavg 2>/dev/null); a step takes $step s of the processor: $steps steps"
train "$steps" --log-every 100 --eval-batches 55 "$@" >"$tmp/long" || exit 1
used >"$tmp/all"
grep '^size' "$tmp/long"
awk -v both="$(cat "$tmp/both")" -v all="$(cat "$tmp/all")" '/^best val/ { sub(/,/, "", $3); val = $3 }
    END { printf "%.0f s of the processor with validation; validation loss %s, %.3f bits a byte\n", all - both, val, val / log(2) }' "$tmp/long"
