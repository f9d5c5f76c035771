/* window_cases.h - convolutions, pooling and resizing of examples/conv.h in one to three dimensions, compared with
 * numbers recorded from PyTorch. The includer defines conv_context(), which chooses the device.
 * SPDX-License-Identifier: MIT OR Unlicense */
#ifndef WINDOW_CASES_H
#define WINDOW_CASES_H
#ifndef CONV_EACH
#  define CONV_EACH 1                   /* the slowest tests run every n-th case */
#endif
#include "../reference/conv.h"
#include "../../examples/conv.h"

enum { WINDOW_MOST = 1024 };

static uint32_t window_state;

/* As `numbers` of record_conv.py: sixteenths between -1 and 1. */
static void window_fill(float *v, int64_t n) {
    CHECK(n <= WINDOW_MOST);
    for (int64_t i = 0; i < n; i++) {
        window_state = window_state * 1664525u + 1013904223u;
        v[i] = (float)(int)(16.0 * ((double)(window_state >> 8) / 8388608.0 - 1.0)) / 16.0f;
    }
}

static mixp_tensor *window_param(mixp_context *ctx, const char *name, int rank, const int *sizes) {
    float        v[WINDOW_MOST];
    int64_t      shape[5];
    for (int i = 0; i < rank; i++) shape[i] = sizes[i];
    mixp_tensor *t = mixp_param(ctx, name, MIXP_F32, rank, shape);
    window_fill(v, t->count);
    CHECK_INT(mixp_write(t, v, MIXP_F32, t->count), MIXP_OK);
    return t;
}

typedef struct window_run {
    mixp_context      *ctx;
    const window_case *c;
    mixp_tensor       *x, *w, *b, *indices;
} window_run;

static void run_open(window_run *r, const window_case *c) {
    memset(r, 0, sizeof *r);
    window_state = 1;
    r->c = c;
    r->ctx = conv_context();
    r->x = window_param(r->ctx, "x", c->rank, c->x);
    if (c->w[0]) r->w = window_param(r->ctx, "w", c->rank, c->w);
    if (c->bias) r->b = window_param(r->ctx, "b", 1, &c->bias);
}

static mixp_tensor *run_conv(window_run *r) {
    typedef mixp_tensor *(*convolution)(mixp_context *, mixp_tensor *, mixp_tensor *, mixp_tensor *, const conv_desc *);
    static const convolution of[2][3] = { { conv1d, conv2d, conv3d },
                                          { conv_transpose1d, conv_transpose2d, conv_transpose3d } };
    const window_case *c = r->c;
    conv_desc          d;
    memset(&d, 0, sizeof d);
    memcpy(d.stride, c->stride, sizeof d.stride);
    memcpy(d.padding, c->padding, sizeof d.padding);
    memcpy(d.dilation, c->dilation, sizeof d.dilation);
    memcpy(d.output_padding, c->more, sizeof d.output_padding);
    d.groups = c->groups;
    return of[c->kind == CASE_TRANSPOSE][c->rank - 3](r->ctx, r->x, r->w, r->b, &d);
}

static mixp_tensor *run_pool(window_run *r) {
    const window_case *c = r->c;
    pool_desc          d;
    int64_t            size[3];
    memset(&d, 0, sizeof d);
    memcpy(d.size, c->size, sizeof d.size);
    memcpy(d.stride, c->stride, sizeof d.stride);
    memcpy(d.padding, c->padding, sizeof d.padding);
    memcpy(d.dilation, c->dilation, sizeof d.dilation);
    d.ceil_mode = c->ceil;
    d.image_only = c->image_only;
    d.divisor = c->divisor;
    if (c->kind == CASE_AVG) return avg_pool(r->ctx, r->x, &d);
    mixp_tensor *y = max_pool(r->ctx, r->x, &d, &r->indices);
    if (c->kind == CASE_MAX) return y;
    size[0] = c->x[2];
    size[1] = c->x[3];
    return max_unpool(r->ctx, y, r->indices, size);
}

static mixp_tensor *run_resize(window_run *r) {
    const window_case *c = r->c;
    interpolate_desc   d;
    memset(&d, 0, sizeof d);
    d.mode = c->kind == CASE_NEAREST  ? INTERPOLATE_NEAREST
             : c->kind == CASE_EXACT  ? INTERPOLATE_NEAREST_EXACT
             : c->kind == CASE_LINEAR ? INTERPOLATE_LINEAR
                                      : INTERPOLATE_AREA;
    for (int i = 0; i < 3; i++) {
        d.size[i] = c->size[i];
        d.scale[i] = c->scale[i];
    }
    d.align_corners = c->corners;
    return interpolate(r->ctx, r->x, &d);
}

static mixp_tensor *run_case(window_run *r) {
    const window_case *c = r->c;
    int64_t            size[3];
    for (int i = 0; i < 3; i++) size[i] = c->size[i];
    switch (c->kind) {
    case CASE_CONV: case CASE_TRANSPOSE: return run_conv(r);
    case CASE_MAX: case CASE_AVG: case CASE_UNPOOL: return run_pool(r);
    case CASE_ADAPTIVE_MAX: return adaptive_max_pool(r->ctx, r->x, size, &r->indices);
    case CASE_ADAPTIVE_AVG: return adaptive_avg_pool(r->ctx, r->x, size);
    case CASE_SHUFFLE: return pixel_shuffle(r->ctx, r->x, c->factor);
    case CASE_UNSHUFFLE: return pixel_unshuffle(r->ctx, r->x, c->factor);
    default: return run_resize(r);
    }
}

/* Compares t with recorded numbers. Returns the next ones. */
static const double *window_near(const mixp_tensor *t, const double *want, double within) {
    float   got[WINDOW_MOST];
    int64_t i;
    CHECK(t != NULL);
    if (!t) return want;
    CHECK_INT(mixp_read(t, got, MIXP_F32, t->count), MIXP_OK);
    for (i = 0; i < t->count; i++) CHECK_NEAR((double)got[i], want[i], within * (1 + fabs(want[i])));
    return want + t->count;
}

static void window_indices(const mixp_tensor *t, const double *want) {
    int32_t got[WINDOW_MOST];
    CHECK(t && t->dtype == MIXP_I32);
    if (!t) return;
    CHECK_INT(mixp_read(t, got, MIXP_I32, t->count), MIXP_OK);
    for (int64_t i = 0; i < t->count; i++) CHECK_INT(got[i], (int)want[i]);
}

/* The loss: the sum of y times the next numbers. */
static mixp_tensor *run_loss(window_run *r, mixp_tensor *y) {
    static float slope[WINDOW_MOST];
    window_fill(slope, y->count);
    return mixp_sum(r->ctx, mixp_mul(r->ctx, y, mixp_input(r->ctx, MIXP_F32, y->rank, y->shape, slope)), MIXP_ALL, 0);
}

static void windows_beside_pytorch(void) {
    for (size_t at = 0; at < sizeof window_cases / sizeof window_cases[0]; at++) {
        const window_case *c = &window_cases[at];
        const double      *want = window_numbers + c->first;
        const int          failed = test_bad;
        window_run         r;
        run_open(&r, c);
        mixp_step_begin(r.ctx);
        mixp_tensor *y = run_case(&r);
        CHECK(y && y->rank == c->rank);
        if (y) {
            for (int i = 0; i < c->rank; i++) CHECK_INT(y->shape[i], c->y[i]);
            want = window_near(y, want, 2e-6);
            CHECK_INT(mixp_backward(r.ctx, run_loss(&r, y)), MIXP_OK);
            want = window_near(r.x->grad, want, 4e-6);
            if (r.w) want = window_near(r.w->grad, want, 4e-6);
            if (r.b) want = window_near(r.b->grad, want, 4e-6);
            if (r.indices && c->kind != CASE_UNPOOL) window_indices(r.indices, want);
        }
        CHECK_INT(mixp_context_error(r.ctx, NULL), MIXP_OK);
        if (test_bad > failed) printf("  case %d, kind %d\n", (int)at, c->kind);
        mixp_context_free(r.ctx);
    }
}

/* Under autocast convolutions are low, with a bias too; everything else keeps the dtype of x. */
static void windows_keep_dtypes(void) {
    for (size_t at = 0; at < 2 * (sizeof window_cases / sizeof window_cases[0]); at += (size_t)CONV_EACH) {
        const window_case *c = &window_cases[at / 2];
        const int          convolves = c->kind == CASE_CONV || c->kind == CASE_TRANSPOSE;
        const mixp_dtype   low = at % 2 ? MIXP_BF16 : MIXP_F16;
        const double       within = at % 2 ? 1.0 / 64 : 1.0 / 512;
        mixp_tensor       *y = NULL;
        window_run         r;
        run_open(&r, c);
        mixp_step_begin(r.ctx);
        if (convolves) MIXP_AUTOCAST(r.ctx, low) y = run_case(&r);
        else {
            r.x = mixp_cast(r.ctx, r.x, low);
            MIXP_AUTOCAST(r.ctx, MIXP_F16) y = run_case(&r);
        }
        CHECK(y && y->dtype == low);
        window_near(y, window_numbers + c->first, within);
        CHECK_INT(mixp_context_error(r.ctx, NULL), MIXP_OK);
        mixp_context_free(r.ctx);
    }
}

/* A batch of none: a result of none, and gradients of 0. */
static void windows_of_an_empty_batch(void) {
    for (size_t at = 0; at < sizeof window_cases / sizeof window_cases[0]; at++) {
        const window_case *c = &window_cases[at];
        const int          failed = test_bad;
        int64_t            shape[5];
        float              got[WINDOW_MOST];
        window_run         r;
        run_open(&r, c);
        mixp_step_begin(r.ctx);
        for (int i = 0; i < 5; i++) shape[i] = i ? c->x[i] : 0;
        r.x = mixp_input(r.ctx, MIXP_F32, c->rank, shape, got);
        CHECK_INT(mixp_tensor_set_requires_grad(r.x, 1), MIXP_OK);
        mixp_tensor *y = run_case(&r);
        CHECK(y && y->rank == c->rank && y->shape[0] == 0);
        for (int i = 1; y && i < c->rank; i++) CHECK_INT(y->shape[i], c->y[i]);
        if (y) CHECK_INT(mixp_backward(r.ctx, mixp_sum(r.ctx, y, MIXP_ALL, 0)), MIXP_OK);
        if (y && r.w) {
            CHECK_INT(mixp_read(r.w->grad, got, MIXP_F32, r.w->count), MIXP_OK);
            for (int i = 0; i < r.w->count; i++) CHECK_NEAR((double)got[i], 0, 0);
        }
        CHECK_INT(mixp_context_error(r.ctx, NULL), MIXP_OK);
        if (test_bad > failed) {
            const char *why;
            mixp_context_error(r.ctx, &why);
            printf("  case %d, kind %d: %s\n", (int)at, c->kind, why);
        }
        mixp_context_free(r.ctx);
    }
}
#endif
