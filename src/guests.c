#pragma once
#include "tensors/context.c"
#include "recipes/door.c"
#include "watch/door.c"
#include "ranks/door.c"
/* --- making a context ------------------------------------------------------------------------ *
 *
 * The last room: it knows which optional rooms (recipes, watch, ranks) the build has.
 */
/* Returns what is wrong with the description of an optional room, or NULL. */
static const char *mixpi_guests_wrong(const mixp_context_desc *d) {
#ifdef MIXPREC_NO_RANKS
    return d->ranks ? "ranks: this build has none: compile without MIXPREC_NO_RANKS" : NULL;
#else
    return mixpi_ranks_wrong(d->ranks);
#endif
}

/* Sets the tables of the optional rooms in a new context. */
static void mixpi_guests_enter(mixp_context *ctx, const mixp_context_desc *d) {
#ifndef MIXPREC_NO_RECIPES
    ctx->quantiser = &mixpi_recipes_door;
#endif
#ifndef MIXPREC_NO_WATCH
    ctx->watcher = &mixpi_watch_door;
#endif
#ifndef MIXPREC_NO_RANKS
    mixpi_ranks_enter(ctx, d->ranks);
#endif
    (void)ctx;
    (void)d;
}

MIXPI_SELDOM
MIXPREC_API mixp_context *mixp_context_new(const mixp_context_desc *desc) {
    mixp_context *ctx = NULL;
    mixpi_block *block = NULL;
    mixp_context_desc d = MIXPI_ZERO;
    if (desc) d = *desc;

    const char *wrong = mixpi_desc_wrong(&d);
    if (!wrong) wrong = mixpi_guests_wrong(&d);

    /* Where memory comes from. */
    if (!wrong && d.memory) {
        block = mixpi_block_new(d.memory, d.memory_bytes);
        if (!block) wrong = "memory_bytes is too small";
        d.allocate = mixpi_block_allocate;
        d.release = mixpi_block_release;
        d.user = block;
    } else if (!d.allocate) {
        d.allocate = mixpi_default_allocate;
        d.release = mixpi_default_release;
    }

    if (!wrong) ctx = mixpi_context_make(&d, sizeof(mixp_ranks_desc), &wrong);
    if (ctx) ctx->user = desc ? desc->user : NULL;
    if (ctx) ctx->memory.block = block;
    if (ctx) mixpi_guests_enter(ctx, &d);
    if (d.why) *d.why = wrong ? wrong : "";
    return ctx;
}
