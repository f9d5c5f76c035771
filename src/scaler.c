#pragma once
#include "scaler.h"
#include "operators/table.c"
/* ==== 9. SCALER (implementation) ====================================================== */

struct mixp_scaler {
    mixp_context      *ctx;
    mixp_scaler_desc   desc;    /* description as given, with later changes merged in      */
    mixp_scaler_rule   rule;
    mixp_scaler_state *state;   /* device memory                                           */
    uint64_t           epoch;   /* updates so far, counted by the host; starts at 1        */
    uint64_t           scales;  /* scales so far: number of the current scale, stored in marks */
    uint64_t           replays; /* the context's value when `scales` was last correct      */
    mixp_optimizer    *checked; /* optimizers unscaled or stepped in checked_epoch, latest first */
    uint64_t           checked_epoch;
    uint64_t           began;   /* step of the first loss since the update; 0 = none yet */
    uint64_t           first;   /* `began` of the update before */
    uint64_t           retried; /* epoch plus replays when a retry was last asked for */
    int                tries;   /* consecutive retries */
    int                scale_given; /* 1: the description has an init_scale                */
    mixp_scaler       *next;    /* next in the context's list                              */
};

/* --- rules ------------------------------------------------------------------------------ */

/* Is x in [2^-126, 2^126], where both x and its reciprocal are normal? */
static int mixpi_scale_is_usable(float x) {
    return mixp_bits_of_f32(x) - 0x00800000u <= 0x7E800000u - 0x00800000u;
}

/* The values of other systems, taken from their sources. Keras and jmp let the user choose the
 * first scale; the value here is the one in their guides. Floor and ceiling 0: no limit. */
static const mixp_scaler_rule mixpi_rules[MIXP_RULE_COUNT] = {
#define MIXPI_RULE(first_scale, floor, ceiling, interval, hysteresis, refill, recovery,   \
                   recovery_scale, fixed, delay, divides, f32_factors)                     \
    { 2.0, 0.5, first_scale, floor, ceiling, interval, hysteresis, refill, recovery,       \
      recovery_scale, fixed, delay, divides, f32_factors, 0, 6, 4, 65504.0f },
#define MIXPI_CLEAN  MIXP_REFILL_CLEAN
#define MIXPI_GROWTH MIXP_REFILL_GROWTH
#define MIXPI_RUN_OF (MIXP_REFILL_CLEAN | MIXP_REFILL_BACKOFF)
    /* first scale, floor, ceiling, interval, hysteresis, refill, recovery interval and scale,
     *          fixed, delay, divides, f32 factors */
    MIXPI_RULE(65536,      0, 0,          2000, 1, MIXPI_CLEAN,  1,   0,  0, 0, 0, 0)   /* torch */
    MIXPI_RULE(65536,      0, 0,          2000, 1, MIXPI_CLEAN,  1,   0,  1, 0, 0, 0)  /* static */
    MIXPI_RULE(65536,      0, 16777216,   2000, 1, MIXPI_CLEAN,  1,   0,  0, 0, 0, 0)    /* apex */
    MIXPI_RULE(65536,      0, 0,          2000, 1, MIXPI_CLEAN,  1,   0,  0, 0, 0, 0)  /* apex h */
    MIXPI_RULE(4294967296, 1, 0,          1000, 1, MIXPI_GROWTH, 1,   0,  0, 1, 1, 0) /* deepsp. */
    MIXPI_RULE(4294967296, 1, 0,          1000, 2, MIXPI_GROWTH, 1,   0,  0, 0, 0, 1)   /* mega. */
    MIXPI_RULE(32768,      1, 0,          2000, 1, MIXPI_CLEAN,  1,   0,  0, 0, 1, 1)      /* TF */
    MIXPI_RULE(32768,      0, 0,          2000, 1, MIXPI_CLEAN,  1,   0,  0, 0, 0, 0)   /* keras */
    MIXPI_RULE(65536,      0, 0,          2000, 1, MIXPI_RUN_OF, 1,   0,  0, 0, 0, 1)  /* paddle */
    MIXPI_RULE(32768,      1, 0,          2000, 1, MIXPI_CLEAN,  1,   0,  0, 0, 1, 1)     /* jmp */
    MIXPI_RULE(65536,      0, 1073741824, 2000, 1, MIXPI_CLEAN,  100, 64, 0, 0, 0, 1) /* modulus */
    MIXPI_RULE(65536,      1, 4294967296, 1000, 2, MIXPI_GROWTH, 1,   0,  0, 0, 0, 1) /* coloss. */
    MIXPI_RULE(65536,      0, 0,          16,   1, MIXPI_CLEAN,  1,   0,  0, 0, 0, 0) /* predict */
};
#undef MIXPI_RULE
#undef MIXPI_CLEAN
#undef MIXPI_GROWTH
#undef MIXPI_RUN_OF

/* Fields of a running scaler that may change. A field of `from` that is not 0 replaces the field of
 * `to`, which is a rule or another description. */
#define MIXPI_CHANGES(X) X(growth_factor) X(backoff_factor) X(growth_interval) X(hysteresis) \
                         X(min_scale) X(max_scale) X(margin)
#define MIXPI_TAKE(field) if (from->field != 0) to->field = from->field;

static int mixpi_desc_is_finite(const mixp_scaler_desc *d) {
    return mixpi_f64_is_finite(d->growth_factor) && mixpi_f64_is_finite(d->backoff_factor) &&
           mixpi_f64_is_finite((double)d->init_scale) &&
           mixpi_f64_is_finite((double)d->min_scale) && mixpi_f64_is_finite((double)d->max_scale);
}

/* Returns what is wrong with the factors and intervals of a rule, or NULL. */
static const char *mixpi_rule_pace_wrong(const mixp_scaler_rule *r) {
    if (r->growth_factor <= 1.0) return "growth_factor must be above 1";
    if (r->backoff_factor <= 0.0 || r->backoff_factor >= 1.0)
        return "backoff_factor must lie between 0 and 1";
    if (r->growth_interval < 1) return "growth_interval must be at least 1";
    if (r->growth_interval > INT32_MAX - 1) return "growth_interval must be below 2^31 - 1";
    if (r->hysteresis < 1) return "hysteresis must be at least 1";
    if (r->margin < 1 || r->margin > 30) return "margin must lie in [1, 30] binades";
    return NULL;
}

/* Returns what is wrong with the limits of a rule made from `from`, or NULL. */
static const char *mixpi_rule_limits_wrong(
    const mixp_scaler_rule *r, const mixp_scaler_desc *from) {
    /* Compares bits: if the CPU flushes subnormals, a subnormal scale must not pass for the
     * default. */
    if (mixp_bits_of_f32(from->init_scale) << 1 && !mixpi_scale_is_usable(from->init_scale))
        return "init_scale must lie in [2^-126, 2^126]";
    if (!mixpi_scale_is_usable(r->min_scale)) return "min_scale must lie in [2^-126, 2^126]";
    if (from->max_scale != 0.0f && !mixpi_scale_is_usable(r->max_scale))
        return "max_scale must lie in [2^-126, 2^126]";
    return NULL;
}

/* Resolves a description into *rule. Returns what is wrong with the description, or NULL. */
static const char *mixpi_rule_resolve(const mixp_scaler_desc *from, mixp_scaler_rule *rule) {
    mixp_scaler_rule r, *to = &r;
    if ((unsigned)from->rule >= MIXP_RULE_COUNT) return "rule is not a mixp_scaler_preset";
    if (!mixpi_desc_is_finite(from)) return "a field is Inf or NaN";

    /* The preset's numbers, then the description's. */
    r = mixpi_rules[from->rule];
    r.predicts = from->rule == MIXP_RULE_PREDICTIVE;
    MIXPI_CHANGES(MIXPI_TAKE)
    MIXPI_TAKE(init_scale)

    if (from->backoff_factor != 0.0) r.divides = 0;
    if (r.f32_factors) {
        r.growth_factor = (double)(float)r.growth_factor;
        r.backoff_factor = (double)(float)r.backoff_factor;
    }
    if (r.divides) r.backoff_factor = 1.0 / r.growth_factor;
    if (r.min_scale == 0.0f) r.min_scale = 1.17549435e-38f;
    if (r.max_scale == 0.0f) r.max_scale = 3.40282347e38f;

    const char *wrong = mixpi_rule_pace_wrong(&r);
    if (!wrong) wrong = mixpi_rule_limits_wrong(&r, from);
    if (wrong) return wrong;

    /* The scale lies between its limits. */
    if (from->disabled) {
        r.fixed = 1;
        r.init_scale = r.min_scale = r.max_scale = 1.0f;
    }
    if (r.min_scale > r.max_scale) return "min_scale must not be above max_scale";
    if (from->init_scale == 0.0f)
        r.init_scale = fmaxf(fminf(r.init_scale, r.max_scale), r.min_scale);
    if (r.init_scale < r.min_scale || r.init_scale > r.max_scale)
        return "init_scale must lie between min_scale and max_scale";
    *rule = r;
    return NULL;
}

MIXPI_SELDOM
MIXPREC_API mixp_result mixp_scaler_rule_resolve(
    const mixp_scaler_desc *desc, mixp_scaler_rule *rule) {
    static const mixp_scaler_desc none = { MIXP_RULE_TORCH, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 };
    return rule && !mixpi_rule_resolve(desc ? desc : &none, rule) ? MIXP_OK : MIXP_ERR_ARGUMENT;
}

/* --- making, reading, changing ---------------------------------------------------------- */

/* Adopts d and its rule. If something is wrong, reports it and changes nothing. */
static mixp_result mixpi_scaler_adopt(
    mixp_scaler *s, const mixp_scaler_desc *d, const char *wrong, const char *who) {
    if (!wrong) wrong = mixpi_rule_resolve(d, &s->rule);
    if (!wrong) {
        s->desc = *d;
        return MIXP_OK;
    }
    return mixp_context_fail(s->ctx, MIXP_ERR_ARGUMENT, "%s: %s", who, wrong);
}

/* Reads the current state. Waits for the device. */
static mixp_result mixpi_scaler_get(const mixp_scaler *s, mixp_scaler_state *state) {
    return mixpi_download(s->ctx, state, s->state, sizeof *state);
}

MIXPI_SELDOM
MIXPREC_API mixp_scaler *mixp_scaler_new(mixp_context *ctx, const mixp_scaler_desc *desc) {
    if (!ctx || mixpi_check_uncaptured(ctx, "mixp_scaler_new") != MIXP_OK) return NULL;
    mixpi_warn_of_made(ctx, "mixp_scaler_new");
    mixp_scaler *s = (mixp_scaler *)mixpi_owner_new(ctx, sizeof *s);
    if (!s) return NULL;
    s->ctx = ctx;
    s->epoch = 1;
    if (mixpi_scaler_adopt(s, desc ? desc : &s->desc, NULL, "mixp_scaler_new") != MIXP_OK)
        return NULL;

    /* The state lies in device memory, where updates change it. */
    mixp_scaler_state first = MIXPI_ZERO;
    s->scale_given = s->desc.init_scale != 0.0f;
    first.scale = s->rule.init_scale;
    first.hysteresis_left = s->rule.hysteresis;
    s->state = (mixp_scaler_state *)mixpi_owned_alloc(ctx, s, sizeof first, 1);
    if (!s->state || mixpi_upload(ctx, s->state, &first, sizeof first) != MIXP_OK) return NULL;

    s->next = (mixp_scaler *)ctx->training.scalers;
    ctx->training.scalers = s;
    return s;
}

MIXPREC_API float mixp_scaler_loss_scale(const mixp_scaler *scaler) {
    mixp_scaler_state state;
    if (!scaler || scaler->desc.disabled) return 1.0f;
    scaler->ctx->training.scale_asked = 1;
    return mixpi_scaler_get(scaler, &state) == MIXP_OK ? state.scale : 0.0f;
}

MIXPREC_API const float *mixp_scaler_loss_scale_data(const mixp_scaler *scaler) {
    if (!scaler) return NULL;
    scaler->ctx->training.scale_asked = 1;
    return &scaler->state->scale;
}

/* Number of the current scale. Replayed graphs change the scale without the host, so numbers from
 * before a replay become too old to use. */
static uint64_t mixpi_scale_now(mixp_scaler *s) {
    if (s->replays != s->ctx->capture.replays) s->scales += MIXP_PAST_SCALES + 1;
    s->replays = s->ctx->capture.replays;
    return s->scales;
}

/* Sets a new scale and clears the findings since the last update, which no longer matter. */
static void mixpi_scaler_renew(mixp_scaler_state *state, float scale) {
    mixpi_scaler_remember(state);
    state->scale = scale;
    state->ahead = 0.0f;
    state->found_inf = 0;
    state->loss_bad = state->buffer_bad = 0;
}

/* Replaces the state. Its scale counts as new, as after an update. */
static mixp_result mixpi_scaler_replace(mixp_scaler *s, const mixp_scaler_state *state) {
    MIXPI_TRY(mixpi_upload(s->ctx, s->state, state, sizeof *state));
    s->epoch++;
    s->scales++;
    s->ctx->capture.scale_moved = 1;
    s->ctx->training.scale_asked = 1;
    return MIXP_OK;
}

MIXPI_SELDOM
MIXPREC_API mixp_result mixp_scaler_update_to(mixp_scaler *scaler, float new_scale) {
    mixp_scaler_state state;
    if (!scaler || scaler->desc.disabled) return scaler ? MIXP_OK : MIXP_ERR_ARGUMENT;
    if (!mixpi_scale_is_usable(new_scale))
        return mixp_context_fail(scaler->ctx, MIXP_ERR_ARGUMENT,
            "mixp_scaler_update_to: the scale is %g; it must lie in [2^-126, 2^126], where its "
            "reciprocal is a normal number too",
            (double)new_scale);
    MIXPI_TRY(mixpi_scaler_get(scaler, &state));
    mixpi_scaler_renew(&state, new_scale);
    return mixpi_scaler_replace(scaler, &state);
}

MIXPI_SELDOM
MIXPREC_API mixp_result mixp_scaler_change(mixp_scaler *scaler, const mixp_scaler_desc *from) {
    mixp_scaler_desc d, *to = &d;
    const char *wrong = NULL;
    if (!scaler || !from) return MIXP_ERR_ARGUMENT;
    d = scaler->desc;
    MIXPI_CHANGES(MIXPI_TAKE)
    MIXPI_TAKE(rule)
    MIXPI_TAKE(max_floor_skips)
    d.init_scale = 0.0f; /* used up: it must not conflict with new limits */
    if (from->init_scale != 0.0f) wrong = "init_scale has no effect now; use mixp_scaler_update_to";
    if (from->disabled) wrong = "disabled is for mixp_scaler_new only";
    return mixpi_scaler_adopt(scaler, &d, wrong, "mixp_scaler_change");
}

MIXPI_SELDOM
MIXPREC_API mixp_result mixp_scaler_save(const mixp_scaler *scaler, mixp_scaler_saved *out) {
    mixp_scaler_state state;
    if (!scaler || !out) return MIXP_ERR_ARGUMENT;
    memset(out, 0, sizeof *out);
    if (scaler->desc.disabled) return MIXP_OK;
    scaler->ctx->training.scale_asked = 1;
    MIXPI_TRY(mixpi_scaler_get(scaler, &state));

    /* The settings and numbers that a checkpoint keeps. */
    out->growth_factor = scaler->rule.growth_factor;
    out->scale = state.scale;
    out->backoff_factor = scaler->rule.backoff_factor;
    out->growth_tracker = state.growth_tracker;
    out->hysteresis_left = state.hysteresis_left;
    out->growth_interval = scaler->rule.growth_interval;
    out->floor_skips = state.floor_skips;
    out->forgiven = state.forgiven;
    out->forgiven_at = state.forgiven_at;
    out->ahead = state.ahead;
    out->largest = scaler->rule.predicts ? state.largest : 0.0f;
    out->peak = scaler->rule.predicts ? state.peak : 0.0f;
    return MIXP_OK;
}

/* Returns what is wrong with a saved state, or NULL. */
static const char *mixpi_saved_wrong(const mixp_scaler_saved *in) {
    if (in->scale == 0.0f) return "the state was saved by a disabled scaler";
    if (!mixpi_scale_is_usable(in->scale)) return "the scale is not in [2^-126, 2^126]";
    /* In a description, 0 would select the rule's own value. */
    if (!(in->growth_factor > 1.0) || !(in->backoff_factor > 0.0) || in->growth_interval < 1)
        return "a factor or the interval is out of range";
    if (in->growth_tracker < 0 || in->hysteresis_left < 0 || in->floor_skips < 0 ||
        in->forgiven < 0 || in->forgiven_at < 0)
        return "a counter is negative";
    if (in->ahead != 0.0f && !mixpi_scale_is_usable(in->ahead))
        return "ahead is neither 0 nor in [2^-126, 2^126]";
    if (!mixpi_f64_is_finite((double)in->largest) || !mixpi_f64_is_finite((double)in->peak) ||
        in->largest < 0.0f || in->peak < 0.0f)
        return "largest or peak is negative, Inf or NaN";
    return NULL;
}

MIXPI_SELDOM
static mixp_result mixpi_do_scaler_load(mixp_scaler *scaler, const mixp_scaler_saved *in) {
    mixp_scaler_state state;
    if (scaler->desc.disabled) return MIXP_OK;

    /* The rule, with the factors of the file. */
    mixp_scaler_desc d = scaler->desc;
    d.growth_factor = in->growth_factor;
    d.backoff_factor = in->backoff_factor;
    /* A rule with a single factor continues to divide by it. */
    if (mixpi_rules[d.rule].divides && 1.0 / in->growth_factor == in->backoff_factor)
        d.backoff_factor = 0.0;
    d.growth_interval = in->growth_interval;
    d.init_scale = 0.0f;

    MIXPI_TRY(mixpi_scaler_get(scaler, &state));
    MIXPI_TRY(mixpi_scaler_adopt(scaler, &d, mixpi_saved_wrong(in), "mixp_scaler_load"));

    /* The state. */
    mixpi_scaler_renew(&state, in->scale);
    state.growth_tracker = in->growth_tracker;
    state.hysteresis_left = in->hysteresis_left;
    state.floor_skips = in->floor_skips;
    state.forgiven = in->forgiven;
    state.forgiven_at = in->forgiven_at;
    state.ahead = in->ahead;
    state.largest = scaler->rule.predicts ? in->largest : 0.0f;
    state.peak = scaler->rule.predicts ? in->peak : 0.0f;
    return mixpi_scaler_replace(scaler, &state);
}

MIXPREC_API mixp_result mixp_scaler_load(mixp_scaler *scaler, const mixp_scaler_saved *in) {
    if (!scaler || !in) return MIXP_ERR_ARGUMENT;
    MIXPI_RETURN_INSIDE(scaler->ctx, mixpi_do_scaler_load(scaler, in));
}

/* --- the loss times the scale ------------------------------------------------------------ */

static mixp_result mixpi_scale_infer(mixp_call *c) {
    if (mixpi_need_real(c, 1, 1) != MIXP_OK) return MIXP_ERR_DTYPE;
    mixpi_call_reads_all(c, 0);
    return mixpi_call_output_fixed(c, MIXP_F32, c->in[0]->rank, c->in[0]->shape);
}

/* Marks a gradient that passes scale number `at` as scaled; if it was scaled before, as mixed. */
static void mixpi_scale_mark(mixp_scaler *s, uint64_t at, mixpi_mark *m) {
    if (m->kind != MIXPI_MARK_TRUE) {
        m->kind = MIXPI_MARK_MIXED;
        return;
    }
    m->kind = MIXPI_MARK_SCALED;
    m->by = s;
    m->at = at;
}

static mixp_result mixpi_report_freed_scaler(mixp_context *ctx) {
    return mixp_context_fail(ctx, MIXP_ERR_ORDER,
        "mixp_backward: the scaler of this loss was freed; run forward again with another scaler");
}

/* Where a loss that is Inf or NaN is noted; NULL in a trial, which belongs to no update. */
static int32_t *mixpi_loss_bad(const mixp_scaler *s) {
    return mixpi_watched(s->ctx) & MIXPI_TRIAL ? NULL : &s->state->loss_bad;
}

static mixp_result mixpi_scale_both(mixp_call *c) {
    mixp_scaler *scaler = *(mixp_scaler *const *)c->attrs;
    if (!scaler) return mixpi_report_freed_scaler(c->ctx);
    if (c->out->grad) mixpi_scale_mark(scaler, mixpi_scale_now(scaler), &c->out->grad->own.mark);
    mixp_scale_by_args k = MIXPI_ZERO;
    k.n = c->out->count;
    k.factor = &scaler->state->scale;
    k.a = mixpi_call_from(c);
    k.y = mixpi_call_to(c);
    if (!c->out->grad) c->out->own.scaled = 1;
    if (!c->out->grad) k.bad = mixpi_loss_bad(scaler);
    return k.y.data ? MIXPI_RUN(c, scale_by, &k) : MIXP_OK;
}

static const mixp_op mixpi_scale_op =
    MIXPI_ROW(scaler_scale, F32, sizeof(mixp_scaler *), mixpi_scale_infer, mixpi_scale_both,
              mixpi_scale_both);

/* Lets a disabled scaler's verdict report a loss that is Inf or NaN. The scaled copy is not
 * used. */
static mixp_result mixpi_scaler_note(mixp_scaler *s, const mixp_tensor *loss) {
    mixp_context *ctx = s->ctx;
    mixp_result r = MIXP_OK;
    if (loss->ctx != ctx || !mixpi_is_live(loss) || !mixpi_is_real(loss->dtype)) return MIXP_OK;
    if (!s->began) r = mixpi_device_zero(ctx, &s->state->loss_bad, sizeof s->state->loss_bad);
    s->began = 1; /* a loss of this update is known */
    mixp_scale_by_args k = MIXPI_ZERO;
    k.n = loss->count;
    k.factor = &s->state->scale;
    k.bad = mixpi_loss_bad(s);
    k.a = mixpi_tensor_in(loss);
    k.y.dtype = loss->dtype;
    k.y.data = mixpi_arena_take(ctx, &ctx->memory.dev, mixpi_bytes(loss));
    if (!k.y.data) return MIXP_ERR_MEMORY;
    if (r == MIXP_OK) r = MIXPI_STEP_RUN(s, scale_by, &k);
    mixpi_arena_free(ctx, &ctx->memory.dev, k.y.data, mixpi_bytes(loss));
    return r;
}

MIXPREC_API mixp_tensor *mixp_scaler_scale(mixp_scaler *scaler, mixp_tensor *loss) {
    if (!scaler) return NULL;
    if (loss && scaler->desc.disabled)
        return mixpi_scaler_note(scaler, loss) == MIXP_OK ? loss : NULL;
    if (loss && !scaler->began) scaler->began = scaler->ctx->step;
    return mixp_apply(scaler->ctx, &mixpi_scale_op, 1, &loss, 1, &scaler);
}

/* --- the loss, its scale and its gradient in one --- *
 *
 * The result is the scaled loss. The plain loss is kept as a tensor that is not on the tape.
 */
typedef struct mixpi_scaled_entropy {
    mixp_scaler  *scaler;       /* first, as in the attributes of mixpi_scale_op           */
    mixp_cross_entropy_both_args k;
    mixp_tensor **plain;        /* receives the plain loss for the wrapper                 */
    uint64_t      at;           /* number of the scale that the gradient contains          */
    int           walked;       /* 1: the gradient was passed on                           */
} mixpi_scaled_entropy;

static mixp_result mixpi_scaled_entropy_infer(mixp_call *c) {
    mixp_result r = mixpi_entropy_check(c);
    mixpi_call_reads_all(c, 0); /* the gradient exists already */
    return r == MIXP_OK ? mixpi_call_output_fixed(c, MIXP_F32, 0, NULL) : r;
}

/* Multiplies the plain loss by its share, and makes the scaled loss from it. */
static mixp_result mixpi_scaled_entropy_value(mixp_call *c, const mixpi_scaled_entropy *a) {
    const mixp_in loss = mixpi_tensor_in(c->saved[2]);
    mixp_scale_by_args s;

    /* The loss's share of a batch in parts. */
    const mixp_unary_args u =
        mixpi_unary_of(MIXP_UNARY_SCALE, a->k.share, loss, mixpi_tensor_out(c->saved[2], 0), 1);
    if (a->k.share != 1.0f) MIXPI_TRY(MIXPI_RUN(c, unary, &u));

    /* Times the scale. */
    memset(&s, 0, sizeof s);
    s.n = 1;
    s.factor = a->k.scale;
    s.bad = mixpi_loss_bad(a->scaler);
    s.a = loss;
    s.y = mixpi_call_y(c);
    return MIXPI_RUN(c, scale_by, &s);
}

static mixp_result mixpi_scaled_entropy_forward(mixp_call *c) {
    mixpi_scaled_entropy *a = (mixpi_scaled_entropy *)c->attrs;
    mixp_cross_entropy_args *k = &a->k.loss;
    MIXPI_TRY(mixpi_cross_entropy_fill(c, k));
    if (!mixp_call_save(c, 2, MIXP_F32, 0, NULL)) MIXPI_TRY(MIXP_ERR_MEMORY);
    mixpi_warn_unless_counts(c, k, k->rows);
    k->loss = mixpi_saved(c, 2);
    a->at = mixpi_scale_now(a->scaler);
    a->k.scale = &a->scaler->state->scale;
    a->k.dlogits = mixpi_tensor_out(c->in[0], 0);
    mixp_result r = MIXPI_RUN(c, cross_entropy_both, &a->k);
    if (r == MIXP_ERR_ARGUMENT) return mixpi_bad_index(c, 1, "target", k->cols, k->ignore);
    c->out->own.scaled = 1;
    c->in[0]->own.spent = 1;
    *a->plain = c->saved[2];
    return r == MIXP_OK ? mixpi_scaled_entropy_value(c, a) : r;
}

/* The gradient exists already, for an incoming gradient of 1. */
static mixp_result mixpi_scaled_entropy_backward(mixp_call *c) {
    mixpi_scaled_entropy *a = (mixpi_scaled_entropy *)c->attrs;
    int accumulate = 0;
    int apart = !c->out->own.walked || a->walked;
    if (!a->scaler) return mixpi_report_freed_scaler(c->ctx);
    if (apart)
        return mixp_context_fail(c->ctx, MIXP_ERR_ORDER,
            "the result of mixp_scaler_cross_entropy can only be passed to mixp_backward: pass a "
            "factor as share, or use mixp_cross_entropy and mixp_scaler_scale");
    a->walked = 1;
    mixpi_scale_mark(a->scaler, a->at, &c->out->grad->own.mark);
    mixp_tensor *g = mixpi_grad_record(c->in[0]);
    if (!g) return MIXP_ERR_MEMORY;
    g->data = c->in[0]->data;
    return mixp_call_grad(c, 0, &accumulate) && !accumulate ? MIXP_OK : MIXP_ERR_MEMORY;
}

static const mixp_op mixpi_scaled_entropy_op =
    MIXPI_ROW(scaler_cross_entropy, F32, sizeof(mixpi_scaled_entropy), mixpi_scaled_entropy_infer,
              mixpi_scaled_entropy_forward, mixpi_scaled_entropy_backward);

/* Before the scaler is freed: losses of this step that it scaled can no longer be walked back. */
static void mixpi_scale_lose(const mixp_scaler *scaler) {
    for (mixpi_tape_entry *e = scaler->ctx->tape.newest; e; e = e->older) {
        const mixp_op *op = e->call.op;
        mixp_scaler **by = (mixp_scaler **)e->call.attrs;
        if (op != &mixpi_scale_op && op != &mixpi_scaled_entropy_op) continue;
        if (*by == scaler) *by = NULL;
    }
}

/* May the gradient overwrite the logits at once? */
static int mixpi_scales_entropy(mixp_scaler *scaler, mixp_tensor *logits) {
    const mixp_context *ctx = scaler->ctx;
    const mixp_op *plain = mixp_op_builtin(MIXP_OP_CROSS_ENTROPY);
    if (mixpi_class_of(ctx, plain) != plain->cls) return 0; /* the user overrode its class */
    if (!ctx->device->kernels->cross_entropy_both || scaler->desc.disabled) return 0;
    if (!logits || logits->ctx != ctx || mixpi_is_seen(ctx)) return 0;
    if (!logits->own.disposable || logits->own.spent || logits->requires_grad ||
        !logits->own.from_tape || mixpi_is_no_grad(ctx))
        return 0;
    mixp_call reader = MIXPI_ZERO;
    reader.ctx = scaler->ctx;
    reader.in = &logits;
    return mixpi_call_readers(&reader, 0) == 0;
}

MIXPREC_API mixp_tensor *mixp_scaler_cross_entropy(mixp_scaler *scaler, mixp_tensor *logits,
    mixp_tensor *targets, int32_t ignore, float share, mixp_tensor **loss) {
    mixp_tensor *in[2] = { logits, targets }, *plain = NULL, *scaled;
    mixpi_scaled_entropy a;
    if (loss) *loss = NULL;
    if (!scaler) return NULL;

    /* Scaled by its own operator where that can be; otherwise by three. */
    if (!mixpi_scales_entropy(scaler, logits)) {
        plain = mixp_cross_entropy(scaler->ctx, logits, targets, ignore);
        if (plain && share != 1.0f) plain = mixp_scale(scaler->ctx, plain, share);
        scaled = mixp_scaler_scale(scaler, plain);
    } else {
        memset(&a, 0, sizeof a);
        a.k.loss.ignore = ignore;
        a.k.share = share;
        a.scaler = scaler;
        a.plain = &plain;
        if (!scaler->began) scaler->began = scaler->ctx->step;
        scaled = mixp_apply(scaler->ctx, &mixpi_scaled_entropy_op, 2, in, 2, &a);
    }

    if (loss && scaled) *loss = plain;
    return scaled;
}
