/* bench_buffers.c - what it costs that a step's buffers obey its verdict: a GPT of half a millisecond that
 * writes ten tensors of 4 KB in each step, once as buffers and once as frozen parameters, in turns.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 *     bench_buffers [plain|params|buffers] [ROUNDS]   all three in turns unless told which
 *
 * plain writes nothing. Each round times 200 steps of each model; medians of the rounds' ratios and their
 * quartiles are printed. On a busy machine count instructions, whose number does not depend on the load:
 *
 *     for w in plain params buffers; do OMP_NUM_THREADS=1 valgrind --tool=callgrind \
 *         --callgrind-out-file=/dev/null --toggle-collect=run build/bench/bench_buffers $w 1; done
 */
#define _POSIX_C_SOURCE 199309L
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include "gpt.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { PLAIN, PARAMS, BUFFERS, KINDS, STATES = 10, STEPS = 200, MOST = 101 };
static const char *const kinds[KINDS] = { "plain", "params", "buffers" };
static const shape small = { 2, 64, 4, 65, 64, 1, 0 };

typedef struct side {
    model        m;
    mixp_tensor *state[STATES];
    int          kind;
} side;

static void open_side(side *s, int kind) {
    const int64_t shape_of[1] = { 1024 };
    memset(s, 0, sizeof *s);
    s->kind = kind;
    model_open(&s->m, small, NULL, 0.0);
    s->m.scaler = mixp_scaler_new(s->m.ctx, NULL);
    for (int i = 0; i < STATES && kind != PLAIN; i++) {
        char name[16];
        snprintf(name, sizeof name, "state%d", i);
        if (kind == BUFFERS) s->state[i] = mixp_buffer(s->m.ctx, name, MIXP_F32, 1, shape_of);
        else s->state[i] = mixp_param(s->m.ctx, name, MIXP_F32, 1, shape_of);
        if (kind == PARAMS) mixp_tensor_set_requires_grad(s->state[i], 0);
    }
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e3 * (double)t.tv_sec + 1e-6 * (double)t.tv_nsec;
}

static double run(side *s, int n) {
    static float x[1024];
    const int64_t shape_of[1] = { 1024 };
    mixp_context *ctx = s->m.ctx;
    const double begun = now();
    for (int i = 0; i < n; i++) {
        mixp_tensor *loss = NULL;
        mixp_step_begin(ctx);
        mixp_zero_grad(s->m.opt);
        MIXP_AUTOCAST(ctx, MIXP_F16) {
            loss = model_loss_of(&s->m, mixp_linear(ctx, model_top(&s->m), s->m.wte, NULL));
        }
        mixp_backward(ctx, mixp_scaler_scale(s->m.scaler, loss));
        for (int k = 0; k < STATES && s->kind != PLAIN; k++)
            mixp_copy(s->state[k], mixp_input_view(ctx, MIXP_F32, 1, shape_of, x));
        mixp_scaler_step(s->m.scaler, s->m.opt);
        mixp_scaler_update(s->m.scaler);
    }
    return (now() - begun) / n;
}

static int rising(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void show(const char *what, double *ratio, int n) {
    qsort(ratio, (size_t)n, sizeof *ratio, rising);
    printf("%s %.4f (quartiles %.4f to %.4f)\n", what, ratio[n / 2], ratio[n / 4], ratio[3 * n / 4]);
}

int main(int argc, char **argv) {
    static side sides[KINDS];
    static double of_params[MOST], of_plain[MOST];
    int rounds = argc > 2 ? atoi(argv[2]) : 21, only = -1;
    double t[KINDS];
    for (int k = 0; k < KINDS; k++) {
        if (argc > 1 && !strcmp(argv[1], kinds[k])) only = k;
        open_side(&sides[k], k);
        run(&sides[k], 20);
    }
    if (rounds < 1 || rounds > MOST) rounds = MOST;
    if (only >= 0) {
        printf("%s: %.4f ms a step\n", kinds[only], run(&sides[only], STEPS));
        return 0;
    }
    for (int i = 0; i < rounds; i++) {
        for (int k = 0; k < KINDS; k++) t[(k + i) % KINDS] = run(&sides[(k + i) % KINDS], STEPS);
        of_params[i] = t[BUFFERS] / t[PARAMS];
        of_plain[i] = t[BUFFERS] / t[PLAIN];
    }
    printf("a step without state: %.3f ms\n", t[PLAIN]);
    show("ten buffers beside ten frozen parameters:", of_params, rounds);
    show("ten buffers beside no state:             ", of_plain, rounds);
    return 0;
}
