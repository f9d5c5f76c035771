#!/bin/sh
# test_cases.sh - proves that a new member of mixp_unary, mixp_binary or mixp_loss_kind does not compile
# before it has its cases, on the CPU and in the companion.
# SPDX-License-Identifier: MIT OR Unlicense
. tests/check.sh

CC=${CC:-cc} CXX=${CXX:-c++} CUDA=${CUDA-/usr/local/cuda}

cpu() { $CC -std=c99 -fsyntax-only -DMIXPREC_IMPLEMENTATION -x c "$1/mixprec.h"; }
companion() {
    $CXX -std=c++17 -fsyntax-only -w -DMIXPREC_CUDASIM -isystem "$CUDA/include" -I"$1" -Itests \
        -x c++ "$1/mixprec_cuda.cu"
}
# refused SIDE DIR TEXT: does not compile, and the message has this text.
refused() {
    "$1" "$2" >"$2/log" 2>&1 && return 1
    grep -q "$3" "$2/log"
}

sides=cpu
if [ -f "$CUDA/include/cuda_runtime.h" ]; then sides="cpu companion"
else skip "CUDA's headers"
fi
mkdir "$tmp/sound"
cp mixprec.h mixprec_cuda.cu "$tmp/sound/"
for side in $sides; do
    check "$side: sound, it compiles" "$side" "$tmp/sound"
done
for kind in UNARY BINARY LOSS; do
    dir=$tmp/$kind
    mkdir "$dir"
    cp mixprec_cuda.cu "$dir/"
    sed "s/MIXP_${kind}_COUNT\$/MIXP_${kind}_NEW, &/
         s/MIXP_${kind}_DIV, MIXP_${kind}_COUNT\$/MIXP_${kind}_DIV, MIXP_${kind}_NEW, MIXP_${kind}_COUNT/" \
        mixprec.h >"$dir/mixprec.h"
    check "a mixp_$kind more is in the copy" grep -q "MIXP_${kind}_NEW" "$dir/mixprec.h"
    for side in $sides; do
        check "$side: a new mixp_$kind without its case is refused" refused "$side" "$dir" \
            "has_a_case\|has no case"
    done
done
report
