#!/bin/sh
# gpu_build.sh - builds the bench and the CUDA tests for this machine's GPU without make: needs a C
# and a C++ compiler, and nvcc. tests/cuda/gpu.sh calls it. The Makefile explains the flags.
# SPDX-License-Identifier: MIT OR Unlicense
#
#   CUDA=dir BUILD=dir tests/cuda/gpu_build.sh BUILD/bench_cuda BUILD/gpu/test_cuda...
cd "$(dirname "$0")/../.." || exit 1
build=${BUILD:-build} nvcc=$CUDA/bin/nvcc failed=0
libraries="-L$CUDA/lib64 -L$CUDA/lib -L$CUDA/targets/x86_64-linux/lib -Wl,-rpath,$CUDA/lib64 -lcublasLt -lcudart"
mkdir -p "$build/gpu"

printf '#define MIXPREC_IMPLEMENTATION\n#include "mixprec.h"\n' >"$build/mixprec.c"
cc -std=c99 -O2 -fopenmp -I. -c "$build/mixprec.c" -o "$build/mixprec.o" || exit 1
[ -f "$build/mixprec_cuda.o" ] ||
    "$nvcc" -std=c++17 -O3 -arch="${ARCH:-native}" -I. -c mixprec_cuda.cu -o "$build/mixprec_cuda.o" || exit 1

# The tests link the companion with what a few of them look at inside it.
case " $* " in *"/gpu/"*)
    [ -f "$build/gpu/inside.o" ] || "$nvcc" -std=c++17 -O1 -arch="${ARCH:-native}" -I. -Itests -Itests/support \
        -c tests/cuda/inside.cu -o "$build/gpu/inside.o" || exit 1 ;;
esac

# link OUT OBJECT...: with all that a program for a GPU needs.
link() {
    to=$1; shift
    # shellcheck disable=SC2086
    c++ "$@" "$build/mixprec.o" $libraries -fopenmp -ldl -lm -o "$to"
}
bench() {
    c++ -std=c++17 -O2 -isystem "$CUDA/include" -I. -c tests/bench/bench_cuda.cpp -o "$1.o" &&
        link "$1" "$1.o" "$build/mixprec_cuda.o"
}
gpu_test() {
    name=$(basename "$1")
    "$nvcc" -std=c++17 -arch="${ARCH:-native}" -O1 -x cu -I. -Itests -Itests/support -DCOMPANION_LINKED \
        -c "$(find tests -name "$name.cpp")" -o "$1.o" && link "$1" "$1.o" "$build/gpu/inside.o"
}
pids=
for target; do
    case $target in
    */bench_cuda) bench "$target" & ;;
    *)            gpu_test "$target" & ;;
    esac
    pids="$pids $!"
done
for pid in $pids; do wait "$pid" || failed=1; done
exit $failed
