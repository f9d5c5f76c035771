/* proof.c - three small models, without planted faults, that plain fp16 cannot train, trained in five ways.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 *     cc -O2 examples/proof.c -o proof -lm && ./proof MODEL WAY [SEED] [LOG]
 *
 * MODEL  atmosphere  sixteen barometers in pascals: one atmosphere is 101,325, and fp16 ends at 65,504
 *        gemma       a SwiGLU block whose product of gate and up passes 65,504 before the down projection
 *        year        a date as one number, 2023.37: fp16 has room for 2023, and for no fraction of it
 * WAY    fp32, bf16, fp16 (without a loss scaler), scaler (fp16 with one), guard (fp16 with scaler and guard)
 * SEED   of weights and batches [1]
 * LOG    a file that gets one row for each step: the step's number and loss
 *
 * Weights and batches come from the generator below, so that tests/bench/proof_torch.py trains the same model
 * with PyTorch. Exit status: 0 for a run that ends, whatever its loss; 2 for wrong arguments.
 */
#define MIXPREC_IMPLEMENTATION
#include "../mixprec.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include "plain_file.h"

enum { BATCH = 64, STEPS = 600, LAST = 50, MOST = 4096 };

typedef enum way { FP32, BF16, FP16, SCALER, GUARD, WAYS } way;
static const char *const way_names[WAYS] = { "fp32", "bf16", "fp16", "scaler", "guard" };

/* A batch: BATCH rows of numbers, and for each row a class, or a number. */
typedef struct batch {
    float   x[MOST], y[BATCH];
    int32_t label[BATCH];
} batch;

typedef struct model {
    mixp_context   *ctx;
    mixp_optimizer *opt;
    mixp_tensor    *w[4];
    uint32_t        random;
} model;

typedef struct task {
    const char  *name;
    void         (*make)(model *m);
    void         (*next)(model *m, batch *b);
    mixp_tensor *(*loss)(model *m, const batch *b);
} task;

/* --- numbers that proof_torch.py reproduces -------------------------------------------------- */

/* In [0, 1): the generator of Numerical Recipes, its upper 24 bits. */
static float uniform(model *m) {
    m->random = m->random * 1664525u + 1013904223u;
    return (float)(m->random >> 8) / 16777216.0f;
}

/* A parameter of numbers between -bound and bound, known to the optimizer. */
static mixp_tensor *weight(model *m, const char *name, int64_t out, int64_t in, float bound) {
    const int64_t shape[2] = { out, in };
    mixp_tensor  *w = mixp_param(m->ctx, name, MIXP_F32, 2, shape);
    static float  values[MOST];
    for (int64_t i = 0; i < out * in; i++) values[i] = bound * (2.0f * uniform(m) - 1.0f);
    mixp_write_f32(w, values, out * in);
    mixp_optimizer_add(m->opt, w, NULL);
    return w;
}

static mixp_tensor *input(model *m, const batch *b, int64_t width) {
    const int64_t shape[2] = { BATCH, width };
    return mixp_input_f32(m->ctx, 2, shape, b->x);
}

static mixp_tensor *entropy(model *m, mixp_tensor *logits, const batch *b) {
    const int64_t shape[1] = { BATCH };
    return mixp_cross_entropy(m->ctx, logits, mixp_input_i32(m->ctx, 1, shape, b->label), MIXP_IGNORE);
}

/* --- atmosphere: which of four corners has a source of pressure? ---------------------------------- */

static void atmosphere_make(model *m) {
    m->w[0] = weight(m, "fc1.weight", 64, 16, 0.6f);
    m->w[1] = weight(m, "fc2.weight", 64, 64, 0.3f);
    m->w[2] = weight(m, "fc3.weight", 4, 64, 0.2f);
}

static void atmosphere_next(model *m, batch *b) {
    for (int row = 0; row < BATCH; row++) {
        float weather = 6000.0f * (uniform(m) - 0.5f);
        b->label[row] = (int32_t)(4.0f * uniform(m));
        for (int i = 0; i < 16; i++) {
            float source = i % 4 == b->label[row] ? 30000.0f : 0.0f;
            b->x[row * 16 + i] = 101325.0f + weather + 60000.0f * (uniform(m) - 0.5f) + source;
        }
    }
}

static mixp_tensor *atmosphere_loss(model *m, const batch *b) {
    mixp_tensor *h = mixp_linear(m->ctx, input(m, b, 16), m->w[0], NULL);
    h = mixp_layer_norm(m->ctx, h, NULL, NULL, 1e-5f);
    h = mixp_relu(m->ctx, mixp_linear(m->ctx, h, m->w[1], NULL));
    return entropy(m, mixp_linear(m->ctx, h, m->w[2], NULL), b);
}

/* --- gemma: a feed-forward block as Gemma's and Llama's ------------------------------------------- */

static void gemma_make(model *m) {
    m->w[0] = weight(m, "mlp.gate_proj.weight", 64, 32, 70.0f);
    m->w[1] = weight(m, "mlp.up_proj.weight", 64, 32, 70.0f);
    m->w[2] = weight(m, "mlp.down_proj.weight", 32, 64, 0.17f);
    m->w[3] = weight(m, "head.weight", 4, 32, 0.35f);
}

static void gemma_next(model *m, batch *b) {
    for (int row = 0; row < BATCH; row++) {
        b->label[row] = (int32_t)(4.0f * uniform(m));
        for (int i = 0; i < 32; i++)
            b->x[row * 32 + i] = 2.0f * uniform(m) - 1.0f + (i % 4 == b->label[row] ? 0.7f : 0.0f);
    }
}

static mixp_tensor *gemma_loss(model *m, const batch *b) {
    mixp_tensor *x = input(m, b, 32);
    mixp_tensor *y = mixp_swiglu(m->ctx, mixp_linear(m->ctx, x, m->w[0], NULL), mixp_linear(m->ctx, x, m->w[1], NULL));
    y = mixp_rms_norm(m->ctx, mixp_linear(m->ctx, y, m->w[2], NULL), NULL, 1e-6f);
    return entropy(m, mixp_linear(m->ctx, y, m->w[3], NULL), b);
}

/* --- year: a wave within a year, learned from the date ---------------------------------------------- */

static float year_hinge[64], year_offset[64];       /* relu(hinge * date + offset): where each hinge is */

static void year_make(model *m) {
    for (int i = 0; i < 64; i++) {
        year_hinge[i] = uniform(m) < 0.5f ? -8.0f : 8.0f;
        year_offset[i] = -year_hinge[i] * (2023.0f + uniform(m));
    }
    m->w[0] = weight(m, "fc1.weight", 64, 64, 0.2f);
    m->w[1] = weight(m, "fc2.weight", 1, 64, 0.2f);
}

static void year_next(model *m, batch *b) {
    for (int row = 0; row < BATCH; row++) {
        float part = uniform(m);
        b->x[row] = 2023.0f + part;
        b->y[row] = part < 0.5f ? 4.0f * part - 1.0f : 3.0f - 4.0f * part;
    }
}

static mixp_tensor *year_loss(model *m, const batch *b) {
    const int64_t hinges[2] = { 64, 1 }, offsets[2] = { 1, 64 }, target[2] = { BATCH, 1 };
    mixp_tensor *h = mixp_linear(m->ctx, input(m, b, 1), mixp_input_f32(m->ctx, 2, hinges, year_hinge), NULL);
    h = mixp_relu(m->ctx, mixp_add(m->ctx, h, mixp_input_f32(m->ctx, 2, offsets, year_offset)));
    h = mixp_relu(m->ctx, mixp_linear(m->ctx, h, m->w[0], NULL));
    return mixp_mse(m->ctx, mixp_linear(m->ctx, h, m->w[1], NULL), mixp_input_f32(m->ctx, 2, target, b->y));
}

static const task tasks[] = {
    { "atmosphere", atmosphere_make, atmosphere_next, atmosphere_loss },
    { "gemma", gemma_make, gemma_next, gemma_loss },
    { "year", year_make, year_next, year_loss }
};
enum { TASKS = sizeof tasks / sizeof tasks[0] };

/* --- a run ----------------------------------------------------------------------------------------- */

typedef struct run {
    way          how;
    mixp_scaler *scaler;
    int          applied, skipped;
    double       last;                  /* the sum of the last losses */
    FILE        *log;
} run;

static mixp_dtype dtype_of(way how) { return how == FP32 ? MIXP_F32 : how == BF16 ? MIXP_BF16 : MIXP_F16; }

/* One step, and again after a skip where a guard has changed something. Returns its loss. */
static double train_step(const task *t, model *m, const batch *b, run *r) {
    mixp_tensor *loss = NULL;
    do {
        mixp_step_begin(m->ctx);
        mixp_zero_grad(m->opt);
        MIXP_AUTOCAST(m->ctx, dtype_of(r->how)) { loss = t->loss(m, b); }
        if (!r->scaler) {
            mixp_backward(m->ctx, loss);
            mixp_optimizer_step(m->opt);
            return mixp_item(loss);
        }
        mixp_backward(m->ctx, mixp_scaler_scale(r->scaler, loss));
        mixp_scaler_step(r->scaler, m->opt);
        mixp_scaler_update(r->scaler);
        if (mixp_scaler_verdict(r->scaler).outcome == MIXP_STEP_SKIPPED) r->skipped++;
        else r->applied++;
    } while (r->how == GUARD && mixp_retry(r->scaler, 3));
    return mixp_item(loss);
}

static void tell_events(mixp_context *ctx) {
    mixp_event e;
    for (int i = 0; i < 12 && mixp_guard_event(ctx, i, &e); i++)
        if (e.kind != MIXP_EVENT_SKIP) printf("  step %lld: %s %s\n", (long long)e.step, e.site, e.what);
}

static void train(const task *t, model *m, run *r) {
    static batch b;
    const char  *why;
    t->make(m);
    for (int step = 1; step <= STEPS; step++) {
        t->next(m, &b);
        double loss = train_step(t, m, &b, r);
        if (r->log) fprintf(r->log, "%d %.9g\n", step, loss);
        if (step > STEPS - LAST) r->last += loss / LAST;
        if (mixp_context_error(m->ctx, &why)) {
            printf("  ended in step %d: %s\n", step, why);
            r->last = NAN;
            break;
        }
    }
}

static int run_one(const task *t, way how, unsigned seed, const char *log) {
    mixp_context_desc desc;
    mixp_optimizer_desc adamw = mixp_adamw_defaults();
    model m;
    run   r;
    memset(&desc, 0, sizeof desc);
    memset(&m, 0, sizeof m);
    memset(&r, 0, sizeof r);
    desc.threads = 1;
    m.ctx = mixp_context_new(&desc);
    m.random = seed;
    adamw.lr = 3e-3;
    m.opt = mixp_optimizer_new(m.ctx, &adamw);
    r.how = how;
    r.log = log ? plain_log(log, 0) : NULL;
    if (how == SCALER || how == GUARD) r.scaler = mixp_scaler_new(m.ctx, NULL);
    if (how == GUARD) mixp_guard_start(m.ctx, NULL);
    train(t, &m, &r);
    tell_events(m.ctx);
    printf("%s %s seed %u: loss %.4f, skipped %d\n", t->name, way_names[how], seed, r.last, r.skipped);
    if (r.log) fclose(r.log);
    mixp_context_free(m.ctx);
    return 0;
}

int main(int argc, char **argv) {
    const task *t = NULL;
    int how = 0;
    for (int i = 0; argc > 1 && i < TASKS; i++)
        if (!strcmp(argv[1], tasks[i].name)) t = &tasks[i];
    while (argc > 2 && how < WAYS && strcmp(argv[2], way_names[how])) how++;
    if (!t || argc < 3 || how == WAYS) {
        fprintf(stderr, "usage: proof atmosphere|gemma|year fp32|bf16|fp16|scaler|guard [SEED] [LOG]\n");
        return 2;
    }
    return run_one(t, (way)how, argc > 3 ? (unsigned)strtoul(argv[3], NULL, 10) : 1, argc > 4 ? argv[4] : NULL);
}
