/* bench_guard.c - what a guard costs: a GPT with it and one without, in turns.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 *     bench_guard [--gpt2|--slice|--small] [off|on|every N] [ROUNDS]   both in turns unless told which; N = 16
 *
 * nanoGPT's CPU configuration: 4 layers of width 128, 4 heads, 64 tokens by 12, vocabulary 65, f16.
 * --gpt2: GPT-2 124M, 12 layers of width 768, 256 tokens, vocabulary 50257; 5 rounds unless told, which
 * take some minutes, and 6 GB.
 * --slice: one layer of width 128 with 256 tokens, vocabulary 1024: to count the instructions of.
 * --small: two layers of width 64 with 64 tokens, vocabulary 65: a step of about half a ms.
 * Each round times N steps of one model without a guard and N of another with it, about one of which is
 * sampled; medians of the rounds' ratios are printed. The guard stays on: a guard that is turned on again
 * measures the precision of all sites in its first sample. On a busy machine use OMP_NUM_THREADS=1 and
 * the processor's time. Or count instructions, whose number does not depend on the load, of one side:
 *
 *     for w in off on; do OMP_NUM_THREADS=1 valgrind --tool=callgrind --callgrind-out-file=/dev/null \
 *         --toggle-collect=run build/bench/bench_guard --slice $w 1; done
 */
#define _POSIX_C_SOURCE 199309L
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include "gpt.h"
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static const shape gpt2 = { 12, 768, 12, 50257, 256, 1, 0 }, slice = { 1, 128, 4, 1024, 256, 1, 0 },
                   small = { 2, 64, 4, 65, 64, 1, 0 };

static mixp_tensor *model_loss(model *m)
{ return model_loss_of(m, mixp_linear(m->ctx, model_top(m), m->wte, NULL)); }

static void model_scaled(model *m, shape is) {
    model_open(m, is, NULL, 0.0);
    m->scaler = mixp_scaler_new(m->ctx, NULL);
}

static double now(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return 1e3 * (double)t.tv_sec + 1e-6 * (double)t.tv_nsec;
}

/* Milliseconds of n steps: on the wall, and of the processor. */
typedef struct spent { double wall, processor; } spent;

static spent run(model *m, int n) {
    spent t;
    t.wall = now(CLOCK_MONOTONIC);
    t.processor = now(CLOCK_PROCESS_CPUTIME_ID);
    for (int i = 0; i < n; i++) {
        mixp_tensor *loss = NULL;
        mixp_step_begin(m->ctx);
        mixp_zero_grad(m->opt);
        MIXP_AUTOCAST(m->ctx, MIXP_F16) { loss = model_loss(m); }
        mixp_backward(m->ctx, mixp_scaler_scale(m->scaler, loss));
        mixp_scaler_step(m->scaler, m->opt);
        mixp_scaler_update(m->scaler);
    }
    t.wall = now(CLOCK_MONOTONIC) - t.wall;
    t.processor = now(CLOCK_PROCESS_CPUTIME_ID) - t.processor;
    return t;
}

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Prints the median and the ends of n ratios. */
static void tell(const char *what, double *ratio, int n) {
    qsort(ratio, (size_t)n, sizeof *ratio, by_size);
    printf("  %s %+.2f%%, quarters %+.2f%% to %+.2f%%, from %+.2f%% to %+.2f%%\n", what,
           100 * (ratio[n / 2] - 1), 100 * (ratio[n / 4] - 1), 100 * (ratio[3 * n / 4] - 1),
           100 * (ratio[0] - 1), 100 * (ratio[n - 1] - 1));
}

/* Both in turns, `rounds` times, the guarded one first in every second round. */
static void compare(model *plain, model *guarded, int rounds, int every) {
    double wall[1000], processor[1000], least = 1e30;
    run(plain, 2);
    run(guarded, 2 * every);
    int64_t before = mixp_context_memory(guarded->ctx).allocations;
    for (int i = 0; i < rounds; i++) {
        const spent first = run(i % 2 ? guarded : plain, every);
        const spent second = run(i % 2 ? plain : guarded, every);
        const spent with = i % 2 ? first : second, without = i % 2 ? second : first;
        wall[i] = with.wall / without.wall;
        processor[i] = with.processor / without.processor;
        if (without.wall < least) least = without.wall;
    }
    printf("a step %.2f ms without; with a guard, medians of %d rounds; %d allocations\n", least / every, rounds,
           (int)(mixp_context_memory(guarded->ctx).allocations - before));
    tell("wall     ", wall, rounds);
    tell("processor", processor, rounds);
}

int main(int argc, char **argv) {
    static model plain, guarded;
    mixp_guard_desc guard;
    const int large = argc > 1 && strcmp(argv[1], "--gpt2") == 0;
    const int tiny = argc > 1 && strcmp(argv[1], "--small") == 0;
    const int named = large || tiny || (argc > 1 && strcmp(argv[1], "--slice") == 0);
    const char *which = argc > 1 + named ? argv[1 + named] : "both", *why;
    int rounds = argc > 2 + named ? atoi(argv[2 + named]) : 0, i;
    memset(&guard, 0, sizeof guard);
    guard.every = 16;
    if (strcmp(which, "every") == 0) {
        guard.every = rounds;
        rounds = argc > 3 + named ? atoi(argv[3 + named]) : 0;
    }
    if (rounds < 1 || rounds > 1000) rounds = large ? 5 : 21;
    model_scaled(&plain, large ? gpt2 : tiny ? small : named ? slice : nano);
    model_scaled(&guarded, plain.is);
    if (mixp_guard_start(guarded.ctx, &guard) != MIXP_OK) return 2;
    if (strcmp(which, "off") == 0 || strcmp(which, "on") == 0)
        for (i = 0; i < rounds; i++) run(strcmp(which, "on") == 0 ? &guarded : &plain, guard.every);
    else compare(&plain, &guarded, rounds, guard.every);
    if (mixp_context_error(guarded.ctx, &why) != MIXP_OK) printf("%s\n", why);
    mixp_context_free(plain.ctx);
    mixp_context_free(guarded.ctx);
    return 0;
}
