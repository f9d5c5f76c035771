#pragma once
#include "walk.c"
/* --- blocks that are computed again --------------------------------------------------------- *
 *
 * mixp_recompute frees the results of a block's operators after forward. When a walk reaches the
 * block, each recorded operator runs its forward again, oldest first, with the same kernels, inputs
 * and keys of random numbers, so the results are bit-identical. A block under MIXP_NO_GRAD records
 * nothing: the context keeps a list of its calls until the block ends.
 */
struct mixpi_rerun {
    mixpi_tape_entry **entries; /* entries of the block, oldest first                      */
    int64_t            count;
    unsigned char     *attrs;   /* attributes of the calls as forward began, one after another */
    const mixp_tensor *kept;    /* the tensor whose memory holds the block's result        */
    int                live;    /* 1: the results are in memory                            */
};

/* Does the result of e stay in memory? */
static int mixpi_rerun_keeps(const mixpi_rerun *b, const mixpi_tape_entry *e) {
    const mixp_tensor *origin = mixpi_origin(e->call.out);
    return origin == b->kept || origin->own.aliased;
}

static void mixpi_rerun_free(mixp_tensor *t) {
    if (!t || !t->data || t->own.spent) return;
    mixpi_arena_free(t->ctx, &t->ctx->memory.dev, t->data, mixpi_bytes(t));
    t->data = NULL;
}

/* Frees what the call e saved, and its result. */
static void mixpi_entry_spill(mixpi_tape_entry *e) {
    for (int k = 0; k < MIXP_MAX_SAVED; k++) mixpi_rerun_free(e->call.saved[k]);
    if (!e->alias) mixpi_rerun_free(e->call.out);
    e->call.out->data = NULL;
    e->call.out->own.spilled = 1;
}

static void mixpi_rerun_spill(mixpi_rerun *b) {
    for (int64_t i = 0; i < b->count; i++)
        if (!mixpi_rerun_keeps(b, b->entries[i])) mixpi_entry_spill(b->entries[i]);
    b->live = 0;
}

/* Frees what the calls of a block under MIXP_NO_GRAD made, except y's memory. */
static void mixpi_unrecorded_spill(mixp_context *ctx, mixp_tensor *y) {
    const mixp_tensor *kept = mixpi_origin(y);
    for (mixpi_tape_entry *e = ctx->tape.unrecorded; e; e = e->older) {
        int keeps = mixpi_origin(e->call.out) == kept;
        for (int k = 0; k < MIXP_MAX_SAVED; k++) keeps |= e->call.saved[k] == kept;
        if (!keeps) mixpi_entry_spill(e);
    }
    ctx->tape.unrecorded = NULL;
}

/* Allocates memory for a call's result and for what it saves. The result of the block still has
 * both, unless a later operator has freed it or let its gradient overwrite it. A reshape has the
 * memory of its input. */
static mixp_result mixpi_rerun_memory(mixpi_tape_entry *e) {
    mixp_call *c = &e->call;
    if (!e->alias && mixpi_rerun_keeps(e->block, e) && !c->out->own.spent) return MIXP_OK;
    c->out->data = e->alias ? c->in[0]->data : mixpi_data_alloc(c->out);
    if (!c->out->data) return MIXP_ERR_MEMORY;
    for (int k = 0; k < MIXP_MAX_SAVED; k++) {
        if (!c->saved[k] || c->saved[k]->data) continue;
        c->saved[k]->data = mixpi_data_alloc(c->saved[k]);
        if (!c->saved[k]->data) return MIXP_ERR_MEMORY;
    }
    return MIXP_OK;
}

/* Runs the forward of a call again, also that of the block's result, because attrs may hold the
 * addresses of its inputs. An operator tells forward from backward by the gradient of its
 * result, which an earlier walk may have kept. */
static mixp_result mixpi_rerun_run(mixpi_tape_entry *e) {
    mixp_call *c = &e->call;
    mixp_tensor *grad = c->out->grad;
    mixp_result r = MIXP_OK;
    for (int i = 0; i <= c->n_in && r == MIXP_OK; i++) {
        mixp_tensor *t = mixpi_call_tensor(c, i);
        if (t && mixpi_origin(t)->version != e->versions[i])
            r = mixpi_report_written(c, i, "mixp_backward");
    }
    if (r == MIXP_OK) r = mixpi_rerun_memory(e);
    if (r != MIXP_OK) return r;
    c->out->grad = NULL;
    e->again = 1;
    r = mixpi_run_inside(c, c->op->forward);
    e->again = 0;
    c->out->grad = grad;
    return r;
}

/* Runs the forward of a block again. A backward may have changed attrs: forward begins with those
 * that its first run left. */
static mixp_result mixpi_rerun_restore(mixpi_rerun *b) {
    mixp_context *ctx = b->entries[0]->call.ctx;
    const unsigned char *attrs = b->attrs;
    const int no_grad = mixpi_no_grad_set(ctx, 0);
    mixp_result r = MIXP_OK;
    for (int64_t i = 0; i < b->count && r == MIXP_OK; i++) {
        mixp_call *c = &b->entries[i]->call;
        if (c->op->attrs_size) memcpy(c->attrs, attrs, c->op->attrs_size);
        attrs += c->op->attrs_size;
        r = mixpi_rerun_run(b->entries[i]);
    }
    mixpi_no_grad_set(ctx, no_grad);
    b->live = r == MIXP_OK;
    return r;
}

/* Does e, or a tensor that it reads, no longer own its memory? */
static int mixpi_entry_is_spent(const mixpi_tape_entry *e) {
    for (int i = 0; i < e->call.n_in; i++)
        if (e->call.in[i] && e->call.in[i]->own.spent) return 1;
    return e->call.out->own.spent;
}

/* Keeps the attrs of all calls of b. 0: out of memory. */
static int mixpi_rerun_keep_attrs(mixpi_rerun *b) {
    size_t size = 0;
    for (int64_t i = 0; i < b->count; i++) size += b->entries[i]->call.op->attrs_size;
    b->attrs = (unsigned char *)mixpi_step_alloc(b->entries[0]->call.ctx, size + 1);
    if (!b->attrs) return 0;
    size = 0;
    for (int64_t i = 0; i < b->count; i++) {
        const mixp_call *c = &b->entries[i]->call;
        if (c->op->attrs_size) memcpy(b->attrs + size, c->attrs, c->op->attrs_size);
        size += c->op->attrs_size;
    }
    return 1;
}

/* The entries recorded since `before`; NULL: none, or one of them cannot run again, or out of
 * memory. */
static mixpi_rerun *mixpi_rerun_since(mixp_context *ctx, const mixpi_tape_entry *before) {
    mixpi_tape_entry *e;
    int64_t n = 0;
    for (e = ctx->tape.newest; e != before; e = e->older) {
        if (mixpi_entry_is_spent(e)) return NULL;
        n++;
    }
    if (!n) return NULL;
    mixpi_rerun *b = (mixpi_rerun *)mixpi_step_alloc(ctx, sizeof *b);
    if (b) b->entries = (mixpi_tape_entry **)mixpi_step_alloc(ctx, (size_t)n * sizeof e);
    if (!b || !b->entries) return NULL;
    b->count = n;
    for (e = ctx->tape.newest; e != before; e = e->older) b->entries[--n] = e;
    return mixpi_rerun_keep_attrs(b) ? b : NULL;
}

static mixp_tensor *mixpi_recompute(
    mixp_context *ctx, mixp_block_fn fn, void *user, mixp_tensor *x) {
    mixpi_tape_entry *before = ctx->tape.newest;
    const uint64_t generation = ctx->generation;
    const int plain = ctx->tape.in_block || (mixpi_watched(ctx) & MIXPI_TRIAL);
    const int no_grad = mixpi_is_no_grad(ctx);
    if (plain) return fn(ctx, x, user);

    /* The block runs once, as it will again. */
    ctx->tape.in_block = no_grad ? MIXPI_BLOCK_NO_GRAD : MIXPI_BLOCK_RECORDED;
    ctx->tape.unrecorded = NULL;
    mixp_tensor *y = fn(ctx, x, user);
    ctx->tape.in_block = MIXPI_BLOCK_NONE;
    if (ctx->generation != generation)
        mixp_context_fail(ctx, MIXP_ERR_ORDER,
            "mixp_recompute: the block called mixp_step_begin; call mixp_step_begin between steps "
            "only");

    if (!y || ctx->generation != generation) return NULL;
    if (!mixpi_is_live(y)) return y;
    if (no_grad) mixpi_unrecorded_spill(ctx, y);

    /* Free its activations; keep its result. */
    mixpi_rerun *b = mixpi_rerun_since(ctx, before);
    if (!b) return y;
    b->kept = mixpi_origin(y);
    for (int64_t i = 0; i < b->count; i++) b->entries[i]->block = b;
    mixpi_rerun_spill(b);
    return y;
}

MIXPREC_API mixp_tensor *mixp_recompute(
    mixp_context *ctx, mixp_block_fn block, void *user, mixp_tensor *x) {
    if (!ctx) return NULL;
    if (block) return mixpi_recompute(ctx, block, user, x);
    mixp_context_fail(ctx, MIXP_ERR_ARGUMENT, "mixp_recompute: the function is NULL");
    return NULL;
}
