/* test_numerics.c - shapes and numbers at the limits of vectors and formulas, compared with double
 * loops.
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
    shape[0] = narrow[0] = rows;
    shape[1] = 2 * half;
    narrow[1] = half;
    for (int i = 0; i < rows * 2 * half; i++) x[i] = (float)(4 * random_value());
    for (int i = 0; i < rows * half; i++) dy[i] = (float)random_value();
    CHECK_INT(mixp_step_begin(c), MIXP_OK);
    mixp_tensor *in = mixp_input(c, MIXP_F32, 2, shape, x);
    mixp_tensor *weight = mixp_input(c, MIXP_F32, 2, narrow, dy);
    mixp_tensor_set_requires_grad(in, 1);
    mixp_tensor *out = mixp_swiglu_packed(c, in);
    CHECK_INT(mixp_backward(c, mixp_sum(c, mixp_mul(c, out, weight), MIXP_ALL, 0)), MIXP_OK);
    mixp_read(out, y, MIXP_F32, rows * half);
    mixp_read(in->grad, slope, MIXP_F32, rows * 2 * half);
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < half; j++) {
            double gate = x[i * 2 * half + j], up = x[i * 2 * half + half + j];
            double d = dy[i * half + j];
            CHECK_NEAR(y[i * half + j], silu(gate) * up, 4e-6);
            CHECK_NEAR(slope[i * 2 * half + j], d * up * silu_slope(gate), 4e-6);
            CHECK_NEAR(slope[i * 2 * half + half + j], d * silu(gate), 4e-6);
        }
}

static void swiglu_of_two_columns(void) {
    static const int rows[] = { 1, 2, 3, 15, 16, 17 };
    for (int isa = 0; isa < MIXP_ISA_COUNT; isa++) {
        mixp_context *c = context_on(isa);
        for (int i = 0; c && i < 6; i++)
            for (int half = 1; half < 4; half++) check_packed(c, rows[i], half);
        mixp_context_free(c);
    }
}

/* --- tanh ----------------------------------------------------------------------------------- */

static mixp_tensor *capped(mixp_context *c, mixp_tensor *x) {
    return mixp_soft_cap(c, x, 1.5f);
}

/* Values of every size, of both signs in turn. */
static void fill(float *x) {
    for (int i = 0; i < MANY; i += 2) {
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
    fill(x);
    evaluate(c, f, MANY, x, y, slope);
    for (int i = 0; i < MANY; i++) {
        double t = tanh(x[i] / cap), off = ulps(y[i], cap * t), s = 1 / cosh(x[i] / cap);
        if (off > worst) worst = off;
        off = fabs(slope[i] - s * s);
        if (off > worst_slope) worst_slope = off;
    }
    for (int i = 2; i < MANY; i += 2) {
        CHECK_INT(f32_bits(y[i + 1]), f32_bits(-y[i]));
        CHECK_INT(f32_bits(slope[i + 1]), f32_bits(slope[i]));
    }
    CHECK(worst < 0.9);
    CHECK(worst_slope < 1e-7);
}

static void tanh_is_odd_and_near(void) {
    for (int isa = 0; isa < MIXP_ISA_COUNT; isa++) {
        mixp_context *c = context_on(isa);
        if (!c) continue;
        check_tanh(c, mixp_tanh, 1);
        check_tanh(c, capped, 1.5);
        mixp_context_free(c);
    }
}

/* Also where the compiler joins products and sums: tests/tools/variant.sh gnu. */
static void same_bits(function f) {
    static float x[MANY], y[2][MANY], slope[2][MANY];
    mixp_context *plain = context_on(MIXP_ISA_SCALAR);
    fill(x);
    evaluate(plain, f, MANY, x, y[0], slope[0]);
    for (int isa = 1; isa < MIXP_ISA_COUNT; isa++) {
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

/* --- cross entropy of logits with a common offset ------------------------------------------ */

enum { ROWS = 128, MOST_COLUMNS = 1000 };
static float logits[ROWS * MOST_COLUMNS];
static int32_t target_of[ROWS];

/* The offset is in the numbers, so each f32 here is exact; only what is done with it may err. */
static void fill_logits(int columns, double offset, double spread) {
    for (int i = 0; i < ROWS * columns; i++) logits[i] = (float)(offset + spread * random_value());
    for (int i = 0; i < ROWS; i++) target_of[i] = (int32_t)random_to(columns);
}

static double top_of(const float *row, int columns) {
    double top = row[0];
    for (int i = 1; i < columns; i++) if (row[i] > top) top = row[i];
    return top;
}

/* The sum of exp(x - top) in f32: sixteen sums, then these. */
static float torch_sum(const float *x, int columns, float top) {
    float part[16] = { 0 }, sum = 0;
    for (int j = 0; j < columns; j++) part[j % 16] += expf(x[j] - top);
    for (int j = 0; j < 16; j++) sum += part[j];
    return sum;
}

/* The gradient's mean squared error in f32 by PyTorch's order, exp((x - top) - log sum). */
static double torch_error(int columns) {
    double squares = 0;
    for (int r = 0; r < ROWS; r++) {
        const float *x = logits + r * columns, top = (float)top_of(x, columns);
        double sum = 0;
        for (int j = 0; j < columns; j++) sum += exp((double)x[j] - (double)top);
        float log_sum = logf(torch_sum(x, columns, top));
        for (int j = 0; j < columns; j++) {
            double want = exp((double)x[j] - (double)top) / sum, hot = j == target_of[r];
            float low = x[j] - top;
            low -= log_sum;
            float p = expf(low) - (float)hot;
            squares += ((double)p - (want - hot)) * ((double)p - (want - hot));
        }
    }
    return sqrt(squares / (ROWS * columns));
}

static double gradient_error(const float *slope, int columns) {
    double squares = 0;
    for (int r = 0; r < ROWS; r++) {
        const float *x = logits + r * columns;
        double top = top_of(x, columns), sum = 0;
        for (int j = 0; j < columns; j++) sum += exp(x[j] - top);
        for (int j = 0; j < columns; j++) {
            double want = exp(x[j] - top) / sum - (j == target_of[r]);
            double off = (double)slope[r * columns + j] * ROWS - want;
            squares += off * off;
        }
    }
    return sqrt(squares / (ROWS * columns));
}

/* 0: the loss itself; 1: and its gradient in one pass; 2: by rows of a product with 1. */
static void entropy_slope(mixp_context *c, int way, int columns, float *slope) {
    int64_t shape[2], rows[1] = { ROWS }, square[2];
    mixp_scaler *scaler = way == 1 ? mixp_scaler_new(c, NULL) : NULL;
    mixp_tensor *x, *targets, *loss, *ones = NULL;
    static float one[MOST_COLUMNS * 65];
    shape[0] = ROWS;
    shape[1] = square[0] = square[1] = columns;
    CHECK_INT(mixp_step_begin(c), MIXP_OK);
    targets = mixp_input(c, MIXP_I32, 1, rows, target_of);
    x = mixp_input(c, MIXP_F32, 2, shape, logits);
    mixp_tensor_set_requires_grad(x, 1);
    if (way == 2) {
        memset(one, 0, sizeof one);
        for (int i = 0; i < columns; i++) one[i * columns + i] = 1;
        ones = mixp_input(c, MIXP_F32, 2, square, one);
        loss = mixp_linear_cross_entropy(c, x, ones, targets, MIXP_IGNORE, 7);
    } else if (way == 1) {
        loss = mixp_scaler_cross_entropy(scaler, x, targets, MIXP_IGNORE, 1, NULL);
    } else {
        loss = mixp_cross_entropy(c, x, targets, MIXP_IGNORE);
    }
    CHECK_INT(mixp_backward(c, loss), MIXP_OK);
    CHECK_INT(mixp_read(x->grad, slope, MIXP_F32, (int64_t)ROWS * columns), MIXP_OK);
    for (int i = 0; scaler && i < ROWS * columns; i++)      /* a power of two: exact */
        slope[i] /= mixp_scaler_loss_scale(scaler);
}

static void check_offset(int columns, double offset, double spread) {
    static float slope[2][ROWS * MOST_COLUMNS];
    fill_logits(columns, offset, spread);
    double theirs = torch_error(columns);
    for (int way = 0; way < 3; way++)
        for (int isa = 0; isa < MIXP_ISA_COUNT; isa++) {
            mixp_context *c = way == 2 && columns > 250 ? NULL : context_on(isa);
            if (!c) continue;
            entropy_slope(c, way, columns, slope[1]);
            double ours = gradient_error(slope[1], columns);
            if (!(ours <= 1.1 * theirs)) {
                test_bad++;
                TEST_SHOW("%d columns + %g, way %d, set %d: %.2f of PyTorch's error", columns,
                          offset, way, isa, ours / theirs);
            }
            if (isa == MIXP_ISA_SCALAR) memcpy(slope[0], slope[1], sizeof slope[0]);
            CHECK(!memcmp(slope[0], slope[1], sizeof(float) * ROWS * (size_t)columns));
            mixp_context_free(c);
        }
}

static void entropy_with_an_offset(void) {
    static const double offsets[] = { 0, 100, -100, 1e4, -3e6 };
    for (int i = 0; i < 5; i++) {
        check_offset(7, offsets[i], 3);
        check_offset(65, offsets[i], 15);
        check_offset(250, offsets[i], 1);
        check_offset(MOST_COLUMNS, offsets[i], 6);
    }
}

/* --- where PyTorch's rule is a choice: recorded by tests/reference/record_edges.py ---------- */

static mixp_tensor *three_clamps(mixp_context *c, mixp_tensor *x) {
    mixp_tensor *both = mixp_clamp(c, x, -1, 1), *low = mixp_clamp(c, x, -1, HUGE_VALF);
    mixp_tensor *high = mixp_clamp(c, x, -HUGE_VALF, 1);
    return mixp_add(c, mixp_scale(c, both, 1),
                    mixp_add(c, mixp_scale(c, low, 10), mixp_scale(c, high, 100)));
}

static void check_clamps(mixp_context *c) {
    static const float want[] = { 100, 100, 111, 10, 10, 10, 100, 0 };
    float x[8] = { -2, -1, 0, 1, 2, 0, 0, 0 }, y[8], slope[8];
    x[5] = HUGE_VALF;
    x[6] = -HUGE_VALF;
    x[7] = bits_f32(0x7FC00000u);
    evaluate(c, three_clamps, 8, x, y, slope);
    for (int i = 0; i < 8; i++) CHECK(slope[i] == want[i]);
}

typedef mixp_tensor *(*of_two)(mixp_context *c, mixp_tensor *a, mixp_tensor *b);
static void check_pair(mixp_context *c, of_two f, const float *want_a, const float *want_b) {
    float x[2][5] = { { 0, 1, 0, 0, 1 }, { 1, 0, 0, 0, 0 } }, slope[2][5];
    int64_t shape[1] = { 5 };
    x[0][0] = x[0][2] = x[1][1] = x[1][2] = bits_f32(0x7FC00000u);
    x[0][3] = x[1][3] = HUGE_VALF;
    CHECK_INT(mixp_step_begin(c), MIXP_OK);
    mixp_tensor *a = mixp_input(c, MIXP_F32, 1, shape, x[0]);
    mixp_tensor *b = mixp_input(c, MIXP_F32, 1, shape, x[1]);
    mixp_tensor_set_requires_grad(a, 1);
    mixp_tensor_set_requires_grad(b, 1);
    CHECK_INT(mixp_backward(c, mixp_sum(c, f(c, a, b), MIXP_ALL, 0)), MIXP_OK);
    CHECK_INT(mixp_read(a->grad, slope[0], MIXP_F32, 5), MIXP_OK);
    CHECK_INT(mixp_read(b->grad, slope[1], MIXP_F32, 5), MIXP_OK);
    for (int i = 0; i < 5; i++) CHECK(slope[0][i] == want_a[i] && slope[1][i] == want_b[i]);
}

static void check_kl(mixp_context *c, float x, float target, int is_number) {
    int64_t shape[2] = { 1, 1 };
    CHECK_INT(mixp_step_begin(c), MIXP_OK);
    mixp_tensor *in = mixp_input(c, MIXP_F32, 2, shape, &x);
    mixp_tensor_set_requires_grad(in, 1);
    in = mixp_kl_div(c, in, mixp_input(c, MIXP_F32, 2, shape, &target), 0);
    float loss = (float)mixp_item(in);
    CHECK_INT((f32_bits(loss) << 1) <= 0xFF000000u, is_number);
}

static void edges_are_as_in_torch(void) {
    static const float first[] = { 1, 1, 1, 0.5f, 1 }, second[] = { 1, 1, 1, 0.5f, 0 };
    for (int isa = 0; isa < MIXP_ISA_COUNT; isa++) {
        mixp_context *c = context_on(isa);
        if (!c) continue;
        check_clamps(c);
        check_pair(c, mixp_maximum, first, second);
        check_pair(c, mixp_minimum, second, first);
        check_kl(c, bits_f32(0x7FC00000u), 0, 0);
        check_kl(c, HUGE_VALF, 0, 0);
        check_kl(c, -HUGE_VALF, 0, 0);
        check_kl(c, -1, 0, 1);
        check_kl(c, bits_f32(0x7FC00000u), 1, 0);
        check_kl(c, 1, -1, 0);
        mixp_context_free(c);
    }
}

/* Of t queries, keys and values of width 2: y, dq, dk, dv, one after the other. */
typedef struct covered { int t, keys; float q[4], k[8], v[8], dy[4], number; } covered;

static void attend_covered(mixp_context *c, const covered *p, float *out) {
    int64_t queries[3] = { 1, p->t, 2 }, keys[3] = { 1, p->keys, 2 };
    int64_t scores[2] = { p->t, p->keys };
    float mask[8] = { 0 };
    mixp_attention_desc desc;
    mixp_tensor *in[3], *y;
    for (int i = p->keys; i < p->t * p->keys; i++) mask[i] = p->number;
    memset(&desc, 0, sizeof desc);
    desc.heads = 1;
    CHECK_INT(mixp_step_begin(c), MIXP_OK);
    in[0] = mixp_input(c, MIXP_F32, 3, queries, p->q);
    in[1] = mixp_input(c, MIXP_F32, 3, keys, p->k);
    in[2] = mixp_input(c, MIXP_F32, 3, keys, p->v);
    desc.mask = mixp_input(c, MIXP_F32, 2, scores, mask);
    for (int i = 0; i < 3; i++) mixp_tensor_set_requires_grad(in[i], 1);
    y = mixp_attention_apply(c, in[0], in[1], in[2], &desc);
    CHECK_INT(mixp_read(y, out, MIXP_F32, 4), MIXP_OK);
    y = mixp_mul(c, y, mixp_input(c, MIXP_F32, 3, queries, p->dy));
    CHECK_INT(mixp_backward(c, mixp_sum(c, y, MIXP_ALL, 0)), MIXP_OK);
    CHECK_INT(mixp_read(in[0]->grad, out + 4, MIXP_F32, 4), MIXP_OK);
    CHECK_INT(mixp_read(in[1]->grad, out + 8, MIXP_F32, 8), MIXP_OK);
    CHECK_INT(mixp_read(in[2]->grad, out + 16, MIXP_F32, 8), MIXP_OK);
}

/* The second query is covered whole, by -1e9 or by f32's lowest number: both alike. */
static void covered_queries_are_as_in_torch(void) {
    static const float want[24] = {
        0.7420434951782227f, -0.8204864859580994f, 0.8125f, 0.375f,
        0.6715087294578552f, -0.3845396637916565f, -4.226067543029785f, 5.27015495300293f,
        0.35465729236602783f, 4.846996307373047f, -0.2435515820980072f, -0.8643066883087158f,
        -0.5780472755432129f, -7.270942211151123f, 0.4669414162635803f, 3.288252592086792f,
        0.630486786365509f, 1.8695132732391357f, 0.5588962435722351f, 1.9411038160324097f,
        1.1405084133148193f, 1.3594915866851807f, 0.6701086163520813f, 1.8298914432525635f
    };
    covered p = { 2, 4, { 1, -0.5f, 0.25f, 2 }, { 0.5f, 1, -1, 0.25f, 2, -0.5f, 0.75f, 0.75f },
                  { 1, 2, -1, 0.5f, 0.25f, -2, 3, 1 }, { 1, -1, 0.5f, 2 }, -1e9f };
    float got[24];
    for (int isa = 0; isa < MIXP_ISA_COUNT; isa++) {
        mixp_context *c = context_on(isa);
        if (!c) continue;
        for (int again = 0; again < 2; again++) {
            p.number = again ? -3.40282347e38f : -1e9f;
            attend_covered(c, &p, got);
            for (int i = 0; i < 24; i++) CHECK_NEAR(got[i], want[i], 2e-6);
        }
        mixp_context_free(c);
    }
}

/* At an Inf a slope is its limit, where PyTorch's is NaN. */
static void check_limits(mixp_context *c, mixp_tensor *(*f)(mixp_context *, mixp_tensor *)) {
    float x[2] = { HUGE_VALF, -HUGE_VALF }, y[2], slope[2];
    evaluate(c, f, 2, x, y, slope);
    CHECK(slope[0] == 1.0f && slope[1] == 0.0f);
}

static void slopes_at_inf_are_limits(void) {
    for (int isa = 0; isa < MIXP_ISA_COUNT; isa++) {
        mixp_context *c = context_on(isa);
        if (!c) continue;
        check_limits(c, mixp_gelu);
        check_limits(c, mixp_gelu_tanh);
        check_limits(c, mixp_silu);
        mixp_context_free(c);
    }
}

int main(void) {
    RUN(entropy_with_an_offset);
    RUN(edges_are_as_in_torch);
    RUN(covered_queries_are_as_in_torch);
    RUN(slopes_at_inf_are_limits);
    RUN(swiglu_of_two_columns);
    RUN(tanh_is_odd_and_near);
    RUN(same_bits_of_tanh);
    return test_report();
}
