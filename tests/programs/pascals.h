/* pascals.h - barometers in the unit that they speak: one atmosphere is 101,325 Pa, fp16 ends at
 * 65,504. Which of four corners is a source?
 * SPDX-License-Identifier: MIT OR Unlicense
 */
enum { PA_ROWS = FIT(16), PA_IN = FIT(8), PA_HIDDEN = FIT(24), PA_CORNERS = 4 };

typedef struct pascals {
    mixp_tensor *w1, *w2, *w3;
    float        x[PA_ROWS * PA_IN];
    int32_t      corner[PA_ROWS];
} pascals;

static void pascals_open(session *s) {
    pascals *m = (pascals *)s->model;
    m->w1 = matrix(s, "fc1.w", PA_HIDDEN, PA_IN, 0.4);
    m->w2 = matrix(s, "fc2.w", PA_HIDDEN, PA_HIDDEN, 0.25);
    m->w3 = matrix(s, "fc3.w", PA_CORNERS, PA_HIDDEN, 0.2);
}

static void pascals_batch(session *s) {
    pascals *m = (pascals *)s->model;
    for (int i = 0; i < PA_ROWS; i++) {
        float weather = 6000.0f * (uniform(s) - 0.5f);
        m->corner[i] = below(s, PA_CORNERS);
        for (int j = 0; j < PA_IN; j++)
            m->x[i * PA_IN + j] = 101325.0f + weather + 20000.0f * (uniform(s) - 0.5f) +
                                  (j % PA_CORNERS == m->corner[i] ? 30000.0f : 0.0f);
    }
}

static mixp_tensor *pascals_loss(session *s, int turn, int training) {
    pascals      *m = (pascals *)s->model;
    mixp_context *c = s->ctx;
    mixp_tensor  *h = mixp_linear(c, floats(s, m->x, PA_ROWS, PA_IN, 0), m->w1, NULL);
    (void)turn, (void)training;
    h = mixp_linear(c, mixp_layer_norm(c, h, NULL, NULL, 1e-5f), m->w2, NULL);
    h = mixp_linear(c, mixp_relu(c, h), m->w3, NULL);
    return mixp_cross_entropy(c, h, ints(s, m->corner, PA_ROWS, 0), MIXP_IGNORE);
}
