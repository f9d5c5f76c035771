/* distil.h - a small network learns from a large frozen one: temperature, the teacher's likely classes
 * (nucleus, by sort and cumsum), KL divergence of log-probabilities, cross entropy with probabilities, a
 * clamped feature loss, a reward for the use of all classes, and a penalty on the size of its weights.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
enum { DISTIL_ROWS = FIT(16), DISTIL_IN = FIT(8), DISTIL_WIDTH = FIT(16), DISTIL_CLASSES = 5 };

typedef struct distil {
    mixp_tensor *teach1, *teach2, *w1, *w2;
    float        x[DISTIL_ROWS * DISTIL_IN];
} distil;

static void distil_open(session *s) {
    distil *m = (distil *)s->model;
    s->owner = -1;
    m->teach1 = matrix(s, "teacher.fc1.w", DISTIL_WIDTH, DISTIL_IN, 0.6);
    m->teach2 = matrix(s, "teacher.fc2.w", DISTIL_CLASSES, DISTIL_WIDTH, 0.6);
    s->owner = 0;
    m->w1 = matrix(s, "student.fc1.w", DISTIL_WIDTH, DISTIL_IN, 0.3);
    m->w2 = matrix(s, "student.fc2.w", DISTIL_CLASSES, DISTIL_WIDTH, 0.2);
}

static void distil_batch(session *s) {
    distil *m = (distil *)s->model;
    for (int i = 0; i < DISTIL_ROWS * DISTIL_IN; i++) m->x[i] = normal(s);
}

/* Logits of which the classes behind the likeliest 95 % are hidden. */
static mixp_tensor *distil_nucleus(session *s, mixp_tensor *x) {
    mixp_context *c = s->ctx;
    mixp_tensor  *order, *p = mixp_sort(c, mixp_softmax(c, x), -1, 1, &order), *before, *hidden;
    before = mixp_sub(c, mixp_cumsum(c, p, -1), p);
    hidden = mixp_cast(c, mixp_ge(c, before, mixp_full(c, MIXP_F32, 0, NULL, 0.95)), MIXP_F32);
    hidden = mixp_scatter_add(c, mixp_scale(c, hidden, 0.0f), -1, order, hidden);
    return mixp_masked_fill(c, x, mixp_ne(c, hidden, mixp_full(c, MIXP_F32, 0, NULL, 0.0)), -20.0f);
}

/* A tenth of the cross entropy with the teacher's probabilities, smoothed; a class that it seldom names
 * counts more. */
static mixp_tensor *distil_hard(session *s, mixp_tensor *x, mixp_tensor *teacher) {
    static float   weights[DISTIL_CLASSES] = { 1, 2, 1, 0.5f, 1 };   /* a replay reads them again */
    mixp_context  *c = s->ctx;
    mixp_loss_desc d;
    memset(&d, 0, sizeof d);
    d.smoothing = 0.1f;
    d.weight = floats(s, weights, DISTIL_CLASSES, 0, 0);
    return mixp_scale(c, mixp_loss_apply(c, MIXP_OP_CROSS_ENTROPY, x, mixp_exp(c, teacher), &d), 0.1f);
}

static mixp_tensor *distil_loss(session *s, int turn, int training) {
    distil       *m = (distil *)s->model;
    mixp_context *c = s->ctx;
    mixp_tensor *x = floats(s, m->x, DISTIL_ROWS, DISTIL_IN, 0), *teacher = NULL, *features = NULL,
                *h, *loss;
    (void)turn, (void)training;
    MIXP_NO_GRAD(c) {
        features = mixp_minimum(c, mixp_relu(c, mixp_linear(c, x, m->teach1, NULL)),
                                floats(s, m->x, 1, 1, 0));
        features = mixp_maximum(c, features, mixp_neg(c, mixp_abs(c, features)));
        teacher = mixp_linear(c, mixp_relu(c, mixp_linear(c, x, m->teach1, NULL)), m->teach2, NULL);
        teacher = mixp_log_softmax(c, distil_nucleus(s, mixp_scale(c, teacher, 0.5f)));
    }
    h = mixp_relu(c, mixp_linear(c, x, m->w1, NULL));
    loss = mixp_l1(c, mixp_clamp(c, h, -1, 3), features);
    h = mixp_scale(c, mixp_linear(c, h, m->w2, NULL), 0.5f);
    loss = mixp_add(c, mixp_scale(c, loss, 0.01f), distil_hard(s, h, teacher));
    h = mixp_log_softmax(c, h);
    loss = mixp_add(c, loss, mixp_kl_div(c, h, teacher, 1));
    h = mixp_scale(c, mixp_mean(c, mixp_exp(c, h), 0, 0), (float)DISTIL_CLASSES);
    loss = mixp_sub(c, loss, mixp_scale(c, mixp_prod(c, h, 0, 0), 0.01f));
    return mixp_add(c, loss, mixp_scale(c, mixp_mean(c, mixp_pow(c, m->w2, 2), MIXP_ALL, 0), 0.01f));
}
