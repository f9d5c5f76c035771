/* test_schedules.c - learning-rate schedules against PyTorch's formulas, written as its
 * documentation gives them: step by step, or in closed form with libm's cos; then through an
 * optimizer, whose skipped steps do not count; borders, errors.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "mixprec.h"
#include "test.h"
#include "numbers.h"

static const double PI = 3.14159265358979323846;

static mixp_schedule schedule_of(mixp_schedule_kind kind) {
    mixp_schedule s;
    memset(&s, 0, sizeof s);
    s.kind = kind;
    return s;
}

static int near(double got, double want, double part)
{ return fabs(got - want) <= part * fabs(want); }

/* --- against PyTorch's formulas --------------------------------------------------------------- */

/* StepLR: every `every` steps the rate is multiplied by gamma. */
static void test_step(void) {
    static const int every[] = { 1, 7, 30 };
    int k, t;
    for (k = 0; k < 3; k++) {
        mixp_schedule s = schedule_of(MIXP_SCHEDULE_STEP);
        double lr = 0.05;
        s.every = every[k];
        s.gamma = k == 2 ? 0.1 : 0.97;
        for (t = 0; t < 300; t++) {
            if (t && t % every[k] == 0) lr *= s.gamma;
            CHECK(near(mixp_schedule_lr(&s, 0.05, t), lr, 1e-13));
        }
    }
}

/* ExponentialLR: every step multiplies the rate by gamma. */
static void test_exponential(void) {
    static const double gammas[] = { 1.0, 0.999, 0.9 };
    int k, t;
    for (k = 0; k < 3; k++) {
        mixp_schedule s = schedule_of(MIXP_SCHEDULE_EXPONENTIAL);
        double lr = 0.3;
        s.gamma = gammas[k];
        for (t = 0; t < 1000; t++, lr *= s.gamma)
            CHECK(near(mixp_schedule_lr(&s, 0.3, t), lr, 1e-12));
    }
}

/* Both begin behind the warm-up, and stop at min_factor. */
static void test_warm_up_and_least(void) {
    mixp_schedule s = schedule_of(MIXP_SCHEDULE_EXPONENTIAL);
    int t;
    s.gamma = 0.5;
    s.warmup = 3;
    s.min_factor = 0.1;
    for (t = 0; t < 3; t++) CHECK_NEAR(mixp_schedule_lr(&s, 8.0, t), 2.0 * (t + 1), 1e-14);
    CHECK_NEAR(mixp_schedule_lr(&s, 8.0, 3), 8.0, 0);
    CHECK_NEAR(mixp_schedule_lr(&s, 8.0, 4), 4.0, 0);
    CHECK_NEAR(mixp_schedule_lr(&s, 8.0, 6), 1.0, 0);
    CHECK_NEAR(mixp_schedule_lr(&s, 8.0, 7), 0.8, 1e-15);
    CHECK_NEAR(mixp_schedule_lr(&s, 8.0, INT64_MAX), 0.8, 1e-15);
}

/* OneCycleLR: two phases; each goes from its first to its last rate along half a cosine. */
static double cosine_between(double from, double to, double part)
{ return to + (from - to) / 2.0 * (cos(PI * part) + 1.0); }

static double one_cycle_lr(double max_lr, double total, double pct_start, double div_factor,
                           double final_div_factor, double step) {
    const double initial = max_lr / div_factor, least = initial / final_div_factor;
    const double top = pct_start * total - 1.0, end = total - 1.0;
    if (step <= top) return cosine_between(initial, max_lr, step / top);
    return cosine_between(max_lr, least, (step - top) / (end - top));
}

static void test_one_cycle(void) {
    static const int totals[] = { 10, 200, 1000 };
    static const double starts[] = { 0.3, 0.5, 0.0 }, divs[] = { 25.0, 10.0, 2.0 };
    int k, t;
    for (k = 0; k < 9; k++) {
        mixp_schedule s = schedule_of(MIXP_SCHEDULE_ONE_CYCLE);
        const int total = totals[k % 3];
        const double start = starts[k / 3], div = divs[k / 3], last = k % 2 ? 1e4 : 100.0;
        s.total = total;
        s.warmup = (int64_t)(start * total + 0.5);
        s.start_factor = k / 3 ? 1.0 / div : 0.0;       /* 0 = 1/25 */
        s.min_factor = 1.0 / (div * last);
        for (t = 0; t < total; t++)
            CHECK(near(mixp_schedule_lr(&s, 0.1, t), one_cycle_lr(0.1, total, start, div, last, t),
                       1e-9));
        CHECK_NEAR(mixp_schedule_lr(&s, 0.1, total - 1), 0.1 / (div * last), 1e-16);
        CHECK_NEAR(mixp_schedule_lr(&s, 0.1, INT64_MAX), 0.1 / (div * last), 1e-16);
    }
}

/* The peak, and the ends, as PyTorch's documentation names them. */
static void test_one_cycle_corners(void) {
    mixp_schedule s = schedule_of(MIXP_SCHEDULE_ONE_CYCLE);
    s.total = 100;
    s.warmup = 30;
    s.min_factor = 4e-6;
    CHECK_NEAR(mixp_schedule_lr(&s, 0.5, 0), 0.02, 1e-15);
    CHECK_NEAR(mixp_schedule_lr(&s, 0.5, 29), 0.5, 1e-15);
    CHECK_NEAR(mixp_schedule_lr(&s, 0.5, 99), 2e-6, 1e-18);
    s.warmup = 1;
    CHECK_NEAR(mixp_schedule_lr(&s, 0.5, 0), 0.5, 1e-15);
}

/* SequentialLR of ConstantLR with factor 1 and LinearLR from 1 to min_factor in `decay` steps. */
static void test_wsd(void) {
    mixp_schedule s = schedule_of(MIXP_SCHEDULE_WSD);
    int t;
    s.warmup = 5;
    s.total = 60;
    s.decay = 20;
    s.min_factor = 0.1;
    for (t = 0; t < 100; t++) {
        const int decayed = t < 40 ? 0 : t < 60 ? t - 40 : 20;
        double want = 0.7 * (1.0 + (0.1 - 1.0) * decayed / 20.0);
        if (t < 5) want = 0.7 * (t + 1) / 6.0;
        CHECK(near(mixp_schedule_lr(&s, 0.7, t), want, 1e-14));
    }
    s.decay = 55;                       /* no stable part: as LINEAR */
    for (t = 5; t < 60; t++)
        CHECK(near(mixp_schedule_lr(&s, 0.7, t), 0.7 * (1.0 - 0.9 * (t - 5) / 55.0), 1e-14));
}

/* --- in an optimizer -------------------------------------------------------------------------- */

static mixp_schedule each_of(mixp_schedule_kind kind) {
    mixp_schedule s = schedule_of(kind);
    s.warmup = 4;
    s.total = 20;
    s.min_factor = 0.01;
    s.gamma = 0.5;
    s.every = 3;
    s.decay = 6;
    return s;
}

/* The rate of a step is that of the applied steps before it; its update has that rate. */
static void run_of(mixp_schedule_kind kind) {
    static const int64_t one = 1;
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_optimizer_desc d = mixp_sgd_defaults();
    mixp_scaler *scaler = mixp_scaler_new(ctx, NULL);
    mixp_optimizer *opt;
    float w = 0.0f, g = 0.0f, before;
    int applied = 0, t;
    d.lr = 0.125;
    d.schedule = each_of(kind);
    opt = mixp_optimizer_new(ctx, &d);
    CHECK_INT(mixp_optimizer_add(opt, mixp_view(ctx, "w", MIXP_F32, 1, &one, &w),
                                 mixp_view(ctx, "g", MIXP_F32, 1, &one, &g)), MIXP_OK);
    for (t = 0; t < 40; t++) {
        const int bad = t % 5 == 2;
        const double want = mixp_schedule_lr(&d.schedule, 0.125, applied);
        CHECK_NEAR(mixp_optimizer_lr(opt, 0), want, 0);
        g = bad ? bits_f32(0x7F800000u) : mixp_scaler_loss_scale(scaler);
        before = w;
        CHECK_INT(mixp_scaler_step(scaler, opt), MIXP_OK);
        CHECK_INT(mixp_scaler_update(scaler), MIXP_OK);
        CHECK_NEAR(mixp_scaler_verdict(scaler).lr, want, 0);
        CHECK_NEAR(before - w, bad ? 0.0 : want, 1e-6);
        applied += !bad;
    }
    mixp_context_free(ctx);
}

static void test_in_an_optimizer(void) {
    int kind;
    for (kind = 0; kind <= MIXP_SCHEDULE_WSD; kind++) run_of((mixp_schedule_kind)kind);
}

static void refused(mixp_schedule s, const char *part) {
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_optimizer_desc d = mixp_sgd_defaults();
    const char *message = "";
    d.schedule = s;
    CHECK(mixp_optimizer_new(ctx, &d) == NULL);
    CHECK_INT(mixp_context_error(ctx, &message), MIXP_ERR_ARGUMENT);
    CHECK_TEXT(message, part);
    mixp_context_free(ctx);
}

static void test_refused(void) {
    const double nan = (double)bits_f32(0x7FC00000u);
    mixp_schedule s = each_of((mixp_schedule_kind)(MIXP_SCHEDULE_WSD + 1));
    refused(s, "schedule.kind");
    s = each_of(MIXP_SCHEDULE_STEP), s.every = 0, refused(s, "schedule.every");
    s = each_of(MIXP_SCHEDULE_STEP), s.gamma = 0.0, refused(s, "schedule.gamma");
    s = each_of(MIXP_SCHEDULE_EXPONENTIAL), s.gamma = 1.5, refused(s, "schedule.gamma");
    s = each_of(MIXP_SCHEDULE_EXPONENTIAL), s.gamma = nan, refused(s, "schedule.gamma");
    s = each_of(MIXP_SCHEDULE_WSD), s.decay = 0, refused(s, "schedule.decay");
    s = each_of(MIXP_SCHEDULE_WSD), s.decay = 17, refused(s, "schedule.decay");
    s = each_of(MIXP_SCHEDULE_WSD), s.total = 4, refused(s, "schedule.total");
    s = each_of(MIXP_SCHEDULE_ONE_CYCLE), s.total = 4, refused(s, "schedule.total");
    s = each_of(MIXP_SCHEDULE_ONE_CYCLE), s.start_factor = 1.5, refused(s, "schedule.start_factor");
    s = each_of(MIXP_SCHEDULE_ONE_CYCLE), s.start_factor = nan, refused(s, "schedule.start_factor");
}

int main(void) {
    RUN(test_step);
    RUN(test_exponential);
    RUN(test_warm_up_and_least);
    RUN(test_one_cycle);
    RUN(test_one_cycle_corners);
    RUN(test_wsd);
    RUN(test_in_an_optimizer);
    RUN(test_refused);
    return test_report();
}
