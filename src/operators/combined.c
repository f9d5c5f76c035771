#pragma once
#include "composed.c"
/* --- norm, cumprod, tril, triu, roll, prelu, addcdiv, scatter, searchsorted: made of others --- */

static mixp_tensor *mixpi_constant(mixp_context *ctx, double value) {
    return mixp_full(ctx, MIXP_F32, 0, NULL, value);
}

/* t to the power p, with slope 0 and this value where t is 0. */
static mixp_tensor *mixpi_pow_except_0(mixp_context *ctx, mixp_tensor *t, float p, float at_0) {
    mixp_tensor *none = mixp_eq(ctx, t, mixpi_constant(ctx, 0.0));
    t = mixp_pow(ctx, mixp_masked_fill(ctx, t, none, 1.0f), p);
    return mixp_masked_fill(ctx, t, none, at_0);
}

/* The p-th root of the sum of |x|^p; the number of elements that are not 0; the largest or the
 * smallest |x|. */
static mixp_tensor *mixpi_form_any_norm(mixp_context *ctx, mixp_tensor *x, const mixpi_form *p) {
    const uint32_t inf = 0x7F800000u, order = mixp_bits_of_f32(p->order);
    const float at_0 = p->order > 0.0f ? 0.0f : mixp_f32_of_bits(inf);
    mixp_tensor *t;
    if (p->order == 0.0f) {
        t = mixp_cast(ctx, mixp_ne(ctx, x, mixpi_constant(ctx, 0.0)), MIXP_F32);
        return mixp_sum(ctx, t, p->dim, p->keep);
    }
    t = mixp_abs(ctx, x);
    if (order == inf) return mixp_max(ctx, t, p->dim, p->keep);
    if (order == (inf | 0x80000000u)) return mixp_min(ctx, t, p->dim, p->keep);
    if (p->order == 1.0f) return mixp_sum(ctx, t, p->dim, p->keep);
    t = mixp_sum(ctx, mixpi_pow_except_0(ctx, t, p->order, at_0), p->dim, p->keep);
    return mixpi_pow_except_0(ctx, t, 1.0f / p->order, at_0);
}

/* Does x have elements along dim? A norm of a negative order needs one. */
static int mixpi_norm_has_elements(mixp_context *ctx, mixp_tensor *x, int dim) {
    mixpi_outer o;
    mixpi_reduced to;
    mixp_call *c = mixpi_outer_call(&o, ctx, "norm", 1, x, NULL, NULL);
    if (!c || mixpi_reduce_shape(c, dim, 0, &to) != MIXP_OK) return 0;
    if (!to.n) mixpi_bad_shapes(c, "a norm of negative order needs at least one element");
    return to.n > 0;
}

MIXPREC_API mixp_tensor *mixp_norm(
    mixp_context *ctx, mixp_tensor *x, float order, int dim, int keep) {
    mixpi_form p;
    if (order == 2.0f) return mixp_vector_norm(ctx, x, dim, keep);
    if (ctx && mixpi_is_nan(order)) {
        mixp_context_fail(ctx, MIXP_ERR_ARGUMENT, "norm: the order is NaN; pass a number");
        return NULL;
    }
    if (order < 0.0f && !mixpi_norm_has_elements(ctx, x, dim)) return NULL;
    memset(&p, 0, sizeof p);
    p.dim = dim;
    p.keep = keep;
    p.wide = 1;
    p.order = order;
    p.op = &mixpi_roundings[MIXPI_OF_ANY_NORM];
    p.of = mixpi_form_any_norm;
    return mixpi_apply_form(ctx, x, &p);
}

/* Each pass multiplies by what lies 1, 2, 4 ... places before (Hillis and Steele, 1986). No
 * gradient divides, so zeros do no harm. */
static mixp_tensor *mixpi_form_cumprod(mixp_context *ctx, mixp_tensor *x, const mixpi_form *p) {
    const int axis = mixpi_axis(p->dim, x->rank);
    const int64_t n = axis < 0 ? 1 : x->shape[axis];
    mixp_tensor *y = mixp_reshape(ctx, x, x->rank, x->shape);
    for (int64_t s = 1; s < n; s *= 2) {
        mixp_tensor *before = mixp_slice(ctx, y, axis, 0, n - s);
        y = mixp_mul(ctx, y, mixp_pad(ctx, before, axis, s, 0, 1.0f));
    }
    return y;
}

MIXPREC_API mixp_tensor *mixp_cumprod(mixp_context *ctx, mixp_tensor *x, int dim) {
    mixpi_form p;
    memset(&p, 0, sizeof p);
    p.dim = dim == MIXP_ALL ? MIXP_MAX_RANK : dim;
    p.wide = 1;
    p.op = &mixpi_roundings[MIXPI_OF_CUMPROD];
    p.of = mixpi_form_cumprod;
    return mixpi_apply_form(ctx, x, &p);
}

/* 1, 2 ... n along dim of a matrix whose other dimension is 1. */
static mixp_tensor *mixpi_counted(mixp_context *ctx, int64_t n, int dim) {
    int64_t shape[2];
    shape[dim] = n;
    shape[1 - dim] = 1;
    return mixp_cumsum(ctx, mixp_full(ctx, MIXP_F32, 2, shape, 1.0), dim);
}

/* x with zeros where column - row is above `diagonal` (side 1) or below it (side -1). */
static mixp_tensor *mixpi_triangle(
    mixp_context *ctx, const char *name, mixp_tensor *x, int64_t diagonal, int side) {
    const int64_t most = 1 << 24;
    mixpi_outer o;
    mixp_call *c = mixpi_outer_call(&o, ctx, name, 1, x, NULL, NULL);
    mixp_tensor *place, *edge, *hidden;
    if (!c || mixpi_need_real(c, 1, 1) != MIXP_OK) return NULL;
    if (x->rank < 2 || x->shape[x->rank - 2] > most || x->shape[x->rank - 1] > most) {
        mixpi_bad_shapes(c, "x[..., rows, cols] needs two dimensions, of at most 2^24");
        return NULL;
    }
    const int region = mixpi_open_f32(ctx);
    if (region < 0) return NULL;
    place = mixp_sub(ctx, mixpi_counted(ctx, x->shape[x->rank - 1], 1),
        mixpi_counted(ctx, x->shape[x->rank - 2], 0));
    edge = mixpi_constant(ctx, (double)diagonal);
    hidden = side > 0 ? mixp_gt(ctx, place, edge) : mixp_lt(ctx, place, edge);
    mixp_autocast_close(ctx, region);
    return mixp_masked_fill(ctx, x, hidden, 0.0f);
}

MIXPREC_API mixp_tensor *mixp_tril(mixp_context *ctx, mixp_tensor *x, int64_t diagonal) {
    return mixpi_triangle(ctx, "tril", x, diagonal, 1);
}
MIXPREC_API mixp_tensor *mixp_triu(mixp_context *ctx, mixp_tensor *x, int64_t diagonal) {
    return mixpi_triangle(ctx, "triu", x, diagonal, -1);
}

MIXPREC_API mixp_tensor *mixp_roll(mixp_context *ctx, mixp_tensor *x, int64_t shift, int dim) {
    mixpi_outer o;
    mixp_tensor *parts[2];
    if (!mixpi_outer_call(&o, ctx, "roll", 1, x, NULL, NULL)) return NULL;
    int axis = mixpi_axis(dim, x->rank);
    if (axis < 0) return mixpi_no_dim(ctx, "mixp_roll", "dimension of", x, dim);
    int64_t n = x->shape[axis];
    if (n == 0 || shift % n == 0) return mixp_reshape(ctx, x, x->rank, x->shape);
    shift = shift % n < 0 ? shift % n + n : shift % n;
    parts[0] = mixp_slice(ctx, x, axis, n - shift, shift);
    parts[1] = mixp_slice(ctx, x, axis, 0, n - shift);
    return mixp_concat(ctx, 2, parts, axis);
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

MIXPREC_API mixp_tensor *mixp_addcdiv(
    mixp_context *ctx, mixp_tensor *x, mixp_tensor *a, mixp_tensor *b, float value) {
    return mixp_add(ctx, x, mixp_scale(ctx, mixp_div(ctx, a, b), value));
}

/* Counts the sources of each element, clears the elements that have one, and adds the sources. */
MIXPREC_API mixp_tensor *mixp_scatter(
    mixp_context *ctx, mixp_tensor *x, int dim, mixp_tensor *ids, mixp_tensor *src) {
    mixpi_outer o;
    mixp_tensor *sources;
    mixp_call *c = mixpi_outer_call(&o, ctx, "scatter", 3, x, src, ids);
    if (!c || mixpi_need_real(c, 2, 2) != MIXP_OK) return NULL;
    const int region = mixpi_open_f32(ctx);
    if (region < 0) return NULL;
    sources = mixp_full(ctx, MIXP_F32, x->rank, x->shape, 0.0);
    sources = mixp_scatter_add(
        ctx, sources, dim, ids, mixp_full(ctx, MIXP_F32, src->rank, src->shape, 1.0));
    sources = mixp_ne(ctx, sources, mixpi_constant(ctx, 0.0));
    mixp_autocast_close(ctx, region);
    return mixp_scatter_add(ctx, mixp_masked_fill(ctx, x, sources, 0.0f), dim, ids, src);
}

/* Rounds to i32: the numbers of x are integers. */
static mixp_result mixpi_integers_infer(mixp_call *c) {
    return mixpi_call_output_fixed(c, MIXP_I32, c->in[0]->rank, c->in[0]->shape);
}

static mixp_tensor *mixpi_integers(mixp_context *ctx, mixp_tensor *x) {
    static const mixp_op integers = { "integers", MIXP_CLASS_KEEP, 0, mixpi_integers_infer,
        mixpi_cast_forward, NULL, NULL };
    return mixp_apply(ctx, &integers, 1, &x, 1, NULL);
}

/* n minus the number of edges that are not before a value: NaN is behind all. */
MIXPREC_API mixp_tensor *mixp_searchsorted(
    mixp_context *ctx, mixp_tensor *edges, mixp_tensor *values, int right) {
    mixpi_outer o;
    mixp_call *c = mixpi_outer_call(&o, ctx, "searchsorted", 2, edges, values, NULL);
    if (!c) return NULL;

    /* The edges are one row for all values, or a row for each row of values. */
    int rank = values->rank;
    int64_t n = mixpi_last_dim(edges);
    if (edges->rank < 1 || rank == MIXP_MAX_RANK || n > 1 << 24 ||
        (edges->rank > 1 && (edges->rank != rank || mixpi_rows_of(edges) != mixpi_rows_of(values) ||
                                memcmp(edges->shape, values->shape,
                                    (size_t)(rank - 1) * sizeof *edges->shape) != 0))) {
        mixpi_bad_shapes(c, "edges[n], or edges[..., n] with values[..., m]; n is at most 2^24");
        return NULL;
    }

    /* For each value, in f32: how many edges are behind it? */
    const int region = mixpi_open_f32(ctx);
    if (region < 0) return NULL;
    if (edges->rank > 1) edges = mixp_unsqueeze(ctx, edges, -2);
    values = mixp_unsqueeze(ctx, values, -1);
    mixp_tensor *behind = right ? mixp_gt(ctx, edges, values) : mixp_ge(ctx, edges, values);
    behind = mixp_sum(ctx, mixp_cast(ctx, behind, MIXP_F32), -1, 0);
    behind = mixpi_integers(ctx, mixp_rsub(ctx, behind, (float)n));
    mixp_autocast_close(ctx, region);
    return behind;
}
