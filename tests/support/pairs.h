/* pairs.h - products of bf16 by bf16 with AVX512_BF16, compared with a reference lane by lane. Include it
 * after mixprec.h, test.h and arrays.h.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * vdpbf16ps makes two fused multiply-adds per lane, each rounded to nearest even. Subnormal inputs
 * and sums count as zeros with their sign. pairs_differ models exactly these rules.
 */
#ifndef PAIRS_H
#define PAIRS_H
#include <float.h>
#include <math.h>

typedef enum pairs_kind {
    PAIRS_NORMAL,               /* no input, product or sum near the subnormals             */
    PAIRS_SMALL,                /* inputs and products about 2^-126, above and below        */
    PAIRS_ANY                   /* any code, NaN and Inf too                                */
} pairs_kind;

static uint16_t pairs_code(pairs_kind kind) {
    uint32_t r = random_bits(), exponent = r >> 16 & 0xFFu;
    if (kind == PAIRS_NORMAL) exponent = 110u + exponent % 36u;
    if (kind == PAIRS_SMALL) exponent = exponent & 1u ? 60u + exponent % 8u : exponent % 4u;
    return (uint16_t)((r & 0x807Fu) | exponent << 7);
}

/* A subnormal is a zero. */
static float pairs_flush(float x) {
    uint32_t u = mixp_bits_of_f32(x);
    return u & 0x7F800000u ? x : mixp_f32_of_bits(u & 0x80000000u);
}

/* a b + c rounded once; a and b are bf16's numbers. mingw's fmaf rounds sums of very different size
 * twice, so this is no fmaf. A double holds a b. The sum is rounded to odd (inexact, it is the neighbour
 * whose last bit is 1), and a double has more than twice a float's bits: so the float is the nearest. */
static float pairs_fused(float a, float b, float c) {
    volatile double p = (double)a * (double)b, s = p + (double)c, back = s - p;
    volatile double rest = (p - (s - back)) + ((double)c - back);
    double exact = s;
    uint64_t u;
    memcpy(&u, &exact, sizeof u);
    if (rest == 0.0 || !(fabs(exact) <= DBL_MAX) || (u & 1u)) return (float)exact;
    return (float)nextafter(exact, rest > 0.0 ? HUGE_VAL : -HUGE_VAL);
}

static float pairs_step(float a, float b, float c, int flush) {
    if (!flush) return pairs_fused(a, b, c);
    return pairs_flush(pairs_fused(pairs_flush(a), pairs_flush(b), pairs_flush(c)));
}

static int pairs_same(float a, float b) {
    uint32_t u = mixp_bits_of_f32(a), v = mixp_bits_of_f32(b);
    return u == v || ((u & 0x7FFFFFFFu) > 0x7F800000u && (v & 0x7FFFFFFFu) > 0x7F800000u);
}

enum { PAIRS_M = 56, PAIRS_N = 256, PAIRS_K = 5 };

/* How many elements of so many products differ from a chain of fmaf over k, flushed or not. An
 * element is three lanes' work: k 0 and 1, 2 and 3, and 4 with nothing. */
static int64_t pairs_differ(const mixp_device *d, pairs_kind kind, int64_t products, int flush) {
    static uint16_t a[PAIRS_M * PAIRS_K], b[PAIRS_N * PAIRS_K];
    static float    c[PAIRS_M * PAIRS_N];
    int64_t bad = 0;
    mixp_gemm_args g;
    memset(&g, 0, sizeof g);
    g.m = PAIRS_M;
    g.n = PAIRS_N;
    g.k = PAIRS_K;
    g.batch = 1;
    g.alpha = 1.0f;
    g.trans_b = 1;
    g.lda = g.ldb = PAIRS_K;
    g.ldc = PAIRS_N;
    g.a.data = a;
    g.b.data = b;
    g.c.data = c;
    g.a.dtype = g.b.dtype = MIXP_BF16;
    g.c.dtype = MIXP_F32;
    for (; products > 0; products--) {
        runner    r;
        mixp_exec x = runner_exec(&r, 0);
        for (int i = 0; i < PAIRS_M * PAIRS_K; i++) a[i] = pairs_code(kind);
        for (int i = 0; i < PAIRS_N * PAIRS_K; i++) b[i] = pairs_code(kind);
        CHECK_INT(d->kernels->gemm(&x, &g), MIXP_OK);
        CHECK(runner_end(&r));
        for (int i = 0; i < PAIRS_M; i++)
            for (int j = 0; j < PAIRS_N; j++) {
                float sum = 0.0f;
                for (int p = 0; p < PAIRS_K; p++)
                    sum = pairs_step(mixp_f32_of_bits((uint32_t)a[i * PAIRS_K + p] << 16),
                                     mixp_f32_of_bits((uint32_t)b[j * PAIRS_K + p] << 16), sum,
                                     flush);
                bad += !pairs_same(c[i * PAIRS_N + j], sum + 0.0f);
            }
    }
    return bad;
}

#endif
