#pragma once
#include "../step.h"
#include "../step/table.c"
#include "shards.c"
#include "../operators/delayed.c"
/* --- settings that must be alike on all ranks ------------------------------------------------- *
 *
 * A step's table has a hash of them. Where the hashes differ, the ranks send the settings
 * themselves, to name the first that differs.
 */
enum { MIXPI_GROUP_SETTINGS = 9 };

static const char *const mixpi_group_setting_names[] = {
    "lr", "beta1", "beta2", "eps", "weight_decay", "momentum", "dampening", "nesterov",
    "f32_states"
};

static void mixpi_group_settings(const mixp_param_group *g, double *all) {
    all[0] = g->lr;
    all[1] = g->beta1;
    all[2] = g->beta2;
    all[3] = g->eps;
    all[4] = g->weight_decay;
    all[5] = g->momentum;
    all[6] = g->dampening;
    all[7] = (double)g->nesterov;
    all[8] = (double)g->f32_states;
}

/* The settings of an optimizer, then those of Muon and of delayed scaling, which are 0 where they
 * are not in use. The last setting is a hash. */
static const char *const mixpi_setting_names[] = {
    "kind", "order", "max_norm", "cautious", "schedule.kind", "schedule.warmup", "schedule.total",
    "schedule.min_factor", "schedule.gamma", "schedule.every", "schedule.decay",
    "schedule.start_factor", "spike.of", "spike.window", "spike.max_in_a_row", "spike.z",
    "states.m", "states.v", "states.master", "max_norm of mixp_clip_grad_norm (-1: no call)",
    "number of groups", "number of parameters", "muon.a", "muon.b", "muon.c",
    "muon.iterations", "muon.f32", "muon.rate", "recipe.history", "recipe.margin",
    "recipe.most_recent", "recipe.dy_e4m3", "amax of delayed scaling",
    "groups of the parameters"
};

enum {
    MIXPI_OWN_SETTINGS = sizeof mixpi_setting_names / sizeof mixpi_setting_names[0],
    MIXPI_SETTINGS = MIXPI_OWN_SETTINGS + MIXP_MAX_GROUPS * MIXPI_GROUP_SETTINGS
};

static void mixpi_plan_settings(const mixp_optimizer *o, double *all) {
    const mixp_step_plan *p = &o->plan;
    const double own[22] = {
        (double)p->kind,           (double)p->order,          p->max_norm,
        (double)p->cautious,       (double)p->schedule.kind,  (double)p->schedule.warmup,
        (double)p->schedule.total, p->schedule.min_factor,    p->schedule.gamma,
        (double)p->schedule.every, (double)p->schedule.decay, p->schedule.start_factor,
        (double)p->spike.of,
        (double)p->spike.window,   (double)p->spike.max_in_a_row, p->spike.z,
        (double)o->states.m,       (double)o->states.v,       (double)o->states.master,
        o->clipped ? o->clip_norm : -1.0, (double)p->n_groups, (double)o->count
    };
    memcpy(all, own, sizeof own);
}

static void mixpi_muon_settings(const mixp_muon_settings *m, double *all) {
    all[0] = m->a;
    all[1] = m->b;
    all[2] = m->c;
    all[3] = (double)m->iterations;
    all[4] = (double)m->f32;
    all[5] = (double)m->rate;
}

static void mixpi_scaled_settings(const mixp_context *ctx, double *all) {
    const mixp_recipe *r = &ctx->casting->trained;
    all[0] = (double)mixpi_recipe_history(r);
    all[1] = (double)r->margin;
    all[2] = (double)r->most_recent;
    all[3] = (double)r->dy_e4m3;
    all[4] = (double)mixpi_scaled_words(ctx);
}

/* A hash of which group each parameter is in, exact as a double. */
static double mixpi_groups_hash(const mixp_optimizer *o) {
    uint64_t h = 1469598103934665603u;
    int64_t i;
    for (i = 0; i < o->count; i++) {
        const double group = (double)o->rows[i].group;
        h = mixpi_hash(h, &group, sizeof group);
    }
    return (double)(h >> 11);
}

/* Everything that a step's result depends on, apart from gradients and states. */
static void mixpi_settings_list(const mixp_optimizer *o, double all[MIXPI_SETTINGS]) {
    int k;
    memset(all, 0, MIXPI_SETTINGS * sizeof *all);
    mixpi_plan_settings(o, all);
    if (o->muon) mixpi_muon_settings(&o->muon->settings, all + 22);
    if (mixpi_scaled_on(o->ctx)) mixpi_scaled_settings(o->ctx, all + 28);
    all[MIXPI_OWN_SETTINGS - 1] = mixpi_groups_hash(o);
    for (k = 0; k < o->plan.n_groups; k++)
        mixpi_group_settings(&o->plan.groups[k],
                             all + MIXPI_OWN_SETTINGS + k * MIXPI_GROUP_SETTINGS);
}

static uint64_t mixpi_settings_hash(const mixp_optimizer *o) {
    double all[MIXPI_SETTINGS];
    MIXPI_STATIC_ASSERT(settings, MIXPI_OWN_SETTINGS == 22 + 6 + 5 + 1);
    mixpi_settings_list(o, all);
    return mixpi_hash(1469598103934665603u, all, sizeof all) >> 11;
}

/* Formats two different numbers with enough digits to show the difference. */
static void mixpi_tell_apart(double a, double b, char *here, char *there, size_t room) {
    int digits = 6;
    do {
        snprintf(here, room, "%.*g", digits, a);
        snprintf(there, room, "%.*g", digits, b);
    } while (strcmp(here, there) == 0 && (digits += 3) <= 18);
}

/* Are all ranks in the same step, so that they can exchange more? On a GPU, one rank may arrive a
 * step later than another. Before the first walk, ranks do not know each other's devices. */
static int mixpi_ranks_are_here(const mixp_context *ctx) {
    const mixpi_exchange *d = ctx->exchange;
    return d && d->n_buckets && !d->far;
}

/* Names setting `word`, which is `a` on rank 0 and `b` on rank `other`. */
static mixp_result mixpi_setting_differs(mixp_context *ctx, int64_t word, int other, double a,
                                         double b) {
    const int64_t of_group = word - MIXPI_OWN_SETTINGS;
    char here[32], there[32], group[32] = "";
    const char *name;
    mixpi_tell_apart(a, b, here, there, sizeof here);
    if (of_group < 0) name = mixpi_setting_names[word];
    else name = mixpi_group_setting_names[of_group % MIXPI_GROUP_SETTINGS];
    if (of_group >= 0)
        snprintf(group, sizeof group, " of group %d", (int)(of_group / MIXPI_GROUP_SETTINGS));
    if (word == MIXPI_OWN_SETTINGS - 1)
        return mixp_context_fail(ctx, MIXP_ERR_RANKS,
                                 "ranks differ: a parameter is in another group on rank %d than "
                                 "on rank 0; use the same groups on all ranks; the step was "
                                 "skipped",
                                 other);
    return mixp_context_fail(ctx, MIXP_ERR_RANKS,
                             "ranks differ: the setting '%s'%s is %s on rank 0 and %s on rank %d; "
                             "use the same settings on all ranks; the step was skipped",
                             name, group, here, there, other);
}

/* Reports settings that differ: by name, if all ranks are here to compare them. */
static mixp_result mixpi_settings_differ(const mixp_optimizer *o, int other) {
    mixp_context *ctx = o->ctx;
    const int size = ctx->ranks.size;
    const size_t bytes = (size_t)size * MIXPI_SETTINGS * sizeof(double);
    mixp_result r = MIXP_OK;
    int64_t word = 0;
    int found = 0;
    double *table = mixpi_ranks_are_here(ctx) ? (double *)mixpi_host_take(ctx, bytes) : NULL;
    if (table) {
        memset(table, 0, bytes);
        mixpi_settings_list(o, table + (int64_t)ctx->ranks.rank * MIXPI_SETTINGS);
        r = mixpi_ranks_share(ctx, table, MIXPI_SETTINGS);
        if (r == MIXP_OK) found = mixpi_rows_differ(table, size, MIXPI_SETTINGS, &word);
        if (found)
            r = mixpi_setting_differs(ctx, word, found, table[word],
                                      table[(int64_t)found * MIXPI_SETTINGS + word]);
        mixpi_host_put(ctx, table);
    }
    if (r != MIXP_OK) return r;
    return mixp_context_fail(ctx, MIXP_ERR_RANKS,
                             "ranks differ: an optimizer's settings (kind, groups, schedule, "
                             "states, spikes, max_norm, clip) or the recipe of delayed scaling "
                             "differ between rank %d and rank 0; use the same settings on all "
                             "ranks; the step was skipped",
                             other);
}
