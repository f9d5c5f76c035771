#!/bin/sh
# test_runtime.sh - if the library's C compiler and the tests' C++ compiler differ, programs link
# only one OpenMP runtime, that of the library. If this is impossible, make says so.
# SPDX-License-Identifier: MIT OR Unlicense
. tests/support/check.sh

unset MAKEFLAGS MAKEOVERRIDES MFLAGS MAKELEVEL OPENMP CXX
# shown VARIABLE ARGUMENT...: what make makes of it.
shown() {
    variable=$1; shift
    "${MAKE:-make}" -s BUILD="$tmp/build" --eval "shown: ; @echo 'is \$($variable)'" "$@" shown 2>&1 | sed -n 's/^is //p; /\*\*\*/p'
}
# linked C CXX: a program of both, its flags from make, has one runtime and two threads.
linked() {
    flags=$(shown OMP_LINK CC="$1" CXX="$2")
    "$1" -fopenmp -c "$tmp/c.c" -o "$tmp/c.o" && "$2" "$tmp/main.cpp" "$tmp/c.o" $flags -o "$tmp/both" &&
        [ "$(ldd "$tmp/both" | grep -c -e libgomp -e libomp -e libiomp)" -eq 1 ] &&
        [ "$(OMP_NUM_THREADS=2 "$tmp/both")" = 2 ]
}
has_openmp() { command -v "$1" >/dev/null && "$1" -fopenmp "$tmp/c.c" -shared -fPIC -o "$tmp/probe" 2>/dev/null; }

mkdir "$tmp/build"
if [ -z "$(shown MAKE_VERSION OPENMP=)" ]; then     # one before 3.82
    echo '0 passed, 0 failed, 8 skipped'
    exit 0
fi
echo 'int count(void) { int n = 0; _Pragma("omp parallel reduction(+:n)") n++; return n; }' >"$tmp/c.c"
printf '#include <stdio.h>\nextern "C" int count(void);\nint main() { printf("%%d\\n", count()); }\n' >"$tmp/main.cpp"

for pair in gcc.g++ clang.clang++ clang.g++ gcc.clang++; do
    cc=${pair%%.*} cxx=${pair#*.}
    if command -v ldd >/dev/null && has_openmp "$cc" && command -v "$cxx" >/dev/null; then
        check "$cc and $cxx: one runtime" linked "$cc" "$cxx"
    else skip "$cc and $cxx"
    fi
done
if has_openmp gcc; then
    shown OMP_LINK CC=gcc CXX=false >"$tmp/out"
    check 'a C++ compiler that cannot: said' grep -q 'CXX=false cannot link the OpenMP of CC=gcc: set CXX' "$tmp/out"
    check 'without OpenMP nobody asks' [ -z "$(shown OMP_LINK CC=gcc CXX=false OPENMP=)" ]
else skip 'a C++ compiler that cannot'; skip 'without OpenMP'
fi
check 'C++ of clang comes from clang'   [ "$(shown CXX CC=/some/clang-16 OPENMP=)" = /some/clang++-16 ]
check 'unless you say otherwise'        [ "$(shown CXX CC=clang CXX=g++ OPENMP=)" = g++ ]
report
