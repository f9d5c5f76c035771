#pragma once
#include "read.c"
/* --- writing states ------------------------------------------------------------------------- */

/* Encodes n values of a moment in blocks, with a scale. Returns 1 if each code has its value. */
static int mixpi_held_encode(mixp_state_kind what, mixp_dtype dtype, uint32_t scale,
    const float *in, int64_t n, uint8_t *codes) {
    int exact = 1;
    for (int64_t i = 0; i < n; i++) {
        const uint32_t code = what == MIXP_STATE_M ? mixpi_state_m(in[i], scale, 0x8000u)
                                                   : mixpi_state_v(sqrtf(in[i]), scale, 0x8000u);
        const float value = mixpi_held_value(what, dtype, code, scale, 0);
        exact &= mixp_bits_of_f32(value) == mixp_bits_of_f32(in[i]);
        codes[i] = (uint8_t)code;
    }
    return exact;
}

/* Encodes a block, and returns its scale. Values that were read find the scale that held them: the
 * largest of them may have been rounded up to the next scale. */
static uint8_t mixpi_held_scaled(
    mixp_state_kind what, mixp_dtype dtype, const float *in, int64_t n, uint8_t *codes) {
    uint32_t largest = 0, scale;
    for (int64_t i = 0; i < n; i++) {
        const uint32_t size = mixpi_state_size(what == MIXP_STATE_M ? in[i] : sqrtf(in[i]));
        largest = size > largest ? size : largest;
    }
    scale = what == MIXP_STATE_M ? mixpi_state_scale_m(largest) : mixpi_state_scale_v(largest);
    const uint32_t least = what == MIXP_STATE_M ? 1u : 15u;
    if (scale > least && mixpi_held_encode(what, dtype, scale - 1, in, n, codes))
        return (uint8_t)(scale - 1);
    mixpi_held_encode(what, dtype, scale, in, n, codes);
    return (uint8_t)scale;
}

/* Writes one block: n elements from `first` on. */
static mixp_result mixpi_held_store(const mixp_optimizer *opt, int64_t row, mixp_state_kind what,
    int64_t first, int64_t n, const float *in) {
    const mixpi_held_at at = mixpi_held_of(opt, row, what);
    const size_t size = mixp_dtype_size(at.dtype);
    char *to = (char *)at.data + (size_t)first * size;
    uint16_t halves[MIXP_STATE_BLOCK], weights[MIXP_STATE_BLOCK];
    uint8_t bytes[MIXP_STATE_BLOCK], scale;
    if (at.dtype == MIXP_F32) return mixpi_upload(opt->ctx, to, in, (size_t)n * size);
    if (what != MIXP_STATE_MASTER && at.dtype == MIXP_BF16) {
        for (int64_t i = 0; i < n; i++) halves[i] = (uint16_t)mixpi_state_bf16(in[i], 0x8000u);
        return mixpi_upload(opt->ctx, to, halves, (size_t)n * size);
    }
    if (what != MIXP_STATE_MASTER) {
        scale = mixpi_held_scaled(what, at.dtype, in, n, bytes);
        MIXPI_TRY(mixpi_upload(opt->ctx, to, bytes, (size_t)n));
        return mixpi_upload(opt->ctx, at.scale + first / MIXP_STATE_BLOCK, &scale, 1);
    }

    /* A master split between two arrays: the weight is one part. */
    for (int64_t i = 0; i < n; i++) {
        const mixpi_master_parts parts =
            at.dtype == MIXP_BF16 ? mixpi_master_to_16(in[i]) : mixpi_master_to_8(in[i], 0x80u);
        weights[i] = (uint16_t)parts.weight;
        halves[i] = (uint16_t)parts.rest;
        bytes[i] = (uint8_t)parts.rest;
    }
    const void *rest = size == 2 ? (const void *)halves : (const void *)bytes;
    MIXPI_TRY(mixpi_upload(opt->ctx, to, rest, (size_t)n * size));
    return mixpi_upload(
        opt->ctx, (uint16_t *)opt->rows[row].weight + first, weights, (size_t)n * sizeof *weights);
}

/* The element that no optimizer can have left in a state, or -1. */
static int64_t mixpi_state_bad(
    const mixp_optimizer *opt, mixp_state_kind what, const float *host, int64_t count) {
    const int is_square = what == MIXP_STATE_V || (what == MIXP_STATE_THIRD && opt->plan.amsgrad);
    for (int64_t i = 0; i < count; i++)
        if (mixp_bits_of_f32(host[i]) << 1 >= 0xFF000000u || (is_square && host[i] < 0.0f))
            return i;
    return -1;
}

/* After a master or an average was written: the weight follows its master, and averages have
 * begun. */
static mixp_result mixpi_state_settle(mixp_optimizer *opt, int64_t i, mixp_state_kind what) {
    mixpi_slot *slot = &opt->slot[i];
    const mixp_param_row *row = &opt->rows[i];
    for (int64_t k = 0; what == MIXP_STATE_EMA && k < opt->count; k++) {
        const int is_stale = opt->slot[k].version != opt->slot[k].param->version;
        if (k != i && is_stale && mixpi_ema_is_new(opt, k)) MIXPI_TRY(mixpi_master_sync(opt, k));
    }
    if (what == MIXP_STATE_EMA) opt->ema_begun = opt->ema_count;
    if (what != MIXP_STATE_MASTER) return MIXP_OK;
    if (!mixpi_row_is_split(row))
        MIXPI_TRY(mixpi_convert_to(opt->ctx, mixpi_out_to(row->weight, row->weight_dtype, 0),
            mixpi_in(row->master, MIXP_F32), row->count));
    mixpi_note_write(slot->param, "mixp_optimizer_write");
    if (mixpi_ema_is_new(opt, i)) MIXPI_TRY(mixpi_ema_start(opt, i));
    slot->version = slot->param->version;
    return MIXP_OK;
}

/* Returns the number of the parameter; -1 with an error: opt lacks it, is in a step or shards. */
static int64_t mixpi_slot_to_write(mixp_optimizer *opt, const mixp_tensor *param, const char *who) {
    const char *wrong = NULL;
    int64_t i = 0;
    while (i < opt->count && opt->slot[i].param != param) i++;
    if (i == opt->count) wrong = "this optimizer does not have the parameter";
    else if (opt->shards) wrong = "the states are sharded over ranks: load a checkpoint instead";
    if (wrong)
        mixp_context_fail(opt->ctx, MIXP_ERR_ARGUMENT, "%s '%s': %s", who, param->name, wrong);
    else if (mixpi_stage(opt) != MIXPI_READY || opt->ctx->capture.active)
        mixp_context_fail(opt->ctx, MIXP_ERR_ORDER,
            "%s '%s': a step or a capture is in progress; call mixp_scaler_update or "
            "mixp_capture_end first",
            who, param->name);
    else return i;
    return -1;
}

static mixp_result mixpi_do_optimizer_write(mixp_optimizer *opt, const mixp_tensor *param,
    mixp_state_kind what, const float *host, int64_t count) {
    static const char who[] = "mixp_optimizer_write";
    if (!opt || !mixpi_is_tensor(param)) return MIXP_ERR_ARGUMENT;
    const int64_t i = mixpi_slot_to_write(opt, param, who);
    if (i < 0) return mixpi_failed(opt->ctx);
    MIXPI_TRY(mixpi_need_weights(opt, who));
    const int is_kept = (unsigned)what <= MIXP_STATE_THIRD && mixpi_held_of(opt, i, what).data;
    if (!is_kept && what != MIXP_STATE_MASTER)
        return mixp_context_fail(opt->ctx, MIXP_ERR_ARGUMENT,
            "%s '%s': this optimizer keeps no such state; an average needs mixp_optimizer_set_ema",
            who, param->name);
    MIXPI_TRY(mixpi_transfer_check(param, host, MIXP_F32, count, who));

    if (what == MIXP_STATE_MASTER && opt->rows[i].pitch)
        return mixp_context_fail(opt->ctx, MIXP_ERR_ARGUMENT,
            "%s '%s': its rows have padding: write the weight itself", who, param->name);

    const int64_t bad = mixpi_state_bad(opt, what, host, count);
    if (bad >= 0)
        return mixp_context_fail(opt->ctx, MIXP_ERR_ARGUMENT,
            "%s '%s': element %.0f is %g, which no step leaves in this state", who, param->name,
            (double)bad, (double)host[bad]);
    if (!is_kept) return mixp_write(opt->slot[i].param, host, MIXP_F32, count);
    for (int64_t k = 0; k < count; k += MIXP_STATE_BLOCK)
        MIXPI_TRY(
            mixpi_held_store(opt, i, what, k, mixpi_min(MIXP_STATE_BLOCK, count - k), host + k));
    return mixpi_state_settle(opt, i, what);
}

MIXPREC_API mixp_result mixp_optimizer_write(mixp_optimizer *opt, const mixp_tensor *param,
    mixp_state_kind what, const float *host, int64_t count) {
    MIXPI_RETURN_INSIDE(
        opt ? opt->ctx : NULL, mixpi_do_optimizer_write(opt, param, what, host, count));
}

MIXPREC_API int64_t mixp_optimizer_param_applied(
    const mixp_optimizer *opt, const mixp_tensor *param) {
    int64_t i = 0, missed = 0;
    if (!opt) return 0;
    while (i < opt->count && opt->slot[i].param != param) i++;
    if (i == opt->count || !mixpi_is_own(opt, i)) return 0;
    mixpi_download(opt->ctx, &missed, opt->rows[i].missed, sizeof missed);
    return mixp_optimizer_applied(opt) - missed;
}

static mixp_result mixpi_do_set_applied(
    mixp_optimizer *opt, const mixp_tensor *param, int64_t steps) {
    static const char who[] = "mixp_optimizer_set_applied";
    const int64_t most = (int64_t)1 << 62, none = 0;
    if (!opt || (param && !mixpi_is_tensor(param))) return MIXP_ERR_ARGUMENT;
    const int64_t applied = mixp_optimizer_applied(opt);
    if (steps < 0 || steps > (param ? applied : most))
        return mixp_context_fail(opt->ctx, MIXP_ERR_ARGUMENT,
            "%s: %.0f steps; a parameter has 0 to the optimizer's number of applied steps, %.0f",
            who, (double)steps, (double)applied);

    /* Of one parameter: what it has missed. */
    const int64_t i = param        ? mixpi_slot_to_write(opt, param, who)
                      : opt->count ? mixpi_slot_to_write(opt, opt->slot[0].param, who)
                                   : 0;
    const int64_t missed = applied - steps;
    if (i < 0) return mixpi_failed(opt->ctx);
    if (param) return mixpi_upload(opt->ctx, opt->rows[i].missed, &missed, sizeof missed);

    /* Of all: nothing missed, nothing skipped, no history of spikes. */
    for (int64_t k = 0; k < opt->count; k++)
        MIXPI_TRY(mixpi_upload(opt->ctx, opt->rows[k].missed, &none, sizeof none));
    MIXPI_TRY(mixpi_upload(opt->ctx, &opt->state->applied, &steps, sizeof steps));
    MIXPI_TRY(mixpi_upload(opt->ctx, &opt->state->steps, &steps, sizeof steps));
    mixp_spike_state spikes = MIXPI_ZERO;
    MIXPI_TRY(mixpi_upload(opt->ctx, &opt->state->spike, &spikes, sizeof spikes));
    opt->issued = -1;
    return mixpi_upload(opt->ctx, &opt->state->skipped, &none, sizeof none);
}

MIXPREC_API mixp_result mixp_optimizer_set_applied(
    mixp_optimizer *opt, const mixp_tensor *param, int64_t steps) {
    MIXPI_RETURN_INSIDE(opt ? opt->ctx : NULL, mixpi_do_set_applied(opt, param, steps));
}
