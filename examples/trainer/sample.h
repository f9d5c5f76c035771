/* sample.h - writes on, token by token: a part of trainer.c
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#ifndef TRAINER_SAMPLE_H
#define TRAINER_SAMPLE_H

static int falling(const void *a, const void *b) {
    float x, y;
    memcpy(&x, a, sizeof x);
    memcpy(&y, b, sizeof y);
    return (x < y) - (x > y);
}

/* The smallest logit that can be drawn under --top-k and --top-p: of the k likeliest tokens, the
 * fewest whose probabilities sum to the share p. spare: room for as many floats. */
static float least_logit(const config *c, const float *logits, float *spare, int64_t vocab) {
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
 * floats. */
static int choose(const config *c, const float *logits, float *spare, int64_t vocab,
                  int64_t position) {
    double  sum = 0, u;
    float   least;
    int64_t top = 0, last = 0;
    for (int64_t i = 1; i < vocab; i++) if (logits[i] > logits[top]) top = i;
    if (c->temperature == 0) return (int)top;
    least = least_logit(c, logits, spare, vocab);
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
    mixp_eval_begin(t->ctx);
    MIXP_NO_GRAD(t->ctx) {
        MIXP_AUTOCAST(t->ctx, t->dtype) {
            y = gpt_logits(&t->model, mixp_input(t->ctx, MIXP_I32, 2, shape, ids), 0, 1);
        }
        if (y) mixp_read(y, logits, MIXP_F32, y->count);
    }
    check(t, "sampling");
}

static kv_cache make_cache(const trainer *t) {
    kv_cache c = {.room = t->c.block, .width = t->c.width};
    size_t   bytes = (size_t)(t->c.layers * c.room * c.width) * sizeof *c.k;
    c.k = (float *)malloc(bytes);
    c.v = (float *)malloc(bytes);
    if (!c.k || !c.v) die(1, "out of memory for a sample");
    return c;
}

/* The logits of the token after ids[0..n). Within the block, earlier tokens are in the cache, so
 * only new tokens are computed; results differ only by rounding. Beyond the block, the window moves
 * and changes the position of each token, so all tokens are computed. */
static void sample_logits(trainer *t, kv_cache *cache, const int32_t *ids, int64_t n, float *logits) {
    int64_t room = t->c.block;
    t->model.cache = n <= room ? cache : NULL;
    if (n <= room) next_logits(t, ids + cache->past, n - cache->past, logits);
    else next_logits(t, ids + n - room, room, logits);
    cache->past = n;
    t->model.cache = NULL;
}

/* Samples at the end, or during training. During training all ranks sample alike, because the guard
 * counts their steps; only rank 0 prints. */
static void sample_text(trainer *t) {
    const config *c = &t->c;
    int64_t       tokens = c->sample ? c->sample : 100;
    int32_t      *ids = (int32_t *)malloc(sizeof *ids * (PROMPT_TOKENS + (size_t)tokens));
    float        *logits = (float *)malloc(sizeof *logits * 2 * (size_t)t->data.rows);
    kv_cache      cache = make_cache(t);
    speaker       out = {&t->data, !c->prompt[0], ""};
    if (!ids || !logits) die(1, "out of memory");
    int64_t n = read_prompt(c, &t->data, ids);
    if (!c->quiet) say(t->run.step < c->steps ? "--- sample at step %lld\n" : "--- sample\n",
                       (long long)t->run.step);
    say("%s", c->prompt);
    for (int64_t i = 0; i < tokens && !stop_signal; i++) {
        sample_logits(t, &cache, ids, n, logits);
        /* Rows that pad the table are not tokens. */
        ids[n] = choose(c, logits, logits + t->data.rows, t->data.vocab, i);
        say_token(&out, ids[n++]);
    }
    say_end(&out);
    free(cache.k);
    free(cache.v);
    free(ids);
    free(logits);
}

#endif
