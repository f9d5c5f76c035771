/* bench_recompute.c - activations of GPT-2 with and without mixp_recompute around each layer: memory and time.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 *     bench_recompute [--small|--logits] [ROUNDS]       5 rounds unless told: some minutes, and 4 GB
 *
 * GPT-2 124M: 12 layers of width 768, 2 sequences of 256 tokens, vocabulary 50257. The loss is that of
 * mixp_linear_cross_entropy, whose logits are never whole. activations: the peak of the context's memory in a
 * step, less what is in use between steps. Time: a step without and a step with, in turns; the median of the
 * ratios, the least and the largest; on the wall and of the processor. On a busy machine take
 * OMP_NUM_THREADS=1 and the processor's. --small: nanoGPT's CPU configuration. --logits: with
 * mixp_linear and mixp_cross_entropy, whose logits are whole.
 */
#define _POSIX_C_SOURCE 199309L
#include "mixprec.h"
#include <stdlib.h>
#include <string.h>
#include "gpt.h"
#include <time.h>

enum { MOST_ROUNDS = 101 };
static const shape gpt2 = { 12, 768, 12, 50257, 256, 2, 0 };
static int whole_logits;
typedef struct spent { double wall, processor; } spent;

static double now(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return 1e3 * (double)t.tv_sec + 1e-6 * (double)t.tv_nsec;
}

static spent step(model *m, mixp_dtype dtype, int again) {
    spent t;
    mixp_tensor *loss = NULL, *ids, *top;
    const int64_t rows = (int64_t)m->is.batch * m->is.time, flat[2] = { rows, m->is.width };
    m->again = again;
    t.wall = now(CLOCK_MONOTONIC);
    t.processor = now(CLOCK_PROCESS_CPUTIME_ID);
    mixp_step_begin(m->ctx);
    mixp_zero_grad(m->opt);
    ids = mixp_input(m->ctx, MIXP_I32, 1, &rows, m->out);
    MIXP_AUTOCAST(m->ctx, dtype) {
        top = model_top(m);
        if (whole_logits) loss = model_loss_of(m, mixp_linear(m->ctx, top, m->wte, NULL));
        else loss = mixp_linear_cross_entropy(m->ctx, mixp_reshape(m->ctx, top, 2, flat), m->wte, ids, -100, 0);
    }
    mixp_backward(m->ctx, mixp_scaler_scale(m->scaler, loss));
    mixp_scaler_step(m->scaler, m->opt);
    mixp_scaler_update(m->scaler);
    t.wall = now(CLOCK_MONOTONIC) - t.wall;
    t.processor = now(CLOCK_PROCESS_CPUTIME_ID) - t.processor;
    return t;
}

/* Bytes of activations at the peak of two steps. The peak of a context only grows: with `again` comes first. */
static double activations(model *m, mixp_dtype dtype, int again) {
    step(m, dtype, again);
    step(m, dtype, again);
    double peak = (double)mixp_context_memory(m->ctx).peak;
    mixp_step_begin(m->ctx);
    mixp_zero_grad(m->opt);
    return peak - (double)mixp_context_memory(m->ctx).used;
}

static int by_size(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void tell(const char *what, double *ratio, int n) {
    qsort(ratio, (size_t)n, sizeof *ratio, by_size);
    printf("  %s %.2f (%.2f to %.2f)", what, ratio[n / 2], ratio[0], ratio[n - 1]);
}

static void measure(shape is, mixp_dtype dtype, int level, int rounds) {
    static model m;
    double wall[MOST_ROUNDS], processor[MOST_ROUNDS], freed, kept;
    const char *why;
    model_open(&m, is, NULL, 0.0);
    m.scaler = mixp_scaler_new(m.ctx, NULL);
    mixp_autocast_set_level(m.ctx, level);
    freed = activations(&m, dtype, 1);
    kept = activations(&m, dtype, 0);
    for (int i = 0; i < rounds; i++) {
        const spent first = step(&m, dtype, i % 2), second = step(&m, dtype, !(i % 2));
        wall[i] = i % 2 ? first.wall / second.wall : second.wall / first.wall;
        processor[i] = i % 2 ? first.processor / second.processor : second.processor / first.processor;
    }
    printf("%-4s level %d  activations %8.2f MB without, %8.2f MB with: %.2f; time", mixp_dtype_name(dtype), level,
           1e-6 * kept, 1e-6 * freed, freed / kept);
    tell("on the wall", wall, rounds);
    tell("of the processor", processor, rounds);
    printf("\n");
    if (mixp_context_error(m.ctx, &why) != MIXP_OK) printf("%s\n", why);
    mixp_context_free(m.ctx);
}

int main(int argc, char **argv) {
    const int small = argc > 1 && strcmp(argv[1], "--small") == 0;
    const int named = small || (argc > 1 && strcmp(argv[1], "--logits") == 0);
    int rounds = argc > 1 + named ? atoi(argv[1 + named]) : 0;
    const shape is = small ? nano : gpt2;
    whole_logits = named && !small;
    if (rounds < 1 || rounds > MOST_ROUNDS) rounds = small ? 21 : 5;
    measure(is, MIXP_F32, 1, rounds);
    measure(is, MIXP_F16, 2, rounds);
    measure(is, MIXP_BF16, 2, rounds);
    return 0;
}
