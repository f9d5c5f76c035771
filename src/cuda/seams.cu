#pragma once
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

