#pragma once
#include "errors.c"
#include "threads.c"
/* --- the table of the ranks' functions ----------------------------------------------------- *
 *
 * The rooms of the loop call the ranks only through this table, and only in a context that has
 * ranks. ranks/door.c fills it. Without ranks in the build, the table is never there, and the
 * compiler drops the calls.
 */
struct mixp_call;
struct mixp_checkpoint;
struct mixp_optimizer;
struct mixp_verdict;
struct mixpi_report;
struct mixpi_state_item;

struct mixpi_crew {
    /* context */
    void        (*end)(mixp_context *ctx, const char *why);     /* this rank has failed */
    mixp_result (*replayed)(mixp_context *ctx);
    mixp_result (*lack)(const mixp_tensor *t, const char *who); /* a part of t is missing here */
    mixp_result (*share)(mixp_context *ctx, double *table, int64_t words);
    int         (*set_busy)(mixp_context *ctx, int on);     /* returns the state before */
    /* walk: the gradients */
    mixp_result (*walk_begin)(mixp_context *ctx);
    mixp_result (*walk_opens)(mixp_context *ctx, const mixp_tensor *leaf);  /* first gradient */
    mixp_result (*walk_passed)(mixp_context *ctx, const struct mixp_call *c);
    mixp_result (*walk_end)(mixp_context *ctx);
    void        (*forget)(mixp_context *ctx);           /* drops gradients that are held */
    void        (*lose)(mixp_context *ctx, const void *scaler);     /* the scaler is about
                                                                       to be freed           */
    /* optimizers: who keeps the states; the last three only if the states are sharded */
    mixp_result (*enter)(struct mixp_optimizer *opt);   /* opt is new */
    const char *(*add_wrong)(const struct mixp_optimizer *opt, const mixp_tensor *p,
                             const mixp_tensor *g);
    void        (*left)(mixp_tensor *p);                /* p has lost an optimizer */
    mixp_result (*grow)(struct mixp_optimizer *opt, size_t bytes);
    mixp_result (*place)(struct mixp_optimizer *opt, mixp_param_row *row,    /* its states */
                         int64_t joined_at);
    void        (*placed)(struct mixp_optimizer *opt, mixp_tensor *p,        /* how it ended */
                          mixp_result r);
    mixp_param_row (*piece)(const struct mixp_optimizer *opt, int64_t i);
    /* step; send, gather, average and in_pieces only if the states are sharded */
    mixp_result (*plan)(struct mixp_optimizer *opt);    /* before anything is changed */
    mixp_result (*look)(struct mixp_optimizer *opt, const float *scale, int unscale,
                        const mixp_step_plan *plan, mixp_scaler_state *s);
    mixp_result (*prepare)(struct mixp_optimizer *opt, mixp_scaler_state *s);  /* without a look */
    void        (*verdict)(const struct mixp_optimizer *opt, const mixp_step_state *s,
                           struct mixp_verdict *v);
    mixp_result (*send)(struct mixp_optimizer *opt);    /* the table for the update */
    mixp_result (*gather)(struct mixp_optimizer *opt);  /* the weights, after the update */
    mixp_result (*average)(struct mixp_optimizer *opt);  /* all averages of weights, to all ranks */
    void        (*in_pieces)(struct mixp_optimizer *opt);  /* gradients were unscaled or clipped */
    mixp_result (*share_buffers)(mixp_context *ctx);    /* an update: shared buffers travel */
    /* checkpoints of sharded states */
    mixp_result (*check)(mixp_context *ctx);
    mixp_result (*collect)(const struct mixp_checkpoint *what);
    void       *(*borrow)(const struct mixp_checkpoint *what, struct mixpi_report *report,
                          int shared);
    void        (*give_back)(const struct mixp_checkpoint *what, void *memory);
    mixp_result (*load)(const struct mixpi_state_item *item);
    mixp_result (*saved)(const struct mixp_checkpoint *what, mixp_result r);
    /* checkpoints: each rank's own buffers, one after another, rank by rank, from rank 1 on */
    mixp_result (*collect_buffers)(mixp_context *ctx, char *memory);    /* NULL: not rank 0 */
};

/* The table; NULL: the context has no ranks. */
static const mixpi_crew *mixpi_crew_of(const mixp_context *ctx) {
#ifdef MIXPREC_NO_RANKS
    (void)ctx;
    return NULL;
#else
    return ctx ? ctx->crew : NULL;
#endif
}

/* Calls a function of the table; MIXP_OK without ranks: MIXPI_CREW(ctx, walk_begin(ctx)). */
#define MIXPI_CREW(ctx, call) (mixpi_crew_of(ctx) ? (ctx)->crew->call : MIXP_OK)

static void mixpi_crew_end(mixp_context *ctx, const char *why) {
    if (mixpi_crew_of(ctx)) ctx->crew->end(ctx, why);
}
/* Drops the gradients that ranks hold back for a later walk. */
static void mixpi_crew_forget(mixp_context *ctx) {
    if (mixpi_crew_of(ctx)) ctx->crew->forget(ctx);
}
#ifndef MIXPREC_NO_CHECKPOINT
/* on 1: the other ranks must wait for this rank without a limit. Returns the state before. */
static int mixpi_crew_set_busy(mixp_context *ctx, int on) {
    return mixpi_crew_of(ctx) ? ctx->crew->set_busy(ctx, on) : 0;
}
#endif
#if !defined(MIXPREC_NO_WATCH) || !defined(MIXPREC_NO_RECIPES)
/* Shares `words` doubles of each rank. table: host memory, one row for each rank; on entry this
 * rank's row is filled and all others are zero, on return all are filled. Waits for the device. */
static mixp_result mixpi_crew_share(mixp_context *ctx, double *table, int64_t words) {
    return mixpi_crew_of(ctx) ? ctx->crew->share(ctx, table, words) : MIXP_OK;
}
#endif
static mixp_result mixpi_crew_lack(const mixp_tensor *t, const char *who) {
    return mixpi_crew_of(t->ctx) ? t->ctx->crew->lack(t, who) : MIXP_OK;
}

/* Parts of a batch that one step processes, one for each rank. */
static uint64_t mixpi_world(const mixp_context *ctx) {
    return mixpi_crew_of(ctx) ? (uint64_t)ctx->world : 1u;
}

/* This context's place among these parts, from 0. */
static int mixpi_place(const mixp_context *ctx) { return mixpi_crew_of(ctx) ? ctx->place : 0; }

/* Key of this step's random numbers. Each rank has its own key, for its part of the batch. */
static uint64_t mixpi_random_step(const mixp_context *ctx) {
    return ctx->step + 1u + (uint64_t)mixpi_place(ctx) - mixpi_world(ctx);
}

/* Are the optimizers' states sharded over the ranks? */
static int mixpi_is_sharded(const mixp_context *ctx) { return mixpi_crew_of(ctx) && ctx->sharded; }

/* Tells the other ranks not to wait for a rank that has failed. Returns r. */
static mixp_result mixpi_crew_stop(mixp_context *ctx, mixp_result r) {
    if (r != MIXP_OK) mixpi_crew_end(ctx, ctx->errors.message);
    return r;
}

/* Like mixpi_crew_stop, but only for errors that only one rank meets: out of memory, device
 * failures. All ranks make the program's mistakes alike, and may survive them. */
static mixp_result mixpi_crew_stop_alone(mixp_context *ctx, mixp_result r) {
    const int alone = r == MIXP_ERR_MEMORY || r == MIXP_ERR_DEVICE;
    return alone ? mixpi_crew_stop(ctx, r) : r;
}

/* Does t still own its memory? */
static mixp_result mixpi_check_memory(const mixp_tensor *t, const char *who) {
    mixp_result r = mixpi_check_live(t, who);
    if (r != MIXP_OK || !t->own.spent) return r;
    return mixp_context_fail(t->ctx, MIXP_ERR_ORDER,
        "%s: the tensor no longer exists: it was disposable, and its last reader has freed it",
        who);
}

/* Does t still own its memory, and is all of it here? */
static mixp_result mixpi_check_whole(const mixp_tensor *t, const char *who) {
    const mixp_result r = mixpi_check_memory(t, who);
    return r == MIXP_OK && t->own.ranks.in_pieces ? mixpi_crew_lack(t, who) : r;
}
