/* test_modern_block.c - a block of a current model: RMSNorm, queries and keys normalised per head,
 * rotary positions, grouped heads, SwiGLU. In fp16 it learns to repeat the token of five positions
 * before. Its last query, run alone with the keys of all positions, gives the result of the full
 * sequence.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include "numbers.h"
#include "test.h"

enum { BATCH = 8, LENGTH = 20, WIDTH = 32, HEADS = 4, KV_HEADS = 2, D = WIDTH / HEADS,
       KV_WIDTH = KV_HEADS * D, HIDDEN = 64, VOCAB = 12, BEFORE = 5 };

typedef struct model {
    mixp_context *c;
    mixp_optimizer *opt;
    mixp_tensor *embed, *norm1, *norm2, *norm3, *q, *k, *v, *q_norm, *k_norm, *proj, *gate, *up, *down;
} model;

static mixp_tensor *param(model *m, const char *name, int64_t rows, int64_t cols) {
    int64_t shape[2];
    shape[0] = rows;
    shape[1] = cols;
    mixp_tensor *t = mixp_param(m->c, name, MIXP_F32, cols ? 2 : 1, shape);
    if (cols) mixp_init_normal(t, 0, 1 / sqrt((double)cols));
    else mixp_fill(t, 1);
    CHECK_INT(mixp_optimizer_add(m->opt, t, NULL), MIXP_OK);
    return t;
}

static model model_new(void) {
    mixp_optimizer_desc adamw = mixp_adamw_defaults();
    model m;
    memset(&m, 0, sizeof m);
    m.c = mixp_context_new(NULL);
    adamw.lr = 5e-3;
    adamw.max_norm = 1;
    m.opt = mixp_optimizer_new(m.c, &adamw);
    m.embed = param(&m, "embed", VOCAB, WIDTH);
    m.norm1 = param(&m, "norm1", WIDTH, 0);
    m.norm2 = param(&m, "norm2", WIDTH, 0);
    m.norm3 = param(&m, "norm3", WIDTH, 0);
    m.q = param(&m, "q", WIDTH, WIDTH);
    m.k = param(&m, "k", KV_WIDTH, WIDTH);
    m.v = param(&m, "v", KV_WIDTH, WIDTH);
    m.q_norm = param(&m, "q_norm", D, 0);
    m.k_norm = param(&m, "k_norm", D, 0);
    m.proj = param(&m, "proj", WIDTH, WIDTH);
    m.gate = param(&m, "gate", HIDDEN, WIDTH);
    m.up = param(&m, "up", HIDDEN, WIDTH);
    m.down = param(&m, "down", WIDTH, HIDDEN);
    return m;
}

/* Queries or keys: made, normed head by head, turned to their positions. */
static mixp_tensor *turned(const model *m, mixp_tensor *x, mixp_tensor *w, mixp_tensor *gamma,
                           int64_t first) {
    mixp_tensor *h = mixp_linear(m->c, x, w, NULL);
    mixp_rope_desc rope;
    int64_t by_head[4], rows[3];
    memset(&rope, 0, sizeof rope);
    rope.head_dim = D;
    rope.first = first;
    if (!h) return NULL;
    rows[0] = by_head[0] = h->shape[0];
    rows[1] = by_head[1] = h->shape[1];
    rows[2] = h->shape[2];
    by_head[2] = h->shape[2] / D;
    by_head[3] = D;
    h = mixp_rms_norm(m->c, mixp_reshape(m->c, h, 4, by_head), gamma, 1e-5f);
    return mixp_rope(m->c, mixp_reshape(m->c, h, 3, rows), &rope);
}

/* x: embedded tokens. alone: only the last one asks, of all. */
static mixp_tensor *logits_of(const model *m, mixp_tensor *x, int alone) {
    mixp_context *c = m->c;
    mixp_attention_desc d;
    mixp_tensor *h = mixp_rms_norm(c, x, m->norm1, 1e-5f), *ask = h, *q, *k, *v;
    int64_t first = alone ? LENGTH - 1 : 0;
    memset(&d, 0, sizeof d);
    d.heads = HEADS;
    d.kv_heads = KV_HEADS;
    d.causal = 1;
    d.past = first;
    if (alone) {
        ask = mixp_slice(c, h, 1, first, 1);
        x = mixp_slice(c, x, 1, first, 1);
    }
    q = turned(m, ask, m->q, m->q_norm, first);
    k = turned(m, h, m->k, m->k_norm, 0);
    v = mixp_linear(c, h, m->v, NULL);
    x = mixp_add(c, x, mixp_linear(c, mixp_attention_apply(c, q, k, v, &d), m->proj, NULL));
    h = mixp_rms_norm(c, x, m->norm2, 1e-5f);
    h = mixp_swiglu(c, mixp_linear(c, h, m->gate, NULL), mixp_linear(c, h, m->up, NULL));
    x = mixp_add(c, x, mixp_linear(c, h, m->down, NULL));
    return mixp_linear(c, mixp_rms_norm(c, x, m->norm3, 1e-5f), m->embed, NULL);
}

/* Tokens by chance, each again BEFORE later: what follows the first ones can be told. */
static void make_batch(int32_t *tokens, int32_t *next) {
    for (int b = 0; b < BATCH; b++)
        for (int t = 0; t <= LENGTH; t++) {
            int32_t token = t < BEFORE ? (int32_t)(random_u64() % VOCAB)
                                       : tokens[b * LENGTH + t - BEFORE];
            if (t < LENGTH) tokens[b * LENGTH + t] = token;
            if (t > 0) next[b * LENGTH + t - 1] = t < BEFORE ? MIXP_IGNORE : token;
        }
}

static mixp_tensor *embedded(const model *m, const int32_t *tokens) {
    static const int64_t shape[2] = { BATCH, LENGTH };
    return mixp_embedding(m->c, m->embed, mixp_input(m->c, MIXP_I32, 2, shape, tokens));
}

static double train(model *m, mixp_scaler *scaler, int steps) {
    static const int64_t shape[2] = { BATCH, LENGTH };
    int32_t tokens[BATCH * LENGTH], next[BATCH * LENGTH];
    double  last = 0;
    for (int i = 0; i < steps; i++) {
        mixp_tensor *loss = NULL;
        make_batch(tokens, next);
        mixp_step_begin(m->c);
        mixp_zero_grad(m->opt);
        MIXP_AUTOCAST(m->c, MIXP_F16) {
            loss = mixp_cross_entropy(m->c, logits_of(m, embedded(m, tokens), 0),
                                      mixp_input(m->c, MIXP_I32, 2, shape, next), MIXP_IGNORE);
        }
        mixp_backward(m->c, mixp_scaler_scale(scaler, loss));
        mixp_scaler_step(scaler, m->opt);
        mixp_scaler_update(scaler);
        last = mixp_item(loss);
    }
    return last;
}

static void it_learns_and_decodes(void) {
    model m = model_new();
    mixp_scaler *scaler = mixp_scaler_new(m.c, NULL);
    int32_t tokens[BATCH * LENGTH], next[BATCH * LENGTH];
    float   whole[BATCH * LENGTH * VOCAB], alone[BATCH * VOCAB];
    const char *why = "";
    CHECK(train(&m, scaler, 1) > 2);                    /* about log(VOCAB) at first          */
    CHECK(train(&m, scaler, 150) < 0.5);
    make_batch(tokens, next);
    mixp_step_begin(m.c);
    mixp_read(logits_of(&m, embedded(&m, tokens), 0), whole, MIXP_F32, BATCH * LENGTH * VOCAB);
    mixp_read(logits_of(&m, embedded(&m, tokens), 1), alone, MIXP_F32, BATCH * VOCAB);
    for (int b = 0; b < BATCH; b++)
        for (int i = 0; i < VOCAB; i++)
            CHECK_NEAR(alone[b * VOCAB + i], whole[((b + 1) * LENGTH - 1) * VOCAB + i], 1e-4);
    CHECK_INT(mixp_context_error(m.c, &why), MIXP_OK);
    CHECK_TEXT(why, "");
    mixp_context_free(m.c);
}

int main(void) {
    RUN(it_learns_and_decodes);
    return test_report();
}
