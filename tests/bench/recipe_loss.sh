#!/bin/sh
# recipe_loss.sh - the validation loss that each recipe below 16 bits reaches, beside bf16: nanoGPT's
# configuration for a CPU, the same weights and batches of a seed for each.
# SPDX-License-Identifier: MIT OR Unlicense
#
#   tests/bench/recipe_loss.sh TEXT [STEPS [SEEDS]]     2000 steps, seeds "1 2 3 4"
#
# One thread a run, JOBS runs at a time (2). TEXT is the corpus (tinyshakespeare for the published
# figures). Wants build/trainer (`make examples`). A row a run, then for each recipe the mean of
# its differences to bf16 with the smallest and the largest. A second call goes on with rows that are
# already in BUILD/recipe_loss.
text=$1 steps=${2:-2000} seeds=${3:-1 2 3 4}
build=${BUILD:-build} out=${BUILD:-build}/recipe_loss
[ -r "$text" ] || { echo "usage: tests/bench/recipe_loss.sh TEXT [STEPS [SEEDS]]" >&2; exit 2; }
mkdir -p "$out" || exit 1
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive build out text steps

for seed in $seeds; do
    for way in bf16 fp8 fp8-delayed fp8-block mxfp8 nvfp4 nvfp4:stochastic nvfp4:hadamard nvfp4:2d nvfp4:all; do
        [ -s "$out/$way.$steps.$seed" ] || echo "$way $seed"
    done
done | xargs -n 2 -P "${JOBS:-2}" sh -c '
    recipe=${0%:*} row=$out/$0.$steps.$1
    options="--recipe $recipe"
    [ "$0" = bf16 ] && options=
    [ "$recipe" = "$0" ] || options="$options --recipe-without ${0#*:}"
    "$build/trainer" --preset char-cpu --data "$text" --dtype bf16 $options --seed "$1" --steps "$steps" \
        --eval-every "$steps" --eval-batches 200 --log-every "$steps" --sample 0 |
        sed -n "s/^best val \([0-9.]*\) at.*/\1/p" >"$row.part" && mv "$row.part" "$row"'

echo "nanoGPT CPU configuration, $steps steps, seeds $seeds: validation loss"
for seed in $seeds; do
    for row in "$out"/*."$steps.$seed"; do
        way=${row##*/}
        echo "${way%%.*} $seed $(cat "$row") $(cat "$out/bf16.$steps.$seed")"
    done
done | awk '
    { loss[$1] = loss[$1] " " $3; d = $3 - $4; sum[$1] += d; n[$1]++
      if (n[$1] == 1 || d < low[$1]) low[$1] = d
      if (n[$1] == 1 || d > high[$1]) high[$1] = d }
    END { for (w in n)
        printf "%-18s%s   beside bf16 %+.4f (%+.4f to %+.4f)\n", w, loss[w], sum[w] / n[w], low[w], high[w] }' | sort
