/* rays.h - a scene learned from the colours of rays, as NeRF (Mildenhall et al., 2020): densities along a ray become
 * weights by cumprod, which the last samples of a dense ray make nearly 0.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "examples/ops.h"

enum { RAYS = FIT(6), RAYS_SAMPLES = 6, RAYS_WIDTH = FIT(16), RAYS_IN = FIT(9) };

typedef struct rays {
    mixp_tensor *in, *bias, *mid, *out;
    float        at[RAYS * RAYS_SAMPLES * 3], step[RAYS * RAYS_SAMPLES], colour[RAYS * 3];
    float        fill[RAYS * RAYS_SAMPLES * RAYS_IN];   /* zeros up to the unit of a recipe */
} rays;

static void rays_open(session *s) {
    rays *m = (rays *)s->model;
    m->in = matrix(s, "in.w", RAYS_WIDTH, RAYS_IN, 0.4);
    m->bias = vector(s, "in.b", RAYS_WIDTH, 0);
    m->mid = matrix(s, "mid", RAYS_WIDTH, RAYS_WIDTH, 0.3);
    m->out = matrix(s, "out", 4, RAYS_WIDTH, 0.4);
}

/* Rays pass a ball in the centre, which is red above and blue below, before a white wall. */
static void rays_batch(session *s) {
    rays *m = (rays *)s->model;
    for (int i = 0; i < RAYS; i++) {
        const float y = 2.0f * uniform(s) - 1.0f, z = 2.0f * uniform(s) - 1.0f;
        const int   hit = y * y + z * z < 0.5f;
        for (int k = 0; k < RAYS_SAMPLES; k++) {
            float *at = m->at + (i * RAYS_SAMPLES + k) * 3;
            m->step[i * RAYS_SAMPLES + k] = 2.0f / RAYS_SAMPLES;
            at[0] = ((float)k + uniform(s)) * 2.0f / RAYS_SAMPLES - 1.0f;
            at[1] = y;
            at[2] = z;
        }
        m->colour[i * 3] = hit && y < 0 ? 0.0f : 1.0f;
        m->colour[i * 3 + 1] = hit ? 0.0f : 1.0f;
        m->colour[i * 3 + 2] = hit && y > 0 ? 0.0f : 1.0f;
    }
}

static mixp_tensor *rays_loss(session *s, int turn, int training) {
    rays         *m = (rays *)s->model;
    mixp_context *c = s->ctx;
    const int64_t parts[2] = { 1, 3 };
    mixp_tensor  *x = floats(s, m->at, RAYS, RAYS_SAMPLES, 3), *join[4], *out[2], *clear, *share;
    (void)turn, (void)training;
    join[0] = x;
    join[1] = mixp_sin(c, mixp_scale(c, x, 3));
    join[2] = mixp_cos(c, mixp_scale(c, x, 3));
    join[3] = RAYS_IN > 9 ? floats(s, m->fill, RAYS, RAYS_SAMPLES, RAYS_IN - 9) : NULL;
    x = mixp_relu(c, mixp_linear(c, mixp_concat(c, join[3] ? 4 : 3, join, 2), m->in, m->bias));
    x = mixp_relu(c, mixp_linear(c, x, m->mid, NULL));
    mixp_split_sizes(c, mixp_linear(c, x, m->out, NULL), -1, 2, parts, out);

    /* What a sample lets pass, and what reaches it. */
    clear = mixp_softplus(c, mixp_scale(c, mixp_squeeze(c, out[0], -1), 4), 1);
    clear = mixp_exp(c, mixp_neg(c, mixp_mul(c, clear, floats(s, m->step, RAYS, RAYS_SAMPLES, 0))));
    share = mixp_slice(c, mixp_pad(c, mixp_cumprod(c, clear, 1), 1, 1, 0, 1), 1, 0, RAYS_SAMPLES);
    share = mixp_mul(c, share, mixp_rsub(c, clear, 1));
    x = mixp_sum(c, mixp_mul(c, mixp_unsqueeze(c, share, 2), mixp_sigmoid(c, out[1])), 1, 0);
    x = mixp_add(c, x, mixp_rsub(c, mixp_sum(c, share, 1, 1), 1));
    return mixp_mse(c, x, floats(s, m->colour, RAYS, 3, 0));
}
