/* test_level2.c - for programs with their own backward pass: the loss scale in device memory, the
 * low copy of a weight, products, and batches that are on the device already.
 * SPDX-License-Identifier: MIT OR Unlicense */
#include "mixprec.h"
#include "test.h"
#include "new_optimizer.h"

static uint32_t state = 1;
static float uniform(void) {
    state = state * 1664525u + 1013904223u;
    return (float)(state >> 8) / 8388608.0f - 1.0f;
}

static const mixp_dtype reals[3] = { MIXP_F32, MIXP_F16, MIXP_BF16 };

/* The copy is what the weight rounds to, after each step of the optimizer, which wrote it; its
 * address stays, and nothing is cast. */
static void test_low_copies(void) {
    enum { N = 1000 };
    static float w[N], g[N];
    static const int64_t n[1] = { N };
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_optimizer *opt = mixp_optimizer_new(ctx, NULL);
    mixp_tensor *t = mixp_view(ctx, "w", MIXP_F32, 1, n, w);
    for (int i = 0; i < N; i++) w[i] = uniform();
    CHECK_INT(mixp_optimizer_add(opt, t, mixp_view(ctx, "g", MIXP_F32, 1, n, g)), MIXP_OK);
    mixp_tensor *f16 = mixp_tensor_low(t, MIXP_F16);
    mixp_tensor *bf16 = mixp_tensor_low(t, MIXP_BF16);
    CHECK(f16 && f16->dtype == MIXP_F16 && f16->count == N && bf16 && bf16->dtype == MIXP_BF16);
    mixp_autocast_reset_counts(ctx);
    for (int step = 0; step < 3; step++) {
        for (int i = 0; i < N; i++) g[i] = uniform();
        CHECK_INT(mixp_optimizer_step(opt), MIXP_OK);
        CHECK(mixp_tensor_low(t, MIXP_F16) == f16 && mixp_tensor_low(t, MIXP_BF16) == bf16);
        const uint16_t *low = (const uint16_t *)f16->data;
        for (int i = 0; i < N; i++) CHECK_INT(low[i], mixp_f16_from_f32(w[i]).bits);
        low = (const uint16_t *)bf16->data;
        for (int i = 0; i < N; i++) CHECK_INT(low[i], mixp_bf16_from_f32(w[i]).bits);
    }
    CHECK_INT(mixp_autocast_casts(ctx).weight_casts, 0);
    w[0] = 5.0f;                        /* behind the library's back: until it is told */
    mixp_tensor_touch(t);
    CHECK(mixp_tensor_low(t, MIXP_F16) == f16);
    CHECK_NEAR(mixp_f32_from_f16(*(mixp_f16 *)f16->data), 5.0, 0.0);
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    mixp_context_free(ctx);
}

static void refused(mixp_context *ctx, int is_refused, mixp_result code, const char *part) {
    const char *why = "";
    CHECK(is_refused);
    CHECK_INT(mixp_context_error(ctx, &why), code);
    CHECK_TEXT(why, part);
    mixp_context_clear_error(ctx);
}

static void test_low_copies_that_are_none(void) {
    static const int64_t n[1] = { 4 };
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_tensor *w = mixp_param(ctx, "w", MIXP_F32, 1, n), *h = mixp_param(ctx, "h", MIXP_F16, 1, n);
    CHECK(mixp_tensor_low(h, MIXP_F16) == h);
    CHECK(mixp_tensor_low(NULL, MIXP_F16) == NULL);
    refused(ctx, !mixp_tensor_low(w, MIXP_F8_E4M3), MIXP_ERR_DTYPE, "'w': a low copy must be f16 or bf16");
    refused(ctx, !mixp_tensor_low(h, MIXP_BF16), MIXP_ERR_DTYPE, "only an f32 tensor");
    mixp_step_begin(ctx);
    refused(ctx, !mixp_tensor_low(mixp_relu(ctx, w), MIXP_F16), MIXP_ERR_DTYPE, "use mixp_cast");
    mixp_context_free(ctx);
}

/* --- products ------------------------------------------------------------------------------ */

enum { M = 6, N = 5, K = 9, MOST = 100 };

/* A matrix of this dtype, and its values. */
typedef struct matrix { uint32_t data[MOST]; double value[MOST]; mixp_dtype dtype; } matrix;

static void matrix_fill(matrix *a, mixp_dtype dtype) {
    float x[MOST], back[MOST];
    for (int i = 0; i < MOST; i++) x[i] = uniform();
    a->dtype = dtype;
    mixp_convert(a->data, dtype, x, MIXP_F32, MOST);
    mixp_convert(back, MIXP_F32, a->data, dtype, MOST);
    for (int i = 0; i < MOST; i++) a->value[i] = (double)back[i];
}

static void one_product(mixp_context *ctx, int trans_a, int trans_b, int accumulate, int kind) {
    matrix a, b, c, bias;
    mixp_gemm_args g;
    double got[MOST];
    matrix_fill(&a, reals[kind % 3]);
    matrix_fill(&b, reals[kind / 3 % 3]);
    matrix_fill(&c, MIXP_F32);
    matrix_fill(&bias, MIXP_F32);
    memset(&g, 0, sizeof g);
    g.m = M;
    g.n = N;
    g.k = K;
    g.batch = 1;
    g.alpha = 0.5f;
    g.trans_a = trans_a;
    g.trans_b = trans_b;
    g.a.data = a.data;
    g.a.dtype = a.dtype;
    g.b.data = b.data;
    g.b.dtype = b.dtype;
    g.bias.data = bias.data;
    g.c.data = c.data;
    g.c.accumulate = accumulate;
    g.lda = trans_a ? M : K + 1;        /* rows may lie further apart */
    g.ldb = trans_b ? K : N;
    g.ldc = N;
    CHECK_INT(mixp_gemm(ctx, &g), MIXP_OK);
    mixp_convert(got, MIXP_F64, c.data, MIXP_F32, M * N);
    for (int i = 0; i < M; i++)
        for (int j = 0; j < N; j++) {
            double want = bias.value[j] + (accumulate ? c.value[i * N + j] : 0.0);
            for (int k = 0; k < K; k++)
                want += 0.5 * a.value[trans_a ? k * M + i : i * (K + 1) + k] *
                        b.value[trans_b ? j * K + k : k * N + j];
            CHECK_NEAR(got[i * N + j], want, 1e-5);
        }
}

static void test_products(void) {
    mixp_context *ctx = mixp_context_new(NULL);
    for (int i = 0; i < 72; i++) one_product(ctx, i & 1, i >> 1 & 1, i >> 2 & 1, i >> 3);
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    mixp_context_free(ctx);
}

static void test_products_that_are_none(void) {
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_gemm_args good, g;
    float a[8] = { 0 }, b[8] = { 0 }, c[8] = { 0 };
    memset(&good, 0, sizeof good);
    good.m = good.n = good.k = good.lda = good.ldb = good.ldc = 2;
    good.batch = 1;
    good.alpha = 1.0f;
    good.a.data = a;
    good.b.data = b;
    good.c.data = c;
    CHECK_INT(mixp_gemm(ctx, &good), MIXP_OK);
    CHECK_INT(mixp_gemm(NULL, &good), MIXP_ERR_ARGUMENT);
    refused(ctx, mixp_gemm(ctx, NULL) != MIXP_OK, MIXP_ERR_ARGUMENT, "NULL");
    g = good;
    g.m = -1;
    refused(ctx, mixp_gemm(ctx, &g) != MIXP_OK, MIXP_ERR_ARGUMENT, "negative");
    g = good;
    g.stride_c = -4;
    refused(ctx, mixp_gemm(ctx, &g) != MIXP_OK, MIXP_ERR_ARGUMENT, "stride");
    g = good;
    g.b.data = NULL;
    refused(ctx, mixp_gemm(ctx, &g) != MIXP_OK, MIXP_ERR_ARGUMENT, "no data");
    g = good;
    g.c.data = a;
    refused(ctx, mixp_gemm(ctx, &g) != MIXP_OK, MIXP_ERR_ARGUMENT, "c's memory is a's or b's");
    g = good;
    g.lda = 1;
    refused(ctx, mixp_gemm(ctx, &g) != MIXP_OK, MIXP_ERR_SHAPE, "lda 1");
    g = good;
    g.c.dtype = MIXP_I32;
    refused(ctx, mixp_gemm(ctx, &g) != MIXP_OK, MIXP_ERR_DTYPE, "mixp_gemm");
    mixp_context_free(ctx);
}

/* --- the scale, and batches ------------------------------------------------------------------ */

static void test_the_scale_where_it_lies(void) {
    static float w[1], g[1];
    static const int64_t one[1] = { 1 };
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_scaler_desc d;
    mixp_optimizer *opt = new_sgd(ctx);
    memset(&d, 0, sizeof d);
    d.growth_interval = 2;
    mixp_scaler *scaler = mixp_scaler_new(ctx, &d);
    const float *scale = mixp_scaler_loss_scale_data(scaler);
    CHECK_INT(mixp_optimizer_add(opt, mixp_view(ctx, "w", MIXP_F32, 1, one, w),
                                 mixp_view(ctx, "g", MIXP_F32, 1, one, g)), MIXP_OK);
    for (int i = 0; i < 6; i++) {
        static const float want[6] = { 65536, 65536, 131072, 65536, 65536, 131072 };
        CHECK_NEAR(*scale, want[i], 0.0);
        CHECK_NEAR(mixp_scaler_loss_scale(scaler), want[i], 0.0);
        g[0] = i == 2 ? HUGE_VALF : *scale;
        CHECK_INT(mixp_scaler_step(scaler, opt), MIXP_OK);
        CHECK_INT(mixp_scaler_update(scaler), MIXP_OK);
    }
    CHECK_INT(mixp_scaler_update_to(scaler, 8.0f), MIXP_OK);
    CHECK_NEAR(*scale, 8.0, 0.0);
    d.disabled = 1;
    mixp_scaler *off = mixp_scaler_new(ctx, &d);
    CHECK_NEAR(*mixp_scaler_loss_scale_data(off), 1.0, 0.0);
    CHECK(mixp_scaler_loss_scale_data(NULL) == NULL);
    mixp_context_free(ctx);
}

static void test_a_batch_that_is_there(void) {
    static const int64_t shape[2] = { 2, 3 };
    static float x[6] = { 1, -2, 3, -4, 5, -6 };
    mixp_context *ctx = mixp_context_new(NULL);
    float back[6];
    mixp_step_begin(ctx);
    mixp_relu(ctx, mixp_input(ctx, MIXP_F32, 2, shape, x));
    mixp_step_begin(ctx);
    mixp_memory before = mixp_context_memory(ctx);
    mixp_tensor *t = mixp_input_view(ctx, MIXP_F32, 2, shape, x);
    CHECK(t && t->data == (void *)x && t->count == 6);
    CHECK_INT(mixp_context_memory(ctx).used, before.used);      /* nothing is copied */
    CHECK_INT(mixp_tensor_set_requires_grad(t, 1), MIXP_OK);
    mixp_tensor *y = mixp_relu(ctx, t);
    CHECK_INT(mixp_backward(ctx, mixp_sum(ctx, y, MIXP_ALL, 0)), MIXP_OK);
    CHECK_INT(mixp_read(t->grad, back, MIXP_F32, 6), MIXP_OK);
    for (int i = 0; i < 6; i++) CHECK_NEAR(back[i], x[i] > 0.0f, 0.0);
    mixp_step_begin(ctx);
    refused(ctx, !mixp_relu(ctx, t), MIXP_ERR_ORDER, "recycled");
    CHECK_NEAR(x[3], -4.0, 0.0);
    refused(ctx, !mixp_input_view(ctx, MIXP_F32, 2, shape, NULL), MIXP_ERR_ARGUMENT, "NULL");
    refused(ctx, !mixp_input_view(ctx, MIXP_F32, 2, shape, (char *)x + 2), MIXP_ERR_ARGUMENT,
            "not aligned");
    mixp_context_free(ctx);
}

int main(void) {
    RUN(test_low_copies);
    RUN(test_low_copies_that_are_none);
    RUN(test_products);
    RUN(test_products_that_are_none);
    RUN(test_the_scale_where_it_lies);
    RUN(test_a_batch_that_is_there);
    return test_report();
}
