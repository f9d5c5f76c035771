/* rnn.h - a recurrent cell unrolled over 24 steps, whose product passes 65,504 at each of them, before
 * its norm. What the sequence began with must be known at its end. A sequence begins with the state in
 * which the last one ended, which a buffer holds.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
enum { RNN_ROWS = FIT(8), RNN_TIME = 24, RNN_WIDTH = FIT(16), RNN_CLASSES = 4 };

typedef struct rnn {
    mixp_tensor *wx, *wh, *head;
    float        x[RNN_TIME][RNN_ROWS * RNN_WIDTH];
    mixp_tensor *h[PARTS], *last;
    int32_t      label[RNN_ROWS];
} rnn;

static void rnn_open(session *s) {
    rnn *m = (rnn *)s->model;
    m->wx = matrix(s, "cell.wx", RNN_WIDTH, RNN_WIDTH, 4000);
    m->wh = matrix(s, "cell.wh", RNN_WIDTH, RNN_WIDTH, 12000);
    m->head = matrix(s, "head", RNN_CLASSES, RNN_WIDTH, 0.2);
    buffer_of_parts(s, m->h, "state", RNN_ROWS, RNN_WIDTH);
}

static void rnn_batch(session *s) {
    rnn *m = (rnn *)s->model;
    for (int i = 0; i < RNN_ROWS; i++) m->label[i] = below(s, RNN_CLASSES);
    for (int t = 0; t < RNN_TIME; t++)
        for (int i = 0; i < RNN_ROWS * RNN_WIDTH; i++)
            m->x[t][i] = 0.1f * normal(s) + (i % RNN_CLASSES == m->label[i / RNN_WIDTH] ? 2.0f : 0.0f);
}

static mixp_tensor *rnn_loss(session *s, int turn, int training) {
    rnn          *m = (rnn *)s->model;
    mixp_context *c = s->ctx;
    mixp_tensor  *h = m->h[s->part];
    (void)turn;
    for (int t = 0; t < RNN_TIME; t++) {
        mixp_tensor *x = mixp_linear(c, floats(s, m->x[t], RNN_ROWS, RNN_WIDTH, 0), m->wx, NULL);
        h = mixp_add(c, x, mixp_linear(c, h, m->wh, NULL));
        h = mixp_tanh(c, mixp_rms_norm(c, h, NULL, 1e-5f));
    }
    if (training) m->last = h;
    return mixp_cross_entropy(c, mixp_linear(c, h, m->head, NULL), ints(s, m->label, RNN_ROWS, 0),
                              MIXP_IGNORE);
}

static void rnn_carry(session *s) {
    rnn *m = (rnn *)s->model;
    mixp_copy(m->h[s->part], m->last);
}
