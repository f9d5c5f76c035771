/* diffusion.h - a denoiser of points on two moons: it predicts the noise that was added at a random time.
 * Sines and cosines encode the time. At a late time the points are almost only noise, so its loss counts
 * half. No value leaves fp16's range.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
enum { DIFF_ROWS = FIT(24), DIFF_TIMES = 8, DIFF_HIDDEN = FIT(32) };

typedef struct diffusion {
    mixp_tensor *in, *time, *mid, *mid_bias, *out;
    float        x[DIFF_ROWS * 2], noise[DIFF_ROWS * 2], t[DIFF_ROWS], rate[DIFF_TIMES];
} diffusion;

static void diffusion_open(session *s) {
    diffusion *m = (diffusion *)s->model;
    m->in = matrix(s, "in.w", DIFF_HIDDEN, 2, 0.7);
    m->time = matrix(s, "time.w", DIFF_HIDDEN, 2 * DIFF_TIMES, 0.25);
    m->mid = matrix(s, "mid.w", DIFF_HIDDEN, DIFF_HIDDEN, 0.2);
    m->mid_bias = vector(s, "mid.b", DIFF_HIDDEN, 0);
    m->out = matrix(s, "out.w", 2, DIFF_HIDDEN, 0.2);
    for (int i = 0; i < DIFF_TIMES; i++) m->rate[i] = (float)(1 << i);
}

static void diffusion_batch(session *s) {
    diffusion *m = (diffusion *)s->model;
    for (int i = 0; i < DIFF_ROWS; i++) {
        double angle = 3.1415927 * (double)uniform(s), keep;
        int    moon = below(s, 2);
        m->t[i] = uniform(s);
        keep = cos(1.5707963 * (double)m->t[i]);
        for (int j = 0; j < 2; j++) {
            double at = (j ? sin(angle) - 0.3 * moon : cos(angle) + 0.8 * moon) * (moon ? -1 : 1);
            m->noise[2 * i + j] = normal(s);
            m->x[2 * i + j] = (float)(keep * at + sqrt(1 - keep * keep) * (double)m->noise[2 * i + j]);
        }
    }
}

static mixp_tensor *diffusion_loss(session *s, int turn, int training) {
    diffusion    *m = (diffusion *)s->model;
    mixp_context *c = s->ctx;
    mixp_tensor *x = mixp_linear(c, floats(s, m->x, DIFF_ROWS, 2, 0), m->in, NULL), *angle,
                *t = floats(s, m->t, DIFF_ROWS, 1, 0), *wave[2], *h;
    (void)turn, (void)training;
    angle = mixp_matmul(c, t, floats(s, m->rate, 1, DIFF_TIMES, 0), 0, 0);
    wave[0] = mixp_sin(c, angle);
    wave[1] = mixp_cos(c, angle);
    h = mixp_add(c, x, mixp_linear(c, mixp_concat(c, 2, wave, 1), m->time, NULL));
    h = mixp_add(c, h, mixp_linear(c, mixp_silu(c, h), m->mid, m->mid_bias));
    h = mixp_linear(c, mixp_silu(c, h), m->out, NULL);
    h = mixp_square(c, mixp_sub(c, h, floats(s, m->noise, DIFF_ROWS, 2, 0)));
    t = mixp_gt(c, t, mixp_full(c, MIXP_F32, 0, NULL, 0.75));
    return mixp_mean(c, mixp_where(c, t, mixp_scale(c, h, 0.5f), h), MIXP_ALL, 0);
}
