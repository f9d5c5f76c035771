/* test_pairs.c - the known answers that pairs of bf16 and f16 must give before they are used
 * (internals of mixprec.h). The test asks tiles in plain C, which answer like different machines.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "internals.h"
#include "test.h"

#if MIXPI_BF16 || MIXPI_ARM_PAIRS
static float widened(int pairs, uint32_t code) {
    mixp_f16 h;
    h.bits = (uint16_t)code;
    return pairs == MIXPI_PAIRS_F16 ? mixp_f32_from_f16(h) : mixp_f32_of_bits(code << 16);
}

/* One row of 16 columns, as mixpi_pairs_answer asks for, with step(a, b, c) for each pair: a[0],
 * b[0] of k and a[1], b[1] of k+1. */
static void pairs_tile(const mixpi_tile *t, float (*step)(const float *a, const float *b, float c)) {
    int     j, first = MIXPI_ARM ? 0 : 16;
    for (j = 0; j < 16; j++) {
        float sum = 0.0f;
        for (int64_t p = 0; p < t->depth; p++) {
            uint32_t u = mixp_bits_of_f32(t->a[p * t->a_step]);
            uint32_t v = mixp_bits_of_f32(t->b[p * t->b_step + j]);
            float    a[2], b[2];
            a[0] = widened(t->pairs, u >> first & 0xFFFFu);
            a[1] = widened(t->pairs, u >> (16 - first) & 0xFFFFu);
            b[0] = widened(t->pairs, v >> first & 0xFFFFu);
            b[1] = widened(t->pairs, v >> (16 - first) & 0xFFFFu);
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
/* The sum of two floats rounded to odd: inexact, it is the neighbour whose last bit is 1. */
static float odd_sum(float a, float b) {
    volatile float s = a + b, back = s - a, rest = (a - (s - back)) + (b - back);
    if (rest == 0.0f || (mixp_bits_of_f32(s) & 1u)) return s;
    return nextafterf(s, rest > 0.0f ? INFINITY : -INFINITY);
}
static float flushed(float x)
{ return mixp_bits_of_f32(x) & 0x7F800000u ? x : 0.0f; }
static float pairs_bfdot(const float *a, const float *b, float c)
{ return odd_sum(c, odd_sum(flushed(a[0]) * flushed(b[0]), flushed(a[1]) * flushed(b[1]))); }
static float pairs_of_f16_sums(const float *a, const float *b, float c) {
    float first = mixp_f32_from_f16(mixp_f16_from_f32(a[0] * b[0]));
    return fmaf(a[1], b[1], first + c);
}
static float f16_flushed(float x) { return fabsf(x) < 6.103515625e-05f ? 0.0f : x; }
static float pairs_without_small_f16(const float *a, const float *b, float c)
{ return fmaf(f16_flushed(a[1]), f16_flushed(b[1]), fmaf(f16_flushed(a[0]), f16_flushed(b[0]), c)); }

#define TILE(step) static void tile_##step(const mixpi_tile *t) { pairs_tile(t, pairs_##step); }
TILE(in_order) TILE(even_first) TILE(exact_sum) TILE(toward_zero) TILE(bfdot)
TILE(of_f16_sums) TILE(without_small_f16)
#endif

/* Tiles that answer as other machines would: only the right one passes. */
static void only_the_right_answer_passes(void) {
#if MIXPI_BF16 || MIXPI_ARM_PAIRS
    CHECK(mixpi_pairs_answer(tile_in_order, MIXPI_PAIRS_BF16));
    CHECK(!mixpi_pairs_answer(tile_even_first, MIXPI_PAIRS_BF16));
    CHECK(!mixpi_pairs_answer(tile_exact_sum, MIXPI_PAIRS_BF16));
    CHECK(!mixpi_pairs_answer(tile_toward_zero, MIXPI_PAIRS_BF16));
    CHECK(!mixpi_pairs_answer(tile_bfdot, MIXPI_PAIRS_BF16));
#else
    SKIP("the compiler has no such instructions");
#endif
}
static void the_same_of_f16(void) {
#if MIXPI_BF16 || MIXPI_ARM_PAIRS
    CHECK(mixpi_pairs_answer(tile_in_order, MIXPI_PAIRS_F16));
    CHECK(!mixpi_pairs_answer(tile_even_first, MIXPI_PAIRS_F16));
    CHECK(!mixpi_pairs_answer(tile_toward_zero, MIXPI_PAIRS_F16));
    CHECK(!mixpi_pairs_answer(tile_of_f16_sums, MIXPI_PAIRS_F16));
    CHECK(!mixpi_pairs_answer(tile_without_small_f16, MIXPI_PAIRS_F16));
#else
    SKIP("the compiler has no such instructions");
#endif
}
int main(void) {
    RUN(only_the_right_answer_passes);
    RUN(the_same_of_f16);
    return test_report();
}
