#!/bin/sh
# cuda_programs.sh - programs for a GPU, on the simulated CUDA. The trainer and llama train as on the CPU,
# and have the same bits with --graph; llama takes the memory that it plans. The benches run. Needs the programs that `make test-long`
# builds.
# SPDX-License-Identifier: MIT OR Unlicense
. tests/support/check.sh

build=${BUILD:-build} root=$PWD
case $build in /*) ;; *) build=$root/$build ;; esac
if [ ! -x "$build/trainer_sim" ] || [ ! -x "$build/bench_cuda_sim" ]; then
    skip "CUDA's headers"
    report
    exit
fi
export CUDASIM_COUNT=1
awk 'BEGIN { for (i = 0; i < 150; i++)
    printf "%s jumps %d times.\n", i % 3 ? "The fox" : "A dog", i % 7 }' >"$tmp/text"

# --- the trainer -------------------------------------------------------------------------
model='--layers 1 --heads 1 --width 32 --block 8 --batch 2 --eval-batches 1 --eval-every 10
       --threads 1 --steps 7 --log-every 3 --lr 1e-2 --sample 0'

# train NAME OPTION...: leaves its folder $tmp/NAME, and what it said in $tmp/NAME.log.
train() {
    name=$1; shift
    "$build/trainer_sim" --data "$tmp/text" $model --out "$tmp/$name" "$@" \
        >"$tmp/$name.log" 2>&1 || { cat "$tmp/$name.log"; return 1; }
}
replays() { tail -n 3 "$tmp/$1.log"; grep -q "^cudasim: .* $2 replays" "$tmp/$1.log"; }
# Rows of the log without the times: those differ.
losses() { sed -n '/"scale":/{ s/"ms":[^,]*,//; s/,"seconds":.*//; p; }' "$tmp/$1/metrics.jsonl"; }
same_losses() {
    losses "$1" >"$tmp/a"; losses "$2" >"$tmp/b"
    [ "$(wc -l <"$tmp/a")" -ge 4 ] && diff "$tmp/a" "$tmp/b"
}
same_weights() { cmp "$tmp/$1/checkpoint.safetensors" "$tmp/$2/checkpoint.safetensors"; }
# Each loss and validation loss of $1 within 0.01 of $2's.
near_losses() {
    for i in "$1" "$2"; do
        awk -F '[:,]' '/"scale":/ { loss = val = "none"; for (f = 1; f < NF; f++) {
            if ($f == "\"loss\"") loss = $(f + 1); if ($f == "\"val\"") val = $(f + 1) }
            print loss, val }' "$tmp/$i/metrics.jsonl" >"$tmp/$i.losses"
    done
    paste "$tmp/$1.losses" "$tmp/$2.losses" | awk '
        function far(a, b) { return a != b && !(a - b < 0.01 && b - a < 0.01) }
        { print; bad += far($1, $3) + far($2, $4) } END { exit bad || NR < 4 }'
}

# Steps 1, 3, 6 and 7 are not replayed: the first allocates, the others read their loss.
for kind in 'fp16 1 1 3' 'bf16 2 3 9'; do
    set -- $kind
    options="--guard off --dtype $1 --level $2 --accumulate $3 --dropout 0.1"
    check "$1, level $2: trains"                  train "$1" --device cuda $options
    check "$1, level $2: trains by graphs"        train "$1.graph" --device cuda --graph $options
    check "$1, level $2: nothing was replayed"    replays "$1" 0
    check "$1, level $2: $4 batches were"         replays "$1.graph" "$4"
    check "$1, level $2: the same losses"         same_losses "$1" "$1.graph"
    check "$1, level $2: the same weights"        same_weights "$1" "$1.graph"
done
# Sums and GELU in the products' passes. Of seven steps each has the sums of four layers' biases, and
# GELU forward and backward; two validations have GELU forward.
joined() { tail -n 3 "$tmp/$1.log"; grep -q "^cudasim: .* $2 epilogues" "$tmp/$1.log"; }
tells() { grep -q -e "$2" "$tmp/$1.log" || { cat "$tmp/$1.log"; return 1; }; }
gelu='--device cuda --guard off --dtype bf16 --bias on --activation gelu-tanh'
check 'epilogues: trains without'                 train apart $gelu
check 'epilogues: there was none'                 joined apart 0
check 'epilogues: trains with'                    train joined $gelu --epilogues on
check 'epilogues: sums and GELU were joined'      joined joined 44
check 'epilogues: the losses are the same'        near_losses joined apart
check 'epilogues: only sums'                      train sums $gelu --epilogues bias
check 'epilogues: those were joined'              joined sums 28
check 'epilogues: only GELU'                      train gelus $gelu --epilogues gelu
check 'epilogues: that was joined'                joined gelus 16
check 'epilogues: trains by graphs'               train joined.graph $gelu --epilogues on --graph
check 'epilogues: the same losses'                same_losses joined joined.graph
check 'epilogues: the same weights'               same_weights joined joined.graph
check 'epilogues: trains with a guard'            train guarded $gelu --epilogues gelu --guard on
check 'epilogues: a guard keeps GELU apart'       joined guarded 0
check 'epilogues: which is told'                  tells guarded '--epilogues gelu does nothing here'
check 'fp16: trains on the CPU'                   train fp16.cpu --device cpu --dtype fp16 --dropout 0.1
check 'fp16: the losses are the CPU'"'"'s'          near_losses fp16 fp16.cpu
# Recipes: NVFP4's rounding draws anew in each replay. The CPU sums in another order, which turns some
# roundings over.
for kind in fp8 fp8-delayed nvfp4; do
    options="--guard off --dtype bf16 --recipe $kind"
    check "$kind: trains"                         train "$kind" --device cuda $options
    check "$kind: trains by graphs"               train "$kind.graph" --device cuda --graph $options
    check "$kind: 3 batches were replayed"        replays "$kind.graph" 3
    check "$kind: the same losses"                same_losses "$kind" "$kind.graph"
    check "$kind: the same weights"               same_weights "$kind" "$kind.graph"
done
check 'fp8: trains on the CPU'                    train fp8.cpu --device cpu --guard off --dtype bf16 --recipe fp8
check 'fp8: the losses are the CPU'"'"'s'           near_losses fp8 fp8.cpu
narrow="--device cuda --guard off --dtype bf16 --recipe fp8 --narrow-products --profile"
narrow_ran() { grep -Eq '^products: [0-9]+ as they are, [1-9][0-9]* in fp8' "$tmp/fp8.narrow.log"; }
check 'fp8: trains in narrow products'            train fp8.narrow $narrow
check 'fp8: the losses are those of bf16 products' near_losses fp8.narrow fp8
check 'fp8: cuBLASLt multiplied codes'            narrow_ran

# --- llama --------------------------------------------------------------------------------
# tune NAME OPTION...: as train; a small model of two layers.
model_of_llama() { mkdir "$tmp/model" && "$build/test_llama" --make "$tmp/model" 2; }
tune() {
    name=$1; shift
    "$build/llama_sim" "$tmp/model" --data "$tmp/text" --block 8 --batch 1 --steps 7 --log-every 3 --lr 1e-2 --threads 1 \
        --sample 2 --temperature 0 --out "$tmp/$name" "$@" >"$tmp/$name.log" 2>&1 || { cat "$tmp/$name.log"; return 1; }
}
refuses_llama() {
    text=$1; shift
    ! "$build/llama_sim" "$tmp/model" --data "$tmp/text" "$@" >"$tmp/refused" 2>&1 && grep -q "$text" "$tmp/refused" || { cat "$tmp/refused"; return 1; }
}
same_file() { cmp "$tmp/$1/$3" "$tmp/$2/$3"; }
# What a step was said to need, and what the device gave: at most a twentieth and 128 KiB more, for the device's own.
as_planned() {
    sed -n 's/^memory  *a step needs about \([0-9.]*\) \([KM]\)iB.*/\1 \2/p; s/^memory  *\([0-9.]*\) \([KM]\)iB were taken.*/\1 \2/p' "$tmp/$1.log" >"$tmp/a"
    cat "$tmp/a"
    awk '{ bytes[NR] = $1 * ($2 == "M" ? 1024 : 1) } END { exit !(NR == 2 && bytes[1] > 0 && bytes[1] <= bytes[2] && bytes[2] <= 1.05 * bytes[1] + 128) }' "$tmp/a"
}
if [ -x "$build/llama_sim" ] && [ -x "$build/test_llama" ]; then
    check 'llama: a model'                         model_of_llama
    check 'llama: what a GPU cannot hold is refused' refuses_llama 'a step needs about .* GiB, and the GPU has 79.0 GiB; with --recompute' \
        --device cuda --batch 4096 --block 32768
    for kind in 'full bf16 1' 'full fp16 2 --recompute' 'lora bf16 2 --lora 2 --accumulate 2' 'codes bf16 1 --lora 2 --frozen q8_0' 'lora fp16 1 --lora 2'; do
        set -- $kind; what="$1 $2, level $3"; options="--guard off --retry 0 --dtype $2 --level $3"; shift 3
        check "llama, $what: trains"               tune gpu --device cuda --overwrite $options "$@"
        check "llama, $what: as planned"           as_planned gpu
        check "llama, $what: trains by graphs"     tune graph --device cuda --graph --overwrite $options "$@"
        check "llama, $what: batches were replayed" sh -c "grep -q '^cudasim: .* [1-9][0-9]* replays' '$tmp/graph.log'"
        check "llama, $what: the same bytes"       same_file gpu graph checkpoint.safetensors
        check "llama, $what: trains on the CPU"    tune cpu --overwrite $options "$@"
        check "llama, $what: the losses are the CPU's" near_losses gpu cpu
        rm -rf "$tmp/gpu" "$tmp/graph" "$tmp/cpu"
    done
else
    skip 'llama on the simulated GPU'
fi

# --- the benches -------------------------------------------------------------------------
bench() {
    "$build/bench_cuda_sim" --tiny >"$tmp/bench" 2>&1 || { tail -n 5 "$tmp/bench"; return 1; }
    tail -n 3 "$tmp/bench"
    grep -q '^SIMULATED' "$tmp/bench" && grep -Eq '^[0-9]{2,3} lines$' "$tmp/bench"
}
# Each kernel of the table that the companion has is called.
all_kernels() {
    sed -n '/^typedef struct mixp_kernels/,/^}/s/.*(\*\([a-z_]*\))(.*/\1/p' \
        mixprec.h >"$tmp/kernels"
    [ "$(wc -l <"$tmp/kernels")" -ge 29 ] || return 1
    while read -r kernel; do
        grep -q "mixpi_cuda_$kernel\b" mixprec_cuda.cu || continue
        grep -q "table->$kernel(" tests/bench/bench_cuda.cpp ||
            { echo "no line for $kernel"; return 1; }
    done <"$tmp/kernels"
}
# refuses TEXT OPTION...
refuses() {
    text=$1; shift
    ! "$build/bench_cuda_sim" "$@" >"$tmp/refused" 2>&1 && grep -q "$text" "$tmp/refused"
}
# A figure of the lines that were timed against a copy.
drawn() { awk -f tests/bench/bars.awk "$tmp/bench" >"$tmp/figure.svg" && grep -q '</svg>' "$tmp/figure.svg"; }
one_dtype() {
    "$build/bench_cuda_sim" --tiny --part training --dtype f32 --epilogues 0 >"$tmp/f32" 2>&1 || { cat "$tmp/f32"; return 1; }
    grep -q '^GPT-2 .* f32 level 1, as a graph' "$tmp/f32" && ! grep -q 'f16' "$tmp/f32"
}
check 'bench_cuda has a line for each kernel'     all_kernels
check 'bench_cuda runs'                           bench
check 'its table is drawn'                        drawn
check 'bench_cuda measures one dtype'             one_dtype
check 'bench_cuda refuses an unknown option'      refuses 'no such option' --nosuch 1
check 'bench_cuda refuses an unknown dtype'       refuses 'f32, f16 or bf16' --dtype fp8
if "${PYTHON:-python3}" -c 'import torch' 2>/dev/null; then
    check 'torch_cuda.py runs' "${PYTHON:-python3}" tests/bench/torch_cuda.py --device cpu --tiny
    check 'torch_first.py runs' "${PYTHON:-python3}" tests/bench/torch_first.py --device cpu --tiny bf16-eager fp16-eager attention
else
    skip 'torch_cuda.py and torch_first.py (no PyTorch)'
fi

report
