#pragma once
#include "autocast.h"
#include "step.h"
/* ==== 13. WATCH =========================================================== >>watch ====
 *
 * A guard watches the values that operators store. An operator whose values overflow their low
 * dtype, or are flushed to zero too often, falls back to f32, because no loss scale prevents that.
 * Every change is an event.
 *
 * A site is one application of an operator that recurs in every step: the same operator on the same
 * parameters and on the results of the same sites. Several passes over other data in one step are
 * the same sites; a buffer counts as data. An `if` in the program changes only the sites after it.
 * A site's name is that of its parameter, otherwise of its scope, otherwise of the site that it
 * reads. Sites with the same name are numbered:
 *
 *     "h.3.mlp.proj.w: linear"   "h.3: add"   "h.3: add #2"   "h.3: cast" (of what h.3 stored)
 *
 * Autocast's cast of a batch is named after the operator that reads the cast:
 *
 *     "h.0.w: cast of input 0 of linear"
 *
 * A site in mixp_jvp is named after the operator whose tangent it is part of:
 *
 *     "h.3: tangent of tanh"
 *
 * Reshapes, casts and dropout are not part of a site's identity: an evaluation, in which
 * mixp_dropout does nothing, has the sites of training.
 *
 * In sampled steps a kernel looks at the values that each site stores and at its gradient. About
 * one update in `every` is sampled, with all its steps; the distance varies by a quarter. All steps
 * between a skip of an optimizer and its next update are sampled as well. On a GPU the results stay
 * on the device, and the host reads them two steps later; after a skip the host waits.
 *
 * A site falls back to f32 in three cases: it stores a non-finite value although its inputs are
 * finite; it stores more than `high` of its dtype's largest number; or too large a share of its
 * values is flushed. From then on the site stores f32. At levels 2 and 3, the operators of the
 * classes KEEP and PROMOTE that read the site fall back as well (at level 1 they follow the dtype
 * of their inputs). A matrix product reads the site's f32 values directly, with a low weight. The
 * other sites of the same operator on the same parameters fall back with the site. After two skips
 * in a row whose loss was not finite, the next step stores f32 at all sites, and shows which sites
 * leave their range. A site returns to its low dtype after `clean` samples in a row below
 * `low_again`; each relapse doubles the number of samples. For a site that fell back because of its
 * gradient, only samples with its gradient count.
 *
 * The guard also watches precision. In each sampled step a few sites that multiply, add, average or
 * cast are recomputed in f32, in turn; attention is not: its scores and sums are f32 at every
 * level, so f32 would change only the rounding of q and k. mixp_site_info.scores shows how much
 * that rounding matters; to reduce it, change the weights (mixp_attention_scores). A site falls
 * back if rounding removes more than `imprecise` of the variation of its values over the batch,
 * with the means subtracted. Example: 2023.37 is in the range of f16, but becomes 2023. A product
 * is recomputed with f32 weights too, and the mean of its error counts; if it falls back for its
 * precision, it reads f32 weights and inputs from then on. Batches of fewer than 8 rows are not
 * judged.
 *
 * An intended Inf, for example in a mask, is not an overflow. If a loss is not finite, the guard
 * goes back from the loss, from one non-finite result to the next, to the site that made the first
 * one. While a guard is on, a skip whose loss is not finite keeps the loss scale: once in a row,
 * and again after each fallback. All other skips lower the scale as without a guard, with one
 * exception: after a second skip in a row in whose sample a low gradient overflowed, the scale
 * drops by 16 more backoffs, to no less than 2, and the next clean sampled step returns it to the
 * first backoff at which the largest low gradient is at most half of f16's largest number. So two
 * skips find the scale to which many would lead. Rules that predict do so by themselves. On a GPU
 * the host learns of a skip one update later. Without mixp_retry, the step after a skip is
 * therefore not sampled; if it is skipped too, the scale is lowered. Without a guard none of this
 * code runs, and nothing is allocated.
 *
 * Gradients are watched as well, multiplied by the loss scale. A site whose gradient is flushed
 * falls back in the same way. Flushing counts only if no value of the array reaches 16 times the
 * smallest normal number of the dtype; if some values are larger, the loss is less than a rounding.
 * In an array that is already low, flushed values are invisible. The guard then estimates them from
 * the number of values equal to the smallest subnormal, or, if all values are zero, from a
 * neighbour with tiny values.
 *
 * Under a recipe below 16 bits, the guard also measures what quantising a linear's operands loses;
 * an operand that loses too much falls back to bf16: see mixp_recipe.
 *
 * Several ranks merge their samples at each sampled update. Their sites then stay equal, and a
 * non-finite loss of any rank counts for all. Start the guards of all ranks with the same settings.
 * Rank 0 may evaluate on its own, and ranks may apply different operators.
 *
 * Memory: about 1.2 KB for each site, of which 0.3 to 0.6 KB on the device, and 2.1 KB for each
 * parameter of an optimizer, on the host and on the device. It is allocated when new sites appear,
 * usually in the first step, and never in a captured step. mixp_checkpoint_save needs 36 bytes more
 * for each site.
 */

/* Zero in any field = the default. */
typedef struct mixp_guard_desc {
    int     every;              /* samples about one update in `every`; 0 = 16, 1 = each update; at
                                   most 2^20 */
    int     clean;              /* clean samples until a site returns to its low dtype; 0 = 4; at
                                   most 2^20. With 1, a single easy batch, such as a short last
                                   batch of an epoch, returns a site. Each relapse may cost a skip,
                                   and doubles the number  */
    float   high;               /* 0 = 0.25 of the dtype's largest number; below 1 */
    float   low_again;          /* 0 = a quarter of high; below high */
    float   flushed;            /* 0 = 0.02 of the values that are not 0; at most 1 */
    float   imprecise;          /* 0 = 0.05 of the variation over the batch; at most 1; negative =
                                   precision is not watched, and keeps no site in f32 */
    int     patience;           /* MIXP_ERR_DIVERGED after this many skips in a row of one optimizer
                                   that arose in the forward pass, when no site is left to fall
                                   back; 0 = 20, negative = never */
    int     max_sites;          /* 0 = 4096; further sites are not watched, and an event reports
                                   it. Only sites in use need memory                    */
} mixp_guard_desc;

/* Turns the guard on, or changes its settings and keeps its records of sites. desc NULL = all
 * defaults. Call it between steps. On an error nothing changes. MIXP_ERR_ORDER: a region or a scope
 * is open, or a step is being captured. MIXP_ERR_ARGUMENT: a field is out of range, or max_sites
 * differs from its first value. MIXP_ERR_DEVICE: the device has no kernel for it. */
MIXPREC_API mixp_result mixp_guard_start(mixp_context *ctx, const mixp_guard_desc *desc);
/* Turns the guard off: every site stores the dtype of autocast. A guard that is started again keeps
 * its records. MIXP_ERR_ORDER: a region or a scope is open, or a step is being captured. */
MIXPREC_API mixp_result mixp_guard_stop(mixp_context *ctx);
/* Returns 1 if the next step must be sampled: run an ordinary step instead of replaying a graph. 0
 * otherwise, also without a guard. Without a fallback, replays are bit-identical to ordinary
 * steps. A skip in a replay forces no sample, because the host does not see it: the guard learns of
 * its cause from the next sample on schedule, at most a quarter more than `every` updates later. A
 * run of replays may therefore skip more updates, lower its scale more and fall back later than the
 * same steps run one by one. */
MIXPREC_API int mixp_guard_due(const mixp_context *ctx);

/* Pins the sites whose name, or its part before ": ", fits the pattern (* matches any characters, ?
 * matches one; the pattern is copied). MIXP_F32: the sites store f32. MIXP_F16 or MIXP_BF16: the
 * sites store the dtype of autocast and never fall back. MIXP_DTYPE_COUNT: removes the pin. A
 * recipe quantises no pinned linear. The last pattern that fits wins. A repeated pattern replaces
 * its old entry, "*" replaces all entries, and at most 64 are kept. Call it before or during
 * training, with the guard on or off.
 *
 * MIXP_ERR_ARGUMENT: another dtype, a pattern longer than 95 characters, too many patterns, or no
 * site has a matching name. If sites are not known yet, a missing name becomes the context's error
 * once every optimizer has had a sampled update. MIXP_ERR_ORDER: a region or a scope is open, or a
 * step is being captured. */
MIXPREC_API mixp_result mixp_guard_pin(mixp_context *ctx, const char *pattern,
                                       mixp_dtype dtype);

typedef enum mixp_event_kind {
    MIXP_EVENT_OVERFLOW,        /* the site stored a non-finite value: it falls back to f32 */
    MIXP_EVENT_HIGH,            /* its largest value approached the end of the range: it falls back
                                   to f32                                               */
    MIXP_EVENT_FLUSHED,         /* too large a share was flushed to zero: it falls back to f32 */
    MIXP_EVENT_BACK,            /* clean for long enough: it returns to its low dtype */
    MIXP_EVENT_PINNED,          /* a pattern of mixp_guard_pin fits the site */
    MIXP_EVENT_SKIP,            /* a step was skipped: see `origin` and `site` */
    MIXP_EVENT_FULL,            /* max_sites is reached: further sites are not watched */
    MIXP_EVENT_IMPRECISE,       /* rounding lost too much of the values: it falls back to f32 */
    MIXP_EVENT_OPERAND,         /* quantising lost too much of an operand: the products that read it
                                   fall back to bf16; see mixp_recipe                   */
    MIXP_EVENT_OPERAND_BACK,    /* the operand was clean for long enough: it is quantised again */
    MIXP_EVENT_COUNT
} mixp_event_kind;

typedef struct mixp_event {
    int64_t         number;     /* 0, 1, 2, ... since the guard was first started; loading a
                                   checkpoint drops the stored events; numbering continues */
    int64_t         step;       /* the context's step that was sampled. It counts micro-batches, and
                                   with ranks those of all: divide by both for your loop's step */
    mixp_event_kind kind;
    const char     *what;       /* the kind in words: a constant string. See mixp_event_text */
    const char     *site;       /* name of the site; "" = none: a skip that no sample explains
                                   yet */
    mixp_dtype      dtype;      /* dtype that the site stores from now on */
    float           largest;    /* largest value seen */
    double          flushed;    /* flushed share of the values that are not 0 */
    double          imprecise;  /* share of the variation over the batch that rounding lost */
    const char     *operand;    /* of OPERAND, OPERAND_BACK: "x", "w" or "dy"; otherwise "" */
    double          error;      /* mean relative error of the quantised operand */
    double          clipped;    /* share of its values that were clipped */
    int64_t         nonfinite;
    mixp_origin     origin;     /* where the bad value of a skip arose  */
    int             of_gradient;    /* 1: seen in the site's gradient, 0: in its value */
    int             also;       /* number of other sites of the same operator on the same parameters
                                   that fell back with it. Of a skip: 1 if a site fell back
                                   because of it */
} mixp_event;

/* Reads event i of those still kept (the latest 1024), oldest first. Returns 1, or 0 past the last.
 * Like all functions that read the guard's state, it does not wait for the device. */
MIXPREC_API int mixp_guard_event(const mixp_context *ctx, int i, mixp_event *out);

/* Writes the event as a sentence for people, at most 400 characters: the step, what happened where,
 * what it means, and what to do, or that no action is needed. Returns text, truncated to `space`;
 * "" for no event; NULL if text is NULL or space is 0. Pure. */
MIXPREC_API const char *mixp_event_text(const mixp_event *event, char *text, size_t space);

typedef struct mixp_site_info {
    const char *name, *op;
    mixp_dtype  dtype;          /* dtype that the site stored last */
    int         fallen;         /* 1: the site fell back */
    int         pinned;         /* 1: a pattern pins the site */
    int         falls;          /* number of fallbacks */
    int         clean;          /* clean samples since the fallback; the site returns at
                                   `clean_needed`                                       */
    int         clean_needed;
    int         operands;       /* bits of a linear's operands that a recipe no longer quantises: 1
                                   x, 2 w, 4 dy */
    int64_t     samples;        /* number of samples */
    mixp_look   value, grad;    /* looks of the last sample at the stored values, and
                                   at the gradient multiplied by the loss scale           */
    float       scores;         /* of attention, last sample: the largest log-sum-exp of a query's
                                   scores, as mixp_attention_scores returns per head; 0 if
                                   none is above 0. Otherwise 0 */
    mixp_block_look blocks[3];  /* of a linear under a recipe, last sample: of x, w and dy, on
                                   this rank. All 0 on a device with its own memory     */
} mixp_site_info;

/* Reads site i, in the order of first application. Returns 1, or 0 past the last. */
MIXPREC_API int mixp_site(const mixp_context *ctx, int i, mixp_site_info *out);

/* The share of a look's values that are not 0 and that the low dtype flushes to zero. If the values
 * were stored low already (stored_low), the share is estimated from `least`. 0 if look is NULL or
 * has no such values. Pure. */
MIXPREC_API double mixp_look_flushed(const mixp_look *look, int stored_low);

/* do { mixp_step_begin(ctx); ... mixp_scaler_update(scaler); } while (mixp_retry(scaler, 3));
 *
 * Returns 1 if the last update skipped its step and a retry with the same batch is worthwhile: at
 * the new scale, or with a site fallen back. Allows at most `times` retries in a row, at least 1.
 * The random step stays, so dropout draws the same numbers if the same operators are applied.
 * Returns 0 otherwise: continue with the next batch. With a guard on, the retry is sampled, and a
 * step whose batch or weights are not finite is not retried. Works without a guard as well. Waits
 * for the device. */
MIXPREC_API int mixp_retry(mixp_scaler *scaler, int times);

/* For an evaluation: do { mixp_step_begin(ctx); MIXP_NO_GRAD(ctx) ... loss ... } while
 * (mixp_retry_loss(ctx, loss));
 *
 * Returns 1 if a guard is on, and the loss is not finite or the evaluation has made an element of a
 * buffer Inf or NaN (see BUFFERS): the next step is sampled and stores f32 at all sites. The
 * evaluation is thus repeated in f32, and sites that leave their range fall back (with ranks they
 * store f32 in that step but do not fall back). Returns 0 if loss and buffers are finite, no guard
 * is on, or the evaluation was already repeated. loss: one element, from this step. Waits for the
 * device. */
MIXPREC_API int mixp_retry_loss(mixp_context *ctx, const mixp_tensor *loss);

/* --- observers ------------------------------------------------------------------------------- *
 *
 * An observer sees the values that each site stores, and their gradients. examples/compare.h uses
 * it to compare two runs site by site, and to count values by exponent.
 */
typedef struct mixp_sight {
    int                site;        /* number of the site, from 1, for the context's life */
    const char        *name, *op;   /* the site's name and operator, for the context's life */
    const int         *reads;       /* numbers of up to 4 sites that the site reads; 0 = no more */
    const mixp_tensor *tensor;      /* forward: the values that the site stored. backward: their
                                       gradient, multiplied by the loss scale */
    int                backward;
    int                sample;      /* the guard's sample to which the step belongs, from 1; 0: the
                                       step is not sampled */
    int64_t            draws;       /* calls in this step so far that drew random numbers, as
                                       mixp_dropout does */
} mixp_sight;

/* see is called after an operator has run, and before mixp_backward walks it back. It is not called
 * in captured steps, for reshapes, or for the reruns of mixp_recompute. It may read the tensor and
 * run kernels on it; it must not change the tensor or apply operators. trial 1: the steps that
 * follow are trials: see mixp_observe. */
typedef struct mixp_observer {
    void (*see)(mixp_context *ctx, const mixp_sight *sight, void *user);
    void  *user;
    int    trial;
} mixp_observer;

/* Installs an observer; NULL removes it. There is one observer: *before, unless NULL, receives the
 * observer that it replaces, which you may call from your own and install again later. Needs no
 * guard. Operators that the device would run as one kernel run one by one. That changes no bits of
 * a step, except those of mixp_mlp with MIXP_EPILOGUES_GELU. The first call reserves room for 4096
 * sites, about 0.6 KB for each site in use, unless a guard has set another limit. Call it between
 * steps.
 *
 * TRIALS are steps outside of training. In a trial mixp_step_begin forgets the gradients of all
 * tensors. A guard does not sample a trial. A trial enters no amax of a recipe, and frees no blocks
 * of mixp_recompute. When the observer is removed, all gradients are forgotten again, and the step
 * count has the value that it had at the call. Do not step an optimizer in a trial.
 *
 * MIXP_ERR_ORDER: a region or a scope is open, or a step is being captured. MIXP_ERR_MEMORY. */
MIXPREC_API mixp_result mixp_observe(mixp_context *ctx, const mixp_observer *observer,
                                     mixp_observer *before);
