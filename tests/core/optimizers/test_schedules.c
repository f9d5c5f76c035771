/* test_schedules.c - learning-rate schedules against PyTorch's formulas, written as its
 * documentation gives them: step by step, or in closed form with libm's cos; against PyTorch's own
 * rates; then through an optimizer, whose skipped steps do not count; borders, errors.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "mixprec.h"
#include "test.h"
#include "numbers.h"
#include "reference/schedules.h"

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
    for (int k = 0; k < 3; k++) {
        mixp_schedule s = schedule_of(MIXP_SCHEDULE_STEP);
        double lr = 0.05;
        s.every = every[k];
        s.gamma = k == 2 ? 0.1 : 0.97;
        for (int t = 0; t < 300; t++) {
            if (t && t % every[k] == 0) lr *= s.gamma;
            CHECK(near(mixpi_schedule_lr(&s, 0.05, t), lr, 1e-13));
        }
    }
}

/* ExponentialLR: every step multiplies the rate by gamma. */
static void test_exponential(void) {
    static const double gammas[] = { 1.0, 0.999, 0.9 };
    for (int k = 0; k < 3; k++) {
        mixp_schedule s = schedule_of(MIXP_SCHEDULE_EXPONENTIAL);
        double lr = 0.3;
        s.gamma = gammas[k];
        for (int t = 0; t < 1000; t++, lr *= s.gamma)
            CHECK(near(mixpi_schedule_lr(&s, 0.3, t), lr, 1e-12));
    }
}

/* Both begin behind the warm-up, and stop at min_factor. */
static void test_warm_up_and_least(void) {
    mixp_schedule s = schedule_of(MIXP_SCHEDULE_EXPONENTIAL);
    s.gamma = 0.5;
    s.warmup = 3;
    s.min_factor = 0.1;
    for (int t = 0; t < 3; t++) CHECK_NEAR(mixpi_schedule_lr(&s, 8.0, t), 2.0 * (t + 1), 1e-14);
    CHECK_NEAR(mixpi_schedule_lr(&s, 8.0, 3), 8.0, 0);
    CHECK_NEAR(mixpi_schedule_lr(&s, 8.0, 4), 4.0, 0);
    CHECK_NEAR(mixpi_schedule_lr(&s, 8.0, 6), 1.0, 0);
    CHECK_NEAR(mixpi_schedule_lr(&s, 8.0, 7), 0.8, 1e-15);
    CHECK_NEAR(mixpi_schedule_lr(&s, 8.0, INT64_MAX), 0.8, 1e-15);
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
    for (int k = 0; k < 9; k++) {
        mixp_schedule s = schedule_of(MIXP_SCHEDULE_ONE_CYCLE);
        const int total = totals[k % 3];
        const double start = starts[k / 3], div = divs[k / 3], last = k % 2 ? 1e4 : 100.0;
        s.total = total;
        s.warmup = (int64_t)(start * total + 0.5);
        s.start_factor = k / 3 ? 1.0 / div : 0.0;       /* 0 = 1/25 */
        s.min_factor = 1.0 / (div * last);
        for (int t = 0; t < total; t++)
            CHECK(near(mixpi_schedule_lr(&s, 0.1, t), one_cycle_lr(0.1, total, start, div, last, t),
                       1e-9));
        CHECK_NEAR(mixpi_schedule_lr(&s, 0.1, total - 1), 0.1 / (div * last), 1e-16);
        CHECK_NEAR(mixpi_schedule_lr(&s, 0.1, INT64_MAX), 0.1 / (div * last), 1e-16);
    }
}

/* The peak, and the ends, as PyTorch's documentation names them. */
static void test_one_cycle_corners(void) {
    mixp_schedule s = schedule_of(MIXP_SCHEDULE_ONE_CYCLE);
    s.total = 100;
    s.warmup = 30;
    s.min_factor = 4e-6;
    CHECK_NEAR(mixpi_schedule_lr(&s, 0.5, 0), 0.02, 1e-15);
    CHECK_NEAR(mixpi_schedule_lr(&s, 0.5, 29), 0.5, 1e-15);
    CHECK_NEAR(mixpi_schedule_lr(&s, 0.5, 99), 2e-6, 1e-18);
    s.warmup = 1;
    CHECK_NEAR(mixpi_schedule_lr(&s, 0.5, 0), 0.5, 1e-15);
}

/* SequentialLR of ConstantLR with factor 1 and LinearLR from 1 to min_factor in `decay` steps. */
static void test_wsd(void) {
    mixp_schedule s = schedule_of(MIXP_SCHEDULE_WSD);
    s.warmup = 5;
    s.total = 60;
    s.decay = 20;
    s.min_factor = 0.1;
    for (int t = 0; t < 100; t++) {
        const int decayed = t < 40 ? 0 : t < 60 ? t - 40 : 20;
        double want = 0.7 * (1.0 + (0.1 - 1.0) * decayed / 20.0);
        if (t < 5) want = 0.7 * (t + 1) / 6.0;
        CHECK(near(mixpi_schedule_lr(&s, 0.7, t), want, 1e-14));
    }
    s.decay = 55;                       /* no stable part: as LINEAR */
    for (int t = 5; t < 60; t++)
        CHECK(near(mixpi_schedule_lr(&s, 0.7, t), 0.7 * (1.0 - 0.9 * (t - 5) / 55.0), 1e-14));
}

/* --- against PyTorch's rates ------------------------------------------------------------------ */

/* schedule_cases.py has the same function; user: counts the calls. */
static double own_factor(void *user, int64_t applied) {
    if (user) ++*(int *)user;
    return 1.0 / (1.0 + 0.05 * (double)applied);
}

static mixp_schedule schedule_in(const schedule_case *c) {
    mixp_schedule s = schedule_of(c->kind);
    s.warmup = c->warmup;
    s.total = c->total;
    s.every = c->every;
    s.decay = c->decay;
    s.growth = c->growth;
    s.linear = c->linear;
    s.three_phase = c->three_phase;
    for (int i = 0; i < 4; i++) s.milestones[i] = c->milestones[i];
    s.min_factor = c->min_factor;
    s.gamma = c->gamma;
    s.start_factor = c->start_factor;
    s.power = c->power;
    s.pct_start = c->pct_start;
    if (c->kind == MIXP_SCHEDULE_FUNCTION) s.factor = own_factor;
    return s;
}

static void test_recorded(void) {
    const double *want = schedule_rates;
    for (int c = 0; c < SCHEDULE_CASES; c++) {
        const mixp_schedule s = schedule_in(&schedule_cases[c]);
        double most = 0.0;
        for (int i = 0; i < SCHEDULE_SHOWN; i++, want++) {
            const double lr = schedule_lr * schedule_cases[c].base;
            const double away = fabs(mixpi_schedule_lr(&s, lr, schedule_shown[i]) - *want);
            if (!(away <= most)) most = away;
        }
        if (!(most <= 1e-12 * schedule_lr)) {
            test_bad++;
            TEST_SHOW("%s: %.3g away from PyTorch's", schedule_cases[c].name, most);
        }
    }
}

/* Far away: rates stay in range, and steps are found without a loop over all of them. */
static void test_far_steps(void) {
    mixp_schedule s = schedule_of(MIXP_SCHEDULE_RESTARTS);
    s.every = 3;
    s.growth = 2;
    s.min_factor = 0.5;
    CHECK(mixpi_schedule_lr(&s, 1.0, INT64_MAX) >= 0.5 && mixpi_schedule_lr(&s, 1.0, INT64_MAX) <= 1.0);
    s.growth = INT64_MAX;
    CHECK_NEAR(mixpi_schedule_lr(&s, 1.0, 3), 1.0, 0);
    CHECK(mixpi_schedule_lr(&s, 1.0, INT64_MAX) >= 0.5);
    s = schedule_of(MIXP_SCHEDULE_CYCLIC);
    s.every = 5;
    s.gamma = 0.5;
    s.min_factor = 0.25;
    CHECK_NEAR(mixpi_schedule_lr(&s, 1.0, INT64_MAX), 0.25, 1e-15);
    s = schedule_of(MIXP_SCHEDULE_POLYNOMIAL);
    s.total = 10;
    s.power = 1e300;
    CHECK_NEAR(mixpi_schedule_lr(&s, 1.0, 0), 1.0, 0);
    CHECK_NEAR(mixpi_schedule_lr(&s, 1.0, 1), 0.0, 0);
    s.power = 0.0;
    CHECK_NEAR(mixpi_schedule_lr(&s, 1.0, 9), 1.0, 0);
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
    s.power = 1.5;
    s.milestones[0] = 7;
    s.milestones[1] = 9;
    s.factor = own_factor;
    if (kind == MIXP_SCHEDULE_FUNCTION) s.warmup = 0;
    return s;
}

/* The rate of a step is that of the applied steps before it; its update has that rate. */
static void run_of(mixp_schedule_kind kind) {
    static const int64_t one = 1;
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_optimizer_desc d = mixp_sgd_defaults();
    mixp_scaler *scaler = mixp_scaler_new(ctx, NULL);
    float w = 0.0f, g = 0.0f, before;
    int applied = 0, t;
    d.lr = 0.125;
    d.schedule = each_of(kind);
    mixp_optimizer *opt = mixp_optimizer_new(ctx, &d);
    CHECK_INT(mixp_optimizer_add(opt, mixp_view(ctx, "w", MIXP_F32, 1, &one, &w),
                                 mixp_view(ctx, "g", MIXP_F32, 1, &one, &g)), MIXP_OK);
    for (t = 0; t < 40; t++) {
        const int bad = t % 5 == 2;
        const double want = mixpi_schedule_lr(&d.schedule, 0.125, applied);
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
    for (int kind = 0; kind <= MIXP_SCHEDULE_FUNCTION; kind++) run_of((mixp_schedule_kind)kind);
}

static double bad_factor(void *user, int64_t applied) {
    (void)user;
    return applied == 2 ? (double)bits_f32(0x7FC00000u) : applied == 3 ? -1.0 : 1.0;
}

/* A step asks once, with the number of applied steps. A factor out of range fails the step, which
 * then changes nothing. */
static void test_function(void) {
    static const int64_t one = 1;
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_optimizer_desc d = mixp_sgd_defaults();
    const char *why = "";
    float w = 0.0f, g = 1.0f;
    int calls = 0, t;
    d.lr = 0.5;
    d.schedule = schedule_of(MIXP_SCHEDULE_FUNCTION);
    d.schedule.factor = own_factor;
    d.schedule.user = &calls;
    mixp_optimizer *opt = mixp_optimizer_new(ctx, &d);
    CHECK_INT(mixp_optimizer_add(opt, mixp_view(ctx, "w", MIXP_F32, 1, &one, &w),
                                 mixp_view(ctx, "g", MIXP_F32, 1, &one, &g)), MIXP_OK);
    for (t = 0; t < 4; t++) CHECK_INT(mixp_optimizer_step(opt), MIXP_OK);
    CHECK_INT(calls, 4);
    CHECK_NEAR(w, -0.5 * (1.0 + 1.0 / 1.05 + 1.0 / 1.1 + 1.0 / 1.15), 1e-6);
    d.schedule.factor = bad_factor;
    opt = mixp_optimizer_new(ctx, &d);
    CHECK_INT(mixp_optimizer_add(opt, mixp_view(ctx, "v", MIXP_F32, 1, &one, &w),
                                 mixp_view(ctx, "h", MIXP_F32, 1, &one, &g)), MIXP_OK);
    for (t = 0; t < 2; t++) CHECK_INT(mixp_optimizer_step(opt), MIXP_OK);
    w = 7.0f;
    CHECK_INT(mixp_optimizer_step(opt), MIXP_ERR_ARGUMENT);
    mixp_context_error(ctx, &why);
    CHECK_TEXT(why, "schedule.factor returned nan for step 2");
    CHECK_NEAR(w, 7.0, 0);
    CHECK_INT(mixp_optimizer_applied(opt), 2);
    mixp_context_free(ctx);
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
    mixp_schedule s = each_of((mixp_schedule_kind)(MIXP_SCHEDULE_FUNCTION + 1));
    refused(s, "schedule.kind");
    s = each_of(MIXP_SCHEDULE_STEP), s.every = 0, refused(s, "schedule.every");
    s = each_of(MIXP_SCHEDULE_STEP), s.gamma = 0.0, refused(s, "schedule.gamma");
    s = each_of(MIXP_SCHEDULE_EXPONENTIAL), s.gamma = 1.5, refused(s, "schedule.gamma");
    s = each_of(MIXP_SCHEDULE_EXPONENTIAL), s.gamma = nan, refused(s, "schedule.gamma");
    s = each_of(MIXP_SCHEDULE_MULTI_STEP), s.gamma = 0.0, refused(s, "schedule.gamma");
    s = each_of(MIXP_SCHEDULE_MULTI_STEP), s.gamma = 1e20, s.milestones[0] = 3, s.milestones[1] = 5,
        refused(s, "schedule.gamma");
    s = each_of(MIXP_SCHEDULE_WSD), s.decay = 0, refused(s, "schedule.decay");
    s = each_of(MIXP_SCHEDULE_WSD), s.decay = 17, refused(s, "schedule.decay");
    s = each_of(MIXP_SCHEDULE_WSD), s.total = 4, refused(s, "schedule.total");
    s = each_of(MIXP_SCHEDULE_ONE_CYCLE), s.total = 4, refused(s, "schedule.total");
    s = each_of(MIXP_SCHEDULE_ONE_CYCLE), s.start_factor = 1.5, refused(s, "schedule.start_factor");
    s = each_of(MIXP_SCHEDULE_ONE_CYCLE), s.start_factor = nan, refused(s, "schedule.start_factor");
    s = each_of(MIXP_SCHEDULE_ONE_CYCLE), s.pct_start = 0.3, refused(s, "set only one");
    s = each_of(MIXP_SCHEDULE_ONE_CYCLE), s.pct_start = nan, refused(s, "schedule.pct_start");
    s = each_of(MIXP_SCHEDULE_ONE_CYCLE), s.warmup = 11, s.three_phase = 1,
        refused(s, "schedule.three_phase");
    s = each_of(MIXP_SCHEDULE_CONSTANT), s.start_factor = 1.5, refused(s, "schedule.start_factor");
    s = each_of(MIXP_SCHEDULE_POLYNOMIAL), s.power = -1.0, refused(s, "schedule.power");
    s = each_of(MIXP_SCHEDULE_POLYNOMIAL), s.total = 4, refused(s, "schedule.total");
    s = each_of(MIXP_SCHEDULE_WAVE), s.total = 4, refused(s, "schedule.total");
    s = each_of(MIXP_SCHEDULE_MULTI_STEP), s.gamma = 0.0, refused(s, "schedule.gamma");
    s = each_of(MIXP_SCHEDULE_MULTI_STEP), s.milestones[1] = 6, refused(s, "schedule.milestones");
    s = each_of(MIXP_SCHEDULE_MULTI_STEP), s.milestones[0] = 0, refused(s, "schedule.milestones");
    s = each_of(MIXP_SCHEDULE_MULTI_STEP), s.milestones[0] = -1, refused(s, "schedule.milestones");
    s = each_of(MIXP_SCHEDULE_RESTARTS), s.every = 0, refused(s, "schedule.every");
    s = each_of(MIXP_SCHEDULE_RESTARTS), s.growth = -1, refused(s, "schedule.growth");
    s = each_of(MIXP_SCHEDULE_CYCLIC), s.gamma = 1.5, refused(s, "schedule.gamma");
    s = each_of(MIXP_SCHEDULE_CYCLIC), s.decay = -1, refused(s, "schedule.decay");
    s = each_of(MIXP_SCHEDULE_CYCLIC_EXP), s.every = INT64_MAX, refused(s, "schedule.every");
    s = each_of(MIXP_SCHEDULE_FUNCTION), s.factor = NULL, refused(s, "schedule.factor is NULL");
    s = each_of(MIXP_SCHEDULE_FUNCTION), s.warmup = 3, refused(s, "leave schedule.warmup 0");
}

int main(void) {
    RUN(test_step);
    RUN(test_exponential);
    RUN(test_warm_up_and_least);
    RUN(test_one_cycle);
    RUN(test_one_cycle_corners);
    RUN(test_wsd);
    RUN(test_recorded);
    RUN(test_far_steps);
    RUN(test_in_an_optimizer);
    RUN(test_function);
    RUN(test_refused);
    return test_report();
}
