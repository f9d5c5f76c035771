#pragma once
#include "formats.h"
/* ==== 3. ARITHMETIC ================================================= >>arithmetic ====
 *
 * The arithmetic that the host and every device share: how a loss scale moves, whether a step is
 * applied, the scalars of an update, one element of each optimizer. Pure functions over plain
 * structs, with a fixed order of roundings. Users need only the learning rate's schedule and the
 * hyper-parameters of a group; the rest is for authors of devices.
 */
#define MIXP_MAX_GROUPS 16

/* The learning rate as a function of the number of applied steps; skipped steps do not count. All
 * kinds but ONE_CYCLE warm up as nanoGPT does: lr * (step + 1) / (warmup + 1) while step < warmup.
 * The kinds define the rest; t: steps since the warm-up. The rate never falls below min_factor *
 * lr.
 *
 * PyTorch's chains: SequentialLR([LinearLR(1/(W+1), 1, W), X], [W]) is the kind of X with warmup W.
 * LinearLR(a, 1, W) is CONSTANT with warmup W and start_factor a; LinearLR(a, e, W) with e < a is
 * LINEAR with total W, lr a * lr and min_factor e/a. ConstantLR(f, W) is MULTI_STEP with lr f * lr,
 * gamma 1/f and the milestone W. PolynomialLR(T, p) is POLYNOMIAL with total T and power p.
 * LambdaLR is FUNCTION. Write every other chain as a FUNCTION. */
typedef enum mixp_schedule_kind {
    MIXP_SCHEDULE_CONSTANT,
    MIXP_SCHEDULE_LINEAR,       /* falls linearly to min_factor * lr at step `total`       */
    MIXP_SCHEDULE_COSINE,       /* falls along half a cosine, as CosineAnnealingLR         */
    MIXP_SCHEDULE_STEP,         /* lr * gamma^floor(t / every), as StepLR                  */
    MIXP_SCHEDULE_EXPONENTIAL,  /* lr * gamma^t, as ExponentialLR                          */
    MIXP_SCHEDULE_ONE_CYCLE,    /* as OneCycleLR with max_lr = lr: rises along half a cosine from
                                   start_factor * lr to lr in step warmup - 1, and falls along
                                   another to min_factor * lr in step total - 1            */
    MIXP_SCHEDULE_WSD,          /* warm-up, stable, decay: stays at lr; falls linearly to
                                   min_factor * lr over the last `decay` steps of `total`  */
    MIXP_SCHEDULE_POLYNOMIAL,   /* as LINEAR, with the remaining share of steps to the power
                                   `power`                                                 */
    MIXP_SCHEDULE_MULTI_STEP,   /* lr * gamma^(number of milestones <= t), as MultiStepLR  */
    MIXP_SCHEDULE_WAVE,         /* as COSINE; after `total` it rises to lr, and falls again, as
                                   CosineAnnealingLR after T_max                           */
    MIXP_SCHEDULE_RESTARTS,     /* as CosineAnnealingWarmRestarts: falls along half a cosine to
                                   min_factor * lr in `every` steps, and restarts at lr; each
                                   cycle has `growth` times as many steps as the last      */
    MIXP_SCHEDULE_CYCLIC,       /* as CyclicLR with max_lr = lr: rises in `every` steps from
                                   min_factor * lr to lr, and falls in `decay` steps. The height of
                                   each cycle is gamma times the last: 1 is 'triangular', 0.5
                                   'triangular2'                                           */
    MIXP_SCHEDULE_CYCLIC_EXP,   /* as CYCLIC; the height is multiplied by gamma^t: 'exp_range' */
    MIXP_SCHEDULE_FUNCTION      /* lr * factor(user, applied steps), without a warm-up      */
} mixp_schedule_kind;
#define MIXP_MAX_MILESTONES 8
typedef struct mixp_schedule {
    mixp_schedule_kind kind;
    int64_t            warmup;      /* steps; 0 = none. ONE_CYCLE: pct_start * total       */
    int64_t            total;       /* steps, warm-up included: LINEAR, COSINE, ONE_CYCLE, WSD,
                                       POLYNOMIAL, WAVE                                    */
    double             min_factor;  /* share of lr, 0..1. PyTorch's default in OneCycleLR: 4e-6 */
    double             gamma;       /* STEP, EXPONENTIAL, CYCLIC, CYCLIC_EXP: above 0, at most 1.
                                       MULTI_STEP: above 0; its power below 1e30           */
    int64_t            every;       /* steps, at least 1. STEP: between two changes. RESTARTS: of
                                       the first cycle, T_0. CYCLIC, CYCLIC_EXP: of a rise */
    int64_t            decay;       /* WSD: steps, from 1 to total - warmup. CYCLIC, CYCLIC_EXP:
                                       steps of a fall; 0 = every                          */
    double             start_factor;    /* share of lr, 0..1, in the first step of a warm-up; the
                                       rate then rises linearly to lr in step `warmup`. 0 =
                                       nanoGPT's warm-up. ONE_CYCLE: 0 = 1/25              */
    double             power;       /* POLYNOMIAL: at least 0                              */
    int64_t            growth;      /* RESTARTS: T_mult, at least 1; 0 = 1                 */
    int64_t            milestones[MIXP_MAX_MILESTONES]; /* MULTI_STEP: steps since the warm-up, in
                                       rising order; the first 0 ends the list             */
    double             pct_start;   /* ONE_CYCLE: share of `total` that rises, 0..1; replaces
                                       `warmup`, which holds only whole steps. 0 = warmup / total */
    int                linear;      /* ONE_CYCLE: 1: straight lines, 0: cosines            */
    int                three_phase; /* ONE_CYCLE: 1: falls to start_factor * lr in as many steps as
                                       it rose, and then to min_factor * lr                */
    /* FUNCTION: the factor of lr after `applied` steps, finite and at least 0. The step calls it in
     * the calling thread, on a GPU perhaps several times and also for later steps. It must return
     * the same factor for the same step. Captured steps refuse it. */
    double           (*factor)(void *user, int64_t applied);
    void              *user;
} mixp_schedule;

/* How a moment is stored; each comment begins with the bytes per element. The arithmetic is always
 * f32. Storing rounds stochastically: up with a probability equal to the part cut off. Rounding to
 * nearest would freeze a moment that changes by less than half a step of its format. */
typedef enum mixp_moment_kind {
    MIXP_MOMENT_F32,            /* 4                                                       */
    MIXP_MOMENT_BF16,           /* 2                                                       */
    MIXP_MOMENT_8BIT            /* 1 + 1/128: blocks of MIXP_STATE_BLOCK elements with one
                                   power-of-two scale each. The first moment is f8_e4m3. The
                                   second is stored as its root, unsigned, with 4 bits of
                                   exponent and 4 of mantissa; only 0 is stored as 0       */
} mixp_moment_kind;
#define MIXP_STATE_BLOCK 128

/* A parameter of 300 elements with 8-bit moments, each moment in two arrays:
 *
 *     codes    |<-- 128 bytes -->|<-- 128 bytes -->|<-- 44 bytes -->|
 *     scales   |       s0        |       s1        |       s2       |     a byte each: 2^(s - 127)
 *
 *     m, a code    sign 1 | exponent 4 | mantissa 3      f8_e4m3 times the scale
 *     v, a code             exponent 4 | mantissa 4      its root: octaves down from the scale
 */

/* How the master weight of a bf16 parameter is stored; each comment begins with the bytes per
 * element in addition to the bf16 weight. */
typedef enum mixp_master_kind {
    MIXP_MASTER_F32,            /* 4: a separate f32 copy                                  */
    MIXP_MASTER_16BIT,          /* 2: the lower 16 bits of the f32; weight and master
                                   together hold the f32 exactly                           */
    MIXP_MASTER_8BIT            /* 1: the upper 8 of those bits, stochastically rounded    */
} mixp_master_kind;

/* The hyper-parameters of one group. An optimizer ignores those that its kind lacks. RMSprop's
 * alpha is beta2. An optimizer stores 0 in ignored fields that may hold any value (SGD's betas and
 * eps, dampening of all but SGD, nesterov of all but SGD and Muon, lr_decay of all but Adagrad,
 * momentum_decay of all but NAdam), and 1 for a nesterov that is not 0. */
typedef struct mixp_param_group {
    double lr, beta1, beta2, eps, weight_decay, momentum, dampening;
    int    nesterov;
    int    f32_states;          /* 1: parameters added to the group keep f32 moments and
                                   masters, whatever the description says: for embeddings,
                                   for example                                             */
    double lr_decay, momentum_decay;    /* Adagrad; NAdam                                  */
} mixp_param_group;

/* --- for authors of devices: the loss scale ----------------------------------------------- */

/* When hysteresis_left is refilled. */
enum { MIXP_REFILL_CLEAN = 1, MIXP_REFILL_GROWTH = 2, MIXP_REFILL_BACKOFF = 4 };

/* A scaler's rule with every default resolved: all that a device needs to advance the state. */
typedef struct mixp_scaler_rule {
    double  growth_factor, backoff_factor;         /* double: products round once, as in PyTorch */
    float   init_scale, min_scale, max_scale;
    int32_t growth_interval, hysteresis, refill;   /* refill: MIXP_REFILL_... flags        */
    int32_t recovery_interval;                     /* growth interval while scale <=
                                                      recovery_scale                     */
    float   recovery_scale;
    int32_t fixed;                                 /* 1: static or disabled                */
    int32_t delay;      /* clean steps not counted, at the start and after an overflow     */
    int32_t divides;    /* 1: backoff divides by growth_factor; backoff_factor is unused   */
    int32_t f32_factors;/* 1: factors are rounded to f32                                   */
    int32_t predicts;   /* 1: the scale is set from the largest gradients, see
                           mixpi_scaler_predict                                            */
    int32_t margin, max_move;       /* in binades                                          */
    float   low_largest;            /* largest number of the low dtype                     */
} mixp_scaler_rule;

/* How many past scales a scaler remembers. Gradients may wait for their step while the scale
 * changes. */
#define MIXP_PAST_SCALES 16

/* The state of a scaler, in device memory. Checkpoints store every field except found_inf and past.
 * They store largest and peak only if the rule predicts; forgiven, forgiven_at and ahead only under
 * a guard. */
typedef struct mixp_scaler_state {
    float   scale;
    int32_t growth_tracker;     /* clean steps since the last change                       */
    int32_t hysteresis_left;    /* each overflow lowers it; at 0 the scale backs off       */
    int32_t found_inf;          /* 1: a gradient was Inf or NaN in a step since the last
                                   update                                                  */
    int32_t floor_skips;        /* skips in a row while the scale could not go lower       */
    int64_t updates, skips;     /* totals                                                  */
    float   past[MIXP_PAST_SCALES]; /* the scales before this one, latest first            */
    int32_t loss_bad;           /* 1: a loss since the last update was Inf or NaN */
    int32_t skipped;            /* 1: the last update followed a skip */
    float   largest;            /* largest unscaled |gradient| since the last prediction   */
    float   peak;               /* decaying maximum of `largest`; 0 = no gradient seen yet */
    int32_t forgiven;           /* skips in a row that left the scale unchanged            */
    int32_t forgiven_at;        /* how many sites had fallen back at the last update       */
    float   ahead;              /* under a guard: the scale after the last overflow by the rule
                                   without a guard; 0 = a clean step has set the scale     */
    int32_t buffer_bad;         /* 1: since the last update, a step was skipped for a buffer:
                                   see mixp_step_state.bad_buffer                          */
} mixp_scaler_state;

/* Above this scale the reciprocal is subnormal, and some devices flush subnormals to 0. */
#define MIXPI_LARGEST_SCALE 8.50705917e37f      /* 2^126 */

/* Records the unscaled magnitude of a gradient, for rules that predict. */
MIXPREC_HD void mixpi_scaler_note_unscaled(mixp_scaler_state *s, float largest) {
    int is_finite = (mixp_bits_of_f32(largest) & 0x7F800000u) != 0x7F800000u;
    if (is_finite && largest > s->largest) s->largest = largest;
}

/* Records the magnitude of a gradient that was multiplied by the current scale. */
MIXPREC_HD void mixpi_scaler_note_scaled(mixp_scaler_state *s, float largest)
{ mixpi_scaler_note_unscaled(s, (float)((double)largest / (double)s->scale)); }

/* One backoff from a scale, never below the floor. */
MIXPREC_HD float mixpi_scaler_lower(float scale, const mixp_scaler_rule *r) {
    const float lower = r->divides ? (float)((double)scale / r->growth_factor)
                                   : (float)((double)scale * r->backoff_factor);
    return lower < r->min_scale ? r->min_scale : lower;
}

/* After an overflow: spend hysteresis, then back off. */
MIXPREC_HD void mixpi_scaler_overflow(mixp_scaler_state *s, const mixp_scaler_rule *r) {
    s->skips++;
    s->growth_tracker = 0;
    if (r->predicts) mixpi_scaler_note_scaled(s, r->low_largest);    /* a lower bound of it */
    if (!r->fixed && s->scale > r->min_scale) s->floor_skips = 0;
    else if (s->floor_skips < INT32_MAX) s->floor_skips++;
    if (r->fixed) return;
    if (s->hysteresis_left > r->hysteresis) s->hysteresis_left = r->hysteresis;
    if (s->hysteresis_left > 0) s->hysteresis_left--;
    if (s->hysteresis_left > 0) return;
    s->scale = mixpi_scaler_lower(s->scale, r);
    if (r->refill & MIXP_REFILL_BACKOFF) s->hysteresis_left = r->hysteresis;
}

/* The largest power of two <= x, for a positive normal x: keeps only the exponent's bits. */
MIXPREC_HD double mixpi_power_of_2_below(double x)
{ return mixp_f64_of_bits(mixp_bits_of_f64(x) & 0x7FF0000000000000u); }

/* The target: the largest gradient times the scale must not exceed this value. */
MIXPREC_HD double mixpi_scaler_aim(const mixp_scaler_rule *r)
{ return MIXPI_LIBM(ldexp)((double)r->low_largest, -r->margin); }

/* Sets the scale to a power of two from the peak. Returns 1 if a limit kept the scale from its
 * target. Each call lowers the peak by a sixteenth of a binade, so the scale leaves room for
 * gradients that are large only occasionally. The peak is clamped to 2^12 times the largest
 * gradient since the last prediction. */
MIXPREC_HD int mixpi_scaler_predict(mixp_scaler_state *s, const mixp_scaler_rule *r) {
    double now = (double)s->scale, to, most;
    s->peak *= 0.957603281f;  /* 2^(-1/16) */
    if (s->largest > 0.0f && s->peak > s->largest * 4096.0f)
        s->peak = s->largest * 4096.0f;
    if (s->largest > s->peak) s->peak = s->largest;
    s->largest = 0.0f;
    if (!(s->peak > 0.0f)) return 0;
    most = MIXPI_LIBM(ldexp)(now, r->max_move);
    to = mixpi_power_of_2_below(mixpi_scaler_aim(r) / (double)s->peak);
    if (to < most) most = to;
    if (most < MIXPI_LIBM(ldexp)(now, -r->max_move)) most = MIXPI_LIBM(ldexp)(now, -r->max_move);
    if (most > (double)r->max_scale) most = (double)r->max_scale;
    if (most < (double)r->min_scale) most = (double)r->min_scale;
    if (most > (double)MIXPI_LARGEST_SCALE) most = (double)MIXPI_LARGEST_SCALE;
    s->scale = (float)most;
    return most < to || most > to;
}

/* After a clean step: predicts every growth_interval steps. Predicts at once when no gradient has
 * been seen yet, and when a gradient came closer to the largest number than the margin. */
MIXPREC_HD void mixpi_scaler_foresee(mixp_scaler_state *s, const mixp_scaler_rule *r) {
    int is_near = (double)s->largest * (double)s->scale > mixpi_scaler_aim(r);
    int is_due = s->growth_tracker >= r->growth_interval - 1;
    if (!is_near && !is_due && s->peak > 0.0f) s->growth_tracker++;
    else if (mixpi_scaler_predict(s, r)) s->growth_tracker = r->growth_interval - 1;
    else s->growth_tracker = 0;
}

/* After a clean step. The comparison is >=, not PyTorch's ==, so that growth continues when the
 * interval is lowered below the tracker. */
MIXPREC_HD void mixpi_scaler_clean(mixp_scaler_state *s, const mixp_scaler_rule *r) {
    int32_t interval =
        s->scale <= r->recovery_scale ? r->recovery_interval : r->growth_interval;
    double  higher = (double)s->scale * r->growth_factor;
    s->floor_skips = 0;
    if (r->fixed) return;
    if (r->refill & MIXP_REFILL_CLEAN) s->hysteresis_left = r->hysteresis;
    if (r->predicts) {
        mixpi_scaler_foresee(s, r);
        return;
    }

    /* Have enough steps been clean? */
    if (s->growth_tracker < interval - 1 + r->delay) {
        s->growth_tracker++;
        return;
    }

    /* The scale grows. */
    s->growth_tracker = r->delay;
    if (r->refill & MIXP_REFILL_GROWTH) s->hysteresis_left = r->hysteresis;
    if (higher > (double)r->max_scale) higher = (double)r->max_scale;
    if ((float)higher <= MIXPI_LARGEST_SCALE) s->scale = (float)higher;
}

/* Stores the current scale among the past scales. */
MIXPREC_HD void mixpi_scaler_remember(mixp_scaler_state *s) {
    int i;
    for (i = MIXP_PAST_SCALES - 1; i > 0; i--) s->past[i] = s->past[i - 1];
    s->past[0] = s->scale;
}

/* The scale of `age` updates ago; 0 = the current scale. */
MIXPREC_HD float mixpi_scaler_scale_at(const mixp_scaler_state *s, int age)
{ return age > 0 ? s->past[age - 1] : s->scale; }

/* Advances the state by one update. This is all of a scaler's arithmetic, on every device. */
MIXPREC_HD void mixpi_scaler_advance(mixp_scaler_state *s, const mixp_scaler_rule *r,
                                    int found_inf) {
    s->updates++;
    s->found_inf = 0;
    if (!r->fixed) mixpi_scaler_remember(s);
    s->loss_bad = s->buffer_bad = 0;
    s->skipped = found_inf != 0;
    if (found_inf) mixpi_scaler_overflow(s, r);
    else           mixpi_scaler_clean(s, r);
}

/* mixpi_scaler_advance for a skip whose cause is in the forward pass, which no scale prevents:
 * changes only the counts. */
MIXPREC_HD void mixpi_scaler_forgive(mixp_scaler_state *s, const mixp_scaler_rule *r) {
    s->updates++;
    s->skips++;
    s->found_inf = 0;
    s->loss_bad = s->buffer_bad = 0;
    s->skipped = 1;
    if (!r->fixed) mixpi_scaler_remember(s);
}

/* The factor that unscales gradients, rounded as in PyTorch. */
MIXPREC_HD float mixpi_scaler_inverse(float scale) { return (float)(1.0 / (double)scale); }

/* --- a step ----------------------------------------------------------------------------- */

/* The result of one look at all gradients. */
typedef struct mixp_grad_stats {
    double  norm;               /* square root of the sum of squares                       */
    float   largest;            /* largest finite magnitude                                */
    int32_t found_inf;          /* 1: some gradient is Inf or NaN                          */
    int64_t bad_row, bad_element;   /* the first Inf or NaN: row of the table, and element
                                       of that row; -1 = none                              */
    int32_t bad_is_nan;
} mixp_grad_stats;

typedef enum mixp_optimizer_kind {
    MIXP_OPTIMIZER_ADAM,
    MIXP_OPTIMIZER_ADAMW,
    MIXP_OPTIMIZER_SGD,
    MIXP_OPTIMIZER_RMSPROP,
    MIXP_OPTIMIZER_ADAGRAD,
    MIXP_OPTIMIZER_ADAMAX,
    MIXP_OPTIMIZER_NADAM,
    MIXP_OPTIMIZER_RADAM,
    MIXP_OPTIMIZER_LION,
    MIXP_OPTIMIZER_MUON,            /* the optimizer, and its last pass of `update`: moves
                                       each weight against its direction                   */
    MIXP_OPTIMIZER_MUON_MOMENTUM,   /* Muon's first pass: updates the momentum and writes
                                       the direction to the row's weight                   */
    MIXP_OPTIMIZER_MUON_UNIT,       /* Muon's second pass: scales the direction by the
                                       step's factor                                       */
    MIXP_OPTIMIZER_EMA              /* the pass over averages of weights: the row's weight is an
                                       average, its grad the weight, its rate 1 - decay    */
} mixp_optimizer_kind;

/* Which values of a step are compared with the values of earlier steps. */
typedef enum mixp_spike_of {
    MIXP_SPIKE_OFF,
    MIXP_SPIKE_NORM,            /* the norm of the unscaled gradients, before clipping  */
    MIXP_SPIKE_LOSS,            /* the loss, see mixp_optimizer_set_loss                */
    MIXP_SPIKE_BOTH             /* a spike in either is enough                          */
} mixp_spike_of;

/* Skips a step whose value lies more than z standard deviations above the mean of its history:
 * the values of the last `window` applied steps (llm.c's z-score; the defaults are those of
 * OLMo-core's SkipStepOptimizer). No step is judged until half the history is full. A non-finite
 * value is a spike. The standard deviation is at least a thousandth of the mean. Values of skipped
 * steps never enter the history. After max_in_a_row spikes the values count as normal: the next
 * step is applied, and the history restarts empty. Zero in any field = its default. */
typedef struct mixp_spike_rule {
    mixp_spike_of of;           /* 0 = off                                              */
    int32_t window;             /* length of the history, 4 to 4096; 0 = 128           */
    int32_t max_in_a_row;       /* 0 = 8; negative = no limit                           */
    double  z;                  /* 0 = 6 standard deviations                            */
} mixp_spike_rule;

enum { MIXPI_SPIKE_KINDS = 2 };     /* MIXP_SPIKE_NORM and MIXP_SPIKE_LOSS are bits     */

/* The verdict on the last step's values, and how many values have entered each history. */
typedef struct mixp_spike_state {
    int64_t entered[2];         /* norms and losses entered; each history is a ring     */
    int32_t in_a_row;           /* spikes skipped since the last applied step           */
    int32_t of;                 /* why the last step was skipped; 0 = no spike          */
    double  z, mean, sd;        /* figures of the value with the highest z; 0 until one is judged */
} mixp_spike_state;

/* Limit of the steps by which the host may be ahead of a device, for MIXP_SCHEDULE_FUNCTION. */
enum { MIXPI_FACTORS = 16 };

/* The host's instructions for one step. */
typedef struct mixp_step_plan {
    mixp_optimizer_kind     kind;
    int32_t       check;        /* 1: skip the step when a gradient is non-finite          */
    int32_t       unscaled;     /* 1: the gradients are unscaled already                   */
    int32_t       age;          /* how many scales ago the gradients were scaled; 0 if
                                   `unscaled`                                             */
    int32_t       noted;        /* 1: an Inf or NaN found by unscale counts as well        */
    int32_t       gathered;     /* 1: the statistics are of this step                      */
    int32_t       look_only;    /* 1: stores the result of unscale, decides nothing        */
    double        max_norm;
    mixp_schedule schedule;
    mixp_param_group    groups[MIXP_MAX_GROUPS];
    int32_t       n_groups;
    int32_t       cautious;     /* 1: weight decay only where it agrees with the update    */
    int32_t       small_states; /* 1: some states of the table have fewer bytes than f32   */
    uint64_t      seed;         /* seed of the random numbers that round states            */
    /* 53-bit hashes that all ranks must agree on. */
    uint64_t      graded;       /* hash of which parameters have gradients                 */
    uint64_t      settings;     /* hash of all settings, if there are several ranks        */
    uint64_t      weights;      /* hash of a part of the weights; 0: not compared          */
    uint64_t      guard;        /* hash of the guard's settings and looks; 0: no guard       */
    mixp_spike_rule spike;      /* with every default resolved                             */
    double       *spike_window; /* device memory: `window` norms, then `window` losses     */
    const float  *loss;         /* device memory; NULL: ignored                            */
    int32_t       maximize;     /* 1: the weights move along the gradient                  */
    int32_t       amsgrad, centered, decoupled; /* see mixp_optimizer_desc                 */
    double        factors[MIXPI_FACTORS];   /* MIXP_SCHEDULE_FUNCTION: factors of lr, the first
                                               for the applied step `factors_from`         */
    int64_t       factors_from;
} mixp_step_plan;

/* The scalars of one update, in the precision of its arithmetic. SGD: beta1 is the momentum,
 * rest1 is 1 - dampening. */
typedef struct mixp_step_scalars {
    int32_t    nesterov, cautious;
    float factor;               /* factor of gradients: 1/scale times the clip; `maximize`: < 0 */
    float l2;                   /* weight decay added to the gradient                      */
    float decay;                /* decoupled: lr * weight_decay                            */
    float beta1, rest1, beta2, rest2, momentum, eps;
    float rate;                 /* Adam: lr / bc1; SGD: lr                                 */
    float scale_m, scale_v;     /* Adam: 1 and 1/sqrt(bc2)                                 */
    float scale_g;              /* NAdam: factor of the gradient in the numerator; others: 0 */
} mixp_step_scalars;

/* The agreement of the ranks of a world about one look. */
typedef struct mixp_agreement {
    int64_t bad_leaf, bad_element;  /* bad_rank's first Inf or NaN gradient, before the sum:
                                       its place in the arena of gradients                 */
    int32_t bad_rank;           /* the lowest rank with an Inf or NaN, plus 1; 0 = none    */
    int32_t bad_is_nan;
    int32_t differs;            /* the lowest rank that differs from rank 0, plus 1; 0 = none */
    int32_t word;               /* the MIXP_AGREE_... value that differs                   */
    double  here, there;        /* that value on rank 0, and on the rank that differs      */
    int32_t ranks;              /* how many ranks took part; 0: no agreement was made      */
    float   loss;               /* mean over the ranks, if loss spikes are detected        */
    int32_t part_rank;          /* scattered sums: the rank with the first Inf or NaN, plus
                                   1; stats.bad_element counts from that rank's piece on */
    int32_t buffer_rank;        /* the lowest rank with a bad buffer, plus 1; 0 = none     */
    uint64_t buffer;            /* that rank's: see mixp_step_state.bad_buffer             */
} mixp_agreement;

/* An optimizer's state of steps, in device memory. */
typedef struct mixp_step_state {
    mixp_grad_stats stats;      /* last look; after a step: the verdict                    */
    mixp_grad_stats at_unscale; /* the result of mixp_scaler_unscale                       */
    float   clipped;            /* factor applied to the gradients since the last look     */
    float   clip;               /* the last step's total clip coefficient                  */
    float   scale;              /* the loss scale that the last step used                  */
    int32_t skip;
    int32_t stopped;            /* 1: an index out of range is not reported yet            */
    int32_t loss_bad;           /* 1: the loss was Inf or NaN                              */
    double  lr, factor;         /* lr of group 0; the update's factor of gradients         */
    int64_t steps, applied, skipped;
    mixp_agreement agreed;      /* what all ranks found, if there are several              */
    mixp_spike_state spike;
    uint64_t buffer_found;      /* found on this rank since the last decision: see bad_buffer */
    uint64_t bad_buffer;        /* the first element of a buffer that became Inf or NaN in the
                                   last step: a mixpi_bad_word; 0 = none                   */
    mixp_step_scalars update[MIXP_MAX_GROUPS];
} mixp_step_state;

/* A buffer's number, an element, and whether the element is NaN, as one word. A larger word is
 * earlier. Never 0. */
MIXPREC_HD uint64_t mixpi_bad_word(int64_t buffer, int64_t element, int is_nan) {
    const uint64_t most = ((uint64_t)1 << 22) - 1u, last = ((uint64_t)1 << 40) - 1u;
    const uint64_t number = (uint64_t)buffer < most ? (uint64_t)buffer : most;
    return ((uint64_t)1 << 63) - (number << 41 | ((uint64_t)element & last) << 1 | (is_nan != 0));
}
MIXPREC_HD uint64_t mixpi_bad_place(uint64_t word) { return ((uint64_t)1 << 63) - word; }
MIXPREC_HD int64_t mixpi_bad_number(uint64_t word)
{ return (int64_t)(mixpi_bad_place(word) >> 41); }
MIXPREC_HD int64_t mixpi_bad_element(uint64_t word) {
    return (int64_t)(mixpi_bad_place(word) >> 1 & (((uint64_t)1 << 40) - 1u));
}
MIXPREC_HD int mixpi_bad_is_nan(uint64_t word) { return (int)(mixpi_bad_place(word) & 1u); }

/* a + b; *lost becomes the rounding error (Knuth). */
MIXPREC_HD double mixpi_sum_and_lost(double a, double b, double *lost) {
    const double sum = a + b;
    const double part = sum - a;
    *lost = (a - (sum - part)) + (b - part);
    return sum;
}

/* The sum rounded to odd: makes the last bit of an inexact sum odd. A second rounding then knows on
 * which side of a tie the true sum lies (Boldo and Melquiond, Emulation of a FMA and correctly
 * rounded sums, 2008). */
MIXPREC_HD double mixpi_sum_odd(double sum, double lost) {
    const uint64_t bits = mixp_bits_of_f64(sum);
    if (bits & 1) return sum;
    if (!(lost > 0.0 || lost < 0.0)) return sum;    /* exact, Inf or NaN */
    return mixp_f64_of_bits((lost > 0.0) == (sum > 0.0) ? bits + 1 : bits - 1);
}

/* x without the lower half of its digits (Veltkamp). */
MIXPREC_HD double mixpi_upper_half(double x) {
    const double wide = 134217729.0 * x;            /* 2^27 + 1 */
    return wide - (wide - x);
}

/* x * y + z, rounded once. Requires a product between 2^-900 and 2^900. Two numbers hold the exact
 * product (Dekker); both are added to z. */
MIXPREC_HD double mixpi_fma_by_hand(double x, double y, double z) {
    const double x1 = mixpi_upper_half(x), x2 = x - x1;
    const double y1 = mixpi_upper_half(y), y2 = y - y1;
    const double product = x * y;
    const double rest = ((x1 * y1 - product) + x1 * y2 + x2 * y1) + x2 * y2;
    double lost_low, lost_high, lost;
    const double low = mixpi_sum_and_lost(z, rest, &lost_low);
    const double high = mixpi_sum_and_lost(product, low, &lost_high);
    const double tail = mixpi_sum_and_lost(lost_low, lost_high, &lost);
    return high + mixpi_sum_odd(tail, lost);
}
MIXPREC_HD double mixpi_fma(double x, double y, double z) {
#if defined(__MINGW32__) && defined(__x86_64__) && !defined(__FMA__)
    return mixpi_fma_by_hand(x, y, z);          /* MinGW's fma rounds twice */
#else
    return MIXPI_LIBM(fma)(x, y, z);
#endif
}

/* cos(pi x) for x in [0, 1], by its series: the same bits on every device, unlike libm's cos. */
MIXPREC_HD double mixpi_cospi(double x) {
    double t = 3.14159265358979323846 * (x < 0.5 ? x : 1.0 - x), c = 1.0;
    int k;
    for (k = 20; k > 0; k -= 2)
        c = mixpi_fma(-t * t / (double)(k * (k - 1)), c, 1.0);
    return x < 0.5 ? c : -c;
}

/* log(x) of a normal x > 0, to 1e-10: x = m 2^e with m in [sqrt(1/2), sqrt(2)), and log m by the
 * series of artanh. The same bits on every device, unlike libm's log. */
MIXPREC_HD double mixpi_log(double x) {
    const uint64_t bits = mixp_bits_of_f64(x), part = bits & 0xFFFFFFFFFFFFFu;
    const int up = part >= 0x6A09E667F3BCDu;        /* m would be sqrt(2) or more */
    const double e = (double)((int)(bits >> 52) - 1023 + up);
    const double m = mixp_f64_of_bits((uint64_t)(1023 - up) << 52 | part);
    const double s = (m - 1.0) / (m + 1.0), t = s * s;
    double sum = mixpi_fma(t, 1.0 / 13.0, 1.0 / 11.0);
    sum = mixpi_fma(t, sum, 1.0 / 9.0);
    sum = mixpi_fma(t, sum, 1.0 / 7.0);
    sum = mixpi_fma(t, sum, 1.0 / 5.0);
    sum = mixpi_fma(t, sum, 1.0 / 3.0);
    sum = mixpi_fma(t, sum, 1.0);
    return mixpi_fma(e, 0.69314718055994530942, 2.0 * s * sum);
}

/* cos(pi x) for x in [0, 1/2], to 1e-10. */
MIXPREC_HD double mixpi_cospi_near(double x) {
    const double t = 9.86960440108935861883 * x * x;
    double sum = mixpi_fma(t, 1.0 / 20922789888000.0, -1.0 / 87178291200.0);
    sum = mixpi_fma(t, sum, 1.0 / 479001600.0);
    sum = mixpi_fma(t, sum, -1.0 / 3628800.0);
    sum = mixpi_fma(t, sum, 1.0 / 40320.0);
    sum = mixpi_fma(t, sum, -1.0 / 720.0);
    sum = mixpi_fma(t, sum, 1.0 / 24.0);
    sum = mixpi_fma(t, sum, -0.5);
    return mixpi_fma(t, sum, 1.0);
}

/* A standard normal number from two uniform ones (Box and Muller, 1958), each the centre of one of
 * 2^32 cells. */
MIXPREC_HD float mixpi_normal_of(uint32_t u, uint32_t v) {
    const double cell = 1.0 / 4294967296.0;
    const double angle = ((double)v + 0.5) * 2.0 * cell;      /* in units of pi */
    const double half = angle <= 1.0 ? angle : 2.0 - angle;
    const double radius = MIXPI_LIBM(sqrt)(-2.0 * mixpi_log(((double)u + 0.5) * cell));
    const double cosine = mixpi_cospi_near(half <= 0.5 ? half : 1.0 - half);
    return (float)(half <= 0.5 ? radius * cosine : -radius * cosine);
}

/* x^n only by products: the same bits on every device, unlike libm's pow. */
MIXPREC_HD double mixpi_power(double x, int64_t n) {
    double product = 1.0;
    for (; n > 0; n /= 2) {
        if (n % 2) product *= x;
        x *= x;
    }
    return product;
}

/* Half a cosine: 1 at `done` 0, 0 at `done` 1. */
MIXPREC_HD double mixpi_half_cosine(double done) { return 0.5 * (1.0 + mixpi_cospi(done)); }

/* x^p for x in [0, 1] and p >= 0. The bits of a whole power are the same on every device. */
MIXPI_HD_SELDOM
MIXPREC_HD double mixpi_real_power(double x, double p) {
    const double most = p < 1e9 ? p : 1e9;
    const int64_t whole = (int64_t)most;
    const double rest = most - (double)whole, product = mixpi_power(x, whole);
    return rest > 0.0 ? product * MIXPI_LIBM(pow)(x, rest) : product;
}

/* The factor of lr in a phase of OneCycleLR. done: share of the phase that is over. */
MIXPREC_HD double mixpi_one_cycle_phase(const mixp_schedule *s, double from, double to,
                                        double done) {
    return mixpi_fma(s->linear ? 1.0 - done : mixpi_half_cosine(done), from - to, to);
}

/* OneCycleLR's two or three phases, as factors of lr. */
MIXPI_HD_SELDOM
MIXPREC_HD double mixpi_one_cycle(const mixp_schedule *s, int64_t applied) {
    const double start = s->start_factor > 0.0 ? s->start_factor : 0.04;
    const double rise = s->pct_start > 0.0 ? s->pct_start * (double)s->total : (double)s->warmup;
    const double peak = rise - 1.0, last = (double)s->total - 1.0, t = (double)applied;
    const double valley = s->three_phase ? 2.0 * rise - 2.0 : peak;
    if (applied >= s->total - 1) return s->min_factor;
    if (t < peak) return mixpi_one_cycle_phase(s, start, 1.0, t / peak);
    if (t < valley) return mixpi_one_cycle_phase(s, 1.0, start, (t - peak) / (valley - peak));
    return mixpi_one_cycle_phase(s, s->three_phase ? start : 1.0, s->min_factor,
                                 (t - valley) / (last - valley));
}

/* The height, 0 to 1, of RESTARTS after t steps. */
MIXPI_HD_SELDOM
MIXPREC_HD double mixpi_restarts(const mixp_schedule *s, int64_t t) {
    const int64_t growth = s->growth > 1 ? s->growth : 1;
    int64_t length = s->every;
    if (growth == 1) t %= length;
    while (t >= length) {
        t -= length;
        length = length > INT64_MAX / growth ? INT64_MAX : length * growth;
    }
    return mixpi_half_cosine((double)t / (double)length);
}

/* The height of CYCLIC and CYCLIC_EXP. */
MIXPI_HD_SELDOM
MIXPREC_HD double mixpi_cyclic(const mixp_schedule *s, int64_t t) {
    const int64_t fall = s->decay ? s->decay : s->every, length = s->every + fall;
    const int64_t at = t % length;
    const double height = at <= s->every ? (double)at / (double)s->every
                                         : (double)(length - at) / (double)fall;
    return height * mixpi_power(s->gamma, s->kind == MIXP_SCHEDULE_CYCLIC ? t / length : t);
}

/* The height of WAVE. */
MIXPI_HD_SELDOM
MIXPREC_HD double mixpi_wave(const mixp_schedule *s, int64_t t) {
    const int64_t half = s->total - s->warmup, at = t % half;
    const double height = mixpi_half_cosine((double)at / (double)half);
    return t / half % 2 ? 1.0 - height : height;
}

/* How many milestones are at most t? */
MIXPREC_HD int64_t mixpi_milestones_past(const mixp_schedule *s, int64_t t) {
    int n = 0;
    while (n < MIXP_MAX_MILESTONES && s->milestones[n] && s->milestones[n] <= t) n++;
    return n;
}

/* The factor of lr of STEP, EXPONENTIAL and MULTI_STEP, t steps after the warm-up. */
MIXPREC_HD double mixpi_schedule_power(const mixp_schedule *s, int64_t t) {
    int64_t n = s->kind == MIXP_SCHEDULE_STEP ? t / s->every : t;
    double factor;
    if (s->kind == MIXP_SCHEDULE_MULTI_STEP) n = mixpi_milestones_past(s, t);
    factor = mixpi_power(s->gamma, n);
    return factor > s->min_factor ? factor : s->min_factor;
}

/* The rate at a height: lr at 1, min_factor * lr at 0. */
MIXPREC_HD double mixpi_schedule_at(const mixp_schedule *s, double lr, double height)
{ return lr * mixpi_fma(height, 1.0 - s->min_factor, s->min_factor); }

/* The rate of a warm-up. */
MIXPREC_HD double mixpi_warm_up(const mixp_schedule *s, double lr, int64_t applied) {
    const double done = (double)applied / (double)s->warmup;
    if (s->start_factor > 0.0) return lr * mixpi_fma(done, 1.0 - s->start_factor, s->start_factor);
    return lr * ((double)applied + 1.0) / ((double)s->warmup + 1.0);
}

/* The rate of LINEAR, COSINE, POLYNOMIAL and WSD after the warm-up. */
MIXPI_HD_SELDOM
MIXPREC_HD double mixpi_schedule_fall(const mixp_schedule *s, double lr, int64_t applied) {
    const int64_t begin = s->kind == MIXP_SCHEDULE_WSD ? s->total - s->decay : s->warmup;
    double done, height;
    if (applied >= s->total) return lr * s->min_factor;
    if (applied < begin) return lr;
    done = (double)(applied - begin) / (double)(s->total - begin);
    height = s->kind == MIXP_SCHEDULE_COSINE ? mixpi_half_cosine(done) : 1.0 - done;
    if (s->kind == MIXP_SCHEDULE_POLYNOMIAL) height = mixpi_real_power(height, s->power);
    return mixpi_schedule_at(s, lr, height);
}

/* The learning rate after `applied` steps. Calls the function of MIXP_SCHEDULE_FUNCTION, on the
 * host only. */
MIXPI_HD_SELDOM
MIXPREC_HD double mixpi_schedule_lr(const mixp_schedule *s, double lr, int64_t applied) {
    const int64_t t = applied - s->warmup;
    switch (s->kind) {
    case MIXP_SCHEDULE_ONE_CYCLE: return lr * mixpi_one_cycle(s, applied);
#if !defined(__CUDA_ARCH__)
    case MIXP_SCHEDULE_FUNCTION: return lr * s->factor(s->user, applied);
#endif
    default: break;
    }

    /* First the warm-up; a schedule begins at its end. */
    if (t < 0) return mixpi_warm_up(s, lr, applied);
    switch (s->kind) {
    case MIXP_SCHEDULE_CONSTANT: return lr;
    case MIXP_SCHEDULE_STEP:
    case MIXP_SCHEDULE_EXPONENTIAL:
    case MIXP_SCHEDULE_MULTI_STEP: return lr * mixpi_schedule_power(s, t);
    case MIXP_SCHEDULE_WAVE: return mixpi_schedule_at(s, lr, mixpi_wave(s, t));
    case MIXP_SCHEDULE_RESTARTS: return mixpi_schedule_at(s, lr, mixpi_restarts(s, t));
    case MIXP_SCHEDULE_CYCLIC:
    case MIXP_SCHEDULE_CYCLIC_EXP: return mixpi_schedule_at(s, lr, mixpi_cyclic(s, t));
    default: return mixpi_schedule_fall(s, lr, applied);
    }
}

/* The learning rate of a step of the plan. A function's factors are in the plan. */
MIXPREC_HD double mixpi_plan_lr(const mixp_step_plan *plan, double lr, int64_t applied) {
    const int64_t at = applied - plan->factors_from;
    if (plan->schedule.kind != MIXP_SCHEDULE_FUNCTION)
        return mixpi_schedule_lr(&plan->schedule, lr, applied);
    return lr * plan->factors[at < 0 ? 0 : at < MIXPI_FACTORS ? at : MIXPI_FACTORS - 1];
}
