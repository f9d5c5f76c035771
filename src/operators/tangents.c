#pragma once
#include "table.c"
#include "loss_options.c"
#include "products.c"
#include "../walk/checks.c"
/* --- derivatives along a direction ------------------------------------------------------- *
 *
 * mixp_jvp follows the tape from x to y, oldest operator first. own.tangent of a tensor on the way
 * is its derivative along the direction. Tangents are made by recorded operators, so mixp_backward
 * walks them back, and mixp_jvp follows them for the next derivative.
 */

/* The tangent of input i of a call; NULL: the input does not depend on x. */
static mixp_tensor *mixpi_tangent(const mixp_call *c, int i) {
    const mixp_tensor *t = mixpi_grad_owner(c, i);
    return t ? t->own.tangent : NULL;
}

static mixp_tensor *mixpi_tangent_or_zeros(const mixp_call *c, int i) {
    mixp_tensor *d = mixpi_tangent(c, i), *x = c->in[i];
    return d ? d : mixp_full(c->ctx, x->dtype, x->rank, x->shape, 0.0);
}

static mixp_tensor *mixpi_constant(mixp_context *ctx, double value) {
    return mixp_full(ctx, MIXP_F32, 0, NULL, value);
}

/* a + b, one of which may be missing. */
static mixp_tensor *mixpi_plus(mixp_context *ctx, mixp_tensor *a, mixp_tensor *b) {
    return !a ? b : !b ? a : mixp_add(ctx, a, b);
}

/* p x + q */
static mixp_tensor *mixpi_affine(mixp_context *ctx, mixp_tensor *x, float p, float q) {
    return mixpi_apply_unary_by(ctx, MIXP_OP_ADD_SCALAR, MIXP_UNARY_AFFINE, x, p, q);
}

/* a (1 - a) */
static mixp_tensor *mixpi_times_rest(mixp_context *ctx, mixp_tensor *a) {
    return mixp_mul(ctx, a, mixp_rsub(ctx, a, 1.0f));
}

/* The slope of x sigmoid(x). Beyond the bounds these three slopes are flat. */
static mixp_tensor *mixpi_silu_slope(mixp_context *ctx, mixp_tensor *x) {
    mixp_tensor *s = mixp_sigmoid(ctx, x);
    x = mixp_clamp(ctx, x, -MIXPI_SILU_BOUND, MIXPI_SILU_BOUND);
    return mixp_add(ctx, s, mixp_mul(ctx, x, mixpi_times_rest(ctx, s)));
}

/* The slope of gelu: the normal distribution plus x times its density. */
static mixp_tensor *mixpi_gelu_erf_slope(mixp_context *ctx, mixp_tensor *x) {
    x = mixp_clamp(ctx, x, -MIXPI_ERF_BOUND, MIXPI_ERF_BOUND);
    mixp_tensor *below =
        mixpi_affine(ctx, mixp_erf(ctx, mixp_scale(ctx, x, 0.707106781f)), 0.5f, 0.5f);
    mixp_tensor *density = mixp_exp(ctx, mixp_scale(ctx, mixp_mul(ctx, x, x), -0.5f));
    return mixp_add(ctx, below, mixp_mul(ctx, x, mixp_scale(ctx, density, MIXPI_DENSITY)));
}

static mixp_tensor *mixpi_gelu_tanh_slope(mixp_context *ctx, mixp_tensor *x) {
    x = mixp_clamp(ctx, x, -MIXPI_GELU_BOUND, MIXPI_GELU_BOUND);
    mixp_tensor *square = mixp_mul(ctx, x, x);
    mixp_tensor *inner = mixpi_affine(ctx, square, MIXPI_GELU_CUBIC, MIXPI_GELU_LINEAR);
    mixp_tensor *s = mixp_sigmoid(ctx, mixp_mul(ctx, x, inner));
    inner = mixp_mul(ctx, x, mixpi_affine(ctx, square, MIXPI_GELU_SLOPE, MIXPI_GELU_LINEAR));
    return mixp_add(ctx, s, mixp_mul(ctx, inner, mixpi_times_rest(ctx, s)));
}

/* p x^(p-1). Of 1, x and x^2 every further slope is right at 0 too. */
static mixp_tensor *mixpi_pow_slope(mixp_context *ctx, mixp_tensor *x, float p) {
    if (p == 0.0f || p == 1.0f) return mixpi_constant(ctx, (double)p);
    return mixp_scale(ctx, p == 2.0f ? x : mixp_pow(ctx, x, p - 1.0f), p);
}

/* 1 / sqrt(1 - x^2) */
static mixp_tensor *mixpi_arc_slope(mixp_context *ctx, mixp_tensor *x) {
    x = mixp_mul(ctx, mixp_rsub(ctx, x, 1.0f), mixp_add_scalar(ctx, x, 1.0f));
    return mixp_reciprocal(ctx, mixp_sqrt(ctx, x));
}

/* The slope of y at x. No default: the compiler warns of a function without a line. */
/* clang-format off */
static mixp_tensor *mixpi_slope(mixp_context *ctx, const mixp_unary_args *k, mixp_tensor *x,
                                mixp_tensor *y) {
    switch (k->op) {
    case MIXP_UNARY_SIGMOID:   return mixpi_times_rest(ctx, y);
    case MIXP_UNARY_SILU:      return mixpi_silu_slope(ctx, x);
    case MIXP_UNARY_GELU_ERF:  return mixpi_gelu_erf_slope(ctx, x);
    case MIXP_UNARY_GELU_TANH: return mixpi_gelu_tanh_slope(ctx, x);
    case MIXP_UNARY_EXP:       return y;
    case MIXP_UNARY_EXPM1:     return mixp_add_scalar(ctx, y, 1.0f);
    case MIXP_UNARY_LOG:       return mixp_reciprocal(ctx, x);
    case MIXP_UNARY_LOG1P:     return mixp_reciprocal(ctx, mixp_add_scalar(ctx, x, 1.0f));
    case MIXP_UNARY_SQRT:      return mixp_reciprocal(ctx, mixp_scale(ctx, y, 2.0f));
    case MIXP_UNARY_ROOT:       /* where y is 0, its slope is 0: 1 / Inf                   */
        x = mixp_eq(ctx, y, mixpi_constant(ctx, 0.0));
        y = mixp_masked_fill(ctx, y, x, mixp_f32_of_bits(0x7F800000u));
        return mixp_reciprocal(ctx, mixp_scale(ctx, y, 2.0f));
    case MIXP_UNARY_POW:       return mixpi_pow_slope(ctx, x, k->p);
    case MIXP_UNARY_SIN:       return mixp_cos(ctx, x);
    case MIXP_UNARY_COS:       return mixp_neg(ctx, mixp_sin(ctx, x));
    case MIXP_UNARY_SOFTPLUS:  return mixp_sigmoid(ctx, mixp_scale(ctx, x, k->p));
    case MIXP_UNARY_RELU_SQUARED: return mixp_scale(ctx, mixp_relu(ctx, x), 2.0f);
    case MIXP_UNARY_LOG2:      return mixp_reciprocal(ctx, mixp_scale(ctx, x, 0.693147182f));
    case MIXP_UNARY_LOG10:     return mixp_reciprocal(ctx, mixp_scale(ctx, x, 2.30258512f));
    case MIXP_UNARY_ACOS:      return mixp_neg(ctx, mixpi_arc_slope(ctx, x));
    case MIXP_UNARY_ASIN:      return mixpi_arc_slope(ctx, x);
    case MIXP_UNARY_TAN:       return mixp_add_scalar(ctx, mixp_mul(ctx, y, y), 1.0f);
    case MIXP_UNARY_SINH:      return mixp_cosh(ctx, x);
    case MIXP_UNARY_COSH:      return mixp_sinh(ctx, x);
    case MIXP_UNARY_ERFINV:
        return mixp_scale(ctx, mixp_exp(ctx, mixp_mul(ctx, y, y)), 0.886226925f);
    case MIXP_UNARY_ERF:
        x = mixp_exp(ctx, mixp_neg(ctx, mixp_mul(ctx, x, x)));
        return mixp_scale(ctx, x, MIXPI_ERF_SLOPE);
    case MIXP_UNARY_TANH: case MIXP_UNARY_SOFT_CAP:     /* soft_cap is p tanh(x / p)       */
        if (k->op == MIXP_UNARY_SOFT_CAP) y = mixp_scale(ctx, y, 1.0f / k->p);
        return mixp_rsub(ctx, mixp_mul(ctx, y, y), 1.0f);
    case MIXP_UNARY_RELU: case MIXP_UNARY_LEAKY_RELU: case MIXP_UNARY_ELU: case MIXP_UNARY_ABS:
    case MIXP_UNARY_CLAMP: case MIXP_UNARY_SCALE: case MIXP_UNARY_AFFINE: case MIXP_UNARY_COUNT:
        break;                  /* mixpi_unary_tangent makes theirs                        */
    }
    return NULL;
}
/* clang-format on */

/* d times the sign of x, which is 0 at 0: the tangent of |x|. */
static mixp_tensor *mixpi_with_sign(mixp_context *ctx, mixp_tensor *d, mixp_tensor *x) {
    mixp_tensor *zero = mixpi_constant(ctx, 0.0);
    d = mixp_masked_fill(ctx, d, mixp_eq(ctx, x, zero), 0.0f);
    return mixp_where(ctx, mixp_gt(ctx, x, zero), d, mixp_neg(ctx, d));
}

/* Functions made of pieces choose between tangents; the others multiply by a slope. */
static mixp_tensor *mixpi_unary_tangent(mixp_call *c) {
    const mixp_unary_args *k = (const mixp_unary_args *)c->attrs;
    mixp_context *ctx = c->ctx;
    mixp_tensor *d = mixpi_tangent(c, 0), *x = c->in[0], *below;
    if (mixpi_slope_is_factor(k->op)) return mixp_scale(ctx, d, k->p);

    /* Above 0 the slope is 1; what is it below? */
    switch (k->op) {
    case MIXP_UNARY_CLAMP: /* strictly between its bounds, as the gradient passes     */
        if (mixp_bits_of_f32(k->p) != 0xFF800000u)
            d = mixp_masked_fill(ctx, d, mixp_le(ctx, x, mixpi_constant(ctx, (double)k->p)), 0.0f);
        if (mixp_bits_of_f32(k->q) != 0x7F800000u)
            d = mixp_masked_fill(ctx, d, mixp_ge(ctx, x, mixpi_constant(ctx, (double)k->q)), 0.0f);
        return d;
    case MIXP_UNARY_ABS: return mixpi_with_sign(ctx, d, x);
    case MIXP_UNARY_ELU: /* p e^x is y + p */
        below = mixp_mul(ctx, d, mixp_add_scalar(ctx, c->out, k->p));
        break;
    case MIXP_UNARY_RELU:
    case MIXP_UNARY_LEAKY_RELU: /* relu: p is 0 */ below = mixp_scale(ctx, d, k->p); break;
    default: return mixp_mul(ctx, d, mixpi_slope(ctx, k, x, c->out));
    }

    return mixp_where(ctx, mixp_gt(ctx, x, mixpi_constant(ctx, 0.0)), d, below);
}

/* The tangent of the larger or smaller operand; of equal operands, the mean of both. */
static mixp_tensor *mixpi_chosen_tangent(mixp_call *c, int larger) {
    mixp_context *ctx = c->ctx;
    mixp_tensor *a = c->in[0], *b = c->in[1], *mean, *one;
    mixp_tensor *da = mixpi_tangent_or_zeros(c, 0), *db = mixpi_tangent_or_zeros(c, 1);
    mean = mixp_scale(ctx, mixp_add(ctx, da, db), 0.5f);
    one = mixp_where(ctx, larger ? mixp_gt(ctx, a, b) : mixp_lt(ctx, a, b), da, db);
    return mixp_where(ctx, mixp_eq(ctx, a, b), mean, one);
}

/* The tangent of a to the power b: b a^(b-1) da + y log(a) db. The first slope is 0 where b is 0,
 * the second where a is 0. */
static mixp_tensor *mixpi_power_tangent(mixp_call *c) {
    mixp_context *ctx = c->ctx;
    mixp_tensor *a = c->in[0], *b = c->in[1], *zero = mixpi_constant(ctx, 0.0), *slope;
    mixp_tensor *da = mixpi_tangent(c, 0), *db = mixpi_tangent(c, 1);
    if (da) {
        slope = mixp_mul(ctx, b, mixp_power(ctx, a, mixp_add_scalar(ctx, b, -1.0f)));
        slope = mixp_masked_fill(ctx, slope, mixp_eq(ctx, b, zero), 0.0f);
        da = mixp_mul(ctx, da, slope);
    }
    if (db) {
        slope = mixp_mul(ctx, c->out, mixp_log(ctx, a));
        slope = mixp_masked_fill(ctx, slope, mixp_eq(ctx, a, zero), 0.0f);
        db = mixp_mul(ctx, db, slope);
    }
    return mixpi_plus(ctx, da, db);
}

/* The tangent of atan2(a, b): (b da - a db) / (a^2 + b^2); 0 where that sum is 0. */
static mixp_tensor *mixpi_atan2_tangent(mixp_call *c) {
    mixp_context *ctx = c->ctx;
    mixp_tensor *a = c->in[0], *b = c->in[1];
    mixp_tensor *da = mixpi_tangent(c, 0), *db = mixpi_tangent(c, 1);
    if (da) da = mixp_mul(ctx, b, da);
    if (db) db = mixp_neg(ctx, mixp_mul(ctx, a, db));
    a = mixp_add(ctx, mixp_mul(ctx, a, a), mixp_mul(ctx, b, b));
    b = mixp_eq(ctx, a, mixpi_constant(ctx, 0.0));
    a = mixp_masked_fill(ctx, a, b, mixp_f32_of_bits(0x7F800000u));
    return mixp_div(ctx, mixpi_plus(ctx, da, db), a);
}

/* The tangent of a > 0 ? a : b a. */
static mixp_tensor *mixpi_prelu_tangent(mixp_call *c) {
    mixp_context *ctx = c->ctx;
    mixp_tensor *a = c->in[0], *b = c->in[1], *below;
    mixp_tensor *da = mixpi_tangent_or_zeros(c, 0), *db = mixpi_tangent(c, 1);
    below = mixpi_plus(ctx, mixp_mul(ctx, b, da), db ? mixp_mul(ctx, a, db) : NULL);
    return mixp_where(ctx, mixp_gt(ctx, a, mixpi_constant(ctx, 0.0)), da, below);
}

static mixp_tensor *mixpi_binary_tangent(mixp_call *c) {
    const mixp_binary op = ((const mixp_binary_args *)c->attrs)->op;
    mixp_context *ctx = c->ctx;
    mixp_tensor *a = c->in[0], *b = c->in[1];
    mixp_tensor *da = mixpi_tangent(c, 0), *db = mixpi_tangent(c, 1);
    if (op == MIXP_BINARY_ADD) return mixpi_plus(ctx, da, db);
    if (op == MIXP_BINARY_SUB) return mixpi_plus(ctx, da, db ? mixp_neg(ctx, db) : NULL);
    if (op == MIXP_BINARY_MAXIMUM || op == MIXP_BINARY_MINIMUM)
        return mixpi_chosen_tangent(c, op == MIXP_BINARY_MAXIMUM);
    if (op == MIXP_BINARY_POWER) return mixpi_power_tangent(c);
    if (op == MIXP_BINARY_ATAN2) return mixpi_atan2_tangent(c);
    if (op == MIXP_BINARY_PRELU) return mixpi_prelu_tangent(c);

    if (op == MIXP_BINARY_DIV) { /* (da - y db) / b */
        if (db) db = mixp_neg(ctx, mixp_mul(ctx, c->out, db));
        return mixp_div(ctx, mixpi_plus(ctx, da, db), b);
    }

    /* A product, in swiglu of silu(a) and b. */
    if (op == MIXP_BINARY_SWIGLU) {
        if (da) da = mixp_mul(ctx, da, mixpi_silu_slope(ctx, a));
        a = mixp_silu(ctx, a);
    }
    if (da) da = mixp_mul(ctx, da, b);
    if (db) db = mixp_mul(ctx, a, db);
    return mixpi_plus(ctx, da, db);
}

static mixp_tensor *mixpi_product_of(mixp_call *c, mixp_tensor *a, mixp_tensor *b) {
    const mixpi_product *p = (const mixpi_product *)c->attrs;
    if (!a || !b) return NULL;
    if (p->linear) return mixp_linear(c->ctx, a, b, NULL);
    return mixp_matmul(c->ctx, a, b, p->g.trans_a, p->g.trans_b);
}

static mixp_tensor *mixpi_product_tangent(mixp_call *c) {
    mixp_tensor *left = mixpi_product_of(c, mixpi_tangent(c, 0), c->in[1]);
    mixp_tensor *right = mixpi_product_of(c, c->in[0], mixpi_tangent(c, 1));
    return mixpi_plus(c->ctx, mixpi_plus(c->ctx, left, right), mixpi_tangent(c, 2));
}

/* The tangent of a layer of mlp, a w' + b. da: that of a, or NULL. */
static mixp_tensor *mixpi_layer_tangent(
    mixp_call *c, mixp_tensor *a, mixp_tensor *da, int weight, int bias) {
    mixp_tensor *dw = mixpi_tangent(c, weight);
    if (da) da = mixp_linear(c->ctx, da, c->in[weight], NULL);
    if (dw) da = mixpi_plus(c->ctx, da, mixp_linear(c->ctx, a, dw, NULL));
    return mixpi_plus(c->ctx, da, mixpi_tangent(c, bias));
}

/* Of two layers with GELU between them, rounded as those of three operators. GELU's input and
 * output are made again, by recorded operators, so that further derivatives follow them too. */
static mixp_tensor *mixpi_mlp_tangent(mixp_call *c) {
    mixp_context *ctx = c->ctx;
    mixp_tensor *x = c->in[MIXPI_MLP_X], *d, *before;
    d = mixpi_layer_tangent(c, x, mixpi_tangent(c, MIXPI_MLP_X), MIXPI_MLP_UP, MIXPI_MLP_UP_BIAS);
    before = mixp_linear(ctx, x, c->in[MIXPI_MLP_UP], c->in[MIXPI_MLP_UP_BIAS]);
    if (d && before) d = mixp_cast(ctx, d, before->dtype);
    if (d) d = mixp_mul(ctx, d, mixpi_gelu_tanh_slope(ctx, before));
    return mixpi_layer_tangent(
        c, mixp_gelu_tanh(ctx, before), d, MIXPI_MLP_DOWN, MIXPI_MLP_DOWN_BIAS);
}

/* Applies the operator to tangents instead of its real inputs, in which it is linear. */
static mixp_tensor *mixpi_applied_tangent(mixp_call *c) {
    mixp_tensor **in = (mixp_tensor **)mixpi_step_alloc(c->ctx, (size_t)c->n_in * sizeof *in);
    int i, required = 0;
    for (i = 0; in && i < c->n_in; i++) {
        in[i] = c->in[i];
        if (!in[i]) continue;
        if (mixpi_is_real(in[i]->dtype)) in[i] = mixpi_tangent_or_zeros(c, i);
        required = i + 1;
    }
    return in ? mixp_apply(c->ctx, c->op, c->n_in, in, required, c->attrs) : NULL;
}

/* Returns d minus its mean under p, which holds probabilities in the last dimension. Where one of
 * them is near 1, the first difference cancels; its mean is the rest. */
static mixp_tensor *mixpi_beside_mean(mixp_context *ctx, mixp_tensor *p, mixp_tensor *d) {
    for (int i = 0; i < 2; i++) d = mixp_sub(ctx, d, mixp_sum(ctx, mixp_mul(ctx, p, d), -1, 1));
    return d;
}

/* The tangent of softmax, or of its logarithm. */
static mixp_tensor *mixpi_softmax_tangent(mixp_call *c, int logs) {
    mixp_context *ctx = c->ctx;
    mixp_tensor *d = mixpi_tangent(c, 0), *y = c->out;
    if (logs) return mixpi_beside_mean(ctx, mixp_exp(ctx, y), d);
    return mixp_mul(ctx, y, mixpi_beside_mean(ctx, y, d));
}

/* The tangent of cross entropy: nll, which is linear, of the tangent of log_softmax. */
static mixp_tensor *mixpi_entropy_tangent(mixp_call *c) {
    mixpi_entropy p = *(const mixpi_entropy *)c->attrs;
    mixp_context *ctx = c->ctx;
    mixp_tensor *d = mixpi_beside_mean(ctx, mixp_softmax(ctx, c->in[0]), mixpi_tangent(c, 0));
    p.k.logs = 1;
    p.k.each = NULL;
    return mixpi_apply_op(ctx, MIXP_OP_NLL, 2, d, c->in[1], c->n_in > 2 ? c->in[2] : NULL, &p);
}

/* The tangent of mse, l1, huber, smooth_l1 and bce_with_logits: the elements' slopes times the
 * direction, reduced as the loss is. The kind chooses the slope, not the name: smooth_l1 of beta 0
 * is an l1. */
static mixp_tensor *mixpi_compared_tangent(mixp_call *c) {
    const mixpi_compared *p = (const mixpi_compared *)c->attrs;
    mixp_context *ctx = c->ctx;
    mixp_tensor *x = c->in[0], *t = c->in[1], *slope;
    mixp_tensor *d = mixpi_tangent(c, 0), *dt = mixpi_tangent(c, 1);
    if (dt) dt = mixp_neg(ctx, dt);

    if (p->k.kind == MIXP_LOSS_BCE_LOGITS) { /* dx (sigmoid(x) - t) - dt x */
        if (d) d = mixp_mul(ctx, d, mixp_sub(ctx, mixp_sigmoid(ctx, x), t));
        if (dt) d = mixpi_plus(ctx, d, mixp_mul(ctx, dt, x));
    } else if (p->k.kind == MIXP_LOSS_L1) {
        d = mixpi_with_sign(ctx, mixpi_plus(ctx, d, dt), mixp_sub(ctx, x, t));
    } else {
        slope = mixp_sub(ctx, x, t);
        if (p->k.kind == MIXP_LOSS_MSE) slope = mixp_scale(ctx, slope, 2.0f);
        else slope = mixp_clamp(ctx, slope, -p->k.delta, p->k.delta);
        if (p->k.kind == MIXP_LOSS_SMOOTH_L1) slope = mixp_scale(ctx, slope, 1.0f / p->k.delta);
        d = mixp_mul(ctx, slope, mixpi_plus(ctx, d, dt));
    }

    if (p->reduction == MIXP_REDUCE_NONE) return d;
    return mixp_scale(ctx, mixp_sum(ctx, d, MIXP_ALL, 0), (float)(1.0 / (double)p->k.over));
}

/* The tangents of operators that are neither elementwise nor products. */
/* clang-format off */
static mixp_tensor *mixpi_other_tangent(mixp_call *c) {
    const mixpi_padding *pad = (const mixpi_padding *)c->attrs;
    mixp_tensor *d = mixpi_tangent(c, 0), *y = c->out;
    int id = 0;
    if (c->op->forward == mixpi_cast_forward)                       /* casts and reshapes  */
        return mixp_reshape(c->ctx, d, y->rank, y->shape);
    if (c->op->forward == mixpi_deviation_forward)
        return mixp_sub(c->ctx, d, mixp_mean(c->ctx, d, ((mixpi_deviation *)c->attrs)->dim, 1));

    /* Others are known by their row in the table. */
    while (id < MIXP_OP_COUNT && mixp_op_builtin((mixp_op_id)id) != c->op) id++;
    switch (id) {
    case MIXP_OP_EXPAND: return mixp_expand(c->ctx, d, y->rank, y->shape);
    case MIXP_OP_PAD: return mixp_pad(c->ctx, d, pad->dim, pad->before, pad->after, 0.0f);
    case MIXP_OP_MASKED_FILL: return mixp_masked_fill(c->ctx, d, c->in[1], 0.0f);
    case MIXP_OP_SUM: case MIXP_OP_MEAN: case MIXP_OP_CUMSUM: case MIXP_OP_TRANSPOSE:
    case MIXP_OP_PERMUTE: case MIXP_OP_FLIP: case MIXP_OP_CONCAT: case MIXP_OP_STACK:
    case MIXP_OP_SLICE: case MIXP_OP_WHERE: case MIXP_OP_GATHER: case MIXP_OP_SCATTER_ADD:
    case MIXP_OP_INDEX_ADD: case MIXP_OP_EMBEDDING: case MIXP_OP_NLL:
        return mixpi_applied_tangent(c);
    case MIXP_OP_EMBEDDING_BAG:
        return mixpi_bag_tangent(c, d, c->in[3] ? mixpi_tangent(c, 3) : NULL);
    case MIXP_OP_SOFTMAX: case MIXP_OP_LOG_SOFTMAX:
        return mixpi_softmax_tangent(c, id == MIXP_OP_LOG_SOFTMAX);
    case MIXP_OP_CROSS_ENTROPY: return mixpi_entropy_tangent(c);
    case MIXP_OP_MSE: case MIXP_OP_L1: case MIXP_OP_HUBER: case MIXP_OP_SMOOTH_L1:
    case MIXP_OP_BCE_WITH_LOGITS:
        return mixpi_compared_tangent(c);
    default: break;
    }

    mixp_context_fail(c->ctx, MIXP_ERR_ARGUMENT,
        "mixp_jvp: there is no tangent of %s; write %s with elementwise operators, products and "
        "sums",
        c->op->name, c->op->name);
    return NULL;
}
/* clang-format on */

#define MIXPI_ASK_X "; call mixp_tensor_set_requires_grad(x, 1) before the first operator reads x"

/* The tangent of a call's result, perhaps in another shape or dtype. */
static mixp_tensor *mixpi_tangent_of(mixp_call *c) {
    if (c->op->backward == mixpi_unary_backward) return mixpi_unary_tangent(c);
    if (c->op->forward == mixpi_binary_forward) return mixpi_binary_tangent(c);
    if (c->op->forward == mixpi_product_forward) return mixpi_product_tangent(c);
    if (c->op->forward == mixpi_mlp_forward) return mixpi_mlp_tangent(c);
    return mixpi_other_tangent(c);
}

/* The operator of a call; in a tangent, the operator of the program whose tangent it is. */
static const char *mixpi_operator_name(const mixp_call *c) {
    const char *of = mixpi_entry_of(c)->tangent_of;
    return of ? of : c->op->name;
}

/* Makes the tangent of a call's result, in its shape and dtype, if an input has a tangent. */
static mixp_result mixpi_tangent_make(mixp_call *c) {
    mixp_tensor *y = c->out, *d;
    const uint64_t reported = c->ctx->errors.reported;
    int i, follows = 0;

    /* The inputs that have a tangent must have been recorded. */
    for (i = 0; i < c->n_in; i++) {
        if (!mixpi_tangent(c, i)) continue;
        follows = 1;
        if (!mixp_call_wants(c, i))
            return mixp_context_fail(c->ctx, MIXP_ERR_ORDER,
                "mixp_jvp: x required no gradient when %s read it" MIXPI_ASK_X, c->op->name);
    }

    if (!follows) return MIXP_OK;
    if (mixpi_check_unwritten(c, "mixp_jvp") != MIXP_OK) return MIXP_ERR_ORDER;

    /* Operators applied from here on are a part of the tangent of this operator. */
    c->ctx->tape.tangent_of = mixpi_operator_name(c);
    d = mixpi_tangent_of(c);
    if (d && (d->rank != y->rank || memcmp(d->shape, y->shape, (size_t)y->rank * sizeof *y->shape)))
        d = mixp_expand(c->ctx, d, y->rank, y->shape);
    if (d && d->dtype != y->dtype) d = mixp_cast(c->ctx, d, y->dtype);
    c->ctx->tape.tangent_of = NULL;
    y->own.tangent = d;
    return c->ctx->errors.reported == reported ? MIXP_OK : mixpi_failed(c->ctx);
}

/* Sets or clears the marks of a call's inputs: y depends on them. Also clears their tangents, which
 * an earlier mixp_jvp leaves there if on_error throws. */
static void mixpi_lead(const mixp_call *c, int leads) {
    for (int i = 0; i < c->n_in; i++) {
        mixp_tensor *t = c->in[i] ? mixpi_grad_owner(c, i) : NULL;
        if (!t) continue;
        t->own.leads = leads;
        t->own.tangent = NULL;
    }
}

/* Finds the operators that y depends on, and makes their tangents, oldest first. */
static mixp_tensor *mixpi_jvp(mixp_context *ctx, mixp_tensor *y, mixp_tensor *x, mixp_tensor *d) {
    mixpi_tape_entry *e;
    mixp_result r = MIXP_OK;
    int64_t n = 0, i;
    mixpi_tape_entry **list =
        (mixpi_tape_entry **)mixpi_step_alloc(ctx, (size_t)(ctx->tape.calls + 1) * sizeof e);
    if (!list) return NULL;

    /* The operators that lead to y, latest first. */
    y->own.leads = 1;
    for (e = ctx->tape.newest; e; e = e->older) {
        if (!e->call.out->own.leads) continue;
        mixpi_lead(&e->call, 1);
        list[n++] = e;
    }

    /* Make the tangents of the listed calls' results, oldest first. */
    x->own.tangent = d;
    for (i = n; i > 0 && r == MIXP_OK; i--) r = mixpi_tangent_make(&list[i - 1]->call);

    /* y's tangent is the result; all others are forgotten. */
    d = y->own.tangent;
    for (i = 0; i < n; i++) mixpi_lead(&list[i]->call, 0);
    x->own.tangent = y->own.tangent = NULL;
    y->own.leads = 0;

    /* A y that does not depend on x has a tangent of zeros. */
    if (r != MIXP_OK) return NULL;
    if (!d) d = mixp_full(ctx, y->dtype, y->rank, y->shape, 0.0);
    if (d) d->own.derivative = !mixpi_is_no_grad(ctx) && !d->own.cut;
    return d;
}

static mixp_result mixpi_jvp_check(
    mixp_context *ctx, const mixp_tensor *y, const mixp_tensor *x, const mixp_tensor *d) {
    char d_shape[224], x_shape[224];
    if (mixpi_check_outside(ctx, "mixp_jvp") != MIXP_OK) return MIXP_ERR_ORDER;
    if (!mixpi_wants_grad(x))
        return mixp_context_fail(
            ctx, MIXP_ERR_ORDER, "mixp_jvp: x requires no gradient" MIXPI_ASK_X);
    if (y != x && !y->own.from_tape && !y->own.derivative)
        return mixp_context_fail(ctx, MIXP_ERR_ORDER,
            "mixp_jvp: nothing was recorded for y: it was made under MIXP_NO_GRAD, or nothing that "
            "it was made from required a gradient" MIXPI_ASK_X);

    /* The tangent itself: real, and of the shape of x. */
    if (!mixpi_is_real(d->dtype))
        return mixp_context_fail(
            ctx, MIXP_ERR_DTYPE, "mixp_jvp: the tangent must be f32, f16 or bf16");
    if (d->rank == x->rank && !memcmp(d->shape, x->shape, (size_t)x->rank * sizeof *x->shape))
        return MIXP_OK;
    return mixp_context_fail(ctx, MIXP_ERR_SHAPE,
        "mixp_jvp: the tangent is %s, x is %s: they must be equal",
        mixpi_shape_text(d->rank, d->shape, d_shape, sizeof d_shape),
        mixpi_shape_text(x->rank, x->shape, x_shape, sizeof x_shape));
}

MIXPREC_API mixp_tensor *mixp_jvp(
    mixp_context *ctx, mixp_tensor *y, mixp_tensor *x, mixp_tensor *tangent) {
    mixpi_outer o;
    if (!mixpi_outer_call(&o, ctx, "jvp of y", 1, y, NULL, NULL) ||
        !mixpi_outer_call(&o, ctx, "jvp by x", 1, x, tangent, NULL))
        return NULL;
    if (mixpi_jvp_check(ctx, y, x, tangent ? tangent : x) != MIXP_OK) return NULL;
    if (!tangent) tangent = mixp_full(ctx, x->dtype, x->rank, x->shape, 1.0);
    else if (tangent->dtype != x->dtype) tangent = mixp_cast(ctx, tangent, x->dtype);
    return tangent ? mixpi_jvp(ctx, y, x, tangent) : NULL;
}
