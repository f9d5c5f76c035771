#!/bin/sh
# ptx_plants.sh - do the tests detect faults in nvcc's code? Plants one fault at a time into the PTX
# text. It passes if the test that should detect the fault fails on the interpreter. Needs the
# programs that `make test-ptx` builds.
# SPDX-License-Identifier: MIT OR Unlicense
#
#   tests/cuda/ptx_plants.sh [PATTERN]       only faults whose name matches (BUILD)
#
# These are the faults that C++ cannot simulate: in asm strings, and in the code that nvcc generates
# for barriers, addresses, widths, roundings and predicates. tests/tools/mutation.sh has the faults in the
# source.
. tests/support/check.sh

build=${BUILD:-build}/ptx only=$1
NVCC=${NVCC:-nvcc}
if ! command -v "$NVCC" >/dev/null 2>&1 || [ ! -x "$build/sm_80/test_cuda" ]; then
    skip 'nvcc: no fault is planted into its code'
    report
    exit
fi
guard=; command -v timeout >/dev/null 2>&1 && guard='timeout -k 5 120'
export MIXPREC_TEST_QUICK=1

# text ARCH: the companion's PTX, saved once; the tests' own kernels are in smaller texts.
text() {
    if [ ! -s "$tmp/sm_$1.ptx" ]; then
        mkdir "$tmp/saved"
        MIXPREC_TEST_ONLY=none PTX_SAVE="$tmp/saved" "$build/sm_$1/test_cuda" >/dev/null 2>&1
        mv "$(find "$tmp/saved" -name '*.ptx' -size +1000k)" "$tmp/sm_$1.ptx"
        rm -rf "$tmp/saved"
    fi
    echo "$tmp/sm_$1.ptx"
}
# lines TEXT KERNEL LINE WHICH: numbers of the lines that match LINE, in kernels that match KERNEL; WHICH:
# all, or the n-th of each kernel.
lines() {
    kernel=$2 line=$3 which=$4 awk '
        BEGIN { kernel = ENVIRON["kernel"]; line = ENVIRON["line"]; which = ENVIRON["which"] }
        /\.entry / { on = $0 ~ kernel; n = 0 }
        on && $0 ~ line { n++; if (which == "all" || n == which) print NR }' "$1"
}
# run ARCH PROGRAM TEST: status 0 when the program passes with the text $tmp/planted.ptx.
run() {
    PTX_FILE=$tmp/planted.ptx MIXPREC_TEST_ONLY=$3 $guard "$build/sm_$1/test_$2" >"$tmp/out" 2>&1
}
# Before a fault is judged, its test must pass and run.
passes() {
    grep -q -x "$*" "$tmp/passed" 2>/dev/null && return
    cp "$(text "$1")" "$tmp/planted.ptx"
    run "$@" && grep -q '^[1-9][0-9]* passed, 0 failed' "$tmp/out" || { cat "$tmp/out"; return 1; }
    echo "$*" >>"$tmp/passed"
}
planted() {
    lines "$(text "$1")" "$4" "$5" "$6" | edit=$7 awk '{ print $1 " " ENVIRON["edit"] }' >"$tmp/sed"
    [ -s "$tmp/sed" ] || { echo "no line matches $5 in $4"; return 1; }
    sed -E -f "$tmp/sed" "$(text "$1")" >"$tmp/planted.ptx"
    ! cmp -s "$(text "$1")" "$tmp/planted.ptx" || { echo "nothing was changed: $7"; return 1; }
}
# ARCH PROGRAM TEST KERNEL LINE WHICH SED
killed() {
    passes "$1" "$2" "$3" && planted "$@" || return 1
    run "$1" "$2" "$3" || return 0
    cat "$tmp/out"
    echo 'the fault is alive'
    return 1
}
equivalent() {
    passes "$1" "$2" "$3" && planted "$@" || return 1
    run "$1" "$2" "$3"
}
plant() {
    case $1 in *"$only"*) ;; *) return ;; esac
    name=$1; shift
    check "killed: $name" killed "$@"
}
# harmless NAME WHY ...: the program cannot tell, for the reason given, and its tests go on passing.
harmless() {
    case $1 in *"$only"*) ;; *) return ;; esac
    name="$1 ($2)"; shift 2
    check "equivalent: $name" equivalent "$@"
}

forward=attention_forwardILi64ELb0ELb0
forward_bf16=attention_forwardILi64ELb1ELb0
backward=attention_backwardILi64ELb0ELb0ELb0
heads='cuda_attention test_tensor_64'
reg='%r[0-9]+'

# --- asm strings: products of tensor cores -------------------------------------------------
plant 'mma: two registers of A swapped' 80 $heads $forward 'mma[.]sync' all \
    "s/(\\}, \\{$reg,)($reg),($reg),/\\1\\3,\\2,/"
plant 'mma: the registers of B swapped' 80 $heads $forward 'mma[.]sync' all \
    "s/\\{($reg),($reg)\\}/{\\2,\\1}/"
plant 'mma: the rows of the sum swapped' 80 $heads $forward 'mma[.]sync' all \
    's/^([^{]*\{)([^,]*),([^,]*),([^,]*),([^}]*)\}/\1\4,\5,\2,\3}/'
plant 'mma: the columns of the sum swapped' 80 $heads $forward 'mma[.]sync' all \
    's/^([^{]*\{)([^,]*),([^,]*),([^,]*),([^}]*)\}/\1\3,\2,\5,\4}/'
plant 'mma: f16 products declared bf16' 80 $heads $forward 'mma[.]sync' all 's/f16[.]f16/bf16.bf16/'
plant 'mma: bf16 products declared f16' 80 $heads $forward_bf16 'mma[.]sync' all 's/bf16[.]bf16/f16.f16/'
plant 'mma: one product left out' 80 $heads $forward 'mma[.]sync' 5 's/mma[^;]*;//'
plant 'mma, backward: two registers of A swapped' 80 $heads $backward 'mma[.]sync' all \
    "s/(\\}, \\{$reg,)($reg),($reg),/\\1\\3,\\2,/"
plant 'mma on 7.5: the registers of A swapped' 75 $heads $forward 'mma[.]sync' all \
    "s/(\\}, \\{)($reg),($reg)\\}/\\1\\3,\\2}/"

# --- asm strings: fragments ----------------------------------------------------------------
plant 'ldmatrix: not transposed' 80 $heads $forward 'ldmatrix.*trans' all 's/x4[.]trans/x4/'
plant 'ldmatrix: transposed' 80 $heads $forward 'ldmatrix.*x4[.]shared' all 's/x4[.]shared/x4.trans.shared/'
plant 'ldmatrix: two results swapped' 80 $heads $forward 'ldmatrix.*trans' all \
    "s/\\{($reg),($reg),/{\\2,\\1,/"
plant 'ldmatrix: a row of 16 bytes too far' 80 $heads $forward 'ldmatrix.*x4[.]shared' 2 's/\[([^]+]*)[^]]*\]/[\1+16]/'
plant 'ldmatrix: misaligned' 80 $heads $forward 'ldmatrix' 1 's/\[([^]+]*)[^]]*\]/[\1+8]/'

# --- asm strings: asynchronous copies ------------------------------------------------------
plant 'cp.async: one group too many is left' 80 $heads $forward 'wait_group[ \t]*1' all 's/wait_group[ \t]*1/wait_group 2/'
for kernel in forward backward; do
    plant "cp.async, $kernel: a walk without a tile leaves a copy on its way" 80 cuda_attention_apart test_padding \
        attention_${kernel}ILi 'wait_group[ \t]*0' all 's/cp[.]async[.]wait[^;]*;//'
done
plant 'cp.async: no group is committed' 80 $heads $forward 'commit_group' all 's/cp[.]async[.]commit_group;//'
plant 'cp.async: a commit too early' 80 $heads $forward 'cp[.]async[.]cg' 1 's/(cp[.]async.*)$/cp.async.commit_group;\1/'
plant 'cp.async: 8 bytes of 16' 80 $heads $forward 'cp[.]async[.]cg' 2 's/, 16, %r[0-9]+;/, 16, 8;/'
plant 'cp.async: the wrong place' 80 $heads $forward 'cp[.]async[.]cg' 2 's/\[([^]+]*)[^]]*\],/[\1+16],/'
plant 'cp.async, backward: no group is committed' 80 $heads $backward 'commit_group' all 's/cp[.]async[.]commit_group;//'

# --- asm strings: products of a warpgroup ----------------------------------------------------
wide=wide_forwardILi64ELb0
wide_bf16=wide_forwardILi64ELb1
wide_back=wide_backwardILi64ELb0ELb
plant 'wgmma: no fence.proxy.async' 90a $heads $wide 'fence[.]proxy' all 's/fence[.]proxy[^;]*;//'
plant 'wgmma: fence.proxy.async behind the barrier' 90a $heads $wide 'fence[.]proxy|bar[.]sync' all \
    's/fence[.]proxy[^;]*;//; s/bar[.]sync[^;]*;/& fence.proxy.async;/'
plant 'wgmma: no barrier after a tile' 90a $heads $wide 'bar[.]sync' 2 's/bar[.]sync[^;]*;//'
plant 'wgmma: no wgmma.fence' 90a $heads $wide 'wgmma[.]fence' all 's/wgmma[.]fence[^;]*;//'
plant 'wgmma: no wait for products' 90a $heads $wide 'wgmma[.]wait' all 's/wgmma[.]wait[^;]*;//'
plant 'wgmma: one group too many is left' 90a $heads $wide 'wgmma[.]wait.* 0;' 1 's/ 0;/ 1;/'
plant 'wgmma: no group is committed' 90a $heads $wide 'wgmma[.]commit' all 's/wgmma[.]commit[^;]*;//'
plant 'wgmma: b with its sides exchanged' 90a $heads $wide 'wgmma[.]mma' 1 's/, 0;\}/, 1;}/'
plant 'wgmma: b with its sides kept' 90a $heads $wide 'wgmma[.]mma.*, 1;\}' all 's/, 1;\}/, 0;}/'
plant 'wgmma: sums of another tile remain' 90a $heads $wide 'wgmma[.]mma' all 's/setp[.]ne[.]b32 p, [^;]*;/setp.eq.b32 p, 0, 0;/'
plant 'wgmma: each product is alone' 90a $heads $wide 'wgmma[.]mma' all 's/setp[.]ne[.]b32 p, [^;]*;/setp.ne.b32 p, 0, 0;/'
plant 'wgmma: a negative factor' 90a $heads $wide 'wgmma[.]mma' 2 's/, p, 1, 1/, p, -1, 1/'
plant 'wgmma: f16 products declared bf16' 90a $heads $wide 'wgmma[.]mma' all 's/f16[.]f16/bf16.bf16/'
plant 'wgmma: bf16 products declared f16' 90a $heads $wide_bf16 'wgmma[.]mma' all 's/bf16[.]bf16/f16.f16/'
plant 'wgmma: two registers of A swapped' 90a $heads $wide 'wgmma[.]mma.*\}, \{' all \
    "s/(\\}, \\{$reg,)($reg),($reg),/\\1\\3,\\2,/"
plant 'wgmma: two columns of the sum swapped' 90a $heads $wide 'wgmma[.]mma' all \
    's/^([^{]*\{[^{]*\{)([^,]*),([^,]*),/\1\3,\2,/'
plant 'wgmma: one product left out' 90a $heads $wide 'wgmma[.]mma' 5 's/wgmma[^;]*;//'
plant 'wgmma: descriptors of 64-byte swizzle' 90a $heads $wide 'or[.]b64.*, 461168[0-9]*;' all \
    's/or[.]b64[ \t]*(%rd[0-9]+),[^;]*;/& xor.b64 \1, \1, 13835058055282163712;/'
for keys in 0 1; do
    plant "wgmma, backward $keys: no wait for products" 90a $heads $wide_back$keys 'wgmma[.]wait' all 's/wgmma[.]wait[^;]*;//'
    plant "wgmma, backward $keys: no fence.proxy.async" 90a $heads $wide_back$keys 'fence[.]proxy' all 's/fence[.]proxy[^;]*;//'
    plant "wgmma, backward $keys: no wgmma.fence before sums" 90a $heads $wide_back$keys 'wgmma[.]fence' 2 's/wgmma[.]fence[^;]*;//'
done

# --- asm strings: approximations -----------------------------------------------------------
plant 'ex2.approx: the argument itself' 80 $heads $forward 'ex2[.]approx' all 's/ex2[.]approx[.]ftz[.]f32/mov.f32/'
plant 'ex2.approx in softmax' 80 cuda_rows softmax softmax_rowsILi256E 'ex2[.]approx' 3 's/ex2[.]approx[.]ftz[.]f32/mov.f32/'
plant 'rcp.approx: the argument itself' 80 $heads $forward 'rcp[.]' all 's/rcp[.][a-z.]*f32/mov.f32/'

# --- barriers, collectives ------------------------------------------------------------------
plant 'attention: a barrier after a tile is missing' 80 $heads $forward 'bar[.]sync' 3 's/bar[.]sync[^;]*;//'
harmless 'attention, backward: bar.warp.sync is missing' \
    'it brings lanes together and orders no memory; here lanes meet again without it' 80 $heads $backward 'bar[.]warp' all 's/bar[.]warp[^;]*;//'
plant 'block_max: the first barrier is missing' 80 cuda_rows softmax softmax_rowsILi256E 'bar[.]sync' 1 's/bar[.]sync[^;]*;//'
plant 'block_sum: the first barrier is missing' 80 cuda_rows softmax softmax_rowsILi256E 'bar[.]sync' 3 's/bar[.]sync[^;]*;//'
plant 'copy by tiles: a barrier is missing' 80 cuda transposed copy_tilesIj 'bar[.]sync' 1 's/bar[.]sync[^;]*;//'
plant 'product by tiles: a barrier is missing' 80 cuda_gemm test_tiles gemm_tiles 'bar[.]sync' 1 's/bar[.]sync[^;]*;//'
plant 'product by tiles: the other one is missing' 80 cuda_gemm test_tiles gemm_tiles 'bar[.]sync' 2 's/bar[.]sync[^;]*;//'
plant 'a barrier that half a block misses' 80 cuda_rows softmax softmax_rowsILi256E 'bar[.]sync' 1 's/bar/@%p1 bar/'
plant 'shfl: the mask of half a warp' 80 cuda_rows softmax softmax_rowsILi32E 'shfl' 1 's/(shfl[^;]*), (%r[0-9]+), (%r[0-9]+), (%r[0-9]+);/\1, \2, \3, 65535;/'
plant 'shfl: another distance' 80 cuda_rows softmax softmax_rowsILi32E 'shfl' 1 's/(shfl[^;]*), (%r[0-9]+), (%r[0-9]+), (%r[0-9]+);/\1, 3, \3, \4;/'
plant 'shfl: a segment of 16 lanes' 80 cuda_rows softmax softmax_rowsILi32E 'shfl' 1 's/(shfl[^;]*), (%r[0-9]+), (%r[0-9]+), (%r[0-9]+);/\1, \2, 4127, \4;/'

# --- addresses, widths, bounds ---------------------------------------------------------------
plant 'a store of 16 bytes, misaligned' 80 cuda_rows kept_rows norm_kept_rows 'st[.]global[.]wb[.]v4' 1 's/\]/+8]/'
plant 'one row too far' 80 cuda_rows kept_rows norm_kept_rows 'setp[.]ge[.]s64' all 's/ge[.]s64/gt.s64/'
plant 'a load 16 bytes too far' 80 cuda test_dropout dropout_dense 'ld[.]global[.]v4' all 's/\[([^]+]*)[^]]*\]/[\1+16]/'
plant 'two stored elements swapped' 80 cuda_rows kept_rows norm_kept_rows 'st[.]global[.]wb[.]v4' all \
    's/\{([^,]*),([^,]*),/{\2,\1,/'
plant 'a byte loaded for two' 80 cuda test_dropout dropout_dense 'ld[.]global[.]u16' all 's/global[.]u16/global.u8/'
plant 'the next parameter' 80 cuda test_dropout dropout_dense 'ld[.]param[.]u64.*[+]' 1 's/\+[0-9]+\]/+0]/'
plant 'an index without its high half' 80 cuda test_binary sum_columns 'mul[.]hi[.]u64' all 's/mul[.]hi[.]u64/mul.lo.s64/'
plant 'a shared row of one element less' 80 cuda_gemm test_tiles gemm_tiles 'st[.]shared' all 's/\]/+4]/'

# --- arithmetic ------------------------------------------------------------------------------
plant 'div.rn: a product' 80 cuda_optimizers adamw update_chunksIL 'div[.]rn[.]f32' all 's/div[.]rn/mul/'
plant 'sqrt.rn left out' 80 cuda_optimizers adamw update_chunksIL 'sqrt[.]rn[.]f32' all 's/sqrt[.]rn/mov/'
plant 'div.rn by way of an approximate reciprocal' 80 cuda_optimizers adamw update_chunksIL 'div[.]rn[.]f32' all \
    's/div[.]rn[.]f32([^,]*), ([^,]*), ([^;]*);/rcp.approx.ftz.f32 \1, \3; mul.f32 \1, \1, \2;/'
plant 'max for min' 80 cuda_rows softmax softmax_rowsILi32E 'max[.]f32' all 's/max/min/'
plant 'a sign left out' 80 $heads $forward 'neg[.]f32' all 's/neg/mov/'
plant 'copysign left out' 80 cuda test_unary map_dense 'copysign' all 's/copysign[.]f32([^,]*), ([^,]*), ([^;]*);/mov.f32 \1, \3;/'
plant 'the other choice' 80 $heads $forward 'selp[.]f32' all 's/, ([^,]*), ([^,]*), ([^,]*);/, \2, \1, \3;/'
plant 'bf16 widened by 15 bits' 80 cuda test_dropout dropout_dense 'shl[.]b32.*, 16;' all 's/, 16;/, 15;/'
plant 'a random number with or for xor' 80 cuda test_dropout dropout_dense 'xor[.]b64' 1 's/xor/or/'
plant 'the square of a norm' 80 cuda_optimizers gather_prepares gather_chunks 'sqrt[.]rn[.]f64' all 's/sqrt[.]rn/mov/'
plant 'rounding toward 0 for nearest' 80 cuda test_unary map_dense 'cvt[.]rni' all 's/rni/rzi/'
plant 'a root of norms left out' 80 cuda_rows kept_rows norm_kept_rows 'sqrt[.]rn[.]f32' all 's/sqrt[.]rn/mov/'

# --- asm strings: fp8 ------------------------------------------------------------------------
if [ -x "$build/sm_90a/test_cuda" ]; then
    plant 'fp8: two numbers of a conversion swapped' 90a cuda test_convert_fp8 convert_real 'satfinite' all \
        's/, (%f[0-9]+), (%f[0-9]+);/, \2, \1;/'
    plant 'fp8: e4m3 for e5m2' 90a cuda test_convert_fp8 convert_real 'satfinite[.]e5m2' all 's/e5m2/e4m3/'
    plant 'fp8: values of e5m2 for those of e4m3' 90a cuda_recipes recoded recode_eights 'f16x2[.]e4m3' all \
        's/e4m3/e5m2/'
fi

# --- atomic operations, fences ---------------------------------------------------------------
plant 'the last block: no fence' 80 cuda_optimizers gather_many gather_chunks 'membar' all 's/membar[^;]*;//'
plant 'the last block: counted to another number' 80 cuda_optimizers gather_many gather_chunks 'atom[.]global' all 's/inc[.]u32/max.u32/'
plant 'lost updates: each counts twice' 80 cuda_states tallies update_chunksILb1ELb1 'atom[.]global[.]add' all 's/(atom.*)$/\1 \1/'
plant 'a branch the other way' 80 cuda_rows softmax softmax_rowsILi32E '@%p[0-9]+ bra' 4 's/@/@!/'
report
