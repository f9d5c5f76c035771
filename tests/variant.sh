#!/bin/sh
# variant.sh - builds the C tests another way and runs them; a missing tool is a skip.
# SPDX-License-Identifier: MIT OR Unlicense
#
#   tests/variant.sh sanitizers|threads|ofast|gnu|clang|aarch64|arm|amx

# need FILE-PRODUCING COMMAND...: leaves, as one skip, when the tool cannot link a program.
need() {
    dir=$(mktemp -d)
    trap 'rm -rf "$dir"' EXIT
    echo 'int main(void) { return 0; }' >"$dir/probe.c"
    if ! "$@" "$dir/probe.c" -o "$dir/probe" >/dev/null 2>&1; then
        echo "0 passed, 0 failed, 1 skipped"
        exit
    fi
}

# tests VARIABLE=VALUE...: make test-programs with them, in build/NAME.
name=$1
tests() {
    unset MAKEFLAGS MAKEOVERRIDES MFLAGS OPENMP
    make=${MAKE:-make} jobs=$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)
    unset MAKE
    exec "$make" -s -j"$jobs" --no-print-directory BUILD="${BUILD:-build}/$name" "$@" test-programs
}

CC=${CC:-cc}
case $name in
sanitizers)
    # -g1: tracking variables as well takes gcc many minutes here
    sanitize='-fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all'
    need $CC $sanitize
    tests CC="$CC" CFLAGS="-O1 -g1 -fno-omit-frame-pointer $sanitize" ;;
threads)    # mixprec's own threads, watched by the thread sanitizer
    sanitize='-fsanitize=thread -fno-sanitize-recover=all'
    need $CC $sanitize -pthread
    export TSAN_OPTIONS=die_after_fork=0
    tests CC="$CC" OPENMP= CPPFLAGS=-DMIXPREC_THREADS LDLIBS=-pthread CFLAGS="-O1 -g1 $sanitize" ;;
ofast)      # what mixprec.h promises there: conversions, and Inf and NaN found by their bits
    at=${BUILD:-build}/$name/test_
    tests CC="$CC" CFLAGS=-Ofast TESTS="${at}formats ${at}scaler ${at}optimizers ${at}autocast ${at}tensors" ;;
gnu)        # gcc's own C joins a product with a sum where it can: the same bits all the same
    at=${BUILD:-build}/$name/test_
    tests CC="$CC" STD=gnu17 CFLAGS=-O2 TESTS="${at}numerics ${at}functions ${at}bits ${at}optimizers ${at}states" ;;
clang)      # another compiler, GNU C (products may be fused), everything the processor has
    need clang
    tests CC=clang STD=gnu11 CFLAGS='-O3 -march=native' ;;
aarch64)    # NEON, by an emulator when the machine is another
    command -v qemu-aarch64 >/dev/null 2>&1 || need false
    need aarch64-linux-gnu-gcc -static
    tests CC=aarch64-linux-gnu-gcc AR=aarch64-linux-gnu-ar LDFLAGS=-static OPENMP= RUNNER=qemu-aarch64 ;;
arm)        # of that, the instructions that a processor may have
    command -v qemu-aarch64 >/dev/null 2>&1 || need false
    need aarch64-linux-gnu-gcc -static
    at=${BUILD:-build}/$name/test_
    tests CC=aarch64-linux-gnu-gcc AR=aarch64-linux-gnu-ar LDFLAGS=-static OPENMP= CFLAGS=-O1 \
        RUNNER='qemu-aarch64 -cpu max' TESTS="${at}arm ${at}pairs ${at}bits" ;;
amx)        # its emulation, under the sanitizers
    sanitize='-fsanitize=address,undefined -fno-sanitize-recover=all'
    need $CC $sanitize
    tests CC="$CC" CFLAGS="-O0 -g1 $sanitize" TESTS="${BUILD:-build}/$name/test_amx" ;;
*)
    echo "usage: tests/variant.sh sanitizers|threads|ofast|gnu|clang|aarch64|arm|amx" >&2
    exit 2 ;;
esac
