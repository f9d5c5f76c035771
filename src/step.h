#pragma once
#include "scaler.h"
/* ==== 11. STEP ============================================================ >>step ====
 *
 * Unscale, clip, step, update, in this order. The gradients' scale tags decide which call may use
 * which gradients. Then the verdict: the outcome of the step, and its cause.
 *
 * TWO ALTERNATING NETWORKS, as in a GAN: begin a step for each. d and g are the optimizers of the
 * discriminator and of the generator. Without retries, leave out the two loops.
 *
 *     do {
 *         mixp_step_begin(ctx);  mixp_zero_grad(d);
 *         ... fake under MIXP_NO_GRAD; the discriminator's loss ...
 *         mixp_backward(ctx, mixp_scaler_scale(d_scaler, loss));
 *         mixp_scaler_step(d_scaler, d);  mixp_scaler_update(d_scaler);
 *     } while (mixp_retry(d_scaler, 3));
 *     do {
 *         mixp_step_begin(ctx);  mixp_zero_grad(g);
 *         ... fake; the generator's loss, through the discriminator ...
 *         mixp_backward(ctx, mixp_scaler_scale(g_scaler, loss));
 *         mixp_scaler_step(g_scaler, g);  mixp_scaler_update(g_scaler);
 *     } while (mixp_retry(g_scaler, 3));
 *
 * A skipped step of one network is repeated with its own random numbers, and leaves the other
 * network as it is. mixp_backward of the generator's loss also adds to the gradients of d: clear
 * them before the next step of d, as above.
 *
 * ONE SCALER OR TWO: with a scaler each, an overflow in one network does not change the scale of
 * the other. One scaler for both also works: a skip of either network lowers the scale of both.
 * Update it after each network, as above, or once after both. Do not combine one update with
 * mixp_retry: the repeat would step both networks, also the one that was not skipped. A checkpoint
 * stores one scaler; see mixp_checkpoint for the second.
 *
 * One step for both networks runs the generator once: pass mixp_detach(ctx, fake) to the
 * discriminator's loss, and compute the generator's loss from fake after mixp_scaler_step of d. The
 * step then keeps the activations of both networks. All these forms are bit-identical if no step
 * overflows and no operator draws random numbers.
 */

/* Divides the gradients of opt by their scale, in place, and checks them for Inf and NaN. Call it
 * at most once before each step. MIXP_ERR_ORDER: called twice, or no parameter has a gradient. */
MIXPREC_API mixp_result mixp_scaler_unscale(mixp_scaler *scaler, mixp_optimizer *opt);
/* Steps opt unless its gradients are non-finite, or the step has made an element of a buffer
 * non-finite (see BUFFERS). Without an earlier mixp_scaler_unscale it also unscales, without
 * writing the gradients. Gradients that you changed after unscaling are checked again. A skipped
 * step returns MIXP_OK: see mixp_scaler_verdict.
 *
 * MIXP_ERR_ORDER: called twice before an update, or no parameter has a gradient. MIXP_ERR_ORDER
 * here and in mixp_optimizer_step: operators were applied after opt's last update without a
 * mixp_step_begin, or a parameter without an optimizer was walked back into twice. A call that
 * fails changes nothing. */
MIXPREC_API mixp_result mixp_scaler_step(mixp_scaler *scaler, mixp_optimizer *opt);
/* Advances the scale once, for all optimizers stepped or unscaled since the last update, and makes
 * these optimizers ready for the next step. Networks that train alternately: see the top of STEP.
 * MIXP_ERR_ORDER: no optimizer was stepped or unscaled. MIXP_ERR_DIVERGED: max_floor_skips skips in
 * a row at the lowest scale; the message names the first bad tensor. */
MIXPREC_API mixp_result mixp_scaler_update(mixp_scaler *scaler);

/* Scales the gradients in place so that their global norm is at most max_norm: coefficient min(1,
 * max_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_. Does not change the gradients if
 * any is non-finite. With ranks, the first call that reads gradients in your views replaces them by
 * their mean over the ranks; later calls do not, until the step, mixp_zero_grad or mixp_step_begin.
 * max_norm INFINITY measures the norm and changes no gradient. The call returns a code; after the
 * step the norm before clipping is mixp_scaler_verdict(scaler).grad_norm.
 *
 * MIXP_ERR_ARGUMENT: max_norm is below 0 or NaN. MIXP_ERR_ORDER: no parameter has a
 * gradient, or the loss was scaled and mixp_scaler_unscale was not called. */
MIXPREC_API mixp_result mixp_clip_grad_norm(mixp_optimizer *opt, double max_norm);

/* Steps opt without a scaler. Applies the gradients even if they are non-finite, as PyTorch does.
 * For a finite check without scaling, use a scaler of MIXP_RULE_STATIC with init_scale 1.
 * MIXP_ERR_ORDER: no parameter has a gradient, or a scaler scaled or unscaled the gradients: call
 * mixp_scaler_step. */
MIXPREC_API mixp_result mixp_optimizer_step(mixp_optimizer *opt);

/* mixp_scaler_free and mixp_optimizer_free free what mixp_..._new made, before you free the
 * context. NULL is allowed. The texts of verdicts stay valid. Both wait for the device.
 *
 * Gradients scaled by a freed scaler can no longer be unscaled: using them before mixp_zero_grad is
 * MIXP_ERR_ORDER. Gradients that the scaler has unscaled stay usable. A freed optimizer's
 * parameters and their gradients stay.
 *
 * MIXP_ERR_ORDER, and nothing is freed: the scaler or optimizer is between unscale or step and
 * the scaler's update, or the context has graphs, which may have recorded it (mixp_graph_free). */
MIXPREC_API mixp_result mixp_scaler_free(mixp_scaler *scaler);
MIXPREC_API mixp_result mixp_optimizer_free(mixp_optimizer *opt);

/* The outcome of a step. NONE: no step yet. */
typedef enum mixp_outcome {
    MIXP_STEP_NONE,
    MIXP_STEP_APPLIED,
    MIXP_STEP_SKIPPED
} mixp_outcome;

/* Why a step was skipped. */
typedef enum mixp_skip_reason {
    MIXP_SKIP_NONE,             /* the step was applied                                 */
    MIXP_SKIP_NON_FINITE,       /* a gradient is Inf or NaN                             */
    MIXP_SKIP_SPIKE_NORM,       /* see mixp_spike_rule                                  */
    MIXP_SKIP_SPIKE_LOSS,
    MIXP_SKIP_STOPPED,          /* an index was out of range on a device; see the error's message */
    MIXP_SKIP_BUFFER            /* all gradients are finite, but the step made an element of a
                                   buffer Inf or NaN: see BUFFERS                       */
} mixp_skip_reason;

/* Origin of the first non-finite value of a step. A guard finds the origin: see WATCH. */
typedef enum mixp_origin {
    MIXP_ORIGIN_UNKNOWN,        /* in a gradient; no guard sampled the step */
    MIXP_ORIGIN_FORWARD,        /* `site` stored it, though its inputs were finite */
    MIXP_ORIGIN_BACKWARD,       /* in a gradient of `site`: the loss scale is too large */
    MIXP_ORIGIN_UNSCALE,        /* it arose only when the gradients were unscaled */
    MIXP_ORIGIN_LOSS,           /* in the loss, which `site` computed from finite activations */
    MIXP_ORIGIN_WEIGHT,         /* a weight or a buffer that `site` reads is not finite */
    MIXP_ORIGIN_INPUT,          /* in the batch: an input tensor that `site` reads. Values that the
                                   program computed before and reads again, such as a cache of keys
                                   and values, also count, unless in a buffer           */
    MIXP_ORIGIN_NO_GUARD,       /* in the forward pass, which no guard sampled: the loss is not
                                   finite, or a buffer became so */
    MIXP_ORIGIN_MASK,           /* `site` made it of an Inf that the program wrote, such as a mask
                                   of -Inf over a whole row */
    MIXP_ORIGIN_NONE,           /* no value was Inf or NaN, as in most applied steps */
    MIXP_ORIGIN_COUNT
} mixp_origin;

/* Returns a sentence on the origin: what it means, and what to do. A constant string. */
MIXPREC_API const char *mixp_origin_text(mixp_origin origin);

/* Result of one optimizer step. */
typedef struct mixp_verdict {
    mixp_outcome outcome;
    int64_t      step;          /* number of this step of the optimizer, counting skips    */
    int64_t      applied, skipped;  /* totals so far                                       */
    float        scale;         /* the scale that the step used; 1 without a scaler        */
    double       grad_norm;     /* norm of the unscaled gradients before clipping, Inf or NaN if
                                   they are; NaN if not computed (no scaler, no max_norm)  */
    float        largest, clip; /* largest finite |gradient|; clip coefficient applied     */
    double       lr;            /* learning rate used for group 0                          */
    const char  *bad_tensor;    /* first-added tensor with a non-finite gradient; if all are
                                   finite, the first buffer that the step made Inf or NaN;
                                   NULL = neither                                          */
    int64_t      bad_element;   /* its first bad element; an overflow nearer the loss often arrives
                                   here as NaN                                             */
    int          bad_is_nan;    /* 1 = NaN, 0 = Inf                                        */
    int          bad_rank;      /* rank of the bad gradient or buffer. Of a gradient, bad_tensor is
                                   then the one nearest the loss on that rank. -1 = no bad gradient
                                   or buffer, or only the sum over the ranks is bad       */
    mixp_skip_reason reason;
    double       spike_z;       /* distance of the loss or the norm above its mean, in sd: the
                                   larger of the two */
    double       spike_mean, spike_sd;  /* mean and sd of that value; 0 while spikes are not
                                           checked                                      */
    mixp_origin  origin;        /* where the bad value of a skip arose  */
    const char  *site;          /* name of the origin's site, "" = none; lives as long as the
                                   context                                              */
    int          loss_bad;      /* 1: a loss given to mixp_scaler_scale was Inf or NaN, even if the
                                   gradients were finite: not a scaling problem. If the scaler is
                                   disabled: in mixp_scaler_verdict only */
} mixp_verdict;

/* How the gradient of a parameter, or of all parameters, lay in the range of its low dtype when it
 * was last counted. The gradient is as backward left it, multiplied by the loss scale. Shares are
 * of the values that are not 0. */
typedef struct mixp_underflow {
    const char *name;           /* name of the parameter; "" = all parameters           */
    int64_t     step;           /* step of the context in which it was counted; -1 = not yet */
    mixp_dtype  low;            /* dtype that the counts refer to: the gradient's if low, else the
                                   latest low copy's, else f16. For all parameters: the first
                                   parameter's */
    double      flushed;        /* share that becomes 0 in `low`; an estimate (see mixp_look) if the
                                   gradient is stored low                               */
    double      subnormal;      /* share that is subnormal there and loses bits         */
    mixp_look   look;
    int64_t     exponents[MIXP_EXPONENTS];  /* counts by exponent: exponent e is at e + 127; see
                                               mixp_look_args                           */
    mixp_lost   lost;           /* what that step's updates lost; zeros if it was skipped */
} mixp_underflow;

/* Makes the next step or unscale of opt fill the counts of mixp_underflow, in a separate kernel
 * that reads each gradient once more. The first call allocates memory for the counts. Under a guard
 * every sampled step fills them without this call. MIXP_ERR_DEVICE: the device has no kernel for
 * it. MIXP_ERR_MEMORY. */
MIXPREC_API mixp_result mixp_optimizer_sample(mixp_optimizer *opt);

/* Reads the counts of parameter i, in the order in which parameters were added; i = -1: of all.
 * Returns 1 and fills *out; 0 if there is no such parameter or out is NULL. On a GPU the call waits
 * for the counted step, not for later work: two steps later it need not wait. (It waits for the
 * whole device if a graph counts, or if several optimizers counted in one step.) */
MIXPREC_API int mixp_optimizer_underflow(mixp_optimizer *opt, int64_t i,
                                         mixp_underflow *out);

/* mixp_optimizer_verdict returns the last verdict of an optimizer, mixp_scaler_verdict that of
 * the optimizer that the scaler stepped last (a skipped one, if any was skipped since the last
 * update). Never waits; on a GPU the verdict may be of an earlier step. */
MIXPREC_API mixp_verdict mixp_optimizer_verdict(const mixp_optimizer *opt);
MIXPREC_API mixp_verdict mixp_scaler_verdict(const mixp_scaler *scaler);

