#!/bin/sh
# gpu.sh - everything that wants a GPU, on a bare machine: nvcc, no network, PyTorch if it is there.
# SPDX-License-Identifier: MIT OR Unlicense
#
#   tests/gpu.sh [--dry] [PART...]
#
#   tests       the CUDA tests, compiled for this GPU                                  180 s
#   kernels     every kernel against a copy of its bytes, and PyTorch's equivalents     120 s
#   training    steps of the character GPT and of GPT-2 124M, with and without a graph and
#               epilogues, beside PyTorch, eager and compiled                           420 s
#   sanitizer   the tests under compute-sanitizer's four tools                          900 s
#   nanogpt     nanoGPT's GPU configuration to its published loss of 1.47 to 1.50, in
#               fp16 and bf16; DATA is tinyshakespeare's text                           1200 s
#
# Without a PART all of them, in this order. Each has its own time limit and writes its table into
# OUT (tests/bench/results) while it runs: a part that is cut, or a machine that is taken away,
# leaves what was measured. --dry: the same on the simulated GPU, with tiny shapes, to see that
# the script runs. Yours to set: CUDA, BUILD, PYTHON, OUT, DATA, SCALE (of the limits), BATCH.
cd "$(dirname "$0")/.." || exit 1

dry=
[ "${1:-}" = --dry ] && { dry=1; shift; }
only=                               # --run PART: this one alone, without its table
[ "${1:-}" = --run ] && { only=$2; shift; }
parts=${*:-tests kernels training sanitizer nanogpt}
build=${BUILD:-build} python=${PYTHON:-python3} out=${OUT:-tests/bench/results} scale=${SCALE:-1}
data=${DATA:-tinyshakespeare.txt} day=$(date +%F)
jobs=$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
case $build in /*) ;; *) build=$PWD/$build ;; esac
for part in $parts; do
    case $part in tests | kernels | training | sanitizer | nanogpt) ;;
    *) echo "gpu.sh: no such part: $part (tests kernels training sanitizer nanogpt)" >&2; exit 2 ;;
    esac
done
mkdir -p "$out" || exit 1
failed=0

has_torch() { "$python" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null; }

# --- what the machine is ---------------------------------------------------------------------
machine() {
    echo "$day, commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
    if [ "$dry" ]; then echo 'SIMULATED: this shows that the script runs; its figures mean nothing'
    else nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit \
             --format=csv,noheader 2>/dev/null
         "${CUDA:-/usr/local/cuda}/bin/nvcc" --version 2>/dev/null | sed -n 's/.*release/nvcc release/p'
    fi
    "$python" -c 'import torch; print("PyTorch", torch.__version__)' 2>/dev/null || echo 'no PyTorch'
}

# part NAME SECONDS: run_NAME's output, as it comes, into NAME's table.
part() {
    name=$1 seconds=$(($2 * scale))
    [ "$seconds" -gt 0 ] || seconds=1
    file="$out/${day}_gpu_$name.txt"
    [ "$dry" ] && file="$out/dry_gpu_$name.txt"
    guard=; command -v timeout >/dev/null 2>&1 && guard="timeout -k 10 $seconds"
    { echo "# $name"; echo; machine; echo; } >"$file"
    began=$(date +%s)
    $guard sh "$PWD/tests/gpu.sh" ${dry:+--dry} --run "$name" >>"$file" 2>&1
    status=$?
    [ "$status" = 124 ] && echo "cut after $seconds s: what stands above was measured" >>"$file"
    echo "$(($(date +%s) - began)) s, status $status" >>"$file"
    [ "$status" = 0 ] || failed=$((failed + 1))
    echo "$name: status $status, $(($(date +%s) - began)) s, $file"
}

# --- the parts -------------------------------------------------------------------------------
gpu_tests() { for f in tests/test_cuda*.cpp; do
    case $f in *cudasim*) ;; *) echo "$build/gpu/$(basename "$f" .cpp)" ;; esac; done; }

run_tests() {
    if [ "$dry" ]; then MIXPREC_TEST_QUICK=1 tests/run.sh "$build/test_cuda"; return; fi
    # shellcheck disable=SC2046
    tests/run.sh -t 120 $(gpu_tests)
}
bench() { if [ "$dry" ]; then "$build/bench_cuda_sim" --tiny "$@"
          else "$build/bench_cuda" --batch "${BATCH:-64}" "$@"; fi; }
torch() {
    echo
    if [ "$dry" ]; then
        "$python" -c 'import torch' 2>/dev/null || { echo 'no PyTorch'; return; }
        "$python" tests/bench/torch_cuda.py --device cpu --tiny "$@"
    elif has_torch; then "$python" tests/bench/torch_cuda.py --batch "${BATCH:-64}" "$@"
    else echo 'no PyTorch that sees the GPU'; fi
}
run_kernels() { bench --part kernels --rounds 7 && torch --part kernels --rounds 7; }
run_training() {
    for model in char ${dry:-gpt2}; do
        [ "$model" = 1 ] && continue
        bench --part training --model "$model" --rounds 5 || return 1
        echo '## with sums and GELU in the products'"'"' passes'
        bench --part training --model "$model" --rounds 5 --epilogues 3 || return 1
        torch --part training --model "$model" --rounds 5 || return 1
        echo
    done
}
run_sanitizer() {
    if [ "$dry" ]; then tests/gpu_sanitizer.sh; return 0; fi
    # shellcheck disable=SC2046
    tests/gpu_sanitizer.sh $(gpu_tests)
}
train() { # DTYPE
    if [ "$dry" ]; then
        "$build/tiny_gpt_sim" --device cuda --dtype "$1" --data mixprec.h --layers 1 --heads 1 \
            --width 32 --block 8 --batch 2 --eval-batches 1 --threads 1 --steps 3 --sample 0 \
            --out "$build/gpu_sh_$1" --overwrite
    else
        "$build/tiny_gpt_cuda" --preset char-gpu --device cuda --graph --dtype "$1" \
            --data "$data" --sample 0 --out "$build/gpu_sh_$1" --overwrite
    fi
}
run_nanogpt() {
    if [ ! "$dry" ] && [ ! -r "$data" ]; then
        echo "skipped: DATA ($data) cannot be read; it is tinyshakespeare's text"; return 0; fi
    for dtype in fp16 bf16; do echo "## $dtype"; train "$dtype" || return 1; done
}

if [ "$only" ]; then
    "run_$only"
    exit
fi

# --- build, run ------------------------------------------------------------------------------
if [ "$dry" ]; then targets="$build/bench_cuda_sim $build/tiny_gpt_sim $build/test_cuda"
else targets="$(gpu_tests) $build/bench_cuda $build/tiny_gpt_cuda"; fi
# shellcheck disable=SC2086
${MAKE:-make} -s -j "$jobs" BUILD="$build" $targets || { echo 'gpu.sh: it does not build' >&2; exit 1; }

for part in $parts; do
    case $part in
    tests)     part tests 180 ;;
    kernels)   part kernels 120 ;;
    training)  part training 420 ;;
    sanitizer) part sanitizer 900 ;;
    nanogpt)   part nanogpt 1200 ;;
    esac
done
[ "$failed" -eq 0 ]
