/* mixprec_cuda.cu - mixprec on NVIDIA GPUs: one more device table
 * SPDX-License-Identifier: MIT OR Unlicense          (full texts: the file LICENSE)
 *
 * Compile it with nvcc next to mixprec.h, link with -lcudart -lcublasLt, and set the context's
 * device:
 *
 *     mixp_context_desc desc = { 0 };
 *     desc.device = mixp_cuda(0, &why);           NULL: no usable GPU; why has the reason
 *
 * Needs compute capability 7.0 (V100) or newer, and CUDA 12.0 or newer; for 7.0 CUDA 12, because
 * CUDA 13 no longer supports it. On 7.0 and 7.5 (T4, RTX 20) train in f16: their tensor cores do
 * not support bf16. On 7.0 tensor cores compute the products, and attention runs without them. On
 * 7.5 the backward pass of attention with heads of 128 runs without tensor cores, because it does
 * not fit the 64 KB of shared memory. For 9.0 (H100, H200) compile with -arch=sm_90a: attention
 * with heads of 64 and 128, without mask, cap and dropout, then multiplies by warpgroups (wgmma),
 * which -arch=sm_90 and -arch=native leave out. Do not compile with --use_fast_math or -ftz=true:
 * they flush subnormal moments and break every promise about bits. The first call that waits
 * reports them.
 *
 * CONTENTS: each section has a banner; search for its mark
 *
 *      1. seams        >>seams         what a simulation replaces; numbers in registers
 *      2. runtime      >>runtime       errors, memory, streams, peeks, captures
 *      3. elementwise  >>elementwise   convert, copy, unary, binary, sums, dropout, losses,
 *                                      the quantiser of recipes
 *      4. rows         >>rows          softmax, cross entropy, norms, embedding, top k
 *      5. optimizers   >>optimizers    statistics, clip, prepare, update, advance, agree
 *      6. gemm         >>gemm          products, on cuBLASLt
 *      7. attention    >>attention     flash attention on tensor cores
 *      8. table        >>table         mixp_cuda
 *
 * Determinism: no float atomics. The shapes decide how a sum is split, never the GPU, with two
 * exceptions. In products, cuBLASLt chooses by GPU and version. Attention uses the f32 kernels on
 * capability 7.0; on 7.5 it uses them for bf16, the kernels for changed scores where 64 KB hold no
 * larger tile, and tensor core products in two halves; code for sm_90a multiplies by warpgroups.
 * Casts, quantisers, stochastic rounding, unscale, the statistics' flags and optimizer steps match
 * the CPU bit for bit, except a NaN's payload: GPU arithmetic returns a single NaN.
 */
