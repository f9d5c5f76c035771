/* test_watch_scale.c - a loss scale that is set, and steps that are skipped as spikes: compared
 * with plain models, through the public API only.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include <unistd.h>
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include "test.h"
#include "new_optimizer.h"
#include "numbers.h"
#include "scale_runs.h"

static const int64_t one[1] = { 1 };

static void fails(mixp_context *ctx, mixp_result got, mixp_result want, const char *part) {
    const char *why = "";
    CHECK_INT(got, want);
    mixp_context_error(ctx, &why);
    CHECK_TEXT(why, part);
    mixp_context_clear_error(ctx);
}

static void is_clean(mixp_context *ctx) {
    const char *why = "";
    CHECK_INT(mixp_context_error(ctx, &why), MIXP_OK);
    if (*why) printf("  %s\n", why);
}

/* --- the rule that predicts, alone --------------------------------------------------------- */

static mixp_scaler_desc predictive(void) {
    mixp_scaler_desc d;
    memset(&d, 0, sizeof d);
    d.rule = MIXP_RULE_PREDICTIVE;
    return d;
}

static mixp_scaler_state begin(const mixp_scaler_desc *d, mixp_scaler_rule *r) {
    mixp_scaler_state s;
    CHECK_INT(mixp_scaler_rule_resolve(d, r), MIXP_OK);
    memset(&s, 0, sizeof s);
    s.scale = r->init_scale;
    s.hysteresis_left = 1;
    return s;
}

static int is_power_of_2(double x) {
    int e;
    return frexp(x, &e) == 0.5;
}

/* Whatever the gradients are, the scale soon lies where largest * scale is 6 to 7 binades below. */
static void test_sets_the_scale(void) {
    for (int i = -30; i <= 30; i++) {
        mixp_scaler_desc d = predictive();
        mixp_scaler_rule r;
        mixp_scaler_state s = begin(&d, &r);
        const float largest = ldexpf(1.37f, i);
        double before, now = (double)s.scale;
        for (int k = 0; k < 12; k++) {
            before = now;
            mixpi_scaler_note_unscaled(&s, largest);
            mixpi_scaler_advance(&s, &r, 0);
            now = (double)s.scale;
            CHECK(is_power_of_2(now));
            CHECK(now <= 16.0 * before && 16.0 * now >= before);        /* 4 binades a step */
        }
        CHECK((double)largest * now <= 65504.0 / 64);
        CHECK((double)largest * now > 65504.0 / 128);
    }
}

static void test_other_margins(void) {
    mixp_scaler_desc d = predictive();
    mixp_scaler_rule r;
    d.margin = 1;
    mixp_scaler_state s = begin(&d, &r);
    mixpi_scaler_note_unscaled(&s, 0.0625f);
    mixpi_scaler_advance(&s, &r, 0);
    CHECK(s.scale == 262144.0f);        /* 65504 / 2 / 0.0625 = 524032 */
    d.max_scale = 64.0f;
    d.init_scale = 8.0f;
    s = begin(&d, &r);
    mixpi_scaler_note_unscaled(&s, 0.25f);
    mixpi_scaler_advance(&s, &r, 0);
    CHECK(s.scale == 64.0f);
}

/* Nothing is known of gradients that are all 0, or not finite. */
static void test_nothing_to_go_by(void) {
    mixp_scaler_desc d = predictive();
    mixp_scaler_rule r;
    mixp_scaler_state s = begin(&d, &r);
    for (int i = 0; i < 40; i++) {
        mixpi_scaler_note_unscaled(&s, i % 3 ? 0.0f : i % 2 ? HUGE_VALF : (float)NAN);
        mixpi_scaler_advance(&s, &r, 0);
    }
    CHECK(s.scale == 65536.0f);
}

/* An overflow halves at once; the next clean steps go to a 64th of what overflowed. */
static void test_backs_off(void) {
    mixp_scaler_desc d = predictive();
    mixp_scaler_rule r;
    mixp_scaler_state s = begin(&d, &r);
    mixpi_scaler_note_unscaled(&s, 0.1f);
    mixpi_scaler_advance(&s, &r, 0);
    CHECK(s.scale == 8192.0f);          /* 65504 / 64 / 0.1 = 10235 */
    mixpi_scaler_note_unscaled(&s, 0.1f);
    mixpi_scaler_advance(&s, &r, 1);
    CHECK(s.scale == 4096.0f);
    mixpi_scaler_note_unscaled(&s, 0.1f);
    mixpi_scaler_advance(&s, &r, 0);     /* what overflowed was 65504 / 8192 at least: aims at 128 */
    CHECK(s.scale == 256.0f);           /* at most 4 binades at once */
    mixpi_scaler_note_unscaled(&s, 0.1f);
    mixpi_scaler_advance(&s, &r, 0);
    CHECK(s.scale == 128.0f);
    CHECK_INT(s.skips, 1);
}

/* The model: doubles, loops, and frexp instead of bits. */
typedef struct model { double scale, largest, peak; int tracker; } model;

static void model_clean(model *m) {
    double aim = 65504.0 / 64, to, least = m->scale / 16, most = m->scale * 16;
    int e;
    if (m->largest * m->scale <= aim && m->tracker < 15 && m->peak > 0.0) {
        m->tracker++;
        return;
    }
    m->peak = (double)((float)m->peak * 0.957603281f);
    if (m->largest > 0.0 && m->peak > 4096 * m->largest) m->peak = 4096 * m->largest;
    if (m->largest > m->peak) m->peak = m->largest;
    m->largest = 0.0;
    m->tracker = 0;
    if (m->peak <= 0.0) return;
    (void)frexp(aim / m->peak, &e);
    to = ldexp(1.0, e - 1);
    m->scale = to < least ? least : to > most ? most : to;
    if (to < least || to > most) m->tracker = 15;
}

static void model_overflow(model *m) {
    double least = (double)(float)(65504.0 / m->scale);
    if (least > m->largest) m->largest = least;
    m->scale /= 2;
    m->tracker = 0;
}

static void test_predictive_model(void) {
    mixp_scaler_desc d = predictive();
    mixp_scaler_rule r;
    mixp_scaler_state s = begin(&d, &r);
    model m = { 65536.0, 0.0, 0.0, 0 };
    float level = 1.0f;
    int i, wrong = 0;
    for (i = 0; i < 200000 && !wrong; i++) {
        if (i % 100 == 0) level = ldexpf(1.0f, random_to(24) - 12);
        float largest = level * (float)exp(2.0 * random_value());
        if (random_to(40) == 0) largest *= 64.0f;
        int bad = (double)largest * m.scale > 65504.0;
        if (!bad) {
            mixpi_scaler_note_unscaled(&s, largest);
            if ((double)largest > m.largest) m.largest = (double)largest;
        }
        mixpi_scaler_advance(&s, &r, bad);
        if (bad) model_overflow(&m);
        else model_clean(&m);
        wrong = (double)s.scale < m.scale || (double)s.scale > m.scale;
        if (wrong) printf("  update %d: %g, not %g\n", i, (double)s.scale, m.scale);
    }
    CHECK(!wrong);
    CHECK(s.skips > 100 && s.skips < s.updates / 10);
}

/* --- spikes ------------------------------------------------------------------------------- */

/* One weight, whose gradient is a view: the norm is what the view holds. */
typedef struct rig {
    mixp_context   *ctx;
    mixp_optimizer *opt;
    mixp_scaler    *scaler;
    mixp_tensor    *w;
    float           grad, loss;
} rig;

static mixp_spike_rule spikes(mixp_spike_of of, int window, double z) {
    mixp_spike_rule s;
    memset(&s, 0, sizeof s);
    s.of = of;
    s.window = window;
    s.z = z;
    return s;
}

static void open_rig(rig *r, mixp_spike_rule spike, const mixp_scaler_desc *scaler) {
    mixp_optimizer_desc d = mixp_adamw_defaults();
    d.spike = spike;
    memset(r, 0, sizeof *r);
    r->ctx = mixp_context_new(NULL);
    r->w = mixp_param(r->ctx, "w", MIXP_F32, 1, one);
    mixp_fill(r->w, 1.0);
    r->opt = mixp_optimizer_new(r->ctx, &d);
    r->scaler = mixp_scaler_new(r->ctx, scaler);
    CHECK(r->opt && r->scaler);
    mixp_optimizer_add(r->opt, r->w, mixp_view(r->ctx, "dw", MIXP_F32, 1, one, &r->grad));
}

static void close_rig(rig *r) {
    is_clean(r->ctx);
    mixp_context_free(r->ctx);
}

/* A step with this gradient and loss; the gradient is scaled where there is a scaler. */
static mixp_verdict step_of(rig *r, double grad, double loss, int with_scaler) {
    const int looks = r->opt && loss != 0.0;
    double before = mixp_item(r->w);
    mixp_step_begin(r->ctx);
    r->grad = (float)grad;
    r->loss = (float)loss;
    if (with_scaler) r->grad *= mixp_scaler_loss_scale(r->scaler);
    if (looks) CHECK_INT(mixp_optimizer_set_loss(r->opt, mixp_input(r->ctx, MIXP_F32, 1, one, &r->loss)),
                         MIXP_OK);
    if (with_scaler) {
        CHECK_INT(mixp_scaler_step(r->scaler, r->opt), MIXP_OK);
        CHECK_INT(mixp_scaler_update(r->scaler), MIXP_OK);
    } else CHECK_INT(mixp_optimizer_step(r->opt), MIXP_OK);
    mixp_verdict v = mixp_optimizer_verdict(r->opt);
    if (v.outcome == MIXP_STEP_SKIPPED) CHECK(mixp_item(r->w) <= before && mixp_item(r->w) >= before);
    else CHECK(mixp_item(r->w) < before || mixp_item(r->w) > before);
    CHECK((v.outcome == MIXP_STEP_SKIPPED) == (v.reason != MIXP_SKIP_NONE));
    return v;
}

/* The model: a list of all values that entered, and plain sums over its last few. */
typedef struct history { double values[4000]; int n, in_a_row; } history;

static double history_z(const history *h, int window, double x) {
    int n = h->n < window ? h->n : window, i;
    long double sum = 0.0L, squares = 0.0L, mean, sd;
    if (2 * n < window) return 0.0;
    for (i = h->n - n; i < h->n; i++) sum += h->values[i];
    mean = sum / n;
    for (i = h->n - n; i < h->n; i++) squares += (h->values[i] - mean) * (h->values[i] - mean);
    sd = sqrtl(squares / (n - 1));
    if (sd < fabsl(mean) / 1000) sd = fabsl(mean) / 1000;
    return (double)((x - mean) / sd);
}

/* Random values with spikes among them, planted where the model has a clear mind. */
static void against_history(mixp_spike_of of, int window, double z, int with_scaler) {
    static history h;
    rig r;
    int i, skipped = 0, unclear = 0;
    memset(&h, 0, sizeof h);
    open_rig(&r, spikes(of, window, z), NULL);
    if (!window) window = 128;
    if (!(z > 0.0)) z = 6.0;
    for (i = 0; i < 1500; i++) {
        float x = (float)(3.0 + random_value() + 0.001 * i);
        if (random_to(20) == 0) x *= (float)(1 + random_to(8));
        double want = history_z(&h, window, (double)x);
        if (fabs(want - z) < 1e-3) { unclear++; continue; }
        mixp_verdict v = of == MIXP_SPIKE_NORM ? step_of(&r, (double)x, 0.0, with_scaler)
                                  : step_of(&r, 1.0, (double)x, with_scaler);
        CHECK_NEAR(v.spike_z, want, 1e-4 * (1.0 + fabs(want)));
        if (want > z && h.in_a_row < 8) {
            CHECK_INT(v.reason, of == MIXP_SPIKE_NORM ? MIXP_SKIP_SPIKE_NORM : MIXP_SKIP_SPIKE_LOSS);
            h.in_a_row++;
            skipped++;
            continue;
        }
        if (want > z) h.n = 0;
        CHECK_INT(v.outcome, MIXP_STEP_APPLIED);
        h.values[h.n++] = (double)x;
        h.in_a_row = 0;
    }
    CHECK(unclear < 20 && skipped > 20);
    CHECK_INT(mixp_optimizer_verdict(r.opt).skipped, skipped);
    if (with_scaler) CHECK(mixp_scaler_loss_scale(r.scaler) >= 65536.0f);       /* no overflow */
    close_rig(&r);
}

static void test_spikes_of_norms(void) { against_history(MIXP_SPIKE_NORM, 0, 0.0, 0); }
static void test_spikes_of_losses(void) { against_history(MIXP_SPIKE_LOSS, 0, 0.0, 0); }
static void test_spikes_with_a_scaler(void) { against_history(MIXP_SPIKE_NORM, 33, 4.0, 1); }
static void test_spikes_of_a_short_window(void) { against_history(MIXP_SPIKE_LOSS, 4, 25.0, 1); }

/* Either value may be the spike; the verdict says which. */
static void test_spikes_of_both(void) {
    rig r;
    open_rig(&r, spikes(MIXP_SPIKE_BOTH, 16, 0.0), NULL);
    for (int i = 0; i < 16; i++) step_of(&r, 1.0 + 0.1 * (i % 3), 5.0 + 0.1 * (i % 4), 0);
    mixp_verdict v = step_of(&r, 9.0, 5.1, 0);
    CHECK_INT(v.reason, MIXP_SKIP_SPIKE_NORM);
    CHECK_NEAR(v.spike_mean, 1.09375, 1e-6);
    CHECK_NEAR(v.spike_sd, 0.08539125638, 1e-6);
    v = step_of(&r, 1.1, 9.0, 0);
    CHECK_INT(v.reason, MIXP_SKIP_SPIKE_LOSS);
    CHECK_NEAR(v.spike_mean, 5.15, 1e-6);
    v = step_of(&r, 1.1, 5.1, 0);
    CHECK_INT(v.outcome, MIXP_STEP_APPLIED);
    CHECK(v.spike_z < 1.0);
    close_rig(&r);
}

/* Ever so often it is no spike any more: nobody waits for ever. */
static void test_a_new_level(void) {
    rig r;
    int i, skipped = 0;
    open_rig(&r, spikes(MIXP_SPIKE_NORM, 16, 0.0), NULL);
    for (i = 0; i < 16; i++) step_of(&r, 1.0 + 0.1 * (i % 3), 0.0, 0);
    for (i = 0; i < 40; i++) skipped += step_of(&r, 50.0 + 0.1 * (i % 3), 0.0, 0).outcome == MIXP_STEP_SKIPPED;
    CHECK_INT(skipped, 8);
    CHECK_INT(step_of(&r, 1.0, 0.0, 0).outcome, MIXP_STEP_APPLIED);     /* down is no spike */
    close_rig(&r);
}

/* A value that is not finite is skipped, however few steps there were, and never lets go. */
static void test_not_finite(void) {
    rig r;
    mixp_verdict v;
    open_rig(&r, spikes(MIXP_SPIKE_BOTH, 8, 0.0), NULL);
    for (int i = 0; i < 12; i++) {
        v = step_of(&r, 1.0, (double)(i % 2 ? HUGE_VALF : (float)NAN), 0);
        CHECK_INT(v.reason, MIXP_SKIP_SPIKE_LOSS);
        CHECK(v.spike_z > 1e300);
    }
    v = step_of(&r, (double)HUGE_VALF, 1.0, 0);
    CHECK_INT(v.reason, MIXP_SKIP_SPIKE_NORM);
    for (int i = 0; i < 8; i++) {
        v = step_of(&r, 1.0 + 0.1 * (i % 2), 2.0, 0);
        CHECK_INT(v.outcome, MIXP_STEP_APPLIED);
        CHECK(fabs(v.spike_z) < 3.0);
    }
    v = step_of(&r, (double)NAN, 2.0, 1);       /* a scaler says first what it is */
    CHECK_INT(v.reason, MIXP_SKIP_NON_FINITE);
    CHECK(mixp_scaler_loss_scale(r.scaler) == 32768.0f);
    v = step_of(&r, 1000.0, 2.0, 1);
    CHECK_INT(v.reason, MIXP_SKIP_SPIKE_NORM);
    CHECK(mixp_scaler_loss_scale(r.scaler) == 32768.0f);
    close_rig(&r);
}

static void test_flat_windows(void) {
    rig r;
    open_rig(&r, spikes(MIXP_SPIKE_LOSS, 8, 0.0), NULL);
    for (int i = 0; i < 8; i++) step_of(&r, 1.0, 2.0, 0);
    CHECK_INT(step_of(&r, 1.0, 2.01, 0).outcome, MIXP_STEP_APPLIED);   /* 5 thousandths */
    CHECK_INT(step_of(&r, 1.0, 2.1, 0).outcome, MIXP_STEP_SKIPPED);
    close_rig(&r);
}

static void test_spikes_refused(void) {
    static const int64_t two[1] = { 2 };
    rig r;
    float pair[2] = { 0, 0 };
    mixp_optimizer_desc d = mixp_adamw_defaults();
    open_rig(&r, spikes(MIXP_SPIKE_NORM, 0, 0.0), NULL);
    fails(r.ctx, mixp_optimizer_set_loss(r.opt, r.w), MIXP_ERR_ARGUMENT, "MIXP_SPIKE_LOSS");
    close_rig(&r);
    open_rig(&r, spikes(MIXP_SPIKE_LOSS, 0, 0.0), NULL);
    mixp_step_begin(r.ctx);
    r.grad = 1.0f;
    fails(r.ctx, mixp_optimizer_step(r.opt), MIXP_ERR_ORDER, "mixp_optimizer_set_loss");
    fails(r.ctx, mixp_scaler_step(r.scaler, r.opt), MIXP_ERR_ORDER, "mixp_optimizer_set_loss");
    fails(r.ctx, mixp_optimizer_set_loss(r.opt, mixp_input(r.ctx, MIXP_F32, 1, two, pair)),
          MIXP_ERR_ARGUMENT, "one element");
    fails(r.ctx, mixp_optimizer_set_loss(r.opt, mixp_input(r.ctx, MIXP_F16, 1, one, pair)),
          MIXP_ERR_DTYPE, "f16");
    CHECK_INT(mixp_optimizer_set_loss(r.opt, NULL), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_optimizer_set_loss(NULL, r.w), MIXP_ERR_ARGUMENT);
    mixp_tensor *stale = mixp_mul(r.ctx, r.w, r.w);
    CHECK_INT(mixp_optimizer_set_loss(r.opt, stale), MIXP_OK);
    mixp_step_begin(r.ctx);
    fails(r.ctx, mixp_optimizer_step(r.opt), MIXP_ERR_ORDER, "mixp_optimizer_set_loss");
    fails(r.ctx, mixp_optimizer_set_loss(r.opt, stale), MIXP_ERR_ORDER, "earlier step");
    CHECK_INT(mixp_optimizer_verdict(r.opt).outcome, MIXP_STEP_NONE);
    d.spike = spikes(MIXP_SPIKE_NORM, 3, 0.0);
    CHECK(mixp_optimizer_new(r.ctx, &d) == NULL);
    fails(r.ctx, mixp_context_error(r.ctx, NULL), MIXP_ERR_ARGUMENT, "spike.window");
    d.spike = spikes(MIXP_SPIKE_NORM, 0, -1.0);
    CHECK(mixp_optimizer_new(r.ctx, &d) == NULL);
    fails(r.ctx, mixp_context_error(r.ctx, NULL), MIXP_ERR_ARGUMENT, "spike.z");
    d.spike = spikes((mixp_spike_of)7, 0, 0.0);
    CHECK(mixp_optimizer_new(r.ctx, &d) == NULL);
    fails(r.ctx, mixp_context_error(r.ctx, NULL), MIXP_ERR_ARGUMENT, "spike.of");
    close_rig(&r);
}

/* --- how gradients lie in their low dtype ---------------------------------------------------- */

enum { COUNTED = 4 };
static const int64_t counted_n[COUNTED] = { 1, 1000, 33001, 77 };
static const mixp_dtype counted_dtype[COUNTED] = { MIXP_F32, MIXP_F32, MIXP_F16, MIXP_BF16 };

typedef struct counts { double count, nonfinite, zeros, flushed, least, subnormal, largest, exponents[256]; } counts;

/* One element as a double loop counts it: by what rounding it to the low dtype gives. */
static void count_one(counts *c, float x, mixp_dtype low) {
    double to = low == MIXP_F16 ? (double)mixp_f32_from_f16(mixp_f16_from_f32(x))
                                : (double)mixp_f32_from_bf16(mixp_bf16_from_f32(x));
    double normal = ldexp(1.0, low == MIXP_F16 ? -14 : -126), tiny = ldexp(normal, low == MIXP_F16 ? -10 : -7);
    int e;
    c->count++;
    if (!isfinite(x)) e = 128;
    else if (fpclassify(x) != FP_NORMAL) e = -127;
    else (void)frexp((double)x, &e), e--;
    c->exponents[e + 127]++;
    if (!isfinite(x)) { c->nonfinite++; return; }
    if (fabs((double)x) > c->largest) c->largest = fabs((double)x);
    if (fpclassify(x) == FP_ZERO) c->zeros++;
    else if (fpclassify(to) == FP_ZERO) c->flushed++;
    else if (fabs(to) < normal) c->subnormal++;
    if (fabs(to) <= tiny && fabs(to) >= tiny) c->least++;
}

static void add_counts(counts *to, const counts *c) {
    to->count += c->count;
    to->nonfinite += c->nonfinite;
    to->zeros += c->zeros;
    to->flushed += c->flushed;
    to->least += c->least;
    to->subnormal += c->subnormal;
    if (c->largest > to->largest) to->largest = c->largest;
    for (int e = 0; e < 256; e++) to->exponents[e] += c->exponents[e];
}

static void same_counts(const mixp_underflow *u, const counts *c) {
    int e, wrong = 0;
    CHECK_INT(u->look.count, c->count);
    CHECK_INT(u->look.nonfinite, c->nonfinite);
    CHECK_INT(u->look.zeros, c->zeros);
    CHECK_INT(u->look.flushed, c->flushed);
    CHECK_INT(u->look.least, c->least);
    CHECK_INT(u->look.subnormal, c->subnormal);
    CHECK((double)u->look.largest <= c->largest && (double)u->look.largest >= c->largest);
    for (e = 0; e < 256; e++) wrong += u->exponents[e] != (int64_t)c->exponents[e];
    CHECK_INT(wrong, 0);
}

/* Gradients of all sizes, in views of every dtype; one step is counted, the ones beside it are not. */
static void underflow_with(int unscale) {
    static float f32[2][1000];
    static mixp_f16 f16[33001];
    static mixp_bf16 bf16[77];
    void *const data[COUNTED] = { f32[0], f32[1], f16, bf16 };
    static const char *const names[COUNTED] = { "a", "b", "c", "d" };
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_scaler *scaler = mixp_scaler_new(ctx, NULL);
    mixp_optimizer *opt = new_sgd(ctx);
    mixp_underflow u;
    counts all, c[COUNTED];
    CHECK(mixp_scaler_loss_scale(scaler) > 0.0f);       /* whoever multiplies by it asks */
    CHECK_INT(mixp_optimizer_underflow(opt, -1, &u), 0);
    for (int i = 0; i < COUNTED; i++) {
        mixp_tensor *w = mixp_param(ctx, names[i], i == 1 ? MIXP_BF16 : MIXP_F32, 1, &counted_n[i]);
        mixp_optimizer_add(opt, w, mixp_view(ctx, names[i], counted_dtype[i], 1, &counted_n[i], data[i]));
    }
    CHECK_INT(mixp_optimizer_underflow(opt, 2, &u), 1);
    CHECK_INT(u.step, -1);
    for (int step = 0; step < 3; step++) {
        mixp_step_begin(ctx);
        if (step == 1) memset(c, 0, sizeof c);
        for (int i = 0; i < COUNTED; i++)
            for (int64_t k = 0; k < counted_n[i]; k++) {
                float x = ldexpf((float)random_value(), random_to(50) - 40);
                if (random_to(10) == 0) x = 0.0f;
                if (step == 1 && random_to(100) == 0) x = random_to(2) ? HUGE_VALF : (float)NAN;
                if (i < 2) f32[i][k] = x;
                else if (i == 2) x = mixp_f32_from_f16(f16[k] = mixp_f16_from_f32(x));
                else x = mixp_f32_from_bf16(bf16[k] = mixp_bf16_from_f32(x));
                if (step == 1) count_one(&c[i], x, i == 1 || i == 3 ? MIXP_BF16 : MIXP_F16);
            }
        if (step == 1) CHECK_INT(mixp_optimizer_sample(opt), MIXP_OK);
        if (unscale) CHECK_INT(mixp_scaler_unscale(scaler, opt), MIXP_OK);
        CHECK_INT(mixp_scaler_step(scaler, opt), MIXP_OK);
        CHECK_INT(mixp_scaler_update(scaler), MIXP_OK);
    }
    memset(&all, 0, sizeof all);
    for (int i = 0; i < COUNTED; i++) {
        double values = c[i].count - c[i].zeros - c[i].nonfinite;
        CHECK_INT(mixp_optimizer_underflow(opt, i, &u), 1);
        CHECK_TEXT(u.name, names[i]);
        CHECK_INT(u.step, 2);
        CHECK_INT(u.low, i == 1 || i == 3 ? MIXP_BF16 : MIXP_F16);
        same_counts(&u, &c[i]);
        if (i == 2) CHECK_NEAR(u.flushed, 0.5 * c[i].least / (values + 0.5 * c[i].least), 1e-12);
        if (i < 2) CHECK_NEAR(u.flushed, values > 0.0 ? c[i].flushed / values : 0.0, 1e-12);
        if (i == 1) CHECK_NEAR(u.subnormal, c[i].subnormal / values, 1e-12);
        add_counts(&all, &c[i]);
    }
    CHECK_INT(mixp_optimizer_underflow(opt, -1, &u), 1);
    same_counts(&u, &all);
    CHECK_INT(mixp_optimizer_underflow(opt, COUNTED, &u), 0);
    CHECK_INT(mixp_optimizer_underflow(opt, -2, &u), 0);
    CHECK_INT(mixp_optimizer_underflow(opt, 0, NULL), 0);
    CHECK_INT(mixp_optimizer_sample(NULL), MIXP_ERR_ARGUMENT);
    is_clean(ctx);
    mixp_context_free(ctx);
}
static void test_underflow(void) { underflow_with(0); }
static void test_underflow_unscaled(void) { underflow_with(1); }

/* Unscaled, counted and then given up: the next step that is to be counted is, by step or unscale. */
static void test_underflow_after_a_step_given_up(void) {
    const int64_t n[1] = { 3 };
    float g[3];
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_scaler *scaler = mixp_scaler_new(ctx, NULL);
    mixp_optimizer *opt = new_sgd(ctx);
    mixp_underflow u;
    CHECK(mixp_scaler_loss_scale(scaler) > 0.0f);
    mixp_optimizer_add(opt, mixp_param(ctx, "w", MIXP_F32, 1, n), mixp_view(ctx, "g", MIXP_F32, 1, n, g));
    for (int step = 1; step < 5; step++) {
        mixp_step_begin(ctx);
        g[0] = g[1] = g[2] = (float)step;
        CHECK_INT(mixp_optimizer_sample(opt), MIXP_OK);
        if (step != 4) CHECK_INT(mixp_scaler_unscale(scaler, opt), MIXP_OK);
        if (step == 4) CHECK_INT(mixp_scaler_step(scaler, opt), MIXP_OK);
        CHECK_INT(mixp_scaler_update(scaler), MIXP_OK);
        CHECK_INT(mixp_optimizer_underflow(opt, 0, &u), 1);
        CHECK_INT(u.step, step);
        CHECK_NEAR(u.look.largest, step, 0);
    }
    is_clean(ctx);
    mixp_context_free(ctx);
}

/* x to the nearest number of so many digits, ties to even; none is finer than 2^lowest. */
static double rounded(double x, int digits, int lowest) {
    int e;
    (void)frexp(x, &e);
    double unit = ldexp(1.0, e - digits > lowest ? e - digits : lowest);
    return nearbyint(x / unit) * unit;
}

/* Plain SGD on weights of every dtype: what moved, and what a low weight alone would not have. */
static void lost_with(mixp_dtype dtype) {
    enum { N = 40000 };
    static float before[N], after[N], g[N];
    const int64_t n[1] = { N };
    const mixp_dtype low = dtype == MIXP_F32 ? MIXP_F16 : dtype;
    const int digits = low == MIXP_F16 ? 11 : 8, lowest = low == MIXP_F16 ? -24 : -133;
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_optimizer_desc d = mixp_sgd_defaults();
    mixp_tensor *w = mixp_param(ctx, "w", dtype, 1, n);
    double updates = 0, lost = 0;
    mixp_underflow u;
    d.lr = 1.0;
    d.no_master = 1;
    mixp_optimizer *opt = mixp_optimizer_new(ctx, &d);
    for (int i = 0; i < N; i++) {
        before[i] = ldexpf((float)random_value(), random_to(30) - 20);
        g[i] = random_to(5) ? before[i] * ldexpf((float)random_value(), -random_to(20)) : 0.0f;
    }
    mixp_write(w, before, MIXP_F32, N);
    mixp_read(w, before, MIXP_F32, N);
    mixp_optimizer_add(opt, w, mixp_view(ctx, "g", MIXP_F32, 1, n, g));
    mixp_step_begin(ctx);
    CHECK_INT(mixp_optimizer_step(opt), MIXP_OK);       /* its updates are not counted */
    mixp_read(w, before, MIXP_F32, N);
    CHECK_INT(mixp_optimizer_sample(opt), MIXP_OK);
    CHECK_INT(mixp_optimizer_step(opt), MIXP_OK);
    mixp_read(w, after, MIXP_F32, N);
    for (int i = 0; i < N; i++) {
        /* Without a master weight what is stored is rounded: the update itself is told by g. */
        double held = rounded((double)before[i], digits, lowest);
        double to = (double)(dtype == MIXP_F32 ? after[i] : before[i] - g[i]), moved = to - (double)before[i];
        if (moved >= 0.0 && moved <= 0.0) continue;
        updates++;
        moved = rounded(held + moved, digits, lowest);
        lost += moved >= held && moved <= held;
    }
    CHECK_INT(mixp_optimizer_underflow(opt, 0, &u), 1);
    CHECK_INT(u.lost.updates, updates);
    CHECK_INT(u.lost.lost, lost);
    CHECK(lost > 0.2 * updates && lost < 0.9 * updates);
    is_clean(ctx);
    mixp_context_free(ctx);
}
static void test_lost_updates(void) {
    lost_with(MIXP_F32);
    lost_with(MIXP_F16);
    lost_with(MIXP_BF16);
}

/* --- checkpoints ---------------------------------------------------------------------------- */

static mixp_result store(rig *r, const char *path, int load) {
    mixp_checkpoint what;
    memset(&what, 0, sizeof what);
    what.ctx = r->ctx;
    what.scaler = r->scaler;
    what.optimizers = &r->opt;
    what.n_optimizers = 1;
    return load ? mixp_checkpoint_load(path, &what) : mixp_checkpoint_save(path, &what);
}

static const char *place(void) {
    static char path[256];
    const char *dir = getenv("TMPDIR");
    snprintf(path, sizeof path, "%s/mixprec_watch_scale_%ld.safetensors", dir && *dir ? dir : "/tmp",
             (long)getpid());
    return path;
}

static double noise(int i) { return 2.0 + 0.01 * (i * 37 % 50) + (i % 25 == 24 ? 30.0 : 0.0); }

/* Stopped in the middle and resumed: the same steps skipped, the same scales, the same weight. */
static void test_resume(void) {
    mixp_scaler_desc d = predictive();
    rig whole, half;
    int i;
    open_rig(&whole, spikes(MIXP_SPIKE_BOTH, 20, 0.0), &d);
    open_rig(&half, spikes(MIXP_SPIKE_BOTH, 20, 0.0), &d);
    for (i = 0; i < 77; i++) step_of(&whole, noise(i), 1.0 + noise(i + 3), 1);
    CHECK_INT(store(&whole, place(), 0), MIXP_OK);
    CHECK_INT(store(&half, place(), 1), MIXP_OK);
    for (; i < 150; i++) {
        mixp_verdict a = step_of(&whole, noise(i), 1.0 + noise(i + 3), 1);
        mixp_verdict b = step_of(&half, noise(i), 1.0 + noise(i + 3), 1);
        CHECK_INT(a.reason, b.reason);
        CHECK_INT(a.skipped, b.skipped);
        CHECK(f32_bits(a.scale) == f32_bits(b.scale));
        CHECK(memcmp(&a.spike_z, &b.spike_z, sizeof a.spike_z) == 0);
    }
    CHECK(mixp_optimizer_verdict(whole.opt).skipped > 8);
    CHECK(f32_bits((float)mixp_item(whole.w)) == f32_bits((float)mixp_item(half.w)));
    close_rig(&whole);
    close_rig(&half);
    remove(place());
}

/* A file from before there were spikes and predictions, and one with them for a program without. */
static void test_other_files(void) {
    mixp_scaler_desc d = predictive();
    rig plain, watched;
    open_rig(&plain, spikes(MIXP_SPIKE_OFF, 0, 0.0), NULL);
    open_rig(&watched, spikes(MIXP_SPIKE_NORM, 20, 0.0), &d);
    for (int i = 0; i < 30; i++) {
        step_of(&plain, noise(i), 0.0, 1);
        step_of(&watched, noise(i), 0.0, 1);
    }
    CHECK_INT(store(&plain, place(), 0), MIXP_OK);
    CHECK_INT(store(&watched, place(), 1), MIXP_OK);
    CHECK_INT(step_of(&watched, 3.0, 0.0, 1).applied, 31);
    CHECK(mixp_optimizer_verdict(watched.opt).spike_z == 0.0);          /* it began anew */
    for (int i = 0; i < 30; i++) step_of(&watched, noise(i), 0.0, 1);
    CHECK_INT(store(&watched, place(), 0), MIXP_OK);
    CHECK_INT(store(&plain, place(), 1), MIXP_OK);
    CHECK_INT(mixp_optimizer_applied(plain.opt), mixp_optimizer_applied(watched.opt));
    CHECK(mixp_scaler_loss_scale(plain.scaler) == mixp_scaler_loss_scale(watched.scaler));
    close_rig(&plain);
    close_rig(&watched);
    remove(place());
}

/* --- small networks ------------------------------------------------------------------------- */

/* Planted spikes, 1,000 steps: at most a tenth of the skips, no more underflow, no worse an end. Under a guard one element
 * of a million may underflow more, because sums in another order (AMX) end a step elsewhere. */
static void test_spiked_runs(void) {
    for (uint64_t seed = 1; seed <= 3; seed++) {
        const scale_setup by_torch = run_spiked(seed, MIXP_RULE_TORCH);
        const scale_setup set = run_spiked(seed, MIXP_RULE_PREDICTIVE);
        scale_setup guarded = set;
        scale_result a = scale_run(&by_torch), b = scale_run(&set), c;
        guarded.guarded = 1;
        c = scale_run(&guarded);
        CHECK(!a.error[0] && !b.error[0] && !c.error[0]);
        CHECK(10 * c.skipped <= a.skipped && c.flushed <= a.flushed + 1e-6 && c.loss <= 1.01 * a.loss);
        CHECK(a.spikes >= 10 && a.spikes == b.spikes);
        CHECK(a.skipped >= 20);
        CHECK(10 * b.skipped <= a.skipped);
        CHECK(b.flushed <= a.flushed);
        CHECK(b.loss <= 1.01 * a.loss);
        if (getenv("MIXPREC_SHOW"))
            printf("  seed %d: %d and %d skips, flushed %g and %g, losses %g and %g\n", (int)seed,
                   a.skipped, b.skipped, a.flushed, b.flushed, a.loss, b.loss);
    }
}

/* Larger ones, which come out of nothing, and PyTorch's rule at its own interval. Up to 2^8 the
 * margin and what is remembered suffice; up to 2^20 the first cannot be foreseen, nor how large it
 * was: a third of the skips. */
static void spiked_runs_to(int most, int share) {
    for (uint64_t seed = 1; seed <= 3; seed++) {
        scale_setup by_torch = run_spiked(seed, MIXP_RULE_TORCH), set;
        by_torch.spike_least = 4;
        by_torch.spike_most = most;
        by_torch.scaler.growth_interval = 0;
        set = by_torch;
        set.scaler.rule = MIXP_RULE_PREDICTIVE;
        scale_result a = scale_run(&by_torch);
        scale_result b = scale_run(&set);
        CHECK(!a.error[0] && !b.error[0]);
        CHECK(a.spikes >= 10 && a.spikes == b.spikes);
        CHECK(a.skipped >= 1);
        CHECK(share * b.skipped <= a.skipped);
        CHECK(b.flushed <= a.flushed + 1e-5);
        CHECK(b.loss <= 1.01 * a.loss);
    }
}
static void test_spikes_out_of_nothing(void) {
    spiked_runs_to(8, 10);
    spiked_runs_to(20, 3);
}

/* A gradient on the way back is larger than any of a parameter: the guard sees it, and the scale
 * makes room for it. */
static void test_met_on_the_way_back(void) {
    static const int64_t many[2] = { 64, 64 };
    static float x[64 * 64];
    float scales[2];
    for (int i = 0; i < 64 * 64; i++) x[i] = 0.00390625f;
    for (int guarded = 0; guarded < 2; guarded++) {
        mixp_context *ctx = mixp_context_new(NULL);
        mixp_scaler_desc d = predictive();
        mixp_optimizer *opt = mixp_optimizer_new(ctx, NULL);
        mixp_tensor *w = mixp_param(ctx, "w", MIXP_F32, 2, many), *loss = NULL;
        d.init_scale = 1024.0f;
        mixp_scaler *scaler = mixp_scaler_new(ctx, &d);
        mixp_fill(w, 0.01);
        mixp_optimizer_add(opt, w, NULL);
        if (guarded) CHECK_INT(mixp_guard_start(ctx, NULL), MIXP_OK);
        for (int i = 0; i < 40; i++) {
            mixp_step_begin(ctx);
            mixp_zero_grad(opt);
            /* The slope of every y is 1, that of a weight 64 times 2^-8. */
            MIXP_AUTOCAST(ctx, MIXP_F16)
                loss = mixp_sum(ctx, mixp_linear(ctx, mixp_input(ctx, MIXP_F32, 2, many, x), w, NULL), MIXP_ALL, 0);
            mixp_backward(ctx, mixp_scaler_scale(scaler, loss));
            CHECK_INT(mixp_scaler_step(scaler, opt), MIXP_OK);
            CHECK_INT(mixp_scaler_update(scaler), MIXP_OK);
        }
        scales[guarded] = mixp_scaler_loss_scale(scaler);
        CHECK_INT(mixp_optimizer_verdict(opt).skipped, 0);
        is_clean(ctx);
        mixp_context_free(ctx);
    }
    CHECK_NEAR(scales[0], 2048.0, 0.0);         /* 65504 / 64 / 0.25 = 4,094 */
    CHECK_NEAR(scales[1], 512.0, 0.0);          /* 65504 / 64 / 1 = 1,023.5 */
}

/* The scaler forgotten: the counts say so, and the loss shows it; set from 1, the scale mends it. */
static void test_deep_runs(void) {
    for (uint64_t seed = 1; seed <= 3; seed++) {
        const scale_setup forgotten = run_deep(seed, MIXP_F16, MIXP_RULE_COUNT);
        const scale_setup set = run_deep(seed, MIXP_F16, MIXP_RULE_PREDICTIVE);
        const scale_setup f32 = run_deep(seed, MIXP_F32, MIXP_RULE_COUNT);
        scale_result a = scale_run(&forgotten), b = scale_run(&set), c = scale_run(&f32);
        CHECK(!a.error[0] && !b.error[0] && !c.error[0]);
        CHECK(a.flushed > 0.3);
        CHECK(a.loss > c.loss + 0.2);
        CHECK(b.flushed < 0.005);
        CHECK_NEAR(b.loss, c.loss, 0.01);
        CHECK_INT(b.skipped, 0);
        if (getenv("MIXPREC_SHOW"))
            printf("  seed %d: %.0f%% and %.2f%% flushed, %.0f%% zeros, losses %g, %g and %g\n", (int)seed,
                   100 * a.flushed, 100 * b.flushed, 100 * a.zeros, a.loss, b.loss, c.loss);
    }
}

int main(void) {
    RUN(test_spiked_runs);
    RUN(test_spikes_out_of_nothing);
    RUN(test_met_on_the_way_back);
    RUN(test_deep_runs);
    RUN(test_sets_the_scale);
    RUN(test_other_margins);
    RUN(test_nothing_to_go_by);
    RUN(test_backs_off);
    RUN(test_predictive_model);
    RUN(test_spikes_of_norms);
    RUN(test_spikes_of_losses);
    RUN(test_spikes_with_a_scaler);
    RUN(test_spikes_of_a_short_window);
    RUN(test_spikes_of_both);
    RUN(test_a_new_level);
    RUN(test_not_finite);
    RUN(test_flat_windows);
    RUN(test_spikes_refused);
    RUN(test_underflow);
    RUN(test_underflow_unscaled);
    RUN(test_underflow_after_a_step_given_up);
    RUN(test_lost_updates);
    RUN(test_resume);
    RUN(test_other_files);
    return test_report();
}
