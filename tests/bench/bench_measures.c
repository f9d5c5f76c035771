/* bench_measures.c - what each measure of docs/performance.md changes: a step of a GPT with it beside one without it.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 *     bench_measures [ROUNDS] [WORD]       WORD: only the rows that contain it
 *
 * nanoGPT's CPU configuration: 4 layers of width 128, 4 heads, 64 tokens by 12, vocabulary 65. Rows with "threads" use
 * two threads and count time on the wall. All other rows use one thread and count its processor's time. A round times
 * some steps of one model, then as many of the other, in alternating order; the median of the rounds' ratios is
 * printed, from the least to the largest. The time is that of a token, so batches of any size can be compared.
 */
#define _POSIX_C_SOURCE 199309L
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include "gpt.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MOST_ROUNDS = 101, BEST = -1 };
typedef enum head { WHOLE, CHUNKS, FUSED } head;
typedef enum clip { NONE, INSIDE, APART } clip;

/* One side of a row. The fields that a side does not name are 0. */
typedef struct way {
    const char *name;
    shape       is;
    mixp_dtype  dtype;
    int         level, threads, isa;
    head        top;
    clip        clipping;
    int         again, guard;
} way;

/* Times for each token: milliseconds on the wall and of the processor. */
typedef struct spent { double wall, processor; } spent;


static const shape tiny = { 4, 128, 4, 65, 64, 1, 32 }, four = { 4, 128, 4, 65, 64, 4, 16 },
                   wide = { 4, 128, 4, 80, 64, 12, 8 },
                   odd = { 4, 124, 4, 65, 64, 12, 8 }, slow = { 4, 128, 4, 65, 64, 1, 1 },
                   heads = { 4, 128, 4, 4096, 64, 12, 4 };

static double now(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return 1e3 * (double)t.tv_sec + 1e-6 * (double)t.tv_nsec;
}

static void open_way(model *m, const way *w) {
    mixp_context_desc machine;
    memset(&machine, 0, sizeof machine);
    machine.threads = w->threads;
    if (w->isa != BEST) machine.device = mixp_cpu_with((mixp_isa)w->isa);
    model_open(m, w->is, &machine, w->clipping == INSIDE ? 1.0 : 0.0);
    m->again = w->again;
    m->scaler = mixp_scaler_new(m->ctx, NULL);
    mixp_autocast_set_level(m->ctx, w->level);
    if (w->guard) mixp_guard_start(m->ctx, NULL);
}

static mixp_tensor *scaled_loss(model *m, const way *w) {
    mixp_tensor *top = model_top(m), *logits, *targets;
    int64_t tokens[2];
    tokens[0] = m->is.batch;
    tokens[1] = m->is.time;
    if (w->top == WHOLE)
        return mixp_scaler_scale(m->scaler, model_loss_of(m, mixp_linear(m->ctx, top, m->wte, NULL)));
    targets = mixp_input(m->ctx, MIXP_I32, 2, tokens, m->out);
    if (w->top == CHUNKS)
        return mixp_scaler_scale(m->scaler, mixp_linear_cross_entropy(m->ctx, top, m->wte, targets, MIXP_IGNORE, 0));
    logits = mixp_linear(m->ctx, top, m->wte, NULL);
    mixp_tensor_set_disposable(logits, 1);
    return mixp_scaler_cross_entropy(m->scaler, logits, targets, MIXP_IGNORE, 1.0f, NULL);
}

static spent run(model *m, const way *w) {
    const double tokens = (double)m->is.steps * m->is.batch * m->is.time;
    spent t;
    t.wall = now(CLOCK_MONOTONIC);
    t.processor = now(CLOCK_PROCESS_CPUTIME_ID);
    for (int i = 0; i < m->is.steps; i++) {
        mixp_tensor *loss = NULL;
        mixp_step_begin(m->ctx);
        mixp_zero_grad(m->opt);
        MIXP_AUTOCAST(m->ctx, w->dtype) { loss = scaled_loss(m, w); }
        mixp_backward(m->ctx, loss);
        if (w->clipping == APART) {
            mixp_scaler_unscale(m->scaler, m->opt);
            mixp_clip_grad_norm(m->opt, 1.0);
        }
        mixp_scaler_step(m->scaler, m->opt);
        mixp_scaler_update(m->scaler);
    }
    t.wall = (now(CLOCK_MONOTONIC) - t.wall) / tokens;
    t.processor = (now(CLOCK_PROCESS_CPUTIME_ID) - t.processor) / tokens;
    return t;
}

static int by_size(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *x, int n) {
    qsort(x, (size_t)n, sizeof *x, by_size);
    return x[n / 2];
}

/* Prints a row: the time of `without` divided by the time of `with`, so that more than 1 is faster. */
static int compare(const way *without, const way *with, int rounds) {
    static model a, b;
    static double ratio[MOST_ROUNDS], base[MOST_ROUNDS];
    const int    wall = without->threads > 1 || with->threads > 1;
    const char  *why;
    open_way(&a, without);
    open_way(&b, with);
    run(&a, without);
    run(&b, with);
    for (int i = 0; i < rounds; i++) {
        spent first, second;
        if (i % 2) {
            first = run(&a, without);
            second = run(&b, with);
        } else {
            second = run(&b, with);
            first = run(&a, without);
        }
        ratio[i] = wall ? first.wall / second.wall : first.processor / second.processor;
        base[i] = wall ? first.wall : first.processor;
    }
    double middle = median(ratio, rounds);
    printf("%-34s %-34s %5.2f (%.2f to %.2f)  %7.2f us a token without it%s\n", without->name, with->name, middle,
           ratio[0], ratio[rounds - 1], 1e3 * median(base, rounds), wall ? ", wall" : "");
    fflush(stdout);
    if (mixp_context_error(a.ctx, &why) != MIXP_OK || mixp_context_error(b.ctx, &why) != MIXP_OK) {
        printf("%s\n", why);
        return 1;
    }
    mixp_context_free(a.ctx);
    mixp_context_free(b.ctx);
    return 0;
}

#define SIDE(name, is, dtype, level, threads, isa, top, clipping, again, guard) \
    { name, is, dtype, level, threads, isa, top, clipping, again, guard }

int main(int argc, char **argv) {
    const way rows[][2] = {
        { SIDE("fp32", nano, MIXP_F32, 1, 1, BEST, WHOLE, NONE, 0, 0),
          SIDE("bf16", nano, MIXP_BF16, 1, 1, BEST, WHOLE, NONE, 0, 0) },
        { SIDE("fp32", nano, MIXP_F32, 1, 1, BEST, WHOLE, NONE, 0, 0),
          SIDE("fp16", nano, MIXP_F16, 1, 1, BEST, WHOLE, NONE, 0, 0) },
        { SIDE("bf16, level 1", nano, MIXP_BF16, 1, 1, BEST, WHOLE, NONE, 0, 0),
          SIDE("bf16, level 2", nano, MIXP_BF16, 2, 1, BEST, WHOLE, NONE, 0, 0) },
        { SIDE("fp16, level 1", nano, MIXP_F16, 1, 1, BEST, WHOLE, NONE, 0, 0),
          SIDE("fp16, level 2", nano, MIXP_F16, 2, 1, BEST, WHOLE, NONE, 0, 0) },
        { SIDE("fp32, 1 thread", nano, MIXP_F32, 1, 1, BEST, WHOLE, NONE, 0, 0),
          SIDE("fp32, 2 threads", nano, MIXP_F32, 1, 2, BEST, WHOLE, NONE, 0, 0) },
        { SIDE("bf16, 1 thread", nano, MIXP_BF16, 1, 1, BEST, WHOLE, NONE, 0, 0),
          SIDE("bf16, 2 threads", nano, MIXP_BF16, 1, 2, BEST, WHOLE, NONE, 0, 0) },
        { SIDE("bf16, batch of 1", tiny, MIXP_BF16, 1, 1, BEST, WHOLE, NONE, 0, 0),
          SIDE("bf16, batch of 4", four, MIXP_BF16, 1, 1, BEST, WHOLE, NONE, 0, 0) },
        { SIDE("bf16, batch of 1", tiny, MIXP_BF16, 1, 1, BEST, WHOLE, NONE, 0, 0),
          SIDE("bf16, batch of 12", nano, MIXP_BF16, 1, 1, BEST, WHOLE, NONE, 0, 0) },
        { SIDE("bf16, vocabulary of 65", nano, MIXP_BF16, 1, 1, BEST, WHOLE, NONE, 0, 0),
          SIDE("bf16, vocabulary of 80", wide, MIXP_BF16, 1, 1, BEST, WHOLE, NONE, 0, 0) },
        { SIDE("bf16, width 124", odd, MIXP_BF16, 1, 1, BEST, WHOLE, NONE, 0, 0),
          SIDE("bf16, width 128", nano, MIXP_BF16, 1, 1, BEST, WHOLE, NONE, 0, 0) },
        { SIDE("fp32, width 124", odd, MIXP_F32, 1, 1, BEST, WHOLE, NONE, 0, 0),
          SIDE("fp32, width 128", nano, MIXP_F32, 1, 1, BEST, WHOLE, NONE, 0, 0) },
#if defined(__x86_64__)
        { SIDE("fp32, plain C", slow, MIXP_F32, 1, 1, MIXP_ISA_SCALAR, WHOLE, NONE, 0, 0),
          SIDE("fp32, AVX2", slow, MIXP_F32, 1, 1, MIXP_ISA_AVX2, WHOLE, NONE, 0, 0) },
        { SIDE("fp32, AVX2", nano, MIXP_F32, 1, 1, MIXP_ISA_AVX2, WHOLE, NONE, 0, 0),
          SIDE("fp32, AVX-512", nano, MIXP_F32, 1, 1, MIXP_ISA_AVX512, WHOLE, NONE, 0, 0) },
        { SIDE("bf16, AVX-512", nano, MIXP_BF16, 1, 1, MIXP_ISA_AVX512, WHOLE, NONE, 0, 0),
          SIDE("bf16, AVX512_BF16", nano, MIXP_BF16, 1, 1, MIXP_ISA_AVX512_BF16, WHOLE, NONE, 0, 0) },
#endif
        { SIDE("bf16, 4,096 words, whole logits", heads, MIXP_BF16, 1, 1, BEST, WHOLE, NONE, 0, 0),
          SIDE("linear_cross_entropy", heads, MIXP_BF16, 1, 1, BEST, CHUNKS, NONE, 0, 0) },
        { SIDE("bf16, 4,096 words, whole logits", heads, MIXP_BF16, 1, 1, BEST, WHOLE, NONE, 0, 0),
          SIDE("scaler_cross_entropy, disposable", heads, MIXP_BF16, 1, 1, BEST, FUSED, NONE, 0, 0) },
        { SIDE("fp16, unscale, clip, step", tiny, MIXP_F16, 1, 1, BEST, WHOLE, APART, 0, 0),
          SIDE("fp16, max_norm", tiny, MIXP_F16, 1, 1, BEST, WHOLE, INSIDE, 0, 0) },
        { SIDE("bf16", nano, MIXP_BF16, 1, 1, BEST, WHOLE, NONE, 0, 0),
          SIDE("bf16, layers recomputed", nano, MIXP_BF16, 1, 1, BEST, WHOLE, NONE, 1, 0) },
        { SIDE("fp16", nano, MIXP_F16, 1, 1, BEST, WHOLE, NONE, 0, 0),
          SIDE("fp16, guard", nano, MIXP_F16, 1, 1, BEST, WHOLE, NONE, 0, 1) },
    };
    int rounds = argc > 1 ? atoi(argv[1]) : 15, failed = 0;
    if (rounds < 1 || rounds > MOST_ROUNDS) rounds = 15;
    printf("%s, %d rounds; how many times faster the second is, median (least to largest)\n",
           mixp_cpu()->name, rounds);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (argc < 3 || strstr(rows[i][0].name, argv[2]) || strstr(rows[i][1].name, argv[2]))
            failed |= compare(&rows[i][0], &rows[i][1], rounds);
    return failed;
}
