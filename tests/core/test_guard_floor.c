/* test_guard_floor.c - a gradient that exceeds f16 while the loss scale is at its floor. No lower
 * scale is left, so the site stores f32 until its gradients are small again. (The guard: WATCH.)
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "mixprec.h"
#include "test.h"

typedef struct model {
    mixp_context   *ctx;
    mixp_tensor    *w;
    mixp_optimizer *opt;
    mixp_scaler    *scaler;
} model;

/* Samples every step; a site is well after one clean sample. The scale cannot leave 1. */
static model model_open(double lr) {
    static const int64_t shape[2] = { 1, 2 };
    mixp_optimizer_desc sgd = mixp_sgd_defaults();
    mixp_scaler_desc scale;
    mixp_guard_desc guard;
    model m;
    memset(&scale, 0, sizeof scale);
    memset(&guard, 0, sizeof guard);
    scale.init_scale = scale.min_scale = scale.max_scale = 1;
    guard.every = guard.clean = 1;
    sgd.lr = lr;
    m.ctx = mixp_context_new(NULL);
    m.w = mixp_param(m.ctx, "w", MIXP_F32, 2, shape);
    m.opt = mixp_optimizer_new(m.ctx, &sgd);
    m.scaler = mixp_scaler_new(m.ctx, &scale);
    mixp_fill(m.w, 1);
    mixp_optimizer_add(m.opt, m.w, NULL);
    CHECK_INT(mixp_guard_start(m.ctx, &guard), MIXP_OK);
    return m;
}

/* A step with loss = steep * (x w) with x = (1/2, 1/4): the slope of the product is `steep`, of the
 * weights steep * x. */
static mixp_verdict step(const model *m, float steep) {
    static const int64_t row[2] = { 1, 2 };
    static const float x[2] = { 0.5f, 0.25f };
    mixp_tensor *y = NULL;
    mixp_step_begin(m->ctx);
    mixp_zero_grad(m->opt);
    MIXP_AUTOCAST(m->ctx, MIXP_F16) {
        y = mixp_linear(m->ctx, mixp_input(m->ctx, MIXP_F32, 2, row, x), m->w, NULL);
    }
    y = mixp_sum(m->ctx, mixp_scale(m->ctx, mixp_cast(m->ctx, y, MIXP_F32), steep), MIXP_ALL, 0);
    CHECK_INT(mixp_backward(m->ctx, mixp_scaler_scale(m->scaler, y)), MIXP_OK);
    CHECK_INT(mixp_scaler_step(m->scaler, m->opt), MIXP_OK);
    CHECK_INT(mixp_scaler_update(m->scaler), MIXP_OK);
    CHECK_NEAR(mixp_scaler_loss_scale(m->scaler), 1, 0);
    return mixp_scaler_verdict(m->scaler);
}

/* The site of the product: it is the one that is named after the weight. */
static mixp_site_info product_site(const model *m) {
    mixp_site_info site;
    int i = 0;
    memset(&site, 0, sizeof site);
    while (mixp_site(m->ctx, i, &site) && strcmp(site.name, "w: linear") != 0) i++;
    CHECK_TEXT(site.name, "w: linear");
    return site;
}

static int events(const model *m, mixp_event_kind kind) {
    mixp_event e;
    int i, n = 0;
    for (i = 0; mixp_guard_event(m->ctx, i, &e); i++) n += e.kind == kind;
    return n;
}

/* 10^6 passes 65504: skipped until the site stores f32, then applied with the true gradient. */
static void falls_at_the_floor(void) {
    model m = model_open(1e-6);
    float w[2];
    int i;
    for (i = 0; i < 4 && step(&m, 1e6f).outcome == MIXP_STEP_SKIPPED; i++) {
        CHECK_INT(mixp_read(m.w, w, MIXP_F32, 2), MIXP_OK);
        CHECK(w[0] == 1 && w[1] == 1);
    }
    CHECK(i >= 1 && i <= 2);
    CHECK_INT(mixp_read(m.w, w, MIXP_F32, 2), MIXP_OK);
    CHECK_NEAR(w[0], 1 - 0.5, 1e-5);
    CHECK_NEAR(w[1], 1 - 0.25, 1e-5);
    CHECK_INT(product_site(&m).fallen, 1);
    CHECK_INT(product_site(&m).dtype, MIXP_F32);
    CHECK_INT(events(&m, MIXP_EVENT_OVERFLOW), 1);
    mixp_context_free(m.ctx);
}

/* Its value is well all the time; it comes back when its gradient is, too. */
static void comes_back_with_its_gradient(void) {
    model m = model_open(0);
    int i;
    for (i = 0; i < 12; i++) step(&m, 1e6f);
    CHECK_INT(product_site(&m).fallen, 1);
    CHECK_INT(events(&m, MIXP_EVENT_BACK), 0);
    for (i = 0; i < 4; i++) CHECK_INT(step(&m, 4).outcome, MIXP_STEP_APPLIED);
    CHECK_INT(product_site(&m).fallen, 0);
    CHECK_INT(product_site(&m).dtype, MIXP_F16);
    CHECK_INT(events(&m, MIXP_EVENT_BACK), 1);
    mixp_context_free(m.ctx);
}

/* Of 60000, below 65504, nothing is done: neither skipped nor fallen back. */
static void stays_low_below_it(void) {
    model m = model_open(0);
    int i;
    for (i = 0; i < 4; i++) CHECK_INT(step(&m, 60000).outcome, MIXP_STEP_APPLIED);
    CHECK_INT(product_site(&m).fallen, 0);
    CHECK_INT(events(&m, MIXP_EVENT_OVERFLOW), 0);
    mixp_context_free(m.ctx);
}

/* Where it is pinned it must stay: each step is skipped, and no error yet. */
static void pinned_stays(void) {
    model m = model_open(0);
    mixp_result r = MIXP_OK;
    int i;
    CHECK_INT(mixp_guard_pin(m.ctx, "w", MIXP_F16), MIXP_OK);
    for (i = 0; i < 4; i++) {
        CHECK_INT(step(&m, 1e6f).outcome, MIXP_STEP_SKIPPED);
        r = mixp_context_error(m.ctx, NULL);
    }
    CHECK_INT(r, MIXP_OK);                      /* patience is 20 */
    CHECK_INT(product_site(&m).fallen, 0);
    CHECK_INT(product_site(&m).pinned, 1);
    mixp_context_free(m.ctx);
}

int main(void) {
    RUN(falls_at_the_floor);
    RUN(comes_back_with_its_gradient);
    RUN(stays_low_below_it);
    RUN(pinned_stays);
    return test_report();
}
