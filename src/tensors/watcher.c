#pragma once
#include "structs.c"
#include "../recipe.h"
/* --- the table of the guard's functions ---------------------------------------------------- *
 *
 * The rooms of the loop call the guard only through this table, and only after a guard was started
 * or a tensor was looked at. watch/door.c fills the table. Without a guard in the build, the table
 * is never there, and the compiler drops the calls.
 */
struct mixp_call;
struct mixp_op;
struct mixp_verdict;
struct mixpi_state;

/* The flags that mixpi_watched returns. */
enum {
    MIXPI_WATCHED = 1,          /* a guard is on                                           */
    MIXPI_SAMPLED = 2,          /* the current step is sampled                             */
    MIXPI_OBSERVED = 4,         /* an observer sees what each site stores                  */
    MIXPI_TRIAL = 8             /* the step belongs to no training: see mixp_observe       */
};

/* The operands of a linear layer's three products. x and dy are read along their columns by one
 * product and along their rows by another; so is w. */
typedef enum mixpi_role {
    MIXPI_ROLE_X, MIXPI_ROLE_W, MIXPI_ROLE_DY, MIXPI_ROLES
} mixpi_role;

/* An operand that a recipe quantises, under the guard. */
typedef struct mixpi_lossy {
    int32_t fallen;             /* 1: its products are bf16                                */
    int32_t falls, clean;
    int     seen;               /* 1: the sample being taken has measured it               */
    double  bounds[2];          /* bounds of error and clipped; 0 = never                  */
    double  error, clipped;     /* the most that one quantisation of the sample lost       */
    double  excess;             /* the larger of both, as a share of its bound             */
    mixp_block_look blocks;     /* of this sample, or of the last that measured it         */
} mixpi_lossy;

#if !defined(MIXPREC_NO_WATCH) || !defined(MIXPREC_NO_RECIPES)
/* Joins what one quantisation lost to the operand's sample. */
static void mixpi_lossy_join(mixpi_lossy *o, double error, double clipped) {
    const double a = o->bounds[0] > 0.0 ? error / o->bounds[0] : 0.0;
    const double b = o->bounds[1] > 0.0 ? clipped / o->bounds[1] : 0.0;
    o->seen = 1;
    o->error = fmax(o->error, error);
    o->clipped = fmax(o->clipped, clipped);
    o->excess = fmax(o->excess, fmax(a, b));
}
#endif

struct mixpi_watcher {
    int         (*watched)(const mixp_context *ctx);
    void        (*captured)(mixp_context *ctx);     /* a capture has begun */
    mixp_result (*replayed)(mixp_context *ctx);     /* before a replay */
    /* tape: applying an operator. A site has a number from 1; 0: the call has none. */
    int         (*enter)(mixp_context *ctx, const struct mixp_op *op, int n_in, mixp_tensor **in);
    void        (*casts)(struct mixp_call *c);      /* autocast casts the inputs of its site */
    int         (*stays_uncast)(struct mixp_call *c, int i, int cached, mixp_dtype low,
                                mixp_result *r);
    void        (*choose)(struct mixp_call *c);  /* dtype of the result */
    int         (*is_pinned)(const struct mixp_call *c);
    mixpi_lossy *(*operands)(const struct mixp_call *c);  /* operands of a linear's site; NULL: it
                                                       has no site                           */
    mixp_losses *(*losses)(const struct mixp_call *c);  /* their losses, in device memory; NULL:
                                                       an error                              */
    mixp_result (*stored)(mixpi_tape_entry *e, mixp_tensor *const *given);  /* after forward */
    /* walk */
    mixp_result (*begin)(mixp_context *ctx);        /* a step begins */
    mixp_result (*gradient)(mixp_context *ctx, int site, const mixp_tensor *g);
    mixp_result (*leaves)(const struct mixp_call *c, int site);  /* after its backward */
    void        (*walked)(const mixp_context *ctx);
    /* step */
    uint64_t    (*mark)(const mixp_context *ctx);   /* hash of what all ranks must have alike */
    void        (*words)(const mixp_context *ctx, double *row);     /* all words of that,
                                                                       for a message         */
    void        (*origin)(const mixp_context *ctx, struct mixp_verdict *v);
    mixp_result (*updating)(mixp_context *ctx, mixp_advance_args *k);
    mixp_result (*updated)(mixp_context *ctx, void *scaler);    /* NULL: a step without one */
    void        (*lose)(mixp_context *ctx, const void *scaler); /* the scaler is about to be
                                                                   freed                     */
    /* checkpoints */
    mixp_result (*pack)(mixp_context *ctx);
    void        (*meet)(struct mixpi_state *s, int64_t rows);   /* number of the file's rows */
    int         (*items)(struct mixpi_state *s);    /* adds the guard's items; 1: some were added */
    void        (*make_room)(const struct mixpi_state *s);      /* room for the sites of s's data */
    void        (*unpack)(mixp_context *ctx);
};

/* The table; NULL: no guard was ever started. */
static const mixpi_watcher *mixpi_watcher_of(const mixp_context *ctx) {
#ifdef MIXPREC_NO_WATCH
    (void)ctx;
    return NULL;
#else
    return ctx && ctx->watch ? ctx->watcher : NULL;
#endif
}

/* Calls a function of the table; MIXP_OK without a guard: MIXPI_WATCHER(ctx, begin(ctx)). A call
 * without a site, number 0, is not the guard's. */
#define MIXPI_WATCHER(ctx, call) (mixpi_watcher_of(ctx) ? (ctx)->watcher->call : MIXP_OK)

/* A set of MIXPI_WATCHED, MIXPI_SAMPLED, MIXPI_OBSERVED and MIXPI_TRIAL. */
static int mixpi_watched(const mixp_context *ctx) {
    const mixpi_watcher *watcher = mixpi_watcher_of(ctx);
    return watcher ? watcher->watched(ctx) : 0;
}

/* Must operators run one by one, because a guard or an observer sees each? */
static int mixpi_is_seen(const mixp_context *ctx) {
    return (mixpi_watched(ctx) & (MIXPI_WATCHED | MIXPI_OBSERVED)) != 0;
}

static int mixpi_watcher_enter(
    mixp_context *ctx, const struct mixp_op *op, int n_in, mixp_tensor **in) {
    return mixpi_watcher_of(ctx) ? ctx->watcher->enter(ctx, op, n_in, in) : 0;
}
