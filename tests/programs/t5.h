/* t5.h - an encoder and a decoder as T5 has them: heads by reshape and transpose, scores without
 * 1/sqrt(d), relative biases, gated GELU, and a causal mask of -Inf in each of the forms that people
 * write. In t5_wide a feed-forward product passes 65,504 before the next norm.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
enum {
    T5_ROWS = FIT(3),
    T5_TIME = 6,
    T5_VOCAB = 9,
    T5_WIDTH = FIT(16),
    T5_HEADS = 2,
    T5_TOKENS = T5_ROWS * T5_TIME
};
enum { T5_FILL, T5_WHERE, T5_ADD, T5_LOG, T5_FUSED, T5_WIDE };

typedef struct t5 {
    int          form;
    mixp_tensor *emb, *bias, *head;
    mixp_tensor *q[3], *k[3], *v[3], *o[3], *gate[2], *up[2], *down[2];
    int32_t      in[T5_TOKENS], shifted[T5_TOKENS], want[T5_TOKENS], far[T5_TIME * T5_TIME];
    uint8_t      hidden[T5_TIME * T5_TIME], seen[T5_TIME * T5_TIME];
    float        minus[T5_TIME * T5_TIME], minus_inf, share[T5_TIME * T5_TIME];
} t5;

static void t5_make(session *s, int form) {
    t5 *m = (t5 *)s->model;
    m->form = form;
    m->minus_inf = -INFINITY;
    m->emb = matrix(s, "emb", T5_VOCAB, T5_WIDTH, 1);
    m->bias = matrix(s, "relative", 2 * T5_TIME - 1, 1, 0.1);
    if (form == T5_FUSED) mixp_tensor_set_requires_grad(m->bias, 0);   /* it has no use there */
    for (int i = 0; i < 3; i++) {               /* the encoder's, the decoder's, those across        */
        m->q[i] = layer(s, i, "q", T5_WIDTH, T5_WIDTH, 0.1);
        m->k[i] = layer(s, i, "k", T5_WIDTH, T5_WIDTH, 0.25);
        m->v[i] = layer(s, i, "v", T5_WIDTH, T5_WIDTH, 0.25);
        m->o[i] = layer(s, i, "o", T5_WIDTH, T5_WIDTH, 0.25);
    }
    for (int i = 0; i < 2; i++) {
        m->gate[i] = layer(s, i, "wi_0", 2 * T5_WIDTH, T5_WIDTH, 0.25);
        m->up[i] = layer(s, i, "wi_1", 2 * T5_WIDTH, T5_WIDTH, form == T5_WIDE && !i ? 200 : 0.25);
        m->down[i] = layer(s, i, "wo", T5_WIDTH, 2 * T5_WIDTH, form == T5_WIDE && !i ? 200 : 0.2);
    }
    m->head = matrix(s, "head", T5_VOCAB, T5_WIDTH, 0.25);
    for (int i = 0; i < T5_TIME * T5_TIME; i++) {
        int row = i / T5_TIME, col = i % T5_TIME;
        m->far[i] = T5_TIME - 1 + row - col;
        m->hidden[i] = col > row;
        m->seen[i] = col <= row;
        m->share[i] = m->seen[i];
        m->minus[i] = col > row ? -INFINITY : 0.0f;
    }
}
static void t5_fill_open(session *s) { t5_make(s, T5_FILL); }
static void t5_where_open(session *s) { t5_make(s, T5_WHERE); }
static void t5_add_open(session *s) { t5_make(s, T5_ADD); }
static void t5_log_open(session *s) { t5_make(s, T5_LOG); }
static void t5_fused_open(session *s) { t5_make(s, T5_FUSED); }
static void t5_wide_open(session *s) { t5_make(s, T5_WIDE); }

/* The answer is the question backwards. */
static void t5_batch(session *s) {
    t5 *m = (t5 *)s->model;
    for (int i = 0; i < T5_TOKENS; i++) m->in[i] = 1 + below(s, T5_VOCAB - 1);
    for (int i = 0; i < T5_TOKENS; i++) {
        int row = i / T5_TIME, t = i % T5_TIME;
        m->want[i] = m->in[row * T5_TIME + T5_TIME - 1 - t];
        m->shifted[i] = t ? m->in[row * T5_TIME + T5_TIME - t] : 0;
    }
}

static mixp_tensor *t5_heads(session *s, mixp_tensor *x) {      /* [rows, heads, time, d]            */
    x = shaped(s, x, T5_ROWS, T5_TIME, T5_HEADS, T5_WIDTH / T5_HEADS);
    return mixp_transpose(s->ctx, x, 1, 2);
}

static mixp_tensor *t5_mask(session *s, mixp_tensor *scores) {
    t5           *m = (t5 *)s->model;
    mixp_context *c = s->ctx;
    if (m->form == T5_WHERE)
        return mixp_where(c, bytes(s, m->seen, T5_TIME, T5_TIME), scores,
                          floats(s, &m->minus_inf, 1, 0, 0));
    if (m->form == T5_ADD) return mixp_add(c, scores, floats(s, m->minus, T5_TIME, T5_TIME, 0));
    if (m->form == T5_LOG)
        return mixp_add(c, scores, mixp_log(c, floats(s, m->share, T5_TIME, T5_TIME, 0)));
    return mixp_masked_fill(c, scores, bytes(s, m->hidden, T5_TIME, T5_TIME), -INFINITY);
}

static mixp_tensor *t5_attention(session *s, int i, mixp_tensor *x, mixp_tensor *from, int causal) {
    t5           *m = (t5 *)s->model;
    mixp_context *c = s->ctx;
    mixp_tensor  *q = mixp_linear(c, mixp_rms_norm(c, x, NULL, 1e-6f), m->q[i], NULL), *y;
    mixp_tensor  *k = mixp_linear(c, from, m->k[i], NULL), *v = mixp_linear(c, from, m->v[i], NULL);
    if (m->form == T5_FUSED) {
        mixp_attention_desc a;
        memset(&a, 0, sizeof a);
        a.heads = T5_HEADS;
        a.scale = 1;
        a.mask = causal ? floats(s, m->minus, T5_TIME, T5_TIME, 0) : NULL;
        y = mixp_attention_apply(c, q, k, v, &a);
    } else {
        mixp_tensor *bias = mixp_embedding(c, m->bias, ints(s, m->far, T5_TIME, T5_TIME));
        y = mixp_matmul(c, t5_heads(s, q), t5_heads(s, k), 0, 1);
        y = mixp_add(c, y, shaped(s, bias, T5_TIME, T5_TIME, 0, 0));
        y = mixp_softmax(c, causal ? t5_mask(s, y) : y);
        y = mixp_transpose(c, mixp_matmul(c, y, t5_heads(s, v), 0, 0), 1, 2);
        y = shaped(s, y, T5_ROWS, T5_TIME, T5_WIDTH, 0);
    }
    return mixp_add(c, x, mixp_linear(c, y, m->o[i], NULL));
}

static mixp_tensor *t5_feed(session *s, int i, mixp_tensor *x) {
    t5           *m = (t5 *)s->model;
    mixp_context *c = s->ctx;
    mixp_tensor  *h = mixp_rms_norm(c, x, NULL, 1e-6f);
    h = mixp_mul(c, mixp_gelu_tanh(c, mixp_linear(c, h, m->gate[i], NULL)),
                 mixp_linear(c, h, m->up[i], NULL));
    return mixp_add(c, x, mixp_linear(c, h, m->down[i], NULL));
}

static mixp_tensor *t5_loss(session *s, int turn, int training) {
    t5           *m = (t5 *)s->model;
    mixp_context *c = s->ctx;
    mixp_tensor  *x = mixp_embedding(c, m->emb, ints(s, m->in, T5_ROWS, T5_TIME)), *y;
    (void)turn, (void)training;
    x = t5_attention(s, 0, x, mixp_rms_norm(c, x, NULL, 1e-6f), 0);
    x = mixp_rms_norm(c, t5_feed(s, 0, x), NULL, 1e-6f);
    y = mixp_embedding(c, m->emb, ints(s, m->shifted, T5_ROWS, T5_TIME));
    y = t5_attention(s, 1, y, mixp_rms_norm(c, y, NULL, 1e-6f), 1);
    y = t5_feed(s, 1, t5_attention(s, 2, y, x, 0));
    y = mixp_linear(c, mixp_rms_norm(c, y, NULL, 1e-6f), m->head, NULL);
    return mixp_cross_entropy(c, y, ints(s, m->want, T5_ROWS, T5_TIME), MIXP_IGNORE);
}
