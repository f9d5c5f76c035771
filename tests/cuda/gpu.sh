#!/bin/sh
# gpu.sh - the CUDA tests, the bench and the trainer on a GPU that is there for fifteen minutes. Everything is compiled
# and tried at home; there the programs start at once, each under a limit of its own.
# SPDX-License-Identifier: MIT OR Unlicense
#
# At home, in the root of the checkout:
#
#   tests/cuda/gpu.sh pack                  fills KIT with programs for KIT_ARCH (needs nvcc and make; minutes)
#   tests/cuda/gpu.sh check                 does each program of KIT start, and is KIT of these sources?
#   tests/cuda/gpu.sh rehearse [TEST...]    `first` without a GPU: KIT as PTX, on the interpreter of tests/cuda
#
# There, in the same checkout, with KIT:
#
#   tests/cuda/gpu.sh first                 what decides most, in BUDGET seconds: what CUDA answers, all CUDA tests,
#                                           steps of GPT-2 beside PyTorch's, the trainer's losses beside the CPU's,
#                                           memcheck
#   tests/cuda/gpu.sh again [NAME...]       NAME is a test, which runs in full, under memcheck and racecheck, or
#       host        the machine: processor, quota, clocks
#       steps       steps of GPT-2 124M in bf16 at both levels, with each epilogue; PyTorch's alternate with them
#       where       where a step's time goes: the trainer's profile, and ncu over every kernel of a step
#       fp8         the same steps with recipes multiplied in fp8
#       big         steps of GPT-2 1.5B: ms and GB
#       races       racecheck of attention
#       cpu         the host's CPU: GPT-2's step and products by number of threads (THREADS), with AMX and without; how the
#                   kernels of a step scale
#       kernels     every kernel against a copy, and PyTorch's
#       training    steps of GPT-2 124M and of the character GPT in each dtype
#       peers       the same steps by PyTorch
#       nanogpt     the character GPT to nanoGPT's published loss of 1.47 to 1.50 (pack with DATA=tinyshakespeare.txt)
#       profile     ncu on attention
#
# Fifteen minutes: BUDGET=310 first; BUDGET=170 again host steps where; BUDGET=280 again fp8 big races cpu.
#
# The table comes last and has fewer than 12,000 characters. OUT has the table and one archive with all logs. steps,
# where, fp8 and big print no time without the clock that the GPU had meanwhile. A step that fails, hangs or is cut
# costs no more than its limit. Where KIT does not start, and nvcc and make are there, the programs are compiled there.
#
# Variables: KIT (BUILD/kit), KIT_ARCH (sm_90a), OUT (BUILD/gpu), BUDGET (400 s), JOBS (tests at a time, 8), BATCH (64),
# TESTS (names; all), PEERS (PyTorch's steps: bf16-compiled bf16-low; or any kind of tests/bench/torch_first.py), CUDA
# (the toolkit), PYTHON, DATA (a text for the trainer; pack copies the text into KIT), THREADS (of the CPU: 1 2 4 8 16),
# CUDA_VISIBLE_DEVICES (which GPU).
#
# Exit status: 0 all well; 1 something failed; 2 the call is wrong or KIT is of no use there; 3 no GPU.
cd "$(dirname "$0")/../.." || exit 2
LC_ALL=C
export LC_ALL
began=$(date +%s) root=$PWD mode=${1:-}
[ $# -eq 0 ] || shift
BUILD=${BUILD:-build} KIT=${KIT:-$BUILD/kit} OUT=${OUT:-$BUILD/gpu} PYTHON=${PYTHON:-python3} MAKE=${MAKE:-make}
BUDGET=${BUDGET:-400} JOBS=${JOBS:-8} BATCH=${BATCH:-64}
case $KIT in /*) ;; *) KIT=$root/$KIT ;; esac
if [ -z "${CUDA:-}" ]; then
    nvcc=$(command -v nvcc) && CUDA=$(dirname "$(dirname "$(readlink -f "$nvcc")")")
    CUDA=${CUDA:-/usr/local/cuda}
fi
loader_path=${LD_LIBRARY_PATH:-}

fail() { echo "gpu.sh: $2" >&2; exit "$1"; }
used() { echo $(($(date +%s) - began)); }
left() { echo $((BUDGET - $(used))); }
# limited SECONDS COMMAND...: 124 or 137 if the limit ended the command. A signal to this script reaches the command.
limited() {
    limit=$1; shift
    timeout -k 5 "$limit" "$@" </dev/null &
    child=$!
    wait $child
    code=$?
    [ -z "${stopped:-}" ] || { wait $child; code=$?; }
    return $code
}
all_tests() { find tests -name 'test_cuda*.cpp' ! -name test_cudasim.cpp | sed 's|.*/||; s|\.cpp$||' | sort; }
# What the programs of a kit are made of.
sources() {
    cat mixprec.h mixprec_cuda.cu tests/cuda/*.h tests/cuda/*.cu tests/cuda/*.cpp tests/support/*.h \
        tests/bench/bench_cuda.cpp examples/*.h examples/trainer/* | cksum
}
of_kit() { sed -n "s/^$1: //p" "$KIT/built_by" 2>/dev/null; }

# --- the trainer: the same runs there and, for their losses, on the CPU at home -------------------
# NAME and its options. No guard: the guard's looks wait for the GPU.
runs() {
    echo 'fp32 --dtype fp32'
    echo 'bf16 --dtype bf16 --level 2'
    echo 'fp16 --dtype fp16'
    echo 'gelu --dtype bf16 --level 2 --bias on --activation gelu-tanh'
    echo 'fp8 --dtype bf16 --recipe fp8'
}
# train SECONDS NAME FOLDER OPTION...
train() {
    seconds=$1 name=$2 folder=$3; shift 3
    # shellcheck disable=SC2046
    limited "$seconds" "$KIT/bin/trainer_cuda" $(runs | sed -n "s/^$name //p") $(cat "$KIT/model") --data "$KIT/text" \
        --lr 1e-3 --warmup 10 --log-every 10 --eval-batches 4 --sample 0 --guard off --overwrite --out "$folder" "$@"
}
# Step, loss and validation loss of each row.
losses() {
    awk -F '[:,{}]' '/"scale":/ {
        step = loss = val = "-"
        for (f = 1; f < NF; f++) {
            if ($f == "\"step\"") step = $(f + 1)
            if ($f == "\"loss\"") loss = $(f + 1)
            if ($f == "\"val\"") val = $(f + 1)
        }
        print step, loss, val }' "$1/metrics.jsonl"
}
# The CPU's losses, into the kit.
expect() {
    at=$(mktemp -d) || return 1
    status=0
    mkdir -p "$KIT/expect"
    for name in $(runs | cut -d ' ' -f 1); do
        train 900 "$name" "$at/$name" --device cpu >"$at/log" 2>&1 &&
            losses "$at/$name" >"$KIT/expect/$name" && continue
        echo "gpu.sh: the CPU's run $name failed:"
        tail -n 3 "$at/log"
        status=1
    done
    rm -rf "$at"
    return $status
}

# --- libraries -------------------------------------------------------------------------------------
# Folders that may have CUDA's libraries: Python's packages, whose libraries PyTorch multiplies with; the toolkit.
library_folders() {
    limited 20 "$PYTHON" -c 'import glob, sysconfig
for key in ("purelib", "platlib"):
    print("\n".join(sorted(glob.glob(sysconfig.get_paths()[key] + "/nvidia/*/lib"))))' 2>/dev/null
    printf '%s\n' "$CUDA/lib64" "$CUDA/lib" "$CUDA/targets/x86_64-linux/lib"
}
loader_folders() { ldconfig -p 2>/dev/null | sed -n 's|.*=> \(.*\)/[^/]*$|\1|p' | sort -u; }
# The first folder with the library NAME, which may be a pattern; the loader knows more folders.
folder_of() {
    { library_folders; loader_folders; } | while read -r folder; do
        for file in "$folder"/$1; do
            [ -e "$file" ] || continue
            echo "$folder"
            return
        done
    done
}
missing() {
    ldd "$KIT/bin/probe" "$KIT/bin/bench_cuda" 2>&1 | sed -n 's/^[[:space:]]*\([^ ]*\) => not found.*/\1/p' | sort -u
}
# Sets LD_LIBRARY_PATH for the kit's programs. What is still missing may lie in the kit's folder of spares.
find_libraries() {
    path=$KIT/lib
    for library in libcublasLt libcudart; do
        folder=$(folder_of "$library.so.$(of_kit major)")
        echo "$library: ${folder:-not found}"
        [ -z "$folder" ] || path=$path:$folder
    done
    LD_LIBRARY_PATH=$path${loader_path:+:$loader_path}
    export LD_LIBRARY_PATH
    [ -z "$(missing)" ] || LD_LIBRARY_PATH=$LD_LIBRARY_PATH:$KIT/spare
}

# --- at home ---------------------------------------------------------------------------------------
make_programs() {   # TARGET VARIABLE...
    command -v "$MAKE" >/dev/null 2>&1 || fail 2 'make is missing: install make'
    "$MAKE" -s BUILD="$BUILD" CUDA="$CUDA" "$@"
}
write_kit_facts() { # ARCH
    release=$("$CUDA/bin/nvcc" --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')
    commit=$(git rev-parse --short HEAD 2>/dev/null || echo unknown)
    printf '%s\n' "nvcc: $release" "major: ${release%%.*}" "arch: $1" "commit: $commit" "sources: $(sources)" \
        >"$KIT/built_by"
}
pack() {
    [ -x "$CUDA/bin/nvcc" ] || fail 2 "nvcc is missing: put nvcc on PATH, or set CUDA to the toolkit's folder"
    arch=${KIT_ARCH:-sm_90a}
    jobs=$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
    make_programs -j "$jobs" kit-programs KIT="$KIT" KIT_ARCH="$arch" || fail 1 'the kit does not build: see above'
    mkdir -p "$KIT/spare"
    cp -L "$CUDA"/lib*/libcudart.so.[0-9]* "$KIT/spare/" 2>/dev/null
    for library in libgomp.so.1 libstdc++.so.6 libgcc_s.so.1; do
        cp -L "$(cc -print-file-name=$library)" "$KIT/spare/" 2>/dev/null
    done
    cp "${DATA:-mixprec.h}" "$KIT/text" || fail 2 "DATA (${DATA:-mixprec.h}) cannot be read"
    echo "${MODEL:---layers 4 --heads 4 --width 128 --block 64 --batch 12 --steps 60 --eval-every 30}" >"$KIT/model"
    write_kit_facts "$arch"
    find_libraries >/dev/null
    expect || exit 1
    du -sk "$KIT" | awk -v at="$KIT" '{ printf "packed in %s: %.1f MiB\n", at, $1 / 1024 }'
}
same_sources() { [ "$(of_kit sources)" = "$(sources)" ]; }
check() {
    [ -f "$KIT/built_by" ] || fail 2 "there is no kit in $KIT: run tests/cuda/gpu.sh pack"
    status=0
    find_libraries
    for program in "$KIT"/bin/*; do
        case $program in */bench_cuda) option=--tiny ;; */trainer_cuda) option=--help ;; *) option=--short ;; esac
        said=$(MIXPREC_TEST_ONLY=none limited 20 "$program" $option 2>&1)
        ended=$?
        case $ended in 0 | 1 | 77) ;; *) status=1 ;; esac
        echo "$(basename "$program"): status $ended, $(echo "$said" | tail -n 1 | cut -c 1-90)"
    done
    same_sources && echo 'the kit is of these sources' && return $status
    echo 'the kit is of other sources: run tests/cuda/gpu.sh pack'
    return 1
}
stand_in() {
    mkdir -p "$KIT/stand_ins"
    printf '#!/bin/sh\n%s\n' "$2" >"$KIT/stand_ins/$1"
    chmod +x "$KIT/stand_ins/$1"
}
# In a checkout of links without build/, with stand-ins for other programs, and PTX for 9.0.
rehearse() {
    [ -x "$CUDA/bin/nvcc" ] || { echo 'skipped: a rehearsal needs nvcc'; exit 77; }
    KIT=$root/$BUILD/rehearsal
    case $BUILD in /*) KIT=$BUILD/rehearsal ;; esac
    names=${*:-test_cuda_by_hand test_cuda_optimizers test_cuda_training}
    make_programs rehearsal-programs REHEARSED="$names" || fail 1 'the rehearsal does not build: see above'
    head -c 100000 mixprec.h >"$KIT/text"
    echo '--layers 1 --heads 1 --width 32 --block 8 --batch 2 --steps 12 --eval-every 6' >"$KIT/model"
    write_kit_facts sm_90a
    find_libraries >/dev/null
    expect || exit 1
    stand_in nvidia-smi 'echo "the interpreter of PTX, 0.0, 81559 MiB, 0 MiB, 0 MHz, 0 MHz, 0 W, 0"'
    stand_in compute-sanitizer 'echo "ERROR SUMMARY: 0 errors, by a stand-in"'
    stand_in python3 'case "$*" in *torch_first*) echo "torch GPT-2 by a stand-in" ;; esac'
    [ "$OUT" != "$BUILD/gpu" ] || OUT=$KIT/out
    mkdir -p "$OUT" && OUT=$(cd "$OUT" && pwd)
    there=$(mktemp -d) || exit 1
    for entry in "$root"/*; do
        [ "$entry" = "$root/build" ] || ln -s "$entry" "$there/"
    done
    ( cd "$there" && env LD_LIBRARY_PATH="$loader_path" PATH="$KIT/stand_ins:$PATH" KIT="$KIT" OUT="$OUT" CUDA="$KIT" \
        PYTHON=python3 SIZE=--tiny TESTS="$names" JOBS=2 BUDGET="${REHEARSAL_BUDGET:-900}" sh tests/cuda/gpu.sh first )
    status=$?
    written=$(find "$there" -mindepth 1 ! -type l | head -n 1)
    rm -rf "$there"
    [ -z "$written" ] || fail 1 "the rehearsal wrote into the checkout: $written"
    return $status
}

case $mode in
pack | check | rehearse) "$mode" "$@"; exit ;;
first | again) . tests/cuda/gpu_there.sh ;;
*) sed -n '2,/^# Exit status/s/^# \{0,1\}//p' tests/cuda/gpu.sh >&2; exit 2 ;;
esac
