/* test_walks.c - events between an operator and its walk back, or during the walk: a second walk,
 * a new scale, a parameter that is frozen, thawed or written, an allocation that fails.
 * SPDX-License-Identifier: MIT OR Unlicense */
#include "mixprec.h"
#include "test.h"
#include "new_optimizer.h"

enum { ROWS = 6, WIDTH = 4, VOCAB = 5 };

static const int64_t x_shape[2] = { ROWS, WIDTH }, w_shape[2] = { VOCAB, WIDTH }, rows[1] = { ROWS };
static const int32_t classes[ROWS] = { 0, 1, 2, 3, 4, 0 };

typedef struct model {
    mixp_context   *ctx;
    mixp_tensor    *w;
    mixp_optimizer *opt;
    mixp_scaler    *scaler;
} model;

static float number(int i) { return 0.125f * (float)(i * 7 % 13 - 6); }

static void fill(mixp_tensor *t, int first) {
    float values[4096];
    for (int i = 0; i < t->count; i++) values[i] = number(first + i);
    CHECK_INT(mixp_write(t, values, MIXP_F32, t->count), MIXP_OK);
}

static model model_new(void) {
    model m;
    m.ctx = mixp_context_new(NULL);
    m.w = mixp_param(m.ctx, "w", MIXP_F32, 2, w_shape);
    fill(m.w, 1);
    m.opt = new_sgd(m.ctx);
    mixp_optimizer_add(m.opt, m.w, NULL);
    m.scaler = mixp_scaler_new(m.ctx, NULL);
    mixp_step_begin(m.ctx);
    return m;
}

static mixp_tensor *input(const model *m) {
    float x[ROWS * WIDTH];
    for (int i = 0; i < ROWS * WIDTH; i++) x[i] = number(i);
    return mixp_input(m->ctx, MIXP_F32, 2, x_shape, x);
}
static mixp_tensor *targets(const model *m) {
    return mixp_input(m->ctx, MIXP_I32, 1, rows, classes);
}
static mixp_tensor *logits_of(const model *m, int disposable) {
    mixp_tensor *logits = mixp_linear(m->ctx, input(m), m->w, NULL);
    mixp_tensor_set_disposable(logits, disposable);
    return logits;
}

/* The gradient of w, of the mean cross entropy over rows, in double. */
static void wanted(const model *m, double *dw) {
    float w[VOCAB * WIDTH];
    mixp_read(m->w, w, MIXP_F32, VOCAB * WIDTH);
    memset(dw, 0, VOCAB * WIDTH * sizeof *dw);
    for (int i = 0; i < ROWS; i++) {
        double z[VOCAB], sum = 0;
        for (int j = 0; j < VOCAB; j++) {
            z[j] = 0;
            for (int k = 0; k < WIDTH; k++) z[j] += (double)number(i * WIDTH + k) * (double)w[j * WIDTH + k];
            sum += exp(z[j]);
        }
        for (int j = 0; j < VOCAB; j++)
            for (int k = 0; k < WIDTH; k++)
                dw[j * WIDTH + k] += (exp(z[j]) / sum - (j == classes[i])) / ROWS * (double)number(i * WIDTH + k);
    }
}

static void check_gradient(const model *m, double factor) {
    double dw[VOCAB * WIDTH];
    float got[VOCAB * WIDTH];
    wanted(m, dw);
    CHECK(m->w->grad != NULL);
    if (!m->w->grad) return;
    CHECK_INT(mixp_read(m->w->grad, got, MIXP_F32, VOCAB * WIDTH), MIXP_OK);
    for (int i = 0; i < VOCAB * WIDTH; i++) CHECK_NEAR((double)got[i], factor * dw[i], 1e-6 * factor);
}

static void check_error(const model *m, mixp_result code, const char *part) {
    const char *why;
    CHECK_INT(mixp_context_error(m->ctx, &why), code);
    CHECK_TEXT(why, part);
    mixp_context_clear_error(m->ctx);
}

/* --- a second walk ------------------------------------------------------------------------ */

static void a_second_walk_adds(void) {
    model m = model_new();
    mixp_tensor *loss = mixp_cross_entropy(m.ctx, logits_of(&m, 0), targets(&m), MIXP_IGNORE);
    mixp_tensor *once = mixp_scale(m.ctx, loss, 1), *twice = mixp_scale(m.ctx, loss, 2);
    CHECK_INT(mixp_backward(m.ctx, once), MIXP_OK);
    CHECK_INT(mixp_backward(m.ctx, twice), MIXP_OK);
    check_gradient(&m, 3);
    mixp_context_free(m.ctx);
}

/* The gradient of disposable logits lies where they were: they are not there for a second one. */
static void disposable_logits_are_walked_once(void) {
    model m = model_new();
    mixp_tensor *logits = logits_of(&m, 1);
    mixp_tensor *loss = mixp_cross_entropy(m.ctx, logits, targets(&m), MIXP_IGNORE);
    mixp_tensor *once = mixp_scale(m.ctx, loss, 1), *twice = mixp_scale(m.ctx, loss, 2);
    CHECK_INT(mixp_backward(m.ctx, once), MIXP_OK);
    check_gradient(&m, 1);
    CHECK_INT(mixp_backward(m.ctx, twice), MIXP_ERR_ORDER);
    check_error(&m, MIXP_ERR_ORDER, "cross_entropy: the logits are disposable");
    CHECK(!mixp_relu(m.ctx, logits));
    check_error(&m, MIXP_ERR_ORDER, "relu: input 0 no longer exists: it was disposable");
    mixp_context_free(m.ctx);
}

static void a_fused_loss_is_walked_once(void) {
    model m = model_new();
    mixp_tensor *logits = logits_of(&m, 1);
    mixp_tensor *loss = mixp_scaler_cross_entropy(m.scaler, logits, targets(&m), MIXP_IGNORE, 1, NULL);
    mixp_tensor *more = mixp_scale(m.ctx, loss, 2);
    CHECK_INT(mixp_backward(m.ctx, loss), MIXP_OK);
    check_gradient(&m, 65536);
    CHECK_INT(mixp_backward(m.ctx, more), MIXP_ERR_ORDER);
    check_error(&m, MIXP_ERR_ORDER, "can only be passed to mixp_backward");
    mixp_context_free(m.ctx);
}

/* --- scales ------------------------------------------------------------------------------- */

/* A fused loss has its gradient from the forward pass on, and the scale of then in it. */
static void the_scale_moves_before_the_walk(void) {
    for (int disposable = 0; disposable < 2; disposable++) {
        model m = model_new();
        mixp_tensor *logits = logits_of(&m, disposable), *loss;
        CHECK_INT(mixp_scaler_update_to(m.scaler, 2048), MIXP_OK);
        loss = mixp_scaler_cross_entropy(m.scaler, logits, targets(&m), MIXP_IGNORE, 1, NULL);
        CHECK_INT(mixp_scaler_update_to(m.scaler, 256), MIXP_OK);
        CHECK_INT(mixp_backward(m.ctx, loss), MIXP_OK);
        CHECK_INT(mixp_scaler_unscale(m.scaler, m.opt), MIXP_OK);
        check_gradient(&m, 1);
        mixp_context_free(m.ctx);
    }
}

static void a_scaled_loss_is_f32_whatever_its_rank(void) {
    model m = model_new();
    const mixp_autocast low = { MIXP_F16, 2, NULL };
    const int64_t one[1] = { 1 };
    const float two[1] = { 2 };
    mixp_tensor *loss = mixp_input(m.ctx, MIXP_F32, 1, one, two), *scaled;
    mixp_autocast_open_with(m.ctx, &low);
    scaled = mixp_scaler_scale(m.scaler, loss);
    CHECK(scaled && scaled->dtype == MIXP_F32);
    CHECK_NEAR(mixp_item(scaled), 131072, 0);
    mixp_context_free(m.ctx);
}

/* What a freed scaler has unscaled is true, also where more is added to it. */
static void a_freed_scalers_gradients_are_true(void) {
    model m = model_new();
    mixp_scaler_update_to(m.scaler, 1024);
    mixp_backward(m.ctx, mixp_scaler_scale(m.scaler, mixp_sum(m.ctx, m.w, MIXP_ALL, 0)));
    CHECK_INT(mixp_scaler_unscale(m.scaler, m.opt), MIXP_OK);
    CHECK_INT(mixp_scaler_step(m.scaler, m.opt), MIXP_OK);
    CHECK_INT(mixp_scaler_update(m.scaler), MIXP_OK);
    CHECK_INT(mixp_scaler_free(m.scaler), MIXP_OK);
    mixp_step_begin(m.ctx);
    CHECK_INT(mixp_backward(m.ctx, mixp_sum(m.ctx, m.w, MIXP_ALL, 0)), MIXP_OK);
    CHECK_NEAR(((const float *)m.w->grad->data)[0], 2, 0);
    CHECK_INT(mixp_optimizer_step(m.opt), MIXP_OK);
    mixp_context_free(m.ctx);
}

/* --- parameters --------------------------------------------------------------------------- */

/* As in PyTorch: what was frozen in the forward pass gets no gradient of it, nor what is frozen
 * since; in any region. */
static void frozen_is_frozen(void) {
    for (int how = 0; how < 8; how++) {
        model m = model_new();
        mixp_tensor *x = mixp_param(m.ctx, "x", MIXP_F32, 2, x_shape), *loss;
        int before = how & 1, after = how >> 1 & 1;
        fill(x, 3);
        mixp_tensor_set_requires_grad(m.w, before);
        if (how & 4) mixpi_autocast_enter(m.ctx, MIXP_BF16);
        loss = mixp_sum(m.ctx, mixp_linear(m.ctx, x, m.w, NULL), MIXP_ALL, 0);
        if (how & 4) mixpi_autocast_leave(m.ctx);
        mixp_tensor_set_requires_grad(m.w, after);
        CHECK_INT(mixp_backward(m.ctx, loss), MIXP_OK);
        CHECK(x->grad != NULL);
        CHECK_INT(m.w->grad != NULL, before && after);
        mixp_context_free(m.ctx);
    }
}

/* With ranks, too: gradients go out in buckets, and whoever is frozen is still in one. */
static void what_is_frozen_stays_among_ranks(void) {
    float w[2][VOCAB * WIDTH];
    for (int ranks = 0; ranks < 2; ranks++) {
        mixp_ranks_desc alone;
        mixp_context_desc d;
        mixp_optimizer_desc a = mixp_adamw_defaults();
        model m;
        memset(&alone, 0, sizeof alone);
        memset(&d, 0, sizeof d);
        alone.size = 1;
        d.ranks = ranks ? &alone : NULL;
        m.ctx = mixp_context_new(&d);
        m.w = mixp_param(m.ctx, "w", MIXP_F32, 2, w_shape);
        mixp_tensor *v = mixp_param(m.ctx, "v", MIXP_F32, 2, w_shape);
        fill(m.w, 1);
        fill(v, 2);
        a.lr = 0.1;
        m.opt = mixp_optimizer_new(m.ctx, &a);
        mixp_optimizer_add(m.opt, m.w, NULL);
        mixp_optimizer_add(m.opt, v, NULL);
        for (int step = 0; step < 3; step++) {
            mixp_step_begin(m.ctx);
            mixp_zero_grad(m.opt);
            mixp_tensor_set_requires_grad(m.w, step == 0);
            CHECK_INT(mixp_backward(m.ctx, mixp_sum(m.ctx, mixp_mul(m.ctx, m.w, v), MIXP_ALL, 0)), MIXP_OK);
            CHECK_INT(m.w->grad != NULL, step == 0);
            CHECK_INT(mixp_optimizer_step(m.opt), MIXP_OK);
        }
        CHECK_INT(mixp_read(m.w, w[ranks], MIXP_F32, VOCAB * WIDTH), MIXP_OK);
        mixp_context_free(m.ctx);
    }
    CHECK_INT(memcmp(w[0], w[1], sizeof w[0]), 0);
}

/* A low copy stands for its parameter, also where it was asked for when that was frozen. */
static void a_low_copy_of_what_was_frozen(void) {
    model m = model_new();
    mixp_tensor_set_requires_grad(m.w, 0);
    mixp_tensor *low = mixp_tensor_low(m.w, MIXP_BF16);
    mixp_tensor_set_requires_grad(m.w, 1);
    CHECK_INT(mixp_backward(m.ctx, mixp_sum(m.ctx, mixp_linear(m.ctx, input(&m), low, NULL), MIXP_ALL, 0)),
              MIXP_OK);
    CHECK(m.w->grad != NULL);
    mixp_context_free(m.ctx);
}

/* A weight that was written since would give the gradients of another function. */
static void what_was_written_is_not_walked(void) {
    for (int low = 0; low < 2; low++) {
        model m = model_new();
        mixp_tensor *x = mixp_param(m.ctx, "x", MIXP_F32, 2, x_shape), *once, *twice;
        fill(x, 3);
        if (low) mixpi_autocast_enter(m.ctx, MIXP_BF16);
        once = mixp_sum(m.ctx, mixp_linear(m.ctx, x, m.w, NULL), MIXP_ALL, 0);
        twice = mixp_mean(m.ctx, mixp_linear(m.ctx, x, m.w, NULL), MIXP_ALL, 0);
        if (low) mixpi_autocast_leave(m.ctx);
        CHECK_INT(mixp_backward(m.ctx, once), MIXP_OK);
        x->grad = NULL;
        CHECK_INT(mixp_optimizer_step(m.opt), MIXP_OK);
        CHECK_INT(mixp_backward(m.ctx, twice), MIXP_ERR_ORDER);
        check_error(&m, MIXP_ERR_ORDER, "was written by an optimizer's step since linear read it");
        CHECK(x->grad == NULL);
        mixp_context_free(m.ctx);
    }
}

/* In an evaluation no loss makes a gradient of its target; in training d loss / d target is -x. */
static void evaluation_with_any_target(void) {
    model m = model_new();
    mixp_tensor *loss = NULL;
    const float half[1] = { 0.5f };
    const int64_t one[1] = { 1 };
    mixp_tensor *x = mixp_input(m.ctx, MIXP_F32, 1, one, half), *target = mixp_input(m.ctx, MIXP_F32, 1, one, half);
    mixp_tensor_set_requires_grad(target, 1);
    MIXP_NO_GRAD(m.ctx) { loss = mixp_bce_with_logits(m.ctx, x, target); }
    CHECK(loss != NULL);
    CHECK_NEAR(mixp_item(loss), log(1 + exp(0.5)) - 0.25, 1e-6);
    CHECK(target->grad == NULL);
    loss = mixp_bce_with_logits(m.ctx, x, target);
    CHECK_INT(mixp_backward(m.ctx, loss), MIXP_OK);
    CHECK(target->grad != NULL);
    if (target->grad) CHECK_NEAR(mixp_item(target->grad), -0.5, 1e-6);
    mixp_context_free(m.ctx);
}

/* --- memory that cannot be had ------------------------------------------------------------ */

typedef struct purse { int left, refused; } purse;

static void *allocate(size_t bytes, void *user) {
    purse *p = (purse *)user;
    if (p->left-- > 0) return malloc(bytes);
    p->refused++;
    return NULL;
}
static void release(void *p, void *user) { (void)user; free(p); }

enum { LAYERS = 3, SIDE = 64 };

static mixp_tensor *deep(mixp_context *ctx, mixp_tensor **p) {
    static float x[SIDE * SIDE];
    const int64_t shape[2] = { SIDE, SIDE };
    for (int i = 0; i < SIDE * SIDE; i++) x[i] = number(i);
    mixp_tensor *h = mixp_input(ctx, MIXP_F32, 2, shape, x);
    for (int i = 0; i < LAYERS; i++) {
        h = mixp_layer_norm(ctx, mixp_linear(ctx, h, p[i], NULL), p[LAYERS], NULL, 1e-5f);
        h = mixp_add(ctx, mixp_gelu(ctx, h), h);
    }
    return mixp_mean(ctx, h, MIXP_ALL, 0);
}

/* Refuses the allocation number `at` of a walk, and all behind it: 1 if there was one. The walk says
 * so, keeps no half of its gradients, and one that gets its memory later is as if nothing had been;
 * *bits is a gradient of that. */
static int refuse(int at, const mixp_ranks_desc *ranks, float *bits) {
    purse p = { 1 << 20, 0 };
    mixp_context_desc d;
    mixp_tensor *t[LAYERS + 1], *loss;
    const int64_t square[2] = { SIDE, SIDE }, side[1] = { SIDE };
    memset(&d, 0, sizeof d);
    d.allocate = allocate;
    d.release = release;
    d.user = &p;
    d.ranks = ranks;
    mixp_context *ctx = mixp_context_new(&d);
    for (int i = 0; i <= LAYERS; i++) {
        t[i] = mixp_param(ctx, "", MIXP_F32, i < LAYERS ? 2 : 1, i < LAYERS ? square : side);
        fill(t[i], i);
    }
    mixp_step_begin(ctx);
    loss = deep(ctx, t);
    p.left = at;
    mixp_result r = mixp_backward(ctx, loss);
    int refused = p.refused > 0;
    CHECK_INT(r, refused ? MIXP_ERR_MEMORY : MIXP_OK);
    CHECK_INT(mixp_context_error(ctx, NULL), r);
    for (int i = 0; i <= LAYERS && refused; i++) CHECK(t[i]->grad == NULL);
    for (int i = 0; i <= LAYERS; i++) t[i]->grad = NULL;
    p.left = 1 << 20;
    mixp_context_clear_error(ctx);
    if (refused) mixp_step_begin(ctx);
    if (refused) CHECK_INT(mixp_backward(ctx, deep(ctx, t)), MIXP_OK);
    if (refused && t[0]->grad) mixp_read(t[0]->grad, bits, MIXP_F32, SIDE * SIDE);
    mixp_context_free(ctx);
    return refused;
}

static void memory_is_refused_in_a_walk(void) {
    static float bits[3][SIDE * SIDE];
    mixp_ranks_desc alone;
    memset(&alone, 0, sizeof alone);
    alone.size = 1;
    for (int ranks = 0; ranks < 2; ranks++) {
        int at = 0;
        while (refuse(at, ranks ? &alone : NULL, bits[at > 0])) {
            CHECK_INT(memcmp(bits[0], bits[at > 0], sizeof bits[0]), 0);
            at++;
        }
        CHECK(at > 6);
    }
}

/* 600 micro-batches of gradient 1: a bf16 sum stands still at 256, an f16 sum holds until 2048. With
 * f32_gradients the sum is whole, also of weights used many times in a walk, and the step takes it. */
static void many_micro_batches(void) {
    static const mixp_dtype dtypes[2] = { MIXP_BF16, MIXP_F16 };
    static const int64_t shape[1] = { 4 };
    for (int k = 0; k < 2; k++)
        for (int wide = 0; wide < 2; wide++)
            for (int uses = 0; uses < 2; uses++) {
                mixp_context_desc d;
                mixp_optimizer_desc sgd = mixp_sgd_defaults();
                mixp_tensor *w, *y = NULL;
                float got[4], weights[4];
                memset(&d, 0, sizeof d);
                d.f32_gradients = wide;
                mixp_context *ctx = mixp_context_new(&d);
                w = mixp_param(ctx, "w", dtypes[k], 1, shape);
                mixp_fill(w, 1.0);
                sgd.lr = 1.0 / 1024;
                sgd.momentum = 0;
                mixp_optimizer *opt = mixp_optimizer_new(ctx, &sgd);
                mixp_optimizer_add(opt, w, NULL);
                for (int i = 0; i < 600; i++) {
                    if (!uses || !i) mixp_step_begin(ctx);
                    mixp_tensor *one = mixp_sum(ctx, w, MIXP_ALL, 0);
                    y = uses && i ? mixp_add(ctx, y, one) : one;
                    if (!uses) CHECK_INT(mixp_backward(ctx, y), MIXP_OK);
                }
                if (uses) CHECK_INT(mixp_backward(ctx, y), MIXP_OK);
                CHECK_INT(w->grad->dtype, wide ? MIXP_F32 : dtypes[k]);
                CHECK_INT(mixp_read(w->grad, got, MIXP_F32, 4), MIXP_OK);
                CHECK_NEAR(got[0], wide || dtypes[k] == MIXP_F16 ? 600 : 256, 0);
                CHECK_INT(mixp_optimizer_step(opt), MIXP_OK);
                mixp_read(w, weights, MIXP_F32, 4);
                CHECK_NEAR(weights[3], 1 - (double)got[3] / 1024, 0.004);
                CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
                mixp_context_free(ctx);
            }
}

int main(void) {
    RUN(many_micro_batches);
    RUN(a_second_walk_adds);
    RUN(disposable_logits_are_walked_once);
    RUN(a_fused_loss_is_walked_once);
    RUN(the_scale_moves_before_the_walk);
    RUN(a_scaled_loss_is_f32_whatever_its_rank);
    RUN(a_freed_scalers_gradients_are_true);
    RUN(frozen_is_frozen);
    RUN(what_is_frozen_stays_among_ranks);
    RUN(a_low_copy_of_what_was_frozen);
    RUN(what_was_written_is_not_walked);
    RUN(evaluation_with_any_target);
    RUN(memory_is_refused_in_a_walk);
    return test_report();
}
