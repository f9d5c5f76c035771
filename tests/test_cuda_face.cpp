/* test_cuda_face.cpp - on a GPU: graphs, scalers and optimizers that go before their context, the
 * loss scale where it lies, batches that are there already, and products of one's own.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "cuda_pair.h"

static mixp_context *gpu_context(void) {
    const char *why = "";
    mixp_context_desc d;
    memset(&d, 0, sizeof d);
    d.device = mixp_cuda(0, &why);
    d.threads = 1;
    return mixp_context_new(&d);
}

static void fine(const mixp_context *ctx) {
    const char *why = "";
    CHECK_INT(mixp_context_error(ctx, &why), MIXP_OK);
    CHECK_TEXT(why, "");
}

static void refused(mixp_context *ctx, mixp_result got, const char *part) {
    const char *why = "";
    CHECK_INT(got, MIXP_ERR_ORDER);
    mixp_context_error(ctx, &why);
    CHECK_TEXT(why, part);
    mixp_context_clear_error(ctx);
}

struct Trained {
    mixp_context   *ctx;
    mixp_tensor    *w;
    mixp_optimizer *opt;
    mixp_scaler    *scaler;
};

static Trained trained_open(void) {
    const int64_t n = 40;
    mixp_scaler_desc d;
    Trained t;
    memset(&d, 0, sizeof d);
    d.growth_interval = 1;
    t.ctx = gpu_context();
    t.w = mixp_param(t.ctx, "w", MIXP_F32, 1, &n);
    t.opt = mixp_adamw_new(t.ctx, NULL);
    t.scaler = mixp_scaler_new(t.ctx, &d);
    CHECK_INT(mixp_optimizer_add(t.opt, t.w, NULL), MIXP_OK);
    return t;
}

static void step(Trained *t, float factor) {
    mixp_step_begin(t->ctx);
    mixp_zero_grad(t->opt);
    mixp_tensor *loss = mixp_scale(t->ctx, mixp_sum(t->ctx, t->w, MIXP_ALL, 0), factor);
    mixp_backward(t->ctx, mixp_scaler_scale(t->scaler, loss));
    mixp_scaler_step(t->scaler, t->opt);
    mixp_scaler_update(t->scaler);
}

/* What a graph may have recorded stays; without the graph it goes, and nothing is left. */
static void test_graphs_go(void) {
    Trained t = trained_open();
    mixp_graph *graph[3];
    step(&t, 1.0f);
    for (int i = 0; i < 3; i++) {
        CHECK_INT(mixp_capture_begin(t.ctx), MIXP_OK);
        if (i == 0) refused(t.ctx, mixp_scaler_free(t.scaler), "captured");
        step(&t, 1.0f);
        graph[i] = mixp_capture_end(t.ctx);
        CHECK_INT(mixp_replay(graph[i]), MIXP_OK);
    }
    refused(t.ctx, mixp_optimizer_free(t.opt), "mixp_graph_free");
    refused(t.ctx, mixp_scaler_free(t.scaler), "mixp_graph_free");
    CHECK_INT(mixp_graph_free(graph[1]), MIXP_OK);
    CHECK_INT(mixp_replay(graph[0]), MIXP_OK);
    CHECK_INT(mixp_replay(graph[2]), MIXP_OK);
    CHECK_INT(mixp_optimizer_applied(t.opt), 6);
    CHECK_INT(mixp_graph_free(graph[2]), MIXP_OK);
    CHECK_INT(mixp_graph_free(graph[0]), MIXP_OK);
    CHECK_INT(mixp_optimizer_free(t.opt), MIXP_OK);
    CHECK_INT(mixp_scaler_free(t.scaler), MIXP_OK);
    fine(t.ctx);
    mixp_context_free(t.ctx);
    CHECK_INT(cudasim::leaks(), 0);
}

/* Many come and go: what the host sees is theirs, never that of one whose memory they have. */
static void test_many_come_and_go(void) {
    Trained t = trained_open();
    for (int i = 0; i < 40; i++) {
        mixp_optimizer_free(t.opt);
        t.opt = mixp_sgd_new(t.ctx, NULL);
        CHECK_INT(mixp_optimizer_add(t.opt, t.w, NULL), MIXP_OK);
        step(&t, i % 3 == 1 ? INFINITY : 1.0f);
        mixp_optimizer_applied(t.opt);          /* waits */
        mixp_verdict v = mixp_optimizer_verdict(t.opt);
        CHECK_INT(v.step, 1);
        CHECK_INT(v.outcome, i % 3 == 1 ? MIXP_STEP_SKIPPED : MIXP_STEP_APPLIED);
        CHECK_INT(v.loss_bad, i % 3 == 1);
    }
    fine(t.ctx);
    mixp_context_free(t.ctx);
    CHECK_INT(cudasim::leaks(), 0);
}

/* The pointer follows the scale, through updates and replays, and nobody waits for it. */
static void test_the_scale_where_it_lies(void) {
    Trained t = trained_open();
    const float *scale = mixp_scaler_loss_scale_data(t.scaler);
    float seen = 0.0f;
    for (int i = 0; i < 3; i++) {
        CHECK_INT(cudaMemcpy(&seen, scale, sizeof seen, cudaMemcpyDeviceToHost), cudaSuccess);
        CHECK_NEAR(seen, ldexp(65536.0, i), 0.0);
        CHECK_NEAR(mixp_scaler_loss_scale(t.scaler), ldexp(65536.0, i), 0.0);
        step(&t, 1.0f);
    }
    CHECK(mixp_scaler_loss_scale_data(NULL) == NULL);
    fine(t.ctx);
    mixp_context_free(t.ctx);
}

/* A batch in device memory is not copied; one in host memory is refused. */
static void test_a_batch_that_is_there(void) {
    const int64_t shape[2] = { 4, 8 };
    mixp_context *ctx = gpu_context();
    float host[32], back[32], *device = NULL;
    for (int i = 0; i < 32; i++) host[i] = (float)i - 7.5f;
    CHECK_INT(cudaMalloc((void **)&device, sizeof host), cudaSuccess);
    CHECK_INT(cudaMemcpy(device, host, sizeof host, cudaMemcpyHostToDevice), cudaSuccess);
    mixp_step_begin(ctx);
    mixp_tensor *x = mixp_input_view(ctx, MIXP_F32, 2, shape, device);
    CHECK(x && x->data == device);
    CHECK_INT(mixp_read(mixp_relu(ctx, x), back, MIXP_F32, 32), MIXP_OK);
    for (int i = 0; i < 32; i++) CHECK_NEAR(back[i], host[i] > 0.0f ? host[i] : 0.0f, 0.0);
    fine(ctx);
    if (cudasim::simulated) {
        CHECK(mixp_input_view(ctx, MIXP_F32, 2, shape, host) == NULL);
        CHECK_INT(mixp_context_error(ctx, NULL), MIXP_ERR_ARGUMENT);
    }
    mixp_context_free(ctx);
    CHECK_INT(cudaFree(device), cudaSuccess);
}

/* A product with the low copy of a weight, against a double loop. */
static void test_a_product(void) {
    enum { M = 5, N = 7, K = 16 };
    const int64_t shape[2] = { N, K }, in[2] = { M, K }, out[2] = { M, N };
    mixp_context *ctx = gpu_context();
    mixp_tensor *w = mixp_param(ctx, "w", MIXP_F32, 2, shape);
    float a[M * K], b[N * K], c[M * N];
    mixp_f16 low[M * K];
    for (int i = 0; i < M * K; i++) a[i] = (float)((i * 37) % 23 - 11) / 8.0f;
    for (int i = 0; i < N * K; i++) b[i] = (float)((i * 29) % 19 - 9) / 16.0f;
    mixp_convert(low, MIXP_F16, a, MIXP_F32, M * K);
    mixp_write(w, b, MIXP_F32, N * K);
    mixp_step_begin(ctx);
    mixp_tensor *x = mixp_input(ctx, MIXP_F16, 2, in, low);
    mixp_tensor *y = mixp_activation(ctx, MIXP_F32, 2, out), *copy = mixp_tensor_low(w, MIXP_F16);
    mixp_gemm_args g;
    memset(&g, 0, sizeof g);
    g.m = M;
    g.n = N;
    g.k = K;
    g.batch = 1;
    g.alpha = 1.0f;
    g.trans_b = 1;
    g.a = mixp_in{ x->data, MIXP_F16 };
    g.b = mixp_in{ copy->data, MIXP_F16 };
    g.c = mixp_out{ y->data, MIXP_F32, 0 };
    g.lda = g.ldb = K;
    g.ldc = N;
    CHECK_INT(mixp_gemm(ctx, &g), MIXP_OK);
    CHECK_INT(mixp_read(y, c, MIXP_F32, M * N), MIXP_OK);
    for (int i = 0; i < M; i++)
        for (int j = 0; j < N; j++) {
            double want = 0.0;
            for (int k = 0; k < K; k++) want += (double)a[i * K + k] * (double)b[j * K + k];
            CHECK_NEAR(c[i * N + j], want, 1e-4);
        }
    fine(ctx);
    mixp_context_free(ctx);
}

/* What an optimizer remembers comes from there. */
static void test_states_come_back(void) {
    Trained t = trained_open();
    float m[40], v[40];
    step(&t, 2.0f);
    CHECK_INT(mixp_optimizer_read(t.opt, t.w, MIXP_STATE_M, m, 40), MIXP_OK);
    CHECK_INT(mixp_optimizer_read(t.opt, t.w, MIXP_STATE_V, v, 40), MIXP_OK);
    CHECK_NEAR(m[39], 0.2, 1e-7);
    CHECK_NEAR(v[0], 0.004, 1e-8);
    CHECK_INT(mixp_optimizer_read(t.opt, t.w, MIXP_STATE_MASTER, m, 40), MIXP_OK);
    CHECK_NEAR(m[7], -1e-3, 1e-8);
    fine(t.ctx);
    mixp_context_free(t.ctx);
}

int main(void) {
    RUN(test_graphs_go);
    RUN(test_many_come_and_go);
    RUN(test_the_scale_where_it_lies);
    RUN(test_a_batch_that_is_there);
    RUN(test_a_product);
    RUN(test_states_come_back);
    return test_report();
}
