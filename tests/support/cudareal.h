/* cudareal.h - the interface of the simulated CUDA, for tests on a real GPU: tests only.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * `make test-gpu` compiles the same CUDA tests by nvcc for the GPU of this machine; they read this
 * file instead of cudasim.h. The GPU chooses its own schedule, no failure can be requested, and
 * calls are not counted. A test that needs one of these begins with NEEDS_SIMULATION and is
 * skipped. Arrays lie in managed or in mapped memory, so a test may read them after it has waited.
 */
#ifndef CUDAREAL_H
#define CUDAREAL_H
#include <cuda_runtime.h>
#include <cublasLt.h>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace cudasim {
/* Names of their own: the stand-in of CUDA's library, which a program may load, has another Machine. */
inline namespace real {

static bool simulated = false, one_nan = true;

enum Schedule { forward, reversed, permuted };
static Schedule schedule = forward;
static int  devices = 1, driver = 0, capability_major = 0, capability_minor = 0;
static int  processors = 0, max_shared = 0;
static bool eager = false, unaligned_algorithms = true, other_libm = false, cut_sums = false;
static bool old_loader = false, sums_in_f32 = true, flushes = false;
static int  static_shared = 0;
static bool rounds_first = true;      /* cuBLASLt 13.1 does so on an H100 */
static uint32_t reductions = 0;
static bool host_sees_device = true, epilogues = true, narrow_products = true;
static size_t library_version = 0;
static double algorithm_ms[3], joined_ms = 0, kernel_ms = 0;
static int  first_algorithm = 0;
static long fail_at = 0, fault_at = 0, refused_products = 0, refused_narrow = 0;
static cublasStatus_t refused_with = CUBLAS_STATUS_NOT_SUPPORTED;
enum Gelu { exact_tanh, rough_tanh, by_erf };
static Gelu gelu_kind = rough_tanh;         /* nothing says how exact cuBLASLt's is */
static cublasStatus_t heuristic_says = CUBLAS_STATUS_SUCCESS, check_says = CUBLAS_STATUS_SUCCESS;
static size_t check_wants = 0;

struct Count {
    long launches, copies, waits, resources, released, queries, pageable, replays, products,
         heuristics, checks, joined, narrow;
    int  algorithm;
    long shared;
};
static Count count;

struct Region { size_t bytes; bool pinned; int device; };
struct Machine {
    std::map<size_t, Region> memory;
    std::set<int> contexts;
    std::set<std::pair<int, const void *>> loaded;
    std::map<std::pair<int, const void *>, int> shared_limit;
    long handles = 0;
    int  device = 0;
    cudaError_t last = cudaSuccess, sticky = cudaSuccess;
};
inline Machine &machine() { static Machine m; return m; }

/* Without a GPU a program is one skip. */
struct NeedsGpu {
    NeedsGpu() {
        int n = 0;
        cudaError_t e = cudaGetDeviceCount(&n);
        if (e == cudaSuccess && n > 0) return;
        std::printf("skipped, there is no GPU: %s\n", cudaGetErrorString(e));
        std::exit(77);
    }
};
static NeedsGpu needs_gpu;

/* A kernel of a test's own. */
template <class... P, class... A>
cudaError_t launch(void (*kernel)(P...), dim3 grid, dim3 threads, size_t bytes, cudaStream_t stream,
                   A... arguments) {
    kernel<<<grid, threads, bytes, stream>>>(arguments...);
    return cudaGetLastError();
}

/* Nobody counts: compute-sanitizer's memcheck does. */
inline long leaks() { return 0; }

/* May the host touch managed memory while the GPU works? Linux allows that. Windows, WSL and some virtual
 * GPUs do not: there the tests' arrays lie in mapped memory of the host. */
inline bool host_touches_managed() {
    static int there = -1;
    if (there < 0 && cudaDeviceGetAttribute(&there, cudaDevAttrConcurrentManagedAccess, 0) != cudaSuccess)
        there = 0;
    return there != 0;
}

/* Mapped memory of the host, which has one address on both sides. */
inline void *mapped_new(size_t bytes) {
    void *p = nullptr, *on_device = nullptr;
    if (cudaHostAlloc(&p, bytes, cudaHostAllocMapped | cudaHostAllocPortable) != cudaSuccess) return nullptr;
    if (cudaHostGetDevicePointer(&on_device, p, 0) != cudaSuccess || on_device != p) {
        cudaFreeHost(p);
        return nullptr;
    }
    std::memset(p, 0xFF, bytes);
    return p;
}

/* Memory of the GPU that the host sees, filled with 0xFF. It is asked for in captures, too, where nobody may
 * wait for the device. */
inline void *seen_new(size_t bytes, void *) {
    void *p = nullptr;
    if (!host_touches_managed()) return mapped_new(bytes);
    if (cudaMallocManaged(&p, bytes, cudaMemAttachGlobal) != cudaSuccess) return nullptr;
    cudaMemsetAsync(p, 0xFF, bytes, cudaStreamLegacy);
    cudaStreamSynchronize(cudaStreamLegacy);
    return p;
}
inline void seen_back(void *p, void *) {
    if (host_touches_managed()) cudaFree(p);
    else cudaFreeHost(p);
}

}   /* namespace real */
}   /* namespace cudasim */
#endif
