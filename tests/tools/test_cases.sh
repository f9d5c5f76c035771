#!/bin/sh
# test_cases.sh - checks that a new member of mixp_unary, mixp_binary or mixp_loss_kind does not
# compile until it has its cases, on the CPU and in the companion. (Building the tests shows that
# the present members compile.)
# SPDX-License-Identifier: MIT OR Unlicense
. tests/support/check.sh

CC=${CC:-cc} CXX=${CXX:-c++} CUDA=${CUDA-/usr/local/cuda}

cpu() { $CC -std=c99 -fsyntax-only -DMIXPREC_IMPLEMENTATION -x c "$1/mixprec.h"; }
companion() {
    $CXX -std=c++17 -fsyntax-only -w -DMIXPREC_CUDASIM -isystem "$CUDA/include" -I"$1" -Itests -Itests/support \
        -x c++ "$1/mixprec_cuda.cu"
}
# refused SIDE KIND: the copy does not compile, and one message is of this kind.
refused() {
    cat "$tmp/$1.log"
    [ -s "$tmp/$1.failed" ] && grep -q "every_$2_has_a_case\|a mixp_$2\(_kind\)* has no case" "$tmp/$1.log"
}

sides=cpu
if [ -n "$MIXPREC_TEST_QUICK" ]; then skip 'the companion: in make test-long'
elif [ -f "$CUDA/include/cuda_runtime.h" ]; then sides="cpu companion"
else skip "CUDA's headers"
fi
# One copy has a new member of each: all that a compiler finds wrong is told at once.
kinds='unary binary loss' dir=$tmp/more
mkdir "$dir"
cp mixprec_cuda.cu "$dir/"
for kind in $kinds; do
    upper=$(echo "$kind" | tr a-z A-Z)
    echo "s/MIXP_${upper}_COUNT\$/MIXP_${upper}_NEW, &/"
    echo "s/MIXP_${upper}_DIV, MIXP_${upper}_COUNT\$/MIXP_${upper}_DIV, MIXP_${upper}_NEW, MIXP_${upper}_COUNT/"
done >"$tmp/sed"
sed -f "$tmp/sed" mixprec.h >"$dir/mixprec.h"
for kind in $kinds; do
    upper=$(echo "$kind" | tr a-z A-Z)
    check "a mixp_$kind more is in the copy" grep -q "MIXP_${upper}_NEW" "$dir/mixprec.h"
done
for side in $sides; do
    "$side" "$dir" >"$tmp/$side.log" 2>&1 || echo failed >"$tmp/$side.failed"
    for kind in $kinds; do
        check "$side: a new mixp_$kind without its case is refused" refused "$side" "$kind"
    done
done
report
