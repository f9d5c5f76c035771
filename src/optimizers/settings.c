#pragma once
#include "slots.c"
/* --- making, groups -------------------------------------------------------------------- */

/* Fields that not all kinds have. */
enum {
    MIXPI_HAS_BETA1 = 1, MIXPI_HAS_BETA2 = 2, MIXPI_HAS_EPS = 4, MIXPI_HAS_MOMENTUM = 8,
    MIXPI_HAS_DAMPENING = 16, MIXPI_HAS_NESTEROV = 32,
    MIXPI_HAS_CAUTIOUS = 128, MIXPI_HAS_MUON = 256, MIXPI_HAS_AMSGRAD = 512,
    MIXPI_HAS_CENTERED = 1024, MIXPI_HAS_DECOUPLED = 2048, MIXPI_HAS_SUM = 4096,
    MIXPI_HAS_MOMENTUM_DECAY = 8192,
    MIXPI_HAS_BETAS = MIXPI_HAS_BETA1 | MIXPI_HAS_BETA2,
    MIXPI_HAS_MOMENTS = MIXPI_HAS_BETAS | MIXPI_HAS_EPS,
    MIXPI_HAS_ADAMS = MIXPI_HAS_MOMENTS | MIXPI_HAS_AMSGRAD
};

/* A kind of optimizer: its name, the fields that it has, and its defaults. */
typedef struct mixpi_kind {
    const char *name;
    int         has;
    double      lr, beta1, beta2, eps, weight_decay;
} mixpi_kind;

/* The row of a kind that is at most MIXP_OPTIMIZER_MUON. */
static const mixpi_kind *mixpi_kind_of(mixp_optimizer_kind kind) {
    static const mixpi_kind rows[] = { /* in the order of mixp_optimizer_kind */
        /* name, fields; lr, betas, eps, weight_decay */
        { "Adam", MIXPI_HAS_ADAMS, 1e-3, 0.9, 0.999, 1e-8, 0.0 },
        { "AdamW", MIXPI_HAS_ADAMS | MIXPI_HAS_CAUTIOUS, 1e-3, 0.9, 0.999, 1e-8, 0.01 },
        { "SGD", MIXPI_HAS_MOMENTUM | MIXPI_HAS_DAMPENING | MIXPI_HAS_NESTEROV, 1e-3, 0.0, 0.0, 0.0,
            0.0 },
        { "RMSprop", MIXPI_HAS_BETA2 | MIXPI_HAS_EPS | MIXPI_HAS_MOMENTUM | MIXPI_HAS_CENTERED,
            1e-2, 0.0, 0.99, 1e-8, 0.0 },
        { "Adagrad", MIXPI_HAS_EPS | MIXPI_HAS_SUM, 1e-2, 0.0, 0.0, 1e-10, 0.0 },
        { "Adamax", MIXPI_HAS_MOMENTS, 2e-3, 0.9, 0.999, 1e-8, 0.0 },
        { "NAdam", MIXPI_HAS_MOMENTS | MIXPI_HAS_DECOUPLED | MIXPI_HAS_MOMENTUM_DECAY, 2e-3, 0.9,
            0.999, 1e-8, 0.0 },
        { "RAdam", MIXPI_HAS_MOMENTS | MIXPI_HAS_DECOUPLED, 1e-3, 0.9, 0.999, 1e-8, 0.0 },
        { "Lion", MIXPI_HAS_BETAS | MIXPI_HAS_CAUTIOUS, 1e-4, 0.9, 0.99, 0.0, 0.0 },
        { "Muon",
            MIXPI_HAS_EPS | MIXPI_HAS_MOMENTUM | MIXPI_HAS_NESTEROV | MIXPI_HAS_CAUTIOUS |
                MIXPI_HAS_MUON,
            1e-3, 0.0, 0.0, 1e-7, 0.1 }
    };
    return &rows[kind];
}

static mixp_optimizer_desc mixpi_defaults(mixp_optimizer_kind kind) {
    const mixpi_kind *row = mixpi_kind_of(kind);
    mixp_optimizer_desc d = MIXPI_ZERO;
    d.kind = kind;
    d.lr = row->lr;
    d.beta1 = row->beta1;
    d.beta2 = row->beta2;
    d.eps = row->eps;
    d.weight_decay = row->weight_decay;
    return d;
}

MIXPREC_API mixp_optimizer_desc mixp_adamw_defaults(void) {
    return mixpi_defaults(MIXP_OPTIMIZER_ADAMW);
}
MIXPREC_API mixp_optimizer_desc mixp_adam_defaults(void) {
    return mixpi_defaults(MIXP_OPTIMIZER_ADAM);
}
MIXPREC_API mixp_optimizer_desc mixp_sgd_defaults(void) {
    return mixpi_defaults(MIXP_OPTIMIZER_SGD);
}
MIXPREC_API mixp_optimizer_desc mixp_rmsprop_defaults(void) {
    return mixpi_defaults(MIXP_OPTIMIZER_RMSPROP);
}
MIXPREC_API mixp_optimizer_desc mixp_lion_defaults(void) {
    return mixpi_defaults(MIXP_OPTIMIZER_LION);
}

MIXPREC_API mixp_optimizer_desc mixp_adagrad_defaults(void) {
    return mixpi_defaults(MIXP_OPTIMIZER_ADAGRAD);
}
MIXPREC_API mixp_optimizer_desc mixp_adamax_defaults(void) {
    return mixpi_defaults(MIXP_OPTIMIZER_ADAMAX);
}
MIXPREC_API mixp_optimizer_desc mixp_nadam_defaults(void) {
    mixp_optimizer_desc d = mixpi_defaults(MIXP_OPTIMIZER_NADAM);
    d.momentum_decay = 4e-3;
    return d;
}
MIXPREC_API mixp_optimizer_desc mixp_radam_defaults(void) {
    return mixpi_defaults(MIXP_OPTIMIZER_RADAM);
}

MIXPREC_API mixp_optimizer_desc mixp_muon_defaults(void) {
    mixp_optimizer_desc d = mixpi_defaults(MIXP_OPTIMIZER_MUON);
    d.momentum = 0.95;
    d.nesterov = 1;
    d.muon.a = 3.4445;
    d.muon.b = -4.7750;
    d.muon.c = 2.0315;
    d.muon.iterations = 5;
    return d;
}

static int mixpi_is_at_least_0(double x) { return mixpi_f64_is_finite(x) && x >= 0.0; }
static int mixpi_is_beta(double x) { return mixpi_is_at_least_0(x) && x < 1.0; }

/* Do steps divide by a second moment? */
static int mixpi_has_v(mixp_optimizer_kind kind) {
    return kind != MIXP_OPTIMIZER_SGD && kind < MIXP_OPTIMIZER_LION;
}

/* Is m kept? SGD and RMSprop keep m only with momentum, which is then above 0 in all groups. */
static int mixpi_momentum_counts(mixp_optimizer_kind kind) {
    return kind == MIXP_OPTIMIZER_SGD || kind == MIXP_OPTIMIZER_RMSPROP;
}
static int mixpi_has_m(const mixp_step_plan *plan) {
    if (plan->kind == MIXP_OPTIMIZER_ADAGRAD) return 0;
    return !mixpi_momentum_counts(plan->kind) || plan->groups[0].momentum > 0.0;
}
static int mixpi_has_third(const mixp_step_plan *plan) { return plan->amsgrad || plan->centered; }

/* Did the caller set only lr in a zeroed struct? Adam would divide by 0. */
static int mixpi_group_is_zeroed(mixp_optimizer_kind kind, const mixp_param_group *g) {
    if (!mixpi_has_v(kind) || kind == MIXP_OPTIMIZER_ADAGRAD) return 0;
    return mixpi_is_at_least_0(g->beta2) && g->beta2 + g->eps <= 0.0;
}

/* Returns what is wrong with the betas and eps of a kind that has them, or NULL. */
static const char *mixpi_betas_wrong(mixp_optimizer_kind kind, const mixp_param_group *g) {
    const char *second = kind == MIXP_OPTIMIZER_RMSPROP ? "alpha (beta2) must lie in [0,1)"
                                                        : "beta2 must lie in [0,1)";
    if (!mixpi_is_beta(g->beta1)) return "beta1 must lie in [0,1)";
    if (!mixpi_is_beta(g->beta2)) return second;
    if (mixpi_group_is_zeroed(kind, g)) return "beta2 and eps are 0: start from the defaults";
    if (kind == MIXP_OPTIMIZER_MUON && !(g->eps > 0.0))
        return "Muon's eps must be above 0: start from mixp_optimizer_group(opt, 0, &g)";
    if (kind == MIXP_OPTIMIZER_ADAGRAD && !(g->eps > 0.0))
        return "Adagrad's eps must be above 0: start from the defaults";
    if (kind == MIXP_OPTIMIZER_ADAGRAD && !mixpi_is_at_least_0(g->lr_decay))
        return "lr_decay must be finite and at least 0";
    if (kind == MIXP_OPTIMIZER_NADAM && !mixpi_is_at_least_0(g->momentum_decay))
        return "momentum_decay must be finite and at least 0";
    return mixpi_is_at_least_0(g->eps) ? NULL : "eps must be finite and at least 0";
}

/* Returns what is wrong with a group, or NULL. */
static const char *mixpi_group_wrong(mixp_optimizer_kind kind, const mixp_param_group *g) {
    if (!mixpi_is_at_least_0(g->lr)) return "lr must be finite and at least 0";
    if (!mixpi_is_at_least_0(g->weight_decay)) return "weight_decay must be finite and at least 0";
    if (!mixpi_is_at_least_0(g->momentum)) return "momentum must be finite and at least 0";
    if (kind != MIXP_OPTIMIZER_SGD) return mixpi_betas_wrong(kind, g);
    if (!mixpi_f64_is_finite(g->dampening)) return "dampening must be finite";
    if (g->nesterov && (g->momentum <= 0.0 || g->dampening < 0.0 || g->dampening > 0.0))
        return "nesterov needs momentum and no dampening";
    return NULL;
}

/* The group as it is stored. Fields that mixpi_group_wrong does not check for this kind are set to
 * 0, so that a load accepts every saved checkpoint. */
static mixp_param_group mixpi_group_kept(mixp_optimizer_kind kind, const mixp_param_group *group) {
    const int is_sgd = kind == MIXP_OPTIMIZER_SGD;
    mixp_param_group g = *group;
    g.nesterov = (is_sgd || kind == MIXP_OPTIMIZER_MUON) && g.nesterov;
    if (kind != MIXP_OPTIMIZER_ADAGRAD) g.lr_decay = 0.0;
    if (kind != MIXP_OPTIMIZER_NADAM) g.momentum_decay = 0.0;
    if (is_sgd) g.beta1 = g.beta2 = g.eps = 0.0;
    else g.dampening = 0.0;
    return g;
}

static const char *mixpi_states_wrong(const mixp_optimizer_states *s, int no_master) {
    if ((unsigned)s->m > MIXP_MOMENT_8BIT) return "states.m is not a mixp_moment_kind";
    if ((unsigned)s->v > MIXP_MOMENT_8BIT) return "states.v is not a mixp_moment_kind";
    if ((unsigned)s->master > MIXP_MASTER_8BIT) return "states.master is not a mixp_master_kind";
    if (no_master && s->master != MIXP_MASTER_F32)
        return "no_master and states.master contradict each other; set only one";
    return NULL;
}

/* Does the schedule have a step `total`? */
static int mixpi_schedule_ends(const mixp_schedule *s) {
    switch (s->kind) {
    case MIXP_SCHEDULE_LINEAR:
    case MIXP_SCHEDULE_COSINE:
    case MIXP_SCHEDULE_ONE_CYCLE:
    case MIXP_SCHEDULE_WSD:
    case MIXP_SCHEDULE_POLYNOMIAL:
    case MIXP_SCHEDULE_WAVE: return 1;
    default: return 0;
    }
}

/* gamma to the power of the number of milestones. */
static double mixpi_multi_step_most(const mixp_schedule *s) {
    double most = 1.0;
    for (int i = 0; i < MIXP_MAX_MILESTONES; i++)
        if (s->milestones[i] > 0) most *= s->gamma;
    return most;
}

/* Returns what is wrong with gamma, every, decay and growth, or NULL. */
static const char *mixpi_schedule_cycle_wrong(const mixp_schedule *s) {
    const int64_t most = (int64_t)1 << 40; /* a sum of two cannot overflow */
    const int is_step = s->kind == MIXP_SCHEDULE_STEP;
    const int is_cyclic = s->kind == MIXP_SCHEDULE_CYCLIC || s->kind == MIXP_SCHEDULE_CYCLIC_EXP;
    const int is_power = is_step || is_cyclic || s->kind == MIXP_SCHEDULE_EXPONENTIAL;

    /* The steps of a period, and the factor after each. */
    if (is_step || is_cyclic || s->kind == MIXP_SCHEDULE_RESTARTS) {
        if (s->every < 1) return "schedule.every must be at least 1";
        if (s->every > most) return "schedule.every must be at most 2^40";
    }
    if (is_power && !(s->gamma > 0.0 && s->gamma <= 1.0))
        return "schedule.gamma must be above 0 and at most 1";
    if (s->kind == MIXP_SCHEDULE_MULTI_STEP && !(s->gamma > 0.0 && mixpi_multi_step_most(s) < 1e30))
        return "schedule.gamma must be above 0, and below 1e30 to the power of its milestones";

    /* The steps of a fall, and how periods grow. */
    if (s->kind == MIXP_SCHEDULE_WSD && (s->decay < 1 || s->decay > s->total - s->warmup))
        return "schedule.decay must lie in [1, total - warmup]";
    if (is_cyclic && (s->decay < 0 || s->decay > most))
        return "schedule.decay must lie in [0, 2^40]";
    if (s->kind == MIXP_SCHEDULE_RESTARTS && s->growth < 0)
        return "schedule.growth must be at least 1; 0 = 1";
    return NULL;
}

/* Returns what is wrong with the milestones, or NULL. */
static const char *mixpi_milestones_wrong(const mixp_schedule *s) {
    int64_t before = 1;
    int ended = 0;
    if (s->kind != MIXP_SCHEDULE_MULTI_STEP) return NULL;
    for (int i = 0; i < MIXP_MAX_MILESTONES; i++) {
        const int64_t at = s->milestones[i];
        if (at && (ended || at < before)) return "schedule.milestones must rise, from 1 on";
        if (at) before = at;
        else ended = 1;
    }
    return NULL;
}

/* Returns what is wrong with the fields of ONE_CYCLE, or NULL. */
static const char *mixpi_one_cycle_wrong(const mixp_schedule *s) {
    if (s->kind != MIXP_SCHEDULE_ONE_CYCLE) return NULL;
    const double rise = s->pct_start > 0.0 ? s->pct_start : (double)s->warmup / (double)s->total;
    if (!(s->pct_start >= 0.0 && s->pct_start <= 1.0))
        return "schedule.pct_start must lie in [0,1]";
    if (s->pct_start > 0.0 && s->warmup)
        return "schedule.pct_start and schedule.warmup contradict each other; set only one";
    if (s->three_phase && rise > 0.5)
        return "schedule.three_phase needs a rise of at most half of schedule.total";
    return NULL;
}

/* Returns what is wrong with the fields that only some kinds read, or NULL. */
static const char *mixpi_schedule_part_wrong(const mixp_schedule *s) {
    const char *wrong;
    if (mixpi_schedule_ends(s) && s->total <= s->warmup)
        return "schedule.total must be above schedule.warmup";
    wrong = mixpi_schedule_cycle_wrong(s);
    if (!wrong) wrong = mixpi_milestones_wrong(s);
    if (!wrong) wrong = mixpi_one_cycle_wrong(s);
    if (wrong) return wrong;
    if (!(s->start_factor >= 0.0 && s->start_factor <= 1.0))
        return "schedule.start_factor must lie in [0,1]";
    if (s->kind == MIXP_SCHEDULE_POLYNOMIAL && !mixpi_is_at_least_0(s->power))
        return "schedule.power must be finite and at least 0";
    if (s->kind != MIXP_SCHEDULE_FUNCTION) return NULL;
    if (!s->factor) return "schedule.factor is NULL";
    return s->warmup ? "schedule.factor is the whole schedule: leave schedule.warmup 0" : NULL;
}

static const char *mixpi_schedule_wrong(const mixp_schedule *s) {
    const char *wrong;
    if ((unsigned)s->kind > MIXP_SCHEDULE_FUNCTION)
        return "schedule.kind is not a mixp_schedule_kind";
    if (s->warmup < 0) return "schedule.warmup is negative";
    wrong = mixpi_schedule_part_wrong(s);
    if (wrong) return wrong;
    if (!mixpi_is_at_least_0(s->min_factor) || s->min_factor > 1.0)
        return "schedule.min_factor must lie in [0,1]";
    return NULL;
}

/* Fills in the defaults of a rule. Returns what is wrong with the rule, or NULL. */
static const char *mixpi_spike_resolve(mixp_spike_rule *r) {
    if ((unsigned)r->of > MIXP_SPIKE_BOTH) return "spike.of is not a mixp_spike_of";
    if (r->window == 0) r->window = 128;
    if (r->max_in_a_row == 0) r->max_in_a_row = 8;
    if (!mixpi_is_at_least_0(r->z)) return "spike.z must be finite and at least 0";
    if (!(r->z > 0.0)) r->z = 6.0;
    if (r->window >= 4 && r->window <= 4096) return NULL;
    return "spike.window must lie in [4, 4096]";
}

/* Is a field set? */
static int mixpi_is_set(double x) { return x < 0.0 || !(x <= 0.0); }

/* Returns the first field of d that is set although the kind does not have it, or NULL. */
static const char *mixpi_field_extra(const mixp_optimizer_desc *d) {
    const mixp_muon_settings *m = &d->muon;
    const int lacks = ~mixpi_kind_of(d->kind)->has;
    const int sets_muon = mixpi_is_set(m->a) || mixpi_is_set(m->b) || mixpi_is_set(m->c) ||
                          m->iterations || m->f32 || m->rate || m->coefficients;
    if ((lacks & MIXPI_HAS_BETA1) && mixpi_is_set(d->beta1)) return "beta1";
    if ((lacks & MIXPI_HAS_BETA2) && mixpi_is_set(d->beta2)) return "beta2";
    if ((lacks & MIXPI_HAS_EPS) && mixpi_is_set(d->eps)) return "eps";
    if ((lacks & MIXPI_HAS_MOMENTUM) && mixpi_is_set(d->momentum)) return "momentum";
    if ((lacks & MIXPI_HAS_DAMPENING) && mixpi_is_set(d->dampening)) return "dampening";
    if ((lacks & MIXPI_HAS_NESTEROV) && d->nesterov) return "nesterov";
    if ((lacks & MIXPI_HAS_CAUTIOUS) && d->cautious) return "cautious";
    if ((lacks & MIXPI_HAS_AMSGRAD) && d->amsgrad) return "amsgrad";
    if ((lacks & MIXPI_HAS_CENTERED) && d->centered) return "centered";
    if ((lacks & MIXPI_HAS_DECOUPLED) && d->decoupled) return "decoupled";
    if ((lacks & MIXPI_HAS_SUM) && mixpi_is_set(d->lr_decay)) return "lr_decay";
    if ((lacks & MIXPI_HAS_SUM) && mixpi_is_set(d->initial_sum)) return "initial_sum";
    if ((lacks & MIXPI_HAS_MOMENTUM_DECAY) && mixpi_is_set(d->momentum_decay))
        return "momentum_decay";
    return (lacks & MIXPI_HAS_MUON) && sets_muon ? "muon" : NULL;
}

/* Returns what is wrong with the settings that only Muon has, or NULL. */
static const char *mixpi_muon_wrong(const mixp_optimizer_desc *d) {
    const mixp_muon_settings *m = &d->muon;
    if (d->kind != MIXP_OPTIMIZER_MUON) return NULL;
    if (!mixpi_f64_is_finite(m->a) || !mixpi_f64_is_finite(m->b) || !mixpi_f64_is_finite(m->c))
        return "muon.a, muon.b and muon.c must be finite";
    if (m->iterations < 1 || m->iterations > 99) return "muon.iterations must lie in [1, 99]";
    if ((unsigned)m->rate > MIXP_MUON_RATE_SPECTRAL_UNCLAMPED)
        return "muon.rate is not a mixp_muon_rate";
    for (int k = 0; m->coefficients && k < 3 * m->iterations; k++)
        if (!mixpi_f64_is_finite(m->coefficients[k / 3][k % 3]))
            return "muon.coefficients must be finite";
    return d->eps > 0.0 ? NULL : "eps must be above 0: start from mixp_muon_defaults";
}

/* Group 0 of a description. */
static mixp_param_group mixpi_desc_group(const mixp_optimizer_desc *d) {
    mixp_param_group g = MIXPI_ZERO;
    g.lr = d->lr;
    g.beta1 = d->beta1;
    g.beta2 = d->beta2;
    g.eps = d->eps;
    g.weight_decay = d->weight_decay;
    g.momentum = d->momentum;
    g.dampening = d->dampening;
    g.nesterov = d->nesterov != 0;
    g.lr_decay = d->lr_decay;
    g.momentum_decay = d->momentum_decay;
    return g;
}

/* Returns what is wrong with a description, or NULL. Fills in the defaults of *spike. */
static const char *mixpi_optimizer_desc_wrong(
    const mixp_optimizer_desc *d, mixp_spike_rule *spike) {
    const mixp_param_group group = mixpi_desc_group(d);
    const char *wrong = mixpi_muon_wrong(d);
    if (!wrong) wrong = mixpi_group_wrong(d->kind, &group);
    if (!wrong) wrong = mixpi_spike_resolve(spike);
    if (!wrong) wrong = mixpi_schedule_wrong(&d->schedule);
    if (!wrong) wrong = mixpi_states_wrong(&d->states, d->no_master);
    if (!mixpi_is_at_least_0(d->max_norm)) wrong = "max_norm must be finite and at least 0";
    if (d->centered && d->states.v != MIXP_MOMENT_F32)
        wrong =
            "centered subtracts two moments, which must be f32: set states.v to MIXP_MOMENT_F32";
    if (!mixpi_is_at_least_0(d->initial_sum) || d->initial_sum > 3.4e38)
        wrong = "initial_sum must be finite in f32 and at least 0";
    return wrong;
}

static mixp_result mixpi_optimizer_desc_check(
    mixp_context *ctx, const mixp_optimizer_desc *d, mixp_spike_rule *spike) {
    if ((unsigned)d->kind > MIXP_OPTIMIZER_MUON)
        return mixp_context_fail(ctx, MIXP_ERR_ARGUMENT,
            "mixp_optimizer_new: kind is not a mixp_optimizer_kind: start from the kind's "
            "defaults");
    const char *extra = mixpi_field_extra(d);
    if (extra)
        return mixp_context_fail(ctx, MIXP_ERR_ARGUMENT,
            "mixp_optimizer_new: %s has no %s: leave it 0, or start from the defaults of another "
            "kind",
            mixpi_kind_of(d->kind)->name, extra);
    const char *wrong = mixpi_optimizer_desc_wrong(d, spike);
    if (!wrong) return MIXP_OK;
    return mixp_context_fail(
        ctx, MIXP_ERR_ARGUMENT, "mixp_optimizer_new: %s: %s", mixpi_kind_of(d->kind)->name, wrong);
}

/* Allocates opt's working memory for Muon. Returns 0 if out of memory. */
static int mixpi_muon_start(mixp_optimizer *opt, const mixp_muon_settings *settings) {
    mixpi_muon *m = (mixpi_muon *)mixpi_opt_host(opt, sizeof *m);
    if (!m) return 0;
    m->settings = *settings;
    m->settings.f32 = settings->f32 != 0;
    if (settings->coefficients) {
        const size_t bytes = (size_t)settings->iterations * sizeof *settings->coefficients;
        double(*kept)[3] = (double(*)[3])mixpi_opt_host(opt, bytes);
        if (!kept) return 0;
        memcpy(kept, settings->coefficients, bytes);
        m->coefficients = kept;
    }
    m->look = (mixp_step_state *)mixpi_opt_device(opt, sizeof *m->look);
    opt->muon = m;
    return m->look != NULL;
}

/* Allocates the memory that opt's kind and settings need. Returns 0 if out of memory. */
static int mixpi_optimizer_start(mixp_optimizer *opt, const mixp_optimizer_desc *d) {
    opt->state = (mixp_step_state *)mixpi_opt_device(opt, sizeof *opt->state);
    if (!opt->state) return 0;

    /* The values of applied steps, among which a spike stands out. */
    const size_t values = (size_t)opt->plan.spike.window * MIXPI_SPIKE_KINDS;
    if (opt->plan.spike.of)
        opt->plan.spike_window = (double *)mixpi_opt_device(opt, values * sizeof(double));
    if (opt->plan.spike.of && !opt->plan.spike_window) return 0;

    if (d->kind == MIXP_OPTIMIZER_MUON && !mixpi_muon_start(opt, &d->muon)) return 0;
    return MIXPI_CREW(opt->ctx, enter(opt)) == MIXP_OK;
}

/* The plan of every step. */
static mixp_step_plan mixpi_desc_plan(const mixp_optimizer_desc *d) {
    const mixp_param_group group = mixpi_desc_group(d);
    mixp_step_plan plan = MIXPI_ZERO;
    plan.kind = d->kind;
    plan.max_norm = d->max_norm;
    plan.schedule = d->schedule;
    plan.groups[0] = mixpi_group_kept(d->kind, &group);
    plan.n_groups = 1;
    plan.cautious = d->cautious != 0;
    plan.maximize = d->maximize != 0;
    plan.amsgrad = d->amsgrad != 0;
    plan.centered = d->centered != 0;
    plan.decoupled = d->decoupled != 0;
    return plan;
}

MIXPI_SELDOM
static mixp_optimizer *mixpi_do_optimizer_new(mixp_context *ctx, const mixp_optimizer_desc *desc) {
    const mixp_optimizer_desc d = desc ? *desc : mixp_adamw_defaults();
    mixp_spike_rule spike = d.spike;
    if (mixpi_optimizer_desc_check(ctx, &d, &spike) != MIXP_OK || !ctx) return NULL;
    mixpi_warn_of_made(ctx, "mixp_optimizer_new");
    mixp_optimizer *opt = (mixp_optimizer *)mixpi_owner_new(ctx, sizeof *opt);
    if (!opt) return NULL;

    opt->ctx = ctx;
    opt->plan = mixpi_desc_plan(&d);
    opt->plan.spike = spike;
    opt->states = d.states;
    opt->no_master = d.no_master;
    opt->zero_grad = d.zero_grad;
    opt->initial_sum = (float)d.initial_sum;
    opt->issued = -1;

    /* Allocate its memory, then enter it into the context's list. */
    if (!mixpi_optimizer_start(opt, &d)) return NULL;
    opt->next = (mixp_optimizer *)ctx->training.optimizers;
    opt->bit = opt->next ? (opt->next->bit + 1) % MIXPI_OPTIMIZER_BITS : 0;
    ctx->training.optimizers = opt;
    return opt;
}

MIXPREC_API mixp_optimizer *mixp_optimizer_new(mixp_context *ctx, const mixp_optimizer_desc *desc) {
    const int before = mixpi_enter(ctx);
    mixp_optimizer *opt = mixpi_do_optimizer_new(ctx, desc);
    mixpi_leave(ctx, before, MIXP_OK);
    return opt;
}

/* Writes group `index`, which must be below `count`. */
static mixp_result mixpi_group_write(
    mixp_optimizer *opt, int index, int count, const mixp_param_group *group) {
    const mixpi_float_mode mode = mixpi_float_calm();
    const char *wrong = mixpi_group_wrong(opt->plan.kind, group);
    if (mixpi_momentum_counts(opt->plan.kind) &&
        (group->momentum > 0.0) != (opt->plan.groups[0].momentum > 0.0))
        wrong = "momentum must stay 0 in all groups, or stay above 0 in all";
    if (mixpi_group_is_zeroed(opt->plan.kind, group))
        wrong = "beta2 and eps are 0: start from mixp_optimizer_group(opt, 0, &g)";
    if (index < 0 || index >= count) wrong = "no group has this index";
    if (index >= MIXP_MAX_GROUPS) wrong = "the limit is MIXP_MAX_GROUPS groups";
    if (!wrong) opt->plan.groups[index] = mixpi_group_kept(opt->plan.kind, group);
    mixpi_float_leave(mode);
    if (!wrong) return MIXP_OK;
    return mixp_context_fail(opt->ctx, MIXP_ERR_ARGUMENT, "optimizer group %d: %s", index, wrong);
}

MIXPREC_API int mixp_optimizer_add_group(mixp_optimizer *opt, const mixp_param_group *group) {
    int index = opt ? opt->plan.n_groups : 0;
    if (opt && !group)
        mixp_context_fail(opt->ctx, MIXP_ERR_ARGUMENT,
            "mixp_optimizer_add_group: the group is NULL; start from mixp_optimizer_group(opt, 0, "
            "&g)");
    if (!opt || !group || mixpi_group_write(opt, index, index + 1, group) != MIXP_OK) return -1;
    return opt->plan.n_groups++;
}

MIXPREC_API mixp_result mixp_optimizer_group(
    const mixp_optimizer *opt, int index, mixp_param_group *out) {
    if (!opt || !out || index < 0 || index >= opt->plan.n_groups)
        return mixp_context_fail(opt ? opt->ctx : NULL, MIXP_ERR_ARGUMENT,
            "optimizer group %d: no group has this index, or the result pointer is NULL", index);
    *out = opt->plan.groups[index];
    return MIXP_OK;
}

MIXPREC_API mixp_result mixp_optimizer_set_group(
    mixp_optimizer *opt, int index, const mixp_param_group *g) {
    if (opt && g) return mixpi_group_write(opt, index, opt->plan.n_groups, g);
    return mixp_context_fail(opt ? opt->ctx : NULL, MIXP_ERR_ARGUMENT,
        "mixp_optimizer_set_group: the group is NULL; start from mixp_optimizer_group(opt, 0, &g)");
}

/* The groups share all checks of lr, so either all groups accept it or none does. */
MIXPREC_API mixp_result mixp_optimizer_set_lr(mixp_optimizer *opt, double lr) {
    mixp_result r = MIXP_OK;
    if (!opt) return MIXP_ERR_ARGUMENT;
    for (int i = 0; r == MIXP_OK && i < opt->plan.n_groups; i++) {
        mixp_param_group g = opt->plan.groups[i];
        g.lr = lr;
        r = mixpi_group_write(opt, i, opt->plan.n_groups, &g);
    }
    return r;
}
