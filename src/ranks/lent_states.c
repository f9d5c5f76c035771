#pragma once
#include "agree.c"
#include "../files/list.c"
/* --- checkpoints: states that other ranks have --------------------------------------------------
 *
 * During a save or a load, the rows of parameters that another rank owns, or of which each rank
 * owns a piece, point to host memory that is laid out like the states of a complete tensor. For a
 * save only rank 0 borrows this memory, and the owners fill it. For a load all rows share the
 * memory of the largest one, which only shows which states a row has: each rank copies its pieces
 * from the file's data.
 */
static size_t mixpi_row_bytes(const mixp_optimizer *opt, int64_t i) {
    mixp_param_row row = opt->rows[i];
    mixpi_layout lay = { NULL, 0 };
    mixpi_row_layout(opt, &row, &lay);
    return lay.used;
}

/* Lends memory to every row that this rank does not own. memory NULL: removes the memory. shared:
 * all rows get the same memory. */
static void mixpi_rows_borrow(mixp_optimizer *opt, char *memory, int shared) {
    for (int64_t i = 0; i < opt->count; i++) {
        mixp_param_row *row = &opt->rows[i];
        mixpi_layout lay = { memory, 0 };
        if (mixpi_is_own(opt, i)) continue;
        mixpi_row_layout(opt, row, &lay);
        if (memory && !shared) memory += lay.used;
        if (memory) continue;
        row->missed = NULL;
        row->m = row->v = row->master = NULL;
        row->third = NULL;
        row->m_scale = row->v_scale = NULL;
    }
}

/* Loads a state of a parameter that this rank does not own: the rank's piece of it, or nothing if
 * another rank owns the parameter. */
MIXPI_SELDOM
static mixp_result mixpi_lent_load(const struct mixpi_state_item *item) {
    const mixp_optimizer *opt = item->lent;
    const mixp_param_row *row = &opt->rows[item->row];
    const char *data = (const char *)item->e.data;
    int64_t first;
    if (!mixpi_is_divided(opt, item->row)) return MIXP_OK;
    mixp_param_row piece = mixpi_piece_row(opt, item->row);
    int64_t n = mixpi_piece_of(opt, item->row, opt->ctx->ranks->rank, &first);
    if (item->memory == row->missed)
        return mixpi_upload(opt->ctx, piece.missed, data, sizeof *piece.missed);
    void *to = item->memory == row->m ? piece.m : item->memory == row->v ? piece.v : piece.master;
    if (item->memory == row->third) to = piece.third;
    if (!n) return MIXP_OK;
    return mixpi_upload(
        opt->ctx, to, data + (size_t)first * sizeof(float), (size_t)n * sizeof(float));
}

/* A part of the states of one parameter, in device memory: bytes [at, at + bytes) of the layout of
 * the complete tensor. */
typedef struct mixpi_part {
    char  *data;
    size_t at, bytes;
} mixpi_part;

/* Copies into the part its overlap with `bytes` bytes at offset `there` of the complete layout. */
static mixp_result mixpi_part_fill(
    mixp_context *ctx, const mixpi_part *part, const void *from, size_t there, size_t bytes) {
    const size_t end = part->at + part->bytes, last = there + bytes;
    const size_t first = there > part->at ? there : part->at, stop = last < end ? last : end;
    if (!from || first >= stop) return MIXP_OK;
    return mixpi_copy_bytes(
        ctx, part->data + (first - part->at), (const char *)from + (first - there), stop - first);
}

/* Copies this rank's piece of the states of parameter i. The arrays follow each other as in
 * mixpi_row_layout. Rank 0, whose piece is never empty, contributes `missed`. */
static mixp_result mixpi_part_fill_piece(mixp_optimizer *opt, int64_t i, const mixpi_part *part) {
    const mixp_param_row piece = mixpi_piece_row(opt, i);
    const void *own[4];
    mixpi_layout lay = { NULL, 64 };
    mixp_result r = MIXP_OK;
    int64_t first, n = mixpi_piece_of(opt, i, opt->ctx->ranks->rank, &first);

    own[0] = piece.m;
    own[1] = piece.v;
    own[2] = piece.master;
    own[3] = piece.third;

    /* Each array that exists follows, at this rank's first element. */
    if (!opt->ctx->ranks->rank)
        r = mixpi_part_fill(opt->ctx, part, piece.missed, 0, sizeof *piece.missed);
    for (int k = 0; k < 4 && r == MIXP_OK; k++) {
        if (!own[k]) continue;
        size_t at =
            mixpi_layout_place(&lay, opt->rows[i].count, MIXP_F32) + (size_t)first * sizeof(float);
        r = mixpi_part_fill(opt->ctx, part, n ? own[k] : NULL, at, (size_t)n * sizeof(float));
    }
    return r;
}

/* Sends one part of the states of parameter i from its owners to rank 0, which stores it in the
 * borrowed memory: a sum of integers, to which all other ranks contribute zeros. */
static mixp_result mixpi_part_collect(mixp_optimizer *opt, int64_t i, const mixpi_part *part) {
    mixp_context *ctx = opt->ctx;
    char *kept = (char *)opt->rows[i].missed;
    const int own = mixpi_is_own(opt, i);
    mixp_result r = mixpi_device_zero(ctx, part->data, part->bytes);
    if (r == MIXP_OK && own) r = mixpi_part_fill(ctx, part, kept, 0, mixpi_row_bytes(opt, i));
    if (r == MIXP_OK && mixpi_is_divided(opt, i)) r = mixpi_part_fill_piece(opt, i, part);
    if (r == MIXP_OK)
        r = mixpi_ranks_run(ctx, "the sum of states", ctx->ranks->sum,
            mixpi_out_to(part->data, MIXP_I32, 0), (int64_t)(part->bytes / 4));
    /* A rank 0 without borrowed memory still takes part, because the other ranks wait. */
    if (r != MIXP_OK || own || ctx->ranks->rank || !kept) return r;
    return mixpi_download(ctx, kept + part->at, part->data, part->bytes);
}

/* Collects the states of all ranks on rank 0, a bucket at a time. */
static mixp_result mixpi_rows_collect(mixp_optimizer *opt) {
    const size_t most = mixpi_round_up((size_t)opt->ctx->ranks->bucket_bytes);
    mixp_result r = MIXP_OK;
    for (int64_t i = 0; i < opt->count && r == MIXP_OK; i++) {
        const size_t bytes = mixpi_row_bytes(opt, i);
        mixpi_part part;
        for (part.at = 0; part.at < bytes && r == MIXP_OK; part.at += part.bytes) {
            part.bytes = bytes - part.at < most ? bytes - part.at : most;
            part.data = (char *)mixpi_context_scratch(opt->ctx, part.bytes);
            if (!part.data) return MIXP_ERR_MEMORY;
            r = mixpi_part_collect(opt, i, &part);
        }
    }
    return r;
}

/* Bytes of the rows of all optimizers; largest: of the largest row. */
static size_t mixpi_states_bytes(const mixp_checkpoint *what, int largest) {
    size_t bytes = 0;
    for (int o = 0; o < what->n_optimizers; o++)
        for (int64_t i = 0; i < what->optimizers[o]->count; i++) {
            const size_t row = mixpi_row_bytes(what->optimizers[o], i);
            if (!largest) bytes += row;
            else if (row > bytes) bytes = row;
        }
    return bytes;
}

/* Allocates and installs the memory that all optimizers borrow. shared: all rows borrow the same
 * memory, which then has no content. Returns NULL if the allocation failed. */
MIXPI_SELDOM
static void *mixpi_states_borrow(const mixp_checkpoint *what, mixpi_report *report, int shared) {
    const size_t bytes = mixpi_states_bytes(what, shared);
    char *memory = (char *)mixpi_st_allocate(report, what->ctx, bytes, 1), *at = memory;
    if (!memory) return NULL;
    if (!shared) memset(memory, 0, bytes);
    for (int o = 0; o < what->n_optimizers; o++) {
        mixpi_rows_borrow(what->optimizers[o], at, shared);
        for (int64_t i = 0; i < what->optimizers[o]->count && !shared; i++)
            at += mixpi_row_bytes(what->optimizers[o], i);
    }
    return memory;
}

MIXPI_SELDOM
static void mixpi_states_return(const mixp_checkpoint *what, void *memory) {
    if (!memory) return;
    for (int o = 0; o < what->n_optimizers; o++) mixpi_rows_borrow(what->optimizers[o], NULL, 0);
    mixpi_st_free(what->ctx, memory);
}

MIXPI_SELDOM
static mixp_result mixpi_states_collect(const mixp_checkpoint *what) {
    mixp_result r = MIXP_OK;
    for (int o = 0; o < what->n_optimizers && r == MIXP_OK; o++) {
        r = mixpi_rows_collect(what->optimizers[o]);
        if (r == MIXP_OK) r = mixpi_averages_gather(what->optimizers[o]);
    }
    return mixpi_crew_stop(what->ctx, r);
}

/* Tells all ranks the result of the save that rank 0 wrote. All ranks wait for it. */
MIXPI_SELDOM
static mixp_result mixpi_states_share_result(const mixp_checkpoint *what, mixp_result r) {
    const mixp_ranks_desc *k = what->ctx->ranks;
    double *table = (double *)mixpi_host_take(what->ctx, (size_t)k->size * sizeof *table);
    if (!table)
        return mixpi_crew_stop(
            what->ctx, mixpi_out_of_memory(what->ctx, (size_t)k->size * sizeof *table));

    memset(table, 0, (size_t)k->size * sizeof *table);
    table[k->rank] = (double)(int)r;
    mixp_result shared = mixpi_ranks_share(what->ctx, table, 1);
    mixp_result of_0 = (mixp_result)(int)mixpi_whole_of(table[0]);
    mixpi_host_free(what->ctx, table);

    /* The rank's own failure, then the exchange's, then rank 0's. */
    if (shared != MIXP_OK) mixpi_crew_stop(what->ctx, shared);
    if (r != MIXP_OK || shared != MIXP_OK) return r != MIXP_OK ? r : shared;
    if (of_0 == MIXP_OK) return MIXP_OK;
    return mixp_context_fail(
        what->ctx, of_0, "mixp_checkpoint_save: rank 0 failed: %s", mixp_result_text(of_0));
}
