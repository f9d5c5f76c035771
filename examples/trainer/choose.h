/* choose.h - draws a token: a part of trainer.c and of llama.c
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#ifndef TRAINER_CHOOSE_H
#define TRAINER_CHOOSE_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* temperature 0: always the likeliest token. top_k 0, top_p 1: among all. */
typedef struct choosing {
    double   temperature, top_p;
    int64_t  top_k;
    uint64_t seed, stream;
} choosing;

static int falling(const void *a, const void *b) {
    float x, y;
    memcpy(&x, a, sizeof x);
    memcpy(&y, b, sizeof y);
    return (x < y) - (x > y);
}

/* The smallest logit that can be drawn under --top-k and --top-p: of the k likeliest tokens, the
 * fewest whose probabilities sum to the share p. spare: room for as many floats. */
static float least_logit(const choosing *c, const float *logits, float *spare, int64_t vocab) {
    int64_t k = c->top_k && c->top_k < vocab ? c->top_k : vocab, n = 0;
    double  sum = 0, so_far = 0;
    if (k == vocab && c->top_p >= 1) return -HUGE_VALF;
    memcpy(spare, logits, (size_t)vocab * sizeof *spare);
    qsort(spare, (size_t)vocab, sizeof *spare, falling);
    if (c->top_p >= 1) return spare[k - 1];
    for (int64_t i = 0; i < k; i++) sum += exp((double)(spare[i] - spare[0]) / c->temperature);
    while (n < k - 1) {
        so_far += exp((double)(spare[n] - spare[0]) / c->temperature);
        if (so_far >= c->top_p * sum) break;
        n++;
    }
    return spare[n];
}

/* Draws from softmax(logits / temperature), limited by --top-k and --top-p. spare: room for as many
 * floats. position: each has a random number of its own. */
static int choose(const choosing *c, const float *logits, float *spare, int64_t vocab,
                  int64_t position) {
    double  sum = 0, u;
    float   least;
    int64_t top = 0, last = 0;
    for (int64_t i = 1; i < vocab; i++) if (logits[i] > logits[top]) top = i;
    if (c->temperature == 0) return (int)top;
    least = least_logit(c, logits, spare, vocab);
#define WEIGHT(i) (logits[i] < least ? 0 : exp((double)(logits[i] - logits[top]) / c->temperature))
    for (int64_t i = 0; i < vocab; i++) sum += WEIGHT(i);
    u = mixp_random_u32(c->seed, (uint64_t)position, c->stream, 0) * 0x1p-32 * sum;
    for (int64_t i = 0; i < vocab; i++) {
        double weight = WEIGHT(i);
        if (weight > 0) last = i;
        if (u < weight) break;
        u -= weight;
    }
#undef WEIGHT
    return (int)last;
}

#endif
