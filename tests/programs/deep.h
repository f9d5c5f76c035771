/* deep.h - twelve residual layers without a norm, each of which makes the stream two or three times
 * larger: it passes 65,504 in the last ones. The loss is that of the normed end.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
enum { DEEP_ROWS = FIT(12), DEEP_WIDTH = FIT(16), DEEP_LAYERS = 12, DEEP_CLASSES = 4 };

typedef struct deep {
    mixp_tensor *w[DEEP_LAYERS], *head;
    float        x[DEEP_ROWS * DEEP_WIDTH];
    int32_t      label[DEEP_ROWS];
} deep;

static void deep_open(session *s) {
    deep *m = (deep *)s->model;
    for (int i = 0; i < DEEP_LAYERS; i++) m->w[i] = layer(s, i, "w", DEEP_WIDTH, DEEP_WIDTH, 0.8);
    m->head = matrix(s, "head", DEEP_CLASSES, DEEP_WIDTH, 0.2);
}

static void deep_batch(session *s) {
    deep *m = (deep *)s->model;
    for (int i = 0; i < DEEP_ROWS * DEEP_WIDTH; i++) {
        int row = i / DEEP_WIDTH;
        if (i % DEEP_WIDTH == 0) m->label[row] = below(s, DEEP_CLASSES);
        m->x[i] = 0.2f * normal(s) + (i % DEEP_CLASSES == m->label[row] ? 1.0f : 0.0f);
    }
}

static mixp_tensor *deep_loss(session *s, int turn, int training) {
    deep         *m = (deep *)s->model;
    mixp_context *c = s->ctx;
    mixp_tensor  *x = floats(s, m->x, DEEP_ROWS, DEEP_WIDTH, 0);
    (void)turn, (void)training;
    for (int i = 0; i < DEEP_LAYERS; i++)
        x = mixp_add(c, x, mixp_relu(c, mixp_linear(c, x, m->w[i], NULL)));
    x = mixp_layer_norm(c, x, NULL, NULL, 1e-5f);
    return mixp_cross_entropy(c, mixp_linear(c, x, m->head, NULL), ints(s, m->label, DEEP_ROWS, 0),
                              MIXP_IGNORE);
}
