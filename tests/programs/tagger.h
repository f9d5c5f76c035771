/* tagger.h - a bidirectional LSTM that tags the symbols of sequences of several lengths (examples/recurrent.h). The
 * tag of a symbol says which of its neighbours is larger, so both directions count. Behind a sequence's end no target
 * counts, and the first symbol of a sequence counts half.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "../../examples/recurrent.h"

enum { TAGGER_ROWS = FIT(8), TAGGER_TIME = 4, TAGGER_VOCAB = 4, TAGGER_WIDTH = FIT(8), TAGGER_TAGS = 3 };

typedef struct tagger {
    mixp_tensor      *emb, *head;
    recurrent_weights w[2];
    int32_t           symbol[TAGGER_ROWS][TAGGER_TIME], tag[TAGGER_ROWS][TAGGER_TIME], length[TAGGER_ROWS];
    float             trust[TAGGER_ROWS * TAGGER_TIME];
} tagger;

static void tagger_open(session *s) {
    tagger *m = (tagger *)s->model;
    m->emb = matrix(s, "emb", TAGGER_VOCAB, TAGGER_WIDTH, 1.0);
    for (int i = 0; i < 2; i++) {
        memset(&m->w[i], 0, sizeof m->w[i]);
        m->w[i].w_x = matrix(s, i ? "back.wx" : "forth.wx", 4 * TAGGER_WIDTH, TAGGER_WIDTH, 0.4);
        m->w[i].w_h = matrix(s, i ? "back.wh" : "forth.wh", 4 * TAGGER_WIDTH, TAGGER_WIDTH, 0.4);
        m->w[i].b_x = vector(s, i ? "back.bx" : "forth.bx", 4 * TAGGER_WIDTH, 0);
        m->w[i].b_h = vector(s, i ? "back.bh" : "forth.bh", 4 * TAGGER_WIDTH, 0);
    }
    m->head = matrix(s, "head", TAGGER_TAGS, 2 * TAGGER_WIDTH, 0.3);
}

static void tagger_batch(session *s) {
    tagger *m = (tagger *)s->model;
    for (int i = 0; i < TAGGER_ROWS; i++) {
        int32_t *x = m->symbol[i];
        m->length[i] = 2 + below(s, TAGGER_TIME - 1);
        for (int t = 0; t < TAGGER_TIME; t++) x[t] = below(s, TAGGER_VOCAB);
        for (int t = 0; t < TAGGER_TIME; t++) m->trust[i * TAGGER_TIME + t] = t ? 1.0f : 0.5f;
        for (int t = 0; t < TAGGER_TIME; t++) {
            const int before = t > 0 ? x[t - 1] : 0, after = t + 1 < m->length[i] ? x[t + 1] : 0;
            m->tag[i][t] = t >= m->length[i] ? MIXP_IGNORE : before < after ? 0 : before > after ? 1 : 2;
        }
    }
}

static mixp_tensor *tagger_loss(session *s, int turn, int training) {
    tagger        *m = (tagger *)s->model;
    mixp_context  *c = s->ctx;
    mixp_tensor   *x = mixp_embedding(c, m->emb, ints(s, m->symbol[0], TAGGER_ROWS, TAGGER_TIME));
    recurrent_desc d;
    mixp_loss_desc rows;
    memset(&d, 0, sizeof d);
    d.bidirectional = 1;
    d.lengths = ints(s, m->length, TAGGER_ROWS, 0);
    (void)turn;
    (void)training;
    x = mixp_linear(c, recurrent(c, x, NULL, NULL, m->w, &d), m->head, NULL);
    x = shaped(s, x, TAGGER_ROWS * TAGGER_TIME, TAGGER_TAGS, 0, 0);
    memset(&rows, 0, sizeof rows);
    rows.reduction = MIXP_REDUCE_NONE;
    x = mixp_loss_apply(c, MIXP_OP_CROSS_ENTROPY, x, ints(s, m->tag[0], TAGGER_ROWS * TAGGER_TIME, 0), &rows);
    return mixp_mean(c, mixp_mul(c, x, floats(s, m->trust, TAGGER_ROWS * TAGGER_TIME, 0, 0)), MIXP_ALL, 0);
}
