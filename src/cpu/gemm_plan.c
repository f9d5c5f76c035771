#pragma once
#include "starts.c"
/* --- gemm: what is planned once a call: see gemm.c ------------------------------------------ */

#if defined(MIXPREC_CBLAS)
#  include <cblas.h>
/* Is g large, entirely in f32, and small enough for the int sizes of BLAS? */
static int mixpi_gemm_suits_cblas(const mixp_gemm_args *g) {
    const int64_t most = 0x7FFFFFFF;
    if (g->a.dtype != MIXP_F32 || g->b.dtype != MIXP_F32 || g->c.dtype != MIXP_F32) return 0;
    if (g->bias.data && g->bias.dtype != MIXP_F32) return 0;
    if (g->m > most || g->n > most || g->k > most) return 0;
    if (g->lda > most || g->ldb > most || g->ldc > most) return 0;
    return (double)g->m * (double)g->n * (double)g->k >= 1e6;
}

/* c = bias, or c += bias if c accumulates. */
static void mixpi_gemm_cblas_bias(const mixp_gemm_args *g, float *c) {
    const float *bias = (const float *)g->bias.data;
    for (int64_t i = 0; i < g->m; i++, c += g->ldc)
        for (int64_t j = 0; j < g->n; j++) c[j] = g->c.accumulate ? c[j] + bias[j] : bias[j];
}

/* Computes g by BLAS if g suits BLAS; returns 0 if not. BLAS chooses its own threads and order of
 * sums, so only BLAS can guarantee equal bits for this product. */
static int mixpi_gemm_cblas(const mixp_gemm_args *g) {
    if (!mixpi_gemm_suits_cblas(g)) return 0;
    for (int64_t z = 0; z < g->batch; z++) {
        const float *a = (const float *)g->a.data + z * g->stride_a;
        const float *b = (const float *)g->b.data + z * g->stride_b;
        float *c = (float *)g->c.data + z * g->stride_c;
        if (g->bias.data) mixpi_gemm_cblas_bias(g, c);
        cblas_sgemm(CblasRowMajor, g->trans_a ? CblasTrans : CblasNoTrans,
            g->trans_b ? CblasTrans : CblasNoTrans, (int)g->m, (int)g->n, (int)g->k,
            mixpi_gemm_alpha(g), a, (int)g->lda, b, (int)g->ldb,
            g->bias.data || g->c.accumulate ? 1.0f : 0.0f, c, (int)g->ldc);
    }
    return 1;
}
#endif
#define MIXPI_PANELS 8        /* panels of MIXPI_MR rows of a that are packed at a time   */
#define MIXPI_KC 384          /* largest depth of a pass: a panel of A stays in L1        */
#define MIXPI_MB 512          /* rows of the largest block of C                           */
#define MIXPI_NB 512          /* its columns; with MIXPI_KC, the packed b stays in L2     */
#define MIXPI_PAD 16          /* keeps the rows of packed A in different cache sets       */

/* The elements that a tile multiplies: floats or pairs. A pair takes the place of a float and holds
 * elements k and k+1 in bf16 or f16: k in the high half on x86, in the low half on Arm. If k+1 is
 * beyond the end, its half is 0. */
enum {
    MIXPI_FLOATS,
    MIXPI_PAIRS_BF16,           /* vdpbf16ps, BFMLAL: the bits of floats                   */
    MIXPI_PAIRS_F16             /* FMLAL: the bits of floats                               */
};

/* How a table multiplies bf16 by bf16, and f16 by f16: MIXPI_FLOATS, ... */
typedef struct mixpi_pairs { int bf16, f16; } mixpi_pairs;
static const mixpi_pairs mixpi_no_pairs = { MIXPI_FLOATS, MIXPI_FLOATS };

static int mixpi_pairs_for(mixpi_pairs have, mixp_in a, mixp_in b) {
    if (a.dtype != b.dtype) return MIXPI_FLOATS;
    if (a.dtype == MIXP_BF16) return have.bf16;
    return a.dtype == MIXP_F16 ? have.f16 : MIXPI_FLOATS;
}

/* The steps of a sum over `depth` elements. */
static int64_t mixpi_pair_steps(int pairs, int64_t depth) {
    return pairs ? mixpi_ceil_div(depth, 2) : depth;
}

/* One tile: c = alpha * a b + bias (+ c if add is set), all f32. b is readable in whole vectors
 * of columns, of which the first cols <= MIXPI_NR count. Distances are in floats. */
typedef struct mixpi_tile {
    int64_t      depth;         /* steps of the sum                                        */
    const float *a;             /* a(i, p) = a[i * a_row + p * a_step]                     */
    int64_t      a_row, a_step;
    const float *b;             /* b(p, j) = b[p * b_step + j]                             */
    int64_t      b_step;
    float       *c;             /* c(i, j) = c[i * c_row + j]                              */
    int64_t      c_row;
    const float *bias;          /* NULL = 0                                                */
    float       *keep;          /* where rows of b are packed as they are read, or NULL    */
    uintptr_t    ask;           /* the first line to prefetch for the next tiles           */
    uintptr_t    ask_next;      /* bytes from a step's first line to its second            */
    uintptr_t    ask_step;      /* bytes from a step's two lines to the next step's        */
    uintptr_t    ask_jump;      /* further bytes, added after ask_every steps              */
    int64_t      ask_every;     /* steps between two jumps; 0 = never jump                 */
    float        alpha;
    int          add, cols;
    int          pairs;         /* what a and b hold: MIXPI_FLOATS, ...                     */
} mixpi_tile;

#if MIXPI_BF16 || MIXPI_ARM_PAIRS
/* A small product with a known answer: one row by four columns, k and k+1 in one word. */
typedef struct mixpi_pairs_known {
    uint32_t a[2], b[2][4];
    float    want[4];
} mixpi_pairs_known;

/* a is 1, 1, 1, 1.5. The test: is k added before k+1, in two steps, each rounded to nearest even?
 * Column 1 shows the order, column 2 the rounding. */
static const mixpi_pairs_known mixpi_known_bf16 = {
    { 0x3F803F80u, 0x3F803FC0u },
    { { 0x40403F00u, 0x3F804B80u, 0x4B804040u, 0x3F804B80u },   /* 3, 1/2; 1, 2^24; ...  */
      { 0xC0E04120u, 0x3F80CB80u, 0x00000000u, 0xBF804B80u } }, /* -7, 10; 1, -2^24; ... */
    { 11.5f, -8388608.0f, 16777220.0f, 41943040.0f }
};

/* a is 2^12, 1 + 2^-10, 1, 1. Column 1 shows order and rounding, column 2 that subnormals of f16
 * are kept, column 3 that products are exact. */
static const mixpi_pairs_known mixpi_known_f16 = {
    { 0x6C003C01u, 0x3C003C00u },
    { { 0x38000000u, 0x6C000000u, 0x00010000u, 0x00003C01u },   /* 1/2, 0; 2^12, 0; ...  */
      { 0x4900C700u, 0x4200BC00u, 0x00000000u, 0x00000000u } }, /* 10, -7; 3, -1; ...    */
    { 2051.0f, 16777220.0f, 0.000244140625f, 1.0019540786743164f }
};

/* The value of a pair in this machine's order: Arm swaps the halves. */
static float mixpi_known_pair(uint32_t pair) {
    return mixp_f32_of_bits(MIXPI_ARM ? pair << 16 | pair >> 16 : pair);
}

/* Does a tile of one row return the known answer? */
MIXPI_SELDOM
static int mixpi_pairs_answer(void (*tile)(const mixpi_tile *t), int pairs) {
    const mixpi_pairs_known *known = &mixpi_known_bf16;
    float rows[2], columns[2 * 16], sums[16];
    mixpi_tile t;
    if (pairs == MIXPI_PAIRS_F16) known = &mixpi_known_f16;
    for (int i = 0; i < 2; i++) {
        rows[i] = mixpi_known_pair(known->a[i]);
        for (int j = 0; j < 16; j++) columns[i * 16 + j] = mixpi_known_pair(known->b[i][j % 4]);
    }

    /* A tile of one row. */
    memset(&t, 0, sizeof t);
    t.depth = 2;
    t.a = rows;
    t.a_step = 1;
    t.b = columns;
    t.b_step = 16;
    t.c = sums;
    t.c_row = 16;
    t.alpha = 1.0f;
    t.cols = 16;
    t.pairs = pairs;

    tile(&t);
    for (int j = 0; j < 16; j++)
        if (mixp_bits_of_f32(sums[j]) != mixp_bits_of_f32(known->want[j % 4])) return 0;
    return 1;
}
#endif

/* Scratch memory: a slice of `floats` floats for each worker. */
typedef struct mixpi_slices { float *first; int64_t floats; } mixpi_slices;

static float *mixpi_slice(const mixpi_slices *s, int worker) {
    return s->first + worker * s->floats;
}

/* Cuts a slice into pieces, one after another, in whole cache lines. With `from` NULL it only
 * counts. The same function counts and cuts, so the size always agrees with the pointers. */
typedef struct mixpi_carver { float *from; int64_t used; } mixpi_carver;

static float *mixpi_carve(mixpi_carver *c, int64_t floats) {
    float *piece = c->from ? c->from + c->used : NULL;
    c->used += (floats + 15) / 16 * 16;
    return piece;
}

/* Runs the tasks of a job; `work` is the work of all of them. Each worker gets a slice of
 * slices->floats floats, which the job finds through `slices`. */
static mixp_result mixpi_run_sliced(const mixp_exec *x, int64_t tasks, int64_t work, mixp_task task,
    void *job, mixpi_slices *slices) {
    int64_t workers = tasks > 1 ? mixpi_workers(x, work) : 1, floats = slices->floats;
    slices->first = (float *)mixpi_scratch(x, (size_t)(floats * workers) * sizeof(float));
    if (!slices->first) return MIXP_ERR_MEMORY;
    mixpi_parallel(x, tasks, work, task, job);
    return MIXP_OK;
}

static int mixpi_gemm_is_readable(const mixp_gemm_args *g) {
    if (!mixpi_writes(g->c) || !mixpi_may_read(g->bias)) return 0;
    return g->k <= 0 || (mixpi_reads(g->a) && mixpi_reads(g->b));
}

/* The rows of an array: row i begins at element first + i * ld. */
typedef struct mixpi_source { mixp_in a; int64_t first, ld; } mixpi_source;

static mixpi_source mixpi_source_of(mixp_in a, int64_t first, int64_t ld) {
    mixpi_source s = { a, first, ld };
    return s;
}

/* The properties of an instruction set that a gemm uses. lanes: multiply-adds that take the time of
 * one in plain C, the unit of work. */
typedef struct mixpi_gemm_shape {
    int64_t   tall, wide;       /* rows and columns of a tile                              */
    int64_t   lanes;
    mixp_task task;             /* a block                                                 */
} mixpi_gemm_shape;

typedef struct mixpi_gemm_job {
    const mixp_gemm_args *g;
    const mixp_gemm_indexed_args *indexed;
    int     b_indexed, c_indexed;   /* 1: by its tables                                    */
    const mixpi_gemm_shape *set;
    int64_t down, across;       /* blocks along m and n                                    */
    int64_t most_m, most_n;     /* rows and columns of the largest block                   */
    int64_t grain;              /* blocks begin at multiples of this many rows             */
    int64_t depth;              /* elements of k in one pass                               */
    int64_t bands;              /* panels of all columns of c                              */
    int64_t cols;               /* columns of the widest block                             */
    int     low;                /* c is f16, bf16 or indexed: sums wait in `part`          */
    int     pairs;              /* how a and b are packed: MIXPI_FLOATS, ...                */
    int64_t tall, panels;       /* rows of a tile; tiles whose rows are packed together    */
    mixpi_slices slices;
} mixpi_gemm_job;

/* A panel of packed op(b): columns from `first` on. It is MIXPI_NR wide, or 16 if 16 hold the last
 * columns. Row p begins at b_pack + first * steps + p * wide. For 40 columns and panels of 16:
 *
 *     b_pack | row 0: 0..15 | row 1: 0..15 | ... | row 0: 16..31 | ... | row 0: 32..39, zeros |...
 *            |<---------- first = 0 ------------>|<--- first = 16 ---->|<---- first = 32 --------
 *
 * A tile reads its panel from the beginning to the end, whatever the stride of b was. */
typedef struct mixpi_panel { int64_t first, wide; } mixpi_panel;

/* One pass over one block: c[m0 .. m1, n0 .. n1] from k in [p0, p0 + depth). */
typedef struct mixpi_gemm_block {
    const mixpi_gemm_job *job;
    int64_t a_at, b_at, c_at;   /* where the matrices of this batch element begin          */
    int64_t m0, m1, n0, n1, p0, depth;
    int64_t steps;              /* steps of a tile: depth, or its number of pairs          */
    float  *a_pack;             /* job->panels panels of op(a)                             */
    float  *b_pack;             /* op(b) in panels of set->wide columns                    */
    float  *strip;              /* widened: 16 rows of a transposed b, or one row          */
    float  *bias;               /* widened: the bias of the block's columns                */
    float  *part;               /* sums of a c that is not f32; a row has job->cols        */
    uintptr_t ask;              /* prefetch of a: the first line needed after these rows   */
    uintptr_t ask_next;         /* bytes from a row of a, or a line of a', to the next     */
    uintptr_t ask_step;         /* bytes from a step of the sum to the next, in a row      */
    int64_t   asks;             /* rows of a, or lines of a', still to prefetch            */
} mixpi_gemm_block;

/* Cuts a block's scratch memory and returns its size in floats. With `from` NULL it only
 * measures. */
static int64_t mixpi_gemm_carve(mixpi_gemm_block *s, float *from) {
    const mixpi_gemm_job *job = s->job;
    int64_t ld = job->depth + MIXPI_PAD, strip = 16 * ld > MIXPI_NB ? 16 * ld : MIXPI_NB;
    int64_t spill = 15 * job->set->wide; /* what pack_transposed writes past the last panel */
    int64_t grains = mixpi_ceil_div(mixpi_ceil_div(job->g->m, job->grain), job->down);
    int64_t rows = job->depth < job->g->k ? grains * job->grain : job->tall;
    mixpi_carver c = { from, 0 };

    /* Carve one piece after another. */
    s->a_pack = mixpi_carve(&c, job->panels * job->tall * ld);
    s->strip = mixpi_carve(&c, strip);
    s->bias = mixpi_carve(&c, job->cols);
    s->b_pack = mixpi_carve(&c, job->cols * job->depth + spill);
    s->part = mixpi_carve(&c, job->low ? job->cols * rows : 0);
    return c.used;
}

/* Sets s to the block of task `index`, before its first pass. */
static void mixpi_gemm_block_of(mixpi_gemm_block *s, const mixpi_gemm_job *job, int64_t index) {
    const mixp_gemm_args *g = job->g;
    const int64_t wide = job->set->wide, blocks = job->down * job->across;
    const int64_t rows = mixpi_ceil_div(g->m, job->grain);
    int64_t z = index, down, across;
    s->job = job;
    s->m0 = s->n0 = s->p0 = 0;
    s->m1 = g->m;
    s->n1 = g->n;

    /* Which block of which matrix. */
    if (blocks > 1) {
        z = index / blocks;
        down = index / job->across % job->down;
        across = index % job->across;
        s->m0 = rows * down / job->down * job->grain;
        s->m1 = mixpi_min(g->m, rows * (down + 1) / job->down * job->grain);
        s->n0 = job->bands * across / job->across * wide;
        s->n1 = mixpi_min(g->n, job->bands * (across + 1) / job->across * wide);
    }

    s->a_at = z * g->stride_a;
    s->b_at = z * g->stride_b;
    s->c_at = z * g->stride_c;
}

/* The number of elements packed: a once per column of blocks, b once per row of blocks. */
static double mixpi_gemm_packed(const mixp_gemm_args *g, int64_t down, int64_t across) {
    return (double)across * (double)g->m + (double)down * (double)g->n;
}

/* The cost of a cut: elements packed more than once and, above all, threads idle in the last
 * round. */
static double mixpi_gemm_cost(const mixp_gemm_args *g, int64_t down, int64_t across, int64_t idle) {
    int64_t blocks = g->batch * down * across;
    double waste = (double)(blocks + idle) / (double)blocks;
    return mixpi_gemm_packed(g, down, across) * (waste * waste * waste);
}

/* Chooses the number of blocks: as few as the largest block size allows, or more to keep threads
 * busy. The search stops where packing costs more than the best cut, because many threads make many
 * candidate cuts. */
static void mixpi_gemm_grid(mixpi_gemm_job *job, int64_t threads) {
    const mixp_gemm_args *g = job->g;
    int64_t least_m = mixpi_ceil_div(g->m, job->most_m);
    int64_t least_n = mixpi_ceil_div(g->n, job->most_n);
    double work = (double)g->m * (double)g->n * (double)g->k * (double)g->batch;
    double part = 4096.0 * (double)job->set->lanes; /* worth a thread: 1 us */
    double best = 1e300;

    /* Small work in one thread; much work in the fewest blocks. */
    job->down = least_m;
    job->across = least_n;
    if (threads > 1 && work < part * (double)threads) threads = 1 + (int64_t)(work / part);
    if (threads == 1 || g->batch * least_m * least_n >= 8 * threads) return;

    /* Otherwise use the cheapest cut. */
    int64_t most_m = mixpi_min(mixpi_ceil_div(g->m, job->tall), least_m + threads);
    int64_t most_n = mixpi_min(job->bands, least_n + threads);
    for (int64_t m = least_m; m <= most_m; m++)
        for (int64_t n = least_n; n <= most_n && mixpi_gemm_packed(g, m, n) < best; n++) {
            int64_t idle = (threads - g->batch * m * n % threads) % threads;
            double cost = mixpi_gemm_cost(g, m, n, idle);
            if (cost < best) {
                best = cost;
                job->down = m;
                job->across = n;
            }
            if (!idle) break;
        }
}

/* Cuts c into blocks for this many threads. */
static void mixpi_gemm_cut(mixpi_gemm_job *job, int64_t threads) {
    const int64_t wide = job->set->wide;
    job->bands = mixpi_ceil_div(job->g->n, wide);
    mixpi_gemm_grid(job, threads);
    job->cols = mixpi_ceil_div(job->bands, job->across) * wide;
}

/* Plans a gemm with the tiles of `set`, except the memory of its slices. */
static void mixpi_gemm_plan(mixpi_gemm_job *job, const mixp_gemm_args *g, int pairs,
    const mixpi_gemm_shape *set, int64_t threads, const mixp_gemm_indexed_args *indexed) {
    const int64_t passes = mixpi_ceil_div(g->k, MIXPI_KC);
    mixpi_gemm_block block;
    job->g = g;
    job->indexed = indexed;
    job->b_indexed = indexed && indexed->b.rows;
    job->c_indexed = indexed && indexed->c.rows;
    job->set = set;
    job->low = g->c.dtype != MIXP_F32 || job->c_indexed;
    job->pairs = pairs;
    job->tall = set->tall;
    job->panels = MIXPI_PANELS;

    /* How c is cut into blocks, and k into passes. */
    job->most_m = MIXPI_MB;
    job->most_n = MIXPI_NB;
    job->grain = 1;
    job->depth = passes ? mixpi_ceil_div(g->k, passes) : 1;
    mixpi_gemm_cut(job, threads);

    /* Rows that share elements of c are in one block, with all columns. */
    if (job->c_indexed) {
        job->grain = indexed->taps;
        job->down = g->batch % threads ? mixpi_min(mixpi_ceil_div(g->m, job->grain), threads) : 1;
        job->across = 1;
        job->cols = job->bands * set->wide;
    }
    block.job = job;
    job->slices.floats = mixpi_gemm_carve(&block, NULL);
}

/* Has a gemm work to do? If not, *r is its result. */
static int mixpi_gemm_starts(const mixp_gemm_args *g, mixp_result *r) {
    *r = MIXP_OK;
    if (g->m <= 0 || g->n <= 0 || g->batch <= 0) return 0;
    if (!mixpi_gemm_is_readable(g)) *r = MIXP_ERR_DTYPE;
    return *r == MIXP_OK;
}

/* Runs a gemm. have: the pairs that the device multiplies. indexed: NULL = b and c have rows. */
static mixp_result mixpi_cpu_gemm(const mixp_exec *x, const mixp_gemm_args *g, mixpi_pairs have,
    const mixpi_gemm_shape *set, const mixp_gemm_indexed_args *indexed) {
    const int64_t work = g->m * g->n * g->k * g->batch / set->lanes;
    const int pairs = mixpi_pairs_for(have, g->a, g->b);
    mixpi_gemm_job job;
    mixp_result r;
    if (!mixpi_gemm_starts(g, &r)) return r;
#if defined(MIXPREC_CBLAS)
    if (mixpi_gemm_cblas(g)) return MIXP_OK;
#endif
    mixpi_gemm_plan(&job, g, pairs, set, mixpi_workers(x, work), indexed);
    return mixpi_run_sliced(
        x, g->batch * job.down * job.across, work, set->task, &job, &job.slices);
}
