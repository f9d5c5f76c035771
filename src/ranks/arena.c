#pragma once
#include "exchange.c"
/* --- where the gradients lie --- */

/* The leaf that receives input i's gradient, or NULL. */
static mixp_tensor *mixpi_leaf_of(const mixp_call *c, int i) {
    mixp_tensor *t = mixpi_grad_owner(c, i);
    int is_leaf = mixp_call_wants(c, i) && !t->own.from_tape && !t->own.generation;
    return is_leaf ? t : NULL;
}

/* Uses, on the tape, of leaves without a place in the arena: at least as many as such leaves. */
static int64_t mixpi_leaves_missing(const mixp_context *ctx) {
    int64_t n = 0;
    for (const mixpi_tape_entry *e = ctx->tape.newest; e; e = e->older)
        for (int i = 0; i < e->call.n_in; i++) {
            const mixp_tensor *t = mixpi_leaf_of(&e->call, i);
            n += t && !t->own.ranks.leaf;
        }
    return n;
}

/* Could a walk of another rank reach t, although no walk of this rank has? */
static int mixpi_is_absent(const mixp_tensor *t) {
    return t->own.optimizers > 0 && t->requires_grad && !t->own.ranks.leaf && !t->own.from_tape;
}

static int64_t mixpi_absent_count(const mixp_context *ctx) {
    int64_t n = 0;
    for (const mixp_tensor *t = ctx->tensors; t; t = t->own.next) n += mixpi_is_absent(t);
    return n;
}

/* Allocates an array of n elements that starts with the old content. Returns NULL if out of memory.
 * The context keeps the old memory. */
static void *mixpi_longer(
    mixp_context *ctx, const void *old, int64_t used, int64_t n, size_t size) {
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
    int64_t position = 0;
    for (const mixpi_tape_entry *e = ctx->tape.newest; e; e = e->older, position++)
        for (int i = 0; i < e->call.n_in; i++) {
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

/* Order by kind, then latest first. Used if ranks have met the leaves in different orders: the
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
static size_t mixpi_leaf_arena_bytes(const mixp_context *ctx, const mixpi_leaf *l) {
    if (!l->each) return mixpi_leaf_bytes(ctx, l);
    return mixpi_round_up((size_t)l->each * mixp_dtype_size(mixpi_grad_dtype(l->tensor)));
}

/* Elements of a rank's piece; 0 for a small tensor: its own message would cost more than it
 * saves. */
static int64_t mixpi_leaf_each(const mixp_context *ctx, const mixp_tensor *t) {
    const size_t least = (size_t)ctx->ranks->bucket_bytes / 100;
    if (!mixpi_is_scattered(ctx) || !t->own.ranks.divided || mixpi_bytes(t) < least) return 0;
    return mixpi_piece_size(ctx, t->count);
}

/* Does leaf l begin a new bucket? bytes: size of the current bucket. */
static int mixpi_bucket_begins(const mixp_context *ctx, const mixpi_leaf *l, size_t bytes) {
    return !bytes || bytes >= (size_t)ctx->ranks->bucket_bytes || l->each || l[-1].each ||
           mixpi_grad_dtype(l[-1].tensor) != mixpi_grad_dtype(l->tensor);
}

/* Divides the leaves from number `from` on into buckets. */
static void mixpi_buckets_cut(mixp_context *ctx, mixpi_exchange *d, int64_t from, char *arena) {
    mixpi_bucket *b = NULL;
    size_t bytes = 0;
    for (int64_t i = from; i < d->n_leaves; i++) {
        mixpi_leaf *l = &d->leaves[i];
        const mixp_tensor *t = l->tensor;

        /* The leaf begins a bucket, or follows the leaf before it. */
        if (mixpi_bucket_begins(ctx, l, bytes)) {
            b = &d->buckets[d->n_buckets++];
            b->first = i;
            b->each = l->each;
            b->grads = mixpi_out_to(l->each ? NULL : arena, mixpi_grad_dtype(t), 0);
            b->wire = b->grads;
            bytes = 0;
        }

        /* The gradient's place; the next leaf follows it. */
        t->own.grad->data = l->each ? NULL : arena;
        l->piece = l->each ? arena : NULL;
        l->bucket = d->n_buckets - 1;
        arena += mixpi_leaf_arena_bytes(ctx, l);
        bytes += mixpi_leaf_bytes(ctx, l);
        b->end = i + 1;
        b->count = (int64_t)(bytes / mixp_dtype_size(mixpi_grad_dtype(t)));
    }
}

/* Sorts the buckets into the order in which they complete. Only with scattered sums does this order
 * differ from the order in the arena. */
static void mixpi_buckets_order(mixpi_exchange *d, int64_t from) {
    int64_t k;
    for (int64_t i = from + 1; i < d->n_buckets; i++) {
        const mixpi_bucket moved = d->buckets[i];
        const int64_t last = d->leaves[moved.end - 1].last;
        for (k = i; k > from && d->leaves[d->buckets[k - 1].end - 1].last > last; k--)
            d->buckets[k] = d->buckets[k - 1];
        d->buckets[k] = moved;
    }
    for (int64_t i = from; i < d->n_buckets; i++)
        for (k = d->buckets[i].first; k < d->buckets[i].end; k++) d->leaves[k].bucket = i;
}

/* Bytes for the sum of b if its dtype differs from the gradients' dtype; otherwise 0. */
static size_t mixpi_stage_bytes(const mixp_context *ctx, const mixpi_bucket *b) {
    const mixp_ranks_desc *k = ctx->ranks;
    const int is_low = b->grads.dtype != MIXP_F32;
    if (b->grads.dtype == k->wire || (is_low && k->low_sums)) return 0;
    if (k->size == 1 && !k->apart) return 0;
    return (size_t)b->count * mixp_dtype_size(k->wire);
}

/* Allocates memory for the sum of b, where b needs some. Of a divided gradient it lies in the
 * gradient's buffer. */
static mixp_result mixpi_bucket_stage(mixp_context *ctx, mixpi_bucket *b) {
    const size_t bytes = b->each ? 0 : mixpi_stage_bytes(ctx, b);
    if (!bytes) return MIXP_OK;
    void *stage = mixpi_device_alloc(ctx, bytes);
    b->wire = mixpi_out_to(stage, ctx->ranks->wire, 0);
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
    mixp_result r = MIXP_ERR_MEMORY;
    if (!rows) return mixpi_out_of_memory(ctx, rows_size + first_size);

    /* The tables are made in host memory and sent. */
    for (i = 0; i < d->n_leaves; i++) mixpi_leaf_row(&d->leaves[i], &rows[i]);
    for (i = 0; i < d->n_buckets; i++) first[i] = d->buckets[i].first;
    new_rows = (mixp_param_row *)mixpi_device_alloc(ctx, rows_size);
    new_first = (int64_t *)mixpi_device_alloc(ctx, first_size);
    mixp_step_state *looks =
        (mixp_step_state *)mixpi_device_alloc(ctx, (size_t)d->n_buckets * sizeof *looks);
    if (new_rows && new_first && looks) r = mixpi_upload(ctx, new_rows, rows, rows_size);
    if (r == MIXP_OK) r = mixpi_upload(ctx, new_first, first, first_size);
    mixpi_host_free(ctx, rows);
    if (r != MIXP_OK) return r;

    d->rows = new_rows;
    d->first = new_first;
    d->looks = looks;
    return MIXP_OK;
}

/* Places the new leaves, from number `from` on, in the arena. */
static mixp_result mixpi_exchange_lay_out(mixp_context *ctx, mixpi_exchange *d, int64_t from) {
    int64_t i, new_leaves = d->n_leaves - from, old_buckets = d->n_buckets;
    mixp_result r = MIXP_OK;
    size_t bytes = 0;
    for (i = from; i < d->n_leaves; i++)
        d->leaves[i].each = mixpi_leaf_each(ctx, d->leaves[i].tensor);

    /* The order of the arena. */
    qsort(d->leaves + from, (size_t)new_leaves, sizeof *d->leaves,
        d->unlike ? mixpi_leaf_order_made : mixpi_leaf_order);
    for (i = from; i < d->n_leaves; i++) {
        mixpi_leaf *l = &d->leaves[i];
        l->tensor->own.ranks.leaf = i + 1;
        if (!mixpi_grad_record(l->tensor)) return MIXP_ERR_MEMORY;
        bytes += mixpi_leaf_arena_bytes(ctx, l);
    }

    /* All memory comes before the first change. */
    char *arena = (char *)mixpi_device_alloc(ctx, bytes);
    mixpi_bucket *buckets = (mixpi_bucket *)mixpi_longer(
        ctx, d->buckets, old_buckets, old_buckets + new_leaves, sizeof *buckets);
    if (!arena || !buckets) return MIXP_ERR_MEMORY;

    d->buckets = buckets;
    mixpi_buckets_cut(ctx, d, from, arena);
    if (mixpi_is_scattered(ctx) && !d->unlike) mixpi_buckets_order(d, old_buckets);
    for (i = old_buckets; i < d->n_buckets && r == MIXP_OK; i++)
        r = mixpi_bucket_stage(ctx, &d->buckets[i]);
    return r == MIXP_OK ? mixpi_exchange_tables(ctx, d) : r;
}
