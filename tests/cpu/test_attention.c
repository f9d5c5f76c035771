/* test_attention.c - attention on every instruction set, compared with plain double loops.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * The bounds, with u = 2^-24. A score is a chain of d multiply-adds: its error is at most (2d + 8)
 * u S, with S = scale sum |q||k|. The relative error of a probability is about twice the error of
 * its score. The sums over t keys or queries add 2t u of the sum of their absolute terms. The
 * total is E = u (4 (2d + 8) max(1, S) + 4t + 64) of the absolute sums, plus half a unit in the
 * last place for the one rounding at the end. The reference computes the absolute sums beside the
 * sums. Backward starts from lse, a rounded f32, which adds 2u |lse|. The backward reference takes
 * y as rounded, as the kernel does. AMX keeps 16 bits of a weight and of a score's gradient: 2^-16
 * more.
 */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include "test.h"
#include "arrays.h"

typedef struct problem {
    int64_t    b, t, heads, d, tokens, row;     /* row: heads * d */
    int        causal, accumulate;
    float      scale;
    test_array qkv, y, dy, dqkv, old;
    float     *lse;
    unsigned char *tossed;                      /* rows whose y may be rounded up or down */
    /* The reference: results and sums of absolute values. */
    double    *p, *want_y, *want_lse, *grad, *size;
    double     error;                           /* E above */
} problem;

static int64_t at(const problem *s, int64_t bi, int64_t t, int which, int64_t h, int64_t c) {
    return ((bi * s->t + t) * 3 + which) * s->row + h * s->d + c;
}

static double dot(const problem *s, int64_t bi, int64_t h, int64_t i, int64_t j, double *size) {
    double  sum = 0;
    int64_t c;
    for (*size = 0, c = 0; c < s->d; c++) {
        double term = array_get(s->qkv, at(s, bi, i, 0, h, c)) * array_get(s->qkv, at(s, bi, j, 1, h, c));
        sum += term;
        *size += fabs(term) * (double)s->scale;
    }
    return sum * (double)s->scale;
}

/* Probabilities, y and lse of one head. */
static double reference_head(problem *s, int64_t bi, int64_t h) {
    double  largest = 0, size;
    for (int64_t i = 0; i < s->t; i++) {
        int64_t keys = s->causal ? i + 1 : s->t;
        double *p = s->p + i * s->t, top = -INFINITY, sum = 0;
        for (int64_t j = 0; j < keys; j++) {
            p[j] = dot(s, bi, h, i, j, &size);
            top = p[j] > top ? p[j] : top;
            largest = size > largest ? size : largest;
        }
        for (int64_t j = 0; j < keys; j++) sum += p[j] = exp(p[j] - top);
        s->tossed[(bi * s->heads + h) * s->t + i] = sum > 1.4 && sum < 8.6 && fabs(sum - rint(sum)) < 0.00026;
        for (int64_t j = 0; j < s->t; j++) p[j] = j < keys ? p[j] / sum : 0;
        s->want_lse[(bi * s->heads + h) * s->t + i] = top + log(sum);
        for (int64_t c = 0; c < s->d; c++) {
            double y = 0;
            for (int64_t j = 0; j < keys; j++) y += p[j] * array_get(s->qkv, at(s, bi, j, 2, h, c));
            s->want_y[(bi * s->t + i) * s->row + h * s->d + c] = y;
        }
    }
    return largest;
}

static void reference_head_grads(problem *s, int64_t bi, int64_t h) {
    for (int64_t i = 0; i < s->t; i++) {
        int64_t first = (bi * s->t + i) * s->row + h * s->d;
        double  delta = 0, delta_size = 0;
        for (int64_t c = 0; c < s->d; c++) {
            double term = array_get(s->dy, first + c) * array_get(s->y, first + c);
            delta += term;
            delta_size += fabs(term);
        }
        for (int64_t j = 0; j < (s->causal ? i + 1 : s->t); j++) {
            double p = s->p[i * s->t + j], dp = 0, size = 0, ds, scale = (double)s->scale;
            for (int64_t c = 0; c < s->d; c++) {
                double term = array_get(s->dy, first + c) * array_get(s->qkv, at(s, bi, j, 2, h, c));
                dp += term;
                size += fabs(term);
            }
            ds = p * (dp - delta) * scale;
            size = p * (size + delta_size) * scale;
            for (int64_t c = 0; c < s->d; c++) {
                double q = array_get(s->qkv, at(s, bi, i, 0, h, c)), dy = array_get(s->dy, first + c);
                double k = array_get(s->qkv, at(s, bi, j, 1, h, c));
                s->grad[at(s, bi, i, 0, h, c)] += ds * k;
                s->size[at(s, bi, i, 0, h, c)] += size * fabs(k);
                s->grad[at(s, bi, j, 1, h, c)] += ds * q;
                s->size[at(s, bi, j, 1, h, c)] += size * fabs(q);
                s->grad[at(s, bi, j, 2, h, c)] += p * dy;
                s->size[at(s, bi, j, 2, h, c)] += p * fabs(dy);
            }
        }
    }
}

static double *doubles(int64_t n) {
    double *p = (double *)calloc((size_t)n + 1, sizeof(double));
    if (!p) exit(2);
    return p;
}

static test_array random_array(mixp_dtype dtype, int64_t n, double range) {
    test_array a = array_new(dtype, n);
    for (int64_t i = 0; i < n; i++) array_set(a, i, range * random_value());
    return a;
}

/* whole: q and k are whole numbers and scale is 1, so that large scores are exact. */
static problem problem_new(int b, int t, int heads, int d, int causal, int whole) {
    problem s;
    double  largest = 1, size;
    memset(&s, 0, sizeof s);
    s.b = b; s.t = t; s.heads = heads; s.d = d; s.causal = causal;
    s.tokens = b * t;
    s.row = heads * d;
    s.scale = whole ? 1.0f : 1.3f / sqrtf((float)d);
    s.accumulate = random_to(2);
    int64_t n = s.tokens * s.row;
    s.qkv = random_array(random_dtype(), 3 * n, 2);
    s.dy = random_array(random_dtype(), n, 1);
    s.y = array_new(random_dtype(), n);
    s.dqkv = random_array(random_dtype(), 3 * n, 1);
    for (int64_t i = 0; whole && i < s.tokens; i++)
        for (int64_t j = 0; j < 2 * s.row; j++) array_set(s.qkv, i * 3 * s.row + j, 16 * (random_to(17) - 8));
    s.old = array_new(s.dqkv.dtype, 3 * n);
    memcpy(s.old.data, s.dqkv.data, (size_t)(3 * n) * mixp_dtype_size(s.dqkv.dtype));
    s.lse = (float *)array_new(MIXP_F32, s.tokens * heads).data;
    s.tossed = (unsigned char *)calloc((size_t)(s.tokens * heads), 1);
    s.p = doubles(s.t * s.t);
    s.want_y = doubles(n);
    s.want_lse = doubles(s.tokens * heads);
    s.grad = doubles(3 * n);
    s.size = doubles(3 * n);
    for (int64_t i = 0; i < b * heads; i++) {
        size = reference_head(&s, i / heads, i % heads);
        largest = size > largest ? size : largest;
    }
    s.error = ldexp(4 * (2 * d + 8) * (whole ? 1 : largest) + 4 * t + 64, -24);
    return s;
}

static void problem_free(problem *s) {
    array_free(s->qkv);
    array_free(s->y);
    array_free(s->dy);
    array_free(s->dqkv);
    array_free(s->old);
    free((char *)s->lse - ARRAY_GUARD);
    free(s->tossed);
    free(s->p);
    free(s->want_y);
    free(s->want_lse);
    free(s->grad);
    free(s->size);
}

static void forward(const mixp_device *dev, problem *s, int threads) {
    runner    r;
    mixp_exec x = runner_exec(&r, threads);
    mixp_attention_args k = args_attention(s->b, s->t, s->heads, s->d, s->qkv, s->y, s->lse);
    k.causal = s->causal;
    k.scale = s->scale;
    CHECK_INT(dev->kernels->attention(&x, &k), MIXP_OK);
    CHECK(runner_end(&r));
}

static void backward(const mixp_device *dev, problem *s, int threads) {
    runner    r;
    mixp_exec x = runner_exec(&r, threads);
    mixp_attention_args forward = args_attention(s->b, s->t, s->heads, s->d, s->qkv, s->y, s->lse);
    int64_t   n = 3 * s->tokens * s->row, i;
    forward.causal = s->causal;
    forward.scale = s->scale;
    mixp_attention_backward_args k = args_attention_backward(&forward, s->dy, s->dqkv, s->accumulate);
    memcpy(s->dqkv.data, s->old.data, (size_t)n * mixp_dtype_size(s->old.dtype));
    for (i = 0; !s->accumulate && i < n; i++) array_set(s->dqkv, i, NAN);
    CHECK_INT(dev->kernels->attention_backward(&x, &k), MIXP_OK);
    CHECK(runner_end(&r));
}

/* halves: how many halves of a unit in the last place storing may be off. */
static void close_to(const problem *s, const char *who, test_array got, int64_t i, double want,
                     double size, int halves) {
    double bound = s->error * size + halves * half_ulp(got.dtype, want), v = array_get(got, i);
    if (fabs(v - want) <= bound) return;
    test_bad++;
    TEST_SHOW("%s b%lld t%lld h%lld d%lld causal%d: [%lld] %.9g not %.9g +- %.2g", who, (long long)s->b,
              (long long)s->t, (long long)s->heads, (long long)s->d, s->causal, (long long)i, v, want,
              bound);
}

static void check_forward(const problem *s, const char *who) {
    test_array lse;
    int64_t    i, n = s->tokens * s->row;
    lse.dtype = MIXP_F32;
    lse.data = s->lse;
    for (i = 0; i < n; i++) {
        const int64_t token = i / s->row, h = i % s->row / s->d;
        const int64_t row = (token / s->t * s->heads + h) * s->t + token % s->t;
        close_to(s, who, s->y, i, s->want_y[i], 2, s->tossed[row] && s->y.dtype != MIXP_F32 ? 2 : 1);
    }
    for (i = 0; i < s->tokens * s->heads; i++)
        close_to(s, who, lse, i, s->want_lse[i], 1 + fabs(s->want_lse[i]), 1);
    CHECK(array_guarded(s->y, n) && array_guarded(lse, s->tokens * s->heads));
}

static void check_backward(const problem *s, const char *who) {
    int64_t i, n = 3 * s->tokens * s->row;
    for (i = 0; i < n; i++) {
        double old = s->accumulate ? array_get(s->old, i) : 0;
        close_to(s, who, s->dqkv, i, s->grad[i] + old, s->size[i] + fabs(old), 1);
    }
    CHECK(array_guarded(s->dqkv, n));
}

static double largest_lse(const problem *s) {
    double  most = 0;
    for (int64_t i = 0; i < s->tokens * s->heads; i++)
        most = fabs(s->want_lse[i]) > most ? fabs(s->want_lse[i]) : most;
    return most;
}

/* One problem on every instruction set, both passes, then with other threads: same bits. */
static void try_everywhere(int b, int t, int heads, int d, int causal, int whole) {
    static const int threads[4] = { 1, 2, 5, 16 };
    problem s = problem_new(b, t, heads, d, causal, whole);
    int64_t n = s.tokens * s.row, j;
    size_t  y_bytes = (size_t)n * mixp_dtype_size(s.y.dtype);
    size_t  g_bytes = (size_t)(3 * n) * mixp_dtype_size(s.dqkv.dtype);
    char   *y = (char *)malloc(y_bytes + 1), *g = (char *)malloc(g_bytes + 1);
    for (int isa = 0; isa < MIXP_ISA_COUNT; isa++) {
        const mixp_device *dev = mixp_cpu_with((mixp_isa)isa);
        const double usual = s.error;
        if (!dev) continue;
        if (isa == MIXP_ISA_AMX || isa == MIXP_ISA_AMX_F16) s.error += ldexp(1, -16);
        forward(dev, &s, 0);
        check_forward(&s, isa_names[isa]);
        memset(s.grad, 0, (size_t)(3 * n) * sizeof(double));
        memset(s.size, 0, (size_t)(3 * n) * sizeof(double));
        for (j = 0; j < b * heads; j++) {
            (void)reference_head(&s, j / heads, j % heads);
            reference_head_grads(&s, j / heads, j % heads);
        }
        backward(dev, &s, 0);
        s.error += ldexp(2 * largest_lse(&s), -24);
        check_backward(&s, isa_names[isa]);
        s.error = usual;
        memcpy(y, s.y.data, y_bytes);
        memcpy(g, s.dqkv.data, g_bytes);
        for (int i = 0; i < 4; i++) {
            forward(dev, &s, threads[i]);
            backward(dev, &s, threads[i]);
            CHECK(memcmp(y, s.y.data, y_bytes) == 0 && memcmp(g, s.dqkv.data, g_bytes) == 0);
        }
    }
    free(y);
    free(g);
    problem_free(&s);
}

static void any_size_and_mix(void) {
    for (int i = 0; i < 60; i++)
        try_everywhere(1 + random_to(2), 1 + random_to(40), 1 + random_to(3), 1 + random_to(40), i % 2, 0);
}

static void around_block_edges(void) {
    static const int t[9] = { 1, 15, 16, 17, 33, 63, 64, 65, 130 }, d[4] = { 1, 16, 17, 64 };
    for (int i = 0; i < 9; i++)
        for (int j = 0; j < 4; j++) try_everywhere(1, t[i], 1, d[j], (i + j) % 2, 0);
}

static void longer(void) {
    try_everywhere(1, 200, 2, 32, 1, 0);
    try_everywhere(1, 171, 1, 70, 0, 0);
    try_everywhere(2, 64, 4, 32, 1, 0);
}

/* Scores up to 128 * 128 * d: exp of them would overflow without the maximum taken off. */
/* Keys 0 and 1 have one score, the others one that is 12 lower or more; the values of 0 and 1 are about -3, the others
 * about 0: y is often half way between two numbers, plus a remainder of one sign. Rounding the right y to nearest is biased
 * there by a quarter of a unit (arXiv 2510.04212), the kernel's y is not, and in f32 it has no bias to round. */
static void repeated_tops_of(mixp_dtype dtype, mixp_dtype out) {
    enum { T = 16, HEADS = 4, D = 16, B = 16 };
    problem s = problem_new(B, T, HEADS, D, 0, 0);
    const mixp_dtype unit = out == MIXP_F32 ? MIXP_BF16 : out;
    const int64_t n = s.tokens * s.row;
    array_free(s.qkv);
    array_free(s.y);
    s.qkv = array_new(dtype, 3 * n);
    s.y = array_new(out, n);
    s.scale = 1.0f / sqrtf((float)D);
    for (int64_t i = 0; i < s.tokens; i++)
        for (int64_t h = 0; h < HEADS; h++)
            for (int64_t c = 0; c < D; c++) {
                const int64_t t = i % T;
                const double v = (t < 2 ? -3.0 : 0.0) + 0.5 * random_value();
                array_set(s.qkv, at(&s, i / T, t, 0, h, c), c ? 0.0 : 4.0 + 0.25 * (double)(t % 4));
                array_set(s.qkv, at(&s, i / T, t, 1, h, c), c ? 0.0 : t < 2 ? 8.0 : -4.0 - 0.125 * (double)(t % 8));
                array_set(s.qkv, at(&s, i / T, t, 2, h, c), mixp_decode(unit, mixp_encode(unit, v, 0)));
            }
    for (int64_t i = 0; i < B * HEADS; i++) (void)reference_head(&s, i / HEADS, i % HEADS);
    for (int64_t isa = 0; isa < MIXP_ISA_COUNT; isa++) {
        const mixp_device *dev = mixp_cpu_with((mixp_isa)isa);
        double nearest = 0, got = 0, size = 0;
        if (!dev) continue;
        forward(dev, &s, 0);
        for (int64_t i = 0; i < n; i++) {
            const double want = s.want_y[i], spacing = 2 * half_ulp(unit, want);
            nearest += (mixp_decode(unit, mixp_encode(unit, want, 0)) - want) / spacing / (double)n;
            got += (array_get(s.y, i) - want) / spacing / (double)n;
            size += fabs(array_get(s.y, i) - want) / spacing / (double)n;
        }
        CHECK(fabs(nearest) > 0.15);
        CHECK(fabs(got) < (out == MIXP_F32 ? 0.001 : 0.03));
        CHECK(size < (out == MIXP_F32 ? 0.01 : 0.6));
    }
    problem_free(&s);
}
static void repeated_tops(void) {
    repeated_tops_of(MIXP_BF16, MIXP_BF16);
    repeated_tops_of(MIXP_F16, MIXP_F16);
    repeated_tops_of(MIXP_F32, MIXP_BF16);
    repeated_tops_of(MIXP_BF16, MIXP_F32);
}

static void large_scores(void) {
    for (int i = 0; i < 20; i++) try_everywhere(1, 1 + random_to(150), 1, 1 + random_to(16), i % 2, 1);
}

/* The reference's own gradient, against central differences of its forward pass. */
static void reference_gradient_is_a_gradient(void) {
    problem s = problem_new(1, 7, 2, 3, 1, 0);
    int64_t n = s.tokens * s.row, i, j;
    test_array old = s.qkv;
    array_free(s.y);
    s.y = array_new(MIXP_F32, n);
    s.qkv = random_array(MIXP_F32, 3 * n, 1);
    for (j = 0; j < 2; j++) (void)reference_head(&s, 0, j);
    for (i = 0; i < n; i++) array_set(s.y, i, s.want_y[i]);
    for (j = 0; j < 2; j++) {
        (void)reference_head(&s, 0, j);
        reference_head_grads(&s, 0, j);
    }
    for (i = 0; i < 3 * n; i++) {
        double v = array_get(s.qkv, i), sum = 0, moved[2] = { 0, 0 };
        for (int side = 0; side < 2; side++) {
            array_set(s.qkv, i, side ? v + 0.0078125 : v - 0.0078125);
            for (j = 0; j < 2; j++) (void)reference_head(&s, 0, j);
            for (j = 0; j < n; j++)
                sum += (side ? 1 : -1) * s.want_y[j] * array_get(s.dy, j);
            moved[side] = array_get(s.qkv, i);
        }
        array_set(s.qkv, i, v);
        CHECK_NEAR(sum / (moved[1] - moved[0]), s.grad[i], 1e-4);
    }
    array_free(old);
    problem_free(&s);
}

/* NaN and Inf reach the rows that see them and no block of queries before; nothing crashes. */
static void non_finite_inputs(void) {
    static const float bad[3] = { NAN, INFINITY, -INFINITY };
    for (int isa = 0; isa < MIXP_ISA_COUNT; isa++)
        for (int v = 0; v < 3 && mixp_cpu_with((mixp_isa)isa); v++)
            for (int which = 0; which < 3; which++) {
                problem s = problem_new(1, 150, 1, 8, 1, 0);
                const mixp_device *dev = mixp_cpu_with((mixp_isa)isa);
                array_set(s.qkv, at(&s, 0, 100, which, 0, 3), (double)bad[v]);
                forward(dev, &s, 2);
                backward(dev, &s, 2);
                for (int64_t i = 0; i < 96; i++)
                    for (int64_t c = 0; c < 8; c++) CHECK(fabs(array_get(s.y, i * 8 + c)) <= 2);
                if (which == 0 || v == 0)
                    CHECK(!(fabs(array_get(s.y, 100 * 8 + 3)) <= 1e4));
                problem_free(&s);
            }
}

static void nothing_to_do(void) {
    for (int isa = 0; isa < MIXP_ISA_COUNT; isa++) {
        const mixp_device *dev = mixp_cpu_with((mixp_isa)isa);
        problem s = problem_new(1, 3, 1, 2, 1, 0);
        if (dev) {
            s.b = 0;
            forward(dev, &s, 2);
            s.b = 1;
            s.t = 0;
            forward(dev, &s, 2);
            CHECK(array_untouched(s.y, 0));
        }
        problem_free(&s);
    }
}

int main(void) {
    RUN(reference_gradient_is_a_gradient);
    RUN(any_size_and_mix);
    RUN(around_block_edges);
    RUN_LATER(longer);
    RUN(large_scores);
    RUN(repeated_tops);
    RUN(non_finite_inputs);
    RUN(nothing_to_do);
    return test_report();
}
