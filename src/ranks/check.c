#pragma once
#include "agree.c"
/* --- weights of all ranks ------------------------------------------------------------------- */

/* Must t be the same on all ranks? A shared buffer is, except between its first write in a step and
 * the update. */
static int mixpi_is_compared(const mixp_tensor *t) {
    const mixpi_backup *b = t->own.backup;
    if (!b) return t->own.is_param || t->own.optimizers > 0;
    if (b->ranks == MIXP_BUFFER_OWN) return 0;
    return t->ctx->buffers.state != MIXPI_IN_STEP || !mixpi_is_sent(b);
}

/* Returns the number of weights. If `all` is given, lists them there. */
static int64_t mixpi_weights_list(const mixp_context *ctx, const mixp_tensor **all) {
    int64_t n = 0;
    for (mixp_tensor *t = ctx->tensors; t; t = t->own.next) {
        if (!mixpi_is_compared(t)) continue;
        if (all) all[n] = t;
        n++;
    }
    return n;
}

enum { MIXPI_CALL_CHECK = -1 };     /* mixp_ranks_check; from 0: mixp_ranks_from(ctx, value) */

static void mixpi_call_text(double call, char *text, size_t space) {
    if (call < 0.0) snprintf(text, space, "calls mixp_ranks_check");
    else snprintf(text, space, "calls mixp_ranks_from(ctx, %.0f)", call);
}

/* Fails with what rank 0 and rank `other` do. here, there: rows of the two ranks. */
static mixp_result mixpi_call_differs(
    mixp_context *ctx, const char *who, int other, const double *here, const double *there) {
    char first[64], second[64];
    if (here[1] == there[1])
        return mixp_context_fail(ctx, MIXP_ERR_RANKS,
            "%s: ranks differ: rank 0 has %.0f weights, rank %d has %.0f", who, here[0], other,
            there[0]);
    mixpi_call_text(here[1], first, sizeof first);
    mixpi_call_text(there[1], second, sizeof second);
    return mixp_context_fail(
        ctx, MIXP_ERR_RANKS, "%s: ranks differ: rank 0 %s, rank %d %s", who, first, other, second);
}

/* Do all ranks make the same call, with the same number of weights? call: MIXPI_CALL_CHECK, or the
 * argument of mixp_ranks_from. */
static mixp_result mixpi_call_alike(mixp_context *ctx, const char *who, int64_t n, int call) {
    const mixp_ranks_desc *k = ctx->ranks;
    double *table = (double *)mixpi_host_take(ctx, (size_t)k->size * 2 * sizeof *table);
    int64_t word = 0;
    int other = 0;
    if (!table) return mixpi_out_of_memory(ctx, (size_t)k->size * 2 * sizeof *table);
    memset(table, 0, (size_t)k->size * 2 * sizeof *table);
    table[2 * k->rank] = (double)n;
    table[2 * k->rank + 1] = (double)call;
    mixp_result r = mixpi_ranks_share(ctx, table, 2);
    if (r == MIXP_OK) other = mixpi_rows_differ(table, k->size, 2, &word);
    if (other) r = mixpi_call_differs(ctx, who, other, table, table + 2 * other);
    mixpi_host_free(ctx, table);
    return r;
}

MIXPI_SELDOM
MIXPREC_API mixp_result mixp_ranks_check(mixp_context *ctx) {
    const mixp_tensor **all;
    if (!ctx) return MIXP_ERR_ARGUMENT;
    if (ctx->ranks->size < 2) return MIXP_OK;
    int64_t n = mixpi_weights_list(ctx, NULL);
    mixp_result r = mixpi_call_alike(ctx, "mixp_ranks_check", n, MIXPI_CALL_CHECK);
    if (r != MIXP_OK || !n) return mixpi_crew_stop(ctx, r);
    all = (const mixp_tensor **)mixpi_host_take(ctx, (size_t)n * sizeof *all);
    if (!all) return mixpi_crew_stop(ctx, mixpi_out_of_memory(ctx, (size_t)n * sizeof *all));
    mixpi_weights_list(ctx, all);
    r = mixpi_tensors_compare(ctx, all, n, "weight");
    mixpi_host_free(ctx, (void *)(uintptr_t)all);
    return mixpi_crew_stop(ctx, r);
}

/* Sends n bytes of device memory at `data` of rank `from` to `piece` on all ranks: a sum of
 * integers, to which all other ranks contribute zeros. piece: scratch memory for n bytes, rounded
 * up. */
static mixp_result mixpi_piece_from(
    mixp_context *ctx, const char *what, const char *data, size_t n, int from, char *piece) {
    const size_t bytes = mixpi_round_up(n);
    MIXPI_TRY(mixpi_device_zero(ctx, piece, bytes));
    if (from == ctx->ranks->rank) MIXPI_TRY(mixpi_copy_bytes(ctx, piece, data, n));
    return mixpi_ranks_run(
        ctx, what, ctx->ranks->sum, mixpi_out_to(piece, MIXP_I32, 0), (int64_t)(bytes / 4));
}

/* Sends bytes of device memory at `data` from rank `from` to all ranks, in pieces. */
static mixp_result mixpi_bytes_from(mixp_context *ctx, char *data, size_t bytes, int from) {
    const size_t most = mixpi_round_up((size_t)ctx->ranks->bucket_bytes);
    const size_t room = most < bytes ? most : mixpi_round_up(bytes);
    mixp_result r = MIXP_OK;
    size_t n;
    for (size_t at = 0; at < bytes && r == MIXP_OK; at += n) {
        char *part = (char *)mixpi_context_scratch(ctx, room);
        n = bytes - at < most ? bytes - at : most;
        if (!part) return MIXP_ERR_MEMORY;
        r = mixpi_piece_from(ctx, "the broadcast of weights", data + at, n, from, part);
        if (r == MIXP_OK) r = mixpi_copy_bytes(ctx, data + at, part, n);
    }
    return r;
}

MIXPI_SELDOM
MIXPREC_API mixp_result mixp_ranks_from(mixp_context *ctx, int rank) {
    if (!ctx) return MIXP_ERR_ARGUMENT;
    if (rank < 0 || (ctx->ranks->size && rank >= ctx->ranks->size))
        return mixp_context_fail(ctx, MIXP_ERR_ARGUMENT,
            "mixp_ranks_from: rank %d is not in [0, %d)", rank, ctx->ranks->size);
    if (ctx->ranks->size < 2) return MIXP_OK;
    mixp_result r = mixpi_call_alike(ctx, "mixp_ranks_from", mixpi_weights_list(ctx, NULL), rank);
    for (mixp_tensor *t = ctx->tensors; t && r == MIXP_OK; t = t->own.next) {
        if (!mixpi_is_compared(t)) continue;
        mixpi_note_load(t, "mixp_ranks_from");
        r = mixpi_bytes_from(ctx, (char *)t->data, mixpi_bytes(t), rank);
    }
    return mixpi_crew_stop(ctx, r);
}
