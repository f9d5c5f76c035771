#pragma once
#include "../tensors/watcher.c"
#include "observe.c"
#include "saved.c"
/* --- the table of the guard's functions ------------------------------------------------------ */

static int mixpi_watch_flags(const mixp_context *ctx) {
    const mixpi_watch *w = ctx->watch;
    return (w->on ? MIXPI_WATCHED : 0) | (w->sampled ? MIXPI_SAMPLED : 0) |
           (w->observer.see && !ctx->capture.active ? MIXPI_OBSERVED : 0) |
           (w->observer.trial ? MIXPI_TRIAL : 0);
}

MIXPI_SELDOM
/* A captured step is not sampled, also if the capture begins within a sampled step. */
static void mixpi_watch_captured(mixp_context *ctx) {
    ctx->watch->sampled = ctx->watch->probing = 0;
}

/* Is the step that begins a sampled one? Counts the step for the guard. */
static int mixpi_watch_samples(mixp_context *ctx) {
    mixpi_watch *w = ctx->watch;
    const int due = mixpi_watch_is_due(ctx);
    w->update_due |= mixpi_update_is_due(w);
    w->taken |= due;
    if (w->window < INT32_MAX) w->window++;
    if (w->idle < INT32_MAX) w->idle++;
    if (due) w->idle = 0;
    return due;
}

/* Does the step belong to the update of an earlier walk, as a micro-batch does? No sample is
 * settled between micro-batches: one rank then decides like many ranks that each walk one
 * micro-batch. */
static int mixpi_window_is_open(const mixpi_watch *w) { return w->walked && w->window < 64; }

/* Before a replay: settles the samples of earlier steps, as the beginning of a step does. */
static mixp_result mixpi_watch_replayed(mixp_context *ctx) {
    mixpi_watch *w = ctx->watch;
    if (w->since < INT32_MAX) w->since++;
    if (!w->on || mixpi_world(ctx) > 1 || mixpi_window_is_open(w)) return MIXP_OK;
    return mixpi_guard_settle(ctx);
}

/* Settles the samples of earlier steps and decides whether the new step is sampled. With several
 * ranks, samples are settled at updates; until then all steps share the same rows. */
MIXPI_SELDOM
static mixp_result mixpi_watch_begin(mixp_context *ctx) {
    mixpi_watch *w = ctx->watch;
    w->sampled = w->probing = w->reader = 0;
    w->pass++;
    if (w->observer.trial) mixpi_trial_forget(ctx);
    if (!w->on || ctx->capture.active || w->observer.trial) return MIXP_OK;

    /* Decide first on what earlier samples show. */
    if (mixpi_world(ctx) == 1 && !mixpi_window_is_open(w)) MIXPI_TRY(mixpi_guard_settle(ctx));

    /* Is the new step sampled, and are its sites asked for more? */
    w->sampled = mixpi_watch_samples(ctx);
    if (w->repeat) w->sampled = mixpi_world(ctx) == 1;
    w->probing = w->repeat || (w->sampled && w->probe);
    w->repeat = 0;
    if (!w->sampled) return MIXP_OK;
    w->fresh_probe |= w->probing;
    if (w->fresh) return MIXP_OK;

    /* A new sample: its rows begin empty. */
    w->stored = 0;
    w->fresh = ++w->begun;
    w->rows_step = ctx->step + (ctx->evaluates ? 0 : mixpi_world(ctx));
    w->filled = mixpi_rows_to_clear(w);
    MIXPI_TRY(mixpi_rows_reach(ctx, w->filled));
    return mixpi_device_zero(ctx, w->rows, mixpi_rows_bytes(w->filled));
}

/* Tells the guard of a walk. The walk of a trial or of a capture belongs to no update. */
static void mixpi_watch_walked(const mixp_context *ctx) {
    mixpi_watch *w = ctx->watch;
    w->pass++;
    if (ctx->capture.active || w->observer.trial) return;
    w->walked = 1;
    w->probed |= w->probing;
    w->unseen |= !w->sampled;
}

/* The words of the guard that ranks compare; all 0 without a guard. */
MIXPI_SELDOM
static void mixpi_watch_words(const mixp_context *ctx, double *row) {
    const mixpi_watch *w = ctx->watch;
    if (!w->on) return;
    row[0] = 1.0;
    row[1] = (double)w->every;
    row[2] = (double)w->clean;
    row[3] = (double)w->patience;
    row[4] = (double)w->most_sites;
    row[5] = (double)w->high;
    row[6] = (double)w->low_again;
    row[7] = (double)w->flushed;
    row[8] = (double)w->imprecise;
    row[9] = (double)(ctx->device->post != NULL);
}

/* Before a scaler's update: settles the sample if it is time, and fills the update's arguments. */
MIXPI_SELDOM
static mixp_result mixpi_watch_updating(mixp_context *ctx, mixp_advance_args *k) {
    mixpi_watch *w = ctx->watch;
    const int on = mixpi_guard_is_on(ctx), decides = on && !ctx->capture.active;
    const int fresh = decides && w->fresh, alone = mixpi_world(ctx) == 1;
    mixp_result r = decides ? mixpi_guard_updating(ctx) : MIXP_OK;

    /* One skip in a row is forgiven, on every device. On a device that posts, the step after a skip
     * may run before the host learns of the skip. It lowers the scale, if it is skipped as well. */
    k->forgives = on;
    if (on) k->falls = w->falls;

    /* The look at the low gradients of the update's sample, in device memory. Several ranks have
     * just added theirs on the host. */
    if (fresh && r == MIXP_OK) {
        mixp_look *row = &w->rows[MIXPI_ROW_NARROW];
        k->narrow = row;
        if (!alone) r = mixpi_upload(ctx, row, &w->seen[MIXPI_ROW_NARROW], sizeof *row);
    }

    /* With several ranks, a rank's own look would change only its own scale. */
    if (alone && mixpi_context_is_sampled(ctx)) k->wide = &w->rows[MIXPI_ROW_WIDE];
    return r;
}

MIXPI_SELDOM
static mixp_result mixpi_watch_updated(mixp_context *ctx, void *scaler) {
    if (!mixpi_guard_is_on(ctx) || ctx->capture.active) return MIXP_OK;
    return mixpi_guard_updated(ctx, scaler);
}

/* Where the last skip began. */
MIXPI_SELDOM
static void mixpi_watch_origin(const mixp_context *ctx, mixp_verdict *v) {
    const mixpi_watch *w = ctx->watch;
    if (w->origin != MIXP_ORIGIN_UNKNOWN) v->origin = (mixp_origin)w->origin;
    if (w->origin_site) v->site = mixpi_site_at(ctx, w->origin_site)->name;
}

MIXPI_SELDOM
static void mixpi_watch_lose(mixp_context *ctx, const void *scaler) {
    if (ctx->watch->posted_scaler == scaler) ctx->watch->posted_scaler = NULL;
}

static const mixpi_watcher mixpi_watch_door = {
    mixpi_watch_flags, mixpi_watch_captured, mixpi_watch_replayed,
    /* tape: applying an operator */
    mixpi_site_enter, mixpi_site_casts, mixpi_stays_uncast, mixpi_site_choose,
    mixpi_site_is_pinned, mixpi_site_operands, mixpi_site_losses,
    mixpi_look_forward,
    /* walk */
    mixpi_watch_begin, mixpi_look_backward, mixpi_look_leaves, mixpi_watch_walked,
    /* step */
    mixpi_guard_mark, mixpi_watch_words, mixpi_watch_origin, mixpi_watch_updating,
    mixpi_watch_updated, mixpi_watch_lose,
    /* checkpoints */
#ifndef MIXPREC_NO_CHECKPOINT
    mixpi_guard_pack, mixpi_guard_meet, mixpi_guard_items, mixpi_guard_make_room, mixpi_guard_unpack
#else
    NULL, NULL, NULL, NULL, NULL
#endif
};

