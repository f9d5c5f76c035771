/* lstm.h - an LSTM that reads on where the last batch ended: buffers hold its state. Sequences of part k of
 * the batch have the state of part k.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
enum { LSTM_ROWS = FIT(8), LSTM_TIME = 8, LSTM_VOCAB = 12, LSTM_WIDTH = FIT(16) };

typedef struct lstm {
    mixp_tensor *emb, *wx, *wh, *bias, *head;
    int32_t      in[LSTM_TIME][LSTM_ROWS], next[LSTM_TIME][LSTM_ROWS];
    mixp_tensor *h[PARTS], *c[PARTS], *last_h, *last_c;
} lstm;

static void lstm_open(session *s) {
    lstm *m = (lstm *)s->model;
    m->emb = matrix(s, "emb", LSTM_VOCAB, LSTM_WIDTH, 0.5);
    m->wx = matrix(s, "lstm.wx", 4 * LSTM_WIDTH, LSTM_WIDTH, 0.25);
    m->wh = matrix(s, "lstm.wh", 4 * LSTM_WIDTH, LSTM_WIDTH, 0.25);
    m->bias = vector(s, "lstm.b", 4 * LSTM_WIDTH, 0);
    m->head = matrix(s, "head", LSTM_VOCAB, LSTM_WIDTH, 0.25);
    buffer_of_parts(s, m->h, "state.h", LSTM_ROWS, LSTM_WIDTH);
    buffer_of_parts(s, m->c, "state.c", LSTM_ROWS, LSTM_WIDTH);
}

/* Each row counts by a stride of its own, from step to step. */
static void lstm_batch(session *s) {
    lstm *m = (lstm *)s->model;
    for (int t = 0; t < LSTM_TIME; t++)
        for (int i = 0; i < LSTM_ROWS; i++) {
            int at = (s->step * LSTM_TIME + t) * (1 + i % 3) + i + s->part;
            m->in[t][i] = at % LSTM_VOCAB;
            m->next[t][i] = (at + 1 + i % 3) % LSTM_VOCAB;
        }
}

static mixp_tensor *lstm_loss(session *s, int turn, int training) {
    lstm         *m = (lstm *)s->model;
    mixp_context *ctx = s->ctx;
    mixp_tensor  *h = m->h[s->part];
    mixp_tensor  *c = m->c[s->part];
    mixp_tensor  *gate[4], *loss = NULL;
    (void)turn;
    for (int t = 0; t < LSTM_TIME; t++) {
        mixp_tensor *x = mixp_embedding(ctx, m->emb, ints(s, m->in[t], LSTM_ROWS, 0)), *one;
        x = mixp_add(ctx, mixp_linear(ctx, x, m->wx, m->bias), mixp_linear(ctx, h, m->wh, NULL));
        mixp_split(ctx, x, -1, 4, gate);
        c = mixp_add(ctx, mixp_mul(ctx, mixp_sigmoid(ctx, gate[0]), c),
                     mixp_mul(ctx, mixp_sigmoid(ctx, gate[1]), mixp_tanh(ctx, gate[2])));
        h = mixp_mul(ctx, mixp_sigmoid(ctx, gate[3]), mixp_tanh(ctx, c));
        one = mixp_cross_entropy(ctx, mixp_linear(ctx, h, m->head, NULL),
                                 ints(s, m->next[t], LSTM_ROWS, 0), MIXP_IGNORE);
        loss = loss ? mixp_add(ctx, loss, one) : one;
    }
    if (training) m->last_h = h, m->last_c = c;
    return mixp_scale(ctx, loss, 1.0f / LSTM_TIME);
}

static void lstm_carry(session *s) {
    lstm *m = (lstm *)s->model;
    mixp_copy(m->h[s->part], m->last_h);
    mixp_copy(m->c[s->part], m->last_c);
}
