/* test_recipe_weights.c - the quantised values that a weight keeps for recipes: made once for each
 * version of the weight, and never stale. After each way to write a weight, results and gradients
 * have the bits of another weight, made at that moment with the same numbers.
 * SPDX-License-Identifier: MIT OR Unlicense */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "mixprec.h"
#include "new_optimizer.h"
#include "test.h"
#ifndef _WIN32
#include <sys/wait.h>
#include <unistd.h>
#include "../../../examples/ddp_fork.c"
#endif

enum { ROWS = 128, OUT = 256, IN = 128, MOST = 64 };
static const int64_t w_shape[2] = { OUT, IN }, x_shape[2] = { ROWS, IN };
static float xs[ROWS * IN], ws[OUT * IN];

static void fill(float *x, int n, uint64_t key) {
    for (int i = 0; i < n; i++) x[i] = (float)mixp_random_at(key, (uint64_t)i) / 4294967296.0f - 0.5f;
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
    mixp_step_begin(ctx);
    mixp_tensor *x = mixp_input(ctx, MIXP_F32, 2, x_shape, xs);
    mixp_tensor_set_requires_grad(x, 1);
    mixp_tensor *y = walk(ctx, w, x);
    mixp_read(y, v->y, MIXP_F32, ROWS * OUT);
    mixp_read(x->grad, v->dx, MIXP_F32, ROWS * IN);
}

static values first, second, before;
static int copies;

/* w and a weight made now of the same numbers. */
static void same_as_new(mixp_context *ctx, mixp_tensor *w, const char *after) {
    static float now[OUT * IN];
    char name[16];
    snprintf(name, sizeof name, "copy.%d", copies++);
    mixp_tensor *other = mixp_param(ctx, name, MIXP_F32, 2, w_shape);
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
    if (kind != MIXP_RECIPE_FP8_DELAYED) {      /* there a step gives w another scale than a new weight's */
        mixp_optimizer_step(opt);
        same_as_new(ctx, w, "mixp_optimizer_step");
        mixp_optimizer_swap_ema(opt);
        same_as_new(ctx, w, "mixp_optimizer_swap_ema");
        mixp_optimizer_swap_ema(opt);
        same_as_new(ctx, w, "the second swap");
    }
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
    fill(xs, ROWS * IN, 3);
    for (int kind = 1; kind < MIXP_RECIPE_COUNT; kind++) never_stale_in((mixp_recipe_kind)kind);
}

static char path[80];

/* Files, the program's own pointer, and a scaler's step, which may be skipped. */
static void written_by_others(mixp_recipe_kind kind) {
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_tensor *w = mixp_param(ctx, "w", MIXP_F32, 2, w_shape);
    mixp_checkpoint c;
    mixp_weights_desc only;
    memset(&c, 0, sizeof c);
    memset(&only, 0, sizeof only);
    c.ctx = ctx;
    only.pattern = "w";
    memset(&before, 0, sizeof before);
    copies = 0;
    set_kind(ctx, kind);
    mixp_init_uniform(w, -0.5, 0.5);
    snprintf(path, sizeof path, "/tmp/mixprec_weights.%d", (int)getpid());
    CHECK_INT(mixp_checkpoint_save(path, &c), MIXP_OK);
    mixp_init_uniform(w, -1.0, 1.0);
    of_linear(ctx, w, &first);
    before = first;
    CHECK_INT(mixp_checkpoint_load(path, &c), MIXP_OK);
    same_as_new(ctx, w, "mixp_checkpoint_load");
    mixp_fill(w, 0.75);
    same_as_new(ctx, w, "mixp_fill");
    CHECK_INT(mixp_checkpoint_load_weights(path, ctx, &only), MIXP_OK);
    same_as_new(ctx, w, "mixp_checkpoint_load_weights");
    for (int i = 0; i < OUT * IN; i++) ((float *)w->data)[i] *= -2.0f;
    mixp_tensor_touch(w);
    same_as_new(ctx, w, "mixp_tensor_touch");
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    remove(path);
    mixp_context_free(ctx);
}

static void other_writers(void) {
    fill(xs, ROWS * IN, 3);
    for (int kind = 1; kind < MIXP_RECIPE_COUNT; kind++) written_by_others((mixp_recipe_kind)kind);
}

/* A step of `opt` for the loss of w's linear; skip: its gradient has a NaN, and a scaler skips it. */
static void stepped(mixp_context *ctx, mixp_scaler *scaler, mixp_optimizer *opt, mixp_tensor *w, int skip) {
    mixp_tensor *x, *y = NULL;
    mixp_step_begin(ctx);
    mixp_zero_grad(opt);
    x = mixp_input(ctx, MIXP_F32, 2, x_shape, xs);
    MIXP_AUTOCAST(ctx, MIXP_BF16) y = mixp_linear(ctx, x, w, NULL);
    y = mixp_scale(ctx, y, skip ? mixp_f32_of_bits(0x7F800000u) : 1.0f);
    mixp_backward(ctx, mixp_scaler_scale(scaler, mixp_mean(ctx, y, MIXP_ALL, 0)));
    CHECK_INT(mixp_scaler_step(scaler, opt), MIXP_OK);
    CHECK_INT(mixp_scaler_update(scaler), MIXP_OK);
    CHECK_INT(mixp_scaler_verdict(scaler).outcome, skip ? MIXP_STEP_SKIPPED : MIXP_STEP_APPLIED);
}

/* Optimizers of each kind, weights in f32 and bf16, masters of 16 bits: two of them step in turns, and the weight
 * that rests keeps its values. A skipped step changes nothing. */
static void two_optimizers(void) {
    mixp_optimizer_desc descs[6];
    descs[0] = mixp_adamw_defaults();
    descs[1] = mixp_sgd_defaults();
    descs[2] = mixp_lion_defaults();
    descs[3] = mixp_muon_defaults();
    descs[4] = descs[5] = mixp_adamw_defaults();
    descs[4].states.master = MIXP_MASTER_16BIT;
    descs[5].states.master = MIXP_MASTER_8BIT;
    fill(xs, ROWS * IN, 3);
    for (int i = 0; i < 6; i++)
        for (int dtype = 0; dtype < 2; dtype++) {
            mixp_context *ctx = mixp_context_new(NULL);
            mixp_scaler *scaler = mixp_scaler_new(ctx, NULL);
            const mixp_dtype stored = dtype ? MIXP_BF16 : MIXP_F32;
            mixp_tensor *w = mixp_param(ctx, "w", stored, 2, w_shape), *rest = mixp_param(ctx, "rest", stored, 2, w_shape);
            static values resting;
            descs[i].lr = i == 1 ? 100 : 0.05;
            mixp_optimizer *one = mixp_optimizer_new(ctx, &descs[i]);
            mixp_optimizer *two = mixp_optimizer_new(ctx, &descs[i]);
            mixp_optimizer_add(one, w, NULL);
            mixp_optimizer_add(two, rest, NULL);
            mixp_init_normal(w, 0, 0.1);
            mixp_init_normal(rest, 0, 0.1);
            memset(&before, 0, sizeof before);
            copies = 0;
            set_kind(ctx, MIXP_RECIPE_NVFP4);
            same_as_new(ctx, w, "the beginning");
            of_linear(ctx, rest, &resting);
            stepped(ctx, scaler, one, w, 0);
            same_as_new(ctx, w, "mixp_scaler_step");
            stepped(ctx, scaler, one, w, 1);
            of_linear(ctx, w, &first);
            CHECK(memcmp(&first, &before, sizeof first) == 0);
            of_linear(ctx, rest, &first);
            CHECK(memcmp(&first, &resting, sizeof first) == 0);
            before = resting;
            stepped(ctx, scaler, two, rest, 0);
            same_as_new(ctx, rest, "the other optimizer's step");
            CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
            mixp_context_free(ctx);
        }
}

/* A weight that an embedding reads as well, and a frozen weight, which no optimizer has. */
static void tied_and_frozen(void) {
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_optimizer *opt = new_adam(ctx);
    mixp_tensor *w = mixp_param(ctx, "w", MIXP_F32, 2, w_shape), *frozen = mixp_param(ctx, "frozen", MIXP_F32, 2, w_shape);
    int32_t ids[ROWS];
    const int64_t rows = ROWS;
    for (int i = 0; i < ROWS; i++) ids[i] = i * 5 % OUT;
    fill(xs, ROWS * IN, 3);
    mixp_optimizer_add(opt, w, NULL);
    mixp_init_normal(w, 0, 0.1);
    mixp_init_normal(frozen, 0, 0.1);
    CHECK_INT(mixp_tensor_set_requires_grad(frozen, 0), MIXP_OK);
    memset(&before, 0, sizeof before);
    copies = 0;
    set_kind(ctx, MIXP_RECIPE_FP8_BLOCK);
    for (int step = 0; step < 3; step++) {
        mixp_tensor *h, *y = NULL, *z = NULL;
        mixp_step_begin(ctx);
        mixp_zero_grad(opt);
        h = mixp_embedding(ctx, w, mixp_input(ctx, MIXP_I32, 1, &rows, ids));
        MIXP_AUTOCAST(ctx, MIXP_BF16) {
            y = mixp_linear(ctx, h, w, NULL);
            z = mixp_linear(ctx, h, frozen, NULL);
        }
        mixp_backward(ctx, mixp_mean(ctx, mixp_mul(ctx, y, z), MIXP_ALL, 0));
        CHECK_INT(mixp_optimizer_step(opt), MIXP_OK);
        same_as_new(ctx, w, "a step of a tied weight");
    }
    same_as_new(ctx, frozen, "steps of other weights");
    mixp_init_normal(frozen, 0, 0.2);
    same_as_new(ctx, frozen, "a write to a frozen weight");
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    mixp_context_free(ctx);
}

#ifdef _WIN32
static void ranks(void) { SKIP("no fork"); }
#else
/* Each rank has quantised its own weights before it takes rank 0's, and steps its part of them. */
static void rank_takes(const mixp_ranks_desc *ranks) {
    mixp_context_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.ranks = ranks;
    mixp_context *ctx = mixp_context_new(&desc);
    mixp_optimizer *opt = new_adam(ctx);
    mixp_tensor *w = mixp_param(ctx, "w", MIXP_F32, 2, w_shape);
    mixp_optimizer_add(opt, w, NULL);
    fill(ws, OUT * IN, (uint64_t)ranks->rank + 1);
    mixp_write(w, ws, MIXP_F32, OUT * IN);
    set_kind(ctx, MIXP_RECIPE_NVFP4);
    mixp_step_begin(ctx);
    MIXP_NO_GRAD(ctx) MIXP_AUTOCAST(ctx, MIXP_BF16)
        mixp_linear(ctx, mixp_input(ctx, MIXP_F32, 2, x_shape, xs), w, NULL);
    CHECK_INT(mixp_ranks_from(ctx, 0), MIXP_OK);
    for (int step = 0; step < 3; step++) {
        mixp_tensor *x, *low, *y = NULL, *other = NULL;
        mixp_step_begin(ctx);
        mixp_zero_grad(opt);
        x = mixp_input(ctx, MIXP_F32, 2, x_shape, xs);
        MIXP_AUTOCAST(ctx, MIXP_BF16) {
            y = mixp_linear(ctx, x, w, NULL);
            MIXP_NO_GRAD(ctx) {         /* the same numbers, the result of an operator: quantised now */
                low = mixp_scale(ctx, w, 1.0f);
                other = mixp_linear(ctx, x, low, NULL);
            }
        }
        mixp_read(y, first.y, MIXP_F32, ROWS * OUT);
        mixp_read(other, second.y, MIXP_F32, ROWS * OUT);
        CHECK(memcmp(first.y, second.y, sizeof first.y) == 0);
        mixp_backward(ctx, mixp_mean(ctx, y, MIXP_ALL, 0));
        CHECK_INT(mixp_optimizer_step(opt), MIXP_OK);
    }
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    mixp_context_free(ctx);
}

static void ranks(void) {
    int shard, status = 1;
    fill(xs, ROWS * IN, 3);
    for (shard = 0; shard < 2; shard++) {
        fflush(stdout);
        pid_t child = fork();
        if (!child) {
            mixp_ranks_desc all = ddp_fork(2);
            all.seconds = 20;
            all.shard = shard;
            alarm(60);
            rank_takes(&all);
            fflush(stdout);
            _exit(ddp_wait(test_bad != 0));
        }
        waitpid(child, &status, 0);
        CHECK_INT(status, 0);
    }
}
#endif

/* Another recipe makes its own values, and the first recipe its own again. */
static void other_recipe(void) {
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_tensor *w = mixp_param(ctx, "w", MIXP_F32, 2, w_shape);
    static values of[MIXP_RECIPE_COUNT];
    fill(xs, ROWS * IN, 3);
    fill(ws, OUT * IN, 1);
    mixp_write(w, ws, MIXP_F32, OUT * IN);
    for (int turn = 0; turn < 2; turn++)
        for (int kind = 1; kind < MIXP_RECIPE_COUNT; kind++) {
            set_kind(ctx, (mixp_recipe_kind)kind);
            of_linear(ctx, w, turn ? &second : &of[kind]);
            if (turn) CHECK(memcmp(&second, &of[kind], sizeof second) == 0);
            else if (kind > 1) CHECK(memcmp(&of[kind], &of[1], sizeof second) != 0);
        }
    mixp_context_free(ctx);
}

/* So does each choice of 4over6. */
static void other_choice(void) {
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_tensor *w = mixp_param(ctx, "w", MIXP_F32, 2, w_shape);
    static values of[6];
    fill(xs, ROWS * IN, 3);
    fill(ws, OUT * IN, 1);
    mixp_write(w, ws, MIXP_F32, OUT * IN);
    for (int turn = 0; turn < 2; turn++)
        for (int i = 0; i < 6; i++) {
            mixp_recipe r;
            if (i == 3) continue;           /* without 4over6 bound_448 changes nothing */
            memset(&r, 0, sizeof r);
            r.kind = MIXP_RECIPE_NVFP4;
            r.no_stochastic = r.no_2d = 1;
            r.w_4over6 = (mixp_4over6)(i % 3);
            r.bound_448 = i / 3;
            mixp_autocast_set_recipe(ctx, &r);
            of_linear(ctx, w, turn ? &second : &of[i]);
            if (turn) CHECK(memcmp(&second, &of[i], sizeof second) == 0);
            for (int k = 0; k < i && !turn; k++) CHECK(memcmp(&of[i], &of[k], sizeof second) != 0);
        }
    mixp_context_free(ctx);
}

/* In micro-batches a weight is quantised once, or once for each direction, until it is written. A
 * gradient with one scale is quantised once for both products, other operands for each product. */
static void made_once(void) {
    const int weight[MIXP_RECIPE_COUNT] = { 0, 1, 1, 1, 2, 1 }, others[MIXP_RECIPE_COUNT] = { 0, 3, 3, 4, 4, 4 };
    for (int kind = 1; kind < MIXP_RECIPE_COUNT; kind++) {
        mixp_context *ctx = counting_context();
        mixp_tensor *w = mixp_param(ctx, "w", MIXP_F32, 2, w_shape);
        fill(ws, OUT * IN, 1);
        mixp_write(w, ws, MIXP_F32, OUT * IN);
        set_kind(ctx, (mixp_recipe_kind)kind);
        for (int i = 0; i < 6; i++) {
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
    set_kind(ctx, MIXP_RECIPE_MXFP8);
    mixp_write(w, ws, MIXP_F32, OUT * IN);
    of_linear(ctx, w, &first);
    of_linear(ctx, w, &first);
    int64_t allocations = mixp_context_memory(ctx).allocations;
    mixp_write(w, ws, MIXP_F32, OUT * IN);
    of_linear(ctx, w, &first);
    CHECK_INT(mixp_context_memory(ctx).allocations, allocations);
    mixp_context_free(ctx);
}

/* The rounding of gradients draws the numbers of the linear's place among the linears of its step: other
 * operators, casts and dropout do not count, and the next linear draws other numbers. */
static void random_rounding(void) {
    static values third;
    fill(ws, OUT * IN, 1);
    fill(xs, ROWS * IN, 3);
    for (int more = 0; more < 2; more++) {
        mixp_context *ctx = mixp_context_new(NULL);
        mixp_tensor *w = mixp_param(ctx, "w", MIXP_F32, 2, w_shape), *x, *x2;
        mixp_recipe r;
        memset(&r, 0, sizeof r);
        r.kind = MIXP_RECIPE_NVFP4;
        mixp_autocast_set_recipe(ctx, &r);
        mixp_write(w, ws, MIXP_F32, OUT * IN);
        mixp_step_begin(ctx);
        x = mixp_input(ctx, MIXP_F32, 2, x_shape, xs);
        x2 = mixp_input(ctx, MIXP_F32, 2, x_shape, xs);
        mixp_tensor_set_requires_grad(x, 1);
        mixp_tensor_set_requires_grad(x2, 1);
        if (more) mixp_dropout(ctx, mixp_cast(ctx, x2, MIXP_BF16), 0.5f, 1);
        walk(ctx, w, x);
        walk(ctx, w, x2);
        mixp_read(x->grad, more ? second.dx : first.dx, MIXP_F32, ROWS * IN);
        mixp_read(x2->grad, third.dx, MIXP_F32, ROWS * IN);
        CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
        mixp_context_free(ctx);
    }
    CHECK(memcmp(first.dx, second.dx, sizeof first.dx) == 0);
    CHECK(memcmp(second.dx, third.dx, sizeof first.dx) != 0);
}

int main(void) {
    RUN(never_stale);
    RUN(other_writers);
    RUN(two_optimizers);
    RUN(tied_and_frozen);
    RUN(ranks);
    RUN(other_recipe);
    RUN(other_choice);
    RUN(made_once);
    RUN(memory);
    RUN(random_rounding);
    return test_report();
}
