#pragma once
#include "table.c"
/* --- averages of weights --------------------------------------------------------------------- *
 *
 * The kernel `update` averages too, in a separate table: a row's weight is the average, its
 * gradient the weight. The kernel reads the optimizer's step state, so a skipped step does not
 * change the averages.
 */

/* After the update kernel. */
static mixp_result mixpi_opt_average(mixp_optimizer *o) {
    if (!o->ema_count) return MIXP_OK;
    mixp_step_plan plan = o->plan;
    mixp_update_args k;
    o->ema_begun = o->ema_count;
    memset(&k, 0, sizeof k);
    plan.kind = MIXP_OPTIMIZER_EMA;
    plan.small_states = 0;
    k.plan = &plan;
    k.rows = o->device_ema_rows;
    k.count = o->ema_count;
    k.step = o->state;
    return MIXPI_STEP_RUN(o, update, &k);
}

static mixp_result mixpi_ema_check(const mixp_optimizer *opt, double decay) {
    const char *wrong = NULL;
    if (!mixpi_is_beta(decay)) wrong = "decay must lie in [0,1)";
    else if (!opt->count) wrong = "no parameter was added: call mixp_optimizer_add first";
    if (wrong)
        return mixp_context_fail(opt->ctx, MIXP_ERR_ARGUMENT, "mixp_optimizer_set_ema: %s", wrong);

    /* A frozen parameter has no average. */
    for (int64_t i = 0; i < opt->count; i++) {
        const mixp_tensor *p = opt->slot[i].param;
        if (opt->slot[i].grad || p->requires_grad) continue;
        return mixp_context_fail(opt->ctx, MIXP_ERR_ARGUMENT,
            "mixp_optimizer_set_ema: '%s' is frozen: call mixp_tensor_set_requires_grad(t, 1), or "
            "add only parameters that train",
            p->name);
    }
    if (opt->has_padding)
        return mixp_context_fail(opt->ctx, MIXP_ERR_ARGUMENT,
            "mixp_optimizer_set_ema: a parameter has rows with padding, and a swap would write the "
            "padding: use dense rows, or average the weights yourself");
    if (mixpi_check_uncaptured(opt->ctx, "mixp_optimizer_set_ema") != MIXP_OK)
        return MIXP_ERR_ORDER;
    return mixpi_need_weights(opt, "mixp_optimizer_set_ema");
}

/* Allocates tables for all parameters, and averages for those that have none. */
static mixp_result mixpi_ema_memory(mixp_optimizer *opt) {
    const size_t bytes = (size_t)opt->capacity * sizeof(mixp_param_row);
    for (int64_t i = 0; i < opt->count; i++) {
        mixpi_slot *slot = &opt->slot[i];
        if (!slot->ema)
            slot->ema = (float *)mixpi_opt_device(opt, (size_t)opt->rows[i].count * sizeof(float));
        if (!slot->ema) return MIXP_ERR_MEMORY;
    }
    if (opt->ema_room < opt->count) {
        mixp_param_row *rows = (mixp_param_row *)mixpi_opt_host(opt, bytes);
        mixp_param_row *device = (mixp_param_row *)mixpi_opt_device(opt, bytes);
        if (!rows || !device) return MIXP_ERR_MEMORY;
        opt->ema_rows = rows;
        opt->device_ema_rows = device;
        opt->ema_room = opt->capacity;
    }
    return MIXP_OK;
}

/* The master of a weight that the program wrote since the last step follows the weight. */
static mixp_result mixpi_ema_sync(mixp_optimizer *opt, int64_t i) {
    if (opt->slot[i].version == opt->slot[i].param->version) return MIXP_OK;
    return mixpi_master_sync(opt, i);
}

static mixp_result mixpi_do_optimizer_set_ema(mixp_optimizer *opt, double decay) {
    if (!opt) return MIXP_ERR_ARGUMENT;
    mixp_result r = mixpi_ema_check(opt, decay);
    if (r == MIXP_OK) r = mixpi_ema_memory(opt);
    for (int64_t i = opt->ema_count; r == MIXP_OK && i < opt->count; i++) {
        r = mixpi_ema_sync(opt, i);
        if (r == MIXP_OK) r = mixpi_ema_start(opt, i);
    }
    if (r != MIXP_OK) return r;
    for (int64_t i = 0; i < opt->count; i++) opt->ema_rows[i] = mixpi_ema_row(opt, i, decay);
    MIXPI_TRY(mixpi_upload(
        opt->ctx, opt->device_ema_rows, opt->ema_rows, (size_t)opt->count * sizeof *opt->ema_rows));
    opt->ema_count = opt->count;
    return MIXP_OK;
}

MIXPREC_API mixp_result mixp_optimizer_set_ema(mixp_optimizer *opt, double decay) {
    MIXPI_RETURN_INSIDE(opt ? opt->ctx : NULL, mixpi_do_optimizer_set_ema(opt, decay));
}

/* Can the averages and the weights be swapped? */
static mixp_result mixpi_swap_check(const mixp_optimizer *opt) {
    const char *wrong = NULL;
    if (!opt->ema_count) wrong = "there is no average: call mixp_optimizer_set_ema first";
    else if (!opt->swapped && opt->ema_count < opt->count)
        wrong =
            "parameters were added after mixp_optimizer_set_ema: call mixp_optimizer_set_ema again";
    else if (opt->ctx->capture.active)
        wrong = "a step is being captured; call mixp_capture_end first";
    else if (mixpi_stage(opt) != MIXPI_READY)
        wrong = "the optimizer is in the middle of a step; call mixp_scaler_update first";

    if (wrong)
        return mixp_context_fail(opt->ctx, MIXP_ERR_ORDER, "mixp_optimizer_swap_ema: %s", wrong);

    /* Another optimizer's master weight would copy the average. */
    for (int64_t i = 0; i < opt->ema_count && !opt->swapped; i++)
        if (opt->slot[i].param->own.optimizers > 1)
            return mixp_context_fail(opt->ctx, MIXP_ERR_ARGUMENT,
                "mixp_optimizer_swap_ema: another optimizer also has '%s', and its master weight "
                "would copy the average; use one optimizer",
                opt->slot[i].param->name);
    return MIXP_OK;
}

static mixp_result mixpi_shelf_memory(mixp_optimizer *opt) {
    for (int64_t i = 0; i < opt->ema_count; i++) {
        mixpi_slot *slot = &opt->slot[i];
        if (!slot->shelf) slot->shelf = mixpi_opt_device(opt, mixpi_bytes(slot->param));
        if (!slot->shelf) return MIXP_ERR_MEMORY;
    }
    return MIXP_OK;
}

/* The low copies follow at once: a graph reads them without a check. */
static mixp_result mixpi_swap_lows(mixp_optimizer *opt, mixp_tensor *p) {
    mixp_result r = MIXP_OK;
    for (int k = 0; k < 2 && r == MIXP_OK; k++) {
        if (!p->own.low[k]) continue;
        r = mixpi_convert_to(
            opt->ctx, mixpi_tensor_out(p->own.low[k], 0), mixpi_tensor_in(p), p->count);
        p->own.low_version[k] = p->version;
    }
    return r;
}

static mixp_result mixpi_swap_slot(mixp_optimizer *opt, int64_t i) {
    mixpi_slot *slot = &opt->slot[i];
    mixp_tensor *p = slot->param;
    const mixp_dtype dtype = p->dtype;
    mixp_result r = opt->swapped ? MIXP_OK : mixpi_ema_sync(opt, i);
    if (r == MIXP_OK && !opt->swapped)
        r = mixpi_convert_to(
            opt->ctx, mixpi_out_to(slot->shelf, dtype, 0), mixpi_tensor_in(p), p->count);
    if (r == MIXP_OK)
        r = mixpi_convert_to(opt->ctx, mixpi_tensor_out(p, 0),
            opt->swapped ? mixpi_in(slot->shelf, dtype) : mixpi_in(slot->ema, MIXP_F32), p->count);
    mixpi_note_write(p, "mixp_optimizer_swap_ema");
    slot->version = p->version;
    return r == MIXP_OK ? mixpi_swap_lows(opt, p) : r;
}

static mixp_result mixpi_do_optimizer_swap_ema(mixp_optimizer *opt) {
    if (!opt) return MIXP_ERR_ARGUMENT;
    MIXPI_TRY(mixpi_swap_check(opt));
    MIXPI_TRY(mixpi_crew_stop_alone(opt->ctx, mixpi_shelf_memory(opt)));
    if (!opt->swapped) MIXPI_TRY(MIXPI_SHARDS(opt, average(opt)));
    for (int64_t i = 0; i < opt->ema_count; i++) MIXPI_TRY(mixpi_swap_slot(opt, i));
    opt->swapped = !opt->swapped;
    opt->ctx->training.averaged += opt->swapped ? 1 : -1;
    return MIXP_OK;
}

MIXPREC_API mixp_result mixp_optimizer_swap_ema(mixp_optimizer *opt) {
    MIXPI_RETURN_INSIDE(opt ? opt->ctx : NULL, mixpi_do_optimizer_swap_ema(opt));
}
