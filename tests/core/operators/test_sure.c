/* test_sure.c - results that are nearly certain: where a probability is near 1, a slope near 0, or values nearly equal,
 * f32 keeps its digits. Values and gradients at gaps of 0 to 100 beside formulas in double that have no cancellation:
 * each elementwise operator of the table, the losses with their options; and a law without a formula over
 * tests/support/operators.h: if f(x + 1) = f(x), the gradients of a row sum to 0, relative to the largest of them.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "mixprec.h"
#include "test.h"
#include "operators.h"
#include "shared_work.h"

static mixp_context *ctx;
static const double gaps[] = { 0, 0.25, 1, 3, 5, 8, 10, 12, 15, 17, 20, 25, 30, 40, 50, 60, 70, 80, 100 };
enum { GAPS = sizeof gaps / sizeof *gaps, COLS = 8 };

/* Relative to what is wanted, beyond the smallest normal numbers. */
static void expect(const char *what, double at, double got, double want, double slack) {
    if (fabs(got - want) <= slack * fabs(want) + 2e-37) return;
    test_bad++;
    TEST_SHOW("%s at %g is %.9g, not %.9g", what, at, got, want);
}

static mixp_tensor *variable(int rank, const int64_t *shape, const float *data) {
    mixp_tensor *t = mixp_input(ctx, MIXP_F32, rank, shape, data);
    mixp_tensor_set_requires_grad(t, 1);
    return t;
}
static void read_doubles(const mixp_tensor *t, double *to) { CHECK_INT(mixp_read(t, to, MIXP_F64, t->count), MIXP_OK); }

/* --- elementwise ------------------------------------------------------------------------------------------- */

static double sigmoid(double x) { return x < 0 ? exp(x) / (1 + exp(x)) : 1 / (1 + exp(-x)); }
static double normal(double x) { return 0.5 * erfc(-x * 0.70710678118654752); }
static double density(double x) { return 0.39894228040143268 * exp(-0.5 * x * x); }
static double above(double x, double y, double n) { return x > 0 ? y : n; }
static double cube(double x) { return 1.5957691216057308 * (x + 0.044715 * x * x * x); }
static double cube_slope(double x) { return 1.5957691216057308 * (1 + 3 * 0.044715 * x * x); }

/* y with erf(y) = x, by bisection of erfc(y) = 1 - |x|, which is exact. */
static double erfinv(double x) {
    double low = 0, high = 30;
    for (int i = 0; i < 200; i++) {
        const double y = 0.5 * (low + high);
        if (fabs(x) < 0.5 ? erf(y) < fabs(x) : erfc(y) > 1 - fabs(x)) low = y;
        else high = y;
    }
    return x < 0 ? -low : low;
}

/* Operator, value, slope, at x and the row's number k. `slopes`: 0 = the slope is made from the f32 result, as in
 * PyTorch, and is compared up to a rounding of that result: a slope that cannot keep more digits. */
#define REFERENCES(X)                                                                                                 \
    X(SCALE,        x * k,                              k,                                              1)            \
    X(RELU,         above(x, x, 0),                     above(x, 1, 0),                                 1)            \
    X(GELU,         x * normal(x),                      normal(x) + x * density(x),                     1)            \
    X(GELU_TANH,    x * sigmoid(cube(x)),                                                                             \
      sigmoid(cube(x)) + x * sigmoid(cube(x)) * sigmoid(-cube(x)) * cube_slope(x),                      1)            \
    X(SILU,         x * sigmoid(x),                     sigmoid(x) * (1 + x * sigmoid(-x)),             1)            \
    X(TANH,         tanh(x),                            1 / (cosh(x) * cosh(x)),                        0)            \
    X(SIGMOID,      sigmoid(x),                         sigmoid(x) * sigmoid(-x),                       0)            \
    X(SQRT,         sqrt(x),                            0.5 / sqrt(x),                                  1)            \
    X(EXP,          exp(x),                             exp(x),                                         1)            \
    X(LOG,          log(x),                             1 / x,                                          1)            \
    X(POW,          pow(x, k),                          k * pow(x, k - 1),                              1)            \
    X(NEG,          -x,                                 -1.0,                                           1)            \
    X(ABS,          fabs(x),                            x > 0 ? 1 : x < 0 ? -1 : 0,                     1)            \
    X(SIN,          sin(x),                             cos(x),                                         1)            \
    X(COS,          cos(x),                             -sin(x),                                        1)            \
    X(CLAMP,        fmin(fmax(x, -1), k),               x > -1 && x < k,                                1)            \
    X(RELU_SQUARED, above(x, x * x, 0),                 above(x, 2 * x, 0),                             1)            \
    X(SOFT_CAP,     k * tanh(x / k),                    1 / (cosh(x / k) * cosh(x / k)),                0)            \
    X(SQUARE,       x * x,                              2 * x,                                          1)            \
    X(RECIPROCAL,   1 / x,                              -1 / (x * x),                                   1)            \
    X(LOG1P,        log1p(x),                           1 / (1 + x),                                    1)            \
    X(EXPM1,        expm1(x),                           exp(x),                                         1)            \
    X(ERF,          erf(x),                             1.1283791670955126 * exp(-x * x),               1)            \
    X(SOFTPLUS,     x > 0 ? x + log1p(exp(-x)) : log1p(exp(x)), sigmoid(x),                             1)            \
    X(LEAKY_RELU,   above(x, x, k * x),                 above(x, 1, k),                                 1)            \
    X(ELU,          above(x, x, k * expm1(x)),          above(x, 1, k * exp(x)),                        1)            \
    X(ADD_SCALAR,   x + k,                              1.0,                                            1)            \
    X(RSUB,         k - x,                              -1.0,                                           1)            \
    X(LOG2,         log2(x),                            1.4426950408889634 / x,                         1)            \
    X(LOG10,        log10(x),                           0.43429448190325183 / x,                        1)            \
    X(ACOS,         acos(x),                            -1 / sqrt((1 - x) * (1 + x)),                   1)            \
    X(ASIN,         asin(x),                            1 / sqrt((1 - x) * (1 + x)),                    1)            \
    X(TAN,          tan(x),                             1 + tan(x) * tan(x),                            1)            \
    X(SINH,         sinh(x),                            cosh(x),                                        1)            \
    X(COSH,         cosh(x),                            sinh(x),                                        1)            \
    X(ERFINV,       erfinv(x),                          0.88622692545275801 * exp(erfinv(x) * erfinv(x)), 1)

typedef struct reference {
    mixp_op_id id;
    double   (*value)(double x, double k), (*slope)(double x, double k);
    int        slopes;
} reference;
#define REFERENCE_FUNCTIONS(id, value, slope, slopes)                                                                 \
    static double value_##id(double x, double k) { return (void)k, (void)x, value; }                                  \
    static double slope_##id(double x, double k) { return (void)k, (void)x, slope; }
#define REFERENCE_ROW(id, value, slope, slopes) { MIXP_OP_##id, value_##id, slope_##id, slopes },
REFERENCES(REFERENCE_FUNCTIONS)
static const reference references[] = { REFERENCES(REFERENCE_ROW) };

/* x of a row's domain for a gap: both signs, a probability near 0 and near 1, a number next to 1. */
static int numbers_of(const op_row *r, float *x) {
    int n = 0;
    for (int i = 0; i < GAPS; i++) {
        const float g = (float)gaps[i];
        const char  domain = r->is[OP_DOMAIN];
        if (domain == 'U') {
            x[n] = 1 - ldexpf(1, -1 - i), x[n + 1] = -x[n], x[n + 2] = ldexpf(1, -2 * i - 1), n += 3;
            continue;
        }
        x[n++] = g, x[n++] = ldexpf(1, -2 * i), x[n++] = 1 + ldexpf(1, -i);
        if (domain == 'P') { x[n - 3] += 0.125f; continue; }
        x[n++] = -g, x[n++] = -ldexpf(1, -2 * i);
    }
    return n;
}

static void check_elementwise(const op_row *r, const reference *f) {
    float  x[5 * GAPS];
    double y[5 * GAPS], g[5 * GAPS];
    op_in  o;
    const int64_t n = numbers_of(r, x);
    memset(&o, 0, sizeof o);
    CHECK_INT(mixp_step_begin(ctx), MIXP_OK);
    o.c = ctx;
    o.k = r->k;
    o.x = variable(1, &n, x);
    mixp_tensor *t = r->run(&o);
    CHECK_INT(mixp_backward(ctx, mixp_sum(ctx, t, MIXP_ALL, 0)), MIXP_OK);
    read_doubles(t, y);
    read_doubles(o.x->grad, g);
    for (int64_t i = 0; i < n; i++) {
        const double at = (double)x[i], k = (double)r->k, want = f->slope(at, k);
        if (fabs(f->value(at, k)) > 3e38 || fabs(want) > 3e38) continue;
        expect(r->name, at, y[i], f->value(at, k), 1e-5);
        /* A sum or a product with k of 0, such as sin near pi, loses no more than x itself. */
        if (f->slopes) expect(r->name, at, g[i], want, 1e-5);
        else CHECK_NEAR(g[i], want, 2e-7 + 1e-5 * fabs(want));
    }
}

static void elementwise_operators_keep_their_digits(void) {
    const mixp_op *relu = mixp_op_builtin(MIXP_OP_RELU);
    int seen = 0;
    for (int i = 0; i < MIXP_OP_COUNT; i++) {
        const reference *f = references;
        const reference *end = f + sizeof references / sizeof *references;
        while (f < end && f->id != op_rows[i].id) f++;
        if (f < end) check_elementwise(&op_rows[i], f), seen++;
        else if (mixp_op_builtin(op_rows[i].id)->backward == relu->backward) {
            test_bad++;
            TEST_SHOW("%s is elementwise and has no formula in test_sure.c", op_rows[i].name);
        }
    }
    CHECK_INT(seen, (int)(sizeof references / sizeof *references));
}

/* --- a row that is nearly certain --------------------------------------------------------------------------- */

/* A row whose column 3 is ahead of the others by about `gap`. */
static void sure_row(float *x, double gap) {
    for (int j = 0; j < COLS; j++) x[j] = (float)(j == 3 ? gap : 0.25 * ((j * 5) % 7 - 3));
}
/* exp(x - top) / sum, and the sum of the others of column 3 by the sum: 1 minus its probability, with its digits. */
static double probabilities(const float *x, double *p) {
    double top = -1e300, sum = 0, rest = 0;
    for (int j = 0; j < COLS; j++) if ((double)x[j] > top) top = (double)x[j];
    for (int j = 0; j < COLS; j++) sum += exp((double)x[j] - top);
    for (int j = 0; j < COLS; j++) p[j] = exp((double)x[j] - top) / sum;
    for (int j = 0; j < COLS; j++) if (j != 3) rest += p[j];
    return rest;
}

enum { PLAIN, LINEAR, CHUNKS, SMOOTH, WEIGHTS, BOTH, NLL, SOFT, SURE_SOFT, KINDS };
static const char *const kinds[] = { "cross_entropy", "linear_cross_entropy", "with chunks", "smoothed", "with weights",
    "smoothed with weights", "nll of log_softmax", "probabilities", "sure probabilities" };

/* The loss of `rows` equal rows, and the gradient of the logits, in x or as [rows, COLS]. */
static void check_entropy(int kind, double gap, int64_t rows) {
    const int64_t matrix[2] = { rows, COLS }, column[2] = { COLS, 1 }, one[2] = { rows, 1 }, classes = COLS;
    float  x[16 * COLS], soft[16 * COLS], ones[16], w[COLS];
    double p[COLS], g[16 * COLS], loss, q[COLS], size = 0, sum = 0, want = 0;
    int32_t ids[16];
    mixp_loss_desc d;
    memset(&d, 0, sizeof d);
    CHECK_INT(mixp_step_begin(ctx), MIXP_OK);
    for (int64_t i = 0; i < rows; i++) sure_row(x + i * COLS, gap), ids[i] = 3, ones[i] = 1;
    const double rest = probabilities(x, p);
    for (int j = 0; j < COLS; j++) w[j] = (float)(0.5 + 0.25 * (j % 4)), q[j] = j == 3;
    if (kind == SOFT) for (int j = 0; j < COLS; j++) q[j] = j == 3 ? 0.75 : 0.25 / (COLS - 1);
    if (kind == SURE_SOFT) for (int j = 0; j < COLS; j++) q[j] = j == 3 ? 1 - 0x1p-20 : 0x1p-20 / (COLS - 1);
    for (int64_t i = 0; i < rows * COLS; i++) soft[i] = (float)q[i % COLS];
    for (int j = 0; j < COLS; j++) q[j] = (double)(float)q[j];
    if (kind == SMOOTH || kind == BOTH) {
        d.smoothing = 0x1p-10f;
        for (int j = 0; j < COLS; j++) q[j] = q[j] * (1 - 0x1p-10) + 0x1p-10 / COLS;
    }
    mixp_tensor *at = variable(2, matrix, x), *y, *to = mixp_input(ctx, MIXP_I32, 1, &rows, ids);
    if (kind == WEIGHTS || kind == BOTH) d.weight = mixp_input(ctx, MIXP_F32, 1, &classes, w);
    if (kind == SOFT || kind == SURE_SOFT) to = mixp_input(ctx, MIXP_F32, 2, matrix, soft);
    if (kind == CHUNKS) d.chunk = 3;
    if (kind == LINEAR || kind == CHUNKS) {
        at = variable(2, column, x);
        y = mixp_linear_cross_entropy_apply(ctx, mixp_input(ctx, MIXP_F32, 2, one, ones), at, to, &d);
    } else if (kind == NLL) y = mixp_nll(ctx, mixp_log_softmax(ctx, at), to, MIXP_IGNORE);
    else y = mixp_loss_apply(ctx, MIXP_OP_CROSS_ENTROPY, at, to, &d);
    CHECK_INT(mixp_backward(ctx, y), MIXP_OK);
    loss = (double)mixp_item(y);
    read_doubles(at->grad, g);

    /* In double: the sum of q w (-log p); its slopes p sum(q w) - q w, and the target's from the others'. */
    for (int j = 0; j < COLS; j++) {
        if (d.weight) q[j] *= (double)w[j];
        sum += q[j];
        want += q[j] * (j == 3 ? -log1p(-rest) : -log(p[j]));
        if (p[j] == 0.0 && q[j] == 0.0) want = 0;
    }
    const double by = d.weight ? (double)w[3] : 1;
    if (rest < 0.5) expect(kinds[kind], gap, loss, want / by, 1e-5);
    double target = 0;
    for (int j = 0; j < COLS; j++) if (j != 3) target -= (p[j] * sum - q[j]), size += fabs(p[j] * sum) + fabs(q[j]);
    const double share = kind == LINEAR || kind == CHUNKS ? by : by * (double)rows;
    if (fabs(g[3] * share - target) > 1e-5 * size + 2e-37) {
        test_bad++;
        TEST_SHOW("%s, gap %g: the target's slope is %.9g, not %.9g", kinds[kind], gap, g[3] * share, target);
    }
    for (int j = 0; j < COLS; j++)
        if (j != 3) CHECK_NEAR(g[j] * share, p[j] * sum - q[j], 1e-5 * (p[j] * sum + fabs(q[j])) + 2e-37);
}
static void a_sure_class_keeps_its_gradient(void) {
    for (int kind = 0; kind < KINDS; kind++)
        for (int i = 0; i < GAPS - 1; i++) check_entropy(kind, gaps[i], kind == CHUNKS ? 7 : 1 + i % 5);
}

/* softmax with gradients of any size: p (dy - the mean of dy), by differences to the sure column's. */
static void a_sure_softmax_keeps_its_gradient(void) {
    const int64_t row[2] = { 1, COLS };
    for (int i = 0; i < GAPS - 1; i++) {
        float  x[COLS], dy[COLS];
        double p[COLS], g[COLS], want = 0;
        sure_row(x, gaps[i]);
        const double rest = probabilities(x, p);
        for (int j = 0; j < COLS; j++) dy[j] = (float)(3 + (j * 3) % 5);
        CHECK_INT(mixp_step_begin(ctx), MIXP_OK);
        mixp_tensor *t = variable(2, row, x), *y = mixp_softmax(ctx, t);
        CHECK_INT(mixp_backward(ctx, mixp_sum(ctx, mixp_mul(ctx, y, mixp_input(ctx, MIXP_F32, 2, row, dy)), MIXP_ALL, 0)), MIXP_OK);
        read_doubles(t->grad, g);
        for (int j = 0; j < COLS; j++) if (j != 3) want += p[j] * (double)(dy[3] - dy[j]);
        CHECK_NEAR(g[3], p[3] * want, 1e-5 * rest * 5 + 2e-37);
    }
}

/* --- losses of elements ---------------------------------------------------------------------------------------- */

static void check_loss(mixp_op_id loss, float x, float target, double want, double slope) {
    mixp_loss_desc d;
    const int64_t one = 1;
    double g;
    memset(&d, 0, sizeof d);
    CHECK_INT(mixp_step_begin(ctx), MIXP_OK);
    mixp_tensor *t = variable(1, &one, &x), *y = mixp_loss_apply(ctx, loss, t, mixp_input(ctx, MIXP_F32, 1, &one, &target), &d);
    CHECK_INT(mixp_backward(ctx, y), MIXP_OK);
    read_doubles(t->grad, &g);
    expect(op_name(loss), (double)x, (double)mixp_item(y), want, 1e-5);
    expect(op_name(loss), (double)x, g, slope, 1e-5);
}
static void sure_losses_keep_their_digits(void) {
    for (int i = 0; i < GAPS - 1; i++) {
        const float x = (float)gaps[i], p = 1 - ldexpf(1, -1 - i), z = ldexpf(1, -1 - 2 * i);
        check_loss(MIXP_OP_BCE_WITH_LOGITS, x, 1, log1p(exp(-gaps[i])), -sigmoid(-gaps[i]));
        check_loss(MIXP_OP_BCE_WITH_LOGITS, -x, 0, log1p(exp(-gaps[i])), sigmoid(-gaps[i]));
        check_loss(MIXP_OP_BCE, p, 1, -log((double)p), -1 / (double)p);
        if (z > 1e-11f) check_loss(MIXP_OP_BCE, z, 0, -log1p(-(double)z), 1 / (1 - (double)z));
        check_loss(MIXP_OP_KL_DIV, -z, 1, (double)z, -1);
        check_loss(MIXP_OP_MSE, 1 + z, 1, ((double)(1 + z) - 1) * ((double)(1 + z) - 1), 2 * ((double)(1 + z) - 1));
    }
}

/* --- values that are nearly equal ------------------------------------------------------------------------------ */

/* The variance of numbers that differ by a few units in the last place, and its gradient. */
static void nearly_equal_values_keep_their_variance(void) {
    static const int64_t row[2] = { 1, COLS };
    static const float bases[] = { 1, 3, 100, 4097, 1e6f };
    for (int i = 0; i < 5; i++)
        for (int far = 0; far < 12; far += 3) {
            float  x[COLS];
            double mean = 0, var = 0, g[COLS], y[1];
            for (int j = 0; j < COLS; j++) {
                x[j] = bases[i] + bases[i] * ldexpf((float)((j * 5) % 7), far - 23);
                mean += (double)x[j] / COLS;
            }
            for (int j = 0; j < COLS; j++) var += ((double)x[j] - mean) * ((double)x[j] - mean) / (COLS - 1);
            CHECK_INT(mixp_step_begin(ctx), MIXP_OK);
            mixp_tensor *t = variable(2, row, x), *v = mixp_var(ctx, t, -1, 1, 0);
            CHECK_INT(mixp_backward(ctx, v), MIXP_OK);
            read_doubles(v, y);
            expect("var", (double)bases[i], y[0], var, 1e-5);
            read_doubles(t->grad, g);
            for (int j = 0; j < COLS; j++) CHECK_NEAR(g[j], 2 * ((double)x[j] - mean) / (COLS - 1), 1e-5 * sqrt(var));
        }
}

/* --- the law without a formula ---------------------------------------------------------------------------------- */

/* The result of a row, or of a loss with options, at rows that are sure by `gap`, plus `shift`. */
static mixp_tensor *at_shifted(const op_row *r, mixp_op_id loss, unsigned options, double gap, float shift, op_in *o) {
    static const int64_t matrix[2] = { 3, COLS }, square[2] = { COLS, COLS }, row[1] = { COLS }, column[1] = { 3 };
    float   x[3 * COLS], y[3 * COLS], w[COLS * COLS];
    int32_t ids[3 * COLS];
    uint8_t mask[3 * COLS];
    memset(o, 0, sizeof *o);
    for (int i = 0; i < 3; i++) sure_row(x + i * COLS, gap);
    for (int i = 0; i < 3 * COLS; i++) {
        x[i] += shift;
        y[i] = 0.25f * (float)((i * 3) % 5 + 1);
        ids[i] = i < 3 ? 3 : i % COLS;
        mask[i] = 0;
    }
    for (int i = 0; i < COLS * COLS; i++) w[i] = 0.125f * (float)(i % 7 + 1);
    CHECK_INT(mixp_step_begin(ctx), MIXP_OK);
    o->c = ctx;
    o->k = r->k;
    o->loss = loss;
    o->options = options;
    o->x = variable(2, matrix, x);
    o->y = o->z = mixp_input(ctx, MIXP_F32, 2, matrix, y);
    o->w = mixp_input(ctx, MIXP_F32, 2, square, w);
    o->v = o->u = mixp_input(ctx, MIXP_F32, 1, row, y);
    o->i = mixp_input(ctx, MIXP_I32, 1, column, ids);
    o->a = mixp_input(ctx, MIXP_I32, 2, matrix, ids);
    o->j = mixp_input(ctx, MIXP_I32, 1, row, ids);
    o->m = mixp_input(ctx, MIXP_U8, 2, matrix, mask);
    mixp_tensor *t = r->run(o);
    mixp_context_clear_error(ctx);
    return t;
}

/* Checks a row of the list; returns 1 if a shift changes nothing. */
static int check_shift(const op_row *r, mixp_op_id loss, unsigned options) {
    static double a[512], b[512];
    double g[3 * COLS];
    op_in  o;
    mixp_tensor *t = at_shifted(r, loss, options, 1, 0, &o);
    if (!t || t->count > 512 || !strstr(r->gradients, "x:")) return 0;
    read_doubles(t, a);
    t = at_shifted(r, loss, options, 1, 1, &o);
    read_doubles(t, b);
    for (int64_t i = 0; i < t->count; i++) if (!(fabs(a[i] - b[i]) <= 1e-5 * (1 + fabs(a[i])))) return 0;

    for (int k = 0; k < GAPS - 1; k++) {
        t = at_shifted(r, loss, options, gaps[k], 0, &o);
        CHECK_INT(mixp_backward(ctx, mixp_sum(ctx, mixp_mul(ctx, t, t), MIXP_ALL, 0)), MIXP_OK);
        if (!o.x->grad) return 0;
        read_doubles(o.x->grad, g);
        for (int i = 0; i < 3; i++) {
            double sum = 0, most = 0;
            for (int j = 0; j < COLS; j++) sum += g[i * COLS + j], most = fmax(most, fabs(g[i * COLS + j]));
            if (fabs(sum) <= 2e-6 * most + 1e-37) continue;
            test_bad++;
            TEST_SHOW("%s (loss %d, options %u), gap %g: the gradients of a row sum to %.3g, beside %.3g", r->name,
                      (int)loss, options, gaps[k], sum, most);
            return 1;
        }
    }
    return 1;
}
static void gradients_of_what_ignores_a_shift_sum_to_0(void) {
    const op_row *with = &op_rows[OP_ROWS - 1];
    int kept = 0;
    for (int i = 0; i < OP_ROWS - 1; i++) kept += check_shift(&op_rows[i], MIXP_OP_COUNT, 0);
    for (unsigned options = 0; options < OP_OPTIONS; options++) {
        kept += check_shift(with, MIXP_OP_CROSS_ENTROPY, options);
    }
    CHECK(kept >= 10);
    printf("# %d rows and options ignore a shift\n", kept);
}

int main(void) {
    mixp_context_desc desc;
    memset(&desc, 0, sizeof desc);
    ctx = mixp_context_new(&desc);
    if (!ctx) return 2;
    RUN(elementwise_operators_keep_their_digits);
    RUN(a_sure_class_keeps_its_gradient);
    RUN(a_sure_softmax_keeps_its_gradient);
    RUN(sure_losses_keep_their_digits);
    RUN(nearly_equal_values_keep_their_variance);
    RUN(gradients_of_what_ignores_a_shift_sum_to_0);
    mixp_context_free(ctx);
    return test_report();
}
