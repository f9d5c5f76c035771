#pragma once
#include "../ranks.h"
#include "../tensors/tensors.c"
/* ==== 14. RANKS (implementation) ====================================================== */

/* Does each rank get only the sums of its own pieces? */
static int mixpi_is_scattered(const mixp_context *ctx) {
    return ctx->ranks->scatter && mixpi_is_sharded(ctx);
}

/* Elements in a rank's piece of a divided tensor; the last pieces may have fewer. */
static int64_t mixpi_piece_size(const mixp_context *ctx, int64_t count) {
    int64_t each = mixpi_ceil_div(count, (int64_t)mixpi_world(ctx));
    return mixpi_ceil_div(each, MIXP_STATE_BLOCK) * MIXP_STATE_BLOCK;
}

/* Tells the other ranks not to wait for this rank. */
MIXPI_SELDOM
static void mixpi_ranks_end(mixp_context *ctx, const char *why) {
    const mixp_ranks_desc *k = ctx->ranks;
    if (k->size > 1 && k->stop) k->stop(k->user, why);
}

/* Reports a gradient of which this rank lacks a part. */
MIXPI_SELDOM
static mixp_result mixpi_ranks_lack(const mixp_tensor *t, const char *who) {
    return mixp_context_fail(t->ctx, MIXP_ERR_ORDER,
        "%s: the gradient of '%s' is scattered over the ranks, and this rank lacks a part: to read "
        "it, set `scatter` of mixp_ranks_desc to 0",
        who, t->name);
}

/* Reports the failure of a hook. why: the hook's result, NULL if it succeeded. */
static mixp_result mixpi_ranks_report(mixp_context *ctx, const char *what, const char *why) {
    if (!why) return MIXP_OK;
    mixp_context_fail(ctx, MIXP_ERR_RANKS, "rank %d of %d, %s: %s", ctx->ranks->rank,
        ctx->ranks->size, what, why);
    return mixpi_crew_stop(ctx, MIXP_ERR_RANKS);
}

/* Runs a hook. Does nothing with a single rank. */
static MIXPI_APART mixp_result mixpi_ranks_run(
    mixp_context *ctx, const char *what, mixp_ranks_hook hook, mixp_out data, int64_t count) {
    const mixp_ranks_desc *k = ctx->ranks;
    volatile char here = 0;
    if (k->size < 2) return MIXP_OK;
    if (!hook) return mixpi_ranks_report(ctx, what, "mixp_ranks_desc lacks this hook");
    int before = mixpi_inside_begin(ctx, MIXPI_FRAME(&here));
    const char *why = hook(k->user, data.data, count, data.dtype, ctx->exec.stream, k->seconds);
    mixpi_inside_end(ctx, before);
    return mixpi_ranks_report(ctx, what, why);
}

/* Tells the hooks that a captured step was started again. */
MIXPI_SELDOM
static mixp_result mixpi_ranks_replayed(mixp_context *ctx) {
    const mixp_ranks_desc *k = ctx->ranks;
    if (k->size < 2 || !k->replayed) return MIXP_OK;
    return mixpi_ranks_report(ctx, "mixp_replay", k->replayed(k->user, ctx->exec.stream));
}

MIXPREC_API mixp_result mixp_ranks_sum(mixp_tensor *t) {
    MIXPI_TRY(mixpi_check_whole(t, "mixp_ranks_sum"));
    MIXPI_TRY(mixpi_crew_stop_alone(t->ctx, mixpi_write_computed(t, "mixp_ranks_sum")));
    return mixpi_ranks_run(
        t->ctx, "mixp_ranks_sum", t->ctx->ranks->sum, mixpi_out_to(t->data, t->dtype, 0), t->count);
}

MIXPREC_API mixp_result mixp_ranks_max(mixp_tensor *t) {
    MIXPI_TRY(mixpi_check_whole(t, "mixp_ranks_max"));
    MIXPI_TRY(mixpi_crew_stop_alone(t->ctx, mixpi_write_computed(t, "mixp_ranks_max")));
    return mixpi_ranks_run(
        t->ctx, "mixp_ranks_max", t->ctx->ranks->max, mixpi_out_to(t->data, t->dtype, 0), t->count);
}

/* Returns what the other ranks knew before. */
static int mixpi_ranks_set_busy(mixp_context *ctx, int on) {
    const int before = ctx->busy;
    if (on == before) return before;
    ctx->busy = on;
    if (ctx->ranks->size > 1 && ctx->ranks->busy) ctx->ranks->busy(ctx->ranks->user, on);
    return before;
}

MIXPREC_API mixp_result mixp_ranks_busy(mixp_context *ctx, int on) {
    if (!ctx) return MIXP_ERR_ARGUMENT;
    mixpi_ranks_set_busy(ctx, on != 0);
    return MIXP_OK;
}

/* Shares `words` doubles of each rank. table: host memory, one row for each rank; on entry this
 * rank's row is filled and all others are zero, on return all are filled. Waits for the device. */
MIXPI_SELDOM
static mixp_result mixpi_ranks_share(mixp_context *ctx, double *table, int64_t words) {
    int64_t n = (int64_t)mixpi_world(ctx) * words;
    size_t bytes = (size_t)n * sizeof *table;
    int apart = ctx->device->upload != NULL;
    void *shared = apart ? mixpi_context_scratch(ctx, bytes) : table;
    mixp_result r = MIXP_OK;
    if (!shared) return MIXP_ERR_MEMORY;
    if (apart) r = mixpi_upload(ctx, shared, table, bytes);
    if (r == MIXP_OK)
        r = mixpi_ranks_run(
            ctx, "the sum of a table", ctx->ranks->sum, mixpi_out_to(shared, MIXP_F64, 0), n);
    if (r == MIXP_OK && apart) r = mixpi_download(ctx, table, shared, bytes);
    return r;
}
