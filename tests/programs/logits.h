/* logits.h - a classifier whose logits pass 65,504, through mixp_linear_cross_entropy: a loss that is
 * right where products are stored in f32, however they are made.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
enum { LOGITS_ROWS = FIT(16), LOGITS_IN = FIT(8), LOGITS_WIDTH = FIT(12), LOGITS_CLASSES = 6 };

typedef struct logits {
    mixp_tensor *in, *head;
    float        x[LOGITS_ROWS * LOGITS_IN];
    int32_t      label[LOGITS_ROWS];
} logits;

static void logits_open(session *s) {
    logits *m = (logits *)s->model;
    m->in = matrix(s, "in.w", LOGITS_WIDTH, LOGITS_IN, 10);
    m->head = matrix(s, "head", LOGITS_CLASSES, LOGITS_WIDTH, 2000);
}

static void logits_batch(session *s) {
    logits *m = (logits *)s->model;
    for (int i = 0; i < LOGITS_ROWS; i++) {
        m->label[i] = below(s, LOGITS_CLASSES);
        for (int j = 0; j < LOGITS_IN; j++)
            m->x[i * LOGITS_IN + j] = 0.3f * normal(s) + (j == m->label[i] ? 2.0f : 0.0f);
    }
}

static mixp_tensor *logits_loss(session *s, int turn, int training) {
    logits       *m = (logits *)s->model;
    mixp_context *c = s->ctx;
    mixp_tensor  *h = mixp_linear(c, floats(s, m->x, LOGITS_ROWS, LOGITS_IN, 0), m->in, NULL);
    (void)turn, (void)training;
    h = mixp_linear_cross_entropy(c, h, m->head, ints(s, m->label, LOGITS_ROWS, 0), MIXP_IGNORE, 0);
    return mixp_scale(c, h, 1e-4f);
}
