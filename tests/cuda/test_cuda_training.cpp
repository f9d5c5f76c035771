/* test_cuda_training.cpp - complete training steps on the simulated GPU, through the public API.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * The reference is the same small GPT on the CPU: losses and weights agree. A skipped step changes
 * nothing, a step neither waits nor allocates, and a graph replays the step bit for bit. No failed
 * allocation causes a leak. */
#include "companion.h"
#include "examples/compare.h"
#include "test.h"
#include "new_optimizer.h"
#include "shared_b.h"
#include <unistd.h>

enum { VOCAB = 11, BATCH = 1, LENGTH = 5, WIDTH = 32, HEADS = 1, TOKENS = BATCH * LENGTH };

/* Memory of the host or the GPU for a model: counted, refused at request number fail_at, `off`
 * bytes past where it should begin. */
struct Pool { long asked, alive, fail_at; int gpu, off, ordinal; };
static Pool host_pool, gpu_pool;

static void *pool_allocate(size_t bytes, void *user) {
    Pool *pool = (Pool *)user;
    void *p = NULL;
    if (++pool->asked == pool->fail_at) return NULL;
    if (!pool->gpu) p = malloc(bytes);
    else CHECK_INT(cudaMalloc(&p, bytes + 256), cudaSuccess);
    if (pool->gpu) CHECK_INT(cudasim::machine().device, pool->ordinal);
    pool->alive++;
    return (char *)p + pool->off;
}
static void pool_release(void *p, void *user) {
    Pool *pool = (Pool *)user;
    pool->alive--;
    p = (char *)p - pool->off;
    if (!pool->gpu) free(p);
    else CHECK_INT(cudaFree(p), cudaSuccess);
}

/* Models from here on take their memory from pools; or no longer. */
static int pooled;
static void use_pools(int on) {
    memset(&host_pool, 0, sizeof host_pool);
    memset(&gpu_pool, 0, sizeof gpu_pool);
    gpu_pool.gpu = 1;
    pooled = on;
}

struct Model {
    mixp_context   *ctx;
    mixp_tensor    *wte, *wpe, *gain, *shift, *qkv, *qkv_bias, *proj, *up, *down;
    mixp_optimizer *opt;
    mixp_scaler    *scaler;
    mixp_dtype      dtype;
    float           dropout;
    int32_t         ids[TOKENS], next[TOKENS], places[LENGTH];
};

static mixp_tensor *weight(Model *m, const char *name, int64_t rows, int64_t cols, double std) {
    int64_t shape[2] = { rows, cols };
    mixp_tensor *t = mixp_param(m->ctx, name, MIXP_F32, cols ? 2 : 1, shape);
    if (std > 0) mixp_init_normal(t, 0, std); else mixp_fill(t, 1);
    mixp_optimizer_add(m->opt, t, NULL);
    return t;
}

/* A model on a device; ctx NULL when even that could not be made. */
static void model_open(Model *m, const mixp_device *device, mixp_dtype dtype, int level,
                       float init_scale) {
    mixp_context_desc desc;
    mixp_scaler_desc scaler;
    mixp_optimizer_desc adamw = mixp_adamw_defaults();
    memset(m, 0, sizeof *m);
    memset(&desc, 0, sizeof desc);
    memset(&scaler, 0, sizeof scaler);
    desc.device = device;
    desc.seed = 7;
    desc.threads = 1;
    if (pooled) {
        mixp_allocator from_pool = { pool_allocate, pool_release, &gpu_pool };
        desc.device_allocator = from_pool;
        desc.allocate = pool_allocate;
        desc.release = pool_release;
        desc.user = &host_pool;
    }
    scaler.init_scale = init_scale;
    adamw.lr = 0.003;
    adamw.max_norm = 1.0;
    m->dtype = dtype;
    m->ctx = mixp_context_new(&desc);
    if (!m->ctx) return;
    mixp_autocast_set_level(m->ctx, level);
    m->opt = mixp_optimizer_new(m->ctx, &adamw);
    m->scaler = mixp_scaler_new(m->ctx, &scaler);
    m->wte = weight(m, "wte", VOCAB, WIDTH, 0.1);
    m->wpe = weight(m, "wpe", LENGTH, WIDTH, 0.1);
    m->gain = weight(m, "gain", WIDTH, 0, 0);
    m->shift = weight(m, "shift", WIDTH, 0, 0);
    m->qkv = weight(m, "qkv", 3 * WIDTH, WIDTH, 0.1);
    m->qkv_bias = weight(m, "qkv.bias", 3 * WIDTH, 0, 0);
    m->proj = weight(m, "proj", WIDTH, WIDTH, 0.1);
    m->up = weight(m, "up", 2 * WIDTH, WIDTH, 0.1);
    m->down = weight(m, "down", WIDTH, 2 * WIDTH, 0.1);
    for (int i = 0; i < LENGTH; i++) m->places[i] = i;
}

static void next_batch(Model *m, int step) {
    for (int i = 0; i < TOKENS; i++) {
        m->ids[i] = (step * 3 + i * i) % VOCAB;
        m->next[i] = (m->ids[i] * 2 + 1) % VOCAB;
    }
}

static mixp_tensor *loss_of(Model *m) {
    int64_t shape[2] = { BATCH, LENGTH }, length[1] = { LENGTH };
    mixp_context *c = m->ctx;
    mixp_tensor *x, *h, *loss = NULL;
    MIXP_AUTOCAST(c, m->dtype) {
        x = mixp_add(c, mixp_embedding(c, m->wte, mixp_input(c, MIXP_I32, 2, shape, m->ids)),
                     mixp_embedding(c, m->wpe, mixp_input(c, MIXP_I32, 1, length, m->places)));
        h = mixp_layer_norm(c, x, m->gain, m->shift, 1e-5f);
        h = mixp_attention(c, mixp_linear(c, h, m->qkv, m->qkv_bias), HEADS, 1, 0);
        x = mixp_add(c, x, mixp_dropout(c, mixp_linear(c, h, m->proj, NULL), m->dropout, 1));
        h = mixp_gelu(c, mixp_linear(c, mixp_rms_norm(c, x, m->gain, 1e-5f), m->up, NULL));
        x = mixp_add(c, x, mixp_linear(c, h, m->down, NULL));
        loss = mixp_cross_entropy(c, mixp_linear(c, x, m->wte, NULL),
                                  mixp_input(c, MIXP_I32, 2, shape, m->next), MIXP_IGNORE);
    }
    return loss;
}

static mixp_tensor *train(Model *m) {
    mixp_step_begin(m->ctx);
    mixp_zero_grad(m->opt);
    mixp_tensor *loss = loss_of(m);
    mixp_backward(m->ctx, mixp_scaler_scale(m->scaler, loss));
    mixp_scaler_step(m->scaler, m->opt);
    mixp_scaler_update(m->scaler);
    return loss;
}

static void fine(const Model *m) {
    const char *why;
    if (mixp_context_error(m->ctx, &why) == MIXP_OK) return;
    test_bad++;
    TEST_SHOW("%s", why);
}

/* All weights, in one row. */
enum { MOST = 2 * VOCAB * WIDTH + 10 * WIDTH * WIDTH };
static int64_t weights_of(const Model *m, float *to) {
    mixp_tensor *const all[] = { m->wte, m->wpe, m->gain, m->shift, m->qkv, m->qkv_bias, m->proj,
                                 m->up, m->down };
    int64_t n = 0;
    for (mixp_tensor *t : all) {
        CHECK_INT(mixp_read(t, to + n, MIXP_F32, t->count), MIXP_OK);
        n += t->count;
    }
    return n;
}
static void same_weights(const Model *a, const Model *b) {
    static float x[MOST], y[MOST];
    int64_t n = weights_of(a, x);
    CHECK_INT(weights_of(b, y), n);
    CHECK(memcmp(x, y, (size_t)n * sizeof *x) == 0);
}

static const mixp_device *gpu(void) { return mixp_cuda(0, NULL); }

/* --- as on the CPU ------------------------------------------------------------------------- */

static void agree(mixp_dtype dtype, int level, double tolerance) {
    Model a, b;
    double first = 0, last = 0;
    model_open(&a, gpu(), dtype, level, 1024);
    model_open(&b, mixp_cpu(), dtype, level, 1024);
    for (int step = 0; step < 4; step++) {
        next_batch(&a, 0);
        next_batch(&b, 0);
        last = mixp_item(train(&a));
        if (step == 0) first = last;
        CHECK_NEAR(last, mixp_item(train(&b)), tolerance);
    }
    CHECK(last < first);
    fine(&a);
    fine(&b);
    CHECK_INT(mixp_optimizer_applied(a.opt), 4);
    CHECK_NEAR(mixp_scaler_verdict(a.scaler).grad_norm, mixp_scaler_verdict(b.scaler).grad_norm,
               50 * tolerance);
    mixp_context_free(a.ctx);
    mixp_context_free(b.ctx);
    CHECK_INT(cudasim::leaks(), 0);
}
static void trains_in_f32(void) { agree(MIXP_F32, 1, 2e-5); }
static void trains_in_f16(void) { agree(MIXP_F16, 1, 4e-3); }
static void trains_in_bf16(void) { agree(MIXP_BF16, 1, 4e-2); }
static void trains_at_level_2(void) { agree(MIXP_F16, 2, 4e-3); }

/* --- skipping, waiting, allocating ------------------------------------------------------------ */

static void skipped_means_untouched(void) {
    static float before[MOST], after[MOST];
    Model m;
    model_open(&m, gpu(), MIXP_F16, 1, 1073741824.0f);      /* 2^30: overflows at once */
    next_batch(&m, 0);
    int64_t n = weights_of(&m, before);
    train(&m);
    weights_of(&m, after);
    CHECK(memcmp(before, after, (size_t)n * sizeof *before) == 0);
    CHECK_INT(mixp_optimizer_applied(m.opt), 0);
    CHECK_NEAR(mixp_scaler_loss_scale(m.scaler), 536870912.0, 0);
    mixp_verdict v = mixp_scaler_verdict(m.scaler);
    CHECK_INT(v.outcome, MIXP_STEP_SKIPPED);
    CHECK(v.bad_tensor != NULL);
    for (int i = 0; i < 25 && mixp_optimizer_applied(m.opt) == 0; i++) train(&m);
    CHECK_INT(mixp_optimizer_applied(m.opt), 1);    /* the scale came down */
    mixp_context_free(m.ctx);
}

static void a_step_neither_waits_nor_allocates(void) {
    Model m;
    cudasim::Count before = cudasim::count;
    model_open(&m, gpu(), MIXP_F16, 1, 1024);
    m.dropout = 0.2f;
    for (int i = 0; i < 2; i++) { next_batch(&m, i); train(&m); }
    cudasim::eager = true;                  /* else the queue of uploads fills up */
    before = cudasim::count;
    for (int i = 2; i < 5; i++) { next_batch(&m, i); train(&m); mixp_scaler_verdict(m.scaler); }
    CHECK_INT(cudasim::count.waits, before.waits);
    CHECK_INT(cudasim::count.resources, before.resources);
    if (cudasim::simulated) CHECK(cudasim::count.launches > before.launches);
    cudasim::eager = false;
    fine(&m);
    mixp_context_free(m.ctx);
}

/* Kernels that f launches. */
template <class F> static long launches_of(F f) {
    long before = cudasim::count.launches;
    CHECK_INT(f(), MIXP_OK);
    return cudasim::count.launches - before;
}

/* Gather and prepare are one launch, update another; PyTorch's way takes five. */
static void a_lean_step_is_two_launches(void) {
    NEEDS_SIMULATION;
    Model m;
    model_open(&m, gpu(), MIXP_F16, 1, 1024);
    next_batch(&m, 0);
    train(&m);
    for (int lean = 1; lean >= 0; lean--) {
        mixp_step_begin(m.ctx);
        mixp_zero_grad(m.opt);
        mixp_backward(m.ctx, mixp_scaler_scale(m.scaler, loss_of(&m)));
        if (!lean) CHECK_INT(launches_of([&] { return mixp_scaler_unscale(m.scaler, m.opt); }), 1);
        if (!lean) CHECK_INT(launches_of([&] { return mixp_clip_grad_norm(m.opt, 1.0); }), 2);
        CHECK_INT(launches_of([&] { return mixp_scaler_step(m.scaler, m.opt); }), 2);
        CHECK_INT(launches_of([&] { return mixp_scaler_update(m.scaler); }), 1);
        mixp_step_begin(m.ctx);
        mixp_zero_grad(m.opt);
        mixp_backward(m.ctx, loss_of(&m));
        CHECK_INT(launches_of([&] { return mixp_optimizer_step(m.opt); }), 2);
    }
    mixp_optimizer *plain = new_sgd(m.ctx);      /* no scaler, no max_norm: prepare and update */
    CHECK_INT(mixp_optimizer_add(plain, m.down, NULL), MIXP_OK);
    CHECK_INT(mixp_optimizer_step(plain), MIXP_OK);
    CHECK_INT(launches_of([&] { return mixp_optimizer_step(plain); }), 2);
    CHECK_INT(mixp_optimizer_verdict(m.opt).applied, 5);
    fine(&m);
    mixp_context_free(m.ctx);
}

/* Gradients of the program's own, in the GPU's memory, which it adds to. */
static void a_step_clears_gradients_of_yours(void) {
    const int64_t n = 1000;
    mixp_optimizer_desc adamw = mixp_adamw_defaults();
    mixp_context_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.device = gpu();
    adamw.zero_grad = 1;
    mixp_context *ctx = mixp_context_new(&desc);
    mixp_optimizer *opt = mixp_optimizer_new(ctx, &adamw);
    mixp_scaler *scaler = mixp_scaler_new(ctx, NULL);
    CHECK(mixp_scaler_loss_scale(scaler) > 0.0f);       /* whoever multiplies by it asks */
    mixp_tensor *w = mixp_param(ctx, "w", MIXP_F32, 1, &n);
    mixp_tensor *g = mixp_param(ctx, "w.grad", MIXP_F16, 1, &n);
    CHECK_INT(mixp_optimizer_add(opt, w, g), MIXP_OK);
    for (int step = 0; step < 3; step++) {
        float add = step == 1 ? INFINITY : 3.0f, *sum = (float *)malloc((size_t)n * sizeof *sum);
        mixp_read(g, sum, MIXP_F32, n);
        for (int64_t i = 0; i < n; i++) { CHECK(sum[i] == 0.0f); sum[i] += add; }
        mixp_write(g, sum, MIXP_F32, n);
        CHECK_INT(mixp_scaler_step(scaler, opt), MIXP_OK);
        CHECK_INT(mixp_scaler_update(scaler), MIXP_OK);
        free(sum);
    }
    CHECK_INT(mixp_optimizer_applied(opt), 2);
    mixp_context_free(ctx);
    CHECK_INT(cudasim::leaks(), 0);
}

/* --- graphs ------------------------------------------------------------------------- */

/* Replays draw the random numbers of their own steps: the twin, which runs its steps one by one,
 * ends with the same bits. Some are skipped: that is decided inside the graph. */
static void a_graph_replays_the_step(void) {
    Model a, b;
    cudasim::Count before = cudasim::count;
    cudasim::machine().loaded.clear();      /* what is recorded has run before, and so is loaded */
    cudasim::old_loader = true;
    model_open(&a, gpu(), MIXP_F16, 1, 16777216.0f);
    model_open(&b, gpu(), MIXP_F16, 1, 16777216.0f);
    a.dropout = b.dropout = 0.2f;
    for (int i = 0; i < 2; i++) {
        next_batch(&a, i);
        next_batch(&b, i);
        train(&a);
        train(&b);
    }
    CHECK_INT(mixp_capture_begin(a.ctx), MIXP_OK);
    train(&a);
    mixp_graph *graph = mixp_capture_end(a.ctx);
    CHECK(graph != NULL);
    cudasim::old_loader = false;
    fine(&a);
    cudasim::eager = true;
    before = cudasim::count;
    for (int i = 2; i < 8; i++) {
        next_batch(&a, i);
        CHECK_INT(mixp_replay(graph), MIXP_OK);
        memset(a.ids, -1, sizeof a.ids);    /* it has been read */
    }
    CHECK_INT(cudasim::count.waits, before.waits);
    CHECK_INT(cudasim::count.resources, before.resources);
    cudasim::eager = false;
    for (int i = 2; i < 8; i++) { next_batch(&b, i); train(&b); }
    same_weights(&a, &b);
    CHECK_INT(mixp_context_steps(a.ctx), mixp_context_steps(b.ctx));
    CHECK_INT(mixp_optimizer_applied(a.opt), mixp_optimizer_applied(b.opt));
    CHECK(mixp_scaler_verdict(a.scaler).skipped > 2);     /* in the graph, for two ran before it */
    CHECK(mixp_optimizer_applied(a.opt) > 0);
    CHECK_NEAR(mixp_scaler_loss_scale(a.scaler), mixp_scaler_loss_scale(b.scaler), 0);
    next_batch(&a, 8);                      /* an ordinary step after it */
    next_batch(&b, 8);
    train(&a);
    train(&b);
    fine(&a);
    fine(&b);
    mixp_context_free(a.ctx);
    mixp_context_free(b.ctx);
    CHECK_INT(cudasim::leaks(), 0);
}

/* Gradients wait for their step while the same scaler goes on: in ordinary steps each is unscaled by
 * its own scale; of what a graph did the host knows nothing, so they must be made again. */
static void gradients_from_before_a_graph(void) {
    const int64_t one[1] = { 1 };
    for (int graphs = 0; graphs < 3; graphs++) {
        Model m;
        mixp_optimizer_desc sgd = mixp_sgd_defaults();
        mixp_graph *graph = NULL;
        const char *why = "";
        model_open(&m, gpu(), MIXP_F16, 1, 1024);
        next_batch(&m, 0);
        train(&m);
        sgd.lr = 1.0;
        mixp_optimizer *other = mixp_optimizer_new(m.ctx, &sgd);
        mixp_tensor *w = mixp_param(m.ctx, "other", MIXP_F32, 1, one);
        CHECK_INT(mixp_optimizer_add(other, w, NULL), MIXP_OK);
        if (graphs == 1) {
            mixp_capture_begin(m.ctx);
            train(&m);
            graph = mixp_capture_end(m.ctx);
        }
        mixp_step_begin(m.ctx);
        mixp_backward(m.ctx, mixp_scaler_scale(m.scaler, mixp_sum(m.ctx, w, MIXP_ALL, 0)));
        if (graphs == 0) CHECK_INT(mixp_scaler_update_to(m.scaler, 8.0f), MIXP_OK);
        if (graphs == 1) CHECK_INT(mixp_replay(graph), MIXP_OK);
        if (graphs == 2) {                  /* recorded, not run */
            mixp_capture_begin(m.ctx);
            train(&m);
            CHECK(mixp_capture_end(m.ctx) != NULL);
        }
        CHECK_INT(mixp_scaler_step(m.scaler, other), graphs ? MIXP_ERR_ORDER : MIXP_OK);
        CHECK_NEAR(mixp_item(w), graphs ? 0 : -1, 0);
        if (graphs) {
            mixp_context_error(m.ctx, &why);
            CHECK_TEXT(why, "was scaled too long ago");
            mixp_context_clear_error(m.ctx);
            mixp_zero_grad(other);
            mixp_step_begin(m.ctx);
            mixp_backward(m.ctx, mixp_scaler_scale(m.scaler, mixp_sum(m.ctx, w, MIXP_ALL, 0)));
            CHECK_INT(mixp_scaler_step(m.scaler, other), MIXP_OK);
            CHECK_NEAR(mixp_item(w), -1, 0);
        }
        fine(&m);
        mixp_context_free(m.ctx);
    }
    CHECK_INT(cudasim::leaks(), 0);
}

static void a_graph_cannot_wait(void) {
    Model m;
    const char *why = "";
    model_open(&m, gpu(), MIXP_F16, 1, 1024);
    next_batch(&m, 0);
    train(&m);
    CHECK_INT(mixp_capture_begin(m.ctx), MIXP_OK);
    mixp_item(train(&m));
    CHECK_INT(mixp_context_error(m.ctx, &why), MIXP_ERR_ORDER);
    CHECK_TEXT(why, "captured");
    CHECK(mixp_capture_end(m.ctx) == NULL);
    mixp_context_clear_error(m.ctx);
    train(&m);
    fine(&m);
    mixp_context_free(m.ctx);
    CHECK_INT(cudasim::leaks(), 0);
}

/* An operator that fails leaves nothing on the stream, so the device would make a graph without it. clears:
 * the program clears the error before the capture ends; the graph is refused all the same. An error from before
 * the capture does not count. */
static void a_failed_call_makes_no_graph(void) {
    for (int clears = 0; clears < 2; clears++) {
        Model m;
        const char *why = "";
        float x[6] = { 0 };
        const int64_t two[1] = { 2 }, three[1] = { 3 };
        model_open(&m, gpu(), MIXP_F16, 1, 1024);
        next_batch(&m, 0);
        train(&m);
        const uint64_t steps = mixp_context_steps(m.ctx);
        CHECK_INT(mixp_capture_begin(m.ctx), MIXP_OK);
        train(&m);
        CHECK(mixp_add(m.ctx, mixp_input(m.ctx, MIXP_F32, 1, two, x),
                       mixp_input(m.ctx, MIXP_F32, 1, three, x)) == NULL);
        if (clears) mixp_context_clear_error(m.ctx);
        CHECK(mixp_capture_end(m.ctx) == NULL);
        CHECK_INT(mixp_context_error(m.ctx, &why), clears ? MIXP_ERR_ORDER : MIXP_ERR_SHAPE);
        CHECK_TEXT(why, clears ? "a call failed during the capture" : "add");
        CHECK_INT(mixp_context_steps(m.ctx), steps);
        CHECK_INT(mixp_capture_begin(m.ctx), MIXP_OK);      /* with the old error */
        train(&m);
        mixp_graph *graph = mixp_capture_end(m.ctx);
        CHECK(graph != NULL);
        CHECK_INT(mixp_replay(graph), MIXP_OK);
        mixp_context_clear_error(m.ctx);
        train(&m);
        fine(&m);
        mixp_context_free(m.ctx);
    }
    CHECK_INT(cudasim::leaks(), 0);
}

/* mixp_compare ends a capture that its function has left open, and removes its observer. */
static mixp_tensor *begins_a_capture(mixp_context *ctx, void *user) {
    Model *m = (Model *)user;
    mixp_capture_begin(ctx);
    return mixp_mean(ctx, m->gain, MIXP_ALL, 0);
}
static void a_comparison_ends_a_capture(void) {
    Model m;
    const char *why = "";
    mixp_compare_desc d;
    mixp_difference rows[4];
    mixp_observer left;
    int64_t n = 0;
    memset(&d, 0, sizeof d);
    d.a.dtype = MIXP_F16;
    d.b.dtype = MIXP_F32;
    d.fn = begins_a_capture;
    d.user = &m;
    model_open(&m, gpu(), MIXP_F16, 1, 1024);
    next_batch(&m, 0);
    train(&m);
    CHECK_INT(mixp_compare(m.ctx, &d, rows, 4, &n), MIXP_ERR_ORDER);
    mixp_context_error(m.ctx, &why);
    CHECK_TEXT(why, "mixp_compare: fn has left a capture open");
    mixp_context_clear_error(m.ctx);
    CHECK_INT(mixp_observe(m.ctx, NULL, &left), MIXP_OK);
    CHECK(left.see == NULL);
    train(&m);
    fine(&m);
    mixp_context_free(m.ctx);
    CHECK_INT(cudasim::leaks(), 0);
}

static void the_cpu_has_no_graphs(void) {
    Model m;
    const char *why = "";
    model_open(&m, mixp_cpu(), MIXP_F16, 1, 1024);
    CHECK_INT(mixp_capture_begin(m.ctx), MIXP_ERR_DEVICE);
    mixp_context_error(m.ctx, &why);
    CHECK_TEXT(why, "no graphs");
    CHECK(mixp_capture_end(m.ctx) == NULL);
    CHECK_INT(mixp_replay(NULL), MIXP_ERR_ARGUMENT);
    mixp_context_free(m.ctx);
}

/* --- what a graph uploads -------------------------------------------------------------------- */

static mixp_context *context_on_gpu(void *stream = NULL) {
    mixp_context_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.device = gpu();
    desc.threads = 1;
    desc.stream = stream;
    return mixp_context_new(&desc);
}

/* Is t what `want` has? */
static void holds(mixp_tensor *t, const float *want) {
    float got[64];
    CHECK_INT(mixp_read(t, got, MIXP_F32, t->count), MIXP_OK);
    for (int64_t i = 0; i < t->count; i++) CHECK_NEAR(got[i], want[i], 0);
}

/* Two writes that are converted on the way share their scratch memory, not their data. */
static void a_graph_converts_each_write(void) {
    mixp_context *c = context_on_gpu();
    const int64_t four[1] = { 4 };
    mixp_tensor *a = mixp_param(c, "a", MIXP_F16, 1, four), *b = mixp_param(c, "b", MIXP_F16, 1, four);
    float x[4] = { 1, 2, 3, 4 }, y[4] = { 10, 20, 30, 40 };
    mixp_graph *graph = NULL;
    for (int captured = 0; captured < 2; captured++) {
        if (captured) CHECK_INT(mixp_capture_begin(c), MIXP_OK);
        mixp_step_begin(c);
        CHECK_INT(mixp_write(a, x, MIXP_F32, 4), MIXP_OK);
        CHECK_INT(mixp_write(b, y, MIXP_F32, 4), MIXP_OK);
        if (captured) graph = mixp_capture_end(c);
    }
    x[0] = 5;
    y[0] = 50;
    CHECK_INT(mixp_replay(graph), MIXP_OK);
    holds(a, x);
    holds(b, y);
    mixp_context_free(c);
    CHECK_INT(cudasim::leaks(), 0);
}

/* Kernels before it in the step use the scratch memory that it passes through. */
static void a_graph_writes_after_scratch(void) {
    mixp_context *c = context_on_gpu();
    const int64_t square[2] = { 4, 4 }, all[1] = { 16 }, four[1] = { 4 };
    mixp_tensor *a = mixp_param(c, "a", MIXP_F16, 1, all);
    mixp_tensor *w = mixp_param(c, "w", MIXP_F32, 2, square);
    const int32_t ids[4] = { 0, 1, 2, 3 };
    float x[16];
    mixp_graph *graph = NULL;
    for (int i = 0; i < 16; i++) x[i] = (float)i + 1;
    for (int captured = 0; captured < 2; captured++) {
        if (captured) CHECK_INT(mixp_capture_begin(c), MIXP_OK);
        mixp_step_begin(c);
        mixp_cross_entropy(c, w, mixp_input(c, MIXP_I32, 1, four, ids), MIXP_IGNORE);
        CHECK_INT(mixp_write(a, x, MIXP_F32, 16), MIXP_OK);
        if (captured) graph = mixp_capture_end(c);
    }
    x[3] = 100;
    CHECK_INT(mixp_replay(graph), MIXP_OK);
    holds(a, x);
    mixp_context_free(c);
}

/* One tensor written twice in a step, and two batches: each time what then lies there. */
static void a_graph_takes_several_batches(void) {
    mixp_context *c = context_on_gpu();
    const int64_t four[1] = { 4 };
    mixp_tensor *w = mixp_param(c, "w", MIXP_F32, 1, four);
    mixp_tensor *sum = mixp_param(c, "sum", MIXP_F32, 1, four);
    float x[4] = { 1, 2, 3, 4 }, y[4] = { 10, 20, 30, 40 }, want[4], zero[4] = { 0, 0, 0, 0 };
    mixp_graph *graph = NULL;
    mixpi_no_grad_enter(c);
    for (int captured = 0; captured < 2; captured++) {
        if (captured) CHECK_INT(mixp_capture_begin(c), MIXP_OK);
        mixp_step_begin(c);
        CHECK_INT(mixp_write(sum, zero, MIXP_F32, 4), MIXP_OK);
        for (int i = 0; i < 2; i++) {
            CHECK_INT(mixp_write(w, i ? y : x, MIXP_F32, 4), MIXP_OK);
            mixp_tensor *two = mixp_add(c, w, mixp_input(c, MIXP_F32, 1, four, i ? x : y));
            mixp_tensor *s = mixp_add(c, sum, mixp_scale(c, two, i ? 100.0f : 1.0f));
            const mixp_exec *e = mixp_context_exec(c);
            CHECK_INT(cudaMemcpyAsync(sum->data, s->data, sizeof x, cudaMemcpyDeviceToDevice,
                                      (cudaStream_t)e->stream), cudaSuccess);
        }
        if (captured) graph = mixp_capture_end(c);
    }
    mixpi_no_grad_leave(c);
    for (int step = 0; step < 3; step++) {
        for (int i = 0; i < 4; i++) {
            x[i] += 1;
            y[i] += 3;
            want[i] = 101 * (x[i] + y[i]);
        }
        CHECK_INT(mixp_replay(graph), MIXP_OK);
        holds(sum, want);
    }
    mixp_context_free(c);
    CHECK_INT(cudasim::leaks(), 0);
}

static void clobber_stack(void) {
    volatile char b[32768];
    for (size_t i = 0; i < sizeof b; i++) b[i] = 0x41;
}

/* What the library uploads of its own is read when it is captured: later its memory is gone. */
static void a_graph_keeps_what_was_temporary(void) {
    mixp_context *c = context_on_gpu();
    const int64_t many[1] = { 32 };
    mixp_tensor *a = mixp_param(c, "a", MIXP_F32, 1, many);
    float first[32];
    mixp_step_begin(c);
    mixp_init_normal(a, 0, 1);
    mixp_read(a, first, MIXP_F32, 32);
    CHECK_INT(mixp_capture_begin(c), MIXP_OK);
    mixp_step_begin(c);
    mixp_init_normal(a, 0, 1);
    mixp_graph *graph = mixp_capture_end(c);
    for (int i = 0; i < 2; i++) {
        clobber_stack();
        mixp_fill(a, 9);
        CHECK_INT(mixp_replay(graph), MIXP_OK);
        holds(a, first);
    }
    mixp_context_free(c);
    CHECK_INT(cudasim::leaks(), 0);
}

/* --- beside the program's own work --------------------------------------------------------- */

__global__ void fill_by_hand(float *g, int n, float x) { for (int i = 0; i < n; i++) g[i] = x; }

/* Kernels on the default stream before and after a step, as a program without streams has them:
 * the step reads the gradient that they wrote, and they what the step wrote. */
static void the_default_stream_is_ordered(void *stream) {
    mixp_context *c = context_on_gpu(stream);
    const int64_t four[1] = { 4 };
    mixp_optimizer_desc sgd = mixp_sgd_defaults();
    float *w = NULL, *g = NULL, got[4];
    CHECK_INT(cudaMalloc((void **)&w, 16), cudaSuccess);
    CHECK_INT(cudaMalloc((void **)&g, 16), cudaSuccess);
    sgd.lr = 1;
    mixp_optimizer *opt = mixp_optimizer_new(c, &sgd);
    CHECK_INT(mixp_optimizer_add(opt, mixp_view(c, "w", MIXP_F32, 1, four, w),
                                 mixp_view(c, "g", MIXP_F32, 1, four, g)), MIXP_OK);
    MIXPI_LAUNCH(fill_by_hand, 1, 1, 0, (cudaStream_t)0, w, 4, 0.0f);
    MIXPI_LAUNCH(fill_by_hand, 1, 1, 0, (cudaStream_t)0, g, 4, 1.0f);
    CHECK_INT(mixp_optimizer_step(opt), MIXP_OK);
    CHECK_INT(cudaMemcpy(got, w, 16, cudaMemcpyDeviceToHost), cudaSuccess);
    for (float x : got) CHECK(x == -1.0f);
    CHECK_INT(mixp_context_error(c, NULL), MIXP_OK);
    mixp_context_free(c);
    cudaFree(w);
    cudaFree(g);
    CHECK_INT(cudasim::leaks(), 0);
}
static void kernels_of_the_program(void) {
    the_default_stream_is_ordered(NULL);
    the_default_stream_is_ordered((void *)cudaStreamLegacy);
}

/* The program uses the default stream in the middle of our capture: that is its own affair. */
static void a_capture_stands_the_default_stream(void) {
    for (int legacy = 0; legacy < 2; legacy++) {
        mixp_context *c = context_on_gpu(legacy ? (void *)cudaStreamLegacy : NULL);
        const int64_t four[1] = { 4 };
        mixp_tensor *w = mixp_param(c, "w", MIXP_F32, 1, four);
        float x[4] = { 1, 2, 3, 4 }, seven[4] = { 7, 7, 7, 7 }, *mine = NULL, got[4];
        CHECK_INT(cudaMalloc((void **)&mine, 16), cudaSuccess);
        void *before = mixp_context_exec(c)->stream;
        CHECK_INT(mixp_capture_begin(c), MIXP_OK);
        CHECK(mixp_context_exec(c)->stream != before);
        mixp_step_begin(c);
        CHECK_INT(mixp_write(w, x, MIXP_F32, 4), MIXP_OK);
        CHECK_INT(MIXPI_LAUNCH(fill_by_hand, 1, 1, 0, (cudaStream_t)0, mine, 4, 7.0f), cudaSuccess);
        CHECK_INT(cudaMemcpy(got, mine, 16, cudaMemcpyDeviceToHost), cudaSuccess);
        CHECK(memcmp(got, seven, 16) == 0);
        mixp_graph *graph = mixp_capture_end(c);
        CHECK(graph != NULL);
        CHECK(mixp_context_exec(c)->stream == before);
        x[1] = 5;
        CHECK_INT(mixp_replay(graph), MIXP_OK);
        holds(w, x);
        mixp_context_free(c);
        cudaFree(mine);
    }
    CHECK_INT(cudasim::leaks(), 0);
    CHECK_INT(cudaGetLastError(), cudaSuccess);
}

/* cudaMalloc in the middle of our capture: no graph, the error says what to avoid, and the next capture is
 * right. */
static void an_allocation_ends_a_capture(void) {
    mixp_context *c = context_on_gpu(NULL);
    const int64_t four[1] = { 4 };
    mixp_tensor *w = mixp_param(c, "w", MIXP_F32, 1, four);
    float x[4] = { 1, 2, 3, 4 }, *mine = NULL;
    const char *why = "";
    CHECK_INT(mixp_capture_begin(c), MIXP_OK);
    mixp_step_begin(c);
    CHECK_INT(mixp_write(w, x, MIXP_F32, 4), MIXP_OK);
    CHECK_INT(cudaMalloc((void **)&mine, 16), cudaErrorStreamCaptureUnsupported);
    CHECK(mixp_capture_end(c) == NULL);
    CHECK_INT(mixp_context_error(c, &why), MIXP_ERR_ORDER);
    CHECK_TEXT(why, "cudaMalloc");
    mixp_context_clear_error(c);
    cudaGetLastError();
    CHECK_INT(mixp_capture_begin(c), MIXP_OK);
    mixp_step_begin(c);
    CHECK_INT(mixp_write(w, x, MIXP_F32, 4), MIXP_OK);
    mixp_graph *graph = mixp_capture_end(c);
    CHECK(graph != NULL);
    CHECK_INT(mixp_replay(graph), MIXP_OK);
    holds(w, x);
    mixp_context_free(c);
    CHECK_INT(cudasim::leaks(), 0);
}

/* Compiled with --use_fast_math: the first call that waits says so, and no step was applied. */
static void flushed_subnormals_are_reported(void) {
    NEEDS_SIMULATION;
    Model m;
    const char *why = "";
#ifndef __SSE__
    SKIP("this processor's flag is another one");
#endif
    cudasim::flushes = true;
    model_open(&m, gpu(), MIXP_F16, 1, 1024);
    next_batch(&m, 0);
    mixp_item(train(&m));
    cudasim::flushes = false;
    CHECK_INT(mixp_context_error(m.ctx, &why), MIXP_ERR_DEVICE);
    CHECK_TEXT(why, "--use_fast_math");
    mixp_context_clear_error(m.ctx);
    next_batch(&m, 1);
    mixp_item(train(&m));
    fine(&m);
    mixp_context_free(m.ctx);
}

/* --- faults ---------------------------------------------------------------------------------- */

static void bad_ids_are_reported(void) {
    Model m;
    const char *why = "";
    model_open(&m, gpu(), MIXP_F16, 1, 1024);
    next_batch(&m, 0);
    m.ids[3] = VOCAB;
    mixp_item(train(&m));
    CHECK_INT(mixp_context_error(m.ctx, &why), MIXP_ERR_ARGUMENT);
    CHECK_TEXT(why, "embedding");
    mixp_context_clear_error(m.ctx);
    next_batch(&m, 1);
    m.next[0] = -5;
    mixp_item(train(&m));
    CHECK_INT(mixp_context_error(m.ctx, &why), MIXP_ERR_ARGUMENT);
    CHECK_TEXT(why, "cross_entropy");
    mixp_context_clear_error(m.ctx);
    next_batch(&m, 2);
    mixp_item(train(&m));
    fine(&m);
    mixp_context_free(m.ctx);
}

/* What is told of a bad index, once, without waiting. */
static void told(Model *m, const char *text) {
    const char *why = "";
    CHECK_INT(mixp_context_error(m->ctx, &why), MIXP_ERR_ARGUMENT);
    CHECK_TEXT(why, text);
    mixp_context_clear_error(m->ctx);
}

/* No byte of the weights moves, nor does the scale; the verdict tells; the next step is applied. */
static void a_bad_index_applies_no_step(void) {
    static float before[MOST], after[MOST];
    for (int target = 0; target < 2; target++) {
        Model m;
        model_open(&m, gpu(), MIXP_F16, 1, 1024);
        next_batch(&m, 0);
        train(&m);
        int64_t n = weights_of(&m, before);
        next_batch(&m, 1);
        (target ? m.next : m.ids)[3] = VOCAB + 5;
        cudasim::eager = true;
        long waits = cudasim::count.waits;
        train(&m);
        if (!cudasim::simulated) cudaDeviceSynchronize();       /* no GPU is eager */
        mixp_verdict v = mixp_scaler_verdict(m.scaler);
        CHECK_INT(v.outcome, MIXP_STEP_SKIPPED);
        CHECK_INT(v.skipped, 1);
        CHECK_INT(cudasim::count.waits, waits);
        cudasim::eager = false;
        told(&m, target ? "target" : "id");
        CHECK_INT(weights_of(&m, after), n);
        CHECK(memcmp(before, after, (size_t)n * sizeof *after) == 0);
        CHECK_NEAR(mixp_scaler_loss_scale(m.scaler), 1024, 0);
        next_batch(&m, 2);
        train(&m);
        CHECK_INT(mixp_optimizer_applied(m.opt), 2);
        fine(&m);
        mixp_context_free(m.ctx);
        CHECK_INT(cudasim::leaks(), 0);
    }
}

/* The same where no NaN would tell: nobody uses what the bad id gave, and no scaler looks. */
static void a_bad_index_of_no_consequence_too(void) {
    const int64_t two = 2;
    const int32_t ids[2] = { 1, -9 };
    static float before[MOST], after[MOST];
    Model m;
    model_open(&m, gpu(), MIXP_F32, 1, 1024);
    next_batch(&m, 0);
    for (int bad = 1; bad >= 0; bad--) {
        int64_t n = weights_of(&m, before);
        mixp_step_begin(m.ctx);
        mixp_zero_grad(m.opt);
        if (bad) mixp_embedding(m.ctx, m.wte, mixp_input(m.ctx, MIXP_I32, 1, &two, ids));
        CHECK_INT(mixp_backward(m.ctx, loss_of(&m)), MIXP_OK);
        CHECK_INT(mixp_optimizer_step(m.opt), MIXP_OK);
        if (!bad) CHECK_INT(mixp_optimizer_applied(m.opt), 1);     /* waits */
        mixp_verdict v = mixp_optimizer_verdict(m.opt);
        CHECK_INT(v.outcome, bad ? MIXP_STEP_SKIPPED : MIXP_STEP_APPLIED);
        CHECK(bad || v.grad_norm > 0.0);
        if (bad) told(&m, "embedding: id -9 at row 1 is outside");
        weights_of(&m, after);
        CHECK((memcmp(before, after, (size_t)n * sizeof *after) == 0) == bad);
    }
    fine(&m);
    mixp_context_free(m.ctx);
}

/* A replayed step with a bad batch is not applied; nor are those after it until someone asks. */
static void a_bad_index_stops_replays(void) {
    static float before[MOST], after[MOST];
    Model m;
    model_open(&m, gpu(), MIXP_F16, 1, 1024);
    next_batch(&m, 0);
    train(&m);
    CHECK_INT(mixp_capture_begin(m.ctx), MIXP_OK);
    train(&m);
    mixp_graph *graph = mixp_capture_end(m.ctx);
    int64_t n = weights_of(&m, before);
    for (int step = 1; step < 3; step++) {
        next_batch(&m, step);
        if (step == 1) m.ids[0] = -1;
        CHECK_INT(mixp_replay(graph), MIXP_OK);
    }
    mixp_scaler_verdict(m.scaler);
    cudaStreamSynchronize((cudaStream_t)mixp_context_exec(m.ctx)->stream);
    CHECK_INT(mixp_scaler_verdict(m.scaler).skipped, 2);
    told(&m, "embedding: id -1 at row 0 is outside");
    weights_of(&m, after);
    CHECK(memcmp(before, after, (size_t)n * sizeof *after) == 0);
    CHECK_INT(mixp_replay(graph), MIXP_OK);
    CHECK_INT(mixp_optimizer_applied(m.opt), 2);
    fine(&m);
    mixp_context_free(m.ctx);
    CHECK_INT(cudasim::leaks(), 0);
}

/* Whatever request for memory fails, the context says so and can be freed, or there is none. */
static void every_allocation_may_fail(void) {
    NEEDS_SIMULATION;
    int failed = 1, n;
    for (n = 1; failed && n < 400; n += getenv("MIXPREC_TEST_QUICK") ? 9 : 1) {
        Model m;
        cudasim::fail_at = n;
        model_open(&m, gpu(), MIXP_F16, 1, 1024);
        if (m.ctx) {
            next_batch(&m, 0);
            if (mixp_context_error(m.ctx, NULL) == MIXP_OK) train(&m);
            failed = mixp_context_error(m.ctx, NULL) != MIXP_OK;
            mixp_context_free(m.ctx);
        }
        if (cudasim::fail_at > 0) failed = 0;       /* its turn never came */
        cudasim::fail_at = 0;
        CHECK_INT(cudasim::leaks(), 0);
    }
    CHECK(n > 20 && n < 400);
}

/* Refuses request number n of a call, of which the model is otherwise ready. Returns 0 if there were fewer. */
static int refused_once(Model *m, mixp_result (*call)(Model *), int n) {
    static float before[MOST], after[MOST];
    const int64_t applied = mixp_optimizer_applied(m->opt), count = weights_of(m, before);
    const float scale = mixp_scaler_loss_scale(m->scaler);
    cudasim::fail_at = n;
    const mixp_result r = call(m);
    int reached = cudasim::fail_at == 0;
    cudasim::fail_at = 0;
    if (r == MIXP_OK) return reached;       /* a product found another way */
    mixp_context_clear_error(m->ctx);
    weights_of(m, after);
    CHECK(memcmp(before, after, (size_t)count * sizeof *before) == 0);
    CHECK_INT(mixp_optimizer_applied(m->opt), applied);
    CHECK_NEAR(mixp_scaler_loss_scale(m->scaler), scale, 0);
    CHECK_INT(call(m), MIXP_OK);
    return reached;
}

static mixp_result step_of(Model *m) { return mixp_scaler_step(m->scaler, m->opt); }
static mixp_result update_of(Model *m) { return mixp_scaler_update(m->scaler); }

/* The first sampled step: a refusal within a call changes nothing, and the call made again succeeds. */
static void a_refused_step_changes_nothing(void) {
    NEEDS_SIMULATION;
    int steps = 1, updates = 1, n;
    for (n = 1; (steps || updates) && n < 30; n++) {
        Model m;
        model_open(&m, gpu(), MIXP_F16, 1, 1024);
        next_batch(&m, 0);
        CHECK_INT(mixp_guard_start(m.ctx, NULL), MIXP_OK);
        mixp_step_begin(m.ctx);
        mixp_backward(m.ctx, mixp_scaler_scale(m.scaler, loss_of(&m)));
        steps = refused_once(&m, step_of, n);
        updates = refused_once(&m, update_of, n);
        CHECK_INT(mixp_optimizer_applied(m.opt), 1);
        fine(&m);
        mixp_context_free(m.ctx);
        CHECK_INT(cudasim::leaks(), 0);
    }
    CHECK(n > 2 && n < 30);
}

/* --- memory from the program ------------------------------------------------------------- */

/* Two steps, and two as a graph. */
static void train_and_replay(Model *m) {
    for (int i = 0; i < 2; i++) { next_batch(m, i); train(m); }
    if (mixp_context_error(m->ctx, NULL) != MIXP_OK) return;
    if (mixp_capture_begin(m->ctx) == MIXP_OK) train(m);
    mixp_graph *graph = mixp_capture_end(m->ctx);
    for (int i = 0; i < 2 && graph; i++) CHECK_INT(mixp_replay(graph), MIXP_OK);
}

/* Every byte on the GPU that is not pinned, and the same weights as with cudaMalloc. */
static void the_program_gives_the_memory(void) {
    Model a, b;
    long unpinned = 0;
    use_pools(1);
    model_open(&a, gpu(), MIXP_F16, 1, 1024);
    train_and_replay(&a);
    for (auto &r : cudasim::machine().memory) unpinned += !r.second.pinned;
    CHECK(gpu_pool.alive > 10 && host_pool.alive > 10);
    if (cudasim::simulated) CHECK_INT(gpu_pool.alive, unpinned);
    pooled = 0;
    model_open(&b, gpu(), MIXP_F16, 1, 1024);
    train_and_replay(&b);
    same_weights(&a, &b);
    fine(&a);
    mixp_context_free(a.ctx);
    mixp_context_free(b.ctx);
    CHECK_INT(gpu_pool.alive, 0);
    CHECK_INT(host_pool.alive, 0);
    CHECK_INT(cudasim::leaks(), 0);
    use_pools(0);
}

/* A request refused, from each pool in turn: the error has its type, and nothing stays behind. */
static void every_request_may_be_refused(void) {
    const char *why = "";
    for (int host = 0; host < 2; host++)
        for (int n = 1, refused = 1; refused; n += getenv("MIXPREC_TEST_QUICK") && n > 9 ? 7 : 1) {
            Model m;
            use_pools(1);
            (host ? host_pool : gpu_pool).fail_at = n;
            model_open(&m, gpu(), MIXP_F16, 1, 1024);
            if (m.ctx && mixp_context_error(m.ctx, NULL) == MIXP_OK) train_and_replay(&m);
            refused = (host ? host_pool : gpu_pool).asked >= n;
            CHECK(m.ctx || refused);
            if (m.ctx)
                CHECK_INT(mixp_context_error(m.ctx, &why), refused ? MIXP_ERR_MEMORY : MIXP_OK);
            if (m.ctx && refused && !host) CHECK_TEXT(why, "device_allocator: out of memory");
            mixp_context_free(m.ctx);
            CHECK_INT(gpu_pool.alive, 0);
            CHECK_INT(host_pool.alive, 0);
            CHECK_INT(cudasim::leaks(), 0);
            CHECK(refused || n > 20);
        }
    use_pools(0);
}

static void *host_memory(size_t bytes, void *user)
{ (void)user; return aligned_alloc(256, (bytes + 255) / 256 * 256); }
static void host_memory_back(void *p, void *user) { (void)user; free(p); }

/* Memory that kernels could not use: nothing is made of it. */
static void unusable_memory_is_refused(void) {
    const char *why = "";
    mixp_context_desc desc;
    mixp_exec x;
    Model m;
    use_pools(1);
    gpu_pool.off = 128;
    model_open(&m, gpu(), MIXP_F16, 1, 1024);
    CHECK(m.ctx == NULL);
    use_pools(1);
    model_open(&m, gpu(), MIXP_F16, 1, 1024);
    fine(&m);
    gpu_pool.off = 64;                      /* from here on */
    next_batch(&m, 0);
    train(&m);
    CHECK_INT(mixp_context_error(m.ctx, &why), MIXP_ERR_MEMORY);
    CHECK_TEXT(why, "device_allocator: the allocator's memory is not aligned to 256 bytes");
    gpu_pool.off = 0;
    mixp_context_free(m.ctx);
    CHECK_INT(gpu_pool.alive, 0);
    CHECK_INT(host_pool.alive, 0);
    use_pools(0);
    memset(&x, 0, sizeof x);
    x.device.allocate = host_memory;
    x.device.release = host_memory_back;
    CHECK_INT(gpu()->attach(&x), MIXP_ERR_ARGUMENT);
    memset(&desc, 0, sizeof desc);
    desc.device_allocator.allocate = host_memory;
    CHECK(mixp_context_new(&desc) == NULL);
    CHECK_INT(cudasim::leaks(), 0);
}

static void memory_of_the_second_gpu(void) {
    NEEDS_SIMULATION;
    Model m;
    cudasim::devices = 2;
    use_pools(1);
    gpu_pool.ordinal = 1;
    model_open(&m, mixp_cuda(1, NULL), MIXP_F32, 1, 1024);
    next_batch(&m, 0);
    train(&m);
    fine(&m);
    mixp_context_free(m.ctx);
    CHECK_INT(gpu_pool.alive, 0);
    CHECK_INT(cudasim::leaks(), 0);
    cudasim::devices = 1;
    use_pools(0);
}

/* All memory comes back then too. */
static void a_context_is_freed_in_a_capture(void) {
    for (int own = 0; own < 2; own++) {
        Model m;
        use_pools(own);
        model_open(&m, gpu(), MIXP_F16, 1, 1024);
        next_batch(&m, 0);
        train(&m);
        CHECK_INT(mixp_capture_begin(m.ctx), MIXP_OK);
        mixp_context_free(m.ctx);
        CHECK_INT(gpu_pool.alive, 0);
        CHECK_INT(cudasim::leaks(), 0);
    }
    use_pools(0);
}

/* --- checkpoints ------------------------------------------------------------------------------ */

static void a_checkpoint_moves_to_the_cpu(void) {
    char path[64];
    snprintf(path, sizeof path, "/tmp/mixprec_cuda_training.%d", (int)getpid());
    mixp_checkpoint a, b;
    Model m, c;
    model_open(&m, gpu(), MIXP_F16, 1, 1024);
    model_open(&c, mixp_cpu(), MIXP_F16, 1, 1024);
    for (int i = 0; i < 2; i++) { next_batch(&m, i); train(&m); }
    memset(&a, 0, sizeof a);
    a.ctx = m.ctx;
    a.scaler = m.scaler;
    a.optimizers = &m.opt;
    a.n_optimizers = 1;
    b = a;
    b.ctx = c.ctx;
    b.scaler = c.scaler;
    b.optimizers = &c.opt;
    CHECK_INT(mixp_checkpoint_save(path, &a), MIXP_OK);
    CHECK_INT(mixp_checkpoint_load(path, &b), MIXP_OK);
    remove(path);
    same_weights(&m, &c);
    CHECK_INT(mixp_optimizer_applied(c.opt), 2);
    fine(&m);
    fine(&c);
    mixp_context_free(m.ctx);
    mixp_context_free(c.ctx);
}

/* --- masters of weights that are written ------------------------------------------------------ */

/* A program writes back the low weights that it has read, but for one element. Its f32 masters then lose no digits:
 * they go down by lr times the gradient in each step, beside sums in double. On the GPU and on the CPU; more elements
 * than one part of the work has. */
static void masters_of_written_weights(mixp_dtype dtype, const mixp_device *device) {
    enum { N = (1 << 16) + 77, CHANGED = (1 << 16) + 3, STEPS = 4 };
    static float read[N], g[N];
    static double want[N];
    const int64_t shape[1] = { N };
    mixp_context_desc where;
    memset(&where, 0, sizeof where);
    where.device = device;
    mixp_context *ctx = mixp_context_new(&where);
    mixp_optimizer_desc sgd = mixp_sgd_defaults();
    mixp_tensor *w = mixp_param(ctx, "w", dtype, 1, shape), *grad = mixp_param(ctx, "g", MIXP_F32, 1, shape);
    sgd.lr = 1.0 / 4096.0;
    mixp_optimizer *opt = mixp_optimizer_new(ctx, &sgd);
    CHECK_INT(mixp_optimizer_add(opt, w, grad), MIXP_OK);
    CHECK_INT(mixp_init_uniform(w, 0.5, 1), MIXP_OK);
    for (int i = 0; i < N; i++) g[i] = (float)(i % 7 - 3) / 4.0f;
    CHECK_INT(mixp_write(grad, g, MIXP_F32, N), MIXP_OK);
    CHECK_INT(mixp_read(w, read, MIXP_F32, N), MIXP_OK);
    for (int i = 0; i < N; i++) want[i] = (double)read[i];
    for (int step = 0; step < STEPS; step++) {
        CHECK_INT(mixp_optimizer_step(opt), MIXP_OK);
        for (int i = 0; i < N; i++) want[i] -= (double)g[i] * sgd.lr;
        CHECK_INT(mixp_read(w, read, MIXP_F32, N), MIXP_OK);
        if (step == STEPS / 2) want[CHANGED] = (double)(read[CHANGED] = -2.0f);
        CHECK_INT(mixp_write(w, read, MIXP_F32, N), MIXP_OK);
        CHECK_INT(mixp_optimizer_read(opt, w, MIXP_STATE_MASTER, read, N), MIXP_OK);
        double worst = 0.0;
        for (int i = 0; i < N; i++) worst = fmax(worst, fabs((double)read[i] - want[i]));
        CHECK(worst < 1e-6);
    }
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    mixp_context_free(ctx);
}

static void masters_of_written_weights_keep_their_digits(void) {
    masters_of_written_weights(MIXP_BF16, gpu());
    masters_of_written_weights(MIXP_F16, gpu());
    masters_of_written_weights(MIXP_BF16, mixp_cpu());
    masters_of_written_weights(MIXP_F16, mixp_cpu());
}

/* --- products of a batch ---------------------------------------------------------------------- */

static void gradient_of_a_shared_b_is_rounded_once(void) {
    shared_b_everywhere(gpu());
    CHECK_INT(cudasim::leaks(), 0);
}

/* --- slices and their inverse ----------------------------------------------------------------- */

enum { GATES = 3, GATE_ROWS = 5, GATE_COLS = 40, WHOLE_COLS = GATES * GATE_COLS + 1, JOINED = 66 };

static float gate_value(int i) { return (float)(i * 13 % 17 - 8) / 8.0f; }

/* d/dx of sum(r z + n + 3 r) over gates r, z, n side by side in x; the last column is nobody's. */
static float gate_slope(int i) {
    int gate = i % WHOLE_COLS / GATE_COLS;
    if (gate == 0) return gate_value(i + GATE_COLS) + 3.0f;
    if (gate == 1) return gate_value(i - GATE_COLS);
    return gate == 2 ? 1.0f : 0.0f;
}

static void gates_of(mixp_dtype dtype) {
    const int64_t shape[2] = { GATE_ROWS, WHOLE_COLS };
    const int n = GATE_ROWS * WHOLE_COLS;
    mixp_context_desc desc;
    float v[GATE_ROWS * WHOLE_COLS], got[GATE_ROWS * WHOLE_COLS];
    memset(&desc, 0, sizeof desc);
    desc.device = gpu();
    mixp_context *c = mixp_context_new(&desc);
    mixp_tensor *x = mixp_param(c, "x", dtype, 2, shape);
    for (int i = 0; i < n; i++) v[i] = gate_value(i);
    mixp_write(x, v, MIXP_F32, n);
    for (int step = 1; step <= 2; step++) {     /* the second in memory that was used */
        mixp_tensor *part[GATES], *joined[JOINED], *h;
        mixp_step_begin(c);
        x->grad = NULL;
        h = mixp_scale(c, x, 1.0f);             /* its gradient's memory is the step's */
        CHECK_INT(mixp_split(c, mixp_slice(c, h, -1, 0, GATES * GATE_COLS), 1, GATES, part), MIXP_OK);
        h = mixp_add(c, mixp_mul(c, part[0], part[1]), part[2]);
        h = mixp_add(c, h, mixp_scale(c, mixp_slice(c, x, 1, 0, GATE_COLS), 3.0f));
        for (int i = 0; i < JOINED; i++) joined[i] = mixp_slice(c, h, 1, i % GATE_COLS, 1);
        h = mixp_concat(c, JOINED, joined, 1);  /* a last slice of it has each column once */
        h = mixp_slice(c, h, 1, -JOINED, GATE_COLS);
        CHECK_INT(mixp_backward(c, mixp_sum(c, h, MIXP_ALL, 0)), MIXP_OK);
        mixp_read(x->grad, got, MIXP_F32, n);
        for (int i = 0; i < n; i++) CHECK_NEAR(got[i], gate_slope(i), 0.0);
    }
    CHECK_INT(mixp_context_error(c, NULL), MIXP_OK);
    mixp_context_free(c);
    CHECK_INT(cudasim::leaks(), 0);
}

static void slices_of_gates(void) {
    gates_of(MIXP_F32);
    gates_of(MIXP_F16);
    gates_of(MIXP_BF16);
}

/* --- spikes, a scale that is set, counts ---------------------------------------------------- */

/* Eight weights whose loss the program multiplies by a number in the device's memory. */
struct Watched {
    mixp_context   *ctx;
    mixp_tensor    *w, *factor;
    mixp_optimizer *opt;
    mixp_scaler    *scaler;
};
enum { WATCHED = 8, WATCHED_STEPS = 40 };

static void watched_open(Watched *m, const mixp_device *device) {
    const int64_t shape[2] = { 1, WATCHED }, one[1] = { 1 };
    mixp_context_desc desc;
    mixp_scaler_desc scaler;
    mixp_optimizer_desc adamw = mixp_adamw_defaults();
    memset(&desc, 0, sizeof desc);
    memset(&scaler, 0, sizeof scaler);
    desc.device = device;
    desc.threads = 1;
    scaler.rule = MIXP_RULE_PREDICTIVE;
    scaler.init_scale = 64;
    scaler.growth_interval = 4;
    adamw.spike.of = MIXP_SPIKE_BOTH;
    adamw.spike.window = 8;
    m->ctx = mixp_context_new(&desc);
    m->opt = mixp_optimizer_new(m->ctx, &adamw);
    m->scaler = mixp_scaler_new(m->ctx, &scaler);
    m->w = mixp_param(m->ctx, "w", MIXP_F32, 2, shape);
    m->factor = mixp_param(m->ctx, "factor", MIXP_F32, 1, one);
    mixp_fill(m->w, 0.5);
    CHECK_INT(mixp_tensor_set_requires_grad(m->factor, 0), MIXP_OK);    /* no optimizer has it */
    CHECK_INT(mixp_optimizer_add(m->opt, m->w, NULL), MIXP_OK);
}

/* 1, but for spikes at steps 15 and 25, and a loss that is not finite at step 30. */
static double watched_factor(int step) {
    return step == 15 || step == 25 ? 5.0 : step == 30 ? INFINITY : 1.0 + 0.02 * (step % 5);
}

static void watched_train(Watched *m) {
    const int64_t shape[2] = { 4, WATCHED }, rows[2] = { 4, 1 };
    static float x[4 * WATCHED], y[4];
    mixp_tensor *loss = NULL;
    for (int i = 0; i < 4 * WATCHED; i++) x[i] = (float)(i % 7) / 8.0f;
    for (int i = 0; i < 4; i++) y[i] = (float)(i + 20);
    mixp_step_begin(m->ctx);
    mixp_zero_grad(m->opt);
    MIXP_AUTOCAST(m->ctx, MIXP_F16) {
        loss = mixp_mse(m->ctx, mixp_linear(m->ctx, mixp_input(m->ctx, MIXP_F32, 2, shape, x), m->w, NULL),
                        mixp_input(m->ctx, MIXP_F32, 2, rows, y));
        loss = mixp_mul(m->ctx, loss, m->factor);
    }
    CHECK_INT(mixp_optimizer_set_loss(m->opt, loss), MIXP_OK);
    mixp_backward(m->ctx, mixp_scaler_scale(m->scaler, loss));
    CHECK_INT(mixp_scaler_step(m->scaler, m->opt), MIXP_OK);
    CHECK_INT(mixp_scaler_update(m->scaler), MIXP_OK);
}

/* By the CPU, by the GPU step by step, and by a graph that nobody is asked about. */
static void spikes_in_a_graph(void) {
    Watched on_cpu, eager, played;
    float w[3][WATCHED];
    mixp_graph *graph;
    watched_open(&on_cpu, mixp_cpu());
    watched_open(&eager, gpu());
    watched_open(&played, gpu());
    for (int step = 0; step < WATCHED_STEPS; step++) {
        Watched *const all[] = { &on_cpu, &eager, &played };
        for (Watched *m : all) mixp_fill(m->factor, watched_factor(step));
        watched_train(&on_cpu);
        watched_train(&eager);
        if (step < 2) watched_train(&played);
        else if (step > 2) CHECK_INT(mixp_replay(graph), MIXP_OK);
        else {
            CHECK_INT(mixp_capture_begin(played.ctx), MIXP_OK);
            watched_train(&played);
            graph = mixp_capture_end(played.ctx);
            CHECK(graph != NULL);
            CHECK_INT(mixp_replay(graph), MIXP_OK);
        }
        mixp_optimizer_applied(eager.opt);      /* waits: the newest verdict is the step's own */
        mixp_optimizer_applied(played.opt);
        mixp_verdict v[3] = { mixp_optimizer_verdict(on_cpu.opt), mixp_optimizer_verdict(eager.opt),
                              mixp_optimizer_verdict(played.opt) };
        int want = step == 15 || step == 25 ? MIXP_SKIP_SPIKE_LOSS
                                            : step == 30 ? MIXP_SKIP_NON_FINITE : MIXP_SKIP_NONE;
        for (int i = 0; i < 3; i++) {
            if (want == MIXP_SKIP_SPIKE_LOSS && v[i].reason == MIXP_SKIP_SPIKE_NORM)
                v[i].reason = MIXP_SKIP_SPIKE_LOSS;     /* whichever lay further up */
            CHECK_INT(v[i].reason, want);
            CHECK(v[i].scale == v[0].scale);
            CHECK_NEAR(v[i].spike_z, v[0].spike_z, 1e-3 * (1.0 + fabs(v[0].spike_z)));
            CHECK_INT(v[i].skipped, (step >= 15) + (step >= 25) + (step >= 30));
        }
        CHECK(memcmp(&v[1].spike_z, &v[2].spike_z, sizeof v[1].spike_z) == 0);
    }
    mixp_read(on_cpu.w, w[0], MIXP_F32, WATCHED);
    mixp_read(eager.w, w[1], MIXP_F32, WATCHED);
    mixp_read(played.w, w[2], MIXP_F32, WATCHED);
    CHECK(memcmp(w[1], w[2], sizeof w[1]) == 0);
    for (int i = 0; i < WATCHED; i++) CHECK_NEAR(w[1][i], w[0][i], 1e-5);
    Watched *const all[] = { &on_cpu, &eager, &played };
    for (Watched *m : all) {
        CHECK_INT(mixp_context_error(m->ctx, NULL), MIXP_OK);
        mixp_context_free(m->ctx);
    }
    CHECK_INT(cudasim::leaks(), 0);
}

/* What is counted of gradients of every dtype is the CPU's, and no step waits for it. */
static void counts_of_gradients(void) {
    static const mixp_dtype dtypes[] = { MIXP_F32, MIXP_F16, MIXP_BF16 };
    const int64_t n[3] = { 9001, 77, 300 };
    mixp_context *ctx[2];
    mixp_optimizer *opt[2];
    mixp_tensor *grad[2][3];
    for (int k = 0; k < 2; k++) {
        mixp_context_desc desc;
        memset(&desc, 0, sizeof desc);
        desc.device = k ? gpu() : mixp_cpu();
        ctx[k] = mixp_context_new(&desc);
        opt[k] = new_sgd(ctx[k]);
        for (int i = 0; i < 3; i++) {
            mixp_tensor *w = mixp_param(ctx[k], i ? i > 1 ? "c" : "b" : "a", MIXP_F32, 1, &n[i]);
            grad[k][i] = mixp_param(ctx[k], i ? i > 1 ? "dc" : "db" : "da", dtypes[i], 1, &n[i]);
            CHECK_INT(mixp_optimizer_add(opt[k], w, grad[k][i]), MIXP_OK);
        }
    }
    for (int i = 0; i < 3; i++) {
        float *v = (float *)malloc((size_t)n[i] * sizeof *v);
        for (int64_t e = 0; e < n[i]; e++)
            v[e] = ldexpf((float)(e % 13) - 6.0f, (int)(e * 7 % 60) - 45);
        v[n[i] / 2] = i == 2 ? INFINITY : 3.0f;
        for (int k = 0; k < 2; k++) CHECK_INT(mixp_write(grad[k][i], v, MIXP_F32, n[i]), MIXP_OK);
        free(v);
    }
    for (int k = 0; k < 2 && gpu()->kernels->look; k++) {
        CHECK_INT(mixp_optimizer_sample(opt[k]), MIXP_OK);
        CHECK_INT(mixp_optimizer_step(opt[k]), MIXP_OK);    /* the table of rows goes up */
        CHECK_INT(mixp_optimizer_sample(opt[k]), MIXP_OK);
        long waits = cudasim::count.waits;
        CHECK_INT(mixp_optimizer_step(opt[k]), MIXP_OK);
        CHECK_INT(cudasim::count.waits, waits);
    }
    if (!gpu()->kernels->look) CHECK_INT(mixp_optimizer_sample(opt[1]), MIXP_ERR_DEVICE);
    for (int i = -1; i < 3 && gpu()->kernels->look; i++) {
        mixp_underflow u[2];
        for (int k = 0; k < 2; k++) CHECK_INT(mixp_optimizer_underflow(opt[k], i, &u[k]), 1);
        CHECK(memcmp(&u[0].look, &u[1].look, sizeof u[0].look) == 0);
        CHECK(memcmp(u[0].exponents, u[1].exponents, sizeof u[0].exponents) == 0);
        CHECK(u[0].flushed == u[1].flushed && u[0].subnormal == u[1].subnormal);
        CHECK_INT(u[1].look.count, i < 0 ? n[0] + n[1] + n[2] : n[i]);
        CHECK_INT(u[1].look.nonfinite, i == 2 || i < 0);
        CHECK_INT(u[1].lost.updates, u[0].lost.updates);
        CHECK_INT(u[1].lost.lost, u[0].lost.lost);
        CHECK(u[1].lost.updates > 0 && u[1].lost.lost < u[1].lost.updates);
        CHECK(u[1].flushed > 0.01 || i == 2);
    }
    for (int k = 0; k < 2; k++) mixp_context_free(ctx[k]);
    CHECK_INT(cudasim::leaks(), 0);
}

int main(void) {
    cudasim::host_sees_device = false;          /* nobody but kernels and copies does */
    RUN(trains_in_f32);
    RUN(trains_in_f16);
    RUN(trains_in_bf16);
    RUN(trains_at_level_2);
    RUN(skipped_means_untouched);
    RUN(a_step_neither_waits_nor_allocates);
    RUN(a_lean_step_is_two_launches);
    RUN(a_step_clears_gradients_of_yours);
    RUN(a_graph_replays_the_step);
    RUN(gradients_from_before_a_graph);
    RUN(a_graph_cannot_wait);
    RUN(a_failed_call_makes_no_graph);
    RUN(a_comparison_ends_a_capture);
    cudasim::host_sees_device = true;           /* that is quicker */
    RUN(the_cpu_has_no_graphs);
    RUN(a_graph_converts_each_write);
    RUN(a_graph_writes_after_scratch);
    RUN(a_graph_takes_several_batches);
    RUN(a_graph_keeps_what_was_temporary);
    RUN(kernels_of_the_program);
    RUN(a_capture_stands_the_default_stream);
    RUN(an_allocation_ends_a_capture);
    RUN(flushed_subnormals_are_reported);
    RUN(bad_ids_are_reported);
    RUN(a_bad_index_applies_no_step);
    RUN(a_bad_index_of_no_consequence_too);
    RUN(a_bad_index_stops_replays);
    RUN(every_allocation_may_fail);
    RUN(a_refused_step_changes_nothing);
    RUN(the_program_gives_the_memory);
    RUN_LATER(every_request_may_be_refused);
    RUN(unusable_memory_is_refused);
    RUN(memory_of_the_second_gpu);
    RUN(a_context_is_freed_in_a_capture);
    RUN(a_checkpoint_moves_to_the_cpu);
    RUN(masters_of_written_weights_keep_their_digits);
    RUN_LATER(gradient_of_a_shared_b_is_rounded_once);
    RUN(slices_of_gates);
    RUN_LATER(spikes_in_a_graph);
    RUN(counts_of_gradients);
    return test_report();
}
