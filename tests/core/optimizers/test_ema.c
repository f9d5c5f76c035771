/* test_ema.c - averages of weights: values against a loop in double, skipped steps, the swap for an
 * evaluation, checkpoints, parameters added later, errors.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#define _XOPEN_SOURCE 700
#include "mixprec.h"
#include "test.h"
#include "new_optimizer.h"
#include "numbers.h"
#include <stdlib.h>
#include <unistd.h>

enum { ROWS = 68, COLS = 64, COUNT = ROWS * COLS };
static const int64_t shape[2] = { ROWS, COLS };

/* A weight of each kind: f32; f16 with an f32 master; bf16 beside 16 bits; bf16 without a master. */
typedef enum weight_kind { F32_ALONE, F16_MASTER, BF16_SPLIT, BF16_ALONE } weight_kind;
static mixp_dtype dtype_of(weight_kind k)
{ return k == F32_ALONE ? MIXP_F32 : k == F16_MASTER ? MIXP_F16 : MIXP_BF16; }

typedef struct training {
    mixp_context   *ctx;
    mixp_optimizer *opt;
    mixp_scaler    *scaler;
    mixp_tensor    *w, *g;
} training;

static void set(mixp_tensor *t, uint64_t seed, double size) {
    static float values[COUNT];
    random_state = seed;
    for (int i = 0; i < COUNT; i++) values[i] = (float)(size * random_value());
    CHECK_INT(mixp_write(t, values, MIXP_F32, COUNT), MIXP_OK);
}

static training training_of(int isa, weight_kind kind) {
    mixp_optimizer_desc d = mixp_adamw_defaults();
    mixp_context_desc c;
    training m;
    memset(&c, 0, sizeof c);
    memset(&m, 0, sizeof m);
    c.device = isa < 0 ? NULL : mixp_cpu_with((mixp_isa)isa);
    if (isa >= 0 && !c.device) return m;
    d.lr = 0.05;
    d.no_master = kind == BF16_ALONE;
    if (kind == BF16_SPLIT) d.states.master = MIXP_MASTER_16BIT;
    if (kind == BF16_SPLIT) d.states.m = d.states.v = MIXP_MOMENT_8BIT;
    m.ctx = mixp_context_new(&c);
    m.opt = mixp_optimizer_new(m.ctx, &d);
    m.scaler = mixp_scaler_new(m.ctx, NULL);
    CHECK(mixp_scaler_loss_scale(m.scaler) > 0.0f);
    m.w = mixp_param(m.ctx, "w", dtype_of(kind), 2, shape);
    m.g = mixp_param(m.ctx, "g", MIXP_F32, 2, shape);
    set(m.w, 5, 1.0);
    CHECK_INT(mixp_optimizer_add(m.opt, m.w, m.g), MIXP_OK);
    return m;
}

/* A step with the gradients of number t. bad: one of them is Inf. */
static void step(training *m, int t, int bad) {
    set(m->g, (uint64_t)t + 100, 65536.0);
    if (bad) {
        float g[COUNT];
        CHECK_INT(mixp_read(m->g, g, MIXP_F32, COUNT), MIXP_OK);
        g[COUNT - 1] = bits_f32(0x7F800000u);
        CHECK_INT(mixp_write(m->g, g, MIXP_F32, COUNT), MIXP_OK);
    }
    CHECK_INT(mixp_scaler_step(m->scaler, m->opt), MIXP_OK);
    CHECK_INT(mixp_scaler_update(m->scaler), MIXP_OK);
}

static void read_state(const training *m, mixp_state_kind what, float *out)
{ CHECK_INT(mixp_optimizer_read(m->opt, m->w, what, out, COUNT), MIXP_OK); }

static int same(const float *a, const float *b) { return memcmp(a, b, COUNT * sizeof *a) == 0; }

/* The weight that is averaged. */
static void read_weight(const training *m, weight_kind kind, float *out) {
    if (kind == F16_MASTER) read_state(m, MIXP_STATE_MASTER, out);
    else CHECK_INT(mixp_read(m->w, out, MIXP_F32, COUNT), MIXP_OK);
}

/* --- values ---------------------------------------------------------------------------------- */

static void follow(int isa, weight_kind kind, double decay) {
    static double want[COUNT];
    static float w[COUNT], got[COUNT];
    training m = training_of(isa, kind);
    if (!m.ctx) return;
    read_weight(&m, kind, w);
    for (int i = 0; i < COUNT; i++) want[i] = (double)w[i];
    CHECK_INT(mixp_optimizer_set_ema(m.opt, decay), MIXP_OK);
    for (int t = 0; t < 12; t++) {
        const int bad = t % 5 == 3;
        step(&m, t, bad);
        read_weight(&m, kind, w);
        for (int i = 0; i < COUNT && !bad; i++)
            want[i] = decay * want[i] + (1.0 - decay) * (double)w[i];
        read_state(&m, MIXP_STATE_EMA, got);
        for (int i = 0; i < COUNT; i++) CHECK_NEAR(got[i], want[i], 1e-6);
    }
    CHECK_INT(mixp_optimizer_applied(m.opt), 10);
    mixp_context_free(m.ctx);
}

static void test_as_a_loop_in_double(void) {
    static const double decays[] = { 0.0, 0.25, 0.75, 0.99 };
    for (int isa = 0; isa < MIXP_ISA_COUNT; isa++)
        for (int kind = F32_ALONE; kind <= BF16_ALONE; kind++)
            for (int d = 0; d < 4; d++) follow(isa, (weight_kind)kind, decays[d]);
}

static void test_a_skipped_step(void) {
    static float before[COUNT], after[COUNT];
    training m = training_of(-1, F16_MASTER);
    CHECK_INT(mixp_optimizer_set_ema(m.opt, 0.9), MIXP_OK);
    step(&m, 0, 0);
    read_state(&m, MIXP_STATE_EMA, before);
    step(&m, 1, 1);
    CHECK_INT(mixp_scaler_verdict(m.scaler).outcome, MIXP_STEP_SKIPPED);
    read_state(&m, MIXP_STATE_EMA, after);
    CHECK(same(before, after));
    step(&m, 2, 0);
    read_state(&m, MIXP_STATE_EMA, after);
    CHECK(!same(before, after));
    mixp_context_free(m.ctx);
}

/* After the first step, a step takes no memory. */
static void test_no_step_allocates(void) {
    training m = training_of(-1, F32_ALONE);
    CHECK_INT(mixp_optimizer_set_ema(m.opt, 0.9), MIXP_OK);
    step(&m, 0, 0);
    int64_t before = mixp_context_memory(m.ctx).allocations;
    step(&m, 1, 0);
    CHECK_INT(mixp_context_memory(m.ctx).allocations, before);
    mixp_context_free(m.ctx);
}

/* A parameter without a gradient does not move, but its average still moves towards it. One that was
 * added later is averaged from the next call on. Another decay counts from then on. */
static void test_added_later(void) {
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_optimizer_desc d = mixp_sgd_defaults();
    const int64_t one = 1;
    float w[2] = { 1.0f, 4.0f }, g[2] = { 1.0f, 2.0f }, got;
    d.lr = 1.0;
    mixp_optimizer *opt = mixp_optimizer_new(ctx, &d);
    mixp_tensor *a = mixp_view(ctx, "a", MIXP_F32, 1, &one, &w[0]);
    mixp_tensor *b = mixp_view(ctx, "b", MIXP_F32, 1, &one, &w[1]);
    CHECK_INT(mixp_optimizer_add(opt, a, mixp_view(ctx, "ga", MIXP_F32, 1, &one, &g[0])), MIXP_OK);
    CHECK_INT(mixp_optimizer_set_ema(opt, 0.5), MIXP_OK);
    CHECK_INT(mixp_optimizer_add(opt, b, mixp_view(ctx, "gb", MIXP_F32, 1, &one, &g[1])), MIXP_OK);
    CHECK_INT(mixp_optimizer_step(opt), MIXP_OK);      /* a 1 -> 0, b 4 -> 2 */
    CHECK_INT(mixp_optimizer_read(opt, a, MIXP_STATE_EMA, &got, 1), MIXP_OK);
    CHECK_NEAR(got, 0.5, 0);
    CHECK_INT(mixp_optimizer_read(opt, b, MIXP_STATE_EMA, &got, 1), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_optimizer_swap_ema(opt), MIXP_ERR_ORDER);
    mixp_context_clear_error(ctx);
    CHECK_INT(mixp_optimizer_set_ema(opt, 0.75), MIXP_OK);
    CHECK_INT(mixp_optimizer_step(opt), MIXP_OK);      /* a 0 -> -1, b 2 -> 0 */
    CHECK_INT(mixp_optimizer_read(opt, a, MIXP_STATE_EMA, &got, 1), MIXP_OK);
    CHECK_NEAR(got, 0.75 * 0.5 - 0.25, 0);
    CHECK_INT(mixp_optimizer_read(opt, b, MIXP_STATE_EMA, &got, 1), MIXP_OK);
    CHECK_NEAR(got, 0.75 * 2.0, 0);
    mixp_context_free(ctx);
}

/* Weights that are written between mixp_optimizer_set_ema and the first step: the averages start as
 * those, as PyTorch's AveragedModel copies the weights at its first update. Later the averages do
 * not follow a write, and neither do those that a checkpoint brought. */
static void starts_at_the_first_step(weight_kind kind, const char *path) {
    static float w[COUNT], before[COUNT], got[COUNT];
    training m = training_of(-1, kind), file = training_of(-1, kind);
    mixp_checkpoint all;
    CHECK_INT(mixp_optimizer_set_ema(m.opt, 0.5), MIXP_OK);
    set(m.w, 77, 1.0);
    read_weight(&m, kind, before);
    read_state(&m, MIXP_STATE_EMA, got);
    CHECK(same(got, before));
    CHECK_INT(mixp_optimizer_swap_ema(m.opt), MIXP_OK);
    CHECK_INT(mixp_optimizer_swap_ema(m.opt), MIXP_OK);
    read_weight(&m, kind, got);
    CHECK(same(got, before));
    step(&m, 0, 0);
    read_weight(&m, kind, w);
    read_state(&m, MIXP_STATE_EMA, got);
    for (int i = 0; i < COUNT; i++) CHECK_NEAR(got[i], 0.5 * (double)before[i] + 0.5 * (double)w[i], 1e-6);
    set(m.w, 78, 1.0);
    read_state(&m, MIXP_STATE_EMA, w);
    CHECK(same(got, w));
    CHECK_INT(mixp_checkpoint_save_weights(path, file.ctx), MIXP_OK);
    mixp_context_free(m.ctx);
    m = training_of(-1, kind);
    set(m.w, 79, 1.0);
    CHECK_INT(mixp_optimizer_set_ema(m.opt, 0.5), MIXP_OK);
    CHECK_INT(mixp_checkpoint_load_weights(path, m.ctx, NULL), MIXP_OK);
    read_weight(&file, kind, before);
    read_state(&m, MIXP_STATE_EMA, got);
    CHECK(same(got, before));
    memset(&all, 0, sizeof all);
    all.ctx = m.ctx;
    all.optimizers = &m.opt;
    all.n_optimizers = 1;
    CHECK_INT(mixp_checkpoint_save(path, &all), MIXP_OK);
    CHECK_INT(mixp_checkpoint_load(path, &all), MIXP_OK);
    set(m.w, 80, 1.0);
    step(&m, 0, 0);
    read_weight(&m, kind, w);
    read_state(&m, MIXP_STATE_EMA, got);
    for (int i = 0; i < COUNT; i++) CHECK_NEAR(got[i], 0.5 * (double)before[i] + 0.5 * (double)w[i], 1e-6);
    mixp_context_free(m.ctx);
    mixp_context_free(file.ctx);
}

static void test_starts_at_the_first_step(void) {
    char path[] = "/tmp/mixprec-ema-XXXXXX";
    int file = mkstemp(path), kind;
    CHECK(file >= 0);
    if (file >= 0) close(file);
    for (kind = F32_ALONE; kind <= BF16_ALONE; kind++)
        starts_at_the_first_step((weight_kind)kind, path);
    unlink(path);
}

static void test_without_a_gradient(void) {
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_optimizer_desc d = mixp_sgd_defaults();
    const int64_t one = 1;
    mixp_tensor *a = mixp_param(ctx, "a", MIXP_F32, 1, &one);
    mixp_tensor *b = mixp_param(ctx, "b", MIXP_F32, 1, &one);
    float got;
    d.lr = 0.25;
    mixp_optimizer *opt = mixp_optimizer_new(ctx, &d);
    CHECK_INT(mixp_optimizer_add_all(opt, "*"), MIXP_OK);
    mixp_fill(a, 1.0);
    mixp_fill(b, 1.0);
    CHECK_INT(mixp_optimizer_set_ema(opt, 0.5), MIXP_OK);
    for (int i = 0; i < 2; i++) {   /* a 1 -> 0.75 -> 0.5; b has no gradient */
        if (i == 1) mixp_fill(b, 3.0);
        CHECK_INT(mixp_step_begin(ctx), MIXP_OK);
        mixp_zero_grad(opt);
        CHECK_INT(mixp_backward(ctx, mixp_sum(ctx, a, 0, 0)), MIXP_OK);
        CHECK_INT(mixp_optimizer_step(opt), MIXP_OK);
    }
    CHECK_INT(mixp_optimizer_read(opt, a, MIXP_STATE_EMA, &got, 1), MIXP_OK);
    CHECK_NEAR(got, 0.5 * 0.875 + 0.5 * 0.5, 0);
    CHECK_INT(mixp_optimizer_read(opt, b, MIXP_STATE_EMA, &got, 1), MIXP_OK);
    CHECK_NEAR(got, 2.0, 0);
    mixp_context_free(ctx);
}

/* --- the swap ---------------------------------------------------------------------------------- */

static void swapped_and_back(weight_kind kind) {
    static float w[COUNT], master[COUNT], ema[COUNT], got[COUNT];
    training m = training_of(-1, kind), plain = training_of(-1, kind);
    mixp_tensor *low = kind == F32_ALONE ? mixp_tensor_low(m.w, MIXP_F16) : m.w;
    CHECK_INT(mixp_optimizer_set_ema(m.opt, 0.75), MIXP_OK);
    for (int t = 0; t < 6; t++) {
        step(&m, t, 0);
        step(&plain, t, 0);
        CHECK_INT(mixp_read(m.w, w, MIXP_F32, COUNT), MIXP_OK);
        read_state(&m, MIXP_STATE_MASTER, master);
        read_state(&m, MIXP_STATE_EMA, ema);
        CHECK_INT(mixp_optimizer_swap_ema(m.opt), MIXP_OK);
        CHECK_INT(mixp_read(m.w, got, MIXP_F32, COUNT), MIXP_OK);
        for (int i = 0; i < COUNT; i++) {
            float want = ema[i];
            if (kind == F16_MASTER) want = mixp_f32_from_f16(mixp_f16_from_f32(want));
            if (kind > F16_MASTER) want = mixp_f32_from_bf16(mixp_bf16_from_f32(want));
            CHECK(f32_bits(got[i]) == f32_bits(want));
        }
        CHECK_INT(mixp_read(low, got, MIXP_F32, COUNT), MIXP_OK);   /* at once, for graphs */
        for (int i = 0; i < COUNT && kind == F32_ALONE; i++)
            CHECK(got[i] == mixp_f32_from_f16(mixp_f16_from_f32(ema[i])));
        CHECK_INT(mixp_optimizer_swap_ema(m.opt), MIXP_OK);
        CHECK_INT(mixp_read(m.w, got, MIXP_F32, COUNT), MIXP_OK);
        CHECK(same(got, w));
        read_state(&m, MIXP_STATE_MASTER, got);
        CHECK(same(got, master));
        CHECK_INT(mixp_read(plain.w, got, MIXP_F32, COUNT), MIXP_OK);
        CHECK(same(got, w));
        CHECK_INT(mixp_read(low, got, MIXP_F32, COUNT), MIXP_OK);
        for (int i = 0; i < COUNT && kind == F32_ALONE; i++)
            CHECK(got[i] == mixp_f32_from_f16(mixp_f16_from_f32(w[i])));
    }
    CHECK_INT(mixp_context_error(m.ctx, NULL), MIXP_OK);
    mixp_context_free(m.ctx);
    mixp_context_free(plain.ctx);
}

static void test_swap(void) {
    for (int kind = F32_ALONE; kind <= BF16_ALONE; kind++) swapped_and_back((weight_kind)kind);
}

/* --- checkpoints -------------------------------------------------------------------------------- */

static void told(mixp_context *ctx, mixp_result got, mixp_result want, const char *part) {
    const char *message = "";
    CHECK_INT(got, want);
    CHECK_INT(mixp_context_error(ctx, &message), want);
    CHECK_TEXT(message, part);
    mixp_context_clear_error(ctx);
}

static mixp_checkpoint checkpoint_of(const training *m, mixp_optimizer **list) {
    mixp_checkpoint c;
    memset(&c, 0, sizeof c);
    *list = m->opt;
    c.ctx = m->ctx;
    c.scaler = m->scaler;
    c.optimizers = list;
    c.n_optimizers = 1;
    return c;
}

static void resume(weight_kind kind, const char *path) {
    static float want[COUNT], got[COUNT];
    training m = training_of(-1, kind), next = training_of(-1, kind), none = training_of(-1, kind);
    mixp_optimizer *list;
    mixp_checkpoint c = checkpoint_of(&m, &list);
    int t;
    CHECK_INT(mixp_optimizer_set_ema(m.opt, 0.8), MIXP_OK);
    CHECK_INT(mixp_optimizer_set_ema(next.opt, 0.8), MIXP_OK);
    for (t = 0; t < 4; t++) step(&m, t, t == 2);
    CHECK_INT(mixp_checkpoint_save(path, &c), MIXP_OK);
    for (; t < 8; t++) step(&m, t, 0);
    c = checkpoint_of(&next, &list);
    CHECK_INT(mixp_checkpoint_load(path, &c), MIXP_OK);
    for (t = 4; t < 8; t++) step(&next, t, 0);
    read_state(&m, MIXP_STATE_EMA, want);
    read_state(&next, MIXP_STATE_EMA, got);
    CHECK(same(got, want));
    CHECK_INT(mixp_read(m.w, want, MIXP_F32, COUNT), MIXP_OK);
    CHECK_INT(mixp_read(next.w, got, MIXP_F32, COUNT), MIXP_OK);
    CHECK(same(got, want));

    c = checkpoint_of(&none, &list);            /* a program without averages ignores them */
    CHECK_INT(mixp_checkpoint_load(path, &c), MIXP_OK);
    CHECK_INT(mixp_checkpoint_save(path, &c), MIXP_OK);
    read_state(&next, MIXP_STATE_EMA, want);
    c = checkpoint_of(&next, &list);            /* a file without averages does not fit */
    told(next.ctx, mixp_checkpoint_load(path, &c), MIXP_ERR_SHAPE, "call mixp_optimizer_set_ema after the load");
    read_state(&next, MIXP_STATE_EMA, got);
    CHECK(same(got, want));
    mixp_context_free(m.ctx);
    mixp_context_free(next.ctx);
    mixp_context_free(none.ctx);
}

static void test_checkpoints(void) {
    char path[] = "/tmp/mixprec-ema-XXXXXX";
    int file = mkstemp(path), kind;
    CHECK(file >= 0);
    if (file >= 0) close(file);
    for (kind = F32_ALONE; kind <= BF16_ALONE; kind++) resume((weight_kind)kind, path);
    unlink(path);
}

/* --- errors ------------------------------------------------------------------------------------ */

static void test_refused(void) {
    training m = training_of(-1, F32_ALONE), other = training_of(-1, F32_ALONE);
    mixp_optimizer *empty = new_sgd(m.ctx), *both = new_sgd(m.ctx);
    mixp_tensor *cold = mixp_param(m.ctx, "cold", MIXP_F32, 2, shape);
    float got[COUNT];
    CHECK_INT(mixp_optimizer_set_ema(NULL, 0.5), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_optimizer_swap_ema(NULL), MIXP_ERR_ARGUMENT);
    told(m.ctx, mixp_optimizer_set_ema(m.opt, 1.0), MIXP_ERR_ARGUMENT, "[0,1)");
    told(m.ctx, mixp_optimizer_set_ema(m.opt, -0.5), MIXP_ERR_ARGUMENT, "[0,1)");
    told(m.ctx, mixp_optimizer_set_ema(m.opt, (double)bits_f32(0x7FC00000u)), MIXP_ERR_ARGUMENT,
         "[0,1)");
    told(m.ctx, mixp_optimizer_set_ema(empty, 0.5), MIXP_ERR_ARGUMENT, "no parameter");
    told(m.ctx, mixp_optimizer_read(m.opt, m.w, MIXP_STATE_EMA, got, COUNT), MIXP_ERR_ARGUMENT,
         "mixp_optimizer_set_ema");
    told(m.ctx, mixp_optimizer_swap_ema(m.opt), MIXP_ERR_ORDER, "mixp_optimizer_set_ema");
    CHECK_INT(mixp_optimizer_add(both, m.w, m.g), MIXP_OK);
    CHECK_INT(mixp_optimizer_set_ema(m.opt, 0.5), MIXP_OK);
    told(m.ctx, mixp_optimizer_read(m.opt, other.w, MIXP_STATE_EMA, got, COUNT), MIXP_ERR_ARGUMENT,
         "does not have the parameter");
    told(m.ctx, mixp_optimizer_swap_ema(m.opt), MIXP_ERR_ARGUMENT, "another optimizer");
    CHECK_INT(mixp_optimizer_add(empty, cold, NULL), MIXP_OK);
    mixp_tensor_set_requires_grad(cold, 0);
    told(m.ctx, mixp_optimizer_set_ema(empty, 0.5), MIXP_ERR_ARGUMENT, "'cold' is frozen");
    told(m.ctx, mixp_optimizer_read(empty, cold, MIXP_STATE_EMA, got, COUNT), MIXP_ERR_ARGUMENT,
         "mixp_optimizer_set_ema");
    mixp_context_free(m.ctx);
    mixp_context_free(other.ctx);
}

/* While the averages are in, nothing trains them, saves them as weights, or forgets the weights. */
static void test_refused_while_swapped(void) {
    static float ema[COUNT], got[COUNT];
    training m = training_of(-1, F16_MASTER);
    mixp_optimizer *list;
    mixp_checkpoint c = checkpoint_of(&m, &list);
    CHECK_INT(mixp_optimizer_set_ema(m.opt, 0.5), MIXP_OK);
    step(&m, 0, 0);
    CHECK_INT(mixp_scaler_step(m.scaler, m.opt), MIXP_OK);
    told(m.ctx, mixp_optimizer_swap_ema(m.opt), MIXP_ERR_ORDER, "mixp_scaler_update");
    CHECK_INT(mixp_scaler_update(m.scaler), MIXP_OK);
    CHECK_INT(mixp_optimizer_swap_ema(m.opt), MIXP_OK);
    CHECK_INT(mixp_read(m.w, ema, MIXP_F32, COUNT), MIXP_OK);
    told(m.ctx, mixp_scaler_step(m.scaler, m.opt), MIXP_ERR_ORDER, "the averages");
    told(m.ctx, mixp_scaler_unscale(m.scaler, m.opt), MIXP_ERR_ORDER, "the averages");
    told(m.ctx, mixp_optimizer_set_ema(m.opt, 0.5), MIXP_ERR_ORDER, "the averages");
    told(m.ctx, mixp_checkpoint_save("/tmp/no-such-checkpoint", &c), MIXP_ERR_ORDER, "the averages");
    told(m.ctx, mixp_checkpoint_load("/tmp/no-such-checkpoint", &c), MIXP_ERR_ORDER, "the averages");
    told(m.ctx, mixp_optimizer_free(m.opt), MIXP_ERR_ORDER, "the averages");
    told(m.ctx, mixp_optimizer_read(m.opt, m.w, MIXP_STATE_MASTER, got, COUNT), MIXP_ERR_ORDER,
         "the averages");
    CHECK_INT(mixp_read(m.w, got, MIXP_F32, COUNT), MIXP_OK);
    CHECK(same(got, ema));
    CHECK_INT(mixp_optimizer_swap_ema(m.opt), MIXP_OK);
    step(&m, 1, 0);
    CHECK_INT(mixp_optimizer_free(m.opt), MIXP_OK);
    mixp_context_free(m.ctx);
}

static const char *no_exchange(void *user, void *data, int64_t count, mixp_dtype dtype,
                               void *stream, double seconds) {
    (void)user; (void)data; (void)count; (void)dtype; (void)stream; (void)seconds;
    return "the cable is cut";
}

/* The swap sends averages; where that fails, the weights stay. test_ranks.c has the values. */
static void test_sharded_states(void) {
    static float w[COUNT];
    mixp_ranks_desc ranks;
    mixp_context_desc d;
    memset(&ranks, 0, sizeof ranks);
    memset(&d, 0, sizeof d);
    ranks.size = 2;
    ranks.shard = 1;
    ranks.sum = ranks.all_gather = no_exchange;
    d.ranks = &ranks;
    mixp_context *ctx = mixp_context_new(&d);
    mixp_optimizer *opt = new_sgd(ctx);
    mixp_tensor *p = mixp_param(ctx, "w", MIXP_F32, 2, shape);
    CHECK_INT(mixp_fill(p, 3.0), MIXP_OK);
    CHECK_INT(mixp_optimizer_add(opt, p, NULL), MIXP_OK);
    mixp_tensor *q = mixp_param(ctx, "of_rank_1", MIXP_F32, 2, shape);
    CHECK_INT(mixp_optimizer_add(opt, q, NULL), MIXP_OK);
    CHECK_INT(mixp_optimizer_set_ema(opt, 0.5), MIXP_OK);
    told(ctx, mixp_optimizer_read(opt, q, MIXP_STATE_EMA, w, COUNT), MIXP_ERR_ARGUMENT,
         "mixp_optimizer_swap_ema on all ranks");
    told(ctx, mixp_optimizer_swap_ema(opt), MIXP_ERR_RANKS, "the cable is cut");
    CHECK_INT(mixp_read(p, w, MIXP_F32, COUNT), MIXP_OK);
    for (int i = 0; i < COUNT; i++) CHECK_NEAR(w[i], 3.0, 0.0);
    mixp_context_free(ctx);
}

int main(void) {
    RUN(test_as_a_loop_in_double);
    RUN(test_a_skipped_step);
    RUN(test_no_step_allocates);
    RUN(test_added_later);
    RUN(test_starts_at_the_first_step);
    RUN(test_without_a_gradient);
    RUN(test_swap);
    RUN(test_checkpoints);
    RUN(test_refused);
    RUN(test_refused_while_swapped);
    RUN(test_sharded_states);
    return test_report();
}
