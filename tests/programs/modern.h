/* modern.h - a block as Llama, Gemma 2 and Primer have it: rotary positions, grouped queries, capped
 * scores, RMS norms, packed SwiGLU, and a relu squared, which fp16 cannot hold from 256 on.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
enum { MODERN_ROWS = FIT(3), MODERN_TIME = 8, MODERN_VOCAB = 11, MODERN_WIDTH = FIT(16), MODERN_HEADS = 2,
       MODERN_TOKENS = MODERN_ROWS * MODERN_TIME };

typedef struct modern {
    mixp_tensor *emb, *q, *kv, *proj, *packed, *down, *primer, *back, *head, *gain;
    int32_t      in[MODERN_TOKENS], next[MODERN_TOKENS];
} modern;

static void modern_open(session *s) {
    modern *m = (modern *)s->model;
    m->emb = matrix(s, "emb", MODERN_VOCAB, MODERN_WIDTH, 0.5);
    m->gain = vector(s, "gain", MODERN_WIDTH, 1);
    m->q = matrix(s, "q", MODERN_WIDTH, MODERN_WIDTH, 0.25);
    m->kv = matrix(s, "kv", MODERN_WIDTH, MODERN_WIDTH, 0.25);
    m->proj = matrix(s, "proj", MODERN_WIDTH, MODERN_WIDTH, 0.2);
    m->packed = matrix(s, "gate_up", 4 * MODERN_WIDTH, MODERN_WIDTH, 0.25);
    m->down = matrix(s, "down", MODERN_WIDTH, 2 * MODERN_WIDTH, 0.2);
    m->primer = matrix(s, "primer.up", MODERN_WIDTH, MODERN_WIDTH, 50);
    m->back = matrix(s, "primer.down", MODERN_WIDTH, MODERN_WIDTH, 0.25);
    m->head = matrix(s, "head", MODERN_VOCAB, MODERN_WIDTH, 0.25);
}

static void modern_batch(session *s) {
    modern *m = (modern *)s->model;
    for (int i = 0; i < MODERN_TOKENS; i++) {
        m->in[i] = i % MODERN_TIME ? m->next[i - 1] : below(s, MODERN_VOCAB);
        m->next[i] = (m->in[i] * 5 + 2) % MODERN_VOCAB;
    }
}

static mixp_tensor *modern_attention(session *s, mixp_tensor *x) {
    modern             *m = (modern *)s->model;
    mixp_context       *c = s->ctx;
    mixp_tensor        *q = mixp_linear(c, x, m->q, NULL), *kv[2];
    mixp_attention_desc a;
    mixp_rope_desc      rope;
    memset(&a, 0, sizeof a);
    memset(&rope, 0, sizeof rope);
    rope.head_dim = MODERN_WIDTH / MODERN_HEADS;
    a.heads = MODERN_HEADS;
    a.kv_heads = 1;
    a.causal = 1;
    a.softcap = 20;
    mixp_split(c, mixp_linear(c, x, m->kv, NULL), -1, 2, kv);
    x = mixp_attention_apply(c, mixp_rope(c, q, &rope), mixp_rope(c, kv[0], &rope), kv[1], &a);
    return mixp_linear(c, x, m->proj, NULL);
}

static mixp_tensor *modern_loss(session *s, int turn, int training) {
    modern       *m = (modern *)s->model;
    mixp_context *c = s->ctx;
    mixp_tensor  *x = mixp_embedding(c, m->emb, ints(s, m->in, MODERN_ROWS, MODERN_TIME)), *h;
    (void)turn, (void)training;
    h = modern_attention(s, mixp_rms_norm(c, x, m->gain, 1e-6f));
    h = mixp_add_rms_norm(c, x, h, NULL, 1e-6f, &x);
    h = mixp_swiglu_packed(c, mixp_linear(c, h, m->packed, NULL));
    h = mixp_add_rms_norm(c, x, mixp_linear(c, h, m->down, NULL), NULL, 1e-6f, &x);
    h = mixp_rms_norm(c, mixp_relu_squared(c, mixp_linear(c, h, m->primer, NULL)), NULL, 1e-6f);
    x = mixp_add(c, x, mixp_linear(c, h, m->back, NULL));
    x = mixp_soft_cap(c, mixp_linear(c, mixp_rms_norm(c, x, NULL, 1e-6f), m->head, NULL), 15);
    return mixp_cross_entropy(c, x, ints(s, m->next, MODERN_ROWS, MODERN_TIME), MIXP_IGNORE);
}
