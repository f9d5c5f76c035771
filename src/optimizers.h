#pragma once
#include "scaler.h"
/* ==== 10. OPTIMIZERS ================================================= >>optimizers ====
 *
 * One pass over all gradients computes found_inf, the norm and the largest value. One pass over all
 * parameters unscales, clips, updates moments and f32 master weights, and writes the low copies.
 * Hyper-parameters are double. Moments and master weights are f32, or smaller on request. Without
 * fast-math, steps are bit-identical on every instruction set and at any number of threads.
 */
/* How an optimizer stores its states. Smaller states save memory, and the time to read and write
 * that memory, but add noise. All zero: f32. Otherwise MIXP_MOMENT_BF16 or MIXP_MOMENT_8BIT, and
 * MIXP_MASTER_16BIT or MIXP_MASTER_8BIT (ARITHMETIC has their layouts). 16-bit masters lose
 * nothing. bf16 moments cost almost no accuracy. 8-bit moments change an update by about a tenth.
 * Where gradients in one block of MIXP_STATE_BLOCK elements differ by more than 10^4, the smallest
 * move less: three quarters of Adam's update at 10^5, half at 10^6.
 * These parameters keep f32 states: parameters with one axis (norms, biases), with fewer than
 * MIXP_STATE_SMALL elements, or in groups with f32_states. f32 parameters are their own masters. */
#define MIXP_STATE_SMALL 4096
typedef struct mixp_optimizer_states {
    mixp_moment_kind m, v;      /* first and second moment. v: all kinds except SGD, Lion, Muon */
    mixp_master_kind master;    /* for bf16 parameters. If not F32, f16 parameters are refused */
} mixp_optimizer_states;

/* How the shape of a matrix scales Muon's rate. rows: outputs of a linear layer. */
typedef enum mixp_muon_rate {
    MIXP_MUON_RATE_ORIGINAL,        /* sqrt(max(1, rows / cols))                           */
    MIXP_MUON_RATE_MATCH_RMS_ADAMW, /* 0.2 sqrt(max(rows, cols)): use AdamW's rate and decay
                                       unchanged                                           */
    MIXP_MUON_RATE_SPECTRAL_UNCLAMPED   /* sqrt(rows / cols)                               */
} mixp_muon_rate;

/* Settings that only Muon has. X <- a X + (b A + c A A) X with A = X X' is one iteration. */
typedef struct mixp_muon_settings {
    double        a, b, c;      /* 3.4445, -4.7750, 2.0315                                 */
    int           iterations;   /* 5; at most 99                                           */
    int           f32;          /* 0: the iterations run in bf16; 1: in f32                */
    mixp_muon_rate rate;        /* MIXP_MUON_RATE_ORIGINAL                                 */
    const double (*coefficients)[3];    /* a, b and c of each of the `iterations`, which
                                   mixp_optimizer_new copies; NULL: a, b and c in all      */
} mixp_muon_settings;

/* Describes an optimizer of any kind. Fill it with the defaults of the kind, then change fields. A
 * field that the kind does not have must stay 0. lr, betas, eps, weight_decay, momentum, dampening
 * and nesterov are the values of group 0. */
typedef struct mixp_optimizer_desc {
    mixp_optimizer_kind kind;
    double        lr;
    double        beta1, beta2; /* Adam, AdamW, Adamax, NAdam, RAdam, Lion. RMSprop has beta2:
                                   torch's alpha                                           */
    double        eps;          /* Muon: a norm below eps is replaced by eps. Adamax: added to
                                   |gradient|. Others: added to the root, after bias correction */
    double        weight_decay; /* AdamW, Lion, Muon, `decoupled`: lr * weight_decay * weight is
                                   subtracted. Others: added to the gradient               */
    double        momentum;     /* SGD, RMSprop, Muon                                      */
    double        dampening;    /* SGD                                                     */
    int           nesterov;     /* SGD (needs momentum and dampening 0), Muon              */
    double        max_norm;     /* clips by global norm inside the step; 0 = off           */
    int           cautious;     /* AdamW, Lion, Muon. 1: decays only weights that the update moves
                                   towards 0                                               */
    int           no_master;    /* 0: f16 and bf16 parameters get an f32 master weight; 1: they do
                                   not, and an update below half a unit in the last place of a
                                   weight (bf16: 1/512 of it, f16: 1/4096) rounds away      */
    int           zero_grad;    /* 1: each step clears the gradients, as mixp_zero_grad does */
    mixp_schedule schedule;     /* constant                                                */
    mixp_optimizer_states states;   /* all f32                                             */
    mixp_spike_rule spike;      /* off; skips steps whose loss or norm is a spike          */
    mixp_muon_settings muon;    /* Muon                                                    */
    int           maximize;     /* 1: steps increase the loss, as for a reward             */
    int           amsgrad;      /* Adam, AdamW. 1: divides by the largest v so far; keeps one
                                   more state, in f32                                      */
    int           centered;     /* RMSprop. 1: divides by the standard deviation; keeps the mean
                                   gradient as one more state, in f32; states.v must be f32 */
    int           decoupled;    /* NAdam, RAdam. 1: weight_decay is decoupled, as AdamW's   */
    double        lr_decay;     /* Adagrad: step t has the rate lr / (1 + (t - 1) lr_decay) */
    double        initial_sum;  /* Adagrad: first value of the sums of squares, at least 0 */
    double        momentum_decay;   /* NAdam: at least 0                                   */
} mixp_optimizer_desc;

/* The defaults of each kind. Fields that a comment does not name are 0.
 *
 * AdamW: lr 1e-3, betas 0.9 and 0.999, eps 1e-8, weight_decay 0.01. */
MIXPREC_API mixp_optimizer_desc mixp_adamw_defaults(void);
/* Adam: AdamW's, with weight_decay 0. */
MIXPREC_API mixp_optimizer_desc mixp_adam_defaults(void);
/* SGD: lr 1e-3. */
MIXPREC_API mixp_optimizer_desc mixp_sgd_defaults(void);
/* torch.optim.RMSprop: lr 1e-2, beta2 (alpha) 0.99, eps 1e-8. With `centered`, a variance that
 * rounding makes negative counts as 0; in PyTorch its root makes the weight NaN. */
MIXPREC_API mixp_optimizer_desc mixp_rmsprop_defaults(void);
/* torch.optim.Adagrad: lr 1e-2, eps 1e-10; eps must be above 0. The sum of squares is the state
 * v. */
MIXPREC_API mixp_optimizer_desc mixp_adagrad_defaults(void);
/* torch.optim.Adamax: Adam's, with lr 2e-3. The decaying maximum is the state v. */
MIXPREC_API mixp_optimizer_desc mixp_adamax_defaults(void);
/* torch.optim.NAdam: Adam's, with lr 2e-3 and momentum_decay 4e-3. The product of its momentums
 * is no state: each step computes it from the current beta1 and momentum_decay, and the parameter's
 * number of steps. */
MIXPREC_API mixp_optimizer_desc mixp_nadam_defaults(void);
/* torch.optim.RAdam: Adam's. */
MIXPREC_API mixp_optimizer_desc mixp_radam_defaults(void);
/* Lion, with its authors' defaults: lr 1e-4, betas 0.9 and 0.99. Use a third to a tenth of AdamW's
 * rate, and increase the weight decay by the same factor. */
MIXPREC_API mixp_optimizer_desc mixp_lion_defaults(void);
/* Muon, as torch.optim.Muon: momentum, made orthogonal by a Newton-Schulz iteration of products on
 * the device. lr 1e-3, momentum 0.95, nesterov 1, weight_decay 0.1, eps 1e-7.
 *
 * Muon is for the matrices inside a model: parameters with 2 axes (MIXP_ERR_SHAPE otherwise). Use
 * AdamW for embeddings, the head, norms and biases. Muon works with loss scaling. A skipped step is
 * skipped on the device, also in a recorded step.
 *
 * Cost of an m x n matrix, m <= n: `iterations` * (4 m m n + 2 m m m) operations per step, which is
 * little compared with a large batch, and much compared with a small one. Extra memory, for the
 * largest matrix only: 6 bytes (8 in f32) for each element, and 8 m m bytes (12 m m in f32). */
MIXPREC_API mixp_optimizer_desc mixp_muon_defaults(void);

/* Makes an optimizer without parameters. desc NULL: AdamW with its defaults. NULL on error: a
 * hyper-parameter is NaN, negative or out of range (betas in [0,1), eps >= 0), a field that the
 * kind does not have is not 0, or the schedule or spike rule has such a field. */
MIXPREC_API mixp_optimizer *mixp_optimizer_new(mixp_context *ctx,
                                               const mixp_optimizer_desc *desc);

/* Opens a group for the mixp_optimizer_add calls that follow. Group 0 has the description's values.
 * Returns the group's index, or -1 on error (more than MIXP_MAX_GROUPS groups, a value out of
 * range). */
MIXPREC_API int mixp_optimizer_add_group(mixp_optimizer *opt,
                                         const mixp_param_group *group);
/* mixp_optimizer_group reads a group, mixp_optimizer_set_group changes it: at any time, by hand
 * or by your own schedule. The struct is copied. MIXP_ERR_ARGUMENT: a pointer is NULL, there is
 * no such group, or a value is out of range; nothing changes. */
MIXPREC_API mixp_result mixp_optimizer_group(const mixp_optimizer *opt, int index,
                                                 mixp_param_group *out);
MIXPREC_API mixp_result mixp_optimizer_set_group(mixp_optimizer *opt, int index,
                                                 const mixp_param_group *group);

/* Sets the learning rate of every group; a schedule multiplies it, like the description's.
 * MIXP_ERR_ARGUMENT: lr is negative or not finite; no group changes. */
MIXPREC_API mixp_result mixp_optimizer_set_lr(mixp_optimizer *opt, double lr);

/* Adds a parameter (f32, f16 or bf16; or f64, with your own gradient) to the last group.
 *
 * grad NULL: uses the gradient that backward fills. A step in which the parameter got no gradient
 * does not change the parameter (like PyTorch's None; bias correction counts each parameter's own
 * steps). grad not NULL: your view with the same count, which you fill; every step uses it.
 *
 * Master weights follow the parameter when you write it or when another optimizer does: the new
 * value of a changed element becomes its master, and all other masters keep their further digits.
 * So a program may clip low weights after each step, or use other weights for a while. After a load
 * from a file and after mixp_ranks_from, masters have no further digits. Masters of 16 and 8 bits
 * lose all further digits of a parameter that is written (mixp_context_warning reports such writes
 * before each of four steps). A parameter without an optimizer keeps its gradient: a step after a
 * second walk back into that gradient is MIXP_ERR_ORDER, unless you wrote to the gradient in
 * between.
 *
 * f64: a view of f64 trains like f32, bit-identical to an f32 program if all values are f32. A step
 * reads weight and gradient rounded to f32, and writes the new f32 value. So the weight is its own
 * master, and states are f32. A gradient beyond f32 counts as Inf.
 *
 * MIXP_ERR_ARGUMENT: the parameter, or another view of its memory or of a part of it, was already
 * added; or grad is given while `scatter` of mixp_ranks_desc is set. MIXP_ERR_DTYPE: an f16
 * parameter, if masters have 16 or 8 bits; or f64 without your own gradient, or with ranks.
 * MIXP_ERR_SHAPE: not a matrix, for Muon. */
MIXPREC_API mixp_result mixp_optimizer_add(mixp_optimizer *opt, mixp_tensor *param,
                                           mixp_tensor *grad);
/* mixp_optimizer_add for views whose rows have a pitch: the last dimension of param and grad is the
 * pitch, and its first `width` elements are the row. The rest is padding: not read as a gradient,
 * not in norms, not written. mixp_optimizer_underflow leaves these rows and f64 gradients out.
 * Errors as in mixp_optimizer_add; also MIXP_ERR_SHAPE: width is below 1 or above the pitch.
 * MIXP_ERR_ARGUMENT: no grad of the same shape, Muon, masters below f32, ranks, or memory shared
 * with another view. mixp_optimizer_set_ema refuses such rows. */
MIXPREC_API mixp_result mixp_optimizer_add_rows(mixp_optimizer *opt, mixp_tensor *param,
                                                mixp_tensor *grad, int64_t width);

/* Adds to the last group each parameter of mixp_param whose name fits the pattern (* matches any
 * characters, ? matches one), that requires a gradient and has no optimizer. Oldest first; like
 * mixp_optimizer_add with grad NULL. A second call therefore adds the rest:
 *
 *     mixp_param_group no_decay;
 *     mixp_optimizer_add_all(opt, "*.weight");
 *     mixp_optimizer_group(opt, 0, &no_decay);    // a copy of the first group's settings
 *     no_decay.weight_decay = 0.0;
 *     mixp_optimizer_add_group(opt, &no_decay);
 *     mixp_optimizer_add_all(opt, "*");
 *
 * MIXP_ERR_ARGUMENT: no parameter fits. Stops at the first error of mixp_optimizer_add; parameters
 * already added stay. */
MIXPREC_API mixp_result mixp_optimizer_add_all(mixp_optimizer *opt, const char *pattern);

/* For backward passes that reuse one gradient buffer. Keeps a copy of the gradient that the view of
 * a parameter, given to mixp_optimizer_add, holds now; the program may overwrite the buffer at
 * once, and views of several parameters may share it (unless desc->zero_grad is set). The next step
 * uses the copies: it looks at all of them, for one decision and one norm, and forgets them. A
 * parameter that was not fed since the last step gets no gradient. A second call before the step
 * adds to the copy (micro-batches).
 * The order of the calls does not change the result. Needs memory for one gradient (f32 for f64),
 * at the first call; without memory for all gradients: docs/parts.md.
 *
 * MIXP_ERR_ARGUMENT: opt does not have param, or has it without a view; or there are ranks.
 * MIXP_ERR_DTYPE: a second gradient of f64. MIXP_ERR_ORDER: between unscale or step, and update. */
MIXPREC_API mixp_result mixp_optimizer_feed(mixp_optimizer *opt, const mixp_tensor *param);

/* Forgets the gradients of all parameters; sets your views to 0. With zero_grad in the description,
 * each step does so itself, and clears a view in the pass that reads it. Use zero_grad in programs
 * that accumulate into their own buffers. A skipped step also clears the gradients, because an Inf
 * would stay in the next sum; it changes nothing else. No other parameter of any optimizer may
 * share a cleared view. With ranks, call mixp_zero_grad after a mixp_backward that failed, also if
 * the description has zero_grad: the ranks may have summed a part of the gradients already.
 * MIXP_ERR_ARGUMENT: opt is NULL. MIXP_ERR_DEVICE: a view cannot be cleared. */
MIXPREC_API mixp_result mixp_zero_grad(mixp_optimizer *opt);

/* Sets the true loss of the coming step, which MIXP_SPIKE_LOSS checks: one f32 element; for several
 * micro-batches or ranks (mixp_ranks_sum), their mean. The step reads the loss on the device
 * without waiting. Call it for each step.
 *
 * MIXP_ERR_ARGUMENT: loss has more than one element, or is from another context or an earlier step;
 * or opt does not check losses. MIXP_ERR_DTYPE: loss is not f32. */
MIXPREC_API mixp_result mixp_optimizer_set_loss(mixp_optimizer *opt,
                                                const mixp_tensor *loss);

/* Keeps an average of the weights of opt: an exponential moving average in f32. After each applied
 * step, average = decay * average + (1 - decay) * weight, rounded as in torch.lerp (as
 * torch.optim.swa_utils.get_ema_multi_avg_fn); the weight is the f32 master if there is one. A
 * skipped step does not change the averages. The averages start as the weights that the first step
 * finds, also if you write or load the weights after this call. Checkpoints contain the averages
 * ("optimizer.0.ema.NAME"). Call it before mixp_checkpoint_load: a load ignores averages that the
 * program does not keep. A second call changes decay, and starts averages of parameters added
 * since. Costs 4 bytes for each element, and one pass over weights and averages in each step. Same
 * bits on every device. Recorded steps (mixp_graph) average as well.
 *
 * With sharded states, each rank averages the weights that it updates, bit-identical to one rank,
 * but has memory for all averages. All ranks make this call.
 *
 * MIXP_ERR_ARGUMENT: decay is not in [0, 1); opt has no parameter, or a frozen one. MIXP_ERR_ORDER:
 * during a capture, or while the averages are swapped in. MIXP_ERR_MEMORY. On an error nothing
 * changes. */
MIXPREC_API mixp_result mixp_optimizer_set_ema(mixp_optimizer *opt, double decay);

/* Puts the averages into the weights, rounded to the weights' dtypes, for evaluation or for
 * mixp_checkpoint_save_weights. A second call restores the weights of the training, bit for bit.
 * Writes to the weights between the two calls are lost. The first call allocates a copy of the
 * weights. With sharded states, the ranks exchange their averages: all ranks make this call.
 *
 * MIXP_ERR_ORDER: mixp_optimizer_set_ema was not called, or a parameter was added after the call; a
 * step or a capture is in progress. MIXP_ERR_ARGUMENT: another optimizer has one of the parameters.
 * While the averages are in, these calls return MIXP_ERR_ORDER: steps, unscale and clip of opt,
 * reads of masters, replays of recorded steps, checkpoints that include opt, and
 * mixp_optimizer_free. */
MIXPREC_API mixp_result mixp_optimizer_swap_ema(mixp_optimizer *opt);

/* Reads an optimizer state of one parameter as f32, whatever its stored form. count: the
 * parameter's number of elements. MASTER: returns the weight itself if there is no master, or if
 * the weight was changed since the last step. Waits for the device.
 *
 * MIXP_ERR_ARGUMENT: opt does not have the parameter, or the optimizer (with ranks, this rank)
 * keeps no such state. MIXP_ERR_SHAPE: another count. */
typedef enum mixp_state_kind {
    MIXP_STATE_M,               /* first moment, or momentum                               */
    MIXP_STATE_V,               /* second moment                                           */
    MIXP_STATE_MASTER,          /* master weight                                           */
    MIXP_STATE_EMA,             /* average of the weight: see mixp_optimizer_set_ema       */
    MIXP_STATE_THIRD            /* amsgrad: the largest v so far; centered: the mean gradient */
} mixp_state_kind;
MIXPREC_API mixp_result mixp_optimizer_read(const mixp_optimizer *opt,
                                            const mixp_tensor *param, mixp_state_kind what,
                                            float *host, int64_t count);

/* The counterpart of mixp_optimizer_read, for programs with their own checkpoints: writes a state
 * from f32. States that mixp_optimizer_read returned, smaller ones too, get the same values, so
 * training continues with the same bits if weights, masters, counts and the context's seed are
 * restored as well. MASTER also writes the weight, rounded; without a master, the weight. Call it
 * after mixp_optimizer_add, EMA after mixp_optimizer_set_ema. Waits for the device.
 *
 * Errors as in mixp_optimizer_read; also MIXP_ERR_ARGUMENT: a value is not finite, a square is
 * negative, or states are sharded. MIXP_ERR_ORDER: in a step, a capture or a swap. On an error
 * nothing changes, except if the device fails. */
MIXPREC_API mixp_result mixp_optimizer_write(mixp_optimizer *opt, const mixp_tensor *param,
                                             mixp_state_kind what, const float *host,
                                             int64_t count);
/* mixp_optimizer_param_applied: the number of applied steps that changed a parameter, by which its
 * bias is corrected; 0 if opt does not have it, or this rank not all of it.
 * mixp_optimizer_set_applied sets that number, at most the optimizer's; param NULL: that of the
 * optimizer and of all its parameters, with no step skipped. Errors as in mixp_optimizer_write. */
MIXPREC_API int64_t     mixp_optimizer_param_applied(const mixp_optimizer *opt,
                                                     const mixp_tensor *param);
MIXPREC_API mixp_result mixp_optimizer_set_applied(mixp_optimizer *opt, const mixp_tensor *param,
                                                   int64_t steps);

/* mixp_optimizer_applied: the number of applied steps. mixp_optimizer_lr: the learning rate of a
 * group's next step. Both wait for the device, and are
 * 0 if opt is NULL or there is no such group. With MIXP_SCHEDULE_FUNCTION, mixp_optimizer_lr calls
 * the function. */
MIXPREC_API int64_t mixp_optimizer_applied(const mixp_optimizer *opt);
MIXPREC_API double  mixp_optimizer_lr(const mixp_optimizer *opt, int group);

