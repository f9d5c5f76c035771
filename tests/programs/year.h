/* year.h - a feature 2023.37, a year with its fraction, which f16 stores as 2023 and bf16 as 2016:
 * nothing overflows, nothing is flushed, and nothing can be learned of what is left.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
enum { YEAR_ROWS = FIT(32), YEAR_HINGES = FIT(32), YEAR_WIDTH = FIT(32) };

typedef struct year {
    mixp_tensor *w1, *w2;
    float        when[YEAR_ROWS], value[YEAR_ROWS], slope[YEAR_HINGES], shift[YEAR_HINGES];
} year;

/* relu(slope (when - hinge)), hinges all over the year. */
static void year_open(session *s) {
    year *m = (year *)s->model;
    for (int i = 0; i < YEAR_HINGES; i++) {
        m->slope[i] = i % 2 ? 8.0f : -8.0f;
        m->shift[i] = -m->slope[i] * (2023.0f + ((float)i + 0.5f) / YEAR_HINGES);
    }
    m->w1 = matrix(s, "fc1.w", YEAR_WIDTH, YEAR_HINGES, 0.17);
    m->w2 = matrix(s, "fc2.w", 1, YEAR_WIDTH, 0.17);
}

static void year_batch(session *s) {
    year *m = (year *)s->model;
    for (int i = 0; i < YEAR_ROWS; i++) {
        float at = uniform(s);
        m->when[i] = 2023.0f + at;
        m->value[i] = (float)sin(6.2831853 * (double)at);
    }
}

static mixp_tensor *year_loss(session *s, int turn, int training) {
    year         *m = (year *)s->model;
    mixp_context *c = s->ctx;
    mixp_tensor *h = mixp_matmul(c, floats(s, m->when, YEAR_ROWS, 1, 0),
                                 floats(s, m->slope, 1, YEAR_HINGES, 0), 0, 0);
    (void)turn, (void)training;
    h = mixp_relu(c, mixp_add(c, h, floats(s, m->shift, YEAR_HINGES, 0, 0)));
    h = mixp_linear(c, mixp_relu(c, mixp_linear(c, h, m->w1, NULL)), m->w2, NULL);
    return mixp_mse(c, h, floats(s, m->value, YEAR_ROWS, 1, 0));
}
