#!/bin/sh
# ptx.sh - nvcc's code without a GPU: runs the programs of `make test-gpu`, for several
# architectures, on the interpreter in tests/cuda. Needs the programs that `make test-ptx` builds.
# Skipped without nvcc.
# SPDX-License-Identifier: MIT OR Unlicense
#
#   tests/cuda/ptx.sh                (BUILD; PTX_ARCHS, by default "75 80 90a"; COVERAGE=FILE keeps the table)
#
# Each test of a program counts as one test. Races, reads of unwritten shared memory and bad
# addresses make the program fail. Each kernel of each architecture must run at least once.
. tests/support/check.sh

build=${BUILD:-build}/ptx archs=${PTX_ARCHS:-75 80 90a}
case $build in /*) ;; *) build=$PWD/$build ;; esac
NVCC=${NVCC:-nvcc}
if ! command -v "$NVCC" >/dev/null 2>&1; then
    skip 'nvcc: none of its code is interpreted'
    report
    exit
fi
guard=; command -v timeout >/dev/null 2>&1 && guard='timeout -k 5 300'
export MIXPREC_TEST_QUICK=1
coverage=${COVERAGE:-$tmp/coverage}
rm -f "$coverage"

# --- the programs ------------------------------------------------------------------------
# count_tests NAME STATUS: adds what the program's last line says. PTX of another nvcc is a skip.
count_tests() {
    eval "$(tail -n 1 "$tmp/out" |
        sed -n 's/^\([0-9]*\) passed, \([0-9]*\) failed, \([0-9]*\) skipped$/p=\1 f=\2 s=\3/p')"
    if [ "$2" = 77 ] && grep -q "^ptx: .* another nvcc" "$tmp/err"; then p=0 f=0 s=1
    elif [ -z "$p" ]; then p=0 f=1 s=0
    elif [ "$2" != 0 ] && [ "$f" = 0 ]; then f=1
    fi
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
    if [ "$f" = 0 ]; then echo "ok   $1: $p passed, $s skipped"
    else
        echo "FAIL $1: exit status $2, $p passed, $f failed"
        grep -v '^ok ' "$tmp/out" | tail -n 20 | sed 's/^/  /'
        tail -n 8 "$tmp/err" | sed 's/^/  /'
    fi
}
# program ARCH NAME WORDS: runs it and counts its tests.
program() {
    p= f= s=
    PTX_COVERAGE=$coverage PTX_REPORT=1 $guard "$build/sm_$1/$2" >"$tmp/out" 2>"$tmp/err"
    count_tests "sm_$1 $2$3" $?
    sed -n '/^ptx: [0-9]* launches/s/^/     /p' "$tmp/err"
}
for arch in $archs; do
    for path in "$build/sm_$arch"/test_cuda*; do program "$arch" "${path##*/}"; done
done
# The paths of 7.0, where attention has no tensor cores: `make test-ptx` builds these programs.
if [ -x "$build/sm_70/test_cuda_rows" ]; then
    export PTX_GPU=70
    for name in cuda cuda_attention cuda_rows; do program 70 test_$name; done
    unset PTX_GPU
fi
# A GPU of 9.0 runs PTX of 8.0 as well, which has no products of a warpgroup.
if [ -x "$build/sm_80/test_cuda_attention" ]; then
    export PTX_GPU=90 MIXPREC_TEST_ONLY=test_tensor_64
    program 80 test_cuda_attention ', on 9.0'
    check 'mixp_cuda reports slow code'     grep -q 'slow: .*compiled without sm_90a' "$tmp/out"
    unset PTX_GPU MIXPREC_TEST_ONLY
fi
# Warpgroups in another order, and with rough sums.
if [ -x "$build/sm_90a/test_cuda_attention" ]; then
    export PTX_ROUGH=1 PTX_SCHEDULE=permuted MIXPREC_TEST_ONLY=test_tensor_64
    program 90a test_cuda_attention ', rough and permuted'
    fast() { ! grep slow: "$tmp/out"; }
    check 'mixp_cuda reports no slow code of 9.0a' fast
    unset PTX_ROUGH PTX_SCHEDULE MIXPREC_TEST_ONLY
fi
# narrow_tiles runs only on 10.0 and newer.
[ ! -x "$build/sm_100/test_cuda_narrow" ] || program 100 test_cuda_narrow

# Bounds that stand the least exact hardware, and other orders of warps and blocks, on one architecture.
case " $archs " in *' 80 '*)
    export PTX_ROUGH=1
    for name in cuda cuda_rows cuda_attention cuda_functions; do program 80 test_$name ', rough'; done
    unset PTX_ROUGH
    export PTX_MANAGED=0 MIXPREC_TEST_ONLY=transfers
    program 80 test_cuda ', in mapped memory'
    unset PTX_MANAGED MIXPREC_TEST_ONLY
    for order in reversed permuted; do
        export PTX_SCHEDULE=$order
        for name in cuda_rows cuda_optimizers cuda_attention; do program 80 test_$name ", $order"; done
        unset PTX_SCHEDULE
    done ;;
esac

# --- a build with --use_fast_math ---------------------------------------------------------
# A product that flushes subnormals, as -ftz=true makes it, in the kernel that asks for a known answer.
mkdir "$tmp/companion"
flushed() {
    MIXPREC_TEST_ONLY=none PTX_SAVE=$tmp/companion "$build/sm_$1/test_cuda_training" >/dev/null 2>&1
    awk '/\.entry/ { on = /check_subnormals/ } on { n += sub(/mul\.f32/, "mul.ftz.f32") }
        { print } END { exit n != 1 }' "$(find "$tmp/companion" -size +1000k)" >"$tmp/flushed.ptx" || return 1
    MIXPREC_TEST_ONLY=trains_in_f32 PTX_FILE=$tmp/flushed.ptx $guard "$build/sm_$1/test_cuda_training" >"$tmp/out" 2>&1
    grep -q 'compiled with --use_fast_math' "$tmp/out" || { tail -n 20 "$tmp/out"; return 1; }
}
case " $archs " in *' 80 '*) check '--use_fast_math is found by a known answer' flushed 80 ;; esac

# --- coverage ----------------------------------------------------------------------------
# Columns: architecture, kernel, instructions, those reached, a bit for each.
readable() { if command -v c++filt >/dev/null 2>&1; then c++filt; else cat; fi; }
# On 7.5 tensor cores know no bf16, and 64 KB of shared memory hold no backward of 128, nor one of 64 that
# keeps its scores straight: the companion never launches these kernels there. cuBLASLt multiplies fp8 from
# 8.9 on, and has tiles of scales from 10.0 on.
never='^sm_75 .*(attention_(forward|backward)ILi[0-9]+ELb1|attention_backwardILi(128|64ELb0ELb[01]ELb0))'
never="$never|^sm_(75|80) .*narrow_(codes|tiles|floats)|^sm_90a? .*narrow_tiles"
# Where products of a warpgroup (wide_) take attention of 64 and 128, the kernels for other GPUs rest, unless scores
# bend. Code for other GPUs has no such products.
never="$never|^sm_90a .*attention_(forwardILi(64|128)ELb[01]|backwardILi(64|128)ELb[01]ELb[01])ELb0E"
never="$never|^sm_(75|80|90|100) .*wide_(forward|backward)"
not_run() {
    awk -v arch="sm_$1" -v never="$never" '$1 == arch && !$4 && (arch " " $2) !~ never { print $2 }' "$coverage"
}
all_run() {
    not_run "$1" | readable
    [ -z "$(not_run "$1")" ]
}
for arch in $archs; do
    [ -s "$coverage" ] || break
    awk -v arch="sm_$arch" '$1 == arch { n++; run += $4 > 0; if ($4) { all += $3; reached += $4 } }
        END { printf "     %s: %d of %d kernels ran, %d of their %d instructions were reached\n",
                     arch, run, n, reached, all }' "$coverage"
    check "sm_$arch: every kernel ran" all_run "$arch"
done
tiles_ran() { [ "$(awk '$1 == "sm_100" && $2 ~ /narrow_tiles/ && $4' "$coverage" | wc -l)" -eq 1 ]; }
[ ! -x "$build/sm_100/test_cuda_narrow" ] || check 'sm_100: narrow_tiles ran' tiles_ran

# --- does the interpreter report faults? -------------------------------------------------
# fault NAME TEXT: the kernel NAME of $kernels ends with status 1 and a line with TEXT.
kernels=ptx_faults
faults() {
    $guard "$build/$kernels" "$1" >"$tmp/fault" 2>&1
    [ $? = 1 ] && grep -q "^ptx: .*$2" "$tmp/fault" && return
    cat "$tmp/fault"
    return 1
}
right() { $guard "$build/$kernels" "$1" >"$tmp/fault" 2>&1 && [ "$(cat "$tmp/fault")" = 'done' ]; }
rights() {
    for kernel in $("$build/$kernels" | grep '^right'); do
        check "the interpreter finds nothing in $kernel" right "$kernel"
    done
}
fault() { check "the interpreter reports: $1" faults "$1" "$2"; }
fault beyond            'a write beyond all memory: 4 bytes'
fault before            'a write beyond all memory: 4 bytes'
fault misaligned        'misaligned: 16 bytes'
fault shared_end        'beyond shared memory: 4 bytes at 100'
fault unwritten         'a read of shared memory that no thread has written'
fault race_read         'a race in shared memory'
fault race_write        'a race in shared memory: a write after a read'
fault race_warp         'a race in shared memory: a read'
fault race_halves       'a race in shared memory: a write after a read'
fault early_read        'a read of shared memory that no thread has written'
fault copies_left       'a thread exits while its copies are under way'
fault divergent_barrier 'divergent barrier'
fault missing_lane      'lanes 0000ffff wait for lanes that never come'
fault gone_lane         'lanes that never come\|have exited'
fault no_fence          'a race of blocks in global memory'
fault no_atomic         'a race of blocks in global memory'
fault blocks_write      'a race of blocks in global memory: after a write'
fault blocks_overlap    'a race of blocks in global memory'
fault stale_cache       'ld.global.nc reads what its own launch has written'
rights

# Products of a warpgroup, for sm_90a.
kernels=ptx_wgmma
fault no_proxy_fence    'no fence.proxy.async and barrier between a write and a product'
fault late_proxy_fence  'no fence.proxy.async and barrier between a write and a product'
fault copied            'no fence.proxy.async and barrier between a write and a product'
fault rows_alone        'no fence.proxy.async and barrier between a write and a product'
fault no_barrier        'a race in shared memory'
fault early_sums        'a read of a register of an unfinished product: register %f'
fault missing_wait      'a thread exits while its products are under way'
fault left_behind       'a read of a register of an unfinished product: register %f'
fault early_write       'a write to a register of an unfinished product: register %f'
fault early_factor      'a read of a register of an unfinished product: register %r'
fault no_register_fence 'no wgmma.fence between a use of a register and a product: register %f'
fault late_factor       'no wgmma.fence between a use of a register and a product: register %r'
fault late_sums         'no wgmma.fence between a use of a register and a product: register %f'
fault other_columns     'a product uses a register of an unfinished product: register %f'
fault overwritten       'a write to shared memory that an unfinished product reads'
fault unwritten         'a read of shared memory that no thread has written'
fault missing_warp      'a warp misses the wgmma of line'
fault few_warps         'wgmma in a warpgroup of fewer than four warps'
fault two_descriptors   'warps of a warpgroup give wgmma different descriptors'
fault lane_descriptors  'lanes of a warp give wgmma different descriptors'
fault misaligned        'a swizzled matrix is misaligned: 1024 bytes at 100'
fault leaves_row        'a swizzled matrix leaves its row: 128 bytes at 70'
fault stride            'a stride of a swizzled matrix is misaligned: 1024 bytes at 600'
fault base_offset       'a matrix descriptor with a base offset'
fault unknown_bits      'a matrix descriptor with unknown bits'
fault beyond            'beyond shared memory: 16 bytes at 800'
rights
products() { $guard "$build/ptx_wgmma" "$@" >"$tmp/fault" 2>&1 || { cat "$tmp/fault"; return 1; }; }
check 'products of each layout are right' products products
check 'and with rough sums, most of them exact here' env PTX_ROUGH=1 "$build/ptx_wgmma" small

# --- bad input ---------------------------------------------------------------------------
mkdir "$tmp/text"
PTX_SAVE=$tmp/text "$build/ptx_faults" right_exchange >/dev/null 2>&1
good=$tmp/text/0.ptx

# refused STATUS TEXT: with $tmp/bad.ptx, the kernel $first ends with this status and one line with TEXT.
kernels=ptx_faults first=right_exchange
refused() {
    PTX_FILE=$tmp/bad.ptx "$build/$kernels" "$first" >"$tmp/fault" 2>&1
    [ $? = "$1" ] && [ "$(wc -l <"$tmp/fault")" = 1 ] && grep -q "^ptx: .*$2" "$tmp/fault" && return
    cat "$tmp/fault"
    return 1
}
edited() { sed "$1" "$good" >"$tmp/bad.ptx"; ! cmp -s "$good" "$tmp/bad.ptx"; }
check 'the PTX of a program can be saved'       grep -q '^\.target sm_80' "$good"
check 'and taken from a file'                   env PTX_FILE="$good" "$build/ptx_faults" right_exchange
edited 's/ld\.global\.f32/ld.global.f31/'
check 'an unknown modifier is named'            refused 1 'unknown opcode ld.global.f31: line [0-9]* of sm_80'
edited 's/bar\.sync/bar.arrive/'
check 'an unknown opcode is named'              refused 1 'unknown opcode bar.arrive'
edited 's/\.version.*/.version 9.1/'
check "another nvcc's version is skipped"       refused 77 "PTX 9.1 is another nvcc's"
edited 's/\.version.*/.version 7.8/'
check 'and so is one of nvcc 11'                refused 77 "PTX 7.8 is another nvcc's"
head -c 20000 "$good" >"$tmp/bad.ptx"
check 'a text cut in a kernel is truncated'     refused 1 'the PTX is truncated'
sed '/entry.*right_exchange/,$d' "$good" >"$tmp/bad.ptx"
check 'a text without a kernel, too'            refused 1 'the PTX is truncated: it has no kernel'
echo '# no PTX at all' >"$tmp/bad.ptx"
check 'what is no PTX is refused'               refused 1 'the PTX is truncated\|this is no PTX'
rm "$good"
PTX_SAVE=$tmp/text "$build/ptx_wgmma" right_products >/dev/null 2>&1
kernels=ptx_wgmma first=right_products
edited 's/target sm_90a/target sm_90/'
check 'wgmma needs sm_90a'                      refused 1 'an opcode of sm_90a alone: wgmma.fence'
edited 's/m64n8k16/m64n12k16/'
check 'and a multiple of 8 columns'             refused 1 'unknown opcode wgmma.mma_async.sync.aligned.m64n12k16'
edited 's/f32\.bf16\.bf16/f16.f16.f16/'
check 'its sums are f32'                        refused 1 'unknown opcode wgmma.mma_async.sync.aligned.m64n8k16.f16'
edited 's/m64n8k16/m64n16k16/'
check 'as many sums as columns'                 refused 1 'wrong operands of wgmma.mma_async'
edited 's/, p, 1, 1, 0;/, p, 1, 1;/'
check 'and all operands'                        refused 1 'wrong operands of wgmma.mma_async'
no_nvcc() { [ "$(NVCC=/no/nvcc tests/cuda/ptx.sh | tail -n 1)" = '0 passed, 0 failed, 1 skipped' ]; }
check 'without nvcc there is one skip'          no_nvcc
report
