#pragma once
#include "../optimizers/add.c"
#include "../tensors/buffers.c"
/* --- buffers at an update ------------------------------------------------------------------- */

/* Adds a flag. Queues a restore once k holds as many flags as one kernel takes. */
static mixp_result mixpi_buffers_restore_if(mixp_context *ctx, mixp_restore_args *k,
                                            const int32_t *flag) {
    mixp_result r = MIXP_OK;
    k->flags[k->n_flags++] = flag;
    if (k->n_flags < MIXP_RESTORE_FLAGS) return MIXP_OK;
    r = mixpi_backups_restore(ctx, k);
    k->n_flags = 0;
    return r;
}

/* The update of an optimizer without a scaler. */
static mixp_result mixpi_buffers_step(mixp_optimizer *opt) {
    mixp_context *ctx = opt->ctx;
    mixp_restore_args k;
    if (!ctx->buffers.all.count) return MIXP_OK;

    memset(&k, 0, sizeof k);
    mixp_result r = mixpi_crew_share_buffers(ctx);
    if (r == MIXP_OK) r = mixpi_buffers_restore_if(ctx, &k, &opt->state->skip);
    if (r == MIXP_OK) r = mixpi_backups_restore(ctx, &k);
    mixpi_window_end(ctx);
    return r;
}

/* Was opt unscaled or stepped before the scaler's last update, or since? */
static int mixpi_is_checked(const mixp_scaler *scaler, const mixp_optimizer *opt) {
    return opt && opt->scaler == scaler && opt->epoch == scaler->checked_epoch;
}

/* The update of a scaler, for all optimizers that were stepped since its last one. */
static mixp_result mixpi_buffers_update(mixp_scaler *scaler) {
    mixp_context *ctx = scaler->ctx;
    mixp_restore_args k;
    if (!ctx->buffers.all.count) return MIXP_OK;

    /* Shared buffers travel first, so the restore also undoes the exchange on every rank. */
    memset(&k, 0, sizeof k);
    mixp_result r = mixpi_crew_share_buffers(ctx);

    if (r == MIXP_OK) r = mixpi_buffers_restore_if(ctx, &k, &scaler->state->skipped);
    mixp_optimizer *opt = scaler->checked;
    for (; mixpi_is_checked(scaler, opt); opt = opt->next_checked)
        if (r == MIXP_OK && opt->stage == MIXPI_STEPPED)
            r = mixpi_buffers_restore_if(ctx, &k, &opt->state->skip);
    if (r == MIXP_OK && k.n_flags) r = mixpi_backups_restore(ctx, &k);
    mixpi_window_end(ctx);
    return r;
}
