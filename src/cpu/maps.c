#pragma once
#include "shared.c"

/* --- maps and sums ----------------------------------------------------------------------- *
 * Every elementwise kernel is a map: out = fn(sources), each array with its own strides over
 * one shape. Contiguous axes are merged. A short last axis is merged with the axis before it even
 * if an operand repeats along that axis ("periodic"), because inner loops need long rows.
 *
 * A sum is a map whose output repeats. A unit of work is a run of rows of one tile of the output;
 * units depend only on the shapes. A run of at most 128 rows is added in f32, then the runs are
 * added in double. The bits do not depend on threads, and the error not on the length. */
/* The function that a map computes from up to three sources a, b, c. The sources of a slope (_D)
 * are dy, then x or y. */
enum {
    MIXPI_FN_UNARY = 0,                                     /* + mixp_unary                */
    MIXPI_FN_UNARY_D = MIXPI_FN_UNARY + MIXP_UNARY_COUNT,   /* + mixp_unary                */
    MIXPI_FN_BINARY = MIXPI_FN_UNARY_D + MIXP_UNARY_COUNT,  /* + mixp_binary               */
    /* The sources are dy, a, b. The gradient of b in a / b. */
    MIXPI_FN_DIVISOR_D = MIXPI_FN_BINARY + MIXP_BINARY_COUNT,
    MIXPI_FN_LARGER_D,          /* dy, x, y: the gradient of x in max(x, y)                */
    MIXPI_FN_GATE_D,            /* dy, a, b: the gradient of a in silu(a) b                */
    MIXPI_FN_POWER_D,           /* dy, a, b: the gradients of a and b in a to the power b */
    MIXPI_FN_EXPONENT_D,
    MIXPI_FN_ATAN2_A_D,         /* dy, a, b: those in atan2(a, b)                          */
    MIXPI_FN_ATAN2_B_D,
    MIXPI_FN_PRELU_D,           /* dy, a, b: those in a > 0 ? a : b a                      */
    MIXPI_FN_PRELU_B_D,
    MIXPI_FN_WHERE,             /* mask, a, b: mask ? a : b                                */
    MIXPI_FN_KEPT,              /* mask, a: mask ? a : q                                   */
    MIXPI_FN_MASKED,            /* mask, b: mask ? q : b                                   */
    MIXPI_FN_LOSS,                                          /* + mixp_loss_kind                 */
    MIXPI_FN_LOSS_D = MIXPI_FN_LOSS + MIXP_LOSS_COUNT,      /* + mixp_loss_kind                 */
    MIXPI_FN_COPY = MIXPI_FN_LOSS_D + MIXP_LOSS_COUNT       /* a itself, in sums           */
};

/* A new mixp_unary needs a row in MIXPI_UNARIES of elementwise.c, or one below; a new loss in
 * MIXPI_LOSSES. A new binary function needs a case in MIXPI_P(values), or in mixpi_pair_value; then
 * add 1 to its number. */
MIXPI_STATIC_ASSERT(every_binary_has_a_case, MIXP_BINARY_COUNT == 10);

/* y with erf(y) = x: Newton's steps in double from Giles' start ("Approximating the erfinv
 * function", 2010), whose relative error is 1e-3 near 0 and less elsewhere. Inf at 1, NaN
 * beyond. */
static double mixpi_erfinv(float x) {
    const uint32_t size = mixp_bits_of_f32(x) & 0x7FFFFFFFu;
    if (size == 0 || size > 0x7F800000u) return (double)x;
    if (size > 0x3F800000u) return (double)mixp_f32_of_bits(0x7FC00000u);
    if (size == 0x3F800000u) return (double)mixp_f32_of_bits(mixp_bits_of_f32(x) + 0x40000000u);
    const double w = -log((1.0 - (double)x) * (1.0 + (double)x)), s = sqrt(w);
    double y = w < 5.0 ? 0.8862 + w * (0.2325 + w * (-0.0093 + w * 0.00013)) : 0.0;
    if (w >= 5.0) y = s - (0.5 * log(s * s) + 0.5723649) / (2.0 * s);
    y *= w < 5.0 ? (double)x : x > 0.0f ? 1.0 : -1.0;
    for (int i = 0; i < 3; i++) {
        const double slope = 1.1283791670955126 * exp(-y * y);
        const double off = (erf(y) - (double)x) / slope;
        y -= off / (1.0 + y * off);
    }
    return y;
}

/* Functions of the C library, and erfinv. Their slopes times dy; x is y for TAN. */
static float mixpi_library_value(mixp_unary op, float x) {
    switch ((int)op) {
    case MIXP_UNARY_SIN: return sinf(x);
    case MIXP_UNARY_COS: return cosf(x);
    case MIXP_UNARY_TAN: return tanf(x);
    case MIXP_UNARY_ACOS: return acosf(x);
    case MIXP_UNARY_ASIN: return asinf(x);
    case MIXP_UNARY_SINH: return sinhf(x);
    case MIXP_UNARY_COSH: return coshf(x);
    case MIXP_UNARY_LOG2: return log2f(x);
    case MIXP_UNARY_LOG10: return log10f(x);
    default: return (float)mixpi_erfinv(x);
    }
}
static float mixpi_library_slope(mixp_unary op, float dy, float x) {
    const double y = op == MIXP_UNARY_ERFINV ? mixpi_erfinv(x) : 0.0;
    switch ((int)op) {
    case MIXP_UNARY_SIN: return dy * cosf(x);
    case MIXP_UNARY_COS: return -(dy * sinf(x));
    case MIXP_UNARY_TAN: return dy * mixpi_fmaf(x, x, 1.0f);
    case MIXP_UNARY_ACOS: return -(dy / sqrtf((1.0f - x) * (1.0f + x)));
    case MIXP_UNARY_ASIN: return dy / sqrtf((1.0f - x) * (1.0f + x));
    case MIXP_UNARY_SINH: return dy * coshf(x);
    case MIXP_UNARY_COSH: return dy * sinhf(x);
    case MIXP_UNARY_LOG2: return dy / (x * 0.693147182f);
    case MIXP_UNARY_LOG10: return dy / (x * 2.30258512f);
    default: return dy * (float)(0.88622692545275801 * exp(y * y));
    }
}

/* Is op one of these functions? */
static int mixpi_is_in_library(int op)
{
    if (op >= MIXP_UNARY_LOG2 && op <= MIXP_UNARY_ERFINV) return 1;
    return op == MIXP_UNARY_SIN || op == MIXP_UNARY_COS;
}
enum { MIXPI_LIBRARY_UNARIES = 2 + (int)MIXP_UNARY_ERFINV + 1 - (int)MIXP_UNARY_LOG2 };

/* Is fn computed by mixpi_singly? */
static int mixpi_is_single(int fn) {
    if (fn < MIXPI_FN_UNARY_D) return mixpi_is_in_library(fn - MIXPI_FN_UNARY);
    if (fn < MIXPI_FN_BINARY) return mixpi_is_in_library(fn - MIXPI_FN_UNARY_D);
    return (fn >= MIXPI_FN_BINARY + (int)MIXP_BINARY_POWER && fn < MIXPI_FN_DIVISOR_D) ||
           (fn >= MIXPI_FN_POWER_D && fn <= MIXPI_FN_PRELU_B_D);
}

/* y = fn of the sources s, one element at a time: the same bits on each instruction set, and no
 * code in any of them. */
static void mixpi_singly(int fn, float *y, const float *const *s, int64_t n) {
    const int slope = fn - MIXPI_FN_POWER_D;
    const mixp_binary of = (mixp_binary)(MIXP_BINARY_POWER + slope / 2);
    for (int64_t i = 0; i < n; i++) {
        if (fn < MIXPI_FN_UNARY_D)
            y[i] = mixpi_library_value((mixp_unary)(fn - MIXPI_FN_UNARY), s[0][i]);
        else if (fn < MIXPI_FN_BINARY)
            y[i] = mixpi_library_slope((mixp_unary)(fn - MIXPI_FN_UNARY_D), s[0][i], s[1][i]);
        else if (slope < 0)
            y[i] = mixpi_pair_value((mixp_binary)(fn - MIXPI_FN_BINARY), s[0][i], s[1][i]);
        else y[i] = mixpi_pair_slope(of, slope % 2, s[0][i], s[1][i], s[2][i]);
    }
}

typedef struct mixpi_map {
    int        fn, sources;
    float      p, q;            /* parameters of fn                                        */
    /* computes fn of n elements; NULL: the instruction set's own functions                */
    void     (*each)(int fn, float *y, const float *const *s, int64_t n);
    mixp_out   y;
    mixp_in    a[3];
    mixpi_axes axes;            /* array 0: y, then the sources                            */
    int        periodic[4];     /* repeats along the last axis, every `period` elements    */
    int64_t    period, width;   /* width: elements of a block, a multiple of period        */
    int64_t    cols, blocks;    /* along the last axis                                     */
    int64_t    outputs, rows;   /* points of the outer axes that y has, and lacks          */
} mixpi_map;

typedef struct mixpi_sum {
    mixpi_map map;
    float     factor;           /* factor of the result                                    */
    int       fold;             /* the last axis ends in out_cols outputs, and its blocks count as
                                   rows */
    int64_t   rows, out_cols;
    int64_t   tiles;            /* tiles of the outputs, along the last axis               */
    int64_t   run, runs;        /* rows of a run; runs of a tile                           */
    float    *partial;          /* [runs][outputs][out_cols], if there are several runs    */
} mixpi_sum;

/* A map over a shape; by default all arrays are dense. */
static void mixpi_map_init(mixpi_map *m, int fn, int rank, const int64_t *shape,
                           mixp_out y) {
    int64_t step = 1;
    m->fn = fn;
    m->sources = 0;
    m->p = m->q = 0.0f;
    m->each = mixpi_is_single(fn) ? mixpi_singly : NULL;
    m->y = y;
    m->axes.rank = rank;
    m->axes.arrays = 1;
    m->period = 0;
    memset(m->periodic, 0, sizeof m->periodic);
    for (int i = rank - 1; i >= 0; i--) {
        m->axes.n[i] = shape[i];
        for (int k = 0; k < 4; k++) m->axes.s[k][i] = step;
        step *= shape[i];
    }
}

/* strides NULL: dense. */
static void mixpi_map_source(mixpi_map *m, mixp_in a, const int64_t *strides) {
    int k = m->axes.arrays++;
    m->a[m->sources++] = a;
    if (strides) memcpy(m->axes.s[k], strides, (size_t)m->axes.rank * sizeof *strides);
}

static int mixpi_map_is_real(const mixpi_map *m) {
    for (int k = 0; k < m->sources; k++)
        if (!mixpi_reads(m->a[k])) return 0;
    return mixpi_writes(m->y);
}

/* Can the last axis of array k be merged with the axis before it? Yes if the array is dense, if it
 * repeats along the axis before, and if it has one value along both. */
static int mixpi_axes_merge(const mixpi_axes *x, int k) {
    int last = x->rank - 1;
    int64_t inner = x->s[k][last], outer = x->s[k][last - 1];
    if (inner == 1) return outer == x->n[last] || outer == 0;
    return inner == 0 && outer == 0;
}

/* If the output is not dense along its last axis (for example one column of two), rows have one
 * element, because loops write contiguous elements. */
static void mixpi_axes_part(mixpi_axes *x) {
    int k, last = x->rank;
    if (x->s[0][last - 1] <= 1) return;
    x->n[last] = 1;
    for (k = 0; k < x->arrays; k++) x->s[k][last] = 1;
    x->rank++;
}

/* Merges axes, then a short last axis with the axis before it, if possible. */
static void mixpi_map_merge(mixpi_map *m) {
    mixpi_axes *x = &m->axes;
    mixpi_axes_join(x);
    mixpi_axes_part(x);

    m->width = MIXPI_BLOCK;
    int last = x->rank - 1;
    if (last < 1 || x->n[last] > MIXPI_BLOCK / 2 || x->n[last] == 0 || x->s[0][last] == 0)
        return;
    for (int k = 0; k < x->arrays; k++)
        if (!mixpi_axes_merge(x, k)) return;

    /* A short last axis that repeats becomes part of the axis before it. */
    m->period = x->n[last];
    m->width = MIXPI_BLOCK / m->period * m->period;
    x->n[last - 1] *= m->period;
    for (int k = 0; k < x->arrays; k++) {
        m->periodic[k] = x->s[k][last] == 1 && x->s[k][last - 1] == 0;
        x->s[k][last - 1] = m->periodic[k] ? 0 : x->s[k][last];
    }
    x->rank = last;
}

/* Adds to off[] the offset of the index-th point of the outer axes that the output has; if
 * `summed`, of the outer axes along which the output repeats. */
static void mixpi_map_offsets(const mixpi_map *m, int summed, int64_t index,
                              int64_t *off) {
    const mixpi_axes *x = &m->axes;
    for (int axis = x->rank - 2; axis >= 0 && index > 0; axis--) {
        int64_t n = x->n[axis], i = index < n ? index : index % n;
        if ((x->s[0][axis] == 0) != summed) continue;
        for (int k = 0; k < x->arrays; k++) off[k] += i * x->s[k][axis];
        index = index < n ? 0 : index / n;
    }
}

/* Cuts the last axis into blocks. */
static void mixpi_map_plan(mixpi_map *m) {
    mixpi_map_merge(m);
    int last = m->axes.rank - 1;
    m->cols = m->axes.n[last];
    m->blocks = mixpi_ceil_div(m->cols, m->width);
    m->outputs = m->rows = 1;
    for (int i = 0; i < last; i++) {
        if (m->axes.s[0][i]) m->outputs *= m->axes.n[i];
        else m->rows *= m->axes.n[i];
    }
}

/* The number of elements of a block, limited to the elements that exist. */
static int64_t mixpi_map_block(const mixpi_map *m)
{ return mixpi_min(m->width, m->cols > 0 ? m->cols : 1); }

/* Cuts the rows into runs. If outputs are few, runs are short, so that all threads have work. */
static void mixpi_sum_plan(mixpi_sum *s) {
    mixpi_map *m = &s->map;
    mixpi_map_plan(m);
    int last = m->axes.rank - 1;
    s->fold = m->periodic[0] || m->axes.s[0][last] == 0;
    s->rows = s->fold ? m->rows * m->blocks : m->rows;
    s->tiles = s->fold ? 1 : m->blocks;
    s->out_cols = m->cols;
    if (s->fold) s->out_cols = m->periodic[0] ? m->period : 1;
    int few = m->outputs * s->tiles < 64;
    s->run = 128;
    if (few) s->run = mixpi_min(s->run, mixpi_ceil_div(MIXPI_GRAIN, mixpi_map_block(m)));
    s->runs = s->rows > 0 ? mixpi_ceil_div(s->rows, s->run) : 1;
}

/* The number of elements of a unit. */
static int64_t mixpi_sum_unit_work(const mixpi_sum *s)
{ return mixpi_min(s->run, s->rows > 0 ? s->rows : 1) * mixpi_map_block(&s->map); }

/* The offset of a run's sums in s->partial; for run s->runs, the total number of sums. */
static int64_t mixpi_sum_partial(const mixpi_sum *s, int64_t run, int64_t output)
{ return (run * s->map.outputs + output) * s->out_cols; }

/* The function whose values, or their sums, are the gradient that k requests: for a sum dy or -dy;
 * for a product dy times the other factor; for a quotient dy / b or DIVISOR_D. */
static int mixpi_binary_slope(const mixp_binary_args *k, int sums) {
    switch (k->op) {
    case MIXP_BINARY_ADD:
    case MIXP_BINARY_SUB:
        return sums ? MIXPI_FN_COPY : MIXPI_FN_UNARY + (int)MIXP_UNARY_SCALE;
    case MIXP_BINARY_MUL: return MIXPI_FN_BINARY + (int)MIXP_BINARY_MUL;
    case MIXP_BINARY_DIV:
        return k->which ? MIXPI_FN_DIVISOR_D : MIXPI_FN_BINARY + (int)MIXP_BINARY_DIV;
    case MIXP_BINARY_MAXIMUM:
    case MIXP_BINARY_MINIMUM: return MIXPI_FN_LARGER_D;
    case MIXP_BINARY_POWER: return MIXPI_FN_POWER_D + k->which;
    case MIXP_BINARY_ATAN2: return MIXPI_FN_ATAN2_A_D + k->which;
    case MIXP_BINARY_PRELU: return MIXPI_FN_PRELU_D + k->which;
    case MIXP_BINARY_SWIGLU: break;
    case MIXP_BINARY_COUNT: break;
    }
    return k->which ? MIXPI_FN_BINARY + (int)MIXP_BINARY_SWIGLU : MIXPI_FN_GATE_D;
}

static void mixpi_binary_slope_map(mixpi_map *m, const mixp_binary_args *k, int sums) {
    const int64_t *own = k->which ? k->b_strides : k->a_strides;
    const char *of = mixpi_binary_slope_of(k);
    mixpi_map_init(m, mixpi_binary_slope(k, sums), k->rank, k->shape, k->dx);
    if (k->rank > 0) memcpy(m->axes.s[0], own, (size_t)k->rank * sizeof *own);
    for (; *of; of++) {
        if (*of == 'd') mixpi_map_source(m, k->dy, NULL);
        if (*of == 'a') mixpi_map_source(m, k->a, k->a_strides);
        if (*of == 'b') mixpi_map_source(m, k->b, k->b_strides);
    }
}

/* Is an operand of these strides repeated over the shape? */
static int mixpi_repeats(int rank, const int64_t *shape, const int64_t *own) {
    for (int i = 0; i < rank; i++)
        if (own[i] == 0 && shape[i] != 1) return 1;
    return 0;
}
/* Is the operand whose gradient k requests repeated? */
static int mixpi_binary_repeats(const mixp_binary_args *k)
{ return mixpi_repeats(k->rank, k->shape, k->which ? k->b_strides : k->a_strides); }

static int mixpi_binary_is_valid(const mixp_binary_args *k) {
    return (unsigned)k->op < MIXP_BINARY_COUNT && k->rank >= 0 &&
           k->rank <= MIXP_MAX_RANK;
}

static int mixpi_where_is_valid(const mixp_where_args *k) {
    return k->rank >= 0 && k->rank <= MIXP_MAX_RANK && k->mask.data &&
           (k->a.data || k->b.data);
}

static void mixpi_where_map(mixpi_map *m, const mixp_where_args *k) {
    int fn = k->a.data ? k->b.data ? MIXPI_FN_WHERE : MIXPI_FN_KEPT : MIXPI_FN_MASKED;
    mixpi_map_init(m, fn, k->rank, k->shape, k->y);
    mixpi_map_source(m, k->mask, k->mask_strides);
    if (k->a.data) mixpi_map_source(m, k->a, k->a_strides);
    if (k->b.data) mixpi_map_source(m, k->b, k->b_strides);
    m->q = k->value;
}

/* The map whose values, or their sums, are the gradient that k requests. */
static void mixpi_where_slope_map(mixpi_map *m, const mixp_where_args *k) {
    const int64_t *own = k->which ? k->b_strides : k->a_strides;
    mixpi_map_init(m, k->which ? MIXPI_FN_MASKED : MIXPI_FN_KEPT, k->rank, k->shape, k->dx);
    if (k->rank > 0) memcpy(m->axes.s[0], own, (size_t)k->rank * sizeof *own);
    mixpi_map_source(m, k->mask, k->mask_strides);
    mixpi_map_source(m, k->dy, NULL);
}

/* A map over (outer, n, inner). Array `repeated`, the output or the source, repeats along n. */
static void mixpi_reduce_map(mixpi_map *m, int fn, const mixp_reduce_args *k,
                             int repeated) {
    int64_t shape[3];
    shape[0] = k->outer;
    shape[1] = k->n;
    shape[2] = k->inner;
    mixpi_map_init(m, fn, 3, shape, k->y);
    mixpi_map_source(m, k->a, NULL);
    m->axes.s[repeated][0] = k->inner;
    m->axes.s[repeated][1] = 0;
}

typedef struct mixpi_dropout_job {
    const mixp_dropout_args *k;
    uint64_t key, limit;        /* key of the random numbers; those below limit drop       */
    float    scale;
} mixpi_dropout_job;

static void mixpi_dropout_plan(mixpi_dropout_job *d, const mixp_dropout_args *k) {
    d->k = k;
    d->key = mixp_random_key(k->seed, k->step, k->tensor);
    d->limit = (uint64_t)ceil((double)k->p * 4294967296.0);
    d->scale = k->p < 1.0f ? (float)(1.0 / (1.0 - (double)k->p)) : 0.0f;
}
