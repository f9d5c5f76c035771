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
    MIXP_ISA_AMX,               /* AVX512, with Intel's tiles for products and attention of bf16
                                   by bf16 and of f16 by f16 (each f16 as two bf16). The default
                                   where the processor has tiles. Its own bits: see INSTRUCTION
                                   SETS                                                        */
    MIXP_ISA_AMX_F16,           /* AMX, with tiles of AMX_FP16 for f16 by f16. The default where
                                   the processor has them. Its own bits                        */
    MIXP_ISA_COUNT
} mixp_isa;

#ifndef MIXPREC_ONLY_FORMATS
/* The CPU with the fastest instruction set that this machine has: see INSTRUCTION SETS above. A
 * constant; never NULL. Call it once, not in each step: it asks CPUID, which takes up to 25
 * microseconds on a virtual machine. For bits that all machines share, set portable_bits of
 * mixp_context_desc. */
MIXPREC_API const mixp_device *mixp_cpu(void);

/* The CPU restricted to one instruction set. NULL when the machine or the build lacks it (flags
 * like -march=native leave lesser sets out), when the system refuses it, or when it computes a
 * small test product wrong. The device's name says which set is in use. All sets give the same
 * bits wherever this file promises bits. AMX asks Linux to permit tiles to the process. */
MIXPREC_API const mixp_device *mixp_cpu_with(mixp_isa isa);
#endif

/* Converts n elements of any dtype to any other, with this machine's best instruction set, in the
 * calling thread. Integers convert exactly or saturate; fractions are truncated, as in C. dst may
 * be src when dst's elements are not wider; otherwise dst and src must not overlap. Any alignment
 * will do. MIXP_ERR_ARGUMENT: NULL with n > 0, n < 0, or an overlap. MIXP_ERR_DTYPE: an unknown
 * dtype. On an error dst is unchanged. */
MIXPREC_API mixp_result mixp_convert(void *dst, mixp_dtype to, const void *src,
                                     mixp_dtype from, int64_t n);

/* mixp_convert with a choice of rounding; NULL = as mixp_convert rounds. */
MIXPREC_API mixp_result mixp_convert_rounded(void *dst, mixp_dtype to, const void *src,
    mixp_dtype from, int64_t n, const mixp_rounding *rounding);

/* mixp_convert_rounded on a device from mixp_cpu_with; NULL = the best. All give the same bits. */
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
 * optimisation, vector instructions or threads that the machine has (of a build in parts, the
 * host's part is asked), or AMX, which the processor has, is not used. message then says why: the
 * system does not save tiles, the system refuses tiles to this process, or a known product is
 * wrong. Otherwise message is "". */
MIXPREC_API mixp_result mixp_self_check(char *message, size_t size);
#endif

/* The GPU `ordinal` (0 = the first), for mixp_context_desc. Link with mixprec_cuda.cu. Returns NULL
 * when the GPU cannot be used; *why (unless why is NULL) then gives the reason, a constant string.
 */
extern const mixp_device *mixp_cuda(int ordinal, const char **why);

/* --- for authors of devices and operators: users go on to section 5 ---------------------- *
 *
 * A device is a table of kernels and memory functions. Kernels see pointers, dtypes and
 * sizes, and know nothing of tensors, tapes or scalers. A third device (a test double, an
 * accelerator of yours) is one more table.
 *
 * Every table follows these rules. Arrays are row-major and dense unless strides are given.
 * `real` in a comment means f32, f16 or bf16, chosen for each array. Kernels widen as they
 * load, compute in f32, and round once as they store. `accumulate` 1 adds to the output; 0
 * overwrites the output, which may be uninitialised or hold NaN. An output may alias an input
 * only where the comment says so. The same inputs give the same bits at any number of threads.
 */
/* An input array and an output array. Each kernel takes one struct made of them; the comment of
 * that struct is the kernel's contract. data may be NULL (the array is absent) where the struct's
 * comment allows it. */
typedef struct mixp_in  { const void *data; mixp_dtype dtype; } mixp_in;
typedef struct mixp_out { void *data; mixp_dtype dtype; int accumulate; } mixp_out;

MIXPREC_HD mixp_in mixpi_in(const void *data, mixp_dtype dtype)
{ mixp_in a = { data, dtype }; return a; }
MIXPREC_HD mixp_out mixpi_out_to(void *data, mixp_dtype dtype, int accumulate)
{ mixp_out a = { data, dtype, accumulate }; return a; }

/* Element i of an array of any dtype as f32, rounded to nearest even where f32 cannot hold it. For
 * your own operators, on the host and in kernels (examples/own_operator.c). */
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
 * x; their slopes are evaluated at the bound, so Inf gives no NaN. */
#define MIXPI_GELU_LINEAR   1.59576912f
#define MIXPI_GELU_CUBIC    0.0713548163f
#define MIXPI_GELU_SLOPE    0.214064449f
#define MIXPI_GELU_BOUND    20.0f       /* of the tanh form of gelu                        */
#define MIXPI_ERF_BOUND     14.5f       /* of the erf form of gelu                         */
#define MIXPI_SILU_BOUND    200.0f      /* e^-200 is 0 already                             */
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

/* y = softmax (or its log) of each row of a[rows, cols]. A row that is all -Inf gives NaN, as in
 * PyTorch. y may be a. */
typedef struct mixp_softmax_args {
    int64_t  rows, cols;
    int      log_of;
    mixp_in  a;
    mixp_out y;
} mixp_softmax_args;

/* da (+)= y (dy - sum(dy y)), or dy - e^y sum(dy) for the log. y is the forward's result. */
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
 * dy. db = a copy of the final da; callers request db only where the table has add_norm and da is
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
typedef struct mixp_embedding_args {
    int64_t        rows, cols, vocab;
    const int32_t *ids;
    mixp_in        table;
    mixp_out       y;
} mixp_embedding_args;

/* dtable[ids[i]] += dy[i] in increasing i, rounded once. Without accumulate, rows that no id names
 * become 0. On an asynchronous device an id out of range adds to no row. */
typedef struct mixp_embedding_backward_args {
    int64_t        rows, cols, vocab;
    const int32_t *ids;
    mixp_in        dy;
    mixp_out       dtable;
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
    float         *top_rsum;    /* [rows, 2], for the backward pass: the row's largest value,
                                   top, and 1 / the sum of exp(x - top). Kept apart, because
                                   one log-sum-exp would lose digits to a large top        */
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

/* dlogits (+)= dloss[0] / counted[0] * (softmax(row) - (1 - smoothing) onehot - smoothing / cols);
 * a row that does not count contributes zeros. With weights w: (softmax ((1 - smoothing) w[target]
 * + smoothing mean(w)) - (1 - smoothing) w[target] onehot - smoothing w / cols). With logs, softmax
 * is 0. dlogits may be logits. */
typedef struct mixp_cross_entropy_backward_args {
    int64_t        rows, cols;
    int32_t        ignore;
    float          smoothing;
    const int32_t *targets;
    mixp_in        dloss, logits;
    const float   *top_rsum, *counted;
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

/* A product fused with a second operation, where the vendor's library can fuse the two. Where it
 * cannot, two kernels run one after the other.
 *
 * ROW_SUMS: c = the result of gemm; sums[m] (+)= the sums of op(a)'s rows. It gives the gradients
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
 * y is rounded once, to nearest. Where the largest score of a query repeats, y is rounded up or
 * down by a hash of its own bits, with the right mean: see mixpi_top_repeats.
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

/* --- numbers below 16 bits --------------------------------------------------------------- */

/* Scales of a quantised array. amax: the largest magnitude of a block, or of the array. max: the
 * largest value of the element. */
typedef enum mixp_block_scale {
    MIXP_SCALE_TENSOR,          /* s = max / amax for the whole array; y = element(x s)    */
    MIXP_SCALE_POWER,           /* s = max / amax rounded down to a power of two, for each block;
                                   y = element(x s) / s                                    */
    MIXP_SCALE_E8M0,            /* d = amax / max rounded to a power of two, for each block; y =
                                   element(x / d) d. See mixp_e8m0_rounding                */
    MIXP_SCALE_E4M3,            /* NVFP4. s = 2688 / the array's amax; for each block d =
                                   e4m3(amax s / 6) and y = element(x s / d) d. See mixp_4over6 */
    MIXP_SCALE_COUNT
} mixp_block_scale;

/* How the e8m0 scale d of a block is rounded; the names are torchao's. RCEIL and CEIL clip no
 * value. FLOOR and EVEN clip the largest values of blocks. The element's top is the largest power
 * of two that the element holds: 2^8 (e4m3), 2^15 (e5m2), 4 (e2m1). d is at least 2^-127. Source:
 * OCP MX 1.0, 6.3 (FLOOR); torchao, ScaleCalculationMode. */
typedef enum mixp_e8m0_rounding {
    MIXP_E8M0_RCEIL,            /* d = amax / max, rounded up to a power of two            */
    MIXP_E8M0_FLOOR,            /* d = amax rounded down to a power of two, / top          */
    MIXP_E8M0_CEIL,             /* d = amax rounded up to a power of two, / top            */
    MIXP_E8M0_EVEN,             /* as FLOOR, after amax is rounded to the element's mantissa bits
                                   (ties upwards)                                          */
    MIXP_E8M0_COUNT
} mixp_e8m0_rounding;

/* 4over6, for E4M3 in blocks of 16: each block is quantised with two scales, and keeps the scale
 * with the smaller error; equal errors keep d6. In f32, each operation rounded:
 *
 *     d6 = e4m3(min(amax / 6 s, 448))        the block's largest value becomes 6
 *     d4 = e4m3(min(amax / 6 s 1.5, 448))    the block's largest value becomes 4
 *     s  = 6 b / A      A: the array's amax; b: 256, or 448 with bound_448
 *     error = the sum of |q d A / (6 b) - x|, or of its square, over the block's elements x, in
 *             order; q: the element's value
 *
 * In a block of 16 x 16 each row has a sum; sums of rows 8 apart are added, then 4, 2 and 1 apart.
 * Source: arXiv 2512.02010; TransformerEngine, NVFP4BlockScaling, nvfp4_4over6. */
typedef enum mixp_4over6 {
    MIXP_4OVER6_NONE,           /* one scale                                               */
    MIXP_4OVER6_MAE,            /* two, compared by absolute errors: TransformerEngine's default */
    MIXP_4OVER6_MSE,            /* two, compared by squared errors: the paper's            */
    MIXP_4OVER6_COUNT
} mixp_4over6;

/* Quantises x[rows, cols] (f32 or bf16, row-major, dense) into y[rows, cols], which must not
 * overlap x. Rounds to nearest even, or stochastically; values beyond the element's largest become
 * the largest. Blocks of block_rows x block_cols each have a scale; TENSOR has one block.
 *
 * NaN stays NaN; for E8M0 and E4M3 the whole block becomes NaN. Inf stays Inf; for E4M3 the whole
 * block becomes NaN. So a product with y is not finite, and a step on an Inf is skipped (see
 * recipe.h). TENSOR, POWER: a block with amax 0, Inf or NaN
 * has s = 1. E4M3: an array with such an amax has s = 1. A block of zeros gives zeros. bf16 holds
 * each y exactly unless |y| is below 2^-126, or 2^128 and above.
 *
 * The same inputs give the same bits on every instruction set and at any number of threads. */
typedef struct mixp_quantise_args {
    int64_t          rows, cols;
    mixp_in          x;
    mixp_bf16       *y;
    mixp_dtype       element;   /* MIXP_F8_E4M3, MIXP_F8_E5M2 or MIXP_F4_E2M1              */
    mixp_block_scale scale;
    mixp_e8m0_rounding e8m0;    /* rounding of the scales of E8M0; otherwise ignored       */
    mixp_4over6      choice;    /* E4M3 with e2m1, not stochastic, in blocks of 1 x 16, 16 x 1 or
                                   16 x 16; NONE for other scales                          */
    int              bound_448; /* 1: b is 448 instead of 256; ignored without choice      */
    int              by_lines;  /* E4M3: 1: each row (blocks of 1 x n), or column (n x 1), counts
                                   as an array of its own, with an amax and an s           */
    float           *lines;     /* by_lines: [rows] or [cols], in device memory: becomes 1 / s of
                                   each, by which its part of a product must be multiplied */
    int64_t          block_rows, block_cols;    /* must divide rows and cols. One of: 1 x n, n x 1,
                                                   n x n, n a multiple of 16; 0 x 0 for TENSOR */
    int              stochastic;    /* 1: e2m1 rounds up when a random number lies below the part
                                       cut off, to within 2^-22                            */
    uint64_t         seed, step, tensor;    /* of mixp_random_u32; the element is the index in x;
                                               ignored unless stochastic                   */
    int              power;     /* TENSOR: 1: s from amax is rounded down to a power of two   */
    float            given;     /* TENSOR: the scale s; 0 = made from the amax of x        */
    const float     *given_at;  /* TENSOR: s in device memory, above 0 and finite; NULL = given */
    float           *amax;      /* TENSOR: becomes the amax of x, in device memory; or NULL   */
    int              amax_joins;    /* 1: *amax becomes the larger of its old value and the amax
                                       of x; a NaN is not larger                           */
    float           *decode;    /* of the kernel, in device memory: becomes the factor by which a
                                   product with y must be multiplied: 1 / s for TENSOR and E4M3,
                                   otherwise, and by_lines, 1. May be NULL                 */
    const float     *times;     /* device memory: *decode is multiplied by it; NULL = 1    */
    float           *own;       /* as decode, without times                                */
    uint8_t         *scales;    /* blocks: [rows / block_rows, cols / block_cols] becomes the factor
                                   that was applied last to each block's elements, as a code of
                                   e8m0 (POWER, E8M0) or e4m3 (E4M3); NULL = unwanted      */
} mixp_quantise_args;

/* Multiplies each group of 16 rows of a, column by column, by diag(signs) H_16 / 4 (a random
 * Hadamard transform). a[rows, cols] f32 or bf16, y[rows, cols], rows a multiple of 16; sums of 16
 * in f32, as a tree, rounded to bf16 once. The transform is orthogonal, so transforming both
 * factors changes their product by rounding only. The signs, and the rounding to bf16 before
 * quantising, are TransformerEngine's. */
typedef struct mixp_hadamard_args {
    int64_t    rows, cols;
    mixp_in    a;
    mixp_bf16 *y;
} mixp_hadamard_args;

/* Turns quantised values y[rows, cols] into codes of their elements, or codes into values. The
 * values of codes are those that were turned into codes, bit for bit; a NaN or Inf becomes some NaN
 * (e2m1: by the NaN of its block's scale). e4m3:
 * one byte an element. e2m1: element i lies in byte i / 2, first in the lower 4 bits. cols is a
 * multiple of 16. The kernel's results are the same on every instruction set and at any number of
 * threads. MIXP_ERR_ARGUMENT: an array is missing, another element or scale, or e2m1 without
 * E4M3. MIXP_ERR_SHAPE: sizes that do not fit. */
typedef struct mixp_recode_args {
    int64_t          rows, cols;
    mixp_bf16       *y;
    uint8_t         *codes;
    mixp_dtype       element;   /* MIXP_F8_E4M3 or MIXP_F4_E2M1                            */
    mixp_block_scale scale;     /* how `quantise` scaled y                                 */
    int64_t          block_rows;/* rows of a block of one column; 0 for TENSOR             */
    const uint8_t   *scales;    /* that `quantise` wrote; ignored for TENSOR               */
    int              decodes;   /* 0: y becomes codes; 1: codes become y                   */
    const float     *own, *times;   /* decodes: as in mixp_quantise_args, both in device memory, */
    float           *decode;        /* *decode becomes *own * *times; NULL = not wanted    */
} mixp_recode_args;

/* How an operand of a product was quantised: fields of mixp_quantise_args. */
typedef struct mixp_narrow {
    mixp_dtype       element;
    mixp_block_scale scale;
    int64_t          block_rows, block_cols;    /* block of the operand as it is stored    */
    const uint8_t   *scales;    /* written by `quantise`; NULL for TENSOR                  */
} mixp_narrow;

/* A product whose operands are quantised values: the result of `gemm` with the same arguments,
 * within the rounding of its sums. a and b of gemm are bf16 and dense. The kernel may multiply
 * codes of 8 or 4 bits in the device's own formats. Where it cannot, it runs `gemm`. */
typedef struct mixp_gemm_narrow_args {
    mixp_gemm_args gemm;
    mixp_narrow    a, b;
} mixp_gemm_narrow_args;

/* What quantising has lost: of each operand of a linear, the most that one array lost. */
typedef struct mixp_losses {
    int64_t seen;               /* bit i: operand i was measured                           */
    double  error[3], clipped[3];
} mixp_losses;

/* Measures what quantising x into y has lost: error is the mean of |y decode - x| / |x|, clipped is
 * the share of values with |x| scale > beyond; over the values that are neither 0 nor NaN. An Inf
 * counts 1 in both. Joins them to operand `operand` of *out. n elements; x f32 or bf16; all in
 * device memory. */
typedef struct mixp_lose_args {
    int64_t          n;
    mixp_in          x;
    const mixp_bf16 *y;
    const float     *decode;    /* NULL = 1                                                */
    const float     *lines;     /* replaces decode: a factor for each row of n / cols, or for each
                                   column with of_columns; NULL = decode counts            */
    int64_t          cols;      /* with lines                                              */
    int              of_columns;
    const float     *scale;     /* scale of delayed scaling; if it is 1, the first scale, nothing
                                   is measured. NULL = no finite value is clipped          */
    double           beyond;
    int              operand;   /* 0 to 2                                                  */
    mixp_losses     *out;
} mixp_lose_args;

/* Sums over the elements of an array. */
typedef struct mixpi_loss { double error; int64_t seen, clipped; } mixpi_loss;

/* Adds the loss of x, which was quantised to y. scale 0: no finite value is clipped. */
MIXPREC_HD void mixpi_loss_add(mixpi_loss *sum, float x, double y, double scale, double beyond) {
    const uint32_t a = mixp_bits_of_f32(x) & 0x7FFFFFFFu;
    const double size = MIXPI_LIBM(fabs)((double)x);
    if (!a || a > 0x7F800000u) return;
    sum->seen++;
    if (a == 0x7F800000u) {
        sum->error += 1.0;
        sum->clipped++;
        return;
    }
    sum->error += MIXPI_LIBM(fabs)(y - (double)x) / size;
    sum->clipped += scale > 0.0 && size * scale > beyond;
}

/* Delayed scaling: ends an update of the operands of one linear, n of them. history[n, length] has
 * the newest amax of each operand first, then earlier ones from old to new. For each operand whose
 * newest amax is above 0: amax = the newest, or the largest of the history; scales[i] = limits[i] /
 * amax if amax is finite and above 0; the history moves by one place: its first place becomes 0,
 * and the newest amax becomes the last. The histories hold no NaN. */
enum { MIXP_TURN_OPERANDS = 3 };
typedef struct mixp_turn_args {
    int    n, length;           /* 1 to MIXP_TURN_OPERANDS; 1 to 2^20                      */
    int    most_recent;         /* 1: amax is the newest; 0: the largest of the history    */
    float  limits[MIXP_TURN_OPERANDS];
    float *history, *scales;    /* device memory                                           */
} mixp_turn_args;

/* The scale after an update. newest: above 0; largest: of the history. */
MIXPREC_HD float mixpi_delayed_scale(const mixp_turn_args *k, int i, float newest, float largest,
                                     float old) {
    const uint32_t amax = mixp_bits_of_f32(k->most_recent ? newest : largest);
    return mixpi_amax_is_usable(amax) ? mixpi_scale_to(k->limits[i], amax) : old;
}

/* The sign of row i of 16. */
MIXPREC_HD float mixpi_hadamard_sign(int i) { return 0xD7E8u >> i & 1u ? -1.0f : 1.0f; }

/* What is wrong with a call of `quantise`; MIXP_OK: nothing. */
MIXPREC_HD mixp_result mixpi_quantise_wrong(const mixp_quantise_args *k) {
    const int64_t r = k->block_rows, c = k->block_cols;
    const int element = k->element == MIXP_F8_E4M3 || k->element == MIXP_F8_E5M2 ||
                        k->element == MIXP_F4_E2M1;
    if (!k->x.data || !k->y || k->rows < 1 || k->cols < 1) return MIXP_ERR_ARGUMENT;
    if (!element || (unsigned)k->scale >= MIXP_SCALE_COUNT) return MIXP_ERR_ARGUMENT;
    if ((unsigned)k->e8m0 >= MIXP_E8M0_COUNT) return MIXP_ERR_ARGUMENT;
    if (k->stochastic && k->element != MIXP_F4_E2M1) return MIXP_ERR_ARGUMENT;
    if ((unsigned)k->choice >= MIXP_4OVER6_COUNT) return MIXP_ERR_ARGUMENT;
    if (k->choice && (k->scale != MIXP_SCALE_E4M3 || k->element != MIXP_F4_E2M1 || k->stochastic))
        return MIXP_ERR_ARGUMENT;
    if (k->by_lines && (k->scale != MIXP_SCALE_E4M3 || !k->lines)) return MIXP_ERR_ARGUMENT;
    if (!(k->given >= 0.0f && k->given < mixp_f32_of_bits(0x7F800000u))) return MIXP_ERR_ARGUMENT;
    if (k->x.dtype != MIXP_F32 && k->x.dtype != MIXP_BF16) return MIXP_ERR_DTYPE;
    if (k->scale == MIXP_SCALE_TENSOR)
        return r == 0 && c == 0 && !k->scales ? MIXP_OK : MIXP_ERR_SHAPE;
    if (r < 1 || c < 1 || k->rows % r || k->cols % c) return MIXP_ERR_SHAPE;
    if (k->choice && (r > 16 || c > 16)) return MIXP_ERR_SHAPE;
    if (k->by_lines && r > 1 && c > 1) return MIXP_ERR_SHAPE;
    if (r == 1) return c % 16 ? MIXP_ERR_SHAPE : MIXP_OK;
    return r % 16 == 0 && (c == 1 || c == r) ? MIXP_OK : MIXP_ERR_SHAPE;
}

/* What is wrong with a call of `recode`; MIXP_OK: nothing. */
MIXPREC_HD mixp_result mixpi_recode_wrong(const mixp_recode_args *k) {
    const int blocks = k->scale != MIXP_SCALE_TENSOR;
    if (!k->y || !k->codes || (blocks && !k->scales)) return MIXP_ERR_ARGUMENT;
    if (k->rows < 1 || k->cols < 1) return MIXP_ERR_ARGUMENT;
    if ((unsigned)k->scale >= MIXP_SCALE_COUNT) return MIXP_ERR_ARGUMENT;
    if (k->element != MIXP_F8_E4M3 && k->element != MIXP_F4_E2M1) return MIXP_ERR_ARGUMENT;
    if (k->element == MIXP_F4_E2M1 && k->scale != MIXP_SCALE_E4M3) return MIXP_ERR_ARGUMENT;
    if (k->decodes && k->decode && !k->own) return MIXP_ERR_ARGUMENT;
    if (k->cols % 16) return MIXP_ERR_SHAPE;
    if (!blocks) return k->block_rows ? MIXP_ERR_SHAPE : MIXP_OK;
    return k->block_rows > 0 && k->rows % k->block_rows == 0 ? MIXP_OK : MIXP_ERR_SHAPE;
}

/* What is wrong with a call of `hadamard`; MIXP_OK: nothing. */
MIXPREC_HD mixp_result mixpi_hadamard_wrong(const mixp_hadamard_args *k) {
    if (!k->a.data || !k->y || k->rows < 1 || k->cols < 1) return MIXP_ERR_ARGUMENT;
    if (k->a.dtype != MIXP_F32 && k->a.dtype != MIXP_BF16) return MIXP_ERR_DTYPE;
    return k->rows % 16 ? MIXP_ERR_SHAPE : MIXP_OK;
}

/* The largest value of an array's elements times their blocks' scales, for E4M3. */
MIXPREC_HD float mixpi_e4m3_bound(const mixp_quantise_args *k)
{ return 6.0f * (k->choice && !k->bound_448 ? 256.0f : 448.0f); }

/* The scale of a whole array with this amax; 1 where only blocks have scales. */
MIXPREC_HD float mixpi_scale_of_array(const mixp_quantise_args *k, uint32_t amax) {
    float s;
    if (k->scale == MIXP_SCALE_E4M3) return mixpi_scale_to(mixpi_e4m3_bound(k), amax);
    if (k->scale != MIXP_SCALE_TENSOR) return 1.0f;
    if (k->given_at) return *k->given_at;
    if (k->given > 0.0f) return k->given;
    s = mixpi_scale_to(mixpi_grid_of(k->element).largest, amax);
    return k->power ? mixp_f32_of_bits(mixp_bits_of_f32(s) & 0xFF800000u) : s;
}

/* Does an array have such a scale? */
MIXPREC_HD int mixpi_has_scale_of_array(mixp_block_scale kind)
{ return kind == MIXP_SCALE_TENSOR || kind == MIXP_SCALE_E4M3; }

/* Gives the amax of x to the caller of `quantise`. */
MIXPREC_HD void mixpi_give_amax(const mixp_quantise_args *k, uint32_t amax) {
    const float found = mixp_f32_of_bits(amax);
    if (k->scale != MIXP_SCALE_TENSOR || !k->amax) return;
    if (!k->amax_joins || found > *k->amax) *k->amax = found;
}

/* The number of lines: rows, or columns. */
MIXPREC_HD int64_t mixpi_quantise_lines(const mixp_quantise_args *k)
{ return k->block_cols == 1 ? k->cols : k->rows; }

/* Does `quantise` need the amax of the array? */
MIXPREC_HD int mixpi_needs_amax(const mixp_quantise_args *k) {
    const int given = k->given_at || k->given > 0.0f;
    return mixpi_has_scale_of_array(k->scale) && !k->by_lines &&
           !(k->scale == MIXP_SCALE_TENSOR && given && !k->amax);
}

/* What rounds the bits of amax when only its exponent is kept; not for RCEIL. */
MIXPREC_HD uint32_t mixpi_e8m0_add(const mixpi_grid *g, mixp_e8m0_rounding how) {
    if (how == MIXP_E8M0_EVEN) return 1u << (g->shift - 1);
    return how == MIXP_E8M0_CEIL ? 0x7FFFFFu : 0u;
}

/* The biased exponent of a block's e8m0 scale. */
MIXPREC_HD int mixpi_e8m0_of(const mixpi_grid *g, mixp_e8m0_rounding how, uint32_t amax) {
    if (how == MIXP_E8M0_RCEIL) return mixpi_e8m0_above(g->largest, amax);
    return mixpi_e8m0_of_power(g, mixpi_e8m0_add(g, how), amax);
}

/* The code of the factor by which a block's elements are multiplied last, and the factor. A factor
 * of 0 is returned as 1: the block's values are zeros. */
MIXPREC_HD uint8_t mixpi_scale_code(mixp_block_scale kind, float out) {
    if (kind == MIXP_SCALE_E4M3) return mixp_e4m3_from_f32(out).bits;
    return (uint8_t)(mixp_bits_of_f32(out) >> 23 & 0xFFu);
}
MIXPREC_HD float mixpi_scale_of_code(mixp_block_scale kind, uint8_t code) {
    if (kind == MIXP_SCALE_E4M3) return code ? mixp_f32_of_bits(mixpi_f32_of_e4m3(code)) : 1.0f;
    return code == 255 ? mixp_f32_of_bits(0x7FC00000u) : mixpi_q_power(code);
}

/* 4over6: the value that x becomes with the scales s. */
MIXPREC_HD float mixpi_4over6_value(const mixpi_grid *g, mixpi_scales s, float x) {
    const uint32_t v = mixp_bits_of_f32(x * s.in);
    const uint32_t q = mixpi_grid_round(g, v & 0x7FFFFFFFu) | (v & 0x80000000u);
    return mixp_f32_of_bits(q) * s.out;
}

/* 4over6: what an element x adds to the error of its block's scales s. array: the array's amax. */
MIXPREC_HD float mixpi_4over6_error(const mixp_quantise_args *k, const mixpi_grid *g, float array,
                                    mixpi_scales s, float x) {
    const float value = mixpi_4over6_value(g, s, x) * array / mixpi_e4m3_bound(k);
    const float difference = value - x;
    if (k->choice == MIXP_4OVER6_MSE) return mixpi_rounded_product(difference, difference);
    return mixp_f32_of_bits(mixp_bits_of_f32(difference) & 0x7FFFFFFFu);
}

/* 4over6: the scales that a block keeps; errors: with the scale for 4, and for 6. A NaN of an error
 * keeps the scale for 6. */
MIXPREC_HD mixpi_scales mixpi_4over6_choose(const float errors[2], mixpi_scales four,
                                            mixpi_scales six) {
    return errors[0] < errors[1] ? four : six;
}

/* The scales of a block; with 4over6 those for 6. tensor: the array's. */
MIXPREC_HD mixpi_scales mixpi_scales_of(const mixp_quantise_args *k, const mixpi_grid *g,
                                        float tensor, uint32_t amax) {
    mixpi_scales s = { 1.0f, 1.0f };
    switch (k->scale) {
    case MIXP_SCALE_POWER: return mixpi_scales_power(g->largest, amax);
    case MIXP_SCALE_E8M0:  return mixpi_scales_e8m0(mixpi_e8m0_of(g, k->e8m0, amax), amax);
    case MIXP_SCALE_E4M3:  return mixpi_scales_e4m3(tensor, k->choice ? 1.0f : 0.0f, amax);
    case MIXP_SCALE_TENSOR:
    case MIXP_SCALE_COUNT:
    default: s.in = tensor; return s;
    }
}

/* --- what kernels are given --------------------------------------------------------------- */

/* dst = src, n elements of any dtype to any dtype. Integers convert exactly or saturate. dst may
 * be src when dst's elements are not wider. dst cannot accumulate: MIXP_ERR_ARGUMENT. */
typedef struct mixp_convert_args {
    int64_t       n;
    mixp_in       src;
    mixp_out      dst;
    mixp_rounding rounding;     /* zeroed: to nearest even                                 */
} mixp_convert_args;

/* Sets n elements of dst, of any dtype, to value. dst cannot accumulate: MIXP_ERR_ARGUMENT. */
typedef struct mixp_fill_args {
    int64_t  n;
    double   value;
    mixp_out dst;
} mixp_fill_args;

/* dst[i . dst_strides] (+)= src[i . src_strides] over every index i of shape (rank 0..8). Equal
 * dtypes without accumulate: a copy of bits, of any dtype. Otherwise both must be real. */
typedef struct mixp_copy_args {
    int      rank;
    int64_t  shape[MIXP_MAX_RANK];
    mixp_in  src;
    int64_t  src_strides[MIXP_MAX_RANK];
    mixp_out dst;
    int64_t  dst_strides[MIXP_MAX_RANK];
} mixp_copy_args;

/* y (+)= op(a), n elements. y may be a. real. */
typedef struct mixp_unary_args {
    mixp_unary op;
    float      p, q;            /* see mixp_unary                                          */
    int64_t    n;
    mixp_in    a;
    mixp_out   y;
} mixp_unary_args;

/* da (+)= dy * op'(a), n elements. y: the forward's result. da may be dy. The slopes of exp, tanh,
 * sigmoid, sqrt and root use only y, those of scale and affine neither, all others only a; the
 * unused arrays may be absent. */
typedef struct mixp_unary_backward_args {
    mixp_unary op;
    float      p, q;
    int64_t    n;
    mixp_in    dy, a, y;
    mixp_out   da;
} mixp_unary_backward_args;

/* binary: y (+)= a op b over shape (rank 0..8), y dense; a stride of 0 repeats an element. y may be
 * a or b where that operand is dense. real.
 * binary_backward: dx (+)= the gradient of operand `which`, summed over the axes along which the
 * operand was repeated. dx is dense in the operand's own shape and uses the operand's strides. */
typedef struct mixp_binary_args {
    mixp_binary op;
    int         rank;
    int64_t     shape[MIXP_MAX_RANK];
    mixp_in     a, b;
    int64_t     a_strides[MIXP_MAX_RANK], b_strides[MIXP_MAX_RANK];
    mixp_out    y;              /* result of binary                                        */
    int         which;          /* binary_backward: operand of the gradient, 0 = a, 1 = b  */
    mixp_in     dy;
    mixp_out    dx;
} mixp_binary_args;

/* POWER, ATAN2 and PRELU, which host and devices compute one element at a time. slope: dy times the
 * slope by operand `which`. The slopes are 0 where PyTorch's are: a power's by a where b is 0, and
 * by b where a is 0 and b is not below 0; those of atan2 where a^2 + b^2 is 0. */
MIXPREC_HD float mixpi_pair_value(mixp_binary op, float a, float b) {
    if (op == MIXP_BINARY_POWER) return MIXPI_LIBM(powf)(a, b);
    if (op == MIXP_BINARY_ATAN2) return MIXPI_LIBM(atan2f)(a, b);
    return a > 0.0f ? a : b * a;
}
MIXPREC_HD float mixpi_pair_slope(mixp_binary op, int which, float dy, float a, float b) {
    if (op == MIXP_BINARY_POWER) {
        if (which && a == 0.0f && b >= 0.0f) return 0.0f;
        if (which) return dy * (MIXPI_LIBM(powf)(a, b) * MIXPI_LIBM(logf)(a));
        return b == 0.0f ? 0.0f : dy * (b * MIXPI_LIBM(powf)(a, b - 1.0f));
    }
    if (op == MIXP_BINARY_ATAN2) {
        const float square = a * a + b * b;
        return square == 0.0f ? 0.0f : dy * ((which ? -a : b) / square);
    }
    if (which) return a > 0.0f ? 0.0f : dy * a;
    return a > 0.0f ? dy : dy * b;
}

/* The arguments of the function that computes the operand's gradient, in order: a, b, and d for dy.
 * MINIMUM uses MAXIMUM's function with the operands exchanged. The gradient of silu(a) b with
 * respect to b is silu(a) dy. */
MIXPREC_HD const char *mixpi_binary_slope_of(const mixp_binary_args *k) {
    switch (k->op) {
    case MIXP_BINARY_ADD:
    case MIXP_BINARY_SUB: return "d";
    case MIXP_BINARY_MUL: return k->which ? "da" : "db";
    case MIXP_BINARY_DIV: return k->which ? "dab" : "db";
    case MIXP_BINARY_MAXIMUM: return k->which ? "dba" : "dab";
    case MIXP_BINARY_MINIMUM: return k->which ? "dab" : "dba";
    case MIXP_BINARY_SWIGLU: return k->which ? "ad" : "dab";
    case MIXP_BINARY_POWER:
    case MIXP_BINARY_ATAN2:
    case MIXP_BINARY_PRELU: return "dab";
    case MIXP_BINARY_COUNT: break;
    }
    return "";
}

/* reduce: y[outer, inner] (+)= factor * sum over n of a[outer, n, inner], in a fixed order.
 * reduce_backward undoes it: y[outer, n, inner] (+)= factor * a[outer, inner]. real. */
typedef struct mixp_reduce_args {
    int64_t  outer, n, inner;
    float    factor;
    mixp_in  a;
    mixp_out y;
} mixp_reduce_args;

/* y (+)= a / (1-p) where kept, else 0, n elements. Element i is kept when mixp_random_u32(seed,
 * step, tensor, i) >= p * 2^32. For the backward pass, a is dy. y may be a. real. p outside [0, 1]:
 * MIXP_ERR_ARGUMENT. */
typedef struct mixp_dropout_args {
    int64_t  n;
    float    p;
    uint64_t seed, step, tensor;
    mixp_in  a;
    mixp_out y;
} mixp_dropout_args;

/* y (+)= a * factor[0], the product in f32, n elements. factor: device memory. y may be a, except
 * with bad. real. bad, unless NULL, becomes 1 when an element of a is Inf or NaN; otherwise *bad
 * stays as it was. */
typedef struct mixp_scale_by_args {
    int64_t      n;
    const float *factor;
    mixp_in      a;
    mixp_out     y;
    int32_t     *bad;
} mixp_scale_by_args;

/* One parameter as the optimizer's kernels see it. An array of these rows is uploaded once. The
 * dtype of a state identifies its kind. master: f32, bf16 (MIXP_MASTER_16BIT) or u8
 * (MIXP_MASTER_8BIT). m: f32, bf16, or f8_e4m3 in blocks. v: f32, bf16, or u8 in blocks. */
typedef struct mixp_param_row {
    void      *weight;          /* what the model reads: real                              */
    void      *grad;            /* real                                                    */
    void      *master;          /* master weight; NULL when weight is f32                  */
    void      *m, *v;           /* moments; v NULL for SGD, m NULL without momentum        */
    mixp_f16  *low_f16;         /* copies for autocast, refreshed by the update, or NULL   */
    mixp_bf16 *low_bf16;
    int64_t    count;
    mixp_dtype weight_dtype, grad_dtype, master_dtype, m_dtype, v_dtype;
    int        group;           /* index of its hyper-parameters                           */
    int        active;          /* 0: no gradient in this step: unchanged. 1: is updated.
                                   2: is updated and its gradient is cleared, which is
                                   done in a skipped step as well                          */
    int64_t   *missed;          /* number of applied steps that did not update it, or NULL */
    uint8_t   *m_scale, *v_scale;   /* moments in blocks: an f8_e8m0 per block, or NULL    */
    uint64_t   tensor;          /* part of the key of its random numbers                   */
    float      rate;            /* Muon: factor of the learning rate for the matrix's shape;
                                   averages: 1 - decay                                     */
    float     *third;           /* amsgrad: the largest v so far; centered: the mean gradient; or
                                   NULL                                                    */
} mixp_param_row;

/* One pass over all gradients of active rows: found_inf, sum of squares, largest, first bad
 * element, into `step`. rows, step, scaler and scale: device memory. */
typedef struct mixp_grad_stats_args {
    const mixp_param_row *rows;
    int64_t               count;
    const float          *scale;    /* the gradients' loss scale; NULL = 1                 */
    int                   unscale;  /* 1: also multiplies them by 1/scale in place         */
    mixp_step_state      *step;
    const mixp_step_plan *plan;     /* host memory; not NULL: also does `prepare`'s work   */
    mixp_scaler_state    *scaler;   /* used with plan; NULL = none                         */
} mixp_grad_stats_args;

/* Multiplies the gradients of active rows by the clip coefficient for max_norm and the norm in
 * `step`. Does nothing when step->stats.found_inf. */
typedef struct mixp_clip_args {
    const mixp_param_row *rows;
    int64_t               count;
    double                max_norm;
    mixp_step_state      *step;
} mixp_clip_args;

/* All scalar work of one step: decides apply or skip, counts the step, computes learning rates and
 * bias corrections, and ORs found_inf into the scaler. Runs mixp_step_prepare once on the device.
 * Used when the statistics changed after grad_stats (clipping, a reduction over machines), or when
 * there are no statistics. */
typedef struct mixp_prepare_args {
    const mixp_step_plan *plan;     /* host memory                                         */
    mixp_step_state      *step;
    mixp_scaler_state    *scaler;   /* NULL = none                                         */
} mixp_prepare_args;

/* One pass over all active rows: applies the update that `step` prescribes. When the step is
 * skipped, only clears gradients. */
typedef struct mixp_update_args {
    const mixp_step_plan  *plan;    /* host memory                                         */
    const mixp_param_row  *rows;
    int64_t                count;
    const mixp_step_state *step;
    struct mixp_lost      *lost;    /* device memory, one per row: counts are added; or NULL */
} mixp_update_args;

/* Counts of a parameter's elements. updates: elements whose update is not 0. lost: updates that
 * would not change the weight if it were stored only in its low dtype, that is, if weight and sum
 * were rounded to the low dtype. */
typedef struct mixp_lost { int64_t updates, lost; } mixp_lost;

/* The low dtype of a row's weight or of its low copy; f16 for a row without either. */
MIXPREC_HD mixp_dtype mixpi_row_low_weight(const mixp_param_row *row) {
    if (row->weight_dtype != MIXP_F32) return row->weight_dtype;
    return row->low_bf16 && !row->low_f16 ? MIXP_BF16 : MIXP_F16;
}

MIXPREC_HD float mixpi_through_low(mixp_dtype low, float x) {
    return low == MIXP_BF16 ? mixp_f32_from_bf16(mixp_bf16_from_f32(x))
                            : mixp_f32_from_f16(mixp_f16_from_f32(x));
}

/* Is the update from `was` to `now` lost (see mixp_lost)? */
MIXPREC_HD int mixpi_update_is_lost(mixp_dtype low, float was, float now) {
    float held = mixpi_through_low(low, was);
    float moved = mixpi_through_low(low, held + (now - was));
    return moved == held;
}

/* The result of one look at an array; counts are of elements. An array already stored in `low` does
 * not show how many elements were flushed to zero. `least` gives an estimate: where the density is
 * flat near 0, half as many elements were flushed as now hold the smallest subnormal. */
typedef struct mixp_look {
    float   largest;            /* largest finite magnitude; 0 without a finite element */
    int32_t nan;                /* 1: an element is NaN */
    int64_t count;              /* elements looked at */
    int64_t nonfinite, zeros;
    int64_t flushed;            /* elements other than 0 that round to 0 in `low` */
    int64_t least;              /* elements that round to the smallest subnormal of `low` */
    int64_t subnormal;          /* elements that round to a subnormal of `low`, the smallest
                                   included                                                  */
    int64_t saturated;          /* finite elements that round beyond the largest number
                                   of `low`; a saturating cast makes them that number     */
} mixp_look;

/* mixp_scaler_advance on the device, with the found_inf that prepare collected. `forgives` and
 * `falls`: see mixp_scaler_advance_guarded. */
typedef struct mixp_advance_args {
    const mixp_scaler_rule *rule;   /* host memory                                         */
    mixp_scaler_state      *scaler;
    int32_t                 forgives;   /* 0: no guard is on                               */
    int32_t                 falls;  /* how many sites have fallen back so far              */
    const mixp_look        *wide;   /* device memory: the look at this update's scaled f32
                                       gradients, for rules that predict; NULL = not seen   */
    const mixp_look        *narrow; /* device memory: the look at its f16 and bf16 gradients */
} mixp_advance_args;

/* Puts back what a skipped step wrote: if any flag is not 0, copies each part's bytes from `from`
 * to `to`. The parts do not overlap. flags: device memory. */
#define MIXP_RESTORE_FLAGS 4
#define MIXP_RESTORE_PARTS 16
typedef struct mixp_restore_part {
    void       *to;             /* device memory, like from                                */
    const void *from;
    size_t      bytes;
} mixp_restore_part;

typedef struct mixp_restore_args {
    int               n_flags, n_parts;
    const int32_t    *flags[MIXP_RESTORE_FLAGS];
    mixp_restore_part parts[MIXP_RESTORE_PARTS];
} mixp_restore_args;

/* The most backoffs by which the guard lowers a scale below the rule's own backoff. It stops at a
 * scale of 2: at 1 and below, the gradient's site falls back instead. */
enum { MIXPI_MOST_BACKOFFS = 16 };

/* After the second overflow in a row: the size of an overflow is unknown, so the scale goes far
 * below. narrow: the look at this update's low gradients, or NULL. */
MIXPREC_HD void mixpi_scaler_dive(mixp_scaler_state *s, const mixp_scaler_rule *r, float before,
                                  const mixp_look *narrow) {
    const int again = s->ahead > 0.0f;
    int i;
    if (!(s->scale < before)) return;           /* the scale did not fall: hysteresis, a
                                                   fixed scale, or the floor                 */
    s->ahead = s->scale;
    if (!again || r->predicts || !narrow || !narrow->nonfinite) return;
    for (i = 0; i < MIXPI_MOST_BACKOFFS; i++) {
        const float lower = mixpi_scaler_lower(s->scale, r);
        if (lower < 2.0f) return;
        s->scale = lower;
    }
}

/* After a clean step: the scale returns to the first backoff under which the gradients that were
 * seen reach at most half of the largest low number, as if each backoff had cost a step. Waits for
 * a step that was seen. before: the scale of that step. */
MIXPREC_HD void mixpi_scaler_surface(mixp_scaler_state *s, const mixp_scaler_rule *r, float before,
                                     const mixp_look *narrow) {
    float at = s->ahead;
    double largest;
    if (!(at > before)) s->ahead = 0.0f;
    if (!(at > before) || !narrow || !narrow->count) return;
    s->ahead = 0.0f;
    largest = (double)narrow->largest / (double)before;
    while (at > before && largest * (double)at > 0.5 * (double)r->low_largest) {
        const float lower = mixpi_scaler_lower(at, r);
        if (!(lower < at)) break;
        at = lower;
    }
    if (at > s->scale) s->scale = at;
}

/* The work of the kernel `advance`, one function for every device. No scale cures a non-finite
 * loss. So up to `forgives` skips in a row with a non-finite loss leave the scale as it is; the
 * count restarts each time `falls` has changed. Every other skip lowers the scale: a guard that
 * finds nothing to fix must not keep a run from ending. Where a guard is on and has seen the
 * gradients (narrow), two skips find the scale to which many backoffs lead. */
MIXPREC_HD void mixp_scaler_advance_guarded(mixp_scaler_state *s, const mixp_scaler_rule *r,
                                            int32_t forgives, int32_t falls,
                                            const mixp_look *narrow) {
    const int bad = s->found_inf, forward = s->loss_bad;
    const float before = s->scale;
    if (!bad || s->forgiven_at != falls) s->forgiven = 0;
    s->forgiven_at = falls;
    if (bad && forward && s->forgiven < forgives) {
        s->forgiven++;
        mixpi_scaler_forgive(s, r);
        return;
    }
    mixp_scaler_advance(s, r, bad);
    if (forgives && bad) mixpi_scaler_dive(s, r, before, forward ? NULL : narrow);
    else if (forgives)   mixpi_scaler_surface(s, r, before, narrow);
}

/* Thresholds of rounding to a format, as bits of f32 magnitudes. */
typedef struct mixpi_look_limits { uint32_t flushed, least, subnormal, past; } mixpi_look_limits;

MIXPREC_HD mixpi_look_limits mixpi_look_limits_of(mixp_dtype low) {
    const mixp_format f = mixp_format_of(low);
    const double normal = MIXPI_LIBM(ldexp)(1.0, 1 - f.bias);
    const double tiny = MIXPI_LIBM(ldexp)(normal, -f.mantissa_bits);
    const uint64_t top = mixpi_max_code(f);
    const double most = mixp_decode(low, top), before = mixp_decode(low, top - 1u);
    const double past = most + 0.5 * (most - before);
    mixpi_look_limits at;
    at.flushed = (uint32_t)mixp_encode(MIXP_F32, 0.5 * tiny, 0);    /* a tie goes to 0 */
    at.least = (uint32_t)mixp_encode(MIXP_F32, 1.5 * tiny, 0);      /* the first above `least` */
    at.subnormal = (uint32_t)mixp_encode(MIXP_F32, normal - 0.5 * tiny, 0);
    at.past = (uint32_t)mixp_encode(MIXP_F32, past, 0);
    if (mixp_encode(low, past, 0) == top) at.past++;    /* a tie goes to the even one */
    return at;
}

#define MIXP_EXPONENTS 256      /* values of an f32's exponent, bits 23 to 30           */

/* Looks at n elements of x (real) and merges the result into `row`, and into `total` unless NULL:
 * adds the counts and keeps the larger magnitude. exponents, unless NULL: 256 counts of elements
 * by exponent, bits 23 to 30 of the element as f32. Bin 0 holds zeros and subnormals, bin 255 Inf
 * and NaN. low: f32, f16, bf16, or an fp8 format with a sign. row, total and exponents: device
 * memory. The results are integers and a maximum, so they are the same on every device. */
typedef struct mixp_look_args {
    int64_t    n;
    mixp_in    x;
    mixp_dtype low;
    mixp_look *row, *total;
    int64_t   *exponents;
} mixp_look_args;

/* Agreement of the ranks, between grad_stats and prepare. It has two halves, with a sum over ranks
 * between them. The first half fills this rank's row of table and zeros the other rows. The second
 * half (`reads` 1) reads the results of all ranks from the summed table. See mixp_agree_fill and
 * mixp_agree_read. looks: the result of grad_stats for each bucket of gradients, before the bucket
 * was summed. first_leaf: the index of each bucket's first gradient. in_parts: the sums are
 * scattered, and step describes only this rank's part. All pointers but plan: device memory. */
typedef struct mixp_agree_args {
    const mixp_step_plan    *plan;      /* host memory                                     */
    const mixp_step_state   *looks;
    const int64_t           *first_leaf;
    int64_t                  n_looks;
    mixp_scaler_state       *scaler;    /* NULL = none                                     */
    mixp_step_state         *step;
    double                  *table;     /* size rows of MIXP_AGREE_WORDS                   */
    int                      rank, size, reads;
    int                      in_parts;
} mixp_agree_args;

/* where: y (+)= mask ? a : b over shape (rank 0..8), y dense; a stride of 0 repeats an element.
 * The mask is true where it is not 0; NaN counts as 0. If a or b is absent, `value` replaces each
 * of its elements. real.
 * where_backward: dx (+)= dy where the mask chooses operand `which`, else 0. dx is summed over the
 * repeated axes and addressed as in binary_backward. */
typedef struct mixp_where_args {
    int      rank;
    int64_t  shape[MIXP_MAX_RANK];
    mixp_in  mask, a, b;
    int64_t  mask_strides[MIXP_MAX_RANK], a_strides[MIXP_MAX_RANK], b_strides[MIXP_MAX_RANK];
    float    value;
    mixp_out y;                 /* result of where                                         */
    int      which;             /* where_backward: operand of the gradient, 0 = a, 1 = b   */
    mixp_in  dy;
    mixp_out dx;
} mixp_where_args;

/* y[outer, inner] = the largest over n of a[outer, n, inner]; NaN counts as the largest. index: the
 * position of the first largest element. ties: the number of largest elements. index and ties have
 * outer * inner values each. y and ties may be absent. n is from 1 to 2^31 - 1. real. */
typedef struct mixp_max_args {
    int64_t  outer, n, inner;
    mixp_in  a;
    mixp_out y;
    int32_t *index, *ties;
} mixp_max_args;

/* da[outer, n, inner] (+)= dy[outer, inner] at the first largest element, else 0. With shared: dy
 * / ties at every largest element. index, ties: the results of max. */
typedef struct mixp_max_backward_args {
    int64_t        outer, n, inner;
    int            shared;
    mixp_in        a, dy;       /* a: read only when shared                                */
    const int32_t *index, *ties;
    mixp_out       da;
} mixp_max_backward_args;

/* gather: y[o, j, i] = a[o, ids[o, j, i], i] for o, j, i in [outer, m, inner]. ids are in [0, n);
 * ids out of range are treated as embedding's are.
 * gather_backward: y[o, ids[o, j, i], i] += a[o, j, i] in increasing j, each sum rounded to y's
 * dtype. y is [outer, n, inner] and must accumulate, otherwise MIXP_ERR_ARGUMENT. real. */
typedef struct mixp_gather_args {
    int64_t        outer, n, m, inner;
    const int32_t *ids;
    mixp_in        a;
    mixp_out       y;
} mixp_gather_args;

/* Rotates the pairs (p, q) of each head of a[rows, t, heads, d] by the angle position *
 * base^(-2i/d), i = 0 .. d/2 - 1 (rotary embeddings, Su et al., 2021): y (+)= (p cos - q sin,
 * q cos + p sin). Positions count from `first` along t. Pair i is elements (i, i + d/2), or
 * (2i, 2i + 1) when interleaved. Angles are computed in f64, the rest in f32. y may be a. real. */
typedef struct mixp_rope_args {
    int64_t  rows, t, heads, d; /* d: even                                                 */
    int64_t  first;
    double   base;
    int      interleaved;
    int      back;              /* 1: rotates by the negative angle (the backward pass)    */
    mixp_in  a;
    mixp_out y;
} mixp_rope_args;

typedef enum mixp_random_kind {
    MIXP_RANDOM_UNIFORM,        /* at + by z, z uniform in [0, 1)                          */
    MIXP_RANDOM_NORMAL,         /* at + by z, z standard normal                            */
    MIXP_RANDOM_BERNOULLI,      /* 1 with probability at, otherwise 0                      */
    MIXP_RANDOM_COUNT
} mixp_random_kind;

/* y = n random numbers; those of element i come from mixp_random_u32(seed, step, tensor, i), for
 * NORMAL from elements 2i and 2i + 1. z of UNIFORM is a multiple of 2^-24 for f32, 2^-11 for f16
 * and 2^-8 for bf16, so that rounding gives no 1. MIXP_ERR_ARGUMENT: y accumulates, or an unknown
 * kind, or a probability outside [0, 1]. */
typedef struct mixp_random_args {
    mixp_random_kind kind;
    int64_t  n;
    float    at, by;
    uint64_t seed, step, tensor;
    mixp_out y;                 /* real                                                    */
} mixp_random_args;

/* Element i of the result of random, before it is rounded. */
MIXPREC_HD float mixpi_random_value(const mixp_random_args *k, uint64_t key, int64_t i) {
    const uint64_t at = (uint64_t)i;
    int digits = k->y.dtype == MIXP_F32 ? 24 : k->y.dtype == MIXP_F16 ? 11 : 8;
    if (k->kind == MIXP_RANDOM_BERNOULLI)
        return (double)mixp_random_at(key, at) < (double)k->at * 4294967296.0 ? 1.0f : 0.0f;
    if (k->kind == MIXP_RANDOM_NORMAL)
        return mixpi_fmaf(k->by, mixpi_normal_of(mixp_random_at(key, 2 * at),
                                                 mixp_random_at(key, 2 * at + 1)), k->at);
    return mixpi_fmaf(k->by, (float)(mixp_random_at(key, at) >> (32 - digits)) *
                                 (1.0f / (float)(1 << digits)), k->at);
}

typedef enum mixp_comparison {
    MIXP_COMPARE_EQ, MIXP_COMPARE_NE, MIXP_COMPARE_GT, MIXP_COMPARE_GE, MIXP_COMPARE_LT,
    MIXP_COMPARE_LE, MIXP_COMPARE_COUNT
} mixp_comparison;

/* y = 1 where a is as `how` says beside b, else 0, over shape (rank 0..8), y dense; a stride of 0
 * repeats an element. Compares values exactly; a NaN is only NE to everything. a and b: real, u8
 * or i32 each. */
typedef struct mixp_compare_args {
    mixp_comparison how;
    int      rank;
    int64_t  shape[MIXP_MAX_RANK];
    mixp_in  a, b;
    int64_t  a_strides[MIXP_MAX_RANK], b_strides[MIXP_MAX_RANK];
    uint8_t *y;
} mixp_compare_args;

/* Are the bits those of a NaN? Fast-math would not see one. */
MIXPREC_HD int mixpi_is_nan_f64(double x)
{ return mixp_bits_of_f64(x) << 1 > 0xFFE0000000000000u; }

MIXPREC_HD int mixpi_holds(mixp_comparison how, double a, double b) {
    if (mixpi_is_nan_f64(a) || mixpi_is_nan_f64(b)) return how == MIXP_COMPARE_NE;
    switch (how) {
    case MIXP_COMPARE_EQ: return a == b;
    case MIXP_COMPARE_NE: return a != b;
    case MIXP_COMPARE_GT: return a > b;
    case MIXP_COMPARE_GE: return a >= b;
    case MIXP_COMPARE_LT: return a < b;
    default:              return a <= b;
    }
}

/* index[rows, k] = the positions of the k largest (or smallest) elements of each row of
 * a[rows, cols], sorted: the largest (or smallest) first, equal ones in order of position. NaN is
 * larger than all. real. MIXP_ERR_ARGUMENT: k outside [1, cols], or cols above 2^31 - 1. */
typedef struct mixp_topk_args {
    int64_t  rows, cols, k;
    int      smallest;
    mixp_in  a;
    int32_t *index;
} mixp_topk_args;

/* The place of x in topk's order: a larger number comes first. */
MIXPREC_HD uint32_t mixpi_topk_key(float x, int smallest) {
    uint32_t bits = mixp_bits_of_f32(x), key;
    if (bits << 1 == 0) bits = 0;                       /* -0 equals 0 */
    key = bits >> 31 ? ~bits : bits | 0x80000000u;
    if (bits << 1 > 0xFF000000u) key = 0xFFFFFFFFu;     /* NaN */
    return smallest ? ~key : key;
}

typedef struct mixp_kernels {
    mixp_result (*convert)(const mixp_exec *x, const mixp_convert_args *k);
    mixp_result (*fill)(const mixp_exec *x, const mixp_fill_args *k);
    mixp_result (*copy)(const mixp_exec *x, const mixp_copy_args *k);

    mixp_result (*unary)(const mixp_exec *x, const mixp_unary_args *k);
    mixp_result (*unary_backward)(const mixp_exec *x, const mixp_unary_backward_args *k);
    mixp_result (*binary)(const mixp_exec *x, const mixp_binary_args *k);
    mixp_result (*binary_backward)(const mixp_exec *x, const mixp_binary_args *k);
    mixp_result (*reduce)(const mixp_exec *x, const mixp_reduce_args *k);
    mixp_result (*reduce_backward)(const mixp_exec *x, const mixp_reduce_args *k);
    mixp_result (*softmax)(const mixp_exec *x, const mixp_softmax_args *k);
    mixp_result (*softmax_backward)(const mixp_exec *x,
                                    const mixp_softmax_backward_args *k);
    mixp_result (*norm)(const mixp_exec *x, const mixp_norm_args *k);
    mixp_result (*norm_backward)(const mixp_exec *x, const mixp_norm_backward_args *k);
    mixp_result (*embedding)(const mixp_exec *x, const mixp_embedding_args *k);
    mixp_result (*embedding_backward)(const mixp_exec *x,
                                      const mixp_embedding_backward_args *k);
    mixp_result (*attention)(const mixp_exec *x, const mixp_attention_args *k);
    mixp_result (*attention_backward)(const mixp_exec *x,
                                      const mixp_attention_backward_args *k);
    mixp_result (*cross_entropy)(const mixp_exec *x, const mixp_cross_entropy_args *k);
    mixp_result (*cross_entropy_backward)(const mixp_exec *x,
                                          const mixp_cross_entropy_backward_args *k);
    mixp_result (*loss)(const mixp_exec *x, const mixp_loss_args *k);
    mixp_result (*loss_backward)(const mixp_exec *x, const mixp_loss_backward_args *k);
    mixp_result (*dropout)(const mixp_exec *x, const mixp_dropout_args *k);
    mixp_result (*gemm)(const mixp_exec *x, const mixp_gemm_args *k);
    mixp_result (*scale_by)(const mixp_exec *x, const mixp_scale_by_args *k);

    mixp_result (*grad_stats)(const mixp_exec *x, const mixp_grad_stats_args *k);
    mixp_result (*clip)(const mixp_exec *x, const mixp_clip_args *k);
    mixp_result (*prepare)(const mixp_exec *x, const mixp_prepare_args *k);
    mixp_result (*update)(const mixp_exec *x, const mixp_update_args *k);
    mixp_result (*advance)(const mixp_exec *x, const mixp_advance_args *k);
    mixp_result (*look)(const mixp_exec *x, const mixp_look_args *k);
    mixp_result (*agree)(const mixp_exec *x, const mixp_agree_args *k);

    mixp_result (*where)(const mixp_exec *x, const mixp_where_args *k);
    mixp_result (*where_backward)(const mixp_exec *x, const mixp_where_args *k);
    mixp_result (*max)(const mixp_exec *x, const mixp_max_args *k);
    mixp_result (*max_backward)(const mixp_exec *x, const mixp_max_backward_args *k);
    mixp_result (*gather)(const mixp_exec *x, const mixp_gather_args *k);
    mixp_result (*gather_backward)(const mixp_exec *x, const mixp_gather_args *k);
    mixp_result (*rope)(const mixp_exec *x, const mixp_rope_args *k);
    mixp_result (*random)(const mixp_exec *x, const mixp_random_args *k);
    mixp_result (*compare)(const mixp_exec *x, const mixp_compare_args *k);
    mixp_result (*topk)(const mixp_exec *x, const mixp_topk_args *k);

    /* Optional. NULL: two other kernels do the same work. */
    mixp_result (*add_norm)(const mixp_exec *x, const mixp_norm_args *k);
    mixp_result (*cross_entropy_both)(const mixp_exec *x,
                                      const mixp_cross_entropy_both_args *k);
    mixp_result (*gemm_epilogue)(const mixp_exec *x, const mixp_gemm_epilogue_args *k);

    /* Recipes. NULL: mixp_quantise and mixp_hadamard do the work where memory is the host's;
     * another device has no recipes. */
    mixp_result (*quantise)(const mixp_exec *x, const mixp_quantise_args *k);
    mixp_result (*hadamard)(const mixp_exec *x, const mixp_hadamard_args *k);
    /* Delayed scaling. NULL: the host does the work where memory is the host's; another device has
     * no delayed scaling. */
    mixp_result (*turn)(const mixp_exec *x, const mixp_turn_args *k);
    /* A guard's measure of recipes. NULL: the host measures where memory is the host's; on another
     * device nothing is measured. */
    mixp_result (*lose)(const mixp_exec *x, const mixp_lose_args *k);
    /* Activations kept as codes. NULL: the CPU's kernel does the work where memory is the host's;
     * another device keeps no codes. */
    mixp_result (*recode)(const mixp_exec *x, const mixp_recode_args *k);
    /* Products for mixp_context_desc.narrow_products. NULL: gemm does the work. */
    mixp_result (*gemm_narrow)(const mixp_exec *x, const mixp_gemm_narrow_args *k);
    /* Buffers of skipped steps. NULL: the host waits for the flags, and copies. */
    mixp_result (*restore)(const mixp_exec *x, const mixp_restore_args *k);
} mixp_kernels;

/* How many matrix products a GPU has run in each way. A captured product counts once. */
typedef struct mixp_gemm_count {
    int64_t direct;             /* the vendor's library, operands as they are              */
    int64_t packed;             /* the vendor's library, with copies of the operands       */
    int64_t plain;              /* a kernel without tensor cores, about 50 times slower    */
    int64_t narrow;             /* the vendor's library, in fp8 or fp4: narrow_products    */
    int64_t apart;              /* products whose epilogue the library lacks: a separate kernel
                                   does it. The product also counts in a field above       */
} mixp_gemm_count;

struct mixp_device {
    const char         *name;   /* "cpu avx512", "cuda", ...                               */
    const mixp_kernels *kernels;
    /* Device memory. NULL members: memory is the host's, from the context's allocator. */
    void       *(*allocate)(const mixp_exec *x, size_t bytes);
    void        (*release)(const mixp_exec *x, void *p);
    mixp_result (*upload)(const mixp_exec *x, void *device, const void *host,
                          size_t bytes);
    mixp_result (*download)(const mixp_exec *x, void *host, const void *device,
                            size_t bytes);
    mixp_result (*wait)(const mixp_exec *x);  /* until all queued work is done             */
    /* attach makes x->state for a new context on x->stream; detach releases it. NULL = no state
     * needed. attach returns MIXP_ERR_FORMAT if x->gemm_choices is not a valid text,
     * MIXP_ERR_SHAPE if it comes from another GPU, MIXP_ERR_ARGUMENT if x->stream is invalid. */
    mixp_result (*attach)(mixp_exec *x);
    void        (*detach)(mixp_exec *x);
    /* Reads bytes that prepare or advance wrote, without waiting: they may be slightly stale.
     * NULL = download. */
    mixp_result (*peek)(const mixp_exec *x, void *host, const void *device, size_t bytes);
    /* capture_begin and capture_end record queued work instead of running it. replay runs it,
     * `later` steps after the recorded step. NULL = not supported. */
    mixp_result (*capture_begin)(mixp_exec *x);
    mixp_result (*capture_end)(mixp_exec *x, void **graph);
    mixp_result (*replay)(const mixp_exec *x, void *graph, uint64_t later);
    void        (*graph_free)(const mixp_exec *x, void *graph);
    /* The newest error in words, "" for none. NULL = the device has no messages. */
    const char *(*message)(const mixp_exec *x);
    /* MIXP_OK when kernels can use the memory at p. NULL = kernels can use any memory. */
    mixp_result (*check)(const mixp_exec *x, const void *p, size_t bytes);
    /* As upload, but every replay of a captured step reads host again; upload reads host once.
     * NULL = upload. */
    mixp_result (*feed)(const mixp_exec *x, void *device, const void *host, size_t bytes);
    mixp_gemm_count (*gemm_count)(const mixp_exec *x);  /* NULL = only one way              */
    /* post queues a copy of device memory to pinned memory, slot 0 to 2. collect waits until the
     * newest copy of that slot has arrived, but not for work queued later. NULL = download. */
    mixp_result (*post)(const mixp_exec *x, int slot, const void *device, size_t bytes);
    mixp_result (*collect)(const mixp_exec *x, int slot, void *host, size_t bytes);
    /* The text that mixp_context_gemm_choices returns. NULL = the device has no choices. */
    size_t      (*gemm_choices)(const mixp_exec *x, char *text, size_t size);
    /* Returns the MIXP_EPILOGUES_ flags for a context whose description has epilogues 0. NULL = no
     * flag. */
    int         (*epilogues)(const mixp_exec *x);
};

