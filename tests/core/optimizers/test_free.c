/* test_free.c - scalers and optimizers freed before their context; and reading an optimizer's
 * state.
 * SPDX-License-Identifier: MIT OR Unlicense */
#include "mixprec.h"
#include "test.h"
#include "new_optimizer.h"

static int64_t alive;       /* allocations that were not given back */

static void *count_allocate(size_t bytes, void *user) {
    (void)user;
    alive++;
    return malloc(bytes);
}
static void count_release(void *p, void *user) {
    (void)user;
    alive--;
    free(p);
}

enum { OPTIMIZERS = 3 };
static const int64_t three[1] = { 3 };

typedef struct rig {
    mixp_context   *ctx;
    mixp_scaler    *scaler;
    mixp_optimizer *opt[OPTIMIZERS];
    mixp_tensor    *w[OPTIMIZERS];
} rig;

static rig rig_open(void) {
    mixp_context_desc d;
    rig r;
    memset(&d, 0, sizeof d);
    d.allocate = count_allocate;
    d.release = count_release;
    d.threads = 1;
    alive = 0;
    r.ctx = mixp_context_new(&d);
    r.scaler = mixp_scaler_new(r.ctx, NULL);
    for (int i = 0; i < OPTIMIZERS; i++) {
        const char name[2] = { (char)('a' + i), '\0' };
        r.w[i] = mixp_param(r.ctx, name, MIXP_F32, 1, three);
        r.opt[i] = new_sgd(r.ctx);
        CHECK_INT(mixp_optimizer_add(r.opt[i], r.w[i], NULL), MIXP_OK);
    }
    mixp_step_begin(r.ctx);
    return r;
}

static void rig_close(rig *r) {
    const char *why = "";
    CHECK_INT(mixp_context_error(r->ctx, &why), MIXP_OK);
    CHECK_TEXT(why, "");
    mixp_context_free(r->ctx);
    CHECK_INT(alive, 0);
}

static void refused(rig *r, mixp_result got, const char *part) {
    const char *why = "";
    CHECK_INT(got, MIXP_ERR_ORDER);
    mixp_context_error(r->ctx, &why);
    CHECK_TEXT(why, part);
    mixp_context_clear_error(r->ctx);
}

/* The gradient of parameter i becomes `factor`, times the scale. */
static void backward(rig *r, int i, float factor) {
    mixp_tensor *loss = mixp_scale(r->ctx, mixp_sum(r->ctx, r->w[i], MIXP_ALL, 0), factor);
    CHECK_INT(mixp_backward(r->ctx, mixp_scaler_scale(r->scaler, loss)), MIXP_OK);
}

static void test_nothing_is_kept(void) {
    rig r = rig_open();
    int64_t pieces = alive;
    CHECK_INT(mixp_scaler_free(NULL), MIXP_OK);
    CHECK_INT(mixp_optimizer_free(NULL), MIXP_OK);
    CHECK_INT(mixp_graph_free(NULL), MIXP_OK);
    mixp_memory before = mixp_context_memory(r.ctx);
    for (int i = 0; i < 50; i++) {
        mixp_optimizer_desc d = mixp_muon_defaults();
        mixp_optimizer *muon = mixp_optimizer_new(r.ctx, &d), *adamw = mixp_optimizer_new(r.ctx, NULL);
        for (int k = 0; k < OPTIMIZERS; k++)
            CHECK_INT(mixp_optimizer_add(adamw, r.w[k], NULL), MIXP_OK);
        CHECK(mixp_context_memory(r.ctx).used > before.used);
        CHECK_INT(mixp_optimizer_free(muon), MIXP_OK);
        CHECK_INT(mixp_optimizer_free(adamw), MIXP_OK);
        CHECK_INT(mixp_scaler_free(mixp_scaler_new(r.ctx, NULL)), MIXP_OK);
    }
    mixp_memory after = mixp_context_memory(r.ctx);
    CHECK_INT(alive, pieces);
    CHECK_INT(after.used, before.used);
    CHECK_INT(after.allocated, before.allocated);
    rig_close(&r);
}

/* Its parameters go on with another; the first of all, and the last, are taken out of lists. */
static void test_an_optimizer_goes(void) {
    rig r = rig_open();
    backward(&r, 0, 2.0f);
    CHECK_INT(mixp_scaler_step(r.scaler, r.opt[0]), MIXP_OK);
    refused(&r, mixp_optimizer_free(r.opt[0]), "in the middle of a step");
    CHECK_INT(mixp_scaler_update(r.scaler), MIXP_OK);
    CHECK_INT(mixp_scaler_verdict(r.scaler).outcome, MIXP_STEP_APPLIED);
    CHECK_INT(mixp_optimizer_free(r.opt[0]), MIXP_OK);
    CHECK_INT(mixp_scaler_verdict(r.scaler).outcome, MIXP_STEP_NONE);
    mixp_optimizer *next = new_sgd(r.ctx);
    CHECK_INT(mixp_optimizer_add(next, r.w[0], NULL), MIXP_OK);
    CHECK_INT(mixp_zero_grad(next), MIXP_OK);
    mixp_step_begin(r.ctx);
    backward(&r, 0, 1.0f);
    CHECK_INT(mixp_scaler_step(r.scaler, next), MIXP_OK);
    CHECK_INT(mixp_scaler_update(r.scaler), MIXP_OK);
    rig_close(&r);
}

/* Verdicts look at all that stepped since the last update: any of them may be gone. */
static void test_a_verdict_without_it(void) {
    for (int gone = 0; gone < OPTIMIZERS; gone++)
        for (int bad = 0; bad < OPTIMIZERS; bad++) {
            rig r = rig_open();
            const char name[2] = { (char)('a' + bad), '\0' };
            for (int i = 0; i < OPTIMIZERS; i++) {
                backward(&r, i, i == bad ? HUGE_VALF : 1.0f);
                CHECK_INT(mixp_scaler_step(r.scaler, r.opt[i]), MIXP_OK);
            }
            CHECK_INT(mixp_scaler_update(r.scaler), MIXP_OK);
            CHECK_INT(mixp_optimizer_free(r.opt[gone]), MIXP_OK);
            mixp_verdict v = mixp_scaler_verdict(r.scaler);
            CHECK_INT(v.outcome, gone == bad ? MIXP_STEP_APPLIED : MIXP_STEP_SKIPPED);
            if (gone != bad) CHECK_TEXT(v.bad_tensor, name);
            rig_close(&r);
        }
}

/* What it scaled cannot be used, also by a scaler that gets its memory; zero_grad is the cure. */
static void test_a_scaler_goes(void) {
    rig r = rig_open();
    backward(&r, 0, 1.0f);
    mixp_tensor *loss = mixp_scaler_scale(r.scaler, mixp_sum(r.ctx, r.w[1], MIXP_ALL, 0));
    CHECK_INT(mixp_scaler_free(r.scaler), MIXP_OK);
    r.scaler = mixp_scaler_new(r.ctx, NULL);
    refused(&r, mixp_backward(r.ctx, loss), "freed");
    refused(&r, mixp_scaler_step(r.scaler, r.opt[0]), "'a' was scaled by a scaler that was freed");
    refused(&r, mixp_scaler_unscale(r.scaler, r.opt[0]), "mixp_zero_grad");
    refused(&r, mixp_optimizer_step(r.opt[0]), "freed");
    refused(&r, mixp_clip_grad_norm(r.opt[0], 1.0), "freed");
    backward(&r, 0, 1.0f);
    refused(&r, mixp_scaler_step(r.scaler, r.opt[0]), "'a'");   /* a sum of both */
    CHECK_INT(mixp_zero_grad(r.opt[0]), MIXP_OK);
    backward(&r, 0, 1.0f);
    CHECK_INT(mixp_scaler_step(r.scaler, r.opt[0]), MIXP_OK);
    CHECK_INT(mixp_scaler_update(r.scaler), MIXP_OK);
    rig_close(&r);
}

/* Of several any may go first: the others train on, each by lr 0.01 against a gradient of 1. */
static void test_scalers_go_in_any_order(void) {
    static const int orders[6][3] = { { 0, 1, 2 }, { 0, 2, 1 }, { 1, 0, 2 }, { 1, 2, 0 }, { 2, 0, 1 }, { 2, 1, 0 } };
    int order, gone, i, steps;
    for (order = 0; order < 6; order++) {
        rig r = rig_open();
        mixp_scaler *first = r.scaler, *scalers[OPTIMIZERS];
        int alive_too[OPTIMIZERS] = { 1, 1, 1 };
        float w[3];
        mixp_param_group group;
        for (i = 0; i < OPTIMIZERS; i++) {
            scalers[i] = mixp_scaler_new(r.ctx, NULL);
            mixp_optimizer_group(r.opt[i], 0, &group);
            group.lr = 0.01;
            mixp_optimizer_set_group(r.opt[i], 0, &group);
        }
        for (steps = 1, gone = 0; gone < 3; gone++, steps++) {
            mixp_step_begin(r.ctx);
            for (i = 0; i < OPTIMIZERS; i++) {
                if (!alive_too[i]) continue;
                mixp_zero_grad(r.opt[i]);
                r.scaler = scalers[i];
                backward(&r, i, 1.0f);
                CHECK_INT(mixp_scaler_step(scalers[i], r.opt[i]), MIXP_OK);
                CHECK_INT(mixp_scaler_update(scalers[i]), MIXP_OK);
                CHECK_INT(mixp_scaler_verdict(scalers[i]).applied, steps);
                CHECK_INT(mixp_read(r.w[i], w, MIXP_F32, 3), MIXP_OK);
                CHECK_NEAR(w[2], -0.01 * steps, 1e-6);
            }
            CHECK_INT(mixp_scaler_free(scalers[orders[order][gone]]), MIXP_OK);
            alive_too[orders[order][gone]] = 0;
        }
        CHECK_INT(mixp_scaler_free(first), MIXP_OK);
        rig_close(&r);
    }
}

/* In the middle of a step: what it has unscaled is true, and no optimizer waits for it. */
static void test_a_scaler_goes_after_unscale(void) {
    rig r = rig_open();
    for (int i = 0; i < OPTIMIZERS; i++) backward(&r, i, 2.0f);
    CHECK_INT(mixp_scaler_unscale(r.scaler, r.opt[0]), MIXP_OK);
    CHECK_INT(mixp_scaler_step(r.scaler, r.opt[1]), MIXP_OK);
    CHECK_INT(mixp_scaler_free(r.scaler), MIXP_OK);
    CHECK_INT(mixp_optimizer_step(r.opt[0]), MIXP_OK);
    CHECK_NEAR(mixp_item(mixp_sum(r.ctx, r.w[0], MIXP_ALL, 0)), -3.0 * 2e-3, 1e-8);
    CHECK_INT(mixp_optimizer_free(r.opt[1]), MIXP_OK);
    refused(&r, mixp_optimizer_step(r.opt[2]), "'c'");
    rig_close(&r);
}

/* A view's mark is of its scaler, too. */
static void test_a_scaler_of_views_goes(void) {
    static float w[3], g[3];
    rig r = rig_open();
    mixp_optimizer *opt = new_sgd(r.ctx);
    CHECK_INT(mixp_optimizer_add(opt, mixp_view(r.ctx, "w", MIXP_F32, 1, three, w),
                                 mixp_view(r.ctx, "g", MIXP_F32, 1, three, g)), MIXP_OK);
    g[0] = mixp_scaler_loss_scale(r.scaler);
    CHECK_INT(mixp_scaler_unscale(r.scaler, opt), MIXP_OK);
    CHECK_INT(mixp_scaler_step(r.scaler, opt), MIXP_OK);
    CHECK_INT(mixp_scaler_update(r.scaler), MIXP_OK);
    CHECK_INT(mixp_scaler_free(r.scaler), MIXP_OK);
    CHECK_INT(mixp_zero_grad(opt), MIXP_OK);
    mixp_scaler *next = mixp_scaler_new(r.ctx, NULL);
    g[0] = mixp_scaler_loss_scale(next);
    CHECK_INT(mixp_scaler_step(next, opt), MIXP_OK);
    CHECK_NEAR(w[0], -2e-3, 1e-9);
    rig_close(&r);
}

/* With a guard on, whose looks at the scaler's state may be under way. */
static void test_a_scaler_goes_under_a_guard(void) {
    rig r = rig_open();
    CHECK_INT(mixp_guard_start(r.ctx, NULL), MIXP_OK);
    for (int i = 0; i < 4; i++) {
        mixp_step_begin(r.ctx);
        mixp_zero_grad(r.opt[0]);
        backward(&r, 0, i == 1 ? HUGE_VALF : 1.0f);
        CHECK_INT(mixp_scaler_step(r.scaler, r.opt[0]), MIXP_OK);
        CHECK_INT(mixp_scaler_update(r.scaler), MIXP_OK);
        CHECK_INT(mixp_scaler_free(r.scaler), MIXP_OK);
        r.scaler = mixp_scaler_new(r.ctx, NULL);
    }
    rig_close(&r);
}

/* --- what an optimizer remembers ------------------------------------------------------------------ */

enum { ROWS = 64, COLS = 72, COUNT = ROWS * COLS };
static const int64_t matrix[2] = { ROWS, COLS };
static float start[COUNT], grads[COUNT], seen[COUNT];

typedef struct kept {
    mixp_context   *ctx;
    mixp_optimizer *opt;
    mixp_tensor    *w;
} kept;

/* One step of AdamW with these states. */
static kept kept_after(mixp_dtype dtype, mixp_moment_kind moment, mixp_master_kind master) {
    mixp_optimizer_desc d = mixp_adamw_defaults();
    kept k;
    d.weight_decay = 0.0;
    d.states.m = d.states.v = moment;
    d.states.master = master;
    for (int i = 0; i < COUNT; i++) {
        start[i] = mixp_f32_from_bf16(mixp_bf16_from_f32(0.01f * (float)(i % 97 - 48)));
        grads[i] = mixp_f32_from_bf16(mixp_bf16_from_f32(0.5f + 0.003f * (float)(i % 89)));
    }
    k.ctx = mixp_context_new(NULL);
    k.w = mixp_param(k.ctx, "w", dtype, 2, matrix);
    k.opt = mixp_optimizer_new(k.ctx, &d);
    mixp_write(k.w, start, MIXP_F32, COUNT);
    {
        mixp_tensor *g = mixp_param(k.ctx, "g", dtype, 2, matrix);
        mixp_write(g, grads, MIXP_F32, COUNT);
        CHECK_INT(mixp_optimizer_add(k.opt, k.w, g), MIXP_OK);
    }
    CHECK_INT(mixp_optimizer_step(k.opt), MIXP_OK);
    return k;
}

/* After the first step m is g / 10 and v is g^2 / 1000; its master has moved by lr. */
static void read_states(mixp_dtype dtype, mixp_moment_kind moment, mixp_master_kind master,
                        double off_m, double off_v, double off_w) {
    kept k = kept_after(dtype, moment, master);
    int i;
    CHECK_INT(mixp_optimizer_read(k.opt, k.w, MIXP_STATE_M, seen, COUNT), MIXP_OK);
    for (i = 0; i < COUNT; i++)
        CHECK_NEAR(seen[i], 0.1 * (double)grads[i], off_m * (double)grads[i]);
    CHECK_INT(mixp_optimizer_read(k.opt, k.w, MIXP_STATE_V, seen, COUNT), MIXP_OK);
    for (i = 0; i < COUNT; i++) {
        double want = 0.001 * (double)grads[i] * (double)grads[i];
        CHECK_NEAR(seen[i], want, off_v * want);
    }
    CHECK_INT(mixp_optimizer_read(k.opt, k.w, MIXP_STATE_MASTER, seen, COUNT), MIXP_OK);
    for (i = 0; i < COUNT; i++) CHECK_NEAR(seen[i], (double)start[i] - 1e-3, off_w);
    CHECK_INT(mixp_context_error(k.ctx, NULL), MIXP_OK);
    mixp_context_free(k.ctx);
}

static void test_states_are_read(void) {
    read_states(MIXP_F32, MIXP_MOMENT_F32, MIXP_MASTER_F32, 1e-8, 1e-6, 1e-7);
    read_states(MIXP_F16, MIXP_MOMENT_F32, MIXP_MASTER_F32, 1e-8, 1e-6, 1e-7);
    read_states(MIXP_BF16, MIXP_MOMENT_BF16, MIXP_MASTER_16BIT, 1e-3, 0.01, 1e-7);
    read_states(MIXP_BF16, MIXP_MOMENT_8BIT, MIXP_MASTER_8BIT, 0.0126, 0.13, 1e-5);
}

static void test_reading_is_checked(void) {
    kept k = kept_after(MIXP_F32, MIXP_MOMENT_F32, MIXP_MASTER_F32);
    mixp_tensor *other = mixp_param(k.ctx, "other", MIXP_F32, 1, three);
    CHECK_INT(mixp_optimizer_read(k.opt, other, MIXP_STATE_M, seen, 3), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_optimizer_read(k.opt, k.w, MIXP_STATE_M, NULL, COUNT), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_optimizer_read(k.opt, k.w, (mixp_state_kind)9, seen, COUNT), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_optimizer_read(k.opt, k.w, MIXP_STATE_M, seen, COUNT - 1), MIXP_ERR_SHAPE);
    CHECK_INT(mixp_optimizer_read(NULL, k.w, MIXP_STATE_M, seen, COUNT), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_optimizer_read(k.opt, NULL, MIXP_STATE_M, seen, COUNT), MIXP_ERR_ARGUMENT);
    mixp_context_free(k.ctx);
}

int main(void) {
    RUN(test_nothing_is_kept);
    RUN(test_an_optimizer_goes);
    RUN(test_a_verdict_without_it);
    RUN(test_a_scaler_goes);
    RUN(test_scalers_go_in_any_order);
    RUN(test_a_scaler_goes_after_unscale);
    RUN(test_a_scaler_of_views_goes);
    RUN(test_a_scaler_goes_under_a_guard);
    RUN(test_states_are_read);
    RUN(test_reading_is_checked);
    return test_report();
}
