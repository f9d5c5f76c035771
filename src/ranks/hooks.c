#pragma once
#include "../tensors/errors.c"
#include "../tensors/threads.c"
/* --- ranks ----------------------------------------------------------------------------- */

/* Parts of a batch that one step processes, one for each rank. */
static uint64_t mixpi_world(const mixp_context *ctx)
{ return ctx->ranks.size ? (uint64_t)ctx->ranks.size : 1u; }

/* Key of this step's random numbers. Each rank has a key of its own, for its part of the batch. */
static uint64_t mixpi_random_step(const mixp_context *ctx) {
    return ctx->step + 1u + (uint64_t)ctx->ranks.rank - mixpi_world(ctx);
}

/* Are the optimizers' states sharded over the ranks? */
static int mixpi_is_sharded(const mixp_context *ctx)
{ return ctx->ranks.shard && ctx->ranks.size > 1; }

/* Does each rank get only the sums of its own pieces? */
static int mixpi_is_scattered(const mixp_context *ctx)
{ return ctx->ranks.scatter && mixpi_is_sharded(ctx); }

/* Elements in a rank's piece of a divided tensor; the last pieces may have fewer. */
static int64_t mixpi_piece_size(const mixp_context *ctx, int64_t count) {
    int64_t each = mixpi_ceil_div(count, (int64_t)mixpi_world(ctx));
    return mixpi_ceil_div(each, MIXP_STATE_BLOCK) * MIXP_STATE_BLOCK;
}

/* Returns what is wrong with a description of scattered sums; NULL if nothing is. */
static const char *mixpi_scatter_wrong(const mixp_ranks_desc *k) {
    if (k->scatter_ready && !k->grad_wait)
        return "ranks: scatter_ready needs grad_wait, which waits for its sums";
    if (!k->scatter) return NULL;
    if (!k->shard) return "ranks: scatter needs shard: without shard, each rank needs all sums";
    if (k->size > 1 && !k->reduce_scatter) return "ranks: scatter needs reduce_scatter";
    return NULL;
}

/* Returns what is wrong with a description; NULL if nothing is. */
static const char *mixpi_ranks_wrong(const mixp_ranks_desc *k) {
    if (!k) return NULL;
    if (k->size < 1) return "ranks: size is below 1; it includes this process";
    if (k->rank < 0 || k->rank >= k->size)
        return "ranks: rank must lie in [0, size); check the number of processes";
    if (k->size > 1 && !k->sum) return "ranks: sum is missing; more than one rank needs it";
    if (!k->grad_ready != !k->grad_wait)
        return "ranks: grad_ready and grad_wait: give both or neither";
    if (!mixpi_f64_is_finite(k->seconds) || k->seconds < 0.0)
        return "ranks: seconds must be finite and at least 0";
    if (k->bucket_bytes < 0) return "ranks: bucket_bytes is negative";
    if (k->parts < 0) return "ranks: parts is negative";
    if ((unsigned)k->mean > MIXP_MEAN_NONE) return "ranks: mean is not a mixp_ranks_mean";
    if (k->wire != MIXP_F32 && k->wire != MIXP_BF16)
        return "ranks: wire must be MIXP_F32 or MIXP_BF16";
    if (k->shard && k->size > 1 && !k->all_gather)
        return "ranks: shard needs all_gather, which sends weights to the other ranks";
    return mixpi_scatter_wrong(k);
}

static void mixpi_ranks_take(mixp_context *ctx, const mixp_ranks_desc *given) {
    mixp_ranks_desc *k = &ctx->ranks;
    if (!given) return;
    *k = *given;
    if (!(k->seconds > 0.0)) k->seconds = 600.0;
    if (!k->check_every) k->check_every = 100;
    if (!k->bucket_bytes) k->bucket_bytes = (int64_t)25 << 20;
    if (!k->parts) k->parts = k->size;
}

/* Tells the other ranks not to wait for a rank that has failed. Returns r. */
static mixp_result mixpi_ranks_stop(mixp_context *ctx, mixp_result r) {
    const mixp_ranks_desc *k = ctx ? &ctx->ranks : NULL;
    if (r != MIXP_OK && k && k->size > 1 && k->stop) k->stop(k->user, ctx->message);
    return r;
}

/* Like mixpi_ranks_stop, but only for errors that one rank meets alone: out of memory, device
 * failures. All ranks make the program's mistakes alike, and may survive them. */
static mixp_result mixpi_ranks_stop_alone(mixp_context *ctx, mixp_result r) {
    const int alone = r == MIXP_ERR_MEMORY || r == MIXP_ERR_DEVICE;
    return alone ? mixpi_ranks_stop(ctx, r) : r;
}

/* Reports the failure of a hook. why: the hook's result, NULL if it succeeded. */
static mixp_result mixpi_ranks_heard(mixp_context *ctx, const char *what,
                                     const char *why) {
    if (!why) return MIXP_OK;
    mixp_context_fail(ctx, MIXP_ERR_RANKS, "rank %d of %d, %s: %s", ctx->ranks.rank,
                      ctx->ranks.size, what, why);
    return mixpi_ranks_stop(ctx, MIXP_ERR_RANKS);
}

/* Does t still own its memory? */
static mixp_result mixpi_tensor_there(const mixp_tensor *t, const char *who) {
    mixp_result r = mixpi_tensor_live(t, who);
    if (r != MIXP_OK || !t->own.spent) return r;
    return mixp_context_fail(t->ctx, MIXP_ERR_ORDER,
                             "%s: the tensor is no longer there: it was disposable, and its last "
                             "reader has freed it",
                             who);
}

/* Does t still own its memory, and does this rank hold all of it? */
static mixp_result mixpi_tensor_whole(const mixp_tensor *t, const char *who) {
    mixp_result r = mixpi_tensor_there(t, who);
    if (r != MIXP_OK || !t->own.in_pieces) return r;
    return mixp_context_fail(t->ctx, MIXP_ERR_ORDER,
                             "%s: the gradient of '%s' is scattered over the ranks, and this rank "
                             "lacks a part: to read it, set `scatter` of mixp_ranks_desc to 0",
                             who, t->name);
}

/* Runs a hook. Does nothing with a single rank. */
static MIXPI_APART mixp_result mixpi_ranks_run(mixp_context *ctx, const char *what,
                                               mixp_ranks_hook hook, mixp_out data,
                                               int64_t count) {
    const mixp_ranks_desc *k = &ctx->ranks;
    volatile char here = 0;
    const char *why;
    int before;
    if (k->size < 2) return MIXP_OK;
    if (!hook) return mixpi_ranks_heard(ctx, what, "mixp_ranks_desc lacks this hook");
    before = mixpi_inside_begin(ctx, MIXPI_FRAME(&here));
    why = hook(k->user, data.data, count, data.dtype, ctx->exec.stream, k->seconds);
    mixpi_inside_end(ctx, before);
    return mixpi_ranks_heard(ctx, what, why);
}

/* Tells the hooks that a captured step was started again. */
static mixp_result mixpi_ranks_replayed(mixp_context *ctx) {
    const mixp_ranks_desc *k = &ctx->ranks;
    if (k->size < 2 || !k->replayed) return MIXP_OK;
    return mixpi_ranks_heard(ctx, "mixp_replay", k->replayed(k->user, ctx->exec.stream));
}

MIXPREC_API mixp_result mixp_ranks_sum(mixp_tensor *t) {
    mixp_result r = mixpi_tensor_whole(t, "mixp_ranks_sum");
    if (r != MIXP_OK) return r;
    mixpi_written(t, "mixp_ranks_sum");
    return mixpi_ranks_run(t->ctx, "mixp_ranks_sum", t->ctx->ranks.sum,
                           mixpi_out_to(t->data, t->dtype, 0), t->count);
}

MIXPREC_API mixp_result mixp_ranks_max(mixp_tensor *t) {
    mixp_result r = mixpi_tensor_whole(t, "mixp_ranks_max");
    if (r != MIXP_OK) return r;
    mixpi_written(t, "mixp_ranks_max");
    return mixpi_ranks_run(t->ctx, "mixp_ranks_max", t->ctx->ranks.max,
                           mixpi_out_to(t->data, t->dtype, 0), t->count);
}

MIXPREC_API mixp_result mixp_ranks_busy(mixp_context *ctx, int on) {
    if (!ctx) return MIXP_ERR_ARGUMENT;
    on = on != 0;
    if (on == ctx->busy) return MIXP_OK;
    ctx->busy = on;
    if (ctx->ranks.size > 1 && ctx->ranks.busy) ctx->ranks.busy(ctx->ranks.user, on);
    return MIXP_OK;
}

/* Shares `words` doubles of each rank. table: host memory, one row for each rank; on entry this
 * rank's row is filled and all others are zero, on return all are filled. Waits for the device. */
static mixp_result mixpi_ranks_share(mixp_context *ctx, double *table, int64_t words) {
    int64_t n = (int64_t)mixpi_world(ctx) * words;
    size_t bytes = (size_t)n * sizeof *table;
    int apart = ctx->device->upload != NULL;
    void *shared = apart ? mixpi_context_scratch(ctx, bytes) : table;
    mixp_result r = MIXP_OK;
    if (!shared) return MIXP_ERR_MEMORY;
    if (apart) r = mixpi_upload(ctx, shared, table, bytes);
    if (r == MIXP_OK)
        r = mixpi_ranks_run(ctx, "the sum of a table", ctx->ranks.sum,
                            mixpi_out_to(shared, MIXP_F64, 0), n);
    if (r == MIXP_OK && apart) r = mixpi_download(ctx, table, shared, bytes);
    return r;
}

