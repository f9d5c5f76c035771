/* gemma.h - a feed-forward block as Gemma's, whose product of gate and up passes 65,504 before the
 * projection and its norm: no scale of the loss helps.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
enum { GEMMA_ROWS = FIT(16), GEMMA_WIDTH = FIT(16), GEMMA_HIDDEN = FIT(32), GEMMA_CLASSES = 4 };

typedef struct gemma {
    mixp_tensor *gate, *up, *down, *head;
    float        x[GEMMA_ROWS * GEMMA_WIDTH];
    int32_t      label[GEMMA_ROWS];
} gemma;

static void gemma_open(session *s) {
    gemma *m = (gemma *)s->model;
    m->gate = matrix(s, "mlp.gate_proj", GEMMA_HIDDEN, GEMMA_WIDTH, 60);
    m->up = matrix(s, "mlp.up_proj", GEMMA_HIDDEN, GEMMA_WIDTH, 60);
    m->down = matrix(s, "mlp.down_proj", GEMMA_WIDTH, GEMMA_HIDDEN, 0.1);
    m->head = matrix(s, "head", GEMMA_CLASSES, GEMMA_WIDTH, 0.2);
}

static void gemma_batch(session *s) {
    gemma *m = (gemma *)s->model;
    for (int i = 0; i < GEMMA_ROWS * GEMMA_WIDTH; i++) {
        int row = i / GEMMA_WIDTH;
        if (i % GEMMA_WIDTH == 0) m->label[row] = below(s, GEMMA_CLASSES);
        m->x[i] = 2.0f * uniform(s) - 1.0f + (i % GEMMA_CLASSES == m->label[row] ? 0.7f : 0.0f);
    }
}

static mixp_tensor *gemma_loss(session *s, int turn, int training) {
    gemma        *m = (gemma *)s->model;
    mixp_context *c = s->ctx;
    mixp_tensor  *x = floats(s, m->x, GEMMA_ROWS, GEMMA_WIDTH, 0), *h;
    (void)turn, (void)training;
    MIXP_SCOPE(c, "block") {
        h = mixp_swiglu(c, mixp_linear(c, x, m->gate, NULL), mixp_linear(c, x, m->up, NULL));
        x = mixp_rms_norm(c, mixp_linear(c, h, m->down, NULL), NULL, 1e-6f);
    }
    return mixp_cross_entropy(c, mixp_linear(c, x, m->head, NULL), ints(s, m->label, GEMMA_ROWS, 0),
                              MIXP_IGNORE);
}
