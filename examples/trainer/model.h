/* model.h - the tensors of a GPT, and its layers: a part of trainer.c
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * trainer.c shows how layers make blocks, and blocks a model.
 */
#ifndef TRAINER_MODEL_H
#define TRAINER_MODEL_H

#include "options.h"

typedef struct layer { mixp_tensor *w, *b; } layer;     /* weight; bias or NULL */

typedef struct block {
    layer norm1, qkv, attn_out, norm2, up, down;
} block;

/* Keys and values of the earlier tokens of one sequence, for each layer [room, width]. They are
 * stored in f32, which holds the values of every dtype. */
typedef struct kv_cache {
    float  *k, *v;
    int64_t past, room, width;          /* tokens in the cache; its capacity       */
    int     layer;                      /* the current layer */
} kv_cache;

typedef struct gpt {
    mixp_context *ctx;
    mixp_tensor  *tokens, *positions;   /* positions NULL: q and k are rotated instead (RoPE) */
    mixp_tensor  *head;                 /* equals tokens if tied            */
    layer         norm;
    block        *blocks;
    int32_t      *ramp;                 /* 0, 1, 2, ...: the positions               */
    mixp_dtype    dtype;                /* dtype of the weights */
    int           layers, heads, bias;
    int           activation, rms, qk_norm;
    kv_cache     *cache;                /* for sampling; NULL in training */
    int           is_measured;          /* 1: only memory is measured     */
    float         dropout;
    int64_t       n_parameters;
} gpt;

/* A trainable tensor of zeros. Names are nanoGPT's. */
static mixp_tensor *make_tensor(gpt *m, int index, const char *name, const char *part,
                                int64_t rows, int64_t cols) {
    int64_t      shape[2] = {rows, cols};
    char         full[64];
    mixp_tensor *t;
    if (index < 0) snprintf(full, sizeof full, "transformer.%s.%s", name, part);
    else snprintf(full, sizeof full, "transformer.h.%d.%s.%s", index, name, part);
    t = mixp_param(m->ctx, full, m->dtype, cols ? 2 : 1, shape);
    if (t) m->n_parameters += t->count;
    return t;
}

/* A weight drawn from N(0, std), or zeros. Biases start as zeros. */
static layer make_layer(gpt *m, int index, const char *name, int64_t rows, int64_t cols,
                        double std) {
    layer l = {NULL, NULL};
    l.w = make_tensor(m, index, name, "weight", rows, cols);
    if (std > 0 && !m->is_measured) mixp_init_normal(l.w, 0, std);
    if (m->bias) l.b = make_tensor(m, index, name, "bias", rows, 0);
    return l;
}

/* A gain of ones. */
static layer make_norm(gpt *m, int index, const char *name, int64_t width) {
    layer l = {NULL, NULL};
    l.w = make_tensor(m, index, name, "weight", width, 0);
    mixp_fill(l.w, 1);
    if (m->bias && !m->rms) l.b = make_tensor(m, index, name, "bias", width, 0);
    return l;
}

static mixp_tensor *make_table(gpt *m, const char *name, int64_t rows, int64_t cols) {
    mixp_tensor *t = make_tensor(m, -1, name, "weight", rows, cols);
    if (!m->is_measured) mixp_init_normal(t, 0, 0.02);
    return t;
}

/* A separate head. Its name has no prefix, as in nanoGPT. */
static mixp_tensor *make_head(gpt *m, int64_t rows, int64_t cols, int is_zero) {
    int64_t      shape[2] = {rows, cols};
    mixp_tensor *t = mixp_param(m->ctx, "lm_head.weight", m->dtype, 2, shape);
    if (t) m->n_parameters += t->count;
    if (!is_zero && !m->is_measured) mixp_init_normal(t, 0, 0.02);
    return t;
}

static void make_block(gpt *m, int i, int64_t w, double out_std) {
    block *b = &m->blocks[i];
    b->norm1 = make_norm(m, i, "ln_1", w);
    b->qkv = make_layer(m, i, "attn.c_attn", 3 * w, w, 0.02);
    b->attn_out = make_layer(m, i, "attn.c_proj", w, w, out_std);
    b->norm2 = make_norm(m, i, "ln_2", w);
    b->up = make_layer(m, i, "mlp.c_fc", 4 * w, w, 0.02);
    b->down = make_layer(m, i, "mlp.c_proj", w, 4 * w, out_std);
}

static void make_gpt(gpt *m, mixp_context *ctx, const config *c, int64_t vocab) {
    mixp_dtype low = c->dtype == DTYPE_FP16 ? MIXP_F16 : MIXP_BF16;
    /* Each block adds twice to the residual stream: its variance must not grow with depth. */
    double     out_std = c->zero_init ? 0 : 0.02 / sqrt(2.0 * (double)c->layers);
    m->ctx = ctx;
    /* Only products read the results of norms, and would cast them: so norms store them low. */
    mixp_autocast_override(ctx, mixp_op_builtin(MIXP_OP_LAYER_NORM), MIXP_CLASS_LOW_OUT);
    mixp_autocast_override(ctx, mixp_op_builtin(MIXP_OP_RMS_NORM), MIXP_CLASS_LOW_OUT);
    m->dtype = c->level == 3 && c->dtype != DTYPE_FP32 ? low : MIXP_F32;
    m->layers = (int)c->layers;
    m->heads = (int)c->heads;
    m->bias = (int)c->bias;
    m->activation = (int)c->activation;
    m->rms = c->norm == NORM_RMS;
    m->qk_norm = (int)c->qk_norm;
    m->dropout = (float)c->dropout;
    m->blocks = (block *)calloc((size_t)c->layers, sizeof *m->blocks);
    m->ramp = (int32_t *)malloc((size_t)c->block * sizeof *m->ramp);
    if (!m->blocks || !m->ramp) die(1, "out of memory");
    for (int64_t i = 0; i < c->block; i++) m->ramp[i] = (int32_t)i;
    m->tokens = m->head = make_table(m, "wte", vocab, c->width);
    if (c->positions == POSITIONS_LEARNED) m->positions = make_table(m, "wpe", c->block, c->width);
    for (int i = 0; i < m->layers; i++) make_block(m, i, c->width, out_std);
    m->norm = make_norm(m, -1, "ln_f", c->width);
    if (c->head == HEAD_OWN) m->head = make_head(m, vocab, c->width, (int)c->zero_init);
}

/* The six layers of a block, in order of creation. */
enum { BLOCK_LAYERS = 6 };
static void block_layers(const block *b, layer *all) {
    const layer have[BLOCK_LAYERS] = {b->norm1, b->qkv, b->attn_out, b->norm2, b->up, b->down};
    memcpy(all, have, sizeof have);
}

static int64_t put_layer(mixp_tensor **all, int64_t n, layer l) {
    if (l.w) all[n++] = l.w;
    if (l.b) all[n++] = l.b;
    return n;
}

/* All tensors of a model. Returns their number. all: room for most_tensors. */
static int64_t most_tensors(const gpt *m) { return 5 + 2 * BLOCK_LAYERS * (int64_t)m->layers; }

static int64_t model_tensors(const gpt *m, mixp_tensor **all) {
    int64_t n = 0;
    all[n++] = m->tokens;
    if (m->positions) all[n++] = m->positions;
    for (int i = 0; i < m->layers; i++) {
        layer six[BLOCK_LAYERS];
        block_layers(&m->blocks[i], six);
        for (int k = 0; k < BLOCK_LAYERS; k++) n = put_layer(all, n, six[k]);
    }
    n = put_layer(all, n, m->norm);
    if (m->head != m->tokens) all[n++] = m->head;
    return n;
}

/* ==== Layers ======================================================================== */

/* The last reader of x: a recipe with codes may free it. */
static mixp_tensor *linear(const gpt *m, mixp_tensor *x, layer l) {
    mixp_tensor_set_disposable(x, 1);
    return mixp_linear(m->ctx, x, l.w, l.b);
}

static mixp_tensor *norm(const gpt *m, mixp_tensor *x, layer l) {
    if (m->rms) return mixp_rms_norm(m->ctx, x, l.w, 1e-5f);
    return mixp_layer_norm(m->ctx, x, l.w, l.b, 1e-5f);
}

static mixp_tensor *activate(const gpt *m, mixp_tensor *x) {
    return m->activation == ACTIVATION_RELU2 ? mixp_relu_squared(m->ctx, x)
                                             : mixp_gelu(m->ctx, x);
}

/* With --epilogues, products may compute the tanh form of GELU in their own pass. */
static mixp_tensor *feed_forward(const gpt *m, mixp_tensor *x, const block *b) {
    mixp_tensor_set_disposable(x, 1);
    if (m->activation == ACTIVATION_GELU_TANH)
        return mixp_mlp(m->ctx, x, b->up.w, b->up.b, b->down.w, b->down.b);
    return linear(m, activate(m, linear(m, x, b->up)), b->down);
}

/* Queries or keys x[batch, length, width]: norms each head, and rotates it by its position. */
static mixp_tensor *prepare_heads(const gpt *m, mixp_tensor *x) {
    mixp_rope_desc rope = {.head_dim = x ? (int)(x->shape[2] / m->heads) : 2,
                           .first = m->cache ? m->cache->past : 0};
    int64_t        whole[3] = {0}, heads[4] = {0};
    if (x && m->qk_norm) {
        memcpy(whole, x->shape, sizeof whole);
        memcpy(heads, x->shape, sizeof whole);
        heads[2] = m->heads;
        heads[3] = rope.head_dim;
        x = mixp_rms_norm(m->ctx, mixp_reshape(m->ctx, x, 4, heads), NULL, 1e-5f);
        x = mixp_reshape(m->ctx, x, 3, whole);
    }
    return m->positions ? x : mixp_rope(m->ctx, x, &rope);
}

/* Appends new keys or values x[1, n, width] to this layer's cache. Returns all, [1, past + n,
 * width]. */
static mixp_tensor *with_past(const gpt *m, float *kept, mixp_tensor *x) {
    const kv_cache *c = m->cache;
    int64_t         shape[3] = {1, c->past, c->width};
    if (!x) return NULL;
    shape[1] += x->shape[1];
    kept += c->layer * c->room * c->width;
    mixp_read_f32(x, kept + c->past * c->width, x->count);
    return mixp_input_f32(m->ctx, 3, shape, kept);
}

/* For sampling: queries of the new tokens only. */
static mixp_tensor *attention_with_past(const gpt *m, mixp_tensor *qkv) {
    mixp_attention_desc how = {.heads = m->heads, .causal = 1, .past = m->cache->past};
    mixp_tensor        *part[3], *k, *v;
    mixp_split(m->ctx, qkv, -1, 3, part);
    k = with_past(m, m->cache->k, prepare_heads(m, part[1]));
    v = with_past(m, m->cache->v, part[2]);
    m->cache->layer++;
    return mixp_attention_apply(m->ctx, prepare_heads(m, part[0]), k, v, &how);
}

static mixp_tensor *attention(const gpt *m, mixp_tensor *qkv) {
    mixp_attention_desc how = {.heads = m->heads, .causal = 1};
    mixp_tensor        *part[3];
    if (m->cache) return attention_with_past(m, qkv);
    if (m->positions && !m->qk_norm) return mixp_attention(m->ctx, qkv, m->heads, 1, 0);
    mixp_split(m->ctx, qkv, -1, 3, part);
    return mixp_attention_apply(m->ctx, prepare_heads(m, part[0]), prepare_heads(m, part[1]),
                                part[2], &how);
}

/* x += f and its norm, in one pass. */
static mixp_tensor *add_norm(const gpt *m, mixp_tensor **x, mixp_tensor *f, layer l) {
    mixp_tensor_set_disposable(f, 1);       /* its memory may be reused     */
    if (m->rms) return mixp_add_rms_norm(m->ctx, *x, f, l.w, 1e-5f, x);
    return mixp_add_layer_norm(m->ctx, *x, f, l.w, l.b, 1e-5f, x);
}

#endif
