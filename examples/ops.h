/* ops.h - functions of PyTorch that are made of mixprec's operators: einsum, norm, cumprod, tril, triu, roll, addcdiv,
 * scatter, searchsorted, scaled_dot_product_attention, triplet_margin; and gradcheck. It uses only the public API.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * Include this file after mixprec.h, in C or C++. It runs on every device. A function returns NULL on an error, and the
 * context keeps the error: MIXP_ERR_ARGUMENT if a tensor is NULL; otherwise the errors of mixprec's operators, or those
 * of the function's comment. Gradients, mixp_jvp, autocast, the guard, threads and determinism are those of the
 * operators that a function applies. Results live until the next step. Each function works like PyTorch's function of
 * the same name. */
#ifndef OPS_H
#define OPS_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* To export the functions from a library, define OPS_API as what declares them, such as extern, before one file of the
 * library includes this file. Its users define the same OPS_API and OPS_NO_IMPLEMENTATION. */
#if defined(OPS_API)
#elif defined(__GNUC__)
#  define OPS_API static __attribute__((__unused__))
#else
#  define OPS_API static
#endif

/* The sum of products that an equation of letters describes, as "bhqd,bhkd->bhqk": one letter for each dimension, at
 * most 8 per operand. A letter that the result lacks is summed. Without "->" the result has the letters that occur once,
 * in alphabetical order. The function permutes and reshapes both operands, and runs one mixp_matmul, low under autocast.
 * A letter that only one operand has, and the result lacks, is summed before, by mixp_sum. MIXP_ERR_ARGUMENT: the
 * equation does not have two operands, has a letter twice in one of them, or a letter of the result in none.
 * MIXP_ERR_SHAPE: the letters do not fit the shapes. */
OPS_API mixp_tensor *mixp_einsum(mixp_context *ctx, const char *equation, mixp_tensor *a, mixp_tensor *b);
/* x + value a / b, with NumPy's broadcasting, in the widest dtype. */
OPS_API mixp_tensor *mixp_addcdiv(mixp_context *ctx, mixp_tensor *x, mixp_tensor *a, mixp_tensor *b, float value);
/* The norm of any order: sum(|x|^order)^(1/order), in f32, rounded once. Order 0 counts the elements that are not 0,
 * without a gradient. Orders Inf and -Inf are the largest and the smallest |x|, with the gradient of mixp_max. The
 * gradient is 0 where x is 0. MIXP_ERR_ARGUMENT: the order is NaN. MIXP_ERR_SHAPE: 0 elements, and the order is negative
 * or Inf. */
OPS_API mixp_tensor *mixp_norm(mixp_context *ctx, mixp_tensor *x, float order, int dim, int keep);
/* Element i along dim is the product of elements 0 to i, in f32. The function runs log2(n) products, n the size of dim,
 * and each keeps a copy of x for the gradient. The gradient does not divide by x. */
OPS_API mixp_tensor *mixp_cumprod(mixp_context *ctx, mixp_tensor *x, int dim);
/* x[..., rows, cols] with zeros where col - row is above (triu: below) diagonal. MIXP_ERR_SHAPE: a rank below 2, or more
 * than 2^24 rows or columns. */
OPS_API mixp_tensor *mixp_tril(mixp_context *ctx, mixp_tensor *x, int64_t diagonal);
OPS_API mixp_tensor *mixp_triu(mixp_context *ctx, mixp_tensor *x, int64_t diagonal);
/* Shifts elements along dim, to higher indices if shift > 0; elements that leave at one end enter at the other. */
OPS_API mixp_tensor *mixp_roll(mixp_context *ctx, mixp_tensor *x, int64_t shift, int dim);
/* x, with element [.., ids[.., j, ..], ..] along dim replaced by src[.., j, ..]. Shapes and errors are those of
 * mixp_scatter_add. An element that ids name more than once becomes the sum of its sources; in PyTorch it becomes any
 * one of them. */
OPS_API mixp_tensor *mixp_scatter(mixp_context *ctx, mixp_tensor *x, int dim, mixp_tensor *ids, mixp_tensor *src);
/* For each value the number of edges below it (right 1: below or equal): the index at which the value keeps the
 * ascending edges in order. A NaN is above all edges. edges[n] for values of any shape, or edges[..., n] for
 * values[..., m]. Result: i32, the shape of values, no gradient. All edges are compared with all values: 6 n m bytes of
 * memory. MIXP_ERR_SHAPE: shapes that do not fit, more than 2^24 edges, values of rank MIXP_MAX_RANK. */
OPS_API mixp_tensor *mixp_searchsorted(mixp_context *ctx, mixp_tensor *edges, mixp_tensor *values, int right);
/* mixp_attention_apply in PyTorch's layout: q[b, heads, t, d], k and v [b, kv_heads, keys, d], and y as q. Heads and
 * kv_heads of desc may be 0; desc NULL = all defaults. It makes four transposing copies: projections whose heads stay
 * behind t, [b, t, heads, d], need none. Class, mask and other errors are those of mixp_attention_apply.
 * MIXP_ERR_SHAPE: a rank that is not 4. */
OPS_API mixp_tensor *mixp_scaled_dot_product_attention(mixp_context *ctx, mixp_tensor *q, mixp_tensor *k,
                                                       mixp_tensor *v, const mixp_attention_desc *desc);
/* max(0, |anchor - positive| - |anchor - negative| + margin) of each row, reduced; |d| is the Euclidean length of
 * d + 1e-6 over the last dimension. Three tensors of one shape; all get gradients. Computed and returned in f32.
 * PyTorch's defaults: margin 1, swap 0, MIXP_REDUCE_MEAN. swap 1: the negative's distance is that to the anchor or to
 * the positive, whichever is smaller. MIXP_ERR_ARGUMENT, as in PyTorch: margin is not positive. */
OPS_API mixp_tensor *mixp_triplet_margin(mixp_context *ctx, mixp_tensor *anchor, mixp_tensor *positive,
                                         mixp_tensor *negative, float margin, int swap, mixp_reduction reduction);

/* Checks the gradients of fn's scalar result against central differences, for every element of the inputs: f32
 * parameters or views that require gradients. Sets *worst to the largest |analytic - numeric| / max(1, |numeric|), or
 * to NaN if any value is not finite. eps: step; 0 = 1e-3. Calls fn 2 * elements + 2 times, each time after a
 * mixp_step_begin; fn must be deterministic. Inputs keep their values. Rounding in f32 makes a worst of about 1e-3; a
 * wrong gradient is far above 1e-2.
 *
 * MIXP_ERR_ORDER: fn returns two results for the same inputs, as with dropout, or runs under autocast, or an input is
 * not a parameter or a view but a result of an operator, which a step forgets. MIXP_ERR_DTYPE:
 * an input is not f32. MIXP_ERR_ARGUMENT: a pointer is NULL, there is no input, an input belongs to another context, or
 * eps is not finite. */
OPS_API mixp_result mixp_check_gradients(mixp_context *ctx, mixp_tensor *(*fn)(mixp_context *, void *),
                                         void *user, int n_inputs, mixp_tensor *const *inputs, double eps,
                                         double *worst);

#ifndef OPS_NO_IMPLEMENTATION

/* --- checks ------------------------------------------------------------------------------ */

static mixp_tensor *ops_fail(mixp_context *ctx, mixp_result code, const char *name, const char *why) {
    mixp_context_fail(ctx, code, "%s: %s", name, why);
    return NULL;
}

/* Is there a tensor of this context, f32, f16 or bf16 if `real`? */
static int ops_usable(mixp_context *ctx, const char *name, const char *what, const mixp_tensor *t, int real) {
    if (!ctx) return 0;
    if (!t) mixp_context_fail(ctx, MIXP_ERR_ARGUMENT, "%s: %s is NULL", name, what);
    else if (t->ctx != ctx)
        mixp_context_fail(ctx, MIXP_ERR_ARGUMENT, "%s: %s belongs to another context", name, what);
    else if (real && t->dtype != MIXP_F32 && t->dtype != MIXP_F16 && t->dtype != MIXP_BF16)
        mixp_context_fail(ctx, MIXP_ERR_DTYPE, "%s: %s is %s; it must be f32, f16 or bf16", name, what,
                          mixp_dtype_name(t->dtype));
    else return t->rank >= 0 && t->rank <= MIXP_MAX_RANK;
    return 0;
}

/* The number of a dimension, or -1 with an error. A scalar has dimension 0. */
static int ops_axis(mixp_context *ctx, const char *name, const mixp_tensor *x, int dim) {
    const int rank = x->rank ? x->rank : 1, axis = dim < 0 && dim != MIXP_ALL ? dim + rank : dim;
    if (axis >= 0 && axis < rank) return axis;
    mixp_context_fail(ctx, MIXP_ERR_SHAPE, "%s: x has rank %d, and no dimension %d", name, x->rank, dim);
    return -1;
}

/* --- numbers in f32 ---------------------------------------------------------------------- */

/* Opens a region in which operators compute and store f32, whatever region is open. */
static int ops_open_f32(mixp_context *ctx) {
    mixp_autocast f32;
    memset(&f32, 0, sizeof f32);
    f32.dtype = MIXP_F32;
    f32.level = 1;
    return mixp_autocast_open_with(ctx, &f32);
}

static mixp_tensor *ops_as_f32(mixp_context *ctx, mixp_tensor *x) {
    return x->dtype == MIXP_F32 ? x : mixp_cast(ctx, x, MIXP_F32);
}

/* y, made from an x of this dtype in f32, as one operator of class F32 would store it in the region. */
static mixp_tensor *ops_rounded(mixp_context *ctx, mixp_tensor *y, mixp_dtype dtype) {
    const mixp_autocast region = mixp_autocast_current(ctx);
    if (region.dtype != MIXP_F32) dtype = y && y->rank && region.level >= 2 ? region.dtype : MIXP_F32;
    return y && dtype != MIXP_F32 ? mixp_cast(ctx, y, dtype) : y;
}

static mixp_tensor *ops_constant(mixp_context *ctx, double value) { return mixp_full(ctx, MIXP_F32, 0, NULL, value); }

/* --- norm, cumprod ----------------------------------------------------------------------- */

/* t to the power p, with slope 0 and this value where t is 0. */
static mixp_tensor *ops_pow_except_0(mixp_context *ctx, mixp_tensor *t, float p, float at_0) {
    mixp_tensor *none = mixp_eq(ctx, t, ops_constant(ctx, 0.0));
    t = mixp_pow(ctx, mixp_masked_fill(ctx, t, none, 1.0f), p);
    return mixp_masked_fill(ctx, t, none, at_0);
}

static mixp_tensor *ops_norm_f32(mixp_context *ctx, mixp_tensor *x, float order, int dim, int keep) {
    const uint32_t inf = 0x7F800000u, bits = mixp_bits_of_f32(order);
    const float at_0 = order > 0.0f ? 0.0f : mixp_f32_of_bits(inf);
    mixp_tensor *t;
    if (order == 0.0f) {
        t = mixp_cast(ctx, mixp_ne(ctx, x, ops_constant(ctx, 0.0)), MIXP_F32);
        return mixp_sum(ctx, t, dim, keep);
    }
    t = mixp_abs(ctx, x);
    if (bits == inf) return mixp_max(ctx, t, dim, keep);
    if (bits == (inf | 0x80000000u)) return mixp_min(ctx, t, dim, keep);
    if (order == 1.0f) return mixp_sum(ctx, t, dim, keep);
    t = mixp_sum(ctx, ops_pow_except_0(ctx, t, order, at_0), dim, keep);
    /* In double: a division in f32 could trap in a program that lets overflows trap. */
    return ops_pow_except_0(ctx, t, mixp_f32_from_f64(1.0 / (double)order), at_0);
}

OPS_API mixp_tensor *mixp_norm(mixp_context *ctx, mixp_tensor *x, float order, int dim, int keep) {
    const int is_nan = (mixp_bits_of_f32(order) & 0x7FFFFFFFu) > 0x7F800000u;
    int axis = 0;
    if (!ops_usable(ctx, "norm", "x", x, 1)) return NULL;
    if (is_nan) return ops_fail(ctx, MIXP_ERR_ARGUMENT, "norm", "the order is NaN; pass a number");
    if (order == 2.0f) return mixp_vector_norm(ctx, x, dim, keep);
    if (dim != MIXP_ALL) axis = ops_axis(ctx, "norm", x, dim);
    if (axis < 0) return NULL;
    if (order < 0.0f && !(dim == MIXP_ALL || !x->rank ? x->count : x->shape[axis]))
        return ops_fail(ctx, MIXP_ERR_SHAPE, "norm", "a norm of negative order needs at least one element");

    const mixp_dtype dtype = x->dtype;
    const int region = ops_open_f32(ctx);
    if (region < 0) return NULL;
    mixp_tensor *y = ops_norm_f32(ctx, ops_as_f32(ctx, x), order, dim, keep);
    mixp_autocast_close(ctx, region);
    return ops_rounded(ctx, y, dtype);
}

/* Each pass multiplies by what lies 1, 2, 4 ... places before (Hillis and Steele, 1986). No gradient divides, so zeros
 * do no harm. */
OPS_API mixp_tensor *mixp_cumprod(mixp_context *ctx, mixp_tensor *x, int dim) {
    if (!ops_usable(ctx, "cumprod", "x", x, 1)) return NULL;
    const int axis = ops_axis(ctx, "cumprod", x, dim);
    if (axis < 0) return NULL;

    const int64_t n = x->rank ? x->shape[axis] : 1;
    const mixp_dtype dtype = x->dtype;
    const int region = ops_open_f32(ctx);
    if (region < 0) return NULL;
    mixp_tensor *y = mixp_reshape(ctx, ops_as_f32(ctx, x), x->rank, x->shape);
    for (int64_t s = 1; s < n; s *= 2) {
        mixp_tensor *before = mixp_slice(ctx, y, axis, 0, n - s);
        y = mixp_mul(ctx, y, mixp_pad(ctx, before, axis, s, 0, 1.0f));
    }
    mixp_autocast_close(ctx, region);
    return ops_rounded(ctx, y, dtype);
}

/* --- tril, triu, roll, addcdiv ----------------------------------------------------------- */

/* 1, 2 ... n along dim of a matrix whose other dimension is 1. */
static mixp_tensor *ops_counted(mixp_context *ctx, int64_t n, int dim) {
    int64_t shape[2];
    shape[dim] = n;
    shape[1 - dim] = 1;
    return mixp_cumsum(ctx, mixp_full(ctx, MIXP_F32, 2, shape, 1.0), dim);
}

/* x with zeros where column - row is above `diagonal` (side 1) or below it (side -1). */
static mixp_tensor *ops_triangle(mixp_context *ctx, const char *name, mixp_tensor *x, int64_t diagonal, int side) {
    const int64_t most = 1 << 24;
    if (!ops_usable(ctx, name, "x", x, 1)) return NULL;
    if (x->rank < 2 || x->shape[x->rank - 2] > most || x->shape[x->rank - 1] > most)
        return ops_fail(ctx, MIXP_ERR_SHAPE, name, "x[..., rows, cols] needs two dimensions, of at most 2^24");

    /* The mask of the zeros, in f32, which holds these whole numbers. */
    const int region = ops_open_f32(ctx);
    if (region < 0) return NULL;
    mixp_tensor *place = mixp_sub(ctx, ops_counted(ctx, x->shape[x->rank - 1], 1),
                                  ops_counted(ctx, x->shape[x->rank - 2], 0));
    mixp_tensor *edge = ops_constant(ctx, (double)diagonal);
    mixp_tensor *hidden = side > 0 ? mixp_gt(ctx, place, edge) : mixp_lt(ctx, place, edge);
    mixp_autocast_close(ctx, region);
    return mixp_masked_fill(ctx, x, hidden, 0.0f);
}

OPS_API mixp_tensor *mixp_tril(mixp_context *ctx, mixp_tensor *x, int64_t diagonal) {
    return ops_triangle(ctx, "tril", x, diagonal, 1);
}
OPS_API mixp_tensor *mixp_triu(mixp_context *ctx, mixp_tensor *x, int64_t diagonal) {
    return ops_triangle(ctx, "triu", x, diagonal, -1);
}

OPS_API mixp_tensor *mixp_roll(mixp_context *ctx, mixp_tensor *x, int64_t shift, int dim) {
    mixp_tensor *parts[2];
    if (!ops_usable(ctx, "roll", "x", x, 0)) return NULL;
    const int axis = ops_axis(ctx, "roll", x, dim);
    if (axis < 0) return NULL;
    const int64_t n = x->rank ? x->shape[axis] : 1;
    if (n == 0 || shift % n == 0) return mixp_reshape(ctx, x, x->rank, x->shape);
    shift = shift % n < 0 ? shift % n + n : shift % n;
    parts[0] = mixp_slice(ctx, x, axis, n - shift, shift);
    parts[1] = mixp_slice(ctx, x, axis, 0, n - shift);
    return mixp_concat(ctx, 2, parts, axis);
}

OPS_API mixp_tensor *mixp_addcdiv(mixp_context *ctx, mixp_tensor *x, mixp_tensor *a, mixp_tensor *b, float value) {
    return mixp_add(ctx, x, mixp_scale(ctx, mixp_div(ctx, a, b), value));
}

/* --- scatter, searchsorted --------------------------------------------------------------- */

/* Counts the sources of each element, clears the elements that have one, and adds the sources. */
OPS_API mixp_tensor *mixp_scatter(mixp_context *ctx, mixp_tensor *x, int dim, mixp_tensor *ids, mixp_tensor *src) {
    if (!ops_usable(ctx, "scatter", "x", x, 1) || !ops_usable(ctx, "scatter", "src", src, 1)) return NULL;
    const int region = ops_open_f32(ctx);
    if (region < 0) return NULL;
    mixp_tensor *sources = mixp_full(ctx, MIXP_F32, x->rank, x->shape, 0.0);
    mixp_tensor *ones = mixp_full(ctx, MIXP_F32, src->rank, src->shape, 1.0);
    sources = mixp_scatter_add(ctx, sources, dim, ids, ones);
    sources = mixp_ne(ctx, sources, ops_constant(ctx, 0.0));
    mixp_autocast_close(ctx, region);
    return mixp_scatter_add(ctx, mixp_masked_fill(ctx, x, sources, 0.0f), dim, ids, src);
}

/* One row of edges for all values, or a row for each row of values? */
static int ops_edges_fit(const mixp_tensor *edges, const mixp_tensor *values) {
    const int rank = values->rank;
    if (edges->rank < 1 || rank == MIXP_MAX_RANK || edges->shape[edges->rank - 1] > 1 << 24) return 0;
    return edges->rank == 1 ||
           (edges->rank == rank &&
            memcmp(edges->shape, values->shape, (size_t)(rank - 1) * sizeof *edges->shape) == 0);
}

/* The place of the first edge at or above the value (right: above it). Behind the edges stands one that all values
 * precede: a NaN is above all edges. */
OPS_API mixp_tensor *mixp_searchsorted(mixp_context *ctx, mixp_tensor *edges, mixp_tensor *values, int right) {
    if (!ops_usable(ctx, "searchsorted", "edges", edges, 0)) return NULL;
    if (!ops_usable(ctx, "searchsorted", "values", values, 0)) return NULL;
    if (!ops_edges_fit(edges, values))
        return ops_fail(ctx, MIXP_ERR_SHAPE, "searchsorted",
                        "edges[n], or edges[..., n] with values[..., m]; n is at most 2^24");

    const int region = ops_open_f32(ctx);
    if (region < 0) return NULL;
    if (edges->rank > 1) edges = mixp_unsqueeze(ctx, edges, -2);
    values = mixp_unsqueeze(ctx, values, -1);
    mixp_tensor *behind = right ? mixp_gt(ctx, edges, values) : mixp_ge(ctx, edges, values);
    behind = mixp_cast(ctx, mixp_pad(ctx, behind, -1, 0, 1, 1.0f), MIXP_F32);
    behind = mixp_argmax(ctx, behind, -1, 0);
    mixp_autocast_close(ctx, region);
    return behind;
}

/* --- scaled_dot_product_attention -------------------------------------------------------- */

OPS_API mixp_tensor *mixp_scaled_dot_product_attention(mixp_context *ctx, mixp_tensor *q, mixp_tensor *k,
                                                       mixp_tensor *v, const mixp_attention_desc *desc) {
    const char *name = "scaled_dot_product_attention";
    mixp_attention_desc defaults;
    memset(&defaults, 0, sizeof defaults);
    if (!ops_usable(ctx, name, "q", q, 1) || !ops_usable(ctx, name, "k", k, 1) || !ops_usable(ctx, name, "v", v, 1))
        return NULL;
    if (q->rank != 4 || k->rank != 4 || v->rank != 4)
        return ops_fail(ctx, MIXP_ERR_SHAPE, name, "q, k and v need rank 4, [b, heads, t, d]");
    q = mixp_transpose(ctx, q, 1, 2);
    k = mixp_transpose(ctx, k, 1, 2);
    v = mixp_transpose(ctx, v, 1, 2);
    if (!q || !k || !v) return NULL;
    q = mixp_attention_apply(ctx, q, k, v, desc ? desc : &defaults);
    return q ? mixp_transpose(ctx, q, 1, 2) : NULL;
}

/* --- triplet_margin ---------------------------------------------------------------------- */

static int ops_same_shape(const mixp_tensor *a, const mixp_tensor *b) {
    return a->rank == b->rank && memcmp(a->shape, b->shape, (size_t)a->rank * sizeof *a->shape) == 0;
}

/* |x - y + 1e-6| over the last dimension. */
static mixp_tensor *ops_distance(mixp_context *ctx, mixp_tensor *x, mixp_tensor *y) {
    return mixp_vector_norm(ctx, mixp_add_scalar(ctx, mixp_sub(ctx, x, y), 1e-6f), -1, 0);
}

/* The losses of all rows, reduced. */
static mixp_tensor *ops_triplet(mixp_context *ctx, mixp_tensor *anchor, mixp_tensor *positive, mixp_tensor *negative,
                                float margin, int swap, mixp_reduction reduction) {
    mixp_tensor *apart = ops_distance(ctx, anchor, negative), *y;
    if (swap) apart = mixp_minimum(ctx, apart, ops_distance(ctx, positive, negative));
    y = mixp_sub(ctx, ops_distance(ctx, anchor, positive), apart);
    y = mixp_relu(ctx, mixp_add_scalar(ctx, y, margin));
    if (reduction == MIXP_REDUCE_NONE) return y;
    return reduction == MIXP_REDUCE_SUM ? mixp_sum(ctx, y, MIXP_ALL, 0) : mixp_mean(ctx, y, MIXP_ALL, 0);
}

OPS_API mixp_tensor *mixp_triplet_margin(mixp_context *ctx, mixp_tensor *anchor, mixp_tensor *positive,
                                         mixp_tensor *negative, float margin, int swap, mixp_reduction reduction) {
    const char *name = "triplet_margin";
    const uint32_t bits = mixp_bits_of_f32(margin);
    if (!ops_usable(ctx, name, "anchor", anchor, 1) || !ops_usable(ctx, name, "positive", positive, 1)) return NULL;
    if (!ops_usable(ctx, name, "negative", negative, 1)) return NULL;
    if (anchor->rank < 1 || !ops_same_shape(anchor, positive) || !ops_same_shape(anchor, negative))
        return ops_fail(ctx, MIXP_ERR_SHAPE, name, "anchor, positive and negative need one shape, of rank at least 1");
    if (bits == 0 || bits >= 0x7F800000u)
        return ops_fail(ctx, MIXP_ERR_ARGUMENT, name, "the margin must be finite and above 0; PyTorch's default is 1");
    if (reduction != MIXP_REDUCE_MEAN && reduction != MIXP_REDUCE_SUM && reduction != MIXP_REDUCE_NONE)
        return ops_fail(ctx, MIXP_ERR_ARGUMENT, name, "reduce with MIXP_REDUCE_MEAN, MIXP_REDUCE_SUM or MIXP_REDUCE_NONE");

    const int region = ops_open_f32(ctx);
    if (region < 0) return NULL;
    mixp_tensor *y = ops_triplet(ctx, ops_as_f32(ctx, anchor), ops_as_f32(ctx, positive), ops_as_f32(ctx, negative),
                                 margin, swap, reduction);
    mixp_autocast_close(ctx, region);
    return y;
}

/* --- check_gradients --------------------------------------------------------------------- */

typedef struct ops_check {
    mixp_context *ctx;
    mixp_tensor *(*fn)(mixp_context *, void *);
    void   *user;
    double  eps;
    float  *value, *analytic;   /* of one input                                            */
} ops_check;

static int64_t ops_casts(const mixp_context *ctx) {
    const mixp_cast_count n = mixp_autocast_casts(ctx);
    return n.weight_casts + n.weight_hits + n.activation_casts;
}

/* The loss of a new step. */
static double ops_loss(const ops_check *k) {
    if (mixp_step_begin(k->ctx) != MIXP_OK) return 0.0;
    return mixp_item(k->fn(k->ctx, k->user));
}

/* Finite values alone are computed with: others could trap in a program that lets exceptions trap. */
static int ops_is_finite(double x) { return (mixp_bits_of_f64(x) >> 52 & 0x7FFu) != 0x7FFu; }

/* Runs fn twice, and walks back. Fails if differences of eps could not show the gradients. */
static mixp_result ops_check_walk(const ops_check *k) {
    const int64_t casts = ops_casts(k->ctx);
    const mixp_dtype around = mixp_autocast_current(k->ctx).dtype;
    const double first = ops_loss(k);
    mixp_result r = mixp_step_begin(k->ctx);
    if (r != MIXP_OK) return r;
    mixp_tensor *loss = k->fn(k->ctx, k->user);
    const double second = mixp_item(loss);
    if (mixp_bits_of_f64(first) != mixp_bits_of_f64(second))
        return mixp_context_fail(k->ctx, MIXP_ERR_ORDER,
            "mixp_check_gradients: fn returns another loss in each run, as with dropout, which draws other random "
            "numbers: pass training 0 to mixp_dropout, and set attention's dropout to 0");
    if (ops_casts(k->ctx) != casts || around != MIXP_F32)
        return mixp_context_fail(k->ctx, MIXP_ERR_ORDER,
            "mixp_check_gradients: fn runs under autocast, whose rounding errors exceed the effect of eps; check it in "
            "f32");
    return mixp_backward(k->ctx, loss);
}

/* The relative error of the gradient of one element. */
static mixp_result ops_check_element(const ops_check *k, mixp_tensor *t, int64_t i, double *error) {
    const float old = k->value[i];
    const float up = mixp_f32_from_f64((double)old + k->eps), down = mixp_f32_from_f64((double)old - k->eps);
    double loss[2], size;
    *error = mixp_f64_of_bits(0x7FF8000000000000u);
    for (int side = 0; side < 2; side++) {
        k->value[i] = side ? up : down;
        mixp_result r = mixp_write(t, k->value, MIXP_F32, t->count);
        if (r != MIXP_OK) return r;
        loss[side] = ops_loss(k);
    }
    k->value[i] = old;
    if (!ops_is_finite(loss[0]) || !ops_is_finite(loss[1]) || !ops_is_finite((double)k->analytic[i]) ||
        !ops_is_finite((double)up) || !ops_is_finite((double)down) || !(up > down))
        return mixp_write(t, k->value, MIXP_F32, t->count);

    const double numeric = (loss[1] - loss[0]) / ((double)up - (double)down);
    *error = (double)k->analytic[i] - numeric;
    if (*error < 0.0) *error = -*error;
    size = numeric < 0.0 ? -numeric : numeric;
    if (size > 1.0) *error /= size;
    return mixp_write(t, k->value, MIXP_F32, t->count);
}

/* Raises *worst to the largest error of one input. A NaN stays. */
static mixp_result ops_check_input(ops_check *k, mixp_tensor *t, double *worst) {
    const size_t bytes = (size_t)t->count * sizeof(float);
    mixp_result r = mixp_read(t, k->value, MIXP_F32, t->count);
    memset(k->analytic, 0, bytes);
    if (r == MIXP_OK && t->grad) r = mixp_read(t->grad, k->analytic, MIXP_F32, t->count);
    for (int64_t i = 0; i < t->count && r == MIXP_OK; i++) {
        double error;
        r = ops_check_element(k, t, i, &error);
        if (ops_is_finite(*worst) && (!ops_is_finite(error) || error > *worst)) *worst = error;
    }
    t->grad = NULL;
    return r;
}

/* Can all inputs be checked? *most: elements of the largest input. */
static mixp_result ops_check_inputs(mixp_context *ctx, int n, mixp_tensor *const *inputs, int64_t *most) {
    *most = 0;
    for (int i = 0; i < n; i++) {
        const mixp_tensor *t = inputs[i];
        if (!t) return mixp_context_fail(ctx, MIXP_ERR_ARGUMENT, "mixp_check_gradients: input %d is NULL", i);
        if (t->ctx != ctx)
            return mixp_context_fail(ctx, MIXP_ERR_ARGUMENT, "mixp_check_gradients: input %d belongs to another context", i);
        if (t->dtype != MIXP_F32)
            return mixp_context_fail(ctx, MIXP_ERR_DTYPE,
                "mixp_check_gradients: input %d must be a permanent f32 tensor (mixp_param or mixp_view)", i);
        if (t->count > *most) *most = t->count;
    }
    return MIXP_OK;
}

OPS_API mixp_result mixp_check_gradients(mixp_context *ctx, mixp_tensor *(*fn)(mixp_context *, void *),
                                         void *user, int n_inputs, mixp_tensor *const *inputs, double eps,
                                         double *worst) {
    ops_check k;
    int64_t most;
    if (!ctx) return MIXP_ERR_ARGUMENT;
    if (!fn || !inputs || !worst || n_inputs < 1)
        return mixp_context_fail(ctx, MIXP_ERR_ARGUMENT, "mixp_check_gradients: %s", !fn ? "fn is NULL"
            : !inputs ? "inputs is NULL" : !worst ? "worst is NULL" : "n_inputs is below 1");
    if (!ops_is_finite(eps))
        return mixp_context_fail(ctx, MIXP_ERR_ARGUMENT, "mixp_check_gradients: eps is not finite; pass 0 for 1e-3");
    mixp_result r = ops_check_inputs(ctx, n_inputs, inputs, &most);
    if (r != MIXP_OK) return r;

    k.ctx = ctx;
    k.fn = fn;
    k.user = user;
    k.eps = eps > 0.0 ? eps : 1e-3;
    k.value = (float *)malloc((size_t)most * 2 * sizeof(float) + 1);
    if (!k.value) return mixp_context_fail(ctx, MIXP_ERR_MEMORY, "mixp_check_gradients: out of memory");
    k.analytic = k.value + most;

    /* A result of an earlier step is refused here, before another tensor takes its place. */
    r = mixp_step_begin(ctx);
    for (int i = 0; i < n_inputs && r == MIXP_OK; i++) r = mixp_read(inputs[i], k.value, MIXP_F32, inputs[i]->count);
    /* The gradients that the walk computes, beside differences of the loss. */
    for (int i = 0; i < n_inputs && r == MIXP_OK; i++) inputs[i]->grad = NULL;
    *worst = 0.0;
    if (r == MIXP_OK) r = ops_check_walk(&k);
    for (int i = 0; i < n_inputs && r == MIXP_OK; i++) r = ops_check_input(&k, inputs[i], worst);
    free(k.value);
    return r == MIXP_OK ? mixp_context_error(ctx, NULL) : r;
}

/* --- einsum of two operands: sums, transposes and one product ---------------------------- */

/* The letters of an equation. A letter's kind is a sum: 1 (in a), 2 (in b), 4 (in the result). */
typedef struct ops_einsum {
    char    text[3][MIXP_MAX_RANK + 1];     /* the letters of a, b and the result          */
    int     rank[3];
    int64_t size[128];
    int     kind[128];
} ops_einsum;

enum { OPS_OF_A = 1, OPS_OF_B = 2, OPS_OF_RESULT = 4 };

static int ops_is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

static mixp_result ops_einsum_wrong(
    mixp_context *ctx, mixp_result code, const char *equation, const char *why) {
    return mixp_context_fail(ctx, code, "einsum: equation '%.60s': %s", equation ? equation : "", why);
}

/* Reads the equation into text. Without an arrow, the result has the letters that occur once, in
 * alphabetical order. */
static mixp_result ops_einsum_read(mixp_context *ctx, const char *equation, ops_einsum *e) {
    int part = 0;
    memset(e, 0, sizeof *e);

    /* Each letter goes to its operand, or behind the arrow to the result. */
    for (const char *s = equation; s && *s; s++) {
        if (*s == ' ') continue;
        if (*s == ',' && part == 0) {
            part = 1;
            continue;
        }
        if (s[0] == '-' && s[1] == '>' && part == 1) {
            part = 2;
            s++;
            continue;
        }
        if (!ops_is_letter(*s) || e->rank[part] == MIXP_MAX_RANK)
            return ops_einsum_wrong(ctx, MIXP_ERR_ARGUMENT, equation,
                "write the letters of two operands, as in \"bij,bjk->bik\", at most 8 for each");
        if (e->kind[(int)*s] & 1 << part)
            return ops_einsum_wrong(ctx, MIXP_ERR_ARGUMENT, equation, "a letter occurs twice in one operand");
        e->kind[(int)*s] |= 1 << part;
        e->text[part][e->rank[part]++] = *s;
    }

    if (part == 0)
        return ops_einsum_wrong(ctx, MIXP_ERR_ARGUMENT, equation, "it needs two operands, as in \"ij,jk\"");

    /* Without an arrow, a letter of one operand goes to the result. */
    for (int c = 'A'; c <= 'z'; c++) {
        const int in = e->kind[c] & (OPS_OF_A | OPS_OF_B);
        if (part < 2 && (in == OPS_OF_A || in == OPS_OF_B)) {
            if (e->rank[2] == MIXP_MAX_RANK)
                return ops_einsum_wrong(ctx, MIXP_ERR_ARGUMENT, equation, "the result has more than 8 letters");
            e->kind[c] |= OPS_OF_RESULT;
            e->text[2][e->rank[2]++] = (char)c;
        }
        if (e->kind[c] == OPS_OF_RESULT)
            return ops_einsum_wrong(ctx, MIXP_ERR_ARGUMENT, equation, "a letter of the result is in no operand");
    }
    return MIXP_OK;
}

/* Reads the sizes of the letters from the operands. */
static mixp_result ops_einsum_sizes(
    mixp_context *ctx, const char *equation, const mixp_tensor *const *operands, ops_einsum *e) {
    for (int part = 0; part < 2; part++) {
        const mixp_tensor *t = operands[part];
        if (t->rank != e->rank[part])
            return ops_einsum_wrong(
                ctx, MIXP_ERR_SHAPE, equation, "an operand needs one letter for each dimension");
        for (int i = 0; i < t->rank; i++) {
            int64_t *size = &e->size[(int)e->text[part][i]];
            if (part == 1 && (e->kind[(int)e->text[1][i]] & OPS_OF_A) && *size != t->shape[i])
                return ops_einsum_wrong(
                    ctx, MIXP_ERR_SHAPE, equation, "a letter's dimensions must be equal");
            *size = t->shape[i];
        }
    }
    return MIXP_OK;
}

/* The letters of this kind in the order of `from`, appended to `to`. Returns their elements. */
static int64_t ops_einsum_letters(const ops_einsum *e, const char *from, int kind, char *to) {
    int64_t count = 1;
    size_t n = strlen(to);
    for (; *from; from++) {
        if (e->kind[(int)*from] != kind) continue;
        to[n++] = *from;
        count *= e->size[(int)*from];
    }
    to[n] = 0;
    return count;
}

/* t, whose dimensions have the letters `from`, with those of `to`. */
static mixp_tensor *ops_einsum_permute(
    mixp_context *ctx, mixp_tensor *t, const char *from, const char *to) {
    int dims[MIXP_MAX_RANK], n = 0;
    if (!t || !strcmp(from, to)) return t;
    for (; *to; to++) dims[n++] = (int)(strchr(from, *to) - from);
    return mixp_permute(ctx, t, n, dims);
}

/* Sums an operand over the letters that occur only in it. */
static mixp_tensor *ops_einsum_summed(
    mixp_context *ctx, const ops_einsum *e, mixp_tensor *t, int part, char *left) {
    int n = 0;
    for (const char *s = e->text[part]; *s; s++) {
        if (e->kind[(int)*s] == 1 << part) t = mixp_sum(ctx, t, n, 0);
        else left[n++] = *s;
    }
    left[n] = 0;
    return t;
}

/* As [batch, rows of a, columns of b]: one product. */
static mixp_tensor *ops_einsum_product(
    mixp_context *ctx, const ops_einsum *e, mixp_tensor *a, mixp_tensor *b) {
    const int batch = OPS_OF_A | OPS_OF_B | OPS_OF_RESULT, both = OPS_OF_A | OPS_OF_B;
    char of_a[MIXP_MAX_RANK + 1], of_b[MIXP_MAX_RANK + 1];
    char as_a[MIXP_MAX_RANK + 1] = "", as_b[MIXP_MAX_RANK + 1] = "",
                              as_y[2 * MIXP_MAX_RANK + 1] = "";
    int64_t m[3], n[3], y[MIXP_MAX_RANK];
    a = ops_einsum_summed(ctx, e, a, 0, of_a);
    b = ops_einsum_summed(ctx, e, b, 1, of_b);

    /* a becomes [batch, rows, summed], and b [batch, summed, columns]. */
    m[0] = ops_einsum_letters(e, of_a, batch, as_a);
    m[1] = ops_einsum_letters(e, of_a, OPS_OF_A | OPS_OF_RESULT, as_a);
    m[2] = ops_einsum_letters(e, of_a, both, as_a);
    n[0] = ops_einsum_letters(e, of_a, batch, as_b);
    n[1] = ops_einsum_letters(e, of_a, both, as_b);
    n[2] = ops_einsum_letters(e, of_b, OPS_OF_B | OPS_OF_RESULT, as_b);
    a = mixp_reshape(ctx, ops_einsum_permute(ctx, a, of_a, as_a), 3, m);
    b = mixp_reshape(ctx, ops_einsum_permute(ctx, b, of_b, as_b), 3, n);

    /* The product is [batch, rows, columns]; the result may have another order. */
    ops_einsum_letters(e, of_a, batch, as_y);
    ops_einsum_letters(e, of_a, OPS_OF_A | OPS_OF_RESULT, as_y);
    ops_einsum_letters(e, of_b, OPS_OF_B | OPS_OF_RESULT, as_y);
    for (int i = 0; i < e->rank[2]; i++) y[i] = e->size[(int)as_y[i]];
    a = mixp_reshape(ctx, mixp_matmul(ctx, a, b, 0, 0), e->rank[2], y);
    return ops_einsum_permute(ctx, a, as_y, e->text[2]);
}

OPS_API mixp_tensor *mixp_einsum(mixp_context *ctx, const char *equation, mixp_tensor *a, mixp_tensor *b) {
    const mixp_tensor *operands[2];
    ops_einsum e;
    if (!ops_usable(ctx, "einsum", "a", a, 1) || !ops_usable(ctx, "einsum", "b", b, 1)) return NULL;
    operands[0] = a;
    operands[1] = b;
    if (ops_einsum_read(ctx, equation, &e) != MIXP_OK) return NULL;
    if (ops_einsum_sizes(ctx, equation, operands, &e) != MIXP_OK) return NULL;
    return ops_einsum_product(ctx, &e, a, b);
}
#endif /* OPS_NO_IMPLEMENTATION */
#endif
