#!/bin/sh
# test_make.sh - what make says without nvcc and without a compiler for the web, and that no target makes another one
# rebuild everything. Compilers that do nothing stand for the real ones.
# SPDX-License-Identifier: MIT OR Unlicense
. tests/support/check.sh

built="$tmp/build"
run_make() { env -u MAKEFLAGS -u MAKELEVEL -u MFLAGS -u NVCC -u CUDA "${MAKE:-make}" BUILD="$built" "$@"; }
said() { grep -Fqx -e "$1" "$tmp/said" || { cat "$tmp/said"; return 1; }; }

# --- without nvcc ----------------------------------------------------------------------------
without_nvcc() {
    run_make CUDA=/nonexistent "$1" >"$tmp/said" 2>&1 && return 1
    said "$1: nvcc was not found; set CUDA=dir" && ! ls "$built"/*.o
}
for target in cuda bench-cuda test-gpu; do
    check "make $target without nvcc: one line, and nothing is compiled" without_nvcc "$target"
done

# --- without a compiler for the web ----------------------------------------------------------
printf '#!/bin/sh\necho "cannot find crt1-reactor.o" >&2\nexit 1\n' >"$tmp/no_wasm"
chmod +x "$tmp/no_wasm"
without_wasm() {
    run_make WASM_CC="$tmp/no_wasm" web >"$tmp/said" 2>&1 && return 1
    said 'cannot find crt1-reactor.o' || return
    for package in clang lld wasi-libc libclang-rt-14-dev-wasm32; do grep -q "$package" "$tmp/said" || return; done
}
check 'make web without a compiler shows its text and names four packages' without_wasm

# --- nothing is rebuilt twice ------------------------------------------------------------------
# BUILD/flags is rewritten where flags differ, and then everything is rebuilt.
printf '#!/bin/sh\nfor out; do case $last in -o) : >"$out" ;; esac; last=$out; done\n' >"$tmp/cc"
printf '#!/bin/sh\n: >"$2"\n' >"$tmp/ar"
chmod +x "$tmp/cc" "$tmp/ar"
mkdir -p "$tmp/cuda/bin" "$tmp/cuda/include"
cp "$tmp/cc" "$tmp/cuda/bin/nvcc"
: >"$tmp/cuda/include/cuda_runtime.h"
fake() { run_make CC="$tmp/cc" CXX="$tmp/cc" AR="$tmp/ar" CUDA="$tmp/cuda" NVCC="$tmp/cuda/bin/nvcc" OPENMP= "$@"; }
twice() {
    fake "$@" >"$tmp/first" 2>&1 || { cat "$tmp/first"; return 1; }
    fake "$@" >"$tmp/second" 2>&1 || { cat "$tmp/second"; return 1; }
    ! grep -E '^  (cc|c\+\+|nvcc) ' "$tmp/second"
}
check 'make, then make cuda, then both again: nothing is compiled again' twice examples cuda
one_by_one() {
    for target in examples cuda examples "$built/test_threads" examples "$built/trainer"; do
        fake "$target" >"$tmp/said" 2>&1 || { cat "$tmp/said"; return 1; }
        ! grep -F "cc $built/mixprec_" "$tmp/said" || return
    done
}
check 'nor does one target rebuild the library of another' one_by_one
report
