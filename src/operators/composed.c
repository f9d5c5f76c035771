#pragma once
#include "sums.c"
#include "picking.c"
#include "losses.c"
#include "random.c"
/* --- min, argmin, logsumexp, var, std, vector_norm, prelu: made of others ---------------- */

/* Can `name` reduce x along dim? */
static int mixpi_reduces(mixp_context *ctx, const char *name, mixp_tensor *x, int dim) {
    mixpi_outer o;
    mixpi_reduced to;
    mixp_call *c = mixpi_outer_call(&o, ctx, name, 1, x, NULL, NULL);
    return c && mixpi_reduce_shape(c, dim, 0, &to) == MIXP_OK;
}

/* Has x a smallest element along dim? Reports under the name of `name` if not. */
static int mixpi_has_smallest(mixp_context *ctx, const char *name, mixp_tensor *x, int dim) {
    mixpi_outer o;
    mixpi_reduced to;
    mixp_call *c = mixpi_outer_call(&o, ctx, name, 1, x, NULL, NULL);
    if (!c || mixpi_reduce_shape(c, dim, 0, &to) != MIXP_OK) return 0;
    if (!to.n) mixpi_bad_shapes(c, "a minimum needs at least one element");
    return to.n > 0;
}

MIXPREC_API mixp_tensor *mixp_min(mixp_context *ctx, mixp_tensor *x, int dim, int keep) {
    if (!mixpi_has_smallest(ctx, "min", x, dim)) return NULL;
    return mixp_neg(ctx, mixp_max(ctx, mixp_neg(ctx, x), dim, keep));
}
MIXPREC_API mixp_tensor *mixp_argmin(mixp_context *ctx, mixp_tensor *x, int dim, int keep) {
    if (!mixpi_has_smallest(ctx, "argmin", x, dim)) return NULL;
    return mixp_argmax(ctx, mixp_neg(ctx, x), dim, keep);
}

typedef struct mixpi_form {
    const mixp_op *op;          /* operator that rounds the result of a reduction. NULL:
                                   the result is f32, and x was checked                   */
    int dim, keep, correction;  /* correction: the C of var's divisor n - C                */
    int wide;                   /* 1: under autocast the result is f32                     */
    const mixp_loss_desc *desc; /* options of a loss; otherwise NULL                       */
    mixp_tensor *target;        /* of a loss                                               */
    mixp_tensor *(*of)(mixp_context *ctx, mixp_tensor *x, const struct mixpi_form *p);
} mixpi_form;

/* Operators that round the results of forms, under names that a guard reports. */
enum {
    MIXPI_OF_LOGSUMEXP, MIXPI_OF_VAR, MIXPI_OF_STD, MIXPI_OF_NORM, MIXPI_ROUNDINGS
};

#define MIXPI_ROUNDING(name)                                                                  \
    { name, MIXP_CLASS_KEEP, sizeof(mixp_dtype), mixpi_rounding_infer, mixpi_cast_forward,    \
      mixpi_cast_backward, NULL }
static const mixp_op mixpi_roundings[MIXPI_ROUNDINGS] = {
    MIXPI_ROUNDING("logsumexp"), MIXPI_ROUNDING("var"), MIXPI_ROUNDING("std"),
    MIXPI_ROUNDING("vector_norm")
};
#undef MIXPI_ROUNDING

/* The dtype that a single operator of the form's class would give y, a result of x. */
static mixp_dtype mixpi_form_dtype(
    mixp_autocast region, const mixp_tensor *x, const mixp_tensor *y, const mixpi_form *p) {
    if (!p->op) return MIXP_F32;
    if (region.dtype == MIXP_F32) return mixpi_plain_dtype(x);
    if (region.level >= 2) return y->rank ? region.dtype : MIXP_F32;
    return p->wide ? MIXP_F32 : mixpi_plain_dtype(x);
}

/* Computes the form of x in f32, whatever region is open, and rounds once. */
static mixp_tensor *mixpi_apply_form(mixp_context *ctx, mixp_tensor *x, const mixpi_form *p) {
    if (p->op && !mixpi_reduces(ctx, p->op->name, x, p->dim)) return NULL;
    mixp_autocast now = mixp_autocast_current(ctx);
    const int region = mixpi_open_f32(ctx);
    if (region < 0) return NULL;
    const int before = mixpi_enter(ctx);
    mixp_tensor *wide = mixpi_as_f32(ctx, x);
    mixp_tensor *y = wide ? p->of(ctx, wide, p) : NULL;
    mixpi_leave(ctx, before, MIXP_OK);
    mixp_autocast_close(ctx, region);
    if (!y) return NULL;
    mixp_dtype dtype = mixpi_form_dtype(now, x, y, p);
    if (dtype == MIXP_F32) return y;
    if (!p->wide) y->own.watch.raised = x->own.watch.raised;
    return mixp_apply(ctx, p->op, 1, &y, 1, &dtype);
}

/* A reduction along dim, whose result the operator `rounding` rounds. */
static mixpi_form mixpi_reduction_form(int rounding, int dim, int keep,
    mixp_tensor *(*of)(mixp_context *ctx, mixp_tensor *x, const mixpi_form *p)) {
    mixpi_form p = MIXPI_ZERO;
    p.op = &mixpi_roundings[rounding];
    p.dim = dim;
    p.keep = keep;
    p.of = of;
    return p;
}

/* The result of p without elements: `value`, a constant whose derivatives are 0. */
static mixp_tensor *mixpi_form_of_nothing(
    mixp_context *ctx, mixp_tensor *x, const mixpi_form *p, uint32_t value) {
    return mixp_add_scalar(ctx, mixp_sum(ctx, x, p->dim, p->keep), mixp_f32_of_bits(value));
}

/* The largest value is subtracted first. The bounds keep Inf - Inf away. */
static mixp_tensor *mixpi_form_logsumexp(mixp_context *ctx, mixp_tensor *x, const mixpi_form *p) {
    const float most = mixp_f32_of_bits(0x7F7FFFFFu);
    if (!x->count) return mixpi_form_of_nothing(ctx, x, p, 0xFF800000u);
    mixp_tensor *top = mixp_max(ctx, mixp_detach(ctx, x), p->dim, 1), *y;
    top = mixp_clamp(ctx, top, -most, most);
    y = mixp_exp(ctx, mixp_sub(ctx, x, top));
    y = mixp_log(ctx, mixp_sum(ctx, y, p->dim, p->keep));
    return y ? mixp_add(ctx, y, mixp_reshape(ctx, top, y->rank, y->shape)) : NULL;
}

MIXPREC_API mixp_tensor *mixp_logsumexp(mixp_context *ctx, mixp_tensor *x, int dim, int keep) {
    mixpi_form p = mixpi_reduction_form(MIXPI_OF_LOGSUMEXP, dim, keep, mixpi_form_logsumexp);
    p.wide = 1;
    return mixpi_apply_form(ctx, x, &p);
}

/* x minus its mean along dim. The mean counts as a constant in backward: the gradient of a sum of
 * squares of deviations has no share of it, because deviations sum to 0. mixp_jvp counts it. */
typedef struct mixpi_deviation { mixp_binary_args k; int dim; } mixpi_deviation;

/* Sets saved 2 to saved 0 where that is finite, otherwise to 0: 0 m + 1 is a mask of the finite. */
static mixp_result mixpi_finite_or_0(mixp_call *c) {
    const mixp_tensor *means = c->saved[0];
    mixp_unary_args mask = mixpi_unary_of(MIXP_UNARY_AFFINE, 0.0f, mixpi_tensor_in(means),
        mixpi_tensor_out(c->saved[1], 0), means->count);
    mask.q = 1.0f;
    MIXPI_TRY(MIXPI_RUN(c, unary, &mask));

    /* An element of 1 chooses saved 0; there is no b, so that others become 0. */
    mixp_where_args k = MIXPI_ZERO;
    k.rank = 1;
    k.shape[0] = mask.n;
    k.mask = mixpi_tensor_in(c->saved[1]);
    k.a = mask.a;
    k.mask_strides[0] = k.a_strides[0] = 1;
    k.y = mixpi_tensor_out(c->saved[2], 0);
    return MIXPI_RUN(c, where, &k);
}

/* The mean was rounded. Where values share a large offset, that error can be as large as their
 * deviations. It is the mean of the deviations, and is subtracted in place. A row with Inf has no
 * such mean, and keeps its deviations. */
static mixp_result mixpi_deviation_forward(mixp_call *c) {
    mixpi_deviation *p = (mixpi_deviation *)c->attrs;
    const mixp_tensor *mean = c->in[1];
    mixpi_reduced to;
    MIXPI_TRY(mixpi_binary_forward(c));
    MIXPI_TRY(mixpi_reduce_shape(c, p->dim, 1, &to));
    for (int i = 0; i < 3; i++)
        if (!mixp_call_save(c, i, MIXP_F32, mean->rank, mean->shape)) return MIXP_ERR_MEMORY;

    /* The mean of the deviations, where it is finite, ... */
    mixp_reduce_args k = mixpi_reduce_of(mixpi_tensor_in(c->out), to.n, to.inner,
        1.0 / (double)to.n, mixpi_tensor_out(c->saved[0], 0));
    k.outer = to.outer;
    mixp_result r = MIXPI_RUN(c, reduce, &k);
    if (r == MIXP_OK) r = mixpi_finite_or_0(c);

    /* ... is subtracted from each. */
    mixp_binary_args again = p->k;
    again.a = mixpi_tensor_in(c->out);
    again.b = mixpi_tensor_in(c->saved[2]);
    return r == MIXP_OK ? MIXPI_RUN(c, binary, &again) : r;
}

static mixp_tensor *mixpi_deviations(mixp_context *ctx, mixp_tensor *x, int dim) {
    static const mixp_op deviation = { "deviation", MIXP_CLASS_PROMOTE, sizeof(mixpi_deviation),
        mixpi_binary_infer, mixpi_deviation_forward, mixpi_binary_backward, NULL };
    mixp_tensor *in[2];
    mixpi_deviation p = MIXPI_ZERO;
    p.k.op = MIXP_BINARY_SUB;
    p.dim = dim;
    in[0] = x;
    in[1] = mixp_mean(ctx, mixp_detach(ctx, x), dim, 1);
    return mixp_apply(ctx, &deviation, 2, in, 2, &p);
}

/* Two passes, and the loss by rounding the mean. */
static mixp_tensor *mixpi_form_var(mixp_context *ctx, mixp_tensor *x, const mixpi_form *p) {
    if (!x->count) return mixpi_form_of_nothing(ctx, x, p, 0x7FC00000u);
    mixp_tensor *y = mixp_square(ctx, mixpi_deviations(ctx, x, p->dim));
    y = mixp_sum(ctx, y, p->dim, p->keep);
    if (!y) return NULL;
    double left = (double)(y->count ? x->count / y->count : 1) - p->correction;
    return mixp_scale(ctx, y, left > 0.0 ? (float)(1.0 / left) : mixp_f32_of_bits(0x7F800000u));
}

MIXPREC_API mixp_tensor *mixp_var(
    mixp_context *ctx, mixp_tensor *x, int dim, int correction, int keep) {
    mixpi_form p = mixpi_reduction_form(MIXPI_OF_VAR, dim, keep, mixpi_form_var);
    p.correction = correction;
    return mixpi_apply_form(ctx, x, &p);
}

/* The square root of t. Where t is 0, its gradient is 0, as those of PyTorch's std and norm. */
static mixp_tensor *mixpi_root(mixp_context *ctx, mixp_tensor *t) {
    static const mixp_op root = { "root", MIXP_CLASS_KEEP, sizeof(mixp_unary_args),
        mixpi_same_infer, mixpi_unary_forward, mixpi_unary_backward, NULL };
    mixp_unary_args k = MIXPI_ZERO;
    k.op = MIXP_UNARY_ROOT;
    return mixp_apply(ctx, &root, 1, &t, 1, &k);
}

static mixp_tensor *mixpi_form_std(mixp_context *ctx, mixp_tensor *x, const mixpi_form *p) {
    return mixpi_root(ctx, mixpi_form_var(ctx, x, p));
}

MIXPREC_API mixp_tensor *mixp_std(
    mixp_context *ctx, mixp_tensor *x, int dim, int correction, int keep) {
    mixpi_form p = mixpi_reduction_form(MIXPI_OF_STD, dim, keep, mixpi_form_std);
    p.correction = correction;
    return mixpi_apply_form(ctx, x, &p);
}

static mixp_tensor *mixpi_form_norm(mixp_context *ctx, mixp_tensor *x, const mixpi_form *p) {
    return mixpi_root(ctx, mixp_sum(ctx, mixp_square(ctx, x), p->dim, p->keep));
}

MIXPREC_API mixp_tensor *mixp_vector_norm(mixp_context *ctx, mixp_tensor *x, int dim, int keep) {
    mixpi_form p = mixpi_reduction_form(MIXPI_OF_NORM, dim, keep, mixpi_form_norm);
    p.wide = 1;
    return mixpi_apply_form(ctx, x, &p);
}

MIXPREC_API mixp_tensor *mixp_prelu(mixp_context *ctx, mixp_tensor *x, mixp_tensor *w) {
    mixpi_outer o;
    int64_t shape[MIXP_MAX_RANK];
    mixp_call *c = mixpi_outer_call(&o, ctx, "prelu", 2, x, w, NULL);
    if (!c) return NULL;
    if (w->rank > 1 || (w->count != 1 && (x->rank < 2 || x->shape[1] != w->count))) {
        mixpi_bad_shapes(c, "w needs one element, or one for each index of x's dimension 1");
        return NULL;
    }
    for (int i = 0; i < x->rank; i++) shape[i] = 1;
    if (w->count > 1) shape[0] = w->count;
    w = mixp_reshape(ctx, w, w->count > 1 ? x->rank - 1 : 0, shape);
    return mixpi_apply_binary(ctx, MIXP_OP_PRELU, MIXP_BINARY_PRELU, x, w);
}
