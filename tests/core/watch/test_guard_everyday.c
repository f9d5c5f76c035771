/* test_guard_everyday.c - a guard in typical programs: masks of -Inf, dropout and evaluations, two
 * networks in turn, reshapes, unrolled loops. A run with a guard must do no worse than the same run
 * without it, and must name only the sites that left their range.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "mixprec.h"
#include "examples/compare.h"
#include "test.h"

enum { N = 8 };

/* Up to two networks of one square weight each, with an optimizer and a scaler each. */
typedef struct net {
    mixp_context   *ctx;
    mixp_tensor    *w[2];
    mixp_optimizer *opt[2];
    mixp_scaler    *scaler[2];
} net;

static net net_open(int networks, float scale, double lr, int guard) {
    static const int64_t shape[2] = { N, N };
    static const char *const names[2] = { "D", "G" };
    mixp_optimizer_desc sgd = mixp_sgd_defaults();
    mixp_scaler_desc rule;
    net m;
    memset(&m, 0, sizeof m);
    memset(&rule, 0, sizeof rule);
    rule.init_scale = scale;
    sgd.lr = lr;
    m.ctx = mixp_context_new(NULL);
    for (int k = 0; k < networks; k++) {
        m.w[k] = mixp_param(m.ctx, networks > 1 ? names[k] : "w", MIXP_F32, 2, shape);
        m.opt[k] = mixp_optimizer_new(m.ctx, &sgd);
        m.scaler[k] = mixp_scaler_new(m.ctx, &rule);
        mixp_optimizer_add(m.opt[k], m.w[k], NULL);
    }
    if (guard) CHECK_INT(mixp_guard_start(m.ctx, NULL), MIXP_OK);
    return m;
}

static void net_close(net *m) {
    const char *why = "";
    CHECK_INT(mixp_context_error(m->ctx, &why), MIXP_OK);
    if (*why) printf("  %s\n", why);
    mixp_context_free(m->ctx);
}

static mixp_tensor *data(const net *m, int rows, int cols, const float *x) {
    int64_t shape[2];
    shape[0] = rows;
    shape[1] = cols;
    return mixp_input(m->ctx, MIXP_F32, 2, shape, x);
}

/* Backward, step and update of network k. */
static void learn(const net *m, int k, mixp_tensor *loss) {
    mixp_backward(m->ctx, mixp_scaler_scale(m->scaler[k], loss));
    mixp_scaler_step(m->scaler[k], m->opt[k]);
    mixp_scaler_update(m->scaler[k]);
}

/* Events of a kind; of any kind for MIXP_EVENT_COUNT. */
static int events(const net *m, mixp_event_kind kind) {
    mixp_event e;
    int i, n = 0;
    for (i = 0; mixp_guard_event(m->ctx, i, &e); i++) n += kind == MIXP_EVENT_COUNT || e.kind == kind;
    return n;
}

static void show(const net *m) {
    mixp_event e;
    char text[512];
    for (int i = 0; getenv("SHOW") && mixp_guard_event(m->ctx, i, &e); i++)
        printf("    %s\n", mixp_event_text(&e, text, sizeof text));
}

/* --- masks of -Inf ------------------------------------------------------------------------------ */

enum { FILLED, ADDED, CHOSEN, LOGGED, KEPT, MASKS };

/* Scores whose upper triangle is -Inf, in one of the ways in which programs write that. */
static mixp_tensor *masked(const net *m, mixp_tensor *scores, int how, mixp_tensor *kept) {
    static const int64_t shape[2] = { N, N }, one[2] = { 1, 1 };
    const float inf = INFINITY, low = -inf;
    float added[N * N], ones[N * N];
    uint8_t mask[N * N];
    for (int i = 0; i < N * N; i++) {
        mask[i] = i % N > i / N;
        added[i] = mask[i] ? -inf : 0.0f;
        ones[i] = mask[i] ? 0.0f : 1.0f;
    }
    switch (how) {
    case FILLED:
        return mixp_masked_fill(m->ctx, scores, mixp_input(m->ctx, MIXP_U8, 2, shape, mask), -inf);
    case ADDED: return mixp_add(m->ctx, scores, data(m, N, N, added));
    case CHOSEN:
        return mixp_where(m->ctx, mixp_input(m->ctx, MIXP_U8, 2, shape, mask),
                          mixp_input(m->ctx, MIXP_F32, 2, one, &low), scores);
    case LOGGED: return mixp_add(m->ctx, scores, mixp_log(m->ctx, data(m, N, N, ones)));
    default: return mixp_add(m->ctx, scores, kept);
    }
}

/* Hand-written attention over a batch that stays. The loss is so large that the first scale must
 * fall. Returns the loss at the end. */
static double attend(net *m, int how, int level, int retry, int steps, int *skipped) {
    static const int64_t shape[2] = { N, N };
    float x[N * N], t[N * N], low[N * N];
    mixp_tensor *loss = NULL, *kept = NULL;
    for (int i = 0; i < N * N; i++) {
        x[i] = (float)(i * 37 % 19 - 9) / 4;
        t[i] = (float)(i % 5);
        low[i] = i % N > i / N ? -(float)INFINITY : 0.0f;
    }
    if (how == KEPT) {
        kept = mixp_param(m->ctx, "mask", MIXP_F32, 2, shape);
        mixp_write(kept, low, MIXP_F32, N * N);
        mixp_tensor_set_requires_grad(kept, 0);
    }
    mixp_init_normal(m->w[0], 0, 0.3);
    mixp_autocast_set_level(m->ctx, level);
    for (int step = 0; step < steps && !mixp_context_error(m->ctx, NULL); step++)
        do {
            mixp_step_begin(m->ctx);
            mixp_zero_grad(m->opt[0]);
            MIXP_AUTOCAST(m->ctx, MIXP_F16) {
                mixp_tensor *h = mixp_linear(m->ctx, data(m, N, N, x), m->w[0], NULL);
                mixp_tensor *a = masked(m, mixp_matmul(m->ctx, h, h, 0, 1), how, kept);
                a = mixp_matmul(m->ctx, mixp_softmax(m->ctx, a), h, 0, 0);
                loss = mixp_mse(m->ctx, a, data(m, N, N, t));
            }
            learn(m, 0, loss);
        } while (retry && mixp_retry(m->scaler[0], retry));
    *skipped = (int)mixp_scaler_verdict(m->scaler[0]).skipped;
    return mixp_item(loss);
}

/* Without a guard the scale falls from 2^24 until gradients fit, and the run trains. With one it must do the same with
 * two or three skips, and let nothing fall back: no number has left its range. From the scale that it finds, a run
 * without a guard has the same bits. */
static void masks_of_inf(void) {
    for (int how = 0; how < MASKS; how++)
        for (int level = 1; level <= 2; level++)
            for (int retry = 0; retry <= 3; retry += 3) {
                int without, with, none;
                net off = net_open(1, 16777216.0f, 0.01, 0), on = net_open(1, 16777216.0f, 0.01, 1), found;
                double a = attend(&off, how, level, 0, 60, &without);
                double b = attend(&on, how, level, retry, 60, &with);
                found = net_open(1, mixp_scaler_loss_scale(on.scaler[0]), 0.01, 0);
                CHECK(attend(&found, how, level, 0, retry ? 60 : 60 - with, &none) == b);
                CHECK_INT(none, 0);
                CHECK(without >= 5 && a > 0.0);
                CHECK(with >= 2 && with <= 3);
                CHECK_INT(events(&on, MIXP_EVENT_OVERFLOW) + events(&on, MIXP_EVENT_HIGH), 0);
                show(&on);
                net_close(&off);
                net_close(&on);
                net_close(&found);
            }
}

/* Scores that do leave the range, under such a mask, are named, and cured. */
static void masked_scores_overflow(void) {
    for (int how = 0; how < MASKS; how++)
        for (int level = 1; level <= 2; level++) {
            net m = net_open(1, 64.0f, 1e-9, 1);
            mixp_event e;
            float x[N * N], t[N * N];
            int64_t shape[2] = { N, N };
            mixp_tensor *loss = NULL, *kept = NULL;
            for (int i = 0; i < N * N; i++) {
                x[i] = (float)(i * 37 % 19 - 9) * 40;
                t[i] = i % N > i / N ? -(float)INFINITY : 0.0f;
            }
            if (how == KEPT) {
                kept = mixp_param(m.ctx, "mask", MIXP_F32, 2, shape);
                mixp_write(kept, t, MIXP_F32, N * N);
                mixp_tensor_set_requires_grad(kept, 0);
            }
            mixp_init_normal(m.w[0], 0, 0.5);
            mixp_autocast_set_level(m.ctx, level);
            for (int step = 0; step < 8; step++) {
                mixp_step_begin(m.ctx);
                mixp_zero_grad(m.opt[0]);
                MIXP_AUTOCAST(m.ctx, MIXP_F16) {
                    mixp_tensor *h = mixp_linear(m.ctx, data(&m, N, N, x), m.w[0], NULL);
                    mixp_tensor *a = masked(&m, mixp_matmul(m.ctx, h, h, 0, 1), how, kept);
                    loss = mixp_mean(m.ctx, mixp_matmul(m.ctx, mixp_softmax(m.ctx, a), h, 0, 0),
                                     MIXP_ALL, 0);
                }
                learn(&m, 0, loss);
            }
            CHECK_INT(mixp_scaler_verdict(m.scaler[0]).outcome, MIXP_STEP_APPLIED);
            CHECK(mixp_scaler_verdict(m.scaler[0]).skipped <= 2);
            CHECK_NEAR(mixp_scaler_loss_scale(m.scaler[0]), 64, 0);
            CHECK_INT(mixp_guard_event(m.ctx, 0, &e), 1);
            CHECK_TEXT(e.site, ": matmul");
            show(&m);
            net_close(&m);
        }
}

/* --- dropout, and evaluations ----------------------------------------------------------------- */

static int sites(const net *m, const char *op) {
    mixp_site_info s;
    int i, n = 0;
    for (i = 0; mixp_site(m->ctx, i, &s); i++) n += strcmp(s.op, op) == 0;
    return n;
}

/* The loss of a product that passes 65504, behind dropout in training. Twice in a row on one input,
 * for calls on one tensor are told apart by their order. */
static mixp_tensor *dropped_loss(const net *m, const float *x, float p, int training) {
    mixp_tensor *in = data(m, 4, N, x), *h, *sum = NULL;
    for (int k = 0; k < 2; k++) {
        h = mixp_dropout(m->ctx, mixp_relu(m->ctx, in), p, training);
        h = mixp_reshape(m->ctx, h, 2, in->shape);
        h = mixp_linear(m->ctx, h, m->w[0], NULL);
        h = mixp_dropout(m->ctx, h, p, training);
        sum = sum ? mixp_add(m->ctx, sum, h) : h;
    }
    return mixp_mean(m->ctx, mixp_rms_norm(m->ctx, sum, NULL, 1e-5f), MIXP_ALL, 0);
}

/* What training holds in f32 an evaluation holds in f32, from its first batch on. */
static void evaluations_are_finite(void) {
    float x[4 * N];
    int drops, i, step;
    for (i = 0; i < 4 * N; i++) x[i] = (float)(i % 7) + 1;
    for (drops = 0; drops < 2; drops++) {
        net m = net_open(1, 64.0f, 1e-6, 1);
        const float p = 0.1f * (float)drops;
        mixp_tensor *loss = NULL;
        mixp_fill(m.w[0], 5000);
        for (step = 0; step < 20; step++) {
            mixp_step_begin(m.ctx);
            mixp_zero_grad(m.opt[0]);
            MIXP_AUTOCAST(m.ctx, MIXP_F16) { loss = dropped_loss(&m, x, p, 1); }
            learn(&m, 0, loss);
        }
        CHECK_INT(mixp_scaler_verdict(m.scaler[0]).skipped, 1);
        i = sites(&m, "linear");
        for (step = 0; step < 40; step++) {
            mixp_step_begin(m.ctx);
            MIXP_NO_GRAD(m.ctx) {
                MIXP_AUTOCAST(m.ctx, MIXP_F16) { loss = dropped_loss(&m, x, p, 0); }
            }
            CHECK_NEAR(mixp_item(loss), 1.0, 0.5);
        }
        CHECK_INT(sites(&m, "linear"), i);
        CHECK_INT(sites(&m, "rms_norm"), 1);
        show(&m);
        net_close(&m);
    }
}

/* Weights that were written by hand overflow in an evaluation: it is repeated in f32, once, and the next
 * ones need not be. Without a guard, and for a loss that is no number in f32 either, it is not. */
static void an_evaluation_is_repeated(void) {
    int way, guard, tries[3], k;
    float x[4 * N];
    for (k = 0; k < 4 * N; k++) x[k] = (float)(k % 7) + 1;
    for (way = 0; way < 4; way++) {
        mixp_result (*const begin)(mixp_context *) = way < 2 ? mixp_step_begin : mixp_eval_begin;
        mixp_tensor *loss = NULL;
        guard = way % 2;
        net m = net_open(1, 64.0f, 1e-6, guard);
        mixp_fill(m.w[0], 1);
        for (k = 0; k < 3; k++) {
            mixp_step_begin(m.ctx);
            mixp_zero_grad(m.opt[0]);
            MIXP_AUTOCAST(m.ctx, MIXP_F16) { loss = dropped_loss(&m, x, 0.1f, 1); }
            learn(&m, 0, loss);
        }
        mixp_fill(m.w[0], 5000);
        for (k = 0; k < 3; k++) {
            if (k == 2) mixp_fill(m.w[0], NAN);
            tries[k] = 0;
            do {
                begin(m.ctx);
                MIXP_NO_GRAD(m.ctx) {
                    MIXP_AUTOCAST(m.ctx, MIXP_F16) { loss = dropped_loss(&m, x, 0.1f, 0); }
                }
                tries[k]++;
            } while (mixp_retry_loss(m.ctx, loss));
            if (k < 2 && guard) CHECK_NEAR(mixp_item(loss), 1.0, 0.5);
            if (k < 2 && !guard) CHECK(!(mixp_item(loss) < 2));
        }
        CHECK_INT(tries[0], 1 + guard);
        CHECK_INT(tries[1], 1);
        CHECK_INT(tries[2], 1 + guard);
        CHECK_INT(mixp_retry_loss(m.ctx, NULL) + mixp_retry_loss(NULL, loss), 0);
        mixp_step_begin(m.ctx);         /* the loss is no longer there: no reason to repeat anything */
        CHECK_INT(mixp_retry_loss(m.ctx, loss), 0);
        CHECK_INT(mixp_context_error(m.ctx, NULL), guard ? MIXP_ERR_ORDER : MIXP_OK);
        mixp_context_clear_error(m.ctx);
        if (guard) CHECK_INT(events(&m, MIXP_EVENT_OVERFLOW), 1);
        net_close(&m);
    }
}

static mixp_tensor *compared_loss(mixp_context *ctx, void *user) {
    const net *m = (const net *)user;
    float x[4 * N];
    (void)ctx;
    for (int k = 0; k < 4 * N; k++) x[k] = (float)(k % 7) / 8;
    return dropped_loss(m, x, 0.1f, 0);
}

/* Comparing runs now and then leaves a guard as it is: the same steps are sampled. */
static void a_comparison_is_not_seen(void) {
    static mixp_difference rows[16];
    int64_t samples[2][40], n;
    memset(samples, 0, sizeof samples);
    for (int with = 0; with < 2; with++) {
        net m = net_open(1, 64.0f, 1e-6, 1);
        mixp_compare_desc d;
        memset(&d, 0, sizeof d);
        d.a.dtype = MIXP_F16;
        d.a.level = 1;
        d.fn = compared_loss;
        d.user = &m;
        mixp_init_normal(m.w[0], 0, 0.1);
        for (int k = 0; k < 40; k++) {
            mixp_tensor *loss = NULL;
            mixp_site_info site;
            if (with && k % 5 == 0) CHECK_INT(mixp_compare(m.ctx, &d, rows, 16, &n), MIXP_OK);
            mixp_step_begin(m.ctx);
            mixp_zero_grad(m.opt[0]);
            MIXP_AUTOCAST(m.ctx, MIXP_F16) { loss = compared_loss(m.ctx, &m); }
            learn(&m, 0, loss);
            if (mixp_site(m.ctx, 0, &site)) samples[with][k] = site.samples;
        }
        net_close(&m);
    }
    CHECK(samples[0][39] >= 3);
    CHECK(memcmp(samples[0], samples[1], sizeof samples[0]) == 0);
}

/* A guard that starts before the first step; one that was stopped stays off. */
static void a_guard_from_the_start(void) {
    net m = net_open(1, 64.0f, 1e-6, 0);
    float x[4 * N];
    mixp_tensor *loss = NULL;
    for (int k = 0; k < 4 * N; k++) x[k] = (float)(k % 7) + 1;
    mixp_fill(m.w[0], 5000);
    CHECK_INT(mixp_guard_start(m.ctx, NULL), MIXP_OK);
    for (int k = 0; k < 5; k++) {
        mixp_step_begin(m.ctx);
        mixp_zero_grad(m.opt[0]);
        MIXP_AUTOCAST(m.ctx, MIXP_F16) { loss = dropped_loss(&m, x, 0.1f, 1); }
        learn(&m, 0, loss);
    }
    CHECK_INT(mixp_scaler_verdict(m.scaler[0]).applied, 4);     /* the first step is sampled, overflows, and its site falls back */
    CHECK_INT(events(&m, MIXP_EVENT_OVERFLOW), 1);
    CHECK_INT(mixp_guard_stop(m.ctx), MIXP_OK);
    mixp_step_begin(m.ctx);
    mixp_zero_grad(m.opt[0]);
    MIXP_AUTOCAST(m.ctx, MIXP_F16) { loss = dropped_loss(&m, x, 0.1f, 1); }
    learn(&m, 0, loss);
    CHECK_INT(mixp_scaler_verdict(m.scaler[0]).skipped, 2);
    CHECK_INT(mixp_guard_due(m.ctx), 0);
    net_close(&m);
}

/* --- two networks in turn --------------------------------------------------------------------- */

/* One step of network k, whose product passes 65504 where its weight is 5000. */
static void turn(const net *m, int k, mixp_scaler *scaler) {
    mixp_tensor *loss = NULL;
    float x[4 * N];
    for (int i = 0; i < 4 * N; i++) x[i] = (float)(i % 7) + 1;
    mixp_step_begin(m->ctx);
    mixp_zero_grad(m->opt[k]);
    MIXP_AUTOCAST(m->ctx, MIXP_F16) {
        loss = mixp_linear(m->ctx, data(m, 4, N, x), m->w[k], NULL);
        loss = mixp_mean(m->ctx, mixp_rms_norm(m->ctx, loss, NULL, 1e-5f), MIXP_ALL, 0);
    }
    mixp_backward(m->ctx, mixp_scaler_scale(scaler, loss));
    mixp_scaler_step(scaler, m->opt[k]);
    mixp_scaler_update(scaler);
}

/* G overflows from its first step on, or from a later one on; D never does. Several steps of D come
 * for each of G; the scaler is one for both, or each has its own. */
static void two_networks(void) {
    for (int own = 0; own < 2; own++)
        for (int late = 0; late < 2; late++)
            for (int steps_of_d = 1; steps_of_d < 4; steps_of_d++) {
                net m = net_open(2, 64.0f, 1e-6, 1);
                mixp_event e;
                mixp_fill(m.w[0], 1);
                mixp_fill(m.w[1], late ? 1 : 5000);
                for (int step = 0; step < 60; step++) {
                    if (late && step == 7) mixp_fill(m.w[1], 5000);
                    for (int k = 0; k < steps_of_d; k++) turn(&m, 0, m.scaler[0]);
                    turn(&m, 1, m.scaler[own]);
                }
                CHECK(mixp_optimizer_verdict(m.opt[1]).skipped <= 2);
                CHECK_INT(mixp_optimizer_verdict(m.opt[0]).skipped, 0);
                CHECK_NEAR(mixp_scaler_loss_scale(m.scaler[own]), 64, 0);
                CHECK_INT(events(&m, MIXP_EVENT_OVERFLOW), 1);
                for (int k = 0; mixp_guard_event(m.ctx, k, &e); k++)
                    if (e.kind == MIXP_EVENT_OVERFLOW) CHECK_TEXT(e.site, "G: linear");
                show(&m);
                net_close(&m);
            }
}

/* What grows in G alone is seen before it overflows: samples do not always meet D. */
static void samples_meet_both(void) {
    net m = net_open(2, 64.0f, 0, 1);
    mixp_fill(m.w[0], 1);
    for (int step = 0; step < 200; step++) {
        mixp_fill(m.w[1], 100 * pow(1.02, step));           /* doubles in 35 turns */
        turn(&m, 0, m.scaler[0]);
        turn(&m, 1, m.scaler[1]);
    }
    CHECK_INT(mixp_optimizer_verdict(m.opt[1]).skipped, 0);
    CHECK_INT(events(&m, MIXP_EVENT_HIGH), 1);
    show(&m);
    net_close(&m);
}

/* G may not fall back: its run ends, and the message names it. D goes on meanwhile. */
static void skips_come_to_an_end(void) {
    for (int own = 0; own < 2; own++) {
        net m = net_open(2, 64.0f, 1e-6, 1);
        const char *why = "";
        mixp_fill(m.w[0], 1);
        mixp_fill(m.w[1], 5000);
        CHECK_INT(mixp_guard_pin(m.ctx, "G: linear", MIXP_F16), MIXP_OK);
        for (int step = 0; step < 40 && !mixp_context_error(m.ctx, NULL); step++) {
            turn(&m, 0, m.scaler[0]);
            turn(&m, 1, m.scaler[own]);
        }
        CHECK_INT(mixp_context_error(m.ctx, &why), MIXP_ERR_DIVERGED);
        CHECK_TEXT(why, "20 steps in a row");
        CHECK_TEXT(why, "'G: linear'");
        CHECK_INT(mixp_optimizer_verdict(m.opt[0]).skipped, 0);
        mixp_context_free(m.ctx);
    }
}

/* --- reshapes, loops, depth --------------------------------------------------------------------- */

/* An overflow is told of the site that made it, not of those behind a reshape. */
static void reshapes_hide_nothing(void) {
    static const int64_t other[3] = { 1, 4, N };
    net m = net_open(1, 64.0f, 0, 1);
    float x[4 * N];
    mixp_event e;
    mixp_tensor *h, *loss = NULL;
    for (int i = 0; i < 4 * N; i++) x[i] = (float)(i % 7) + 1;
    mixp_fill(m.w[0], 5000);
    mixp_step_begin(m.ctx);
    MIXP_AUTOCAST(m.ctx, MIXP_F16) {
        h = mixp_reshape(m.ctx, mixp_linear(m.ctx, data(&m, 4, N, x), m.w[0], NULL), 3, other);
        h = mixp_transpose(m.ctx, mixp_relu(m.ctx, mixp_scale(m.ctx, h, 0.5f)), 1, 2);
        loss = mixp_mean(m.ctx, mixp_mul(m.ctx, h, h), MIXP_ALL, 0);
    }
    learn(&m, 0, loss);
    CHECK_INT(events(&m, MIXP_EVENT_OVERFLOW), 1);
    CHECK_INT(mixp_guard_event(m.ctx, 0, &e), 1);
    CHECK_TEXT(e.site, "w: linear");
    CHECK_INT(sites(&m, "reshape"), 0);
    show(&m);
    net_close(&m);
}

/* A loop of 48 cells: the product of each passes 65504, its result is small again. Or 24 layers that
 * grow, each a weight of its own, where no two sites fall for one reason. late: from step 5 on. */
static mixp_tensor *deep_loss(const net *m, mixp_tensor *const *layers, int depth, float up,
                              const float *x) {
    static const float apart[N] = { 1.5f, 0.5f, -0.5f, 1, 2, 1, -1, 1 };
    mixp_tensor *h = data(m, 4, N, x), *spread = data(m, 1, N, apart);
    int i;
    for (i = 0; i < depth; i++) {
        if (layers) h = mixp_add(m->ctx, h, mixp_linear(m->ctx, h, layers[i], NULL));
        else h = mixp_scale(m->ctx, mixp_linear(m->ctx, h, m->w[0], NULL), 1 / up);
        if (!layers) h = mixp_mul(m->ctx, mixp_rms_norm(m->ctx, h, NULL, 1e-5f), spread);
    }
    if (layers) h = mixp_rms_norm(m->ctx, h, NULL, 1e-5f);
    h = mixp_mul(m->ctx, h, h);
    return mixp_mean(m->ctx, h, MIXP_ALL, 0);
}

/* An evaluation whose loss is not finite, in f32 either, is repeated. */
static void evaluate_badly(const net *m) {
    const float bad = NAN;
    mixp_tensor *loss = NULL;
    int tries = 0;
    do {
        mixp_step_begin(m->ctx);
        MIXP_NO_GRAD(m->ctx) { loss = mixp_mean(m->ctx, data(m, 1, 1, &bad), MIXP_ALL, 0); }
        tries++;
    } while (mixp_retry_loss(m->ctx, loss));
    CHECK_INT(tries, 2);
}

/* The skips of so many steps. evaluates: with an evaluation after each step. */
static int deep_skips(int layered, int late, int level, int evaluates) {
    enum { LAYERS = 24 };
    static const int64_t shape[2] = { N, N };
    net m = net_open(1, 64.0f, 0, 1);
    mixp_tensor *layers[LAYERS], *loss = NULL;
    float x[4 * N], w[N * N];
    mixp_autocast_set_level(m.ctx, level);
    for (int i = 0; i < 4 * N; i++) x[i] = (float)(i % 7) + 1;
    for (int k = 0; k < LAYERS; k++) {
        char name[16];
        snprintf(name, sizeof name, "layer.%d", k);
        layers[k] = mixp_param(m.ctx, name, MIXP_F32, 2, shape);
        mixp_optimizer_add(m.opt[0], layers[k], NULL);
    }
    for (int step = 0; step < 12; step++) {
        const int big = !late || step >= 5;
        for (int i = 0; i < N * N; i++) w[i] = (big ? 10000.0f : 1.0f) * (1 + (float)(i / N % 3) / 2);
        mixp_write(m.w[0], w, MIXP_F32, N * N);
        for (int i = 0; i < N * N; i++) w[i] = i / N == i % N ? (big ? 0.8f : 0.01f) : 0.0f;
        for (int k = 0; k < LAYERS; k++) mixp_write(layers[k], w, MIXP_F32, N * N);
        mixp_step_begin(m.ctx);
        mixp_zero_grad(m.opt[0]);
        MIXP_AUTOCAST(m.ctx, MIXP_F16) {
            loss = deep_loss(&m, layered ? layers : NULL, layered ? LAYERS : 48, 4e4f, x);
        }
        learn(&m, 0, loss);
        if (evaluates) evaluate_badly(&m);
    }
    CHECK_INT(mixp_scaler_verdict(m.scaler[0]).outcome, MIXP_STEP_APPLIED);
    CHECK_NEAR(mixp_scaler_loss_scale(m.scaler[0]), 64, 0);
    if (!layered) {             /* all cells fall with the first */
        mixp_event e;
        CHECK_INT(events(&m, MIXP_EVENT_OVERFLOW), 1);
        for (int i = 0; mixp_guard_event(m.ctx, i, &e); i++)
            if (e.kind == MIXP_EVENT_OVERFLOW) CHECK_INT(e.also, 47);
    }
    show(&m);
    int skipped = (int)mixp_scaler_verdict(m.scaler[0]).skipped;
    net_close(&m);
    return skipped;
}

static void depth_costs_two_skips(void) {
    for (int way = 0; way < 16; way++) {
        const int layered = way & 1, late = way >> 1 & 1, evaluates = way >> 2 & 1, level = 1 + (way >> 3);
        const int skips = deep_skips(layered, late, level, evaluates);
        CHECK(skips >= 1 && skips <= 2);
        if (skips < 1 || skips > 2)
            printf("  level %d, layered %d, late %d, evaluates %d: %d\n", level, layered, late, evaluates, skips);
    }
}

/* --- a product and its loss in one ----------------------------------------------------------------- */

/* Logits of 1e5 and more: the product stores f32 and the loss is as that of the two operators. fused 2: one
 * operator, outside of the region that has made its input in f16. */
static double fused_loss(int fused, int level, int *skipped) {
    static const int64_t one[1] = { 4 };
    static const int32_t class_of[4] = { 0, 1, 2, 3 };
    net m = net_open(1, 64.0f, 1e-9, 1);
    int64_t shape[2] = { N, N };
    mixp_tensor *head = mixp_param(m.ctx, "head", MIXP_F32, 2, shape), *loss = NULL, *y = NULL, *t = NULL;
    float x[4 * N];
    for (int i = 0; i < 4 * N; i++) x[i] = (float)(i * 5 % 7) + 1;
    mixp_init_normal(m.w[0], 0, 1);
    mixp_init_normal(head, 0, 6000);
    mixp_optimizer_add(m.opt[0], head, NULL);
    mixp_autocast_set_level(m.ctx, level);
    for (int step = 0; step < 40; step++) {
        mixp_step_begin(m.ctx);
        mixp_zero_grad(m.opt[0]);
        MIXP_AUTOCAST(m.ctx, MIXP_F16) {
            y = mixp_linear(m.ctx, data(&m, 4, N, x), m.w[0], NULL);
            t = mixp_input(m.ctx, MIXP_I32, 1, one, class_of);
            if (!fused) loss = mixp_cross_entropy(m.ctx, mixp_linear(m.ctx, y, head, NULL), t, -100);
            if (fused == 1) loss = mixp_linear_cross_entropy(m.ctx, y, head, t, -100, 2);
        }
        if (fused == 2) loss = mixp_linear_cross_entropy(m.ctx, y, head, t, -100, 2);
        loss = mixp_scale(m.ctx, loss, 1e-4f);
        learn(&m, 0, loss);
    }
    double end = mixp_item(loss);
    *skipped = (int)mixp_scaler_verdict(m.scaler[0]).skipped;
    show(&m);
    net_close(&m);
    return end;
}

static void logits_of_one_operator(void) {
    int level, skips[3];
    for (level = 1; level <= 2; level++) {
        const double apart = fused_loss(0, level, &skips[0]), one = fused_loss(1, level, &skips[1]);
        CHECK(apart > 1);
        CHECK_NEAR(one, apart, 0.01 * apart);
        CHECK_NEAR(fused_loss(2, level, &skips[2]), apart, 0.01 * apart);
        CHECK(skips[0] <= 2 && skips[1] <= 2 && skips[2] <= 2);
    }
}

/* --- own operators --- */

static mixp_result enlarge(mixp_call *c, mixp_in from, mixp_out to) {
    for (int64_t i = 0; to.data && i < c->out->count; i++) mixp_put(to, i, 1e5f * mixp_get(from, i));
    return MIXP_OK;
}
static mixp_result own_infer(mixp_call *c)
{ return mixp_call_output(c, c->in[0]->dtype, c->in[0]->rank, c->in[0]->shape); }
static mixp_result own_forward(mixp_call *c) { return enlarge(c, mixp_call_x(c, 0), mixp_call_y(c)); }
static mixp_result own_backward(mixp_call *c) { return enlarge(c, mixp_call_dy(c), mixp_call_dx(c, 0)); }

/* A program's own operator multiplies by 100,000, in f16, and is named as a built-in one that cannot
 * overflow, or whose Inf is intended. It falls back all the same. */
static void own_operators_with_known_names(void) {
    static const char *const names[4] = { "log", "sqrt", "where", "mine" };
    static const int64_t shape[2] = { N, N };
    float x[N * N];
    for (int i = 0; i < N * N; i++) x[i] = 1;
    for (int k = 0; k < 4; k++) {
        mixp_op op = { NULL, MIXP_CLASS_KEEP, 0, own_infer, own_forward, own_backward, NULL };
        net m = net_open(1, 1, 1e-9, 1);
        mixp_site_info site;
        int fell = 0;
        op.name = names[k];
        mixp_fill(m.w[0], 1);
        for (int i = 0; i < 4; i++) {
            mixp_tensor *y = NULL;
            mixp_step_begin(m.ctx);
            mixp_zero_grad(m.opt[0]);
            MIXP_AUTOCAST(m.ctx, MIXP_F16) {
                y = mixp_linear(m.ctx, mixp_input(m.ctx, MIXP_F32, 2, shape, x), m.w[0], NULL);
                y = mixp_apply(m.ctx, &op, 1, &y, 1, NULL);
                y = mixp_scale(m.ctx, mixp_mean(m.ctx, mixp_cast(m.ctx, y, MIXP_F32), MIXP_ALL, 0),
                               1e-3f);
            }
            mixp_backward(m.ctx, mixp_scaler_scale(m.scaler[0], y));
            mixp_scaler_step(m.scaler[0], m.opt[0]);
            mixp_scaler_update(m.scaler[0]);
        }
        for (int i = 0; mixp_site(m.ctx, i, &site); i++)
            if (strcmp(site.op, names[k]) == 0) fell = site.fallen;
        CHECK_INT(fell, 1);
        CHECK_INT(mixp_context_error(m.ctx, NULL), MIXP_OK);
        mixp_context_free(m.ctx);
    }
}

/* --- reductions made of several operators, and the program's own casts --------------------------- */

enum { VAR, STD, NORM, LOGS, CAST, FORMS, ROWS = 16 };

static mixp_tensor *form_of(const net *m, int form, mixp_tensor *h) {
    switch (form) {
    case VAR: return mixp_var(m->ctx, h, 0, 1, 0);
    case STD: return mixp_std(m->ctx, h, 0, 1, 0);
    case NORM: return mixp_vector_norm(m->ctx, h, 0, 0);
    case LOGS: return mixp_logsumexp(m->ctx, h, 0, 0);
    default: return mixp_cast(m->ctx, mixp_square(m->ctx, h), MIXP_F16);
    }
}

/* The same of column 0, in double. */
static double form_in_double(int form, const float *h) {
    double mean = 0, sum = 0, top = -HUGE_VAL;
    for (int i = 0; i < ROWS; i++) mean += (double)h[i * N] / ROWS;
    for (int i = 0; i < ROWS; i++) if ((double)h[i * N] > top) top = (double)h[i * N];
    for (int i = 0; i < ROWS; i++) {
        const double x = (double)h[i * N];
        sum += form == LOGS ? exp(x - top) : form == NORM ? x * x : (x - mean) * (x - mean);
    }
    if (form == CAST) return (double)h[0] * (double)h[0];
    if (form == LOGS) return top + log(sum);
    if (form == NORM) return sqrt(sum);
    return form == VAR ? sum / (ROWS - 1) : sqrt(sum / (ROWS - 1));
}

/* Columns divided by a form of them. After two fallbacks at most, the form is right,
 * also if a fallback raised what it reads. */
static void reduces(int form, int level, float size) {
    net m = net_open(1, 1.0f, 1e-3, 1);
    float x[ROWS * N], h[ROWS * N], r[ROWS * N];
    mixp_init_normal(m.w[0], 0, 0.5);
    mixp_autocast_set_level(m.ctx, level);
    for (int step = 0; step < 6; step++) {
        mixp_tensor *y = NULL, *by = NULL, *loss = NULL;
        for (int i = 0; i < ROWS * N; i++) x[i] = size * (float)((i * 37 + step * 11) % 64 - 32) / 32.0f;
        mixp_step_begin(m.ctx);
        mixp_zero_grad(m.opt[0]);
        MIXP_AUTOCAST(m.ctx, MIXP_F16) {
            y = mixp_linear(m.ctx, data(&m, ROWS, N, x), m.w[0], NULL);
            by = form_of(&m, form, y);
            loss = mixp_mean(m.ctx, mixp_div(m.ctx, y, by), MIXP_ALL, 0);
        }
        mixp_read(y, h, MIXP_F32, ROWS * N);
        mixp_read(by, r, MIXP_F32, by->count);
        double want = form_in_double(form, h);
        if (step > 1) CHECK_NEAR((double)r[0], want, 2e-3 * fabs(want));
        learn(&m, 0, loss);
    }
    CHECK_INT(mixp_scaler_verdict(m.scaler[0]).outcome, MIXP_STEP_APPLIED);
    show(&m);
    net_close(&m);
}

static void forms_recover(void) {
    for (int form = 0; form < FORMS; form++)
        for (int level = 1; level <= 2; level++) {
            reduces(form, level, 1.0f);
            reduces(form, level, 1000.0f);          /* only squares pass 65,504 */
            reduces(form, level, 30000.0f);         /* and what it is made of falls back */
        }
}

int main(void) {
    RUN(masks_of_inf);
    RUN(masked_scores_overflow);
    RUN(evaluations_are_finite);
    RUN(an_evaluation_is_repeated);
    RUN(a_comparison_is_not_seen);
    RUN(a_guard_from_the_start);
    RUN(two_networks);
    RUN(samples_meet_both);
    RUN(skips_come_to_an_end);
    RUN(reshapes_hide_nothing);
    RUN(depth_costs_two_skips);
    RUN(logits_of_one_operator);
    RUN(own_operators_with_known_names);
    RUN(forms_recover);
    return test_report();
}
