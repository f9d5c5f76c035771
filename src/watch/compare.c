#pragma once
#include "watch.c"
/* --- comparing runs ------------------------------------------------------------------------ */

/* Data of a site that the first run keeps for the second: host memory, f32. */
typedef struct mixpi_kept {
    int64_t    count;
    float     *value, *grad;
    mixp_dtype dtype;
    int        done;            /* 1: the second run compared the value; 2: its gradient as well */
    mixp_difference row;
} mixpi_kept;

typedef struct mixpi_comparison {
    const mixp_compare_desc *desc;
    mixpi_kept *kept;           /* indexed by the site's number - 1 */
    int         capacity, second;
    mixp_result result;
} mixpi_comparison;

/* Reads t into newly allocated host memory. Returns NULL with the error set. */
static float *mixpi_compare_read(mixp_context *ctx, const mixp_tensor *t) {
    size_t bytes = (size_t)t->count * sizeof(float);
    float *values = (float *)mixpi_host_take(ctx, bytes);
    if (!values) {
        mixpi_out_of_memory(ctx, bytes);
        return NULL;
    }
    if (mixp_read(t, values, MIXP_F32, t->count) == MIXP_OK) return values;
    mixpi_host_put(ctx, values);
    return NULL;
}

typedef struct mixpi_distance { double relative, largest, cosine; } mixpi_distance;

static mixpi_distance mixpi_distance_of(const float *a, const float *b, int64_t n) {
    double aa = 0.0, bb = 0.0, ab = 0.0, dd = 0.0;
    mixpi_distance d = { 0.0, 0.0, 1.0 };
    int64_t i;
    for (i = 0; i < n; i++) {
        double x = (double)a[i], y = (double)b[i], off = fabs(x - y);
        aa += x * x;
        bb += y * y;
        ab += x * y;
        dd += off * off;
        if (off > d.largest) d.largest = off;
    }
    if (!mixpi_finite(aa) || !mixpi_finite(bb) || (dd > 0.0 && !(bb > 0.0)))
        d.relative = (double)mixp_f32_of_bits(0x7F800000u);
    else if (dd > 0.0) d.relative = sqrt(dd / bb);
    if (aa > 0.0 && bb > 0.0) d.cosine = ab / sqrt(aa) / sqrt(bb);
    else if (aa > 0.0 || bb > 0.0) d.cosine = 0.0;
    return d;
}

/* The share of b's variation over the batch by which a differs, with the means of the columns
 * subtracted, as in precision.c: a year that is rounded has a small relative error, but its
 * fraction is lost. otherwise: the result for few rows, and for rows that are all alike. */
static double mixpi_difference_varied(const float *a, const float *b, int64_t rows, int64_t cols,
                                      double otherwise) {
    double all = 0.0, off = 0.0, size = 0.0;
    int64_t i, k;
    if (rows < MIXPI_BATCH) return otherwise;
    for (k = 0; k < cols; k++) {
        double mean = 0.0, shift = 0.0;
        for (i = k; i < rows * cols; i += cols) {
            mean += (double)b[i] / (double)rows;
            shift += ((double)a[i] - (double)b[i]) / (double)rows;
        }
        for (i = k; i < rows * cols; i += cols) {
            const double x = (double)b[i] - mean, d = (double)a[i] - (double)b[i] - shift;
            all += x * x;
            off += d * d;
            size += (double)b[i] * (double)b[i];
        }
    }
    if (!mixpi_finite(all) || !mixpi_finite(off) || !(all > 1e-12 * size)) return otherwise;
    return sqrt(off / all);
}

/* The first run keeps, the second compares. Only the first pass through a site counts. */
static void mixpi_compare_value(mixpi_comparison *m, mixp_context *ctx, mixpi_kept *kept,
                                const mixp_tensor *t) {
    const int64_t cols = mixpi_inspect_cols(t);
    mixpi_distance d;
    float *values;
    if (m->second ? kept->done || kept->count != t->count : kept->value != NULL) return;
    values = mixpi_compare_read(ctx, t);
    if (!values) {
        m->result = MIXP_ERR_MEMORY;
        return;
    }
    if (!m->second) {
        kept->value = values;
        kept->count = t->count;
        kept->dtype = t->dtype;
        return;
    }
    d = mixpi_distance_of(kept->value, values, t->count);
    kept->row.varied =
        mixpi_difference_varied(kept->value, values, t->count / cols, cols, d.relative);
    mixpi_host_put(ctx, values);
    kept->done = 1;
    kept->row.dtype_a = kept->dtype;
    kept->row.dtype_b = t->dtype;
    kept->row.relative = d.relative;
    kept->row.largest = d.largest;
    kept->row.cosine = d.cosine;
}

static void mixpi_compare_grad(mixpi_comparison *m, mixp_context *ctx, mixpi_kept *kept,
                               const mixp_tensor *g) {
    double scale = m->desc->scale > 0.0f ? (double)m->desc->scale : 1.0;
    mixpi_distance d;
    float *values;
    if (m->second ? kept->done != 1 || !kept->grad : kept->grad != NULL) return;
    if (g->count != kept->count) return;
    values = mixpi_compare_read(ctx, g);
    if (!values) {
        m->result = MIXP_ERR_MEMORY;
        return;
    }
    if (!m->second) {
        kept->grad = values;
        return;
    }
    d = mixpi_distance_of(kept->grad, values, g->count);
    mixpi_host_put(ctx, values);
    kept->done = 2;
    kept->row.has_grad = 1;
    kept->row.grad_relative = d.relative;
    kept->row.grad_largest = d.largest / scale;
    kept->row.grad_cosine = d.cosine;
}

/* The tape's hook while two runs are compared. */
static void mixpi_compare_tap(mixp_context *ctx, int number, const mixp_tensor *t,
                              int backward) {
    mixpi_comparison *m = (mixpi_comparison *)ctx->watch->comparing;
    if (number > m->capacity || m->result != MIXP_OK) return;
    if (backward) mixpi_compare_grad(m, ctx, &m->kept[number - 1], t);
    else mixpi_compare_value(m, ctx, &m->kept[number - 1], t);
}

/* Drops all gradients of parameters: runs must not add to them. */
static void mixpi_forget_grads(mixp_context *ctx) {
    mixp_tensor *t;
    for (t = ctx->tensors; t; t = t->own.next) t->grad = NULL;
    mixpi_crew_forget(ctx);
}

/* Closes the region of a run, and any region that fn left open. */
static mixp_result mixpi_compare_close(mixp_context *ctx) {
    const int open = mixpi_regions_open(ctx);
    mixp_autocast_close(ctx, 0);
    if (open == 1) return MIXP_OK;
    return mixp_context_fail(ctx, MIXP_ERR_ORDER,
                             "mixp_compare: fn has %s a region or a scope; fn must return with the "
                             "same regions and scopes open",
                             open ? "opened" : "closed");
}

/* One run: forward, then backward. */
static mixp_result mixpi_compare_run(mixp_context *ctx, mixpi_comparison *m,
                                     const mixp_autocast *region) {
    const mixp_compare_desc *d = m->desc;
    const uint64_t step = ctx->step;
    int64_t drawn, regions;
    mixp_tensor *loss;
    mixp_result r = mixp_step_begin(ctx);
    mixpi_forget_grads(ctx);
    if (r == MIXP_OK) r = mixp_autocast_push(ctx, region);
    if (r != MIXP_OK) ctx->step = step;
    if (r != MIXP_OK) return r;
    drawn = ctx->drawn;
    regions = ctx->regions_low;
    loss = d->fn(ctx, d->user);
    drawn = ctx->drawn - drawn;
    regions = ctx->regions_low - regions;
    r = mixpi_compare_close(ctx);
    if (loss && d->scale > 0.0f) loss = mixp_scale(ctx, loss, d->scale);
    if (r == MIXP_OK && !drawn && !regions) r = mixp_backward(ctx, loss);
    mixpi_forget_grads(ctx);
    ctx->step = step;
    if (r == MIXP_OK) r = m->result;
    if (drawn)
        return mixp_context_fail(ctx, MIXP_ERR_ORDER,
                                 "mixp_compare: fn uses dropout, and the runs would draw different "
                                 "numbers; pass training 0 to mixp_dropout, and dropout 0 to "
                                 "mixp_attention");
    if (regions)
        return mixp_context_fail(ctx, MIXP_ERR_ORDER,
                                 "mixp_compare: fn opens an autocast region, in which both runs "
                                 "would be the same; set the dtypes in the description instead "
                                 "(a region of MIXP_F32 is allowed)");
    return r;
}

static int mixpi_difference_order(const void *a, const void *b) {
    const mixp_difference *x = (const mixp_difference *)a, *y = (const mixp_difference *)b;
    if (x->added < y->added) return 1;
    if (x->added > y->added) return -1;
    return x->relative < y->relative ? 1 : x->relative > y->relative ? -1 : 0;
}

/* How much more a site differs than each site that it reads. */
static double mixpi_difference_added(const mixp_context *ctx, const mixpi_comparison *m,
                                     int number) {
    const mixpi_site *site = mixpi_site_at(ctx, number);
    const double own = m->kept[number - 1].row.varied;
    double most = 0.0;
    int i;
    for (i = 0; i < MIXPI_SITE_FROM && site->from[i]; i++) {
        const mixpi_kept *from = &m->kept[site->from[i] - 1];
        if (from->done && from->row.varied > most) most = from->row.varied;
    }
    return own > most ? own - most : 0.0;
}

/* Sorts and returns the rows of the sites that both runs met, and releases the memory. */
static int64_t mixpi_compare_end(mixp_context *ctx, mixpi_comparison *m,
                                 mixp_difference *rows, int64_t room) {
    mixp_difference *all = (mixp_difference *)(void *)m->kept;
    int64_t i, n = 0;
    for (i = 0; i < m->capacity; i++)
        if (m->kept[i].done)
            m->kept[i].row.added = mixpi_difference_added(ctx, m, (int)i + 1);
    for (i = 0; i < m->capacity; i++) {
        mixpi_kept kept = m->kept[i];
        if (kept.value) mixpi_host_put(ctx, kept.value);
        if (kept.grad) mixpi_host_put(ctx, kept.grad);
        if (!kept.done) continue;
        kept.row.site = mixpi_site_at(ctx, (int)i + 1)->name;
        all[n++] = kept.row;    /* safe in place: a row is smaller than the record it came from */
    }
    qsort(all, (size_t)n, sizeof *all, mixpi_difference_order);
    for (i = 0; i < n && i < room; i++) rows[i] = all[i];
    mixpi_host_put(ctx, m->kept);
    return n;
}

/* Returns what is wrong with the call, or NULL. */
static const char *mixpi_compare_wrong(const mixp_compare_desc *d, const mixp_difference *rows,
                                       int64_t room, const int64_t *n) {
    if (!d || !d->fn) return "the description or its fn is NULL";
    if (!rows || room < 1 || !n) return "rows and n must not be NULL, and room must be at least 1";
    if (!mixpi_real(d->a.dtype) || !mixpi_real(d->b.dtype))
        return "a dtype must be f16, bf16 or f32 (off)";
    if (d->a.level < 0 || d->a.level > 3 || d->b.level < 0 || d->b.level > 3)
        return "a level must be 0 to 3";
    if (!(d->scale >= 0.0f) || !mixpi_finite((double)d->scale))
        return "the scale must be finite and at least 0";
    return NULL;
}

/* Makes two runs with the tape's hook installed, then restores the guard. */
static mixp_result mixpi_compare_runs(mixp_context *ctx, mixpi_comparison *m) {
    mixpi_watch *w = ctx->watch;
    const int on = w->on;
    mixp_result r;
    w->comparing = m;
    w->tap = mixpi_compare_tap;
    w->on = 1;
    w->sampled = 0;
    r = mixpi_compare_run(ctx, m, &m->desc->a);
    m->second = 1;
    if (r == MIXP_OK) r = mixpi_compare_run(ctx, m, &m->desc->b);
    w->on = on;
    w->tap = NULL;
    w->comparing = NULL;
    return r;
}

MIXPI_SELDOM
static mixp_result mixpi_do_compare(mixp_context *ctx, const mixp_compare_desc *desc,
                                    mixp_difference *rows, int64_t room, int64_t *n) {
    const char *wrong = mixpi_compare_wrong(desc, rows, room, n);
    mixpi_comparison m;
    size_t bytes;
    mixp_result r;
    if (!ctx) return MIXP_ERR_ARGUMENT;
    if (wrong) return mixp_context_fail(ctx, MIXP_ERR_ARGUMENT, "mixp_compare: %s", wrong);
    if (mixpi_guard_between(ctx, "mixp_compare") != MIXP_OK) return MIXP_ERR_ORDER;
    *n = 0;
    r = mixpi_guard_catch_up(ctx);
    if (r != MIXP_OK) return r;
    if (!mixpi_watch_of(ctx) || mixpi_watch_room(ctx, 4096) != MIXP_OK)
        return MIXP_ERR_MEMORY;
    memset(&m, 0, sizeof m);
    m.desc = desc;
    m.capacity = ctx->watch->capacity;
    bytes = (size_t)m.capacity * sizeof *m.kept;
    m.kept = (mixpi_kept *)mixpi_host_take(ctx, bytes);
    if (!m.kept) return mixpi_out_of_memory(ctx, bytes);
    memset(m.kept, 0, bytes);
    r = mixpi_compare_runs(ctx, &m);
    *n = mixpi_compare_end(ctx, &m, rows, room);
    return r;
}

MIXPREC_API mixp_result mixp_compare(mixp_context *ctx, const mixp_compare_desc *desc,
                                     mixp_difference *rows, int64_t room, int64_t *n) {
    const int before = mixpi_enter(ctx);
    return mixpi_leave(ctx, before, mixpi_do_compare(ctx, desc, rows, room, n));
}

