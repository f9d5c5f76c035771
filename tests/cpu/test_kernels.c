/* test_kernels.c - elementwise and row kernels on every instruction set, compared with plain
 * double loops over the same rounded inputs.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * Every test runs with the same random numbers on each instruction set, with tasks in order and
 * with tasks backwards on three workers; all runs must write the same bytes. Analytic gradients
 * are first checked against differences of the double forward, then serve as the reference.
 */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include "test.h"
#include "arrays.h"

#define EPS 5.9604644775390625e-8       /* half a unit in the last place of 1, f32         */

static const mixp_kernels *K;
static mixp_exec X;
static uint64_t  seen;                  /* a hash of every byte that the kernels wrote     */

/* Runs a test's body everywhere. */
static void everywhere(void (*body)(void)) {
    int isa, threads, first = 1;
    uint64_t want = 0;
    for (isa = 0; isa < MIXP_ISA_COUNT; isa++) {
        const mixp_device *device = mixp_cpu_with((mixp_isa)isa);
        for (threads = 0; device && threads <= 3; threads += 3) {
            runner r;
            int bad = test_bad;
            K = device->kernels;
            X = runner_exec(&r, threads);
            random_state = 88172645463325252u;
            seen = 14695981039346656037u;
            body();
            CHECK(runner_end(&r) || r.requests > 1);
            if (first) want = seen;
            CHECK(seen == want);
            if (test_bad != bad) printf("  ... %s, %d threads\n", isa_names[isa], threads);
            first = 0;
        }
    }
}

/* One scratch request at most, since the last call. */
static int one_request(void) {
    runner *r = (runner *)X.user;
    int good = r->requests <= 1;
    r->requests = 0;
    return good;
}

#define CALL(call) do { CHECK_INT(K->call, MIXP_OK); CHECK(one_request()); } while (0)

static test_array values(mixp_dtype dtype, int64_t n, double scale) {
    test_array a = array_new(dtype, n);
    for (int64_t i = 0; i < n; i++) array_set(a, i, scale * random_value());
    return a;
}

/* An output: garbage, or with `old` numbers to add to. */
static test_array output(mixp_dtype dtype, int64_t n, int accumulate) {
    return accumulate ? values(dtype, n, 1.0) : array_new(dtype, n);
}

static double *doubles(test_array a, int64_t n, int wanted) {
    double *d = (double *)calloc((size_t)n + 1, sizeof(double));
    if (!d) exit(2);
    for (int64_t i = 0; wanted && i < n; i++) d[i] = array_get(a, i);
    return d;
}

/* Hashes what a kernel wrote, checks the guards, frees. */
static void finish(test_array a, int64_t n) {
    const unsigned char *p = (const unsigned char *)a.data;
    size_t i, bytes = (size_t)n * mixp_dtype_size(a.dtype);
    for (i = 0; i < bytes; i++) seen = (seen ^ p[i]) * 1099511628211u;
    CHECK(array_guarded(a, n));
    array_free(a);
}

static int is_nan(double x) {
    uint64_t u;
    memcpy(&u, &x, 8);
    return (u & 0x7FFFFFFFFFFFFFFFu) > 0x7FF0000000000000u;
}

static void expect(test_array a, int64_t i, double want, double tolerance) {
    double got = array_get(a, i);
    double slack = tolerance + half_ulp(a.dtype, fabs(want) + tolerance) * 1.0001;
    if (is_nan(want)) CHECK(is_nan(got));
    else if (fabs(want) > (a.dtype == MIXP_F16 ? 65519.0 : 3.39e38)) CHECK(fabs(got) > 65504.0 &&
        (got > 0) == (want > 0));
    else CHECK_NEAR(got, want, slack);
}

static const int sizes[] = { 1, 2, 15, 16, 17, 31, 33, 65, 127, 1023, 1024, 1025, 3001 };
#define SIZES (int)(sizeof sizes / sizeof sizes[0])

/* --- unary ------------------------------------------------------------------------------- */

/* y with erf(y) = x, by bisection: in the tails by erfc, which keeps the digits of 1 - x. */
static double inverse_erf(double x) {
    double low = 0.0, high = 7.0, size = fabs(x);
    if (!(size < 1.0)) return size > 1.0 || x != x ? NAN : x * HUGE_VAL;
    if (size < 1e-8) return x * 0.88622692545275801365;
    for (int i = 0; i < 60; i++) {
        double y = 0.5 * (low + high);
        if (size > 0.5 ? erfc(y) > 1.0 - size : erf(y) < size) low = y;
        else high = y;
    }
    return x < 0.0 ? -low : low;
}

/* A function that the list `of` does not have: the test fails, and says where to add it. */
static double no_reference(const char *of, int op) {
    test_bad++;
    TEST_SHOW("%s has no line for function %d of src/kernels.h: add one", of, op);
    return NAN;
}

static double unary_ref(int op, double x, double p) {
    double u = 0.79788456080286535588 * (x + 0.044715 * x * x * x);
    switch (op) {
    case MIXP_UNARY_RELU: return x < 0.0 ? 0.0 : x;
    case MIXP_UNARY_GELU_TANH: return u < -3.0 ? x / (1.0 + exp(-2.0 * u)) : 0.5 * x * (1.0 +
        tanh(u));
    case MIXP_UNARY_GELU_ERF: return 0.5 * x * erfc(-x * 0.70710678118654752440);
    case MIXP_UNARY_SILU: return x / (1.0 + exp(-x));
    case MIXP_UNARY_TANH: return tanh(x);
    case MIXP_UNARY_SIGMOID: return 1.0 / (1.0 + exp(-x));
    case MIXP_UNARY_EXP: return exp(x);
    case MIXP_UNARY_LOG: return log(x);
    case MIXP_UNARY_SQRT: return sqrt(x);
    case MIXP_UNARY_ROOT: return sqrt(x);
    case MIXP_UNARY_POW: return pow(x, p);
    case MIXP_UNARY_RELU_SQUARED: return x < 0.0 ? 0.0 : x * x;
    case MIXP_UNARY_ABS: return fabs(x);
    case MIXP_UNARY_SIN: return sin(x);
    case MIXP_UNARY_COS: return cos(x);
    case MIXP_UNARY_SOFT_CAP: return p * tanh(x / p);
    case MIXP_UNARY_CLAMP: return x < p ? p : x > p + 1.5 ? p + 1.5 : x;
    case MIXP_UNARY_AFFINE: return x * p + (p + 1.5);
    case MIXP_UNARY_LOG1P: return log1p(x);
    case MIXP_UNARY_EXPM1: return expm1(x);
    case MIXP_UNARY_ERF: return erf(x);
    case MIXP_UNARY_SOFTPLUS: return (x * p > 0.0 ? x : 0.0) + log1p(exp(-fabs(x * p))) / p;
    case MIXP_UNARY_LEAKY_RELU: return x > 0.0 ? x : p * x;
    case MIXP_UNARY_ELU: return x > 0.0 ? x : p * expm1(x);
    case MIXP_UNARY_LOG2: return log2(x);
    case MIXP_UNARY_LOG10: return log10(x);
    case MIXP_UNARY_ACOS: return acos(x);
    case MIXP_UNARY_ASIN: return asin(x);
    case MIXP_UNARY_TAN: return tan(x);
    case MIXP_UNARY_SINH: return sinh(x);
    case MIXP_UNARY_COSH: return cosh(x);
    case MIXP_UNARY_ERFINV: return inverse_erf(x);
    case MIXP_UNARY_SCALE: return x * p;
    default: return no_reference("unary_ref", op);
    }
}

/* The gradient from what the kernel sees: x, and y as stored. */
static double unary_slope(int op, double x, double y, double p) {
    double u = 0.79788456080286535588 * (x + 0.044715 * x * x * x), s = 1.0 / (1.0 + exp(-x));
    switch (op) {
    case MIXP_UNARY_RELU: return x > 0.0 ? 1.0 : 0.0;
    case MIXP_UNARY_GELU_TANH:
        return 0.5 * (1.0 + tanh(u)) + 0.5 * x * (1.0 - tanh(u) * tanh(u)) *
               0.79788456080286535588 * (1.0 + 3.0 * 0.044715 * x * x);
    case MIXP_UNARY_GELU_ERF:
        return 0.5 * erfc(-x * 0.70710678118654752440) +
            x * exp(-0.5 * x * x) * 0.39894228040143267794;
    case MIXP_UNARY_SILU: return s + x * s * (1.0 - s);
    case MIXP_UNARY_TANH: return 1.0 - y * y;
    case MIXP_UNARY_SIGMOID: return y * (1.0 - y);
    case MIXP_UNARY_EXP: return y;
    case MIXP_UNARY_LOG: return 1.0 / x;
    case MIXP_UNARY_SQRT: return 0.5 / y;
    case MIXP_UNARY_ROOT: return y > 0.0 ? 0.5 / y : 0.0;
    case MIXP_UNARY_POW: return p == 0.0 ? 0.0 : p * pow(x, p - 1.0);
    case MIXP_UNARY_RELU_SQUARED: return x < 0.0 ? 0.0 : 2.0 * x;
    case MIXP_UNARY_ABS: return x > 0.0 ? 1.0 : x < 0.0 ? -1.0 : 0.0;
    case MIXP_UNARY_SIN: return cos(x);
    case MIXP_UNARY_COS: return -sin(x);
    case MIXP_UNARY_SOFT_CAP: return 1.0 - tanh(x / p) * tanh(x / p);
    case MIXP_UNARY_CLAMP: return x > p && x < p + 1.5 ? 1.0 : 0.0;
    case MIXP_UNARY_LOG1P: return 1.0 / (1.0 + x);
    case MIXP_UNARY_EXPM1: return exp(x);
    case MIXP_UNARY_ERF: return 1.12837916709551257390 * exp(-x * x);
    case MIXP_UNARY_SOFTPLUS: return 1.0 / (1.0 + exp(-x * p));
    case MIXP_UNARY_LEAKY_RELU: return x > 0.0 ? 1.0 : p;
    case MIXP_UNARY_ELU: return x > 0.0 ? 1.0 : p * exp(x);
    case MIXP_UNARY_LOG2: return 1.0 / (x * 0.69314718055994530942);
    case MIXP_UNARY_LOG10: return 1.0 / (x * 2.30258509299404568402);
    case MIXP_UNARY_ACOS: return -1.0 / sqrt((1.0 - x) * (1.0 + x));
    case MIXP_UNARY_ASIN: return 1.0 / sqrt((1.0 - x) * (1.0 + x));
    case MIXP_UNARY_TAN: return 1.0 + y * y;
    case MIXP_UNARY_SINH: return cosh(x);
    case MIXP_UNARY_COSH: return sinh(x);
    case MIXP_UNARY_ERFINV: return 0.88622692545275801365 * exp(inverse_erf(x) * inverse_erf(x));
    case MIXP_UNARY_SCALE: case MIXP_UNARY_AFFINE: return p;
    default: return no_reference("unary_slope", op);
    }
}

/* What f32 arithmetic may lose: a few roundings, more where the formula magnifies them. */
static double unary_slack(int op, double x, double want) {
    double ulps = op == MIXP_UNARY_EXP || op == MIXP_UNARY_LOG ? 2.5 : 6.0;
    if (op == MIXP_UNARY_RELU || op == MIXP_UNARY_SQRT || op == MIXP_UNARY_ROOT) ulps = 0.0;
    if (op == MIXP_UNARY_AFFINE || op == MIXP_UNARY_LEAKY_RELU || op == MIXP_UNARY_ERFINV) ulps = 1.0;
    if (op == MIXP_UNARY_SOFTPLUS && x < 0.0) ulps += 3.0 * fabs(x);        /* of p x, p up to 3 */
    if (op == MIXP_UNARY_GELU_TANH && x < 0.0) ulps += 6.0 * fabs(1.6 * (x + 0.0447 * x * x * x));
    return ulps * EPS * fabs(want) + (op == MIXP_UNARY_GELU_ERF ? 5e-44 : ulps > 0.0 ? 3e-45 : 0.0);
}

static const float powers[] = { 0.0f, 1.0f, 2.0f, 3.0f, 0.5f, -1.0f, 1.7f, -2.5f };

static int positive_only(int op) {
    return op == MIXP_UNARY_LOG || op == MIXP_UNARY_SQRT || op == MIXP_UNARY_POW ||
        op == MIXP_UNARY_LOG1P || op == MIXP_UNARY_ROOT || op == MIXP_UNARY_LOG2 || op == MIXP_UNARY_LOG10;
}

/* Is op defined between -1 and 1, or steep beyond? */
static int within_one(int op) {
    return op == MIXP_UNARY_ACOS || op == MIXP_UNARY_ASIN || op == MIXP_UNARY_ERFINV || op == MIXP_UNARY_TAN;
}

/* A parameter that op takes: softplus has positive ones. */
static float power_for(int op, int i) {
    return op == MIXP_UNARY_SOFTPLUS ? 0.5f + (float)fabs((double)powers[i]) : powers[i];
}

static test_array unary_input(int op, mixp_dtype dtype, int64_t n) {
    static const double scales[4] = { 0.01, 1.0, 6.0, 15.0 };
    double scale = scales[random_to(4)];
    test_array a = values(dtype, n, scale);
    for (int64_t i = 0; positive_only(op) && i < n; i++) array_set(a, i, fabs(array_get(a, i)) +
        0.05 * scale);
    for (int64_t i = 0; within_one(op) && i < n; i++) array_set(a, i, 0.98 * sin(array_get(a, i)));
    return a;
}

static void unary_body(void) {
    for (int op = 0; op < MIXP_UNARY_COUNT; op++)
        for (int c = 0; c < SIZES; c++) {
            int64_t n = sizes[c];
            int place = random_to(3) == 0;
            float p = power_for(op, random_to(8));
            test_array a = unary_input(op, random_dtype(), n), y;
            double *x = doubles(a, n, 1);
            y = place ? a : array_new(random_dtype(), n);
            CALL(unary(&X, args_unary((mixp_unary)op, n, y, a, p)));
            for (int64_t i = 0; i < n; i++) {
                double want = unary_ref(op, x[i], (double)p);
                expect(y, i, want, unary_slack(op, x[i], want));
            }
            finish(y, n);
            if (!place) array_free(a);
            free(x);
        }
}

static void unary_backward_body(void) {
    for (int op = 0; op < MIXP_UNARY_COUNT; op++)
        for (int c = 0; c < SIZES; c++) {
            int64_t n = sizes[c];
            int place = random_to(3) == 0, add = !place && random_to(2);
            float p = power_for(op, random_to(8));
            test_array a = unary_input(op, random_dtype(), n), y = array_new(random_dtype(), n);
            test_array dy = values(random_dtype(), n, 3.0), da;
            double *g = doubles(dy, n, 1), *old;
            for (int64_t i = 0; i < n; i++) array_set(y, i, unary_ref(op, array_get(a, i), (double)p));
            da = place ? dy : output(random_dtype(), n, add);
            old = doubles(da, n, add);
            CALL(unary_backward(&X, args_unary_backward((mixp_unary)op, n, da, add, dy, a, y, p)));
            for (int64_t i = 0; i < n; i++) {
                double slope = unary_slope(op, array_get(a, i), array_get(y, i), (double)p);
                double want = g[i] * slope + old[i];
                double magnified = op == MIXP_UNARY_GELU_TANH || op == MIXP_UNARY_GELU_ERF ||
                    op == MIXP_UNARY_SOFT_CAP ? 12.0 : 1.0;
                expect(da, i, want, EPS * (8.0 * fabs(g[i] * slope) + fabs(want) +
                    magnified * fabs(g[i])));
            }
            finish(da, n);
            array_free(a);
            array_free(y);
            if (!place) array_free(dy);
            free(g);
            free(old);
        }
}

/* The slopes above are the derivatives of the functions above. */
static void test_unary_slopes(void) {
    for (int op = 0; op < MIXP_UNARY_COUNT; op++)
        for (int i = 0; i < 200; i++) {
            double p = (double)power_for(op, i % 8), x = 3.0 * random_value(), h = 1e-3, d1, d2;
            if (positive_only(op)) x = fabs(x) + 0.2;
            if (within_one(op)) x *= 0.25;
            if (op == MIXP_UNARY_RELU && fabs(x) < 0.01) continue;
            if (op >= MIXP_UNARY_RELU_SQUARED && fabs(x) < 0.01) continue;
            if (op == MIXP_UNARY_CLAMP && (fabs(x - p) < 0.01 || fabs(x - p - 1.5) < 0.01))
                continue;
            d1 = (unary_ref(op, x + h, p) - unary_ref(op, x - h, p)) / (2.0 * h);
            d2 = (unary_ref(op, x + 2.0 * h, p) - unary_ref(op, x - 2.0 * h, p)) / (4.0 * h);
            d1 = (4.0 * d1 - d2) / 3.0;
            CHECK_NEAR(unary_slope(op, x, unary_ref(op, x, p), p), d1, 1e-6 * (1.0 + fabs(d1)));
        }
}
static void test_unary(void) { everywhere(unary_body); }
static void test_unary_backward(void) { everywhere(unary_backward_body); }

/* Bit patterns over the whole range, subnormals, Inf and NaN too. */
static void unary_range_body(void) {
    static const int ops[] = { MIXP_UNARY_EXP, MIXP_UNARY_LOG, MIXP_UNARY_TANH, MIXP_UNARY_SIGMOID,
                               MIXP_UNARY_GELU_ERF, MIXP_UNARY_GELU_TANH, MIXP_UNARY_SILU,
                               MIXP_UNARY_RELU, MIXP_UNARY_ABS, MIXP_UNARY_RELU_SQUARED,
                               MIXP_UNARY_LOG1P, MIXP_UNARY_EXPM1, MIXP_UNARY_ERF,
                               MIXP_UNARY_LOG2, MIXP_UNARY_LOG10, MIXP_UNARY_ACOS, MIXP_UNARY_ASIN,
                               MIXP_UNARY_SINH, MIXP_UNARY_COSH, MIXP_UNARY_ERFINV };
    const int64_t n = 65521;
    test_array a = array_new(MIXP_F32, n);
    for (int64_t i = 0; i < n; i++) ((float *)a.data)[i] = mixp_f32_of_bits((uint32_t)i * 65551u);
    for (size_t k = 0; k < sizeof ops / sizeof ops[0]; k++) {
        test_array y = array_new(MIXP_F32, n);
        CALL(unary(&X, args_unary((mixp_unary)ops[k], n, y, a, 0.0f)));
        for (int64_t i = 0; i < n; i++) {
            double x = array_get(a, i), want = unary_ref(ops[k], x, 0.0);
            expect(y, i, want, unary_slack(ops[k], x, want) + (fabs(want) < 1e-37 ? 1e-43 : 0.0));
            if (is_nan(array_get(y, i))) array_set(y, i, 0.0);   /* any NaN will do */
        }
        finish(y, n);
    }
    array_free(a);
}
static void test_unary_range(void) { everywhere(unary_range_body); }

static float unary_of(mixp_unary op, float x, float p) {
    float y = -77.0f;
    CHECK_INT(K->unary(&X, args_unary(op, 1, array_of(&y, MIXP_F32), array_of(&x, MIXP_F32), p)),
        MIXP_OK);
    return y;
}

static float slope_of(mixp_unary op, float x) {
    float y = unary_of(op, x, 2.0f), dy = 1.0f, da = -77.0f;
    CHECK_INT(K->unary_backward(&X,
            args_unary_backward(op, 1, array_of(&da, MIXP_F32), 0, array_of(&dy,
        MIXP_F32),
                                array_of(&x, MIXP_F32), array_of(&y, MIXP_F32), 2.0f)),
                                    MIXP_OK);
    return da;
}

static void special_body(void) {
    const float inf = mixp_f32_of_bits(0x7F800000u), nan = mixp_f32_of_bits(0x7FC00000u);
    for (int op = 0; op < MIXP_UNARY_COUNT; op++) CHECK(is_nan((double)unary_of((mixp_unary)op, nan,
        1.5f)));
    CHECK(unary_of(MIXP_UNARY_EXP, inf, 0.0f) >= inf);
    CHECK(unary_of(MIXP_UNARY_EXP, -inf, 0.0f) == 0.0f);
    CHECK(unary_of(MIXP_UNARY_EXP, 0.0f, 0.0f) == 1.0f);
    CHECK(unary_of(MIXP_UNARY_LOG, 0.0f, 0.0f) <= -inf);
    CHECK(unary_of(MIXP_UNARY_LOG, 1.0f, 0.0f) == 0.0f);
    CHECK(unary_of(MIXP_UNARY_LOG, inf, 0.0f) >= inf);
    CHECK(is_nan((double)unary_of(MIXP_UNARY_LOG, -1.0f, 0.0f)));
    CHECK(is_nan((double)unary_of(MIXP_UNARY_SQRT, -1.0f, 0.0f)));
    CHECK(unary_of(MIXP_UNARY_TANH, inf, 0.0f) == 1.0f && unary_of(MIXP_UNARY_TANH, -inf,
        0.0f) == -1.0f);
    CHECK(unary_of(MIXP_UNARY_SIGMOID, inf, 0.0f) == 1.0f && unary_of(MIXP_UNARY_SIGMOID, -inf,
        0.0f) == 0.0f);
    CHECK(unary_of(MIXP_UNARY_POW, 0.0f, 0.0f) == 1.0f && unary_of(MIXP_UNARY_POW, -2.0f,
        3.0f) == -8.0f);
    CHECK(slope_of(MIXP_UNARY_RELU, 0.0f) == 0.0f && slope_of(MIXP_UNARY_RELU, -1.0f) == 0.0f);
    CHECK(slope_of(MIXP_UNARY_SQRT, 0.0f) >= inf);
    CHECK(slope_of(MIXP_UNARY_ROOT, 0.0f) == 0.0f && slope_of(MIXP_UNARY_ROOT, inf) == 0.0f);
    CHECK(is_nan((double)slope_of(MIXP_UNARY_ROOT, nan)) && slope_of(MIXP_UNARY_ROOT, 16.0f) == 0.125f);
    CHECK(slope_of(MIXP_UNARY_ABS, 0.0f) == 0.0f && slope_of(MIXP_UNARY_ABS, -0.0f) == 0.0f);
    CHECK(slope_of(MIXP_UNARY_CLAMP, 2.0f) == 0.0f && slope_of(MIXP_UNARY_CLAMP, 3.5f) == 0.0f);
    CHECK(slope_of(MIXP_UNARY_CLAMP, 2.1f) == 1.0f && slope_of(MIXP_UNARY_CLAMP, 3.4f) == 1.0f);
    CHECK(slope_of(MIXP_UNARY_CLAMP, 1.9f) == 0.0f && slope_of(MIXP_UNARY_CLAMP, inf) == 0.0f);
    CHECK(slope_of(MIXP_UNARY_CLAMP, nan) == 0.0f);
    CHECK(unary_of(MIXP_UNARY_CLAMP, inf, 2.0f) == 3.5f);
    CHECK(unary_of(MIXP_UNARY_CLAMP, -inf, 2.0f) == 2.0f);
    CHECK(unary_of(MIXP_UNARY_SOFT_CAP, inf, 30.0f) == 30.0f);
    CHECK(slope_of(MIXP_UNARY_SOFT_CAP, inf) == 0.0f);
    CHECK(slope_of(MIXP_UNARY_POW, 0.0f) == 0.0f);
    CHECK(unary_of(MIXP_UNARY_LOG1P, inf, 0.0f) >= inf && unary_of(MIXP_UNARY_LOG1P, -1.0f, 0.0f) <= -inf);
    CHECK(is_nan((double)unary_of(MIXP_UNARY_LOG1P, -1.5f, 0.0f)));
    CHECK(is_nan((double)unary_of(MIXP_UNARY_LOG1P, -inf, 0.0f)));
    CHECK(unary_of(MIXP_UNARY_EXPM1, inf, 0.0f) >= inf && unary_of(MIXP_UNARY_EXPM1, -inf, 0.0f) == -1.0f);
    CHECK(slope_of(MIXP_UNARY_EXPM1, -inf) == 0.0f && slope_of(MIXP_UNARY_EXPM1, inf) >= inf);
    CHECK(unary_of(MIXP_UNARY_ERF, inf, 0.0f) == 1.0f && unary_of(MIXP_UNARY_ERF, -inf, 0.0f) == -1.0f);
    CHECK(slope_of(MIXP_UNARY_ERF, inf) == 0.0f && slope_of(MIXP_UNARY_ERF, -inf) == 0.0f);
    CHECK(unary_of(MIXP_UNARY_SOFTPLUS, inf, 2.0f) >= inf && unary_of(MIXP_UNARY_SOFTPLUS, -inf, 2.0f) == 0.0f);
    CHECK(unary_of(MIXP_UNARY_SOFTPLUS, 3e38f, 10.0f) == 3e38f);
    CHECK(slope_of(MIXP_UNARY_SOFTPLUS, 3e38f) == 1.0f && slope_of(MIXP_UNARY_SOFTPLUS, -inf) == 0.0f);
    CHECK(unary_of(MIXP_UNARY_ELU, -inf, 1.5f) == -1.5f && unary_of(MIXP_UNARY_ELU, inf, 1.5f) >= inf);
    CHECK(slope_of(MIXP_UNARY_ELU, 0.0f) == 2.0f && slope_of(MIXP_UNARY_ELU, -inf) == 0.0f);
    CHECK(slope_of(MIXP_UNARY_ELU, nan) == 1.0f && slope_of(MIXP_UNARY_LEAKY_RELU, 0.0f) == 2.0f);
    for (int op = MIXP_UNARY_LOG1P; op <= MIXP_UNARY_ERF; op++)     /* -0 and subnormals stay */
        CHECK(mixp_bits_of_f32(unary_of((mixp_unary)op, -0.0f, 0.0f)) == 0x80000000u);
    CHECK(mixp_bits_of_f32(unary_of(MIXP_UNARY_EXPM1, mixp_f32_of_bits(7), 0.0f)) == 7u);
    CHECK(mixp_bits_of_f32(unary_of(MIXP_UNARY_LOG1P, mixp_f32_of_bits(7), 0.0f)) == 7u);
    for (int op = MIXP_UNARY_GELU_TANH; op <= MIXP_UNARY_SILU; op++) {
        CHECK(unary_of((mixp_unary)op, inf, 0.0f) >= inf && unary_of((mixp_unary)op, 3e38f,
            0.0f) == 3e38f);
        CHECK(unary_of((mixp_unary)op, -3e30f, 0.0f) == 0.0f);
        CHECK(slope_of((mixp_unary)op, 3e38f) == 1.0f && slope_of((mixp_unary)op, -3e38f) == 0.0f);
        CHECK(is_nan((double)slope_of((mixp_unary)op, nan)));
    }
}
static void test_special(void) { everywhere(special_body); }

/* --- binary, with broadcasting ----------------------------------------------------------- */

typedef struct shapes { int rank; int64_t shape[8], a[8], b[8], n, na, nb; } shapes;

/* mask bit i: the operand repeats along axis i. Fills dense strides of its own shape. */
static int64_t operand(const shapes *s, int64_t *strides, unsigned mask) {
    int64_t n = 1;
    for (int i = s->rank - 1; i >= 0; i--) {
        strides[i] = mask >> i & 1u ? 0 : n;
        if (strides[i]) n *= s->shape[i];
    }
    return n;
}

static shapes shapes_new(int rank, const int *dims, unsigned a_mask, unsigned b_mask) {
    shapes s;
    memset(&s, 0, sizeof s);
    s.rank = rank;
    s.n = 1;
    for (int i = 0; i < rank; i++) s.n *= s.shape[i] = dims[i];
    s.na = operand(&s, s.a, a_mask);
    s.nb = operand(&s, s.b, b_mask);
    return s;
}

static void offsets(const shapes *s, int64_t i, int64_t *ia, int64_t *ib) {
    *ia = *ib = 0;
    for (int k = s->rank - 1; k >= 0; k--) {
        *ia += i % s->shape[k] * s->a[k];
        *ib += i % s->shape[k] * s->b[k];
        i /= s->shape[k];
    }
}

static double silu(double x) { return x / (1.0 + exp(-x)); }
static double binary_ref(int op, double a, double b) {
    if (op == MIXP_BINARY_MAXIMUM) return a > b ? a : b;
    if (op == MIXP_BINARY_MINIMUM) return a < b ? a : b;
    if (op == MIXP_BINARY_SWIGLU) return silu(a) * b;
    if (op == MIXP_BINARY_POWER) return pow(a, b);
    if (op == MIXP_BINARY_ATAN2) return atan2(a, b);
    if (op == MIXP_BINARY_PRELU) return a > 0.0 ? a : a * b;
    if (op == MIXP_BINARY_ADD) return a + b;
    if (op == MIXP_BINARY_SUB) return a - b;
    if (op == MIXP_BINARY_MUL) return a * b;
    return op == MIXP_BINARY_DIV ? a / b : no_reference("binary_ref", op);
}

static double binary_slope(int op, int which, double a, double b) {
    if (op == MIXP_BINARY_ADD) return 1.0;
    if (op == MIXP_BINARY_SUB) return which ? -1.0 : 1.0;
    if (op == MIXP_BINARY_MUL) return which ? a : b;
    if (op == MIXP_BINARY_SWIGLU)
        return which ? silu(a) : b * unary_slope(MIXP_UNARY_SILU, a, 0.0, 0.0);
    if (op == MIXP_BINARY_POWER) return which ? pow(a, b) * log(a) : b * pow(a, b - 1.0);
    if (op == MIXP_BINARY_ATAN2) return (which ? -a : b) / (a * a + b * b);
    if (op == MIXP_BINARY_PRELU) return which ? (a > 0.0 ? 0.0 : a) : a > 0.0 ? 1.0 : b;
    if (op == MIXP_BINARY_MAXIMUM || op == MIXP_BINARY_MINIMUM)
        return a == b ? 0.5 : (which == 0) == ((op == MIXP_BINARY_MAXIMUM) == (a > b));
    if (op == MIXP_BINARY_DIV) return which ? -a / (b * b) : 1.0 / b;
    return no_reference("binary_slope", op);
}

static test_array divisor(mixp_dtype dtype, int64_t n) {
    test_array b = values(dtype, n, 2.0);
    for (int64_t i = 0; i < n; i++)
        if (fabs(array_get(b, i)) < 0.25) array_set(b, i, 0.75);
    return b;
}

/* The first operand: above 0 for a power. */
static test_array first_of(int op, mixp_dtype dtype, int64_t n) {
    test_array a = values(dtype, n, 2.0);
    for (int64_t i = 0; op == MIXP_BINARY_POWER && i < n; i++) array_set(a, i, fabs(array_get(a, i)) + 0.25);
    return a;
}

static void check_binary(const shapes *s, int op) {
    test_array a = first_of(op, random_dtype(), s->na), b = divisor(random_dtype(), s->nb), y;
    double *x = doubles(a, s->na, 1);
    int64_t i, ia, ib;
    int place = s->na == s->n && random_to(3) == 0;
    y = place ? a : array_new(random_dtype(), s->n);
    CALL(binary(&X, args_binary((mixp_binary)op, s->rank, s->shape, y, a, s->a, b, s->b)));
    for (i = 0; i < s->n; i++) {
        offsets(s, i, &ia, &ib);
        double want = binary_ref(op, x[ia], array_get(b, ib));
        expect(y, i, want, EPS * (op >= MIXP_BINARY_SWIGLU ? 7.0 : 1.0) * fabs(want));
    }
    finish(y, s->n);
    if (!place) array_free(a);
    array_free(b);
    free(x);
}

static void check_binary_backward(const shapes *s, int op, int which) {
    int64_t nd = which ? s->nb : s->na, i, ia, ib;
    int add = random_to(2);
    test_array a = first_of(op, random_dtype(), s->na), b = divisor(random_dtype(), s->nb);
    test_array dy = values(random_dtype(), s->n, 1.0), d = output(random_dtype(), nd, add);
    double *want = doubles(d, nd, add), *size = doubles(d, nd, add);
    for (i = 0; i < nd; i++) size[i] = fabs(size[i]);
    for (i = 0; i < s->n; i++) {
        offsets(s, i, &ia, &ib);
        double t = array_get(dy, i) * binary_slope(op, which, array_get(a, ia), array_get(b, ib));
        want[which ? ib : ia] += t;
        if (op == MIXP_BINARY_SWIGLU) t = array_get(dy, i) * array_get(b, ib);
        size[which ? ib : ia] += fabs(t);
    }
    CALL(binary_backward(&X,
            args_binary_backward((mixp_binary)op, which, s->rank, s->shape, d, add, dy, a, s->a, b,
        s->b)));
    for (i = 0; i < nd; i++) expect(d, i, want[i], 8.0 * EPS * size[i] + 1e-40);
    finish(d, nd);
    array_free(a);
    array_free(b);
    array_free(dy);
    free(want);
    free(size);
}

static void binary_body(void) {
    static const struct { int rank, dims[4]; unsigned a, b; } cases[] = {
        { 1, { 1, 0, 0, 0 }, 0, 0 }, { 1, { 20011, 0, 0, 0 }, 0, 0 }, { 1, { 20011, 0, 0, 0 }, 0,
            1 },
        { 1, { 20011, 0, 0, 0 }, 1, 0 }, { 2, { 97, 128, 0, 0 }, 0, 1 }, { 2, { 97, 65, 0, 0 }, 0,
            1 },
        { 2, { 300, 65, 0, 0 }, 0, 2 }, { 2, { 33, 1025, 0, 0 }, 0, 1 }, { 2, { 5, 3000, 0, 0 },
            0, 2 },
        { 3, { 12, 64, 33, 0 }, 0, 1 }, { 3, { 12, 33, 7, 0 }, 0, 2 }, { 3, { 12, 33, 7, 0 }, 0,
            5 },
        { 4, { 3, 17, 5, 24 }, 2, 4 }, { 3, { 40, 1, 600, 0 }, 0, 3 }, { 2, { 4001, 3, 0, 0 }, 0,
            1 },
        { 2, { 61, 70, 0, 0 }, 1, 2 }, { 2, { 9, 0, 0, 0 }, 0, 1 }, { 0, { 0, 0, 0, 0 }, 0, 0 }
    };
    int k, op, dims[8];
    for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
        shapes s = shapes_new(cases[c].rank, cases[c].dims, cases[c].a, cases[c].b);
        for (op = test_later() ? (int)c % 3 : 0; op < MIXP_BINARY_COUNT; op += test_later() ? 3 : 1) {
            check_binary(&s, op);
            check_binary_backward(&s, op, (int)(c + (size_t)op) % 2);
            check_binary_backward(&s, op, (int)(c + (size_t)op + 1) % 2);
        }
    }
    for (size_t c = 0; c < 120; c++) {
        int rank = random_to(9);
        for (k = 0; k < rank; k++) dims[k] = 1 + random_to(rank > 5 ? 3 : 7);
        shapes s = shapes_new(rank, dims, random_bits() & random_bits() & 255u, random_bits() & 255u);
        check_binary(&s, random_to(MIXP_BINARY_COUNT));
        check_binary_backward(&s, random_to(MIXP_BINARY_COUNT), random_to(2));
    }
}
static void test_binary(void) { everywhere(binary_body); }

/* The gradient of an operand whose axes lie the other way round, also where there are as many as
 * there can be: no two of them lie one behind the other, and the last is not dense. */
static void turned_body(void) {
    for (int rank = 2; rank <= MIXP_MAX_RANK; rank++) {
        int64_t shape[8], turned[8], dense[8], n = (int64_t)1 << rank, j;
        test_array dy = values(MIXP_BF16, n, 2.0), b = values(MIXP_F32, n, 2.0), dx;
        for (int i = 0; i < rank; i++) {
            shape[i] = 2;
            turned[i] = (int64_t)1 << i;
            dense[i] = n >> (i + 1);
        }
        dx = output(MIXP_F16, n, 0);
        CALL(binary_backward(&X, args_binary_backward(MIXP_BINARY_MUL, 0, rank, shape, dx, 0, dy,
                                                      b, turned, b, dense)));
        for (j = 0; j < n; j++) {
            int64_t to = 0;
            for (int i = 0; i < rank; i++) to += (j / dense[i] & 1) * turned[i];
            expect(dx, to, array_get(dy, j) * array_get(b, j), 4.0 * EPS);
        }
        finish(dx, n);
        array_free(dy);
        array_free(b);
    }
}
static void test_turned(void) { everywhere(turned_body); }

static void test_binary_slopes(void) {
    for (int i = 0; i < 50; i++)
        for (int op = 0; op < MIXP_BINARY_COUNT; op++)
            for (int which = 0; which < 2; which++) {
                double a = random_value(), b = 1.5 + random_value(), h = 1e-5, d;
                if (op == MIXP_BINARY_POWER) a = fabs(a) + 0.25;
                d = which ? binary_ref(op, a, b + h) - binary_ref(op, a, b - h)
                          : binary_ref(op, a + h, b) - binary_ref(op, a - h, b);
                CHECK_NEAR(binary_slope(op, which, a, b), d / (2.0 * h), 1e-7);
            }
}

/* maximum and minimum: a NaN stays, whichever it is; equal operands share the gradient. */
static void extremes_body(void) {
    const float nan = mixp_f32_of_bits(0x7FC00000u), inf = mixp_f32_of_bits(0x7F800000u);
    const int64_t n = 8, one = 1;
    float a[8] = { 1, 2, nan, 3, inf, -inf, 0.0f, nan }, b[8] = { 2, 1, 5, nan, inf, 3, -0.0f, nan };
    float dy[8] = { 8, 8, 8, 8, 8, 8, 8, 8 }, y[8], da[8], db[8];
    test_array x = array_of(a, MIXP_F32), z = array_of(b, MIXP_F32), to = array_of(y, MIXP_F32);
    for (int op = MIXP_BINARY_MAXIMUM; op <= MIXP_BINARY_MINIMUM; op++) {
        int most = op == MIXP_BINARY_MAXIMUM;
        CALL(binary(&X, args_binary((mixp_binary)op, 1, &n, to, x, &one, z, &one)));
        CHECK(y[0] == (most ? 2.0f : 1.0f) && y[1] == y[0] && y[4] == inf && y[6] == 0.0f);
        CHECK(y[5] == (most ? 3.0f : -inf));
        CHECK(is_nan((double)y[2]) && is_nan((double)y[3]) && is_nan((double)y[7]));
        CALL(binary_backward(&X, args_binary_backward((mixp_binary)op, 0, 1, &n,
            array_of(da, MIXP_F32), 0, array_of(dy, MIXP_F32), x, &one, z, &one)));
        CALL(binary_backward(&X, args_binary_backward((mixp_binary)op, 1, 1, &n,
            array_of(db, MIXP_F32), 0, array_of(dy, MIXP_F32), x, &one, z, &one)));
        for (int i = 0; i < 2; i++) CHECK(da[i] == ((i == 1) == most ? 8.0f : 0.0f) && da[i] + db[i] == 8.0f);
        CHECK(da[4] == 4.0f && db[4] == 4.0f && da[6] == 4.0f && db[6] == 4.0f);
    }
}
static void test_extremes(void) { everywhere(extremes_body); }

/* Powers, angles and prelu where their slopes are set: values and slopes by a and by b as in PyTorch. */
static void pairs_body(void) {
    static const struct { int op; float a, b, y, da, db; } cases[] = {
        { MIXP_BINARY_POWER, 0.0f, 0.0f, 1.0f, 0.0f, 0.0f }, { MIXP_BINARY_POWER, 0.0f, 2.0f, 0.0f, 0.0f, 0.0f },
        { MIXP_BINARY_POWER, -2.0f, 3.0f, -8.0f, 12.0f, NAN }, { MIXP_BINARY_POWER, 3.0f, 0.0f, 1.0f, 0.0f, 1.0986123f },
        { MIXP_BINARY_POWER, 0.0f, -1.0f, HUGE_VALF, -HUGE_VALF, -HUGE_VALF },
        { MIXP_BINARY_POWER, -2.0f, 0.5f, NAN, NAN, NAN }, { MIXP_BINARY_ATAN2, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f },
        { MIXP_BINARY_ATAN2, 0.0f, -2.0f, 3.1415927f, -0.5f, 0.0f },
        { MIXP_BINARY_ATAN2, HUGE_VALF, 1.0f, 1.5707964f, 0.0f, NAN },
        { MIXP_BINARY_PRELU, 0.0f, 0.25f, 0.0f, 0.25f, 0.0f }, { MIXP_BINARY_PRELU, HUGE_VALF, 0.0f, HUGE_VALF, 1.0f, 0.0f },
        { MIXP_BINARY_PRELU, NAN, 0.5f, NAN, 0.5f, NAN }
    };
    const int64_t n = 1, one = 1;
    float y, dy = 1.0f, d[2];
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        float a[1], b[1];
        const mixp_binary op = (mixp_binary)cases[i].op;
        test_array x, z, to = array_of(&y, MIXP_F32);
        a[0] = cases[i].a;
        b[0] = cases[i].b;
        x = array_of(a, MIXP_F32);
        z = array_of(b, MIXP_F32);
        CALL(binary(&X, args_binary(op, 1, &n, to, x, &one, z, &one)));
        expect(to, 0, (double)cases[i].y, 2e-7);
        for (int which = 0; which < 2; which++) {
            test_array grad = array_of(&d[which], MIXP_F32);
            CALL(binary_backward(&X, args_binary_backward(op, which, 1, &n, grad, 0, array_of(&dy, MIXP_F32),
                                                          x, &one, z, &one)));
            expect(grad, 0, (double)(which ? cases[i].db : cases[i].da), 2e-7);
        }
    }
}
static void test_pairs(void) { everywhere(pairs_body); }

/* Results that are added to what is there; what cannot add says so. */
static void adding_body(void) {
    const int64_t n = 1500, one = 1;
    test_array a = values(MIXP_BF16, n, 2.0), b = values(MIXP_F16, n, 2.0), y[2];
    mixp_unary_args u = *args_unary(MIXP_UNARY_SCALE, n, a, a, 0.5f);
    mixp_binary_args k = *args_binary(MIXP_BINARY_MUL, 1, &n, a, a, &one, b, &one);
    for (int t = 0; t < 2; t++) {
        mixp_dtype dtype = t ? MIXP_F16 : MIXP_F32;
        double *old[2];
        y[0] = values(dtype, n, 1.0);
        y[1] = values(dtype, n, 1.0);
        old[0] = doubles(y[0], n, 1);
        old[1] = doubles(y[1], n, 1);
        u.y = args_out(y[0], 1);
        k.y = args_out(y[1], 1);
        CALL(unary(&X, &u));
        CALL(binary(&X, &k));
        for (int64_t i = 0; i < n; i++) {
            double product = array_get(a, i) * array_get(b, i);
            expect(y[0], i, old[0][i] + 0.5 * array_get(a, i), 4.0 * EPS);
            expect(y[1], i, old[1][i] + product, 16.0 * EPS);
        }
        mixp_convert_args c = *args_convert(y[0], a, n, NULL);
        mixp_fill_args f = *args_fill(y[0], n, 1.0);
        c.dst.accumulate = f.dst.accumulate = 1;
        CHECK_INT(K->convert(&X, &c), MIXP_ERR_ARGUMENT);
        CHECK_INT(K->fill(&X, &f), MIXP_ERR_ARGUMENT);
        for (int64_t i = 0; i < 2; i++) {
            finish(y[i], n);
            free(old[i]);
        }
    }
    array_free(a);
    array_free(b);
}
static void test_adding(void) { everywhere(adding_body); }

/* --- reduce, dropout, scale_by ----------------------------------------------------------- */

static void reduce_body(void) {
    static const int cases[][3] = {
        { 1, 1, 1 }, { 1, 70001, 1 }, { 1, 768, 512 }, { 768, 65, 1 }, { 1, 4001, 3 }, { 5, 700,
            17 },
        { 3, 33, 1025 }, { 200, 7, 9 }, { 1, 1000001, 1 }, { 2, 130001, 1 }, { 1, 300, 127 }, { 4,
            0, 5 },
        { 64, 3, 64 }, { 0, 3, 4 }, { 70, 1, 70 }, { 1, 20000, 16 }
    };
    for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
        int64_t outer = cases[c][0], n = cases[c][1], inner = cases[c][2], all = outer * n * inner;
        int add = random_to(2);
        float factor = random_to(2) ? 1.0f : 0.37f;
        test_array a = values(random_dtype(), all, 1.0), y = output(random_dtype(), outer * inner,
            add);
        test_array dy = values(random_dtype(), outer * inner, 1.0), da = output(random_dtype(),
            all, add);
        double *old = doubles(y, outer * inner, add), *before = doubles(da, all, add);
        for (int64_t i = 0; c % 2 && i < all; i++) array_set(a, i, fabs(array_get(a, i)));
            /* no cancelling */
        CALL(reduce(&X, args_reduce(outer, n, inner, y, add, a, factor)));
        CALL(reduce_backward(&X, args_reduce(outer, n, inner, da, add, dy, factor)));
        for (int64_t o = 0; o < outer; o++)
            for (int64_t i = 0; i < inner; i++) {
                double sum = 0.0, size = 0.0, want;
                for (int64_t k = 0; k < n; k++) {
                    int64_t at = (o * n + k) * inner + i;
                    double v = array_get(a, at), d = array_get(dy, o * inner + i) * (double)factor;
                    sum += v;
                    size += fabs(v);
                    expect(da, at, before[at] + d, EPS * (fabs(d) + fabs(d + before[at])));
                }
                want = sum * (double)factor + old[o * inner + i];
                expect(y, o * inner + i, want, EPS * (6.0 * size + 2.0 * fabs(want)));
            }
        finish(y, outer * inner);
        finish(da, all);
        array_free(a);
        array_free(dy);
        free(old);
        free(before);
    }
}
static void test_reduce(void) { everywhere(reduce_body); }

/* The exact product, rounded by the conversions of the formats' section. */
static void dropout_body(void) {
    static const float ps[] = { 0.0f, 0.1f, 0.5f, 0.999f, 1.0f };
    for (int c = 0; c < SIZES + 5; c++) {
        int64_t n = c < SIZES ? sizes[c] : 40000 + c, i, kept = 0;
        float p = ps[c % 5], factor = (float)random_value(), scale = p < 1.0f
            ? (float)(1.0 / (1.0 - (double)p)) : 0.0f;
        for (int j = 0; j < 2; j++) {
            int add = random_to(2), place = !add && random_to(2);
            test_array a = values(random_dtype(), n, 2.0), y = place ? a : output(random_dtype(),
                n, add);
            test_array want = array_new(y.dtype, n);
            for (i = 0; i < n; i++) {
                float v = (float)array_get(a, i) * (j ? factor : scale), old = add
                    ? (float)array_get(y, i) : 0.0f;
                if (!j && (double)mixp_random_u32(5, 6, 7,
                    (uint64_t)i) < (double)p * 4294967296.0) v = 0.0f;
                kept += !j && v != 0.0f;
                array_set(want, i, add ? (double)(v + old) : (double)v);
            }
            if (j) CALL(scale_by(&X, args_scale_by(n, y, add, a, &factor)));
            else CALL(dropout(&X, args_dropout(n, y, add, a, p, 5, 6, 7)));
            for (i = 0; i < n; i++) CHECK(array_get(y, i) == array_get(want, i));
            finish(y, n);
            if (!place) array_free(a);
            array_free(want);
        }
        if (n > 40000) CHECK_NEAR((double)kept / (double)n, 1.0 - (double)p, 0.02);
    }
    CHECK_INT(K->dropout(&X,
            args_dropout(0, array_of(NULL, MIXP_F32), 0, array_of(NULL, MIXP_F32), 1.5f,
        0, 0, 0)), MIXP_ERR_ARGUMENT);
}
static void test_dropout_and_scale(void) { everywhere(dropout_body); }

/* Random numbers by their definition, with libm's functions. */
static double random_wanted(const mixp_random_args *k, int64_t i) {
    const uint64_t at = (uint64_t)i;
    const double cell = 1.0 / 4294967296.0;
    double u = (double)mixp_random_u32(5, 6, 7, at), first, second;
    const double steps = k->y.dtype == MIXP_F32 ? 16777216.0 : k->y.dtype == MIXP_F16 ? 2048.0 : 256.0;
    if (k->kind == MIXP_RANDOM_BERNOULLI) return u * cell < (double)k->at ? 1.0 : 0.0;
    if (k->kind == MIXP_RANDOM_UNIFORM) return (double)k->at + (double)k->by * floor(u * cell * steps) / steps;
    first = ((double)mixp_random_u32(5, 6, 7, 2 * at) + 0.5) * cell;
    second = ((double)mixp_random_u32(5, 6, 7, 2 * at + 1) + 0.5) * cell;
    return (double)k->at + (double)k->by * sqrt(-2.0 * log(first)) * cos(2.0 * 3.14159265358979323846 * second);
}

static void random_body(void) {
    for (int c = 0; c < SIZES + 2; c++)
        for (int kind = 0; kind < 3; kind++) {
            int64_t n = c < SIZES ? sizes[c] : 40000 + c, i;
            test_array y = output(random_dtype(), n, 0);
            double grain = y.dtype == MIXP_F32 ? 1.2e-7 : y.dtype == MIXP_F16 ? 1.0 / 1024 : 1.0 / 128;
            mixp_random_args k;
            memset(&k, 0, sizeof k);
            k.kind = (mixp_random_kind)kind;
            k.n = n;
            k.at = kind == 2 ? 0.25f : c % 2 ? -1.5f : 0.0f;
            k.by = c % 2 ? 3.0f : 1.0f;
            k.seed = 5;
            k.step = 6;
            k.tensor = 7;
            k.y = mixpi_out_to(y.data, y.dtype, 0);
            CALL(random(&X, &k));
            for (i = 0; i < n; i++) {
                double want = random_wanted(&k, i);
                CHECK_NEAR(array_get(y, i), want, kind == 2 ? 0.0 : grain * (fabs(want) + fabs((double)k.at)) + 1e-7);
            }
            finish(y, n);
        }
}
static void test_random(void) { everywhere(random_body); }

/* --- softmax ----------------------------------------------------------------------------- */

static const int columns[] = { 1, 2, 15, 16, 17, 65, 127, 128, 1024, 1025, 2500 };
#define COLUMNS (int)(sizeof columns / sizeof columns[0])

static double row_lse(const double *x, int64_t n) {
    double max = x[0], sum = 0.0;
    for (int64_t i = 1; i < n; i++) if (x[i] > max) max = x[i];
    for (int64_t i = 0; i < n; i++) sum += exp(x[i] - max);
    return max + log(sum);
}

/* Where a row of y, a softmax or its logarithm, has 3/4 or more; or -1. Its gradient there keeps its
 * digits: the error is relative to the other columns' part. */
static int64_t sure_column(test_array y, int64_t at, int64_t cols, int log_of) {
    for (int64_t i = at; i < at + cols; i++)
        if ((log_of ? exp(array_get(y, i)) : array_get(y, i)) >= 0.75) return i;
    return -1;
}

static void softmax_body(void) {
    for (int c = 0; c < COLUMNS; c++)
        for (int log_of = 0; log_of < 2; log_of++) {
            int64_t cols = columns[c], rows = 1 + random_to(9) + (cols == 128 ? 300 : 0),
                n = rows * cols;
            int place = random_to(2), add = random_to(2);
            test_array a = values(random_dtype(), n, random_to(2) ? 1.0 : 12.0),
                dy = values(random_dtype(), n, 1.0);
            double *x = doubles(a, n, 1), *old;
            test_array y = place ? a : array_new(random_dtype(), n), da = output(random_dtype(),
                n, add);
            CALL(softmax(&X, args_softmax(rows, cols, log_of, y, a)));
            old = doubles(da, n, add);
            CALL(softmax_backward(&X, args_softmax_backward(rows, cols, log_of, da, add, dy, y)));
            for (int64_t i = 0; i < rows; i++) {
                double lse = row_lse(x + i * cols, cols), dot = 0.0, size = 0.0, from = 0.0;
                const int64_t sure = sure_column(y, i * cols, cols, log_of);
                if (sure >= 0 && !log_of) from = array_get(dy, sure);
                for (int64_t j = 0; j < cols; j++) {
                    double v = x[i * cols + j] - lse, t = array_get(dy, i * cols + j) - from;
                    expect(y, i * cols + j, log_of ? v : exp(v), EPS * (log_of ? 4.0 * (fabs(v) +
                        fabs(lse)) + 2.0 : (8.0 + 4.0 * fabs(v)) * exp(v)));
                    if (!log_of) t *= array_get(y, i * cols + j);
                    dot += t;
                    if (!log_of || i * cols + j != sure) size += fabs(t);
                }
                for (int64_t j = 0; j < cols; j++) {
                    int64_t at = i * cols + j;
                    double g = array_get(dy, at) - from, v = array_get(y, at), want, by;
                    want = old[at] + (log_of ? g - exp(v) * dot : v * (g - dot));
                    if (!log_of) by = v * (fabs(g) + size);
                    else if (at == sure) by = size + fabs(dot * expm1(v));
                    else by = fabs(g) + exp(v) * (size + fabs(dot));
                    expect(da, at, want, EPS * (fabs(want) + 8.0 * by));
                }
            }
            finish(y, n);
            finish(da, n);
            array_free(dy);
            if (!place) array_free(a);
            free(x);
            free(old);
        }
}
static void test_softmax(void) { everywhere(softmax_body); }

/* d/dx of sum(dy softmax(x)) by differences: the formulas used above as reference. */
static void test_softmax_slopes(void) {
    double x[7], dy[7], y[7], dot, h = 1e-5;
    int i, j, s, log_of;
    for (log_of = 0; log_of < 2; log_of++) {
        for (i = 0; i < 7; i++) { x[i] = 2.0 * random_value(); dy[i] = random_value(); }
        for (i = 0; i < 7; i++) {
            double f[2], want;
            for (s = 0; s < 2; s++) {
                double old = x[i], lse;
                x[i] += s ? h : -h;
                lse = row_lse(x, 7);
                for (f[s] = 0.0, j = 0; j < 7; j++) f[s] += dy[j] * (log_of
                    ? x[j] - lse : exp(x[j] - lse));
                x[i] = old;
            }
            for (dot = 0.0, j = 0; j < 7; j++) {
                y[j] = x[j] - row_lse(x, 7);
                if (!log_of) y[j] = exp(y[j]);
                dot += log_of ? dy[j] : dy[j] * y[j];
            }
            want = log_of ? dy[i] - exp(y[i]) * dot : y[i] * (dy[i] - dot);
            CHECK_NEAR(want, (f[1] - f[0]) / (2.0 * h), 1e-8);
        }
    }
}

static void softmax_special_body(void) {
    const float inf = mixp_f32_of_bits(0x7F800000u), nan = mixp_f32_of_bits(0x7FC00000u);
    float a[4][20], y[4][20];
    int i, j;
    for (i = 0; i < 4; i++) for (j = 0; j < 20; j++) a[i][j] = i == 1 ? -inf : (float)j;
    a[0][3] = inf;
    a[2][17] = nan;
    a[3][19] = -inf;
    a[3][4] = -inf;
    CHECK_INT(K->softmax(&X, args_softmax(4, 20, 0, array_of(y, MIXP_F32),
        array_of(a, MIXP_F32))),
        MIXP_OK);
    for (j = 0; j < 20; j++) {
        CHECK(is_nan((double)y[0][j]) && is_nan((double)y[1][j]) && is_nan((double)y[2][j]));
    }
    CHECK(y[3][19] == 0.0f && y[3][4] == 0.0f && y[3][18] > 0.6f && y[3][18] < 0.64f);
}
static void test_softmax_special(void) { everywhere(softmax_special_body); }

/* --- layer norm and rms norm ------------------------------------------------------------- */

/* sum of dy * norm(x) of one row, and its pieces. */
static double norm_row(const double *x, const double *g, const double *b, int64_t n, int rms,
                       double eps, double *y, double *mean, double *rstd) {
    double m = 0.0, v = 0.0;
    int64_t i;
    for (i = 0; !rms && i < n; i++) m += x[i] / (double)n;
    for (i = 0; i < n; i++) v += (x[i] - m) * (x[i] - m) / (double)n;
    *mean = m;
    *rstd = 1.0 / sqrt(v + eps);
    for (i = 0; i < n; i++) y[i] = (x[i] - m) * *rstd * (g ? g[i] : 1.0) + (b ? b[i] : 0.0);
    return m;
}

static void check_norm(int64_t rows, int64_t cols, int rms, double offset) {
    test_array none = array_of(NULL, MIXP_F32), a = values(random_dtype(), rows * cols, 1.0);
    test_array gamma = random_to(3) ? values(random_dtype(), cols, 1.5) : none;
    test_array beta = random_to(3) ? values(random_dtype(), cols, 1.0) : none;
    test_array y = array_new(random_dtype(), rows * cols), mean = array_new(MIXP_F32, rows);
    test_array rstd = array_new(MIXP_F32, rows);
    double *x, *g, *b, *want, m, s;
    for (int64_t i = 0; i < rows * cols; i++) array_set(a, i, array_get(a, i) + offset);
    x = doubles(a, rows * cols, 1);
    g = doubles(gamma, cols, gamma.data != NULL);
    b = doubles(beta, cols, beta.data != NULL);
    want = doubles(none, cols, 0);
    CALL(norm(&X, args_norm(rows, cols, rms, 1e-5f, y, a, gamma, beta, (float *)mean.data,
        (float *)rstd.data)));
    for (int64_t r = 0; r < rows; r++) {
        norm_row(x + r * cols, gamma.data ? g : NULL, beta.data && !rms ? b : NULL, cols, rms,
                 (double)1e-5f, want, &m, &s);
        if (!rms) expect(mean, r, m, 3.0 * EPS * (fabs(m) + 1.0));
        expect(rstd, r, s, EPS * s * (6.0 + 4.0 * s * fabs(m)));
        for (int64_t i = 0; i < cols; i++)
            expect(y, r * cols + i, want[i], EPS * (8.0 + 4.0 * s * fabs(m)) * (fabs(g[i]) +
                fabs(want[i]) + 1.0) * 2.0);
    }
    finish(y, rows * cols);
    if (rms) { CHECK(array_untouched(mean, 0)); array_free(mean); } else finish(mean, rows);
    finish(rstd, rows);
    array_free(a);
    if (gamma.data) array_free(gamma);
    if (beta.data) array_free(beta);
    free(x); free(g); free(b); free(want);
}

static void check_norm_backward(int64_t rows, int64_t cols, int rms) {
    test_array none = array_of(NULL, MIXP_F32), a = values(random_dtype(), rows * cols, 1.0);
    test_array gamma = random_to(3) ? values(random_dtype(), cols, 1.5) : none;
    test_array dy = values(random_dtype(), rows * cols, 1.0), mean = array_new(MIXP_F32, rows);
    test_array rstd = array_new(MIXP_F32, rows);
    int add[3], wanted[3], k;
    test_array d[3];
    int64_t n[3], r, i;
    double *want[3], *size[3], *x = doubles(a, rows * cols, 1), *y = doubles(none, cols, 0);
    n[0] = rows * cols;
    n[1] = n[2] = cols;
    for (k = 0; k < 3; k++) {
        add[k] = random_to(2);
        wanted[k] = random_to(4) != 0;
        d[k] = wanted[k] ? output(random_dtype(), n[k], add[k]) : none;
        want[k] = doubles(d[k], n[k], wanted[k] && add[k]);
        size[k] = doubles(d[k], n[k], wanted[k] && add[k]);
    }
    for (k = 0; k < 3; k++) for (i = 0; i < n[k]; i++) size[k][i] = fabs(size[k][i]);
    for (r = 0; r < rows; r++) {
        double m, s, sum = 0.0, dot = 0.0, scale = 0.0;
        norm_row(x + r * cols, NULL, NULL, cols, rms, 1e-5, y, &m, &s);
        array_set(mean, r, m);
        array_set(rstd, r, s);
        m = rms ? 0.0 : array_get(mean, r);
        s = array_get(rstd, r);
        for (i = 0; i < cols; i++) {
            double h = (x[r * cols + i] - m) * s, t = array_get(dy, r * cols + i);
            double g = t * (gamma.data ? array_get(gamma, i) : 1.0);
            want[1][i] += t * h;
            size[1][i] += fabs(t * h);
            want[2][i] += t;
            size[2][i] += fabs(t);
            sum += rms ? 0.0 : g;
            dot += g * h;
            scale += fabs(g) * (1.0 + fabs(h));
        }
        for (i = 0; i < cols; i++) {
            double h = (x[r * cols + i] - m) * s;
            double g = array_get(dy, r * cols + i) * (gamma.data ? array_get(gamma, i) : 1.0);
            want[0][r * cols + i] += s * (g - sum / (double)cols - h * dot / (double)cols);
            size[0][r * cols + i] += s * (fabs(g) + (1.0 + fabs(h)) * scale / (double)cols);
        }
    }
    CALL(norm_backward(&X, args_norm_backward(rows, cols, rms, args_out(d[0], add[0]),
        args_out(d[1], add[1]), args_out(d[2], add[2]), dy, a, gamma, (const float *)mean.data,
        (const float *)rstd.data)));
    for (k = 0; k < 3; k++) {
        for (i = 0; wanted[k] && i < n[k]; i++) expect(d[k], i, want[k][i],
            16.0 * EPS * (size[k][i] + 0.01));
        if (wanted[k]) finish(d[k], n[k]);
        free(want[k]);
        free(size[k]);
    }
    array_free(a);
    array_free(dy);
    array_free(mean);
    array_free(rstd);
    if (gamma.data) array_free(gamma);
    free(x);
    free(y);
}

/* The sum is rounded once, and its norm is that of what was stored. */
static void check_add_norm(int64_t rows, int64_t cols, int rms) {
    test_array none = array_of(NULL, MIXP_F32), a = values(random_dtype(), rows * cols, 1.0);
    test_array b = values(random_dtype(), rows * cols, 1.0), sum = array_new(random_dtype(), rows * cols);
    test_array gamma = values(MIXP_F32, cols, 1.5), beta = values(random_dtype(), cols, 1.0);
    test_array y = array_new(random_dtype(), rows * cols), mean = array_new(MIXP_F32, rows);
    test_array rstd = array_new(MIXP_F32, rows);
    double *g = doubles(gamma, cols, 1), *shift = doubles(beta, cols, 1), *x, m, s;
    double *want = doubles(none, cols, 0);
    CALL(add_norm(&X, args_add_norm(args_norm(rows, cols, rms, 1e-5f, y, a, gamma, beta,
        (float *)mean.data, (float *)rstd.data), sum, b)));
    for (int64_t i = 0; i < rows * cols; i++)
        expect(sum, i, (double)((float)array_get(a, i) + (float)array_get(b, i)), 0.0);
    x = doubles(sum, rows * cols, 1);
    for (int64_t r = 0; r < rows; r++) {
        norm_row(x + r * cols, g, rms ? NULL : shift, cols, rms, (double)1e-5f, want, &m, &s);
        expect(rstd, r, s, EPS * s * (6.0 + 4.0 * s * fabs(m)));
        for (int64_t i = 0; i < cols; i++)
            expect(y, r * cols + i, want[i], EPS * (8.0 + 4.0 * s * fabs(m)) *
                   (fabs(g[i]) + fabs(want[i]) + 1.0) * 2.0);
    }
    finish(sum, rows * cols);
    finish(y, rows * cols);
    finish(rstd, rows);
    array_free(a); array_free(b); array_free(gamma); array_free(beta); array_free(mean);
    free(g); free(shift); free(x); free(want);
}

/* db is da, cast: of one that was added to, too. */
static void check_norm_db(int64_t rows, int64_t cols, int add) {
    test_array none = array_of(NULL, MIXP_F32), a = values(MIXP_F32, rows * cols, 1.0);
    test_array dy = values(random_dtype(), rows * cols, 1.0);
    test_array da = output(MIXP_F32, rows * cols, add), db = array_new(random_dtype(), rows * cols);
    test_array mean = values(MIXP_F32, rows, 0.1), rstd = values(MIXP_F32, rows, 1.0);
    CALL(norm_backward(&X, args_norm_db(args_norm_backward(rows, cols, 0, args_out(da, add),
        args_out(none, 0), args_out(none, 0), dy, a, none, (const float *)mean.data,
        (const float *)rstd.data), db)));
    for (int64_t i = 0; i < rows * cols; i++) expect(db, i, array_get(da, i), 0.0);
    finish(da, rows * cols);
    finish(db, rows * cols);
    array_free(a); array_free(dy); array_free(mean); array_free(rstd);
}

static void norm_body(void) {
    for (int c = 0; c < COLUMNS; c++)
        for (int rms = 0; rms < 2; rms++) {
            int64_t rows = 1 + random_to(7) + (columns[c] == 128 ? 400 : 0);
            check_norm(rows, columns[c], rms, 0.0);
            if (columns[c] > 2) check_norm(rows, columns[c], rms, 100.0);
            check_norm_backward(rows, columns[c], rms);
            if (columns[c] > 2) check_add_norm(rows, columns[c], rms);
            check_norm_db(rows, columns[c], rms);
        }
}
static void test_norm(void) { everywhere(norm_body); }

/* The formulas of check_norm_backward are the derivatives of norm_row. */
static void test_norm_slopes(void) {
    double x[9], g[9], dy[9], y[9], m, s, h = 1e-5;
    int i, j, k, rms;
    for (rms = 0; rms < 2; rms++) {
        double sum = 0.0, dot = 0.0;
        for (i = 0; i < 9; i++) { x[i] = random_value(); g[i] = random_value();
            dy[i] = random_value(); }
        norm_row(x, NULL, NULL, 9, rms, 1e-5, y, &m, &s);
        for (i = 0; i < 9; i++) { sum += rms ? 0.0 : dy[i] * g[i] / 9.0;
            dot += dy[i] * g[i] * y[i] / 9.0; }
        for (i = 0; i < 9; i++) {
            double f[2], old = x[i], m2, s2, y2[9];
            for (k = 0; k < 2; k++) {
                x[i] = old + (k ? h : -h);
                norm_row(x, g, NULL, 9, rms, 1e-5, y2, &m2, &s2);
                for (f[k] = 0.0, j = 0; j < 9; j++) f[k] += dy[j] * y2[j];
            }
            x[i] = old;
            CHECK_NEAR(s * (dy[i] * g[i] - sum - y[i] * dot), (f[1] - f[0]) / (2.0 * h), 1e-7);
        }
    }
}

/* --- embedding --------------------------------------------------------------------------- */

static void embedding_body(void) {
    int64_t i, j;
    for (int c = 0; c < COLUMNS + 2; c++) {
        int64_t cols = c < COLUMNS ? columns[c] : 128, vocab = c < COLUMNS ? 1 + random_to(90) : 65;
        int64_t rows = c < COLUMNS ? random_to(60) : 768;
        int add = random_to(2);
        int32_t *ids = (int32_t *)malloc((size_t)(rows + 1) * sizeof(int32_t));
        test_array table = values(random_dtype(), vocab * cols, 1.0),
            y = array_new(random_dtype(), rows * cols);
        test_array dy = values(random_dtype(), rows * cols, 1.0), d = output(random_dtype(),
            vocab * cols, add);
        test_array one = array_new(y.dtype, 1);
        double *want = doubles(d, vocab * cols, add), *size = doubles(d, vocab * cols, add);
        if (!ids) exit(2);
        for (i = 0; i < vocab * cols; i++) size[i] = fabs(size[i]);
        for (i = 0; i < rows; i++) ids[i] = (int32_t)random_to((int)vocab);
        if (rows > 2) {
            int32_t keep = ids[rows - 1];
            ids[rows - 1] = i % 2 ? -1 : (int32_t)vocab;
            CHECK_INT(K->embedding(&X, args_embedding(rows, cols, vocab, y, table, ids)),
                MIXP_ERR_ARGUMENT);
            CHECK_INT(K->embedding_backward(&X, args_embedding_backward(rows, cols, vocab, d, add,
                dy, ids)),
                MIXP_ERR_ARGUMENT);
            for (i = 0; i < rows * cols; i++) CHECK(array_untouched(y, i));
            ids[rows - 1] = keep;
        }
        CALL(embedding(&X, args_embedding(rows, cols, vocab, y, table, ids)));
        CALL(embedding_backward(&X, args_embedding_backward(rows, cols, vocab, d, add, dy, ids)));
        for (i = 0; i < rows; i++)
            for (j = 0; j < cols; j++) {
                double t = array_get(dy, i * cols + j);
                array_set(one, 0, array_get(table, ids[i] * cols + j));
                CHECK(array_get(y, i * cols + j) == array_get(one, 0));
                want[ids[i] * cols + j] += t;
                size[ids[i] * cols + j] += fabs(t);
            }
        for (i = 0; i < vocab * cols; i++) expect(d, i, want[i], 12.0 * EPS * size[i]);
        finish(y, rows * cols);
        finish(d, vocab * cols);
        array_free(table);
        array_free(dy);
        array_free(one);
        free(ids);
        free(want);
        free(size);
    }
}
static void test_embedding(void) { everywhere(embedding_body); }

/* --- cross entropy and the other losses -------------------------------------------------- */

static double row_top(const double *x, int64_t n) {
    double top = x[0];
    for (int64_t i = 1; i < n; i++) if (x[i] > top) top = x[i];
    return top;
}

/* The probability of all columns of a row but `target`. */
static double row_rest(const double *x, int64_t n, int64_t target) {
    double rest = 0.0, lse = row_lse(x, n);
    for (int64_t i = 0; i < n; i++) if (i != target) rest += exp(x[i] - lse);
    return rest;
}

/* What a row's backward pass wants: its largest, 1 / the sum of exp(x - it), and the rest. */
static void expect_stats(test_array stats, int64_t r, const double *x, int64_t cols, int target) {
    double top = row_top(x, cols), rsum = exp(top - row_lse(x, cols)), rest;
    CHECK(array_get(stats, 3 * r) == top);
    expect(stats, 3 * r + 1, rsum, EPS * 4.0 * rsum);
    if (target == -100) return;
    rest = row_rest(x, cols, target);
    expect(stats, 3 * r + 2, rest, EPS * (8.0 + 2.0 * fabs(log(rest + 1e-45))) * rest);
}

static void check_entropy(int64_t rows, int64_t cols, int ignored) {
    int add = random_to(2), place = !add && random_to(2);
    test_array a = values(random_dtype(), rows * cols, random_to(2) ? 1.0 : 15.0),
        stats = array_new(MIXP_F32, 3 * rows);
    test_array loss = array_new(MIXP_F32, 1), counted = array_new(MIXP_F32, 1),
        dloss = array_new(random_dtype(), 1), d;
    double *x = doubles(a, rows * cols, 1), *old, sum = 0.0, count = 0.0;
    int32_t *t = (int32_t *)malloc((size_t)rows * sizeof(int32_t));
    if (!t) exit(2);
    array_set(dloss, 0, 1024.0);
    for (int64_t r = 0; r < rows; r++) t[r] = random_to(100) < ignored
        ? -100 : (int32_t)random_to((int)cols);
    CALL(cross_entropy(&X, args_cross_entropy(rows, cols, -100, (float *)loss.data,
        (float *)stats.data, (float *)counted.data, a, t)));
    for (int64_t r = 0; r < rows; r++) {
        double l = row_lse(x + r * cols, cols);
        expect_stats(stats, r, x + r * cols, cols, t[r]);
        if (t[r] == -100) continue;
        sum += l - x[r * cols + t[r]];
        count += 1.0;
    }
    CHECK(array_get(counted, 0) == count);
    if (count > 0.0) expect(loss, 0, sum / count, EPS * (4.0 + 2.0 * fabs(sum / count)));
    else { CHECK(is_nan(array_get(loss, 0))); array_set(loss, 0, 0.0); }
    d = place ? a : output(random_dtype(), rows * cols, add);
    old = doubles(d, rows * cols, add);
    CALL(cross_entropy_backward(&X, args_cross_entropy_backward(rows, cols, -100,
        args_out(d, add), dloss, a, t, (const float *)stats.data, (const float *)counted.data)));
    for (int64_t r = 0; r < rows; r++) {
        double l = row_lse(x + r * cols, cols), top = row_top(x + r * cols, cols);
        double rest = row_rest(x + r * cols, cols, t[r]);
        for (int64_t j = 0; j < cols; j++) {
            int64_t at = r * cols + j;
            double p = j == t[r] ? -rest : exp(x[at] - l), want;
            double f = 1024.0 / (count > 0.0 ? count : 1.0);
            want = t[r] == -100 ? 0.0 : f * p;
            expect(d, at, want + old[at], EPS * (f * (8.0 + 2.0 * (top - x[at]) + 2.0 * fabs(log(
                fabs(p) + 1e-45))) * fabs(p) + fabs(want + old[at])));
        }
    }
    finish(stats, 3 * rows);
    finish(loss, 1);
    finish(counted, 1);
    finish(d, rows * cols);
    if (!place) array_free(a);
    array_free(dloss);
    free(x);
    free(old);
    free(t);
}

/* Loss and gradient in one pass, over the logits or beside them. */
static void check_entropy_both(int64_t rows, int64_t cols, int ignored, int place) {
    test_array a = values(random_dtype(), rows * cols, 3.0), stats = array_new(MIXP_F32, 3 * rows);
    test_array loss = array_new(MIXP_F32, 1), counted = array_new(MIXP_F32, 1);
    test_array d = place ? a : array_new(random_dtype(), rows * cols);
    double *x = doubles(a, rows * cols, 1), sum = 0.0, count = 0.0, f;
    int32_t *t = (int32_t *)malloc((size_t)rows * sizeof(int32_t));
    float scale = 1024.0f;
    if (!t) exit(2);
    for (int64_t r = 0; r < rows; r++) {
        t[r] = random_to(100) < ignored ? -100 : (int32_t)random_to((int)cols);
        count += t[r] != -100;
    }
    CALL(cross_entropy_both(&X, args_cross_entropy_both(args_cross_entropy(rows, cols, -100,
        (float *)loss.data, (float *)stats.data, (float *)counted.data, a, t), d, &scale, 0.25f)));
    f = 256.0 / count;
    for (int64_t r = 0; r < rows; r++) {
        double l = row_lse(x + r * cols, cols), top = row_top(x + r * cols, cols);
        double rest = row_rest(x + r * cols, cols, t[r]);
        expect_stats(stats, r, x + r * cols, cols, t[r]);
        if (t[r] != -100) sum += l - x[r * cols + t[r]];
        for (int64_t j = 0; j < cols; j++) {
            double v = x[r * cols + j], want = f * (j == t[r] ? -rest : exp(v - l));
            if (t[r] == -100) want = 0.0;
            expect(d, r * cols + j, want, EPS * (8.0 + 2.0 * (top - v) + 2.0 * fabs(log(rest +
                1e-45))) * fabs(want));
        }
    }
    CHECK(array_get(counted, 0) == count);
    if (count > 0.0) expect(loss, 0, sum / count, EPS * (4.0 + 2.0 * fabs(sum / count)));
    finish(d, rows * cols);
    if (!place) array_free(a);
    array_free(stats); array_free(loss); array_free(counted);
    free(x);
    free(t);
}

static void entropy_body(void) {
    float logits[6] = { 0.0f, 1.0f, 2.0f, 3.0f, 4.0f, 5.0f }, stats[6], loss = 7.0f, counted;
    int32_t t[2] = { 0, 0 };
    for (int c = 0; c < COLUMNS; c++) {
        check_entropy(1 + random_to(7), columns[c], 0);
        check_entropy(9 + random_to(7), columns[c], 40);
        check_entropy(3, columns[c], 100);
        check_entropy_both(2 + random_to(7), columns[c], 30, c % 2);
    }
    check_entropy(768, 65, 1);
    for (int bad = 0; bad < 2; bad++) {
        t[1] = bad ? 3 : -1;
        CHECK_INT(K->cross_entropy(&X, args_cross_entropy(2, 3, -100, &loss, stats, &counted,
            array_of(logits, MIXP_F32), t)), MIXP_ERR_ARGUMENT);
        CHECK(loss == 7.0f);
        CHECK_INT(K->cross_entropy_both(&X, args_cross_entropy_both(args_cross_entropy(2, 3, -100,
            &loss, stats, &counted, array_of(logits, MIXP_F32), t), array_of(logits, MIXP_F32), stats,
            1.0f)), MIXP_ERR_ARGUMENT);
        CHECK(loss == 7.0f && logits[1] == 1.0f);
    }
    CHECK(one_request());
}
static void test_cross_entropy(void) { everywhere(entropy_body); }

static double loss_ref(int kind, double x, double t) {
    double a, b, d = fabs(x - t), far = 0.75 * (d - 0.375), huber = d < 0.75 ? 0.5 * d * d : far;
    if (kind == MIXP_LOSS_L1) return d;
    if (kind == MIXP_LOSS_HUBER) return huber;
    if (kind == MIXP_LOSS_SMOOTH_L1) return huber / 0.75;
    if (kind == MIXP_LOSS_KL) return t > 0.0 ? t * (log(t) - x) : 0.0;
    if (kind == MIXP_LOSS_KL_LOG) return exp(t) * (t - x);
    if (kind == MIXP_LOSS_MSE) return (x - t) * (x - t);
    if (kind == MIXP_LOSS_BCE_LOGITS) return (x > 0.0 ? x : 0.0) - x * t + log1p(exp(-fabs(x)));
    if (kind != MIXP_LOSS_BCE) return no_reference("loss_ref", kind);
    a = x > 0.0 ? log(x) : -100.0;
    b = x < 1.0 ? log1p(-x) : -100.0;
    return -t * (a < -100.0 ? -100.0 : a) - (1.0 - t) * (b < -100.0 ? -100.0 : b);
}

static double loss_slope(int kind, double x, double t) {
    double q = x * (1.0 - x), e = exp(-fabs(x)), s = x > 0.0 ? 1.0 / (1.0 + e) : e / (1.0 + e),
        c = x > 0.0 ? e / (1.0 + e) : 1.0 / (1.0 + e);
    double d = x - t, sign = d > 0.0 ? 1.0 : d < 0.0 ? -1.0 : 0.0;
    if (kind == MIXP_LOSS_L1) return sign;
    if (kind == MIXP_LOSS_HUBER) return fabs(d) < 0.75 ? d : 0.75 * sign;
    if (kind == MIXP_LOSS_SMOOTH_L1) return fabs(d) < 0.75 ? d / 0.75 : sign;
    if (kind == MIXP_LOSS_KL) return -t;
    if (kind == MIXP_LOSS_KL_LOG) return -exp(t);
    if (kind == MIXP_LOSS_MSE) return 2.0 * (x - t);
    if (kind == MIXP_LOSS_BCE_LOGITS) return (1.0 - t) * s - t * c;
    return kind == MIXP_LOSS_BCE ? (x - t) / (q > 1e-12 ? q : 1e-12) : no_reference("loss_slope", kind);
}

static void check_loss(int kind, int64_t n, int hard) {
    int add = random_to(2);
    test_array a = values(random_dtype(), n, hard ? 30.0 : 2.0), t = values(random_dtype(), n, 1.0);
    test_array y = array_new(MIXP_F32, 1), dloss = array_new(random_dtype(), 1),
        d = output(random_dtype(), n, add);
    double *old = doubles(d, n, add), sum = 0.0, size = 0.0;
    array_set(dloss, 0, 3.0);
    for (int64_t i = 0; i < n; i++) {
        double v = fabs(array_get(t, i));
        array_set(t, i, hard ? v > 0.5 : v);
        if (kind == MIXP_LOSS_BCE) array_set(a, i, hard && i % 3
            ? (double)(i % 2) : fabs(array_get(a, i)) / (hard ? 30.0 : 2.0));
        v = loss_ref(kind, array_get(a, i), array_get(t, i));
        sum += v;
        size += fabs(v) + (kind == MIXP_LOSS_MSE || hard ? 0.0 : 2.0);
        if (kind == MIXP_LOSS_KL) size += fabs(array_get(t, i) * array_get(a, i));
        if (kind == MIXP_LOSS_KL_LOG) size += exp(array_get(t, i)) * fabs(array_get(a, i));
    }
    CALL(loss(&X, args_loss((mixp_loss_kind)kind, n, (float *)y.data, a, t)));
    expect(y, 0, sum / (double)n, 6.0 * EPS * size / (double)n);
    CALL(loss_backward(&X, args_loss_backward((mixp_loss_kind)kind, n, d, add, dloss, a, t)));
    for (int64_t i = 0; i < n; i++) {
        double x = array_get(a, i), g = loss_slope(kind, x, array_get(t, i)) * 3.0 / (double)n;
        double c = kind == MIXP_LOSS_BCE_LOGITS ? 3.0 / (double)n * (hard ? fabs(g) : 1.0) : 0.0;
        expect(d, i, old[i] + g, EPS * (8.0 * fabs(g) + 8.0 * c + fabs(old[i] + g)) + 1e-44);
    }
    finish(y, 1);
    finish(d, n);
    array_free(a);
    array_free(t);
    array_free(dloss);
    free(old);
}

static void loss_body(void) {
    float y;
    for (int kind = 0; kind < MIXP_LOSS_COUNT; kind++) {
        for (int c = 0; c < SIZES; c++) { check_loss(kind, sizes[c], 0); check_loss(kind, sizes[c],
            1); }
        check_loss(kind, 100003, 0);
        CHECK_INT(K->loss(&X, args_loss((mixp_loss_kind)kind, 0, &y, array_of(&y, MIXP_F32),
            array_of(&y, MIXP_F32))), MIXP_OK);
        CHECK(is_nan((double)y));                   /* the mean of nothing, as in PyTorch */
    }
    CHECK(one_request());
}
static void test_loss(void) { everywhere(loss_body); }

static void test_loss_slopes(void) {
    for (int kind = 0; kind < MIXP_LOSS_COUNT; kind++)
        for (int i = 0; i < 100; i++) {
            double x = kind == MIXP_LOSS_BCE ? 0.5 + 0.45 * random_value() : 4.0 * random_value();
            double t = fabs(random_value()), h = 1e-6;
            CHECK_NEAR(loss_slope(kind, x, t), (loss_ref(kind, x + h, t) - loss_ref(kind, x - h,
                t)) / (2.0 * h), 1e-7 * 20);
        }
}

/* --- refusals ---------------------------------------------------------------------------- */

static void *no_scratch(void *user, size_t bytes) { (void)user; (void)bytes; return NULL; }

/* Where the contract has no (+)=, an output that accumulates is refused. */
static void test_no_sums(void) {
    float a[4] = { 1, 2, 3, 4 }, y[4] = { 0 }, mean[2], rstd[2];
    int32_t ids[2] = { 1, 0 };
    test_array from = array_of(a, MIXP_F32), to = array_of(y, MIXP_F32);
    test_array none = array_of(NULL, MIXP_F32);
    mixp_softmax_args s = *args_softmax(2, 2, 0, to, from);
    mixp_norm_args n = *args_norm(2, 2, 0, 1e-5f, to, from, none, none, mean, rstd);
    mixp_embedding_args e = *args_embedding(2, 2, 2, to, from, ids);
    mixp_norm_args sum = *args_add_norm(&n, to, from);
    mixp_norm_backward_args d = *args_norm_backward(2, 2, 0, args_out(none, 0), args_out(none, 0),
        args_out(none, 0), from, from, none, mean, rstd);
    sum.sum.accumulate = 1;
    CHECK_INT(K->add_norm(&X, &sum), MIXP_ERR_ARGUMENT);
    sum.b.dtype = MIXP_F64;
    CHECK_INT(K->add_norm(&X, &sum), MIXP_ERR_DTYPE);
    CHECK_INT(K->norm_backward(&X, args_norm_db(&d, to)), MIXP_ERR_ARGUMENT);   /* of no da */
    s.y.accumulate = n.y.accumulate = e.y.accumulate = 1;
    CHECK_INT(K->softmax(&X, &s), MIXP_ERR_ARGUMENT);
    CHECK_INT(K->norm(&X, &n), MIXP_ERR_ARGUMENT);
    CHECK_INT(K->embedding(&X, &e), MIXP_ERR_ARGUMENT);
    CHECK(y[0] == 0.0f && y[3] == 0.0f);
}

/* What cannot be read is not looked at. */
static void test_not_looked_at(void) {
    double   bad_value[2] = { 1.0, (double)INFINITY };
    float    y[2] = { 5, 5 }, factor = 2;
    int32_t  bad = 0;
    test_array from = array_of(bad_value, MIXP_F64), to = array_of(y, MIXP_F32);
    mixp_scale_by_args s = *args_scale_by(2, to, 0, from, &factor);
    mixp_look_args k;
    mixp_look row;
    memset(&k, 0, sizeof k);
    memset(&row, 0, sizeof row);
    s.bad = &bad;
    CHECK_INT(K->scale_by(&X, &s), MIXP_ERR_DTYPE);
    CHECK(bad == 0 && y[0] == 5.0f);
    k.n = 2;
    k.x = args_in(from);
    k.low = MIXP_F16;
    k.row = &row;
    CHECK_INT(K->look(&X, &k), MIXP_ERR_DTYPE);
    CHECK(row.count == 0);
}

static void refusals_body(void) {
    double   wide[4] = { 1.0, 2.0, 3.0, 4.0 };
    float    f[4] = { 1.0f, 2.0f, 3.0f, 4.0f };
    int32_t  ids[2] = { 0, 0 };
    test_array d = array_of(wide, MIXP_F64), s = array_of(f, MIXP_F32);
    mixp_exec none = X;
    none.scratch = no_scratch;
    CHECK_INT(K->unary(&X, args_unary(MIXP_UNARY_EXP, 4, s, d, 0.0f)), MIXP_ERR_DTYPE);
    CHECK_INT(K->unary(&X, args_unary(MIXP_UNARY_EXP, 4, d, s, 0.0f)), MIXP_ERR_DTYPE);
    CHECK_INT(K->unary(&X, args_unary(MIXP_UNARY_COUNT, 4, s, s, 0.0f)), MIXP_ERR_ARGUMENT);
    CHECK_INT(K->softmax(&X, args_softmax(2, 2, 0, d, s)), MIXP_ERR_DTYPE);
    test_no_sums();
    test_not_looked_at();
    CHECK_INT(K->reduce(&X, args_reduce(1, 4, 1, s, 0, d, 1.0f)), MIXP_ERR_DTYPE);
    CHECK_INT(K->loss(&X, args_loss(MIXP_LOSS_COUNT, 4, f, s, s)), MIXP_ERR_ARGUMENT);
    CHECK_INT(K->embedding(&X, args_embedding(2, 2, 2, s, d, ids)), MIXP_ERR_DTYPE);
    CHECK_INT(K->embedding_backward(&none, args_embedding_backward(2, 1, 2, s, 0, s, ids)),
        MIXP_ERR_MEMORY);
    CHECK_INT(K->cross_entropy(&none, args_cross_entropy(2, 2, -1, f, f, f, s, ids)),
        MIXP_ERR_MEMORY);
    CHECK(wide[0] == 1.0 && f[0] == 1.0f && f[3] == 4.0f);
}
static void test_refusals(void) { everywhere(refusals_body); }

int main(void) {
    RUN(test_unary_slopes);
    RUN(test_unary);
    RUN(test_unary_backward);
    RUN(test_unary_range);
    RUN(test_special);
    RUN(test_binary_slopes);
    RUN(test_extremes);
    RUN(test_pairs);
    RUN(test_binary);
    RUN(test_turned);
    RUN(test_adding);
    RUN(test_reduce);
    RUN(test_dropout_and_scale);
    RUN(test_random);
    RUN(test_softmax_slopes);
    RUN(test_softmax);
    RUN(test_softmax_special);
    RUN(test_norm_slopes);
    RUN(test_norm);
    RUN(test_embedding);
    RUN(test_cross_entropy);
    RUN(test_loss_slopes);
    RUN(test_loss);
    RUN(test_refusals);
    return test_report();
}
