/* step_model.h - random sequences of calls on two scalers and three optimizers, compared with a
 * model without scales: the model keeps the true sum of each gradient, as in exact arithmetic.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * In any order of calls, an accepted step must either move the weights by the true gradients, or
 * be skipped and leave the weights unchanged. Every other case must be an error that changes
 * nothing. Steps as the manual writes them must be accepted, whatever the other optimizers are
 * doing.
 */
#ifndef STEP_MODEL_H
#define STEP_MODEL_H
#include "test.h"

enum { SCALERS = 2, OPTIMIZERS = 3, PARAMS = 4 };

/* The third optimizer shares a parameter with the first. */
static const int owned[OPTIMIZERS][2] = { { 0, 1 }, { 2, 2 }, { 3, 0 } };

typedef struct step_world {
    mixp_context   *ctx;
    mixp_scaler    *scaler[SCALERS];
    mixp_optimizer *opt[OPTIMIZERS];
    mixp_tensor    *w[PARAMS];
    int             have[PARAMS];       /* the model: is there a gradient, and its true sum  */
    double          sum[PARAMS];
    int             awaits[OPTIMIZERS]; /* 1 + the scaler whose update it awaits; 0 = none   */
    uint64_t        seed;
    char            story[2000];        /* the calls so far, for whoever must mend it        */
} step_world;

static uint32_t world_random(step_world *m, uint32_t n) {
    m->seed = m->seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(m->seed >> 33) % n;
}

static void world_tell(step_world *m, const char *call, int scaler, int opt, mixp_result r) {
    size_t used = strlen(m->story);
    snprintf(m->story + used, sizeof m->story - used, "%s(s%d, o%d)=%d ", call, scaler, opt, (int)r);
    if (r != MIXP_OK) mixp_context_clear_error(m->ctx);
}

static step_world *world_open(uint64_t seed) {
    static step_world m;
    static const char *const names[PARAMS] = { "a", "b", "c", "d" };
    static const int64_t one[1] = { 1 };
    mixp_context_desc c;
    mixp_optimizer_desc sgd = mixp_sgd_defaults();
    memset(&m, 0, sizeof m);
    memset(&c, 0, sizeof c);
    m.seed = seed;
    c.threads = 1;
    m.ctx = mixp_context_new(&c);
    for (int i = 0; i < SCALERS; i++) {
        mixp_scaler_desc d;
        memset(&d, 0, sizeof d);
        d.init_scale = 256.0f;
        d.growth_interval = 1 + i;
        d.max_scale = 1048576.0f;
        d.max_floor_skips = -1;
        if (i && seed % 4 == 0) d.rule = MIXP_RULE_STATIC;
        m.scaler[i] = mixp_scaler_new(m.ctx, &d);
    }
    for (int i = 0; i < PARAMS; i++) m.w[i] = mixp_param(m.ctx, names[i], MIXP_F32, 1, one);
    sgd.lr = 1.0;
    for (int i = 0; i < OPTIMIZERS; i++) {
        m.opt[i] = mixp_optimizer_new(m.ctx, &sgd);
        for (int k = 0; k < 2; k++)
            if (!k || owned[i][1] != owned[i][0]) mixp_optimizer_add(m.opt[i], m.w[owned[i][k]], NULL);
    }
    return &m;
}

/* What is wrong with the world, or NULL. */
static const char *world_check(step_world *m, int opt, mixp_result r, int with_scaler) {
    double before[PARAMS], after;
    int i, k, skipped;
    memset(before, 0, sizeof before);           /* weights are set back to 0 after each step */
    skipped = r == MIXP_OK && mixp_optimizer_verdict(m->opt[opt]).outcome == MIXP_STEP_SKIPPED;
    for (i = 0; i < PARAMS; i++) {
        double want = 0.0;
        after = mixp_item(m->w[i]);
        for (k = 0; k < 2; k++)
            if (owned[opt][k] == i && m->have[i] && r == MIXP_OK && !skipped) want = -m->sum[i];
        if (!isfinite(want)) {
            if (with_scaler) return "an infinite gradient was applied";
            if (isfinite(after)) return "an infinite gradient was applied as a finite one";
        } else if (!(fabs(after - want) <= 1e-5 * fabs(want))) return "a weight is wrong";
        if (after < 0.0 || after > 0.0 || after != after) mixp_fill(m->w[i], 0.0);
    }
    return NULL;
}

/* --- the calls -------------------------------------------------------------------------- */

/* coefficient * (the sum of the optimizer's parameters), walked back; the scale of scaler, twice that
 * of both, or as it is. */
static void world_backward(step_world *m, int opt, int how, double coefficient) {
    mixp_step_begin(m->ctx);
    mixp_tensor *loss = mixp_add(m->ctx, m->w[owned[opt][0]], m->w[owned[opt][1]]);
    loss = mixp_scale(m->ctx, mixp_sum(m->ctx, loss, MIXP_ALL, 0), (float)coefficient);
    if (how < SCALERS) loss = mixp_scaler_scale(m->scaler[how], loss);
    if (how == SCALERS) loss = mixp_scaler_scale(m->scaler[0], mixp_scaler_scale(m->scaler[1], loss));
    world_tell(m, "backward", how, opt, mixp_backward(m->ctx, loss));
    for (int i = 0; i < 2; i++) {
        int p = owned[opt][i];
        m->sum[p] = (m->have[p] ? m->sum[p] : 0.0) + coefficient;
        m->have[p] = 1;
    }
}

static void world_zero(step_world *m, int opt) {
    world_tell(m, "zero", 9, opt, mixp_zero_grad(m->opt[opt]));
    m->have[owned[opt][0]] = m->have[owned[opt][1]] = 0;
}

static mixp_result world_unscale(step_world *m, int scaler, int opt) {
    mixp_result r = mixp_scaler_unscale(m->scaler[scaler], m->opt[opt]);
    world_tell(m, "unscale", scaler, opt, r);
    if (r == MIXP_OK) m->awaits[opt] = 1 + scaler;
    return r;
}

static mixp_result world_clip(step_world *m, int opt, double max_norm) {
    mixp_result r = mixp_clip_grad_norm(m->opt[opt], max_norm);
    double squares = 0.0, factor;
    int i, last = owned[opt][0] == owned[opt][1] ? 1 : 2;
    world_tell(m, "clip", (int)max_norm, opt, r);
    for (i = 0; i < last; i++)
        if (m->have[owned[opt][i]]) squares += m->sum[owned[opt][i]] * m->sum[owned[opt][i]];
    factor = max_norm / (sqrt(squares) + 1e-6);
    if (r == MIXP_OK && isfinite(squares) && factor < 1.0)
        for (i = 0; i < last; i++) m->sum[owned[opt][i]] *= factor;
    return r;
}

/* With a scaler, or, for scaler SCALERS, without. */
static const char *world_step(step_world *m, int scaler, int opt, mixp_result *result) {
    mixp_result r = scaler == SCALERS ? mixp_optimizer_step(m->opt[opt])
                                      : mixp_scaler_step(m->scaler[scaler], m->opt[opt]);
    world_tell(m, "step", scaler, opt, r);
    if (result) *result = r;
    if (r == MIXP_OK && scaler < SCALERS) m->awaits[opt] = 1 + scaler;
    if (r != MIXP_OK && r != MIXP_ERR_ORDER) return "another error than that of a wrong order";
    return world_check(m, opt, r, scaler < SCALERS);
}

static void world_updated(step_world *m, int scaler, mixp_result r) {
    for (int i = 0; r == MIXP_OK && i < OPTIMIZERS; i++)
        if (m->awaits[i] == 1 + scaler) m->awaits[i] = 0;
}

static void world_update(step_world *m, int scaler) {
    mixp_result r = mixp_scaler_update(m->scaler[scaler]);
    world_tell(m, "update", scaler, 9, r);
    world_updated(m, scaler, r);
}

static void world_update_to(step_world *m, int scaler) {
    mixp_result r = mixp_scaler_update_to(m->scaler[scaler], ldexpf(1.0f, (int)world_random(m, 16)));
    world_tell(m, "update_to", scaler, 9, r);
    world_updated(m, scaler, r);
}

/* A step as the manual writes it; others may do theirs between its loss and its step. */
static const char *world_good_step(step_world *m, int scaler, int opt) {
    int other = opt == 1 ? 0 : 1, rounds = (int)world_random(m, 4);
    const char *wrong = NULL;
    mixp_result r = MIXP_OK;
    if (m->awaits[opt]) return NULL;
    world_zero(m, opt);
    world_backward(m, opt, scaler, 1.0 + (double)world_random(m, 3));
    while (rounds-- && !m->awaits[other] && !wrong) {
        world_zero(m, other);
        world_backward(m, other, scaler, 2.0);
        wrong = world_step(m, scaler, other, &r);
        if (r != MIXP_OK) return "the other's step as in the manual was refused";
        world_update(m, scaler);
    }
    if (wrong) return wrong;
    if (world_random(m, 2)) {
        if (world_unscale(m, scaler, opt) != MIXP_OK) return "unscale as in the manual was refused";
        if (world_clip(m, opt, 2.0) != MIXP_OK) return "clip as in the manual was refused";
    }
    wrong = world_step(m, scaler, opt, &r);
    return wrong || r == MIXP_OK ? wrong : "a step as in the manual was refused";
}

static const char *world_any_call(step_world *m) {
    int scaler = (int)world_random(m, SCALERS), opt = (int)world_random(m, OPTIMIZERS);
    double coefficient = 1.0 + (double)world_random(m, 3);
    if (world_random(m, 12) == 0) coefficient = (double)HUGE_VALF;
    switch (world_random(m, 16)) {
    case 0: case 1: case 2: world_backward(m, opt, scaler, coefficient); break;
    case 3: world_backward(m, opt, SCALERS + (int)world_random(m, 2), coefficient); break;
    case 4: case 5: world_zero(m, opt); break;
    case 6: world_unscale(m, scaler, opt); break;
    case 7: world_clip(m, opt, world_random(m, 2) ? 1e9 : 1.5); break;
    case 8: case 9: case 10: return world_step(m, scaler, opt, NULL);
    case 11: return world_step(m, SCALERS, opt, NULL);
    case 12: case 13: world_update(m, scaler); break;
    case 14: world_update_to(m, scaler); break;
    default: return world_good_step(m, scaler, opt);
    }
    return NULL;
}

static void world_sequences(int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        step_world *m = world_open((uint64_t)i);
        const char *wrong = NULL;
        int calls = 4 + (int)world_random(m, 24);
        mixp_step_begin(m->ctx);
        while (calls-- && !wrong) {
            if (world_random(m, 8) == 0) mixp_step_begin(m->ctx);
            wrong = world_any_call(m);
        }
        if (wrong) printf("  sequence %lld: %s: %s\n", (long long)i, wrong, m->story);
        CHECK(wrong == NULL);
        mixp_context_free(m->ctx);
        if (wrong) return;
    }
}
#endif
