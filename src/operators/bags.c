#pragma once
#include "choosing.c"
/* --- embedding_bag: inputs table, ids, offsets, weights ------------------------------------- */

typedef struct mixpi_bagged {
    mixp_embedding_args k;
    int64_t      padding;       /* as the caller gave it                                   */
    mixp_tensor *follow;        /* the places of the maxima; NULL: forward finds them      */
} mixpi_bagged;

/* Sets the bags of k, and checks the shapes of ids, offsets and weights. */
static mixp_result mixpi_bags_of(mixp_call *c, mixp_embedding_args *k) {
    const mixp_tensor *ids = c->in[1], *offsets = c->in[2], *weights = c->in[3];
    mixp_bags *b = &k->bags;
    if (!offsets && ids->rank != 2)
        return mixpi_bad_shapes(c, "ids[bags, width], or ids[n] with offsets[bags]");
    if (offsets && (ids->rank != 1 || offsets->rank != 1))
        return mixpi_bad_shapes(c, "ids[n] and offsets[bags]");
    if (weights && !mixpi_shapes_equal(weights, ids))
        return mixpi_bad_shapes(c, "weights need the shape of ids");
    b->count = offsets ? offsets->shape[0] : ids->shape[0];
    b->width = offsets ? 0 : ids->shape[1];
    return MIXP_OK;
}

static mixp_result mixpi_bag_infer(mixp_call *c) {
    mixpi_bagged *p = (mixpi_bagged *)c->attrs;
    const mixp_tensor *table = c->in[0], *weights = c->in[3];
    mixp_bags *b = &p->k.bags;
    mixp_result r = mixpi_need_indices(c);
    if (r != MIXP_OK) return r;
    if (c->in[2] && c->in[2]->dtype != MIXP_I32)
        return mixp_context_fail(c->ctx, MIXP_ERR_DTYPE,
            "embedding_bag: offsets are %s; they must be i32", mixp_dtype_name(c->in[2]->dtype));
    if (weights && !mixpi_is_real(weights->dtype))
        return mixp_context_fail(c->ctx, MIXP_ERR_DTYPE,
            "embedding_bag: weights are %s; they must be f32, f16 or bf16",
            mixp_dtype_name(weights->dtype));
    if (table->rank != 2) return mixpi_bad_shapes(c, "table[vocab, c]");
    r = mixpi_bags_of(c, &p->k);
    if (r != MIXP_OK) return r;

    /* The padding, and what a mode excludes. */
    const int64_t vocab = table->shape[0];
    const int is_padded = p->padding != MIXP_NO_PADDING;
    b->padding = is_padded && p->padding < 0 ? p->padding + vocab : p->padding;
    if (is_padded && (b->padding < 0 || b->padding >= vocab))
        return mixpi_bad_shapes(c, "padding must be a row of the table, or MIXP_NO_PADDING");
    if ((unsigned)b->mode > MIXP_BAG_MAX || (weights && b->mode != MIXP_BAG_SUM))
        return mixp_context_fail(c->ctx, MIXP_ERR_ARGUMENT,
            "embedding_bag: the mode must be MIXP_BAG_SUM, or, without "
            "weights, MIXP_BAG_MEAN or MIXP_BAG_MAX");

    const int64_t shape[2] = { b->count, table->shape[1] };
    mixp_call_reads(c, 0, 1u << 1 | 1u << 2 | 1u << 3);
    mixp_call_reads(c, 3, 1u | 1u << 1 | 1u << 2);
    return mixp_call_output(c, table->dtype, 2, shape);
}

/* Names the bag whose offset is wrong, or the id. */
static mixp_result mixpi_bad_bags(mixp_call *c, const mixp_embedding_args *k) {
    const int64_t i = c->ctx->device->download ? -1 : mixpi_bad_bag(&k->bags, k->rows);
    if (i < 0) return mixpi_bad_index(c, 1, "id", k->vocab, MIXPI_NO_INDEX);
    return mixp_context_fail(c->ctx, MIXP_ERR_ARGUMENT,
        "embedding_bag: the offset of bag %.0f is %d: offsets begin with 0, do "
        "not decrease, and are at most the number of ids, %.0f",
        (double)i, (int)k->bags.offsets[i], (double)k->rows);
}

static void mixpi_bag_arrays(const mixp_call *c, mixp_embedding_args *k) {
    k->rows = c->in[1]->count;
    k->cols = c->in[0]->shape[1];
    k->vocab = c->in[0]->shape[0];
    k->ids = (const int32_t *)c->in[1]->data;
    k->table = mixpi_call_x(c, 0);
    k->bags.offsets = c->in[2] ? (const int32_t *)c->in[2]->data : NULL;
    if (c->in[3]) k->bags.weights = mixpi_call_x(c, 3);
    if (c->saved[0]) k->bags.largest = (int32_t *)c->saved[0]->data;
}

static mixp_result mixpi_bag_forward(mixp_call *c) {
    mixpi_bagged *p = (mixpi_bagged *)c->attrs;
    mixp_embedding_args *k = &p->k;
    if (p->follow) c->saved[0] = p->follow;
    else if (k->bags.mode == MIXP_BAG_MAX && !mixp_call_save(c, 0, MIXP_I32, 2, c->out->shape))
        return MIXP_ERR_MEMORY;
    k->bags.follow = p->follow != NULL;
    mixpi_bag_arrays(c, k);
    k->y = mixpi_call_y(c);
    mixp_result r = MIXPI_RUN(c, embedding, k);
    return r == MIXP_ERR_ARGUMENT ? mixpi_bad_bags(c, k) : r;
}

static mixp_result mixpi_bag_backward(mixp_call *c) {
    mixp_embedding_args forward = ((const mixpi_bagged *)c->attrs)->k;
    mixpi_bag_arrays(c, &forward);
    mixp_embedding_backward_args k = MIXPI_ZERO;
    k.rows = forward.rows;
    k.cols = forward.cols;
    k.vocab = forward.vocab;
    k.ids = forward.ids;
    k.bags = forward.bags;
    k.dy = mixpi_call_dy(c);
    k.dtable = mixpi_call_dx(c, 0);
    if (c->in[3]) k.dweights = mixpi_call_dx(c, 3);
    if (k.dweights.data) k.table = mixpi_call_x(c, 0);
    return k.dtable.data || k.dweights.data ? MIXPI_RUN(c, embedding_backward, &k) : MIXP_OK;
}

static mixp_tensor *mixpi_bag_apply(mixp_context *ctx, mixp_tensor *table, mixp_tensor *const *rest,
    mixp_tensor *weights, const mixpi_bagged *p) {
    mixp_tensor *in[4] = { table, rest[0], rest[1], weights };
    return mixp_apply(ctx, mixp_op_builtin(MIXP_OP_EMBEDDING_BAG), 4, in, 2, p);
}

/* The tangent: linear in the table, of whose maxima the places stay, and in the weights. */
static mixp_tensor *mixpi_bag_tangent(mixp_call *c, mixp_tensor *dtable, mixp_tensor *dweights) {
    mixpi_bagged p = *(const mixpi_bagged *)c->attrs;
    mixp_tensor *a = NULL, *b = NULL;
    p.follow = c->saved[0];
    if (dtable) a = mixpi_bag_apply(c->ctx, dtable, c->in + 1, c->in[3], &p);
    if (dweights) b = mixpi_bag_apply(c->ctx, c->in[0], c->in + 1, dweights, &p);
    return a && b ? mixp_add(c->ctx, a, b) : a ? a : b;
}

MIXPREC_API mixp_tensor *mixp_embedding_bag(mixp_context *ctx, mixp_tensor *table, mixp_tensor *ids,
    mixp_tensor *offsets, mixp_tensor *weights, mixp_bag_mode mode, int64_t padding) {
    mixp_tensor *rest[2] = { ids, offsets };
    mixpi_bagged p = MIXPI_ZERO;
    p.k.bags.mode = mode;
    p.padding = padding;
    return mixpi_bag_apply(ctx, table, rest, weights, &p);
}
