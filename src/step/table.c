#pragma once
#include "../optimizers/add.c"
/* ==== 11. STEP (implementation) ======================================================= */

/* --- the table of parameters -------------------------------------------------------------- */

static mixp_tensor *mixpi_slot_grad(const mixpi_slot *slot) {
    if (slot->from && !slot->fed) return NULL;
    return slot->grad ? slot->grad : slot->param->grad;
}

/* A parameter's row in its current state. */
static mixp_param_row mixpi_row_now(const mixp_optimizer *opt, int64_t i) {
    const mixp_tensor *p = opt->slot[i].param, *g = mixpi_slot_grad(&opt->slot[i]);
    mixp_param_row now = opt->rows[i];
    now.active = !g ? 0 : opt->zero_grad && opt->slot[i].grad ? 2 : 1;
    if (g) {
        now.grad = g->data;
        now.grad_dtype = g->dtype;
    }
    now.low_f16 = p->own.low[0] ? (mixp_f16 *)p->own.low[0]->data : NULL;
    now.low_bf16 = p->own.low[1] ? (mixp_bf16 *)p->own.low[1]->data : NULL;
    return now;
}

/* Sets the rows of Muon's passes over parameter i. */
static void mixpi_muon_rows_of(const mixp_optimizer *opt, int64_t i) {
    const mixp_param_row *row = &opt->rows[i];
    const mixp_out *x = &opt->muon->x;
    mixp_param_row *pass = &opt->muon->rows[i * MIXPI_MUON_PASSES];
    mixp_param_row *first = &pass[MIXPI_MUON_MOMENTUM], *unit = &pass[MIXPI_MUON_UNIT];
    mixp_param_row *last = &pass[MIXPI_MUON_LAST];
    *first = *last = *row;
    memset(unit, 0, sizeof *unit);
    unit->weight = unit->grad = first->weight = last->grad = x->data;
    unit->weight_dtype = unit->grad_dtype = first->weight_dtype = last->grad_dtype = x->dtype;
    unit->count = row->count;
    unit->active = last->active = 1;
    first->missed = last->missed = NULL;
    first->master = last->m = NULL;
    first->master_dtype = last->m_dtype = MIXP_F32;
    first->low_f16 = NULL;
    first->low_bf16 = NULL;
    last->m_scale = NULL;
}

static mixp_result mixpi_muon_refresh(mixp_optimizer *opt) {
    size_t n = (size_t)opt->count * MIXPI_MUON_PASSES;
    for (int64_t i = 0; i < opt->count; i++) mixpi_muon_rows_of(opt, i);
    return mixpi_upload(
        opt->ctx, opt->muon->device_rows, opt->muon->rows, n * sizeof *opt->muon->rows);
}

/* Fails if a captured step would have to refresh a master weight: each replay would recompute the
 * masters from the weights, and lose their extra precision. */
static mixp_result mixpi_check_recorded_refresh(const mixp_optimizer *opt, const char *who) {
    for (int64_t i = 0; i < opt->count; i++) {
        const mixp_tensor *p = opt->slot[i].param;
        if (opt->slot[i].version == p->version) continue;
        if (mixpi_ema_is_new(opt, i))
            return mixp_context_fail(opt->ctx, MIXP_ERR_ORDER,
                "%s: '%s' was written since mixp_optimizer_set_ema, and a captured step cannot "
                "restart its average: run an ordinary step first",
                who, p->name);

        /* A weight below f32 has a master, which would be refreshed. */
        if (!mixpi_is_low(p->dtype) || opt->no_master) continue;
        if (p->own.optimizers > 1)
            return mixp_context_fail(opt->ctx, MIXP_ERR_ORDER,
                "%s: '%s' has %d optimizers; a captured step cannot copy one optimizer's update "
                "into another's master weight: use one optimizer, or set no_master",
                who, p->name, p->own.optimizers);
        return mixp_context_fail(opt->ctx, MIXP_ERR_ORDER,
            "%s: '%s' was written since the last step, and a captured step cannot copy the new "
            "values into the master weight: run an ordinary step first",
            who, p->name);
    }
    return MIXP_OK;
}

/* Warns of a group after group 0 to which no parameter was added: mixp_optimizer_add adds to the
 * last group. */
static void mixpi_warn_of_empty_group(const mixp_optimizer *opt) {
    int64_t i;
    for (int g = 1; g < opt->plan.n_groups; g++) {
        for (i = 0; i < opt->count && opt->rows[i].group != g; i++) continue;
        if (i < opt->count) continue;
        mixpi_warn(opt->ctx,
            "group %d of an optimizer has no parameter: open a group with mixp_optimizer_add_group "
            "before you add its parameters",
            g);
    }
}

/* Warns of a master of 16 or 8 bits that loses its further digits in each step. */
static void mixpi_warn_of_lost_digits(mixp_optimizer *opt, int64_t i) {
    mixpi_slot *slot = &opt->slot[i];
    if (!opt->rows[i].master || opt->rows[i].master_dtype == MIXP_F32) return;
    slot->written = slot->written_for == opt->stepped ? slot->written + 1 : 1;
    slot->written_for = opt->stepped + 1;
    if (slot->written < 4) return;
    mixpi_warn(opt->ctx,
        "'%.60s' is written before each step, and its master of %d bits then loses all digits that "
        "the weight lacks: small updates are lost. Set states.master to MIXP_MASTER_F32, which "
        "keeps them",
        slot->param->name, opt->states.master == MIXP_MASTER_16BIT ? 16 : 8);
}

/* Is half a unit in the last place of most of a weight's elements more than `rate`? Looks at 4,096
 * elements. */
static int mixpi_is_too_coarse(const mixp_tensor *t, double rate) {
    const double half = t->dtype == MIXP_BF16 ? 1.0 / 512.0 : 1.0 / 4096.0;
    const int64_t step = t->count / 4096 + 1;
    int64_t coarse = 0, seen = 0;
    for (int64_t i = 0; i < t->count; i += step, seen++)
        coarse += fabs((double)mixp_get(mixpi_tensor_in(t), i)) * half > rate;
    return 2 * coarse > seen;
}

/* Warns, at the first step, of a weight without a master whose updates are too small to move it.
 * Only of rules whose update is at most about the rate, and of weights that the host can read. */
static void mixpi_warn_of_lost_updates(const mixp_optimizer *opt) {
    const mixp_optimizer_kind kind = opt->plan.kind;
    const int bounded =
        kind != MIXP_OPTIMIZER_SGD && kind != MIXP_OPTIMIZER_RMSPROP && kind != MIXP_OPTIMIZER_MUON;
    if (!opt->no_master || !bounded || opt->stepped || opt->ctx->device->download) return;
    for (int64_t i = 0; i < opt->count; i++) {
        const mixp_tensor *t = opt->slot[i].param;
        const double rate = opt->plan.groups[opt->rows[i].group].lr;
        if (!mixpi_is_low(t->dtype) || !(rate > 0.0) || !mixpi_is_too_coarse(t, rate)) continue;
        mixpi_warn(opt->ctx,
            "'%.60s' is %s without a master weight, and updates of the rate %g are too small for "
            "most of its elements: they round away. Set no_master to 0; states.master makes "
            "masters smaller",
            t->name, mixp_dtype_name(t->dtype), rate);
        return;
    }
}

/* Reports an optimizer without a gradient. */
static mixp_result mixpi_nothing_to_step(const mixp_optimizer *opt, const char *who) {
    if (!opt->count)
        return mixp_context_fail(opt->ctx, MIXP_ERR_ORDER,
            "%s: no parameter was added to this optimizer: call mixp_optimizer_add for each "
            "parameter, before the loop",
            who);
    return mixp_context_fail(opt->ctx, MIXP_ERR_ORDER,
        "%s: no parameter of this optimizer has a gradient; %s", who,
        opt->cleared_in == opt->ctx->generation
            ? "mixp_zero_grad has cleared them after mixp_backward: call mixp_zero_grad before "
              "mixp_backward"
            : "call mixp_backward first, on a loss that depends on a parameter");
}

/* Brings the table up to date: which parameters have a gradient, and where. In steady state nothing
 * changes and nothing is sent. With graphs, now or at the last step, the table is always sent: each
 * graph has its own table, which stays on the device. MIXP_ERR_ORDER if there is no gradient. */
static mixp_result mixpi_refresh(mixp_optimizer *opt, const char *who) {
    mixp_context *ctx = opt->ctx;
    if (opt->swapped) return mixpi_need_weights(opt, who);
    if (ctx->capture.active && mixpi_check_recorded_refresh(opt, who) != MIXP_OK)
        return MIXP_ERR_ORDER;

    /* Which rows have changed? Padding may differ although the fields agree: one more upload. */
    const int brought = ctx->capture.active || ctx->capture.graphs;
    uint64_t graded = 1469598103934665603u;
    int64_t active = 0;
    if (brought) opt->rows_changed = 1;
    for (int64_t i = 0; i < opt->count; i++) {
        const mixp_param_row now = mixpi_row_now(opt, i);
        active += now.active != 0;
        graded = (graded ^ (uint64_t)(now.active != 0)) * 1099511628211u;
        if (memcmp(&opt->rows[i], &now, sizeof now)) opt->rows_changed = 1;
        opt->rows[i] = now;
        if (opt->slot[i].version == opt->slot[i].param->version) continue;
        const mixp_result r = mixpi_master_sync(opt, i);
        if (r != MIXP_OK) return mixpi_crew_stop(ctx, r);
        mixpi_warn_of_lost_digits(opt, i);
    }
    if (!active) return mixpi_nothing_to_step(opt, who);

    opt->plan.graded = graded >> 11;
    opt->plan.guard = mixpi_watcher_of(ctx) ? ctx->watcher->mark(ctx) : 0;
    if (!opt->rows_changed) return MIXP_OK;
    mixpi_warn_of_empty_group(opt);
    mixpi_warn_of_lost_updates(opt);

    /* Send the tables: Muon's, the ranks', the optimizer's own. */
    mixp_result r = opt->muon ? mixpi_muon_refresh(opt) : MIXP_OK;
    if (r == MIXP_OK) r = MIXPI_SHARDS(opt, send(opt));
    if (r == MIXP_OK)
        r = mixpi_upload(ctx, opt->device_rows, opt->rows, (size_t)opt->count * sizeof *opt->rows);
    if (r == MIXP_OK) opt->rows_changed = brought;
    return mixpi_crew_stop(ctx, r);
}

/* Changes whenever the library writes a gradient, or mixp_tensor_touch declares a write. */
static uint64_t mixpi_grad_versions(const mixp_optimizer *opt) {
    uint64_t sum = 0;
    for (int64_t i = 0; i < opt->count; i++) {
        const mixp_tensor *g = mixpi_slot_grad(&opt->slot[i]);
        if (g) sum += g->version;
    }
    return sum;
}

/* The table, as kernels see it, of the gradients to look at. */
static const mixp_param_row *mixpi_rows_to_look_at(const mixp_optimizer *o) {
    return o->looks_own ? o->device_own_rows : o->device_rows;
}

static mixp_result mixpi_opt_look(mixp_optimizer *o, const float *scale, int unscale,
    const mixp_step_plan *plan, mixp_scaler_state *s) {
    mixp_grad_stats_args k = MIXPI_ZERO;
    k.rows = mixpi_rows_to_look_at(o);
    k.count = o->count;
    k.scale = scale;
    k.unscale = unscale;
    k.step = o->state;
    k.plan = plan;
    k.scaler = s;
    return MIXPI_STEP_RUN(o, grad_stats, &k);
}

static mixp_result mixpi_opt_prepare(mixp_optimizer *o, mixp_scaler_state *s) {
    mixp_prepare_args k = MIXPI_ZERO;
    k.plan = &o->plan;
    k.step = o->state;
    k.scaler = s;
    return MIXPI_STEP_RUN(o, prepare, &k);
}
