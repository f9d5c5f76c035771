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

typedef struct mixpi_quantising {
    mixp_quantise_args k;
    mixpi_grid         grid;
    float              tensor;  /* scale of the whole array                                */
    int64_t            tile_cols;   /* columns that share scales, or 16 columns with their own */
    int                by_lane; /* 1: each column of a tile has its own scale              */
    uint64_t           key;     /* of its random numbers                                   */
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
            const uint32_t random = mixp_random_at(q->key, (uint64_t)(at + i));
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

static mixpi_scales mixpi_q_scales(const mixpi_quantising *q, uint32_t amax)
{ return mixpi_scales_of(q->k.scale, q->grid.largest, q->tensor, amax); }

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

MIXPREC_API mixp_result mixp_quantise(const mixp_exec *x, const mixp_quantise_args *k,
                                      float *decode) {
    mixpi_quantising q;
    uint32_t amax = 0;
    mixp_result r = k && x && decode ? mixpi_quantise_wrong(k) : MIXP_ERR_ARGUMENT;
    if (r != MIXP_OK) return r;
    memset(&q, 0, sizeof q);
    q.k = *k;
    q.grid = mixpi_grid_of(k->element);
    q.key = mixp_random_key(k->seed, k->step, k->tensor);
    q.by_lane = k->block_cols == 1;
    q.tile_cols = q.by_lane ? MIXPI_Q_LANES : k->block_cols;
    if (k->scale == MIXP_SCALE_TENSOR) q.tile_cols = k->cols;
    if (k->scale == MIXP_SCALE_TENSOR) q.k.block_rows = 1;
    if (mixpi_has_scale_of_array(k->scale)) r = mixpi_q_amax(x, &q, &amax);
    if (r != MIXP_OK) return r;
    q.tensor = mixpi_scale_of_array(k, amax);
    if (k->scale == MIXP_SCALE_TENSOR && k->amax) *k->amax = mixp_f32_of_bits(amax);
    mixpi_q_run(x, &q, mixpi_q_strip, k->rows / q.k.block_rows, q.k.block_rows * k->cols);
    *decode = 1.0f / q.tensor;
    return MIXP_OK;
}

/* --- the random Hadamard transform ----------------------------------------------------------- */

/* Row i of a tile of 16 columns from element `at` on, n of them there, times its sign. */
static void mixpi_hadamard_load(const mixp_hadamard_args *t, int64_t at, int n, int i,
                                float v[16]) {
    const uint16_t *low = (const uint16_t *)t->a.data + at;
    int c;
    for (c = 0; c < 16; c++) v[c] = 0.0f;
    if (t->a.dtype == MIXP_F32) memcpy(v, (const float *)t->a.data + at, (size_t)n * sizeof *v);
    else for (c = 0; c < n; c++) v[c] = mixp_f32_of_bits((uint32_t)low[c] << 16);
    for (c = 0; c < 16; c++) v[c] *= mixpi_hadamard_sign(i);
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

static void mixpi_hadamard_tile(const mixp_hadamard_args *t, int64_t at, int n) {
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
    const mixp_hadamard_args *t = (const mixp_hadamard_args *)job;
    int64_t c;
    for (c = 0; c < t->cols; c += 16)
        mixpi_hadamard_tile(t, strip * 16 * t->cols + c, (int)mixpi_min(t->cols - c, 16));
}

MIXPREC_API mixp_result mixp_hadamard(const mixp_exec *x, int64_t rows, int64_t cols, mixp_in a,
                                      float *y) {
    mixp_hadamard_args t;
    mixpi_units u;
    mixp_result r;
    t.rows = rows;
    t.cols = cols;
    t.a = a;
    t.y = y;
    r = x ? mixpi_hadamard_wrong(&t) : MIXP_ERR_ARGUMENT;
    if (r != MIXP_OK) return r;
    u.unit = mixpi_hadamard_strip;
    u.job = &t;
    u.count = rows / 16;
    u.per_task = mixpi_units_of_task(16 * cols);
    mixpi_run_units(x, &u, rows * cols);
    return MIXP_OK;
}
