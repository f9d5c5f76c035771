/* test_recipe_inf.c - an Inf or NaN of the batch, of a weight or of a gradient is not hidden by a recipe: the step
 * is skipped as in bf16, with and without a guard, with and without codes, and a guard names the origin.
 * SPDX-License-Identifier: MIT OR Unlicense */
#include "mixprec.h"
#include "test.h"

enum { N = 128, RECIPES = 6 };
typedef enum place { IN_BATCH, IN_FIRST, IN_WEIGHT, IN_GRADIENT, PLACES } place;
static const char *const place_names[PLACES] = { "batch", "batch, before relu", "weight", "gradient" };

typedef struct net {
    mixp_context   *ctx;
    mixp_scaler    *scaler;
    mixp_optimizer *opt;
    mixp_tensor    *a, *b;
} net;

static net net_of(int recipe, int guarded, int codes) {
    static const int64_t shape[2] = { N, N };
    mixp_optimizer_desc sgd = mixp_sgd_defaults();
    mixp_scaler_desc s;
    mixp_guard_desc g;
    mixp_recipe r;
    net n;
    memset(&r, 0, sizeof r);
    memset(&g, 0, sizeof g);
    memset(&s, 0, sizeof s);
    g.every = 1;
    s.init_scale = 64.0f;
    sgd.lr = 1e-3;
    n.ctx = mixp_context_new(NULL);
    n.scaler = mixp_scaler_new(n.ctx, &s);
    n.a = mixp_param(n.ctx, "a", MIXP_F32, 2, shape);
    n.b = mixp_param(n.ctx, "b", MIXP_F32, 2, shape);
    mixp_init_normal(n.a, 0.0, 0.1);
    mixp_init_normal(n.b, 0.0, 0.1);
    n.opt = mixp_optimizer_new(n.ctx, &sgd);
    mixp_optimizer_add(n.opt, n.a, NULL);
    mixp_optimizer_add(n.opt, n.b, NULL);
    r.kind = (mixp_recipe_kind)recipe;
    r.codes = codes;
    if (recipe) CHECK_INT(mixp_autocast_set_recipe(n.ctx, &r), MIXP_OK);
    if (guarded) CHECK_INT(mixp_guard_start(n.ctx, &g), MIXP_OK);
    return n;
}

/* linear, relu, linear; the gradient of the loss is `dy`. */
static mixp_verdict net_step(net *n, const float *x, const float *dy, int relu_first) {
    static const int64_t shape[2] = { N, N };
    mixp_tensor *loss = NULL, *h;
    mixp_step_begin(n->ctx);
    mixp_zero_grad(n->opt);
    MIXP_AUTOCAST(n->ctx, MIXP_BF16) {
        h = mixp_linear(n->ctx, mixp_input(n->ctx, MIXP_F32, 2, shape, x), n->a, NULL);
        if (relu_first) h = mixp_relu(n->ctx, h);
        mixp_tensor_set_disposable(h, 1);
        h = mixp_linear(n->ctx, h, n->b, NULL);
        h = mixp_mul(n->ctx, h, mixp_input(n->ctx, MIXP_F32, 2, shape, dy));
        loss = mixp_mean(n->ctx, h, MIXP_ALL, 0);
    }
    mixp_backward(n->ctx, mixp_scaler_scale(n->scaler, loss));
    mixp_scaler_step(n->scaler, n->opt);
    mixp_scaler_update(n->scaler);
    return mixp_scaler_verdict(n->scaler);
}

/* Steps of healthy numbers are applied; the step with the bad number is skipped and changes no weight. */
static void one_case(int recipe, place where, int is_nan, int guarded, int codes) {
    static float x[N * N], dy[N * N], w[N * N], before[N * N], after[N * N];
    const float bad = mixp_f32_of_bits(is_nan ? 0x7FC00000u : 0x7F800000u);
    net n = net_of(recipe, guarded, codes);
    for (int i = 0; i < N * N; i++) x[i] = (float)((i * 37 + 5) % 61 - 30) / 16.0f;
    for (int i = 0; i < N * N; i++) dy[i] = (float)((i * 29 + 3) % 53 - 26) / 64.0f;
    for (int i = 0; i < 3; i++) CHECK_INT(net_step(&n, x, dy, where == IN_FIRST).outcome, MIXP_STEP_APPLIED);
    if (where == IN_BATCH || where == IN_FIRST) x[5 * N + 7] = bad;
    if (where == IN_GRADIENT) dy[5 * N + 7] = bad;
    mixp_read(n.b, w, MIXP_F32, N * N);
    w[5 * N + 7] = bad;
    if (where == IN_WEIGHT) mixp_write(n.b, w, MIXP_F32, N * N);
    mixp_read(n.a, before, MIXP_F32, N * N);
    mixp_verdict v = net_step(&n, x, dy, where == IN_FIRST);
    mixp_read(n.a, after, MIXP_F32, N * N);
    if (v.outcome != MIXP_STEP_SKIPPED || memcmp(before, after, sizeof before) != 0) {
        test_bad++;
        TEST_SHOW("%s, %s in the %s, guard %d, codes %d: applied", mixp_recipe_name((mixp_recipe_kind)recipe),
                  is_nan ? "NaN" : "Inf", place_names[where], guarded, codes);
    }
    if (guarded && where == IN_WEIGHT) CHECK_INT(v.origin, MIXP_ORIGIN_WEIGHT);
    if (guarded && where != IN_WEIGHT) CHECK_INT(v.origin, MIXP_ORIGIN_INPUT);
    if (guarded && where != IN_GRADIENT) CHECK_TEXT(v.site, where == IN_WEIGHT ? "b: linear" : "a: ");
    mixp_context_free(n.ctx);
}

static void test_a_bad_number_skips_the_step(void) {
    for (int recipe = 0; recipe < RECIPES; recipe++)
        for (int where = 0; where < PLACES; where++)
            for (int is_nan = 0; is_nan < 2; is_nan++)
                for (int guarded = 0; guarded < 2; guarded++)
                    for (int codes = 0; codes < (recipe ? 2 : 1); codes++)
                        one_case(recipe, (place)where, is_nan, guarded, codes);
}

/* The quantiser itself, on each instruction set: what is not finite stays so, whatever the scale; what is finite
 * is clipped as before. */
static void *room_of(void *user, size_t bytes) {
    static float room[4096];
    (void)user;
    return bytes <= sizeof room ? room : NULL;
}

static void test_quantise(void) {
    static const struct { mixp_block_scale scale; mixp_dtype element; int64_t rows, cols; float given; } plans[] = {
        { MIXP_SCALE_TENSOR, MIXP_F8_E4M3, 0, 0, 0 },  { MIXP_SCALE_TENSOR, MIXP_F8_E5M2, 0, 0, 0 },
        { MIXP_SCALE_TENSOR, MIXP_F8_E4M3, 0, 0, 3e38f }, { MIXP_SCALE_TENSOR, MIXP_F8_E5M2, 0, 0, 1e-38f },
        { MIXP_SCALE_POWER, MIXP_F8_E4M3, 1, 32, 0 },  { MIXP_SCALE_POWER, MIXP_F8_E4M3, 32, 1, 0 },
        { MIXP_SCALE_E8M0, MIXP_F8_E4M3, 1, 32, 0 },   { MIXP_SCALE_E8M0, MIXP_F8_E5M2, 32, 32, 0 },
        { MIXP_SCALE_E4M3, MIXP_F4_E2M1, 1, 16, 0 },   { MIXP_SCALE_E4M3, MIXP_F4_E2M1, 16, 16, 0 } };
    static float x[32 * 32];
    static mixp_bf16 y[32 * 32];
    for (int isa = 0; isa < MIXP_ISA_COUNT; isa++)
        for (size_t p = 0; mixp_cpu_with((mixp_isa)isa) && p < sizeof plans / sizeof plans[0]; p++)
            for (int at = 0; at < 32 * 32; at += 31)
                for (int is_nan = 0; is_nan < 2; is_nan++)
                    for (int stochastic = 0; stochastic < 1 + (plans[p].element == MIXP_F4_E2M1); stochastic++) {
                        mixp_quantise_args k;
                        mixp_exec exec;
                        int lost = 0;
                        memset(&exec, 0, sizeof exec);
                        memset(&k, 0, sizeof k);
                        exec.threads = 1;
                        exec.scratch = room_of;
                        for (int i = 0; i < 32 * 32; i++) x[i] = (float)(i % 13 - 6) * (i % 2 ? 1e9f : 1.0f);
                        x[at] = mixp_f32_of_bits(is_nan ? 0x7FC00000u : at % 2 ? 0xFF800000u : 0x7F800000u);
                        k.rows = k.cols = 32;
                        k.x = mixpi_in(x, MIXP_F32);
                        k.y = y;
                        k.element = plans[p].element;
                        k.scale = plans[p].scale;
                        k.block_rows = plans[p].rows;
                        k.block_cols = plans[p].cols;
                        k.given = plans[p].given;
                        k.stochastic = stochastic;
                        CHECK_INT(mixp_cpu_with((mixp_isa)isa)->kernels->quantise(&exec, &k), MIXP_OK);
                        for (int i = 0; i < 32 * 32; i++)
                            lost += i == at ? (y[i].bits & 0x7FFF) < 0x7F80
                                            : plans[p].scale < MIXP_SCALE_E8M0 && (y[i].bits & 0x7FFF) >= 0x7F80;
                        CHECK_INT(lost, 0);
                    }
}

int main(void) {
    RUN(test_quantise);
    RUN(test_a_bad_number_skips_the_step);
    return test_report();
}
