#pragma once
#include "backward.c"
/* --- a step begins ------------------------------------------------------------------------ */

/* Is the step that begins a sampled one? Counts the step for the guard. */
static int mixpi_watch_samples(mixp_context *ctx) {
    mixpi_watch *w = ctx->watch;
    const int due = mixpi_watch_due(ctx);
    w->in_turn |= mixpi_update_due(w);
    w->taken |= due;
    if (w->window < INT32_MAX) w->window++;
    if (w->idle < INT32_MAX) w->idle++;
    if (due) w->idle = 0;
    return due;
}

/* Does the step belong to the update of an earlier walk, as a micro-batch does? No sample is
 * settled between micro-batches: one rank then decides like many ranks that each walk one
 * micro-batch. */
static int mixpi_window_open(const mixpi_watch *w) { return w->walked && w->window < 64; }

/* Settles the samples of earlier steps and decides whether the new step is sampled. With several
 * ranks, samples are settled at updates; until then all steps share the same rows. */
static mixp_result mixpi_watch_begin(mixp_context *ctx) {
    mixpi_watch *w = ctx->watch;
    mixp_result r = MIXP_OK;
    if (!w) return MIXP_OK;
    w->sampled = w->probing = 0;
    w->pass++;
    if (!w->on || ctx->capturing || w->comparing) return MIXP_OK;
    if (mixpi_world(ctx) == 1 && !mixpi_window_open(w)) r = w->settle(ctx);
    if (r != MIXP_OK || (ctx->evaluates && !w->repeat)) return r;
    w->sampled = mixpi_watch_samples(ctx);
    if (w->repeat) w->sampled = mixpi_world(ctx) == 1;
    w->probing = w->repeat || (w->sampled && w->probe);
    w->repeat = 0;
    if (!w->sampled) return MIXP_OK;
    w->fresh_probe |= w->probing;
    if (w->fresh) return MIXP_OK;
    w->turns = 0;
    w->fresh = ++w->begun;
    w->rows_step = ctx->step + (ctx->evaluates ? 0 : mixpi_world(ctx));
    w->filled = mixpi_rows_filled(w);
    r = mixpi_device_zero(ctx, w->rows, mixpi_rows_bytes(w->filled));
    if (r == MIXP_OK && w->counting)
        r = mixpi_device_zero(ctx, w->bins, mixpi_bins_bytes(w->filled));
    return r;
}

/* An exception has left an operator or a hook: the walk that was running has failed. */
static void mixpi_put_in_order(mixp_context *ctx) {
    const mixpi_crew *crew = mixpi_crew_of(ctx);
    ctx->inside = ctx->depth = ctx->refused = 0;
    mixpi_regions_of_walk(ctx);
    if (ctx->walking && crew) crew->end(ctx, "an exception has left mixp_backward");
    if (ctx->walking) mixpi_walked(ctx, MIXP_ERR_ORDER);
}

static mixp_result mixpi_step_begin(mixp_context *ctx) {
    mixp_result r = mixpi_regions_check(ctx);
    mixp_result watched = mixpi_crew_stop_alone(ctx, mixpi_watch_begin(ctx));
    if (r == MIXP_OK) r = watched;
    mixpi_arena_reset(&ctx->host);
    mixpi_arena_reset(&ctx->dev);
    mixpi_records_turn(ctx);
    ctx->tape = NULL;
    ctx->calls_made = 0;
    ctx->in_block = 0;
    if (ctx->casting) ctx->casting->linears = 0;
    ctx->generation++;
    if (!ctx->evaluates) ctx->step += mixpi_world(ctx);
    return r;
}

/* A step begins, at the caller's stack address `frame`. */
static mixp_result mixpi_any_begin(mixp_context *ctx, int evaluates, uintptr_t frame) {
    int before;
    if (!ctx) return MIXP_ERR_ARGUMENT;
    if (mixpi_inside_left(ctx, frame)) mixpi_put_in_order(ctx);
    ctx->refused = ctx->inside > 0;
    if (mixpi_check_outside(ctx, evaluates ? "mixp_eval_begin" : "mixp_step_begin") != MIXP_OK)
        return MIXP_ERR_ORDER;
    before = mixpi_enter(ctx);
    ctx->evaluates = evaluates;
    return mixpi_leave(ctx, before, mixpi_step_begin(ctx));
}

MIXPI_APART MIXPREC_API mixp_result mixp_step_begin(mixp_context *ctx) {
    volatile char here = 0;
    return mixpi_any_begin(ctx, 0, MIXPI_FRAME(&here));
}

MIXPI_APART MIXPREC_API mixp_result mixp_eval_begin(mixp_context *ctx) {
    volatile char here = 0;
    return mixpi_any_begin(ctx, 1, MIXPI_FRAME(&here));
}

