#pragma once
#include "shared.c"
/* --- sum, mean ------------------------------------------------------------------------ */

typedef struct mixpi_reduction {
    int dim, keep, mean;
    mixp_reduce_args k;
} mixpi_reduction;

/* x as [outer, n, inner] around the reduced dimension, and the result's shape. */
typedef struct mixpi_reduced {
    int64_t outer, n, inner;
    int     rank;
    int64_t shape[MIXP_MAX_RANK];
} mixpi_reduced;

static mixp_result mixpi_reduce_shape(mixp_call *c, int dim, int keep, mixpi_reduced *to) {
    const mixp_tensor *x = c->in[0];
    int i, axis = mixpi_axis(dim, x->rank);
    if (mixpi_need_real(c, 1, 1) != MIXP_OK) return MIXP_ERR_DTYPE;
    if (dim != MIXP_ALL && axis < 0)
        return mixpi_bad_shapes(c, "dim must be one of x's dimensions");
    to->outer = to->n = to->inner = 1;
    to->rank = 0;
    for (i = 0; i < x->rank; i++) {
        int gone = dim == MIXP_ALL || i == axis;
        int64_t *size = gone ? &to->n : i < axis ? &to->outer : &to->inner;
        *size *= x->shape[i];
        if (!gone || keep) to->shape[to->rank++] = gone ? 1 : x->shape[i];
    }
    return MIXP_OK;
}

static mixp_result mixpi_reduce_infer(mixp_call *c) {
    mixpi_reduction *p = (mixpi_reduction *)c->attrs;
    mixpi_reduced to;
    MIXPI_TRY(mixpi_reduce_shape(c, p->dim, p->keep, &to));
    mixpi_call_reads_all(c, 0);
    p->k.outer = to.outer;
    p->k.n = to.n;
    p->k.inner = to.inner;
    p->k.factor = p->mean ? (float)(1.0 / (double)to.n) : 1.0f;
    return mixp_call_output(c, c->in[0]->dtype, to.rank, to.shape);
}

/* The sum of no elements is 0, and their mean NaN. */
static mixp_result mixpi_reduce_nothing(mixp_call *c) {
    const int mean = ((const mixpi_reduction *)c->attrs)->mean;
    if (c->out->grad) return MIXP_OK;
    return mixpi_fill_with(
        c->ctx, mixpi_call_y(c), c->out->count, mean ? (double)mixp_f32_of_bits(0x7FC00000u) : 0.0);
}

static mixp_result mixpi_reduce_both(mixp_call *c) {
    mixp_reduce_args *k = &((mixpi_reduction *)c->attrs)->k;
    k->a = mixpi_call_from(c);
    k->y = mixpi_call_to(c);
    if (!k->y.data) return MIXP_OK;
    if (!c->in[0]->count) return mixpi_reduce_nothing(c);
    return c->out->grad ? MIXPI_RUN(c, reduce_backward, k) : MIXPI_RUN(c, reduce, k);
}

static mixp_tensor *mixpi_apply_reduction(
    mixp_context *ctx, mixp_op_id id, mixp_tensor *x, int dim, int keep) {
    mixpi_reduction p = MIXPI_ZERO;
    p.dim = dim;
    p.keep = keep != 0;
    p.mean = id == MIXP_OP_MEAN;
    return mixpi_apply_one(ctx, id, x, &p);
}

MIXPREC_API mixp_tensor *mixp_sum(mixp_context *ctx, mixp_tensor *x, int dim, int keep) {
    return mixpi_apply_reduction(ctx, MIXP_OP_SUM, x, dim, keep);
}
MIXPREC_API mixp_tensor *mixp_mean(mixp_context *ctx, mixp_tensor *x, int dim, int keep) {
    return mixpi_apply_reduction(ctx, MIXP_OP_MEAN, x, dim, keep);
}

/* --- max, argmax ----------------------------------------------------------------------- */

typedef struct mixpi_maximum {
    int dim, keep, index;       /* index: 1 for argmax                                     */
    mixp_max_args k;
} mixpi_maximum;

static mixp_result mixpi_max_infer(mixp_call *c) {
    mixpi_maximum *p = (mixpi_maximum *)c->attrs;
    mixpi_reduced to;
    MIXPI_TRY(mixpi_reduce_shape(c, p->dim, p->keep, &to));
    p->k.outer = to.outer;
    p->k.n = to.n;
    p->k.inner = to.inner;
    mixpi_call_reads_all(c, p->dim == MIXP_ALL);
    if (!to.n) return mixpi_bad_shapes(c, "a maximum needs at least one element");
    if (to.n > 0x7FFFFFFF)
        return mixp_context_fail(c->ctx, MIXP_ERR_SHAPE,
            "%s: the reduction is over %.0f elements; the limit is 2^31 - 1", c->op->name,
            (double)to.n);
    if (p->index) return mixpi_call_output_fixed(c, MIXP_I32, to.rank, to.shape);
    return mixp_call_output(c, c->in[0]->dtype, to.rank, to.shape);
}

static mixp_result mixpi_max_forward(mixp_call *c) {
    mixpi_maximum *p = (mixpi_maximum *)c->attrs;
    mixp_max_args *k = &p->k;
    int64_t count = c->out->count;
    k->a = mixpi_call_x(c, 0);
    if (p->index) {
        k->index = (int32_t *)c->out->data;
        return MIXPI_RUN(c, max, k);
    }
    if (!mixp_call_save(c, 0, MIXP_I32, 1, &count) || !mixp_call_save(c, 1, MIXP_I32, 1, &count))
        return MIXP_ERR_MEMORY;
    k->index = (int32_t *)c->saved[0]->data;
    k->ties = (int32_t *)c->saved[1]->data;
    k->y = mixpi_call_y(c);
    return MIXPI_RUN(c, max, k);
}

static mixp_result mixpi_max_backward(mixp_call *c) {
    const mixpi_maximum *p = (const mixpi_maximum *)c->attrs;
    mixp_max_backward_args k = MIXPI_ZERO;
    k.outer = p->k.outer;
    k.n = p->k.n;
    k.inner = p->k.inner;
    k.shared = p->dim == MIXP_ALL;
    k.a = p->k.a;
    k.dy = mixpi_call_dy(c);
    k.index = p->k.index;
    k.ties = p->k.ties;
    k.da = mixpi_call_dx(c, 0);
    return k.da.data ? MIXPI_RUN(c, max_backward, &k) : MIXP_OK;
}

static mixp_tensor *mixpi_apply_max(
    mixp_context *ctx, mixp_op_id id, mixp_tensor *x, int dim, int keep) {
    mixpi_maximum p = MIXPI_ZERO;
    p.dim = dim;
    p.keep = keep != 0;
    p.index = id == MIXP_OP_ARGMAX;
    return mixpi_apply_one(ctx, id, x, &p);
}

MIXPREC_API mixp_tensor *mixp_max(mixp_context *ctx, mixp_tensor *x, int dim, int keep) {
    return mixpi_apply_max(ctx, MIXP_OP_MAX, x, dim, keep);
}
MIXPREC_API mixp_tensor *mixp_argmax(mixp_context *ctx, mixp_tensor *x, int dim, int keep) {
    return mixpi_apply_max(ctx, MIXP_OP_ARGMAX, x, dim, keep);
}
