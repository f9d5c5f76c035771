#pragma once
#include "optimizers.h"
#include "cpu/passes.c"
#include "tensors/crew.c"
#include "scaler.c"
/* ==== 10. OPTIMIZERS (implementation) ================================================== */

/* A parameter on the host. Kernels see the row with the same index. */
typedef struct mixpi_slot {
    mixp_tensor *param;
    mixp_tensor *grad;          /* the caller's view, or NULL: use param->grad             */
    uint64_t     version;       /* version of param for which the master weight is current */
    int          kept;          /* where its states are: MIXPI_HERE ...                    */
    float       *ema;           /* device memory: average of the weight, or NULL           */
    void        *shelf;         /* device memory: the weight while its average is in, or NULL */
    /* Used by the ranks. */
    int          owner;         /* rank that updates it; -1: each updates a piece          */
    void        *piece;         /* device memory: states of this rank's piece              */
} mixpi_slot;

/* Who updates a parameter: this rank, another rank, or each rank a piece. */
enum { MIXPI_HERE, MIXPI_AWAY, MIXPI_IN_PIECES };

/* Counts of one parameter's gradient in its low dtype. */
typedef struct mixpi_grad_tally {
    mixp_look look;
    int64_t   exponents[MIXP_EXPONENTS];
} mixpi_grad_tally;

enum { MIXPI_READY, MIXPI_UNSCALED, MIXPI_STEPPED };

/* A matrix is updated in three passes of the kernel `update`, each with a row of its own. */
enum { MIXPI_MUON_MOMENTUM, MIXPI_MUON_UNIT, MIXPI_MUON_LAST, MIXPI_MUON_PASSES };

/* Working memory of Muon: device memory for the largest matrix, and the rows of its passes. */
typedef struct mixpi_muon {
    mixp_muon_settings settings;
    int64_t  elements, side;    /* capacity: elements of a matrix; its smaller side        */
    mixp_out x, gram, poly;     /* X, A and b A + c A A, in the iteration's dtype          */
    float   *x_sum, *poly_sum;  /* x and poly in f32                                       */
    int64_t  room;              /* number of the optimizer's rows that fit                 */
    int64_t  tried;             /* number of parameters whose products have scratch memory */
    mixp_param_row  *rows, *device_rows;
    mixp_step_state *look;      /* step state for the norm of the direction                */
} mixpi_muon;

/* Tensors in the order of their addresses, with room for the optimizer's capacity. */
typedef struct mixpi_sorted {
    mixp_tensor **at;
    int64_t       count;
} mixpi_sorted;

struct mixp_optimizer {
    mixp_context    *ctx;
    mixp_step_plan   plan;
    mixp_optimizer_states states;
    int              no_master, zero_grad;
    int64_t          count, capacity;
    mixpi_slot      *slots;
    mixpi_sorted     params, grads; /* the parameters; the callers' gradients              */
    mixp_param_row  *rows, *device_rows;    /* table on the host; table that kernels read  */
    mixp_param_row  *own_rows, *device_own_rows;    /* the rows that this rank updates: the same
                                                       tables unless the states are sharded */
    int              looks_own; /* 1: the other ranks look at the other rows               */
    int              rows_changed;
    int              clipped;   /* 1: the statistics come from the last clip: keep them    */
    uint64_t         clipped_versions;  /* sum of the gradients' versions at that clip     */
    mixp_step_state *state;     /* device memory                                           */
    uint64_t         loss_of;   /* the context's generation when plan.loss was set      */
    /* Counts of each parameter: one block in device memory, and a copy on the host. */
    mixp_lost       *lost, *lost_copy;
    mixpi_grad_tally *tally, *tally_copy;
    int              tally_here;    /* 1: the copy is up to date                        */
    int              tally_recorded; /* 1: a graph counts as well, without notice to the host */
    int64_t          tallies;   /* capacity in parameters                               */
    int64_t          tally_count;   /* number of parameters at the newest count             */
    int              tally_due; /* 1: the next look at the gradients counts as well     */
    int              tallied;   /* 1: the gradients of this step are counted            */
    int64_t          tally_step;    /* the context's step then, plus 1                  */
    /* The last call of a scaler on this optimizer. Valid until that scaler's update, which covers
     * all optimizers in its list. */
    mixp_scaler     *scaler;
    uint64_t         epoch;
    int              stage;
    mixp_optimizer  *next_checked;
    mixpi_muon      *muon;      /* NULL: not Muon                                          */
    struct mixpi_shards *shards;    /* NULL: the states are not sharded over ranks         */
    uint64_t         views_summed;  /* generation in which clip summed the views; 0 = none */
    uint64_t         cleared_in;    /* the context's generation at the newest mixp_zero_grad */
    uint64_t         stepped_in;    /* the context's generation at the newest update       */
    int64_t          stepped_after; /* operators applied in that generation before the update */
    mixp_optimizer  *next;      /* in the context's list                                   */
    /* Used by the ranks. */
    double          *table;     /* device memory in which ranks agree, made at its first use */
    int64_t          taken;     /* steps begun since it was made, the same on all ranks    */
    int              loaded;    /* 1: a checkpoint was loaded: the next step compares weights */
    double           clip_norm; /* max_norm of the newest mixp_clip_grad_norm              */
    int              bit;       /* its bit in a guard's sets of optimizers                 */
    /* Averages of the first ema_count parameters, and the rows of the pass that updates them. */
    int64_t          ema_count, ema_room;
    int64_t          ema_begun; /* no step has yet changed the averages from this number on */
    mixp_param_row  *ema_rows, *device_ema_rows;
    int              swapped;   /* 1: the weights are the averages                         */
};

/* Allocates zeroed memory that is freed with the optimizer. Returns NULL with the error set. */
static void *mixpi_opt_host(const mixp_optimizer *opt, size_t bytes)
{ return mixpi_owned(opt->ctx, opt, bytes, 0); }
static void *mixpi_opt_device(const mixp_optimizer *opt, size_t bytes)
{ return mixpi_owned(opt->ctx, opt, bytes, 1); }

/* --- making, groups -------------------------------------------------------------------- */

/* Fields that not all kinds have. */
enum {
    MIXPI_HAS_BETA1 = 1, MIXPI_HAS_BETA2 = 2, MIXPI_HAS_EPS = 4, MIXPI_HAS_MOMENTUM = 8,
    MIXPI_HAS_DAMPENING = 16, MIXPI_HAS_NESTEROV = 32, MIXPI_HAS_ORDER = 64,
    MIXPI_HAS_CAUTIOUS = 128, MIXPI_HAS_MUON = 256,
    MIXPI_HAS_BETAS = MIXPI_HAS_BETA1 | MIXPI_HAS_BETA2,
    MIXPI_HAS_ADAMS = MIXPI_HAS_BETAS | MIXPI_HAS_EPS | MIXPI_HAS_ORDER
};

/* A kind of optimizer: its name, the fields that it has, and its defaults. */
typedef struct mixpi_kind {
    const char *name;
    int         has;
    double      lr, beta1, beta2, eps, weight_decay;
} mixpi_kind;

/* The row of a kind that is at most MIXP_OPTIMIZER_MUON. */
static const mixpi_kind *mixpi_kind_of(mixp_optimizer_kind kind) {
    static const mixpi_kind rows[] = {      /* in the order of mixp_optimizer_kind */
        /* name, fields; lr, betas, eps, weight_decay */
        { "Adam",    MIXPI_HAS_ADAMS,
          1e-3, 0.9, 0.999, 1e-8, 0.0 },
        { "AdamW",   MIXPI_HAS_ADAMS | MIXPI_HAS_CAUTIOUS,
          1e-3, 0.9, 0.999, 1e-8, 0.01 },
        { "SGD",     MIXPI_HAS_MOMENTUM | MIXPI_HAS_DAMPENING | MIXPI_HAS_NESTEROV,
          1e-3, 0.0, 0.0,   0.0,  0.0 },
        { "RMSprop", MIXPI_HAS_BETA2 | MIXPI_HAS_EPS | MIXPI_HAS_MOMENTUM,
          1e-2, 0.0, 0.99,  1e-8, 0.0 },
        { "Lion",    MIXPI_HAS_BETAS | MIXPI_HAS_CAUTIOUS,
          1e-4, 0.9, 0.99,  0.0,  0.0 },
        { "Muon",    MIXPI_HAS_EPS | MIXPI_HAS_MOMENTUM | MIXPI_HAS_NESTEROV | MIXPI_HAS_CAUTIOUS |
                     MIXPI_HAS_MUON,
          1e-3, 0.0, 0.0,   1e-7, 0.1 }
    };
    return &rows[kind];
}

static mixp_optimizer_desc mixpi_defaults(mixp_optimizer_kind kind) {
    const mixpi_kind *row = mixpi_kind_of(kind);
    mixp_optimizer_desc d;
    memset(&d, 0, sizeof d);
    d.kind = kind;
    d.lr = row->lr;
    d.beta1 = row->beta1;
    d.beta2 = row->beta2;
    d.eps = row->eps;
    d.weight_decay = row->weight_decay;
    return d;
}

MIXPREC_API mixp_optimizer_desc mixp_adamw_defaults(void)
{ return mixpi_defaults(MIXP_OPTIMIZER_ADAMW); }
MIXPREC_API mixp_optimizer_desc mixp_adam_defaults(void)
{ return mixpi_defaults(MIXP_OPTIMIZER_ADAM); }
MIXPREC_API mixp_optimizer_desc mixp_sgd_defaults(void)
{ return mixpi_defaults(MIXP_OPTIMIZER_SGD); }
MIXPREC_API mixp_optimizer_desc mixp_rmsprop_defaults(void)
{ return mixpi_defaults(MIXP_OPTIMIZER_RMSPROP); }
MIXPREC_API mixp_optimizer_desc mixp_lion_defaults(void)
{ return mixpi_defaults(MIXP_OPTIMIZER_LION); }

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

static int mixpi_at_least_0(double x) { return mixpi_finite(x) && x >= 0.0; }
static int mixpi_is_beta(double x) { return mixpi_at_least_0(x) && x < 1.0; }

/* Do steps divide by a second moment? True for Adam's kinds and RMSprop. */
static int mixpi_has_v(mixp_optimizer_kind kind)
{ return kind < MIXP_OPTIMIZER_SGD || kind == MIXP_OPTIMIZER_RMSPROP; }

/* Is m kept? SGD and RMSprop keep m only with momentum, which is then above 0 in all groups. */
static int mixpi_momentum_counts(mixp_optimizer_kind kind)
{ return kind == MIXP_OPTIMIZER_SGD || kind == MIXP_OPTIMIZER_RMSPROP; }
static int mixpi_has_m(const mixp_step_plan *plan)
{ return !mixpi_momentum_counts(plan->kind) || plan->groups[0].momentum > 0.0; }

/* Did the caller set only lr in a zeroed struct? Adam would divide by 0. */
static int mixpi_group_zeroed(mixp_optimizer_kind kind, const mixp_param_group *g) {
    return mixpi_has_v(kind) && mixpi_at_least_0(g->beta2) && g->beta2 + g->eps <= 0.0;
}

/* Returns what is wrong with the betas and eps of a kind that has them, or NULL. */
static const char *mixpi_betas_wrong(mixp_optimizer_kind kind,
                                     const mixp_param_group *g) {
    const char *second = kind == MIXP_OPTIMIZER_RMSPROP ? "alpha (beta2) must lie in [0,1)"
                                                        : "beta2 must lie in [0,1)";
    if (!mixpi_is_beta(g->beta1)) return "beta1 must lie in [0,1)";
    if (!mixpi_is_beta(g->beta2)) return second;
    if (mixpi_group_zeroed(kind, g)) return "beta2 and eps are 0: start from the defaults";
    if (kind == MIXP_OPTIMIZER_MUON && !(g->eps > 0.0))
        return "Muon's eps must be above 0: start from mixp_optimizer_group(opt, 0, &g)";
    return mixpi_at_least_0(g->eps) ? NULL : "eps must be finite and at least 0";
}

/* Returns what is wrong with a group, or NULL. */
static const char *mixpi_group_wrong(mixp_optimizer_kind kind,
                                     const mixp_param_group *g) {
    if (!mixpi_at_least_0(g->lr)) return "lr must be finite and at least 0";
    if (!mixpi_at_least_0(g->weight_decay))
        return "weight_decay must be finite and at least 0";
    if (!mixpi_at_least_0(g->momentum)) return "momentum must be finite and at least 0";
    if (kind != MIXP_OPTIMIZER_SGD) return mixpi_betas_wrong(kind, g);
    if (!mixpi_finite(g->dampening)) return "dampening must be finite";
    if (g->nesterov && (g->momentum <= 0.0 || g->dampening < 0.0 || g->dampening > 0.0))
        return "nesterov needs momentum and no dampening";
    return NULL;
}

/* The group as it is stored. Fields that mixpi_group_wrong does not check for this kind are set to
 * 0, so that a load accepts every saved checkpoint. */
static mixp_param_group mixpi_group_kept(mixp_optimizer_kind kind,
                                         const mixp_param_group *group) {
    const int is_sgd = kind == MIXP_OPTIMIZER_SGD;
    mixp_param_group g = *group;
    g.nesterov = (is_sgd || kind == MIXP_OPTIMIZER_MUON) && g.nesterov;
    if (is_sgd) g.beta1 = g.beta2 = g.eps = 0.0;
    else g.dampening = 0.0;
    return g;
}

static const char *mixpi_states_wrong(const mixp_optimizer_states *s, int no_master) {
    if ((unsigned)s->m > MIXP_MOMENT_8BIT) return "states.m is not a mixp_moment_kind";
    if ((unsigned)s->v > MIXP_MOMENT_8BIT) return "states.v is not a mixp_moment_kind";
    if ((unsigned)s->master > MIXP_MASTER_8BIT)
        return "states.master is not a mixp_master_kind";
    if (no_master && s->master != MIXP_MASTER_F32)
        return "no_master and states.master contradict each other; set only one";
    return NULL;
}

/* Does the schedule end at step `total`? */
static int mixpi_schedule_ends(const mixp_schedule *s) {
    return s->kind != MIXP_SCHEDULE_CONSTANT && s->kind != MIXP_SCHEDULE_STEP &&
           s->kind != MIXP_SCHEDULE_EXPONENTIAL;
}

/* Returns what is wrong with the fields that only some kinds read, or NULL. */
static const char *mixpi_schedule_part_wrong(const mixp_schedule *s) {
    const int is_step = s->kind == MIXP_SCHEDULE_STEP;
    if (mixpi_schedule_ends(s) && s->total <= s->warmup)
        return "schedule.total must be above schedule.warmup";
    if (is_step && s->every < 1) return "schedule.every must be at least 1";
    if ((is_step || s->kind == MIXP_SCHEDULE_EXPONENTIAL) && !(s->gamma > 0.0 && s->gamma <= 1.0))
        return "schedule.gamma must be above 0 and at most 1";
    if (s->kind == MIXP_SCHEDULE_WSD && (s->decay < 1 || s->decay > s->total - s->warmup))
        return "schedule.decay must lie in [1, total - warmup]";
    if (s->kind == MIXP_SCHEDULE_ONE_CYCLE && !(s->start_factor >= 0.0 && s->start_factor <= 1.0))
        return "schedule.start_factor must lie in [0,1]";
    return NULL;
}

static const char *mixpi_schedule_wrong(const mixp_schedule *s) {
    const char *wrong;
    if ((unsigned)s->kind > MIXP_SCHEDULE_WSD) return "schedule.kind is not a mixp_schedule_kind";
    if (s->warmup < 0) return "schedule.warmup is negative";
    wrong = mixpi_schedule_part_wrong(s);
    if (wrong) return wrong;
    if (!mixpi_at_least_0(s->min_factor) || s->min_factor > 1.0)
        return "schedule.min_factor must lie in [0,1]";
    return NULL;
}

/* Fills in the defaults of a rule. Returns what is wrong with the rule, or NULL. */
static const char *mixpi_spike_resolve(mixp_spike_rule *r) {
    if ((unsigned)r->of > MIXP_SPIKE_BOTH) return "spike.of is not a mixp_spike_of";
    if (r->window == 0) r->window = 128;
    if (r->max_in_a_row == 0) r->max_in_a_row = 8;
    if (!mixpi_at_least_0(r->z)) return "spike.z must be finite and at least 0";
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
                          m->iterations || m->f32 || m->rate;
    if ((lacks & MIXPI_HAS_BETA1) && mixpi_is_set(d->beta1)) return "beta1";
    if ((lacks & MIXPI_HAS_BETA2) && mixpi_is_set(d->beta2)) return "beta2";
    if ((lacks & MIXPI_HAS_EPS) && mixpi_is_set(d->eps)) return "eps";
    if ((lacks & MIXPI_HAS_MOMENTUM) && mixpi_is_set(d->momentum)) return "momentum";
    if ((lacks & MIXPI_HAS_DAMPENING) && mixpi_is_set(d->dampening)) return "dampening";
    if ((lacks & MIXPI_HAS_NESTEROV) && d->nesterov) return "nesterov";
    if ((lacks & MIXPI_HAS_ORDER) && d->order) return "order";
    if ((lacks & MIXPI_HAS_CAUTIOUS) && d->cautious) return "cautious";
    return (lacks & MIXPI_HAS_MUON) && sets_muon ? "muon" : NULL;
}

/* Returns what is wrong with the settings that only Muon has, or NULL. */
static const char *mixpi_muon_wrong(const mixp_optimizer_desc *d) {
    const mixp_muon_settings *m = &d->muon;
    if (d->kind != MIXP_OPTIMIZER_MUON) return NULL;
    if (!mixpi_finite(m->a) || !mixpi_finite(m->b) || !mixpi_finite(m->c))
        return "muon.a, muon.b and muon.c must be finite";
    if (m->iterations < 1 || m->iterations > 99) return "muon.iterations must lie in [1, 99]";
    if ((unsigned)m->rate > MIXP_MUON_RATE_MATCH_RMS_ADAMW)
        return "muon.rate is not a mixp_muon_rate";
    return d->eps > 0.0 ? NULL : "eps must be above 0: start from mixp_muon_defaults";
}

/* Group 0 of a description. */
static mixp_param_group mixpi_desc_group(const mixp_optimizer_desc *d) {
    mixp_param_group g;
    memset(&g, 0, sizeof g);
    g.lr = d->lr;
    g.beta1 = d->beta1;
    g.beta2 = d->beta2;
    g.eps = d->eps;
    g.weight_decay = d->weight_decay;
    g.momentum = d->momentum;
    g.dampening = d->dampening;
    g.nesterov = d->nesterov != 0;
    return g;
}

/* Allocates memory for the values of applied steps. Returns 0 if out of memory. */
static int mixpi_spike_start(mixp_optimizer *opt) {
    size_t values = (size_t)opt->plan.spike.window * MIXPI_SPIKE_KINDS;
    if (!opt->plan.spike.of) return 1;
    opt->plan.spike_window =
        (double *)mixpi_opt_device(opt, values * sizeof(double));
    return opt->plan.spike_window != NULL;
}

/* Returns what is wrong with a description, or NULL. Fills in the defaults of *spike. */
static const char *mixpi_optimizer_desc_wrong(const mixp_optimizer_desc *d,
                                              mixp_spike_rule *spike) {
    const mixp_param_group group = mixpi_desc_group(d);
    const char *wrong = mixpi_muon_wrong(d);
    if (!wrong) wrong = mixpi_group_wrong(d->kind, &group);
    if (!wrong) wrong = mixpi_spike_resolve(spike);
    if (!wrong) wrong = mixpi_schedule_wrong(&d->schedule);
    if (!wrong) wrong = mixpi_states_wrong(&d->states, d->no_master);
    if (!mixpi_at_least_0(d->max_norm)) wrong = "max_norm must be finite and at least 0";
    if ((unsigned)d->order > MIXP_ADAM_ORDER_APEX) wrong = "order is not a mixp_adam_order";
    return wrong;
}

static mixp_result mixpi_optimizer_desc_check(mixp_context *ctx, const mixp_optimizer_desc *d,
                                              mixp_spike_rule *spike) {
    const char *extra, *wrong;
    if ((unsigned)d->kind > MIXP_OPTIMIZER_MUON)
        return mixp_context_fail(ctx, MIXP_ERR_ARGUMENT,
                                 "mixp_optimizer_new: kind is not a mixp_optimizer_kind: start "
                                 "from the kind's defaults");
    extra = mixpi_field_extra(d);
    if (extra)
        return mixp_context_fail(ctx, MIXP_ERR_ARGUMENT,
                                 "mixp_optimizer_new: %s has no %s: leave it 0, or start from the "
                                 "defaults of another kind",
                                 mixpi_kind_of(d->kind)->name, extra);
    wrong = mixpi_optimizer_desc_wrong(d, spike);
    if (!wrong) return MIXP_OK;
    return mixp_context_fail(ctx, MIXP_ERR_ARGUMENT, "mixp_optimizer_new: %s: %s",
                             mixpi_kind_of(d->kind)->name, wrong);
}

/* Gives opt its working memory for Muon. Returns 0 if out of memory. */
static int mixpi_muon_start(mixp_optimizer *opt, const mixp_muon_settings *settings) {
    mixpi_muon *m = (mixpi_muon *)mixpi_opt_host(opt, sizeof *m);
    if (!m) return 0;
    m->settings = *settings;
    m->settings.f32 = settings->f32 != 0;
    m->look = (mixp_step_state *)mixpi_opt_device(opt, sizeof *m->look);
    opt->muon = m;
    return m->look != NULL;
}

/* Handles: without ranks, or without sharded states, they do nothing. */
static mixp_result mixpi_crew_enter(mixp_optimizer *opt)
{ return mixpi_crew_of(opt->ctx) ? opt->ctx->crew->enter(opt) : MIXP_OK; }
static const char *mixpi_crew_add_wrong(const mixp_optimizer *opt, const mixp_tensor *p,
                                        const mixp_tensor *g)
{ return mixpi_crew_of(opt->ctx) ? opt->ctx->crew->add_wrong(opt, p, g) : NULL; }
static mixp_result mixpi_crew_grow(mixp_optimizer *opt, size_t bytes)
{ return opt->shards ? opt->ctx->crew->grow(opt, bytes) : MIXP_OK; }
static void mixpi_crew_placed(mixp_optimizer *opt, mixp_tensor *p, mixp_result r)
{ if (opt->shards) opt->ctx->crew->placed(opt, p, r); }
static void mixpi_crew_left(const mixp_optimizer *opt, mixp_tensor *p)
{ if (opt->shards) opt->ctx->crew->left(p); }
static mixp_result mixpi_crew_send(mixp_optimizer *opt)
{ return opt->shards ? opt->ctx->crew->send(opt) : MIXP_OK; }
static mixp_result mixpi_crew_gather(mixp_optimizer *opt)
{ return opt->shards ? opt->ctx->crew->gather(opt) : MIXP_OK; }
static mixp_result mixpi_crew_average(mixp_optimizer *opt)
{ return opt->shards ? opt->ctx->crew->average(opt) : MIXP_OK; }
static void mixpi_crew_in_pieces(mixp_optimizer *opt)
{ if (opt->shards) opt->ctx->crew->in_pieces(opt); }
static mixp_result mixpi_crew_plan(mixp_optimizer *opt)
{ return mixpi_crew_of(opt->ctx) ? opt->ctx->crew->plan(opt) : MIXP_OK; }
static void mixpi_crew_verdict(const mixp_optimizer *opt, const mixp_step_state *s,
                               mixp_verdict *v)
{ if (mixpi_crew_of(opt->ctx)) opt->ctx->crew->verdict(opt, s, v); }

/* Gives opt the memory that its kind and settings need. Returns 0 if out of memory. */
static int mixpi_optimizer_start(mixp_optimizer *opt, const mixp_optimizer_desc *d) {
    opt->state = (mixp_step_state *)mixpi_opt_device(opt, sizeof *opt->state);
    if (!opt->state || !mixpi_spike_start(opt)) return 0;
    if (d->kind == MIXP_OPTIMIZER_MUON && !mixpi_muon_start(opt, &d->muon)) return 0;
    return mixpi_crew_enter(opt) == MIXP_OK;
}

/* The plan of every step. */
static mixp_step_plan mixpi_desc_plan(const mixp_optimizer_desc *d) {
    const mixp_param_group group = mixpi_desc_group(d);
    mixp_step_plan plan;
    memset(&plan, 0, sizeof plan);
    plan.kind = d->kind;
    plan.order = d->order;
    plan.max_norm = d->max_norm;
    plan.schedule = d->schedule;
    plan.groups[0] = mixpi_group_kept(d->kind, &group);
    plan.n_groups = 1;
    plan.cautious = d->cautious != 0;
    return plan;
}

MIXPI_SELDOM
MIXPREC_API mixp_optimizer *mixp_optimizer_new(mixp_context *ctx,
                                               const mixp_optimizer_desc *desc) {
    const mixp_optimizer_desc d = desc ? *desc : mixp_adamw_defaults();
    mixp_spike_rule spike = d.spike;
    mixp_optimizer *opt;
    if (mixpi_optimizer_desc_check(ctx, &d, &spike) != MIXP_OK || !ctx) return NULL;
    opt = (mixp_optimizer *)mixpi_owner_new(ctx, sizeof *opt);
    if (!opt) return NULL;
    opt->ctx = ctx;
    opt->plan = mixpi_desc_plan(&d);
    opt->plan.spike = spike;
    opt->states = d.states;
    opt->no_master = d.no_master;
    opt->zero_grad = d.zero_grad;
    if (!mixpi_optimizer_start(opt, &d)) return NULL;
    opt->next = (mixp_optimizer *)ctx->training.optimizers;
    opt->bit = opt->next ? (opt->next->bit + 1) % MIXPI_OPTIMIZER_BITS : 0;
    ctx->training.optimizers = opt;
    return opt;
}

/* Writes group `index`, which must be below `count`. */
static mixp_result mixpi_group_put(mixp_optimizer *opt, int index, int count,
                                   const mixp_param_group *group) {
    const char *wrong = mixpi_group_wrong(opt->plan.kind, group);
    if (mixpi_momentum_counts(opt->plan.kind) &&
        (group->momentum > 0.0) != (opt->plan.groups[0].momentum > 0.0))
        wrong = "momentum must stay 0 in all groups, or stay above 0 in all";
    if (mixpi_group_zeroed(opt->plan.kind, group))
        wrong = "beta2 and eps are 0: start from mixp_optimizer_group(opt, 0, &g)";
    if (index < 0 || index >= count) wrong = "no group has this index";
    if (index >= MIXP_MAX_GROUPS) wrong = "the limit is MIXP_MAX_GROUPS groups";
    if (!wrong) opt->plan.groups[index] = mixpi_group_kept(opt->plan.kind, group);
    if (!wrong) return MIXP_OK;
    return mixp_context_fail(opt->ctx, MIXP_ERR_ARGUMENT, "optimizer group %d: %s", index,
                             wrong);
}

MIXPREC_API int mixp_optimizer_add_group(mixp_optimizer *opt,
                                         const mixp_param_group *group) {
    int index = opt ? opt->plan.n_groups : 0;
    if (opt && !group)
        mixp_context_fail(opt->ctx, MIXP_ERR_ARGUMENT,
                          "mixp_optimizer_add_group: the group is NULL; start from "
                          "mixp_optimizer_group(opt, 0, &g)");
    if (!opt || !group || mixpi_group_put(opt, index, index + 1, group) != MIXP_OK)
        return -1;
    return opt->plan.n_groups++;
}

MIXPREC_API mixp_result mixp_optimizer_group(const mixp_optimizer *opt, int index,
                                                 mixp_param_group *out) {
    if (!opt || !out || index < 0 || index >= opt->plan.n_groups)
        return mixp_context_fail(opt ? opt->ctx : NULL, MIXP_ERR_ARGUMENT,
                                 "optimizer group %d: no group has this index, or the result "
                                 "pointer is NULL",
                                 index);
    *out = opt->plan.groups[index];
    return MIXP_OK;
}

MIXPREC_API mixp_result mixp_optimizer_set_group(mixp_optimizer *opt, int index,
                                                 const mixp_param_group *g) {
    if (opt && g) return mixpi_group_put(opt, index, opt->plan.n_groups, g);
    return mixp_context_fail(opt ? opt->ctx : NULL, MIXP_ERR_ARGUMENT,
                             "mixp_optimizer_set_group: the group is NULL; start from "
                             "mixp_optimizer_group(opt, 0, &g)");
}

/* The groups share all checks of lr, so either all groups accept it or none does. */
MIXPREC_API mixp_result mixp_optimizer_set_lr(mixp_optimizer *opt, double lr) {
    mixp_result r = MIXP_OK;
    int i;
    if (!opt) return MIXP_ERR_ARGUMENT;
    for (i = 0; r == MIXP_OK && i < opt->plan.n_groups; i++) {
        mixp_param_group g = opt->plan.groups[i];
        g.lr = lr;
        r = mixpi_group_put(opt, i, opt->plan.n_groups, &g);
    }
    return r;
}

/* --- parameters -------------------------------------------------------------------------- */

static int mixpi_row_is_small(const mixp_param_row *row) {
    return row->m_dtype != MIXP_F32 || row->v_dtype != MIXP_F32 ||
           row->master_dtype != MIXP_F32;
}

/* Does this rank update all of parameter i? */
static int mixpi_is_own(const mixp_optimizer *opt, int64_t i)
{ return opt->slots[i].kept == MIXPI_HERE; }

static void mixpi_sorted_move(mixpi_sorted *s, mixp_tensor **to) {
    if (s->count) memcpy(to, s->at, (size_t)s->count * sizeof *to);
    s->at = to;
}

static mixp_result mixpi_optimizer_grow(mixp_optimizer *opt) {
    int64_t n = opt->capacity ? 2 * opt->capacity : 32;
    size_t bytes = (size_t)n * sizeof(mixp_param_row);
    mixpi_slot *slots =
        (mixpi_slot *)mixpi_opt_host(opt, (size_t)n * sizeof *slots);
    mixp_param_row *rows = (mixp_param_row *)mixpi_opt_host(opt, bytes);
    mixp_param_row *device = (mixp_param_row *)mixpi_opt_device(opt, bytes);
    mixp_tensor **sorted = (mixp_tensor **)mixpi_opt_host(opt, 2 * (size_t)n * sizeof *sorted);
    if (!slots || !rows || !device || !sorted) return MIXP_ERR_MEMORY;
    if (mixpi_crew_grow(opt, bytes) != MIXP_OK) return MIXP_ERR_MEMORY;
    if (opt->count) memcpy(slots, opt->slots, (size_t)opt->count * sizeof *slots);
    if (opt->count) memcpy(rows, opt->rows, (size_t)opt->count * sizeof *rows);
    mixpi_sorted_move(&opt->params, sorted);
    mixpi_sorted_move(&opt->grads, sorted + n);
    opt->slots = slots; opt->rows = rows; opt->device_rows = device; opt->capacity = n;
    if (!opt->shards) opt->own_rows = rows;
    if (!opt->shards) opt->device_own_rows = device;
    opt->rows_changed = 1;      /* the new table was not sent yet */
    return MIXP_OK;
}

/* The current stage. A scaler's update resets it. */
static int mixpi_stage(const mixp_optimizer *opt)
{ return opt->scaler && opt->epoch == opt->scaler->epoch ? opt->stage : MIXPI_READY; }

/* Does a parameter that is added now keep f32 states regardless of the description? */
static int mixpi_keeps_f32(const mixp_optimizer *opt, const mixp_tensor *p) {
    return p->rank < 2 || p->count < MIXP_STATE_SMALL ||
           opt->plan.groups[opt->plan.n_groups - 1].f32_states;
}

static int mixpi_master_is_split(const mixp_optimizer *opt, const mixp_tensor *p) {
    return opt->states.master != MIXP_MASTER_F32 && p->dtype != MIXP_F32 &&
           !mixpi_keeps_f32(opt, p);
}

/* Do two tensors share an element? */
static int mixpi_overlap(const mixp_tensor *a, const mixp_tensor *b) {
    const uintptr_t at = (uintptr_t)a->data, to = (uintptr_t)b->data;
    return at <= to ? to - at < mixpi_bytes(a) : at - to < mixpi_bytes(b);
}

/* How many tensors of an array in the order of addresses begin at `data` or before? */
static int64_t mixpi_sorted_before(const mixpi_sorted *s, const void *data) {
    int64_t low = 0, high = s->count;
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if ((uintptr_t)s->at[middle]->data <= (uintptr_t)data) low = middle + 1;
        else high = middle;
    }
    return low;
}

static void mixpi_sorted_add(mixpi_sorted *s, mixp_tensor *t) {
    const int64_t i = mixpi_sorted_before(s, t->data);
    memmove(s->at + i + 1, s->at + i, (size_t)(s->count - i) * sizeof *s->at);
    s->at[i] = t;
    s->count++;
}

/* Returns why p, with gradient g or NULL, cannot join the existing parameters, or NULL. The
 * existing parameters share no memory, so only the neighbours of p's address can overlap p. */
static const char *mixpi_add_clash(const mixp_optimizer *opt, const mixp_tensor *p,
                                   const mixp_tensor *g) {
    const mixpi_sorted *s = &opt->params, *grads = &opt->grads;
    int64_t i = mixpi_sorted_before(s, p->data);
    if (i > 0 && s->at[i - 1] == p) return "was added before";
    if ((i > 0 && mixpi_overlap(s->at[i - 1], p)) || (i < s->count && mixpi_overlap(p, s->at[i])))
        return "shares memory with a parameter that was added before; create views once, "
               "before the loop";
    i = g ? mixpi_sorted_before(grads, g->data) : 0;
    if (opt->zero_grad && i > 0 && grads->at[i - 1]->data == g->data)
        return "shares its gradient with another parameter, and the first update would clear "
               "it; use separate gradients";
    return NULL;
}

/* Can p be added? Reports the first problem. */
static mixp_result mixpi_add_check(mixp_optimizer *opt, const mixp_tensor *p,
                                   const mixp_tensor *g) {
    mixp_result code = MIXP_ERR_ARGUMENT;
    const char *wrong = NULL;
    if (!mixpi_real(p->dtype) || (g && !mixpi_real(g->dtype))) {
        code = MIXP_ERR_DTYPE;
        wrong = "and its gradient must be f32, f16 or bf16";
    } else if (g && g->count != p->count) {
        return mixp_context_fail(opt->ctx, MIXP_ERR_SHAPE,
                                 "mixp_optimizer_add: '%s' and its gradient differ in their "
                                 "number of elements: %.0f and %.0f",
                                 p->name, (double)p->count, (double)g->count);
    } else if (mixpi_stage(opt) != MIXPI_READY) {
        code = MIXP_ERR_ORDER;
        wrong = "was added in the middle of a step: call mixp_scaler_update first";
    } else if (g && g->data == p->data) wrong = "is its own gradient";
    else if (mixpi_backup_of(p)) wrong = "is a buffer, which no optimizer trains: use mixp_param";
    else if (p->own.generation || (g && g->own.generation))
        wrong = "lives for one step only; add a tensor of mixp_param or mixp_view";
    else if (p->ctx != opt->ctx || (g && g->ctx != opt->ctx))
        wrong = "is of another context";
    else if (!g && !p->requires_grad && !p->own.is_param)
        wrong = "is a view without a gradient: pass a gradient, or call "
                "mixp_tensor_set_requires_grad";
    else wrong = mixpi_crew_add_wrong(opt, p, g);
    if (!wrong) wrong = mixpi_add_clash(opt, p, g);
    if (!wrong && opt->muon && p->rank != 2) {
        code = MIXP_ERR_SHAPE;
        wrong = "is not a matrix, and Muon trains only matrices: add it to an AdamW optimizer";
    }
    if (!wrong && mixpi_master_is_split(opt, p) && p->dtype == MIXP_F16) {
        code = MIXP_ERR_DTYPE;
        wrong = "is f16, but this states.master completes bf16 weights only: use bf16, or "
                "MIXP_MASTER_F32";
    }
    if (!wrong) return MIXP_OK;
    return mixp_context_fail(opt->ctx, code, "mixp_optimizer_add: '%s' %s", p->name,
                             wrong);
}

/* Sets the dtypes of a parameter's states, by which kernels distinguish their kinds. */
static void mixpi_row_kinds(const mixp_optimizer *opt, const mixp_tensor *p,
                            mixp_param_row *row) {
    const mixp_optimizer_states *s = &opt->states;
    row->m_dtype = row->v_dtype = row->master_dtype = MIXP_F32;
    if (mixpi_keeps_f32(opt, p)) return;
    if (s->m == MIXP_MOMENT_BF16) row->m_dtype = MIXP_BF16;
    if (s->m == MIXP_MOMENT_8BIT) row->m_dtype = MIXP_F8_E4M3;
    if (s->v == MIXP_MOMENT_BF16) row->v_dtype = MIXP_BF16;
    if (s->v == MIXP_MOMENT_8BIT) row->v_dtype = MIXP_U8;
    if (!mixpi_has_m(&opt->plan)) row->m_dtype = MIXP_F32;
    if (!mixpi_has_v(opt->plan.kind)) row->v_dtype = MIXP_F32;
    if (!mixpi_master_is_split(opt, p)) return;
    row->master_dtype = s->master == MIXP_MASTER_16BIT ? MIXP_BF16 : MIXP_U8;
}

static int mixpi_is_8bit(mixp_dtype dtype)
{ return dtype == MIXP_F8_E4M3 || dtype == MIXP_U8; }
static int64_t mixpi_state_blocks(const mixp_param_row *row)
{ return mixpi_ceil_div(row->count, MIXP_STATE_BLOCK); }

/* Takes n elements from a block of memory; without an address, only measures the block. A gap after
 * each array keeps streams whose size is a power of two from falling into the same cache sets. */
typedef struct mixpi_layout {
    char  *memory;
    size_t used;
} mixpi_layout;

static void *mixpi_layout_take(mixpi_layout *lay, int wanted, int64_t n,
                              mixp_dtype dtype) {
    char *at = lay->memory ? lay->memory + lay->used : NULL;
    if (!wanted) return NULL;
    lay->used += mixpi_round_up((size_t)n * mixp_dtype_size(dtype)) + 320;
    return at;
}

/* Lays out the states of a row. */
static void mixpi_row_layout(const mixp_optimizer *opt, mixp_param_row *row,
                             mixpi_layout *lay) {
    const int m = mixpi_has_m(&opt->plan), v = mixpi_has_v(opt->plan.kind);
    const int master = row->weight_dtype != MIXP_F32 && !opt->no_master;
    const int64_t blocks = mixpi_state_blocks(row);
    row->missed = (int64_t *)(void *)lay->memory;
    lay->used = 64;
    row->m = mixpi_layout_take(lay, m, row->count, row->m_dtype);
    row->v = mixpi_layout_take(lay, v, row->count, row->v_dtype);
    row->master = mixpi_layout_take(lay, master, row->count, row->master_dtype);
    row->m_scale = (uint8_t *)mixpi_layout_take(lay, mixpi_is_8bit(row->m_dtype), blocks,
                                               MIXP_F8_E8M0);
    row->v_scale = (uint8_t *)mixpi_layout_take(lay, mixpi_is_8bit(row->v_dtype), blocks,
                                               MIXP_F8_E8M0);
}

/* Allocates a zeroed block of device memory for a row: missed steps, moments, master weight. */
static mixp_result mixpi_row_memory(mixp_optimizer *opt, mixp_param_row *row,
                                    int64_t joined_at) {
    const size_t part = (size_t)row->count * sizeof(float);
    mixpi_layout lay = { NULL, 0 };
    if (part > ((size_t)-1 - 4096) / 4) return mixpi_out_of_memory(opt->ctx, part);
    mixpi_row_layout(opt, row, &lay);
    lay.memory = (char *)mixpi_opt_device(opt, lay.used);
    if (!lay.memory) return MIXP_ERR_MEMORY;
    mixpi_row_layout(opt, row, &lay);
    return joined_at ? mixpi_upload(opt->ctx, row->missed, &joined_at, sizeof joined_at)
                     : MIXP_OK;
}

/* What is averaged: the f32 master weight if there is one, otherwise the weight. */
static mixp_in mixpi_averaged(const mixp_param_row *row) {
    if (row->master && row->master_dtype == MIXP_F32) return mixpi_in(row->master, MIXP_F32);
    return mixpi_in(row->weight, row->weight_dtype);
}

/* The row of an average. With sharded states, a rank averages what it updates: some parameters, and
 * pieces of others. */
static mixp_param_row mixpi_ema_row(const mixp_optimizer *opt, int64_t i, double decay) {
    const mixpi_slot *slot = &opt->slots[i];
    const mixp_param_row *all = &opt->rows[i];
    const mixp_param_row of = slot->kept == MIXPI_IN_PIECES ? opt->ctx->crew->piece(opt, i) : *all;
    const size_t before = (size_t)((char *)of.weight - (char *)all->weight);
    mixp_param_row row;
    memset(&row, 0, sizeof row);
    row.weight = slot->ema + before / mixp_dtype_size(of.weight_dtype);
    row.weight_dtype = row.master_dtype = row.m_dtype = row.v_dtype = MIXP_F32;
    row.grad_dtype = mixpi_averaged(&of).dtype;
    row.grad = mixpi_averaged(&of).data == of.master ? of.master : of.weight;
    row.count = of.count;
    row.active = slot->kept != MIXPI_AWAY && of.count > 0;
    row.rate = (float)(1.0 - decay);
    return row;
}

/* Starts average i at the weight, and at the master where this rank keeps it. */
static mixp_result mixpi_ema_start(mixp_optimizer *opt, int64_t i) {
    const mixp_param_row row = mixpi_ema_row(opt, i, 0.0);
    mixp_result r = mixpi_convert_to(opt->ctx, mixpi_out_to(opt->slots[i].ema, MIXP_F32, 0),
                                     mixpi_tensor_in(opt->slots[i].param), opt->rows[i].count);
    if (r != MIXP_OK || !row.active) return r;
    return mixpi_convert_to(opt->ctx, mixpi_out_to(row.weight, MIXP_F32, 0),
                            mixpi_in(row.grad, row.grad_dtype), row.count);
}

/* Is average i still the weight from which it started? Then it follows a weight that is written. */
static int mixpi_ema_is_new(const mixp_optimizer *opt, int64_t i)
{ return i >= opt->ema_begun && i < opt->ema_count; }

/* Brings the master of a weight that was written, and an average that has not begun, up to date. */
static mixp_result mixpi_master_sync(mixp_optimizer *opt, int64_t i) {
    mixpi_slot *slot = &opt->slots[i];
    mixp_param_row row = opt->rows[i];
    mixp_result r = MIXP_OK;
    if (slot->kept == MIXPI_IN_PIECES) row = opt->ctx->crew->piece(opt, i);
    if (row.master && row.count && mixpi_row_is_split(&row))    /* no extra bits yet */
        r = mixpi_device_zero(opt->ctx, row.master,
                              (size_t)row.count * mixp_dtype_size(row.master_dtype));
    else if (row.master && row.count)
        r = mixpi_convert_to(opt->ctx, mixpi_out_to(row.master, MIXP_F32, 0),
                             mixpi_in(row.weight, row.weight_dtype), row.count);
    if (r == MIXP_OK && mixpi_ema_is_new(opt, i)) r = mixpi_ema_start(opt, i);
    if (r == MIXP_OK) slot->version = slot->param->version;
    return r;
}

/* --- Muon's memory ----------------------------------------------------------------------- */

static int64_t mixpi_muon_side(const mixp_tensor *p)
{ return mixpi_min(p->shape[0], p->shape[1]); }

/* Allocates n elements of the iteration's dtype. data NULL: out of memory. */
static mixp_out mixpi_muon_array(const mixp_optimizer *opt, int64_t n) {
    mixp_dtype dtype = opt->muon->settings.f32 ? MIXP_F32 : MIXP_BF16;
    size_t bytes = (size_t)n * mixp_dtype_size(dtype);
    return mixpi_out_to(mixpi_opt_device(opt, bytes), dtype, 0);
}
static float *mixpi_muon_floats(const mixp_optimizer *opt, int64_t n)
{ return (float *)mixpi_opt_device(opt, (size_t)n * sizeof(float)); }

/* Makes room for matrix p. If out of memory, the old arrays stay in use. The optimizer keeps arrays
 * that became too small until it is freed. */
static mixp_result mixpi_muon_room(mixp_optimizer *opt, const mixp_tensor *p) {
    mixpi_muon more = *opt->muon;
    const int64_t side = mixpi_muon_side(p);
    if (p->count > more.elements) {
        more.x = mixpi_muon_array(opt, p->count);
        more.x_sum = mixpi_muon_floats(opt, p->count);
        more.elements = p->count;
        if (!more.x.data || !more.x_sum) return MIXP_ERR_MEMORY;
    }
    if (side > more.side) {
        more.gram = mixpi_muon_array(opt, side * side);
        more.poly = mixpi_muon_array(opt, side * side);
        more.poly_sum = mixpi_muon_floats(opt, side * side);
        more.side = side;
        if (!more.gram.data || !more.poly.data || !more.poly_sum) return MIXP_ERR_MEMORY;
    }
    if (more.x.data != opt->muon->x.data) opt->rows_changed = 1;    /* passes point to x */
    *opt->muon = more;
    return MIXP_OK;
}

/* Allocates the rows of Muon's passes for as many parameters as the optimizer has room for. */
static mixp_result mixpi_muon_rows_grow(mixp_optimizer *opt) {
    mixpi_muon *m = opt->muon;
    size_t bytes = (size_t)opt->capacity * MIXPI_MUON_PASSES * sizeof *m->rows;
    mixp_param_row *rows, *device;
    if (m->room == opt->capacity) return MIXP_OK;
    rows = (mixp_param_row *)mixpi_opt_host(opt, bytes);
    device = (mixp_param_row *)mixpi_opt_device(opt, bytes);
    if (!rows || !device) return MIXP_ERR_MEMORY;
    m->rows = rows;
    m->device_rows = device;
    m->room = opt->capacity;
    opt->rows_changed = 1;
    return MIXP_OK;
}

static mixp_result mixpi_muon_add(mixp_optimizer *opt, const mixp_tensor *p,
                                  mixp_param_row *row) {
    double rows = (double)p->shape[0], cols = (double)p->shape[1];
    double larger = rows > cols ? rows : cols;
    mixp_result r = mixpi_muon_room(opt, p);
    row->rate = (float)sqrt(rows > cols ? rows / cols : 1.0);
    if (opt->muon->settings.rate == MIXP_MUON_RATE_MATCH_RMS_ADAMW)
        row->rate = (float)(0.2 * sqrt(larger));
    return r == MIXP_OK ? mixpi_muon_rows_grow(opt) : r;
}

/* Makes the states of the newest row, wherever they belong. */
static mixp_result mixpi_row_place(mixp_optimizer *opt, mixp_param_row *row) {
    const int64_t joined_at = mixp_optimizer_applied(opt);
    if (opt->shards) return opt->ctx->crew->place(opt, row, joined_at);
    return mixpi_row_memory(opt, row, joined_at);
}

MIXPI_SELDOM
static mixp_result mixpi_do_optimizer_add(mixp_optimizer *opt, mixp_tensor *param,
                                          mixp_tensor *grad) {
    if (!opt) return MIXP_ERR_ARGUMENT;
    if (!mixpi_is_tensor(param) || (grad && !mixpi_is_tensor(grad)))
        return mixp_context_fail(opt->ctx, MIXP_ERR_ARGUMENT,
                                 "mixp_optimizer_add: param is NULL, or a tensor is of an earlier "
                                 "step");
    mixp_result r = mixpi_add_check(opt, param, grad);
    if (r == MIXP_OK && opt->count == opt->capacity) r = mixpi_optimizer_grow(opt);
    if (r != MIXP_OK) return r;

    /* Its row in the newest group. */
    mixp_param_row *row = &opt->rows[opt->count];
    memset(row, 0, sizeof *row);
    row->weight = param->data;
    row->weight_dtype = param->dtype;
    row->count = param->count;
    row->group = opt->plan.n_groups - 1;
    row->tensor = (uint64_t)param->own.id;
    mixpi_row_kinds(opt, param, row);
    if (opt->muon) r = mixpi_muon_add(opt, param, row);
    if (r != MIXP_OK) return r;

    /* Its states, wherever they belong, and its master weight. */
    opt->slots[opt->count].param = param;
    opt->slots[opt->count].grad = grad;
    r = mixpi_row_place(opt, row);
    if (r == MIXP_OK) r = mixpi_master_sync(opt, opt->count);

    if (r == MIXP_OK) mixpi_sorted_add(&opt->params, param);
    if (r == MIXP_OK && grad) mixpi_sorted_add(&opt->grads, grad);
    if (r == MIXP_OK) opt->rows_changed = 1;
    if (r == MIXP_OK && mixpi_row_is_small(row)) opt->plan.small = 1;
    opt->count += r == MIXP_OK;
    param->own.optimizers += r == MIXP_OK;
    mixpi_crew_placed(opt, param, r);
    return r;
}

MIXPREC_API mixp_result mixp_optimizer_add(mixp_optimizer *opt, mixp_tensor *param,
                                           mixp_tensor *grad) {
    mixp_context *of = opt ? opt->ctx : NULL;
    const int before = mixpi_enter(of);
    return mixpi_leave(of, before, mixpi_do_optimizer_add(opt, param, grad));
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
    i = 0;
    if (pattern && !mixpi_param_next(opt->ctx, pattern, &i))
        return mixpi_fits_none(opt->ctx, "mixp_optimizer_add_all", pattern);
    return mixp_context_fail(opt->ctx, MIXP_ERR_ARGUMENT,
                             "mixp_optimizer_add_all: no trainable parameter without an optimizer "
                             "has a name that matches '%s'", pattern ? pattern : "NULL");
}

MIXPREC_API mixp_result mixp_zero_grad(mixp_optimizer *opt) {
    mixp_result r = MIXP_OK;
    int64_t i;
    if (!opt) return MIXP_ERR_ARGUMENT;
    if (opt->ctx->walk.walked_in == opt->ctx->generation) opt->cleared_in = opt->ctx->generation;
    for (i = 0; i < opt->count && r == MIXP_OK; i++) {
        mixp_tensor *view = opt->slots[i].grad;
        if (!view) {
            opt->slots[i].param->grad = NULL;
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

static const char *mixpi_loss_wrong(const mixp_optimizer *opt, const mixp_tensor *loss) {
    if (!((int)opt->plan.spike.of & MIXP_SPIKE_LOSS))
        return "spike.of in the description is neither MIXP_SPIKE_LOSS nor MIXP_SPIKE_BOTH";
    if (loss->ctx != opt->ctx) return "the loss is of another context";
    if (loss->own.scaled)
        return "the loss is multiplied by the loss scale, whose changes would look like spikes: "
               "pass the loss from before mixp_scaler_scale";
    if (loss->count != 1) return "a loss has one element; take the mean with mixp_mean";
    return NULL;
}

MIXPREC_API mixp_result mixp_optimizer_set_loss(mixp_optimizer *opt,
                                                const mixp_tensor *loss) {
    const char *wrong;
    mixp_result r = opt ? mixpi_tensor_there(loss, "mixp_optimizer_set_loss") : MIXP_ERR_ARGUMENT;
    if (r != MIXP_OK) return r;
    wrong = mixpi_loss_wrong(opt, loss);
    if (wrong)
        return mixp_context_fail(opt->ctx, MIXP_ERR_ARGUMENT,
                                 "mixp_optimizer_set_loss: %s", wrong);
    if (loss->dtype != MIXP_F32)
        return mixp_context_fail(opt->ctx, MIXP_ERR_DTYPE,
                                 "mixp_optimizer_set_loss: the loss is %s; pass an f32 loss",
                                 mixp_dtype_name(loss->dtype));
    opt->plan.loss = (const float *)loss->data;
    opt->loss_of = opt->ctx->generation;
    return MIXP_OK;
}

/* Fails while the averages are in the weights. */
static mixp_result mixpi_need_weights(const mixp_optimizer *opt, const char *who) {
    if (!opt->swapped) return MIXP_OK;
    return mixp_context_fail(opt->ctx, MIXP_ERR_ORDER,
                             "%s: the weights are the averages of mixp_optimizer_swap_ema: call "
                             "mixp_optimizer_swap_ema again first",
                             who);
}

/* --- asking --------------------------------------------------------------------------------- */

/* Address of one kind of state. */
typedef struct mixpi_held_at {
    const void    *data;
    const uint8_t *scale;       /* scales of its blocks, or NULL                           */
    mixp_dtype     dtype;
} mixpi_held_at;

static mixpi_held_at mixpi_held_of(const mixp_optimizer *opt, int64_t i, mixp_state_kind what) {
    const mixp_param_row *row = &opt->rows[i];
    mixpi_held_at at = { row->master, NULL, row->master_dtype };
    if (what == MIXP_STATE_MASTER) return at;
    at.data = what == MIXP_STATE_M ? row->m : row->v;
    at.scale = what == MIXP_STATE_M ? row->m_scale : row->v_scale;
    at.dtype = what == MIXP_STATE_M ? row->m_dtype : row->v_dtype;
    if (what != MIXP_STATE_EMA) return at;
    at.data = i < opt->ema_count ? opt->slots[i].ema : NULL;
    at.scale = NULL;
    at.dtype = MIXP_F32;
    return at;
}

/* Decodes the code of a state, whose size is its dtype's. weight: bits beside a split master. */
static float mixpi_held_value(mixp_state_kind what, mixp_dtype dtype, uint32_t code,
                              uint32_t scale, uint32_t weight) {
    if (dtype == MIXP_F32) return mixp_f32_of_bits(code);
    if (what == MIXP_STATE_MASTER)
        return dtype == MIXP_BF16 ? mixp_master_from_16(weight, code)
                                  : mixp_master_from_8(weight, code);
    if (dtype == MIXP_BF16) return mixp_f32_of_bits(code << 16);
    return what == MIXP_STATE_M ? mixp_state_m_value(code, scale)
                                : mixp_state_v_value(code, scale);
}

/* Reads one block: n elements from `first` on. */
static mixp_result mixpi_held_block(const mixp_optimizer *opt, int64_t row,
                                     mixp_state_kind what, int64_t first, int64_t n,
                                     float *out) {
    const mixpi_held_at at = mixpi_held_of(opt, row, what);
    const size_t size = mixp_dtype_size(at.dtype), offset = (size_t)first * size;
    const int split = what == MIXP_STATE_MASTER && at.dtype != MIXP_F32;
    uint32_t words[MIXP_STATE_BLOCK];
    uint16_t half, weights[MIXP_STATE_BLOCK];
    uint8_t scale = 0, *bytes = (uint8_t *)words;
    mixp_result r = mixpi_download(opt->ctx, words, (const char *)at.data + offset,
                                   (size_t)n * size);
    int64_t i;
    if (r == MIXP_OK && at.scale)
        r = mixpi_download(opt->ctx, &scale, at.scale + first / MIXP_STATE_BLOCK, 1);
    if (r == MIXP_OK && split)
        r = mixpi_download(opt->ctx, weights, (const uint16_t *)opt->rows[row].weight + first,
                           (size_t)n * sizeof *weights);
    for (i = 0; i < n && r == MIXP_OK; i++) {
        uint32_t code = size == 4 ? words[i] : bytes[i];
        if (size == 2) {
            memcpy(&half, bytes + 2 * i, sizeof half);
            code = half;
        }
        out[i] = mixpi_held_value(what, at.dtype, code, scale, split ? weights[i] : 0u);
    }
    return r;
}

MIXPREC_API mixp_result mixp_optimizer_read(const mixp_optimizer *opt,
                                            const mixp_tensor *param, mixp_state_kind what,
                                            float *host, int64_t count) {
    const char *wrong = NULL;
    mixp_result r = MIXP_OK;
    int64_t i = 0, row;
    int written;
    if (!opt || !mixpi_is_tensor(param)) return MIXP_ERR_ARGUMENT;
    while (i < opt->count && opt->slots[i].param != param) i++;
    row = i;
    if (i == opt->count) wrong = "this optimizer does not have the parameter";
    else if ((unsigned)what > MIXP_STATE_EMA) wrong = "kind is not a kind of state";
    else if (!host) wrong = "the host memory is NULL";
    else if (!mixpi_is_own(opt, i))
        wrong = "the states are sharded, and this rank does not keep all of them: to read the "
                "average, call mixp_optimizer_swap_ema on all ranks and read the weight; to read "
                "other states, ask the rank that keeps them, or read a checkpoint";
    else if (!mixpi_held_of(opt, row, what).data && what != MIXP_STATE_MASTER)
        wrong = what == MIXP_STATE_EMA ? "there is no average: call mixp_optimizer_set_ema"
                                       : "this kind of optimizer does not have this state";
    if (wrong)
        return mixp_context_fail(opt->ctx, MIXP_ERR_ARGUMENT, "mixp_optimizer_read '%s': %s",
                                 param->name, wrong);
    if (what == MIXP_STATE_MASTER) r = mixpi_need_weights(opt, "mixp_optimizer_read");
    if (r != MIXP_OK) return r;
    /* No state is kept, or the program wrote the weight, which the next step then takes over. */
    written = opt->slots[i].version != param->version &&
              (what == MIXP_STATE_MASTER ||
               (what == MIXP_STATE_EMA && mixpi_ema_is_new(opt, i)));
    if (count == param->count && (written || !mixpi_held_of(opt, row, what).data))
        return mixp_read(param, host, MIXP_F32, count);
    r = mixpi_transfer_check(param, host, MIXP_F32, count, "mixp_optimizer_read");
    for (i = 0; i < count && r == MIXP_OK; i += MIXP_STATE_BLOCK)
        r = mixpi_held_block(opt, row, what, i, mixpi_min(MIXP_STATE_BLOCK, count - i),
                              host + i);
    return r;
}

MIXPREC_API int64_t mixp_optimizer_applied(const mixp_optimizer *opt) {
    int64_t applied = 0;
    if (opt) mixpi_download(opt->ctx, &applied, &opt->state->applied, sizeof applied);
    return applied;
}

MIXPREC_API double mixp_optimizer_lr(const mixp_optimizer *opt, int group) {
    if (!opt || group < 0 || group >= opt->plan.n_groups) return 0.0;
    return mixp_schedule_lr(&opt->plan.schedule, opt->plan.groups[group].lr,
                            mixp_optimizer_applied(opt));
}

