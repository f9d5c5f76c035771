/* layout_cases.h - a law of optimizers over every kind: weights and gradients of f64, and rows with a pitch, train
 * with the bits of the dense f32 program that holds the same values. For the CPU's tests and for a GPU's.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#ifndef LAYOUT_CASES_H
#define LAYOUT_CASES_H
#include "mixprec.h"
#include "test.h"
#include "numbers.h"

enum { LAYOUT_ROWS = 34, LAYOUT_COLS = 129, LAYOUT_PITCH = 136, LAYOUT_STEPS = 6, LAYOUT_BAD = 1 };
static int layout_steps = LAYOUT_STEPS; /* a simulated GPU takes fewer */
enum { LAYOUT_COUNT = LAYOUT_ROWS * LAYOUT_COLS, LAYOUT_ROOM = LAYOUT_ROWS * LAYOUT_PITCH };

typedef struct layout {
    mixp_dtype w, g;
    int        pitch;           /* elements from row to row                                */
} layout;

/* Every kind of optimizer, and each state that only some kinds have. */
static mixp_optimizer_desc layout_kind(int i) {
    mixp_optimizer_desc (*const kinds[])(void) = {
        mixp_adamw_defaults, mixp_adam_defaults, mixp_sgd_defaults, mixp_rmsprop_defaults, mixp_adagrad_defaults,
        mixp_adamax_defaults, mixp_nadam_defaults, mixp_radam_defaults, mixp_lion_defaults, mixp_muon_defaults,
        mixp_adam_defaults, mixp_rmsprop_defaults, mixp_sgd_defaults, mixp_adamw_defaults
    };
    mixp_optimizer_desc d;
    memset(&d, 0, sizeof d);
    if (i >= (int)(sizeof kinds / sizeof kinds[0])) return d;
    d = kinds[i]();
    d.lr = 0.01;
    d.weight_decay = 0.1;
    if (i == 10) d.amsgrad = 1;
    if (i == 11) d.centered = 1;
    if (i == 12) d.momentum = 0.9;
    if (i == 13) d.states.m = d.states.v = MIXP_MOMENT_8BIT;
    return d;
}
static int layout_has_small_states(const mixp_optimizer_desc *d) { return d->states.m == MIXP_MOMENT_8BIT; }

/* What a program holds after its steps, without padding. */
typedef struct layout_end {
    double w[LAYOUT_COUNT], g[LAYOUT_COUNT], norm[LAYOUT_STEPS];
    float  m[LAYOUT_COUNT], v[LAYOUT_COUNT];
    mixp_verdict bad;
} layout_end;

static double layout_padding(int i) { return i % 2 ? (double)NAN : 1e30; }

/* A view of device memory. */
static mixp_tensor *layout_array(mixp_context *ctx, const char *name, mixp_dtype dtype, int pitch) {
    const int64_t shape[2] = { LAYOUT_ROWS, pitch };
    const int64_t bytes = LAYOUT_ROWS * (int64_t)pitch * 8;
    mixp_tensor  *t = mixp_param(ctx, "", MIXP_F16, 1, &bytes);
    CHECK_INT(mixp_tensor_set_requires_grad(t, 0), MIXP_OK);
    return mixp_view(ctx, name, dtype, 2, shape, t->data);
}
static void layout_set(mixp_tensor *t, const double *values) {
    static double all[LAYOUT_ROOM];
    const int pitch = (int)t->shape[1];
    for (int i = 0; i < (int)t->count; i++)
        all[i] = i % pitch < LAYOUT_COLS ? values[i / pitch * LAYOUT_COLS + i % pitch] : layout_padding(i);
    CHECK_INT(mixp_write(t, all, MIXP_F64, t->count), MIXP_OK);
}
/* The values, and whether the padding is what layout_set wrote. */
static void layout_get(const mixp_tensor *t, double *values) {
    static double all[LAYOUT_ROOM];
    const int pitch = (int)t->shape[1];
    int changed = 0;
    CHECK_INT(mixp_read(t, all, MIXP_F64, t->count), MIXP_OK);
    for (int i = 0; i < (int)t->count; i++) {
        double padding = layout_padding(i);
        if (i % pitch < LAYOUT_COLS) { values[i / pitch * LAYOUT_COLS + i % pitch] = all[i]; continue; }
        if (t->dtype == MIXP_F32) padding = (double)(float)padding;
        if (t->dtype == MIXP_F16) padding = i % 2 ? padding : (double)INFINITY;
        if (t->dtype == MIXP_BF16) continue; /* its 1e30 is rounded: the NaN of odd elements is enough */
        changed += i % 2 ? all[i] == all[i] : all[i] != padding;
    }
    CHECK_INT(changed, 0);
}
static void layout_state(const mixp_optimizer *opt, const mixp_tensor *t, mixp_state_kind what, float *values) {
    static float all[LAYOUT_ROOM];
    const int pitch = (int)t->shape[1];
    memset(values, 0, LAYOUT_COUNT * sizeof *values);
    if (mixp_optimizer_read(opt, t, what, all, t->count) != MIXP_OK) {
        mixp_context_clear_error(t->ctx);
        return;
    }
    for (int i = 0; i < LAYOUT_COUNT; i++) values[i] = all[i / LAYOUT_COLS * pitch + i % LAYOUT_COLS];
}

/* A value that every dtype of the law holds. */
static double layout_value(int step, int i) { return (double)((i * 37 + step * 101) % 255 - 127) / 64.0; }

/* how: 0 steps with a scaler; 1 unscales and clips first; 2 also clears the gradients. */
static int layout_run(const mixp_device *device, const mixp_optimizer_desc *kind, const layout *l, int how,
                      layout_end *end) {
    static double values[LAYOUT_COUNT];
    mixp_optimizer_desc d = *kind;
    mixp_context_desc c;
    mixp_context *ctx;
    memset(&c, 0, sizeof c);
    memset(end, 0, sizeof *end);
    c.device = device;
    ctx = mixp_context_new(&c);
    d.zero_grad = how == 2;
    mixp_optimizer *opt = mixp_optimizer_new(ctx, &d);
    mixp_scaler *scaler = mixp_scaler_new(ctx, NULL);
    mixp_tensor *w = layout_array(ctx, "w", l->w, l->pitch), *g = layout_array(ctx, "g", l->g, l->pitch);
    for (int i = 0; i < LAYOUT_COUNT; i++) values[i] = layout_value(-1, i);
    layout_set(w, values);
    const mixp_result added = l->pitch > LAYOUT_COLS ? mixp_optimizer_add_rows(opt, w, g, LAYOUT_COLS)
                                                     : mixp_optimizer_add(opt, w, g);
    for (int t = 0; added == MIXP_OK && t < layout_steps; t++) {
        const double scale = (double)mixp_scaler_loss_scale(scaler);
        for (int i = 0; i < LAYOUT_COUNT; i++)
            values[i] = layout_value(t, i) * (l->g == MIXP_F16 ? 1.0 : scale);
        if (t == LAYOUT_BAD) values[LAYOUT_COUNT - 2] = l->g == MIXP_F64 ? 1e300 : (double)INFINITY;
        layout_set(g, values);
        if (how == 1) {
            CHECK_INT(mixp_scaler_unscale(scaler, opt), MIXP_OK);
            CHECK_INT(mixp_clip_grad_norm(opt, 0.5), MIXP_OK);
        }
        CHECK_INT(mixp_scaler_step(scaler, opt), MIXP_OK);
        CHECK_INT(mixp_scaler_update(scaler), MIXP_OK);
        mixp_optimizer_applied(opt); /* waits */
        const mixp_verdict v = mixp_optimizer_verdict(opt);
        CHECK_INT(v.outcome, t == LAYOUT_BAD ? MIXP_STEP_SKIPPED : MIXP_STEP_APPLIED);
        end->norm[t] = t == LAYOUT_BAD ? 0.0 : v.grad_norm;
        if (t == LAYOUT_BAD) CHECK_TEXT(v.bad_tensor, "w");
        if (t == LAYOUT_BAD) end->bad = v;
    }
    if (added == MIXP_OK) layout_get(w, end->w);
    if (added == MIXP_OK) layout_get(g, end->g);
    layout_state(opt, w, MIXP_STATE_M, end->m);
    layout_state(opt, w, MIXP_STATE_V, end->v);
    CHECK_TEXT(mixp_context_warning(ctx), "");
    if (added != MIXP_OK) mixp_context_clear_error(ctx);
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    mixp_context_free(ctx);
    return added == MIXP_OK;
}

static void layout_compare(const layout_end *want, const layout_end *got, const layout *l, int kind) {
    const int exact_norms = l->pitch == LAYOUT_COLS; /* a pitch moves the chunks in which squares are summed */
    int differs = memcmp(want->w, got->w, sizeof want->w) != 0;
    differs |= memcmp(want->m, got->m, sizeof want->m) != 0 || memcmp(want->v, got->v, sizeof want->v) != 0;
    for (int i = 0; i < LAYOUT_COUNT; i++) differs |= want->g[i] != got->g[i] && isfinite(want->g[i]);
    for (int t = 0; t < layout_steps; t++)
        differs |= fabs(want->norm[t] - got->norm[t]) > (exact_norms ? 0.0 : 1e-6 * want->norm[t]);
    CHECK_INT(got->bad.bad_element, (LAYOUT_ROWS - 1) * l->pitch + LAYOUT_COLS - 2);
    CHECK_INT(got->bad.bad_is_nan, 0);
    if (!differs) return;
    test_bad++;
    TEST_SHOW("kind %d: %s weights, %s gradients and a pitch of %d differ from the dense f32 program", kind,
              mixp_dtype_name(l->w), mixp_dtype_name(l->g), l->pitch);
}

/* The law on one device. */
NUMBERS_MAYBE void layout_law(const mixp_device *device) {
    static const layout plain[] = { { MIXP_F32, MIXP_F32, LAYOUT_COLS }, { MIXP_F16, MIXP_F32, LAYOUT_COLS },
                                    { MIXP_BF16, MIXP_BF16, LAYOUT_COLS } };
    static const layout cases[][5] = {
        { { MIXP_F64, MIXP_F64, LAYOUT_COLS }, { MIXP_F64, MIXP_F32, LAYOUT_COLS }, { MIXP_F32, MIXP_F64, LAYOUT_COLS },
          { MIXP_F32, MIXP_F32, LAYOUT_PITCH }, { MIXP_F64, MIXP_F64, LAYOUT_PITCH } },
        { { MIXP_F16, MIXP_F32, LAYOUT_PITCH }, { MIXP_F16, MIXP_F64, LAYOUT_PITCH } },
        { { MIXP_BF16, MIXP_BF16, LAYOUT_PITCH } }
    };
    static layout_end want, got;
    const int quick = device && getenv("MIXPREC_TEST_QUICK");  /* each optimizer and dtype with one setting of three */
    int compared = 0;
    for (int k = 0; layout_kind(k).lr > 0.0; k++) {
        const mixp_optimizer_desc d = layout_kind(k);
        for (int p = 0; p < 3; p++)
            for (int how = quick ? (k + p) % 3 : 0; how < 3; how += quick ? 3 : 1) {
                CHECK(layout_run(device, &d, &plain[p], how, &want));
                for (int i = 0; i < 5 && cases[p][i].pitch; i++) {
                    const layout *l = &cases[p][i];
                    const int padded = l->pitch > LAYOUT_COLS, muon = d.kind == MIXP_OPTIMIZER_MUON;
                    if (padded && (how == 1 || layout_has_small_states(&d))) continue;  /* other norms, other blocks */
                    CHECK_INT(layout_run(device, &d, l, how, &got), !(padded && muon));
                    if (padded && muon) continue;
                    layout_compare(&want, &got, l, k);
                    compared++;
                }
            }
    }
    CHECK(compared > (quick ? 50 : 150));
}
#endif
