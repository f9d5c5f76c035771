/* test_recompute.c - blocks that are computed again in backward: the bits of a run that keeps
 * everything (dropout, autocast, guard, several steps and walks), memory, and refusals. The run
 * without mixp_recompute is the reference.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include <setjmp.h>
#include "mixprec.h"
#include "test.h"
#include "numbers.h"

enum { LAYERS = 6, WIDTH = 64, BATCH = 4, LENGTH = 24, WEIGHTS = 8, HEADS = 4 };
static const int64_t x_shape[3] = { BATCH, LENGTH, WIDTH };
static float batch[BATCH * LENGTH * WIDTH];

typedef struct layer { mixp_tensor *w[WEIGHTS]; } layer;

typedef struct model {
    mixp_context   *ctx;
    mixp_optimizer *opt;
    mixp_scaler    *scaler;
    mixp_tensor    *in;         /* an f32 parameter before the layers                           */
    layer           layers[LAYERS];
} model;

typedef struct mode {
    mixp_dtype dtype;
    int        level, guard, fused, disposable, last, recipe;
} mode;
static mode now;
static mixp_recipe nvfp4;

static mixp_tensor *param(mixp_context *ctx, int64_t rows, int64_t cols, double size) {
    static int made;
    char name[32];
    int64_t shape[2];
    snprintf(name, sizeof name, "p%d", made++);
    shape[0] = rows;
    shape[1] = cols;
    mixp_tensor *t = mixp_param(ctx, name, MIXP_F32, cols ? 2 : 1, shape);
    if (cols) mixp_init_normal(t, 0, size);
    else mixp_fill(t, size);
    return t;
}

static model model_of(int threads) {
    mixp_context_desc d;
    mixp_optimizer_desc adamw = mixp_adamw_defaults();
    model m;
    memset(&d, 0, sizeof d);
    memset(&m, 0, sizeof m);
    d.threads = threads;
    d.seed = 3;
    m.ctx = mixp_context_new(&d);
    m.in = param(m.ctx, WIDTH, 0, 1.0);
    for (int i = 0; i < LAYERS; i++) {
        mixp_tensor **w = m.layers[i].w;
        w[0] = param(m.ctx, WIDTH, 0, 1.0);
        w[1] = param(m.ctx, WIDTH, 0, 0.0);
        w[2] = param(m.ctx, 3 * WIDTH, WIDTH, 0.2);
        w[3] = param(m.ctx, WIDTH, WIDTH, 0.2);
        w[4] = param(m.ctx, WIDTH, 0, 1.0);
        w[5] = param(m.ctx, WIDTH, 0, 0.0);
        w[6] = param(m.ctx, 4 * WIDTH, WIDTH, 0.2);
        w[7] = param(m.ctx, WIDTH, 4 * WIDTH, 0.2);
    }
    m.opt = mixp_optimizer_new(m.ctx, &adamw);
    CHECK_INT(mixp_optimizer_add_all(m.opt, "*"), MIXP_OK);
    m.scaler = mixp_scaler_new(m.ctx, NULL);
    if (now.recipe) CHECK_INT(mixp_autocast_set_recipe(m.ctx, &nvfp4), MIXP_OK);
    if (now.guard) CHECK_INT(mixp_guard_start(m.ctx, NULL), MIXP_OK);
    return m;
}

/* A layer of a transformer: every kind of memory is in it - results, what operators save, reshapes,
 * a sum that a norm computes, dropout of both kinds. */
static mixp_tensor *one_layer(mixp_context *ctx, mixp_tensor *x, void *user) {
    mixp_tensor **w = ((layer *)user)->w;
    mixp_attention_desc a;
    mixp_tensor *h, *sum;
    memset(&a, 0, sizeof a);
    a.heads = HEADS;
    a.causal = 1;
    a.dropout = 0.1f;
    h = mixp_layer_norm(ctx, x, w[0], w[1], 1e-5f);
    h = mixp_linear(ctx, h, w[2], NULL);
    h = mixp_attention_apply(ctx, h, NULL, NULL, &a);
    h = mixp_linear(ctx, h, w[3], NULL);
    h = mixp_dropout(ctx, h, 0.1f, 1);
    if (now.fused) h = mixp_add_layer_norm(ctx, x, h, w[4], w[5], 1e-5f, &sum);
    else {
        sum = mixp_add(ctx, x, h);
        h = mixp_layer_norm(ctx, sum, w[4], w[5], 1e-5f);
    }
    h = mixp_linear(ctx, h, w[6], NULL);
    if (now.disposable) mixp_tensor_set_disposable(h, 1);
    h = mixp_gelu(ctx, h);
    h = mixp_linear(ctx, h, w[7], NULL);
    h = mixp_reshape(ctx, h, 3, x_shape);
    h = mixp_mul(ctx, mixp_tanh(ctx, h), h);            /* reads its inputs, and one its result */
    return now.last ? mixp_tanh(ctx, mixp_mul(ctx, sum, h)) : mixp_add(ctx, sum, h);
}

/* The loss of a step; again 1: each layer in a block. */
static mixp_tensor *forward(model *m, int again, int t, double scale) {
    static const int64_t all = BATCH * LENGTH * WIDTH;
    mixp_tensor *x, *loss = NULL;
    random_state = (uint64_t)t + 40;
    for (int i = 0; i < BATCH * LENGTH * WIDTH; i++) batch[i] = (float)(scale * random_value());
    x = mixp_input(m->ctx, MIXP_F32, 3, x_shape, batch);
    CHECK_INT(mixp_autocast_set_level(m->ctx, now.level), MIXP_OK);
    MIXP_AUTOCAST(m->ctx, now.dtype) {
        x = mixp_mul(m->ctx, x, m->in);
        for (int i = 0; i < LAYERS; i++) {
            if (again) x = mixp_recompute(m->ctx, one_layer, &m->layers[i], x);
            else x = one_layer(m->ctx, x, &m->layers[i]);
        }
        x = mixp_reshape(m->ctx, mixp_mul(m->ctx, x, x), 1, &all);
        loss = mixp_mean(m->ctx, x, 0, 0);
    }
    return loss;
}

static void same_everywhere(model *a, model *b) {
    static float x[4 * WIDTH * WIDTH], y[4 * WIDTH * WIDTH];
    mixp_tensor *s, *t;
    int64_t i;
    for (i = 0; (s = mixp_context_param(a->ctx, i)) != NULL; i++) {
        t = mixp_context_param(b->ctx, i);
        CHECK_INT(mixp_read(s, x, MIXP_F32, s->count), MIXP_OK);
        CHECK_INT(mixp_read(t, y, MIXP_F32, s->count), MIXP_OK);
        CHECK(memcmp(x, y, (size_t)s->count * sizeof *x) == 0);
        CHECK(s->grad && t->grad);
        if (!s->grad || !t->grad) continue;
        CHECK_INT(mixp_read(s->grad, x, MIXP_F32, s->count), MIXP_OK);
        CHECK_INT(mixp_read(t->grad, y, MIXP_F32, s->count), MIXP_OK);
        CHECK(memcmp(x, y, (size_t)s->count * sizeof *x) == 0);
    }
    CHECK_INT(i, 1 + LAYERS * WEIGHTS);
}

static void train(model *m, int again, int t, double scale) {
    CHECK_INT(mixp_step_begin(m->ctx), MIXP_OK);
    mixp_zero_grad(m->opt);
    mixp_tensor *loss = forward(m, again, t, scale);
    CHECK_INT(mixp_backward(m->ctx, mixp_scaler_scale(m->scaler, loss)), MIXP_OK);
    if (t % 2) {                        /* a second pass of the same step: other dropout */
        mixp_tensor *second = forward(m, again, t + 1, scale);
        CHECK_INT(mixp_backward(m->ctx, mixp_scaler_scale(m->scaler, second)), MIXP_OK);
    }
    CHECK_INT(mixp_scaler_step(m->scaler, m->opt), MIXP_OK);
    CHECK_INT(mixp_scaler_update(m->scaler), MIXP_OK);
}

static void compare(mode how, double scale) {
    now = how;
    model a = model_of(2);
    model b = model_of(2);
    for (int t = 0; t < 6; t++) {
        train(&a, 0, t, scale);
        train(&b, 1, t, scale);
        same_everywhere(&a, &b);
        CHECK_NEAR(mixp_scaler_loss_scale(a.scaler), mixp_scaler_loss_scale(b.scaler), 0);
        CHECK_INT(mixp_context_error(a.ctx, NULL), MIXP_OK);
        CHECK_INT(mixp_context_error(b.ctx, NULL), MIXP_OK);
    }
    mixp_context_free(a.ctx);
    mixp_context_free(b.ctx);
}

static void test_same_bits(void) {
    static const mode modes[] = {
        { MIXP_F32, 0, 0, 0, 0, 0, 0 }, { MIXP_F32, 0, 0, 1, 0, 1, 0 }, { MIXP_F16, 1, 0, 0, 0, 1, 0 },
        { MIXP_F16, 2, 0, 1, 0, 0, 0 }, { MIXP_BF16, 1, 0, 1, 0, 0, 0 }, { MIXP_BF16, 2, 0, 0, 0, 1, 0 },
        { MIXP_BF16, 2, 0, 0, 0, 0, 1 }, { MIXP_BF16, 1, 0, 1, 0, 0, 1 },
        { MIXP_F16, 2, 0, 1, 1, 0, 0 }
    };
    for (size_t i = 0; i < sizeof modes / sizeof *modes; i++) compare(modes[i], 1.0);
}

/* Inputs of this size overflow in f16: the guard lets sites fall back. */
static void test_same_bits_under_a_guard(void) {
    static const mode modes[] = { { MIXP_F16, 1, 1, 1, 0, 0, 0 }, { MIXP_F16, 2, 1, 0, 0, 0, 0 } };
    for (size_t i = 0; i < sizeof modes / sizeof *modes; i++) {
        compare(modes[i], 1.0);
        compare(modes[i], 3e4);
    }
}

/* Device memory of a step at its peak, beyond the parameters and their states. */
static double peak_of(int again) {
    model m = model_of(1);
    double before = (double)mixp_context_memory(m.ctx).used;
    for (int t = 0; t < 4; t += 2) train(&m, again, t, 1.0);
    before = (double)mixp_context_memory(m.ctx).peak - before;
    mixp_context_free(m.ctx);
    return before;
}

static void test_memory(void) {
    static const mode modes[] = { { MIXP_F32, 0, 0, 1, 0, 0, 0 }, { MIXP_F16, 2, 0, 1, 0, 0, 0 } };
    for (size_t i = 0; i < 2; i++) {
        now = modes[i];
        double kept = peak_of(0);
        double freed = peak_of(1);
        printf("  %s: %.0f KB at the peak without, %.0f KB with mixp_recompute: %.2f\n",
               mixp_dtype_name(now.dtype), kept / 1e3, freed / 1e3, freed / kept);
        CHECK(freed < 0.75 * kept);
    }
}

/* Device memory of an evaluation at its peak, beyond the parameters; *loss: its loss. */
static double evaluation_of(int again, double *loss) {
    model m = model_of(1);
    const double before = (double)mixp_context_memory(m.ctx).used;
    for (int t = 0; t < 2; t++) {
        CHECK_INT(mixp_eval_begin(m.ctx), MIXP_OK);
        MIXP_NO_GRAD(m.ctx) { *loss = mixp_item(forward(&m, again, 0, 1.0)); }
    }
    double peak = (double)mixp_context_memory(m.ctx).peak - before;
    CHECK_INT(mixp_context_error(m.ctx, NULL), MIXP_OK);
    mixp_context_free(m.ctx);
    return peak;
}

/* The layers of an evaluation leave their results only. */
static void test_memory_of_an_evaluation(void) {
    static const mode modes[] = {
        { MIXP_F32, 0, 0, 1, 0, 0, 0 }, { MIXP_F16, 2, 1, 0, 1, 0, 0 }, { MIXP_BF16, 1, 0, 1, 0, 0, 1 }
    };
    for (size_t i = 0; i < 3; i++) {
        double kept, freed, loss, same;
        now = modes[i];
        kept = evaluation_of(0, &loss);
        freed = evaluation_of(1, &same);
        printf("  %s, evaluation: %.0f KB at the peak without, %.0f KB with mixp_recompute: %.2f\n",
               mixp_dtype_name(now.dtype), kept / 1e3, freed / 1e3, freed / kept);
        CHECK(freed < 0.6 * kept);
        CHECK_NEAR(loss, same, 0);
    }
}

static void test_no_step_allocates(void) {
    static const mode how = { MIXP_F16, 2, 0, 1, 0, 0, 0 };
    now = how;
    model m = model_of(1);
    train(&m, 1, 0, 1.0);
    train(&m, 1, 2, 1.0);
    int64_t before = mixp_context_memory(m.ctx).allocations;
    train(&m, 1, 4, 1.0);
    CHECK_INT(mixp_context_memory(m.ctx).allocations, before);
    mixp_context_free(m.ctx);
}

/* --- refusals ----------------------------------------------------------------------------------- */

/* --- blocks as strangers write them: two walks, detached tensors, a walk that was refused -------- */
static mixp_tensor *apart[2];

static mixp_tensor *adds(mixp_context *ctx, mixp_tensor *x, void *user) {
    mixp_tensor *h = mixp_gelu(ctx, mixp_linear(ctx, x, apart[0], NULL));
    (void)user;
    return mixp_linear(ctx, mixp_add(ctx, h, x), apart[1], NULL);
}
static mixp_tensor *detaches(mixp_context *ctx, mixp_tensor *x, void *user) {
    mixp_tensor *h = mixp_linear(ctx, x, apart[0], NULL);
    mixp_tensor *y = mixp_mul(ctx, mixp_square(ctx, h), mixp_detach(ctx, mixp_tanh(ctx, h)));
    (void)user;
    return mixp_linear(ctx, y, apart[1], NULL);
}
/* h is detached after this block has reshaped h: see walk_twice. */
static mixp_tensor *reshapes(mixp_context *ctx, mixp_tensor *x, void *user) {
    static const int64_t flat[2] = { 8, 32 }, back[2] = { 16, 16 };
    mixp_tensor *h = mixp_gelu(ctx, mixp_reshape(ctx, x, 2, flat));
    (void)user;
    return mixp_linear(ctx, mixp_reshape(ctx, h, 2, back), apart[1], NULL);
}

/* The gradients after two walks over two losses that share a chain of two blocks. */
static void walk_twice(mixp_block_fn fn, mixp_dtype dtype, int again, float *got) {
    static const int64_t shape[2] = { 16, 16 };
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_tensor *x, *h, *y, *first = NULL, *second = NULL;
    float in[256];
    apart[0] = param(ctx, 16, 16, 0.3);
    apart[1] = param(ctx, 16, 16, 0.3);
    for (int i = 0; i < 256; i++) in[i] = (float)(i % 13 - 6) * 0.3f;
    CHECK_INT(mixp_step_begin(ctx), MIXP_OK);
    x = mixp_input(ctx, MIXP_F32, 2, shape, in);
    MIXP_AUTOCAST(ctx, dtype) {
        h = mixp_layer_norm(ctx, mixp_linear(ctx, x, apart[0], NULL), NULL, NULL, 1e-5f);
        y = again ? mixp_recompute(ctx, fn, NULL, h) : fn(ctx, h, NULL);
        y = again ? mixp_recompute(ctx, fn, NULL, y) : fn(ctx, y, NULL);
        first = mixp_mean(ctx, mixp_mul(ctx, y, y), MIXP_ALL, 0);
        second = mixp_mean(ctx, mixp_mul(ctx, mixp_detach(ctx, h), y), MIXP_ALL, 0);
        second = mixp_add(ctx, second, mixp_mean(ctx, mixp_mul(ctx, h, y), MIXP_ALL, 0));
    }
    CHECK_INT(mixp_backward(ctx, first), MIXP_OK);
    CHECK_INT(mixp_backward(ctx, second), MIXP_OK);
    CHECK_INT(mixp_read(apart[0]->grad, got, MIXP_F32, 256), MIXP_OK);
    CHECK_INT(mixp_read(apart[1]->grad, got + 256, MIXP_F32, 256), MIXP_OK);
    mixp_context_free(ctx);
}

static void test_two_walks_and_detached_tensors(void) {
    static const mixp_dtype dtypes[3] = { MIXP_F32, MIXP_F16, MIXP_BF16 };
    static float plain[512], again[512];
    for (int i = 0; i < 9; i++) {
        static const mixp_block_fn blocks[3] = { adds, detaches, reshapes };
        walk_twice(blocks[i % 3], dtypes[i / 3], 0, plain);
        walk_twice(blocks[i % 3], dtypes[i / 3], 1, again);
        CHECK(memcmp(plain, again, sizeof plain) == 0);
    }
}

static void told(mixp_context *ctx, mixp_result want, const char *part) {
    const char *message = "";
    CHECK_INT(mixp_context_error(ctx, &message), want);
    CHECK_TEXT(message, part);
    mixp_context_clear_error(ctx);
}

static mixp_tensor *inner;
static mixp_tensor *keeps_inner(mixp_context *ctx, mixp_tensor *x, void *user) {
    inner = mixp_mul(ctx, x, (mixp_tensor *)user);
    return mixp_mul(ctx, inner, inner);
}
/* Returns another shape of its first result, and keeps x in one too. */
static mixp_tensor *another_shape(mixp_context *ctx, mixp_tensor *x, void *user) {
    static const int64_t row[2] = { 1, 3 };
    mixp_tensor *h = mixp_mul(ctx, mixp_reshape(ctx, x, 2, row), (mixp_tensor *)user);
    inner = mixp_add(ctx, mixp_add(ctx, h, h), h);
    return mixp_reshape(ctx, h, 1, &row[1]);
}
static mixp_tensor *identity(mixp_context *ctx, mixp_tensor *x, void *user) {
    (void)ctx; (void)user;
    return x;
}
static mixp_tensor *nothing(mixp_context *ctx, mixp_tensor *x, void *user) {
    (void)ctx; (void)x; (void)user;
    return NULL;
}

/* A block that is left by longjmp, or by an exception, ends at the next step. */
static jmp_buf out_of_it;
static mixp_tensor *leaves(mixp_context *ctx, mixp_tensor *x, void *user) {
    (void)ctx; (void)x; (void)user;
    longjmp(out_of_it, 1);
}
static void test_left_by_a_jump(void) {
    mixp_context *ctx = mixp_context_new(NULL);
    const int64_t n = 3;
    mixp_tensor *x = mixp_param(ctx, "x", MIXP_F32, 1, &n);
    float got[3];
    CHECK_INT(mixp_step_begin(ctx), MIXP_OK);
    if (!setjmp(out_of_it)) mixp_recompute(ctx, leaves, NULL, x);
    CHECK_INT(mixp_step_begin(ctx), MIXP_OK);
    CHECK(mixp_recompute(ctx, keeps_inner, x, x) != NULL);
    CHECK_INT(mixp_read(inner, got, MIXP_F32, 3), MIXP_ERR_ORDER);      /* freed */
    mixp_context_free(ctx);
}

static void test_refused(void) {
    mixp_context *ctx = mixp_context_new(NULL);
    const int64_t n = 3;
    mixp_tensor *x = mixp_param(ctx, "x", MIXP_F32, 1, &n), *w = mixp_param(ctx, "w", MIXP_F32, 1, &n);
    float got[3];
    mixp_fill(x, 2.0);
    mixp_fill(w, 3.0);
    CHECK(mixp_recompute(NULL, identity, NULL, x) == NULL);
    CHECK(mixp_recompute(ctx, NULL, NULL, x) == NULL);
    told(ctx, MIXP_ERR_ARGUMENT, "NULL");
    CHECK_INT(mixp_step_begin(ctx), MIXP_OK);
    CHECK(mixp_recompute(ctx, identity, NULL, x) == x);
    CHECK(mixp_recompute(ctx, nothing, NULL, x) == NULL);
    mixp_tensor *y = mixp_recompute(ctx, keeps_inner, w, x);
    CHECK(mixp_add(ctx, y, inner) == NULL);
    told(ctx, MIXP_ERR_ORDER, "mixp_recompute");
    CHECK_INT(mixp_read(inner, got, MIXP_F32, 3), MIXP_ERR_ORDER);
    told(ctx, MIXP_ERR_ORDER, "mixp_recompute");
    CHECK_INT(mixp_backward(ctx, mixp_sum(ctx, y, 0, 0)), MIXP_OK);
    CHECK_INT(mixp_read(x->grad, got, MIXP_F32, 3), MIXP_OK);
    for (int i = 0; i < 3; i++) CHECK_NEAR(got[i], 2.0 * (2.0 * 3.0) * 3.0, 0);
    CHECK_INT(mixp_step_begin(ctx), MIXP_OK);
    y = mixp_recompute(ctx, keeps_inner, w, x);
    mixp_fill(w, 4.0);
    CHECK_INT(mixp_backward(ctx, mixp_sum(ctx, y, 0, 0)), MIXP_ERR_ORDER);
    told(ctx, MIXP_ERR_ORDER, "'w'");
    CHECK_INT(mixp_backward(ctx, mixp_mean(ctx, y, 0, 0)), MIXP_ERR_ORDER);
    told(ctx, MIXP_ERR_ORDER, "'w'");
    mixp_context_free(ctx);
}

/* A block under MIXP_NO_GRAD in a step that trains: its result is a constant of the loss, as a GAN's fake is.
 * x and the result keep their memory; other tensors of the block are refused. */
static void test_without_gradients(void) {
    mixp_context *ctx = mixp_context_new(NULL);
    const int64_t n = 3;
    mixp_tensor *w = mixp_param(ctx, "w", MIXP_F32, 1, &n), *x = NULL, *y = NULL;
    float got[3];
    mixp_fill(w, 3.0);
    for (int k = 0; k < 2; k++) {
        CHECK_INT(mixp_step_begin(ctx), MIXP_OK);
        w->grad = NULL;
        x = mixp_scale(ctx, w, 2.0);
        MIXP_NO_GRAD(ctx) { y = mixp_recompute(ctx, k ? another_shape : keeps_inner, w, x); }
        CHECK_INT(mixp_read(inner, got, MIXP_F32, 3), MIXP_ERR_ORDER);
        told(ctx, MIXP_ERR_ORDER, "mixp_recompute");
        for (int i = 0; i < 20; i++) mixp_scale(ctx, x, 7.0);       /* takes the memory that was freed */
        CHECK_INT(mixp_backward(ctx, mixp_sum(ctx, mixp_mul(ctx, x, y), 0, 0)), MIXP_OK);
        CHECK_INT(mixp_read(w->grad, got, MIXP_F32, 3), MIXP_OK);
        for (int i = 0; i < 3; i++) CHECK_NEAR(got[i], 2.0 * (k ? 18.0 : 18.0 * 18.0), 0);
    }
    mixp_context_free(ctx);
}

int main(void) {
    nvfp4.kind = MIXP_RECIPE_NVFP4;
    RUN(test_same_bits);
    RUN(test_same_bits_under_a_guard);
    RUN(test_memory);
    RUN(test_memory_of_an_evaluation);
    RUN(test_no_step_allocates);
    RUN(test_two_walks_and_detached_tensors);
    RUN(test_left_by_a_jump);
    RUN(test_refused);
    RUN(test_without_gradients);
    return test_report();
}
