#pragma once
#include "arena.c"
/* --- are all ranks alike? --- */

/* Hashes the bytes [from, bytes) of a tensor in device memory, one piece at a time. */
static mixp_result mixpi_hash_data(
    mixp_context *ctx, const mixp_tensor *t, size_t from, size_t bytes, uint64_t *h) {
    const size_t piece = (size_t)1 << 20;
    size_t at, n = bytes < piece ? bytes : piece;
    void *host = mixpi_host_take(ctx, n);
    mixp_result r = MIXP_OK;
    if (!host) return mixpi_out_of_memory(ctx, n);
    for (at = from; at < bytes && r == MIXP_OK; at += n) {
        if (bytes - at < n) n = bytes - at;
        r = mixpi_download(ctx, host, (const char *)t->data + at, n);
        if (r == MIXP_OK) *h = mixpi_hash(*h, host, n);
    }
    mixpi_host_free(ctx, host);
    return r;
}

/* "'h.3.w' f16 [4, 4], values 1a2b3c" */
enum { MIXPI_LEAF_TEXT = 128 };

static mixp_result mixpi_leaf_describe(
    mixp_context *ctx, const mixp_tensor *t, char *text, uint64_t *hash) {
    char shape[48];
    uint64_t h = 1469598103934665603u;
    mixp_result r = mixpi_hash_data(ctx, t, 0, mixpi_bytes(t), &h);
    memset(text, 0, MIXPI_LEAF_TEXT);
    mixpi_shape_text(t->rank, t->shape, shape, sizeof shape);
    snprintf(text, MIXPI_LEAF_TEXT, "'%.48s' %s %s, values %06x", t->name,
        mixp_dtype_name(t->dtype), shape, (unsigned)(h >> 40));
    *hash = mixpi_hash(h, text, MIXPI_LEAF_TEXT) >> 16; /* exact as a double */
    return r;
}

/* Words that ranks share first, before everything else. Those before MIXPI_START_ALIKE must be the
 * same on all ranks. Which sums a walk asks for follows from these words, so that all ranks ask for
 * the same ones. */
enum {
    MIXPI_START_GUARD = 16,
    MIXPI_START_ALIKE = 26,
    MIXPI_START_LEAVES = MIXPI_START_ALIKE, /* hash of the leaves and their order */
    MIXPI_START_FAR,                        /* 1: device memory is not host memory */
    MIXPI_START_BITS,                       /* mixpi_bits of the device */
    MIXPI_START_WORDS
};

/* Hash, of 53 bits, of the tensors in the list and their order. */
static uint64_t mixpi_leaves_hash(const mixpi_exchange *d) {
    uint64_t h = 1469598103934665603u;
    for (int64_t i = 0; i < d->n_leaves; i++) {
        h = mixpi_hash(h, &d->leaves[i].tensor->own.id, sizeof d->leaves[i].tensor->own.id);
        h = (h ^ (uint64_t)(d->leaves[i].last >= 0)) * 1099511628211u;
    }
    return h >> 11;
}

static void mixpi_start_fill(const mixp_context *ctx, const mixpi_exchange *d, double *row) {
    const mixpi_watcher *watcher = mixpi_watcher_of(ctx);
    const mixp_ranks_desc *k = ctx->ranks;

    /* Must be alike, in the order of mixpi_start_name. */
    row[0] = MIXPREC_VERSION_MAJOR * 1e6 + MIXPREC_VERSION_MINOR * 1e3 + MIXPREC_VERSION_PATCH;
    row[1] = (double)k->size;
    row[2] = (double)(ctx->seed >> 32);
    row[3] = (double)(ctx->seed & 0xFFFFFFFFu);
    row[4] = (double)ctx->step;
    row[5] = (double)k->mean;
    row[6] = (double)k->parts;
    row[7] = (double)k->low_sums;
    row[8] = (double)k->apart;
    row[9] = (double)k->bucket_bytes;
    row[10] = (double)k->shard;
    row[11] = (double)k->scatter;
    row[12] = (double)k->wire;
    row[13] = (double)k->check_every;
    row[14] = (double)d->n_leaves;
    row[15] = (double)k->unused;
    if (watcher) watcher->words(ctx, row + MIXPI_START_GUARD);

    /* May differ. */
    row[MIXPI_START_LEAVES] = (double)mixpi_leaves_hash(d);
    row[MIXPI_START_FAR] = (double)(ctx->device->upload != NULL);
    row[MIXPI_START_BITS] = (double)mixpi_bits_of(ctx->device);
}

static const char *mixpi_start_name(int64_t word) {
    static const char *const names[MIXPI_START_ALIKE] = { "the version of mixprec", "size", "seed",
        "seed", "the number of steps", "mean", "parts", "low_sums", "apart", "bucket_bytes",
        "shard", "scatter", "wire", "check_every", "the number of gradients", "unused", "the guard",
        "the guard's every", "the guard's clean", "the guard's patience", "the guard's max_sites",
        "the guard's high", "the guard's low_again", "the guard's flushed", "the guard's imprecise",
        "the guard's delay in updates (CPU 0, GPU 1)" };
    return names[word];
}

/* Returns the lowest rank whose row differs from rank 0's row in the words [from, to), or 0. *word:
 * the first different word. */
static int mixpi_words_differ(
    const double *table, int size, int64_t words, int64_t from, int64_t to, int64_t *word) {
    for (int r = 1; r < size; r++)
        for (*word = from; *word < to; ++*word) {
            double here = table[*word], there = table[r * words + *word];
            if (here < there || here > there) return r;
        }
    return 0;
}

static int mixpi_rows_differ(const double *table, int size, int64_t words, int64_t *word) {
    return mixpi_words_differ(table, size, words, 0, words, word);
}

/* Fails if two ranks on CPUs have instruction sets whose bits differ: Muon would compute other
 * weights on each. Ranks on a GPU are not compared. */
static mixp_result mixpi_start_bits(mixp_context *ctx, const double *table) {
    const double *bits = table + MIXPI_START_BITS;
    int first = 0, other;
    while (first < ctx->ranks->size && !mixpi_whole_of(bits[first * MIXPI_START_WORDS])) first++;
    for (other = first + 1; other < ctx->ranks->size; other++) {
        const int64_t here = mixpi_whole_of(bits[first * MIXPI_START_WORDS]);
        const int64_t there = mixpi_whole_of(bits[other * MIXPI_START_WORDS]);
        if (!there || there == here || there >= MIXPI_BITS_COUNT || here >= MIXPI_BITS_COUNT)
            continue;
        return mixp_context_fail(ctx, MIXP_ERR_RANKS,
            "ranks differ: the instruction set of rank %d is '%s', that of rank %d '%s', and their "
            "products of f16 and bf16 differ: set portable_bits of mixp_context_desc on "
            "all ranks, or select one set for all with mixp_cpu_with",
            first, mixpi_bits_names[here], other, mixpi_bits_names[there]);
    }
    return MIXP_OK;
}

static mixp_result mixpi_start_settings(mixp_context *ctx, mixpi_exchange *d, double *table) {
    const mixp_ranks_desc *k = ctx->ranks;
    int64_t word;
    int other;
    mixpi_start_fill(ctx, d, table + (int64_t)k->rank * MIXPI_START_WORDS);
    MIXPI_TRY(mixpi_ranks_share(ctx, table, MIXPI_START_WORDS));

    /* Compare what may differ. It decides how the gradients are laid out. */
    d->unlike = mixpi_words_differ(
        table, k->size, MIXPI_START_WORDS, MIXPI_START_LEAVES, MIXPI_START_LEAVES + 1, &word);
    for (d->is_apart = other = 0; other < k->size; other++)
        d->is_apart |= table[other * MIXPI_START_WORDS + MIXPI_START_FAR] > 0.0;

    /* Compare what must not differ. */
    other = mixpi_words_differ(table, k->size, MIXPI_START_WORDS, 0, MIXPI_START_ALIKE, &word);
    if (!other) return mixpi_start_bits(ctx, table);
    return mixp_context_fail(ctx, MIXP_ERR_RANKS,
        "ranks differ: %s is %.15g on rank 0 and %.15g on rank %d", mixpi_start_name(word),
        table[word], table[other * MIXPI_START_WORDS + word], other);
}

/* Advice for a frozen parameter of which only the values differ; "" for other tensors. here,
 * there: the texts of two ranks. */
static const char *mixpi_frozen_hint(const mixp_tensor *t, const char *here, const char *there) {
    const char *values = strstr(here, ", values ");
    const size_t same = values ? (size_t)(values - here) : 0;
    if (!t->own.is_param || t->requires_grad || strncmp(here, there, same) != 0) return "";
    return "; it is frozen: if your steps write it, make it with mixp_buffer instead of mixp_param";
}

/* Reports what tensor number `at` of a list is on rank 0 and on another rank. */
static mixp_result mixpi_start_tell(mixp_context *ctx, const mixp_tensor *t, const char *what,
    double *table, int64_t at, int other) {
    const mixp_ranks_desc *k = ctx->ranks;
    double *row = table + (int64_t)k->rank * MIXPI_LEAF_TEXT;
    char here[MIXPI_LEAF_TEXT], there[MIXPI_LEAF_TEXT];
    uint64_t hash;
    mixp_result r = mixpi_leaf_describe(ctx, t, here, &hash);

    /* Each rank sends its text as numbers. */
    for (int i = 0; i < MIXPI_LEAF_TEXT; i++) row[i] = (double)here[i];
    if (r == MIXP_OK) r = mixpi_ranks_share(ctx, table, MIXPI_LEAF_TEXT);
    if (r != MIXP_OK) return r;

    for (int i = 0; i < MIXPI_LEAF_TEXT; i++) {
        here[i] = (char)mixpi_whole_of(table[i]);
        there[i] = (char)mixpi_whole_of(table[other * MIXPI_LEAF_TEXT + i]);
    }
    here[MIXPI_LEAF_TEXT - 1] = there[MIXPI_LEAF_TEXT - 1] = '\0';
    return mixp_context_fail(ctx, MIXP_ERR_RANKS,
        "ranks differ: %s %.0f is %.127s on rank 0 and %.127s on rank %d%s", what, (double)at, here,
        there, other, mixpi_frozen_hint(t, here, there));
}

/* Compares shapes, dtypes, names and values of n tensors. */
static mixp_result mixpi_tables_compare(
    mixp_context *ctx, const mixp_tensor **all, int64_t n, const char *what, double *table) {
    const mixp_ranks_desc *k = ctx->ranks;
    double *row = table + (int64_t)k->rank * n;
    char text[MIXPI_LEAF_TEXT];
    mixp_result r = MIXP_OK;
    int64_t i;

    /* Each rank sends a hash of each tensor. */
    for (i = 0; i < n && r == MIXP_OK; i++) {
        uint64_t hash = 0;
        r = mixpi_leaf_describe(ctx, all[i], text, &hash);
        row[i] = (double)hash;
    }
    if (r == MIXP_OK) r = mixpi_ranks_share(ctx, table, n);
    if (r != MIXP_OK) return r;

    /* The first that differs is described by both ranks. */
    int other = mixpi_rows_differ(table, k->size, n, &i);
    if (!other) return MIXP_OK;
    memset(table, 0, (size_t)k->size * MIXPI_LEAF_TEXT * sizeof *table);
    return mixpi_start_tell(ctx, all[i], what, table, i, other);
}

/* Are n tensors the same on all ranks? All pass the same n. Names the first tensor that differs. */
static mixp_result mixpi_tensors_compare(
    mixp_context *ctx, const mixp_tensor **all, int64_t n, const char *what) {
    const size_t words = (size_t)n + MIXPI_LEAF_TEXT;
    const size_t bytes = (size_t)ctx->ranks->size * words * sizeof(double);
    double *table = (double *)mixpi_host_take(ctx, bytes);
    if (!table) return mixpi_out_of_memory(ctx, bytes);
    memset(table, 0, bytes);
    mixp_result r = mixpi_tables_compare(ctx, all, n, what, table);
    mixpi_host_free(ctx, table);
    return r;
}

/* Compares all leaves. */
static mixp_result mixpi_start_leaves(mixp_context *ctx, const mixpi_exchange *d) {
    const mixp_tensor **all;
    all = (const mixp_tensor **)mixpi_host_take(ctx, (size_t)d->n_leaves * sizeof *all);
    if (!all) return mixpi_out_of_memory(ctx, (size_t)d->n_leaves * sizeof *all);
    for (int64_t i = 0; i < d->n_leaves; i++) all[i] = d->leaves[i].tensor;
    mixp_result r = mixpi_tensors_compare(ctx, all, d->n_leaves, "gradient");
    mixpi_host_free(ctx, (void *)(uintptr_t)all);
    return r;
}

/* Compares settings, and the number and order of the new leaves, before they get their places. */
static mixp_result mixpi_exchange_start(mixp_context *ctx, mixpi_exchange *d) {
    const size_t bytes = (size_t)ctx->ranks->size * MIXPI_START_WORDS * sizeof(double);
    double *table = (double *)mixpi_host_take(ctx, bytes);
    if (!table) return mixpi_out_of_memory(ctx, bytes);
    memset(table, 0, bytes);
    mixp_result r = mixpi_start_settings(ctx, d, table);
    mixpi_host_free(ctx, table);
    return r;
}

/* --- what each rank has met --- */

/* In: n bits of this rank, one byte each. Out: the bits set on any rank. */
static mixp_result mixpi_bits_join(mixp_context *ctx, unsigned char *bits, int64_t n) {
    const mixp_ranks_desc *k = ctx->ranks;
    const int64_t words = mixpi_ceil_div(n, 48);
    const size_t bytes = (size_t)k->size * (size_t)words * sizeof(double);
    double *table = (double *)mixpi_host_take(ctx, bytes);
    if (!table) return mixpi_out_of_memory(ctx, bytes);
    memset(table, 0, bytes);
    for (int64_t i = 0; i < n; i++)
        if (bits[i]) table[k->rank * words + i / 48] += (double)((uint64_t)1 << (i % 48));
    mixp_result r = mixpi_ranks_share(ctx, table, words);
    for (int rank = 0; rank < k->size && r == MIXP_OK; rank++)
        for (int64_t i = 0; i < n; i++)
            if (mixpi_whole_of(table[rank * words + i / 48]) >> (i % 48) & 1) bits[i] = 1;
    mixpi_host_free(ctx, table);
    return r;
}

/* Do the ranks compare, before each walk, which leaves they met? Waits for the device. The answer
 * is the same on all ranks, also if some have a GPU and others do not. */
static int mixpi_walks_agree(const mixp_context *ctx) {
    if (ctx->ranks->size < 2 || ctx->capture.active) return 0;
    return !ctx->exchange->is_apart || ctx->ranks->unused;
}

/* Shares one number of each rank. *alike: all are equal. *any: at least one is above 0. */
static mixp_result mixpi_number_share(mixp_context *ctx, double x, int *alike, int *any) {
    const mixp_ranks_desc *k = ctx->ranks;
    double *table = ctx->exchange->numbers;
    int64_t word;
    int rank;
    memset(table, 0, (size_t)k->size * sizeof *table);
    table[k->rank] = x;
    mixp_result r = mixpi_ranks_share(ctx, table, 1);
    *alike = r == MIXP_OK && !mixpi_rows_differ(table, k->size, 1, &word);
    for (*any = 0, rank = 0; rank < k->size; rank++) *any |= table[rank] > 0.0;
    return r;
}

/* Removes new leaves, from number `from` on, that no rank has met: another walk will meet them. */
static mixp_result mixpi_absent_drop(mixp_context *ctx, mixpi_exchange *d, int64_t from) {
    const int64_t n = d->n_leaves - from;
    unsigned char *met = (unsigned char *)mixpi_host_take(ctx, (size_t)n);
    mixp_result r = MIXP_OK;
    if (!met) return mixpi_out_of_memory(ctx, (size_t)n);
    for (int64_t i = 0; i < n; i++) met[i] = d->leaves[from + i].last >= 0;
    if (d->unlike) r = mixpi_bits_join(ctx, met, n);
    d->n_leaves = from;
    for (int64_t i = 0; i < n; i++) {
        if (met[i]) d->leaves[d->n_leaves++] = d->leaves[from + i];
        else d->leaves[from + i].tensor->own.ranks.leaf = 0;
    }
    mixpi_host_free(ctx, met);
    return r;
}

/* Agrees on the new leaves, from number `from` on. If the ranks met different leaves, or in
 * different orders, the leaves are sorted by the order in which they were made. */
static mixp_result mixpi_newcomers_agree(mixp_context *ctx, mixpi_exchange *d, int64_t from) {
    /* The list also gets all parameters of optimizers that this rank has not met. */
    for (mixp_tensor *t = ctx->tensors; t; t = t->own.next)
        if (mixpi_is_absent(t)) mixpi_leaf_add(d, t);
    qsort(d->leaves + from, (size_t)(d->n_leaves - from), sizeof *d->leaves, mixpi_leaf_order);
    MIXPI_TRY(mixpi_exchange_start(ctx, d));

    if (d->unlike)
        qsort(d->leaves + from, (size_t)(d->n_leaves - from), sizeof *d->leaves,
            mixpi_leaf_order_made);
    if (d->n_leaves > from) MIXPI_TRY(mixpi_absent_drop(ctx, d, from));
    return MIXP_OK;
}

/* Every bucket that any rank's walk has met is due on all ranks. The ranks exchange their lists
 * only if the lists differ. */
static mixp_result mixpi_due_agree(mixp_context *ctx, mixpi_exchange *d) {
    uint64_t h = 1469598103934665603u;
    int alike, any;
    if (d->hold || !mixpi_walks_agree(ctx)) return MIXP_OK;
    for (int64_t i = 0; i < d->n_buckets; i++)
        h = (h ^ (uint64_t)d->buckets[i].due) * 1099511628211u;
    mixp_result r = mixpi_number_share(ctx, (double)(h >> 11), &alike, &any);
    if (r != MIXP_OK || alike) return r;
    unsigned char *due = (unsigned char *)mixpi_host_take(ctx, (size_t)d->n_buckets);
    if (!due) return mixpi_out_of_memory(ctx, (size_t)d->n_buckets);
    for (int64_t i = 0; i < d->n_buckets; i++) due[i] = d->buckets[i].due != 0;
    r = mixpi_bits_join(ctx, due, d->n_buckets);
    for (int64_t i = 0; i < d->n_buckets; i++) d->buckets[i].due = due[i];
    mixpi_host_free(ctx, due);
    return r;
}
