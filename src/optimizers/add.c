#pragma once
#include "muon_memory.c"
#include "read.c"
/* --- adding parameters, clearing gradients -------------------------------------------------- */

MIXPI_SELDOM
static mixp_result mixpi_do_optimizer_add(
    mixp_optimizer *opt, mixp_tensor *param, mixp_tensor *grad, int64_t width) {
    if (!opt) return MIXP_ERR_ARGUMENT;
    if (!mixpi_is_tensor(param) || (grad && !mixpi_is_tensor(grad)))
        return mixp_context_fail(opt->ctx, MIXP_ERR_ARGUMENT,
            "mixp_optimizer_add: param is NULL, or a tensor is from an "
            "earlier step");
    mixp_result r = mixpi_add_check(opt, param, grad, width);
    if (r == MIXP_OK && opt->count == opt->capacity) r = mixpi_optimizer_grow(opt);
    if (r != MIXP_OK) return r;

    /* Make its row in the last group. */
    mixp_param_row *row = &opt->rows[opt->count];
    memset(row, 0, sizeof *row);
    row->weight = param->data;
    row->weight_dtype = param->dtype;
    row->count = param->count;
    row->group = opt->plan.n_groups - 1;
    row->tensor = (uint64_t)param->own.id;
    row->width = width;
    row->pitch = width ? param->shape[param->rank - 1] : 0;
    mixpi_row_kinds(opt, param, row);
    if (opt->muon) r = mixpi_muon_add(opt, param, row);
    if (r != MIXP_OK) return r;

    /* Make its states and its master weight. */
    opt->slot[opt->count].param = param;
    opt->slot[opt->count].grad = grad;
    const int64_t joined_at = mixp_optimizer_applied(opt);
    r = opt->shards ? opt->ctx->crew->place(opt, row, joined_at)
                    : mixpi_row_memory(opt, row, joined_at);
    if (r == MIXP_OK) r = mixpi_master_sync(opt, opt->count);

    if (r == MIXP_OK) mixpi_sorted_add(&opt->params, param);
    if (r == MIXP_OK && grad) mixpi_sorted_add(&opt->grads, grad);
    if (r == MIXP_OK) opt->rows_changed = 1;
    if (r == MIXP_OK && width) opt->has_padding = 1;
    if (r == MIXP_OK && mixpi_row_is_small(row)) opt->plan.small_states = 1;
    opt->count += r == MIXP_OK;
    param->own.optimizers += r == MIXP_OK;
    if (opt->shards) opt->ctx->crew->placed(opt, param, r);
    return r;
}

MIXPREC_API mixp_result mixp_optimizer_add(
    mixp_optimizer *opt, mixp_tensor *param, mixp_tensor *grad) {
    MIXPI_RETURN_INSIDE(opt ? opt->ctx : NULL, mixpi_do_optimizer_add(opt, param, grad, 0));
}

MIXPREC_API mixp_result mixp_optimizer_add_rows(
    mixp_optimizer *opt, mixp_tensor *param, mixp_tensor *grad, int64_t width) {
    const int is_there = mixpi_is_tensor(param);
    const int64_t pitch = is_there && param->rank ? param->shape[param->rank - 1] : 0;
    if (opt && is_there && (width < 1 || width > pitch))
        return mixp_context_fail(opt->ctx, MIXP_ERR_SHAPE,
            "mixp_optimizer_add_rows: '%s' has rows of %.0f elements; width is %.0f and must be 1 "
            "to that number",
            param->name, (double)pitch, (double)width);
    MIXPI_RETURN_INSIDE(
        opt ? opt->ctx : NULL, mixpi_do_optimizer_add(opt, param, grad, width < pitch ? width : 0));
}

MIXPREC_API mixp_result mixp_optimizer_add_all(mixp_optimizer *opt, const char *pattern) {
    mixp_result r = MIXP_OK;
    mixp_tensor *t;
    int64_t i = 0;
    int found = 0;
    if (!opt) return MIXP_ERR_ARGUMENT;
    while (pattern && r == MIXP_OK && (t = mixpi_param_next(opt->ctx, pattern, &i)) != NULL) {
        if (!t->requires_grad || t->own.optimizers) continue;
        r = mixp_optimizer_add(opt, t, NULL);
        found = 1;
    }
    if (found) return r;

    /* Nothing to add: does the pattern match no name, or no free parameter? */
    i = 0;
    if (pattern && !mixpi_param_next(opt->ctx, pattern, &i))
        return mixpi_fits_none(opt->ctx, "mixp_optimizer_add_all", pattern);
    return mixp_context_fail(opt->ctx, MIXP_ERR_ARGUMENT,
        "mixp_optimizer_add_all: no trainable parameter without an optimizer has a name that "
        "matches '%s'",
        pattern ? pattern : "NULL");
}

MIXPREC_API mixp_result mixp_zero_grad(mixp_optimizer *opt) {
    mixp_result r = MIXP_OK;
    if (!opt) return MIXP_ERR_ARGUMENT;
    if (opt->ctx->walk.walked_in == opt->ctx->generation) opt->cleared_in = opt->ctx->generation;
    for (int64_t i = 0; i < opt->count && r == MIXP_OK; i++) {
        mixp_tensor *view = opt->slot[i].grad;
        opt->slot[i].fed = 0;
        if (!view) {
            opt->slot[i].param->grad = NULL;
            continue;
        }
        r = mixpi_device_zero(opt->ctx, view->data, mixpi_bytes(view));
        view->own.mark.kind = MIXPI_MARK_NONE;
    }
    if (opt->stage == MIXPI_UNSCALED) opt->stage = MIXPI_READY;
    opt->clipped = 0;
    opt->views_summed = 0;
    mixpi_crew_forget(opt->ctx);
    return r;
}
