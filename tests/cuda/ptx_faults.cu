/* ptx_faults.cu - kernels with one fault each: does the interpreter report it? Tests only.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 *     ptx_faults NAME         launches the kernel NAME; tests/cuda/ptx.sh knows what must be said
 *
 * Those whose name begins with "right" have no fault and must end with "done".
 */
#include <cstdio>
#include <cstring>
#include <cuda_runtime.h>

struct Job { float *a; double *d; unsigned *counter; const float *read_only; };

__device__ void copy_async(void *shared, const void *from) {
    unsigned to = (unsigned)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int n> __device__ void wait() { asm volatile("cp.async.wait_group %0;" ::"n"(n) : "memory"); }

/* ---- memory ----------------------------------------------------------------------------- */

__global__ void beyond(Job j) { j.a[1024 + threadIdx.x] = 1; }
__global__ void before(Job j) { j.a[-1 - (int)threadIdx.x] = 1; }
__global__ void misaligned(Job j) { *(float4 *)(j.a + 1 + threadIdx.x * 4) = float4{ 1, 2, 3, 4 }; }
__global__ void shared_end(Job j) {
    extern __shared__ float s[];
    s[threadIdx.x + 64] = 1;
    j.a[threadIdx.x] = s[threadIdx.x + 64];
}

/* ---- shared memory ---------------------------------------------------------------------- */

__global__ void unwritten(Job j) {
    __shared__ float s[64];
    if (threadIdx.x < 32) s[threadIdx.x] = j.a[threadIdx.x];
    __syncthreads();
    j.a[threadIdx.x] = s[threadIdx.x];
}
template <bool right> __device__ void exchange(Job j) {
    __shared__ float s[64];
    s[threadIdx.x] = j.a[threadIdx.x];
    if (right) __syncthreads();
    j.a[threadIdx.x] = s[63 - threadIdx.x];
}
__global__ void race_read(Job j) { exchange<false>(j); }
__global__ void right_exchange(Job j) { exchange<true>(j); }

template <bool right> __device__ void reuse(Job j) {
    __shared__ float s[64];
    s[threadIdx.x] = j.a[threadIdx.x];
    __syncthreads();
    float x = s[63 - threadIdx.x];
    if (right) __syncthreads();
    s[threadIdx.x] = x;
    j.a[threadIdx.x] = s[threadIdx.x];
}
__global__ void race_write(Job j) { reuse<false>(j); }
__global__ void right_reuse(Job j) { reuse<true>(j); }

template <bool right> __device__ void within_warp(Job j) {
    __shared__ float s[64];
    s[threadIdx.x] = j.a[threadIdx.x];
    if (right) __syncwarp();
    j.a[threadIdx.x] = s[threadIdx.x ^ 1];
}
__global__ void race_warp(Job j) { within_warp<false>(j); }
__global__ void right_warp(Job j) { within_warp<true>(j); }

/* Two threads, two halves of one word. */
__global__ void right_halves(Job j) {
    __shared__ unsigned short s[64];
    s[threadIdx.x] = (unsigned short)threadIdx.x;
    __syncthreads();
    s[threadIdx.x] = (unsigned short)(s[threadIdx.x] + 1);
    j.a[threadIdx.x] = s[threadIdx.x];
}
__global__ void race_halves(Job j) {
    __shared__ unsigned short s[64];
    s[threadIdx.x] = (unsigned short)threadIdx.x;
    __syncthreads();
    s[threadIdx.x] = (unsigned short)(s[threadIdx.x ^ 33] + 1);
    j.a[threadIdx.x] = s[threadIdx.x];
}

/* ---- asynchronous copies ---------------------------------------------------------------- */

template <int left> __device__ void staged(Job j) {
    __shared__ float4 s[128];
    copy_async(&s[threadIdx.x], j.a + 4 * threadIdx.x);
    commit();
    copy_async(&s[64 + threadIdx.x], j.a + 256 + 4 * threadIdx.x);
    commit();
    wait<left>();
    __syncthreads();
    j.d[threadIdx.x] = s[63 - threadIdx.x].x;
    wait<0>();
}
__global__ void early_read(Job j) { staged<2>(j); }
__global__ void right_staged(Job j) { staged<1>(j); }
__global__ void copies_left(Job j) {
    __shared__ float4 s[64];
    copy_async(&s[threadIdx.x], j.a + 4 * threadIdx.x);
    commit();
}

/* ---- threads that do not come ------------------------------------------------------------ */

__global__ void divergent_barrier(Job j) {
    if (threadIdx.x < 32) {
        j.a[0] = 1;
        __syncthreads();
    } else {
        j.a[1] = 2;
        __syncthreads();
        j.a[2] = 3;
    }
}
__global__ void missing_lane(Job j) {
    float x = j.a[threadIdx.x];
    if (threadIdx.x % 32 < 16) x = __shfl_xor_sync(0xFFFFFFFFu, x, 1);
    else __syncthreads();
    j.a[threadIdx.x] = x;
}
__global__ void gone_lane(Job j) {
    if (threadIdx.x % 32 == 5) return;
    j.a[threadIdx.x] = __shfl_xor_sync(0xFFFFFFFFu, j.a[threadIdx.x], 1);
}
__global__ void right_branches(Job j) {
    float x = j.a[threadIdx.x];
    if (x > 0.5f) x = j.a[threadIdx.x ^ 1] * 2.0f;
    else x = -x;
    for (int i = 0; i < (int)threadIdx.x % 7; i++) x += 1.0f;
    j.d[threadIdx.x] = __shfl_xor_sync(0xFFFFFFFFu, x, 1);
}

/* ---- blocks ------------------------------------------------------------------------------ */

/* Each block adds its part, the last one joins them. */
template <bool fenced, bool counted> __device__ void last_block(Job j) {
    __shared__ bool last;
    j.a[blockIdx.x * 64 + threadIdx.x] = (float)threadIdx.x;
    if (fenced) __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = (counted ? atomicInc(j.counter, gridDim.x - 1) : blockIdx.x) == gridDim.x - 1;
    __syncthreads();
    if (!last) return;
    double sum = 0;
    for (unsigned b = 0; b < gridDim.x; b++) sum += __ldcg(j.a + b * 64 + threadIdx.x);
    j.d[threadIdx.x] = sum;
}
__global__ void right_last_block(Job j) { last_block<true, true>(j); }
__global__ void no_fence(Job j) { last_block<false, true>(j); }
__global__ void no_atomic(Job j) { last_block<true, false>(j); }
__global__ void blocks_write(Job j) { j.a[threadIdx.x] = (float)blockIdx.x; }
__global__ void blocks_overlap(Job j) {
    float x = j.a[blockIdx.x * 63 + threadIdx.x];
    j.a[blockIdx.x * 64 + threadIdx.x] = x + 1;
}
__global__ void right_blocks(Job j) { j.a[blockIdx.x * 64 + threadIdx.x] = j.read_only[threadIdx.x]; }
__global__ void stale_cache(Job j) {
    j.a[blockIdx.x * 64 + threadIdx.x] = 1;
    __syncthreads();
    j.d[blockIdx.x * 64 + threadIdx.x] = __ldg(j.a + blockIdx.x * 64 + (threadIdx.x ^ 40));
}

/* ---- main -------------------------------------------------------------------------------- */

struct Entry { const char *name; void (*kernel)(Job); int blocks; };
#define ONE(name) { #name, name, 1 }
#define MANY(name) { #name, name, 4 }
static const Entry entries[] = { ONE(beyond), ONE(before), ONE(misaligned), ONE(shared_end),
    ONE(unwritten), ONE(race_read), ONE(right_exchange), ONE(race_write), ONE(right_reuse),
    ONE(race_warp), ONE(right_warp), ONE(right_halves), ONE(race_halves), ONE(early_read),
    ONE(right_staged), ONE(copies_left), ONE(divergent_barrier), ONE(missing_lane),
    ONE(gone_lane), ONE(right_branches), MANY(right_last_block), MANY(no_fence), MANY(no_atomic),
    MANY(blocks_write), MANY(blocks_overlap), MANY(right_blocks), MANY(stale_cache) };

static void launch(const Entry &e) {
    Job j;
    float *read_only;
    cudaMalloc((void **)&j.a, 4096);
    cudaMalloc((void **)&j.d, 4096);
    cudaMalloc((void **)&j.counter, 4);
    cudaMalloc((void **)&read_only, 4096);
    cudaMemsetAsync(j.a, 0, 4096, 0);
    cudaMemsetAsync(j.counter, 0, 4, 0);
    cudaMemsetAsync(read_only, 0, 4096, 0);
    j.read_only = read_only;
    e.kernel<<<e.blocks, 64, 256, 0>>>(j);
    cudaDeviceSynchronize();
}

int main(int argc, char **argv) {
    for (const Entry &e : entries) {
        if (argc < 2 || std::strcmp(argv[1], e.name)) continue;
        launch(e);
        std::printf("done\n");
        return 0;
    }
    for (const Entry &e : entries) std::printf("%s\n", e.name);
    return 2;
}
