#!/bin/sh
# test_gpu.sh - runs all of tests/cuda/gpu.sh as on a machine with a GPU, with every program replaced by
# a stand-in. It checks what gpu.sh builds, runs and draws, and what remains of a part that is cut
# off or fails.
# SPDX-License-Identifier: MIT OR Unlicense
. tests/support/check.sh

root=$PWD
machine=$tmp/machine
mkdir -p "$machine/bin" "$machine/cuda/bin" "$machine/cuda/lib64" "$machine/build/gpu"
echo text >"$machine/text"
echo library >"$machine/cuda/lib64/libcublasLt.so"

# stand_in FILE LINE...: a program.
stand_in() {
    file=$machine/$1; shift
    { echo '#!/bin/sh'; printf '%s\n' "$@"; } >"$file"
    chmod +x "$file"
}
stand_in bin/nvidia-smi    'echo "Some GPU, 999.1, 1000 MiB"'
stand_in bin/make          'printf "%s\n" "$@" >"$MACHINE/made"; echo "make $*" >>"$MACHINE/order"' \
    'exit ${MAKE_STATUS:-0}'
stand_in cuda/bin/nvcc     'echo "Cuda compilation tools, release 13.0, V13.0.88"'
stand_in bin/compute-sanitizer 'echo "$@" >>"$MACHINE/sanitized"' 'exit ${SANITIZER_STATUS:-0}'
stand_in bin/python3 'case "$*" in -c*) exit ${NO_TORCH:-0} ;; esac' 'echo "torch 9.9 on Some GPU"' \
    'case "$*" in *kernels*) printf "%s\n" "gelu_tanh                      9x9  1.0 MB 0.1 ms [0.1 0.1]  8 GB/s, the copy  10: 0.80 of it" ;;
     *) echo "GPT-2 gpt2 124.4M bf16 eager           200.000 ms [199.0 201.0], 9 tokens/s" ;; esac'
stand_in build/bench_cuda 'echo "$@" >>"$MACHINE/benched"; echo "bench $*" >>"$MACHINE/order"' \
    'echo "mixprec 0 on Some GPU, 9 SMs"' \
    'case "$*" in *kernels*) printf "%s\n" "gelu_tanh                      9x9  1.0 MB 0.1 ms [0.1 0.1]  9 GB/s, the copy  10: 0.90 of it" ;;
     *) echo "GPT-2 gpt2 124.4M bf16 level 2, as a graph   120.000 ms [119.0 121.0], 9 tokens/s" ;; esac' \
    '[ ! "$HANGS" ] || touch "$MACHINE/hangs"'
# The limit of what hangs is over as soon as it does.
stand_in bin/timeout 'shift 3' '"$@"' 'status=$?' 'rm "$MACHINE/hangs" 2>/dev/null && exit 124' 'exit $status'
stand_in build/trainer_cuda 'echo "best val 1.48"; echo "$@" >>"$MACHINE/trained"; exit ${TRAIN_STATUS:-0}'
for file in $(find tests -name 'test_cuda*.cpp'); do
    name=$(basename "$file" .cpp)
    [ "$name" = test_cudasim ] || stand_in "build/gpu/$name" 'echo "3 passed, 0 failed, 0 skipped"'
done

# gpu STATUS ARGUMENT...: the script there, with an exit status of STATUS; its words in $tmp/said.
gpu() {
    want=$1; shift
    rm -rf "$machine/results" "$machine/made" "$machine/benched" "$machine/sanitized" "$machine/trained" \
        "$machine/order"
    env PATH="$machine/bin:$PATH" MACHINE="$machine" MAKE="${USE_MAKE-make}" CUDA="${USE_CUDA-$machine/cuda}" \
        BUILD="$machine/build" PYTHON=python3 OUT="$machine/results" DATA="$machine/text" \
        sh tests/cuda/gpu.sh "$@" >"$tmp/said" 2>&1
    status=$?
    cat "$tmp/said"
    [ "$status" = "$want" ]
}
# has PART TEXT: its table has a line of that.
has() {
    set -- "$1" "$2" "$machine"/results/*_gpu_"$1".txt
    grep -q -e "$2" "$3" || { cat "$3"; return 1; }
}
draws() { many '<rect' "$(echo "$machine"/results/*_gpu_"$1".svg)" "$2"; }
many() { [ "$(grep -c "$1" "$2")" -eq "$3" ] || { cat "$2"; return 1; }; }
tables() { many '' "$tmp/tables" "$1"; }

check 'all of it runs'                          gpu 0
ls "$machine"/results/*.txt >"$tmp/tables"
check 'a table for each part'                   tables 6
check 'the machine is told'                     has kernels '^Some GPU, 999.1'
check 'and its compiler'                        has kernels '^nvcc release 13.0'
check 'every test ran'                          has tests "^ok .*gpu/test_cuda_training"
check 'and their sum is there'                  has tests '^[0-9]* passed, 0 failed, 0 skipped'
check 'PyTorch stands beside the kernels'       has kernels '^torch 9.9'
check 'GPT-2 is measured before the other'      sh -c 'sed -n 2p "$1" | grep -q "model gpt2"' sh "$machine/benched"
check 'both models are'                         many 'part training' "$machine/benched" 2
check 'PyTorch has a part of its own'           has peers '200.000 ms'
check 'both dtypes are trained'                 many 'preset char-gpu .*--graph' "$machine/trained" 2
check 'each tool sees each test'                many 'tool racecheck' "$machine/sanitized" \
    "$(find tests -name 'test_cuda*.cpp' ! -name '*sim*' | grep -c .)"
check 'errors made on purpose are none'         many 'memcheck --report-api-errors no' "$machine/sanitized" \
    "$(find tests -name 'test_cuda*.cpp' ! -name '*sim*' | grep -c .)"
check 'kernels are drawn'                       draws kernels 3
check 'steps are drawn'                         draws training 3
check 'what has no times is not'                test ! -e "$machine/results/$(date +%F)_gpu_tests.svg"

check 'a part builds what it needs'             gpu 0 kernels
check 'and nothing else'                        many '^/' "$machine/made" 1
NO_TORCH=1; export NO_TORCH
check 'without PyTorch'                         gpu 0 kernels peers
check 'which is told'                           has peers '^no PyTorch that sees the GPU'
unset NO_TORCH

MAKE_STATUS=2 TRAIN_STATUS=1 SANITIZER_STATUS=9; export MAKE_STATUS TRAIN_STATUS SANITIZER_STATUS
check 'what fails is told at the end'           gpu 1 kernels nanogpt sanitizer
check 'a build that fails does not end it'      has kernels '0.90 of it'
check 'one dtype does not hinder the other'     many '' "$machine/trained" 2
check 'an error under a tool fails'             has sanitizer '^FAIL initcheck: test_cuda_training'
unset MAKE_STATUS TRAIN_STATUS SANITIZER_STATUS

HANGS=1; export HANGS
check 'a part that takes too long is cut'       gpu 1 training kernels
check 'and keeps what it has'                   has training '120.000 ms'
check 'and says so'                             has training '^cut after 240 s'
check 'and is drawn'                            draws training 3
check 'the next one runs'                       has kernels '0.90 of it'
unset HANGS
rm "$machine/text"
check 'without the text'                        gpu 0 nanogpt
check 'nothing is trained'                      has nanogpt '^skipped: DATA'
check 'an unknown part'                         gpu 2 nosuch

# --- first: one command for the first minutes on a GPU -----------------------------------------
said() { grep -q -e "$1" "$tmp/said" || { cat "$tmp/said"; return 1; }; }
unsaid() { ! grep -q -e "$1" "$tmp/said"; }
# first_line N TEXT: line N of what was built and run has that.
order() { sed -n "$1p" "$machine/order" | grep -q -e "$2" || { cat "$machine/order"; return 1; }; }
check 'first runs'                              gpu 0 first
check 'first builds the bench alone'            order 1 '^make .*bench_cuda$'
check 'then it measures'                        order 2 '^bench .*--part first'
check 'only then it builds the tests'           order 3 '^make .*gpu/test_cuda_training'
check 'its table has steps'                     has first '120.000 ms'
check 'the tests ran'                           has tests '^[0-9]* passed, 0 failed, 0 skipped'
HANGS=1; export HANGS
check 'a bench that hangs is cut'               gpu 1 first
check 'and the tests run all the same'          has tests '^[0-9]* passed, 0 failed, 0 skipped'
unset HANGS

# Objects from elsewhere: the same compiler and sources, or none.
mkdir "$machine/objects"
check 'what pack writes'                        env PATH="$machine/bin:$PATH" CUDA="$machine/cuda" \
    sh tests/cuda/gpu.sh pack "$machine/objects"
echo object >"$machine/objects/mixprec_cuda.o"
echo inside >"$machine/objects/inside.o"
OBJECTS=$machine/objects; export OBJECTS
check 'objects are taken'                       gpu 0 first
check 'which is told'                           said 'mixprec_cuda.o is taken from'
check 'and lie where make finds them'           cmp -s "$machine/objects/mixprec_cuda.o" "$machine/build/mixprec_cuda.o"
check 'those of the tests as well'              cmp -s "$machine/objects/inside.o" "$machine/build/gpu/inside.o"
rm "$machine/build/mixprec_cuda.o" "$machine/build/gpu/inside.o"
echo 'nvcc release 11.0' >"$machine/objects/built_by"
check 'those of another compiler are not'       gpu 0 first
check 'which is told, too'                      said 'of another nvcc or of other sources'
check 'and they stay away'                      test ! -e "$machine/build/mixprec_cuda.o"
OBJECTS=$machine/nowhere
check 'a folder without objects'                gpu 0 first
check 'is told'                                 said 'has no mixprec_cuda.o and built_by'
unset OBJECTS

# What is missing is said, before anything is built.
USE_CUDA=; cp "$machine/cuda/bin/nvcc" "$machine/bin/nvcc"
mkdir -p "$machine/lib64"; echo library >"$machine/lib64/libcublasLt.so"
check 'nvcc is found on PATH'                   gpu 0 first
check 'and its toolkit is used'                 grep -q "CUDA=$machine\$" "$machine/made"
rm "$machine/bin/nvcc"
USE_CUDA=$machine/nothing
check 'without nvcc'                            gpu 2 first
check 'that is said'                            said 'nvcc is missing: put it on PATH'
check 'and nothing was built'                   test ! -e "$machine/order"
mkdir -p "$machine/nothing/bin"; cp "$machine/cuda/bin/nvcc" "$machine/nothing/bin/"
stand_in bin/ldconfig ':'
check 'without cuBLASLt'                        gpu 2 first
check 'that is said, too'                       said 'libcublasLt is missing'
unset USE_CUDA
USE_MAKE=nosuchmake
stand_in bin/cc 'echo "cc $*" >>"$MACHINE/order"'
stand_in bin/c++ 'echo "c++ $*" >>"$MACHINE/order"'
stand_in cuda/bin/nvcc 'echo "nvcc $*" >>"$MACHINE/order"; echo "Cuda compilation tools, release 13.0, V13.0.88"'
check 'without make'                            gpu 0 first
check 'a script builds'                         said 'make is missing: tests/cuda/gpu_build.sh builds'
check 'the companion'                           order 2 'nvcc .*mixprec_cuda.o$'
check 'the bench'                               grep -q 'c++ .*bench_cuda$' "$machine/order"
check 'what the tests share, once'              many 'nvcc .*inside.cu' "$machine/order" 1
check 'and each test'                           grep -q 'nvcc .*test_cuda_training.cpp' "$machine/order"
unset USE_MAKE
cd "$root" && report
