#!/bin/sh
# recipe_loss.sh - the validation loss that each recipe below 16 bits reaches, beside bf16: nanoGPT's
# configuration for a CPU, the same weights and batches of a seed for each.
# SPDX-License-Identifier: MIT OR Unlicense
#
#   tests/bench/recipe_loss.sh TEXT [STEPS [SEEDS]]     2000 steps, seeds "1 2 3 4"
#
# One thread a run, JOBS runs at a time (2). TEXT is the corpus (tinyshakespeare for the published
# figures). Wants build/trainer (`make examples`). For each recipe: the losses of the seeds, then the
# mean of their differences to bf16 with the smallest and the largest. A second call goes on with rows
# that are already in BUILD/recipe_loss.
#
# WAYS are the recipes, and must contain bf16. VOCAB pads the vocabulary (auto: no padding): the head of a recipe has
# a multiple of 16 rows. A way is fp32, bf16 or a recipe, and may go on:
#   :PART     the trainer's --recipe-without PART
#   @NAME     only of weights of that name, as in fp8@*wte* of the head
#   +w, +x, +both, +rows      --over6 w, x or both; --row-scaled
every='bf16 fp8 fp8-delayed fp8-block mxfp8 nvfp4 nvfp4:stochastic nvfp4:hadamard nvfp4:2d nvfp4:all'
text=$1 steps=${2:-2000} seeds=${3:-1 2 3 4}
build=${BUILD:-build} out=${BUILD:-build}/recipe_loss
[ -r "$text" ] || { echo "usage: tests/bench/recipe_loss.sh TEXT [STEPS [SEEDS]]" >&2; exit 2; }
mkdir -p "$out" || exit 1
vocab=${VOCAB:-auto}
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive build out text steps vocab

for seed in $seeds; do
    for way in ${WAYS:-$every}; do
        [ -s "$out/$way.$steps.$seed" ] || echo "$way $seed"
    done
done | xargs -n 2 -P "${JOBS:-2}" sh -c '
    way=${0%%+*} row=$out/$0.$steps.$1
    options="--dtype bf16 --recipe ${way%:*}"
    case $0 in bf16) options="--dtype bf16" ;; fp32) options="--dtype fp32" ;; *:*) options="$options --recipe-without ${way#*:}" ;; *@*) options="--dtype bf16 --recipe-of ${way#*@}=${way%@*}" ;; esac
    case $0+ in *+w+*) options="$options --over6 w" ;; *+x+*) options="$options --over6 x" ;; *+both+*) options="$options --over6 both" ;; esac
    case $0+ in *+rows+*) options="$options --row-scaled" ;; esac
    "$build/trainer" --preset char-cpu --data "$text" --vocab "$vocab" $options --seed "$1" --steps "$steps" \
        --eval-every "$steps" --eval-batches 200 --log-every "$steps" --sample 0 |
        sed -n "s/^best val \([0-9.]*\) at.*/\1/p" >"$row.part" && mv "$row.part" "$row"'

echo "nanoGPT CPU configuration, $steps steps, seeds $seeds: validation loss"
for seed in $seeds; do
    for way in ${WAYS:-$every}; do
        echo "$way $seed $(cat "$out/$way.$steps.$seed") $(cat "$out/bf16.$steps.$seed")"
    done
done | awk '
    { loss[$1] = loss[$1] " " $3; d = $3 - $4; sum[$1] += d; n[$1]++
      if (n[$1] == 1 || d < low[$1]) low[$1] = d
      if (n[$1] == 1 || d > high[$1]) high[$1] = d }
    END { for (w in n)
        printf "%-22s%s   beside bf16 %+.4f (%+.4f to %+.4f)\n", w, loss[w], sum[w] / n[w], low[w], high[w] }' | sort
