#pragma once
#include "blocks.c"
/* --- walking back a loss -------------------------------------------------------------------- */

/* Can loss be walked back? Reports the reason if not. */
static mixp_result mixpi_check_loss(mixp_context *ctx, const mixp_tensor *loss) {
    if (ctx && loss && !mixpi_is_live(loss))
        return mixp_context_fail(ctx, MIXP_ERR_ORDER,
                                 "mixp_backward: the loss is of an earlier step, and %s has "
                                 "recycled it: call mixp_backward in the step that made the loss",
                                 mixpi_beginner(ctx));
    if (!ctx || !loss || loss->ctx != ctx || loss->count != 1)
        return mixp_context_fail(
            ctx, loss && loss->ctx == ctx ? MIXP_ERR_SHAPE : MIXP_ERR_ARGUMENT,
            "mixp_backward: the loss must be one element of this context%s; take its "
            "mean or sum first",
            loss ? "" : ", not NULL");
    if (mixpi_check_outside(ctx, "mixp_backward") != MIXP_OK) return MIXP_ERR_ORDER;
    if (!loss->own.from_tape && loss->own.cut)
        return mixp_context_fail(ctx, MIXP_ERR_ORDER,
                                 "mixp_backward: nothing was recorded for this loss: it comes from "
                                 "%s, which has no backward",
                                 loss->own.cut);
    if (!loss->own.from_tape)
        return mixp_context_fail(ctx, MIXP_ERR_ORDER,
                                 "mixp_backward: nothing was recorded for this loss: it was made "
                                 "under MIXP_NO_GRAD, or depends on no parameter");
    if (ctx->evaluates)
        return mixp_context_fail(ctx, MIXP_ERR_ORDER,
                                 "mixp_backward: this step began with mixp_eval_begin; begin steps "
                                 "that train with mixp_step_begin");
    if (loss->own.walked)
        return mixp_context_fail(ctx, MIXP_ERR_ORDER,
                                 "mixp_backward: already called on this loss; run forward again");
    return MIXP_OK;
}

/* Ends a walk with result r. */
static void mixpi_walked(mixp_context *ctx, mixp_result r) {
    ctx->walking = 0;
    if (r == MIXP_OK) ctx->walked_in = ctx->generation;
    if (r != MIXP_OK) mixpi_crew_forget(ctx);
    mixpi_walk_end(ctx, r != MIXP_OK);
}

static mixp_result mixpi_backward(mixp_context *ctx, mixp_tensor *loss) {
    static const mixpi_mark as_it_is = { NULL, 0, 0, MIXPI_MARK_TRUE };
    const mixpi_watcher *watcher = mixpi_watcher_of(ctx);
    const mixpi_crew *crew = mixpi_crew_of(ctx);
    mixpi_tape_entry *e;
    mixp_tensor *g;
    mixp_result r = mixpi_check_loss(ctx, loss);
    int opened;
    if (r == MIXP_OK && crew) r = crew->walk_begin(ctx);
    if (r != MIXP_OK) return mixpi_crew_stop(ctx, r);
    g = mixpi_grad_buffer(loss);
    if (!g) return mixpi_crew_stop(ctx, MIXP_ERR_MEMORY);
    r = mixpi_fill_with(ctx, mixpi_tensor_out(g, 0), 1, 1.0);
    g->own.mark = as_it_is;
    loss->own.pending = loss->own.walked = ctx->walking = 1;
    mixpi_unscaled_begin(ctx);
    mixpi_regions_trained(ctx);
    opened = mixpi_regions_open(ctx);   /* a user's backward may apply operators */
    mixpi_region_open(ctx, mixp_autocast_current(ctx), MIXPI_REGION_IN_WALK, 1);
    for (e = ctx->tape; e && r == MIXP_OK; e = e->older) {
        if (e->call.out->own.pending) {
            r = mixpi_rerun_enter(e);
            if (r == MIXP_OK) r = mixpi_walk_entry(&e->call);
        }
        mixpi_rerun_leave(e);
        if (r == MIXP_OK && crew) r = crew->walk_passed(ctx, &e->call);
    }
    mixp_autocast_close(ctx, opened);
    if (r == MIXP_OK && crew) r = crew->walk_end(ctx);
    if (r == MIXP_OK) mixpi_unscaled_end(ctx);
    mixpi_walked(ctx, r);
    if (watcher) watcher->walked(ctx);
    return mixpi_crew_stop(ctx, r);
}

MIXPREC_API mixp_result mixp_backward(mixp_context *ctx, mixp_tensor *loss) {
    const int before = mixpi_enter(ctx);
    return mixpi_leave(ctx, before, mixpi_backward(ctx, loss));
}

