#pragma once
#include "../step.h"
#include "table.c"
/* --- how the gradients lie in their low dtypes --------------------------------------------- */

static size_t mixpi_tally_bytes(const mixp_optimizer *opt) {
    return (size_t)opt->tallies * sizeof *opt->lost + (size_t)opt->tally_count * sizeof *opt->tally;
}

/* Starts the copy of `bytes` of counts to the host. */
static mixp_result mixpi_tally_send(mixp_optimizer *opt, size_t bytes) {
    mixp_context *ctx = opt->ctx;
    return mixpi_note_failure(
        ctx, "mixp_optimizer_sample", ctx->device->post(&ctx->exec, 2, opt->lost, bytes));
}

/* Allocates the counters for all parameters added so far; at a later addition also for those to
 * come. Sends them once, so that the memory of the host's copy is there before a step changes
 * anything. */
static mixp_result mixpi_tally_memory(mixp_optimizer *opt) {
    if (opt->tallies >= opt->count) return MIXP_OK;
    const size_t n = (size_t)(opt->tallies ? opt->capacity : opt->count);
    const size_t bytes = n * (sizeof *opt->lost + sizeof *opt->tally);
    opt->tallies = 0;
    opt->tally_step = opt->tally_here = 0;
    opt->lost_copy = (mixp_lost *)mixpi_opt_host(opt, bytes);
    opt->lost = (mixp_lost *)mixpi_opt_device(opt, bytes);
    if (!opt->lost_copy || !opt->lost) return MIXP_ERR_MEMORY;
    opt->tally_copy = (mixpi_grad_tally *)(void *)(opt->lost_copy + n);
    opt->tally = (mixpi_grad_tally *)(void *)(opt->lost + n);

    /* The first transfer makes the host's copy. */
    mixp_result r = MIXP_OK;
    if (opt->ctx->device->post && !opt->ctx->capture.active) {
        opt->ctx->training.tally_of = NULL;
        r = mixpi_tally_send(opt, bytes);
    }
    if (r == MIXP_OK) opt->tallies = (int64_t)n;
    return r;
}

MIXPREC_API mixp_result mixp_optimizer_sample(mixp_optimizer *opt) {
    if (!opt) return MIXP_ERR_ARGUMENT;
    if (!opt->ctx->device->kernels->look)
        return mixp_context_fail(opt->ctx, MIXP_ERR_DEVICE,
            "mixp_optimizer_sample: the device %s has no kernel `look`", opt->ctx->device->name);
    mixp_result r = mixpi_tally_memory(opt);
    opt->tally_due = r == MIXP_OK;
    return r;
}

/* The low dtype in which a row's gradient is, or would be, stored. */
static mixp_dtype mixpi_row_low(const mixp_param_row *row) {
    if (row->active && mixpi_is_low(row->grad_dtype)) return row->grad_dtype;
    return mixpi_row_low_weight(row);
}

/* Counts the gradients of a step that is sampled or for which the user asked. Called before the
 * step's first look at its gradients. */
static mixp_result mixpi_tally_step(mixp_optimizer *opt) {
    const int watched = mixpi_watched(opt->ctx);
    const int due = opt->tally_due || (watched & MIXPI_SAMPLED);
    mixp_result r = MIXP_OK;
    /* Parameters may have been added since the request. */
    if (due || (watched & MIXPI_WATCHED)) r = mixpi_tally_memory(opt);
    if (r != MIXP_OK || !due || opt->tallied) return r;

    opt->tally_count = opt->count;
    r = mixpi_device_zero(opt->ctx, opt->lost, mixpi_tally_bytes(opt));
    for (int64_t i = 0; r == MIXP_OK && i < opt->count; i++) {
        const mixp_param_row *row = opt->looks_own ? &opt->own_rows[i] : &opt->rows[i];
        if (!row->active || row->pitch || row->grad_dtype == MIXP_F64) continue;
        mixp_look_args k = mixpi_look_at(mixpi_in(row->grad, row->grad_dtype), row->count,
            mixpi_row_low(row), &opt->tally[i].look);
        k.exponents = opt->tally[i].exponents;
        r = MIXPI_STEP_RUN(opt, look, &k);
    }

    /* The host has no copy of these counts yet. */
    opt->tally_here = 0;
    if (opt->ctx->training.tally_of == opt) opt->ctx->training.tally_of = NULL;
    if (opt->ctx->capture.active) opt->tally_recorded = 1;
    opt->tally_due = 0;
    opt->tallied = r == MIXP_OK;
    opt->tally_step = (int64_t)opt->ctx->step + 1;
    return r;
}

/* After the update of a counted step: starts the copy of the counts to the host. */
static mixp_result mixpi_tally_post(mixp_optimizer *opt) {
    mixp_context *ctx = opt->ctx;
    if (!ctx->device->post || ctx->capture.active) return MIXP_OK;
    mixp_result r = mixpi_tally_send(opt, mixpi_tally_bytes(opt));
    ctx->training.tally_of = r == MIXP_OK ? opt : NULL;
    return r;
}

/* Brings the host's copy up to date. Downloads the counts if a graph made them, or if another
 * optimizer has posted its counts since. */
static mixp_result mixpi_tally_fetch(mixp_optimizer *opt) {
    mixp_context *ctx = opt->ctx;
    const size_t bytes = mixpi_tally_bytes(opt);
    mixp_result r;
    if (opt->tally_here && !opt->tally_recorded) return MIXP_OK;
    if (ctx->training.tally_of == opt && !opt->tally_recorded)
        r = mixpi_note_failure(ctx, "mixp_optimizer_underflow",
            ctx->device->collect(&ctx->exec, 2, opt->lost_copy, bytes));
    else r = mixpi_download(ctx, opt->lost_copy, opt->lost, bytes);
    opt->tally_here = r == MIXP_OK;
    return r;
}

static void mixpi_look_add(mixp_look *to, const mixp_look *from) {
    if (from->largest > to->largest) to->largest = from->largest;
    to->nan |= from->nan;
    to->count += from->count;
    to->nonfinite += from->nonfinite;
    to->zeros += from->zeros;
    to->flushed += from->flushed;
    to->least += from->least;
    to->subnormal += from->subnormal;
    to->saturated += from->saturated;
}

/* Adds a parameter's counts to out; mixp_optimizer_underflow turns the sums into shares. */
static void mixpi_underflow_join(
    mixp_underflow *out, const mixpi_grad_tally *t, const mixp_param_row *row) {
    const int stored_low = row->active && mixpi_is_low(row->grad_dtype);
    mixpi_look_add(&out->look, &t->look);
    for (int i = 0; i < MIXP_EXPONENTS; i++) out->exponents[i] += t->exponents[i];
    out->flushed += stored_low ? 0.5 * (double)t->look.least : (double)t->look.flushed;
    out->subnormal += (double)t->look.subnormal;
}

MIXPREC_API int mixp_optimizer_underflow(mixp_optimizer *opt, int64_t i, mixp_underflow *out) {
    if (!opt || !out || i < -1 || i >= opt->count || !opt->count) return 0;
    const int64_t first = i < 0 ? 0 : i;
    int64_t last = i < 0 ? opt->count : i + 1;
    memset(out, 0, sizeof *out);
    out->name = i < 0 ? "" : opt->slot[i].param->name;
    out->low = mixpi_row_low(&opt->rows[first]);
    out->step = opt->tally_step - 1;
    if (!opt->tally_step) return 1;

    /* Parameters added later were not counted. */
    if (mixpi_tally_fetch(opt) != MIXP_OK) return 0;
    last = mixpi_min(last, opt->tallies);
    for (int64_t k = first; k < last; k++) {
        mixpi_underflow_join(out, &opt->tally_copy[k], &opt->rows[k]);
        out->lost.updates += opt->lost_copy[k].updates;
        out->lost.lost += opt->lost_copy[k].lost;
    }

    /* Turn counts into shares. Estimated flushes of gradients stored low are among the zeros. */
    double values = (double)(out->look.count - out->look.zeros - out->look.nonfinite);
    if (out->flushed > (double)out->look.flushed)
        values += out->flushed - (double)out->look.flushed;
    out->flushed = values > 0.0 ? out->flushed / values : 0.0;
    out->subnormal = values > 0.0 ? out->subnormal / values : 0.0;
    return 1;
}

/* --- what the gradients are ---------------------------------------------------------------- */

/* State of all gradients of an optimizer: true, or multiplied by scale number `at`. */
typedef struct mixpi_scaling { int is_true; uint64_t at; } mixpi_scaling;

static int mixpi_seen_before_update(const mixpi_mark *m) {
    return m->seen && m->seen != ((const mixp_scaler *)m->by)->epoch;
}

/* A gradient's mark. An update ends the mark of a view, because its owner then refills the view. */
static mixpi_mark mixpi_mark_of(const mixpi_slot *slot) {
    static const mixpi_mark none = { NULL, 0, 0, MIXPI_MARK_NONE };
    const mixpi_mark *m = &mixpi_slot_grad(slot)->own.mark;
    return slot->grad && m->by && mixpi_seen_before_update(m) ? none : *m;
}

/* Returns why a scaler cannot use a gradient, or NULL. */
static const char *mixpi_mark_wrong(const mixp_scaler *scaler, const mixpi_mark *m) {
    if (m->kind == MIXPI_MARK_MIXED)
        return "is a sum over two loss scales, which no factor can undo: call mixp_zero_grad after "
               "each mixp_scaler_update, before the next mixp_backward; with one scaler, call "
               "mixp_backward on all losses of a step before mixp_scaler_update; with two scalers "
               "(a GAN), call mixp_zero_grad on this optimizer before mixp_backward of its own "
               "loss; an optimizer that steps less often than others needs its own scaler";
    if (m->kind == MIXPI_MARK_LOST)
        return "was scaled by a scaler that was freed; call mixp_zero_grad, and start again from "
               "the loss";
    if (m->kind == MIXPI_MARK_NONE || m->kind == MIXPI_MARK_TRUE) return NULL;

    /* Another scaler's, or of an earlier step. */
    if (m->by != scaler && m->kind == MIXPI_MARK_UNSCALED && !mixpi_seen_before_update(m))
        return "was unscaled by another scaler; call mixp_scaler_update on that scaler first";
    if (m->by != scaler) return "was scaled by another scaler; step with that scaler";
    if (mixpi_seen_before_update(m))
        return m->kind == MIXPI_MARK_UNSCALED
                   ? "was unscaled before the last mixp_scaler_update; start again from the loss"
                   : "was used by the step before; call mixp_zero_grad, and start again from the "
                     "loss";

    if (m->kind == MIXPI_MARK_SCALED && scaler->scales - m->at > MIXP_PAST_SCALES)
        return "was scaled too long ago: since then, graphs were replayed, states loaded or the "
               "scale changed too often; start again from the loss";
    return NULL;
}

/* Number of gradients of each kind. */
typedef struct mixpi_mark_count { int64_t as_is, unscaled, scaled; } mixpi_mark_count;

/* Returns what is wrong with the gradients as a whole, or NULL. */
static const char *mixpi_marks_wrong(const mixp_scaler *scaler, const mixpi_mark_count *n) {
    const int is_true = n->as_is + n->unscaled > 0;
    if (is_true && n->scaled)
        return "and others differ: some gradients are scaled, others are not; treat all gradients "
               "of an optimizer alike";
    if (n->as_is && !n->unscaled && scaler->desc.rule != MIXP_RULE_STATIC)
        return "comes from a loss that was not scaled; call mixp_backward on "
               "mixp_scaler_scale(scaler, loss), not on the loss";
    return NULL;
}

/* Decides whether the gradients of opt are true or scaled; fails if they are not all alike. */
static mixp_result mixpi_scaling_of(
    mixp_scaler *scaler, const mixp_optimizer *opt, const char *who, mixpi_scaling *out) {
    const uint64_t now = mixpi_scale_now(scaler);
    const int known =
        scaler->ctx->training.scale_asked || scaler->rule.fixed || scaler->scale_given;
    mixpi_mark_count n = { 0, 0, 0 };
    const char *name = "", *wrong = NULL;
    out->at = now;

    for (int64_t i = 0; i < opt->count && !wrong; i++) {
        if (!mixpi_slot_grad(&opt->slot[i])) continue;
        mixpi_mark m = mixpi_mark_of(&opt->slot[i]);
        name = opt->slot[i].param->name;
        wrong = mixpi_mark_wrong(scaler, &m);
        if (!known && m.kind == MIXPI_MARK_NONE && opt->slot[i].grad)
            wrong = "is your view, and the loss scale was never read: multiply your loss by "
                    "mixp_scaler_loss_scale(scaler) before your backward pass";
        n.as_is += m.kind == MIXPI_MARK_TRUE;
        n.unscaled += m.kind == MIXPI_MARK_UNSCALED;
        if (wrong || m.kind == MIXPI_MARK_TRUE || m.kind == MIXPI_MARK_UNSCALED) continue;

        /* A scaled one: all have the same scale. An unknown gradient has today's. */
        if (m.kind == MIXPI_MARK_NONE) m.at = now;
        if (n.scaled++ && m.at != out->at)
            wrong = "has another scale than the gradients before it; step those before "
                    "mixp_scaler_update, or use separate optimizers";
        out->at = m.at;
    }

    out->is_true = n.as_is + n.unscaled > 0;
    if (!wrong) wrong = mixpi_marks_wrong(scaler, &n);
    if (!wrong) return MIXP_OK;
    return mixp_context_fail(
        scaler->ctx, MIXP_ERR_ORDER, "%s: the gradient of '%s' %s", who, name, wrong);
}

/* Fails unless all gradients are true. `instead` names the call that makes them true. */
static mixp_result mixpi_need_true(
    const mixp_optimizer *opt, const char *who, const char *instead) {
    for (int64_t i = 0; i < opt->count; i++) {
        if (!mixpi_slot_grad(&opt->slot[i])) continue;
        const mixpi_mark m = mixpi_mark_of(&opt->slot[i]);
        const char *name = opt->slot[i].param->name;

        if (m.kind == MIXPI_MARK_LOST)
            return mixp_context_fail(opt->ctx, MIXP_ERR_ORDER,
                "%s: the gradient of '%s' was scaled by a scaler that was freed; call "
                "mixp_zero_grad, and start again",
                who, name);
        if (mixpi_stage(opt) == MIXPI_STEPPED)
            return mixp_context_fail(opt->ctx, MIXP_ERR_ORDER,
                "%s: this optimizer's step is over; in the next step, call this function before "
                "mixp_scaler_step",
                who);
        if (m.kind == MIXPI_MARK_SCALED || m.kind == MIXPI_MARK_MIXED)
            return mixp_context_fail(opt->ctx, MIXP_ERR_ORDER,
                "%s: the gradient of '%s' is still multiplied by the loss scale; call %s", who,
                name, instead);
    }
    return MIXP_OK;
}

/* Address of the scale by which the gradients are multiplied; NULL: they are true. */
static const float *mixpi_scale_address(const mixp_scaler *scaler, const mixpi_scaling *is) {
    const uint64_t age = scaler->scales - is->at;
    if (is->is_true) return NULL;
    return age ? &scaler->state->past[age - 1] : &scaler->state->scale;
}
