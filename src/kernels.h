#pragma once
#include "results.h"
#include "small.h"
/* ==== 4. KERNELS ======================================================= >>kernels ====
 *
 * A device is a table of kernels and memory functions: the CPU's tables are here, a GPU's is in
 * mixprec_cuda.cu. Arrays are converted here, because every table has a kernel for that.
 */
#define MIXP_MAX_RANK 8         /* axes of an array                                        */

typedef struct mixp_device mixp_device;

/* Where memory comes from. */
typedef struct mixp_allocator {
    void *(*allocate)(size_t bytes, void *user);    /* NULL = out of memory                */
    void  (*release)(void *p, void *user);          /* set `allocate` and `release`, or
                                                       neither                             */
    void   *user;
} mixp_allocator;

typedef enum mixp_isa {
    MIXP_ISA_SCALAR, MIXP_ISA_AVX2, MIXP_ISA_AVX512,
    MIXP_ISA_AVX512_BF16,       /* AVX512, with bf16 dot products for bf16 by bf16 in gemm and
                                   attention. Zen 4 and 5: twice as fast, and the default.
                                   Intel: half as fast, and not the default                   */
    MIXP_ISA_NEON,
    MIXP_ISA_NEON_F16,          /* NEON with FMLAL: does not widen f16 by f16; same bits       */
    MIXP_ISA_NEON_BF16,         /* NEON_F16 with BFMLAL: does not widen bf16 by bf16; same bits */
    MIXP_ISA_AMX,               /* AVX512, with Intel's tiles for products and attention of bf16 by
                                   bf16 and of f16 by f16 (each f16 as two bf16). The default if the
                                   processor has AMX without AMX-FP16. Not identical to other sets:
                                   see SAME BITS                                               */
    MIXP_ISA_AMX_F16,           /* AMX, with tiles of AMX_FP16 for f16 by f16. The default if the
                                   processor has AMX-FP16. Not identical: see SAME BITS        */
    MIXP_ISA_COUNT
} mixp_isa;

#ifndef MIXPREC_ONLY_FORMATS
/* The CPU with the fastest instruction set that this machine has: see INSTRUCTION SETS above. A
 * constant; never NULL. Call it once, not in each step: it asks CPUID, which takes up to 25
 * microseconds on a virtual machine. For bit-identical results on all machines with SIMD, set
 * portable_bits of mixp_context_desc. */
MIXPREC_API const mixp_device *mixp_cpu(void);

/* The CPU restricted to one instruction set. NULL when the machine or the build lacks it (flags
 * like -march=native leave out older sets), when the system refuses it, or when it computes a small
 * test product wrong. The device's name shows the set in use. Wherever this file promises the same
 * bits, all sets are bit-identical. AMX asks Linux to permit tiles to the process. */
MIXPREC_API const mixp_device *mixp_cpu_with(mixp_isa isa);
#endif

/* Converts n elements of any dtype to any other, with this machine's best instruction set, in the
 * calling thread. Integers convert exactly or saturate; fractions are truncated, as in C. dst may
 * be src when dst's elements are not wider; otherwise dst and src must not overlap. Any alignment
 * is allowed. MIXP_ERR_ARGUMENT: NULL with n > 0, n < 0, or an overlap. MIXP_ERR_DTYPE: an unknown
 * dtype. On an error dst is unchanged. */
MIXPREC_API mixp_result mixp_convert(void *dst, mixp_dtype to, const void *src,
                                     mixp_dtype from, int64_t n);

/* mixp_convert with a choice of rounding; NULL = as mixp_convert rounds. */
MIXPREC_API mixp_result mixp_convert_rounded(void *dst, mixp_dtype to, const void *src,
    mixp_dtype from, int64_t n, const mixp_rounding *rounding);

/* mixp_convert_rounded on a device from mixp_cpu_with; NULL = the best. All are bit-identical. */
MIXPREC_API mixp_result mixp_convert_with(const mixp_device *cpu, void *dst,
                                          mixp_dtype to, const void *src, mixp_dtype from,
                                          int64_t n, const mixp_rounding *rounding);

#ifndef MIXPREC_ONLY_FORMATS
/* Checks that this build, in this thread's floating-point environment, computes as this file
 * promises. Compares conversions on every instruction set, a loss scale's path and one update with
 * stored numbers. Takes well under a millisecond. Changes nothing, but requests tiles as mixp_cpu
 * does. message has room for `size` bytes and is truncated to fit; pass NULL with 0 to get no
 * message. MIXP_ERR_DEVICE: message says in one line which promise is broken, and what to do:
 * fast-math, arithmetic in a wider type, another rounding mode, FTZ or DAZ, wrong results. MIXP_OK
 * with a message that begins with "slow: ": the results are right, but the build lacks
 * optimisation, vector instructions or threads that the machine has (in a build in parts: the
 * host's part lacks them), or AMX, which the processor has, is not used. message then states the
 * reason: the system does not save tiles, the system refuses tiles to this process, or a known
 * product is wrong. Otherwise message is "". */
MIXPREC_API mixp_result mixp_self_check(char *message, size_t size);
#endif

/* The GPU `ordinal` (0 = the first), for mixp_context_desc. Link with mixprec_cuda.cu. Returns NULL
 * when the GPU cannot be used. *why (unless why is NULL) is a constant string: the reason for NULL;
 * "slow: ..." and the cure, if the GPU is usable and this build leaves out its fast code (sm_90a on
 * capability 9.0); otherwise "". */
extern const mixp_device *mixp_cuda(int ordinal, const char **why);

/* --- for authors of devices and operators: users continue at section 5 ------------------- *
 *
 * A device is a table of kernels and memory functions. Kernels see pointers, dtypes and
 * sizes, and know nothing of tensors, tapes or scalers. A third device (a test double, your
 * accelerator) is one more table.
 *
 * Every table follows these rules. Arrays are row-major and dense unless strides are given.
 * `real` in a comment means f32, f16 or bf16, chosen for each array. Kernels convert to f32 on
 * load, compute in f32, and round once on store. `accumulate` 1 adds to the output; 0 overwrites
 * the output, which may be uninitialised or hold NaN. An output may alias an input only if the
 * comment allows it. Results are bit-identical at any number of threads.
 */
/* An input array and an output array. Each kernel gets one struct made of them; the comment of
 * that struct is the kernel's contract. data may be NULL (the array is absent) if the struct's
 * comment allows it. */
typedef struct mixp_in  { const void *data; mixp_dtype dtype; } mixp_in;
typedef struct mixp_out { void *data; mixp_dtype dtype; int accumulate; } mixp_out;

MIXPREC_HD mixp_in mixpi_in(const void *data, mixp_dtype dtype)
{ mixp_in a = { data, dtype }; return a; }
MIXPREC_HD mixp_out mixpi_out_to(void *data, mixp_dtype dtype, int accumulate)
{ mixp_out a = { data, dtype, accumulate }; return a; }

/* Element i of an array of any dtype as f32, rounded to nearest even if f32 cannot represent it.
 * For your own operators, on the host and in kernels (examples/own_operator.c). */
MIXPREC_HD float mixp_get(mixp_in a, int64_t i) {
    switch (a.dtype) {
    case MIXP_F32:  return ((const float *)a.data)[i];
    case MIXP_F16:  return mixp_f32_from_f16(((const mixp_f16 *)a.data)[i]);
    case MIXP_BF16: return mixp_f32_from_bf16(((const mixp_bf16 *)a.data)[i]);
    case MIXP_F64:  return (float)((const double *)a.data)[i];
    case MIXP_I32:  return (float)((const int32_t *)a.data)[i];
    case MIXP_I64:  return (float)((const int64_t *)a.data)[i];
    default:        return (float)mixp_decode(a.dtype, ((const uint8_t *)a.data)[i]);
    }
}

/* mixp_put for dtypes whose values f32 cannot hold: these sum in double. */
MIXPREC_HD void mixpi_put_f64(double *y, int accumulate, float x)
{ *y = accumulate ? *y + (double)x : (double)x; }
MIXPREC_HD void mixpi_put_i32(int32_t *y, int accumulate, float x) {
    double sum = (accumulate ? (double)*y : 0.0) + (double)x;
    *y = (int32_t)(uint32_t)mixp_encode(MIXP_I32, sum, 0);
}
MIXPREC_HD void mixpi_put_i64(int64_t *y, int accumulate, float x) {
    double sum = (accumulate ? (double)*y : 0.0) + (double)x;
    *y = (int64_t)mixp_encode(MIXP_I64, sum, 0);
}

/* Sets element i to x; where y accumulates, adds x to it. Floats round to nearest even; integers
 * truncate and saturate. The sum is computed in f32, for f64, i32 and i64 in double, which rounds
 * an i64 beyond 2^53. */
MIXPREC_HD void mixp_put(mixp_out y, int64_t i, float x) {
    switch (y.dtype) {
    case MIXP_F64: mixpi_put_f64((double *)y.data + i, y.accumulate, x); return;
    case MIXP_I32: mixpi_put_i32((int32_t *)y.data + i, y.accumulate, x); return;
    case MIXP_I64: mixpi_put_i64((int64_t *)y.data + i, y.accumulate, x); return;
    default: break;
    }
    if (y.accumulate) x += mixp_get(mixpi_in(y.data, y.dtype), i);
    switch (y.dtype) {
    case MIXP_F32:  ((float *)y.data)[i] = x; break;
    case MIXP_F16:  ((mixp_f16 *)y.data)[i] = mixp_f16_from_f32(x); break;
    case MIXP_BF16: ((mixp_bf16 *)y.data)[i] = mixp_bf16_from_f32(x); break;
    default: ((uint8_t *)y.data)[i] = (uint8_t)mixp_encode(y.dtype, (double)x, 0); break;
    }
}

/* One piece of a parallel loop: index in [0, tasks), worker in [0, threads). */
typedef void (*mixp_task)(void *arg, int64_t index, int worker);

/* Where a kernel runs. The context fills it; kernels only read it. */
typedef struct mixp_exec {
    int    threads;             /* workers that `parallel` may use at once                 */
    void  *stream;              /* the device's queue; NULL on the CPU                     */
    void  *state;               /* the device's own state, made by its `attach`            */
    void  *user;                /* passed to the two hooks below                           */
    /* Runs task(arg, i, worker) for every i in [0, tasks), in any order, and returns when
     * all are done. NULL = run them one after another in the calling thread. */
    void (*parallel)(void *user, int64_t tasks, mixp_task task, void *arg);
    int64_t least_work;         /* array elements: smaller work runs in the calling thread,
                                   without `parallel`. 0 = always use `parallel`           */
    /* Device memory for this kernel, valid until the next kernel starts; 64-byte aligned.
     * NULL = out of memory. A kernel may ask once. */
    void *(*scratch)(void *user, size_t bytes);
    mixp_allocator host, device;    /* the context's; unset = malloc, the device's own     */
    const char *gemm_choices;   /* from the context's description; NULL = none. For attach */
    int         gemm_measure;   /* from the context's description. For attach              */
} mixp_exec;

typedef enum mixp_unary {
    MIXP_UNARY_RELU, MIXP_UNARY_GELU_TANH, MIXP_UNARY_GELU_ERF, MIXP_UNARY_SILU,
    MIXP_UNARY_TANH, MIXP_UNARY_SIGMOID, MIXP_UNARY_EXP, MIXP_UNARY_LOG, MIXP_UNARY_SQRT,
    MIXP_UNARY_POW,             /* x to the power p                                        */
    MIXP_UNARY_SCALE,           /* x times p                                               */
    MIXP_UNARY_RELU_SQUARED, MIXP_UNARY_ABS, MIXP_UNARY_SIN, MIXP_UNARY_COS,
    MIXP_UNARY_SOFT_CAP,        /* p tanh(x / p)                                           */
    MIXP_UNARY_CLAMP,           /* x, but at least p and at most q                         */
    MIXP_UNARY_AFFINE,          /* p x + q, rounded once                                   */
    MIXP_UNARY_LOG1P, MIXP_UNARY_EXPM1, MIXP_UNARY_ERF,
    MIXP_UNARY_SOFTPLUS,        /* log(1 + e^(p x)) / p, p > 0                             */
    MIXP_UNARY_LEAKY_RELU,      /* x > 0 ? x : p x                                         */
    MIXP_UNARY_ELU,             /* x > 0 ? x : p (e^x - 1)                                 */
    MIXP_UNARY_ROOT,            /* sqrt x, with a slope of 0 where x is 0                  */
    MIXP_UNARY_LOG2, MIXP_UNARY_LOG10, MIXP_UNARY_ACOS, MIXP_UNARY_ASIN, MIXP_UNARY_TAN,
    MIXP_UNARY_SINH, MIXP_UNARY_COSH,
    MIXP_UNARY_ERFINV,          /* y with erf(y) = x                                       */
    MIXP_UNARY_COUNT
} mixp_unary;

typedef enum mixp_binary {
    MIXP_BINARY_ADD, MIXP_BINARY_SUB, MIXP_BINARY_MUL, MIXP_BINARY_DIV,
    MIXP_BINARY_MAXIMUM, MIXP_BINARY_MINIMUM,   /* NaN if either operand is NaN; equal
                                                   operands get half the gradient each     */
    MIXP_BINARY_SWIGLU,         /* silu(a) b                                               */
    MIXP_BINARY_POWER,          /* a to the power b                                        */
    MIXP_BINARY_ATAN2,          /* the angle of the point (b, a)                           */
    MIXP_BINARY_PRELU,          /* a > 0 ? a : b a                                         */
    MIXP_BINARY_COUNT
} mixp_binary;

/* Is the slope of op computed from its result? The other slopes are computed from the operand,
 * except those of SCALE and AFFINE, which are p. */
MIXPREC_HD int mixpi_slope_reads_result(mixp_unary op) {
    return op == MIXP_UNARY_TANH || op == MIXP_UNARY_SIGMOID || op == MIXP_UNARY_EXP ||
           op == MIXP_UNARY_SQRT || op == MIXP_UNARY_ROOT || op == MIXP_UNARY_TAN;
}

/* Is the slope of op its factor p, whatever the operand is? */
MIXPREC_HD int mixpi_slope_is_factor(mixp_unary op)
{ return op == MIXP_UNARY_SCALE || op == MIXP_UNARY_AFFINE; }

typedef enum mixp_loss_kind {
    MIXP_LOSS_MSE,              /* (x - t)^2                                               */
    MIXP_LOSS_BCE_LOGITS,       /* max(x,0) - x t + log(1 + exp(-|x|))                     */
    MIXP_LOSS_BCE,              /* -t log x - (1-t) log(1-x), logs clamped at -100         */
    MIXP_LOSS_L1,               /* |x - t|, with slope 0 at 0                              */
    MIXP_LOSS_HUBER,            /* d^2 / 2 where d = |x - t| < delta, else delta (d - delta/2) */
    MIXP_LOSS_SMOOTH_L1,        /* d^2 / (2 delta) where d < delta, else d - delta/2       */
    MIXP_LOSS_KL,               /* t (log t - x), 0 x at t = 0; x is a log-probability     */
    MIXP_LOSS_KL_LOG,           /* e^t (t - x); x and t are log-probabilities              */
    MIXP_LOSS_COUNT
} mixp_loss_kind;

/* Constants of the functions above, the same on every device. The tanh form of gelu is
 * x sigmoid(2u) with 2u = x (GELU_LINEAR + GELU_CUBIC x^2), that is 2 sqrt(2/pi) (x + 0.044715
 * x^3), and (2u)' = GELU_LINEAR + GELU_SLOPE x^2. Beyond the bounds gelu and silu are flat or equal
 * x; their slopes are evaluated at the bound, so Inf does not become NaN. */
#define MIXPI_GELU_LINEAR   1.59576912f
#define MIXPI_GELU_CUBIC    0.0713548163f
#define MIXPI_GELU_SLOPE    0.214064449f
#define MIXPI_GELU_BOUND    20.0f       /* of the tanh form of gelu                        */
#define MIXPI_ERF_BOUND     14.5f       /* of the erf form of gelu                         */
#define MIXPI_SILU_BOUND    200.0f      /* e^-200 rounds to 0                              */
#define MIXPI_DENSITY       0.398942280f    /* of the normal distribution at 0: 1/sqrt(2pi)*/
#define MIXPI_ERF_SLOPE     1.12837917f     /* of erf at 0: 2/sqrt(pi)                     */
#define MIXPI_BCE_LOG_LEAST (-100.0f)   /* logs of probabilities are clamped to this       */
#define MIXPI_BCE_LEAST     1e-12f      /* p (1-p), the slope's divisor, is clamped to this */

/* 2^-40. If no gradient in a group is larger, a sum of squares in f32 loses the small ones. */
#define MIXPI_SQUARES_LOST  9.0949470e-13f

/* --- over rows: softmax, norms, embedding, cross entropy; losses ---
 *
 * (+)= means: as the output's `accumulate` says. A plain = means: accumulate must be 0, otherwise
 * MIXP_ERR_ARGUMENT. */

/* y = softmax (or its log) of each row of a[rows, cols]. A row of only -Inf becomes NaN, as in
 * PyTorch. y may be a. */
typedef struct mixp_softmax_args {
    int64_t  rows, cols;
    int      log_of;
    mixp_in  a;
    mixp_out y;
} mixp_softmax_args;

/* da (+)= y (dy - sum(dy y)), or dy - e^y sum(dy) for the log. y is the forward's result. In a
 * column with 3/4 of the probability or more, the difference is made from the other columns. */
typedef struct mixp_softmax_backward_args {
    int64_t  rows, cols;
    int      log_of;
    mixp_in  dy, y;
    mixp_out da;
} mixp_softmax_backward_args;

/* y = (a - mean) * rstd * gamma + beta for each row of a[rows, cols]. Variance is biased
 * (divides by cols).
 * add_norm: sum = a + b, then y from sum in place of a, in one pass; the same bits as binary and
 * then norm. sum may be a or b if it has the same dtype. */
typedef struct mixp_norm_args {
    int64_t  rows, cols;
    int      rms;               /* 1: mean is 0; beta and `mean` are ignored               */
    float    eps;
    mixp_in  a;
    mixp_in  gamma, beta;       /* cols values each; absent = 1 and 0                      */
    mixp_out y;
    float   *mean, *rstd;       /* rows values each, written for the backward pass         */
    mixp_in  b;                 /* add_norm only: rows * cols values                       */
    mixp_out sum;               /* add_norm only                                           */
} mixp_norm_args;

/* With h = (a - mean) * rstd and d = dy * gamma: da (+)= rstd * (d - mean(d) - h * mean(d h)),
 * without mean(d) when rms. dgamma (+)= the sum over rows of dy h; dbeta (+)= the sum over rows of
 * dy. db = a copy of the final da; callers request db only if the table has add_norm and da is
 * present and f32. */
typedef struct mixp_norm_backward_args {
    int64_t      rows, cols;
    int          rms;
    mixp_in      dy, a, gamma;
    const float *mean, *rstd;
    mixp_out     da, dgamma, dbeta;     /* results; one whose data is NULL is not wanted   */
    mixp_out     db;                    /* its data may be NULL                            */
} mixp_norm_backward_args;

/* y[i] = table[ids[i]] for i in [0, rows). ids: device memory. table: [vocab, cols].
 *
 * Indices, here and in cross entropy: an index out of range is MIXP_ERR_ARGUMENT before anything
 * is written. An asynchronous device cannot check an index before its call returns: it writes NaN
 * to the result of that index, reports the error in the next call that waits or peeks (at the
 * latest with the verdict of the next step), and applies no step until then. */
/* Bags: y[bag] is the sum, the mean or the maximum of the rows that the ids of the bag select,
 * summed in f32 in the order of the ids, and rounded once; an empty bag is 0. Bag i has the ids
 * from offsets[i] to offsets[i + 1], the last bag those to `rows`; without offsets each bag has
 * `width` ids. Offsets begin with 0, do not decrease and do not exceed `rows`; others are errors
 * like ids out of range. */
typedef enum mixp_bag_mode { MIXP_BAG_SUM, MIXP_BAG_MEAN, MIXP_BAG_MAX } mixp_bag_mode;
typedef struct mixp_bags {
    int64_t        count;       /* 0: each id is a separate row, and no other field is read   */
    int64_t        width;
    const int32_t *offsets;     /* device memory, or NULL                                  */
    mixp_in        weights;     /* a factor for each id; data NULL: 1                      */
    int64_t        padding;     /* an id that does not count                               */
    mixp_bag_mode  mode;
    int32_t       *largest;     /* MAX: [count, cols], the place among the ids of each maximum, -1
                                   in an empty bag: written, or read if `follow`           */
    int            follow;      /* 1: y gets the elements that `largest` names             */
} mixp_bags;

typedef struct mixp_embedding_args {
    int64_t        rows, cols, vocab;
    const int32_t *ids;
    mixp_in        table;
    mixp_out       y;           /* [rows, cols], or [bags.count, cols]                     */
    mixp_bags      bags;
} mixp_embedding_args;

/* dtable[ids[i]] += dy[i] in increasing i, rounded once. Without accumulate, rows that no id names
 * become 0. On an asynchronous device an id out of range adds to no row. Of bags, dy[bag of i] is
 * added, times the weight, divided by the number of ids that count (MEAN), or only where `largest`
 * is i (MAX). */
typedef struct mixp_embedding_backward_args {
    int64_t        rows, cols, vocab;
    const int32_t *ids;
    mixp_in        dy;
    mixp_out       dtable;      /* data NULL: not wanted                                   */
    mixp_bags      bags;
    mixp_in        table;       /* read for dweights                                       */
    mixp_out       dweights;    /* [rows]: dweights[i] (+)= table[ids[i]] . dy[bag of i]; data NULL:
                                   not wanted                                              */
} mixp_embedding_backward_args;

/* loss[0] = mean over the counted rows of lse(row) - row[target]. A target is in [0, cols), or
 * `ignore`: such a row does not count. Without a counted row, loss[0] is NaN, as in PyTorch. With
 * smoothing the target keeps 1 - smoothing, and all columns share the rest: lse(row) -
 * (1 - smoothing) row[target] - smoothing mean(row). With weights, the logarithm of each column's
 * probability is multiplied by the column's weight, and the mean is the sum over the counted rows
 * divided by the sum of their targets' weights; NaN if that is 0. */
typedef struct mixp_cross_entropy_args {
    int64_t        rows, cols;
    int32_t        ignore;
    float          smoothing;   /* in [0, 1]                                               */
    const int32_t *targets;
    mixp_in        logits;
    float         *loss;
    float         *stats;       /* [rows, 3], for the backward pass: the row's largest value,
                                   top; 1 / the sum of exp(x - top); and the probability of all
                                   columns but the target, which 1 - softmax would lose if the
                                   target is near 1. One log-sum-exp would lose digits to a
                                   large top                                               */
    float         *counted;     /* number of counted rows, for the backward pass           */
    int64_t        before;      /* rows of earlier calls, all with `more` 1: loss and counted
                                   hold their mean and count, and this call continues both.
                                   0: first call                                           */
    const float   *weights;     /* [cols + 1]: the columns' weights, and their mean; NULL = 1 */
    int            logs;        /* 1: logits are log-probabilities: lse is 0               */
    int            sum;         /* 1: loss[0] is the sum, and counted[0] becomes 1         */
    int            more;        /* 1: another call continues this one. If the weights so far are
                                   0, loss[0] holds the sum, not NaN                       */
    float         *each;        /* [rows]: the rows' losses, 0 of a row that does not count,
                                   instead of loss and counted; or NULL                    */
} mixp_cross_entropy_args;

/* Does a call ask for more than the mean of unweighted rows? */
MIXPREC_HD int mixpi_entropy_has_options(const mixp_cross_entropy_args *k)
{ return k->before || k->weights || k->logs || k->sum || k->more || k->each; }

/* dlogits (+)= dloss[0] / counted[0] * (softmax(row) - (1 - smoothing) onehot - smoothing /
 * cols), where the target's difference is made from stats, without cancellation; a row that does
 * not count contributes zeros. With weights w: (softmax ((1 - smoothing) w[target] + smoothing
 * mean(w)) - (1 - smoothing) w[target] onehot - smoothing w / cols). With logs, softmax is 0.
 * dlogits may be logits. */
typedef struct mixp_cross_entropy_backward_args {
    int64_t        rows, cols;
    int32_t        ignore;
    float          smoothing;
    const int32_t *targets;
    mixp_in        dloss, logits;
    const float   *stats, *counted;
    mixp_out       dlogits;
    const float   *weights;     /* as in the forward pass                                  */
    int            logs;        /* as in the forward pass                                  */
    int            each;        /* 1: dloss has a value for each row, and counted is not read */
} mixp_cross_entropy_backward_args;

/* cross_entropy and cross_entropy_backward in one pass: writes the outputs of `loss`, and dlogits
 * = what cross_entropy_backward writes for dloss = scale[0] * share. */
typedef struct mixp_cross_entropy_both_args {
    mixp_cross_entropy_args loss;   /* its `before` and all fields after `before` must be 0 */
    const float *scale;
    float        share;
    mixp_out     dlogits;       /* cannot accumulate; may be loss.logits                   */
} mixp_cross_entropy_both_args;

/* y[0] = the sum over n of the loss of a against target, over `over`. */
typedef struct mixp_loss_args {
    mixp_loss_kind kind;
    int64_t   n, over;          /* over 0 = n: the mean                                    */
    float     delta;            /* for HUBER and SMOOTH_L1: above 0                        */
    mixp_in   a, target;
    float    *y;
    float    *each;             /* n values: the elements' losses, instead of y; or NULL   */
} mixp_loss_args;

/* da (+)= dloss[0] / over * d loss / d a. */
typedef struct mixp_loss_backward_args {
    mixp_loss_kind kind;
    int64_t   n, over;
    float     delta;
    mixp_in   dloss, a, target;
    mixp_out  da;
} mixp_loss_backward_args;

/* --- products ---
 *
 * c[m,n] (+)= alpha * op(a) op(b) + bias, summed in f32 and rounded once. cuBLASLt may round the
 * product to f16 or bf16 before it adds an old c of that dtype.
 * op(a) is m x k: stored k x m when trans_a. op(b) is k x n: stored n x k when trans_b.
 * ld* count elements between rows as stored. bias: n values added to each row, or absent.
 * batch matrices lie stride_* elements apart. stride_a or stride_b 0: all products share a or b.
 * a, b, c, bias: real. k may be 0. alpha_at: device memory; *alpha_at replaces alpha. NULL: alpha
 * counts. */
typedef struct mixp_gemm_args {
    int64_t  m, n, k, batch;
    int      trans_a, trans_b;
    float    alpha;
    mixp_in  a, b, bias;
    mixp_out c;
    int64_t  lda, ldb, ldc;
    int64_t  stride_a, stride_b, stride_c;
    const float *alpha_at;
} mixp_gemm_args;

/* alpha, where *alpha_at can be read. */
MIXPREC_HD float mixpi_gemm_alpha(const mixp_gemm_args *g)
{ return g->alpha_at ? *g->alpha_at : g->alpha; }

/* A product fused with a second operation, if the vendor's library can fuse the two. Where it
 * cannot, two kernels run one after the other.
 *
 * ROW_SUMS: c = the result of gemm; sums[m] (+)= the sums of op(a)'s rows. These are the gradients
 * of a weight and of its bias. a is dense.
 * GELU: before = the result of gemm; c = its GELU (tanh form). c and before have the same dtype,
 * are dense and do not accumulate. c may be computed from the unrounded values of before.
 * GELU_BACK: c = the result of gemm, without a bias, times GELU's slope at before. before is
 * read-only.
 *
 * batch is 1. before, sums: real. MIXP_ERR_ARGUMENT: an array that the kind needs is missing, or
 * the kind is unknown. */
typedef enum mixp_epilogue {
    MIXP_EPILOGUE_ROW_SUMS, MIXP_EPILOGUE_GELU, MIXP_EPILOGUE_GELU_BACK, MIXP_EPILOGUE_COUNT
} mixp_epilogue;

typedef struct mixp_gemm_epilogue_args {
    mixp_gemm_args gemm;
    mixp_epilogue  kind;
    mixp_out       sums;        /* the sums of ROW_SUMS                                    */
    mixp_out       before;      /* m * n values, for GELU and GELU_BACK                    */
} mixp_gemm_epilogue_args;

/* Where the elements of an f32 matrix are: (i, j) is data[rows[i] + runs[j / run] + j % run]. The
 * tables are host memory. rows NULL: the matrix has rows of ld*. */
typedef struct mixp_indexed { const int64_t *rows, *runs; int64_t run; } mixp_indexed;

/* A product of an image's columns, which are read from the image, or are added to the image. The
 * bits are those of gemm with a copy of b, and of adding a copy of c to the image row by row.
 * b: the places of b's elements, as stored. c: the places of c's elements, to which the product is
 * added, whatever gemm.c.accumulate is. Rows i and j of c that share an element have the same
 * i / taps. MIXP_ERR_ARGUMENT: run or taps is below 1, or there are a bias and c's places. */
typedef struct mixp_gemm_indexed_args {
    mixp_gemm_args gemm;
    mixp_indexed   b, c;
    int64_t        taps;
} mixp_gemm_indexed_args;

/* Strides of the rows of heads: row i of head h of sequence s begins s * sequence + h * head +
 * i * row elements after the first row. A stride of 0: all sequences, heads or rows share one. */
typedef struct mixp_head_strides { int64_t sequence, head, row; } mixp_head_strides;

/* Multi-head attention of t queries over `keys` keys and values:
 *
 *     y[b, t, heads, d] (+)= drop(softmax(cap(scale * q k') + mask)) v
 *
 * Head h of q uses head h / (heads / kv_heads) of k and v. cap(s) = softcap * tanh(s / softcap),
 * or s where softcap is 0. causal: query i sees keys up to i + past, past >= 0. lengths: sequence s
 * sees keys below lengths[s], which is in [0, keys]. A length out of range is reported as an index
 * is, see mixp_embedding_args; until then it is clamped. drop: a probability is kept, times
 * 1 / (1 - dropout), when mixp_random_u32(seed, step, tensor, ((s * heads + h) * t + i) * keys + j)
 * >= dropout * 2^32. The array of scores is never stored.
 *
 * y is rounded once, to nearest. If the largest score of a query repeats, y is rounded up or down
 * by a hash of its own bits, with the right mean: see mixpi_top_repeats.
 *
 * A query sees no key if all keys are hidden or have scores of -Inf. With a mask or lengths, its y
 * is 0, its lse is +Inf, and its gradients are 0; without either, its y is NaN. A non-finite value
 * of v may reach queries that do not see its key, because 0 times it is NaN. If any size is 0, keys
 * included, nothing is written. */
typedef struct mixp_attention_args {
    int64_t  b, t, keys, heads, kv_heads, d;    /* heads: a multiple of kv_heads           */
    int      causal;
    int64_t  past;
    float    scale, softcap;
    float    dropout;           /* in [0, 1)                                               */
    uint64_t seed, step, tensor;    /* ignored when dropout is 0                           */
    mixp_in  q, k, v;
    mixp_head_strides q_at, k_at, v_at;
    mixp_in  mask;              /* may be absent                                           */
    mixp_head_strides mask_at;
    int64_t  mask_key;          /* elements from one key to the next: 1, or 0              */
    const int32_t *lengths;     /* b values in device memory, or NULL                      */
    mixp_out y;
    float   *lse;               /* [b, heads, t]: log-sum-exp of scores, for backward      */
} mixp_attention_args;

/* dq, dk, dv (+)= the gradients of q, k and v, from dy. */
typedef struct mixp_attention_backward_args {
    mixp_attention_args forward;        /* the forward's arguments; reads its y and lse    */
    mixp_in  dy;                        /* laid out as y                                   */
    mixp_out dq, dk, dv;                /* laid out as q, k and v; each may be absent      */
} mixp_attention_backward_args;

