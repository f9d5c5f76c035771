/* test_autocast.c - the dtype that each operator stores at every level; regions, the cast cache,
 * overrides, counts. The expected classes are those of PyTorch's CUDA autocast lists
 * (aten/src/ATen/autocast_mode.h).
 * SPDX-License-Identifier: MIT OR Unlicense */
#include "mixprec.h"
#include "test.h"

static mixp_context *ctx;
static mixp_tensor *w, *b;      /* f32 parameters: w[8,8], b[8] */
static int64_t mat[2] = { 8, 8 }, vec[1] = { 8 }, cube[3] = { 1, 8, 8 }, eight_ids[2] = { 1, 8 };
static int32_t index8[8] = { 0, 1, 2, 3, 4, 5, 6, 7 };

/* 1: input returns parameters, which have gradients, one for each dtype and rank. */
static int inputs_are_trained;
static mixp_tensor *trained[3][MIXP_MAX_RANK];

static mixp_tensor *constant(mixp_dtype dtype, int rank, const int64_t *shape) {
    mixp_tensor *t = mixp_activation(ctx, dtype, rank, shape);
    mixp_fill(t, 0.5);
    return t;
}

static mixp_tensor *input(mixp_dtype dtype, int rank, const int64_t *shape) {
    mixp_tensor **t = &trained[dtype == MIXP_F16 ? 1 : dtype == MIXP_BF16 ? 2 : 0][rank];
    if (!inputs_are_trained) return constant(dtype, rank, shape);
    if (!*t) *t = mixp_param(ctx, NULL, dtype, rank, shape);
    mixp_fill(*t, 0.5);
    return *t;
}

/* One operator on an input of dtype d. */
/* Of w and b, which are f32: low parameters, for level 3. */
static mixp_tensor *w_low[2], *b_low[2];
static mixp_tensor *fitting(mixp_tensor *f32, mixp_tensor *const *low) {
    mixp_autocast now = mixp_autocast_current(ctx);
    return now.level == 3 ? low[now.dtype == MIXP_BF16] : f32;
}

static mixp_tensor *run(mixp_op_id id, mixp_dtype d) {
    mixp_tensor *x = input(d, 2, mat), *y = constant(d, 2, mat), *pair[2];
    mixp_tensor *n = mixp_input(ctx, MIXP_I32, 1, vec, index8);
    mixp_tensor *mask = mixp_reshape(ctx, n, 2, eight_ids);
    mixp_rope_desc turn;
    const int64_t qkv[3] = { 1, 8, 24 }, wide[3] = { 2, -1, -1 };
    const int turned[2] = { 1, 0 };
    memset(&turn, 0, sizeof turn);
    turn.head_dim = 4;
    pair[0] = x;
    pair[1] = y;
    switch (id) {
    case MIXP_OP_LINEAR:          return mixp_linear(ctx, x, fitting(w, w_low), fitting(b, b_low));
    case MIXP_OP_MATMUL:          return mixp_matmul(ctx, x, y, 0, 0);
    case MIXP_OP_ATTENTION:       return mixp_attention(ctx, input(d, 3, qkv), 2, 1, 0.0f);
    case MIXP_OP_ADD:             return mixp_add(ctx, x, y);
    case MIXP_OP_SUB:             return mixp_sub(ctx, x, y);
    case MIXP_OP_MUL:             return mixp_mul(ctx, x, y);
    case MIXP_OP_DIV:             return mixp_div(ctx, x, y);
    case MIXP_OP_SCALE:           return mixp_scale(ctx, x, 2.0f);
    case MIXP_OP_RELU:            return mixp_relu(ctx, x);
    case MIXP_OP_GELU:            return mixp_gelu(ctx, x);
    case MIXP_OP_GELU_TANH:       return mixp_gelu_tanh(ctx, x);
    case MIXP_OP_SILU:            return mixp_silu(ctx, x);
    case MIXP_OP_TANH:            return mixp_tanh(ctx, x);
    case MIXP_OP_SIGMOID:         return mixp_sigmoid(ctx, x);
    case MIXP_OP_SQRT:            return mixp_sqrt(ctx, x);
    case MIXP_OP_EXP:             return mixp_exp(ctx, x);
    case MIXP_OP_LOG:             return mixp_log(ctx, x);
    case MIXP_OP_POW:             return mixp_pow(ctx, x, 2.0f);
    case MIXP_OP_SUM:             return mixp_sum(ctx, x, 0, 0);
    case MIXP_OP_MEAN:            return mixp_mean(ctx, x, 0, 0);
    case MIXP_OP_SOFTMAX:         return mixp_softmax(ctx, x);
    case MIXP_OP_LOG_SOFTMAX:     return mixp_log_softmax(ctx, x);
    case MIXP_OP_LAYER_NORM:      return mixp_layer_norm(ctx, x, b, b, 1e-5f);
    case MIXP_OP_RMS_NORM:        return mixp_rms_norm(ctx, x, b, 1e-5f);
    case MIXP_OP_EMBEDDING:       return mixp_embedding(ctx, x, n);
    case MIXP_OP_DROPOUT:         return mixp_dropout(ctx, x, 0.5f, 1);
    case MIXP_OP_CROSS_ENTROPY:   return mixp_cross_entropy(ctx, x, n, MIXP_IGNORE);
    case MIXP_OP_MSE:             return mixp_mse(ctx, x, y);
    case MIXP_OP_BCE_WITH_LOGITS: return mixp_bce_with_logits(ctx, x, y);
    case MIXP_OP_BCE:             return mixp_bce(ctx, x, y);
    case MIXP_OP_CAST:            return mixp_cast(ctx, x, MIXP_F32);
    case MIXP_OP_RESHAPE:         return mixp_reshape(ctx, x, 3, cube);
    case MIXP_OP_TRANSPOSE:       return mixp_transpose(ctx, x, 0, 1);
    case MIXP_OP_CONCAT:          return mixp_concat(ctx, 2, pair, 0);
    case MIXP_OP_SLICE:           return mixp_slice(ctx, x, 1, 2, 3);
    case MIXP_OP_NEG:             return mixp_neg(ctx, x);
    case MIXP_OP_ABS:             return mixp_abs(ctx, x);
    case MIXP_OP_SIN:             return mixp_sin(ctx, x);
    case MIXP_OP_COS:             return mixp_cos(ctx, x);
    case MIXP_OP_CLAMP:           return mixp_clamp(ctx, x, -1.0f, 1.0f);
    case MIXP_OP_RELU_SQUARED:    return mixp_relu_squared(ctx, x);
    case MIXP_OP_SOFT_CAP:        return mixp_soft_cap(ctx, x, 30.0f);
    case MIXP_OP_MAXIMUM:         return mixp_maximum(ctx, x, y);
    case MIXP_OP_MINIMUM:         return mixp_minimum(ctx, x, y);
    case MIXP_OP_SWIGLU:          return mixp_swiglu(ctx, x, y);
    case MIXP_OP_SWIGLU_PACKED:   return mixp_swiglu_packed(ctx, x);
    case MIXP_OP_L1:              return mixp_l1(ctx, x, y);
    case MIXP_OP_SMOOTH_L1:       return mixp_smooth_l1(ctx, x, y, 1.0f);
    case MIXP_OP_HUBER:           return mixp_huber(ctx, x, y, 1.0f);
    case MIXP_OP_KL_DIV:          return mixp_kl_div(ctx, x, y, 0);
    case MIXP_OP_NLL:             return mixp_nll(ctx, x, n, MIXP_IGNORE);
    case MIXP_OP_LINEAR_CROSS_ENTROPY:
        return mixp_linear_cross_entropy(ctx, x, fitting(w, w_low), n, MIXP_IGNORE, 0);
    case MIXP_OP_MAX:             return mixp_max(ctx, x, 0, 0);
    case MIXP_OP_ARGMAX:          return mixp_argmax(ctx, x, 0, 0);
    case MIXP_OP_GATHER:          return mixp_gather(ctx, x, 0, mask);
    case MIXP_OP_WHERE:           return mixp_where(ctx, mask, x, y);
    case MIXP_OP_MASKED_FILL:     return mixp_masked_fill(ctx, x, mask, 0.0f);
    case MIXP_OP_ROPE:            return mixp_rope(ctx, x, &turn);
    case MIXP_OP_DETACH:          return mixp_detach(ctx, x);
    case MIXP_OP_SQUARE:          return mixp_square(ctx, x);
    case MIXP_OP_RECIPROCAL:      return mixp_reciprocal(ctx, x);
    case MIXP_OP_LOG1P:           return mixp_log1p(ctx, x);
    case MIXP_OP_EXPM1:           return mixp_expm1(ctx, x);
    case MIXP_OP_ERF:             return mixp_erf(ctx, x);
    case MIXP_OP_SOFTPLUS:        return mixp_softplus(ctx, x, 1.0f);
    case MIXP_OP_LEAKY_RELU:      return mixp_leaky_relu(ctx, x, 0.01f);
    case MIXP_OP_ELU:             return mixp_elu(ctx, x, 1.0f);
    case MIXP_OP_ADD_SCALAR:      return mixp_add_scalar(ctx, x, 1.0f);
    case MIXP_OP_RSUB:            return mixp_rsub(ctx, x, 1.0f);
    case MIXP_OP_PERMUTE:         return mixp_permute(ctx, x, 2, turned);
    case MIXP_OP_FLIP:            return mixp_flip(ctx, x, 1);
    case MIXP_OP_EXPAND:          return mixp_expand(ctx, x, 3, wide);
    case MIXP_OP_PAD:             return mixp_pad(ctx, x, 0, 1, 2, 0.0f);
    case MIXP_OP_STACK:           return mixp_stack(ctx, 2, pair, 0);
    case MIXP_OP_EQ:              return mixp_eq(ctx, x, y);
    case MIXP_OP_NE:              return mixp_ne(ctx, x, y);
    case MIXP_OP_GT:              return mixp_gt(ctx, x, y);
    case MIXP_OP_GE:              return mixp_ge(ctx, x, y);
    case MIXP_OP_LT:              return mixp_lt(ctx, x, y);
    case MIXP_OP_LE:              return mixp_le(ctx, x, y);
    case MIXP_OP_PROD:            return mixp_prod(ctx, x, 0, 0);
    case MIXP_OP_CUMSUM:          return mixp_cumsum(ctx, x, 0);
    case MIXP_OP_ONE_HOT:         return mixp_one_hot(ctx, n, 8, MIXP_I32);
    case MIXP_OP_SCATTER_ADD:     return mixp_scatter_add(ctx, x, 0, mask, mixp_slice(ctx, y, 0, 0, 1));
    case MIXP_OP_TOPK:            return mixp_topk(ctx, x, 1, -1, 1, NULL);
    case MIXP_OP_SORT:            return mixp_sort(ctx, x, -1, 1, NULL);
    case MIXP_OP_INDEX_ADD:       return mixp_index_add(ctx, x, 0, mixp_slice(ctx, n, 0, 0, 1), mixp_slice(ctx, y, 0, 0, 1));
    case MIXP_OP_LOG2:            return mixp_log2(ctx, x);
    case MIXP_OP_LOG10:           return mixp_log10(ctx, x);
    case MIXP_OP_ACOS:            return mixp_acos(ctx, x);
    case MIXP_OP_ASIN:            return mixp_asin(ctx, x);
    case MIXP_OP_TAN:             return mixp_tan(ctx, x);
    case MIXP_OP_SINH:            return mixp_sinh(ctx, x);
    case MIXP_OP_COSH:            return mixp_cosh(ctx, x);
    case MIXP_OP_ERFINV:          return mixp_erfinv(ctx, x);
    case MIXP_OP_POWER:           return mixp_power(ctx, x, y);
    case MIXP_OP_ATAN2:           return mixp_atan2(ctx, x, y);
    case MIXP_OP_PRELU:           return mixp_prelu(ctx, x, mixp_full(ctx, d, 0, NULL, 0.25));
    case MIXP_OP_COUNT: break;
    }
    return NULL;
}

/* L: the region's dtype; F: f32; K: as the input; I: i32; B: u8. At level 2 every array is low but scalars
 * and what was asked for by name are not. */
typedef struct expected { mixp_op_id id; char level1, level2; } expected;
static const expected table[] = {
    { MIXP_OP_LINEAR, 'L', 'L' }, { MIXP_OP_MATMUL, 'L', 'L' }, { MIXP_OP_ATTENTION, 'L', 'L' },
    { MIXP_OP_ADD, 'K', 'L' }, { MIXP_OP_SUB, 'K', 'L' }, { MIXP_OP_MUL, 'K', 'L' }, { MIXP_OP_DIV, 'K', 'L' },
    { MIXP_OP_SCALE, 'K', 'L' }, { MIXP_OP_RELU, 'K', 'L' }, { MIXP_OP_GELU, 'K', 'L' },
    { MIXP_OP_GELU_TANH, 'K', 'L' }, { MIXP_OP_SILU, 'K', 'L' }, { MIXP_OP_TANH, 'K', 'L' },
    { MIXP_OP_SIGMOID, 'K', 'L' }, { MIXP_OP_SQRT, 'K', 'L' }, { MIXP_OP_EXP, 'F', 'L' },
    { MIXP_OP_LOG, 'F', 'L' }, { MIXP_OP_POW, 'F', 'L' }, { MIXP_OP_SUM, 'F', 'L' }, { MIXP_OP_MEAN, 'K', 'L' },
    { MIXP_OP_SOFTMAX, 'F', 'L' }, { MIXP_OP_LOG_SOFTMAX, 'F', 'L' }, { MIXP_OP_LAYER_NORM, 'F', 'L' },
    { MIXP_OP_RMS_NORM, 'F', 'L' }, { MIXP_OP_EMBEDDING, 'K', 'L' }, { MIXP_OP_DROPOUT, 'K', 'L' },
    { MIXP_OP_CROSS_ENTROPY, 'F', 'F' }, { MIXP_OP_MSE, 'F', 'F' }, { MIXP_OP_BCE_WITH_LOGITS, 'F', 'F' },
    { MIXP_OP_CAST, 'F', 'F' }, { MIXP_OP_RESHAPE, 'K', 'K' }, { MIXP_OP_TRANSPOSE, 'K', 'L' },
    { MIXP_OP_CONCAT, 'K', 'L' }, { MIXP_OP_SLICE, 'K', 'L' }, { MIXP_OP_NEG, 'K', 'L' },
    { MIXP_OP_ABS, 'K', 'L' }, { MIXP_OP_SIN, 'K', 'L' }, { MIXP_OP_COS, 'K', 'L' },
    { MIXP_OP_CLAMP, 'K', 'L' }, { MIXP_OP_RELU_SQUARED, 'K', 'L' }, { MIXP_OP_SOFT_CAP, 'K', 'L' },
    { MIXP_OP_MAXIMUM, 'K', 'L' }, { MIXP_OP_MINIMUM, 'K', 'L' }, { MIXP_OP_SWIGLU, 'K', 'L' },
    { MIXP_OP_SWIGLU_PACKED, 'K', 'L' }, { MIXP_OP_L1, 'F', 'F' }, { MIXP_OP_SMOOTH_L1, 'F', 'F' },
    { MIXP_OP_HUBER, 'F', 'F' }, { MIXP_OP_KL_DIV, 'F', 'F' }, { MIXP_OP_MAX, 'K', 'L' },
    { MIXP_OP_ARGMAX, 'I', 'I' }, { MIXP_OP_GATHER, 'K', 'L' }, { MIXP_OP_WHERE, 'K', 'L' },
    { MIXP_OP_MASKED_FILL, 'K', 'L' }, { MIXP_OP_ROPE, 'K', 'L' }, { MIXP_OP_DETACH, 'K', 'K' },
    { MIXP_OP_LINEAR_CROSS_ENTROPY, 'F', 'F' }, { MIXP_OP_NLL, 'F', 'F' },
    { MIXP_OP_SQUARE, 'F', 'L' }, { MIXP_OP_RECIPROCAL, 'F', 'L' }, { MIXP_OP_LOG1P, 'F', 'L' },
    { MIXP_OP_EXPM1, 'F', 'L' }, { MIXP_OP_ERF, 'K', 'L' }, { MIXP_OP_SOFTPLUS, 'F', 'L' },
    { MIXP_OP_LEAKY_RELU, 'K', 'L' }, { MIXP_OP_ELU, 'K', 'L' }, { MIXP_OP_ADD_SCALAR, 'K', 'L' },
    { MIXP_OP_RSUB, 'K', 'L' }, { MIXP_OP_PERMUTE, 'K', 'L' }, { MIXP_OP_FLIP, 'K', 'L' },
    { MIXP_OP_EXPAND, 'K', 'L' }, { MIXP_OP_PAD, 'K', 'L' }, { MIXP_OP_STACK, 'K', 'L' },
    { MIXP_OP_EQ, 'B', 'B' }, { MIXP_OP_NE, 'B', 'B' }, { MIXP_OP_GT, 'B', 'B' }, { MIXP_OP_GE, 'B', 'B' },
    { MIXP_OP_LT, 'B', 'B' }, { MIXP_OP_LE, 'B', 'B' }, { MIXP_OP_PROD, 'F', 'L' }, { MIXP_OP_CUMSUM, 'F', 'L' },
    { MIXP_OP_ONE_HOT, 'I', 'I' }, { MIXP_OP_SCATTER_ADD, 'K', 'L' }, { MIXP_OP_TOPK, 'K', 'L' },
    { MIXP_OP_SORT, 'K', 'L' }, { MIXP_OP_INDEX_ADD, 'K', 'L' },
    { MIXP_OP_LOG2, 'F', 'L' }, { MIXP_OP_LOG10, 'F', 'L' }, { MIXP_OP_ACOS, 'F', 'L' },
    { MIXP_OP_ASIN, 'F', 'L' }, { MIXP_OP_TAN, 'F', 'L' }, { MIXP_OP_SINH, 'F', 'L' },
    { MIXP_OP_COSH, 'F', 'L' }, { MIXP_OP_ERFINV, 'F', 'L' }, { MIXP_OP_POWER, 'F', 'L' },
    { MIXP_OP_ATAN2, 'K', 'L' }, { MIXP_OP_PRELU, 'L', 'L' }
};

static mixp_dtype want(char rule, mixp_dtype in, mixp_dtype region) {
    if (rule == 'I' || rule == 'B') return rule == 'I' ? MIXP_I32 : MIXP_U8;
    return rule == 'L' ? region : rule == 'F' ? MIXP_F32 : in;
}

static void test_dtype_of_every_operator(void) {
    static const mixp_dtype inputs[3] = { MIXP_F32, MIXP_F16, MIXP_BF16 };
    unsigned i, d, r;
    int level;
    CHECK_INT(sizeof table / sizeof table[0], MIXP_OP_COUNT - 1);   /* all but bce */
    for (level = 1; level <= 3; level++)
        for (r = 1; r < 3; r++)
            for (d = 0; d < 3; d++)
                for (i = 0; i < sizeof table / sizeof table[0]; i++) {
                    mixp_tensor *y = NULL;
                    mixp_dtype region = inputs[r], in = inputs[d], w1;
                    mixp_step_begin(ctx);
                    mixp_autocast_set_level(ctx, level);
                    MIXP_AUTOCAST(ctx, region) { y = run(table[i].id, in); }
                    w1 = want(level == 1 ? table[i].level1 : table[i].level2, in, region);
                    if (!y || y->dtype != w1) {
                        test_bad++;
                        TEST_SHOW("%s level %d region %s input %s: %s, not %s",
                                  mixp_op_builtin(table[i].id)->name, level, mixp_dtype_name(region),
                                  mixp_dtype_name(in), y ? mixp_dtype_name(y->dtype) : "NULL", mixp_dtype_name(w1));
                    }
                }
    mixp_autocast_set_level(ctx, 1);
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
}

static void test_outside_of_regions_nothing_changes(void) {
    unsigned i;
    mixp_step_begin(ctx);
    for (i = 0; i < sizeof table / sizeof table[0]; i++) {
        mixp_tensor *y = run(table[i].id, MIXP_F16);
        int is_f32 = table[i].id == MIXP_OP_CAST || (y && y->rank == 0);    /* losses are f32 */
        mixp_dtype real = is_f32 ? MIXP_F32 : MIXP_F16;
        CHECK(y && y->dtype == want(table[i].level1 == 'F' ? 'K' : table[i].level1, real, real));
    }
}

static void test_promotion_takes_the_widest(void) {
    mixp_tensor *h, *g, *f;
    mixp_step_begin(ctx);
    h = input(MIXP_F16, 2, mat);
    g = input(MIXP_BF16, 2, mat);
    f = input(MIXP_F32, 2, mat);
    MIXP_AUTOCAST(ctx, MIXP_F16) {
        CHECK_INT(mixp_add(ctx, h, f)->dtype, MIXP_F32);
        CHECK_INT(mixp_add(ctx, h, g)->dtype, MIXP_F32);
        CHECK_INT(mixp_mul(ctx, h, h)->dtype, MIXP_F16);
    }
}

static void test_regions_nest_and_restore(void) {
    mixp_autocast off = { MIXP_F32, 0, NULL };
    mixp_dtype seen[5] = { MIXP_I32, MIXP_I32, MIXP_I32, MIXP_I32, MIXP_I32 };
    off.dtype = MIXP_F32;
    off.level = 1;
    mixp_step_begin(ctx);
    MIXP_AUTOCAST(ctx, MIXP_F16) {
        seen[0] = run(MIXP_OP_MATMUL, MIXP_F32)->dtype;
        MIXP_AUTOCAST(ctx, MIXP_BF16) { seen[1] = run(MIXP_OP_MATMUL, MIXP_F32)->dtype; }
        mixp_autocast_push(ctx, &off);
        seen[2] = run(MIXP_OP_MATMUL, MIXP_F32)->dtype;
        mixp_autocast_pop(ctx);
        seen[3] = run(MIXP_OP_MATMUL, MIXP_F32)->dtype;
    }
    seen[4] = run(MIXP_OP_MATMUL, MIXP_F32)->dtype;
    CHECK_INT(seen[0], MIXP_F16);
    CHECK_INT(seen[1], MIXP_BF16);
    CHECK_INT(seen[2], MIXP_F32);
    CHECK_INT(seen[3], MIXP_F16);
    CHECK_INT(seen[4], MIXP_F32);
    CHECK_INT(mixp_autocast_current(ctx).dtype, MIXP_F32);
}

static mixp_tensor *call_me(mixp_context *c, void *user) {
    mixp_tensor *y = mixp_matmul(c, (mixp_tensor *)user, w, 0, 0);
    mixp_autocast_enter(c, MIXP_BF16);      /* left open: the call form closes it */
    return y;
}

static void left_by_return(void) {
    MIXP_AUTOCAST(ctx, MIXP_F16) { return; }
}

static void left_by_break(void) {
    MIXP_AUTOCAST(ctx, MIXP_F16) { break; }
}

static void left_by_goto(void) {
    MIXP_AUTOCAST(ctx, MIXP_F16) { goto out; }
out:
    return;
}

static void no_grad_left_by_return(void) {
    MIXP_NO_GRAD(ctx) { return; }
}

static void no_grad_left_by_break(void) {
    MIXP_NO_GRAD(ctx) { break; }
}

static void no_grad_left_by_goto(void) {
    MIXP_NO_GRAD(ctx) { goto out; }
out:
    return;
}

/* Is a product with the parameter w recorded, so that a backward pass can start from it? */
static int is_recorded(void) {
    mixp_tensor *loss = mixp_sum(ctx, mixp_matmul(ctx, input(MIXP_F32, 2, mat), w, 0, 0), MIXP_ALL, 0);
    mixp_result r = mixp_backward(ctx, loss);
    mixp_context_clear_error(ctx);
    return r == MIXP_OK;
}

static void test_blocks_left_open_are_told_and_closed(void) {
    static void (*const leave[6])(void) = { left_by_return, left_by_break, left_by_goto,
        no_grad_left_by_return, no_grad_left_by_break, no_grad_left_by_goto };
    const char *why = "";
    int i;
    for (i = 0; i < 6; i++) {
        CHECK_INT(mixp_step_begin(ctx), MIXP_OK);
        leave[i]();
        CHECK_INT(mixp_step_begin(ctx), MIXP_ERR_ORDER);
        mixp_context_error(ctx, &why);
        CHECK_TEXT(why, i < 3 ? "MIXP_AUTOCAST" : "MIXP_NO_GRAD");
        mixp_context_clear_error(ctx);
        CHECK_INT(mixp_autocast_current(ctx).dtype, MIXP_F32);
        CHECK(is_recorded());
    }
    /* A step begun within a block: the same. */
    MIXP_NO_GRAD(ctx) { CHECK_INT(mixp_step_begin(ctx), MIXP_ERR_ORDER); }
    mixp_context_error(ctx, &why);
    CHECK_TEXT(why, "around a loop of steps, use mixp_no_grad_open");
    mixp_context_clear_error(ctx);
    CHECK_INT(mixp_step_begin(ctx), MIXP_OK);
}

/* continue ends the block, as the manual says: the rest of the loop's round is run. */
static void test_continue_ends_the_block_alone(void) {
    int i, after = 0;
    mixp_step_begin(ctx);
    for (i = 0; i < 3; i++) {
        MIXP_AUTOCAST(ctx, MIXP_F16) { if (i == 1) continue; }
        MIXP_NO_GRAD(ctx) { if (i == 1) continue; }
        after++;
    }
    CHECK_INT(after, 3);
    CHECK(is_recorded());
    CHECK_INT(mixp_step_begin(ctx), MIXP_OK);
}

static void test_blocks_on_one_line(void) {
    mixp_dtype seen = MIXP_I32;
    mixp_step_begin(ctx);
    MIXP_AUTOCAST(ctx, MIXP_BF16) MIXP_NO_GRAD(ctx) seen = run(MIXP_OP_MATMUL, MIXP_F32)->dtype;
    CHECK_INT(seen, MIXP_BF16);
    MIXP_NO_GRAD(ctx) { MIXP_AUTOCAST(ctx, MIXP_F16) { seen = run(MIXP_OP_MATMUL, MIXP_F32)->dtype; } CHECK(!is_recorded()); }
    CHECK_INT(seen, MIXP_F16);
    CHECK(is_recorded());
    CHECK_INT(mixp_step_begin(ctx), MIXP_OK);
}

/* What a block finds open at its end, it closes: a push without a pop is no leak. */
static void test_a_block_closes_what_was_pushed_in_it(void) {
    mixp_autocast region = { MIXP_F32, 0, NULL };
    region.dtype = MIXP_BF16;
    region.level = 1;
    mixp_step_begin(ctx);
    MIXP_AUTOCAST(ctx, MIXP_F16) {
        MIXP_NO_GRAD(ctx) {
            CHECK_INT(mixp_autocast_push(ctx, &region), MIXP_OK);
            CHECK(!is_recorded());
        }
        CHECK_INT(mixp_autocast_current(ctx).dtype, MIXP_F16);
        CHECK(is_recorded());
    }
    CHECK_INT(mixp_autocast_current(ctx).dtype, MIXP_F32);
    CHECK_INT(mixp_step_begin(ctx), MIXP_OK);
}

/* Regions by number, for those who cannot use blocks: steps may begin in them. */
static void test_open_and_close(void) {
    int none, one, two;
    mixp_step_begin(ctx);
    none = mixp_no_grad_open(ctx);
    one = mixp_autocast_open(ctx, MIXP_F16);
    two = mixp_autocast_open(ctx, MIXP_BF16);
    CHECK_INT(mixp_autocast_current(ctx).dtype, MIXP_BF16);
    CHECK_INT(mixp_autocast_pop(ctx), MIXP_ERR_ORDER);
    mixp_context_clear_error(ctx);
    CHECK_INT(mixp_step_begin(ctx), MIXP_OK);
    mixp_autocast_close(ctx, two);
    CHECK_INT(mixp_autocast_current(ctx).dtype, MIXP_F16);
    mixp_autocast_close(ctx, two);                      /* twice: nothing more */
    CHECK_INT(mixp_autocast_current(ctx).dtype, MIXP_F16);
    CHECK(!is_recorded());
    mixp_autocast_close(ctx, none);                     /* all that was opened since */
    mixp_autocast_close(ctx, one);
    CHECK_INT(mixp_autocast_current(ctx).dtype, MIXP_F32);
    CHECK(is_recorded());
    CHECK_INT(mixp_autocast_open(NULL, MIXP_F16), -1);
    CHECK_INT(mixp_no_grad_open(NULL), -1);
    mixp_autocast_close(ctx, -1);
    mixp_autocast_close(NULL, 0);
}

static void test_call_form_and_blocks_left_open(void) {
    const char *why = "";
    mixp_tensor *y;
    mixp_step_begin(ctx);
    y = mixp_autocast_call(ctx, MIXP_F16, call_me, input(MIXP_F32, 2, mat));
    CHECK(y && y->dtype == MIXP_F16);
    CHECK_INT(mixp_autocast_current(ctx).dtype, MIXP_F32);
    CHECK_INT(mixp_step_begin(ctx), MIXP_OK);
    left_by_return();
    CHECK_INT(mixp_autocast_current(ctx).dtype, MIXP_F16);
    CHECK_INT(mixp_step_begin(ctx), MIXP_ERR_ORDER);
    mixp_context_error(ctx, &why);
    CHECK_TEXT(why, "MIXP_AUTOCAST");
    CHECK_INT(mixp_autocast_current(ctx).dtype, MIXP_F32);
    mixp_context_clear_error(ctx);
    CHECK_INT(mixp_autocast_pop(ctx), MIXP_ERR_ORDER);
    mixp_context_clear_error(ctx);
}

static void test_bad_regions(void) {
    mixp_autocast r = { MIXP_F32, 0, NULL };
    int i;
    r.dtype = MIXP_I32;
    r.level = 1;
    CHECK_INT(mixp_autocast_push(ctx, &r), MIXP_ERR_ARGUMENT);
    mixp_context_clear_error(ctx);
    r.dtype = MIXP_F16;
    r.level = 4;
    CHECK_INT(mixp_autocast_push(ctx, &r), MIXP_ERR_ARGUMENT);
    mixp_context_clear_error(ctx);
    CHECK_INT(mixp_autocast_push(ctx, NULL), MIXP_ERR_ARGUMENT);
    mixp_context_clear_error(ctx);
    CHECK_INT(mixp_autocast_pop(ctx), MIXP_ERR_ORDER);      /* a refused push opens nothing */
    mixp_context_clear_error(ctx);
    CHECK_INT(mixp_autocast_set_level(ctx, -1), MIXP_ERR_ARGUMENT);
    mixp_context_clear_error(ctx);
    CHECK_INT(mixp_autocast_current(ctx).dtype, MIXP_F32);
    for (i = 0; i < 100; i++) mixp_autocast_enter(ctx, MIXP_F16);   /* too deep: an error, no crash */
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_ERR_ARGUMENT);
    for (i = 0; i < 100; i++) mixp_autocast_leave(ctx);
    CHECK_INT(mixp_autocast_current(ctx).dtype, MIXP_F32);
    mixp_context_clear_error(ctx);
}

static void test_banned_and_override(void) {
    const char *why = "";
    mixp_tensor *y = NULL;
    mixp_step_begin(ctx);
    CHECK(run(MIXP_OP_BCE, MIXP_F32) != NULL);
    MIXP_AUTOCAST(ctx, MIXP_F16) { y = run(MIXP_OP_BCE, MIXP_F16); }
    CHECK(y == NULL);
    CHECK_INT(mixp_context_error(ctx, &why), MIXP_ERR_BANNED);
    CHECK_TEXT(why, "mixp_bce_with_logits");
    mixp_context_clear_error(ctx);
    CHECK_INT(mixp_autocast_override(ctx, mixp_op_builtin(MIXP_OP_BCE), MIXP_CLASS_F32), MIXP_OK);
    MIXP_AUTOCAST(ctx, MIXP_F16) { y = run(MIXP_OP_BCE, MIXP_F16); }
    CHECK(y && y->dtype == MIXP_F32);
    CHECK_INT(mixp_autocast_override(ctx, mixp_op_builtin(MIXP_OP_BCE), MIXP_CLASS_BANNED), MIXP_OK);
    CHECK_INT(mixp_autocast_override(ctx, mixp_op_builtin(MIXP_OP_GELU), MIXP_CLASS_F32), MIXP_OK);
    MIXP_AUTOCAST(ctx, MIXP_F16) { y = run(MIXP_OP_GELU, MIXP_F16); }
    CHECK(y && y->dtype == MIXP_F32);
    CHECK_INT(mixp_autocast_override(ctx, mixp_op_builtin(MIXP_OP_GELU), MIXP_CLASS_KEEP), MIXP_OK);
    CHECK_INT(mixp_autocast_override(ctx, NULL, MIXP_CLASS_KEEP), MIXP_ERR_ARGUMENT);
    mixp_context_clear_error(ctx);
}

/* Does the operator read f32 parameters? */
static int reads_f32(mixp_op_id id) { return id == MIXP_OP_LINEAR || id == MIXP_OP_LAYER_NORM || id == MIXP_OP_RMS_NORM; }

/* The dtype of a result at level 1 in a region of f16: what the class's line in the header says. A result that
 * is no real number, a view, and a loss keep their dtype. */
static mixp_dtype want_of_class(const expected *row, mixp_op_class cls, mixp_dtype in) {
    const int fixed = row->level2 != 'L';
    if (row->id == MIXP_OP_CAST) return MIXP_F32;
    if (row->id == MIXP_OP_TOPK || row->id == MIXP_OP_SORT) return in;     /* gather reads the values */
    if (cls == MIXP_CLASS_ALL_F32 && fixed && row->level2 == 'K') return MIXP_F32;
    if (cls == MIXP_CLASS_LOW && row->level2 == 'K') return MIXP_F16;
    if (fixed) return want(row->level2, in, MIXP_F16);
    if (cls == MIXP_CLASS_LOW || cls == MIXP_CLASS_LOW_OUT) return MIXP_F16;
    if (cls == MIXP_CLASS_PROMOTE && reads_f32(row->id)) return MIXP_F32;
    return cls == MIXP_CLASS_KEEP || cls == MIXP_CLASS_PROMOTE ? in : MIXP_F32;
}

/* Are all numbers of t finite? */
static int finite_numbers(const mixp_tensor *t) {
    static double v[256];
    int64_t i;
    if (!t || t->count > 256 || mixp_read(t, v, MIXP_F64, t->count) != MIXP_OK) return 0;
    for (i = 0; i < t->count; i++)
        if (!(v[i] - v[i] == 0.0)) return 0;
    return 1;
}

/* One forward and one backward of the operator with this class. Returns 0 if the result's dtype, its numbers or
 * the gradient of the first input are wrong. */
static int runs_with_class(const expected *row, mixp_op_class cls, mixp_dtype in) {
    const mixp_op *op = mixp_op_builtin(row->id);
    mixp_tensor *x = input(in, 2, mat), *y = NULL;
    mixp_result r;
    int good;
    mixp_step_begin(ctx);
    CHECK_INT(mixp_autocast_override(ctx, op, cls), MIXP_OK);
    MIXP_AUTOCAST(ctx, MIXP_F16) { y = run(row->id, in); }
    CHECK_INT(mixp_autocast_override(ctx, op, op->cls), MIXP_OK);
    r = mixp_context_error(ctx, NULL);
    mixp_context_clear_error(ctx);
    if (cls == MIXP_CLASS_BANNED && row->id != MIXP_OP_CAST) return !y && r == MIXP_ERR_BANNED;
    good = y && r == MIXP_OK && y->dtype == want_of_class(row, cls, in);
    if (!good || (y->dtype != MIXP_F32 && y->dtype != MIXP_F16 && y->dtype != MIXP_BF16)) return good;
    if (!op->backward || row->id == MIXP_OP_DETACH) return finite_numbers(y);
    r = mixp_backward(ctx, mixp_sum(ctx, y, MIXP_ALL, 0));
    mixp_context_clear_error(ctx);
    return r == MIXP_OK && finite_numbers(y) && (row->id == MIXP_OP_ATTENTION || finite_numbers(x->grad));
}

/* Casts are operators, too: autocast applies them for itself, and no class may make it do so without end. */
static void test_each_class_for_each_operator(void) {
    static const mixp_dtype inputs[3] = { MIXP_F32, MIXP_F16, MIXP_BF16 };
    mixp_context *kept = ctx;
    unsigned i, d;
    int cls;
    inputs_are_trained = 1;
    for (i = 0; i < sizeof table / sizeof table[0]; i++) {      /* a context takes 64 overrides */
        memset(trained, 0, sizeof trained);
        ctx = mixp_context_new(NULL);
        w = mixp_param(ctx, "w", MIXP_F32, 2, mat);
        b = mixp_param(ctx, "b", MIXP_F32, 1, vec);
        for (cls = 0; cls < MIXP_CLASS_COUNT; cls++)
            for (d = 0; d < 3; d++)
                if (!runs_with_class(&table[i], (mixp_op_class)cls, inputs[d])) {
                    test_bad++;
                    TEST_SHOW("%s as %s, input %s", mixp_op_builtin(table[i].id)->name,
                              mixp_op_class_name((mixp_op_class)cls), mixp_dtype_name(inputs[d]));
                }
        mixp_context_free(ctx);
    }
    inputs_are_trained = 0;
    ctx = kept;
}

/* The result must be that of casting by hand, bit for bit. */
static void test_cast_by_hand_is_the_same(void) {
    float a[64], h[64];
    mixp_tensor *x, *y = NULL;
    mixp_step_begin(ctx);
    mixp_init_normal(w, 0.0, 1.0);
    x = input(MIXP_F32, 2, mat);
    MIXP_AUTOCAST(ctx, MIXP_F16) { y = mixp_linear(ctx, x, w, NULL); }
    mixp_read(y, a, MIXP_F32, 64);
    y = mixp_linear(ctx, mixp_cast(ctx, x, MIXP_F16), mixp_cast(ctx, w, MIXP_F16), NULL);
    CHECK_INT(y->dtype, MIXP_F16);
    mixp_read(y, h, MIXP_F32, 64);
    CHECK(!memcmp(a, h, sizeof a));
}

static void test_cache_casts_once_and_is_never_stale(void) {
    mixp_cast_count before, after;
    float value[64];
    mixp_tensor *x, *y = NULL;
    int i;
    mixp_fill(w, 1.0);
    mixp_step_begin(ctx);
    mixp_autocast_reset_counts(ctx);
    x = input(MIXP_F16, 2, mat);
    MIXP_AUTOCAST(ctx, MIXP_F16) { for (i = 0; i < 3; i++) y = mixp_linear(ctx, x, w, NULL); }
    after = mixp_autocast_casts(ctx);
    CHECK_INT(after.weight_casts, 1);
    CHECK_INT(after.weight_hits, 2);
    CHECK_INT(after.activation_casts, 0);
    mixp_read(y, value, MIXP_F32, 64);
    CHECK_NEAR(value[0], 4.0, 0);           /* 8 * 0.5 * 1 */
    before = after;
    mixp_fill(w, 2.0);                      /* in place: the copy must not be used again */
    MIXP_AUTOCAST(ctx, MIXP_F16) { y = mixp_linear(ctx, x, w, NULL); }
    mixp_read(y, value, MIXP_F32, 64);
    CHECK_NEAR(value[0], 8.0, 0);
    CHECK_INT(mixp_autocast_casts(ctx).weight_casts, before.weight_casts + 1);
    ((float *)w->data)[0] = 6.0f;           /* behind the library's back, then told */
    mixp_tensor_touch(w);
    MIXP_AUTOCAST(ctx, MIXP_F16) { y = mixp_linear(ctx, x, w, NULL); }
    mixp_read(y, value, MIXP_F32, 64);
    CHECK_NEAR(value[0], 10.0, 0);
    MIXP_AUTOCAST(ctx, MIXP_BF16) { y = mixp_linear(ctx, x, w, NULL); }     /* another dtype, another copy */
    CHECK_INT(y->dtype, MIXP_BF16);
    mixp_read(y, value, MIXP_F32, 64);
    CHECK_NEAR(value[0], 10.0, 0);
}

static void test_no_grad_first_does_not_poison_the_cache(void) {
    mixp_tensor *x, *y = NULL;
    mixp_fill(w, 1.0);
    mixp_step_begin(ctx);
    x = input(MIXP_F32, 2, mat);
    MIXP_AUTOCAST(ctx, MIXP_F16) {
        MIXP_NO_GRAD(ctx) { y = mixp_linear(ctx, x, w, NULL); }
        y = mixp_mean(ctx, mixp_linear(ctx, x, w, NULL), MIXP_ALL, 0);
    }
    w->grad = NULL;
    CHECK_INT(mixp_backward(ctx, y), MIXP_OK);
    CHECK(w->grad != NULL && w->grad->dtype == MIXP_F32);
}

static void test_counts_tell_what_ran(void) {
    mixp_op_count row;
    int i, seen = 0;
    mixp_step_begin(ctx);
    mixp_autocast_reset_counts(ctx);
    MIXP_AUTOCAST(ctx, MIXP_F16) { run(MIXP_OP_SOFTMAX, MIXP_F16); run(MIXP_OP_MATMUL, MIXP_F32); }
    MIXP_AUTOCAST(ctx, MIXP_BF16) { run(MIXP_OP_MATMUL, MIXP_F32); }
    for (i = 0; mixp_autocast_count(ctx, i, &row); i++) {
        if (!strcmp(row.op, "matmul")) { seen++; CHECK(row.calls[0] == 0 && row.calls[1] == 1 && row.calls[2] == 1); CHECK_INT(row.cls, MIXP_CLASS_LOW); }
        if (!strcmp(row.op, "softmax")) { seen++; CHECK(row.calls[0] == 1); CHECK_TEXT(mixp_op_class_name(row.cls), "f32_out"); }
    }
    CHECK_INT(seen, 2);
    CHECK_INT(mixp_autocast_casts(ctx).activation_casts, 4);
}

/* Backward runs in the dtype that forward used: activations' gradients are low. */
static void test_gradient_dtypes(void) {
    mixp_tensor *x, *h = NULL, *loss = NULL;
    mixp_step_begin(ctx);
    x = input(MIXP_F32, 2, mat);
    w->grad = NULL;
    MIXP_AUTOCAST(ctx, MIXP_F16) {
        h = mixp_linear(ctx, x, w, NULL);
        mixp_tensor_set_requires_grad(h, 1);
        loss = mixp_mean(ctx, mixp_cast(ctx, h, MIXP_F32), MIXP_ALL, 0);
    }
    CHECK_INT(mixp_backward(ctx, loss), MIXP_OK);
    CHECK(h->grad && h->grad->dtype == MIXP_F16);
    CHECK(w->grad && w->grad->dtype == MIXP_F32);
}

/* A pop closes what a push opened, not the block around it. */
static void test_pop_in_block(void) {
    const mixp_autocast region = { MIXP_BF16, 1, NULL };
    mixp_context *c = mixp_context_new(NULL);
    CHECK_INT(mixp_autocast_push(c, &region), MIXP_OK);
    MIXP_AUTOCAST(c, MIXP_F16) {
        CHECK_INT(mixp_autocast_pop(c), MIXP_ERR_ORDER);
        CHECK_INT(mixp_autocast_current(c).dtype, MIXP_F16);
    }
    CHECK_INT(mixp_autocast_current(c).dtype, MIXP_BF16);
    CHECK_INT(mixp_autocast_pop(c), MIXP_OK);
    mixp_context_free(c);
}

int main(void) {
    ctx = mixp_context_new(NULL);
    w = mixp_param(ctx, "w", MIXP_F32, 2, mat);
    b = mixp_param(ctx, "b", MIXP_F32, 1, vec);
    w_low[0] = mixp_param(ctx, "w.f16", MIXP_F16, 2, mat);
    b_low[0] = mixp_param(ctx, "b.f16", MIXP_F16, 1, vec);
    w_low[1] = mixp_param(ctx, "w.bf16", MIXP_BF16, 2, mat);
    b_low[1] = mixp_param(ctx, "b.bf16", MIXP_BF16, 1, vec);
    RUN(test_dtype_of_every_operator);
    RUN(test_outside_of_regions_nothing_changes);
    RUN(test_promotion_takes_the_widest);
    RUN(test_regions_nest_and_restore);
    RUN(test_call_form_and_blocks_left_open);
    RUN(test_blocks_left_open_are_told_and_closed);
    RUN(test_continue_ends_the_block_alone);
    RUN(test_blocks_on_one_line);
    RUN(test_a_block_closes_what_was_pushed_in_it);
    RUN(test_open_and_close);
    RUN(test_bad_regions);
    RUN(test_banned_and_override);
    RUN(test_cast_by_hand_is_the_same);
    RUN(test_cache_casts_once_and_is_never_stale);
    RUN(test_no_grad_first_does_not_poison_the_cache);
    RUN(test_counts_tell_what_ran);
    RUN(test_gradient_dtypes);
    RUN(test_each_class_for_each_operator);
    mixp_context_free(ctx);
    RUN(test_pop_in_block);
    return test_report();
}
