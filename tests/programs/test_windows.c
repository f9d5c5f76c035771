/* test_windows.c - convolutions, pooling and resizing of examples/conv.h in one, two and three dimensions: beside
 * PyTorch, what they refuse, and batch norm of other ranks.
 * SPDX-License-Identifier: MIT OR Unlicense */
#include "mixprec.h"
#include "test.h"
#define CONV_COLUMNS 100        /* so that the larger cases are done in several parts */

static mixp_context *conv_context(void) { return mixp_context_new(NULL); }
#include "window_cases.h"

/* --- refusals ------------------------------------------------------------------------------------------ */

static void refused(mixp_context *ctx, const mixp_tensor *y, mixp_result code, const char *text) {
    const char *why;
    CHECK(y == NULL);
    CHECK_INT(mixp_context_error(ctx, &why), code);
    CHECK_TEXT(why, text);
    mixp_context_clear_error(ctx);
}

static void refused_convolutions(void) {
    static const int sx[4] = { 1, 2, 4, 4 }, sw[4] = { 2, 2, 3, 3 }, line[3] = { 1, 2, 4 }, three[1] = { 3 };
    mixp_context *ctx = conv_context();
    mixp_tensor  *x = window_param(ctx, "x", 4, sx), *w = window_param(ctx, "w", 4, sw);
    mixp_tensor  *l = window_param(ctx, "l", 3, line), *b = window_param(ctx, "b", 1, three);
    conv_desc     d;
    mixp_step_begin(ctx);
    memset(&d, 0, sizeof d);
    refused(ctx, conv1d(ctx, x, w, NULL, NULL), MIXP_ERR_SHAPE, "conv1d: give tensors of rank 3");
    refused(ctx, conv3d(ctx, x, w, NULL, NULL), MIXP_ERR_SHAPE, "conv3d: give tensors of rank 5");
    refused(ctx, conv2d(ctx, x, l, NULL, NULL), MIXP_ERR_SHAPE, "conv2d: give tensors of rank 4");
    refused(ctx, conv_transpose2d(ctx, l, w, NULL, NULL), MIXP_ERR_SHAPE, "rank of this one is 3");
    refused(ctx, conv2d(ctx, x, w, b, NULL), MIXP_ERR_SHAPE, "one value for each of 2 channels; it has 3");
    d.stride[1] = 2;                            /* as programs for an earlier conv1d set it */
    refused(ctx, conv1d(ctx, l, l, NULL, &d), MIXP_ERR_SHAPE, "numbers for further ones to 0");
    d.stride[1] = -1;
    refused(ctx, conv2d(ctx, x, w, NULL, &d), MIXP_ERR_SHAPE, "strides and dilations are at least 1");
    d.stride[1] = 2;
    d.padding[1] = CONV_SAME;
    refused(ctx, conv2d(ctx, x, w, NULL, &d), MIXP_ERR_SHAPE, "CONV_SAME needs stride 1");
    d.padding[1] = -2;
    refused(ctx, conv2d(ctx, x, w, NULL, &d), MIXP_ERR_SHAPE, "padding at least 0");
    d.padding[1] = 0;
    d.output_padding[1] = 2;
    refused(ctx, conv_transpose2d(ctx, x, w, NULL, &d), MIXP_ERR_SHAPE, "below the stride or the dilation");
    d.output_padding[1] = -1;
    refused(ctx, conv_transpose2d(ctx, x, w, NULL, &d), MIXP_ERR_SHAPE, "output_padding is at least 0");
    memset(&d, 0, sizeof d);
    d.padding[0] = 9;
    refused(ctx, conv_transpose2d(ctx, x, w, NULL, &d), MIXP_ERR_SHAPE, "leaves nothing");
    d.padding[0] = 0;
    d.groups = 3;
    refused(ctx, conv2d(ctx, x, w, NULL, &d), MIXP_ERR_SHAPE, "groups must divide");
    CHECK(conv2d(ctx, NULL, w, NULL, &d) == NULL && conv2d(ctx, x, NULL, NULL, &d) == NULL);
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    mixp_context_free(ctx);
}

static void refused_windows(void) {
    static const int sx[4] = { 1, 2, 4, 4 }, flat[2] = { 2, 4 };
    const int64_t zero[2] = { 2, 0 }, other[2] = { 4, 4 }, small[2] = { 1, 1 };
    mixp_context *ctx = conv_context();
    mixp_tensor  *x = window_param(ctx, "x", 4, sx), *f = window_param(ctx, "f", 2, flat), *at, *y;
    interpolate_desc resize;
    pool_desc     d;
    mixp_step_begin(ctx);
    memset(&d, 0, sizeof d);
    memset(&resize, 0, sizeof resize);
    refused(ctx, max_pool(ctx, x, NULL, NULL), MIXP_ERR_ARGUMENT, "max_pool: give a description");
    refused(ctx, avg_pool(ctx, x, NULL), MIXP_ERR_ARGUMENT, "avg_pool: give a description");
    refused(ctx, interpolate(ctx, x, NULL), MIXP_ERR_ARGUMENT, "interpolate: give a description");
    refused(ctx, max_pool(ctx, f, &d, &at), MIXP_ERR_SHAPE, "its rank is 2");
    CHECK(at == NULL);
    d.size[0] = d.size[1] = 5;
    refused(ctx, max_pool(ctx, x, &d, NULL), MIXP_ERR_SHAPE, "within the padded image");
    d.size[0] = d.size[1] = 2;
    d.padding[1] = 2;
    refused(ctx, avg_pool(ctx, x, &d), MIXP_ERR_SHAPE, "at most half");
    d.padding[1] = 0;
    d.size[2] = 1;
    refused(ctx, avg_pool(ctx, x, &d), MIXP_ERR_SHAPE, "numbers for further ones to 0");
    d.size[2] = 0;
    d.dilation[0] = 2;
    refused(ctx, avg_pool(ctx, x, &d), MIXP_ERR_SHAPE, "no dilation");
    d.dilation[0] = -1;
    refused(ctx, max_pool(ctx, x, &d, NULL), MIXP_ERR_SHAPE, "at least 1");
    refused(ctx, adaptive_max_pool(ctx, x, zero, &at), MIXP_ERR_SHAPE, "at least 1");
    refused(ctx, adaptive_avg_pool(ctx, x, NULL), MIXP_ERR_SHAPE, "at least 1");
    refused(ctx, adaptive_avg_pool(ctx, f, zero), MIXP_ERR_SHAPE, "its rank is 2");
    resize.scale[1] = 0.1;
    refused(ctx, interpolate(ctx, x, &resize), MIXP_ERR_SHAPE, "at least 1");
    resize.scale[1] = -2;
    refused(ctx, interpolate(ctx, x, &resize), MIXP_ERR_SHAPE, "at least 1");
    refused(ctx, pixel_shuffle(ctx, x, 2), MIXP_ERR_SHAPE, "they are 2 * 2 and 2");
    refused(ctx, pixel_unshuffle(ctx, x, 3), MIXP_ERR_SHAPE, "they are 3, 4 and 4");
    refused(ctx, pixel_shuffle(ctx, f, 2), MIXP_ERR_SHAPE, "rank of this one is 2");
    d.dilation[0] = 0;
    y = max_pool(ctx, x, &d, &at);
    refused(ctx, max_unpool(ctx, x, at, other), MIXP_ERR_SHAPE, "reshape");
    refused(ctx, max_unpool(ctx, y, at, small), MIXP_ERR_ARGUMENT, "scatter_add");
    CHECK(max_pool(ctx, NULL, &d, &at) == NULL && at == NULL && interpolate(ctx, NULL, &resize) == NULL);
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    mixp_context_free(ctx);
}

/* --- batch norm of other ranks ------------------------------------------------------------------------- */

/* Each channel's mean is 0 and its variance 1, by double loops over x. */
static void norm_of_rank(const int *sizes, int rank) {
    mixp_context *ctx = conv_context();
    mixp_tensor  *x = window_param(ctx, "x", rank, sizes), *y;
    norm_statistics keep = batch_norm_statistics(ctx, "bn", sizes[1]);
    float         v[WINDOW_MOST], got[WINDOW_MOST];
    const int64_t inner = x->count / sizes[0] / sizes[1], each = x->count / sizes[1];
    int64_t       c, i;
    mixp_step_begin(ctx);
    CHECK_INT(mixp_read(x, v, MIXP_F32, x->count), MIXP_OK);
    y = batch_norm(ctx, x, NULL, NULL, &keep, 1, 1e-5f);
    CHECK(y && y->rank == rank);
    CHECK_INT(mixp_read(y, got, MIXP_F32, x->count), MIXP_OK);
    for (c = 0; c < sizes[1]; c++) {
        double mean = 0, variance = 0;
        for (i = 0; i < x->count; i++) mean += i / inner % sizes[1] == c ? (double)v[i] / (double)each : 0;
        for (i = 0; i < x->count; i++)
            variance += i / inner % sizes[1] == c ? ((double)v[i] - mean) * ((double)v[i] - mean) / (double)each : 0;
        for (i = 0; i < x->count; i++)
            if (i / inner % sizes[1] == c)
                CHECK_NEAR((double)got[i], ((double)v[i] - mean) / sqrt(variance + 1e-5), 1e-5);
        CHECK_INT(mixp_read(keep.mean, got + WINDOW_MOST - 8, MIXP_F32, sizes[1]), MIXP_OK);
        CHECK_NEAR((double)got[WINDOW_MOST - 8 + c], 0.1 * mean, 1e-6);
    }
    CHECK(batch_norm(ctx, x, NULL, NULL, &keep, 0, 1e-5f) != NULL);
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    mixp_context_free(ctx);
}

static void norms_of_ranks(void) {
    static const int sizes[3][5] = { { 5, 3, 0, 0, 0 }, { 2, 3, 4, 0, 0 }, { 2, 3, 2, 3, 2 } };
    norm_of_rank(sizes[0], 2);
    norm_of_rank(sizes[1], 3);
    norm_of_rank(sizes[2], 5);
}

/* Windows that overlap name a maximum more than once: it stands once, as in PyTorch. */
static void an_overlapping_unpool(void) {
    static const int   line[3] = { 1, 1, 5 };
    static const float x[5] = { 1, 2, 7, 3, 4 }, want[5] = { 0, 0, 7, 0, 0 };
    const int64_t      size = 5;
    mixp_context      *ctx = conv_context();
    mixp_tensor       *t = window_param(ctx, "x", 3, line), *at, *y;
    float              got[5];
    pool_desc          d;
    int                i;
    memset(&d, 0, sizeof d);
    d.size[0] = 3;
    d.stride[0] = 1;
    CHECK_INT(mixp_write(t, x, MIXP_F32, 5), MIXP_OK);
    mixp_step_begin(ctx);
    y = max_pool(ctx, t, &d, &at);
    y = max_unpool(ctx, y, at, &size);
    CHECK_INT(mixp_read(y, got, MIXP_F32, 5), MIXP_OK);
    for (i = 0; i < 5; i++) CHECK_NEAR((double)got[i], (double)want[i], 0);
    CHECK_INT(mixp_backward(ctx, mixp_sum(ctx, y, MIXP_ALL, 0)), MIXP_OK);
    CHECK_INT(mixp_read(t->grad, got, MIXP_F32, 5), MIXP_OK);
    for (i = 0; i < 5; i++) CHECK_NEAR((double)got[i], i == 2 ? 1.0 : 0.0, 1e-6);
    mixp_context_free(ctx);
}

/* Norms of a batch of none: gradients of 0, and running statistics as they were. */
static void norms_of_an_empty_batch(void) {
    static const int line[1] = { 4 };
    const int64_t    shape[4] = { 0, 4, 3, 2 };
    mixp_context    *ctx = conv_context();
    mixp_tensor     *gamma = window_param(ctx, "gamma", 1, line), *beta = window_param(ctx, "beta", 1, line);
    norm_statistics  keep = batch_norm_statistics(ctx, "bn", 4);
    float            got[4];
    int              i;
    for (i = 0; i < 3; i++) {
        mixp_tensor *x, *y;
        mixp_step_begin(ctx);
        x = mixp_input(ctx, MIXP_F32, 4, shape, got);
        y = i < 2 ? batch_norm(ctx, x, gamma, beta, &keep, i, 1e-5f) : group_norm(ctx, x, 2, gamma, beta, 1e-5f);
        CHECK(y && y->rank == 4 && memcmp(y->shape, shape, sizeof shape) == 0);
        CHECK_INT(mixp_backward(ctx, mixp_sum(ctx, y, MIXP_ALL, 0)), MIXP_OK);
        CHECK_INT(mixp_read(gamma->grad, got, MIXP_F32, 4), MIXP_OK);
        CHECK_NEAR((double)(got[0] + got[1] + got[2] + got[3]), 0, 0);
    }
    CHECK_INT(mixp_read(keep.variance, got, MIXP_F32, 4), MIXP_OK);
    CHECK_NEAR((double)(got[0] + got[1] + got[2] + got[3]), 4, 0);
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    mixp_context_free(ctx);
}

int main(void) {
    RUN(an_overlapping_unpool);
    RUN(windows_beside_pytorch);
    RUN(windows_keep_dtypes);
    RUN(windows_of_an_empty_batch);
    RUN(refused_convolutions);
    RUN(refused_windows);
    RUN(norms_of_ranks);
    RUN(norms_of_an_empty_batch);
    return test_report();
}
