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
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
                     "{%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[2 * half]), "r"(a[2 * half + 1]), "r"(b[half]));
}
#else
template <bool bf16>
__device__ inline void mma_16816(float *d, const uint32_t *a, const uint32_t *b) {
    if (bf16)
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                     "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    else
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                     "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
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

}   /* namespace */

#endif

#ifndef MIXPI_CUDA_VERSION        /* a test sets another version     */
#  define MIXPI_CUDA_VERSION CUDART_VERSION
#endif
#if MIXPI_CUDA_VERSION < 12000
#  error "mixprec_cuda.cu needs CUDA 12.0 or newer: call a newer nvcc"
#endif
#if defined(__CUDA_ARCH__) && MIXPI_CUDA_ARCH < 700
#  error "mixprec_cuda.cu needs compute capability 7.0: give nvcc -arch=native, or sm_70 and up"
#endif
#if __cplusplus < 201703L && (!defined(_MSVC_LANG) || _MSVC_LANG < 201703L)
#  error "mixprec_cuda.cu is C++17: give nvcc -std=c++17"
#endif

