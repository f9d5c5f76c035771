/* codebook.h - an autoencoder whose code is the nearest row of a codebook (VQ-VAE, van den Oord et al.,
 * 2017): argmin of the squared distances, a gradient straight through, and a loss that pulls the code to the
 * codebook. The codebook has no gradient: each row is the moving average of its codes (the paper's appendix
 * A.1), whose sums and counts are buffers.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
enum { CODEBOOK_ROWS = FIT(24), CODEBOOK_IN = FIT(6), CODEBOOK_WIDTH = FIT(12), CODEBOOK_CODE = 4, CODEBOOK_CODES = 6 };

typedef struct codebook {
    mixp_tensor *in, *code, *down, *out, *sums, *counts;
    mixp_tensor *z, *nearest;
    float        x[CODEBOOK_ROWS * CODEBOOK_IN];
} codebook;

static void codebook_open(session *s) {
    codebook *m = (codebook *)s->model;
    m->in = matrix(s, "in.w", CODEBOOK_WIDTH, CODEBOOK_IN, 0.4);
    m->code = matrix(s, "code.w", CODEBOOK_CODE, CODEBOOK_WIDTH, 0.5);
    m->down = matrix(s, "down", CODEBOOK_WIDTH, CODEBOOK_CODE, 0.5);
    m->out = matrix(s, "out", CODEBOOK_IN, CODEBOOK_WIDTH, 0.3);
    m->sums = buffer(s, "codebook.sums", CODEBOOK_CODES, CODEBOOK_CODE, MIXP_BUFFER_MEAN);
    m->counts = buffer(s, "codebook.counts", CODEBOOK_CODES, 1, MIXP_BUFFER_MEAN);
    mixp_init_normal(m->sums, 0, 0.7);
    mixp_fill(m->counts, 1);
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
    mixp_tensor  *x = floats(s, m->x, CODEBOOK_ROWS, CODEBOOK_IN, 0), *codes, *z, *far, *near, *loss;
    (void)turn;
    codes = mixp_div(c, m->sums, m->counts);
    z = mixp_linear(c, mixp_silu(c, mixp_linear(c, x, m->in, NULL)), m->code, NULL);
    far = mixp_sub(c, mixp_sum(c, mixp_square(c, z), 1, 1), mixp_scale(c, mixp_matmul(c, z, codes, 0, 1), 2));
    far = mixp_add(c, far, mixp_sum(c, mixp_square(c, codes), 1, 0));
    near = mixp_argmin(c, far, 1, 0);
    if (training) m->z = z, m->nearest = near;
    near = mixp_embedding(c, codes, near);
    loss = mixp_scale(c, mixp_mse(c, z, near), 0.25f);
    near = mixp_add(c, z, mixp_detach(c, mixp_sub(c, near, z)));
    near = mixp_linear(c, near, m->down, NULL);
    near = mixp_linear(c, mixp_silu(c, near), m->out, NULL);
    return mixp_add(c, mixp_mse(c, near, x), loss);
}

/* kept = 0.9 kept + 0.1 of this batch. */
static void codebook_follow(session *s, mixp_tensor *kept, mixp_tensor *now)
{ mixp_copy(kept, mixp_add(s->ctx, mixp_scale(s->ctx, kept, 0.9f), mixp_scale(s->ctx, now, 0.1f))); }

static void codebook_carry(session *s) {
    codebook     *m = (codebook *)s->model;
    mixp_context *c = s->ctx;
    mixp_tensor  *chosen = mixp_transpose(c, mixp_one_hot(c, m->nearest, CODEBOOK_CODES, MIXP_F32), 0, 1);
    codebook_follow(s, m->sums, mixp_matmul(c, chosen, mixp_cast(c, m->z, MIXP_F32), 0, 0));
    codebook_follow(s, m->counts, mixp_sum(c, chosen, 1, 1));
}
