/* vae.h - a variational autoencoder: a loss summed over pixels, exp of a log-variance, and noise that
 * the device draws. In training some pixels are hidden; an evaluation draws nothing.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
enum { VAE_ROWS = FIT(12), VAE_PIXELS = FIT(16), VAE_HIDDEN = FIT(24), VAE_Z = 4 };

typedef struct vae {
    mixp_tensor *in, *mean, *logvar, *out1, *out2;
    float        x[VAE_ROWS * VAE_PIXELS];
} vae;

static void vae_open(session *s) {
    vae *m = (vae *)s->model;
    m->in = matrix(s, "enc.w", VAE_HIDDEN, VAE_PIXELS, 0.25);
    m->mean = matrix(s, "mean.w", VAE_Z, VAE_HIDDEN, 0.2);
    m->logvar = matrix(s, "logvar.w", VAE_Z, VAE_HIDDEN, 0.05);
    m->out1 = matrix(s, "dec1.w", VAE_HIDDEN, VAE_Z, 0.5);
    m->out2 = matrix(s, "dec2.w", VAE_PIXELS, VAE_HIDDEN, 0.2);
}

static void vae_batch(session *s) {
    vae *m = (vae *)s->model;
    for (int i = 0; i < VAE_ROWS; i++) {
        int bright = below(s, 4);
        for (int j = 0; j < VAE_PIXELS; j++)
            m->x[i * VAE_PIXELS + j] = j / 4 == bright ? 0.9f : 0.1f * uniform(s);
    }
}

static mixp_tensor *vae_loss(session *s, int turn, int training) {
    vae          *m = (vae *)s->model;
    mixp_context *c = s->ctx;
    const int64_t pixels[2] = { VAE_ROWS, VAE_PIXELS }, numbers[2] = { VAE_ROWS, VAE_Z };
    mixp_tensor  *x = floats(s, m->x, VAE_ROWS, VAE_PIXELS, 0), *h = x, *fit, *kl, *mean, *logvar, *z;
    (void)turn;
    if (training) h = mixp_masked_fill(c, x, mixp_bernoulli(c, MIXP_U8, 2, pixels, 0.1f), 0.5f);
    h = mixp_silu(c, mixp_linear(c, h, m->in, NULL));
    mean = z = mixp_linear(c, h, m->mean, NULL);
    logvar = mixp_linear(c, h, m->logvar, NULL);
    if (training) {
        mixp_tensor *noise = mixp_normal(c, MIXP_F32, 2, numbers, 0.0f, 1.0f);
        z = mixp_add(c, mean, mixp_mul(c, mixp_exp(c, mixp_scale(c, logvar, 0.5f)), noise));
    }
    h = mixp_linear(c, mixp_silu(c, mixp_linear(c, z, m->out1, NULL)), m->out2, NULL);
    fit = mixp_scale(c, mixp_bce_with_logits(c, h, x), VAE_ROWS * VAE_PIXELS);
    kl = mixp_sub(c, logvar, mixp_add(c, mixp_square(c, mean), mixp_expm1(c, logvar)));
    kl = mixp_scale(c, mixp_sum(c, kl, MIXP_ALL, 0), -0.5f);
    return mixp_add(c, fit, kl);
}
