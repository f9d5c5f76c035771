#pragma once
#include "../device.h"
#include "../formats.c"
#include "float_mode.c"
/* ==== 4. KERNELS (implementation) =====================================================
 *
 * Kernels are written once, in plain functions over vectors of 16 floats, and compiled once
 * per instruction set: the section between MIXPI_PASS and its #endif is included again for
 * each. MIXPI_P(name) appends the set's suffix to a function's name.
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
    if (tasks > 1 && mixpi_workers(x, work) > 1) {
        mixpi_loop loop;
        loop.task = task;
        loop.arg = arg;
        loop.mode = mixpi_float_untrapped(was);
        x->parallel(x->user, tasks, mixpi_loop_task, &loop);
    } else for (int64_t i = 0; i < tasks; i++) task(arg, i, 0);
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
static mixp_in mixpi_in_at(mixp_in a, int64_t i) {
    const ptrdiff_t at = (ptrdiff_t)i * (ptrdiff_t)mixp_dtype_size(a.dtype);
    return mixpi_in((const char *)a.data + at, a.dtype);
}
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
    c->vector = mixpi_has_vectors(to) && mixpi_has_vectors(from);
    if (to == MIXP_F8_E8M0) c->vector &= c->plain;
    if (to == from) c->vector = 1;
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
    for (int i = 1; i < x->rank; i++)
        for (int j = i; j > 0 && mixpi_abs(d[j - 1]) < mixpi_abs(d[j]); j--)
            mixpi_axes_swap(x, j, j - 1);
    mixpi_axes_join(x);
    if (x->rank == 1) {
        mixpi_axes_swap(x, 0, 1);
        x->n[0] = 1;
        x->rank = 2;
    }
    int best = x->rank - 2;
    for (int i = best - 1; i >= 0; i--)
        if (mixpi_abs(s[i]) < mixpi_abs(s[best])) best = i;
    if (s[x->rank - 1] != 1) mixpi_axes_swap(x, best, x->rank - 2);
}

static void mixpi_copy_plan(mixpi_copy_job *c, const mixp_copy_args *k) {
    size_t bytes = (size_t)k->rank * sizeof(int64_t);
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
    int last = c->axes.rank - 1;
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
    for (int i = 0; i < last - 1; i++) c->tiles *= c->axes.n[i];
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
    uint64_t code;
    size_t wide;
    if (!size) return MIXP_ERR_DTYPE;
    if (k->n < 0 || k->dst.accumulate || (k->n && !k->dst.data)) return MIXP_ERR_ARGUMENT;
    if (k->n == 0) return MIXP_OK;

    /* A pattern of up to 4,096 bytes. */
    code = mixp_encode(k->dst.dtype, k->value, 0);
    wide = bytes < sizeof pattern ? bytes : sizeof pattern;
    for (size_t i = 0; i < wide; i += size) mixpi_store_code(pattern + i, size, code);
    if (bytes == wide) {
        memcpy(k->dst.data, pattern, bytes);
        return MIXP_OK;
    }

    /* The pattern, copied as rows of bytes; then what is left. */
    mixp_copy_args c = MIXPI_ZERO;
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
