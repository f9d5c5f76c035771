/* operator_cases.h - the small operators through the tape, on the device of `case_context`: values
 * and gradients beside double-precision loops, sizes of 1, Inf and NaN, refusals.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
enum { CASE_ROOM = 512 };

static const mixp_dtype case_reals[3] = { MIXP_F32, MIXP_F16, MIXP_BF16 };
static mixp_context *case_c;

/* Half a unit in the last place of a number of size 1. */
static double case_rounding(mixp_dtype dtype) {
    return dtype == MIXP_F16 ? 1.0 / 2048 : dtype == MIXP_BF16 ? 1.0 / 256 : 1.0 / 16777216;
}

/* What rounding to dtype, on top of `more` in f32, may change: in f16 also among the subnormals. */
static double case_slack(mixp_dtype dtype, double want, double more) {
    double least = dtype == MIXP_F16 ? 3.1e-8 : 1e-9;
    return (case_rounding(dtype) * 1.01 + more) * fabs(want) + least;
}

/* Numbers that all three dtypes hold exactly, no two alike within 61, in (-4, 4). */
static float case_number(int i) { return (float)((i * 37 + 5) % 61 - 30) / 8.0f; }

static mixp_tensor *case_param(mixp_dtype dtype, int rank, const int64_t *shape, const float *values) {
    mixp_tensor *t = mixp_param(case_c, NULL, dtype, rank, shape);
    CHECK_INT(mixp_write(t, values, MIXP_F32, t->count), MIXP_OK);
    return t;
}

/* Walks back from sum(y * w) with w[i] = 1 + i % 3: returns w[i] as dy. */
static double case_dy(int64_t i) { return (double)(1 + i % 3); }
static void case_walk(mixp_tensor *y) {
    static float w[CASE_ROOM];
    mixp_tensor *dy;
    int i;
    CHECK(y != NULL);
    if (!y) return;
    for (i = 0; i < CASE_ROOM; i++) w[i] = (float)case_dy(i);
    dy = mixp_input(case_c, MIXP_F32, y->rank, y->shape, w);
    CHECK_INT(mixp_backward(case_c, mixp_sum(case_c, mixp_mul(case_c, y, dy), MIXP_ALL, 0)), MIXP_OK);
}

/* The numbers of t, if there are as many as `count`. */
static const double *case_read(const mixp_tensor *t, int64_t count) {
    static double v[CASE_ROOM];
    memset(v, 0, sizeof v);
    CHECK(t && t->count == count);
    if (t && t->count == count) CHECK_INT(mixp_read(t, v, MIXP_F64, count), MIXP_OK);
    return v;
}

static void case_near(const char *name, double got, double want, double tolerance) {
    int same = want != want ? got != got : fabs(want) > 3.39e38 ? fabs(got) > 3.4e38 && (got > 0) == (want > 0)
                                                                : fabs(got - want) <= tolerance;
    if (same) return;
    test_bad++;
    TEST_SHOW("%s: %.9g, not %.9g", name, got, want);
}

/* A refused call: its result, and what its message says. */
static void case_refused(const mixp_tensor *y, mixp_result result, const char *says) {
    const char *why = "";
    CHECK(y == NULL);
    CHECK_INT(mixp_context_error(case_c, &why), result);
    CHECK_TEXT(why, says);
    mixp_context_clear_error(case_c);
}

/* --- elementwise -------------------------------------------------------------------------------- */

#define CASE_OP(name, call, f, df)                                                        \
    static mixp_tensor *op_##name(mixp_tensor *x) { return call; }                        \
    static double f_##name(double x) { return f; }                                        \
    static double d_##name(double x) { return (void)x, df; }
CASE_OP(square, mixp_square(case_c, x), x * x, 2.0 * x)
CASE_OP(reciprocal, mixp_reciprocal(case_c, x), 1.0 / x, -1.0 / (x * x))
CASE_OP(log1p, mixp_log1p(case_c, x), log1p(x), 1.0 / (1.0 + x))
CASE_OP(expm1, mixp_expm1(case_c, x), expm1(x), exp(x))
CASE_OP(erf, mixp_erf(case_c, x), erf(x), 1.12837916709551257390 * exp(-x * x))
CASE_OP(softplus, mixp_softplus(case_c, x, 2.0f), (x > 0.0 ? x : x != x ? x : 0.0) + log1p(exp(-fabs(2.0 * x))) / 2.0,
        1.0 / (1.0 + exp(-2.0 * x)))
CASE_OP(leaky_relu, mixp_leaky_relu(case_c, x, 0.125f), x > 0.0 ? x : 0.125 * x, x > 0.0 ? 1.0 : 0.125)
CASE_OP(elu, mixp_elu(case_c, x, 1.5f), x > 0.0 ? x : 1.5 * expm1(x), x <= 0.0 ? 1.5 * exp(x) : 1.0)
CASE_OP(add_scalar, mixp_add_scalar(case_c, x, 2.75f), x + 2.75, 1.0)
CASE_OP(rsub, mixp_rsub(case_c, x, 2.75f), 2.75 - x, -1.0)
#undef CASE_OP

typedef struct elementwise_case {
    const char  *name;
    mixp_tensor *(*apply)(mixp_tensor *x);
    double      (*value)(double), (*slope)(double);
    int          above;         /* inputs are above this number */
} elementwise_case;
#define CASE_ROW(name, above) { #name, op_##name, f_##name, d_##name, above }
static const elementwise_case elementwise_cases[] = {
    CASE_ROW(square, -9), CASE_ROW(reciprocal, -9), CASE_ROW(log1p, -1), CASE_ROW(expm1, -9),
    CASE_ROW(erf, -9), CASE_ROW(softplus, -9), CASE_ROW(leaky_relu, -9), CASE_ROW(elu, -9),
    CASE_ROW(add_scalar, -9), CASE_ROW(rsub, -9)
};
#undef CASE_ROW
enum { ELEMENTWISE = sizeof elementwise_cases / sizeof elementwise_cases[0] };

static void elementwise_one(const elementwise_case *k, mixp_dtype dtype, int rank, const int64_t *shape) {
    float x[CASE_ROOM];
    const double *got;
    mixp_tensor *t, *y;
    int i;
    for (i = 0; i < CASE_ROOM; i++) {
        x[i] = case_number(i);
        if (x[i] <= (float)k->above || x[i] == 0.0f) x[i] = 0.625f;
    }
    t = case_param(dtype, rank, shape, x);
    mixp_step_begin(case_c);
    y = k->apply(t);
    CHECK(y && y->dtype == dtype && y->rank == rank);
    case_walk(y);
    got = case_read(y, t->count);
    for (i = 0; i < t->count; i++) {
        double want = k->value((double)x[i]);
        case_near(k->name, got[i], want, case_slack(dtype, want, 4e-7));
    }
    got = case_read(t->grad, t->count);
    for (i = 0; i < t->count; i++) {
        double want = case_dy(i) * k->slope((double)x[i]);
        case_near(k->name, got[i], want, case_slack(dtype, want, 2e-6));
    }
}

static void test_elementwise(void) {
    const int64_t shape[2] = { 19, 7 }, ones[3] = { 1, 1, 1 };
    int i, d;
    case_c = case_context();
    for (i = 0; i < ELEMENTWISE; i++)
        for (d = 0; d < 3; d++) {
            elementwise_one(&elementwise_cases[i], case_reals[d], 2, shape);
            elementwise_one(&elementwise_cases[i], case_reals[d], 3, ones);
            elementwise_one(&elementwise_cases[i], case_reals[d], 0, ones);
        }
    mixp_context_free(case_c);
}

static void test_elementwise_not_finite(void) {
    const int64_t shape[1] = { 8 };
    float x[8] = { 0.0f, -0.0f, 1e30f, -1e30f, -1.0f, 0.0f, 0.0f, 0.0f };
    const double *got;
    int i, j;
    x[5] = mixp_f32_of_bits(0x7F800000u);
    x[6] = mixp_f32_of_bits(0xFF800000u);
    x[7] = mixp_f32_of_bits(0x7FC00000u);
    case_c = case_context();
    for (i = 0; i < ELEMENTWISE; i++) {
        const elementwise_case *k = &elementwise_cases[i];
        mixp_tensor *t = case_param(MIXP_F32, 1, shape, x), *y;
        mixp_step_begin(case_c);
        y = k->apply(t);
        case_walk(y);
        got = case_read(y, 8);
        for (j = 0; j < 8; j++) case_near(k->name, got[j], k->value((double)x[j]), 1e24);
        got = case_read(t->grad, 8);
        for (j = 0; j < 8; j++) {
            double want = case_dy(j) * k->slope((double)x[j]);
            case_near(k->name, got[j], want, 1e-6 * fabs(want) + 1e-9);
        }
    }
    mixp_context_free(case_c);
}

/* Near 0, where 1 + x and e^x lose x, log1p, expm1 and erf are as exact as elsewhere. */
static void test_elementwise_small(void) {
    const int64_t shape[1] = { 40 };
    float x[40];
    const double *got;
    int i, j;
    for (j = 0; j < 40; j++) x[j] = ldexpf(j % 2 ? -1.25f : 1.75f, -1 - 3 * (j / 2));
    case_c = case_context();
    for (i = 2; i < 5; i++) {
        const elementwise_case *k = &elementwise_cases[i];
        mixp_tensor *t = case_param(MIXP_F32, 1, shape, x);
        mixp_step_begin(case_c);
        got = case_read(k->apply(t), 40);
        for (j = 0; j < 40; j++) {
            double want = k->value((double)x[j]);
            case_near(k->name, got[j], want, 3.6e-7 * fabs(want));
        }
    }
    mixp_context_free(case_c);
}

static void test_elementwise_refused(void) {
    const int64_t two[1] = { 2 };
    const float x[2] = { 1.0f, 2.0f };
    const int32_t ids[2] = { 1, 2 };
    mixp_tensor *t;
    case_c = case_context();
    t = case_param(MIXP_F32, 1, two, x);
    mixp_step_begin(case_c);
    case_refused(mixp_softplus(case_c, t, 0.0f), MIXP_ERR_ARGUMENT, "softplus: beta is 0");
    case_refused(mixp_softplus(case_c, t, -2.0f), MIXP_ERR_ARGUMENT, "softplus: beta is -2");
    case_refused(mixp_softplus(case_c, t, mixp_f32_of_bits(0x7F800000u)), MIXP_ERR_ARGUMENT, "finite");
    case_refused(mixp_square(case_c, mixp_input(case_c, MIXP_I32, 1, two, ids)), MIXP_ERR_DTYPE, "square");
    mixp_context_free(case_c);
}

static void operator_run_cases(void) {
    RUN(test_elementwise);
    RUN(test_elementwise_not_finite);
    RUN(test_elementwise_small);
    RUN(test_elementwise_refused);
}
