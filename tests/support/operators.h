/* operators.h - the one list of built-in operators for all tests: a row for each row of the library's table. What is
 * true of every operator is asserted over this list, so a new operator needs one row here.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * Include it after mixprec.h and test.h. Who runs over the list:
 *     tests/core/operators/test_every_operator.c   tangent beside gradient beside differences, in each dtype
 *     tests/core/operators/test_any_batch.c        one set of bits in any batch, on each instruction set
 *     tests/core/autocast/test_autocast.c          stored dtypes at each level
 *     tests/core/tape/test_stale.c                 what a backward pass reads
 *     tests/core/watch/test_guard_traits.c         the guard's traits
 */
#ifndef OPERATORS_H
#define OPERATORS_H

#include "examples/ops.h"

/* What an operator is applied to. A test fills in what it has; a call uses what its row needs. */
typedef struct op_in {
    mixp_context  *c;
    mixp_tensor   *x, *y, *z;   /* [.., rows, cols] of one shape; cols is a multiple of 4          */
    mixp_tensor   *w;           /* [cols, cols]                                                    */
    mixp_tensor   *v, *u;       /* [cols]                                                          */
    mixp_tensor   *i;           /* i32 [.., rows], in [0, cols): a class, or a row of w            */
    mixp_tensor   *a;           /* i32 [.., rows, cols], in [0, cols): places in a row             */
    mixp_tensor   *j;           /* i32 [cols], in [0, cols)                                        */
    mixp_tensor   *m;           /* u8 [.., rows, cols], a mask                                     */
    float          k;           /* the operator's number: an exponent, a slope, a bound            */
    mixp_reduction reduction;   /* of losses                                                       */
    mixp_op_id     loss;        /* of the row LOSS, with a set of options                          */
    unsigned       options;
} op_in;

/* The options of losses: the fields of mixp_loss_desc, and targets that are probabilities and have a gradient. */
enum { OP_WEIGHT = 1, OP_POS_WEIGHT = 2, OP_SMOOTHING = 4, OP_IGNORE = 8, OP_BOUND = 16, OP_LOG_TARGET = 32, OP_MARGIN = 64,
       OP_SWAP = 128, OP_BIAS = 256, OP_CHUNK = 512, OP_PROBABILITIES = 1024, OP_OPTIONS = 2048 };

static inline mixp_tensor *op_loss(const op_in *o, mixp_op_id loss, mixp_tensor *target, float bound) {
    mixp_loss_desc d;
    memset(&d, 0, sizeof d);
    d.reduction = o->reduction;
    d.bound = bound;
    if (loss == MIXP_OP_LINEAR_CROSS_ENTROPY) return mixp_linear_cross_entropy_apply(o->c, o->x, o->w, target, &d);
    return mixp_loss_apply(o->c, loss, o->x, target, &d);
}
/* mixp_smooth_l1 and mixp_huber, whose bound may be 0. */
static inline mixp_tensor *op_bounded(const op_in *o, mixp_op_id loss) {
    if (o->reduction != MIXP_REDUCE_MEAN) return op_loss(o, loss, o->y, o->k);
    return loss == MIXP_OP_HUBER ? mixp_huber(o->c, o->x, o->y, o->k) : mixp_smooth_l1(o->c, o->x, o->y, o->k);
}
/* Any loss with any set of its options. x and y are numbers of any size; the loss gets of them what it takes. */
static inline mixp_tensor *op_loss_with(const op_in *o) {
    const unsigned is = o->options;
    const int   by_class = o->loss == MIXP_OP_CROSS_ENTROPY || o->loss == MIXP_OP_NLL || o->loss == MIXP_OP_LINEAR_CROSS_ENTROPY;
    mixp_tensor *x = o->x, *target = o->y;
    mixp_loss_desc d;
    memset(&d, 0, sizeof d);
    d.reduction = o->reduction;
    if (is & OP_WEIGHT) d.weight = by_class ? mixp_sigmoid(o->c, o->u) : o->v;
    if (is & OP_POS_WEIGHT) d.pos_weight = o->v;
    if (is & OP_SMOOTHING) d.smoothing = 0.25f;
    if (is & OP_IGNORE) d.ignores = 1, d.ignore = 3;
    if (is & OP_BOUND) d.bound = 0.375f;
    if (is & OP_LOG_TARGET) d.log_target = 1;
    if (is & OP_BIAS) d.bias = o->v;
    if (is & OP_CHUNK) d.chunk = 2;
    if (o->loss == MIXP_OP_COUNT)
        return mixp_triplet_margin(o->c, x, target, o->z, is & OP_MARGIN ? 0.75f : 1.0f, (is & OP_SWAP) != 0, o->reduction);
    if (by_class) target = is & OP_PROBABILITIES ? mixp_softmax(o->c, target) : o->i;
    else if (is & OP_PROBABILITIES || (o->loss == MIXP_OP_KL_DIV && !(is & OP_LOG_TARGET))) target = mixp_sigmoid(o->c, target);
    if (o->loss == MIXP_OP_LINEAR_CROSS_ENTROPY) return mixp_linear_cross_entropy_apply(o->c, x, o->w, target, &d);
    if (o->loss == MIXP_OP_BCE) x = mixp_sigmoid(o->c, x);
    return mixp_loss_apply(o->c, o->loss, x, target, &d);
}
static inline mixp_tensor *op_attention(const op_in *o) {
    mixp_tensor *in[3], *y;
    mixp_attention_desc d;
    memset(&d, 0, sizeof d);
    d.heads = 2;
    in[0] = o->x;
    in[1] = o->y;
    in[2] = o->z;
    for (int i = 0; i < 3 && in[i] && in[i]->rank == 2; i++) in[i] = mixp_unsqueeze(o->c, in[i], 0);
    y = mixp_attention_apply(o->c, in[0], in[1], in[2], &d);
    return y && o->x->rank == 2 ? mixp_squeeze(o->c, y, 0) : y;
}
static inline mixp_tensor *op_joined(const op_in *o, int stack) {
    mixp_tensor *two[2];
    two[0] = o->x;
    two[1] = o->y;
    return stack ? mixp_stack(o->c, 2, two, -1) : mixp_concat(o->c, 2, two, -1);
}
/* x with pairs of columns; expanded: with each element twice. */
static inline mixp_tensor *op_pairs(const op_in *o, int expanded) {
    int64_t shape[MIXP_MAX_RANK];
    const int rank = o->x->rank;
    memcpy(shape, o->x->shape, sizeof shape);
    shape[rank] = 2;
    if (expanded) return mixp_expand(o->c, mixp_unsqueeze(o->c, o->x, -1), rank + 1, shape);
    shape[rank - 1] /= 2;
    return mixp_reshape(o->c, o->x, rank + 1, shape);
}
/* prelu's slopes: one for each column of a matrix, or one for all. */
static inline mixp_tensor *op_slopes(const op_in *o) { return o->x->rank == 2 ? o->v : mixp_slice(o->c, o->v, 0, 0, 1); }

/* The norm of a sum, plus the sum. */
static inline mixp_tensor *op_second(const op_in *o, int layer) {
    mixp_tensor *sum = NULL, *y = layer ? mixp_add_layer_norm(o->c, o->x, o->y, o->v, o->u, 1e-5f, &sum)
                                        : mixp_add_rms_norm(o->c, o->x, o->y, o->v, 1e-5f, &sum);
    return mixp_add(o->c, y, sum);
}
static inline mixp_tensor *op_permuted(const op_in *o) {
    int dims[MIXP_MAX_RANK];
    const int rank = o->x->rank;
    for (int i = 0; i < rank; i++) dims[i] = i < rank - 2 ? i : 2 * rank - 3 - i;
    return mixp_permute(o->c, o->x, rank, dims);
}
/* Each row of a names rows of w, and x holds their factors. */
static inline mixp_tensor *op_bag(const op_in *o) {
    const int     is_flat = o->x->rank == 2;
    const int64_t flat[2] = { -1, o->x->shape[o->x->rank - 1] };
    mixp_tensor  *ids = is_flat ? o->a : mixp_reshape(o->c, o->a, 2, flat);
    mixp_tensor  *weights = is_flat ? o->x : mixp_reshape(o->c, o->x, 2, flat);
    mixp_tensor  *y = mixp_embedding_bag(o->c, o->w, ids, NULL, weights, MIXP_BAG_SUM, MIXP_NO_PADDING);
    return is_flat ? y : mixp_reshape(o->c, y, o->x->rank, o->x->shape);
}
static inline mixp_tensor *op_turned(const op_in *o) {
    mixp_rope_desc d;
    memset(&d, 0, sizeof d);
    d.head_dim = (int)o->x->shape[o->x->rank - 1] / 2;
    return mixp_rope(o->c, o->x, &d);
}

/* id; stored dtype at level 1 and from level 2 on; domain; batch; traits; k; gradients; call.
 *   dtypes     L the region's, F f32, K the input's, I i32, B u8, C the dtype that the call casts to
 *   domain     of x and y: R all numbers, P positive, U in (-1, 1), 1 in (0, 1)
 *   batch      R a row's result depends on this row, S on its sequence, N not compared: random numbers, or banned
 *   traits     the guard's: C cuts, R rounds, M may mean Inf, S shrinks, D dropout, A scores; O: other
 *              results than the guard judges, such as losses, masks and ids (topk and sort gather by ids)
 *   k          the number of the call, where a test sets no other
 *   gradients  input:what its gradient is made from, as calculus has it; r is the result. nll has one function with
 *              cross_entropy, so x is read, too. !: mixp_jvp refuses the operator                                    */
#define OPERATORS(X)                                                                                                  \
    X(LINEAR,           L, L, R, R, "R",  0,    "x:w w:x v:",           mixp_linear(c, x, w, v))                      \
    X(MATMUL,           L, L, R, R, "R",  0,    "x:w w:x",              mixp_matmul(c, x, w, 0, 0))                   \
    X(ATTENTION,        L, L, R, S, "AO", 0,    "!x:xyzr y:xyzr z:xyzr", op_attention(o))                              \
    X(ADD,              K, L, R, R, "R",  0,    "x: y:",                mixp_add(c, x, y))                            \
    X(SUB,              K, L, R, R, "RC", 0,    "x: y:",                mixp_sub(c, x, y))                            \
    X(MUL,              K, L, R, R, "R",  0,    "x:y y:x",              mixp_mul(c, x, y))                            \
    X(DIV,              K, L, P, R, "RM", 0,    "y:x x:xy",             mixp_div(c, y, x))                            \
    X(SCALE,            K, L, R, R, "R",  1.5f, "x:",                   mixp_scale(c, x, k))                          \
    X(RELU,             K, L, R, R, "C",  0,    "x:x",                  mixp_relu(c, x))                              \
    X(GELU,             K, L, R, R, "C",  0,    "x:x",                  mixp_gelu(c, x))                              \
    X(GELU_TANH,        K, L, R, R, "C",  0,    "x:x",                  mixp_gelu_tanh(c, x))                         \
    X(SILU,             K, L, R, R, "C",  0,    "x:x",                  mixp_silu(c, x))                              \
    X(TANH,             K, L, R, R, "C",  0,    "x:r",                  mixp_tanh(c, x))                              \
    X(SIGMOID,          K, L, R, R, "C",  0,    "x:r",                  mixp_sigmoid(c, x))                           \
    X(SQRT,             K, L, P, R, "S",  0,    "x:r",                  mixp_sqrt(c, x))                              \
    X(EXP,              F, L, R, R, "C",  0,    "x:r",                  mixp_exp(c, x))                               \
    X(LOG,              F, L, P, R, "S",  0,    "x:x",                  mixp_log(c, x))                               \
    X(POW,              F, L, P, R, "M",  -1,   "x:x",                  mixp_pow(c, x, k))                            \
    X(SUM,              F, L, R, R, "",   0,    "x:",                   mixp_sum(c, x, -1, 0))                        \
    X(MEAN,             K, L, R, R, "R",  0,    "x:",                   mixp_mean(c, x, -1, 1))                       \
    X(SOFTMAX,          F, L, R, R, "C",  0,    "x:r",                  mixp_softmax(c, x))                           \
    X(LOG_SOFTMAX,      F, L, R, R, "C",  0,    "x:r",                  mixp_log_softmax(c, x))                       \
    X(LAYER_NORM,       F, L, R, R, "",   0,    "!x:xv v:x u:",         mixp_layer_norm(c, x, v, u, 1e-5f))           \
    X(RMS_NORM,         F, L, R, R, "",   0,    "!x:xv v:x",            mixp_rms_norm(c, x, v, 1e-5f))                \
    X(EMBEDDING,        K, L, R, R, "O",  0,    "w:i",                  mixp_embedding(c, w, o->i))                   \
    X(DROPOUT,          K, L, R, N, "DC", 0.5f, "!x:",                  mixp_dropout(c, x, k, 1))                     \
    X(CROSS_ENTROPY,    F, F, R, R, "O",  0,    "x:xi",                 op_loss(o, MIXP_OP_CROSS_ENTROPY, o->i, 0))   \
    X(MSE,              F, F, R, R, "O",  0,    "x:xy y:xy",            op_loss(o, MIXP_OP_MSE, y, 0))                \
    X(BCE_WITH_LOGITS,  F, F, R, R, "O",  0,    "x:xy",                 op_loss(o, MIXP_OP_BCE_WITH_LOGITS, y, 0))    \
    X(BCE,              F, F, 1, N, "O",  0,    "!x:xy",                op_loss(o, MIXP_OP_BCE, y, 0))                \
    X(CAST,             C, C, R, R, "O",  0,    "x:",                   mixp_cast(c, x, OP_OTHER(x)))                 \
    X(RESHAPE,          K, K, R, R, "O",  0,    "x:",                   op_pairs(o, 0))                               \
    X(TRANSPOSE,        K, L, R, S, "",   0,    "x:",                   mixp_transpose(c, x, -1, -2))                 \
    X(CONCAT,           K, L, R, R, "",   0,    "x: y:",                op_joined(o, 0))                              \
    X(SLICE,            K, L, R, R, "",   0,    "x:",                   mixp_slice(c, x, -1, 1, 2))                   \
    X(NEG,              K, L, R, R, "",   0,    "x:",                   mixp_neg(c, x))                               \
    X(ABS,              K, L, R, R, "",   0,    "x:x",                  mixp_abs(c, x))                               \
    X(SIN,              K, L, R, R, "",   0,    "x:x",                  mixp_sin(c, x))                               \
    X(COS,              K, L, R, R, "",   0,    "x:x",                  mixp_cos(c, x))                               \
    X(CLAMP,            K, L, R, R, "C",  1,    "x:x",                  mixp_clamp(c, x, -1.0f, k))                   \
    X(RELU_SQUARED,     K, L, R, R, "C",  0,    "x:x",                  mixp_relu_squared(c, x))                      \
    X(SOFT_CAP,         K, L, R, R, "C",  2,    "x:x",                  mixp_soft_cap(c, x, k))                       \
    X(MAXIMUM,          K, L, R, R, "C",  0,    "x:xy y:xy",            mixp_maximum(c, x, y))                        \
    X(MINIMUM,          K, L, R, R, "C",  0,    "x:xy y:xy",            mixp_minimum(c, x, y))                        \
    X(SWIGLU,           K, L, R, R, "RC", 0,    "x:xy y:x",             mixp_swiglu(c, x, y))                         \
    X(SWIGLU_PACKED,    K, L, R, R, "RC", 0,    "!x:x",                 mixp_swiglu_packed(c, x))                     \
    X(L1,               F, F, R, R, "O",  0,    "x:xy y:xy",            op_loss(o, MIXP_OP_L1, y, 0))                 \
    X(SMOOTH_L1,        F, F, R, R, "O",  1,    "x:xy y:xy",            op_bounded(o, MIXP_OP_SMOOTH_L1))             \
    X(HUBER,            F, F, R, R, "O",  1,    "x:xy y:xy",            op_bounded(o, MIXP_OP_HUBER))                 \
    X(KL_DIV,           F, F, 1, R, "O",  0,    "!x:xy",                op_loss(o, MIXP_OP_KL_DIV, y, 0))             \
    X(LINEAR_CROSS_ENTROPY, F, F, R, R, "SO", 0, "!x:xwi w:xwi", op_loss(o, MIXP_OP_LINEAR_CROSS_ENTROPY, o->i, 0))    \
    X(MAX,              K, L, R, R, "C",  0,    "!x:",                  mixp_max(c, x, -1, 0))                        \
    X(ARGMAX,           I, I, R, R, "O",  0,    "",                     mixp_argmax(c, x, -1, 0))                     \
    X(GATHER,           K, L, R, R, "",   0,    "x:a",                  mixp_gather(c, x, -1, o->a))                  \
    X(WHERE,            K, L, R, R, "CM", 0,    "x: y:",                mixp_where(c, o->m, y, x))                    \
    X(MASKED_FILL,      K, L, R, R, "CM", -INFINITY, "x:",              mixp_masked_fill(c, x, o->m, k))              \
    X(ROPE,             K, L, R, S, "",   0,    "!x:",                  op_turned(o))                                 \
    X(DETACH,           K, K, R, R, "O",  0,    "",                     mixp_detach(c, x))                            \
    X(SQUARE,           F, L, R, R, "",   0,    "x:x",                  mixp_square(c, x))                            \
    X(RECIPROCAL,       F, L, P, R, "M",  0,    "x:x",                  mixp_reciprocal(c, x))                        \
    X(LOG1P,            F, L, P, R, "S",  0,    "x:x",                  mixp_log1p(c, x))                             \
    X(EXPM1,            F, L, R, R, "C",  0,    "x:x",                  mixp_expm1(c, x))                             \
    X(ERF,              K, L, R, R, "C",  0,    "x:x",                  mixp_erf(c, x))                               \
    X(SOFTPLUS,         F, L, R, R, "C",  1,    "x:x",                  mixp_softplus(c, x, k))                       \
    X(LEAKY_RELU,       K, L, R, R, "C",  0,    "x:x",                  mixp_leaky_relu(c, x, k))                     \
    X(ELU,              K, L, R, R, "C",  1,    "x:x",                  mixp_elu(c, x, k))                            \
    X(ADD_SCALAR,       K, L, R, R, "RM", 1.5f, "x:",                   mixp_add_scalar(c, x, k))                     \
    X(RSUB,             K, L, R, R, "RM", 1.5f, "x:",                   mixp_rsub(c, x, k))                           \
    X(PERMUTE,          K, L, R, S, "",   0,    "x:",                   op_permuted(o))                               \
    X(FLIP,             K, L, R, R, "",   0,    "x:",                   mixp_flip(c, x, -1))                          \
    X(EXPAND,           K, L, R, R, "",   0,    "x:",                   op_pairs(o, 1))                               \
    X(PAD,              K, L, R, R, "M",  -INFINITY, "x:",              mixp_pad(c, x, -1, 1, 2, k))                  \
    X(STACK,            K, L, R, R, "",   0,    "x: y:",                op_joined(o, 1))                              \
    X(EQ,               B, B, R, R, "O",  0,    "",                     mixp_eq(c, x, y))                             \
    X(NE,               B, B, R, R, "O",  0,    "",                     mixp_ne(c, x, y))                             \
    X(GT,               B, B, R, R, "O",  0,    "",                     mixp_gt(c, x, y))                             \
    X(GE,               B, B, R, R, "O",  0,    "",                     mixp_ge(c, x, y))                             \
    X(LT,               B, B, R, R, "O",  0,    "",                     mixp_lt(c, x, y))                             \
    X(LE,               B, B, R, R, "O",  0,    "",                     mixp_le(c, x, y))                             \
    X(PROD,             F, L, R, R, "",   0,    "!x:",                  mixp_prod(c, x, -1, 0))                       \
    X(CUMSUM,           F, L, R, R, "",   0,    "x:",                   mixp_cumsum(c, x, -1))                        \
    X(ONE_HOT,          I, I, R, R, "O",  0,    "",                     mixp_one_hot(c, o->i, 48, MIXP_I32))          \
    X(SCATTER_ADD,      K, L, R, R, "R",  0,    "x:a y:a",              mixp_scatter_add(c, y, -1, o->a, x))          \
    X(TOPK,             K, L, R, R, "O",  0,    "x:",                   mixp_topk(c, x, 3, -1, 1, NULL))              \
    X(SORT,             K, L, R, R, "O",  0,    "x:",                   mixp_sort(c, x, -1, 0, NULL))                 \
    X(INDEX_ADD,        K, L, R, R, "R",  0,    "x: y:",                mixp_index_add(c, y, -1, o->j, x))            \
    X(NLL,              F, F, R, R, "O",  0,    "x:xi",                 op_loss(o, MIXP_OP_NLL, o->i, 0))             \
    X(LOG2,             F, L, P, R, "S",  0,    "x:x",                  mixp_log2(c, x))                              \
    X(LOG10,            F, L, P, R, "S",  0,    "x:x",                  mixp_log10(c, x))                             \
    X(ACOS,             F, L, U, R, "M",  0,    "x:x",                  mixp_acos(c, x))                              \
    X(ASIN,             F, L, U, R, "M",  0,    "x:x",                  mixp_asin(c, x))                              \
    X(TAN,              F, L, U, R, "",   0,    "x:r",                  mixp_tan(c, x))                               \
    X(SINH,             F, L, R, R, "",   0,    "x:x",                  mixp_sinh(c, x))                              \
    X(COSH,             F, L, R, R, "",   0,    "x:x",                  mixp_cosh(c, x))                              \
    X(ERFINV,           F, L, U, R, "M",  0,    "x:x",                  mixp_erfinv(c, x))                            \
    X(POWER,            F, L, P, R, "M",  0,    "x:xy y:xy",            mixp_power(c, x, y))                          \
    X(ATAN2,            K, L, R, R, "",   0,    "x:xy y:xy",            mixp_atan2(c, x, y))                          \
    X(PRELU,            L, L, R, R, "RC", 0,    "x:xv v:xv",            mixp_prelu(c, x, op_slopes(o)))                \
    X(EMBEDDING_BAG,    K, L, R, R, "R",  0,    "w:xa x:wa",            op_bag(o))

/* The public functions that are made of operators: name, domain, batch, gradients, call. */
#define OP_COMPOSED(X)                                                                                                \
    X(mlp,             R, R, "x: w: v:",   mixp_mlp(c, x, w, v, w, u))                                                \
    X(einsum,          R, R, "x: w:",      mixp_einsum(c, x->rank == 2 ? "tc,dc->td" : "btc,dc->btd", x, w))          \
    X(addcdiv,         P, R, "z: x: y:",   mixp_addcdiv(c, o->z, x, y, k))                                            \
    X(min,             R, R, "x:",         mixp_min(c, x, -1, 0))                                                     \
    X(argmin,          R, R, "",           mixp_argmin(c, x, -1, 0))                                                  \
    X(logsumexp,       R, R, "x:",         mixp_logsumexp(c, x, -1, 0))                                               \
    X(var,             R, R, "x:",         mixp_var(c, x, -1, 1, 0))                                                  \
    X(std,             R, R, "x:",         mixp_std(c, x, -1, 1, 0))                                                  \
    X(vector_norm,     R, R, "x:",         mixp_vector_norm(c, x, -1, 0))                                             \
    X(norm,            R, R, "x:",         mixp_norm(c, x, k, -1, 0))                                                 \
    X(cumprod,         R, R, "x:",         mixp_cumprod(c, x, -1))                                                    \
    X(add_layer_norm,  R, R, "!x: y: v:",  op_second(o, 1))                                                           \
    X(add_rms_norm,    R, R, "!x: y: v:",  op_second(o, 0))                                                           \
    X(scatter,         R, R, "x: y:",      mixp_scatter(c, y, -1, o->a, x))                                           \
    X(searchsorted,    R, R, "",           mixp_searchsorted(c, mixp_sort(c, v, 0, 0, NULL), x, 0))                   \
    X(cross_entropy_smooth, R, N, "x:",    mixp_cross_entropy_smooth(c, x, o->i, 3, k / 2))                           \
    X(kl_div_of_logs,  R, N, "!x:",        mixp_kl_div(c, x, y, 1))                                                   \
    X(triplet_margin,  R, N, "x: y: z:",   mixp_triplet_margin(c, x, y, o->z, k, 0, o->reduction))                    \
    X(squeeze,         R, R, "x:",         mixp_squeeze(c, mixp_unsqueeze(c, x, -1), -1))                             \
    X(roll,            R, R, "x:",         mixp_roll(c, x, 3, -1))                                                    \
    X(tril,            R, S, "x:",         mixp_tril(c, x, 1))                                                        \
    X(triu,            R, S, "x:",         mixp_triu(c, x, 1))                                                        \
    X(LOSS,            R, N, "x: y: w: v: z:", op_loss_with(o))

#define OP_OTHER(x) ((x)->dtype == MIXP_F32 ? MIXP_BF16 : MIXP_F32)

#define OP_FUNCTION(id, level1, level2, domain, batch, traits, number, gradients, call)                               \
    static inline mixp_tensor *op_run_##id(const op_in *o) {                                                          \
        mixp_context *c = o->c;                                                                                       \
        mixp_tensor  *x = o->x, *y = o->y, *w = o->w, *v = o->v, *u = o->u;                                           \
        const float   k = o->k;                                                                                       \
        (void)c, (void)x, (void)y, (void)w, (void)v, (void)u, (void)k;                                                \
        return call;                                                                                                  \
    }
OPERATORS(OP_FUNCTION)
#define OP_COMPOSED_FUNCTION(name, domain, batch, gradients, call) OP_FUNCTION(name, , , , , , , , call)
OP_COMPOSED(OP_COMPOSED_FUNCTION)

/* The columns of one letter. */
enum { OP_LEVEL1, OP_LEVEL2, OP_DOMAIN, OP_BATCH };
typedef struct op_row {
    const char   *name;
    mixp_op_id    id;           /* MIXP_OP_COUNT: a composed function                              */
    const char   *is;           /* [OP_DOMAIN]: its domain                                         */
    const char   *traits;
    float         k;
    const char   *gradients;
    mixp_tensor *(*run)(const op_in *o);
} op_row;

#define OP_ROW(id, level1, level2, domain, batch, traits, k, gradients, call)                                         \
    { #id, MIXP_OP_##id, #level1 #level2 #domain #batch, traits, (float)(k), gradients, op_run_##id },
#define OP_COMPOSED_ROW(name, domain, batch, gradients, call)                                                         \
    { "mixp_" #name, MIXP_OP_COUNT, "--" #domain #batch, "O", 1.0f, gradients, op_run_##name },
/* The operators come first. */
static const op_row op_rows[] = { OPERATORS(OP_ROW) OP_COMPOSED(OP_COMPOSED_ROW) };
enum { OP_ROWS = sizeof op_rows / sizeof *op_rows };

/* This does not compile while an operator of the table has no row above. */
#define OP_ONE(id, level1, level2, domain, batch, traits, k, gradients, call) +1
typedef char op_rows_lack_an_operator[OPERATORS(OP_ONE) == MIXP_OP_COUNT ? 1 : -1];

static inline const char *op_name(mixp_op_id id) { return mixp_op_builtin(id)->name; }

static inline const op_row *op_row_of(mixp_op_id id) {
    for (int i = 0; i < MIXP_OP_COUNT; i++)
        if (op_rows[i].id == id) return &op_rows[i];
    test_bad++;
    TEST_SHOW("tests/support/operators.h: OPERATORS has no row for '%s': add one", op_name(id));
    return &op_rows[0];
}

/* A number of the row's domain, for one in [-2, 2]. */
static inline float op_in_domain(const op_row *r, float value) {
    const float size = value < 0 ? -value : value;
    const char  domain = r->is[OP_DOMAIN];
    return domain == 'P' ? size + 0.125f : domain == 'U' ? value * 0.5f
         : domain == '1' ? size * 0.5f + 0.0625f : value;
}

/* The operands of a call by their letters: x y z w v u i a j m. */
static inline mixp_tensor **op_operand(op_in *o, char letter) {
    switch (letter) {
    case 'x': return &o->x;
    case 'y': return &o->y;
    case 'z': return &o->z;
    case 'w': return &o->w;
    case 'v': return &o->v;
    case 'u': return &o->u;
    case 'i': return &o->i;
    case 'a': return &o->a;
    case 'j': return &o->j;
    default:  return &o->m;
    }
}

static inline int op_has_no_tangent(const op_row *r) { return *r->gradients == '!'; }

/* The inputs of a row that have a gradient: their letters, and for each what its gradient reads. Returns how many. */
enum { OP_INPUTS = 5 };
typedef struct op_input { char letter, reads[8]; } op_input;
static inline int op_inputs(const op_row *r, op_input in[OP_INPUTS]) {
    const char *text = r->gradients + op_has_no_tangent(r);
    int n = 0;
    for (; *text && n < OP_INPUTS; n++) {
        in[n].letter = *text;
        text += 2;
        size_t length = strcspn(text, " ");
        memcpy(in[n].reads, text, length);
        in[n].reads[length] = '\0';
        text += length + (text[length] == ' ');
    }
    return n;
}
#endif
