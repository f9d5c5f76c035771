#pragma once
#include "check.c"
/* --- buffers of many ranks -------------------------------------------------------------------
 *
 * All ranks write a shared buffer in the same steps, so they exchange it in the same updates. Each
 * step compares which buffers the ranks have written: see mixpi_buffers_hash.
 */

/* t = the sum at `sum`, in f32, divided by the number of ranks. divisor: memory for one f32. A
 * division, because a factor of 1 / 7 would change a number that is the same on 7 ranks. */
static mixp_result mixpi_buffer_divide(mixp_tensor *t, const void *sum, void *divisor) {
    mixp_context *ctx = t->ctx;
    mixp_binary_args k = mixpi_binary_of(MIXP_BINARY_DIV, mixpi_in(sum, MIXP_F32),
        mixpi_in(divisor, MIXP_F32), mixpi_tensor_out(t, 0), 1, t->count);
    k.b_strides[0] = k.b_strides[1] = 0;
    MIXPI_TRY(
        mixpi_fill_with(ctx, mixpi_out_to(divisor, MIXP_F32, 0), 1, (double)ctx->ranks->size));
    return mixpi_note_failure(
        ctx, "the mean of a buffer", ctx->device->kernels->binary(&ctx->exec, &k));
}

/* The mean over the ranks, summed in f32. */
static mixp_result mixpi_buffer_mean(mixp_tensor *t) {
    mixp_context *ctx = t->ctx;
    const int low = mixpi_is_low(t->dtype);
    const size_t room = low ? mixpi_round_up((size_t)t->count * sizeof(float)) : 0;
    char *scratch = (char *)mixpi_context_scratch(ctx, room + sizeof(float));
    void *sum = low ? scratch : t->data;
    const mixp_out wide = mixpi_out_to(sum, MIXP_F32, 0);
    mixp_result r = MIXP_OK;
    if (!scratch) return MIXP_ERR_MEMORY;
    if (low) r = mixpi_convert_to(ctx, wide, mixpi_tensor_in(t), t->count);
    if (r == MIXP_OK)
        r = mixpi_ranks_run(ctx, "the mean of a buffer", ctx->ranks->sum, wide, t->count);
    return r == MIXP_OK ? mixpi_buffer_divide(t, sum, scratch + room) : r;
}

/* Sends the shared buffers that this window has written. */
MIXPI_SELDOM
static mixp_result mixpi_buffers_exchange(mixp_context *ctx) {
    mixp_result r = MIXP_OK;
    if (ctx->ranks->size < 2) return MIXP_OK;
    for (int64_t i = 0; i < ctx->buffers.all.count && r == MIXP_OK; i++) {
        const mixpi_backup *b = mixpi_backup_at(ctx, i);
        mixp_tensor *t = b->buffer;
        if (!mixpi_is_sent(b)) continue;
        ctx->buffers.sent = mixpi_hash(ctx->buffers.sent, &i, sizeof i);
        mixpi_note_write(t, "the exchange of buffers");
        if (b->ranks == MIXP_BUFFER_MEAN) r = mixpi_buffer_mean(t);
        else r = mixpi_bytes_from(ctx, (char *)t->data, mixpi_bytes(t), 0);
    }
    return r;
}

#ifndef MIXPREC_NO_CHECKPOINT
/* Sends a copy of this buffer of rank `from` to rank 0, which stores it at `to`. */
static mixp_result mixpi_buffer_collect(const mixp_tensor *t, int from, char *to) {
    mixp_context *ctx = t->ctx;
    const size_t bytes = mixpi_bytes(t), most = mixpi_round_up((size_t)ctx->ranks->bucket_bytes);
    const size_t room = most < bytes ? most : mixpi_round_up(bytes);
    mixp_result r = MIXP_OK;
    size_t n;
    for (size_t at = 0; at < bytes && r == MIXP_OK; at += n) {
        char *part = (char *)mixpi_context_scratch(ctx, room);
        n = bytes - at < most ? bytes - at : most;
        if (!part) return MIXP_ERR_MEMORY;
        r = mixpi_piece_from(ctx,
            "mixp_checkpoint_save, which all ranks call (a buffer is each rank's own)",
            (const char *)t->data + at, n, from, part);
        /* A rank 0 without memory still takes part, because the other ranks wait. */
        if (r == MIXP_OK && to) r = mixpi_download(ctx, to + at, part, n);
    }
    return r;
}

/* Collects the own buffers of all other ranks on rank 0. memory: NULL on the other ranks. */
MIXPI_SELDOM
static mixp_result mixpi_buffers_collect(mixp_context *ctx, char *memory) {
    mixp_result r = MIXP_OK;
    for (int rank = 1; rank < ctx->ranks->size; rank++)
        for (int64_t i = 0; i < ctx->buffers.all.count && r == MIXP_OK; i++) {
            const mixpi_backup *b = mixpi_backup_at(ctx, i);
            if (b->ranks != MIXP_BUFFER_OWN) continue;
            r = mixpi_buffer_collect(b->buffer, rank, memory);
            if (memory) memory += mixpi_round_up(mixpi_bytes(b->buffer));
        }
    return mixpi_crew_stop(ctx, r);
}
#endif
