#!/bin/sh
# show.sh - what fp16 does to four models in which nothing is planted, and what a scaler and the guard do about it.
# SPDX-License-Identifier: MIT OR Unlicense
#
#   tests/bench/show.sh [MODEL...]      batch atmosphere gemma year; all when none is given. `make show`
#
#   SEEDS="1 2 3 4"     of atmosphere, gemma and year        BATCH_SEEDS="1337"     of batch
#   TEXT=FILE           what the GPT of `batch` reads [mixprec.h]
#
# PyTorch stands beside each, where $PYTHON can import torch. A row a run goes to BUILD/show/table,
# its losses to BUILD/show/*.log, and show.py makes BUILD/show/show.html of both.
build=${BUILD:-build} python=${PYTHON:-python3} out=${BUILD:-build}/show
SEEDS=${SEEDS:-1 2 3 4} BATCH_SEEDS=${BATCH_SEEDS:-1337} TEXT=${TEXT:-mixprec.h}
mkdir -p "$out" && rm -f "$out"/*.log "$out/table" || exit 1
torch=
"$python" -c 'import torch' 2>/dev/null && torch=1
[ "$torch" ] || echo 'PyTorch is not beside: python3 cannot import torch'

# Each model's ways are seeds apart: two run at a time.
model() {
    for seed in $SEEDS; do
        for way in fp32 bf16 fp16 scaler guard; do
            echo "$build/proof $1 $way $seed $out/$1-$way-$seed.log"
        done
        [ "$torch" ] && for way in fp32 bf16 fp16 scaler; do
            echo "$python tests/bench/proof_torch.py $1 $way $seed $out/$1-torch-$way-$seed.log"
        done
    done
}

# nanoGPT's configuration for a CPU, its loss averaged over 524,288 tokens, as GPT-2 was trained: each
# micro-batch of 768 counts as 1/683 of its own mean. fp16 alone has that factor and no other.
gpt() {
    echo "$build/trainer --data $TEXT --preset char-cpu --steps 300 --log-every 10 --eval-every 300 \
          --eval-batches 40 --quiet --seed $2 --out $out/gpt-$1-$2 --overwrite $3"
}
batch() {
    for seed in $BATCH_SEEDS; do
        gpt fp32 "$seed" '--dtype fp32'
        gpt bf16 "$seed" '--dtype bf16 --guard off'
        gpt fp16 "$seed" '--dtype fp16 --guard off --rule static --init-scale 0.00146412'
        gpt scaler "$seed" '--dtype fp16 --guard off --rule torch --init-scale 95.95'
        gpt guard "$seed" '--dtype fp16 --guard 16 --rule torch --init-scale 95.95'
        [ "$torch" ] && for way in fp32 bf16 fp16 scaler; do
            echo "$python tests/bench/torch_batch.py $build/trainer $TEXT $way $seed"
        done
    done
}

for name in ${*:-batch atmosphere gemma year}; do
    case $name in
    batch) batch ;;
    *)     model "$name" ;;
    esac
done >"$out/commands"
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive
tr '\n' '\0' <"$out/commands" | xargs -0 -n 1 -P "${JOBS:-2}" sh -c '
    text=$($0 2>&1)
    case $0 in
    *torch_batch*) echo "$text" ;;
    *trainer*) echo "batch $(echo "$0" | sed "s,.*/gpt-\([a-z0-9]*\)-\([0-9]*\) .*,\1 seed \2,"): $(echo "$text" | tail -n 1)" ;;
    *)          echo "$text" ;;
    esac' | tee "$out/table" | grep --line-buffered seed
"$python" tests/bench/show.py "$out" || echo 'no page: it needs Python'
