#pragma once
#include "arithmetic.h"

/* The scalars of SGD's update. The first momentum buffer is the gradient itself, without
 * dampening. */
MIXPREC_HD void mixpi_update_sgd(const mixp_param_group *g, double lr, int64_t t,
                                 mixp_step_scalars *u) {
    u->beta1 = (float)(t == 1 ? 0.0 : g->momentum);
    u->rest1 = (float)(t == 1 ? 1.0 : 1.0 - g->dampening);
    u->rate = (float)lr;
    u->scale_m = 1.0f;
    u->scale_v = 1.0f;
}

/* beta1 and beta2 to the power of a parameter's steps. pow is the device's own and may differ by a
 * unit or two in a double's last place. The roundings to f32 removed that difference in all of 3
 * million trials. */
typedef struct mixpi_beta_powers { double steps, first, second; } mixpi_beta_powers;

MIXPREC_HD mixpi_beta_powers mixpi_beta_powers_of(const mixp_param_group *g, int64_t t) {
    mixpi_beta_powers b;
    b.steps = (double)(t > 1 ? t : 1);
    b.first = MIXPI_LIBM(pow)(g->beta1, b.steps);
    b.second = MIXPI_LIBM(pow)(g->beta2, b.steps);
    return b;
}

/* The scalars of Adam's update, with bias corrections: the rate is divided by bc1, and sqrt(v) by
 * sqrt(bc2). */
MIXPREC_HD void mixpi_update_adam(const mixp_param_group *g, double lr,
                                  const mixpi_beta_powers *b, mixp_step_scalars *u) {
    const double bc1 = 1.0 - b->first, bc2 = 1.0 - b->second;
    u->beta1 = (float)g->beta1;
    u->rest1 = (float)(1.0 - g->beta1);
    u->rate = (float)(lr / bc1);
    u->scale_m = 1.0f;
    u->scale_v = (float)(1.0 / MIXPI_LIBM(sqrt)(bc2));
}

/* NAdam's part: the numerator is scale_g g + scale_m m. The momentum of step i is beta1 (1 -
 * 0.96^(i momentum_decay) / 2). A product of momentums below 2^-60 does not change the results, so
 * the loop ends there. */
MIXPI_HD_SELDOM
MIXPREC_HD void mixpi_update_nadam(const mixp_param_group *g, double lr,
                                   const mixpi_beta_powers *b, mixp_step_scalars *u) {
    const double each = MIXPI_LIBM(pow)(0.96, g->momentum_decay);
    const double newest = MIXPI_LIBM(pow)(0.96, b->steps * g->momentum_decay);
    const double last = g->beta1 * (1.0 - 0.5 * newest);
    const double next = g->beta1 * (1.0 - 0.5 * (newest * each));
    double power = each, product = 1.0, left = b->steps;
    for (; left > 0.0 && product > 8.7e-19 && power > 8.7e-19; left -= 1.0, power *= each)
        product *= g->beta1 * (1.0 - 0.5 * power);
    if (left > 0.0 && product > 8.7e-19) product *= MIXPI_LIBM(pow)(g->beta1, left);
    u->rate = (float)lr;
    u->scale_g = (float)((1.0 - last) / (1.0 - product));
    u->scale_m = (float)(next / mixpi_fma(-product, next, 1.0));
}

/* RAdam's part, for Adam's update (Liu et al., "On the Variance of the Adaptive Learning Rate and
 * Beyond", 2020). While v has too few values, the denominator is 1. */
MIXPI_HD_SELDOM
MIXPREC_HD void mixpi_update_radam(const mixp_param_group *g, double lr,
                                   const mixpi_beta_powers *b, mixp_step_scalars *u) {
    const double bc1 = 1.0 - b->first, bc2 = 1.0 - b->second;
    const double most = 2.0 / (1.0 - g->beta2) - 1.0;
    const double length = most - 2.0 * b->steps * b->second / bc2;
    double rest;
    u->scale_v = length > 5.0 ? 1.0f : 0.0f;
    if (length <= 5.0) u->eps = 1.0f;
    if (length <= 5.0) return;
    rest = (length - 4.0) * (length - 2.0) * most / ((most - 4.0) * (most - 2.0) * length);
    u->rate = (float)(lr / bc1 * MIXPI_LIBM(sqrt)(rest * bc2));
}

/* The scalars of RMSprop, Lion and Muon, which have no bias correction: all come from the group. */
MIXPREC_HD void mixpi_update_plain(mixp_optimizer_kind kind, const mixp_param_group *g,
                                   double lr, mixp_step_scalars *u) {
    double first = kind < MIXP_OPTIMIZER_MUON ? g->beta1 : g->momentum;
    u->beta1 = (float)first;
    u->rest1 = (float)(1.0 - first);
    u->rate = (float)lr;
    u->scale_m = 1.0f;
    u->scale_v = 1.0f;
}

/* Adagrad's scalars, for RMSprop's update: v is a sum, and the rate falls with the steps. */
MIXPREC_HD void mixpi_update_adagrad(const mixp_param_group *g, double lr, int64_t t,
                                     mixp_step_scalars *u) {
    const double slower = mixpi_fma((double)t - 1.0, g->lr_decay, 1.0);
    mixpi_update_plain(MIXP_OPTIMIZER_ADAGRAD, g, lr / slower, u);
    u->beta2 = 1.0f;
    u->rest2 = 1.0f;
}

/* Is the weight decay decoupled? If not, it is added to the gradient. */
MIXPREC_HD int mixpi_is_decoupled(const mixp_step_plan *plan) {
    return plan->decoupled || plan->kind == MIXP_OPTIMIZER_ADAMW ||
           plan->kind >= MIXP_OPTIMIZER_LION;
}

/* Does mixpi_adam_element update the elements of this kind? */
MIXPREC_HD int mixpi_is_adam(mixp_optimizer_kind kind)
{ return kind < MIXP_OPTIMIZER_SGD || kind == MIXP_OPTIMIZER_RADAM; }

MIXPREC_HD void mixpi_update_decay(const mixp_step_plan *plan, const mixp_param_group *g,
                                   double lr, mixp_step_scalars *u) {
    const int decoupled = mixpi_is_decoupled(plan);
    u->l2 = decoupled ? 0.0f : (float)g->weight_decay;
    u->decay = !decoupled ? 0.0f : (float)(lr * g->weight_decay);
}

/* The scalars of Adam and its relatives. */
MIXPREC_HD void mixpi_update_corrected(mixp_optimizer_kind kind, const mixp_param_group *g,
                                       double lr, int64_t t, mixp_step_scalars *u) {
    const mixpi_beta_powers b = mixpi_beta_powers_of(g, t);
    mixpi_update_adam(g, lr, &b, u);
    if (kind == MIXP_OPTIMIZER_NADAM) mixpi_update_nadam(g, lr, &b, u);
    if (kind == MIXP_OPTIMIZER_RADAM) mixpi_update_radam(g, lr, &b, u);
}

/* The scalars that one kind has. */
MIXPI_HD_SELDOM
MIXPREC_HD void mixpi_update_of(mixp_optimizer_kind kind, const mixp_param_group *g, double lr,
                                int64_t t, mixp_step_scalars *u) {
    switch (kind) {
    case MIXP_OPTIMIZER_ADAM:
    case MIXP_OPTIMIZER_ADAMW:
    case MIXP_OPTIMIZER_ADAMAX:
    case MIXP_OPTIMIZER_NADAM:
    case MIXP_OPTIMIZER_RADAM: mixpi_update_corrected(kind, g, lr, t, u); break;
    case MIXP_OPTIMIZER_SGD: mixpi_update_sgd(g, lr, t, u); break;
    case MIXP_OPTIMIZER_ADAGRAD: mixpi_update_adagrad(g, lr, t, u); break;
    default: mixpi_update_plain(kind, g, lr, u); break;
    }
}

/* The scalars of the group's update, for a parameter in its t-th step. */
MIXPI_HD_SELDOM
MIXPREC_HD void mixpi_step_scalars_of(const mixp_step_plan *plan,
                                     const mixp_step_state *state, int group, int64_t t,
                                     mixp_step_scalars *u) {
    const mixp_param_group *g = &plan->groups[group];
    double lr = mixpi_plan_lr(plan, g->lr, state->applied - 1);
    u->nesterov = g->nesterov;
    u->cautious = plan->cautious;
    u->factor = (float)(plan->maximize ? -state->factor : state->factor);
    u->momentum = (float)g->momentum;
    u->beta2 = (float)g->beta2;
    u->rest2 = (float)(1.0 - g->beta2);
    u->eps = (float)g->eps;
    u->scale_g = 0.0f;
    mixpi_update_decay(plan, g, lr, u);
    mixpi_update_of(plan->kind, g, lr, t, u);
}

/* min(1, max_norm / (norm + 1e-6)), as in PyTorch. For a NaN norm: 1. */
MIXPREC_HD double mixpi_clip_coefficient(double norm, double max_norm) {
    double c = max_norm / (norm + 1e-6);
    return c < 1.0 ? c : 1.0;
}

/* Chooses the statistics to use: those of this look, or those that unscale found earlier. */
MIXPREC_HD void mixpi_step_look(const mixp_step_plan *plan, mixp_step_state *s) {
    if (!plan->gathered) {
        memset(&s->stats, 0, sizeof s->stats);
        s->stats.norm = (double)mixp_f32_of_bits(0x7FC00000u);
    }
    if (plan->look_only) s->at_unscale = s->stats;
    else if (plan->noted && plan->check && s->at_unscale.found_inf)
        s->stats = s->at_unscale;
}

/* The factor that scales a Muon direction of this norm to the norm 1. With the group's f32_states,
 * the iteration is in f32. Otherwise iteration and norm are in bf16, as in PyTorch. */
MIXPREC_HD double mixpi_muon_unit(double norm, const mixp_param_group *g) {
    float held = g->f32_states ? (float)norm
                               : mixp_f32_from_bf16(mixp_bf16_from_f32((float)norm));
    return 1.0 / ((double)held > g->eps ? (double)held : g->eps);
}

/* Computes the update's factor of gradients: the scale's inverse times the clip coefficient. */
MIXPREC_HD void mixpi_step_factor(const mixp_step_plan *plan, mixp_step_state *s,
                                  const mixp_scaler_state *scaler) {
    double clip = 1.0, norm;
#if defined(__CUDA_ARCH__)
    norm = __dmul_rn(s->stats.norm, (double)s->clipped);    /* keeps nvcc from making an fma */
#else
    norm = s->stats.norm * (double)s->clipped;
#endif
    if (plan->gathered && plan->max_norm > 0.0)
        clip = mixpi_clip_coefficient(norm, plan->max_norm);
    s->scale = scaler ? mixpi_scaler_scale_at(scaler, plan->age) : 1.0f;
    s->factor = clip;
    if (scaler && !plan->unscaled)
        s->factor = clip * (double)mixpi_scaler_inverse(s->scale);
    s->clip = (float)(clip * (plan->gathered ? (double)s->clipped : 1.0));
    if (plan->kind == MIXP_OPTIMIZER_MUON_UNIT)
        s->factor = mixpi_muon_unit(norm, &plan->groups[0]);
}

/* Is x finite? Tests the bits, so the answer is the same on every device. */
MIXPREC_HD int mixpi_f64_is_finite(double x)
{ return (mixp_bits_of_f64(x) & 0x7FF0000000000000u) != 0x7FF0000000000000u; }

/* Mean and standard deviation of n >= 2 values, with the same roundings on every device. */
MIXPREC_HD void mixpi_spread_of(const double *x, int64_t n, double *mean, double *sd) {
    double sum = 0.0, squares = 0.0, least;
    int64_t i;
    for (i = 0; i < n; i++) sum += x[i];
    *mean = sum / (double)n;
    for (i = 0; i < n; i++)
        squares = mixpi_fma(x[i] - *mean, x[i] - *mean, squares);
    *sd = MIXPI_LIBM(sqrt)(squares / (double)(n - 1));
    least = MIXPI_LIBM(fabs)(*mean) * 0.001;
    if (*sd < least) *sd = least;
    if (!(*sd > 0.0)) *sd = 1.17549435e-38;
}

/* Compares a value with its history. s keeps the value with the highest z. */
MIXPREC_HD void mixpi_spike_judge(const mixp_step_plan *plan, mixp_spike_state *s,
                                  int kind, double value) {
    const int64_t window = plan->spike.window;
    int64_t n = s->entered[kind] < window ? s->entered[kind] : window;
    double mean = 0.0, sd = 0.0, z = mixp_f64_of_bits(0x7FF0000000000000u);
    if (mixpi_f64_is_finite(value)) {
        if (2 * n < window) return;
        mixpi_spread_of(plan->spike_window + kind * window, n, &mean, &sd);
        z = (value - mean) / sd;
    }
    if (z <= s->z) return;
    s->z = z;
    s->mean = mean;
    s->sd = sd;
    if (z > plan->spike.z) s->of = kind + 1;
}

/* The values of an applied step enter their windows. */
MIXPREC_HD void mixpi_spike_enter(const mixp_step_plan *plan, mixp_spike_state *s,
                                  const double *values) {
    int kind;
    for (kind = 0; kind < MIXPI_SPIKE_KINDS; kind++) {
        int64_t at = kind * (int64_t)plan->spike.window;
        if (!((int)plan->spike.of >> kind & 1)) continue;
        at += s->entered[kind]++ % plan->spike.window;
        plan->spike_window[at] = values[kind];
    }
}

/* After max_in_a_row spikes the values are a new level: applies the step, empties the windows. */
MIXPREC_HD void mixpi_spike_settle(const mixp_step_plan *plan, mixp_spike_state *s) {
    const int32_t most = plan->spike.max_in_a_row;
    if (!s->of || most < 0 || s->in_a_row < most || !mixpi_f64_is_finite(s->z)) return;
    s->of = 0;
    s->entered[0] = s->entered[1] = 0;
}

/* The loss of this step; with several ranks, the mean over the ranks. */
MIXPREC_HD double mixpi_step_loss(const mixp_step_plan *plan, const mixp_step_state *s) {
    if (s->agreed.ranks) return (double)s->agreed.loss;
    return plan->loss ? (double)*plan->loss : 0.0;
}

/* Skips a step that is a spike. A step already skipped for its gradients is not judged. */
MIXPREC_HD void mixpi_step_spike(const mixp_step_plan *plan, mixp_step_state *step) {
    mixp_spike_state *s = &step->spike;
    const double values[MIXPI_SPIKE_KINDS] = { step->stats.norm,
                                               mixpi_step_loss(plan, step) };
    int kind;
    s->of = 0;
    s->z = s->mean = s->sd = 0.0;
    if (step->skip) return;

    /* The worst of the numbers that the plan judges. */
    s->z = -mixp_f64_of_bits(0x7FF0000000000000u);
    for (kind = 0; kind < MIXPI_SPIKE_KINDS; kind++)
        if ((int)plan->spike.of >> kind & 1)
            mixpi_spike_judge(plan, s, kind, values[kind]);
    mixpi_spike_settle(plan, s);

    /* A spike is skipped; a step that is not a spike enters the averages. */
    if (s->of) {
        step->skip = 1;
        if (mixpi_f64_is_finite(s->z) && s->in_a_row < INT32_MAX) s->in_a_row++;
        return;
    }
    if (!mixpi_f64_is_finite(s->z)) s->z = 0.0;
    s->in_a_row = 0;
    mixpi_spike_enter(plan, s, values);
}

/* Records an Inf or NaN in the buffers, of any rank. Returns 1 if that skips the step. No scale
 * prevents it: a guard treats it as an overflow in the forward pass. */
MIXPREC_HD int mixpi_step_buffers(const mixp_step_plan *plan, mixp_step_state *s,
                                  mixp_scaler_state *scaler) {
    s->bad_buffer = s->agreed.ranks ? s->agreed.buffer : s->buffer_found;
    s->buffer_found = 0;
    if (!plan->check || !s->bad_buffer) return 0;
    if (scaler && !s->stopped) scaler->found_inf = scaler->buffer_bad = 1;
    return 1;
}

/* All scalar work of one step, except the scalars of the groups' updates. Returns 1 if the step is
 * applied. */
MIXPREC_HD int mixpi_step_decide(const mixp_step_plan *plan, mixp_step_state *s,
                                 mixp_scaler_state *scaler) {
    int bad;
    mixpi_step_look(plan, s);
    bad = s->stats.found_inf != 0;
    if (scaler && bad && !s->stopped) scaler->found_inf = 1;
    if (scaler && plan->gathered) mixpi_scaler_note_unscaled(scaler, s->stats.largest);
    if (plan->look_only) return 0;
    s->loss_bad = scaler && scaler->loss_bad;
    mixpi_step_factor(plan, s, scaler);
    bad |= mixpi_step_buffers(plan, s, scaler);
    s->skip = s->stopped || s->agreed.differs || (plan->check && bad);
    if (plan->spike.of) mixpi_step_spike(plan, s);
    s->lr = mixpi_plan_lr(plan, plan->groups[0].lr, s->applied);
    s->steps++;
    if (s->skip) s->skipped++;
    else s->applied++;
    return !s->skip;
}

/* All scalar work of one step. A pure function, the same on every device. */
MIXPREC_HD void mixpi_step_prepare(const mixp_step_plan *plan, mixp_step_state *s,
                                  mixp_scaler_state *scaler) {
    int g, n = mixpi_step_decide(plan, s, scaler) ? plan->n_groups : 0;
    for (g = 0; g < n; g++) mixpi_step_scalars_of(plan, s, g, s->applied, &s->update[g]);
}

/* The decay of weight p, which is about to move against `update`. Cautious: 0 where the update
 * moves p away from 0 (Chen et al., "Cautious Weight Decay", 2025). */
MIXPREC_HD float mixpi_decay_of(const mixp_step_scalars *u, float update, float p)
{ return u->cautious && 0.0f > update * p ? 0.0f : u->decay; }
