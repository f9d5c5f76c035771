#pragma once
#include "muon.c"
#include "tally.c"
#include "average.c"
#include "restore.c"
/* --- stepping ----------------------------------------------------------------------------- */

/* Fails if operators were applied without mixp_step_begin: activations would accumulate. A program
 * that applies none of mixprec's operators need not call mixp_step_begin. */
static mixp_result mixpi_need_begin(const mixp_optimizer *opt, const char *who) {
    const mixp_context *ctx = opt->ctx;
    if (opt->stepped_in != ctx->generation) return MIXP_OK;
    if (opt->stepped_after == ctx->tape.calls) return MIXP_OK;
    return mixp_context_fail(opt->ctx, MIXP_ERR_ORDER,
        "%s: operators were applied since the last update, but mixp_step_begin was not called: "
        "activations would accumulate; call mixp_step_begin first in every step",
        who);
}

/* The gradient of a trained parameter that belongs to no optimizer; otherwise NULL. */
static mixp_tensor *mixpi_lone_grad(const mixp_tensor *t) {
    if (!t->own.is_param || t->own.optimizers || !t->requires_grad) return NULL;
    return t->grad;
}

/* Notes, after the update kernel, what it has written, and what the checks of the next step compare
 * with. */
static void mixpi_step_done(mixp_optimizer *opt) {
    /* Weights have changed. The kernel wrote those of this rank with their low copies, or skipped
     * all of them: fresh copies stay fresh in both cases. autocast renews a stale copy. */
    for (int64_t i = 0; i < opt->count; i++) {
        mixpi_slot *slot = &opt->slot[i];
        mixp_tensor *p = slot->param;
        if (!opt->rows[i].active) continue;
        for (int k = 0; k < 2 && mixpi_is_own(opt, i); k++)
            if (p->own.low[k] && p->own.low_version[k] == p->version) p->own.low_version[k]++;
        mixpi_note_write(p, "an optimizer's step");
        slot->fed = 0;
        slot->version = p->version;

        /* zero_grad has cleared the gradient. */
        if (!opt->zero_grad) continue;
        if (slot->grad) slot->grad->own.mark.kind = MIXPI_MARK_NONE;
        else p->grad = NULL;
    }

    /* The next step needs new operators, and no lone gradient may grow until then. */
    opt->stepped++;
    opt->stepped_in = opt->ctx->training.updated_in = opt->ctx->generation;
    opt->stepped_after = opt->ctx->tape.calls;
    opt->ctx->capture.update_recorded |= opt->ctx->capture.active;
    for (const mixp_tensor *t = opt->ctx->tensors; t; t = t->own.next) {
        mixp_tensor *g = mixpi_lone_grad(t);
        if (!g) continue;
        g->own.walks_then = g->own.walks;
        g->own.others_then = g->version - g->own.walks + 1;
    }
}

/* Asks the program's schedule for the factors of the steps that the device may be at: the step that
 * the host last saw, and those that it has issued since. */
MIXPI_SELDOM
static mixp_result mixpi_factors_ask(mixp_optimizer *opt, const char *who) {
    mixp_step_plan *plan = &opt->plan;
    mixp_step_state s;
    if (opt->ctx->capture.active)
        return mixp_context_fail(opt->ctx, MIXP_ERR_ORDER,
            "%s: a captured step cannot call schedule.factor: use another schedule, or do not "
            "capture",
            who);

    /* Where is the device? Waits for it if it lags more steps than there are factors. */
    mixp_result r = mixpi_peek(opt->ctx, &s, opt->state, offsetof(mixp_step_state, update));
    if (r == MIXP_OK && (opt->issued < s.steps || opt->issued - s.steps >= MIXPI_FACTORS)) {
        r = mixpi_download(opt->ctx, &s, opt->state, offsetof(mixp_step_state, update));
        opt->issued = s.steps;
    }
    if (r != MIXP_OK) return r;

    /* A factor for each step from there to the last one. */
    plan->factors_from = s.applied;
    for (int64_t i = 0; i <= opt->issued - s.steps; i++) {
        const double factor = plan->schedule.factor(plan->schedule.user, s.applied + i);
        if (!mixpi_is_at_least_0(factor))
            return mixp_context_fail(opt->ctx, MIXP_ERR_ARGUMENT,
                "%s: schedule.factor returned %g for step %.0f: return a finite factor of at least "
                "0",
                who, factor, (double)(s.applied + i));
        plan->factors[i] = factor;
    }
    return MIXP_OK;
}

static mixp_result mixpi_need_factors(mixp_optimizer *opt, const char *who) {
    if (opt->plan.schedule.kind != MIXP_SCHEDULE_FUNCTION) return MIXP_OK;
    return mixpi_factors_ask(opt, who);
}

/* Warns, at step 20, if all rates are 0: a rise from 0 is over by then, with its skipped steps. */
static void mixpi_warn_of_no_rate(const mixp_optimizer *opt) {
    for (int g = 0; g < opt->plan.n_groups; g++)
        if (opt->plan.groups[g].lr > 0.0) return;
    mixpi_warn(opt->ctx,
        "the learning rate of an optimizer is 0, so its weights stay as they are: set lr, and "
        "write 1.0 / 1000, because 1/1000 is 0 in C");
}

static int mixpi_holds_zeros(const mixp_tensor *t) {
    int64_t i = 0;
    while (t->data && i < t->count && fabs((double)mixp_get(mixpi_tensor_in(t), i)) <= 0.0) i++;
    return i == t->count;
}

/* Warns, at step 20, of uninitialised weights: if the weights of two layers in a row are 0, the
 * gradients of both are 0. Looks at memory of the host only. */
static void mixpi_warn_of_zeros(const mixp_optimizer *opt) {
    const mixp_tensor *first = NULL;
    if (opt->ctx->device->download) return;
    for (int64_t i = 0; i < opt->count; i++) {
        const mixp_tensor *param = opt->slot[i].param, *grad = opt->slot[i].grad;
        if (!grad) grad = param->own.grad;
        if (param->rank < 2 || !grad || !mixpi_holds_zeros(param) || !mixpi_holds_zeros(grad))
            continue;
        if (first) {
            mixpi_warn(opt->ctx,
                "the weights '%.60s' and '%.60s' are still 0 at step 20 of their optimizer, and so "
                "are their gradients: initialise weights before the loop, with "
                "mixp_init_kaiming_uniform or another mixp_init function",
                first->name, param->name);
            return;
        }
        first = param;
    }
}

/* Warns, at step 100, of a parameter that no walk has reached. */
static void mixpi_warn_of_unreached(const mixp_optimizer *opt) {
    for (int64_t i = 0; i < opt->count; i++) {
        const mixpi_slot *slot = &opt->slot[i];
        if (slot->grad || slot->from || slot->param->own.grad || !slot->param->requires_grad)
            continue;
        mixpi_warn(opt->ctx,
            "the parameter '%.60s' has had no gradient in 99 steps of its optimizer: no loss has "
            "depended on it so far. Was its variable set to another tensor? Use mixp_write to "
            "change its values, and freeze what is not used",
            slot->param->name);
    }
}

/* All checks of a step, before anything is changed. */
static mixp_result mixpi_need_all(mixp_optimizer *opt, const char *who) {
    MIXPI_TRY(mixpi_need_begin(opt, who));
    if (opt->stepped == 19) mixpi_warn_of_no_rate(opt);
    if (opt->stepped == 19) mixpi_warn_of_zeros(opt);
    if (opt->stepped == 99) mixpi_warn_of_unreached(opt);

    /* A gradient that walks add to, no optimizer uses and nothing clears grows without bound. */
    for (const mixp_tensor *t = opt->ctx->tensors; t; t = t->own.next) {
        const mixp_tensor *g = mixpi_lone_grad(t);
        if (!g || g->own.walks == g->own.walks_then) continue;
        if (g->version - g->own.walks + 1 != g->own.others_then) continue;
        return mixp_context_fail(opt->ctx, MIXP_ERR_ORDER,
            "%s: no optimizer has the parameter '%s', and its gradient grows from step to step: "
            "add the parameter with mixp_optimizer_add, or freeze it with "
            "mixp_tensor_set_requires_grad(t, 0)",
            who, t->name);
    }

    MIXPI_TRY(mixpi_need_factors(opt, who));

    /* A spike rule for the loss needs a loss from this step. */
    if (!((int)opt->plan.spike.of & MIXP_SPIKE_LOSS)) return MIXP_OK;
    if (opt->plan.loss && opt->loss_of == opt->ctx->generation) return MIXP_OK;
    return mixp_context_fail(opt->ctx, MIXP_ERR_ORDER,
        "%s: the spike rule needs this step's loss; call mixp_optimizer_set_loss before the step",
        who);
}

/* Looks at all gradients. With ranks, also combines what all of them have found. */
static mixp_result mixpi_crew_look(mixp_optimizer *opt, const float *scale, int unscale,
    const mixp_step_plan *plan, mixp_scaler_state *s) {
    return mixpi_crew_of(opt->ctx) ? opt->ctx->crew->look(opt, scale, unscale, plan, s)
                                   : mixpi_opt_look(opt, scale, unscale, plan, s);
}

/* Decides without a look whether the step is applied. With ranks, all decide alike. */
static mixp_result mixpi_crew_prepare(mixp_optimizer *opt, mixp_scaler_state *s) {
    return mixpi_crew_of(opt->ctx) ? opt->ctx->crew->prepare(opt, s) : mixpi_opt_prepare(opt, s);
}

/* Applies one step, after mixpi_refresh. scaler NULL: applies the gradients unchecked. If it fails,
 * the caller stops the other ranks, which are on their way to the next sum. */
static mixp_result mixpi_step(mixp_optimizer *opt, mixp_scaler *scaler, const mixpi_scaling *is) {
    mixp_context *ctx = opt->ctx;
    mixp_step_plan *plan = &opt->plan;
    mixp_scaler_state *s = scaler ? scaler->state : NULL;
    const int unscaled = mixpi_stage(opt) == MIXPI_UNSCALED;

    /* Allocate the memory of the step before any change. On a device with its own memory, only
     * Muon's products need any. */
    MIXPI_TRY(MIXPI_CREW(ctx, plan(opt)));
    MIXPI_TRY(mixpi_muon_scratch(opt));
    if (!ctx->device->download &&
        !mixpi_context_scratch(ctx, mixpi_chunk_room(opt->rows, opt->count)))
        return MIXP_ERR_MEMORY;

    /* A clip or a count of before holds only for the same gradients. */
    if (opt->clipped_versions != mixpi_grad_versions(opt)) opt->clipped = 0;
    if (!unscaled) opt->tallied = 0;

    /* Enter in the plan what this step does with its gradients. */
    plan->seed = ctx->seed;
    plan->check = scaler != NULL;
    plan->unscaled = is->is_true;
    plan->age = scaler && !is->is_true ? (int32_t)(scaler->scales - is->at) : 0;
    plan->noted = scaler && unscaled;
    plan->look_only = 0;
    plan->gathered =
        scaler || opt->clipped || plan->max_norm > 0.0 || ((int)plan->spike.of & MIXP_SPIKE_NORM);

    /* A sampled step counts its gradients. */
    mixp_result r = mixpi_tally_step(opt);
    const int tallied = opt->tallied;
    opt->tallied = 0;
    if (r != MIXP_OK) return r;

    /* The device decides, after a look if the decision needs one; the update, the averages and the
     * counts follow its decision. */
    r = mixpi_buffers_check(opt);
    if (r == MIXP_OK && (!plan->gathered || opt->clipped)) r = mixpi_crew_prepare(opt, s);
    else if (r == MIXP_OK)
        r = mixpi_crew_look(opt, scaler ? mixpi_scale_address(scaler, is) : NULL, 0, plan, s);
    if (r != MIXP_OK) mixpi_buffers_forget(opt);
    if (r == MIXP_OK) r = mixpi_opt_update(opt, tallied);
    if (r == MIXP_OK) r = mixpi_opt_average(opt);
    if (r == MIXP_OK && tallied) r = mixpi_tally_post(opt);
    if (r == MIXP_OK) r = MIXPI_SHARDS(opt, gather(opt));
    if (r == MIXP_OK) mixpi_step_done(opt);
    opt->issued = r == MIXP_OK && opt->issued >= 0 ? opt->issued + 1 : -1;

    opt->clipped = 0;
    opt->views_summed = 0;
    plan->loss = NULL;
    return r;
}

static mixp_result mixpi_do_clip_grad_norm(mixp_optimizer *opt, double max_norm) {
    if (!opt) return MIXP_ERR_ARGUMENT;
    if (!mixpi_is_at_least_0(max_norm) && mixp_bits_of_f64(max_norm) != 0x7FF0000000000000u)
        return mixp_context_fail(opt->ctx, MIXP_ERR_ARGUMENT,
            "mixp_clip_grad_norm: max_norm %g must be at least 0; INFINITY only measures",
            max_norm);
    if (!(max_norm > 0.0))
        mixpi_warn(opt->ctx,
            "mixp_clip_grad_norm: max_norm is 0, so all gradients become 0: pass the largest norm "
            "to allow, such as 1.0, or INFINITY to measure only");
    mixp_result r = mixpi_need_true(opt, "mixp_clip_grad_norm", "mixp_scaler_unscale first");
    if (r == MIXP_OK) r = mixpi_refresh(opt, "mixp_clip_grad_norm");

    /* One pass gathers the norm, another scales. */
    if (r == MIXP_OK) r = mixpi_crew_look(opt, NULL, 0, NULL, NULL);
    if (r == MIXP_OK) r = mixpi_crew_stop(opt->ctx, mixpi_opt_clip(opt, max_norm));
    opt->clip_norm = max_norm;
    opt->clipped = r == MIXP_OK;
    /* Unscaled views stay means until the update. */
    if (r == MIXP_OK && mixpi_stage(opt) != MIXPI_UNSCALED)
        opt->views_summed = opt->ctx->generation;

    /* An optimizer that shares a gradient must look at it again. */
    for (int64_t i = 0; i < opt->count; i++) {
        mixp_tensor *g = mixpi_slot_grad(&opt->slot[i]);
        if (g) g->version++;
    }
    if (r == MIXP_OK && opt->shards) opt->ctx->crew->in_pieces(opt);
    opt->clipped_versions = mixpi_grad_versions(opt);
    return r;
}

MIXPREC_API mixp_result mixp_clip_grad_norm(mixp_optimizer *opt, double max_norm) {
    MIXPI_RETURN_INSIDE(opt ? opt->ctx : NULL, mixpi_do_clip_grad_norm(opt, max_norm));
}

static mixp_result mixpi_do_optimizer_step(mixp_optimizer *opt) {
    static const mixpi_scaling as_they_are = { 1, 0 };
    if (!opt) return MIXP_ERR_ARGUMENT;
    if (mixpi_stage(opt) == MIXPI_UNSCALED)
        return mixp_context_fail(opt->ctx, MIXP_ERR_ORDER,
            "mixp_optimizer_step: mixp_scaler_unscale has checked these gradients; call "
            "mixp_scaler_step instead, which skips the step if one is not finite");
    MIXPI_TRY(mixpi_need_true(opt, "mixp_optimizer_step", "mixp_scaler_step instead"));
    MIXPI_TRY(mixpi_need_all(opt, "mixp_optimizer_step"));
    MIXPI_TRY(mixpi_refresh(opt, "mixp_optimizer_step"));
    MIXPI_TRY(mixpi_crew_stop(opt->ctx, mixpi_step(opt, NULL, &as_they_are)));

    /* Without a scaler the step is the update. */
    MIXPI_TRY(mixpi_crew_stop(opt->ctx, mixpi_buffers_step(opt)));
    MIXPI_TRY(MIXPI_QUANTISER(opt->ctx, advance(opt->ctx)));
    return mixpi_crew_stop_alone(opt->ctx, MIXPI_WATCHER(opt->ctx, updated(opt->ctx, NULL)));
}

MIXPREC_API mixp_result mixp_optimizer_step(mixp_optimizer *opt) {
    MIXPI_RETURN_INSIDE(opt ? opt->ctx : NULL, mixpi_do_optimizer_step(opt));
}

/* --- stepping with a scaler ---------------------------------------------------------------- */

/* Checks that `who` may work on opt, finds the state of its gradients, and updates the table. */
static mixp_result mixpi_begin_scaled(
    mixp_scaler *scaler, mixp_optimizer *opt, const char *who, mixpi_scaling *is) {
    if (opt->ctx != scaler->ctx)
        return mixp_context_fail(scaler->ctx, MIXP_ERR_ARGUMENT,
            "%s: scaler and optimizer belong to different contexts", who);
    const int stage = mixpi_stage(opt);
    if (opt->scaler && opt->scaler != scaler && stage != MIXPI_READY)
        return mixp_context_fail(scaler->ctx, MIXP_ERR_ORDER,
            "%s: another scaler works on this optimizer; update it first", who);
    if (stage == MIXPI_STEPPED)
        return mixp_context_fail(scaler->ctx, MIXP_ERR_ORDER,
            "%s: mixp_scaler_step was called already; call mixp_scaler_update first", who);

    /* Did this scaler scale the gradients? Then masters follow weights that the program wrote. */
    MIXPI_TRY(mixpi_scaling_of(scaler, opt, who, is));
    return mixpi_refresh(opt, who);
}

/* Sets the stage, and adds opt to the list of optimizers that the next update covers. */
static void mixpi_stage_set(mixp_scaler *scaler, mixp_optimizer *opt, int stage) {
    if (opt->scaler != scaler || opt->epoch != scaler->epoch) {
        opt->next_checked = scaler->checked_epoch == scaler->epoch ? scaler->checked : NULL;
        scaler->checked = opt;
        scaler->checked_epoch = scaler->epoch;
    }
    opt->scaler = scaler;
    opt->epoch = scaler->epoch;
    opt->stage = stage;
}

/* Marks the gradients of opt as true. */
static void mixpi_mark_unscaled(mixp_scaler *scaler, mixp_optimizer *opt) {
    for (int64_t i = 0; i < opt->count; i++) {
        mixp_tensor *g = mixpi_slot_grad(&opt->slot[i]);
        if (!g) continue;
        g->version++;
        g->own.mark.kind = MIXPI_MARK_UNSCALED;
        g->own.mark.by = scaler;
        g->own.mark.seen = scaler->epoch;
    }
}

static mixp_result mixpi_do_scaler_unscale(mixp_scaler *scaler, mixp_optimizer *opt) {
    if (!scaler || !opt) return MIXP_ERR_ARGUMENT;
    if (scaler->desc.disabled) return MIXP_OK;
    if (opt->scaler == scaler && mixpi_stage(opt) == MIXPI_UNSCALED)
        return mixp_context_fail(scaler->ctx, MIXP_ERR_ORDER,
            "mixp_scaler_unscale: mixp_scaler_unscale was called already; call it once, after the "
            "last mixp_backward of the step, and then mixp_scaler_step and mixp_scaler_update");
    mixpi_scaling is;
    MIXPI_TRY(mixpi_need_begin(opt, "mixp_scaler_unscale"));
    MIXPI_TRY(mixpi_need_factors(opt, "mixp_scaler_unscale"));
    MIXPI_TRY(mixpi_begin_scaled(scaler, opt, "mixp_scaler_unscale", &is));

    /* Count the gradients while they are scaled. An earlier step may have been abandoned. */
    opt->tallied = 0;
    mixp_result r = mixpi_tally_step(opt);
    if (r != MIXP_OK) return mixpi_crew_stop(opt->ctx, r);

    opt->plan.look_only = opt->plan.gathered = 1;
    MIXPI_TRY(mixpi_crew_look(
        opt, mixpi_scale_address(scaler, &is), !is.is_true, &opt->plan, scaler->state));
    opt->clipped = 0;
    opt->views_summed = 0;
    if (opt->shards) opt->ctx->crew->in_pieces(opt);
    mixpi_mark_unscaled(scaler, opt);
    mixpi_stage_set(scaler, opt, MIXPI_UNSCALED);
    return MIXP_OK;
}

MIXPREC_API mixp_result mixp_scaler_unscale(mixp_scaler *scaler, mixp_optimizer *opt) {
    MIXPI_RETURN_INSIDE(scaler ? scaler->ctx : NULL, mixpi_do_scaler_unscale(scaler, opt));
}

static mixp_result mixpi_do_scaler_step(mixp_scaler *scaler, mixp_optimizer *opt) {
    if (!scaler || !opt) return MIXP_ERR_ARGUMENT;
    if (scaler->desc.disabled && opt->ctx == scaler->ctx) {
        MIXPI_TRY(mixp_optimizer_step(opt));
        mixpi_stage_set(scaler, opt, MIXPI_READY); /* for the verdict */
        return MIXP_OK;
    }

    /* May this scaler step these gradients? By which scale are they multiplied? */
    mixpi_scaling is;
    MIXPI_TRY(mixpi_need_all(opt, "mixp_scaler_step"));
    MIXPI_TRY(mixpi_begin_scaled(scaler, opt, "mixp_scaler_step", &is));

    MIXPI_TRY(mixpi_crew_stop(opt->ctx, mixpi_step(opt, scaler, &is)));

    /* The step has used the gradients that this scaler scaled. */
    for (int64_t i = 0; i < opt->count; i++) {
        mixp_tensor *g = mixpi_slot_grad(&opt->slot[i]);
        if (g && g->own.mark.kind == MIXPI_MARK_SCALED) g->own.mark.seen = scaler->epoch;
    }
    mixpi_stage_set(scaler, opt, MIXPI_STEPPED);
    return MIXP_OK;
}

MIXPREC_API mixp_result mixp_scaler_step(mixp_scaler *scaler, mixp_optimizer *opt) {
    MIXPI_RETURN_INSIDE(scaler ? scaler->ctx : NULL, mixpi_do_scaler_step(scaler, opt));
}

/* --- the verdict, and the update ------------------------------------------------------------ */

MIXPREC_API const char *mixp_origin_text(mixp_origin origin) {
    static const char *const texts[] = {
        "a gradient is not finite, but the loss is: often the loss scale was too large, and it was "
        "lowered. If skips continue, start a guard: it names the operator in the next step",
        "an operator's result overflowed its dtype: not a scaling problem; with a guard, the site "
        "falls back to f32",
        "a gradient overflowed: the loss scale was too large and was lowered",
        "a gradient overflowed when it was unscaled: the loss scale is below 1; look at the "
        "learning rate and the gradient norm",
        "the loss is not finite, but all activations are: not a scaling problem; look at logs and "
        "divisions in the loss",
        "a weight or a buffer is not finite: not a scaling problem; resume from a checkpoint with "
        "a smaller learning rate",
        "the batch contains Inf or NaN: not a scaling problem; look at the data",
        "the loss is not finite, or a buffer became so: not a scaling problem. An operator "
        "exceeded the range of its dtype (f16: 65,504), or the batch contains Inf or NaN. Start a "
        "guard and repeat the step with mixp_retry: it names the cause, and an operator that "
        "overflows then stores f32",
        "an operator read an Inf that the program wrote, such as a mask of -Inf: not a scaling "
        "problem; leave a score of each row unmasked, or mask with a finite number",
        "none: no value was Inf or NaN. If the step was skipped, the verdict's reason says why"
    };
    MIXPI_STATIC_ASSERT(origin_texts, sizeof texts / sizeof texts[0] == MIXP_ORIGIN_COUNT);
    return (unsigned)origin < MIXP_ORIGIN_COUNT ? texts[origin] : "?";
}

static mixp_skip_reason mixpi_skip_reason(const mixp_step_state *s) {
    if (!s->skip) return MIXP_SKIP_NONE;
    if (s->stopped) return MIXP_SKIP_STOPPED;
    if (s->spike.of == MIXP_SPIKE_LOSS) return MIXP_SKIP_SPIKE_LOSS;
    if (s->spike.of) return MIXP_SKIP_SPIKE_NORM;
    return s->bad_buffer && !s->stats.found_inf ? MIXP_SKIP_BUFFER : MIXP_SKIP_NON_FINITE;
}

/* Names the buffer that became Inf or NaN, if all gradients are finite. */
static void mixpi_verdict_buffer(
    const mixp_optimizer *opt, const mixp_step_state *s, mixp_verdict *v) {
    const mixp_tensor *t = mixpi_bad_buffer(opt->ctx, s->bad_buffer);
    if (!t) return;
    v->bad_tensor = t->name;
    v->bad_element = mixpi_bad_element(s->bad_buffer);
    v->bad_is_nan = mixpi_bad_is_nan(s->bad_buffer);
    if (s->agreed.ranks) v->bad_rank = (int)s->agreed.buffer_rank - 1;
}

static mixp_verdict mixpi_verdict(const mixp_optimizer *opt) {
    mixp_step_state s;
    mixp_verdict v;
    memset(&v, 0, sizeof v);
    memset(&s, 0, sizeof s);
    v.site = "";
    v.bad_rank = -1;
    v.origin = MIXP_ORIGIN_NONE;
    if (!opt) return v;
    mixpi_peek(opt->ctx, &s, opt->state, offsetof(mixp_step_state, update));
    if (!s.steps) return v;

    /* The outcome of the step. */
    v.outcome = s.skip ? MIXP_STEP_SKIPPED : MIXP_STEP_APPLIED;
    v.step = s.steps;
    v.applied = s.applied;
    v.skipped = s.skipped;
    v.scale = s.scale;
    v.grad_norm = s.stats.norm;
    v.largest = s.stats.largest;
    v.clip = s.clip;
    v.lr = s.lr;

    /* Why it was skipped. A guard may know where the skip began. */
    v.loss_bad = s.loss_bad != 0;
    v.reason = mixpi_skip_reason(&s);
    if (v.reason == MIXP_SKIP_NON_FINITE) v.origin = MIXP_ORIGIN_UNKNOWN;
    if (v.loss_bad || v.reason == MIXP_SKIP_BUFFER) v.origin = MIXP_ORIGIN_NO_GUARD;
    if (s.skip && mixpi_watched(opt->ctx) & MIXPI_WATCHED) opt->ctx->watcher->origin(opt->ctx, &v);
    v.spike_z = s.spike.z;
    v.spike_mean = s.spike.mean;
    v.spike_sd = s.spike.sd;
    if (!s.stats.found_inf) {
        mixpi_verdict_buffer(opt, &s, &v);
        return v;
    }

    /* The first bad gradient, here or on another rank. */
    if (s.stats.bad_row >= 0 && s.stats.bad_row < opt->count) {
        v.bad_tensor = opt->slot[s.stats.bad_row].param->name;
        v.bad_element = s.stats.bad_element;
        v.bad_is_nan = s.stats.bad_is_nan;
    }
    if (mixpi_crew_of(opt->ctx)) opt->ctx->crew->verdict(opt, &s, &v);
    return v;
}

/* The verdict of an optimizer skipped since the last update, or of the last one if none. */
static mixp_verdict mixpi_worst_verdict(const mixp_scaler *scaler) {
    const mixp_optimizer *opt = scaler ? scaler->checked : NULL;
    mixp_verdict newest = mixpi_verdict(opt), v = newest;
    while (mixpi_is_checked(scaler, opt) && v.outcome != MIXP_STEP_SKIPPED) {
        opt = opt->next_checked;
        v = mixpi_verdict(opt);
    }
    return mixpi_is_checked(scaler, opt) ? v : newest;
}

/* After an update: reports too many consecutive skips at the lowest scale; no scale cures these. */
static mixp_result mixpi_scaler_report_divergence(const mixp_scaler *scaler) {
    const int most = scaler->desc.max_floor_skips ? scaler->desc.max_floor_skips : 20;
    mixp_scaler_state state;
    char on_rank[32] = "";
    mixp_result r = mixpi_peek(scaler->ctx, &state, scaler->state, sizeof state);
    if (r != MIXP_OK || most < 0 || state.floor_skips < most) return r;
    mixp_verdict bad = mixpi_worst_verdict(scaler);
    const int is_buffer = bad.reason == MIXP_SKIP_BUFFER;
    if (bad.bad_rank >= 0) snprintf(on_rank, sizeof on_rank, " on rank %d", bad.bad_rank);
    return mixp_context_fail(scaler->ctx, MIXP_ERR_DIVERGED,
        "%d steps in a row were skipped at the lowest loss scale, %g: no loss scale prevents this. "
        "%s%s %s of %s'%s' at element %.0f%s. Check the loss, the data and the learning rate",
        (int)state.floor_skips, (double)state.scale,
        bad.loss_bad ? "The loss itself is not finite. " : "",
        is_buffer ? "All gradients are finite. First bad element:" : "First bad gradient:",
        bad.bad_is_nan ? "NaN" : "Inf", is_buffer ? "the buffer " : "",
        bad.bad_tensor ? bad.bad_tensor : "", (double)bad.bad_element, on_rank);
}

static mixp_result mixpi_do_scaler_update(mixp_scaler *scaler) {
    if (!scaler) return MIXP_ERR_ARGUMENT;
    if (scaler->desc.disabled) {
        scaler->epoch++;
        scaler->began = 0;
        return MIXP_OK;
    }
    mixp_context *ctx = scaler->ctx;
    if (scaler->checked_epoch != scaler->epoch)
        return mixp_context_fail(scaler->ctx, MIXP_ERR_ORDER,
            "mixp_scaler_update: no optimizer was stepped or unscaled since the last one; call "
            "mixp_scaler_step first");

    /* The guard first: a skip that it cures does not lower the scale. */
    mixp_advance_args k;
    memset(&k, 0, sizeof k);
    k.rule = &scaler->rule;
    k.scaler = scaler->state;
    mixp_result watched = MIXPI_WATCHER(ctx, updating(ctx, &k));
    mixp_result r = MIXPI_STEP_RUN(scaler, advance, &k);
    if (r != MIXP_OK) return mixpi_crew_stop(ctx, r);

    scaler->first = scaler->began;
    scaler->began = 0;
    scaler->epoch++;
    if (!scaler->rule.fixed) scaler->scales++;
    if (!scaler->rule.fixed) ctx->capture.scale_moved = 1;

    r = mixpi_crew_stop(ctx, mixpi_buffers_update(scaler));
    if (r == MIXP_OK) r = MIXPI_QUANTISER(ctx, advance(ctx));
    if (r == MIXP_OK) r = mixpi_scaler_report_divergence(scaler);
    if (watched == MIXP_OK) watched = MIXPI_WATCHER(ctx, updated(ctx, scaler));
    return mixpi_crew_stop_alone(ctx, r == MIXP_OK ? watched : r);
}

MIXPREC_API mixp_result mixp_scaler_update(mixp_scaler *scaler) {
    MIXPI_RETURN_INSIDE(scaler ? scaler->ctx : NULL, mixpi_do_scaler_update(scaler));
}

/* --- freeing -------------------------------------------------------------------------------- */

static mixp_result mixpi_free_check(mixp_context *ctx, const char *who) {
    if (ctx->capture.graphs)
        return mixp_context_fail(ctx, MIXP_ERR_ORDER,
            "%s: a graph of this context may use this object; free the context's graphs first with "
            "mixp_graph_free",
            who);
    return mixpi_free_begin(ctx, who);
}

MIXPREC_API mixp_result mixp_scaler_free(mixp_scaler *scaler) {
    mixp_context *ctx = scaler ? scaler->ctx : NULL;
    mixp_result r = ctx ? mixpi_free_check(ctx, "mixp_scaler_free") : MIXP_OK;
    mixp_scaler *before = ctx ? (mixp_scaler *)ctx->training.scalers : NULL;
    if (!ctx || r != MIXP_OK) return r;

    /* Out of the context's list, and out of all that names it. */
    if (before == scaler) ctx->training.scalers = scaler->next;
    while (before != scaler && before->next != scaler) before = before->next;
    before->next = scaler->next;
    mixpi_context_lose(ctx, scaler);
    mixpi_scale_lose(scaler);
    for (mixp_optimizer *opt = (mixp_optimizer *)ctx->training.optimizers; opt; opt = opt->next) {
        if (opt->scaler != scaler) continue;
        opt->scaler = NULL;
        opt->stage = MIXPI_READY;
        opt->next_checked = NULL;
    }
    if (mixpi_watcher_of(ctx)) ctx->watcher->lose(ctx, scaler);
    mixpi_owned_free(ctx, scaler);
    return MIXP_OK;
}

MIXPREC_API mixp_result mixp_optimizer_free(mixp_optimizer *opt) {
    mixp_context *ctx = opt ? opt->ctx : NULL;
    mixp_result r = ctx ? mixpi_free_check(ctx, "mixp_optimizer_free") : MIXP_OK;
    mixp_optimizer *before = ctx ? (mixp_optimizer *)ctx->training.optimizers : NULL;
    if (!ctx || r != MIXP_OK) return r;
    if (mixpi_stage(opt) != MIXPI_READY)
        return mixp_context_fail(ctx, MIXP_ERR_ORDER,
            "mixp_optimizer_free: the optimizer is in the middle of a step; call "
            "mixp_scaler_update first");
    if (opt->swapped) return mixpi_need_weights(opt, "mixp_optimizer_free");

    /* Out of the context's list, and out of the lists of what scalers have stepped. */
    if (before == opt) ctx->training.optimizers = opt->next;
    while (before != opt && before->next != opt) before = before->next;
    before->next = opt->next;
    for (mixp_scaler *s = (mixp_scaler *)ctx->training.scalers; s; s = s->next)
        if (s->checked == opt) s->checked = opt->next_checked;
    for (mixp_optimizer *o = (mixp_optimizer *)ctx->training.optimizers; o; o = o->next)
        if (o->next_checked == opt) o->next_checked = opt->next_checked;

    /* Its parameters have one optimizer less. */
    for (int64_t i = 0; i < opt->count; i++) {
        mixp_tensor *p = opt->slot[i].param;
        p->own.optimizers--;
        if (opt->shards) ctx->crew->left(p);
    }
    if (ctx->training.tally_of == opt) ctx->training.tally_of = NULL;
    mixpi_owned_free(ctx, opt);
    return MIXP_OK;
}

MIXPREC_API mixp_verdict mixp_optimizer_verdict(const mixp_optimizer *opt) {
    return mixpi_verdict(opt);
}
/* A disabled scaler has no part in the step, so its optimizers do not see the loss. */
MIXPREC_API mixp_verdict mixp_scaler_verdict(const mixp_scaler *scaler) {
    mixp_verdict v = mixpi_worst_verdict(scaler);
    int32_t bad = 0;
    if (!scaler || v.outcome == MIXP_STEP_NONE) return v;
    if (scaler->desc.disabled &&
        mixpi_peek(scaler->ctx, &bad, &scaler->state->loss_bad, sizeof bad) == MIXP_OK)
        v.loss_bad = bad != 0;
    if (v.loss_bad && v.origin == MIXP_ORIGIN_NONE) v.origin = MIXP_ORIGIN_NO_GUARD;
    int before = mixpi_enter(scaler->ctx);
    if (v.outcome == MIXP_STEP_APPLIED && v.loss_bad)
        mixpi_warn(scaler->ctx,
            "step %.0f was applied although its loss is not finite: its gradients are finite. If "
            "no target counted, leave such batches out; otherwise look at the masks and the loss",
            (double)v.step);
    mixpi_leave(scaler->ctx, before, MIXP_OK);
    return v;
}
