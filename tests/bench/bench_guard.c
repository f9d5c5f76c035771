/* bench_guard.c - what a guard costs: one GPT with it and without, in turns.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 *     bench_guard [off|on|every N] [ROUNDS]     both in turns unless told which; N = 16 by default
 *
 * nanoGPT's CPU configuration: 4 layers of width 128, 4 heads, 64 tokens by 12, vocabulary 65, f16.
 * Figures are for a quiet machine: each round times 16 steps of each, one after the other, and the
 * median of the rounds' ratios is printed. One side alone, for valgrind --tool=callgrind.
 */
#define _POSIX_C_SOURCE 199309L
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { LAYERS = 4, WIDTH = 128, HEADS = 4, VOCAB = 65, TIME = 64, BATCH = 12, WEIGHTS = 6 };

typedef struct model {
    mixp_context   *ctx;
    mixp_scaler    *scaler;
    mixp_optimizer *opt;
    mixp_tensor    *wte, *wpe, *w[LAYERS][WEIGHTS], *ln_f;
    int32_t         in[BATCH * TIME], out[BATCH * TIME], place[TIME];
} model;

static mixp_tensor *weight(model *m, const char *name, int rows, int cols) {
    int64_t shape[2];
    mixp_tensor *t;
    shape[0] = rows;
    shape[1] = cols;
    t = mixp_param(m->ctx, name, MIXP_F32, cols ? 2 : 1, shape);
    if (cols) mixp_init_normal(t, 0.0, 0.02);
    else mixp_fill(t, 1.0);
    mixp_optimizer_add(m->opt, t, NULL);
    return t;
}

static void model_open(model *m) {
    static const int rows[WEIGHTS] = { WIDTH, 3 * WIDTH, WIDTH, WIDTH, 4 * WIDTH, WIDTH };
    static const int cols[WEIGHTS] = { 0, WIDTH, WIDTH, 0, WIDTH, 4 * WIDTH };
    static const char *const names[WEIGHTS] = { "ln_1", "qkv", "out", "ln_2", "fc", "proj" };
    mixp_adamw_desc adam = mixp_adamw_defaults();
    int l, k;
    memset(m, 0, sizeof *m);
    m->ctx = mixp_context_new(NULL);
    m->scaler = mixp_scaler_new(m->ctx, NULL);
    m->opt = mixp_adamw_new(m->ctx, &adam);
    m->wte = weight(m, "wte", VOCAB, WIDTH);
    m->wpe = weight(m, "wpe", TIME, WIDTH);
    for (l = 0; l < LAYERS; l++)
        for (k = 0; k < WEIGHTS; k++) {
            char name[32];
            snprintf(name, sizeof name, "h.%d.%s", l, names[k]);
            m->w[l][k] = weight(m, name, rows[k], cols[k]);
        }
    m->ln_f = weight(m, "ln_f", WIDTH, 0);
    for (k = 0; k < BATCH * TIME; k++) m->in[k] = k * 31 % VOCAB;
    for (k = 0; k < BATCH * TIME; k++) m->out[k] = (k + 1) * 31 % VOCAB;
    for (k = 0; k < TIME; k++) m->place[k] = k;
}

static mixp_tensor *model_loss(model *m) {
    static const int64_t shape[2] = { BATCH, TIME }, places[1] = { TIME };
    mixp_context *ctx = m->ctx;
    mixp_tensor *x, *y, *ids = mixp_input(ctx, MIXP_I32, 2, shape, m->in);
    int l;
    x = mixp_add(ctx, mixp_embedding(ctx, m->wte, ids),
                 mixp_embedding(ctx, m->wpe, mixp_input(ctx, MIXP_I32, 1, places, m->place)));
    for (l = 0; l < LAYERS; l++) {
        mixp_tensor *const *w = m->w[l];
        y = mixp_linear(ctx, mixp_layer_norm(ctx, x, w[0], NULL, 1e-5f), w[1], NULL);
        x = mixp_add(ctx, x, mixp_linear(ctx, mixp_attention(ctx, y, HEADS, 1, 0.0f), w[2], NULL));
        y = mixp_linear(ctx, mixp_layer_norm(ctx, x, w[3], NULL, 1e-5f), w[4], NULL);
        x = mixp_add(ctx, x, mixp_linear(ctx, mixp_gelu_tanh(ctx, y), w[5], NULL));
    }
    x = mixp_linear(ctx, mixp_layer_norm(ctx, x, m->ln_f, NULL, 1e-5f), m->wte, NULL);
    return mixp_cross_entropy(ctx, x, mixp_input(ctx, MIXP_I32, 2, shape, m->out), -100);
}

/* Milliseconds of 16 steps. */
static double run(model *m) {
    struct timespec a, b;
    int i;
    clock_gettime(CLOCK_MONOTONIC, &a);
    for (i = 0; i < 16; i++) {
        mixp_tensor *loss = NULL;
        mixp_step_begin(m->ctx);
        mixp_zero_grad(m->opt);
        MIXP_AUTOCAST(m->ctx, MIXP_F16) { loss = model_loss(m); }
        mixp_backward(m->ctx, mixp_scaler_scale(m->scaler, loss));
        mixp_scaler_step(m->scaler, m->opt);
        mixp_scaler_update(m->scaler);
    }
    clock_gettime(CLOCK_MONOTONIC, &b);
    return 1e3 * (double)(b.tv_sec - a.tv_sec) + 1e-6 * (double)(b.tv_nsec - a.tv_nsec);
}

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    static model off, on;
    mixp_guard_desc guard;
    const char *which = argc > 1 ? argv[1] : "both", *why;
    int rounds = argc > 2 ? atoi(argv[2]) : 21, i;
    double ratio[1000], least = 1e30;
    memset(&guard, 0, sizeof guard);
    if (strcmp(which, "every") == 0) guard.every = rounds;
    if (strcmp(which, "every") == 0) rounds = 21;
    if (rounds < 1 || rounds > 1000) rounds = 21;
    model_open(&off);
    model_open(&on);
    if (mixp_guard_start(on.ctx, &guard) != MIXP_OK) return 2;
    if (strcmp(which, "off") == 0 || strcmp(which, "on") == 0) {
        for (i = 0; i < rounds; i++) run(strcmp(which, "on") == 0 ? &on : &off);
        return 0;
    }
    run(&off);
    run(&on);
    for (i = 0; i < rounds; i++) {
        double first = run(&off), second = run(&on);
        ratio[i] = second / first;
        if (first < least) least = first;
    }
    qsort(ratio, (size_t)rounds, sizeof *ratio, by_size);
    printf("a step %.2f ms without; with a guard %+.2f%% (median of %d rounds, from %+.2f%% to "
           "%+.2f%%)\n", least / 16, 100 * (ratio[rounds / 2] - 1), rounds,
           100 * (ratio[0] - 1), 100 * (ratio[rounds - 1] - 1));
    if (mixp_context_error(on.ctx, &why) != MIXP_OK) printf("%s\n", why);
    mixp_context_free(off.ctx);
    mixp_context_free(on.ctx);
    return 0;
}
