#pragma once
#include "choosing.c"
#include "shapes.c"
/* --- comparisons, one_hot, scatter_add, index_add, topk, sort ------------------------------ */

static int mixpi_compared_dtype(mixp_dtype d) {
    return mixpi_is_real(d) || d == MIXP_U8 || d == MIXP_I32;
}

static mixp_result mixpi_compare_infer(mixp_call *c) {
    mixp_compare_args *k = (mixp_compare_args *)c->attrs;
    char quoted[MIXPI_QUOTED];
    for (int i = 0; i < 2; i++)
        if (!mixpi_compared_dtype(c->in[i]->dtype))
            return mixp_context_fail(c->ctx, MIXP_ERR_DTYPE,
                "%s: input %d%s is %s; it must be f32, f16, bf16, u8 or i32", c->op->name, i,
                mixpi_quoted(c->in[i], quoted), mixp_dtype_name(c->in[i]->dtype));
    MIXPI_TRY(mixpi_broadcast_two(c, &k->rank, k->shape, k->a_strides, k->b_strides));
    return mixpi_call_output_fixed(c, MIXP_U8, k->rank, k->shape);
}

static mixp_result mixpi_compare_forward(mixp_call *c) {
    mixp_compare_args *k = (mixp_compare_args *)c->attrs;
    k->a = mixpi_call_x(c, 0);
    k->b = mixpi_call_x(c, 1);
    k->y = (uint8_t *)c->out->data;
    return MIXPI_RUN(c, compare, k);
}

#define MIXPI_COMPARISON(name, kind)                                                      \
    MIXPREC_API mixp_tensor *mixp_##name(mixp_context *ctx, mixp_tensor *a, mixp_tensor *b) { \
        mixp_compare_args k;                                                              \
        memset(&k, 0, sizeof k);                                                          \
        k.how = MIXP_COMPARE_##kind;                                                      \
        return mixpi_apply_op(ctx, MIXP_OP_##kind, 2, a, b, NULL, &k);                    \
    }
MIXPI_COMPARISON(eq, EQ)
MIXPI_COMPARISON(ne, NE)
MIXPI_COMPARISON(gt, GT)
MIXPI_COMPARISON(ge, GE)
MIXPI_COMPARISON(lt, LT)
MIXPI_COMPARISON(le, LE)
#undef MIXPI_COMPARISON

typedef struct mixpi_hot {
    int64_t    classes;
    mixp_dtype dtype;
} mixpi_hot;

static mixp_result mixpi_one_hot_infer(mixp_call *c) {
    const mixpi_hot *p = (const mixpi_hot *)c->attrs;
    const mixp_tensor *ids = c->in[0];
    int64_t shape[MIXP_MAX_RANK];
    if (mixpi_need_indices_after(c, 0) != MIXP_OK) return MIXP_ERR_DTYPE;
    if (!mixpi_compared_dtype(p->dtype))
        return mixp_context_fail(c->ctx, MIXP_ERR_DTYPE,
            "one_hot: the result's dtype is %s; it must be f32, f16, bf16, u8 or i32",
            mixp_dtype_name(p->dtype));
    if (ids->rank >= MIXP_MAX_RANK || p->classes < 1)
        return mixpi_bad_shapes(c, "its rank must be at most 7, and the classes at least 1");
    memcpy(shape, ids->shape, sizeof shape);
    shape[ids->rank] = p->classes;
    mixpi_call_reads_all(c, 0);
    return mixpi_call_output_fixed(c, p->dtype, ids->rank + 1, shape);
}

/* Adds a one to each row of zeros. */
static mixp_result mixpi_one_hot_ones(mixp_call *c, mixp_out to) {
    const mixpi_hot *p = (const mixpi_hot *)c->attrs;
    const mixp_tensor *ids = c->in[0];
    mixp_tensor *ones = mixp_activation(c->ctx, MIXP_BF16, ids->rank, ids->shape);
    if (!ones) return MIXP_ERR_MEMORY;

    /* Backward of gather adds each 1 where its id points. */
    mixp_gather_args k = MIXPI_ZERO;
    k.outer = ids->count;
    k.n = p->classes;
    k.m = k.inner = 1;
    k.ids = (const int32_t *)ids->data;
    k.a = mixpi_tensor_in(ones);
    k.y = to;
    k.y.accumulate = 1;
    mixp_result r = mixpi_fill_with(c->ctx, mixpi_tensor_out(ones, 0), ones->count, 1.0);
    if (r == MIXP_OK) r = mixpi_fill_with(c->ctx, to, c->out->count, 0.0);
    if (r == MIXP_OK) r = MIXPI_RUN(c, gather_backward, &k);
    mixpi_arena_free(c->ctx, &c->ctx->memory.dev, ones->data, mixpi_bytes(ones));
    return r == MIXP_ERR_ARGUMENT ? mixpi_bad_index(c, 0, "id", p->classes, MIXPI_NO_INDEX) : r;
}

/* Kernels add to real numbers only: bf16 holds the ones of an integer result. */
static mixp_result mixpi_one_hot_forward(mixp_call *c) {
    if (mixpi_is_real(c->out->dtype)) return mixpi_one_hot_ones(c, mixpi_call_y(c));
    mixp_tensor *real = mixp_activation(c->ctx, MIXP_BF16, c->out->rank, c->out->shape);
    if (!real) return MIXP_ERR_MEMORY;
    mixp_result r = mixpi_one_hot_ones(c, mixpi_tensor_out(real, 0));
    if (r == MIXP_OK)
        r = mixpi_convert_to(c->ctx, mixpi_call_y(c), mixpi_tensor_in(real), real->count);
    mixpi_arena_free(c->ctx, &c->ctx->memory.dev, real->data, mixpi_bytes(real));
    return r;
}

MIXPREC_API mixp_tensor *mixp_one_hot(
    mixp_context *ctx, mixp_tensor *ids, int64_t classes, mixp_dtype dtype) {
    mixpi_hot p = MIXPI_ZERO;
    p.classes = classes;
    p.dtype = dtype;
    return mixpi_apply_one(ctx, MIXP_OP_ONE_HOT, ids, &p);
}

/* --- scatter_add: inputs x, src, ids --- */

/* Sets the sizes of k: src[outer, m, inner] is added to x[outer, n, inner]. */
static mixp_result mixpi_scatter_sizes(mixp_call *c, int axis, mixp_gather_args *k) {
    const mixp_tensor *x = c->in[0], *src = c->in[1];
    if (axis < 0 || src->rank != x->rank)
        return mixpi_bad_shapes(
            c, "x and src need the same rank, and dim must be one of their dimensions");
    k->outer = k->inner = 1;
    for (int i = 0; i < x->rank; i++) {
        if (i == axis) continue;
        if (x->shape[i] != src->shape[i])
            return mixpi_bad_shapes(
                c, "outside of dim, x's dimensions must not be smaller than src's");
        if (i < axis) k->outer *= x->shape[i];
        else k->inner *= x->shape[i];
    }
    k->n = x->shape[axis];
    k->m = src->shape[axis];
    return MIXP_OK;
}

static mixp_result mixpi_scatter_infer(mixp_call *c) {
    mixpi_gathering *p = (mixpi_gathering *)c->attrs;
    const mixp_tensor *x = c->in[0], *src = c->in[1], *ids = c->in[2];
    MIXPI_TRY(mixpi_need_indices_after(c, 2));
    MIXPI_TRY(mixpi_scatter_sizes(c, mixpi_axis(p->dim, x->rank), &p->k));
    if (ids->rank != src->rank || memcmp(ids->shape, src->shape, sizeof ids->shape))
        return mixpi_bad_shapes(c, "ids and src need the same shape");
    mixpi_call_reads_all(c, 1u << 2);
    return mixp_call_output(c, mixpi_widest(2, c->in), x->rank, x->shape);
}

/* t with zeros behind it, up to x's shape outside of `axis`. */
static mixp_tensor *mixpi_padded_to(
    mixp_context *ctx, mixp_tensor *t, const mixp_tensor *x, int axis) {
    for (int i = 0; t && i < x->rank; i++)
        if (i != axis && t->shape[i] < x->shape[i])
            t = mixp_pad(ctx, t, i, 0, x->shape[i] - t->shape[i], 0.0f);
    return t;
}

/* Copies x, then adds src in order. */
static mixp_result mixpi_scatter_into(mixp_call *c, mixp_out to) {
    mixp_gather_args k = ((const mixpi_gathering *)c->attrs)->k;
    mixp_result r = mixpi_convert_to(c->ctx, to, mixpi_call_x(c, 0), c->out->count);
    if (r != MIXP_OK || !c->in[1]->count) return r;
    k.ids = (const int32_t *)c->in[2]->data;
    k.a = mixpi_call_x(c, 1);
    k.y = to;
    k.y.accumulate = 1;
    if (r == MIXP_OK) r = MIXPI_RUN(c, gather_backward, &k);
    return r == MIXP_ERR_ARGUMENT ? mixpi_bad_index(c, 2, "id", k.n, MIXPI_NO_INDEX) : r;
}

/* A low result is summed in f32 and rounded once. */
static mixp_result mixpi_scatter_forward(mixp_call *c) {
    mixp_out y = mixpi_call_y(c);
    int64_t count = c->out->count;
    if (y.dtype == MIXP_F32) return mixpi_scatter_into(c, y);
    mixp_tensor *sums = mixp_activation(c->ctx, MIXP_F32, 1, &count);
    if (!sums) return MIXP_ERR_MEMORY;
    mixp_result r = mixpi_scatter_into(c, mixpi_tensor_out(sums, 0));
    if (r == MIXP_OK) r = mixpi_convert_to(c->ctx, y, mixpi_tensor_in(sums), count);
    mixpi_arena_free(c->ctx, &c->ctx->memory.dev, sums->data, mixpi_bytes(sums));
    return r;
}

/* The gradient of src: dy at the positions of ids. */
static mixp_result mixpi_scatter_gather(mixp_call *c, mixp_out to) {
    mixp_gather_args k = ((const mixpi_gathering *)c->attrs)->k;
    int64_t count = c->in[1]->count;
    mixp_tensor *picked = NULL;
    k.ids = (const int32_t *)c->in[2]->data;
    k.a = mixpi_call_dy(c);
    k.y = to;
    if (!to.accumulate) return MIXPI_RUN(c, gather, &k);
    picked = mixp_activation(c->ctx, c->out->dtype, 1, &count);
    if (!picked) return MIXP_ERR_MEMORY;
    k.y = mixpi_tensor_out(picked, 0);
    mixp_result r = MIXPI_RUN(c, gather, &k);
    if (r == MIXP_OK) r = mixpi_add_into(c->ctx, to, mixpi_tensor_in(picked), count);
    mixpi_arena_free(c->ctx, &c->ctx->memory.dev, picked->data, mixpi_bytes(picked));
    return r;
}

static mixp_result mixpi_scatter_backward(mixp_call *c) {
    mixp_out dx = mixpi_call_dx(c, 0), dsrc;
    if (dx.data) MIXPI_TRY(mixpi_add_into(c->ctx, dx, mixpi_call_dy(c), c->out->count));
    dsrc = mixpi_call_dx(c, 1);
    return dsrc.data && c->in[1]->count ? mixpi_scatter_gather(c, dsrc) : MIXP_OK;
}

/* Are ids and src of one shape, which is smaller than x's somewhere outside of dim? Zeros are then
 * added at id 0 to the rest of x. */
static int mixpi_fits_outside(
    const mixp_tensor *x, const mixp_tensor *ids, const mixp_tensor *src, int dim) {
    int smaller = 0, axis;
    if (!mixpi_is_live(x) || !mixpi_is_live(ids) || !mixpi_is_live(src)) return 0;
    axis = mixpi_axis(dim, x->rank);
    if (axis < 0 || ids->dtype != MIXP_I32 || ids->rank != x->rank || !mixpi_shapes_equal(ids, src))
        return 0;
    for (int i = 0; i < x->rank; i++) {
        if (i == axis) continue;
        if (ids->shape[i] > x->shape[i]) return 0;
        smaller |= ids->shape[i] < x->shape[i];
    }
    return smaller && x->shape[axis] > 0;
}

MIXPREC_API mixp_tensor *mixp_scatter_add(
    mixp_context *ctx, mixp_tensor *x, int dim, mixp_tensor *ids, mixp_tensor *src) {
    if (ctx) src = mixpi_first_part(ctx, src, ids, -1);
    if (ctx && mixpi_fits_outside(x, ids, src, dim)) {
        src = mixpi_padded_to(ctx, src, x, mixpi_axis(dim, x->rank));
        ids = mixpi_padded_to(ctx, ids, x, mixpi_axis(dim, x->rank));
    }
    mixpi_gathering p = MIXPI_ZERO;
    p.dim = dim;
    return mixpi_apply_op(ctx, MIXP_OP_SCATTER_ADD, 3, x, src, ids, &p);
}

/* Fails unless ids names one index of x for each index of src along dim. A GPU checks the indices
 * later. */
static mixp_result mixpi_index_check(mixp_call *c, int axis) {
    const mixp_tensor *src = c->in[1], *ids = c->in[2];
    mixp_gather_args k;
    MIXPI_TRY(mixpi_need_indices_after(c, 2));
    MIXPI_TRY(mixpi_scatter_sizes(c, axis, &k));
    if (ids->rank != 1 || ids->count != src->shape[axis])
        return mixpi_bad_shapes(c, "ids[m] with m the size of src along dim");
    if (c->ctx->device->download ||
        mixpi_bad_id((const int32_t *)ids->data, ids->count, k.n, MIXPI_NO_INDEX) < 0)
        return MIXP_OK;
    return mixpi_bad_index(c, 2, "id", k.n, MIXPI_NO_INDEX);
}

/* scatter_add under another name, of ids that are repeated to the shape of src. */
MIXPREC_API mixp_tensor *mixp_index_add(
    mixp_context *ctx, mixp_tensor *x, int dim, mixp_tensor *ids, mixp_tensor *src) {
    int64_t line[MIXP_MAX_RANK];
    mixpi_outer o;
    mixp_call *c = mixpi_outer_call(&o, ctx, "index_add", 3, x, src, ids);
    int i, axis = c ? mixpi_axis(dim, x->rank) : -1;
    if (!c || mixpi_index_check(c, axis) != MIXP_OK) return NULL;
    for (i = 0; i < src->rank; i++) line[i] = i == axis ? ids->count : 1;
    ids = mixp_expand(ctx, mixp_reshape(ctx, ids, src->rank, line), src->rank, src->shape);
    mixpi_gathering p = MIXPI_ZERO;
    p.dim = axis;
    return mixpi_apply_op(ctx, MIXP_OP_INDEX_ADD, 3, x, src, ids, &p);
}

/* --- topk, sort: the indices; gather then takes the values --- */

/* Over the last dimension. k 0: all. */
static mixp_result mixpi_topk_infer(mixp_call *c) {
    mixp_topk_args *k = (mixp_topk_args *)c->attrs;
    const mixp_tensor *x = c->in[0];
    int64_t shape[MIXP_MAX_RANK];
    if (mixpi_need_real(c, 1, 1) != MIXP_OK) return MIXP_ERR_DTYPE;
    k->cols = mixpi_last_dim(x);
    k->rows = mixpi_rows_of(x);
    if (!k->k) k->k = k->cols;
    if (k->k < 0 || k->k > k->cols || k->cols > 0x7FFFFFFF)
        return mixpi_bad_shapes(
            c, "dim needs at least k and at most 2^31 - 1 elements; k is at least 1");
    memcpy(shape, x->shape, sizeof shape);
    if (x->rank) shape[x->rank - 1] = k->k;
    mixpi_call_reads_all(c, 0);
    return mixpi_call_output_fixed(c, MIXP_I32, x->rank, shape);
}

static mixp_result mixpi_topk_forward(mixp_call *c) {
    mixp_topk_args *k = (mixp_topk_args *)c->attrs;
    k->a = mixpi_call_x(c, 0);
    k->index = (int32_t *)c->out->data;
    return MIXPI_RUN(c, topk, k);
}

/* The indices of x along dim. Along another dimension than the last, a copy is transposed, and so
 * are its indices. */
static mixp_tensor *mixpi_topk_indices(
    mixp_context *ctx, mixp_op_id id, mixp_tensor *x, int dim, mixp_topk_args *k) {
    mixpi_outer o;
    mixp_call *c = mixpi_outer_call(&o, ctx, mixp_op_builtin(id)->name, 1, x, NULL, NULL);
    if (!c) return NULL;
    int axis = mixpi_axis(dim, x->rank);
    if (axis < 0) {
        mixpi_bad_shapes(c, "dim must be a dimension of x");
        return NULL;
    }
    if (axis + 1 >= x->rank) return mixpi_apply_one(ctx, id, x, k);
    if (mixpi_need_real(c, 1, 1) != MIXP_OK) return NULL;
    x = mixp_transpose(ctx, mixp_detach(ctx, x), axis, -1);
    return mixp_transpose(ctx, mixpi_apply_one(ctx, id, x, k), axis, -1);
}

static mixp_tensor *mixpi_apply_topk(mixp_context *ctx, mixp_op_id id, mixp_tensor *x, int dim,
    mixp_topk_args *k, mixp_tensor **indices) {
    mixp_tensor *ids = mixpi_topk_indices(ctx, id, x, dim, k);
    mixp_tensor *y = ids ? mixp_gather(ctx, x, dim, ids) : NULL;
    if (indices) *indices = y ? ids : NULL;
    return y;
}

MIXPREC_API mixp_tensor *mixp_topk(
    mixp_context *ctx, mixp_tensor *x, int64_t k, int dim, int largest, mixp_tensor **indices) {
    mixp_topk_args a = MIXPI_ZERO;
    a.k = k ? k : -1;
    a.smallest = !largest;
    return mixpi_apply_topk(ctx, MIXP_OP_TOPK, x, dim, &a, indices);
}

MIXPREC_API mixp_tensor *mixp_sort(
    mixp_context *ctx, mixp_tensor *x, int dim, int descending, mixp_tensor **indices) {
    mixp_topk_args a = MIXPI_ZERO;
    a.smallest = !descending;
    return mixpi_apply_topk(ctx, MIXP_OP_SORT, x, dim, &a, indices);
}
