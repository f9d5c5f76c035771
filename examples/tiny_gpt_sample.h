/* tiny_gpt_sample.h - writes on, token by token: a part of tiny_gpt.c
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#ifndef TINY_GPT_SAMPLE_H
#define TINY_GPT_SAMPLE_H

static int falling(const void *a, const void *b) {
    float x, y;
    memcpy(&x, a, sizeof x);
    memcpy(&y, b, sizeof y);
    return (x < y) - (x > y);
}

/* Draws from softmax(logits / temperature), cut to the top_k likeliest; spare: as many floats. */
static int choose(const config *c, const float *logits, float *spare, int64_t vocab,
                  int64_t position) {
    double  sum = 0, u;
    float   least = -HUGE_VALF;
    int64_t top = 0, last = 0;
    for (int64_t i = 1; i < vocab; i++) if (logits[i] > logits[top]) top = i;
    if (c->temperature == 0) return (int)top;
    if (c->top_k && c->top_k < vocab) {
        memcpy(spare, logits, (size_t)vocab * sizeof *spare);
        qsort(spare, (size_t)vocab, sizeof *spare, falling);
        least = spare[c->top_k - 1];
    }
#define WEIGHT(i) (logits[i] < least ? 0 : exp((double)(logits[i] - logits[top]) / c->temperature))
    for (int64_t i = 0; i < vocab; i++) sum += WEIGHT(i);
    u = mixp_random_u32((uint64_t)c->seed, (uint64_t)position, STREAM_SAMPLE, 0) * 0x1p-32 * sum;
    for (int64_t i = 0; i < vocab; i++) {
        double weight = WEIGHT(i);
        if (weight > 0) last = i;
        if (u < weight) break;
        u -= weight;
    }
#undef WEIGHT
    return (int)last;
}

/* The logits of the token after ids[0..length). */
static void next_logits(trainer *t, const int32_t *ids, int64_t length, float *logits) {
    int64_t      shape[2] = {1, length};
    mixp_tensor *y = NULL;
    mixp_step_begin(t->ctx);
    MIXP_NO_GRAD(t->ctx) {
        MIXP_AUTOCAST(t->ctx, t->dtype) {
            y = gpt_logits(&t->model, mixp_input(t->ctx, MIXP_I32, 2, shape, ids), 0, 1);
        }
        if (y) mixp_read(y, logits, MIXP_F32, y->count);
    }
    check(t, "sampling");
}

static void sample_text(trainer *t) {
    const config *c = &t->c;
    int32_t      *ids = (int32_t *)malloc(sizeof *ids * (sizeof c->prompt + (size_t)c->sample));
    float        *logits = (float *)malloc(sizeof *logits * 2 * (size_t)t->data.rows);
    if (!ids || !logits) die(1, "out of memory");
    int64_t n = read_prompt(c, &t->data, ids);
    if (!c->quiet) say("--- sample\n");
    say("%s", c->prompt);
    for (int64_t i = 0; i < c->sample && !stop_signal; i++) {
        int64_t length = n < c->block ? n : c->block;
        next_logits(t, ids + n - length, length, logits);
        /* Rows that only pad the table stand for no token. */
        ids[n] = choose(c, logits, logits + t->data.rows, t->data.vocab, i);
        say_token(&t->data, ids[n++], i == 0 && !c->prompt[0]);
    }
    say("\n");
    free(ids);
    free(logits);
}

#endif
