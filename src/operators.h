#pragma once
#include "tape.h"
/* ==== 8. OPERATORS =================================================== >>operators ====
 *
 * Each operator returns a new activation, which lives until the next step begins, or NULL on error
 * or if an input is NULL. Inputs are not changed. The errors of all operators: MIXP_ERR_SHAPE or
 * MIXP_ERR_DTYPE, the inputs do not fit; MIXP_ERR_ARGUMENT, a number is out of range;
 * MIXP_ERR_ORDER, an input is from an earlier step; MIXP_ERR_MEMORY. The message names the operator
 * and the input. The table SAME BITS of the manual lists which results are bit-identical.
 *
 * All inputs must belong to this context. In shapes, x[..., k] means any leading dimensions.
 * Floating-point inputs may be f32, f16 or bf16 in any mix. Classes are those of PyTorch on CUDA.
 * As in PyTorch, dimensions may be 0 (except those of parameters and buffers, the keys and heads of
 * attention, and the vocabulary of linear_cross_entropy): sums of no elements are 0, means are NaN,
 * and gradients through empty results are 0.
 *
 *     mixp_...                    class    inputs               gradient to   note
 *     linear                      LOW      x, w (, b)           all
 *     matmul                      LOW      a, b                 both          broadcasts
 *     mlp                         LOW      x, w, b, w, b        all           two linear, GELU
 *     attention (_apply)          LOW      qkv, or q, k, v      all           fused
 *     add sub mul div             PROMOTE  a, b                 both          broadcast
 *     maximum minimum             PROMOTE  a, b                 both          broadcast; ties half
 *     swiglu                      PROMOTE  gate, up             both          broadcasts
 *     swiglu_packed               KEEP     x                    x             halves last dimension
 *     scale neg abs clamp         KEEP     x                    x
 *     relu relu_squared           KEEP     x                    x             256^2 is Inf in f16
 *     gelu gelu_tanh silu         KEEP     x                    x
 *     tanh sigmoid soft_cap       KEEP     x                    x
 *     sqrt sin cos erf            KEEP     x                    x
 *     leaky_relu elu              KEEP     x                    x
 *     add_scalar rsub             KEEP     x                    x             by a number
 *     exp log pow expm1 log1p     F32      x                    x
 *     square reciprocal softplus  F32      x                    x
 *     log2 log10 acos asin tan    F32      x                    x
 *     sinh cosh erfinv            F32      x                    x
 *     power                       F32      a, b                 both          broadcasts
 *     atan2                       PROMOTE  a, b                 both          broadcasts
 *     prelu                       LOW      x, w                 both          w: by channel
 *     sum                         F32_OUT  x                    x
 *     mean                        KEEP     x                    x
 *     max min                     KEEP     x                    x             ties: first, or all
 *     argmax argmin               KEEP     x                    none          i32
 *     prod cumsum                 F32_OUT  x                    x             computed in f32
 *     var std                     KEEP     x                    x             computed in f32
 *     logsumexp vector_norm       F32      x                    x
 *     softmax log_softmax         F32_OUT  x                    x
 *     layer_norm                  F32      x (, gamma, beta)    all
 *     rms_norm                    F32      x (, gamma)          both
 *     add_layer_norm              both     a, b (, gamma, beta) all           add, then the norm
 *     add_rms_norm                both     a, b (, gamma)       all           add, then the norm
 *     embedding                   KEEP     table, ids           table
 *     embedding_bag               KEEP     table, ids (, offsets, weights)  table, weights
 *     gather                      KEEP     x, ids               x
 *     where                       PROMOTE  mask, a, b           a, b          broadcasts
 *     masked_fill                 KEEP     x, mask              x             broadcasts
 *     eq ne gt ge lt le           KEEP     a, b                 none          u8; broadcast
 *     one_hot                     KEEP     ids                  none          of any dtype
 *     scatter_add                 PROMOTE  x, ids, src          x, src
 *     index_add                   PROMOTE  x, ids, src          x, src
 *     topk sort                   KEEP     x                    x             and i32 indices
 *     full                        -        none                 none          a constant
 *     uniform normal bernoulli    -        none                 none          random numbers
 *     rope                        KEEP     x                    x             both kinds of pairs
 *     dropout                     KEEP     x                    x
 *     cross_entropy (_smooth)     F32      logits, targets      logits        f32 scalar
 *     linear_cross_entropy        LOW      x, w, targets        x, w          f32 scalar
 *     mse l1 smooth_l1 huber      F32      x, target            both          f32 scalar
 *     bce_with_logits kl_div      F32      x, target            both          f32 scalar
 *     bce                         BANNED   x, target            both          f32 scalar
 *     nll                         F32      x, targets           x             f32 scalar
 *     loss_apply, ..._apply       those of the loss                           see mixp_loss_desc
 *     cast reshape transpose      KEEP     x                    x             reshape: no copy
 *     squeeze unsqueeze           KEEP     x                    x             no copy
 *     detach                      KEEP     x                    none
 *     permute flip expand pad     KEEP     x                    x
 *     concat stack                PROMOTE  any number           all
 *     slice split (_sizes)        KEEP     x                    x
 */

/* LOW. y[..., out] = x[..., in] w[out, in]' (+ b[out]). */
MIXPREC_API mixp_tensor *mixp_linear(mixp_context *ctx, mixp_tensor *x, mixp_tensor *w,
                                     mixp_tensor *b);

/* mixp_linear(gelu_tanh(mixp_linear(x, up, up_bias)), down, down_bias); biases may be NULL. With
 * MIXP_EPILOGUES_GELU, or _GELU_BF16 in bf16, a GPU computes GELU and its slope inside the
 * products. The results then differ only by one rounding before GELU, one before its slope, and
 * cuBLASLt's tanh. While a guard is on or an observer is installed, the three operators run
 * separately. Errors: those of the three operators. */
MIXPREC_API mixp_tensor *mixp_mlp(mixp_context *ctx, mixp_tensor *x, mixp_tensor *up,
                                  mixp_tensor *up_bias, mixp_tensor *down,
                                  mixp_tensor *down_bias);
/* LOW. y = op(a) op(b) on the last two dimensions; op transposes if trans_a or trans_b is 1.
 * Leading dimensions broadcast as in NumPy: equal, 1, or absent. A vector a is one row, a vector b
 * is one column. Vectors are never transposed, and the result lacks their dimension: for two
 * vectors it is a scalar. */
MIXPREC_API mixp_tensor *mixp_matmul(mixp_context *ctx, mixp_tensor *a, mixp_tensor *b,
                                     int trans_a, int trans_b);
/* LOW. Multi-head attention of packed qkv[b, t, 3*c]. Each of q, k, v is split into `heads` heads
 * of c/heads. Result: y[b, t, c]. scale 0 = 1/sqrt(c/heads). */
MIXPREC_API mixp_tensor *mixp_attention(mixp_context *ctx, mixp_tensor *qkv, int heads,
                                        int causal, float scale);

/* Settings of mixp_attention_apply. All zero except `heads`: softmax(q k' / sqrt(d)) v with as many
 * heads in q, k and v. */
typedef struct mixp_attention_desc {
    int          heads;         /* heads of q. 0: q has heads as a dimension, [b, t, heads, d] */
    int          kv_heads;      /* heads of k and v, each shared by heads / kv_heads heads of q
                                   (grouped; 1: multi-query). 0 = heads                    */
    int          causal;        /* 1: query i sees keys 0 .. i + past                      */
    int64_t      past;          /* number of keys before the key of the first query. 0 is
                                   PyTorch's is_causal, also when t and keys differ        */
    float        scale;         /* 0 = 1/sqrt(d)                                           */
    float        softcap;       /* scores become softcap * tanh(score / softcap); 0 = off  */
    float        dropout;       /* share of probabilities dropped, in [0, 1). Set 0 when not
                                   training                                                */
    mixp_tensor *mask;          /* added to scores; any shape that broadcasts to [b, heads, t,
                                   keys]. -Inf hides a key's weight, not a NaN in the key or its
                                   value, which `lengths` hides. NULL = no mask            */
    mixp_tensor *lengths;       /* i32 [b]: number of valid keys of each sequence; the rest is
                                   padding. NULL = all keys                                */
} mixp_attention_desc;

/* LOW. Attention of q[b, t, heads*d] with k and v[b, keys, kv_heads*d]. y has the shape of q. Each
 * input may have heads as a dimension instead: [b, t, heads, d] is the same memory. For PyTorch's
 * [b, heads, t, d] call mixp_scaled_dot_product_attention of examples/ops.h, which makes four
 * transposing copies. If k and v are NULL, q is packed: [b, t, (heads + 2 kv_heads)*d].
 *
 * Fused: no array of t x keys scores is stored. Blocks that are hidden completely by lengths, or on
 * a CPU by a mask, are not computed. Separate and packed inputs are bit-identical. Autocast casts
 * a mask as PyTorch does. A mask gets no gradient: a mask that requires one is MIXP_ERR_ARGUMENT.
 * Dropout depends only on the seed, the step, the place of the call in the step, and the element:
 * the same on every device.
 *
 * A query that sees no key (a mask row of -Inf, a length of 0) has a result of 0 and gradients of
 * 0, as in PyTorch's scaled_dot_product_attention since 2.5. PyTorch's softmax is NaN there, and so
 * is its MultiheadAttention when it returns weights.
 *
 * A mask of finite numbers hides only by their size. If -1e9 or less covers all keys of a query,
 * the result is the mean of v. The gradients for q, k and v are then too large by a factor of the
 * number of keys, as in PyTorch's fused kernels: added to 1e9 in f32, the logarithm of the number
 * of keys is lost (added to 1e4, it is rounded by up to 5e-4). If such a query counts in the loss,
 * hide its keys with -Inf.
 *
 * MIXP_ERR_SHAPE or MIXP_ERR_DTYPE: inputs do not match (the message has their names and shapes),
 * or on a GPU heads are wider than 256. MIXP_ERR_ARGUMENT: a field is out of range, or a length is
 * outside [0, keys] (a GPU reports the length later, like an id of mixp_embedding). */
MIXPREC_API mixp_tensor *mixp_attention_apply(mixp_context *ctx, mixp_tensor *q,
                                              mixp_tensor *k, mixp_tensor *v,
                                              const mixp_attention_desc *desc);

/* Writes to most[h], for each head h of an attention's result y, the largest log-sum-exp of the
 * scores (scaled, capped and masked) of a query over the batch: s + ln(sum of exp(s_j - s)), where
 * s is the query's largest score. So most[h] is at least the largest score of the head, and at most
 * ln(keys) above. Scores beyond about 100 mean that bf16's rounding of q and k changes the weights
 * by tens of percent; examples/qk_clip.h bounds them. A query that sees no key, or has a
 * NaN, does not count; most[h] is -Inf if no query counts, as in an empty batch. The function reads
 * what the tape keeps for backward. It computes nothing, and waits for the device.
 *
 * y: the result of mixp_attention or mixp_attention_apply in this step, before or after
 * mixp_backward. heads: the heads of q. MIXP_ERR_ORDER: y is something else, was made in an earlier
 * step, under MIXP_NO_GRAD or in mixp_recompute, or needs no gradient. MIXP_ERR_ARGUMENT: y or most
 * is NULL, or heads differs. MIXP_ERR_MEMORY. On an error most is unchanged. */
MIXPREC_API mixp_result mixp_attention_scores(const mixp_tensor *y, int64_t heads, float *most);

/* PROMOTE. mixp_add: a + b. mixp_sub: a - b. mixp_mul: a b. mixp_div: a / b. Elementwise, with
 * NumPy's broadcasting. */
MIXPREC_API mixp_tensor *mixp_add(mixp_context *ctx, mixp_tensor *a, mixp_tensor *b);
MIXPREC_API mixp_tensor *mixp_sub(mixp_context *ctx, mixp_tensor *a, mixp_tensor *b);
MIXPREC_API mixp_tensor *mixp_mul(mixp_context *ctx, mixp_tensor *a, mixp_tensor *b);
MIXPREC_API mixp_tensor *mixp_div(mixp_context *ctx, mixp_tensor *a, mixp_tensor *b);
/* mixp_maximum, mixp_minimum: if either operand is NaN, the result is NaN and both operands get
 * the gradient. Equal operands get half the gradient each. Both rules are PyTorch's. */
MIXPREC_API mixp_tensor *mixp_maximum(mixp_context *ctx, mixp_tensor *a, mixp_tensor *b);
MIXPREC_API mixp_tensor *mixp_minimum(mixp_context *ctx, mixp_tensor *a, mixp_tensor *b);
/* mixp_swiglu: silu(gate) * up, rounded once. mixp_swiglu_packed (KEEP): the same from x[...,
 * 2c], whose first half is the gate, to [..., c]. */
MIXPREC_API mixp_tensor *mixp_swiglu(mixp_context *ctx, mixp_tensor *gate, mixp_tensor *up);
MIXPREC_API mixp_tensor *mixp_swiglu_packed(mixp_context *ctx, mixp_tensor *x);

/* KEEP. Elementwise. scale: factor * x. relu, tanh, sigmoid, sqrt, neg (-x), abs, sin and cos
 * are the functions of these names; silu is x sigmoid(x), gelu is x times the normal
 * distribution of x, and gelu_tanh is its approximation by tanh. At an Inf, the slopes of gelu,
 * gelu_tanh and silu are their limits, 0 or 1; PyTorch's are NaN. */
MIXPREC_API mixp_tensor *mixp_scale(mixp_context *ctx, mixp_tensor *x, float factor);
MIXPREC_API mixp_tensor *mixp_relu(mixp_context *ctx, mixp_tensor *x);
MIXPREC_API mixp_tensor *mixp_gelu(mixp_context *ctx, mixp_tensor *x);      /* x Phi(x)      */
MIXPREC_API mixp_tensor *mixp_gelu_tanh(mixp_context *ctx, mixp_tensor *x); /* tanh form     */
MIXPREC_API mixp_tensor *mixp_silu(mixp_context *ctx, mixp_tensor *x);
MIXPREC_API mixp_tensor *mixp_tanh(mixp_context *ctx, mixp_tensor *x);
MIXPREC_API mixp_tensor *mixp_sigmoid(mixp_context *ctx, mixp_tensor *x);
MIXPREC_API mixp_tensor *mixp_sqrt(mixp_context *ctx, mixp_tensor *x);
MIXPREC_API mixp_tensor *mixp_neg(mixp_context *ctx, mixp_tensor *x);
MIXPREC_API mixp_tensor *mixp_abs(mixp_context *ctx, mixp_tensor *x);       /* slope 0 at 0 */
MIXPREC_API mixp_tensor *mixp_sin(mixp_context *ctx, mixp_tensor *x);
MIXPREC_API mixp_tensor *mixp_cos(mixp_context *ctx, mixp_tensor *x);
/* Clamps to [low, high]; an infinite bound has no effect. The gradient passes strictly between the
 * bounds, not at a bound and not for a NaN, as in PyTorch since 2.15 (older versions pass it at the
 * bounds). If low is above high, the result is high and the gradient 0. MIXP_ERR_ARGUMENT: a NaN
 * bound, or, as in PyTorch, a finite bound that becomes Inf in the result's dtype. */
MIXPREC_API mixp_tensor *mixp_clamp(mixp_context *ctx, mixp_tensor *x, float low,
                                    float high);
/* relu(x)^2 (So et al., Primer, 2021). In f16, x >= 256 becomes Inf. */
MIXPREC_API mixp_tensor *mixp_relu_squared(mixp_context *ctx, mixp_tensor *x);
/* cap tanh(x / cap), cap > 0: for logits (Gemma 2, 2024). */
MIXPREC_API mixp_tensor *mixp_soft_cap(mixp_context *ctx, mixp_tensor *x, float cap);
/* The error function, to 4 units in the last place of f32. */
MIXPREC_API mixp_tensor *mixp_erf(mixp_context *ctx, mixp_tensor *x);
/* leaky_relu: x where x > 0, otherwise slope x (PyTorch's default: 0.01), or alpha (e^x - 1) for
 * elu (default: 1). At 0 the gradient is that of the lower branch, as in PyTorch. At a NaN the
 * slope of elu is 1, as in PyTorch on CUDA. */
MIXPREC_API mixp_tensor *mixp_leaky_relu(mixp_context *ctx, mixp_tensor *x, float slope);
MIXPREC_API mixp_tensor *mixp_elu(mixp_context *ctx, mixp_tensor *x, float alpha);
/* mixp_add_scalar: x + value. mixp_rsub: value - x. The sum is made in f32 and rounded once. */
MIXPREC_API mixp_tensor *mixp_add_scalar(mixp_context *ctx, mixp_tensor *x, float value);
MIXPREC_API mixp_tensor *mixp_rsub(mixp_context *ctx, mixp_tensor *x, float value);
/* F32. Elementwise. exp: e^x. log: to the base e. pow: x^exponent. */
MIXPREC_API mixp_tensor *mixp_exp(mixp_context *ctx, mixp_tensor *x);
MIXPREC_API mixp_tensor *mixp_log(mixp_context *ctx, mixp_tensor *x);
MIXPREC_API mixp_tensor *mixp_pow(mixp_context *ctx, mixp_tensor *x, float exponent);
/* F32. expm1: e^x - 1. log1p: log(1 + x). Both without cancellation near 0. */
MIXPREC_API mixp_tensor *mixp_expm1(mixp_context *ctx, mixp_tensor *x);
MIXPREC_API mixp_tensor *mixp_log1p(mixp_context *ctx, mixp_tensor *x);
/* F32. square: x x. reciprocal: 1 / x. */
MIXPREC_API mixp_tensor *mixp_square(mixp_context *ctx, mixp_tensor *x);
MIXPREC_API mixp_tensor *mixp_reciprocal(mixp_context *ctx, mixp_tensor *x);
/* log(1 + e^(beta x)) / beta, and never Inf for a finite x. MIXP_ERR_ARGUMENT: beta is not
 * positive, or not finite. */
MIXPREC_API mixp_tensor *mixp_softplus(mixp_context *ctx, mixp_tensor *x, float beta);
/* F32. log2, log10, acos, asin, tan, sinh and cosh are, on a CPU, the C library's f32 functions.
 * erfinv: y with erf(y) = x, to 1 unit in the last place; +-Inf at x = +-1, NaN where |x| > 1. */
MIXPREC_API mixp_tensor *mixp_log2(mixp_context *ctx, mixp_tensor *x);
MIXPREC_API mixp_tensor *mixp_log10(mixp_context *ctx, mixp_tensor *x);
MIXPREC_API mixp_tensor *mixp_acos(mixp_context *ctx, mixp_tensor *x);
MIXPREC_API mixp_tensor *mixp_asin(mixp_context *ctx, mixp_tensor *x);
MIXPREC_API mixp_tensor *mixp_tan(mixp_context *ctx, mixp_tensor *x);
MIXPREC_API mixp_tensor *mixp_sinh(mixp_context *ctx, mixp_tensor *x);
MIXPREC_API mixp_tensor *mixp_cosh(mixp_context *ctx, mixp_tensor *x);
MIXPREC_API mixp_tensor *mixp_erfinv(mixp_context *ctx, mixp_tensor *x);
/* power (F32): a to the power b. The gradient of a is 0 where b is 0. The gradient of b is 0 where
 * a is 0 and b >= 0, and NaN where a < 0. atan2 (PROMOTE): the angle of the point (b, a).
 * Both broadcast as NumPy does. */
MIXPREC_API mixp_tensor *mixp_power(mixp_context *ctx, mixp_tensor *a, mixp_tensor *b);
MIXPREC_API mixp_tensor *mixp_atan2(mixp_context *ctx, mixp_tensor *a, mixp_tensor *b);
/* LOW. x where x > 0, otherwise w x. w has one element, or w[channels] with the size of dimension 1
 * of x; otherwise MIXP_ERR_SHAPE. */
MIXPREC_API mixp_tensor *mixp_prelu(mixp_context *ctx, mixp_tensor *x, mixp_tensor *w);

/* dim: -rank..rank-1, or MIXP_ALL to reduce all elements to a scalar. keep 1 keeps the dimension
 * with size 1. sum: F32_OUT. mean: KEEP, as in PyTorch. */
#define MIXP_ALL (-100)
MIXPREC_API mixp_tensor *mixp_sum(mixp_context *ctx, mixp_tensor *x, int dim, int keep);
/* KEEP. max: the largest value; NaN if any value is NaN. Its gradient goes to the first of the
 * largest values, and with MIXP_ALL in equal shares to all of them, as in PyTorch. argmax: i32
 * index of the first largest value (counted over the whole array with MIXP_ALL), without a
 * gradient. */
MIXPREC_API mixp_tensor *mixp_max(mixp_context *ctx, mixp_tensor *x, int dim, int keep);
MIXPREC_API mixp_tensor *mixp_argmax(mixp_context *ctx, mixp_tensor *x, int dim, int keep);
/* KEEP. The mean over dimension dim, or over all with MIXP_ALL. Sums in f32, rounded once. */
MIXPREC_API mixp_tensor *mixp_mean(mixp_context *ctx, mixp_tensor *x, int dim, int keep);
/* KEEP. min: the smallest value; argmin: its index. By the rules of max and argmax. */
MIXPREC_API mixp_tensor *mixp_min(mixp_context *ctx, mixp_tensor *x, int dim, int keep);
MIXPREC_API mixp_tensor *mixp_argmin(mixp_context *ctx, mixp_tensor *x, int dim, int keep);
/* F32. log(sum(e^x)), without overflow. -Inf where all values are -Inf. Several operators run, in
 * f32, and the result is rounded once. */
MIXPREC_API mixp_tensor *mixp_logsumexp(mixp_context *ctx, mixp_tensor *x, int dim, int keep);
/* KEEP. Variance: the squared deviations from the mean, summed and divided by n - correction
 * (PyTorch's default: 1). For one value with correction 1 it is NaN. A common offset of all values
 * costs no precision. Several operators run, in f32, and the result is rounded once. */
MIXPREC_API mixp_tensor *mixp_var(mixp_context *ctx, mixp_tensor *x, int dim, int correction,
                                  int keep);
/* std (KEEP): the square root of var. vector_norm (F32): sqrt(sum(x^2)). Where they are 0, their
 * gradients are 0, as in PyTorch. Their squares are f32: the results of values beyond 1e19 are Inf,
 * those of values below 1e-22 lose precision, and of values below 1e-23 they are 0. */
MIXPREC_API mixp_tensor *mixp_std(mixp_context *ctx, mixp_tensor *x, int dim, int correction,
                                  int keep);
MIXPREC_API mixp_tensor *mixp_vector_norm(mixp_context *ctx, mixp_tensor *x, int dim,
                                          int keep);

/* F32_OUT. The product, computed in f32. The gradient of an element is the product of all others:
 * exact where elements are 0. */
MIXPREC_API mixp_tensor *mixp_prod(mixp_context *ctx, mixp_tensor *x, int dim, int keep);
/* F32_OUT. Element i along dim is the sum of elements 0 to i, computed in f32. */
MIXPREC_API mixp_tensor *mixp_cumsum(mixp_context *ctx, mixp_tensor *x, int dim);

/* F32_OUT. softmax: e^x / sum(e^x). log_softmax: its logarithm. Over the last dimension. */
MIXPREC_API mixp_tensor *mixp_softmax(mixp_context *ctx, mixp_tensor *x);
MIXPREC_API mixp_tensor *mixp_log_softmax(mixp_context *ctx, mixp_tensor *x);
/* F32. layer_norm: (x - mean) / sqrt(variance + eps) gamma + beta. rms_norm: x / sqrt(mean(x^2)
 * + eps) gamma. Over the last dimension, or over those last dimensions whose shape gamma and
 * beta have; gamma and beta may be NULL. eps > 0. */
MIXPREC_API mixp_tensor *mixp_layer_norm(mixp_context *ctx, mixp_tensor *x,
                                         mixp_tensor *gamma, mixp_tensor *beta,
                                         float eps);
MIXPREC_API mixp_tensor *mixp_rms_norm(mixp_context *ctx, mixp_tensor *x,
                                       mixp_tensor *gamma, float eps);
/* mixp_add_layer_norm and mixp_add_rms_norm compute *sum = mixp_add(ctx, a, b) and return the
 * norm of *sum: x = x + f, h = norm(x) of a residual block. sum may be NULL. The result equals
 * the two operators, with their classes, names and bits. If a and b have the same shape, the
 * device reads them once and writes both results in one pass. On an error the result and *sum
 * are NULL. */
MIXPREC_API mixp_tensor *mixp_add_layer_norm(mixp_context *ctx, mixp_tensor *a,
                                             mixp_tensor *b, mixp_tensor *gamma,
                                             mixp_tensor *beta, float eps,
                                             mixp_tensor **sum);
MIXPREC_API mixp_tensor *mixp_add_rms_norm(mixp_context *ctx, mixp_tensor *a,
                                           mixp_tensor *b, mixp_tensor *gamma, float eps,
                                           mixp_tensor **sum);
/* KEEP. y[..., c] = table[vocab, c] at ids[...] (i32). An id outside [0, vocab), or an out-of-range
 * target of the losses below, is MIXP_ERR_ARGUMENT, and the step is not applied. A GPU reports the
 * error later, with the verdict at the latest: mixp_scaler_update returns it. Until then the GPU
 * applies no step. */
MIXPREC_API mixp_tensor *mixp_embedding(mixp_context *ctx, mixp_tensor *table,
                                        mixp_tensor *ids);
/* mixp_embedding whose table gets no gradient in the row `padding` (PyTorch's padding_idx); a
 * negative padding counts from the end. MIXP_ERR_SHAPE: the table has no row `padding`. */
MIXPREC_API mixp_tensor *mixp_embedding_padded(mixp_context *ctx, mixp_tensor *table,
                                               mixp_tensor *ids, int64_t padding);
/* KEEP. y[bags, c]: the sum, the mean or the maximum of the rows of table[vocab, c] that the ids of
 * each bag select, as PyTorch's nn.EmbeddingBag: sparse inputs, without the memory of a row for
 * each id. ids (i32) is [bags, width]; or [n] with offsets[bags] (i32), the first id of each bag.
 * Sums are f32 in the order of the ids, rounded once. An empty bag is 0.
 *
 * weights: NULL, or a factor for each id, with the shape of ids; only of a sum. padding: an id that
 * does not count, also not in a mean, and whose row gets no gradient; negative counts from the end.
 * Of equal maxima the first gets the gradient.
 *
 * Errors as in mixp_embedding_padded. MIXP_ERR_ARGUMENT: offsets do not begin with 0, decrease, or
 * exceed n (a GPU reports them later, like an id of mixp_embedding); a wrong mode. */
#define MIXP_NO_PADDING INT64_MIN
MIXPREC_API mixp_tensor *mixp_embedding_bag(mixp_context *ctx, mixp_tensor *table,
                                            mixp_tensor *ids, mixp_tensor *offsets,
                                            mixp_tensor *weights, mixp_bag_mode mode,
                                            int64_t padding);
/* KEEP. y[.., j, ..] = x[.., ids[.., j, ..], ..] along dim. ids (i32) has the rank of x; its other
 * dimensions have the sizes of x, or smaller sizes: then only the first elements of x are read.
 * Example: a target's log-probability with ids[rows, 1]. Errors as in mixp_embedding. Gradients of
 * equal ids are added in order. */
MIXPREC_API mixp_tensor *mixp_gather(mixp_context *ctx, mixp_tensor *x, int dim,
                                     mixp_tensor *ids);
/* PROMOTE. where: mask ? a : b, with NumPy's broadcasting. The mask is u8 or i32, true if not 0.
 * masked_fill (KEEP): value where the mask is true, x elsewhere. MIXP_ERR_ARGUMENT, as in PyTorch:
 * a finite value becomes Inf in the result's dtype, as -1e9 in f16, whose largest number is 65504.
 * -INFINITY is allowed; softmax of a row without a finite score is then NaN. */
MIXPREC_API mixp_tensor *mixp_where(mixp_context *ctx, mixp_tensor *mask, mixp_tensor *a,
                                    mixp_tensor *b);
MIXPREC_API mixp_tensor *mixp_masked_fill(mixp_context *ctx, mixp_tensor *x,
                                          mixp_tensor *mask, float value);
/* KEEP. 1 where a == b (eq), a != b (ne), a > b (gt), a >= b (ge), a < b (lt) or a <= b (le),
 * else 0: a mask of u8, with NumPy's broadcasting. a and b are f32, f16, bf16, u8 or i32, and
 * are compared exactly. A NaN is not equal to anything, and neither above nor below. To compare
 * with a number: mixp_full. */
MIXPREC_API mixp_tensor *mixp_eq(mixp_context *ctx, mixp_tensor *a, mixp_tensor *b);
MIXPREC_API mixp_tensor *mixp_ne(mixp_context *ctx, mixp_tensor *a, mixp_tensor *b);
MIXPREC_API mixp_tensor *mixp_gt(mixp_context *ctx, mixp_tensor *a, mixp_tensor *b);
MIXPREC_API mixp_tensor *mixp_ge(mixp_context *ctx, mixp_tensor *a, mixp_tensor *b);
MIXPREC_API mixp_tensor *mixp_lt(mixp_context *ctx, mixp_tensor *a, mixp_tensor *b);
MIXPREC_API mixp_tensor *mixp_le(mixp_context *ctx, mixp_tensor *a, mixp_tensor *b);
/* KEEP. y[..., classes] is 1 at ids[...] (i32) and 0 elsewhere. dtype: f32, f16, bf16, u8 or i32. A
 * bad id: as in mixp_embedding. */
MIXPREC_API mixp_tensor *mixp_one_hot(mixp_context *ctx, mixp_tensor *ids, int64_t classes,
                                      mixp_dtype dtype);
/* PROMOTE. scatter_add: x, with src[.., j, ..] added at [.., ids[.., j, ..], ..] along dim. ids
 * (i32) has the rank of x; no dimension is larger than that of src, nor, except dim, than that of
 * x. Only src's first elements, as many as ids has, are added. index_add: the same with ids[m], one
 * id for each index of src along dim. Additions to one element run in increasing j, in f32, and are
 * rounded once: the same bits in each run. A bad id: as in mixp_embedding. */
MIXPREC_API mixp_tensor *mixp_scatter_add(mixp_context *ctx, mixp_tensor *x, int dim,
                                          mixp_tensor *ids, mixp_tensor *src);
MIXPREC_API mixp_tensor *mixp_index_add(mixp_context *ctx, mixp_tensor *x, int dim,
                                        mixp_tensor *ids, mixp_tensor *src);
/* KEEP. Along dim. topk: the k largest (largest 0: smallest) elements, the largest (smallest)
 * first. sort: all elements, ascending or descending. *indices (unless NULL): their positions, i32.
 * NaN is larger than all; equal elements keep their order. The gradient goes to the positions. For
 * a dim that is not the last, the function makes two transposed copies. On a GPU, sort of rows of
 * more than 2048 elements, and topk of them with k above 1024, need 16 bytes of scratch memory
 * per element. */
MIXPREC_API mixp_tensor *mixp_topk(mixp_context *ctx, mixp_tensor *x, int64_t k, int dim,
                                   int largest, mixp_tensor **indices);
MIXPREC_API mixp_tensor *mixp_sort(mixp_context *ctx, mixp_tensor *x, int dim, int descending,
                                   mixp_tensor **indices);
/* KEEP. mixp_rope: rotary position embedding of x[..., t, c], whose last dimension is heads of
 * head_dim (even). Pair i of a head at position first + t is rotated by position *
 * base^(-2i/head_dim), or, for the scalings of Llama 3 and YaRN, by position * frequencies[i].
 * Pairs are (i, i + head_dim/2), as in GPT-NeoX and Llama, or (2i, 2i + 1) if interleaved is 1.
 * MIXP_ERR_ARGUMENT: frequencies or scale for a head_dim above 256; a scale that is negative or not
 * finite. */
typedef struct mixp_rope_desc {
    int     head_dim;
    int     interleaved;
    double  base;               /* 0 = 10000                                               */
    int64_t first;              /* position of the first row of t                          */
    const double *frequencies;  /* head_dim / 2 angles, radians per position, which are copied;
                                   NULL = base's                                           */
    double  scale;              /* factor of cosines and sines, as YaRN's; 0 = 1           */
} mixp_rope_desc;
MIXPREC_API mixp_tensor *mixp_rope(mixp_context *ctx, mixp_tensor *x,
                                   const mixp_rope_desc *desc);
/* KEEP. p: share of elements dropped, in [0, 1]. training 0: returns x. Random numbers are those of
 * mixp_uniform: the same elements are dropped at every level and in every dtype of autocast. */
MIXPREC_API mixp_tensor *mixp_dropout(mixp_context *ctx, mixp_tensor *x, float p,
                                      int training);

/* Tensors of this step, without a gradient. full: each element is value; any dtype. uniform: in
 * [low, high), where rounding may return high unless low is 0 and high 1. normal: mean and standard
 * deviation. bernoulli: 1 with probability p, else 0; dtype u8 makes a mask. All other dtypes are
 * f32, f16 or bf16. Random numbers come from the context's seed, the step and the number of calls
 * of the step that drew before: these, dropout, and attention with dropout. They are the same on
 * every device, in every run, and at every level and in every dtype of autocast; new in each step,
 * replay and rank.
 *
 * MIXP_ERR_ARGUMENT: a number is not finite (full accepts Inf and NaN), low > high, std < 0, p
 * outside [0, 1], or the value of full or a bound of uniform is beyond the range of dtype. Numbers
 * of normal beyond that range become Inf, as PyTorch's do: an f16 tensor of mean 1e6 is all Inf. */
MIXPREC_API mixp_tensor *mixp_full(mixp_context *ctx, mixp_dtype dtype, int rank,
                                   const int64_t *shape, double value);
MIXPREC_API mixp_tensor *mixp_uniform(mixp_context *ctx, mixp_dtype dtype, int rank,
                                      const int64_t *shape, float low, float high);
MIXPREC_API mixp_tensor *mixp_normal(mixp_context *ctx, mixp_dtype dtype, int rank,
                                     const int64_t *shape, float mean, float std);
MIXPREC_API mixp_tensor *mixp_bernoulli(mixp_context *ctx, mixp_dtype dtype, int rank,
                                        const int64_t *shape, float p);

/* F32. Losses are f32 scalars: means over all elements (over rows for cross_entropy).
 * cross_entropy: logits[..., vocab], targets[...] i32. Targets equal to `ignore` do not count
 * (PyTorch's default is -100: MIXP_IGNORE). If no target counts, the loss is NaN and the gradients
 * are 0, as in PyTorch, with a warning. */
#define MIXP_IGNORE (-100)
MIXPREC_API mixp_tensor *mixp_cross_entropy(mixp_context *ctx, mixp_tensor *logits,
                                            mixp_tensor *targets, int32_t ignore);
/* With label smoothing, in [0, 1]: the target has weight 1 - smoothing, and all classes share the
 * rest equally. */
MIXPREC_API mixp_tensor *mixp_cross_entropy_smooth(mixp_context *ctx, mixp_tensor *logits,
                                                   mixp_tensor *targets, int32_t ignore,
                                                   float smoothing);
/* LOW. mixp_cross_entropy of the logits x[..., in] w[vocab, in]', without storing all logits. The
 * logits are f32: `chunk` rows are computed at a time, and again for the gradients. These products
 * then cost a third more work. Their memory is 4 * chunk * vocab bytes; with low inputs, in the
 * backward pass, 6 * chunk * vocab bytes. chunk 0 = an eighth of the rows, or the rows of 2^22
 * values if that is more. The loss and its gradients are closer to those of f32 than mixp_linear
 * and mixp_cross_entropy are under autocast, because the logits are not rounded; with f32 inputs
 * the loss is bit-identical to that of the two operators. The gradient of the logits is rounded to
 * x's dtype once, and w's gradient sums the rows in another order than mixp_linear. Result: f32
 * scalar. MIXP_ERR_ARGUMENT: chunk < 0. An id outside [0, vocab): as in mixp_cross_entropy. */
MIXPREC_API mixp_tensor *mixp_linear_cross_entropy(mixp_context *ctx, mixp_tensor *x,
                                                   mixp_tensor *w, mixp_tensor *targets,
                                                   int32_t ignore, int64_t chunk);
/* F32. The mean of (x - target)^2: a scalar of f32. x and target have one shape. */
MIXPREC_API mixp_tensor *mixp_mse(mixp_context *ctx, mixp_tensor *x, mixp_tensor *target);
/* F32. Binary cross entropy of logits: the mean of -t log(s) - (1 - t) log(1 - s) with s =
 * sigmoid(x), a scalar of f32, finite for all finite x. Targets t, of x's shape, are 0 to 1. */
MIXPREC_API mixp_tensor *mixp_bce_with_logits(mixp_context *ctx, mixp_tensor *x,
                                              mixp_tensor *target);
/* l1: |d| with d = x - target, slope 0 at 0. huber: d^2 / 2 if |d| < delta, otherwise delta (|d| -
 * delta / 2); delta > 0. smooth_l1: huber with bound beta, divided by beta; beta 0 is l1. */
MIXPREC_API mixp_tensor *mixp_l1(mixp_context *ctx, mixp_tensor *x, mixp_tensor *target);
MIXPREC_API mixp_tensor *mixp_smooth_l1(mixp_context *ctx, mixp_tensor *x,
                                        mixp_tensor *target, float beta);
MIXPREC_API mixp_tensor *mixp_huber(mixp_context *ctx, mixp_tensor *x, mixp_tensor *target,
                                    float delta);
/* KL(target || x) over the last dimension. x: log-probabilities (mixp_log_softmax). target:
 * probabilities, or log-probabilities if log_target is 1. The result is the mean over rows; for a
 * matrix this is PyTorch's "batchmean". A target of 0 contributes 0, but NaN if x is NaN or
 * infinite. */
MIXPREC_API mixp_tensor *mixp_kl_div(mixp_context *ctx, mixp_tensor *x, mixp_tensor *target,
                                     int log_target);
/* -x[..., targets[...]] of log-probabilities x[..., classes] (mixp_log_softmax): the mean over the
 * targets (i32) that are not `ignore`, as in mixp_cross_entropy. A bad target: as in
 * mixp_embedding. */
MIXPREC_API mixp_tensor *mixp_nll(mixp_context *ctx, mixp_tensor *x, mixp_tensor *targets,
                                  int32_t ignore);
/* BANNED under autocast: use mixp_bce_with_logits. x: probabilities. */
MIXPREC_API mixp_tensor *mixp_bce(mixp_context *ctx, mixp_tensor *x, mixp_tensor *target);

/* Ids of the built-in operators' rows, for mixp_autocast_override and mixp_apply. */
typedef enum mixp_op_id {
    MIXP_OP_LINEAR, MIXP_OP_MATMUL, MIXP_OP_ATTENTION, MIXP_OP_ADD, MIXP_OP_SUB, MIXP_OP_MUL,
    MIXP_OP_DIV, MIXP_OP_SCALE, MIXP_OP_RELU, MIXP_OP_GELU, MIXP_OP_GELU_TANH, MIXP_OP_SILU,
    MIXP_OP_TANH, MIXP_OP_SIGMOID, MIXP_OP_SQRT, MIXP_OP_EXP, MIXP_OP_LOG, MIXP_OP_POW,
    MIXP_OP_SUM, MIXP_OP_MEAN, MIXP_OP_SOFTMAX, MIXP_OP_LOG_SOFTMAX, MIXP_OP_LAYER_NORM,
    MIXP_OP_RMS_NORM, MIXP_OP_EMBEDDING, MIXP_OP_DROPOUT, MIXP_OP_CROSS_ENTROPY, MIXP_OP_MSE,
    MIXP_OP_BCE_WITH_LOGITS, MIXP_OP_BCE, MIXP_OP_CAST, MIXP_OP_RESHAPE, MIXP_OP_TRANSPOSE,
    MIXP_OP_CONCAT, MIXP_OP_SLICE,
    MIXP_OP_NEG, MIXP_OP_ABS, MIXP_OP_SIN, MIXP_OP_COS, MIXP_OP_CLAMP, MIXP_OP_RELU_SQUARED,
    MIXP_OP_SOFT_CAP, MIXP_OP_MAXIMUM, MIXP_OP_MINIMUM, MIXP_OP_SWIGLU, MIXP_OP_SWIGLU_PACKED,
    MIXP_OP_L1, MIXP_OP_SMOOTH_L1, MIXP_OP_HUBER, MIXP_OP_KL_DIV,
    MIXP_OP_LINEAR_CROSS_ENTROPY,
    MIXP_OP_MAX, MIXP_OP_ARGMAX, MIXP_OP_GATHER, MIXP_OP_WHERE, MIXP_OP_MASKED_FILL,
    MIXP_OP_ROPE, MIXP_OP_DETACH,
    MIXP_OP_SQUARE, MIXP_OP_RECIPROCAL, MIXP_OP_LOG1P, MIXP_OP_EXPM1, MIXP_OP_ERF,
    MIXP_OP_SOFTPLUS, MIXP_OP_LEAKY_RELU, MIXP_OP_ELU, MIXP_OP_ADD_SCALAR, MIXP_OP_RSUB,
    MIXP_OP_PERMUTE, MIXP_OP_FLIP, MIXP_OP_EXPAND, MIXP_OP_PAD, MIXP_OP_STACK,
    MIXP_OP_EQ, MIXP_OP_NE, MIXP_OP_GT, MIXP_OP_GE, MIXP_OP_LT, MIXP_OP_LE,
    MIXP_OP_PROD, MIXP_OP_CUMSUM, MIXP_OP_ONE_HOT, MIXP_OP_SCATTER_ADD, MIXP_OP_TOPK, MIXP_OP_SORT,
    MIXP_OP_INDEX_ADD,
    MIXP_OP_NLL,
    MIXP_OP_LOG2, MIXP_OP_LOG10, MIXP_OP_ACOS, MIXP_OP_ASIN, MIXP_OP_TAN, MIXP_OP_SINH,
    MIXP_OP_COSH, MIXP_OP_ERFINV, MIXP_OP_POWER, MIXP_OP_ATAN2, MIXP_OP_PRELU,
    MIXP_OP_EMBEDDING_BAG,
    MIXP_OP_COUNT
} mixp_op_id;

/* How the losses of rows (of elements) become a result, as PyTorch's `reduction`. */
typedef enum mixp_reduction {
    MIXP_REDUCE_MEAN,           /* an f32 scalar. With class weights, the sum is divided by the
                                   weights of the targets that count                       */
    MIXP_REDUCE_SUM,            /* an f32 scalar                                           */
    MIXP_REDUCE_NONE,           /* f32, one value for each row (element): multiply it by a mask of
                                   tokens or by weights of rows, and reduce it with mixp_sum or
                                   mixp_mean. A row that does not count has 0              */
    MIXP_REDUCE_BATCHMEAN,      /* kl_div: the sum, divided by the first dimension         */
    MIXP_REDUCE_COUNT
} mixp_reduction;

/* Options of losses. All zero: PyTorch's defaults. Tensors get no gradient unless their line says
 * so. An option that a loss does not have must be 0. */
typedef struct mixp_loss_desc {
    mixp_reduction reduction;   /* how a loss becomes one number; every loss has it        */
    mixp_tensor *weight;        /* cross_entropy, nll, linear_cross_entropy: [classes], the classes'
                                   weights. bce, bce_with_logits: repeats to x's shape, the
                                   elements' weights, with a gradient. NULL = 1            */
    mixp_tensor *pos_weight;    /* bce_with_logits: weight of the part of positive targets; repeats
                                   to x's shape, with a gradient. NULL = 1                 */
    float        smoothing;     /* cross_entropy, linear_cross_entropy: label smoothing    */
    int          ignores;       /* cross_entropy, nll, linear_cross_entropy: 1: targets equal to
                                   `ignore` do not count; 0: those equal to MIXP_IGNORE    */
    int32_t      ignore;
    float        bound;         /* huber: delta. smooth_l1: beta. 0 = 1                    */
    int          log_target;    /* kl_div: 1: target contains log-probabilities            */
    mixp_tensor *bias;          /* linear_cross_entropy: [vocab], added to the logits, with a
                                   gradient. NULL = none                                   */
    int64_t      chunk;         /* linear_cross_entropy: rows at a time. 0 = the default   */
} mixp_loss_desc;

/* Applies a loss of two tensors with options; desc NULL = PyTorch's defaults. Returns an f32
 * scalar, or with MIXP_REDUCE_NONE one f32 value for each row or element. loss:
 * MIXP_OP_CROSS_ENTROPY, NLL, MSE, L1, SMOOTH_L1, HUBER, BCE, BCE_WITH_LOGITS or KL_DIV. Class,
 * gradients and errors are those of the function with that name; with equal options results are
 * bit-identical to that function's. kl_div's mean is PyTorch's: over all elements.
 *
 *     mixp_loss_desc d;
 *     memset(&d, 0, sizeof d);
 *     d.weight = weights;
 *     loss = mixp_loss_apply(ctx, MIXP_OP_CROSS_ENTROPY, logits, labels, &d);
 *
 * Targets of cross_entropy may be probabilities of x's shape (distillation, mixup): f32, f16 or
 * bf16, with a gradient. Class weights, smoothing and the reductions then are PyTorch's; the mean
 * is over the rows. Several operators run, in f32, and need memory for three arrays of x's shape.
 * Also made of several operators, in f32: weight of bce and bce_with_logits, pos_weight, and
 * gradients of the targets of kl_div, bce and bce_with_logits.
 *
 * A loss of no rows is 0 for a sum and NaN for a mean. MIXP_ERR_ARGUMENT: an option that the loss
 * does not have, or class weights that require a gradient. MIXP_ERR_SHAPE: a weight does not fit
 * the shapes. */
MIXPREC_API mixp_tensor *mixp_loss_apply(mixp_context *ctx, mixp_op_id loss, mixp_tensor *x,
                                         mixp_tensor *target, const mixp_loss_desc *desc);
/* mixp_loss_apply for linear_cross_entropy, a loss of three tensors. targets: i32. */
MIXPREC_API mixp_tensor *mixp_linear_cross_entropy_apply(mixp_context *ctx, mixp_tensor *x,
                                                         mixp_tensor *w, mixp_tensor *targets,
                                                         const mixp_loss_desc *desc);

/* KEEP. cast: to f32, f16 or bf16, also from f64, u8, i32 and i64; rounded once, to nearest even.
 * Under a guard a cast to f16 or bf16 can fall back, as any operator, and its result is f32 then.
 * reshape: shares x's memory; one dimension may be -1. transpose: copies of any dtype with two
 * dimensions swapped; a negative dimension counts from the end. */
MIXPREC_API mixp_tensor *mixp_cast(mixp_context *ctx, mixp_tensor *x, mixp_dtype dtype);
MIXPREC_API mixp_tensor *mixp_reshape(mixp_context *ctx, mixp_tensor *x, int rank,
                                      const int64_t *shape);
MIXPREC_API mixp_tensor *mixp_transpose(mixp_context *ctx, mixp_tensor *x, int dim0,
                                        int dim1);
/* KEEP. squeeze: x's memory without a dimension of size 1 (any other size is kept; MIXP_ALL:
 * without all of size 1). unsqueeze: with a new one at dim, -rank-1..rank. */
MIXPREC_API mixp_tensor *mixp_squeeze(mixp_context *ctx, mixp_tensor *x, int dim);
MIXPREC_API mixp_tensor *mixp_unsqueeze(mixp_context *ctx, mixp_tensor *x, int dim);
/* KEEP. Copies, of any dtype. permute: dimension i of the result is dims[i] of x. flip: reversed
 * along dim. expand: repeats dimensions of size 1, and adds ones at the left, up to
 * shape; -1 keeps a size. The gradient of expand sums over the repeats, as that of mixp_add does.
 * MIXP_ERR_SHAPE: a dimension is missing, named twice, or does not fit. */
MIXPREC_API mixp_tensor *mixp_permute(mixp_context *ctx, mixp_tensor *x, int rank,
                                      const int *dims);
MIXPREC_API mixp_tensor *mixp_flip(mixp_context *ctx, mixp_tensor *x, int dim);
MIXPREC_API mixp_tensor *mixp_expand(mixp_context *ctx, mixp_tensor *x, int rank,
                                     const int64_t *shape);
/* KEEP. x (u8 and i32 too) with `before` and `after` elements of value around it along dim; neither
 * is below 0. MIXP_ERR_ARGUMENT: a finite value becomes Inf in the result's dtype. */
MIXPREC_API mixp_tensor *mixp_pad(mixp_context *ctx, mixp_tensor *x, int dim, int64_t before,
                                  int64_t after, float value);
/* KEEP. Returns x's memory as a constant: no gradient flows through the result, like PyTorch's
 * detach. */
MIXPREC_API mixp_tensor *mixp_detach(mixp_context *ctx, mixp_tensor *x);
/* PROMOTE. Joins n tensors along dim; the other dimensions must be equal. */
MIXPREC_API mixp_tensor *mixp_concat(mixp_context *ctx, int n, mixp_tensor *const *x,
                                     int dim);
/* PROMOTE. Joins n tensors of one shape along a new dimension, at dim of the result. */
MIXPREC_API mixp_tensor *mixp_stack(mixp_context *ctx, int n, mixp_tensor *const *x, int dim);
/* KEEP. A copy of [first, first + count) along dim, of any dtype. A negative dim or first counts
 * from the end: mixp_slice(ctx, x, 1, -1, 1) is the last column. */
MIXPREC_API mixp_tensor *mixp_slice(mixp_context *ctx, mixp_tensor *x, int dim,
                                    int64_t first, int64_t count);
/* Fills parts[n] with n slices of equal size, in order. On error, all parts are NULL. */
MIXPREC_API mixp_result mixp_split(mixp_context *ctx, mixp_tensor *x, int dim, int n,
                                   mixp_tensor **parts);
/* The same with sizes[n], whose sum must be the size of the dimension. */
MIXPREC_API mixp_result mixp_split_sizes(mixp_context *ctx, mixp_tensor *x, int dim, int n,
                                         const int64_t *sizes, mixp_tensor **parts);

/* Returns the row of a built-in operator, such as MIXP_OP_LINEAR. NULL for an unknown id. */
MIXPREC_API const mixp_op *mixp_op_builtin(mixp_op_id id);

