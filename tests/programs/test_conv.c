/* test_conv.c - the convolutions of examples/conv.h on the CPU, also with few samples at a time.
 * SPDX-License-Identifier: MIT OR Unlicense */
#include "mixprec.h"
#include "test.h"
#define CONV_COLUMNS 300        /* so that the larger cases are done in several parts */

static mixp_context *conv_context(void) { return mixp_context_new(NULL); }
#include "conv_cases.h"

/* conv1d is the plain sum along a line. */
static void one_dimension(void) {
    static double x[CONV_MOST], w[CONV_MOST];
    mixp_context *ctx = conv_context();
    int64_t sx[3] = { 2, 2, 7 }, sw[3] = { 3, 2, 3 }, n, o, p;
    mixp_tensor *tx = conv_numbers(ctx, "x", 3, sx, x), *tw = conv_numbers(ctx, "w", 3, sw, w), *y;
    float got[2 * 3 * 4];
    conv_desc d;
    memset(&d, 0, sizeof d);
    d.stride[0] = 2;
    d.padding[0] = 1;
    mixp_step_begin(ctx);
    y = conv1d(ctx, tx, tw, NULL, &d);
    CHECK(y && y->rank == 3 && y->shape[2] == 4);
    CHECK_INT(mixp_read(y, got, MIXP_F32, 24), MIXP_OK);
    for (n = 0; n < 2; n++)
        for (o = 0; o < 3; o++)
            for (p = 0; p < 4; p++) {
                double sum = 0;
                for (int64_t c = 0; c < 2; c++)
                    for (int64_t j = 0; j < 3; j++)
                        if (2 * p - 1 + j >= 0 && 2 * p - 1 + j < 7)
                            sum += x[(n * 2 + c) * 7 + 2 * p - 1 + j] * w[(o * 2 + c) * 3 + j];
                CHECK_NEAR((double)got[(n * 3 + o) * 4 + p], sum, 1e-5);
            }
    mixp_context_free(ctx);
}

/* Programs of earlier versions pass frozen parameters. In a loop of mixp_retry the library names the cure. */
static void frozen_statistics_warn(void) {
    norm_run n;
    norm_open(&n, 1, 1024, 1);
    n.keep.mean = norm_param(&n, "mean", 1, NORM_WIDTH, 0);
    n.keep.variance = norm_param(&n, "variance", 1, NORM_WIDTH, 0);
    mixp_tensor_set_requires_grad(n.keep.mean, 0);
    mixp_tensor_set_requires_grad(n.keep.variance, 0);
    mixp_fill(n.keep.variance, 1);
    for (int step = 0; step < 2; step++) {
        for (int i = 0; i < NORM_ROWS; i++) n.x[i] = (float)(i * i);
        norm_count(&n);
        norm_try(&n);
        norm_compare(&n);
        CHECK_TEXT(mixp_context_warning(n.ctx), "");
    }
    CHECK(!mixp_retry(n.scaler, 3));
    norm_try(&n);
    CHECK(strstr(mixp_context_warning(n.ctx), "'mean'") && strstr(mixp_context_warning(n.ctx), "mixp_buffer"));
    CHECK_INT(mixp_context_error(n.ctx, NULL), MIXP_OK);
    mixp_context_free(n.ctx);
}

static mixp_tensor *norm_block(mixp_context *ctx, mixp_tensor *x, void *user) {
    const norm_run *n = (const norm_run *)user;
    return batch_norm(ctx, conv2d(ctx, x, n->w, NULL, NULL), NULL, NULL, &n->keep, 1, 1e-5f);
}

/* A block that mixp_backward computes again counts its batch once. */
static void a_recomputed_batch_counts_once(void) {
    const int64_t shape[4] = { NORM_ROWS, 1, 1, 1 };
    norm_run      n;
    norm_open(&n, 1, 1024, 0);
    mixp_tensor_set_requires_grad(n.w, 1);
    for (int step = 0; step < 3; step++) {
        for (int i = 0; i < NORM_ROWS; i++) n.x[i] = (float)((3 * i + step) % 5);
        mixp_step_begin(n.ctx);
        mixp_tensor *y = mixp_recompute(n.ctx, norm_block, &n, mixp_input(n.ctx, MIXP_F32, 4, shape, n.x));
        CHECK_INT(mixp_backward(n.ctx, mixp_mean(n.ctx, mixp_sin(n.ctx, y), MIXP_ALL, 0)), MIXP_OK);
        norm_count(&n);
        norm_compare(&n);
    }
    CHECK_INT(mixp_context_error(n.ctx, NULL), MIXP_OK);
    mixp_context_free(n.ctx);
}

/* Statistics that fit by their count alone: an error without a result. */
static void statistics_that_do_not_fit(void) {
    const int64_t shape[4] = { 2, 4, 2, 2 }, row[2] = { 1, 4 }, four[1] = { 4 };
    static const float x[32] = { 1, 2, 3 };
    for (int i = 0; i < 4; i++)
        for (int training = 0; training < 2; training++) {
            mixp_context   *ctx = conv_context();
            norm_statistics keep = batch_norm_statistics(ctx, "bn", 4);
            if (i == 0) keep.mean = mixp_buffer(ctx, "m", MIXP_F32, 2, row);
            if (i == 1) keep.variance = mixp_buffer(ctx, "m", MIXP_F16, 1, four);
            if (i == 2) keep.mean = mixp_buffer(ctx, "m", MIXP_I32, 1, four);
            if (i == 3) keep.variance = NULL;
            mixp_step_begin(ctx);
            CHECK(!batch_norm(ctx, mixp_input(ctx, MIXP_F32, 4, shape, x), NULL, NULL, &keep, training, 1e-5f));
            CHECK_INT(mixp_context_error(ctx, NULL), i == 0 ? MIXP_ERR_SHAPE : i == 3 ? MIXP_ERR_ARGUMENT : MIXP_ERR_DTYPE);
            mixp_context_free(ctx);
        }
}

/* PyTorch's stride=2 written as { 2 }, and a window without a size: errors in each place that takes such a list. */
static void lists_that_end_early(void) {
    const int64_t shape[4] = { 1, 2, 4, 4 }, weights[4] = { 2, 2, 3, 3 };
    static const float x[36] = { 1, 2, 3 };
    for (int i = 0; i < 7; i++) {
        mixp_context *ctx = conv_context();
        mixp_tensor  *image, *w, *y;
        const char   *why = "";
        conv_desc     c;
        pool_desc     p;
        memset(&c, 0, sizeof c);
        memset(&p, 0, sizeof p);
        mixp_step_begin(ctx);
        image = mixp_input(ctx, MIXP_F32, 4, shape, x);
        w = mixp_input(ctx, MIXP_F32, 4, weights, x);
        if (i == 0) c.stride[0] = 2;
        if (i == 1) c.dilation[1] = 2;
        if (i > 2) p.size[0] = p.size[1] = 2;
        if (i == 3) p.size[1] = 0;
        if (i == 4) p.stride[0] = 2;
        if (i == 5) p.dilation[0] = 2;
        if (i < 2) y = conv2d(ctx, image, w, NULL, &c);
        else if (i == 6) y = max_pool(ctx, image, &p, NULL);
        else y = avg_pool(ctx, image, &p);
        CHECK(i == 6 ? y != NULL : !y);
        CHECK_INT(mixp_context_error(ctx, &why), i == 6 ? MIXP_OK : MIXP_ERR_ARGUMENT);
        CHECK_TEXT(why, i == 6 ? "" : i == 2 ? "size is 0" : "set a number for each of 2 dimensions");
        mixp_context_free(ctx);
    }
}

/* Each value stands rows x cols times; the gradient of a value is the sum over its places. */
static void upsampled(void) {
    enum { B = 2, C = 3, H = 2, W = 4, ROWS = 3, COLS = 2 };
    const int64_t shape[4] = { B, C, H, W }, large[4] = { B, C, H * ROWS, W * COLS };
    static float x[B * C * H * W], slope[B * C * H * ROWS * W * COLS], got[B * C * H * ROWS * W * COLS];
    mixp_context *ctx = conv_context();
    mixp_tensor *t = mixp_param(ctx, "x", MIXP_F32, 4, shape), *y;
    const char *why;
    int p, i, j, n = 0;
    for (i = 0; i < B * C * H * W; i++) x[i] = (float)(i * 7 % 23) - 11.0f;
    for (i = 0; i < B * C * H * ROWS * W * COLS; i++) slope[i] = (float)(i * 5 % 17) - 8.0f;
    mixp_write(t, x, MIXP_F32, B * C * H * W);
    mixp_step_begin(ctx);
    y = upsample_nearest2d(ctx, t, ROWS, COLS);
    CHECK(y && y->rank == 4 && memcmp(y->shape, large, sizeof large) == 0);
    CHECK_INT(mixp_read(y, got, MIXP_F32, B * C * H * ROWS * W * COLS), MIXP_OK);
    for (p = 0; p < B * C; p++)
        for (i = 0; i < H * ROWS; i++)
            for (j = 0; j < W * COLS; j++)
                CHECK_NEAR(got[n++], x[(p * H + i / ROWS) * W + j / COLS], 0);
    y = mixp_mul(ctx, y, mixp_input(ctx, MIXP_F32, 4, large, slope));
    CHECK_INT(mixp_backward(ctx, mixp_sum(ctx, y, MIXP_ALL, 0)), MIXP_OK);
    CHECK_INT(mixp_read(t->grad, got, MIXP_F32, B * C * H * W), MIXP_OK);
    for (n = 0; n < B * C * H * W; n++) {
        double sum = 0;
        for (i = 0; i < ROWS; i++)
            for (j = 0; j < COLS; j++)
                sum += (double)slope[(n / W * ROWS + i) * W * COLS + n % W * COLS + j];
        CHECK_NEAR((double)got[n], sum, 1e-5);
    }
    CHECK(upsample_nearest2d(ctx, t, 0, 2) == NULL);
    mixp_context_error(ctx, &why);
    CHECK_TEXT(why, "they are 0 and 2");
    mixp_context_clear_error(ctx);
    CHECK(group_norm(ctx, t, 2, NULL, NULL, 1e-5f) == NULL);
    mixp_context_error(ctx, &why);
    CHECK_TEXT(why, "they are 2 and 3");
    mixp_context_free(ctx);
}

/* A device without gemm_indexed copies the columns: the same bits of the result and of both gradients. */
static void copied_columns_have_the_same_bits(void) {
    enum { PARTS = 3 };
    static float  got[2][PARTS][CONV_MOST];
    static double unused[CONV_MOST];
    for (int isa = 0; isa < MIXP_ISA_COUNT * 2; isa++)
        for (size_t at = 0; at < sizeof conv_cases / sizeof conv_cases[0] && mixp_cpu_with((mixp_isa)(isa / 2)); at++) {
            const conv_case *k = &conv_cases[at];
            const int        transposed = isa % 2;
            for (int copies = 0; copies < 2; copies++) {
                mixp_device       d = *mixp_cpu_with((mixp_isa)(isa / 2));
                mixp_kernels      kernels = *d.kernels;
                mixp_context_desc desc;
                mixp_context     *ctx;
                if (copies) kernels.gemm_indexed = NULL;
                d.kernels = &kernels;
                memset(&desc, 0, sizeof desc);
                desc.device = &d;
                desc.threads = 1 + copies;
                ctx = mixp_context_new(&desc);
                const int64_t sx[4] = { k->b, transposed ? k->out : k->in, k->h, k->w };
                const int64_t sw[4] = { k->out, k->in / conv_or_1(k->d.groups), k->kh, k->kw };
                mixp_tensor  *t[PARTS];
                conv_random = 1;
                t[0] = conv_numbers(ctx, "x", 4, sx, unused);
                t[1] = conv_numbers(ctx, "w", 4, sw, unused);
                mixp_step_begin(ctx);
                t[2] = transposed ? conv_transpose2d(ctx, t[0], t[1], NULL, &k->d) : conv2d(ctx, t[0], t[1], NULL, &k->d);
                CHECK_INT(mixp_backward(ctx, mixp_sum(ctx, mixp_sin(ctx, t[2]), MIXP_ALL, 0)), MIXP_OK);
                for (int i = 0; i < PARTS; i++)
                    CHECK_INT(mixp_read(i < 2 ? t[i]->grad : t[i], got[copies][i], MIXP_F32, t[i]->count), MIXP_OK);
                mixp_context_free(ctx);
            }
            CHECK(memcmp(got[0], got[1], sizeof got[0]) == 0);
        }
}

int main(void) {
    conv_run_cases();
    RUN(copied_columns_have_the_same_bits);
    RUN(one_dimension);
    RUN(upsampled);
    RUN(frozen_statistics_warn);
    RUN(a_recomputed_batch_counts_once);
    RUN(statistics_that_do_not_fit);
    RUN(lists_that_end_early);
    return test_report();
}
