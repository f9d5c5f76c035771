#!/bin/sh
# growth.sh - how time grows: of the optimizer phase with parameters and tensors, of a training
# step with width, length and batch. One line a point, for people and for plot.py.
# SPDX-License-Identifier: MIT OR Unlicense
#
#   tests/bench/growth.sh optimizer|step [THREADS [MOST|ROUNDS]] >>growth.txt
#   python3 tests/bench/plot.py growth.txt
#
# optimizer: bench_growth up to MOST (1e9) parameters; those that do not fit are skipped.
# step: trainer --profile in fp16 at level 1, ROUNDS (2) times each point; the fastest counts.
# From 4 layers, width 256, heads of 64, length 128, batch 8, one of width, length and batch
# varies; the figures are microseconds a token.
#
# Where a curve should not be flat. Optimizer: parameters that fit the caches cost less (14 bytes
# each); a tensor costs the misses of its row and of the pages of its five arrays, which 10,000
# elements and more hide. Step: attention grows with length, alone; the optimizer's work is shared
# by the tokens of a step; a narrow model's attention and elementwise work, which grow with width
# and not with its square, weigh more beside its parameters.
#
# Wants build/trainer (`make examples`) and build/bench/bench_growth (`make` it by that name).
part=$1 threads=${2:-2} build=${BUILD:-build}
export OMP_NUM_THREADS="$threads"

machine() {
    echo "# $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo 2>/dev/null | head -n 1), $threads thread(s)," \
         "load $(cut -d ' ' -f 1 /proc/loadavg 2>/dev/null): growth.sh $*"
}
once() { # WIDTH LENGTH BATCH STEPS: gemm attention elementwise optimizer rest total, in ms
    "$build/trainer" --device cpu --data "$tmp/text" --vocab 65 --layers 4 --heads $(($1 / 64)) --width "$1" \
        --block "$2" --batch "$3" --steps "$4" --threads "$threads" --log-every "$4" --eval-every "$4" \
        --eval-batches 1 --profile --quiet |
    awk '/^GEMM/ { g = $2 } /^attention/ { a = $2 } /^elementwise/ { e = $2 } /^optimizer [^s]/ { o = $2 }
         /^the rest/ { r = $5 } /^a step,/ { print g, a, e, o, r, $6 }'
}
point() { # SWEEP VALUE WIDTH LENGTH BATCH
    sweep=$1 value=$2; shift 2
    # Some seconds of 200 GFLOP/s, 4 steps at the least.
    steps=$(awk -v w="$1" -v t="$2" -v b="$3" 'BEGIN {
        n = int(3e11 / (6 * 4 * (12 * w * w + 2 * w * t) * t * b)); print (n < 4 ? 4 : n > 300 ? 300 : n) }')
    for i in $(seq "$rounds"); do once "$@" "$steps"; done | sort -n -k 6 | head -n 1 |
    awk -v s="$sweep" -v v="$value" -v w="$1" -v tokens=$(($2 * $3)) '{
        printf "step %s %d %d", s, v, 4 * 12 * w * w
        for (i = 1; i <= 6; i++) printf " %.3f", 1e3 * $i / tokens; print "" }'
}

case $part in
optimizer)
    machine "$@"
    "$build/bench/bench_growth" "${3:-1e9}" "$threads" ;;
step)
    rounds=${3:-2}
    tmp=$(mktemp -d) && trap 'rm -rf "$tmp"' EXIT
    awk 'BEGIN { for (i = 0; i < 65 * 800; i++) printf "%c", 33 + (i * i + int(i / 7)) % 65 }' >"$tmp/text"
    machine "$@"
    echo "# step: what varies, its value, parameters in blocks, us a token: GEMM, attention," \
         "elementwise, optimizer, host, all"
    for w in 64 128 256 512 1024; do point width $w $w 128 8; done
    for t in 32 64 128 256 512 1024; do point length $t 256 $t 8; done
    for b in 1 2 4 8 16 32 64; do point batch $b 256 128 $b; done ;;
*)
    echo "usage: tests/bench/growth.sh optimizer|step [THREADS [MOST|ROUNDS]]" >&2; exit 2 ;;
esac
