/* sound.h - a temporal convolution on raw 16-bit sound: causal, by pad, slices and stack, each followed by
 * a batch norm of mean and var, as people write one. The samples' variance passes 65,504, where f16 makes
 * Inf of it, and a norm that divides by Inf learns nothing, with a loss that is finite.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
enum { SOUND_ROWS = FIT(8), SOUND_TIME = 12, SOUND_TAPS = 3, SOUND_WIDTH = FIT(8), SOUND_CLASSES = 3 };

typedef struct sound {
    mixp_tensor *conv1, *gain1, *conv2, *gain2, *head;
    float        x[SOUND_ROWS * SOUND_TIME];
    int32_t      label[SOUND_ROWS];
} sound;

static void sound_open(session *s) {
    sound *m = (sound *)s->model;
    m->conv1 = matrix(s, "conv1.w", SOUND_WIDTH, SOUND_TAPS, 0.5);
    m->gain1 = vector(s, "conv1.gain", SOUND_WIDTH, 1);
    m->conv2 = matrix(s, "conv2.w", SOUND_WIDTH, SOUND_TAPS * SOUND_WIDTH, 0.25);
    m->gain2 = vector(s, "conv2.gain", SOUND_WIDTH, 1);
    m->head = matrix(s, "head", SOUND_CLASSES, 2 * SOUND_WIDTH, 0.3);
}

/* Three pitches. */
static void sound_batch(session *s) {
    sound *m = (sound *)s->model;
    for (int i = 0; i < SOUND_ROWS; i++) {
        const float phase = 6.2831853f * uniform(s);
        m->label[i] = below(s, SOUND_CLASSES);
        for (int t = 0; t < SOUND_TIME; t++)
            m->x[i * SOUND_TIME + t] =
                floorf(20000.0f * sinf(phase + 0.7f * (float)((m->label[i] + 1) * t)) + 2000.0f * normal(s));
    }
}

/* x[rows, time, in] sees `step` and 2 `step` samples back. */
static mixp_tensor *sound_conv(session *s, mixp_tensor *x, mixp_tensor *w, mixp_tensor *gain, int64_t step) {
    mixp_context *c = s->ctx;
    mixp_tensor  *taps[SOUND_TAPS], *spread, *early = mixp_pad(c, x, 1, 2 * step, 0, 0);
    for (int i = 0; i < SOUND_TAPS; i++) taps[i] = mixp_slice(c, early, 1, i * step, SOUND_TIME);
    x = shaped(s, mixp_stack(c, SOUND_TAPS, taps, 2), SOUND_ROWS * SOUND_TIME, -1, 0, 0);
    x = mixp_linear(c, x, w, NULL);
    spread = mixp_sqrt(c, mixp_add_scalar(c, mixp_var(c, x, 0, 0, 1), 1e-5f));
    x = mixp_div(c, mixp_sub(c, x, mixp_mean(c, x, 0, 1)), spread);
    x = mixp_leaky_relu(c, mixp_mul(c, x, gain), 0.1f);
    return shaped(s, x, SOUND_ROWS, SOUND_TIME, SOUND_WIDTH, 0);
}

static mixp_tensor *sound_loss(session *s, int turn, int training) {
    sound        *m = (sound *)s->model;
    mixp_context *c = s->ctx;
    const int     time_last[3] = { 0, 2, 1 };
    mixp_tensor  *h = floats(s, m->x, SOUND_ROWS, SOUND_TIME, 1), *both[2];
    (void)turn, (void)training;
    h = sound_conv(s, h, m->conv1, m->gain1, 1);
    h = mixp_permute(c, sound_conv(s, h, m->conv2, m->gain2, 2), 3, time_last);
    both[0] = mixp_std(c, h, -1, 1, 0);
    both[1] = mixp_sub(c, mixp_max(c, h, -1, 0), mixp_min(c, h, -1, 0));
    h = mixp_linear(c, mixp_concat(c, 2, both, 1), m->head, NULL);
    return mixp_cross_entropy(c, h, ints(s, m->label, SOUND_ROWS, 0), MIXP_IGNORE);
}
