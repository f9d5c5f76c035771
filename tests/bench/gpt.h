/* gpt.h - the GPT of bench_guard.c, bench_measures.c, bench_recipes.c and bench_recompute.c: one text of the
 * model, so that their steps are alike.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * Include it after mixprec.h. nano: nanoGPT's CPU configuration, 4 layers of width 128, 4 heads, 64 tokens by 12,
 * vocabulary 65. No biases; the head is the embedding of the words.
 */
#ifndef BENCH_GPT_H
#define BENCH_GPT_H
#include <stdio.h>

enum { MOST_LAYERS = 12, MOST_TOKENS = 768, WEIGHTS = 6 };

/* steps: of one round. */
typedef struct shape { int layers, width, heads, vocab, time, batch, steps; } shape;
static const shape nano = { 4, 128, 4, 65, 64, 12, 8 };

struct model;
typedef struct block { struct model *of; int layer; } block;

typedef struct model {
    shape           is;
    int             again;          /* 1: backward computes each layer again (mixp_recompute) */
    block           blocks[MOST_LAYERS];
    mixp_context   *ctx;
    mixp_scaler    *scaler;         /* NULL: none */
    mixp_optimizer *opt;
    mixp_tensor    *wte, *wpe, *w[MOST_LAYERS][WEIGHTS], *ln_f;
    int32_t         in[MOST_TOKENS], out[MOST_TOKENS], place[MOST_TOKENS];
} model;

static mixp_tensor *weight(model *m, const char *name, int rows, int cols) {
    int64_t size[2];
    size[0] = rows;
    size[1] = cols;
    mixp_tensor *t = mixp_param(m->ctx, name, MIXP_F32, cols ? 2 : 1, size);
    if (cols) mixp_init_normal(t, 0.0, 0.02);
    else mixp_fill(t, 1.0);
    mixp_optimizer_add(m->opt, t, NULL);
    return t;
}

/* machine: NULL = the default device and number of threads. max_norm: of the optimizer; 0 = none. */
static void model_open(model *m, shape is, const mixp_context_desc *machine, double max_norm) {
    static const int rows[WEIGHTS] = { 1, 3, 1, 1, 4, 1 }, cols[WEIGHTS] = { 0, 1, 1, 0, 1, 4 };
    static const char *const names[WEIGHTS] = { "ln_1", "qkv", "out", "ln_2", "fc", "proj" };
    mixp_optimizer_desc adam = mixp_adamw_defaults();
    memset(m, 0, sizeof *m);
    adam.max_norm = max_norm;
    m->is = is;
    m->ctx = mixp_context_new(machine);
    m->opt = mixp_optimizer_new(m->ctx, &adam);
    m->wte = weight(m, "wte", is.vocab, is.width);
    m->wpe = weight(m, "wpe", is.time, is.width);
    for (int l = 0; l < is.layers; l++)
        for (int k = 0; k < WEIGHTS; k++) {
            char name[32];
            snprintf(name, sizeof name, "h.%d.%s", l, names[k]);
            m->w[l][k] = weight(m, name, rows[k] * is.width, cols[k] * is.width);
        }
    m->ln_f = weight(m, "ln_f", is.width, 0);
    for (int k = 0; k < is.batch * is.time; k++) m->in[k] = k * 31 % is.vocab;
    for (int k = 0; k < is.batch * is.time; k++) m->out[k] = (k + 1) * 31 % is.vocab;
    for (int k = 0; k < is.time; k++) m->place[k] = k;
}

/* y, which the next linear reads last: recipes with codes may free it. */
static mixp_tensor *last_read(mixp_tensor *y) {
    mixp_tensor_set_disposable(y, 1);
    return y;
}

/* One layer: a block for mixp_recompute. */
static mixp_tensor *model_layer(mixp_context *ctx, mixp_tensor *x, void *user) {
    const block *b = (const block *)user;
    mixp_tensor *const *w = b->of->w[b->layer], *y;
    y = mixp_linear(ctx, last_read(mixp_layer_norm(ctx, x, w[0], NULL, 1e-5f)), w[1], NULL);
    x = mixp_add(ctx, x, mixp_linear(ctx, mixp_attention(ctx, y, b->of->is.heads, 1, 0.0f), w[2], NULL));
    y = mixp_linear(ctx, last_read(mixp_layer_norm(ctx, x, w[3], NULL, 1e-5f)), w[4], NULL);
    return mixp_add(ctx, x, mixp_linear(ctx, last_read(mixp_gelu_tanh(ctx, y)), w[5], NULL));
}

/* The activations that the head reads. */
static mixp_tensor *model_top(model *m) {
    int64_t tokens[2];
    mixp_context *ctx = m->ctx;
    tokens[0] = m->is.batch;
    tokens[1] = m->is.time;
    mixp_tensor *ids = mixp_input(ctx, MIXP_I32, 2, tokens, m->in);
    mixp_tensor *x = mixp_add(ctx, mixp_embedding(ctx, m->wte, ids),
                 mixp_embedding(ctx, m->wpe, mixp_input(ctx, MIXP_I32, 1, tokens + 1, m->place)));
    for (int l = 0; l < m->is.layers; l++) {
        m->blocks[l].of = m;
        m->blocks[l].layer = l;
        x = m->again ? mixp_recompute(ctx, model_layer, &m->blocks[l], x) : model_layer(ctx, x, &m->blocks[l]);
    }
    return mixp_layer_norm(ctx, x, m->ln_f, NULL, 1e-5f);
}

/* The loss of the head's result. */
static mixp_tensor *model_loss_of(model *m, mixp_tensor *logits) {
    int64_t tokens[2];
    tokens[0] = m->is.batch;
    tokens[1] = m->is.time;
    return mixp_cross_entropy(m->ctx, logits, mixp_input(m->ctx, MIXP_I32, 2, tokens, m->out), -100);
}

#endif
