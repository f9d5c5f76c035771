/* operator_cases.h - the small operators through the tape, on the device of `case_context`: values
 * and gradients beside double-precision loops, sizes of 1, Inf and NaN, refusals.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "examples/ops.h"

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
    CHECK(y != NULL);
    if (!y) return;
    for (int i = 0; i < CASE_ROOM; i++) w[i] = (float)case_dy(i);
    mixp_tensor *dy = mixp_input(case_c, MIXP_F32, y->rank, y->shape, w);
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
    for (int i = 0; i < CASE_ROOM; i++) {
        x[i] = case_number(i);
        if (x[i] <= (float)k->above || x[i] == 0.0f) x[i] = 0.625f;
    }
    mixp_tensor *t = case_param(dtype, rank, shape, x);
    mixp_step_begin(case_c);
    mixp_tensor *y = k->apply(t);
    CHECK(y && y->dtype == dtype && y->rank == rank);
    case_walk(y);
    const double *got = case_read(y, t->count);
    for (int i = 0; i < t->count; i++) {
        double want = k->value((double)x[i]);
        case_near(k->name, got[i], want, case_slack(dtype, want, 4e-7));
    }
    got = case_read(t->grad, t->count);
    for (int i = 0; i < t->count; i++) {
        double want = case_dy(i) * k->slope((double)x[i]);
        case_near(k->name, got[i], want, case_slack(dtype, want, 2e-6));
    }
}

static void test_elementwise(void) {
    const int64_t shape[2] = { 19, 7 }, ones[3] = { 1, 1, 1 };
    case_c = case_context();
    for (int i = 0; i < ELEMENTWISE; i++)
        for (int d = 0; d < 3; d++) {
            elementwise_one(&elementwise_cases[i], case_reals[d], 2, shape);
            elementwise_one(&elementwise_cases[i], case_reals[d], 3, ones);
            elementwise_one(&elementwise_cases[i], case_reals[d], 0, ones);
        }
    mixp_context_free(case_c);
}

static void test_elementwise_not_finite(void) {
    const int64_t shape[1] = { 8 };
    float x[8] = { 0.0f, -0.0f, 1e30f, -1e30f, -1.0f, 0.0f, 0.0f, 0.0f };
    x[5] = mixp_f32_of_bits(0x7F800000u);
    x[6] = mixp_f32_of_bits(0xFF800000u);
    x[7] = mixp_f32_of_bits(0x7FC00000u);
    case_c = case_context();
    for (int i = 0; i < ELEMENTWISE; i++) {
        const elementwise_case *k = &elementwise_cases[i];
        mixp_tensor *t = case_param(MIXP_F32, 1, shape, x), *y;
        mixp_step_begin(case_c);
        y = k->apply(t);
        case_walk(y);
        const double *got = case_read(y, 8);
        for (int j = 0; j < 8; j++) case_near(k->name, got[j], k->value((double)x[j]), 1e24);
        got = case_read(t->grad, 8);
        for (int j = 0; j < 8; j++) {
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
    for (int j = 0; j < 40; j++) x[j] = ldexpf(j % 2 ? -1.25f : 1.75f, -1 - 3 * (j / 2));
    case_c = case_context();
    for (int i = 2; i < 5; i++) {
        const elementwise_case *k = &elementwise_cases[i];
        mixp_tensor *t = case_param(MIXP_F32, 1, shape, x);
        mixp_step_begin(case_c);
        const double *got = case_read(k->apply(t), 40);
        for (int j = 0; j < 40; j++) {
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
    case_c = case_context();
    mixp_tensor *t = case_param(MIXP_F32, 1, two, x);
    mixp_step_begin(case_c);
    case_refused(mixp_softplus(case_c, t, 0.0f), MIXP_ERR_ARGUMENT, "softplus: beta is 0");
    case_refused(mixp_softplus(case_c, t, -2.0f), MIXP_ERR_ARGUMENT, "softplus: beta is -2");
    case_refused(mixp_softplus(case_c, t, mixp_f32_of_bits(0x7F800000u)), MIXP_ERR_ARGUMENT, "finite");
    case_refused(mixp_square(case_c, mixp_input(case_c, MIXP_I32, 1, two, ids)), MIXP_ERR_DTYPE, "square");
    mixp_context_free(case_c);
}

/* --- shapes ------------------------------------------------------------------------------------- */

/* from: where the element i, j, k, l of the result comes from, by the definition; -1: a filled one. */
typedef struct shape_case {
    const char  *name;
    int          rank;                  /* of x                                              */
    int64_t      shape[3];
    mixp_tensor *(*apply)(mixp_tensor *x);
    int          y_rank;
    int64_t      y_shape[4];
    int64_t      (*from)(int64_t i, int64_t j, int64_t k, int64_t l);
} shape_case;

#define CASE_FROM(name, call, at)                                                         \
    static mixp_tensor *shape_##name(mixp_tensor *x) { call; }                            \
    static int64_t from_##name(int64_t i, int64_t j, int64_t k, int64_t l)                \
    { (void)i; (void)j; (void)k; (void)l; return at; }
static const int permute_3[3] = { 2, 0, -2 }, permute_1[1] = { -1 };
static const int64_t expand_4[4] = { 2, -1, 5, 4 }, expand_3[3] = { 3, 4, 5 }, expand_up[2] = { 3, 2 };
CASE_FROM(permute, return mixp_permute(case_c, x, 3, permute_3), (j * 4 + k) * 5 + i)
CASE_FROM(permute_none, return mixp_permute(case_c, x, 1, permute_1), i)
CASE_FROM(permute_scalar, return mixp_permute(case_c, x, 0, NULL), 0)
CASE_FROM(transpose, return mixp_transpose(case_c, x, 0, -1), (k * 4 + j) * 5 + i)
CASE_FROM(flip_first, return mixp_flip(case_c, x, 0), ((2 - i) * 4 + j) * 5 + k)
CASE_FROM(flip_middle, return mixp_flip(case_c, x, -2), (i * 4 + 3 - j) * 5 + k)
CASE_FROM(flip_last, return mixp_flip(case_c, x, 2), (i * 4 + j) * 5 + 4 - k)
CASE_FROM(flip_long, return mixp_flip(case_c, x, 0), 149 - i)
CASE_FROM(expand, return mixp_expand(case_c, x, 4, expand_4), j * 4 + l)
CASE_FROM(expand_none, return mixp_expand(case_c, x, 3, expand_3), (i * 4 + j) * 5 + k)
CASE_FROM(expand_scalar, return mixp_expand(case_c, x, 2, expand_up), 0)
CASE_FROM(pad_first, return mixp_pad(case_c, x, 0, 2, 1, -2.5f), i < 2 || i > 4 ? -1 : ((i - 2) * 4 + j) * 5 + k)
CASE_FROM(pad_last, return mixp_pad(case_c, x, -1, 0, 3, -2.5f), k > 4 ? -1 : (i * 4 + j) * 5 + k)
CASE_FROM(pad_none, return mixp_pad(case_c, x, 1, 0, 0, -2.5f), (i * 4 + j) * 5 + k)
CASE_FROM(squeeze, return mixp_squeeze(case_c, x, 1), i * 5 + j)
CASE_FROM(squeeze_kept, return mixp_squeeze(case_c, x, 0), (i * 1 + j) * 5 + k)
CASE_FROM(squeeze_all, return mixp_squeeze(case_c, x, MIXP_ALL), i)
CASE_FROM(unsqueeze_front, return mixp_unsqueeze(case_c, x, 0), (j * 4 + k) * 5 + l)
CASE_FROM(unsqueeze_end, return mixp_unsqueeze(case_c, x, -1), (i * 4 + j) * 5 + k)
#undef CASE_FROM

#define CASE_345 3, { 3, 4, 5 }
static const shape_case shape_cases[] = {
    { "permute", CASE_345, shape_permute, 3, { 5, 3, 4 }, from_permute },
    { "permute of one", 1, { 7 }, shape_permute_none, 1, { 7 }, from_permute_none },
    { "permute of a scalar", 0, { 0 }, shape_permute_scalar, 0, { 0 }, from_permute_scalar },
    { "transpose", CASE_345, shape_transpose, 3, { 5, 4, 3 }, from_transpose },
    { "flip 0", CASE_345, shape_flip_first, 3, { 3, 4, 5 }, from_flip_first },
    { "flip 1", CASE_345, shape_flip_middle, 3, { 3, 4, 5 }, from_flip_middle },
    { "flip 2", CASE_345, shape_flip_last, 3, { 3, 4, 5 }, from_flip_last },
    { "flip, long", 1, { 150 }, shape_flip_long, 1, { 150 }, from_flip_long },
    { "expand", 3, { 3, 1, 4 }, shape_expand, 4, { 2, 3, 5, 4 }, from_expand },
    { "expand, nothing", CASE_345, shape_expand_none, 3, { 3, 4, 5 }, from_expand_none },
    { "expand a scalar", 0, { 0 }, shape_expand_scalar, 2, { 3, 2 }, from_expand_scalar },
    { "pad 0", CASE_345, shape_pad_first, 3, { 6, 4, 5 }, from_pad_first },
    { "pad 2", CASE_345, shape_pad_last, 3, { 3, 4, 8 }, from_pad_last },
    { "pad, nothing", CASE_345, shape_pad_none, 3, { 3, 4, 5 }, from_pad_none },
    { "squeeze", 3, { 3, 1, 5 }, shape_squeeze, 2, { 3, 5 }, from_squeeze },
    { "squeeze, kept", 3, { 3, 1, 5 }, shape_squeeze_kept, 3, { 3, 1, 5 }, from_squeeze_kept },
    { "squeeze, all", 3, { 1, 6, 1 }, shape_squeeze_all, 1, { 6 }, from_squeeze_all },
    { "unsqueeze 0", CASE_345, shape_unsqueeze_front, 4, { 1, 3, 4, 5 }, from_unsqueeze_front },
    { "unsqueeze -1", CASE_345, shape_unsqueeze_end, 4, { 3, 4, 5, 1 }, from_unsqueeze_end }
};
#undef CASE_345

/* x has an Inf and a NaN in it: they move as any number does. */
static void shape_one(const shape_case *k, mixp_dtype dtype, int twice) {
    float x[CASE_ROOM];
    double want[CASE_ROOM] = { 0 };
    int64_t i, n[4] = { 1, 1, 1, 1 };
    for (i = 0; i < CASE_ROOM; i++) x[i] = case_number((int)i);
    x[2] = mixp_f32_of_bits(0xFF800000u);
    x[4] = mixp_f32_of_bits(0x7FC00000u);
    for (int d = 0; d < k->y_rank; d++) n[d] = k->y_shape[d];
    mixp_tensor *t = case_param(dtype, k->rank, k->shape, x);
    mixp_step_begin(case_c);
    mixp_tensor *y = k->apply(t);
    CHECK(y && y->dtype == dtype && y->rank == k->y_rank);
    for (int d = 0; y && d < k->y_rank; d++) CHECK_INT(y->shape[d], k->y_shape[d]);
    case_walk(y);
    if (twice) case_walk(k->apply(t));
    const double *got = case_read(y, n[0] * n[1] * n[2] * n[3]);
    for (i = 0; i < n[0] * n[1] * n[2] * n[3]; i++) {
        int64_t at = k->from(i / (n[1] * n[2] * n[3]), i / (n[2] * n[3]) % n[1], i / n[3] % n[2], i % n[3]);
        case_near(k->name, got[i], at < 0 ? -2.5 : (double)x[at], 0.0);
        if (at >= 0) want[at] += (1 + twice) * case_dy(i);
    }
    got = case_read(t->grad, t->count);
    for (i = 0; i < t->count; i++) case_near(k->name, got[i], want[i], 0.0);
}

static void test_shapes(void) {
    case_c = case_context();
    for (size_t i = 0; i < sizeof shape_cases / sizeof shape_cases[0]; i++)
        for (int d = 0; d < 6; d++) shape_one(&shape_cases[i], case_reals[d % 3], d / 3);
    mixp_context_free(case_c);
}

/* Integers too. The cases are made by the definition once more, in the CPU's memory. */
static void test_shapes_of_integers(void) {
    const int64_t two_by_three[2] = { 2, 3 }, wide[3] = { 2, 2, 3 };
    const int turned[2] = { 1, 0 };
    const int32_t ids[6] = { 5, -7, 2000000001, 4, 3, 1 }, permuted[6] = { 5, 4, -7, 3, 2000000001, 1 };
    const int32_t flipped[6] = { 2000000001, -7, 5, 1, 3, 4 };
    int32_t got[12];
    case_c = case_context();
    mixp_step_begin(case_c);
    mixp_tensor *x = mixp_input(case_c, MIXP_I32, 2, two_by_three, ids);
    CHECK_INT(mixp_read(mixp_permute(case_c, x, 2, turned), got, MIXP_I32, 6), MIXP_OK);
    CHECK(memcmp(got, permuted, sizeof permuted) == 0);
    CHECK_INT(mixp_read(mixp_flip(case_c, x, 1), got, MIXP_I32, 6), MIXP_OK);
    CHECK(memcmp(got, flipped, sizeof flipped) == 0);
    CHECK_INT(mixp_read(mixp_expand(case_c, x, 3, wide), got, MIXP_I32, 12), MIXP_OK);
    CHECK(memcmp(got, ids, sizeof ids) == 0 && memcmp(got + 6, ids, sizeof ids) == 0);
    mixp_context_free(case_c);
}

/* stack along each dimension beside the definition; the third input has another dtype. */
static void stack_one(int dim, int as) {
    const int64_t shape[2] = { 3, 5 };
    const int64_t outer = dim == 0 ? 1 : dim == 1 ? 3 : 15, inner = 15 / outer;
    float x[CASE_ROOM];
    mixp_tensor *t[3], *y;
    for (int64_t i = 0; i < CASE_ROOM; i++) x[i] = case_number((int)i);
    for (int j = 0; j < 3; j++) t[j] = case_param(j == 2 ? MIXP_F32 : MIXP_F16, 2, shape, x + 15 * j);
    mixp_step_begin(case_c);
    y = mixp_stack(case_c, 3, t, as);
    CHECK(y && y->dtype == MIXP_F32 && y->rank == 3 && y->shape[dim] == 3);
    case_walk(y);
    const double *got = case_read(y, 45);
    for (int64_t o = 0; o < outer; o++)
        for (int j = 0; j < 3; j++)
            for (int64_t i = 0; i < inner; i++)
                CHECK_NEAR(got[(o * 3 + j) * inner + i], x[15 * j + o * inner + i], 0.0);
    for (int j = 0; j < 3; j++) {
        got = case_read(t[j]->grad, 15);
        for (int64_t i = 0; i < 15; i++)
            CHECK_NEAR(got[i], case_dy((i / inner * 3 + j) * inner + i % inner), 0.0);
    }
}

static void test_stack(void) {
    const int64_t none[1] = { 0 };
    const float x = 3.0f;
    case_c = case_context();
    for (int dim = 0; dim < 3; dim++) {
        stack_one(dim, dim);
        stack_one(dim, dim - 3);
    }
    mixp_tensor *one = case_param(MIXP_F32, 0, none, &x);
    mixp_step_begin(case_c);
    mixp_tensor *y = mixp_stack(case_c, 1, &one, -1);
    CHECK(y && y->rank == 1 && y->shape[0] == 1);
    CHECK_NEAR(*case_read(y, 1), 3.0, 0.0);
    mixp_context_free(case_c);
}

static void test_shapes_refused(void) {
    const int64_t two[2] = { 2, 3 }, three[2] = { 3, 2 }, eight[8] = { 1, 1, 1, 1, 1, 1, 1, 1 };
    const int64_t bad[2] = { 4, 3 }, minus[3] = { -1, 2, 3 };
    const int same[2] = { 1, 1 }, out[2] = { 0, 2 };
    const float x[6] = { 1, 2, 3, 4, 5, 6 };
    mixp_tensor *t, *pair[2];
    case_c = case_context();
    pair[0] = t = case_param(MIXP_F32, 2, two, x);
    pair[1] = case_param(MIXP_F32, 2, three, x);
    mixp_step_begin(case_c);
    case_refused(mixp_permute(case_c, t, 2, same), MIXP_ERR_SHAPE, "each dimension of x once");
    case_refused(mixp_permute(case_c, t, 2, out), MIXP_ERR_SHAPE, "permute");
    case_refused(mixp_permute(case_c, t, 1, same), MIXP_ERR_SHAPE, "permute");
    case_refused(mixp_permute(case_c, t, 2, NULL), MIXP_ERR_SHAPE, "permute");
    case_refused(mixp_transpose(case_c, t, 0, 2), MIXP_ERR_SHAPE, "transpose");
    case_refused(mixp_flip(case_c, t, 2), MIXP_ERR_SHAPE, "flip");
    case_refused(mixp_expand(case_c, t, 2, bad), MIXP_ERR_SHAPE, "expand");
    case_refused(mixp_expand(case_c, t, 1, two), MIXP_ERR_SHAPE, "expand");
    case_refused(mixp_expand(case_c, t, 3, minus), MIXP_ERR_SHAPE, "expand");
    case_refused(mixp_expand(case_c, t, 9, eight), MIXP_ERR_SHAPE, "expand");
    case_refused(mixp_pad(case_c, t, 2, 1, 1, 0.0f), MIXP_ERR_SHAPE, "pad");
    case_refused(mixp_pad(case_c, t, 0, -1, 1, 0.0f), MIXP_ERR_SHAPE, "pad");
    case_refused(mixp_pad(case_c, t, 0, 1, INT64_MAX - 2, 0.0f), MIXP_ERR_SHAPE, "pad");
    case_refused(mixp_stack(case_c, 2, pair, 0), MIXP_ERR_SHAPE, "stack: input 0 [2, 3] and input 1 [3, 2]");
    case_refused(mixp_stack(case_c, 1, pair, 3), MIXP_ERR_SHAPE, "stack");
    case_refused(mixp_squeeze(case_c, t, 2), MIXP_ERR_SHAPE, "mixp_squeeze: 2 is no dimension of x [2, 3]");
    case_refused(mixp_unsqueeze(case_c, t, 3), MIXP_ERR_SHAPE, "mixp_unsqueeze");
    t = case_param(MIXP_F32, 8, eight, x);
    case_refused(mixp_unsqueeze(case_c, t, 0), MIXP_ERR_SHAPE, "mixp_unsqueeze");
    case_refused(mixp_stack(case_c, 1, &t, 0), MIXP_ERR_SHAPE, "stack");
    case_refused(mixp_squeeze(case_c, NULL, 0), MIXP_ERR_ARGUMENT, "input 0 is NULL");
    mixp_context_free(case_c);
}

/* --- reductions --------------------------------------------------------------------------------- */

enum { REDUCE_MIN, REDUCE_LOGSUMEXP, REDUCE_VAR, REDUCE_VAR_0, REDUCE_STD, REDUCE_NORM, REDUCE_KINDS };

static mixp_tensor *reduce_apply(int kind, mixp_tensor *x, int dim, int keep) {
    switch (kind) {
    case REDUCE_MIN: return mixp_min(case_c, x, dim, keep);
    case REDUCE_LOGSUMEXP: return mixp_logsumexp(case_c, x, dim, keep);
    case REDUCE_VAR: return mixp_var(case_c, x, dim, 1, keep);
    case REDUCE_STD: return mixp_std(case_c, x, dim, 1, keep);
    case REDUCE_NORM: return mixp_vector_norm(case_c, x, dim, keep);
    default: return mixp_var(case_c, x, dim, 0, keep);
    }
}

/* Of n numbers that are `step` apart, and their slopes. */
static double reduce_value(int kind, const float *x, int64_t n, int64_t step, double *slope) {
    double least = HUGE_VAL, most = -HUGE_VAL, mean = 0.0, squares = 0.0, sum = 0.0, norm = 0.0, by;
    int64_t i, at = 0;
    for (i = 0; i < n; i++) {
        double v = (double)x[i * step];
        if (v < least) { least = v; at = i; }
        if (v > most) most = v;
        mean += v / (double)n;
    }
    for (i = 0; i < n; i++) {
        double v = (double)x[i * step];
        sum += exp(v - most);
        squares += (v - mean) * (v - mean);
        norm += v * v;
    }
    by = (double)n - (kind == REDUCE_VAR_0 ? 0.0 : 1.0);
    norm = sqrt(norm);
    for (i = 0; i < n; i++) {
        double v = (double)x[i * step];
        slope[i] = kind == REDUCE_MIN ? (i == at ? 1.0 : 0.0)
                 : kind == REDUCE_LOGSUMEXP ? exp(v - most) / sum : kind == REDUCE_NORM ? v / norm
                 : kind == REDUCE_STD ? (v - mean) / by / sqrt(squares / by) : 2.0 * (v - mean) / by;
    }
    if (kind == REDUCE_NORM || kind == REDUCE_STD) return kind == REDUCE_NORM ? norm : sqrt(squares / by);
    return kind == REDUCE_MIN ? least : kind == REDUCE_LOGSUMEXP ? most + log(sum) : squares / by;
}

static void reduce_one(int kind, mixp_dtype dtype, int dim, int keep, float scale) {
    static const char *const names[] = { "min", "logsumexp", "var", "var of correction 0", "std", "vector_norm" };
    const int64_t shape[3] = { 4, 3, 5 };
    const int64_t outer = dim <= 0 ? 1 : dim == 1 ? 4 : 12, n = dim == MIXP_ALL ? 60 : shape[dim];
    const int64_t inner = 60 / outer / n;
    float x[60];
    double want[60], slope[60], wanted[60], size = 0.0;
    int64_t o, i, k;
    for (i = 0; i < 60; i++) x[i] = scale * case_number((int)i);
    for (o = 0; o < outer; o++)
        for (k = 0; k < inner; k++) {
            const float *at = x + o * n * inner + k;
            want[o * inner + k] = reduce_value(kind, at, n, inner, slope);
            for (i = 0; i < n; i++) wanted[(o * n + i) * inner + k] = slope[i] * case_dy(o * inner + k);
        }
    for (i = 0; i < 60; i++) if (fabs(wanted[i]) > size) size = fabs(wanted[i]);
    mixp_tensor *t = case_param(dtype, 3, shape, x);
    mixp_step_begin(case_c);
    mixp_tensor *y = reduce_apply(kind, t, dim, keep);
    CHECK(y && y->dtype == dtype && y->rank == (keep ? 3 : dim == MIXP_ALL ? 0 : 2));
    case_walk(y);
    const double *got = case_read(y, outer * inner);
    for (i = 0; i < outer * inner; i++) case_near(names[kind], got[i], want[i], case_slack(dtype, want[i], 1e-6));
    got = case_read(t->grad, 60);
    for (i = 0; i < 60; i++)
        case_near(names[kind], got[i], wanted[i], case_slack(dtype, wanted[i], 2e-6) + 1e-6 * size);
}

static void test_reductions(void) {
    static const int dims[4] = { 0, 1, 2, MIXP_ALL };
    case_c = case_context();
    for (int kind = 0; kind < REDUCE_KINDS; kind++)
        for (int d = 0; d < 3; d++)
            for (int i = 0; i < 4; i++) {
                reduce_one(kind, case_reals[d], dims[i], 0, 1.0f);
                reduce_one(kind, case_reals[d], dims[i], 1, d == 0 ? 256.0f : 4.0f);
            }
    mixp_context_free(case_c);
}

/* One value each; Inf, NaN and equal values. */
static void test_reductions_of_few(void) {
    const int64_t column[2] = { 6, 1 }, four[2] = { 5, 4 };
    const float inf = mixp_f32_of_bits(0x7F800000u), nan = mixp_f32_of_bits(0x7FC00000u);
    const double least[5] = { -INFINITY, -INFINITY, 1.0, 2.0, NAN }, sums[5] = { -INFINITY, INFINITY,
        INFINITY, 2.0 + 1.38629436111989062, NAN }, vars[5] = { NAN, NAN, NAN, 0.0, NAN };
    const int32_t places[5] = { 0, 1, 1, 0, 2 };
    const float x[6] = { 1.0f, -2.0f, 0.0f, 65504.0f, -100.0f, 0.5f };
    float rows[20];
    int32_t index[6];
    const double *got;
    for (int i = 0; i < 20; i++) rows[i] = i < 4 ? -inf : i < 8 ? (i == 5 ? -inf : inf) : i < 12 ? (i == 9 ? 1.0f : inf)
                                     : i < 16 ? 2.0f : i == 18 ? nan : 1.0f;
    case_c = case_context();
    mixp_tensor *t = case_param(MIXP_F32, 2, column, x);
    mixp_step_begin(case_c);
    for (int i = 0; i < 2; i++) {
        got = case_read(reduce_apply(i, t, 1, 0), 6);
        CHECK_NEAR(got[1], -2.0, 0.0);
        CHECK_NEAR(got[3], 65504.0, 0.0);
    }
    got = case_read(mixp_var(case_c, t, -1, 0, 1), 6);
    CHECK_NEAR(got[3], 0.0, 0.0);
    case_near("var of one", case_read(mixp_var(case_c, t, -1, 1, 1), 6)[3], NAN, 0.0);
    t = case_param(MIXP_F32, 2, four, rows);
    for (int i = 0; i < 5; i++) case_near("min", case_read(mixp_min(case_c, t, 1, 0), 5)[i], least[i], 0.0);
    for (int i = 0; i < 5; i++) case_near("logsumexp", case_read(mixp_logsumexp(case_c, t, 1, 0), 5)[i], sums[i], 1e-6);
    for (int i = 0; i < 5; i++) case_near("var", case_read(mixp_var(case_c, t, 1, 1, 0), 5)[i], vars[i], 0.0);
    mixp_tensor *y = mixp_argmin(case_c, t, 1, 0);
    CHECK(y && y->dtype == MIXP_I32);
    CHECK_INT(mixp_read(y, index, MIXP_I32, 5), MIXP_OK);
    for (int i = 0; i < 5; i++) CHECK_INT(index[i], places[i]);
    mixp_context_free(case_c);
}

/* Values that differ by little beside a large offset, whose mean f32 rounds. The sums in double are
 * exact to 1e-12. Rows in both layouts. */
static void test_variance_near_an_offset(void) {
    enum { ROWS = 4, N = 64 };
    static const double offsets[5] = { 0.0, 1e3, 1e6, -3e6, 1.5e7 };
    float x[ROWS * N], turned[ROWS * N];
    double want[ROWS], slope[ROWS * N];
    for (int o = 0; o < 5; o++) {
        const int64_t across[2] = { ROWS, N }, down[2] = { N, ROWS };
        for (int i = 0; i < ROWS * N; i++) {
            x[i] = (float)(offsets[o] + 4.0 * (double)case_number(i) + (double)(i / N));
            turned[i % N * ROWS + i / N] = x[i];
        }
        for (int kind = REDUCE_VAR; kind <= REDUCE_STD; kind++)
            for (int dim = 0; dim < 2; dim++) {
                for (int i = 0; i < ROWS; i++)
                    want[i] = reduce_value(kind, x + i * N, N, 1, slope + i * N);
                case_c = case_context();
                mixp_tensor *t = dim ? case_param(MIXP_F32, 2, across, x) : case_param(MIXP_F32, 2, down, turned);
                mixp_step_begin(case_c);
                mixp_tensor *y = reduce_apply(kind, t, dim, 0);
                case_walk(mixp_sum(case_c, y, MIXP_ALL, 0));
                for (int i = 0; i < ROWS; i++) CHECK_NEAR(case_read(y, ROWS)[i], want[i], 2e-6 * want[i]);
                for (int i = 0; i < ROWS * N; i++) {
                    const int at = dim ? i : i % N * ROWS + i / N;
                    CHECK_NEAR(case_read(t->grad, ROWS * N)[at], slope[i], 2e-6 * (1.0 + fabs(slope[i])));
                }
                mixp_context_free(case_c);
            }
    }
}

/* Where all values are equal, or 0: a result of 0 with a gradient of 0. */
static void test_reductions_to_0(void) {
    const int64_t shape[2] = { 3, 4 };
    const float x[12] = { 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 };
    case_c = case_context();
    for (int kind = REDUCE_STD; kind <= REDUCE_NORM; kind++) {
        mixp_tensor *t = case_param(MIXP_F32, 2, shape, x);
        mixp_step_begin(case_c);
        mixp_tensor *y = reduce_apply(kind, t, 1, 0);
        case_walk(y);
        for (int i = 0; i < 3; i++) CHECK_NEAR(case_read(y, 3)[i], 0.0, 0.0);
        const double *got = case_read(t->grad, 12);
        for (int i = 0; i < 12; i++) CHECK_NEAR(got[i], 0.0, 0.0);
    }
    mixp_context_free(case_c);
}

/* Under autocast: the dtype of the class, and no rounding before the last. */
static void test_reductions_in_regions(void) {
    static const mixp_dtype to[2][3] = { { MIXP_F32, MIXP_F32, MIXP_F32 }, { MIXP_F16, MIXP_F32, MIXP_F16 } };
    const int64_t shape[2] = { 2, 30 };
    double slope[30], want;
    float x[60];
    mixp_tensor *t, *y[2];
    for (int i = 0; i < 60; i++) x[i] = case_number(i);
    case_c = case_context();
    for (int d = 0; d < 2; d++)
        for (int level = 0; level < 3; level++) {
            t = case_param(d ? MIXP_F16 : MIXP_F32, 2, shape, x);
            mixp_step_begin(case_c);
            mixp_autocast_set_level(case_c, level);
            MIXP_AUTOCAST(case_c, MIXP_F16) {
                y[0] = mixp_logsumexp(case_c, t, 1, 0);
                y[1] = mixp_var(case_c, t, 1, 1, 0);
                CHECK_INT(mixp_autocast_current(case_c).dtype, level ? MIXP_F16 : MIXP_F32);
            }
            for (int i = 0; i < 2; i++) {
                mixp_dtype is = level == 2 ? MIXP_F16 : i ? t->dtype : to[d][level];
                want = reduce_value(i ? REDUCE_VAR : REDUCE_LOGSUMEXP, x, 30, 1, slope);
                CHECK(y[i] && y[i]->dtype == is);
                case_near("in a region", case_read(y[i], 2)[0], want, case_slack(is, want, 1e-6));
            }
        }
    CHECK_INT(mixp_context_error(case_c, NULL), MIXP_OK);
    case_refused(mixp_var(case_c, t, 2, 1, 0), MIXP_ERR_SHAPE, "var: x");
    case_refused(mixp_logsumexp(case_c, t, -3, 0), MIXP_ERR_SHAPE, "logsumexp: x");
    case_refused(mixp_min(case_c, t, 2, 0), MIXP_ERR_SHAPE, "min: x");
    case_refused(mixp_logsumexp(case_c, NULL, 0, 0), MIXP_ERR_ARGUMENT, "NULL");
    CHECK_INT(mixp_step_begin(case_c), MIXP_OK);        /* no region was left open */
    mixp_context_free(case_c);
}

#include "picking_cases.h"
#include "loss_cases.h"
#include "variant_cases.h"
#include "combined_cases.h"

static void operator_run_cases(void) {
    RUN(test_elementwise);
    RUN(test_elementwise_not_finite);
    RUN(test_elementwise_small);
    RUN(test_elementwise_refused);
    RUN(test_shapes);
    RUN(test_shapes_of_integers);
    RUN(test_stack);
    RUN(test_shapes_refused);
    RUN(test_reductions);
    RUN(test_reductions_of_few);
    RUN(test_variance_near_an_offset);
    RUN(test_reductions_to_0);
    RUN(test_reductions_in_regions);
    picking_run_cases();
    loss_run_cases();
    variant_run_cases();
    combined_run_cases();
}
