/* test_warnings.c - unscaled f16 gradients that become 0 are reported once.
 * tests/core/tape/test_mistakes.c has the other warnings.
 * SPDX-License-Identifier: MIT OR Unlicense */
#include "mixprec.h"
#include "examples/compare.h"
#include "test.h"

enum { ROWS = 64, IN = 8, OUT = 32, N = ROWS * OUT };
static const int64_t xs[2] = { ROWS, IN }, ws[2] = { OUT, IN }, ys[2] = { ROWS, OUT };
static float x[ROWS * IN], y[N];

/* What a run is like; zeros = fp16, level 1, no scaler, nothing else. */
typedef struct kind {
    mixp_dtype dtype;           /* of the region; MIXP_F64: none */
    float      factor;          /* of the loss */
    float      outlier;         /* one target: its gradient is that much larger */
    int        scaler;          /* 1: one, 2: a disabled one */
    int        guard, fits, from;   /* fits: the weights are the solution; from: first step with
                                       `factor`, before it the factor is 1000 */
} kind;

static kind kind_of(mixp_dtype dtype, float factor) {
    kind k;
    memset(&k, 0, sizeof k);
    k.dtype = dtype;
    k.factor = factor;
    return k;
}

typedef struct run {
    mixp_context   *ctx;
    mixp_tensor    *w;
    mixp_optimizer *opt;
    mixp_scaler    *scaler;
    int             told;       /* calls of on_warning */
    int             told_in;    /* step of the first */
    int             step;
    char            text[400];
} run;

static void hear(const char *message, void *user) {
    run *r = (run *)user;
    if (!r->told++) r->told_in = r->step;
    snprintf(r->text, sizeof r->text, "%s", message);
    CHECK_INT(mixp_context_error(r->ctx, NULL), MIXP_OK);
}

/* The gradients of the targets' errors are even steps on both sides of 0. */
static void run_open(run *r, const kind *k) {
    mixp_context_desc d;
    mixp_scaler_desc s;
    mixp_optimizer_desc sgd = mixp_sgd_defaults();
    memset(r, 0, sizeof *r);
    memset(&d, 0, sizeof d);
    memset(&s, 0, sizeof s);
    d.on_warning = hear;
    d.user = r;
    d.threads = 1;
    sgd.lr = 1e-30;             /* the weights stay */
    r->ctx = mixp_context_new(&d);
    r->w = mixp_param(r->ctx, "w", MIXP_F32, 2, ws);
    r->opt = mixp_optimizer_new(r->ctx, &sgd);
    mixp_optimizer_add(r->opt, r->w, NULL);
    s.disabled = k->scaler == 2;
    if (k->scaler) r->scaler = mixp_scaler_new(r->ctx, &s);
    if (k->guard) mixp_guard_start(r->ctx, NULL);
    for (int i = 0; i < ROWS * IN; i++) x[i] = 1.0f;
    for (int i = 0; i < N; i++) y[i] = k->fits ? 0.0f : ((float)i + 0.5f) / N * 2.0f - 1.0f;
    if (k->outlier != 0.0f) y[0] = k->outlier;
}

static void run_step(run *r, const kind *k) {
    const int low = k->dtype != MIXP_F64;
    r->step++;
    mixp_step_begin(r->ctx);
    mixp_zero_grad(r->opt);
    if (low) mixpi_autocast_enter(r->ctx, k->dtype);
    mixp_tensor *loss = mixp_linear(r->ctx, mixp_input(r->ctx, MIXP_F32, 2, xs, x), r->w, NULL);
    loss = mixp_mse(r->ctx, loss, mixp_input(r->ctx, MIXP_F32, 2, ys, y));
    loss = mixp_scale(r->ctx, loss, r->step < k->from ? 1000.0f : k->factor);
    if (low) mixpi_autocast_leave(r->ctx);
    if (r->scaler) loss = mixp_scaler_scale(r->scaler, loss);
    mixp_backward(r->ctx, loss);
    if (!r->scaler) mixp_optimizer_step(r->opt);
    else mixp_scaler_step(r->scaler, r->opt);
    if (r->scaler) mixp_scaler_update(r->scaler);
}

static run run_of(kind k, int steps) {
    run r;
    run_open(&r, &k);
    for (int i = 0; i < steps; i++) run_step(&r, &k);
    CHECK_INT(mixp_context_error(r.ctx, NULL), MIXP_OK);
    if (r.told) CHECK(strcmp(r.text, mixp_context_warning(r.ctx)) == 0);
    else CHECK(!*mixp_context_warning(r.ctx));
    mixp_context_free(r.ctx);
    return r;
}

/* Share of the gradients 2 factor (0 - y) / N below half of f16's smallest number, in double. */
static double share_flushed(double factor) {
    int i, n = 0;
    for (i = 0; i < N; i++)
        n += fabs(2.0 * factor * (((i + 0.5) / N) * 2.0 - 1.0) / N) < ldexp(1.0, -25);
    return (double)n / N;
}

/* The mse's gradients run evenly to 2 factor / N. The share in the text is the true one, within the
 * estimate's 2 percent points. */
static void warned_with_the_share(void) {
    static const float factors[3] = { 1e-4f, 2e-4f, 4e-4f };
    for (int i = 0; i < 3; i++) {
        const double want = share_flushed((double)factors[i]);
        run r = run_of(kind_of(MIXP_F16, factors[i]), 70);
        double share = 0.0;
        CHECK(want > 0.05);
        CHECK_INT(r.told, 1);
        CHECK_INT(r.told_in, 1);
        CHECK_INT(sscanf(r.text, "mixp_backward: about %lf", &share), 1);
        CHECK_NEAR(share, 100.0 * want, 2.0);
        CHECK_TEXT(r.text, "in step 1");
        CHECK_TEXT(r.text, "mixp_scaler_scale(scaler, loss)");
    }
}

static void warned_of_a_disabled_scaler(void) {
    kind k = kind_of(MIXP_F16, 1e-4f);
    k.scaler = 2;
    CHECK_INT(run_of(k, 2).told, 1);
}

/* Walks 1, 2, 4, 8, 16 ... count: what begins in step 10 is reported in step 16, and what begins
 * after step 64 is not. */
static void warned_later(void) {
    kind k = kind_of(MIXP_F16, 1e-4f);
    k.from = 10;
    run r = run_of(k, 70);
    CHECK_INT(r.told, 1);
    CHECK_INT(r.told_in, 16);
    k.from = 65;
    CHECK_INT(run_of(k, 140).told, 0);
}

static void no_false_warning(void) {
    kind k = kind_of(MIXP_BF16, 1e-4f);
    CHECK_INT(run_of(k, 5).told, 0);
    CHECK_INT(run_of(kind_of(MIXP_F64, 1e-4f), 5).told, 0);
    CHECK(share_flushed(0.01) < 0.05);
    CHECK_INT(run_of(kind_of(MIXP_F16, 0.01f), 70).told, 0);
    CHECK_INT(run_of(kind_of(MIXP_F16, 1e-4f * 65536.0f), 70).told, 0);     /* scaled by hand */
    k = kind_of(MIXP_F16, 1e-4f);
    k.scaler = 1;
    CHECK_INT(run_of(k, 70).told, 0);
    k.scaler = 0;
    k.guard = 1;                /* the guard stores f32 and has its own event */
    CHECK_INT(run_of(k, 70).told, 0);
    k.guard = 0;
    k.fits = 1;                 /* gradients of 0 are right */
    CHECK_INT(run_of(k, 70).told, 0);
    k.fits = 0;
    k.outlier = 2e5f;           /* beside its gradient of 2e-2 the others do not matter */
    CHECK_INT(run_of(k, 70).told, 0);
    CHECK(!*mixp_context_warning(NULL));
}

static mixp_tensor *small_loss(mixp_context *ctx, void *user) {
    mixp_tensor *z = mixp_linear(ctx, mixp_input(ctx, MIXP_F32, 2, xs, x), ((run *)user)->w, NULL);
    return mixp_scale(ctx, mixp_mse(ctx, z, mixp_input(ctx, MIXP_F32, 2, ys, y)), 1e-4f);
}

static void none_of_a_comparison(void) {
    const kind k = kind_of(MIXP_F16, 1e-4f);
    mixp_difference rows[8];
    mixp_compare_desc d;
    int64_t n = 0;
    run r;
    run_open(&r, &k);
    memset(&d, 0, sizeof d);
    d.a.dtype = MIXP_F16;
    d.a.level = 1;
    d.fn = small_loss;
    d.user = &r;
    CHECK_INT(mixp_compare(r.ctx, &d, rows, 8, &n), MIXP_OK);
    CHECK(n > 0);
    CHECK_INT(r.told, 0);
    mixp_context_free(r.ctx);
}

/* Counting takes no memory after the first step. */
static void no_memory_after_the_first_step(void) {
    const kind k = kind_of(MIXP_F16, 1e-4f);
    run r;
    run_open(&r, &k);
    run_step(&r, &k);
    int64_t made = mixp_context_memory(r.ctx).allocations;
    for (int i = 0; i < 20; i++) run_step(&r, &k);
    CHECK_INT(mixp_context_memory(r.ctx).allocations, made);
    mixp_context_free(r.ctx);
}

/* --- losses of nothing -------------------------------------------------------------------------- */

enum { BY_ENTROPY, BY_SMOOTH, BY_CHUNKS, BY_NLL, BY_SCALER, BY_LOSSES };

typedef struct nothing {
    mixp_context   *ctx;
    mixp_scaler    *scaler;
    mixp_optimizer *opt;
    mixp_tensor    *w;
    int             told;
    char            text[400];
} nothing;

static void hear_nothing(const char *message, void *user) {
    nothing *n = user;
    n->told++;
    snprintf(n->text, sizeof n->text, "%s", message);
}

static void nothing_open(nothing *n, int guarded) {
    static const int64_t shape[2] = { 4, 3 };
    mixp_context_desc d;
    mixp_guard_desc g;
    mixp_optimizer_desc sgd = mixp_sgd_defaults();
    memset(n, 0, sizeof *n);
    memset(&d, 0, sizeof d);
    memset(&g, 0, sizeof g);
    d.on_warning = hear_nothing;
    d.user = n;
    g.every = 1;
    n->ctx = mixp_context_new(&d);
    n->scaler = mixp_scaler_new(n->ctx, NULL);
    n->w = mixp_param(n->ctx, "w", MIXP_F32, 2, shape);
    mixp_init_normal(n->w, 0.0, 1.0);
    n->opt = mixp_optimizer_new(n->ctx, &sgd);
    mixp_optimizer_add(n->opt, n->w, NULL);
    if (guarded) mixp_guard_start(n->ctx, &g);
}

/* A step whose targets are `target` and otherwise do not count; parts: micro-batches. */
static float nothing_step(nothing *n, int loss_of, int32_t target, int parts) {
    static const int64_t s[2] = { 2, 3 }, rows[1] = { 2 };
    static const float input[6] = { 1, 2, 3, -1, 0.5f, 2 };
    int32_t targets[2] = { MIXP_IGNORE, MIXP_IGNORE };
    float value = 0.0f;
    targets[1] = target;
    mixp_zero_grad(n->opt);
    for (int i = 0; i < parts; i++) {
        mixp_tensor *loss = NULL, *scaled = NULL, *logits, *in, *t;
        mixp_step_begin(n->ctx);
        MIXP_AUTOCAST(n->ctx, MIXP_F16) {
            in = mixp_input(n->ctx, MIXP_F32, 2, s, input);
            t = mixp_input(n->ctx, MIXP_I32, 1, rows, targets);
            logits = loss_of == BY_CHUNKS ? NULL : mixp_linear(n->ctx, in, n->w, NULL);
            if (loss_of == BY_ENTROPY) loss = mixp_cross_entropy(n->ctx, logits, t, MIXP_IGNORE);
            if (loss_of == BY_SMOOTH) loss = mixp_cross_entropy_smooth(n->ctx, logits, t, MIXP_IGNORE, 0.1f);
            if (loss_of == BY_CHUNKS) loss = mixp_linear_cross_entropy(n->ctx, in, n->w, t, MIXP_IGNORE, 1);
            if (loss_of == BY_NLL) loss = mixp_nll(n->ctx, mixp_log_softmax(n->ctx, logits), t, MIXP_IGNORE);
            if (loss_of == BY_SCALER) {
                mixp_tensor_set_disposable(logits, 1);
                scaled = mixp_scaler_cross_entropy(n->scaler, logits, t, MIXP_IGNORE, 1.0f, &loss);
            }
        }
        CHECK_INT(mixp_backward(n->ctx, scaled ? scaled : mixp_scaler_scale(n->scaler, loss)), MIXP_OK);
        value = (float)mixp_item(loss);
    }
    mixp_scaler_step(n->scaler, n->opt);
    mixp_scaler_update(n->scaler);
    return value;
}

/* The loss is NaN and the step is applied, as in PyTorch, and one warning says why. */
static void warned_of_targets_that_do_not_count(void) {
    for (int loss_of = 0; loss_of < BY_LOSSES; loss_of++) {
        nothing n;
        nothing_open(&n, 0);
        float loss = nothing_step(&n, loss_of, 2, 1);
        CHECK(loss == loss);
        CHECK_INT(n.told, 0);
        loss = nothing_step(&n, loss_of, MIXP_IGNORE, 1);
        CHECK(loss != loss);
        CHECK_INT(mixp_scaler_verdict(n.scaler).outcome, MIXP_STEP_APPLIED);
        CHECK_INT(n.told, 1);
        CHECK_TEXT(n.text, loss_of == BY_NLL ? "mixp_nll: no target counts" : "cross_entropy: no target counts");
        nothing_step(&n, loss_of, MIXP_IGNORE, 1);
        CHECK_INT(n.told, 1);
        CHECK_INT(mixp_context_error(n.ctx, NULL), MIXP_OK);
        mixp_context_free(n.ctx);
    }
}

/* A mean of nothing is no overflow: no site falls back, in one batch or in several. */
static void a_guard_sees_no_overflow_in_nothing(void) {
    for (int loss_of = 0; loss_of < BY_LOSSES; loss_of++)
        for (int parts = 1; parts <= 2; parts++) {
            mixp_event e;
            nothing n;
            nothing_open(&n, 1);
            for (int i = 0; i < 6; i++) nothing_step(&n, loss_of, i < 2 ? 2 : MIXP_IGNORE, parts);
            CHECK_INT(mixp_scaler_verdict(n.scaler).applied, 6);
            for (int i = 0; mixp_guard_event(n.ctx, i, &e); i++) {
                test_bad++;
                TEST_SHOW("loss %d: %s: %s", loss_of, e.site, e.what);
            }
            CHECK_INT(mixp_context_error(n.ctx, NULL), MIXP_OK);
            mixp_context_free(n.ctx);
        }
}

/* A step may be applied although its loss is NaN: here a row is masked whole, and its gradients are 0. */
static void warned_of_a_loss_that_is_not_finite(void) {
    static const int64_t s[2] = { 2, 3 };
    static const uint8_t hidden[6] = { 1, 1, 1, 0, 0, 0 };
    mixp_tensor *loss;
    nothing n;
    nothing_open(&n, 0);
    mixp_step_begin(n.ctx);
    loss = mixp_masked_fill(n.ctx, mixp_slice(n.ctx, n.w, 0, 0, 2), mixp_input(n.ctx, MIXP_U8, 2, s, hidden), -HUGE_VALF);
    loss = mixp_mean(n.ctx, mixp_softmax(n.ctx, loss), MIXP_ALL, 0);
    CHECK_INT(mixp_backward(n.ctx, mixp_scaler_scale(n.scaler, loss)), MIXP_OK);
    mixp_scaler_step(n.scaler, n.opt);
    mixp_scaler_update(n.scaler);
    CHECK_INT(n.told, 0);
    CHECK_INT(mixp_scaler_verdict(n.scaler).outcome, MIXP_STEP_APPLIED);
    CHECK_INT(n.told, 1);
    CHECK_TEXT(n.text, "step 1 was applied although its loss is not finite");
    mixp_context_free(n.ctx);
}

/* Log-probabilities as the probabilities of kl_div, and the reverse; also through a cast and detach. */
static void warned_of_a_target_of_the_wrong_kind(void) {
    for (int logs = 0; logs < 2; logs++)
        for (int log_target = 0; log_target < 2; log_target++)
            for (int through = 0; through < 3; through++) {
                nothing n;
                nothing_open(&n, 0);
                mixp_step_begin(n.ctx);
                mixp_tensor *t = logs ? mixp_log_softmax(n.ctx, n.w) : mixp_softmax(n.ctx, n.w);
                if (through) t = mixp_detach(n.ctx, through == 2 ? mixp_cast(n.ctx, t, MIXP_F16) : t);
                if (!through) MIXP_NO_GRAD(n.ctx) { t = logs ? mixp_log_softmax(n.ctx, n.w) : mixp_softmax(n.ctx, n.w); }
                CHECK(mixp_kl_div(n.ctx, mixp_log_softmax(n.ctx, n.w), t, log_target) != NULL);
                CHECK_INT(n.told, logs != log_target);
                if (n.told) CHECK_TEXT(n.text, logs ? "log_target is 0: pass log_target 1" : "log_target is 1: pass log_target 0");
                mixp_context_free(n.ctx);
            }
}

/* --- a region that lowers nothing --------------------------------------------------------------- */

typedef enum shape_of_work { FACTORS, FACTORS_AND_CAST, PRODUCT, OUTSIDE, EVALUATED, NO_STEPS } shape_of_work;

/* A recommender's work: rows of a table times each other; all of these operators keep f32. */
static const char *region_warning(shape_of_work what, mixp_dtype dtype, int level, char text[320]) {
    static const int64_t table_shape[2] = { 4, 4 };
    static const int32_t ids[2] = { 1, 3 };
    static const int64_t two[1] = { 2 };
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_tensor *table = mixp_param(ctx, "table", MIXP_F32, 2, table_shape), *a, *b, *out;
    mixp_optimizer *opt = mixp_optimizer_new(ctx, NULL);
    int step;
    mixp_init_normal(table, 0, 1);
    mixp_optimizer_add(opt, table, NULL);
    for (step = 0; step < 3; step++) {
        mixp_autocast region = { MIXP_F32, 0, NULL };
        region.dtype = dtype;
        region.level = level;
        if (what == EVALUATED) mixp_eval_begin(ctx);
        else mixp_step_begin(ctx);
        if (what != OUTSIDE) mixp_autocast_open_with(ctx, &region);
        a = mixp_embedding(ctx, table, mixp_input(ctx, MIXP_I32, 1, two, ids));
        b = what == FACTORS_AND_CAST ? mixp_cast(ctx, a, dtype) : a;
        out = what == PRODUCT ? mixp_linear(ctx, a, table, NULL) : mixp_mul(ctx, a, b);
        out = mixp_mean(ctx, mixp_square(ctx, out), MIXP_ALL, 0);
        mixp_autocast_close(ctx, 0);
        if (what == OUTSIDE || what == EVALUATED) continue;
        mixp_zero_grad(opt);
        CHECK_INT(mixp_backward(ctx, out), MIXP_OK);
        CHECK_INT(mixp_optimizer_step(opt), MIXP_OK);
    }
    mixp_step_begin(ctx);
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    snprintf(text, 320, "%s", mixp_context_warning(ctx));
    mixp_context_free(ctx);
    return text;
}

static void region_that_lowers_nothing(void) {
    char text[320];
    CHECK_TEXT(region_warning(FACTORS, MIXP_F16, 1, text), "autocast to f16 stored nothing in f16: the 4 operators");
    CHECK_TEXT(text, "the last is 'mean'");
    CHECK_TEXT(text, "mixp_cast(ctx, t, MIXP_F16)");
    CHECK_TEXT(region_warning(FACTORS, MIXP_BF16, 1, text), "mixp_cast(ctx, t, MIXP_BF16)");
    for (int what = FACTORS_AND_CAST; what < NO_STEPS; what++)
        CHECK(*region_warning((shape_of_work)what, MIXP_F16, 1, text) == 0);
    for (int level = 2; level < 4; level++) CHECK(*region_warning(FACTORS, MIXP_F16, level, text) == 0);
    CHECK(*region_warning(FACTORS, MIXP_F32, 1, text) == 0);
}

/* A guard that raises all results to f32 is no region that lowers nothing. */
static void region_that_a_guard_raised(void) {
    static const int64_t shape[2] = { 4, 4 };
    static const float big[16] = { 3e4f, 3e4f, 3e4f, 3e4f, 3e4f, 3e4f, 3e4f, 3e4f,
                                   3e4f, 3e4f, 3e4f, 3e4f, 3e4f, 3e4f, 3e4f, 3e4f };
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_tensor *w = mixp_param(ctx, "w", MIXP_F32, 2, shape), *out = NULL;
    mixp_optimizer_desc d = mixp_sgd_defaults();
    mixp_scaler *scaler = mixp_scaler_new(ctx, NULL);
    d.lr = 1e-30;
    mixp_optimizer *opt = mixp_optimizer_new(ctx, &d);
    mixp_fill(w, 3.0);
    mixp_optimizer_add(opt, w, NULL);
    mixp_guard_start(ctx, NULL);
    for (int step = 0; step < 6; step++) {
        mixp_step_begin(ctx);
        mixp_zero_grad(opt);
        mixpi_autocast_enter(ctx, MIXP_F16);
        out = mixp_linear(ctx, mixp_input(ctx, MIXP_F32, 2, shape, big), w, NULL);
        mixpi_autocast_leave(ctx);
        mixp_backward(ctx, mixp_scaler_scale(scaler, mixp_mean(ctx, out, MIXP_ALL, 0)));
        mixp_scaler_step(scaler, opt);
        mixp_scaler_update(scaler);
    }
    CHECK(out && out->dtype == MIXP_F32);       /* raised */
    mixp_step_begin(ctx);
    CHECK(*mixp_context_warning(ctx) == 0);
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    mixp_context_free(ctx);
}

/* AdamW at a rate below half a unit in the last place: told without a master, and then no weight moves. */
static void warned_of_updates_that_round_away(void) {
    static const struct { mixp_dtype dtype; double lr; int no_master, told; } c[] = {
        { MIXP_BF16, 1e-5, 1, 1 }, { MIXP_BF16, 1e-3, 1, 0 }, { MIXP_BF16, 1e-5, 0, 0 }, { MIXP_F16, 1e-6, 1, 1 },
        { MIXP_F16, 1e-5, 1, 0 },  { MIXP_F32, 1e-5, 1, 0 }
    };
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        const int64_t n = 300;
        float before[300], after[300];
        mixp_context_desc d;
        mixp_optimizer_desc o = mixp_adamw_defaults();
        run r;
        int moved = 0;
        memset(&r, 0, sizeof r);
        memset(&d, 0, sizeof d);
        d.on_warning = hear;
        d.user = &r;
        o.lr = c[i].lr;
        o.no_master = c[i].no_master;
        r.ctx = mixp_context_new(&d);
        r.w = mixp_param(r.ctx, "w", c[i].dtype, 1, &n);
        r.opt = mixp_optimizer_new(r.ctx, &o);
        mixp_init_uniform(r.w, 0.02, 0.03);
        mixp_optimizer_add(r.opt, r.w, NULL);
        mixp_read(r.w, before, MIXP_F32, n);
        for (int step = 0; step < 3; step++) {
            mixp_step_begin(r.ctx);
            CHECK_INT(mixp_backward(r.ctx, mixp_sum(r.ctx, r.w, MIXP_ALL, 0)), MIXP_OK);
            CHECK_INT(mixp_optimizer_step(r.opt), MIXP_OK);
        }
        mixp_read(r.w, after, MIXP_F32, n);
        for (int j = 0; j < n; j++) moved += before[j] > after[j];
        CHECK_INT(r.told, c[i].told);
        CHECK_INT(strstr(r.text, "'w' is ") && strstr(r.text, "round away"), c[i].told);
        CHECK(c[i].told ? moved == 0 : c[i].no_master == 0 || moved > n / 2);
        mixp_context_free(r.ctx);
    }
}

int main(void) {
    RUN(warned_with_the_share);
    RUN(warned_of_a_disabled_scaler);
    RUN(warned_later);
    RUN(no_false_warning);
    RUN(none_of_a_comparison);
    RUN(no_memory_after_the_first_step);
    RUN(warned_of_targets_that_do_not_count);
    RUN(a_guard_sees_no_overflow_in_nothing);
    RUN(warned_of_a_loss_that_is_not_finite);
    RUN(warned_of_a_target_of_the_wrong_kind);
    RUN(region_that_lowers_nothing);
    RUN(region_that_a_guard_raised);
    RUN(warned_of_updates_that_round_away);
    return test_report();
}
