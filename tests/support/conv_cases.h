/* conv_cases.h - examples/conv.h compared with double loops. The includer defines conv_context(),
 * which chooses the device.
 * SPDX-License-Identifier: MIT OR Unlicense */
#ifndef CONV_CASES_H
#define CONV_CASES_H
#include "../../examples/conv.h"
#include "../../examples/ops.h"
#ifndef CONV_EACH
#  define CONV_EACH 1                   /* the slowest tests run every n-th case */
#endif

enum { CONV_MOST = 4096 };

static uint32_t conv_random = 1;
static float    conv_uniform(void) {
    conv_random = conv_random * 1664525u + 1013904223u;
    return (float)(conv_random >> 8) / 8388608.0f - 1.0f;
}

/* A parameter of numbers that bf16 holds, and its copy. */
static mixp_tensor *conv_numbers(mixp_context *ctx, const char *name, int rank, const int64_t *shape, double *copy) {
    static float v[CONV_MOST];
    mixp_tensor *t = mixp_param(ctx, name, MIXP_F32, rank, shape);
    CHECK(t && t->count <= CONV_MOST);
    if (!t) return NULL;
    for (int64_t i = 0; i < t->count; i++) {
        v[i] = (float)(int)(16.0f * conv_uniform()) / 16.0f;
        copy[i] = (double)v[i];
    }
    CHECK_INT(mixp_write(t, v, MIXP_F32, t->count), MIXP_OK);
    return t;
}

typedef struct conv_case { int64_t b, in, h, w, out, kh, kw; conv_desc d; } conv_case;

static const conv_case conv_cases[] = {
    { 2, 3, 5, 6, 4, 3, 3, { { 1, 1 }, { 1, 1 }, { 1, 1 }, 1, { 0, 0 } } },
    { 1, 2, 7, 5, 2, 3, 2, { { 2, 1 }, { 0, 2 }, { 1, 1 }, 1, { 0, 0 } } },
    { 2, 4, 6, 6, 6, 3, 3, { { 1, 2 }, { 2, 2 }, { 2, 2 }, 2, { 0, 0 } } },
    { 3, 4, 4, 4, 4, 2, 2, { { 1, 1 }, { 0, 0 }, { 1, 1 }, 4, { 0, 0 } } },
    { 1, 1, 1, 1, 1, 1, 1, { { 0, 0 }, { 0, 0 }, { 0, 0 }, 0, { 0, 0 } } },
    { 2, 2, 1, 9, 3, 1, 4, { { 1, 3 }, { 0, 3 }, { 1, 2 }, 1, { 0, 0 } } },
    { 2, 3, 4, 4, 2, 4, 4, { { 3, 3 }, { 2, 2 }, { 1, 1 }, 1, { 0, 0 } } }
};

static int conv_or_1(int x) { return x ? x : 1; }

/* One element of conv2d, from its definition. */
static double conv_at(const conv_case *k, const double *x, const double *w, int64_t n, int64_t o, int64_t r, int64_t c) {
    int64_t groups = conv_or_1(k->d.groups), each = k->in / groups, i, j, ch;
    double  sum = 0;
    for (ch = 0; ch < each; ch++)
        for (i = 0; i < k->kh; i++)
            for (j = 0; j < k->kw; j++) {
                int64_t y0 = r * conv_or_1(k->d.stride[0]) - k->d.padding[0] + i * conv_or_1(k->d.dilation[0]);
                int64_t x0 = c * conv_or_1(k->d.stride[1]) - k->d.padding[1] + j * conv_or_1(k->d.dilation[1]);
                int64_t from = o / (k->out / groups) * each + ch;
                if (y0 < 0 || y0 >= k->h || x0 < 0 || x0 >= k->w) continue;
                sum += x[((n * k->in + from) * k->h + y0) * k->w + x0] * w[((o * each + ch) * k->kh + i) * k->kw + j];
            }
    return sum;
}

/* Forward of every case, in f32 and, exact in f16, under autocast: numbers are sixteenths. */
static void conv_forward_is_its_definition(void) {
    static double x[CONV_MOST], w[CONV_MOST], bias[16];
    static float  y[CONV_MOST];
    for (size_t at = 0; at < sizeof conv_cases / sizeof conv_cases[0]; at++) {
        const conv_case *k = &conv_cases[at];
        mixp_context *ctx = conv_context();
        int64_t sx[4], sw[4], sb[1], i;
        mixp_tensor *tx, *tw, *tb, *ty = NULL;
        sx[0] = k->b; sx[1] = k->in; sx[2] = k->h; sx[3] = k->w;
        sw[0] = k->out; sw[1] = k->in / conv_or_1(k->d.groups); sw[2] = k->kh; sw[3] = k->kw;
        sb[0] = k->out;
        tx = conv_numbers(ctx, "x", 4, sx, x);
        tw = conv_numbers(ctx, "w", 4, sw, w);
        tb = conv_numbers(ctx, "b", 1, sb, bias);
        for (int f16 = 0; f16 < 2; f16++) {
            mixp_step_begin(ctx);
            MIXP_AUTOCAST(ctx, f16 ? MIXP_F16 : MIXP_F32) { ty = conv2d(ctx, tx, tw, tb, &k->d); }
            CHECK(ty != NULL);
            if (!ty) break;
            CHECK_INT(ty->dtype, f16 ? MIXP_F16 : MIXP_F32);        /* autocast casts the bias too, as in PyTorch */
            CHECK_INT(mixp_read(ty, y, MIXP_F32, ty->count), MIXP_OK);
            for (i = 0; i < ty->count; i++) {
                int64_t c = i % ty->shape[3], r = i / ty->shape[3] % ty->shape[2];
                int64_t o = i / (ty->shape[3] * ty->shape[2]) % k->out, n = i / (ty->shape[3] * ty->shape[2] * k->out);
                double want = conv_at(k, x, w, n, o, r, c);
                CHECK_NEAR((double)y[i], want + bias[o], (f16 ? 1.0 / 1024 : 1e-5) * (1 + fabs(want) + fabs(bias[o])));
            }
        }
        CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
        mixp_context_free(ctx);
    }
}

typedef struct conv_check { mixp_tensor *x, *w, *b; const conv_desc *d; int what; norm_statistics *keep; } conv_check;

/* A scalar that depends on every element in its own way. */
static mixp_tensor *conv_scalar(mixp_context *ctx, void *user) {
    conv_check  *k = (conv_check *)user;
    mixp_tensor *y = k->what == 0   ? conv2d(ctx, k->x, k->w, k->b, k->d)
                     : k->what == 1 ? conv_transpose2d(ctx, k->x, k->w, k->b, k->d)
                     : k->what == 2 ? max_pool2d(ctx, k->x, 2, 0, 0)
                     : k->what == 3 ? avg_pool2d(ctx, k->x, 3, 2, 1)
                     : k->what == 4 ? group_norm(ctx, k->x, 2, k->w, k->b, 1e-2f)
                                    : batch_norm(ctx, k->x, k->w, k->b, NULL, 1, 1e-2f);
    return mixp_mean(ctx, mixp_sin(ctx, y), MIXP_ALL, 0);
}

static void conv_differences(mixp_context *ctx, conv_check *k, int inputs) {
    mixp_tensor *in[3];
    double worst = 1;
    in[0] = k->x;
    in[1] = k->w;
    in[2] = k->b;
    CHECK_INT(mixp_check_gradients(ctx, conv_scalar, k, inputs, in, 1e-2, &worst), MIXP_OK);
    CHECK_NEAR(worst, 0, 2e-3);
}

static void conv_gradients_are_differences(void) {
    static double unused[CONV_MOST];
    for (size_t at = 0; at < sizeof conv_cases / sizeof conv_cases[0]; at += (size_t)CONV_EACH) {
        const conv_case *k = &conv_cases[at];
        int64_t sx[4], sw[4], sb[1];
        conv_check check;
        memset(&check, 0, sizeof check);
        check.d = &k->d;
        for (check.what = 0; check.what < 2; check.what++) {
            mixp_context *ctx = conv_context();
            int64_t in = check.what ? k->out : k->in, out = check.what ? k->in : k->out;
            sx[0] = k->b; sx[1] = in; sx[2] = k->h; sx[3] = k->w;
            sw[0] = k->out; sw[1] = k->in / conv_or_1(k->d.groups); sw[2] = k->kh; sw[3] = k->kw;
            sb[0] = out;
            check.x = conv_numbers(ctx, "x", 4, sx, unused);
            check.w = conv_numbers(ctx, "w", 4, sw, unused);
            check.b = conv_numbers(ctx, "b", 1, sb, unused);
            conv_differences(ctx, &check, 3);
            mixp_context_free(ctx);
        }
    }
}

/* <y, conv(x)> is <transpose(y), x>: the definition of a transpose. */
static void conv_transpose_is_a_transpose(void) {
    static double x[CONV_MOST], y[CONV_MOST], unused[CONV_MOST];
    static float  got[CONV_MOST];
    const conv_case *k = &conv_cases[1];
    mixp_context *ctx = conv_context();
    int64_t sx[4] = { 1, 2, 7, 5 }, sw[4] = { 2, 2, 3, 2 }, sy[4], i;
    mixp_tensor *tx = conv_numbers(ctx, "x", 4, sx, x), *tw = conv_numbers(ctx, "w", 4, sw, unused), *ty, *there, *back;
    double left = 0, right = 0;
    mixp_step_begin(ctx);
    there = conv2d(ctx, tx, tw, NULL, &k->d);
    CHECK(there != NULL);
    for (i = 0; i < 4; i++) sy[i] = there->shape[i];
    ty = conv_numbers(ctx, "y", 4, sy, y);
    CHECK_INT(mixp_read(there, got, MIXP_F32, there->count), MIXP_OK);
    for (i = 0; i < there->count; i++) left += y[i] * (double)got[i];
    back = conv_transpose2d(ctx, ty, tw, NULL, &k->d);
    CHECK(back && back->count == tx->count);
    CHECK_INT(mixp_read(back, got, MIXP_F32, back->count), MIXP_OK);
    for (i = 0; i < back->count; i++) right += x[i] * (double)got[i];
    CHECK_NEAR(left, right, 1e-4 * (1 + fabs(left)));
    mixp_context_free(ctx);
}

static void conv_pools_and_norms(void) {
    static double x[CONV_MOST], unused[CONV_MOST];
    static float  y[CONV_MOST];
    mixp_context *ctx = conv_context();
    int64_t shape[4] = { 2, 4, 6, 4 }, channels[1] = { 4 }, i;
    conv_check check;
    memset(&check, 0, sizeof check);
    check.x = conv_numbers(ctx, "x", 4, shape, x);
    check.w = conv_numbers(ctx, "gamma", 1, channels, unused);
    check.b = conv_numbers(ctx, "beta", 1, channels, unused);
    mixp_step_begin(ctx);
    mixp_tensor *p = max_pool2d(ctx, check.x, 3, 2, 1);
    CHECK(p && p->shape[2] == 3 && p->shape[3] == 2);
    CHECK_INT(mixp_read(p, y, MIXP_F32, p->count), MIXP_OK);
    for (i = 0; i < p->count; i++) {
        int64_t c = i % 2 * 2 - 1, r = i / 2 % 3 * 2 - 1, plane = i / 6, u, v;
        double most = -99;
        for (u = r < 0 ? 0 : r; u < r + 3 && u < 6; u++)
            for (v = c < 0 ? 0 : c; v < c + 3 && v < 4; v++)
                if (x[(plane * 6 + u) * 4 + v] > most) most = x[(plane * 6 + u) * 4 + v];
        CHECK_NEAR((double)y[i], most, 0);
    }
    for (check.what = 3; check.what < 6; check.what++) conv_differences(ctx, &check, check.what == 3 ? 1 : 3);
    mixp_context_free(ctx);
}

/* Statistics of two batches, by PyTorch's rule: kept = 0.9 kept + 0.1 of the batch, the variance unbiased. */
static void conv_statistics_are_kept(void) {
    mixp_context *ctx = conv_context();
    int64_t shape[4] = { 2, 1, 1, 2 };
    static const float batch[2][4] = { { 1, 2, 3, 6 }, { 0, 0, 4, 4 } };
    float got[4], mean = 0, variance = 1;
    norm_statistics keep = batch_norm_statistics(ctx, "bn", 1);
    CHECK(keep.mean && keep.mean == mixp_context_find(ctx, "bn.running_mean"));
    CHECK(keep.variance && keep.variance == mixp_context_find(ctx, "bn.running_var"));
    CHECK_NEAR(mixp_item(keep.mean), 0, 0);
    CHECK_NEAR(mixp_item(keep.variance), 1, 0);
    for (int i = 0; i < 2; i++) {
        float m = i ? 2.0f : 3.0f, v = i ? 16.0f / 3.0f : 14.0f / 3.0f;
        mixp_step_begin(ctx);
        batch_norm(ctx, mixp_input(ctx, MIXP_F32, 4, shape, batch[i]), NULL, NULL, &keep, 1, 1e-5f);
        mean = 0.9f * mean + 0.1f * m;
        variance = 0.9f * variance + 0.1f * v;
    }
    CHECK_NEAR(mixp_item(keep.mean), (double)mean, 1e-6);
    CHECK_NEAR(mixp_item(keep.variance), (double)variance, 1e-6);
    mixp_step_begin(ctx);
    mixp_tensor *y = batch_norm(ctx, mixp_input(ctx, MIXP_F32, 4, shape, batch[0]), NULL, NULL, &keep, 0, 1e-5f);
    CHECK_INT(mixp_read(y, got, MIXP_F32, 4), MIXP_OK);
    for (int i = 0; i < 4; i++)
        CHECK_NEAR((double)got[i], ((double)batch[0][i] - (double)mean) / sqrt((double)variance + 1e-5), 1e-5);
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    mixp_context_free(ctx);
}

/* --- running statistics of steps that are skipped and repeated ----------------------------------------- */

enum { NORM_ROWS = 4, NORM_WIDTH = 2, NORM_STEPS = 12, NORM_LARGE = 5 };

/* A frozen convolution by 3 and -2, batch norm, and a head that is trained. */
typedef struct norm_run {
    mixp_context   *ctx;
    mixp_tensor    *w, *head, *loss;
    norm_statistics keep;
    mixp_scaler    *scaler;
    mixp_optimizer *opt;
    int             level;
    float           x[NORM_ROWS];
    double          mean[NORM_WIDTH], variance[NORM_WIDTH];     /* what the statistics must be */
} norm_run;

static mixp_tensor *norm_param(norm_run *n, const char *name, int rank, int64_t rows, int64_t columns) {
    int64_t shape[4] = { 0, 0, 1, 1 };
    shape[0] = rows;
    shape[1] = columns;
    return mixp_param(n->ctx, name, MIXP_F32, rank, shape);
}

static void norm_open(norm_run *n, int level, float scale, int guard) {
    static const float w[NORM_WIDTH] = { 3, -2 };
    mixp_scaler_desc   d;
    memset(n, 0, sizeof *n);
    memset(&d, 0, sizeof d);
    n->ctx = conv_context();
    n->level = level;
    n->w = norm_param(n, "w", 4, NORM_WIDTH, 1);
    n->head = norm_param(n, "head", 2, 1, NORM_WIDTH);
    n->keep = batch_norm_statistics(n->ctx, "bn", NORM_WIDTH);
    for (int c = 0; c < NORM_WIDTH; c++) n->variance[c] = 1;
    CHECK_INT(mixp_write(n->w, w, MIXP_F32, NORM_WIDTH), MIXP_OK);
    mixp_tensor_set_requires_grad(n->w, 0);
    mixp_fill(n->head, 0.5);
    d.init_scale = scale;
    n->scaler = mixp_scaler_new(n->ctx, &d);
    n->opt = mixp_optimizer_new(n->ctx, NULL);
    CHECK_INT(mixp_optimizer_add(n->opt, n->head, NULL), MIXP_OK);
    if (guard) mixp_guard_start(n->ctx, NULL);
}

static mixp_tensor *norm_of_batch(norm_run *n, int training) {
    const int64_t shape[4] = { NORM_ROWS, 1, 1, 1 };
    mixp_tensor  *y = conv2d(n->ctx, mixp_input(n->ctx, MIXP_F32, 4, shape, n->x), n->w, NULL, NULL);
    return batch_norm(n->ctx, y, NULL, NULL, &n->keep, training, 1e-5f);
}

/* One try. The head's gradients are f16, so that a loss scale can be too large. */
static void norm_try(norm_run *n) {
    const int64_t   flat[2] = { NORM_ROWS, NORM_WIDTH };
    mixp_tensor    *y = NULL;
    mixp_autocast_set_level(n->ctx, n->level);
    mixp_step_begin(n->ctx);
    mixp_zero_grad(n->opt);
    MIXP_AUTOCAST(n->ctx, MIXP_F16) {
        y = mixp_linear(n->ctx, mixp_reshape(n->ctx, norm_of_batch(n, 1), 2, flat), n->head, NULL);
        y = mixp_mean(n->ctx, mixp_square(n->ctx, mixp_add_scalar(n->ctx, y, 1.0f)), MIXP_ALL, 0);
    }
    n->loss = y;
    mixp_backward(n->ctx, mixp_scaler_scale(n->scaler, y));
    mixp_scaler_step(n->scaler, n->opt);
    mixp_scaler_update(n->scaler);
}

/* The batch counts in what the statistics must be, by PyTorch's rule, in double. */
static void norm_count(norm_run *n) {
    for (int c = 0; c < NORM_WIDTH; c++) {
        const double w = c ? -2 : 3;
        double       mean = 0, squares = 0;
        for (int i = 0; i < NORM_ROWS; i++) mean += w * (double)n->x[i] / NORM_ROWS;
        for (int i = 0; i < NORM_ROWS; i++) squares += (w * (double)n->x[i] - mean) * (w * (double)n->x[i] - mean);
        n->mean[c] += 0.1 * (mean - n->mean[c]);
        n->variance[c] += 0.1 * (squares / (NORM_ROWS - 1) - n->variance[c]);
    }
}

static void norm_compare(norm_run *n) {
    float got[2][NORM_WIDTH];
    CHECK_INT(mixp_read(n->keep.mean, got[0], MIXP_F32, NORM_WIDTH), MIXP_OK);
    CHECK_INT(mixp_read(n->keep.variance, got[1], MIXP_F32, NORM_WIDTH), MIXP_OK);
    for (int c = 0; c < NORM_WIDTH; c++) {
        CHECK_NEAR((double)got[0][c], n->mean[c], 1e-6 * sqrt(n->variance[c]));
        CHECK_NEAR((double)got[1][c], n->variance[c], 1e-5 * n->variance[c]);
    }
}

/* An evaluation is normalised by what the statistics must be, in fp16 too. */
static void norm_evaluate(norm_run *n) {
    float y[NORM_ROWS * NORM_WIDTH];
    mixp_eval_begin(n->ctx);
    for (int i = 0; i < NORM_ROWS; i++) n->x[i] = (float)i;
    MIXP_NO_GRAD(n->ctx) MIXP_AUTOCAST(n->ctx, MIXP_F16)
        CHECK_INT(mixp_read(norm_of_batch(n, 0), y, MIXP_F32, NORM_ROWS * NORM_WIDTH), MIXP_OK);
    for (int i = 0; i < NORM_ROWS * NORM_WIDTH; i++) {
        const int    c = i % NORM_WIDTH;
        const double x = (c ? -2 : 3) * (i / NORM_WIDTH), want = (x - n->mean[c]) / sqrt(n->variance[c] + 1e-5);
        CHECK_NEAR((double)y[i], want, 1e-4 * (1 + fabs(want)));
    }
}

/* The batch NORM_LARGE overflows the convolution. A skipped batch does not count, and a repeated one counts once. */
static void norm_steps(int level, float scale, int guard, int tries) {
    norm_run     n;
    mixp_verdict v;
    norm_open(&n, level, scale, guard);
    for (int step = 0; step < NORM_STEPS; step++) {
        for (int i = 0; i < NORM_ROWS; i++)
            n.x[i] = (step == NORM_LARGE ? 16384.0f : 1.0f) * (float)((5 * i + 3 * step) % 8 - 3) / 2.0f;
        do norm_try(&n);
        while (tries && mixp_retry(n.scaler, tries));
        mixp_item(n.loss);                      /* waits: on a GPU the verdict may lag */
        v = mixp_scaler_verdict(n.scaler);
        if (v.outcome == MIXP_STEP_APPLIED) norm_count(&n);
        norm_compare(&n);
    }
    CHECK(v.skipped > 0);
    if (guard && tries) CHECK_INT(v.applied, NORM_STEPS);
    norm_evaluate(&n);
    CHECK_INT(mixp_context_error(n.ctx, NULL), MIXP_OK);
    mixp_context_free(n.ctx);
}

static void conv_statistics_count_applied_steps(void) {
    for (int i = 0; i < 16; i += CONV_EACH) norm_steps(1 + i % 2, i & 2 ? 1024.0f : 4194304.0f, i & 4, i & 8 ? 20 : 0);
}

static void conv_bad_statistics_are_told(void) {
    mixp_context   *ctx = conv_context();
    const int64_t   shape[4] = { 2, 1, 1, 2 };
    const float     x[4] = { 1, 2, 3, 4 };
    norm_statistics first = batch_norm_statistics(ctx, "bn", 1), twice = batch_norm_statistics(ctx, "bn", 1);
    CHECK(first.mean && first.variance && !twice.mean && !twice.variance);
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_ERR_ARGUMENT);
    mixp_context_clear_error(ctx);
    mixp_step_begin(ctx);
    CHECK(!batch_norm(ctx, mixp_input(ctx, MIXP_F32, 4, shape, x), NULL, NULL, &twice, 1, 1e-5f));
    CHECK(!batch_norm(ctx, mixp_input(ctx, MIXP_F32, 4, shape, x), NULL, NULL, &twice, 0, 1e-5f));
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_ERR_ARGUMENT);
    mixp_context_free(ctx);
}

/* A channel of one value has no variance, for training and without running statistics; with these it is evaluated. */
static void conv_norm_of_one_value_is_told(void) {
    mixp_context   *ctx = conv_context();
    static const int64_t shape[3][4] = { { 1, 2, 1, 1 }, { 2, 2, 1, 1 }, { 1, 2, 1, 2 } };
    static const float   x[4] = { 3, -1, 5, 4 };
    norm_statistics keep = batch_norm_statistics(ctx, "bn", 2);
    float           got[2];
    for (int i = 0; i < 3; i++)
        for (int kept = 0; kept < 2; kept++)
            for (int training = 0; training < 2; training++) {
                int refused = i == 0 && (training || !kept);
                mixp_step_begin(ctx);
                mixp_tensor *in = mixp_input(ctx, MIXP_F32, 4, shape[i], x);
                mixp_tensor *y = batch_norm(ctx, in, NULL, NULL, kept ? &keep : NULL, training, 1e-5f);
                CHECK((y == NULL) == refused);
                CHECK_INT(mixp_context_error(ctx, NULL), refused ? MIXP_ERR_SHAPE : MIXP_OK);
                mixp_context_clear_error(ctx);
                if (i > 0 || refused) continue;
                CHECK_INT(mixp_read(y, got, MIXP_F32, 2), MIXP_OK);
                CHECK_NEAR((double)got[0], 3 / sqrt(1 + 1e-5), 1e-6);
                CHECK_NEAR((double)got[1], -1 / sqrt(1 + 1e-5), 1e-6);
            }
    mixp_context_free(ctx);
}

static void conv_bad_shapes_are_told(void) {
    static double unused[CONV_MOST];
    mixp_context *ctx = conv_context();
    int64_t sx[4] = { 1, 3, 4, 4 }, sw[4] = { 2, 2, 3, 3 }, big[4] = { 2, 3, 9, 9 };
    mixp_tensor *x = conv_numbers(ctx, "x", 4, sx, unused), *w = conv_numbers(ctx, "w", 4, sw, unused);
    mixp_tensor *b = conv_numbers(ctx, "big", 4, big, unused);
    const char *why;
    mixp_step_begin(ctx);
    CHECK(conv2d(ctx, x, w, NULL, NULL) == NULL);
    CHECK_INT(mixp_context_error(ctx, &why), MIXP_ERR_SHAPE);
    CHECK_TEXT(why, "x[b, in, ...] needs w[out, in / groups, ...]");
    mixp_context_clear_error(ctx);
    CHECK(conv2d(ctx, x, b, NULL, NULL) == NULL);
    CHECK_INT(mixp_context_error(ctx, &why), MIXP_ERR_SHAPE);
    CHECK_TEXT(why, "the kernel is larger than the padded image");
    mixp_context_clear_error(ctx);
    CHECK(max_pool2d(ctx, x, 5, 0, 0) == NULL);
    CHECK_INT(mixp_context_error(ctx, &why), MIXP_ERR_SHAPE);
    mixp_context_clear_error(ctx);
    CHECK(group_norm(ctx, x, 2, NULL, NULL, 1e-5f) == NULL);
    CHECK_INT(mixp_context_error(ctx, &why), MIXP_ERR_SHAPE);
    mixp_context_free(ctx);
}

static void conv_run_cases(void) {
    RUN(conv_forward_is_its_definition);
    RUN(conv_gradients_are_differences);
    RUN(conv_transpose_is_a_transpose);
    RUN(conv_pools_and_norms);
    RUN(conv_statistics_are_kept);
    RUN(conv_statistics_count_applied_steps);
    RUN(conv_bad_statistics_are_told);
    RUN(conv_norm_of_one_value_is_told);
    RUN(conv_bad_shapes_are_told);
}
#endif
