/* test_every_optimizer.c - what is true of every optimizer, with every schedule and every option that it has: a skipped
 * step changes no byte of weights and states, and a resumed run has the bits of an uninterrupted one. An option that an
 * optimizer does not have is refused.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#define _POSIX_C_SOURCE 200809L
#include <unistd.h>
#include "mixprec.h"
#include "test.h"

enum { ROWS = 4, COLS = 64, N = ROWS * COLS, STEPS = 6, SAVED = 3, STATES = 5 };

static mixp_optimizer_desc (*const defaults[])(void) = {
    mixp_adam_defaults, mixp_adamw_defaults, mixp_sgd_defaults, mixp_rmsprop_defaults, mixp_adagrad_defaults,
    mixp_adamax_defaults, mixp_nadam_defaults, mixp_radam_defaults, mixp_lion_defaults, mixp_muon_defaults
};
enum { KINDS = sizeof defaults / sizeof *defaults };

static double rate_of(void *user, int64_t applied) { return *(const double *)user / (double)(applied + 1); }

/* The options: the fields of mixp_optimizer_desc, and each kind of schedule. tests/tools/symbols.sh compares both. */
static double number = 0.5;
#define OPTIONS(X)                                                                                                    \
    X(no_option, (void)d)             X(momentum, d->momentum = 0.9)          X(no_momentum, d->momentum = 0)         \
    X(dampening, (d->momentum = 0.9, d->dampening = 0.25))                                                            \
    X(nesterov, (d->momentum = 0.9, d->nesterov = 1))                         X(max_norm, d->max_norm = 0.25)         \
    X(cautious, d->cautious = 1)      X(no_master, d->no_master = 1)          X(zero_grad, d->zero_grad = 1)          \
    X(weight_decay, d->weight_decay = 0.125)                                  X(maximize, d->maximize = 1)            \
    X(amsgrad, d->amsgrad = 1)        X(centered, d->centered = 1)            X(decoupled, d->decoupled = 1)          \
    X(lr_decay, d->lr_decay = 0.1)    X(initial_sum, d->initial_sum = 0.1)    X(momentum_decay, d->momentum_decay = 0.01) \
    X(m_bf16, d->states.m = MIXP_MOMENT_BF16)                                 X(m_8bit, d->states.m = MIXP_MOMENT_8BIT) \
    X(v_bf16, d->states.v = MIXP_MOMENT_BF16)                                 X(v_8bit, d->states.v = MIXP_MOMENT_8BIT) \
    X(master_16, d->states.master = MIXP_MASTER_16BIT)                        X(master_8, d->states.master = MIXP_MASTER_8BIT) \
    X(rate_like_adamw, d->muon.rate = MIXP_MUON_RATE_MATCH_RMS_ADAMW)         X(muon_f32, d->muon.f32 = 1)            \
    X(spike, d->spike.of = MIXP_SPIKE_NORM)                                                                           \
    X(linear, (d->schedule.kind = MIXP_SCHEDULE_LINEAR, d->schedule.total = 9))                                       \
    X(cosine, (d->schedule.kind = MIXP_SCHEDULE_COSINE, d->schedule.total = 9, d->schedule.warmup = 2))               \
    X(step, (d->schedule.kind = MIXP_SCHEDULE_STEP, d->schedule.gamma = 0.5, d->schedule.every = 2))                  \
    X(exponential, (d->schedule.kind = MIXP_SCHEDULE_EXPONENTIAL, d->schedule.gamma = 0.5))                           \
    X(one_cycle, (d->schedule.kind = MIXP_SCHEDULE_ONE_CYCLE, d->schedule.total = 9, d->schedule.warmup = 3))         \
    X(wsd, (d->schedule.kind = MIXP_SCHEDULE_WSD, d->schedule.total = 9, d->schedule.decay = 6))                      \
    X(polynomial, (d->schedule.kind = MIXP_SCHEDULE_POLYNOMIAL, d->schedule.total = 9, d->schedule.power = 2))        \
    X(multi_step, (d->schedule.kind = MIXP_SCHEDULE_MULTI_STEP, d->schedule.gamma = 0.5, d->schedule.milestones[0] = 2)) \
    X(wave, (d->schedule.kind = MIXP_SCHEDULE_WAVE, d->schedule.total = 3))                                           \
    X(restarts, (d->schedule.kind = MIXP_SCHEDULE_RESTARTS, d->schedule.every = 2))                                   \
    X(cyclic, (d->schedule.kind = MIXP_SCHEDULE_CYCLIC, d->schedule.every = 2, d->schedule.gamma = 0.5))              \
    X(cyclic_exp, (d->schedule.kind = MIXP_SCHEDULE_CYCLIC_EXP, d->schedule.every = 2, d->schedule.gamma = 0.5))      \
    X(function, (d->schedule.kind = MIXP_SCHEDULE_FUNCTION, d->schedule.factor = rate_of, d->schedule.user = &number))

#define OPTION_FUNCTION(name, set) static void set_##name(mixp_optimizer_desc *d) { set; }
OPTIONS(OPTION_FUNCTION)
#define OPTION_ROW(name, set) { #name, set_##name },
static const struct { const char *name; void (*set)(mixp_optimizer_desc *d); } options[] = { OPTIONS(OPTION_ROW) };
enum { COUNT = sizeof options / sizeof *options };

static char path[64];

/* A weight w of a dtype, and a loss whose gradients change from step to step. */
typedef struct run {
    mixp_context   *ctx;
    mixp_tensor    *w;
    mixp_optimizer *opt;
    mixp_scaler    *scaler;
} run;

/* Returns 0 if the optimizer refuses the option, with an error that says so. */
static int run_open(run *r, int kind, int option, mixp_dtype dtype) {
    static const int64_t shape[2] = { ROWS, COLS };
    mixp_optimizer_desc d = defaults[kind]();
    mixp_scaler_desc rule;
    const char *why = "";
    options[option].set(&d);
    memset(&rule, 0, sizeof rule);
    rule.init_scale = 16.0f;
    r->ctx = mixp_context_new(NULL);
    r->opt = mixp_optimizer_new(r->ctx, &d);
    r->scaler = mixp_scaler_new(r->ctx, &rule);
    r->w = mixp_param(r->ctx, "w", dtype, 2, shape);
    CHECK_INT(mixp_init_normal(r->w, 0.0, 0.25), MIXP_OK);
    if (r->opt && mixp_optimizer_add(r->opt, r->w, NULL) == MIXP_OK) return 1;
    CHECK(mixp_context_error(r->ctx, &why) != MIXP_OK && strlen(why) > 20);
    mixp_context_free(r->ctx);
    return 0;
}

static void run_close(run *r) {
    CHECK_INT(mixp_context_error(r->ctx, NULL), MIXP_OK);
    mixp_context_free(r->ctx);
}

static void run_step(run *r, int step, float factor) {
    float x[N];
    static const int64_t shape[2] = { ROWS, COLS };
    for (int i = 0; i < N; i++) x[i] = (float)((i * 7 + step * 5) % 13 - 6) / 8.0f;
    CHECK_INT(mixp_step_begin(r->ctx), MIXP_OK);
    CHECK_INT(mixp_zero_grad(r->opt), MIXP_OK);
    {
        mixp_tensor *y = mixp_mul(r->ctx, r->w, mixp_input(r->ctx, MIXP_F32, 2, shape, x));
        mixp_tensor *loss = mixp_mean(r->ctx, mixp_add(r->ctx, mixp_square(r->ctx, y), y), MIXP_ALL, 0);
        loss = mixp_scale(r->ctx, loss, factor);
        CHECK_INT(mixp_backward(r->ctx, mixp_scaler_scale(r->scaler, loss)), MIXP_OK);
    }
    CHECK_INT(mixp_scaler_step(r->scaler, r->opt), MIXP_OK);
    CHECK_INT(mixp_scaler_update(r->scaler), MIXP_OK);
}

/* The weight and all states, those that there are not as zeros. */
static void run_read(run *r, float to[STATES + 1][N]) {
    memset(to, 0, (STATES + 1) * sizeof *to);
    CHECK_INT(mixp_read(r->w, to[STATES], MIXP_F32, N), MIXP_OK);
    for (int i = 0; i < STATES; i++) {
        mixp_optimizer_read(r->opt, r->w, (mixp_state_kind)i, to[i], N);
        mixp_context_clear_error(r->ctx);
    }
}

static mixp_checkpoint whole(run *r) {
    mixp_checkpoint c;
    memset(&c, 0, sizeof c);
    c.ctx = r->ctx;
    c.optimizers = &r->opt;
    c.n_optimizers = 1;
    c.scaler = r->scaler;
    return c;
}

static int tried, refused;

static void wrong(int kind, int option, mixp_dtype dtype, const char *what) {
    test_bad++;
    TEST_SHOW("optimizer %d with %s, weights in %s: %s", kind, options[option].name, mixp_dtype_name(dtype), what);
}

static void laws(int kind, int option, mixp_dtype dtype) {
    static float straight[STATES + 1][N], again[STATES + 1][N];
    run a, b;
    tried++;
    if (!run_open(&a, kind, option, dtype)) {
        refused++;
        return;
    }

    /* Saved in the middle, then a step with an Inf: it is skipped, and changes nothing. */
    for (int step = 0; step < SAVED; step++) run_step(&a, step, 1.0f);
    mixp_checkpoint c = whole(&a);
    CHECK_INT(mixp_checkpoint_save(path, &c), MIXP_OK);
    run_read(&a, straight);
    run_step(&a, SAVED, 1e38f);
    run_read(&a, again);
    CHECK_INT(mixp_optimizer_verdict(a.opt).outcome, MIXP_STEP_SKIPPED);
    if (memcmp(straight, again, sizeof again) != 0) wrong(kind, option, dtype, "a skipped step changed bytes");
    for (int step = SAVED; step < STEPS; step++) run_step(&a, step, 1.0f);
    run_read(&a, straight);
    for (int i = 0; i < N; i++)
        if (!(straight[STATES][i] - straight[STATES][i] == 0.0f)) {
            wrong(kind, option, dtype, "a weight is not finite");
            break;
        }

    /* Loaded by another process: the same bits. */
    CHECK(run_open(&b, kind, option, dtype));
    CHECK_INT(mixp_fill(b.w, 9.0), MIXP_OK);
    c = whole(&b);
    CHECK_INT(mixp_checkpoint_load(path, &c), MIXP_OK);
    for (int step = SAVED; step < STEPS; step++) run_step(&b, step, 1.0f);
    run_read(&b, again);
    if (memcmp(straight, again, sizeof again) != 0) wrong(kind, option, dtype, "a resumed run has other bits");
    run_close(&a);
    run_close(&b);
}

static void every_optimizer_with_every_option(void) {
    for (int kind = 0; kind < KINDS; kind++)
        for (int option = 0; option < COUNT; option++) {
            laws(kind, option, MIXP_F32);
            laws(kind, option, MIXP_BF16);
        }
    printf("  %d runs, %d of them refused\n", tried, refused);
    CHECK(refused < tried / 2);
}

/* The list has each kind, in the order of the enum; the kinds behind Muon are passes of an update. */
static void every_kind_has_a_row(void) {
    CHECK_INT(KINDS, MIXP_OPTIMIZER_MUON_MOMENTUM);
    for (int kind = 0; kind < KINDS; kind++) CHECK_INT(defaults[kind]().kind, kind);
}

int main(void) {
    snprintf(path, sizeof path, "%s/mixprec_optimizers_%ld.st", access("/dev/shm", W_OK) ? "/tmp" : "/dev/shm", (long)getpid());
    RUN(every_kind_has_a_row);
    RUN(every_optimizer_with_every_option);
    remove(path);
    return test_report();
}
