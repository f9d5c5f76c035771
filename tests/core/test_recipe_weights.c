/* test_recipe_weights.c - the quantised values that a weight keeps for recipes: made once for each
 * version of the weight, and never stale. After each way to write a weight, results and gradients
 * have the bits of another weight, made at that moment with the same numbers.
 * SPDX-License-Identifier: MIT OR Unlicense */
#include "mixprec.h"
#include "test.h"

enum { ROWS = 128, OUT = 256, IN = 128, MOST = 64 };
static const int64_t w_shape[2] = { OUT, IN }, x_shape[2] = { ROWS, IN };
static float xs[ROWS * IN], ws[OUT * IN];

static void fill(float *x, int n, uint64_t key) {
    int i;
    for (i = 0; i < n; i++) x[i] = (float)mixp_random_at(key, (uint64_t)i) / 4294967296.0f - 0.5f;
}

/* --- how often the quantiser ran --------------------------------------------------------------- */

static int ran;
static mixp_result (*real_quantise)(const mixp_exec *x, const mixp_quantise_args *k);
static mixp_result counted(const mixp_exec *x, const mixp_quantise_args *k) {
    ran++;
    return real_quantise(x, k);
}

static mixp_context *counting_context(void) {
    static mixp_kernels kernels;
    static mixp_device device;
    mixp_context_desc desc;
    device = *mixp_cpu();
    kernels = *device.kernels;
    real_quantise = kernels.quantise;
    kernels.quantise = counted;
    device.kernels = &kernels;
    memset(&desc, 0, sizeof desc);
    desc.device = &device;
    desc.seed = 7;
    return mixp_context_new(&desc);
}

/* --- one linear -------------------------------------------------------------------------------- */

static void set_kind(mixp_context *ctx, mixp_recipe_kind kind) {
    mixp_recipe r;
    memset(&r, 0, sizeof r);
    r.kind = kind;
    r.no_stochastic = 1;        /* random numbers differ from call to call */
    mixp_autocast_set_recipe(ctx, &r);
}

/* y = x w', and the gradients of x and w for the mean of y + y^2. */
static mixp_tensor *walk(mixp_context *ctx, mixp_tensor *w, mixp_tensor *x) {
    mixp_tensor *y = NULL;
    MIXP_AUTOCAST(ctx, MIXP_BF16) y = mixp_linear(ctx, x, w, NULL);
    mixp_backward(ctx, mixp_mean(ctx, mixp_add(ctx, y, mixp_mul(ctx, y, y)), MIXP_ALL, 0));
    return y;
}

typedef struct values { float y[ROWS * OUT], dx[ROWS * IN]; } values;

static void of_linear(mixp_context *ctx, mixp_tensor *w, values *v) {
    mixp_tensor *x, *y;
    mixp_step_begin(ctx);
    x = mixp_input(ctx, MIXP_F32, 2, x_shape, xs);
    mixp_tensor_set_requires_grad(x, 1);
    y = walk(ctx, w, x);
    mixp_read(y, v->y, MIXP_F32, ROWS * OUT);
    mixp_read(x->grad, v->dx, MIXP_F32, ROWS * IN);
}

static values first, second, before;
static int copies;

/* w and a weight made now of the same numbers. */
static void same_as_new(mixp_context *ctx, mixp_tensor *w, const char *after) {
    static float now[OUT * IN];
    char name[16];
    mixp_tensor *other;
    snprintf(name, sizeof name, "copy.%d", copies++);
    other = mixp_param(ctx, name, MIXP_F32, 2, w_shape);
    mixp_read(w, now, MIXP_F32, OUT * IN);
    mixp_write(other, now, MIXP_F32, OUT * IN);
    of_linear(ctx, w, &first);
    of_linear(ctx, other, &second);
    if (memcmp(&first, &second, sizeof first)) printf("  after %s\n", after);
    CHECK(memcmp(&first, &second, sizeof first) == 0);
    CHECK(memcmp(&first, &before, sizeof first) != 0);
    before = first;
}

static void never_stale_in(mixp_recipe_kind kind) {
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_optimizer_desc adam = mixp_adamw_defaults();
    mixp_optimizer *opt = mixp_optimizer_new(ctx, &adam);
    mixp_tensor *w = mixp_param(ctx, "w", MIXP_F32, 2, w_shape), *u, *whole;
    const int64_t flat[1] = { OUT * IN };
    memset(&before, 0, sizeof before);
    mixp_optimizer_add(opt, w, NULL);
    mixp_optimizer_set_ema(opt, 0.5);
    set_kind(ctx, kind);
    fill(ws, OUT * IN, 1);
    mixp_write(w, ws, MIXP_F32, OUT * IN);
    same_as_new(ctx, w, "mixp_write");
    ws[5] = 7.0f;
    mixp_write(w, ws, MIXP_F32, OUT * IN);
    same_as_new(ctx, w, "a second mixp_write");
    mixp_optimizer_step(opt);
    same_as_new(ctx, w, "mixp_optimizer_step");
    mixp_optimizer_swap_ema(opt);
    same_as_new(ctx, w, "mixp_optimizer_swap_ema");
    mixp_optimizer_swap_ema(opt);
    same_as_new(ctx, w, "the second swap");
    mixp_init_normal(w, 0.0, 0.5);
    same_as_new(ctx, w, "mixp_init_normal");
    u = mixp_param(ctx, "u", MIXP_F32, 2, w_shape);
    mixp_init_normal(u, 0.0, 0.25);
    mixp_copy(w, u);
    same_as_new(ctx, w, "mixp_copy");
    ws[9] = -3.0f;
    mixp_step_begin(ctx);
    whole = mixp_reshape(ctx, w, 1, flat);
    mixp_write(whole, ws, MIXP_F32, OUT * IN);
    same_as_new(ctx, w, "a write through a reshape");
    fill(ws, OUT * IN, 2);
    mixp_write(mixp_tensor_low(w, MIXP_BF16), ws, MIXP_F32, OUT * IN);
    of_linear(ctx, w, &first);
    CHECK(memcmp(&first, &before, sizeof first) != 0);      /* a write to the low copy */
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    mixp_context_free(ctx);
}

static void never_stale(void) {
    int kind;
    fill(xs, ROWS * IN, 3);
    for (kind = 1; kind < MIXP_RECIPE_COUNT; kind++)
        if (kind != MIXP_RECIPE_FP8_DELAYED) never_stale_in((mixp_recipe_kind)kind);
}

/* Another recipe makes its own values, and the first recipe its own again. */
static void other_recipe(void) {
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_tensor *w = mixp_param(ctx, "w", MIXP_F32, 2, w_shape);
    static values of[MIXP_RECIPE_COUNT];
    int kind, turn;
    fill(xs, ROWS * IN, 3);
    fill(ws, OUT * IN, 1);
    mixp_write(w, ws, MIXP_F32, OUT * IN);
    for (turn = 0; turn < 2; turn++)
        for (kind = 1; kind < MIXP_RECIPE_COUNT; kind++) {
            set_kind(ctx, (mixp_recipe_kind)kind);
            of_linear(ctx, w, turn ? &second : &of[kind]);
            if (turn) CHECK(memcmp(&second, &of[kind], sizeof second) == 0);
            else if (kind > 1) CHECK(memcmp(&of[kind], &of[1], sizeof second) != 0);
        }
    mixp_context_free(ctx);
}

/* In micro-batches a weight is quantised once, or once for each direction, until it is written. A
 * gradient with one scale is quantised once for both products, other operands for each product. */
static void made_once(void) {
    const int weight[MIXP_RECIPE_COUNT] = { 0, 1, 1, 1, 2, 1 }, others[MIXP_RECIPE_COUNT] = { 0, 3, 3, 4, 4, 4 };
    int kind, i;
    for (kind = 1; kind < MIXP_RECIPE_COUNT; kind++) {
        mixp_context *ctx = counting_context();
        mixp_tensor *w = mixp_param(ctx, "w", MIXP_F32, 2, w_shape);
        fill(ws, OUT * IN, 1);
        mixp_write(w, ws, MIXP_F32, OUT * IN);
        set_kind(ctx, (mixp_recipe_kind)kind);
        for (i = 0; i < 6; i++) {
            ran = 0;
            of_linear(ctx, w, &first);      /* x twice, dy once or twice, and the weight */
            CHECK_INT(ran, others[kind] + (i % 3 ? 0 : weight[kind]));
            if (i == 2) mixp_write(w, ws, MIXP_F32, OUT * IN);
        }
        ran = 0;
        mixp_step_begin(ctx);
        MIXP_NO_GRAD(ctx) MIXP_AUTOCAST(ctx, MIXP_BF16)
            mixp_linear(ctx, mixp_input(ctx, MIXP_F32, 2, x_shape, xs), mixp_scale(ctx, w, 2.0f), NULL);
        CHECK_INT(ran, kind == MIXP_RECIPE_FP8_DELAYED ? 0 : 2);
        mixp_context_free(ctx);
    }
}

/* The second walk takes no more memory. */
static void memory(void) {
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_tensor *w = mixp_param(ctx, "w", MIXP_F32, 2, w_shape);
    int64_t allocations;
    set_kind(ctx, MIXP_RECIPE_MXFP8);
    mixp_write(w, ws, MIXP_F32, OUT * IN);
    of_linear(ctx, w, &first);
    of_linear(ctx, w, &first);
    allocations = mixp_context_memory(ctx).allocations;
    mixp_write(w, ws, MIXP_F32, OUT * IN);
    of_linear(ctx, w, &first);
    CHECK_INT(mixp_context_memory(ctx).allocations, allocations);
    mixp_context_free(ctx);
}

int main(void) {
    RUN(never_stale);
    RUN(other_recipe);
    RUN(made_once);
    RUN(memory);
    return test_report();
}
