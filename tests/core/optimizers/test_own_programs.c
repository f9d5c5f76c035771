/* test_own_programs.c - an optimizer in programs with checkpoints of their own, with one gradient buffer, or with other
 * parameters than at the save: states in and out, streams, partial loads, fed gradients.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "mixprec.h"
#include "layout_cases.h"

enum { PARAMS = 3, ROWS = 68, COLS = 64, COUNT = ROWS * COLS };

typedef struct setting { mixp_dtype w; mixp_moment_kind moments; mixp_master_kind master; } setting;
typedef struct training {
    mixp_context   *ctx;
    mixp_optimizer *opt;
    mixp_tensor    *w[PARAMS], *g[PARAMS];
} training;

static void gradients(training *m, int t) {
    static float g[COUNT];
    for (int p = 0; p < PARAMS; p++) {
        random_state = (uint64_t)(17 * t + p);
        for (int i = 0; i < COUNT; i++) g[i] = (float)(random_value() * pow(2.0, random_to(24) - 12));
        CHECK_INT(mixp_write(m->g[p], g, MIXP_F32, COUNT), MIXP_OK);
    }
}
static training training_of(const mixp_optimizer_desc *kind, const setting *s, int ema) {
    static const int64_t shape[2] = { ROWS, COLS };
    mixp_optimizer_desc d = *kind;
    training m;
    memset(&m, 0, sizeof m);
    m.ctx = mixp_context_new(NULL);
    d.states.m = s->moments;
    d.states.v = d.kind == MIXP_OPTIMIZER_SGD || d.kind == MIXP_OPTIMIZER_LION || d.kind == MIXP_OPTIMIZER_MUON || d.centered
                     ? MIXP_MOMENT_F32 : s->moments;
    if (d.kind == MIXP_OPTIMIZER_SGD && d.momentum == 0.0) d.states.m = MIXP_MOMENT_F32;
    if (d.kind == MIXP_OPTIMIZER_ADAGRAD || (d.kind == MIXP_OPTIMIZER_RMSPROP && d.momentum == 0.0)) d.states.m = MIXP_MOMENT_F32;
    d.states.master = s->master;
    m.opt = mixp_optimizer_new(m.ctx, &d);
    for (int p = 0; p < PARAMS; p++) {
        m.w[p] = mixp_param_named(m.ctx, s->w, 2, shape, "w%d", p);
        m.g[p] = mixp_param_named(m.ctx, MIXP_F32, 2, shape, "g%d", p);
        mixp_tensor_set_requires_grad(m.g[p], 0);
        CHECK_INT(mixp_init_normal(m.w[p], 0, 1), MIXP_OK);
        if (p < 2) CHECK_INT(mixp_optimizer_add(m.opt, m.w[p], m.g[p]), MIXP_OK);
    }
    if (ema) CHECK_INT(mixp_optimizer_set_ema(m.opt, 0.75), MIXP_OK);
    return m;
}
static void steps(training *m, int from, int to) {
    for (int t = from; t < to; t++) {
        gradients(m, t);
        CHECK_INT(mixp_optimizer_step(m->opt), MIXP_OK);
        if (t == 2 && to > 3) CHECK_INT(mixp_optimizer_add(m->opt, m->w[2], m->g[2]), MIXP_OK); /* joins late */
    }
}

/* A program's own checkpoint, with mixp_optimizer_read and mixp_optimizer_write. */
static void by_own_file(training *from, training *to) {
    static float v[COUNT];
    static uint32_t raw[COUNT];
    CHECK_INT(mixp_optimizer_add(to->opt, to->w[2], to->g[2]), MIXP_OK);
    CHECK_INT(mixp_optimizer_set_applied(to->opt, NULL, mixp_optimizer_applied(from->opt)), MIXP_OK);
    for (int p = 0; p < PARAMS; p++) {
        CHECK_INT(mixp_read(from->w[p], raw, from->w[p]->dtype, COUNT), MIXP_OK);
        CHECK_INT(mixp_write(to->w[p], raw, to->w[p]->dtype, COUNT), MIXP_OK);
        for (int k = 0; k <= MIXP_STATE_THIRD; k++) {
            if (mixp_optimizer_read(from->opt, from->w[p], (mixp_state_kind)k, v, COUNT) != MIXP_OK) {
                mixp_context_clear_error(from->ctx);
                CHECK_INT(mixp_optimizer_write(to->opt, to->w[p], (mixp_state_kind)k, v, COUNT), MIXP_ERR_ARGUMENT);
                mixp_context_clear_error(to->ctx);
            } else CHECK_INT(mixp_optimizer_write(to->opt, to->w[p], (mixp_state_kind)k, v, COUNT), MIXP_OK);
        }
        CHECK_INT(mixp_optimizer_set_applied(to->opt, to->w[p], mixp_optimizer_param_applied(from->opt, from->w[p])), MIXP_OK);
    }
}
static int same_weights(training *a, training *b) {
    static uint32_t x[COUNT], y[COUNT];
    int same = 1;
    for (int p = 0; p < PARAMS; p++) {
        CHECK_INT(mixp_read(a->w[p], x, a->w[p]->dtype, COUNT), MIXP_OK);
        CHECK_INT(mixp_read(b->w[p], y, b->w[p]->dtype, COUNT), MIXP_OK);
        same &= !memcmp(x, y, COUNT * mixp_dtype_size(a->w[p]->dtype));
    }
    return same;
}

/* Every kind, states of each width: a resume by the program's own file has the bits of the run that never stopped. */
static void states_out_and_in(void) {
    static const setting settings[] = {
        { MIXP_F32, MIXP_MOMENT_F32, MIXP_MASTER_F32 }, { MIXP_BF16, MIXP_MOMENT_BF16, MIXP_MASTER_16BIT },
        { MIXP_BF16, MIXP_MOMENT_8BIT, MIXP_MASTER_8BIT }, { MIXP_F16, MIXP_MOMENT_8BIT, MIXP_MASTER_F32 }
    };
    int compared = 0;
    for (int k = 0; layout_kind(k).lr > 0.0; k++)
        for (int s = 0; s < 4; s++) {
            const mixp_optimizer_desc d = layout_kind(k);
            training whole = training_of(&d, &settings[s], k % 2), cut, resumed;
            cut = training_of(&d, &settings[s], k % 2);
            resumed = training_of(&d, &settings[s], k % 2);
            if (mixp_context_error(whole.ctx, NULL) == MIXP_OK) {
                steps(&whole, 0, 8);
                steps(&cut, 0, 5);
                by_own_file(&cut, &resumed);
                steps(&resumed, 5, 8);
                CHECK(same_weights(&whole, &resumed));
                CHECK_INT(mixp_context_error(resumed.ctx, NULL), MIXP_OK);
                CHECK_INT(mixp_optimizer_param_applied(resumed.opt, resumed.w[2]), 5);
                CHECK_INT(mixp_optimizer_applied(resumed.opt), 8);
                if (test_bad) TEST_SHOW("kind %d, setting %d", k, s);
                compared++;
            } else TEST_SHOW("kind %d, setting %d was refused", k, s);
            mixp_context_free(whole.ctx);
            mixp_context_free(cut.ctx);
            mixp_context_free(resumed.ctx);
        }
    CHECK_INT(compared, 4 * 14);
}

static void refused_states(void) {
    static const setting plain = { MIXP_F32, MIXP_MOMENT_F32, MIXP_MASTER_F32 };
    static float v[COUNT];
    const mixp_optimizer_desc d = mixp_adamw_defaults();
    training m = training_of(&d, &plain, 0);
    const char *why = "";
    v[7] = -1.0f;
    CHECK_INT(mixp_optimizer_write(m.opt, m.w[0], MIXP_STATE_V, v, COUNT), MIXP_ERR_ARGUMENT);
    mixp_context_error(m.ctx, &why);
    CHECK_TEXT(why, "'w0': element 7 is -1");
    mixp_context_clear_error(m.ctx);
    v[7] = (float)NAN;
    CHECK_INT(mixp_optimizer_write(m.opt, m.w[0], MIXP_STATE_M, v, COUNT), MIXP_ERR_ARGUMENT);
    mixp_context_clear_error(m.ctx);
    v[7] = 0.0f;
    CHECK_INT(mixp_optimizer_write(m.opt, m.w[0], MIXP_STATE_M, v, COUNT - 1), MIXP_ERR_SHAPE);
    mixp_context_clear_error(m.ctx);
    CHECK_INT(mixp_optimizer_write(m.opt, m.w[2], MIXP_STATE_M, v, COUNT), MIXP_ERR_ARGUMENT);
    mixp_context_clear_error(m.ctx);
    CHECK_INT(mixp_optimizer_set_applied(m.opt, m.w[0], 1), MIXP_ERR_ARGUMENT);
    mixp_context_clear_error(m.ctx);
    CHECK_INT(mixp_optimizer_set_applied(m.opt, NULL, -1), MIXP_ERR_ARGUMENT);
    mixp_context_clear_error(m.ctx);
    CHECK_INT(mixp_optimizer_write(NULL, m.w[0], MIXP_STATE_M, v, COUNT), MIXP_ERR_ARGUMENT);
    mixp_context_free(m.ctx);
}

/* --- streams: a checkpoint in memory, with bytes of the program before and behind ------------- */

typedef struct stream { unsigned char bytes[400000]; size_t size, at, limit; int calls; } stream;
static stream tape;
static int put(void *user, const void *bytes, size_t n) {
    stream *s = (stream *)user;
    if (s->size + n > s->limit) return -1;
    memcpy(s->bytes + s->size, bytes, n);
    s->size += n;
    s->calls++;
    return 0;
}
static int get(void *user, void *bytes, size_t n) {
    stream *s = (stream *)user;
    if (s->at + n > s->size) return -1;
    memcpy(bytes, s->bytes + s->at, n);
    s->at += n;
    return 0;
}
static mixp_checkpoint all_of(training *m) {
    mixp_checkpoint c;
    memset(&c, 0, sizeof c);
    c.ctx = m->ctx;
    c.optimizers = &m->opt;
    c.n_optimizers = 1;
    c.write_bytes = put;
    c.read_bytes = get;
    c.user = &tape;
    return c;
}
static void streams(void) {
    static const setting low = { MIXP_BF16, MIXP_MOMENT_8BIT, MIXP_MASTER_16BIT };
    const mixp_optimizer_desc d = mixp_adamw_defaults();
    training whole = training_of(&d, &low, 0), cut = training_of(&d, &low, 0), resumed = training_of(&d, &low, 0);
    training untouched = training_of(&d, &low, 0);
    mixp_checkpoint c = all_of(&cut), l = all_of(&resumed);
    steps(&whole, 0, 3);
    steps(&cut, 0, 2);
    steps(&resumed, 0, 1);
    steps(&untouched, 0, 1);
    tape.limit = sizeof tape.bytes - 8;
    put(&tape, "before", 6);
    CHECK_INT(mixp_checkpoint_save(NULL, &c), MIXP_OK);
    const size_t end = tape.size;
    put(&tape, "behind", 6);

    /* Cut short anywhere, or changed: nothing changes. */
    for (size_t size = 6; size < end; size += size < 700 ? 1 : end / 50) {
        tape.size = size;
        tape.at = 6;
        CHECK_INT(mixp_checkpoint_load(NULL, &l), MIXP_ERR_IO);
        mixp_context_clear_error(resumed.ctx);
    }
    tape.size = end + 6;
    tape.at = 6;
    tape.bytes[10] ^= 1;
    CHECK_INT(mixp_checkpoint_load(NULL, &l), MIXP_ERR_FORMAT);
    mixp_context_clear_error(resumed.ctx);
    tape.bytes[10] ^= 1;
    CHECK(same_weights(&resumed, &untouched));

    tape.at = 6;
    CHECK_INT(mixp_checkpoint_load(NULL, &l), MIXP_OK);
    CHECK(tape.at == end);
    steps(&resumed, 2, 3);
    CHECK(same_weights(&resumed, &whole));

    /* A write that fails; no function at all. */
    const char *why = "";
    tape.limit = tape.size + 1000;
    CHECK_INT(mixp_checkpoint_save(NULL, &c), MIXP_ERR_IO);
    mixp_context_error(cut.ctx, &why);
    CHECK_TEXT(why, "the program's write failed after 0 of");
    mixp_context_clear_error(cut.ctx);
    c.write_bytes = NULL;
    CHECK_INT(mixp_checkpoint_save(NULL, &c), MIXP_ERR_ARGUMENT);
    mixp_context_free(whole.ctx);
    mixp_context_free(cut.ctx);
    mixp_context_free(resumed.ctx);
    mixp_context_free(untouched.ctx);
}

/* --- a partial load: w0 is removed, w2 added, w1 stays ---------------------------------------- */

static int told[3];
static char texts[3][4096];
static void tell(void *user, const char *name, mixp_weight_fate fate) {
    const int i = fate == MIXP_WEIGHT_LOADED ? 0 : fate == MIXP_WEIGHT_MISSING ? 1 : 2;
    (void)user;
    told[i]++;
    snprintf(texts[i] + strlen(texts[i]), sizeof texts[i] - strlen(texts[i]), "%s;", name);
}
static training part(int first, int last) {
    static const int64_t shape[2] = { ROWS, COLS };
    const mixp_optimizer_desc d = mixp_adamw_defaults();
    training m;
    memset(&m, 0, sizeof m);
    m.ctx = mixp_context_new(NULL);
    m.opt = mixp_optimizer_new(m.ctx, &d);
    static float g[PARAMS][COUNT];
    for (int p = 0; p < PARAMS; p++) {
        char name[8];
        snprintf(name, sizeof name, "g%d", p);
        m.g[p] = mixp_view_f32(m.ctx, name, 2, shape, g[p]);
    }
    for (int p = first; p <= last; p++) {
        m.w[p] = mixp_param_named(m.ctx, MIXP_F32, 2, shape, "w%d", p);
        CHECK_INT(mixp_fill(m.w[p], 1.0), MIXP_OK);
        CHECK_INT(mixp_optimizer_add(m.opt, m.w[p], m.g[p]), MIXP_OK);
    }
    return m;
}
static void partial_loads(void) {
    static float x[COUNT], y[COUNT];
    training old = part(0, 1), next = part(1, 2), fresh = part(2, 2);
    mixp_checkpoint c = all_of(&old), l = all_of(&next);
    const char *why = "";
    memset(&tape, 0, sizeof tape);
    tape.limit = sizeof tape.bytes;
    steps(&old, 0, 2);
    CHECK_INT(mixp_checkpoint_save(NULL, &c), MIXP_OK);
    steps(&old, 3, 4);

    /* Not without a request. */
    CHECK_INT(mixp_checkpoint_load(NULL, &l), MIXP_ERR_SHAPE);
    mixp_context_clear_error(next.ctx);
    tape.at = 0;
    l.partial = 1;
    l.tell = tell;
    CHECK_INT(mixp_checkpoint_load(NULL, &l), MIXP_OK);
    CHECK_TEXT(texts[0], "optimizer.0.m.w1;");
    CHECK_TEXT(texts[0], ";w1;");
    CHECK_TEXT(texts[1], "optimizer.0.v.w2;");
    CHECK_TEXT(texts[1], ";w2;");
    CHECK_TEXT(texts[2], "optimizer.0.m.w0;");
    CHECK_TEXT(texts[2], ";w0;");
    CHECK_INT(told[0], 4);      /* w1, its m, v and missed */
    CHECK_INT(told[1], 4);
    CHECK_INT(told[2], 4);

    /* w1 goes on as if nothing had happened; w2 as in a run that begins. */
    CHECK_INT(mixp_optimizer_param_applied(next.opt, next.w[1]), 2);
    CHECK_INT(mixp_optimizer_param_applied(next.opt, next.w[2]), 0);
    steps(&next, 3, 4);
    steps(&fresh, 3, 4);
    CHECK_INT(mixp_read_f32(old.w[1], x, COUNT), MIXP_OK);
    CHECK_INT(mixp_read_f32(next.w[1], y, COUNT), MIXP_OK);
    CHECK(!memcmp(x, y, sizeof x));
    CHECK_INT(mixp_read_f32(fresh.w[2], x, COUNT), MIXP_OK);
    CHECK_INT(mixp_read_f32(next.w[2], y, COUNT), MIXP_OK);
    CHECK(!memcmp(x, y, sizeof x));

    /* Another shape, and half of a parameter's states, stay errors. */
    training other = part(1, 1);
    mixp_checkpoint o = all_of(&other);
    const int64_t shape[1] = { 3 };
    mixp_param(other.ctx, "w0", MIXP_F32, 1, shape);
    o.partial = 1;
    tape.at = 0;
    CHECK_INT(mixp_checkpoint_load(NULL, &o), MIXP_ERR_SHAPE);
    mixp_context_error(other.ctx, &why);
    CHECK_TEXT(why, "'w0' is f32 [68, 64], not f32 [3]");
    mixp_context_free(other.ctx);
    mixp_context_free(old.ctx);
    mixp_context_free(next.ctx);
    mixp_context_free(fresh.ctx);
}

/* --- one gradient buffer ------------------------------------------------------------------------ */

typedef struct fed { mixp_context *ctx; mixp_optimizer *opt; mixp_scaler *scaler; mixp_tensor *w[PARAMS]; } fed;
static float fed_w[2][PARAMS][COUNT], fed_g[PARAMS][COUNT], one_buffer[COUNT];
static fed fed_of(int n, int shared) {
    const int64_t count = COUNT;
    mixp_optimizer_desc d = mixp_adamw_defaults();
    fed m;
    memset(&m, 0, sizeof m);
    d.max_norm = 1.0;
    m.ctx = mixp_context_new(NULL);
    m.opt = mixp_optimizer_new(m.ctx, &d);
    m.scaler = mixp_scaler_new(m.ctx, NULL);
    for (int p = 0; p < PARAMS; p++) {
        char name[16];
        snprintf(name, sizeof name, "layer%d", p);
        for (int i = 0; i < COUNT; i++) fed_w[n][p][i] = (float)(i % 7);
        m.w[p] = mixp_view_f32(m.ctx, name, 1, &count, fed_w[n][p]);
        CHECK_INT(mixp_optimizer_add(m.opt, m.w[p], mixp_view_f32(m.ctx, "g", 1, &count, shared ? one_buffer : fed_g[p])),
                  MIXP_OK);
    }
    return m;
}
static void feeding(void) {
    fed a = fed_of(0, 0), b = fed_of(1, 1);
    for (int t = 0; t < 6; t++) {
        const float scale = mixp_scaler_loss_scale(a.scaler);
        CHECK(scale == mixp_scaler_loss_scale(b.scaler));
        for (int p = 0; p < PARAMS; p++)
            for (int i = 0; i < COUNT; i++) fed_g[p][i] = scale * (float)((i * (p + 2) + t) % 11 - 5) / 8.0f;
        if (t == 2) fed_g[1][5] = (float)INFINITY;

        /* From the last layer to the first, through one buffer; in the fifth step in two halves. */
        for (int p = PARAMS - 1; p >= 0; p--)
            for (int half = 0; half < (t == 4 ? 2 : 1); half++) {
                for (int i = 0; i < COUNT; i++) one_buffer[i] = fed_g[p][i] * (t == 4 ? 0.5f : 1.0f);
                CHECK_INT(mixp_optimizer_feed(b.opt, b.w[p]), MIXP_OK);
            }
        memset(one_buffer, 0x7F, sizeof one_buffer); /* mixp_optimizer_feed has copied it */
        if (t == 3) CHECK_INT(mixp_scaler_unscale(a.scaler, a.opt), MIXP_OK);
        if (t == 3) CHECK_INT(mixp_scaler_unscale(b.scaler, b.opt), MIXP_OK);
        if (t == 3) CHECK_INT(mixp_optimizer_feed(b.opt, b.w[0]), MIXP_ERR_ORDER);
        mixp_context_clear_error(b.ctx);
        CHECK_INT(mixp_scaler_step(a.scaler, a.opt), MIXP_OK);
        CHECK_INT(mixp_scaler_step(b.scaler, b.opt), MIXP_OK);
        CHECK_INT(mixp_scaler_update(a.scaler), MIXP_OK);
        CHECK_INT(mixp_scaler_update(b.scaler), MIXP_OK);
        CHECK_INT(mixp_scaler_verdict(b.scaler).outcome, t == 2 ? MIXP_STEP_SKIPPED : MIXP_STEP_APPLIED);
        if (t == 2) CHECK_TEXT(mixp_scaler_verdict(b.scaler).bad_tensor, "layer1");
        CHECK(mixp_scaler_verdict(a.scaler).grad_norm == mixp_scaler_verdict(b.scaler).grad_norm || t == 2);
        CHECK(!memcmp(fed_w[0], fed_w[1], sizeof fed_w[0]));
    }

    /* What was not fed does not change; without any the step says so. */
    for (int i = 0; i < COUNT; i++) one_buffer[i] = 1.0f;
    CHECK_INT(mixp_optimizer_feed(b.opt, b.w[1]), MIXP_OK);
    CHECK_INT(mixp_scaler_step(b.scaler, b.opt), MIXP_OK);
    CHECK_INT(mixp_scaler_update(b.scaler), MIXP_OK);
    CHECK(!memcmp(fed_w[0][0], fed_w[1][0], sizeof fed_w[0][0]) && memcmp(fed_w[0][1], fed_w[1][1], sizeof fed_w[0][1]));
    CHECK_INT(mixp_scaler_step(b.scaler, b.opt), MIXP_ERR_ORDER);
    mixp_context_clear_error(b.ctx);
    CHECK_INT(mixp_optimizer_feed(b.opt, a.w[0]), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_optimizer_feed(NULL, a.w[0]), MIXP_ERR_ARGUMENT);
    mixp_context_free(a.ctx);
    mixp_context_free(b.ctx);
}

/* Muon with coefficients for each iteration: 1, 0, 0 do not change the matrix; equal triples act as a, b and c. */
static void coefficients(void) {
    static const double same[5][3] = { { 3.4445, -4.7750, 2.0315 }, { 3.4445, -4.7750, 2.0315 }, { 3.4445, -4.7750, 2.0315 },
                                       { 3.4445, -4.7750, 2.0315 }, { 3.4445, -4.7750, 2.0315 } };
    static const double mixed[2][3] = { { 3.0, -4.0, 2.0 }, { 1.0, 0.0, 0.0 } };
    static const double *const first = mixed[0];
    static const setting plain = { MIXP_F32, MIXP_MOMENT_F32, MIXP_MASTER_F32 };
    mixp_optimizer_desc a = mixp_muon_defaults(), b = a;
    for (int i = 0; i < 2; i++) {
        b = a;
        b.muon.coefficients = i ? mixed : same;
        if (i) b.muon.iterations = 2, a.muon.iterations = 1, a.muon.a = first[0], a.muon.b = first[1], a.muon.c = first[2];
        a.muon.f32 = b.muon.f32 = 1;
        training x = training_of(&a, &plain, 0), y = training_of(&b, &plain, 0);
        steps(&x, 0, 4);
        steps(&y, 0, 4);
        CHECK(same_weights(&x, &y));
        mixp_context_free(x.ctx);
        mixp_context_free(y.ctx);
    }
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_optimizer_desc d = mixp_adamw_defaults();
    d.muon.coefficients = same;
    CHECK(!mixp_optimizer_new(ctx, &d));
    mixp_context_free(ctx);
}

/* A bf16 parameter that the program adds to a model of the file, and then fills, keeps its value through a partial load. */
static void an_added_parameter_keeps_its_value(void) {
    static const int64_t four[1] = { 4 };
    float        b[4] = { 0 };
    mixp_tensor *w[2][2];
    for (int made = 0; made < 2; made++) {
        mixp_optimizer_desc sgd = mixp_sgd_defaults();
        mixp_context       *ctx = mixp_context_new(NULL);
        mixp_optimizer     *opt = mixp_optimizer_new(ctx, &sgd);
        mixp_checkpoint     c;
        memset(&c, 0, sizeof c);
        for (int i = 0; i <= made; i++) {
            w[made][i] = mixp_param(ctx, i ? "b" : "a", MIXP_BF16, 1, four);
            mixp_optimizer_add(opt, w[made][i], NULL);
            mixp_fill(w[made][i], i ? 8.0 : 1.0);
        }
        c.ctx = ctx;
        c.optimizers = &opt;
        c.n_optimizers = 1;
        c.partial = made;
        CHECK_INT(made ? mixp_checkpoint_load("added.st", &c) : mixp_checkpoint_save("added.st", &c), MIXP_OK);
        if (made) {
            mixp_step_begin(ctx);
            mixp_zero_grad(opt);
            mixp_backward(ctx, mixp_sum(ctx, mixp_scale(ctx, mixp_add(ctx, w[1][0], w[1][1]), 0.0f), MIXP_ALL, 0));
            CHECK_INT(mixp_optimizer_step(opt), MIXP_OK);
            CHECK_INT(mixp_read(w[1][1], b, MIXP_F32, 4), MIXP_OK);
            CHECK(b[0] > 7.9f && b[0] < 8.1f);
        }
        CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
        mixp_context_free(ctx);
    }
    remove("added.st");
}

/* Steps set back below the history of spikes: the checkpoint loads. */
static void steps_set_back_with_spikes(void) {
    static const int64_t one[1] = { 1 };
    static float        x = 1.0f, g = 0.5f;
    mixp_optimizer_desc d = mixp_adamw_defaults();
    d.spike.of = MIXP_SPIKE_NORM;
    mixp_context   *ctx = mixp_context_new(NULL);
    mixp_optimizer *opt = mixp_optimizer_new(ctx, &d);
    mixp_checkpoint c;
    memset(&c, 0, sizeof c);
    mixp_optimizer_add(opt, mixp_view_f32(ctx, "x", 1, one, &x), mixp_view_f32(ctx, "g", 1, one, &g));
    for (int i = 0; i < 10; i++) mixp_optimizer_step(opt);
    CHECK_INT(mixp_optimizer_set_applied(opt, NULL, 3), MIXP_OK);
    c.ctx = ctx;
    c.optimizers = &opt;
    c.n_optimizers = 1;
    CHECK_INT(mixp_checkpoint_save("back.st", &c), MIXP_OK);
    CHECK_INT(mixp_checkpoint_load("back.st", &c), MIXP_OK);
    remove("back.st");
    mixp_context_free(ctx);
}

/* One array whose padding holds another view: refused, for a step clears padding while it reads a row. So is an average. */
static void padding_is_not_shared(void) {
    static const int64_t rows[2] = { 3, 8 };
    static float         w[2][24], g[32];
    const char          *why = "";
    mixp_context        *ctx = mixp_context_new(NULL);
    mixp_optimizer      *opt = mixp_optimizer_new(ctx, NULL);
    CHECK_INT(mixp_optimizer_add_rows(opt, mixp_view_f32(ctx, "a", 2, rows, w[0]), mixp_view_f32(ctx, "ga", 2, rows, g), 4),
              MIXP_OK);
    CHECK_INT(mixp_optimizer_add_rows(opt, mixp_view_f32(ctx, "b", 2, rows, w[1]), mixp_view_f32(ctx, "gb", 2, rows, g + 4), 4),
              MIXP_ERR_ARGUMENT);
    mixp_context_error(ctx, &why);
    CHECK_TEXT(why, "separate memory");
    mixp_context_clear_error(ctx);
    CHECK_INT(mixp_optimizer_set_ema(opt, 0.9), MIXP_ERR_ARGUMENT);
    mixp_context_clear_error(ctx);
    CHECK_INT(mixp_optimizer_write(opt, mixp_context_find(ctx, "a"), MIXP_STATE_MASTER, w[1], 24), MIXP_ERR_ARGUMENT);
    mixp_context_free(ctx);
}

int main(void) {
    RUN(an_added_parameter_keeps_its_value);
    RUN(steps_set_back_with_spikes);
    RUN(padding_is_not_shared);
    RUN(coefficients);
    RUN(states_out_and_in);
    RUN(refused_states);
    RUN(streams);
    RUN(partial_loads);
    RUN(feeding);
    return test_report();
}
