#pragma once
#include "backward.c"
/* --- a step begins ------------------------------------------------------------------------ */

/* An exception has left an operator or a hook: the walk that was running has failed. */
static void mixpi_recover(mixp_context *ctx) {
    if (ctx->errors.depth) mixpi_float_leave(ctx->errors.float_mode);
    ctx->tape.inside = ctx->errors.depth = ctx->tape.refused = 0;
    mixpi_regions_of_walk(ctx);
    if (!ctx->walk.running) return;
    mixpi_crew_end(ctx, "an exception has left mixp_backward");
    mixpi_walk_stop(ctx, MIXP_ERR_ORDER);
}

static mixp_result mixpi_step_begin(mixp_context *ctx) {
    const mixp_result buffers = mixpi_window_recover(ctx);
    const mixp_result regions = mixpi_regions_check(ctx);
    const mixp_result watched = mixpi_crew_stop_alone(ctx, MIXPI_WATCHER(ctx, begin(ctx)));

    /* Recycle the activations and their records, and forget what the step before recorded. */
    mixpi_arena_reset(&ctx->memory.host);
    mixpi_arena_reset(&ctx->memory.dev);
    mixpi_records_turn(ctx);
    ctx->tape.newest = NULL;
    ctx->tape.calls = ctx->tape.drawn = 0;
    ctx->tape.in_block = MIXPI_BLOCK_NONE;
    ctx->tape.tangent_of = NULL;
    mixpi_casting_turn(ctx);
    if (mixpi_quantiser_of(ctx)) ctx->quantiser->begin(ctx);

    ctx->generation++;
    mixpi_window_begin(ctx);
    if (!ctx->evaluates) ctx->step += mixpi_world(ctx);
    if (buffers != MIXP_OK) return buffers;
    return regions != MIXP_OK ? regions : watched;
}

/* A step begins, at the caller's stack address `frame`. */
static mixp_result mixpi_any_begin(mixp_context *ctx, int evaluates, uintptr_t frame) {
    if (!ctx) return MIXP_ERR_ARGUMENT;
    if (mixpi_inside_was_left(ctx, frame)) mixpi_recover(ctx);
    ctx->tape.refused = ctx->tape.inside > 0;
    if (mixpi_check_outside(ctx, evaluates ? "mixp_eval_begin" : "mixp_step_begin") != MIXP_OK)
        return MIXP_ERR_ORDER;
    const int before = mixpi_enter(ctx);
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
