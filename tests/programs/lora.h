/* lora.h - adapters of rank 2 on a frozen network. B begins as zeros, so that the first gradients of A
 * are zeros too: nothing is wrong with that.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
enum { LORA_ROWS = FIT(16), LORA_IN = FIT(10), LORA_WIDTH = FIT(24), LORA_RANK = 2 };

typedef struct lora {
    mixp_tensor *base1, *base2, *a1, *b1, *a2, *b2;
    float        x[LORA_ROWS * LORA_IN], y[LORA_ROWS];
} lora;

static void lora_open(session *s) {
    lora *m = (lora *)s->model;
    s->owner = -1;
    m->base1 = matrix(s, "base.fc1.w", LORA_WIDTH, LORA_IN, 0.3);
    m->base2 = matrix(s, "base.fc2.w", 1, LORA_WIDTH, 0.2);
    s->owner = 0;
    m->a1 = matrix(s, "lora.fc1.a", LORA_RANK, LORA_IN, 0.3);
    m->b1 = matrix(s, "lora.fc1.b", LORA_WIDTH, LORA_RANK, 0);
    m->a2 = matrix(s, "lora.fc2.a", LORA_RANK, LORA_WIDTH, 0.2);
    m->b2 = matrix(s, "lora.fc2.b", 1, LORA_RANK, 0);
}

static void lora_batch(session *s) {
    lora *m = (lora *)s->model;
    for (int i = 0; i < LORA_ROWS * LORA_IN; i++) m->x[i] = normal(s);
    for (int i = 0; i < LORA_ROWS; i++) m->y[i] = m->x[i * LORA_IN] - 0.5f * m->x[i * LORA_IN + 1];
}

static mixp_tensor *lora_linear(session *s, mixp_tensor *x, mixp_tensor *base, mixp_tensor *a,
                                mixp_tensor *b) {
    mixp_context *c = s->ctx;
    mixp_tensor  *low = mixp_linear(c, mixp_linear(c, x, a, NULL), b, NULL);
    return mixp_add(c, mixp_linear(c, x, base, NULL), mixp_scale(c, low, 2.0f));
}

static mixp_tensor *lora_loss(session *s, int turn, int training) {
    lora         *m = (lora *)s->model;
    mixp_context *c = s->ctx;
    mixp_tensor  *h = floats(s, m->x, LORA_ROWS, LORA_IN, 0);
    (void)turn, (void)training;
    h = mixp_gelu(c, lora_linear(s, h, m->base1, m->a1, m->b1));
    return mixp_mse(c, lora_linear(s, h, m->base2, m->a2, m->b2), floats(s, m->y, LORA_ROWS, 1, 0));
}
