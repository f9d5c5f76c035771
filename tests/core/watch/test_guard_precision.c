/* test_guard_precision.c - a guard watches precision: a feature is a year with a fraction. The
 * feature is in the range of f16 and bf16, but its fraction is lost there.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "mixprec.h"
#include "test.h"

enum { UNITS = 64, BATCH = 64, STEPS = 400 };

typedef struct run {
    double loss;                /* the mean of the last 25 steps */
    int    imprecise, other;    /* events */
    char   first[96];           /* the site of the first */
    double lost;                /* and its share */
} run;

static double uniform(uint32_t *s) {
    *s = *s * 1664525u + 1013904223u;
    return (double)(*s >> 8) / 16777216.0;
}

/* x is 2023 to 2024; the target a sine of its fraction. Hinges about the cuts, then two layers. */
static run train(mixp_dtype dtype, int level, int guard, double year) {
    static const int64_t xs[2] = { BATCH, 1 }, row[2] = { 1, UNITS }, square[2] = { UNITS, UNITS };
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_optimizer_desc adam = mixp_adamw_defaults();
    mixp_tensor *b = mixp_param(ctx, "b", MIXP_F32, 2, square), *c = mixp_param(ctx, "c", MIXP_F32, 2, row);
    mixp_scaler *scaler = mixp_scaler_new(ctx, NULL);
    float slope[UNITS], at[UNITS], x[BATCH], t[BATCH];
    uint32_t seed = 1;
    mixp_event e;
    run r;
    memset(&r, 0, sizeof r);
    adam.lr = 3e-3;
    adam.weight_decay = 0;
    mixp_optimizer *opt = mixp_optimizer_new(ctx, &adam);
    mixp_optimizer_add(opt, b, NULL);
    mixp_optimizer_add(opt, c, NULL);
    mixp_init_normal(b, 0, 0.125);
    mixp_init_normal(c, 0, 0.125);
    for (int i = 0; i < UNITS; i++) {
        slope[i] = uniform(&seed) < 0.5 ? -8.0f : 8.0f;
        at[i] = (float)(-(double)slope[i] * (year + uniform(&seed)));
    }
    mixp_autocast_set_level(ctx, level);
    if (guard) CHECK_INT(mixp_guard_start(ctx, NULL), MIXP_OK);
    for (int step = 0; step < STEPS; step++) {
        mixp_tensor *h, *loss = NULL;
        for (int i = 0; i < BATCH; i++) {
            const double u = uniform(&seed);
            x[i] = (float)(year + u);
            t[i] = (float)sin(6.283185307179586 * u);
        }
        do {
            mixp_step_begin(ctx);
            mixp_zero_grad(opt);
            MIXP_AUTOCAST(ctx, dtype) {
                h = mixp_matmul(ctx, mixp_input(ctx, MIXP_F32, 2, xs, x),
                                mixp_input(ctx, MIXP_F32, 2, row, slope), 0, 0);
                h = mixp_relu(ctx, mixp_add(ctx, h, mixp_input(ctx, MIXP_F32, 2, row, at)));
                h = mixp_relu(ctx, mixp_linear(ctx, h, b, NULL));
                loss = mixp_mse(ctx, mixp_linear(ctx, h, c, NULL), mixp_input(ctx, MIXP_F32, 2, xs, t));
            }
            mixp_backward(ctx, mixp_scaler_scale(scaler, loss));
            mixp_scaler_step(scaler, opt);
            mixp_scaler_update(scaler);
        } while (mixp_retry(scaler, 3));
        if (step >= STEPS - 25) r.loss += mixp_item(loss) / 25;
    }
    for (int i = 0; mixp_guard_event(ctx, i, &e); i++) {
        char text[400];
        if (getenv("SHOW")) printf("    %s\n", mixp_event_text(&e, text, sizeof text));
        if (e.kind == MIXP_EVENT_IMPRECISE && !r.imprecise++) {
            snprintf(r.first, sizeof r.first, "%s", e.site);
            r.lost = e.imprecise;
        } else if (e.kind != MIXP_EVENT_IMPRECISE && e.kind != MIXP_EVENT_SKIP) r.other++;
    }
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    mixp_context_free(ctx);
    return r;
}

/* The fraction is what the model learns from: without a guard nothing is learnt, with one as in f32. */
static void a_year_with_its_fraction(void) {
    const run f32 = train(MIXP_F32, 1, 0, 2023);
    CHECK(f32.loss < 0.01);
    for (int level = 1; level <= 2; level++) {
        const run half = train(MIXP_F16, level, 1, 2023), wide = train(MIXP_BF16, level, 1, 2023);
        const run bare = train(MIXP_F16, level, 0, 2023);
        CHECK(bare.loss > f32.loss + 0.05);
        CHECK_NEAR(half.loss, f32.loss, 0.01);
        CHECK_NEAR(wide.loss, f32.loss, 0.01);
        CHECK(half.imprecise >= 2 && wide.imprecise >= 2);
        CHECK_TEXT(half.first, "cast");
        CHECK(half.lost > 0.5 && half.lost < 2);    /* a spacing of 1 beside a width of 1 */
        printf("  level %d: f32 %.2e, f16 %.2e (%d events), bf16 %.2e (%d events), f16 without %.2e\n",
               level, f32.loss, half.loss, half.imprecise, wide.loss, wide.imprecise, bare.loss);
    }
}

/* The same model of the fraction alone loses little, and is let be. */
static void a_fraction_is_let_be(void) {
    for (int level = 1; level <= 2; level++) {
        const run half = train(MIXP_F16, level, 1, 0), wide = train(MIXP_BF16, level, 1, 0);
        CHECK_INT(half.imprecise + wide.imprecise, 0);
    }
}

/* Beside an offset of 10, bf16 keeps 16 values of a fraction: 6 % of its variation are lost, and with
 * them most of what f32 learns. */
static void an_offset_that_costs_little_precision(void) {
    const run f32 = train(MIXP_F32, 1, 0, 10), bare = train(MIXP_BF16, 1, 0, 10);
    CHECK(f32.loss < 0.001 && bare.loss > 4 * f32.loss);
    for (int level = 1; level <= 2; level++) {
        const run wide = train(MIXP_BF16, level, 1, 10);
        CHECK(wide.imprecise >= 1);
        CHECK_TEXT(wide.first, "cast");
        CHECK_NEAR(wide.lost, 1.0 / 16, 0.006);     /* a spacing of 1/16 beside a width of 1 */
        CHECK(wide.loss < 1.02 * f32.loss + 0.0001);
        printf("  level %d: f32 %.2e, bf16 %.2e (%d events), bf16 without %.2e\n", level, f32.loss, wide.loss,
               wide.imprecise, bare.loss);
    }
}

/* Where rounding costs a linear too much, its rounded weights would as well: it reads both in f32. recipes 1: under
 * rules that leave the linear in bf16; 2, 3: under a recipe that keeps it, or whose sizes do not fit. */
static void imprecise_products_read_f32_weights_under(int recipes) {
    enum { ROWS = 16, IN = 4, OUT = 8 };
    static const int64_t xs[2] = { ROWS, IN }, ws[2] = { OUT, IN };
    float x[ROWS * IN], w[OUT * IN], y[ROWS * OUT];
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_tensor *weight = mixp_param(ctx, "w", MIXP_F32, 2, ws);
    mixp_optimizer *opt = mixp_optimizer_new(ctx, NULL);
    const mixp_recipe_rule rule = { "w", NULL };
    mixp_recipe fp8;
    uint32_t seed = 1;
    for (int i = 0; i < ROWS * IN; i++) x[i] = (float)(100 + uniform(&seed));
    for (int i = 0; i < OUT * IN; i++) w[i] = (float)(uniform(&seed) - 0.5);
    mixp_write(weight, w, MIXP_F32, OUT * IN);
    mixp_optimizer_add(opt, weight, NULL);
    CHECK_INT(mixp_guard_start(ctx, NULL), MIXP_OK);
    memset(&fp8, 0, sizeof fp8);
    fp8.kind = MIXP_RECIPE_FP8_CURRENT;
    if (recipes == 1) CHECK_INT(mixp_autocast_set_recipes(ctx, &rule, 1), MIXP_OK);
    if (recipes > 1) CHECK_INT(mixp_autocast_set_recipe(ctx, &fp8), MIXP_OK);
    for (int step = 0; step < 2; step++) {
        mixp_tensor *out = NULL;
        mixp_step_begin(ctx);
        MIXP_AUTOCAST(ctx, MIXP_BF16) {
            out = mixp_linear(ctx, mixp_input(ctx, MIXP_F32, 2, xs, x), weight, NULL);
        }
        CHECK_INT(mixp_read(out, y, MIXP_F32, ROWS * OUT), MIXP_OK);
        CHECK_INT(out->dtype, step ? MIXP_F32 : MIXP_BF16);
    }
    for (int i = 0; i < ROWS; i++)
        for (int k = 0; k < OUT; k++) {
            double sum = 0;
            for (int j = 0; j < IN; j++) sum += (double)x[i * IN + j] * (double)w[k * IN + j];
            CHECK_NEAR(y[i * OUT + k], sum, 1e-4);  /* a bf16 weight would be off by 0.1 */
        }
    mixp_context_free(ctx);
}

static void imprecise_products_read_f32_weights(void) {
    for (int recipes = 0; recipes < 3; recipes++) imprecise_products_read_f32_weights_under(recipes);
}

static mixp_result no_reduce(const mixp_exec *x, const mixp_reduce_args *k) {
    (void)x;
    (void)k;
    return MIXP_ERR_DEVICE;
}

/* What the device cannot do for a look is told as that, by the operator's name. */
static void a_failed_look_is_told(void) {
    static const int64_t xs[2] = { 16, 8 }, ws[2] = { 8, 8 };
    mixp_kernels kernels = *mixp_cpu()->kernels;
    mixp_device device = *mixp_cpu();
    mixp_context_desc d;
    mixp_tensor *w, *y = NULL;
    const char *why = "";
    float x[128];
    memset(x, 0, sizeof x);
    memset(&d, 0, sizeof d);
    kernels.reduce = no_reduce;
    device.kernels = &kernels;
    d.device = &device;
    mixp_context *ctx = mixp_context_new(&d);
    w = mixp_param(ctx, "w", MIXP_F32, 2, ws);
    mixp_guard_start(ctx, NULL);
    mixp_step_begin(ctx);
    MIXP_AUTOCAST(ctx, MIXP_F16) { y = mixp_linear(ctx, mixp_input(ctx, MIXP_F32, 2, xs, x), w, NULL); }
    CHECK(!y);
    CHECK_INT(mixp_context_error(ctx, &why), MIXP_ERR_DEVICE);
    CHECK(strstr(why, "cast") != NULL);
    mixp_context_free(ctx);
}

int main(void) {
    RUN(a_year_with_its_fraction);
    RUN(a_fraction_is_let_be);
    RUN(an_offset_that_costs_little_precision);
    RUN(imprecise_products_read_f32_weights);
    RUN(a_failed_look_is_told);
    return test_report();
}
