#pragma once
#include "agreement.h"
#include "elements.h"
/* --- states of fewer bytes ----------------------------------------------------------------- *
 *
 * Random numbers are keyed by (seed, applied steps, tensor, element), with one word per element.
 * The first moment uses the word's lower half, the second moment its upper half, a master a mix.
 */
MIXPREC_HD uint64_t mixpi_state_key(uint64_t seed, int64_t applied, uint64_t tensor)
{ return mixp_random_key(seed ^ 0x6F70745F73746174u, (uint64_t)applied, tensor); }
/* The key of the block of 2^32 elements with `element`. */
MIXPREC_HD uint64_t mixpi_state_key_of(uint64_t key, uint64_t element)
{ return key + (element >> 32) * 0x9E3779B97F4A7C15u; }
/* The word of one element. Every element of every step needs a word, and 64-bit vector products
 * take several times as long as 32-bit products. So the word comes from two 32-bit rounds of
 * multiply and xor-shift (Wellons' constants of least bias), with half of the key before each. */
MIXPREC_HD uint32_t mixpi_state_random(uint64_t key, uint64_t element) {
    const uint64_t k = mixpi_state_key_of(key, element);
    uint32_t x = (uint32_t)element + (uint32_t)k;
    x = (x ^ x >> 16) * 0x7FEB352Du;
    x = (x ^ x >> 15) + (uint32_t)(k >> 32);
    x *= 0x846CA68Bu;
    return x ^ x >> 16;
}
MIXPREC_HD uint32_t mixpi_random_m(uint32_t word) { return word & 0xFFFFu; }
MIXPREC_HD uint32_t mixpi_random_v(uint32_t word) { return word >> 16; }
MIXPREC_HD uint32_t mixpi_random_master(uint32_t word) {
    return (word * 0x9E3779B1u) >> 24;
}

/* x rounded to bf16 with 16 random bits. */
MIXPREC_HD uint32_t mixpi_state_bf16(float x, uint32_t random) {
    uint32_t u = mixp_bits_of_f32(x);
    uint32_t nan = u | 0x400000u;
    u = (u & 0x7FFFFFFFu) > 0x7F800000u ? nan : u + random;
    return u >> 16;
}

/* The bits of |x|, for the largest magnitude of a block; 0 for Inf and NaN, which do not count. */
MIXPREC_HD uint32_t mixpi_state_size(float x) {
    uint32_t a = mixp_bits_of_f32(x) & 0x7FFFFFFFu;
    return a < 0x7F800000u ? a : 0u;
}

/* The scale of a block of first moments, an f8_e8m0, from the bits of the largest magnitude.
 * Divided by the scale, the largest is at least 128 and less than 256. The scale is a power of two,
 * so a change of scale is exact. */
MIXPREC_HD uint32_t mixpi_state_scale_m(uint32_t largest) {
    uint32_t exponent = largest >> 23;
    return exponent > 7u ? exponent - 7u : 1u;
}

/* A first moment rounded to f8_e4m3 with 16 random bits. Subnormal results round to nearest: random
 * rounding could enlarge a small moment, which would then be divided by a small root. NaN and Inf
 * become NaN. */
MIXPREC_HD uint32_t mixpi_state_m(float x, uint32_t scale, uint32_t random) {
    uint32_t y = mixp_bits_of_f32(x * mixp_f32_of_bits((254u - scale) << 23));
    uint32_t a = y & 0x7FFFFFFFu;
    uint32_t normal = ((a + (random << 4)) >> 20) - (120u << 3);
    uint32_t tiny = mixp_bits_of_f32(mixp_f32_of_bits(a) + 16384.0f) - 0x46800000u;
    uint32_t code = a < 0x3C800000u ? tiny : normal;
    code = a < 0x7F800000u ? code : 0x7Fu;
    return (y >> 24 & 0x80u) | code;
}
MIXPREC_HD float mixpi_state_m_value(uint32_t code, uint32_t scale) {
    float unit = mixp_f32_of_bits(scale << 23);
    return mixp_f32_of_bits(mixpi_f32_of_e4m3(code)) * unit;
}

/* The scale of a block of second moments, from the bits of the largest root. The rounded root is
 * less than 2 times the scale. */
MIXPREC_HD uint32_t mixpi_state_scale_v(uint32_t largest) {
    uint32_t exponent = (largest + 0xFFFFFu) >> 23;
    return exponent > 15u ? exponent : 15u;
}

/* The code of a second moment's root, rounded with 16 random bits. Codes 1 to 254 hold exponent and
 * mantissa in one number, 16 codes to the octave, down from the scale. Only a root of 0 gets code
 * 0: if a small root became 0, its weight would move by the first moment over eps. Code 255 is Inf
 * or NaN; the weight of a NaN is NaN already. */
MIXPREC_HD uint32_t mixpi_state_v(float root, uint32_t scale, uint32_t random) {
    uint32_t a = mixp_bits_of_f32(root) & 0x7FFFFFFFu;
    int32_t code = (int32_t)((a + (random << 3)) >> 19) - (int32_t)((scale - 15u) << 4);
    code = code > 1 ? code : 1;
    code = a < 0x7F800000u ? code : 255;
    return a ? (uint32_t)code : 0u;
}
MIXPREC_HD float mixpi_state_v_value(uint32_t code, uint32_t scale) {
    uint32_t u = (code + ((scale - 15u) << 4)) << 19;
    float root;
    u = code < 255u ? u : 0x7F800000u;
    root = mixp_f32_of_bits(code ? u : 0u);
    return root * root;
}

/* A master weight in two parts: the bf16 weight (upper bits) and the rest (lower bits). The weight
 * is the nearest bf16 to the master. Ties round up in magnitude: with ties to even, two masters
 * would have the same parts. NaN is a special case, because the carry would turn it into -0. */
typedef struct mixpi_master_parts { uint32_t weight, rest; } mixpi_master_parts;

/* Parts that hold the master exactly. */
MIXPREC_HD mixpi_master_parts mixpi_master_to_16(float master) {
    uint32_t u = mixp_bits_of_f32(master);
    uint32_t nan = (u & 0x7FFFFFFFu) > 0x7F800000u;
    mixpi_master_parts s;
    s.weight = nan ? u >> 16 | 0x40u : (u + 0x8000u) >> 16;
    s.rest = nan ? 0u : u & 0xFFFFu;
    return s;
}
MIXPREC_HD float mixpi_master_from_16(uint32_t weight, uint32_t rest) {
    uint32_t carried = (rest & 0x8000u) << 1;
    return mixp_f32_of_bits((weight << 16) + rest - carried);
}

/* Parts that hold the master's upper 24 bits, rounded with 8 random bits. */
MIXPREC_HD mixpi_master_parts mixpi_master_to_8(float master, uint32_t random) {
    uint32_t u = mixp_bits_of_f32(master);
    uint32_t nan = (u & 0x7FFFFFFFu) > 0x7F800000u;
    uint32_t kept = (u + random) >> 8;
    mixpi_master_parts s;
    s.weight = nan ? u >> 16 | 0x40u : (kept + 0x80u) >> 8;
    s.rest = nan ? 0u : kept & 0xFFu;
    return s;
}
MIXPREC_HD float mixpi_master_from_8(uint32_t weight, uint32_t rest) {
    uint32_t carried = (rest & 0x80u) << 1;
    return mixp_f32_of_bits(((weight << 8) + rest - carried) << 8);
}

/* --- numbers below 16 bits: see mixp_quantise_args --- */

/* The grid of an element: magnitudes as f32 bits. */
typedef struct mixpi_grid {
    int      shift;             /* mantissa bits of f32 that the element lacks             */
    uint32_t max, normal;       /* largest value; smallest normal number                   */
    uint32_t magic;             /* f32 number whose unit in the last place is the element's step
                                   below its normal numbers                                */
    float    step, largest;
} mixpi_grid;

MIXPREC_HD mixpi_grid mixpi_grid_of(mixp_dtype element) {
    const mixpi_grid e4m3 = { 20, 0x43E00000u, 0x3C800000u, 0x46800000u, MIXP_E4M3_TINY,
                              MIXP_E4M3_MAX };
    const mixpi_grid e5m2 = { 21, 0x47600000u, 0x38800000u, 0x43000000u, MIXP_E5M2_TINY,
                              MIXP_E5M2_MAX };
    const mixpi_grid e2m1 = { 22, 0x40C00000u, 0x3F800000u, 0x4A800000u, 0.5f, 6.0f };
    return element == MIXP_F8_E4M3 ? e4m3 : element == MIXP_F8_E5M2 ? e5m2 : e2m1;
}

/* All ones if a < b, both below 2^31; else 0. Without branches, so that compilers use vectors. */
MIXPREC_HD uint32_t mixpi_q_below(uint32_t a, uint32_t b) { return 0u - ((a - b) >> 31); }
MIXPREC_HD uint32_t mixpi_q_choose(uint32_t mask, uint32_t a, uint32_t b)
{ return (a & mask) | (b & ~mask); }

/* The bits of a magnitude rounded to the grid, and at most its largest value; a NaN stays. */
MIXPREC_HD uint32_t mixpi_grid_round(const mixpi_grid *g, uint32_t a) {
    const uint32_t capped = mixpi_q_choose(mixpi_q_below(a, g->max), a, g->max);
    const uint32_t half = (1u << (g->shift - 1)) - 1u, odd = capped >> g->shift & 1u;
    const uint32_t normal = (capped + half + odd) >> g->shift << g->shift;
    const uint32_t few = mixp_bits_of_f32(mixp_f32_of_bits(capped) + mixp_f32_of_bits(g->magic));
    const uint32_t tiny = mixp_bits_of_f32((float)(int32_t)(few - g->magic) * g->step);
    const uint32_t number = mixpi_q_choose(mixpi_q_below(capped, g->normal), tiny, normal);
    return mixpi_q_choose(mixpi_q_below(0x7F800000u, a), a, number);
}

/* The same for e2m1, rounded up when the upper 22 bits of `random` lie below the part cut off. */
MIXPREC_HD uint32_t mixpi_grid_random(const mixpi_grid *g, uint32_t a, uint32_t random) {
    const uint32_t capped = mixpi_q_choose(mixpi_q_below(a, g->max), a, g->max);
    const uint32_t up = 0x3FFFFFu - (random >> 10), below = mixpi_q_below(capped, g->normal);
    const float cut = mixp_f32_of_bits(capped & below) * 8388608.0f;
    const uint32_t steps = ((uint32_t)(int32_t)cut + up) >> 22;
    const uint32_t tiny = mixp_bits_of_f32((float)(int32_t)steps * g->step);
    const uint32_t number = mixpi_q_choose(below, tiny, (capped + up) >> 22 << 22);
    return mixpi_q_choose(mixpi_q_below(0x7F800000u, a), a, number);
}

/* The bits of a quantised magnitude. x: bits of the element; a: magnitude of its product with the
 * scale; number: `a` on the grid. An Inf or NaN of x stays, so that the product is not finite. */
MIXPREC_HD uint32_t mixpi_grid_keep(uint32_t x, uint32_t a, uint32_t number)
{ return mixpi_q_choose(mixpi_q_below(0x7F7FFFFFu, x & 0x7FFFFFFFu), a, number); }

/* One block's scales: x is multiplied by `in`, the rounded value by `out`. */
typedef struct mixpi_scales { float in, out; } mixpi_scales;

MIXPREC_HD int mixpi_amax_is_usable(uint32_t amax) { return amax && amax < 0x7F800000u; }

/* limit / amax, at most the largest f32; 1 if amax is 0, Inf or NaN. */
MIXPREC_HD float mixpi_scale_to(float limit, uint32_t amax) {
    float s;
    if (!mixpi_amax_is_usable(amax)) return 1.0f;
    s = limit / mixp_f32_of_bits(amax);
    return mixp_bits_of_f32(s) == 0x7F800000u ? mixp_f32_of_bits(0x7F7FFFFFu) : s;
}

/* The power of two with the biased exponent e, 0 to 254. */
MIXPREC_HD float mixpi_q_power(int e)
{ return mixp_f32_of_bits(e ? (uint32_t)e << 23 : 0x400000u); }

MIXPREC_HD mixpi_scales mixpi_scales_power(float limit, uint32_t amax) {
    const int e = (int)(mixp_bits_of_f32(mixpi_scale_to(limit, amax)) >> 23);
    mixpi_scales s;
    s.in = mixpi_q_power(e);
    s.out = mixpi_q_power(254 - e);
    return s;
}

/* The biased exponent of amax / limit, rounded up to a power of two. */
MIXPREC_HD int mixpi_e8m0_above(float limit, uint32_t amax) {
    const uint32_t t = mixp_bits_of_f32(mixp_f32_of_bits(amax) * (1.0f / limit));
    int e = (int)(t >> 23);
    e += (t & 0x7FFFFFu) != 0 && (e > 0 || t > 0x400000u);
    return e > 254 ? 254 : e;
}

/* The exponents of two between 1 and the element's largest value. */
MIXPREC_HD uint32_t mixpi_grid_top(const mixpi_grid *g) { return (g->max >> 23) - 127u; }

/* The biased exponent of amax after `add` to its bits, less that of the element's largest value. */
MIXPREC_HD int mixpi_e8m0_of_power(const mixpi_grid *g, uint32_t add, uint32_t amax) {
    const uint32_t e = (amax + add) >> 23, top = mixpi_grid_top(g);
    return e > top ? (int)(e - top) : 0;
}

/* e: the biased exponent of the scale. */
MIXPREC_HD mixpi_scales mixpi_scales_e8m0(int e, uint32_t amax) {
    mixpi_scales s;
    s.in = mixpi_q_power(254 - e);
    s.out = mixpi_q_power(e);
    if (amax > 0x7F800000u) s.in = s.out = mixp_f32_of_bits(amax);
    return s;
}

/* tensor: the scale of the whole array. expand 0: the source's usual scale. Otherwise a scale of
 * 4over6: the block's largest value becomes 6 (expand 1) or 4 (expand 1.5). A block with an Inf
 * becomes NaN, because e2m1 has none. */
MIXPREC_HD mixpi_scales mixpi_scales_e4m3(float tensor, float expand, uint32_t amax) {
    const float size = mixp_f32_of_bits(amax == 0x7F800000u ? 0x7FC00000u : amax);
    float wanted = size * (tensor * (1.0f / 6.0f));
    mixpi_scales s;
    if (expand > 0.0f) wanted = size / 6.0f * tensor * expand;
    s.out = mixp_f32_from_e4m3(mixp_e4m3_from_f32_sat(wanted));
    s.in = amax ? 1.0f / (s.out * (1.0f / tensor)) : 0.0f;
    if (mixp_bits_of_f32(s.in) == 0x7F800000u) s.in = mixp_f32_of_bits(0x7F7FFFFFu);
    return s;
}

/* The code of an e2m1 value. */
MIXPREC_HD uint32_t mixpi_e2m1_code(float x) {
    const uint32_t u = mixp_bits_of_f32(x), top = (u & 0x7FFFFFFFu) >> 22;
    const uint32_t below = top == 0xFCu;        /* 0.5 */
    return ((top > 0xFCu ? top - 0xFCu : below) & 7u) | (u >> 28 & 8u);
}
MIXPREC_HD float mixpi_e2m1_value(uint32_t code) {
    const uint32_t a = code & 7u, below = a ? 0x3F000000u : 0u;
    return mixp_f32_of_bits((a > 1 ? (a + 0xFCu) << 22 : below) | (code & 8u) << 28);
}

/* --- attention: rows whose largest score repeats ---
 *
 * If two keys have equal scores and all others are far below, y is the mean of two values of 8 or
 * 11 bits, plus a small remainder from the other keys. Half of these means lie halfway between two
 * numbers. Rounding to nearest then follows the sign of the remainder, which may be the same in
 * many rows: y is biased by up to a quarter of a unit, and so is delta = dy . y, which pulls the
 * gradient of q in one direction until training fails (arXiv 2510.04212; there the sum is stored
 * before its division, with the same effect). Weights are not the cause: their products with v are
 * summed in f32. So y of such a row is rounded up or down with the probabilities that make its mean
 * right, by a hash of its own bits: no row depends on another.
 */

/* Is the sum of a row's weights, of which the largest is 1, within 2^-12 of an integer from 2 to 8,
 * but not equal to it? A larger remainder moves y away from halfway. Of rows whose weights are
 * spread, one in 2,000 has such a sum by chance. */
MIXPREC_HD int mixpi_top_repeats(float sum) {
    float rest;
    if (!(sum > 1.5f && sum < 8.5f)) return 0;
    rest = sum - (float)(int32_t)(sum + 0.5f);
    return (rest > 0.0f && rest < 0.000244140625f) || (rest < 0.0f && rest > -0.000244140625f);
}
/* Rounds x at random to one of the two numbers of f16 or bf16 around it. The random number is a
 * hash of x. Returns an x of 32768 or more unchanged: the caller rounds it to nearest. */
MIXPREC_HD float mixpi_round_stochastically(mixp_dtype dtype, float x) {
    const uint32_t bits = mixp_bits_of_f32(x), cut = dtype == MIXP_BF16 ? 0xFFFFu : 0x1FFFu;
    uint32_t coin = (bits ^ bits >> 15) * 0x2C1B3C6Du;
    coin = (coin ^ coin >> 12) * 0x297A2D39u;
    if ((bits & 0x7FFFFFFFu) >= 0x47000000u) return x;  /* 32768 */
    return mixp_f32_of_bits((bits + ((coin ^ coin >> 15) & cut)) & ~cut);
}
