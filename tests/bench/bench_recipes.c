/* bench_recipes.c - what a recipe below 16 bits costs: one GPT with it and in bf16, in turns.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 *     bench_recipes [--gpt2] [--codes|--nvfp4|--memory] [ROUNDS]
 *     bench_recipes --quantiser [ROUNDS]
 *
 * nanoGPT's CPU configuration: 4 layers of width 128, 4 heads, 64 tokens by 12, vocabulary 65; a round
 * is 8 steps in bf16, then 8 with the recipe. --gpt2: two of GPT-2's layers (width 768, 12 heads, 256
 * tokens) and a vocabulary of 1024; a round is a step of each. Each line is the median of the rounds'
 * ratios, and their spread; first of the processor's time, which other programs change less, then of
 * the clock's. --quantiser: the quantiser alone on one thread, in elements per nanosecond.
 * --codes: each recipe with codes beside itself without. --nvfp4: NVFP4 with switches beside NVFP4. --memory: bytes of activations, at levels 1 and 2: the
 * peak of a step, less what is in use between steps.
 * OMP_WAIT_POLICY=passive keeps waiting threads out of the processor's time.
 */
#define _POSIX_C_SOURCE 199309L
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include "gpt.h"
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { MOST_ROUNDS = 1000 };

static const shape gpt2 = { 2, 768, 12, 1024, 256, 1, 1 };

static mixp_tensor *model_loss(model *m) {
    mixp_tensor *x = model_top(m);
    mixp_autocast_set_recipe(m->ctx, NULL);         /* the head stays bf16 */
    MIXP_AUTOCAST(m->ctx, MIXP_BF16) x = mixp_linear(m->ctx, x, m->wte, NULL);
    return model_loss_of(m, x);
}

typedef struct spent { double cpu, wall; } spent;

static double seconds(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static mixp_recipe recipe_of(int kind, int codes) {
    mixp_recipe r;
    memset(&r, 0, sizeof r);
    r.kind = (mixp_recipe_kind)kind;
    r.codes = codes;
    return r;
}

/* Seconds of a round's steps under a recipe; kind NONE: in bf16. */
static spent run(model *m, mixp_recipe r) {
    spent s = { -seconds(CLOCK_PROCESS_CPUTIME_ID), -seconds(CLOCK_MONOTONIC) };
    for (int i = 0; i < m->is.steps; i++) {
        mixp_tensor *loss = NULL;
        mixp_step_begin(m->ctx);
        mixp_zero_grad(m->opt);
        mixp_autocast_set_recipe(m->ctx, &r);
        MIXP_AUTOCAST(m->ctx, MIXP_BF16) loss = model_loss(m);
        mixp_backward(m->ctx, loss);
        mixp_optimizer_step(m->opt);
    }
    s.cpu += seconds(CLOCK_PROCESS_CPUTIME_ID);
    s.wall += seconds(CLOCK_MONOTONIC);
    return s;
}

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void print_ratios(double *ratio, int n) {
    qsort(ratio, (size_t)n, sizeof *ratio, by_size);
    printf("  %5.2f (%5.2f to %5.2f)", ratio[n / 2], ratio[0], ratio[n - 1]);
}

/* A recipe beside another, which is called `base`. */
static void compare(model *m, const char *name, mixp_recipe r, const char *base, mixp_recipe beside, int rounds) {
    static double cpu[MOST_ROUNDS], wall[MOST_ROUNDS];
    double least = 1e30;
    run(m, r);
    for (int i = 0; i < rounds; i++) {
        spent first = run(m, beside), second = run(m, r);
        cpu[i] = second.cpu / first.cpu;
        wall[i] = second.wall / first.wall;
        if (first.cpu < least) least = first.cpu;
    }
    printf("%-26s", name);
    print_ratios(cpu, rounds);
    print_ratios(wall, rounds);
    printf("   %s %6.2f ms of the processor\n", base, 1e3 * least / m->is.steps);
}

static void recipes(model *m, int codes, int rounds) {
    for (int kind = 1; kind < MIXP_RECIPE_COUNT; kind++)
        compare(m, mixp_recipe_name((mixp_recipe_kind)kind), recipe_of(kind, codes),
                codes ? "without codes" : "bf16", recipe_of(codes ? kind : MIXP_RECIPE_NONE, 0), rounds);
}

/* NVFP4 with switches beside NVFP4; those of x need no_hadamard, so they stand beside that. */
static void switches(model *m, int rounds) {
    mixp_recipe plain = recipe_of(MIXP_RECIPE_NVFP4, 0), bare = plain, r = plain;
    bare.no_hadamard = 1;
    compare(m, "no_hadamard", bare, "nvfp4", plain, rounds);
    r.w_4over6 = MIXP_4OVER6_MAE;
    compare(m, "w_4over6", r, "nvfp4", plain, rounds);
    r.no_hadamard = 1;
    r.x_4over6 = MIXP_4OVER6_MAE;
    compare(m, "no_hadamard, x and w", r, "no_hadamard", bare, rounds);
    r = bare;
    r.row_scaled = 1;
    compare(m, "no_hadamard, row_scaled", r, "no_hadamard", bare, rounds);
}

/* --- memory ------------------------------------------------------------------------------------- */

/* Bytes of activations of a step. */
static double bytes_of(shape is, mixp_recipe_kind kind, int codes, int level) {
    static model m;
    is.steps = 2;
    model_open(&m, is, NULL, 0.0);
    mixp_autocast_set_level(m.ctx, level);
    run(&m, recipe_of((int)kind, codes));
    double bytes = (double)mixp_context_memory(m.ctx).peak;
    mixp_step_begin(m.ctx);
    mixp_zero_grad(m.opt);
    bytes -= (double)mixp_context_memory(m.ctx).used;
    mixp_context_free(m.ctx);
    return bytes;
}

static void memory(shape is) {
    for (int level = 1; level < 3; level++)
        for (int kind = 1; kind < MIXP_RECIPE_COUNT; kind++) {
            const double with = bytes_of(is, (mixp_recipe_kind)kind, 1, level);
            const double without = bytes_of(is, (mixp_recipe_kind)kind, 0, level);
            printf("level %d  %-12s  %8.2f MB without codes, %8.2f MB with, %5.3f\n", level,
                   mixp_recipe_name((mixp_recipe_kind)kind), 1e-6 * without, 1e-6 * with, with / without);
        }
}

/* --- the quantiser alone -------------------------------------------------------------------- */

enum { ROWS = 768, COLS = 512 };
typedef struct form { const char *name; mixp_dtype element; mixp_block_scale scale; int rows, cols, random; } form;

static void rate(mixp_context *ctx, const form *f, int rounds) {
    static mixp_bf16 x[ROWS * COLS], y[ROWS * COLS];
    static double each[MOST_ROUNDS];
    mixp_quantise_args k;
    float decode;
    for (int i = 0; i < ROWS * COLS; i++) x[i] = mixp_bf16_from_f32((float)(i * 37 % 1001 - 500) * 0.01f);
    memset(&k, 0, sizeof k);
    k.rows = ROWS;
    k.cols = COLS;
    k.x = mixpi_in(x, MIXP_BF16);
    k.y = y;
    k.element = f->element;
    k.scale = f->scale;
    k.block_rows = f->rows;
    k.block_cols = f->cols;
    k.stochastic = f->random;
    for (int i = 0; i < rounds; i++) {
        double t = seconds(CLOCK_MONOTONIC);
        mixp_quantise(mixp_context_exec(ctx), &k, &decode);
        each[i] = 1e-9 * ROWS * COLS / (seconds(CLOCK_MONOTONIC) - t);
    }
    qsort(each, (size_t)rounds, sizeof *each, by_size);
    printf("  %-28s %7.3f (%6.3f to %6.3f)\n", f->name, each[rounds / 2], each[0], each[rounds - 1]);
}

static void turn_rate(mixp_context *ctx, int rounds) {
    static mixp_bf16 x[ROWS * COLS], y[ROWS * COLS];
    static double each[MOST_ROUNDS];
    for (int i = 0; i < rounds; i++) {
        double t = seconds(CLOCK_MONOTONIC);
        mixp_hadamard(mixp_context_exec(ctx), ROWS, COLS, mixpi_in(x, MIXP_BF16), y);
        each[i] = 1e-9 * ROWS * COLS / (seconds(CLOCK_MONOTONIC) - t);
    }
    qsort(each, (size_t)rounds, sizeof *each, by_size);
    printf("  %-28s %7.3f (%6.3f to %6.3f)\n", "hadamard", each[rounds / 2], each[0], each[rounds - 1]);
}

static void rates(int rounds) {
    static const form forms[] = {
        { "e4m3, one scale", MIXP_F8_E4M3, MIXP_SCALE_TENSOR, 0, 0, 0 },
        { "e4m3, 1 x 128", MIXP_F8_E4M3, MIXP_SCALE_POWER, 1, 128, 0 },
        { "e4m3, 128 x 128", MIXP_F8_E4M3, MIXP_SCALE_POWER, 128, 128, 0 },
        { "e4m3, 1 x 32", MIXP_F8_E4M3, MIXP_SCALE_E8M0, 1, 32, 0 },
        { "e4m3, 32 x 1", MIXP_F8_E4M3, MIXP_SCALE_E8M0, 32, 1, 0 },
        { "e2m1, 1 x 16", MIXP_F4_E2M1, MIXP_SCALE_E4M3, 1, 16, 0 },
        { "e2m1, 1 x 16, stochastic", MIXP_F4_E2M1, MIXP_SCALE_E4M3, 1, 16, 1 },
        { "e2m1, 16 x 1, stochastic", MIXP_F4_E2M1, MIXP_SCALE_E4M3, 16, 1, 1 }
    };
    mixp_context_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.threads = 1;
    mixp_context *ctx = mixp_context_new(&desc);
    turn_rate(ctx, rounds);
    for (int i = 0; i < (int)(sizeof forms / sizeof *forms); i++) rate(ctx, &forms[i], rounds);
    mixp_context_free(ctx);
}

static int is_given(int argc, char **argv, const char *option) {
    for (int i = 1; i < argc; i++)
        if (strcmp(argv[i], option) == 0) return 1;
    return 0;
}

int main(int argc, char **argv) {
    static model m;
    const int large = is_given(argc, argv, "--gpt2"), codes = is_given(argc, argv, "--codes");
    const int alone = is_given(argc, argv, "--quantiser");
    const shape is = large ? gpt2 : nano;
    int rounds = argc > 1 ? atoi(argv[argc - 1]) : 0;
    const char *why;
    if (rounds < 1 || rounds > MOST_ROUNDS) rounds = alone ? 51 : large ? 5 : 21;
    if (alone || is_given(argc, argv, "--memory")) {
        if (alone) rates(rounds);
        else memory(is);
        return 0;
    }
    model_open(&m, is, NULL, 0.0);
    if (is_given(argc, argv, "--nvfp4")) switches(&m, rounds);
    else recipes(&m, codes, rounds);
    if (mixp_context_error(m.ctx, &why) != MIXP_OK) printf("%s\n", why);
    mixp_context_free(m.ctx);
    return 0;
}
