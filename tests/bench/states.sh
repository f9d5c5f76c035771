#!/bin/sh
# states.sh - what optimizer states of fewer bytes cost in quality: nanoGPT's CPU configuration in
# bf16, the validation loss of each kind of state after the same steps, over several seeds.
# SPDX-License-Identifier: MIT OR Unlicense
#
#   tests/bench/states.sh TEXT [SEEDS [STEPS [THREADS]]]
#
# TEXT is the corpus (tinyshakespeare). A line a run; then, for each kind, the mean over the seeds
# (4), how far it lies from that of f32 states of the same level, and the deviation between seeds.
# STEPS (2000) of 4 seeds and 7 kinds take about an hour on 2 cores. Wants build/trainer
# (`make examples`).
text=$1 seeds=${2:-4} steps=${3:-2000} threads=${4:-2} build=${BUILD:-build}
[ -r "$text" ] || { echo "usage: tests/bench/states.sh TEXT [SEEDS [STEPS [THREADS]]]" >&2; exit 2; }
tmp=$(mktemp -d) && trap 'rm -rf "$tmp"' EXIT

run() { # LEVEL MOMENTS MASTERS SEED: the last validation loss
    rm -rf "$tmp/out"
    set -- --level "$1" --moments "$2" --masters "$3" --seed "$4"
    "$build/trainer" --preset char-cpu --data "$text" --dtype bf16 --steps "$steps" \
        --threads "$threads" --eval-every "$steps" --sample 0 --quiet --out "$tmp/out" "$@" \
        >"$tmp/log" 2>&1 || { cat "$tmp/log" >&2; exit 1; }
    "$build/trainer" --out "$tmp/out" --resume --eval-only --threads "$threads" |
        awk '$1 == "val" { print $2 }'
}

sed -n 's/^model name[^:]*: //p' /proc/cpuinfo 2>/dev/null | head -n 1
echo "bf16, $steps steps, $seeds seeds, $threads threads"
echo "level moments masters seed loss"
for seed in $(seq "$seeds"); do
    for kind in '1 f32 f32' '1 bf16 f32' '1 8bit f32' \
                '3 f32 f32' '3 bf16 16bit' '3 8bit 16bit' '3 8bit 8bit'; do
        loss=$(run $kind "$seed") || exit 1
        echo "$kind $seed $loss" | tee -a "$tmp/all"
    done
done
echo "level moments masters: mean, of f32 states, deviation between seeds"
awk '{ kind = $1 " " $2 " " $3
       if (!(kind in n)) order[++kinds] = kind
       n[kind]++; sum[kind] += $5; squares[kind] += $5 * $5 }
     END { for (i = 1; i <= kinds; i++) {
               k = order[i]; mean = sum[k] / n[k]
               base = substr(k, 1, 1) " f32 f32"
               spread = squares[k] / n[k] - mean * mean
               printf "%-14s %.4f  %+.4f  %.4f\n", k, mean, mean - sum[base] / n[base],
                      sqrt(spread > 0 ? spread : 0) } }' "$tmp/all"
