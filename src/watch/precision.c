#pragma once
#include "rows.c"
/* --- precision --------------------------------------------------------------------------- *
 *
 * A feature of 2023.37 is in the range of f16, but is rounded to 2023. The loss by rounding is
 * measured relative to the information in the values: their variation over the batch. In a sampled
 * step a few sites, in turn, are computed a second time with an f32 result. From this result, and
 * from its difference to the stored result, the mean over the batch is subtracted column by column.
 * The root of the ratio of the two mean squares is the share of the variation that rounding lost.
 */

enum { MIXPI_BATCH = 8 };       /* fewest rows whose variation is trusted */

/* y = a op b, rows by cols. repeats: b is one row for all rows. */
static mixp_result mixpi_pair(mixp_context *ctx, mixp_binary op, mixp_in a, mixp_in b,
                              int64_t rows, int64_t cols, int repeats, float *y) {
    mixp_binary_args k;
    memset(&k, 0, sizeof k);
    k.op = op;
    k.rank = 2;
    k.shape[0] = rows;
    k.shape[1] = cols;
    k.a = a;
    k.b = b;
    k.a_strides[0] = cols;
    k.b_strides[0] = repeats ? 0 : cols;
    k.a_strides[1] = k.b_strides[1] = 1;
    k.y = mixpi_out_to(y, MIXP_F32, 0);
    return ctx->device->kernels->binary(&ctx->exec, &k);
}

/* y[cols] = the column means of x[n, cols]. */
static mixp_result mixpi_means(mixp_context *ctx, mixp_in x, int64_t n, int64_t cols, float *y) {
    mixp_reduce_args k;
    memset(&k, 0, sizeof k);
    k.outer = 1;
    k.n = n;
    k.inner = cols;
    k.factor = (float)(1.0 / (double)n);
    k.a = x;
    k.y = mixpi_out_to(y, MIXP_F32, 0);
    return ctx->device->kernels->reduce(&ctx->exec, &k);
}

/* to = the mean square of x[rows, cols] after subtracting the column means. work: as large as x,
 * may be x; means: cols elements. */
static mixp_result mixpi_variation(mixp_context *ctx, mixp_in x, int64_t rows, int64_t cols,
                                   float *work, float *means, float *to) {
    const mixp_in mean = mixpi_in(means, MIXP_F32), rest = mixpi_in(work, MIXP_F32);
    mixp_result r = mixpi_means(ctx, x, rows, cols, means);
    if (r == MIXP_OK) r = mixpi_pair(ctx, MIXP_BINARY_SUB, x, mean, rows, cols, 1, work);
    if (r == MIXP_OK) r = mixpi_pair(ctx, MIXP_BINARY_MUL, rest, rest, rows, cols, 0, work);
    return r == MIXP_OK ? mixpi_means(ctx, rest, rows * cols, 1, to) : r;
}

/* Writes the loss of rounding full (f32) to low into a site's row: the mean squares of the rounding
 * error and of the variation. */
static mixp_result mixpi_inspect_pair(mixp_context *ctx, int number, mixp_in full, mixp_in low,
                                      int64_t rows, int64_t cols) {
    const size_t all = (size_t)(rows * cols) * sizeof(float), one = (size_t)cols * sizeof(float);
    mixp_look *row = &ctx->watch->rows[MIXPI_ROW_SITES + (number - 1) * MIXPI_LOOKS +
                                       MIXPI_LOOK_LOSS];
    float *to = &row->largest, *work = (float *)mixpi_arena_take(ctx, &ctx->dev, all);
    float *means = (float *)mixpi_arena_take(ctx, &ctx->dev, one);
    mixp_result r = MIXP_ERR_MEMORY;
    if (work && means) r = mixpi_variation(ctx, full, rows, cols, work, means, to + 1);
    if (r == MIXP_OK) r = mixpi_pair(ctx, MIXP_BINARY_SUB, full, low, rows, cols, 0, work);
    if (r == MIXP_OK)
        r = mixpi_variation(ctx, mixpi_in(work, MIXP_F32), rows, cols, work, means, to);
    if (work) mixpi_arena_give(ctx, &ctx->dev, work, all);
    if (means) mixpi_arena_give(ctx, &ctx->dev, means, one);
    return r;
}

/* Like mixpi_inspect_pair, for an f32 result without a low copy: rounds a copy first. */
static mixp_result mixpi_inspect_full(mixp_context *ctx, int number, mixp_in full, int64_t rows,
                                      int64_t cols) {
    const mixp_dtype low = mixpi_site_at(ctx, number)->low;
    const size_t bytes = (size_t)(rows * cols) * mixp_dtype_size(low);
    void *rounded = mixpi_arena_take(ctx, &ctx->dev, bytes);
    mixp_result r = MIXP_ERR_MEMORY;
    if (rounded) r = mixpi_convert_to(ctx, mixpi_out_to(rounded, low, 0), full, rows * cols);
    if (r == MIXP_OK)
        r = mixpi_inspect_pair(ctx, number, full, mixpi_in(rounded, low), rows, cols);
    if (rounded) mixpi_arena_give(ctx, &ctx->dev, rounded, bytes);
    return r;
}

/* Is it the site's turn in this step? Only once in a sample: the first micro-batch counts. */
static int mixpi_inspects(const mixp_context *ctx, int number, const mixp_tensor *t) {
    const mixpi_watch *w = ctx->watch;
    const mixpi_site *site = mixpi_site_at(ctx, number);
    const uint32_t every = (uint32_t)w->n_sites / 4u + 1u;
    if (!w->sampled || !(w->imprecise > 0.0f) || !mixpi_is_low(site->low)) return 0;
    if (site->inspected == w->fresh || t->rank < 1 || mixpi_no_grad_now(ctx)) return 0;
    if (!w->inspect_all && ((uint32_t)number + (uint32_t)w->drawn) % every) return 0;
    return (site->traits & MIXPI_ROUNDS) != 0;
}

/* Columns of t; a vector is one column. */
static int64_t mixpi_inspect_cols(const mixp_tensor *t)
{ return t->rank > 1 ? t->shape[t->rank - 1] : 1; }

/* Measures what rounding `full` (f32) costs, or would cost, site `number`. stored: the rounded
 * result, or NULL. */
static mixp_result mixpi_inspect(mixp_context *ctx, int number, const mixp_tensor *full,
                                 const mixp_tensor *stored) {
    const int64_t cols = mixpi_inspect_cols(full), rows = full->count / cols;
    if (full->dtype != MIXP_F32 || rows < MIXPI_BATCH) return MIXP_OK;
    mixpi_site_at(ctx, number)->inspected = ctx->watch->fresh;
    if (stored && mixpi_is_low(stored->dtype))
        return mixpi_inspect_pair(ctx, number, mixpi_tensor_in(full), mixpi_tensor_in(stored), rows,
                                  cols);
    return mixpi_inspect_full(ctx, number, mixpi_tensor_in(full), rows, cols);
}

/* Computes a call a second time with an f32 result, then restores the call. */
static mixp_result mixpi_inspect_again(mixpi_tape_entry *e, mixp_result (*run)(mixp_call *,
                                       mixp_result (*)(mixp_call *))) {
    mixp_call *c = &e->call;
    mixp_context *ctx = c->ctx;
    mixp_tensor *const out = c->out;
    unsigned char attrs[2048];
    const size_t size = c->op->attrs_size;
    mixp_result r;
    if (size > sizeof attrs || out->count / mixpi_inspect_cols(out) < MIXPI_BATCH) return MIXP_OK;
    if (size) memcpy(attrs, c->attrs, size);
    c->out = mixp_activation(ctx, MIXP_F32, out->rank, out->shape);
    r = c->out ? run(c, c->op->forward) : MIXP_ERR_MEMORY;
    if (r == MIXP_OK) r = mixpi_inspect(ctx, e->site, c->out, out);
    if (c->out) mixpi_arena_give(ctx, &ctx->dev, c->out->data, mixpi_bytes(c->out));
    c->out = out;
    if (size) memcpy(c->attrs, attrs, size);
    return r;
}

