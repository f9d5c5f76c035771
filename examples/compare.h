/* compare.h - two runs compared site by site, and stored values counted by exponent
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * Include this file after mixprec.h, in C or C++. It uses only the public API: the observer of mixp_observe. It needs
 * a build without MIXPREC_NO_WATCH. A call belongs to the thread that uses the context.
 *
 *     mixp_compare            runs a forward pass in two dtypes, and names the sites that differ
 *     mixp_exponents_new      begins to count what sites store, in the sampled steps of a guard
 *     mixp_site_exponents     reads the counts of a site, or of all sites */
#ifndef MIXPREC_COMPARE_H
#define MIXPREC_COMPARE_H

#include <math.h>
#include <stdlib.h>
#include <string.h>

#ifdef MIXPREC_NO_WATCH
#  error "compare.h needs mixp_observe, which MIXPREC_NO_WATCH leaves out"
#endif

#if defined(__GNUC__)
#  define COMPARE_API static __attribute__((__unused__))
#else
#  define COMPARE_API static
#endif

/* --- comparing two runs ------------------------------------------------------------------------------- */

/* Difference of a site's results in two runs. */
typedef struct mixp_difference {
    const char *site;
    mixp_dtype  dtype_a, dtype_b;
    double      relative;       /* |a - b| / |b|, Euclidean norms; Inf if b is 0 or any value is not finite */
    double      largest;        /* largest |a - b| */
    double      cosine;         /* cosine of the angle between a and b; 1 if both are 0 */
    double      grad_relative, grad_largest, grad_cosine;   /* the same for the site's gradient */
    int         has_grad;
    double      varied;         /* difference as a share of b's variation over the batch, with the means subtracted;
                                   `relative` for fewer than 8 rows */
    double      added;          /* `varied` less that of the site it reads that differs most; at least 0 */
} mixp_difference;

typedef struct mixp_compare_desc {
    mixp_autocast a, b;         /* a is compared with b, for example { MIXP_F32, 0 } */
    mixp_tensor *(*fn)(mixp_context *ctx, void *user);  /* forward pass: returns the loss; must not open a region */
    void  *user;
    float  scale;               /* loss scale; 0 = 1. Gradients are compared unscaled */
} mixp_compare_desc;

/* What the first run keeps of a site for the second: host memory, f32. */
typedef struct compare_kept {
    int64_t         count;
    float          *value, *grad;
    int             reads[4];   /* numbers of the sites that it reads; 0 = no more */
    int             done;       /* 1: the second run compared the value; 2: its gradient as well */
    mixp_difference row;
} compare_kept;

typedef struct compare_runs {
    const mixp_compare_desc *desc;
    compare_kept *kept;         /* indexed by the site's number - 1 */
    int           n;            /* sites that have a place in kept */
    int           second;
    mixp_autocast region;       /* of this run */
    int           random;       /* 1: fn has drawn random numbers */
    int           strayed;      /* 1: fn has opened another region of a low dtype */
    mixp_result   result;
} compare_runs;

static mixp_result compare_out_of_memory(mixp_context *ctx, size_t bytes) {
    return mixp_context_fail(ctx, MIXP_ERR_MEMORY, "mixp_compare: no memory for %.0f bytes on the host", (double)bytes);
}

/* Reads t into new host memory. Returns NULL with the error set. */
static float *compare_read(mixp_context *ctx, const mixp_tensor *t) {
    size_t bytes = (size_t)t->count * sizeof(float);
    float *values = (float *)malloc(bytes ? bytes : 1);
    if (!values) {
        compare_out_of_memory(ctx, bytes);
        return NULL;
    }
    if (mixp_read_f32(t, values, t->count) == MIXP_OK) return values;
    free(values);
    return NULL;
}

/* Finite also under -ffast-math, which lets compilers drop isfinite. */
static int compare_is_finite(double x) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (bits >> 52 & 0x7FFu) != 0x7FFu;
}

typedef struct compare_distance { double relative, largest, cosine; } compare_distance;

static compare_distance compare_distance_of(const float *a, const float *b, int64_t n) {
    double aa = 0.0, bb = 0.0, ab = 0.0, dd = 0.0;
    compare_distance d = { 0.0, 0.0, 1.0 };
    int64_t i;
    for (i = 0; i < n; i++) {
        double x = (double)a[i], y = (double)b[i], off = fabs(x - y);
        aa += x * x;
        bb += y * y;
        ab += x * y;
        dd += off * off;
        if (off > d.largest) d.largest = off;
    }
    if (!compare_is_finite(aa) || !compare_is_finite(bb) || (dd > 0.0 && !(bb > 0.0)))
        d.relative = (double)mixp_f32_of_bits(0x7F800000u);
    else if (dd > 0.0) d.relative = sqrt(dd / bb);
    if (aa > 0.0 && bb > 0.0) d.cosine = ab / sqrt(aa) / sqrt(bb);
    else if (aa > 0.0 || bb > 0.0) d.cosine = 0.0;
    return d;
}

/* The share of b's variation over the batch by which a differs, with the means of the columns subtracted, as the guard
 * measures precision: a year that is rounded has a small relative error, but its fraction is lost. otherwise: the
 * result for few rows, and for rows that are all alike. */
static double compare_varied(const float *a, const float *b, int64_t rows, int64_t cols, double otherwise) {
    double all = 0.0, off = 0.0, size = 0.0;
    int64_t i, k;
    if (rows < 8) return otherwise;
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
    if (!compare_is_finite(all) || !compare_is_finite(off) || !(all > 1e-12 * size)) return otherwise;
    return sqrt(off / all);
}

/* An array of *n records of `size` bytes, made long enough for a site; new records are zeroed. Returns the array; NULL
 * without memory, and the old array stays. */
static void *compare_grown(void *old, int *n, size_t size, int site) {
    const int room = site <= *n ? *n : site > 2 * *n ? site + 64 : 2 * *n;
    char *longer = (char *)old;
    if (room > *n) longer = (char *)realloc(old, (size_t)room * size);
    if (!longer) return NULL;
    memset(longer + (size_t)*n * size, 0, (size_t)(room - *n) * size);
    *n = room;
    return longer;
}

/* The place of a site, made if it is new; NULL without memory. */
static compare_kept *compare_place(compare_runs *m, mixp_context *ctx, int site) {
    compare_kept *kept = (compare_kept *)compare_grown(m->kept, &m->n, sizeof *kept, site);
    if (!kept) {
        m->result = compare_out_of_memory(ctx, (size_t)site * sizeof *kept);
        return NULL;
    }
    m->kept = kept;
    return &kept[site - 1];
}

/* The first run keeps, the second compares. Only the first pass through a site counts. */
static void compare_value(compare_runs *m, mixp_context *ctx, compare_kept *kept, const mixp_sight *s) {
    const mixp_tensor *t = s->tensor;
    const int64_t cols = t->rank > 1 ? t->shape[t->rank - 1] : 1;
    compare_distance d;
    float *values;
    if (m->second ? kept->done || kept->count != t->count : kept->value != NULL) return;
    values = compare_read(ctx, t);
    if (!values) {
        m->result = MIXP_ERR_MEMORY;
        return;
    }
    if (!m->second) {
        kept->value = values;
        kept->count = t->count;
        kept->row.site = s->name;
        kept->row.dtype_a = t->dtype;
        memcpy(kept->reads, s->reads, sizeof kept->reads);
        return;
    }
    d = compare_distance_of(kept->value, values, t->count);
    kept->row.varied = compare_varied(kept->value, values, t->count / cols, cols, d.relative);
    free(values);
    kept->done = 1;
    kept->row.dtype_b = t->dtype;
    kept->row.relative = d.relative;
    kept->row.largest = d.largest;
    kept->row.cosine = d.cosine;
}

static void compare_grad(compare_runs *m, mixp_context *ctx, compare_kept *kept, const mixp_tensor *g) {
    double scale = m->desc->scale > 0.0f ? (double)m->desc->scale : 1.0;
    compare_distance d;
    float *values;
    if (m->second ? kept->done != 1 || !kept->grad : kept->grad != NULL) return;
    if (g->count != kept->count) return;
    values = compare_read(ctx, g);
    if (!values) {
        m->result = MIXP_ERR_MEMORY;
        return;
    }
    if (!m->second) {
        kept->grad = values;
        return;
    }
    d = compare_distance_of(kept->grad, values, g->count);
    free(values);
    kept->done = 2;
    kept->row.has_grad = 1;
    kept->row.grad_relative = d.relative;
    kept->row.grad_largest = d.largest / scale;
    kept->row.grad_cosine = d.cosine;
}

/* The observer of both runs. */
static void compare_see(mixp_context *ctx, const mixp_sight *s, void *user) {
    compare_runs *m = (compare_runs *)user;
    const mixp_autocast now = mixp_autocast_current(ctx);
    compare_kept *kept;
    if (m->result != MIXP_OK) return;
    kept = compare_place(m, ctx, s->site);
    if (!kept) return;
    if (s->backward) {
        compare_grad(m, ctx, kept, s->tensor);
        return;
    }
    m->random |= s->draws > 0;
    m->strayed |= (now.dtype == MIXP_F16 || now.dtype == MIXP_BF16) &&
                  (now.dtype != m->region.dtype || now.level != m->region.level);
    compare_value(m, ctx, kept, s);
}

/* Ends a capture that fn has left open: in a capture the context works on another stream. */
static mixp_result compare_uncapture(mixp_context *ctx, const void *stream) {
    if (mixp_context_exec(ctx)->stream == stream) return MIXP_OK;
    mixp_context_fail(ctx, MIXP_ERR_ORDER,
                      "mixp_compare: fn has left a capture open; fn must call mixp_capture_end, or must not capture");
    mixp_graph_free(mixp_capture_end(ctx));
    return MIXP_ERR_ORDER;
}

/* Closes the region of a run, and any region that fn left open. */
static mixp_result compare_close(mixp_context *ctx) {
    const int open = mixp_no_grad_open(ctx);    /* regions open before this one */
    mixp_autocast_close(ctx, 0);
    if (open == 1) return MIXP_OK;
    return mixp_context_fail(ctx, MIXP_ERR_ORDER,
                             "mixp_compare: fn has %s a region or a scope; fn must return with the same regions and "
                             "scopes open", open ? "opened" : "closed");
}

/* What fn must not do; MIXP_OK if it did not. */
static mixp_result compare_refuse(mixp_context *ctx, const compare_runs *m) {
    if (m->random)
        return mixp_context_fail(ctx, MIXP_ERR_ORDER,
                                 "mixp_compare: fn uses dropout, and the runs would draw different numbers; pass "
                                 "training 0 to mixp_dropout, and dropout 0 to mixp_attention");
    if (m->strayed)
        return mixp_context_fail(ctx, MIXP_ERR_ORDER,
                                 "mixp_compare: fn opens an autocast region, in which both runs would be the same; "
                                 "set the dtypes in the description instead (a region of MIXP_F32 is allowed)");
    return MIXP_OK;
}

/* One run: forward, then backward. */
static mixp_result compare_run(mixp_context *ctx, compare_runs *m, const mixp_autocast *region) {
    const void *stream = mixp_context_exec(ctx)->stream;
    mixp_tensor *loss;
    mixp_result r = mixp_step_begin(ctx), recorded;
    if (r != MIXP_OK) return r;
    if (mixp_autocast_open_with(ctx, region) < 0) return mixp_context_error(ctx, NULL);
    m->region = mixp_autocast_current(ctx);
    loss = m->desc->fn(ctx, m->desc->user);
    recorded = compare_uncapture(ctx, stream);
    r = compare_close(ctx);
    if (r == MIXP_OK) r = recorded;
    if (r == MIXP_OK) r = compare_refuse(ctx, m);
    if (r != MIXP_OK) return r;
    if (loss && m->desc->scale > 0.0f) loss = mixp_scale(ctx, loss, m->desc->scale);
    r = mixp_backward(ctx, loss);
    return r == MIXP_OK ? m->result : r;
}

static int compare_order(const void *a, const void *b) {
    const mixp_difference *x = (const mixp_difference *)a, *y = (const mixp_difference *)b;
    if (x->added < y->added) return 1;
    if (x->added > y->added) return -1;
    return x->relative < y->relative ? 1 : x->relative > y->relative ? -1 : 0;
}

/* How much more a site differs than each site that it reads. */
static double compare_added(const compare_runs *m, const compare_kept *kept) {
    double most = 0.0;
    int i;
    for (i = 0; i < 4 && kept->reads[i]; i++) {
        const compare_kept *from = kept->reads[i] <= m->n ? &m->kept[kept->reads[i] - 1] : NULL;
        if (from && from->done && from->row.varied > most) most = from->row.varied;
    }
    return kept->row.varied > most ? kept->row.varied - most : 0.0;
}

/* Writes the rows of the sites that both runs met, sorted; sets *n to their number. */
static mixp_result compare_rows(mixp_context *ctx, const compare_runs *m, mixp_difference *rows, int64_t room,
                                int64_t *n) {
    const size_t bytes = (size_t)(m->n + 1) * sizeof *rows;
    mixp_difference *all = (mixp_difference *)malloc(bytes);
    int64_t i;
    if (!all) return compare_out_of_memory(ctx, bytes);
    for (i = 0; i < m->n; i++) {
        if (!m->kept[i].done) continue;
        all[*n] = m->kept[i].row;
        all[(*n)++].added = compare_added(m, &m->kept[i]);
    }
    qsort(all, (size_t)*n, sizeof *all, compare_order);
    for (i = 0; i < *n && i < room; i++) rows[i] = all[i];
    free(all);
    return MIXP_OK;
}

static void compare_free(compare_runs *m) {
    int i;
    for (i = 0; i < m->n; i++) {
        free(m->kept[i].value);
        free(m->kept[i].grad);
    }
    free(m->kept);
}

static int compare_is_real(mixp_dtype dtype)
{ return dtype == MIXP_F32 || dtype == MIXP_F16 || dtype == MIXP_BF16; }

/* Returns what is wrong with the call, or NULL. */
static const char *compare_wrong(const mixp_compare_desc *d, const mixp_difference *rows, int64_t room,
                                 const int64_t *n) {
    if (!d || !d->fn) return "the description or its fn is NULL";
    if (!rows || room < 1 || !n) return "rows and n must not be NULL, and room must be at least 1";
    if (!compare_is_real(d->a.dtype) || !compare_is_real(d->b.dtype)) return "a dtype must be f16, bf16 or f32 (off)";
    if (d->a.level < 0 || d->a.level > 3 || d->b.level < 0 || d->b.level > 3) return "a level must be 0 to 3";
    if (!compare_is_finite((double)d->scale) || d->scale < 0.0f) return "the scale must be finite and at least 0";
    return NULL;
}

/* Runs fn in one step under a and one under b, on the same batch and weights, each forward and backward. Writes the
 * sites that both runs have to rows, at most `room` rows. The site that adds most error comes first: the cause, and
 * not the place where it becomes visible. Sets *n to the number of such sites. Needs no guard. A guard that is on
 * stays on, and its fallbacks apply in both runs. Weights, loss scale, random numbers and the step count keep their
 * values; gradients of parameters are forgotten. Allocates host memory for the results of all sites, and frees it.
 * Waits for the device. Both runs are trials: see mixp_observe.
 *
 * MIXP_ERR_ORDER: a region is open, fn uses dropout, which would draw different numbers in each run (pass training
 * 0), or fn leaves a capture open, which mixp_compare then ends. MIXP_ERR_ARGUMENT: fn, rows, room or n is missing, or
 * a setting is out of range. */
COMPARE_API mixp_result mixp_compare(mixp_context *ctx, const mixp_compare_desc *desc, mixp_difference *rows,
                                     int64_t room, int64_t *n) {
    const char *wrong = compare_wrong(desc, rows, room, n);
    mixp_observer observer, before;
    compare_runs m;
    mixp_result r, back;
    if (!ctx) return MIXP_ERR_ARGUMENT;
    if (wrong) return mixp_context_fail(ctx, MIXP_ERR_ARGUMENT, "mixp_compare: %s", wrong);
    memset(&m, 0, sizeof m);
    m.desc = desc;
    observer.see = compare_see;
    observer.user = &m;
    observer.trial = 1;
    *n = 0;
    r = mixp_observe(ctx, &observer, &before);
    if (r != MIXP_OK) return r;
    r = compare_run(ctx, &m, &desc->a);
    m.second = 1;
    if (r == MIXP_OK) r = compare_run(ctx, &m, &desc->b);
    back = mixp_observe(ctx, &before, NULL);
    if (r == MIXP_OK) r = back;
    if (r == MIXP_OK) r = compare_rows(ctx, &m, rows, room, n);
    compare_free(&m);
    return r;
}

/* --- stored values by exponent ------------------------------------------------------------------------ */

/* The counts of one site, in device memory. */
typedef struct exponents_site {
    const char *name;           /* as in mixp_site_info; NULL: not met */
    int64_t    *counts;
    int         sample;         /* the sample that the counts are of */
} exponents_site;

typedef struct mixp_exponents {
    mixp_context   *ctx;
    mixp_observer   before;     /* is called as well */
    exponents_site *sites;      /* indexed by the site's number - 1 */
    int             n;
    int             sample;     /* the newest sample */
    mixp_look      *row;        /* device memory that the kernel adds to */
} mixp_exponents;

/* Device memory of a context; NULL without memory. */
static void *exponents_allocate(mixp_context *ctx, size_t bytes) {
    const mixp_device *device = mixp_context_device(ctx);
    return device->allocate ? device->allocate(mixp_context_exec(ctx), bytes) : malloc(bytes);
}

static void exponents_release(mixp_context *ctx, void *p) {
    const mixp_device *device = mixp_context_device(ctx);
    if (!p) return;
    if (device->release) device->release(mixp_context_exec(ctx), p);
    else free(p);
}

/* Sets device memory of at most MIXP_EXPONENTS counts to zero. */
static mixp_result exponents_zero(mixp_context *ctx, void *p, size_t bytes) {
    static const int64_t zeros[MIXP_EXPONENTS] = { 0 };
    const mixp_device *device = mixp_context_device(ctx);
    if (device->upload) return device->upload(mixp_context_exec(ctx), p, zeros, bytes);
    memcpy(p, zeros, bytes);
    return MIXP_OK;
}

/* The place of a site, with counts; NULL without memory. */
static exponents_site *exponents_place(mixp_exponents *e, int site) {
    exponents_site *place = (exponents_site *)compare_grown(e->sites, &e->n, sizeof *place, site);
    if (!place) return NULL;
    e->sites = place;
    place += site - 1;
    if (!place->counts)
        place->counts = (int64_t *)exponents_allocate(e->ctx, MIXP_EXPONENTS * sizeof *place->counts);
    return place->counts ? place : NULL;
}

/* Counts the values of one site. The first sight in a sample begins at zero. */
static mixp_result exponents_count(mixp_exponents *e, exponents_site *site, const mixp_sight *s) {
    mixp_result r = MIXP_OK;
    mixp_look_args k;
    site->name = s->name;
    if (site->sample != s->sample) r = exponents_zero(e->ctx, site->counts, MIXP_EXPONENTS * sizeof *site->counts);
    if (r != MIXP_OK) return r;
    site->sample = s->sample;
    memset(&k, 0, sizeof k);
    k.n = s->tensor->count;
    k.x.data = s->tensor->data;
    k.x.dtype = s->tensor->dtype;
    k.low = MIXP_F16;
    k.row = e->row;
    k.exponents = site->counts;
    return mixp_context_device(e->ctx)->kernels->look(mixp_context_exec(e->ctx), &k);
}

/* The observer: counts what is stored in sampled steps. */
static void exponents_see(mixp_context *ctx, const mixp_sight *s, void *user) {
    mixp_exponents *e = (mixp_exponents *)user;
    exponents_site *site;
    if (e->before.see) e->before.see(ctx, s, e->before.user);
    if (!s->sample || s->backward) return;
    e->sample = s->sample;
    site = exponents_place(e, s->site);
    if (!site) mixp_context_fail(ctx, MIXP_ERR_MEMORY, "mixp_site_exponents: no memory for the counts of a site");
    else if (exponents_count(e, site, s) != MIXP_OK)
        mixp_context_fail(ctx, MIXP_ERR_DEVICE, "mixp_site_exponents: the device failed to count");
}

/* Begins to count, by exponent, the values that sites store in the sampled steps of a guard; the kernel about doubles
 * the time of sampling. Takes 2 KiB of device memory for each site, at its first sample. Call it between steps, and
 * mixp_exponents_free before you free the context. Returns NULL with the context's error set: a region or a scope is
 * open, no memory, or the device has no kernel `look`. */
COMPARE_API mixp_exponents *mixp_exponents_new(mixp_context *ctx) {
    mixp_exponents *e = ctx ? (mixp_exponents *)calloc(1, sizeof *e) : NULL;
    mixp_observer observer;
    if (!e) {
        mixp_context_fail(ctx, MIXP_ERR_MEMORY, "mixp_exponents_new: no memory");
        return NULL;
    }
    e->ctx = ctx;
    observer.see = exponents_see;
    observer.user = e;
    observer.trial = 0;
    e->row = (mixp_look *)exponents_allocate(ctx, sizeof *e->row);
    if (!mixp_context_device(ctx)->kernels->look)
        mixp_context_fail(ctx, MIXP_ERR_DEVICE, "mixp_exponents_new: the device '%s' has no kernel `look`",
                          mixp_context_device(ctx)->name);
    else if (!e->row || exponents_zero(ctx, e->row, sizeof *e->row) != MIXP_OK)
        mixp_context_fail(ctx, MIXP_ERR_MEMORY, "mixp_exponents_new: no memory on the device");
    else if (mixp_observe(ctx, &observer, &e->before) == MIXP_OK) return e;
    exponents_release(ctx, e->row);
    free(e);
    return NULL;
}

/* Stops counting, installs the observer that was there before, and frees e. NULL is allowed. Call it between steps.
 * With the context's MIXP_ERR_ORDER, e continues and nothing is freed: a region or a scope is open, or an observer that
 * was installed after e, which may call e, is still there. */
COMPARE_API void mixp_exponents_free(mixp_exponents *e) {
    mixp_observer now;
    int i;
    if (!e || mixp_observe(e->ctx, &e->before, &now) != MIXP_OK) return;
    if (now.see && now.user != e) {
        mixp_observe(e->ctx, &now, NULL);
        mixp_context_fail(e->ctx, MIXP_ERR_ORDER, "mixp_exponents_free: remove the newer observer first");
        return;
    }
    for (i = 0; i < e->n; i++) exponents_release(e->ctx, e->sites[i].counts);
    exponents_release(e->ctx, e->row);
    free(e->sites);
    free(e);
}

/* Adds the counts of one site, if they are from the last sample. */
static mixp_result exponents_add(const mixp_exponents *e, const exponents_site *site, int64_t *counts) {
    const mixp_device *device = mixp_context_device(e->ctx);
    const size_t bytes = MIXP_EXPONENTS * sizeof *counts;
    int64_t found[MIXP_EXPONENTS];
    mixp_result r = MIXP_OK;
    int i;
    if (!site->name || site->sample != e->sample) return MIXP_OK;
    if (device->download) r = device->download(mixp_context_exec(e->ctx), found, site->counts, bytes);
    else memcpy(found, site->counts, bytes);
    for (i = 0; r == MIXP_OK && i < MIXP_EXPONENTS; i++) counts[i] += found[i];
    return r;
}

/* Sets counts[x + 127] to the number of values with exponent x that site i of mixp_site stored in the last sampled
 * step; MIXP_EXPONENTS counts, as in mixp_look_args. i = -1: all sites together. With ranks: this rank's values.
 * Returns 0 if there is no such site, e or counts is NULL, or the device fails; otherwise 1. Waits for the device. */
COMPARE_API int mixp_site_exponents(const mixp_exponents *e, int i, int64_t *counts) {
    mixp_site_info info;
    mixp_result r = MIXP_OK;
    int k;
    info.name = NULL;
    if (!e || !counts || i < -1 || (i >= 0 && !mixp_site(e->ctx, i, &info))) return 0;
    memset(counts, 0, MIXP_EXPONENTS * sizeof *counts);
    for (k = 0; k < e->n && r == MIXP_OK; k++)
        if (i < 0 || e->sites[k].name == info.name) r = exponents_add(e, &e->sites[k], counts);
    return r == MIXP_OK;
}

#endif
