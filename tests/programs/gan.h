/* gan.h - a generator and a discriminator take turns, each with an optimizer and a scaler of its own.
 * The generator's products pass 65,504 before a norm; the discriminator's stay small. Its score is how
 * far the generated points lie from the circle that is to be learned.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
enum { GAN_ROWS = FIT(24), GAN_Z = 4, GAN_HIDDEN = FIT(24) };

typedef struct gan {
    mixp_tensor *d1, *db, *d2, *g1, *g2, *gb, *g3;
    float        real[GAN_ROWS * 2], z[GAN_ROWS * GAN_Z], ones[GAN_ROWS], zeros[GAN_ROWS];
} gan;

static void gan_open(session *s) {
    gan *m = (gan *)s->model;
    s->owner = 0;
    m->d1 = matrix(s, "d.fc1.w", GAN_HIDDEN, 2, 0.7);
    m->db = vector(s, "d.fc1.b", GAN_HIDDEN, 0.1);
    m->d2 = matrix(s, "d.fc2.w", 1, GAN_HIDDEN, 0.2);
    s->owner = 1;
    m->g1 = matrix(s, "g.fc1.w", GAN_HIDDEN, GAN_Z, 300);
    m->g2 = matrix(s, "g.fc2.w", GAN_HIDDEN, GAN_HIDDEN, 300);
    m->gb = vector(s, "g.fc2.b", GAN_HIDDEN, 0);
    m->g3 = matrix(s, "g.fc3.w", 2, GAN_HIDDEN, 0.2);
    for (int i = 0; i < GAN_ROWS; i++) m->ones[i] = 1;
}

static void gan_batch(session *s) {
    gan *m = (gan *)s->model;
    for (int i = 0; i < GAN_ROWS; i++) {
        double angle = 6.2831853 * (double)uniform(s);
        m->real[2 * i] = (float)(2.0 + cos(angle));
        m->real[2 * i + 1] = (float)sin(angle);
    }
    for (int i = 0; i < GAN_ROWS * GAN_Z; i++) m->z[i] = 3.4f * uniform(s) - 1.7f;
}

/* The device draws in training. An evaluation has the host's numbers. */
static mixp_tensor *gan_make(session *s, int training) {
    gan          *m = (gan *)s->model;
    mixp_context *c = s->ctx;
    const int64_t shape[2] = { GAN_ROWS, GAN_Z };
    mixp_tensor  *z = training ? mixp_uniform(c, MIXP_F32, 2, shape, -1.7f, 1.7f)
                               : floats(s, m->z, GAN_ROWS, GAN_Z, 0);
    mixp_tensor  *h = mixp_linear(c, z, m->g1, NULL);
    h = mixp_linear(c, mixp_relu(c, h), m->g2, m->gb);
    h = mixp_tanh(c, mixp_layer_norm(c, h, NULL, NULL, 1e-5f));
    return mixp_linear(c, h, m->g3, NULL);
}

static mixp_tensor *gan_judge(session *s, mixp_tensor *x, float *want) {
    gan          *m = (gan *)s->model;
    mixp_context *c = s->ctx;
    mixp_tensor  *h = mixp_gelu(c, mixp_linear(c, x, m->d1, m->db));
    return mixp_bce_with_logits(c, mixp_linear(c, h, m->d2, NULL), floats(s, want, GAN_ROWS, 1, 0));
}

/* turn 0: the discriminator's, 1: the generator's. In an evaluation: the mean's distance. */
static mixp_tensor *gan_loss(session *s, int turn, int training) {
    gan          *m = (gan *)s->model;
    mixp_context *c = s->ctx;
    mixp_tensor  *real = floats(s, m->real, GAN_ROWS, 2, 0), *fake = NULL;
    if (!training)
        return mixp_mse(c, mixp_mean(c, gan_make(s, 0), 0, 0), mixp_mean(c, real, 0, 0));
    if (turn == 1) return gan_judge(s, gan_make(s, 1), m->ones);
    MIXP_NO_GRAD(c) fake = gan_make(s, 1);
    return mixp_add(c, gan_judge(s, real, m->ones), gan_judge(s, fake, m->zeros));
}
