/* mlp.h - a classifier of two layers, everybody's first program. Nothing in it leaves fp16's range.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
enum { MLP_ROWS = FIT(16), MLP_IN = FIT(12), MLP_HIDDEN = FIT(32), MLP_CLASSES = 4 };

typedef struct mlp {
    mixp_tensor *w1, *b1, *w2, *b2;
    float        x[MLP_ROWS * MLP_IN];
    int32_t      label[MLP_ROWS];
} mlp;

static void mlp_open(session *s) {
    mlp *m = (mlp *)s->model;
    m->w1 = matrix(s, "fc1.w", MLP_HIDDEN, MLP_IN, 0.3);
    m->b1 = vector(s, "fc1.b", MLP_HIDDEN, 0);
    m->w2 = matrix(s, "fc2.w", MLP_CLASSES, MLP_HIDDEN, 0.2);
    m->b2 = vector(s, "fc2.b", MLP_CLASSES, 0);
}

static void mlp_batch(session *s) {
    mlp *m = (mlp *)s->model;
    for (int i = 0; i < MLP_ROWS; i++) {
        m->label[i] = below(s, MLP_CLASSES);
        for (int j = 0; j < MLP_IN; j++)
            m->x[i * MLP_IN + j] = normal(s) + (j % MLP_CLASSES == m->label[i] ? 1.0f : 0.0f);
    }
}

static mixp_tensor *mlp_loss(session *s, int turn, int training) {
    mlp          *m = (mlp *)s->model;
    mixp_context *c = s->ctx;
    mixp_tensor  *h = mixp_linear(c, floats(s, m->x, MLP_ROWS, MLP_IN, 0), m->w1, m->b1);
    (void)turn, (void)training;
    h = mixp_linear(c, mixp_relu(c, h), m->w2, m->b2);
    return mixp_cross_entropy(c, h, ints(s, m->label, MLP_ROWS, 0), MIXP_IGNORE);
}
