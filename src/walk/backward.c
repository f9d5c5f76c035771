#pragma once
#include "blocks.c"
/* --- walking back a loss -------------------------------------------------------------------- */

/* Can loss be walked back? Reports the reason if not. */
static mixp_result mixpi_check_loss(mixp_context *ctx, const mixp_tensor *loss) {
    /* Is it one number of this context and this step? */
    if (ctx && loss && !mixpi_is_live(loss))
        return mixp_context_fail(ctx, MIXP_ERR_ORDER,
            "mixp_backward: the loss is from an earlier step, and %s has recycled it: call "
            "mixp_backward in the step that made the loss",
            mixpi_beginner(ctx));
    if (!ctx || !loss || loss->ctx != ctx || loss->count != 1)
        return mixp_context_fail(ctx, loss && loss->ctx == ctx ? MIXP_ERR_SHAPE : MIXP_ERR_ARGUMENT,
            "mixp_backward: the loss must be one element of this context%s; take its mean or sum "
            "first",
            loss ? "" : ", not NULL");
    if (mixpi_check_outside(ctx, "mixp_backward") != MIXP_OK) return MIXP_ERR_ORDER;

    /* Was it recorded, in a step that trains, and not yet walked back? */
    if (!loss->own.from_tape && loss->own.cut)
        return mixp_context_fail(ctx, MIXP_ERR_ORDER,
            "mixp_backward: nothing was recorded for this loss: it comes from %s, which has no "
            "backward",
            loss->own.cut);
    if (!loss->own.from_tape)
        return mixp_context_fail(ctx, MIXP_ERR_ORDER,
            "mixp_backward: nothing was recorded for this loss: it was made under MIXP_NO_GRAD, or "
            "depends on no parameter that is trained (mixp_freeze_all and "
            "mixp_tensor_set_requires_grad freeze)");
    if (ctx->evaluates)
        return mixp_context_fail(ctx, MIXP_ERR_ORDER,
            "mixp_backward: this step began with mixp_eval_begin; begin steps that train with "
            "mixp_step_begin");
    if (loss->own.walked)
        return mixp_context_fail(
            ctx, MIXP_ERR_ORDER, "mixp_backward: already called on this loss; run forward again");
    return MIXP_OK;
}

/* The gradient of the loss with respect to itself, 1, from which the walk starts. */
static mixp_result mixpi_walk_start(mixp_context *ctx, mixp_tensor *loss) {
    static const mixpi_mark as_it_is = { NULL, 0, 0, MIXPI_MARK_TRUE };
    mixp_tensor *g = mixpi_grad_buffer(loss);
    if (!g) return MIXP_ERR_MEMORY;

    g->own.mark = as_it_is;
    loss->own.pending = loss->own.walked = ctx->walk.running = 1;
    mixpi_unscaled_begin(ctx);
    if (mixpi_quantiser_of(ctx)) ctx->quantiser->walk_begin(ctx);
    return mixpi_fill_with(ctx, mixpi_tensor_out(g, 0), 1, 1.0);
}

/* Walks back one entry, if a gradient has reached its result. A block that is computed again is in
 * memory while the walk passes its entries. */
static mixp_result mixpi_walk_pass(mixp_context *ctx, mixpi_tape_entry *e) {
    mixpi_rerun *b = e->block;
    mixp_result r = MIXP_OK;
    if (e->call.out->own.pending) {
        if (b && !b->live) r = mixpi_rerun_restore(b);
        if (r == MIXP_OK) r = mixpi_walk_entry(&e->call);
    }
    if (b && b->live && e == b->entries[0]) mixpi_rerun_spill(b);
    return r == MIXP_OK ? MIXPI_CREW(ctx, walk_passed(ctx, &e->call)) : r;
}

/* Ends a walk with result r. */
static void mixpi_walk_stop(mixp_context *ctx, mixp_result r) {
    ctx->walk.running = 0;
    if (r == MIXP_OK) ctx->walk.walked_in = ctx->generation;
    if (r != MIXP_OK) mixpi_crew_forget(ctx);
    mixpi_walk_end(ctx, r != MIXP_OK);
}

static mixp_result mixpi_backward(mixp_context *ctx, mixp_tensor *loss) {
    mixp_result r = mixpi_check_loss(ctx, loss);
    if (r == MIXP_OK) r = MIXPI_CREW(ctx, walk_begin(ctx));
    if (r != MIXP_OK) return mixpi_crew_stop(ctx, r);
    r = mixpi_walk_start(ctx, loss);
    if (!ctx->walk.running) return mixpi_crew_stop(ctx, r);

    /* A user's backward may apply operators: they run in a region of the walk's own. */
    const int opened = mixpi_regions_count(ctx);
    mixpi_region_open(ctx, mixp_autocast_current(ctx), MIXPI_REGION_IN_WALK, 1);
    for (mixpi_tape_entry *e = ctx->tape.newest; e && r == MIXP_OK; e = e->older)
        r = mixpi_walk_pass(ctx, e);
    mixp_autocast_close(ctx, opened);

    /* The ranks' sums are in place before the program reads a gradient. */
    if (r == MIXP_OK) r = MIXPI_CREW(ctx, walk_end(ctx));
    if (r == MIXP_OK) mixpi_unscaled_end(ctx);
    mixpi_walk_stop(ctx, r);
    if (mixpi_watcher_of(ctx)) ctx->watcher->walked(ctx);
    return mixpi_crew_stop(ctx, r);
}

MIXPREC_API mixp_result mixp_backward(mixp_context *ctx, mixp_tensor *loss) {
    MIXPI_RETURN_INSIDE(ctx, mixpi_backward(ctx, loss));
}
