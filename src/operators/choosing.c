#pragma once
#include "elementwise.c"
/* --- embedding ------------------------------------------------------------------------- */

/* Names the invalid index in input `which` that made a kernel fail. Possible only if indices are in
 * host memory. */
static mixp_result mixpi_bad_index(
    mixp_call *c, int which, const char *what, int64_t limit, int64_t ignore) {
    const mixp_tensor *t = c->in[which];
    const int32_t *ids = (const int32_t *)t->data;
    char quoted[MIXPI_QUOTED], of[MIXPI_QUOTED + 4] = "";
    int64_t i = c->ctx->device->download ? -1 : mixpi_bad_id(ids, t->count, limit, ignore);
    if (i < 0) return MIXP_ERR_ARGUMENT;
    if (c->in[0] != t && *mixpi_quoted(c->in[0], quoted)) snprintf(of, sizeof of, " of%s", quoted);
    return mixp_context_fail(c->ctx, MIXP_ERR_ARGUMENT,
        "%s: %s %d at row %.0f is outside [0, %.0f)%s%s", c->op->name, what, (int)ids[i], (double)i,
        (double)limit, of,
        ids[i] == limit                          ? "; the first is 0"
        : ignore != MIXPI_NO_INDEX && ids[i] < 0 ? "; to leave out a row, set its target to the "
                                                   "value of `ignore`, usually MIXP_IGNORE (-100)"
                                                 : "");
}

typedef struct mixpi_embedded {
    mixp_embedding_args k;
    int     padded;             /* 1: the row `padding` of the table gets no gradient      */
    int64_t padding;
} mixpi_embedded;

static mixp_result mixpi_embedding_infer(mixp_call *c) {
    mixpi_embedded *p = (mixpi_embedded *)c->attrs;
    mixp_tensor *table = c->in[0], *ids = c->in[1];
    int64_t shape[MIXP_MAX_RANK];
    if (mixpi_need_indices(c) != MIXP_OK) return MIXP_ERR_DTYPE;
    if (table->rank != 2 || ids->rank >= MIXP_MAX_RANK)
        return mixpi_bad_shapes(c, "table[vocab, c] and ids of rank at most 7");
    if (p->padding < 0) p->padding += table->shape[0];
    if (p->padded && (p->padding < 0 || p->padding >= table->shape[0]))
        return mixpi_bad_shapes(c, "padding must be a row of the table");
    memcpy(shape, ids->shape, sizeof shape);
    shape[ids->rank] = table->shape[1];
    mixpi_call_reads_all(c, 1u << 1);
    return mixp_call_output(c, table->dtype, ids->rank + 1, shape);
}

static mixp_result mixpi_embedding_forward(mixp_call *c) {
    mixp_embedding_args *k = &((mixpi_embedded *)c->attrs)->k;
    k->rows = c->in[1]->count;
    k->cols = c->in[0]->shape[1];
    k->vocab = c->in[0]->shape[0];
    k->ids = (const int32_t *)c->in[1]->data;
    k->table = mixpi_call_x(c, 0);
    k->y = mixpi_call_y(c);
    mixp_result r = MIXPI_RUN(c, embedding, k);
    return r == MIXP_ERR_ARGUMENT ? mixpi_bad_index(c, 1, "id", k->vocab, MIXPI_NO_INDEX) : r;
}

/* The result's gradient, with zeros where the ids are `padding`. Operators of a walk make it. */
static mixp_tensor *mixpi_embedding_unpadded(mixp_call *c, int64_t padding) {
    mixp_tensor *at = mixp_full(c->ctx, MIXP_I32, 0, NULL, (double)padding);
    const int region = mixpi_open_f32(c->ctx);
    if (region < 0) return NULL;
    at = mixp_unsqueeze(c->ctx, mixp_eq(c->ctx, c->in[1], at), -1);
    at = mixp_masked_fill(c->ctx, c->out->grad, at, 0.0f);
    mixp_autocast_close(c->ctx, region);
    return at;
}

static mixp_result mixpi_embedding_backward(mixp_call *c) {
    const mixpi_embedded *p = (const mixpi_embedded *)c->attrs;
    const mixp_embedding_args *forward = &p->k;
    const mixp_tensor *dy = c->out->grad;
    if (p->padded) dy = mixpi_embedding_unpadded(c, p->padding);
    if (!dy) return mixpi_failed(c->ctx);
    mixp_embedding_backward_args k = MIXPI_ZERO;
    k.rows = forward->rows;
    k.cols = forward->cols;
    k.vocab = forward->vocab;
    k.ids = forward->ids;
    k.dy = mixpi_tensor_in(dy);
    k.dtable = mixpi_call_dx(c, 0);
    return k.dtable.data ? MIXPI_RUN(c, embedding_backward, &k) : MIXP_OK;
}

MIXPREC_API mixp_tensor *mixp_embedding(mixp_context *ctx, mixp_tensor *table, mixp_tensor *ids) {
    mixpi_embedded p = MIXPI_ZERO;
    return mixpi_apply_op(ctx, MIXP_OP_EMBEDDING, 2, table, ids, NULL, &p);
}

MIXPREC_API mixp_tensor *mixp_embedding_padded(
    mixp_context *ctx, mixp_tensor *table, mixp_tensor *ids, int64_t padding) {
    mixpi_embedded p = MIXPI_ZERO;
    p.padded = 1;
    p.padding = padding;
    return mixpi_apply_op(ctx, MIXP_OP_EMBEDDING, 2, table, ids, NULL, &p);
}

/* --- gather, where, masked_fill, rope -------------------------------------------------- */

typedef struct mixpi_gathering {
    int dim;
    mixp_gather_args k;
} mixpi_gathering;

static mixp_result mixpi_gather_infer(mixp_call *c) {
    mixpi_gathering *p = (mixpi_gathering *)c->attrs;
    const mixp_tensor *x = c->in[0], *ids = c->in[1];
    int axis = mixpi_axis(p->dim, x->rank), i;
    if (mixpi_need_indices(c) != MIXP_OK) return MIXP_ERR_DTYPE;
    if (axis >= 0 && !ids->count) return mixp_call_output(c, x->dtype, ids->rank, ids->shape);
    if (axis < 0 || ids->rank != x->rank)
        return mixpi_bad_shapes(
            c, "both need the same rank, and dim must be one of their dimensions");

    /* Outside of dim, ids and x are equal. */
    p->k.outer = p->k.inner = 1;
    for (i = 0; i < x->rank; i++) {
        if (i == axis) continue;
        if (x->shape[i] != ids->shape[i])
            return mixpi_bad_shapes(
                c, "outside of dim, the dimensions of ids must not be larger than x's");
        if (i < axis) p->k.outer *= x->shape[i];
        else p->k.inner *= x->shape[i];
    }

    p->k.n = x->shape[axis];
    p->k.m = ids->shape[axis];
    mixpi_call_reads_all(c, 1u << 1);
    return mixp_call_output(c, x->dtype, ids->rank, ids->shape);
}

static mixp_result mixpi_gather_forward(mixp_call *c) {
    mixp_gather_args *k = &((mixpi_gathering *)c->attrs)->k;
    k->ids = (const int32_t *)c->in[1]->data;
    k->a = mixpi_call_x(c, 0);
    k->y = mixpi_call_y(c);
    mixp_result r = MIXPI_RUN(c, gather, k);
    return r == MIXP_ERR_ARGUMENT ? mixpi_bad_index(c, 1, "id", k->n, MIXPI_NO_INDEX) : r;
}

/* Fills with zeros, then adds at the positions that the ids name. */
static mixp_result mixpi_gather_add(mixp_call *c, mixp_out to) {
    mixp_gather_args k = ((const mixpi_gathering *)c->attrs)->k;
    mixp_result r = MIXP_OK;
    if (!to.accumulate) r = mixpi_fill_with(c->ctx, to, c->in[0]->count, 0.0);
    k.a = mixpi_call_dy(c);
    k.y = to;
    k.y.accumulate = 1;
    return r == MIXP_OK ? MIXPI_RUN(c, gather_backward, &k) : r;
}

/* If several ids add to the same low element, the sum is made in f32 and rounded once. */
static mixp_result mixpi_gather_backward(mixp_call *c) {
    mixp_out to = mixpi_call_dx(c, 0);
    int64_t count = c->in[0]->count;
    if (!to.data) return MIXP_OK;
    if (to.dtype == MIXP_F32 || ((const mixpi_gathering *)c->attrs)->k.m == 1)
        return mixpi_gather_add(c, to);
    mixp_tensor *sums = mixp_activation(c->ctx, MIXP_F32, 1, &count);
    if (!sums) return MIXP_ERR_MEMORY;
    mixp_result r = mixpi_gather_add(c, mixpi_tensor_out(sums, 0));
    if (r == MIXP_OK) r = mixpi_add_into(c->ctx, to, mixpi_tensor_in(sums), count);
    mixpi_arena_free(c->ctx, &c->ctx->memory.dev, sums->data, mixpi_bytes(sums));
    return r;
}

/* The first elements of x, as many as `like` has, along each dimension but `axis` (-1: none), where
 * x is larger; x itself where none is. */
static mixp_tensor *mixpi_first_part(
    mixp_context *ctx, mixp_tensor *x, const mixp_tensor *like, int axis) {
    if (!mixpi_is_live(x) || !mixpi_is_live(like) || x->rank != like->rank) return x;
    for (int i = 0; x && i < x->rank; i++)
        if (i != axis && like->shape[i] < x->shape[i]) x = mixp_slice(ctx, x, i, 0, like->shape[i]);
    return x;
}

MIXPREC_API mixp_tensor *mixp_gather(mixp_context *ctx, mixp_tensor *x, int dim, mixp_tensor *ids) {
    if (ctx && mixpi_is_live(x)) x = mixpi_first_part(ctx, x, ids, mixpi_axis(dim, x->rank));
    mixpi_gathering p = MIXPI_ZERO;
    p.dim = dim;
    return mixpi_apply_op(ctx, MIXP_OP_GATHER, 2, x, ids, NULL, &p);
}

/* Attributes of where: its inputs are the mask and the two tensors to choose from. filled:
 * masked_fill, whose inputs are x and the mask. */
typedef struct mixpi_choice {
    int filled;
    mixp_where_args k;
} mixpi_choice;

/* Returns the index of the call's input that is mask (i 0), a (1) or b (2); -1 if the call has no
 * such input. */
static int mixpi_choice_input(const mixpi_choice *p, int i) {
    if (!p->filled) return i;
    return i == 0 ? 1 : i == 2 ? 0 : -1;
}

/* Sets all axes and checks the dtypes. */
static mixp_result mixpi_where_infer(mixp_call *c) {
    mixpi_choice *p = (mixpi_choice *)c->attrs;
    mixp_where_args *k = &p->k;
    int64_t *strides[3], step[3] = { 1, 1, 1 };
    strides[0] = k->mask_strides;
    strides[1] = k->a_strides;
    strides[2] = k->b_strides;
    mixpi_call_reads_all(c, 0); /* forward keeps a copy of the mask */

    /* The shape to which mask, a and b are repeated, and their strides in it. */
    for (int i = 0; i < c->n_in; i++)
        if (c->in[i] && c->in[i]->rank > k->rank) k->rank = c->in[i]->rank;
    for (int axis = k->rank - 1; axis >= 0; axis--) {
        k->shape[axis] = 1;
        for (int i = 0; i < 3; i++) {
            int own = mixpi_choice_input(p, i);
            int64_t n = own < 0 ? 1
                                : mixpi_broadcast_axis(
                                      c->in[own], k->rank, axis, &step[i], &strides[i][axis]);
            if (n != 1 && k->shape[axis] != 1 && n != k->shape[axis])
                return mixpi_bad_shapes(c, "aligned at the right, dimensions must be equal or 1");
            if (n != 1) k->shape[axis] = n;
        }
    }
    return mixp_call_output(c, mixpi_widest(c->n_in, c->in), k->rank, k->shape);
}

static mixp_result mixpi_choice_infer(mixp_call *c) {
    const mixpi_choice *p = (const mixpi_choice *)c->attrs;
    const mixp_tensor *mask = c->in[mixpi_choice_input(p, 0)];
    char quoted[MIXPI_QUOTED];
    if (mask->dtype != MIXP_U8 && mask->dtype != MIXP_I32)
        return mixp_context_fail(c->ctx, MIXP_ERR_DTYPE,
            "%s: the mask%s is %s; it must be u8 or i32", c->op->name, mixpi_quoted(mask, quoted),
            mixp_dtype_name(mask->dtype));
    for (int i = 1; i < 3; i++) {
        int own = mixpi_choice_input(p, i);
        if (own < 0 || mixpi_is_real(c->in[own]->dtype)) continue;
        return mixp_context_fail(c->ctx, MIXP_ERR_DTYPE,
            "%s: input %d%s is %s; it must be f32, f16 or bf16", c->op->name, own,
            mixpi_quoted(c->in[own], quoted), mixp_dtype_name(c->in[own]->dtype));
    }
    return mixpi_where_infer(c);
}

/* Kernels read a mask of real numbers. bf16 suffices for integers: only 0 becomes 0. */
static mixp_result mixpi_choice_forward(mixp_call *c) {
    mixpi_choice *p = (mixpi_choice *)c->attrs;
    mixp_where_args *k = &p->k;
    const mixp_tensor *mask = c->in[mixpi_choice_input(p, 0)];
    int a = mixpi_choice_input(p, 1);
    MIXPI_TRY(mixpi_constant_fits(c, "value", k->value, "-INFINITY"));
    mixpi_note_written(c->out, (double)k->value);
    mixp_tensor *saved = mixp_call_save(c, 0, MIXP_BF16, mask->rank, mask->shape);
    if (!saved) return MIXP_ERR_MEMORY;
    mixp_result r =
        mixpi_convert_to(c->ctx, mixpi_tensor_out(saved, 0), mixpi_tensor_in(mask), mask->count);
    k->mask = mixpi_tensor_in(saved);
    if (a >= 0) k->a = mixpi_call_x(c, a);
    k->b = mixpi_call_x(c, mixpi_choice_input(p, 2));
    k->y = mixpi_call_y(c);
    return r == MIXP_OK ? MIXPI_RUN(c, where, k) : r;
}

static mixp_result mixpi_choice_backward(mixp_call *c) {
    mixpi_choice *p = (mixpi_choice *)c->attrs;
    mixp_where_args *k = &p->k;
    mixp_result r = MIXP_OK;
    k->dy = mixpi_call_dy(c);
    for (k->which = 0; k->which < 2 && r == MIXP_OK; k->which++) {
        int own = mixpi_choice_input(p, 1 + k->which);
        if (own < 0) continue;
        k->dx = mixpi_call_dx(c, own);
        if (k->dx.data) r = MIXPI_RUN(c, where_backward, k);
    }
    return r;
}

MIXPREC_API mixp_tensor *mixp_where(
    mixp_context *ctx, mixp_tensor *mask, mixp_tensor *a, mixp_tensor *b) {
    mixpi_choice p = MIXPI_ZERO;
    return mixpi_apply_op(ctx, MIXP_OP_WHERE, 3, mask, a, b, &p);
}

MIXPREC_API mixp_tensor *mixp_masked_fill(
    mixp_context *ctx, mixp_tensor *x, mixp_tensor *mask, float value) {
    mixpi_choice p = MIXPI_ZERO;
    p.filled = 1;
    p.k.value = value;
    return mixpi_apply_op(ctx, MIXP_OP_MASKED_FILL, 2, x, mask, NULL, &p);
}

static mixp_result mixpi_bad_head_dim(mixp_call *c, int64_t d) {
    char rule[96];
    snprintf(rule, sizeof rule,
        "x[..., t, c] with c a multiple of head_dim, which is even (head_dim is %.0f)", (double)d);
    return mixpi_bad_shapes(c, rule);
}

static mixp_result mixpi_rope_infer(mixp_call *c) {
    mixp_rope_args *k = (mixp_rope_args *)c->attrs;
    const mixp_tensor *x = c->in[0];
    if (x->rank < 2 || k->d < 2 || k->d % 2 || x->shape[x->rank - 1] % k->d)
        return mixpi_bad_head_dim(c, k->d);
    if (!(k->base > 0.0) || k->first < 0)
        return mixp_context_fail(c->ctx, MIXP_ERR_ARGUMENT,
            "rope: base is %g and first is %.0f; base must be above 0, first at least 0", k->base,
            (double)k->first);
    if (k->scaled && k->d > 2 * MIXP_ROPE_PAIRS)
        return mixp_context_fail(c->ctx, MIXP_ERR_ARGUMENT,
            "rope: frequencies are for heads of up to %d elements, not %.0f", 2 * MIXP_ROPE_PAIRS,
            (double)k->d);
    if (k->scaled && mixp_bits_of_f64(k->scale) - 1u >= 0x7FEFFFFFFFFFFFFFu) /* bits: > 0, finite */
        return mixp_context_fail(c->ctx, MIXP_ERR_ARGUMENT,
            "rope: scale is %g; it must be above 0 and finite, or 0 for 1", k->scale);
    k->t = x->shape[x->rank - 2];
    k->heads = x->shape[x->rank - 1] / k->d;
    k->rows = x->count ? x->count / (k->t * k->heads * k->d) : 0;
    mixpi_call_reads_all(c, 0);
    return mixpi_same_infer(c);
}

static mixp_result mixpi_rope_both(mixp_call *c) {
    mixp_rope_args *k = (mixp_rope_args *)c->attrs;
    k->back = c->out->grad != NULL;
    k->a = mixpi_call_from(c);
    k->y = mixpi_call_to(c);
    return k->y.data ? MIXPI_RUN(c, rope, k) : MIXP_OK;
}

MIXPREC_API mixp_tensor *mixp_rope(mixp_context *ctx, mixp_tensor *x, const mixp_rope_desc *desc) {
    mixp_rope_args k = MIXPI_ZERO;
    if (desc) {
        k.d = desc->head_dim;
        k.interleaved = desc->interleaved != 0;
        k.base = mixp_bits_of_f64(desc->base) << 1 == 0 ? 10000.0 : desc->base;
        k.first = desc->first;
        const int has_scale = mixp_bits_of_f64(desc->scale) << 1 != 0;
        k.scaled = desc->frequencies || has_scale;
        k.scale = has_scale ? desc->scale : 1.0;
        const mixpi_float_mode mode = mixpi_float_calm();
        for (int64_t i = 0; k.scaled && i < k.d / 2 && i < MIXP_ROPE_PAIRS; i++)
            k.frequency[i] = desc->frequencies ? desc->frequencies[i]
                                               : pow(k.base, -2.0 * (double)i / (double)k.d);
        mixpi_float_leave(mode);
    }
    return mixpi_apply_one(ctx, MIXP_OP_ROPE, x, &k);
}

/* --- dropout --------------------------------------------------------------------------- */

static mixp_result mixpi_dropout_infer(mixp_call *c) {
    const mixp_dropout_args *k = (const mixp_dropout_args *)c->attrs;
    if (mixp_bits_of_f32(k->p) > 0x3F800000u) /* bits: NaN, negative, above 1 */
        return mixp_context_fail(
            c->ctx, MIXP_ERR_ARGUMENT, "dropout: p is %g; it must be in [0, 1]", (double)k->p);
    mixpi_call_reads_all(c, 0);
    return mixpi_same_infer(c);
}

static mixp_result mixpi_dropout_both(mixp_call *c) {
    mixp_dropout_args *k = (mixp_dropout_args *)c->attrs;
    k->n = c->out->count;
    k->a = mixpi_call_from(c);
    k->y = mixpi_call_to(c);
    if (!k->y.data) return MIXP_OK;
    if (k->p < 1.0f) return MIXPI_RUN(c, dropout, k);
    return k->y.accumulate ? MIXP_OK : mixpi_fill_with(c->ctx, k->y, k->n, 0.0);
}

MIXPREC_API mixp_tensor *mixp_dropout(mixp_context *ctx, mixp_tensor *x, float p, int training) {
    if (ctx && mixpi_is_live(x) && x->ctx == ctx && (!training || p == 0.0f)) return x;
    mixp_dropout_args k = MIXPI_ZERO;
    k.p = p;
    if (ctx) {
        k.seed = ctx->seed;
        k.step = mixpi_random_step(ctx);
        k.tensor = mixpi_dropout_key(ctx);
    }
    return mixpi_apply_one(ctx, MIXP_OP_DROPOUT, x, &k);
}
