#pragma once
#include "../tensors/crew.c"
#include "hooks.c"
#include "summing.c"
#include "shards.c"
#include "agree.c"
#include "check.c"
#include "shared_buffers.c"
#include "lent_states.c"
/* --- the table of the ranks' functions ------------------------------------------------------ */

static const mixpi_crew mixpi_ranks_door = {
    /* context */
    mixpi_ranks_end, mixpi_ranks_replayed, mixpi_ranks_lack, mixpi_ranks_share,
    mixpi_ranks_set_busy,
    /* walk */
    mixpi_exchange_begin, mixpi_exchange_opens, mixpi_exchange_pass, mixpi_exchange_end,
    mixpi_exchange_forget, mixpi_exchange_lose,
    /* optimizers */
    mixpi_shards_enter, mixpi_shards_add_wrong, mixpi_shards_left, mixpi_shards_grow,
    mixpi_shards_place, mixpi_shards_placed, mixpi_piece_row,
    /* step */
    mixpi_ranks_plan, mixpi_ranks_look, mixpi_ranks_prepare_views, mixpi_ranks_verdict,
    mixpi_shards_send, mixpi_opt_gather, mixpi_averages_gather, mixpi_opt_in_pieces,
    mixpi_buffers_exchange,
    /* checkpoints */
#ifndef MIXPREC_NO_CHECKPOINT
    mixp_ranks_check, mixpi_states_collect, mixpi_states_borrow, mixpi_states_return,
    mixpi_lent_load, mixpi_states_share_result, mixpi_buffers_collect
#else
    NULL, NULL, NULL, NULL, NULL, NULL, NULL
#endif
};

/* Returns the error in a description of scattered sums; NULL = none. */
static const char *mixpi_scatter_wrong(const mixp_ranks_desc *k) {
    if (k->scatter_ready && !k->grad_wait)
        return "ranks: scatter_ready needs grad_wait, which waits for its sums";
    if (!k->scatter) return NULL;
    if (!k->shard) return "ranks: scatter needs shard: without shard, each rank needs all sums";
    if (k->size > 1 && !k->reduce_scatter) return "ranks: scatter needs reduce_scatter";
    return NULL;
}

/* Returns what is wrong with a description; NULL if nothing is. */
MIXPI_SELDOM
static const char *mixpi_ranks_wrong(const mixp_ranks_desc *k) {
    if (!k) return NULL;
    if (k->size < 1) return "ranks: size is below 1; it includes this process";
    if (k->rank < 0 || k->rank >= k->size)
        return "ranks: rank must lie in [0, size); check the number of processes";
    if (k->size > 1 && !k->sum) return "ranks: sum is missing; more than one rank needs it";
    if (!k->grad_ready != !k->grad_wait)
        return "ranks: grad_ready and grad_wait: set both or neither";

    /* Numbers and kinds. */
    if (!mixpi_f64_is_finite(k->seconds) || k->seconds < 0.0)
        return "ranks: seconds must be finite and at least 0";
    if (k->bucket_bytes < 0) return "ranks: bucket_bytes is negative";
    if (k->parts < 0) return "ranks: parts is negative";
    if ((unsigned)k->mean > MIXP_MEAN_NONE) return "ranks: mean is not a mixp_ranks_mean";
    if (k->wire != MIXP_F32 && k->wire != MIXP_BF16)
        return "ranks: wire must be MIXP_F32 or MIXP_BF16";

    /* Shards need further hooks. */
    if (k->shard && k->size > 1 && !k->all_gather)
        return "ranks: shard needs all_gather, which sends weights to the other ranks";
    return mixpi_scatter_wrong(k);
}

/* Sets the table of the ranks in a new context. */
MIXPI_SELDOM
static void mixpi_ranks_enter(mixp_context *ctx, const mixp_ranks_desc *given) {
    mixp_ranks_desc *k = ctx->ranks;
    if (!given) return;
    ctx->crew = &mixpi_ranks_door;
    *k = *given;
    if (!(k->seconds > 0.0)) k->seconds = 600.0;
    if (!k->check_every) k->check_every = 100;
    if (!k->bucket_bytes) k->bucket_bytes = (int64_t)25 << 20;
    if (!k->parts) k->parts = k->size;
    ctx->place = k->rank;
    ctx->world = k->size;
    ctx->sharded = k->shard && k->size > 1;
}
