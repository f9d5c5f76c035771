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
    for (int i = 0; i < 12; i++) step(&m, 1e6f);
    CHECK_INT(product_site(&m).fallen, 1);
    CHECK_INT(events(&m, MIXP_EVENT_BACK), 0);
    for (int i = 0; i < 4; i++) CHECK_INT(step(&m, 4).outcome, MIXP_STEP_APPLIED);
    CHECK_INT(product_site(&m).fallen, 0);
    CHECK_INT(product_site(&m).dtype, MIXP_F16);
    CHECK_INT(events(&m, MIXP_EVENT_BACK), 1);
    mixp_context_free(m.ctx);
}

/* Of 60000, below 65504, nothing is done: neither skipped nor fallen back. */
static void stays_low_below_it(void) {
    model m = model_open(0);
    for (int i = 0; i < 4; i++) CHECK_INT(step(&m, 60000).outcome, MIXP_STEP_APPLIED);
    CHECK_INT(product_site(&m).fallen, 0);
    CHECK_INT(events(&m, MIXP_EVENT_OVERFLOW), 0);
    mixp_context_free(m.ctx);
}

/* Where it is pinned it must stay: each step is skipped, and no error yet. */
static void pinned_stays(void) {
    model m = model_open(0);
    mixp_result r = MIXP_OK;
    CHECK_INT(mixp_guard_pin(m.ctx, "w", MIXP_F16), MIXP_OK);
    for (int i = 0; i < 4; i++) {
        CHECK_INT(step(&m, 1e6f).outcome, MIXP_STEP_SKIPPED);
        r = mixp_context_error(m.ctx, NULL);
    }
    CHECK_INT(r, MIXP_OK);                      /* patience is 20 */
    CHECK_INT(product_site(&m).fallen, 0);
    CHECK_INT(product_site(&m).pinned, 1);
    mixp_context_free(m.ctx);
}

/* At level 3 the gradient of a weight is f16 itself: 64 rows with a slope of 4000 each sum up to 128,000.
 * No site stored that, so none falls back; the scale leaves 1, as without a guard. */
enum { ROWS = 64 };
static void a_low_weight_needs_a_lower_scale(void) {
    static const int64_t shape[2] = { 1, 2 }, rows[2] = { ROWS, 2 };
    static float x[2 * ROWS];
    int guarded, i;
    for (i = 0; i < 2 * ROWS; i++) x[i] = 0.5f;
    for (guarded = 0; guarded < 2; guarded++) {
        mixp_optimizer_desc sgd = mixp_sgd_defaults();
        mixp_context *ctx = mixp_context_new(NULL);
        mixp_scaler_desc scale;
        mixp_guard_desc guard;
        mixp_site_info site;
        model m;
        float w[2];
        memset(&scale, 0, sizeof scale);
        memset(&guard, 0, sizeof guard);
        scale.init_scale = 1;
        guard.every = guard.clean = 1;
        sgd.lr = 1e-6;
        m.ctx = ctx;
        m.w = mixp_param(ctx, "w", MIXP_F16, 2, shape);
        m.opt = mixp_optimizer_new(ctx, &sgd);
        m.scaler = mixp_scaler_new(ctx, &scale);
        mixp_fill(m.w, 1);
        mixp_optimizer_add(m.opt, m.w, NULL);
        mixp_autocast_set_level(ctx, 3);
        if (guarded) CHECK_INT(mixp_guard_start(ctx, &guard), MIXP_OK);
        for (i = 0; i < 2; i++) {
            mixp_tensor *y = NULL;
            mixp_step_begin(ctx);
            mixp_zero_grad(m.opt);
            MIXP_AUTOCAST(ctx, MIXP_F16) {
                y = mixp_linear(ctx, mixp_input(ctx, MIXP_F32, 2, rows, x), m.w, NULL);
            }
            y = mixp_sum(ctx, mixp_scale(ctx, mixp_cast(ctx, y, MIXP_F32), 4000), MIXP_ALL, 0);
            mixp_backward(ctx, mixp_scaler_scale(m.scaler, y));
            mixp_scaler_step(m.scaler, m.opt);
            CHECK_INT(mixp_scaler_update(m.scaler), MIXP_OK);
            mixp_verdict verdict = mixp_scaler_verdict(m.scaler);
            CHECK_INT(verdict.outcome, i ? MIXP_STEP_APPLIED : MIXP_STEP_SKIPPED);
            CHECK_NEAR(mixp_scaler_loss_scale(m.scaler), 0.5, 0);
        }
        CHECK_INT(mixp_read(m.w, w, MIXP_F32, 2), MIXP_OK);
        CHECK_NEAR(w[0], 1 - 1e-6 * 4000 * ROWS * 0.5, 1e-3);
        for (i = 0; mixp_site(ctx, i, &site); i++) CHECK_INT(site.fallen, 0);
        CHECK(!guarded || i >= 3);
        CHECK_INT(events(&m, MIXP_EVENT_OVERFLOW), 0);
        CHECK_INT(events(&m, MIXP_EVENT_SKIP), guarded);
        mixp_context_free(ctx);
    }
}

int main(void) {
    RUN(falls_at_the_floor);
    RUN(comes_back_with_its_gradient);
    RUN(stays_low_below_it);
    RUN(pinned_stays);
    RUN(a_low_weight_needs_a_lower_scale);
    return test_report();
}
