#pragma once
#include "look.c"
/* --- quantise and hadamard: see mixp_quantise_args ------------------------------------------ *
 * Blocks of 16 columns or more are taken 16 at a time, so that their scales are computed together.
 * A block of one column has 15 neighbours in the same registers. */

/* --- one register: the bits of mixpi_grid_round, mixpi_grid_random and mixpi_scales_of --- */
#if MIXPI_PASS == 0
MIXPI_V mixpi_vbits MIXPI_P(q_larger)(mixpi_vbits a, mixpi_vbits b) { return a > b ? a : b; }
MIXPI_V mixpi_vbits MIXPI_P(q_keep)(mixpi_vbits x, mixpi_vbits a, mixpi_vbits number)
{ return mixpi_grid_keep(x, a, number); }
MIXPI_V mixpi_vbits MIXPI_P(q_bf16)(mixpi_vbits u) { return mixpi_bf16_of_f32(u); }
MIXPI_V mixpi_vbits MIXPI_P(q_nearest)(const mixpi_grid *g, mixpi_vbits a)
{ return mixpi_grid_round(g, a); }
MIXPI_V mixpi_vbits MIXPI_P(q_random)(const mixpi_grid *g, mixpi_vbits a, mixpi_vbits random)
{ return mixpi_grid_random(g, a, random); }
MIXPI_V void MIXPI_P(q_scales_e4m3)(mixpi_vreg tensor, float expand, mixpi_vbits amax,
                                    mixpi_vreg *in, mixpi_vreg *out) {
    mixpi_scales s = mixpi_scales_e4m3(tensor, expand, amax);
    *in = s.in;
    *out = s.out;
}
MIXPI_V void MIXPI_P(q_scales)(const mixpi_quantising *q, mixpi_vreg tensor, mixpi_vbits amax,
                               mixpi_vreg *in, mixpi_vreg *out) {
    mixpi_scales s = mixpi_scales_of(&q->k, &q->grid, tensor, amax);
    *in = s.in;
    *out = s.out;
}

#else
MIXPI_V mixpi_vbits MIXPI_P(q_larger)(mixpi_vbits a, mixpi_vbits b)
{ return mixpi_vbits_max(a, b); }
MIXPI_V mixpi_vbits MIXPI_P(q_bf16)(mixpi_vbits u) { return mixpi_vcode_bf16(u); }

MIXPI_V mixpi_vbits MIXPI_P(q_keep)(mixpi_vbits x, mixpi_vbits a, mixpi_vbits number)
{ return mixpi_vbits_gt(x & 0x7FFFFFFFu, mixpi_vbits_all(0x7F7FFFFFu), a, number); }

/* number, but a NaN in a stays. */
MIXPI_V mixpi_vbits MIXPI_P(q_unless_nan)(mixpi_vbits a, mixpi_vbits number)
{ return mixpi_vbits_gt(a, mixpi_vbits_all(0x7F800000u), a, number); }

MIXPI_V mixpi_vbits MIXPI_P(q_nearest)(const mixpi_grid *g, mixpi_vbits a) {
    const uint32_t half = (1u << (g->shift - 1)) - 1u, keep = ~0u << g->shift;
    const mixpi_vbits capped = mixpi_vbits_min(a, mixpi_vbits_all(g->max));
    const mixpi_vbits odd = capped >> (uint32_t)g->shift & 1u;
    const mixpi_vbits normal = (capped + half + odd) & keep;
    const mixpi_vreg few = mixpi_rof(capped) + mixpi_rset(mixp_f32_of_bits(g->magic));
    const mixpi_vreg tiny = mixpi_vbits_times(mixpi_rbits(few) - g->magic, g->step);
    return MIXPI_P(q_unless_nan)(a, mixpi_vbits_gt(mixpi_vbits_all(g->normal), capped,
                                             mixpi_rbits(tiny), normal));
}

/* Shifting the mantissa by the exponent truncates, like a conversion to an integer. */
MIXPI_V mixpi_vbits MIXPI_P(q_random)(const mixpi_grid *g, mixpi_vbits a, mixpi_vbits random) {
    const mixpi_vbits capped = mixpi_vbits_min(a, mixpi_vbits_all(g->max));
    const mixpi_vbits up = 0x3FFFFFu - (random >> 10), zero = mixpi_vbits_all(0);
    const mixpi_vbits below = mixpi_vbits_max(127u - (capped >> 23), zero);
    const mixpi_vbits mantissa = (capped & 0x7FFFFFu) | 0x800000u;
    const mixpi_vbits cut = mantissa >> mixpi_vbits_min(below, mixpi_vbits_all(31));
    const mixpi_vreg tiny = mixpi_vbits_times((cut + up) >> 22, g->step);
    return MIXPI_P(q_unless_nan)(a, mixpi_vbits_gt(mixpi_vbits_all(g->normal), capped,
                                             mixpi_rbits(tiny), (capped + up) & 0xFFC00000u));
}

/* The powers of two with the biased exponents e, 0 to 254. */
MIXPI_V mixpi_vreg MIXPI_P(q_powers)(mixpi_vbits e)
{ return mixpi_rof(mixpi_vbits_max(e << 23, mixpi_vbits_all(0x400000u))); }

MIXPI_V void MIXPI_P(q_scales_power)(float limit, mixpi_vbits amax, mixpi_vreg *in,
                                     mixpi_vreg *out) {
    const mixpi_vbits one = mixpi_vbits_all(0x3F800000u), inf = mixpi_vbits_all(0x7F800000u);
    mixpi_vbits s = mixpi_rbits(mixpi_rset(limit) / mixpi_rof(amax));
    s = mixpi_vbits_min(s, mixpi_vbits_all(0x7F7FFFFFu));
    s = mixpi_vbits_gt(amax, mixpi_vbits_all(0), s, one);
    s = mixpi_vbits_gt(inf, amax, s, one) >> 23;
    *in = MIXPI_P(q_powers)(s);
    *out = MIXPI_P(q_powers)(254u - s);
}

/* mixpi_e8m0_above */
MIXPI_V mixpi_vbits MIXPI_P(q_e8m0_above)(float limit, mixpi_vbits amax) {
    const mixpi_vbits t = mixpi_rbits(mixpi_rof(amax) * mixpi_rset(1.0f / limit));
    const mixpi_vbits up = mixpi_vbits_gt(mixpi_vbits_all(0x800000u), t,
                                          mixpi_vbits_all(0x3FFFFFu), mixpi_vbits_all(0x7FFFFFu));
    return mixpi_vbits_min((t + up) >> 23, mixpi_vbits_all(254));
}

/* mixpi_e8m0_of_power */
MIXPI_V mixpi_vbits MIXPI_P(q_e8m0_of_power)(const mixpi_grid *g, mixp_e8m0_rounding how,
                                             mixpi_vbits amax) {
    const mixpi_vbits e = (amax + mixpi_e8m0_add(g, how)) >> 23;
    const uint32_t top = mixpi_grid_top(g);
    return mixpi_vbits_max(e, mixpi_vbits_all(top)) - top;
}

MIXPI_V void MIXPI_P(q_scales_e8m0)(const mixpi_quantising *q, mixpi_vbits amax, mixpi_vreg *in,
                                    mixpi_vreg *out) {
    const mixpi_vbits e = q->k.e8m0 == MIXP_E8M0_RCEIL
                        ? MIXPI_P(q_e8m0_above)(q->grid.largest, amax)
                        : MIXPI_P(q_e8m0_of_power)(&q->grid, q->k.e8m0, amax);
    *in = mixpi_rof(MIXPI_P(q_unless_nan)(amax, mixpi_rbits(MIXPI_P(q_powers)(254u - e))));
    *out = mixpi_rof(MIXPI_P(q_unless_nan)(amax, mixpi_rbits(MIXPI_P(q_powers)(e))));
}

/* expand: as of mixpi_scales_e4m3. */
MIXPI_V void MIXPI_P(q_scales_e4m3)(mixpi_vreg tensor, float expand, mixpi_vbits amax,
                                    mixpi_vreg *in, mixpi_vreg *out) {
    const mixpi_grid grid = mixpi_grid_of(MIXP_F8_E4M3);
    const mixpi_vbits nan = mixpi_vbits_all(0x7FC00000u);
    const mixpi_vbits known = mixpi_vbits_gt(amax, mixpi_vbits_all(0x7F7FFFFFu), nan, amax);
    const mixpi_vbits most = mixpi_vbits_all(0x7F7FFFFFu);
    const mixpi_vreg one = mixpi_rset(1.0f);
    mixpi_vreg wanted = mixpi_rof(known) * (tensor * mixpi_rset(1.0f / 6.0f));
    mixpi_vbits s;
    if (expand > 0.0f)
        wanted = mixpi_rof(known) / mixpi_rset(6.0f) * tensor * mixpi_rset(expand);
    *out = mixpi_rof(MIXPI_P(q_nearest)(&grid, mixpi_rbits(wanted)));
    s = mixpi_rbits(one / (*out * (one / tensor)));
    s = MIXPI_P(q_unless_nan)(s, mixpi_vbits_min(s, most));
    *in = mixpi_rof(mixpi_vbits_gt(amax, mixpi_vbits_all(0), s, mixpi_vbits_all(0)));
}

MIXPI_V void MIXPI_P(q_scales)(const mixpi_quantising *q, mixpi_vreg tensor, mixpi_vbits amax,
                               mixpi_vreg *in, mixpi_vreg *out) {
    *in = tensor;
    *out = mixpi_rset(1.0f);
    if (q->k.scale == MIXP_SCALE_POWER) MIXPI_P(q_scales_power)(q->grid.largest, amax, in, out);
    if (q->k.scale == MIXP_SCALE_E8M0) MIXPI_P(q_scales_e8m0)(q, amax, in, out);
}
#endif

/* --- 16 elements --- */
/* The scales of 16 elements. */
typedef struct MIXPI_P(q_pair) { mixpi_v in, out; } MIXPI_P(q_pair);

/* expand: as of mixpi_scales_e4m3. */
MIXPI_RARE MIXPI_P(q_pair) MIXPI_P(q_e4m3_16)(mixpi_v tensor, float expand, mixpi_vcodes amax) {
    MIXPI_P(q_pair) s;
    MIXPI_EACH(MIXPI_P(q_scales_e4m3)(MIXPI_R(tensor, i), expand, MIXPI_R(amax, i),
                                      &MIXPI_R(s.in, i), &MIXPI_R(s.out, i)))
    return s;
}
MIXPI_RARE MIXPI_P(q_pair) MIXPI_P(q_scales_16)(const mixpi_quantising *q, mixpi_v tensor,
                                                mixpi_vcodes amax) {
    MIXPI_P(q_pair) s;
    if (q->k.scale == MIXP_SCALE_E4M3)
        return MIXPI_P(q_e4m3_16)(tensor, q->k.choice ? 1.0f : 0.0f, amax);
    MIXPI_EACH(MIXPI_P(q_scales)(q, MIXPI_R(tensor, i), MIXPI_R(amax, i), &MIXPI_R(s.in, i),
                                 &MIXPI_R(s.out, i)))
    return s;
}

MIXPI_V mixpi_v MIXPI_P(q_load)(mixp_in x, int64_t at) {
    if (x.dtype == MIXP_F32) return mixpi_vload((const float *)x.data + at);
    return mixpi_vget(MIXP_BF16, (const uint16_t *)x.data + at);
}

/* The first n elements, n < 16, then 0. */
MIXPI_RARE mixpi_v MIXPI_P(q_load_n)(mixp_in x, int64_t at, int64_t n) {
    const size_t size = x.dtype == MIXP_F32 ? 4 : 2;
    float some[16] = { 0 };
    memcpy(some, (const char *)x.data + (size_t)at * size, (size_t)n * size);
    x.data = some;
    return MIXPI_P(q_load)(x, 0);
}
/* The first min(left, 16) elements, then 0. */
MIXPI_V mixpi_v MIXPI_P(q_load_part)(mixp_in x, int64_t at, int64_t left)
{ return left >= 16 ? MIXPI_P(q_load)(x, at) : MIXPI_P(q_load_n)(x, at, left); }

MIXPI_V mixpi_vcodes MIXPI_P(q_none)(void) {
    const mixpi_vbits none = { 0 };
    mixpi_vcodes c;
    MIXPI_EACH(MIXPI_R(c, i) = none)
    return c;
}

/* The larger of `largest` and the magnitudes of a, as bits. */
MIXPI_V mixpi_vcodes MIXPI_P(q_look)(mixpi_vcodes largest, mixpi_v a) {
    MIXPI_EACH(MIXPI_R(largest, i) = MIXPI_P(q_larger)(MIXPI_R(largest, i),
                                                 mixpi_rbits(MIXPI_R(a, i)) & 0x7FFFFFFFu))
    return largest;
}

/* The largest of 16 magnitudes. Those of bf16 are compared as floats without their last bit, which
 * is 0, and with the exponent moved: no NaN, no subnormals. */
MIXPI_V uint32_t MIXPI_P(q_largest)(mixpi_vcodes amax, mixp_dtype dtype) {
    const uint32_t move = 0x800000u;
    uint32_t a[16], largest = 0;
    mixpi_v v;
    if (dtype == MIXP_BF16) {
        MIXPI_EACH(MIXPI_R(v, i) = mixpi_rof((MIXPI_R(amax, i) >> 1) + move))
        return (mixp_bits_of_f32(mixpi_vmaxof(v)) - move) << 1;
    }
    memcpy(a, &amax, sizeof a);
    for (int k = 0; k < 16; k++) largest = a[k] > largest ? a[k] : largest;
    return largest;
}

/* The bf16 codes of a, quantised. `first`: the index of a's first element. */
MIXPI_V mixpi_vcodes MIXPI_P(q_codes)(const mixpi_grid *g, mixpi_v a, MIXPI_P(q_pair) s) {
    mixpi_vcodes c;
    MIXPI_EACH({
        const mixpi_vbits v = mixpi_rbits(MIXPI_R(a, i) * MIXPI_R(s.in, i));
        const mixpi_vbits size = v & 0x7FFFFFFFu;
        const mixpi_vbits x = mixpi_rbits(MIXPI_R(a, i));
        const mixpi_vbits r = MIXPI_P(q_keep)(x, size, MIXPI_P(q_nearest)(g, size));
        const mixpi_vbits value = r | (v & 0x80000000u);
        MIXPI_R(c, i) = MIXPI_P(q_bf16)(mixpi_rbits(mixpi_rof(value) * MIXPI_R(s.out, i)));
    })
    return c;
}
MIXPI_V mixpi_vcodes MIXPI_P(q_codes_random)(const mixpi_grid *g, mixpi_v a, MIXPI_P(q_pair) s,
                                       uint64_t key, int64_t first) {
    uint32_t random[16];
    mixpi_vcodes c;
    mixpi_vrandom(key, (uint64_t)first, random);
    MIXPI_EACH({
        const mixpi_vbits v = mixpi_rbits(MIXPI_R(a, i) * MIXPI_R(s.in, i));
        const mixpi_vbits size = v & 0x7FFFFFFFu;
        const mixpi_vbits up = MIXPI_P(q_random)(g, size, mixpi_vbits_at(random, i));
        const mixpi_vbits r = MIXPI_P(q_keep)(mixpi_rbits(MIXPI_R(a, i)), size, up);
        const mixpi_vbits value = r | (v & 0x80000000u);
        MIXPI_R(c, i) = MIXPI_P(q_bf16)(mixpi_rbits(mixpi_rof(value) * MIXPI_R(s.out, i)));
    })
    return c;
}

/* --- blocks ---
 * A task copies its job. A store of a vector might write the job, as far as the compiler knows, and
 * the grid would be read again after each. */

/* Writes n elements, n < 16, rounded to nearest or stochastically. */
MIXPI_RARE void MIXPI_P(q_write_n)(const mixpi_quantising *q, int64_t at, int64_t n,
                                   MIXPI_P(q_pair) s) {
    const mixpi_v a = MIXPI_P(q_load_n)(q->k.x, at, n);
    uint16_t some[16];
    mixpi_vcodes c;
    if (q->k.stochastic) c = MIXPI_P(q_codes_random)(&q->grid, a, s, q->key, at);
    else c = MIXPI_P(q_codes)(&q->grid, a, s);
    mixpi_vput_codes(some, c, 1, 0);
    memcpy(q->k.y + at, some, (size_t)n * sizeof *q->k.y);
}

/* Writes `count` times 16 elements, `step` apart, rounded stochastically. */
MIXPI_RARE void MIXPI_P(q_write_random)(const void *job, int64_t at, int64_t step, int64_t count,
                                        MIXPI_P(q_pair) s) {
    const mixpi_quantising q = *(const mixpi_quantising *)job;
    for (; count > 0; count--, at += step) {
        const mixpi_v a = MIXPI_P(q_load)(q.k.x, at);
        mixpi_vput_codes(q.k.y + at, MIXPI_P(q_codes_random)(&q.grid, a, s, q.key, at), 1, 0);
    }
}

/* Writes n elements. q: a copy of the job. */
MIXPI_V void MIXPI_P(q_write)(const mixpi_quantising *q, const void *job, int64_t at, int64_t n,
                              MIXPI_P(q_pair) s) {
    const mixpi_grid grid = q->grid;
    const int64_t end = at + n, whole = end - n % 16;
    const mixp_in x = q->k.x;
    mixp_bf16 *y = q->k.y;

    /* Whole registers, then the rest. */
    if (q->k.stochastic) {
        MIXPI_P(q_write_random)(job, at, 16, n / 16, s);
        at = whole;
    }
    for (; at < whole; at += 16)
        mixpi_vput_codes(y + at, MIXPI_P(q_codes)(&grid, MIXPI_P(q_load)(x, at), s), 1, 0);
    if (at < end) MIXPI_P(q_write_n)((const mixpi_quantising *)job, at, end - at, s);
}

/* The largest magnitude of a block; n: its columns. */
MIXPI_V uint32_t MIXPI_P(q_block_amax)(const mixpi_quantising *q, int64_t row, int64_t rows,
                                 int64_t col, int64_t n) {
    const mixp_in x = q->k.x;
    mixpi_vcodes largest = MIXPI_P(q_none)();
    for (int64_t r = row; r < row + rows; r++) {
        const int64_t at = r * q->k.cols + col;
        for (int64_t c = 0; c < n; c += 16)
            largest = MIXPI_P(q_look)(largest, MIXPI_P(q_load_part)(x, at + c, n - c));
    }
    return MIXPI_P(q_largest)(largest, x.dtype);
}

MIXPI_K void MIXPI_P(q_row_amax)(const void *job, int64_t row) {
    const mixpi_quantising *q = (const mixpi_quantising *)job;
    q->amax[row] = MIXPI_P(q_block_amax)(q, row, 1, 0, q->k.cols);
}

/* The largest magnitudes of 16 columns, or of the last ones. */
MIXPI_K void MIXPI_P(q_column_amax)(const void *job, int64_t group) {
    const mixpi_quantising *q = (const mixpi_quantising *)job;
    const int64_t col = 16 * group, n = mixpi_min(16, q->k.cols - col);
    mixpi_vcodes largest = MIXPI_P(q_none)();
    for (int64_t r = 0; r < q->k.rows; r++) {
        const mixpi_v a = MIXPI_P(q_load_part)(q->k.x, r * q->k.cols + col, n);
        largest = MIXPI_P(q_look)(largest, a);
    }
    memcpy(q->amax + col, &largest, (size_t)n * sizeof *q->amax);
}

/* The scales of 16 arrays, or lines of one, and their amax; `same`: of one line. */
typedef struct MIXPI_P(q_arrays) { mixpi_v tensor, amax; } MIXPI_P(q_arrays);

MIXPI_RARE MIXPI_P(q_arrays) MIXPI_P(q_arrays_of)(const mixpi_quantising *q, int64_t line,
                                                  int64_t n, int same) {
    float tensor[16], amax[16];
    MIXPI_P(q_arrays) a;
    for (int64_t i = 0; i < 16; i++) {
        const int64_t at = same || i >= n ? line : line + i;
        tensor[i] = q->k.by_lines ? mixpi_scale_of_array(&q->k, q->amax[at]) : q->tensor;
        amax[i] = q->k.by_lines ? mixp_f32_of_bits(q->amax[at]) : q->most;
    }
    a.tensor = mixpi_vload(tensor);
    a.amax = mixpi_vload(amax);
    return a;
}

/* A row under one scale for the whole array. */
MIXPI_K void MIXPI_P(q_row)(const void *job, int64_t row) {
    const mixpi_quantising q = *(const mixpi_quantising *)job;
    MIXPI_P(q_pair) s;
    s.in = mixpi_vset(q.tensor);
    s.out = mixpi_vset(1.0f);
    MIXPI_P(q_write)(&q, job, row * q.k.cols, q.k.cols, s);
}

/* Writes the codes of 16 scales, or of the first n. */
MIXPI_RARE void MIXPI_P(q_keep_scales)(const mixpi_quantising *q, int64_t at, int64_t n,
                                       mixpi_v out) {
    uint8_t codes[16];
    float scales[16];
    if (q->k.scale == MIXP_SCALE_E4M3) mixpi_vput(MIXP_F8_E4M3, codes, out, 0);
    else {
        mixpi_vstore(scales, out);
        for (int i = 0; i < 16; i++) codes[i] = mixpi_scale_code(q->k.scale, scales[i]);
    }
    memcpy(q->k.scales + at, codes, (size_t)n);
}

/* --- 4over6: see mixp_4over6 --- */

/* The errors of 16 elements, which their blocks sum; see mixpi_4over6_error. array: the array's
 * amax. */
MIXPI_RARE mixpi_v MIXPI_P(q_errors)(const mixpi_quantising *q, mixpi_v array,
                                     MIXPI_P(q_pair) s, mixpi_v a) {
    const mixpi_vreg bound = mixpi_rset(mixpi_e4m3_bound(&q->k));
    const int squares = q->k.choice == MIXP_4OVER6_MSE;
    const mixpi_grid grid = q->grid;
    mixpi_v errors;
    MIXPI_EACH({
        const mixpi_vbits v = mixpi_rbits(MIXPI_R(a, i) * MIXPI_R(s.in, i));
        const mixpi_vbits number = MIXPI_P(q_nearest)(&grid, v & 0x7FFFFFFFu) | (v & 0x80000000u);
        const mixpi_vreg value = mixpi_rof(number) * MIXPI_R(s.out, i) * MIXPI_R(array, i) / bound;
        const mixpi_vreg off = value - MIXPI_R(a, i);
        MIXPI_R(errors, i) = squares ? mixpi_rfma(off, off, mixpi_rset(-0.0f))
                                     : mixpi_rof(mixpi_rbits(off) & 0x7FFFFFFFu);
    })
    return errors;
}

/* Element e of row r of 16 blocks of 16 columns, or element e of 16 blocks of one column. n: as of
 * q_choose. */
MIXPI_RARE mixpi_v MIXPI_P(q_elements)(const mixpi_quantising *q, int64_t at, int64_t n, int64_t r,
                                       int64_t e) {
    const int64_t cols = q->k.cols, step = q->k.block_cols;
    float x[16] = { 0 };
    at += step == 1 ? e * cols : r * cols + e;
    for (int64_t b = 0; b < n; b++, at += step)
        x[b] = q->k.x.dtype == MIXP_F32
             ? ((const float *)q->k.x.data)[at]
             : mixp_f32_of_bits((uint32_t)((const uint16_t *)q->k.x.data)[at] << 16);
    return mixpi_vload(x);
}

/* The scales that 16 blocks, or the first n of them, keep. at: the first element; six: their scales
 * for 6. The errors of each row are added in order, those of the rows as a tree. */
MIXPI_RARE MIXPI_P(q_pair) MIXPI_P(q_choose)(const mixpi_quantising *q,
                                             const MIXPI_P(q_arrays) *of,
                                             mixpi_vcodes amax, MIXPI_P(q_pair) six, int64_t at,
                                             int64_t n) {
    const MIXPI_P(q_pair) four = MIXPI_P(q_e4m3_16)(of->tensor, 1.5f, amax);
    int64_t lines = q->k.block_cols == 1 ? 1 : q->k.block_rows;
    mixpi_v fours[16], sixes[16];
    for (int64_t r = 0; r < lines; r++) {
        fours[r] = sixes[r] = mixpi_vzero();
        for (int64_t e = 0; e < 16; e++) {
            const mixpi_v a = MIXPI_P(q_elements)(q, at, n, r, e);
            fours[r] = mixpi_vadd(fours[r], MIXPI_P(q_errors)(q, of->amax, four, a));
            sixes[r] = mixpi_vadd(sixes[r], MIXPI_P(q_errors)(q, of->amax, six, a));
        }
    }
    while (lines /= 2)
        for (int64_t r = 0; r < lines; r++) {
            fours[r] = mixpi_vadd(fours[r], fours[r + lines]);
            sixes[r] = mixpi_vadd(sixes[r], sixes[r + lines]);
        }
    six.in = mixpi_vselect_gt(sixes[0], fours[0], four.in, six.in);
    six.out = mixpi_vselect_gt(sixes[0], fours[0], four.out, six.out);
    return six;
}

/* A row of blocks of 16 columns or more. */
MIXPI_K void MIXPI_P(q_blocks)(const void *job, int64_t strip) {
    const mixpi_quantising q = *(const mixpi_quantising *)job;
    const int64_t rows = q.k.block_rows, n = q.k.block_cols, row = strip * rows;
    const MIXPI_P(q_arrays) of =
        MIXPI_P(q_arrays_of)((const mixpi_quantising *)job, strip, 1, 1);
    for (int64_t col = 0; col < q.k.cols; col += 16 * n) {
        const int64_t blocks = mixpi_min(16, (q.k.cols - col) / n);
        uint32_t amax[16] = { 0 };
        float in[16], out[16];
        mixpi_vcodes all;
        MIXPI_P(q_pair) s;
        for (int64_t b = 0; b < blocks; b++)
            amax[b] = MIXPI_P(q_block_amax)(&q, row, rows, col + b * n, n);

        /* Sixteen scales at a time, from the largest values. */
        memcpy(&all, amax, sizeof amax);
        s = MIXPI_P(q_scales_16)((const mixpi_quantising *)job, of.tensor, all);
        if (q.k.choice)
            s = MIXPI_P(q_choose)((const mixpi_quantising *)job, &of, all, s,
                                  row * q.k.cols + col, blocks);
        if (q.k.scales)
            MIXPI_P(q_keep_scales)(&q, strip * (q.k.cols / n) + col / n, blocks, s.out);

        /* Write the codes. */
        mixpi_vstore(in, s.in);
        mixpi_vstore(out, s.out);
        for (int64_t r = row; r < row + rows; r++)
            for (int64_t b = 0; b < blocks; b++) {
                s.in = mixpi_vset(in[b]);
                s.out = mixpi_vset(out[b]);
                MIXPI_P(q_write)(&q, job, r * q.k.cols + col + b * n, n, s);
            }
    }
}

/* A row of blocks of one column. */
MIXPI_K void MIXPI_P(q_columns)(const void *job, int64_t strip) {
    const mixpi_quantising q = *(const mixpi_quantising *)job;
    const int64_t row = strip * q.k.block_rows, last = row + q.k.block_rows;
    for (int64_t col = 0; col < q.k.cols; col += 16) {
        const int64_t n = mixpi_min(16, q.k.cols - col);
        const MIXPI_P(q_arrays) of =
            MIXPI_P(q_arrays_of)((const mixpi_quantising *)job, col, n, 0);
        mixpi_vcodes amax = MIXPI_P(q_none)();
        MIXPI_P(q_pair) s;
        for (int64_t r = row; r < last; r++) {
            const mixpi_v a = MIXPI_P(q_load_part)(q.k.x, r * q.k.cols + col, n);
            amax = MIXPI_P(q_look)(amax, a);
        }
        s = MIXPI_P(q_scales_16)((const mixpi_quantising *)job, of.tensor, amax);
        if (q.k.choice)
            s = MIXPI_P(q_choose)((const mixpi_quantising *)job, &of, amax, s,
                                  row * q.k.cols + col, n);
        if (q.k.scales) MIXPI_P(q_keep_scales)(&q, strip * q.k.cols + col, n, s.out);
        if (q.k.stochastic && n == 16)
            MIXPI_P(q_write_random)(job, row * q.k.cols + col, q.k.cols, last - row, s);
        else
            for (int64_t r = row; r < last; r++)
                MIXPI_P(q_write)(&q, job, r * q.k.cols + col, n, s);
    }
}

static const mixpi_quantise_units MIXPI_P(quantise_units) =
    { MIXPI_P(q_row_amax), MIXPI_P(q_column_amax), MIXPI_P(q_row), MIXPI_P(q_blocks),
      MIXPI_P(q_columns) };
MIXPI_LINKED MIXPI_SPEED MIXPI_TARGET
mixp_result MIXPI_P(quantise)(const mixp_exec *x, const mixp_quantise_args *k)
{ return mixpi_cpu_quantise(x, k, &MIXPI_P(quantise_units)); }

/* --- the random Hadamard transform --- */

/* Writes 16 elements, or the first n. */
MIXPI_V void MIXPI_P(hadamard_put)(mixp_bf16 *y, mixpi_v a, int64_t n) {
    uint16_t some[16];
    if (n == 16) mixpi_vput(MIXP_BF16, y, a, 0);
    else {
        mixpi_vput(MIXP_BF16, some, a, 0);
        memcpy(y, some, (size_t)n * sizeof *y);
    }
}

MIXPI_V void MIXPI_P(hadamard_tile)(const mixp_hadamard_args *k, int64_t at, int64_t n) {
    mixpi_v v[16];
    for (int i = 0; i < 16; i++) {
        const mixpi_v a = MIXPI_P(q_load_part)(k->a, at + i * k->cols, n);
        v[i] = mixpi_vmul(a, mixpi_vset(mixpi_hadamard_sign(i)));
    }
    for (int step = 1; step < 16; step *= 2)
        for (int i = 0; i < 16; i++)
            if (!(i & step)) {
                const mixpi_v a = v[i], b = v[i | step];
                v[i] = mixpi_vadd(a, b);
                v[i | step] = mixpi_vsub(a, b);
            }
    for (int i = 0; i < 16; i++)
        MIXPI_P(hadamard_put)(k->y + at + i * k->cols, mixpi_vmul(v[i], mixpi_vset(0.25f)), n);
}

MIXPI_K void MIXPI_P(hadamard_strip)(const void *job, int64_t strip) {
    const mixp_hadamard_args *k = (const mixp_hadamard_args *)job;
    int64_t c;
    for (c = 0; c + 16 <= k->cols; c += 16)
        MIXPI_P(hadamard_tile)(k, strip * 16 * k->cols + c, 16);
    if (c < k->cols) MIXPI_P(hadamard_tile)(k, strip * 16 * k->cols + c, k->cols - c);
}

MIXPI_LINKED MIXPI_SPEED MIXPI_TARGET
mixp_result MIXPI_P(hadamard)(const mixp_exec *x, const mixp_hadamard_args *k)
{ return mixpi_cpu_hadamard(x, k, MIXPI_P(hadamard_strip)); }
