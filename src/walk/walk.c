#pragma once
#include "checks.c"
#include "unscaled.c"
/* --- walking back one operator ---------------------------------------------------------- */

/* A result without elements passes zeros back. */
static mixp_result mixpi_walk_nothing(mixp_call *c) {
    mixp_result r = MIXP_OK;
    for (int i = 0; i < c->n_in && r == MIXP_OK; i++) {
        const mixp_out dx = mixp_call_dx(c, i);
        if (dx.data && !dx.accumulate)
            r = mixpi_fill_with(c->ctx, dx, mixpi_grad_owner(c, i)->count, 0.0);
    }
    return r;
}

static mixp_result mixpi_walk_entry(mixp_call *c) {
    mixp_context *ctx = c->ctx;
    mixp_tensor *out = c->out, *g = out->own.grad;
    const int site = mixpi_entry(c)->site;
    const uint64_t reported = ctx->errors.reported, generation = ctx->generation;

    /* The incoming gradient is complete: it is checked, looked at and counted before it is read. */
    mixp_result r = mixpi_check_unwritten(c, "mixp_backward");
    if (r == MIXP_OK) r = mixpi_settle_inputs(c);
    out->grad = g;
    out->own.pending = 0;
    if (r == MIXP_OK && g->count && site) r = MIXPI_WATCHER(ctx, gradient(ctx, site, g));
    if (r == MIXP_OK && g->count) r = mixpi_unscaled_count(ctx, g);

    /* The operator's backward passes the gradient on. If backward has begun a step, the call is
     * gone. */
    if (r == MIXP_OK) r = mixpi_run_inside(c, out->count ? c->op->backward : mixpi_walk_nothing);
    if (ctx->generation != generation) return r;
    if (r == MIXP_OK) r = mixpi_entry(c)->lacks;
    if (r == MIXP_OK) r = mixpi_check_given(c);
    if (r == MIXP_OK && site) r = MIXPI_WATCHER(ctx, leaves(c, site));
    out->grad = NULL;
    if (r != MIXP_OK && ctx->errors.reported == reported)
        mixp_context_fail(ctx, r, "%s backward: %s", c->op->name, mixpi_why(ctx, r));
    if (r != MIXP_OK) return r;

    /* Its memory goes back to the arena, if the user has not asked to keep it. */
    if (out->requires_grad) return mixpi_keep_grad(out);
    if (mixpi_forget_loan(g)) return MIXP_OK;
    r = mixpi_grad_settle(g);
    if (g->data) mixpi_arena_free(ctx, &ctx->memory.dev, g->data, mixpi_bytes(g));
    g->data = NULL;
    return r;
}

/* Clears all pending gradients. A failed walk drops the gradients that it wrote, which are
 * incomplete. */
static void mixpi_walk_end(mixp_context *ctx, int failed) {
    for (mixpi_tape_entry *e = ctx->tape.newest; e; e = e->older) {
        e->call.out->own.pending = e->made = 0;
        e->lacks = MIXP_OK;
        for (int i = 0; i < e->call.n_in; i++) e->inputs[i] &= MIXPI_INPUT_CONSTANT;
        mixpi_forget_loan(e->call.out->own.grad);
        for (int i = 0; i < e->call.n_in; i++) {
            mixp_tensor *t = mixpi_grad_owner(&e->call, i);
            if (!t || t->own.from_tape || !t->own.pending) continue;
            t->own.pending = 0;
            if (failed) t->grad = NULL;
        }
    }
}
