/* loss_cases.h - losses with options, on the device of `case_context`: values and gradients beside
 * PyTorch's in f64 (tests/reference/losses.h), in f32, f16 and bf16; refusals. Included by
 * operator_cases.h. Where LOSS_STEP is k, every k-th case runs.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "reference/losses.h"
#ifndef LOSS_STEP
#  define LOSS_STEP 1
#endif

typedef struct loss_name { const char *name; mixp_op_id id; const float *x, *t; int x_count, t_count; } loss_name;

static const loss_name *loss_of(const char *name, int probs, int logs) {
    static const loss_name names[] = {
        { "cross_entropy", MIXP_OP_CROSS_ENTROPY, loss_x, loss_probs, LOSS_COUNT, LOSS_COUNT },
        { "nll", MIXP_OP_NLL, loss_x, NULL, LOSS_COUNT, 0 },
        { "linear_cross_entropy", MIXP_OP_LINEAR_CROSS_ENTROPY, loss_in, loss_w, 12, 15 },
        { "mse", MIXP_OP_MSE, loss_x, loss_other, LOSS_COUNT, LOSS_COUNT },
        { "l1", MIXP_OP_L1, loss_x, loss_other, LOSS_COUNT, LOSS_COUNT },
        { "smooth_l1", MIXP_OP_SMOOTH_L1, loss_x, loss_other, LOSS_COUNT, LOSS_COUNT },
        { "huber", MIXP_OP_HUBER, loss_x, loss_other, LOSS_COUNT, LOSS_COUNT },
        { "bce_with_logits", MIXP_OP_BCE_WITH_LOGITS, loss_x, loss_unit, LOSS_COUNT, LOSS_COUNT },
        { "bce", MIXP_OP_BCE, loss_unit, loss_probs, LOSS_COUNT, LOSS_COUNT },
        { "triplet_margin", MIXP_OP_COUNT, loss_x, loss_other, LOSS_COUNT, LOSS_COUNT },
        { "kl_div", MIXP_OP_KL_DIV, loss_x, loss_probs, LOSS_COUNT, LOSS_COUNT },
        { "kl_div", MIXP_OP_KL_DIV, loss_x, loss_other, LOSS_COUNT, LOSS_COUNT }
    };
    int i = 0;
    (void)probs;
    while (strcmp(names[i].name, name) != 0) i++;
    return &names[i + (logs != 0)];
}

static mixp_tensor *loss_tensor(mixp_dtype dtype, int64_t rows, int64_t cols, const float *values) {
    int64_t shape[2];
    shape[0] = rows;
    shape[1] = cols;
    return mixp_input(case_c, dtype, rows ? 2 : 1, rows ? shape : shape + 1,
                      values ? values : loss_mix);
}

/* A leaf with these numbers, rounded to dtype. */
static mixp_tensor *loss_leaf(mixp_dtype dtype, int64_t rows, int64_t cols, const float *values) {
    int64_t shape[2];
    shape[0] = rows;
    shape[1] = cols;
    return case_param(dtype, 2, shape, values);
}

static mixp_loss_desc loss_options(const loss_case *k, int64_t chunk) {
    mixp_loss_desc d;
    memset(&d, 0, sizeof d);
    d.reduction = k->reduction;
    d.chunk = chunk;
    if (k->options & WEIGHT) d.weight = loss_tensor(MIXP_F32, 0, LOSS_COLS, loss_classes);
    if (k->options & WEIGHT && strncmp(k->op, "bce", 3) == 0)
        d.weight = loss_tensor(MIXP_F32, LOSS_ROWS, LOSS_COLS, loss_weights);
    if (k->options & POS_WEIGHT) d.pos_weight = loss_tensor(MIXP_F32, 0, LOSS_COLS, loss_classes);
    if (k->options & BIAS) d.bias = loss_tensor(MIXP_F32, 0, LOSS_COLS, loss_b);
    if (k->options & SMOOTHING) d.smoothing = loss_smoothing;
    if (k->options & IGNORE) d.ignores = 1;
    d.ignore = loss_ignored;                    /* counts only with `ignores` */
    if (k->options & BOUND) d.bound = loss_bound;
    d.log_target = (k->options & LOG_TARGET) != 0;
    return d;
}

static mixp_tensor *loss_apply(const loss_case *k, const loss_name *l, mixp_tensor *x, mixp_tensor *t,
                               mixp_dtype dtype, int64_t chunk) {
    static const int64_t rows[1] = { LOSS_ROWS };
    mixp_loss_desc d = loss_options(k, chunk);
    mixp_tensor *ids = mixp_input(case_c, MIXP_I32, 1, rows, loss_ids), *third;
    if (l->id == MIXP_OP_LINEAR_CROSS_ENTROPY)
        return mixp_linear_cross_entropy_apply(case_c, x, t, ids, &d);
    if (l->id == MIXP_OP_COUNT) {
        third = mixp_cast(case_c, loss_tensor(MIXP_F32, LOSS_ROWS, LOSS_COLS, loss_third), dtype);
        return mixp_triplet_margin(case_c, x, t, third, k->options & MARGIN ? loss_margin : 1.0f,
                                   (k->options & SWAP) != 0, k->reduction);
    }
    if (l->id == MIXP_OP_NLL || (l->id == MIXP_OP_CROSS_ENTROPY && !(k->options & PROBS))) t = ids;
    return mixp_loss_apply(case_c, l->id, x, t, &d);
}

/* Beside recorded numbers: `units` roundings of dtype of a number of about 4. */
static void loss_near(const loss_case *k, const char *what, const mixp_tensor *t, int count,
                      const double *want, double slack) {
    double got[LOSS_COUNT];
    char name[96];
    int i;
    memset(got, 0, sizeof got);
    CHECK(t && t->count == count);
    if (!t || t->count != count) return;
    CHECK_INT(mixp_read(t, got, MIXP_F64, count), MIXP_OK);
    for (i = 0; i < count; i++) {
        snprintf(name, sizeof name, "%s %d, options %d: %s[%d]", k->op, (int)k->reduction, k->options, what, i);
        case_near(name, got[i], want[i], slack * (1.0 + fabs(want[i])));
    }
}

static mixp_tensor *loss_mixed(mixp_tensor *y) {
    float column[LOSS_ROWS];
    if (!y || y->rank == 0) return y;
    for (int i = 0; i < LOSS_ROWS; i++) column[i] = loss_mix[i * LOSS_COLS];
    mixp_tensor *mix = mixp_input(case_c, MIXP_F32, y->rank, y->shape, y->rank == 1 ? column : loss_mix);
    return mixp_sum(case_c, mixp_mul(case_c, y, mix), MIXP_ALL, 0);
}

/* slack: of the values, and of the gradients */
static void loss_check(const loss_case *k, mixp_dtype dtype, int64_t chunk, double slack) {
    const loss_name *l = loss_of(k->op, k->options & PROBS, k->options & LOG_TARGET);
    const int fused = l->id == MIXP_OP_LINEAR_CROSS_ENTROPY;
    const int scalar = k->reduction != MIXP_REDUCE_NONE;
    const int rows = fused || l->id == MIXP_OP_NLL || l->id == MIXP_OP_CROSS_ENTROPY || l->id == MIXP_OP_COUNT;
    const int count = scalar ? 1 : rows ? LOSS_ROWS : LOSS_COUNT;
    mixp_tensor *x, *t = NULL, *y;
    const char *why = "";
    case_c = case_context();
    x = loss_leaf(dtype, fused ? LOSS_ROWS : LOSS_ROWS, fused ? 3 : LOSS_COLS, l->x);
    if (l->t) t = loss_leaf(dtype, fused ? LOSS_COLS : LOSS_ROWS, fused ? 3 : LOSS_COLS, l->t);
    mixp_step_begin(case_c);
    y = loss_apply(k, l, x, t, dtype, chunk);
    CHECK(y && y->dtype == MIXP_F32);
    loss_near(k, "value", y, count, k->value, slack);
    mixp_backward(case_c, loss_mixed(y));
    loss_near(k, "dx", x->grad, l->x_count, k->dx, slack);
    if (t && (l->id != MIXP_OP_CROSS_ENTROPY || k->options & PROBS))
        loss_near(k, "dt", t->grad, l->t_count, k->dt, slack);
    CHECK_INT(mixp_context_error(case_c, &why), MIXP_OK);
    if (*why) TEST_SHOW("%s", why);
    mixp_context_free(case_c);
}

static void test_loss_options(void) {
    const int n = (int)(sizeof loss_cases / sizeof loss_cases[0]);
    for (int i = 0; i < n; i += LOSS_STEP) {
        const int fused = strcmp(loss_cases[i].op, "linear_cross_entropy") == 0;
        loss_check(&loss_cases[i], MIXP_F32, 0, 4e-6);
        if (fused) loss_check(&loss_cases[i], MIXP_F32, 3, 4e-6);
        loss_check(&loss_cases[i], MIXP_F16, fused ? 3 : 0, 4e-3);
        loss_check(&loss_cases[i], MIXP_BF16, fused ? 3 : 0, 3.2e-2);
    }
}

/* Under autocast results are f32; class weights keep their digits, and bce stays banned. */
static void test_loss_autocast(void) {
    const int64_t rows[1] = { LOSS_ROWS };
    mixp_loss_desc d;
    mixp_tensor *x, *w, *ids, *y = NULL;
    float square[LOSS_COLS * LOSS_COLS];
    for (int i = 0; i < LOSS_COLS * LOSS_COLS; i++) square[i] = loss_weights[i % LOSS_COUNT];
    memset(&d, 0, sizeof d);
    case_c = case_context();
    x = loss_leaf(MIXP_F32, LOSS_ROWS, LOSS_COLS, loss_x);
    w = loss_leaf(MIXP_F32, LOSS_COLS, LOSS_COLS, square);
    mixp_step_begin(case_c);
    ids = mixp_input(case_c, MIXP_I32, 1, rows, loss_ids);
    d.weight = loss_tensor(MIXP_F32, 0, LOSS_COLS, loss_classes);
    double plain = mixp_item(mixp_loss_apply(case_c, MIXP_OP_CROSS_ENTROPY, x, ids, &d));
    MIXP_AUTOCAST(case_c, MIXP_BF16) {
        double low = mixp_item(mixp_loss_apply(case_c, MIXP_OP_CROSS_ENTROPY, x, ids, &d));
        CHECK(plain == low);
        y = mixp_linear_cross_entropy_apply(case_c, x, w, ids, &d);
        CHECK(y && y->dtype == MIXP_F32);
        d.reduction = MIXP_REDUCE_NONE;
        y = mixp_loss_apply(case_c, MIXP_OP_CROSS_ENTROPY, mixp_linear(case_c, x, w, NULL), ids, &d);
        case_has(y, MIXP_F32, LOSS_ROWS);
        d.weight = loss_tensor(MIXP_F32, LOSS_ROWS, LOSS_COLS, loss_weights);
        y = mixp_loss_apply(case_c, MIXP_OP_BCE_WITH_LOGITS, x, x, &d);
        case_has(y, MIXP_F32, LOSS_COUNT);
        case_refused(mixp_loss_apply(case_c, MIXP_OP_BCE, x, x, &d), MIXP_ERR_BANNED, "bce");
    }
    mixp_context_free(case_c);
}

/* Chunks without weight: with smoothing their rows count in the sum. Class weights may be negative. */
static void test_loss_weightless_chunks(void) {
    static const int64_t rows[1] = { LOSS_ROWS };
    static const int32_t ids[LOSS_ROWS] = { 0, 0, 1, 0 };
    static const float weights[2][LOSS_COLS] = { { 0, 1, 2, 3, 4 }, { -1, -2, 0.5f, -3, 0.25f } };
    for (int i = 0; i < 2; i++) {
        mixp_loss_desc d;
        double whole, parts;
        memset(&d, 0, sizeof d);
        case_c = case_context();
        mixp_tensor *x = loss_leaf(MIXP_F32, LOSS_ROWS, 3, loss_in);
        mixp_tensor *w = loss_leaf(MIXP_F32, LOSS_COLS, 3, loss_w);
        mixp_step_begin(case_c);
        mixp_tensor *targets = mixp_input(case_c, MIXP_I32, 1, rows, ids);
        d.weight = loss_tensor(MIXP_F32, 0, LOSS_COLS, weights[i]);
        d.smoothing = 0.25f;
        whole = mixp_item(mixp_loss_apply(case_c, MIXP_OP_CROSS_ENTROPY, mixp_linear(case_c, x, w, NULL), targets, &d));
        CHECK(whole > 0 || whole < 0);
        d.chunk = 1;
        parts = mixp_item(mixp_linear_cross_entropy_apply(case_c, x, w, targets, &d));
        CHECK_NEAR(parts, whole, 1e-5 * fabs(whole));
        CHECK_INT(mixp_context_error(case_c, NULL), MIXP_OK);
        mixp_context_free(case_c);
    }
}

static void test_loss_refused(void) {
    const int64_t rows[1] = { LOSS_ROWS };
    mixp_loss_desc d, none;
    memset(&none, 0, sizeof none);
    case_c = case_context();
    mixp_tensor *x = loss_leaf(MIXP_F32, LOSS_ROWS, LOSS_COLS, loss_x);
    mixp_tensor *t = loss_leaf(MIXP_F32, LOSS_ROWS, LOSS_COLS, loss_probs);
    mixp_step_begin(case_c);
    mixp_tensor *ids = mixp_input(case_c, MIXP_I32, 1, rows, loss_ids);
    case_refused(mixp_loss_apply(case_c, MIXP_OP_ADD, x, t, NULL), MIXP_ERR_ARGUMENT, "not the id of a loss of two tensors");
    d = none;
    d.smoothing = 0.1f;
    case_refused(mixp_loss_apply(case_c, MIXP_OP_MSE, x, t, &d), MIXP_ERR_ARGUMENT, "mse: this loss has no option smoothing");
    d.smoothing = 1.5f;
    case_refused(mixp_loss_apply(case_c, MIXP_OP_CROSS_ENTROPY, x, ids, &d), MIXP_ERR_ARGUMENT, "smoothing is 1.5");
    case_refused(mixp_loss_apply(case_c, MIXP_OP_CROSS_ENTROPY, x, t, &d), MIXP_ERR_ARGUMENT, "smoothing is 1.5");
    d = none;
    d.reduction = (mixp_reduction)7;
    case_refused(mixp_loss_apply(case_c, MIXP_OP_MSE, x, t, &d), MIXP_ERR_ARGUMENT, "mse: reduction is 7");
    d.reduction = MIXP_REDUCE_BATCHMEAN;
    case_refused(mixp_loss_apply(case_c, MIXP_OP_MSE, x, t, &d), MIXP_ERR_ARGUMENT, "no option MIXP_REDUCE_BATCHMEAN");
    d = none;
    d.ignores = 1;
    case_refused(mixp_loss_apply(case_c, MIXP_OP_CROSS_ENTROPY, x, t, &d), MIXP_ERR_ARGUMENT, "have no option ignore");
    d = none;
    d.weight = loss_tensor(MIXP_F32, 0, 3, loss_classes);
    case_refused(mixp_loss_apply(case_c, MIXP_OP_CROSS_ENTROPY, x, ids, &d), MIXP_ERR_SHAPE, "weight is f32 [3]");
    case_refused(mixp_loss_apply(case_c, MIXP_OP_CROSS_ENTROPY, x, t, &d), MIXP_ERR_SHAPE, "weight is f32 [3]");
    case_refused(mixp_loss_apply(case_c, MIXP_OP_BCE_WITH_LOGITS, x, t, &d), MIXP_ERR_SHAPE, "weight does not fit");
    d.weight = x;
    case_refused(mixp_loss_apply(case_c, MIXP_OP_NLL, x, ids, &d), MIXP_ERR_SHAPE, "nll: weight");
    d.weight = mixp_sum(case_c, x, 0, 0);
    case_refused(mixp_loss_apply(case_c, MIXP_OP_NLL, x, ids, &d), MIXP_ERR_ARGUMENT, "class weights get none");
    CHECK(mixp_loss_apply(case_c, MIXP_OP_BCE_WITH_LOGITS, x, t, &d) != NULL);
    d = none;
    d.pos_weight = ids;
    case_refused(mixp_loss_apply(case_c, MIXP_OP_BCE_WITH_LOGITS, x, t, &d), MIXP_ERR_SHAPE, "pos_weight does not fit");
    d = none;
    d.bias = loss_tensor(MIXP_F32, 0, 3, loss_b);
    case_refused(mixp_linear_cross_entropy_apply(case_c, x, t, ids, &d), MIXP_ERR_SHAPE, "the bias must be");
    case_refused(mixp_loss_apply(case_c, MIXP_OP_CROSS_ENTROPY, x, mixp_transpose(case_c, t, 0, 1), NULL), MIXP_ERR_SHAPE,
                 "or probabilities of x's shape");
    case_refused(mixp_loss_apply(case_c, MIXP_OP_CROSS_ENTROPY, NULL, ids, NULL), MIXP_ERR_ARGUMENT, "input 0 is NULL");
    CHECK(mixp_loss_apply(NULL, MIXP_OP_MSE, x, t, NULL) == NULL);
    mixp_context_free(case_c);
}

static void loss_run_cases(void) {
    RUN(test_loss_options);
    RUN(test_loss_autocast);
    RUN(test_loss_weightless_chunks);
    RUN(test_loss_refused);
}
