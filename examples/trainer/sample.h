/* sample.h - writes on, token by token: a part of trainer.c
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#ifndef TRAINER_SAMPLE_H
#define TRAINER_SAMPLE_H

#include "choose.h"

/* The logits of the token after ids[0..length). */
static void next_logits(trainer *t, const int32_t *ids, int64_t length, float *logits) {
    int64_t      shape[2] = {1, length};
    mixp_tensor *y = NULL;
    mixp_eval_begin(t->ctx);
    MIXP_NO_GRAD(t->ctx) {
        MIXP_AUTOCAST(t->ctx, t->dtype) {
            y = gpt_logits(&t->model, mixp_input_i32(t->ctx, 2, shape, ids), 0, 1);
        }
        if (y) mixp_read_f32(y, logits, y->count);
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
    choosing      how = {c->temperature, c->top_p, c->top_k, (uint64_t)c->seed, STREAM_SAMPLE};
    int64_t n = read_prompt(c, &t->data, ids);
    if (!c->quiet) say(t->run.step < c->steps ? "--- sample at step %lld\n" : "--- sample\n",
                       (long long)t->run.step);
    say("%s", c->prompt);
    for (int64_t i = 0; i < tokens && !stop_signal; i++) {
        sample_logits(t, &cache, ids, n, logits);
        /* Rows that pad the table are not tokens. */
        ids[n] = choose(&how, logits, logits + t->data.rows, t->data.vocab, i);
        say_token(&out, ids[n++]);
    }
    say_end(&out);
    free(cache.k);
    free(cache.v);
    free(ids);
    free(logits);
}

#endif
