#pragma once
#include "../walk/gradients.c"
#include "add.c"
/* --- gradients that come one after another --------------------------------------------------- */

/* Makes the memory that keeps a fed gradient: f32 for a view of f64. */
static mixp_result mixpi_feed_memory(const mixp_optimizer *opt, mixpi_slot *slot) {
    const mixp_dtype dtype = slot->grad->dtype == MIXP_F64 ? MIXP_F32 : slot->grad->dtype;
    mixp_tensor *kept = mixpi_twin(slot->grad, dtype);
    if (!kept) return MIXP_ERR_MEMORY;
    kept->data = mixpi_opt_device(opt, (size_t)kept->count * mixp_dtype_size(dtype));
    if (!kept->data) return MIXP_ERR_MEMORY;
    slot->from = slot->grad;
    slot->grad = kept;
    return MIXP_OK;
}

static mixp_result mixpi_do_feed(mixp_optimizer *opt, const mixp_tensor *param) {
    const char *wrong = NULL;
    int64_t i = 0;
    if (!opt || !mixpi_is_tensor(param)) return MIXP_ERR_ARGUMENT;
    while (i < opt->count && opt->slot[i].param != param) i++;
    if (i == opt->count) wrong = "this optimizer does not have the parameter";
    else if (!opt->slot[i].grad) wrong = "it was added without a gradient of yours to read";
    else if (mixpi_crew_of(opt->ctx)) wrong = "ranks do not exchange fed gradients";
    if (wrong)
        return mixp_context_fail(
            opt->ctx, MIXP_ERR_ARGUMENT, "mixp_optimizer_feed '%s': %s", param->name, wrong);
    if (mixpi_stage(opt) != MIXPI_READY)
        return mixp_context_fail(opt->ctx, MIXP_ERR_ORDER,
            "mixp_optimizer_feed '%s': the gradients of this step are unscaled or stepped; call "
            "mixp_scaler_update first",
            param->name);

    /* The first gradient of a step is copied; further ones, of micro-batches, are added. */
    mixpi_slot *slot = &opt->slot[i];
    if (!slot->from) MIXPI_TRY(mixpi_feed_memory(opt, slot));
    if (slot->fed && slot->from->dtype == MIXP_F64)
        return mixp_context_fail(opt->ctx, MIXP_ERR_DTYPE,
            "mixp_optimizer_feed '%s': a second gradient of f64 in one step; add them up in your "
            "buffer, and feed their sum",
            param->name);
    const mixp_out to = mixpi_tensor_out(slot->grad, slot->fed);
    MIXPI_TRY(mixpi_add_into(opt->ctx, to, mixpi_tensor_in(slot->from), param->count));
    slot->grad->own.mark.kind = MIXPI_MARK_NONE;
    slot->grad->version++;
    slot->fed = 1;
    return MIXP_OK;
}

MIXPREC_API mixp_result mixp_optimizer_feed(mixp_optimizer *opt, const mixp_tensor *param) {
    MIXPI_RETURN_INSIDE(opt ? opt->ctx : NULL, mixpi_do_feed(opt, param));
}
