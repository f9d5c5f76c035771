#pragma once
#include "../step.h"
#include "../step/table.c"
#include "shards.c"
#include "settings.c"
/* --- what all ranks have found --------------------------------------------------------------- *
 *
 * After the look and before the decision, the ranks sum one small table, on the device and without
 * the host. mixpi_agree_fill describes the table.
 */
static mixp_result mixpi_opt_agree(mixp_optimizer *o, mixp_scaler_state *s, int in_parts) {
    const mixp_ranks_desc *ranks = o->ctx->ranks;
    const mixpi_exchange *d = o->ctx->exchange;
    const int64_t n = (int64_t)ranks->size * MIXP_AGREE_WORDS;
    if (!o->table) o->table = (double *)mixpi_opt_device(o, (size_t)n * sizeof *o->table);
    if (!o->table) return MIXP_ERR_MEMORY;

    /* Collect what this rank knows. */
    mixp_agree_args k = MIXPI_ZERO;
    k.plan = &o->plan;
    k.looks = d ? d->looks : NULL;
    k.first_leaf = d ? d->first : NULL;
    k.n_looks = d ? d->n_buckets : 0;
    k.scaler = s;
    k.step = o->state;
    k.table = o->table;
    k.rank = ranks->rank;
    k.size = ranks->size;
    k.in_parts = in_parts;

    /* Each rank fills its row, the rows are summed, and each rank reads all of them. */
    mixp_result r = MIXPI_STEP_RUN(o, agree, &k);
    if (r == MIXP_OK)
        r = mixpi_ranks_run(o->ctx, "the sum of the ranks' results", ranks->sum,
            mixpi_out_to(o->table, MIXP_F64, 0), n);
    k.reads = 1;
    return r == MIXP_OK ? MIXPI_STEP_RUN(o, agree, &k) : r;
}

/* --- what must be alike in every step --------------------------------------------------------- */

/* The byte range [*first, *end) of all weights that step number `taken` compares: at most
 * MIXPI_COMPARED bytes, and the following bytes the next time. */
enum { MIXPI_COMPARED = 1 << 26 };

static void mixpi_compared_range(const mixp_optimizer *o, size_t *first, size_t *end) {
    const size_t most = MIXPI_COMPARED;
    size_t total = 0, windows;
    for (int64_t i = 0; i < o->count; i++) total += mixpi_bytes(o->slot[i].param);
    windows = (total + most - 1) / most;
    *first = windows ? (size_t)(o->taken / o->ctx->ranks->check_every) % windows * most : 0;
    *end = *first + most < total ? *first + most : total;
}

/* Does this step compare weights? All ranks give the same answer: their step counts are equal. */
static int mixpi_compares(const mixp_optimizer *o) {
    const int64_t every = o->ctx->ranks->check_every;
    if (o->ctx->ranks->size < 2 || o->ctx->capture.active) return 0;
    return o->loaded || (every > 0 && o->taken && o->taken % every == 0);
}

/* Hash of the weights that this step compares. Waits for the device. */
static mixp_result mixpi_weights_hash(mixp_optimizer *o, uint64_t *hash) {
    uint64_t h = 1469598103934665603u;
    size_t first, end, at = 0;
    mixp_result r = MIXP_OK;
    mixpi_compared_range(o, &first, &end);
    for (int64_t i = 0; i < o->count && r == MIXP_OK; i++) {
        const mixp_tensor *t = o->slot[i].param;
        const size_t bytes = mixpi_bytes(t), from = at < first ? first - at : 0;
        const size_t to = end < at + bytes ? (end > at ? end - at : 0) : bytes;
        if (from < to) r = mixpi_hash_data(o->ctx, t, from, to, &h);
        at += bytes;
    }

    *hash = (h >> 11) | 1; /* 0 means: not compared */
    return r;
}

/* Enters in the plan what the ranks compare in this step. */
static mixp_result mixpi_plan_compare(mixp_optimizer *o) {
    mixp_step_plan *plan = &o->plan;
    mixp_result r = MIXP_OK;
    plan->weights = 0;
    if (o->ctx->ranks->size < 2) return MIXP_OK;
    plan->settings = mixpi_settings_hash(o);
    if (mixpi_compares(o)) r = mixpi_weights_hash(o, &plan->weights);
    o->loaded = 0;
    o->taken++;
    return r;
}

/* Reports weights that differ between ranks, by name if all ranks are here to compare them. On a
 * GPU, one rank may arrive a step later than another, so no sum is possible: no name is given.
 * Before the first walk, ranks do not know each other's devices, and give no name either. */
static mixp_result mixpi_weights_differ(
    const mixp_optimizer *o, const mixp_agreement *a, int other) {
    const int one_loaded = !(a->here > 0.0) || !(a->there > 0.0);
    if (one_loaded)
        return mixp_context_fail(o->ctx, MIXP_ERR_RANKS,
            "ranks differ: rank %d loaded a checkpoint and rank %d did not; all ranks must load "
            "it; the step was skipped",
            a->here > 0.0 ? 0 : other, a->here > 0.0 ? other : 0);

    if (mixpi_ranks_are_here(o->ctx)) MIXPI_TRY(mixp_ranks_check(o->ctx));
    return mixp_context_fail(o->ctx, MIXP_ERR_RANKS,
        "ranks differ: rank %d has other weights than rank 0; the step was skipped: write weights "
        "on every rank, or call mixp_ranks_from(ctx, 0) to copy rank 0's",
        other);
}

/* Reports ranks whose settings differ, for example after one rank changed its learning rate. On a
 * GPU the report may come a step late, but all ranks skipped the step in question. */
static mixp_result mixpi_opt_differs(const mixp_optimizer *o) {
    static const char *const words[] = { "", "", "the loss scale", "the number of applied steps",
        "the learning rate", "beta1", "beta2", "eps", "weight_decay", "max_norm", "", "", "",
        "the norm of the summed gradients" };
    mixp_step_state s;
    mixp_result r = mixpi_peek(o->ctx, &s, o->state, offsetof(mixp_step_state, update));
    const mixp_agreement *a = &s.agreed;
    const int other = (int)a->differs - 1;
    char here[32], there[32];
    if (r != MIXP_OK || !a->differs) return r;

    /* The words that need a separate sentence. */
    if (a->word == MIXP_AGREE_HERE)
        return mixp_context_fail(o->ctx, MIXP_ERR_RANKS,
            "rank %d made another kind of step than rank 0, or none; the step was skipped: call "
            "the same functions on every rank, and check that the hooks can sum f64",
            other);
    if (a->word == MIXP_AGREE_GUARD)
        return mixp_context_fail(o->ctx, MIXP_ERR_RANKS,
            "ranks differ: the guard of rank %d differs from the guard of rank 0; start it with "
            "the same settings before the same step; the step was skipped",
            other);
    if (a->word == MIXP_AGREE_GRADED)
        return mixp_context_fail(o->ctx, MIXP_ERR_RANKS,
            "ranks differ: other parameters have gradients on rank %d than on rank 0; all ranks "
            "must use the same parameters in each step; the step was skipped",
            other);
    if (a->word == MIXP_AGREE_SETTINGS) return mixpi_settings_differ(o, other);
    if (a->word == MIXP_AGREE_WEIGHTS) return mixpi_weights_differ(o, a, other);

    /* A number: both values. */
    mixpi_tell_apart(a->here, a->there, here, there, sizeof here);
    return mixp_context_fail(o->ctx, MIXP_ERR_RANKS,
        "ranks differ: %s is %s on rank 0 and %s on rank %d; the step was skipped", words[a->word],
        here, there, other);
}

/* The ranks exchange what they found. in_parts: each rank has looked only at its own gradients. */
static mixp_result mixpi_ranks_agree(mixp_optimizer *o, mixp_scaler_state *s, int in_parts) {
    if (o->ctx->device->kernels->agree) return mixpi_opt_agree(o, s, in_parts);
    return mixp_context_fail(o->ctx, MIXP_ERR_DEVICE,
        "ranks: the device %s has no kernel `agree`; update the device's source to this header's "
        "version",
        o->ctx->device->name);
}

/* After a look, or after the calls that replace it: the ranks agree, then prepare runs. */
static mixp_result mixpi_ranks_prepare(mixp_optimizer *o, mixp_scaler_state *s, int in_parts) {
    if (o->ctx->ranks->size < 2) return mixpi_opt_prepare(o, s);
    mixp_result r = mixpi_ranks_agree(o, s, in_parts);
    if (r == MIXP_OK) r = mixpi_opt_prepare(o, s);
    if (r == MIXP_OK) r = mixpi_opt_differs(o);
    return mixpi_crew_stop(o->ctx, r);
}

/* Averages gradients that the caller keeps in views, which no walk has summed. Each view is
 * averaged once in a step, even if the caller changes it between clip and step. */
static mixp_result mixpi_ranks_views(mixp_optimizer *o) {
    mixp_context *ctx = o->ctx;
    mixp_result r = MIXP_OK;
    if (ctx->ranks->size < 2 || mixpi_stage(o) == MIXPI_UNSCALED) return MIXP_OK;
    if (o->views_summed == ctx->generation) return MIXP_OK;
    for (int64_t i = 0; i < o->count && r == MIXP_OK; i++) {
        mixp_tensor *view = o->slot[i].grad;
        if (!view) continue;
        r = mixpi_ranks_run(
            ctx, "the sum of a view", ctx->ranks->sum, mixpi_tensor_out(view, 0), view->count);
        if (r == MIXP_OK && ctx->ranks->mean != MIXP_MEAN_NONE)
            r = mixpi_note_failure(ctx, "the mean of a view",
                mixpi_divide_by_parts(ctx, mixpi_tensor_out(view, 0), view->count));
        view->version++;
    }
    return r;
}

/* Looks at all gradients, and combines the results of all ranks. */
MIXPI_SELDOM
static mixp_result mixpi_ranks_look(mixp_optimizer *o, const float *scale, int unscale,
    const mixp_step_plan *plan, mixp_scaler_state *s) {
    const int in_parts = mixpi_is_scattered(o->ctx);
    MIXPI_TRY(mixpi_ranks_views(o));
    if (o->ctx->ranks->size < 2) return mixpi_opt_look(o, scale, unscale, plan, s);
    mixp_result r = mixpi_opt_look(o, scale, unscale, NULL, NULL);
    if (r == MIXP_OK && plan) return mixpi_ranks_prepare(o, s, in_parts);
    if (r == MIXP_OK && in_parts) /* for the norm to clip by */
        r = mixpi_ranks_agree(o, s, 1);
    /* The other ranks wait for this rank's result. */
    return mixpi_crew_stop(o->ctx, r);
}

/* The decision of a step whose gradients were looked at before. */
MIXPI_SELDOM
static mixp_result mixpi_ranks_prepare_views(mixp_optimizer *o, mixp_scaler_state *s) {
    MIXPI_TRY(mixpi_ranks_views(o));
    return mixpi_ranks_prepare(o, s, 0);
}

/* Before a step: allocates the memory that it needs, and enters in the plan what is compared. */
MIXPI_SELDOM
static mixp_result mixpi_ranks_plan(mixp_optimizer *o) {
    MIXPI_TRY(mixpi_gather_room(o));
    return mixpi_plan_compare(o);
}

/* Adds which rank had the first bad gradient, before the sum. */
MIXPI_SELDOM
static void mixpi_ranks_verdict(
    const mixp_optimizer *opt, const mixp_step_state *s, mixp_verdict *v) {
    const mixpi_exchange *d = opt->ctx->exchange;
    const mixp_agreement *a = &s->agreed;
    int64_t first = 0;
    if (v->bad_tensor && a->part_rank && opt->shards)
        mixpi_piece_of(opt, s->stats.bad_row, (int)a->part_rank - 1, &first);
    v->bad_element += first;
    if (opt->ctx->ranks->size < 2 || !a->bad_rank) return;
    v->bad_rank = (int)a->bad_rank - 1;
    if (!d || a->bad_leaf < 0 || a->bad_leaf >= d->n_leaves) return;
    v->bad_tensor = d->leaves[a->bad_leaf].tensor->name;
    v->bad_element = a->bad_element;
    v->bad_is_nan = a->bad_is_nan;
}
