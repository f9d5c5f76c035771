#pragma once
#include "../device.h"
#include "../formats.c"
#include "float_mode.c"
/* ==== 4. KERNELS (implementation) =====================================================
 *
 * Kernels are written once, in plain functions over vectors of 16 floats, and compiled once
 * per instruction set: the section between MIXPI_PASS and its #endif is included again for
 * each. MIXPI_P(name) gives a function its set's suffix.
 *
 * If results must be bit-identical, a product that feeds a sum is an explicit vfma: compilers
 * may contract the two-step form on one instruction set and not on another.
 */
#define MIXPI_CAT3(a, b, c) a##b##c
#define MIXPI_CAT(a, b, c)  MIXPI_CAT3(a, b, c)
#define MIXPI_P(name)       MIXPI_CAT(mixpi, _##name##_, MIXPI_SUFFIX)

#define MIXPI_BLOCK 1024        /* floats widened at a time: a few buffers of this size fit in L1 */
/* Loops over count elements from i = 0, n <= MIXPI_BLOCK at a time. Declares i and n. */
#define MIXPI_BLOCKS(i, n, count)                                                         \
    for (int64_t i = 0, n; (n = mixpi_min(MIXPI_BLOCK, (count) - i)) > 0; i += MIXPI_BLOCK)

/* Work is measured in elements: the number that a simple pass over an array does in the same
 * time. */
#define MIXPI_GRAIN      16384      /* the least work that is worth a separate task        */
#define MIXPI_CHUNK      32768      /* a task's elements of gradients, or of a look        */
#define MIXPI_LEAST_WORK 65536      /* the least work that is worth waking threads: 7 to 50 us */

/* The number of workers that may share this work. */
static int mixpi_workers(const mixp_exec *x, int64_t work)
{ return x->parallel && x->threads > 1 && work >= x->least_work ? x->threads : 1; }

/* The tasks of a loop, and the floating-point mode in which all threads run them. */
typedef struct mixpi_loop {
    mixp_task        task;
    void            *arg;
    mixpi_float_mode mode;
} mixpi_loop;

static void mixpi_loop_task(void *arg, int64_t index, int worker) {
    const mixpi_loop *loop = (const mixpi_loop *)arg;
    const mixpi_float_mode was = mixpi_float_enter(loop->mode);
    loop->task(loop->arg, index, worker);
    mixpi_float_leave(was);
}

static void mixpi_parallel(const mixp_exec *x, int64_t tasks, int64_t work, mixp_task task,
                           void *arg) {
    const mixpi_float_mode was = mixpi_float_calm();
    int64_t i;
    if (tasks > 1 && mixpi_workers(x, work) > 1) {
        mixpi_loop loop;
        loop.task = task;
        loop.arg = arg;
        loop.mode = mixpi_float_untrapped(was);
        x->parallel(x->user, tasks, mixpi_loop_task, &loop);
    } else for (i = 0; i < tasks; i++) task(arg, i, 0);
    mixpi_float_leave(was);
}
static void *mixpi_scratch(const mixp_exec *x, size_t bytes)
{ return x->scratch ? x->scratch(x->user, bytes ? bytes : 1) : NULL; }
static int64_t mixpi_ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static int64_t mixpi_min(int64_t a, int64_t b) { return a < b ? a : b; }
/* May a kernel read a, or write y? In the second pair, the array may also be missing. */
static int mixpi_reads(mixp_in a) { return mixpi_is_real(a.dtype); }
static int mixpi_writes(mixp_out y) { return mixpi_is_real(y.dtype); }
static int mixpi_may_read(mixp_in a) { return !a.data || mixpi_is_real(a.dtype); }
static int mixpi_may_write(mixp_out y) { return !y.data || mixpi_is_real(y.dtype); }

/* The array a from element i on. */
static mixp_in mixpi_in_at(mixp_in a, int64_t i)
{ return mixpi_in((const char *)a.data + (ptrdiff_t)i * (ptrdiff_t)mixp_dtype_size(a.dtype), a.dtype); }
static mixp_out mixpi_out_at(mixp_out a, int64_t i) {
    a.data = (char *)a.data + (ptrdiff_t)i * (ptrdiff_t)mixp_dtype_size(a.dtype);
    return a;
}

/* Work in units; a task is a number of units. */
typedef void (*mixpi_unit)(const void *job, int64_t unit);
typedef struct mixpi_units {
    mixpi_unit  unit;
    const void *job;
    int64_t     count, per_task;
} mixpi_units;

static void mixpi_units_task(void *arg, int64_t index, int worker) {
    const mixpi_units *u = (const mixpi_units *)arg;
    int64_t i = index * u->per_task, end = mixpi_min(i + u->per_task, u->count);
    (void)worker;
    for (; i < end; i++) u->unit(u->job, i);
}

/* work: the total of all units. */
static void mixpi_run_units(const mixp_exec *x, mixpi_units *u, int64_t work)
{ mixpi_parallel(x, mixpi_ceil_div(u->count, u->per_task), work, mixpi_units_task, u); }

/* The number of units in a task. work: array elements that one unit touches. */
static int64_t mixpi_units_of_task(int64_t work)
{ return mixpi_ceil_div(MIXPI_GRAIN, work > 0 ? work : 1); }

/* Runs the units in threads. work: array elements that one unit touches. */
static mixp_result mixpi_each_unit(const mixp_exec *x, int64_t count, int64_t work,
                                   mixpi_unit unit, const void *job) {
    mixpi_units u = { unit, job, count, mixpi_units_of_task(work) };
    mixpi_run_units(x, &u, count * work);
    return MIXP_OK;
}

/* --- axes ---------------------------------------------------------------------------------
 * The axes of a shape, and the stride of each axis in up to four arrays. Array 0 is the output.
 */
#define MIXPI_MAX_AXES (MIXP_MAX_RANK + 1)  /* one extra axis: see mixpi_axes_part         */
typedef struct mixpi_axes {
    int     rank, arrays;
    int64_t n[MIXPI_MAX_AXES], s[4][MIXPI_MAX_AXES];
} mixpi_axes;

static void mixpi_axes_swap(mixpi_axes *x, int i, int j) {
    mixpi_axes was = *x;
    x->n[i] = was.n[j];
    x->n[j] = was.n[i];
    for (int k = 0; k < x->arrays; k++) {
        x->s[k][i] = was.s[k][j];
        x->s[k][j] = was.s[k][i];
    }
}

/* Does axis `last` continue where axis i ends, in every array? */
static int mixpi_axes_adjoin(const mixpi_axes *x, int last, int i) {
    if (last < 0) return 0;
    for (int k = 0; k < x->arrays; k++)
        if (x->s[k][last] != x->s[k][i] * x->n[i]) return 0;
    return 1;
}

/* Drops axes of size 1 and merges neighbours. At least one axis remains. */
static void mixpi_axes_join(mixpi_axes *x) {
    int i, k, rank = 0;
    for (i = 0; i < x->rank; i++) {
        int64_t n = x->n[i];
        if (n == 1) continue;
        if (mixpi_axes_adjoin(x, rank - 1, i)) n *= x->n[--rank];
        x->n[rank] = n;
        for (k = 0; k < x->arrays; k++) x->s[k][rank] = x->s[k][i];
        rank++;
    }
    if (rank == 0) {
        x->n[rank++] = 1;
        for (k = 0; k < x->arrays; k++) x->s[k][0] = 1;
    }
    x->rank = rank;
}

/* --- what conversions and copies are cut into --------------------------------------------- */

#define MIXPI_CONVERT_CHUNK 65536           /* elements of a task                          */
#define MIXPI_STREAM_BYTES  ((size_t)2 << 20)   /* output beyond this bypasses the caches  */

/* Converts any dtype to any dtype, for pairs without vector code. `first`: index of element 0, for
 * random numbers. */
static void mixpi_convert_each(mixp_out dst, mixp_in src, int64_t n,
                               const mixp_rounding *r, uint64_t key, uint64_t first) {
    mixp_format from = mixp_format_of(src.dtype), to = mixp_format_of(dst.dtype);
    size_t in = mixp_dtype_size(src.dtype), out = mixp_dtype_size(dst.dtype), i;
    for (i = 0; i < (size_t)n; i++) {
        mixpi_number x =
            mixpi_unpack(from, mixpi_load_code((const char *)src.data + i * in, in));
        uint32_t random = r->stochastic ? mixp_random_at(key, first + i) : 0;
        uint64_t code = mixpi_pack(to, x, r->saturate, r->stochastic, random);
        mixpi_store_code((char *)dst.data + i * out, out, code);
    }
}

typedef struct mixpi_convert_job {
    const mixp_convert_args *k;
    int64_t  chunk;             /* elements of a task                                      */
    uint64_t key;               /* key of the random numbers                               */
    int      plain;             /* rounds to nearest even                                  */
    int      vector;            /* this pair has vector code                               */
    int      pages;             /* stores bypass the caches, on this many pages at once    */
} mixpi_convert_job;

/* One task: n elements from index i. */
typedef struct mixpi_convert_piece {
    mixp_out dst;
    mixp_in  src;
    int64_t  n, first;
} mixpi_convert_piece;

static mixpi_convert_piece mixpi_convert_piece_of(const mixpi_convert_job *c,
                                                  int64_t index) {
    mixpi_convert_piece p;
    int64_t i = index * c->chunk;
    p.dst = mixpi_out_at(c->k->dst, i);
    p.src = mixpi_in_at(c->k->src, i);
    p.n = mixpi_min(c->k->n - i, c->chunk);
    p.first = c->k->rounding.first + i;
    return p;
}

/* Does convert have work? If not, *r is the error, or MIXP_OK if there is nothing to do. */
static int mixpi_convert_starts(const mixp_convert_args *k, mixp_result *r) {
    *r = MIXP_ERR_DTYPE;
    if (!mixp_dtype_size(k->dst.dtype) || !mixp_dtype_size(k->src.dtype)) return 0;
    *r = MIXP_ERR_ARGUMENT;
    if (k->n < 0 || k->dst.accumulate || (k->n && (!k->dst.data || !k->src.data)))
        return 0;
    *r = MIXP_OK;
    return k->n > 0;
}

/* Is the conversion large, and to or from f32? Then loads and stores take all of the time. */
static int mixpi_convert_streams(const mixp_convert_args *k) {
    size_t size = mixp_dtype_size(k->dst.dtype);
    return (k->dst.dtype == MIXP_F32) != (k->src.dtype == MIXP_F32) &&
           k->dst.data != k->src.data && (size_t)k->n * size > MIXPI_STREAM_BYTES &&
           (uintptr_t)k->dst.data % size == 0;
}

static void mixpi_convert_plan(mixpi_convert_job *c, const mixp_convert_args *k) {
    const mixp_rounding *r = &k->rounding;
    mixp_dtype to = k->dst.dtype, from = k->src.dtype;
    int in_place =
        k->dst.data == k->src.data && mixp_dtype_size(to) != mixp_dtype_size(from);
    c->k = k;
    c->key = mixp_random_key(r->seed, r->step, r->tensor);
    c->plain = !r->saturate && !r->stochastic;
    c->vector = to == from || (mixpi_has_vectors(to) && mixpi_has_vectors(from));
    c->pages = c->vector && c->plain && mixpi_convert_streams(k);
    /* If dst is narrower and in place, a later piece would overwrite values that an earlier piece
     * still reads. */
    c->chunk = in_place ? k->n : MIXPI_CONVERT_CHUNK;
}

#define MIXPI_COPY_TILE 32      /* elements along each side of a tile, if the copy transposes */

/* A copy is cut into tiles of the last two axes; a tile is a unit of work. If both sides are dense
 * along the last axis, rows are copied directly. Otherwise the tile is gathered first, reading
 * along src's densest axis, so that a transpose touches each cache line once. */
typedef struct mixpi_copy_job {
    mixp_out   dst;
    mixp_in    src;
    mixpi_axes axes;            /* array 0: dst, 1: src; at least two axes                 */
    int        dense;           /* both sides are dense along the last axis                */
    int64_t    tile_rows, tile_cols;    /* size of a tile                                  */
    int64_t    down, across;    /* tiles along the last two axes                           */
    int64_t    tiles;           /* total                                                   */
} mixpi_copy_job;

static int64_t mixpi_abs(int64_t a) { return a < 0 ? -a : a; }

/* Sorts the axes so that dst's densest axis is last, merges axes that both sides step through
 * evenly, and moves src's densest axis to second to last. At least two axes remain. */
static void mixpi_copy_axes(mixpi_axes *x) {
    const int64_t *d = x->s[0], *s = x->s[1];
    int i, j, best;
    for (i = 1; i < x->rank; i++)
        for (j = i; j > 0 && mixpi_abs(d[j - 1]) < mixpi_abs(d[j]); j--)
            mixpi_axes_swap(x, j, j - 1);
    mixpi_axes_join(x);
    if (x->rank == 1) {
        mixpi_axes_swap(x, 0, 1);
        x->n[0] = 1;
        x->rank = 2;
    }
    best = x->rank - 2;
    for (i = best - 1; i >= 0; i--)
        if (mixpi_abs(s[i]) < mixpi_abs(s[best])) best = i;
    if (s[x->rank - 1] != 1) mixpi_axes_swap(x, best, x->rank - 2);
}

static void mixpi_copy_plan(mixpi_copy_job *c, const mixp_copy_args *k) {
    size_t bytes = (size_t)k->rank * sizeof(int64_t);
    int i, last;
    memset(c, 0, sizeof *c);
    c->dst = k->dst;
    c->src = k->src;
    c->axes.rank = k->rank;
    c->axes.arrays = 2;

    /* The axes, with neighbours joined. */
    memcpy(c->axes.n, k->shape, bytes);
    memcpy(c->axes.s[0], k->dst_strides, bytes);
    memcpy(c->axes.s[1], k->src_strides, bytes);
    mixpi_copy_axes(&c->axes);

    /* A tile is a run of memory, or a square if one side is strided. */
    last = c->axes.rank - 1;
    c->dense = c->axes.s[0][last] == 1 && c->axes.s[1][last] == 1;
    c->tile_cols = c->tile_rows = MIXPI_COPY_TILE;
    if (c->dense) {
        c->tile_cols = mixpi_min(c->axes.n[last], MIXPI_GRAIN);
        c->tile_rows = 1 + MIXPI_GRAIN / c->tile_cols;
    }
    c->tile_rows = mixpi_min(c->tile_rows, c->axes.n[last - 1]);
    c->tile_cols = mixpi_min(c->tile_cols, c->axes.n[last]);

    c->down = mixpi_ceil_div(c->axes.n[last - 1], c->tile_rows);
    c->across = mixpi_ceil_div(c->axes.n[last], c->tile_cols);
    c->tiles = c->down * c->across;
    for (i = 0; i < last - 1; i++) c->tiles *= c->axes.n[i];
}

/* Does copy have work? If not, *r is the error, or MIXP_OK if there is nothing to do. */
static int mixpi_copy_starts(const mixp_copy_args *k, mixp_result *r) {
    int i, empty = 0, bits = k->dst.dtype == k->src.dtype && !k->dst.accumulate;
    *r = MIXP_ERR_DTYPE;
    if (!mixp_dtype_size(k->dst.dtype) || !mixp_dtype_size(k->src.dtype)) return 0;
    if (!bits && !(mixpi_is_real(k->dst.dtype) && mixpi_is_real(k->src.dtype))) return 0;
    *r = MIXP_ERR_SHAPE;
    if (k->rank < 0 || k->rank > MIXP_MAX_RANK) return 0;
    for (i = 0; i < k->rank; i++) {
        if (k->shape[i] < 0) return 0;
        empty |= k->shape[i] == 0;
    }
    *r = empty || (k->dst.data && k->src.data) ? MIXP_OK : MIXP_ERR_ARGUMENT;
    return !empty && *r == MIXP_OK;
}

static mixp_result mixpi_cpu_copy(const mixp_exec *x, const mixp_copy_args *k, mixpi_unit unit) {
    mixpi_copy_job c;
    mixp_result r;
    if (!mixpi_copy_starts(k, &r)) return r;
    mixpi_copy_plan(&c, k);
    return mixpi_each_unit(x, c.tiles, c.tile_rows * c.tile_cols, unit, &c);
}

typedef mixp_result (*mixpi_copy_kernel)(const mixp_exec *, const mixp_copy_args *);

/* Fills dst by copying a 4096-byte pattern of the value repeatedly. */
static mixp_result mixpi_cpu_fill(const mixp_exec *x, const mixp_fill_args *k,
                                  mixpi_copy_kernel copy) {
    const size_t size = mixp_dtype_size(k->dst.dtype), bytes = (size_t)k->n * size;
    unsigned char pattern[4096];
    mixp_copy_args c;
    uint64_t code;
    size_t wide, i;
    if (!size) return MIXP_ERR_DTYPE;
    if (k->n < 0 || k->dst.accumulate || (k->n && !k->dst.data)) return MIXP_ERR_ARGUMENT;
    if (k->n == 0) return MIXP_OK;

    /* A pattern of up to 4,096 bytes. */
    code = mixp_encode(k->dst.dtype, k->value, 0);
    wide = bytes < sizeof pattern ? bytes : sizeof pattern;
    for (i = 0; i < wide; i += size) mixpi_store_code(pattern + i, size, code);
    if (bytes == wide) {
        memcpy(k->dst.data, pattern, bytes);
        return MIXP_OK;
    }

    /* The pattern, copied as rows of bytes; then what is left. */
    memset(&c, 0, sizeof c);
    c.rank = 2;
    c.shape[0] = (int64_t)(bytes / wide);
    c.shape[1] = (int64_t)wide;
    c.src = mixpi_in(pattern, MIXP_U8);
    c.src_strides[1] = 1;
    c.dst = mixpi_out_to(k->dst.data, MIXP_U8, 0);
    c.dst_strides[0] = (int64_t)wide;
    c.dst_strides[1] = 1;
    memcpy((char *)k->dst.data + bytes / wide * wide, pattern, bytes % wide);
    return copy(x, &c);
}

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
    int i, k;
    memset(m, 0, sizeof *m);
    m->fn = fn;
    m->each = mixpi_is_single(fn) ? mixpi_singly : NULL;
    m->y = y;
    m->axes.rank = rank;
    m->axes.arrays = 1;
    for (i = rank - 1; i >= 0; i--) {
        m->axes.n[i] = shape[i];
        for (k = 0; k < 4; k++) m->axes.s[k][i] = step;
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
    int k, last;
    mixpi_axes_join(x);
    mixpi_axes_part(x);

    m->width = MIXPI_BLOCK;
    last = x->rank - 1;
    if (last < 1 || x->n[last] > MIXPI_BLOCK / 2 || x->n[last] == 0 || x->s[0][last] == 0)
        return;
    for (k = 0; k < x->arrays; k++)
        if (!mixpi_axes_merge(x, k)) return;

    /* A short last axis that repeats becomes part of the axis before it. */
    m->period = x->n[last];
    m->width = MIXPI_BLOCK / m->period * m->period;
    x->n[last - 1] *= m->period;
    for (k = 0; k < x->arrays; k++) {
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
    int axis, k;
    for (axis = x->rank - 2; axis >= 0 && index > 0; axis--) {
        int64_t n = x->n[axis], i = index < n ? index : index % n;
        if ((x->s[0][axis] == 0) != summed) continue;
        for (k = 0; k < x->arrays; k++) off[k] += i * x->s[k][axis];
        index = index < n ? 0 : index / n;
    }
}

/* Cuts the last axis into blocks. */
static void mixpi_map_plan(mixpi_map *m) {
    int i, last;
    mixpi_map_merge(m);
    last = m->axes.rank - 1;
    m->cols = m->axes.n[last];
    m->blocks = mixpi_ceil_div(m->cols, m->width);
    m->outputs = m->rows = 1;
    for (i = 0; i < last; i++) {
        if (m->axes.s[0][i]) m->outputs *= m->axes.n[i];
        else m->rows *= m->axes.n[i];
    }
}

/* The number of elements of a block, limited to the elements that exist. */
static int64_t mixpi_map_block(const mixpi_map *m)
{ return mixpi_min(m->width, m->cols > 0 ? m->cols : 1); }

/* Cuts the rows into runs. If outputs are few, runs are short, to give all threads work. */
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

/* The first row whose id is neither in [0, limit) nor `ignore`; -1 if all are valid. */
#define MIXPI_NO_INDEX ((int64_t)1 << 40)   /* as `ignore`: no id is ignored                 */
static int64_t mixpi_bad_id(const int32_t *ids, int64_t rows, int64_t limit,
                            int64_t ignore) {
    int64_t i;
    for (i = 0; i < rows; i++)
        if ((ids[i] < 0 || ids[i] >= limit) && ids[i] != ignore) return i;
    return -1;
}

/* The first id of bag i; of the bag after the last, the number of ids. */
static int64_t mixpi_bag_first(const mixp_bags *b, int64_t rows, int64_t i) {
    if (!b->offsets) return i * b->width;
    return i < b->count ? b->offsets[i] : rows;
}

/* The number of ids of bag i that count. */
static int64_t mixpi_bag_counted(const mixp_bags *b, const int32_t *ids, int64_t rows, int64_t i) {
    int64_t n = 0;
    const int64_t end = mixpi_bag_first(b, rows, i + 1);
    for (int64_t j = mixpi_bag_first(b, rows, i); j < end; j++) n += ids[j] != b->padding;
    return n;
}

/* The first bag whose offset is wrong; -1 = none. */
static int64_t mixpi_bad_bag(const mixp_bags *b, int64_t rows) {
    for (int64_t i = 0; i < b->count; i++) {
        const int64_t first = mixpi_bag_first(b, rows, i), next = mixpi_bag_first(b, rows, i + 1);
        if (first < 0 || first > rows || next < first || (i == 0 && first)) return i;
    }
    return -1;
}

/* Are the ids of an embedding, or of bags, out of range? */
static int mixpi_bad_embedding(const int32_t *ids, int64_t rows, int64_t vocab,
                               const mixp_bags *bags) {
    if (!bags->count) return mixpi_bad_id(ids, rows, vocab, MIXPI_NO_INDEX) >= 0;
    return mixpi_bad_id(ids, rows, vocab, bags->padding) >= 0 || mixpi_bad_bag(bags, rows) >= 0;
}

/* Returns the error of norm's arguments, or MIXP_OK. */
static mixp_result mixpi_norm_check(const mixp_norm_args *k) {
    if (!mixpi_reads(k->a) || !mixpi_writes(k->y) || !mixpi_may_read(k->gamma) ||
        !(k->rms || mixpi_may_read(k->beta))) return MIXP_ERR_DTYPE;
    return k->y.accumulate ? MIXP_ERR_ARGUMENT : MIXP_OK;
}

/* norm_backward: each task adds its rows' parts of dgamma and dbeta to its own sums. The limit of
 * the number of tasks bounds the memory of these sums. */
#define MIXPI_NORM_TASKS 256                /* limit                                         */
typedef struct mixpi_norm_back_job {
    const mixp_norm_backward_args *k;
    int64_t per_task, tasks;
    int64_t wide;               /* cols, rounded up to full vectors                        */
    float  *sums;               /* 2 * wide per task; NULL: dgamma and dbeta not needed    */
} mixpi_norm_back_job;

static mixpi_norm_back_job mixpi_norm_back_plan(const mixp_norm_backward_args *k) {
    mixpi_norm_back_job job = { k, mixpi_units_of_task(k->cols), 0, 0, NULL };
    int64_t least = mixpi_ceil_div(k->rows, MIXPI_NORM_TASKS);
    if (job.per_task < least) job.per_task = least;
    job.tasks = mixpi_ceil_div(k->rows, job.per_task);
    job.wide = (k->cols + 15) & ~(int64_t)15;
    return job;
}

/* embedding_backward: for each row of the table, a list of the rows of dy that used it, in
 * increasing order. Each row of the table belongs to one task, for every dtype, and is rounded
 * once. */
typedef struct mixpi_embedding_back_job {
    const mixp_embedding_backward_args *k;
    int64_t *first;             /* first row of each id; -1 = none                         */
    int64_t *next;              /* next row with the same id; -1 = none                    */
    int64_t *bag;               /* the bag of each id                                      */
    float   *factor;            /* by which its gradient is multiplied                     */
} mixpi_embedding_back_job;

/* Lays the lists out in memory, unless memory is NULL. Returns the bytes that they need. */
static size_t mixpi_embedding_back_carve(mixpi_embedding_back_job *job, void *memory) {
    size_t ids = (size_t)job->k->vocab, rows = (size_t)job->k->rows;
    if (memory) {
        job->first = (int64_t *)memory;
        job->next = job->first + ids;
        if (job->k->bags.count) job->bag = job->next + rows;
        if (job->k->bags.count) job->factor = (float *)(void *)(job->bag + rows);
    }
    return (ids + rows) * sizeof(int64_t) +
           (job->k->bags.count ? rows * (sizeof(int64_t) + sizeof(float)) : 0);
}

/* Sets the bag and the factor of each id. */
static void mixpi_embedding_back_bags(const mixpi_embedding_back_job *job) {
    const mixp_embedding_backward_args *k = job->k;
    const mixp_bags *b = &k->bags;
    for (int64_t i = 0; i < b->count; i++) {
        const int64_t end = mixpi_bag_first(b, k->rows, i + 1);
        const float n = b->mode == MIXP_BAG_MEAN
                            ? (float)mixpi_bag_counted(b, k->ids, k->rows, i)
                            : 1.0f;
        for (int64_t j = mixpi_bag_first(b, k->rows, i); j < end; j++) {
            job->bag[j] = i;
            job->factor[j] = b->weights.data ? mixp_get(b->weights, j) : 1.0f / n;
        }
    }
}

static void mixpi_embedding_back_lists(const mixpi_embedding_back_job *job) {
    const mixp_embedding_backward_args *k = job->k;
    for (int64_t i = 0; i < k->vocab; i++) job->first[i] = -1;
    for (int64_t i = k->rows - 1; i >= 0; i--) {
        if (k->bags.count && k->ids[i] == k->bags.padding) continue;
        job->next[i] = job->first[k->ids[i]];
        job->first[k->ids[i]] = i;
    }
    if (k->bags.count) mixpi_embedding_back_bags(job);
}

/* Elements of work for an id: the average number of rows of dy per id, times the columns. */
static int64_t mixpi_embedding_back_work(const mixp_embedding_backward_args *k)
{ return mixpi_ceil_div((k->rows + k->vocab) * k->cols, k->vocab > 0 ? k->vocab : 1); }

/* The largest exponential of a row is 1. Where the sum of the others is less than this, it is summed
 * without the largest, because 1 + others loses digits. */
#define MIXPI_SURE 0.25

/* cross_entropy: the rows' losses in double, added in order. */
typedef struct mixpi_entropy_job {
    const mixp_cross_entropy_args *k;
    double *losses;
} mixpi_entropy_job;

/* The number of rows that count. */
static int64_t mixpi_entropy_count(const mixp_cross_entropy_args *k) {
    int64_t i, count = 0;
    for (i = 0; i < k->rows; i++) count += k->targets[i] != k->ignore;
    return count;
}

/* Is a sum of weights, which may be negative, not 0? */
static int mixpi_weighs(double count) { return count > 0.0 || count < 0.0; }

static void mixpi_entropy_mean(const mixpi_entropy_job *job) {
    const mixp_cross_entropy_args *k = job->k;
    double sum = 0.0, count = k->before > 0 ? (double)*k->counted : 0.0;
    if (k->before > 0) sum = (double)*k->loss * (mixpi_weighs(count) ? count : 1.0);
    for (int64_t i = 0; i < k->rows; i++) {
        if (k->targets[i] == k->ignore) continue;
        sum += job->losses[i];
        count += k->weights ? (double)k->weights[k->targets[i]] : 1.0;
    }
    if (k->sum) count = 1.0;
    *k->counted = (float)count;
    if (mixpi_weighs(count)) *k->loss = (float)(sum / count);
    else *k->loss = k->more ? (float)sum : mixp_f32_of_bits(0x7FC00000u);
}

/* The rows' losses without a mean. */
static void mixpi_entropy_each(const mixpi_entropy_job *job) {
    const mixp_cross_entropy_args *k = job->k;
    for (int64_t i = 0; i < k->rows; i++)
        k->each[i] = k->targets[i] == k->ignore ? 0.0f : (float)job->losses[i];
}

typedef struct mixpi_entropy_back_job {
    const mixp_cross_entropy_backward_args *k;
    float factor;
} mixpi_entropy_back_job;

/* A row's gradient: factor (all softmax + others), and factor (target + others) at the target. */
typedef struct mixpi_entropy_slopes {
    float factor, all, target, others;
} mixpi_entropy_slopes;

/* The target's slope, all p - hot with p near 1, is made of the others' probability, 1 - p, which
 * keeps its digits. Products in double are exact, so contracting them changes nothing. */
static mixpi_entropy_slopes mixpi_entropy_slopes_of(const mixpi_entropy_back_job *job,
                                                    int64_t row) {
    const mixp_cross_entropy_backward_args *k = job->k;
    mixpi_entropy_slopes s = { job->factor, 1.0f, 0.0f, 0.0f };
    float hot = 1.0f - k->smoothing;
    double spread = (double)k->smoothing;
    if (k->smoothing > 0.0f) s.others = -k->smoothing / (float)k->cols;
    if (k->each) s.factor = mixp_get(k->dloss, row);
    if (k->targets[row] == k->ignore) return s;
    if (k->weights) {
        hot *= k->weights[k->targets[row]];
        spread *= (double)k->weights[k->cols];
        s.all = (float)((double)hot + spread);
    }
    if (k->logs) s.target = -hot;
    else s.target = (float)(spread - (double)s.all * (double)k->stats[3 * row + 2]);
    return s;
}

typedef struct mixpi_entropy_both_job {
    mixpi_entropy_job      loss;
    mixpi_entropy_back_job back;
} mixpi_entropy_both_job;

/* The backward pass of the loss that k computes. */
static mixp_cross_entropy_backward_args mixpi_entropy_back_of(
        const mixp_cross_entropy_both_args *k) {
    mixp_cross_entropy_backward_args back;
    memset(&back, 0, sizeof back);
    back.rows = k->loss.rows;
    back.cols = k->loss.cols;
    back.ignore = k->loss.ignore;
    back.smoothing = k->loss.smoothing;
    back.targets = k->loss.targets;
    back.logits = k->loss.logits;
    back.stats = k->loss.stats;
    back.counted = k->loss.counted;
    back.dlogits = k->dlogits;
    return back;
}

/* --- the largest --- */

typedef struct mixpi_most {
    float   value;
    int32_t index, ties;
} mixpi_most;

static int mixpi_is_nan(float x) { return mixp_bits_of_f32(x) << 1 > 0xFF000000u; }

/* Are both equal, or both NaN? */
static int mixpi_most_equals(float x, float most)
{ return x == most || (mixpi_is_nan(x) && mixpi_is_nan(most)); }

static void mixpi_most_take(mixpi_most *m, float x, int64_t index) {
    int larger = x > m->value || mixpi_is_nan(x);
    if (index > 0 && mixpi_most_equals(x, m->value)) {
        m->ties++;
    } else if (index == 0 || (larger && !mixpi_is_nan(m->value))) {
        m->value = x;
        m->index = (int32_t)index;
        m->ties = 1;
    }
}

/* The order of a kernel over [outer, n, inner]: line by line, in pieces of a block. If inner is 1,
 * a line runs along n, one line for each o; otherwise a line runs along inner, one for each o and
 * j. */
typedef struct mixpi_lines {
    int     along_n;
    int64_t length, blocks;
} mixpi_lines;

static mixpi_lines mixpi_lines_of(int64_t n, int64_t inner) {
    mixpi_lines lines;
    lines.along_n = inner == 1;
    lines.length = lines.along_n ? n : inner;
    lines.blocks = (lines.length + MIXPI_BLOCK - 1) / MIXPI_BLOCK;
    return lines;
}

/* --- rotary embeddings --- */

typedef struct mixpi_rope_job {
    const mixp_rope_args *k;
    float *cosine, *sine;       /* [t][d / 2]                                              */
} mixpi_rope_job;

#define MIXPI_ROPE_RUN 256      /* positions whose angles follow from one sine and cosine  */

/* A run of positions: from each position to the next, a frequency's pair rotates by its angle. In
 * f64 the error at the last position is about 1e-14, a hundred-thousandth of the rounding of
 * f32. */
static void mixpi_rope_run(const void *args, int64_t run) {
    const mixpi_rope_job *job = (const mixpi_rope_job *)args;
    int64_t half = job->k->d / 2, i, p, from = run * MIXPI_ROPE_RUN;
    int64_t end = mixpi_min(from + MIXPI_ROPE_RUN, job->k->t);
    double scale = job->k->scaled ? job->k->scale : 1.0;
    for (i = 0; i < half; i++) {
        double step = job->k->scaled ? job->k->frequency[i]
                                     : pow(job->k->base, -2.0 * (double)i / (double)job->k->d);
        double angle = (double)(job->k->first + from) * step;
        double c = cos(angle), s = sin(angle), step_c = cos(step), step_s = sin(step);
        for (p = from; p < end; p++) {
            double next = c * step_c - s * step_s;
            job->cosine[p * half + i] = (float)(c * scale);
            job->sine[p * half + i] = (float)(s * scale);
            s = s * step_c + c * step_s;
            c = next;
        }
    }
}

/* --- random numbers, comparisons, topk --- */

typedef struct mixpi_random_job {
    const mixp_random_args *k;
    uint64_t key;
} mixpi_random_job;

static int mixpi_is_comparable(mixp_in a) {
    return a.data && (mixpi_reads(a) || a.dtype == MIXP_U8 || a.dtype == MIXP_I32);
}

/* Element i of a comparable array, exactly. */
static double mixpi_exact(mixp_in a, int64_t i) {
    if (a.dtype == MIXP_I32) return (double)((const int32_t *)a.data)[i];
    if (a.dtype == MIXP_U8) return (double)((const uint8_t *)a.data)[i];
    return (double)mixp_get(a, i);
}

/* One line: the last axis, from the first elements of a and b. */
static void mixpi_compare_unit(const void *args, int64_t line) {
    const mixp_compare_args *k = (const mixp_compare_args *)args;
    const int last = k->rank - 1;
    int64_t n = last < 0 ? 1 : k->shape[last], a = 0, b = 0, i, rest = line;
    int64_t step_a = last < 0 ? 0 : k->a_strides[last], step_b = last < 0 ? 0 : k->b_strides[last];
    for (int axis = last - 1; axis >= 0; axis--) {
        int64_t at = rest % k->shape[axis];
        a += at * k->a_strides[axis];
        b += at * k->b_strides[axis];
        rest /= k->shape[axis];
    }
    for (i = 0; i < n; i++)
        k->y[line * n + i] = (uint8_t)mixpi_holds(k->how, mixpi_exact(k->a, a + i * step_a),
                                                     mixpi_exact(k->b, b + i * step_b));
}

static mixp_result mixpi_compare(const mixp_exec *x, const mixp_compare_args *k) {
    int64_t lines = 1;
    if ((unsigned)k->how >= MIXP_COMPARE_COUNT || k->rank < 0 || k->rank > MIXP_MAX_RANK || !k->y)
        return MIXP_ERR_ARGUMENT;
    if (!mixpi_is_comparable(k->a) || !mixpi_is_comparable(k->b)) return MIXP_ERR_DTYPE;
    for (int axis = 0; axis < k->rank - 1; axis++) lines *= k->shape[axis];
    return mixpi_each_unit(x, lines, 8 * (k->rank ? k->shape[k->rank - 1] : 1),
                           mixpi_compare_unit, k);
}

/* The rank of element i of a row: one that comes earlier has a larger rank. */
static uint64_t mixpi_topk_rank(const mixp_topk_args *k, int64_t row, int32_t i) {
    uint32_t key = mixpi_topk_key(mixp_get(k->a, row * k->cols + i), k->smallest);
    return (uint64_t)key << 32 | (uint32_t)~i;
}

/* Lets `moved` sink from `at` in a heap of n positions, in which each comes behind those under
 * it. */
static void mixpi_topk_sift(const mixp_topk_args *k, int64_t row, int32_t *heap, int64_t at,
                            int64_t n, int32_t moved) {
    const uint64_t own = mixpi_topk_rank(k, row, moved);
    int64_t child;
    for (child = 2 * at + 1; child < n; child = 2 * at + 1) {
        uint64_t last = mixpi_topk_rank(k, row, heap[child]), other;
        other = child + 1 < n ? mixpi_topk_rank(k, row, heap[child + 1]) : last;
        if (other < last) {
            last = other;
            child++;
        }
        if (own <= last) break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = moved;
}

/* One row: a heap of the best k positions, whose top is the last of them; then that heap sorted. */
static void mixpi_topk_unit(const void *args, int64_t row) {
    const mixp_topk_args *k = (const mixp_topk_args *)args;
    int32_t *heap = k->index + row * k->k;
    for (int64_t i = 0; i < k->k; i++) heap[i] = (int32_t)i;
    for (int64_t i = k->k / 2; i-- > 0;) mixpi_topk_sift(k, row, heap, i, k->k, heap[i]);
    for (int64_t i = k->k; i < k->cols; i++)
        if (mixpi_topk_rank(k, row, (int32_t)i) > mixpi_topk_rank(k, row, heap[0]))
            mixpi_topk_sift(k, row, heap, 0, k->k, (int32_t)i);
    for (int64_t i = k->k - 1; i > 0; i--) {
        int32_t moved = heap[i];
        heap[i] = heap[0];
        mixpi_topk_sift(k, row, heap, 0, i, moved);
    }
}

static mixp_result mixpi_topk(const mixp_exec *x, const mixp_topk_args *k) {
    if (!mixpi_reads(k->a)) return MIXP_ERR_DTYPE;
    if (k->k < 1 || k->k > k->cols || k->cols > 0x7FFFFFFF || !k->index) return MIXP_ERR_ARGUMENT;
    return mixpi_each_unit(x, k->rows, 16 * k->cols, mixpi_topk_unit, k);
}
