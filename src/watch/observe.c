#pragma once
#include "desk.c"
/* --- observers ------------------------------------------------------------------------------ */

enum { MIXPI_OBSERVED_SITES = 4096 };   /* limit of sites, unless a guard has set another */

/* Drops all gradients: the runs of a trial must not add to them, nor leave any behind. Undoes the
 * trial's steps. */
MIXPI_SELDOM
static void mixpi_trial_forget(mixp_context *ctx) {
    for (mixp_tensor *t = ctx->tensors; t; t = t->own.next) t->grad = NULL;
    mixpi_crew_forget(ctx);
    ctx->step = ctx->watch->trial_step;
}

/* Allocates what an observer needs, before any change. */
static mixp_result mixpi_observe_ready(mixp_context *ctx, const mixp_observer *observer) {
    mixp_result r = mixpi_check_between_steps(ctx, "mixp_observe");
    if (r != MIXP_OK || !observer) return r;
    if (!mixpi_watch_of(ctx)) return MIXP_ERR_MEMORY;
    if (!ctx->watch->capacity) r = mixpi_watch_room(ctx, MIXPI_OBSERVED_SITES);
    if (r != MIXP_OK || !observer->trial) return r;
    return mixpi_guard_catch_up(ctx);
}

MIXPI_SELDOM
static mixp_result mixpi_do_observe(
    mixp_context *ctx, const mixp_observer *observer, mixp_observer *before) {
    static const mixp_observer none = { NULL, NULL, 0 };
    if (!ctx) return MIXP_ERR_ARGUMENT;
    if (before) *before = ctx->watch ? ctx->watch->observer : none;
    mixp_result r = mixpi_observe_ready(ctx, observer);
    mixpi_watch *w = ctx->watch;
    if (r != MIXP_OK || !w) return r;
    if (w->observer.trial) mixpi_trial_forget(ctx);
    w->observer = observer ? *observer : none;
    w->trial_step = ctx->step;
    return MIXP_OK;
}

MIXPREC_API mixp_result mixp_observe(
    mixp_context *ctx, const mixp_observer *observer, mixp_observer *before) {
    MIXPI_RETURN_INSIDE(ctx, mixpi_do_observe(ctx, observer, before));
}
