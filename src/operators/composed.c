#pragma once
#include "sums.c"
#include "shapes.c"
/* --- min, argmin, logsumexp, var, std, vector_norm: made of other operators -------------- */

MIXPREC_API mixp_tensor *mixp_min(mixp_context *ctx, mixp_tensor *x, int dim, int keep)
{ return mixp_neg(ctx, mixp_max(ctx, mixp_neg(ctx, x), dim, keep)); }
MIXPREC_API mixp_tensor *mixp_argmin(mixp_context *ctx, mixp_tensor *x, int dim, int keep)
{ return mixp_argmax(ctx, mixp_neg(ctx, x), dim, keep); }

typedef struct mixpi_form {
    int dim, keep, correction;  /* correction: of var                                      */
    int wide;                   /* 1: under autocast the result is f32                     */
    mixp_tensor *(*of)(mixp_context *ctx, mixp_tensor *x, const struct mixpi_form *p);
} mixpi_form;

static mixp_tensor *mixpi_in_dtype(mixp_context *ctx, mixp_tensor *x, mixp_dtype dtype)
{ return x && x->dtype != dtype ? mixp_cast(ctx, x, dtype) : x; }

/* Computes the form of x in f32, whatever region is open, and rounds once: to the dtype that a
 * single operator of its class would have. */
static mixp_tensor *mixpi_apply_form(mixp_context *ctx, mixp_tensor *x, const mixpi_form *p) {
    mixp_autocast off, now;
    mixp_tensor *y;
    /* If x is no tensor, the cast reports it. */
    if (!ctx || !mixpi_is_live(x)) return mixp_cast(ctx, x, MIXP_F32);
    now = mixp_autocast_current(ctx);
    memset(&off, 0, sizeof off);
    off.dtype = MIXP_F32;
    off.level = 1;
    if (mixp_autocast_push(ctx, &off) != MIXP_OK) return NULL;
    y = p->of(ctx, mixpi_in_dtype(ctx, x, MIXP_F32), p);
    mixp_autocast_pop(ctx);
    if (!y || now.dtype == MIXP_F32) return mixpi_in_dtype(ctx, y, x->dtype);
    if (now.level < 2) return p->wide ? y : mixpi_in_dtype(ctx, y, x->dtype);
    return y->rank ? mixpi_in_dtype(ctx, y, now.dtype) : y;
}

/* The largest value is taken off first. The bounds keep Inf - Inf away. */
static mixp_tensor *mixpi_form_logsumexp(mixp_context *ctx, mixp_tensor *x,
                                         const mixpi_form *p) {
    const float most = mixp_f32_of_bits(0x7F7FFFFFu);
    mixp_tensor *top = mixp_max(ctx, mixp_detach(ctx, x), p->dim, 1), *y;
    top = mixp_clamp(ctx, top, -most, most);
    y = mixp_exp(ctx, mixp_sub(ctx, x, top));
    y = mixp_log(ctx, mixp_sum(ctx, y, p->dim, p->keep));
    return y ? mixp_add(ctx, y, mixp_reshape(ctx, top, y->rank, y->shape)) : NULL;
}

MIXPREC_API mixp_tensor *mixp_logsumexp(mixp_context *ctx, mixp_tensor *x, int dim, int keep) {
    mixpi_form p;
    memset(&p, 0, sizeof p);
    p.dim = dim;
    p.keep = keep;
    p.wide = 1;
    p.of = mixpi_form_logsumexp;
    return mixpi_apply_form(ctx, x, &p);
}

/* Two passes. The mean counts as a constant: the deviations sum to 0, and so does its share of the
 * gradient. */
static mixp_tensor *mixpi_form_var(mixp_context *ctx, mixp_tensor *x, const mixpi_form *p) {
    mixp_tensor *mean = mixp_mean(ctx, mixp_detach(ctx, x), p->dim, 1);
    mixp_tensor *y = mixp_square(ctx, mixp_sub(ctx, x, mean));
    double left;
    if (!y) return NULL;
    left = (double)(x->count / mean->count) - p->correction;
    y = mixp_sum(ctx, y, p->dim, p->keep);
    return mixp_scale(ctx, y, left > 0.0 ? (float)(1.0 / left) : mixp_f32_of_bits(0x7F800000u));
}

MIXPREC_API mixp_tensor *mixp_var(mixp_context *ctx, mixp_tensor *x, int dim, int correction,
                                  int keep) {
    mixpi_form p;
    memset(&p, 0, sizeof p);
    p.dim = dim;
    p.keep = keep;
    p.correction = correction;
    p.of = mixpi_form_var;
    return mixpi_apply_form(ctx, x, &p);
}

/* The square root of t. Where t is 0, its gradient is 0, as those of PyTorch's std and norm. */
static mixp_tensor *mixpi_root(mixp_context *ctx, mixp_tensor *t) {
    static const mixp_op root = { "root", MIXP_CLASS_KEEP, sizeof(mixp_unary_args),
                                  mixpi_same_infer, mixpi_unary_forward, mixpi_unary_backward,
                                  NULL };
    mixp_unary_args k;
    memset(&k, 0, sizeof k);
    k.op = MIXP_UNARY_ROOT;
    return mixp_apply(ctx, &root, 1, &t, 1, &k);
}

static mixp_tensor *mixpi_form_std(mixp_context *ctx, mixp_tensor *x, const mixpi_form *p)
{ return mixpi_root(ctx, mixpi_form_var(ctx, x, p)); }

MIXPREC_API mixp_tensor *mixp_std(mixp_context *ctx, mixp_tensor *x, int dim, int correction,
                                  int keep) {
    mixpi_form p;
    memset(&p, 0, sizeof p);
    p.dim = dim;
    p.keep = keep;
    p.correction = correction;
    p.of = mixpi_form_std;
    return mixpi_apply_form(ctx, x, &p);
}

static mixp_tensor *mixpi_form_norm(mixp_context *ctx, mixp_tensor *x, const mixpi_form *p)
{ return mixpi_root(ctx, mixp_sum(ctx, mixp_square(ctx, x), p->dim, p->keep)); }

MIXPREC_API mixp_tensor *mixp_vector_norm(mixp_context *ctx, mixp_tensor *x, int dim,
                                          int keep) {
    mixpi_form p;
    memset(&p, 0, sizeof p);
    p.dim = dim;
    p.keep = keep;
    p.wide = 1;
    p.of = mixpi_form_norm;
    return mixpi_apply_form(ctx, x, &p);
}

