#pragma once
#include "../step/table.c"
#include "summing.c"
/* --- sharded states ------------------------------------------------------------------------- *
 *
 * Each rank keeps the states of some parameters, and of a piece of each large one, and updates
 * those. Afterwards all ranks get the weights.
 */
typedef struct mixpi_shards {
    int64_t *owned;             /* elements that each rank owns                            */
    void    *slices;            /* device memory: a slice of the weights of every rank     */
    size_t   slice;             /* capacity of a slice in bytes                            */
} mixpi_shards;

/* Makes the shards of a new optimizer. */
MIXPI_SELDOM
static mixp_result mixpi_shards_enter(mixp_optimizer *opt) {
    const mixp_context *ctx = opt->ctx;
    if (!mixpi_is_sharded(ctx)) return MIXP_OK;
    mixpi_shards *shards = (mixpi_shards *)mixpi_opt_host(opt, sizeof *shards);
    if (!shards) return MIXP_ERR_MEMORY;
    shards->owned =
        (int64_t *)mixpi_opt_host(opt, (size_t)ctx->ranks->size * sizeof *shards->owned);
    if (!shards->owned) return MIXP_ERR_MEMORY;
    opt->shards = shards;
    opt->looks_own = mixpi_is_scattered(ctx);
    return MIXP_OK;
}

/* Does each rank update a piece of parameter i? */
static int mixpi_is_divided(const mixp_optimizer *opt, int64_t i) {
    return opt->slot[i].where == MIXPI_IN_PIECES;
}

/* The piece of parameter i that rank r updates: its number of elements; *first: the first one. */
static int64_t mixpi_piece_of(const mixp_optimizer *opt, int64_t i, int r, int64_t *first) {
    const int64_t count = opt->slot[i].param->count;
    const int64_t each = mixpi_piece_size(opt->ctx, count);
    *first = 0;
    if (!mixpi_is_divided(opt, i)) return opt->slot[i].owner == r ? count : 0;
    *first = mixpi_min(r * each, count);
    return mixpi_min(each, count - *first);
}

/* May ranks divide a parameter? Only with f32 states: random rounding of smaller states depends on
 * an element's position. */
static int mixpi_divides(const mixp_optimizer *opt, const mixp_param_row *row) {
    if (opt->muon || mixpi_row_is_small(row)) return 0;
    return row->count >= (int64_t)opt->ctx->ranks->size * MIXP_STATE_BLOCK;
}

/* The rank that will own a parameter: the lowest rank among those with the fewest elements; -1: the
 * ranks divide the parameter. */
static int mixpi_owner_next(mixp_optimizer *opt, const mixp_param_row *row) {
    int64_t *owned = opt->shards->owned;
    int r, least = 0;
    if (mixpi_divides(opt, row)) return -1;
    for (r = 1; r < opt->ctx->ranks->size; r++)
        if (owned[r] < owned[least]) least = r;
    owned[least] += row->count;
    return least;
}

/* Allocates the tables of the rows that this rank updates. */
MIXPI_SELDOM
static mixp_result mixpi_shards_grow(mixp_optimizer *opt, size_t bytes) {
    mixp_param_row *rows = (mixp_param_row *)mixpi_opt_host(opt, bytes);
    mixp_param_row *device = (mixp_param_row *)mixpi_opt_device(opt, bytes);
    if (!rows || !device) return MIXP_ERR_MEMORY;
    opt->own_rows = rows;
    opt->device_own_rows = device;
    return MIXP_OK;
}

/* Returns this rank's piece of the gradient of parameter i; the piece begins at element `first` of
 * the gradient. With scattered sums, the rank has memory for the piece only. */
static void *mixpi_piece_grad(const mixp_optimizer *opt, int64_t i, int64_t first) {
    const mixp_param_row *row = &opt->rows[i];
    const mixpi_exchange *d = opt->ctx->exchange;
    const int64_t leaf = opt->slot[i].param->own.ranks.leaf;
    if (d && leaf && d->leaves[leaf - 1].each) return d->leaves[leaf - 1].piece;
    return mixpi_out_at(mixpi_out_to(row->grad, row->grad_dtype, 0), first).data;
}

/* This rank's piece of parameter i as a row for update. It has no low copies: autocast renews them
 * from the complete weight. */
MIXPI_SELDOM
static mixp_param_row mixpi_piece_row(const mixp_optimizer *opt, int64_t i) {
    mixp_param_row piece = opt->rows[i];
    mixpi_layout lay = { NULL, 0 };
    int64_t first;
    piece.count = mixpi_piece_of(opt, i, opt->ctx->ranks->rank, &first);
    lay.memory = (char *)opt->slot[i].piece;
    mixpi_row_layout(opt, &piece, &lay);
    piece.weight = mixpi_out_at(mixpi_out_to(piece.weight, piece.weight_dtype, 0), first).data;
    if (piece.grad) piece.grad = mixpi_piece_grad(opt, i, first);
    piece.low_f16 = NULL;
    piece.low_bf16 = NULL;
    if (!piece.count) piece.active = 0;
    return piece;
}

static mixp_result mixpi_piece_memory(mixp_optimizer *opt, int64_t i, int64_t joined_at) {
    mixp_param_row piece = opt->rows[i];
    int64_t first;
    piece.count = mixpi_piece_of(opt, i, opt->ctx->ranks->rank, &first);
    mixp_result r = mixpi_row_memory(opt, &piece, joined_at);
    opt->slot[i].piece = piece.missed;
    return r;
}

/* Chooses who keeps the states of the last row, and allocates this rank's part. */
MIXPI_SELDOM
static mixp_result mixpi_shards_place(mixp_optimizer *opt, mixp_param_row *row, int64_t joined_at) {
    mixpi_slot *slot = &opt->slot[opt->count];
    slot->owner = mixpi_owner_next(opt, row);
    slot->where = slot->owner < 0                        ? MIXPI_IN_PIECES
                  : slot->owner == opt->ctx->ranks->rank ? MIXPI_HERE
                                                         : MIXPI_AWAY;
    if (slot->where == MIXPI_IN_PIECES) return mixpi_piece_memory(opt, opt->count, joined_at);
    return slot->where == MIXPI_HERE ? mixpi_row_memory(opt, row, joined_at) : MIXP_OK;
}

/* After an add with result r: p is the last parameter, or was not added. */
MIXPI_SELDOM
static void mixpi_shards_placed(mixp_optimizer *opt, mixp_tensor *p, mixp_result r) {
    const mixpi_slot *failed = &opt->slot[opt->count];
    p->own.ranks.divided = r == MIXP_OK && mixpi_is_divided(opt, opt->count - 1);
    if (r != MIXP_OK && failed->owner >= 0) opt->shards->owned[failed->owner] -= p->count;
}

/* p has lost its optimizer. Gradients that are in pieces stay so. */
MIXPI_SELDOM
static void mixpi_shards_left(mixp_tensor *p) {
    if (!p->own.ranks.leaf) p->own.ranks.divided = 0;
}

/* Returns why ranks cannot add p, with its view g as a gradient; NULL: they can. */
MIXPI_SELDOM
static const char *mixpi_shards_add_wrong(
    const mixp_optimizer *opt, const mixp_tensor *p, const mixp_tensor *g) {
    const int scattered = mixpi_is_scattered(opt->ctx);
    if (scattered && (p->own.optimizers || p->own.ranks.divided))
        return "has, or had, another optimizer: with `scatter`, each parameter can have one";
    if (scattered && g)
        return "has a view as its gradient, but with `scatter` a rank unscales and clips only a "
               "part of it: pass NULL as the gradient, or set `scatter` of mixp_ranks_desc to 0";
    if (g && opt->zero_grad && opt->shards)
        return "has a view as its gradient, which zero_grad cannot clear with `shard`: pass NULL "
               "as the gradient";
    return NULL;
}

/* Sends the table for the update kernel: rows of parameters that another rank updates are inactive,
 * rows of divided parameters describe this rank's piece. */
MIXPI_SELDOM
static mixp_result mixpi_shards_send(mixp_optimizer *opt) {
    size_t bytes = (size_t)opt->count * sizeof *opt->rows;
    memcpy(opt->own_rows, opt->rows, bytes);
    for (int64_t i = 0; i < opt->count; i++) {
        if (mixpi_is_divided(opt, i)) opt->own_rows[i] = mixpi_piece_row(opt, i);
        else if (!mixpi_is_own(opt, i)) opt->own_rows[i].active = 0;
    }
    return mixpi_upload(opt->ctx, opt->device_own_rows, opt->own_rows, bytes);
}

/* If sums are scattered, a rank unscales and clips only the gradients it updates. Marks all
 * gradients that are not its own as unreadable, because parts of them are still unprocessed. */
MIXPI_SELDOM
static void mixpi_opt_in_pieces(mixp_optimizer *opt) {
    if (!mixpi_is_scattered(opt->ctx)) return;
    for (int64_t i = 0; i < opt->count; i++) {
        const mixpi_slot *slot = &opt->slot[i];
        if (!slot->param->grad || mixpi_is_own(opt, i)) continue;
        slot->param->grad->own.ranks.in_pieces = 1;
    }
}

/* Copies one slice of a rank's weights, which form one row of bytes, from byte `base` on. out 1:
 * from the weights into the slice. out 0: back. */
static mixp_result mixpi_slice_copy(
    mixp_optimizer *o, int rank, size_t base, size_t length, int out) {
    char *slice = (char *)o->shards->slices + (size_t)rank * length;
    mixp_result r = MIXP_OK;
    size_t at = 0;
    for (int64_t i = 0; i < o->count && r == MIXP_OK; i++) {
        const mixp_tensor *p = o->slot[i].param;
        const size_t size = mixp_dtype_size(p->dtype);
        int64_t element;
        size_t bytes = (size_t)mixpi_piece_of(o, i, rank, &element) * size;

        /* The part of it that lies in the slice. */
        size_t first = at > base ? at : base, end = base + length;
        if (end > at + bytes) end = at + bytes;
        if (first < end) {
            char *weight = (char *)p->data + (size_t)element * size + (first - at);
            char *there = slice + (first - base);
            r = mixpi_copy_bytes(o->ctx, out ? there : weight, out ? weight : there, end - first);
        }

        at += mixpi_round_up(bytes);
    }
    return r;
}

/* Bytes of the weights of the rank that owns most of them. */
static size_t mixpi_slices_total(const mixp_optimizer *o) {
    size_t most = 0;
    for (int r = 0; r < o->ctx->ranks->size; r++) {
        size_t bytes = 0;
        int64_t first;
        for (int64_t i = 0; i < o->count; i++) {
            const size_t size = mixp_dtype_size(o->slot[i].param->dtype);
            bytes += mixpi_round_up((size_t)mixpi_piece_of(o, i, r, &first) * size);
        }
        if (bytes > most) most = bytes;
    }
    return most;
}

/* Allocates a slice for every rank. Slices grow if parameters were added since the last step. */
static mixp_result mixpi_slices_room(mixp_optimizer *o, size_t length) {
    if (o->shards->slice >= length) return MIXP_OK;
    void *slices = mixpi_opt_device(o, (size_t)o->ctx->ranks->size * length);
    if (!slices) return MIXP_ERR_MEMORY;
    o->shards->slices = slices;
    o->shards->slice = length;
    return MIXP_OK;
}

/* Bytes of a slice: the part of each rank's weights that is sent at once. */
static size_t mixpi_slice_length(const mixp_optimizer *o, size_t total) {
    const size_t most = mixpi_round_up((size_t)o->ctx->ranks->bucket_bytes);
    return most < total ? most : total;
}

/* Allocates the memory of mixpi_opt_gather. After the update it would be too late: only a hook may
 * fail then. */
static mixp_result mixpi_gather_room(mixp_optimizer *o) {
    if (!o->shards) return MIXP_OK;
    return mixpi_slices_room(o, mixpi_slice_length(o, mixpi_slices_total(o)));
}

/* After an update in which each rank updated its part: sends all weights to all ranks, one slice of
 * every rank at a time. */
MIXPI_SELDOM
static mixp_result mixpi_opt_gather(mixp_optimizer *o) {
    const mixp_ranks_desc *k = o->ctx->ranks;
    const size_t total = mixpi_slices_total(o), length = mixpi_slice_length(o, total);
    mixp_result r = mixpi_gather_room(o);
    for (size_t base = 0; base < total && r == MIXP_OK; base += length) {
        r = mixpi_slice_copy(o, k->rank, base, length, 1);
        if (r == MIXP_OK)
            r = mixpi_ranks_run(o->ctx, "the gather of weights", k->all_gather,
                mixpi_out_to(o->shards->slices, MIXP_I32, 0), (int64_t)(length / 4));
        for (int rank = 0; rank < k->size && r == MIXP_OK; rank++)
            if (rank != k->rank) r = mixpi_slice_copy(o, rank, base, length, 0);
    }
    return r;
}

/* Sends the averages of weights to all ranks: a sum of integers, to which each rank contributes
 * what it averages, and zeros. */
static mixp_result mixpi_average_gather(mixp_optimizer *o, int64_t i) {
    const int64_t count = o->slot[i].param->count;
    const int64_t most = (int64_t)(mixpi_round_up((size_t)o->ctx->ranks->bucket_bytes) / 4);
    float *ema = o->slot[i].ema;
    int64_t first;
    const int64_t end = mixpi_piece_of(o, i, o->ctx->ranks->rank, &first) + first;
    MIXPI_TRY(mixpi_device_zero(o->ctx, ema, (size_t)first * sizeof *ema));
    MIXPI_TRY(mixpi_device_zero(o->ctx, ema + end, (size_t)(count - end) * sizeof *ema));
    for (int64_t at = 0; at < count; at += most)
        MIXPI_TRY(mixpi_ranks_run(o->ctx, "the sum of averages", o->ctx->ranks->sum,
            mixpi_out_to(ema + at, MIXP_I32, 0), mixpi_min(most, count - at)));
    return MIXP_OK;
}

MIXPI_SELDOM
static mixp_result mixpi_averages_gather(mixp_optimizer *o) {
    mixp_result r = MIXP_OK;
    for (int64_t i = 0; i < o->ema_count && r == MIXP_OK; i++) r = mixpi_average_gather(o, i);
    return mixpi_crew_stop(o->ctx, r);
}
