/* test_mlp.c - mixp_mlp and the gradients of linear layers on a device whose products have
 * epilogues: values and gradients equal those of three operators, and gradients equal finite
 * differences. Also: when the library fuses the operators.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include "examples/ops.h"
#include "test.h"

enum { ROWS = 6, WIDTH = 5, MIDDLE = 7, OUT = 4, PARAMS = 5 };
enum { BOTH = MIXP_EPILOGUES_BIAS | MIXP_EPILOGUES_GELU };

/* The CPU with such a kernel, made of the CPU's others; calls of each kind are counted. */
static struct { mixp_kernels kernels; mixp_device device; int calls[MIXP_EPILOGUE_COUNT]; } seen;

static mixp_result sums_of(const mixp_exec *x, const mixp_gemm_epilogue_args *k) {
    mixp_reduce_args sum;
    memset(&sum, 0, sizeof sum);
    sum.outer = k->gemm.trans_a ? 1 : k->gemm.m;
    sum.n = k->gemm.k;
    sum.inner = k->gemm.trans_a ? k->gemm.m : 1;
    sum.factor = 1;
    sum.a = k->gemm.a;
    sum.y = k->sums;
    return mixp_cpu()->kernels->reduce(x, &sum);
}
static mixp_result gelu_of(const mixp_exec *x, const mixp_gemm_epilogue_args *k) {
    mixp_unary_args f;
    memset(&f, 0, sizeof f);
    f.op = MIXP_UNARY_GELU_TANH;
    f.n = k->gemm.m * k->gemm.n;
    f.a.data = k->before.data;
    f.a.dtype = k->before.dtype;
    f.y = k->gemm.c;
    return mixp_cpu()->kernels->unary(x, &f);
}
static mixp_result gelu_back(const mixp_exec *x, const mixp_gemm_epilogue_args *k) {
    mixp_unary_backward_args f;
    memset(&f, 0, sizeof f);
    f.op = MIXP_UNARY_GELU_TANH;
    f.n = k->gemm.m * k->gemm.n;
    f.dy.data = k->gemm.c.data;
    f.dy.dtype = k->gemm.c.dtype;
    f.a.data = k->before.data;
    f.a.dtype = k->before.dtype;
    f.da = k->gemm.c;
    return mixp_cpu()->kernels->unary_backward(x, &f);
}
static mixp_result epilogue(const mixp_exec *x, const mixp_gemm_epilogue_args *k) {
    mixp_gemm_args g = k->gemm;
    seen.calls[k->kind]++;
    if (k->kind == MIXP_EPILOGUE_GELU) g.c = k->before;
    mixp_result r = mixp_cpu()->kernels->gemm(x, &g);
    if (r != MIXP_OK) return r;
    return k->kind == MIXP_EPILOGUE_ROW_SUMS ? sums_of(x, k)
           : k->kind == MIXP_EPILOGUE_GELU   ? gelu_of(x, k)
                                             : gelu_back(x, k);
}

/* x, up, its bias, down, its bias */
typedef struct model { mixp_context *ctx; mixp_tensor *p[PARAMS]; int apart; } model;

static model model_new(int epilogues, int has_kernel) {
    static const int64_t shapes[PARAMS][2] = {
        { ROWS, WIDTH }, { MIDDLE, WIDTH }, { MIDDLE, 0 }, { OUT, MIDDLE }, { OUT, 0 } };
    static const char *const names[PARAMS] = { "x", "up", "up.b", "down", "down.b" };
    mixp_context_desc desc = { 0 };
    model m = { 0 };
    memset(&seen, 0, sizeof seen);
    seen.kernels = *mixp_cpu()->kernels;
    if (has_kernel) seen.kernels.gemm_epilogue = epilogue;
    seen.device = *mixp_cpu();
    seen.device.kernels = &seen.kernels;
    desc.device = &seen.device;
    desc.epilogues = epilogues;
    desc.seed = 11;
    m.ctx = mixp_context_new(&desc);
    for (int i = 0; i < PARAMS; i++) {
        m.p[i] = mixp_param(m.ctx, names[i], MIXP_F32, shapes[i][1] ? 2 : 1, shapes[i]);
        mixp_init_normal(m.p[i], 0, 0.7);
    }
    return m;
}

static mixp_tensor *layers(const model *m) {
    mixp_context *c = m->ctx;
    mixp_tensor *const *p = m->p;
    if (!m->apart) return mixp_mlp(c, p[0], p[1], p[2], p[3], p[4]);
    return mixp_linear(c, mixp_gelu_tanh(c, mixp_linear(c, p[0], p[1], p[2])), p[3], p[4]);
}
static mixp_tensor *loss_of(mixp_context *c, void *user) {
    mixp_tensor *y = layers((const model *)user);
    return mixp_mean(c, mixp_mul(c, y, mixp_tanh(c, y)), MIXP_ALL, 0);
}

enum { VALUES = ROWS * OUT + ROWS * WIDTH + MIDDLE * WIDTH + MIDDLE + OUT * MIDDLE + OUT };

/* The result, and all gradients after so many walks back. */
static void values_of(model *m, mixp_dtype dtype, int walks, float *out) {
    mixp_tensor *y = NULL, *loss = NULL;
    for (int i = 0; i < walks; i++) {
        mixp_step_begin(m->ctx);
        MIXP_AUTOCAST(m->ctx, dtype) { y = layers(m); }
        loss = mixp_mean(m->ctx, mixp_mul(m->ctx, y, y), MIXP_ALL, 0);
        CHECK_INT(mixp_backward(m->ctx, loss), MIXP_OK);
    }
    CHECK_INT(mixp_read(y, out, MIXP_F32, ROWS * OUT), MIXP_OK);
    out += ROWS * OUT;
    for (int i = 0; i < PARAMS; i++) {
        CHECK_INT(mixp_read(m->p[i]->grad, out, MIXP_F32, m->p[i]->count), MIXP_OK);
        out += m->p[i]->count;
    }
    CHECK_INT(mixp_context_error(m->ctx, NULL), MIXP_OK);
    mixp_context_free(m->ctx);
}

static void calls_are(int sums, int gelu, int back) {
    CHECK_INT(seen.calls[MIXP_EPILOGUE_ROW_SUMS], sums);
    CHECK_INT(seen.calls[MIXP_EPILOGUE_GELU], gelu);
    CHECK_INT(seen.calls[MIXP_EPILOGUE_GELU_BACK], back);
}

/* This device rounds where three operators do, so every bit is theirs. */
static void values_are_those_of_three_operators(void) {
    static const mixp_dtype dtypes[] = { MIXP_F32, MIXP_F16, MIXP_BF16 };
    for (int how = 0; how < 4; how++)
        for (int d = 0; d < 3; d++) {
            static float one[VALUES], two[VALUES];
            int walks = 1 + d % 2, sums = how & MIXP_EPILOGUES_BIAS ? 2 * walks : 0;
            int gelu = how & MIXP_EPILOGUES_GELU ? walks : 0;
            model m = model_new(how, 1);
            values_of(&m, dtypes[d], walks, one);
            calls_are(sums, gelu, gelu);
            m = model_new(0, 1);
            m.apart = 1;
            values_of(&m, dtypes[d], walks, two);
            calls_are(0, 0, 0);
            CHECK_INT(memcmp(one, two, sizeof one), 0);
        }
}

/* GELU_BF16: only what is computed in bf16, by autocast or by its own dtype. */
static void only_bf16_is_joined(void) {
    static const mixp_dtype dtypes[] = { MIXP_F32, MIXP_F16, MIXP_BF16 };
    static float values[VALUES];
    for (int d = 0; d < 3; d++) {
        int joined = dtypes[d] == MIXP_BF16;
        model m = model_new(MIXP_EPILOGUES_GELU_BF16, 1);
        values_of(&m, dtypes[d], 1, values);
        calls_are(0, joined, joined);
    }
}

/* The derivative of the result along all ones of each parameter, and that derivative's own. */
static void derivatives_of(int epilogues, mixp_dtype dtype, int along, float *out) {
    model m = model_new(epilogues, 1);
    mixp_tensor *y = NULL, *d, *second;
    m.apart = !epilogues;
    mixp_step_begin(m.ctx);
    MIXP_AUTOCAST(m.ctx, dtype) { y = layers(&m); }
    d = mixp_jvp(m.ctx, y, m.p[along], NULL);
    second = mixp_jvp(m.ctx, d, m.p[along], NULL);
    CHECK_INT(mixp_read(d, out, MIXP_F32, ROWS * OUT), MIXP_OK);
    CHECK_INT(mixp_read(second, out + ROWS * OUT, MIXP_F32, ROWS * OUT), MIXP_OK);
    if (along < 4) { /* the derivative along the last bias is constant */
        CHECK_INT(mixp_backward(m.ctx, mixp_mean(m.ctx, d, MIXP_ALL, 0)), MIXP_OK);
        CHECK_INT(mixp_read(m.p[1]->grad, out + 2 * ROWS * OUT, MIXP_F32, MIDDLE * WIDTH), MIXP_OK);
    }
    CHECK_INT(mixp_context_error(m.ctx, NULL), MIXP_OK);
    calls_are(0, epilogues ? 1 : 0, 0);
    mixp_context_free(m.ctx);
}

/* mixp_jvp knows one operator as it knows three; tangents are made by three, so every bit is theirs. */
static void tangents_are_those_of_three_operators(void) {
    enum { ALL = 2 * ROWS * OUT + MIDDLE * WIDTH };
    static const mixp_dtype dtypes[] = { MIXP_F32, MIXP_F16, MIXP_BF16 };
    for (int d = 0; d < 3; d++)
        for (int along = 0; along < PARAMS; along++) {
            static float one[ALL], three[ALL];
            derivatives_of(MIXP_EPILOGUES_GELU, dtypes[d], along, one);
            derivatives_of(0, dtypes[d], along, three);
            CHECK_INT(memcmp(one, three, sizeof one), 0);
        }
}

static void gradients_are_differences(void) {
    model m = model_new(BOTH, 1);
    double worst = 1;
    CHECK_INT(mixp_check_gradients(m.ctx, loss_of, &m, PARAMS, m.p, 0, &worst), MIXP_OK);
    CHECK(worst < 5e-3);
    CHECK(seen.calls[MIXP_EPILOGUE_GELU] > 0);
    mixp_context_free(m.ctx);
}

/* Weights that are frozen have no gradients, and a layer without biases none of theirs. */
static void what_nobody_wants_is_not_made(void) {
    model m = model_new(BOTH, 1);
    mixp_tensor_set_requires_grad(m.p[1], 0);
    mixp_tensor_set_requires_grad(m.p[0], 0);
    mixp_step_begin(m.ctx);
    mixp_tensor *y = mixp_mlp(m.ctx, m.p[0], m.p[1], m.p[2], m.p[3], NULL);
    CHECK_INT(mixp_backward(m.ctx, mixp_mean(m.ctx, y, MIXP_ALL, 0)), MIXP_OK);
    CHECK(!m.p[0]->grad && !m.p[1]->grad && m.p[2]->grad && m.p[3]->grad && !m.p[4]->grad);
    calls_are(0, 1, 1);
    mixp_context_free(m.ctx);
}

/* Runs forward with some parameters frozen, touches one, and walks back. */
static mixp_result written_between(int apart, unsigned frozen, int written) {
    model m = model_new(BOTH, 1);
    m.apart = apart;
    for (int i = 0; i < PARAMS; i++) mixp_tensor_set_requires_grad(m.p[i], !(frozen >> i & 1));
    mixp_step_begin(m.ctx);
    mixp_tensor *loss = mixp_mean(m.ctx, layers(&m), MIXP_ALL, 0);
    mixp_tensor_touch(m.p[written]);
    mixp_result r = mixp_backward(m.ctx, loss);
    mixp_context_free(m.ctx);
    return r;
}

/* What no gradient is made of may be written before the walk, as where they are three. */
static void what_was_written_matters_as_to_three(void) {
    int fine = 0, refused = 0;
    for (unsigned frozen = 0; frozen < (1u << PARAMS) - 1; frozen++)
        for (int written = 0; written < PARAMS; written++) {
            mixp_result three = written_between(1, frozen, written);
            CHECK_INT(written_between(0, frozen, written), three);
            fine += three == MIXP_OK;
            refused += three == MIXP_ERR_ORDER;
        }
    CHECK(fine && refused);
}

/* Without the kernel, with another class, or while a guard looks, they are three. */
static void others_are_three(void) {
    mixp_guard_desc guard = { 0 };
    float out[VALUES];
    model m = model_new(BOTH, 0);
    values_of(&m, MIXP_BF16, 1, out);
    calls_are(0, 0, 0);
    m = model_new(BOTH, 1);
    mixp_autocast_override(m.ctx, mixp_op_builtin(MIXP_OP_GELU_TANH), MIXP_CLASS_F32);
    values_of(&m, MIXP_BF16, 1, out);
    calls_are(2, 0, 0);
    m = model_new(BOTH, 1);
    CHECK_INT(mixp_guard_start(m.ctx, &guard), MIXP_OK);
    values_of(&m, MIXP_F16, 1, out);
    calls_are(2, 0, 0);
}

/* Rules of recipes that leave both layers in bf16 leave them one operator, with its bits; a recipe for either, or one
 * recipe for all, makes them three. No size fits a recipe, so all products are bf16. */
static void rules_of_recipes_join_what_they_leave(void) {
    static float plain[VALUES], ruled[VALUES];
    mixp_recipe fp8;
    memset(&fp8, 0, sizeof fp8);
    fp8.kind = MIXP_RECIPE_FP8_CURRENT;
    const mixp_recipe_rule rules[4][2] = { { { "x", &fp8 }, { "*", NULL } },
                                           { { "x", &fp8 }, { "up.b", &fp8 } },
                                           { { "up", &fp8 }, { "*", NULL } },
                                           { { "down", &fp8 }, { "*", NULL } } };
    model m = model_new(MIXP_EPILOGUES_GELU, 1);
    values_of(&m, MIXP_BF16, 1, plain);
    calls_are(0, 1, 1);
    for (int i = 0; i < 5; i++) {
        m = model_new(MIXP_EPILOGUES_GELU, 1);
        if (i < 4) CHECK_INT(mixp_autocast_set_recipes(m.ctx, rules[i], 2), MIXP_OK);
        else CHECK_INT(mixp_autocast_set_recipe(m.ctx, &fp8), MIXP_OK);
        mixp_step_begin(m.ctx);
        MIXP_AUTOCAST(m.ctx, MIXP_BF16) layers(&m);
        mixp_recipe_counts counts = mixp_autocast_recipe_counts(m.ctx);
        CHECK_INT(counts.kept, i < 2 ? 2 : i < 4 ? 1 : 0);
        CHECK_INT(counts.unfit, i < 2 ? 0 : i < 4 ? 1 : 2);
        memset(seen.calls, 0, sizeof seen.calls);
        values_of(&m, MIXP_BF16, 1, ruled);
        calls_are(0, i < 2, i < 2);
        CHECK_INT(memcmp(plain, ruled, sizeof plain), 0);
    }
}

static void refusals(void) {
    model m = model_new(BOTH, 1);
    mixp_tensor **p = m.p;
    const char *why = "";
    mixp_step_begin(m.ctx);
    CHECK(!mixp_mlp(m.ctx, p[0], p[1], p[4], p[3], p[4]));      /* a bias of another length */
    CHECK_INT(mixp_context_error(m.ctx, &why), MIXP_ERR_SHAPE);
    CHECK_TEXT(why, "linear");
    mixp_context_clear_error(m.ctx);
    CHECK(!mixp_mlp(m.ctx, p[0], p[1], NULL, NULL, NULL));
    CHECK_INT(mixp_context_error(m.ctx, &why), MIXP_ERR_ARGUMENT);
    CHECK(!mixp_mlp(NULL, NULL, NULL, NULL, NULL, NULL));
    mixp_context_free(m.ctx);
}

/* A record of an earlier step, which is other memory by now: numbers, in whose halves f32 and a rank
 * of a thousand million may be read. */
enum { LATE = 12, NUMBERS = 1 << 11 };
typedef struct numbers { double at[NUMBERS]; } numbers;

static mixp_result scalar_infer(mixp_call *c) { return mixp_call_output(c, MIXP_F32, 0, NULL); }
static mixp_result does_nothing(mixp_call *c) { return c ? MIXP_OK : MIXP_ERR_ARGUMENT; }

static void a_tensor_of_an_earlier_step(void) {
    static const mixp_op op = { "numbers", MIXP_CLASS_KEEP, sizeof(numbers), scalar_infer,
                                does_nothing, NULL, NULL };
    static numbers ones;
    const int64_t one[1] = { 1 };
    model m = model_new(BOTH, 1);
    mixp_tensor **p = m.p, *late[LATE];
    const char *why = "";
    for (int i = 0; i < NUMBERS; i++) ones.at[i] = 1;
    mixp_step_begin(m.ctx);
    for (int i = 0; i < LATE; i++) late[i] = mixp_activation(m.ctx, MIXP_F32, 1, one);
    mixp_step_begin(m.ctx);
    CHECK(mixp_apply(m.ctx, &op, 1, p, 1, &ones) != NULL);
    for (int i = 4; i < LATE; i++) {
        CHECK(!mixp_mlp(m.ctx, late[i], p[1], p[2], p[3], p[4]));
        CHECK_INT(mixp_context_error(m.ctx, &why), MIXP_ERR_ORDER);
        CHECK_TEXT(why, "from an earlier step");
        mixp_context_clear_error(m.ctx);
        CHECK(!mixp_mlp(m.ctx, p[0], late[i], p[2], p[3], p[4]));
        CHECK_INT(mixp_context_error(m.ctx, &why), MIXP_ERR_ORDER);
        mixp_context_clear_error(m.ctx);
    }
    calls_are(0, 0, 0);
    mixp_context_free(m.ctx);
}

/* A CPU has nothing to choose. */
static void choices_of_a_cpu(void) {
    mixp_context *ctx = mixp_context_new(NULL);
    char text[4] = "abc";
    CHECK_INT(mixp_context_gemm_choices(ctx, text, sizeof text), 1);
    CHECK_TEXT(text, "");
    CHECK_INT(text[0], 0);
    CHECK_INT(mixp_context_gemm_choices(NULL, NULL, 0), 1);
    mixp_context_free(ctx);
}

int main(void) {
    RUN(values_are_those_of_three_operators);
    RUN(only_bf16_is_joined);
    RUN(tangents_are_those_of_three_operators);
    RUN(gradients_are_differences);
    RUN(what_nobody_wants_is_not_made);
    RUN(what_was_written_matters_as_to_three);
    RUN(others_are_three);
    RUN(rules_of_recipes_join_what_they_leave);
    RUN(refusals);
    RUN(a_tensor_of_an_earlier_step);
    RUN(choices_of_a_cpu);
    return test_report();
}
