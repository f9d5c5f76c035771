#pragma once
#include "quantise.h"
/* --- arguments of kernels ----------------------------------------------------------------- */

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
 * with bad. real. bad, unless NULL, becomes 1 when an element of a is Inf or NaN; otherwise *bad is
 * unchanged. */
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
    void      *weight;          /* what the model reads: real, or f64                      */
    void      *grad;            /* real, or f64                                            */
    void      *master;          /* master weight; NULL when weight is f32 or f64           */
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
    int64_t    width, pitch;    /* pitch > 0: of each `pitch` elements the first `width` are
                                   weights and gradients; the rest is padding, which no kernel
                                   counts or changes                                       */
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
 * bias corrections, and ORs found_inf into the scaler. Runs mixpi_step_prepare once on the device.
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
    if (row->weight_dtype == MIXP_F16 || row->weight_dtype == MIXP_BF16) return row->weight_dtype;
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
 * not show how many elements were flushed to zero. `least` helps to estimate this: where the
 * density is flat near 0, half as many elements were flushed as now hold the smallest subnormal. */
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

/* mixpi_scaler_advance on the device, with the found_inf that prepare collected. `forgives` and
 * `falls`: see mixpi_scaler_advance_guarded. */
typedef struct mixp_advance_args {
    const mixp_scaler_rule *rule;   /* host memory                                         */
    mixp_scaler_state      *scaler;
    int32_t                 forgives;   /* 0: no guard is on                               */
    int32_t                 falls;  /* how many sites have fallen back so far              */
    const mixp_look        *wide;   /* device memory: the look at this update's scaled f32
                                       gradients, for rules that predict; NULL = not seen   */
    const mixp_look        *narrow; /* device memory: the look at its f16 and bf16 gradients */
} mixp_advance_args;

/* Undoes the writes of a skipped step: if any flag is not 0, copies each part's bytes from `from`
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

/* Finds what a step has made Inf or NaN in its buffers: elements of `now` that are Inf or NaN and
 * were finite in `before`. *found becomes the mixpi_bad_word of the first of them, in the order of
 * parts, if that is larger than *found. The arrays are aligned to 8 bytes. f32, f64, f16, bf16. All
 * pointers: device memory. */
typedef struct mixp_check_part {
    const void *now, *before;
    int64_t     count, number;      /* number: of the buffer, ascending                    */
    mixp_dtype  dtype;
} mixp_check_part;

typedef struct mixp_check_buffers_args {
    int             n_parts;
    uint64_t       *found;
    mixp_check_part parts[MIXP_RESTORE_PARTS];
} mixp_check_buffers_args;

/* The numbers of a dtype in a word of 8 bytes. */
typedef struct mixpi_lanes {
    uint64_t exponent;          /* the exponents' bits                                     */
    uint64_t unit;              /* each exponent's lowest bit                              */
    uint64_t sign;              /* the signs                                               */
    int      bits;              /* of one number                                           */
} mixpi_lanes;

MIXPREC_HD mixpi_lanes mixpi_lanes_of(mixp_dtype dtype) {
    const int wide = dtype == MIXP_F64, single = dtype == MIXP_F32, half = dtype == MIXP_F16;
    const uint64_t every = wide ? 1u : single ? 0x100000001u : 0x1000100010001u;
    mixpi_lanes l;
    l.bits = wide ? 64 : single ? 32 : 16;
    l.sign = every << (l.bits - 1);
    l.unit = every << (wide ? 52 : single ? 23 : half ? 10 : 7);
    l.exponent = l.sign - l.unit;
    return l;
}

/* Sets the sign bit of each number of `word` that is Inf or NaN, because its exponent plus unit
 * carries into that bit. The other bits are undefined. */
MIXPREC_HD uint64_t mixpi_lanes_carry(const mixpi_lanes *l, uint64_t word)
{ return (word & l->exponent) + l->unit; }

/* Returns the mixpi_bad_word of the first number of word number i that is bad now and was not
 * before; 0 if the word has no such number. */
MIXPREC_HD uint64_t mixpi_lanes_bad(const mixp_check_part *p, const mixpi_lanes *l, int64_t i,
                                    uint64_t now, uint64_t before) {
    const uint64_t bad =
        mixpi_lanes_carry(l, now) & ~mixpi_lanes_carry(l, before) & l->sign;
    const int in_word = 64 / l->bits;
    int at = 0;
    if (!bad) return 0;
    while (!(bad >> (at * l->bits) & (l->sign & (0 - l->sign)))) at++;
    now = now << (64 - l->bits * (at + 1)) << 1 >> 1 >> (64 - l->bits);
    return mixpi_bad_word(p->number, i * in_word + at, now > l->exponent >> (64 - l->bits));
}

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

/* The work of the kernel `advance`, one function for every device. No scale prevents a non-finite
 * loss or buffer. So up to `forgives` skips in a row with one leave the scale unchanged; the count
 * restarts each time `falls` has changed. Every other skip lowers the scale: a guard that finds
 * nothing to fix must not keep a run from ending. Where a guard is on and has seen the gradients
 * (narrow), two skips find the scale to which many backoffs lead. */
MIXPREC_HD void mixpi_scaler_advance_guarded(mixp_scaler_state *s, const mixp_scaler_rule *r,
                                            int32_t forgives, int32_t falls,
                                            const mixp_look *narrow) {
    const int bad = s->found_inf, forward = s->loss_bad || s->buffer_bad;
    const float before = s->scale;
    if (!bad || s->forgiven_at != falls) s->forgiven = 0;
    s->forgiven_at = falls;
    if (bad && forward && s->forgiven < forgives) {
        s->forgiven++;
        mixpi_scaler_forgive(s, r);
        return;
    }
    mixpi_scaler_advance(s, r, bad);
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
 * half (`reads` 1) reads the results of all ranks from the summed table. See mixpi_agree_fill and
 * mixpi_agree_read. looks: the result of grad_stats for each bucket of gradients, before the bucket
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
 * q cos + p sin). Positions count from `first` along t. scaled 1: by position * frequency[i]
 * instead, and cos and sin are multiplied by scale. Pair i is elements (i, i + d/2), or
 * (2i, 2i + 1) when interleaved. Angles are computed in f64, the rest in f32. y may be a. real. */
#define MIXP_ROPE_PAIRS 128     /* pairs of a head that may have their own frequencies     */
typedef struct mixp_rope_args {
    int64_t  rows, t, heads, d; /* d: even                                                 */
    int64_t  first;
    double   base;
    int      interleaved;
    int      back;              /* 1: rotates by the negative angle (the backward pass)    */
    int      scaled;
    double   scale, frequency[MIXP_ROPE_PAIRS];
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
 * and 2^-8 for bf16, so that rounding does not yield 1. MIXP_ERR_ARGUMENT: y accumulates, or an
 * unknown kind, or a probability outside [0, 1]. */
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

/* y = 1 where the comparison `how` of a with b holds, else 0, over shape (rank 0..8), y dense; a
 * stride of 0 repeats an element. Compares values exactly; a NaN is only NE to everything. a and b:
 * real, u8 or i32 each. */
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
    /* NULL: a step that makes a buffer Inf or NaN is not detected. */
    mixp_result (*check_buffers)(const mixp_exec *x, const mixp_check_buffers_args *k);
    /* NULL: gemm with copies of b and c does the same work. */
    mixp_result (*gemm_indexed)(const mixp_exec *x, const mixp_gemm_indexed_args *k);
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
    /* The last error in words, "" for none. NULL = the device has no messages. */
    const char *(*message)(const mixp_exec *x);
    /* MIXP_OK when kernels can use the memory at p. NULL = kernels can use any memory. */
    mixp_result (*check)(const mixp_exec *x, const void *p, size_t bytes);
    /* As upload, but every replay of a captured step reads host again; upload reads host once.
     * NULL = upload. */
    mixp_result (*feed)(const mixp_exec *x, void *device, const void *host, size_t bytes);
    mixp_gemm_count (*gemm_count)(const mixp_exec *x);  /* NULL = only one way              */
    /* post queues a copy of device memory to pinned memory, slot 0 to 2. collect waits until the
     * last copy of that slot has arrived, but not for work queued later. NULL = download. */
    mixp_result (*post)(const mixp_exec *x, int slot, const void *device, size_t bytes);
    mixp_result (*collect)(const mixp_exec *x, int slot, void *host, size_t bytes);
    /* The text that mixp_context_gemm_choices returns. NULL = the device has no choices. */
    size_t      (*gemm_choices)(const mixp_exec *x, char *text, size_t size);
    /* Returns the MIXP_EPILOGUES_ flags for a context whose description has epilogues 0. NULL = no
     * flag. */
    int         (*epilogues)(const mixp_exec *x);
};

