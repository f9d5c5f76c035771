#pragma once
#include "tensors.h"
/* ==== 9. SCALER ========================================================= >>scaler ====
 *
 * Dynamic loss scaling as in torch.amp.GradScaler. The scaler's numbers are a small block of device
 * memory that one pure function advances. Under every rule the scale and its reciprocal stay finite
 * normal numbers: the scale does not grow past 2^126, and backoff stops at 2^-126. Gradients that
 * become non-finite only when they are unscaled count as found_inf.
 *
 * The order is: scale, backward, [unscale, [clip]], step, update. Backward writes a scale tag to
 * each gradient: the scaler, and the scale that the gradient was multiplied by. Unscale, clip and
 * step read the tag. So any number of scalers and optimizers may share a context, in any
 * combination. A gradient is unscaled by its own scale, even if the scaler has changed its scale
 * since then, at most MIXP_PAST_SCALES times.
 *
 * A gradient that cannot be unscaled is MIXP_ERR_ORDER: two scales were added into it, two scalers
 * scaled it, or a step has used it before the last update. A gradient in your own view has no
 * tag: it counts as scaled by the current scale. If you have neither read nor set that scale, the
 * view cannot have been scaled by it: MIXP_ERR_ORDER.
 */
typedef enum mixp_scaler_preset {
    MIXP_RULE_TORCH,            /* torch.amp.GradScaler, bit for bit; a guard finds a scale with
                                   fewer skips, see mixp_guard_start                       */
    MIXP_RULE_STATIC,           /* the scale never changes                                 */
    MIXP_RULE_APEX,             /* apex.amp: ceiling 2^24                                  */
    MIXP_RULE_APEX_HYSTERESIS,  /* apex update_scale_hysteresis: a clean step refills the
                                   hysteresis                                              */
    MIXP_RULE_DEEPSPEED,        /* 2^32, grows every 1000 steps, floor 1. Grows one step later at
                                   first and after an overflow (since DeepSpeed 0.17.1). One factor,
                                   see below */
    MIXP_RULE_MEGATRON,         /* 2^32, grows every 1000 steps, floor 1, hysteresis 2     */
    MIXP_RULE_TENSORFLOW,       /* 2^15, floor 1; one factor                               */
    MIXP_RULE_KERAS,            /* 2^15, no floor                                          */
    MIXP_RULE_PADDLE,           /* hysteresis counts consecutive overflows; no floor, as in dynamic
                                   graphs. With min_scale 1: the rule of static graphs     */
    MIXP_RULE_JMP,              /* 2^15, floor 1; one factor                               */
    MIXP_RULE_MODULUS,          /* grows every 100 steps while the scale is at most 2^6; ceiling
                                   2^30 */
    MIXP_RULE_COLOSSALAI,       /* Megatron's rule from 2^16, between 1 and 2^32           */
    MIXP_RULE_PREDICTIVE,       /* set from the largest gradients, every 16 steps: see below */
    MIXP_RULE_COUNT
} mixp_scaler_preset;

/* MIXP_RULE_PREDICTIVE computes the scale instead of searching for it. The rule reads the largest
 * |gradient| of the parameters in every step. In a step that the guard samples, it also reads all
 * gradients of the backward walk. It sets the scale to the power of two that puts the largest
 * gradient `margin` binades below 65504, f16's largest number. It does so every growth_interval
 * clean steps, and at once when a gradient comes nearer to 65504 than that. The scale moves by at
 * most 4 binades per step. An overflow backs off as in PyTorch's rule, and counts as a gradient of
 * 65504 / scale. The remembered largest gradient halves in 16 intervals.
 *
 * The rule guarantees that no step is skipped for a gradient up to 2^margin times the largest
 * remembered one, which may be 2^12 times the largest of the last interval. A larger gradient
 * without warning costs a skip, as under any rule. The size of an overflow is unknown, so the next
 * step may be skipped as well. docs/guard.md has measurements. */
/* Zero in any field = the rule's own value; the defaults below are MIXP_RULE_TORCH's. In C++ start
 * with `= {}`. In a rule with one factor, backoff divides by growth_factor unless you set
 * backoff_factor. Some systems keep factors in f32 (Megatron, ColossalAI, Paddle, Modulus,
 * TensorFlow, jmp). Their rules round the factors to f32 here, so products agree for factors that
 * are not powers of two. */
typedef struct mixp_scaler_desc {
    mixp_scaler_preset rule;
    float     init_scale;       /* 0 = 65536                                               */
    double    growth_factor;    /* 0 = 2                                                   */
    double    backoff_factor;   /* 0 = 0.5                                                 */
    int       growth_interval;  /* 0 = 2000 clean steps                                    */
    int       hysteresis;       /* 0 = 1: the first overflow backs off                     */
    float     min_scale, max_scale; /* 0 = the rule's own floor and ceiling                */
    int       max_floor_skips;  /* 0 = 20 skips in a row at min_scale: MIXP_ERR_DIVERGED; negative =
                                   never. From 65536, 142 skips lead to 2^-126 and 16 skips to 1 */
    int       disabled;         /* 1: the scale is 1, every step is applied                */
    int       margin;           /* MIXP_RULE_PREDICTIVE: 0 = 6 binades; at most 30         */
} mixp_scaler_desc;

/* Computes the rule of a description; NULL = zeroed. Pure. MIXP_ERR_ARGUMENT: a field is out of
 * range. */
MIXPREC_API mixp_result mixp_scaler_rule_resolve(const mixp_scaler_desc *desc,
                                                 mixp_scaler_rule *rule);

typedef struct mixp_scaler    mixp_scaler;
typedef struct mixp_optimizer mixp_optimizer;

/* Makes a scaler. desc NULL = all defaults. NULL on error: growth_factor <= 1, backoff_factor
 * outside (0,1), a negative interval, a scale whose value or reciprocal is not a normal number,
 * NaN, an init_scale outside [min_scale, max_scale], or a step is being captured. */
MIXPREC_API mixp_scaler *mixp_scaler_new(mixp_context *ctx, const mixp_scaler_desc *desc);

/* Returns loss * scale, in f32 if loss is low; recorded for backward. Returns loss itself if the
 * scaler is disabled. The gradients stay scaled until mixp_scaler_unscale. MIXP_ERR_ORDER later:
 * clipping scaled gradients or stepping them without the scaler; stepping gradients of an unscaled
 * loss with the scaler (MIXP_RULE_STATIC may do so, and uses them unchanged). */
MIXPREC_API mixp_tensor *mixp_scaler_scale(mixp_scaler *scaler, mixp_tensor *loss);
/* Returns mixp_scaler_scale(scaler, mixp_scale(ctx, mixp_cross_entropy(ctx, logits, targets,
 * ignore), share)), bit for bit. Sets *loss to the value before the scaler's scale, for you to read
 * (pass NULL if you do not need it). share: 1, or 1/n for n micro-batches in which equally many
 * targets count. Otherwise share is this micro-batch's part of all targets that count; with ranks
 * that have unequal numbers of targets, also times the number of ranks.
 *
 * Loss and gradient are computed in one pass over the logits, and the gradient overwrites the
 * logits, if these conditions hold: the logits are disposable (mixp_tensor_set_disposable), a
 * product made them, no other operator reads them, the device has a kernel for it, and no guard
 * samples the step. The result is then for mixp_backward only, and an operator that reads the
 * logits later is MIXP_ERR_ORDER. */
MIXPREC_API mixp_tensor *mixp_scaler_cross_entropy(mixp_scaler *scaler, mixp_tensor *logits,
                                                   mixp_tensor *targets, int32_t ignore,
                                                   float share, mixp_tensor **loss);
/* Sets the scale to a new value instead of updating it. Needs no step before, keeps the growth
 * tracker, and forgets what steps have found since the last update. Gradients made earlier are
 * still unscaled by their own scale. Waits for the device. Does nothing if the scaler is disabled.
 * MIXP_ERR_ARGUMENT: new_scale is outside [2^-126, 2^126]. */
MIXPREC_API mixp_result mixp_scaler_update_to(mixp_scaler *scaler, float new_scale);
/* Returns the scale; 1 if disabled. Waits for the device. */
MIXPREC_API float mixp_scaler_loss_scale(const mixp_scaler *scaler);
/* Returns the address of the scale: one f32 in device memory, valid as long as the scaler. Your
 * kernels can read the scale there on the context's stream without waiting, also in a graph. NULL
 * if scaler is NULL. */
MIXPREC_API const float *mixp_scaler_loss_scale_data(const mixp_scaler *scaler);

/* Changes a running scaler, like PyTorch's set_growth_factor and its relatives. Each nonzero field
 * of desc replaces the scaler's; the scale itself stays (mixp_scaler_update_to sets it).
 * MIXP_ERR_ARGUMENT: as in mixp_scaler_new, or init_scale or disabled is set. */
MIXPREC_API mixp_result mixp_scaler_change(mixp_scaler *scaler,
                                           const mixp_scaler_desc *desc);

/* mixp_scaler_save and mixp_scaler_load save and load the scaler's state, like PyTorch's
 * state_dict and load_state_dict. Both wait for the device. A disabled scaler saves zeros and
 * ignores a load. MIXP_ERR_ARGUMENT: a saved state with scale 0 (from a disabled scaler), or a
 * field out of range; the scaler is then unchanged. PyTorch's state has only the first six
 * fields. If the other fields are 0, a load starts the counts and the prediction from 0. */
typedef struct mixp_scaler_saved {
    double  growth_factor, backoff_factor;
    float   scale;
    int32_t growth_interval, growth_tracker, hysteresis_left;
    int32_t floor_skips;        /* skips in a row while the scale could not go lower */
    int32_t forgiven, forgiven_at;  /* under a guard: see mixp_scaler_state */
    float   ahead;              /* under a guard: see mixp_scaler_state */
    float   largest, peak;      /* of MIXP_RULE_PREDICTIVE: see mixp_scaler_state. Otherwise 0 */
} mixp_scaler_saved;
MIXPREC_API mixp_result mixp_scaler_save(const mixp_scaler *scaler,
                                         mixp_scaler_saved *out);
MIXPREC_API mixp_result mixp_scaler_load(mixp_scaler *scaler,
                                         const mixp_scaler_saved *in);

