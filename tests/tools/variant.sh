#!/bin/sh
# variant.sh - builds the C tests another way and runs them; a missing tool is a skip.
# SPDX-License-Identifier: MIT OR Unlicense
#
#   tests/tools/variant.sh NAME [TEST...]             TEST: only this test, "scaler" for test_scaler.c,
#                                               "fuzz_reader" for that program (JOBS at a time)
#
#   sanitizers threads clang                    other builds of everything
#   O0 O3 lto trapv char m32 gnu ofast finite   gcc's flags; the last three: only promises that hold
#   gcc-VERSION clang-VERSION musl tcc mingw clang_cl  other compilers and libraries
#   no_ranks no_watch no_checkpoint no_recipes  a room left out, as MIXPREC_NO_RANKS does
#   aarch64 armhf riscv64 ppc64le s390x         other processors, in an emulator
#   arm amx tiles tiles_all                     instructions that few processors have, emulated

# need FILE-PRODUCING COMMAND...: leaves, as one skip, when the tool cannot link a program.
need() {
    dir=$(mktemp -d) links=
    echo 'int main(void) { return 0; }' >"$dir/probe.c"
    "$@" "$dir/probe.c" -o "$dir/probe" >/dev/null 2>&1 && links=1
    rm -rf "$dir"
    if [ -z "$links" ]; then
        echo "0 passed, 0 failed, 1 skipped"
        exit
    fi
}

# tests VARIABLE=VALUE...: make test-programs with them, in build/NAME.
name=$1
[ $# -eq 0 ] || shift
chosen=$*
tests() {
    unset MAKEFLAGS MAKEOVERRIDES MFLAGS OPENMP
    make=${MAKE:-make} jobs=${JOBS:-$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)}
    unset MAKE
    [ -z "$chosen" ] || set -- "$@" TESTS="$(set_of $chosen)" LEFT=
    exec "$make" -s -j"$jobs" --no-print-directory BUILD="${BUILD:-build}/$name" "$@" test-programs
}

# The programs of some tests.
set_of() {
    for t; do
        case $t in fuzz_*) ;; *) t=test_$t ;; esac
        printf '%s/%s/%s ' "${BUILD:-build}" "$name" "$t"
    done
}

# without PATTERN...: sets `able`, the names of all other tests, and `left`, of these.
without() {
    all=$(find tests -name 'test_*.c' -o -name 'fuzz_*.c' | sort | sed 's,.*/,,; s,^test_,,; s,\.c$,,')
    patterns=$(for p; do printf '^%s$\n' "$p"; done)
    able=$(echo "$all" | grep -v -e "$patterns")
    left=$(echo "$all" | grep -e "$patterns" | tr '\n' ' ')
}

# What holds under -ffast-math: conversions, and Inf and NaN found by their bits.
bits='formats scaler optimizers autocast tensors'

# emulated TRIPLE EMULATOR [FLAG...]: on another processor; static, so that no library is asked for.
emulated() {
    cc=$1-gcc ar=$1-ar emulator=$2
    shift 2
    command -v ${emulator%% *} >/dev/null 2>&1 || need false
    need "$cc" -static
    tests CC="$cc" AR="$ar" LDFLAGS=-static OPENMP= RUNNER="$emulator" CPPFLAGS=-DTEST_EMULATED \
        CFLAGS=-O1 LIGHT=-O0 "$@"
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
O0)
    tests CC="$CC" CFLAGS=-O0 light=-O0 ;;
O3)         # the header in one piece
    tests CC="$CC" CFLAGS=-O3 LIGHT=-O0 PARTS= ;;
lto)
    need $CC -flto
    tests CC="$CC" AR=gcc-ar CFLAGS='-O2 -flto' ;;
trapv)      # an int that overflows ends the test
    tests CC="$CC" CFLAGS='-O1 -ftrapv' LIGHT=-O0 ;;
char)
    tests CC="$CC" LIGHT=-O0 CFLAGS='-O1 -funsigned-char -fshort-enums -fno-strict-aliasing' ;;
m32)        # the kernel's headers are where those of 64 bits are, unless gcc-multilib is installed
    need $CC -m32 -msse2 -mfpmath=sse
    tests CC="$CC" OPENMP= CPPFLAGS="-idirafter /usr/include/$($CC -print-multiarch)" \
        CFLAGS='-O1 -m32 -msse2 -mfpmath=sse' ;;
no_ranks)
    tests CC="$CC" CPPFLAGS=-DMIXPREC_NO_RANKS CFLAGS=-O1 LIGHT=-O0 TESTS="$(set_of \
        mlp scaler step optimizers muon tensors autocast checkpoint operators mistakes warnings)" ;;
no_watch)
    tests CC="$CC" CPPFLAGS=-DMIXPREC_NO_WATCH CFLAGS=-O1 LIGHT=-O0 TESTS="$(set_of \
        scaler step optimizers muon ema tensors autocast checkpoint operators)" ;;
no_checkpoint)
    tests CC="$CC" CPPFLAGS=-DMIXPREC_NO_CHECKPOINT CFLAGS=-O1 LIGHT=-O0 TESTS="$(set_of \
        mlp scaler step optimizers tensors autocast operators warnings)" ;;
no_recipes)
    tests CC="$CC" CPPFLAGS=-DMIXPREC_NO_RECIPES CFLAGS=-O1 LIGHT=-O0 TESTS="$(set_of \
        scaler step optimizers tensors autocast checkpoint operators guard warnings)" ;;
ofast)
    tests CC="$CC" CFLAGS='-Ofast -ffast-math' TESTS="$(set_of $bits)" ;;
gnu)        # gcc's own C joins a product with a sum where it can: the same bits all the same
    tests CC="$CC" STD=gnu17 CFLAGS=-O2 TESTS="$(set_of numerics functions bits optimizers states muon amx)" ;;
finite)
    tests CC="$CC" CFLAGS='-O2 -ffinite-math-only' TESTS="$(set_of $bits)" ;;
clang)      # another compiler, GNU C (products may be fused), everything the processor has
    need clang
    tests CC=clang STD=gnu11 CFLAGS='-O3 -march=native' LIGHT=-O0 ;;
gcc-* | clang-*)
    need "$name"
    tests CC="$name" OPENMP= CFLAGS=-O1 LIGHT=-O0 ;;
musl)
    need musl-gcc
    tests CC=musl-gcc OPENMP= LDFLAGS=-static CFLAGS=-O1 LIGHT=-O0 ;;
tcc)        # no vectors, few warnings; not the tests whose sources it cannot read (NAN is no constant to it)
    need tcc
    without 'attention.*' 'ranks.*' everyday threads amx arm every_call fuzz_options
    tests CC=tcc OPENMP= WARN=-Wall CFLAGS= DEPENDS= CHECKED= TESTS="$(set_of $able)" LEFT="$left" ;;
mingw | clang_cl)   # Windows, by wine; not the tests that are of POSIX
    without 'checkpoint.*' '.*ranks.*' everyday every_call threads gpt2 llama tokenizer fuzz_load fuzz_options fuzz_resume
    wine=$(command -v wine64 || command -v wine || echo /usr/lib/wine/wine64)
    [ -x "$wine" ] || need false
    cc=x86_64-w64-mingw32-gcc
    [ "$name" = mingw ] || cc=$PWD/tests/tools/clang_cl.sh      # _MSC_VER, with vectors
    need "$cc"
    tests CC="$cc" AR=x86_64-w64-mingw32-ar OPENMP= LDFLAGS=-static CFLAGS=-O1 LIGHT=-O0 \
        RUNNER="env WINEDEBUG=-all $wine" EXE=.exe TESTS="$(set_of $able)" LEFT="$left" ;;
aarch64)
    emulated aarch64-linux-gnu qemu-aarch64 ;;
arm)        # of that, the instructions that a processor may have
    emulated aarch64-linux-gnu 'qemu-aarch64 -cpu max' CFLAGS=-O1 TESTS="$(set_of arm pairs bits)" ;;
amx)        # its emulation, under the sanitizers, on mixprec's own threads
    sanitize='-fsanitize=address,undefined -fno-sanitize-recover=all'
    need $CC $sanitize
    tests CC="$CC" OPENMP= CPPFLAGS=-DMIXPREC_THREADS LDLIBS=-pthread CFLAGS="-O0 -g1 $sanitize" \
        TESTS="$(set_of amx)" ;;
tiles | tiles_all)  # AMX, emulated, as the default of whole programs; tiles: of some of them
    grep -q avx512vl /proc/cpuinfo 2>/dev/null || need false
    export MIXPREC_TEST_QUICK=1
    [ "$name" = tiles_all ] || chosen=${chosen:-step mlp muon scaler}
    tests CC="$CC" CPPFLAGS='-D_GNU_SOURCE= -include tests/support/amxsim.h' LIGHT=-O0 \
        CFLAGS='-O1 -Wno-unused-function -Wno-attributes' ;;
armhf)      # numbers of files here do not fit those of its readdir otherwise
    emulated arm-linux-gnueabihf qemu-arm CPPFLAGS='-DTEST_EMULATED -D_FILE_OFFSET_BITS=64' ;;
riscv64)
    emulated riscv64-linux-gnu qemu-riscv64 ;;
ppc64le)
    emulated powerpc64le-linux-gnu qemu-ppc64le ;;
s390x)      # big-endian
    emulated s390x-linux-gnu qemu-s390x CFLAGS='-O2 -fexcess-precision=fast' ;;
*)
    sed -n 's/^#   //p' "$0" >&2
    exit 2 ;;
esac
