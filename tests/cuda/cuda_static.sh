#!/bin/sh
# cuda_static.sh - checks nvcc's output for mixprec_cuda.cu: no warning, no stack frame and no spill
# in any kernel, on eight architectures (ARCHS chooses fewer); the architectures that the file
# refuses; 16-byte loads and stores in the PTX. Skipped without nvcc.
# SPDX-License-Identifier: MIT OR Unlicense
. tests/support/check.sh

NVCC=${NVCC:-nvcc}
if ! command -v "$NVCC" >/dev/null 2>&1; then
    skip 'nvcc'
    report
    exit
fi

# compiled ARCH: leaves the report of the assembler in $tmp/ptxas.ARCH
compiled() {
    "$NVCC" -std=c++17 -arch="sm_$1" -Werror all-warnings -Xcompiler -Wall,-Wextra -Xptxas -v -cubin \
        -I. mixprec_cuda.cu -o "$tmp/cubin" >"$tmp/ptxas.$1" 2>&1 || { cat "$tmp/ptxas.$1"; return 1; }
}
# Every kernel has its line, and all three numbers in it are 0. But CUDA's own sin, cos and tan keep 28 or
# 32 bytes for what exceeds 105,615, in their maps and in those of the slopes of sin and cos: all there is on
# 8.0 and 9.0. On 7.5, attention of 64 and the update that counts spill 16 bytes; attention of 128 has no
# backward there, though it is compiled.
# On 10.0 one strided map, on 12.0 attention of 64 and norms whose rows stay in registers spill 4 to 16.
trigonometry='map_denseILi(13|14|29|46|47)E'
known="$trigonometry|^75 .*(attention_backwardILi128E|attention_forwardILi64ELb0ELb0E|update_chunksILb0ELb1E)"
known="$known|^100 .*map_stridedILi77E|^120 .*(attention_forwardILi64E|norm_kept_rows)"
lean() {
    awk -v arch="$1" -v known="$known" '
         /Compiling entry|Function properties/ { name = $0 }
         /bytes stack frame/ {
             n++
             if (!$1 && !$5 && !$9) next
             print name
             print
             if ($1 > 72 || (arch " " name) !~ known) bad = 1
         }
         END { exit bad || n < 20 }' "$tmp/ptxas.$1"
}
# C7510 to C7520: the assembler makes products of warpgroups wait for each other.
async() { ! grep 'C75[12][0-9]' "$tmp/ptxas.$1"; }
for arch in ${ARCHS:-75 80 86 89 90 90a 100 120}; do
    check "sm_$arch: no warning"             compiled "$arch"
    check "sm_$arch: no stack, no spill"     lean "$arch"
    check "sm_$arch: products are not serialised" async "$arch"
done
# The PTX of 8.0, out of a program that `make test-ptx` built: nvcc would take two minutes to make it again.
program=${BUILD:-build}/ptx/sm_80/test_cuda_training
if [ "$program" -nt mixprec_cuda.cu ]; then
    mkdir "$tmp/saved" && MIXPREC_TEST_ONLY=none PTX_SAVE=$tmp/saved "$program" >/dev/null 2>&1
    mv "$(find "$tmp/saved" -size +1000k)" "$tmp/ptx"
else "$NVCC" -std=c++17 -arch=sm_80 -ptx -I. mixprec_cuda.cu -o "$tmp/ptx" 2>/dev/null
fi
for instruction in 'ld\.global.*\.v4' 'st\.global.*\.v4' 'mma\.sync' 'cp\.async' 'ldmatrix'; do
    check "the PTX has $instruction"         grep -q "$instruction" "$tmp/ptx"
done
# no_depots: no kernel of the PTX has an array in local memory, but for CUDA's sin, cos and tan, and the look,
# whose array is in registers once assembled: lean sees none.
no_depots() {
    awk -v known="$trigonometry" '
        /\.entry/ { name = $0; n++ }
        /\.local.*__local_depot/ && name !~ known && name !~ /look_pieces/ { print name; bad = 1 }
        END { exit bad || n < 20 }' "$tmp/ptx"
}
check 'no local memory'                      no_depots

# in_f32 KERNELS: they have no double. Most GPUs have one double unit for 32 or 64 f32 units.
in_f32() {
    awk -v kernels="$1" '
        /\.entry/ { name = $0; on = $0 ~ kernels; n += on }
        on && /\.f64/ { print name ": " $0; bad = 1 }
        END { exit bad || n < 2 }' "$tmp/ptx"
}
check 'norms have no double'                 in_f32 'norm_(kept_)?rows'
check "softmax's backward has no double"     in_f32 softmax_back_rows

# refused TEXT OPTION...: nvcc says TEXT, in an #error of ours, and not much else.
refused() {
    text=$1; shift
    ! "$NVCC" -I. -cubin mixprec_cuda.cu -o "$tmp/cubin" "$@" >"$tmp/refused" 2>&1 &&
        grep -q "error.*$text" "$tmp/refused" && [ "$(grep -c 'error' "$tmp/refused")" -le 3 ]
}
check 'a GPU before V100 is refused in words' refused 'compute capability 7.0' -std=c++17 -arch=sm_80 \
                                             -DMIXPI_CUDA_ARCH=600
check 'C++14 is refused in words'            refused 'is C++17' -std=c++14 -arch=sm_80
check 'an older CUDA is refused in words'    refused 'CUDA 12.0 or newer' -std=c++17 -arch=sm_80 \
                                             -Xcompiler -w -DMIXPI_CUDA_VERSION=11080
report
