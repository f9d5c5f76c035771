#pragma once
#include "../optimizers/add.c"
#include "../tensors/buffers.c"
/* --- buffers at an update ------------------------------------------------------------------- */

/* Adds a flag. Queues a restore once k holds as many flags as one kernel accepts. */
static mixp_result mixpi_buffers_restore_if(
    mixp_context *ctx, mixp_restore_args *k, const int32_t *flag) {
    mixp_result r = MIXP_OK;
    k->flags[k->n_flags++] = flag;
    if (k->n_flags < MIXP_RESTORE_FLAGS) return MIXP_OK;
    r = mixpi_backups_restore(ctx, k);
    k->n_flags = 0;
    return r;
}

/* Before the decision of a step: finds what the window made Inf or NaN. */
static mixp_result mixpi_buffers_check(mixp_optimizer *opt) {
    return mixpi_backups_check(opt->ctx, &opt->state->buffer_found, 0);
}

/* Clears the findings of a step that failed before its decision: they must not skip another. */
static void mixpi_buffers_forget(mixp_optimizer *opt) {
    uint64_t *found = &opt->state->buffer_found;
    if (opt->ctx->buffers.all.count) (void)mixpi_device_zero(opt->ctx, found, sizeof *found);
}

/* Returns the buffer that a mixpi_bad_word names; NULL for 0. */
static const mixp_tensor *mixpi_bad_buffer(const mixp_context *ctx, uint64_t word) {
    return word ? mixp_context_buffer(ctx, mixpi_bad_number(word)) : NULL;
}

/* After a step without a scaler: if it was applied, warns of a buffer that became Inf or NaN. */
static mixp_result mixpi_buffers_warn(const mixp_optimizer *opt) {
    mixp_step_state s;
    const mixp_result r = mixpi_peek(opt->ctx, &s, opt->state, offsetof(mixp_step_state, update));
    const mixp_tensor *t = r == MIXP_OK ? mixpi_bad_buffer(opt->ctx, s.bad_buffer) : NULL;
    char on_rank[32] = "";
    if (!t || s.skip) return r;
    if (s.agreed.ranks)
        snprintf(on_rank, sizeof on_rank, " on rank %d", (int)s.agreed.buffer_rank - 1);
    mixpi_warn(opt->ctx,
        "mixp_optimizer_step: step %.0f has left %s at element %.0f of the buffer '%.60s'%s, and "
        "only a scaler skips such a step: use a scaler, of MIXP_RULE_STATIC with init_scale 1 if "
        "you need no loss scale",
        (double)s.steps, mixpi_bad_is_nan(s.bad_buffer) ? "NaN" : "Inf",
        (double)mixpi_bad_element(s.bad_buffer), t->name, on_rank);
    return MIXP_OK;
}

/* The update of an optimizer without a scaler. */
static mixp_result mixpi_buffers_step(mixp_optimizer *opt) {
    mixp_context *ctx = opt->ctx;
    if (!ctx->buffers.all.count) return MIXP_OK;

    mixp_restore_args k = MIXPI_ZERO;
    mixp_result r = MIXPI_CREW(ctx, share_buffers(ctx));
    if (r == MIXP_OK) r = mixpi_buffers_restore_if(ctx, &k, &opt->state->skip);
    if (r == MIXP_OK) r = mixpi_backups_restore(ctx, &k);
    if (r == MIXP_OK) r = mixpi_buffers_warn(opt);
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
    if (!ctx->buffers.all.count) return MIXP_OK;

    /* Shared buffers travel first, so the restore also undoes the exchange on every rank. */
    mixp_restore_args k = MIXPI_ZERO;
    mixp_result r = MIXPI_CREW(ctx, share_buffers(ctx));

    if (r == MIXP_OK) r = mixpi_buffers_restore_if(ctx, &k, &scaler->state->skipped);
    mixp_optimizer *opt = scaler->checked;
    for (; mixpi_is_checked(scaler, opt); opt = opt->next_checked)
        if (r == MIXP_OK && opt->stage == MIXPI_STEPPED)
            r = mixpi_buffers_restore_if(ctx, &k, &opt->state->skip);
    if (r == MIXP_OK && k.n_flags) r = mixpi_backups_restore(ctx, &k);
    mixpi_window_end(ctx);
    return r;
}
