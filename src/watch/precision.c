#pragma once
#include "looks_memory.c"
/* --- precision --------------------------------------------------------------------------- *
 *
 * A feature of 2023.37 is in the range of f16, but is rounded to 2023. The loss by rounding is
 * measured relative to the information in the values: their variation over the batch. In a sampled
 * step a few sites, in turn, are computed a second time with an f32 result. From this result, and
 * from its difference to the stored result, the mean over the batch is subtracted column by column.
 * The root of the ratio of the two mean squares is the share of the variation that rounding lost.
 *
 * A product is computed with f32 weights as well. Where the inputs vary little compared with their
 * mean, a rounded weight moves all rows alike, and each update moves them again: the mean of that
 * difference counts too. A product that loses too much then reads f32 weights.
 */

enum {
    MIXPI_BATCH = 8,            /* fewest rows whose variation is trusted */
    MIXPI_WEIGHED = 4           /* inputs of a call that may be weights: a call has so many slots */
};

/* y = a op b, rows by cols. repeats: b is one row for all rows. */
static mixp_result mixpi_pair(mixp_context *ctx, mixp_binary op, mixp_in a, mixp_in b, int64_t rows,
    int64_t cols, int repeats, float *y) {
    mixp_binary_args k = mixpi_binary_of(op, a, b, mixpi_out_to(y, MIXP_F32, 0), rows, cols);
    if (repeats) k.b_strides[0] = 0;
    return ctx->device->kernels->binary(&ctx->exec, &k);
}

/* y[cols] = the column means of x[n, cols]. */
static mixp_result mixpi_means(mixp_context *ctx, mixp_in x, int64_t n, int64_t cols, float *y) {
    const mixp_out to = mixpi_out_to(y, MIXP_F32, 0);
    const mixp_reduce_args k = mixpi_reduce_of(x, n, cols, 1.0 / (double)n, to);
    return ctx->device->kernels->reduce(&ctx->exec, &k);
}

/* to = the mean square of x[n]. work: as large as x, may be x. */
static mixp_result mixpi_mean_square(
    mixp_context *ctx, mixp_in x, int64_t n, float *work, float *to) {
    MIXPI_TRY(mixpi_pair(ctx, MIXP_BINARY_MUL, x, x, n, 1, 0, work));
    return mixpi_means(ctx, mixpi_in(work, MIXP_F32), n, 1, to);
}

/* to = the mean square of x[rows, cols] after subtracting the column means. work: as large as x,
 * may be x; means: cols elements. */
static mixp_result mixpi_variation(mixp_context *ctx, mixp_in x, int64_t rows, int64_t cols,
    float *work, float *means, float *to) {
    const mixp_in mean = mixpi_in(means, MIXP_F32), rest = mixpi_in(work, MIXP_F32);
    MIXPI_TRY(mixpi_means(ctx, x, rows, cols, means));
    MIXPI_TRY(mixpi_pair(ctx, MIXP_BINARY_SUB, x, mean, rows, cols, 1, work));
    return mixpi_mean_square(ctx, rest, rows * cols, work, to);
}

/* A result in f32 and in low precision. */
typedef struct mixpi_inspection {
    mixp_in full, low;          /* full: f32; low: low, or f32 that is still to be rounded */
    int64_t rows, cols;
    int     shifts;             /* 1: an error that all rows share counts as well */
} mixpi_inspection;

/* Writes the mean squares of the error, and of the variation, into a site's row. */
static mixp_result mixpi_inspect_pair(mixp_context *ctx, int number, const mixpi_inspection *p) {
    const int64_t rows = p->rows, cols = p->cols, n = rows * cols;
    const size_t all = (size_t)n * sizeof(float), one = (size_t)cols * sizeof(float);
    mixp_look *row =
        &ctx->watch->rows[MIXPI_ROW_SITES + (number - 1) * MIXPI_LOOKS + MIXPI_LOOK_LOSS];
    float *to = &row->largest, *work = (float *)mixpi_arena_take(ctx, &ctx->memory.dev, all);
    float *means = (float *)mixpi_arena_take(ctx, &ctx->memory.dev, one);
    const mixp_in error = mixpi_in(work, MIXP_F32);
    mixp_result r = MIXP_ERR_MEMORY;
    if (work && means) r = mixpi_variation(ctx, p->full, rows, cols, work, means, to + 1);
    if (r == MIXP_OK) r = mixpi_pair(ctx, MIXP_BINARY_SUB, p->full, p->low, rows, cols, 0, work);
    if (r == MIXP_OK)
        r = p->shifts ? mixpi_mean_square(ctx, error, n, work, to)
                      : mixpi_variation(ctx, error, rows, cols, work, means, to);
    if (work) mixpi_arena_free(ctx, &ctx->memory.dev, work, all);
    if (means) mixpi_arena_free(ctx, &ctx->memory.dev, means, one);
    return r;
}

/* Like mixpi_inspect_pair, for p->low in f32: rounds a copy first. */
static mixp_result mixpi_inspect_full(mixp_context *ctx, int number, mixpi_inspection p) {
    const mixp_dtype low = mixpi_site_at(ctx, number)->low;
    const int64_t n = p.rows * p.cols;
    const size_t bytes = (size_t)n * mixp_dtype_size(low);
    void *rounded = mixpi_arena_take(ctx, &ctx->memory.dev, bytes);
    mixp_result r = MIXP_ERR_MEMORY;
    if (rounded) r = mixpi_convert_to(ctx, mixpi_out_to(rounded, low, 0), p.low, n);
    p.low = mixpi_in(rounded, low);
    if (r == MIXP_OK) r = mixpi_inspect_pair(ctx, number, &p);
    if (rounded) mixpi_arena_free(ctx, &ctx->memory.dev, rounded, bytes);
    return r;
}

/* Is it the site's turn in this step? Only once in a sample: the first micro-batch counts. */
static int mixpi_inspects(const mixp_context *ctx, int number, const mixp_tensor *t) {
    const mixpi_watch *w = ctx->watch;
    const mixpi_site *site = mixpi_site_at(ctx, number);
    const uint32_t every = (uint32_t)w->n_sites / 4u + 1u;
    if (!w->sampled || !(w->imprecise > 0.0f) || !mixpi_is_low(site->low)) return 0;
    if (site->inspected == w->fresh || t->rank < 1 || mixpi_is_no_grad(ctx)) return 0;
    if (!w->inspect_all && ((uint32_t)number + (uint32_t)w->drawn) % every) return 0;
    return (site->traits & MIXPI_ROUNDS) != 0;
}

/* Columns of t; a vector is one column. */
static int64_t mixpi_inspect_cols(const mixp_tensor *t) {
    return t->rank > 1 ? t->shape[t->rank - 1] : 1;
}

/* Measures what site `number` loses in low precision. full: f32; low: the low result, or an f32
 * result that is still to be rounded. */
static mixp_result mixpi_inspect(
    mixp_context *ctx, int number, const mixp_tensor *full, const mixp_tensor *low, int shifts) {
    mixpi_inspection p;
    p.cols = mixpi_inspect_cols(full);
    p.rows = full->count / p.cols;
    if (full->dtype != MIXP_F32 || p.rows < MIXPI_BATCH) return MIXP_OK;
    p.full = mixpi_tensor_in(full);
    p.low = mixpi_tensor_in(low);
    p.shifts = shifts;
    mixpi_site_at(ctx, number)->inspected = ctx->watch->fresh;
    return mixpi_is_low(low->dtype) ? mixpi_inspect_pair(ctx, number, &p)
                                    : mixpi_inspect_full(ctx, number, p);
}

/* The weights of a call that is computed a second time. */
typedef enum mixpi_reweighed {
    MIXPI_AS_READ,              /* as the call has read them */
    MIXPI_WIDENED,              /* the f32 weights instead of their low copies */
    MIXPI_NARROWED,             /* low copies instead of the f32 weights */
    MIXPI_NOT_WEIGHED           /* no memory */
} mixpi_reweighed;

/* A low copy of an f32 weight for this step; NULL: no memory. */
static mixp_tensor *mixpi_narrow(mixp_tensor *t, mixp_dtype low) {
    mixp_tensor *copy = mixp_activation(t->ctx, low, t->rank, t->shape);
    if (!copy) return NULL;
    mixp_result r =
        mixpi_convert_to(t->ctx, mixpi_tensor_out(copy, 0), mixpi_tensor_in(t), t->count);
    return r == MIXP_OK ? copy : NULL;
}

/* Does a recipe quantise the operands of this call? Not if a rule, a pin, the guard or the sizes
 * keep the linear in bf16. */
static int mixpi_is_quantised(const mixp_call *c) {
    const mixpi_product *p = (const mixpi_product *)c->attrs;
    return c->op == mixp_op_builtin(MIXP_OP_LINEAR) && p->recipe;
}

/* Lets a call read its weights in the precision in which it has not read them. A recipe quantises
 * weights itself, and is judged by its operands. */
static mixpi_reweighed mixpi_reweigh(mixpi_tape_entry *e, mixp_tensor *const *given) {
    mixp_call *c = &e->call;
    const mixpi_site *site = mixpi_site_at(c->ctx, e->site);
    mixpi_reweighed done = MIXPI_AS_READ;
    if (!site->casts || mixpi_is_quantised(c)) return done;
    for (int i = 0; i < c->n_in && i < MIXPI_WEIGHED && done != MIXPI_NOT_WEIGHED; i++) {
        mixp_tensor *t = given[i];
        if (!t || t->dtype != MIXP_F32 || t->own.generation || !t->requires_grad) continue;
        done = c->in[i] == t ? MIXPI_NARROWED : MIXPI_WIDENED;
        c->in[i] = c->in[i] == t ? mixpi_narrow(t, site->low) : t;
        if (!c->in[i]) done = MIXPI_NOT_WEIGHED;
    }
    return done;
}

/* Restores the inputs of a call that were `read`, and releases the memory of low copies. */
static void mixpi_reweigh_end(mixp_call *c, mixp_tensor *const *read, mixpi_reweighed how) {
    for (int i = MIXPI_WEIGHED - 1; i >= 0; i--) {
        mixp_tensor *t = c->in[i];
        if (t != read[i] && t && how == MIXPI_NARROWED)
            mixpi_arena_free(c->ctx, &c->ctx->memory.dev, t->data, mixpi_bytes(t));
        c->in[i] = read[i];
    }
}

/* Computes the call with an f32 result, and compares. The result with f32 weights is the exact one,
 * and the other is what low precision makes of it. */
static mixp_result mixpi_inspect_run(mixpi_tape_entry *e, mixpi_reweighed how,
    mixp_result (*run)(mixp_call *, mixp_result (*)(mixp_call *))) {
    mixp_call *c = &e->call;
    mixp_context *ctx = c->ctx;
    mixp_tensor *const out = c->out;
    mixp_tensor *other = mixp_activation(ctx, MIXP_F32, out->rank, out->shape);
    mixp_result r = MIXP_ERR_MEMORY;
    c->out = other;
    if (other) r = run(c, c->op->forward);
    c->out = out;
    if (r == MIXP_OK)
        r = how == MIXPI_NARROWED ? mixpi_inspect(ctx, e->site, out, other, 1)
                                  : mixpi_inspect(ctx, e->site, other, out, how == MIXPI_WIDENED);
    if (other) mixpi_arena_free(ctx, &ctx->memory.dev, other->data, mixpi_bytes(other));
    return r;
}

/* Measures what a call loses in low precision: in its result and in its weights. Computes the call
 * a second time if needed, then restores the call. */
static mixp_result mixpi_inspect_again(mixpi_tape_entry *e, mixp_tensor *const *given,
    mixp_result (*run)(mixp_call *, mixp_result (*)(mixp_call *))) {
    mixp_call *c = &e->call;
    mixp_tensor *const out = c->out, *read[MIXPI_WEIGHED];
    unsigned char attrs[2048];
    const size_t size = c->op->attrs_size;
    mixp_result r = MIXP_ERR_MEMORY;
    if (size > sizeof attrs || out->count / mixpi_inspect_cols(out) < MIXPI_BATCH) return MIXP_OK;

    /* The call is changed, run once more, and put back. */
    memcpy(read, c->in, sizeof read);
    if (size) memcpy(attrs, c->attrs, size);
    mixpi_reweighed how = mixpi_reweigh(e, given);
    if (how == MIXPI_AS_READ && out->dtype == MIXP_F32)
        r = mixpi_inspect(c->ctx, e->site, out, out, 0);
    else if (how != MIXPI_NOT_WEIGHED) r = mixpi_inspect_run(e, how, run);
    mixpi_reweigh_end(c, read, how);
    if (size) memcpy(c->attrs, attrs, size);
    return r;
}
