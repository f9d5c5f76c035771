/* test_step.c - which scaler or optimizer may unscale, clip and step which gradients. Each gradient
 * knows the factor that it was multiplied by.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include "step_model.h"

/* Two parameters of 1, an optimizer of each (SGD, rate 0.25), two scalers that grow at each update. */
typedef struct rig {
    mixp_context   *ctx;
    mixp_scaler    *s[2];
    mixp_optimizer *opt[2];
    mixp_tensor    *w[2];
} rig;

static rig rig_open(void) {
    static const int64_t one[1] = { 1 };
    mixp_scaler_desc d;
    mixp_optimizer_desc sgd = mixp_sgd_defaults();
    rig r;
    memset(&d, 0, sizeof d);
    d.init_scale = 256.0f;
    d.growth_interval = 1;
    sgd.lr = 0.25;
    r.ctx = mixp_context_new(NULL);
    for (int i = 0; i < 2; i++) {
        r.s[i] = mixp_scaler_new(r.ctx, &d);
        r.w[i] = mixp_param(r.ctx, i ? "b" : "a", MIXP_F32, 1, one);
        r.opt[i] = mixp_optimizer_new(r.ctx, &sgd);
        mixp_fill(r.w[i], 1.0);
        mixp_optimizer_add(r.opt[i], r.w[i], NULL);
    }
    mixp_step_begin(r.ctx);
    return r;
}

static mixp_tensor *loss_of(rig *r, int i) { return mixp_sum(r->ctx, r->w[i], MIXP_ALL, 0); }

/* The gradient of parameter i is 1, times the scale of scaler s. */
static void scaled_backward(rig *r, int s, int i)
{ CHECK_INT(mixp_backward(r->ctx, mixp_scaler_scale(r->s[s], loss_of(r, i))), MIXP_OK); }

/* Ends a step, and begins the next one: gradients of parameters stay. */
static void update(rig *r, int s) {
    CHECK_INT(mixp_scaler_update(r->s[s]), MIXP_OK);
    CHECK_INT(mixp_step_begin(r->ctx), MIXP_OK);
}

static void refused(rig *r, mixp_result got, const char *part) {
    const char *why = "";
    CHECK_INT(got, MIXP_ERR_ORDER);
    mixp_context_error(r->ctx, &why);
    CHECK_TEXT(why, part);
    mixp_context_clear_error(r->ctx);
}

static void close_with(rig *r, double a, double b) {
    const char *why;
    CHECK_NEAR(mixp_item(r->w[0]), a, 0);
    CHECK_NEAR(mixp_item(r->w[1]), b, 0);
    CHECK_INT(mixp_context_error(r->ctx, &why), MIXP_OK);
    mixp_context_free(r->ctx);
}

static void test_anothers_zero_grad(void) {
    rig r = rig_open();
    scaled_backward(&r, 0, 1);
    CHECK_INT(mixp_zero_grad(r.opt[0]), MIXP_OK);
    refused(&r, mixp_optimizer_step(r.opt[1]), "'b' is still multiplied by the loss scale");
    refused(&r, mixp_clip_grad_norm(r.opt[1], 1.0), "mixp_scaler_unscale first");
    close_with(&r, 1.0, 1.0);
}

static void test_anothers_step_and_update(void) {
    rig r = rig_open();
    scaled_backward(&r, 0, 0);
    scaled_backward(&r, 0, 1);
    CHECK_INT(mixp_scaler_step(r.s[0], r.opt[0]), MIXP_OK);
    update(&r, 0);
    refused(&r, mixp_optimizer_step(r.opt[1]), "still multiplied");
    refused(&r, mixp_clip_grad_norm(r.opt[1], 1.0), "still multiplied");
    close_with(&r, 0.75, 1.0);
}

static void test_update_of_another_scaler(void) {
    rig r = rig_open();
    scaled_backward(&r, 0, 0);
    scaled_backward(&r, 1, 1);
    CHECK_INT(mixp_scaler_step(r.s[0], r.opt[0]), MIXP_OK);
    update(&r, 0);
    refused(&r, mixp_clip_grad_norm(r.opt[1], 1.0), "still multiplied");
    refused(&r, mixp_optimizer_step(r.opt[1]), "still multiplied");
    refused(&r, mixp_scaler_step(r.s[0], r.opt[1]), "was scaled by another scaler");
    CHECK_INT(mixp_scaler_step(r.s[1], r.opt[1]), MIXP_OK);
    close_with(&r, 0.75, 0.75);
}

/* A generator in f32 without a scaler, a discriminator with one. */
static void test_only_one_is_scaled(void) {
    rig r = rig_open();
    scaled_backward(&r, 0, 1);
    CHECK_INT(mixp_backward(r.ctx, loss_of(&r, 0)), MIXP_OK);
    CHECK_INT(mixp_clip_grad_norm(r.opt[0], 1e9), MIXP_OK);
    CHECK_INT(mixp_optimizer_step(r.opt[0]), MIXP_OK);
    CHECK_INT(mixp_scaler_step(r.s[0], r.opt[1]), MIXP_OK);
    update(&r, 0);
    close_with(&r, 0.75, 0.75);
}

/* The scale goes on between a loss and its step: the gradient is unscaled by its own. */
static void test_own_scale(void) {
    int how, unscale;
    for (how = 0; how < 3; how++) for (unscale = 0; unscale < 2; unscale++) {
        mixp_scaler_saved saved;
        rig r = rig_open();
        scaled_backward(&r, 0, 1);
        if (how == 0) {
            scaled_backward(&r, 0, 0);
            CHECK_INT(mixp_scaler_step(r.s[0], r.opt[0]), MIXP_OK);
            update(&r, 0);
        }
        if (how == 1) CHECK_INT(mixp_scaler_update_to(r.s[0], 4.0f), MIXP_OK);
        if (how == 2) {
            CHECK_INT(mixp_scaler_save(r.s[0], &saved), MIXP_OK);
            saved.scale = 1.0f;
            CHECK_INT(mixp_scaler_load(r.s[0], &saved), MIXP_OK);
        }
        CHECK_NEAR(mixp_scaler_loss_scale(r.s[0]), how == 0 ? 512.0 : how == 1 ? 4.0 : 1.0, 0);
        if (unscale) CHECK_INT(mixp_scaler_unscale(r.s[0], r.opt[1]), MIXP_OK);
        CHECK_INT(mixp_scaler_step(r.s[0], r.opt[1]), MIXP_OK);
        if (!unscale) CHECK_NEAR(mixp_optimizer_verdict(r.opt[1]).scale, 256.0, 0);
        CHECK_NEAR(mixp_optimizer_verdict(r.opt[1]).grad_norm, 1.0, 0);
        close_with(&r, how ? 1.0 : 0.75, 0.75);
    }
}

/* What the refusal says to do: the generator accumulates by a scaler of its own. */
static void test_a_scaler_of_its_own(void) {
    rig r = rig_open();
    for (int i = 0; i < 4; i++) {
        mixp_step_begin(r.ctx);
        CHECK_INT(mixp_zero_grad(r.opt[0]), MIXP_OK);
        scaled_backward(&r, 0, 0);
        CHECK_INT(mixp_scaler_step(r.s[0], r.opt[0]), MIXP_OK);
        update(&r, 0);
        scaled_backward(&r, 1, 1);
        if (i % 2 == 0) continue;
        CHECK_INT(mixp_scaler_step(r.s[1], r.opt[1]), MIXP_OK);
        update(&r, 1);
        CHECK_INT(mixp_zero_grad(r.opt[1]), MIXP_OK);
    }
    close_with(&r, 0.0, 0.0);
}

/* A critic that updates each time, a generator that accumulates over two: the scale has grown. */
static void test_two_scales_in_one_sum(void) {
    rig r = rig_open();
    for (int i = 0; i < 2; i++) {
        CHECK_INT(mixp_zero_grad(r.opt[0]), MIXP_OK);
        scaled_backward(&r, 0, 0);
        scaled_backward(&r, 0, 1);
        CHECK_INT(mixp_scaler_step(r.s[0], r.opt[0]), MIXP_OK);
        update(&r, 0);
    }
    refused(&r, mixp_scaler_step(r.s[0], r.opt[1]), "'b' is a sum over two loss scales");
    refused(&r, mixp_scaler_unscale(r.s[0], r.opt[1]), "needs its own scaler");
    refused(&r, mixp_optimizer_step(r.opt[1]), "still multiplied");
    CHECK_INT(mixp_zero_grad(r.opt[1]), MIXP_OK);       /* and that cures it */
    scaled_backward(&r, 0, 1);
    CHECK_INT(mixp_scaler_step(r.s[0], r.opt[1]), MIXP_OK);
    close_with(&r, 0.5, 0.75);
}

/* Over one scale a sum may grow as long as it likes; a static one does not change at updates. */
static void test_one_scale_in_a_sum(void) {
    mixp_scaler_desc d;
    rig r = rig_open();
    memset(&d, 0, sizeof d);
    d.rule = MIXP_RULE_STATIC;
    d.init_scale = 64.0f;
    r.s[1] = mixp_scaler_new(r.ctx, &d);
    for (int i = 0; i < 20; i++) {
        CHECK_INT(mixp_zero_grad(r.opt[0]), MIXP_OK);
        scaled_backward(&r, 1, 0);
        scaled_backward(&r, 1, 1);
        if (i == 19) CHECK_INT(mixp_scaler_step(r.s[1], r.opt[1]), MIXP_OK);
        CHECK_INT(mixp_scaler_step(r.s[1], r.opt[0]), MIXP_OK);
        update(&r, 1);
    }
    close_with(&r, 1.0 - 0.25 * 20, 1.0 - 0.25 * 20);
}

static void test_two_scalers_on_one_loss(void) {
    rig r = rig_open();
    mixp_tensor *loss = mixp_scaler_scale(r.s[1], mixp_scaler_scale(r.s[0], loss_of(&r, 0)));
    CHECK_INT(mixp_backward(r.ctx, loss), MIXP_OK);
    refused(&r, mixp_scaler_step(r.s[0], r.opt[0]), "a sum over two loss scales");
    refused(&r, mixp_scaler_step(r.s[1], r.opt[0]), "a sum over two loss scales");
    refused(&r, mixp_optimizer_step(r.opt[0]), "still multiplied");

    CHECK_INT(mixp_zero_grad(r.opt[0]), MIXP_OK);
    loss = loss_of(&r, 0);              /* each walks it back: their sum has two scales too */
    scaled_backward(&r, 0, 0);
    scaled_backward(&r, 1, 0);
    refused(&r, mixp_scaler_step(r.s[0], r.opt[0]), "a sum over two loss scales");

    CHECK_INT(mixp_zero_grad(r.opt[0]), MIXP_OK);
    loss = mixp_add(r.ctx, mixp_scaler_scale(r.s[0], loss), loss_of(&r, 0));
    CHECK_INT(mixp_backward(r.ctx, loss), MIXP_OK);     /* a part of the loss was forgotten */
    refused(&r, mixp_scaler_step(r.s[0], r.opt[0]), "a sum over two loss scales");
    close_with(&r, 1.0, 1.0);
}

/* After a skipped step gradients are kept, and the next loss added: at half the scale. */
static void test_a_sum_across_a_skip(void) {
    rig r = rig_open();
    mixp_tensor *loss = mixp_scale(r.ctx, loss_of(&r, 0), HUGE_VALF);
    CHECK_INT(mixp_backward(r.ctx, mixp_scaler_scale(r.s[0], loss)), MIXP_OK);
    CHECK_INT(mixp_scaler_step(r.s[0], r.opt[0]), MIXP_OK);
    CHECK_INT(mixp_optimizer_verdict(r.opt[0]).outcome, MIXP_STEP_SKIPPED);
    update(&r, 0);
    refused(&r, mixp_scaler_step(r.s[0], r.opt[0]), "was used by the step before");
    scaled_backward(&r, 0, 0);
    refused(&r, mixp_scaler_step(r.s[0], r.opt[0]), "a sum over two loss scales");
    CHECK_INT(mixp_zero_grad(r.opt[0]), MIXP_OK);
    scaled_backward(&r, 0, 0);
    CHECK_INT(mixp_scaler_step(r.s[0], r.opt[0]), MIXP_OK);
    close_with(&r, 0.75, 1.0);
}

/* So many scales are remembered, and no more. */
static void test_scales_remembered(void) {
    for (int more = 0; more < 2; more++) {
        rig r = rig_open();
        scaled_backward(&r, 0, 1);
        for (int i = 0; i < MIXP_PAST_SCALES + more; i++)
            CHECK_INT(mixp_scaler_update_to(r.s[0], ldexpf(1.0f, i % 7)), MIXP_OK);
        if (more) refused(&r, mixp_scaler_step(r.s[0], r.opt[1]), "was scaled too long ago");
        else CHECK_INT(mixp_scaler_step(r.s[0], r.opt[1]), MIXP_OK);
        close_with(&r, 1.0, more ? 1.0 : 0.75);
    }
}

/* One optimizer, two parameters, scaled at different times. */
static void test_scales_differ_in_an_optimizer(void) {
    rig r = rig_open();
    CHECK_INT(mixp_optimizer_add(r.opt[0], r.w[1], NULL), MIXP_OK);
    scaled_backward(&r, 0, 0);
    CHECK_INT(mixp_scaler_update_to(r.s[0], 2.0f), MIXP_OK);
    scaled_backward(&r, 0, 1);
    refused(&r, mixp_scaler_step(r.s[0], r.opt[0]), "'b' has another scale");
    close_with(&r, 1.0, 1.0);
}

/* A true gradient may join those that were unscaled: a penalty that needs no scale. */
static void test_true_joins_unscaled(void) {
    rig r = rig_open();
    scaled_backward(&r, 0, 0);
    CHECK_INT(mixp_scaler_unscale(r.s[0], r.opt[0]), MIXP_OK);
    CHECK_INT(mixp_backward(r.ctx, loss_of(&r, 0)), MIXP_OK);
    CHECK_INT(mixp_scaler_step(r.s[0], r.opt[0]), MIXP_OK);
    update(&r, 0);
    CHECK_INT(mixp_zero_grad(r.opt[0]), MIXP_OK);
    scaled_backward(&r, 0, 0);
    CHECK_INT(mixp_scaler_unscale(r.s[0], r.opt[0]), MIXP_OK);
    scaled_backward(&r, 0, 0);          /* a scaled one may not */
    refused(&r, mixp_scaler_step(r.s[0], r.opt[0]), "a sum over two loss scales");
    close_with(&r, 0.5, 1.0);
}

/* A gradient shared by two optimizers is unscaled once. */
static void test_shared_gradient_is_unscaled_once(void) {
    rig r = rig_open();
    mixp_optimizer_desc d = mixp_sgd_defaults();
    d.lr = 0.5;
    mixp_optimizer *second = mixp_optimizer_new(r.ctx, &d);
    CHECK_INT(mixp_optimizer_add(second, r.w[0], NULL), MIXP_OK);
    scaled_backward(&r, 0, 0);
    CHECK_INT(mixp_scaler_unscale(r.s[0], r.opt[0]), MIXP_OK);
    CHECK_INT(mixp_scaler_step(r.s[0], second), MIXP_OK);
    CHECK_INT(mixp_scaler_step(r.s[0], r.opt[0]), MIXP_OK);
    close_with(&r, 0.25, 1.0);
}

/* A static scaler takes the gradients of an unscaled loss as they are, whatever its scale. */
static void test_static_takes_true_gradients(void) {
    for (int unscale = 0; unscale < 2; unscale++) {
        mixp_scaler_desc d;
        rig r = rig_open();
        memset(&d, 0, sizeof d);
        d.rule = MIXP_RULE_STATIC;
        r.s[0] = mixp_scaler_new(r.ctx, &d);
        CHECK_INT(mixp_backward(r.ctx, loss_of(&r, 0)), MIXP_OK);
        if (unscale) CHECK_INT(mixp_scaler_unscale(r.s[0], r.opt[0]), MIXP_OK);
        CHECK_INT(mixp_scaler_step(r.s[0], r.opt[0]), MIXP_OK);
        update(&r, 0);
        CHECK_INT(mixp_backward(r.ctx, mixp_scale(r.ctx, loss_of(&r, 1), HUGE_VALF)), MIXP_OK);
        CHECK_INT(mixp_scaler_step(r.s[0], r.opt[1]), MIXP_OK);
        CHECK_INT(mixp_optimizer_verdict(r.opt[1]).outcome, MIXP_STEP_SKIPPED);
        close_with(&r, 0.75, 1.0);
    }
}

/* A backward pass after clipping: the step looks again. */
static void test_backward_after_clipping(void) {
    rig r = rig_open();
    scaled_backward(&r, 0, 0);
    CHECK_INT(mixp_scaler_unscale(r.s[0], r.opt[0]), MIXP_OK);
    CHECK_INT(mixp_clip_grad_norm(r.opt[0], 1e9), MIXP_OK);
    CHECK_INT(mixp_backward(r.ctx, mixp_scale(r.ctx, loss_of(&r, 0), HUGE_VALF)), MIXP_OK);
    CHECK_INT(mixp_scaler_step(r.s[0], r.opt[0]), MIXP_OK);
    CHECK_INT(mixp_optimizer_verdict(r.opt[0]).outcome, MIXP_STEP_SKIPPED);
    close_with(&r, 1.0, 1.0);
}

/* Gradients of the user's own, multiplied by the scale: views bear no mark. */
static void test_views(void) {
    static const int64_t one[1] = { 1 };
    mixp_optimizer_desc d = mixp_sgd_defaults();
    float g = 0.0f;
    rig r = rig_open();
    mixp_tensor *view = mixp_view(r.ctx, "g", MIXP_F32, 1, one, &g);
    d.lr = 0.25;
    mixp_optimizer *opt = mixp_optimizer_new(r.ctx, &d);
    CHECK_INT(mixp_optimizer_add(opt, r.w[0], view), MIXP_OK);
    for (int i = 0; i < 4; i++) {
        g = mixp_scaler_loss_scale(r.s[0]);
        if (i % 2) {
            CHECK_INT(mixp_scaler_unscale(r.s[0], opt), MIXP_OK);
            CHECK_NEAR(g, 1.0, 0);
            CHECK_INT(mixp_clip_grad_norm(opt, 1e9), MIXP_OK);
        }
        scaled_backward(&r, 1, 1);      /* others do as they like */
        CHECK_INT(mixp_scaler_step(r.s[0], opt), MIXP_OK);
        refused(&r, mixp_scaler_step(r.s[0], opt), "mixp_scaler_step was called already");
        update(&r, 0);
    }
    g = 1.0f;
    CHECK_INT(mixp_optimizer_step(opt), MIXP_OK);
    close_with(&r, 1.0 - 0.25 * 5, 1.0);
}

static void test_sequences(void) { world_sequences(4000); }

/* --- a step that is refused memory ------------------------------------------------------------- */

enum { MANY = 100000 };         /* elements: more than one chunk of an update                  */
typedef struct refusal { int on, left; } refusal;

/* Refuses one allocation, after `left` others. */
static void *scarce(size_t bytes, void *user) {
    refusal *r = (refusal *)user;
    return r->on && r->left-- == 0 ? NULL : malloc(bytes);
}
static void gives(void *p, void *user) { (void)user; free(p); }

/* AdamW's first step from 1, with a gradient of 1 and the rate 0.25, leads to 0.75, and its average
 * with decay 0.5 to 0.875. The second parameter has no gradient. 1: no allocation was refused. */
static int step_with_refusal(int at) {
    static const int64_t shape[1] = { MANY };
    static float got[MANY];
    refusal memory = { 0, 0 };
    mixp_context_desc d;
    mixp_optimizer_desc adam = mixp_adam_defaults();
    memset(&d, 0, sizeof d);
    d.allocate = scarce;
    d.release = gives;
    d.user = &memory;
    adam.lr = 0.25;
    mixp_context *ctx = mixp_context_new(&d);
    mixp_optimizer *opt = mixp_optimizer_new(ctx, &adam);
    mixp_tensor *w = mixp_param(ctx, "w", MIXP_F32, 1, shape);
    mixp_tensor *rest = mixp_param(ctx, "rest", MIXP_F32, 1, shape);
    mixp_fill(w, 1.0);
    mixp_optimizer_add(opt, w, NULL);
    mixp_optimizer_add(opt, rest, NULL);
    mixp_optimizer_set_ema(opt, 0.5);
    mixp_step_begin(ctx);
    mixp_backward(ctx, mixp_sum(ctx, mixp_slice(ctx, w, 0, 0, MANY), MIXP_ALL, 0));
    memory.on = 1;
    memory.left = at;
    int all = mixp_optimizer_step(opt) == MIXP_OK;
    memory.on = 0;
    if (!all) {
        mixp_read(w, got, MIXP_F32, MANY);
        CHECK(got[0] == 1.0f && got[MANY - 1] == 1.0f);
        CHECK_INT(mixp_optimizer_applied(opt), 0);
        mixp_context_clear_error(ctx);
        CHECK_INT(mixp_optimizer_step(opt), MIXP_OK);
    }
    mixp_read(w, got, MIXP_F32, MANY);
    CHECK_NEAR(got[0], 0.75, 1e-6);
    CHECK_NEAR(got[MANY - 1], 0.75, 1e-6);
    mixp_optimizer_read(opt, w, MIXP_STATE_EMA, got, MANY);
    CHECK_NEAR(got[MANY - 1], 0.875, 1e-6);
    mixp_context_free(ctx);
    return all;
}

static void test_refused_memory(void) {
    int at = 0;
    while (!step_with_refusal(at)) at++;
    CHECK(at > 0);
}

/* An infinite limit measures the norm and leaves the gradients as they are, also subnormal and huge
 * ones. NaN and negative limits are refused. */
static void test_clip_that_only_measures(void) {
    static const float before[4] = { 3.0f, -4.0e19f, 1e-42f, 0.0f };
    static const int64_t four[1] = { 4 };
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_scaler_desc d;
    mixp_optimizer *opt = mixp_optimizer_new(ctx, NULL);
    mixp_tensor *w = mixp_param(ctx, "w", MIXP_F32, 1, four);
    const char *why;
    float after[4];
    memset(&d, 0, sizeof d);
    d.rule = MIXP_RULE_STATIC;
    d.init_scale = 1.0f;
    mixp_scaler *s = mixp_scaler_new(ctx, &d);
    mixp_optimizer_add(opt, w, NULL);
    mixp_step_begin(ctx);
    CHECK_INT(mixp_backward(ctx, mixp_scaler_scale(s, mixp_sum(ctx, mixp_mul(
                  ctx, w, mixp_input(ctx, MIXP_F32, 1, four, before)), MIXP_ALL, 0))), MIXP_OK);
    CHECK_INT(mixp_scaler_unscale(s, opt), MIXP_OK);
    CHECK_INT(mixp_clip_grad_norm(opt, (double)INFINITY), MIXP_OK);
    mixp_read(w->grad, after, MIXP_F32, 4);
    CHECK(memcmp(before, after, sizeof before) == 0);
    CHECK_INT(mixp_scaler_step(s, opt), MIXP_OK);
    CHECK_INT(mixp_scaler_update(s), MIXP_OK);
    CHECK_NEAR(mixp_scaler_verdict(s).grad_norm, sqrt(9.0 + (double)before[1] * (double)before[1]), 4e13);
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    CHECK_INT(mixp_clip_grad_norm(opt, (double)-INFINITY), MIXP_ERR_ARGUMENT);
    mixp_context_error(ctx, &why);
    CHECK_TEXT(why, "INFINITY only measures");
    mixp_context_clear_error(ctx);
    CHECK_INT(mixp_clip_grad_norm(opt, (double)NAN), MIXP_ERR_ARGUMENT);
    mixp_context_free(ctx);
}

int main(void) {
    RUN(test_refused_memory);
    RUN(test_anothers_zero_grad);
    RUN(test_anothers_step_and_update);
    RUN(test_update_of_another_scaler);
    RUN(test_only_one_is_scaled);
    RUN(test_own_scale);
    RUN(test_two_scales_in_one_sum);
    RUN(test_a_scaler_of_its_own);
    RUN(test_one_scale_in_a_sum);
    RUN(test_two_scalers_on_one_loss);
    RUN(test_a_sum_across_a_skip);
    RUN(test_scales_remembered);
    RUN(test_scales_differ_in_an_optimizer);
    RUN(test_true_joins_unscaled);
    RUN(test_shared_gradient_is_unscaled_once);
    RUN(test_static_takes_true_gradients);
    RUN(test_backward_after_clipping);
    RUN(test_views);
    RUN(test_sequences);
    RUN(test_clip_that_only_measures);
    return test_report();
}
