/* test_add_norm.c - one kernel for x = x + f and h = norm(x): its bits, gradients, looks and errors
 * equal those of the two operators, and it runs wherever it can.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include "examples/ops.h"
#include "test.h"

enum { ROWS = 5, WIDTH = 12, COUNT = ROWS * WIDTH, PARAMS = 6 };

/* A device that counts, and one that has no such kernel. */
static struct { mixp_kernels kernels; mixp_device device; int calls, second; } seen;

static mixp_result counted(const mixp_exec *x, const mixp_norm_args *k) {
    seen.calls++;
    return mixp_cpu()->kernels->add_norm(x, k);
}
static mixp_result counted_back(const mixp_exec *x, const mixp_norm_backward_args *k) {
    seen.second += k->db.data != NULL;
    return mixp_cpu()->kernels->norm_backward(x, k);
}

enum { TWICE = 1, SHARED = 2, KEPT = 4, GUARDED = 8, NO_KERNEL = 16, RMS = 32, DOUBLED = 64, EARLY = 128 };

typedef struct run_of {
    mixp_context *ctx;
    mixp_tensor  *p[PARAMS];            /* x, w1, w2, gamma, beta, bias */
    mixp_optimizer *opt;                /* of a rate of 0: a guard counts updates */
    int           how, apart;           /* apart: by mixp_add and the norm */
    int           disposed;             /* the first term is not read by the program */
} run_of;

static run_of run_new(int how, int apart, int level) {
    static const int64_t shapes[PARAMS][2] = { { ROWS, WIDTH }, { WIDTH, WIDTH }, { WIDTH, WIDTH },
                                               { WIDTH, 0 }, { WIDTH, 0 }, { WIDTH, 0 } };
    static const char *const names[PARAMS] = { "x", "w1", "w2", "gamma", "beta", "bias" };
    mixp_context_desc desc = { 0 };
    mixp_guard_desc every = { 0 };
    mixp_optimizer_desc still = mixp_sgd_defaults();
    run_of r = { 0 };
    memset(&seen, 0, sizeof seen);
    seen.kernels = *mixp_cpu()->kernels;
    seen.kernels.add_norm = how & NO_KERNEL ? NULL : counted;
    seen.kernels.norm_backward = counted_back;
    seen.device = *mixp_cpu();
    seen.device.kernels = &seen.kernels;
    desc.device = &seen.device;
    desc.seed = 3;
    r.ctx = mixp_context_new(&desc);
    r.how = how;
    r.apart = apart;
    mixp_autocast_set_level(r.ctx, level);
    every.every = 2;
    if (how & GUARDED) CHECK_INT(mixp_guard_start(r.ctx, &every), MIXP_OK);
    mixp_autocast_override(r.ctx, mixp_op_builtin(MIXP_OP_LAYER_NORM), MIXP_CLASS_LOW_OUT);
    for (int i = 0; i < PARAMS; i++) {
        r.p[i] = mixp_param(r.ctx, names[i], MIXP_F32, shapes[i][1] ? 2 : 1, shapes[i]);
        mixp_init_normal(r.p[i], i == 3, i == 0 ? 1 : 0.3);
    }
    still.lr = 0;
    r.opt = mixp_optimizer_new(r.ctx, &still);
    CHECK_INT(mixp_optimizer_add_all(r.opt, "*"), MIXP_OK);
    return r;
}

static mixp_tensor *added(run_of *r, mixp_tensor **x, mixp_tensor *f) {
    mixp_tensor *g = r->p[3], *b = r->p[4];
    if (r->apart) {
        *x = mixp_add(r->ctx, *x, f);
        return r->how & RMS ? mixp_rms_norm(r->ctx, *x, g, 1e-5f)
                            : mixp_layer_norm(r->ctx, *x, g, b, 1e-5f);
    }
    return r->how & RMS ? mixp_add_rms_norm(r->ctx, *x, f, g, 1e-5f, x)
                        : mixp_add_layer_norm(r->ctx, *x, f, g, b, 1e-5f, x);
}

/* Two blocks, whose terms and sums are used in more ways than one. */
static mixp_tensor *model(run_of *r) {
    mixp_context *c = r->ctx;
    mixp_tensor *x = r->p[0], *f, *h, *early = NULL;
    f = mixp_linear(c, mixp_scale(c, x, 1.5f), r->p[1], r->p[5]);
    if (r->how & EARLY) early = mixp_mean(c, mixp_mul(c, f, f), MIXP_ALL, 0);
    if (r->disposed) CHECK_INT(mixp_tensor_set_disposable(f, 1), MIXP_OK);
    h = added(r, &x, f);
    if (r->how & KEPT) mixp_tensor_set_requires_grad(f, 1);
    if (r->how & TWICE) h = mixp_add(c, h, mixp_tanh(c, f));
    f = mixp_gelu(c, mixp_linear(c, h, r->p[2], NULL));
    if (r->how & DOUBLED) f = mixp_cast(c, x, x->dtype);
    h = added(r, &x, r->how & DOUBLED ? x : f);
    if (r->how & SHARED) h = mixp_add(c, h, x);
    h = mixp_mean(c, mixp_mul(c, h, x), MIXP_ALL, 0);
    return early ? mixp_add(c, h, early) : h;
}

/* The loss, and then every gradient, of the third step. */
static void values_of(run_of *r, mixp_dtype dtype, float *out) {
    mixp_tensor *loss = NULL;
    for (int step = 0; step < 3; step++) {
        for (int i = 0; i < PARAMS; i++) r->p[i]->grad = NULL;
        mixp_step_begin(r->ctx);
        MIXP_AUTOCAST(r->ctx, dtype) { loss = model(r); }
        out[0] = (float)mixp_item(loss);
        CHECK_INT(mixp_backward(r->ctx, loss), MIXP_OK);
        CHECK_INT(mixp_optimizer_step(r->opt), MIXP_OK);
    }
    out++;
    for (int i = 0; i < PARAMS; i++) {
        if (r->p[i]->grad) mixp_read(r->p[i]->grad, out, MIXP_F32, r->p[i]->count);
        out += r->p[i]->count;
    }
    CHECK_INT(mixp_context_error(r->ctx, NULL), MIXP_OK);
    mixp_context_free(r->ctx);
}

enum { VALUES = 1 + COUNT + 2 * WIDTH * WIDTH + 3 * WIDTH };

static void gradients_are_those_of_two_operators(void) {
    static const mixp_dtype dtypes[] = { MIXP_F32, MIXP_F16, MIXP_BF16 };
    for (int how = 0; how < 256; how++)
        for (int i = 0; i < 5; i++) {
            static float one[VALUES], two[VALUES];
            int level = i ? 1 + i % 2 : 0, bad = test_bad;
            mixp_dtype dtype = dtypes[(i + 1) / 2];
            run_of r = run_new(how, 0, level);
            memset(one, 0, sizeof one);
            memset(two, 0, sizeof two);
            values_of(&r, dtype, one);
            CHECK((how & NO_KERNEL) ? !seen.calls : seen.calls > 0);
            r = run_new(how, 1, level);
            values_of(&r, dtype, two);
            CHECK_INT(seen.calls, 0);
            CHECK_INT(memcmp(one, two, sizeof one), 0);
            if (test_bad > bad) printf("  how %d, %s, level %d\n", how, mixp_dtype_name(dtype), level);
        }
}

/* A sampled step looks at the sum between them: they run apart there, and in the others as one. */
static void looks_take_them_apart(void) {
    float values[VALUES];
    run_of r = run_new(GUARDED, 0, 1);
    values_of(&r, MIXP_F16, values);
    CHECK_INT(seen.calls, 2);           /* of three steps the first and the last are sampled */
    r = run_new(0, 0, 1);
    values_of(&r, MIXP_F16, values);
    CHECK_INT(seen.calls, 6);
}

/* At level 1 the stream is f32 and its terms are low: their gradients come with the norm's. */
static void the_second_gradient_needs_no_cast(void) {
    static const struct { int how, level, second; } cases[] = {
        { 0, 1, 2 }, { 0, 2, 0 }, { 0, 0, 0 }, { NO_KERNEL, 1, 0 }, { TWICE, 1, 1 } };
    float values[VALUES];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        run_of r = run_new(cases[i].how, 0, cases[i].level);
        values_of(&r, cases[i].level ? MIXP_BF16 : MIXP_F32, values);
        CHECK_INT(seen.second, 3 * cases[i].second);
    }
}

/* A term that nobody else reads is given back, and nothing else changes. */
static void a_disposable_term_is_given_back(void) {
    static const int hows[] = { 0, SHARED, KEPT, NO_KERNEL, RMS, DOUBLED, EARLY, GUARDED };
    static const int gives[] = { 1, 1, 1, 0, 1, 1, 0, 1 };
    for (size_t i = 0; i < 3 * (sizeof hows / sizeof *hows); i++) {
        static float one[VALUES], two[VALUES];
        mixp_dtype dtype = i % 3 ? i % 3 == 1 ? MIXP_F16 : MIXP_BF16 : MIXP_F32;
        size_t used[2];
        for (int disposed = 0; disposed < 2; disposed++) {
            run_of r = run_new(hows[i / 3], 0, 1 + (int)(i & 1));
            r.disposed = disposed;
            for (int step = 0; step < 2; step++) {      /* the first is one that a guard looks at */
                mixp_step_begin(r.ctx);
                MIXP_AUTOCAST(r.ctx, dtype) { CHECK(model(&r) != NULL); }
            }
            used[disposed] = mixp_context_memory(r.ctx).used;
            memset(disposed ? two : one, 0, sizeof one);
            values_of(&r, dtype, disposed ? two : one);
        }
        CHECK_INT(memcmp(one, two, sizeof one), 0);
        CHECK_INT(used[1] < used[0], gives[i / 3]);
    }
}

/* Whoever reads it afterwards is told. */
static void a_term_that_was_given_back_is_gone(void) {
    run_of r = run_new(TWICE, 0, 1);
    const char *why = "";
    float x[COUNT];
    r.disposed = 1;
    mixp_step_begin(r.ctx);
    CHECK(!model(&r));
    CHECK_INT(mixp_context_error(r.ctx, &why), MIXP_ERR_ORDER);
    CHECK_TEXT(why, "tanh: input 0 no longer exists: it was disposable");
    mixp_context_clear_error(r.ctx);
    mixp_tensor *f = mixp_linear(r.ctx, r.p[0], r.p[1], NULL);
    CHECK_INT(mixp_read(f, x, MIXP_F32, COUNT), MIXP_OK);
    mixp_tensor_set_disposable(f, 1);
    CHECK(mixp_add_layer_norm(r.ctx, r.p[0], f, r.p[3], NULL, 1e-5f, NULL) != NULL);
    CHECK_INT(mixp_read(f, x, MIXP_F32, COUNT), MIXP_ERR_ORDER);
    CHECK_INT(mixp_write(f, x, MIXP_F32, COUNT), MIXP_ERR_ORDER);
    CHECK_INT(mixp_fill(f, 1.0), MIXP_ERR_ORDER);
    CHECK_INT(mixp_init_normal(f, 0.0, 1.0), MIXP_ERR_ORDER);
    CHECK_INT(mixp_ranks_sum(f), MIXP_ERR_ORDER);
    mixp_context_error(r.ctx, &why);
    CHECK_TEXT(why, "mixp_read: the tensor no longer exists: it was disposable");
    mixp_context_free(r.ctx);
}

/* The gradient of w1 through a GELU that reads a disposable term; a branch without gradients, where
 * it is added and normed, comes in between. */
static void branch_of(int branch, float *out) {
    run_of r = run_new(0, 0, 1);
    mixp_context *c = r.ctx;
    mixp_step_begin(c);
    mixp_tensor *f = mixp_linear(c, r.p[0], r.p[1], NULL);
    mixp_tensor *g = mixp_gelu(c, f);
    CHECK_INT(mixp_tensor_set_disposable(f, 1), MIXP_OK);
    if (branch)
        MIXP_NO_GRAD(c) { CHECK(mixp_add_layer_norm(c, r.p[0], f, r.p[3], NULL, 1e-5f, NULL) != NULL); }
    mixp_tensor *x = mixp_scale(c, r.p[0], 3);       /* of the term's size */
    CHECK_INT(mixp_backward(c, mixp_mean(c, mixp_mul(c, g, x), MIXP_ALL, 0)), MIXP_OK);
    CHECK_INT(mixp_read(r.p[1]->grad, out, MIXP_F32, WIDTH * WIDTH), MIXP_OK);
    CHECK_INT(seen.calls, branch);
    mixp_context_free(c);
}
static void a_term_that_another_operator_recorded_stays(void) {
    float with[WIDTH * WIDTH], without[WIDTH * WIDTH];
    branch_of(0, without);
    branch_of(1, with);
    CHECK_INT(memcmp(with, without, sizeof with), 0);
}

static mixp_tensor *checked(mixp_context *c, void *user) {
    run_of *r = (run_of *)user;
    (void)c;
    return model(r);
}
static void gradients_are_differences(void) {
    for (int how = 0; how <= RMS; how += RMS) {
        run_of r = run_new(how | SHARED, 0, 0);
        double worst = 1;
        CHECK_INT(mixp_check_gradients(r.ctx, checked, &r, PARAMS - 1, r.p, 0, &worst), MIXP_OK);
        CHECK(worst < 5e-3);
        mixp_context_free(r.ctx);
    }
}

/* What cannot be one is two: a broadcast, casts of a class. */
static void others_are_two_operators(void) {
    run_of r = run_new(0, 0, 1);
    mixp_tensor *sum = NULL, *h = NULL, *want = NULL;
    float y[2][COUNT];
    mixp_step_begin(r.ctx);
    h = mixp_add_layer_norm(r.ctx, r.p[0], r.p[5], r.p[3], NULL, 1e-5f, &sum);
    want = mixp_layer_norm(r.ctx, mixp_add(r.ctx, r.p[0], r.p[5]), r.p[3], NULL, 1e-5f);
    CHECK_INT(mixp_read(h, y[0], MIXP_F32, COUNT), MIXP_OK);
    CHECK_INT(mixp_read(want, y[1], MIXP_F32, COUNT), MIXP_OK);
    CHECK_INT(memcmp(y[0], y[1], sizeof y[0]), 0);
    CHECK_INT(sum->count, COUNT);
    mixp_autocast_override(r.ctx, mixp_op_builtin(MIXP_OP_RMS_NORM), MIXP_CLASS_LOW);
    MIXP_AUTOCAST(r.ctx, MIXP_F16) {
        h = mixp_add_rms_norm(r.ctx, r.p[0], r.p[0], r.p[3], 1e-5f, NULL);
        want = mixp_rms_norm(r.ctx, mixp_add(r.ctx, r.p[0], r.p[0]), r.p[3], 1e-5f);
    }
    CHECK_INT(h->dtype, MIXP_F16);
    CHECK_INT(mixp_read(h, y[0], MIXP_F32, COUNT), MIXP_OK);
    CHECK_INT(mixp_read(want, y[1], MIXP_F32, COUNT), MIXP_OK);
    CHECK_INT(memcmp(y[0], y[1], sizeof y[0]), 0);
    CHECK_INT(seen.calls, 0);
    MIXP_NO_GRAD(r.ctx) { h = mixp_add_rms_norm(r.ctx, r.p[0], r.p[0], NULL, 1e-5f, &sum); }
    CHECK(h && sum);
    mixp_context_free(r.ctx);
}

static void refusals(void) {
    static const struct { int a, gamma; float eps; const char *text; } bad[] = {
        { 1, 3, 1e-5f, "add: a 'w1'" }, { 0, 1, 1e-5f, "layer_norm" }, { 0, 3, 0, "eps" } };
    for (int i = 0; i < 3; i++) {
        run_of r = run_new(0, 0, 0);
        mixp_tensor *sum = r.p[0];
        const char *why = "";
        mixp_step_begin(r.ctx);
        CHECK(!mixp_add_layer_norm(r.ctx, r.p[bad[i].a], r.p[0], r.p[bad[i].gamma], NULL, bad[i].eps,
                                   &sum));
        CHECK(!sum);
        CHECK(mixp_context_error(r.ctx, &why) != MIXP_OK);
        CHECK_TEXT(why, bad[i].text);
        mixp_context_free(r.ctx);
    }
    CHECK(!mixp_add_layer_norm(NULL, NULL, NULL, NULL, NULL, 1e-5f, NULL));
}

int main(void) {
    RUN(gradients_are_those_of_two_operators);
    RUN(looks_take_them_apart);
    RUN(the_second_gradient_needs_no_cast);
    RUN(a_disposable_term_is_given_back);
    RUN(a_term_that_was_given_back_is_gone);
    RUN(a_term_that_another_operator_recorded_stays);
    RUN(gradients_are_differences);
    RUN(others_are_two_operators);
    RUN(refusals);
    return test_report();
}
