#pragma once
#include "elementwise.c"
/* --- cast, reshape, transpose, permute, flip, expand, pad, concat, stack, slice ----------- */

MIXPREC_API mixp_tensor *mixp_cast(mixp_context *ctx, mixp_tensor *x, mixp_dtype dtype) {
    return mixpi_cast(ctx, x, dtype);
}

/* Attributes of reshape. shape: the caller's array, not copied. */
typedef struct mixpi_reshape {
    int rank;
    const int64_t *shape;
} mixpi_reshape;

/* The product of the dimensions that are not -1; -1 if one is below -1, if two are -1, or if the
 * product is above most. *open: the dimension that is -1, or -1. */
static int64_t mixpi_reshape_known(int rank, const int64_t *shape, int64_t most, int *open) {
    int64_t known = 1;
    *open = -1;
    for (int i = 0; i < rank; i++) {
        if (shape[i] == -1 && *open < 0) *open = i;
        else if (shape[i] < 0 || (shape[i] && known > most / shape[i])) return -1;
        else known *= shape[i];
    }
    return known;
}

static mixp_result mixpi_reshape_infer(mixp_call *c) {
    const mixpi_reshape *p = (const mixpi_reshape *)c->attrs;
    int64_t shape[MIXP_MAX_RANK], known, count = c->in[0]->count;
    int open;
    if (p->rank < 0 || p->rank > MIXP_MAX_RANK || (p->rank && !p->shape))
        return mixp_context_fail(c->ctx, MIXP_ERR_SHAPE,
            "reshape: rank %d with shape %s; the rank must be 0 to %d", p->rank,
            p->shape ? "given" : "NULL", MIXP_MAX_RANK);
    known = mixpi_reshape_known(p->rank, p->shape, count ? count : INT64_MAX, &open);
    if (known < 0)
        return mixpi_bad_shapes(
            c, "new dimensions must be at least 0 and keep the number of elements; one may be -1");
    for (int i = 0; i < p->rank; i++) shape[i] = p->shape[i];
    if (open >= 0 && known && count % known == 0) shape[open] = count / known;
    else if (open >= 0) return mixpi_bad_shapes(c, "the dimension -1 would not be an integer");
    mixpi_call_reads_all(c, 0);
    return mixp_call_alias(c, p->rank, shape);
}

MIXPREC_API mixp_tensor *mixp_reshape(
    mixp_context *ctx, mixp_tensor *x, int rank, const int64_t *shape) {
    mixpi_reshape p = { rank, shape };
    return mixpi_apply_one(ctx, MIXP_OP_RESHAPE, x, &p);
}

static mixp_result mixpi_detach_infer(mixp_call *c) {
    return mixp_call_alias(c, c->in[0]->rank, c->in[0]->shape);
}

MIXPREC_API mixp_tensor *mixp_detach(mixp_context *ctx, mixp_tensor *x) {
    return mixpi_apply_one(ctx, MIXP_OP_DETACH, x, NULL);
}

/* Begins a copy over t's shape. The caller sets arrays and strides. */
static mixp_copy_args mixpi_copy_to(const mixp_tensor *t) {
    mixp_copy_args k = MIXPI_ZERO;
    k.rank = t->rank;
    memcpy(k.shape, t->shape, sizeof k.shape);
    return k;
}

/* Attributes of transpose, permute and flip. first, strides: where the result's elements lie in
 * x. */
typedef struct mixpi_reorder {
    int     n;                  /* number of dims; -1: dims is NULL                        */
    int     dims[MIXP_MAX_RANK];/* up to n dimensions                                      */
    int64_t first, strides[MIXP_MAX_RANK];
} mixpi_reorder;

/* y[i] = x[first + i . strides], or the gradient the other way. Each element of x is read once. */
static mixp_result mixpi_reorder_both(mixp_call *c) {
    const mixpi_reorder *p = (const mixpi_reorder *)c->attrs;
    mixp_copy_args k = mixpi_copy_to(c->out);
    int back = c->out->grad != NULL;
    mixpi_dense_strides(k.rank, k.shape, back ? k.src_strides : k.dst_strides);
    memcpy(back ? k.dst_strides : k.src_strides, p->strides, sizeof p->strides);
    k.src = back ? mixpi_call_dy(c) : mixpi_in_at(mixpi_call_x(c, 0), p->first);
    k.dst = mixpi_call_to(c);
    if (!k.dst.data) return MIXP_OK;
    if (back) k.dst = mixpi_out_at(k.dst, p->first);
    return MIXPI_RUN(c, copy, &k);
}

static mixp_result mixpi_transpose_infer(mixp_call *c) {
    mixpi_reorder *p = (mixpi_reorder *)c->attrs;
    const mixp_tensor *x = c->in[0];
    int64_t shape[MIXP_MAX_RANK], swap;
    int a = mixpi_axis(p->dims[0], x->rank), b = mixpi_axis(p->dims[1], x->rank);
    if (a < 0 || b < 0) return mixpi_bad_shapes(c, "dim0 and dim1 must be dimensions of x");
    memcpy(shape, x->shape, sizeof shape);
    mixpi_dense_strides(x->rank, x->shape, p->strides);
    shape[a] = x->shape[b];
    shape[b] = x->shape[a];
    swap = p->strides[a];
    p->strides[a] = p->strides[b];
    p->strides[b] = swap;
    mixpi_call_reads_all(c, 0);
    return mixp_call_output(c, x->dtype, x->rank, shape);
}

static mixp_tensor *mixpi_apply_reorder(
    mixp_context *ctx, mixp_op_id id, mixp_tensor *x, int n, const int *dims) {
    mixpi_reorder p = MIXPI_ZERO;
    p.n = dims || !n ? n : -1;
    for (int i = 0; i < p.n && i < MIXP_MAX_RANK; i++) p.dims[i] = dims[i];
    return mixpi_apply_one(ctx, id, x, &p);
}

MIXPREC_API mixp_tensor *mixp_transpose(mixp_context *ctx, mixp_tensor *x, int dim0, int dim1) {
    int dims[2];
    dims[0] = dim0;
    dims[1] = dim1;
    return mixpi_apply_reorder(ctx, MIXP_OP_TRANSPOSE, x, 2, dims);
}

static mixp_result mixpi_permute_infer(mixp_call *c) {
    mixpi_reorder *p = (mixpi_reorder *)c->attrs;
    const mixp_tensor *x = c->in[0];
    int64_t shape[MIXP_MAX_RANK], strides[MIXP_MAX_RANK];
    unsigned seen = 0;
    if (p->n != x->rank) return mixpi_bad_shapes(c, "dims must name each dimension of x once");
    mixpi_dense_strides(x->rank, x->shape, strides);
    for (int i = 0; i < p->n; i++) {
        int from = mixpi_axis(p->dims[i], x->rank);
        if (from < 0 || (seen >> from & 1u))
            return mixpi_bad_shapes(c, "dims must name each dimension of x once");
        seen |= 1u << from;
        shape[i] = x->shape[from];
        p->strides[i] = strides[from];
    }
    mixpi_call_reads_all(c, 0);
    return mixp_call_output(c, x->dtype, x->rank, shape);
}

MIXPREC_API mixp_tensor *mixp_permute(
    mixp_context *ctx, mixp_tensor *x, int rank, const int *dims) {
    return mixpi_apply_reorder(ctx, MIXP_OP_PERMUTE, x, rank, dims);
}

static mixp_result mixpi_flip_infer(mixp_call *c) {
    mixpi_reorder *p = (mixpi_reorder *)c->attrs;
    const mixp_tensor *x = c->in[0];
    int axis = mixpi_axis(p->dims[0], x->rank);
    if (axis < 0) return mixpi_bad_shapes(c, "dim must be a dimension of x");
    mixpi_dense_strides(x->rank, x->shape, p->strides);
    p->first = (x->shape[axis] - 1) * p->strides[axis];
    p->strides[axis] = -p->strides[axis];
    mixpi_call_reads_all(c, 0);
    return mixp_call_output(c, x->dtype, x->rank, x->shape);
}

MIXPREC_API mixp_tensor *mixp_flip(mixp_context *ctx, mixp_tensor *x, int dim) {
    return mixpi_apply_reorder(ctx, MIXP_OP_FLIP, x, 1, &dim);
}

/* Fails with the shape of x. */
static mixp_tensor *mixpi_no_dim(
    mixp_context *ctx, const char *who, const char *what, const mixp_tensor *x, int dim) {
    char text[336];
    mixpi_input_text(x, "x", text, sizeof text);
    mixp_context_fail(ctx, MIXP_ERR_SHAPE, "%s: %d is no %s %s", who, dim, what, text);
    return NULL;
}

MIXPREC_API mixp_tensor *mixp_squeeze(mixp_context *ctx, mixp_tensor *x, int dim) {
    int64_t shape[MIXP_MAX_RANK];
    int i, axis, rank = 0;
    mixpi_outer o;
    if (!mixpi_outer_call(&o, ctx, "squeeze", 1, x, NULL, NULL)) return NULL;
    axis = mixpi_axis(dim, x->rank);
    if (dim != MIXP_ALL && axis < 0)
        return mixpi_no_dim(ctx, "mixp_squeeze", "dimension of", x, dim);
    for (i = 0; i < x->rank; i++) {
        int named = dim == MIXP_ALL || i == axis;
        if (!named || x->shape[i] != 1) shape[rank++] = x->shape[i];
    }
    return mixp_reshape(ctx, x, rank, shape);
}

MIXPREC_API mixp_tensor *mixp_unsqueeze(mixp_context *ctx, mixp_tensor *x, int dim) {
    int64_t shape[MIXP_MAX_RANK];
    mixpi_outer o;
    if (!mixpi_outer_call(&o, ctx, "unsqueeze", 1, x, NULL, NULL)) return NULL;
    int axis = mixpi_axis(dim, x->rank + 1);
    if (axis < 0 || x->rank == MIXP_MAX_RANK)
        return mixpi_no_dim(ctx, "mixp_unsqueeze", "place for a new dimension of", x, dim);
    for (int i = 0; i <= x->rank; i++)
        shape[i] = i < axis ? x->shape[i] : i == axis ? 1 : x->shape[i - 1];
    return mixp_reshape(ctx, x, x->rank + 1, shape);
}

/* Attributes of expand. shape: the caller's array, not copied. k: arguments
 * of binary_backward, because expand's gradient is that of a broadcast operand of a sum. */
typedef struct mixpi_expansion {
    int rank;
    const int64_t *shape;
    mixp_binary_args k;
} mixpi_expansion;

static mixp_result mixpi_expand_infer(mixp_call *c) {
    mixpi_expansion *p = (mixpi_expansion *)c->attrs;
    const mixp_tensor *x = c->in[0];
    int64_t step = 1;
    if (p->rank < x->rank || p->rank > MIXP_MAX_RANK || (p->rank && !p->shape))
        return mixpi_bad_shapes(c, "the new rank must be at least x's rank, and at most 8");
    p->k.rank = p->rank;
    for (int i = p->rank - 1; i >= 0; i--) {
        int64_t n = mixpi_broadcast_axis(x, p->rank, i, &step, &p->k.a_strides[i]);
        int64_t to = p->shape[i] == -1 && i >= p->rank - x->rank ? n : p->shape[i];
        if (to < 0 || (n != 1 && to != n))
            return mixpi_bad_shapes(
                c, "aligned at the right, x's dimensions must be 1, or equal to the new ones");
        p->k.shape[i] = to;
    }
    mixpi_call_reads_all(c, 0);
    return mixp_call_output(c, x->dtype, p->rank, p->k.shape);
}

static mixp_result mixpi_expand_forward(mixp_call *c) {
    const mixpi_expansion *p = (const mixpi_expansion *)c->attrs;
    mixp_copy_args k = mixpi_copy_to(c->out);
    mixpi_dense_strides(k.rank, k.shape, k.dst_strides);
    memcpy(k.src_strides, p->k.a_strides, sizeof k.src_strides);
    k.src = mixpi_call_x(c, 0);
    k.dst = mixpi_call_y(c);
    return MIXPI_RUN(c, copy, &k);
}

static mixp_result mixpi_expand_backward(mixp_call *c) {
    mixp_binary_args *k = &((mixpi_expansion *)c->attrs)->k;
    k->op = MIXP_BINARY_ADD;
    k->dy = mixpi_call_dy(c);
    k->dx = mixpi_call_dx(c, 0);
    return k->dx.data ? MIXPI_RUN(c, binary_backward, k) : MIXP_OK;
}

MIXPREC_API mixp_tensor *mixp_expand(
    mixp_context *ctx, mixp_tensor *x, int rank, const int64_t *shape) {
    mixpi_expansion p = MIXPI_ZERO;
    p.rank = rank;
    p.shape = shape;
    return mixpi_apply_one(ctx, MIXP_OP_EXPAND, x, &p);
}

typedef struct mixpi_padding {
    int     dim;
    int64_t before, after;
    float   value;
} mixpi_padding;

static mixp_result mixpi_pad_infer(mixp_call *c) {
    mixpi_padding *p = (mixpi_padding *)c->attrs;
    const mixp_tensor *x = c->in[0];
    int64_t shape[MIXP_MAX_RANK], most;
    int axis = mixpi_axis(p->dim, x->rank);
    if (x->dtype != MIXP_U8 && x->dtype != MIXP_I32 && mixpi_need_real(c, 1, 1) != MIXP_OK)
        return MIXP_ERR_DTYPE;
    if (axis < 0 || !x->rank) return mixpi_bad_shapes(c, "dim must be a dimension of x");
    memcpy(shape, x->shape, sizeof shape);
    most = x->count ? INT64_MAX / x->count * shape[axis] - shape[axis] : INT64_MAX / 4;
    if (p->before < 0 || p->after < 0 || p->before > most || p->after > most - p->before)
        return mixpi_bad_shapes(
            c, "before and after must be at least 0, and the result must fit in memory");
    shape[axis] += p->before + p->after;
    p->dim = axis;
    mixpi_call_reads_all(c, 0);
    return mixp_call_output(c, x->dtype, x->rank, shape);
}

/* Copies x into the padded array, or the middle of the gradient back. */
static mixp_result mixpi_pad_both(mixp_call *c) {
    const mixpi_padding *p = (const mixpi_padding *)c->attrs;
    int back = c->out->grad != NULL;
    mixp_copy_args k = mixpi_copy_to(c->in[0]);
    int64_t *whole = back ? k.src_strides : k.dst_strides;
    mixp_result r = MIXP_OK;
    mixpi_dense_strides(k.rank, k.shape, back ? k.dst_strides : k.src_strides);
    mixpi_dense_strides(k.rank, c->out->shape, whole);
    k.src = mixpi_call_from(c);
    k.dst = mixpi_call_to(c);
    if (!k.dst.data) return MIXP_OK;
    if (!back) r = mixpi_constant_fits(c, "value", p->value, "INFINITY");
    if (r != MIXP_OK) return r;
    if (!back) mixpi_note_written(c->out, (double)p->value);
    if (back) k.src = mixpi_in_at(k.src, p->before * whole[p->dim]);
    else r = mixpi_fill_with(c->ctx, k.dst, c->out->count, (double)p->value);
    if (!back) k.dst = mixpi_out_at(k.dst, p->before * whole[p->dim]);
    return r == MIXP_OK && c->in[0]->count ? MIXPI_RUN(c, copy, &k) : r;
}

MIXPREC_API mixp_tensor *mixp_pad(
    mixp_context *ctx, mixp_tensor *x, int dim, int64_t before, int64_t after, float value) {
    mixpi_padding p = MIXPI_ZERO;
    p.dim = dim;
    p.before = before;
    p.after = after;
    p.value = value;
    return mixpi_apply_one(ctx, MIXP_OP_PAD, x, &p);
}

/* Reports that input i does not fit the first input. */
static mixp_result mixpi_concat_misfit(mixp_call *c, int i, const char *rule) {
    char first[352], other[352], number[24];
    snprintf(number, sizeof number, "input %d", i);
    mixpi_input_text(c->in[0], "input 0", first, sizeof first);
    mixpi_input_text(c->in[i], number, other, sizeof other);
    return mixp_context_fail(
        c->ctx, MIXP_ERR_SHAPE, "%s: %s and %s do not fit: %s", c->op->name, first, other, rule);
}

static mixp_result mixpi_concat_infer(mixp_call *c) {
    int *axis = (int *)c->attrs, i, j;
    mixp_tensor *x = c->in[0];
    int64_t shape[MIXP_MAX_RANK];
    if (mixpi_need_real(c, c->n_in, c->n_in) != MIXP_OK) return MIXP_ERR_DTYPE;
    *axis = mixpi_axis(*axis, x->rank);
    if (*axis < 0 || !x->rank) return mixpi_bad_shapes(c, "dim must be one of their dimensions");

    /* The sizes along the axis are added; all others are equal. */
    memcpy(shape, x->shape, sizeof shape);
    for (i = 1; i < c->n_in; i++) {
        if (c->in[i]->rank != x->rank)
            return mixpi_concat_misfit(c, i, "all inputs need the same rank");
        for (j = 0; j < x->rank; j++)
            if (j != *axis && c->in[i]->shape[j] != x->shape[j])
                return mixpi_concat_misfit(c, i, "all other dimensions must be equal");
        if (c->in[i]->shape[*axis] > INT64_MAX - shape[*axis])
            return mixpi_concat_misfit(c, i, "the sum of their sizes exceeds 2^63 - 1");
        shape[*axis] += c->in[i]->shape[*axis];
    }
    mixpi_call_reads_all(c, 0);
    return mixp_call_output(c, mixpi_widest(c->n_in, c->in), x->rank, shape);
}

/* Copies input i to its place in the joined array, or its gradient back. first: offset of the
 * input's first element. */
static mixp_result mixpi_concat_part(mixp_call *c, int i, int64_t first) {
    mixp_copy_args k = mixpi_copy_to(c->in[i]);
    int back = c->out->grad != NULL;
    mixpi_dense_strides(k.rank, k.shape, back ? k.dst_strides : k.src_strides);
    mixpi_dense_strides(k.rank, c->out->shape, back ? k.src_strides : k.dst_strides);
    k.src = back ? mixpi_in_at(mixpi_call_dy(c), first) : mixpi_call_x(c, i);
    k.dst = back ? mixpi_call_dx(c, i) : mixpi_out_at(mixpi_call_y(c), first);
    return k.dst.data && c->in[i]->count ? MIXPI_RUN(c, copy, &k) : MIXP_OK;
}

/* Copies the inputs into the joined array, or the parts of its gradient back to the inputs. */
static mixp_result mixpi_concat_both(mixp_call *c) {
    int i, axis = *(const int *)c->attrs;
    int64_t first = 0, whole[MIXP_MAX_RANK];
    mixp_result r = MIXP_OK;
    mixpi_dense_strides(c->out->rank, c->out->shape, whole);
    for (i = 0; i < c->n_in && r == MIXP_OK; i++) {
        r = mixpi_concat_part(c, i, first);
        first += c->in[i]->shape[axis] * whole[axis];
    }
    return r;
}

MIXPREC_API mixp_tensor *mixp_concat(mixp_context *ctx, int n, mixp_tensor *const *x, int dim) {
    return mixp_apply(ctx, mixp_op_builtin(MIXP_OP_CONCAT), n, x, n, &dim);
}

static mixp_result mixpi_stack_infer(mixp_call *c) {
    int *axis = (int *)c->attrs, i;
    const mixp_tensor *x = c->in[0];
    int64_t shape[MIXP_MAX_RANK];
    if (mixpi_need_real(c, c->n_in, c->n_in) != MIXP_OK) return MIXP_ERR_DTYPE;
    *axis = mixpi_axis(*axis, x->rank + 1);
    if (*axis < 0 || x->rank == MIXP_MAX_RANK)
        return mixpi_bad_shapes(c, "dim must be one of the result, whose rank is at most 8");
    for (i = 1; i < c->n_in; i++)
        if (c->in[i]->rank != x->rank ||
            memcmp(c->in[i]->shape, x->shape, (size_t)x->rank * sizeof *shape) != 0)
            return mixpi_concat_misfit(c, i, "all inputs need the same shape");
    for (i = 0; i <= x->rank; i++)
        shape[i] = i < *axis ? x->shape[i] : i == *axis ? c->n_in : x->shape[i - 1];
    mixpi_call_reads_all(c, 0);
    return mixp_call_output(c, mixpi_widest(c->n_in, c->in), x->rank + 1, shape);
}

/* Copies each input to its place along the new axis, or its gradient back. */
static mixp_result mixpi_stack_both(mixp_call *c) {
    int i, back = c->out->grad != NULL, axis = *(const int *)c->attrs;
    mixp_copy_args k = mixpi_copy_to(c->in[0]);
    int64_t whole[MIXP_MAX_RANK], *own = back ? k.dst_strides : k.src_strides;
    int64_t *theirs = back ? k.src_strides : k.dst_strides;
    mixp_result r = MIXP_OK;
    mixpi_dense_strides(k.rank, k.shape, own);
    mixpi_dense_strides(c->out->rank, c->out->shape, whole);
    for (i = 0; i < k.rank; i++) theirs[i] = whole[i < axis ? i : i + 1];
    for (i = 0; i < c->n_in && r == MIXP_OK; i++) {
        k.src = back ? mixpi_in_at(mixpi_call_dy(c), i * whole[axis]) : mixpi_call_x(c, i);
        k.dst = back ? mixpi_call_dx(c, i) : mixpi_out_at(mixpi_call_y(c), i * whole[axis]);
        if (k.dst.data) r = MIXPI_RUN(c, copy, &k);
    }
    return r;
}

MIXPREC_API mixp_tensor *mixp_stack(mixp_context *ctx, int n, mixp_tensor *const *x, int dim) {
    return mixp_apply(ctx, mixp_op_builtin(MIXP_OP_STACK), n, x, n, &dim);
}

typedef struct mixpi_range {
    int     dim;
    int64_t first, count;
} mixpi_range;

/* Reports an invalid slice. size: of the dimension, or -1 if the dimension does not exist. */
static mixp_result mixpi_bad_slice(mixp_call *c, int64_t size) {
    const mixpi_range *p = (const mixpi_range *)c->attrs;
    char text[336];
    mixpi_input_text(c->in[0], "x", text, sizeof text);
    if (size < 0)
        return mixp_context_fail(
            c->ctx, MIXP_ERR_SHAPE, "slice: %d is not a dimension of %s", p->dim, text);
    return mixp_context_fail(c->ctx, MIXP_ERR_SHAPE,
        "slice: count %.0f from index %.0f along dim %d of %s is out of range; count must be at "
        "least 0, and the slice must end within %.0f",
        (double)p->count, (double)p->first, p->dim, text, (double)size);
}

static mixp_result mixpi_slice_infer(mixp_call *c) {
    mixpi_range *p = (mixpi_range *)c->attrs;
    const mixp_tensor *x = c->in[0];
    int64_t shape[MIXP_MAX_RANK], size, first = p->first;
    int axis = mixpi_axis(p->dim, x->rank);
    if (axis < 0 || !x->rank) return mixpi_bad_slice(c, -1);
    size = x->shape[axis];
    if (first < 0) first += size;
    if (first < 0 || p->count < 0 || first > size - p->count) return mixpi_bad_slice(c, size);
    p->dim = axis;
    p->first = first;
    memcpy(shape, x->shape, sizeof shape);
    shape[axis] = p->count;
    mixpi_call_reads_all(c, 0);
    return mixp_call_output(c, x->dtype, x->rank, shape);
}

static mixp_result mixpi_slice_forward(mixp_call *c) {
    const mixpi_range *p = (const mixpi_range *)c->attrs;
    mixp_copy_args k = mixpi_copy_to(c->out);
    mixpi_dense_strides(k.rank, k.shape, k.dst_strides);
    mixpi_dense_strides(k.rank, c->in[0]->shape, k.src_strides);
    k.src = mixpi_in_at(mixpi_call_x(c, 0), p->first * k.src_strides[p->dim]);
    k.dst = mixpi_call_y(c);
    return MIXPI_RUN(c, copy, &k);
}

/* The first slice of x that is walked clears the rest of x's gradient. If other operators have
 * already written the gradient, the slice only adds to it. */
static mixp_result mixpi_slice_backward(mixp_call *c) {
    const mixpi_range *p = (const mixpi_range *)c->attrs;
    mixp_copy_args k = mixpi_copy_to(c->out);
    mixp_out dx = mixpi_call_dx(c, 0);
    mixp_result r = MIXP_OK;
    if (!dx.data) return MIXP_OK;
    if (!dx.accumulate) r = mixpi_fill_with(c->ctx, dx, c->in[0]->count, 0.0);
    mixpi_dense_strides(k.rank, k.shape, k.src_strides);
    mixpi_dense_strides(k.rank, c->in[0]->shape, k.dst_strides);
    k.src = mixpi_call_dy(c);
    k.dst = mixpi_out_at(dx, p->first * k.dst_strides[p->dim]);
    return r == MIXP_OK ? MIXPI_RUN(c, copy, &k) : r;
}

MIXPREC_API mixp_tensor *mixp_slice(
    mixp_context *ctx, mixp_tensor *x, int dim, int64_t first, int64_t count) {
    mixpi_range p = MIXPI_ZERO;
    p.dim = dim;
    p.first = first;
    p.count = count;
    return mixpi_apply_one(ctx, MIXP_OP_SLICE, x, &p);
}

/* Fills parts with slices of these sizes, or of `each`. On an error, all parts are NULL. */
static mixp_result mixpi_split_by(mixp_context *ctx, mixp_tensor *x, int dim, int n, int64_t each,
    const int64_t *sizes, mixp_tensor **parts) {
    int64_t first = 0;
    int i, done = 0;
    for (i = 0; i < n; i++) parts[i] = NULL;
    for (; done < n; done++) {
        int64_t size = sizes ? sizes[done] : each;
        parts[done] = mixp_slice(ctx, x, dim, first, size);
        if (!parts[done]) break;
        first += size;
    }
    if (done == n) return MIXP_OK;
    for (i = 0; i < n; i++) parts[i] = NULL;
    return mixpi_failed(ctx);
}

/* Is x a tensor, and are there parts to fill? Sets *axis to dim's index, or to -1. */
static mixp_result mixpi_split_check(mixp_context *ctx, const char *who, mixp_tensor *x, int dim,
    int n, mixp_tensor **parts, int *axis) {
    mixpi_outer o;
    if (!ctx || !parts || n < 1)
        return mixp_context_fail(ctx, MIXP_ERR_ARGUMENT,
            "mixp_%s: %d parts and %s for them; n must be at least 1, and parts must not be NULL",
            who, n, parts ? "an array" : "no array");
    for (int i = 0; i < n; i++) parts[i] = NULL;
    if (!mixpi_outer_call(&o, ctx, who, 1, x, NULL, NULL)) return mixpi_failed(ctx);
    *axis = mixpi_axis(dim, x->rank);
    return MIXP_OK;
}

MIXPREC_API mixp_result mixp_split(
    mixp_context *ctx, mixp_tensor *x, int dim, int n, mixp_tensor **parts) {
    int axis = -1;
    MIXPI_TRY(mixpi_split_check(ctx, "split", x, dim, n, parts, &axis));
    char text[336];
    if (axis >= 0 && x->shape[axis] % n == 0)
        return mixpi_split_by(ctx, x, axis, n, x->shape[axis] / n, NULL, parts);
    mixpi_input_text(x, "x", text, sizeof text);
    return mixp_context_fail(ctx, MIXP_ERR_SHAPE, "mixp_split: %s has no dim %d%s %d", text, dim,
        axis < 0 ? " to split; parts:" : " that is a multiple of", n);
}

/* Do the sizes fill a dimension of this size, each at least 0? */
static int mixpi_sizes_are_complete(int n, const int64_t *sizes, int64_t size) {
    for (int i = 0; i < n; i++) {
        if (sizes[i] < 0 || sizes[i] > size) return 0;
        size -= sizes[i];
    }
    return size == 0;
}

MIXPREC_API mixp_result mixp_split_sizes(
    mixp_context *ctx, mixp_tensor *x, int dim, int n, const int64_t *sizes, mixp_tensor **parts) {
    int axis = -1;
    MIXPI_TRY(mixpi_split_check(ctx, "split_sizes", x, dim, n, parts, &axis));
    char text[336];
    if (axis >= 0 && sizes && mixpi_sizes_are_complete(n, sizes, x->shape[axis]))
        return mixpi_split_by(ctx, x, axis, n, 0, sizes, parts);
    mixpi_input_text(x, "x", text, sizeof text);
    return mixp_context_fail(ctx, sizes ? MIXP_ERR_SHAPE : MIXP_ERR_ARGUMENT,
        "mixp_split_sizes: %s and %d sizes for dim %d; the sizes must not be NULL, each must be at "
        "least 0, and their sum the size of a dimension",
        text, n, dim);
}
