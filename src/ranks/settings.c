#pragma once
#include "../step.h"
#include "../step/table.c"
#include "shards.c"
#include "../tensors/quantiser.c"
/* --- settings that must be alike on all ranks ------------------------------------------------- *
 *
 * A step's table has a hash of them. Where the hashes differ, the ranks send the settings
 * themselves, to name the first that differs.
 */
enum { MIXPI_GROUP_SETTINGS = 11 };

static const char *const mixpi_group_setting_names[] = {
    "lr", "beta1", "beta2", "eps", "weight_decay", "momentum", "dampening", "nesterov",
    "f32_states", "lr_decay", "momentum_decay"
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
    all[9] = g->lr_decay;
    all[10] = g->momentum_decay;
}

/* The settings of an optimizer, then those of Muon and of delayed scaling, which are 0 where they
 * are not in use. The last three settings are hashes. */
static const char *const mixpi_setting_names[] = {
    "kind", "max_norm", "cautious", "schedule.kind", "schedule.warmup", "schedule.total",
    "schedule.min_factor", "schedule.gamma", "schedule.every", "schedule.decay",
    "schedule.start_factor", "spike.of", "spike.window", "spike.max_in_a_row", "spike.z",
    "states.m", "states.v", "states.master", "max_norm of mixp_clip_grad_norm (-1: no call)",
    "number of groups", "number of parameters", "maximize", "amsgrad", "centered", "decoupled",
    "initial_sum", "no_master", "schedule.power", "schedule.growth",
    "the hash of schedule.milestones", "schedule.pct_start", "schedule.linear",
    "schedule.three_phase", "muon.a", "muon.b", "muon.c", "muon.iterations", "muon.f32",
    "muon.rate", "recipe.history", "recipe.margin", "recipe.most_recent", "recipe.dy_e4m3",
    "amax of delayed scaling", "the hash of the rules of mixp_autocast_set_recipes", "buffers",
    "groups of the parameters"
};

enum {
    MIXPI_OWN_SETTINGS = sizeof mixpi_setting_names / sizeof mixpi_setting_names[0],
    MIXPI_PLAN_SETTINGS = 33,
    MIXPI_BUFFERS_SETTING = MIXPI_OWN_SETTINGS - 2,
    MIXPI_SETTINGS = MIXPI_OWN_SETTINGS + MIXP_MAX_GROUPS * MIXPI_GROUP_SETTINGS
};

/* Hash of the milestones, of 53 bits. */
static double mixpi_milestones_hash(const mixp_schedule *s) {
    return (double)(mixpi_hash(1469598103934665603u, s->milestones, sizeof s->milestones) >> 11);
}

static void mixpi_plan_settings(const mixp_optimizer *o, double *all) {
    const mixp_step_plan *p = &o->plan;
    const double own[MIXPI_PLAN_SETTINGS] = { (double)p->kind, p->max_norm, (double)p->cautious,
        (double)p->schedule.kind, (double)p->schedule.warmup, (double)p->schedule.total,
        p->schedule.min_factor, p->schedule.gamma, (double)p->schedule.every,
        (double)p->schedule.decay, p->schedule.start_factor, (double)p->spike.of,
        (double)p->spike.window, (double)p->spike.max_in_a_row, p->spike.z, (double)o->states.m,
        (double)o->states.v, (double)o->states.master, o->clipped ? o->clip_norm : -1.0,
        (double)p->n_groups, (double)o->count, (double)p->maximize, (double)p->amsgrad,
        (double)p->centered, (double)p->decoupled, (double)o->initial_sum,
        (double)(o->no_master != 0), p->schedule.power, (double)p->schedule.growth,
        mixpi_milestones_hash(&p->schedule), p->schedule.pct_start, (double)p->schedule.linear,
        (double)p->schedule.three_phase };
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

/* --- buffers --- */

/* Does the next update send this buffer? */
static int mixpi_is_sent(const mixpi_backup *b) {
    return b->ranks != MIXP_BUFFER_OWN && b->window == b->buffer->ctx->buffers.window;
}

/* "'bn.mean' f32 [8], MIXP_BUFFER_MEAN, written"; "missing" past the last buffer. */
static void mixpi_buffer_describe(const mixp_context *ctx, int64_t i, char *text) {
    static const char *const ranks[] = { "MIXP_BUFFER_OWN", "MIXP_BUFFER_RANK_0, ",
        "MIXP_BUFFER_MEAN, " };
    const mixpi_backup *b = i < ctx->buffers.all.count ? mixpi_backup_at(ctx, i) : NULL;
    const char *written = "";
    char shape[40];
    memset(text, 0, MIXPI_LEAF_TEXT);
    if (!b) snprintf(text, MIXPI_LEAF_TEXT, "missing");
    if (!b) return;
    mixpi_shape_text(b->buffer->rank, b->buffer->shape, shape, sizeof shape);
    if (b->ranks != MIXP_BUFFER_OWN) written = mixpi_is_sent(b) ? "written" : "not written";
    snprintf(text, MIXPI_LEAF_TEXT, "'%.40s' %s %s, %s%s", b->buffer->name,
        mixp_dtype_name(b->buffer->dtype), shape, ranks[b->ranks], written);
}

/* A hash, exact as a double, of a buffer's name, dtype and shape, of its ranks, and of whether the
 * next update sends it. 0 past the last buffer. */
static double mixpi_buffer_hash(const mixp_context *ctx, int64_t i) {
    const mixpi_backup *b = i < ctx->buffers.all.count ? mixpi_backup_at(ctx, i) : NULL;
    const mixp_tensor *t = b ? b->buffer : NULL;
    uint64_t h = 1469598103934665603u;
    int32_t rest[3];
    if (!b) return 0.0;
    rest[0] = (int32_t)t->dtype;
    rest[1] = (int32_t)b->ranks;
    rest[2] = mixpi_is_sent(b);
    h = mixpi_hash(h, t->name, strlen(t->name) + 1);
    h = mixpi_hash(h, t->shape, (size_t)t->rank * sizeof t->shape[0]);
    h = mixpi_hash(h, rest, sizeof rest);
    return (double)(h >> 11);
}

/* A hash of all buffers, and of the buffers sent by earlier updates. */
static double mixpi_buffers_hash(const mixp_context *ctx) {
    uint64_t h = ctx->buffers.sent;
    for (int64_t i = 0; i < ctx->buffers.all.count; i++) {
        const double one = mixpi_buffer_hash(ctx, i);
        h = mixpi_hash(h, &one, sizeof one);
    }
    return (double)(h >> 11);
}

/* A hash of the parameters in the order in which they were added, with the group of each, exact as
 * a double. */
static double mixpi_groups_hash(const mixp_optimizer *o) {
    uint64_t h = 1469598103934665603u;
    for (int64_t i = 0; i < o->count; i++) {
        const mixp_tensor *p = o->slot[i].param;
        const int32_t rest[2] = { o->rows[i].group, (int32_t)p->dtype };
        h = mixpi_hash(h, p->name, strlen(p->name) + 1);
        h = mixpi_hash(h, p->shape, (size_t)p->rank * sizeof p->shape[0]);
        h = mixpi_hash(h, rest, sizeof rest);
    }
    return (double)(h >> 11);
}

/* Everything that a step's result depends on, apart from gradients and states. */
static void mixpi_settings_list(const mixp_optimizer *o, double all[MIXPI_SETTINGS]) {
    const mixpi_quantiser *quantiser = mixpi_quantiser_of(o->ctx);
    memset(all, 0, MIXPI_SETTINGS * sizeof *all);
    mixpi_plan_settings(o, all);
    if (o->muon) mixpi_muon_settings(&o->muon->settings, all + MIXPI_PLAN_SETTINGS);
    if (quantiser) quantiser->words(o->ctx, all + MIXPI_PLAN_SETTINGS + 6);
    all[MIXPI_BUFFERS_SETTING] = mixpi_buffers_hash(o->ctx);
    all[MIXPI_BUFFERS_SETTING + 1] = mixpi_groups_hash(o);
    for (int k = 0; k < o->plan.n_groups; k++)
        mixpi_group_settings(
            &o->plan.groups[k], all + MIXPI_OWN_SETTINGS + k * MIXPI_GROUP_SETTINGS);
}

static uint64_t mixpi_settings_hash(const mixp_optimizer *o) {
    double all[MIXPI_SETTINGS];
    MIXPI_STATIC_ASSERT(settings, MIXPI_OWN_SETTINGS == MIXPI_PLAN_SETTINGS + 6 + 6 + 2);
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
    return d && d->n_buckets && !d->is_apart;
}

/* Names the first buffer that differs. n: the larger number of buffers. table: zeroed, for a row of
 * MIXPI_LEAF_TEXT + n doubles of each rank. */
static mixp_result mixpi_buffers_tell(mixp_context *ctx, int64_t n, double *table) {
    const int rank = ctx->ranks->rank, size = ctx->ranks->size;
    char here[MIXPI_LEAF_TEXT], there[MIXPI_LEAF_TEXT];
    int64_t at = 0, i;
    for (i = 0; i < n; i++) table[rank * n + i] = mixpi_buffer_hash(ctx, i);
    mixp_result r = mixpi_ranks_share(ctx, table, n);
    int other = r == MIXP_OK ? mixpi_rows_differ(table, size, n, &at) : 0;
    if (r == MIXP_OK && !other)
        return mixp_context_fail(ctx, MIXP_ERR_RANKS,
            "ranks differ: in an earlier step, some ranks wrote a shared buffer and others did "
            "not; write it in the same steps on all ranks, or set MIXP_BUFFER_OWN; the step was "
            "skipped");
    if (r != MIXP_OK) return r;

    /* Each rank describes that buffer to the others. */
    memset(table, 0, (size_t)size * MIXPI_LEAF_TEXT * sizeof *table);
    mixpi_buffer_describe(ctx, at, here);
    for (i = 0; i < MIXPI_LEAF_TEXT; i++) table[rank * MIXPI_LEAF_TEXT + i] = (double)here[i];
    MIXPI_TRY(mixpi_ranks_share(ctx, table, MIXPI_LEAF_TEXT));
    for (i = 0; i < MIXPI_LEAF_TEXT; i++) {
        here[i] = (char)mixpi_whole_of(table[i]);
        there[i] = (char)mixpi_whole_of(table[other * MIXPI_LEAF_TEXT + i]);
    }
    here[MIXPI_LEAF_TEXT - 1] = there[MIXPI_LEAF_TEXT - 1] = '\0';
    return mixp_context_fail(ctx, MIXP_ERR_RANKS,
        "ranks differ: buffer %.0f is %.127s on rank 0 and %.127s on rank %d; make and write the "
        "same buffers on all ranks; the step was skipped",
        (double)at, here, there, other);
}

/* Names the first buffer that differs between ranks. */
static mixp_result mixpi_buffers_differ(mixp_context *ctx) {
    const size_t size = (size_t)ctx->ranks->size, first = size * sizeof(double);
    double *counts = (double *)mixpi_host_take(ctx, first), *table;
    int64_t n = 1;
    if (!counts) return mixpi_out_of_memory(ctx, first);

    /* How many buffers has the rank with the most? */
    memset(counts, 0, first);
    counts[ctx->ranks->rank] = (double)ctx->buffers.all.count;
    mixp_result r = mixpi_ranks_share(ctx, counts, 1);
    for (size_t i = 0; i < size; i++)
        if (mixpi_whole_of(counts[i]) > n) n = mixpi_min(mixpi_whole_of(counts[i]), 1 << 24);
    mixpi_host_free(ctx, counts);
    if (r != MIXP_OK) return r;

    /* The tables have that many rows. */
    size_t bytes = size * ((size_t)n + MIXPI_LEAF_TEXT) * sizeof(double);
    table = (double *)mixpi_host_take(ctx, bytes);
    if (!table) return mixpi_out_of_memory(ctx, bytes);
    memset(table, 0, bytes);
    r = mixpi_buffers_tell(ctx, n, table);
    mixpi_host_free(ctx, table);
    return r;
}

/* Names setting `word`, which is `a` on rank 0 and `b` on rank `other`. */
static mixp_result mixpi_setting_differs(
    mixp_context *ctx, int64_t word, int other, double a, double b) {
    const int64_t of_group = word - MIXPI_OWN_SETTINGS;
    char here[32], there[32], group[32] = "";
    const char *name;
    mixpi_tell_apart(a, b, here, there, sizeof here);

    /* The name: of a setting of the optimizer, or of a group. */
    if (of_group < 0) name = mixpi_setting_names[word];
    else name = mixpi_group_setting_names[of_group % MIXPI_GROUP_SETTINGS];
    if (of_group >= 0)
        snprintf(group, sizeof group, " of group %d", (int)(of_group / MIXPI_GROUP_SETTINGS));

    /* Two words are hashes, of which no values can be shown. */
    if (word == MIXPI_BUFFERS_SETTING) return mixpi_buffers_differ(ctx);
    if (word == MIXPI_OWN_SETTINGS - 1)
        return mixp_context_fail(ctx, MIXP_ERR_RANKS,
            "ranks differ: an optimizer of rank %d has other parameters than that of rank 0, or in "
            "another group or order; add the same parameters in the same order to the same groups "
            "on all ranks; the step was skipped",
            other);
    return mixp_context_fail(ctx, MIXP_ERR_RANKS,
        "ranks differ: the setting '%s'%s is %s on rank 0 and %s on rank %d; use the same settings "
        "on all ranks; the step was skipped",
        name, group, here, there, other);
}

/* Reports settings that differ: by name, if all ranks are here to compare them. */
static mixp_result mixpi_settings_differ(const mixp_optimizer *o, int other) {
    mixp_context *ctx = o->ctx;
    const int size = ctx->ranks->size;
    const size_t bytes = (size_t)size * MIXPI_SETTINGS * sizeof(double);
    mixp_result r = MIXP_OK;
    int64_t word = 0;
    int found = 0;
    double *table = mixpi_ranks_are_here(ctx) ? (double *)mixpi_host_take(ctx, bytes) : NULL;
    if (table) {
        memset(table, 0, bytes);
        mixpi_settings_list(o, table + (int64_t)ctx->ranks->rank * MIXPI_SETTINGS);
        r = mixpi_ranks_share(ctx, table, MIXPI_SETTINGS);
        if (r == MIXP_OK) found = mixpi_rows_differ(table, size, MIXPI_SETTINGS, &word);
        if (found)
            r = mixpi_setting_differs(
                ctx, word, found, table[word], table[(int64_t)found * MIXPI_SETTINGS + word]);
        mixpi_host_free(ctx, table);
    }

    /* If the ranks cannot be asked, no name. */
    if (r != MIXP_OK) return r;
    return mixp_context_fail(ctx, MIXP_ERR_RANKS,
        "ranks differ: an optimizer's settings (kind, groups, schedule, states, spikes, max_norm, "
        "clip), the recipe of delayed scaling or the buffers (shape, mixp_buffer_set_ranks, which "
        "the step writes) differ between rank %d and rank 0; use the same on all ranks; the step "
        "was skipped",
        other);
}
