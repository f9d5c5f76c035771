/* picking_cases.h - random tensors, comparisons, prod, cumsum, one_hot, scatter_add, index_add, topk,
 * sort, nll, triplet_margin, unequal parts and casts of integers, through the tape, on the device of
 * `case_context`: beside double-precision loops, or the definition. Included by operator_cases.h.
 * SPDX-License-Identifier: MIT OR Unlicense
 */

static const float case_inf = 1e30f * 1e30f;
static float case_nan(void) { return mixp_f32_of_bits(0x7FC00000u); }

static mixp_tensor *case_ids(int rank, const int64_t *shape, const int32_t *ids)
{ return mixp_input(case_c, MIXP_I32, rank, shape, ids); }

static void case_has(const mixp_tensor *t, mixp_dtype dtype, int64_t count) {
    CHECK(t && t->dtype == dtype && t->count == count);
}

/* --- random tensors ------------------------------------------------------------------------------ */

enum { DRAWN = 20000 };
static const int64_t drawn_shape[2] = { 100, 200 };
static double drawn[3][DRAWN];

static mixp_tensor *draw(int kind, mixp_dtype dtype) {
    if (kind == 0) return mixp_uniform(case_c, dtype, 2, drawn_shape, 0.0f, 1.0f);
    if (kind == 1) return mixp_normal(case_c, dtype, 2, drawn_shape, 0.0f, 1.0f);
    return mixp_bernoulli(case_c, dtype, 2, drawn_shape, 0.3f);
}

static int drawn_order(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* The largest difference between the numbers' distribution and the one that is wanted (Kolmogorov):
 * 1.63 / sqrt(n) is passed by 99 of 100 samples. Low dtypes repeat numbers: `grain` of them. */
static double drawn_off(int kind, double *x, double grain) {
    double worst = 0.0;
    qsort(x, DRAWN, sizeof *x, drawn_order);
    for (int i = 0; i < DRAWN; i++) {
        double want = kind ? 0.5 * (1.0 + erf(x[i] / sqrt(2.0))) : x[i];
        double low = want - (double)(i + 1) / DRAWN, high = (double)i / DRAWN - want;
        worst = fmax(worst, fmax(low, high));
    }
    return (worst - grain) * sqrt((double)DRAWN);
}

static void test_random_distributions(void) {
    static const double grain[3] = { 0.0, 1.0 / 2048, 1.0 / 256 };
    int d, i, ones = 0;
    case_c = case_context();
    for (d = 0; d < 3; d++) {
        mixp_step_begin(case_c);
        case_has(draw(0, case_reals[d]), case_reals[d], DRAWN);
        CHECK_INT(mixp_read(draw(0, case_reals[d]), drawn[0], MIXP_F64, DRAWN), MIXP_OK);
        CHECK_INT(mixp_read(draw(1, case_reals[d]), drawn[1], MIXP_F64, DRAWN), MIXP_OK);
        CHECK_INT(mixp_read(draw(2, case_reals[d]), drawn[2], MIXP_F64, DRAWN), MIXP_OK);
        for (i = 0; i < DRAWN; i++) CHECK(drawn[0][i] >= 0.0 && drawn[0][i] < 1.0);
        for (i = 0; i < DRAWN; i++) CHECK(drawn[2][i] == 0.0 || drawn[2][i] == 1.0);
        for (i = 0; i < DRAWN; i++) ones += drawn[2][i] == 1.0;
        CHECK(drawn_off(0, drawn[0], grain[d]) < 1.63);
        CHECK(drawn_off(1, drawn[1], grain[d]) < 1.63);
    }
    CHECK_NEAR(ones / (3.0 * DRAWN), 0.3, 4.0 * sqrt(0.3 * 0.7 / (3.0 * DRAWN)));
    mixp_context_free(case_c);
}

/* Each call, step and seed draws its own numbers; the same seed and step draw the same. */
static void test_random_keys(void) {
    static float seen[6][DRAWN];
    for (int run = 0; run < 2; run++) {
        case_c = case_context();
        for (int i = 0; i < 2; i++) {
            mixp_step_begin(case_c);
            CHECK_INT(mixp_read(draw(1, MIXP_F32), run ? seen[4] : seen[2 * i], MIXP_F32, DRAWN), MIXP_OK);
            CHECK_INT(mixp_read(draw(1, MIXP_F32), run ? seen[5] : seen[2 * i + 1], MIXP_F32, DRAWN), MIXP_OK);
            if (run) CHECK(memcmp(seen[4], seen[2 * i], sizeof seen[4]) == 0);
            if (run) CHECK(memcmp(seen[5], seen[2 * i + 1], sizeof seen[5]) == 0);
        }
        mixp_context_free(case_c);
    }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < i; j++) CHECK(memcmp(seen[i], seen[j], sizeof seen[i]) != 0);
}

/* Mean and standard deviation, bounds, extremes of p, and a mask for masked_fill. */
static void test_random_parameters(void) {
    const int64_t four[1] = { 4 };
    double sum = 0.0, squares = 0.0;
    int i;
    case_c = case_context();
    mixp_step_begin(case_c);
    CHECK_INT(mixp_read(mixp_normal(case_c, MIXP_F32, 2, drawn_shape, -3.0f, 0.5f), drawn[0], MIXP_F64, DRAWN), MIXP_OK);
    for (i = 0; i < DRAWN; i++) {
        sum += drawn[0][i];
        squares += (drawn[0][i] + 3.0) * (drawn[0][i] + 3.0);
    }
    CHECK_NEAR(sum / DRAWN, -3.0, 4.0 * 0.5 / sqrt((double)DRAWN));
    CHECK_NEAR(squares / DRAWN, 0.25, 0.25 * 4.0 * sqrt(2.0 / DRAWN));
    CHECK_INT(mixp_read(mixp_uniform(case_c, MIXP_F32, 2, drawn_shape, -2.0f, 6.0f), drawn[0], MIXP_F64, DRAWN), MIXP_OK);
    for (i = 0, sum = 0.0; i < DRAWN; i++) {
        CHECK(drawn[0][i] >= -2.0 && drawn[0][i] <= 6.0);
        sum += drawn[0][i];
    }
    CHECK_NEAR(sum / DRAWN, 2.0, 4.0 * 8.0 / sqrt(12.0 * DRAWN));
    const double *got = case_read(mixp_bernoulli(case_c, MIXP_F16, 1, four, 0.0f), 4);
    for (i = 0; i < 4; i++) CHECK_NEAR(got[i], 0.0, 0.0);
    got = case_read(mixp_bernoulli(case_c, MIXP_U8, 1, four, 1.0f), 4);
    for (i = 0; i < 4; i++) CHECK_NEAR(got[i], 1.0, 0.0);
    got = case_read(mixp_normal(case_c, MIXP_F32, 0, four, 7.0f, 0.0f), 1);
    CHECK_NEAR(got[0], 7.0, 0.0);
    mixp_tensor *mask = mixp_bernoulli(case_c, MIXP_U8, 2, drawn_shape, 0.25f);
    case_has(mask, MIXP_U8, DRAWN);
    mask = mixp_masked_fill(case_c, mixp_full(case_c, MIXP_F32, 2, drawn_shape, 0.0), mask, 1.0f);
    CHECK_NEAR(mixp_item(mixp_mean(case_c, mask, MIXP_ALL, 0)), 0.25, 4.0 * sqrt(0.1875 / DRAWN));
    got = case_read(mixp_full(case_c, MIXP_I32, 1, four, -2000000001.0), 4);
    for (i = 0; i < 4; i++) CHECK_NEAR(got[i], -2000000001.0, 0.0);
    CHECK_INT(mixp_context_error(case_c, NULL), MIXP_OK);
    mixp_context_free(case_c);
}

static void test_random_refused(void) {
    const int64_t four[1] = { 4 }, below[1] = { -1 };
    case_c = case_context();
    mixp_step_begin(case_c);
    case_refused(mixp_uniform(case_c, MIXP_F32, 1, four, 2.0f, 1.0f), MIXP_ERR_ARGUMENT, "mixp_uniform: low is 2");
    case_refused(mixp_uniform(case_c, MIXP_F32, 1, four, -3e38f, 3e38f), MIXP_ERR_ARGUMENT, "mixp_uniform");
    case_refused(mixp_normal(case_c, MIXP_F32, 1, four, 0.0f, -1.0f), MIXP_ERR_ARGUMENT, "std is -1");
    case_refused(mixp_normal(case_c, MIXP_F32, 1, four, case_nan(), 1.0f), MIXP_ERR_ARGUMENT, "mixp_normal");
    case_refused(mixp_normal(case_c, MIXP_I32, 1, four, 0.0f, 1.0f), MIXP_ERR_DTYPE, "mixp_normal: the dtype is i32");
    case_refused(mixp_bernoulli(case_c, MIXP_F32, 1, four, 1.5f), MIXP_ERR_ARGUMENT, "p is 1.5");
    case_refused(mixp_bernoulli(case_c, MIXP_F32, 1, four, case_nan()), MIXP_ERR_ARGUMENT, "mixp_bernoulli");
    case_refused(mixp_bernoulli(case_c, MIXP_F32, 1, below, 0.5f), MIXP_ERR_SHAPE, "mixp_bernoulli");
    case_refused(mixp_full(case_c, MIXP_F32, 1, NULL, 0.5), MIXP_ERR_SHAPE, "mixp_full");
    mixp_context_free(case_c);
}

/* --- comparisons ---------------------------------------------------------------------------------- */

static mixp_tensor *compare(int how, mixp_tensor *a, mixp_tensor *b) {
    switch (how) {
    case 0: return mixp_eq(case_c, a, b);
    case 1: return mixp_ne(case_c, a, b);
    case 2: return mixp_gt(case_c, a, b);
    case 3: return mixp_ge(case_c, a, b);
    case 4: return mixp_lt(case_c, a, b);
    default: return mixp_le(case_c, a, b);
    }
}
static int compared(int how, double a, double b) {
    return how == 0 ? a == b : how == 1 ? a != b : how == 2 ? a > b : how == 3 ? a >= b : how == 4 ? a < b : a <= b;
}

/* a[7, 1] and b[7] or b[1]: every pair. */
static void compare_one(int how, mixp_tensor *a, mixp_tensor *b) {
    double x[7], y[7];
    int64_t i, n = b->count;
    CHECK_INT(mixp_read(a, x, MIXP_F64, 7), MIXP_OK);
    CHECK_INT(mixp_read(b, y, MIXP_F64, n), MIXP_OK);
    mixp_tensor *mask = compare(how, a, b);
    case_has(mask, MIXP_U8, 7 * n);
    const double *got = case_read(mask, 7 * n);
    for (i = 0; i < 7 * n; i++) case_near("compare", got[i], compared(how, x[i / n], y[i % n]), 0.0);
}

static void test_comparisons(void) {
    const int64_t column[2] = { 7, 1 }, row[1] = { 7 }, one[1] = { 1 };
    const float x[7] = { 0.0f, -0.0f, 1.5f, -2.0f, case_inf, -case_inf, case_nan() };
    const int32_t whole[7] = { 0, 16777216, 16777217, -16777217, 2147483647, -2147483647 - 1, 1 };
    const uint8_t bytes[7] = { 0, 1, 2, 255, 7, 0, 1 };
    mixp_tensor *a[5], *b[5];
    case_c = case_context();
    mixp_step_begin(case_c);
    for (int i = 0; i < 3; i++) {
        a[i] = case_param(case_reals[i], 2, column, x);
        b[i] = case_param(case_reals[i], 1, row, x);
    }
    a[3] = mixp_input(case_c, MIXP_I32, 2, column, whole);
    b[3] = mixp_input(case_c, MIXP_I32, 1, row, whole);
    a[4] = mixp_input(case_c, MIXP_U8, 2, column, bytes);
    b[4] = mixp_input(case_c, MIXP_U8, 1, row, bytes);
    for (int how = 0; how < 6; how++)
        for (int i = 0; i < 5; i++)
            for (int j = 0; j < 5; j++) compare_one(how, a[i], b[j]);
    for (int how = 0; how < 6; how++) compare_one(how, a[0], mixp_full(case_c, MIXP_F32, 1, one, 1.5));
    CHECK_INT(mixp_context_error(case_c, NULL), MIXP_OK);
    mixp_context_free(case_c);
}

/* Broadcast over three dimensions, long enough for threads; the mask chooses, and a gradient flows
 * through what it chooses. */
static void test_comparisons_choose(void) {
    const int64_t big[3] = { 9, 1, 400 }, middle[2] = { 30, 1 }, two[2] = { 2, 3 };
    static double got[9 * 30 * 400];
    static float x[9 * 400];
    float y[30];
    const float z[6] = { -1.0f, 2.0f, -3.0f, 4.0f, 0.0f, 6.0f };
    mixp_tensor *t;
    for (int i = 0; i < 9 * 400; i++) x[i] = case_number(i);
    for (int i = 0; i < 30; i++) y[i] = case_number(7 * i);
    case_c = case_context();
    mixp_step_begin(case_c);
    t = mixp_lt(case_c, mixp_input(case_c, MIXP_F32, 3, big, x), mixp_input(case_c, MIXP_F32, 2, middle, y));
    case_has(t, MIXP_U8, 9 * 30 * 400);
    CHECK_INT(mixp_read(t, got, MIXP_F64, 9 * 30 * 400), MIXP_OK);
    for (int i = 0; i < 9; i++)
        for (int j = 0; j < 30; j++)
            for (int k = 0; k < 400; k++) CHECK((got[(i * 30 + j) * 400 + k] == 1.0) == (x[i * 400 + k] < y[j]));
    t = case_param(MIXP_F32, 2, two, z);
    mixp_step_begin(case_c);
    case_walk(mixp_where(case_c, mixp_gt(case_c, t, mixp_full(case_c, MIXP_F32, 0, NULL, 0.0)), t,
                         mixp_scale(case_c, t, 0.5f)));
    const double *g = case_read(t->grad, 6);
    for (int i = 0; i < 6; i++) CHECK_NEAR(g[i], case_dy(i) * (z[i] > 0.0f ? 1.0 : 0.5), 0.0);
    mixp_context_free(case_c);
}

/* --- prod, cumsum --------------------------------------------------------------------------------- */

/* Element `at` of the result, and dy times its slopes added to `slope`. x[outer, n, inner]. */
static void scan_column(int cumulative, const float *x, double *want, double *slope, int64_t n, int64_t step,
                        const double *dy) {
    int64_t i, j;
    double all = 1.0, sum = 0.0;
    for (i = 0; i < n; i++) {
        double others = 1.0, behind = 0.0;
        all *= (double)x[i * step];
        sum += (double)x[i * step];
        for (j = 0; j < n; j++) if (j != i) others *= (double)x[j * step];
        for (j = i; j < n; j++) behind += cumulative ? dy[j * step] : 0.0;
        if (cumulative) want[i * step] = sum;
        slope[i * step] = cumulative ? behind : others * dy[0];
    }
    if (!cumulative) want[0] = all;
}

static void scan_one(int cumulative, mixp_dtype dtype, const int64_t *shape, int dim, int keep, int zeros) {
    const int64_t all = shape[0] * shape[1] * shape[2];
    const int64_t outer = dim <= 0 ? 1 : dim == 1 ? shape[0] : shape[0] * shape[1];
    const int64_t n = dim == MIXP_ALL ? all : shape[dim], inner = all / outer / n;
    double want[CASE_ROOM], slope[CASE_ROOM], dy[CASE_ROOM];
    float x[CASE_ROOM];
    int64_t o, i, count = cumulative ? all : outer * inner;
    for (i = 0; i < all; i++) {
        x[i] = cumulative ? case_number((int)i) : (float)(4 + (i * 7) % 9) / 8.0f * (i % 3 ? 1.0f : -1.0f);
        if (zeros && i % 11 == 2) x[i] = 0.0f;
        dy[i] = case_dy(i);
    }
    for (o = 0; o < outer; o++)
        for (i = 0; i < inner; i++) {
            int64_t at = o * n * inner + i;
            double first[CASE_ROOM];
            first[0] = 0.0;
            scan_column(cumulative, x + at, cumulative ? want + at : first, slope + at, n, inner,
                        cumulative ? dy + at : dy + o * inner + i);
            if (!cumulative) want[o * inner + i] = first[0];
        }
    mixp_tensor *t = case_param(dtype, 3, shape, x);
    mixp_step_begin(case_c);
    mixp_tensor *y = cumulative ? mixp_cumsum(case_c, t, dim) : mixp_prod(case_c, t, dim, keep);
    case_has(y, dtype, count);
    CHECK(y && y->rank == (cumulative || keep ? 3 : dim == MIXP_ALL ? 0 : 2));
    case_walk(y);
    const double *got = case_read(y, count);
    for (i = 0; i < count; i++) case_near("scan", got[i], want[i], case_slack(dtype, want[i], 1e-5) + cumulative * 1e-5);
    got = case_read(t->grad, all);
    for (i = 0; i < all; i++) case_near("scan's slope", got[i], slope[i], case_slack(dtype, slope[i], 1e-5));
}

static void test_scans(void) {
    static const int64_t shapes[3][3] = { { 4, 3, 5 }, { 1, 17, 2 }, { 2, 1, 8 } };
    static const int dims[4] = { 0, 1, 2, MIXP_ALL };
    case_c = case_context();
    for (int s = 0; s < 3; s++)
        for (int d = 0; d < 3; d++)
            for (int i = 0; i < 4; i++) {
                scan_one(0, case_reals[d], shapes[s], dims[i], d % 2, 0);
                scan_one(0, case_reals[d], shapes[s], dims[i], 1, 1);
                if (i < 3) scan_one(1, case_reals[d], shapes[s], dims[i], 0, d % 2);
            }
    mixp_context_free(case_c);
}

/* One number; Inf and NaN; a gradient that is added to another; the class; refusals. */
static void test_scans_of_few(void) {
    const int64_t one[1] = { 1 }, four[2] = { 3, 4 }, none[1] = { 0 };
    const float x[12] = { 1.0f, case_inf, 2.0f, -case_inf, 3.0f, case_nan(), 0.0f, 1.0f, case_inf, 0.0f, 2.0f, 1.0f };
    const double sums[12] = { 1.0, INFINITY, INFINITY, NAN, 3.0, NAN, NAN, NAN, INFINITY, INFINITY, INFINITY, INFINITY };
    const double products[3] = { -INFINITY, NAN, NAN };
    const float y[4] = { 2.0f, 3.0f, 4.0f, 5.0f };
    case_c = case_context();
    mixp_step_begin(case_c);
    mixp_tensor *t = case_param(MIXP_F32, 2, four, x);
    const double *got = case_read(mixp_cumsum(case_c, t, 1), 12);
    for (int i = 0; i < 12; i++) case_near("cumsum", got[i], sums[i], 0.0);
    got = case_read(mixp_prod(case_c, t, -1, 0), 3);
    for (int i = 0; i < 3; i++) case_near("prod", got[i], products[i], 0.0);
    t = case_param(MIXP_F16, 1, one, y);
    CHECK_NEAR(mixp_item(mixp_prod(case_c, t, 0, 0)), 2.0, 0.0);
    CHECK_NEAR(mixp_item(mixp_cumsum(case_c, t, 0)), 2.0, 0.0);
    mixp_tensor *p = case_param(MIXP_F32, 0, none, y);
    CHECK_NEAR(mixp_item(mixp_prod(case_c, p, MIXP_ALL, 0)), 2.0, 0.0);
    t = case_param(MIXP_F32, 1, four + 1, y);
    mixp_step_begin(case_c);
    p = mixp_add(case_c, mixp_prod(case_c, t, 0, 1), mixp_sum(case_c, mixp_cumsum(case_c, t, 0), 0, 1));
    CHECK_INT(mixp_backward(case_c, mixp_reshape(case_c, p, 0, NULL)), MIXP_OK);
    got = case_read(t->grad, 4);
    for (int i = 0; i < 4; i++) CHECK_NEAR(got[i], 120.0 / (double)y[i] + 4 - i, 1e-5);
    MIXP_AUTOCAST(case_c, MIXP_F16) {
        case_has(mixp_prod(case_c, mixp_cast(case_c, t, MIXP_F16), 0, 0), MIXP_F32, 1);
        case_has(mixp_cumsum(case_c, mixp_cast(case_c, t, MIXP_F16), 0), MIXP_F32, 4);
    }
    case_refused(mixp_prod(case_c, t, 1, 0), MIXP_ERR_SHAPE, "prod: x [4]");
    case_refused(mixp_cumsum(case_c, t, MIXP_ALL), MIXP_ERR_SHAPE, "cumsum: x [4]");
    case_refused(mixp_cumsum(case_c, t, -2), MIXP_ERR_SHAPE, "cumsum: x [4]");
    case_refused(mixp_prod(case_c, case_ids(1, one, (const int32_t *)(const void *)y), 0, 0), MIXP_ERR_DTYPE, "prod");
    mixp_context_free(case_c);
}

/* A long sum: in f32, and with a smaller error than one addition after another. */
static void test_cumsum_of_many(void) {
    enum { MANY = 40000 };
    const int64_t shape[1] = { MANY };
    static float x[MANY];
    static double got[MANY];
    double sum = 0.0, worst = 0.0;
    for (int i = 0; i < MANY; i++) x[i] = (float)(1 + i % 7) / 7.0f;
    case_c = case_context();
    mixp_step_begin(case_c);
    CHECK_INT(mixp_read(mixp_cumsum(case_c, mixp_input(case_c, MIXP_F32, 1, shape, x), 0), got, MIXP_F64, MANY), MIXP_OK);
    for (int i = 0; i < MANY; i++) {
        sum += (double)x[i];
        worst = fmax(worst, fabs(got[i] - sum) / sum);
    }
    CHECK(worst < 5e-7);
    mixp_context_free(case_c);
}

/* --- one_hot, scatter_add, index_add ---------------------------------------------------------------- */

static void test_one_hot(void) {
    static const mixp_dtype dtypes[5] = { MIXP_F32, MIXP_F16, MIXP_BF16, MIXP_U8, MIXP_I32 };
    const int64_t shape[2] = { 2, 3 }, none[1] = { 0 };
    const int32_t ids[6] = { 0, 4, 2, 2, 1, 3 };
    const double *got;
    mixp_tensor *t;
    case_c = case_context();
    mixp_step_begin(case_c);
    for (int d = 0; d < 5; d++) {
        t = mixp_one_hot(case_c, case_ids(2, shape, ids), 5, dtypes[d]);
        case_has(t, dtypes[d], 30);
        CHECK(t && t->rank == 3 && t->shape[2] == 5);
        got = case_read(t, 30);
        for (int i = 0; i < 30; i++) CHECK_NEAR(got[i], ids[i / 5] == i % 5, 0.0);
    }
    got = case_read(mixp_one_hot(case_c, case_ids(0, none, ids), 1, MIXP_F32), 1);
    CHECK_NEAR(got[0], 1.0, 0.0);
    case_refused(mixp_one_hot(case_c, t, 0, MIXP_F32), MIXP_ERR_SHAPE, "one_hot: ids [2, 3, 5]");
    case_refused(mixp_one_hot(case_c, case_ids(2, shape, ids), 5, MIXP_F64), MIXP_ERR_DTYPE, "one_hot: the result's");
    case_refused(mixp_one_hot(case_c, mixp_full(case_c, MIXP_F32, 0, NULL, 1.0), 5, MIXP_F32), MIXP_ERR_DTYPE,
                 "one_hot: input 0");
    mixp_context_free(case_c);
}

/* x[outer, n, inner] and src[outer, m, inner] of these dtypes; with `line`, index_add. */
static void scatter_one(int dim, mixp_dtype x_dtype, mixp_dtype src_dtype, int line, int twice) {
    const int64_t shape[3] = { 3, 4, 5 }, m = 6, outer = dim == 0 ? 1 : dim == 1 ? 3 : 12, inner = 60 / outer / shape[dim];
    int64_t src_shape[3] = { 3, 4, 5 }, i;
    float x[60], src[CASE_ROOM];
    int32_t ids[CASE_ROOM], shown[CASE_ROOM];
    double want[60], size[60];
    const mixp_dtype dtype = x_dtype == src_dtype ? x_dtype : MIXP_F32;
    src_shape[dim] = m;
    for (i = 0; i < 60; i++) want[i] = size[i] = (double)(x[i] = case_number((int)i));
    for (i = 0; i < outer * m * inner; i++) {
        int64_t o = i / (m * inner), j = i / inner % m, at;
        ids[i] = (int32_t)((line ? j * 5 + 2 : i * 5 + i / 7) % shape[dim]);
        if (line) shown[j] = ids[i];
        src[i] = case_number((int)(i + 11));
        at = (o * shape[dim] + ids[i]) * inner + i % inner;
        want[at] += (double)src[i];
        size[at] = fabs(size[at]) + fabs((double)src[i]);
    }
    mixp_tensor *t = case_param(x_dtype, 3, shape, x);
    mixp_tensor *s = case_param(src_dtype, 3, src_shape, src);
    mixp_step_begin(case_c);
    mixp_tensor *y = line ? mixp_index_add(case_c, t, dim - 3, case_ids(1, &m, shown), s)
             : mixp_scatter_add(case_c, t, dim, case_ids(3, src_shape, ids), s);
    case_has(y, dtype, 60);
    if (twice) y = mixp_add(case_c, mixp_add(case_c, y, t), mixp_sum(case_c, s, MIXP_ALL, 0));
    case_walk(y);
    const double *got = case_read(y, 60);
    for (i = 0; i < 60 && !twice; i++) case_near("scatter_add", got[i], want[i], case_slack(dtype, want[i], 1e-6) + 1e-6 * size[i]);
    got = case_read(t->grad, 60);
    for (i = 0; i < 60; i++) CHECK_NEAR(got[i], case_dy(i) * (1 + twice), 0.0);
    got = case_read(s->grad, outer * m * inner);
    for (i = 0; i < outer * m * inner; i++) {
        int64_t at = (i / (m * inner) * shape[dim] + ids[i]) * inner + i % inner;
        CHECK_NEAR(got[i], case_dy(at) + twice * 120.0, twice);
    }
}

static void test_scatter(void) {
    case_c = case_context();
    for (int dim = 0; dim < 3; dim++)
        for (int line = 0; line < 2; line++) {
            for (int d = 0; d < 3; d++) scatter_one(dim, case_reals[d], case_reals[d], line, d == 0);
            scatter_one(dim, MIXP_F16, MIXP_F32, line, 0);
            scatter_one(dim, MIXP_BF16, MIXP_F16, line, 0);
        }
    mixp_context_free(case_c);
}

/* x and src may be one tensor; many small additions to one low element are not lost. */
static void test_scatter_sums(void) {
    enum { MANY = 400 };
    const int64_t one[1] = { 1 }, many[1] = { MANY }, two[1] = { 2 };
    const int32_t swapped[2] = { 1, 0 };
    const float x[2] = { 256.0f, 3.0f };
    float small[MANY];
    int32_t ids[MANY];
    for (int i = 0; i < MANY; i++) {
        small[i] = 0.5f;
        ids[i] = 0;
    }
    case_c = case_context();
    mixp_step_begin(case_c);
    mixp_tensor *t = mixp_scatter_add(case_c, case_param(MIXP_BF16, 1, one, x), 0, case_ids(1, many, ids),
                         case_param(MIXP_BF16, 1, many, small));
    CHECK_NEAR(mixp_item(t), 456.0, 0.0);
    t = case_param(MIXP_F32, 1, two, x);
    mixp_step_begin(case_c);
    case_walk(mixp_scatter_add(case_c, t, 0, case_ids(1, two, swapped), t));
    const double *got = case_read(t->grad, 2);
    for (int i = 0; i < 2; i++) CHECK_NEAR(got[i], case_dy(i) + case_dy(1 - i), 0.0);
    mixp_context_free(case_c);
}

/* index_add names itself, and the row of a bad id among its own ids. */
static void index_add_refused(mixp_tensor *x, mixp_tensor *src) {
    const int64_t three[1] = { 3 };
    const int32_t above[3] = { 0, 1, 2 }, below[3] = { 0, -1, 0 };
    const char *why = "";
    mixp_tensor *y = mixp_index_add(case_c, x, 0, case_ids(1, three, above), src);
    if (y) (void)mixp_item(mixp_sum(case_c, y, MIXP_ALL, 0));   /* a GPU reports at the next wait */
    CHECK_INT(mixp_context_error(case_c, &why), MIXP_ERR_ARGUMENT);
    CHECK_TEXT(why, y ? "2" : "index_add: id 2 at row 2 is outside [0, 2)");
    mixp_context_clear_error(case_c);
    mixp_step_begin(case_c);
    y = mixp_index_add(case_c, x, 0, case_ids(1, three, below), src);
    if (y) (void)mixp_item(mixp_sum(case_c, y, MIXP_ALL, 0));
    CHECK_INT(mixp_context_error(case_c, &why), MIXP_ERR_ARGUMENT);
    CHECK_TEXT(why, y ? "-1" : "index_add: id -1 at row 1 is outside [0, 2)");
    mixp_context_clear_error(case_c);
}

static void test_scatter_refused(void) {
    const int64_t two[2] = { 2, 3 }, three[2] = { 3, 3 }, one[1] = { 3 }, wide[2] = { 2, 4 };
    const float x[9] = { 1, 2, 3, 4, 5, 6, 7, 8, 9 };
    const int32_t ids[9] = { 0, 1, 0, 1, 0, 1, 0, 1, 0 };
    case_c = case_context();
    mixp_tensor *t = case_param(MIXP_F32, 2, two, x);
    mixp_tensor *s = case_param(MIXP_F32, 2, three, x);
    mixp_step_begin(case_c);
    case_refused(mixp_scatter_add(case_c, t, 1, case_ids(2, three, ids), s), MIXP_ERR_SHAPE, "scatter_add: x [2, 3] and src [3, 3]");
    case_refused(mixp_scatter_add(case_c, t, 2, case_ids(2, three, ids), s), MIXP_ERR_SHAPE, "scatter_add");
    case_refused(mixp_scatter_add(case_c, t, 0, case_ids(1, one, ids), s), MIXP_ERR_SHAPE, "same shape");
    case_refused(mixp_scatter_add(case_c, t, 0, t, s), MIXP_ERR_DTYPE, "scatter_add: input 2");
    case_refused(mixp_scatter_add(case_c, t, 0, NULL, s), MIXP_ERR_ARGUMENT, "scatter_add");
    case_refused(mixp_index_add(case_c, t, 0, case_ids(2, three, ids), s), MIXP_ERR_SHAPE, "index_add: x [2, 3] and src [3, 3]");
    case_refused(mixp_index_add(case_c, t, 1, case_ids(1, one, ids), s), MIXP_ERR_SHAPE, "index_add");
    case_refused(mixp_index_add(case_c, t, -3, case_ids(1, one, ids), s), MIXP_ERR_SHAPE, "index_add");
    case_refused(mixp_index_add(case_c, t, 0, s, s), MIXP_ERR_DTYPE, "index_add: input 2");
    case_refused(mixp_index_add(case_c, NULL, 0, s, s), MIXP_ERR_ARGUMENT, "index_add: input 0");
    case_refused(mixp_eq(case_c, t, mixp_full(case_c, MIXP_F32, 2, wide, 0.0)), MIXP_ERR_SHAPE, "eq: a [2, 3] and b [2, 4]");
    case_refused(mixp_lt(case_c, t, mixp_full(case_c, MIXP_F64, 0, NULL, 0.0)), MIXP_ERR_DTYPE, "lt: input 1");
    case_refused(mixp_ge(case_c, t, NULL), MIXP_ERR_ARGUMENT, "ge: input 1 is NULL");
    index_add_refused(t, s);
    mixp_context_free(case_c);
}

/* --- topk, sort ------------------------------------------------------------------------------------- */

/* Does x[i] come before x[j], by the definition? NaN is above all. */
static int ordered(const float *x, int i, int j, int smallest) {
    const int a = x[i] != x[i], b = x[j] != x[j];
    const int above = a || b ? a && !b : x[i] > x[j], below = a || b ? b && !a : x[i] < x[j];
    return (smallest ? below : above) || (!above && !below && i < j);
}

static void topk_one(mixp_dtype dtype, int rows, int cols, int k, int smallest, int sorts) {
    const int64_t shape[2] = { rows, cols };
    static float x[CASE_ROOM];
    int32_t index[CASE_ROOM], want[CASE_ROOM];
    double slope[CASE_ROOM];
    mixp_tensor *t, *y, *ids;
    for (int i = 0; i < rows * cols; i++) {
        x[i] = case_number(i % 7 == 3 ? i - 2 : i);             /* some are equal */
        if (i % 13 == 4) x[i] = i % 2 ? case_inf : -case_inf;
        if (i % 17 == 9) x[i] = case_nan();
        if (i % 19 == 5) x[i] = i % 2 ? 0.0f : -0.0f;
        slope[i] = 0.0;
    }
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < cols; i++) {
            int before = 0;
            for (int j = 0; j < cols; j++) before += ordered(x + r * cols, j, i, smallest);
            if (before >= k) continue;
            want[r * k + before] = i;
            slope[r * cols + i] = case_dy(r * k + before);
        }
    t = case_param(dtype, 2, shape, x);
    mixp_step_begin(case_c);
    y = sorts ? mixp_sort(case_c, t, -1, !smallest, &ids) : mixp_topk(case_c, t, k, -1, !smallest, &ids);
    case_has(y, dtype, rows * k);
    case_has(ids, MIXP_I32, rows * k);
    case_walk(y);
    CHECK_INT(mixp_read(ids, index, MIXP_I32, rows * k), MIXP_OK);
    const double *got = case_read(y, rows * k);
    for (int i = 0; i < rows * k; i++) {
        CHECK_INT(index[i], want[i]);
        case_near("topk", got[i], (double)x[i / k * cols + want[i]], 0.0);
    }
    got = case_read(t->grad, rows * cols);
    for (int i = 0; i < rows * cols; i++) CHECK_NEAR(got[i], slope[i], 0.0);
}

static void test_topk(void) {
    case_c = case_context();
    for (int smallest = 0; smallest < 2; smallest++)
        for (int d = 0; d < 3; d++) {
            topk_one(case_reals[d], 9, 8, 2, smallest, 0);
            topk_one(case_reals[d], 5, 60, 7, smallest, 0);
            topk_one(case_reals[d], 3, 4, 4, smallest, 0);
            topk_one(case_reals[d], 6, 1, 1, smallest, 0);
            topk_one(case_reals[d], 2, 200, 200, smallest, 1);
            topk_one(case_reals[d], 1, 1, 1, smallest, 1);
        }
    mixp_context_free(case_c);
}

static void test_topk_refused(void) {
    const int64_t two[2] = { 2, 3 };
    const float x[6] = { 1, 2, 3, 4, 5, 6 };
    mixp_tensor *t, *ids = NULL;
    case_c = case_context();
    t = case_param(MIXP_F32, 2, two, x);
    mixp_step_begin(case_c);
    CHECK(mixp_topk(case_c, t, 2, -1, 1, NULL) != NULL);
    ids = t;
    case_refused(mixp_topk(case_c, t, 4, -1, 1, &ids), MIXP_ERR_SHAPE, "topk: x [2, 3]");
    CHECK(ids == NULL);
    case_refused(mixp_topk(case_c, t, 0, -1, 1, &ids), MIXP_ERR_SHAPE, "topk: x [2, 3]");
    case_refused(mixp_topk(case_c, t, -1, -1, 1, &ids), MIXP_ERR_SHAPE, "topk");
    case_refused(mixp_sort(case_c, t, 2, 0, &ids), MIXP_ERR_SHAPE, "sort: x [2, 3]");
    case_refused(mixp_sort(case_c, NULL, -1, 0, &ids), MIXP_ERR_ARGUMENT, "sort: input 0 is NULL");
    case_refused(mixp_topk(case_c, mixp_full(case_c, MIXP_I32, 2, two, 1.0), 1, -1, 1, &ids), MIXP_ERR_DTYPE, "topk: input 0");
    mixp_context_free(case_c);
}

/* --- nll, triplet_margin ----------------------------------------------------------------------------- */

static void nll_one(mixp_dtype dtype, int rows, int cols, int32_t ignore) {
    const int64_t shape[3] = { rows / 3, 3, cols };
    float x[CASE_ROOM];
    int32_t targets[CASE_ROOM];
    double loss = 0.0, counted = 0.0;
    for (int i = 0; i < rows * cols; i++) x[i] = case_number(i);
    for (int i = 0; i < rows; i++) {
        targets[i] = i % 4 == 1 ? ignore : (int32_t)(i * 5 % cols);
        if (targets[i] == ignore) x[i * cols] = i % 8 == 1 ? case_inf : case_nan();    /* does not matter */
        else loss -= (double)x[i * cols + targets[i]];
        counted += targets[i] != ignore;
    }
    mixp_tensor *t = case_param(dtype, 3, shape, x);
    mixp_step_begin(case_c);
    mixp_tensor *y = mixp_nll(case_c, t, case_ids(2, shape, targets), ignore);
    CHECK(y && y->dtype == MIXP_F32 && y->rank == 0);
    CHECK_INT(mixp_backward(case_c, y), MIXP_OK);
    CHECK_NEAR(mixp_item(y), loss / counted, 2e-6 * (1.0 + fabs(loss / counted)));
    const double *got = case_read(t->grad, rows * cols);
    for (int i = 0; i < rows * cols; i++) {
        double want = targets[i / cols] != ignore && targets[i / cols] == i % cols ? -1.0 / counted : 0.0;
        case_near("nll", got[i], want, case_slack(dtype, want, 1e-6));
    }
}

static void test_nll(void) {
    const int64_t shape[2] = { 2, 3 }, two[1] = { 2 };
    const float x[6] = { -1, -2, -3, -4, -5, -6 };
    const int32_t none[6] = { -100, -100, -100, -100, -100, -100 }, bad[2] = { 1, 3 }, good[2] = { 2, 0 };
    const char *why = "";
    case_c = case_context();
    for (int d = 0; d < 3; d++) {
        nll_one(case_reals[d], 9, 7, MIXP_IGNORE);
        nll_one(case_reals[d], 6, 7, 3);
        nll_one(case_reals[d], 3, 1, MIXP_IGNORE);
    }
    mixp_tensor *t = case_param(MIXP_F32, 2, shape, x);
    mixp_step_begin(case_c);
    mixp_tensor *y = mixp_nll(case_c, t, case_ids(1, two, none), MIXP_IGNORE);
    CHECK_INT(mixp_backward(case_c, y), MIXP_OK);
    case_near("nll of nothing", mixp_item(y), NAN, 0.0);
    const double *got = case_read(t->grad, 6);
    for (int i = 0; i < 6; i++) CHECK_NEAR(got[i], 0.0, 0.0);
    for (int level = 1; level < 3; level++) {
        mixp_autocast_set_level(case_c, level);
        MIXP_AUTOCAST(case_c, MIXP_F16) case_has(mixp_nll(case_c, t, case_ids(1, two, good), 2), MIXP_F32, 1);
    }
    mixp_context_clear_error(case_c);
    mixp_step_begin(case_c);
    case_refused(mixp_nll(case_c, t, case_ids(2, shape, none), 0), MIXP_ERR_SHAPE, "nll: x [2, 3] and targets");
    case_refused(mixp_nll(case_c, t, t, 0), MIXP_ERR_DTYPE, "nll: input 1");
    case_refused(mixp_nll(case_c, NULL, t, 0), MIXP_ERR_ARGUMENT, "nll: input 0");
    y = mixp_nll(case_c, t, case_ids(1, two, bad), MIXP_IGNORE);
    if (y) (void)mixp_item(y);                      /* a GPU reports at the next wait */
    CHECK_INT(mixp_context_error(case_c, &why), MIXP_ERR_ARGUMENT);
    CHECK_TEXT(why, y ? "target 3 at row 1" : "nll: target 3 at row 1");
    mixp_context_free(case_c);
}

static void triplet_one(mixp_dtype dtype, int rows, int cols, float margin) {
    const int64_t shape[2] = { rows, cols };
    float v[3][CASE_ROOM];
    double want[3][CASE_ROOM], loss = 0.0;
    mixp_tensor *t[3], *y;
    for (int k = 0; k < 3; k++)
        for (int i = 0; i < rows * cols; i++) v[k][i] = case_number(i * (k + 1) + 5 * k);
    for (int r = 0; r < rows; r++) {
        const float *a = v[0] + r * cols, *p = v[1] + r * cols, *n = v[2] + r * cols;
        double near = 0.0, far = 0.0, on;
        for (int i = 0; i < cols; i++) {
            near += ((double)a[i] - (double)p[i] + 1e-6) * ((double)a[i] - (double)p[i] + 1e-6);
            far += ((double)a[i] - (double)n[i] + 1e-6) * ((double)a[i] - (double)n[i] + 1e-6);
        }
        near = sqrt(near);
        far = sqrt(far);
        on = near - far + (double)margin > 0.0 ? 1.0 / rows : 0.0;
        loss += on * (near - far + (double)margin);
        for (int i = 0; i < cols; i++) {
            want[1][r * cols + i] = -on * ((double)a[i] - (double)p[i] + 1e-6) / near;
            want[2][r * cols + i] = on * ((double)a[i] - (double)n[i] + 1e-6) / far;
            want[0][r * cols + i] = -want[1][r * cols + i] - want[2][r * cols + i];
        }
    }
    for (int k = 0; k < 3; k++) t[k] = case_param(dtype, 2, shape, v[k]);
    mixp_step_begin(case_c);
    y = mixp_triplet_margin(case_c, t[0], t[1], t[2], margin, 0, MIXP_REDUCE_MEAN);
    CHECK(y && y->dtype == MIXP_F32 && y->rank == 0);
    CHECK_INT(mixp_backward(case_c, y), MIXP_OK);
    CHECK_NEAR(mixp_item(y), loss, 2e-6 * (1.0 + loss));
    for (int k = 0; k < 3; k++) {
        const double *got = case_read(t[k]->grad, rows * cols);
        for (int i = 0; i < rows * cols; i++)
            case_near("triplet", got[i], want[k][i], 2.0 * case_slack(dtype, 0.5, 2e-6) / (k ? 2 : 1));
    }
}

static void test_triplet(void) {
    const int64_t two[2] = { 2, 3 }, three[2] = { 3, 2 };
    const float x[6] = { 1, 2, 3, 4, 5, 6 };
    case_c = case_context();
    for (int d = 0; d < 3; d++) {
        triplet_one(case_reals[d], 8, 5, 1.0f);
        triplet_one(case_reals[d], 8, 1, 0.3f);
        triplet_one(case_reals[d], 1, 9, 4.0f);
    }
    mixp_tensor *t = case_param(MIXP_F32, 2, two, x);
    mixp_tensor *s = case_param(MIXP_F32, 2, three, x);
    mixp_step_begin(case_c);
    CHECK_INT(mixp_backward(case_c, mixp_triplet_margin(case_c, t, t, t, 1.0f, 0, MIXP_REDUCE_MEAN)), MIXP_OK);
    const double *got = case_read(t->grad, 6);
    for (int i = 0; i < 6; i++) CHECK_NEAR(got[i], 0.0, 1e-7);
    case_refused(mixp_triplet_margin(case_c, t, s, t, 1.0f, 0, MIXP_REDUCE_MEAN), MIXP_ERR_SHAPE, "triplet_margin: anchor, positive and negative need one shape");
    case_refused(mixp_triplet_margin(case_c, t, t, NULL, 1.0f, 0, MIXP_REDUCE_MEAN), MIXP_ERR_ARGUMENT, "triplet_margin: negative is NULL");
    case_refused(mixp_triplet_margin(case_c, t, mixp_full(case_c, MIXP_I32, 2, two, 1.0), t, 1.0f, 0, MIXP_REDUCE_MEAN), MIXP_ERR_DTYPE, "triplet_margin");
    mixp_context_free(case_c);
}

/* --- parts, casts of integers, names in errors ---------------------------------------------------------- */

static void test_split_sizes(void) {
    const int64_t shape[2] = { 3, 7 }, sizes[3] = { 1, 4, 2 }, short_[3] = { 1, 4, 1 }, below[3] = { -1, 6, 2 };
    float x[21];
    const double *got;
    mixp_tensor *t, *parts[3];
    int64_t first = 0;
    for (int i = 0; i < 21; i++) x[i] = case_number(i);
    case_c = case_context();
    t = case_param(MIXP_F16, 2, shape, x);
    mixp_step_begin(case_c);
    CHECK_INT(mixp_split_sizes(case_c, t, -1, 3, sizes, parts), MIXP_OK);
    for (int k = 0; k < 3; k++) {
        got = case_read(parts[k], 3 * sizes[k]);
        for (int i = 0; i < 3 * (int)sizes[k]; i++)
            CHECK_NEAR(got[i], x[i / sizes[k] * 7 + first + i % sizes[k]], 0.0);
        first += sizes[k];
    }
    case_walk(parts[1]);
    got = case_read(t->grad, 21);
    for (int i = 0; i < 21; i++) CHECK_NEAR(got[i], i % 7 < 1 || i % 7 > 4 ? 0.0 : case_dy(i / 7 * 4 + i % 7 - 1), 0.0);
    CHECK_INT(mixp_split_sizes(case_c, t, 1, 3, short_, parts), MIXP_ERR_SHAPE);
    case_refused(parts[0], MIXP_ERR_SHAPE, "mixp_split_sizes: x [3, 7] and 3 sizes for dim 1");
    CHECK_INT(mixp_split_sizes(case_c, t, 1, 3, below, parts), MIXP_ERR_SHAPE);
    mixp_context_clear_error(case_c);
    CHECK_INT(mixp_split_sizes(case_c, t, 2, 3, sizes, parts), MIXP_ERR_SHAPE);
    mixp_context_clear_error(case_c);
    CHECK_INT(mixp_split_sizes(case_c, t, 1, 3, NULL, parts), MIXP_ERR_ARGUMENT);
    mixp_context_clear_error(case_c);
    parts[1] = t;
    CHECK_INT(mixp_split_sizes(case_c, NULL, 1, 3, sizes, parts), MIXP_ERR_ARGUMENT);
    case_refused(parts[1], MIXP_ERR_ARGUMENT, "split_sizes: input 0 is NULL");
    CHECK_INT(mixp_split(case_c, NULL, 1, 3, parts), MIXP_ERR_ARGUMENT);
    case_refused(parts[1], MIXP_ERR_ARGUMENT, "split: input 0 is NULL");
    mixp_context_free(case_c);
}

static void test_casts_of_integers(void) {
    const int64_t shape[2] = { 2, 3 };
    const uint8_t bytes[6] = { 0, 1, 2, 127, 128, 255 };
    const int32_t whole[6] = { 0, -1, 65504, 70000, 16777217, -2147483647 - 1 };
    const int64_t wide[6] = { 0, -1, 65504, 70000, 16777217, -2147483647LL - 1 };
    const double real[6] = { 0, -1, 65504, 70000, 16777217, -2147483648.0 };
    const double rounded[3][6] = { { 0, -1, 65504, 70000, 16777216, -2147483648.0 },
        { 0, -1, 65504, INFINITY, INFINITY, -INFINITY }, { 0, -1, 65536, 70144, 16777216, -2147483648.0 } };
    mixp_tensor *x;
    case_c = case_context();
    mixp_step_begin(case_c);
    for (int d = 0; d < 3; d++) {
        x = mixp_cast(case_c, mixp_input(case_c, MIXP_U8, 2, shape, bytes), case_reals[d]);
        case_has(x, case_reals[d], 6);
        const double *got = case_read(x, 6);
        for (int i = 0; i < 6; i++) CHECK_NEAR(got[i], bytes[i], 0.0);
        for (int from = 0; from < 3; from++) {
            x = from == 0 ? mixp_input_i32(case_c, 2, shape, whole)
                : from == 1 ? mixp_input_i64(case_c, 2, shape, wide) : mixp_input_f64(case_c, 2, shape, real);
            x = mixp_cast(case_c, x, case_reals[d]);
            got = case_read(x, 6);
            for (int i = 0; i < 6; i++) case_near("cast", got[i], rounded[d][i], 0.0);
        }
    }
    MIXP_AUTOCAST(case_c, MIXP_F16) case_has(mixp_scale(case_c, x, 2.0f), MIXP_BF16, 6);

    /* Rounded once: through f32 these would be 16777216 and 1. */
    const int64_t  long_one[6] = { 16842753 };
    const double   double_one[6] = { 1.0 + 1.0 / 2048 + 1.0 / (2048.0 * 2048.0) };
    CHECK_NEAR(*case_read(mixp_cast(case_c, mixp_input_i64(case_c, 2, shape, long_one), MIXP_BF16), 6), 16908288, 0.0);
    CHECK_NEAR(*case_read(mixp_cast(case_c, mixp_input_f64(case_c, 2, shape, double_one), MIXP_F16), 6), 1.0009765625, 0.0);
    CHECK_INT(mixp_context_error(case_c, NULL), MIXP_OK);
    case_refused(mixp_cast(case_c, x, MIXP_I32), MIXP_ERR_DTYPE, "cast");
    case_refused(mixp_cast(case_c, mixp_input(case_c, MIXP_F8_E4M3, 2, shape, bytes), MIXP_F32), MIXP_ERR_DTYPE, "cast: input 0 is f8_e4m3");
    mixp_context_free(case_c);
}

/* A function made of others names itself, whatever is wrong with its input. */
static void test_names_in_errors(void) {
    static const char *const names[7] = { "min", "argmin", "logsumexp", "var", "std", "vector_norm", NULL };
    const int64_t two[2] = { 2, 3 };
    const float x[6] = { 1, 2, 3, 4, 5, 6 };
    mixp_tensor *bad[3], *t;
    char says[64];
    case_c = case_context();
    t = case_param(MIXP_F32, 2, two, x);
    mixp_step_begin(case_c);
    bad[1] = mixp_scale(case_c, t, 2.0f);
    mixp_step_begin(case_c);
    bad[0] = NULL;
    bad[2] = mixp_full(case_c, MIXP_I32, 2, two, 1.0);
    for (int k = 0; names[k]; k++)
        for (int i = 0; i < 4; i++) {
            static const mixp_result results[4] = { MIXP_ERR_ARGUMENT, MIXP_ERR_ORDER, MIXP_ERR_DTYPE, MIXP_ERR_SHAPE };
            mixp_tensor *in = i < 3 ? bad[i] : t, *y = t;
            const int dim = i < 3 ? 0 : 2;
            if (k == 0) y = mixp_min(case_c, in, dim, 0);
            if (k == 1) y = mixp_argmin(case_c, in, dim, 0);
            if (k == 2) y = mixp_logsumexp(case_c, in, dim, 0);
            if (k == 3) y = mixp_var(case_c, in, dim, 1, 0);
            if (k == 4) y = mixp_std(case_c, in, dim, 1, 0);
            if (k == 5) y = mixp_vector_norm(case_c, in, dim, 0);
            snprintf(says, sizeof says, i < 3 ? "%s: input 0" : "%s: x [2, 3]", names[k]);
            case_refused(y, results[i], says);
        }
    case_refused(mixp_squeeze(case_c, bad[1], 0), MIXP_ERR_ORDER, "squeeze: input 0");
    case_refused(mixp_unsqueeze(case_c, NULL, 0), MIXP_ERR_ARGUMENT, "unsqueeze: input 0 is NULL");
    CHECK(mixp_min(NULL, t, 0, 0) == NULL && mixp_nll(NULL, t, t, 0) == NULL && mixp_var(NULL, t, 0, 1, 0) == NULL);
    CHECK(mixp_normal(NULL, MIXP_F32, 2, two, 0.0f, 1.0f) == NULL && mixp_squeeze(NULL, t, 0) == NULL);
    mixp_context_free(case_c);
}

static void picking_run_cases(void) {
    RUN(test_random_distributions);
    RUN(test_random_keys);
    RUN(test_random_parameters);
    RUN(test_random_refused);
    RUN(test_comparisons);
    RUN(test_comparisons_choose);
    RUN(test_scans);
    RUN(test_scans_of_few);
    RUN(test_cumsum_of_many);
    RUN(test_one_hot);
    RUN(test_scatter);
    RUN(test_scatter_sums);
    RUN(test_scatter_refused);
    RUN(test_topk);
    RUN(test_topk_refused);
    RUN(test_nll);
    RUN(test_triplet);
    RUN(test_split_sizes);
    RUN(test_casts_of_integers);
    RUN(test_names_in_errors);
}
