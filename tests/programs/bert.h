/* bert.h - an encoder with padded sequences, dropout and a masked language model. One product of its
 * feed-forward layers passes 65,504 before a norm, as those of large pretrained encoders do.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
enum { BERT_ROWS = FIT(4), BERT_TIME = 10, BERT_VOCAB = 13, BERT_WIDTH = FIT(16), BERT_HEADS = 2, BERT_BLOCKS = 2,
       BERT_TOKENS = BERT_ROWS * BERT_TIME };

typedef struct bert {
    mixp_tensor *emb, *place, *head;
    mixp_tensor *q[BERT_BLOCKS], *k[BERT_BLOCKS], *v[BERT_BLOCKS], *proj[BERT_BLOCKS], *up[BERT_BLOCKS],
                *down[BERT_BLOCKS];
    int32_t      in[BERT_TOKENS], want[BERT_TOKENS], length[BERT_ROWS];
} bert;

static void bert_open(session *s) {
    bert *m = (bert *)s->model;
    m->emb = matrix(s, "emb", BERT_VOCAB, BERT_WIDTH, 0.5);
    m->place = matrix(s, "place", BERT_TIME, BERT_WIDTH, 0.5);
    for (int i = 0; i < BERT_BLOCKS; i++) {
        m->q[i] = layer(s, i, "q", BERT_WIDTH, BERT_WIDTH, 0.25);
        m->k[i] = layer(s, i, "k", BERT_WIDTH, BERT_WIDTH, 0.25);
        m->v[i] = layer(s, i, "v", BERT_WIDTH, BERT_WIDTH, 0.25);
        m->proj[i] = layer(s, i, "proj", BERT_WIDTH, BERT_WIDTH, 0.25);
        m->up[i] = layer(s, i, "up", 2 * BERT_WIDTH, BERT_WIDTH, i ? 60 : 0.25);
        m->down[i] = layer(s, i, "down", BERT_WIDTH, 2 * BERT_WIDTH, i ? 200 : 0.25);
    }
    m->head = matrix(s, "head", BERT_VOCAB, BERT_WIDTH, 0.25);
}

/* Token 0 hides what is to be found: each token is its neighbour's and one more. */
static void bert_batch(session *s) {
    bert *m = (bert *)s->model;
    for (int i = 0; i < BERT_TOKENS; i++) {
        int row = i / BERT_TIME, t = i % BERT_TIME, token;
        if (t == 0) m->length[row] = 5 + below(s, BERT_TIME - 4);
        token = 1 + (7 * row + 3 * s->step + t) % (BERT_VOCAB - 1);
        m->in[i] = t >= m->length[row] || t % 4 == 2 ? 0 : token;
        m->want[i] = t < m->length[row] && t % 4 == 2 ? token : MIXP_IGNORE;
    }
}

static mixp_tensor *bert_loss(session *s, int turn, int training) {
    bert               *m = (bert *)s->model;
    mixp_context       *c = s->ctx;
    mixp_tensor        *x = mixp_embedding(c, m->emb, ints(s, m->in, BERT_ROWS, BERT_TIME)), *h;
    mixp_attention_desc a;
    (void)turn;
    memset(&a, 0, sizeof a);
    a.heads = BERT_HEADS;
    a.lengths = ints(s, m->length, BERT_ROWS, 0);
    x = mixp_dropout(c, mixp_add(c, x, m->place), 0.1f, training);
    for (int i = 0; i < BERT_BLOCKS; i++) {
        h = mixp_attention_apply(c, mixp_linear(c, x, m->q[i], NULL), mixp_linear(c, x, m->k[i], NULL),
                                 mixp_linear(c, x, m->v[i], NULL), &a);
        h = mixp_dropout(c, mixp_linear(c, h, m->proj[i], NULL), 0.1f, training);
        x = mixp_layer_norm(c, mixp_add(c, x, h), NULL, NULL, 1e-5f);
        h = mixp_linear(c, mixp_gelu(c, mixp_linear(c, x, m->up[i], NULL)), m->down[i], NULL);
        x = mixp_layer_norm(c, mixp_add(c, x, mixp_dropout(c, h, 0.1f, training)), NULL, NULL, 1e-5f);
    }
    return mixp_cross_entropy(c, mixp_linear(c, x, m->head, NULL),
                              ints(s, m->want, BERT_ROWS, BERT_TIME), MIXP_IGNORE);
}
