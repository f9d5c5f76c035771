#!/bin/sh
# gpu.sh - everything that wants a GPU, on a bare machine: nvcc, no network, PyTorch if it is there.
# SPDX-License-Identifier: MIT OR Unlicense
#
#   tests/gpu.sh [--dry] [PART...]
#
#   tests       the CUDA tests, compiled for this GPU                                  240 s
#   kernels     every kernel against a copy of its bytes, and PyTorch's equivalents     150 s
#   training    steps of GPT-2 124M and of the character GPT, step by step and as a graph,
#               with and without sums and GELU in the products' passes                 240 s
#   peers       the same steps by PyTorch, eager and compiled                          300 s
#   nanogpt     nanoGPT's GPU configuration to its published loss of 1.47 to 1.50, in
#               fp16 and bf16; DATA is tinyshakespeare's text                          240 s
#   sanitizer   the tests under compute-sanitizer's four tools                         480 s
#
# Without a PART all of them, in this order: half an hour at most with the build. Where a command may
# take only minutes, name parts: what is built stays, and a part builds only what it needs. Each has
# its own time limit and writes its table into OUT (tests/bench/results) line by line: a part that is
# cut, or a machine that is taken away, leaves what was measured. A part that fails does not keep the
# next from running. Figures are drawn beside the tables, as SVG.
# --dry: the same on the simulated GPU, with tiny shapes, to see that the script runs.
# Yours to set: CUDA, BUILD, PYTHON, OUT, DATA, SCALE (of the limits), BATCH.
cd "$(dirname "$0")/.." || exit 1

dry=
[ "${1:-}" = --dry ] && { dry=1; shift; }
only=                               # --run PART: this one alone, without its table
[ "${1:-}" = --run ] && { only=$2; shift; }
all='tests kernels training peers nanogpt sanitizer'
parts=${*:-$all}
build=${BUILD:-build} python=${PYTHON:-python3} out=${OUT:-tests/bench/results} scale=${SCALE:-1}
data=${DATA:-tinyshakespeare.txt} day=$(date +%F)
jobs=$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
case $build in /*) ;; *) build=$PWD/$build ;; esac
for part in $parts; do
    case " $all " in *" $part "*) ;;
    *) echo "gpu.sh: no such part: $part ($all)" >&2; exit 2 ;;
    esac
done
mkdir -p "$out" || exit 1
failed=0

# guarded SECONDS COMMAND...: 124 where they are over. Without timeout(1) it may take for ever.
guarded() {
    if command -v timeout >/dev/null 2>&1; then timeout -k 10 "$@"; else shift; "$@"; fi
}
has_torch() {
    guarded 60 "$python" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null
}

# --- what the machine is ---------------------------------------------------------------------
clocks() {
    [ "$dry" ] || nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm,clocks.mem,\
clocks.max.sm,power.draw,power.limit,temperature.gpu --format=csv,noheader 2>/dev/null
}
machine() {
    echo "$day, commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
    if [ "$dry" ]; then echo 'SIMULATED: this shows that the script runs; its figures mean nothing'
    else "${CUDA:-/usr/local/cuda}/bin/nvcc" --version 2>/dev/null | sed -n 's/.*release/nvcc release/p'
    fi
    clocks
}

# part NAME SECONDS: run_NAME's output, as it comes, into NAME's table.
part() {
    name=$1 seconds=$(($2 * scale))
    [ "$seconds" -gt 0 ] || seconds=1
    file="$out/${day}_gpu_$name.txt"
    [ "$dry" ] && file="$out/dry_gpu_$name.txt"
    { echo "# $name"; echo; machine; echo; } >"$file"
    began=$(date +%s)
    guarded "$seconds" sh "$PWD/tests/gpu.sh" ${dry:+--dry} --run "$name" >>"$file" 2>&1 </dev/null
    status=$?
    { echo; clocks
      [ "$status" = 124 ] && echo "cut after $seconds s: what stands above was measured"
      echo "$(($(date +%s) - began)) s, status $status"; } >>"$file"
    [ "$status" = 0 ] || failed=$((failed + 1))
    draw "$file"
    echo "$name: status $status, $(($(date +%s) - began)) s, $file"
}
# draw TABLE: its times beside it, where it has some.
draw() {
    awk -f tests/bench/bars.awk "$1" >"${1%.txt}.svg" || rm -f "${1%.txt}.svg"
}

# --- the parts -------------------------------------------------------------------------------
gpu_tests() { for f in tests/test_cuda*.cpp; do
    case $f in *cudasim*) ;; *) echo "$build/gpu/$(basename "$f" .cpp)" ;; esac; done; }

# Four at a time: most of a test is its reference, on the CPU.
run_tests() {
    if [ "$dry" ]; then MIXPREC_TEST_QUICK=1 tests/run.sh "$build/test_cuda"; return; fi
    # shellcheck disable=SC2046
    tests/run.sh -t 200 -j 4 $(gpu_tests)
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
models() { if [ "$dry" ]; then echo char; else echo gpt2 char; fi; }
run_kernels() {
    bench --part kernels --rounds 7; status=$?
    torch --part kernels --rounds 7 || status=1
    return $status
}
run_training() {
    status=0
    for model in $(models); do
        bench --part training --model "$model" --rounds 5 || status=1
        echo
    done
    return $status
}
run_peers() {
    status=0
    for model in $(models); do torch --part training --model "$model" --rounds 5 || status=1; done
    return $status
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
    status=0
    for dtype in fp16 bf16; do echo "## $dtype"; train "$dtype" || status=1; done
    return $status
}

if [ "$only" ]; then
    "run_$only"
    exit
fi

# --- build, run ------------------------------------------------------------------------------
# What a part runs. One compile of the companion serves almost all of them.
needs() {
    case $1${dry:+.dry} in
    tests | sanitizer)           gpu_tests ;;
    tests.dry)                   echo "$build/test_cuda" ;;
    kernels | training)          echo "$build/bench_cuda" ;;
    kernels.dry | training.dry)  echo "$build/bench_cuda_sim" ;;
    nanogpt)                     echo "$build/tiny_gpt_cuda" ;;
    nanogpt.dry)                 echo "$build/tiny_gpt_sim" ;;
    esac
}
targets=$(for part in $parts; do needs "$part"; done | sort -u)
began=$(date +%s)
if [ "$targets" ]; then
    # shellcheck disable=SC2086
    ${MAKE:-make} -s -k -j "$jobs" BUILD="$build" ${CUDA:+CUDA="$CUDA"} $targets ||
        { echo 'gpu.sh: not all of it builds; what does is run' >&2; failed=1; }
fi
echo "built in $(($(date +%s) - began)) s"

for part in $parts; do
    case $part in
    tests)     part tests 240 ;;
    kernels)   part kernels 150 ;;
    training)  part training 240 ;;
    peers)     part peers 300 ;;
    nanogpt)   part nanogpt 240 ;;
    sanitizer) part sanitizer 480 ;;
    esac
done
[ "$failed" -eq 0 ]
