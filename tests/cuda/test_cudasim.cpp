/* test_cudasim.cpp - the simulated CUDA itself: kernels with planted faults must be caught, and the
 * same kernels without the faults must pass.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * Compile with -fsanitize=address,undefined -fno-sanitize-recover=all, because only the sanitizers
 * detect some of the faults. Each kernel is a template: the sound kernel has fault = false.
 */
#include "cudasim.h"
#include "test.h"
#include <sys/wait.h>
#include <unistd.h>

#define SHARED(T, name, N)                                                                \
    T *name = (T *)cudasim::shared([] { static char key; return (const void *)&key; }(),  \
                                   sizeof(T) * (N))

static void *device(size_t bytes) {
    void *p = NULL;
    CHECK_INT(cudaMalloc(&p, bytes), cudaSuccess);
    return p;
}

/* Runs f in a child. 0: it came back; 1: it died, and said `text`; 2: it said something else. */
template <class F> int dies(const char *text, F f) {
    int pipes[2], status;
    std::string said;
    char buffer[512];
    ssize_t n;
    if (pipe(pipes)) return 2;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        dup2(pipes[1], 2);
        close(pipes[0]);
        f();
        _exit(0);
    }
    close(pipes[1]);
    while ((n = read(pipes[0], buffer, sizeof buffer)) > 0) said.append(buffer, (size_t)n);
    close(pipes[0]);
    waitpid(child, &status, 0);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return 0;
    if (said.find(text) != std::string::npos) return 1;
    printf("  %s\n", said.substr(0, 300).c_str());
    return 2;
}

/* Launches at once with host arguments that stand in device memory. */
template <class... P, class... A>
static void run(void (*kernel)(P...), unsigned grid, unsigned threads, A... a) {
    CHECK_INT(cudasim::launch(kernel, grid, threads, 0, NULL, a...), cudaSuccess);
    CHECK_INT(cudaDeviceSynchronize(), cudaSuccess);
}

/* Is out[0, n) the same in the three schedules? */
template <class F> bool same_in_all(float *out, int n, F f) {
    std::vector<float> first;
    bool same = true;
    for (int s = 0; s < 3; s++) {
        cudasim::schedule = (cudasim::Schedule)s;
        memset(out, 0xFF, (size_t)n * sizeof *out);
        f();
        if (s == 0) first.assign(out, out + n);
        else same = same && memcmp(first.data(), out, (size_t)n * sizeof *out) == 0;
    }
    cudasim::schedule = cudasim::forward;
    return same;
}

/* --- barriers and shared memory ---------------------------------------------------------- */

template <bool fault> void turn(float *out) {
    SHARED(float, s, 64);
    s[threadIdx.x] = (float)threadIdx.x;
    if (!fault) __syncthreads();
    out[threadIdx.x] = s[63 - threadIdx.x];
}
static void missing_barrier(void) {
    float *out = (float *)device(64 * sizeof(float));
    CHECK(same_in_all(out, 64, [&] { run(turn<false>, 1, 64, out); }));
    CHECK(out[0] == 63.0f);
    CHECK(!same_in_all(out, 64, [&] { run(turn<true>, 1, 64, out); }));
    cudaFree(out);
}

/* One barrier a round suffices for two buffers, not for one: a warp that runs ahead writes the
 * next round's number before the others have read this one's. */
template <bool fault> void rounds(float *out) {
    SHARED(float, s, 2 * 4);
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    float sum = 0.0f;
    for (int i = 0; i < 5; i++) {
        float *part = s + (fault ? 0 : i % 2 * 4), v;
        if (lane == 0) part[warp] = (float)(10 * i + warp);
        __syncthreads();
        v = lane < 4 ? part[lane] : 0.0f;
        for (int k = 16; k; k /= 2) v += __shfl_xor_sync(0xFFFFFFFFu, v, k);
        sum += v;
    }
    out[threadIdx.x] = sum;
}
static void double_buffer(void) {
    float *out = (float *)device(128 * sizeof(float));
    CHECK(same_in_all(out, 128, [&] { run(rounds<false>, 1, 128, out); }));
    CHECK(out[0] == 430.0f && out[127] == 430.0f);
    CHECK(!same_in_all(out, 128, [&] { run(rounds<true>, 1, 128, out); }));
    cudaFree(out);
}

template <bool fault> void overrun(float *out) {
    SHARED(float, s, 33);
    s[threadIdx.x + (fault ? 2 : 1)] = 1.0f;
    __syncthreads();
    out[threadIdx.x] = s[threadIdx.x + 1];
}
static void shared_overrun(void) {
    float *out = (float *)device(32 * sizeof(float));
    run(overrun<false>, 1, 32, out);
    CHECK_INT(dies("heap-buffer-overflow", [&] { run(overrun<true>, 1, 32, out); }), 1);
    cudaFree(out);
}

template <bool fault> void unset(float *out) {
    SHARED(float, s, 32);
    if (!fault || threadIdx.x) s[threadIdx.x] = 1.0f;
    __syncthreads();
    out[threadIdx.x] = s[threadIdx.x];
}
static void uninitialised_shared(void) {
    float *out = (float *)device(32 * sizeof(float));
    run(unset<false>, 1, 32, out);
    CHECK(out[0] == 1.0f);
    run(unset<true>, 1, 32, out);
    CHECK((cudasim::bad_pointer(0), std::isnan(out[0])));
    cudaFree(out);
}

template <bool fault> void half_barrier(float *out) {
    if (fault && threadIdx.x < 16) { __syncthreads(); out[threadIdx.x] = 1.0f; }
    else { __syncthreads(); out[threadIdx.x] = 2.0f; }
}
static void divergent_barrier(void) {
    float *out = (float *)device(32 * sizeof(float));
    run(half_barrier<false>, 1, 32, out);
    CHECK_INT(dies("divergent barrier", [&] { run(half_barrier<true>, 1, 32, out); }), 1);
    cudaFree(out);
}

void votes(int *out) {
    int i = (int)threadIdx.x, n = __syncthreads_count(i % 3 == 0);
    out[i] = n + 1000 * __syncthreads_or(i == 63) + 2000 * __syncthreads_and(i < 64) +
             4000 * __syncthreads_and(i < 63);
}
static void voting_barriers(void) {
    int *out = (int *)device(64 * sizeof(int));
    run(votes, 1, 64, out);
    for (int i = 0; i < 64; i++) CHECK_INT(out[i], 22 + 3000);
    cudaFree(out);
}

/* --- warps ------------------------------------------------------------------------------- */

template <int fault> void warp_sum(float *out) {
    float v = (float)threadIdx.x;
    if (fault == 1 && threadIdx.x == 5) return;
    if (fault == 2 && threadIdx.x % 2) { out[threadIdx.x] = 0.0f; __syncwarp(); }
    for (int k = 16; k; k /= 2)
        v += __shfl_xor_sync(fault == 3 ? 0xFFFFu : 0xFFFFFFFFu, v, k);
    out[threadIdx.x] = v;
}
static void collectives(void) {
    float *out = (float *)device(64 * sizeof(float));
    run(warp_sum<0>, 1, 32, out);
    CHECK(out[0] == 496.0f && out[31] == 496.0f);
    CHECK_INT(dies("exit", [&] { run(warp_sum<1>, 1, 32, out); }), 1);
    CHECK_INT(dies("lanes of one warp", [&] { run(warp_sum<2>, 1, 32, out); }), 1);
    CHECK_INT(dies("not in", [&] { run(warp_sum<3>, 1, 32, out); }), 1);
    CHECK_INT(dies("do not exist", [&] { run(warp_sum<0>, 1, 48, out); }), 1);
    cudaFree(out);
}

/* Each half of the warp by itself, then both. */
void halves(float *out) {
    unsigned mask = threadIdx.x < 16 ? 0xFFFFu : 0xFFFF0000u;
    int v = __shfl_down_sync(mask, (int)threadIdx.x, 1, 16);
    unsigned odd = __ballot_sync(0xFFFFFFFFu, threadIdx.x % 2);
    v += __shfl_up_sync(0xFFFFFFFFu, 100 * (int)threadIdx.x, 1);
    out[threadIdx.x] = (float)(v + (odd == 0xAAAAAAAAu && __any_sync(mask, 1) ? 10000 : 0));
}
static void masks(void) {
    float *out = (float *)device(32 * sizeof(float));
    CHECK(same_in_all(out, 32, [&] { run(halves, 1, 32, out); }));
    CHECK(out[0] == 10001.0f && out[15] == 11415.0f && out[16] == 11517.0f);
    cudaFree(out);
}

/* Odd lanes leave for a barrier that the others never reach: a hang. */
template <bool fault> void hang(float *out) {
    if (fault && threadIdx.x == 0)
        while (__shfl_sync(1u, 1, 0) && *out == 0.0f) __syncthreads();
    else if (fault) __syncwarp(0xFFFFFFFEu);
    if (fault && threadIdx.x) __syncwarp();
    out[threadIdx.x] = 0.0f;
}
static void deadlock(void) {
    float *out = (float *)device(32 * sizeof(float));
    run(hang<false>, 1, 32, out);
    CHECK_INT(dies("deadlock", [&] { run(hang<true>, 1, 32, out); }), 1);
    cudaFree(out);
}

/* --- indexes, memory --------------------------------------------------------------------- */

/* 64 x 1024 x 50304 elements; only the index is computed. */
template <bool fault> void far_index(int64_t *out, int rows, int cols) {
    int64_t at = fault ? (int64_t)((rows - 1) * cols + (int)threadIdx.x)
                       : (int64_t)(rows - 1) * cols + threadIdx.x;
    out[threadIdx.x] = at;
}
static void index_overflow(void) {
    int64_t *out = (int64_t *)device(32 * sizeof(int64_t));
    run(far_index<false>, 1, 32, out, 65536, 50304);
    CHECK_INT(out[0], 65535ll * 50304);
    CHECK_INT(dies("signed integer overflow", [&] {
        run(far_index<true>, 1, 32, out, 65536, 50304);
    }), 1);
    cudaFree(out);
}

template <bool fault> void tail(float *out, int n) {
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (fault ? i <= n : i < n) out[i] = 1.0f;
}
static void global_overrun(void) {
    float *out = (float *)device(33 * sizeof(float));
    run(tail<false>, 2, 32, out, 33);
    CHECK_INT(dies("heap-buffer-overflow", [&] { run(tail<true>, 2, 32, out, 33); }), 1);
    cudaFree(out);
}

void wide_load(float *out, const float *in, int from) {
    const float4 *v = (const float4 *)(const void *)(in + from);    /* clang asks at a member */
    if (threadIdx.x == 0) *out = v->x + v->w;
}
static void misaligned(void) {
    float *out = (float *)device(sizeof(float)), *in = (float *)device(8 * sizeof(float));
    run(wide_load, 1, 32, out, in, 4);
    CHECK_INT(dies("misaligned", [&] { run(wide_load, 1, 32, out, in, 1); }), 1);
    cudaFree(out);
    cudaFree(in);
}

/* A sum over blocks: in fixed order by the last block, or by float atomics. */
template <bool fault> void total(float *out, float *part, unsigned *arrived) {
    SHARED(int, last, 1);
    float mine = 1.0f / (1.0f + (float)(blockIdx.x * 32 + threadIdx.x));
    if (fault) { atomicAdd(out, mine); return; }
    for (int k = 16; k; k /= 2) mine += __shfl_xor_sync(0xFFFFFFFFu, mine, k);
    if (threadIdx.x == 0) {
        part[blockIdx.x] = mine;
        __threadfence();
        last[0] = atomicInc(arrived, gridDim.x - 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (!last[0] || threadIdx.x) return;
    *out = 0.0f;
    for (unsigned i = 0; i < gridDim.x; i++) *out += __ldcg(part + i);
}
static void float_atomics(void) {
    float *out = (float *)device(sizeof(float)), *part = (float *)device(9 * sizeof(float));
    unsigned *arrived = (unsigned *)device(sizeof(unsigned));
    *arrived = 0;
    CHECK(same_in_all(out, 1, [&] { run(total<false>, 9, 32, out, part, arrived); }));
    CHECK(!same_in_all(out, 1, [&] { *out = 0.0f; run(total<true>, 9, 32, out, part, arrived); }));
    cudaFree(out);
    cudaFree(part);
    cudaFree(arrived);
}

static void bad_pointers(void) {
    std::vector<float> host(32);
    float *gone = (float *)device(32 * sizeof(float)), *out = (float *)device(32 * sizeof(float));
    cudaFree(gone);
    CHECK_INT(dies("host pointer", [&] { run(turn<false>, 1, 32, host.data()); }), 1);
    CHECK_INT(dies("host pointer", [&] { run(turn<false>, 1, 32, gone); }), 1);
    CHECK_INT(cudaMemcpyAsync(host.data(), out, 4, cudaMemcpyHostToDevice, NULL),
              cudaErrorInvalidValue);
    CHECK_INT(cudaMemcpyAsync(gone, out, 4, cudaMemcpyDeviceToDevice, NULL), cudaErrorInvalidValue);
    CHECK_INT(cudaMemcpyAsync(host.data(), out, 200, cudaMemcpyDeviceToHost, NULL),
              cudaErrorInvalidValue);
    CHECK_INT(cudaGetLastError(), cudaErrorInvalidValue);
    CHECK_INT(cudaGetLastError(), cudaSuccess);
    CHECK_INT(dies("sticky", [&] {
        cudasim::pointers_abort = false;
        cudasim::launch(turn<false>, 1, 32, 0, NULL, host.data());
        if (cudaDeviceSynchronize() == cudaErrorIllegalAddress &&
            cudaGetLastError() == cudaErrorIllegalAddress &&
            cudaGetLastError() == cudaErrorIllegalAddress) cudasim::fatal("sticky");
    }), 1);
    cudaFree(out);
}

/* --- matrix instructions, asynchronous copies -------------------------------------------- */

template <bool bf16> void multiply(float *d, const uint16_t *a, const uint16_t *b) {
    SHARED(uint16_t, s, 16 * 16 + 16 * 8);
    uint32_t x[4], y[2];
    float sum[4] = { 0, 0, 0, 0 };
    int l = (int)threadIdx.x;
    for (int i = l; i < 256; i += 32) s[i] = a[i];
    for (int i = l; i < 128; i += 32) s[256 + i] = b[i];
    __syncthreads();
    cudasim::ldmatrix<4, false>(x, s + (l % 16) * 16 + l / 16 * 8);
    cudasim::ldmatrix<2, true>(y, s + 256 + l % 16 * 8);
    cudasim::mma_m16n8k16(sum, x, y, bf16);
    for (int i = 0; i < 4; i++) d[(l / 4 + i / 2 * 8) * 8 + l % 4 * 2 + i % 2] = sum[i];
}
template <bool bf16> static void product_of_small_integers(void) {
    uint16_t *a = (uint16_t *)device(512), *b = (uint16_t *)device(256);
    float *d = (float *)device(128 * sizeof(float)), A[256], B[128];
    for (int i = 0; i < 256; i++) {
        __half h = __float2half_rn(A[i] = (float)(i * 7 % 13 - 6));
        __nv_bfloat16 g = __float2bfloat16_rn(A[i]);
        memcpy(a + i, bf16 ? (void *)&g : (void *)&h, 2);
    }
    for (int i = 0; i < 128; i++) {
        __half h = __float2half_rn(B[i] = (float)(i * 5 % 11 - 5));
        __nv_bfloat16 g = __float2bfloat16_rn(B[i]);
        memcpy(b + i, bf16 ? (void *)&g : (void *)&h, 2);
    }
    run(multiply<bf16>, 1, 32, d, a, b);
    for (int i = 0; i < 128; i++) {
        float want = 0.0f;
        for (int k = 0; k < 16; k++) want += A[i / 8 * 16 + k] * B[k * 8 + i % 8];
        CHECK(d[i] == want);
    }
    cudaFree(a);
    cudaFree(b);
    cudaFree(d);
}
static void tensor_cores(void) {
    product_of_small_integers<true>();
    product_of_small_integers<false>();
}

template <bool fault> void pipeline(float *out, const float *in) {
    SHARED(float, s, 2 * 128);
    int l = (int)threadIdx.x;
    float sum = 0.0f;
    cudasim::cp_async(s + 4 * l, in + 4 * l, 16, 16);
    cudasim::cp_async_commit();
    for (int i = 0; i < 3; i++) {
        if (i < 2) cudasim::cp_async(s + (i + 1) % 2 * 128 + 4 * l, in + (i + 1) * 128 + 4 * l, 16,
                                     l == 31 ? 8 : 16);
        cudasim::cp_async_commit();
        cudasim::cp_async_wait(fault ? 2 : 1);
        __syncthreads();
        sum += s[i % 2 * 128 + (127 - l)];
        __syncthreads();
    }
    cudasim::cp_async_wait(0);
    out[l] = sum;
}
static void asynchronous_copies(void) {
    float *in = (float *)device(384 * sizeof(float)), *out = (float *)device(32 * sizeof(float));
    for (int i = 0; i < 384; i++) in[i] = (float)i;
    CHECK(same_in_all(out, 32, [&] { run(pipeline<false>, 1, 32, out, in); }));
    CHECK(out[0] == 127.0f && out[2] == 125.0f + 253.0f + 381.0f);  /* the rest of a copy is 0 */
    run(pipeline<true>, 1, 32, out, in);
    CHECK(std::isnan(out[2]));
    cudaFree(in);
    cudaFree(out);
}

template <bool fault> void leaves_early(float *out, const float *in) {
    SHARED(float, s, 128);
    cudasim::cp_async(s + 4 * threadIdx.x, in, 16, 16);
    cudasim::cp_async_commit();
    if (!fault) cudasim::cp_async_wait(0);
    out[threadIdx.x] = 1.0f;
}
static void copies_left(void) {
    float *in = (float *)device(16), *out = (float *)device(32 * sizeof(float));
    run(leaves_early<false>, 1, 32, out, in);
    CHECK_INT(dies("copies of its are under way", [&] {
        run(leaves_early<true>, 1, 32, out, in);
    }), 1);
    cudaFree(in);
    cudaFree(out);
}

/* Tensor cores keep 24 bits of the largest term, and cut off; towards 0, whatever the sign. */
static void sums_cut_off(void) {
    const double small[4] = { 1.0, 0x1p-24, 0x1p-24, 0x1p-24 }, pair[2] = { 0x1p-23, 0x1p-24 };
    const double inf[2] = { INFINITY, 1.0 }, none[2] = { INFINITY, -INFINITY };
    CHECK(cudasim::cut_sum(0.0f, small, 4) == 1.0f);
    CHECK(cudasim::cut_sum(1.0f, pair, 2) == 1.0f + 0x1p-23f);
    CHECK(cudasim::cut_sum(-1.0f, pair, 2) == -(1.0f - 0x1p-23f));
    CHECK(cudasim::cut_sum(3.0f, small + 1, 3) == 3.0f);
    CHECK(cudasim::cut_sum(1.0f, inf, 2) == INFINITY);
    CHECK(std::isnan(cudasim::cut_sum(0.0f, none, 2)));
}

/* --- the runtime ------------------------------------------------------------------------- */

void add_one(float *p) { p[threadIdx.x] += 1.0f; }
void touch_dynamic(float *p)
{ ((char *)cudasim::dynamic_shared())[0] = 1; if (threadIdx.x == 0) *p = 1.0f; }

static void launch_limits(void) {
    float *p = (float *)device(4);
    CHECK_INT(cudasim::launch(add_one, 1, 1025, 0, NULL, p), cudaErrorInvalidConfiguration);
    CHECK_INT(cudasim::launch(add_one, dim3(1, 65536), 32, 0, NULL, p),
              cudaErrorInvalidConfiguration);
    CHECK_INT(cudasim::launch(add_one, 0, 32, 0, NULL, p), cudaErrorInvalidConfiguration);
    CHECK_INT(cudasim::launch(touch_dynamic, 1, 32, 50000, NULL, p), cudaErrorInvalidValue);
    CHECK_INT(cudaFuncSetAttribute((const void *)touch_dynamic,
        cudaFuncAttributeMaxDynamicSharedMemorySize, 50000), cudaSuccess);
    CHECK_INT(cudasim::launch(touch_dynamic, 1, 32, 50000, NULL, p), cudaSuccess);
    CHECK_INT(cudaFuncSetAttribute((const void *)touch_dynamic,
        cudaFuncAttributeMaxDynamicSharedMemorySize, 228 * 1024), cudaErrorInvalidValue);
    cudaDeviceSynchronize();
    cudaGetLastError();
    cudaFree(p);
}

static void streams_and_captures(void) {
    cudaStream_t s, blocking;
    cudaEvent_t e;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    float *p = (float *)device(32 * sizeof(float));
    void *q;
    for (int i = 0; i < 32; i++) p[i] = 0.0f;
    cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking);
    cudaStreamCreate(&blocking);
    cudaEventCreateWithFlags(&e, cudaEventDisableTiming);
    cudasim::launch(add_one, 1, 32, 0, s, p);
    CHECK(p[0] == 0.0f);                    /* nobody has waited                              */
    cudaStreamSynchronize(s);
    CHECK(p[0] == 1.0f);
    for (int forbidden = 0; forbidden < 5; forbidden++) {
        cudaStream_t to = forbidden == 4 ? blocking : s;
        cudaStreamBeginCapture(to, cudaStreamCaptureModeThreadLocal);
        CHECK_INT(cudasim::launch(add_one, 1, 32, 0, to, p), cudaSuccess);
        if (forbidden == 1) CHECK_INT(cudaStreamSynchronize(s), cudaErrorStreamCaptureUnsupported);
        if (forbidden == 2) CHECK_INT(cudaMalloc(&q, 4), cudaErrorStreamCaptureUnsupported);
        if (forbidden == 3) CHECK_INT(cudaEventQuery(e), cudaErrorStreamCaptureUnsupported);
        if (forbidden == 4) CHECK_INT(cudasim::launch(add_one, 1, 32, 0, NULL, p),
                                      cudaErrorStreamCaptureImplicit);
        CHECK_INT(cudaStreamEndCapture(to, &graph), forbidden ? cudaErrorStreamCaptureInvalidated
                                                             : cudaSuccess);
        if (forbidden) continue;
        cudaGraphInstantiate(&exec, graph, 0ull);
        cudaGraphDestroy(graph);
        cudaStreamSynchronize(s);
        CHECK(p[0] == 1.0f);                /* recorded, not run                              */
        cudaGraphLaunch(exec, s);
        cudaGraphLaunch(exec, s);
        cudaStreamSynchronize(s);
        CHECK(p[0] == 3.0f);
        cudaGraphExecDestroy(exec);
    }
    cudaGetLastError();
    cudaEventDestroy(e);
    cudaStreamDestroy(s);
    cudaStreamDestroy(blocking);
    CHECK_INT(cudasim::launch(add_one, 1, 32, 0, s, p), cudaErrorInvalidResourceHandle);
    cudaGetLastError();
    cudaFree(p);
}

/* y = x, or x = y, a number each. */
void move_one(float *to, const float *from) { *to = *from; }
static float one_at(const float *p) {
    float x = 0.0f;
    cudaMemcpy(&x, p, sizeof x, cudaMemcpyDeviceToHost);
    return x;
}

/* Work on the legacy stream and on a blocking one waits for each other, in the order of the calls;
 * a non-blocking one waits for nobody, and nobody for it. */
static void implicit_order(void) {
    float *p = (float *)device(8), *q = (float *)device(8), start[2] = { 3.0f, 4.0f };
    for (int blocking = 0; blocking < 2; blocking++) {
        cudaStream_t s;
        cudaStreamCreateWithFlags(&s, blocking ? cudaStreamDefault : cudaStreamNonBlocking);
        for (int legacy_first = 0; legacy_first < 2; legacy_first++) {
            cudaStream_t first = legacy_first ? NULL : s, second = legacy_first ? s : NULL;
            cudaMemcpy(p, &start[0], 4, cudaMemcpyHostToDevice);
            cudaMemcpy(q, &start[1], 4, cudaMemcpyHostToDevice);
            cudasim::launch(move_one, 1, 1, 0, first, p, (const float *)q);     /* p = 4 */
            cudasim::launch(move_one, 1, 1, 0, second, q, (const float *)p);    /* q = p */
            cudaStreamSynchronize(second);
            if (blocking) CHECK(one_at(q) == 4.0f);
            else if (!legacy_first) CHECK(one_at(q) == 3.0f);
            cudaDeviceSynchronize();
        }
        cudaStreamDestroy(s);
    }
    cudaFree(p);
    cudaFree(q);
}

/* What is asked of an event that has not come leaves an error behind, and one that was recorded in
 * a capture cannot be asked. */
static void events(void) {
    cudaStream_t s;
    cudaEvent_t e;
    cudaGraph_t graph;
    float *p = (float *)device(128);
    cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking);
    cudaEventCreateWithFlags(&e, cudaEventDisableTiming);
    for (int i = 0; i < 3; i++) cudasim::launch(add_one, 1, 32, 0, s, p);
    cudaEventRecord(e, s);
    CHECK_INT(cudaEventQuery(e), cudaErrorNotReady);
    CHECK_INT(cudaGetLastError(), cudaErrorNotReady);
    CHECK_INT(cudaEventSynchronize(e), cudaSuccess);
    CHECK_INT(cudaEventQuery(e), cudaSuccess);
    CHECK_INT(cudaGetLastError(), cudaSuccess);
    cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal);
    CHECK_INT(cudaEventRecord(e, s), cudaSuccess);
    CHECK_INT(cudaStreamEndCapture(s, &graph), cudaSuccess);
    CHECK_INT(cudaEventQuery(e), cudaErrorCapturedEvent);
    CHECK_INT(cudaEventSynchronize(e), cudaErrorCapturedEvent);
    CHECK_INT(cudaGetLastError(), cudaErrorCapturedEvent);
    cudaGraphDestroy(graph);
    cudaEventDestroy(e);
    cudaStreamDestroy(s);
    cudaFree(p);
}

/* An allocation within a capture, when the thread has relaxed what captures forbid. */
static void relaxed_captures(void) {
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cudaStream_t s;
    cudaGraph_t graph;
    void *p = NULL;
    cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking);
    cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal);
    CHECK_INT(cudaThreadExchangeStreamCaptureMode(&mode), cudaSuccess);
    CHECK_INT(cudaMalloc(&p, 4), cudaSuccess);
    CHECK_INT(cudaThreadExchangeStreamCaptureMode(&mode), cudaSuccess);
    CHECK_INT(mode, cudaStreamCaptureModeRelaxed);
    CHECK_INT(cudaStreamEndCapture(s, &graph), cudaSuccess);
    cudaGraphDestroy(graph);
    cudaFree(p);
    cudaStreamDestroy(s);
}

/* The device is not waited for in a capture, relaxed or not; old drivers load no kernel there. */
static void forbidden_in_captures(void) {
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cudaFuncAttributes about;
    cudaStream_t s;
    cudaGraph_t graph;
    float *p = (float *)device(128);
    cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking);
    cudaThreadExchangeStreamCaptureMode(&mode);
    cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal);
    CHECK_INT(cudaDeviceSynchronize(), cudaErrorStreamCaptureUnsupported);
    CHECK_INT(cudaStreamEndCapture(s, &graph), cudaErrorStreamCaptureInvalidated);
    cudaThreadExchangeStreamCaptureMode(&mode);
    cudasim::machine().loaded.clear();
    cudasim::old_loader = true;
    for (int loaded = 0; loaded < 2; loaded++) {
        if (loaded) CHECK_INT(cudaFuncGetAttributes(&about, (const void *)add_one), cudaSuccess);
        cudasim::machine().loaded.erase({ 0, loaded ? NULL : (const void *)add_one });
        cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal);
        CHECK_INT(cudasim::launch(add_one, 1, 32, 0, s, p),
                  loaded ? cudaSuccess : cudaErrorStreamCaptureUnsupported);
        CHECK_INT(cudaStreamEndCapture(s, &graph),
                  loaded ? cudaSuccess : cudaErrorStreamCaptureInvalidated);
        if (loaded) cudaGraphDestroy(graph);
    }
    cudasim::old_loader = false;
    cudaGetLastError();
    cudaStreamDestroy(s);
    cudaFree(p);
}

/* Memory, events and what a kernel may have belong to one GPU. */
static void other_gpus(void) {
    cudaEvent_t e;
    float *p = (float *)device(128);
    CHECK_INT(cudaEventCreateWithFlags(&e, cudaEventDisableTiming), cudaSuccess);
    CHECK_INT(cudaFuncSetAttribute((const void *)touch_dynamic,
        cudaFuncAttributeMaxDynamicSharedMemorySize, 50000), cudaSuccess);
    cudasim::devices = 2;
    CHECK_INT(cudaSetDevice(1), cudaSuccess);
    float *q = (float *)device(128);
    CHECK_INT(cudaEventRecord(e, NULL), cudaErrorInvalidResourceHandle);
    CHECK_INT(cudasim::launch(touch_dynamic, 1, 32, 50000, NULL, q), cudaErrorInvalidValue);
    CHECK_INT(dies("host pointer", [&] { run(add_one, 1, 32, p); }), 1);
    run(add_one, 1, 32, q);
    cudaFree(q);
    CHECK_INT(cudaSetDevice(0), cudaSuccess);
    cudasim::devices = 1;
    cudaGetLastError();
    cudaEventDestroy(e);
    cudaFree(p);
}

/* Pinned memory is the host's in the eyes of a copy; a context is made by what needs one. */
static void kinds_and_contexts(void) {
    void *pinned, *p = device(16), *found;
    int host = 0, active;
    unsigned flags;
    cudaDriverEntryPointQueryResult how;
    CHECK_INT(cudaHostAlloc(&pinned, 16, cudaHostAllocDefault), cudaSuccess);
    CHECK_INT(cudaMemcpyAsync(p, pinned, 16, cudaMemcpyDeviceToDevice, NULL), cudaErrorInvalidValue);
    CHECK_INT(cudaMemcpyAsync(p, pinned, 16, cudaMemcpyHostToDevice, NULL), cudaSuccess);
    CHECK_INT(cudaMemcpyAsync(p, p, 4, cudaMemcpyHostToDevice, NULL), cudaErrorInvalidValue);
    CHECK_INT(cudaMemcpyAsync(p, pinned, 16, cudaMemcpyDefault, NULL), cudaSuccess);
    CHECK_INT(cudaMemcpyAsync(p, &host, 4, cudaMemcpyDefault, NULL), cudaSuccess);
    cudaDeviceSynchronize();
    cudaGetLastError();
    cudasim::devices = 3;
    cudasim::machine().contexts.clear();
    CHECK_INT(cudaGetDriverEntryPointByVersion("cuDevicePrimaryCtxGetState", &found, 7000,
                                               cudaEnableDefault, &how), cudaSuccess);
    CHECK_INT(how, cudaDriverEntryPointSuccess);
    for (int d = 0; d < 3; d++) {
        ((int (*)(int, unsigned *, int *))found)(d, &flags, &active);
        CHECK_INT(active, 0);
        if (d) CHECK_INT(cudaSetDevice(d), cudaSuccess);
        ((int (*)(int, unsigned *, int *))found)(d, &flags, &active);
        CHECK_INT(active, d > 0);
    }
    cudasim::machine().device = 0;
    cudasim::devices = 1;
    cudaFreeHost(pinned);
    cudaFree(p);
}

static void failures(void) {
    void *p = NULL;
    long before = cudasim::leaks();
    cudasim::fail_at = 2;
    CHECK_INT(cudaMalloc(&p, 4), cudaSuccess);
    CHECK_INT(cudasim::leaks(), before + 1);
    cudaFree(p);
    CHECK_INT(cudaMalloc(&p, 4), cudaErrorMemoryAllocation);
    CHECK(p == NULL);
    CHECK_INT(cudaMalloc(&p, 4), cudaSuccess);
    cudaFree(p);
    CHECK_INT(cudasim::leaks(), before);
    cudaGetLastError();
}

/* --- cuBLASLt ----------------------------------------------------------------------------- */

/* c = a b of 2 x 3 by 3 x 2 column-major, f32; returns what cublasLtMatmul says. */
static cublasStatus_t product(int64_t lda, uint32_t alignment, int shift, size_t room, float *c) {
    cublasLtHandle_t lt;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t A, B, C;
    cublasLtMatmulPreference_t prefers;
    cublasLtMatmulHeuristicResult_t found[4];
    int n = 0;
    float one = 1.0f, zero = 0.0f, *a = (float *)device(64), *b = (float *)device(64);
    uint64_t room64 = room;
    void *workspace = device(4u << 20);
    for (int i = 0; i < 16; i++) { a[i] = (float)(i - shift); b[i] = (float)i; }
    cublasLtCreate(&lt);
    cublasLtMatmulDescCreate(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    cublasLtMatrixLayoutCreate(&A, CUDA_R_32F, 2, 3, lda);
    cublasLtMatrixLayoutCreate(&B, CUDA_R_32F, 3, 2, 3);
    cublasLtMatrixLayoutCreate(&C, CUDA_R_32F, 2, 2, 2);
    cublasLtMatmulPreferenceCreate(&prefers);
    cublasLtMatmulPreferenceSetAttribute(prefers, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &room64,
                                         sizeof room64);
    cublasLtMatmulPreferenceSetAttribute(prefers, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
                                         &alignment, sizeof alignment);
    cublasStatus_t r = cublasLtMatmulAlgoGetHeuristic(lt, desc, A, B, C, C, prefers, 4, found, &n);
    if (r == CUBLAS_STATUS_SUCCESS)
        r = cublasLtMatmul(lt, desc, &one, a + shift, A, b, B, &zero, c, C, c, C, &found[0].algo,
                           workspace, 64u << 10, NULL);
    cudaDeviceSynchronize();
    cublasLtMatmulPreferenceDestroy(prefers);
    cublasLtMatrixLayoutDestroy(A);
    cublasLtMatrixLayoutDestroy(B);
    cublasLtMatrixLayoutDestroy(C);
    cublasLtMatmulDescDestroy(desc);
    cublasLtDestroy(lt);
    cudaFree(workspace);
    cudaFree(a);
    cudaFree(b);
    return r;
}
/* An attribute's value has one size; a bias promises its alignment. */
static void attributes(void) {
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t A;
    cublasLtMatmulPreference_t prefers;
    cublasLtMatmulHeuristicResult_t found;
    cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
    int64_t wide = 1;
    int n = 0;
    float one = 1.0f, zero = 0.0f, *a = (float *)device(64), *bias = (float *)device(64);
    float *workspace = (float *)device(1024);
    const void *at = bias;
    cublasLtMatmulDescCreate(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    cublasLtMatrixLayoutCreate(&A, CUDA_R_32F, 2, 2, 2);
    cublasLtMatmulPreferenceCreate(&prefers);
    CHECK_INT(cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_TRANSA, &wide, 8),
              CUBLAS_STATUS_INVALID_VALUE);
    CHECK_INT(cublasLtMatrixLayoutSetAttribute(A, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &wide, 8),
              CUBLAS_STATUS_INVALID_VALUE);
    CHECK_INT(cublasLtMatmulPreferenceSetAttribute(prefers,
        CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &wide, 4), CUBLAS_STATUS_INVALID_VALUE);
    CHECK_INT(cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, 4),
              CUBLAS_STATUS_SUCCESS);
    CHECK_INT(cublasLtMatmulAlgoGetHeuristic(NULL, desc, A, A, A, A, prefers, 1, &found, &n),
              CUBLAS_STATUS_INVALID_VALUE);                         /* no bias */
    for (int off = 0; off < 2; off++) {
        cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &at, 8);
        if (!off) CHECK_INT(cublasLtMatmulAlgoGetHeuristic(NULL, desc, A, A, A, A, prefers, 1,
                                                           &found, &n), CUBLAS_STATUS_SUCCESS);
        CHECK_INT(cublasLtMatmul(NULL, desc, &one, a, A, a, A, &zero, a, A, a, A, &found.algo,
                                 workspace, 1024, NULL), off ? CUBLAS_STATUS_NOT_SUPPORTED
                                                             : CUBLAS_STATUS_SUCCESS);
        at = bias + 4;
    }
    cudaDeviceSynchronize();
    cublasLtMatmulPreferenceDestroy(prefers);
    cublasLtMatrixLayoutDestroy(A);
    cublasLtMatmulDescDestroy(desc);
    cudaFree(a);
    cudaFree(bias);
    cudaFree(workspace);
}

static void products(void) {
    float *c = (float *)device(256);
    CHECK_INT(product(2, 16, 0, 64u << 10, c), CUBLAS_STATUS_SUCCESS);
    CHECK(c[0] == 10.0f && c[1] == 13.0f && c[2] == 28.0f && c[3] == 40.0f);
    CHECK_INT(product(1, 16, 0, 0, c), CUBLAS_STATUS_INVALID_VALUE);            /* leading dim. */
    CHECK_INT(product(2, 16, 1, 0, c), CUBLAS_STATUS_NOT_SUPPORTED);            /* alignment    */
    CHECK_INT(product(2, 4, 1, 0, c), CUBLAS_STATUS_SUCCESS);
    cudasim::unaligned_algorithms = false;
    CHECK_INT(product(2, 4, 1, 0, c), CUBLAS_STATUS_NOT_SUPPORTED);
    cudasim::unaligned_algorithms = true;
    cudasim::refused_products = 1;
    CHECK_INT(product(2, 16, 0, 64u << 10, c), CUBLAS_STATUS_NOT_SUPPORTED);
    CHECK_INT(product(2, 16, 0, 64u << 10, c), CUBLAS_STATUS_SUCCESS);
    CHECK_INT(product(2, 16, 0, 4u << 20, c), CUBLAS_STATUS_INVALID_VALUE);     /* workspace    */
    cudaFree(c);
}

/* Scales outside of the matrix must be 0, by cuBLAS's documentation. */
static void padded_scales(void) {
    unsigned char scales[512] = { 0 };
    for (int at = 0; at < 256; at++) scales[at] = at % 16 < 2 ? 127 : 0;   /* 16 outers, 2 blocks */
    const cudasim::Operand A = { NULL, scales, CUDA_R_8F_E4M3, cudasim::by_32, true, 16, 64, 64 };
    CHECK_INT(dies("padding", [&] { cudasim::scale_values(A); }), 0);
    CHECK(cudasim::scale_values(A) == std::vector<double>(32, 1.0));
    for (int at : { 2, 4, 256, 511 }) {
        scales[at] = 1;
        CHECK_INT(dies("padding", [&] { cudasim::scale_values(A); }), 1);
        scales[at] = 0;
    }
}

/* What cudaMalloc gives is the GPU's alone: kernels and copies see it, the host does not. */
template <bool fault> void fill_out(float *out) { out[threadIdx.x + (fault ? 1 : 0)] = (float)threadIdx.x; }
static void hidden_memory(void) {
    float host[32];
    cudasim::host_sees_device = false;
    float *out = (float *)device(32 * sizeof(float)), *again;
    cudasim::host_sees_device = true;
    run(fill_out<false>, 1, 32, out);
    CHECK_INT(cudaMemcpy(host, out, sizeof host, cudaMemcpyDeviceToHost), cudaSuccess);
    CHECK(host[31] == 31.0f);
    CHECK_INT(dies("the host touches device memory", [&] { host[0] = *(volatile float *)out; }), 1);
    CHECK_INT(dies("the host touches device memory", [&] { *(volatile float *)out = 1.0f; }), 1);
    CHECK_INT(dies("poison", [&] { run(fill_out<true>, 1, 32, out); }), 1);
    cudaFree(out);
    CHECK_INT(dies("host pointer", [&] { run(fill_out<false>, 1, 32, out); }), 1);
    cudasim::host_sees_device = false;
    again = (float *)device(32 * sizeof(float));
    cudasim::host_sees_device = true;
    CHECK(again == out);                    /* filled anew */
    CHECK_INT(cudaMemcpy(host, again, sizeof host, cudaMemcpyDeviceToHost), cudaSuccess);
    CHECK(std::isnan(host[0]) && std::isnan(host[31]));
    cudaFree(again);
}

int main(void) {
    RUN(missing_barrier);
    RUN(double_buffer);
    RUN(shared_overrun);
    RUN(uninitialised_shared);
    RUN(divergent_barrier);
    RUN(voting_barriers);
    RUN(collectives);
    RUN(masks);
    RUN(deadlock);
    RUN(index_overflow);
    RUN(global_overrun);
    RUN(misaligned);
    RUN(float_atomics);
    RUN(bad_pointers);
    RUN(hidden_memory);
    RUN(tensor_cores);
    RUN(asynchronous_copies);
    RUN(copies_left);
    RUN(sums_cut_off);
    RUN(launch_limits);
    RUN(streams_and_captures);
    RUN(implicit_order);
    RUN(events);
    RUN(relaxed_captures);
    RUN(forbidden_in_captures);
    RUN(other_gpus);
    RUN(kinds_and_contexts);
    RUN(failures);
    RUN(attributes);
    RUN(products);
    RUN(padded_scales);
    return test_report() || cudasim::leaks() != 0;
}
