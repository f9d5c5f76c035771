/* tiles_rest.c - the time that products and attention by AMX take beside the instructions of tiles, which do nothing here:
 * packing, rounding, softmax, plans. It runs on any processor with AVX-512 and computes nothing useful.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 *     cc -O2 -I. tests/bench/tiles_rest.c -lm -o build/tiles_rest
 *     build/tiles_rest            all cases
 *     build/tiles_rest WORD       those whose names have this word
 */
#define _POSIX_C_SOURCE 200112L
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static uint32_t no_tiles(void) { return 0; }
#define NOTHING                              __asm__ volatile("" ::: "memory")
#define IGNORE(tile, p, stride)              do { (void)(p); (void)(stride); NOTHING; } while (0)
#define MIXPI_AMX_EMULATED
#define MIXPI_AMX_CPUID(part, out)           memset(out, 0, 16)
#define MIXPI_AMX_XCR0()                     no_tiles()
#define MIXPI_AMX_PERMIT()                   1
#define MIXPI_AMX_CONFIGURE(p)               NOTHING
#define MIXPI_AMX_RELEASE()                  NOTHING
#define MIXPI_AMX_ZERO(tile)                 NOTHING
#define MIXPI_AMX_LOAD(tile, p, stride)      IGNORE(tile, p, stride)
#define MIXPI_AMX_LOAD_PAST(tile, p, stride) IGNORE(tile, p, stride)
#define MIXPI_AMX_STORE(tile, p, stride)     IGNORE(tile, p, stride)
#define MIXPI_AMX_DOT_BF16(sum, a, b)        NOTHING
#define MIXPI_AMX_DOT_F16(sum, a, b)         NOTHING
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"

#if MIXPI_AMX
static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

/* Tiles store nothing, so scratch memory is cleared before each measurement: scores are 0. */
static char  *block;
static size_t size;
static void *scratch(void *user, size_t bytes) {
    (void)user;
    if (bytes > size) {
        free(block);
        size = (bytes + 4095) / 4096 * 4096;
        if (posix_memalign((void **)&block, 4096, size)) exit(2);
        memset(block, 0, size);
    }
    return block;
}

/* An array of n codes of bf16 or f16, all finite. */
static uint16_t *codes(int64_t n) {
    uint16_t *p = (uint16_t *)malloc((size_t)n * 2);
    if (!p) exit(2);
    for (int64_t i = 0; i < n; i++) p[i] = (uint16_t)(0x3000 + i % 1021);
    return p;
}

/* What is timed: a product, or attention. */
typedef struct work {
    mixp_gemm_args gemm;
    mixp_attention_backward_args attention;
    int what;                   /* 0 = product, 1 = attention, 2 = its backward pass */
} work;

static void run(const work *w) {
    mixp_result r = MIXP_OK;
    mixp_exec x;
    memset(&x, 0, sizeof x);
    x.scratch = scratch;
    x.threads = 1;
    if (w->what == 0) r = mixpi_gemm_amx_avx512(&x, &w->gemm);
    if (w->what == 1) r = mixpi_attention_amx_avx512(&x, &w->attention.forward);
    if (w->what == 2) r = mixpi_attention_backward_amx_avx512(&x, &w->attention);
    if (r != MIXP_OK) exit(3);
}

/* The best of 15 samples of some 8 ms, in microseconds a call. */
static double best_of(const work *w) {
    double best = 1e30, took;
    int    calls = 1;
    for (took = 0; took < 8000 && calls < 1 << 20; calls *= took < 8000 ? 2 : 1) {
        took = now();
        for (int i = 0; i < calls; i++) run(w);
        took = now() - took;
    }
    for (int r = 0; r < 15; r++) {
        took = now();
        for (int i = 0; i < calls; i++) run(w);
        took = (now() - took) / calls;
        if (took < best) best = took;
    }
    return best;
}

static const char *word = "";
static void show(const char *name, const work *w) {
    if (!strstr(name, word)) return;
    if (block) memset(block, 0, size);
    printf("%-34s %10.2f\n", name, best_of(w));
    fflush(stdout);
}

typedef struct shape { const char *name; int m, n, k, trans_a, trans_b; } shape;
static const shape shapes[] = {
    { "gpt2 qkv", 256, 2304, 768, 0, 1 },        { "gpt2 projection", 256, 768, 768, 0, 1 },
    { "gpt2 up", 256, 3072, 768, 0, 1 },         { "gpt2 down", 256, 768, 3072, 0, 1 },
    { "gpt2 dx up", 256, 768, 3072, 0, 0 },      { "gpt2 dx down", 256, 3072, 768, 0, 0 },
    { "gpt2 dw up", 3072, 768, 256, 1, 0 },      { "gpt2 dw down", 768, 3072, 256, 1, 0 },
    { "512 NT", 512, 512, 512, 0, 1 },           { "1024 NT", 1024, 1024, 1024, 0, 1 },
    { "1024 NN", 1024, 1024, 1024, 0, 0 },       { "1024 TN", 1024, 1024, 1024, 1, 0 },
    { "1024 TT", 1024, 1024, 1024, 1, 1 },       { "nanogpt qkv", 768, 384, 128, 0, 1 },
    { "nanogpt projection", 768, 128, 128, 0, 1 }, { "nanogpt up", 768, 512, 128, 0, 1 },
    { "nanogpt down", 768, 128, 512, 0, 1 },     { "nanogpt logits", 768, 65, 128, 0, 1 },
    { "nanogpt dx up", 768, 128, 512, 0, 0 },    { "nanogpt dw up", 512, 128, 768, 1, 0 },
    { "nanogpt dw logits", 65, 128, 768, 1, 0 }, { "gpt2 up, 1 row", 1, 3072, 768, 0, 1 },
    { "gpt2 up, 8 rows", 8, 3072, 768, 0, 1 },   { "gpt2 up, 32 rows", 32, 3072, 768, 0, 1 },
    { "gpt2 up, 64 rows", 64, 3072, 768, 0, 1 }, { "gpt2 up, 128 rows", 128, 3072, 768, 0, 1 },
    { "gpt2 up, 1024 rows", 1024, 3072, 768, 0, 1 }, { "32 NT", 32, 32, 32, 0, 1 }, { "32 NN", 32, 32, 32, 0, 0 }
};

static void products(mixp_dtype dtype, uint16_t *array[2], uint16_t *c) {
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        const shape *s = &shapes[i];
        work w;
        memset(&w, 0, sizeof w);
        w.gemm.m = s->m;
        w.gemm.n = s->n;
        w.gemm.k = s->k;
        w.gemm.batch = 1;
        w.gemm.alpha = 1;
        w.gemm.trans_a = s->trans_a;
        w.gemm.trans_b = s->trans_b;
        w.gemm.lda = s->trans_a ? s->m : s->k;
        w.gemm.ldb = s->trans_b ? s->k : s->n;
        w.gemm.ldc = s->n;
        w.gemm.a.data = array[0];
        w.gemm.b.data = array[1];
        w.gemm.c.data = c;
        w.gemm.a.dtype = w.gemm.b.dtype = w.gemm.c.dtype = dtype;
        show(s->name, &w);
    }
}

/* The backward pass gets a y and an lse of zeros: the forward pass, whose tiles store nothing, writes any numbers. */
static void attention(mixp_dtype dtype, uint16_t *array[2], uint16_t *c, const void *zeros) {
    static const int sizes[5][4] = { { 1, 1024, 12, 1 }, { 1, 1024, 12, 0 }, { 2, 512, 12, 1 },
                                     { 8, 128, 12, 1 }, { 4, 64, 12, 1 } };
    for (int i = 0; i < 10; i++) {
        const int *s = sizes[i / 2];
        const int64_t all = (int64_t)s[0] * s[1] * s[2] * 64;
        char name[64];
        work w;
        memset(&w, 0, sizeof w);
        mixp_attention_args *f = &w.attention.forward;
        w.what = 1 + i % 2;
        f->b = s[0];
        f->t = f->keys = s[1];
        f->heads = f->kv_heads = s[2];
        f->d = 64;
        f->scale = 0.125f;
        f->causal = s[3];
        f->q.data = array[0];
        f->k.data = array[1];
        f->v.data = array[0] + all;
        f->y.data = i % 2 ? (void *)(uintptr_t)zeros : c;
        f->lse = i % 2 ? (float *)(uintptr_t)zeros : (float *)(void *)(c + 4 * all);
        f->q_at.row = f->k_at.row = f->v_at.row = s[2] * 64;
        f->q_at.head = f->k_at.head = f->v_at.head = 64;
        f->q_at.sequence = f->k_at.sequence = f->v_at.sequence = (int64_t)s[1] * s[2] * 64;
        w.attention.dy.data = array[1] + all;
        w.attention.dq.data = c + all;
        w.attention.dk.data = c + 2 * all;
        w.attention.dv.data = c + 3 * all;
        f->q.dtype = f->k.dtype = f->v.dtype = f->y.dtype = dtype;
        w.attention.dy.dtype = w.attention.dq.dtype = w.attention.dk.dtype = w.attention.dv.dtype = dtype;
        snprintf(name, sizeof name, "%d x %d, %d heads%s%s", s[0], s[1], s[2], s[3] ? ", causal" : "",
                 i % 2 ? ", backward" : "");
        show(name, &w);
    }
}

int main(int argc, char **argv) {
    const int64_t most = 4 * 1024 * 3072;
    uint16_t *array[2], *c;
    void     *zeros = calloc(1 << 20, sizeof(float));
    if (argc > 1) word = argv[1];
    array[0] = codes(most);
    array[1] = codes(most);
    c = codes(most);
    if (!zeros || !mixp_cpu_with(MIXP_ISA_AVX512)) return 1;
    for (int i = 0; i < 2; i++) {
        const mixp_dtype dtype = i ? MIXP_F16 : MIXP_BF16;
        printf("\n%s: microseconds, all but the tiles\n", i ? "f16" : "bf16");
        products(dtype, array, c);
        attention(dtype, array, c, zeros);
    }
    free(array[0]);
    free(array[1]);
    free(c);
    free(zeros);
    return 0;
}
#else
int main(void) {
    printf("this processor or compiler has no code for AMX\n");
    return (int)no_tiles();
}
#endif
