/* test_cuda_optimizers.cpp - statistics, clip and optimizer steps on the simulated GPU, compared
 * with the CPU: the same bits, except the norm, whose relative error is below 2^-22.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "cuda_pair.h"

/* --- a table of parameters, on both sides ------------------------------------------------ */

enum { MOST = 12 };         /* parameters with arrays of their own */

struct Param { Pair weight, master, grad, m, v, low_f16, low_bf16, missed; };

struct Table {
    int64_t count;
    Param   p[MOST];
    mixp_param_row *rows[2];    /* CPU, GPU */
};

static void *both(bool gpu, Pair &p) { return gpu ? p.gpu : p.cpu; }

static void set_row(Table &t, int64_t i, int gpu) {
    Param &p = t.p[i];
    mixp_param_row *r = &t.rows[gpu][i];
    r->weight = both(gpu, p.weight); r->grad = both(gpu, p.grad);
    r->master = (float *)both(gpu, p.master);
    r->m = (float *)both(gpu, p.m); r->v = (float *)both(gpu, p.v);
    r->low_f16 = (mixp_f16 *)both(gpu, p.low_f16);
    r->low_bf16 = (mixp_bf16 *)both(gpu, p.low_bf16);
    r->missed = (int64_t *)both(gpu, p.missed);
    r->count = p.grad.n;
    r->weight_dtype = p.weight.dtype; r->grad_dtype = p.grad.dtype;
    r->active = 1;
}

static Table table(int64_t count) {
    Table t = {};
    t.count = count;
    t.rows[0] = (mixp_param_row *)calloc((size_t)count, sizeof *t.rows[0]);
    t.rows[1] = (mixp_param_row *)gpu_device->allocate(&gpu_exec, (size_t)count *
                                                       sizeof *t.rows[1]);
    memset((void *)t.rows[1], 0, (size_t)count * sizeof *t.rows[1]);
    return t;
}
static void sync_row(Table &t, int64_t i) {
    set_row(t, i, 0);
    set_row(t, i, 1);
}
/* Row i with nothing but a gradient. */
static void gradient(Table &t, int64_t i, mixp_dtype dtype, int64_t n, double scale, int off) {
    t.p[i].grad = numbers(dtype, n, scale, off);
    sync_row(t, i);
}
static void set_active(Table &t, int64_t i, int active)
{ t.rows[0][i].active = t.rows[1][i].active = active; }

static void compare(Table &t) {
    for (int i = 0; i < MOST && i < t.count; i++) {
        Pair *all = &t.p[i].weight;
        for (int k = 0; k < 8; k++)
            if (all[k].base) same_but_nan(all[k]);
    }
}
static void drop(Table &t) {
    for (int i = 0; i < MOST && i < t.count; i++) {
        Pair *all = &t.p[i].weight;
        for (int k = 0; k < 8; k++)
            if (all[k].base) finish(all[k]);
    }
    gpu_device->release(&gpu_exec, t.rows[1]);
    free(t.rows[0]);
}

/* A block of plain bytes on both sides. */
template <class T> struct Twin {
    T *gpu, cpu;
    Twin() : gpu((T *)gpu_device->allocate(&gpu_exec, sizeof(T))) {
        memset((void *)gpu, 0, sizeof(T));
        memset((void *)&cpu, 0, sizeof(T));
    }
    void release() { WAIT(); gpu_device->release(&gpu_exec, gpu); }
    T *at() { return on_gpu ? gpu : &cpu; }
    void set(const T &v) {
        WAIT();
        memcpy((void *)gpu, &v, sizeof v);
        memcpy((void *)&cpu, &v, sizeof v);
    }
    bool same() { WAIT(); return memcmp(gpu, &cpu, sizeof cpu) == 0; }
};
typedef Twin<mixp_step_state> Step;
typedef Twin<mixp_scaler_state> Scaler;

static mixp_param_row *rows_of(Table &t) { return t.rows[on_gpu]; }

static Pair zeros(mixp_dtype dtype, int64_t n, int off) {
    Pair p = empty(dtype, n, off);
    for (int64_t i = 0; i < n; i++) set_value(p, i, 0.0);
    return p;
}

/* --- gather ------------------------------------------------------------------------------ */

static void same_stats(Step &step) {
    WAIT();
    const mixp_grad_stats &g = step.gpu->stats, &c = step.cpu.stats;
    if (std::isfinite(c.norm)) CHECK_NEAR(g.norm, c.norm, ldexp(c.norm, -22));
    else CHECK(std::isnan(c.norm) ? std::isnan(g.norm) : g.norm == c.norm);
    CHECK_INT(mixp_bits_of_f32(g.largest), mixp_bits_of_f32(c.largest));
    CHECK_INT(g.found_inf, c.found_inf);
    CHECK_INT(g.bad_row, c.bad_row);
    CHECK_INT(g.bad_element, c.bad_element);
    CHECK_INT(g.bad_is_nan, c.bad_is_nan);
    CHECK(step.gpu->clipped == step.cpu.clipped);
    for (size_t i = 0; i < sizeof g; i++)
        seen_hash = (seen_hash ^ ((const unsigned char *)&g)[i]) * 1099511628211u;
}

static void gather_with(Table &t, float scale, int unscale) {
    Step step;
    Pair s = empty(MIXP_F32, 1, 0);
    set_value(s, 0, scale);
    memset((void *)&step.gpu->stats, 0xFF, sizeof step.gpu->stats);
    BOTH(grad_stats(X, args_grad_stats(rows_of(t), t.count,
            scale > 0.0f ? AT(const float, s) : NULL, unscale,
                step.at(), NULL, NULL)));
    same_stats(step);
    compare(t);
    step.release();
    finish(s);
}

static Table mixed_gradients() {
    Table t = table(9);
    gradient(t, 0, MIXP_F32, 20001, 3.0, 0);
    gradient(t, 1, MIXP_F16, 8193, 100.0, 0);
    gradient(t, 2, MIXP_BF16, 7, 1.0, 0);
    gradient(t, 3, MIXP_F32, 0, 1.0, 0);
    gradient(t, 4, MIXP_F16, 1, 1.0, 3);
    gradient(t, 5, MIXP_BF16, 8192, 0.01, 1);
    gradient(t, 6, MIXP_F32, 300, 1e3, 1);
    gradient(t, 7, MIXP_F16, 64, 1e4, 0);
    gradient(t, 8, MIXP_F32, 8, 1.0, 0);
    set_active(t, 6, 0);
    return t;
}
static void gather_plain_body(void) {
    Table t = mixed_gradients();
    gather_with(t, 0.0f, 0);
    gather_with(t, 65536.0f, 0);
    gather_with(t, 1024.0f, 1);
    gather_with(t, 0.5f, 1);
    drop(t);
}
static void gather_plain(void) { in_all_schedules(gather_plain_body); }

static void gather_bad_body(void) {
    static const int at[][3] = {        /* row, element, kind: Inf, NaN, -Inf, signalling NaN */
        { 8, 7, 0 }, { 5, 8191, 1 }, { 5, 17, 2 }, { 1, 8192, 3 }, { 0, 20000, 1 },
        { 0, 9000, 0 }, { 0, 8999, 1 }, { 0, 0, 2 }, { 6, 1, 1 } };
    static const uint32_t codes[][4] = {
        { 0x7F800000u, 0x7FC00123u, 0xFF800000u, 0xFF812345u },
        { 0x7C00u, 0x7E01u, 0xFC00u, 0xFD23u }, { 0x7F80u, 0x7FC1u, 0xFF80u, 0xFFA3u } };
    Table t = mixed_gradients();
    for (auto &bad : at) {
        Pair &g = t.p[bad[0]].grad;
        WAIT();
        set_code(g, bad[1], codes[g.dtype == MIXP_F32 ? 0 : g.dtype == MIXP_F16 ? 1 : 2][bad[2]]);
        gather_with(t, 256.0f, 0);
    }
    gather_with(t, 256.0f, 1);
    drop(t);
}
static void gather_bad(void) { in_all_schedules(gather_bad_body); }

/* Finite until unscaled, in f32 and where f16 holds no more. */
static void gather_overflow_body(void) {
    Table t = table(3);
    gradient(t, 0, MIXP_F16, 5000, 1.0, 0);
    gradient(t, 1, MIXP_F16, 3000, 1.0, 0);
    gradient(t, 2, MIXP_F32, 3000, 1.0, 0);
    set_value(t.p[1].grad, 2999, 60000.0);
    gather_with(t, 0.5f, 0);
    gather_with(t, 0.5f, 1);
    WAIT();
    set_value(t.p[1].grad, 2999, 1.0);
    set_value(t.p[2].grad, 100, 3e38);
    set_value(t.p[2].grad, 2000, -3e38);
    gather_with(t, 0.25f, 0);
    drop(t);
}
static void gather_overflow(void) { in_all_schedules(gather_overflow_body); }

/* Squares that f32 does not hold. */
static void gather_extremes_body(void) {
    Table t = table(3);
    gradient(t, 0, MIXP_F32, 3000, 1e30, 0);
    gradient(t, 1, MIXP_F32, 3000, 1e-30, 0);
    gradient(t, 2, MIXP_BF16, 3000, 1e-40, 0);
    gather_with(t, 0.0f, 0);
    set_active(t, 0, 0);
    gather_with(t, 0.0f, 0);
    set_active(t, 1, 0);
    gather_with(t, 0.0f, 0);
    set_active(t, 2, 0);
    gather_with(t, 0.0f, 0);            /* nothing at all */
    drop(t);
}
static void gather_extremes(void) { in_all_schedules(gather_extremes_body); }

/* More rows than two windows: each row is a piece of one array. */
static Table many_rows(Pair &all, int64_t count) {
    Table t = table(count);
    int64_t at = 0;
    for (int64_t i = 0; i < count; i++) {
        t.rows[0][i].count = t.rows[1][i].count = i % 5;
        t.rows[0][i].grad = (float *)all.cpu + at;
        t.rows[1][i].grad = (float *)all.gpu + at;
        set_active(t, i, i % 7 == 3);
        at += i % 5;
    }
    return t;
}
static void gather_many_body(void) {
    Pair all = numbers(MIXP_F32, 1100, 1.0, 0);
    Table t = many_rows(all, 540);
    Step step;
    for (int k = 0; k < 2; k++) {
        if (k) set_value(all, 1054, INFINITY);
        BOTH(grad_stats(X, args_grad_stats(rows_of(t), t.count, NULL, k, step.at(), NULL,
                NULL)));
        same_stats(step);
        CHECK_INT(step.cpu.stats.bad_row, k ? 528 : -1);
    }
    same_bits(all);
    step.release();
    drop(t);
    finish(all);
}
static void gather_many(void) { in_all_schedules(gather_many_body); }

/* More chunks than bins. */
static void gather_long_body(void) {
    const int64_t n = (inside_limits().bins + 2) * inside_limits().chunk_elements + 5;
    Table t = table(1);
    Step step;
    t.p[0].grad = empty(MIXP_BF16, n, 0);
    memset(t.p[0].grad.gpu, 0, (size_t)n * 2);
    memset(t.p[0].grad.cpu, 0, (size_t)n * 2);
    sync_row(t, 0);
    for (int64_t i = 3; i < n; i += 100003) set_value(t.p[0].grad, i, random_normal());
    set_value(t.p[0].grad, n - 1, NAN);
    BOTH(grad_stats(X, args_grad_stats(rows_of(t), t.count, NULL, 0, step.at(), NULL, NULL)));
    same_stats(step);
    CHECK_INT(step.cpu.stats.bad_element, n - 1);
    step.release();
    t.p[0].grad.n = 0;                  /* not hashed */
    drop(t);
}
static void gather_long(void) {         /* takes a while: in one schedule */
    cudasim::schedule = cudasim::reversed;
    pair_open();
    gather_long_body();
    pair_close();
    cudasim::schedule = cudasim::forward;
}

/* --- clip -------------------------------------------------------------------------------- */

static void clip_with(Table &t, double norm, int found_inf, double max_norm) {
    Step step;
    mixp_step_state s;
    memset((void *)&s, 0, sizeof s);
    s.stats.norm = norm; s.stats.found_inf = found_inf; s.clipped = 1.0f;
    step.set(s);
    BOTH(clip(X, args_clip(rows_of(t), t.count, max_norm, step.at())));
    CHECK(step.same());
    compare(t);
    step.release();
}
static void clip_body(void) {
    Table t = mixed_gradients();
    clip_with(t, 1234.5, 0, 1.0);
    clip_with(t, 3.0, 0, 2.9);
    clip_with(t, 3.0, 0, 4.0);
    clip_with(t, 3.0, 1, 1.0);
    clip_with(t, NAN, 0, 1.0);
    drop(t);
}
static void clip(void) { in_all_schedules(clip_body); }

/* --- prepare, advance -------------------------------------------------------------------- */

static mixp_step_plan plan_of(mixp_optimizer_kind kind) {
    mixp_step_plan p;
    memset((void *)&p, 0, sizeof p);
    p.kind = kind;
    p.check = 1; p.gathered = 1; p.n_groups = 3;
    p.schedule.kind = MIXP_SCHEDULE_COSINE; p.schedule.warmup = 3; p.schedule.total = 20;
    p.schedule.min_factor = 0.1;
    for (int g = 0; g < 3; g++) {
        mixp_param_group *q = &p.groups[g];
        q->lr = 0.01 / (g + 1); q->beta1 = 0.9 - 0.1 * g; q->beta2 = 0.95; q->eps = 1e-8;
        q->weight_decay = 0.1 * g; q->momentum = 0.9 - 0.3 * g; q->nesterov = g == 1;
        q->dampening = g == 2 ? 0.25 : 0.0;
    }
    return p;
}
static mixp_scaler_state scaler_state(float scale) {
    mixp_scaler_state s;
    memset((void *)&s, 0, sizeof s);
    s.scale = scale; s.hysteresis_left = 1;
    return s;
}
static mixp_step_state step_state(void) {
    mixp_step_state s;
    memset((void *)&s, 0, sizeof s);
    s.clipped = 1.0f;
    s.at_unscale.bad_row = -1;
    return s;
}
template <class T> static void peeked(Twin<T> &twin) {
    T seen;
    WAIT();
    CHECK_INT(gpu_device->peek(&gpu_exec, &seen, twin.gpu, sizeof seen), MIXP_OK);
    CHECK(memcmp(&seen, &twin.cpu, sizeof seen) == 0);
}

static void prepare_body(void) {
    Step step;
    Scaler scaler;
    mixp_scaler_rule rule;
    CHECK_INT(mixp_scaler_rule_resolve(NULL, &rule), MIXP_OK);
    rule.growth_interval = 2;
    for (int i = 0; i < 56; i++) {
        mixp_step_plan p = plan_of((mixp_optimizer_kind)(i % (MIXP_OPTIMIZER_MUON + 1)));
        mixp_step_state s = step_state();
        p.schedule.kind = (mixp_schedule_kind)(i % (MIXP_SCHEDULE_FUNCTION + 1));
        p.schedule.gamma = 0.97; p.schedule.every = 2; p.schedule.decay = 9;
        p.schedule.power = 2.5; p.schedule.growth = 2; p.schedule.milestones[0] = 7;
        p.schedule.three_phase = i % 3 == 1; p.schedule.linear = i % 5 == 1;
        if (i % 28 == 5) p.schedule.pct_start = 0.21;
        p.factors_from = i - i / 6 - 9;
        for (int k = 0; k < MIXPI_FACTORS; k++) p.factors[k] = 1.0 / (k + 3);
        p.maximize = i % 4 == 2; p.decoupled = i % 8 == 3;
        for (int g = 0; g < 3; g++) {
            p.groups[g].momentum_decay = 4e-3 * (g + 1); p.groups[g].lr_decay = 0.1 * g;
        }
        p.max_norm = i % 4 ? 0.0 : 1.0;
        p.check = i % 5 != 4; p.unscaled = i % 6 == 5; p.gathered = i % 8 != 7;
        p.look_only = i == 10;
        if (i) s = step.cpu; else scaler.set(scaler_state(1024.0f));
        s.stats.norm = 0.5 * i; s.stats.found_inf = i % 7 == 6;
        step.set(s);
        BOTH(prepare(X, args_prepare(&p, step.at(), i == 3 ? NULL : scaler.at())));
        CHECK(step.same());
        CHECK(scaler.same());
        peeked(step);
        if (i != 3) peeked(scaler);
        BOTH(advance(X, args_advance(&rule, scaler.at())));
        CHECK(scaler.same());
        peeked(scaler);
    }
    step.release();
    scaler.release();
}
static void prepare(void) { in_all_schedules(prepare_body); }

/* Under a guard that sees the gradients: overflows in rows of one to six, and clean steps, seen or not. */
static void guarded_advance_body(void) {
    Scaler scaler;
    Pair   seen = zeros(MIXP_F32, sizeof(mixp_look) / sizeof(float), 0);
    mixp_scaler_rule rule;
    int    low = 0;
    CHECK_INT(mixp_scaler_rule_resolve(NULL, &rule), MIXP_OK);
    scaler.set(scaler_state(16777216.0f));
    for (int i = 0; i < 120; i++) {
        mixp_scaler_state s = scaler.cpu;
        mixp_look look;
        const int bad = i % 7 < i / 7 % 6 + 1;
        memset((void *)&look, 0, sizeof look);
        look.count = 10;
        look.nonfinite = bad;
        look.largest = (float)(exp(4.0 * random_normal()));
        for (int n = 0; n < (int)(sizeof look / sizeof(float)); n++) {
            float word;
            memcpy(&word, (char *)&look + 4 * n, 4);
            set_value(seen, n, (double)word);
        }
        s.found_inf = bad;
        s.loss_bad = i % 31 == 30;
        if (i % 14 == 0) s.scale = 16777216.0f;
        scaler.set(s);
        mixp_advance_args k = *args_advance(&rule, scaler.at());
        k.forgives = 1;
        k.falls = i / 40;
        on_gpu = 1; k.scaler = scaler.at(); k.narrow = i % 5 ? AT(const mixp_look, seen) : NULL;
        CHECK_INT(gpu_kernels->advance(X, &k), MIXP_OK);
        on_gpu = 0; k.scaler = scaler.at(); k.narrow = i % 5 ? AT(const mixp_look, seen) : NULL;
        CHECK_INT(cpu_kernels->advance(X, &k), MIXP_OK);
        CHECK(scaler.same());
        peeked(scaler);
        low += scaler.cpu.ahead > scaler.cpu.scale;
    }
    CHECK(low > 5);
    scaler.release();
    finish(seen);
}
static void guarded_advance(void) { in_all_schedules(guarded_advance_body); }

/* Spikes of norms and losses, and the scale that is set from the largest gradients: the same bytes,
 * window included; what a stopped or captured step does with them is the host's affair. */
static void spikes_body(void) {
    enum { WINDOW = 12 };
    Step step;
    Scaler scaler;
    Pair window = zeros(MIXP_F64, 2 * WINDOW, 0), loss = zeros(MIXP_F32, 1, 0),
         backward = zeros(MIXP_F32, sizeof(mixp_look) / sizeof(float), 0);
    mixp_scaler_desc d;
    mixp_scaler_rule rule;
    memset((void *)&d, 0, sizeof d);
    d.rule = MIXP_RULE_PREDICTIVE;
    d.growth_interval = 3;
    CHECK_INT(mixp_scaler_rule_resolve(&d, &rule), MIXP_OK);
    scaler.set(scaler_state(65536.0f));
    step.set(step_state());
    for (int i = 0; i < 60; i++) {
        mixp_step_plan p = plan_of(MIXP_OPTIMIZER_ADAMW);
        mixp_step_state s = step.cpu;
        p.spike.of = MIXP_SPIKE_BOTH; p.spike.window = WINDOW; p.spike.z = 4.0;
        p.spike.max_in_a_row = 3;
        p.look_only = i % 17 == 5;
        s.stats.norm = 2.0 + 0.1 * random_normal() + (i % 13 == 12 || i > 50 ? 20.0 : 0.0);
        s.stats.found_inf = i % 29 == 28;
        s.stats.largest = (float)(exp(3.0 * random_normal()));
        step.set(s);
        set_value(loss, 0, i == 33 ? INFINITY : 1.0 + 0.1 * random_normal() + 9.0 * (i % 19 == 18));
        set_value(backward, 0, s.stats.largest * (i % 4 ? 3e4 : 1e9));
        on_gpu = 1; p.spike_window = AT(double, window); p.loss = AT(const float, loss);
        CHECK_INT(gpu_kernels->prepare(X, args_prepare(&p, step.at(), scaler.at())), MIXP_OK);
        on_gpu = 0; p.spike_window = AT(double, window); p.loss = AT(const float, loss);
        CHECK_INT(cpu_kernels->prepare(X, args_prepare(&p, step.at(), scaler.at())), MIXP_OK);
        CHECK(step.same());
        CHECK(scaler.same());
        same_bits(window);
        peeked(step);
        BOTH(advance(X, args_advance_looked(&rule, scaler.at(),
                                            i % 4 ? AT(const mixp_look, backward) : NULL)));
        CHECK(scaler.same());
        peeked(scaler);
    }
    CHECK(step.cpu.skipped > 8);
    CHECK_INT(step.cpu.applied + step.cpu.skipped, step.cpu.steps);
    CHECK(scaler.cpu.peak > 0.0f);
    step.release();
    scaler.release();
    finish(window); finish(loss); finish(backward);
}
static void spikes(void) { in_all_schedules(spikes_body); }

/* Statistics and scalars in one launch: every byte is what the two leave, and the mirrors follow. */
static void gather_prepares_body(void) {
    Table t = mixed_gradients();
    Step two, one;
    Scaler of_two, of_one;
    of_two.set(scaler_state(256.0f));
    of_one.set(scaler_state(256.0f));
    two.set(step_state());
    one.set(step_state());
    for (int i = 0; i < 12; i++) {
        mixp_step_plan p = plan_of((mixp_optimizer_kind)(i % 3));
        int looks = i % 4 == 1, with = i != 3;
        p.max_norm = i % 2 ? 0.0 : 10.0;
        p.look_only = looks;
        p.unscaled = i % 4 == 2;
        if (i == 5) set_value(t.p[1].grad, 8192, INFINITY);
        if (i == 8) set_value(t.p[1].grad, 8192, 1.0);
        BOTH(grad_stats(X, args_grad_stats(rows_of(t), t.count, &of_two.at()->scale, 0,
                two.at(), NULL, NULL)));
        BOTH(prepare(X, args_prepare(&p, two.at(), with ? of_two.at() : NULL)));
        long launches = cudasim::count.launches;
        BOTH(grad_stats(X, args_grad_stats(rows_of(t), t.count, &of_one.at()->scale, 0, one.at(),
                                           &p, with ? of_one.at() : NULL)));
        if (cudasim::simulated) CHECK_INT(cudasim::count.launches, launches + 1);
        same_stats(one);
        CHECK(memcmp(one.gpu, two.gpu, sizeof *one.gpu) == 0);
        CHECK(memcmp(&one.cpu, &two.cpu, sizeof one.cpu) == 0);
        CHECK(memcmp(of_one.gpu, of_two.gpu, sizeof *of_one.gpu) == 0);
        CHECK(of_one.same());
        mixp_step_state seen;
        CHECK_INT(gpu_device->peek(&gpu_exec, &seen, one.gpu, sizeof seen), MIXP_OK);
        CHECK(memcmp(&seen, one.gpu, sizeof seen) == 0);
        if (with) peeked(of_one);
    }
    CHECK_INT(one.gpu->skipped, 2);         /* steps 6 and 7; 5 only looked */
    two.release(); one.release(); of_two.release(); of_one.release();
    drop(t);
}
static void gather_prepares(void) { in_all_schedules(gather_prepares_body); }

/* --- update ------------------------------------------------------------------------------ */

struct Shape { mixp_dtype weight, grad; int64_t n; int master, low, off; };
static const Shape shapes[] = {
    { MIXP_F32, MIXP_F32, 8200, 0, 0, 0 }, { MIXP_F16, MIXP_F16, 100, 1, 0, 0 },
    { MIXP_BF16, MIXP_BF16, 77, 1, 0, 0 }, { MIXP_F32, MIXP_F16, 64, 0, 1, 0 },
    { MIXP_F32, MIXP_BF16, 50, 0, 2, 0 },  { MIXP_F16, MIXP_F32, 33, 0, 3, 0 },
    { MIXP_BF16, MIXP_F16, 129, 0, 0, 1 }, { MIXP_F32, MIXP_F32, 21, 1, 3, 1 },
    { MIXP_F32, MIXP_F32, 5, 0, 0, 0 },    { MIXP_F32, MIXP_F32, 40, 0, 3, 0 } };
enum { SHAPES = sizeof shapes / sizeof *shapes };

/* Rows for an optimizer; row 8 is late, row 9 sits out. cleared: the gradients of some are. */
static Table parameters(int sgd, int cleared) {
    Table t = table(SHAPES);
    for (int i = 0; i < SHAPES; i++) {
        const Shape &s = shapes[i];
        Param &p = t.p[i];
        p.weight = numbers(s.weight, s.n, 1.0, s.off);
        p.grad = numbers(s.grad, s.n, 64.0, 0);
        if (s.master) p.master = numbers(MIXP_F32, s.n, 1.0, 0);
        if (!sgd || i % 2) p.m = zeros(MIXP_F32, s.n, s.off);
        if (!sgd) p.v = zeros(MIXP_F32, s.n, 0);
        if (s.low & 1) p.low_f16 = output(MIXP_F16, s.n, 0);
        if (s.low & 2) p.low_bf16 = output(MIXP_BF16, s.n, 0, s.off);
        if (i >= 7) { p.missed = empty(MIXP_I64, 1, 0); set_code(p.missed, 0, i == 8 ? 2 : 0); }
        sync_row(t, i);
        t.rows[0][i].group = t.rows[1][i].group = i % 3;
        set_active(t, i, i == 9 ? 0 : cleared && i % 4 < 3 ? 2 : 1);
    }
    return t;
}

static void new_gradients(Table &t, double scale) {
    WAIT();
    for (int i = 0; i < t.count; i++)
        for (int64_t k = 0; k < t.p[i].grad.n; k++)
            set_value(t.p[i].grad, k, scale * random_normal());
}

/* Steps of a training run; the third has an overflow. */
static void train(mixp_optimizer_kind kind, int check, int steps) {
    Table t = parameters(kind == MIXP_OPTIMIZER_SGD, 1);
    Step step;
    Scaler scaler;
    mixp_scaler_rule rule;
    mixp_step_plan p = plan_of(kind);
    p.check = check;
    CHECK_INT(mixp_scaler_rule_resolve(NULL, &rule), MIXP_OK);
    step.set(step_state());
    step.gpu->applied = step.cpu.applied = 2;       /* row 8 was there for none of them */
    scaler.set(scaler_state(64.0f));
    for (int i = 0; i < steps; i++) {
        if (i) new_gradients(t, 64.0);
        if (i == 2) set_value(t.p[4].grad, 40, INFINITY);
        if (i == 3) set_active(t, 9, 1);
        BOTH(grad_stats(X, args_grad_stats(rows_of(t), t.count, &scaler.at()->scale, 0,
                step.at(), NULL, NULL)));
        same_stats(step);
        step.gpu->stats.norm = step.cpu.stats.norm;
        BOTH(prepare(X, args_prepare(&p, step.at(), scaler.at())));
        CHECK(step.same());
        BOTH(update(X, args_update(&p, rows_of(t), t.count, step.at())));
        BOTH(advance(X, args_advance(&rule, scaler.at())));
        CHECK(scaler.same());
        compare(t);
        for (int k = 0; k < t.count; k++)
            for (int64_t e = 0; e < t.p[k].grad.n && t.rows[0][k].active == 2; e++)
                if (value_at(t.p[k].grad.gpu, t.p[k].grad.dtype, e) != 0.0)
                    { CHECK(!"cleared"); break; }
    }
    CHECK_INT(step.cpu.skipped, check && steps > 2);
    step.release();
    scaler.release();
    drop(t);
}
static void adam_body(void) { train(MIXP_OPTIMIZER_ADAM, 1, 3); }
static void adam(void) { in_all_schedules(adam_body); }
static void adamw_body(void) { train(MIXP_OPTIMIZER_ADAMW, 1, 5); }
static void adamw(void) { in_all_schedules(adamw_body); }
static void sgd_body(void) { train(MIXP_OPTIMIZER_SGD, 1, 5); }
static void sgd(void) { in_all_schedules(sgd_body); }
/* Inf goes into the weights, as in PyTorch. */
static void unchecked_body(void) { train(MIXP_OPTIMIZER_ADAMW, 0, 3); }
static void unchecked(void) { in_all_schedules(unchecked_body); }

/* After a skipped step every byte is what it was. */
static void skipped_body(void) {
    Table t = parameters(0, 0);
    mixp_step_plan p = plan_of(MIXP_OPTIMIZER_ADAMW);
    mixp_step_state s = step_state();
    Step step;
    std::vector<unsigned char> before, after;
    for (int pass = 0; pass < 2; pass++) {
        std::vector<unsigned char> &to = pass ? after : before;
        s.stats.found_inf = 1;
        step.set(s);
        if (pass) BOTH(prepare(X, args_prepare(&p, step.at(), NULL)));
        if (pass) BOTH(update(X, args_update(&p, rows_of(t), t.count, step.at())));
        WAIT();
        for (int i = 0; i < t.count; i++) {
            Pair *all = &t.p[i].weight;
            for (int k = 0; k < 8; k++)
                for (int64_t b = 0; b < all[k].n * (int64_t)mixp_dtype_size(all[k].dtype); b++)
                    to.push_back(((unsigned char *)all[k].gpu)[b]);
        }
    }
    CHECK(before == after);
    CHECK_INT(step.gpu->skipped, 1);
    step.release();
    drop(t);
}
static void skipped(void) { in_all_schedules(skipped_body); }

/* A captured step, replayed: the overflow of its second run is skipped inside. */
static void captured_body(void) {
    Table t = parameters(0, 1);
    mixp_step_plan p = plan_of(MIXP_OPTIMIZER_ADAMW);
    mixp_scaler_rule rule;
    Step step;
    Scaler scaler;
    void *graph = NULL;
    CHECK_INT(mixp_scaler_rule_resolve(NULL, &rule), MIXP_OK);
    step.set(step_state());
    scaler.set(scaler_state(64.0f));
    scratch_memory[1] = gpu_device->allocate(&gpu_exec, (size_t)1 << 20);
    WAIT();
    gpu_exec.scratch = [](void *, size_t) { return scratch_memory[1]; };
    CHECK_INT(gpu_device->capture_begin(&gpu_exec), MIXP_OK);
    long waits = cudasim::count.waits;
    on_gpu = 1;
    GPU_SAYS(grad_stats(X, args_grad_stats(rows_of(t), t.count, &scaler.at()->scale, 0,
            step.at(), &p, scaler.at())),
             MIXP_OK);
    GPU_SAYS(update(X, args_update(&p, rows_of(t), t.count, step.at())), MIXP_OK);
    GPU_SAYS(advance(X, args_advance(&rule, scaler.at())), MIXP_OK);
    CHECK_INT(cudasim::count.waits, waits);
    CHECK_INT(gpu_device->capture_end(&gpu_exec, &graph), MIXP_OK);
    for (int i = 0; i < 3; i++) {
        if (i) new_gradients(t, 64.0);
        if (i == 1) set_value(t.p[0].grad, 8199, -INFINITY);
        CHECK_INT(gpu_device->replay(&gpu_exec, graph, (uint64_t)i), MIXP_OK);
        on_gpu = 0;
        cpu_kernels->grad_stats(X, args_grad_stats(rows_of(t), t.count,
                &scaler.at()->scale, 0, step.at(), &p,
                            scaler.at()));
        cpu_kernels->update(X, args_update(&p, rows_of(t), t.count, step.at()));
        cpu_kernels->advance(X, args_advance(&rule, scaler.at()));
        compare(t);
        CHECK(scaler.same());
    }
    CHECK_INT(step.gpu->skipped, 1);
    gpu_device->graph_free(&gpu_exec, graph);
    gpu_exec.scratch = test_scratch;
    step.release();
    scaler.release();
    drop(t);
}
static void captured(void) { in_all_schedules(captured_body); }

static void refused_body(void) {
    Step step;
    mixp_exec closed = gpu_exec;
    closed.state = NULL;
    CHECK_INT(gpu_kernels->grad_stats(&closed, args_grad_stats(NULL, 0, NULL, 0,
            step.gpu, NULL, NULL)), MIXP_ERR_ORDER);
    closed = gpu_exec;
    closed.scratch = NULL;
    CHECK_INT(gpu_kernels->grad_stats(&closed, args_grad_stats(NULL, 0, NULL, 0,
            step.gpu, NULL, NULL)), MIXP_ERR_MEMORY);
    BOTH(grad_stats(X, args_grad_stats(NULL, 0, NULL, 0, step.at(), NULL, NULL)));
    same_stats(step);
    step.release();
}
static void refused(void) { in_all_schedules(refused_body); }

int main(void) {
    RUN(gather_plain);
    cudasim::processors = 1;            /* blocks have several chunks */
    RUN(gather_bad);
    RUN(gather_overflow);
    RUN(gather_extremes);
    RUN(gather_many);
    RUN(gather_long);
    RUN(clip);
    RUN(prepare);
    RUN(guarded_advance);
    RUN(spikes);
    RUN(gather_prepares);
    RUN(adam);
    RUN(adamw);
    RUN(sgd);
    RUN(unchecked);
    RUN(skipped);
    RUN(captured);
    RUN(refused);
    return test_report();
}
