/* combined_cases.h - scatter, searchsorted, tril, einsum, norm and others of examples/ops.h, and prelu: what record_small.py
 * cannot record. operator_cases.h includes it.
 * SPDX-License-Identifier: MIT OR Unlicense
 */

/* Replaced elements pass their gradient to the source; a NaN that is replaced leaves nothing behind. Two sources of
 * one element are added. */
static void test_scatter_replaces(void) {
    const int64_t shape[2] = { 2, 4 }, few[2] = { 2, 2 };
    const int32_t ids[4] = { 3, 0, 1, 1 };
    const double want[8] = { 6.0, 2.0, 3.0, 5.0, 11.0, 15.0, 13.0, 14.0 };
    const double dx[8] = { 0.0, 2.0, 3.0, 0.0, 2.0, 0.0, 1.0, 2.0 }, dsrc[4] = { 1.0, 1.0, 3.0, 3.0 };
    float x[8] = { 1.0f, 2.0f, 3.0f, 4.0f, 11.0f, 12.0f, 13.0f, 14.0f }, src[4] = { 5.0f, 6.0f, 7.0f, 8.0f };
    x[3] = mixp_f32_of_bits(0x7FC00000u);
    case_c = case_context();
    for (int d = 0; d < 3; d++)
        for (int level = 0; level < 3; level++) {
            mixp_tensor *t = case_param(case_reals[d], 2, shape, x);
            mixp_tensor *s = case_param(case_reals[d], 2, few, src);
            mixp_step_begin(case_c);
            mixp_autocast_set_level(case_c, level);
            MIXP_AUTOCAST(case_c, MIXP_BF16) case_walk(mixp_scatter(case_c, t, 1, case_ids(2, few, ids), s));
            for (int i = 0; i < 8; i++) CHECK_NEAR(case_read(t->grad, 8)[i], dx[i], 0.0);
            for (int i = 0; i < 4; i++) CHECK_NEAR(case_read(s->grad, 4)[i], dsrc[i], 0.0);
            s = mixp_scatter(case_c, t, -1, case_ids(2, few, ids), s);
            for (int i = 0; i < 8; i++) CHECK_NEAR(case_read(s, 8)[i], want[i], 0.0);
        }
    mixp_context_free(case_c);
}

/* Beside a loop, for one row of edges and for a row each, in low dtypes and in a region of level 2. */
static void test_searchsorted(void) {
    enum { EDGES = 300, VALUES = 7 };
    const int64_t row[1] = { EDGES }, rows[2] = { 2, EDGES }, shape[2] = { 2, VALUES };
    float edges[2 * EDGES], values[2 * VALUES];
    for (int i = 0; i < 2 * EDGES; i++) edges[i] = (float)(i % EDGES / 2) / 4.0f + (i < EDGES ? 0.0f : 10.0f);
    for (int i = 0; i < 2 * VALUES; i++) values[i] = (float)(i * 11 % 90) / 2.0f - 1.0f;
    values[3] = mixp_f32_of_bits(0x7FC00000u);
    values[5] = edges[9];
    case_c = case_context();
    for (int right = 0; right < 2; right++)
        for (int each = 0; each < 2; each++) {
            mixp_tensor *e, *y = NULL;
            mixp_step_begin(case_c);
            e = mixp_input(case_c, MIXP_F32, 1 + each, each ? rows : row, edges);
            mixp_autocast_set_level(case_c, 2);
            MIXP_AUTOCAST(case_c, MIXP_BF16)
                y = mixp_searchsorted(case_c, e, mixp_input(case_c, MIXP_F32, 2, shape, values), right);
            CHECK(y && y->dtype == MIXP_I32 && y->rank == 2);
            for (int i = 0; y && i < 2 * VALUES; i++) {
                const float *of = edges + (each && i >= VALUES ? EDGES : 0);
                int before = 0;
                for (int j = 0; j < EDGES; j++) before += !(right ? of[j] > values[i] : of[j] >= values[i]);
                CHECK_NEAR(case_read(y, 2 * VALUES)[i], (double)before, 0.0);
            }
        }
    mixp_context_free(case_c);
}

/* Masks come from f32 numbers at each level; integers and vectors are refused. */
static void test_triangles(void) {
    enum { ROWS = 3, COLS = 5 };
    const int64_t shape[2] = { ROWS, COLS };
    float x[ROWS * COLS];
    for (int i = 0; i < ROWS * COLS; i++) x[i] = (float)(i + 1);
    case_c = case_context();
    for (int diagonal = -4; diagonal <= 6; diagonal++)
        for (int level = 0; level < 3; level++) {
            mixp_tensor *y[2] = { NULL, NULL };
            mixp_step_begin(case_c);
            mixp_autocast_set_level(case_c, level);
            MIXP_AUTOCAST(case_c, MIXP_F16) {
                y[0] = mixp_tril(case_c, mixp_cast(case_c, mixp_input(case_c, MIXP_F32, 2, shape, x), MIXP_F16), diagonal);
                y[1] = mixp_triu(case_c, mixp_cast(case_c, mixp_input(case_c, MIXP_F32, 2, shape, x), MIXP_F16), diagonal);
            }
            for (int i = 0; i < ROWS * COLS; i++) {
                const int place = i % COLS - i / COLS;
                CHECK_NEAR(case_read(y[0], ROWS * COLS)[i], place > diagonal ? 0.0 : (double)(i + 1), 0.0);
                CHECK_NEAR(case_read(y[1], ROWS * COLS)[i], place < diagonal ? 0.0 : (double)(i + 1), 0.0);
            }
        }
    mixp_context_free(case_c);
}

static void test_combined_refused(void) {
    const int64_t two[2] = { 2, 3 }, three[1] = { 3 };
    const float x[6] = { 1, 2, 3, 4, 5, 6 };
    const int32_t ids[6] = { 0, 1, 0, 1, 0, 1 };
    case_c = case_context();
    mixp_tensor *t = case_param(MIXP_F32, 2, two, x);
    mixp_tensor *v = case_param(MIXP_F32, 1, three, x);
    mixp_step_begin(case_c);
    mixp_tensor *n = mixp_input(case_c, MIXP_I32, 2, two, ids);
    case_refused(mixp_norm(case_c, t, mixp_f32_of_bits(0x7FC00000u), 0, 0), MIXP_ERR_ARGUMENT, "norm: the order is NaN");
    case_refused(mixp_norm(case_c, t, 3.0f, 2, 0), MIXP_ERR_SHAPE, "norm: x");
    case_refused(mixp_cumprod(case_c, t, MIXP_ALL), MIXP_ERR_SHAPE, "cumprod: x");
    case_refused(mixp_cumprod(case_c, n, 0), MIXP_ERR_DTYPE, "cumprod");
    case_refused(mixp_tril(case_c, v, 0), MIXP_ERR_SHAPE, "tril: x");
    case_refused(mixp_triu(case_c, n, 0), MIXP_ERR_DTYPE, "triu");
    case_refused(mixp_roll(case_c, t, 1, 2), MIXP_ERR_SHAPE, "roll: x has rank 2, and no dimension 2");
    case_refused(mixp_prelu(case_c, t, t), MIXP_ERR_SHAPE, "prelu: x");
    case_refused(mixp_prelu(case_c, v, v), MIXP_ERR_SHAPE, "w needs one element");
    case_refused(mixp_scatter(case_c, t, 0, t, t), MIXP_ERR_DTYPE, "scatter");
    case_refused(mixp_scatter(case_c, n, 0, n, t), MIXP_ERR_DTYPE, "scatter: x is i32");
    case_refused(mixp_searchsorted(case_c, t, v, 0), MIXP_ERR_SHAPE, "searchsorted: edges");
    case_refused(mixp_power(case_c, t, n), MIXP_ERR_DTYPE, "power");
    case_refused(mixp_atan2(case_c, t, case_param(MIXP_F32, 1, &two[0], x)), MIXP_ERR_SHAPE, "atan2: a");
    CHECK_INT(mixp_step_begin(case_c), MIXP_OK);        /* no region was left open */
    mixp_context_free(case_c);
}

static void test_einsum_refused(void) {
    static const struct { const char *equation, *says; mixp_result code; } cases[] = {
        { "", "two operands", MIXP_ERR_ARGUMENT }, { "ij->ij", "two operands", MIXP_ERR_ARGUMENT },
        { "ij,jk,kl", "letters", MIXP_ERR_ARGUMENT }, { "...ij,jk", "letters", MIXP_ERR_ARGUMENT },
        { "ii,ij", "twice", MIXP_ERR_ARGUMENT }, { "ij,jk->kk", "twice", MIXP_ERR_ARGUMENT },
        { "ij,jk->il", "in no operand", MIXP_ERR_ARGUMENT }, { "abcdefghi,a", "letters", MIXP_ERR_ARGUMENT },
        { "abcde,fghij", "more than 8 letters", MIXP_ERR_ARGUMENT },
        { "i,ij", "one letter for each dimension", MIXP_ERR_SHAPE }, { "ij,ji", "must be equal", MIXP_ERR_SHAPE }
    };
    const int64_t two[2] = { 2, 3 };
    const float x[6] = { 1, 2, 3, 4, 5, 6 };
    case_c = case_context();
    mixp_tensor *t = case_param(MIXP_F32, 2, two, x);
    mixp_step_begin(case_c);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        case_refused(mixp_einsum(case_c, cases[i].equation, t, t), cases[i].code, cases[i].says);
    case_refused(mixp_einsum(case_c, NULL, t, t), MIXP_ERR_ARGUMENT, "two operands");
    CHECK_NEAR(mixp_item(mixp_einsum(case_c, "ij,ij->", t, t)), 91.0, 0.0);
    mixp_context_free(case_c);
}

static void combined_run_cases(void) {
    RUN(test_scatter_replaces);
    RUN(test_searchsorted);
    RUN(test_triangles);
    RUN(test_combined_refused);
    RUN(test_einsum_refused);
}
