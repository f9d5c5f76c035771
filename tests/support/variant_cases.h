/* variant_cases.h - what operators also take, on the device of `case_context`: other dimensions than the
 * last, smaller indices, norms over several dimensions, a row of an embedding that does not learn,
 * dimensions of scalars, tensors without elements. Beside loops, or the definition. Included by
 * operator_cases.h.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
static mixp_tensor *variant_leaf(int rank, const int64_t *shape) {
    float v[CASE_ROOM];
    for (int i = 0; i < CASE_ROOM; i++) v[i] = case_number(i);
    return case_param(MIXP_F32, rank, shape, v);
}

static void variant_ok(void) {
    const char *why = "";
    CHECK_INT(mixp_context_error(case_c, &why), MIXP_OK);
    if (*why) TEST_SHOW("%s", why);
    mixp_context_free(case_c);
}

/* sort and topk of [3, 4, 5] along each dimension, beside counting the larger elements. */
static void along_dim(int dim, int64_t k) {
    const int64_t shape[3] = { 3, 4, 5 };
    const int size = (int)shape[dim], step = dim == 0 ? 20 : dim == 1 ? 5 : 1, keep = k ? (int)k : size;
    mixp_tensor *x, *y, *ids = NULL;
    double got[60], at[60], grad[60], dx[60];
    int i, j, n = 60 / size * keep;
    case_c = case_context();
    x = variant_leaf(3, shape);
    mixp_step_begin(case_c);
    y = k ? mixp_topk(case_c, x, k, dim - 3, 1, &ids) : mixp_sort(case_c, x, dim, 1, &ids);
    memcpy(got, case_read(y, n), sizeof got);
    memcpy(at, case_read(ids, n), sizeof at);
    case_walk(y);
    memcpy(dx, case_read(x->grad, 60), sizeof dx);
    memset(grad, 0, sizeof grad);
    for (i = 0; i < 60; i++) {
        const int place = i / step % size, first = i - place * step;
        int rank = 0, to;
        for (j = 0; j < size; j++) rank += case_number(first + j * step) > case_number(i);
        if (rank >= keep) continue;
        to = first / (step * size) * step * keep + rank * step + first % step;
        CHECK_NEAR(got[to], case_number(i), 0);
        CHECK_NEAR(at[to], place, 0);
        grad[i] = case_dy(to);
    }
    for (i = 0; i < 60; i++) CHECK_NEAR(dx[i], grad[i], 0);
    variant_ok();
}

static void test_along_dims(void) {
    for (int dim = 0; dim < 3; dim++) {
        along_dim(dim, 0);
        along_dim(dim, 2);
    }
}

/* gather and scatter_add of x[3, 4], ids[2, 3] and src[3, 5], along each dimension. */
static void smaller(int dim) {
    const int64_t shape[2] = { 3, 4 }, few[2] = { 2, 3 }, more[2] = { 3, 5 };
    const int32_t ids[6] = { 2, 0, 2, 1, 0, 2 };
    double got[15], want[15], dx[15], dsrc[15];
    int i, to;
    case_c = case_context();
    mixp_tensor *x = variant_leaf(2, shape);
    mixp_tensor *src = variant_leaf(2, more);
    mixp_step_begin(case_c);
    mixp_tensor *at = case_ids(2, few, ids);
    memcpy(got, case_read(mixp_gather(case_c, x, dim, at), 6), 6 * sizeof *got);
    for (i = 0; i < 6; i++) {
        to = dim ? i / 3 * 4 + ids[i] : ids[i] * 4 + i % 3;
        CHECK_NEAR(got[i], case_number(to), 0);
    }
    memset(dx, 0, sizeof dx);
    case_walk(mixp_gather(case_c, x, dim, at));
    for (i = 0; i < 6; i++) dx[dim ? i / 3 * 4 + ids[i] : ids[i] * 4 + i % 3] += case_dy(i);
    memcpy(got, case_read(x->grad, 12), 12 * sizeof *got);
    for (i = 0; i < 12; i++) CHECK_NEAR(got[i], dx[i], 0);

    mixp_step_begin(case_c);
    x->grad = NULL;
    at = case_ids(2, few, ids);
    for (i = 0; i < 12; i++) want[i] = case_number(i);
    memset(dsrc, 0, sizeof dsrc);
    for (i = 0; i < 6; i++) {
        to = dim ? i / 3 * 4 + ids[i] : ids[i] * 4 + i % 3;
        want[to] += case_number(i / 3 * 5 + i % 3);
        dsrc[i / 3 * 5 + i % 3] = case_dy(to);
    }
    memcpy(got, case_read(mixp_scatter_add(case_c, x, dim, at, src), 12), 12 * sizeof *got);
    for (i = 0; i < 12; i++) CHECK_NEAR(got[i], want[i], 0);
    case_walk(mixp_scatter_add(case_c, x, dim, at, src));
    memcpy(got, case_read(src->grad, 15), sizeof got);
    for (i = 0; i < 15; i++) CHECK_NEAR(got[i], dsrc[i], 0);
    memcpy(got, case_read(x->grad, 12), 12 * sizeof *got);
    for (i = 0; i < 12; i++) CHECK_NEAR(got[i], case_dy(i), 0);
    case_refused(mixp_gather(case_c, mixp_slice(case_c, x, 1 - dim, 0, 1), dim, at), MIXP_ERR_SHAPE, "gather");
    case_refused(mixp_scatter_add(case_c, mixp_slice(case_c, x, 1 - dim, 0, 1), dim, at, src), MIXP_ERR_SHAPE,
                 "scatter_add");
    variant_ok();
}

static void test_smaller_indices(void) {
    smaller(0);
    smaller(1);
}

/* A norm over [4, 5] of [3, 4, 5] is the norm of rows of 20. */
static void test_norms_of_dims(void) {
    const int64_t shape[3] = { 3, 4, 5 }, tail[2] = { 4, 5 }, flat[2] = { 3, 20 }, row[1] = { 20 }, other[2] = { 5, 4 };
    double got[60], want[60], gx[60], gg[20], gb[20];
    for (int rms = 0; rms < 2; rms++) {
        case_c = case_context();
        mixp_tensor *x = variant_leaf(3, shape);
        mixp_tensor *g = variant_leaf(2, tail);
        mixp_tensor *b = variant_leaf(2, tail);
        mixp_step_begin(case_c);
        mixp_tensor *y = rms ? mixp_rms_norm(case_c, x, g, 1e-5f) : mixp_layer_norm(case_c, x, g, b, 1e-5f);
        memcpy(got, case_read(y, 60), sizeof got);
        case_walk(y);
        memcpy(gx, case_read(x->grad, 60), sizeof gx);
        memcpy(gg, case_read(g->grad, 20), sizeof gg);
        if (!rms) memcpy(gb, case_read(b->grad, 20), sizeof gb);
        mixp_step_begin(case_c);
        x->grad = g->grad = b->grad = NULL;
        mixp_tensor *z = mixp_reshape(case_c, x, 2, flat);
        y = rms ? mixp_rms_norm(case_c, z, mixp_reshape(case_c, g, 1, row), 1e-5f)
                : mixp_layer_norm(case_c, z, mixp_reshape(case_c, g, 1, row), mixp_reshape(case_c, b, 1, row), 1e-5f);
        memcpy(want, case_read(y, 60), sizeof want);
        for (int i = 0; i < 60; i++) CHECK_NEAR(got[i], want[i], 0);
        case_walk(mixp_reshape(case_c, y, 3, shape));
        memcpy(want, case_read(x->grad, 60), sizeof want);
        for (int i = 0; i < 60; i++) CHECK_NEAR(gx[i], want[i], 0);
        memcpy(want, case_read(g->grad, 20), sizeof gg);
        for (int i = 0; i < 20; i++) CHECK_NEAR(gg[i], want[i], 0);
        if (!rms) memcpy(want, case_read(b->grad, 20), sizeof gb);
        for (int i = 0; i < 20 && !rms; i++) CHECK_NEAR(gb[i], want[i], 0);
        case_refused(mixp_rms_norm(case_c, x, mixp_reshape(case_c, g, 2, other), 1e-5f), MIXP_ERR_SHAPE, "last dimensions");
        case_refused(mixp_layer_norm(case_c, x, g, mixp_slice(case_c, mixp_reshape(case_c, b, 1, row), 0, 0, 5), 1e-5f),
                     MIXP_ERR_SHAPE, "same shape");
        variant_ok();
    }
}

/* The row `padding` of the table gets no gradient, and its values are looked up as others. */
static void test_padded_embedding(void) {
    const int64_t shape[2] = { 3, 2 }, four[1] = { 4 };
    const int32_t ids[4] = { 1, 0, 1, 2 };
    double got[8];
    for (int turn = 0; turn < 2; turn++) {
        case_c = case_context();
        mixp_tensor *table = variant_leaf(2, shape);
        mixp_step_begin(case_c);
        mixp_tensor *at = case_ids(1, four, ids);
        memcpy(got, case_read(mixp_embedding_padded(case_c, table, at, turn ? -2 : 1), 8), sizeof got);
        for (int i = 0; i < 8; i++) CHECK_NEAR(got[i], case_number(ids[i / 2] * 2 + i % 2), 0);
        case_walk(mixp_embedding_padded(case_c, table, at, turn ? -2 : 1));
        memcpy(got, case_read(table->grad, 6), 6 * sizeof *got);
        for (int i = 0; i < 6; i++) {
            const int of = i / 2 == 0 ? 1 : 3;
            CHECK_NEAR(got[i], i / 2 == 1 ? 0 : case_dy(of * 2 + i % 2), 0);
        }
        case_refused(mixp_embedding_padded(case_c, table, at, 3), MIXP_ERR_SHAPE, "padding must be a row");
        case_refused(mixp_embedding_padded(case_c, table, at, -4), MIXP_ERR_SHAPE, "padding must be a row");
        variant_ok();
    }
}

/* A scalar has the dimensions 0 and -1 of a vector of one element. */
static void test_dims_of_scalars(void) {
    const int32_t zero[1] = { 0 };
    mixp_tensor *x, *at, *ids = NULL;
    case_c = case_context();
    x = variant_leaf(0, NULL);
    mixp_step_begin(case_c);
    at = case_ids(0, NULL, zero);
    for (int dim = -1; dim <= 0; dim++) {
        const double v = case_number(0);
        CHECK_NEAR(mixp_item(mixp_sum(case_c, x, dim, 0)), v, 0);
        CHECK_NEAR(mixp_item(mixp_mean(case_c, x, dim, 1)), v, 0);
        CHECK_NEAR(mixp_item(mixp_max(case_c, x, dim, 0)), v, 0);
        CHECK_NEAR(mixp_item(mixp_cumsum(case_c, x, dim)), v, 0);
        CHECK_NEAR(mixp_item(mixp_gather(case_c, x, dim, at)), v, 0);
        CHECK_NEAR(mixp_item(mixp_scatter_add(case_c, x, dim, at, x)), 2 * v, 0);
        CHECK_NEAR(mixp_item(mixp_squeeze(case_c, x, dim)), v, 0);
        CHECK_NEAR(mixp_item(mixp_transpose(case_c, x, dim, 0)), v, 0);
        CHECK_NEAR(mixp_item(mixp_flip(case_c, x, dim)), v, 0);
        CHECK_NEAR(mixp_item(mixp_sort(case_c, x, dim, 0, &ids)), v, 0);
        CHECK(ids && ids->rank == 0);
        CHECK_NEAR(mixp_item(mixp_topk(case_c, x, 1, dim, 1, NULL)), v, 0);
        CHECK_NEAR(mixp_item(mixp_logsumexp(case_c, x, dim, 0)), v, 1e-6);
    }
    CHECK_NEAR(mixp_item(mixp_softmax(case_c, x)), 1, 0);
    CHECK_NEAR(mixp_item(mixp_log_softmax(case_c, x)), 0, 0);
    case_walk(mixp_sort(case_c, x, 0, 0, NULL));
    CHECK_NEAR(mixp_item(x->grad), 1, 0);
    case_refused(mixp_sum(case_c, x, 1, 0), MIXP_ERR_SHAPE, "sum");
    case_refused(mixp_slice(case_c, x, 0, 0, 1), MIXP_ERR_SHAPE, "slice");
    case_refused(mixp_concat(case_c, 1, &x, 0), MIXP_ERR_SHAPE, "concat");
    case_refused(mixp_pad(case_c, x, 0, 1, 1, 0), MIXP_ERR_SHAPE, "pad");
    case_refused(mixp_layer_norm(case_c, x, NULL, NULL, 1e-5f), MIXP_ERR_SHAPE, "layer_norm");
    variant_ok();
}

/* Integers: transposed, and padded. */
static void test_moves_of_integers(void) {
    const int64_t shape[2] = { 2, 3 };
    const int32_t v[6] = { 1, 2, 3, 16777217, 5, 6 };
    case_c = case_context();
    mixp_step_begin(case_c);
    const double *got = case_read(mixp_transpose(case_c, case_ids(2, shape, v), 0, 1), 6);
    CHECK(got[0] == 1 && got[1] == 16777217 && got[2] == 2 && got[5] == 6);
    got = case_read(mixp_pad(case_c, case_ids(2, shape, v), 1, 1, 0, 7), 8);
    CHECK(got[0] == 7 && got[1] == 1 && got[4] == 7 && got[5] == 16777217);
    variant_ok();
}

/* Everything is dropped: values and gradients are 0, even of Inf. */
static void test_dropout_of_all(void) {
    const int64_t four[1] = { 4 };
    const float v[4] = { 1, -2, 3, 1e30f * 1e30f };
    double got[4];
    case_c = case_context();
    mixp_tensor *x = case_param(MIXP_F32, 1, four, v);
    mixp_step_begin(case_c);
    mixp_tensor *y = mixp_dropout(case_c, x, 1.0f, 1);
    memcpy(got, case_read(y, 4), sizeof got);
    for (int i = 0; i < 4; i++) CHECK_NEAR(got[i], 0, 0);
    mixp_backward(case_c, mixp_add(case_c, mixp_sum(case_c, mixp_dropout(case_c, x, 1.0f, 1), MIXP_ALL, 0),
                                   mixp_sum(case_c, mixp_dropout(case_c, x, 1.0f, 1), MIXP_ALL, 0)));
    memcpy(got, case_read(x->grad, 4), sizeof got);
    for (int i = 0; i < 4; i++) CHECK_NEAR(got[i], 0, 0);
    case_refused(mixp_dropout(case_c, x, 1.5f, 1), MIXP_ERR_ARGUMENT, "p is 1.5");
    variant_ok();
}

/* --- tensors without elements --- */

static mixp_tensor *no_rows(mixp_dtype dtype, int64_t rows, int64_t cols) {
    int64_t shape[2];
    shape[0] = rows;
    shape[1] = cols;
    return mixp_input(case_c, dtype, 2, shape, loss_x);
}

static void is_empty(const char *name, const mixp_tensor *y, int rank) {
    if (y && y->count == 0 && y->rank == rank) return;
    test_bad++;
    TEST_SHOW("%s: %.0f elements", name, y ? (double)y->count : -1.0);
}

static void is_number(const char *name, const mixp_tensor *y, double want) {
    CHECK(y && y->count == 1);
    if (y && y->count == 1) case_near(name, mixp_item(y), want, 0);
}

/* Operators of [0, 3] and [2, 0]. */
static void test_empty_values(void) {
    const int64_t four[2] = { 4, 3 }, minus[2] = { 3, -1 }, open[2] = { -1, 0 }, up[3] = { 4, 0, 3 }, wide[3] = { 0, 1, 3 };
    const int64_t one_row[3] = { 1, 4, 3 }, no_keys[3] = { 1, 0, 3 };
    const int64_t four_dims[4] = { 1, 4, 1, 3 }, no_heads[4] = { 1, 4, 0, 3 };
    mixp_attention_desc heads;
    mixp_rope_desc rope;
    const int swap[2] = { 1, 0 };
    const double nan = (double)case_nan(), inf = (double)case_inf;
    mixp_tensor *x, *w, *y, *both[2], *ids = NULL, *no_ids;
    case_c = case_context();
    w = variant_leaf(2, four);
    mixp_step_begin(case_c);
    x = no_rows(MIXP_F32, 0, 3);
    y = no_rows(MIXP_F32, 2, 0);
    memset(&heads, 0, sizeof heads);
    heads.heads = 1;
    no_ids = mixp_input(case_c, MIXP_I32, 1, x->shape, loss_ids);
    is_empty("add", mixp_add(case_c, x, x), 2);
    is_empty("mul", mixp_mul(case_c, x, mixp_full(case_c, MIXP_F32, 0, NULL, 2)), 2);
    is_empty("add of [0, 3] and [1, 3]", mixp_add(case_c, x, mixp_slice(case_c, w, 0, 0, 1)), 2);
    is_empty("tanh", mixp_tanh(case_c, x), 2);
    is_empty("gt", mixp_gt(case_c, x, x), 2);
    is_empty("where", mixp_where(case_c, mixp_gt(case_c, x, x), x, x), 2);
    is_empty("softmax", mixp_softmax(case_c, x), 2);
    is_empty("softmax of no columns", mixp_softmax(case_c, y), 2);
    is_empty("layer_norm", mixp_layer_norm(case_c, x, NULL, NULL, 1e-5f), 2);
    is_empty("linear", mixp_linear(case_c, x, w, NULL), 2);
    is_empty("permute", mixp_permute(case_c, x, 2, swap), 2);
    is_empty("flip", mixp_flip(case_c, x, 0), 2);
    is_empty("expand", mixp_expand(case_c, x, 3, up), 3);
    is_empty("reshape", mixp_reshape(case_c, x, 3, wide), 3);
    is_empty("slice", mixp_slice(case_c, w, 0, 4, 0), 2);
    is_empty("slice of x", mixp_slice(case_c, x, 1, 1, 2), 2);
    is_empty("cumsum", mixp_cumsum(case_c, x, 0), 2);
    is_empty("sort", mixp_sort(case_c, y, -1, 0, &ids), 2);
    is_empty("indices", ids, 2);
    is_empty("embedding", mixp_embedding(case_c, w, no_rows(MIXP_I32, 0, 2)), 3);
    is_empty("gather", mixp_gather(case_c, w, 0, no_rows(MIXP_I32, 0, 3)), 2);
    is_empty("gather of no ids", mixp_gather(case_c, w, 1, no_ids), 1);
    is_empty("one_hot", mixp_one_hot(case_c, no_rows(MIXP_I32, 0, 2), 5, MIXP_F32), 3);
    is_empty("dropout", mixp_dropout(case_c, x, 0.5f, 1), 2);
    is_empty("cast", mixp_cast(case_c, x, MIXP_BF16), 2);
    is_empty("normal", mixp_normal(case_c, MIXP_F32, 2, x->shape, 0, 1), 2);
    is_empty("full", mixp_full(case_c, MIXP_U8, 2, x->shape, 1), 2);
    is_empty("max of other dimensions", mixp_max(case_c, x, 1, 0), 1);
    is_number("sum", mixp_sum(case_c, x, MIXP_ALL, 0), 0);
    is_number("mean", mixp_mean(case_c, x, MIXP_ALL, 0), nan);
    is_number("prod", mixp_prod(case_c, x, MIXP_ALL, 0), 1);
    is_number("logsumexp", mixp_logsumexp(case_c, x, MIXP_ALL, 0), -inf);
    is_number("var", mixp_var(case_c, x, MIXP_ALL, 1, 0), nan);
    is_number("vector_norm", mixp_vector_norm(case_c, x, MIXP_ALL, 0), 0);
    const double *got = case_read(mixp_sum(case_c, y, 1, 0), 2);
    CHECK(got[0] == 0 && got[1] == 0);
    got = case_read(mixp_matmul(case_c, y, x, 0, 0), 6);
    for (int i = 0; i < 6; i++) CHECK_NEAR(got[i], 0, 0);
    both[0] = x;
    both[1] = w;
    got = case_read(mixp_concat(case_c, 2, both, 0), 12);
    for (int i = 0; i < 12; i++) CHECK_NEAR(got[i], case_number(i), 0);
    got = case_read(mixp_pad(case_c, x, 0, 1, 1, 5), 6);
    for (int i = 0; i < 6; i++) CHECK_NEAR(got[i], 5, 0);
    is_empty("pad", mixp_pad(case_c, x, 1, 1, 1, 5), 2);
    got = case_read(mixp_scatter_add(case_c, w, 0, no_rows(MIXP_I32, 0, 3), x), 12);
    for (int i = 0; i < 12; i++) CHECK_NEAR(got[i], case_number(i), 0);
    case_refused(mixp_attention_apply(case_c, mixp_reshape(case_c, w, 3, one_row), mixp_reshape(case_c, x, 3, no_keys),
                                      mixp_reshape(case_c, x, 3, no_keys), &heads), MIXP_ERR_SHAPE, "attention: ");
    memset(&rope, 0, sizeof rope);
    rope.head_dim = 2;
    is_empty("rope", mixp_rope(case_c, no_rows(MIXP_F32, 0, 4), &rope), 2);
    is_empty("rope of no heads", mixp_rope(case_c, y, &rope), 2);
    is_empty("swiglu_packed", mixp_swiglu_packed(case_c, y), 2);
    is_empty("var of rows", mixp_var(case_c, x, 1, 1, 0), 1);
    case_refused(mixp_linear_cross_entropy(case_c, w, x, no_rows(MIXP_I32, 4, 1), MIXP_IGNORE, 0), MIXP_ERR_SHAPE,
                 "linear_cross_entropy");
    heads.heads = 0;
    case_refused(mixp_attention_apply(case_c, mixp_reshape(case_c, w, 4, four_dims), mixp_reshape(case_c, x, 4, no_heads),
                                      mixp_reshape(case_c, x, 4, no_heads), &heads), MIXP_ERR_SHAPE, "attention: ");
    case_refused(mixp_max(case_c, x, MIXP_ALL, 0), MIXP_ERR_SHAPE, "max: x [0, 3] does not fit: a maximum needs at least one element");
    case_refused(mixp_min(case_c, x, MIXP_ALL, 0), MIXP_ERR_SHAPE, "min: x [0, 3] does not fit: a minimum needs at least one element");
    case_refused(mixp_argmin(case_c, x, 0, 0), MIXP_ERR_SHAPE, "argmin: x [0, 3] does not fit: a minimum needs at least one element");
    is_empty("reshape to [3, -1]", mixp_reshape(case_c, x, 2, minus), 2);
    case_refused(mixp_reshape(case_c, x, 2, open), MIXP_ERR_SHAPE, "reshape: x [0, 3]");
    CHECK(mixp_param(case_c, "p", MIXP_F32, 2, x->shape) == NULL);
    mixp_context_clear_error(case_c);
    variant_ok();
}

/* Gradients through empty results are zeros, in each region and under a guard. */
static void test_empty_gradients(void) {
    const int64_t shape[2] = { 4, 3 }, four[1] = { 4 };
    for (int level = 0; level < 3; level++) {
        mixp_tensor *w, *b, *x, *loss = NULL;
        mixp_guard_desc guard;
        mixp_autocast region;
        case_c = case_context();
        memset(&guard, 0, sizeof guard);
        guard.every = 1;
        if (level) CHECK_INT(mixp_guard_start(case_c, &guard), MIXP_OK);
        w = variant_leaf(2, shape);
        b = variant_leaf(1, four);
        mixp_step_begin(case_c);
        memset(&region, 0, sizeof region);
        region.dtype = level ? MIXP_F16 : MIXP_F32;
        region.level = level ? level : 1;
        CHECK_INT(mixp_autocast_open_with(case_c, &region), 0);
        x = mixp_linear(case_c, no_rows(MIXP_F32, 0, 3), w, b);
        x = mixp_gelu(case_c, mixp_add(case_c, x, b));
        loss = mixp_add(case_c, mixp_sum(case_c, x, MIXP_ALL, 0), mixp_sum(case_c, mixp_slice(case_c, b, 0, 0, 2), 0, 0));
        mixp_autocast_close(case_c, 0);
        CHECK_INT(mixp_backward(case_c, loss), MIXP_OK);
        const double *got = case_read(w->grad, 12);
        for (int i = 0; i < 12; i++) CHECK_NEAR(got[i], 0, 0);
        got = case_read(b->grad, 4);
        for (int i = 0; i < 4; i++) CHECK_NEAR(got[i], i < 2, 0);
        variant_ok();
    }
}

/* nll is linear in its log-probabilities: its tangent is its value at theirs. */
static void test_tangent_of_nll(void) {
    const int64_t rows[1] = { LOSS_ROWS };
    mixp_loss_desc d;
    mixp_tensor *x, *ids, *along, *y;
    memset(&d, 0, sizeof d);
    case_c = case_context();
    x = loss_leaf(MIXP_F32, LOSS_ROWS, LOSS_COLS, loss_x);
    mixp_step_begin(case_c);
    ids = mixp_input(case_c, MIXP_I32, 1, rows, loss_ids);
    along = loss_tensor(MIXP_F32, LOSS_ROWS, LOSS_COLS, loss_other);
    d.weight = loss_tensor(MIXP_F32, 0, LOSS_COLS, loss_classes);
    y = mixp_jvp(case_c, mixp_loss_apply(case_c, MIXP_OP_NLL, mixp_scale(case_c, x, 2), ids, &d), x, along);
    CHECK_NEAR(mixp_item(y), 2 * mixp_item(mixp_loss_apply(case_c, MIXP_OP_NLL, along, ids, &d)), 1e-6);
    d.reduction = MIXP_REDUCE_NONE;
    y = mixp_jvp(case_c, mixp_loss_apply(case_c, MIXP_OP_NLL, x, ids, &d), x, along);
    CHECK_NEAR(case_read(y, LOSS_ROWS)[2], -loss_classes[0] * loss_other[2 * LOSS_COLS], 1e-6);
    variant_ok();
}

/* Losses of no rows. */
static void test_empty_losses(void) {
    static const mixp_op_id losses[8] = { MIXP_OP_CROSS_ENTROPY, MIXP_OP_NLL, MIXP_OP_MSE, MIXP_OP_L1, MIXP_OP_HUBER,
                                          MIXP_OP_BCE_WITH_LOGITS, MIXP_OP_BCE, MIXP_OP_KL_DIV };
    const int64_t shape[2] = { 5, 3 }, none[1] = { 0 };
    const double nan = (double)case_nan();
    for (int r = 0; r < 3; r++) {
        const double want = r == MIXP_REDUCE_SUM ? 0 : nan;
        mixp_tensor *w, *x, *ids, *loss;
        mixp_loss_desc d;
        memset(&d, 0, sizeof d);
        d.reduction = (mixp_reduction)r;
        case_c = case_context();
        w = variant_leaf(2, shape);
        mixp_step_begin(case_c);
        ids = mixp_input(case_c, MIXP_I32, 1, none, loss_ids);
        for (int id = 0; id < 8; id++) {
            x = mixp_linear(case_c, no_rows(MIXP_F32, 0, 3), w, NULL);
            loss = mixp_loss_apply(case_c, losses[id], x, id < 2 ? ids : mixp_detach(case_c, x), &d);
            if (r == MIXP_REDUCE_NONE) is_empty("loss", loss, id < 2 ? 1 : 2);
            else is_number("loss", loss, want);
            if (r == MIXP_REDUCE_NONE) continue;
            CHECK_INT(mixp_backward(case_c, loss), MIXP_OK);
        }
        loss = mixp_linear_cross_entropy_apply(case_c, no_rows(MIXP_F32, 0, 3), w, ids, &d);
        if (r == MIXP_REDUCE_NONE) is_empty("linear_cross_entropy", loss, 1);
        else is_number("linear_cross_entropy", loss, want);
        if (r != MIXP_REDUCE_NONE) CHECK_INT(mixp_backward(case_c, loss), MIXP_OK);
        x = mixp_linear(case_c, no_rows(MIXP_F32, 0, 3), w, NULL);
        loss = mixp_loss_apply(case_c, MIXP_OP_CROSS_ENTROPY, x, mixp_detach(case_c, x), &d);
        if (r != MIXP_REDUCE_NONE) is_number("probabilities", loss, want);
        if (r != MIXP_REDUCE_NONE) {
            const double *got = case_read(w->grad, 15);
            for (int i = 0; i < 15; i++) CHECK_NEAR(got[i], 0, 0);
        }
        variant_ok();
    }
}

static void variant_run_cases(void) {
    RUN(test_along_dims);
    RUN(test_smaller_indices);
    RUN(test_norms_of_dims);
    RUN(test_padded_embedding);
    RUN(test_dims_of_scalars);
    RUN(test_moves_of_integers);
    RUN(test_dropout_of_all);
    RUN(test_empty_values);
    RUN(test_empty_gradients);
    RUN(test_empty_losses);
    RUN(test_tangent_of_nll);
}
