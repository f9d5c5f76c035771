#pragma once
#include "hooks.c"
#include "../walk/blocks.c"
/* --- gradients of many ranks ------------------------------------------------------------ *
 *
 * With ranks, the gradients of leaves lie in one arena, in the order in which the first walk
 * completes them. A gradient is final once the oldest tape entry that uses its tensor has been
 * walked. A bucket is a range of complete tensors of one dtype. As soon as all gradients of a
 * bucket are final, this rank looks at them, because the sum would hide which rank's gradient was
 * Inf, and sends them. Buckets are sent in their order, which is the same on all ranks.
 *
 * A divided gradient (see SCATTERED SUMS) has only this rank's piece in the arena. During a walk
 * the complete gradient lies in a buffer, from its first write until its sum has arrived; then the
 * piece is copied into the arena, and another gradient may use the buffer. Between walks that are
 * held back (mixp_ranks_hold) each gradient keeps its buffer, so that they take the memory of
 * complete gradients. Each rank chooses its buffers alone: no sum depends on the choice.
 */
typedef struct mixpi_buffer {
    char   *data;               /* device memory */
    size_t  bytes;
    int64_t bucket;             /* the bucket that used it last */
    struct mixpi_buffer *next;
} mixpi_buffer;

typedef struct mixpi_leaf {
    mixp_tensor *tensor;
    int64_t      last;          /* entry, counted by the walk, that completes it; -1 = none */
    int64_t      bucket;
    int          summed;        /* 1: summed over the ranks since its gradient was last cleared */
    int          filled;        /* 1: this rank's walk did not reach it, so zeros were sent */
    int64_t      each;          /* elements of a rank's piece; 0: all ranks get all */
    void        *piece;         /* device memory: this rank's piece of the sum; NULL if each is 0 */
    mixpi_mark   mark;          /* mark of the gradient that is held                        */
} mixpi_leaf;

typedef struct mixpi_bucket {
    int64_t  first, end;        /* its leaves: [first, end)                                 */
    int64_t  count;             /* elements, including the zeros between tensors            */
    int64_t  each;              /* elements that each rank gets; 0: every rank gets all */
    mixp_out grads;             /* its range of the arena, or its place in a buffer         */
    mixp_out wire;              /* memory to sum: grads, or a copy in another dtype         */
    void    *held;              /* f32: the sum of earlier walks, or NULL                   */
    int      holds;             /* 1: held contains a sum                                   */
    int      due;               /* 1: a walk has met one of its leaves                      */
    int64_t  awaited;           /* leaves that the walk has not yet completed               */
    mixpi_buffer *buffer;       /* of a divided gradient: its buffer, or NULL before the first walk
                                   that writes it */
    int      flying;            /* 1: in this walk, its sum was sent and has not arrived    */
    int      landed;            /* 1: in this walk, its sum has arrived                     */
} mixpi_bucket;

struct mixpi_exchange {
    mixpi_leaf      *leaves;
    int64_t          n_leaves;
    mixpi_bucket    *buckets;
    int64_t          n_buckets;
    mixpi_buffer    *buffers;   /* all of them, newest first                                */
    mixp_param_row  *rows;      /* device memory: table of the leaves for grad_stats        */
    mixp_step_state *looks;     /* device memory: the look at each bucket                   */
    int64_t         *first;     /* device memory: each bucket's first leaf                  */
    float           *parts;     /* device memory: divisor of the mean                       */
    double          *numbers;   /* one number of each rank                                  */
    int64_t          position, sent;    /* progress of the walk: entries walked, buckets sent */
    int              hold;
    int              unlike;    /* 1: ranks met the new leaves in different orders          */
    int              far;       /* 1: on some rank, device memory is not host memory        */
};

/* The exchange of ctx, made at its first use. Returns NULL with the error set. */
static mixpi_exchange *mixpi_exchange_of(mixp_context *ctx) {
    float parts = (float)ctx->ranks.parts;
    mixpi_exchange *d = ctx->exchange;
    if (d) return d;
    d = (mixpi_exchange *)mixpi_host_alloc(ctx, sizeof *d);
    if (!d) return NULL;
    d->parts = (float *)mixpi_device_alloc(ctx, sizeof parts);
    d->numbers = (double *)mixpi_host_alloc(ctx, (size_t)ctx->ranks.size * sizeof *d->numbers);
    if (!d->parts || !d->numbers || mixpi_upload(ctx, d->parts, &parts, sizeof parts) != MIXP_OK)
        return NULL;
    ctx->exchange = d;
    return d;
}

MIXPI_SELDOM
MIXPREC_API mixp_result mixp_ranks_hold(mixp_context *ctx, int on) {
    if (!ctx) return MIXP_ERR_ARGUMENT;
    if (!ctx->ranks.size) return MIXP_OK;
    if (!mixpi_exchange_of(ctx)) return MIXP_ERR_MEMORY;
    ctx->exchange->hold = on != 0;
    return MIXP_OK;
}

/* Drops all gradients that were held back. */
MIXPI_SELDOM
static void mixpi_exchange_forget(mixp_context *ctx) {
    mixpi_exchange *d = ctx->exchange;
    int64_t i;
    for (i = 0; d && i < d->n_buckets; i++) {
        d->buckets[i].holds = 0;
        d->buckets[i].due = 0;
    }
}

/* --- the arena --- */

/* The leaf that receives input i's gradient, or NULL. */
static mixp_tensor *mixpi_leaf_of(const mixp_call *c, int i) {
    mixp_tensor *t = mixpi_grad_owner(c, i);
    int is_leaf = mixp_call_wants(c, i) && !t->own.from_tape && !t->own.generation;
    return is_leaf ? t : NULL;
}

/* Uses, on the tape, of leaves without a place in the arena: at least as many as such leaves. */
static int64_t mixpi_leaves_missing(const mixp_context *ctx) {
    const mixpi_tape_entry *e;
    int64_t n = 0;
    int i;
    for (e = ctx->tape.newest; e; e = e->older)
        for (i = 0; i < e->call.n_in; i++) {
            const mixp_tensor *t = mixpi_leaf_of(&e->call, i);
            n += t && !t->own.ranks.leaf;
        }
    return n;
}

/* Could a walk of another rank give t a gradient, although no walk of this rank has? */
static int mixpi_is_absent(const mixp_tensor *t)
{ return t->own.optimizers > 0 && t->requires_grad && !t->own.ranks.leaf && !t->own.from_tape; }

static int64_t mixpi_absent_count(const mixp_context *ctx) {
    const mixp_tensor *t;
    int64_t n = 0;
    for (t = ctx->tensors; t; t = t->own.next) n += mixpi_is_absent(t);
    return n;
}

/* Allocates an array of n elements that starts with the old content. Returns NULL if out of memory.
 * The context keeps the old memory. */
static void *mixpi_longer(mixp_context *ctx, const void *old, int64_t used, int64_t n,
                          size_t size) {
    void *p = mixpi_host_alloc(ctx, (size_t)n * size);
    if (p && used) memcpy(p, old, (size_t)used * size);
    return p;
}

static void mixpi_leaf_add(mixpi_exchange *d, mixp_tensor *t) {
    mixpi_leaf *l = &d->leaves[d->n_leaves];
    memset(l, 0, sizeof *l);
    l->tensor = t;
    l->last = -1;
    t->own.ranks.leaf = ++d->n_leaves;
}

/* Sets for each leaf of the tape the entry that completes it. Appends new leaves to the list. */
static void mixpi_leaves_meet(mixp_context *ctx, mixpi_exchange *d) {
    const mixpi_tape_entry *e;
    int64_t position = 0;
    int i;
    for (e = ctx->tape.newest; e; e = e->older, position++)
        for (i = 0; i < e->call.n_in; i++) {
            mixp_tensor *t = mixpi_leaf_of(&e->call, i);
            if (!t) continue;
            if (!t->own.ranks.leaf) mixpi_leaf_add(d, t);
            d->leaves[t->own.ranks.leaf - 1].last = position;
        }
}

/* Order by dtype; within a dtype, divided leaves come first. */
static int mixpi_leaf_kind_order(const mixpi_leaf *x, const mixpi_leaf *y) {
    const mixp_dtype a = mixpi_grad_dtype(x->tensor), b = mixpi_grad_dtype(y->tensor);
    if (a != b) return a < b ? -1 : 1;
    return !x->each == !y->each ? 0 : x->each ? -1 : 1;
}

/* Order by kind, then by the entry that completes the leaf. */
static int mixpi_leaf_order(const void *a, const void *b) {
    const mixpi_leaf *x = (const mixpi_leaf *)a, *y = (const mixpi_leaf *)b;
    const int kind = mixpi_leaf_kind_order(x, y);
    if (kind) return kind;
    if (x->last != y->last) return x->last < y->last ? -1 : 1;
    return x->tensor->own.id < y->tensor->own.id ? -1 : 1;
}

/* Order by kind, then newest first. Used if ranks have met the leaves in different orders: the
 * parameters that a program makes last mostly complete first. */
static int mixpi_leaf_order_made(const void *a, const void *b) {
    const mixpi_leaf *x = (const mixpi_leaf *)a, *y = (const mixpi_leaf *)b;
    const int kind = mixpi_leaf_kind_order(x, y);
    if (kind) return kind;
    return x->tensor->own.id > y->tensor->own.id ? -1 : 1;
}

/* Bytes of a complete leaf, with padding if the last pieces are shorter than others. */
static size_t mixpi_leaf_bytes(const mixp_context *ctx, const mixpi_leaf *l) {
    const size_t size = mixp_dtype_size(mixpi_grad_dtype(l->tensor));
    if (!l->each) return mixpi_round_up((size_t)l->tensor->count * size);
    return (size_t)mixpi_world(ctx) * (size_t)l->each * size;
}

/* Bytes of a leaf in the arena: of its piece, if it is divided. */
static size_t mixpi_leaf_kept(const mixp_context *ctx, const mixpi_leaf *l) {
    if (!l->each) return mixpi_leaf_bytes(ctx, l);
    return mixpi_round_up((size_t)l->each * mixp_dtype_size(mixpi_grad_dtype(l->tensor)));
}

/* Elements of a rank's piece; 0 for a small tensor: its own message would cost more than it
 * saves. */
static int64_t mixpi_leaf_each(const mixp_context *ctx, const mixp_tensor *t) {
    const size_t least = (size_t)ctx->ranks.bucket_bytes / 100;
    if (!mixpi_is_scattered(ctx) || !t->own.ranks.divided || mixpi_bytes(t) < least) return 0;
    return mixpi_piece_size(ctx, t->count);
}

/* Does leaf l begin a new bucket? bytes: size of the current bucket. */
static int mixpi_bucket_begins(const mixp_context *ctx, const mixpi_leaf *l,
                               size_t bytes) {
    return !bytes || bytes >= (size_t)ctx->ranks.bucket_bytes || l->each ||
           l[-1].each || mixpi_grad_dtype(l[-1].tensor) != mixpi_grad_dtype(l->tensor);
}

/* Divides the leaves from number `from` on into buckets. */
static void mixpi_buckets_cut(mixp_context *ctx, mixpi_exchange *d, int64_t from,
                              char *arena) {
    mixpi_bucket *b = NULL;
    size_t bytes = 0;
    int64_t i;
    for (i = from; i < d->n_leaves; i++) {
        mixpi_leaf *l = &d->leaves[i];
        const mixp_tensor *t = l->tensor;
        if (mixpi_bucket_begins(ctx, l, bytes)) {
            b = &d->buckets[d->n_buckets++];
            b->first = i;
            b->each = l->each;
            b->grads = mixpi_out_to(l->each ? NULL : arena, mixpi_grad_dtype(t), 0);
            b->wire = b->grads;
            bytes = 0;
        }
        t->own.grad->data = l->each ? NULL : arena;
        l->piece = l->each ? arena : NULL;
        l->bucket = d->n_buckets - 1;
        arena += mixpi_leaf_kept(ctx, l);
        bytes += mixpi_leaf_bytes(ctx, l);
        b->end = i + 1;
        b->count = (int64_t)(bytes / mixp_dtype_size(mixpi_grad_dtype(t)));
    }
}

/* Sorts the buckets into the order in which they complete. Only with scattered sums does this order
 * differ from the order in the arena. */
static void mixpi_buckets_order(mixpi_exchange *d, int64_t from) {
    int64_t i, k;
    for (i = from + 1; i < d->n_buckets; i++) {
        const mixpi_bucket moved = d->buckets[i];
        const int64_t last = d->leaves[moved.end - 1].last;
        for (k = i; k > from && d->leaves[d->buckets[k - 1].end - 1].last > last; k--)
            d->buckets[k] = d->buckets[k - 1];
        d->buckets[k] = moved;
    }
    for (i = from; i < d->n_buckets; i++)
        for (k = d->buckets[i].first; k < d->buckets[i].end; k++) d->leaves[k].bucket = i;
}

/* Bytes for the sum of b if its dtype differs from the gradients' dtype; otherwise 0. */
static size_t mixpi_stage_bytes(const mixp_context *ctx, const mixpi_bucket *b) {
    const mixp_ranks_desc *k = &ctx->ranks;
    const int is_low = b->grads.dtype != MIXP_F32;
    if (b->grads.dtype == k->wire || (is_low && k->low_sums)) return 0;
    if (k->size == 1 && !k->apart) return 0;
    return (size_t)b->count * mixp_dtype_size(k->wire);
}

/* Allocates memory for the sum of b, where b needs some. Of a divided gradient it lies in the
 * gradient's buffer. */
static mixp_result mixpi_bucket_stage(mixp_context *ctx, mixpi_bucket *b) {
    const size_t bytes = b->each ? 0 : mixpi_stage_bytes(ctx, b);
    void *stage;
    if (!bytes) return MIXP_OK;
    stage = mixpi_device_alloc(ctx, bytes);
    b->wire = mixpi_out_to(stage, ctx->ranks.wire, 0);
    return stage ? MIXP_OK : MIXP_ERR_MEMORY;
}

/* The row of a leaf in the device's table. */
static void mixpi_leaf_row(const mixpi_leaf *l, mixp_param_row *row) {
    const mixp_tensor *g = l->tensor->own.grad;
    memset(row, 0, sizeof *row);
    row->grad = g->data;
    row->grad_dtype = g->dtype;
    row->count = g->count;
    row->active = 1;
}

/* Makes the device's tables of leaves and buckets. */
static mixp_result mixpi_exchange_tables(mixp_context *ctx, mixpi_exchange *d) {
    size_t rows_size = (size_t)d->n_leaves * sizeof *d->rows,
           first_size = (size_t)d->n_buckets * sizeof *d->first;
    mixp_param_row *rows = (mixp_param_row *)mixpi_host_take(ctx, rows_size + first_size),
                   *new_rows;
    int64_t i, *first = (int64_t *)(void *)(rows ? rows + d->n_leaves : NULL), *new_first;
    mixp_step_state *looks;
    mixp_result r = MIXP_ERR_MEMORY;
    if (!rows) return mixpi_out_of_memory(ctx, rows_size + first_size);
    for (i = 0; i < d->n_leaves; i++) mixpi_leaf_row(&d->leaves[i], &rows[i]);
    for (i = 0; i < d->n_buckets; i++) first[i] = d->buckets[i].first;
    new_rows = (mixp_param_row *)mixpi_device_alloc(ctx, rows_size);
    new_first = (int64_t *)mixpi_device_alloc(ctx, first_size);
    looks = (mixp_step_state *)mixpi_device_alloc(ctx, (size_t)d->n_buckets * sizeof *looks);
    if (new_rows && new_first && looks) r = mixpi_upload(ctx, new_rows, rows, rows_size);
    if (r == MIXP_OK) r = mixpi_upload(ctx, new_first, first, first_size);
    mixpi_host_put(ctx, rows);
    if (r != MIXP_OK) return r;
    d->rows = new_rows;
    d->first = new_first;
    d->looks = looks;
    return MIXP_OK;
}

/* Places the new leaves, from number `from` on, in the arena. */
static mixp_result mixpi_exchange_lay_out(mixp_context *ctx, mixpi_exchange *d,
                                           int64_t from) {
    int64_t i, new_leaves = d->n_leaves - from, old_buckets = d->n_buckets;
    mixp_result r = MIXP_OK;
    mixpi_bucket *buckets;
    size_t bytes = 0;
    char *arena;
    for (i = from; i < d->n_leaves; i++)
        d->leaves[i].each = mixpi_leaf_each(ctx, d->leaves[i].tensor);
    qsort(d->leaves + from, (size_t)new_leaves, sizeof *d->leaves,
          d->unlike ? mixpi_leaf_order_made : mixpi_leaf_order);
    for (i = from; i < d->n_leaves; i++) {
        mixpi_leaf *l = &d->leaves[i];
        l->tensor->own.ranks.leaf = i + 1;
        if (!mixpi_grad_record(l->tensor)) return MIXP_ERR_MEMORY;
        bytes += mixpi_leaf_kept(ctx, l);
    }
    arena = (char *)mixpi_device_alloc(ctx, bytes);
    buckets = (mixpi_bucket *)mixpi_longer(
        ctx, d->buckets, old_buckets, old_buckets + new_leaves, sizeof *buckets);
    if (!arena || !buckets) return MIXP_ERR_MEMORY;
    d->buckets = buckets;
    mixpi_buckets_cut(ctx, d, from, arena);
    if (mixpi_is_scattered(ctx) && !d->unlike) mixpi_buckets_order(d, old_buckets);
    for (i = old_buckets; i < d->n_buckets && r == MIXP_OK; i++)
        r = mixpi_bucket_stage(ctx, &d->buckets[i]);
    return r == MIXP_OK ? mixpi_exchange_tables(ctx, d) : r;
}

/* --- are all ranks alike? --- */

/* FNV-1a, applied to words of 8 bytes and then to the remaining bytes. */
static uint64_t mixpi_hash(uint64_t h, const void *data, size_t bytes) {
    const unsigned char *p = (const unsigned char *)data;
    for (; bytes >= 8; bytes -= 8, p += 8) {
        uint64_t word;
        memcpy(&word, p, 8);
        h = (h ^ word) * 1099511628211u;
        h ^= h >> 29;
    }
    for (; bytes; bytes--, p++) h = (h ^ *p) * 1099511628211u;
    return h;
}

/* Hashes the bytes [from, bytes) of a tensor in device memory, one piece at a time. */
static mixp_result mixpi_hash_data(mixp_context *ctx, const mixp_tensor *t, size_t from,
                                   size_t bytes, uint64_t *h) {
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
    mixpi_host_put(ctx, host);
    return r;
}

/* "'h.3.w' f16 [4, 4], values 1a2b3c" */
enum { MIXPI_LEAF_TEXT = 128 };

static mixp_result mixpi_leaf_describe(mixp_context *ctx, const mixp_tensor *t,
                                       char *text, uint64_t *hash) {
    char shape[48];
    uint64_t h = 1469598103934665603u;
    mixp_result r = mixpi_hash_data(ctx, t, 0, mixpi_bytes(t), &h);
    memset(text, 0, MIXPI_LEAF_TEXT);
    mixpi_shape_text(t->rank, t->shape, shape, sizeof shape);
    snprintf(text, MIXPI_LEAF_TEXT, "'%.48s' %s %s, values %06x", t->name,
             mixp_dtype_name(t->dtype), shape, (unsigned)(h >> 40));
    *hash = mixpi_hash(h, text, MIXPI_LEAF_TEXT) >> 16;     /* exact as a double */
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
    MIXPI_START_WORDS
};

/* Hash, of 53 bits, of the tensors in the list and their order. */
static uint64_t mixpi_leaves_hash(const mixpi_exchange *d) {
    uint64_t h = 1469598103934665603u;
    int64_t i;
    for (i = 0; i < d->n_leaves; i++) {
        h = mixpi_hash(h, &d->leaves[i].tensor->own.id, sizeof d->leaves[i].tensor->own.id);
        h = (h ^ (uint64_t)(d->leaves[i].last >= 0)) * 1099511628211u;
    }
    return h >> 11;
}

static void mixpi_start_fill(const mixp_context *ctx, const mixpi_exchange *d,
                             double *row) {
    const mixpi_watcher *watcher = mixpi_watcher_of(ctx);
    const mixp_ranks_desc *k = &ctx->ranks;
    row[0] = MIXPREC_VERSION_MAJOR * 1e6 + MIXPREC_VERSION_MINOR * 1e3 +
             MIXPREC_VERSION_PATCH;
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
    row[MIXPI_START_LEAVES] = (double)mixpi_leaves_hash(d);
    row[MIXPI_START_FAR] = (double)(ctx->device->upload != NULL);
}

static const char *mixpi_start_name(int64_t word) {
    static const char *const names[MIXPI_START_ALIKE] = {
        "the version of mixprec", "size", "seed", "seed", "the number of steps", "mean",
        "parts", "low_sums", "apart", "bucket_bytes", "shard", "scatter", "wire", "check_every",
        "the number of gradients", "unused", "the guard", "the guard's every",
        "the guard's clean", "the guard's patience", "the guard's max_sites",
        "the guard's high", "the guard's low_again", "the guard's flushed",
        "the guard's imprecise", "the guard's delay in updates (CPU 0, GPU 1)"
    };
    return names[word];
}

/* Returns the lowest rank whose row differs from rank 0's row in the words [from, to), or 0. *word:
 * the first different word. */
static int mixpi_words_differ(const double *table, int size, int64_t words, int64_t from,
                              int64_t to, int64_t *word) {
    int r;
    for (r = 1; r < size; r++)
        for (*word = from; *word < to; ++*word) {
            double here = table[*word], there = table[r * words + *word];
            if (here < there || here > there) return r;
        }
    return 0;
}

static int mixpi_rows_differ(const double *table, int size, int64_t words, int64_t *word)
{ return mixpi_words_differ(table, size, words, 0, words, word); }

static mixp_result mixpi_start_settings(mixp_context *ctx, mixpi_exchange *d, double *table) {
    const mixp_ranks_desc *k = &ctx->ranks;
    int64_t word;
    mixp_result r;
    int other;
    mixpi_start_fill(ctx, d, table + (int64_t)k->rank * MIXPI_START_WORDS);
    r = mixpi_ranks_share(ctx, table, MIXPI_START_WORDS);
    if (r != MIXP_OK) return r;
    d->unlike = mixpi_words_differ(table, k->size, MIXPI_START_WORDS, MIXPI_START_LEAVES,
                                   MIXPI_START_LEAVES + 1, &word);
    for (d->far = other = 0; other < k->size; other++)
        d->far |= table[other * MIXPI_START_WORDS + MIXPI_START_FAR] > 0.0;
    other = mixpi_words_differ(table, k->size, MIXPI_START_WORDS, 0, MIXPI_START_ALIKE, &word);
    if (!other) return MIXP_OK;
    return mixp_context_fail(ctx, MIXP_ERR_RANKS,
                             "ranks differ: %s is %.15g on rank 0 and %.15g on rank %d",
                             mixpi_start_name(word), table[word],
                             table[other * MIXPI_START_WORDS + word], other);
}

/* What to do about a frozen parameter of which only the values differ: "" for other tensors. here,
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
    const mixp_ranks_desc *k = &ctx->ranks;
    double *row = table + (int64_t)k->rank * MIXPI_LEAF_TEXT;
    char here[MIXPI_LEAF_TEXT], there[MIXPI_LEAF_TEXT];
    uint64_t hash;
    mixp_result r = mixpi_leaf_describe(ctx, t, here, &hash);
    int i;
    for (i = 0; i < MIXPI_LEAF_TEXT; i++) row[i] = (double)here[i];
    if (r == MIXP_OK) r = mixpi_ranks_share(ctx, table, MIXPI_LEAF_TEXT);
    if (r != MIXP_OK) return r;
    for (i = 0; i < MIXPI_LEAF_TEXT; i++) {
        here[i] = (char)mixpi_whole_of(table[i]);
        there[i] = (char)mixpi_whole_of(table[other * MIXPI_LEAF_TEXT + i]);
    }
    here[MIXPI_LEAF_TEXT - 1] = there[MIXPI_LEAF_TEXT - 1] = '\0';
    return mixp_context_fail(ctx, MIXP_ERR_RANKS,
                             "ranks differ: %s %.0f is %.127s on rank 0 and %.127s on rank %d%s",
                             what, (double)at, here, there, other,
                             mixpi_frozen_hint(t, here, there));
}

/* Compares shapes, dtypes, names and values of n tensors. */
static mixp_result mixpi_tables_compare(mixp_context *ctx, const mixp_tensor **all, int64_t n,
                                        const char *what, double *table) {
    const mixp_ranks_desc *k = &ctx->ranks;
    double *row = table + (int64_t)k->rank * n;
    char text[MIXPI_LEAF_TEXT];
    mixp_result r = MIXP_OK;
    int64_t i;
    int other;
    for (i = 0; i < n && r == MIXP_OK; i++) {
        uint64_t hash = 0;
        r = mixpi_leaf_describe(ctx, all[i], text, &hash);
        row[i] = (double)hash;
    }
    if (r == MIXP_OK) r = mixpi_ranks_share(ctx, table, n);
    if (r != MIXP_OK) return r;
    other = mixpi_rows_differ(table, k->size, n, &i);
    if (!other) return MIXP_OK;
    memset(table, 0, (size_t)k->size * MIXPI_LEAF_TEXT * sizeof *table);
    return mixpi_start_tell(ctx, all[i], what, table, i, other);
}

/* Are n tensors the same on all ranks? All pass the same n. Names the first tensor that differs. */
static mixp_result mixpi_tensors_compare(mixp_context *ctx, const mixp_tensor **all, int64_t n,
                                         const char *what) {
    const size_t words = (size_t)n + MIXPI_LEAF_TEXT;
    const size_t bytes = (size_t)ctx->ranks.size * words * sizeof(double);
    double *table = (double *)mixpi_host_take(ctx, bytes);
    mixp_result r;
    if (!table) return mixpi_out_of_memory(ctx, bytes);
    memset(table, 0, bytes);
    r = mixpi_tables_compare(ctx, all, n, what, table);
    mixpi_host_put(ctx, table);
    return r;
}

/* Compares all leaves. */
static mixp_result mixpi_start_leaves(mixp_context *ctx, const mixpi_exchange *d) {
    const mixp_tensor **all;
    mixp_result r;
    int64_t i;
    all = (const mixp_tensor **)mixpi_host_take(ctx, (size_t)d->n_leaves * sizeof *all);
    if (!all) return mixpi_out_of_memory(ctx, (size_t)d->n_leaves * sizeof *all);
    for (i = 0; i < d->n_leaves; i++) all[i] = d->leaves[i].tensor;
    r = mixpi_tensors_compare(ctx, all, d->n_leaves, "gradient");
    mixpi_host_put(ctx, (void *)(uintptr_t)all);
    return r;
}

/* Compares settings, and the number and order of the new leaves, before they get their places. */
static mixp_result mixpi_exchange_start(mixp_context *ctx, mixpi_exchange *d) {
    const size_t bytes = (size_t)ctx->ranks.size * MIXPI_START_WORDS * sizeof(double);
    double *table = (double *)mixpi_host_take(ctx, bytes);
    mixp_result r;
    if (!table) return mixpi_out_of_memory(ctx, bytes);
    memset(table, 0, bytes);
    r = mixpi_start_settings(ctx, d, table);
    mixpi_host_put(ctx, table);
    return r;
}

/* --- what each rank has met --- */

/* In: n bits of this rank, one byte each. Out: the bits set on any rank. */
static mixp_result mixpi_bits_join(mixp_context *ctx, unsigned char *bits, int64_t n) {
    const mixp_ranks_desc *k = &ctx->ranks;
    const int64_t words = mixpi_ceil_div(n, 48);
    const size_t bytes = (size_t)k->size * (size_t)words * sizeof(double);
    double *table = (double *)mixpi_host_take(ctx, bytes);
    mixp_result r;
    int64_t i;
    int rank;
    if (!table) return mixpi_out_of_memory(ctx, bytes);
    memset(table, 0, bytes);
    for (i = 0; i < n; i++)
        if (bits[i]) table[k->rank * words + i / 48] += (double)((uint64_t)1 << (i % 48));
    r = mixpi_ranks_share(ctx, table, words);
    for (rank = 0; rank < k->size && r == MIXP_OK; rank++)
        for (i = 0; i < n; i++)
            if (mixpi_whole_of(table[rank * words + i / 48]) >> (i % 48) & 1) bits[i] = 1;
    mixpi_host_put(ctx, table);
    return r;
}

/* Do the ranks compare, before each walk, which leaves they met? Waits for the device. The answer
 * is the same on all ranks, also if some have a GPU and others do not. */
static int mixpi_walks_agree(const mixp_context *ctx) {
    if (ctx->ranks.size < 2 || ctx->capture.active) return 0;
    return !ctx->exchange->far || ctx->ranks.unused;
}

/* Shares one number of each rank. *alike: all are equal. *any: at least one is above 0. */
static mixp_result mixpi_number_share(mixp_context *ctx, double x, int *alike, int *any) {
    const mixp_ranks_desc *k = &ctx->ranks;
    double *table = ctx->exchange->numbers;
    mixp_result r;
    int64_t word;
    int rank;
    memset(table, 0, (size_t)k->size * sizeof *table);
    table[k->rank] = x;
    r = mixpi_ranks_share(ctx, table, 1);
    *alike = r == MIXP_OK && !mixpi_rows_differ(table, k->size, 1, &word);
    for (*any = 0, rank = 0; rank < k->size; rank++) *any |= table[rank] > 0.0;
    return r;
}

/* Removes new leaves, from number `from` on, that no rank has met: another walk will meet them. */
static mixp_result mixpi_absent_drop(mixp_context *ctx, mixpi_exchange *d, int64_t from) {
    const int64_t n = d->n_leaves - from;
    unsigned char *met = (unsigned char *)mixpi_host_take(ctx, (size_t)n);
    mixp_result r = MIXP_OK;
    int64_t i;
    if (!met) return mixpi_out_of_memory(ctx, (size_t)n);
    for (i = 0; i < n; i++) met[i] = d->leaves[from + i].last >= 0;
    if (d->unlike) r = mixpi_bits_join(ctx, met, n);
    for (i = 0, d->n_leaves = from; i < n; i++) {
        if (met[i]) d->leaves[d->n_leaves++] = d->leaves[from + i];
        else d->leaves[from + i].tensor->own.ranks.leaf = 0;
    }
    mixpi_host_put(ctx, met);
    return r;
}

/* Appends all parameters of optimizers that this rank has not met to the list. */
static void mixpi_absent_add(mixp_context *ctx, mixpi_exchange *d) {
    mixp_tensor *t;
    for (t = ctx->tensors; t; t = t->own.next)
        if (mixpi_is_absent(t)) mixpi_leaf_add(d, t);
}

/* Agrees on the new leaves, from number `from` on. If the ranks met different leaves, or in
 * different orders, the leaves are sorted by the order in which they were made. */
static mixp_result mixpi_newcomers_agree(mixp_context *ctx, mixpi_exchange *d, int64_t from) {
    mixp_result r;
    mixpi_absent_add(ctx, d);
    qsort(d->leaves + from, (size_t)(d->n_leaves - from), sizeof *d->leaves, mixpi_leaf_order);
    r = mixpi_exchange_start(ctx, d);
    if (r == MIXP_OK && d->unlike)
        qsort(d->leaves + from, (size_t)(d->n_leaves - from), sizeof *d->leaves,
              mixpi_leaf_order_made);
    if (r == MIXP_OK && d->n_leaves > from) r = mixpi_absent_drop(ctx, d, from);
    return r;
}

/* Every bucket that any rank's walk has met is due on all ranks. The ranks exchange their lists
 * only if the lists differ. */
static mixp_result mixpi_due_agree(mixp_context *ctx, mixpi_exchange *d) {
    uint64_t h = 1469598103934665603u;
    unsigned char *due;
    mixp_result r;
    int64_t i;
    int alike, any;
    if (d->hold || !mixpi_walks_agree(ctx)) return MIXP_OK;
    for (i = 0; i < d->n_buckets; i++)
        h = (h ^ (uint64_t)d->buckets[i].due) * 1099511628211u;
    r = mixpi_number_share(ctx, (double)(h >> 11), &alike, &any);
    if (r != MIXP_OK || alike) return r;
    due = (unsigned char *)mixpi_host_take(ctx, (size_t)d->n_buckets);
    if (!due) return mixpi_out_of_memory(ctx, (size_t)d->n_buckets);
    for (i = 0; i < d->n_buckets; i++) due[i] = d->buckets[i].due != 0;
    r = mixpi_bits_join(ctx, due, d->n_buckets);
    for (i = 0; i < d->n_buckets; i++) d->buckets[i].due = due[i];
    mixpi_host_put(ctx, due);
    return r;
}

/* --- a walk --- */

/* Fails if a walk would add to a gradient that was already summed. */
static mixp_result mixpi_exchange_fresh(mixp_context *ctx, mixpi_exchange *d) {
    int64_t i;
    for (i = 0; i < d->n_leaves; i++) {
        mixpi_leaf *l = &d->leaves[i];
        if (!l->tensor->grad) l->summed = 0;
        if (!l->tensor->grad) l->tensor->own.grad->own.ranks.in_pieces = 0;
        if (!l->summed || !d->buckets[l->bucket].due) continue;
        return mixp_context_fail(ctx, MIXP_ERR_ORDER,
                                 "mixp_backward: the gradient of '%s' was summed over the ranks "
                                 "already; call mixp_zero_grad first, and mixp_ranks_hold(ctx, 1) "
                                 "before all walks of a batch but the last",
                                 l->tensor->name);
    }
    return MIXP_OK;
}

/* Makes room for the leaves of the tape that are not known yet. */
static mixp_result mixpi_exchange_room(mixp_context *ctx, mixpi_exchange *d) {
    const int64_t missing = mixpi_leaves_missing(ctx) + mixpi_absent_count(ctx);
    mixpi_leaf *leaves;
    if (!missing) return MIXP_OK;
    leaves = (mixpi_leaf *)mixpi_longer(ctx, d->leaves, d->n_leaves, d->n_leaves + missing,
                                        sizeof *leaves);
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
    const int many = ctx->ranks.size > 1;
    mixp_result r = many ? mixpi_newcomers_agree(ctx, d, from) : MIXP_OK;
    if (r != MIXP_OK || d->n_leaves == from) return r;
    r = mixpi_exchange_lay_out(ctx, d, from);
    return r == MIXP_OK && many ? mixpi_start_leaves(ctx, d) : r;
}

/* Finds the leaves of the tape and places the new leaves. After a failure no new leaf stays known,
 * so the next walk meets them again. */
static mixp_result mixpi_exchange_meet(mixp_context *ctx, mixpi_exchange *d) {
    const int64_t old = d->n_leaves, old_buckets = d->n_buckets;
    mixp_result r = mixpi_exchange_room(ctx, d);
    int64_t i;
    int any = 0;
    if (r != MIXP_OK) return r;
    for (i = 0; i < old; i++) d->leaves[i].last = -1;
    mixpi_leaves_meet(ctx, d);
    r = mixpi_newcomers_any(ctx, d->n_leaves > old, &any);
    if (r == MIXP_OK && any) r = mixpi_newcomers_place(ctx, d, old);
    if (r == MIXP_OK) return MIXP_OK;
    while (d->n_leaves > old) d->leaves[--d->n_leaves].tensor->own.ranks.leaf = 0;
    d->n_buckets = old_buckets;
    return r;
}

/* Before a walk: places the new leaves, and counts the leaves that each bucket awaits. */
MIXPI_SELDOM
static mixp_result mixpi_exchange_begin(mixp_context *ctx) {
    mixpi_exchange *d;
    int64_t i;
    mixp_result r;
    d = mixpi_exchange_of(ctx);
    if (!d) return MIXP_ERR_MEMORY;
    r = mixpi_exchange_meet(ctx, d);
    if (r != MIXP_OK) return r;
    d->position = d->sent = 0;
    for (i = 0; i < d->n_buckets; i++) {
        mixpi_bucket *b = &d->buckets[i];
        b->awaited = 0;
        b->flying = b->landed = 0;
    }
    for (i = 0; i < d->n_leaves; i++) {
        mixpi_bucket *b = &d->buckets[d->leaves[i].bucket];
        b->awaited += d->leaves[i].last >= 0;
        b->due |= d->leaves[i].last >= 0;
    }
    r = mixpi_due_agree(ctx, d);
    return r == MIXP_OK ? mixpi_exchange_fresh(ctx, d) : r;
}

/* data *= 1/parts; n elements. */
static mixp_result mixpi_divide_by_parts(mixp_context *ctx, mixp_out data, int64_t n) {
    mixp_unary_args k;
    memset(&k, 0, sizeof k);
    k.op = MIXP_UNARY_SCALE;
    k.p = mixp_scaler_inverse((float)ctx->ranks.parts);
    k.n = n;
    k.a = mixpi_in(data.data, data.dtype);
    k.y = data;
    return ctx->device->kernels->unary(&ctx->exec, &k);
}

/* Waits until everything that grad_ready started has arrived. */
static MIXPI_APART mixp_result mixpi_ranks_await(mixp_context *ctx) {
    const mixp_ranks_desc *k = &ctx->ranks;
    volatile char here = 0;
    const int before = mixpi_inside_begin(ctx, MIXPI_FRAME(&here));
    const char *why = k->grad_wait(k->user, ctx->exec.stream, k->seconds);
    mixpi_inside_end(ctx, before);
    return mixpi_ranks_heard(ctx, "the wait for gradients", why);
}

/* After the sum of b has arrived: converts and divides what was deferred. Of a divided gradient,
 * keeps this rank's piece; its buffer then holds nothing. */
static mixp_result mixpi_bucket_land(mixp_context *ctx, const mixpi_exchange *d, mixpi_bucket *b) {
    const mixp_ranks_desc *k = &ctx->ranks;
    const int64_t n = b->each ? b->each : b->count;
    const mixp_out sum = mixpi_out_at(b->wire, b->each * k->rank);
    const mixp_out to =
        b->each ? mixpi_out_to(d->leaves[b->first].piece, b->grads.dtype, 0) : b->grads;
    const uint64_t told = ctx->errors.reported;
    const int divide = k->mean == MIXP_MEAN_AFTER && k->parts > 1, wide = to.dtype == MIXP_F32;
    mixp_result r = MIXP_OK;
    if (divide && !wide) r = mixpi_divide_by_parts(ctx, sum, n);
    if (r == MIXP_OK && sum.data != to.data)
        r = mixpi_convert_to(ctx, to, mixpi_in(sum.data, sum.dtype), n);
    if (r == MIXP_OK && divide && wide) r = mixpi_divide_by_parts(ctx, to, n);
    b->flying = 0;
    b->landed = 1;
    return mixpi_noted_since(ctx, told, "a mean over ranks", r);
}

/* --- buffers of divided gradients --- */

/* May another gradient use w? */
static int mixpi_buffer_is_free(const mixpi_exchange *d, const mixpi_buffer *w) {
    const mixpi_bucket *b = &d->buckets[w->bucket];
    const mixpi_leaf *l = &d->leaves[b->first];
    if (b->buffer != w || b->landed) return 1;
    return !b->flying && (l->summed || !l->tensor->grad);
}

/* The buffer for b: the buffer that b had before, otherwise the smallest free buffer of at least
 * `bytes`. NULL if no buffer is free. */
static mixpi_buffer *mixpi_buffer_find(const mixpi_exchange *d, const mixpi_bucket *b,
                                       size_t bytes) {
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
    int64_t i;
    for (i = 0; i < d->n_buckets; i++)
        if (d->buckets[i].flying) bytes += d->buckets[i].buffer->bytes;
    return bytes;
}

/* Waits for all sums in flight, and keeps this rank's pieces: their buffers become free. */
static mixp_result mixpi_buffers_land(mixp_context *ctx, mixpi_exchange *d) {
    mixp_result r = ctx->ranks.scatter_ready ? mixpi_ranks_await(ctx) : MIXP_OK;
    int64_t i;
    for (i = 0; i < d->n_buckets && r == MIXP_OK; i++)
        if (d->buckets[i].flying) r = mixpi_bucket_land(ctx, d, &d->buckets[i]);
    return r;
}

/* Puts the gradient of b into w. After the first steps no address changes any more. */
static mixp_result mixpi_buffer_enter(mixp_context *ctx, mixpi_exchange *d, mixpi_bucket *b,
                                      mixpi_buffer *w) {
    const mixpi_leaf *l = &d->leaves[b->first];
    const int staged = mixpi_stage_bytes(ctx, b) > 0;
    char *stage = w->data + mixpi_round_up(mixpi_leaf_bytes(ctx, l));
    mixp_param_row row;
    w->bucket = b - d->buckets;
    if (b->buffer == w) return MIXP_OK;
    b->buffer = w;
    b->grads = mixpi_out_to(w->data, b->grads.dtype, 0);
    b->wire = staged ? mixpi_out_to(stage, ctx->ranks.wire, 0) : b->grads;
    l->tensor->own.grad->data = w->data;
    mixpi_leaf_row(l, &row);
    return mixpi_upload(ctx, d->rows + b->first, &row, sizeof row);
}

/* Gives the divided gradient of b a buffer. At most 2 * bucket_bytes, or one buffer, are in flight:
 * to stay within this limit, the rank waits for the sums. Without scatter_ready each sum has
 * arrived when its hook returns. */
static mixp_result mixpi_buffer_open(mixp_context *ctx, mixpi_exchange *d, mixpi_bucket *b) {
    const size_t most = ctx->ranks.scatter_ready ? 2 * (size_t)ctx->ranks.bucket_bytes : 0;
    const size_t bytes = mixpi_round_up(mixpi_leaf_bytes(ctx, &d->leaves[b->first])) +
                         mixpi_round_up(mixpi_stage_bytes(ctx, b));
    mixpi_buffer *w = mixpi_buffer_find(d, b, bytes);
    if (!w && mixpi_buffers_flying(d) + bytes > most) {
        const mixp_result r = mixpi_buffers_land(ctx, d);
        if (r != MIXP_OK) return r;
        w = mixpi_buffer_find(d, b, bytes);
    }
    if (!w) w = mixpi_buffer_new(ctx, d, bytes);
    return w ? mixpi_buffer_enter(ctx, d, b, w) : MIXP_ERR_MEMORY;
}

/* Before a walk writes the first gradient of leaf t. */
static mixp_result mixpi_exchange_opens(mixp_context *ctx, const mixp_tensor *t) {
    mixpi_exchange *d = ctx->exchange;
    mixpi_bucket *b;
    if (!d || !t->own.ranks.leaf) return MIXP_OK;
    b = &d->buckets[d->leaves[t->own.ranks.leaf - 1].bucket];
    return b->each ? mixpi_buffer_open(ctx, d, b) : MIXP_OK;
}

/* Looks at a bucket's gradients on this rank. divide: also divides them, like
 * mixpi_divide_by_parts, in the same pass. */
static mixp_result mixpi_bucket_look(mixp_context *ctx, const mixpi_exchange *d,
                                     const mixpi_bucket *b, int divide) {
    mixp_grad_stats_args k;
    memset(&k, 0, sizeof k);
    k.rows = d->rows + b->first;
    k.count = b->end - b->first;
    k.scale = divide ? d->parts : NULL;
    k.unscale = divide;
    k.step = d->looks + (b - d->buckets);
    return ctx->device->kernels->grad_stats(&ctx->exec, &k);
}

/* The mark of any gradient of this walk. A gradient that this rank left out is 0 with this mark. */
static mixpi_mark mixpi_some_mark(const mixpi_exchange *d) {
    mixpi_mark none;
    int64_t i;
    memset(&none, 0, sizeof none);
    for (i = 0; i < d->n_leaves; i++) {
        const mixp_tensor *t = d->leaves[i].tensor;
        if (t->grad && !d->leaves[i].summed && !d->leaves[i].filled) return t->grad->own.mark;
    }
    return none;
}

/* Fills leaves without a gradient with zeros, because other ranks may have one. No rank has a
 * gradient for a frozen leaf: its zeros are sent, and no optimizer sees them. */
static mixp_result mixpi_bucket_fill(mixp_context *ctx, mixpi_exchange *d, mixpi_bucket *b) {
    mixp_result r = MIXP_OK;
    int64_t i;
    for (i = b->first; i < b->end && r == MIXP_OK; i++) {
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

/* Gives the gradients that this rank left out of the walk the mark of the others. */
static void mixpi_filled_mark(mixpi_exchange *d, mixpi_mark mark) {
    int64_t i;
    for (i = 0; i < d->n_leaves; i++) {
        if (d->leaves[i].filled) d->leaves[i].tensor->own.grad->own.mark = mark;
        d->leaves[i].filled = 0;
    }
}

/* Puts the bucket's gradients of this walk into b->wire; divides them if division comes first. */
static mixp_result mixpi_bucket_part(mixp_context *ctx, mixpi_exchange *d,
                                     mixpi_bucket *b) {
    mixp_result r = mixpi_bucket_fill(ctx, d, b);       /* may give b another buffer */
    const int staged = b->wire.data != b->grads.data;
    const int divide = ctx->ranks.mean == MIXP_MEAN_BEFORE && ctx->ranks.parts > 1;
    const int divide_now = divide && (!staged || b->grads.dtype == MIXP_F32);
    if (r == MIXP_OK) r = mixpi_bucket_look(ctx, d, b, divide_now);
    if (!staged || r != MIXP_OK) return r;
    r = mixpi_convert_to(ctx, b->wire, mixpi_in(b->grads.data, b->grads.dtype), b->count);
    if (r != MIXP_OK || !divide || divide_now) return r;
    return mixpi_divide_by_parts(ctx, b->wire, b->count);
}

/* Sums the bucket over the ranks: all of it for all ranks, or each piece for its owner. */
static mixp_result mixpi_bucket_sum(mixp_context *ctx, mixpi_bucket *b) {
    const mixp_ranks_desc *k = &ctx->ranks;
    b->flying = b->each > 0;
    if (b->each)
        return mixpi_ranks_run(ctx, "the scattered sum of a gradient",
                               k->scatter_ready ? k->scatter_ready : k->reduce_scatter,
                               b->wire, b->each);
    return mixpi_ranks_run(ctx, "the sum of gradients",
                           k->grad_ready ? k->grad_ready : k->sum, b->wire, b->count);
}

/* Sends a bucket whose gradients are final. */
static mixp_result mixpi_bucket_send(mixp_context *ctx, mixpi_exchange *d,
                                     mixpi_bucket *b) {
    const uint64_t told = ctx->errors.reported;
    mixp_result r = mixpi_bucket_part(ctx, d, b);
    mixp_out sum = b->wire;
    sum.accumulate = 1;
    if (r == MIXP_OK && b->holds)
        r = mixpi_add_into(ctx, sum, mixpi_in(b->held, MIXP_F32), b->count);
    if (r != MIXP_OK) return mixpi_noted_since(ctx, told, "a sum over ranks", r);
    return mixpi_bucket_sum(ctx, b);
}

/* Sends final buckets, in order. all: sends the others as well, because the walk has ended. */
static mixp_result mixpi_buckets_send(mixp_context *ctx, mixpi_exchange *d, int all) {
    mixp_result r = MIXP_OK;
    while (r == MIXP_OK && d->sent < d->n_buckets &&
           (all || !d->buckets[d->sent].awaited)) {
        mixpi_bucket *b = &d->buckets[d->sent++];
        if (b->due) r = mixpi_bucket_send(ctx, d, b);
    }
    return r;
}

/* Called after a tape entry was walked or passed over. */
static mixp_result mixpi_exchange_walked(mixp_context *ctx, const mixp_call *c) {
    mixpi_exchange *d = ctx->exchange;
    int i;
    if (!d) return MIXP_OK;
    for (i = 0; i < c->n_in; i++) {
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
static mixp_result mixpi_bucket_hold(mixp_context *ctx, mixpi_exchange *d,
                                     mixpi_bucket *b, mixpi_mark mark) {
    const size_t bytes = (size_t)b->count * sizeof(float);
    mixp_result r = mixpi_bucket_part(ctx, d, b);
    int64_t i;
    if (!b->held) b->held = mixpi_device_alloc(ctx, bytes);
    if (!b->held) return MIXP_ERR_MEMORY;
    mixpi_filled_mark(d, mark);
    if (r == MIXP_OK)
        r = mixpi_add_into(ctx, mixpi_out_to(b->held, MIXP_F32, b->holds),
                           mixpi_in(b->wire.data, b->wire.dtype), b->count);
    for (i = b->first; i < b->end; i++) {
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
    int64_t i;
    for (i = b->first; i < b->end; i++) {
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
    const mixp_ranks_desc *k = &ctx->ranks;
    mixpi_exchange *d = ctx->exchange;
    mixpi_mark mark;
    mixp_result r;
    int64_t i;
    if (!d) return MIXP_OK;
    r = d->hold ? MIXP_OK : mixpi_buckets_send(ctx, d, 1);
    if (r == MIXP_OK && !d->hold && k->grad_wait && k->size > 1) r = mixpi_ranks_await(ctx);
    mark = mixpi_some_mark(d);          /* before the loop, which drops the gradients it holds */
    mixpi_filled_mark(d, mark);
    for (i = 0; i < d->n_buckets && r == MIXP_OK; i++) {
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
    int64_t i;
    for (i = 0; d && i < d->n_leaves; i++) mixpi_mark_lose(&d->leaves[i].mark, by);
}

