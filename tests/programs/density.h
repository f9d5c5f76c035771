/* density.h - a mixture density network (Bishop, 1994): amounts of money, through log1p, tell of a price
 * that has two likely values. Its loss is the likelihood, by logsumexp, and how far the share of prices
 * below the predicted ones is from a half. The prices are not normalised: distances are squared in the
 * thousands, and their gradients overflow.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
enum { DENSITY_ROWS = FIT(24), DENSITY_WIDTH = FIT(16), DENSITY_PEAKS = 3 };

typedef struct density {
    mixp_tensor *in, *bias, *share, *centre, *spread, *centres, *spreads;
    float        amount[DENSITY_ROWS], price[DENSITY_ROWS];
} density;

static void density_open(session *s) {
    density *m = (density *)s->model;
    m->in = matrix(s, "in.w", DENSITY_WIDTH, 1, 0.5);
    m->bias = vector(s, "in.b", DENSITY_WIDTH, 0.1);
    m->share = matrix(s, "share", DENSITY_PEAKS, DENSITY_WIDTH, 0.3);
    m->centre = matrix(s, "centre.w", DENSITY_PEAKS, DENSITY_WIDTH, 30);
    m->centres = vector(s, "centre.b", DENSITY_PEAKS, 0);
    m->spread = matrix(s, "spread.w", DENSITY_PEAKS, DENSITY_WIDTH, 0.05);
    m->spreads = vector(s, "spread.b", DENSITY_PEAKS, 5);
}

static void density_batch(session *s) {
    density *m = (density *)s->model;
    for (int i = 0; i < DENSITY_ROWS; i++) {
        const float size = 12.0f * uniform(s);
        m->amount[i] = expf(size) - 1.0f;
        m->price[i] = (below(s, 2) ? 25.0f : -25.0f) * size + 10.0f * normal(s);
    }
}

static mixp_tensor *density_loss(session *s, int turn, int training) {
    density      *m = (density *)s->model;
    mixp_context *c = s->ctx;
    const int64_t all[2] = { DENSITY_ROWS, DENSITY_PEAKS };
    mixp_tensor  *h = mixp_log1p(c, floats(s, m->amount, DENSITY_ROWS, 1, 0)), *y, *z, *likely, *below_it;
    (void)turn, (void)training;
    h = mixp_elu(c, mixp_linear(c, h, m->in, m->bias), 1);
    y = mixp_expand(c, mixp_unsqueeze(c, floats(s, m->price, DENSITY_ROWS, 0, 0), 1), 2, all);
    z = mixp_softplus(c, mixp_linear(c, h, m->spread, m->spreads), 1);
    z = mixp_reciprocal(c, mixp_add_scalar(c, z, 1e-3f));
    likely = mixp_add(c, mixp_log_softmax(c, mixp_linear(c, h, m->share, NULL)), mixp_log(c, z));
    z = mixp_mul(c, mixp_sub(c, y, mixp_linear(c, h, m->centre, m->centres)), z);
    likely = mixp_sub(c, likely, mixp_scale(c, mixp_square(c, z), 0.5f));
    likely = mixp_mean(c, mixp_logsumexp(c, likely, -1, 0), MIXP_ALL, 0);
    below_it = mixp_scale(c, mixp_add_scalar(c, mixp_erf(c, mixp_scale(c, z, 0.70710678f)), 1), 0.5f);
    below_it = mixp_rsub(c, mixp_mean(c, below_it, MIXP_ALL, 0), 0.5f);
    return mixp_sub(c, mixp_square(c, below_it), likely);
}
