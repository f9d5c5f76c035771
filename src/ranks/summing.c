#pragma once
#include "alike.c"
#include "divided.c"
/* --- a walk --- */

/* Fails if a walk would add to a gradient that was already summed. */
static mixp_result mixpi_exchange_fresh(mixp_context *ctx, mixpi_exchange *d) {
    for (int64_t i = 0; i < d->n_leaves; i++) {
        mixpi_leaf *l = &d->leaves[i];
        if (!l->tensor->grad) l->summed = 0;
        if (!l->tensor->grad) l->tensor->own.grad->own.ranks.in_pieces = 0;
        if (!l->summed || !d->buckets[l->bucket].due) continue;
        return mixp_context_fail(ctx, MIXP_ERR_ORDER,
            "mixp_backward: the gradient of '%s' was summed over the ranks already; call "
            "mixp_zero_grad first, and mixp_ranks_hold(ctx, 1) before all walks of a batch but the "
            "last",
            l->tensor->name);
    }
    return MIXP_OK;
}

/* Makes room for the leaves of the tape that are not known yet. */
static mixp_result mixpi_exchange_room(mixp_context *ctx, mixpi_exchange *d) {
    const int64_t missing = mixpi_leaves_missing(ctx) + mixpi_absent_count(ctx);
    if (!missing) return MIXP_OK;
    mixpi_leaf *leaves = (mixpi_leaf *)mixpi_longer(
        ctx, d->leaves, d->n_leaves, d->n_leaves + missing, sizeof *leaves);
    if (!leaves) return MIXP_ERR_MEMORY;
    d->leaves = leaves;
    return MIXP_OK;
}

/* Has any rank met new leaves in this walk? Without a comparison, all ranks have met some or
 * none. */
static mixp_result mixpi_newcomers_any(mixp_context *ctx, int here, int *any) {
    const int first = !ctx->exchange->n_buckets;
    int alike;
    *any = here;
    if (first || !mixpi_walks_agree(ctx)) return MIXP_OK;
    return mixpi_number_share(ctx, (double)here, &alike, any);
}

/* Places the new leaves, which start at number `from`. */
static mixp_result mixpi_newcomers_place(mixp_context *ctx, mixpi_exchange *d, int64_t from) {
    const int many = ctx->ranks->size > 1;
    mixp_result r = many ? mixpi_newcomers_agree(ctx, d, from) : MIXP_OK;
    if (r != MIXP_OK || d->n_leaves == from) return r;
    r = mixpi_exchange_lay_out(ctx, d, from);
    return r == MIXP_OK && many ? mixpi_start_leaves(ctx, d) : r;
}

/* Finds the leaves of the tape and places the new leaves. After a failure no new leaf stays known,
 * so the next walk meets them again. */
static mixp_result mixpi_exchange_meet(mixp_context *ctx, mixpi_exchange *d) {
    const int64_t old = d->n_leaves, old_buckets = d->n_buckets;
    MIXPI_TRY(mixpi_exchange_room(ctx, d));
    int any = 0;
    for (int64_t i = 0; i < old; i++) d->leaves[i].last = -1;
    mixpi_leaves_meet(ctx, d);
    mixp_result r = mixpi_newcomers_any(ctx, d->n_leaves > old, &any);
    if (r == MIXP_OK && any) r = mixpi_newcomers_place(ctx, d, old);
    if (r == MIXP_OK) return MIXP_OK;
    while (d->n_leaves > old) d->leaves[--d->n_leaves].tensor->own.ranks.leaf = 0;
    d->n_buckets = old_buckets;
    return r;
}

/* Before a walk: places the new leaves, and counts the leaves that each bucket awaits. */
MIXPI_SELDOM
static mixp_result mixpi_exchange_begin(mixp_context *ctx) {
    mixpi_exchange *d = mixpi_exchange_of(ctx);
    if (!d) return MIXP_ERR_MEMORY;
    MIXPI_TRY(mixpi_exchange_meet(ctx, d));

    /* No bucket is on its way; each awaits its leaves that this walk reaches. */
    d->position = d->sent = 0;
    for (int64_t i = 0; i < d->n_buckets; i++) {
        mixpi_bucket *b = &d->buckets[i];
        b->awaited = 0;
        b->flying = b->landed = 0;
    }
    for (int64_t i = 0; i < d->n_leaves; i++) {
        mixpi_bucket *b = &d->buckets[d->leaves[i].bucket];
        b->awaited += d->leaves[i].last >= 0;
        b->due |= d->leaves[i].last >= 0;
    }

    MIXPI_TRY(mixpi_due_agree(ctx, d));
    return mixpi_exchange_fresh(ctx, d);
}

/* Looks at a bucket's gradients on this rank. divide: also divides them, like
 * mixpi_divide_by_parts, in the same pass. */
static mixp_result mixpi_bucket_look(
    mixp_context *ctx, const mixpi_exchange *d, const mixpi_bucket *b, int divide) {
    mixp_grad_stats_args k = MIXPI_ZERO;
    k.rows = d->rows + b->first;
    k.count = b->end - b->first;
    k.scale = divide ? d->parts : NULL;
    k.unscale = divide;
    k.step = d->looks + (b - d->buckets);
    return ctx->device->kernels->grad_stats(&ctx->exec, &k);
}

/* The mark of any gradient of this walk. A gradient that this rank left out is 0 with this mark. */
static mixpi_mark mixpi_some_mark(const mixpi_exchange *d) {
    mixpi_mark none = MIXPI_ZERO;
    for (int64_t i = 0; i < d->n_leaves; i++) {
        const mixp_tensor *t = d->leaves[i].tensor;
        if (t->grad && !d->leaves[i].summed && !d->leaves[i].filled) return t->grad->own.mark;
    }
    return none;
}

/* Fills leaves without a gradient with zeros, because other ranks may have one. No rank has a
 * gradient for a frozen leaf: its zeros are sent, and no optimizer sees them. */
static mixp_result mixpi_bucket_fill(mixp_context *ctx, mixpi_exchange *d, mixpi_bucket *b) {
    mixp_result r = MIXP_OK;
    for (int64_t i = b->first; i < b->end && r == MIXP_OK; i++) {
        mixp_tensor *t = d->leaves[i].tensor, *g = t->own.grad;
        if (t->grad) continue;
        if (b->each) r = mixpi_buffer_open(ctx, d, b);
        if (r == MIXP_OK) r = mixpi_device_zero(ctx, g->data, mixpi_bytes(g));
        if (!t->requires_grad) continue;
        d->leaves[i].filled = 1;
        t->grad = g;
    }
    return r;
}

/* Copies the others' mark to the gradients that this rank left out of the walk. */
static void mixpi_filled_mark(mixpi_exchange *d, mixpi_mark mark) {
    for (int64_t i = 0; i < d->n_leaves; i++) {
        if (d->leaves[i].filled) d->leaves[i].tensor->own.grad->own.mark = mark;
        d->leaves[i].filled = 0;
    }
}

/* Puts the bucket's gradients of this walk into b->wire; divides them if division comes first. */
static mixp_result mixpi_bucket_part(mixp_context *ctx, mixpi_exchange *d, mixpi_bucket *b) {
    mixp_result r = mixpi_bucket_fill(ctx, d, b); /* may give b another buffer */
    const int staged = b->wire.data != b->grads.data;
    const int divide = ctx->ranks->mean == MIXP_MEAN_BEFORE && ctx->ranks->parts > 1;
    const int divide_now = divide && (!staged || b->grads.dtype == MIXP_F32);
    if (r == MIXP_OK) r = mixpi_bucket_look(ctx, d, b, divide_now);
    if (!staged || r != MIXP_OK) return r;
    r = mixpi_convert_to(ctx, b->wire, mixpi_in(b->grads.data, b->grads.dtype), b->count);
    if (r != MIXP_OK || !divide || divide_now) return r;
    return mixpi_divide_by_parts(ctx, b->wire, b->count);
}

/* Sums the bucket over the ranks: all of it for all ranks, or each piece for its owner. */
static mixp_result mixpi_bucket_sum(mixp_context *ctx, mixpi_bucket *b) {
    const mixp_ranks_desc *k = ctx->ranks;
    b->flying = b->each > 0;
    if (b->each)
        return mixpi_ranks_run(ctx, "the scattered sum of a gradient",
            k->scatter_ready ? k->scatter_ready : k->reduce_scatter, b->wire, b->each);
    return mixpi_ranks_run(
        ctx, "the sum of gradients", k->grad_ready ? k->grad_ready : k->sum, b->wire, b->count);
}

/* Sends a bucket whose gradients are final. */
static mixp_result mixpi_bucket_send(mixp_context *ctx, mixpi_exchange *d, mixpi_bucket *b) {
    const uint64_t reported = ctx->errors.reported;
    mixp_result r = mixpi_bucket_part(ctx, d, b);
    mixp_out sum = b->wire;
    sum.accumulate = 1;
    if (r == MIXP_OK && b->holds)
        r = mixpi_add_into(ctx, sum, mixpi_in(b->held, MIXP_F32), b->count);
    if (r != MIXP_OK) return mixpi_note_failure_since(ctx, reported, "a sum over ranks", r);
    return mixpi_bucket_sum(ctx, b);
}

/* Sends final buckets, in order. all: sends the others as well, because the walk has ended. */
static mixp_result mixpi_buckets_send(mixp_context *ctx, mixpi_exchange *d, int all) {
    mixp_result r = MIXP_OK;
    while (r == MIXP_OK && d->sent < d->n_buckets && (all || !d->buckets[d->sent].awaited)) {
        mixpi_bucket *b = &d->buckets[d->sent++];
        if (b->due) r = mixpi_bucket_send(ctx, d, b);
    }
    return r;
}

/* Called after a tape entry was walked or passed over. */
static mixp_result mixpi_exchange_pass(mixp_context *ctx, const mixp_call *c) {
    mixpi_exchange *d = ctx->exchange;
    if (!d) return MIXP_OK;
    for (int i = 0; i < c->n_in; i++) {
        const mixp_tensor *t = mixpi_leaf_of(c, i);
        mixpi_leaf *l = t && t->own.ranks.leaf ? &d->leaves[t->own.ranks.leaf - 1] : NULL;
        if (!l || l->last != d->position) continue;
        l->last = -1;
        d->buckets[l->bucket].awaited--;
    }
    d->position++;
    return d->hold ? MIXP_OK : mixpi_buckets_send(ctx, d, 0);
}

/* Holds a walk's part of a bucket: adds it to the parts of earlier walks. mark: the walk's mark. */
static mixp_result mixpi_bucket_hold(
    mixp_context *ctx, mixpi_exchange *d, mixpi_bucket *b, mixpi_mark mark) {
    const size_t bytes = (size_t)b->count * sizeof(float);
    mixp_result r = mixpi_bucket_part(ctx, d, b);
    if (!b->held) b->held = mixpi_device_alloc(ctx, bytes);
    if (!b->held) return MIXP_ERR_MEMORY;
    mixpi_filled_mark(d, mark);
    if (r == MIXP_OK)
        r = mixpi_add_into(ctx, mixpi_out_to(b->held, MIXP_F32, b->holds),
            mixpi_in(b->wire.data, b->wire.dtype), b->count);
    for (int64_t i = b->first; i < b->end; i++) {
        mixpi_leaf *l = &d->leaves[i];
        mixpi_mark_add(&l->mark, &l->tensor->own.grad->own.mark, b->holds);
        l->tensor->grad = NULL;
    }
    b->holds = 1;
    return r;
}

/* After the sum has arrived: marks the gradients as summed. */
static mixp_result mixpi_bucket_take(mixp_context *ctx, mixpi_exchange *d, mixpi_bucket *b) {
    const mixp_result r = b->landed ? MIXP_OK : mixpi_bucket_land(ctx, d, b);
    for (int64_t i = b->first; i < b->end; i++) {
        mixpi_leaf *l = &d->leaves[i];
        mixp_tensor *g = l->tensor->own.grad;
        if (b->holds) mixpi_mark_add(&g->own.mark, &l->mark, 1);
        l->summed = 1;
        g->own.ranks.in_pieces = b->each > 0;
        g->version++;
    }
    b->holds = b->due = 0;
    return r;
}

/* Ends the exchange after a walk. */
MIXPI_SELDOM
static mixp_result mixpi_exchange_end(mixp_context *ctx) {
    const mixp_ranks_desc *k = ctx->ranks;
    mixpi_exchange *d = ctx->exchange;
    if (!d) return MIXP_OK;
    mixp_result r = d->hold ? MIXP_OK : mixpi_buckets_send(ctx, d, 1);
    if (r == MIXP_OK && !d->hold && k->grad_wait && k->size > 1) r = mixpi_ranks_await(ctx);
    mixpi_mark mark = mixpi_some_mark(d); /* before the loop, which drops the gradients it holds */
    mixpi_filled_mark(d, mark);
    for (int64_t i = 0; i < d->n_buckets && r == MIXP_OK; i++) {
        mixpi_bucket *b = &d->buckets[i];
        if (!b->due) continue;
        if (!d->hold) r = mixpi_bucket_take(ctx, d, b);
        else if (k->apart) r = mixpi_bucket_hold(ctx, d, b, mark);
    }
    return r;
}

/* Removes the scaler `by`, about to be freed, from the marks of the gradients that are held. */
MIXPI_SELDOM
static void mixpi_exchange_lose(mixp_context *ctx, const void *by) {
    const mixpi_exchange *d = ctx->exchange;
    for (int64_t i = 0; d && i < d->n_leaves; i++) mixpi_mark_lose(&d->leaves[i].mark, by);
}
