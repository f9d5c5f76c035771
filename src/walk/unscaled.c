#pragma once
#include "marks.c"
/* --- unscaled gradients in f16 ---------------------------------------------------------- *
 *
 * Without a loss scale, small f16 gradients become 0, and no error reports it. A few early walks
 * count them, and the context warns once.
 */
enum { MIXPI_UNSCALED_WALKS = 64 };

/* Decides whether the walk that begins counts. A guard deals with flushed gradients itself. */
static void mixpi_unscaled_begin(mixp_context *ctx) {
    mixpi_unscaled *u = &ctx->walk.unscaled;
    const int number = u->walks + 1;
    u->met = 0;
    u->values = u->flushed = 0.0;
    u->counts = number <= MIXPI_UNSCALED_WALKS && (number & (number - 1)) == 0 &&
                !*ctx->errors.warning && !ctx->capture.active && ctx->device->kernels->look &&
                !(mixpi_watched(ctx) & (MIXPI_WATCHED | MIXPI_TRIAL));
}

/* Looks at g at once. On a device that the host cannot read, waits for it. */
static mixp_result mixpi_unscaled_look(mixp_context *ctx, const mixp_tensor *g, mixp_look *found) {
    mixpi_arena *a = &ctx->memory.dev;
    const int apart = ctx->device->download != NULL;
    mixp_look *row = apart ? (mixp_look *)mixpi_arena_take(ctx, a, sizeof *row) : found;
    const mixp_look_args k = mixpi_look_at(mixpi_tensor_in(g), g->count, MIXP_F16, row);
    if (!row) return MIXP_ERR_MEMORY;
    MIXPI_TRY(mixpi_device_zero(ctx, row, sizeof *row));
    mixp_result r = mixpi_note_failure(ctx, "look", ctx->device->kernels->look(&ctx->exec, &k));
    if (!apart) return r;
    if (r == MIXP_OK) r = mixpi_download(ctx, found, row, sizeof *row);
    mixpi_arena_free(ctx, a, row, sizeof *row);
    return r;
}

/* Counts g, the gradient of an activation. Beside values of at least 16 times the smallest normal
 * number, flushed ones are less than a rounding: they do not count. */
static mixp_result mixpi_unscaled_count(mixp_context *ctx, const mixp_tensor *g) {
    mixpi_unscaled *u = &ctx->walk.unscaled;
    mixp_look found;
    if (g->dtype != MIXP_F16 || g->own.mark.kind != MIXPI_MARK_TRUE) return MIXP_OK;
    u->met = 1;
    if (!u->counts) return MIXP_OK;
    MIXPI_TRY(mixpi_unscaled_look(ctx, g, &found));
    u->values += (double)(found.count - found.zeros);
    if (found.largest < 16.0f * 6.103515625e-05f) u->flushed += 0.5 * (double)found.least;
    return MIXP_OK;
}

/* After a walk: warns if more than 5 % of the gradients were flushed. A few elements are no
 * estimate. */
static void mixpi_unscaled_end(mixp_context *ctx) {
    mixpi_unscaled *u = &ctx->walk.unscaled;
    const double all = u->values + u->flushed;
    if (u->met && u->walks < MIXPI_UNSCALED_WALKS) u->walks++;
    if (u->flushed < 8.0 || u->flushed <= 0.05 * all) return;
    mixpi_warn(ctx,
        "mixp_backward: about %.0f %% of the f16 gradients became 0 in step %.0f, because no loss "
        "scale multiplies them: call mixp_backward on mixp_scaler_scale(scaler, loss) and step "
        "with mixp_scaler_step, or use bf16",
        100.0 * u->flushed / all, (double)ctx->step);
}
