/* moe.h - a mixture of four experts: the two that the gate prefers, found by topk, and a loss that
 * spreads the load (Fedus et al., 2021). Hidden gates are -1e9.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
enum { MOE_ROWS = FIT(16), MOE_IN = FIT(8), MOE_HIDDEN = FIT(12), MOE_EXPERTS = 4, MOE_OUT = 4 };

typedef struct moe {
    mixp_tensor *gate, *up[MOE_EXPERTS], *down[MOE_EXPERTS];
    float        x[MOE_ROWS * MOE_IN], y[MOE_ROWS * MOE_OUT];
} moe;

static void moe_open(session *s) {
    moe *m = (moe *)s->model;
    m->gate = matrix(s, "gate", MOE_EXPERTS, MOE_IN, 0.3);
    for (int i = 0; i < MOE_EXPERTS; i++) {
        m->up[i] = layer(s, i, "up", MOE_HIDDEN, MOE_IN, 0.35);
        m->down[i] = layer(s, i, "down", MOE_OUT, MOE_HIDDEN, 0.3);
    }
}

static void moe_batch(session *s) {
    moe *m = (moe *)s->model;
    for (int i = 0; i < MOE_ROWS * MOE_IN; i++) m->x[i] = normal(s);
    for (int i = 0; i < MOE_ROWS * MOE_OUT; i++) {
        const float *x = m->x + i / MOE_OUT * MOE_IN;
        m->y[i] = x[i % MOE_OUT] * (x[7] > 0 ? 1.0f : 0.3f);
    }
}

static mixp_tensor *moe_loss(session *s, int turn, int training) {
    moe          *m = (moe *)s->model;
    mixp_context *c = s->ctx;
    mixp_tensor  *x = floats(s, m->x, MOE_ROWS, MOE_IN, 0), *y = NULL, *load;
    mixp_tensor  *gate = mixp_linear(c, x, m->gate, NULL), *share, *best, *chosen;
    (void)turn, (void)training;
    best = mixp_topk(c, gate, 2, -1, 1, &chosen);
    share = mixp_masked_fill(c, gate, mixp_lt(c, gate, mixp_slice(c, best, 1, 1, 1)), -INFINITY);
    share = mixp_softmax(c, share);
    for (int e = 0; e < MOE_EXPERTS; e++) {
        mixp_tensor *h = mixp_silu(c, mixp_linear(c, x, m->up[e], NULL));
        h = mixp_mul(c, mixp_linear(c, h, m->down[e], NULL), mixp_slice(c, share, 1, e, 1));
        y = y ? mixp_add(c, y, h) : h;
    }
    chosen = mixp_one_hot(c, mixp_slice(c, chosen, 1, 0, 1), MOE_EXPERTS, MIXP_F32);
    load = mixp_mul(c, mixp_mean(c, mixp_softmax(c, gate), 0, 0), mixp_mean(c, chosen, 0, 0));
    load = mixp_scale(c, mixp_sum(c, load, MIXP_ALL, 0), 0.01f * MOE_EXPERTS);
    return mixp_add(c, mixp_mse(c, y, floats(s, m->y, MOE_ROWS, MOE_OUT, 0)), load);
}
