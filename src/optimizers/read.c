#pragma once
#include "param_rows.c"
/* --- asking --------------------------------------------------------------------------------- */

/* Address of one kind of state. */
typedef struct mixpi_held_at {
    void          *data;
    uint8_t       *scale;       /* scales of its blocks, or NULL                           */
    mixp_dtype     dtype;
} mixpi_held_at;

static mixpi_held_at mixpi_held_of(const mixp_optimizer *opt, int64_t i, mixp_state_kind what) {
    const mixp_param_row *row = &opt->rows[i];
    mixpi_held_at at = { row->master, NULL, row->master_dtype };
    if (what == MIXP_STATE_MASTER) return at;
    at.data = what == MIXP_STATE_M ? row->m : row->v;
    if (what == MIXP_STATE_THIRD) at.data = row->third;
    at.scale = what == MIXP_STATE_M ? row->m_scale : row->v_scale;
    at.dtype = what == MIXP_STATE_M ? row->m_dtype : row->v_dtype;
    if (what < MIXP_STATE_EMA) return at;
    if (what == MIXP_STATE_EMA) at.data = i < opt->ema_count ? opt->slot[i].ema : NULL;
    at.scale = NULL;
    at.dtype = MIXP_F32;
    return at;
}

/* Decodes a state's code, whose size the dtype gives. weight: the other bits of a split master. */
static float mixpi_held_value(
    mixp_state_kind what, mixp_dtype dtype, uint32_t code, uint32_t scale, uint32_t weight) {
    if (dtype == MIXP_F32) return mixp_f32_of_bits(code);
    if (what == MIXP_STATE_MASTER)
        return dtype == MIXP_BF16 ? mixpi_master_from_16(weight, code)
                                  : mixpi_master_from_8(weight, code);
    if (dtype == MIXP_BF16) return mixp_f32_of_bits(code << 16);
    return what == MIXP_STATE_M ? mixpi_state_m_value(code, scale)
                                : mixpi_state_v_value(code, scale);
}

/* Reads one block: n elements from `first` on. */
static mixp_result mixpi_held_block(const mixp_optimizer *opt, int64_t row, mixp_state_kind what,
    int64_t first, int64_t n, float *out) {
    const mixpi_held_at at = mixpi_held_of(opt, row, what);
    const size_t size = mixp_dtype_size(at.dtype), offset = (size_t)first * size;
    const int split = what == MIXP_STATE_MASTER && at.dtype != MIXP_F32;
    uint32_t words[MIXP_STATE_BLOCK];
    uint16_t half, weights[MIXP_STATE_BLOCK];
    uint8_t scale = 0, *bytes = (uint8_t *)words;
    mixp_result r =
        mixpi_download(opt->ctx, words, (const char *)at.data + offset, (size_t)n * size);

    /* Codes of 8 bits have a scale; a split master needs the weight's bits. */
    if (r == MIXP_OK && at.scale)
        r = mixpi_download(opt->ctx, &scale, at.scale + first / MIXP_STATE_BLOCK, 1);
    if (r == MIXP_OK && split)
        r = mixpi_download(opt->ctx, weights, (const uint16_t *)opt->rows[row].weight + first,
            (size_t)n * sizeof *weights);

    for (int64_t i = 0; i < n && r == MIXP_OK; i++) {
        uint32_t code = size == 4 ? words[i] : bytes[i];
        if (size == 2) {
            memcpy(&half, bytes + 2 * i, sizeof half);
            code = half;
        }
        out[i] = mixpi_held_value(what, at.dtype, code, scale, split ? weights[i] : 0u);
    }
    return r;
}

/* host holds the values of a weight that the program wrote. Puts in the master's values where the
 * next step keeps them: see mixpi_master_follow. */
static mixp_result mixpi_kept_digits(
    const mixp_optimizer *opt, const mixp_param_row *row, float *host) {
    float master[MIXP_STATE_BLOCK], rounded;
    mixp_result r = MIXP_OK;
    if (!mixpi_master_can_keep(opt->ctx, row)) return MIXP_OK;
    for (int64_t i = 0; i < row->count && r == MIXP_OK; i += MIXP_STATE_BLOCK) {
        const int64_t n = mixpi_min(MIXP_STATE_BLOCK, row->count - i);
        r = mixpi_download(
            opt->ctx, master, (const float *)row->master + i, (size_t)n * sizeof *master);
        for (int64_t k = 0; k < n && r == MIXP_OK; k++) {
            uint16_t low;
            mixp_convert(&low, row->weight_dtype, &master[k], MIXP_F32, 1);
            mixp_convert(&rounded, MIXP_F32, &low, row->weight_dtype, 1);
            if (rounded == host[i + k]) host[i + k] = master[k];
        }
    }
    return r;
}

static mixp_result mixpi_do_optimizer_read(const mixp_optimizer *opt, const mixp_tensor *param,
    mixp_state_kind what, float *host, int64_t count) {
    const char *wrong = NULL;
    mixp_result r = MIXP_OK;
    int64_t i = 0, row;
    if (!opt || !mixpi_is_tensor(param)) return MIXP_ERR_ARGUMENT;
    while (i < opt->count && opt->slot[i].param != param) i++;
    row = i;

    /* The parameter, the kind of state, and whether this rank keeps it. */
    if (i == opt->count) wrong = "this optimizer does not have the parameter";
    else if ((unsigned)what > MIXP_STATE_THIRD) wrong = "kind is not a kind of state";
    else if (!host) wrong = "the host memory is NULL";
    else if (!mixpi_is_own(opt, i))
        wrong = "the states are sharded, and this rank does not keep all of them: to read the "
                "average, call mixp_optimizer_swap_ema on all ranks and read the weight; to read "
                "other states, ask the rank that keeps them, or read a checkpoint";
    else if (!mixpi_held_of(opt, row, what).data && what != MIXP_STATE_MASTER)
        wrong = what == MIXP_STATE_EMA ? "there is no average: call mixp_optimizer_set_ema"
                                       : "this kind of optimizer does not have this state";
    if (wrong)
        return mixp_context_fail(
            opt->ctx, MIXP_ERR_ARGUMENT, "mixp_optimizer_read '%s': %s", param->name, wrong);
    if (what == MIXP_STATE_MASTER) r = mixpi_need_weights(opt, "mixp_optimizer_read");
    if (r != MIXP_OK) return r;

    /* No state is kept, or the program wrote the weight, and the next step copies the weight. */
    int written =
        opt->slot[i].version != param->version &&
        (what == MIXP_STATE_MASTER || (what == MIXP_STATE_EMA && mixpi_ema_is_new(opt, i)));
    if (count == param->count && (written || !mixpi_held_of(opt, row, what).data)) {
        r = mixp_read(param, host, MIXP_F32, count);
        if (r != MIXP_OK || mixpi_master_is_void(opt, i)) return r;
        return mixpi_kept_digits(opt, &opt->rows[row], host);
    }

    /* Block by block, since a block has one scale. */
    MIXPI_TRY(mixpi_transfer_check(param, host, MIXP_F32, count, "mixp_optimizer_read"));
    for (i = 0; i < count; i += MIXP_STATE_BLOCK)
        MIXPI_TRY(
            mixpi_held_block(opt, row, what, i, mixpi_min(MIXP_STATE_BLOCK, count - i), host + i));
    return MIXP_OK;
}

MIXPREC_API mixp_result mixp_optimizer_read(const mixp_optimizer *opt, const mixp_tensor *param,
    mixp_state_kind what, float *host, int64_t count) {
    MIXPI_RETURN_INSIDE(
        opt ? opt->ctx : NULL, mixpi_do_optimizer_read(opt, param, what, host, count));
}

MIXPREC_API int64_t mixp_optimizer_applied(const mixp_optimizer *opt) {
    int64_t applied = 0;
    if (opt) mixpi_download(opt->ctx, &applied, &opt->state->applied, sizeof applied);
    return applied;
}

MIXPREC_API double mixp_optimizer_lr(const mixp_optimizer *opt, int group) {
    if (!opt || group < 0 || group >= opt->plan.n_groups) return 0.0;
    return mixpi_schedule_lr(
        &opt->plan.schedule, opt->plan.groups[group].lr, mixp_optimizer_applied(opt));
}

static const char *mixpi_loss_wrong(const mixp_optimizer *opt, const mixp_tensor *loss) {
    if (!((int)opt->plan.spike.of & MIXP_SPIKE_LOSS))
        return "spike.of in the description is neither MIXP_SPIKE_LOSS nor MIXP_SPIKE_BOTH";
    if (loss->ctx != opt->ctx) return "the loss belongs to another context";
    if (loss->own.scaled)
        return "the loss is multiplied by the loss scale, whose changes would look like spikes: "
               "pass the loss from before mixp_scaler_scale";
    if (loss->count != 1) return "a loss has one element; take the mean with mixp_mean";
    return NULL;
}

MIXPREC_API mixp_result mixp_optimizer_set_loss(mixp_optimizer *opt, const mixp_tensor *loss) {
    if (!opt) return MIXP_ERR_ARGUMENT;
    MIXPI_TRY(mixpi_check_memory(loss, "mixp_optimizer_set_loss"));
    const char *wrong = mixpi_loss_wrong(opt, loss);
    if (wrong)
        return mixp_context_fail(opt->ctx, MIXP_ERR_ARGUMENT, "mixp_optimizer_set_loss: %s", wrong);
    if (loss->dtype != MIXP_F32)
        return mixp_context_fail(opt->ctx, MIXP_ERR_DTYPE,
            "mixp_optimizer_set_loss: the loss is %s; pass an f32 loss",
            mixp_dtype_name(loss->dtype));
    opt->plan.loss = (const float *)loss->data;
    opt->loss_of = opt->ctx->generation;
    return MIXP_OK;
}
