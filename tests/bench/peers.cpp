// peers.cpp - mixprec and the libraries it is compared with, behind plain functions for peers.py.
// SPDX-License-Identifier: MIT OR Unlicense
//
// Each function runs its work `repeat` times and returns the seconds of one. Libraries in headers
// are compiled in where they are installed; OpenBLAS and oneDNN are opened at run time.
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include "../support/args.h"
#include <chrono>
#include <cstdlib>
#include <dlfcn.h>
#if __has_include(<fp16.h>)
#  include <fp16.h>
#  define HAVE_FP16 1
#endif
#if __has_include(<Imath/half.h>)
#  define IMATH_HALF_NO_LOOKUP_TABLE
#  include <Imath/half.h>
#  define HAVE_IMATH 1
#endif
#if __has_include(<eigen3/Eigen/Core>)
#  include <eigen3/Eigen/Core>
#  define HAVE_EIGEN 1
#endif

template <class Work> static double seconds(int repeat, Work work) {
    using clock = std::chrono::steady_clock;
    auto start = clock::now();
    for (int i = 0; i < repeat; i++) work();
    return std::chrono::duration<double>(clock::now() - start).count() / repeat;
}

// The instruction set of the next calls: NULL = the one that mixp_cpu selects.
static const mixp_device *set;

// Contexts by their number of threads and their set; they live as long as the process.
static mixp_context *context(int threads) {
    static mixp_context *made[65][2];
    mixp_context_desc d;
    if (threads < 1 || threads > 64) abort();
    memset(&d, 0, sizeof d);
    d.threads = threads;
    d.device = set;
    mixp_context **ctx = &made[threads][set != NULL];
    if (!*ctx) *ctx = mixp_context_new(&d);
    return *ctx;
}

#if MIXPI_AMX
// Nanoseconds of a step of four products of tiles with its four loads from L1. On some virtual
// machines loads of tiles are four times as slow for milliseconds to minutes, in the same code.
static double tile_step(void) {
    using clock = std::chrono::steady_clock;
    alignas(64) static char l1[1 << 14];
    double best = 1e9;
    MIXPI_AMX_CONFIGURE(&mixpi_amx_tiles);
    for (int round = 0; round < 3; round++) {
        auto start = clock::now();
        for (int i = 0; i < 40; i++) {
            const char *a = l1 + i % 4 * 2048, *b = a + 8192;
            MIXPI_AMX_LOAD(4, a, 64);
            MIXPI_AMX_LOAD(6, b, 64);
            MIXPI_AMX_DOT_BF16(0, 4, 6);
            MIXPI_AMX_LOAD(7, b + 1024, 64);
            MIXPI_AMX_DOT_BF16(1, 4, 7);
            MIXPI_AMX_LOAD(5, a + 1024, 64);
            MIXPI_AMX_DOT_BF16(2, 5, 6);
            MIXPI_AMX_DOT_BF16(3, 5, 7);
        }
        double taken = std::chrono::duration<double, std::nano>(clock::now() - start).count() / 40;
        if (taken < best) best = taken;
    }
    MIXPI_AMX_RELEASE();
    return best;
}
#endif

extern "C" {

const char *peer_device(void) { return mixp_cpu()->name; }

// 1: the following calls use AVX-512 without tiles, 0: what mixp_cpu selects. Returns 0 where
// mixp_cpu selects no tiles, so both are the same.
int peer_without_tiles(int yes) {
    set = yes ? mixp_cpu_with(MIXP_ISA_AVX512) : NULL;
    return strstr(mixp_cpu()->name, "amx") != NULL;
}

// Nanoseconds of a step by tiles, or -1 where mixp_cpu selects no tiles.
double peer_tile_step(void) {
#if MIXPI_AMX
    if (strstr(mixp_cpu()->name, "amx")) return tile_step();
#endif
    return -1;
}

// Memory of 2 MiB pages where there are such, touched once; filled with ordinary numbers that
// are finite in every dtype, because their bytes repeat.
void *peer_buffer(size_t bytes) {
    void *p = NULL;
    if (posix_memalign(&p, (size_t)2 << 20, bytes + 4096)) return NULL;
    for (size_t i = 0; i < bytes / 4; i++) {
        uint32_t u = 0x3C003C00u ^ ((uint32_t)i * 2654435761u & 0x83FF83FFu);
        memcpy((char *)p + 4 * i, &u, 4);
    }
    return p;
}
void peer_free(void *p) { free(p); }

// --- conversions -------------------------------------------------------------------------

double peer_memcpy(void *to, const void *from, size_t bytes, int repeat) {
    void *(*volatile copy)(void *, const void *, size_t) = memcpy;
    return seconds(repeat, [=] { copy(to, from, bytes); });
}

double peer_convert(void *to, int dst, const void *from, int src, int64_t n, int repeat,
                    int threads) {
    mixp_context *ctx = context(threads);
    test_array d = array_of(to, (mixp_dtype)dst), s = array_of((void *)from, (mixp_dtype)src);
    return seconds(repeat, [=] { ctx->device->kernels->convert(&ctx->exec,
            args_convert(d, s, n, NULL)); });
}

#if defined(__x86_64__)
// What one writes by hand with the processor's own instruction.
__attribute__((target("avx512f")))
static void loop_to_f16(void *to, const void *from, int64_t n) {
    for (int64_t i = 0; i < n; i += 16)
        _mm256_storeu_si256((__m256i *)((uint16_t *)to + i),
                            _mm512_cvtps_ph(_mm512_loadu_ps((const float *)from + i), 8));
}
__attribute__((target("avx512f")))
static void loop_from_f16(void *to, const void *from, int64_t n) {
    for (int64_t i = 0; i < n; i += 16)
        _mm512_storeu_ps((float *)to + i, _mm512_cvtph_ps(_mm256_loadu_si256(
                                              (const __m256i *)((const uint16_t *)from + i))));
}
#endif

// A peer's conversion, or -1 where it has none or is not installed. n is a multiple of 16.
double peer_convert_by(const char *who, void *to, int dst, const void *from, int src, int64_t n,
                       int repeat) {
    const bool narrow = dst == MIXP_F16 && src == MIXP_F32;
    if (!narrow && !(dst == MIXP_F32 && src == MIXP_F16)) return -1;
    float *wide = (float *)(narrow ? from : to);
    uint16_t *half = (uint16_t *)(narrow ? to : from);
    (void)wide; (void)half; (void)n; (void)repeat;
#if defined(__x86_64__)
    if (!strcmp(who, "AVX-512 loop") && __builtin_cpu_supports("avx512f"))
        return seconds(repeat, [=] { (narrow ? loop_to_f16 : loop_from_f16)(to, from, n); });
#endif
#ifdef HAVE_FP16
    if (!strcmp(who, "FP16")) return seconds(repeat, [=] {
        if (narrow) for (int64_t i = 0; i < n; i++) half[i] = fp16_ieee_from_fp32_value(wide[i]);
        else for (int64_t i = 0; i < n; i++) wide[i] = fp16_ieee_to_fp32_value(half[i]); });
#endif
#ifdef HAVE_IMATH
    if (!strcmp(who, "Imath")) return seconds(repeat, [=] {
        if (narrow) for (int64_t i = 0; i < n; i++) half[i] = imath_float_to_half(wide[i]);
        else for (int64_t i = 0; i < n; i++) wide[i] = imath_half_to_float(half[i]); });
#endif
#ifdef HAVE_EIGEN
    if (!strcmp(who, "Eigen")) return seconds(repeat, [=] {
        Eigen::Map<Eigen::ArrayXf> w(wide, n);
        Eigen::Map<Eigen::Array<Eigen::half, Eigen::Dynamic, 1>> h((Eigen::half *)half, n);
        if (narrow) h = w.cast<Eigen::half>(); else w = h.cast<float>(); });
#endif
    return -1;
}

// --- the optimizer phase -----------------------------------------------------------------

typedef struct phase {
    mixp_context *ctx;
    mixp_scaler *scaler;
    mixp_optimizer *opt;
} phase;

// n parameters in some tensors, AdamW, clipped at a norm that lets all through; low: with f16
// copies for autocast. NULL: out of memory.
void *peer_phase_new(int64_t n, int tensors, int grad, int low, int threads) {
    mixp_context_desc c;
    mixp_optimizer_desc d = mixp_adamw_defaults();
    memset(&c, 0, sizeof c);
    c.threads = threads;
    phase *p = (phase *)calloc(1, sizeof *p);
    p->ctx = mixp_context_new(&c);
    p->scaler = mixp_scaler_new(p->ctx, NULL);
    (void)mixp_scaler_loss_scale(p->scaler);    // whoever multiplies by it asks
    d.max_norm = 1e30;
    p->opt = mixp_optimizer_new(p->ctx, &d);
    n /= tensors;
    for (int k = 0; k < tensors; k++) {
        mixp_tensor *w = mixp_param(p->ctx, NULL, MIXP_F32, 1, &n);
        mixp_tensor *g = mixp_param(p->ctx, NULL, (mixp_dtype)grad, 1, &n);
        mixp_fill(g, 1.0);
        if (low) w->own.low[0] = mixp_param(p->ctx, NULL, MIXP_F16, 1, &n);
        mixp_optimizer_add(p->opt, w, g);
    }
    return mixp_context_error(p->ctx, NULL) == MIXP_OK ? p : NULL;
}
void peer_phase_free(void *h) { mixp_context_free(((phase *)h)->ctx); free(h); }

// what: 0 unscale in place, found_inf and norm; 1 AdamW alone; 2 the whole phase.
double peer_phase(void *h, int what) {
    phase *p = (phase *)h;
    const mixp_kernels *k = p->ctx->device->kernels;
    mixp_step_plan plan = p->opt->plan;
    if (what == 0) return seconds(1, [=] {
        k->grad_stats(&p->ctx->exec, args_grad_stats(p->opt->device_rows, p->opt->count,
                &p->scaler->state->scale, 1,
                  p->opt->state, NULL, NULL)); });
    if (what == 1) return seconds(1, [=] {
        k->update(&p->ctx->exec, args_update(&plan, p->opt->device_rows, p->opt->count,
                p->opt->state)); });
    return seconds(1, [=] {
        mixp_scaler_step(p->scaler, p->opt);
        mixp_scaler_update_to(p->scaler, 1.0f); });
}

// --- products ----------------------------------------------------------------------------

typedef void (*sgemm_row_major)(int, int, int, int, int, int, float, const float *, int,
                                const float *, int, float, float *, int);
typedef int (*dnnl_sgemm_type)(char, char, int64_t, int64_t, int64_t, float, const float *, int64_t,
                               const float *, int64_t, float, float *, int64_t);

static void *symbol_of(const char *const *files, const char *name) {
    void *lib = NULL;
    for (; *files && !lib; files++) lib = dlopen(*files, RTLD_NOW | RTLD_LOCAL);
    return lib ? dlsym(lib, name) : NULL;
}
static void *openblas(const char *name) {
    static const char *const files[] = { "libopenblas.so.0", "libopenblas.so", NULL };
    return symbol_of(files, name);
}
static void *onednn(const char *name) {
    static const char *const files[] = { "libdnnl.so.3", "libdnnl.so.2", NULL };
    return symbol_of(files, name);
}

// The processor that OpenBLAS thinks it runs on, "" when it is not installed.
const char *peer_openblas_core(void) {
    char *(*core)(void) = (char *(*)(void))openblas("openblas_get_corename");
    return core ? core() : "";
}
int peer_has_onednn(void) { return onednn("dnnl_sgemm") != NULL; }

// c[m,n] = op(a) op(b), row-major and dense, all three of one dtype.
double peer_gemm(int m, int n, int k, int trans_a, int trans_b, int dtype, void *a, void *b,
                 void *c, int repeat, int threads) {
    mixp_context *ctx = context(threads);
    mixp_gemm_args g;
    memset(&g, 0, sizeof g);
    g.m = m; g.n = n; g.k = k; g.batch = 1; g.alpha = 1.0f;
    g.trans_a = trans_a; g.trans_b = trans_b;
    g.lda = trans_a ? m : k; g.ldb = trans_b ? k : n; g.ldc = n;
    g.a.data = a;
    g.b.data = b;
    g.c.data = c;
    g.a.dtype = g.b.dtype = g.c.dtype = (mixp_dtype)dtype;
    return seconds(repeat, [=] { ctx->device->kernels->gemm(&ctx->exec, &g); });
}

// The same of f32 by OpenBLAS or oneDNN; -1 where it is not installed.
double peer_gemm_by(const char *who, int m, int n, int k, int trans_a, int trans_b, const float *a,
                    const float *b, float *c, int repeat, int threads) {
    int lda = trans_a ? m : k, ldb = trans_b ? k : n;
    if (!strcmp(who, "oneDNN")) {       // as many threads as OpenMP gives, which peers.py sets
        static dnnl_sgemm_type dnnl = (dnnl_sgemm_type)onednn("dnnl_sgemm");
        if (!dnnl) return -1;
        return seconds(repeat, [=] { dnnl(trans_a ? 'T' : 'N', trans_b ? 'T' : 'N', m, n, k, 1.0f,
                                          a, lda, b, ldb, 0.0f, c, n); });
    }
    static sgemm_row_major sgemm = (sgemm_row_major)openblas("cblas_sgemm");
    static void (*set_threads)(int) = (void (*)(int))openblas("openblas_set_num_threads");
    if (!sgemm) return -1;
    set_threads(threads);
    return seconds(repeat, [=] { sgemm(101, trans_a ? 112 : 111, trans_b ? 112 : 111, m, n, k,
                                       1.0f, a, lda, b, ldb, 0.0f, c, n); });
}

// --- attention ---------------------------------------------------------------------------

typedef struct attention_memory { void *q, *k, *v, *dy, *y, *dq, *dk, *dv, *mask, *lse; } attention_memory;

// Of [b, t, heads, d], all of one dtype; kind: 0 full, 1 causal, from 2 on a mask [t, t]; backward: as well.
double peer_attention(int b, int t, int heads, int d, int dtype, int kind, int backward,
                      const attention_memory *m, int repeat, int threads) {
    mixp_context *ctx = context(threads);
    const mixp_kernels *table = ctx->device->kernels;
    mixp_attention_args k;
    mixp_attention_backward_args back;
    memset(&k, 0, sizeof k);
    memset(&back, 0, sizeof back);
    auto in = [=](void *p) { return args_in(array_of(p, (mixp_dtype)dtype)); };
    auto out = [=](void *p) { return args_out(array_of(p, (mixp_dtype)dtype), 0); };
    k.b = b; k.t = k.keys = t; k.heads = k.kv_heads = heads; k.d = d;
    k.causal = kind == 1;
    k.scale = 1.0f / sqrtf((float)d);
    k.q = in(m->q); k.k = in(m->k); k.v = in(m->v);
    k.q_at.head = d;
    k.q_at.row = heads * d;
    k.q_at.sequence = t * k.q_at.row;
    k.k_at = k.v_at = k.q_at;
    k.y = out(m->y);
    k.lse = (float *)m->lse;
    if (kind >= 2) {
        k.mask = in(m->mask);
        k.mask_at.row = t;
        k.mask_key = 1;
    }
    back.forward = k;
    back.dy = in(m->dy);
    back.dq = out(m->dq); back.dk = out(m->dk); back.dv = out(m->dv);
    return seconds(repeat, [=] {
        table->attention(&ctx->exec, &k);
        if (backward) table->attention_backward(&ctx->exec, &back); });
}

}   // extern "C"
