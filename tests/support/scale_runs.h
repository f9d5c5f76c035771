/* scale_runs.h - trains a small network under a given loss scaler and reports the number of
 * skipped steps, the share of gradients flushed to zero, and the final loss.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 *     tests/core/scaler/test_watch_scale.c        checks the promises of the predictive rule
 *     tests/bench/scales.c            compares the rules
 *
 * The task is y = f(x) of a random teacher, 32 examples a step. Everything is drawn only from the
 * run's seed, so all runs of one seed see the same batches and the same spikes. A spike is a batch
 * whose loss, and with it every gradient, is multiplied by a power of two.
 */
#ifndef SCALE_RUNS_H
#define SCALE_RUNS_H
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { RUN_BATCH = 32, RUN_IN = 8, RUN_OUT = 4, RUN_MOST_LAYERS = 24 };

typedef struct scale_setup {
    mixp_dtype       dtype;             /* of autocast; MIXP_F32: none                        */
    mixp_scaler_desc scaler;            /* rule MIXP_RULE_COUNT: no scaler at all             */
    uint64_t         seed;
    int              steps, layers, width;
    double           gain;              /* of the hidden weights: below 1 gradients shrink    */
    int              spike_every;       /* a spike in about one step of so many; 0 = none     */
    int              spike_least, spike_most;   /* binades                                    */
    int              share;             /* the loss is multiplied by 2^-share: a small part of
                                           what a large batch has for a mean                  */
    int              guarded;           /* 1: the guard looks at gradients on their way, too  */
} scale_setup;

typedef struct scale_result {
    int    skipped, spikes;
    double loss;                        /* of 1,024 examples that were never trained on       */
    double flushed, subnormal;          /* shares of parameter gradients, mean over the steps */
    double zeros;                       /* share of gradients that are 0 altogether           */
    float  scale;
    char   error[200];
} scale_result;

typedef struct scale_net {
    mixp_context *ctx;
    mixp_tensor  *w[RUN_MOST_LAYERS + 1], *b[RUN_MOST_LAYERS + 1];
    int           layers, width;
    double        teacher[RUN_IN * RUN_OUT], bend[RUN_OUT];
    uint64_t      random;
} scale_net;

static uint32_t run_u32(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*state >> 32);
}

/* About normal. */
static double run_normal(uint64_t *state) {
    double s = -6.0;
    for (int i = 0; i < 12; i++) s += run_u32(state) / 4294967296.0;
    return s;
}

static mixp_tensor *run_weight(scale_net *n, const char *kind, int layer, int rows, int cols,
                               double deviation) {
    static float values[256 * 256];
    int64_t shape[2];
    char name[32];
    mixp_tensor *w;
    int i;
    shape[0] = rows;
    shape[1] = cols;
    snprintf(name, sizeof name, "%d.%s", layer, kind);
    w = mixp_param(n->ctx, name, MIXP_F32, cols ? 2 : 1, shape);
    for (i = 0; i < rows * (cols ? cols : 1); i++)
        values[i] = (float)(deviation * run_normal(&n->random));
    mixp_write(w, values, MIXP_F32, rows * (cols ? cols : 1));
    return w;
}

static void run_build(scale_net *n, const scale_setup *s) {
    mixp_context_desc desc;
    memset(n, 0, sizeof *n);
    n->random = s->seed * 977 + 13;
    memset(&desc, 0, sizeof desc);
    desc.threads = 1;                   /* such small products gain nothing by more */
    n->ctx = mixp_context_new(&desc);
    n->layers = s->layers;
    n->width = s->width;
    for (int i = 0; i <= s->layers; i++) {
        int in = i ? s->width : RUN_IN, out = i < s->layers ? s->width : RUN_OUT;
        double gain = i && i < s->layers ? s->gain : 1.0;
        n->w[i] = run_weight(n, "w", i, out, in, gain / sqrt((double)in));
        n->b[i] = run_weight(n, "b", i, out, 0, 0.1);
    }
    for (int i = 0; i < RUN_IN * RUN_OUT; i++) n->teacher[i] = run_normal(&n->random);
    for (int i = 0; i < RUN_OUT; i++) n->bend[i] = run_normal(&n->random);
}

/* A mean squared error, of a batch that `random` draws; the targets are about 1 in size. */
static mixp_tensor *run_loss(scale_net *n, uint64_t *random) {
    static float x[RUN_BATCH * RUN_IN], y[RUN_BATCH * RUN_OUT];
    int64_t in[2] = { RUN_BATCH, RUN_IN }, out[2] = { RUN_BATCH, RUN_OUT };
    for (int i = 0; i < RUN_BATCH; i++) {
        for (int k = 0; k < RUN_IN; k++) x[i * RUN_IN + k] = (float)run_normal(random);
        for (int j = 0; j < RUN_OUT; j++) {
            double sum = n->bend[j];
            for (int k = 0; k < RUN_IN; k++) sum += n->teacher[j * RUN_IN + k] * (double)x[i * RUN_IN + k] / 3.0;
            y[i * RUN_OUT + j] = (float)sin(sum);
        }
    }
    mixp_tensor *h = mixp_input(n->ctx, MIXP_F32, 2, in, x);
    mixp_tensor *target = mixp_input(n->ctx, MIXP_F32, 2, out, y);
    for (int i = 0; i <= n->layers; i++) {
        h = mixp_linear(n->ctx, h, n->w[i], n->b[i]);
        if (i < n->layers) h = mixp_tanh(n->ctx, h);
    }
    return mixp_mse(n->ctx, h, target);
}

static double run_validate(scale_net *n, mixp_dtype dtype) {
    uint64_t random = 4711;
    double sum = 0.0;
    for (int i = 0; i < 32; i++) {
        mixp_tensor *loss = NULL;
        mixp_step_begin(n->ctx);
        MIXP_NO_GRAD(n->ctx) {
            MIXP_AUTOCAST(n->ctx, dtype) { loss = run_loss(n, &random); }
        }
        sum += mixp_item(loss);
    }
    return sum / 32;
}

/* The factor of this step's loss: 1, or a planted spike. */
static float run_spike(const scale_setup *s, uint64_t *random, scale_result *r) {
    uint32_t dice = run_u32(random), size = run_u32(random);
    int span = s->spike_most - s->spike_least + 1;
    if (!s->spike_every || dice % (uint32_t)s->spike_every) return 1.0f;
    r->spikes++;
    return ldexpf(1.0f, s->spike_least + (int)(size % (uint32_t)span));
}

static void run_count(mixp_optimizer *opt, scale_result *r) {
    mixp_underflow u;
    mixp_optimizer_underflow(opt, -1, &u);
    r->flushed += u.flushed;
    r->subnormal += u.subnormal;
    r->zeros += (double)u.look.zeros / (double)u.look.count;
}

static scale_result scale_run(const scale_setup *s) {
    static const mixp_scaler_desc defaults;
    int scaled = s->scaler.rule != MIXP_RULE_COUNT, i, counted = 0;
    mixp_optimizer_desc adamw = mixp_adamw_defaults();
    uint64_t random = s->seed * 31 + 7;
    scale_result r;
    scale_net n;
    const char *why = "";
    memset(&r, 0, sizeof r);
    run_build(&n, s);
    adamw.lr = 2e-3;
    adamw.eps = 1e-16;
    adamw.max_norm = s->spike_every ? 0.02 : 0.0;   /* then a spike is as long as any step */
    mixp_optimizer *opt = mixp_optimizer_new(n.ctx, &adamw);
    mixp_scaler *scaler = mixp_scaler_new(n.ctx, scaled ? &s->scaler : &defaults);
    for (i = 0; i <= n.layers; i++) {
        mixp_optimizer_add(opt, n.w[i], NULL);
        mixp_optimizer_add(opt, n.b[i], NULL);
    }
    if (s->guarded) mixp_guard_start(n.ctx, NULL);
    for (i = 0; i < s->steps; i++) {
        float spike = run_spike(s, &random, &r);
        mixp_tensor *loss = NULL;
        mixp_step_begin(n.ctx);
        mixp_zero_grad(opt);
        MIXP_AUTOCAST(n.ctx, s->dtype) {
            loss = run_loss(&n, &random);
            if (spike > 1.0f || s->share)
                loss = mixp_scale(n.ctx, loss, ldexpf(spike, -s->share));
        }
        mixp_backward(n.ctx, scaled ? mixp_scaler_scale(scaler, loss) : loss);
        mixp_optimizer_sample(opt);
        if (scaled) {
            mixp_scaler_step(scaler, opt);
            mixp_scaler_update(scaler);
        } else mixp_optimizer_step(opt);
        if (mixp_optimizer_verdict(opt).outcome == MIXP_STEP_SKIPPED) continue;
        run_count(opt, &r);
        counted++;
    }
    r.skipped = (int)mixp_optimizer_verdict(opt).skipped;
    r.flushed /= counted ? counted : 1;
    r.subnormal /= counted ? counted : 1;
    r.zeros /= counted ? counted : 1;
    r.scale = scaled ? mixp_scaler_loss_scale(scaler) : 1.0f;
    r.loss = run_validate(&n, s->dtype);
    if (mixp_context_error(n.ctx, &why) != MIXP_OK) snprintf(r.error, sizeof r.error, "%s", why);
    mixp_context_free(n.ctx);
    return r;
}

/* The runs that are talked of: spikes of 2^1 to 2^3, under a rule that has as many growths in 1,000
 * steps as PyTorch's has in 100,000 at its interval of 2,000. */
static scale_setup run_spiked(uint64_t seed, mixp_scaler_preset rule) {
    scale_setup s;
    memset(&s, 0, sizeof s);
    s.dtype = MIXP_F16;
    s.seed = seed;
    s.steps = 1000;
    s.layers = 3;
    s.width = 32;
    s.gain = 1.0;
    s.spike_every = 50;
    s.spike_least = 1;
    s.spike_most = 3;
    s.scaler.rule = rule;
    if (rule == MIXP_RULE_TORCH) s.scaler.growth_interval = 20;
    return s;
}

/* Six layers whose loss is a mean over half a million positions, of which this is a few: 2^-19. */
static scale_setup run_deep(uint64_t seed, mixp_dtype dtype, mixp_scaler_preset rule) {
    scale_setup s;
    memset(&s, 0, sizeof s);
    s.dtype = dtype;
    s.seed = seed;
    s.steps = 600;
    s.layers = 6;
    s.width = 24;
    s.gain = 0.9;
    s.share = 19;
    s.scaler.rule = rule;
    if (rule == MIXP_RULE_PREDICTIVE) s.scaler.init_scale = 1.0f;
    return s;
}
#endif
