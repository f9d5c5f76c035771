#pragma once
#include "../tape/run.c"
/* --- marks of gradients ---------------------------------------------------------------- *
 *
 * A mark records the factor by which a gradient is multiplied. A walk begins with a true gradient,
 * a scaler's operator changes the mark, and each operator passes the mark on to the gradients of
 * its inputs.
 */
enum {
    MIXPI_MARK_NONE,            /* unknown: zeros, or filled by the user                   */
    MIXPI_MARK_TRUE,            /* gradient of the loss itself                             */
    MIXPI_MARK_SCALED,
    MIXPI_MARK_UNSCALED,        /* unscaled: true again                                    */
    MIXPI_MARK_MIXED,           /* a sum over two scales: no factor makes it true          */
    MIXPI_MARK_LOST             /* scaled by a scaler that was freed                       */
};

/* Updates the mark of a gradient to which another gradient was written or added. */
static void mixpi_mark_add(mixpi_mark *to, const mixpi_mark *from, int accumulate) {
    int same = to->kind == from->kind && to->by == from->by && to->at == from->at;
    int both_true = to->kind == MIXPI_MARK_UNSCALED && from->kind == MIXPI_MARK_TRUE;
    if (!accumulate || to->kind == MIXPI_MARK_NONE || same) *to = *from;
    else if (!both_true) to->kind = MIXPI_MARK_MIXED;
}

/* Removes the scaler `by`, about to be freed, from a mark. */
static void mixpi_mark_lose(mixpi_mark *m, const void *by) {
    if (m->by != by) return;
    m->by = NULL;
    m->seen = 0;
    if (m->kind == MIXPI_MARK_SCALED) m->kind = MIXPI_MARK_LOST;
    if (m->kind != MIXPI_MARK_UNSCALED) return;
    m->kind = MIXPI_MARK_TRUE;
    m->at = 0;
}

/* Removes `by` from the marks of a tensor and of its gradients. */
static void mixpi_tensor_lose(mixp_tensor *t, const void *by) {
    if (!t) return;
    mixpi_mark_lose(&t->own.mark, by);
    if (t->own.grad) mixpi_mark_lose(&t->own.grad->own.mark, by);
    if (t->own.kept) mixpi_mark_lose(&t->own.kept->own.mark, by);
}

/* Removes the scaler `by`, about to be freed, from all marks of the context and of this step. */
static void mixpi_context_lose(mixp_context *ctx, const void *by) {
    for (mixp_tensor *t = ctx->tensors; t; t = t->own.next) mixpi_tensor_lose(t, by);
    for (mixpi_tape_entry *e = ctx->tape.newest; e; e = e->older) {
        mixpi_tensor_lose(e->call.out, by);
        for (int i = 0; i < e->call.n_in; i++) mixpi_tensor_lose(e->call.in[i], by);
    }
    if (mixpi_crew_of(ctx)) ctx->crew->lose(ctx, by);
}
