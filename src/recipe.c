#pragma once
#include "recipe.h"
#include "cpu/shared.c"
/* --- recipes: the quantiser ----------------------------------------------------------------- */

#define MIXPI_Q_LANES 16        /* elements that are quantised together                    */

MIXPREC_API const char *mixp_recipe_name(mixp_recipe_kind kind) {
    static const char *const names[] = { "none", "fp8_current", "fp8_delayed", "fp8_block",
                                         "mxfp8", "nvfp4" };
    MIXPI_STATIC_ASSERT(recipe_names, sizeof names / sizeof names[0] == MIXP_RECIPE_COUNT);
    return (unsigned)kind < MIXP_RECIPE_COUNT ? names[kind] : "?";
}

/* The grid of an element: magnitudes as f32 bits. */
typedef struct mixpi_grid {
    int      shift;             /* mantissa bits of f32 that the element lacks             */
    uint32_t max, normal;       /* largest value; smallest normal number                   */
    uint32_t magic;             /* f32 number whose unit in the last place is the element's step
                                   below its normal numbers                                */
    float    step, largest;
} mixpi_grid;

static mixpi_grid mixpi_grid_of(mixp_dtype element) {
    const mixpi_grid e4m3 = { 20, 0x43E00000u, 0x3C800000u, 0x46800000u, MIXP_E4M3_TINY,
                              MIXP_E4M3_MAX };
    const mixpi_grid e5m2 = { 21, 0x47600000u, 0x38800000u, 0x43000000u, MIXP_E5M2_TINY,
                              MIXP_E5M2_MAX };
    const mixpi_grid e2m1 = { 22, 0x40C00000u, 0x3F800000u, 0x4A800000u, 0.5f, 6.0f };
    return element == MIXP_F8_E4M3 ? e4m3 : element == MIXP_F8_E5M2 ? e5m2 : e2m1;
}

/* All ones if a < b, both below 2^31; else 0. Without branches, so that compilers use vectors. */
static uint32_t mixpi_q_below(uint32_t a, uint32_t b) { return 0u - ((a - b) >> 31); }
static uint32_t mixpi_q_choose(uint32_t mask, uint32_t a, uint32_t b)
{ return (a & mask) | (b & ~mask); }

/* The bits of a magnitude rounded to the grid, and at most its largest value; a NaN stays. */
static uint32_t mixpi_grid_round(const mixpi_grid *g, uint32_t a) {
    const uint32_t capped = mixpi_q_choose(mixpi_q_below(a, g->max), a, g->max);
    const uint32_t half = (1u << (g->shift - 1)) - 1u, odd = capped >> g->shift & 1u;
    const uint32_t normal = (capped + half + odd) >> g->shift << g->shift;
    const uint32_t few = mixp_bits_of_f32(mixp_f32_of_bits(capped) + mixp_f32_of_bits(g->magic));
    const uint32_t tiny = mixp_bits_of_f32((float)(int32_t)(few - g->magic) * g->step);
    const uint32_t number = mixpi_q_choose(mixpi_q_below(capped, g->normal), tiny, normal);
    return mixpi_q_choose(mixpi_q_below(0x7F800000u, a), a, number);
}

/* The same for e2m1, rounded up when the upper 22 bits of `random` lie below the part cut off. */
static uint32_t mixpi_grid_random(const mixpi_grid *g, uint32_t a, uint32_t random) {
    const uint32_t capped = mixpi_q_choose(mixpi_q_below(a, g->max), a, g->max);
    const uint32_t up = 0x3FFFFFu - (random >> 10), small = mixpi_q_below(capped, g->normal);
    const float cut = mixp_f32_of_bits(capped & small) * 8388608.0f;
    const uint32_t steps = ((uint32_t)(int32_t)cut + up) >> 22;
    const uint32_t tiny = mixp_bits_of_f32((float)(int32_t)steps * g->step);
    const uint32_t number = mixpi_q_choose(small, tiny, (capped + up) >> 22 << 22);
    return mixpi_q_choose(mixpi_q_below(0x7F800000u, a), a, number);
}

/* One block's scales: x is multiplied by `in`, the rounded value by `out`. */
typedef struct mixpi_scales { float in, out; } mixpi_scales;

static int mixpi_amax_usable(uint32_t amax) { return amax && amax < 0x7F800000u; }

/* limit / amax, at most the largest f32; 1 where that says nothing. */
static float mixpi_scale_to(float limit, uint32_t amax) {
    float s;
    if (!mixpi_amax_usable(amax)) return 1.0f;
    s = limit / mixp_f32_of_bits(amax);
    return mixp_bits_of_f32(s) == 0x7F800000u ? mixp_f32_of_bits(0x7F7FFFFFu) : s;
}

/* The power of two with the biased exponent e, 0 to 254. */
static float mixpi_q_power(int e) { return mixp_f32_of_bits(e ? (uint32_t)e << 23 : 0x400000u); }

static mixpi_scales mixpi_scales_power(float limit, uint32_t amax) {
    const int e = (int)(mixp_bits_of_f32(mixpi_scale_to(limit, amax)) >> 23);
    mixpi_scales s;
    s.in = mixpi_q_power(e);
    s.out = mixpi_q_power(254 - e);
    return s;
}

static mixpi_scales mixpi_scales_e8m0(float limit, uint32_t amax) {
    const uint32_t t = mixp_bits_of_f32(mixp_f32_of_bits(amax) * (1.0f / limit));
    int e = (int)(t >> 23);
    mixpi_scales s;
    if (amax > 0x7F800000u) {
        s.in = s.out = mixp_f32_of_bits(amax);
        return s;
    }
    e += (t & 0x7FFFFFu) != 0 && (e > 0 || t > 0x400000u);
    if (e > 254) e = 254;
    s.in = mixpi_q_power(254 - e);
    s.out = mixpi_q_power(e);
    return s;
}

/* tensor: the scale of the whole array. */
static mixpi_scales mixpi_scales_e4m3(float tensor, uint32_t amax) {
    const float wanted = mixp_f32_of_bits(amax) * (tensor * (1.0f / 6.0f));
    mixpi_scales s;
    s.out = mixp_f32_from_e4m3(mixp_e4m3_from_f32_sat(wanted));
    s.in = amax ? 1.0f / (s.out * (1.0f / tensor)) : 0.0f;
    if (mixp_bits_of_f32(s.in) == 0x7F800000u) s.in = mixp_f32_of_bits(0x7F7FFFFFu);
    return s;
}

typedef struct mixpi_quantising {
    mixp_quantise_args k;
    mixpi_grid         grid;
    float              tensor;  /* scale of the whole array                                */
    int64_t            tile_cols;   /* columns that share scales, or 16 columns with their own */
    int                by_lane; /* 1: each column of a tile has its own scale              */
    uint32_t          *amax;    /* of each row of the array: for the array's               */
} mixpi_quantising;

/* n elements of x from element `at` on, at most 16; the others 0. */
static void mixpi_q_load(const mixpi_quantising *q, int64_t at, int64_t n,
                         uint32_t out[MIXPI_Q_LANES]) {
    const uint16_t *low = (const uint16_t *)q->k.x.data + at;
    int i;
    if (q->k.x.dtype == MIXP_F32) {
        if (n < MIXPI_Q_LANES) memset(out, 0, MIXPI_Q_LANES * sizeof *out);
        memcpy(out, (const float *)q->k.x.data + at, (size_t)n * sizeof *out);
        return;
    }
    if (n == MIXPI_Q_LANES)
        for (i = 0; i < MIXPI_Q_LANES; i++) out[i] = (uint32_t)low[i] << 16;
    else
        for (i = 0; i < MIXPI_Q_LANES; i++) out[i] = i < n ? (uint32_t)low[i] << 16 : 0u;
}

/* amax[i] = the larger of amax[i] and the magnitude of element at + i. */
static void mixpi_q_look(const mixpi_quantising *q, int64_t at, int64_t n,
                         int32_t amax[MIXPI_Q_LANES]) {
    uint32_t u[MIXPI_Q_LANES];
    int i;
    mixpi_q_load(q, at, n, u);
    for (i = 0; i < MIXPI_Q_LANES; i++) {
        const int32_t a = (int32_t)(u[i] & 0x7FFFFFFFu);
        amax[i] = a > amax[i] ? a : amax[i];
    }
}

static uint32_t mixpi_q_largest(const int32_t amax[MIXPI_Q_LANES]) {
    int32_t a = 0;
    int i;
    for (i = 0; i < MIXPI_Q_LANES; i++) a = amax[i] > a ? amax[i] : a;
    return (uint32_t)a;
}

/* Quantises n elements from element `at` on. */
static void mixpi_q_write(const mixpi_quantising *q, int64_t at, int64_t n,
                          const float in[MIXPI_Q_LANES], const float out[MIXPI_Q_LANES]) {
    const mixpi_grid grid = q->grid;
    uint32_t u[MIXPI_Q_LANES];
    uint16_t y[MIXPI_Q_LANES];
    int i;
    mixpi_q_load(q, at, n, u);
    if (q->k.stochastic) {
        for (i = 0; i < MIXPI_Q_LANES; i++) {
            const uint32_t v = mixp_bits_of_f32(mixp_f32_of_bits(u[i]) * in[i]);
            const uint32_t random = mixp_random_at(q->k.key, (uint64_t)(at + i));
            const uint32_t r = mixpi_grid_random(&grid, v & 0x7FFFFFFFu, random);
            const float value = mixp_f32_of_bits(r | (v & 0x80000000u));
            y[i] = mixp_bf16_from_f32(value * out[i]).bits;
        }
    } else {
        for (i = 0; i < MIXPI_Q_LANES; i++) {
            const uint32_t v = mixp_bits_of_f32(mixp_f32_of_bits(u[i]) * in[i]);
            const uint32_t r = mixpi_grid_round(&grid, v & 0x7FFFFFFFu) | (v & 0x80000000u);
            y[i] = mixp_bf16_from_f32(mixp_f32_of_bits(r) * out[i]).bits;
        }
    }
    memcpy(q->k.y + at, y, (size_t)n * sizeof *y);
}

static mixpi_scales mixpi_q_scales(const mixpi_quantising *q, uint32_t amax) {
    mixpi_scales s = { 1.0f, 1.0f };
    switch (q->k.scale) {
    case MIXP_SCALE_POWER: return mixpi_scales_power(q->grid.largest, amax);
    case MIXP_SCALE_E8M0:  return mixpi_scales_e8m0(q->grid.largest, amax);
    case MIXP_SCALE_E4M3:  return mixpi_scales_e4m3(q->tensor, amax);
    case MIXP_SCALE_TENSOR:
    case MIXP_SCALE_COUNT:
    default: s.in = q->tensor; return s;
    }
}

/* The scales of a tile: one for all its columns, or one for each. */
static void mixpi_q_tile_scales(const mixpi_quantising *q, const int32_t amax[MIXPI_Q_LANES],
                                float in[MIXPI_Q_LANES], float out[MIXPI_Q_LANES]) {
    mixpi_scales s = mixpi_q_scales(q, mixpi_q_largest(amax));
    int i;
    for (i = 0; i < MIXPI_Q_LANES; i++) {
        if (q->by_lane) s = mixpi_q_scales(q, (uint32_t)amax[i]);
        in[i] = s.in;
        out[i] = s.out;
    }
}

/* Quantises a tile: block_rows rows from `row` on, tile_cols columns from `col` on. */
static void mixpi_q_tile(const mixpi_quantising *q, int64_t row, int64_t col) {
    const int64_t end = mixpi_min(col + q->tile_cols, q->k.cols), last = row + q->k.block_rows;
    int32_t amax[MIXPI_Q_LANES] = { 0 };
    float in[MIXPI_Q_LANES], out[MIXPI_Q_LANES];
    int64_t r, c;
    for (r = row; r < last && q->k.scale != MIXP_SCALE_TENSOR; r++)
        for (c = col; c < end; c += MIXPI_Q_LANES)
            mixpi_q_look(q, r * q->k.cols + c, mixpi_min(end - c, MIXPI_Q_LANES), amax);
    mixpi_q_tile_scales(q, amax, in, out);
    for (r = row; r < last; r++)
        for (c = col; c < end; c += MIXPI_Q_LANES)
            mixpi_q_write(q, r * q->k.cols + c, mixpi_min(end - c, MIXPI_Q_LANES), in, out);
}

/* Quantises one row of blocks. */
static void mixpi_q_strip(const void *job, int64_t strip) {
    const mixpi_quantising *q = (const mixpi_quantising *)job;
    int64_t col;
    for (col = 0; col < q->k.cols; col += q->tile_cols)
        mixpi_q_tile(q, strip * q->k.block_rows, col);
}

/* The largest magnitude of one row. */
static void mixpi_q_row_amax(const void *job, int64_t row) {
    const mixpi_quantising *q = (const mixpi_quantising *)job;
    int32_t amax[MIXPI_Q_LANES] = { 0 };
    int64_t c;
    for (c = 0; c < q->k.cols; c += MIXPI_Q_LANES)
        mixpi_q_look(q, row * q->k.cols + c, mixpi_min(q->k.cols - c, MIXPI_Q_LANES), amax);
    q->amax[row] = mixpi_q_largest(amax);
}

static void mixpi_q_run(const mixp_exec *x, const mixpi_quantising *q, mixpi_unit unit,
                        int64_t count, int64_t work) {
    mixpi_units u;
    u.unit = unit;
    u.job = q;
    u.count = count;
    u.per_task = mixpi_units_of_task(work);
    mixpi_run_units(x, &u, count * work);
}

/* The largest magnitude of the array. */
static mixp_result mixpi_q_amax(const mixp_exec *x, mixpi_quantising *q, uint32_t *amax) {
    int64_t row;
    q->amax = (uint32_t *)mixpi_scratch(x, (size_t)q->k.rows * sizeof *q->amax);
    if (!q->amax) return MIXP_ERR_MEMORY;
    mixpi_q_run(x, q, mixpi_q_row_amax, q->k.rows, q->k.cols);
    *amax = 0;
    for (row = 0; row < q->k.rows; row++) *amax = q->amax[row] > *amax ? q->amax[row] : *amax;
    return MIXP_OK;
}

static int mixpi_q_blocks_fit(const mixp_quantise_args *k) {
    const int64_t r = k->block_rows, c = k->block_cols;
    if (k->scale == MIXP_SCALE_TENSOR) return r == 0 && c == 0;
    if (r < 1 || c < 1 || k->rows % r || k->cols % c) return 0;
    if (r == 1) return c % MIXPI_Q_LANES == 0;
    return r % MIXPI_Q_LANES == 0 && (c == 1 || c == r);
}

static mixp_result mixpi_q_check(const mixp_quantise_args *k) {
    const int element = k->element == MIXP_F8_E4M3 || k->element == MIXP_F8_E5M2 ||
                        k->element == MIXP_F4_E2M1;
    if (!k->x.data || !k->y || k->rows < 1 || k->cols < 1) return MIXP_ERR_ARGUMENT;
    if (!element || (unsigned)k->scale >= MIXP_SCALE_COUNT) return MIXP_ERR_ARGUMENT;
    if (k->stochastic && k->element != MIXP_F4_E2M1) return MIXP_ERR_ARGUMENT;
    if (!(k->given >= 0.0f && k->given < mixp_f32_of_bits(0x7F800000u))) return MIXP_ERR_ARGUMENT;
    if (k->x.dtype != MIXP_F32 && k->x.dtype != MIXP_BF16) return MIXP_ERR_DTYPE;
    return mixpi_q_blocks_fit(k) ? MIXP_OK : MIXP_ERR_SHAPE;
}

MIXPREC_API mixp_result mixp_quantise(const mixp_exec *x, const mixp_quantise_args *k,
                                      float *decode) {
    mixpi_quantising q;
    uint32_t amax = 0;
    mixp_result r = k && x && decode ? mixpi_q_check(k) : MIXP_ERR_ARGUMENT;
    if (r != MIXP_OK) return r;
    memset(&q, 0, sizeof q);
    q.k = *k;
    q.grid = mixpi_grid_of(k->element);
    q.by_lane = k->block_cols == 1;
    q.tile_cols = q.by_lane ? MIXPI_Q_LANES : k->block_cols;
    if (k->scale == MIXP_SCALE_TENSOR) q.tile_cols = k->cols;
    if (k->scale == MIXP_SCALE_TENSOR) q.k.block_rows = 1;
    q.tensor = 1.0f;
    if (k->scale == MIXP_SCALE_TENSOR || k->scale == MIXP_SCALE_E4M3) {
        r = mixpi_q_amax(x, &q, &amax);
        q.tensor = mixpi_scale_to(k->scale == MIXP_SCALE_E4M3 ? 2688.0f : q.grid.largest, amax);
    }
    if (r != MIXP_OK) return r;
    if (k->scale == MIXP_SCALE_TENSOR && k->given > 0.0f) q.tensor = k->given;
    if (k->scale == MIXP_SCALE_TENSOR && k->amax) *k->amax = mixp_f32_of_bits(amax);
    mixpi_q_run(x, &q, mixpi_q_strip, k->rows / q.k.block_rows, q.k.block_rows * k->cols);
    *decode = 1.0f / q.tensor;
    return MIXP_OK;
}

/* --- the random Hadamard transform ----------------------------------------------------------- */

typedef struct mixpi_turning { mixp_in a; float *y; int64_t cols; } mixpi_turning;

/* Row i of a tile of 16 columns from element `at` on, n of them there, times its sign. */
static void mixpi_hadamard_load(const mixpi_turning *t, int64_t at, int n, int i, float v[16]) {
    static const float signs[16] = { 1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1 };
    const uint16_t *low = (const uint16_t *)t->a.data + at;
    int c;
    for (c = 0; c < 16; c++) v[c] = 0.0f;
    if (t->a.dtype == MIXP_F32) memcpy(v, (const float *)t->a.data + at, (size_t)n * sizeof *v);
    else for (c = 0; c < n; c++) v[c] = mixp_f32_of_bits((uint32_t)low[c] << 16);
    for (c = 0; c < 16; c++) v[c] *= signs[i];
}

/* a, b = a + b, a - b in each of 16 columns. */
static void mixpi_hadamard_pair(float a[16], float b[16]) {
    int c;
    for (c = 0; c < 16; c++) {
        const float x = a[c], y = b[c];
        a[c] = x + y;
        b[c] = x - y;
    }
}

static void mixpi_hadamard_tile(const mixpi_turning *t, int64_t at, int n) {
    float v[16][16];
    int i, c, step;
    for (i = 0; i < 16; i++) mixpi_hadamard_load(t, at + i * t->cols, n, i, v[i]);
    for (step = 1; step < 16; step *= 2)
        for (i = 0; i < 16; i++)
            if (!(i & step)) mixpi_hadamard_pair(v[i], v[i | step]);
    for (i = 0; i < 16; i++) {
        for (c = 0; c < 16; c++) v[i][c] *= 0.25f;
        memcpy(t->y + at + i * t->cols, v[i], (size_t)n * sizeof v[i][0]);
    }
}

static void mixpi_hadamard_strip(const void *job, int64_t strip) {
    const mixpi_turning *t = (const mixpi_turning *)job;
    int64_t c;
    for (c = 0; c < t->cols; c += 16)
        mixpi_hadamard_tile(t, strip * 16 * t->cols + c, (int)mixpi_min(t->cols - c, 16));
}

MIXPREC_API mixp_result mixp_hadamard(const mixp_exec *x, int64_t rows, int64_t cols, mixp_in a,
                                      float *y) {
    mixpi_turning t;
    mixpi_units u;
    if (!x || !a.data || !y || rows < 1 || cols < 1) return MIXP_ERR_ARGUMENT;
    if (a.dtype != MIXP_F32 && a.dtype != MIXP_BF16) return MIXP_ERR_DTYPE;
    if (rows % 16) return MIXP_ERR_SHAPE;
    t.a = a;
    t.y = y;
    t.cols = cols;
    u.unit = mixpi_hadamard_strip;
    u.job = &t;
    u.count = rows / 16;
    u.per_task = mixpi_units_of_task(16 * cols);
    mixpi_run_units(x, &u, rows * cols);
    return MIXP_OK;
}
