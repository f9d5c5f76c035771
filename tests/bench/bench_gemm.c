/* bench_gemm.c - GFLOP/s of matrix products at the shapes of nanoGPT and GPT-2.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 *   cc -O2 -I../.. bench_gemm.c -lm -lpthread                         and ./a.out [threads [seconds]]
 *   cc -O2 -I../.. -DBENCH_CBLAS bench_gemm.c -lopenblas -lm -lpthread      to compare with OpenBLAS
 *
 * Prints median [min max] over many samples; the contestants take turns inside one process.
 * OpenBLAS before 0.3.22 does not know recent Intel cores and falls back to SSE3: compare with
 * OPENBLAS_CORETYPE=SkylakeX where the CPU has AVX-512 (Haswell where it has AVX2).
 */
#define _POSIX_C_SOURCE 200809L
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"

#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#ifdef BENCH_CBLAS
#include <cblas.h>
extern void openblas_set_num_threads(int n);
#endif

/* --- a pool of spinning threads ---------------------------------------------------------- */

#define MAX_THREADS 64

typedef struct pool {
    int       threads, round, left, stop;
    int64_t   tasks, next;
    mixp_task task;
    void     *arg, *scratch;
    size_t    bytes;
    pthread_t id[MAX_THREADS];
} pool;

typedef struct member { pool *p; int worker; } member;

static void take(pool *p, int worker) {
    int64_t i;
    while ((i = __atomic_fetch_add(&p->next, 1, __ATOMIC_ACQ_REL)) < p->tasks) p->task(p->arg, i, worker);
}

/* Spins for some microseconds, then lets others have the core. */
static void wait_a_little(int *spins) { if (++*spins > 20000) (void)sched_yield(); }

static void *work(void *arg) {
    member m = *(member *)arg;
    int seen = 0, spins;
    for (;;) {
        for (spins = 0; __atomic_load_n(&m.p->round, __ATOMIC_ACQUIRE) == seen; wait_a_little(&spins))
            if (__atomic_load_n(&m.p->stop, __ATOMIC_ACQUIRE)) return NULL;
        seen++;
        take(m.p, m.worker);
        __atomic_fetch_sub(&m.p->left, 1, __ATOMIC_ACQ_REL);
    }
}

static void parallel(void *user, int64_t tasks, mixp_task task, void *arg) {
    pool *p = (pool *)user;
    int   spins = 0;
    p->task = task;
    p->arg = arg;
    p->tasks = tasks;
    p->next = 0;
    p->left = p->threads - 1;
    __atomic_fetch_add(&p->round, 1, __ATOMIC_ACQ_REL);
    take(p, 0);
    while (__atomic_load_n(&p->left, __ATOMIC_ACQUIRE)) wait_a_little(&spins);
}

static void *scratch(void *user, size_t bytes) {
    pool *p = (pool *)user;
    if (bytes > p->bytes) {
        free(p->scratch);
        p->bytes = bytes;
        if (posix_memalign(&p->scratch, 64, bytes)) p->scratch = NULL;
    }
    return p->scratch;
}

/* --- contestants ------------------------------------------------------------------------- */

typedef struct shape { const char *what; int m, n, k, trans_a, trans_b, batch; } shape;

static const shape shapes[] = {
    { "char qkv",        768,   384,  128, 0, 1, 1 },
    { "char proj",       768,   128,  128, 0, 1, 1 },
    { "char mlp up",     768,   512,  128, 0, 1, 1 },
    { "char mlp down",   768,   128,  512, 0, 1, 1 },
    { "char logits",     768,    65,  128, 0, 1, 1 },
    { "char dx qkv",     768,   128,  384, 0, 0, 1 },
    { "char dx up",      768,   128,  512, 0, 0, 1 },
    { "char dx down",    768,   512,  128, 0, 0, 1 },
    { "char dx logits",  768,   128,   65, 0, 0, 1 },
    { "char dw qkv",     384,   128,  768, 1, 0, 1 },
    { "char dw up",      512,   128,  768, 1, 0, 1 },
    { "char dw down",    128,   512,  768, 1, 0, 1 },
    { "char dw logits",   65,   128,  768, 1, 0, 1 },
    { "batch q k",        64,    64,   32, 0, 1, 48 },
    { "batch p v",        64,    32,   64, 0, 0, 48 },
    { "gpt2 mlp up",     256,  3072,  768, 0, 1, 1 },
    { "gpt2 mlp down",   256,   768, 3072, 0, 1, 1 },
    { "gpt2 dx up",      256,   768, 3072, 0, 0, 1 },
    { "gpt2 dx down",    256,  3072,  768, 0, 0, 1 },
    { "gpt2 dw up",     3072,   768,  256, 1, 0, 1 },
    { "gpt2 dw down",    768,  3072,  256, 1, 0, 1 },
    { "gpt2 logits",     256, 50304,  768, 0, 1, 1 },
    { "square",         1024,  1024, 1024, 0, 0, 1 },
};

enum { F32, F16, BF16, WIDENED, BLAS, CONTESTANTS };
static const char *const names[CONTESTANTS] = { "f32", "f16", "bf16", "bf16 widened", "OpenBLAS f32" };

/* Where bf16 is widened to f32, to compare with what multiplies it as it is; NULL when the device
 * widens itself. */
static const mixp_device *widening(const mixp_device *d) {
    static const mixp_isa pairs[][2] = {
        { MIXP_ISA_AVX512_BF16, MIXP_ISA_AVX512 }, { MIXP_ISA_AMX, MIXP_ISA_AVX512 },
        { MIXP_ISA_AMX_F16, MIXP_ISA_AVX512 }, { MIXP_ISA_NEON_BF16, MIXP_ISA_NEON }
    };
    static const mixp_device *last, *wide;      /* asked once: not in what is timed */
    size_t i;
    if (last == d) return wide;
    last = d;
    wide = NULL;
    for (i = 0; i < sizeof pairs / sizeof pairs[0]; i++)
        if (mixp_cpu_with(pairs[i][0]) == d) wide = mixp_cpu_with(pairs[i][1]);
    return wide;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void *buffer(const mixp_exec *x, mixp_dtype dtype, int64_t n) {
    mixp_out   a;
    (void)x;
    a.dtype = dtype;
    a.data = NULL;
    a.accumulate = 0;
    if (posix_memalign(&a.data, 64, (size_t)n * mixp_dtype_size(dtype))) exit(1);
    for (int64_t i = 0; i < n; i++) {
        float v = (float)(i * 2654435761u % 2000u) / 1000.0f - 1.0f;
        if (dtype == MIXP_F32) ((float *)a.data)[i] = v;
        else if (dtype == MIXP_F16) ((mixp_f16 *)a.data)[i] = mixp_f16_from_f32(v);
        else ((mixp_bf16 *)a.data)[i] = mixp_bf16_from_f32(v);
    }
    return a.data;
}

static void run(const mixp_device *d, const mixp_exec *x, const mixp_gemm_args *g, int who) {
    if (who == WIDENED) d = widening(d);
    if (who != BLAS) { if (d) d->kernels->gemm(x, g); return; }
#ifdef BENCH_CBLAS
    for (int64_t z = 0; z < g->batch; z++)
        cblas_sgemm(CblasRowMajor, g->trans_a ? CblasTrans : CblasNoTrans,
                    g->trans_b ? CblasTrans : CblasNoTrans, (int)g->m, (int)g->n, (int)g->k, 1.0f,
                    (const float *)g->a.data + z * g->stride_a, (int)g->lda,
                    (const float *)g->b.data + z * g->stride_b, (int)g->ldb, 0.0f,
                    (float *)g->c.data + z * g->stride_c, (int)g->ldc);
#endif
}

static int increasing(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static void measure(const mixp_device *d, const mixp_exec *x, const shape *s, double seconds) {
    static const mixp_dtype dtypes[4] = { MIXP_F32, MIXP_F16, MIXP_BF16, MIXP_BF16 };
    enum { SAMPLES = 101 };
    static double speed[CONTESTANTS][SAMPLES];
    double    flops = 2.0 * s->m * s->n * s->k * s->batch, until = now() + seconds;
    mixp_gemm_args g[CONTESTANTS];
    void     *made[CONTESTANTS][3];
    int       who, samples = 0, repeat = 1 + (int)(1e8 / flops);
    memset(g, 0, sizeof g);
    for (who = 0; who < CONTESTANTS; who++) {
        mixp_gemm_args *p = &g[who];
        if (who == BLAS) { *p = g[F32]; continue; }
        p->m = s->m; p->n = s->n; p->k = s->k; p->batch = s->batch;
        p->trans_a = s->trans_a; p->trans_b = s->trans_b; p->alpha = 1.0f;
        p->a.dtype = p->b.dtype = p->c.dtype = dtypes[who];
        p->stride_a = (int64_t)s->m * s->k;
        p->stride_b = (int64_t)s->k * s->n;
        p->stride_c = (int64_t)s->m * s->n;
        p->lda = s->trans_a ? s->m : s->k; p->ldb = s->trans_b ? s->k : s->n; p->ldc = s->n;
        p->a.data = made[who][0] = buffer(x, dtypes[who], p->stride_a * s->batch);
        p->b.data = made[who][1] = buffer(x, dtypes[who], p->stride_b * s->batch);
        p->c.data = made[who][2] = buffer(x, dtypes[who], p->stride_c * s->batch);
    }
    for (samples = 0; samples < SAMPLES && (samples < 5 || now() < until); samples++)
        for (who = 0; who < CONTESTANTS; who++) {
            run(d, x, &g[who], who);
            double t = now();
            for (int i = 0; i < repeat; i++) run(d, x, &g[who], who);
            speed[who][samples] = flops * repeat / (now() - t) * 1e-9;
#ifdef BENCH_CBLAS
            /* OpenBLAS's threads spin on for a while after a call. */
            if (who == BLAS && x->threads > 1) { struct timespec w = { 0, 40000000 }; nanosleep(&w, NULL); }
#endif
        }
    printf("%-15s %5d %5d %5d %s%s", s->what, s->m, s->n, s->k, s->trans_a ? "T" : "N", s->trans_b ? "T" : "N");
    for (who = 0; who < CONTESTANTS; who++) {
#ifndef BENCH_CBLAS
        if (who == BLAS) break;
#endif
        if (who == WIDENED && !widening(d)) continue;
        qsort(speed[who], (size_t)samples, sizeof(double), increasing);
        printf("   %6.1f [%5.1f %5.1f]", speed[who][samples / 2], speed[who][0], speed[who][samples - 1]);
    }
    printf("\n");
    for (who = 0; who < BLAS; who++)
        for (samples = 0; samples < 3; samples++) free(made[who][samples]);
}

int main(int argc, char **argv) {
    int    threads = argc > 1 ? atoi(argv[1]) : 2, n, i;
    double seconds = argc > 2 ? atof(argv[2]) : 0.5;
    const char *only = argc > 3 ? argv[3] : "";
    const char *isa = getenv("BENCH_ISA");
    const mixp_device *d = isa ? mixp_cpu_with((mixp_isa)atoi(isa)) : mixp_cpu();
    if (!d || threads < 1 || threads > MAX_THREADS) return 1;
    for (n = 1; n <= threads; n += threads > 1 ? threads - 1 : 1) {
        static pool p;
        member m[MAX_THREADS];
        mixp_exec x;
        memset(&p, 0, sizeof p);
        memset(&x, 0, sizeof x);
        p.threads = x.threads = n;
        x.user = &p;
        x.parallel = n > 1 ? parallel : NULL;
        x.scratch = scratch;
        for (i = 1; i < n; i++) {
            m[i].p = &p;
            m[i].worker = i;
            if (pthread_create(&p.id[i], NULL, work, &m[i])) return 1;
        }
#ifdef BENCH_CBLAS
        openblas_set_num_threads(n);
#endif
        printf("%s, %d thread%s, GFLOP/s: median [min max]\n%-15s %5s %5s %5s   ", d->name, n,
               n > 1 ? "s" : "", "", "m", "n", "k");
        for (i = 0; i < CONTESTANTS; i++)
            if (i != WIDENED || widening(d)) printf("   %-20s", names[i]);
        printf("\n");
        for (i = 0; i < (int)(sizeof shapes / sizeof shapes[0]); i++)
            if (strstr(shapes[i].what, only)) measure(d, &x, &shapes[i], seconds);
        __atomic_store_n(&p.stop, 1, __ATOMIC_RELEASE);
        for (i = 1; i < n; i++) pthread_join(p.id[i], NULL);
        free(p.scratch);
    }
    return 0;
}
