#pragma once
#include "shared.c"
/* --- add, sub, mul, div, maximum, minimum, swiglu ---------------------------------------- */

/* Size in t of axis i of a result of this rank. *stride: elements from one index to the next; 0 if
 * t repeats. *step: product of t's axes after axis i; on return, with axis i. */
static int64_t mixpi_broadcast_axis(
    const mixp_tensor *t, int rank, int i, int64_t *step, int64_t *stride) {
    int own = i - (rank - t->rank);
    int64_t n = own < 0 ? 1 : t->shape[own];
    *stride = n == 1 ? 0 : *step;
    *step *= n;
    return n;
}

/* The shape of a result of two operands, and the strides of both in it. */
static mixp_result mixpi_broadcast_two(
    mixp_call *c, int *rank, int64_t *shape, int64_t *a_strides, int64_t *b_strides) {
    const mixp_tensor *a = c->in[0], *b = c->in[1];
    int64_t step_a = 1, step_b = 1;
    *rank = a->rank > b->rank ? a->rank : b->rank;
    for (int i = *rank - 1; i >= 0; i--) {
        int64_t na = mixpi_broadcast_axis(a, *rank, i, &step_a, &a_strides[i]);
        int64_t nb = mixpi_broadcast_axis(b, *rank, i, &step_b, &b_strides[i]);
        if (na != nb && na != 1 && nb != 1)
            return mixpi_bad_shapes(c, "aligned at the right, dimensions must be equal or 1");
        shape[i] = na == 1 ? nb : na;
    }
    return MIXP_OK;
}

/* Are a and b a column [n, 1] and a vector [n]? */
static int mixpi_is_column(const mixp_tensor *a, const mixp_tensor *b) {
    return a->rank == 2 && b->rank == 1 && a->shape[1] == 1 && a->count == b->count;
}

/* Warns of predictions [n, 1] less targets [n], whose result is [n, n], as in NumPy and PyTorch. */
static void mixpi_warn_of_column(mixp_call *c) {
    const double n = (double)c->in[0]->count;
    const char *vector = c->in[0]->rank == 1 ? "first" : "second";
    const mixp_binary_args *k = (const mixp_binary_args *)c->attrs;
    if (k->op != MIXP_BINARY_SUB || c->in[0]->count < 2) return;
    if (!mixpi_is_column(c->in[0], c->in[1]) && !mixpi_is_column(c->in[1], c->in[0])) return;
    mixpi_warn(c->ctx,
        "mixp_sub: [%.0f, 1] and [%.0f] broadcast to [%.0f, %.0f]. To subtract row by row, reshape "
        "both to one shape; for all pairs, reshape the %s to [1, %.0f]",
        n, n, n, n, vector, n);
}

static mixp_result mixpi_binary_infer(mixp_call *c) {
    mixp_binary_args *k = (mixp_binary_args *)c->attrs;
    if (mixpi_need_real(c, 2, 2) != MIXP_OK) return MIXP_ERR_DTYPE;
    MIXPI_TRY(mixpi_broadcast_two(c, &k->rank, k->shape, k->a_strides, k->b_strides));
    if (c->in[0]->rank + c->in[1]->rank == 3) mixpi_warn_of_column(c);
    return mixp_call_output(c, mixpi_widest(2, c->in), k->rank, k->shape);
}

/* Value of `which` for a deferred sum: the norm after it computes the sum as well. */
enum { MIXPI_SUM_LATER = -1 };

/* Declares which of a and b each gradient is made from. */
static void mixpi_binary_reads(mixp_call *c) {
    mixp_binary_args k;
    k.op = ((const mixp_binary_args *)c->attrs)->op;
    for (k.which = 0; k.which < 2; k.which++) {
        const char *of = mixpi_binary_slope_of(&k);
        mixp_call_reads(c, k.which, (strchr(of, 'a') ? 1u : 0u) | (strchr(of, 'b') ? 2u : 0u));
    }
}

static mixp_result mixpi_binary_forward(mixp_call *c) {
    mixp_binary_args *k = (mixp_binary_args *)c->attrs;
    mixpi_binary_reads(c);
    k->a = mixpi_call_x(c, 0);
    k->b = mixpi_call_x(c, 1);
    k->y = mixpi_call_y(c);
    if (k->which == MIXPI_SUM_LATER) return MIXP_OK;
    return MIXPI_RUN(c, binary, k);
}

/* Starts with the second operand: the first operand may then reuse the buffer of the incoming
 * gradient, from which the second operand's gradient of a sum is read. */
static mixp_result mixpi_binary_backward(mixp_call *c) {
    mixp_binary_args *k = (mixp_binary_args *)c->attrs;
    int passes = k->op == MIXP_BINARY_ADD || k->op == MIXP_BINARY_SUB;
    int first = mixpi_entry(c)->made ? 0 : 1;
    mixp_result r = MIXP_OK;
    mixpi_entry(c)->made = 0;
    for (k->which = first; k->which >= 0 && r == MIXP_OK; k->which--) {
        if (k->which == 0 && passes && mixpi_call_move_grad(c, 0)) break;
        if (k->which && k->op == MIXP_BINARY_ADD && mixpi_call_lend_grad(c, 1, 0)) continue;
        k->dx = mixpi_call_dx(c, k->which);
        k->dy = mixpi_call_dy(c);
        if (k->dx.data) r = MIXPI_RUN(c, binary_backward, k);
    }
    return r;
}

static mixp_tensor *mixpi_apply_binary(
    mixp_context *ctx, mixp_op_id id, mixp_binary op, mixp_tensor *a, mixp_tensor *b) {
    mixp_binary_args k = MIXPI_ZERO;
    k.op = op;
    return mixpi_apply_op(ctx, id, 2, a, b, NULL, &k);
}

#define MIXPI_BINARY(name, kind)                                                          \
    MIXPREC_API mixp_tensor *mixp_##name(mixp_context *ctx, mixp_tensor *a, mixp_tensor *b) \
    { return mixpi_apply_binary(ctx, MIXP_OP_##kind, MIXP_BINARY_##kind, a, b); }
MIXPI_BINARY(add, ADD)
MIXPI_BINARY(sub, SUB)
MIXPI_BINARY(mul, MUL)
MIXPI_BINARY(div, DIV)
MIXPI_BINARY(maximum, MAXIMUM)
MIXPI_BINARY(minimum, MINIMUM)
MIXPI_BINARY(swiglu, SWIGLU)
MIXPI_BINARY(power, POWER)
MIXPI_BINARY(atan2, ATAN2)
#undef MIXPI_BINARY

/* The two operands are the two halves of every row, so the stride between rows covers both. */
static mixp_result mixpi_packed_infer(mixp_call *c) {
    mixp_binary_args *k = (mixp_binary_args *)c->attrs;
    const mixp_tensor *x = c->in[0];
    int last = x->rank - 1, i;
    if (mixpi_need_real(c, 1, 1) != MIXP_OK) return MIXP_ERR_DTYPE;
    if (last < 0 || x->shape[last] % 2)
        return mixpi_bad_shapes(c, "x[..., 2c] needs an even last dimension");
    k->rank = x->rank;
    memcpy(k->shape, x->shape, sizeof k->shape);
    mixpi_dense_strides(k->rank, k->shape, k->a_strides);
    for (i = 0; i < k->rank; i++) k->b_strides[i] = k->a_strides[i];
    k->shape[last] /= 2;
    return mixp_call_output(c, x->dtype, k->rank, k->shape);
}

static mixp_result mixpi_packed_forward(mixp_call *c) {
    mixp_binary_args *k = (mixp_binary_args *)c->attrs;
    mixpi_call_reads_all(c, 1u);
    k->a = mixpi_call_x(c, 0);
    k->b = mixpi_in_at(k->a, k->shape[k->rank - 1]);
    k->y = mixpi_call_y(c);
    return MIXPI_RUN(c, binary, k);
}

static mixp_result mixpi_packed_backward(mixp_call *c) {
    mixp_binary_args *k = (mixp_binary_args *)c->attrs;
    mixp_out dx = mixpi_call_dx(c, 0);
    if (!dx.data) return MIXP_OK;
    k->dy = mixpi_call_dy(c);
    k->dx = dx;
    k->which = 0;
    MIXPI_TRY(MIXPI_RUN(c, binary_backward, k));
    k->dx = mixpi_out_at(dx, k->shape[k->rank - 1]);
    k->which = 1;
    return MIXPI_RUN(c, binary_backward, k);
}

MIXPREC_API mixp_tensor *mixp_swiglu_packed(mixp_context *ctx, mixp_tensor *x) {
    mixp_binary_args k = MIXPI_ZERO;
    k.op = MIXP_BINARY_SWIGLU;
    return mixpi_apply_one(ctx, MIXP_OP_SWIGLU_PACKED, x, &k);
}

/* --- elementwise ----------------------------------------------------------------------- */

static mixp_result mixpi_unary_forward(mixp_call *c) {
    mixp_unary_args *k = (mixp_unary_args *)c->attrs;
    mixpi_call_reads_all(c, mixpi_slope_reads_result(k->op) ? MIXP_READS_RESULT
                            : mixpi_slope_is_factor(k->op)  ? 0u
                                                            : 1u);
    k->n = c->out->count;
    k->a = mixpi_call_x(c, 0);
    k->y = mixpi_call_y(c);
    return MIXPI_RUN(c, unary, k);
}

static mixp_result mixpi_unary_backward(mixp_call *c) {
    const mixp_unary_args *forward = (const mixp_unary_args *)c->attrs;
    mixp_unary_backward_args k = MIXPI_ZERO;
    k.op = forward->op;
    k.p = forward->p;
    k.q = forward->q;
    k.n = forward->n;
    k.dy = mixpi_call_dy(c);
    k.a = forward->a;
    k.y = mixpi_tensor_in(c->out);
    k.da = mixpi_call_dx(c, 0);
    return k.da.data ? MIXPI_RUN(c, unary_backward, &k) : MIXP_OK;
}

static mixp_tensor *mixpi_apply_unary_by(
    mixp_context *ctx, mixp_op_id id, mixp_unary op, mixp_tensor *x, float p, float q) {
    mixp_unary_args k = MIXPI_ZERO;
    k.op = op;
    k.p = p;
    k.q = q;
    return mixpi_apply_one(ctx, id, x, &k);
}

static mixp_tensor *mixpi_apply_unary(
    mixp_context *ctx, mixp_op_id id, mixp_unary op, mixp_tensor *x, float p) {
    return mixpi_apply_unary_by(ctx, id, op, x, p, 0.0f);
}

/* The names stand whole, so that a search for one finds its row. */
#define MIXPI_UNARY(function, id, kind)                                                   \
    MIXPREC_API mixp_tensor *function(mixp_context *ctx, mixp_tensor *x)                  \
    { return mixpi_apply_unary(ctx, id, kind, x, 0.0f); }
MIXPI_UNARY(mixp_relu, MIXP_OP_RELU, MIXP_UNARY_RELU)
MIXPI_UNARY(mixp_gelu, MIXP_OP_GELU, MIXP_UNARY_GELU_ERF)
MIXPI_UNARY(mixp_gelu_tanh, MIXP_OP_GELU_TANH, MIXP_UNARY_GELU_TANH)
MIXPI_UNARY(mixp_silu, MIXP_OP_SILU, MIXP_UNARY_SILU)
MIXPI_UNARY(mixp_tanh, MIXP_OP_TANH, MIXP_UNARY_TANH)
MIXPI_UNARY(mixp_sigmoid, MIXP_OP_SIGMOID, MIXP_UNARY_SIGMOID)
MIXPI_UNARY(mixp_sqrt, MIXP_OP_SQRT, MIXP_UNARY_SQRT)
MIXPI_UNARY(mixp_exp, MIXP_OP_EXP, MIXP_UNARY_EXP)
MIXPI_UNARY(mixp_log, MIXP_OP_LOG, MIXP_UNARY_LOG)
MIXPI_UNARY(mixp_abs, MIXP_OP_ABS, MIXP_UNARY_ABS)
MIXPI_UNARY(mixp_sin, MIXP_OP_SIN, MIXP_UNARY_SIN)
MIXPI_UNARY(mixp_cos, MIXP_OP_COS, MIXP_UNARY_COS)
MIXPI_UNARY(mixp_relu_squared, MIXP_OP_RELU_SQUARED, MIXP_UNARY_RELU_SQUARED)
MIXPI_UNARY(mixp_log1p, MIXP_OP_LOG1P, MIXP_UNARY_LOG1P)
MIXPI_UNARY(mixp_expm1, MIXP_OP_EXPM1, MIXP_UNARY_EXPM1)
MIXPI_UNARY(mixp_erf, MIXP_OP_ERF, MIXP_UNARY_ERF)
MIXPI_UNARY(mixp_log2, MIXP_OP_LOG2, MIXP_UNARY_LOG2)
MIXPI_UNARY(mixp_log10, MIXP_OP_LOG10, MIXP_UNARY_LOG10)
MIXPI_UNARY(mixp_acos, MIXP_OP_ACOS, MIXP_UNARY_ACOS)
MIXPI_UNARY(mixp_asin, MIXP_OP_ASIN, MIXP_UNARY_ASIN)
MIXPI_UNARY(mixp_tan, MIXP_OP_TAN, MIXP_UNARY_TAN)
MIXPI_UNARY(mixp_sinh, MIXP_OP_SINH, MIXP_UNARY_SINH)
MIXPI_UNARY(mixp_cosh, MIXP_OP_COSH, MIXP_UNARY_COSH)
MIXPI_UNARY(mixp_erfinv, MIXP_OP_ERFINV, MIXP_UNARY_ERFINV)
#undef MIXPI_UNARY

MIXPREC_API mixp_tensor *mixp_scale(mixp_context *ctx, mixp_tensor *x, float factor) {
    return mixpi_apply_unary(ctx, MIXP_OP_SCALE, MIXP_UNARY_SCALE, x, factor);
}
MIXPREC_API mixp_tensor *mixp_pow(mixp_context *ctx, mixp_tensor *x, float exponent) {
    return mixpi_apply_unary(ctx, MIXP_OP_POW, MIXP_UNARY_POW, x, exponent);
}
MIXPREC_API mixp_tensor *mixp_neg(mixp_context *ctx, mixp_tensor *x) {
    return mixpi_apply_unary(ctx, MIXP_OP_NEG, MIXP_UNARY_SCALE, x, -1.0f);
}
MIXPREC_API mixp_tensor *mixp_square(mixp_context *ctx, mixp_tensor *x) {
    return mixpi_apply_unary(ctx, MIXP_OP_SQUARE, MIXP_UNARY_POW, x, 2.0f);
}
MIXPREC_API mixp_tensor *mixp_reciprocal(mixp_context *ctx, mixp_tensor *x) {
    return mixpi_apply_unary(ctx, MIXP_OP_RECIPROCAL, MIXP_UNARY_POW, x, -1.0f);
}
MIXPREC_API mixp_tensor *mixp_leaky_relu(mixp_context *ctx, mixp_tensor *x, float slope) {
    return mixpi_apply_unary(ctx, MIXP_OP_LEAKY_RELU, MIXP_UNARY_LEAKY_RELU, x, slope);
}
MIXPREC_API mixp_tensor *mixp_elu(mixp_context *ctx, mixp_tensor *x, float alpha) {
    return mixpi_apply_unary(ctx, MIXP_OP_ELU, MIXP_UNARY_ELU, x, alpha);
}
MIXPREC_API mixp_tensor *mixp_add_scalar(mixp_context *ctx, mixp_tensor *x, float value) {
    return mixpi_apply_unary_by(ctx, MIXP_OP_ADD_SCALAR, MIXP_UNARY_AFFINE, x, 1.0f, value);
}
MIXPREC_API mixp_tensor *mixp_rsub(mixp_context *ctx, mixp_tensor *x, float value) {
    return mixpi_apply_unary_by(ctx, MIXP_OP_RSUB, MIXP_UNARY_AFFINE, x, -1.0f, value);
}

static mixp_result mixpi_soft_cap_infer(mixp_call *c) {
    const mixp_unary_args *k = (const mixp_unary_args *)c->attrs;
    if (mixpi_f32_is_positive(k->p)) return mixpi_same_infer(c);
    return mixp_context_fail(
        c->ctx, MIXP_ERR_ARGUMENT, "soft_cap: cap is %g; it must be above 0", (double)k->p);
}

static mixp_result mixpi_softplus_infer(mixp_call *c) {
    const mixp_unary_args *k = (const mixp_unary_args *)c->attrs;
    if (mixpi_f32_is_positive(k->p)) return mixpi_same_infer(c);
    return mixp_context_fail(c->ctx, MIXP_ERR_ARGUMENT,
        "softplus: beta is %g; it must be above 0 and finite", (double)k->p);
}

MIXPREC_API mixp_tensor *mixp_softplus(mixp_context *ctx, mixp_tensor *x, float beta) {
    return mixpi_apply_unary(ctx, MIXP_OP_SOFTPLUS, MIXP_UNARY_SOFTPLUS, x, beta);
}

MIXPREC_API mixp_tensor *mixp_soft_cap(mixp_context *ctx, mixp_tensor *x, float cap) {
    return mixpi_apply_unary(ctx, MIXP_OP_SOFT_CAP, MIXP_UNARY_SOFT_CAP, x, cap);
}

static mixp_result mixpi_clamp_infer(mixp_call *c) {
    const mixp_unary_args *k = (const mixp_unary_args *)c->attrs;
    if (!mixpi_is_nan(k->p) && !mixpi_is_nan(k->q)) return mixpi_same_infer(c);
    return mixp_context_fail(c->ctx, MIXP_ERR_ARGUMENT,
        "clamp: low is %g and high is %g; pass numbers", (double)k->p, (double)k->q);
}

static mixp_result mixpi_clamp_forward(mixp_call *c) {
    const mixp_unary_args *k = (const mixp_unary_args *)c->attrs;
    MIXPI_TRY(mixpi_constant_fits(c, "low", k->p, "-INFINITY for no bound"));
    MIXPI_TRY(mixpi_constant_fits(c, "high", k->q, "INFINITY for no bound"));
    return mixpi_unary_forward(c);
}

MIXPREC_API mixp_tensor *mixp_clamp(mixp_context *ctx, mixp_tensor *x, float low, float high) {
    return mixpi_apply_unary_by(ctx, MIXP_OP_CLAMP, MIXP_UNARY_CLAMP, x, low, high);
}
