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
    refused(ctx, conv1d(ctx, x, w, NULL, NULL), MIXP_ERR_SHAPE, "conv1d: pass tensors of rank 3");
    refused(ctx, conv3d(ctx, x, w, NULL, NULL), MIXP_ERR_SHAPE, "conv3d: pass tensors of rank 5");
    refused(ctx, conv2d(ctx, x, l, NULL, NULL), MIXP_ERR_SHAPE, "conv2d: pass tensors of rank 4");
    refused(ctx, conv_transpose2d(ctx, l, w, NULL, NULL), MIXP_ERR_SHAPE, "rank of this one is 3");
    refused(ctx, conv2d(ctx, x, w, b, NULL), MIXP_ERR_SHAPE, "one value for each of 2 channels; it has 3");
    d.stride[1] = 2;                            /* as programs for an earlier conv1d set it */
    refused(ctx, conv1d(ctx, l, l, NULL, &d), MIXP_ERR_SHAPE, "numbers for further ones to 0");
    d.stride[0] = 1;
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
    refused(ctx, conv2d(ctx, NULL, w, NULL, &d), MIXP_ERR_ARGUMENT, "x is NULL");
    refused(ctx, conv2d(ctx, x, NULL, NULL, &d), MIXP_ERR_ARGUMENT, "w is NULL");
    mixp_context_free(ctx);
}

/* Sides without a value, whose columns would have none. */
static void refused_empty_sides(void) {
    const int64_t none[4] = { 1, 0, 4, 4 }, one[4] = { 1, 1, 4, 4 }, flat[4] = { 1, 1, 0, 4 }, two[4] = { 1, 2, 0, 3 };
    const int64_t wide[4] = { 3, 0, 3, 3 }, no_taps[4] = { 3, 1, 0, 3 }, no_maps[4] = { 0, 1, 3, 3 };
    const int64_t w[4] = { 1, 1, 3, 3 }, turned[4] = { 2, 1, 3, 3 };
    const float   v[18] = { 0 };
    mixp_context *ctx = conv_context();
    conv_desc     d;
    pool_desc     p;
    mixp_step_begin(ctx);
    mixp_tensor *x = mixp_input(ctx, MIXP_F32, 4, one, v);
    mixp_tensor *k = mixp_input(ctx, MIXP_F32, 4, w, v);
    memset(&p, 0, sizeof p);
    memset(&d, 0, sizeof d);
    d.padding[0] = d.padding[1] = 1;
    refused(ctx, conv2d(ctx, mixp_input(ctx, MIXP_F32, 4, none, v), mixp_input(ctx, MIXP_F32, 4, wide, v), NULL, &d),
            MIXP_ERR_SHAPE, "at least 1 channel");
    refused(ctx, conv2d(ctx, x, mixp_input(ctx, MIXP_F32, 4, no_maps, v), NULL, &d), MIXP_ERR_SHAPE,
            "at least 1 channel");
    refused(ctx, conv2d(ctx, x, mixp_input(ctx, MIXP_F32, 4, no_taps, v), NULL, NULL), MIXP_ERR_SHAPE,
            "at least 1 value along each dimension");
    refused(ctx, conv2d(ctx, mixp_input(ctx, MIXP_F32, 4, flat, v), k, NULL, &d), MIXP_ERR_SHAPE,
            "at least 1 value along each dimension");
    d.padding[0] = d.padding[1] = 0;
    d.stride[0] = d.stride[1] = 2;
    refused(ctx, conv_transpose2d(ctx, mixp_input(ctx, MIXP_F32, 4, two, v), mixp_input(ctx, MIXP_F32, 4, turned, v),
                                  NULL, &d), MIXP_ERR_SHAPE, "at least 1 value along each dimension");
    p.size[0] = p.size[1] = 2;
    p.padding[0] = 1;
    refused(ctx, max_pool(ctx, mixp_input(ctx, MIXP_F32, 4, flat, v), &p, NULL), MIXP_ERR_SHAPE, "at least 1");
    mixp_context_free(ctx);
}

/* Numbers whose products pass 2^63. */
static void refused_sizes(void) {
    const int64_t sx[5] = { 1, 4, 2, 2, 2 }, sw[5] = { 1, 4, 2, 2, 2 };
    const int64_t huge[2] = { (int64_t)1 << 40, (int64_t)1 << 40 };
    const float   v[64] = { 0 };
    const int     most = 2147483647;
    mixp_context *ctx = conv_context();
    mixp_tensor  *x, *x3, *at;
    conv_desc     d;
    pool_desc     p;
    mixp_step_begin(ctx);
    x = mixp_input(ctx, MIXP_F32, 4, sx, v);
    x3 = mixp_input(ctx, MIXP_F32, 5, sx, v);
    memset(&d, 0, sizeof d);
    d.padding[0] = d.padding[1] = (1 << 30) - 1;
    d.dilation[0] = d.dilation[1] = most;
    refused(ctx, conv2d(ctx, x, mixp_input(ctx, MIXP_F32, 4, sw, v), NULL, &d), MIXP_ERR_SHAPE, "too large");
    memset(&d, 0, sizeof d);
    for (int i = 0; i < 3; i++) d.stride[i] = d.padding[i] = most - 1;
    refused(ctx, conv3d(ctx, x3, mixp_input(ctx, MIXP_F32, 5, sw, v), NULL, &d), MIXP_ERR_SHAPE, "too large");
    memset(d.padding, 0, sizeof d.padding);
    refused(ctx, conv_transpose3d(ctx, mixp_input(ctx, MIXP_F32, 5, sx, v), mixp_full(ctx, MIXP_F32, 5, sx, 0), NULL,
                                  &d), MIXP_ERR_SHAPE, "needs w[in, out / groups");
    x3 = mixp_transpose(ctx, x3, 0, 1);
    refused(ctx, conv_transpose3d(ctx, x3, mixp_input(ctx, MIXP_F32, 5, sw, v), NULL, &d), MIXP_ERR_SHAPE, "too large");
    memset(&p, 0, sizeof p);
    p.size[0] = p.size[1] = most;
    p.padding[0] = p.padding[1] = (1 << 30) - 1;
    refused(ctx, max_pool(ctx, x, &p, NULL), MIXP_ERR_SHAPE, "too many values");
    p.size[0] = p.size[1] = 2;
    p.padding[0] = p.padding[1] = 0;
    refused(ctx, adaptive_avg_pool(ctx, x, huge), MIXP_ERR_SHAPE, "at most 2^56 values");
    x = max_pool(ctx, x, &p, &at);
    refused(ctx, max_unpool(ctx, x, at, huge), MIXP_ERR_SHAPE, "at most 2^56 values");
    mixp_context_free(ctx);
}

/* Norms whose gamma, beta or statistics are not one value a channel: none of them may broadcast. */
static void refused_norms(void) {
    const int64_t one[4] = { 2, 1, 4, 4 }, many[4] = { 2, 8, 2, 2 }, single = 1, eight = 8;
    const float   v[64] = { 0 };
    mixp_context *ctx = conv_context();
    norm_statistics five = batch_norm_statistics(ctx, "five", 5), mixed = batch_norm_statistics(ctx, "one", 1);
    mixp_step_begin(ctx);
    mixp_tensor *x = mixp_input(ctx, MIXP_F32, 4, one, v);
    mixp_tensor *y = mixp_input(ctx, MIXP_F32, 4, many, v);
    mixp_tensor *g1 = mixp_full(ctx, MIXP_F32, 1, &single, 1);
    mixp_tensor *g8 = mixp_full(ctx, MIXP_F32, 1, &eight, 1);
    refused(ctx, group_norm(ctx, x, 1, g8, NULL, 1e-5f), MIXP_ERR_SHAPE, "gamma for each of 1 channels; it has 8");
    refused(ctx, group_norm(ctx, x, 1, NULL, g8, 1e-5f), MIXP_ERR_SHAPE, "beta for each of 1 channels; it has 8");
    refused(ctx, group_norm(ctx, y, 2, g1, g8, 1e-5f), MIXP_ERR_SHAPE, "gamma for each of 8 channels; it has 1");
    refused(ctx, batch_norm(ctx, y, g8, g1, NULL, 1, 1e-5f), MIXP_ERR_SHAPE, "beta for each of 8 channels; it has 1");
    refused(ctx, batch_norm(ctx, x, g8, g1, NULL, 1, 1e-5f), MIXP_ERR_SHAPE, "gamma for each of 1 channels; it has 8");
    for (int training = 0; training < 2; training++) {
        refused(ctx, batch_norm(ctx, x, g1, g1, &five, training, 1e-5f), MIXP_ERR_SHAPE,
                "keep->mean for each of 1 channels; it has 5");
        refused(ctx, batch_norm(ctx, y, g8, g8, &mixed, training, 1e-5f), MIXP_ERR_SHAPE,
                "keep->mean for each of 8 channels; it has 1");
    }
    mixed.variance = five.variance;
    refused(ctx, batch_norm(ctx, x, g1, g1, &mixed, 0, 1e-5f), MIXP_ERR_SHAPE, "keep->variance for each of 1 channels");
    CHECK(group_norm(ctx, y, 2, g8, g8, 1e-5f) != NULL && batch_norm(ctx, y, g8, g8, NULL, 1, 1e-5f) != NULL);
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    mixp_context_free(ctx);
}

/* Of windows with only -INFINITY: the index is that of the first value that the image has in the window. A double loop
 * finds it. */
static void indices_of_lowest_windows(void) {
    enum { H = 5, W = 6 };
    static const int numbers[][4] = { { 3, 1, 1, 1 }, { 3, 2, 1, 1 }, { 2, 2, 1, 1 }, { 3, 1, 1, 2 }, { 2, 3, 1, 2 } };
    const int64_t    shape[4] = { 1, 1, H, W };
    float            v[H * W];
    int32_t          got[64];
    for (int i = 0; i < H * W; i++) v[i] = -INFINITY;
    for (size_t n = 0; n < 2 * sizeof numbers / sizeof numbers[0]; n++) {
        const int    *k = numbers[n / 2], size = k[0], stride = k[1], padding = k[2], dilation = k[3];
        mixp_context *ctx = conv_context();
        mixp_tensor  *at, *y;
        pool_desc     d;
        memset(&d, 0, sizeof d);
        for (int i = 0; i < 2; i++) {
            d.size[i] = size;
            d.stride[i] = stride;
            d.padding[i] = padding;
            d.dilation[i] = dilation;
        }
        d.ceil_mode = n % 2 == 1;
        mixp_step_begin(ctx);
        y = max_pool(ctx, mixp_input(ctx, MIXP_F32, 4, shape, v), &d, &at);
        CHECK(y && at && at->count <= 64);
        CHECK_INT(mixp_read(at, got, MIXP_I32, at->count), MIXP_OK);
        for (int64_t p = 0; p < at->count; p++) {
            int row = (int)(p / at->shape[3]) * stride - padding, col = (int)(p % at->shape[3]) * stride - padding;
            while (row < 0) row += dilation;
            while (col < 0) col += dilation;
            CHECK_INT(got[p], row * W + col);
        }
        CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
        mixp_context_free(ctx);
    }
}

/* The largest number of values of a window, by a loop over the windows. */
static void sizes_of_adaptive_windows(void) {
    for (int64_t n = 1; n < 40; n++)
        for (int64_t m = 1; m < 90; m++) {
            int64_t most = 1;
            for (int64_t i = 0; i < m; i++) {
                const int64_t taps = ((i + 1) * n + m - 1) / m - i * n / m;
                if (taps > most) most = taps;
            }
            CHECK_INT(conv_adaptive_taps(n, m), most);
        }
}

static void refused_windows(void) {
    static const int sx[4] = { 1, 2, 4, 4 }, flat[2] = { 2, 4 };
    const int64_t zero[2] = { 2, 0 }, other[2] = { 4, 4 }, small[2] = { 1, 1 }, eight = 8;
    const int64_t absurd[2] = { (int64_t)1 << 55, 1 };  /* beyond any address: refused at once */
    mixp_context *ctx = conv_context();
    mixp_tensor  *x = window_param(ctx, "x", 4, sx), *f = window_param(ctx, "f", 2, flat), *at, *y;
    interpolate_desc resize;
    pool_desc     d;
    mixp_step_begin(ctx);
    memset(&d, 0, sizeof d);
    memset(&resize, 0, sizeof resize);
    refused(ctx, max_pool(ctx, x, NULL, NULL), MIXP_ERR_ARGUMENT, "max_pool: desc is NULL");
    refused(ctx, avg_pool(ctx, x, NULL), MIXP_ERR_ARGUMENT, "avg_pool: desc is NULL");
    refused(ctx, interpolate(ctx, x, NULL), MIXP_ERR_ARGUMENT, "interpolate: desc is NULL");
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
    d.dilation[0] = d.dilation[1] = 2;
    refused(ctx, avg_pool(ctx, x, &d), MIXP_ERR_SHAPE, "no dilation");
    d.dilation[0] = -1;
    refused(ctx, max_pool(ctx, x, &d, NULL), MIXP_ERR_SHAPE, "at least 1");
    refused(ctx, adaptive_max_pool(ctx, x, zero, &at), MIXP_ERR_SHAPE, "at least 1");
    refused(ctx, adaptive_max_pool(ctx, x, absurd, &at), MIXP_ERR_MEMORY, "memory");
    refused(ctx, adaptive_avg_pool(ctx, x, absurd), MIXP_ERR_MEMORY, "memory");
    refused(ctx, adaptive_avg_pool(ctx, x, NULL), MIXP_ERR_SHAPE, "at least 1");
    refused(ctx, adaptive_avg_pool(ctx, f, zero), MIXP_ERR_SHAPE, "its rank is 2");
    resize.scale[1] = 0.1;
    refused(ctx, interpolate(ctx, x, &resize), MIXP_ERR_SHAPE, "at least 1");
    resize.scale[1] = -2;
    refused(ctx, interpolate(ctx, x, &resize), MIXP_ERR_SHAPE, "at least 1");
    refused(ctx, pixel_shuffle(ctx, x, 2), MIXP_ERR_SHAPE, "they are 2 * 2 and 2");
    refused(ctx, pixel_unshuffle(ctx, x, 3), MIXP_ERR_SHAPE, "they are 3, 4 and 4");
    refused(ctx, pixel_shuffle(ctx, f, 2), MIXP_ERR_SHAPE, "rank of this one is 2");
    d.dilation[0] = d.dilation[1] = 0;
    y = max_pool(ctx, x, &d, &at);
    refused(ctx, max_unpool(ctx, x, at, other), MIXP_ERR_SHAPE, "indices of the shape of x");
    refused(ctx, max_unpool(ctx, y, mixp_transpose(ctx, at, 0, 1), other), MIXP_ERR_SHAPE, "indices of the shape of x");
    refused(ctx, max_unpool(ctx, y, mixp_reshape(ctx, at, 1, &eight), other), MIXP_ERR_SHAPE,
            "indices have rank 1 and 8");
    refused(ctx, max_unpool(ctx, y, at, small), MIXP_ERR_ARGUMENT, "scatter_add");
    refused(ctx, max_pool(ctx, NULL, &d, &at), MIXP_ERR_ARGUMENT, "x is NULL");
    CHECK(at == NULL);
    refused(ctx, interpolate(ctx, NULL, &resize), MIXP_ERR_ARGUMENT, "x is NULL");
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
    mixp_step_begin(ctx);
    CHECK_INT(mixp_read(x, v, MIXP_F32, x->count), MIXP_OK);
    y = batch_norm(ctx, x, NULL, NULL, &keep, 1, 1e-5f);
    CHECK(y && y->rank == rank);
    CHECK_INT(mixp_read(y, got, MIXP_F32, x->count), MIXP_OK);
    for (int64_t c = 0; c < sizes[1]; c++) {
        double mean = 0, variance = 0;
        for (int64_t i = 0; i < x->count; i++) mean += i / inner % sizes[1] == c ? (double)v[i] / (double)each : 0;
        for (int64_t i = 0; i < x->count; i++)
            variance += i / inner % sizes[1] == c ? ((double)v[i] - mean) * ((double)v[i] - mean) / (double)each : 0;
        for (int64_t i = 0; i < x->count; i++)
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
    memset(&d, 0, sizeof d);
    d.size[0] = 3;
    d.stride[0] = 1;
    CHECK_INT(mixp_write(t, x, MIXP_F32, 5), MIXP_OK);
    mixp_step_begin(ctx);
    y = max_pool(ctx, t, &d, &at);
    y = max_unpool(ctx, y, at, &size);
    CHECK_INT(mixp_read(y, got, MIXP_F32, 5), MIXP_OK);
    for (int i = 0; i < 5; i++) CHECK_NEAR((double)got[i], (double)want[i], 0);
    CHECK_INT(mixp_backward(ctx, mixp_sum(ctx, y, MIXP_ALL, 0)), MIXP_OK);
    CHECK_INT(mixp_read(t->grad, got, MIXP_F32, 5), MIXP_OK);
    for (int i = 0; i < 5; i++) CHECK_NEAR((double)got[i], i == 2 ? 1.0 : 0.0, 1e-6);
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
    for (int i = 0; i < 3; i++) {
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
    RUN(refused_empty_sides);
    RUN(refused_sizes);
    RUN(sizes_of_adaptive_windows);
    RUN(refused_windows);
    RUN(refused_norms);
    RUN(indices_of_lowest_windows);
    RUN(norms_of_ranks);
    RUN(norms_of_an_empty_batch);
    return test_report();
}
