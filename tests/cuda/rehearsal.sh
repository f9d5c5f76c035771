#!/bin/sh
# rehearsal.sh - `gpu.sh first` without a GPU: its kit as PTX, on the interpreter that stands for CUDA's libraries. The
# bench and the trainer run as nvcc compiled them, the trainer's losses agree with the CPU's, the probe's answers are
# recorded in tests/cuda/probe.txt. Skipped without nvcc.
# SPDX-License-Identifier: MIT OR Unlicense
. tests/support/check.sh

build=${BUILD:-build}
case $build in /*) ;; *) build=$PWD/$build ;; esac
if [ ! -x "${CUDA:-/usr/local/cuda}/bin/nvcc" ]; then
    skip 'nvcc: no rehearsal of the GPU run'
    report
    exit
fi

# rehearsed: the table is in $tmp/said. CUDA, BUILD and MAKE come from the Makefile.
rehearsed() {
    OUT=$tmp/out tests/cuda/gpu.sh rehearse >"$tmp/said" 2>&1
    status=$?
    tail -n 40 "$tmp/said"
    return $status
}
said() { grep -q -e "$1" "$tmp/said" || { cat "$tmp/said"; return 1; }; }
lines() { [ "$(grep -c -e "$1" "$tmp/said")" = "$2" ] || { cat "$tmp/said"; return 1; }; }
few_files() { ls "$tmp/out"; [ "$(ls "$tmp/out" | wc -l)" = 2 ]; }
short_enough() { [ "$(sed -n '/^first, /,$p' "$tmp/said" | wc -c)" -lt 12000 ]; }
check 'the first call, on the interpreter'      rehearsed
check 'the tests pass'                          said '^TESTS [1-9][0-9]* passed, 0 failed, [0-9]* skipped, in 3'
check 'the simulation answers as recorded'      said '^captures: all [1-9][0-9]* answers are the simulation'
check 'every product has an offer'              lines '^Lt .*status 0, 3 offers, 3 ran' 12
check 'the bench runs'                          said '^OURS (bench_cuda --part first: status 0)'
check 'a step of GPT-2 as a graph'              said '^GPT-2 bf16 level 2, as a graph, sums and GELU'
check 'other dtypes by --dtype'                 said '^GPT-2 f32 level 1, as a graph'
check 'five runs of the trainer are the CPU'"'"'s' lines '^train .* 4 rows, GPU .*, val [0-9.]* (status 0)$' 5
check 'nothing failed'                          said ', 0 problems$'
check 'a table and an archive of logs'         few_files
check 'below 12,000 characters'                 short_enough

# Without managed memory the tests' arrays lie in mapped memory.
mapped() {
    MIXPREC_TEST_QUICK=1 PTX_MANAGED=0 "$build/rehearsal/bin/$1" >"$tmp/mapped" 2>&1
    status=$?
    cat "$tmp/mapped"
    [ $status = 0 ] && grep -q '^[1-9][0-9]* passed, 0 failed' "$tmp/mapped"
}
check 'a test in mapped memory'                 mapped test_cuda_optimizers
report
