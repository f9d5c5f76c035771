/* test_pairs.c - the known answer that AVX512_BF16 must give before it is used (internals of
 * mixprec.h), asked of tiles in plain C that answer as one machine or another would.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include "test.h"

#if MIXPI_BF16
/* One row of 16 columns, as mixpi_pairs_answer asks for, with step(a, b, c) for each pair: a[0],
 * b[0] of k and a[1], b[1] of k+1. */
static void pairs_tile(const mixpi_tile *t, float (*step)(const float *a, const float *b, float c)) {
    int64_t p;
    int     j;
    for (j = 0; j < 16; j++) {
        float sum = 0.0f;
        for (p = 0; p < t->depth; p++) {
            uint32_t u = mixp_bits_of_f32(t->a[p * t->a_step]);
            uint32_t v = mixp_bits_of_f32(t->b[p * t->b_step + j]);
            float    a[2], b[2];
            a[0] = mixp_f32_of_bits(u & 0xFFFF0000u);
            a[1] = mixp_f32_of_bits(u << 16);
            b[0] = mixp_f32_of_bits(v & 0xFFFF0000u);
            b[1] = mixp_f32_of_bits(v << 16);
            sum = step(a, b, sum);
        }
        t->c[j] = sum;
    }
}
static float pairs_in_order(const float *a, const float *b, float c)
{ return fmaf(a[1], b[1], fmaf(a[0], b[0], c)); }
static float pairs_even_first(const float *a, const float *b, float c)
{ return fmaf(a[0], b[0], fmaf(a[1], b[1], c)); }
static float pairs_exact_sum(const float *a, const float *b, float c)
{ return (float)((double)a[0] * (double)b[0] + (double)a[1] * (double)b[1] + (double)c); }
static float pairs_cut(double x) {      /* toward zero */
    float y = (float)x;
    return fabs((double)y) > fabs(x) ? mixp_f32_of_bits(mixp_bits_of_f32(y) - 1u) : y;
}
static float pairs_toward_zero(const float *a, const float *b, float c) {
    float first = pairs_cut((double)a[0] * (double)b[0] + (double)c);
    return pairs_cut((double)a[1] * (double)b[1] + (double)first);
}
static void pairs_tile_in_order(const mixpi_tile *t) { pairs_tile(t, pairs_in_order); }
static void pairs_tile_even_first(const mixpi_tile *t) { pairs_tile(t, pairs_even_first); }
static void pairs_tile_exact_sum(const mixpi_tile *t) { pairs_tile(t, pairs_exact_sum); }
static void pairs_tile_toward_zero(const mixpi_tile *t) { pairs_tile(t, pairs_toward_zero); }
#endif

/* Tiles that answer as other machines would: only the right one passes. */
static void only_the_right_answer_passes(void) {
#if MIXPI_BF16
    CHECK(mixpi_pairs_answer(pairs_tile_in_order));
    CHECK(!mixpi_pairs_answer(pairs_tile_even_first));
    CHECK(!mixpi_pairs_answer(pairs_tile_exact_sum));
    CHECK(!mixpi_pairs_answer(pairs_tile_toward_zero));
#else
    SKIP("the compiler has no AVX512_BF16");
#endif
}

int main(void) {
    RUN(only_the_right_answer_passes);
    return test_report();
}
