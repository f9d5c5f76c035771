/* products.h - random matrix products for a table's gemm, and plain double loops to compare with.
 * Include it after mixprec.h, test.h and arrays.h.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * The bound: an element is a chain of k multiply-adds in f32 (two roundings each at worst), then
 * alpha, bias and the old c. This makes at most 2k + 8 roundings of partial results, which never
 * exceed S = |alpha| sum |a||b| + |bias| + |c|. So |error| <= (2k + 8) 2^-24 S, plus half a unit in
 * the last place for the one rounding to c's format.
 */
#ifndef PRODUCTS_H
#define PRODUCTS_H

/* A random product with padding and a gap between matrices; freed by problem_free. */
typedef struct problem {
    mixp_gemm_args g;
    test_array a, b, c, bias;   /* what g points to                                        */
    test_array old;             /* c before                                                */
    int64_t    a_size, b_size, c_size;
} problem;

NUMBERS_MAYBE test_array matrix(mixp_dtype dtype, int64_t batch, int64_t stride, int64_t rows,
                         int64_t cols, int64_t ld, int whole, int64_t *size) {
    test_array a;
    int64_t    z, i, j;
    *size = rows && cols ? (batch - 1) * stride + (rows - 1) * ld + cols : 0;
    a = array_new(dtype, *size);
    for (z = 0; z < batch; z++)
        for (i = 0; i < rows; i++)
            for (j = 0; j < cols; j++)
                array_set(a, z * stride + i * ld + j, whole ? random_to(17) - 8 : random_value());
    return a;
}

/* whole: small whole numbers, whose sums f32 holds exactly. */
NUMBERS_MAYBE problem problem_new(int m, int n, int k, int batch, int whole) {
    static const float alphas[4] = { 1.0f, 1.0f, -0.37f, 2.5f };
    problem p;
    mixp_gemm_args *g = &p.g;
    int64_t ar, ac, br, bc, unused;
    memset(&p, 0, sizeof p);
    g->m = m; g->n = n; g->k = k; g->batch = batch;
    g->trans_a = random_to(2); g->trans_b = random_to(2); g->c.accumulate = random_to(2);
    g->alpha = whole ? 1.0f : alphas[random_to(4)];
    ar = g->trans_a ? k : m; ac = g->trans_a ? m : k;
    br = g->trans_b ? n : k; bc = g->trans_b ? k : n;
    g->lda = ac + (random_to(3) ? 0 : random_to(20));
    g->ldb = bc + (random_to(3) ? 0 : random_to(20));
    g->ldc = n + (random_to(3) ? 0 : random_to(20));
    if (!random_to(6)) g->lda = (ac + 1023) / 1024 * 1024;    /* the stride that caches hate */
    g->stride_a = random_to(4) ? ar * g->lda + random_to(9) : 0;
    g->stride_b = random_to(4) ? br * g->ldb + random_to(9) : 0;
    g->stride_c = m * g->ldc + random_to(9);
    p.a = matrix(random_dtype(), batch, g->stride_a, ar, ac, g->lda, whole, &p.a_size);
    p.b = matrix(random_dtype(), batch, g->stride_b, br, bc, g->ldb, whole, &p.b_size);
    p.c = matrix(random_dtype(), batch, g->stride_c, m, n, g->ldc, whole, &p.c_size);
    p.bias.dtype = random_dtype();
    if (random_to(2)) p.bias = matrix(random_dtype(), 1, 0, 1, n, n, whole, &unused);
    p.old = array_new(p.c.dtype, p.c_size);
    memcpy(p.old.data, p.c.data, (size_t)p.c_size * mixp_dtype_size(p.c.dtype));
    g->a = args_in(p.a);
    g->b = args_in(p.b);
    g->bias = args_in(p.bias);
    g->c = args_out(p.c, g->c.accumulate);
    return p;
}

NUMBERS_MAYBE void problem_free(problem *p) {
    array_free(p->a);
    array_free(p->b);
    array_free(p->c);
    array_free(p->old);
    if (p->bias.data) array_free(p->bias);
}

/* a and b become of this dtype, of the same shape. */
NUMBERS_MAYBE void problem_to(problem *p, mixp_dtype dtype) {
    array_free(p->a);
    array_free(p->b);
    p->a = array_new(dtype, p->a_size);
    p->b = array_new(dtype, p->b_size);
    for (int64_t i = 0; i < p->a_size; i++) array_set(p->a, i, random_value());
    for (int64_t i = 0; i < p->b_size; i++) array_set(p->b, i, random_value());
    p->g.a = args_in(p->a);
    p->g.b = args_in(p->b);
}

/* Before each run c is what it was; without accumulate NaN, which must not show. */
NUMBERS_MAYBE void problem_reset(problem *p) {
    memcpy(p->c.data, p->old.data, (size_t)p->c_size * mixp_dtype_size(p->old.dtype));
    if (p->g.c.accumulate) return;
    for (int64_t z = 0; z < p->g.batch; z++)
        for (int64_t i = 0; i < p->g.m; i++)
            for (int64_t j = 0; j < p->g.n; j++) array_set(p->c, z * p->g.stride_c + i * p->g.ldc + j, NAN);
}

NUMBERS_MAYBE double exact(const problem *p, int64_t z, int64_t i, int64_t j, double *size) {
    const mixp_gemm_args *g = &p->g;
    double  sum = 0, big = 0, bias = p->bias.data ? array_get(p->bias, j) : 0;
    double  c = g->c.accumulate ? array_get(p->old, z * g->stride_c + i * g->ldc + j) : 0;
    for (int64_t q = 0; q < g->k; q++) {
        double a = array_get(p->a, z * g->stride_a + (g->trans_a ? q * g->lda + i : i * g->lda + q));
        double b = array_get(p->b, z * g->stride_b + (g->trans_b ? j * g->ldb + q : q * g->ldb + j));
        sum += a * b;
        big += fabs(a * b);
    }
    *size = fabs((double)g->alpha) * big + fabs(bias) + fabs(c);
    return (double)g->alpha * sum + bias + c;
}

/* Compares all of c with the double loop; whole: it must be exact but for c's rounding. */
NUMBERS_MAYBE void problem_check(const problem *p, int whole, const char *who) {
    const mixp_gemm_args *g = &p->g;
    int64_t z, i, j, at = 0, touched = 0;
    int     bad = 0;
    for (z = 0; z < g->batch; z++)
        for (i = 0; i < g->m; i++)
            for (j = 0; j < g->n; j++) {
                double size, want = exact(p, z, i, j, &size), bound, got;
                double unit = half_ulp(g->c.dtype, want);
                at = z * g->stride_c + i * g->ldc + j;
                got = array_get(p->c, at);
                bound = whole ? unit : (2.0 * (double)g->k + 8) * ldexp(size, -24) + unit;
                touched += !array_untouched(p->c, at);
                if (!(fabs(got - want) <= bound) && !bad++)
                    TEST_SHOW("%s %lldx%lldx%lld %d%d a%d b%d c%d +%d: [%lld,%lld,%lld] %.9g not %.9g +- %.2g",
                              who, (long long)g->m, (long long)g->n, (long long)g->k, g->trans_a,
                              g->trans_b, g->a.dtype, g->b.dtype, g->c.dtype, g->c.accumulate,
                              (long long)z, (long long)i, (long long)j, got, want, bound);
            }
    test_bad += bad;
    for (i = 0; i < p->c_size; i++) touched -= !array_untouched(p->c, i);
    CHECK_INT(touched, 0);                  /* padding is as it was */
    CHECK(array_guarded(p->c, p->c_size));
}

NUMBERS_MAYBE void run(const mixp_device *d, problem *p, int threads) {
    runner    r;
    mixp_exec x = runner_exec(&r, threads);
    problem_reset(p);
    CHECK_INT(d->kernels->gemm(&x, &p->g), MIXP_OK);
    CHECK(runner_end(&r));
}

#endif
