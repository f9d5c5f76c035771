/* test_cuda_states.cpp - compact optimizer states, the kinds beside Adam, their third state and cautious
 * decay on the simulated GPU: the CPU's bits, in every schedule and inside a captured step.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "cuda_pair.h"

enum { ROWS = 6, ARRAYS = 8 };

struct Row {
    Pair grad, weight, master, m, v, m_scale, v_scale, third;
    int  split;             /* the master lies beside the weight */
};

struct Set {
    Row             row[ROWS];
    mixp_param_row *rows[2];        /* CPU, GPU */
    mixp_step_state cpu_step, *gpu_step;
};

/* moments: 0 f32, 1 bf16, 2 in blocks; master: of mixp_master_kind, or 3: an f32 weight. */
struct Shape { int64_t n; int m, v, master, off; };
static const Shape shapes[ROWS] = {
    { 8192 + 300, 2, 2, 2, 0 }, { 1000, 1, 1, 1, 0 }, { 8192, 2, 1, 3, 0 },
    { 129, 0, 2, 2, 0 },        { 77, 1, 2, 1, 1 },   { 300, 0, 0, 0, 0 } };

static Pair codes(mixp_dtype dtype, int64_t n, int off) {
    Pair p = empty(dtype, n, off);
    for (int64_t i = 0; i < n; i++) set_code(p, i, 0);
    return p;
}
static Pair moment(int kind, mixp_dtype in_blocks, int64_t n, int off)
{ return codes(kind == 2 ? in_blocks : kind ? MIXP_BF16 : MIXP_F32, n, off); }

static int64_t blocks_in(int64_t n) { return (n + MIXP_STATE_BLOCK - 1) / MIXP_STATE_BLOCK; }

static void set_row(Set &s, int i, int gpu) {
    Row &r = s.row[i];
    mixp_param_row *to = &s.rows[gpu][i];
    Pair *from[ARRAYS] = { &r.grad, &r.weight, &r.master, &r.m, &r.v, &r.m_scale, &r.v_scale, &r.third };
    void *at[ARRAYS];
    for (int k = 0; k < ARRAYS; k++) at[k] = gpu ? from[k]->gpu : from[k]->cpu;
    to->grad = at[0]; to->weight = at[1]; to->master = at[2]; to->m = at[3]; to->v = at[4];
    to->m_scale = (uint8_t *)at[5];
    to->v_scale = (uint8_t *)at[6];
    to->third = (float *)at[7];
    to->count = r.grad.n;
    to->grad_dtype = r.grad.dtype; to->weight_dtype = r.weight.dtype;
    to->master_dtype = r.master.dtype; to->m_dtype = r.m.dtype; to->v_dtype = r.v.dtype;
    to->active = 1;
    to->tensor = (uint64_t)i + 1;
}

static Set set_of(bool v, bool m = true, bool third = false) {
    Set s = {};
    s.rows[0] = (mixp_param_row *)calloc(ROWS, sizeof *s.rows[0]);
    s.rows[1] = (mixp_param_row *)gpu_device->allocate(&gpu_exec, ROWS * sizeof *s.rows[1]);
    memset((void *)s.rows[1], 0, ROWS * sizeof *s.rows[1]);
    s.gpu_step = (mixp_step_state *)gpu_device->allocate(&gpu_exec, sizeof *s.gpu_step);
    memset((void *)s.gpu_step, 0, sizeof *s.gpu_step);
    for (int i = 0; i < ROWS; i++) {
        const Shape &shape = shapes[i];
        const int64_t n = shape.n;
        Row &r = s.row[i];
        r = Row{ numbers(MIXP_BF16, n, 3.0, 0),
                 numbers(shape.master == 3 ? MIXP_F32 : MIXP_BF16, n, 1.0, shape.off),
                 nothing_pair(), nothing_pair(), nothing_pair(), nothing_pair(), nothing_pair(),
                 nothing_pair(), shape.master };
        if (m) r.m = moment(shape.m, MIXP_F8_E4M3, n, shape.off);
        if (third) r.third = codes(MIXP_F32, n, shape.off);
        if (shape.master < 3)
            r.master = codes(shape.master == 0 ? MIXP_F32 : shape.master == 1 ? MIXP_BF16
                                                                               : MIXP_U8, n, 0);
        if (v) r.v = moment(shape.v, MIXP_U8, n, 0);
        if (m && shape.m == 2) r.m_scale = codes(MIXP_U8, blocks_in(n), 0);
        if (v && shape.v == 2) r.v_scale = codes(MIXP_U8, blocks_in(n), 0);
        for (int64_t k = 0; k < blocks_in(n); k++) {    /* any will do for codes of 0 */
            if (r.m_scale.base) set_code(r.m_scale, k, 1);
            if (r.v_scale.base) set_code(r.v_scale, k, 15);
        }
        set_row(s, i, 0);
        set_row(s, i, 1);
    }
    return s;
}

static void each_pair(Set &s, void (*what)(Pair &)) {
    WAIT();
    for (int i = 0; i < ROWS; i++) {
        Row &r = s.row[i];
        Pair *all[ARRAYS] = { &r.grad, &r.weight, &r.master, &r.m, &r.v, &r.m_scale, &r.v_scale, &r.third };
        for (int k = 0; k < ARRAYS; k++)
            if (all[k]->base) what(*all[k]);
    }
}
static void check(Pair &p) { same_but_nan(p); }

static void drop(Set &s) {
    each_pair(s, finish);
    gpu_device->release(&gpu_exec, s.rows[1]);
    gpu_device->release(&gpu_exec, s.gpu_step);
    free(s.rows[0]);
}

static mixp_step_plan plan_of(mixp_optimizer_kind kind, int cautious) {
    mixp_step_plan p;
    memset((void *)&p, 0, sizeof p);
    p.kind = kind;
    p.cautious = cautious;
    p.seed = 99;
    p.small_states = 1;
    p.check = p.gathered = 1;
    p.n_groups = 1;
    p.groups[0].lr = 0.01;
    p.groups[0].beta1 = 0.9;
    p.groups[0].beta2 = 0.99;
    p.groups[0].eps = 1e-8;
    p.groups[0].weight_decay = 0.1;
    p.groups[0].momentum = 0.9;
    return p;
}

static void gradients(Set &s, int bad) {
    WAIT();
    for (int i = 0; i < ROWS; i++)
        for (int64_t k = 0; k < s.row[i].grad.n; k++)
            set_value(s.row[i].grad, k, ldexp(random_normal(), (int)(random_u64() % 24) - 16));
    if (!bad) return;
    set_value(s.row[0].grad, 8200, NAN);
    set_value(s.row[3].grad, 128, INFINITY);
}

static void step(Set &s, const mixp_step_plan &plan) {
    BOTH(prepare(X, args_prepare(&plan, on_gpu ? s.gpu_step : &s.cpu_step, NULL)));
    BOTH(update(X, args_update(&plan, s.rows[on_gpu], ROWS, on_gpu ? s.gpu_step : &s.cpu_step)));
}

/* Four steps, the third with a NaN and an Inf that are applied, and one that is skipped. */
static void train(mixp_optimizer_kind kind, int cautious, int third = 0, double momentum = 0.9) {
    Set s = set_of(kind != MIXP_OPTIMIZER_SGD && kind != MIXP_OPTIMIZER_LION,
                   kind != MIXP_OPTIMIZER_ADAGRAD && momentum > 0, third);
    mixp_step_plan plan = plan_of(kind, cautious);
    plan.amsgrad = third && kind != MIXP_OPTIMIZER_RMSPROP;
    plan.centered = third && kind == MIXP_OPTIMIZER_RMSPROP;
    plan.groups[0].momentum = momentum;
    plan.groups[0].momentum_decay = 4e-3;
    plan.groups[0].lr_decay = 0.1;
    for (int i = 0; i < 5; i++) {
        gradients(s, i == 2);
        WAIT();
        s.gpu_step->stats.found_inf = s.cpu_step.stats.found_inf = i == 3;
        step(s, plan);
        each_pair(s, check);
    }
    CHECK_INT(s.cpu_step.skipped, 1);
    CHECK_INT(s.gpu_step->skipped, 1);
    drop(s);
}

static void adamw_body(void) { train(MIXP_OPTIMIZER_ADAMW, 0); }
static void adamw(void) { in_all_schedules(adamw_body); }
static void adamw_cautious_body(void) { train(MIXP_OPTIMIZER_ADAMW, 1); }
static void adamw_cautious(void) { in_all_schedules(adamw_cautious_body); }
static void sgd_body(void) { train(MIXP_OPTIMIZER_SGD, 0); }
static void sgd(void) { in_all_schedules(sgd_body); }
static void rmsprop_body(void) { train(MIXP_OPTIMIZER_RMSPROP, 0); }
static void rmsprop(void) { in_all_schedules(rmsprop_body); }
static void lion_body(void) { train(MIXP_OPTIMIZER_LION, 1); }
static void lion(void) { in_all_schedules(lion_body); }
static void nadam_body(void) { train(MIXP_OPTIMIZER_NADAM, 0); }
static void nadam(void) { in_all_schedules(nadam_body); }
static void radam_body(void) { train(MIXP_OPTIMIZER_RADAM, 0); }
static void radam(void) { in_all_schedules(radam_body); }
static void adamax_body(void) { train(MIXP_OPTIMIZER_ADAMAX, 0); }
static void adamax(void) { in_all_schedules(adamax_body); }
static void adagrad_body(void) { train(MIXP_OPTIMIZER_ADAGRAD, 0); }
static void adagrad(void) { in_all_schedules(adagrad_body); }
static void amsgrad_body(void) { train(MIXP_OPTIMIZER_ADAMW, 1, 1); }
static void amsgrad(void) { in_all_schedules(amsgrad_body); }
static void centered_body(void) {
    train(MIXP_OPTIMIZER_RMSPROP, 0, 1);
    train(MIXP_OPTIMIZER_RMSPROP, 0, 1, 0.0);
}
static void centered(void) { in_all_schedules(centered_body); }

/* A skipped step leaves every byte of every kind. */
static std::vector<unsigned char> bytes_seen;
static void collect(Pair &p) {
    const unsigned char *from = (const unsigned char *)p.gpu;
    size_t bytes = (size_t)p.n * mixp_dtype_size(p.dtype);
    bytes_seen.insert(bytes_seen.end(), from, from + bytes);
}
static void skipped_body(void) {
    Set s = set_of(true);
    mixp_step_plan plan = plan_of(MIXP_OPTIMIZER_ADAMW, 0);
    step(s, plan);
    bytes_seen.clear();
    each_pair(s, collect);
    std::vector<unsigned char> before = bytes_seen;
    s.gpu_step->stats.found_inf = s.cpu_step.stats.found_inf = 1;
    step(s, plan);
    bytes_seen.clear();
    each_pair(s, collect);
    CHECK(before == bytes_seen);
    each_pair(s, check);
    drop(s);
}
static void skipped(void) { in_all_schedules(skipped_body); }

/* How many updates would be lost in the weight's dtype alone: the CPU's counts, added to. */
static void tallies_body(void) {
    Set s = set_of(true);
    mixp_step_plan plan = plan_of(MIXP_OPTIMIZER_ADAMW, 0);
    mixp_lost cpu[ROWS] = {}, *gpu;
    gpu = (mixp_lost *)gpu_device->allocate(&gpu_exec, sizeof cpu);
    CHECK_INT(gpu_device->upload(&gpu_exec, gpu, cpu, sizeof cpu), MIXP_OK);
    for (int i = 0; i < 2; i++) {
        mixp_update_args k;
        gradients(s, 0);
        BOTH(prepare(X, args_prepare(&plan, on_gpu ? s.gpu_step : &s.cpu_step, NULL)));
        BOTH(update(X, (k = *args_update(&plan, s.rows[on_gpu], ROWS,
                                         on_gpu ? s.gpu_step : &s.cpu_step),
                        k.lost = on_gpu ? gpu : cpu, &k)));
        each_pair(s, check);
        CHECK(memcmp(gpu, cpu, sizeof cpu) == 0);
    }
    int64_t updates = 0, lost = 0;
    for (const mixp_lost &one : cpu) {
        updates += one.updates;
        lost += one.lost;
    }
    CHECK(updates > 10000 && lost > 0 && lost < updates);
    gpu_device->release(&gpu_exec, gpu);
    drop(s);
}
static void tallies(void) { in_all_schedules(tallies_body); }

/* Replays of a captured step draw new numbers: the device counts the steps. */
static void captured_body(void) {
    Set s = set_of(true);
    mixp_step_plan plan = plan_of(MIXP_OPTIMIZER_ADAMW, 0);
    void *graph = NULL;
    WAIT();
    CHECK_INT(gpu_device->capture_begin(&gpu_exec), MIXP_OK);
    on_gpu = 1;
    GPU_SAYS(prepare(X, args_prepare(&plan, s.gpu_step, NULL)), MIXP_OK);
    GPU_SAYS(update(X, args_update(&plan, s.rows[1], ROWS, s.gpu_step)), MIXP_OK);
    CHECK_INT(gpu_device->capture_end(&gpu_exec, &graph), MIXP_OK);
    for (int i = 0; i < 3; i++) {
        gradients(s, 0);
        CHECK_INT(gpu_device->replay(&gpu_exec, graph, (uint64_t)i), MIXP_OK);
        on_gpu = 0;
        cpu_kernels->prepare(X, args_prepare(&plan, &s.cpu_step, NULL));
        cpu_kernels->update(X, args_update(&plan, s.rows[0], ROWS, &s.cpu_step));
        each_pair(s, check);
    }
    gpu_device->graph_free(&gpu_exec, graph);
    drop(s);
}
static void captured(void) { in_all_schedules(captured_body); }

int main(void) {
    cudasim::processors = 1;            /* blocks have several chunks */
    RUN(adamw);
    RUN(adamw_cautious);
    RUN(sgd);
    RUN(rmsprop);
    RUN(lion);
    RUN(nadam);
    RUN(radam);
    RUN(adamax);
    RUN(adagrad);
    RUN(amsgrad);
    RUN(centered);
    RUN(skipped);
    RUN(tallies);
    RUN(captured);
    return test_report();
}
