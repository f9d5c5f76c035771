#!/bin/sh
# gpu.sh - runs everything that needs a GPU, on a bare machine: needs nvcc but no network; uses
# PyTorch if it is installed.
# SPDX-License-Identifier: MIT OR Unlicense
#
#   tests/cuda/gpu.sh [--dry] first          the most important figures, in eight minutes
#   tests/cuda/gpu.sh [--dry] [PART...]
#   tests/cuda/gpu.sh pack DIR               compiles the companion here, for OBJECTS=DIR elsewhere
#
# first: training in bf16 at level 2 with epilogues off, on and measured; the 15 products by the
# first algorithm and by the best of 8; attention; the loss both ways; then the quick CUDA tests.
# Each line has the figure, the prediction of tests/support/ledger.h and the roofline. The bench is built
# and run before any test is compiled. With objects from elsewhere, all of it takes under eight
# minutes.
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
# Under a time limit, set TOOLS=memcheck: all four tools take far longer than a command may. The
# peers part compiles each model; its f32 part comes last.
#
# Without a PART all parts run, in this order: at most half an hour, including the build. If a
# command may take only minutes, name parts: built files stay, and a part builds only what it needs.
# Each part has its own time limit and writes its table into OUT (tests/bench/results) line by line.
# If a part is cut off, or the machine is taken away, the measurements so far remain. If a part
# fails, the next part still runs. Figures are drawn beside the tables, as SVG.
# --dry: runs the same parts on the simulated GPU, with tiny shapes, to check the script.
# Variables: CUDA (default: the folder of the nvcc on PATH), MAKE (without make, gpu_build.sh
# builds), BUILD, PYTHON, OUT, DATA, SCALE (multiplies the limits), BATCH, OBJECTS. OBJECTS is a
# folder that `pack` filled, with the same nvcc and from the same sources, for ARCH (default sm_90).
# On a borrowed machine, take that folder along, and put DATA in an ignored folder of the checkout:
# nothing outside the checkout is copied there.
cd "$(dirname "$0")/../.." || exit 1

# --- what there is to build with ------------------------------------------------------------
if [ -z "${CUDA:-}" ]; then
    nvcc=$(command -v nvcc) && CUDA=$(dirname "$(dirname "$(readlink -f "$nvcc")")")
    CUDA=${CUDA:-/usr/local/cuda}
fi
make=${MAKE:-make}
command -v "$make" >/dev/null 2>&1 || make=
has_library() {
    for file in "$CUDA"/lib64/lib"$1".so* "$CUDA"/lib/lib"$1".so* "$CUDA"/targets/*/lib/lib"$1".so*; do
        [ -e "$file" ] && return 0
    done
    ldconfig -p 2>/dev/null | grep -q "lib$1\.so"
}
# Says what is missing; 2 if anything is.
is_complete() {
    status=0
    [ -x "$CUDA/bin/nvcc" ] || { status=2
        echo "gpu.sh: nvcc is missing: put it on PATH, or set CUDA to the toolkit's folder"; }
    has_library cublasLt || { status=2
        echo "gpu.sh: libcublasLt is missing: install CUDA's cuBLAS, or set CUDA to a toolkit with it"; }
    [ "$make" ] || echo 'gpu.sh: make is missing: tests/cuda/gpu_build.sh builds instead'
    [ "$make" ] || command -v c++ >/dev/null 2>&1 || { status=2
        echo 'gpu.sh: c++ is missing: install a C++ compiler'; }
    return $status
}
# What an object must agree in: the compiler, and the sources.
built_by() {
    "$CUDA/bin/nvcc" --version | sed -n 's/.*release/nvcc release/p'
    cat mixprec.h mixprec_cuda.cu tests/cuda/inside.* | cksum
}
if [ "${1:-}" = pack ]; then
    [ "${2:-}" ] || { echo 'gpu.sh: pack needs a folder' >&2; exit 2; }
    is_complete >&2 || exit 2
    mkdir -p "$2" && "$CUDA/bin/nvcc" -std=c++17 -O3 -arch="${ARCH:-sm_90}" -I. -c mixprec_cuda.cu \
        -o "$2/mixprec_cuda.o" &&
        "$CUDA/bin/nvcc" -std=c++17 -O1 -arch="${ARCH:-sm_90}" -x cu -I. -Itests -Itests/support \
            -c tests/cuda/inside.cu -o "$2/inside.o" &&
        built_by >"$2/built_by" && echo "packed for ${ARCH:-sm_90}: $2"
    exit
fi

dry=
[ "${1:-}" = --dry ] && { dry=1; shift; }
only=                               # --run PART: this one alone, without its table
[ "${1:-}" = --run ] && { only=$2; shift; }
all='tests kernels training peers nanogpt sanitizer'
first=
[ "${1:-}" = first ] && { first=1; set -- first tests; }
parts=${*:-$all}
build=${BUILD:-build} python=${PYTHON:-python3} out=${OUT:-tests/bench/results} scale=${SCALE:-1}
data=${DATA:-tinyshakespeare.txt} day=$(date +%F)
jobs=$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
case $build in /*) ;; *) build=$PWD/$build ;; esac
for part in $parts; do
    case " $all${first:+ first} " in *" $part "*) ;;
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
    else "$CUDA/bin/nvcc" --version 2>/dev/null | sed -n 's/.*release/nvcc release/p'
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
    guarded "$seconds" sh "$PWD/tests/cuda/gpu.sh" ${dry:+--dry} --run "$name" >>"$file" 2>&1 </dev/null
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
gpu_tests() { for f in $(find tests -name 'test_cuda*.cpp' | sort); do
    case $f in *cudasim*) ;; *) echo "$build/gpu/$(basename "$f" .cpp)" ;; esac; done; }

# Four at a time: most of a test is its reference, on the CPU.
run_tests() {
    if [ "$dry" ]; then MIXPREC_TEST_QUICK=1 tests/tools/run.sh "$build/test_cuda"; return; fi
    # shellcheck disable=SC2046
    tests/tools/run.sh -t 200 -j 4 $(gpu_tests)
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
run_first() { bench --part first --rounds 5 --choices "$out/${day}_gpu_choices"; }
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
    if [ "$dry" ]; then tests/cuda/gpu_sanitizer.sh; return 0; fi
    # shellcheck disable=SC2046
    tests/cuda/gpu_sanitizer.sh $(gpu_tests)
}
train() { # DTYPE
    if [ "$dry" ]; then
        "$build/trainer_sim" --device cuda --dtype "$1" --data mixprec.h --layers 1 --heads 1 \
            --width 32 --block 8 --batch 2 --eval-batches 1 --threads 1 --steps 3 --sample 0 \
            --out "$build/gpu_sh_$1" --overwrite
    else
        "$build/trainer_cuda" --preset char-gpu --device cuda --graph --dtype "$1" \
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
    first | kernels | training)  echo "$build/bench_cuda" ;;
    tests | sanitizer)           gpu_tests ;;
    tests.dry)                   echo "$build/test_cuda" ;;
    first.dry | kernels.dry | training.dry)  echo "$build/bench_cuda_sim" ;;
    nanogpt)                     echo "$build/trainer_cuda" ;;
    nanogpt.dry)                 echo "$build/trainer_sim" ;;
    esac
}
# make TARGET..., or the same by plain commands.
built() {
    if [ "$make" ]; then guarded "${limit:-3600}" "$make" -s -k -j "$jobs" BUILD="$build" CUDA="$CUDA" "$@"
    else CUDA="$CUDA" BUILD="$build" guarded "${limit:-3600}" sh tests/cuda/gpu_build.sh "$@"
    fi
}
# Takes the companion that was compiled elsewhere, if it is the same. It must be newer than what it is
# made of.
take_objects() {
    if [ ! -f "$OBJECTS/mixprec_cuda.o" ] || [ ! -f "$OBJECTS/built_by" ]; then
        echo "gpu.sh: OBJECTS ($OBJECTS) has no mixprec_cuda.o and built_by: it is compiled here"
    elif ! built_by | cmp -s - "$OBJECTS/built_by"; then
        echo 'gpu.sh: OBJECTS are of another nvcc or of other sources: the companion is compiled here'
    else
        mkdir -p "$build"
        [ -z "$make" ] || built "$build/include/mixprec.h" "$build/include/mixprec_cuda.cu"
        mkdir -p "$build/gpu"
        cp "$OBJECTS/mixprec_cuda.o" "$build/mixprec_cuda.o" && touch "$build/mixprec_cuda.o"
        [ ! -f "$OBJECTS/inside.o" ] || cp "$OBJECTS/inside.o" "$build/gpu/inside.o"
        [ ! -f "$OBJECTS/inside.o" ] || touch "$build/gpu/inside.o"
        echo "gpu.sh: mixprec_cuda.o is taken from $OBJECTS"
    fi
}
# build_for PART...
build_for() {
    targets=$(for part in "$@"; do needs "$part"; done | sort -u)
    began=$(date +%s)
    # shellcheck disable=SC2086
    [ -z "$targets" ] || built $targets ||
        { echo 'gpu.sh: not all of it builds; what does is run' >&2; failed=1; }
    echo "built in $(($(date +%s) - began)) s"
}

[ "$dry" ] || is_complete >&2 || exit 2
[ "$dry" ] || [ -z "${OBJECTS:-}" ] || take_objects
if [ "$first" ]; then
    limit=240 build_for first
    part first 150
    MIXPREC_TEST_QUICK=1
    export MIXPREC_TEST_QUICK
    limit=150 build_for tests
    part tests 120
    [ "$failed" -eq 0 ]
    exit
fi
# shellcheck disable=SC2086
build_for $parts

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
