/* codebook.h - an autoencoder whose code is the nearest row of a codebook (VQ-VAE, van den Oord et al.,
 * 2017): argmin of the squared distances, a gradient straight through, and two losses that pull code and
 * codebook together.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
enum { CODEBOOK_ROWS = FIT(24), CODEBOOK_IN = FIT(6), CODEBOOK_WIDTH = FIT(12), CODEBOOK_CODE = 4, CODEBOOK_CODES = 6 };

typedef struct codebook {
    mixp_tensor *in, *code, *codes, *down, *out;
    float        x[CODEBOOK_ROWS * CODEBOOK_IN];
} codebook;

static void codebook_open(session *s) {
    codebook *m = (codebook *)s->model;
    m->in = matrix(s, "in.w", CODEBOOK_WIDTH, CODEBOOK_IN, 0.4);
    m->code = matrix(s, "code.w", CODEBOOK_CODE, CODEBOOK_WIDTH, 0.5);
    m->codes = matrix(s, "codebook", CODEBOOK_CODES, CODEBOOK_CODE, 0.7);
    m->down = matrix(s, "down", CODEBOOK_WIDTH, CODEBOOK_CODE, 0.5);
    m->out = matrix(s, "out", CODEBOOK_IN, CODEBOOK_WIDTH, 0.3);
}

static void codebook_batch(session *s) {
    codebook *m = (codebook *)s->model;
    for (int i = 0; i < CODEBOOK_ROWS; i++) {
        const int kind = below(s, 4);
        for (int j = 0; j < CODEBOOK_IN; j++)
            m->x[i * CODEBOOK_IN + j] = (j % 4 == kind ? 2.0f : -0.5f) + 0.1f * normal(s);
    }
}

static mixp_tensor *codebook_loss(session *s, int turn, int training) {
    codebook     *m = (codebook *)s->model;
    mixp_context *c = s->ctx;
    mixp_tensor  *x = floats(s, m->x, CODEBOOK_ROWS, CODEBOOK_IN, 0), *z, *far, *near, *loss;
    (void)turn, (void)training;
    z = mixp_linear(c, mixp_silu(c, mixp_linear(c, x, m->in, NULL)), m->code, NULL);
    far = mixp_sub(c, mixp_sum(c, mixp_square(c, z), 1, 1), mixp_scale(c, mixp_matmul(c, z, m->codes, 0, 1), 2));
    far = mixp_add(c, far, mixp_sum(c, mixp_square(c, m->codes), 1, 0));
    near = mixp_embedding(c, m->codes, mixp_argmin(c, far, 1, 0));
    loss = mixp_add(c, mixp_mse(c, near, mixp_detach(c, z)),
                    mixp_scale(c, mixp_mse(c, z, mixp_detach(c, near)), 0.25f));
    near = mixp_add(c, z, mixp_detach(c, mixp_sub(c, near, z)));
    near = mixp_linear(c, near, m->down, NULL);
    near = mixp_linear(c, mixp_silu(c, near), m->out, NULL);
    return mixp_add(c, mixp_mse(c, near, x), loss);
}
