/* pinn.h - a network learns the solution of u'' = -pi^2 sin(pi x), u(0) = u(1) = 0, from the equation
 * only: both derivatives by mixp_jvp, and the loss is walked back through them. An evaluation measures
 * the distance to sin(pi x).
 * SPDX-License-Identifier: MIT OR Unlicense
 */
enum { PINN_ROWS = FIT(24), PINN_WIDTH = FIT(16) };

typedef struct pinn {
    mixp_tensor *w1, *b1, *w2, *b2, *w3;
    float        x[PINN_ROWS], force[PINN_ROWS], truth[PINN_ROWS];
} pinn;

static void pinn_open(session *s) {
    pinn *m = (pinn *)s->model;
    m->w1 = matrix(s, "in.w", PINN_WIDTH, 1, 1.5);
    m->b1 = vector(s, "in.b", PINN_WIDTH, 0.0);
    m->w2 = matrix(s, "mid.w", PINN_WIDTH, PINN_WIDTH, 0.25);
    m->b2 = vector(s, "mid.b", PINN_WIDTH, 0.0);
    m->w3 = matrix(s, "out.w", 1, PINN_WIDTH, 0.25);
}

static void pinn_batch(session *s) {
    pinn *m = (pinn *)s->model;
    for (int i = 0; i < PINN_ROWS; i++) {
        m->x[i] = uniform(s);
        m->truth[i] = (float)sin(3.14159265 * (double)m->x[i]);
        m->force[i] = 9.8696044f * m->truth[i];
    }
}

static mixp_tensor *pinn_loss(session *s, int turn, int training) {
    pinn         *m = (pinn *)s->model;
    mixp_context *c = s->ctx;
    mixp_tensor  *x = floats(s, m->x, PINN_ROWS, 1, 0), *u, *u_xx;
    (void)turn;
    mixp_tensor_set_requires_grad(x, 1);
    u = mixp_tanh(c, mixp_linear(c, x, m->w1, m->b1));
    u = mixp_linear(c, mixp_tanh(c, mixp_linear(c, u, m->w2, m->b2)), m->w3, NULL);
    u = mixp_mul(c, u, mixp_mul(c, x, mixp_rsub(c, x, 1.0f)));             /* 0 at both ends */
    if (!training) return mixp_mse(c, u, floats(s, m->truth, PINN_ROWS, 1, 0));
    u_xx = mixp_jvp(c, mixp_jvp(c, u, x, NULL), x, NULL);
    return mixp_mse(c, mixp_neg(c, u_xx), floats(s, m->force, PINN_ROWS, 1, 0));
}
