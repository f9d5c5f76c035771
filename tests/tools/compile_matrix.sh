#!/bin/sh
# compile_matrix.sh - builds and runs a small program that uses mixprec.h, with every compiler,
# language standard and way of including the header.
# SPDX-License-Identifier: MIT OR Unlicense
#
#   tests/tools/compile_matrix.sh [short|languages|full]
#
# Every cell must compile without a warning, link and run. A missing compiler is a skip. short only parses
# C++11 (tests/tools/symbols.sh compiles C99), and the newest standards without vectors. languages runs one
# cell, C++11, and parses each standard from C99 and C++11 on, as far as gcc and clang know it, with the
# warnings that the README promises.
. tests/support/check.sh

full=; [ "$1" = full ] && full=1
root=$(pwd)
jobs=$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)

warn='-Wall -Wextra -Wpedantic -Wconversion -Wsign-conversion -Wshadow -Wundef -Wcast-qual'
warn="$warn -Wdouble-promotion -Wpointer-arith -Wwrite-strings -Wcast-align -Werror"
warn_c="$warn -Wstrict-prototypes -Wmissing-prototypes"

# --- the user's program ------------------------------------------------------------------
. tests/support/user_program.sh
for u in a b; do
    { echo '#define MIXPREC_STATIC'; echo '#define MIXPREC_IMPLEMENTATION'; cat "$tmp/$u.c"; } >"$tmp/s$u.c"
done
# Inside the user's own extern "C", as C headers of C++ projects do it.
cat >"$tmp/extern.cpp" <<'END'
extern "C" {
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
}
#include "user.h"
int user_a(void) { return user_check(); }
int main(void) { return user_a(); }
END
# After headers that define names no library should trip over.
cat >"$tmp/hostile.c" <<'END'
#ifndef __cplusplus
#include <complex.h>
#endif
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#define min(a, b) ((a) < (b) ? (a) : (b))
#define max(a, b) ((a) > (b) ? (a) : (b))
#define near
#define far
#define small char
#define interface struct
#define IN
#define OUT
#define ERROR 0
#define TRUE 1
#define FALSE 0
#define N 3
#define X 4
#define F16 f
#define CHECK(x) (x)
#define PI 3.14159
#define swap(a, b) swap_is_a_macro
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include "user.h"
int user_a(void) { return user_check(); }
int main(void) { return user_a(); }
END
# Shared arithmetic on the device as well.
{ cat "$tmp/a.c"; cat <<'END'
__global__ void user_kernel(const float *x, mixp_f16 *y) { y[threadIdx.x] = mixp_f16_from_f32(x[threadIdx.x]); }
END
} >"$tmp/a.cu"
for u in a b sa sb hostile; do cp "$tmp/$u.c" "$tmp/$u.cpp"; [ -f "$tmp/$u.cu" ] || cp "$tmp/$u.c" "$tmp/$u.cu"; done

# --- cells -------------------------------------------------------------------------------
has() { command -v "$1" >/dev/null 2>&1; }

# Does the compiler take these flags? (A standard it does not know yet, -m32 without its libc.)
takes() {
    echo 'int main(void) { return 0; }' >"$tmp/probe.$lang"
    "$cc" "$@" "$tmp/probe.$lang" -o "$tmp/probe" >/dev/null 2>&1
}

# cell FLAGS SOURCE...: one cell of compiler $cc, language $lang, in the background; results
# are gathered by `collect`. A SOURCE without a suffix gets the language's; -lX is a library.
cells=0
cell() {
    flags=$1; shift
    if ! has "$cc" || ! takes ${flags%%-include*}; then skip "$cc $flags"; return; fi
    sources=
    for s; do case $s in *.* | -*) sources="$sources $s" ;; *) sources="$sources $s.$lang" ;; esac; done
    cells=$((cells + 1))
    echo "$cc $flags:$sources" >"$tmp/$cells.name"
    ( cd "$tmp" && $cc $strict $flags -I"$root" -I. $sources -lm -o "$cells.out" && ./$cells.out
      echo $? >$cells.status ) >"$tmp/$cells.log" 2>&1 &
    if [ $((cells % jobs)) -eq 0 ]; then wait; fi
}
collect() {
    wait
    i=0
    while [ $i -lt $cells ]; do
        i=$((i + 1))
        check "$(cat "$tmp/$i.name")" sh -c "cat '$tmp/$i.log'; exit \$(cat '$tmp/$i.status')"
    done
}

# Mixed languages: the implementation by one compiler, its caller by another.
mixed() {
    if has "$1" && has "$2"; then
        check "implementation by $1, caller by $2" sh -c "cd '$tmp' &&
            $1 -I'$root' $warn -c a.$3 -o mixed_a.o && $2 -I'$root' $warn -c b.$4 -o mixed_b.o &&
            $5 mixed_a.o mixed_b.o -lm -o mixed && ./mixed"
    else skip "implementation by $1, caller by $2"; fi
}

# parse STANDARD [FLAG]: the implementation by compiler $cc in language $lang, without code, but for a warning that
# takes gcc long here (tests/tools/symbols.sh).
parse() {
    if ! has "$cc" || ! takes "-std=$1"; then skip "$cc -std=$1"; return; fi
    check "$cc -std=$1 parses the implementation without a warning" \
        sh -c "$cc -std=$1 $strict -Wno-misleading-indentation $2 -fsyntax-only -I'$root' -I'$tmp' '$tmp/a.$lang'"
}

if [ "$1" = languages ]; then
    lang=cpp strict=$warn cc=${CXX:-g++}
    cell '-std=c++11 -O0' a b
    collect
    for cc in gcc clang; do
        lang=c strict=$warn_c
        for std in c99 c11 c17 c2x; do parse $std; done
    done
    for cc in g++ clang++; do
        lang=cpp strict=$warn
        for std in c++11 c++14 c++17 c++20 c++2b; do parse $std; done
    done
    # All warnings of clang 14 (each version has others), but for those that ask for another language or another
    # design: C90's declarations, C++'s casts and nullptr, C++98; layouts without padding; no comparison of floats; no
    # cast of a call's result; no call of a function that may be unused; a switch without a default, and one with every
    # name; a vector that a loop of constant length fills; the name of a checkpoint's field as a format.
    case $(clang -dumpversion 2>/dev/null) in
    14.*) ;;
    *) skip 'clang 14 with -Weverything'; report; exit ;;
    esac
    every='-Weverything -Wno-declaration-after-statement -Wno-padded -Wno-float-equal -Wno-switch-enum'
    every="$every -Wno-covered-switch-default -Wno-conditional-uninitialized -Wno-format-nonliteral"
    every="$every -Wno-bad-function-cast -Wno-used-but-marked-unused"
    cc=clang lang=c strict="$warn_c $every"
    parse c99
    cc=clang++ lang=cpp
    strict="$warn $every -Wno-old-style-cast -Wno-zero-as-null-pointer-constant -Wno-c++98-compat -Wno-c++98-compat-pedantic"
    parse c++11
    report; exit
fi

if [ -z "$full" ]; then
    lang=c strict=$warn_c cc=${CC:-cc}
    parse c2x -DMIXPREC_NO_SIMD
    lang=cpp strict=$warn cc=${CXX:-g++}
    parse c++11
    parse c++2b -DMIXPREC_NO_SIMD
    report; exit
fi

for cc in gcc clang; do
    lang=c strict=$warn_c
    for std in c99 c11 c17 gnu11 c2x; do cell "-std=$std -O0" a b; done
    for std in c99 c11 c2x; do cell "-std=$std -O0" sa sb; done
    cell '-std=gnu11 -O0' hostile
    for o in -O2 -Os -Ofast; do cell "-std=c99 $o" a b; done
    cell '-std=c11 -O1 -fopenmp' a b
    for o in -O0 -O2; do cell "-std=c99 $o -DMIXPREC_NO_SIMD" a b; done
    cell '-std=c99 -O3 -march=native' a b
    cell '-std=c99 -O1 -m32 -msse2 -mfpmath=sse' a b
    cell '-std=c99 -O1 -funsigned-char -fshort-enums -fno-strict-aliasing' a b
    [ $cc = gcc ] || cell '-std=c99 -O1 -DMIXPREC_SMALL' a b
    if echo '#include <cblas.h>' | $cc -E - >/dev/null 2>&1; then
        cell '-std=c99 -O1 -DMIXPREC_CBLAS' a b -lopenblas
    else skip "$cc -DMIXPREC_CBLAS (no cblas.h)"; fi
done
for cc in g++ clang++; do
    lang=cpp strict=$warn
    for std in c++11 c++14 c++17 c++20 c++2b; do cell "-std=$std -O0" a b; done
    for std in c++11 c++20; do cell "-std=$std -O0" sa sb; cell "-std=$std -O0" extern; done
    cell '-std=c++17 -O0' hostile
    for o in -O2 -Ofast; do cell "-std=c++17 $o" a b; done
    cell '-std=c++11 -O1 -fopenmp -fno-exceptions -fno-rtti' a b
done
cc=nvcc; has nvcc || cc=${CUDA_HOME:-/usr/local/cuda}/bin/nvcc
lang=cu strict='-Werror all-warnings -Xcompiler -Wall,-Wextra'
for std in c++14 c++17 c++20; do cell "-std=$std" a b; done
cell -std=c++17 sa sb
# Arithmetic wider than float is refused, in one line that says what to do.
refused() {
    $1 -std=c99 -mfpmath=387 -I. -fsyntax-only "$tmp/a.c" 2>"$tmp/refused" && return 1
    grep ' error: ' "$tmp/refused" >"$tmp/errors"
    cat "$tmp/errors"
    [ "$(wc -l <"$tmp/errors")" -eq 1 ] && grep -q 'needs FLT_EVAL_METHOD 0.*-mfpmath=sse' "$tmp/errors"
}
if echo | gcc -mfpmath=387 -x c -fsyntax-only - 2>/dev/null; then
    check 'gcc -mfpmath=387 is refused in one line' refused gcc
else skip 'gcc -mfpmath=387'; fi
collect
mixed gcc g++ c cpp g++
mixed g++ gcc cpp c g++
mixed gcc clang c c clang
report
