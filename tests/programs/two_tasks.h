/* two_tasks.h - a trunk with two heads: a loss of 1e5, and one of 1e-6, whose gradients fp16 flushes at
 * any scale that the other one stands.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
enum { TASKS_ROWS = FIT(16), TASKS_IN = FIT(8), TASKS_WIDTH = FIT(16) };

typedef struct two_tasks {
    mixp_tensor *trunk, *large, *mid, *small;
    float        x[TASKS_ROWS * TASKS_IN], y[2][TASKS_ROWS];
} two_tasks;

static void two_tasks_open(session *s) {
    two_tasks *m = (two_tasks *)s->model;
    m->trunk = matrix(s, "trunk.w", TASKS_WIDTH, TASKS_IN, 0.35);
    m->large = matrix(s, "large.w", 1, TASKS_WIDTH, 0.25);
    m->mid = matrix(s, "small.fc1.w", TASKS_WIDTH, TASKS_IN, 0.35);
    m->small = matrix(s, "small.fc2.w", 1, TASKS_WIDTH, 0.25);
}

static void two_tasks_batch(session *s) {
    two_tasks *m = (two_tasks *)s->model;
    for (int i = 0; i < TASKS_ROWS * TASKS_IN; i++) m->x[i] = normal(s);
    for (int i = 0; i < TASKS_ROWS; i++) {
        m->y[0][i] = m->x[i * TASKS_IN] + m->x[i * TASKS_IN + 1];
        m->y[1][i] = m->x[i * TASKS_IN + 2] - m->x[i * TASKS_IN + 3];
    }
}

/* What is judged counts both alike. */
static mixp_tensor *two_tasks_loss(session *s, int turn, int training) {
    two_tasks    *m = (two_tasks *)s->model;
    mixp_context *c = s->ctx;
    mixp_tensor  *x = floats(s, m->x, TASKS_ROWS, TASKS_IN, 0), *large, *small;
    (void)turn;
    large = mixp_linear(c, mixp_tanh(c, mixp_linear(c, x, m->trunk, NULL)), m->large, NULL);
    small = mixp_linear(c, mixp_tanh(c, mixp_linear(c, x, m->mid, NULL)), m->small, NULL);
    large = mixp_mse(c, large, floats(s, m->y[0], TASKS_ROWS, 1, 0));
    small = mixp_mse(c, small, floats(s, m->y[1], TASKS_ROWS, 1, 0));
    return mixp_add(c, mixp_scale(c, large, training ? 1e5f : 1.0f),
                    mixp_scale(c, small, training ? 1e-6f : 1.0f));
}
