/* test_refused_step.c - memory refused within one call, at each request in turn: adding a parameter, sampling,
 * unscaling, clipping, a step, an update, averages, making and writing a buffer. The call reports it and changes
 * no byte of weights, gradients, states, buffers, counters and scaler; made again, it gives what an undisturbed run gives.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include <limits.h>
#include "mixprec.h"
#include "test.h"
#include "refusals.h"

/* --- a training by hand: the gradients are the program's own ------------------------------------- */

enum { PARAMS = 4, MOST = 130 * 70 };
static const int64_t shapes[PARAMS][2] = { { 130, 70 }, { 20, 40 }, { 9, 7 }, { 70, 130 } };

typedef struct training {
    mixp_context   *ctx;
    mixp_scaler    *scaler;
    mixp_optimizer *opt;
    mixp_tensor    *w[PARAMS], *g[PARAMS], *buffer;
    int             added, filled;
} training;

/* The calls of a training, in their order. */
typedef enum call {
    ADD, BEGIN, FILL, FILL_INF, SAMPLE, UNSCALE, CLIP, STEP, UPDATE, AVERAGE, SWAP, GUARD, BUFFER, WRITE, CALLS
} call;
static const char *const call_names[CALLS] = {
    "add", "begin", "fill", "fill", "sample", "unscale", "clip", "step", "update", "set_ema", "swap_ema", "guard",
    "buffer", "write"
};
static const call script[] = {
    ADD, ADD, BEGIN, FILL, STEP, UPDATE, BUFFER,
    BEGIN, FILL, SAMPLE, UNSCALE, CLIP, STEP, UPDATE,
    ADD, AVERAGE, BEGIN, FILL, WRITE, STEP, UPDATE, WRITE,
    BEGIN, FILL_INF, WRITE, STEP, UPDATE, SWAP, SWAP,
    GUARD, ADD, AVERAGE, BEGIN, FILL, STEP, UPDATE, BEGIN, FILL, STEP, UPDATE, SWAP, SWAP
};
enum { SCRIPT = sizeof script / sizeof *script };

typedef struct config {
    const char          *name;
    mixp_optimizer_desc (*defaults)(void);
    mixp_dtype           weights;
    mixp_moment_kind     m, v;
    mixp_master_kind     master;
    int                  more;      /* 1: momentum, clipping within the step, a spike rule; Muon: f32 */
} config;

static mixp_optimizer_desc desc_of(const config *c) {
    mixp_optimizer_desc d = c->defaults();
    d.states.m = c->m;
    d.states.v = c->v;
    d.states.master = c->master;
    if (!c->more) return d;
    if (d.kind == MIXP_OPTIMIZER_SGD || d.kind == MIXP_OPTIMIZER_RMSPROP) d.momentum = 0.9;
    if (d.kind == MIXP_OPTIMIZER_MUON) d.muon.f32 = 1;
    d.max_norm = 1.0;
    d.spike.of = MIXP_SPIKE_NORM;
    return d;
}

static mixp_tensor *matrix(training *t, char kind, int i, mixp_dtype dtype) {
    char name[3] = { 0 };
    name[0] = kind;
    name[1] = (char)('0' + i);
    return mixp_param(t->ctx, name, dtype, 2, shapes[i]);
}

static training training_make(const config *c, int far) {
    const mixp_optimizer_desc how = desc_of(c);
    mixp_context_desc desc;
    training t;
    memset(&t, 0, sizeof t);
    memset(&requests, 0, sizeof requests);
    requests.refuse = -1;
    requests.most = 1;
    requests.memory_only = 1;
    memset(&desc, 0, sizeof desc);
    device_make(far);
    desc.device = &device;
    desc.allocate = host_allocate;
    desc.release = host_release;
    desc.threads = 1;
    t.ctx = mixp_context_new(&desc);
    for (int i = 0; i < PARAMS; i++) {
        t.w[i] = matrix(&t, 'w', i, c->weights);
        t.g[i] = matrix(&t, 'g', i, i % 2 ? c->weights : MIXP_F32);
        mixp_init_normal(t.w[i], 0.0, 0.5);
    }
    t.scaler = mixp_scaler_new(t.ctx, NULL);
    mixp_scaler_loss_scale(t.scaler);
    t.opt = mixp_optimizer_new(t.ctx, &how);
    return t;
}

/* Gradients of about 1, times the loss scale. */
static mixp_result fill(training *t, int inf) {
    const double scale = (double)mixp_scaler_loss_scale(t->scaler);
    static float values[MOST];
    for (int i = 0; i < PARAMS; i++) {
        const int n = (int)t->g[i]->count;
        for (int k = 0; k < n; k++) values[k] = (float)(scale / 65536.0 * ((k * 37 + t->filled * 11 + i) % 101 - 50));
        if (inf && i == 0) values[5] = (float)HUGE_VAL;
        if (mixp_write(t->g[i], values, MIXP_F32, n) != MIXP_OK) return MIXP_ERR_DEVICE;
    }
    t->filled++;
    return MIXP_OK;
}

static mixp_result add(training *t) {
    mixp_result r = mixp_optimizer_add(t->opt, t->w[t->added], t->g[t->added]);
    t->added += r == MIXP_OK;
    return r;
}

static mixp_result make_buffer(training *t) {
    t->buffer = mixp_buffer(t->ctx, "buffer", MIXP_F32, 2, shapes[0]);
    return mixp_context_error(t->ctx, NULL);
}

static mixp_result make_call(training *t, call what) {
    switch (what) {
    case ADD:      return add(t);
    case BEGIN:    return mixp_step_begin(t->ctx);
    case FILL:     return fill(t, 0);
    case FILL_INF: return fill(t, 1);
    case SAMPLE:   return mixp_optimizer_sample(t->opt);
    case UNSCALE:  return mixp_scaler_unscale(t->scaler, t->opt);
    case CLIP:     return mixp_clip_grad_norm(t->opt, 0.5);
    case STEP:     return mixp_scaler_step(t->scaler, t->opt);
    case UPDATE:   return mixp_scaler_update(t->scaler);
    case AVERAGE:  return mixp_optimizer_set_ema(t->opt, 0.75);
    case SWAP:     return mixp_optimizer_swap_ema(t->opt);
    case GUARD:    return mixp_guard_start(t->ctx, NULL);
    case BUFFER:   return make_buffer(t);
    case WRITE:    return mixp_copy(t->buffer, t->g[0]);
    default:       return MIXP_ERR_ARGUMENT;
    }
}

/* --- every byte of its state ------------------------------------------------------------------------ */

static uint64_t mixed(uint64_t hash, const void *data, size_t bytes) {
    const unsigned char *p = (const unsigned char *)data;
    for (size_t i = 0; i < bytes; i++) hash = (hash ^ p[i]) * 1099511628211u;
    return hash;
}

static uint64_t mixed_state(uint64_t hash, training *t, int i, mixp_state_kind kind) {
    static float values[MOST];
    const int64_t n = t->w[i]->count;
    const mixp_result r = mixp_optimizer_read(t->opt, t->w[i], kind, values, n);
    mixp_context_clear_error(t->ctx);       /* there is no such state, or averages are swapped in */
    return r == MIXP_OK ? mixed(hash, values, (size_t)n * sizeof *values) : hash + 1;
}

static uint64_t mixed_verdict(uint64_t hash, const training *t) {
    const mixp_verdict v = mixp_optimizer_verdict(t->opt);
    const double numbers[9] = {
        (double)v.outcome, (double)v.step, (double)v.applied, (double)v.skipped, (double)v.scale, v.grad_norm,
        (double)v.largest, (double)v.clip, v.lr
    };
    return mixed(hash, numbers, sizeof numbers);
}

static uint64_t state_of(training *t) {
    static float values[MOST];
    const int64_t applied = mixp_optimizer_applied(t->opt);
    uint64_t hash = mixed(1469598103934665603u, &applied, sizeof applied);
    mixp_scaler_saved saved;
    for (int i = 0; i < PARAMS; i++) {
        CHECK_INT(mixp_read(t->w[i], values, MIXP_F32, t->w[i]->count), MIXP_OK);
        hash = mixed(hash, values, (size_t)t->w[i]->count * sizeof *values);
        CHECK_INT(mixp_read(t->g[i], values, MIXP_F32, t->g[i]->count), MIXP_OK);
        hash = mixed(hash, values, (size_t)t->g[i]->count * sizeof *values);
        for (int kind = MIXP_STATE_M; kind <= MIXP_STATE_EMA; kind++)
            if (i < t->added) hash = mixed_state(hash, t, i, (mixp_state_kind)kind);
    }
    if (t->buffer) {
        CHECK_INT(mixp_read(t->buffer, values, MIXP_F32, t->buffer->count), MIXP_OK);
        hash = mixed(hash, values, (size_t)t->buffer->count * sizeof *values);
    }
    memset(&saved, 0, sizeof saved);
    CHECK_INT(mixp_scaler_save(t->scaler, &saved), MIXP_OK);
    return mixed(mixed_verdict(hash, t), &saved, sizeof saved);
}

/* --- one refusal ------------------------------------------------------------------------------------ */

/* The state after each call of an undisturbed run, and the number of requests for memory in the call. */
typedef struct record {
    uint64_t before[SCRIPT + 1];
    long     asked[SCRIPT];
} record;

static void record_run(const config *c, int far, record *out) {
    training t = training_make(c, far);
    for (int i = 0; i < SCRIPT; i++) {
        const long before = requests.made;
        out->before[i] = state_of(&t);
        requests.made = before;
        CHECK_INT(make_call(&t, script[i]), MIXP_OK);
        out->asked[i] = requests.made - before;
    }
    out->before[SCRIPT] = state_of(&t);
    mixp_context_free(t.ctx);
    CHECK_INT(requests.alive, 0);
}

/* Refuses the n-th request of call number `at`. */
static void run_refused(const config *c, int far, const record *undisturbed, int at, long n) {
    training t = training_make(c, far);
    for (int i = 0; i < at; i++) make_call(&t, script[i]);
    requests.made = 0;
    requests.refuse = n;
    mixp_result r = make_call(&t, script[at]);
    requests.refuse = -1;
    mixp_context_clear_error(t.ctx);
    int same = r == MIXP_OK || state_of(&t) == undisturbed->before[at];
    if (r != MIXP_OK) r = make_call(&t, script[at]);
    int right = r == MIXP_OK && state_of(&t) == undisturbed->before[at + 1];
    for (int i = at + 1; i < SCRIPT; i++) right &= make_call(&t, script[i]) == MIXP_OK;
    right &= state_of(&t) == undisturbed->before[SCRIPT];
    CHECK(same);
    CHECK(right);
    if (!same || !right)
        TEST_SHOW("%s%s: call %d (%s), request %ld", c->name, far ? ", far" : "", at, call_names[script[at]], n);
    mixp_context_free(t.ctx);
    CHECK_INT(requests.alive, 0);
}

static void each_request(const config *c, int far) {
    record undisturbed;
    const long step = getenv("MIXPREC_TEST_QUICK") ? 7 : 1;
    long n, all = 0;
    record_run(c, far, &undisturbed);
    for (int at = 0; at < SCRIPT; at++)
        for (n = 0; n < undisturbed.asked[at]; n += step, all++) run_refused(c, far, &undisturbed, at, n);
    CHECK(all > 10);
}

static mixp_optimizer_desc amsgrad_defaults(void) {
    mixp_optimizer_desc d = mixp_adamw_defaults();
    d.amsgrad = 1;
    return d;
}
static mixp_optimizer_desc adagrad_from_a_sum(void) {
    mixp_optimizer_desc d = mixp_adagrad_defaults();
    d.initial_sum = 0.1;
    return d;
}

static const config configs[] = {
    { "Adam",    mixp_adam_defaults,    MIXP_F32,  MIXP_MOMENT_F32,  MIXP_MOMENT_F32,  MIXP_MASTER_F32,   0 },
    { "AdamW",   mixp_adamw_defaults,   MIXP_BF16, MIXP_MOMENT_8BIT, MIXP_MOMENT_8BIT, MIXP_MASTER_8BIT,  1 },
    { "SGD",     mixp_sgd_defaults,     MIXP_F16,  MIXP_MOMENT_F32,  MIXP_MOMENT_F32,  MIXP_MASTER_F32,   1 },
    { "RMSprop", mixp_rmsprop_defaults, MIXP_BF16, MIXP_MOMENT_BF16, MIXP_MOMENT_BF16, MIXP_MASTER_16BIT, 1 },
    { "Lion",    mixp_lion_defaults,    MIXP_BF16, MIXP_MOMENT_8BIT, MIXP_MOMENT_F32,  MIXP_MASTER_F32,   0 },
    { "Muon",    mixp_muon_defaults,    MIXP_F32,  MIXP_MOMENT_F32,  MIXP_MOMENT_F32,  MIXP_MASTER_F32,   0 },
    { "Muon f32", mixp_muon_defaults,   MIXP_BF16, MIXP_MOMENT_8BIT, MIXP_MOMENT_F32,  MIXP_MASTER_16BIT, 1 },
    { "amsgrad", amsgrad_defaults,      MIXP_BF16, MIXP_MOMENT_8BIT, MIXP_MOMENT_8BIT, MIXP_MASTER_16BIT, 0 },
    { "Adagrad", adagrad_from_a_sum,    MIXP_F32,  MIXP_MOMENT_F32,  MIXP_MOMENT_8BIT, MIXP_MASTER_F32,   0 }
};

static void each_optimizer(int far) {
    for (size_t i = 0; i < sizeof configs / sizeof *configs; i++) each_request(&configs[i], far);
}

static void on_the_host(void) { each_optimizer(0); }
static void on_a_device(void) { each_optimizer(1); }

int main(void) {
    (void)profile_begin, (void)profile_end, (void)profile_print, (void)profile_device;    /* not used */
    RUN(on_the_host);
    RUN(on_a_device);
    return test_report();
}
