/* test_cuda_face.cpp - the public functions on a GPU: graphs, scalers and optimizers freed before
 * their context, the loss scale in device memory, batches that are on the device already, and
 * user-defined products.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "cuda_pair.h"
#include "new_optimizer.h"

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

/* Ends a capture in which a call was refused. */
static void no_graph(mixp_context *ctx) {
    CHECK(mixp_capture_end(ctx) == NULL);
    refused(ctx, MIXP_ERR_ORDER, "mixp_capture_end: a call failed during the capture");
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
    t.opt = mixp_optimizer_new(t.ctx, NULL);
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
    CHECK_INT(mixp_capture_begin(t.ctx), MIXP_OK);
    refused(t.ctx, mixp_scaler_free(t.scaler), "captured");
    no_graph(t.ctx);
    for (int i = 0; i < 3; i++) {
        CHECK_INT(mixp_capture_begin(t.ctx), MIXP_OK);
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
        t.opt = new_sgd(t.ctx);
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

/* --- a graph and what is done beside it ------------------------------------------------------ */

/* w alone moves by 1/8 a step, in one dtype or two. */
struct Moved {
    mixp_context   *ctx;
    mixp_tensor    *w, *v;
    mixp_optimizer *opt;
    mixp_scaler    *scaler;
};

static Moved moved_open(mixp_dtype dtype, double lr) {
    const int64_t shape[2] = { 8, 8 };
    mixp_optimizer_desc sgd = mixp_sgd_defaults();
    Moved m;
    sgd.lr = lr;
    m.ctx = gpu_context();
    m.w = mixp_param(m.ctx, "w", dtype, 2, shape);
    m.v = mixp_param(m.ctx, "v", dtype, 2, shape);
    m.opt = mixp_optimizer_new(m.ctx, &sgd);
    m.scaler = mixp_scaler_new(m.ctx, NULL);
    CHECK_INT(mixp_optimizer_add(m.opt, m.w, NULL), MIXP_OK);
    CHECK_INT(mixp_optimizer_add(m.opt, m.v, NULL), MIXP_OK);
    return m;
}

/* A step in which t alone has a gradient, which is 1. */
static mixp_result move(Moved *m, mixp_tensor *t) {
    mixp_step_begin(m->ctx);
    mixp_zero_grad(m->opt);
    mixp_tensor *loss = mixp_sum(m->ctx, t, MIXP_ALL, 0);
    mixp_backward(m->ctx, mixp_scaler_scale(m->scaler, loss));
    mixp_result r = mixp_scaler_step(m->scaler, m->opt);
    mixp_scaler_update(m->scaler);
    return r;
}

static mixp_graph *recorded(Moved *m, mixp_tensor *t) {
    CHECK_INT(mixp_capture_begin(m->ctx), MIXP_OK);
    CHECK_INT(move(m, t), MIXP_OK);
    mixp_graph *graph = mixp_capture_end(m->ctx);
    CHECK(graph != NULL);
    return graph;
}

static double first_of(const mixp_tensor *t) {
    float x[64] = { 0.0f };
    CHECK_INT(mixp_read(t, x, MIXP_F32, 64), MIXP_OK);
    return (double)x[0];
}

static void has_moved(const Moved *m, double w, double v) {
    CHECK_NEAR(first_of(m->w), -w / 8.0, 0);
    CHECK_NEAR(first_of(m->v), -v / 8.0, 0);
}

/* Graphs and ordinary steps in turn, with gradients of other parameters: each moves its own. */
static void test_each_graph_has_its_parameters(void) {
    Moved m = moved_open(MIXP_F32, 0.125);
    move(&m, m.v);
    move(&m, m.w);
    mixp_graph *of_w = recorded(&m, m.w);
    mixp_graph *of_v = recorded(&m, m.v);
    has_moved(&m, 1, 1);
    move(&m, m.v);
    CHECK_INT(mixp_replay(of_w), MIXP_OK);
    has_moved(&m, 2, 2);
    move(&m, m.v);
    has_moved(&m, 2, 3);
    CHECK_INT(mixp_replay(of_v), MIXP_OK);
    CHECK_INT(mixp_replay(of_w), MIXP_OK);
    CHECK_INT(mixp_replay(of_w), MIXP_OK);
    has_moved(&m, 4, 4);
    move(&m, m.w);
    has_moved(&m, 5, 4);
    CHECK_INT(mixp_replay(of_v), MIXP_OK);
    CHECK_INT(mixp_graph_free(of_v), MIXP_OK);
    CHECK_INT(mixp_graph_free(of_w), MIXP_OK);
    move(&m, m.w);
    has_moved(&m, 6, 5);
    fine(m.ctx);
    mixp_context_free(m.ctx);
    CHECK_INT(cudasim::leaks(), 0);
}

/* What is too little for a bf16 adds up in the master, which no replay makes anew. */
static void test_masters_of_a_graph(void) {
    Moved m = moved_open(MIXP_BF16, 1.0 / 4096.0);
    mixp_fill(m.w, 1.0);
    move(&m, m.w);
    mixp_fill(m.w, 1.0);
    CHECK_INT(mixp_capture_begin(m.ctx), MIXP_OK);
    refused(m.ctx, move(&m, m.w), "'w' was written since the last step");
    no_graph(m.ctx);
    move(&m, m.w);
    mixp_graph *graph = recorded(&m, m.w);
    for (int i = 0; i < 127; i++) CHECK_INT(mixp_replay(graph), MIXP_OK);
    CHECK_NEAR(first_of(m.w), 1.0 - 128.0 / 4096.0, 0);
    fine(m.ctx);
    mixp_context_free(m.ctx);
    CHECK_INT(cudasim::leaks(), 0);
}

/* The product of a 1 with w's low copy. */
static double through_low(Moved *m) {
    const int64_t shape[2] = { 8, 8 };
    float one[64] = { 1.0f };
    mixp_tensor *y = NULL;
    mixp_step_begin(m->ctx);
    MIXP_AUTOCAST(m->ctx, MIXP_BF16)
        y = mixp_matmul(m->ctx, mixp_input(m->ctx, MIXP_F32, 2, shape, one), m->w, 0, 0);
    return first_of(y);
}

/* A low copy that was made after the graph, and one that was renewed in the capture alone. */
static void test_low_copies_beside_a_graph(void) {
    Moved m = moved_open(MIXP_F32, 0.125);
    move(&m, m.w);
    mixp_graph *graph = recorded(&m, m.w);
    for (int i = 1; i < 4; i++) {
        CHECK_NEAR(through_low(&m), -i / 8.0, 0);
        CHECK_INT(mixp_replay(graph), MIXP_OK);
    }
    CHECK_INT(mixp_graph_free(graph), MIXP_OK);
    CHECK_NEAR(through_low(&m), -0.5, 0);
    mixp_fill(m.w, 3.0);
    CHECK_INT(mixp_capture_begin(m.ctx), MIXP_OK);
    CHECK(mixp_tensor_low(m.w, MIXP_BF16) != NULL);
    CHECK(mixp_capture_end(m.ctx) != NULL);
    CHECK_NEAR(through_low(&m), 3.0, 0);
    fine(m.ctx);
    mixp_context_free(m.ctx);
    CHECK_INT(cudasim::leaks(), 0);
}

/* A parameter that came after the count is in none. */
static void test_counts_of_before(void) {
    Moved m = moved_open(MIXP_F32, 0.125);
    const int64_t n = 5;
    mixp_underflow u;
    CHECK_INT(mixp_optimizer_sample(m.opt), MIXP_OK);
    move(&m, m.w);
    CHECK_INT(mixp_optimizer_add(m.opt, mixp_param(m.ctx, "late", MIXP_F32, 1, &n), NULL), MIXP_OK);
    CHECK_INT(mixp_optimizer_underflow(m.opt, -1, &u), 1);
    CHECK_INT(u.look.count, 64);
    CHECK_INT(mixp_optimizer_underflow(m.opt, 2, &u), 1);
    CHECK_INT(u.look.count, 0);
    fine(m.ctx);
    mixp_context_free(m.ctx);
}

/* The gradients of an mse run evenly to 1e-7; w is 0, so both devices have the same. Nothing
 * is allocated in the steps after. */
static void test_unscaled_gradients_are_reported(void) {
    enum { rows = 64, in = 8, out = 32 };
    static const int64_t xs[2] = { rows, in }, ws[2] = { out, in }, ys[2] = { rows, out };
    static float x[rows * in], y[rows * out];
    mixp_context *both[2] = { mixp_context_new(NULL), gpu_context() };
    for (int i = 0; i < rows * out; i++) y[i] = ((float)i + 0.5f) / (rows * out) * 2.0f - 1.0f;
    for (int k = 0; k < 2; k++) {
        mixp_context   *ctx = both[k];
        mixp_tensor    *w = mixp_param(ctx, "w", MIXP_F32, 2, ws), *loss = NULL;
        mixp_optimizer *opt = new_sgd(ctx);
        int64_t         made = 0;
        mixp_optimizer_add(opt, w, NULL);
        for (int step = 0; step < 3; step++) {
            mixp_step_begin(ctx);
            mixp_zero_grad(opt);
            MIXP_AUTOCAST(ctx, MIXP_F16) {
                loss = mixp_linear(ctx, mixp_input(ctx, MIXP_F32, 2, xs, x), w, NULL);
                loss = mixp_mse(ctx, loss, mixp_input(ctx, MIXP_F32, 2, ys, y));
            }
            mixp_backward(ctx, mixp_scale(ctx, loss, 1e-4f));
            mixp_optimizer_step(opt);
            if (!step) made = mixp_context_memory(ctx).allocations;
        }
        fine(ctx);
        CHECK_INT(mixp_context_memory(ctx).allocations, made);
        CHECK_TEXT(mixp_context_warning(ctx), "of the f16 gradients became 0 in step 1");
    }
    CHECK_TEXT(mixp_context_warning(both[1]), mixp_context_warning(both[0]));
    for (int k = 0; k < 2; k++) mixp_context_free(both[k]);
}

int main(void) {
    RUN(test_graphs_go);
    RUN(test_many_come_and_go);
    RUN(test_the_scale_where_it_lies);
    RUN(test_a_batch_that_is_there);
    RUN(test_a_product);
    RUN(test_states_come_back);
    RUN(test_each_graph_has_its_parameters);
    RUN(test_masters_of_a_graph);
    RUN(test_low_copies_beside_a_graph);
    RUN(test_counts_of_before);
    RUN(test_unscaled_gradients_are_reported);
    return test_report();
}
