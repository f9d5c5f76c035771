/* test_numerics.c - shapes and numbers where vectors and formulas have their edges, against loops in
 * double.
 * SPDX-License-Identifier: MIT OR Unlicense */
#include "mixprec.h"
#include "numbers.h"
#include "test.h"

enum { MANY = 20000 };

static mixp_context *context_on(int isa) {
    mixp_context_desc d;
    memset(&d, 0, sizeof d);
    d.device = mixp_cpu_with((mixp_isa)isa);
    d.threads = 1;
    return d.device ? mixp_context_new(&d) : NULL;
}

/* f and its slope at n values x, the slope as the gradient of the sum of y. */
typedef mixp_tensor *(*function)(mixp_context *c, mixp_tensor *x);
static void evaluate(mixp_context *c, function f, int n, const float *x, float *y,
                     float *slope) {
    int64_t shape[1];
    mixp_tensor *in, *out;
    shape[0] = n;
    CHECK_INT(mixp_step_begin(c), MIXP_OK);
    in = mixp_input(c, MIXP_F32, 1, shape, x);
    mixp_tensor_set_requires_grad(in, 1);
    out = f(c, in);
    CHECK_INT(mixp_backward(c, mixp_sum(c, out, MIXP_ALL, 0)), MIXP_OK);
    CHECK_INT(mixp_read(out, y, MIXP_F32, n), MIXP_OK);
    CHECK_INT(mixp_read(in->grad, slope, MIXP_F32, n), MIXP_OK);
}

/* --- rows of two: a gate and an up of one element each ------------------------------------ */

static double silu(double x) { return x / (1 + exp(-x)); }
static double silu_slope(double x) {
    double s = 1 / (1 + exp(-x));
    return s + x * s * (1 - s);
}

static void check_packed(mixp_context *c, int rows, int half) {
    float x[17 * 6], y[17 * 3], slope[17 * 6], dy[17 * 3];
    int64_t shape[2], narrow[2];
    mixp_tensor *in, *out, *weight;
    int i, j;
    shape[0] = narrow[0] = rows;
    shape[1] = 2 * half;
    narrow[1] = half;
    for (i = 0; i < rows * 2 * half; i++) x[i] = (float)(4 * random_value());
    for (i = 0; i < rows * half; i++) dy[i] = (float)random_value();
    CHECK_INT(mixp_step_begin(c), MIXP_OK);
    in = mixp_input(c, MIXP_F32, 2, shape, x);
    weight = mixp_input(c, MIXP_F32, 2, narrow, dy);
    mixp_tensor_set_requires_grad(in, 1);
    out = mixp_swiglu_packed(c, in);
    CHECK_INT(mixp_backward(c, mixp_sum(c, mixp_mul(c, out, weight), MIXP_ALL, 0)), MIXP_OK);
    mixp_read(out, y, MIXP_F32, rows * half);
    mixp_read(in->grad, slope, MIXP_F32, rows * 2 * half);
    for (i = 0; i < rows; i++)
        for (j = 0; j < half; j++) {
            double gate = x[i * 2 * half + j], up = x[i * 2 * half + half + j];
            double d = dy[i * half + j];
            CHECK_NEAR(y[i * half + j], silu(gate) * up, 4e-6);
            CHECK_NEAR(slope[i * 2 * half + j], d * up * silu_slope(gate), 4e-6);
            CHECK_NEAR(slope[i * 2 * half + half + j], d * silu(gate), 4e-6);
        }
}

static void swiglu_of_two_columns(void) {
    static const int rows[] = { 1, 2, 3, 15, 16, 17 };
    int isa, i, half;
    for (isa = 0; isa < MIXP_ISA_COUNT; isa++) {
        mixp_context *c = context_on(isa);
        for (i = 0; c && i < 6; i++)
            for (half = 1; half < 4; half++) check_packed(c, rows[i], half);
        mixp_context_free(c);
    }
}

/* --- tanh ----------------------------------------------------------------------------------- */

static mixp_tensor *capped(mixp_context *c, mixp_tensor *x) {
    return mixp_soft_cap(c, x, 1.5f);
}

/* Values of every size, of both signs in turn. */
static void fill(float *x) {
    int i;
    for (i = 0; i < MANY; i += 2) {
        x[i] = (float)ldexp(1 + 0.5 * random_value(), random_to(20) - 15);
        x[i + 1] = -x[i];
    }
    x[0] = 0;
    x[1] = -x[0];
}

static double ulps(double got, double want)
{ return want == 0 && got == 0 ? 0 : fabs(got - want) / (2 * half_ulp(MIXP_F32, want)); }

/* By the nearest f32 or a neighbour of it, odd to the bit; the slope, 1 - t^2, is then wrong by
 * what the roundings of t and of the square bring in. */
static void check_tanh(mixp_context *c, function f, double cap) {
    static float x[MANY], y[MANY], slope[MANY];
    double worst = 0, worst_slope = 0;
    int i;
    fill(x);
    evaluate(c, f, MANY, x, y, slope);
    for (i = 0; i < MANY; i++) {
        double t = tanh(x[i] / cap), off = ulps(y[i], cap * t), s = 1 / cosh(x[i] / cap);
        if (off > worst) worst = off;
        off = fabs(slope[i] - s * s);
        if (off > worst_slope) worst_slope = off;
    }
    for (i = 2; i < MANY; i += 2) {
        CHECK_INT(f32_bits(y[i + 1]), f32_bits(-y[i]));
        CHECK_INT(f32_bits(slope[i + 1]), f32_bits(slope[i]));
    }
    CHECK(worst < 0.9);
    CHECK(worst_slope < 1e-7);
}

static void tanh_is_odd_and_near(void) {
    int isa;
    for (isa = 0; isa < MIXP_ISA_COUNT; isa++) {
        mixp_context *c = context_on(isa);
        if (!c) continue;
        check_tanh(c, mixp_tanh, 1);
        check_tanh(c, capped, 1.5);
        mixp_context_free(c);
    }
}

/* Also where the compiler joins products and sums: tests/variant.sh gnu. */
static void same_bits(function f) {
    static float x[MANY], y[2][MANY], slope[2][MANY];
    mixp_context *plain = context_on(MIXP_ISA_SCALAR);
    int isa;
    fill(x);
    evaluate(plain, f, MANY, x, y[0], slope[0]);
    for (isa = 1; isa < MIXP_ISA_COUNT; isa++) {
        mixp_context *c = context_on(isa);
        if (!c) continue;
        evaluate(c, f, MANY, x, y[1], slope[1]);
        CHECK(!memcmp(y[0], y[1], sizeof y[0]));
        CHECK(!memcmp(slope[0], slope[1], sizeof slope[0]));
        mixp_context_free(c);
    }
    mixp_context_free(plain);
}

static void same_bits_of_tanh(void) {
    same_bits(mixp_tanh);
    same_bits(capped);
}

int main(void) {
    RUN(swiglu_of_two_columns);
    RUN(tanh_is_odd_and_near);
    RUN(same_bits_of_tanh);
    return test_report();
}
