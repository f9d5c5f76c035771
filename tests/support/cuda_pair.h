/* cuda_pair.h - a kernel on the GPU, simulated or real, next to the same kernel on the CPU.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 *     static void body(void) {
 *         Pair a = numbers(MIXP_F16, 1000, 1.0, 1), y = output(MIXP_F32, 1000, 0);
 *         BOTH(unary(X, MIXP_UNARY_EXP, 1000, ON(y), ON(a), 0.0f));
 *         close_to(y, 0.0, 4e-7);        or same_bits(y);
 *         finish(a); finish(y);
 *     }
 *     static void test_exp(void) { in_all_schedules(body); }
 *
 * BOTH calls a kernel of each table: X and ON(...) mean the GPU's side, then the CPU's, and both
 * must return the same result. in_all_schedules runs a body with the same random numbers in the
 * three schedules; every byte that `finish` sees must be the same in all.
 */
#ifndef CUDA_PAIR_H
#define CUDA_PAIR_H
#include "companion.h"
#include "test.h"
#include "args.h"
#include "numbers.h"

static mixp_exec gpu_exec, cpu_exec;
static const mixp_kernels *gpu_kernels, *cpu_kernels;
static int       on_gpu;                /* which side X and ON mean                           */
static int       scratch_requests;
/* A product that a real cuBLASLt refuses when it should run is packed anew. */
static const int most_scratch = cudasim::simulated ? 1 : 2;
static uint64_t  seen_hash;

#define X  (on_gpu ? &gpu_exec : &cpu_exec)
#define ON(pair) side(pair)
#define AT(type, pair) ((type *)side(pair).data)
#define BOTH(call)                                                                        \
    do { mixp_result gpu_, cpu_;                                                          \
         scratch_requests = 0;                                                            \
         on_gpu = 1; gpu_ = gpu_kernels->call;                                            \
         CHECK(scratch_requests <= most_scratch);                                         \
         CHECK_INT(cudaPeekAtLastError(), cudaSuccess);                                   \
         on_gpu = 0; cpu_ = cpu_kernels->call;                                            \
         CHECK_INT(gpu_, cpu_); } while (0)
#define GPU_SAYS(call, result) do { on_gpu = 1; CHECK_INT(gpu_kernels->call, result); } while (0)
#define WAIT() CHECK_INT(gpu_device->wait(&gpu_exec), MIXP_OK)

static const mixp_device *gpu_device;

/* About normal. */
static double random_normal(void) {
    double s = -6.0;
    for (int i = 0; i < 12; i++) s += (double)(random_u64() >> 11) / 9007199254740992.0;
    return s;
}

/* n elements in device memory and in host memory. `data` lies `off` elements into what was
 * allocated, and ends with it: the sanitizer sees the first byte too far. */
struct Pair {
    void      *base, *gpu, *cpu, *cpu_base;
    mixp_dtype dtype;
    int64_t    n;
};

static test_array side(const Pair &p) {
    return array_of(on_gpu ? p.gpu : p.cpu, p.dtype);
}
/* An array that is not there. */
static const test_array no_array = { NULL, MIXP_F32 };
static Pair nothing_pair(void) {
    Pair p;
    memset(&p, 0, sizeof p);
    p.dtype = MIXP_F32;
    return p;
}

static Pair empty(mixp_dtype dtype, int64_t n, int off) {
    Pair p;
    size_t size = mixp_dtype_size(dtype), bytes = (size_t)(n + off) * size;
    p.base = gpu_device->allocate(&gpu_exec, bytes);
    p.cpu_base = malloc(bytes ? bytes : 1);
    if (!p.base || !p.cpu_base) { printf("out of memory\n"); exit(2); }
    memset(p.cpu_base, 0xFF, bytes);
    p.gpu = (char *)p.base + (size_t)off * size;
    p.cpu = (char *)p.cpu_base + (size_t)off * size;
    p.dtype = dtype;
    p.n = n;
    return p;
}

static double value_at(const void *data, mixp_dtype dtype, int64_t i) {
    uint64_t code = 0;
    size_t size = mixp_dtype_size(dtype);
    memcpy(&code, (const char *)data + (size_t)i * size, size);
    return mixp_decode(dtype, code);
}
static void set_value(Pair &p, int64_t i, double x) {
    uint64_t code = mixp_encode(p.dtype, x, 0);
    size_t size = mixp_dtype_size(p.dtype);
    memcpy((char *)p.gpu + (size_t)i * size, &code, size);
    memcpy((char *)p.cpu + (size_t)i * size, &code, size);
}
static void set_code(Pair &p, int64_t i, uint64_t code) {
    size_t size = mixp_dtype_size(p.dtype);
    memcpy((char *)p.gpu + (size_t)i * size, &code, size);
    memcpy((char *)p.cpu + (size_t)i * size, &code, size);
}

/* The same random numbers on both sides. */
static Pair numbers(mixp_dtype dtype, int64_t n, double scale, int off) {
    Pair p = empty(dtype, n, off);
    for (int64_t i = 0; i < n; i++) set_value(p, i, scale * random_normal());
    return p;
}
/* An output: garbage (NaN), or numbers to add to. */
static Pair output(mixp_dtype dtype, int64_t n, int accumulate, int off = 0)
{ return accumulate ? numbers(dtype, n, 1.0, off) : empty(dtype, n, off); }

/* int32 indexes in [0, limit). */
static Pair indexes(int64_t n, int64_t limit) {
    Pair p = empty(MIXP_I32, n, 0);
    for (int64_t i = 0; i < n; i++)
        set_code(p, i, (uint64_t)(random_u64() % (uint64_t)limit));
    return p;
}

enum Nans { nans_by_bits, nans_by_class };

/* The same bits on both sides. nans_by_class: NaNs need not have the same payload and sign. */
static void same_elements(const Pair &p, Nans nans) {
    size_t size = mixp_dtype_size(p.dtype);
    WAIT();
    for (int64_t i = 0; i < p.n; i++) {
        if (!memcmp((char *)p.gpu + (size_t)i * size, (char *)p.cpu + (size_t)i * size, size))
            continue;
        double g = value_at(p.gpu, p.dtype, i), c = value_at(p.cpu, p.dtype, i);
        if (nans == nans_by_class && std::isnan(g) && std::isnan(c)) continue;
        test_bad++;
        TEST_SHOW("%s element %lld of %lld is %.9g on the GPU, %.9g on the CPU",
                  mixp_dtype_name(p.dtype), (long long)i, (long long)p.n, g, c);
        return;
    }
}

/* Of moves and conversions, which promise a NaN's payload. */
static void same_bits(const Pair &p) { same_elements(p, nans_by_bits); }

/* Of arithmetic: a GPU makes the same NaN of all, an x86 keeps the payload of an operand. */
static inline void same_but_nan(const Pair &p) { same_elements(p, nans_by_class); }

/* How far one rounding goes, and a bit. */
static double one_rounding(mixp_dtype d, double x) { return 1.0002 * half_ulp(d, x); }

/* What cuBLASLt may lose, for each sum of at most x, when it adds a product to an old c of f16 or bf16: it may round
 * the product, and the product with its bias, first. */
static double lost_before_adding(mixp_dtype d, int accumulate, double x)
{ return accumulate && d != MIXP_F32 && cudasim::rounds_first ? one_rounding(d, x) : 0.0; }

/* |gpu - cpu| <= absolute + relative |cpu| + a rounding of each; NaN and Inf alike. */
static void close_to(const Pair &p, double absolute, double relative) {
    WAIT();
    for (int64_t i = 0; i < p.n; i++) {
        double g = value_at(p.gpu, p.dtype, i), c = value_at(p.cpu, p.dtype, i);
        double slack = absolute + relative * fabs(c), ulp;
        if ((std::isnan(g) && std::isnan(c)) || g == c) continue;
        ulp = p.dtype == MIXP_F32 ? 0.0 : 2.0 * one_rounding(p.dtype, fabs(c) + slack);
        if (fabs(g - c) <= slack + ulp) continue;
        test_bad++;
        TEST_SHOW("%s element %lld of %lld is %.9g on the GPU, %.9g on the CPU (slack %.3g)",
                  mixp_dtype_name(p.dtype), (long long)i, (long long)p.n, g, c, slack + ulp);
        return;
    }
}

/* Waits, notes what the GPU's side holds, frees both. */
static void finish(Pair &p) {
    size_t bytes = (size_t)p.n * mixp_dtype_size(p.dtype);
    WAIT();
    for (size_t i = 0; i < bytes; i++)
        seen_hash = (seen_hash ^ ((unsigned char *)p.gpu)[i]) * 1099511628211u;
    gpu_device->release(&gpu_exec, p.base);
    free(p.cpu_base);
}

/* Scratch memory, with garbage in it, from each side's memory. */
static void *scratch_memory[2];
static void *test_scratch(void *user, size_t bytes) {
    int gpu = user != NULL;
    scratch_requests += gpu;
    if (gpu) {
        if (scratch_memory[1]) gpu_device->release(&gpu_exec, scratch_memory[1]);
        return scratch_memory[1] = gpu_device->allocate(&gpu_exec, bytes);
    }
    free(scratch_memory[0]);
    return scratch_memory[0] = malloc(bytes);
}

static void pair_open(void) {
    const char *why = "";
    gpu_device = mixp_cuda(0, &why);
    if (!gpu_device && !cudasim::simulated) { printf("no GPU: %s\n", why); exit(77); }
    if (!gpu_device) { printf("no simulated GPU: %s\n", why); exit(2); }
    if (why[0]) printf("%s\n", why);
    memset(&gpu_exec, 0, sizeof gpu_exec);
#ifndef MIXPREC_CUDASIM
    gpu_exec.device.allocate = cudasim::seen_new;
    gpu_exec.device.release = cudasim::seen_back;
#endif
    gpu_exec.threads = 1;
    gpu_exec.scratch = test_scratch;
    cpu_exec = gpu_exec;
    gpu_exec.user = &gpu_exec;
    CHECK_INT(gpu_device->attach(&gpu_exec), MIXP_OK);
    gpu_kernels = gpu_device->kernels;
    cpu_kernels = mixp_cpu()->kernels;
}
static void pair_close(void) {
    if (scratch_memory[1]) gpu_device->release(&gpu_exec, scratch_memory[1]);
    free(scratch_memory[0]);
    scratch_memory[0] = scratch_memory[1] = NULL;
    gpu_device->detach(&gpu_exec);
    CHECK_INT(cudasim::leaks(), 0);
}

/* Quick: in one schedule, each call in the next. */
static void in_all_schedules(void (*body)(void)) {
    static int calls;
    uint64_t want = 0;
    for (int s = 0; s < (getenv("MIXPREC_TEST_QUICK") ? 1 : 3); s++) {
        cudasim::schedule = (cudasim::Schedule)((s + calls) % 3);
        random_state = 88172645463325252u;
        seen_hash = 14695981039346656037u;
        pair_open();
        body();
        pair_close();
        if (!want) want = seen_hash;
        CHECK(seen_hash == want);
    }
    calls++;
    cudasim::schedule = cudasim::forward;
}
#endif
