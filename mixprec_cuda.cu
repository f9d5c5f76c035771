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
#include "mixprec.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <atomic>
#include <new>

/* ==== 1. SEAMS ============================================================= >>seams ====
 *
 * The few places where a kernel is not plain C++. Defined for nvcc here, and for a plain
 * compiler with MIXPREC_CUDASIM by the tests' simulated CUDA.
 */
#ifdef MIXPREC_CUDASIM

#include "cudasim.h"

#define MIXPI_LAUNCH(kernel, grid, threads, bytes, stream, ...)                           \
    cudasim::launch(kernel, grid, threads, bytes, stream, __VA_ARGS__)
#define MIXPI_SHARED(T, name, N)                                                          \
    T *name = (T *)cudasim::shared([] { static char key; return (const void *)&key; }(),  \
                                   sizeof(T) * (N))
#define MIXPI_DYNAMIC_SHARED(T, name) T *name = (T *)cudasim::dynamic_shared()
#define MIXPI_UNROLL            /* loops over registers must be unrolled                   */
#define MIXPI_UNROLL_BY(n)      /* fewer loads ahead, fewer registers                      */

namespace {

template <bool bf16> inline void mma_16816(float *d, const uint32_t *a, const uint32_t *b) {
    cudasim::mma_m16n8k16(d, a, b, bf16);
}
template <bool transposed> inline void ldmatrix_x1(uint32_t *r, const void *row) {
    cudasim::ldmatrix<1, transposed>(r, row);
}
template <bool transposed> inline void ldmatrix_x2(uint32_t *r, const void *row) {
    cudasim::ldmatrix<2, transposed>(r, row);
}
template <bool transposed> inline void ldmatrix_x4(uint32_t *r, const void *row) {
    cudasim::ldmatrix<4, transposed>(r, row);
}
inline void cp_async_16(void *shared, const void *global, int given) {
    cudasim::cp_async(shared, global, 16, given);
}
inline void cp_async_commit() { cudasim::cp_async_commit(); }
template <int N> inline void cp_async_wait() { cudasim::cp_async_wait(N); }
/* ex2.approx.ftz flushes subnormals to 0, and may be off by two units in the last place. */
inline float exp2_approx(float x) {
    float y = cudasim::nudged(cudasim::nudged(std::exp2(x)));
    return y < 1.17549435e-38f ? 0.0f : y;
}
/* rcp.approx.ftz of a normal number flushes subnormals to 0, and may be off by one unit. */
inline float rcp_approx(float x) {
    float y = cudasim::nudged(1.0f / x);
    return std::fabs(y) < 1.17549435e-38f ? 0.0f : y;
}

}   /* namespace */

#else

#include <cuda_runtime.h>
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include <cublasLt.h>

#define MIXPI_LAUNCH(kernel, grid, threads, bytes, stream, ...)                           \
    launch(kernel, grid, threads, bytes, stream, __VA_ARGS__)
#define MIXPI_SHARED(T, name, N) __shared__ __align__(16) T name[N]
#define MIXPI_DYNAMIC_SHARED(T, name)                                                     \
    extern __shared__ __align__(128) unsigned char mixpi_dynamic_shared[];                \
    T *name = (T *)(void *)mixpi_dynamic_shared
#define MIXPI_UNROLL _Pragma("unroll")
#define MIXPI_PRAGMA(x) _Pragma(#x)
#define MIXPI_UNROLL_BY(n) MIXPI_PRAGMA(unroll n)

#ifndef MIXPI_CUDA_ARCH             /* a test sets an older one     */
#  define MIXPI_CUDA_ARCH __CUDA_ARCH__
#endif

namespace {

/* kernel<<<...>>>, and the error of this launch only: cudaGetLastError would also report errors of
 * other libraries' calls. */
template <class... P, class... A>
cudaError_t launch(void (*kernel)(P...), dim3 grid, dim3 threads, size_t bytes, cudaStream_t stream,
    A... arguments) {
    cudaLaunchConfig_t config;
    memset((void *)&config, 0, sizeof config);
    config.gridDim = grid;
    config.blockDim = threads;
    config.dynamicSmemBytes = bytes;
    config.stream = stream;
    return cudaLaunchKernelEx(&config, kernel, static_cast<P>(arguments)...);
}

__device__ inline uint32_t shared_address(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* d += a b: 16 x 16 by 16 x 8 elements, distributed over a warp's registers as PTX prescribes. */
#if defined(__CUDA_ARCH__) && MIXPI_CUDA_ARCH < 750
/* Capability 7.0 has other fragments: attention does not launch kernels with tensor cores there. */
template <bool bf16> __device__ inline void mma_16816(float *, const uint32_t *, const uint32_t *) {
    __trap();
}
#elif defined(__CUDA_ARCH__) && MIXPI_CUDA_ARCH < 800
/* Capability 7.5 has products of 8 columns in f16 only: kernels do not call this for bf16 there. */
template <bool bf16>
__device__ inline void mma_16816(float *d, const uint32_t *a, const uint32_t *b) {
    if (bf16) __trap();
    for (int half = 0; half < 2; half++)
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, "
                     "{%6}, {%0,%1,%2,%3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[2 * half]), "r"(a[2 * half + 1]), "r"(b[half]));
}
#else
template <bool bf16>
__device__ inline void mma_16816(float *d, const uint32_t *a, const uint32_t *b) {
    if (bf16)
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, "
                     "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    else
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, "
                     "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#endif

/* Lane 8 i + j gives the address of row j of matrix i: 8 x 8 elements of 2 bytes. */
#if defined(__CUDA_ARCH__) && MIXPI_CUDA_ARCH < 750
template <bool transposed> __device__ inline void ldmatrix_x1(uint32_t *, const void *) {
    __trap();
}
template <bool transposed> __device__ inline void ldmatrix_x2(uint32_t *, const void *) {
    __trap();
}
template <bool transposed> __device__ inline void ldmatrix_x4(uint32_t *, const void *) {
    __trap();
}
#else
template <bool transposed> __device__ inline void ldmatrix_x1(uint32_t *r, const void *row) {
    if (transposed)
        asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];"
                     : "=r"(r[0])
                     : "r"(shared_address(row))
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
                     : "=r"(r[0])
                     : "r"(shared_address(row))
                     : "memory");
}
template <bool transposed> __device__ inline void ldmatrix_x2(uint32_t *r, const void *row) {
    if (transposed)
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                     : "=r"(r[0]), "=r"(r[1])
                     : "r"(shared_address(row))
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                     : "=r"(r[0]), "=r"(r[1])
                     : "r"(shared_address(row))
                     : "memory");
}
template <bool transposed> __device__ inline void ldmatrix_x4(uint32_t *r, const void *row) {
    if (transposed)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(shared_address(row))
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(shared_address(row))
                     : "memory");
}
#endif

/* Copies 16 bytes into shared memory: the first `given` bytes are read, the rest are 0. */
#if defined(__CUDA_ARCH__) && MIXPI_CUDA_ARCH < 800
/* Capability 7 has no asynchronous copies; `given` is 16 or 0 there. */
__device__ inline void cp_async_16(void *shared, const void *global, int given) {
    *(uint4 *)shared = given ? *(const uint4 *)global : make_uint4(0, 0, 0, 0);
}
__device__ inline void cp_async_commit() {}
template <int N> __device__ inline void cp_async_wait() {}
#else
__device__ inline void cp_async_16(void *shared, const void *global, int given) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
                 "l"(__cvta_generic_to_global(global)), "r"(given)
                 : "memory");
}
__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/* Waits until at most the newest N groups of copies are pending. */
template <int N> __device__ inline void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
#endif

/* Products of a warpgroup, for sm_90a only: d += a b of 64 rows, N columns, 16 summed over. */
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#  define MIXPI_WGMMA 1
#else
#  define MIXPI_WGMMA 0
#endif
#define MIXPI_SWIZZLED_SHARED(T, name)                                                    \
    extern __shared__ __align__(1024) unsigned char mixpi_swizzled_shared[];              \
    T *name = (T *)(void *)mixpi_swizzled_shared

#if MIXPI_WGMMA
/* Describes a matrix in shared memory: rows of 128 bytes, permuted, 8 rows together. The next half
 * of the columns is `half` bytes further. */
__device__ inline uint64_t wgmma_matrix(const void *p, int half) {
    return (uint64_t)1 << 62 | (uint64_t)(1024 / 16) << 32 | (uint64_t)(half / 16) << 16 |
           (uint64_t)(shared_address(p) / 16 & 0x3FFFu);
}
/* Makes this thread's writes to shared memory visible to wgmma, after a barrier. */
__device__ inline void wgmma_sees_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
/* Before products, and whenever other instructions have written their registers. */
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/* Waits until at most the newest N groups of products are pending. */
template <int N> __device__ inline void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
/* After wgmma_wait: sums must not be read any earlier. */
template <int N> __device__ inline void wgmma_done(float (*d)[4]) {
    MIXPI_UNROLL
    for (int n = 0; n < N; n++) {
        MIXPI_UNROLL
        for (int e = 0; e < 4; e++) asm volatile("" : "+f"(d[n][e])::"memory");
    }
}
/* Before wgmma_fence and after the last wait: left factors in registers and sums have their values
 * here. Without it a compiler may move what writes or reads these registers past the products. */
template <int factors, int columns>
__device__ inline void wgmma_pin(uint32_t (*a)[4], float (*sums)[4]) {
    MIXPI_UNROLL
    for (int n = 0; n < factors; n++) {
        MIXPI_UNROLL
        for (int e = 0; e < 4; e++) asm volatile("" : "+r"(a[n][e])::"memory");
    }
    wgmma_done<columns>(sums);
}
/* The permutation of a tile counts from multiples of 1024 bytes. */
__device__ inline void wgmma_check_base(const void *p) {
    if (shared_address(p) % 1024) __trap();
}
/* The same value in each lane of a warp, known as such to the compiler. */
__device__ inline int warp_uniform(int x) { return __shfl_sync(0xFFFFFFFFu, x, 0); }

#define MIXPI_SUMS_64 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18," \
    "%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}"
#define MIXPI_OUTS_64 \
        "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), \
        "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), \
        "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), \
        "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]), \
        "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), \
        "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), \
        "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), \
        "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])
#define MIXPI_SUMS_128 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18," \
    "%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35," \
    "%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52," \
    "%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}"
#define MIXPI_OUTS_128 \
        "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), \
        "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), \
        "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), \
        "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]), \
        "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), \
        "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), \
        "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), \
        "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]), \
        "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]), \
        "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]), \
        "+f"(d[10][0]), "+f"(d[10][1]), "+f"(d[10][2]), "+f"(d[10][3]), \
        "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]), "+f"(d[11][3]), \
        "+f"(d[12][0]), "+f"(d[12][1]), "+f"(d[12][2]), "+f"(d[12][3]), \
        "+f"(d[13][0]), "+f"(d[13][1]), "+f"(d[13][2]), "+f"(d[13][3]), \
        "+f"(d[14][0]), "+f"(d[14][1]), "+f"(d[14][2]), "+f"(d[14][3]), \
        "+f"(d[15][0]), "+f"(d[15][1]), "+f"(d[15][2]), "+f"(d[15][3])
/* Operands after the sums: b; whether d is added to; whether b changes sides; then a. */
#define MIXPI_WGMMA_ASM(N, TYPE, A, TRANS, B, ADD, ACROSS, ...)                           \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " ADD ", 0; "                             \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE " " MIXPI_SUMS_##N \
                 ", " A ", " B ", p, 1, 1, " TRANS ACROSS ";}"                            \
                 : MIXPI_OUTS_##N                                                         \
                 : "l"(b), "r"(add), "n"(across ? 1 : 0), __VA_ARGS__                     \
                 : "memory")
#define MIXPI_FROM_SHARED(N, TYPE, B, ADD, ACROSS, A)                                     \
    MIXPI_WGMMA_ASM(N, TYPE, A, "0, ", B, ADD, ACROSS, "l"(a))
#define MIXPI_FROM_REGISTERS(N, TYPE, B, ADD, ACROSS, A)                                  \
    MIXPI_WGMMA_ASM(N, TYPE, A, "", B, ADD, ACROSS, "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]))

/* across: b is 16 rows of N, otherwise N rows of 16. add 0: d is written, not added to. */
template <int N, bool bf16, bool across>
__device__ inline void wgmma(float (*d)[4], uint64_t a, uint64_t b, int add) {
    if constexpr (N == 64 && bf16) MIXPI_FROM_SHARED(64, "bf16.bf16", "%32", "%33", "%34", "%35");
    if constexpr (N == 64 && !bf16) MIXPI_FROM_SHARED(64, "f16.f16", "%32", "%33", "%34", "%35");
    if constexpr (N == 128 && bf16) MIXPI_FROM_SHARED(128, "bf16.bf16", "%64", "%65", "%66", "%67");
    if constexpr (N == 128 && !bf16) MIXPI_FROM_SHARED(128, "f16.f16", "%64", "%65", "%66", "%67");
}
template <int N, bool bf16, bool across>
__device__ inline void wgmma(float (*d)[4], const uint32_t *a, uint64_t b, int add) {
    if constexpr (N == 64 && bf16)
        MIXPI_FROM_REGISTERS(64, "bf16.bf16", "%32", "%33", "%34", "{%35,%36,%37,%38}");
    if constexpr (N == 64 && !bf16)
        MIXPI_FROM_REGISTERS(64, "f16.f16", "%32", "%33", "%34", "{%35,%36,%37,%38}");
    if constexpr (N == 128 && bf16)
        MIXPI_FROM_REGISTERS(128, "bf16.bf16", "%64", "%65", "%66", "{%67,%68,%69,%70}");
    if constexpr (N == 128 && !bf16)
        MIXPI_FROM_REGISTERS(128, "f16.f16", "%64", "%65", "%66", "{%67,%68,%69,%70}");
}
#endif

__device__ inline float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
/* 1/x, off by one unit at most; avoids the call that a correctly rounded division needs. */
__device__ inline float rcp_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* The processor's fp8 codes of two numbers, that of lo in the lower byte. Numbers and Inf beyond
 * the format become its largest number; a NaN becomes 0x7F. */
#if defined(__CUDA_ARCH__) && MIXPI_CUDA_ARCH >= (CUDART_VERSION < 12010 ? 900 : 890)
#define MIXPI_FP8_NATIVE 1
template <mixp_dtype D> __device__ inline uint32_t fp8_pair(float lo, float hi) {
    uint16_t codes;
    if constexpr (D == MIXP_F8_E4M3)
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(hi), "f"(lo));
    else asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(hi), "f"(lo));
    return codes;
}
/* The values of two codes. */
template <mixp_dtype D> __device__ inline void fp8_values(uint32_t codes, float *v) {
    const uint16_t both = (uint16_t)codes;
    uint32_t halves;
    if constexpr (D == MIXP_F8_E4M3) asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(both));
    else asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(both));
    __half2 pair;
    memcpy((void *)&pair, &halves, 4);
    v[0] = __low2float(pair);
    v[1] = __high2float(pair);
}
#endif

}   /* namespace */

#endif

#ifndef MIXPI_CUDA_VERSION        /* a test sets another version     */
#  define MIXPI_CUDA_VERSION CUDART_VERSION
#endif
#if MIXPI_CUDA_VERSION < 12000
#  error "mixprec_cuda.cu needs CUDA 12.0 or newer: call a newer nvcc"
#endif
#if defined(__CUDA_ARCH__) && MIXPI_CUDA_ARCH < 700
#  error "mixprec_cuda.cu needs compute capability 7.0: pass nvcc -arch=native, or sm_70 or higher"
#endif
#if __cplusplus < 201703L && (!defined(_MSVC_LANG) || _MSVC_LANG < 201703L)
#  error "mixprec_cuda.cu is C++17: pass nvcc -std=c++17"
#endif

namespace {

/* --- numbers in registers -------------------------------------------------------------- *
 *
 * One kernel serves every mix of f32, f16 and bf16. It tests the dtype where it loads or stores 8
 * elements, with the same branch for all threads. The processor's f16 conversions give the header's
 * results, except that they lose the payload of a NaN.
 */
const int warp_size = 32;

__host__ __device__ inline bool is_real(mixp_dtype d) {
    return d == MIXP_F32 || d == MIXP_F16 || d == MIXP_BF16;
}

/* sizeof one element, on host and device. */
__host__ __device__ inline int dtype_bytes(mixp_dtype d) {
    switch (d) {
    case MIXP_F64:
    case MIXP_I64: return 8;
    case MIXP_F32:
    case MIXP_I32: return 4;
    case MIXP_F16:
    case MIXP_BF16: return 2;
    default: return 1;
    }
}

/* 0 for an unknown dtype. With MIXPREC_STATIC the header's function is static in another file. */
inline size_t size_of_dtype(mixp_dtype d) {
    return (unsigned)d < MIXP_DTYPE_COUNT ? (size_t)dtype_bytes(d) : 0;
}

__host__ __device__ inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
/* The least multiple of b that is not below a. */
__host__ __device__ inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }
__host__ __device__ inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

__host__ __device__ inline char *bytes_of(void *p) { return (char *)p; }
__host__ __device__ inline const char *bytes_of(const void *p) { return (const char *)p; }

/* The address of element i of an array, a mixp_in or a mixp_out. */
template <class A> __host__ __device__ inline auto byte_at(const A &a, int64_t i) {
    return bytes_of(a.data) + i * dtype_bytes(a.dtype);
}

__device__ inline uint32_t f16_code(float x) {
    __half h = __float2half_rn(x);
    uint32_t u = mixp_bits_of_f32(x);
    uint16_t bits;
    memcpy(&bits, &h, 2);
    return (u & 0x7FFFFFFFu) > 0x7F800000u ? mixpi_f16_of_f32(u) : bits;
}
__device__ inline float f16_value(uint32_t code) {
    uint16_t bits = (uint16_t)code;
    __half h;
    memcpy((void *)&h, &bits, 2);
    return (code & 0x7FFFu) > 0x7C00u ? mixp_f32_of_bits(mixpi_f32_of_f16(code)) : __half2float(h);
}
__device__ inline uint32_t bf16_code(float x) { return mixpi_bf16_of_f32(mixp_bits_of_f32(x)); }
__device__ inline float bf16_value(uint32_t code) { return mixp_f32_of_bits(code << 16); }

__device__ inline uint32_t low_code(mixp_dtype d, float x) {
    return d == MIXP_F16 ? f16_code(x) : bf16_code(x);
}
__device__ inline float low_value(mixp_dtype d, uint32_t code) {
    return d == MIXP_F16 ? f16_value(code) : bf16_value(code);
}

/* Element i of a real array. */
__device__ inline float get1(mixp_in a, int64_t i) {
    if (a.dtype == MIXP_F32) return ((const float *)a.data)[i];
    return low_value(a.dtype, ((const uint16_t *)a.data)[i]);
}
__device__ inline void put1(mixp_out a, int64_t i, float x) {
    if (a.dtype == MIXP_F32) ((float *)a.data)[i] = x;
    else ((uint16_t *)a.data)[i] = (uint16_t)low_code(a.dtype, x);
}

/* Elements [i, i+8) of a real array; their address is aligned to 16 bytes. */
__device__ inline void get8(mixp_in a, int64_t i, float *v) {
    /* Two loads of 16 bytes for f32. */
    if (a.dtype == MIXP_F32) {
        const float4 *p = (const float4 *)(const void *)((const float *)a.data + i);
        float4 lo = p[0], hi = p[1];
        v[0] = lo.x;
        v[1] = lo.y;
        v[2] = lo.z;
        v[3] = lo.w;
        v[4] = hi.x;
        v[5] = hi.y;
        v[6] = hi.z;
        v[7] = hi.w;
        return;
    }

    /* One load of 16 bytes for f16 and bf16. */
    uint4 u = *(const uint4 *)(const void *)((const uint16_t *)a.data + i);
    v[0] = low_value(a.dtype, u.x & 0xFFFFu);
    v[1] = low_value(a.dtype, u.x >> 16);
    v[2] = low_value(a.dtype, u.y & 0xFFFFu);
    v[3] = low_value(a.dtype, u.y >> 16);
    v[4] = low_value(a.dtype, u.z & 0xFFFFu);
    v[5] = low_value(a.dtype, u.z >> 16);
    v[6] = low_value(a.dtype, u.w & 0xFFFFu);
    v[7] = low_value(a.dtype, u.w >> 16);
}
__device__ inline uint32_t low_pair(mixp_dtype d, float lo, float hi) {
    return low_code(d, lo) | low_code(d, hi) << 16;
}
__device__ inline void put8(mixp_out a, int64_t i, const float *v) {
    if (a.dtype == MIXP_F32) {
        float4 *p = (float4 *)(void *)((float *)a.data + i);
        p[0] = make_float4(v[0], v[1], v[2], v[3]);
        p[1] = make_float4(v[4], v[5], v[6], v[7]);
    } else {
        uint4 u = make_uint4(low_pair(a.dtype, v[0], v[1]), low_pair(a.dtype, v[2], v[3]),
            low_pair(a.dtype, v[4], v[5]), low_pair(a.dtype, v[6], v[7]));
        *(uint4 *)(void *)((uint16_t *)a.data + i) = u;
    }
}

/* get8 for n elements (the others read as 0), aligned or not. */
__device__ inline void get8_any(mixp_in a, int64_t i, int n, bool wide, float *v) {
    if (wide && n == 8) {
        get8(a, i, v);
        return;
    }
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) v[k] = k < n ? get1(a, i + k) : 0.0f;
}
__device__ inline void put8_any(mixp_out a, int64_t i, int n, bool wide, const float *v) {
    if (wide && n == 8) {
        put8(a, i, v);
        return;
    }
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++)
        if (k < n) put1(a, i + k, v[k]);
}

/* --- numbers of arithmetic ------------------------------------------------------------- *
 *
 * Loads and stores of numbers used in arithmetic, where the compiler knows the dtype and a NaN may
 * change its payload: the processor's own conversions, two elements at a time. get8 and put8 test
 * the dtype at each turn, which also keeps the compiler from loading ahead: 21 instructions instead
 * of 8 for 8 bf16, 66 for 8 f16.
 */
template <mixp_dtype D> __device__ inline void plain_two(uint32_t codes, float *v) {
    if constexpr (D == MIXP_BF16) {
        v[0] = mixp_f32_of_bits(codes << 16);
        v[1] = mixp_f32_of_bits(codes & 0xFFFF0000u);
    } else {
        __half2 pair;
        memcpy((void *)&pair, &codes, 4);
        v[0] = __low2float(pair);
        v[1] = __high2float(pair);
    }
}
template <mixp_dtype D> __device__ inline uint32_t plain_code(float lo, float hi) {
    uint32_t codes;
    if constexpr (D == MIXP_BF16) {
        __nv_bfloat162 pair = __floats2bfloat162_rn(lo, hi);
        memcpy(&codes, (void *)&pair, 4);
    } else {
        __half2 pair = __floats2half2_rn(lo, hi);
        memcpy(&codes, (void *)&pair, 4);
    }
    return codes;
}

/* Eight elements as stored. Elements loaded ahead are converted only when needed, because a
 * conversion waits for the load. */
template <mixp_dtype D> struct Raw8 { uint4 u[D == MIXP_F32 ? 2 : 1]; };

template <mixp_dtype D> __device__ inline Raw8<D> raw_get8(const void *data, int64_t i) {
    const uint4 *p = (const uint4 *)(const void *)((const char *)data + i * dtype_bytes(D));
    Raw8<D> raw;
    raw.u[0] = p[0];
    if constexpr (D == MIXP_F32) raw.u[1] = p[1];
    return raw;
}
template <mixp_dtype D> __device__ inline void plain_values(const Raw8<D> &raw, float *v) {
    MIXPI_UNROLL
    for (int k = 0; k < (int)(sizeof raw.u / sizeof *raw.u); k++) {
        const uint4 &u = raw.u[k];
        if constexpr (D == MIXP_F32) {
            v[4 * k] = mixp_f32_of_bits(u.x);
            v[4 * k + 1] = mixp_f32_of_bits(u.y);
            v[4 * k + 2] = mixp_f32_of_bits(u.z);
            v[4 * k + 3] = mixp_f32_of_bits(u.w);
        } else {
            plain_two<D>(u.x, v);
            plain_two<D>(u.y, v + 2);
            plain_two<D>(u.z, v + 4);
            plain_two<D>(u.w, v + 6);
        }
    }
}
template <mixp_dtype D> __device__ inline void plain_get8(const void *data, int64_t i, float *v) {
    plain_values<D>(raw_get8<D>(data, i), v);
}
/* One 16-byte store: the compiler would merge a plain store with the scalar path's stores. */
template <mixp_dtype D> __device__ inline void plain_put8(void *data, int64_t i, const float *v) {
    if constexpr (D == MIXP_F32) {
        float4 *p = (float4 *)(void *)((float *)data + i);
        __stwb(p, make_float4(v[0], v[1], v[2], v[3]));
        __stwb(p + 1, make_float4(v[4], v[5], v[6], v[7]));
    } else {
        __stwb((uint4 *)(void *)((uint16_t *)data + i),
            make_uint4(plain_code<D>(v[0], v[1]), plain_code<D>(v[2], v[3]),
                plain_code<D>(v[4], v[5]), plain_code<D>(v[6], v[7])));
    }
}

/* Rounds eight elements as a store would. */
template <mixp_dtype D> __device__ inline void plain_round(float *v) {
    MIXPI_UNROLL
    for (int k = 0; k < 8; k += 2)
        if constexpr (D != MIXP_F32) plain_two<D>(plain_code<D>(v[k], v[k + 1]), v + k);
}

/* Loads n elements, wide or not; the others read as 0. */
template <mixp_dtype D>
__device__ inline void plain_get(const void *data, int64_t i, int n, bool wide, float *v) {
    if (wide && n == 8) plain_get8<D>(data, i, v);
    else get8_any(mixpi_in(data, D), i, n, false, v);
}
template <mixp_dtype D>
__device__ inline void plain_put(void *data, int64_t i, int n, bool wide, const float *v) {
    if (wide && n == 8) plain_put8<D>(data, i, v);
    else put8_any(mixpi_out_to(data, D, 0), i, n, false, v);
}

/* --- fp8 codes -------------------------------------------------------------------------- *
 *
 * GPUs of capability 8.9 and up convert two numbers by one instruction: 3 instructions for a number
 * instead of 30. mixpi_round_f32's codes differ for a NaN, whose sign and payload it keeps, and,
 * without saturation, for numbers beyond the format. The simulated GPU has the instruction as well.
 */
#ifndef MIXPI_FP8_NATIVE
template <mixp_dtype D> __device__ inline uint32_t fp8_one(float x) {
    const uint32_t u = mixp_bits_of_f32(x);
    return (u & 0x7FFFFFFFu) > 0x7F800000u ? 0x7Fu : mixpi_round_f32(D, u, 1, 0, 0);
}
template <mixp_dtype D> __device__ inline uint32_t fp8_pair(float lo, float hi) {
    return fp8_one<D>(lo) | fp8_one<D>(hi) << 8;
}
template <mixp_dtype D> __device__ inline void fp8_values(uint32_t codes, float *v) {
    for (int k = 0; k < 2; k++) {
        const uint32_t code = codes >> 8 * k & 0xFFu;
        v[k] = D == MIXP_F8_E4M3 ? mixp_f32_of_bits(mixpi_f32_of_e4m3(code)) : f16_value(code << 8);
    }
}
#endif
#if defined(MIXPI_FP8_NATIVE) || defined(MIXPREC_CUDASIM)
constexpr bool fp8_is_native = true;
#else
constexpr bool fp8_is_native = false;
#endif

/* Does x round to no finite code? e4m3: above 464, which is half way to the next number and rounds
 * to 448; e5m2: from 61440 on, which rounds to 65536. */
template <mixp_dtype D> __device__ inline bool is_beyond_fp8(float x) {
    const uint32_t a = mixp_bits_of_f32(x) & 0x7FFFFFFFu;
    return D == MIXP_F8_E4M3 ? a > 0x43E80000u : a >= 0x47700000u;
}
/* The code of a number beyond the format, or of a NaN. */
template <mixp_dtype D> __device__ inline uint32_t fp8_beyond(float x, bool saturate) {
    const uint32_t u = mixp_bits_of_f32(x), sign = u >> 24 & 0x80u;
    const bool nan = (u & 0x7FFFFFFFu) > 0x7F800000u;
    if (D == MIXP_F8_E4M3) return sign | (saturate && !nan ? 0x7Eu : 0x7Fu);
    if (nan) return sign | 0x7Eu | (u >> 21 & 1u);
    return sign | (saturate ? 0x7Bu : 0x7Cu);
}

/* mixpi_round_f32's codes of 4 N numbers, 4 in a word, the first in the lowest byte. */
template <mixp_dtype D, int N>
__device__ inline void fp8_codes(const float *v, bool saturate, uint32_t *words) {
    if constexpr (!fp8_is_native) {
        MIXPI_UNROLL
        for (int w = 0; w < N; w++) words[w] = 0;
        MIXPI_UNROLL
        for (int k = 0; k < 4 * N; k++)
            words[k / 4] |= mixpi_round_f32(D, mixp_bits_of_f32(v[k]), saturate, 0, 0)
                            << 8 * (k % 4);
        return;
    }

    /* Only a code from the largest finite one on may differ: adding to_80 carries it to 0x80. */
    const uint32_t to_80 = D == MIXP_F8_E4M3 ? 0x02020202u : 0x05050505u;
    uint32_t large = 0;
    MIXPI_UNROLL
    for (int w = 0; w < N; w++) {
        const float *x = v + 4 * w;
        words[w] = fp8_pair<D>(x[0], x[1]) | fp8_pair<D>(x[2], x[3]) << 16;
        large |= (words[w] & 0x7F7F7F7Fu) + to_80;
    }
    if ((large & 0x80808080u) == 0) return;

    /* Correct the codes of numbers beyond the format. */
    MIXPI_UNROLL
    for (int k = 0; k < 4 * N; k++)
        if (is_beyond_fp8<D>(v[k])) {
            const int at = 8 * (k % 4);
            words[k / 4] &= ~(0xFFu << at);
            words[k / 4] |= fp8_beyond<D>(v[k], saturate) << at;
        }
}

/* The e2m1 code of x / s, where x is s times a number of e2m1. The quotient is off by a few units
 * in the last place, and mixpi_e2m1_code drops low bits: half of the last bit that it reads is
 * added. */
__device__ inline uint32_t e2m1_code_of(float x, float s) {
    const float ratio = __fmul_rn(x, rcp_approx(s));
    return mixpi_e2m1_code(mixp_f32_of_bits(mixp_bits_of_f32(ratio) + 0x200000u));
}

/* Can a be read 8 elements at a time from a multiple of 8 on? Yes for an absent array. */
inline bool is_wide(const void *p) { return (uintptr_t)p % 16 == 0; }
inline bool is_wide(mixp_in a) { return is_wide(a.data); }
inline bool is_wide(mixp_out a) { return is_wide(a.data); }
__host__ __device__ inline bool is_aligned(const void *p) { return (uintptr_t)p % 16 == 0; }

/* An output as an input. */
__host__ __device__ inline mixp_in as_in(mixp_out y) {
    mixp_in a = { y.data, y.dtype };
    return a;
}

/* An array that a step updates in place. */
__device__ inline mixp_out array_at(void *data, mixp_dtype dtype) {
    mixp_out a = { data, dtype, 0 };
    return a;
}

/* Number of blocks for n threads, limited: a grid-stride loop does the rest. */
inline unsigned grid_for(int64_t n, int threads) {
    int64_t blocks = ceil_div(n, threads);
    return (unsigned)(blocks < 1 ? 1 : blocks > 4096 ? 4096 : blocks);
}

/* --- sums over a warp and a block, in a fixed tree ------------------------------------- */

template <class T> __device__ inline T warp_sum(T v) {
    MIXPI_UNROLL
    for (int k = 16; k; k /= 2) v += __shfl_xor_sync(0xFFFFFFFFu, v, k);
    return v;
}
/* The maximum over a warp. May miss a NaN. */
__device__ inline float warp_max(float v) {
    MIXPI_UNROLL
    for (int k = 16; k; k /= 2) v = fmaxf(v, __shfl_xor_sync(0xFFFFFFFFu, v, k));
    return v;
}
/* Over all threads of a one-dimensional block of whole warps; every thread gets the sum. */
template <class T> __device__ inline T block_sum(T v) {
    MIXPI_SHARED(T, part, 32);
    int lane = (int)threadIdx.x % warp_size, warp = (int)threadIdx.x / warp_size;
    v = warp_sum(v);
    if (lane == 0) part[warp] = v;
    __syncthreads();
    v = lane < (int)blockDim.x / warp_size ? part[lane] : (T)0;
    v = warp_sum(v);
    __syncthreads();
    return v;
}
__device__ inline float block_max(float v) {
    MIXPI_SHARED(float, part, 32);
    int lane = (int)threadIdx.x % warp_size, warp = (int)threadIdx.x / warp_size;
    v = warp_max(v);
    if (lane == 0) part[warp] = v;
    __syncthreads();
    v = part[lane < (int)blockDim.x / warp_size ? lane : 0];
    v = warp_max(v);
    __syncthreads();
    return v;
}

/* The sum of v over this thread and all earlier threads. *all: the sum over the block. */
template <class T> __device__ inline T block_scan(T v, T *all) {
    MIXPI_SHARED(T, part, 32);
    int lane = (int)threadIdx.x % warp_size, warp = (int)threadIdx.x / warp_size;

    /* Scan each warp; its last lane has the warp's sum. */
    for (int k = 1; k < warp_size; k *= 2) {
        T u = __shfl_up_sync(0xFFFFFFFFu, v, (unsigned)k);
        if (lane >= k) v += u;
    }
    if (lane == warp_size - 1) part[warp] = v;
    __syncthreads();

    /* Add the sums of earlier warps. */
    T before = 0, sum = 0;
    for (int i = 0; i < (int)blockDim.x / warp_size; i++) {
        if (i < warp) before += part[i];
        sum += part[i];
    }
    __syncthreads();
    *all = sum;
    return before + v;
}

/* The minimum over the block. */
template <class T> __device__ inline T block_min(T v) {
    MIXPI_SHARED(T, part, 32);
    int lane = (int)threadIdx.x % warp_size, warp = (int)threadIdx.x / warp_size;
    for (int k = 16; k; k /= 2) {
        T u = __shfl_xor_sync(0xFFFFFFFFu, v, k);
        v = u < v ? u : v;
    }
    if (lane == 0) part[warp] = v;
    __syncthreads();
    for (int i = 0; i < (int)blockDim.x / warp_size; i++) v = part[i] < v ? part[i] : v;
    __syncthreads();
    return v;
}

}   /* namespace */

/* ==== 2. RUNTIME ========================================================= >>runtime ====
 *
 * A context has a State: its stream, the memory outside the arena that a step reads and writes,
 * and a text of the last error. Functions here do not wait for the GPU unless their comment
 * says so.
 *
 * Errors. A launch reports its own error at once. A kernel that finds a fault while it runs (an
 * index out of range) records the fault in memory that the host sees; the next call that waits or
 * peeks reports the fault, once. Steps queued before that report are not applied.
 *
 * Uploads go through a ring of pinned pieces. The caller may reuse its buffer when the call
 * returns. The call waits only when all pieces are in flight.
 */
namespace {

/* A fault that a kernel found while it ran, packed in one 64-bit word, so that racing threads write
 * it atomically: the kind of fault (3 bits), the row (29 bits) and the index (32 bits). */
enum Fault {
    FAULT_NONE,
    FAULT_EMBEDDING_ID,
    FAULT_TARGET,
    FAULT_LENGTH,
    FAULT_GATHER_ID,
    FAULT_BAG_OFFSET,
    FAULT_FLUSHED
};
const int64_t fault_rows = (int64_t)1 << 29;

const int    ring_pieces = 8, mirror_count = 32, post_slots = 3, roomy_kernels = 32;
const size_t piece_bytes = (size_t)256 << 10, mirror_bytes = 2048 - 8;
const size_t workspace_bytes = (size_t)32 << 20, memory_alignment = 256;

/* A copy of a small block of device memory that the host can read while kernels write the copy:
 * sequence is odd during a write. */
struct Mirror {
    uint64_t sequence;
    uint32_t words[mirror_bytes / 4];
};

/* Pinned memory that kernels see. */
struct Shared {
    uint64_t fault;             /* not reported yet; 0 = none                                */
    uint64_t unused[7];
    Mirror  mirrors[mirror_count];
};

/* Device memory of a context. */
struct Private {
    uint64_t later;             /* steps from the captured step to the replayed step         */
    uint32_t arrived[16];       /* counters of last-block patterns; 0 between kernels        */
    int32_t  stop;              /* 1: no step is applied until a fault has been reported     */
    float    betas[2];          /* 0 and 1: cuBLASLt reads beta where it reads alpha         */
    uint64_t turns[mirror_count];       /* the sequence of each mirror                       */
};

/* Where kernels record a fault. */
struct FaultFlag { uint64_t *fault; int32_t *stop; };

/* An upload of a captured step. The graph copies `stage` to the destination. `stage` is filled
 * beforehand: once from `kept`, or before each replay from `host`. */
struct Upload {
    void       *stage;
    const void *host;
    void       *kept;           /* a copy, until it is sent; NULL: each replay reads host    */
    size_t      bytes;
    bool        sent;
};

/* Device memory for stages. */
struct Block {
    Block *next;
    void  *memory;
    size_t size, used;
};

/* A captured step. */
struct Graph {
    cudaGraphExec_t exec;
    Block  *blocks;
    Upload *uploads;
    int     count, room;
};

struct Plans;                   /* of products: see section 6                                */
struct Choice;

struct State {
    int              ordinal, processors;
    int              capability;        /* 75, 80, 90, ...                                  */
    int              most_shared;       /* largest shared memory of a block, in bytes        */
    int              by_groups; /* is the code for sm_90a? 1: yes, -1: no, 0: not asked yet */
    mixp_allocator   host, device;  /* the context's                                         */
    cudaStream_t     stream;
    cudaStream_t     recorder;  /* the stream that captures record; the given stream, if any
                                   and if possible                                       */
    void            *given;     /* the program's stream; NULL: stream is our own             */
    Shared          *shared, *shared_on_device;
    Private         *block;
    unsigned char   *ring;
    cudaEvent_t      sent[ring_pieces];
    unsigned         next;
    const void      *mirrored[mirror_count];
    size_t           mirrored_bytes[mirror_count];
    Graph           *capture;   /* the current capture                                       */
    mixp_exec       *captured;  /* its stream is the recorder during the capture             */
    cublasLtHandle_t lt;
    void            *workspace;
    Plans           *plans;
    void           (*free_plans)(State *s);
    mixp_gemm_count  products;
    bool             measure;   /* 1: the first product of a shape measures cuBLASLt's
                                   algorithms                                                */
    bool             warm;      /* 1: such a measurement has warmed the GPU up               */
    Choice          *choices;   /* of algorithms, given by the program                       */
    int              choice_count;
    void            *post[post_slots];  /* pinned copies of the posted memory               */
    size_t           post_bytes[post_slots];
    cudaEvent_t      post_sent[post_slots];
    const void      *roomy[roomy_kernels];      /* may use more than 48 KB of shared memory */
    char             message[384];
};

inline State *state_of(const mixp_exec *x) { return x ? (State *)x->state : NULL; }

/* Clears the error that a failed call left for cudaGetLastError. After a success, keeps the
 * program's own error there. */
inline void clear_error(cudaError_t e) {
    if (e != cudaSuccess) cudaGetLastError();
}

/* The driver's query: does this process have a context on a GPU? NULL: the query is missing. */
typedef int PrimaryState(int device, unsigned *flags, int *active);
inline PrimaryState *find_primary_state() {
    cudaDriverEntryPointQueryResult how;
    void *found = NULL;
#if CUDART_VERSION >= 12050
    cudaError_t e = cudaGetDriverEntryPointByVersion(
        "cuDevicePrimaryCtxGetState", &found, 7000, cudaEnableDefault, &how);
#else
    cudaError_t e =
        cudaGetDriverEntryPoint("cuDevicePrimaryCtxGetState", &found, cudaEnableDefault, &how);
#endif
    clear_error(e);
    return e == cudaSuccess && how == cudaDriverEntryPointSuccess ? (PrimaryState *)found : NULL;
}
inline bool has_context(int ordinal) {
    static PrimaryState *const primary_state = find_primary_state();
    unsigned flags = 0;
    int active = 1;
    if (primary_state && primary_state(ordinal, &flags, &active) != 0) active = 1;
    return active != 0;
}

/* Makes GPU `ordinal` current for the lifetime of the object; -1: changes nothing. The destructor
 * restores the previous GPU only if the program has a context there. Otherwise cudaSetDevice would
 * create a context: half a gigabyte on GPU 0 for each rank of a program. */
class OnDevice {
  public:
    explicit OnDevice(int ordinal) : error(cudaSuccess), before(ordinal), now(ordinal) {
        if (now < 0) return;
        error = cudaGetDevice(&before);
        if (error == cudaSuccess && before != now) error = cudaSetDevice(now);
        clear_error(error);
    }
    ~OnDevice() {
        if (before != now && has_context(before)) clear_error(cudaSetDevice(before));
    }
    cudaError_t error; /* why the GPU could not be made current                     */
  private:
    int before, now;
};

/* --- errors ---------------------------------------------------------------------------- */

inline mixp_result say(State *s, mixp_result r, const char *what, const char *why) {
    if (s) snprintf(s->message, sizeof s->message, "%s: %s", what, why);
    return r;
}

/* Advice to append to the text of an error. */
inline const char *advice(cudaError_t e) {
    switch (e) {
    /* A capture was disturbed. */
    case cudaErrorStreamCaptureImplicit:
        return "; a call used the legacy default stream while a blocking stream was captured; use "
               "another stream";
    case cudaErrorStreamCaptureUnsupported:
    case cudaErrorStreamCaptureInvalidated:
        return "; between mixp_capture_begin and mixp_capture_end call nothing that allocates or "
               "waits, such as cudaMalloc and cudaEventSynchronize";

    /* The process has lost its GPU. */
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchFailure:
    case cudaErrorECCUncorrectable:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorDevicesUnavailable:
        return "; this process can no longer use the GPU: restart the process from a checkpoint";
    default: return "";
    }
}

inline bool is_capture_error(cudaError_t e) {
    return (e >= cudaErrorStreamCaptureUnsupported && e <= 908) || e == cudaErrorIllegalState;
}

/* Returns the result of a CUDA call. Reports an error, and clears it for cudaGetLastError. */
inline mixp_result report_error(State *s, cudaError_t e, const char *what) {
    char text[256];
    if (e == cudaSuccess) return MIXP_OK;
    cudaGetLastError();
    snprintf(text, sizeof text, "%s%s", cudaGetErrorString(e), advice(e));
    say(s, MIXP_ERR_DEVICE, what, text);
    if (e == cudaErrorMemoryAllocation) return MIXP_ERR_MEMORY;
    return is_capture_error(e) ? MIXP_ERR_ORDER : MIXP_ERR_DEVICE;
}

inline FaultFlag fault_flag(const State *s) {
    FaultFlag f = { s ? &s->shared_on_device->fault : NULL, s ? &s->block->stop : NULL };
    return f;
}

/* Records a fault. Any of several racing threads may win; a fault of an earlier kernel stays. */
__device__ inline void note_fault(const FaultFlag &f, Fault what, int64_t row, int32_t index) {
    volatile uint64_t *noted = f.fault;
    uint64_t place = (uint64_t)least(row, fault_rows - 1);
    *(volatile int32_t *)f.stop = 1;
    if (*noted) return;
    *noted = (uint64_t)what << 61 | place << 32 | (uint32_t)index;
}

/* Lets steps be applied again, unless another fault was recorded after the reported fault. */
__global__ void clear_stop(const FaultFlag f) {
    if (*(const volatile uint64_t *)f.fault == 0) *f.stop = 0;
}

/* A known answer: half of the smallest normal number is not 0, except in a program that was
 * compiled with --use_fast_math or -ftz=true. nvcc defines no macro for either. */
__global__ void check_subnormals(const FaultFlag f, float smallest) {
    if (mixp_bits_of_f32(smallest * 0.5f) == 0) note_fault(f, FAULT_FLUSHED, 0, 0);
}

/* Reports the fault that kernels recorded. Steps queued so far see the stop flag; later steps do
 * not. */
inline mixp_result report_fault(State *s) {
    const uint64_t fault = *(volatile uint64_t *)&s->shared->fault;
    if (!fault || s->capture) return MIXP_OK;

    /* Clear the fault, and let later steps be applied. */
    *(volatile uint64_t *)&s->shared->fault = 0;
    report_error(s, MIXPI_LAUNCH(clear_stop, 1, 1, 0, s->stream, fault_flag(s)), "a fault");

    /* Name the kernel, the index, its row and its range: one text for each Fault. */
    static const char *const texts[][3] = { { "", "", "" }, { "embedding", "id", "vocab)" },
        { "cross_entropy", "target", "cols)" }, { "attention", "length", "keys]" },
        { "gather", "id", "n)" }, { "embedding_bag", "offset", "ids], or falls" },
        { "mixprec_cuda.cu", "", "" } };
    const char *const *text = texts[fault >> 61];
    if (fault >> 61 == FAULT_FLUSHED)
        return say(s, MIXP_ERR_DEVICE, text[0],
            "compiled with --use_fast_math or -ftz=true, which turns small numbers into 0 and "
            "breaks every promise about bits: compile it without; no step was applied");
    char why[96];
    snprintf(why, sizeof why, "%s %d at row %d is outside [0, %s; no step was applied", text[1],
        (int)(int32_t)(uint32_t)fault, (int)(fault >> 32 & (uint64_t)(fault_rows - 1)), text[2]);
    return say(s, MIXP_ERR_ARGUMENT, text[0], why);
}

/* The stream to launch on: during a capture, the stream that records. */
inline cudaStream_t queue_of(const State *s) { return s->capture ? s->recorder : s->stream; }

/* --- kernels' entry and exit ----------------------------------------------------------- *
 *
 *     Kernel k(x);                                    the context, its GPU made current
 *     if (!k.state) return MIXP_ERR_ORDER;
 *     return k.report("softmax", MIXPI_LAUNCH(softmax_rows, grid, 256, 0, k.stream, ...));
 */
class Kernel {
public:
    explicit Kernel(const mixp_exec *x)
        : state(state_of(x)), stream(state ? queue_of(state) : NULL),
          on(state ? state->ordinal : -1) {}
    /* Returns the result of a launch, or of the call that made the GPU current. */
    mixp_result report(const char *what, cudaError_t e)
    { return report_error(state, on.error != cudaSuccess ? on.error : e, what); }
    State       *state;
    cudaStream_t stream;
private:
    OnDevice on;
};

/* Lets a kernel use more than 48 KB of dynamic shared memory: all of the GPU's, except what CUDA
 * says that the kernel has beside it. Requests it once per kernel, because CUDA takes a lock for a
 * request; kernels that do not fit the table request it at every launch. The limit is a property of
 * the GPU, not of the context. So it is always the maximum: a context that needs less must not
 * lower the limit of a context that needs more. */
inline cudaError_t make_room(State *s, const void *kernel, size_t bytes) {
    if (bytes <= 48 * 1024) return cudaSuccess;
    int i = 0;
    while (i < roomy_kernels && s->roomy[i] && s->roomy[i] != kernel) i++;
    if (i < roomy_kernels && s->roomy[i] == kernel) return cudaSuccess;

    cudaFuncAttributes own = {};
    cudaError_t e = cudaFuncGetAttributes(&own, kernel);
    if (e == cudaSuccess)
        e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
            s->most_shared - (int)own.sharedSizeBytes);
    if (e == cudaSuccess && i < roomy_kernels) s->roomy[i] = kernel;
    return e;
}

/* Device memory for one kernel; see mixp_exec. */
inline void *scratch_of(const mixp_exec *x, size_t bytes) {
    return x->scratch ? x->scratch(x->user, bytes ? bytes : 1) : NULL;
}

/* Device address of the number of steps between capture and replay; NULL outside a capture. */
inline const uint64_t *later_of(const State *s) { return s->capture ? &s->block->later : NULL; }

/* The parts of the key of a kernel's random numbers. A captured kernel runs in many steps and adds
 * the steps since its capture. So each thread computes the key once; the host computes none. */
struct Draws {
    uint64_t        seed, step, tensor;
    const uint64_t *later;
};

inline Draws draws_of(const State *s, uint64_t seed, uint64_t step, uint64_t tensor) {
    Draws d = { seed, step, tensor, later_of(s) };
    return d;
}

__device__ inline uint64_t key_now(const Draws &d) {
    uint64_t step = d.later ? d.step + *d.later : d.step;
    return mixp_random_key(d.seed, step, d.tensor);
}

__global__ void set_later(uint64_t *to, uint64_t later) { *to = later; }
__global__ void set_betas(float *betas) { betas[0] = 0.0f; betas[1] = 1.0f; }

/* --- peeks ----------------------------------------------------------------------------- */

/* A block of device memory, its mirror, and the mirror's sequence. to NULL: no mirror. A kernel's
 * argument: without the last field it would end in bytes that nothing sets. */
struct Mirrored {
    Mirror     *to;
    uint64_t   *turn;
    const void *from;
    int         bytes;
    int         unused;
};

inline Mirrored mirrored(const State *s, int i) {
    Mirrored m = { &s->shared_on_device->mirrors[i], &s->block->turns[i], s->mirrored[i],
        (int)s->mirrored_bytes[i], 0 };
    return m;
}

/* A block with its mirror, which is made at the first use. Without a mirror when all are taken. */
inline Mirrored mirror_of(State *s, const void *device, size_t bytes) {
    /* Find the block's mirror, or a free one. */
    const Mirrored none = { NULL, NULL, device, 0, 0 };
    int i = 0;
    while (i < mirror_count && s->mirrored[i] != device) i++;
    if (i == mirror_count)
        for (i = 0; i < mirror_count && s->mirrored[i];) i++;
    if (i == mirror_count || bytes > mirror_bytes) return none;

    /* Begin a new mirror, which nothing has written yet. */
    if (s->mirrored[i] != device || s->mirrored_bytes[i] != bytes) {
        s->shared->mirrors[i].sequence = 0;
        s->mirrored[i] = device;
        s->mirrored_bytes[i] = bytes;
    }
    return mirrored(s, i);
}

/* Begins or ends a write of these mirrors, visibly to the host. Each sequence is kept in device
 * memory, because reading host memory would take a microsecond. */
template <int n> __device__ inline void turn_mirrors(const Mirrored (&m)[n]) {
    MIXPI_UNROLL
    for (int k = 0; k < n; k++)
        if (m[k].to) *(volatile uint64_t *)&m[k].to->sequence = ++*m[k].turn;
}

/* Copies blocks of memory to their mirrors, if any. All threads of the one thread block that writes
 * the memory call it, after their last write. Two fences serve all mirrors, because each fence
 * waits for host memory. */
template <int n> __device__ inline void mirror_store(const Mirrored (&m)[n]) {
    __syncthreads();
    if (threadIdx.x == 0) turn_mirrors(m);
    __threadfence_system();
    __syncthreads();

    MIXPI_UNROLL
    for (int k = 0; k < n; k++) {
        volatile uint32_t *to = m[k].to ? m[k].to->words : NULL;
        const uint32_t *from = (const uint32_t *)m[k].from;
        for (int i = (int)threadIdx.x; to && i < m[k].bytes / 4; i += (int)blockDim.x)
            to[i] = from[i];
    }

    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) turn_mirrors(m);
}

__global__ void mirror_again(const Mirrored m) {
    const Mirrored one[1] = { m };
    mirror_store(one);
}

/* Returns 1 when *host was read completely and consistently. Returns 0 when nothing was written to
 * the mirror yet, or a kernel died during a write. */
inline int mirror_load(const Mirror *m, void *host, size_t offset, size_t bytes) {
    const volatile uint64_t *sequence = &m->sequence;
    for (int tries = 0; tries < 1000000; tries++) {
        uint64_t before = *sequence;
        std::atomic_thread_fence(std::memory_order_acquire);
        if (before == 0) return 0;
        memcpy(host, (const char *)m->words + offset, bytes);
        std::atomic_thread_fence(std::memory_order_acquire);
        if (before % 2 == 0 && before == *sequence) return 1;
    }
    return 0;
}

/* The mirror that contains these bytes of device memory, or -1. */
inline int mirror_at(const State *s, const void *device, size_t bytes) {
    uintptr_t p = (uintptr_t)device;
    for (int i = 0; i < mirror_count; i++) {
        uintptr_t q = (uintptr_t)s->mirrored[i];
        if (q && p >= q && p + bytes <= q + s->mirrored_bytes[i]) return i;
    }
    return -1;
}

}   /* namespace */
namespace {

/* --- memory ---------------------------------------------------------------------------- */

inline mixp_result refuse_in_capture(State *s, const char *what) {
    return say(s, MIXP_ERR_ORDER, what, "not possible while a step is captured");
}

/* Zeroed memory of the host, from the context's allocator. */
inline void *host_new(const mixp_allocator &from, size_t bytes) {
    void *p = from.allocate ? from.allocate(bytes, from.user) : malloc(bytes);
    if (p) memset(p, 0, bytes);
    return p;
}
inline void host_free(mixp_allocator from, void *p) {
    if (p && from.release) from.release(p, from.user);
    else free(p);
}

inline mixp_result check_pointer(State *s, const void *p, const char *what) {
    if (!p) return say(s, MIXP_ERR_ARGUMENT, what, "the pointer is NULL");
    cudaPointerAttributes a = {};
    mixp_result r = report_error(s, cudaPointerGetAttributes(&a, p), what);
    if (r != MIXP_OK) return r;
    if (a.type == cudaMemoryTypeUnregistered)
        return say(s, MIXP_ERR_ARGUMENT, what, "the pointer is to host memory; pass device memory");
    if (a.type == cudaMemoryTypeDevice && a.device != s->ordinal)
        return say(s, MIXP_ERR_ARGUMENT, what, "the pointer is to another GPU's memory");
    return MIXP_OK;
}

/* GPU memory from the user's allocator, if any; such memory is checked before use. */
inline mixp_result memory_new(State *s, size_t bytes, void **p) {
    *p = NULL;
    const mixp_allocator &from = s->device;
    if (!from.allocate) return report_error(s, cudaMalloc(p, bytes ? bytes : 1), "allocation");
    *p = from.allocate(bytes ? bytes : 1, from.user);
    if (!*p) return say(s, MIXP_ERR_MEMORY, "device_allocator", "out of memory");

    /* Check the user's memory, and free unusable memory. */
    mixp_result r = MIXP_OK;
    if ((uintptr_t)*p % memory_alignment)
        r = say(s, MIXP_ERR_ARGUMENT, "device_allocator",
            "the allocator's memory is not aligned to 256 bytes");
    if (r == MIXP_OK) r = check_pointer(s, *p, "device_allocator");
    if (r != MIXP_OK) {
        from.release(*p, from.user);
        *p = NULL;
    }
    return r;
}
/* Frees p when no queued work uses p any more. cudaFree waits; the user's allocator need not. */
inline void memory_free(State *s, void *p) {
    if (p && s->device.allocate) s->device.release(p, s->device.user);
    else if (p) report_error(s, cudaFree(p), "release");
}

void *device_allocate(const mixp_exec *x, size_t bytes) {
    Kernel k(x);
    void *p = NULL;
    if (!k.state) return NULL;
    if (k.state->capture) {
        refuse_in_capture(k.state, "allocation");
        return NULL;
    }
    if (k.report("allocation", cudaSuccess) != MIXP_OK) return NULL;
    return memory_new(k.state, bytes, &p) == MIXP_OK ? p : NULL;
}

void abandon_capture(const mixp_exec *x);

void device_release(const mixp_exec *x, void *p) {
    Kernel k(x);
    if (!p || !k.state) return;
    if (k.state->capture) abandon_capture(x);
    memory_free(k.state, p);
    for (int i = 0; i < mirror_count; i++) /* the address may be reused */
        if (k.state->mirrored[i] == p) k.state->mirrored[i] = NULL;
}

/* MIXP_OK when the bytes at p are memory of the context's GPU. */
mixp_result device_check(const mixp_exec *x, const void *p, size_t bytes) {
    Kernel k(x);
    (void)bytes;
    return k.state ? check_pointer(k.state, p, "device memory") : MIXP_ERR_ORDER;
}

/* Uploads through the ring, piece by piece. It waits for a piece instead of polling, because
 * cudaEventQuery would leave "not ready" as the program's last error. */
inline mixp_result send(State *s, void *device, const void *host, size_t bytes) {
    mixp_result r = MIXP_OK;
    size_t done = 0;
    while (done < bytes && r == MIXP_OK) {
        /* Wait until the next piece is free. */
        const size_t n = bytes - done < piece_bytes ? bytes - done : piece_bytes;
        const unsigned i = s->next++ % ring_pieces;
        unsigned char *piece = s->ring + i * piece_bytes;
        cudaError_t e = cudaEventSynchronize(s->sent[i]);

        /* Fill it, and queue its copy. */
        if (e == cudaSuccess) {
            memcpy(piece, (const char *)host + done, n);
            e = cudaMemcpyAsync((char *)device + done, piece, n, cudaMemcpyDefault, s->stream);
        }
        if (e == cudaSuccess) e = cudaEventRecord(s->sent[i], s->stream);
        r = report_error(s, e, "upload");
        done += n;
    }
    return r;
}

/* Updates the mirror after an upload to a mirrored block. */
inline mixp_result update_mirror(State *s, const void *device, size_t bytes) {
    int i = mirror_at(s, device, bytes);
    if (i < 0) return MIXP_OK;
    return report_error(
        s, MIXPI_LAUNCH(mirror_again, 1, 256, 0, queue_of(s), mirrored(s, i)), "upload");
}

/* Refuses to run while the program itself captures the stream that it passed. Uploads would become
 * part of that capture, from pinned memory that later uploads overwrite, and every replay would
 * draw the same random numbers. */
inline mixp_result check_stream(State *s, const char *what) {
    if (!s->given || s->capture) return MIXP_OK;
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    mixp_result r = report_error(s, cudaStreamIsCapturing(s->stream, &status), what);
    if (r != MIXP_OK || status == cudaStreamCaptureStatusNone) return r;
    return say(s, MIXP_ERR_ORDER, what,
        "the program captures this stream; use mixp_capture_begin instead");
}

/* Lets this thread allocate memory during a capture, outside of the captured graph. */
class Relaxed {
  public:
    Relaxed() : mode(cudaStreamCaptureModeRelaxed) { cudaThreadExchangeStreamCaptureMode(&mode); }
    ~Relaxed() { cudaThreadExchangeStreamCaptureMode(&mode); }

  private:
    cudaStreamCaptureMode mode;
};

inline mixp_result block_new(State *s, Graph *g, size_t bytes) {
    Block *b = (Block *)host_new(s->host, sizeof *b);
    if (!b) return say(s, MIXP_ERR_MEMORY, "capture", "out of memory");
    b->size = bytes > piece_bytes ? bytes : piece_bytes;
    mixp_result r = memory_new(s, b->size, &b->memory);
    if (r != MIXP_OK) {
        host_free(s->host, b);
        return r;
    }
    b->next = g->blocks;
    g->blocks = b;
    return MIXP_OK;
}

inline mixp_result stage_new(State *s, Graph *g, size_t bytes, void **stage) {
    const size_t room = (bytes + memory_alignment - 1) / memory_alignment * memory_alignment;
    Relaxed relaxed;
    mixp_result r = MIXP_OK;
    if (!g->blocks || g->blocks->size - g->blocks->used < room) r = block_new(s, g, room);
    if (r != MIXP_OK) return r;
    *stage = (char *)g->blocks->memory + g->blocks->used;
    g->blocks->used += room;
    return MIXP_OK;
}

inline Upload *upload_new(State *s, Graph *g) {
    if (g->count == g->room) {
        int room = g->room ? 2 * g->room : 16;
        Upload *more = (Upload *)host_new(s->host, (size_t)room * sizeof *more);
        if (!more) return NULL;
        if (g->count) memcpy((void *)more, (void *)g->uploads, (size_t)g->count * sizeof *more);
        host_free(s->host, (void *)g->uploads);
        g->uploads = more;
        g->room = room;
    }
    return &g->uploads[g->count];
}

/* Records an upload in the captured step. again: each replay reads host again. */
inline mixp_result record_upload(
    State *s, void *device, const void *host, size_t bytes, bool again) {
    Graph *g = s->capture;
    Upload *u = upload_new(s, g);
    if (!u) return say(s, MIXP_ERR_MEMORY, "capture", "out of memory");

    /* Use a separate stage, and keep a copy of memory that is read once. */
    memset((void *)u, 0, sizeof *u);
    mixp_result r = stage_new(s, g, bytes, &u->stage);
    if (r != MIXP_OK) return r;
    u->host = host;
    u->bytes = bytes;
    if (!again) {
        u->kept = host_new(s->host, bytes);
        if (!u->kept) return say(s, MIXP_ERR_MEMORY, "capture", "out of memory");
        memcpy(u->kept, host, bytes);
    }
    g->count++;

    /* Record the copy from the stage. */
    r = report_error(
        s, cudaMemcpyAsync(device, u->stage, bytes, cudaMemcpyDefault, s->recorder), "upload");
    return r == MIXP_OK ? update_mirror(s, device, bytes) : r;
}

/* Fills an upload's stage, before a replay or at the end of the capture. */
inline mixp_result upload_send(State *s, Upload *u) {
    mixp_result r = MIXP_OK;
    if (!u->sent) r = send(s, u->stage, u->kept ? u->kept : u->host, u->bytes);
    u->sent = u->kept && r == MIXP_OK;
    return r;
}

inline mixp_result upload(
    const mixp_exec *x, void *device, const void *host, size_t bytes, bool again) {
    Kernel k(x);
    if (!k.state) return MIXP_ERR_ORDER;
    if (!bytes) return MIXP_OK;
    if (!device || !host) return say(k.state, MIXP_ERR_ARGUMENT, "upload", "a pointer is NULL");
    if (k.state->capture) return record_upload(k.state, device, host, bytes, again);

    mixp_result r = check_stream(k.state, "upload");
    if (r == MIXP_OK) r = send(k.state, device, host, bytes);
    return r == MIXP_OK ? update_mirror(k.state, device, bytes) : r;
}

mixp_result device_upload(const mixp_exec *x, void *device, const void *host, size_t bytes) {
    return upload(x, device, host, bytes, false);
}
mixp_result device_feed(const mixp_exec *x, void *device, const void *host, size_t bytes) {
    return upload(x, device, host, bytes, true);
}

mixp_result device_wait(const mixp_exec *x) {
    Kernel k(x);
    if (!k.state) return MIXP_ERR_ORDER;
    if (k.state->capture) return refuse_in_capture(k.state, "waiting");
    mixp_result r = check_stream(k.state, "waiting");
    if (r == MIXP_OK) r = k.report("an earlier kernel", cudaStreamSynchronize(k.stream));
    return r == MIXP_OK ? report_fault(k.state) : r;
}

mixp_result device_download(const mixp_exec *x, void *host, const void *device, size_t bytes) {
    Kernel k(x);
    if (!k.state) return MIXP_ERR_ORDER;
    if (!bytes) return MIXP_OK;
    if (!device || !host) return say(k.state, MIXP_ERR_ARGUMENT, "download", "a pointer is NULL");
    if (k.state->capture) return refuse_in_capture(k.state, "download");

    mixp_result r = check_stream(k.state, "download");
    if (r == MIXP_OK)
        r = k.report("download", cudaMemcpyAsync(host, device, bytes, cudaMemcpyDefault, k.stream));
    return r == MIXP_OK ? device_wait(x) : r;
}

/* The pinned copy of a slot, enlarged when needed. Enlarging waits for copies in flight. */
inline mixp_result make_post_room(State *s, int slot, size_t bytes) {
    if (s->post_bytes[slot] >= bytes) return MIXP_OK;

    /* Free the smaller copy when no queued work writes it any more. */
    if (s->post[slot]) clear_error(cudaStreamSynchronize(s->stream));
    if (s->post[slot]) clear_error(cudaFreeHost(s->post[slot]));
    s->post[slot] = NULL;
    s->post_bytes[slot] = 0;

    cudaError_t e = cudaHostAlloc(&s->post[slot], bytes, cudaHostAllocDefault);
    if (e == cudaSuccess && !s->post_sent[slot])
        e = cudaEventCreateWithFlags(&s->post_sent[slot], cudaEventDisableTiming);
    if (e == cudaSuccess) s->post_bytes[slot] = bytes;
    return report_error(s, e, "pinned memory");
}

mixp_result device_post(const mixp_exec *x, int slot, const void *device, size_t bytes) {
    Kernel k(x);
    State *s = k.state;
    if (!s) return MIXP_ERR_ORDER;
    if (s->capture) return refuse_in_capture(s, "post");
    mixp_result r = check_stream(s, "post");
    if (r == MIXP_OK) r = make_post_room(s, slot, bytes);
    if (r == MIXP_OK)
        r = k.report(
            "post", cudaMemcpyAsync(s->post[slot], device, bytes, cudaMemcpyDefault, k.stream));
    return r == MIXP_OK ? report_error(s, cudaEventRecord(s->post_sent[slot], k.stream), "post")
                        : r;
}

/* Reports the fault that kernels recorded. Deferred while the program captures the stream. */
inline mixp_result report_unless_captured(State *s) {
    if (!s->shared->fault || check_stream(s, "a look") != MIXP_OK) return MIXP_OK;
    return report_fault(s);
}

mixp_result device_collect(const mixp_exec *x, int slot, void *host, size_t bytes) {
    Kernel k(x);
    State *s = k.state;
    if (!s || s->post_bytes[slot] < bytes) return MIXP_ERR_ORDER;
    mixp_result r = report_error(s, cudaEventSynchronize(s->post_sent[slot]), "collect");
    if (r == MIXP_OK) memcpy(host, s->post[slot], bytes);
    return r == MIXP_OK ? report_unless_captured(s) : r;
}

/* Before the first write to the mirror, reads the block itself. Host memory is filled even when a
 * fault is reported. */
mixp_result device_peek(const mixp_exec *x, void *host, const void *device, size_t bytes) {
    Kernel k(x);
    State *s = k.state;
    int i = s ? mirror_at(s, device, bytes) : -1;
    if (i >= 0) {
        size_t offset = (size_t)((const char *)device - (const char *)s->mirrored[i]);
        if (mirror_load(&s->shared->mirrors[i], host, offset, bytes))
            return report_unless_captured(s);
    }
    return device_download(x, host, device, bytes);
}

}   /* namespace */
namespace {

/* --- captures -------------------------------------------------------------------------- *
 *
 * Between begin and end, kernels are recorded instead of run, on a stream used for nothing else. So
 * work that the program queues meanwhile on the legacy stream is not captured. A call that waits,
 * such as cudaMemcpy, may end the capture: the driver's rules leave that open. An upload is
 * recorded as a copy from memory that belongs to the graph. Each upload has its own memory, even if
 * a step writes to one address several times. A kernel that draws random numbers adds `later` to
 * its step (struct Draws), so that each replay draws its own numbers.
 */
void graph_free(const mixp_exec *x, void *graph) {
    Kernel k(x);
    Graph *g = (Graph *)graph;
    if (!g) return;
    if (k.state->capture) abandon_capture(x); /* CUDA frees nothing in a capture */

    /* Wait for replays that read the graph's blocks. */
    if (g->exec) k.report("graph", cudaGraphExecDestroy(g->exec));
    if (g->blocks) k.report("graph", cudaStreamSynchronize(k.state->stream));

    for (int i = 0; i < g->count; i++) host_free(x->host, g->uploads[i].kept);
    while (g->blocks) {
        Block *b = g->blocks;
        g->blocks = b->next;
        memory_free(k.state, b->memory);
        host_free(x->host, b);
    }
    host_free(x->host, (void *)g->uploads);
    host_free(x->host, g);
}

/* Loads the one kernel that a capture records without an earlier run. Drivers before 12.3 cannot
 * load a kernel during a capture. */
inline cudaError_t load_recorded() {
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, (const void *)mirror_again);
}

mixp_result capture_begin(mixp_exec *x) {
    Kernel k(x);
    State *s = k.state;
    if (!s) return MIXP_ERR_ORDER;
    if (s->capture)
        return say(s, MIXP_ERR_ORDER, "capture",
            "a capture is already active; call mixp_capture_end first");
    mixp_result r = check_stream(s, "capture");
    if (r != MIXP_OK) return r;
    r = k.report("capture", load_recorded());
    if (r != MIXP_OK) return r;

    /* Begin to record, on the stream that is used for nothing else. */
    Graph *g = (Graph *)host_new(x->host, sizeof *g);
    if (!g) return say(s, MIXP_ERR_MEMORY, "capture", "out of memory");
    r = k.report("capture", cudaStreamBeginCapture(s->recorder, cudaStreamCaptureModeThreadLocal));
    if (r != MIXP_OK) {
        host_free(x->host, g);
        return r;
    }

    /* Kernels launch on it until the capture ends. */
    s->capture = g;
    s->captured = x;
    x->stream = (void *)s->recorder;
    return MIXP_OK;
}

/* Ends the capture. *graph: the recorded graph; NULL: the graph cannot be run. */
inline mixp_result capture_stop(const mixp_exec *x, Graph **graph) {
    Kernel k(x);
    State *s = k.state;
    Graph *g = s->capture;
    s->capture = NULL;
    s->captured->stream = (void *)s->stream;

    /* Make the recorded kernels a graph that can run. */
    cudaGraph_t recorded = NULL;
    mixp_result r = k.report("capture", cudaStreamEndCapture(s->recorder, &recorded));
    if (r == MIXP_OK) r = k.report("capture", cudaGraphInstantiate(&g->exec, recorded, 0ull));
    if (recorded) clear_error(cudaGraphDestroy(recorded));

    /* Fill the stages of uploads that every replay repeats. */
    for (int i = 0; i < g->count && r == MIXP_OK; i++)
        if (g->uploads[i].kept) r = upload_send(s, &g->uploads[i]);
    if (r == MIXP_OK) *graph = g;
    else graph_free(x, g);
    return r;
}

mixp_result capture_end(mixp_exec *x, void **graph) {
    State *s = state_of(x);
    *graph = NULL;
    if (!s || !s->capture) return MIXP_ERR_ORDER;
    Graph *g = NULL;
    mixp_result r = capture_stop(x, &g);
    *graph = g;
    return r;
}

/* Abandons the capture because memory is to be freed in the middle of it. CUDA frees no memory
 * during a capture, and work queued before the capture may still use the memory. */
void abandon_capture(const mixp_exec *x) {
    Graph *g = NULL;
    if (capture_stop(x, &g) == MIXP_OK) graph_free(x, g);
    device_wait(x);
}

mixp_result replay(const mixp_exec *x, void *graph, uint64_t later) {
    Kernel k(x);
    Graph *g = (Graph *)graph;
    if (!k.state || !g || k.state->capture) return MIXP_ERR_ORDER;

    /* Fill the stages of uploads that are read again, and set the steps since the capture. */
    mixp_result r = check_stream(k.state, "replay");
    for (int i = 0; i < g->count && r == MIXP_OK; i++) r = upload_send(k.state, &g->uploads[i]);
    if (r == MIXP_OK)
        r = k.report(
            "replay", MIXPI_LAUNCH(set_later, 1, 1, 0, k.stream, &k.state->block->later, later));

    return r == MIXP_OK ? k.report("replay", cudaGraphLaunch(g->exec, k.stream)) : r;
}

/* --- a context's state ----------------------------------------------------------------- */

void device_close(mixp_exec *x) {
    State *s = state_of(x);
    if (!s) return;
    OnDevice on(s->ordinal);
    if (s->capture) abandon_capture(x);
    if (s->stream) clear_error(cudaStreamSynchronize(s->stream));

    /* Free the products' plans and workspace. */
    if (s->plans) s->free_plans(s);
    if (s->lt) cublasLtDestroy(s->lt);
    host_free(s->host, s->choices);
    memory_free(s, s->workspace);

    /* Free pinned and device memory, with the events of its copies. */
    for (int i = 0; i < ring_pieces; i++)
        if (s->sent[i]) clear_error(cudaEventDestroy(s->sent[i]));
    for (int i = 0; i < post_slots; i++) {
        if (s->post_sent[i]) clear_error(cudaEventDestroy(s->post_sent[i]));
        if (s->post[i]) clear_error(cudaFreeHost(s->post[i]));
    }
    if (s->ring) clear_error(cudaFreeHost(s->ring));
    memory_free(s, s->block);
    if (s->shared) clear_error(cudaFreeHost(s->shared));

    /* Destroy our streams, and restore the program's own. */
    if (s->recorder && s->recorder != s->stream) clear_error(cudaStreamDestroy(s->recorder));
    if (s->stream && !s->given) clear_error(cudaStreamDestroy(s->stream));
    x->stream = s->given;
    x->state = NULL;
    host_free(s->host, s);
}

inline cudaError_t open_pinned(State *s) {
    /* Memory that kernels see. */
    cudaError_t e =
        cudaHostAlloc((void **)(void *)&s->shared, sizeof *s->shared, cudaHostAllocMapped);
    if (e != cudaSuccess) return e;
    memset((void *)s->shared, 0, sizeof *s->shared);
    e = cudaHostGetDevicePointer((void **)(void *)&s->shared_on_device, s->shared, 0);

    /* The ring of uploads. */
    if (e == cudaSuccess)
        e = cudaHostAlloc(
            (void **)(void *)&s->ring, ring_pieces * piece_bytes, cudaHostAllocDefault);
    for (int i = 0; i < ring_pieces && e == cudaSuccess; i++)
        e = cudaEventCreateWithFlags(&s->sent[i], cudaEventDisableTiming);
    return e;
}

inline mixp_result open_memory(State *s) {
    void *p = NULL;
    mixp_result r = report_error(s, open_pinned(s), "pinned memory");
    if (r == MIXP_OK) r = memory_new(s, sizeof *s->block, &p);
    s->block = (Private *)p;
    if (r == MIXP_OK)
        r = report_error(s, cudaMemsetAsync(p, 0, sizeof *s->block, s->stream), "device memory");
    if (r != MIXP_OK) return r;
    return report_error(s,
        MIXPI_LAUNCH(check_subnormals, 1, 1, 0, s->stream, fault_flag(s), 1.17549435e-38f),
        "a known answer");
}

/* Does a given stream belong to this GPU? CUDA and drivers before 12.8 cannot tell. */
inline cudaError_t check_given(int ordinal, cudaStream_t given) {
#if CUDART_VERSION >= 12080
    int device = -1;
    cudaError_t e = cudaStreamGetDevice(given, &device);
    if (e == cudaSuccess && device != ordinal) return cudaErrorInvalidDevice;
    if (e != cudaErrorCallRequiresNewerDriver && e != cudaErrorNotSupported) return e;
    cudaGetLastError();
#endif
    (void)ordinal;
    (void)given;
    return cudaSuccess;
}

/* Opens the program's stream, or our own. Ours is a blocking stream: it and the legacy default
 * stream wait for each other, as in a program without streams. Captures record a separate stream,
 * except with a given stream, where the program's own launches belong to the step. */
inline cudaError_t open_stream(State *s) {
    cudaStream_t given = (cudaStream_t)s->given;
    cudaError_t e = given ? check_given(s->ordinal, given)
                          : cudaStreamCreateWithFlags(&s->stream, cudaStreamDefault);
    if (e != cudaSuccess) return e;
    if (given) s->stream = given;
    if (given && given != cudaStreamLegacy) {
        s->recorder = given;
        return cudaSuccess;
    }
    return cudaStreamCreateWithFlags(&s->recorder, cudaStreamNonBlocking);
}

/* Major and minor in one number. */
inline cudaError_t capability_of(int ordinal, int *capability) {
    int major = 0, minor = 0;
    cudaError_t e = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ordinal);
    if (e == cudaSuccess)
        e = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, ordinal);
    *capability = 10 * major + minor;
    return e;
}

mixp_result choices_read(State *s, const char *text);       /* see section 6                 */

mixp_result device_open(mixp_exec *x, int ordinal) {
    x->state = NULL;
    State *s = (State *)host_new(x->host, sizeof *s);
    if (!s) return MIXP_ERR_MEMORY;
    OnDevice on(ordinal);
    s->ordinal = ordinal;
    s->host = x->host;
    s->device = x->device;
    s->given = x->stream;
    s->measure = x->gemm_measure != 0;

    /* Ask for the GPU's properties, and open the stream. */
    cudaError_t e = on.error;
    if (e == cudaSuccess)
        e = cudaDeviceGetAttribute(&s->processors, cudaDevAttrMultiProcessorCount, ordinal);
    if (e == cudaSuccess)
        e = cudaDeviceGetAttribute(
            &s->most_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, ordinal);
    if (e == cudaSuccess) e = capability_of(ordinal, &s->capability);
    if (e == cudaSuccess) e = open_stream(s);
    mixp_result r = report_error(s, e, "stream");
    if (s->given && (e == cudaErrorInvalidDevice || e == cudaErrorInvalidResourceHandle))
        r = MIXP_ERR_ARGUMENT;

    /* Allocate memory, and read the program's choices of algorithms. */
    if (r == MIXP_OK) r = open_memory(s);
    if (r == MIXP_OK) r = choices_read(s, x->gemm_choices);
    x->state = s;
    x->stream = (void *)s->stream;
    if (r != MIXP_OK) device_close(x);
    return r;
}

/* The handle and workspace of products, made at the first. */
inline mixp_result open_products(State *s) {
    if (s->lt && s->workspace) return MIXP_OK;
    if (s->capture) return refuse_in_capture(s, "the first product");
    if (!s->lt && cublasLtCreate(&s->lt) != CUBLAS_STATUS_SUCCESS)
        return say(s, MIXP_ERR_DEVICE, "cuBLASLt", "could not be started");
    return memory_new(s, workspace_bytes, &s->workspace);
}

/* How many products have run in each way so far. */
mixp_gemm_count gemm_count(const mixp_exec *x) {
    State *s = state_of(x);
    mixp_gemm_count none = { 0, 0, 0, 0, 0 };
    return s ? s->products : none;
}

/* The text of the last error; "" when there was none. */
const char *device_message(const mixp_exec *x) {
    State *s = state_of(x);
    return s ? s->message : "";
}

}   /* namespace */
/* ==== 3. ELEMENTWISE ================================================= >>elementwise ====
 *
 * A thread works on 8 elements at a time (16 bytes of f16 or bf16) if addresses allow it. Sums
 * are cut into runs that depend only on shapes. One thread or one block adds a run in f32, in a
 * fixed order; then the runs are added in double. A result may differ from the CPU's by the order
 * of its sum, and by a few units in the last place of exp, log, tanh and pow.
 */
namespace {

const int map_threads = 256;

/* --- convert ---------------------------------------------------------------------------- */

struct Conversion {
    mixp_convert_args k;
    Draws             draws;
    bool              wide;
};

__device__ inline uint64_t load_code(const mixp_in &a, int64_t i) {
    switch (dtype_bytes(a.dtype)) {
    case 1: return ((const uint8_t *)a.data)[i];
    case 2: return ((const uint16_t *)a.data)[i];
    case 4: return ((const uint32_t *)a.data)[i];
    default: return ((const uint64_t *)a.data)[i];
    }
}
__device__ inline void store_code(const mixp_out &a, int64_t i, uint64_t code) {
    switch (dtype_bytes(a.dtype)) {
    case 1: ((uint8_t *)a.data)[i] = (uint8_t)code; break;
    case 2: ((uint16_t *)a.data)[i] = (uint16_t)code; break;
    case 4: ((uint32_t *)a.data)[i] = (uint32_t)code; break;
    default: ((uint64_t *)a.data)[i] = code;
    }
}

/* The random number of element i, or 0. */
__device__ inline uint32_t draw(const mixp_rounding &r, uint64_t key, int64_t i) {
    return r.stochastic ? mixp_random_at(key, (uint64_t)(r.first + i)) : 0u;
}

__device__ inline uint64_t rounding_key(const Conversion &c) {
    return c.k.rounding.stochastic ? key_now(c.draws) : 0;
}

/* Converts any dtype to any dtype. */
__global__ void convert_each(const __grid_constant__ Conversion c) {
    const mixp_rounding &r = c.k.rounding;
    mixp_format to = mixp_format_of(c.k.dst.dtype), from = mixp_format_of(c.k.src.dtype);
    uint64_t key = rounding_key(c);
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i < c.k.n; i += (int64_t)gridDim.x * blockDim.x) {
        mixpi_number x = mixpi_unpack(from, load_code(c.k.src, i));
        store_code(c.k.dst, i, mixpi_pack(to, x, r.saturate, r.stochastic, draw(r, key, i)));
    }
}

__host__ __device__ inline bool is_f8(mixp_dtype d) {
    return d == MIXP_F8_E4M3 || d == MIXP_F8_E5M2;
}
/* The dtypes that convert through f32. */
__host__ __device__ inline bool is_by_f32(mixp_dtype d) { return is_real(d) || is_f8(d); }

__device__ inline float f8_value(mixp_dtype d, uint32_t code) {
    return d == MIXP_F8_E4M3 ? mixp_f32_of_bits(mixpi_f32_of_e4m3(code)) : f16_value(code << 8);
}

__device__ inline void widen8(const mixp_in &a, int64_t i, int n, bool wide, float *v) {
    if (!is_f8(a.dtype)) {
        get8_any(a, i, n, wide, v);
        return;
    }

    /* Read 8 codes of one byte each. */
    const uint8_t *p = (const uint8_t *)a.data + i;
    uint2 u = make_uint2(0, 0);
    if (wide && n == 8) u = *(const uint2 *)(const void *)p;
    else {
        MIXPI_UNROLL
        for (int k = 0; k < 4; k++) {
            u.x |= k < n ? (uint32_t)p[k] << 8 * k : 0u;
            u.y |= k + 4 < n ? (uint32_t)p[k + 4] << 8 * k : 0u;
        }
    }

    MIXPI_UNROLL
    for (int k = 0; k < 8; k++)
        v[k] = f8_value(a.dtype, (k < 4 ? u.x : u.y) >> 8 * (k % 4) & 0xFFu);
}

__device__ inline uint32_t narrow1(
    mixp_dtype d, const mixp_rounding &r, uint64_t key, int64_t i, float x) {
    if (!is_f8(d) && !r.saturate && !r.stochastic) return low_code(d, x);
    return mixpi_round_f32(d, mixp_bits_of_f32(x), r.saturate, r.stochastic, draw(r, key, i));
}

/* The fp8 codes of 8 numbers, rounded to nearest. */
__device__ inline uint2 f8_codes(mixp_dtype d, const float *v, bool saturate) {
    uint32_t words[2];
    if (d == MIXP_F8_E4M3) fp8_codes<MIXP_F8_E4M3, 2>(v, saturate, words);
    else fp8_codes<MIXP_F8_E5M2, 2>(v, saturate, words);
    return make_uint2(words[0], words[1]);
}

__device__ inline void narrow8(
    const Conversion &c, uint64_t key, int64_t i, int n, const float *v) {
    const mixp_out &dst = c.k.dst;
    if (dst.dtype == MIXP_F32) {
        put8_any(dst, i, n, c.wide, v);
        return;
    }

    /* Round the elements to codes. */
    uint32_t u[8];
    if (is_f8(dst.dtype) && !c.k.rounding.stochastic) {
        const uint2 words = f8_codes(dst.dtype, v, c.k.rounding.saturate != 0);
        if (c.wide && n == 8) {
            *(uint2 *)(void *)((uint8_t *)dst.data + i) = words;
            return;
        }
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) u[k] = (k < 4 ? words.x : words.y) >> 8 * (k % 4) & 0xFFu;
    } else {
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) u[k] = narrow1(dst.dtype, c.k.rounding, key, i + k, v[k]);
    }

    /* Store 8 codes at once, of one byte or two; otherwise one by one. */
    if (c.wide && n == 8 && is_f8(dst.dtype)) {
        *(uint2 *)(void *)((uint8_t *)dst.data + i) = make_uint2(
            u[0] | u[1] << 8 | u[2] << 16 | u[3] << 24, u[4] | u[5] << 8 | u[6] << 16 | u[7] << 24);
    } else if (c.wide && n == 8) {
        *(uint4 *)(void *)((uint16_t *)dst.data + i) =
            make_uint4(u[0] | u[1] << 16, u[2] | u[3] << 16, u[4] | u[5] << 16, u[6] | u[7] << 16);
    } else {
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++)
            if (k < n) store_code(dst, i + k, u[k]);
    }
}

__global__ void __launch_bounds__(map_threads) convert_real(const __grid_constant__ Conversion c) {
    uint64_t key = rounding_key(c);
    int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * 8;
    for (; i < c.k.n; i += (int64_t)gridDim.x * blockDim.x * 8) {
        float v[8];
        int n = (int)least(8, c.k.n - i);
        widen8(c.k.src, i, n, c.wide, v);
        narrow8(c, key, i, n, v);
    }
}

inline mixp_result launch_convert(Kernel &kernel, const Conversion &c) {
    int64_t n = c.k.n;
    if (is_by_f32(c.k.dst.dtype) && is_by_f32(c.k.src.dtype))
        return kernel.report(
            "convert", MIXPI_LAUNCH(convert_real, grid_for(ceil_div(n, 8), map_threads),
                           map_threads, 0, kernel.stream, c));
    return kernel.report("convert",
        MIXPI_LAUNCH(convert_each, grid_for(n, map_threads), map_threads, 0, kernel.stream, c));
}

inline mixp_result copy_bytes(Kernel &kernel, void *dst, const void *src, size_t bytes) {
    return kernel.report(
        "convert", cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, kernel.stream));
}

}   /* namespace */

static mixp_result mixpi_cuda_convert(const mixp_exec *x, const mixp_convert_args *k) {
    Kernel kernel(x);
    const size_t out = size_of_dtype(k->dst.dtype), in = size_of_dtype(k->src.dtype);
    if (!kernel.state) return MIXP_ERR_ORDER;
    if (!out || !in) return MIXP_ERR_DTYPE;
    if (k->n < 0 || k->dst.accumulate || (k->n && (!k->dst.data || !k->src.data)))
        return MIXP_ERR_ARGUMENT;

    /* Copy the bytes of an array of the same dtype. */
    const bool in_place = k->dst.data == k->src.data, same = k->dst.dtype == k->src.dtype;
    const size_t bytes = (size_t)k->n * out;
    if (k->n == 0 || (same && in_place)) return MIXP_OK;
    if (same) return copy_bytes(kernel, k->dst.data, k->src.data, bytes);

    /* Convert. In place and to another width, a thread would overwrite values that other threads
     * still read: the result goes to scratch memory first. */
    Conversion c;
    memset((void *)&c, 0, sizeof c);
    c.k = *k;
    c.draws = draws_of(kernel.state, k->rounding.seed, k->rounding.step, k->rounding.tensor);
    if (in_place && out != in) c.k.dst.data = scratch_of(x, bytes);
    if (!c.k.dst.data) return MIXP_ERR_MEMORY;
    c.wide = is_wide(c.k.dst) && is_wide(c.k.src);
    mixp_result r = launch_convert(kernel, c);
    if (r != MIXP_OK || c.k.dst.data == k->dst.data) return r;
    return copy_bytes(kernel, k->dst.data, c.k.dst.data, bytes);
}

/* --- fill --------------------------------------------------------------------------------- */

namespace {

/* n elements; pattern: the element's code, repeated to fill 8 bytes. */
__global__ void fill_codes(mixp_out dst, int64_t n, uint64_t pattern, bool wide) {
    int per = 16 / dtype_bytes(dst.dtype);
    int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * per;
    for (; i < n; i += (int64_t)gridDim.x * blockDim.x * per) {
        if (wide && i + per <= n) {
            uint32_t lo = (uint32_t)pattern, hi = (uint32_t)(pattern >> 32);
            *(uint4 *)(void *)byte_at(dst, i) = make_uint4(lo, hi, lo, hi);
        } else
            for (int64_t j = i; j < i + per && j < n; j++) store_code(dst, j, pattern);
    }
}

}   /* namespace */

static mixp_result mixpi_cuda_fill(const mixp_exec *x, const mixp_fill_args *k) {
    Kernel kernel(x);
    const size_t size = size_of_dtype(k->dst.dtype), bytes = (size_t)k->n * size;
    if (!kernel.state) return MIXP_ERR_ORDER;
    if (!size) return MIXP_ERR_DTYPE;
    if (k->n < 0 || k->dst.accumulate || (k->n && !k->dst.data)) return MIXP_ERR_ARGUMENT;
    if (k->n == 0) return MIXP_OK;

    /* Repeat the element's code to fill 8 bytes. */
    uint64_t pattern = mixp_encode(k->dst.dtype, k->value, 0);
    for (size_t bits = 8 * size; bits < 64; bits *= 2)
        pattern = (pattern & (((uint64_t)1 << bits) - 1u)) | pattern << bits;

    if (pattern == 0)
        return kernel.report("fill", cudaMemsetAsync(k->dst.data, 0, bytes, kernel.stream));
    const unsigned grid = grid_for(ceil_div((int64_t)bytes, 16), map_threads);
    return kernel.report("fill", MIXPI_LAUNCH(fill_codes, grid, map_threads, 0, kernel.stream,
                                     k->dst, k->n, pattern, is_wide(k->dst)));
}
/* --- shapes ------------------------------------------------------------------------------- *
 *
 * The axes of a shape, and the stride of each axis in up to four arrays. Array 0 is the output.
 */
namespace {

struct Axes {
    int      rank;
    int64_t  n[8], s[4][8];
    uint64_t inverse[8];        /* inverses of n, for over()                                 */
};

/* The factor by which over() multiplies instead of dividing by n, because a GPU divides 64 bits
 * by a function call. */
inline uint64_t inverse_of(int64_t n) { return n > 0 ? ~(uint64_t)0 / (uint64_t)n : 0; }

/* a / n for a >= 0: the product is exact or one too small. */
__device__ inline int64_t over(int64_t a, int64_t n, uint64_t inverse) {
    int64_t q = (int64_t)__umul64hi((uint64_t)a, inverse);
    return a - q * n >= n ? q + 1 : q;
}

inline int64_t count_of(const Axes &x) {
    int64_t n = 1;
    for (int i = 0; i < x.rank; i++) n *= x.n[i];
    return n;
}

inline void set_length(Axes *x, int axis, int64_t n) {
    x->n[axis] = n;
    x->inverse[axis] = inverse_of(n);
}

inline void append(Axes *to, const Axes &from, int axis) {
    int r = to->rank++;
    set_length(to, r, from.n[axis]);
    for (int k = 0; k < 4; k++) to->s[k][r] = from.s[k][axis];
}

/* Axis i of x; by default dense for all arrays. */
inline Axes dense_axes(int rank, const int64_t *shape) {
    Axes x;
    int64_t step = 1;
    memset(&x, 0, sizeof x);
    x.rank = rank;
    for (int i = rank - 1; i >= 0; step *= shape[i--]) {
        set_length(&x, i, shape[i]);
        for (int k = 0; k < 4; k++) x.s[k][i] = step;
    }
    return x;
}

/* Drops axes of one element, and merges neighbours that all arrays step through evenly. */
inline Axes merge_axes(const Axes &x) {
    Axes m;
    memset(&m, 0, sizeof m);
    for (int i = 0; i < x.rank; i++) {
        if (x.n[i] == 1) continue;
        const int last = m.rank - 1;
        bool joins = last >= 0;
        for (int k = 0; k < 4; k++) joins = joins && m.s[k][last] == x.s[k][i] * x.n[i];
        if (!joins) {
            append(&m, x, i);
            continue;
        }

        /* Lengthen the last axis by the neighbour, and step by the neighbour's strides. */
        set_length(&m, last, m.n[last] * x.n[i]);
        for (int k = 0; k < 4; k++) m.s[k][last] = x.s[k][i];
    }
    return m;
}

/* Adds to at[] the offset of the index-th point of the axes in each array. */
__device__ inline void locate(const Axes &x, int64_t index, int64_t *at) {
    for (int axis = x.rank - 1; axis >= 0; axis--) {
        int64_t q = axis ? over(index, x.n[axis], x.inverse[axis]) : 0, i = index - q * x.n[axis];
        MIXPI_UNROLL
        for (int k = 0; k < 4; k++) at[k] += i * x.s[k][axis];
        index = q;
    }
}

/* --- copy --------------------------------------------------------------------------------- */

const int tile = 32;

struct Copy {
    Axes       axes;            /* array 0: dst, 1: src; the last axis is densest in dst     */
    mixp_out   dst;
    mixp_in    src;
    int64_t    units;           /* total number of units; a thread moves one at a time       */
    int        width;           /* elements of a unit; of real arrays                        */
};

/* Swaps two axes. */
inline void swap_axes(Axes *x, int i, int j) {
    Axes was = *x;
    set_length(x, i, was.n[j]);
    set_length(x, j, was.n[i]);
    for (int k = 0; k < 4; k++) {
        x->s[k][i] = was.s[k][j];
        x->s[k][j] = was.s[k][i];
    }
}

inline int64_t magnitude(int64_t a) { return a < 0 ? -a : a; }

/* Sorted by dst's strides, then merged. */
inline Axes copy_axes(const mixp_copy_args *k) {
    Axes x = dense_axes(k->rank, k->shape);
    for (int i = 0; i < k->rank; i++) {
        x.s[0][i] = x.s[2][i] = x.s[3][i] = k->dst_strides[i];
        x.s[1][i] = k->src_strides[i];
    }
    for (int i = 1; i < k->rank; i++)
        for (int j = i; j > 0 && magnitude(x.s[0][j - 1]) < magnitude(x.s[0][j]); j--)
            swap_axes(&x, j, j - 1);
    return merge_axes(x);
}

/* Copies elements of 16, 8, 4, 2 or 1 bytes as bits. */
template <class T> __global__ void copy_bits(const __grid_constant__ Copy c) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i < c.units; i += (int64_t)gridDim.x * blockDim.x) {
        int64_t at[4] = { 0, 0, 0, 0 };
        locate(c.axes, i, at);
        ((T *)c.dst.data)[at[0]] = ((const T *)c.src.data)[at[1]];
    }
}

__device__ inline void store_real(const mixp_out &a, int64_t i, float x) {
    put1(a, i, a.accumulate ? __fadd_rn(get1(as_in(a), i), x) : x);
}

/* out[i, i+n) (+)= v. */
__device__ inline void store8(const mixp_out &out, int64_t i, int n, bool wide, float *v) {
    float old[8];
    if (out.accumulate) {
        get8_any(as_in(out), i, n, wide, old);
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) v[k] = __fadd_rn(old[k], v[k]);
    }
    put8_any(out, i, n, wide, v);
}
__global__ void copy_real(const __grid_constant__ Copy c) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i < c.units; i += (int64_t)gridDim.x * blockDim.x) {
        int64_t at[4] = { 0, 0, 0, 0 };
        float v[8];
        locate(c.axes, i, at);
        if (c.width == 8) {
            get8(c.src, at[1] * 8, v);
            store8(c.dst, at[0] * 8, 8, true, v);
        } else store_real(c.dst, at[0], get1(c.src, at[1]));
    }
}

/* Copies the last two axes in tiles: src is read along the second to last axis, dst is written
 * along the last. outer: the axes, with the last two counted in tiles. */
template <class T> __device__ inline T tile_load(const Copy &c, int64_t i) {
    return ((const T *)c.src.data)[i];
}
template <> __device__ inline float tile_load<float>(const Copy &c, int64_t i) {
    return get1(c.src, i);
}
template <class T> __device__ inline void tile_store(const Copy &c, int64_t i, T v) {
    ((T *)c.dst.data)[i] = v;
}
template <> __device__ inline void tile_store<float>(const Copy &c, int64_t i, float v) {
    store_real(c.dst, i, v);
}

template <class T>
__global__ void __launch_bounds__(map_threads)
    copy_tiles(const __grid_constant__ Copy c, const __grid_constant__ Axes outer, int64_t tiles) {
    MIXPI_SHARED(T, part, tile * (tile + 1));
    const int a = c.axes.rank - 2, b = a + 1, r = outer.rank - 2;
    const int64_t rows = c.axes.n[a], cols = c.axes.n[b];
    const int u = (int)threadIdx.x % tile, v = (int)threadIdx.x / tile, step = map_threads / tile;
    for (int64_t t = blockIdx.x; t < tiles; t += gridDim.x) {
        /* Find the tile: its row and column, and where it begins in both arrays. */
        const int64_t above = over(t, outer.n[r + 1], outer.inverse[r + 1]);
        const int64_t rest = over(above, outer.n[r], outer.inverse[r]);
        const int64_t col = (t - above * outer.n[r + 1]) * tile;
        const int64_t row = (above - rest * outer.n[r]) * tile;
        int64_t at[4] = { 0, 0, 0, 0 };
        locate(outer, t, at);

        /* Read it along axis a. */
        for (int j = v; j < tile; j += step)
            if (row + u < rows && col + j < cols)
                part[j * (tile + 1) + u] =
                    tile_load<T>(c, at[1] + u * c.axes.s[1][a] + j * c.axes.s[1][b]);
        __syncthreads();

        /* Write it along axis b. */
        for (int j = v; j < tile; j += step)
            if (row + j < rows && col + u < cols)
                tile_store<T>(
                    c, at[0] + j * c.axes.s[0][a] + u * c.axes.s[0][b], part[u * (tile + 1) + j]);
        __syncthreads();
    }
}

/* Groups elements by `width` along the last axis, if strides, addresses and lengths allow it. */
inline bool group_elements(Copy *c, int width, uintptr_t bytes) {
    Axes &x = c->axes;
    const int last = x.rank - 1;
    if (last < 0 || x.s[0][last] != 1 || x.s[1][last] != 1 || x.n[last] % width) return false;
    if ((uintptr_t)c->dst.data % bytes || (uintptr_t)c->src.data % bytes) return false;
    for (int i = 0; i < last; i++)
        if (x.s[0][i] % width || x.s[1][i] % width) return false;

    /* Count strides and the last axis in groups. */
    for (int i = 0; i < last; i++) {
        x.s[0][i] /= width;
        x.s[1][i] /= width;
    }
    set_length(&x, last, x.n[last] / width);
    return true;
}

inline cudaError_t launch_bits(Copy *c, cudaStream_t stream) {
    /* Move the widest units that the copy allows. */
    const int size = dtype_bytes(c->dst.dtype);
    int unit = 16;
    while (unit > size && !group_elements(c, unit / size, (uintptr_t)unit)) unit /= 2;
    c->units = count_of(c->axes);

    const unsigned grid = grid_for(c->units, map_threads);
    return unit == 16  ? MIXPI_LAUNCH(copy_bits<uint4>, grid, map_threads, 0, stream, *c)
           : unit == 8 ? MIXPI_LAUNCH(copy_bits<uint2>, grid, map_threads, 0, stream, *c)
           : unit == 4 ? MIXPI_LAUNCH(copy_bits<uint32_t>, grid, map_threads, 0, stream, *c)
           : unit == 2 ? MIXPI_LAUNCH(copy_bits<uint16_t>, grid, map_threads, 0, stream, *c)
                       : MIXPI_LAUNCH(copy_bits<uint8_t>, grid, map_threads, 0, stream, *c);
}

inline cudaError_t launch_real(Copy *c, cudaStream_t stream) {
    c->width = group_elements(c, 8, 16) ? 8 : 1;
    c->units = count_of(c->axes);
    return MIXPI_LAUNCH(copy_real, grid_for(c->units, map_threads), map_threads, 0, stream, *c);
}

/* Does the copy transpose, that is: is dst dense along the last axis and src along another axis? If
 * so, moves src's dense axis to second to last. */
inline bool find_transpose(Copy *c) {
    Axes &x = c->axes;
    const int last = x.rank - 1;
    if (last < 1 || x.s[0][last] != 1 || x.s[1][last] == 1) return false;
    int best = -1;
    for (int i = 0; i < last; i++)
        if (x.s[1][i] == 1) best = i;
    if (best < 0 || x.n[best] < 8 || x.n[last] < 8) return false;
    if (best != last - 1) swap_axes(&x, best, last - 1);
    return true;
}

inline cudaError_t launch_tiles(const Copy &c, int bits, cudaStream_t stream) {
    /* Count the last two axes in tiles. */
    Axes outer = c.axes;
    const int last = c.axes.rank - 1;
    for (int i = last - 1; i <= last; i++) {
        set_length(&outer, i, ceil_div(c.axes.n[i], tile));
        for (int k = 0; k < 4; k++) outer.s[k][i] *= tile;
    }

    const int64_t tiles = count_of(outer);
    const int size = dtype_bytes(c.dst.dtype);
    const unsigned grid = grid_for(tiles, 1), n = map_threads;
    return !bits       ? MIXPI_LAUNCH(copy_tiles<float>, grid, n, 0, stream, c, outer, tiles)
           : size == 8 ? MIXPI_LAUNCH(copy_tiles<uint64_t>, grid, n, 0, stream, c, outer, tiles)
           : size == 4 ? MIXPI_LAUNCH(copy_tiles<uint32_t>, grid, n, 0, stream, c, outer, tiles)
           : size == 2 ? MIXPI_LAUNCH(copy_tiles<uint16_t>, grid, n, 0, stream, c, outer, tiles)
                       : MIXPI_LAUNCH(copy_tiles<uint8_t>, grid, n, 0, stream, c, outer, tiles);
}

}   /* namespace */

static mixp_result mixpi_cuda_copy(const mixp_exec *x, const mixp_copy_args *k) {
    Kernel kernel(x);
    if (!kernel.state) return MIXP_ERR_ORDER;
    const bool bits = k->dst.dtype == k->src.dtype && !k->dst.accumulate;
    if (!size_of_dtype(k->dst.dtype) || !size_of_dtype(k->src.dtype)) return MIXP_ERR_DTYPE;
    if (!bits && !(is_real(k->dst.dtype) && is_real(k->src.dtype))) return MIXP_ERR_DTYPE;
    if (k->rank < 0 || k->rank > MIXP_MAX_RANK) return MIXP_ERR_SHAPE;

    /* An array without elements needs no addresses. */
    bool empty = false;
    for (int i = 0; i < k->rank; i++) {
        if (k->shape[i] < 0) return MIXP_ERR_SHAPE;
        empty = empty || k->shape[i] == 0;
    }
    if (empty) return MIXP_OK;
    if (!k->dst.data || !k->src.data) return MIXP_ERR_ARGUMENT;

    /* Copy a transpose in tiles, and other arrays in the order of dst. */
    Copy c;
    memset((void *)&c, 0, sizeof c);
    c.axes = copy_axes(k);
    c.dst = k->dst;
    c.src.data = k->src.data;
    c.src.dtype = k->src.dtype;
    if (find_transpose(&c)) return kernel.report("copy", launch_tiles(c, bits, kernel.stream));
    return kernel.report(
        "copy", bits ? launch_bits(&c, kernel.stream) : launch_real(&c, kernel.stream));
}
/* --- functions of an element -------------------------------------------------------------- */

namespace {

/* The function that a pass computes from up to three sources a, b, c. The sources of a slope are
 * dy, then x or y (see unary_backward). */
constexpr int
    FN_UNARY = 0,                                   /* + mixp_unary                          */
    FN_UNARY_D = FN_UNARY + (int)MIXP_UNARY_COUNT,  /* + mixp_unary                          */
    FN_BINARY = FN_UNARY_D + (int)MIXP_UNARY_COUNT, /* + mixp_binary                         */
    FN_DIVISOR_D = FN_BINARY + (int)MIXP_BINARY_COUNT,  /* dy, a, b: gradient of b in a / b  */
    FN_LARGER_D = FN_DIVISOR_D + 1,                 /* dy, x, y: gradient of x in max(x, y)  */
    FN_GATE_D = FN_LARGER_D + 1,                    /* dy, a, b: gradient of a in silu(a) b  */
    FN_PAIR_D = FN_GATE_D + 1,                      /* dy, a, b: gradient of a in a power, an
                                                       atan2, a prelu (+ 2 each); + 1: of b  */
    FN_WHERE = FN_PAIR_D + 6,                       /* mask, a, b: mask ? a : b              */
    FN_KEPT = FN_WHERE + 1,                         /* mask, a: mask ? a : q                 */
    FN_MASKED = FN_KEPT + 1,                        /* mask, b: mask ? q : b                 */
    FN_LOSS = FN_MASKED + 1,                        /* + mixp_loss_kind                      */
    FN_LOSS_D = FN_LOSS + (int)MIXP_LOSS_COUNT,     /* + mixp_loss_kind                      */
    FN_COPY = FN_LOSS_D + (int)MIXP_LOSS_COUNT;     /* a unchanged, for sums                 */

/* One row for each mixp_unary, in the order of the enum: X(name, value of a, slope of b times g); b
 * is x, or y for functions whose slope needs the result. */
#define MIXPI_CUDA_UNARIES(X)                                                                 \
    X(RELU, larger(0.0f, a), b <= 0.0f ? 0.0f : g)                                            \
    X(GELU_TANH, a * sigmoid(gelu_2u(a, a * a), &t), gelu_tanh_slope(g, b))                   \
    X(GELU_ERF, a * normcdff(clamped(a, MIXPI_ERF_BOUND)), gelu_erf_slope(g, b))              \
    X(SILU, a * sigmoid(a, &t), silu_slope(g, b))                                             \
    X(TANH, tanhf(a), g * fmaf(-b, b, 1.0f))                                                  \
    X(SIGMOID, sigmoid(a, &t), g * fmaf(-b, b, b))                                            \
    X(EXP, expf(a), g * b)                                                                    \
    X(LOG, logf(a), g / b)                                                                    \
    X(SQRT, sqrtf(a), g / (b + b))                                                            \
    X(POW, power(a, p), p == 0.0f ? 0.0f : g * (p * power(b, p - 1.0f)))                      \
    X(SCALE, __fmul_rn(a, p), __fmul_rn(g, p))                                                \
    X(RELU_SQUARED, squared(larger(0.0f, a)), g * twice(larger(0.0f, b)))                     \
    X(ABS, fabsf(a), signed_by(b, g))                                                         \
    X(SIN, sinf(a), g * cosf(b))                                                              \
    X(COS, cosf(a), -(g * sinf(b)))                                                           \
    X(SOFT_CAP, p * tanhf(a / p), soft_cap_slope(g, b, p))                                    \
    X(CLAMP, confined(a, p, q), is_between(b, p, q) ? g : 0.0f)                               \
    X(AFFINE, fmaf(p, a, q), __fmul_rn(g, p))                                                 \
    X(LOG1P, log1pf(a), g / (b + 1.0f))                                                       \
    X(EXPM1, expm1f(a), g * expf(b))                                                          \
    X(ERF, erff(a), erf_slope(g, b))                                                          \
    X(SOFTPLUS, softplus(a, p), g * sigmoid(b * p, &t))                                       \
    X(LEAKY_RELU, a > 0.0f ? a : p * a, b > 0.0f ? g : g * p)                                 \
    X(ELU, a > 0.0f ? a : p * expm1f(a), b <= 0.0f ? g * (p * expf(b)) : g)                   \
    X(ROOT, sqrtf(a), b == 0.0f ? 0.0f : g / (b + b))                                         \
    X(LOG2, log2f(a), g / (b * 0.693147182f))                                                 \
    X(LOG10, log10f(a), g / (b * 2.30258512f))                                                \
    X(ACOS, acosf(a), -arc_slope(g, b))                                                       \
    X(ASIN, asinf(a), arc_slope(g, b))                                                        \
    X(TAN, tanf(a), g * fmaf(b, b, 1.0f))                                                     \
    X(SINH, sinhf(a), g * coshf(b))                                                           \
    X(COSH, coshf(a), g * sinhf(b))                                                           \
    X(ERFINV, erfinvf(a), erfinv_slope(g, b))

/* The others, in the order of the enums. A new one needs a case in value and strided_kernels, or in
 * loss_value, loss_slope and strided_kernels. */
#define MIXPI_CUDA_BINARIES(X) X(ADD) X(SUB) X(MUL) X(DIV) X(MAXIMUM) X(MINIMUM) X(SWIGLU)    \
                               X(POWER) X(ATAN2) X(PRELU)
#define MIXPI_CUDA_LOSSES(X)   X(MSE) X(BCE_LOGITS) X(BCE) X(L1) X(HUBER) X(SMOOTH_L1) X(KL)  \
                               X(KL_LOG)

#define MIXPI_UNARY_NUMBER(op, value, slope) MIXP_UNARY_##op,
#define MIXPI_BINARY_NUMBER(op) MIXP_BINARY_##op,
#define MIXPI_LOSS_NUMBER(kind) MIXP_LOSS_##kind,
constexpr int unary_numbers[] = { MIXPI_CUDA_UNARIES(MIXPI_UNARY_NUMBER) };
constexpr int binary_numbers[] = { MIXPI_CUDA_BINARIES(MIXPI_BINARY_NUMBER) };
constexpr int loss_numbers[] = { MIXPI_CUDA_LOSSES(MIXPI_LOSS_NUMBER) };
#undef MIXPI_UNARY_NUMBER
#undef MIXPI_BINARY_NUMBER
#undef MIXPI_LOSS_NUMBER

/* Are the values 0, 1, ..., count - 1? */
template <int n> constexpr bool all_of(const int (&numbers)[n], int count) {
    for (int i = 0; i < n; i++)
        if (numbers[i] != i) return false;
    return n == count;
}
static_assert(all_of(unary_numbers, MIXP_UNARY_COUNT), "a mixp_unary has no case here");
static_assert(all_of(binary_numbers, MIXP_BINARY_COUNT),
              "a mixp_binary has no case here");
static_assert(all_of(loss_numbers, MIXP_LOSS_COUNT), "a mixp_loss_kind has no case here");

/* The larger of a and b, or b if either is NaN. */
__device__ inline float larger(float a, float b) { return a > b ? a : b; }
/* NaN stays NaN. */
__device__ inline float clamped(float x, float bound) {
    return x > bound ? bound : x < -bound ? -bound : x;
}

/* 1 / (1 + e^-x). *rest: 1 minus the result. Both are accurate in their tails. */
__device__ inline float sigmoid(float x, float *rest) {
    float e = expf(-fabsf(x)), q = 1.0f / (1.0f + e), t = e * q;
    *rest = x > 0.0f ? t : q;
    return x > 0.0f ? q : t;
}

/* The density of the normal distribution; x^2 includes the bits that the rounded product loses. */
__device__ inline float density(float x) {
    float h = x * x, low = fmaf(x, x, -h), e = expf(-0.5f * h);
    return fmaf(e, -0.5f * low, e) * MIXPI_DENSITY;
}

__device__ inline float power(float x, float p) {
    if (p == 1.0f) return x;
    if (p == 2.0f) return x * x;
    if (p == 3.0f) return x * x * x;
    if (p == 0.5f) return sqrtf(x);
    if (p == -1.0f) return 1.0f / x;
    return powf(x, p);
}

/* x (GELU_LINEAR + GELU_CUBIC x^2). */
__device__ inline float gelu_2u(float x, float square) {
    return x * fmaf(square, MIXPI_GELU_CUBIC, MIXPI_GELU_LINEAR);
}

/* x with the sign of s; 0 where s is 0. */
__device__ inline float signed_by(float s, float x) { return s > 0.0f ? x : s < 0.0f ? -x : 0.0f; }

/* max(a, 0) + log(1 + e^-|p a|) / p: never overflows. */
__device__ inline float softplus(float a, float p) {
    return larger(0.0f, a) + log1pf(expf(-(fabsf(a) * p))) / p;
}

__device__ inline float squared(float a) { return a * a; }
__device__ inline float twice(float a) { return a + a; }

/* a, but at least p and at most q. */
__device__ inline float confined(float a, float p, float q) {
    a = a < p ? p : a;
    return a > q ? q : a;
}

/* g sigmoid(2u) + g x sigmoid(2u) (1 - sigmoid(2u)) (2u)'; constant beyond the bound. */
__device__ inline float gelu_tanh_slope(float g, float x) {
    x = clamped(x, MIXPI_GELU_BOUND);
    float rest, square = x * x, s = sigmoid(gelu_2u(x, square), &rest);
    return g * fmaf(s * rest * x, fmaf(square, MIXPI_GELU_SLOPE, MIXPI_GELU_LINEAR), s);
}

__device__ inline float gelu_erf_slope(float g, float x) {
    x = clamped(x, MIXPI_ERF_BOUND);
    return g * fmaf(x, density(x), normcdff(x));
}

__device__ inline float silu_slope(float g, float x) {
    x = clamped(x, MIXPI_SILU_BOUND);
    float rest, s = sigmoid(x, &rest);
    return g * fmaf(s * rest, x, s);
}

/* 2/sqrt(pi) e^(-x^2), times g; x^2 includes the bits that the rounded product loses. */
__device__ inline float erf_slope(float g, float x) {
    x = clamped(x, MIXPI_ERF_BOUND);
    float h = x * x, low = fmaf(x, x, -h), e = expf(-h);
    return g * (fmaf(e, -low, e) * MIXPI_ERF_SLOPE);
}

/* g / sqrt(1 - x^2), exact near 1. */
__device__ inline float arc_slope(float g, float x) { return g / sqrtf((1.0f - x) * (1.0f + x)); }

/* sqrt(pi)/2 e^(y^2), times g, with y = erfinv(x); y^2 includes the bits that the rounded product
 * loses. */
__device__ inline float erfinv_slope(float g, float x) {
    float y = erfinvf(x), h = y * y, e = expf(h);
    if (h < 88.0f) e = fmaf(e, fmaf(y, y, -h), e);
    return g * (e * 0.886226925f);
}

/* Is x above p and below q? An infinite bound does not limit x. */
__device__ inline bool is_between(float x, float p, float q) {
    return (x > p || mixp_bits_of_f32(p) == 0xFF800000u) &&
           (x < q || mixp_bits_of_f32(q) == 0x7F800000u);
}

__device__ inline float soft_cap_slope(float g, float x, float p) {
    float t = tanhf(x / p);
    return g * fmaf(-t, t, 1.0f);
}

#define MIXPI_UNARY_VALUE(op, value, slope) case MIXP_UNARY_##op: return value;
#define MIXPI_UNARY_SLOPE(op, value, slope) case MIXP_UNARY_##op: return slope;
/* clang-format off */
template <mixp_unary op> __device__ inline float unary_value(float a, float p, float q) {
    float t;
    switch (op) {
    MIXPI_CUDA_UNARIES(MIXPI_UNARY_VALUE)
    case MIXP_UNARY_COUNT: break;
    }
    return a;
}
/* clang-format on */

/* g: the incoming gradient. */
template <mixp_unary op> __device__ inline float unary_slope(float g, float b, float p, float q) {
    float t;
    switch (op) {
        MIXPI_CUDA_UNARIES(MIXPI_UNARY_SLOPE)
    case MIXP_UNARY_COUNT: break;
    }
    return g;
}
#undef MIXPI_UNARY_VALUE
#undef MIXPI_UNARY_SLOPE

/* NaN if either is NaN: larger propagates b's NaN, and the product with 0 propagates a's. */
__device__ inline float nan_of(float a, float of_both) {
    return fmaf(clamped(a, 1.0f), 0.0f, of_both);
}

/* clang-format off */
template <mixp_binary op> __device__ inline float binary_value(float a, float b) {
    float t;
    switch (op) {
    case MIXP_BINARY_ADD:   return a + b;
    case MIXP_BINARY_SUB:   return a - b;
    case MIXP_BINARY_MUL:   return __fmul_rn(a, b);
    case MIXP_BINARY_DIV:   return a / b;
    case MIXP_BINARY_MAXIMUM: return nan_of(a, larger(a, b));
    case MIXP_BINARY_MINIMUM: return nan_of(a, a < b ? a : b);
    case MIXP_BINARY_SWIGLU:  return a * sigmoid(a, &t) * b;
    case MIXP_BINARY_POWER:
    case MIXP_BINARY_ATAN2:
    case MIXP_BINARY_PRELU: return mixpi_pair_value(op, a, b);
    case MIXP_BINARY_COUNT: break;
    }
    return a;
}
/* clang-format on */

__device__ inline float bce_log(float log) { return larger(MIXPI_BCE_LOG_LEAST, log); }

/* The loss of a difference: quadratic up to delta, then linear. */
__device__ inline float huber(float d, float delta) {
    d = fabsf(d);
    return d < delta ? 0.5f * d * d : delta * (d - 0.5f * delta);
}

template <mixp_loss_kind kind> __device__ inline float loss_value(float a, float b, float delta) {
    switch (kind) {
    case MIXP_LOSS_MSE: return (a - b) * (a - b);
    case MIXP_LOSS_BCE_LOGITS: return fmaf(-a, b, larger(0.0f, a)) + log1pf(expf(-fabsf(a)));
    case MIXP_LOSS_BCE: return -fmaf(b, bce_log(logf(a)), (1.0f - b) * bce_log(log1pf(-a)));
    case MIXP_LOSS_L1: return fabsf(a - b);
    case MIXP_LOSS_HUBER: return huber(a - b, delta);
    case MIXP_LOSS_SMOOTH_L1: return huber(a - b, delta) / delta;
    case MIXP_LOSS_KL: return b * ((fabsf(b) > 0.0f ? logf(b) : b) - a);
    case MIXP_LOSS_KL_LOG: return expf(b) * (b - a);
    case MIXP_LOSS_COUNT: break;
    }
    return a;
}

template <mixp_loss_kind kind>
__device__ inline float loss_slope(float a, float b, float p, float delta) {
    float s, t;
    switch (kind) {
    case MIXP_LOSS_MSE: return 2.0f * (a - b) * p;
    case MIXP_LOSS_BCE_LOGITS: /* (1-t) s - t (1-s): no cancellation        */
        s = sigmoid(a, &t);
        return fmaf(-b, t, (1.0f - b) * s) * p;
    case MIXP_LOSS_BCE: return (a - b) * p / larger(MIXPI_BCE_LEAST, (1.0f - a) * a);
    case MIXP_LOSS_L1: return signed_by(a - b, p);
    case MIXP_LOSS_HUBER: return clamped(a - b, delta) * p;
    case MIXP_LOSS_SMOOTH_L1: return clamped((a - b) / delta, 1.0f) * p;
    case MIXP_LOSS_KL: return -(b * p);
    case MIXP_LOSS_KL_LOG: return -(expf(b) * p);
    case MIXP_LOSS_COUNT: break;
    }
    return a;
}

/* The gradient of x in max(x, y): half of dy if x and y are equal, all of dy if either is NaN. */
__device__ inline float larger_slope(float g, float x, float y) {
    return x < y ? 0.0f : x == y ? 0.5f * g : g;
}

template <int fn> __device__ inline float value(float a, float b, float c, float p, float q) {
    if constexpr (fn < FN_UNARY_D) return unary_value<(mixp_unary)fn>(a, p, q);
    else if constexpr (fn < FN_BINARY)
        return unary_slope<(mixp_unary)(fn - FN_UNARY_D)>(a, b, p, q);
    else if constexpr (fn < FN_DIVISOR_D) return binary_value<(mixp_binary)(fn - FN_BINARY)>(a, b);
    else if constexpr (fn == FN_DIVISOR_D) return -(a * (b / c) / c);
    else if constexpr (fn == FN_LARGER_D) return larger_slope(a, b, c);
    else if constexpr (fn == FN_GATE_D) return silu_slope(a * c, b);
    else if constexpr (fn < FN_WHERE)
        return mixpi_pair_slope(
            (mixp_binary)(MIXP_BINARY_POWER + (fn - FN_PAIR_D) / 2), (fn - FN_PAIR_D) % 2, a, b, c);
    else if constexpr (fn == FN_WHERE) return fabsf(a) > 0.0f ? b : c;
    else if constexpr (fn == FN_KEPT) return fabsf(a) > 0.0f ? b : q;
    else if constexpr (fn == FN_MASKED) return fabsf(a) > 0.0f ? q : b;
    else if constexpr (fn < FN_LOSS_D) return loss_value<(mixp_loss_kind)(fn - FN_LOSS)>(a, b, q);
    else if constexpr (fn < FN_COPY)
        return loss_slope<(mixp_loss_kind)(fn - FN_LOSS_D)>(a, b, p, q);
    else return a;
}

/* --- maps of dense arrays ------------------------------------------------------------------ */

struct Map {
    mixp_out   out;
    mixp_in    a, b;            /* b: data is NULL if fn has one source                      */
    int64_t    n, over;
    float      p, q;
    const float *factor;        /* p is in device memory                                     */
    mixp_in    dloss;           /* p is dloss / `over`                                       */
    bool       wide;
};

const mixp_in nothing_in = { NULL, MIXP_F32 };

inline Map map_of(const mixp_out &out, const mixp_in &a, const mixp_in &b, int64_t n) {
    Map m;
    memset((void *)&m, 0, sizeof m);
    m.out = out;
    m.a = a;
    m.b = b;
    m.n = n;
    m.wide = is_wide(out) && is_wide(a) && is_wide(b);
    return m;
}

/* Only the slopes of losses divide; in other functions a division would cost registers. */
template <int fn> __device__ inline float map_parameter(const Map &m) {
    if constexpr (fn >= FN_LOSS_D && fn < FN_COPY)
        if (m.dloss.data) return get1(m.dloss, 0) / (float)m.over;
    return m.factor ? *m.factor : m.p;
}

/* The minimum of blocks on a multiprocessor. Without it, nvcc saves registers and spills. */
const int map_blocks = 4;

template <int fn>
__global__ void __launch_bounds__(map_threads, map_blocks)
    map_dense(const __grid_constant__ Map m) {
    float p = map_parameter<fn>(m);
    int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * 8;
    for (; i < m.n; i += (int64_t)gridDim.x * blockDim.x * 8) {
        int n = (int)least(8, m.n - i);
        float a[8], b[8];
        get8_any(m.a, i, n, m.wide, a);
        if (m.b.data) get8_any(m.b, i, n, m.wide, b);
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) a[k] = value<fn>(a[k], m.b.data ? b[k] : 0.0f, 0.0f, p, m.q);
        store8(m.out, i, n, m.wide, a);
    }
}

/* --- gelu and silu of low numbers ----------------------------------------------------------- *
 *
 * If all arrays are f16, or all are bf16, a result has 11 or 8 bits. The exponential, the
 * reciprocal and the normal distribution then do not need 24 exact bits: these versions are
 * accurate to 2^-19. The stored result is within one unit in the last place of the exact result,
 * for every input.
 */

/* e^-h 2^32, over the full range of f32: ex2 by itself gives 0 below 2^-126. */
__device__ inline float exp_raised(float h) { return exp2_approx(fmaf(h, -1.44269504f, 32.0f)); }
constexpr float lowered = 2.3283064365386963e-10f;      /* 2^-32 */

/* 1 / (1 + e^-x). *rest: 1 minus the result. */
__device__ inline float quick_sigmoid(float x, float *rest) {
    float e = exp_raised(fabsf(x)) * lowered, q = rcp_approx(1.0f + e), t = e * q;
    *rest = x > 0.0f ? t : q;
    return x > 0.0f ? q : t;
}

/* The normal distribution at -|x|, divided by e^(-x^2/2), as a polynomial of t = 1 / (1 + p |x|).
 * The polynomial has degree 7 and no constant term; its relative error is below 7e-7 up to
 * MIXPI_ERF_BOUND. Its coefficients are weighted least squares, made minimax by Lawson's weights
 * (1961). *raised: e^(-x^2/2) 2^32. */
__device__ inline float quick_normal(float x, float *raised) {
    float t = rcp_approx(fmaf(0.265f, fabsf(x), 1.0f)), q = -0.0677897678f;
    q = fmaf(q, t, 0.19528336f);
    q = fmaf(q, t, -0.0663783597f);
    q = fmaf(q, t, 0.142505199f);
    q = fmaf(q, t, 0.082941714f);
    q = fmaf(q, t, 0.10783779f);
    q = fmaf(q, t, 0.105599753f) * t * lowered;
    *raised = exp_raised(x * x * 0.5f);
    q *= *raised;
    return x < 0.0f ? q : 1.0f - q;
}

__device__ inline float quick_gelu_tanh_slope(float g, float x) {
    x = clamped(x, MIXPI_GELU_BOUND);
    float rest, square = x * x, s = quick_sigmoid(gelu_2u(x, square), &rest);
    return g * fmaf(s * rest * x, fmaf(square, MIXPI_GELU_SLOPE, MIXPI_GELU_LINEAR), s);
}
__device__ inline float quick_gelu_erf_slope(float g, float x) {
    x = clamped(x, MIXPI_ERF_BOUND);
    float raised, normal = quick_normal(x, &raised);
    return g * fmaf(x * (MIXPI_DENSITY * lowered), raised, normal);
}
__device__ inline float quick_silu_slope(float g, float x) {
    x = clamped(x, MIXPI_SILU_BOUND);
    float rest, s = quick_sigmoid(x, &rest);
    return g * fmaf(s * rest, x, s);
}

/* A function of a; a slope takes g, then a. */
template <int fn> __device__ inline float quick_value(float g, float a) {
    float t;
    switch (fn) {
    case FN_UNARY + MIXP_UNARY_GELU_TANH: return g * quick_sigmoid(gelu_2u(g, g * g), &t);
    case FN_UNARY + MIXP_UNARY_GELU_ERF: return g * quick_normal(clamped(g, MIXPI_ERF_BOUND), &t);
    case FN_UNARY + MIXP_UNARY_SILU: return g * quick_sigmoid(g, &t);
    case FN_UNARY_D + MIXP_UNARY_GELU_TANH: return quick_gelu_tanh_slope(g, a);
    case FN_UNARY_D + MIXP_UNARY_GELU_ERF: return quick_gelu_erf_slope(g, a);
    default: return quick_silu_slope(g, a);
    }
}

template <mixp_dtype D> __device__ inline void add_low(const Map &m, int64_t i, int n, float *v) {
    float old[8];
    plain_get<D>(m.out.data, i, n, m.wide, old);
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) v[k] += old[k];
}

template <int fn, mixp_dtype D>
__global__ void __launch_bounds__(map_threads, map_blocks) map_low(const __grid_constant__ Map m) {
    int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * 8;
    for (; i < m.n; i += (int64_t)gridDim.x * blockDim.x * 8) {
        int n = (int)least(8, m.n - i);
        float a[8], b[8];
        plain_get<D>(m.a.data, i, n, m.wide, a);
        if constexpr (fn >= FN_UNARY_D) plain_get<D>(m.b.data, i, n, m.wide, b);
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) a[k] = quick_value<fn>(a[k], fn >= FN_UNARY_D ? b[k] : 0.0f);
        if (m.out.accumulate) add_low<D>(m, i, n, a);
        plain_put<D>(m.out.data, i, n, m.wide, a);
    }
}

struct Dropout {
    mixp_dropout_args k;
    uint64_t        limit;      /* random numbers below it drop the element                  */
    float           scale;
    Draws           draws;
    bool            wide;
};

__global__ void __launch_bounds__(map_threads) dropout_dense(const __grid_constant__ Dropout d) {
    uint64_t key = key_now(d.draws);
    int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * 8;
    for (; i < d.k.n; i += (int64_t)gridDim.x * blockDim.x * 8) {
        int n = (int)least(8, d.k.n - i);
        float a[8];
        get8_any(d.k.a, i, n, d.wide, a);
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) {
            bool kept = mixp_random_at(key, (uint64_t)(i + k)) >= d.limit;
            a[k] = kept ? __fmul_rn(a[k], d.scale) : 0.0f;
        }
        store8(d.k.y, i, n, d.wide, a);
    }
}

struct RandomJob {
    mixp_random_args k;
    Draws draws;
};

__global__ void __launch_bounds__(map_threads)
    random_elements(const __grid_constant__ RandomJob d) {
    uint64_t key = key_now(d.draws);
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i < d.k.n; i += (int64_t)gridDim.x * blockDim.x)
        put1(d.k.y, i, mixpi_random_value(&d.k, key, i));
}

typedef void (*MapKernel)(Map m);
#define MIXPI_UNARY_MAP(op, value, slope) map_dense<FN_UNARY + MIXP_UNARY_##op>,
#define MIXPI_SLOPE_MAP(op, value, slope) map_dense<FN_UNARY_D + MIXP_UNARY_##op>,
#define MIXPI_LOSS_MAP(kind) map_dense<FN_LOSS_D + MIXP_LOSS_##kind>,
const MapKernel unary_maps[] = { MIXPI_CUDA_UNARIES(MIXPI_UNARY_MAP) };
const MapKernel slope_maps[] = { MIXPI_CUDA_UNARIES(MIXPI_SLOPE_MAP) };
const MapKernel loss_slope_maps[] = { MIXPI_CUDA_LOSSES(MIXPI_LOSS_MAP) };
#undef MIXPI_UNARY_MAP
#undef MIXPI_SLOPE_MAP
#undef MIXPI_LOSS_MAP

/* The kernel for arrays that all have the same low dtype, or NULL. */
template <mixp_dtype D> inline MapKernel low_map(int fn) {
    switch (fn) {
#define MIXPI_LOW(f)                                                                               \
  case f: return map_low<f, D>;
        MIXPI_LOW(FN_UNARY + MIXP_UNARY_GELU_TANH)
        MIXPI_LOW(FN_UNARY + MIXP_UNARY_GELU_ERF)
        MIXPI_LOW(FN_UNARY + MIXP_UNARY_SILU)
        MIXPI_LOW(FN_UNARY_D + MIXP_UNARY_GELU_TANH)
        MIXPI_LOW(FN_UNARY_D + MIXP_UNARY_GELU_ERF)
        MIXPI_LOW(FN_UNARY_D + MIXP_UNARY_SILU)
#undef MIXPI_LOW
    default: return NULL;
    }
}
inline MapKernel map_kernel(int fn, MapKernel any, const Map &m) {
    mixp_dtype d = m.out.dtype;
    MapKernel low = NULL;
    if (m.a.dtype != d || (m.b.data && m.b.dtype != d)) return any;
    if (d == MIXP_F16) low = low_map<MIXP_F16>(fn);
    if (d == MIXP_BF16) low = low_map<MIXP_BF16>(fn);
    return low ? low : any;
}

inline unsigned map_grid(int64_t n) { return grid_for(ceil_div(n, 8), map_threads); }

/* The checks that all maps share, then the launch. */
inline mixp_result run_map(Kernel *k, const char *what, MapKernel kernel, const Map &m) {
    if (!is_real(m.out.dtype) || !is_real(m.a.dtype) || !is_real(m.b.dtype)) return MIXP_ERR_DTYPE;
    if (!k->state) return MIXP_ERR_ORDER;
    if (m.n <= 0) return m.n ? MIXP_ERR_ARGUMENT : MIXP_OK;
    if (!m.out.data || !m.a.data) return MIXP_ERR_ARGUMENT;
    return k->report(what, MIXPI_LAUNCH(kernel, map_grid(m.n), map_threads, 0, k->stream, m));
}

}   /* namespace */

static mixp_result mixpi_cuda_unary(const mixp_exec *x, const mixp_unary_args *k) {
    Kernel kernel(x);
    Map m = map_of(k->y, k->a, nothing_in, k->n);
    if ((unsigned)k->op >= MIXP_UNARY_COUNT) return MIXP_ERR_ARGUMENT;
    m.p = k->p;
    m.q = k->q;
    return run_map(&kernel, "unary", map_kernel(FN_UNARY + k->op, unary_maps[k->op], m), m);
}

static mixp_result mixpi_cuda_unary_backward(
    const mixp_exec *x, const mixp_unary_backward_args *k) {
    Kernel kernel(x);
    const bool alone = mixpi_slope_is_factor(k->op) != 0;
    const mixp_in &source = alone ? nothing_in : mixpi_slope_reads_result(k->op) ? k->y : k->a;
    if ((unsigned)k->op >= MIXP_UNARY_COUNT) return MIXP_ERR_ARGUMENT;
    if (k->n > 0 && !alone && !source.data) return MIXP_ERR_ARGUMENT;

    Map m = map_of(k->da, k->dy, source, k->n);
    m.p = k->p;
    m.q = k->q;
    return run_map(
        &kernel, "unary_backward", map_kernel(FN_UNARY_D + k->op, slope_maps[k->op], m), m);
}

/* Records whether a loss is Inf or NaN; one warp, because the loss is one element. */
static __global__ void note_bad(const mixp_in a, int64_t n, int32_t *bad) {
    for (int64_t i = (int64_t)threadIdx.x; i < n; i += warp_size) {
        float v[8];
        get8_any(a, i, 1, false, v);
        if ((mixp_bits_of_f32(v[0]) & 0x7FFFFFFFu) >= 0x7F800000u) *bad = 1;
    }
}

static mixp_result mixpi_cuda_scale_by(const mixp_exec *x, const mixp_scale_by_args *k) {
    Kernel kernel(x);
    if (!k->factor) return MIXP_ERR_ARGUMENT;

    /* Note whether the loss is Inf or NaN before y may overwrite it. */
    mixp_result r = MIXP_OK;
    if (k->bad && k->a.data && kernel.state && is_real(k->a.dtype))
        r = kernel.report(
            "scale_by", MIXPI_LAUNCH(note_bad, 1, warp_size, 0, kernel.stream, k->a, k->n, k->bad));
    if (r != MIXP_OK) return r;

    Map m = map_of(k->y, k->a, nothing_in, k->n);
    m.factor = k->factor;
    return run_map(&kernel, "scale_by", unary_maps[MIXP_UNARY_SCALE], m);
}

static mixp_result mixpi_cuda_dropout(const mixp_exec *x, const mixp_dropout_args *k) {
    Kernel kernel(x);
    if (!(k->p >= 0.0f && k->p <= 1.0f)) return MIXP_ERR_ARGUMENT;
    if (!is_real(k->y.dtype) || !is_real(k->a.dtype)) return MIXP_ERR_DTYPE;
    if (!kernel.state) return MIXP_ERR_ORDER;
    if (k->n <= 0) return k->n ? MIXP_ERR_ARGUMENT : MIXP_OK;
    if (!k->y.data || !k->a.data) return MIXP_ERR_ARGUMENT;

    /* Drop an element whose random number is below p 2^32; scale the others by 1 / (1 - p). */
    Dropout d;
    memset((void *)&d, 0, sizeof d);
    d.k = *k;
    d.limit = (uint64_t)ceil((double)k->p * 4294967296.0);
    d.scale = k->p < 1.0f ? (float)(1.0 / (1.0 - (double)k->p)) : 0.0f;
    d.draws = draws_of(kernel.state, k->seed, k->step, k->tensor);
    d.wide = is_wide(k->y) && is_wide(k->a);
    return kernel.report(
        "dropout", MIXPI_LAUNCH(dropout_dense, map_grid(k->n), map_threads, 0, kernel.stream, d));
}

static mixp_result mixpi_cuda_random(const mixp_exec *x, const mixp_random_args *k) {
    Kernel on(x);
    if ((unsigned)k->kind >= MIXP_RANDOM_COUNT || k->y.accumulate || k->n < 0)
        return MIXP_ERR_ARGUMENT;
    if (k->kind == MIXP_RANDOM_BERNOULLI && !(k->at >= 0.0f && k->at <= 1.0f))
        return MIXP_ERR_ARGUMENT;
    if (!is_real(k->y.dtype)) return MIXP_ERR_DTYPE;
    if (!on.state) return MIXP_ERR_ORDER;
    if (!k->n) return MIXP_OK;

    RandomJob job;
    memset((void *)&job, 0, sizeof job);
    job.k = *k;
    job.draws = draws_of(on.state, k->seed, k->step, k->tensor);
    return on.report("random",
        MIXPI_LAUNCH(random_elements, grid_for(k->n, map_threads), map_threads, 0, on.stream, job));
}

static mixp_result mixpi_cuda_loss_backward(const mixp_exec *x, const mixp_loss_backward_args *k) {
    Kernel on(x);
    Map m = map_of(k->da, k->a, k->target, k->n);
    if ((unsigned)k->kind >= MIXP_LOSS_COUNT) return MIXP_ERR_ARGUMENT;
    if (!is_real(k->dloss.dtype)) return MIXP_ERR_DTYPE;
    if (k->n > 0 && (!k->dloss.data || !k->target.data)) return MIXP_ERR_ARGUMENT;
    m.dloss = k->dloss;
    m.over = k->over ? k->over : k->n;
    m.q = k->delta;
    return run_map(&on, "loss_backward", loss_slope_maps[k->kind], m);
}
/* --- maps and sums with strides ------------------------------------------------------------ */

namespace {

struct Strided {
    mixp_out   y;
    mixp_in    a[4];            /* y as an input, then the sources; data NULL: absent        */
    Axes       kept, summed;    /* summed: the axes along which the output repeats           */
    int64_t    outputs, rows;   /* products of the sizes of kept and of summed               */
    int64_t    run, runs;       /* rows of a run, runs of a sum; runs > 1: the sums go to
                                   partial[run][output]                                      */
    int64_t    groups;          /* groups of 1 or 8 outputs that one run computes at once    */
    uint64_t   per_group;       /* the inverse of groups                                     */
    float     *partial;
    float      p;               /* the factor of a sum, or the function's parameter          */
    float      q;               /* the parameter of a loss or of where                       */
    int        width;           /* 8 or 1 elements at a time                                 */
};

/* Reads a source's next `width` elements. step: their distance. */
__device__ inline void read_source(
    const mixp_in &a, int64_t at, int64_t step, int width, float *v) {
    if (!a.data) return;
    if (width == 8 && step == 1) {
        get8(a, at, v);
        return;
    }
    v[0] = get1(a, at);
    MIXPI_UNROLL
    for (int k = 1; k < 8; k++) v[k] = v[0];
}

/* The function of the elements at at[]. axes: the walk goes along the last of them. */
template <int fn>
__device__ inline void values_at(const Strided &m, const Axes &axes, const int64_t *at, float *v) {
    /* Read the sources that fn has. */
    const int last = axes.rank - 1;
    float b[8] = { 0, 0, 0, 0, 0, 0, 0, 0 }, c[8] = { 0, 0, 0, 0, 0, 0, 0, 0 };
    read_source(m.a[1], at[1], last < 0 ? 0 : axes.s[1][last], m.width, v);
    if (fn != FN_COPY && fn != FN_UNARY + MIXP_UNARY_SCALE)
        read_source(m.a[2], at[2], last < 0 ? 0 : axes.s[2][last], m.width, b);
    if (fn >= FN_DIVISOR_D && fn <= FN_WHERE)
        read_source(m.a[3], at[3], last < 0 ? 0 : axes.s[3][last], m.width, c);

    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) v[k] = value<fn>(v[k], b[k], c[k], m.p, m.q);
}

/* No sum: out (+)= fn(...). */
template <int fn>
__global__ void __launch_bounds__(map_threads) map_strided(const __grid_constant__ Strided m) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i < m.groups; i += (int64_t)gridDim.x * blockDim.x) {
        int64_t at[4] = { 0, 0, 0, 0 };
        float v[8];
        locate(m.kept, i * m.width, at);
        values_at<fn>(m, m.kept, at, v);
        store8(m.y, at[0], m.width, m.width == 8, v);
    }
}

/* A sum of two dense arrays whose dtypes the compiler knows. */
template <mixp_dtype A, mixp_dtype B, mixp_dtype Y>
__global__ void __launch_bounds__(map_threads, map_blocks)
    add_dense(const __grid_constant__ Strided m) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i < m.groups; i += (int64_t)gridDim.x * blockDim.x) {
        float a[8], b[8];
        plain_get8<A>(m.a[1].data, i * 8, a);
        plain_get8<B>(m.a[2].data, i * 8, b);
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) a[k] += b[k];
        plain_put8<Y>(m.y.data, i * 8, a);
    }
}

/* Stores a run's sums of `width` outputs from `output` on, which are at `at` in the result. */
__device__ inline void store_run(
    const Strided &m, int64_t run, int64_t output, int64_t at, float *v) {
    if (m.runs > 1) {
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++)
            if (k < m.width) m.partial[run * m.outputs + output + k] = v[k];
        return;
    }
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) v[k] *= m.p;
    store8(m.y, at, m.width, m.width == 8, v);
}

/* Each thread adds one run of rows for 8 outputs, or one. */
template <int fn>
__global__ void __launch_bounds__(map_threads) sum_columns(const __grid_constant__ Strided m) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i < m.groups * m.runs; i += (int64_t)gridDim.x * blockDim.x) {
        /* Find the run and its outputs. */
        const int64_t run = over(i, m.groups, m.per_group);
        const int64_t output = (i - run * m.groups) * m.width;
        const int64_t end = least((run + 1) * m.run, m.rows);
        int64_t base[4] = { 0, 0, 0, 0 };
        locate(m.kept, output, base);

        /* Add the run's rows in order. */
        float sum[8] = { 0, 0, 0, 0, 0, 0, 0, 0 }, v[8];
        for (int64_t r = run * m.run; r < end; r++) {
            int64_t at[4] = { base[0], base[1], base[2], base[3] };
            locate(m.summed, r, at);
            values_at<fn>(m, m.kept, at, v);
            MIXPI_UNROLL
            for (int k = 0; k < 8; k++) sum[k] += v[k];
        }
        store_run(m, run, output, base[0], sum);
    }
}

/* Adds rows of a dense array: loads 8 rows at a time and adds them in a tree. */
template <mixp_dtype D>
__device__ inline void add_rows(const Strided &m, int64_t at, int rows, float *sum) {
    int64_t step = m.summed.s[1][0];
    float v[8][8];
    MIXPI_UNROLL
    for (int r = 0; r < 8; r++) {
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) v[r][k] = 0.0f;
        if (r < rows) plain_get8<D>(m.a[1].data, at + r * step, v[r]);
    }
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++)
        sum[k] += ((v[0][k] + v[1][k]) + (v[2][k] + v[3][k])) +
                  ((v[4][k] + v[5][k]) + (v[6][k] + v[7][k]));
}
template <mixp_dtype D>
__global__ void __launch_bounds__(map_threads, 2)
    sum_dense_columns(const __grid_constant__ Strided m) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i < m.groups * m.runs; i += (int64_t)gridDim.x * blockDim.x) {
        int64_t run = over(i, m.groups, m.per_group), output = (i - run * m.groups) * 8;
        int64_t r = run * m.run, end = least(r + m.run, m.rows), step = m.summed.s[1][0];
        float sum[8] = { 0, 0, 0, 0, 0, 0, 0, 0 };
        for (; r + 8 <= end; r += 8) add_rows<D>(m, r * step + output, 8, sum);
        if (r < end) add_rows<D>(m, r * step + output, (int)(end - r), sum);
        store_run(m, run, output, output, sum);
    }
}

/* Each block adds one run of one output; `width` is along the summed axis. */
template <int fn>
__global__ void __launch_bounds__(map_threads) sum_rows(const __grid_constant__ Strided m) {
    for (int64_t i = blockIdx.x; i < m.groups * m.runs; i += gridDim.x) {
        /* Find the run and its output. */
        const int64_t run = over(i, m.groups, m.per_group), output = i - run * m.groups;
        const int64_t end = least((run + 1) * m.run, m.rows);
        int64_t r = run * m.run + threadIdx.x * m.width;
        int64_t base[4] = { 0, 0, 0, 0 };
        locate(m.kept, output, base);

        /* Add the thread's elements, 8 of them in a tree, then the threads' sums. */
        float sum = 0.0f, v[8];
        for (; r < end; r += (int64_t)blockDim.x * m.width) {
            int64_t at[4] = { base[0], base[1], base[2], base[3] };
            locate(m.summed, r, at);
            values_at<fn>(m, m.summed, at, v);
            sum += m.width == 8 ? ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]))
                                : v[0];
        }
        sum = block_sum(sum);

        /* Store the run's sum. */
        if (threadIdx.x) continue;
        if (m.runs > 1) m.partial[run * m.outputs + output] = sum;
        else store_real(m.y, base[0], sum * m.p);
    }
}

/* Adds the runs of each output, with one thread per output, or one block if outputs are few. */
__global__ void __launch_bounds__(map_threads)
    sum_runs(const __grid_constant__ Strided m, bool by_block) {
    int64_t step = by_block ? blockDim.x : 1, first = by_block ? threadIdx.x : 0;
    int64_t o = by_block ? blockIdx.x : (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (; o < m.outputs; o += by_block ? gridDim.x : (int64_t)gridDim.x * blockDim.x) {
        int64_t at[4] = { 0, 0, 0, 0 };
        double sum = 0.0;
        for (int64_t r = first; r < m.runs; r += step) sum += (double)m.partial[r * m.outputs + o];
        if (by_block) sum = block_sum(sum);
        if (first) continue;
        locate(m.kept, o, at);
        store_real(m.y, at[0], (float)(sum * (double)m.p));
    }
}

/* sum_runs for many runs and many outputs: 32 sums for each output, then these sums in order. */
const int sums_each = 32;

__global__ void __launch_bounds__(warp_size *sums_each)
    sum_many_runs(const __grid_constant__ Strided m) {
    MIXPI_SHARED(double, part, sums_each *(warp_size + 1));
    const int lane = (int)threadIdx.x % warp_size, own = (int)threadIdx.x / warp_size;

    /* Add every 32nd run of the output. */
    const int64_t o = (int64_t)blockIdx.x * warp_size + lane;
    double sum = 0.0;
    for (int64_t r = own; r < m.runs && o < m.outputs; r += sums_each)
        sum += (double)m.partial[r * m.outputs + o];
    part[own * (warp_size + 1) + lane] = sum;
    __syncthreads();

    /* Add the output's 32 sums in order. */
    if (own || o >= m.outputs) return;
    for (int i = 1; i < sums_each; i++) sum += part[i * (warp_size + 1) + lane];
    int64_t at[4] = { 0, 0, 0, 0 };
    locate(m.kept, o, at);
    store_real(m.y, at[0], (float)(sum * (double)m.p));
}

typedef void (*StridedKernel)(Strided m);
struct Strided3 { StridedKernel map, columns, rows; };

/* The kernels of fn that are in use. */
/* clang-format off */
inline Strided3 strided_kernels(int fn) {
    Strided3 s = { NULL, NULL, NULL };
    switch (fn) {
    /* The kernels of a function: a map, sums of rows, sums of rows and columns, or nothing. */
#define MIXPI_MAP(f)  s.map = map_strided<f>;
#define MIXPI_ROWS(f) s.rows = sum_rows<f>;
#define MIXPI_SUM(f)  s.columns = sum_columns<f>; s.rows = sum_rows<f>;
#define MIXPI_CASE(f, a, b) case f: a(f) b(f) break;
#define MIXPI_NONE(f)

    /* Sums, and what computes the gradients of binary functions. */
    MIXPI_CASE(FN_COPY, MIXPI_NONE, MIXPI_SUM)
    MIXPI_CASE(FN_UNARY + MIXP_UNARY_SCALE, MIXPI_MAP, MIXPI_NONE)
    MIXPI_CASE(FN_BINARY + MIXP_BINARY_ADD, MIXPI_MAP, MIXPI_NONE)
    MIXPI_CASE(FN_BINARY + MIXP_BINARY_SUB, MIXPI_MAP, MIXPI_NONE)
    MIXPI_CASE(FN_BINARY + MIXP_BINARY_MUL, MIXPI_MAP, MIXPI_SUM)
    MIXPI_CASE(FN_BINARY + MIXP_BINARY_DIV, MIXPI_MAP, MIXPI_SUM)
    MIXPI_CASE(FN_BINARY + MIXP_BINARY_MAXIMUM, MIXPI_MAP, MIXPI_NONE)
    MIXPI_CASE(FN_BINARY + MIXP_BINARY_MINIMUM, MIXPI_MAP, MIXPI_NONE)
    MIXPI_CASE(FN_BINARY + MIXP_BINARY_SWIGLU, MIXPI_MAP, MIXPI_SUM)
    MIXPI_CASE(FN_BINARY + MIXP_BINARY_POWER, MIXPI_MAP, MIXPI_NONE)
    MIXPI_CASE(FN_BINARY + MIXP_BINARY_ATAN2, MIXPI_MAP, MIXPI_NONE)
    MIXPI_CASE(FN_BINARY + MIXP_BINARY_PRELU, MIXPI_MAP, MIXPI_NONE)
    MIXPI_CASE(FN_PAIR_D, MIXPI_MAP, MIXPI_SUM)
    MIXPI_CASE(FN_PAIR_D + 1, MIXPI_MAP, MIXPI_SUM)
    MIXPI_CASE(FN_PAIR_D + 2, MIXPI_MAP, MIXPI_SUM)
    MIXPI_CASE(FN_PAIR_D + 3, MIXPI_MAP, MIXPI_SUM)
    MIXPI_CASE(FN_PAIR_D + 4, MIXPI_MAP, MIXPI_SUM)
    MIXPI_CASE(FN_PAIR_D + 5, MIXPI_MAP, MIXPI_SUM)
    MIXPI_CASE(FN_DIVISOR_D, MIXPI_MAP, MIXPI_SUM)
    MIXPI_CASE(FN_LARGER_D, MIXPI_MAP, MIXPI_SUM)
    MIXPI_CASE(FN_GATE_D, MIXPI_MAP, MIXPI_SUM)

    /* where, and its gradients. */
    MIXPI_CASE(FN_WHERE, MIXPI_MAP, MIXPI_NONE)
    MIXPI_CASE(FN_KEPT, MIXPI_MAP, MIXPI_SUM)
    MIXPI_CASE(FN_MASKED, MIXPI_MAP, MIXPI_SUM)

    /* Losses, each or summed. */
    MIXPI_CASE(FN_LOSS + MIXP_LOSS_MSE, MIXPI_MAP, MIXPI_ROWS)
    MIXPI_CASE(FN_LOSS + MIXP_LOSS_BCE_LOGITS, MIXPI_MAP, MIXPI_ROWS)
    MIXPI_CASE(FN_LOSS + MIXP_LOSS_BCE, MIXPI_MAP, MIXPI_ROWS)
    MIXPI_CASE(FN_LOSS + MIXP_LOSS_L1, MIXPI_MAP, MIXPI_ROWS)
    MIXPI_CASE(FN_LOSS + MIXP_LOSS_HUBER, MIXPI_MAP, MIXPI_ROWS)
    MIXPI_CASE(FN_LOSS + MIXP_LOSS_SMOOTH_L1, MIXPI_MAP, MIXPI_ROWS)
    MIXPI_CASE(FN_LOSS + MIXP_LOSS_KL, MIXPI_MAP, MIXPI_ROWS)
    MIXPI_CASE(FN_LOSS + MIXP_LOSS_KL_LOG, MIXPI_MAP, MIXPI_ROWS)
#undef MIXPI_MAP
#undef MIXPI_ROWS
#undef MIXPI_SUM
#undef MIXPI_CASE
#undef MIXPI_NONE
    default: break;
    }
    return s;
}
/* clang-format on */

/* Splits the merged axes by whether the output repeats along them. */
inline void split_axes(Strided *m, const Axes &x, bool sums) {
    for (int i = 0; i < x.rank; i++) append(sums && x.s[0][i] == 0 ? &m->summed : &m->kept, x, i);
    m->outputs = count_of(m->kept);
    m->rows = count_of(m->summed);
}

/* Can the last axis of `walked` be read 8 elements at a time? `fixed`: the other axes. */
inline bool is_by_eight(const Strided &m, const Axes &walked, const Axes &fixed, int first) {
    const int last = walked.rank - 1;
    if (last < 0 || walked.n[last] % 8) return false;
    for (int k = first; k < 4; k++) {
        /* An absent source, or one that repeats along the axis, is not read 8 at a time. */
        if (!m.a[k].data) continue;
        if (walked.s[k][last] == 0 && k > 0) continue;

        /* Elements are neighbours, and each group of 8 begins at a multiple of 8. */
        if (walked.s[k][last] != 1 || !is_wide(m.a[k])) return false;
        for (int i = 0; i < last; i++)
            if (walked.s[k][i] % 8) return false;
        for (int i = 0; i < fixed.rank; i++)
            if (fixed.s[k][i] % 8) return false;
    }
    return true;
}

template <mixp_dtype A, mixp_dtype Y> inline StridedKernel dense_sum(mixp_dtype b) {
    return b == MIXP_F32   ? add_dense<A, MIXP_F32, Y>
           : b == MIXP_F16 ? add_dense<A, MIXP_F16, Y>
                           : add_dense<A, MIXP_BF16, Y>;
}
/* add_dense if it applies, otherwise NULL. It applies to dense arrays: all of one low dtype, or the
 * first f32. */
inline StridedKernel dense_sum_of(int fn, const Strided &m) {
    mixp_dtype a = m.a[1].dtype, b = m.a[2].dtype, y = m.y.dtype;
    if (fn != FN_BINARY + MIXP_BINARY_ADD || m.width != 8 || m.kept.rank != 1) return NULL;
    if (m.y.accumulate || !m.a[2].data) return NULL;
    for (int k = 0; k < 3; k++)
        if (m.kept.s[k][0] != 1) return NULL;
    if (a == MIXP_F32 && y == a) return dense_sum<MIXP_F32, MIXP_F32>(b);
    if (a != b || y != a) return NULL;
    return a == MIXP_F16 ? add_dense<MIXP_F16, MIXP_F16, MIXP_F16>
                         : add_dense<MIXP_BF16, MIXP_BF16, MIXP_BF16>;
}

inline mixp_result run_strided_map(Kernel *k, const char *what, int fn, Strided *m) {
    Axes none;
    none.rank = 0;
    m->width = is_by_eight(*m, m->kept, none, 0) ? 8 : 1;
    m->groups = m->outputs / m->width;
    StridedKernel dense = dense_sum_of(fn, *m);
    return k->report(what, MIXPI_LAUNCH(dense ? dense : strided_kernels(fn).map,
                               grid_for(m->groups, map_threads), map_threads, 0, k->stream, *m));
}

/* The variant of sum_dense_columns that applies; NULL: none. */
inline StridedKernel dense_columns(int fn, const Strided &m) {
    if (fn != FN_COPY || m.width != 8 || m.kept.rank != 1 || m.summed.rank != 1) return NULL;
    return m.a[1].dtype == MIXP_F32   ? sum_dense_columns<MIXP_F32>
           : m.a[1].dtype == MIXP_F16 ? sum_dense_columns<MIXP_F16>
                                      : sum_dense_columns<MIXP_BF16>;
}

inline mixp_result add_runs(Kernel *k, const char *what, const Strided &m) {
    bool many = m.outputs >= warp_size && m.runs > 32;
    bool by_block = m.outputs < 1024 && m.runs > 32;
    unsigned grid = grid_for(m.outputs, by_block ? 1 : map_threads);
    if (many)
        return k->report(what, MIXPI_LAUNCH(sum_many_runs, (unsigned)ceil_div(m.outputs, warp_size),
                                   warp_size * sums_each, 0, k->stream, m));
    return k->report(what, MIXPI_LAUNCH(sum_runs, grid, map_threads, 0, k->stream, m, by_block));
}

/* A block sums a long row; a thread sums a short row, or one of several adjacent outputs. */
inline mixp_result run_sum(const mixp_exec *x, Kernel *k, const char *what, int fn, Strided *m) {
    /* Choose columns for many adjacent outputs, or for several short rows: not for a loss. */
    const int last = m->kept.rank - 1;
    const bool beside = last >= 0 && m->kept.n[last] >= 32 && m->kept.s[1][last] == 1;
    const bool columns = beside || (m->rows < 64 && m->outputs > 1);
    const bool wide =
        columns ? is_by_eight(*m, m->kept, m->summed, 0) : is_by_eight(*m, m->summed, m->kept, 1);
    m->width = wide ? 8 : 1;
    const StridedKernel dense = columns ? dense_columns(fn, *m) : NULL;

    /* Cut the rows into runs. */
    const int64_t shortest = columns ? 64 : 8192;
    m->run = m->rows <= shortest ? shortest : 8 * ceil_div(m->rows, dense ? 4096 : 16384);
    if (m->run < shortest) m->run = shortest;
    m->runs = m->rows ? ceil_div(m->rows, m->run) : 1;
    m->groups = columns ? m->outputs / m->width : m->outputs;
    m->per_group = inverse_of(m->groups);
    if (m->runs > 1) {
        m->partial = (float *)scratch_of(x, (size_t)(m->runs * m->outputs) * sizeof(float));
        if (!m->partial) return MIXP_ERR_MEMORY;
    }

    /* Sum each run, by a thread for columns or by a block for rows; then add the runs. */
    const int threads = columns || m->rows > 1024 ? map_threads : 32;
    const StridedKernel kernel = dense     ? dense
                                 : columns ? strided_kernels(fn).columns
                                           : strided_kernels(fn).rows;
    const unsigned grid = grid_for(m->groups * m->runs, columns ? threads : 1);
    mixp_result r =
        k->report(what, MIXPI_LAUNCH(kernel, grid, (unsigned)threads, 0, k->stream, *m));
    return r != MIXP_OK || m->runs == 1 ? r : add_runs(k, what, *m);
}

/* out (+)= fn over the axes; or p times the sum over those along which the output repeats. */
inline mixp_result run_strided(
    const mixp_exec *x, const char *what, int fn, const Axes &axes, Strided *m, bool sums) {
    Kernel k(x);
    for (int i = 0; i < 4; i++)
        if (!is_real(m->a[i].dtype)) return MIXP_ERR_DTYPE;
    if (!k.state) return MIXP_ERR_ORDER;
    split_axes(m, merge_axes(axes), sums);
    if (m->outputs == 0) return MIXP_OK;
    if (!m->y.data || (m->rows && !m->a[1].data)) return MIXP_ERR_ARGUMENT;
    return sums ? run_sum(x, &k, what, fn, m) : run_strided_map(&k, what, fn, m);
}

/* A Strided with an output and no sources. */
inline Strided strided_of(const mixp_out &y, float p) {
    Strided m;
    memset((void *)&m, 0, sizeof m);
    for (int i = 0; i < 4; i++) m.a[i] = nothing_in;
    m.y = y;
    m.a[0] = as_in(y);
    m.p = p;
    return m;
}

inline void set_strides(Axes *axes, int k, const int64_t *strides) {
    for (int i = 0; i < axes->rank; i++) axes->s[k][i] = strides[i];
}

/* Gives absent arrays the output's strides, so that they do not keep axes from merging. */
inline void follow(Axes *axes, const Strided &m) {
    for (int k = 1; k < 4; k++)
        if (!m.a[k].data) memcpy(axes->s[k], axes->s[0], sizeof axes->s[0]);
}

}   /* namespace */

static mixp_result mixpi_cuda_binary(const mixp_exec *x, const mixp_binary_args *k) {
    Strided m = strided_of(k->y, 0.0f);
    if ((unsigned)k->op >= MIXP_BINARY_COUNT || k->rank < 0 || k->rank > MIXP_MAX_RANK)
        return MIXP_ERR_ARGUMENT;
    if (!k->a.data || !k->b.data) return MIXP_ERR_ARGUMENT;
    Axes axes = dense_axes(k->rank, k->shape);
    m.a[1] = k->a;
    m.a[2] = k->b;
    set_strides(&axes, 1, k->a_strides);
    set_strides(&axes, 2, k->b_strides);
    follow(&axes, m);
    return run_strided(x, "binary", FN_BINARY + k->op, axes, &m, false);
}

namespace {

/* The function that computes an operand's gradient: dy or -dy for a sum; dy times the other factor
 * for a product; dy / b or FN_DIVISOR_D for a quotient. */
inline int binary_slope(const mixp_binary_args *k, bool sums) {
    switch (k->op) {
    case MIXP_BINARY_ADD:
    case MIXP_BINARY_SUB: return sums ? FN_COPY : FN_UNARY + MIXP_UNARY_SCALE;
    case MIXP_BINARY_MUL: return FN_BINARY + MIXP_BINARY_MUL;
    case MIXP_BINARY_DIV: return k->which ? FN_DIVISOR_D : FN_BINARY + MIXP_BINARY_DIV;
    case MIXP_BINARY_MAXIMUM:
    case MIXP_BINARY_MINIMUM: return FN_LARGER_D;
    case MIXP_BINARY_POWER:
    case MIXP_BINARY_ATAN2:
    case MIXP_BINARY_PRELU: return FN_PAIR_D + 2 * ((int)k->op - (int)MIXP_BINARY_POWER) + k->which;
    case MIXP_BINARY_SWIGLU: break;
    case MIXP_BINARY_COUNT: break;
    }
    return k->which ? FN_BINARY + MIXP_BINARY_SWIGLU : FN_GATE_D;
}

/* Adds the next source of the gradient. strides NULL: dense, as the axes. */
inline bool add_source(
    Strided *m, Axes *axes, int source, const mixp_in &a, const int64_t *strides) {
    m->a[source] = a;
    if (strides) set_strides(axes, source, strides);
    return a.data != NULL;
}

/* Adds the sources that the gradient needs. Returns false if an operand is absent. */
inline bool add_sources(Strided *m, Axes *axes, const mixp_binary_args *k) {
    const char *of = mixpi_binary_slope_of(k);
    bool there = true;
    for (int i = 0; of[i]; i++) {
        if (of[i] == 'd') add_source(m, axes, i + 1, k->dy, NULL);
        if (of[i] == 'a') there = add_source(m, axes, i + 1, k->a, k->a_strides) && there;
        if (of[i] == 'b') there = add_source(m, axes, i + 1, k->b, k->b_strides) && there;
    }
    return there;
}

}   /* namespace */

static mixp_result mixpi_cuda_binary_backward(const mixp_exec *x, const mixp_binary_args *k) {
    if ((unsigned)k->op >= MIXP_BINARY_COUNT || k->rank < 0 || k->rank > MIXP_MAX_RANK)
        return MIXP_ERR_ARGUMENT;

    /* The gradient sums along the axes that the operand repeats along. */
    const int64_t *own = k->which ? k->b_strides : k->a_strides;
    bool sums = false;
    Axes axes = dense_axes(k->rank, k->shape);
    set_strides(&axes, 0, own);
    for (int i = 0; i < k->rank; i++) sums = sums || (own[i] == 0 && k->shape[i] != 1);

    Strided m = strided_of(k->dx, k->which && k->op == MIXP_BINARY_SUB ? -1.0f : 1.0f);
    if (!add_sources(&m, &axes, k)) return MIXP_ERR_ARGUMENT;
    follow(&axes, m);
    return run_strided(x, "binary_backward", binary_slope(k, sums), axes, &m, sums);
}

static mixp_result mixpi_cuda_where(const mixp_exec *x, const mixp_where_args *k) {
    Strided m = strided_of(k->y, 0.0f);
    int fn = k->a.data ? k->b.data ? FN_WHERE : FN_KEPT : FN_MASKED;
    if (k->rank < 0 || k->rank > MIXP_MAX_RANK || !k->mask.data || !(k->a.data || k->b.data))
        return MIXP_ERR_ARGUMENT;
    Axes axes = dense_axes(k->rank, k->shape);
    add_source(&m, &axes, 1, k->mask, k->mask_strides);
    if (k->a.data) add_source(&m, &axes, 2, k->a, k->a_strides);
    if (k->b.data) add_source(&m, &axes, k->a.data ? 3 : 2, k->b, k->b_strides);
    m.q = k->value;
    follow(&axes, m);
    return run_strided(x, "where", fn, axes, &m, false);
}

static mixp_result mixpi_cuda_where_backward(const mixp_exec *x, const mixp_where_args *k) {
    if (k->rank < 0 || k->rank > MIXP_MAX_RANK || !k->mask.data || !k->dy.data)
        return MIXP_ERR_ARGUMENT;

    /* The gradient sums along the axes that the operand repeats along. */
    const int64_t *own = k->which ? k->b_strides : k->a_strides;
    bool sums = false;
    Axes axes = dense_axes(k->rank, k->shape);
    set_strides(&axes, 0, own);
    for (int i = 0; i < k->rank; i++) sums = sums || (own[i] == 0 && k->shape[i] != 1);

    Strided m = strided_of(k->dx, 1.0f);
    add_source(&m, &axes, 1, k->mask, k->mask_strides);
    add_source(&m, &axes, 2, k->dy, NULL);
    follow(&axes, m);
    return run_strided(x, "where_backward", k->which ? FN_MASKED : FN_KEPT, axes, &m, sums);
}

/* --- comparisons ------------------------------------------------------------------- */

namespace {

/* Array 0 of the axes: y, 1: a, 2: b. */
struct CompareJob {
    mixp_comparison how;
    Axes     axes;
    int64_t  count;
    mixp_in  a, b;
    uint8_t *y;
};

/* Element i of a real array, of u8 or of i32, exactly. */
__device__ inline double exact1(const mixp_in &a, int64_t i) {
    if (a.dtype == MIXP_I32) return (double)((const int32_t *)a.data)[i];
    if (a.dtype == MIXP_U8) return (double)((const uint8_t *)a.data)[i];
    return (double)get1(a, i);
}

/* One thread per element of y. */
__global__ void __launch_bounds__(map_threads)
    compare_elements(const __grid_constant__ CompareJob s) {
    int64_t i = (int64_t)blockIdx.x * map_threads + threadIdx.x;
    for (; i < s.count; i += (int64_t)gridDim.x * map_threads) {
        int64_t at[4] = { 0, 0, 0, 0 };
        locate(s.axes, i, at);
        s.y[i] = (uint8_t)mixpi_holds(s.how, exact1(s.a, at[1]), exact1(s.b, at[2]));
    }
}

}   /* namespace */

static bool is_comparable(const mixp_in &a) {
    return a.data && (is_real(a.dtype) || a.dtype == MIXP_U8 || a.dtype == MIXP_I32);
}

static mixp_result mixpi_cuda_compare(const mixp_exec *x, const mixp_compare_args *k) {
    Kernel on(x);
    if ((unsigned)k->how >= MIXP_COMPARE_COUNT || k->rank < 0 || k->rank > MIXP_MAX_RANK || !k->y)
        return MIXP_ERR_ARGUMENT;
    if (!is_comparable(k->a) || !is_comparable(k->b)) return MIXP_ERR_DTYPE;
    if (!on.state) return MIXP_ERR_ORDER;

    /* Merge the axes of y, a and b. */
    Axes axes = dense_axes(k->rank, k->shape);
    set_strides(&axes, 1, k->a_strides);
    set_strides(&axes, 2, k->b_strides);

    CompareJob job;
    memset((void *)&job, 0, sizeof job);
    job.how = k->how;
    job.axes = merge_axes(axes);
    job.count = count_of(axes);
    job.a = k->a;
    job.b = k->b;
    job.y = k->y;
    if (job.count <= 0) return MIXP_OK;
    return on.report("compare", MIXPI_LAUNCH(compare_elements, grid_for(job.count, map_threads),
                                    map_threads, 0, on.stream, job));
}

/* --- reductions and losses --------------------------------------------------------- */

namespace {

/* A reduction over (outer, n, inner). `repeated`: the array (output or source) that repeats along
 * n. */
inline mixp_result reduce_any(
    const mixp_exec *x, const char *what, int fn, int repeated, const mixp_reduce_args *k) {
    int64_t shape[3] = { k->outer, k->n, k->inner }, strides[3] = { k->inner, 0, 1 };
    Strided m = strided_of(k->y, k->factor);
    if (k->outer < 0 || k->n < 0 || k->inner < 0) return MIXP_ERR_ARGUMENT;
    Axes axes = dense_axes(3, shape);
    m.a[1] = k->a;
    set_strides(&axes, repeated, strides);
    follow(&axes, m);
    return run_strided(x, what, fn, axes, &m, repeated == 0);
}

}   /* namespace */

static mixp_result mixpi_cuda_reduce(const mixp_exec *x, const mixp_reduce_args *k) {
    return reduce_any(x, "reduce", FN_COPY, 0, k);
}

static mixp_result mixpi_cuda_reduce_backward(const mixp_exec *x, const mixp_reduce_args *k) {
    return reduce_any(x, "reduce_backward", FN_UNARY + MIXP_UNARY_SCALE, 1, k);
}

static mixp_result mixpi_cuda_loss(const mixp_exec *x, const mixp_loss_args *k) {
    int64_t zero = 0, over = k->over ? k->over : k->n;
    Strided m = strided_of(mixpi_out_to(k->each ? k->each : k->y, MIXP_F32, 0),
        k->each ? 1.0f : (float)(1.0 / (double)over));
    if ((unsigned)k->kind >= MIXP_LOSS_COUNT || k->n < 0) return MIXP_ERR_ARGUMENT;
    if (k->n > 0 && !k->target.data) return MIXP_ERR_ARGUMENT;
    Axes axes = dense_axes(1, &k->n);
    m.a[1] = k->a;
    m.a[2] = k->target;
    m.q = k->delta;
    if (!k->each) set_strides(&axes, 0, &zero);
    return run_strided(x, "loss", FN_LOSS + k->kind, axes, &m, !k->each);
}
namespace {

/* --- recipes: the quantiser ------------------------------------------------------------- *
 *
 * The CPU's numbers: magnitudes are compared as bits, and each element is computed by the functions
 * that the CPU uses. First comes the array's amax, if its scale needs one: each thread block writes
 * the largest magnitude of its part, and each block of the next kernel reads them all.
 */
const int quantise_threads = 256, most_parts = 256, column_tile = 8 * warp_size;

struct Quantising {
    mixp_quantise_args k;
    mixpi_grid grid;
    Draws      draws;
    uint32_t  *parts;           /* the largest magnitude of each part of the array; or NULL.
                                   by_lines: of each row, or column                          */
    int        part_count;
    int        team;            /* threads that share a block: 2 to 32, or a thread block    */
    bool       wide;
};

/* The largest over teams of 2 to 32 threads of a warp. */
__device__ inline uint32_t team_most(uint32_t v, int team) {
    for (int k = team / 2; k; k /= 2) {
        uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, v, k);
        v = other > v ? other : v;
    }
    return v;
}
/* Over all threads of a block of whole warps; every thread gets the largest. */
__device__ inline uint32_t block_most(uint32_t v) {
    MIXPI_SHARED(uint32_t, part, 32);
    int lane = (int)threadIdx.x % warp_size, warp = (int)threadIdx.x / warp_size;
    v = team_most(v, warp_size);
    if (lane == 0) part[warp] = v;
    __syncthreads();
    v = team_most(lane < (int)blockDim.x / warp_size ? part[lane] : 0u, warp_size);
    __syncthreads();
    return v;
}

/* The largest magnitude of n elements from element i on, as bits; at least `most`. */
__device__ inline uint32_t look8(const Quantising &q, int64_t i, int n, uint32_t most) {
    float v[8];
    get8_any(q.k.x, i, n, q.wide, v);
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) {
        uint32_t a = mixp_bits_of_f32(v[k]) & 0x7FFFFFFFu;
        most = a > most ? a : most;
    }
    return most;
}

/* Element i, which is x, on the grid and back. An Inf or NaN of x stays: see mixpi_grid_keep. */
__device__ inline float put_on_grid(
    const Quantising &q, uint64_t key, int64_t i, float x, mixpi_scales s) {
    const float scaled = __fmul_rn(x, s.in);
    if ((mixp_bits_of_f32(x) & 0x7FFFFFFFu) >= 0x7F800000u) return __fmul_rn(scaled, s.out);
    uint32_t v = mixp_bits_of_f32(scaled), a = v & 0x7FFFFFFFu;
    uint32_t r = q.k.stochastic ? mixpi_grid_random(&q.grid, a, mixp_random_at(key, (uint64_t)i))
                                : mixpi_grid_round(&q.grid, a);
    return __fmul_rn(mixp_f32_of_bits(r | (v & 0x80000000u)), s.out);
}

/* The same for 8 elements of an fp8 format, by the processor's codes: they saturate as the grid
 * does. */
template <mixp_dtype D>
__device__ inline void put_on_grid_of(float *v, const float *in, const float *out) {
    MIXPI_UNROLL
    for (int k = 0; k < 8; k += 2) {
        const float scaled[2] = { __fmul_rn(v[k], in[k]), __fmul_rn(v[k + 1], in[k + 1]) };
        float number[2];
        fp8_values<D>(fp8_pair<D>(scaled[0], scaled[1]), number);
        MIXPI_UNROLL
        for (int j = 0; j < 2; j++) {
            const bool finite = (mixp_bits_of_f32(v[k + j]) & 0x7FFFFFFFu) < 0x7F800000u;
            v[k + j] = __fmul_rn(finite ? number[j] : scaled[j], out[k + j]);
        }
    }
}

/* The same for 8 elements from element i on. in, out: their scales. */
__device__ inline void put8_on_grid(
    const Quantising &q, uint64_t key, int64_t i, float *v, const float *in, const float *out) {
    if (fp8_is_native && q.k.element == MIXP_F8_E4M3)
        return put_on_grid_of<MIXP_F8_E4M3>(v, in, out);
    if (fp8_is_native && q.k.element == MIXP_F8_E5M2)
        return put_on_grid_of<MIXP_F8_E5M2>(v, in, out);
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) {
        const mixpi_scales s = { in[k], out[k] };
        v[k] = put_on_grid(q, key, i + k, v[k], s);
    }
}

/* Quantises n elements from element i on, with one pair of scales. */
__device__ inline void quantise8(
    const Quantising &q, uint64_t key, int64_t i, int n, mixpi_scales s) {
    float v[8], in[8], out[8];
    get8_any(q.k.x, i, n, q.wide, v);
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) {
        in[k] = s.in;
        out[k] = s.out;
    }
    put8_on_grid(q, key, i, v, in, out);
    plain_put<MIXP_BF16>(q.k.y, i, n, q.wide, v);
}

__device__ inline uint64_t quantise_key(const Quantising &q) {
    return q.k.stochastic ? key_now(q.draws) : 0;
}

/* The array's scale and amax. */
struct Whole { float scale, amax; };

/* All threads call it; one writes the product's factor, and the amax if wanted. */
__device__ inline Whole array_scale(const Quantising &q) {
    /* Join the parts' largest magnitudes. */
    uint32_t most = 0;
    if (q.part_count) {
        for (int i = (int)threadIdx.x; i < q.part_count; i += (int)blockDim.x)
            most = q.parts[i] > most ? q.parts[i] : most;
        most = block_most(most);
    }

    /* Write what the caller wants of the scale, with one thread. */
    const float scale = q.k.by_lines ? 1.0f : mixpi_scale_of_array(&q.k, most);
    const Whole whole = { scale, mixp_f32_of_bits(most) };
    if (blockIdx.x || threadIdx.x) return whole;
    mixpi_give_amax(&q.k, most);
    if (q.k.own) *q.k.own = 1.0f / scale;
    if (q.k.decode) *q.k.decode = __fmul_rn(1.0f / scale, q.k.times ? *q.k.times : 1.0f);
    return whole;
}

/* The same of a row or column, which quantise_rows_amax or quantise_columns_amax has looked at. */
__device__ inline Whole line_scale(const Quantising &q, const Whole &whole, int64_t line) {
    if (!q.k.by_lines) return whole;
    const Whole own = { mixpi_scale_of_array(&q.k, q.parts[line]),
        mixp_f32_of_bits(q.parts[line]) };
    return own;
}

__device__ inline void keep_line(const Quantising &q, int64_t line, uint32_t most) {
    q.parts[line] = most;
    q.k.line_scales[line] = 1.0f / mixpi_scale_of_array(&q.k, most);
}

/* by_lines: the largest magnitude of each row. */
__global__ void __launch_bounds__(quantise_threads)
    quantise_rows_amax(const __grid_constant__ Quantising q) {
    for (int64_t row = blockIdx.x; row < q.k.rows; row += gridDim.x) {
        uint32_t most = 0;
        int64_t c = (int64_t)threadIdx.x * 8;
        for (; c < q.k.cols; c += (int64_t)blockDim.x * 8)
            most = look8(q, row * q.k.cols + c, (int)least(8, q.k.cols - c), most);
        most = block_most(most);
        if (threadIdx.x == 0) keep_line(q, row, most);
    }
}

/* by_lines: of each column. A thread block takes 32 columns, a warp every eighth row. */
__global__ void __launch_bounds__(quantise_threads)
    quantise_columns_amax(const __grid_constant__ Quantising q) {
    MIXPI_SHARED(uint32_t, found, quantise_threads);
    const int lane = (int)threadIdx.x % warp_size, warps = quantise_threads / warp_size;
    const int64_t col = (int64_t)blockIdx.x * warp_size + lane;
    uint32_t most = 0;
    int64_t r = (int)threadIdx.x / warp_size;
    for (; col < q.k.cols && r < q.k.rows; r += warps) {
        const uint32_t a = mixp_bits_of_f32(get1(q.k.x, r * q.k.cols + col)) & 0x7FFFFFFFu;
        most = a > most ? a : most;
    }
    found[threadIdx.x] = most;
    __syncthreads();
    if ((int)threadIdx.x >= warp_size || col >= q.k.cols) return;
    for (int w = 1; w < warps; w++) {
        const uint32_t a = found[w * warp_size + lane];
        most = a > most ? a : most;
    }
    keep_line(q, col, most);
}

__global__ void __launch_bounds__(quantise_threads)
    quantise_amax(const __grid_constant__ Quantising q) {
    int64_t n = q.k.rows * q.k.cols;
    int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * 8;
    uint32_t most = 0;
    for (; i < n; i += (int64_t)gridDim.x * blockDim.x * 8)
        most = look8(q, i, (int)least(8, n - i), most);
    most = block_most(most);
    if (threadIdx.x == 0) q.parts[blockIdx.x] = most;
}

/* One scale for the whole array. */
__global__ void __launch_bounds__(quantise_threads)
    quantise_whole(const __grid_constant__ Quantising q) {
    uint64_t key = quantise_key(q);
    int64_t n = q.k.rows * q.k.cols;
    int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * 8;
    mixpi_scales s = mixpi_scales_of(&q.k, &q.grid, array_scale(q).scale, 0);
    for (; i < n; i += (int64_t)gridDim.x * blockDim.x * 8)
        quantise8(q, key, i, (int)least(8, n - i), s);
}

/* The first element of block b; blocks of one row follow each other. */
__device__ inline int64_t block_start(const mixp_quantise_args &k, int64_t b) {
    int64_t wide = k.cols / k.block_cols;
    if (k.block_rows == 1) return b * k.block_cols;
    return b / wide * k.block_rows * k.cols + b % wide * k.block_cols;
}
/* Where the e-th 8 elements of a block begin, from its first element on. */
__device__ inline int64_t eight_at(const mixp_quantise_args &k, int64_t e) {
    int64_t across = k.block_cols / 8;
    return k.block_rows == 1 ? e * 8 : e / across * k.cols + e % across * 8;
}

/* --- 4over6: see mixp_4over6 --- */

/* The errors of 16 elements from `at` on, `step` apart, with the scales for 4 and for 6. */
struct Errors { float four, six; };
__device__ inline Errors errors16(const Quantising &q, const Whole &whole, mixpi_scales four,
    mixpi_scales six, int64_t at, int64_t step) {
    Errors e = { 0.0f, 0.0f };
    for (int i = 0; i < 16; i++) {
        const float x = get1(q.k.x, at + i * step);
        e.four = __fadd_rn(e.four, mixpi_4over6_error(&q.k, &q.grid, whole.amax, four, x));
        e.six = __fadd_rn(e.six, mixpi_4over6_error(&q.k, &q.grid, whole.amax, six, x));
    }
    return e;
}

/* The scales that a block keeps. Each of 16 neighbouring threads has the errors of one row: they
 * are added over rows 8, 4, 2 and 1 apart. down: each thread has a block. */
__device__ inline mixpi_scales keep_smaller(
    Errors e, mixpi_scales four, mixpi_scales six, bool down) {
    for (int k = 8; k && !down; k /= 2) {
        e.four = __fadd_rn(e.four, __shfl_xor_sync(0xFFFFFFFFu, e.four, k));
        e.six = __fadd_rn(e.six, __shfl_xor_sync(0xFFFFFFFFu, e.six, k));
    }
    const float errors[2] = { e.four, e.six };
    return mixpi_4over6_choose(errors, four, six);
}

/* The scales of the block of 16 columns that begins at `at`. All threads of a warp call it; a team
 * past the last block (there: 0) has no elements. */
__device__ inline mixpi_scales choose_block(
    const Quantising &q, const Whole &whole, uint32_t most, int64_t at, bool there) {
    const mixpi_scales six = mixpi_scales_of(&q.k, &q.grid, whole.scale, most);
    if (!q.k.choice) return six;
    const mixpi_scales four = mixpi_scales_e4m3(whole.scale, 1.5f, most);
    const bool squares = q.k.block_rows > 1;
    const int64_t row = squares ? threadIdx.x % 16 : 0;
    Errors e = { 0.0f, 0.0f };
    if (there) e = errors16(q, whole, four, six, at + row * q.k.cols, 1);
    return keep_smaller(e, four, six, !squares);
}

/* Of a block of one column. */
__device__ inline mixpi_scales choose_column(
    const Quantising &q, const Whole &whole, uint32_t most, int64_t at, bool there) {
    const mixpi_scales six = mixpi_scales_of(&q.k, &q.grid, whole.scale, most);
    if (!q.k.choice || !there) return six;
    const mixpi_scales four = mixpi_scales_e4m3(whole.scale, 1.5f, most);
    return keep_smaller(errors16(q, whole, four, six, at, q.k.cols), four, six, true);
}

/* Blocks whose rows are multiples of 16 elements; a team of threads shares a block. */
__global__ void __launch_bounds__(quantise_threads)
    quantise_blocks(const __grid_constant__ Quantising q) {
    const int64_t eights = q.k.block_rows * q.k.block_cols / 8;
    const int64_t count = q.k.rows * q.k.cols / 8 / eights;
    const int teams = quantise_threads / q.team, own = (int)threadIdx.x / q.team;
    const int rank = (int)threadIdx.x % q.team;
    const Whole whole = array_scale(q);
    for (int64_t b = (int64_t)blockIdx.x * teams; b < count; b += (int64_t)gridDim.x * teams) {
        /* Find the block's largest magnitude; a team past the last block has no elements. */
        const int64_t at = block_start(q.k, b + own), end = b + own < count ? eights : 0;
        uint32_t most = 0;
        for (int64_t e = rank; e < end; e += q.team)
            most = look8(q, at + eight_at(q.k, e), 8, most);
        most = q.team > warp_size ? block_most(most) : team_most(most, q.team);

        /* Store the block's scale. */
        const int64_t row = end ? (b + own) * q.k.block_cols / q.k.cols : 0;
        const mixpi_scales s = choose_block(q, line_scale(q, whole, row), most, at, end > 0);
        if (q.k.scales && rank == 0 && end)
            q.k.scales[b + own] = mixpi_scale_code(q.k.scale, s.out);

        /* Quantise the block. */
        const uint64_t key = quantise_key(q);
        for (int64_t e = rank; e < end; e += q.team) quantise8(q, key, at + eight_at(q.k, e), 8, s);
    }
}

/* The largest magnitudes of 8 columns, over every eighth row of a block from `row` on. */
__device__ inline void look_down(const Quantising &q, int64_t at, int n, int row, uint32_t *most) {
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) most[k] = 0;
    for (int64_t r = row; n > 0 && r < q.k.block_rows; r += quantise_threads / warp_size) {
        float v[8];
        get8_any(q.k.x, at + r * q.k.cols, n, q.wide, v);
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) {
            uint32_t a = mixp_bits_of_f32(v[k]) & 0x7FFFFFFFu;
            most[k] = a > most[k] ? a : most[k];
        }
    }
}

/* Quantises the same elements. in, out: the scales of the 8 columns, in shared memory. */
__device__ inline void quantise_down(
    const Quantising &q, int64_t at, int n, int row, const float *in, const float *out) {
    uint64_t key = quantise_key(q);
    for (int64_t r = row; n > 0 && r < q.k.block_rows; r += quantise_threads / warp_size) {
        int64_t i = at + r * q.k.cols;
        float v[8];
        get8_any(q.k.x, i, n, q.wide, v);
        put8_on_grid(q, key, i, v, in, out);
        plain_put<MIXP_BF16>(q.k.y, i, n, q.wide, v);
    }
}

/* Blocks of one column. A thread block takes 256 columns of a row of blocks: a warp every eighth
 * row, a thread 8 columns; then each thread computes the scales of one column. */
__global__ void __launch_bounds__(quantise_threads)
    quantise_columns(const __grid_constant__ Quantising q) {
    MIXPI_SHARED(uint32_t, found, quantise_threads / warp_size * column_tile);
    MIXPI_SHARED(float, in, column_tile);
    MIXPI_SHARED(float, out, column_tile);
    const unsigned across = (unsigned)ceil_div(q.k.cols, column_tile);
    const int lane = (int)threadIdx.x % warp_size, warp = (int)threadIdx.x / warp_size;
    const int64_t col = (int64_t)(blockIdx.x % across) * column_tile + lane * 8;
    const int64_t at = blockIdx.x / across * q.k.block_rows * q.k.cols + col;
    const int n = col < q.k.cols ? (int)least(8, q.k.cols - col) : 0;
    const Whole whole = array_scale(q);

    /* Find the largest magnitudes of the columns in each warp's rows. */
    uint32_t most[8];
    look_down(q, at, n, warp, most);
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) found[warp * column_tile + lane * 8 + k] = most[k];
    __syncthreads();

    /* Join the warps, with a thread for each column, and compute the column's scales. */
    uint32_t all = 0;
    for (int w = 0; w < quantise_threads / warp_size; w++) {
        uint32_t a = found[w * column_tile + (int)threadIdx.x];
        all = a > all ? a : all;
    }
    const int64_t strip = blockIdx.x / across;
    const int64_t own = (int64_t)(blockIdx.x % across) * column_tile + threadIdx.x;
    const Whole of = line_scale(q, whole, own < q.k.cols ? own : 0);
    const mixpi_scales s =
        choose_column(q, of, all, strip * q.k.block_rows * q.k.cols + own, own < q.k.cols);
    in[threadIdx.x] = s.in;
    out[threadIdx.x] = s.out;
    if (q.k.scales && own < q.k.cols)
        q.k.scales[strip * q.k.cols + own] = mixpi_scale_code(q.k.scale, s.out);
    __syncthreads();

    quantise_down(q, at, n, warp, in + lane * 8, out + lane * 8);
}

/* Threads for each block: a power of two, at most one for 8 elements. */
inline int quantise_team(int64_t elements) {
    int team = 2;
    if (elements > 64 * warp_size) return quantise_threads;
    while (team < warp_size && team * 16 <= elements) team *= 2;
    return team;
}

typedef void (*QuantiseKernel)(Quantising q);

/* The kernel for these blocks; sets q->team and *grid. */
inline QuantiseKernel quantise_kernel(Quantising *q, unsigned *grid) {
    const mixp_quantise_args &k = q->k;
    if (k.scale == MIXP_SCALE_TENSOR) {
        *grid = grid_for(ceil_div(k.rows * k.cols, 8), quantise_threads);
        return quantise_whole;
    }
    if (k.block_cols == 1) {
        *grid = (unsigned)(k.rows / k.block_rows * ceil_div(k.cols, column_tile));
        return quantise_columns;
    }
    const int64_t elements = k.block_rows * k.block_cols;
    q->team = quantise_team(elements);
    *grid = grid_for(k.rows * k.cols / elements * q->team, quantise_threads);
    return quantise_blocks;
}

/* by_lines: the largest magnitude of each row or column, in scratch memory. */
inline mixp_result quantise_look_at_lines(const mixp_exec *x, Kernel *on, Quantising *q) {
    const bool down = q->k.block_cols == 1;
    const int64_t lines = mixpi_quantise_lines(&q->k);
    const int64_t blocks = down ? ceil_div(lines, warp_size) : least(lines, 65535);
    q->parts = (uint32_t *)scratch_of(x, (size_t)lines * sizeof *q->parts);
    if (!q->parts) return MIXP_ERR_MEMORY;
    return on->report("quantise", MIXPI_LAUNCH(down ? quantise_columns_amax : quantise_rows_amax,
                                      (unsigned)blocks, quantise_threads, 0, on->stream, *q));
}

/* The largest magnitudes of parts of the array, in scratch memory. */
inline mixp_result quantise_look(const mixp_exec *x, Kernel *on, Quantising *q) {
    int64_t threads = ceil_div(q->k.rows * q->k.cols, 8);
    if (q->k.by_lines) return quantise_look_at_lines(x, on, q);
    if (!mixpi_needs_amax(&q->k)) return MIXP_OK;
    q->part_count = (int)least(most_parts, ceil_div(threads, quantise_threads));
    q->parts = (uint32_t *)scratch_of(x, (size_t)q->part_count * sizeof *q->parts);
    if (!q->parts) return MIXP_ERR_MEMORY;
    return on->report("quantise",
        MIXPI_LAUNCH(quantise_amax, (unsigned)q->part_count, quantise_threads, 0, on->stream, *q));
}

/* --- recode --- */

struct Recoding {
    mixp_recode_args k;
    bool wide, wide_scales;
    uint64_t per_row, per_block;    /* inverses of k.cols, and of the elements of a row of blocks */
};
/* 1 / the scale of a code, exact, where scales are powers of two. 255, which is NaN, stays 255. */
__device__ inline float inverse_scale_of_code(mixp_block_scale kind, uint8_t code) {
    return mixpi_scale_of_code(kind, (uint8_t)(254 - code));
}

/* The codes of 8 elements; those of e2m1 fill lo. */
struct Codes8 { uint32_t lo, hi; };

/* The codes of the scales of 8 elements from element i on, one in each byte. Block row r has its
 * scales from r * cols on, one for each column. */
__device__ inline Codes8 scales8(const Recoding &q, int64_t i) {
    const int64_t row = over(i, q.k.cols, q.per_row);
    const int64_t blocks = over(i, q.k.block_rows * q.k.cols, q.per_block);
    const uint8_t *p = q.k.scales + blocks * q.k.cols + (i - row * q.k.cols);
    Codes8 c = { 0, 0 };
    if (q.wide_scales) {
        const uint2 u = *(const uint2 *)(const void *)p;
        c.lo = u.x;
        c.hi = u.y;
        return c;
    }
    MIXPI_UNROLL
    for (int j = 0; j < 4; j++) {
        c.lo |= (uint32_t)p[j] << 8 * j;
        c.hi |= (uint32_t)p[j + 4] << 8 * j;
    }
    return c;
}

/* Are x / s and x * (1 / s) the same, for every scale s? */
__device__ inline bool has_powers(const mixp_recode_args &k) { return k.scale != MIXP_SCALE_E4M3; }

/* The factors of 8 elements from element i on: by which a value is multiplied, or its code. In the
 * first case a scale that is not a power of two is itself, because the value is divided by it. */
__device__ inline void factors8(const Recoding &q, int64_t i, float *s) {
    MIXPI_UNROLL
    for (int j = 0; j < 8; j++) s[j] = 1.0f;
    if (!q.k.block_rows) return;

    const Codes8 c = scales8(q, i);
    const bool inverse = !q.k.decodes && has_powers(q.k);
    MIXPI_UNROLL
    for (int j = 0; j < 8; j++) {
        const uint8_t code = (uint8_t)((j < 4 ? c.lo : c.hi) >> 8 * (j % 4));
        s[j] =
            inverse ? inverse_scale_of_code(q.k.scale, code) : mixpi_scale_of_code(q.k.scale, code);
    }
}

__device__ inline bool is_e2m1(const mixp_recode_args &k) { return k.element == MIXP_F4_E2M1; }

__device__ inline uint8_t *codes_at(const mixp_recode_args &k, int64_t i) {
    return k.codes + (is_e2m1(k) ? i / 2 : i);
}

__device__ inline void put_codes8(const Recoding &q, int64_t i, Codes8 c) {
    uint8_t *p = codes_at(q.k, i);
    bool narrow = is_e2m1(q.k);
    if (q.wide && narrow) *(uint32_t *)(void *)p = c.lo;
    else if (q.wide) *(uint2 *)(void *)p = make_uint2(c.lo, c.hi);
    if (q.wide) return;
    MIXPI_UNROLL
    for (int j = 0; j < 4; j++) {
        p[j] = (uint8_t)(c.lo >> 8 * j);
        if (!narrow) p[j + 4] = (uint8_t)(c.hi >> 8 * j);
    }
}

__device__ inline Codes8 get_codes8(const Recoding &q, int64_t i) {
    const uint8_t *p = codes_at(q.k, i);
    bool narrow = is_e2m1(q.k);
    Codes8 c = { 0, 0 };
    if (q.wide) {
        c.lo = *(const uint32_t *)(const void *)p;
        if (!narrow) c.hi = *(const uint32_t *)(const void *)(p + 4);
        return c;
    }
    MIXPI_UNROLL
    for (int j = 0; j < 4; j++) {
        c.lo |= (uint32_t)p[j] << 8 * j;
        if (!narrow) c.hi |= (uint32_t)p[j + 4] << 8 * j;
    }
    return c;
}

__device__ inline void encode8(const Recoding &q, int64_t i, const float *s) {
    float v[8];
    plain_get<MIXP_BF16>(q.k.y, i, 8, q.wide, v);

    /* Pack their codes: 4 bits each, or 8. */
    Codes8 c = { 0, 0 };
    if (is_e2m1(q.k)) {
        MIXPI_UNROLL
        for (int j = 0; j < 8; j++) c.lo |= e2m1_code_of(v[j], s[j]) << 4 * j;
    } else {
        const bool powers = has_powers(q.k);
        uint32_t words[2];
        MIXPI_UNROLL
        for (int j = 0; j < 8; j++) v[j] = powers ? __fmul_rn(v[j], s[j]) : v[j] / s[j];
        fp8_codes<MIXP_F8_E4M3, 2>(v, false, words);
        c.lo = words[0];
        c.hi = words[1];
    }
    put_codes8(q, i, c);
}

__device__ inline void decode8(const Recoding &q, int64_t i, const float *s) {
    Codes8 c = get_codes8(q, i);
    float v[8];
    if (is_e2m1(q.k)) {
        MIXPI_UNROLL
        for (int j = 0; j < 8; j++) v[j] = mixpi_e2m1_value(c.lo >> 4 * j);
    } else {
        MIXPI_UNROLL
        for (int j = 0; j < 8; j += 2)
            fp8_values<MIXP_F8_E4M3>((j < 4 ? c.lo : c.hi) >> 8 * (j % 4) & 0xFFFFu, v + j);
    }
    MIXPI_UNROLL
    for (int j = 0; j < 8; j++) v[j] = __fmul_rn(v[j], s[j]);
    plain_put<MIXP_BF16>(q.k.y, i, 8, q.wide, v);
}

/* 8 elements of a row in each thread. */
__global__ void __launch_bounds__(quantise_threads)
    recode_eights(const __grid_constant__ Recoding q) {
    int64_t n = q.k.rows * q.k.cols;
    int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * 8;
    if (i == 0 && q.k.decodes && q.k.decode)
        *q.k.decode = __fmul_rn(*q.k.own, q.k.times ? *q.k.times : 1.0f);
    for (; i < n; i += (int64_t)gridDim.x * blockDim.x * 8) {
        float s[8];
        factors8(q, i, s);
        if (q.k.decodes) decode8(q, i, s);
        else encode8(q, i, s);
    }
}

/* --- what quantising has lost --- */

const int lose_threads = 256;

struct Losing {
    mixp_lose_args k;
    mixpi_loss    *parts;
    int            part_count;
    bool           wide;
};

/* The sum over the threads of a block, as a tree; in thread 0. */
__device__ inline mixpi_loss block_loss(mixpi_loss v) {
    MIXPI_SHARED(double, error, lose_threads);
    MIXPI_SHARED(int64_t, seen, lose_threads);
    MIXPI_SHARED(int64_t, clipped, lose_threads);
    const int t = (int)threadIdx.x;
    error[t] = v.error;
    seen[t] = v.seen;
    clipped[t] = v.clipped;

    /* Add the upper half of the threads to the lower half, until one is left. */
    for (int k = lose_threads / 2; k; k /= 2) {
        __syncthreads();
        if (t >= k) continue;
        error[t] += error[t + k];
        seen[t] += seen[t + k];
        clipped[t] += clipped[t + k];
    }

    v.error = error[t];
    v.seen = seen[t];
    v.clipped = clipped[t];
    return v;
}

/* The factor of element i. */
__device__ inline double factor_of(const mixp_lose_args &k, int64_t i, double decode) {
    if (!k.line_scales) return decode;
    return (double)k.line_scales[k.of_columns ? i % k.cols : i / k.cols];
}

__global__ void __launch_bounds__(lose_threads) lose_parts(const __grid_constant__ Losing q) {
    double decode = q.k.decode ? (double)*q.k.decode : 1.0;
    double scale = q.k.scale ? (double)*q.k.scale : 0.0;
    const mixp_in from_y = mixpi_in(q.k.y, MIXP_BF16);

    /* Add the losses of the thread's elements. */
    mixpi_loss sum = { 0.0, 0, 0 };
    int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * 8;
    for (; i < q.k.n; i += (int64_t)gridDim.x * blockDim.x * 8) {
        const int n = (int)least(8, q.k.n - i);
        float v[8], y[8];
        get8_any(q.k.x, i, n, q.wide, v);
        get8_any(from_y, i, n, q.wide, y);
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++)
            if (k < n)
                mixpi_loss_add(
                    &sum, v[k], (double)y[k] * factor_of(q.k, i + k, decode), scale, q.k.beyond);
    }

    sum = block_loss(sum);
    if (threadIdx.x == 0) q.parts[blockIdx.x] = sum;
}

/* One thread block joins the parts to the operand's loss. */
__global__ void __launch_bounds__(lose_threads) lose_join(const __grid_constant__ Losing q) {
    mixpi_loss sum = { 0.0, 0, 0 };
    if ((int)threadIdx.x < q.part_count) sum = q.parts[threadIdx.x];
    sum = block_loss(sum);
    if (threadIdx.x || (q.k.scale && *q.k.scale == 1.0f)) return;

    /* Keep the operand's largest error and clipping. */
    double n = sum.seen ? (double)sum.seen : 1.0, error = sum.error / n;
    double clipped = (double)sum.clipped / n;
    mixp_losses *out = q.k.out;
    if (error > out->error[q.k.operand]) out->error[q.k.operand] = error;
    if (clipped > out->clipped[q.k.operand]) out->clipped[q.k.operand] = clipped;
    out->seen |= (int64_t)1 << q.k.operand;
}

const int turn_threads = 256;

/* Moves a history by one place; the latest amax becomes the last. Returns, in each thread, the
 * largest magnitude as bits. Each round has read its part before it writes the part one place
 * earlier. */
__device__ inline uint32_t turn_history(float *history, int length, float newest) {
    uint32_t most = mixp_bits_of_f32(newest);
    for (int64_t first = 1; first < length; first += blockDim.x) {
        int64_t i = first + threadIdx.x;
        float v = i < length ? history[i] : 0.0f;
        uint32_t a = mixp_bits_of_f32(v);
        most = a > most ? a : most;
        __syncthreads();
        if (i < length) history[i - 1] = v;
    }
    __syncthreads();
    return block_most(most);
}

/* One thread block for each operand. */
__global__ void __launch_bounds__(turn_threads)
    turn_histories(const __grid_constant__ mixp_turn_args k) {
    int i = (int)blockIdx.x;
    float *history = k.history + (int64_t)i * k.length, newest = history[0];
    if (!(newest > 0.0f)) return;
    if (!mixpi_amax_is_usable(mixp_bits_of_f32(newest))) {
        __syncthreads();
        if (!threadIdx.x) history[0] = 0.0f;
        return;
    }
    float largest = mixp_f32_of_bits(turn_history(history, k.length, newest));
    if (threadIdx.x) return;
    history[k.length - 1] = newest;
    history[0] = 0.0f;
    k.scales[i] = mixpi_delayed_scale(&k, i, newest, largest, k.scales[i]);
}

/* Each thread transforms one column of 16 rows. */
__global__ void hadamard_columns(const __grid_constant__ mixp_hadamard_args k) {
    const int64_t n = k.rows / 16 * k.cols;
    int64_t t = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (; t < n; t += (int64_t)gridDim.x * blockDim.x) {
        /* Read 16 rows of the column, with their signs. */
        int64_t at = t / k.cols * 16 * k.cols + t % k.cols;
        float v[16];
        MIXPI_UNROLL
        for (int i = 0; i < 16; i++)
            v[i] = __fmul_rn(get1(k.a, at + i * k.cols), mixpi_hadamard_sign(i));

        /* Transform them: sums and differences of pairs 1, 2, 4 and 8 rows apart. */
        MIXPI_UNROLL
        for (int step = 1; step < 16; step *= 2) {
            MIXPI_UNROLL
            for (int i = 0; i < 16; i++) {
                if (i & step) continue;
                float a = v[i], b = v[i | step];
                v[i] = a + b;
                v[i | step] = a - b;
            }
        }

        /* Write them, divided by the root of 16. */
        MIXPI_UNROLL
        for (int i = 0; i < 16; i++)
            put1(mixpi_out_to(k.y, MIXP_BF16, 0), at + i * k.cols, v[i] * 0.25f);
    }
}

}   /* namespace */

static mixp_result mixpi_cuda_quantise(const mixp_exec *x, const mixp_quantise_args *k) {
    Kernel on(x);
    mixp_result r = mixpi_quantise_wrong(k);
    if (r != MIXP_OK) return r;
    if (!on.state) return MIXP_ERR_ORDER;

    /* Fill the job, and choose the kernel. */
    Quantising q;
    memset((void *)&q, 0, sizeof q);
    q.k = *k;
    q.grid = mixpi_grid_of(k->element);
    q.draws = draws_of(on.state, k->seed, k->step, k->tensor);
    q.wide = is_wide(k->x) && is_wide(k->y) && (k->scale == MIXP_SCALE_TENSOR || k->cols % 8 == 0);
    unsigned grid;
    QuantiseKernel kernel = quantise_kernel(&q, &grid);

    /* Find the array's amax, if its scale needs one; then quantise. */
    r = quantise_look(x, &on, &q);
    if (r != MIXP_OK) return r;
    return on.report("quantise", MIXPI_LAUNCH(kernel, grid, quantise_threads, 0, on.stream, q));
}

static mixp_result mixpi_cuda_recode(const mixp_exec *x, const mixp_recode_args *k) {
    Kernel on(x);
    mixp_result r = mixpi_recode_wrong(k);
    if (r != MIXP_OK) return r;
    if (!on.state) return MIXP_ERR_ORDER;

    Recoding q;
    memset((void *)&q, 0, sizeof q);
    q.k = *k;
    q.wide = is_wide(k->y) && is_wide(k->codes);
    q.wide_scales = (uintptr_t)k->scales % 8 == 0;
    q.per_row = inverse_of(k->cols);
    q.per_block = inverse_of(k->block_rows * k->cols);
    return on.report(
        "recode", MIXPI_LAUNCH(recode_eights, grid_for(k->rows * k->cols / 8, quantise_threads),
                      quantise_threads, 0, on.stream, q));
}

static mixp_result mixpi_cuda_hadamard(const mixp_exec *x, const mixp_hadamard_args *k) {
    Kernel on(x);
    mixp_result r = mixpi_hadamard_wrong(k);
    if (r != MIXP_OK) return r;
    if (!on.state) return MIXP_ERR_ORDER;
    return on.report("hadamard", MIXPI_LAUNCH(hadamard_columns,
                                     grid_for(k->rows / 16 * k->cols, 256), 256, 0, on.stream, *k));
}

static mixp_result mixpi_cuda_turn(const mixp_exec *x, const mixp_turn_args *k) {
    Kernel on(x);
    if (!k->history || !k->scales || k->length < 1) return MIXP_ERR_ARGUMENT;
    if (k->n < 1 || k->n > MIXP_TURN_OPERANDS) return MIXP_ERR_ARGUMENT;
    if (!on.state) return MIXP_ERR_ORDER;
    return on.report(
        "turn", MIXPI_LAUNCH(turn_histories, (unsigned)k->n, turn_threads, 0, on.stream, *k));
}

static mixp_result mixpi_cuda_lose(const mixp_exec *x, const mixp_lose_args *k) {
    Kernel on(x);
    if (!k->x.data || !k->y || !k->out || k->n < 1) return MIXP_ERR_ARGUMENT;
    if (k->operand < 0 || k->operand > 2) return MIXP_ERR_ARGUMENT;
    if (k->x.dtype != MIXP_F32 && k->x.dtype != MIXP_BF16) return MIXP_ERR_DTYPE;
    if (!on.state) return MIXP_ERR_ORDER;

    /* Add the losses of each part of the array. */
    Losing q;
    memset((void *)&q, 0, sizeof q);
    q.k = *k;
    q.wide = is_wide(k->x) && is_wide(k->y);
    q.part_count = (int)least(lose_threads, ceil_div(ceil_div(k->n, 8), lose_threads));
    q.parts = (mixpi_loss *)scratch_of(x, (size_t)q.part_count * sizeof *q.parts);
    if (!q.parts) return MIXP_ERR_MEMORY;
    mixp_result r = on.report(
        "lose", MIXPI_LAUNCH(lose_parts, (unsigned)q.part_count, lose_threads, 0, on.stream, q));
    if (r != MIXP_OK) return r;

    /* Join the parts. */
    return on.report("lose", MIXPI_LAUNCH(lose_join, 1, lose_threads, 0, on.stream, q));
}
/* ==== 4. ROWS ============================================================== >>rows ====
 *
 * A team computes a row: a warp for short rows, otherwise a block. Rows are read again rather than
 * kept; the second read comes from the cache. A thread reads the same elements of a row each time,
 * so outputs may be inputs where the table allows it. Which elements a thread reads depends only
 * on the shape, and so do the bits of every sum.
 *
 * Results differ from the CPU's by the order of sums in f32 and by e^x, whose relative error is
 * below 2^-22 (1 + |x|). Embeddings match the CPU bit for bit.
 *
 * This room has what the rooms of rows share: teams, parts of rows, sums in two floats.
 */
namespace {

/* --- teams ----------------------------------------------------------------------------- */

const int     team_threads = 256;
const int64_t warp_cols = 1024;             /* longest row that one warp computes          */

template <int T> __device__ inline int64_t team_first() {
    return (int64_t)blockIdx.x * (team_threads / T) + threadIdx.x / T;
}
template <int T> __device__ inline int64_t team_step() {
    return (int64_t)gridDim.x * (team_threads / T);
}

template <int T, class V> __device__ inline V team_sum(V v) {
    return T == warp_size ? warp_sum(v) : block_sum(v);
}
template <int T> __device__ inline float team_max(float v) {
    return T == warp_size ? warp_max(v) : block_max(v);
}

/* A sum in two floats, 48 bits together: `lost` is what the additions to `sum` rounded away. Rows
 * are summed so and not in double, because most GPUs (T4, RTX, L40S) have one double unit for 32 or
 * 64 f32 units: a norm's row would take longer for its arithmetic than for its memory. */
struct LongSum { float sum, lost; };

/* The error of a + b is exact: Knuth, The Art of Computer Programming, 2, 4.2.2, theorem B. */
__device__ inline void add_long(LongSum &a, float b) {
    float sum = a.sum + b, rounded = sum - a.sum;
    a.lost += (a.sum - (sum - rounded)) + (b - rounded);
    a.sum = sum;
}
__device__ inline void add_long(LongSum &a, const LongSum &b) {
    a.lost += b.lost;
    add_long(a, b.sum);
}
__device__ inline LongSum warp_sum(LongSum v) {
    MIXPI_UNROLL
    for (int k = 16; k; k /= 2) {
        LongSum other;
        other.sum = __shfl_xor_sync(0xFFFFFFFFu, v.sum, k);
        other.lost = __shfl_xor_sync(0xFFFFFFFFu, v.lost, k);
        add_long(v, other);
    }
    return v;
}
__device__ inline LongSum block_sum(LongSum v) {
    MIXPI_SHARED(LongSum, part, 32);
    const LongSum zero = { 0.0f, 0.0f };
    int lane = (int)threadIdx.x % warp_size, warp = (int)threadIdx.x / warp_size;
    v = warp_sum(v);
    if (lane == 0) part[warp] = v;
    __syncthreads();
    v = warp_sum(lane < (int)blockDim.x / warp_size ? part[lane] : zero);
    __syncthreads();
    return v;
}
/* A sum that is Inf or NaN has lost nothing that counts. */
__device__ inline bool is_finite(float x) {
    return (mixp_bits_of_f32(x) & 0x7F800000u) != 0x7F800000u;
}
__device__ inline float value_of(const LongSum &a) {
    return is_finite(a.sum) ? a.sum + a.lost : a.sum;
}

/* Launches kernel<T> over rows. A job holds the arguments of the table's kernel, and what the
 * threads need in addition. */
#define MIXPI_ROWS(kernel, k, job)                                                        \
    (job.cols <= warp_cols                                                                \
     ? MIXPI_LAUNCH(kernel<warp_size>, grid_for(job.rows * warp_size, team_threads),      \
                    team_threads, 0, k.stream, job)                                       \
     : MIXPI_LAUNCH(kernel<team_threads>, grid_for(job.rows * team_threads, team_threads),  \
                    team_threads, 0, k.stream, job))

/* MIXPI_ROWS for kernel<T, D>; see any_real. */
#define MIXPI_TYPED_ROWS(kernel, D, k, job)                                               \
    (job.cols <= warp_cols                                                                \
     ? MIXPI_LAUNCH((kernel<warp_size, D>), grid_for(job.rows * warp_size, team_threads), \
                    team_threads, 0, k.stream, job)                                       \
     : MIXPI_LAUNCH((kernel<team_threads, D>),                                            \
                    grid_for(job.rows * team_threads, team_threads), team_threads, 0,     \
                    k.stream, job))

/* The 8 or fewer elements of a row that a thread has in one turn of its team. They are neighbours
 * if the row length is a multiple of 8; otherwise they are a team's size apart. */
struct Part {
    int64_t col;
    int     n, step;
};

__device__ inline Part part_of(int64_t cols, int64_t start, int team, int rank) {
    Part p;
    if (cols % 8 == 0) {
        p.col = start + 8 * (int64_t)rank;
        p.step = 1;
        p.n = p.col < cols ? 8 : 0;
    } else {
        p.col = start + rank;
        p.step = team;
        p.n = p.col < cols ? (int)least(8, ceil_div(cols - p.col, team)) : 0;
    }
    return p;
}

/* Reads a[row + ...]; elements out of range read as `missing`. */
__device__ inline void get_part(
    const mixp_in &a, int64_t row, const Part &p, bool wide, float missing, float *v) {
    int64_t i = row + p.col;
    if (wide && p.step == 1 && p.n == 8) {
        get8(a, i, v);
        return;
    }
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) v[k] = k < p.n ? get1(a, i + k * p.step) : missing;
}
/* As put8, but always one 16-byte store: the compiler would merge a plain store with the scalar
 * path's stores. */
__device__ inline void put8_whole(const mixp_out &a, int64_t i, const float *v) {
    if (a.dtype == MIXP_F32) {
        float4 *p = (float4 *)(void *)((float *)a.data + i);
        __stwb(p, make_float4(v[0], v[1], v[2], v[3]));
        __stwb(p + 1, make_float4(v[4], v[5], v[6], v[7]));
    } else {
        __stwb((uint4 *)(void *)((uint16_t *)a.data + i),
            make_uint4(low_pair(a.dtype, v[0], v[1]), low_pair(a.dtype, v[2], v[3]),
                low_pair(a.dtype, v[4], v[5]), low_pair(a.dtype, v[6], v[7])));
    }
}
/* a = v, whatever a.accumulate says. */
__device__ inline void put_part(
    const mixp_out &a, int64_t row, const Part &p, bool wide, const float *v) {
    int64_t i = row + p.col;
    if (wide && p.step == 1 && p.n == 8) {
        put8_whole(a, i, v);
        return;
    }
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++)
        if (k < p.n) put1(a, i + k * p.step, v[k]);
}
/* a = v, or += v where a accumulates. */
__device__ inline void add_part(
    const mixp_out &a, int64_t row, const Part &p, bool wide, float *v) {
    float had[8];
    if (a.accumulate) {
        get_part(as_in(a), row, p, wide, 0.0f, had);
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) v[k] += had[k];
    }
    put_part(a, row, p, wide, v);
}
/* Kernels whose D is a dtype have rows of whole vectors of that dtype: the compiler knows each part.
 * Those of any_real have any rows. */
const mixp_dtype any_real = MIXP_DTYPE_COUNT;

inline mixp_dtype typed_rows(bool wide, int64_t cols, mixp_dtype dtype) {
    return wide && cols % 8 == 0 ? dtype : any_real;
}
template <mixp_dtype D>
__device__ inline Part typed_part(int64_t cols, int64_t start, int team, int rank) {
    const Part whole = { start + 8 * (int64_t)rank, 8, 1 };
    return D == any_real ? part_of(cols, start, team, rank) : whole;
}
template <mixp_dtype D>
__device__ inline void typed_get_part(
    const mixp_in &a, int64_t row, const Part &p, bool wide, float missing, float *v) {
    if constexpr (D == any_real) get_part(a, row, p, wide, missing, v);
    else plain_get8<D>(a.data, row + p.col, v);
}
template <mixp_dtype D>
__device__ inline void typed_add_part(
    const mixp_out &a, int64_t row, const Part &p, bool wide, float *v) {
    float had[8];
    if (a.accumulate) {
        typed_get_part<D>(as_in(a), row, p, wide, 0.0f, had);
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) v[k] += had[k];
    }
    if constexpr (D == any_real) put_part(a, row, p, wide, v);
    else plain_put8<D>(a.data, row + p.col, v);
}

/* An absent array reads as `otherwise` everywhere. */
__device__ inline void get_part_or(
    const mixp_in &a, const Part &p, bool wide, float otherwise, float *v) {
    if (a.data) {
        get_part(a, 0, p, wide, otherwise, v);
        return;
    }
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) v[k] = otherwise;
}

/* Goes through a row, a Part p at a time. */
#define MIXPI_PARTS(p, cols, team, rank)                                                  \
    for (int64_t at_ = 0; at_ < (cols) && (p = part_of(cols, at_, team, rank), true);     \
         at_ += 8 * (int64_t)(team))

/* The same in a kernel with a D; a thread of a row of vectors has no part beyond the row. */
#define MIXPI_TYPED_PARTS(D, p, cols, team, rank)                                         \
    for (int64_t at_ = 0; at_ < (cols) - (D == any_real ? 0 : 8 * (int64_t)(rank)) &&     \
                          (p = typed_part<D>(cols, at_, team, rank), true);               \
         at_ += 8 * (int64_t)(team))

/* e^x; 0 where e^x is below 2^-126 (x < -87.3). */
__device__ inline float exp_of(float x) { return exp2_approx(x * 1.44269504f); }
__device__ inline float minus_infinity() { return mixp_f32_of_bits(0xFF800000u); }
__device__ inline float not_a_number() { return mixp_f32_of_bits(0x7FC00000u); }
__device__ inline bool is_id(int32_t id, int64_t vocab) { return id >= 0 && id < vocab; }

}   /* namespace */

/* A job on k; all other fields are 0. */
template <class Job, class Args> static Job mixpi_cuda_job(const Args &k) {
    Job job;
    memset((void *)&job, 0, sizeof job);
    (Args &)job = k;
    return job;
}

/* A missing array may have any dtype. */
template <class A> static bool is_real_or_absent(const A &a) { return !a.data || is_real(a.dtype); }
namespace {

/* --- softmax --------------------------------------------------------------------------- */

/* The largest element so far, and the sum of e^(x - top). A NaN appears only in the sum. */
struct Exponents { float top, sum; };

/* The number to subtract before e^x: 0 for a top of -Inf, because e^(-Inf - -Inf) is NaN. */
__device__ inline float base_of(float top) { return top > minus_infinity() ? top : 0.0f; }

__device__ inline void add_exponents(Exponents &e, const float *v) {
    float top = e.top;
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) top = fmaxf(top, v[k]);

    /* Rescale the sum to the new top, then add the elements. */
    const float base = base_of(top);
    e.sum *= exp_of(e.top - base);
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) e.sum += exp_of(v[k] - base);
    e.top = top;
}
template <int T> __device__ inline Exponents team_exponents(const Exponents &e) {
    Exponents all;
    all.top = team_max<T>(e.top);
    all.sum = team_sum<T>(e.sum * exp_of(e.top - base_of(all.top)));
    return all;
}
/* Replaces column `at` of a part, if the part has that column. */
__device__ inline void set_column(const Part &p, int64_t at, float x, float *v) {
    const int k_at = (int)(at - p.col);
    if ((unsigned)k_at >= (unsigned)(8 * p.step)) return;
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++)
        if (k * p.step == k_at) v[k] = x;
}
/* Of a row without column `but`; -1: of all its columns. */
template <int T, mixp_dtype D = any_real>
__device__ inline Exponents row_exponents(
    const mixp_in &a, int64_t row, int64_t cols, bool wide, int64_t but = -1) {
    int rank = (int)threadIdx.x % T;
    Exponents e = { minus_infinity(), 0.0f };
    float v[8];
    Part p;
    MIXPI_TYPED_PARTS(D, p, cols, T, rank) {
        typed_get_part<D>(a, row, p, wide, minus_infinity(), v);
        set_column(p, but, minus_infinity(), v);
        add_exponents(e, v);
    }
    return team_exponents<T>(e);
}

struct SoftmaxJob : mixp_softmax_args { bool wide; };
struct SoftmaxBackJob : mixp_softmax_backward_args { bool wide; };

/* The sum of e^(x - top) of a row's elements below its top. */
const float sure_sum = 1.25f;
template <int T> __device__ inline float below_top(const SoftmaxJob &s, int64_t row, float top) {
    float sum = 0.0f, v[8];
    Part p;
    MIXPI_PARTS(p, s.cols, T, (int)threadIdx.x % T) {
        get_part(s.a, row * s.cols, p, s.wide, top, v);
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) sum += v[k] < top ? exp_of(v[k] - top) : 0.0f;
    }
    return team_sum<T>(sum);
}

template <int T>
__global__ void __launch_bounds__(team_threads, 3)
    softmax_rows(const __grid_constant__ SoftmaxJob s) {
    const int rank = (int)threadIdx.x % T;
    for (int64_t r = team_first<T>(); r < s.rows; r += team_step<T>()) {
        /* Sum the row's exponentials. If one column has almost all of the sum, its logarithm comes
         * from the sum of the others. */
        Exponents e = row_exponents<T>(s.a, r * s.cols, s.cols, s.wide);
        float log_sum = logf(e.sum), factor = 1.0f / e.sum;
        if (s.log_of && e.sum < sure_sum) log_sum = log1pf(below_top<T>(s, r, e.top));

        /* Read the row again, and write its softmax or the logarithm. */
        Part p;
        MIXPI_PARTS(p, s.cols, T, rank) {
            float v[8];
            get_part(s.a, r * s.cols, p, s.wide, 0.0f, v);
            MIXPI_UNROLL
            for (int k = 0; k < 8; k++) {
                float x = v[k] - e.top;
                v[k] = s.log_of ? x - log_sum : exp_of(x) * factor;
            }
            put_part(s.y, r * s.cols, p, s.wide, v);
        }
    }
}

/* A column with 3/4 of the probability or more is sure; at most one is. */
__device__ inline bool is_sure(float y, int log_of) { return y >= (log_of ? -0.2876821f : 0.75f); }

/* The sums of a row of a softmax's backward pass: dy of its sure column, or 0; over the other
 * columns, the sums of y and of dy y, or of dy for the log. */
struct BackSums { float sure, y, dy; };
template <int T> __device__ inline BackSums back_sums(const SoftmaxBackJob &s, int64_t r) {
    LongSum sums = { 0.0f, 0.0f };
    float dy[8], y[8], sure = 0.0f, share = 0.0f;
    Part p;
    MIXPI_PARTS(p, s.cols, T, (int)threadIdx.x % T) {
        float part = 0.0f;
        get_part(s.dy, r * s.cols, p, s.wide, 0.0f, dy);
        get_part(s.y, r * s.cols, p, s.wide, 0.0f, y);
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) {
            if (k >= p.n) continue;
            const bool is = is_sure(y[k], s.log_of);
            if (is) sure = dy[k];
            else part = s.log_of ? part + dy[k] : fmaf(dy[k], y[k], part);
            share += is ? 0.0f : y[k];
        }
        add_long(sums, part);
    }
    BackSums all;
    all.sure = team_sum<T>(sure);
    all.y = team_sum<T>(share);
    all.dy = value_of(team_sum<T>(sums));
    return all;
}

/* da = y (dy - sum(dy y)), or dy - e^y sum(dy) for the log. In a sure column these differences
 * cancel. Its slope comes from the other columns: all dy count from this column's, or, for the log,
 * the slope is -(the others' sum + sum(dy) (e^y - 1)). */
template <int T>
__global__ void __launch_bounds__(team_threads, 3)
    softmax_back_rows(const __grid_constant__ SoftmaxBackJob s) {
    const int rank = (int)threadIdx.x % T;
    for (int64_t r = team_first<T>(); r < s.rows; r += team_step<T>()) {
        const BackSums sums = back_sums<T>(s, r);
        const float all = s.log_of ? sums.dy + sums.sure : fmaf(-sums.sure, sums.y, sums.dy);

        /* Read the row again, and write its gradient. */
        float dy[8], y[8];
        Part p;
        MIXPI_PARTS(p, s.cols, T, rank) {
            get_part(s.dy, r * s.cols, p, s.wide, 0.0f, dy);
            get_part(s.y, r * s.cols, p, s.wide, 0.0f, y);
            MIXPI_UNROLL
            for (int k = 0; k < 8; k++) {
                if (!s.log_of) dy[k] = y[k] * ((dy[k] - sums.sure) - all);
                else if (is_sure(y[k], 1)) dy[k] = -fmaf(all, expm1f(y[k]), sums.dy);
                else dy[k] = fmaf(exp_of(y[k]), -all, dy[k]);
            }
            add_part(s.da, r * s.cols, p, s.wide, dy);
        }
    }
}

/* --- cross entropy --------------------------------------------------------------------- */

struct EntropyJob : mixp_cross_entropy_args {
    double   *losses;           /* one per row                                             */
    FaultFlag fault;
    bool      wide;
};
struct EntropyBackJob : mixp_cross_entropy_backward_args {
    FaultFlag fault;
    bool      wide;
};

/* The mean distance of a row's elements below the row's largest, times their columns' weights. */
template <int T> __device__ inline float row_below(const EntropyJob &s, int64_t row, float top) {
    int rank = (int)threadIdx.x % T;
    float sum = 0.0f, v[8];
    Part p;
    MIXPI_PARTS(p, s.cols, T, rank) {
        get_part(s.logits, row * s.cols, p, s.wide, top, v);
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) {
            float by = s.weights && k < p.n ? s.weights[p.col + k * p.step] : 1.0f;
            sum += k < p.n ? (top - v[k]) * by : 0.0f;
        }
    }
    return team_sum<T>(sum) / (float)s.cols;
}

/* The target's logit. Read it before dlogits overwrites it. */
__device__ inline float target_value(const EntropyJob &s, int64_t r) {
    int32_t target = s.targets[r];
    return is_id(target, s.cols) ? get1(s.logits, r * s.cols + target) : 0.0f;
}
/* A row of cross entropy: its largest element, and the exponentials of the target and of all other
 * columns. Their sum is not made before its use: it would lose `others` beside a target near 1. */
struct RowExponents { float top, hot, others; };
template <int T, mixp_dtype D>
__device__ inline RowExponents entropy_exponents(
    const EntropyJob &s, int64_t r, const mixp_in &a, int64_t from, float at_target) {
    const int32_t target = s.targets[r];
    const bool counts = target != s.ignore && is_id(target, s.cols);
    const Exponents e = row_exponents<T, D>(a, from, s.cols, s.wide, counts ? target : -1);
    RowExponents all = { e.top, 0.0f, e.sum };
    if (!counts) return all;
    all.top = fmaxf(e.top, at_target);
    all.hot = exp_of(at_target - base_of(all.top));
    all.others = e.sum * exp_of(e.top - base_of(all.top));
    return all;
}

/* The loss of a row whose target is valid. Its parts are added in double. */
__device__ inline double loss_of_row(
    const EntropyJob &s, int32_t target, const RowExponents &e, float below, float at_target) {
    float top = e.top - at_target, log_sum = log1pf(e.others + (e.hot - 1.0f));
    double loss = (double)top + (double)log_sum;
    if (s.weights) {
        double smooth = (double)s.smoothing, mean = (double)s.weights[s.cols];
        loss *= (1.0 - smooth) * (double)s.weights[target];
        if (s.smoothing > 0.0f) loss += smooth * ((double)below + mean * (double)log_sum);
    } else if (s.smoothing > 0.0f) {
        loss += s.smoothing * ((double)below - (double)top);
    }
    return loss;
}
/* Stores the row's loss. */
__device__ inline void put_loss(
    const EntropyJob &s, int64_t r, const RowExponents &e, float below, float at_target) {
    /* Compute the loss: 0 for an ignored row, NaN for a target that is no column. */
    const int32_t target = s.targets[r];
    double loss = 0.0;
    if (target != s.ignore && !is_id(target, s.cols)) {
        note_fault(s.fault, FAULT_TARGET, s.before + r, target);
        loss = (double)not_a_number();
    } else if (target != s.ignore) {
        loss = loss_of_row(s, target, e, below, at_target);
    }

    /* Store the loss, and what the backward pass needs of the row's softmax. */
    if (!s.logs) {
        s.stats[3 * r] = e.top;
        s.stats[3 * r + 1] = 1.0f / (e.hot + e.others);
        s.stats[3 * r + 2] = e.others / (e.hot + e.others);
    }
    s.losses[r] = loss;
    if (s.each) s.each[r] = (float)loss;
}
template <int T, mixp_dtype D>
__global__ void __launch_bounds__(team_threads, 3)
    entropy_rows(const __grid_constant__ EntropyJob s) {
    int rank = (int)threadIdx.x % T;
    for (int64_t r = team_first<T>(); r < s.rows; r += team_step<T>()) {
        const float at_target = target_value(s, r);
        RowExponents e = { 0.0f, 1.0f, 0.0f };
        float below = 0.0f;
        if (!s.logs) e = entropy_exponents<T, D>(s, r, s.logits, r * s.cols, at_target);
        if (s.smoothing > 0.0f) below = row_below<T>(s, r, e.top);
        if (rank == 0) put_loss(s, r, e, below, at_target);
    }
}

/* The two kernels below run as one block. No other block hides their load latency, so a thread
 * loads 8 values at a time. */
const int loads_ahead = 8;

/* How many of a thread's rows count. */
__device__ inline int64_t counted_rows(const EntropyJob &s) {
    const int64_t step = (int64_t)blockDim.x;
    int64_t i = (int64_t)threadIdx.x, count = 0;
    int32_t target[loads_ahead];
    for (; i + (loads_ahead - 1) * step < s.rows; i += loads_ahead * step) {
        MIXPI_UNROLL
        for (int k = 0; k < loads_ahead; k++) target[k] = s.targets[i + k * step];
        MIXPI_UNROLL
        for (int k = 0; k < loads_ahead; k++) count += target[k] != s.ignore;
    }
    for (; i < s.rows; i += step) count += s.targets[i] != s.ignore;
    return count;
}

/* The sum of a thread's rows' losses, in order. */
__device__ inline double summed_losses(const EntropyJob &s) {
    const int64_t step = (int64_t)blockDim.x;
    int64_t i = (int64_t)threadIdx.x;
    double sum = 0.0, loss[loads_ahead];
    for (; i + (loads_ahead - 1) * step < s.rows; i += loads_ahead * step) {
        MIXPI_UNROLL
        for (int k = 0; k < loads_ahead; k++) loss[k] = s.losses[i + k * step];
        MIXPI_UNROLL
        for (int k = 0; k < loads_ahead; k++) sum += loss[k];
    }
    for (; i < s.rows; i += step) sum += s.losses[i];
    return sum;
}

/* The weights of the targets of a thread's rows. */
__device__ inline double counted_weights(const EntropyJob &s) {
    double sum = 0.0;
    for (int64_t i = (int64_t)threadIdx.x; i < s.rows; i += (int64_t)blockDim.x) {
        int32_t target = s.targets[i];
        if (target != s.ignore && is_id(target, s.cols)) sum += (double)s.weights[target];
    }
    return sum;
}

/* The mean over the counted rows, or the sum. */
__global__ void __launch_bounds__(1024) entropy_mean(const __grid_constant__ EntropyJob s) {
    double sum = block_sum(summed_losses(s));
    double count = s.weights ? block_sum(counted_weights(s)) : (double)block_sum(counted_rows(s));
    if (threadIdx.x) return;

    /* Continue the mean of earlier rows. */
    if (s.before > 0) {
        const double had = (double)*s.counted;
        sum += (double)*s.loss * (had != 0.0 ? had : 1.0);
        count += had;
    }

    /* Divide by the count, which is 1 for a sum. The mean of no rows is NaN, unless more follow. */
    if (s.sum) count = 1.0;
    *s.counted = (float)count;
    if (count != 0.0) *s.loss = (float)(sum / count);
    else *s.loss = s.more ? (float)sum : not_a_number();
}

/* The gradient of a row: by (all softmax - others), and by (target - others) at the target, whose
 * all p - hot with p near 1 is made of the others' probability. */
struct Slopes {
    float by, all, target, others;
};
__device__ inline float target_slope(float all, float spread, float rest) {
    return fmaf(-all, rest, spread);
}
__device__ inline Slopes slopes_of(const EntropyBackJob &s, int64_t r, float factor, bool counts) {
    Slopes d = { factor, 1.0f, 0.0f, 0.0f };
    float hot = 1.0f - s.smoothing, spread = s.smoothing;
    if (s.smoothing > 0.0f) d.others = s.smoothing / (float)s.cols;
    if (s.each) d.by = get1(s.dloss, r);
    if (s.weights && counts) {
        hot *= s.weights[s.targets[r]];
        spread *= s.weights[s.cols];
        d.all = hot + spread;
    }
    d.target = s.logs ? -hot : target_slope(d.all, spread, s.stats[3 * r + 2]);
    return d;
}

/* factor (softmax - onehot); zeros for an ignored row, even if it contains NaN. */
template <int T, mixp_dtype D>
__global__ void __launch_bounds__(team_threads, 3)
    entropy_back_rows(const __grid_constant__ EntropyBackJob s) {
    const int rank = (int)threadIdx.x % T;
    const float factor = s.each ? 0.0f : get1(s.dloss, 0) / *s.counted;
    float v[8];
    for (int64_t r = team_first<T>(); r < s.rows; r += team_step<T>()) {
        /* Read the row's target, and what the forward pass stored. */
        const int32_t target = s.targets[r];
        const bool ignored = target == s.ignore, bad = !ignored && !is_id(target, s.cols);
        Slopes d = slopes_of(s, r, factor, !ignored && !bad);
        const float top = s.logs ? 0.0f : s.stats[3 * r];
        const float rsum = s.logs ? 0.0f : s.stats[3 * r + 1] * d.all;

        /* Skip an ignored row that adds nothing; report a target that is no column. */
        if (ignored && s.dlogits.accumulate) continue;
        if (bad) d.by = not_a_number();
        if (bad && rank == 0) note_fault(s.fault, FAULT_TARGET, r, target);

        /* Write the row's gradient. */
        Part p;
        MIXPI_TYPED_PARTS(D, p, s.cols, T, rank) {
            const int hot_at = (int)(target - p.col);
            if (!ignored) typed_get_part<D>(s.logits, r * s.cols, p, s.wide, 0.0f, v);
            MIXPI_UNROLL
            for (int k = 0; k < 8; k++) {
                float others = d.others, share = s.logs ? 0.0f : exp_of(v[k] - top) * rsum;
                if (k * p.step == hot_at) share = d.target;
                if (s.weights && k < p.n) others *= s.weights[p.col + k * p.step];
                v[k] = ignored ? 0.0f : (share - others) * d.by;
            }
            typed_add_part<D>(s.dlogits, r * s.cols, p, s.wide, v);
        }
    }
}

/* Loss and gradient in one pass. If it fits, a row stays in shared memory for its second read. Each
 * thread copies only the elements that it reads, so no thread waits for another. The block's next
 * row overwrites elements after their second read; its copy overlaps the rest of that read. */
struct EntropyBothJob : EntropyJob {
    mixp_out     dlogits;
    const float *scale;
    float        share;
    int          kept;          /* bytes of a row in shared memory; 0: rows are read twice */
};
/* Bytes for a block's sums. They and a row of 50,304 2-byte elements fit the 99 KB of capability
 * 8.6, 8.9 and 12.0. */
const int beside_row = 512;

/* Counts the rows that count: the divisor of each gradient. */
__global__ void __launch_bounds__(1024) entropy_count(const __grid_constant__ EntropyBothJob s) {
    int64_t count = block_sum(counted_rows(s));
    if (threadIdx.x == 0) *s.counted = (float)count;
}

/* The row to fetch into shared memory; NULL: there is no such row, or rows do not stay there. */
__device__ inline const char *row_to_fetch(const EntropyBothJob &s, int64_t row) {
    return s.kept && row < s.rows ? (const char *)s.logits.data + row * s.kept : NULL;
}
/* Starts the copy of a row's 8 elements from `col`. */
template <mixp_dtype D> __device__ inline void fetch_part(const char *row, int64_t col) {
    MIXPI_DYNAMIC_SHARED(char, kept);
    const int at = (int)col * dtype_bytes(D);
    cp_async_16(kept + at, row + at, 16);
    if (D == MIXP_F32) cp_async_16(kept + at + 16, row + at + 16, 16);
}
template <mixp_dtype D> __device__ inline void fetch_row(const EntropyBothJob &s, const char *row) {
    for (int64_t col = 8 * (int64_t)threadIdx.x; row && col < s.cols; col += 8 * team_threads)
        fetch_part<D>(row, col);
    cp_async_commit();
}
template <mixp_dtype D> __device__ inline mixp_in fetched_row() {
    MIXPI_DYNAMIC_SHARED(char, kept);
    cp_async_wait<0>();
    return mixpi_in(kept, D);
}

/* As entropy_back_rows: the row's gradient, from `a` at `from`. Row `next`, unless it is NULL,
 * overwrites each part in shared memory after the part's gradient is stored. */
template <int T, mixp_dtype D>
__device__ inline void put_slopes(const EntropyBothJob &s, int64_t r, const mixp_in &a,
    int64_t from, const RowExponents &e, const char *next) {
    /* Find the factors of the row's gradient. */
    const int32_t target = s.targets[r];
    const bool ignored = target == s.ignore;
    const float others = s.smoothing > 0.0f ? s.smoothing / (float)s.cols : 0.0f;
    float by = __fmul_rn(*s.scale, s.share) / *s.counted;
    const float rsum = 1.0f / (e.hot + e.others);
    const float at_target = target_slope(1.0f, s.smoothing, e.others / (e.hot + e.others));
    if (!ignored && !is_id(target, s.cols)) by = not_a_number();

    /* Write the gradient part by part, and fetch the next row's part in its place. */
    const int rank = (int)threadIdx.x % T;
    const float hot = (at_target - others) * by;
    float v[8];
    Part p;
    MIXPI_TYPED_PARTS(D, p, s.cols, T, rank) {
        if (!ignored) typed_get_part<D>(a, from, p, s.wide, 0.0f, v);
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++)
            v[k] = ignored ? 0.0f : (exp_of(v[k] - e.top) * rsum - others) * by;
        set_column(p, ignored ? -1 : target, hot, v);
        typed_add_part<D>(s.dlogits, r * s.cols, p, s.wide, v);
        if (T == team_threads && next) fetch_part<D>(next, p.col);
    }
    if (T == team_threads && s.kept) cp_async_commit();
}

template <int T, mixp_dtype D>
__global__ void __launch_bounds__(team_threads, 3)
    entropy_both_rows(const __grid_constant__ EntropyBothJob s) {
    const bool kept = T == team_threads && s.kept;
    const int rank = (int)threadIdx.x % T;
    if (kept) fetch_row<D>(s, row_to_fetch(s, team_first<T>()));
    for (int64_t r = team_first<T>(); r < s.rows; r += team_step<T>()) {
        float at_target = target_value(s, r), below = 0.0f;
        mixp_in a = kept ? fetched_row<D>() : s.logits;
        const int64_t from = kept ? 0 : r * s.cols;

        /* Sum the row's exponentials, and store its loss. */
        const RowExponents e = entropy_exponents<T, D>(s, r, a, from, at_target);
        if (s.smoothing > 0.0f) below = row_below<T>(s, r, e.top);
        if (rank == 0) put_loss(s, r, e, below, at_target);

        /* Write the gradient. dlogits may be logits: lane 0 has read its target by now. */
        __syncwarp();
        put_slopes<T, D>(s, r, a, from, e, row_to_fetch(s, r + team_step<T>()));
    }
}

}   /* namespace */

static mixp_result mixpi_cuda_softmax(const mixp_exec *x, const mixp_softmax_args *k) {
    Kernel on(x);
    SoftmaxJob job = mixpi_cuda_job<SoftmaxJob>(*k);
    job.wide = is_wide(k->y) && is_wide(k->a);
    if (!on.state) return MIXP_ERR_ORDER;
    if (!is_real(k->y.dtype) || !is_real(k->a.dtype)) return MIXP_ERR_DTYPE;
    if (k->y.accumulate) return MIXP_ERR_ARGUMENT;
    if (k->rows <= 0 || k->cols <= 0) return MIXP_OK;
    return on.report("softmax", MIXPI_ROWS(softmax_rows, on, job));
}

static mixp_result mixpi_cuda_softmax_backward(
    const mixp_exec *x, const mixp_softmax_backward_args *k) {
    Kernel on(x);
    SoftmaxBackJob job = mixpi_cuda_job<SoftmaxBackJob>(*k);
    job.wide = is_wide(k->da) && is_wide(k->dy) && is_wide(k->y);
    if (!on.state) return MIXP_ERR_ORDER;
    if (!is_real(k->da.dtype) || !is_real(k->dy.dtype) || !is_real(k->y.dtype))
        return MIXP_ERR_DTYPE;
    if (k->rows <= 0 || k->cols <= 0) return MIXP_OK;
    return on.report("softmax_backward", MIXPI_ROWS(softmax_back_rows, on, job));
}

static cudaError_t mixpi_cuda_launch_entropy(const Kernel &on, const EntropyJob &job) {
    switch ((int)typed_rows(job.wide, job.cols, job.logits.dtype)) {
    case MIXP_F16: return MIXPI_TYPED_ROWS(entropy_rows, MIXP_F16, on, job);
    case MIXP_BF16: return MIXPI_TYPED_ROWS(entropy_rows, MIXP_BF16, on, job);
    case MIXP_F32: return MIXPI_TYPED_ROWS(entropy_rows, MIXP_F32, on, job);
    default: return MIXPI_TYPED_ROWS(entropy_rows, any_real, on, job);
    }
}

static cudaError_t mixpi_cuda_launch_entropy_back(const Kernel &on, const EntropyBackJob &job) {
    const bool typed = job.wide && job.logits.dtype == job.dlogits.dtype;
    switch ((int)typed_rows(typed, job.cols, job.logits.dtype)) {
    case MIXP_F16: return MIXPI_TYPED_ROWS(entropy_back_rows, MIXP_F16, on, job);
    case MIXP_BF16: return MIXPI_TYPED_ROWS(entropy_back_rows, MIXP_BF16, on, job);
    default: return MIXPI_TYPED_ROWS(entropy_back_rows, any_real, on, job);
    }
}

static mixp_result mixpi_cuda_cross_entropy(const mixp_exec *x, const mixp_cross_entropy_args *k) {
    Kernel on(x);
    if (!on.state) return MIXP_ERR_ORDER;
    if (!is_real(k->logits.dtype)) return MIXP_ERR_DTYPE;

    /* Compute each row's loss. */
    EntropyJob job = mixpi_cuda_job<EntropyJob>(*k);
    job.fault = fault_flag(on.state);
    job.wide = is_wide(k->logits);
    job.losses = (double *)scratch_of(x, (size_t)k->rows * sizeof(double));
    if (!job.losses) return MIXP_ERR_MEMORY;
    mixp_result r = MIXP_OK;
    if (k->rows > 0) r = on.report("cross_entropy", mixpi_cuda_launch_entropy(on, job));
    if (r != MIXP_OK || k->each) return r;

    /* Reduce the losses to their mean, or to their sum. */
    return on.report("cross_entropy", MIXPI_LAUNCH(entropy_mean, 1, 1024, 0, on.stream, job));
}

static mixp_result mixpi_cuda_cross_entropy_backward(
    const mixp_exec *x, const mixp_cross_entropy_backward_args *k) {
    Kernel on(x);
    EntropyBackJob job = mixpi_cuda_job<EntropyBackJob>(*k);
    job.fault = fault_flag(on.state);
    job.wide = is_wide(k->dlogits) && is_wide(k->logits);
    if (!on.state) return MIXP_ERR_ORDER;
    if (!is_real(k->dlogits.dtype) || !is_real(k->dloss.dtype) || !is_real(k->logits.dtype))
        return MIXP_ERR_DTYPE;
    if (k->rows <= 0 || k->cols <= 0) return MIXP_OK;
    return on.report("cross_entropy_backward", mixpi_cuda_launch_entropy_back(on, job));
}

template <mixp_dtype D>
static cudaError_t mixpi_cuda_launch_both_of(const Kernel &on, const EntropyBothJob &job) {
    auto kernel = job.cols <= warp_cols ? entropy_both_rows<warp_size, D>
                                        : entropy_both_rows<team_threads, D>;
    const size_t room = job.kept ? (size_t)job.kept + beside_row : 0;
    cudaError_t e = make_room(on.state, (const void *)kernel, room);
    if (e != cudaSuccess) return e;

    /* If rows stay in shared memory, launch only as many blocks as run at once: each block loads
     * its next row while it computes. */
    const int64_t team = job.cols <= warp_cols ? warp_size : team_threads;
    const int64_t most = job.kept ? 2 * (int64_t)on.state->processors : INT64_MAX;
    const int64_t blocks = least(grid_for(job.rows * team, team_threads), most);
    return MIXPI_LAUNCH(kernel, (unsigned)blocks, team_threads, (size_t)job.kept, on.stream, job);
}
static cudaError_t mixpi_cuda_launch_both(const Kernel &on, const EntropyBothJob &job) {
    switch ((int)typed_rows(job.wide, job.cols, job.logits.dtype)) {
    case MIXP_F16: return mixpi_cuda_launch_both_of<MIXP_F16>(on, job);
    case MIXP_BF16: return mixpi_cuda_launch_both_of<MIXP_BF16>(on, job);
    case MIXP_F32: return mixpi_cuda_launch_both_of<MIXP_F32>(on, job);
    default: return mixpi_cuda_launch_both_of<any_real>(on, job);
    }
}

/* The bytes of a row that stays in shared memory, next to the memory for a block's sums. */
static int mixpi_cuda_kept_row(const EntropyBothJob &job, int most) {
    int64_t bytes = job.cols * dtype_bytes(job.logits.dtype);
    bool fits = job.wide && job.cols % 8 == 0 && bytes <= most - beside_row;
    return fits && job.cols > warp_cols ? (int)bytes : 0;
}

static mixp_result mixpi_cuda_cross_entropy_both(
    const mixp_exec *x, const mixp_cross_entropy_both_args *k) {
    Kernel on(x);
    EntropyBothJob job = mixpi_cuda_job<EntropyBothJob>(k->loss);
    if (!on.state) return MIXP_ERR_ORDER;
    if (!is_real(job.logits.dtype) || !is_real(k->dlogits.dtype)) return MIXP_ERR_DTYPE;
    if (k->dlogits.accumulate || mixpi_entropy_has_options(&k->loss)) return MIXP_ERR_ARGUMENT;

    /* Fill the job. */
    job.fault = fault_flag(on.state);
    job.dlogits = k->dlogits;
    job.scale = k->scale;
    job.share = k->share;
    job.wide = is_wide(job.logits) && is_wide(job.dlogits) && job.logits.dtype == job.dlogits.dtype;
    job.kept = mixpi_cuda_kept_row(job, on.state->most_shared);
    job.losses = (double *)scratch_of(x, (size_t)job.rows * sizeof(double));
    if (!job.losses) return MIXP_ERR_MEMORY;

    /* Count the rows, compute each row's loss and gradient, then the mean of the losses. */
    mixp_result r =
        on.report("cross_entropy", MIXPI_LAUNCH(entropy_count, 1, 1024, 0, on.stream, job));
    if (r == MIXP_OK && job.rows > 0)
        r = on.report("cross_entropy", mixpi_cuda_launch_both(on, job));
    if (r != MIXP_OK) return r;
    return on.report("cross_entropy",
        MIXPI_LAUNCH(entropy_mean, 1, 1024, 0, on.stream, (const EntropyJob &)job));
}
namespace {

/* --- layer norm, rms norm -------------------------------------------------------------- *
 *
 * Means and squares: each thread adds 8 elements in f32, then sums in two floats. The variance
 * comes from a second read, around the mean. Each sum is multiplied by 2^-n before it is added,
 * where 2^n is the least power of two not below cols, so that it overflows only if the mean does.
 */
struct NormJob : mixp_norm_args {       /* rms: beta is absent                               */
    bool  wide;
    float share;                /* 2^-n, by which each sum is multiplied                     */
    float back, rest;           /* 2^n / cols in f32, and the remainder of that rounding     */
};

/* The mean of a row, from the sum of its elements times s.share. */
__device__ inline float row_share(const NormJob &s, const LongSum &a) {
    if (!is_finite(a.sum)) return a.sum;
    return fmaf(a.sum, s.back, fmaf(a.sum, s.rest, a.lost * s.back));
}
/* 1 / sqrt(variance + eps), from the sum of the squares times s.share. */
__device__ inline float rstd_of(const NormJob &s, const LongSum &squares) {
    return 1.0f / sqrtf(row_share(s, squares) + s.eps);
}

template <int T> __device__ inline float row_mean(const NormJob &s, int64_t row, int rank) {
    LongSum sum = { 0.0f, 0.0f };
    float v[8];
    Part p;
    MIXPI_PARTS(p, s.cols, T, rank) {
        float part = 0.0f;
        get_part(s.a, row, p, s.wide, 0.0f, v);
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) part += v[k];
        add_long(sum, part * s.share);
    }
    return row_share(s, team_sum<T>(sum));
}
template <int T>
__device__ inline float row_rstd(const NormJob &s, int64_t row, int rank, float mean) {
    LongSum sum = { 0.0f, 0.0f };
    float v[8];
    Part p;
    MIXPI_PARTS(p, s.cols, T, rank) {
        float part = 0.0f;
        get_part(s.a, row, p, s.wide, mean, v);
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) part = fmaf(v[k] - mean, v[k] - mean, part);
        add_long(sum, part * s.share);
    }
    return rstd_of(s, team_sum<T>(sum));
}

template <int T>
__global__ void __launch_bounds__(team_threads, 3) norm_rows(const __grid_constant__ NormJob s) {
    const int rank = (int)threadIdx.x % T;
    for (int64_t r = team_first<T>(); r < s.rows; r += team_step<T>()) {
        /* Find the row's mean and deviation, for which it is read twice. */
        const float mean = s.rms ? 0.0f : row_mean<T>(s, r * s.cols, rank);
        const float rstd = row_rstd<T>(s, r * s.cols, rank, mean);
        if (rank == 0 && !s.rms) s.mean[r] = mean;
        if (rank == 0) s.rstd[r] = rstd;

        /* Read the row again, and write its norm. */
        Part p;
        MIXPI_PARTS(p, s.cols, T, rank) {
            float v[8], g[8], b[8];
            get_part(s.a, r * s.cols, p, s.wide, 0.0f, v);
            get_part_or(s.gamma, p, s.wide, 1.0f, g);
            get_part_or(s.beta, p, s.wide, 0.0f, b);
            MIXPI_UNROLL
            for (int k = 0; k < 8; k++) v[k] = fmaf((v[k] - mean) * rstd, g[k], b[k]);
            put_part(s.y, r * s.cols, p, s.wide, v);
        }
    }
}

/* A row of up to 1,024 elements stays in the registers of its warp and is read once. The compiler
 * knows its dtype; gamma is f32. The sums have the same order, so the bits are the same. If B is a
 * dtype, b is added first, and the norm is computed from the stored sum, which has a's dtype. */
const mixp_dtype no_second = MIXP_DTYPE_COUNT;

template <mixp_dtype B, mixp_dtype In>
__device__ inline void add_second(const NormJob &s, int64_t at, float *v) {
    float b[8];
    plain_get8<B>(s.b.data, at, b);
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) v[k] += b[k];
    plain_put8<In>(s.sum.data, at, v);
    plain_round<In>(v);
}
template <mixp_dtype B, mixp_dtype In, int parts>
__device__ inline void read_row(const NormJob &s, int64_t row, int lane, float v[][8]) {
    MIXPI_UNROLL
    for (int q = 0; q < parts; q++) {
        int64_t col = 8 * (int64_t)(q * warp_size + lane);
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) v[q][k] = 0.0f;
        if (col < s.cols) plain_get8<In>(s.a.data, row + col, v[q]);
        if constexpr (B != no_second)
            if (col < s.cols) add_second<B, In>(s, row + col, v[q]);
    }
}
template <int parts> __device__ inline float kept_mean(const NormJob &s, const float v[][8]) {
    LongSum sum = { 0.0f, 0.0f };
    MIXPI_UNROLL
    for (int q = 0; q < parts; q++) {
        float part = 0.0f;
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) part += v[q][k];
        add_long(sum, part * s.share);
    }
    return row_share(s, warp_sum(sum));
}
template <int parts>
__device__ inline float kept_rstd(const NormJob &s, int lane, const float v[][8], float mean) {
    LongSum sum = { 0.0f, 0.0f };
    MIXPI_UNROLL
    for (int q = 0; q < parts; q++) {
        float part = 0.0f;
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) part = fmaf(v[q][k] - mean, v[q][k] - mean, part);
        if (8 * (int64_t)(q * warp_size + lane) < s.cols) add_long(sum, part * s.share);
    }
    return rstd_of(s, warp_sum(sum));
}
template <mixp_dtype Out>
__device__ inline void put_normed(
    const NormJob &s, int64_t row, int64_t col, float *v, float mean, float rstd) {
    float g[8], b[8] = { 0, 0, 0, 0, 0, 0, 0, 0 };
    plain_get8<MIXP_F32>(s.gamma.data, col, g);
    if (s.beta.data) plain_get8<MIXP_F32>(s.beta.data, col, b);
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) v[k] = fmaf((v[k] - mean) * rstd, g[k], b[k]);
    plain_put8<Out>(s.y.data, row + col, v);
}

template <mixp_dtype B, mixp_dtype In, mixp_dtype Out, int parts>
__global__ void __launch_bounds__(team_threads, parts == 4 ? 2 : 3)
    norm_kept_rows(const __grid_constant__ NormJob s) {
    const int lane = (int)threadIdx.x % warp_size;
    for (int64_t r = team_first<warp_size>(); r < s.rows; r += team_step<warp_size>()) {
        /* Read the row, and find its mean and deviation in registers. */
        float v[parts][8];
        read_row<B, In, parts>(s, r * s.cols, lane, v);
        const float mean = s.rms ? 0.0f : kept_mean<parts>(s, v);
        const float rstd = kept_rstd<parts>(s, lane, v, mean);
        if (lane == 0 && !s.rms) s.mean[r] = mean;
        if (lane == 0) s.rstd[r] = rstd;

        /* Write the norm. */
        MIXPI_UNROLL
        for (int q = 0; q < parts; q++) {
            int64_t col = 8 * (int64_t)(q * warp_size + lane);
            if (col < s.cols) put_normed<Out>(s, r * s.cols, col, v[q], mean, rstd);
        }
    }
}

typedef void (*NormKernel)(NormJob s);

template <mixp_dtype B, mixp_dtype In, mixp_dtype Out> inline NormKernel norm_kept(int64_t cols) {
    return cols <= 512   ? norm_kept_rows<B, In, Out, 2>
           : cols <= 768 ? norm_kept_rows<B, In, Out, 3>
                         : norm_kept_rows<B, In, Out, 4>;
}
/* Does a row stay in registers? */
inline bool is_kept_norm(const NormJob &s) {
    if (!s.wide || s.cols % 8 || s.cols > warp_cols) return false;
    if (!s.gamma.data || s.gamma.dtype != MIXP_F32) return false;
    return !s.beta.data || s.beta.dtype == MIXP_F32;
}
/* The kernel for these dtypes and that length, or NULL. */
inline NormKernel norm_kernel(const NormJob &s) {
    mixp_dtype in = s.a.dtype, out = s.y.dtype;
    if (!is_kept_norm(s)) return NULL;
    if (in == MIXP_BF16 && out == in) return norm_kept<no_second, MIXP_BF16, MIXP_BF16>(s.cols);
    if (in == MIXP_F16 && out == in) return norm_kept<no_second, MIXP_F16, MIXP_F16>(s.cols);
    if (in != MIXP_F32) return NULL;
    return out == MIXP_F32    ? norm_kept<no_second, MIXP_F32, MIXP_F32>(s.cols)
           : out == MIXP_BF16 ? norm_kept<no_second, MIXP_F32, MIXP_BF16>(s.cols)
                              : norm_kept<no_second, MIXP_F32, MIXP_F16>(s.cols);
}
/* norm_kernel for add_norm. Covers the dtypes of levels 0 to 2, where norms write the operands of
 * products. */
inline NormKernel add_norm_kernel(const NormJob &s) {
    mixp_dtype in = s.a.dtype, b = s.b.dtype;
    if (!is_kept_norm(s) || s.sum.dtype != in || s.y.dtype != b) return NULL;
    if (in == MIXP_BF16 && b == in) return norm_kept<MIXP_BF16, MIXP_BF16, MIXP_BF16>(s.cols);
    if (in == MIXP_F16 && b == in) return norm_kept<MIXP_F16, MIXP_F16, MIXP_F16>(s.cols);
    if (in != MIXP_F32) return NULL;
    return b == MIXP_F32    ? norm_kept<MIXP_F32, MIXP_F32, MIXP_F32>(s.cols)
           : b == MIXP_BF16 ? norm_kept<MIXP_BF16, MIXP_F32, MIXP_BF16>(s.cols)
                            : norm_kept<MIXP_F16, MIXP_F32, MIXP_F16>(s.cols);
}

/* The backward pass: a block takes a slice of consecutive rows, so its threads keep their columns'
 * parts of dgamma and dbeta in registers. A second kernel adds the slices in order. Rows of more
 * than 8 elements per thread of a block are read again for the remaining columns. */
struct NormBackJob : mixp_norm_backward_args {
    int64_t per;                /* rows of a slice                                         */
    float  *partial;            /* [slice][2][cols], or NULL                               */
    bool    wide;
};
const int     back_threads = 512, join_cols = 32, join_rows = 32;
const int64_t most_slices = 1024;

/* dy, h = (a - mean) rstd and d = dy gamma of row r. */
__device__ inline void back_part(
    const NormBackJob &s, int64_t r, const Part &p, float *dy, float *h, float *d) {
    float mean = s.rms ? 0.0f : s.mean[r], rstd = s.rstd[r];
    get_part(s.a, r * s.cols, p, s.wide, mean, h);
    get_part(s.dy, r * s.cols, p, s.wide, 0.0f, dy);
    get_part_or(s.gamma, p, s.wide, 1.0f, d);
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) {
        h[k] = (h[k] - mean) * rstd;
        d[k] *= dy[k];
    }
}

/* Sums a and b over the block. parts: 64 floats that the previous call did not use. */
__device__ inline void block_sums(float &a, float &b, float *parts) {
    int lane = (int)threadIdx.x % warp_size, warp = (int)threadIdx.x / warp_size;
    bool there = lane < (int)blockDim.x / warp_size;
    a = warp_sum(a);
    b = warp_sum(b);
    if (lane == 0) {
        parts[warp] = a;
        parts[32 + warp] = b;
    }
    __syncthreads();
    a = warp_sum(there ? parts[lane] : 0.0f);
    b = warp_sum(there ? parts[32 + lane] : 0.0f);
}

__device__ inline void add_columns(float *dgamma, float *dbeta, const float *dy, const float *h) {
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) {
        dgamma[k] = fmaf(dy[k], h[k], dgamma[k]);
        dbeta[k] += dy[k];
    }
}
__device__ inline void put_columns(
    const NormBackJob &s, const Part &p, const float *dgamma, const float *dbeta) {
    mixp_out to = { s.partial, MIXP_F32, 0 };
    int64_t at = (int64_t)blockIdx.x * 2 * s.cols;
    put_part(to, at, p, true, dgamma);
    put_part(to, at + s.cols, p, true, dbeta);
}

/* Writes one part of da = rstd (d - mean(d) - h mean(d h)). v: d. */
__device__ inline void put_back(
    const NormBackJob &s, int64_t r, const Part &p, const float *h, float *v, float m1, float m2) {
    float rstd = s.rstd[r];
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) v[k] = fmaf(h[k], m2, v[k] + m1) * rstd;
    add_part(s.da, r * s.cols, p, s.wide, v);
    if (s.db.data) put_part(s.db, r * s.cols, p, s.wide, v);
}

__global__ void __launch_bounds__(back_threads)
    norm_back_slices(const __grid_constant__ NormBackJob s) {
    MIXPI_SHARED(float, parts, 128);
    const int team = (int)blockDim.x, rank = (int)threadIdx.x;
    const int64_t panel = 8 * (int64_t)team, first = (int64_t)blockIdx.x * s.per;
    const int64_t end = least(first + s.per, s.rows);
    float dy[8], h[8], d[8], dgamma[8] = { 0 }, dbeta[8] = { 0 };
    Part p;
    for (int64_t r = first; r < end; r++) {
        /* Sum d and d h over the row; add its first panel to dgamma and dbeta. */
        float sum = 0.0f, dot = 0.0f, scale = -1.0f / (float)s.cols;
        MIXPI_PARTS(p, s.cols, team, rank) {
            back_part(s, r, p, dy, h, d);
            MIXPI_UNROLL
            for (int k = 0; k < 8; k++) {
                sum += d[k];
                dot = fmaf(d[k], h[k], dot);
            }
            if (at_ == 0) add_columns(dgamma, dbeta, dy, h);
        }
        if (!s.da.data) continue;
        block_sums(sum, dot, parts + (r & 1) * 64);
        if (s.rms) sum = 0.0f;

        /* Write the row's gradient; a row of one panel is still in registers. */
        MIXPI_PARTS(p, s.cols, team, rank) {
            if (s.cols > panel) back_part(s, r, p, dy, h, d);
            put_back(s, r, p, h, d, sum * scale, dot * scale);
        }
    }

    /* Store the slice's part of dgamma and dbeta, and compute it for the remaining panels. */
    if (!s.partial) return;
    put_columns(s, part_of(s.cols, 0, team, rank), dgamma, dbeta);
    for (int64_t start = panel; start < s.cols; start += panel) {
        p = part_of(s.cols, start, team, rank);
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) dgamma[k] = dbeta[k] = 0.0f;
        for (int64_t r = first; r < end; r++) {
            back_part(s, r, p, dy, h, d);
            add_columns(dgamma, dbeta, dy, h);
        }
        put_columns(s, p, dgamma, dbeta);
    }
}

/* The backward pass for rows of 8 columns per thread and known dtypes. The next row is fetched
 * while the current row is computed. The sums have the same order. */
const int kept_threads = 128;

template <mixp_dtype Dy, mixp_dtype A> struct BackRow {
    Raw8<Dy> dy;                /* 0 beyond the row                                        */
    Raw8<A>  a;
    float    mean, rstd;
};

template <mixp_dtype Dy, mixp_dtype A>
__device__ inline void read_back(
    BackRow<Dy, A> &row, const NormBackJob &s, int64_t r, int64_t col) {
    row.mean = s.rms ? 0.0f : s.mean[r];
    row.rstd = s.rstd[r];
    if (col >= s.cols) return;
    row.a = raw_get8<A>(s.a.data, r * s.cols + col);
    row.dy = raw_get8<Dy>(s.dy.data, r * s.cols + col);
}

template <mixp_dtype Dy, mixp_dtype A>
__global__ void __launch_bounds__(kept_threads, 6)
    norm_back_kept(const __grid_constant__ NormBackJob s) {
    MIXPI_SHARED(float, parts, 128);
    const int64_t first = (int64_t)blockIdx.x * s.per, end = least(first + s.per, s.rows);

    /* Read the columns' gamma, and begin to read the first row. */
    const int64_t col = 8 * (int64_t)threadIdx.x;
    const Part p = part_of(s.cols, 0, (int)blockDim.x, (int)threadIdx.x);
    float h[8], d[8], gamma[8], dgamma[8] = { 0 }, dbeta[8] = { 0 };
    BackRow<Dy, A> next;
    memset((void *)&next, 0, sizeof next);
    get_part_or(s.gamma, p, s.wide, 1.0f, gamma);
    if (first < end) read_back(next, s, first, col);

    for (int64_t r = first; r < end; r++) {
        /* Use the row, and begin to read the next one. */
        float sum = 0.0f, dot = 0.0f, scale = -1.0f / (float)s.cols, rstd = next.rstd;
        plain_values<A>(next.a, h);
        plain_values<Dy>(next.dy, d);
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) h[k] = (h[k] - next.mean) * rstd;
        if (r + 1 < end) read_back(next, s, r + 1, col);

        /* Add the row to dgamma and dbeta, and sum d and d h over it. */
        add_columns(dgamma, dbeta, d, h);
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) {
            d[k] *= gamma[k];
            sum += d[k];
            dot = fmaf(d[k], h[k], dot);
        }
        if (!s.da.data) continue;
        block_sums(sum, dot, parts + (r & 1) * 64);
        if (s.rms) sum = 0.0f;

        /* Write the row's gradient. */
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) d[k] = fmaf(h[k], dot * scale, d[k] + sum * scale) * rstd;
        if (col >= s.cols) continue;
        typed_add_part<A>(s.da, r * s.cols, p, s.wide, d);
        if constexpr (A == MIXP_F32)
            if (s.db.data) plain_put8<Dy>(s.db.data, r * s.cols + col, d);
    }
    if (s.partial) put_columns(s, p, dgamma, dbeta);
}

typedef void (*NormBackKernel)(NormBackJob s);

inline NormBackKernel norm_back_kernel(const NormBackJob &s) {
    mixp_dtype a = s.a.dtype, dy = s.dy.dtype;
    bool fits = s.wide && s.cols % 8 == 0 && s.cols <= 8 * kept_threads;
    if (!fits || (s.da.data && s.da.dtype != a)) return norm_back_slices;
    if (s.db.data && s.db.dtype != dy) return norm_back_slices;
    if (a == MIXP_BF16 && dy == a) return norm_back_kept<MIXP_BF16, MIXP_BF16>;
    if (a == MIXP_F16 && dy == a) return norm_back_kept<MIXP_F16, MIXP_F16>;
    if (a != MIXP_F32) return norm_back_slices;
    return dy == MIXP_F32    ? norm_back_kept<MIXP_F32, MIXP_F32>
           : dy == MIXP_BF16 ? norm_back_kept<MIXP_BF16, MIXP_F32>
                             : norm_back_kept<MIXP_F16, MIXP_F32>;
}

/* Adds the slices: 32 sums for each column of a warp, then these sums in order. */
__global__ void __launch_bounds__(join_cols *join_rows)
    norm_back_join(const __grid_constant__ NormBackJob s, int64_t slices) {
    MIXPI_SHARED(float, sums, join_rows *(join_cols + 1));
    const mixp_out to = blockIdx.y ? s.dbeta : s.dgamma;
    const int lane = (int)threadIdx.x % join_cols, own = (int)threadIdx.x / join_cols;
    const int64_t col = (int64_t)blockIdx.x * join_cols + lane;
    if (!to.data) return;

    /* Add every 32nd slice of the column. */
    float sum = 0.0f;
    for (int64_t i = own; i < slices && col < s.cols; i += join_rows)
        sum += s.partial[(2 * i + blockIdx.y) * s.cols + col];
    sums[own * (join_cols + 1) + lane] = sum;
    __syncthreads();

    /* Add the column's 32 sums in order. */
    if (own || col >= s.cols) return;
    for (int i = 1; i < join_rows; i++) sum += sums[i * (join_cols + 1) + lane];
    if (to.accumulate) sum += get1(as_in(to), col);
    put1(to, col, sum);
}

}   /* namespace */

static NormJob mixpi_cuda_norm_job(const mixp_norm_args *k) {
    NormJob job = mixpi_cuda_job<NormJob>(*k);
    double power = 1.0;
    while (power < (double)k->cols) power *= 2.0;
    job.share = (float)(1.0 / power);
    job.back = k->cols > 0 ? (float)(power / (double)k->cols) : 1.0f;
    job.rest = k->cols > 0 ? (float)(power / (double)k->cols - (double)job.back) : 0.0f;
    if (k->rms) job.beta.data = NULL;
    job.wide = is_wide(k->y) && is_wide(k->a) && is_wide(k->gamma) && is_wide(job.beta);
    return job;
}
static mixp_result mixpi_cuda_norm_check(const NormJob &job) {
    if (!is_real(job.y.dtype) || !is_real(job.a.dtype) || !is_real_or_absent(job.gamma) ||
        !is_real_or_absent(job.beta))
        return MIXP_ERR_DTYPE;
    return job.y.accumulate ? MIXP_ERR_ARGUMENT : MIXP_OK;
}

static mixp_result mixpi_cuda_norm(const mixp_exec *x, const mixp_norm_args *k) {
    Kernel on(x);
    NormJob job = mixpi_cuda_norm_job(k);
    mixp_result r = mixpi_cuda_norm_check(job);
    if (!on.state) return MIXP_ERR_ORDER;
    if (r != MIXP_OK) return r;
    if (k->rows <= 0 || k->cols <= 0) return MIXP_OK;
    NormKernel kept = norm_kernel(job);
    if (kept)
        return on.report("norm", MIXPI_LAUNCH(kept, grid_for(k->rows * warp_size, team_threads),
                                     team_threads, 0, on.stream, job));
    return on.report("norm", MIXPI_ROWS(norm_rows, on, job));
}

/* Computes the sum in a separate kernel, then its norm. */
static mixp_result mixpi_cuda_add_then_norm(const mixp_exec *x, const mixp_norm_args *k) {
    mixp_binary_args sum;
    memset((void *)&sum, 0, sizeof sum);
    sum.op = MIXP_BINARY_ADD;
    sum.rank = 1;
    sum.shape[0] = k->rows * k->cols;
    sum.a_strides[0] = sum.b_strides[0] = 1;
    sum.a = k->a;
    sum.b = k->b;
    sum.y = k->sum;
    mixp_result r = mixpi_cuda_binary(x, &sum);
    if (r != MIXP_OK) return r;

    mixp_norm_args norm = *k;
    norm.a = as_in(k->sum);
    return mixpi_cuda_norm(x, &norm);
}

static mixp_result mixpi_cuda_add_norm(const mixp_exec *x, const mixp_norm_args *k) {
    Kernel on(x);
    NormJob job = mixpi_cuda_norm_job(k);
    mixp_result r = mixpi_cuda_norm_check(job);
    job.wide = job.wide && is_wide(k->b) && is_wide(k->sum);
    if (!on.state) return MIXP_ERR_ORDER;
    if (!is_real(k->b.dtype) || !is_real(k->sum.dtype)) return MIXP_ERR_DTYPE;
    if (r != MIXP_OK || k->sum.accumulate) return r != MIXP_OK ? r : MIXP_ERR_ARGUMENT;
    if (k->rows <= 0 || k->cols <= 0) return MIXP_OK;
    NormKernel kept = add_norm_kernel(job);
    if (!kept) return mixpi_cuda_add_then_norm(x, k);
    return on.report("add_norm", MIXPI_LAUNCH(kept, grid_for(k->rows * warp_size, team_threads),
                                     team_threads, 0, on.stream, job));
}

static mixp_result mixpi_cuda_norm_backward(const mixp_exec *x, const mixp_norm_backward_args *k) {
    Kernel on(x);
    if (!on.state) return MIXP_ERR_ORDER;
    if (!is_real(k->dy.dtype) || !is_real(k->a.dtype) || !is_real_or_absent(k->gamma) ||
        !is_real_or_absent(k->da) || !is_real_or_absent(k->dgamma) ||
        !is_real_or_absent(k->dbeta) || !is_real_or_absent(k->db))
        return MIXP_ERR_DTYPE;
    if (k->db.data && (!k->da.data || k->da.dtype != MIXP_F32 || k->db.accumulate))
        return MIXP_ERR_ARGUMENT;

    /* Cut the rows into slices; with sums of columns, a slice has at least 4 rows. */
    NormBackJob job = mixpi_cuda_job<NormBackJob>(*k);
    const bool sums = k->dgamma.data || k->dbeta.data;
    job.wide =
        is_wide(k->da) && is_wide(k->dy) && is_wide(k->a) && is_wide(k->gamma) && is_wide(k->db);
    job.per = ceil_div(k->rows, most_slices);
    if (sums && job.per < 4) job.per = 4;
    const int64_t slices = ceil_div(k->rows, job.per > 0 ? job.per : 1);
    if (sums) job.partial = (float *)scratch_of(x, (size_t)(slices * 2 * k->cols) * sizeof(float));
    if (sums && !job.partial) return MIXP_ERR_MEMORY;
    if (k->cols <= 0) return MIXP_OK;

    /* Compute da and each slice's sums of columns. */
    mixp_result r = MIXP_OK;
    if (k->rows > 0 && (sums || k->da.data)) {
        const int64_t threads = least(round_up(ceil_div(k->cols, 8), warp_size), back_threads);
        r = on.report("norm_backward", MIXPI_LAUNCH(norm_back_kernel(job), (unsigned)slices,
                                           (unsigned)threads, 0, on.stream, job));
    }
    if (r != MIXP_OK || !sums) return r;

    /* Add the slices' sums. */
    return on.report("norm_backward",
        MIXPI_LAUNCH(norm_back_join, dim3((unsigned)ceil_div(k->cols, join_cols), 2),
            join_cols * join_rows, 0, on.stream, job, slices));
}
namespace {

/* --- embedding ------------------------------------------------------------------------- */

struct EmbeddingJob : mixp_embedding_args {
    FaultFlag fault;
    bool      wide;
};
struct EmbeddingBackJob : mixp_embedding_backward_args {
    FaultFlag fault;
    int32_t  *bag;              /* of bags: the bag of each id, and its factor             */
    float    *factor;
    bool      wide;
};

/* Copies a row's bits with a warp: from element `from` of the table to element `to` of y. */
__device__ inline void copy_row(const EmbeddingJob &s, int64_t to, int64_t from, int lane) {
    if (s.wide && s.cols % 8 == 0) {
        int64_t size = dtype_bytes(s.y.dtype), n = s.cols * size / 16;
        uint4 *q = (uint4 *)(void *)((char *)s.y.data + to * size);
        const uint4 *p = (const uint4 *)(const void *)((const char *)s.table.data + from * size);
        for (int64_t i = lane; i < n; i += warp_size) q[i] = p[i];
    } else if (s.y.dtype == MIXP_F32) {
        for (int64_t i = lane; i < s.cols; i += warp_size)
            ((uint32_t *)s.y.data)[to + i] = ((const uint32_t *)s.table.data)[from + i];
    } else {
        for (int64_t i = lane; i < s.cols; i += warp_size)
            ((uint16_t *)s.y.data)[to + i] = ((const uint16_t *)s.table.data)[from + i];
    }
}

__global__ void __launch_bounds__(team_threads, 4)
    embedding_rows(const __grid_constant__ EmbeddingJob s) {
    const int lane = (int)threadIdx.x % warp_size;
    for (int64_t r = team_first<warp_size>(); r < s.rows; r += team_step<warp_size>()) {
        const int32_t id = s.ids[r];
        const bool good = is_id(id, s.vocab);
        if (!good && lane == 0) note_fault(s.fault, FAULT_EMBEDDING_ID, r, id);

        /* Copy the bits of a row of the same dtype. */
        if (good && s.y.dtype == s.table.dtype) {
            copy_row(s, r * s.cols, id * s.cols, lane);
            continue;
        }

        /* Convert the row; an id out of range gives NaN. */
        Part p;
        MIXPI_PARTS(p, s.cols, warp_size, lane) {
            float v[8];
            if (good) get_part(s.table, id * s.cols, p, s.wide, 0.0f, v);
            MIXPI_UNROLL
            for (int k = 0; k < 8; k++)
                if (!good) v[k] = not_a_number();
            put_part(s.y, r * s.cols, p, s.wide, v);
        }
    }
}

/* --- bags --- */

struct BagRange { int64_t first, end; };

/* The ids of a bag. Notes an offset that falls or is out of range; the bag then has no ids. */
__device__ inline BagRange bag_range(
    const mixp_bags &b, int64_t rows, int64_t bag, const FaultFlag &fault, bool *good) {
    BagRange r = { bag * b.width, (bag + 1) * b.width };
    *good = true;
    if (!b.offsets) return r;
    r.first = b.offsets[bag];
    r.end = bag + 1 < b.count ? b.offsets[bag + 1] : rows;
    *good = r.first >= 0 && r.first <= rows && r.end >= r.first && r.end <= rows &&
            (bag || r.first == 0);
    if (*good) return r;
    note_fault(fault, FAULT_BAG_OFFSET, bag, (int32_t)r.first);
    r.first = r.end = 0;
    return r;
}

__device__ inline bool is_nan_bits(float x) {
    return (mixp_bits_of_f32(x) & 0x7FFFFFFFu) > 0x7F800000u;
}

/* One column of a bag: its sum, or its maximum with its place. */
__device__ inline float bag_column(const EmbeddingJob &s, BagRange r, int64_t bag, int64_t col) {
    const mixp_bags &b = s.bags;
    int32_t *at = b.largest ? b.largest + bag * s.cols + col : NULL;
    int32_t place = -1;
    float y = 0.0f;
    if (at && b.follow)
        return *at >= 0 && is_id(s.ids[*at], s.vocab)
                   ? get1(s.table, (int64_t)s.ids[*at] * s.cols + col)
                   : 0.0f;
    for (int64_t j = r.first; j < r.end; j++) {
        const int32_t id = s.ids[j];
        if (id == b.padding) continue;
        const float x =
            is_id(id, s.vocab) ? get1(s.table, (int64_t)id * s.cols + col) : not_a_number();
        if (!at) y = b.weights.data ? fmaf(get1(b.weights, j), x, y) : __fadd_rn(y, x);
        else if (place < 0 || (!is_nan_bits(y) && (is_nan_bits(x) || x > y))) {
            y = x;
            place = (int32_t)j;
        }
    }
    if (at) *at = place;
    return y;
}

/* A warp computes a bag, a column in each lane, with the CPU's bits. */
__global__ void __launch_bounds__(team_threads, 4)
    embedding_bags(const __grid_constant__ EmbeddingJob s) {
    const mixp_bags &b = s.bags;
    const int lane = (int)threadIdx.x % warp_size;
    for (int64_t bag = team_first<warp_size>(); bag < b.count; bag += team_step<warp_size>()) {
        bool good;
        int64_t counted = 0;
        const BagRange r = bag_range(b, s.rows, bag, s.fault, &good);
        for (int64_t j = r.first; j < r.end; j++) {
            const int32_t id = s.ids[j];
            if (id != b.padding && !is_id(id, s.vocab) && lane == 0)
                note_fault(s.fault, FAULT_EMBEDDING_ID, j, id);
            counted += id != b.padding;
        }
        for (int64_t col = lane; col < s.cols; col += warp_size) {
            float y = good ? bag_column(s, r, bag, col) : not_a_number();
            if (b.mode == MIXP_BAG_MEAN && counted) y = __fdiv_rn(y, (float)counted);
            put1(s.y, bag * s.cols + col, y);
        }
    }
}

/* Where a bag's gradient goes: the bag and the factor of each id; the bag is -1 where no bag has
 * the id. */
__global__ void __launch_bounds__(team_threads)
    embedding_bag_ids(const __grid_constant__ EmbeddingBackJob s) {
    const mixp_bags &b = s.bags;
    int64_t bag = (int64_t)blockIdx.x * team_threads + threadIdx.x;
    for (; bag < b.count; bag += (int64_t)gridDim.x * team_threads) {
        bool good;
        int64_t counted = 0;
        const BagRange r = bag_range(b, s.rows, bag, s.fault, &good);
        for (int64_t j = r.first; j < r.end; j++) counted += s.ids[j] != b.padding;
        const float n = b.mode == MIXP_BAG_MEAN ? (float)counted : 1.0f;
        for (int64_t j = r.first; j < r.end; j++) {
            s.bag[j] = (int32_t)bag;
            s.factor[j] = b.weights.data ? get1(b.weights, j) : __fdiv_rn(1.0f, n);
        }
    }
}

/* The gradients of the weights, a warp for each id. Sums differ from the CPU's in their order. */
__global__ void __launch_bounds__(team_threads)
    embedding_bag_weights(const __grid_constant__ EmbeddingBackJob s) {
    const int lane = (int)threadIdx.x % warp_size;
    for (int64_t j = team_first<warp_size>(); j < s.rows; j += team_step<warp_size>()) {
        const int32_t id = s.ids[j], bag = s.bag[j];
        float sum = 0.0f;
        if (bag >= 0 && id != s.bags.padding && is_id(id, s.vocab))
            for (int64_t c = lane; c < s.cols; c += warp_size)
                sum = fmaf(get1(s.table, (int64_t)id * s.cols + c),
                    get1(s.dy, (int64_t)bag * s.cols + c), sum);
        sum = warp_sum(sum);
        if (lane == 0) store_real(s.dweights, j, sum);
    }
}

/* Adds to a sum what id i of a bag adds to column col of its row. */
__device__ inline float add_of_bag(const EmbeddingBackJob &s, int64_t i, int64_t col, float sum) {
    const int64_t at = (int64_t)s.bag[i] * s.cols + col;
    if (!s.bags.largest) return fmaf(s.factor[i], get1(s.dy, at), sum);
    return s.bags.largest[at] == i ? __fadd_rn(sum, get1(s.dy, at)) : sum;
}

/* The backward pass sorts the rows of dy by their id, stably, then adds the rows of each id in
 * order, in f32, and rounds once.
 *
 * The sort: a block owns up to 256 consecutive ids, [low, high), and each of its warps a share of
 * all rows. A warp counts the rows of each id in its share, which gives the places where they
 * begin. Then it places them, 32 rows at a time. No block waits for another. */
struct Sorted {
    int64_t *order;             /* rows, by id                                             */
    int64_t *start;             /* vocab + 1: where an id's rows begin in `order`          */
};
const int64_t id_blocks = 256;
const int     sort_warps = team_threads / warp_size;
const int     ids_ahead = 8;    /* ids that a thread loads at a time                       */

/* The ids of rows i, i + 32, ... before `end`; -1: there is no such row, or it adds to no id. */
__device__ inline void read_ids(const EmbeddingBackJob &s, int64_t i, int64_t end, int32_t *id) {
    MIXPI_UNROLL
    for (int k = 0; k < ids_ahead; k++)
        id[k] = i + k * warp_size < end ? s.ids[i + k * warp_size] : -1;
    if (!s.bag) return;
    MIXPI_UNROLL
    for (int k = 0; k < ids_ahead; k++) {
        const int64_t row = i + k * warp_size;
        if (row < end && (s.bag[row] < 0 || id[k] == s.bags.padding)) id[k] = -1;
    }
}

/* Counts the ids of the block in rows [first, end) of a warp: `own` has a number per id. Returns
 * the number of rows with smaller ids in the thread's lane. */
__device__ inline int64_t count_ids(const EmbeddingBackJob &s, int64_t low, int64_t high,
    int64_t first, int64_t end, int32_t *own) {
    int64_t below = 0;
    int32_t id[ids_ahead];
    for (int64_t i = first + (int)threadIdx.x % warp_size; i < end; i += ids_ahead * warp_size) {
        read_ids(s, i, end, id);
        MIXPI_UNROLL
        for (int k = 0; k < ids_ahead; k++) {
            const int64_t row = i + k * warp_size;
            if (blockIdx.x == 0 && row < end && !is_id(id[k], s.vocab) && (!s.bag || id[k] >= 0))
                note_fault(s.fault, FAULT_EMBEDDING_ID, row, id[k]);
            below += id[k] >= 0 && id[k] < low;
            if (id[k] >= low && id[k] < high) atomicAdd(own + (id[k] - low), 1);
        }
    }
    return below;
}

/* Places a row in each lane of a warp, in the order of the lanes; an id of -1 has no row. next:
 * where the next row of each id goes. */
__device__ inline void place_rows(int64_t *order, int32_t *next, int32_t id, int64_t row) {
    const int lane = (int)threadIdx.x % warp_size;
    int before = 0, same = 0;
    MIXPI_UNROLL_BY(4)
    for (int k = 0; k < warp_size; k++) {
        const bool is = __shfl_sync(0xFFFFFFFFu, id, k) == id;
        before += is && k < lane;
        same += is;
    }
    const int32_t at = id >= 0 ? next[id] + before : 0;
    if (id >= 0) order[at] = row;
    __syncwarp();
    if (id >= 0 && before == 0) next[id] = at + same;
    __syncwarp();
}

__global__ void __launch_bounds__(team_threads)
    embedding_sort(const __grid_constant__ EmbeddingBackJob s, const Sorted to, int64_t each) {
    MIXPI_SHARED(int32_t, next, sort_warps * team_threads);
    const int me = (int)threadIdx.x, lane = me % warp_size, warp = me / warp_size;
    const int64_t low = (int64_t)blockIdx.x * each, high = least(low + each, s.vocab);
    const int64_t share = ceil_div(s.rows, sort_warps), first = warp * share;
    const int64_t end = least(first + share, s.rows);

    /* Count each warp's rows by id, and the rows with ids below the block's. */
    for (int k = me; k < sort_warps * team_threads; k += team_threads) next[k] = 0;
    __syncthreads();
    const int64_t below =
        block_sum(count_ids(s, low, high, first, end, next + warp * team_threads));

    /* Thread t finds where the rows of id low + t begin, and those of each warp among them. */
    int32_t mine = 0, all;
    for (int w = 0; w < sort_warps; w++) mine += next[w * team_threads + me];
    int32_t at = block_scan(mine, &all) - mine;
    if (low + me < high) to.start[low + me] = below + at;
    if (high == s.vocab && me == 0) to.start[s.vocab] = below + all;
    for (int w = 0; w < sort_warps; w++) {
        const int32_t count = next[w * team_threads + me];
        next[w * team_threads + me] = at;
        at += count;
    }
    __syncthreads();

    /* Place the rows, 32 at a time where any of them has an id of the block. Byte k of `found`
     * counts those of the k-th 32. */
    int32_t id[ids_ahead];
    for (int64_t i = first; i < end; i += ids_ahead * warp_size) {
        uint64_t found = 0;
        read_ids(s, i + lane, end, id);
        MIXPI_UNROLL
        for (int k = 0; k < ids_ahead; k++) {
            id[k] = id[k] >= low && id[k] < high ? (int32_t)(id[k] - low) : -1;
            found |= (uint64_t)(id[k] >= 0) << 8 * k;
        }
        found = warp_sum(found);
        MIXPI_UNROLL
        for (int k = 0; k < ids_ahead; k++)
            if (found >> 8 * k & 255)
                place_rows(
                    to.order + below, next + warp * team_threads, id[k], i + lane + k * warp_size);
    }
}

/* Adds the columns p of row i of dy to a sum, or what id i of a bag adds. */
template <mixp_dtype D>
__device__ inline void add_row(const EmbeddingBackJob &s, int64_t i, const Part &p, float *sum) {
    float v[8];
    if (!s.bag) typed_get_part<D>(s.dy, i * s.cols, p, s.wide, 0.0f, v);
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) {
        if (!s.bag) sum[k] += v[k];
        else if (k < p.n) sum[k] = add_of_bag(s, i, p.col + k * p.step, sum[k]);
    }
}

/* Each thread computes up to 8 columns of an id's row. Where 8 rows of vectors follow, it loads its
 * parts of them before it adds them. */
const int rows_ahead = 8;

template <mixp_dtype D>
__global__ void __launch_bounds__(team_threads)
    embedding_sums(const __grid_constant__ EmbeddingBackJob s, const Sorted by) {
    const int64_t panel = 8 * (int64_t)blockDim.x, panels = ceil_div(s.cols, panel);
    for (int64_t unit = blockIdx.x; unit < s.vocab * panels; unit += gridDim.x) {
        const int64_t id = unit / panels, to = id * s.cols, start = unit % panels * panel;
        const Part p = typed_part<D>(s.cols, start, (int)blockDim.x, (int)threadIdx.x);
        int64_t i = by.start[id], end = by.start[id + 1];
        if (p.col >= s.cols || (i == end && s.dtable.accumulate)) continue;
        float sum[8] = { 0 };
        if (s.dtable.accumulate) get_part(as_in(s.dtable), to, p, s.wide, 0.0f, sum);

        for (; D != any_real && i + rows_ahead <= end; i += rows_ahead) {
            Raw8<D> row[rows_ahead];
            float v[8];
            MIXPI_UNROLL
            for (int r = 0; r < rows_ahead; r++)
                row[r] = raw_get8<D>(s.dy.data, by.order[i + r] * s.cols + p.col);
            MIXPI_UNROLL
            for (int r = 0; r < rows_ahead; r++) {
                plain_values<D>(row[r], v);
                MIXPI_UNROLL
                for (int k = 0; k < 8; k++) sum[k] += v[k];
            }
        }
        for (; i < end; i++) add_row<D>(s, by.order[i], p, sum);
        put_part(s.dtable, to, p, s.wide, sum);
    }
}

/* --- gather ------------------------------------------------------------------------ */

struct GatherJob : mixp_gather_args { FaultFlag fault; };

/* One thread per element of y. */
__global__ void __launch_bounds__(team_threads)
    gather_elements(const __grid_constant__ GatherJob s) {
    int64_t i = (int64_t)blockIdx.x * team_threads + threadIdx.x;
    for (; i < s.outer * s.m * s.inner; i += (int64_t)gridDim.x * team_threads) {
        int64_t o = i / (s.m * s.inner), c = i % s.inner;
        int32_t id = s.ids[i];
        bool good = is_id(id, s.n);
        if (!good) note_fault(s.fault, FAULT_GATHER_ID, i, id);
        put1(s.y, i, good ? get1(s.a, (o * s.n + id) * s.inner + c) : not_a_number());
    }
}

/* One thread per column: no other thread adds to the column. */
__global__ void __launch_bounds__(team_threads) gather_back(const __grid_constant__ GatherJob s) {
    int64_t i = (int64_t)blockIdx.x * team_threads + threadIdx.x;
    for (; i < s.outer * s.inner; i += (int64_t)gridDim.x * team_threads) {
        int64_t o = i / s.inner, c = i % s.inner;
        for (int64_t j = 0; j < s.m; j++) {
            int64_t from = (o * s.m + j) * s.inner + c;
            int32_t id = s.ids[from];
            if (is_id(id, s.n)) store_real(s.y, (o * s.n + id) * s.inner + c, get1(s.a, from));
            else note_fault(s.fault, FAULT_GATHER_ID, from, id);
        }
    }
}

/* Gradients of rows from which many elements were taken, as a sort does: a warp keeps a row of y in
 * shared memory. Its first thread adds, in increasing order, 32 elements that the warp has read. */
const int gather_row_bytes = 48 * 1024;

inline int64_t gather_row_size(const mixp_gather_args &k) {
    return (int64_t)sizeof(float) * (k.n + warp_size) + (int64_t)sizeof(int32_t) * warp_size;
}
inline bool is_kept_gather(const mixp_gather_args &k) {
    bool many = k.m >= 8 && k.m < 1 << 30 && k.n <= 4 * k.m;
    return k.inner == 1 && many && gather_row_size(k) <= gather_row_bytes;
}

__device__ inline float rounded_to(mixp_dtype d, float x) {
    return d == MIXP_F32 ? x : low_value(d, low_code(d, x));
}

__global__ void __launch_bounds__(team_threads)
    gather_back_rows(const __grid_constant__ GatherJob s) {
    /* A warp's part of shared memory: the row's sums, then 32 values and their ids. */
    MIXPI_DYNAMIC_SHARED(float, shared);
    int warps = (int)blockDim.x / warp_size, lane = (int)threadIdx.x % warp_size;
    const int n = (int)s.n, m = (int)s.m;
    float *sums = shared + (int)threadIdx.x / warp_size * (n + 2 * warp_size);
    float *values = sums + n;
    int32_t *ids = (int32_t *)(void *)(values + warp_size);

    int64_t o = (int64_t)blockIdx.x * warps + (int)threadIdx.x / warp_size;
    for (; o < s.outer; o += (int64_t)gridDim.x * warps) {
        for (int j = lane; j < n; j += warp_size) sums[j] = get1(as_in(s.y), o * n + j);
        for (int first = 0; first < m; first += warp_size) {
            /* Read 32 values and their ids, one in each lane. */
            int64_t from = o * m + first + lane;
            bool there = first + lane < m;
            ids[lane] = there ? s.ids[from] : -1;
            values[lane] = there ? get1(s.a, from) : 0.0f;
            if (there && !is_id(ids[lane], n))
                note_fault(s.fault, FAULT_GATHER_ID, from, ids[lane]);
            __syncwarp();

            /* Add them in order, with lane 0. */
            MIXPI_UNROLL_BY(4)
            for (int i = 0; lane == 0 && i < warp_size; i++)
                if (is_id(ids[i], n))
                    sums[ids[i]] = rounded_to(s.y.dtype, __fadd_rn(sums[ids[i]], values[i]));
            __syncwarp();
        }
        for (int j = lane; j < n; j += warp_size) put1(s.y, o * n + j, sums[j]);
        __syncwarp();
    }
}

/* --- rotary embeddings ------------------------------------------------------------- */

struct RopeJob : mixp_rope_args { float *cosine, *sine; };

__global__ void __launch_bounds__(team_threads) rope_angles(const __grid_constant__ RopeJob s) {
    int64_t half = s.d / 2, i = (int64_t)blockIdx.x * team_threads + threadIdx.x;
    for (; i < s.t * half; i += (int64_t)gridDim.x * team_threads) {
        double step =
            s.scaled ? s.frequency[i % half] : pow(s.base, -2.0 * (double)(i % half) / (double)s.d);
        double sine, cosine; /* by sincospi: sin and cos would need a stack           */
        sincospi((double)(s.first + i / half) * step * 0.31830988618379067154, &sine, &cosine);
        s.cosine[i] = (float)(s.scaled ? cosine * s.scale : cosine);
        s.sine[i] = (float)(s.scaled ? sine * s.scale : sine);
    }
}

/* One thread per pair. */
__global__ void __launch_bounds__(team_threads) rope_pairs(const __grid_constant__ RopeJob s) {
    int64_t half = s.d / 2, i = (int64_t)blockIdx.x * team_threads + threadIdx.x;
    for (; i < s.rows * s.t * s.heads * half; i += (int64_t)gridDim.x * team_threads) {
        int64_t pair = i % half, head = i / half, row = head / s.heads % s.t * half + pair;
        int64_t p = head * s.d + (s.interleaved ? 2 * pair : pair);
        int64_t q = p + (s.interleaved ? 1 : half);
        float c = s.cosine[row], w = s.back ? -s.sine[row] : s.sine[row];
        float a = get1(s.a, p), b = get1(s.a, q);
        store_real(s.y, p, fmaf(a, c, -__fmul_rn(b, w)));
        store_real(s.y, q, fmaf(b, c, __fmul_rn(a, w)));
    }
}

/* Rotates the pair (p, q) by angle k of those at `row`. */
__device__ inline void rotate_pair(const RopeJob &s, int64_t row, int k, float *p, float *q) {
    float c = s.cosine[row + k], w = s.back ? -s.sine[row + k] : s.sine[row + k];
    float turned = fmaf(*p, c, -__fmul_rn(*q, w));
    *q = fmaf(*q, c, __fmul_rn(*p, w));
    *p = turned;
}

/* One thread per 8 pairs: their elements are two groups of eight. */
__global__ void __launch_bounds__(team_threads) rope_eights(const __grid_constant__ RopeJob s) {
    int64_t half = s.d / 2, i = (int64_t)blockIdx.x * team_threads + threadIdx.x;
    for (; i < s.rows * s.t * s.heads * (half / 8); i += (int64_t)gridDim.x * team_threads) {
        /* Read both eights. */
        int64_t head = i / (half / 8), pair = i % (half / 8) * 8;
        int64_t row = head / s.heads % s.t * half + pair;
        int64_t first = head * s.d + (s.interleaved ? 2 * pair : pair);
        int64_t second = first + (s.interleaved ? 8 : half);
        float a[8], b[8];
        get8(s.a, first, a);
        get8(s.a, second, b);

        /* Rotate the pairs: neighbours in an eight, or the same place in both eights. */
        if (s.interleaved) {
            MIXPI_UNROLL
            for (int k = 0; k < 4; k++) {
                rotate_pair(s, row, k, a + 2 * k, a + 2 * k + 1);
                rotate_pair(s, row, k + 4, b + 2 * k, b + 2 * k + 1);
            }
        } else {
            MIXPI_UNROLL
            for (int k = 0; k < 8; k++) rotate_pair(s, row, k, a + k, b + k);
        }

        store8(s.y, first, 8, true, a);
        store8(s.y, second, 8, true, b);
    }
}

}   /* namespace */

static mixp_result mixpi_cuda_embedding(const mixp_exec *x, const mixp_embedding_args *k) {
    Kernel on(x);
    EmbeddingJob job = mixpi_cuda_job<EmbeddingJob>(*k);
    job.fault = fault_flag(on.state);
    job.wide = is_wide(k->y) && is_wide(k->table);
    if (!on.state) return MIXP_ERR_ORDER;
    if (!is_real(k->y.dtype) || !is_real(k->table.dtype)) return MIXP_ERR_DTYPE;
    if (k->y.accumulate || (k->rows > 0 && k->vocab <= 0)) return MIXP_ERR_ARGUMENT;
    if (k->bags.count > 0)
        return on.report("embedding",
            MIXPI_LAUNCH(embedding_bags, grid_for(k->bags.count * warp_size, team_threads),
                team_threads, 0, on.stream, job));
    if (k->rows <= 0) return MIXP_OK;
    return on.report(
        "embedding", MIXPI_LAUNCH(embedding_rows, grid_for(k->rows * warp_size, team_threads),
                         team_threads, 0, on.stream, job));
}

/* Lays the lists out in memory, unless memory is NULL. Returns the bytes that they need. */
static size_t mixpi_cuda_carve_sorted(Sorted *to, EmbeddingBackJob *job, void *memory) {
    const int64_t sorted = job->rows + job->vocab + 1, bags = job->bags.count ? job->rows : 0;
    if (memory) {
        to->order = (int64_t *)memory;
        to->start = to->order + job->rows;
        if (bags) job->bag = (int32_t *)(void *)(to->order + sorted);
        if (bags) job->factor = (float *)(void *)(job->bag + bags);
    }
    return (size_t)sorted * sizeof(int64_t) + (size_t)bags * (sizeof(int32_t) + sizeof(float));
}

/* Finds the bag of each id, and the gradients of the weights. */
static mixp_result mixpi_cuda_bags_back(Kernel &on, const EmbeddingBackJob &job) {
    mixp_result r = on.report("embedding_backward",
        cudaMemsetAsync(job.bag, 0xFF, (size_t)job.rows * sizeof *job.bag, on.stream));
    if (r == MIXP_OK)
        r = on.report("embedding_backward",
            MIXPI_LAUNCH(embedding_bag_ids, grid_for(job.bags.count, team_threads), team_threads, 0,
                on.stream, job));
    if (r != MIXP_OK || !job.dweights.data) return r;
    return on.report("embedding_backward",
        MIXPI_LAUNCH(embedding_bag_weights, grid_for(job.rows * warp_size, team_threads),
            team_threads, 0, on.stream, job));
}

static mixp_result mixpi_cuda_embedding_backward(
    const mixp_exec *x, const mixp_embedding_backward_args *k) {
    Kernel on(x);
    if (!on.state) return MIXP_ERR_ORDER;
    if ((k->dtable.data && !is_real(k->dtable.dtype)) || !is_real(k->dy.dtype))
        return MIXP_ERR_DTYPE;
    if (k->rows > 0 && k->vocab <= 0) return MIXP_ERR_ARGUMENT;
    if (k->vocab <= 0) return MIXP_OK;
    if (!k->dtable.data && (!k->bags.count || k->rows <= 0)) return MIXP_OK;

    /* Allocate memory for the sorted rows. */
    Sorted to = { NULL, NULL };
    EmbeddingBackJob job = mixpi_cuda_job<EmbeddingBackJob>(*k);
    job.fault = fault_flag(on.state);
    job.wide = is_wide(k->dtable) && is_wide(k->dy);
    void *memory = scratch_of(x, mixpi_cuda_carve_sorted(&to, &job, NULL));
    if (!memory) return MIXP_ERR_MEMORY;
    mixpi_cuda_carve_sorted(&to, &job, memory);
    if (job.bag && k->rows > 0) {
        const mixp_result found = mixpi_cuda_bags_back(on, job);
        if (found != MIXP_OK || !k->dtable.data) return found;
    }

    /* Sort the rows of dy by their id. */
    const int64_t each = least(ceil_div(k->vocab, id_blocks), team_threads);
    mixp_result r = on.report(
        "embedding_backward", MIXPI_LAUNCH(embedding_sort, (unsigned)ceil_div(k->vocab, each),
                                  team_threads, 0, on.stream, job, to, each));
    if (r != MIXP_OK || k->cols <= 0) return r;

    /* Add the rows of each id. */
    const mixp_dtype typed = typed_rows(job.wide && !job.bag, k->cols, k->dy.dtype);
    auto sums = typed == MIXP_F16    ? embedding_sums<MIXP_F16>
                : typed == MIXP_BF16 ? embedding_sums<MIXP_BF16>
                : typed == MIXP_F32  ? embedding_sums<MIXP_F32>
                                     : embedding_sums<any_real>;
    const int64_t threads = least(round_up(ceil_div(k->cols, 8), warp_size), team_threads);
    const unsigned grid = grid_for(k->vocab * ceil_div(k->cols, 8 * threads), 1);
    return on.report(
        "embedding_backward", MIXPI_LAUNCH(sums, grid, (unsigned)threads, 0, on.stream, job, to));
}

static mixp_result mixpi_cuda_gather(const mixp_exec *x, const mixp_gather_args *k) {
    Kernel on(x);
    GatherJob job = mixpi_cuda_job<GatherJob>(*k);
    int64_t count = k->outer * k->m * k->inner;
    if (!on.state) return MIXP_ERR_ORDER;
    if (!is_real(k->a.dtype) || !is_real(k->y.dtype)) return MIXP_ERR_DTYPE;
    if (k->y.accumulate || (count > 0 && k->n <= 0)) return MIXP_ERR_ARGUMENT;
    if (count <= 0) return MIXP_OK;
    job.fault = fault_flag(on.state);
    return on.report("gather", MIXPI_LAUNCH(gather_elements, grid_for(count, team_threads),
                                   team_threads, 0, on.stream, job));
}

static mixp_result mixpi_cuda_gather_backward(const mixp_exec *x, const mixp_gather_args *k) {
    Kernel on(x);
    GatherJob job = mixpi_cuda_job<GatherJob>(*k);
    int64_t columns = k->outer * k->inner;
    if (!on.state) return MIXP_ERR_ORDER;
    if (!is_real(k->a.dtype) || !is_real(k->y.dtype)) return MIXP_ERR_DTYPE;
    if (!k->y.accumulate) return MIXP_ERR_ARGUMENT;
    if (columns <= 0 || k->m <= 0) return MIXP_OK;
    job.fault = fault_flag(on.state);
    if (is_kept_gather(*k)) {
        int64_t warps = least(team_threads / warp_size, gather_row_bytes / gather_row_size(*k));
        return on.report("gather_backward",
            MIXPI_LAUNCH(gather_back_rows, grid_for(ceil_div(k->outer, warps), 1),
                (unsigned)(warps * warp_size), (size_t)(warps * gather_row_size(*k)), on.stream,
                job));
    }
    return on.report("gather_backward", MIXPI_LAUNCH(gather_back, grid_for(columns, team_threads),
                                            team_threads, 0, on.stream, job));
}

static mixp_result mixpi_cuda_rope(const mixp_exec *x, const mixp_rope_args *k) {
    Kernel on(x);
    if (!on.state) return MIXP_ERR_ORDER;
    if (!is_real(k->a.dtype) || !is_real(k->y.dtype)) return MIXP_ERR_DTYPE;
    if (k->d < 2 || k->d % 2 || !(k->base > 0.0)) return MIXP_ERR_ARGUMENT;
    const int64_t angles = k->t * (k->d / 2), pairs = k->rows * k->heads * angles;
    if (pairs <= 0) return MIXP_OK;

    /* Compute the angles' cosines and sines. */
    RopeJob job = mixpi_cuda_job<RopeJob>(*k);
    job.cosine = (float *)scratch_of(x, (size_t)(2 * angles) * sizeof(float));
    if (!job.cosine) return MIXP_ERR_MEMORY;
    job.sine = job.cosine + angles;
    mixp_result r = on.report("rope",
        MIXPI_LAUNCH(rope_angles, grid_for(angles, team_threads), team_threads, 0, on.stream, job));
    if (r != MIXP_OK) return r;

    /* Rotate the pairs, 8 a thread where addresses allow it. */
    if (k->d % 16 == 0 && is_wide(k->a) && is_wide(k->y))
        return on.report("rope", MIXPI_LAUNCH(rope_eights, grid_for(pairs / 8, team_threads),
                                     team_threads, 0, on.stream, job));
    return on.report("rope",
        MIXPI_LAUNCH(rope_pairs, grid_for(pairs, team_threads), team_threads, 0, on.stream, job));
}
/* The macros of rows.cu: no later room computes rows. */
#undef MIXPI_ROWS
#undef MIXPI_TYPED_ROWS
#undef MIXPI_PARTS
#undef MIXPI_TYPED_PARTS
namespace {

/* --- the largest element ----------------------------------------------------------- */

__device__ inline bool is_nan(float x) { return mixp_bits_of_f32(x) << 1 > 0xFF000000u; }
/* Is x as large as y: equal, or both NaN? */
__device__ inline bool is_as_large(float x, float y) { return x == y || (is_nan(x) && is_nan(y)); }

/* The largest of some elements, the index of the first such, and their number. Without elements,
 * index is -1. */
struct Most {
    float   value;
    int32_t index, ties;
};

__device__ inline Most larger_of(const Most &a, const Most &b) {
    Most m = a;
    if (a.index < 0 || b.index < 0) return a.index < 0 ? b : a;
    if (is_as_large(a.value, b.value)) {
        m.index = a.index < b.index ? a.index : b.index;
        m.ties = a.ties + b.ties;
        return m;
    }
    return b.value > a.value || is_nan(b.value) ? (is_nan(a.value) ? a : b) : a;
}

/* One warp per column if columns are few and long; otherwise one thread per column. */
__global__ void __launch_bounds__(team_threads)
    max_columns(const __grid_constant__ mixp_max_args s, int lanes) {
    const int64_t first = ((int64_t)blockIdx.x * team_threads + threadIdx.x) / lanes;
    const int64_t step = (int64_t)gridDim.x * team_threads / lanes;
    const int lane = (int)threadIdx.x % lanes;
    for (int64_t c = first; c < s.outer * s.inner; c += step) {
        /* Find the largest of the lane's elements. */
        const int64_t from = c / s.inner * s.n * s.inner + c % s.inner;
        Most most = { 0.0f, -1, 0 };
        for (int64_t j = lane; j < s.n; j += lanes) {
            Most one = { get1(s.a, from + j * s.inner), (int32_t)j, 1 };
            most = larger_of(most, one);
        }

        /* Join the lanes in lane 0. */
        for (int k = lanes / 2; k > 0; k /= 2) {
            Most other;
            other.value = __shfl_down_sync(0xFFFFFFFFu, most.value, (unsigned)k);
            other.index = __shfl_down_sync(0xFFFFFFFFu, most.index, (unsigned)k);
            other.ties = __shfl_down_sync(0xFFFFFFFFu, most.ties, (unsigned)k);
            most = larger_of(most, other);
        }

        /* Store the column's index, ties and value. */
        if (lane) continue;
        s.index[c] = most.index;
        if (s.ties) s.ties[c] = most.ties;
        if (s.y.data) put1(s.y, c, most.value);
    }
}

/* One thread per element of da. */
__global__ void __launch_bounds__(team_threads)
    max_back(const __grid_constant__ mixp_max_backward_args s) {
    int64_t i = (int64_t)blockIdx.x * team_threads + threadIdx.x;
    for (; i < s.outer * s.n * s.inner; i += (int64_t)gridDim.x * team_threads) {
        int64_t o = i / (s.n * s.inner), j = i / s.inner % s.n, c = i % s.inner;
        int64_t at = o * s.inner + c, best = (o * s.n + s.index[at]) * s.inner + c;
        float dy = 0.0f;
        if (!s.shared && s.index[at] == j) dy = get1(s.dy, at);
        if (s.shared && is_as_large(get1(s.a, i), get1(s.a, best)))
            dy = get1(s.dy, at) / (float)s.ties[at];
        store_real(s.da, i, dy);
    }
}

/* --- the k largest elements -------------------------------------------------------- */

/* Rows of up to this length are cheaper without a sorting network. */
const int topk_short = 64;

/* One thread per element of a: the element's place is the number of elements before it. */
__global__ void __launch_bounds__(team_threads)
    topk_places(const __grid_constant__ mixp_topk_args s) {
    int64_t i = (int64_t)blockIdx.x * team_threads + threadIdx.x;
    for (; i < s.rows * s.cols; i += (int64_t)gridDim.x * team_threads) {
        int64_t row = i / s.cols, own = i - row * s.cols, before = 0;
        uint32_t key = mixpi_topk_key(get1(s.a, i), s.smallest);
        for (int64_t j = 0; j < s.cols; j++) {
            uint32_t other = mixpi_topk_key(get1(s.a, row * s.cols + j), s.smallest);
            before += other > key || (other == key && j < own);
        }
        if (before < s.k) s.index[row * s.k + before] = (int32_t)own;
    }
}

/* Elements that a block sorts at once. */
const int sort_room = 2048;

/* Does topk_sorted run this call? */
inline bool is_topk_sorted(const mixp_topk_args &k) {
    return k.cols <= sort_room || k.k <= sort_room / 2;
}

/* The rank of element i of a row: earlier of equal elements have larger ranks. 0: no element. */
__device__ inline uint64_t topk_rank(const mixp_topk_args &s, int64_t row, int64_t i) {
    if (i >= s.cols) return 0;
    uint32_t key = mixpi_topk_key(get1(s.a, row * s.cols + i), s.smallest);
    return (uint64_t)key << 32 | (uint32_t) ~(uint32_t)i;
}

/* Sorts n ranks, a power of two, the largest first: Batcher's bitonic network (1968). */
__device__ inline void sort_ranks(uint64_t *ranks, int n) {
    for (int run = 2; run <= n; run *= 2)
        for (int step = run / 2; step; step /= 2) {
            __syncthreads();
            for (int t = (int)threadIdx.x; t < n / 2; t += team_threads) {
                int i = 2 * t - (t & (step - 1)), j = i + step;
                uint64_t a = ranks[i], b = ranks[j];
                if ((a < b) != ((i & run) == 0)) continue;
                ranks[i] = b;
                ranks[j] = a;
            }
        }
    __syncthreads();
}

/* A block per row. Of a row of more than sort_room elements, each turn keeps the best half of the
 * room and reads as many elements again. */
__global__ void __launch_bounds__(team_threads)
    topk_sorted(const __grid_constant__ mixp_topk_args s) {
    MIXPI_SHARED(uint64_t, best, sort_room);
    int n = 2;
    while (n < s.cols && n < sort_room) n *= 2;
    for (int64_t row = blockIdx.x; row < s.rows; row += gridDim.x) {
        /* Fill the room after the ranks kept so far, and sort it, until the row is read. */
        int64_t read = 0;
        for (int kept = 0; read < s.cols; kept = n / 2) {
            for (int t = kept + (int)threadIdx.x; t < n; t += team_threads)
                best[t] = topk_rank(s, row, read + t - kept);
            read += n - kept;
            sort_ranks(best, n);
        }

        /* Write the places of the k largest. */
        for (int64_t t = threadIdx.x; t < s.k; t += team_threads)
            s.index[row * s.k + t] = (int32_t) ~(uint32_t)best[t];
        __syncthreads();
    }
}

/* Long rows, of which more is wanted than topk_sorted keeps: blocks sort pieces of sort_room
 * elements, then each pass merges runs of `width` elements in pairs, until one run is left. */
struct MergeJob : mixp_topk_args {
    uint64_t *from, *to;        /* ranks [rows, cols]; to NULL: the last pass, which fills index */
    int64_t   width;
};

/* A block per piece. */
__global__ void __launch_bounds__(team_threads) topk_pieces(const __grid_constant__ MergeJob s) {
    MIXPI_SHARED(uint64_t, ranks, sort_room);
    int64_t pieces = ceil_div(s.cols, sort_room);
    for (int64_t unit = blockIdx.x; unit < s.rows * pieces; unit += gridDim.x) {
        int64_t row = unit / pieces, first = unit % pieces * sort_room;
        int n = (int)least(sort_room, s.cols - first);
        for (int t = (int)threadIdx.x; t < sort_room; t += team_threads)
            ranks[t] = topk_rank(s, row, first + t);
        sort_ranks(ranks, sort_room);
        for (int t = (int)threadIdx.x; t < n; t += team_threads)
            s.to[row * s.cols + first + t] = ranks[t];
        __syncthreads();
    }
}

/* How many of n sorted ranks, the largest first, are larger than `rank`? n <= 0: none. */
__device__ inline int64_t ranks_above(const uint64_t *ranks, int64_t n, uint64_t rank) {
    int64_t low = 0;
    while (low < n) {
        int64_t middle = low + (n - low) / 2;
        if (ranks[middle] > rank) low = middle + 1;
        else n = middle;
    }
    return low;
}

/* One thread per rank: its place is its place in its own run, plus the number of larger ranks in
 * the other run of the pair. No two ranks of a row are equal. */
__global__ void __launch_bounds__(team_threads) topk_merge(const __grid_constant__ MergeJob s) {
    int64_t i = (int64_t)blockIdx.x * team_threads + threadIdx.x;
    for (; i < s.rows * s.cols; i += (int64_t)gridDim.x * team_threads) {
        /* Find the rank's own run, and the other run of the pair. */
        const int64_t row = i / s.cols, own = i - row * s.cols;
        const int64_t in_run = own % s.width, pair = own - own % (2 * s.width);
        const int64_t other = own - in_run == pair ? pair + s.width : pair;

        /* Count the larger ranks of both, and store the rank after them. */
        const uint64_t rank = s.from[i];
        const uint64_t *const others = s.from + row * s.cols + other;
        const int64_t place =
            pair + in_run + ranks_above(others, least(s.width, s.cols - other), rank);
        if (s.to) s.to[row * s.cols + place] = rank;
        else if (place < s.k) s.index[row * s.k + place] = (int32_t) ~(uint32_t)rank;
    }
}

}   /* namespace */

static mixp_result mixpi_cuda_max(const mixp_exec *x, const mixp_max_args *k) {
    Kernel on(x);
    int64_t columns = k->outer * k->inner;
    int lanes = columns < 4096 || k->inner == 1 ? warp_size : 1;
    if (!on.state) return MIXP_ERR_ORDER;
    if (!is_real(k->a.dtype) || !is_real_or_absent(k->y)) return MIXP_ERR_DTYPE;
    if (k->n < 1 || k->n > 0x7FFFFFFF || !k->index || k->y.accumulate) return MIXP_ERR_ARGUMENT;
    if (columns <= 0) return MIXP_OK;
    return on.report("max", MIXPI_LAUNCH(max_columns, grid_for(columns * lanes, team_threads),
                                team_threads, 0, on.stream, *k, lanes));
}

static mixp_result mixpi_cuda_max_backward(const mixp_exec *x, const mixp_max_backward_args *k) {
    Kernel on(x);
    int64_t count = k->outer * k->n * k->inner;
    if (!on.state) return MIXP_ERR_ORDER;
    if (!is_real(k->dy.dtype) || !is_real(k->da.dtype) || (k->shared && !is_real(k->a.dtype)))
        return MIXP_ERR_DTYPE;
    if (!k->index || (k->shared && !k->ties)) return MIXP_ERR_ARGUMENT;
    if (count <= 0) return MIXP_OK;
    return on.report("max_backward",
        MIXPI_LAUNCH(max_back, grid_for(count, team_threads), team_threads, 0, on.stream, *k));
}

/* The ranks of a pass and of the next one alternate between two halves of scratch memory. */
static mixp_result mixpi_cuda_merge_topk(Kernel *on, const mixp_exec *x, const mixp_topk_args *k) {
    MergeJob job = mixpi_cuda_job<MergeJob>(*k);
    const int64_t count = k->rows * k->cols;
    uint64_t *ranks = (uint64_t *)scratch_of(x, (size_t)(2 * count) * sizeof(uint64_t));
    if (!ranks) return MIXP_ERR_MEMORY;

    /* Sort the pieces. */
    job.to = ranks;
    const unsigned pieces = grid_for(k->rows * ceil_div(k->cols, sort_room), 1);
    mixp_result r =
        on->report("topk", MIXPI_LAUNCH(topk_pieces, pieces, team_threads, 0, on->stream, job));

    /* Merge runs in pairs; the last pass writes the index. */
    for (job.width = sort_room; r == MIXP_OK && job.width < k->cols; job.width *= 2) {
        job.from = job.to;
        job.to = job.from == ranks ? ranks + count : ranks;
        if (2 * job.width >= k->cols) job.to = NULL;
        r = on->report("topk", MIXPI_LAUNCH(topk_merge, grid_for(count, team_threads), team_threads,
                                   0, on->stream, job));
    }
    return r;
}

static mixp_result mixpi_cuda_topk(const mixp_exec *x, const mixp_topk_args *k) {
    Kernel on(x);
    int64_t count = k->rows * k->cols;
    if (!is_real(k->a.dtype)) return MIXP_ERR_DTYPE;
    if (k->k < 1 || k->k > k->cols || k->cols > 0x7FFFFFFF || !k->index) return MIXP_ERR_ARGUMENT;
    if (!on.state) return MIXP_ERR_ORDER;
    if (count <= 0) return MIXP_OK;
    if (k->cols <= topk_short)
        return on.report("topk", MIXPI_LAUNCH(topk_places, grid_for(count, team_threads),
                                     team_threads, 0, on.stream, *k));
    if (!is_topk_sorted(*k)) return mixpi_cuda_merge_topk(&on, x, k);
    return on.report(
        "topk", MIXPI_LAUNCH(topk_sorted, grid_for(k->rows, 1), team_threads, 0, on.stream, *k));
}
/* ==== 5. OPTIMIZERS ================================================== >>optimizers ====
 *
 * The table of parameters is in device memory. The host knows the number of rows, not their
 * lengths. So each block walks through the table, one window of rows at a time with one row per
 * thread, and finds its own chunks. Chunks are numbered through all active rows, independently of
 * the grid.
 */
namespace {

const int     look_threads = 256, bin_count = 1024;
const int64_t chunk_size = 8192;
const int64_t nothing_bad = 0x7FFFFFFFFFFFFFFF;

struct Chunk { int64_t row, first; };       /* row of the table; first element             */

struct Walk {
    const mixp_param_row *rows;
    int64_t count;
    int64_t next;               /* the first row after the window                          */
    int64_t from, to;           /* chunks of the window                                    */
    int64_t row, first, end;    /* this thread's row, and its chunks                       */
};

__device__ inline Walk walk_of(const mixp_param_row *rows, int64_t count) {
    Walk w = { rows, count, 0, 0, 0, 0, 0, 0 };
    return w;
}

__device__ inline void next_window(Walk &w) {
    int64_t chunks = 0, all;
    w.row = w.next + (int64_t)threadIdx.x;
    if (w.row < w.count && w.rows[w.row].active) chunks = ceil_div(w.rows[w.row].count, chunk_size);
    w.from = w.to;
    w.end = w.to + block_scan(chunks, &all);
    w.first = w.end - chunks;
    w.to += all;
    w.next += (int64_t)blockDim.x;
}

/* Finds chunk c, with all threads of a block. Returns false if there are fewer chunks; w.to is then
 * their number. */
__device__ inline bool walk_to(Walk &w, int64_t c, Chunk *found) {
    MIXPI_SHARED(Chunk, here, 1);
    if (c < w.from) w.next = w.from = w.to = 0;
    while (c >= w.to && w.next < w.count) next_window(w);
    if (c >= w.to) return false;
    if (c >= w.first && c < w.end) {
        here->row = w.row;
        here->first = (c - w.first) * chunk_size;
    }
    __syncthreads();
    *found = *here;
    __syncthreads();
    return true;
}
__device__ inline bool is_walked_through(const Walk &w) { return w.next >= w.count; }

__device__ inline int64_t chunk_end(const Chunk &c, int64_t count) {
    return least(c.first + chunk_size, count);
}

inline unsigned blocks_of(const State *s, int each) { return (unsigned)(s->processors * each); }

/* Is element i of a row padding? */
__device__ inline bool is_padding(const mixp_param_row &row, int64_t i) {
    return row.pitch && i % row.pitch >= row.width;
}

/* get8_any of a row's gradient or weight, which may be f64. Padding is 0. */
__device__ inline void get_of_row(
    const mixp_param_row &row, mixp_in a, int64_t i, int n, bool wide, float *v) {
    if (a.dtype != MIXP_F64) get8_any(a, i, n, wide, v);
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) {
        if (a.dtype == MIXP_F64) v[k] = k < n ? (float)((const double *)a.data)[i + k] : 0.0f;
        if (is_padding(row, i + k)) v[k] = 0.0f;
    }
}
/* put8_any likewise. Does not write padding. */
__device__ inline void put_of_row(
    const mixp_param_row &row, mixp_out a, int64_t i, int n, bool wide, const float *v) {
    if (!row.pitch && a.dtype != MIXP_F64) {
        put8_any(a, i, n, wide, v);
        return;
    }
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) {
        if (k >= n || is_padding(row, i + k)) continue;
        if (a.dtype == MIXP_F64) ((double *)a.data)[i + k] = (double)v[k];
        else put1(a, i + k, v[k]);
    }
}

/* --- prepare, advance ------------------------------------------------------------------ */

static_assert(MIXP_MAX_GROUPS <= warp_size, "prepare has a thread for each group");

struct Prepare {
    int wanted;
    const int32_t *stop;        /* the flag in the context's Private that stops steps      */
    mixp_scaler_state *scaler;
    Mirrored of_step, of_scaler;
};

/* mixpi_step_prepare with one thread per group, in the only block that writes the step's state. */
__device__ inline void prepare(
    const mixp_step_plan &plan, mixp_step_state *step, const Prepare &p) {
    MIXPI_SHARED(int, due, 1);
    int g = (int)threadIdx.x;
    if (g == 0) {
        step->stopped = *p.stop;
        *due = mixpi_step_decide(&plan, step, p.scaler);
    }
    __syncthreads();
    if (*due && g < plan.n_groups)
        mixpi_step_scalars_of(&plan, step, g, step->applied, &step->update[g]);
    const Mirrored both[2] = { p.of_step, p.of_scaler };
    mirror_store(both);
}

__global__ void prepare_step(
    const __grid_constant__ mixp_step_plan plan, mixp_step_state *step, const Prepare p) {
    prepare(plan, step, p);
}

/* Advances the scale, except after a stopped step, which says nothing about the scale. */
__global__ void advance_scaler(const mixp_scaler_rule rule, mixp_scaler_state *scaler,
    const mixp_look *wide, const mixp_look *narrow, int32_t forgives, int32_t falls,
    const int32_t *stop, const Mirrored mirror) {
    if (threadIdx.x == 0 && *stop) {
        scaler->found_inf = 0;
    } else if (threadIdx.x == 0) {
        if (wide) mixpi_scaler_note_scaled(scaler, wide->largest);
        if (wide && narrow) mixpi_scaler_note_scaled(scaler, narrow->largest);
        mixpi_scaler_advance_guarded(scaler, &rule, forgives, falls, narrow);
    }
    const Mirrored one[1] = { mirror };
    mirror_store(one);
}

/* Puts back the buffers of a skipped step. */
__global__ void restore_parts(const __grid_constant__ mixp_restore_args k) {
    int32_t flag = k.n_flags == 0;
    for (int i = 0; i < k.n_flags; i++) flag |= *k.flags[i];
    if (!flag) return;

    /* Copy each part: 16 bytes at a time while both ends are aligned, then its last bytes. */
    const size_t first = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    const size_t step = (size_t)gridDim.x * blockDim.x;
    for (int p = 0; p < k.n_parts; p++) {
        const mixp_restore_part part = k.parts[p];
        const uintptr_t ends = (uintptr_t)part.to | (uintptr_t)part.from;
        const size_t wide = ends % sizeof(uint4) ? 0 : part.bytes / sizeof(uint4);
        for (size_t i = first; i < wide; i += step)
            static_cast<uint4 *>(part.to)[i] = static_cast<const uint4 *>(part.from)[i];
        for (size_t i = wide * sizeof(uint4) + first; i < part.bytes; i += step)
            static_cast<uint8_t *>(part.to)[i] = static_cast<const uint8_t *>(part.from)[i];
    }
}

/* A word of 8 bytes of an array that has only `bytes` more. */
__device__ inline uint64_t check_word(const char *p, int64_t bytes) {
    uint64_t word = 0;
    if (bytes >= 8) return *reinterpret_cast<const uint64_t *>(p);
    for (int64_t i = 0; i < bytes; i++) word |= (uint64_t)(uint8_t)p[i] << (8 * i);
    return word;
}

/* Finds what a step has made Inf or NaN in its buffers. Threads take the words of 8 bytes in turn,
 * and read what was there before only where a number is bad now. */
__global__ void check_parts(const __grid_constant__ mixp_check_buffers_args k) {
    const int64_t first = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    const int64_t step = (int64_t)gridDim.x * blockDim.x;
    uint64_t found = 0;
    for (int p = 0; p < k.n_parts && !found; p++) {
        const mixp_check_part part = k.parts[p];
        const mixpi_lanes l = mixpi_lanes_of(part.dtype);
        const char *now = static_cast<const char *>(part.now);
        const char *before = static_cast<const char *>(part.before);
        const int64_t bytes = part.count * l.bits / 8;
        for (int64_t i = first; 8 * i < bytes && !found; i += step) {
            const uint64_t is = check_word(now + 8 * i, bytes - 8 * i);
            if (!(mixpi_lanes_carry(&l, is) & l.sign)) continue;
            found = mixpi_lanes_bad(&part, &l, i, is, check_word(before + 8 * i, bytes - 8 * i));
        }
    }
    if (found)
        atomicMax(reinterpret_cast<unsigned long long *>(k.found), (unsigned long long)found);
}

/* The two halves of an agreement, by a warp. A step stopped on one rank is skipped on all ranks. */
__global__ void agree_ranks(
    const __grid_constant__ mixp_step_plan plan, const mixp_agree_args k, const int32_t *stop) {
    /* Read what all ranks wrote. */
    if (k.reads) {
        if (threadIdx.x == 0) mixpi_agree_read(k.table, k.size, k.step, k.scaler);
        return;
    }

    /* Clear the table; thread 0 fills the rank's own row. */
    const int words = k.size * MIXP_AGREE_WORDS;
    for (int i = (int)threadIdx.x; i < words; i += (int)blockDim.x) k.table[i] = 0.0;
    __syncthreads();
    if (threadIdx.x) return;
    double *row = k.table + (int64_t)k.rank * MIXP_AGREE_WORDS;
    mixpi_agree_fill(row, &plan, k.step, k.scaler);
    mixpi_agree_bad(row, k.looks, k.n_looks, k.first_leaf);
    if (k.in_parts) mixpi_agree_part(row, k.step);
    if (*stop) row[MIXP_AGREE_FOUND] = 1.0;
}

/* --- gather ---------------------------------------------------------------------------- *
 *
 * Chunk c belongs to bin c modulo bin_count. A block sums each of its bins in the order of chunks.
 * The last block to finish sums the bins, and prepares the step if requested. So all GPUs are
 * bit-identical. Squares are summed in f32 in groups of eight, then in double: the relative error
 * of norm is below 2^-22.
 */

/* The result of a thread, then of a block. bad: twice the place among all chunks, plus 1 if NaN. */
struct Look {
    double  squares;
    int64_t bad;
    float   largest;
};

/* x * factor; a NaN keeps its payload, as on the CPU. */
__device__ inline float scaled(float x, float factor) {
    uint32_t u = mixp_bits_of_f32(x);
    return (u & 0x7FFFFFFFu) > 0x7F800000u ? mixp_f32_of_bits(u | 0x00400000u) : x * factor;
}

/* Finds the Inf or NaN element, and sums squares in double, in whose range 3e38 and 1e-38 stay. */
__device__ inline void look_closely(Look &l, const float *given, const float *v, int64_t place) {
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) {
        uint32_t had = mixp_bits_of_f32(given[k]) & 0x7FFFFFFFu;
        uint32_t has = mixp_bits_of_f32(v[k]) & 0x7FFFFFFFu;
        l.squares += (double)v[k] * (double)v[k];
        if (had < 0x7F800000u && has < 0x7F800000u) {
            l.largest = fmaxf(l.largest, mixp_f32_of_bits(has));
        } else if (l.bad == nothing_bad) {
            l.bad = 2 * (place + k) + ((had >= 0x7F800000u ? had : has) > 0x7F800000u);
        }
    }
}

__device__ inline void look_at(Look &l, const float *given, const float *v, int64_t place) {
    float squares = 0.0f, top = 0.0f;
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) {
        squares = fmaf(v[k], v[k], squares);
        top = fmaxf(top, fabsf(v[k]));
    }
    /* The sum is not finite (overflow, Inf, NaN), or has lost small squares. */
    if ((mixp_bits_of_f32(squares) & 0x7FFFFFFFu) >= 0x7F800000u ||
        (top < MIXPI_SQUARES_LOST && top > 0.0f)) {
        look_closely(l, given, v, place);
    } else {
        l.squares += (double)squares;
        l.largest = fmaxf(l.largest, top);
    }
}

/* One chunk, by a block. place: the place of its first element among all chunks. When unscaling in
 * place, the statistics are of the stored values, rounded to the gradient's dtype. */
__device__ inline void gather_chunk(
    Look &l, const mixp_param_row &row, const Chunk &c, int64_t place, float factor, int unscale) {
    const mixp_out grad = array_at(row.grad, row.grad_dtype);
    const bool wide = is_aligned(grad.data);
    const int64_t end = chunk_end(c, row.count);
    for (int64_t i = c.first + 8 * (int64_t)threadIdx.x; i < end; i += 8 * (int64_t)blockDim.x) {
        /* Read and scale 8 elements. */
        const int n = (int)least(8, end - i);
        float x[8], v[8];
        get_of_row(row, as_in(grad), i, n, wide, x);
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) v[k] = scaled(x[k], factor);

        /* Store them, and look at what was stored. */
        if (unscale) {
            MIXPI_UNROLL
            for (int k = 0; k < 8; k++) {
                if (grad.dtype == MIXP_F16 || grad.dtype == MIXP_BF16)
                    v[k] = low_value(grad.dtype, low_code(grad.dtype, v[k]));
                x[k] = v[k];
            }
            put_of_row(row, grad, i, n, wide, v);
        }
        look_at(l, x, v, place + (i - c.first));
    }
}

/* The joined result of all threads of a block. */
__device__ inline Look block_look(const Look &l) {
    Look all;
    all.squares = block_sum(l.squares);
    all.largest = block_max(l.largest);
    all.bad = block_min(l.bad);
    return all;
}

/* Sums the bins, with one block, when all bins are complete. */
__device__ inline void sum_up(Walk &w, const volatile Look *bins, mixp_step_state *step) {
    Look l = { 0.0, nothing_bad, 0.0f };
    for (int64_t i = (int64_t)threadIdx.x; i < least(bin_count, w.to); i += (int64_t)blockDim.x) {
        l.squares += bins[i].squares;
        l.largest = fmaxf(l.largest, bins[i].largest);
        l.bad = least(l.bad, bins[i].bad);
    }
    l = block_look(l);

    /* Find the chunk of the first Inf or NaN, with all threads. */
    Chunk c = { -1, -1 };
    if (l.bad != nothing_bad) walk_to(w, l.bad / 2 / chunk_size, &c);
    if (threadIdx.x) return;

    /* Write the step's statistics. */
    mixp_grad_stats stats;
    memset((void *)&stats, 0, sizeof stats);
    stats.norm = sqrt(l.squares);
    stats.largest = l.largest;
    stats.found_inf = l.bad != nothing_bad;
    stats.bad_row = c.row;
    stats.bad_element = stats.found_inf ? c.first + l.bad / 2 % chunk_size : -1;
    stats.bad_is_nan = stats.found_inf ? (int32_t)(l.bad % 2) : 0;
    step->stats = stats;
    step->clipped = 1.0f;
}

/* True for all threads of the last block to finish; that block sees the writes of all blocks. */
__device__ inline bool is_last_block(uint32_t *arrived) {
    MIXPI_SHARED(int, last, 1);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) *last = atomicInc(arrived, gridDim.x - 1) == gridDim.x - 1;
    __syncthreads();
    __threadfence();
    return *last != 0;
}

__global__ void __launch_bounds__(look_threads)
    gather_chunks(const mixp_grad_stats_args k, Look *bins, uint32_t *arrived,
        const __grid_constant__ mixp_step_plan plan, const Prepare then) {
    /* Sum the block's bins, each in the order of its chunks. */
    Walk w = walk_of(k.rows, k.count);
    const float factor = k.scale ? mixpi_scaler_inverse(*k.scale) : 1.0f;
    for (int64_t bin = blockIdx.x; bin < bin_count; bin += gridDim.x) {
        Look l = { 0.0, nothing_bad, 0.0f };
        if (is_walked_through(w) && bin >= w.to) break;
        Chunk at;
        for (int64_t c = bin; walk_to(w, c, &at); c += bin_count)
            gather_chunk(l, k.rows[at.row], at, c * chunk_size, factor, k.unscale);
        l = block_look(l);
        if (threadIdx.x == 0) bins[bin] = l;
    }

    /* The last block sums the bins, and prepares the step. */
    if (!is_last_block(arrived)) return;
    sum_up(w, bins, k.step);
    if (then.wanted) prepare(plan, k.step, then);
}

/* --- clip ------------------------------------------------------------------------------ */

__global__ void __launch_bounds__(look_threads, 4) clip_chunks(const mixp_clip_args job) {
    mixp_step_state *step = job.step;
    const float factor = (float)mixpi_clip_coefficient(step->stats.norm, job.max_norm);
    if (step->stats.found_inf || factor >= 1.0f) return;
    if (blockIdx.x == 0 && threadIdx.x == 0) step->clipped = factor;

    const mixp_param_row *rows = job.rows;
    Walk w = walk_of(rows, job.count);
    Chunk at;
    for (int64_t c = blockIdx.x; walk_to(w, c, &at); c += gridDim.x) {
        /* Multiply the chunk by the factor. */
        const mixp_param_row &row = rows[at.row];
        const mixp_out grad = array_at(row.grad, row.grad_dtype);
        const bool wide = is_aligned(grad.data);
        const int64_t end = chunk_end(at, row.count);
        for (int64_t i = at.first + 8 * (int64_t)threadIdx.x; i < end;
             i += 8 * (int64_t)blockDim.x) {
            const int n = (int)least(8, end - i);
            float v[8];
            get_of_row(row, as_in(grad), i, n, wide, v);
            MIXPI_UNROLL
            for (int k = 0; k < 8; k++) v[k] *= factor;
            put_of_row(row, grad, i, n, wide, v);
        }
    }
}

/* --- look ------------------------------------------------------------------------------ */

/* A thread's counts of magnitudes below each limit, counted as on the CPU. */
struct Seen {
    uint32_t top;
    int      nonfinite, nan, zeros, flushed, least, subnormal, past;
};

__device__ inline void look_at_one(Seen &s, const mixpi_look_limits &at, uint32_t v) {
    bool bad = v >= 0x7F800000u;
    if (!bad && v > s.top) s.top = v;
    s.nonfinite += bad;
    s.nan |= v > 0x7F800000u;
    s.zeros += v == 0;
    s.flushed += v <= at.flushed;
    s.least += v < at.least;
    s.subnormal += v < at.subnormal;
    s.past += !bad && v >= at.past;
}

__device__ inline void add_count(int64_t *to, int64_t n) {
    if (n) atomicAdd((unsigned long long *)(void *)to, (unsigned long long)n);
}

/* Joins counts and an integer maximum, which give the same result in any order. */
__device__ inline void join_look(mixp_look *to, const Seen &s, int64_t n) {
    if (!to) return;
    if (s.top) atomicMax((unsigned *)(void *)&to->largest, (unsigned)s.top);
    if (s.nan) atomicMax(&to->nan, 1);
    add_count(&to->count, n);
    add_count(&to->nonfinite, s.nonfinite);
    add_count(&to->zeros, s.zeros);
    add_count(&to->flushed, s.flushed - s.zeros);
    add_count(&to->least, s.least - s.flushed);
    add_count(&to->subnormal, s.subnormal - s.flushed);
    add_count(&to->saturated, s.past);
}

__device__ inline void look_at_some(
    Seen &s, const mixpi_look_limits &at, const float *v, int n, int64_t *exponents) {
    for (int j = 0; j < n; j++) {
        uint32_t bits = mixp_bits_of_f32(v[j]) & 0x7FFFFFFFu;
        look_at_one(s, at, bits);
        if (exponents) add_count(&exponents[bits >> 23], 1);
    }
}

__device__ inline uint32_t warp_top(uint32_t v) {
    MIXPI_UNROLL
    for (int k = 16; k; k /= 2) {
        uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, v, k);
        v = other > v ? other : v;
    }
    return v;
}

/* Elements per block: an int can count them. */
const int64_t look_piece = (int64_t)1 << 16;

__global__ void __launch_bounds__(look_threads)
    look_pieces(const mixp_look_args k, const mixpi_look_limits at) {
    for (int64_t first = blockIdx.x * look_piece; first < k.n; first += gridDim.x * look_piece) {
        /* Count the thread's elements of the piece. */
        const int64_t end = least(first + look_piece, k.n);
        const bool wide = is_aligned(k.x.data);
        Seen s = { 0, 0, 0, 0, 0, 0, 0, 0 };
        for (int64_t i = first + 8 * (int64_t)threadIdx.x; i < end; i += 8 * (int64_t)blockDim.x) {
            float v[8];
            int n = (int)least(8, end - i);
            get8_any(k.x, i, n, wide, v);
            look_at_some(s, at, v, n, k.exponents);
        }

        /* Sum the counts over the warp. */
        s.top = warp_top(s.top);
        s.nonfinite = warp_sum(s.nonfinite);
        s.nan = warp_sum(s.nan);
        s.zeros = warp_sum(s.zeros);
        s.flushed = warp_sum(s.flushed);
        s.least = warp_sum(s.least);
        s.subnormal = warp_sum(s.subnormal);
        s.past = warp_sum(s.past);

        /* Add them to the row and to the total; thread 0 adds the number of elements. */
        if (threadIdx.x % warp_size) continue;
        join_look(k.row, s, threadIdx.x ? 0 : end - first);
        join_look(k.total, s, threadIdx.x ? 0 : end - first);
    }
}

}   /* namespace */

/* --- update ---------------------------------------------------------------------------- *
 *
 * Weights, moments and low copies get the CPU's bits: mixpi_adam_element and its relatives round
 * explicitly, so the compiler has nothing to contract. States of fewer bytes are widened before
 * these functions and narrowed after them. 16 threads share a block of 8-bit states, so all threads
 * of a warp go through a row together; threads past its end have no elements.
 */
namespace {

static_assert(MIXP_STATE_BLOCK == 16 * 8, "half a warp has a block of states");
static_assert(chunk_size % MIXP_STATE_BLOCK == 0, "a chunk has whole blocks of states");

/* May all arrays of a parameter be read 8 elements at a time? */
__device__ inline bool is_wide_row(const mixp_param_row &row) {
    uintptr_t all = (uintptr_t)row.weight | (uintptr_t)row.master | (uintptr_t)row.grad |
                    (uintptr_t)row.m | (uintptr_t)row.v | (uintptr_t)row.low_f16 |
                    (uintptr_t)row.low_bf16 | (uintptr_t)row.third;
    return all % 16 == 0;
}

/* 8 codes of a state. */
template <class T> struct alignas(8 * sizeof(T)) Eight { T code[8]; };

template <class T>
__device__ inline Eight<T> get_codes(const void *from, int64_t i, int n, bool wide) {
    const T *p = (const T *)from + i;
    Eight<T> e = {};
    if (wide && n == 8) return *(const Eight<T> *)(const void *)p;
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++)
        if (k < n) e.code[k] = p[k];
    return e;
}
template <class T>
__device__ inline void put_codes(void *to, int64_t i, int n, bool wide, const Eight<T> &e) {
    T *p = (T *)to + i;
    if (wide && n == 8) {
        *(Eight<T> *)(void *)p = e;
        return;
    }
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++)
        if (k < n) p[k] = e.code[k];
}

/* 8 elements of a row: their places, their states as f32, and their random numbers. */
struct Cell {
    int64_t  i;
    int      n;
    bool     wide;
    float    rate;              /* of the row                                              */
    float    g[8], p[8], m[8], v[8];
    uint32_t random[8];
};

/* The maximum over the 16 threads that share a block of states. */
__device__ inline uint32_t half_warp_max(uint32_t x) {
    MIXPI_UNROLL
    for (int k = 8; k; k /= 2) {
        uint32_t y = __shfl_xor_sync(0xFFFFFFFFu, x, k);
        x = x > y ? x : y;
    }
    return x;
}
/* The largest finite magnitude of a block. */
__device__ inline uint32_t block_largest(const Cell &c, const float *x) {
    uint32_t largest = 0;
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) {
        uint32_t size = k < c.n ? mixpi_state_size(x[k]) : 0u;
        largest = largest > size ? largest : size;
    }
    return half_warp_max(largest);
}

__device__ inline void get_blocks(const mixp_param_row &row, Cell &c, bool second) {
    const uint8_t *scales = second ? row.v_scale : row.m_scale;
    const Eight<uint8_t> e = get_codes<uint8_t>(second ? row.v : row.m, c.i, c.n, c.wide);
    const uint32_t scale = c.n > 0 ? scales[c.i / MIXP_STATE_BLOCK] : 15u;
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) {
        if (second) c.v[k] = mixpi_state_v_value(e.code[k], scale);
        else c.m[k] = mixpi_state_m_value(e.code[k], scale);
    }
}
__device__ inline void put_m_blocks(const mixp_param_row &row, const Cell &c) {
    const uint32_t scale = mixpi_state_scale_m(block_largest(c, c.m));
    Eight<uint8_t> e;
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++)
        e.code[k] = (uint8_t)mixpi_state_m(c.m[k], scale, mixpi_random_m(c.random[k]));
    put_codes(row.m, c.i, c.n, c.wide, e);
    if (c.n > 0) row.m_scale[c.i / MIXP_STATE_BLOCK] = (uint8_t)scale;
}
__device__ inline void put_v_blocks(const mixp_param_row &row, const Cell &c) {
    /* Scale the roots by the largest of their block. */
    float root[8];
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) root[k] = sqrtf(c.v[k]);
    const uint32_t scale = mixpi_state_scale_v(block_largest(c, root));

    Eight<uint8_t> e;
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++)
        e.code[k] = (uint8_t)mixpi_state_v(root[k], scale, mixpi_random_v(c.random[k]));
    put_codes(row.v, c.i, c.n, c.wide, e);
    if (c.n > 0) row.v_scale[c.i / MIXP_STATE_BLOCK] = (uint8_t)scale;
}

/* Stores as bf16, rounded with the random bits at `shift` in the elements' words. */
__device__ inline void put_bf16(void *to, const Cell &c, const float *x, int shift) {
    Eight<uint16_t> e;
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++)
        e.code[k] = (uint16_t)mixpi_state_bf16(x[k], c.random[k] >> shift & 0xFFFFu);
    put_codes(to, c.i, c.n, c.wide, e);
}

template <bool with_small> __device__ inline void get_moments(const mixp_param_row &row, Cell &c) {
    if (with_small && row.m_scale) get_blocks(row, c, false);
    else if (row.m) get8_any(mixp_in{ row.m, row.m_dtype }, c.i, c.n, c.wide, c.m);
    if (with_small && row.v_scale) get_blocks(row, c, true);
    else if (row.v) get8_any(mixp_in{ row.v, row.v_dtype }, c.i, c.n, c.wide, c.v);
}
template <bool with_small>
__device__ inline void put_moments(const mixp_param_row &row, const Cell &c) {
    if (with_small && row.m_scale) put_m_blocks(row, c);
    else if (with_small && row.m && row.m_dtype == MIXP_BF16) put_bf16(row.m, c, c.m, 0);
    else if (row.m) put8_any(array_at(row.m, MIXP_F32), c.i, c.n, c.wide, c.m);
    if (with_small && row.v_scale) put_v_blocks(row, c);
    else if (with_small && row.v && row.v_dtype == MIXP_BF16) put_bf16(row.v, c, c.v, 16);
    else if (row.v) put8_any(array_at(row.v, MIXP_F32), c.i, c.n, c.wide, c.v);
}

/* Does the row's master store only the bits that its bf16 weight lacks? */
__device__ inline bool is_split(const mixp_param_row &row) {
    return row.master && row.master_dtype != MIXP_F32;
}

__device__ inline void get_split(const mixp_param_row &row, Cell &c) {
    Eight<uint16_t> w = get_codes<uint16_t>(row.weight, c.i, c.n, c.wide);
    if (row.master_dtype == MIXP_BF16) {
        Eight<uint16_t> rest = get_codes<uint16_t>(row.master, c.i, c.n, c.wide);
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) c.p[k] = mixpi_master_from_16(w.code[k], rest.code[k]);
        return;
    }
    Eight<uint8_t> rest = get_codes<uint8_t>(row.master, c.i, c.n, c.wide);
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) c.p[k] = mixpi_master_from_8(w.code[k], rest.code[k]);
}
__device__ inline void put_split(const mixp_param_row &row, const Cell &c) {
    /* Split each weight into bf16 and the rest, of 16 or 8 bits. */
    Eight<uint16_t> w, wide_rest;
    Eight<uint8_t> rest;
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) {
        uint32_t random = mixpi_random_master(c.random[k]);
        mixpi_master_parts parts = row.master_dtype == MIXP_BF16
                                       ? mixpi_master_to_16(c.p[k])
                                       : mixpi_master_to_8(c.p[k], random);
        w.code[k] = (uint16_t)parts.weight;
        wide_rest.code[k] = (uint16_t)parts.rest;
        rest.code[k] = (uint8_t)parts.rest;
    }

    put_codes(row.weight, c.i, c.n, c.wide, w);
    if (row.master_dtype == MIXP_BF16) put_codes(row.master, c.i, c.n, c.wide, wide_rest);
    else put_codes(row.master, c.i, c.n, c.wide, rest);
}

template <bool with_small> __device__ inline void get_weight(const mixp_param_row &row, Cell &c) {
    mixp_in weight = { row.weight, row.weight_dtype };
    mixp_in master = { row.master, MIXP_F32 };
    if (with_small && is_split(row)) get_split(row, c);
    else get_of_row(row, row.master ? master : weight, c.i, c.n, c.wide, c.p);
}
template <bool with_small>
__device__ inline void put_weight(const mixp_param_row &row, const Cell &c) {
    /* Store the master, or the weight that has none; then the weight beside a whole master. */
    mixp_out weight = array_at(row.weight, row.weight_dtype);
    mixp_out master = array_at(row.master, MIXP_F32);
    if (with_small && is_split(row)) put_split(row, c);
    else put_of_row(row, row.master ? master : weight, c.i, c.n, c.wide, c.p);
    if (row.master && weight.dtype != MIXP_F32 && !(with_small && is_split(row)))
        put_of_row(row, weight, c.i, c.n, c.wide, c.p);

    /* Store the low copies. */
    if (row.low_f16) put8_any(array_at(row.low_f16, MIXP_F16), c.i, c.n, c.wide, c.p);
    if (row.low_bf16) put8_any(array_at(row.low_bf16, MIXP_BF16), c.i, c.n, c.wide, c.p);
}

/* The update of 8 elements by their optimizer. Each case has its own loop: a pointer that may be
 * NULL would move the moments out of the registers. */
__device__ inline void update_sgd(const mixp_step_scalars &u, bool momentum, Cell &c) {
    if (momentum) {
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) mixpi_sgd_element(&u, c.g[k], &c.p[k], &c.m[k]);
    } else {
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) mixpi_sgd_element(&u, c.g[k], &c.p[k], NULL);
    }
}
__device__ inline void update_rms(const mixp_step_scalars &u, bool momentum, Cell &c) {
    if (momentum) {
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) mixpi_rmsprop_element(&u, c.g[k], &c.p[k], &c.m[k], &c.v[k]);
    } else {
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) mixpi_rmsprop_element(&u, c.g[k], &c.p[k], NULL, &c.v[k]);
    }
}
/* The passes of Muon and of averages. */
__device__ inline void update_muon(const mixp_step_scalars &u, mixp_optimizer_kind kind, Cell &c) {
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) {
        if (kind == MIXP_OPTIMIZER_MUON) mixpi_muon_element(&u, c.rate, c.g[k], &c.p[k]);
        else if (kind == MIXP_OPTIMIZER_MUON_UNIT) c.p[k] = c.g[k] * u.factor;
        else if (kind == MIXP_OPTIMIZER_EMA) c.p[k] = mixpi_lerp(c.p[k], c.g[k], c.rate);
        else mixpi_muon_momentum_element(&u, c.g[k], &c.p[k], &c.m[k]);
    }
}
/* NAdam and Adamax, and kinds with a third state. */
__device__ inline void update_later(
    const mixp_step_scalars &u, mixp_optimizer_kind kind, const mixp_param_row &row, Cell &c) {
    float third[8];
    if (row.third) get8_any(mixp_in{ row.third, MIXP_F32 }, c.i, c.n, c.wide, third);
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++)
        mixpi_later_element(kind, &u, c.g[k], &c.p[k], &c.m[k], &c.v[k], &third[k]);
    if (row.third) put8_any(array_at(row.third, MIXP_F32), c.i, c.n, c.wide, third);
}
__device__ inline bool is_later(mixp_optimizer_kind kind, const mixp_param_row &row) {
    return kind == MIXP_OPTIMIZER_NADAM || kind == MIXP_OPTIMIZER_ADAMAX || row.third;
}

/* wide: the table may have small states and any kind; otherwise none of update_later. */
template <bool wide>
__device__ inline void update_elements(
    const mixp_step_scalars &u, mixp_optimizer_kind kind, const mixp_param_row &row, Cell &c) {
    const bool momentum = row.m != NULL;
    if (wide && is_later(kind, row)) update_later(u, kind, row, c);
    else if (kind >= MIXP_OPTIMIZER_MUON) update_muon(u, kind, c);
    else if (kind == MIXP_OPTIMIZER_SGD) update_sgd(u, momentum, c);
    else if (kind == MIXP_OPTIMIZER_RMSPROP || kind == MIXP_OPTIMIZER_ADAGRAD)
        update_rms(u, momentum, c);
    else if (kind == MIXP_OPTIMIZER_LION) {
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) mixpi_lion_element(&u, c.g[k], &c.p[k], &c.m[k]);
    } else {
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) mixpi_adam_element(&u, c.g[k], &c.p[k], &c.m[k], &c.v[k]);
    }
}

__device__ inline void count_lost(
    mixp_dtype low, const float *was, const Cell &c, mixp_lost &lost) {
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) {
        if (k >= c.n || mixp_bits_of_f32(was[k]) == mixp_bits_of_f32(c.p[k])) continue;
        lost.updates++;
        lost.lost += mixpi_update_is_lost(low, was[k], c.p[k]);
    }
}

/* key: for the row's random numbers in this step. with_small: the table may have states of fewer
 * bytes than f32, and be of any kind. counting: counts lost updates. */
template <bool with_small, bool counting>
__device__ inline void update_8(const mixp_step_scalars &u, const mixp_param_row &row,
    mixp_optimizer_kind kind, uint64_t key, Cell &c, mixp_lost &lost) {
    /* Read the gradient, the weight and the moments. */
    get_of_row(row, mixp_in{ row.grad, row.grad_dtype }, c.i, c.n, c.wide, c.g);
    get_weight<with_small>(row, c);
    get_moments<with_small>(row, c);

    /* Update the weight, and count the updates that its low copy loses. */
    float was[8];
    MIXPI_UNROLL
    for (int k = 0; counting && k < 8; k++) was[k] = c.p[k];
    update_elements<with_small>(u, kind, row, c);
    if (counting) count_lost(mixpi_row_low_weight(&row), was, c, lost);

    /* Store the weight and the moments; small states round with random numbers. */
    if (with_small) {
        for (int k = 0; k < 8; k++) c.random[k] = mixpi_state_random(key, (uint64_t)(c.i + k));
    }
    put_weight<with_small>(row, c);
    put_moments<with_small>(row, c);
}

__device__ inline void clear_8(const mixp_param_row &row, const Cell &c) {
    const float zeros[8] = { 0, 0, 0, 0, 0, 0, 0, 0 };
    put_of_row(row, array_at(row.grad, row.grad_dtype), c.i, c.n, c.wide, zeros);
}

/* The scalars of a row's update, with all threads of a block. A row that missed steps has its own
 * bias corrections. */
__device__ inline mixp_step_scalars update_for(
    const mixp_step_plan &plan, const mixp_step_state *step, const mixp_param_row &row) {
    MIXPI_SHARED(mixp_step_scalars, late, 1);
    if (!row.missed || !*row.missed) return step->update[row.group];
    if (threadIdx.x == 0)
        mixpi_step_scalars_of(&plan, step, row.group, step->applied - *row.missed, late);
    __syncthreads();
    return *late;
}

template <bool with_small, bool counting>
__global__ void __launch_bounds__(look_threads, with_small ? 1 : 2)
    update_chunks(const __grid_constant__ mixp_step_plan plan, const mixp_param_row *rows,
        int64_t count, const mixp_step_state *step, mixp_lost *lost) {
    Walk w = walk_of(rows, count);
    Chunk at;
    const bool skip = step->skip != 0;
    for (int64_t c = blockIdx.x; walk_to(w, c, &at); c += gridDim.x) {
        /* Read the chunk's row, and the scalars of its update. */
        const mixp_param_row row = rows[at.row];
        const mixp_step_scalars u = update_for(plan, step, row);
        const uint64_t key = mixpi_state_key(plan.seed, step->applied, row.tensor);
        const int64_t end = chunk_end(at, row.count);
        mixp_lost found = { 0, 0 };
        Cell cell;
        cell.wide = is_wide_row(row);
        cell.rate = row.rate;

        /* Update its elements, unless the step is skipped; clear a gradient that has been used. */
        for (int64_t from = at.first; from < end; from += 8 * (int64_t)blockDim.x) {
            cell.i = from + 8 * (int64_t)threadIdx.x;
            cell.n = (int)(cell.i < end ? least(8, end - cell.i) : 0);
            if (!skip) update_8<with_small, counting>(u, row, plan.kind, key, cell, found);
            if (row.active == 2) clear_8(row, cell);
        }
        if (counting) add_count(&lost[at.row].updates, found.updates);
        if (counting) add_count(&lost[at.row].lost, found.lost);
    }

    /* Count the steps that rows without a gradient have missed. */
    if (blockIdx.x || skip) return;
    for (int64_t i = (int64_t)threadIdx.x; i < count; i += (int64_t)blockDim.x)
        if (!rows[i].active && rows[i].missed) ++*rows[i].missed;
}

inline Prepare prepare_of(State *s, mixp_step_state *step, mixp_scaler_state *scaler) {
    const Mirrored none = { NULL, NULL, NULL, 0, 0 };
    Prepare p = { 1, &s->block->stop, scaler, mirror_of(s, step, sizeof *step),
        scaler ? mirror_of(s, scaler, sizeof *scaler) : none };
    return p;
}

}   /* namespace */

static mixp_result mixpi_cuda_grad_stats(const mixp_exec *x, const mixp_grad_stats_args *args) {
    Kernel k(x);
    if (!k.state) return MIXP_ERR_ORDER;
    Look *bins = (Look *)scratch_of(x, bin_count * sizeof *bins);
    if (!bins) return MIXP_ERR_MEMORY;

    /* The plan is in host memory: the kernel gets a copy. */
    static const mixp_step_plan no_plan = {};
    mixp_grad_stats_args job = *args;
    Prepare then = {};
    if (args->plan) then = prepare_of(k.state, args->step, args->scaler);
    job.plan = NULL;
    return k.report(
        "grad_stats", MIXPI_LAUNCH(gather_chunks, (unsigned)least(bin_count, blocks_of(k.state, 8)),
                          look_threads, 0, k.stream, job, bins, k.state->block->arrived,
                          args->plan ? *args->plan : no_plan, then));
}

static mixp_result mixpi_cuda_clip(const mixp_exec *x, const mixp_clip_args *args) {
    Kernel k(x);
    if (!k.state) return MIXP_ERR_ORDER;
    return k.report(
        "clip", MIXPI_LAUNCH(clip_chunks, blocks_of(k.state, 8), look_threads, 0, k.stream, *args));
}

static mixp_result mixpi_cuda_prepare(const mixp_exec *x, const mixp_prepare_args *args) {
    Kernel k(x);
    if (!k.state) return MIXP_ERR_ORDER;
    return k.report("prepare", MIXPI_LAUNCH(prepare_step, 1, warp_size, 0, k.stream, *args->plan,
                                   args->step, prepare_of(k.state, args->step, args->scaler)));
}

/* Does the table need the kernel for small states and all kinds? */
static bool has_wide_rows(const mixp_step_plan *plan) {
    return plan->small_states || plan->amsgrad || plan->centered ||
           plan->kind == MIXP_OPTIMIZER_NADAM || plan->kind == MIXP_OPTIMIZER_ADAMAX;
}

static mixp_result mixpi_cuda_update(const mixp_exec *x, const mixp_update_args *args) {
    Kernel k(x);
    const bool wide = has_wide_rows(args->plan);
    auto kernel = wide ? update_chunks<true, false> : update_chunks<false, false>;
    if (args->lost) kernel = wide ? update_chunks<true, true> : update_chunks<false, true>;
    if (!k.state) return MIXP_ERR_ORDER;
    return k.report("update", MIXPI_LAUNCH(kernel, blocks_of(k.state, 2), look_threads, 0, k.stream,
                                  *args->plan, args->rows, args->count, args->step, args->lost));
}

static mixp_result mixpi_cuda_advance(const mixp_exec *x, const mixp_advance_args *args) {
    Kernel k(x);
    if (!k.state) return MIXP_ERR_ORDER;
    return k.report("advance",
        MIXPI_LAUNCH(advance_scaler, 1, warp_size, 0, k.stream, *args->rule, args->scaler,
            args->wide, args->narrow, args->forgives, args->falls, &k.state->block->stop,
            mirror_of(k.state, args->scaler, sizeof *args->scaler)));
}

static mixp_result mixpi_cuda_restore(const mixp_exec *x, const mixp_restore_args *args) {
    Kernel k(x);
    if (!k.state) return MIXP_ERR_ORDER;

    /* Launch enough blocks for the largest part. */
    size_t most = 0;
    for (int i = 0; i < args->n_parts; i++)
        if (args->parts[i].bytes > most) most = args->parts[i].bytes;
    const int64_t blocks = ceil_div((int64_t)most, 16 * look_threads);
    const unsigned grid = (unsigned)least(blocks ? blocks : 1, blocks_of(k.state, 2));
    return k.report("restore", MIXPI_LAUNCH(restore_parts, grid, look_threads, 0, k.stream, *args));
}

static mixp_result mixpi_cuda_check_buffers(
    const mixp_exec *x, const mixp_check_buffers_args *args) {
    Kernel k(x);
    if (!k.state) return MIXP_ERR_ORDER;

    /* A thread takes four words of the largest part. */
    int64_t most = 0;
    for (int i = 0; i < args->n_parts; i++)
        most = args->parts[i].count > most ? args->parts[i].count : most;
    const int64_t blocks = ceil_div(most, 8 * look_threads);
    const unsigned grid = (unsigned)least(blocks ? blocks : 1, blocks_of(k.state, 2));
    return k.report(
        "check_buffers", MIXPI_LAUNCH(check_parts, grid, look_threads, 0, k.stream, *args));
}

static mixp_result mixpi_cuda_look(const mixp_exec *x, const mixp_look_args *args) {
    Kernel k(x);
    if (!k.state) return MIXP_ERR_ORDER;
    if (!is_real(args->x.dtype)) return MIXP_ERR_DTYPE;
    if (args->n <= 0) return args->n ? MIXP_ERR_ARGUMENT : MIXP_OK;
    if (!args->x.data || !args->row) return MIXP_ERR_ARGUMENT;
    int64_t pieces = ceil_div(args->n, look_piece), most = blocks_of(k.state, 8);
    return k.report("look", MIXPI_LAUNCH(look_pieces, (unsigned)least(pieces, most), look_threads,
                                0, k.stream, *args, mixpi_look_limits_of(args->low)));
}

static mixp_result mixpi_cuda_agree(const mixp_exec *x, const mixp_agree_args *args) {
    Kernel k(x);
    if (!k.state) return MIXP_ERR_ORDER;
    mixp_agree_args job = *args;
    job.plan = NULL; /* the host's: the kernel gets the plan itself */
    return k.report("agree", MIXPI_LAUNCH(agree_ranks, 1, warp_size, 0, k.stream, *args->plan, job,
                                 &k.state->block->stop));
}
/* ==== 6. GEMM ============================================================== >>gemm ====
 *
 * cuBLASLt is column-major. The row-major c = op(a) op(b) is its column-major product
 * c' = op(b)' op(a)': the operands change places and nothing is transposed.
 *
 * cuBLASLt takes a and b of one dtype, c of that dtype or f32, and a bias of c's dtype. Other
 * operands are packed first: copied to scratch memory, widened, dense and aligned. If c is of
 * another kind, its sums go through f32 scratch memory. If cuBLASLt still refuses the product, our
 * own tiled kernel computes the product.
 *
 * A plan (descriptors and algorithm) is made once per shape; later calls neither allocate nor query
 * cuBLASLt. Products are summed in f32, never tf32; partial sums of a split k are f32 as well.
 * Algorithms come from cuBLASLt's heuristic, from a text that an earlier context wrote, or from
 * measurements.
 *
 * An epilogue is a second operation in a product's pass: column sums of dy, or GELU (tanh form). If
 * cuBLASLt lacks the epilogue, two kernels do the work, and mixp_gemm_count.apart counts the call.
 */
namespace {

/* --- a product of any kind ------------------------------------------------------------- *
 *
 * A block of 256 threads computes 64 x 64 elements of c, 4 x 4 per thread, in steps of 16 of k.
 * Each element is one chain of multiply-adds in increasing k.
 */
const int tile_side = 64, tile_depth = 16, tile_pitch = tile_side + 4, tile_threads = 256;

/* Loads op(a)[i0 .., p0 ..] or op(b)'[j0 .., p0 ..] to tile[p * pitch + i]; 0 beyond rows and k. */
__device__ inline void tile_load(float *tile, mixp_in a, int64_t first, int64_t step_i,
    int64_t step_p, int64_t rows, int64_t depth) {
    MIXPI_UNROLL
    for (int e = 0; e < tile_side * tile_depth / tile_threads; e++) {
        int at = (int)threadIdx.x + e * tile_threads;
        int i = step_i == 1 ? at % tile_side : at / tile_depth;
        int p = step_i == 1 ? at / tile_side : at % tile_depth;
        tile[p * tile_pitch + i] =
            i < rows && p < depth ? get1(a, first + i * step_i + p * step_p) : 0.0f;
    }
}

/* sums += the product of two tiles. */
__device__ inline void tile_multiply(float (*sums)[4], const float *a, const float *b) {
    int row = (int)threadIdx.x / 16 * 4, column = (int)threadIdx.x % 16 * 4;
    MIXPI_UNROLL
    for (int p = 0; p < tile_depth; p++) {
        float4 u = *(const float4 *)(const void *)(a + p * tile_pitch + row);
        float4 v = *(const float4 *)(const void *)(b + p * tile_pitch + column);
        float x[4] = { u.x, u.y, u.z, u.w }, y[4] = { v.x, v.y, v.z, v.w };
        MIXPI_UNROLL
        for (int i = 0; i < 4; i++) {
            MIXPI_UNROLL
            for (int j = 0; j < 4; j++) sums[i][j] = fmaf(x[i], y[j], sums[i][j]);
        }
    }
}

__device__ inline void tile_store(
    const mixp_gemm_args &g, int64_t z, int64_t i, int64_t j, const float (*sums)[4]) {
    float alpha = mixpi_gemm_alpha(&g);
    MIXPI_UNROLL
    for (int r = 0; r < 4; r++) {
        MIXPI_UNROLL
        for (int s = 0; s < 4; s++) {
            int64_t at = z * g.stride_c + (i + r) * g.ldc + j + s;
            if (i + r >= g.m || j + s >= g.n) continue;
            float y = fmaf(alpha, sums[r][s], g.bias.data ? get1(g.bias, j + s) : 0.0f);
            put1(g.c, at, g.c.accumulate ? y + get1(as_in(g.c), at) : y);
        }
    }
}

__global__ void __launch_bounds__(tile_threads) gemm_tiles(mixp_gemm_args g) {
    MIXPI_SHARED(float, a, tile_depth *tile_pitch);
    MIXPI_SHARED(float, b, tile_depth *tile_pitch);
    int64_t across = ceil_div(g.n, tile_side), down = ceil_div(g.m, tile_side);
    int64_t ai = g.trans_a ? 1 : g.lda, ap = g.trans_a ? g.lda : 1;
    int64_t bj = g.trans_b ? g.ldb : 1, bp = g.trans_b ? 1 : g.ldb;
    for (int64_t t = blockIdx.x; t < g.batch * down * across; t += gridDim.x) {
        int64_t i = t / across % down * tile_side, j = t % across * tile_side;
        int64_t z = t / across / down;

        /* Walk along k: load a tile of a and one of b, and add their product. */
        float sums[4][4] = {};
        for (int64_t p = 0; p < g.k; p += tile_depth) {
            tile_load(a, g.a, z * g.stride_a + i * ai + p * ap, ai, ap, g.m - i, g.k - p);
            tile_load(b, g.b, z * g.stride_b + j * bj + p * bp, bj, bp, g.n - j, g.k - p);
            __syncthreads();
            tile_multiply(sums, a, b);
            __syncthreads();
        }

        tile_store(g, z, i + (int)threadIdx.x / 16 * 4, j + (int)threadIdx.x % 16 * 4, sums);
    }
}

/* --- copies for cuBLASLt --------------------------------------------------------------- */

/* Matrices of rows x cols elements as stored: rows are `ld` apart, matrices `stride`. */
struct Matrix {
    mixp_in at;
    int64_t rows, cols, ld, stride, count;
};

inline Matrix matrix_a(const mixp_gemm_args &g) {
    return Matrix{ g.a, g.trans_a ? g.k : g.m, g.trans_a ? g.m : g.k, g.lda, g.stride_a,
        g.stride_a ? g.batch : 1 };
}
inline Matrix matrix_b(const mixp_gemm_args &g) {
    return Matrix{ g.b, g.trans_b ? g.n : g.k, g.trans_b ? g.k : g.n, g.ldb, g.stride_b,
        g.stride_b ? g.batch : 1 };
}
inline Matrix matrix_c(const mixp_gemm_args &g) {
    return Matrix{ as_in(g.c), g.m, g.n, g.ldc, g.stride_c, g.batch };
}
inline Matrix matrix_bias(const mixp_gemm_args &g) { return Matrix{ g.bias, 1, g.n, g.n, 0, 1 }; }

inline bool has_aligned_start(const Matrix &m) {
    return is_wide(m.at) && (m.count == 1 || m.stride * dtype_bytes(m.at.dtype) % 16 == 0);
}
/* Can the matrix's rows be read 8 elements at a time? */
inline bool has_aligned_rows(const Matrix &m) {
    return is_wide(m.at) && (m.rows == 1 || m.ld % 8 == 0) && (m.count == 1 || m.stride % 8 == 0);
}

/* Copies src to `to`, laid out as dst: aligned, full rows. Columns beyond src's width become 0. */
__global__ void gemm_pack(mixp_out to, Matrix dst, Matrix src, bool wide) {
    int64_t across = dst.ld / 8, n = dst.count * dst.rows * across;
    int64_t step = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        int64_t row = i / across % dst.rows, z = i / across / dst.rows, j = i % across * 8;
        float v[8];
        get8_any(src.at, z * src.stride + row * src.ld + j, (int)least(8, src.cols - j), wide, v);
        put8(to, z * dst.stride + row * dst.ld + j, v);
    }
}

/* to (+)= sums + bias; `to` is laid out as c. */
__global__ void gemm_finish(mixp_out to, Matrix c, Matrix sums, mixp_in bias, bool wide) {
    int64_t across = ceil_div(c.cols, 8), n = c.count * c.rows * across;
    int64_t step = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        int64_t row = i / across % c.rows, z = i / across / c.rows, j = i % across * 8;
        int64_t at = z * c.stride + row * c.ld + j;
        int many = (int)least(8, c.cols - j);
        float v[8], add[8] = {}, old[8] = {};
        get8(sums.at, z * sums.stride + row * sums.ld + j, v);
        if (bias.data) get8_any(bias, j, many, false, add);
        if (to.accumulate) get8_any(c.at, at, many, wide, old);
        MIXPI_UNROLL
        for (int e = 0; e < 8; e++) v[e] = v[e] + add[e] + old[e];
        put8_any(to, at, many, wide, v);
    }
}

/* --- queries to cuBLASLt ---------------------------------------------------------------- */

/* A product whose operands cuBLASLt takes: the given operands, or packed copies. */
struct Product {
    mixp_gemm_args g;
    bool      pack_a, pack_b, pack_bias, finish;
    size_t    at_a, at_b, at_bias, at_c, bytes;     /* offsets in, and size of, scratch memory */
    cublasLtEpilogue_t epilogue;
    void     *sums, *before;                        /* for an epilogue; otherwise NULL       */
    const void *scales_a, *scales_b;                /* of a narrow product; otherwise NULL   */
    int32_t   mode_a, mode_b;                       /* cuBLASLt's modes of them; 0: none     */
};

/* Must the operand be copied to get this dtype (strict: and alignment)? */
inline bool is_pack_needed(const Matrix &m, mixp_dtype dtype, bool strict) {
    return m.at.dtype != dtype || (m.rows > 1 && m.ld < m.cols) || m.stride < 0 ||
           (strict && !has_aligned_start(m));
}

/* Room for m as a dense matrix of this dtype, its rows padded to 8 elements. */
inline size_t pack_room(
    Product *p, const Matrix &m, mixp_dtype dtype, int64_t *ld, int64_t *stride) {
    size_t start = p->bytes;
    *ld = round_up(m.cols, 8);
    *stride = m.count > 1 ? m.rows * *ld : 0;
    p->bytes += (size_t)round_up(m.count * m.rows * *ld * dtype_bytes(dtype), 256);
    return start;
}

/* A matrix of one row may have any ld, but cuBLASLt requires ld >= the width. */
inline int64_t row_pitch(const Matrix &m) { return m.rows == 1 && m.ld < m.cols ? m.cols : m.ld; }

/* strict: for the second attempt; packs unaligned operands and adds the bias in a kernel. */
inline Product product_of(const mixp_gemm_args &g, bool strict) {
    const Matrix a = matrix_a(g), b = matrix_b(g), c = matrix_c(g), bias = matrix_bias(g);
    Product p;
    memset((void *)&p, 0, sizeof p);
    p.g = g;
    p.g.lda = row_pitch(a);
    p.g.ldb = row_pitch(b);
    p.g.ldc = row_pitch(c);

    /* Which operands does cuBLASLt not accept unchanged? */
    const mixp_dtype dtype = g.a.dtype == g.b.dtype ? g.a.dtype : MIXP_F32;
    p.pack_a = is_pack_needed(a, dtype, strict);
    p.pack_b = is_pack_needed(b, dtype, strict);
    p.finish = is_pack_needed(c, c.at.dtype == dtype ? dtype : MIXP_F32, strict) ||
               (g.bias.data && (strict || (g.bias.dtype != g.c.dtype && g.c.dtype != MIXP_F32)));
    p.pack_bias = g.bias.data && !p.finish && is_pack_needed(bias, g.c.dtype, true);

    /* Give their packed copies room in scratch memory. */
    if (p.pack_a) {
        p.g.a.dtype = dtype;
        p.at_a = pack_room(&p, a, dtype, &p.g.lda, &p.g.stride_a);
    }
    if (p.pack_b) {
        p.g.b.dtype = dtype;
        p.at_b = pack_room(&p, b, dtype, &p.g.ldb, &p.g.stride_b);
    }
    if (p.pack_bias) {
        int64_t ld, stride;
        p.g.bias.dtype = g.c.dtype;
        p.at_bias = pack_room(&p, bias, g.c.dtype, &ld, &stride);
    }

    /* A product that a kernel finishes is summed in f32, without a bias. */
    p.epilogue = g.bias.data && !p.finish ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
    if (!p.finish) return p;
    p.at_c = pack_room(&p, c, MIXP_F32, &p.g.ldc, &p.g.stride_c);
    p.g.c.dtype = MIXP_F32;
    p.g.c.accumulate = 0;
    p.g.bias.data = NULL;
    return p;
}

/* --- plans ----------------------------------------------------------------------------- */

const int plan_lists = 256, most_plans = 4096, most_algorithms = 24;
/* Matrices that cuBLASLt accepts in one call. */
const int64_t most_batch = 65535;

/* The properties that choose an algorithm. flags: which of a, b and c are unaligned, and whether
 * alpha is in device memory. modes: of the scales of a, and 16 times those of b. No padding,
 * because keys are compared as bytes. */
const int32_t unaligned_a = 1, unaligned_b = 2, unaligned_c = 4, alpha_on_device = 8;
struct PlanKey {
    int64_t m, n, k, lda, ldb, ldc, batch, stride_a, stride_b, stride_c;
    int32_t trans_a, trans_b, dtype_a, dtype_b, dtype_c, epilogue, flags, modes;
};

struct Plan {
    PlanKey                key;
    cublasLtMatmulDesc_t   product;
    cublasLtMatrixLayout_t a, b, c;
    cublasLtMatmulAlgo_t   algorithms[most_algorithms];
    int                    count, at;   /* at: the one in use; at = count: none is usable    */
    bool                   given;       /* chosen by the program's choices                   */
    bool                   measured;    /* the algorithms were timed, or will not be         */
    Plan                  *next;
};

/* A line of the program's choices. */
struct Choice {
    PlanKey              key;
    bool                 none;          /* cuBLASLt has no algorithm for the product         */
    cublasLtMatmulAlgo_t algorithm;
};

struct Plans {
    Plan *first[plan_lists];
    int   count;
};

inline void plan_free(State *s, Plan *p) {
    if (p->product) cublasLtMatmulDescDestroy(p->product);
    if (p->a) cublasLtMatrixLayoutDestroy(p->a);
    if (p->b) cublasLtMatrixLayoutDestroy(p->b);
    if (p->c) cublasLtMatrixLayoutDestroy(p->c);
    host_free(s->host, p);
}

inline void plans_clear(State *s) {
    for (int i = 0; i < plan_lists; i++)
        while (s->plans->first[i]) {
            Plan *p = s->plans->first[i];
            s->plans->first[i] = p->next;
            plan_free(s, p);
        }
    s->plans->count = 0;
}

inline void plans_free(State *s) {
    plans_clear(s);
    host_free(s->host, s->plans);
}

inline PlanKey plan_key(const Product &p) {
    /* The shapes; the strides of a single matrix do not count. */
    const mixp_gemm_args &g = p.g;
    const bool many = g.batch > 1;
    PlanKey key;
    memset((void *)&key, 0, sizeof key);
    key.m = g.m;
    key.n = g.n;
    key.k = g.k;
    key.batch = g.batch;
    key.lda = g.lda;
    key.ldb = g.ldb;
    key.ldc = g.ldc;
    key.stride_a = many ? g.stride_a : 0;
    key.stride_b = many ? g.stride_b : 0;
    key.stride_c = many ? g.stride_c : 0;

    /* The kind of product. */
    key.trans_a = g.trans_a != 0;
    key.trans_b = g.trans_b != 0;
    key.dtype_a = g.a.dtype;
    key.dtype_b = g.b.dtype;
    key.dtype_c = g.c.dtype;
    key.epilogue = p.epilogue;
    key.modes = p.mode_a + 16 * p.mode_b;

    /* Where its operands begin. Packed copies are aligned. */
    if (!p.pack_a && !has_aligned_start(matrix_a(g))) key.flags |= unaligned_a;
    if (!p.pack_b && !has_aligned_start(matrix_b(g))) key.flags |= unaligned_b;
    if (!p.finish && !has_aligned_start(matrix_c(g))) key.flags |= unaligned_c;
    if (g.alpha_at) key.flags |= alpha_on_device;
    return key;
}

inline unsigned plan_list(const PlanKey &key) {
    uint64_t words[sizeof key / 8], h = 14695981039346656037u;
    memcpy(words, (const void *)&key, sizeof key);
    for (uint64_t w : words) h = (h ^ w ^ w >> 29) * 1099511628211u;
    return (unsigned)(h >> 40) % plan_lists;
}

inline cudaDataType_t library_type(int32_t dtype) {
    switch (dtype) {
    case MIXP_F16: return CUDA_R_16F;
    case MIXP_BF16: return CUDA_R_16BF;
    case MIXP_F8_E4M3: return CUDA_R_8F_E4M3;
    case MIXP_F8_E5M2: return CUDA_R_8F_E5M2;
#if CUBLAS_VERSION >= 120800
    case MIXP_F4_E2M1: return CUDA_R_4F_E2M1;
#endif
    default: return CUDA_R_32F;
    }
}

/* The layout of a row-major matrix for cuBLASLt, in which rows are columns. */
inline bool layout_make(cublasLtMatrixLayout_t *layout, int32_t dtype, int64_t rows, int64_t cols,
    int64_t ld, int64_t batch, int64_t stride) {
    int32_t count = (int32_t)batch;
    return cublasLtMatrixLayoutCreate(layout, library_type(dtype), (uint64_t)cols, (uint64_t)rows,
               ld) == CUBLAS_STATUS_SUCCESS &&
           cublasLtMatrixLayoutSetAttribute(*layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count,
               sizeof count) == CUBLAS_STATUS_SUCCESS &&
           cublasLtMatrixLayoutSetAttribute(*layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
               &stride, sizeof stride) == CUBLAS_STATUS_SUCCESS;
}

inline bool plan_set(Plan *p, cublasLtMatmulDescAttributes_t what, const void *value, size_t size) {
    return cublasLtMatmulDescSetAttribute(p->product, what, value, size) == CUBLAS_STATUS_SUCCESS;
}

/* Does the epilogue have a bias or sums? Does it read or write the values before GELU? */
inline bool has_vector(int epilogue) {
    return epilogue == CUBLASLT_EPILOGUE_BIAS || epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS ||
           epilogue == CUBLASLT_EPILOGUE_BGRADB;
}
inline bool has_before(int epilogue) {
    return epilogue == CUBLASLT_EPILOGUE_GELU_AUX || epilogue == CUBLASLT_EPILOGUE_DGELU ||
           epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
}

/* at: a sample address of the bias and of the values before GELU; the heuristic reads its
 * alignment. */
inline bool plan_set_epilogue(Plan *p, const void *at) {
    const PlanKey &k = p->key;
    cublasLtEpilogue_t epilogue = (cublasLtEpilogue_t)k.epilogue;
    cudaDataType_t type = library_type(k.dtype_c);
    if (epilogue == CUBLASLT_EPILOGUE_DEFAULT) return true;
    return plan_set(p, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue) &&
           (!has_vector(epilogue) ||
               (plan_set(p, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &type, sizeof type) &&
                   plan_set(p, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &at, sizeof at))) &&
           (!has_before(epilogue) ||
               (plan_set(p, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &k.n, sizeof k.n) &&
                   plan_set(p, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &at, sizeof at)));
}

inline bool plan_set_alpha(Plan *p) {
    int32_t mode = CUBLASLT_POINTER_MODE_DEVICE;
    return !(p->key.flags & alpha_on_device) ||
           plan_set(p, CUBLASLT_MATMUL_DESC_POINTER_MODE, &mode, sizeof mode);
}

/* cuBLASLt's modes of block scales; 0: its header is too old. */
#if CUBLAS_VERSION >= 120800
const int32_t scales_of_16 = CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3,
              scales_of_32 = CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0;
#else
const int32_t scales_of_16 = 0, scales_of_32 = 0;
#endif
#if CUBLAS_VERSION >= 120900
const int32_t scales_of_128 = CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F,
              scales_of_squares = CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
#else
const int32_t scales_of_128 = 0, scales_of_squares = 0;
#endif

/* Sets the addresses of the scales. cuBLASLt's A is our b. */
inline bool plan_set_scales(Plan *p, const void *of_a, const void *of_b) {
    return (p->key.modes % 16 == 0 ||
               plan_set(p, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &of_a, sizeof of_a)) &&
           (p->key.modes / 16 == 0 ||
               plan_set(p, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &of_b, sizeof of_b));
}

/* Sets the modes of scales. at: a sample of their addresses, until a product sets its own. */
inline bool plan_set_modes(Plan *p, const void *at) {
    int32_t of_a = p->key.modes % 16, of_b = p->key.modes / 16;
    if (!p->key.modes) return true;
#if CUBLAS_VERSION >= 120800
    return plan_set(p, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &of_a, sizeof of_a) &&
           plan_set(p, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &of_b, sizeof of_b) &&
           plan_set_scales(p, at, at);
#else
    (void)of_a, (void)of_b, (void)at;
    return false;
#endif
}

inline bool plan_describe(Plan *p, const void *at) {
    const PlanKey &k = p->key;
    cublasOperation_t first = k.trans_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasOperation_t second = k.trans_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    return cublasLtMatmulDescCreate(&p->product, CUBLAS_COMPUTE_32F, CUDA_R_32F) ==
               CUBLAS_STATUS_SUCCESS &&
           layout_make(&p->a, k.dtype_a, k.trans_a ? k.k : k.m, k.trans_a ? k.m : k.k, k.lda,
               k.batch, k.stride_a) &&
           layout_make(&p->b, k.dtype_b, k.trans_b ? k.n : k.k, k.trans_b ? k.k : k.n, k.ldb,
               k.batch, k.stride_b) &&
           layout_make(&p->c, k.dtype_c, k.m, k.n, k.ldc, k.batch, k.stride_c) &&
           plan_set(p, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first) &&
           plan_set(p, CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof second) && plan_set_alpha(p) &&
           plan_set_modes(p, at) && plan_set_epilogue(p, at);
}

/* Declares an address's alignment: 16 bytes, or one element. Never more, so that the algorithm does
 * not depend on where the allocator happened to place an array. */
inline bool prefer_aligned(cublasLtMatmulPreference_t p, cublasLtMatmulPreferenceAttributes_t what,
    bool aligned, int32_t dtype) {
    uint32_t bytes = aligned ? 16 : (uint32_t)dtype_bytes((mixp_dtype)dtype);
    return cublasLtMatmulPreferenceSetAttribute(p, what, &bytes, sizeof bytes) ==
           CUBLAS_STATUS_SUCCESS;
}

inline bool prefer_all(cublasLtMatmulPreference_t p, const PlanKey &key) {
    /* Partial sums of a split k are f32: in the workspace, or in c if c is f32. cuBLASLt adds the
     * parts in c in order (counters in the workspace). */
    uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    if (key.dtype_c == MIXP_F32) reductions |= CUBLASLT_REDUCTION_SCHEME_INPLACE;

    /* cuBLASLt's A is our b. */
    const int off = key.flags;
    return cublasLtMatmulPreferenceSetAttribute(p, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
               &workspace_bytes, sizeof workspace_bytes) == CUBLAS_STATUS_SUCCESS &&
           cublasLtMatmulPreferenceSetAttribute(p, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
               &reductions, sizeof reductions) == CUBLAS_STATUS_SUCCESS &&
           prefer_aligned(
               p, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, !(off & unaligned_b), key.dtype_b) &&
           prefer_aligned(
               p, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, !(off & unaligned_a), key.dtype_a) &&
           prefer_aligned(
               p, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, !(off & unaligned_c), key.dtype_c) &&
           prefer_aligned(
               p, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, !(off & unaligned_c), key.dtype_c);
}

/* Does the status mean that cuBLASLt does not support this product? Any other error may be
 * temporary. */
inline bool is_refusal(cublasStatus_t e) {
    return e == CUBLAS_STATUS_NOT_SUPPORTED || e == CUBLAS_STATUS_INVALID_VALUE ||
           e == CUBLAS_STATUS_ARCH_MISMATCH;
}

/* Reports a failure. An earlier CUDA error, if any, is more precise than cuBLASLt's status. */
inline mixp_result report_failure(State *s, cublasStatus_t e) {
    cudaError_t before = cudaGetLastError();
    if (e == CUBLAS_STATUS_ALLOC_FAILED)
        return say(s, MIXP_ERR_MEMORY, "cuBLASLt", "out of memory");
    if (before != cudaSuccess) return report_error(s, before, "cuBLASLt");
    return say(s, MIXP_ERR_DEVICE, "cuBLASLt", cublasLtGetStatusString(e));
}

/* After a refusal by cuBLASLt, which is no error: clears the CUDA error that it left, unless there
 * was an error before. */
inline void clear_refusal(cudaError_t before) {
    if (before == cudaSuccess) cudaGetLastError();
}

inline bool is_usable(const Plan *p) { return p->at < p->count; }

/* Keeps the algorithms of cuBLASLt's list that fit the workspace, in the list's order. The first
 * that cuBLASLt then accepts computes every product of this kind. Timing chooses only if the
 * program asks for it, because timing would make two runs differ. */
inline void plan_keep(Plan *p, const cublasLtMatmulHeuristicResult_t *list, int found) {
    for (int i = 0; i < found; i++)
        if (list[i].state == CUBLAS_STATUS_SUCCESS && list[i].workspaceSize <= workspace_bytes)
            p->algorithms[p->count++] = list[i].algo;
}

inline mixp_result refuse_choice(State *s) {
    return say(s, MIXP_ERR_DEVICE, "gemm_choices",
        "cuBLASLt refuses an algorithm in this text; omit gemm_choices, run a step, and save the "
        "text again");
}

/* Does cuBLASLt accept the algorithm of this choice, for this product and in our workspace? */
inline mixp_result choice_check(State *s, const Plan *p, const Choice &c) {
    cublasLtMatmulHeuristicResult_t about;
    const cudaError_t before = cudaPeekAtLastError();
    cublasStatus_t e =
        cublasLtMatmulAlgoCheck(s->lt, p->product, p->b, p->a, p->c, p->c, &c.algorithm, &about);
    if (e != CUBLAS_STATUS_SUCCESS && !is_refusal(e)) return report_failure(s, e);
    if (e == CUBLAS_STATUS_SUCCESS && about.workspaceSize <= workspace_bytes) return MIXP_OK;
    clear_refusal(before);
    return refuse_choice(s);
}

/* Uses the algorithm that the program's choices name for this product. If they name none, p->given
 * stays false. */
inline mixp_result plan_take(State *s, Plan *p) {
    for (int i = 0; i < s->choice_count; i++) {
        const Choice &c = s->choices[i];
        if (memcmp((const void *)&c.key, (const void *)&p->key, sizeof c.key) != 0) continue;
        p->algorithms[0] = c.algorithm;
        p->count = !c.none;
        p->given = true;
        return c.none ? MIXP_OK : choice_check(s, p, c);
    }
    return MIXP_OK;
}

inline mixp_result plan_ask(State *s, Plan *p) {
    /* Ask cuBLASLt's heuristic for algorithms. */
    const cudaError_t before = cudaPeekAtLastError();
    cublasLtMatmulPreference_t preference = NULL;
    cublasLtMatmulHeuristicResult_t list[most_algorithms];
    int found = 0;
    cublasStatus_t e = cublasLtMatmulPreferenceCreate(&preference);
    if (e == CUBLAS_STATUS_SUCCESS && !prefer_all(preference, p->key))
        e = CUBLAS_STATUS_ALLOC_FAILED;
    if (e == CUBLAS_STATUS_SUCCESS)
        e = cublasLtMatmulAlgoGetHeuristic(
            s->lt, p->product, p->b, p->a, p->c, p->c, preference, most_algorithms, list, &found);
    if (preference) cublasLtMatmulPreferenceDestroy(preference);
    if (e != CUBLAS_STATUS_SUCCESS && !is_refusal(e)) return report_failure(s, e);

    /* Keep those that fit. A plan without any is no error. */
    if (e == CUBLAS_STATUS_SUCCESS) plan_keep(p, list, found);
    if (!is_usable(p)) clear_refusal(before);
    return MIXP_OK;
}

inline mixp_result plan_choose(State *s, Plan *p) {
    mixp_result r = plan_take(s, p);
    return r != MIXP_OK || p->given ? r : plan_ask(s, p);
}

/* A new plan, in the list that its key belongs to. */
inline mixp_result plan_new(State *s, const PlanKey &key, Plan **made) {
    /* cuBLASLt 13.3 has no heuristics during a capture, and a recorded step has run before. */
    if (s->capture) return refuse_in_capture(s, "a product of a shape that no step had before");
    mixp_result r = MIXP_OK;
    if (key.flags & alpha_on_device)
        r = report_error(s, MIXPI_LAUNCH(set_betas, 1, 1, 0, s->stream, s->block->betas), "gemm");
    if (r != MIXP_OK) return r;
    if (s->plans->count >= most_plans) plans_clear(s);
    Plan *p = (Plan *)host_new(s->host, sizeof *p);
    if (!p) return say(s, MIXP_ERR_MEMORY, "gemm", "out of memory");

    /* Describe the product. A bias is aligned to only 16 bytes; the workspace's own address would
     * promise more. */
    p->key = key;
    r = plan_describe(p, (char *)s->workspace + 16)
            ? plan_choose(s, p)
            : say(s, MIXP_ERR_MEMORY, "gemm", "out of memory");
    if (r != MIXP_OK) {
        plan_free(s, p);
        return r;
    }

    /* Keep the plan in the list of its key. */
    const unsigned list = plan_list(key);
    p->next = s->plans->first[list];
    s->plans->first[list] = *made = p;
    s->plans->count++;
    return MIXP_OK;
}

inline mixp_result plan_of(State *s, const Product &product, Plan **found) {
    if (!s->plans) {
        s->plans = (Plans *)host_new(s->host, sizeof *s->plans);
        s->free_plans = plans_free;
        if (!s->plans) return say(s, MIXP_ERR_MEMORY, "gemm", "out of memory");
    }
    const PlanKey key = plan_key(product);
    for (Plan *p = s->plans->first[plan_list(key)]; p; p = p->next)
        if (memcmp((const void *)&p->key, (const void *)&key, sizeof key) == 0) {
            *found = p;
            return MIXP_OK;
        }
    return plan_new(s, key, found);
}

/* --- a call ---------------------------------------------------------------------------- */

/* Packs an operand into scratch memory, and points `to` at the copy. */
inline mixp_result pack_operand(
    Kernel *k, const Matrix &from, mixp_in *to, int64_t ld, void *copy) {
    mixp_out out = { copy, to->dtype, 0 };
    Matrix dst = from;
    to->data = copy;
    dst.at = *to;
    dst.ld = ld;
    dst.stride = from.rows * ld;
    return k->report("gemm", MIXPI_LAUNCH(gemm_pack, grid_for(dst.count * dst.rows * ld / 8, 256),
                                 256, 0, k->stream, out, dst, from, has_aligned_rows(from)));
}

inline mixp_result product_pack(Kernel *k, const mixp_gemm_args &g, Product *p, char *scratch) {
    mixp_result r = MIXP_OK;
    if (p->pack_a) r = pack_operand(k, matrix_a(g), &p->g.a, p->g.lda, scratch + p->at_a);
    if (p->pack_b && r == MIXP_OK)
        r = pack_operand(k, matrix_b(g), &p->g.b, p->g.ldb, scratch + p->at_b);
    if (p->pack_bias && r == MIXP_OK)
        r = pack_operand(k, matrix_bias(g), &p->g.bias, round_up(g.n, 8), scratch + p->at_bias);
    if (p->finish) p->g.c.data = scratch + p->at_c;
    return r;
}

/* Sets the addresses of this call's bias or sums, of the values before GELU, and of scales. */
inline bool product_point(const Product &p, Plan *plan) {
    const void *vector = p.sums ? p.sums : p.g.bias.data;
    return plan_set_scales(plan, p.scales_a, p.scales_b) &&
           (!has_vector(p.epilogue) ||
               plan_set(plan, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &vector, sizeof vector)) &&
           (!has_before(p.epilogue) || plan_set(plan, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER,
                                           &p.before, sizeof p.before));
}

/* Runs the product with the plan's algorithm `which`. */
inline cublasStatus_t product_call(Kernel *k, const Product &p, Plan *plan, int which) {
    State *s = k->state;
    const mixp_gemm_args &g = p.g;
    float one = g.c.accumulate ? 1.0f : 0.0f;
    const float *alpha = g.alpha_at ? g.alpha_at : &g.alpha;
    const float *beta = g.alpha_at ? &s->block->betas[g.c.accumulate != 0] : &one;
    return cublasLtMatmul(s->lt, plan->product, alpha, g.b.data, plan->b, g.a.data, plan->a, beta,
        g.c.data, plan->c, g.c.data, plan->c, &plan->algorithms[which], s->workspace,
        workspace_bytes, k->stream);
}

/* Runs the product. If cuBLASLt refuses an algorithm that it offered, drops the algorithm for good
 * and tries the next of the list. When the list is exhausted, the plan is unusable. */
inline mixp_result product_run(Kernel *k, const Product &p, Plan *plan) {
    State *s = k->state;
    cudaError_t before = cudaPeekAtLastError();
    cublasStatus_t e = product_point(p, plan) ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
    for (; e == CUBLAS_STATUS_SUCCESS && is_usable(plan); plan->at++) {
        e = product_call(k, p, plan, plan->at);
        if (e == CUBLAS_STATUS_SUCCESS) return MIXP_OK;
        if (!is_refusal(e)) return report_failure(s, e);

        /* Go on to the next algorithm, unless the program has chosen this one. */
        clear_refusal(before);
        if (plan->given) return refuse_choice(s);
        e = CUBLAS_STATUS_SUCCESS;
    }
    plan->at = plan->count;
    return MIXP_OK;
}

}   /* namespace */

/* --- measuring ------------------------------------------------------------------------- *
 *
 * If the program asks for it, the first product of a plan times each algorithm and puts the fastest
 * first. A training step runs on a hot GPU, whose clock is lower than that of a cool one, and the
 * fastest algorithm may be another. So the first measurement of a context warms the GPU up. The
 * algorithms alternate, and the median of each counts. Trials write to the product's own c, unless
 * the product accumulates: then to other memory.
 */
namespace {

const int   measured_rounds = 5, measured_runs = 2, most_warm_runs = 2000;
const float warm_ms = 200.0f;
const float worth_it = 0.98f;   /* of the first one's time: a smaller gain is noise           */

/* Milliseconds of each algorithm, or of one other way, in each round. */
struct Trials { float ms[most_algorithms][measured_rounds]; };

inline bool is_measured(const State *s, const Plan *plan) {
    return !s->measure || s->capture || plan->measured || plan->given || !is_usable(plan);
}

inline float median_of(const float *ms) {
    float sorted[measured_rounds];
    for (int i = 0; i < measured_rounds; i++) {
        int at = i;
        for (; at > 0 && sorted[at - 1] > ms[i]; at--) sorted[at] = sorted[at - 1];
        sorted[at] = ms[i];
    }
    return sorted[measured_rounds / 2];
}

/* *ms: the time of measured_runs runs, after another run. Waits for the GPU. */
template <class Run> inline mixp_result time_of(Kernel *k, const Run &run, float *ms) {
    cudaEvent_t from = NULL, to = NULL;
    cudaError_t e = cudaEventCreateWithFlags(&from, cudaEventDefault);
    if (e == cudaSuccess) e = cudaEventCreateWithFlags(&to, cudaEventDefault);

    /* Run once, then between the two events. */
    run();
    *ms = INFINITY;
    float taken = INFINITY;
    if (e == cudaSuccess) e = cudaEventRecord(from, k->stream);
    for (int i = 0; i < measured_runs && e == cudaSuccess; i++) run();
    if (e == cudaSuccess) e = cudaEventRecord(to, k->stream);
    if (e == cudaSuccess) e = cudaEventSynchronize(to);
    if (e == cudaSuccess) e = cudaEventElapsedTime(&taken, from, to);
    if (e == cudaSuccess) *ms = taken;

    if (from) clear_error(cudaEventDestroy(from));
    if (to) clear_error(cudaEventDestroy(to));
    return k->report("gemm", e);
}

/* *ms: the time of one algorithm, INFINITY if cuBLASLt refuses it. */
inline mixp_result algorithm_time(Kernel *k, const Product &p, Plan *plan, int which, float *ms) {
    cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
    const auto run = [&] {
        if (status == CUBLAS_STATUS_SUCCESS) status = product_call(k, p, plan, which);
    };
    const cudaError_t before = cudaPeekAtLastError();
    mixp_result r = time_of(k, run, ms);
    if (status != CUBLAS_STATUS_SUCCESS) *ms = INFINITY;
    if (r != MIXP_OK || status == CUBLAS_STATUS_SUCCESS) return r;
    if (!is_refusal(status)) return report_failure(k->state, status);
    clear_refusal(before);
    return MIXP_OK;
}

/* Runs the plan's first algorithm for warm_ms, once in a context. */
inline mixp_result warm_up(Kernel *k, const Product &p, Plan *plan) {
    if (k->state->warm) return MIXP_OK;
    k->state->warm = true;

    /* How long does a run take? */
    float ms = INFINITY;
    mixp_result r = algorithm_time(k, p, plan, plan->at, &ms);
    if (r != MIXP_OK || !(ms < warm_ms)) return r;

    const float runs = warm_ms * measured_runs / ms;
    const int count = runs < most_warm_runs ? (int)runs : most_warm_runs;
    for (int i = 0; i < count; i++)
        if (product_call(k, p, plan, plan->at) != CUBLAS_STATUS_SUCCESS) break;
    return MIXP_OK;
}

/* Times each algorithm once: round `round`, forwards or backwards. */
inline mixp_result algorithms_time(Kernel *k, const Product &p, Plan *plan, Trials *t, int round) {
    for (int i = plan->at; i < plan->count; i++) {
        const int which = round % 2 ? plan->count - 1 - (i - plan->at) : i;
        mixp_result r = algorithm_time(k, p, plan, which, &t->ms[which][round]);
        if (r != MIXP_OK) return r;
    }
    return MIXP_OK;
}

/* Puts the fastest algorithm first, if that is worth it. Returns the time of the first one then. */
inline float algorithms_order(Plan *plan, const Trials &t) {
    float ms[most_algorithms];
    for (int i = plan->at; i < plan->count; i++) ms[i] = median_of(t.ms[i]);
    int best = plan->at;
    for (int i = plan->at; i < plan->count; i++)
        if (ms[i] < ms[best]) best = i;
    if (!(ms[best] < ms[plan->at] * worth_it)) best = plan->at;
    cublasLtMatmulAlgo_t first = plan->algorithms[best];
    plan->algorithms[best] = plan->algorithms[plan->at];
    plan->algorithms[plan->at] = first;
    return ms[best];
}

/* Memory for the c of trials; *c NULL: trials write to the product's own c. Returns false: out of
 * memory, no trials. */
inline bool trial_memory(State *s, const mixp_gemm_args &g, void **c) {
    int64_t n = (g.batch - 1) * g.stride_c + (g.m - 1) * g.ldc + g.n;
    *c = NULL;
    if (!g.c.accumulate) return true;
    return memory_new(s, (size_t)(n * dtype_bytes(g.c.dtype)), c) == MIXP_OK;
}

inline mixp_result product_measure(Kernel *k, const Product &p, Plan *plan) {
    if (is_measured(k->state, plan)) return MIXP_OK;
    mixp_result r = check_stream(k->state, "gemm");
    if (r != MIXP_OK) return r;
    plan->measured = true;

    /* The trials' own c. */
    Product trial = p;
    void *c = NULL;
    if (plan->count - plan->at < 2 || !trial_memory(k->state, p.g, &c)) return MIXP_OK;
    if (c) trial.g.c.data = c;

    /* The algorithms alternate. */
    Trials t;
    if (product_point(trial, plan)) {
        r = warm_up(k, trial, plan);
        for (int i = 0; i < measured_rounds && r == MIXP_OK; i++)
            r = algorithms_time(k, trial, plan, &t, i);
        if (r == MIXP_OK) algorithms_order(plan, t);
    }
    if (c) memory_free(k->state, c);
    return r;
}

inline mixp_result product_finish(Kernel *k, const mixp_gemm_args &g, const Product &p) {
    Matrix c = matrix_c(g), sums = matrix_c(p.g);
    int64_t n = c.count * c.rows * ceil_div(c.cols, 8);
    return k->report("gemm", MIXPI_LAUNCH(gemm_finish, grid_for(n, 256), 256, 0, k->stream, g.c, c,
                                 sums, g.bias, has_aligned_rows(c)));
}

/* Tries cuBLASLt, with operands packed as needed. *done: cuBLASLt ran the product. */
inline mixp_result product_try(
    const mixp_exec *x, Kernel *k, const mixp_gemm_args &g, Product p, bool *done) {
    Plan *plan = NULL;
    mixp_result r = plan_of(k->state, p, &plan);
    if (r != MIXP_OK || !is_usable(plan)) return r;
    char *scratch = NULL;
    if (p.bytes && !(scratch = (char *)scratch_of(x, p.bytes))) return MIXP_ERR_MEMORY;

    /* Pack, measure if wanted, multiply, and finish what cuBLASLt cannot. */
    r = product_pack(k, g, &p, scratch);
    if (r == MIXP_OK) r = product_measure(k, p, plan);
    if (r == MIXP_OK) r = product_run(k, p, plan);
    *done = r == MIXP_OK && is_usable(plan);
    return *done && p.finish ? product_finish(k, g, p) : r;
}

inline mixp_result product_by_tiles(Kernel *k, const mixp_gemm_args &g) {
    int64_t tiles = ceil_div(g.m, tile_side) * ceil_div(g.n, tile_side) * g.batch;
    return k->report("gemm",
        MIXPI_LAUNCH(gemm_tiles, (unsigned)least(tiles, 65536), tile_threads, 0, k->stream, g));
}

/* Tries cuBLASLt with the operands as they are, then with packed operands, then our own kernel,
 * which is 50 times slower and is counted to make it visible. */
inline mixp_result product_any(const mixp_exec *x, Kernel *k, const mixp_gemm_args &g) {
    mixp_gemm_count *count = &k->state->products;
    bool done = false;
    mixp_result r = product_try(x, k, g, product_of(g, false), &done);
    if (r == MIXP_OK && done) {
        count->direct++;
        return MIXP_OK;
    }

    if (r == MIXP_OK) r = product_try(x, k, g, product_of(g, true), &done);
    if (r == MIXP_OK && done) {
        count->packed++;
        return MIXP_OK;
    }

    if (r != MIXP_OK) return r;
    count->plain++;
    return product_by_tiles(k, g);
}

/* Matrices [first, first + count) of a batch. */
inline mixp_gemm_args batch_slice(const mixp_gemm_args &g, int64_t first, int64_t count) {
    mixp_gemm_args part = g;
    part.batch = count;
    part.a.data = byte_at(g.a, first * g.stride_a);
    part.b.data = byte_at(g.b, first * g.stride_b);
    part.c.data = byte_at(g.c, first * g.stride_c);
    return part;
}

}   /* namespace */

static mixp_result mixpi_cuda_gemm(const mixp_exec *x, const mixp_gemm_args *g) {
    Kernel k(x);
    if (!k.state) return MIXP_ERR_ORDER;
    if (g->m <= 0 || g->n <= 0 || g->batch <= 0) return MIXP_OK;
    if (!is_real(g->c.dtype) || (g->bias.data && !is_real(g->bias.dtype)) ||
        (g->k > 0 && (!is_real(g->a.dtype) || !is_real(g->b.dtype))))
        return MIXP_ERR_DTYPE;

    /* With alpha 0 cuBLASLt does not read the operands, and their NaNs would be lost. */
    if (g->k <= 0 || (g->alpha == 0.0f && !g->alpha_at)) return product_by_tiles(&k, *g);

    mixp_result r = open_products(k.state);
    for (int64_t z = 0; z < g->batch && r == MIXP_OK; z += most_batch)
        r = product_any(x, &k, batch_slice(*g, z, least(most_batch, g->batch - z)));
    return r;
}
/* --- epilogues ------------------------------------------------------------------------- */

namespace {

/* NULL, or what is wrong with a call. */
inline const char *epilogue_wrong(const mixp_gemm_epilogue_args &k) {
    const mixp_gemm_args &g = k.gemm;
    bool sums = k.kind == MIXP_EPILOGUE_ROW_SUMS;
    if ((unsigned)k.kind >= MIXP_EPILOGUE_COUNT) return "no such epilogue";
    if (g.batch != 1) return "an epilogue needs batch 1";
    const bool no_elements = g.m <= 0 || g.n <= 0;
    if (sums && ((!k.sums.data && g.m > 0) || g.lda != (g.trans_a ? g.m : g.k)))
        return "row sums need a buffer for the sums and a dense matrix a";
    if (!sums && ((!k.before.data && !no_elements) || g.c.accumulate || g.ldc != g.n ||
                     k.before.dtype != g.c.dtype))
        return "GELU needs `before`: dense, and of c's dtype";
    if (k.kind == MIXP_EPILOGUE_GELU_BACK && g.bias.data)
        return "the slope of GELU accepts no bias";
    return NULL;
}

inline cublasLtEpilogue_t epilogue_of(const mixp_gemm_epilogue_args &k) {
    if (k.kind == MIXP_EPILOGUE_ROW_SUMS) return CUBLASLT_EPILOGUE_BGRADB;
    if (k.kind == MIXP_EPILOGUE_GELU_BACK) return CUBLASLT_EPILOGUE_DGELU;
    return k.gemm.bias.data ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
}

/* May cuBLASLt support the epilogue? Requirements: operands need no packing; sums are overwritten
 * and have c's dtype; rows before GELU are multiples of 16 bytes. */
inline bool is_fusible(const mixp_gemm_epilogue_args &k, const Product &p) {
    if (p.pack_a || p.pack_b || p.finish) return false;
    if (k.kind == MIXP_EPILOGUE_ROW_SUMS)
        return !k.gemm.bias.data && k.sums.dtype == k.gemm.c.dtype && !k.sums.accumulate &&
               is_wide(as_in(k.sums));
    return is_wide(as_in(k.before)) && k.gemm.n % 8 == 0;
}

/* Computes the sums of op(a)'s rows in a separate kernel. */
inline mixp_result row_sums(const mixp_exec *x, const mixp_gemm_epilogue_args &k) {
    const mixp_gemm_args &g = k.gemm;
    mixp_reduce_args sum;
    memset((void *)&sum, 0, sizeof sum);
    sum.outer = g.trans_a ? 1 : g.m;
    sum.n = g.k;
    sum.inner = g.trans_a ? g.m : 1;
    sum.factor = 1.0f;
    sum.a = g.a;
    sum.y = k.sums;
    return mixpi_cuda_reduce(x, &sum);
}

inline mixp_result gelu_of(const mixp_exec *x, const mixp_gemm_epilogue_args &k) {
    mixp_unary_args f;
    memset((void *)&f, 0, sizeof f);
    f.op = MIXP_UNARY_GELU_TANH;
    f.n = k.gemm.m * k.gemm.n;
    f.a = as_in(k.before);
    f.y = k.gemm.c;
    return mixpi_cuda_unary(x, &f);
}

inline mixp_result gelu_back(const mixp_exec *x, const mixp_gemm_epilogue_args &k) {
    mixp_unary_backward_args f;
    memset((void *)&f, 0, sizeof f);
    f.op = MIXP_UNARY_GELU_TANH;
    f.n = k.gemm.m * k.gemm.n;
    f.dy = as_in(k.gemm.c);
    f.a = as_in(k.before);
    f.da = k.gemm.c;
    return mixpi_cuda_unary_backward(x, &f);
}

/* The product, and then its epilogue in a separate kernel. */
inline mixp_result epilogue_apart(const mixp_exec *x, const mixp_gemm_epilogue_args &k) {
    mixp_gemm_args g = k.gemm;
    if (k.kind == MIXP_EPILOGUE_GELU) g.c.data = k.before.data;
    mixp_result r = mixpi_cuda_gemm(x, &g);
    if (r != MIXP_OK) return r;
    return k.kind == MIXP_EPILOGUE_ROW_SUMS ? row_sums(x, k)
           : k.kind == MIXP_EPILOGUE_GELU   ? gelu_of(x, k)
                                            : gelu_back(x, k);
}

/* Times the fused product, and the product followed by a kernel, in turns. If the second is faster,
 * marks the fused plan as unusable. */
inline mixp_result epilogue_order(const mixp_exec *x, Kernel *on,
    const mixp_gemm_epilogue_args &trial, const Product &p, Plan *plan) {
    if (!product_point(p, plan)) return MIXP_OK;
    mixp_result done = MIXP_OK;
    const auto run_apart = [&] {
        if (done == MIXP_OK) done = epilogue_apart(x, trial);
    };

    /* Alternate. Trials do not count as products. */
    const mixp_gemm_count count = on->state->products;
    Trials t;
    float apart[measured_rounds];
    mixp_result r = warm_up(on, p, plan);
    for (int i = 0; i < measured_rounds && r == MIXP_OK; i++) {
        r = algorithms_time(on, p, plan, &t, i);
        if (r == MIXP_OK) r = time_of(on, run_apart, &apart[i]);
    }
    on->state->products = count;
    if (r != MIXP_OK || done != MIXP_OK) return r != MIXP_OK ? r : done;

    if (median_of(apart) < algorithms_order(plan, t) * worth_it) plan->at = plan->count;
    return MIXP_OK;
}

inline mixp_result epilogue_measure(
    const mixp_exec *x, Kernel *on, const mixp_gemm_epilogue_args &k, Product p) {
    Plan *plan = NULL;
    mixp_result r = plan_of(on->state, p, &plan);
    if (r != MIXP_OK || is_measured(on->state, plan)) return r;
    r = check_stream(on->state, "gemm");
    if (r != MIXP_OK) return r;
    plan->measured = true;

    /* The separate product makes plans too, and a full list is cleared: this plan with it. */
    if (on->state->plans->count + 4 > most_plans) return MIXP_OK;

    /* Measure with the trials' own c. */
    mixp_gemm_epilogue_args trial = k;
    void *c = NULL;
    if (k.before.data == k.gemm.c.data || !trial_memory(on->state, k.gemm, &c)) return MIXP_OK;
    if (c) p.g.c.data = trial.gemm.c.data = c;
    r = epilogue_order(x, on, trial, p, plan);
    if (c) memory_free(on->state, c);
    return r;
}

inline mixp_result epilogue_try(
    const mixp_exec *x, Kernel *on, const mixp_gemm_epilogue_args &k, bool *done) {
    Product p = product_of(k.gemm, false);
    mixp_result r = open_products(on->state);
    if (r != MIXP_OK || !is_fusible(k, p)) return r;

    p.epilogue = epilogue_of(k);
    p.sums = k.kind == MIXP_EPILOGUE_ROW_SUMS ? k.sums.data : NULL;
    p.before = k.before.data;
    if (on->state->measure) r = epilogue_measure(x, on, k, p);
    if (r == MIXP_OK) r = product_try(x, on, k.gemm, p, done);
    if (*done) on->state->products.direct++;
    return r;
}

}   /* namespace */

static mixp_result mixpi_cuda_gemm_epilogue(const mixp_exec *x, const mixp_gemm_epilogue_args *k) {
    Kernel on(x);
    if (!on.state) return MIXP_ERR_ORDER;
    const char *wrong = epilogue_wrong(*k);
    if (wrong) return say(on.state, MIXP_ERR_ARGUMENT, "gemm", wrong);
    const mixp_gemm_args &g = k->gemm;
    if (g.m <= 0) return MIXP_OK;
    if (!is_real(g.c.dtype) || (g.bias.data && !is_real(g.bias.dtype)) || !is_real(g.a.dtype) ||
        !is_real(g.b.dtype) || (k->sums.data && !is_real(k->sums.dtype)))
        return MIXP_ERR_DTYPE;

    /* Without columns the product has no elements, but the rows of op(a) still have sums. */
    if (g.n <= 0) return k->kind == MIXP_EPILOGUE_ROW_SUMS ? row_sums(x, *k) : MIXP_OK;

    /* Try cuBLASLt's epilogue, then the product and a kernel after it. */
    bool done = false;
    mixp_result r = MIXP_OK;
    if (g.k > 0 && (g.alpha != 0.0f || g.alpha_at)) r = epilogue_try(x, &on, *k, &done);
    if (r != MIXP_OK || done) return r;
    on.state->products.apart++;
    return epilogue_apart(x, *k);
}
/* --- choices, as text ------------------------------------------------------------------- *
 *
 * A first line names the GPU and library, then follow one line per plan and their number, which
 * reveals a truncated text.
 */
namespace {

/* A text under construction. Characters beyond `size` are only counted. */
struct Writer {
    char  *text;
    size_t size, used;
};

inline void write_text(Writer *w, const char *format, ...) {
    const bool room = w->used < w->size;
    va_list list;
    va_start(list, format);
    const int n =
        vsnprintf(room ? w->text + w->used : NULL, room ? w->size - w->used : 0, format, list);
    va_end(list);
    w->used += n > 0 ? (size_t)n : 0;
}

/* A key is written as 64-bit words, in memory order. */
const int key_words = sizeof(PlanKey) / 8, algorithm_words = sizeof(cublasLtMatmulAlgo_t) / 8;

inline void write_words(Writer *w, const void *from, int count) {
    for (int i = 0; i < count; i++) {
        uint64_t word;
        memcpy(&word, (const char *)from + 8 * i, 8);
        write_text(w, " %llx", (unsigned long long)word);
    }
}

/* A text of choices begins with this; the number is its format's. */
const char *const choices_mark = "mixprec products 2:";

inline void write_head(Writer *w, const State *s) {
    write_text(w, "%s cuBLASLt %zu, capability %d, %d multiprocessors\n", choices_mark,
        cublasLtGetVersion(), s->capability, s->processors);
}

inline void write_plan(Writer *w, const Plan *p) {
    write_text(w, is_usable(p) ? "use" : "none");
    write_words(w, &p->key, key_words);
    if (is_usable(p)) write_words(w, &p->algorithms[p->at], algorithm_words);
    write_text(w, "\n");
}

/* The text that mixp_context_gemm_choices returns. */
size_t gemm_choices(const mixp_exec *x, char *text, size_t size) {
    State *s = state_of(x);
    Writer w = { text, size, 0 };
    int count = 0;
    if (!s) return 1;
    write_head(&w, s);
    for (int i = 0; i < plan_lists && s->plans; i++)
        for (const Plan *p = s->plans->first[i]; p; p = p->next, count++) write_plan(&w, p);
    write_text(&w, "end %d\n", count);
    return w.used + 1;
}

/* The value of a hexadecimal digit as we write them; 16: not a digit. */
inline unsigned digit_value(char c) {
    if (c >= '0' && c <= '9') return (unsigned)(c - '0');
    return c >= 'a' && c <= 'f' ? (unsigned)(c - 'a') + 10 : 16;
}

/* Reads 1 to 16 hexadecimal digits at *at. Unlike strtoull, accepts no sign and no 0x. */
inline bool read_digits(const char **at, uint64_t *word) {
    int count = 0;
    *word = 0;
    for (; digit_value(**at) < 16 && count < 16; count++) {
        *word = *word << 4 | digit_value(**at);
        (*at)++;
    }
    return count > 0;
}

/* Reads `count` words of hexadecimal digits at *at. Returns false on anything else. */
inline bool read_words(const char **at, void *to, int count) {
    for (int i = 0; i < count; i++) {
        if (**at != ' ') return false;
        (*at)++;
        uint64_t word;
        if (!read_digits(at, &word)) return false;
        memcpy((char *)to + 8 * i, &word, 8);
    }
    return true;
}

inline bool read_word(const char **at, const char *word) {
    size_t n = strlen(word);
    if (strncmp(*at, word, n) != 0) return false;
    *at += n;
    return true;
}

/* Reads the line of one plan. */
inline bool read_choice(const char **at, Choice *c) {
    c->none = read_word(at, "none");
    if (!c->none && !read_word(at, "use")) return false;
    return read_words(at, &c->key, key_words) &&
           (c->none || read_words(at, &c->algorithm, algorithm_words)) && read_word(at, "\n");
}

inline int lines_of(const char *text) {
    int n = 0;
    for (; *text; text++) n += *text == '\n';
    return n;
}

inline bool read_all(State *s, const char *at, int lines) {
    for (int i = 0; i < lines; i++)
        if (!read_choice(&at, &s->choices[i])) return false;
    s->choice_count = lines;
    char end[32];
    snprintf(end, sizeof end, "end %d\n", lines);
    return strcmp(at, end) == 0;
}

/* Reads a text of choices. MIXP_ERR_FORMAT: not such a text, or truncated. MIXP_ERR_SHAPE: from
 * another GPU or library. */
mixp_result choices_read(State *s, const char *text) {
    char head[128];
    Writer w = { head, sizeof head, 0 };
    const char *after_mark = text;
    int lines = text ? lines_of(text) - 2 : 0;
    if (!text) return MIXP_OK;
    if (!read_word(&after_mark, choices_mark) || lines < 0) return MIXP_ERR_FORMAT;
    write_head(&w, s);
    if (!read_word(&text, head)) return MIXP_ERR_SHAPE;
    s->choices = (Choice *)host_new(s->host, (size_t)(lines + 1) * sizeof *s->choices);
    if (!s->choices) return MIXP_ERR_MEMORY;
    return read_all(s, text, lines) ? MIXP_OK : MIXP_ERR_FORMAT;
}

}   /* namespace */
/* --- narrow products ---------------------------------------------------------------------- *
 *
 * cuBLASLt multiplies fp8 and fp4 codes. Kernels write the codes of the quantised bf16 values to
 * scratch memory, so that the sum runs along the rows: the only layout that every GPU takes. The
 * scales of blocks are written in cuBLASLt's order. A product that cuBLASLt refuses stays a bf16
 * product.
 */
namespace {

const int encode_threads = 256;
const int64_t codes_each = 16;  /* elements of a thread: along the sum, in one block         */

/* One operand: y[rows, cols] becomes codes[outer, sum]. over_rows: the sum runs over rows. */
struct Encoding {
    const mixp_bf16 *y;
    mixp_narrow      how;
    int64_t          rows, cols;
    bool             over_rows;
    int32_t          mode;          /* cuBLASLt's mode of its scales; 0: it needs none       */
    uint8_t         *codes;
    void            *scales;
    uint64_t         per_row;       /* inverse of the threads of a row of y: see over()      */
    uint64_t         per_block[2];  /* inverses of block_rows and block_cols                 */
};

__host__ __device__ inline int64_t outer_of(const Encoding &e) {
    return e.over_rows ? e.cols : e.rows;
}
__host__ __device__ inline int64_t sum_of(const Encoding &e) {
    return e.over_rows ? e.rows : e.cols;
}

/* The code of the scale at place s of the sum. */
__device__ inline uint8_t scale_at(const Encoding &e, int64_t outer, int64_t s) {
    int64_t row = e.over_rows ? s : outer, col = e.over_rows ? outer : s;
    const int64_t across = over(e.cols, e.how.block_cols, e.per_block[1]);
    return e.how.scales[over(row, e.how.block_rows, e.per_block[0]) * across +
                        over(col, e.how.block_cols, e.per_block[1])];
}

/* Stores the codes of 16 values v, which share one scale, from element `to` on: 4 bits each, or
 * 8. Scales of fp8 are powers of two. Inf, which only MXFP8 has, becomes NaN: e4m3 has no Inf, and
 * its largest value would hide it. */
__device__ inline void encode16(const Encoding &e, int64_t to, float *v, uint8_t scale) {
    if (e.how.element == MIXP_F4_E2M1) {
        const float s = mixpi_scale_of_code(e.how.scale, scale);
        uint32_t halves[2] = {};
        MIXPI_UNROLL
        for (int i = 0; i < codes_each; i++) halves[i / 8] |= e2m1_code_of(v[i], s) << i % 8 * 4;
        *(uint2 *)(void *)(e.codes + to / 2) = make_uint2(halves[0], halves[1]);
        return;
    }

    uint32_t bytes[4];
    const float in = e.how.scales ? inverse_scale_of_code(e.how.scale, scale) : 1.0f;
    MIXPI_UNROLL
    for (int i = 0; i < codes_each; i++) v[i] = __fmul_rn(v[i], in);
    if (e.how.element == MIXP_F8_E5M2) fp8_codes<MIXP_F8_E5M2, 4>(v, false, bytes);
    else fp8_codes<MIXP_F8_E4M3, 4>(v, false, bytes);
    *(uint4 *)(void *)(e.codes + to) = make_uint4(bytes[0], bytes[1], bytes[2], bytes[3]);
}

/* The sum runs along the rows of y, so y and the codes have the same order. Each thread encodes 16
 * elements. */
__global__ void __launch_bounds__(encode_threads)
    narrow_codes_along(const __grid_constant__ Encoding e) {
    const int64_t n = e.rows * e.cols / codes_each, each_row = e.cols / codes_each;
    int64_t t = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (; t < n; t += (int64_t)gridDim.x * blockDim.x) {
        float v[codes_each];
        plain_get8<MIXP_BF16>(e.y, t * codes_each, v);
        plain_get8<MIXP_BF16>(e.y, t * codes_each + 8, v + 8);

        /* Find the scale of the elements. */
        uint8_t scale = 0;
        if (e.how.scales) {
            const int64_t row = over(t, each_row, e.per_row);
            scale = scale_at(e, row, (t - row * each_row) * codes_each);
        }
        encode16(e, t * codes_each, v, scale);
    }
}

/* The sum runs down the columns of y. Each thread encodes 16 rows of two columns, which it reads at
 * once. Neighbouring threads read neighbours in y. */
__global__ void __launch_bounds__(encode_threads)
    narrow_codes_across(const __grid_constant__ Encoding e) {
    const int64_t across = e.cols / 2, n = across * (e.rows / codes_each);
    int64_t t = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (; t < n; t += (int64_t)gridDim.x * blockDim.x) {
        const int64_t strip = over(t, across, e.per_row), o = (t - strip * across) * 2;
        const int64_t s = strip * codes_each;
        uint32_t pairs[codes_each];
        MIXPI_UNROLL
        for (int i = 0; i < codes_each; i++)
            pairs[i] = *(const uint32_t *)(const void *)(e.y + (s + i) * e.cols + o);

        /* Encode the columns one after the other; the first is in the lower halves. */
        for (int c = 0; c < 2; c++) {
            float v[codes_each];
            MIXPI_UNROLL
            for (int i = 0; i < codes_each; i++)
                v[i] = mixp_f32_of_bits(c ? pairs[i] & 0xFFFF0000u : pairs[i] << 16);
            encode16(e, (o + c) * e.rows + s, v, e.how.scales ? scale_at(e, o + c, s) : (uint8_t)0);
        }
    }
}

/* --- the order of scales in memory ---
 * Source: cuBLAS documentation, the sections on the layouts of block scaling factors. */

/* Blocks of 16 or 32: bytes, in tiles of 128 x 4; in a tile, rows 32 apart are neighbours. */
const int64_t tile_outer = 128, tile_blocks = 4;

/* A mode that cuBLASLt's header does not have is 0. */
inline bool is_in_tiles(int32_t mode) {
    return mode && (mode == scales_of_16 || mode == scales_of_32);
}

/* Writes the tiles, with 0 beyond the operand. block: elements of the sum under one scale. */
__global__ void __launch_bounds__(encode_threads)
    narrow_tiles(const __grid_constant__ Encoding e, int64_t block) {
    int64_t outer = outer_of(e), blocks = sum_of(e) / block;
    int64_t across = ceil_div(blocks, tile_blocks), size = tile_outer * tile_blocks;
    int64_t n = ceil_div(outer, tile_outer) * across * size;
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i < n; i += (int64_t)gridDim.x * blockDim.x) {
        int64_t in = i % size, tile = i / size;
        int64_t o = tile / across * tile_outer + in / 4 % 4 * 32 + in / 16;
        int64_t b = tile % across * tile_blocks + in % 4;
        bool there = o < outer && b < blocks;
        ((uint8_t *)e.scales)[i] = there ? scale_at(e, o, b * block) : (uint8_t)0;
    }
}

/* Writes the scales of blocks of 128, as f32. Blocks of one row: all rows for the first block of
 * the sum, then for the second, and so on. Squares: for each 128 rows all blocks of the sum, padded
 * to a multiple of 4. */
__global__ void __launch_bounds__(encode_threads)
    narrow_floats(const __grid_constant__ Encoding e, bool squares) {
    int64_t rows = squares ? outer_of(e) / 128 : outer_of(e), blocks = sum_of(e) / 128;
    int64_t pitch = round_up(blocks, 4), n = squares ? rows * pitch : rows * blocks;
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i < n; i += (int64_t)gridDim.x * blockDim.x) {
        int64_t o = squares ? i / pitch * 128 : i % rows, b = squares ? i % pitch : i / rows;
        ((float *)e.scales)[i] =
            b < blocks ? mixpi_scale_of_code(e.how.scale, scale_at(e, o, b * 128)) : 0.0f;
    }
}

/* --- a call --- */

/* The mode of an operand's scales; 0: one scale for the array, or cuBLASLt has no such mode. */
inline int32_t mode_of(const Encoding &e) {
    int64_t along = e.over_rows ? e.how.block_rows : e.how.block_cols;
    int64_t across = e.over_rows ? e.how.block_cols : e.how.block_rows;
    bool four = e.how.element == MIXP_F4_E2M1;
    if (cublasLtGetVersion() < 120800) return 0;
    if (e.how.scale == MIXP_SCALE_E4M3) return four && along == 16 ? scales_of_16 : 0;
    if (e.how.scale == MIXP_SCALE_E8M0) return !four && along == 32 ? scales_of_32 : 0;
    if (e.how.scale != MIXP_SCALE_POWER || four || along != 128) return 0;
    if (cublasLtGetVersion() < 120900) return 0;
    return across == 128 ? scales_of_squares : across == 1 ? scales_of_128 : 0;
}

/* Can the kernels turn the operand into codes? */
inline bool is_encodable(const Encoding &e, const Matrix &m) {
    if (m.at.dtype != MIXP_BF16 || m.ld != m.cols || !is_wide(m.at)) return false;
    if (sum_of(e) % codes_each || outer_of(e) % 2) return false;
    if (e.how.scale == MIXP_SCALE_TENSOR) return e.how.element != MIXP_F4_E2M1;
    return e.how.scales && e.mode && m.rows % e.how.block_rows == 0 &&
           m.cols % e.how.block_cols == 0;
}

inline Encoding encoding_of(const Matrix &m, const mixp_narrow &how, bool over_rows) {
    Encoding e;
    memset((void *)&e, 0, sizeof e);
    e.y = (const mixp_bf16 *)m.at.data;
    e.how = how;
    e.rows = m.rows;
    e.cols = m.cols;
    e.over_rows = over_rows;
    e.mode = mode_of(e);
    e.per_row = inverse_of(e.cols / (over_rows ? 2 : codes_each));
    e.per_block[0] = inverse_of(how.block_rows);
    e.per_block[1] = inverse_of(how.block_cols);
    return e;
}

/* Bytes for the codes; a multiple of 256, so that what follows is aligned. */
inline size_t codes_room(const Encoding &e) {
    int64_t n = e.rows * e.cols;
    return (size_t)round_up(e.how.element == MIXP_F4_E2M1 ? n / 2 : n, 256);
}

/* Bytes for the scales, a multiple of 256; 0 where one scale is the product's alpha. */
inline size_t scales_room(const Encoding &e) {
    if (!e.mode) return 0;
    const int64_t blocks = sum_of(e) / (e.over_rows ? e.how.block_rows : e.how.block_cols);
    if (is_in_tiles(e.mode))
        return (size_t)(round_up(outer_of(e), tile_outer) * round_up(blocks, tile_blocks));
    return (size_t)round_up(outer_of(e) * round_up(blocks, 4) * 4, 256);
}

/* Writes the operand's scales in the order of their mode. */
inline mixp_result lay_scales(Kernel *k, const Encoding &e) {
    if (!e.mode) return MIXP_OK;
    const bool tiles = is_in_tiles(e.mode);
    const unsigned grid = grid_for((int64_t)scales_room(e) / (tiles ? 1 : 4), encode_threads);
    if (tiles)
        return k->report("gemm", MIXPI_LAUNCH(narrow_tiles, grid, encode_threads, 0, k->stream, e,
                                     e.mode == scales_of_16 ? (int64_t)16 : 32));
    return k->report("gemm", MIXPI_LAUNCH(narrow_floats, grid, encode_threads, 0, k->stream, e,
                                 e.mode == scales_of_squares));
}

/* Writes the operand's codes and scales to *room, and moves *room past them. */
inline mixp_result encode(Kernel *k, Encoding *e, char **room) {
    e->codes = (uint8_t *)*room;
    e->scales = e->mode ? *room + codes_room(*e) : NULL;
    *room += codes_room(*e) + scales_room(*e);
    const int64_t each = codes_each * (e->over_rows ? 2 : 1);
    const unsigned grid = grid_for(e->rows * e->cols / each, encode_threads);
    const mixp_result r =
        k->report("gemm", MIXPI_LAUNCH(e->over_rows ? narrow_codes_across : narrow_codes_along,
                              grid, encode_threads, 0, k->stream, *e));
    return r == MIXP_OK ? lay_scales(k, *e) : r;
}

/* The product of the codes, for cuBLASLt. run_codes sets the addresses of codes and scales. */
inline Product product_of_codes(const mixp_gemm_args &g, const Encoding &a, const Encoding &b) {
    Product p;
    memset((void *)&p, 0, sizeof p);
    p.g = g;
    p.g.a = mixpi_in(NULL, a.how.element);
    p.g.b = mixpi_in(NULL, b.how.element);
    p.g.trans_a = 0;
    p.g.trans_b = 1;
    p.g.lda = p.g.ldb = g.k;
    p.mode_a = a.mode;
    p.mode_b = b.mode;
    p.epilogue = g.bias.data ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
    return p;
}

/* Can cuBLASLt write the result, and add the bias? */
inline bool is_writable(const mixp_gemm_args &g) {
    if (g.batch != 1 || g.m <= 0 || g.n <= 0 || g.k <= 0) return false;
    if (g.alpha == 0.0f && !g.alpha_at) return false;
    if (!is_wide(as_in(g.c)) || g.ldc < g.n) return false;
    if (g.bias.data) return g.c.dtype == MIXP_BF16 && g.bias.dtype == MIXP_BF16 && is_wide(g.bias);
    return g.c.dtype == MIXP_BF16 || g.c.dtype == MIXP_F32;
}

/* Encodes both operands in room, and multiplies their codes. */
inline mixp_result run_codes(
    Kernel *k, Product p, Plan *plan, Encoding *a, Encoding *b, char *room) {
    mixp_result r = encode(k, a, &room);
    if (r == MIXP_OK) r = encode(k, b, &room);
    p.g.a.data = a->codes;
    p.g.b.data = b->codes;
    p.scales_a = a->scales;
    p.scales_b = b->scales;
    if (r == MIXP_OK) r = product_measure(k, p, plan);
    return r == MIXP_OK ? product_run(k, p, plan) : r;
}

/* Sets *done if cuBLASLt multiplied the codes. */
inline mixp_result try_codes(
    const mixp_exec *x, Kernel *k, const mixp_gemm_narrow_args &n, bool *done) {
    Encoding a = encoding_of(matrix_a(n.gemm), n.a, n.gemm.trans_a != 0);
    Encoding b = encoding_of(matrix_b(n.gemm), n.b, n.gemm.trans_b == 0);
    if (!is_writable(n.gemm) || !is_encodable(a, matrix_a(n.gemm)) ||
        !is_encodable(b, matrix_b(n.gemm)))
        return MIXP_OK;

    /* Ask cuBLASLt for a plan of the product of the codes. */
    const Product p = product_of_codes(n.gemm, a, b);
    Plan *plan = NULL;
    mixp_result r = open_products(k->state);
    if (r == MIXP_OK) r = plan_of(k->state, p, &plan);
    if (r != MIXP_OK || !is_usable(plan)) return r;

    /* Encode both operands, and multiply. */
    char *room =
        (char *)scratch_of(x, codes_room(a) + scales_room(a) + codes_room(b) + scales_room(b));
    if (!room) return MIXP_ERR_MEMORY;
    r = run_codes(k, p, plan, &a, &b, room);
    *done = r == MIXP_OK && is_usable(plan);
    return r;
}

}   /* namespace */

static mixp_result mixpi_cuda_gemm_narrow(const mixp_exec *x, const mixp_gemm_narrow_args *n) {
    Kernel k(x);
    if (!k.state) return MIXP_ERR_ORDER;
    bool done = false;
    mixp_result r = try_codes(x, &k, *n, &done);
    if (r != MIXP_OK) return r;
    if (!done) return mixpi_cuda_gemm(x, &n->gemm);
    k.state->products.narrow++;
    return MIXP_OK;
}
/* ==== 7. ATTENTION ==================================================== >>attention ====
 *
 * Flash attention: scores are computed one tile at a time and never stored. q, k and v are read in
 * place, packed or separate. A block owns some rows of one head ("own") and walks over tiles of the
 * other side. Forward and dQ own queries and walk over keys; dK and dV own keys and walk over
 * queries, of all heads that share the keys. No two blocks add to the same element, so the bits
 * never vary. dQ runs first and stores delta for dK and dV.
 *
 * Tensor cores compute f16 and bf16 at d of 32, 64 and 128. Everything else, d up to 256, and all
 * of capability 7.0, whose tensor cores want other fragments, uses f32 kernels with the same walk.
 * Separate kernels change scores (a cap, a mask, dropout), with half as many rows, because they
 * have no registers for more.
 */
namespace {

const int   attention_threads = 128, attention_most_d = 256;
constexpr float log2_e = 1.4426950408889634f, ln_2 = 0.6931471805599453f;
constexpr float lowest_float = -3.402823466e+38f;

struct Heads {
    int64_t      b;
    int          t, keys, heads, group, d;      /* group: heads of q for one of k and v      */
    int          ahead;         /* query i sees keys up to i + ahead                         */
    float        scale;
    mixp_in      q, k, v, y, dy;                /* y and dy: read in the backward pass       */
    mixp_head_strides q_at, k_at, v_at, y_at;
    mixp_out     out, dk, dv;   /* out: y, or the gradient of q                              */
    float       *lse;           /* written by the forward pass, read by the backward pass    */
    float       *delta;         /* dy . y of each row, laid out as lse                       */
    const int32_t *lengths;     /* keys of each sequence, or NULL                            */
    FaultFlag    fault;
    mixp_in      mask;
    mixp_head_strides mask_at;
    int          mask_key;
    bool         modified, may_hide;               /* may_hide: a query may see no key          */
    bool         wide;          /* in f32: each row can be read 16 bytes at a time           */
    float        softcap, kept; /* kept: the factor of weights that dropout keeps            */
    Draws        draws;
    uint64_t     limit;         /* random numbers below it drop; 0: nothing is dropped       */
};

const int most_ahead = 0x3FFFFFFF, most_rows = 0x3FFFFF00;      /* their sum is an int       */

/* The first element of head z of q, counted through all sequences; of the head of k or v that head
 * z of q uses; and of head z of k or v. */
__device__ inline int64_t head_at(const Heads &h, const mixp_head_strides &at, int z) {
    return z / h.heads * at.sequence + z % h.heads * at.head;
}
__device__ inline int64_t met_at(const Heads &h, const mixp_head_strides &at, int z) {
    int met = z % h.heads / h.group;
    return z / h.heads * at.sequence + met * at.head;
}

/* How many keys head z sees at most; later keys are padding. */
__device__ inline int keys_of(const Heads &h, int z) {
    int sequence = z / h.heads, length;
    if (!h.lengths) return h.keys;
    length = h.lengths[sequence];
    if ((length < 0 || length > h.keys) && threadIdx.x == 0)
        note_fault(h.fault, FAULT_LENGTH, sequence, length);
    return (int)least(length < 0 ? 0 : length, h.keys);
}

/* --- what may stand between scores and weights ----------------------------------------- */

/* A score, times scale and capped. */
__device__ inline float capped(const Heads &h, float s) {
    return h.softcap > 0.0f ? h.softcap * tanhf(s * h.scale / h.softcap) : s * h.scale;
}

/* The slope of the cap. */
__device__ inline float cap_slope(const Heads &h, float s) {
    float part = h.softcap > 0.0f ? s / h.softcap : 0.0f;
    return fmaf(-part, part, 1.0f);
}

/* The mask's value for a query and a key, both in range. */
__device__ inline float mask_of(const Heads &h, int z, int query, int key) {
    if (!h.mask.data) return 0.0f;
    return get1(
        h.mask, head_at(h, h.mask_at, z) + query * h.mask_at.row + (int64_t)key * h.mask_key);
}

/* The key of dropout's random numbers; 0 without dropout. */
__device__ inline uint64_t draws_key(const Heads &h) { return h.limit ? key_now(h.draws) : 0; }

/* The factor of a weight: 0 where it is dropped. */
__device__ inline float kept_of(const Heads &h, uint64_t draws, int z, int query, int key) {
    int64_t at = ((int64_t)z * h.t + query) * h.keys + key;
    if (!h.limit) return 1.0f;
    return mixp_random_at(draws, (uint64_t)at) >= h.limit ? h.kept : 0.0f;
}

/* --- tiles for tensor cores ------------------------------------------------------------ *
 *
 * A tile is rows of D 2-byte elements in shared memory. Its 16-byte chunks are permuted within
 * a row, so that 8 rows of one matrix for ldmatrix lie in different banks.
 *
 * A warp multiplies fragments: M tiles of 16 own rows, in registers. In an accumulator f[4] a
 * thread has row lane / 4 (f[0], f[1]) and row lane / 4 + 8 (f[2], f[3]), at columns
 * lane % 4 * 2 and the next:
 *
 *     columns    0, 1      2, 3      4, 5      6, 7
 *     row 0      lane 0    lane 1    lane 2    lane 3       f[0], f[1]
 *     row 1      lane 4    lane 5    lane 6    lane 7
 *     ...                                      lane 31
 *     row 8      lane 0    lane 1    lane 2    lane 3       f[2], f[3]
 */
template <int D> __device__ inline int chunk_at(int row, int chunk) {
    return row * D + (chunk ^ (D == 32 ? row >> 1 & 3 : row & 7)) * 8;
}

/* Starts the copy of rows [first, first + rows) of a head; rows beyond t become 0. */
template <int D, int rows>
__device__ inline void tile_fetch(uint16_t *tile, const uint16_t *from, int ld, int first, int t) {
    const int step = attention_threads / (D / 8);
    int row = (int)threadIdx.x / (D / 8), chunk = (int)threadIdx.x % (D / 8);
    const uint16_t *at = from + (int64_t)(first + row) * ld + chunk * 8;
    tile += chunk_at<D>(row, chunk);
    MIXPI_UNROLL
    for (int e = 0; e < rows; e += step) {
        bool there = first + row + e < t;
        cp_async_16(tile + e * D, there ? at : from, there ? 16 : 0);
        at += (int64_t)step * ld;
    }
}

/* chunk_at for row `row` + `within`. row is a multiple of 16, so row does not permute chunks. */
template <int D> __device__ inline int fragment_at(int row, int within, int chunk) {
    return row * D + chunk_at<D>(within, chunk);
}

/* The left factor: rows [row, row+16), columns [16 k, 16 k + 16). */
template <int D>
__device__ inline void left_factor(uint32_t *a, const uint16_t *tile, int row, int k) {
    int lane = (int)threadIdx.x % warp_size;
    ldmatrix_x4<false>(a, tile + fragment_at<D>(row, lane % 16, 2 * k ^ lane / 16));
}
/* The right factor of own x other': 16 rows of the tile are 16 columns of the product. */
template <int D>
__device__ inline void right_rows(uint32_t *b, const uint16_t *tile, int row, int k) {
    int lane = (int)threadIdx.x % warp_size;
    ldmatrix_x4<false>(
        b, tile + fragment_at<D>(row, lane % 8 + lane / 16 * 8, 2 * k ^ lane / 8 % 2));
}
/* The right factor of scores x other: 16 rows are summed over, 16 columns stay. */
template <int D>
__device__ inline void right_columns(uint32_t *b, const uint16_t *tile, int row, int k) {
    int lane = (int)threadIdx.x % warp_size;
    ldmatrix_x4<true>(b, tile + fragment_at<D>(row, lane % 16, 2 * k ^ lane / 16));
}

template <bool bf16> __device__ inline uint32_t pair_code(float lo, float hi) {
    uint32_t bits;
    if (bf16) {
        __nv_bfloat162 pair = __floats2bfloat162_rn(lo, hi);
        memcpy(&bits, (void *)&pair, 4);
    } else {
        __half2 pair = __floats2half2_rn(lo, hi);
        memcpy(&bits, (void *)&pair, 4);
    }
    return bits;
}

/* Turns two accumulators side by side into a left factor of 16 columns, within their registers. */
template <bool bf16> __device__ inline void as_left_factor(uint32_t *a, const float (*f)[4]) {
    a[0] = pair_code<bf16>(f[0][0], f[0][1]);
    a[1] = pair_code<bf16>(f[0][2], f[0][3]);
    a[2] = pair_code<bf16>(f[1][0], f[1][1]);
    a[3] = pair_code<bf16>(f[1][2], f[1][3]);
}

/* sums[M][D] += weights[M][16] x rows [row, row+16) of the tile */
template <int D, int M, bool bf16>
__device__ inline void add_weighted(
    float (*sums)[D / 8][4], const uint32_t (*weights)[4], const uint16_t *tile, int row) {
    MIXPI_UNROLL
    for (int n = 0; n < D / 16; n++) {
        uint32_t b[4];
        right_columns<D>(b, tile, row, n);
        MIXPI_UNROLL
        for (int m = 0; m < M; m++) {
            mma_16816<bf16>(sums[m][2 * n], weights[m], b);
            mma_16816<bf16>(sums[m][2 * n + 1], weights[m], b + 2);
        }
    }
}

/* Stores or adds two neighbours. */
__device__ inline void put_pair(mixp_out a, int64_t i, float x, float y) {
    if (a.dtype == MIXP_F32) {
        float2 *p = (float2 *)(void *)((float *)a.data + i);
        float2 old = a.accumulate ? *p : make_float2(0.0f, 0.0f);
        *p = a.accumulate ? make_float2(old.x + x, old.y + y) : make_float2(x, y);
    } else {
        uint32_t *p = (uint32_t *)(void *)((uint16_t *)a.data + i);
        uint32_t old = a.accumulate ? *p : 0;
        if (a.accumulate) x += low_value(a.dtype, old & 0xFFFFu);
        if (a.accumulate) y += low_value(a.dtype, old >> 16);
        *p = low_pair(a.dtype, x, y);
    }
}

/* Is each element of y rounded at random, in a row with this sum? */
__device__ inline bool is_stochastic(const Heads &h, float sum) {
    return h.out.dtype != MIXP_F32 && !h.out.accumulate && mixpi_top_repeats(sum);
}

/* --- forward on tensor cores ------------------------------------------------------------ */

template <int D, bool modified> struct Forward {
    static const int M = D == 128 || modified ? 1 : 2, rows = 64 * M,
                     keys = D == 128 ? 32 : 64;
    static const int bytes = (rows + 4 * keys) * D * 2;
};

/* A warp's state for its rows: sums over the keys so far, relative to 2^top. */
template <int D, int M> struct RowSums { float o[M][D / 8][4], top[M][2], sum[M][2]; };

/* s = queries x keys' */
template <int D, bool bf16, int M, int N>
__device__ inline void forward_scores(
    float (*s)[N / 8][4], const uint32_t (*q)[D / 16][4], const uint16_t *keys) {
    MIXPI_UNROLL
    for (int k = 0; k < D / 16; k++) {
        MIXPI_UNROLL
        for (int n = 0; n < N / 16; n++) {
            uint32_t b[4];
            right_rows<D>(b, keys, 16 * n, k);
            MIXPI_UNROLL
            for (int m = 0; m < M; m++) {
                mma_16816<bf16>(s[m][2 * n], q[m][k], b);
                mma_16816<bf16>(s[m][2 * n + 1], q[m][k], b + 2);
            }
        }
    }
}

/* The place of the first element of a fragment or a tile. z: the head of q. end: the end of its
 * keys. */
struct Place { int z, row, column, end; };

/* Hides keys from `end` on, and keys too far ahead of their query. */
template <int N> __device__ inline void hide_keys(float (*s)[4], int ahead, const Place &at) {
    MIXPI_UNROLL
    for (int n = 0; n < N; n++) {
        MIXPI_UNROLL
        for (int e = 0; e < 4; e++) {
            int k = at.column + 8 * n + e % 2, row = at.row + e / 2 * 8;
            if (k >= at.end || k > row + ahead) s[n][e] = -INFINITY;
        }
    }
}

/* Changes scores of a fragment: by the cap and the mask. */
template <int N>
__device__ inline void forward_modify(float (*s)[4], const Heads &h, const Place &at) {
    MIXPI_UNROLL
    for (int n = 0; n < N; n++) {
        MIXPI_UNROLL
        for (int e = 0; e < 4; e++) {
            int query = at.row + e / 2 * 8, k = at.column + 8 * n + e % 2;
            s[n][e] = capped(h, s[n][e]);
            if (query < h.t && k < at.end) s[n][e] += mask_of(h, at.z, query, k);
        }
    }
}

/* Drops weights of a fragment. */
template <int N>
__device__ inline void forward_drop(
    float (*s)[4], const Heads &h, uint64_t draws, const Place &at) {
    MIXPI_UNROLL
    for (int n = 0; n < N; n++) {
        MIXPI_UNROLL
        for (int e = 0; e < 4; e++)
            s[n][e] *= kept_of(h, draws, at.z, at.row + e / 2 * 8, at.column + 8 * n + e % 2);
    }
}

/* e^(s - top), for a score and its row's top. A mask can put changed scores far from 0, so their
 * difference is computed first: a product would round off more than the difference. */
template <bool modified> __device__ inline float exp_from(float s, float top, float factor) {
    return exp2_approx(modified ? (s - top) * log2_e : fmaf(s, factor, -top));
}

/* Turns the scores of half the rows of a fragment into weights. Returns what the rows' sums must be
 * multiplied by, for their new top. top is the maximum of changed scores; otherwise of scores times
 * factor, where factor is scale log2 e. */
template <bool modified, int N>
__device__ inline float forward_half(
    float (*s)[4], float &top_so_far, float &sum_so_far, int half, float factor) {
    float most = -INFINITY, top, shrink, sum = 0.0f;

    /* Find the row's new top, over the four threads that share the row. */
    MIXPI_UNROLL
    for (int n = 0; n < N; n++) most = fmaxf(most, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
    most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, 1));
    most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, 2));
    top = fmaxf(top_so_far, modified ? most : most * factor);
    shrink = exp2_approx((top_so_far - top) * (modified ? log2_e : 1.0f));
    top_so_far = top;

    /* Turn scores into weights, and add them. */
    MIXPI_UNROLL
    for (int n = 0; n < N; n++) {
        MIXPI_UNROLL
        for (int e = 2 * half; e < 2 * half + 2; e++) {
            s[n][e] = exp_from<modified>(s[n][e], top, factor);
            sum += s[n][e];
        }
    }

    sum_so_far = fmaf(sum_so_far, shrink, sum);
    return shrink;
}

/* Turns scores into weights, and rescales the rows' sums to their new top. */
template <int D, bool modified, int M, int N>
__device__ inline void forward_softmax(float (*s)[4], RowSums<D, M> &r, int m, float factor) {
    MIXPI_UNROLL
    for (int half = 0; half < 2; half++) {
        float shrink = forward_half<modified, N>(s, r.top[m][half], r.sum[m][half], half, factor);
        MIXPI_UNROLL
        for (int n = 0; n < D / 8; n++) {
            r.o[m][n][2 * half] *= shrink;
            r.o[m][n][2 * half + 1] *= shrink;
        }
    }
}

/* Processes one tile of keys and values. q: the warp's queries; the first is tile.row. */
template <int D, bool bf16, bool modified, int M>
__device__ inline void forward_tile(RowSums<D, M> &r, const Heads &h, uint64_t draws,
    const uint32_t (*q)[D / 16][4], const uint16_t *keys, const Place &tile) {
    const int N = Forward<D, modified>::keys;
    int lane = (int)threadIdx.x % warp_size, end = tile.end;
    float s[M][N / 8][4] = {};

    /* Compute the scores. */
    forward_scores<D, bf16, M, N>(s, q, keys);

    /* Turn them into weights: changed, hidden, dropped. */
    MIXPI_UNROLL
    for (int m = 0; m < M; m++) {
        int query = tile.row + 16 * m, key = tile.column;
        Place at = { tile.z, query + lane / 4, key + lane % 4 * 2, end };
        if (modified) forward_modify<N / 8>(s[m], h, at);
        if (key + N > end || key + N - 1 > query + h.ahead) hide_keys<N / 8>(s[m], h.ahead, at);
        forward_softmax<D, modified, M, N / 8>(s[m], r, m, h.scale * log2_e);
        if (modified && h.limit) forward_drop<N / 8>(s[m], h, draws, at);
    }

    if (modified) __syncwarp(); /* products need all threads of the warp together */

    /* Add the weighted values. */
    MIXPI_UNROLL
    for (int j = 0; j < N / 16; j++) {
        uint32_t weights[M][4];
        MIXPI_UNROLL
        for (int m = 0; m < M; m++) as_left_factor<bf16>(weights[m], s[m] + 2 * j);
        add_weighted<D, M, bf16>(r.o, weights, keys + N * D, 16 * j);
    }
}

template <int D, bool modified, int M>
__device__ inline void forward_store(const RowSums<D, M> &r, const Heads &h, int z, int row) {
    int lane = (int)threadIdx.x % warp_size;
    MIXPI_UNROLL
    for (int i = 0; i < 2 * M; i++) {
        int m = i / 2, half = i % 2, query = row + 16 * m + 8 * half + lane / 4;
        int64_t at = head_at(h, h.y_at, z) + query * h.y_at.row + lane % 4 * 2;

        /* Join the row's sum. A row that sees no key has none, and is 0. */
        float sum = r.sum[m][half], top = r.top[m][half], inverse;
        sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
        sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 2);
        bool none = h.may_hide && sum <= 0.0f;
        inverse = none ? 0.0f : 1.0f / sum;
        bool stochastic = is_stochastic(h, sum);

        /* Store the logarithm of the sum, which the backward pass reads. */
        if (query >= h.t) continue;
        if (lane % 4 == 0)
            h.lse[(int64_t)z * h.t + query] = none       ? INFINITY
                                              : modified ? top + log2f(sum) * ln_2
                                                         : (top + log2f(sum)) * ln_2;

        /* Store the row. */
        MIXPI_UNROLL
        for (int n = 0; n < D / 8; n++) {
            float x = r.o[m][n][2 * half] * inverse, y = r.o[m][n][2 * half + 1] * inverse;
            put_pair(h.out, at + 8 * n, stochastic ? mixpi_round_stochastically(h.out.dtype, x) : x,
                stochastic ? mixpi_round_stochastically(h.out.dtype, y) : y);
        }
    }
}

/* Causal: a head's last queries go first, because they see the most keys. */
template <int D, bool bf16, bool modified>
__global__ void __launch_bounds__(attention_threads, 2) attention_forward(Heads h) {
    typedef Forward<D, modified> Shape;
    const int M = Shape::M, rows = Shape::rows, keys = Shape::keys;
    MIXPI_DYNAMIC_SHARED(uint16_t, own);
    uint16_t *others = own + rows * D;

    /* Find the block's queries, its head, and the tiles of keys that they see. */
    int blocks = (int)ceil_div(h.t, rows), row = (int)threadIdx.x / warp_size * 16 * M;
    int first = (blocks - 1 - (int)(blockIdx.x % blocks)) * rows;
    int z = (int)(blockIdx.x / blocks), end = keys_of(h, z);
    int tiles = (int)ceil_div(least(end, (int64_t)first + rows + h.ahead), keys);
    const uint16_t *q = (const uint16_t *)h.q.data + head_at(h, h.q_at, z);
    const uint16_t *k = (const uint16_t *)h.k.data + met_at(h, h.k_at, z);
    const uint16_t *v = (const uint16_t *)h.v.data + met_at(h, h.v_at, z);
    int ld_k = (int)h.k_at.row, ld_v = (int)h.v_at.row;

    /* The sums are empty: no key has been seen. */
    const uint64_t draws = modified ? draws_key(h) : 0;
    uint32_t held[M][D / 16][4];
    RowSums<D, M> r = {};
    MIXPI_UNROLL
    for (int i = 0; i < 2 * M; i++) r.top[i / 2][i % 2] = lowest_float;

    /* Fetch the queries, then the first tile; hold the queries in registers. */
    tile_fetch<D, rows>(own, q, (int)h.q_at.row, first, h.t);
    cp_async_commit();
    tile_fetch<D, keys>(others, k, ld_k, 0, end);
    tile_fetch<D, keys>(others + keys * D, v, ld_v, 0, end);
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();
    MIXPI_UNROLL
    for (int i = 0; i < M * (D / 16); i++)
        left_factor<D>(held[i % M][i / M], own, row + 16 * (i % M), i / M);

    /* Walk over the tiles: fetch the next one while this one is computed. */
    for (int i = 0; i < tiles; i++) {
        uint16_t *now = others + i % 2 * 2 * keys * D, *next = others + (i + 1) % 2 * 2 * keys * D;
        if (i + 1 < tiles) {
            tile_fetch<D, keys>(next, k, ld_k, (i + 1) * keys, end);
            tile_fetch<D, keys>(next + keys * D, v, ld_v, (i + 1) * keys, end);
        }
        cp_async_commit();
        cp_async_wait<1>();
        __syncthreads();
        Place tile = { z, first + row, i * keys, end };
        if (tile.row < h.t && tile.column < tile.row + 16 * M + h.ahead)
            forward_tile<D, bf16, modified, M>(r, h, draws, held, now, tile);
        __syncthreads();
    }

    cp_async_wait<0>(); /* without any tile the first copy is still in flight */
    forward_store<D, modified, M>(r, h, z, first + row);
}

/* --- backward on tensor cores ----------------------------------------------------------- *
 *
 * With weights p = 2^(scale log2e q k' - lse log2e) and g = p * (dy v' - delta):
 * dv = p' dy, dk = scale g' q, dq = scale g k. One kernel for both walks:
 *
 *              own[0]  own[1]  other[0]  other[1]    sums[0]   sums[1]
 *     keys     k       v       q         dy          dk / scale   dv
 *     queries  q       dy      k         v           dq / scale   -
 *
 * scores own[0] x other[0]', their gradients from own[1] x other[1]'; sums[0] += g x other[0],
 * sums[1] += p x other[1].
 */
template <int D, bool modified> struct Backward {
    static const int M = D == 128 || modified ? 1 : 2, rows = 64 * M, others = 64,
                     columns = 32;
    static const int bytes =
        (2 * rows + 4 * others) * D * 2 + 4 * others * (int)sizeof(float);
};

/* A thread's constants during the walk. */
template <int D, int M> struct Own {
    const uint16_t *own;        /* in shared memory: own[0], followed by own[1]              */
    int   z, row, first, end;   /* z: the queries' head; row: the warp's first own row within
                                   the block; end: the last key + 1                          */
    uint64_t draws;             /* the key of dropout's random numbers                       */
    float lse[M][2], delta[M][2];       /* statistics of own queries                         */
    uint32_t dy[D / 16][M][4];          /* dy of own queries, as left factors                */
};

/* s += a x other' for 32 columns, a: 16 of D. */
template <int D, bool bf16, int M>
__device__ inline void add_products(
    float (*s)[4][4], const uint32_t (*a)[4], const uint16_t *other, int column, int k) {
    MIXPI_UNROLL
    for (int n = 0; n < 2; n++) {
        uint32_t b[4];
        right_rows<D>(b, other, column + 16 * n, k);
        MIXPI_UNROLL
        for (int m = 0; m < M; m++) {
            mma_16816<bf16>(s[m][2 * n], a[m], b);
            mma_16816<bf16>(s[m][2 * n + 1], a[m], b + 2);
        }
    }
}

/* Two products at once: s = own[0] x other[0]', g = own[1] x other[1]'. The walk that owns queries
 * keeps own[1] (dy) in registers. The walk that owns keys has no registers left and reads own[1]
 * again. */
template <int D, bool bf16, bool keys, int M>
__device__ inline void backward_scores(
    float (*s)[4][4], float (*g)[4][4], const Own<D, M> &w, const uint16_t *other, int column) {
    MIXPI_UNROLL_BY((keys ? 2 : D / 16))
    for (int k = 0; k < D / 16; k++) {
        uint32_t a[M][4], c[M][4];
        MIXPI_UNROLL
        for (int m = 0; m < M; m++) {
            left_factor<D>(a[m], w.own, w.row + 16 * m, k);
            if (keys) left_factor<D>(c[m], w.own + 64 * M * D, w.row + 16 * m, k);
        }
        add_products<D, bf16, M>(s, a, other, column, k);
        add_products<D, bf16, M>(g, keys ? c : w.dy[k], other + 64 * D, column, k);
    }
}

/* Turns scores into weights, and g into their gradients. lse and delta belong to columns (keys) or
 * to rows (queries). */
template <bool keys>
__device__ inline void backward_weights(
    float (*s)[4], float (*g)[4], float factor, const float *lse, const float *delta) {
    MIXPI_UNROLL
    for (int n = 0; n < 4; n++) {
        MIXPI_UNROLL
        for (int e = 0; e < 4; e++) {
            int at = keys ? 8 * n + e % 2 : e / 2;
            s[n][e] = exp2_approx(fmaf(s[n][e], factor, -lse[at]));
            g[n][e] = s[n][e] * (g[n][e] - delta[at]);
        }
    }
}

/* backward_weights for changed scores: those with a cap, a mask or dropout. */
template <bool keys>
__device__ inline void backward_modified(float (*s)[4], float (*g)[4], const Heads &h,
    uint64_t draws, const Place &p, const float *lse, const float *delta) {
    MIXPI_UNROLL
    for (int n = 0; n < 4; n++) {
        MIXPI_UNROLL
        for (int e = 0; e < 4; e++) {
            int at = keys ? 8 * n + e % 2 : e / 2;
            int row = p.row + e / 2 * 8, column = p.column + 8 * n + e % 2;
            int query = keys ? column : row, key = keys ? row : column;
            float score = capped(h, s[n][e]), weight, kept, slope = cap_slope(h, score);
            if (query < h.t && key < p.end) score += mask_of(h, p.z, query, key);
            weight = exp2_approx((score - lse[at]) * log2_e);
            kept = kept_of(h, draws, p.z, query, key);
            g[n][e] = weight * (g[n][e] * kept - delta[at]) * slope;
            s[n][e] = weight * kept;
        }
    }
}

/* Clears the weights of elements beyond the end and of keys too far ahead of their query, even if
 * the weights are NaN. (In the forward pass, as in other flash attentions, a NaN or Inf in the
 * values of a later key does reach earlier queries of its tile, because 0 times it is NaN.) */
template <bool keys>
__device__ inline void backward_hide(
    float (*s)[4], float (*g)[4], int ahead, int end, int row, int column) {
    MIXPI_UNROLL
    for (int n = 0; n < 4; n++) {
        MIXPI_UNROLL
        for (int e = 0; e < 4; e++) {
            int i = row + e / 2 * 8, j = column + 8 * n + e % 2;
            if (j >= end || (keys ? j + ahead < i : j > i + ahead)) s[n][e] = g[n][e] = 0.0f;
        }
    }
}

/* Processes 32 columns of a tile that begins at `at`. */
template <int D, bool bf16, bool keys, bool modified, int M>
__device__ inline void backward_columns(float (*sums)[M][D / 8][4], const Heads &h,
    const Own<D, M> &w, const uint16_t *other, const float *statistics, int at, int column) {
    int lane = (int)threadIdx.x % warp_size, low = w.first + w.row, from = at + column;
    int end = keys ? h.t : w.end, own_end = keys ? w.end : h.t;
    float s[M][4][4] = {}, g[M][4][4] = {};
    const float *those = statistics + column + lane % 4 * 2;

    /* Does no pair of these queries and keys count? */
    if (from >= end || low >= own_end ||
        (keys ? from + 31 + h.ahead < low : from > low + 16 * M - 1 + h.ahead))
        return;

    /* Compute the scores and their gradients; hidden pairs have none. */
    backward_scores<D, bf16, keys, M>(s, g, w, other, column);
    MIXPI_UNROLL
    for (int m = 0; m < M; m++) {
        Place p = { w.z, low + 16 * m + lane / 4, from + lane % 4 * 2, w.end };
        const float *lse = keys ? those : w.lse[m], *delta = keys ? those + 64 : w.delta[m];
        if (modified) backward_modified<keys>(s[m], g[m], h, w.draws, p, lse, delta);
        else backward_weights<keys>(s[m], g[m], h.scale * log2_e, lse, delta);
        if (from + 32 > end ||
            (keys ? from + h.ahead < low + 16 * M - 1 : from + 31 > low + h.ahead))
            backward_hide<keys>(s[m], g[m], h.ahead, end, p.row, p.column);
    }

    if (modified) __syncwarp();

    /* Add the gradients of 32 columns to the sums, and for keys the weighted dy. */
    MIXPI_UNROLL
    for (int j = 0; j < 2; j++) {
        uint32_t weights[M][4];
        MIXPI_UNROLL
        for (int m = 0; m < M; m++) as_left_factor<bf16>(weights[m], g[m] + 2 * j);
        add_weighted<D, M, bf16>(sums[0], weights, other, column + 16 * j);
        if (keys) {
            MIXPI_UNROLL
            for (int m = 0; m < M; m++) as_left_factor<bf16>(weights[m], s[m] + 2 * j);
            add_weighted<D, M, bf16>(sums[keys], weights, other + 64 * D, column + 16 * j);
        }
    }
}

/* Where a head's gradients go: row i begins at element first + i * ld; rows from `end` on get 0. */
struct GradRows { mixp_out out; int64_t first, ld; int rows, end; };

template <int D, int M>
__device__ inline void backward_store(
    const float (*sums)[D / 8][4], const GradRows &to, int row, float factor) {
    int lane = (int)threadIdx.x % warp_size;
    if (!to.out.data) return;
    MIXPI_UNROLL
    for (int i = 0; i < 2 * M; i++) {
        int m = i / 2, half = i % 2, own = row + 16 * m + 8 * half + lane / 4;
        int64_t at = to.first + own * to.ld + lane % 4 * 2;
        bool there = own < to.end;
        if (own >= to.rows) continue;
        MIXPI_UNROLL
        for (int n = 0; n < D / 8; n++)
            put_pair(to.out, at + 8 * n, there ? factor * sums[m][n][2 * half] : 0.0f,
                there ? factor * sums[m][n][2 * half + 1] : 0.0f);
    }
}

/* The reference of weights: lse log2e, or lse itself for changed scores. */
__device__ inline float lse_of(const Heads &h, int64_t at) {
    return h.modified ? h.lse[at] : h.lse[at] * log2_e;
}

/* A thread's piece of the statistics of 64 queries: lse, then delta. */
__device__ inline float query_statistic(const Heads &h, int z, int first) {
    int query = first + (int)threadIdx.x % 64;
    int64_t at = (int64_t)z * h.t + query;
    if (query >= h.t) return 0.0f;
    return threadIdx.x < 64 ? lse_of(h, at) : h.delta[at];
}

/* The statistics of a warp's own queries. delta is dy . y, which the softmax gradient of a row
 * subtracts. The four threads that share a row in an accumulator compute delta and store it for dK
 * and dV. is_fetched: the own tile of dy is in shared memory; otherwise the array is read. */
template <int D, bool is_fetched, int M>
__device__ inline void own_statistics(Own<D, M> &w, const Heads &h) {
    int lane = (int)threadIdx.x % warp_size;
    mixp_in dy = { w.own + 64 * M * D, h.dy.dtype };
    MIXPI_UNROLL
    for (int i = 0; i < 2 * M; i++) {
        int own = w.row + 8 * i + lane / 4, query = w.first + own;
        int64_t at = (int64_t)w.z * h.t + query;
        int64_t y = head_at(h, h.y_at, w.z) + query * h.y_at.row;
        bool there = query < h.t;

        /* Compute dy . y of the row, with four threads. */
        float sum = 0.0f, a[8], b[8];
        for (int chunk = lane % 4; there && chunk < D / 8; chunk += 4) {
            if (is_fetched) get8_any(dy, chunk_at<D>(own, chunk), 8, true, a);
            else get8_any(h.dy, y + 8 * chunk, 8, true, a);
            get8_any(h.y, y + 8 * chunk, 8, true, b);
            MIXPI_UNROLL
            for (int e = 0; e < 8; e++) sum = fmaf(a[e], b[e], sum);
        }
        sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
        sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 2);

        /* Keep delta and lse in registers; store delta for dK and dV. */
        w.delta[i / 2][i % 2] = sum;
        w.lse[i / 2][i % 2] = there ? lse_of(h, at) : 0.0f;
        if (there && lane % 4 == 0) h.delta[at] = sum;
    }
}

/* Keys: sums[0] is for dk, sums[1] for dv. */
template <int D, bool keys, int M>
__device__ inline void backward_finish(
    const float (*sums)[M][D / 8][4], const Heads &h, const Own<D, M> &w) {
    int row = w.first + w.row;
    if (keys) {
        GradRows dk = { h.dk, met_at(h, h.k_at, w.z), h.k_at.row, h.keys, w.end };
        GradRows dv = { h.dv, met_at(h, h.v_at, w.z), h.v_at.row, h.keys, w.end };
        backward_store<D, M>(sums[0], dk, row, h.scale);
        backward_store<D, M>(sums[keys], dv, row, 1.0f);
    } else {
        GradRows dq = { h.out, head_at(h, h.q_at, w.z), h.q_at.row, h.t, h.t };
        backward_store<D, M>(sums[0], dq, row, h.scale);
    }
}

/* Starts the copy of tile `tile` of the side that a block walks over. keys: the tile belongs to
 * head z + `turn` of q, where z is the group's first head. */
template <int D, bool keys>
__device__ inline void walk_fetch(
    uint16_t *to, const Heads &h, int z, int turn, int tile, int end) {
    const int N = 64;
    const mixp_head_strides &at0 = keys ? h.q_at : h.k_at, &at1 = keys ? h.y_at : h.v_at;
    const uint16_t *other0 = (const uint16_t *)(keys ? h.q.data : h.k.data);
    const uint16_t *other1 = (const uint16_t *)(keys ? h.dy.data : h.v.data);
    other0 += keys ? head_at(h, at0, z + turn) : met_at(h, at0, z);
    other1 += keys ? head_at(h, at1, z + turn) : met_at(h, at1, z);
    tile_fetch<D, N>(to, other0, (int)at0.row, tile * N, end);
    tile_fetch<D, N>(to + N * D, other1, (int)at1.row, tile * N, end);
}

/* Loads a block's own rows. */
template <int D, bool keys, int rows>
__device__ inline void own_fetch(uint16_t *own, const Heads &h, int z, int first, int end) {
    const mixp_head_strides &at0 = keys ? h.k_at : h.q_at, &at1 = keys ? h.v_at : h.y_at;
    const uint16_t *own0 = (const uint16_t *)(keys ? h.k.data : h.q.data);
    const uint16_t *own1 = (const uint16_t *)(keys ? h.v.data : h.dy.data);
    own0 += keys ? met_at(h, at0, z) : head_at(h, at0, z);
    own1 += keys ? met_at(h, at1, z) : head_at(h, at1, z);
    tile_fetch<D, rows>(own, own0, (int)at0.row, first, end);
    tile_fetch<D, rows>(own + rows * D, own1, (int)at1.row, first, end);
}

template <int D, bool bf16, bool keys, bool modified>
__global__ void __launch_bounds__(attention_threads, 2) attention_backward(Heads h) {
    typedef Backward<D, modified> Shape;
    const int M = Shape::M, rows = Shape::rows, N = Shape::others;
    MIXPI_DYNAMIC_SHARED(uint16_t, own);
    uint16_t *others = own + 2 * rows * D;
    float *statistics = (float *)(void *)(others + 4 * N * D), ahead = 0.0f;
    int blocks = (int)ceil_div(keys ? h.keys : h.t, rows), block = (int)(blockIdx.x % blocks),
        begin = 0, tiles, count, z;

    /* Find the block's own rows, and its head. */
    float sums[keys ? 2 : 1][M][D / 8][4] = {};
    Own<D, M> w = {};
    w.own = own;
    if (modified) w.draws = draws_key(h);
    w.row = (int)threadIdx.x / warp_size * 16 * M;
    w.first = (keys ? block : blocks - 1 - block) * rows;
    z = (int)(blockIdx.x / blocks) * (keys ? h.group : 1);
    w.z = z;
    w.end = keys_of(h, z);

    /* Find the tiles that its rows meet: in keys, for each head of the group. */
    if (keys && w.first > h.ahead) begin = (w.first - h.ahead) / N;
    tiles = (int)ceil_div(keys ? h.t : least(w.end, (int64_t)w.first + rows + h.ahead), N);
    if (keys && w.first >= w.end) tiles = 0;
    tiles = tiles > begin ? tiles - begin : 0; /* of a head */
    count = tiles * (keys ? h.group : 1);

    /* Fetch the own rows, then the first tile. */
    own_fetch<D, keys, rows>(own, h, z, w.first, keys ? w.end : h.t);
    cp_async_commit();
    walk_fetch<D, keys>(others, h, z, 0, begin, keys ? h.t : w.end);
    cp_async_commit();
    if (keys) statistics[(int)threadIdx.x] = query_statistic(h, z, begin * N);

    /* Compute the statistics of own queries, and hold their dy in registers. */
    if (!keys) {
        cp_async_wait<1>();
        __syncthreads();
        own_statistics<D, true, M>(w, h);
        __syncwarp();
        MIXPI_UNROLL
        for (int i = 0; i < M * (D / 16); i++)
            left_factor<D>(w.dy[i / M][i % M], own + rows * D, w.row + 16 * (i % M), i / M);
    }

    /* Walk over the tiles: fetch the next one while this one is computed. */
    for (int i = 0; i < count; i++) {
        uint16_t *now = others + i % 2 * 2 * N * D, *next = others + (i + 1) % 2 * 2 * N * D;
        if (i + 1 < count) {
            int turn = keys ? (i + 1) / tiles : 0, tile = begin + (i + 1) - turn * tiles;
            walk_fetch<D, keys>(next, h, z, turn, tile, keys ? h.t : w.end);
            if (keys) ahead = query_statistic(h, z + turn, tile * N);
        }
        cp_async_commit();
        cp_async_wait<1>();
        __syncthreads();
        if (keys) w.z = z + i / tiles;
        for (int column = 0; column < N; column += Shape::columns)
            backward_columns<D, bf16, keys, modified, M>(sums, h, w, now,
                statistics + i % 2 * 2 * N, (begin + (keys ? i % tiles : i)) * N, column);
        if (keys) statistics[(i + 1) % 2 * 2 * N + (int)threadIdx.x] = ahead;
        __syncthreads();
    }

    /* Store the sums. */
    cp_async_wait<0>();
    w.z = z;
    backward_finish<D, keys, M>(sums, h, w);
}

}   /* namespace */
namespace {

/* --- by warpgroups, on capability 9.0 ----------------------------------------------------- *
 *
 * Code for sm_90a multiplies by wgmma: a warpgroup, which is four warps, multiplies 64 own rows by
 * a tile of the other side. Both lie in shared memory: with own rows in registers the results were
 * wrong on a GPU from the second tile on. Accumulators and left factors have the layout of
 * attention.cu: warp w of a group has rows 16 w to 16 w + 15.
 *
 * A tile is D / 64 halves; a half is rows of 64 elements, 128 bytes, permuted as chunk_at<64>
 * does, which is the 128-byte swizzle of wgmma. Halves begin at multiples of 1024 bytes.
 *
 * The groups of a block walk together, each with 64 own rows. wgmma does not see copies into shared
 * memory by itself: a thread that has waited for its copies calls wgmma_sees_shared before the
 * barrier. Each walk has one barrier a tile. After the barrier every group is done with the tile
 * before, so the copy of the next tile may begin. Other blocks of its SM fill the waits.
 */
#ifndef MIXPREC_CUDASIM
/* groups: warpgroups of a block; blocks: those that share a multiprocessor. Chosen by times on an
 * H200. */
template <int D> struct WideForward {
    static const int groups = 2, keys = D == 64 ? 64 : 128, blocks = D == 64 ? 2 : 1;
    static const int threads = 128 * groups, rows = 64 * groups;
    static const int bytes = (rows + 4 * keys) * D * 2;
};
template <int D, bool keys> struct WideBackward {
    static const int groups = D == 64 && keys ? 1 : 2, blocks = D != 64 ? 1 : keys ? 3 : 2;
    static const int threads = 128 * groups, rows = 64 * groups, others = 64;
    static const int bytes =
        (2 * rows + 4 * others) * D * 2 + (keys ? 4 * others * (int)sizeof(float) : 0);
};

#if MIXPI_WGMMA
/* Where a thread's chunk of a head's rows begins, and the bytes of a row. */
struct WideRows { const unsigned char *from; uint32_t ld; };

template <int D, int threads>
__device__ inline WideRows wide_rows(mixp_in a, int64_t first, const mixp_head_strides &at) {
    const uint16_t *from = (const uint16_t *)a.data + first + (int)threadIdx.x % (D / 8) * 8;
    return { (const unsigned char *)from, (uint32_t)at.row * 2 };
}

/* Starts the copy of rows [first, first + rows) of a head; rows beyond t become 0. */
template <int D, int rows, int threads>
__device__ inline void wide_fetch(uint16_t *tile, const WideRows &a, int first, int t) {
    const int chunks = D / 8, step = threads / chunks;
    int row = (int)threadIdx.x / chunks, chunk = (int)threadIdx.x % chunks, last = max(t - 1, 0);
    tile += chunk / 8 * rows * 64 + chunk_at<64>(row, chunk % 8);
    MIXPI_UNROLL
    for (int e = 0; e < rows; e += step) {
        int there = first + row + e;
        const unsigned char *from = a.from + (uint64_t)(uint32_t)min(there, last) * a.ld;
        if (rows % step == 0 || row + e < rows)
            cp_async_16(tile + e * 64, from, there < t ? 16 : 0);
    }
}

/* s = own x other', 64 x N: a and b describe the rows of own and of other. */
template <int D, int N, bool bf16, int own_rows>
__device__ inline void wide_scores(float (*s)[4], uint64_t a, uint64_t b) {
    MIXPI_UNROLL
    for (int k = 0; k < D / 16; k++)
        wgmma<N, bf16, false>(s, a + (k / 4 * own_rows * 128 + k % 4 * 32) / 16,
            b + (k / 4 * N * 128 + k % 4 * 32) / 16, k > 0);
}

/* sums[64][D] += weights[64][N] x other[N][D] */
template <int D, int N, bool bf16>
__device__ inline void wide_add(float (*sums)[4], const uint32_t (*weights)[4], uint64_t other) {
    MIXPI_UNROLL
    for (int j = 0; j < N / 16; j++) wgmma<D, bf16, true>(sums, weights[j], other + j * 128, 1);
}

template <bool bf16, int N>
__device__ inline void wide_left(uint32_t (*a)[4], const float (*f)[4]) {
    MIXPI_UNROLL
    for (int j = 0; j < N / 16; j++) as_left_factor<bf16>(a[j], f + 2 * j);
}

/* Turns scores into weights; shrink: what the rows' sums so far must be multiplied by. */
template <int D, int N>
__device__ inline void wide_weights(
    float (*s)[4], float *shrink, RowSums<D, 1> &r, const Heads &h, const Place &tile) {
    int lane = (int)threadIdx.x % warp_size;
    Place at = { tile.z, tile.row + lane / 4, tile.column + lane % 4 * 2, tile.end };
    if (tile.column + N > tile.end || tile.column + N - 1 > tile.row + h.ahead)
        hide_keys<N / 8>(s, h.ahead, at);
    MIXPI_UNROLL
    for (int half = 0; half < 2; half++)
        shrink[half] =
            forward_half<false, N / 8>(s, r.top[0][half], r.sum[0][half], half, h.scale * log2_e);
}

/* A factor of 1, the most frequent one, costs no product. */
template <int D> __device__ inline void wide_shrink(float (*o)[4], const float *shrink) {
    if (shrink[0] != 1.0f || shrink[1] != 1.0f) {
        MIXPI_UNROLL
        for (int n = 0; n < D / 8; n++) {
            MIXPI_UNROLL
            for (int e = 0; e < 4; e++) o[n][e] *= shrink[e / 2];
        }
    }
    __syncwarp();
}

/* ptxas moves a wait up, past instructions that need not come first, but never across a branch.
 * This branch, which is never taken, depends on the sums of the weights: the wait stays after
 * them. */
__device__ inline void wide_settle(float sum) {
    if (sum < 0.0f) wgmma_sees_shared();
}
#  endif

/* The scores of tile i are computed while the values of tile i - 1 are added. */
template <int D, bool bf16>
__global__ void __launch_bounds__(MIXPI_WGMMA ? WideForward<D>::threads : warp_size,
    MIXPI_WGMMA ? WideForward<D>::blocks : 1) wide_forward(Heads h) {
#  if MIXPI_WGMMA
    typedef WideForward<D> Shape;
    const int rows = Shape::rows, keys = Shape::keys, threads = Shape::threads;
    MIXPI_SWIZZLED_SHARED(uint16_t, own);
    wgmma_check_base(own);
    uint16_t *tiles_k = own + rows * D, *tiles_v = tiles_k + 2 * keys * D;

    /* The block's queries, the group's, and how many tiles each needs. */
    int group = warp_uniform((int)threadIdx.x / 128), warp = (int)threadIdx.x / warp_size % 4;
    int blocks = (int)ceil_div(h.t, rows);
    int first = (blocks - 1 - (int)(blockIdx.x % blocks)) * rows, low = first + 64 * group;
    int z = (int)(blockIdx.x / blocks), end = keys_of(h, z);
    int tiles = (int)ceil_div(least(end, (int64_t)first + rows + h.ahead), keys);
    int mine = low < h.t ? (int)ceil_div(least(end, (int64_t)low + 64 + h.ahead), keys) : 0;

    /* The arrays, as copies and as products see them. */
    WideRows q = wide_rows<D, threads>(h.q, head_at(h, h.q_at, z), h.q_at);
    WideRows k = wide_rows<D, threads>(h.k, met_at(h, h.k_at, z), h.k_at);
    WideRows v = wide_rows<D, threads>(h.v, met_at(h, h.v_at, z), h.v_at);
    uint64_t own_q = wgmma_matrix(own + group * 64 * 64, rows * 128);
    uint64_t all_k = wgmma_matrix(tiles_k, keys * 128), all_v = wgmma_matrix(tiles_v, keys * 128);
    const int stage = keys * D / 8; /* the bytes of a tile / 16, as descriptors count */

    float s[keys / 8][4], shrink[2];
    uint32_t weights[keys / 16][4];
    RowSums<D, 1> r = {};
    r.top[0][0] = r.top[0][1] = lowest_float;
    Place tile = { z, low + 16 * warp, 0, end };

    /* Waits for keys of tile i and values of tile i - 1, and starts the copies of the next. */
    auto arrive = [&](int i) {
        int next = i + 1;
        cp_async_wait<0>();
        wgmma_sees_shared();
        __syncthreads();
        if (next < tiles)
            wide_fetch<D, keys, threads>(tiles_k + next % 2 * keys * D, k, next * keys, end);
        if (i < tiles) wide_fetch<D, keys, threads>(tiles_v + i % 2 * keys * D, v, i * keys, end);
        cp_async_commit();
    };
    auto scores = [&](int i) {
        wide_scores<D, keys, bf16, rows>(s, own_q, all_k + i % 2 * stage);
        wgmma_commit();
    };
    auto values = [&](int i) {
        wide_add<D, keys, bf16>(r.o[0], weights, all_v + i % 2 * stage);
        wgmma_commit();
    };
    auto soften = [&](int i) {
        wgmma_done<keys / 8>(s);
        tile.column = i * keys;
        wide_weights<D, keys>(s, shrink, r, h, tile);
    };

    /* The scores of the first tile. */
    wide_fetch<D, rows, threads>(own, q, first, h.t);
    wide_fetch<D, keys, threads>(tiles_k, k, 0, end);
    cp_async_commit();
    if (tiles > 0) arrive(0);
    if (mine > 0) {
        wgmma_fence();
        scores(0);
        wgmma_wait<0>();
        soften(0);
        wide_left<bf16, keys>(weights, s);
    }

    /* The softmax of tile i while the values of tile i - 1 are added. */
    for (int i = 1; i <= tiles; i++) {
        arrive(i);
        if (i < mine) {
            wgmma_pin<keys / 16, D / 8>(weights, r.o[0]);
            wgmma_fence();
            scores(i);
            values(i - 1);
            wgmma_wait<1>();
            soften(i);
            wide_settle(fminf(r.sum[0][0], r.sum[0][1]));
            wgmma_wait<0>();
            wgmma_pin<keys / 16, D / 8>(weights, r.o[0]);
            wide_shrink<D>(r.o[0], shrink);
            wide_left<bf16, keys>(weights, s);
        } else if (i == mine) {
            wgmma_pin<keys / 16, D / 8>(weights, r.o[0]);
            wgmma_fence();
            values(i - 1);
            wgmma_wait<0>();
            wgmma_pin<keys / 16, D / 8>(weights, r.o[0]);
        }
    }
    cp_async_wait<0>();
    forward_store<D, false, 1>(r, h, z, low + 16 * warp);
#  else
    (void)h;
#  endif
}

#  if MIXPI_WGMMA
/* Two arrays of one side: k and v, or q and dy. z: the head of q. */
struct WideSide { WideRows rows[2]; };

template <int D, bool of_keys, int threads>
__device__ inline WideSide wide_side(const Heads &h, int z) {
    if (of_keys)
        return { { wide_rows<D, threads>(h.k, met_at(h, h.k_at, z), h.k_at),
            wide_rows<D, threads>(h.v, met_at(h, h.v_at, z), h.v_at) } };
    return { { wide_rows<D, threads>(h.q, head_at(h, h.q_at, z), h.q_at),
        wide_rows<D, threads>(h.dy, head_at(h, h.y_at, z), h.y_at) } };
}

template <int D, int rows, int threads>
__device__ inline void wide_fetch_two(uint16_t *to, const WideSide &a, int first, int end) {
    wide_fetch<D, rows, threads>(to, a.rows[0], first, end);
    wide_fetch<D, rows, threads>(to + rows * D, a.rows[1], first, end);
}

/* Turns scores into weights, then g into their gradients, as backward_weights. */
template <bool keys>
__device__ inline void wide_exp(float (*s)[4], float factor, const float *lse) {
    MIXPI_UNROLL
    for (int n = 0; n < 8; n++) {
        MIXPI_UNROLL
        for (int e = 0; e < 4; e++)
            s[n][e] = exp2_approx(fmaf(s[n][e], factor, -lse[keys ? 8 * n + e % 2 : e / 2]));
    }
}
template <bool keys>
__device__ inline void wide_gradients(const float (*s)[4], float (*g)[4], const float *delta) {
    MIXPI_UNROLL
    for (int n = 0; n < 8; n++) {
        MIXPI_UNROLL
        for (int e = 0; e < 4; e++)
            g[n][e] = s[n][e] * (g[n][e] - delta[keys ? 8 * n + e % 2 : e / 2]);
    }
}

/* Clears elements, as backward_hide. */
template <bool keys>
__device__ inline void wide_hide(float (*f)[4], int ahead, int end, int row, int column) {
    MIXPI_UNROLL
    for (int n = 0; n < 8; n++) {
        MIXPI_UNROLL
        for (int e = 0; e < 4; e++) {
            int i = row + e / 2 * 8, j = column + 8 * n + e % 2;
            if (j >= end || (keys ? j + ahead < i : j > i + ahead)) f[n][e] = 0.0f;
        }
    }
}
#  endif

template <int D, bool bf16, bool keys>
__global__ void __launch_bounds__(MIXPI_WGMMA ? WideBackward<D, keys>::threads : warp_size,
    MIXPI_WGMMA ? WideBackward<D, keys>::blocks : 1) wide_backward(Heads h) {
#  if MIXPI_WGMMA
    typedef WideBackward<D, keys> Shape;
    const int rows = Shape::rows, N = Shape::others, threads = Shape::threads;
    MIXPI_SWIZZLED_SHARED(uint16_t, own);
    wgmma_check_base(own);
    uint16_t *others = own + 2 * rows * D;
    float *statistics = (float *)(void *)(others + 4 * N * D), ahead = 0.0f;

    /* The block's own rows, and the tiles that they meet. */
    int group = warp_uniform((int)threadIdx.x / 128), warp = (int)threadIdx.x / warp_size % 4;
    int lane = (int)threadIdx.x % warp_size, begin = 0, turn = 0;
    int blocks = (int)ceil_div(keys ? h.keys : h.t, rows), block = (int)(blockIdx.x % blocks);
    Own<D, 1> w = {};
    w.first = (keys ? block : blocks - 1 - block) * rows;
    w.row = 64 * group + 16 * warp;
    w.z = (int)(blockIdx.x / blocks) * (keys ? h.group : 1);
    w.end = keys_of(h, w.z);
    int low = w.first + 64 * group, end = keys ? h.t : w.end;
    if (keys && w.first > h.ahead) begin = (w.first - h.ahead) / N;
    int tiles = (int)ceil_div(keys ? h.t : least(w.end, (int64_t)w.first + rows + h.ahead), N);
    if (keys && w.first >= w.end) tiles = 0;
    int count = tiles > begin ? (tiles - begin) * (keys ? h.group : 1) : 0, tile = begin;

    /* The arrays, as products and as copies see them; the first tiles are fetched. */
    uint64_t own0 = wgmma_matrix(own + group * 64 * 64, rows * 128), own1 = own0 + rows * D / 8;
    uint64_t all = wgmma_matrix(others, N * 128);
    uint32_t weights[N / 16][4], weights_v[N / 16][4];
    float sums[keys ? 2 : 1][1][D / 8][4] = {};
    WideSide walked = wide_side<D, !keys, threads>(h, w.z);
    wide_fetch_two<D, rows, threads>(
        own, wide_side<D, keys, threads>(h, w.z), w.first, keys ? w.end : h.t);
    cp_async_commit();
    wide_fetch_two<D, N, threads>(others, walked, begin * N, end);
    cp_async_commit();
    if (keys && threadIdx.x < 128)
        statistics[(int)threadIdx.x] = query_statistic(h, w.z, begin * N);
    if (!keys) own_statistics<D, false, 1>(w, h);
    for (int i = 0; i < count; i++) {
        const int stage = 2 * N * D / 8; /* the bytes of two tiles / 16, as descriptors count */
        uint64_t other0 = all + i % 2 * stage, other1 = other0 + stage / 2;
        int from = tile * N;
        const float *those = statistics + i % 2 * 2 * N + lane % 4 * 2;
        bool meets = from < end && low < (keys ? w.end : h.t) &&
                     !(keys ? from + 63 + h.ahead < low : from > low + 63 + h.ahead);
        if (++tile == tiles) { /* the next head of the group, in the same sequence */
            tile = begin;
            turn++;
            if (keys) walked.rows[0].from += 2 * h.q_at.head;
            if (keys) walked.rows[1].from += 2 * h.y_at.head;
        }

        /* This tile has arrived, every group is done with the one before: the next may come. */
        cp_async_wait<0>();
        wgmma_sees_shared();
        __syncthreads();
        if (i + 1 < count) {
            wide_fetch_two<D, N, threads>(others + (i + 1) % 2 * 2 * N * D, walked, tile * N, end);
            if (keys && threadIdx.x < 128) ahead = query_statistic(h, w.z + turn, tile * N);
        }
        cp_async_commit();
        if (meets) {
            float s[8][4], g[8][4];
            int row = w.first + w.row;
            bool hides =
                from + N > end || (keys ? from + h.ahead < row + 15 : from + N - 1 > row + h.ahead);

            /* Weights, while the second product runs; then their gradients. */
            wgmma_fence();
            wide_scores<D, N, bf16, rows>(s, own0, other0);
            wgmma_commit();
            wide_scores<D, N, bf16, rows>(g, own1, other1);
            wgmma_commit();
            wgmma_wait<1>();
            wgmma_done<8>(s);
            wide_exp<keys>(s, h.scale * log2_e, keys ? those : w.lse[0]);
            if (hides) wide_hide<keys>(s, h.ahead, end, row + lane / 4, from + lane % 4 * 2);
            wgmma_wait<0>();
            wgmma_done<8>(g);
            wide_gradients<keys>(s, g, keys ? those + N : w.delta[0]);
            if (hides) wide_hide<keys>(g, h.ahead, end, row + lane / 4, from + lane % 4 * 2);

            /* Both, as left factors, are multiplied and added. */
            wide_left<bf16, N>(weights, g);
            if (keys) wide_left<bf16, N>(weights_v, s);
            wgmma_pin<N / 16, D / 8>(weights, sums[0][0]);
            if (keys) wgmma_pin<N / 16, D / 8>(weights_v, sums[keys][0]);
            wgmma_fence();
            if (keys) wide_add<D, N, bf16>(sums[keys][0], weights_v, other1);
            wide_add<D, N, bf16>(sums[0][0], weights, other0);
            wgmma_commit();
            wgmma_wait<0>();
            wgmma_pin<N / 16, D / 8>(weights, sums[0][0]);
            if (keys) wgmma_pin<N / 16, D / 8>(weights_v, sums[keys][0]);
        }
        if (keys && threadIdx.x < 128) statistics[(i + 1) % 2 * 2 * N + (int)threadIdx.x] = ahead;
    }
    cp_async_wait<0>();
    backward_finish<D, keys, 1>(sums, h, w);
#  else
    (void)h;
#  endif
}
#endif

}   /* namespace */
namespace {

/* --- in f32, any dtypes ------------------------------------------------------------------ *
 *
 * Tiles are f32 in shared memory, of 64 columns: wider heads go through them part by part. A block
 * owns 16 M rows, of which each warp owns 4 M, and walks over tiles of 64. A thread has M rows, r,
 * r + 4, ... of its warp, and a column c:
 *
 *     of a tile of scores     columns c, c + 8, ..., c + 56, stored side by side as group c
 *     of a part of the sums   columns 8 c, 8 c + 1, ..., 8 c + 7
 *
 * A group is 8 neighbours in a row: two times 16 bytes, 32 floats apart. Groups are permuted within
 * a row, and bits 0 and 2 of the lane are r, so that lanes served at once meet in no bank.
 */
const int plain_columns = 64, plain_others = 64;

/* The place of group `group` of row `row` in shared memory. */
__device__ inline int plain_at(int row, int group) {
    return row * plain_columns + (group ^ (row & 3) * 2 ^ (row >> 2 & 1)) * 4;
}

/* A thread's first row within the block, and its column. */
template <int M> __device__ inline int plain_row() {
    int lane = (int)threadIdx.x % warp_size;
    return (int)threadIdx.x / warp_size * 4 * M + (lane & 1) + (lane >> 1 & 2);
}
__device__ inline int plain_column() {
    int lane = (int)threadIdx.x % warp_size;
    return (lane >> 1 & 1) + (lane >> 2 & 6);
}

/* The maximum and the sum over the 8 threads of a row. */
__device__ inline float row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 2));
    x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 8));
    return fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 16));
}
__device__ inline float row_sum(float x) {
    x += __shfl_xor_sync(0xFFFFFFFFu, x, 2);
    x += __shfl_xor_sync(0xFFFFFFFFu, x, 8);
    return x + __shfl_xor_sync(0xFFFFFFFFu, x, 16);
}

__device__ inline void get4(const float *at, float *v) {
    float4 u = *(const float4 *)(const void *)at;
    v[0] = u.x;
    v[1] = u.y;
    v[2] = u.z;
    v[3] = u.w;
}
__device__ inline void put4(float *at, const float *v) {
    *(float4 *)(void *)at = make_float4(v[0], v[1], v[2], v[3]);
}

/* A head's rows: row i begins at element first + i * ld; rows from `end` on read as 0. */
struct PlainRows { mixp_in a; int64_t first, ld; int end; };

__device__ inline PlainRows query_rows(
    const Heads &h, mixp_in a, const mixp_head_strides &at, int z) {
    PlainRows rows = { a, head_at(h, at, z), at.row, h.t };
    return rows;
}
__device__ inline PlainRows key_rows(
    const Heads &h, mixp_in a, const mixp_head_strides &at, int z, int end) {
    PlainRows rows = { a, met_at(h, at, z), at.row, end };
    return rows;
}

/* The piece of a tile that a thread fetches: the columns of group `group`, in every 16th row from
 * `row` on. n: how many of these columns the head has. */
struct PlainPiece { int row, group, n, first; int64_t at; };

template <int rows>
__device__ inline void fetch_f32(float *tile, const PlainRows &from, const PlainPiece &p) {
    const float *all = (const float *)from.a.data;
    MIXPI_UNROLL
    for (int e = 0; e < rows; e += 16) {
        float *to = tile + plain_at(p.row + e, p.group);
        bool there = p.n > 0 && p.first + p.row + e < from.end;
        const float *at = there ? all + p.at + e * from.ld : all;
        cp_async_16(to, at, there ? 16 : 0);
        cp_async_16(to + 32, there ? at + 4 : all, there ? 16 : 0);
    }
}
template <int rows, mixp_dtype D>
__device__ inline void fetch_low(float *tile, const PlainRows &from, const PlainPiece &p) {
    Raw8<D> raw[rows / 16];
    MIXPI_UNROLL
    for (int e = 0; e < rows / 16; e++) {
        bool there = p.n > 0 && p.first + p.row + 16 * e < from.end;
        raw[e].u[0] = make_uint4(0, 0, 0, 0);
        if (there) raw[e] = raw_get8<D>(from.a.data, p.at + 16 * e * from.ld);
    }
    MIXPI_UNROLL
    for (int e = 0; e < rows / 16; e++) {
        float v[8], *to = tile + plain_at(p.row + 16 * e, p.group);
        plain_values<D>(raw[e], v);
        put4(to, v);
        put4(to + 32, v + 4);
    }
}
template <int rows>
__device__ inline void fetch_any(float *tile, const PlainRows &from, const PlainPiece &p) {
    MIXPI_UNROLL_BY(1)
    for (int e = 0; e < rows; e += 16) {
        float v[8], *to = tile + plain_at(p.row + e, p.group);
        int n = p.first + p.row + e < from.end ? p.n : 0;
        get8_any(from.a, p.at + e * from.ld, n, false, v);
        put4(to, v);
        put4(to + 32, v + 4);
    }
}

/* Starts to fetch rows [first, first + rows) of one part. */
template <int rows>
__device__ inline void plain_fetch(
    float *tile, const Heads &h, const PlainRows &from, int first, int part) {
    PlainPiece p = { (int)threadIdx.x / 8, (int)threadIdx.x % 8, 0, first, 0 };
    int column = part * plain_columns + 8 * p.group;
    p.n = (int)least(8, h.d - column);
    p.at = from.first + (first + p.row) * from.ld + column;
    if (!h.wide) fetch_any<rows>(tile, from, p);
    else if (from.a.dtype == MIXP_F32) fetch_f32<rows>(tile, from, p);
    else if (from.a.dtype == MIXP_F16) fetch_low<rows, MIXP_F16>(tile, from, p);
    else fetch_low<rows, MIXP_BF16>(tile, from, p);
}
__device__ inline void plain_arrive() {
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
}

/* s += own x other', over the first `groups` groups of a part. */
template <int M>
__device__ inline void plain_multiply(
    float (*s)[8], const float *own, const float *other, int groups) {
    int row = plain_row<M>(), column = plain_column();
    MIXPI_UNROLL_BY(1)
    for (int k = 0; k < groups; k++) {
        MIXPI_UNROLL
        for (int half = 0; half < 64; half += 32) {
            float a[M][4], b[4];

            /* Read 4 columns of the thread's own rows. */
            MIXPI_UNROLL
            for (int i = 0; i < M; i++) get4(own + plain_at(row + 4 * i, k) + half, a[i]);

            /* Multiply them by those of 8 other rows. */
            MIXPI_UNROLL
            for (int j = 0; j < 8; j++) {
                get4(other + plain_at(column + 8 * j, k) + half, b);
                MIXPI_UNROLL
                for (int e = 0; e < 4 * M; e++)
                    s[e % M][j] = fmaf(a[e % M][e / M], b[e / M], s[e % M][j]);
            }
        }
    }
}

/* sums += weights x other, of a part. */
template <int M>
__device__ inline void plain_add(float (*sums)[8], const float *weights, const float *other) {
    int row = plain_row<M>(), column = plain_column();
    MIXPI_UNROLL_BY(1)
    for (int k = 0; k < 8; k++) {
        MIXPI_UNROLL
        for (int half = 0; half < 64; half += 32) {
            float a[M][4], b[8];

            /* Read 4 weights of each of the thread's rows. */
            MIXPI_UNROLL
            for (int i = 0; i < M; i++) get4(weights + plain_at(row + 4 * i, k) + half, a[i]);

            /* Add the rows that they weigh. */
            MIXPI_UNROLL
            for (int e = 0; e < 4; e++) {
                const float *at = other + plain_at(k + half + 8 * e, column);
                get4(at, b);
                get4(at + 32, b + 4);
                MIXPI_UNROLL
                for (int n = 0; n < 8 * M; n++)
                    sums[n / 8][n % 8] = fmaf(a[n / 8][e], b[n % 8], sums[n / 8][n % 8]);
            }
        }
    }
}

/* Own rows and a tile of the other side. z: the queries' head. end: the last key + 1. busy:
 * the warp has own rows. In the backward pass the gradients of weights overwrite own rows. */
struct PlainPlace {
    float *own, *other, *weights;
    int z, first, at, end;
    bool busy;
};

template <int M>
__device__ inline PlainPlace plain_place(
    const Heads &h, float *shared, int z, int first, bool keys) {
    PlainPlace w = {};
    w.own = shared;
    w.other = w.own + 16 * M * plain_columns;
    w.weights = w.other + plain_others * plain_columns;
    w.z = z;
    w.first = first;
    w.end = keys_of(h, z);
    w.busy = first + (int)threadIdx.x / warp_size * 4 * M < (keys ? w.end : h.t);
    return w;
}
constexpr size_t plain_bytes(int M) {
    return (size_t)(2 * 16 * M + plain_others) * plain_columns * sizeof(float);
}

/* s += own x other'. own_there: the own rows have been fetched before, if they are one part. */
template <int parts, int M>
__device__ inline void plain_scores(float (*s)[8], const Heads &h, const PlainPlace &w,
    const PlainRows &own, const PlainRows &other, bool own_there) {
    MIXPI_UNROLL_BY(1)
    for (int part = 0; part * plain_columns < h.d; part++) {
        int columns = (int)least(plain_columns, h.d - part * plain_columns);
        __syncthreads();
        if (parts > 1 || !own_there) plain_fetch<16 * M>(w.own, h, own, w.first, part);
        plain_fetch<plain_others>(w.other, h, other, w.at, part);
        plain_arrive();
        if (w.busy) plain_multiply<M>(s, w.own, w.other, (columns + 7) / 8);
    }
}

/* sums += weights x other. there: the other rows have just been fetched, if they are one part. */
template <int parts, int M>
__device__ inline void plain_sums(float (*sums)[M][8], const float *weights, const Heads &h,
    const PlainPlace &w, const PlainRows &other, bool there) {
    __syncwarp();
    MIXPI_UNROLL
    for (int part = 0; part < parts; part++) {
        if (part * plain_columns >= h.d) continue;
        if (parts > 1 || !there) {
            __syncthreads();
            plain_fetch<plain_others>(w.other, h, other, w.at, part);
            plain_arrive();
        }
        if (w.busy) plain_add<M>(sums[part], weights, w.other);
    }
}

/* A thread's scores in shared memory. Rare work on them is a loop there: unrolled in registers it
 * would be 32 copies of it. */
template <int M> __device__ inline void plain_put(float *tile, const float (*s)[8]) {
    MIXPI_UNROLL
    for (int i = 0; i < M; i++) {
        float *at = tile + plain_at(plain_row<M>() + 4 * i, plain_column());
        put4(at, s[i]);
        put4(at + 32, s[i] + 4);
    }
}
template <int M> __device__ inline void plain_get(const float *tile, float (*s)[8]) {
    MIXPI_UNROLL
    for (int i = 0; i < M; i++) {
        const float *at = tile + plain_at(plain_row<M>() + 4 * i, plain_column());
        get4(at, s[i]);
        get4(at + 32, s[i] + 4);
    }
}
/* Score n of a thread: its row, its column within the tile, and its address. */
struct PlainScore { int row, column, at; };
template <int M> __device__ inline PlainScore plain_score(int n) {
    int row = plain_row<M>() + n / 8 * 4, j = n % 8;
    PlainScore s = { row, plain_column() + 8 * j, 0 };
    s.at = plain_at(row, plain_column()) + j / 4 * 32 + j % 4;
    return s;
}

/* Changes scores: by the cap and the mask. */
template <int M>
__device__ inline void plain_modify(float (*s)[8], const Heads &h, const PlainPlace &w) {
    plain_put<M>(w.weights, s);
    MIXPI_UNROLL_BY(1)
    for (int n = 0; n < 8 * M; n++) {
        PlainScore one = plain_score<M>(n);
        int query = w.first + one.row, key = w.at + one.column;
        float score = capped(h, w.weights[one.at]);
        if (query < h.t && key < w.end) w.weights[one.at] = score + mask_of(h, w.z, query, key);
    }
    plain_get<M>(w.weights, s);
}

/* Drops weights. */
template <int M> __device__ inline void plain_drop(const Heads &h, const PlainPlace &w) {
    const uint64_t draws = draws_key(h);
    MIXPI_UNROLL_BY(1)
    for (int n = 0; n < 8 * M; n++) {
        PlainScore one = plain_score<M>(n);
        w.weights[one.at] *= kept_of(h, draws, w.z, w.first + one.row, w.at + one.column);
    }
}

/* Sums of a thread's rows over the keys so far, relative to e^top. sum covers only the
 * thread's columns. */
template <int parts, int M> struct PlainSums { float o[parts][M][8], top[M], sum[M]; };

/* Turns scores into weights, and rescales the rows' sums to their new top. */
template <int parts, int M>
__device__ inline void plain_softmax(
    float (*s)[8], PlainSums<parts, M> &r, const Heads &h, const PlainPlace &w) {
    float factor = h.modified ? 1.0f : h.scale;
    MIXPI_UNROLL
    for (int i = 0; i < M; i++) {
        int query = w.first + plain_row<M>() + 4 * i, key = w.at + plain_column();
        int seen = query < h.t ? (int)least(w.end, query + h.ahead + 1) : 0;

        /* Hide keys that the query does not see, and find the row's new top. */
        float top = r.top[i], shrink;
        MIXPI_UNROLL
        for (int j = 0; j < 8; j++) {
            s[i][j] = key + 8 * j < seen ? s[i][j] * factor : -INFINITY;
            top = fmaxf(top, s[i][j]);
        }
        top = row_max(top);

        /* Rescale the sum to it, and add the new weights. */
        shrink = expf(r.top[i] - top);
        r.top[i] = top;
        r.sum[i] *= shrink;
        MIXPI_UNROLL
        for (int j = 0; j < 8; j++) {
            s[i][j] = expf(s[i][j] - top);
            r.sum[i] += s[i][j];
        }

        /* Rescale the weighted values. */
        MIXPI_UNROLL
        for (int n = 0; n < parts * 8; n++) r.o[n / 8][i][n % 8] *= shrink;
    }
}

template <int parts, int M>
__device__ inline void plain_store(
    const float (*sums)[M][8], const Heads &h, const GradRows &to, int first, float factor) {
    if (!to.out.data) return;
    MIXPI_UNROLL
    for (int n = 0; n < parts * M; n++) {
        int part = n / M, i = n % M, own = first + plain_row<M>() + 4 * i;
        int column = part * plain_columns + 8 * plain_column();
        float v[8];
        if (own >= to.rows || column >= h.d) continue;
        MIXPI_UNROLL
        for (int j = 0; j < 8; j++) v[j] = own < to.end ? factor * sums[part][i][j] : 0.0f;
        store8(to.out, to.first + own * to.ld + column, (int)least(8, h.d - column), h.wide, v);
    }
}

template <int parts, int M>
__device__ inline void plain_finish(PlainSums<parts, M> &r, const Heads &h, const PlainPlace &w) {
    GradRows y = { h.out, head_at(h, h.y_at, w.z), h.y_at.row, h.t, h.t };
    MIXPI_UNROLL
    for (int i = 0; i < M; i++) {
        int query = w.first + plain_row<M>() + 4 * i;
        float sum = row_sum(r.sum[i]);
        bool none = h.may_hide && sum <= 0.0f, stochastic = is_stochastic(h, sum);
        if (query < h.t && plain_column() == 0)
            h.lse[(int64_t)w.z * h.t + query] = none ? INFINITY : r.top[i] + logf(sum);
        MIXPI_UNROLL
        for (int n = 0; n < parts * 8; n++) {
            float x = none ? 0.0f : r.o[n / 8][i][n % 8] / sum;
            r.o[n / 8][i][n % 8] = stochastic ? mixpi_round_stochastically(h.out.dtype, x) : x;
        }
    }
    plain_store<parts, M>(r.o, h, y, w.first, 1.0f);
}

template <int parts, int M>
__global__ void __launch_bounds__(attention_threads, parts == 1 ? 3 : 2) plain_forward(Heads h) {
    MIXPI_DYNAMIC_SHARED(float, shared);

    /* Find the block's queries, and the keys that they see. */
    int blocks = (int)ceil_div(h.t, 16 * M), block = blocks - 1 - (int)(blockIdx.x % blocks);
    PlainPlace w = plain_place<M>(h, shared, (int)(blockIdx.x / blocks), block * 16 * M, false);
    int end = (int)least(w.end, (int64_t)w.first + 16 * M + h.ahead);
    PlainRows q = query_rows(h, h.q, h.q_at, w.z), k = key_rows(h, h.k, h.k_at, w.z, w.end),
              v = key_rows(h, h.v, h.v_at, w.z, w.end);

    /* The sums are empty: no key has been seen. */
    PlainSums<parts, M> r = {};
    MIXPI_UNROLL
    for (int i = 0; i < M; i++) r.top[i] = lowest_float;

    /* Walk over the tiles of keys: scores, weights, weighted values. */
    for (; w.at < end; w.at += plain_others) {
        float s[M][8] = {};
        plain_scores<parts, M>(s, h, w, q, k, w.at > 0);
        if (h.modified) plain_modify<M>(s, h, w);
        plain_softmax<parts, M>(s, r, h, w);
        plain_put<M>(w.weights, s);
        if (h.limit) plain_drop<M>(h, w);
        plain_sums<parts, M>(r.o, w.weights, h, w, v, false);
    }

    plain_finish<parts, M>(r, h, w);
}

/* delta of the own queries: dy times y. */
template <int M> __device__ inline void plain_delta(const Heads &h, const PlainPlace &w) {
    MIXPI_UNROLL_BY(1)
    for (int i = 0; i < M; i++) {
        int query = w.first + plain_row<M>() + 4 * i;
        int64_t at = head_at(h, h.y_at, w.z) + query * h.y_at.row;
        float sum = 0.0f, a[8], b[8];
        for (int j = 8 * plain_column(); query < h.t && j < h.d; j += plain_columns) {
            get8_any(h.dy, at + j, (int)least(8, h.d - j), h.wide, a);
            get8_any(h.y, at + j, (int)least(8, h.d - j), h.wide, b);
            MIXPI_UNROLL
            for (int e = 0; e < 8; e++) sum = fmaf(a[e], b[e], sum);
        }
        sum = row_sum(sum);
        if (query < h.t && plain_column() == 0) h.delta[(int64_t)w.z * h.t + query] = sum;
    }
}

/* Is a key of the tile seen by a query, both in range? */
__device__ inline bool is_seen(const Heads &h, const PlainPlace &w, int query, int key) {
    return query < h.t && key < w.end && key <= query + h.ahead;
}

/* Turns scores into weights, and g into their gradients. */
template <bool keys, int M>
__device__ inline void plain_weights(
    float (*s)[8], float (*g)[8], const Heads &h, const PlainPlace &w) {
    const int queries = keys ? 8 : M;
    int mine = w.first + plain_row<M>(), that = w.at + plain_column();

    /* Read the queries' statistics. */
    float lse[queries], delta[queries];
    MIXPI_UNROLL
    for (int i = 0; i < queries; i++) {
        int query = keys ? that + 8 * i : mine + 4 * i;
        int64_t at = (int64_t)w.z * h.t + query;
        lse[i] = query < h.t ? h.lse[at] : 0.0f;
        delta[i] = query < h.t ? h.delta[at] : 0.0f;
    }

    /* Compute the weights, and the gradients of their scores; hidden pairs have none. */
    MIXPI_UNROLL
    for (int n = 0; n < 8 * M; n++) {
        int i = n / 8, j = n % 8, of = keys ? j : i;
        int query = keys ? that + 8 * j : mine + 4 * i, key = keys ? mine + 4 * i : that + 8 * j;
        bool seen = is_seen(h, w, query, key);
        float weight = expf(fmaf(s[i][j], h.scale, -lse[of]));
        s[i][j] = seen ? weight : 0.0f;
        g[i][j] = seen ? weight * (g[i][j] - delta[of]) : 0.0f;
    }
}

/* The weights and gradients of changed scores (with a cap, a mask or dropout), in shared memory. */
template <bool keys, int M>
__device__ inline void plain_modified(const Heads &h, const PlainPlace &w) {
    const uint64_t draws = draws_key(h);
    MIXPI_UNROLL_BY(1)
    for (int n = 0; n < 8 * M; n++) {
        PlainScore one = plain_score<M>(n);
        int mine = w.first + one.row, that = w.at + one.column;
        int query = keys ? that : mine, key = keys ? mine : that;
        int64_t at = (int64_t)w.z * h.t + query;

        /* Cap the score. A hidden pair has no weight and no gradient. */
        float *s = w.weights + one.at, *g = w.own + one.at;
        float score = capped(h, *s), slope = cap_slope(h, score), weight, kept;
        bool seen = is_seen(h, w, query, key);
        *s = seen ? score : 0.0f;
        if (!seen) *g = 0.0f;
        if (!seen) continue;

        /* Compute the weight, and the gradient of the score. */
        weight = expf(score + mask_of(h, w.z, query, key) - h.lse[at]);
        kept = kept_of(h, draws, w.z, query, key);
        *s = weight * kept;
        *g = weight * (*g * kept - h.delta[at]) * slope;
    }
}

template <bool keys, int parts, int M>
__global__ void __launch_bounds__(attention_threads, 2) plain_backward(Heads h) {
    MIXPI_DYNAMIC_SHARED(float, shared);
    int blocks = (int)ceil_div(keys ? h.keys : h.t, 16 * M), block = (int)(blockIdx.x % blocks);
    int z = (int)(blockIdx.x / blocks) * (keys ? h.group : 1), begin = 0;
    PlainPlace w = plain_place<M>(h, shared, z, (keys ? block : blocks - 1 - block) * 16 * M, keys);
    int end = keys ? h.t : (int)least(w.end, (int64_t)w.first + 16 * M + h.ahead);

    /* Find the tiles that the own rows meet; compute delta of own queries. */
    float sums[keys ? 2 : 1][parts][M][8] = {};
    if (keys && w.first > h.ahead) begin = (w.first - h.ahead) / plain_others * plain_others;
    if (keys && w.first >= w.end) end = 0;
    if (!keys) plain_delta<M>(h, w);

    /* Walk over them: in keys, for each head of the group. */
    PlainRows k = key_rows(h, h.k, h.k_at, z, w.end), v = key_rows(h, h.v, h.v_at, z, w.end);
    for (; w.z < z + (keys ? h.group : 1); w.z++) {
        PlainRows q = query_rows(h, h.q, h.q_at, w.z), dy = query_rows(h, h.dy, h.y_at, w.z);
        for (w.at = begin; w.at < end; w.at += plain_others) {
            float s[M][8] = {}, g[M][8] = {};

            /* Compute the scores and their gradients. */
            plain_scores<parts, M>(g, h, w, keys ? v : dy, keys ? dy : v, false);
            plain_scores<parts, M>(s, h, w, keys ? k : q, keys ? q : k, false);
            __syncwarp(); /* own rows of the warp have been read */
            if (!h.modified) plain_weights<keys, M>(s, g, h, w);
            plain_put<M>(w.weights, s);
            plain_put<M>(w.own, g);
            if (h.modified) plain_modified<keys, M>(h, w);

            /* Add them to the sums. */
            plain_sums<parts, M>(sums[0], w.own, h, w, keys ? q : k, true);
            if (keys) plain_sums<parts, M>(sums[keys], w.weights, h, w, dy, false);
        }
    }

    /* Store the sums. */
    if (keys) {
        GradRows dk = { h.dk, met_at(h, h.k_at, z), h.k_at.row, h.keys, w.end };
        GradRows dv = { h.dv, met_at(h, h.v_at, z), h.v_at.row, h.keys, w.end };
        plain_store<parts, M>(sums[0], h, dk, w.first, h.scale);
        plain_store<parts, M>(sums[keys], h, dv, w.first, 1.0f);
    } else {
        GradRows dq = { h.out, head_at(h, h.q_at, z), h.q_at.row, h.t, h.t };
        plain_store<parts, M>(sums[0], h, dq, w.first, h.scale);
    }
}

}   /* namespace */
namespace {

/* --- calls ------------------------------------------------------------------------------- */

inline int64_t query_blocks(const Heads &h, int rows) {
    return ceil_div(h.t, rows) * h.b * h.heads;
}
inline int64_t key_blocks(const Heads &h, int rows) {
    return ceil_div(h.keys, rows) * h.b * (h.heads / h.group);
}

inline mixp_result attention_launch(Kernel *k, void (*kernel)(Heads), int64_t blocks, size_t bytes,
    const Heads &h, int threads = attention_threads) {
    cudaError_t e = cudaSuccess;
    if (blocks > 0x7FFFFFFF)
        return say(k->state, MIXP_ERR_SHAPE, "attention",
            "more rows than the grid of a kernel can hold; split the batch");
    e = make_room(k->state, (const void *)kernel, bytes);
    if (e == cudaSuccess) e = MIXPI_LAUNCH(kernel, (unsigned)blocks, threads, bytes, k->stream, h);
    return k->report("attention", e);
}

inline bool wants_keys(const Heads &h) { return h.dk.data || h.dv.data; }

template <int D, bool bf16, bool modified>
mixp_result tensor_run(Kernel *k, const Heads &h, bool backward) {
    typedef Forward<D, modified> Ahead;
    typedef Backward<D, modified> Back;
    if (!backward)
        return attention_launch(
            k, attention_forward<D, bf16, modified>, query_blocks(h, Ahead::rows), Ahead::bytes, h);
    mixp_result r = attention_launch(k, attention_backward<D, bf16, false, modified>,
        query_blocks(h, Back::rows), Back::bytes, h);
    if (r != MIXP_OK || !wants_keys(h)) return r;
    return attention_launch(
        k, attention_backward<D, bf16, true, modified>, key_blocks(h, Back::rows), Back::bytes, h);
}

#ifndef MIXPREC_CUDASIM
/* Does the current GPU, of capability 9.0, run code that was compiled for sm_90a? The bounds of a
 * kernel show it. */
inline bool has_group_code() {
    cudaFuncAttributes own = {};
    cudaError_t e = cudaFuncGetAttributes(&own, wide_forward<64, true>);
    clear_error(e);
    return e == cudaSuccess && own.maxThreadsPerBlock == WideForward<64>::threads;
}
inline bool is_by_groups(State *s) {
    if (s->capability == 90 && !s->by_groups) s->by_groups = has_group_code() ? 1 : -1;
    return s->by_groups > 0;
}

template <int D> inline int wide_bytes(bool backward) {
    int own = WideBackward<D, false>::bytes, own_keys = WideBackward<D, true>::bytes;
    return !backward ? WideForward<D>::bytes : own > own_keys ? own : own_keys;
}

template <int D, bool bf16> mixp_result wide_run(Kernel *k, const Heads &h, bool backward) {
    typedef WideForward<D> Ahead;
    typedef WideBackward<D, false> Back;
    typedef WideBackward<D, true> BackKeys;
    if (!backward)
        return attention_launch(k, wide_forward<D, bf16>, query_blocks(h, Ahead::rows),
            Ahead::bytes, h, Ahead::threads);
    mixp_result r = attention_launch(k, wide_backward<D, bf16, false>, query_blocks(h, Back::rows),
        Back::bytes, h, Back::threads);
    if (r != MIXP_OK || !wants_keys(h)) return r;
    return attention_launch(k, wide_backward<D, bf16, true>, key_blocks(h, BackKeys::rows),
        BackKeys::bytes, h, BackKeys::threads);
}
#endif

template <int D> mixp_result tensor_by_dtype(Kernel *k, const Heads &h, bool backward) {
#ifndef MIXPREC_CUDASIM
    const int wide_d = D == 32 ? 64 : D;
    if (D != 32 && !h.modified && wide_bytes<wide_d>(backward) <= k->state->most_shared &&
        is_by_groups(k->state))
        return h.q.dtype == MIXP_BF16 ? wide_run<wide_d, true>(k, h, backward)
                                      : wide_run<wide_d, false>(k, h, backward);
#endif
    if (h.q.dtype == MIXP_BF16)
        return h.modified ? tensor_run<D, true, true>(k, h, backward)
                          : tensor_run<D, true, false>(k, h, backward);
    return h.modified ? tensor_run<D, false, true>(k, h, backward)
                      : tensor_run<D, false, false>(k, h, backward);
}

inline mixp_result tensor_run(Kernel *k, const Heads &h, bool backward) {
    switch (h.d) {
    case 32: return tensor_by_dtype<32>(k, h, backward);
    case 64: return tensor_by_dtype<64>(k, h, backward);
    default: return tensor_by_dtype<128>(k, h, backward);
    }
}

/* Can 16 bytes of a row of D be read at once? Yes for an absent array. */
inline bool is_wide(mixp_in a, const mixp_head_strides &at) {
    return is_wide(a) && (at.sequence | at.head | at.row) % 8 == 0;
}

/* Can each row of each array? */
inline bool is_wide(const Heads &h) {
    return h.d % 8 == 0 && is_wide(h.q, h.q_at) && is_wide(h.k, h.k_at) && is_wide(h.v, h.v_at) &&
           is_wide(h.y) && is_wide(h.dy) && is_wide(h.out) && is_wide(h.dk) && is_wide(h.dv);
}

/* Bytes of shared memory that the kernel for this head dimension needs. */
template <int D> inline int tensor_bytes(const Heads &h, bool backward) {
    if (backward) return h.modified ? Backward<D, true>::bytes : Backward<D, false>::bytes;
    return h.modified ? Forward<D, true>::bytes : Forward<D, false>::bytes;
}
inline int tensor_bytes(const Heads &h, bool backward) {
    return h.d == 32   ? tensor_bytes<32>(h, backward)
           : h.d == 64 ? tensor_bytes<64>(h, backward)
                       : tensor_bytes<128>(h, backward);
}
/* Does the GPU have the tensor cores and the shared memory? Kernels that change scores have fewer
 * rows per block, so they fit where the others do not. */
inline bool tensor_can(const State *s, Heads &h, bool backward) {
    if (s->capability < 75 || (s->capability < 80 && h.q.dtype != MIXP_F16)) return false;
    if (tensor_bytes(h, backward) > s->most_shared) h.modified = true;
    return tensor_bytes(h, backward) <= s->most_shared;
}

/* Can tensor cores compute it? */
inline bool tensor_takes(const State *s, Heads &h, bool backward) {
    mixp_dtype dtype = h.q.dtype;
    return tensor_can(s, h, backward) && (h.d == 32 || h.d == 64 || h.d == 128) &&
           dtype != MIXP_F32 && h.k.dtype == dtype && h.v.dtype == dtype &&
           (!backward || h.dy.dtype == dtype) && h.scale > 1e-30f && h.scale < 1e30f && is_wide(h);
}

inline bool is_modified(const Heads &h) { return h.mask.data || h.limit || h.softcap > 0.0f; }

template <int parts> inline mixp_result plain_run(Kernel *k, const Heads &h, bool backward) {
    const int M = parts == 4 ? 2 : 4, of_keys = parts == 1 ? 4 : 2;
    if (!backward)
        return attention_launch(
            k, plain_forward<parts, M>, query_blocks(h, 16 * M), plain_bytes(M), h);
    mixp_result r = attention_launch(
        k, plain_backward<false, parts, M>, query_blocks(h, 16 * M), plain_bytes(M), h);
    if (r != MIXP_OK || !wants_keys(h)) return r;
    return attention_launch(k, plain_backward<true, parts, of_keys>, key_blocks(h, 16 * of_keys),
        plain_bytes(of_keys), h);
}
inline mixp_result plain_run(Kernel *k, Heads &h, bool backward) {
    h.modified = is_modified(h); /* whatever tensor cores have no room for */
    h.wide = is_wide(h);
    return h.d <= plain_columns       ? plain_run<1>(k, h, backward)
           : h.d <= 2 * plain_columns ? plain_run<2>(k, h, backward)
                                      : plain_run<4>(k, h, backward);
}

inline bool attends_nothing(const mixp_attention_args &args) {
    return args.b <= 0 || args.t <= 0 || args.keys <= 0 || args.heads <= 0 || args.d <= 0;
}

inline bool short_row(const mixp_head_strides &at) { return at.row <= 0x7FFFFFFF; }

/* Reports a call that the kernels do not support; otherwise MIXP_OK. */
inline mixp_result attention_check(const Kernel &k, const mixp_attention_args &args) {
    if (args.d > attention_most_d)
        return say(
            k.state, MIXP_ERR_SHAPE, "attention", "a head is wider than 256; use more heads");
    if (args.t > most_rows || args.keys > most_rows || args.heads > 0x1FFFFF ||
        !short_row(args.q_at) || !short_row(args.k_at) || !short_row(args.v_at))
        return say(k.state, MIXP_ERR_SHAPE, "attention",
            "a sequence, a head count or a row stride exceeds the kernel's limit; use shorter "
            "sequences");
    if (!is_real(args.q.dtype) || !is_real(args.k.dtype) || !is_real(args.v.dtype) ||
        !is_real(args.y.dtype) || (args.mask.data && !is_real(args.mask.dtype)))
        return MIXP_ERR_DTYPE;
    if (args.kv_heads < 1 || args.heads % args.kv_heads || args.past < 0 ||
        !(args.softcap >= 0.0f) || !(args.dropout >= 0.0f && args.dropout < 1.0f))
        return MIXP_ERR_ARGUMENT;
    return MIXP_OK;
}

/* Sets the fields that change scores: cap, mask, dropout. */
inline void heads_modify(Heads *h, const mixp_attention_args &args) {
    h->lengths = args.lengths;
    h->mask = args.mask;
    h->mask_at = args.mask_at;
    h->mask_key = (int)args.mask_key;
    h->softcap = args.softcap;
    h->limit = (uint64_t)ceil((double)args.dropout * 4294967296.0);
    h->kept = (float)(1.0 / (1.0 - (double)args.dropout));
    h->modified = is_modified(*h);
    h->may_hide = h->mask.data || h->lengths;
}

inline mixp_result heads_make(const Kernel &k, const mixp_attention_args &args, Heads *h) {
    mixp_result r = attention_check(k, args);
    if (r != MIXP_OK) return r;
    memset((void *)h, 0, sizeof *h);

    /* The sizes. */
    h->b = args.b;
    h->t = (int)args.t;
    h->keys = (int)args.keys;
    h->heads = (int)args.heads;
    h->group = (int)(args.heads / args.kv_heads);
    h->d = (int)args.d;
    h->ahead = args.causal ? (int)least(args.past, most_ahead) : most_ahead;
    h->scale = args.scale;

    /* The arrays, and where their rows stand. */
    h->q = args.q;
    h->k = args.k;
    h->v = args.v;
    h->q_at = args.q_at;
    h->k_at = args.k_at;
    h->v_at = args.v_at;
    h->y_at.head = args.d;
    h->y_at.row = args.heads * args.d;
    h->y_at.sequence = args.t * h->y_at.row;
    h->out = args.y;
    h->lse = args.lse;

    /* Set what changes scores, and the place of faults. */
    h->fault = fault_flag(k.state);
    h->draws = draws_of(k.state, args.seed, args.step, args.tensor);
    heads_modify(h, args);
    return MIXP_OK;
}

inline bool writes(mixp_out a) { return !a.data || is_real(a.dtype); }

inline mixp_result heads_make(const Kernel &k, const mixp_attention_backward_args &args, Heads *h) {
    mixp_result r = heads_make(k, args.forward, h);
    if (r != MIXP_OK) return r;
    if (!is_real(args.dy.dtype) || !writes(args.dq) || !writes(args.dk) || !writes(args.dv))
        return MIXP_ERR_DTYPE;
    h->y = as_in(args.forward.y);
    h->dy = args.dy;
    h->out = args.dq;
    h->dk = args.dk;
    h->dv = args.dv;
    return MIXP_OK;
}

}   /* namespace */

static mixp_result mixpi_cuda_attention(const mixp_exec *x, const mixp_attention_args *args) {
    Kernel k(x);
    Heads h;
    if (!k.state) return MIXP_ERR_ORDER;
    if (attends_nothing(*args)) return MIXP_OK;
    mixp_result r = heads_make(k, *args, &h);
    if (r != MIXP_OK) return r;
    return tensor_takes(k.state, h, false) ? tensor_run(&k, h, false) : plain_run(&k, h, false);
}

static mixp_result mixpi_cuda_attention_backward(
    const mixp_exec *x, const mixp_attention_backward_args *args) {
    Kernel k(x);
    Heads h;
    mixp_result r;
    if (!k.state) return MIXP_ERR_ORDER;
    if (attends_nothing(args->forward)) return MIXP_OK;
    r = heads_make(k, *args, &h);
    if (r != MIXP_OK) return r;
    h.delta = (float *)scratch_of(x, (size_t)(h.b * h.heads * h.t) * sizeof(float));
    if (!h.delta) return MIXP_ERR_MEMORY;
    return tensor_takes(k.state, h, true) ? tensor_run(&k, h, true) : plain_run(&k, h, true);
}
/* ==== 8. TABLE ============================================================= >>table ==== */

namespace {

const mixp_kernels kernel_table = { mixpi_cuda_convert,
                                    mixpi_cuda_fill,
                                    mixpi_cuda_copy,
                                    mixpi_cuda_unary,
                                    mixpi_cuda_unary_backward,
                                    mixpi_cuda_binary,
                                    mixpi_cuda_binary_backward,
                                    mixpi_cuda_reduce,
                                    mixpi_cuda_reduce_backward,
                                    mixpi_cuda_softmax,
                                    mixpi_cuda_softmax_backward,
                                    mixpi_cuda_norm,
                                    mixpi_cuda_norm_backward,
                                    mixpi_cuda_embedding,
                                    mixpi_cuda_embedding_backward,
                                    mixpi_cuda_attention,
                                    mixpi_cuda_attention_backward,
                                    mixpi_cuda_cross_entropy,
                                    mixpi_cuda_cross_entropy_backward,
                                    mixpi_cuda_loss,
                                    mixpi_cuda_loss_backward,
                                    mixpi_cuda_dropout,
                                    mixpi_cuda_gemm,
                                    mixpi_cuda_scale_by,
                                    mixpi_cuda_grad_stats,
                                    mixpi_cuda_clip,
                                    mixpi_cuda_prepare,
                                    mixpi_cuda_update,
                                    mixpi_cuda_advance,
                                    mixpi_cuda_look,
                                    mixpi_cuda_agree,
                                    mixpi_cuda_where,
                                    mixpi_cuda_where_backward,
                                    mixpi_cuda_max,
                                    mixpi_cuda_max_backward,
                                    mixpi_cuda_gather,
                                    mixpi_cuda_gather_backward,
                                    mixpi_cuda_rope,
                                    mixpi_cuda_random,
                                    mixpi_cuda_compare,
                                    mixpi_cuda_topk,
                                    mixpi_cuda_add_norm,
                                    mixpi_cuda_cross_entropy_both,
                                    mixpi_cuda_gemm_epilogue,
                                    mixpi_cuda_quantise,
                                    mixpi_cuda_hadamard,
                                    mixpi_cuda_turn,
                                    mixpi_cuda_lose,
                                    mixpi_cuda_recode,
                                    mixpi_cuda_gemm_narrow,
                                    mixpi_cuda_restore,
                                    mixpi_cuda_check_buffers, NULL };

/* The epilogues of a context whose description names none, from a capability on. One measurement
 * decides a row (tests/cuda/gpu.sh, bench_cuda): flags that make GPT-2's step faster there. On an
 * H100 (GPT-2 124M, 64 sequences, bf16, cuBLASLt 13.1) a step takes 130.2 ms without, 126.5 with
 * GELU's and 127.9 with both. Other rows have not been measured. */
struct EpilogueRow { int capability, flags; };
const EpilogueRow epilogue_rows[] = {
    { 70, 0 }, { 80, 0 }, { 90, MIXP_EPILOGUES_GELU_BF16 }, { 100, 0 }
};

int epilogue_defaults(const mixp_exec *x) {
    int flags = 0;
    for (const EpilogueRow &row : epilogue_rows)
        if (row.capability <= state_of(x)->capability) flags = row.flags;
    return flags;
}

const int most_devices = 16;

template <int ordinal> mixp_result open_at(mixp_exec *x) { return device_open(x, ordinal); }

#define MIXPI_DEVICE(ordinal)                                                             \
    { "cuda", &kernel_table, device_allocate, device_release, device_upload, device_download, \
      device_wait, open_at<ordinal>, device_close, device_peek, capture_begin, \
      capture_end, replay, graph_free, device_message, device_check, device_feed, gemm_count, \
      device_post, device_collect, gemm_choices, epilogue_defaults }
const mixp_device device_table[most_devices] = {
    MIXPI_DEVICE(0), MIXPI_DEVICE(1), MIXPI_DEVICE(2), MIXPI_DEVICE(3),
    MIXPI_DEVICE(4), MIXPI_DEVICE(5), MIXPI_DEVICE(6), MIXPI_DEVICE(7),
    MIXPI_DEVICE(8), MIXPI_DEVICE(9), MIXPI_DEVICE(10), MIXPI_DEVICE(11),
    MIXPI_DEVICE(12), MIXPI_DEVICE(13), MIXPI_DEVICE(14), MIXPI_DEVICE(15)
};
#undef MIXPI_DEVICE

/* Why the driver does not answer. */
const char *driver_fault(cudaError_t e) {
    switch (e) {
    /* There is no GPU, or its driver is too old. */
    case cudaErrorInsufficientDriver:
        return "the NVIDIA driver is older than this build's CUDA version: update the driver";
    case cudaErrorNoDevice:
        return "no GPU is visible: there is no GPU, or CUDA_VISIBLE_DEVICES hides it";
    case cudaErrorCompatNotSupportedOnDevice:
        return "the CUDA compatibility package does not support this GPU "
               "(cudaErrorCompatNotSupportedOnDevice): update the driver";

    /* The driver does not start. */
    case cudaErrorInitializationError:
        return "CUDA could not be started (cudaErrorInitializationError): after fork(), a child "
               "cannot use CUDA if the parent has used it; use CUDA only in the child, or call "
               "exec";
    case cudaErrorSystemNotReady:
        return "the system is not ready (cudaErrorSystemNotReady): is nvidia-fabricmanager "
               "running?";
    case cudaErrorSystemDriverMismatch:
        return "the driver's kernel module and its libraries differ "
               "(cudaErrorSystemDriverMismatch): reboot after an update";
    default: return "the NVIDIA driver does not answer: see nvidia-smi";
    }
}

/* Why a GPU that answers cannot run the kernels of this file. */
const char *kernel_fault(cudaError_t e) {
    switch (e) {
    /* The build does not suit the GPU or the driver. */
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidDeviceFunction:
        return "mixprec_cuda.cu was not compiled for this GPU: set nvcc's -arch (V100: sm_70, with "
               "CUDA 12; CUDA 13 has dropped it)";
    case cudaErrorUnsupportedPtxVersion:
        return "the NVIDIA driver is older than the PTX of this build "
               "(cudaErrorUnsupportedPtxVersion): update the driver, or compile with -arch of this "
               "GPU";
    case cudaErrorInvalidPtx:
    case cudaErrorJitCompilerNotFound:
    case cudaErrorJitCompilationDisabled:
        return "the driver cannot compile the PTX of this build: compile with -arch of this GPU";

    /* Other programs use the GPU. */
    case cudaErrorMemoryAllocation:
        return "the GPU has no free memory: see nvidia-smi for the programs that use it";
    case cudaErrorDevicesUnavailable:
        return "another program uses the GPU (cudaErrorDevicesUnavailable), or the GPU is in "
               "exclusive or prohibited mode: see nvidia-smi";
    default: return "the GPU cannot be used: see nvidia-smi and dmesg";
    }
}

/* NULL when GPU `ordinal` can be used, or why it cannot. */
const char *why_unusable(int ordinal) {
    /* Does the driver answer, and does it know the GPU? */
    int driver = 0, count = 0;
    if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0)
        return "no NVIDIA driver is installed";
    cudaError_t e = cudaGetDeviceCount(&count);
    if (e == cudaSuccess && count == 0) e = cudaErrorNoDevice;
    if (e != cudaSuccess) return driver_fault(e);
    if (ordinal < 0 || ordinal >= count) return "there is no GPU with this ordinal";
    if (ordinal >= most_devices) return "only the first 16 GPUs can be used";

    /* Is the GPU new enough? */
    int capability = 0;
    e = capability_of(ordinal, &capability);
    if (e != cudaSuccess) return "the GPU does not answer: see nvidia-smi";
    if (capability < 70) return "the GPU is too old: compute capability 7.0 (V100) is needed";

    /* Does it load a kernel of this file? */
    OnDevice on(ordinal);
    cudaFuncAttributes attributes;
    e = on.error;
    if (e == cudaSuccess) e = cudaFuncGetAttributes(&attributes, (const void *)set_later);
    return e == cudaSuccess ? NULL : kernel_fault(e);
}

/* What makes this build slow on the usable GPU `ordinal`, or "". */
const char *why_slow(int ordinal) {
#ifndef MIXPREC_CUDASIM
    int capability = 0;
    OnDevice on(ordinal);
    if (on.error == cudaSuccess && capability_of(ordinal, &capability) == cudaSuccess &&
        capability == 90 && !has_group_code())
        return "slow: mixprec_cuda.cu was compiled without sm_90a, so attention takes 1.5 times "
               "as long on this GPU: compile it with -gencode arch=compute_90a,code=sm_90a";
#endif
    (void)ordinal;
    return "";
}

}   /* namespace */

extern "C" const mixp_device *mixp_cuda(int ordinal, const char **why) {
    const char *reason = why_unusable(ordinal);
    if (reason) cudaGetLastError(); /* clears the error of this query for the program */
    if (why) *why = reason ? reason : why_slow(ordinal);
    return reason ? NULL : &device_table[ordinal];
}
