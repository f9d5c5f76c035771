#pragma once
#include "arena.c"
/* --- buckets that arrive; buffers of divided gradients --- */

/* After the sum of b has arrived: converts and divides what was deferred. Of a divided gradient,
 * keeps this rank's piece; its buffer then holds nothing. */
static mixp_result mixpi_bucket_land(mixp_context *ctx, const mixpi_exchange *d, mixpi_bucket *b) {
    const mixp_ranks_desc *k = ctx->ranks;
    const int64_t n = b->each ? b->each : b->count;
    const mixp_out sum = mixpi_out_at(b->wire, b->each * k->rank);
    const mixp_out to =
        b->each ? mixpi_out_to(d->leaves[b->first].piece, b->grads.dtype, 0) : b->grads;
    const uint64_t reported = ctx->errors.reported;
    const int divide = k->mean == MIXP_MEAN_AFTER && k->parts > 1, wide = to.dtype == MIXP_F32;
    mixp_result r = MIXP_OK;
    if (divide && !wide) r = mixpi_divide_by_parts(ctx, sum, n);
    if (r == MIXP_OK && sum.data != to.data)
        r = mixpi_convert_to(ctx, to, mixpi_in(sum.data, sum.dtype), n);
    if (r == MIXP_OK && divide && wide) r = mixpi_divide_by_parts(ctx, to, n);
    b->flying = 0;
    b->landed = 1;
    return mixpi_note_failure_since(ctx, reported, "a mean over ranks", r);
}

/* May another gradient use w? */
static int mixpi_buffer_is_free(const mixpi_exchange *d, const mixpi_buffer *w) {
    const mixpi_bucket *b = &d->buckets[w->bucket];
    const mixpi_leaf *l = &d->leaves[b->first];
    if (b->buffer != w || b->landed) return 1;
    return !b->flying && (l->summed || !l->tensor->grad);
}

/* The buffer for b: the buffer that b had before, otherwise the smallest free buffer of at least
 * `bytes`. NULL if no buffer is free. */
static mixpi_buffer *mixpi_buffer_find(
    const mixpi_exchange *d, const mixpi_bucket *b, size_t bytes) {
    mixpi_buffer *w, *best = NULL;
    if (b->buffer && mixpi_buffer_is_free(d, b->buffer)) return b->buffer;
    for (w = d->buffers; w; w = w->next) {
        if (w->bytes < bytes || !mixpi_buffer_is_free(d, w)) continue;
        if (!best || w->bytes < best->bytes) best = w;
    }
    return best;
}

static mixpi_buffer *mixpi_buffer_new(mixp_context *ctx, mixpi_exchange *d, size_t bytes) {
    mixpi_buffer *w = (mixpi_buffer *)mixpi_host_alloc(ctx, sizeof *w);
    if (!w) return NULL;
    w->data = (char *)mixpi_device_alloc(ctx, bytes);
    if (!w->data) return NULL;
    w->bytes = bytes;
    w->next = d->buffers;
    d->buffers = w;
    return w;
}

/* Bytes of the buffers whose sums have not arrived. */
static size_t mixpi_buffers_flying(const mixpi_exchange *d) {
    size_t bytes = 0;
    for (int64_t i = 0; i < d->n_buckets; i++)
        if (d->buckets[i].flying) bytes += d->buckets[i].buffer->bytes;
    return bytes;
}

/* Waits for all sums in flight, and keeps this rank's pieces: their buffers become free. */
static mixp_result mixpi_buffers_land(mixp_context *ctx, mixpi_exchange *d) {
    mixp_result r = ctx->ranks->scatter_ready ? mixpi_ranks_await(ctx) : MIXP_OK;
    for (int64_t i = 0; i < d->n_buckets && r == MIXP_OK; i++)
        if (d->buckets[i].flying) r = mixpi_bucket_land(ctx, d, &d->buckets[i]);
    return r;
}

/* Puts the gradient of b into w. After the first steps no address changes any more. */
static mixp_result mixpi_buffer_enter(
    mixp_context *ctx, mixpi_exchange *d, mixpi_bucket *b, mixpi_buffer *w) {
    const mixpi_leaf *l = &d->leaves[b->first];
    const int staged = mixpi_stage_bytes(ctx, b) > 0;
    char *stage = w->data + mixpi_round_up(mixpi_leaf_bytes(ctx, l));
    mixp_param_row row;
    w->bucket = b - d->buckets;
    if (b->buffer == w) return MIXP_OK;
    b->buffer = w;
    b->grads = mixpi_out_to(w->data, b->grads.dtype, 0);
    b->wire = staged ? mixpi_out_to(stage, ctx->ranks->wire, 0) : b->grads;
    l->tensor->own.grad->data = w->data;
    mixpi_leaf_row(l, &row);
    return mixpi_upload(ctx, d->rows + b->first, &row, sizeof row);
}

/* Allocates a buffer for the divided gradient of b. At most 2 * bucket_bytes, or one buffer, are in
 * flight: to stay within this limit, the rank waits for the sums. Without scatter_ready each sum
 * has arrived when its hook returns. */
static mixp_result mixpi_buffer_open(mixp_context *ctx, mixpi_exchange *d, mixpi_bucket *b) {
    const size_t most = ctx->ranks->scatter_ready ? 2 * (size_t)ctx->ranks->bucket_bytes : 0;
    const size_t bytes = mixpi_round_up(mixpi_leaf_bytes(ctx, &d->leaves[b->first])) +
                         mixpi_round_up(mixpi_stage_bytes(ctx, b));
    mixpi_buffer *w = mixpi_buffer_find(d, b, bytes);
    if (!w && mixpi_buffers_flying(d) + bytes > most) {
        MIXPI_TRY(mixpi_buffers_land(ctx, d));
        w = mixpi_buffer_find(d, b, bytes);
    }
    if (!w) w = mixpi_buffer_new(ctx, d, bytes);
    return w ? mixpi_buffer_enter(ctx, d, b, w) : MIXP_ERR_MEMORY;
}

/* Before a walk writes the first gradient of leaf t. */
static mixp_result mixpi_exchange_opens(mixp_context *ctx, const mixp_tensor *t) {
    mixpi_exchange *d = ctx->exchange;
    if (!d || !t->own.ranks.leaf) return MIXP_OK;
    mixpi_bucket *b = &d->buckets[d->leaves[t->own.ranks.leaf - 1].bucket];
    return b->each ? mixpi_buffer_open(ctx, d, b) : MIXP_OK;
}
