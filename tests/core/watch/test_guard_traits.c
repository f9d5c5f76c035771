/* test_guard_traits.c - what the guard knows of each built-in operator (src/watch/traits.c), beside what the
 * operator does: every operator of the table is applied.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "internals.h"
#include "test.h"

enum { ROWS = 32, COLS = 8, N = ROWS * COLS };

static mixp_context *c;

static mixp_tensor *array(mixp_dtype dtype, const float *x) {
    static const int64_t shape[2] = { ROWS, COLS };
    mixp_tensor *t = mixp_input(c, MIXP_F32, 2, shape, x);
    return dtype == MIXP_F32 ? t : mixp_cast(c, t, dtype);
}
static mixp_tensor *all(mixp_dtype dtype, double value) {
    float x[N];
    int i;
    for (i = 0; i < N; i++) x[i] = (float)value;
    return array(dtype, x);
}
static mixp_tensor *ones(void) {
    static const int64_t shape[2] = { ROWS, COLS };
    uint8_t mask[N];
    memset(mask, 1, sizeof mask);
    return mixp_input(c, MIXP_U8, 2, shape, mask);
}
static mixp_tensor *ids(void) {
    static const int64_t shape[2] = { ROWS, COLS };
    int32_t rows[N];
    int i;
    for (i = 0; i < N; i++) rows[i] = i / COLS;
    return mixp_input(c, MIXP_I32, 2, shape, rows);
}

static int traits(mixp_op_id id) { return mixpi_traits_of(mixp_op_builtin(id)); }
static const char *name(mixp_op_id id) { return mixp_op_builtin(id)->name; }

static void demand(mixp_op_id id, int trait, const char *why) {
    if (traits(id) & trait) return;
    test_bad++;
    TEST_SHOW("'%s' %s: a trait is missing", name(id), why);
}

/* The operators that have one input of any shape, and those of two arrays: x and `with`. NULL: another. */
static mixp_tensor *simple(mixp_op_id id, mixp_tensor *x) {
    switch ((int)id) {
    case MIXP_OP_RELU: return mixp_relu(c, x);
    case MIXP_OP_GELU: return mixp_gelu(c, x);
    case MIXP_OP_GELU_TANH: return mixp_gelu_tanh(c, x);
    case MIXP_OP_SILU: return mixp_silu(c, x);
    case MIXP_OP_TANH: return mixp_tanh(c, x);
    case MIXP_OP_SIGMOID: return mixp_sigmoid(c, x);
    case MIXP_OP_SQRT: return mixp_sqrt(c, x);
    case MIXP_OP_EXP: return mixp_exp(c, x);
    case MIXP_OP_LOG: return mixp_log(c, x);
    case MIXP_OP_POW: return mixp_pow(c, x, -1.0f);
    case MIXP_OP_NEG: return mixp_neg(c, x);
    case MIXP_OP_ABS: return mixp_abs(c, x);
    case MIXP_OP_SIN: return mixp_sin(c, x);
    case MIXP_OP_COS: return mixp_cos(c, x);
    case MIXP_OP_CLAMP: return mixp_clamp(c, x, -1.0f, 1.0f);
    case MIXP_OP_RELU_SQUARED: return mixp_relu_squared(c, x);
    case MIXP_OP_SOFT_CAP: return mixp_soft_cap(c, x, 2.0f);
    case MIXP_OP_SQUARE: return mixp_square(c, x);
    case MIXP_OP_RECIPROCAL: return mixp_reciprocal(c, x);
    case MIXP_OP_LOG1P: return mixp_log1p(c, x);
    case MIXP_OP_EXPM1: return mixp_expm1(c, x);
    case MIXP_OP_ERF: return mixp_erf(c, x);
    case MIXP_OP_LOG2: return mixp_log2(c, x);
    case MIXP_OP_LOG10: return mixp_log10(c, x);
    case MIXP_OP_ACOS: return mixp_acos(c, x);
    case MIXP_OP_ASIN: return mixp_asin(c, x);
    case MIXP_OP_TAN: return mixp_tan(c, x);
    case MIXP_OP_SINH: return mixp_sinh(c, x);
    case MIXP_OP_COSH: return mixp_cosh(c, x);
    case MIXP_OP_ERFINV: return mixp_erfinv(c, x);
    case MIXP_OP_POWER: return mixp_power(c, x, all(x->dtype, -1.0));
    case MIXP_OP_ATAN2: return mixp_atan2(c, x, all(x->dtype, 1.0));
    case MIXP_OP_SOFTPLUS: return mixp_softplus(c, x, 1.0f);
    case MIXP_OP_LEAKY_RELU: return mixp_leaky_relu(c, x, 0.0f);
    case MIXP_OP_ELU: return mixp_elu(c, x, 1.0f);
    case MIXP_OP_SOFTMAX: return mixp_softmax(c, x);
    case MIXP_OP_LOG_SOFTMAX: return mixp_log_softmax(c, x);
    case MIXP_OP_SUM: return mixp_sum(c, x, 1, 1);
    case MIXP_OP_MAX: return mixp_max(c, x, 1, 1);
    case MIXP_OP_PROD: return mixp_prod(c, x, 1, 1);
    case MIXP_OP_CUMSUM: return mixp_cumsum(c, x, 1);
    case MIXP_OP_LAYER_NORM: return mixp_layer_norm(c, x, NULL, NULL, 1e-5f);
    case MIXP_OP_RMS_NORM: return mixp_rms_norm(c, x, NULL, 1e-5f);
    case MIXP_OP_DROPOUT: return mixp_dropout(c, x, 0.5f, 1);
    case MIXP_OP_TRANSPOSE: return mixp_transpose(c, x, 0, 1);
    case MIXP_OP_FLIP: return mixp_flip(c, x, 0);
    case MIXP_OP_SLICE: return mixp_slice(c, x, 0, 4, 12);
    case MIXP_OP_TOPK: return mixp_topk(c, x, 3, -1, 1, NULL);
    case MIXP_OP_SORT: return mixp_sort(c, x, -1, 0, NULL);
    case MIXP_OP_GATHER: return mixp_gather(c, x, 0, ids());
    case MIXP_OP_PAD: return mixp_pad(c, x, 0, 1, 1, -(float)INFINITY);
    case MIXP_OP_MASKED_FILL: return mixp_masked_fill(c, x, ones(), -(float)INFINITY);
    case MIXP_OP_WHERE: return mixp_where(c, ones(), all(x->dtype, 0.0), x);
    case MIXP_OP_ROPE: {
        mixp_rope_desc d;
        memset(&d, 0, sizeof d);
        d.head_dim = COLS;
        return mixp_rope(c, x, &d);
    }
    case MIXP_OP_MAXIMUM: return mixp_maximum(c, x, all(x->dtype, 5.0));
    case MIXP_OP_MINIMUM: return mixp_minimum(c, x, all(x->dtype, -5.0));
    default: return NULL;
    }
}

/* The operators that add and multiply, with the addends and factors that `offset` says. */
static mixp_tensor *rounding(mixp_op_id id, mixp_tensor *x, float offset) {
    static const int64_t cube[3] = { ROWS, COLS / 4, 4 };
    mixp_tensor *with = all(x->dtype, (double)offset);
    switch ((int)id) {
    case MIXP_OP_ADD: return mixp_add(c, x, with);
    case MIXP_OP_SUB: return mixp_sub(c, x, with);
    case MIXP_OP_MUL: return mixp_mul(c, x, with);
    case MIXP_OP_DIV: return mixp_div(c, with, x);
    case MIXP_OP_SCALE: return mixp_scale(c, x, offset);
    case MIXP_OP_ADD_SCALAR: return mixp_add_scalar(c, x, offset);
    case MIXP_OP_RSUB: return mixp_rsub(c, x, offset);
    case MIXP_OP_MEAN: return mixp_mean(c, mixp_reshape(c, x, 3, cube), 1, 1);
    case MIXP_OP_LINEAR: return mixp_linear(c, x, mixp_slice(c, with, 0, 0, COLS), NULL);
    case MIXP_OP_MATMUL: return mixp_matmul(c, x, mixp_slice(c, with, 0, 0, COLS), 0, 0);
    case MIXP_OP_SWIGLU: return mixp_swiglu(c, x, with);
    case MIXP_OP_PRELU: return mixp_prelu(c, mixp_neg(c, x), mixp_slice(c, mixp_reshape(c, with, 1, &with->count), 0, 0, 1));
    case MIXP_OP_SWIGLU_PACKED: return mixp_swiglu_packed(c, x);
    case MIXP_OP_SCATTER_ADD: return mixp_scatter_add(c, with, 0, ids(), x);
    case MIXP_OP_INDEX_ADD: {
        static const int64_t shape[1] = { ROWS };
        int32_t rows[ROWS];
        int i;
        for (i = 0; i < ROWS; i++) rows[i] = i;
        return mixp_index_add(c, with, 0, mixp_input(c, MIXP_I32, 1, shape, rows), x);
    }
    default: return NULL;
    }
}

/* The others: the tape's own, copies of one value, results that are no numbers, and those whose result is
 * f32 or a loss, at which nothing falls back. Attention is not measured. */
static int is_other(mixp_op_id id) {
    switch ((int)id) {
    case MIXP_OP_CAST: case MIXP_OP_RESHAPE: case MIXP_OP_DETACH: case MIXP_OP_PERMUTE: case MIXP_OP_EXPAND:
    case MIXP_OP_CONCAT: case MIXP_OP_STACK: case MIXP_OP_EMBEDDING:
    case MIXP_OP_ARGMAX: case MIXP_OP_ONE_HOT: case MIXP_OP_EQ: case MIXP_OP_NE: case MIXP_OP_GT:
    case MIXP_OP_GE: case MIXP_OP_LT: case MIXP_OP_LE:
    case MIXP_OP_CROSS_ENTROPY: case MIXP_OP_MSE: case MIXP_OP_BCE_WITH_LOGITS: case MIXP_OP_BCE:
    case MIXP_OP_L1: case MIXP_OP_SMOOTH_L1: case MIXP_OP_HUBER: case MIXP_OP_KL_DIV: case MIXP_OP_NLL:
    case MIXP_OP_LINEAR_CROSS_ENTROPY: case MIXP_OP_ATTENTION:
        return 1;
    default: return 0;
    }
}

static int all_zero(const mixp_tensor *t) {
    static double v[2 * N];
    int64_t i;
    if (!t || t->count > 2 * N || mixp_read(t, v, MIXP_F64, t->count) != MIXP_OK) return 0;
    for (i = 0; i < t->count; i++)
        if (v[i] != 0) return 0;
    return 1;
}
static int any_bad(const mixp_tensor *t) {
    static double v[2 * N];
    int64_t i;
    if (!t || t->count > 2 * N || mixp_read(t, v, MIXP_F64, t->count) != MIXP_OK) return 0;
    for (i = 0; i < t->count; i++)
        if (!(fabs(v[i]) < HUGE_VAL)) return 1;
    return 0;
}

static void each_operator_is_applied(void) {
    int id;
    c = mixp_context_new(NULL);
    for (id = 0; id < MIXP_OP_COUNT; id++) {
        mixp_tensor *x;
        int found;
        mixp_step_begin(c);
        x = all(MIXP_F32, 0.5);
        found = (simple((mixp_op_id)id, x) != NULL) + (rounding((mixp_op_id)id, x, 1.0f) != NULL) +
                is_other((mixp_op_id)id);
        if (found != 1) TEST_SHOW("'%s': add it to simple, rounding or is_other", name((mixp_op_id)id));
        CHECK_INT(found, 1);
        CHECK_INT(mixp_context_error(c, NULL), MIXP_OK);
    }
    mixp_context_free(c);
}

/* A loss whose gradient at y is 0 only where y is. */
static mixp_tensor *cubes(mixp_tensor *y) { return mixp_sum(c, mixp_mul(c, y, mixp_mul(c, y, y)), MIXP_ALL, 0); }

/* Values, or gradients, that are all zeros in f32 where the input and the result's gradient are not. */
static void what_cuts_says_so(void) {
    static const double values[4] = { 200.0, -200.0, 1.25, -1.25 };
    static const int64_t shape[2] = { ROWS, COLS };
    int id, i, k;
    c = mixp_context_new(NULL);
    for (id = 0; id < MIXP_OP_COUNT; id++)
        for (k = 0; k < 4; k++) {
            mixp_tensor *x, *y;
            float v[N];
            mixp_step_begin(c);
            for (i = 0; i < N; i++) v[i] = (float)(values[k] * (1.0 + 0.01 * (i % COLS)));
            for (i = 0; i < N && id == MIXP_OP_SOFTMAX; i++) v[i] *= i % COLS ? -1.0f : 1.0f;
            x = mixp_input(c, MIXP_F32, 2, shape, v);
            mixp_tensor_set_requires_grad(x, 1);
            y = simple((mixp_op_id)id, x);
            if (!y) y = rounding((mixp_op_id)id, x, 1.5f);
            if (!y) continue;
            if (all_zero(y)) demand((mixp_op_id)id, MIXPI_CUTS, "makes zeros");
            if (any_bad(y) || mixp_backward(c, cubes(y)) != MIXP_OK) continue;
            if (all_zero(x->grad)) demand((mixp_op_id)id, MIXPI_CUTS, "makes zeros of gradients");
        }
    CHECK_INT(mixp_context_error(c, NULL), MIXP_OK);
    mixp_context_free(c);
}

/* Inf and NaN of small numbers, in f32: f32 would not help. */
static void what_makes_inf_says_so(void) {
    static const double values[4] = { 0.0, -1.0, -2.0, 1.0 };
    int id, k;
    c = mixp_context_new(NULL);
    for (id = 0; id < MIXP_OP_COUNT; id++)
        for (k = 0; k < 4; k++) {
            mixp_tensor *x, *y;
            mixp_step_begin(c);
            x = all(MIXP_F32, values[k]);
            y = simple((mixp_op_id)id, x);
            if (!y) y = rounding((mixp_op_id)id, x, 1.5f);
            if (y && any_bad(y)) demand((mixp_op_id)id, MIXPI_MAY_MEAN | MIXPI_SHRINKS, "makes Inf");
        }
    mixp_step_begin(c);
    if (any_bad(mixp_add_scalar(c, all(MIXP_F32, 1.0), -(float)INFINITY)))
        demand(MIXP_OP_ADD_SCALAR, MIXPI_MAY_MEAN, "adds Inf");
    if (any_bad(mixp_rsub(c, all(MIXP_F32, 1.0), -(float)INFINITY)))
        demand(MIXP_OP_RSUB, MIXPI_MAY_MEAN, "subtracts from Inf");
    CHECK_INT(mixp_context_error(c, NULL), MIXP_OK);
    mixp_context_free(c);
}

/* Inputs that f16 holds, and a result whose variation it does not hold: an event names the operator. */
static double input_of(mixp_op_id id, int i) {
    const int k = i / COLS;
    switch ((int)id) {
    case MIXP_OP_ADD: case MIXP_OP_SUB: case MIXP_OP_ADD_SCALAR: case MIXP_OP_RSUB:
    case MIXP_OP_SCATTER_ADD: case MIXP_OP_INDEX_ADD:
        return (double)(k % 8) / 8;
    case MIXP_OP_MEAN:  return 2023.0 + (double)(k * 5 % 8 > (i % COLS) % 5);
    case MIXP_OP_SWIGLU_PACKED:
        return i % COLS < COLS / 2 ? 1.0 : 1.25 + (double)(k % 2) / 1024;  /* gates first */
    default: return 1.25 + (double)(k % 2) / 1024;
    }
}
static float offset_of(mixp_op_id id) {
    switch ((int)id) {
    case MIXP_OP_MUL: case MIXP_OP_DIV: case MIXP_OP_SCALE: case MIXP_OP_LINEAR: case MIXP_OP_MATMUL:
    case MIXP_OP_SWIGLU: case MIXP_OP_PRELU:
        return 0.7001953125f;
    default: return 2023.0f;
    }
}
static int imprecise_events(const char *op) {
    mixp_event e;
    size_t n = strlen(op);
    int i, found = 0;
    for (i = 0; mixp_guard_event(c, i, &e); i++) {
        const size_t length = strlen(e.site);
        if (e.kind != MIXP_EVENT_IMPRECISE || length < n) continue;
        found += strcmp(e.site + length - n, op) == 0;
    }
    return found;
}
static void what_rounds_is_measured(void) {
    static const int64_t one[2] = { 1, 1 };
    int id, i, measured = 0;
    for (id = 0; id < MIXP_OP_COUNT; id++) {
        mixp_tensor *p, *x, *y = NULL;
        mixp_optimizer *opt;
        float v[N];
        c = mixp_context_new(NULL);
        opt = mixp_optimizer_new(c, NULL);
        p = mixp_param(c, "p", MIXP_F32, 2, one);
        mixp_fill(p, 1.0);
        mixp_optimizer_add(opt, p, NULL);
        for (i = 0; i < N; i++) v[i] = (float)input_of((mixp_op_id)id, i);
        CHECK_INT(mixp_guard_start(c, NULL), MIXP_OK);
        for (i = 0; i < 3; i++) {
            mixp_step_begin(c);
            MIXP_AUTOCAST(c, MIXP_F16) {
                x = array(MIXP_F16, v);
                y = rounding((mixp_op_id)id, x, offset_of((mixp_op_id)id));
                if (y) mixp_backward(c, mixp_sum(c, mixp_mul(c, mixp_cast(c, y, MIXP_F32), p), MIXP_ALL, 0));
            }
            if (y) mixp_optimizer_step(opt);
        }
        if (y && !imprecise_events(name((mixp_op_id)id))) demand((mixp_op_id)id, 0, "rounds, and no event says so");
        measured += y != NULL;
        CHECK_INT(mixp_context_error(c, NULL), MIXP_OK);
        mixp_context_free(c);
    }
    CHECK_INT(measured, 15);
}

/* A border of -Inf, as before a maximum, is no overflow. */
static void a_border_of_inf_is_no_event(void) {
    static const int64_t shape[2] = { COLS, COLS };
    mixp_tensor *w, *loss = NULL;
    mixp_optimizer *opt;
    mixp_scaler *scaler;
    mixp_scaler_desc rule;
    mixp_event e;
    char text[512];
    int step;
    c = mixp_context_new(NULL);
    w = mixp_param(c, "w", MIXP_F32, 2, shape);
    mixp_init_normal(w, 0, 0.5);
    opt = mixp_optimizer_new(c, NULL);
    memset(&rule, 0, sizeof rule);
    rule.init_scale = 256.0f;
    scaler = mixp_scaler_new(c, &rule);
    mixp_optimizer_add(opt, w, NULL);
    CHECK_INT(mixp_guard_start(c, NULL), MIXP_OK);
    for (step = 0; step < 40; step++) {
        mixp_step_begin(c);
        mixp_zero_grad(opt);
        MIXP_AUTOCAST(c, MIXP_F16) {
            mixp_tensor *y = mixp_linear(c, all(MIXP_F32, 0.5 + 0.01 * step), w, NULL);
            y = mixp_add_scalar(c, mixp_pad(c, y, 1, 1, 1, -(float)INFINITY), 1.0f);
            loss = mixp_mean(c, mixp_max(c, y, 1, 0), MIXP_ALL, 0);
        }
        mixp_backward(c, mixp_scaler_scale(scaler, loss));
        mixp_scaler_step(scaler, opt);
        mixp_scaler_update(scaler);
    }
    CHECK_INT(mixp_optimizer_verdict(opt).applied, 40);
    CHECK_INT(mixp_guard_event(c, 0, &e), 0);
    if (mixp_guard_event(c, 0, &e)) TEST_SHOW("%s", mixp_event_text(&e, text, sizeof text));
    CHECK_INT(mixp_context_error(c, NULL), MIXP_OK);
    mixp_context_free(c);
}

int main(void) {
    RUN(each_operator_is_applied);
    RUN(what_cuts_says_so);
    RUN(what_makes_inf_says_so);
    RUN(what_rounds_is_measured);
    RUN(a_border_of_inf_is_no_event);
    return test_report();
}
