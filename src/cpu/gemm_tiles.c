#pragma once
#include "tiles.c"
/* --- products by tiles ------------------------------------------------------------------- *
 *
 * A task computes a block of c. It packs its part of op(b) once in a pass: at most MIXPI_TILES_B
 * bytes, which stay in L2. A panel of 32 rows of op(a) then meets all of the packed b. Rows of a
 * are read in place; a transposed or split a, the last rows of a block and a ragged end of k are
 * packed.
 *
 * k is cut into passes of equal length, rounded up to whole steps of 32. Each pass begins at 0, and
 * the sums of the passes are added in order. The cut depends only on k, so blocks and threads do
 * not change an element's bits.
 *
 * A product of few rows by a transposed b is exchanged: c' = b a'. The tiles then read b in place,
 * only the few rows are packed, and c' is transposed. The bits are the same.
 *
 * A split f16 cannot hold Inf or NaN (0 times Inf is NaN). An element whose row of op(a) or column
 * of op(b) holds one has the bits of AVX-512's product instead: tiles_again.
 */
#if MIXPI_PASS == 2 && MIXPI_AMX

#define MIXPI_TILES_KC    1024      /* largest depth of a pass                             */
#define MIXPI_TILES_KC_SPLIT 512    /* the same for split operands                         */
#define MIXPI_TILES_B     786432    /* largest packed b, in bytes                          */
#define MIXPI_TILES_MB    512       /* rows of the largest block, if k takes several passes */
#define MIXPI_TILES_SUM   1024      /* floats of the sums of one tile                      */

/* Few rows of a: up to 32, or up to 256 that are at most half of k and of n. On an Emerald Rapids
 * such products are 1.3 times as fast if exchanged with 64 rows, 1.18 with 128, 1.05 with 256. */
#define MIXPI_TILES_FEW   32
#define MIXPI_TILES_FEW_OF_MANY 256

typedef struct mixpi_tiles_job {
    mixpi_gemm_job cut;         /* how g's c is cut into blocks, and k into passes         */
    mixp_gemm_args g;           /* exchanged: what the tiles multiply                      */
    const mixp_gemm_args *of;   /* the product itself                                      */
    int     exchanged;          /* 1: g's op(a) is op(b)', its op(b) is op(a)', its c is c' */
    int     how;                /* MIXPI_TILES_BF16, ...                                   */
    int     split;              /* 1: operands are split                                   */
    int     streams;            /* 1: c is written past the caches                         */
    int64_t step;               /* numbers of 16 bits in a packed step                     */
    int64_t again;              /* split: floats that AVX-512's product of a tile needs    */
} mixpi_tiles_job;

typedef struct mixpi_tiles_block {
    const mixpi_tiles_job *job;
    mixpi_gemm_block at;        /* which block of c, and which part of k                   */
    uint16_t *a_pack;           /* a panel of op(a)                                        */
    uint16_t *a_tail;           /* the last step of a panel that is read in place          */
    uint16_t *b_pack;           /* op(b): panels of 32 columns, each with all steps        */
    float    *sums;             /* sums of one tile and one pass                           */
    float    *transposed;       /* exchanged: the sums of one tile, transposed             */
    float    *part;             /* sums of all tiles over the passes so far, if several    */
    float    *again;            /* split: memory for AVX-512's product of a tile           */
    float    *exact;            /* split: that product, in c's dtype                       */
    uint8_t  *bad_columns;      /* split: 1 = op(b)'s column holds Inf or NaN              */
    uint8_t   bad_rows[32];     /* split: 1 = op(a)'s row of this panel holds Inf or NaN   */
    unsigned  bad;              /* split: nonzero = a number packed so far is Inf or NaN   */
} mixpi_tiles_block;

/* Cuts a block's scratch memory; returns its size in floats. With `from` NULL it only measures. */
static int64_t mixpi_tiles_carve(mixpi_tiles_block *s, float *from) {
    const mixpi_tiles_job *job = s->job;
    const mixpi_gemm_job  *cut = &job->cut;
    const int64_t steps = cut->depth / 32, panels = cut->cols / 32;
    const int64_t rows = mixpi_ceil_div(mixpi_ceil_div(cut->g->m, 32), cut->down) * 32;
    const int64_t marks = job->split ? cut->cols / 4 : 0;
    mixpi_carver  c = { from, 0 };
    s->a_pack = (uint16_t *)(void *)mixpi_carve(&c, steps * job->step / 2);
    s->a_tail = (uint16_t *)(void *)mixpi_carve(&c, MIXPI_TILES_STEP / 2);
    s->b_pack = (uint16_t *)(void *)mixpi_carve(&c, panels * steps * job->step / 2);
    s->sums = mixpi_carve(&c, MIXPI_TILES_SUM);
    s->transposed = mixpi_carve(&c, job->exchanged ? MIXPI_TILES_SUM : 0);
    s->part = mixpi_carve(&c, cut->depth < cut->g->k ? rows * cut->cols : 0);
    s->again = mixpi_carve(&c, job->again);
    s->exact = mixpi_carve(&c, job->split ? MIXPI_TILES_SUM : 0);
    s->bad_columns = (uint8_t *)(void *)mixpi_carve(&c, marks);
    return c.used;
}

/* --- packing --- */

MIXPI_K void MIXPI_P(tiles_pack_b)(mixpi_tiles_block *s) {
    const mixp_gemm_args *g = s->job->cut.g;
    const int64_t n = s->at.n1 - s->at.n0, depth = s->at.depth, step = s->job->step;
    const int     split = s->job->split;
    const uint16_t *b = (const uint16_t *)g->b.data + s->at.b_at;

    /* Rows of b', 16 at a time. */
    if (g->trans_b) {
        b += s->at.n0 * g->ldb + s->at.p0;
        for (int64_t j = 0; j < n; j += 16)
            for (int64_t k = 0; k < depth; k += 32) {
                uint16_t *to = s->b_pack + (j / 32 * s->at.steps + k / 32) * step + j % 32 * 32;
                MIXPI_P(tiles_b_transposed)(to, b + j * g->ldb + k, g->ldb, n - j, depth - k);
                if (split) s->bad |= MIXPI_P(tiles_split)(to, 16);
            }
        return;
    }

    /* 32 rows of b at a time. */
    b += s->at.p0 * g->ldb + s->at.n0;
    for (int64_t k = 0; k < depth; k += 32)
        for (int64_t j = 0; j < n; j += 32) {
            uint16_t *to = s->b_pack + (j / 32 * s->at.steps + k / 32) * step;
            MIXPI_P(tiles_across)(to, b + k * g->ldb + j, g->ldb, n - j, depth - k);
            if (split) s->bad |= MIXPI_P(tiles_split)(to, 32);
        }
}

/* Points t to the panel of op(a) from row i on: packed, or in place. */
MIXPI_K void MIXPI_P(tiles_panel)(mixpi_tiles_block *s, mixpi_tiles *t, int64_t i) {
    const mixp_gemm_args *g = s->job->cut.g;
    const int64_t depth = s->at.depth, rows = mixpi_min(32, s->at.m1 - i);
    const int64_t whole = depth / 32 * 32;
    const int     split = s->job->split, lines = rows > 16 ? 32 : 16;
    const uint16_t *a = (const uint16_t *)g->a.data + s->at.a_at;
    uint16_t *to = s->a_pack;
    t->rows = rows;
    t->a_tail = NULL;
    a += g->trans_a ? s->at.p0 * g->lda + i : i * g->lda + s->at.p0;

    /* 32 whole rows are read in place, but for a ragged end. */
    if (rows == 32 && !g->trans_a && !split) {
        t->a = a;
        t->a_row = g->lda * 2;
        t->a_below = t->a_row * 16;
        t->a_step = 64;
        t->steps = whole / 32;
        if (whole == depth) return;
        MIXPI_P(tiles_along)(s->a_tail, a + whole, g->lda, 32, 32, depth - whole);
        t->a_tail = s->a_tail;
        return;
    }

    t->a = s->a_pack;
    t->a_row = 64;
    t->a_below = 1024;
    t->a_step = s->job->step * 2;
    t->steps = s->at.steps;
    for (int64_t k = 0; k < depth; k += 32, to += s->job->step) {
        if (g->trans_a) MIXPI_P(tiles_a_transposed)(to, a + k * g->lda, g->lda, rows, depth - k);
        else MIXPI_P(tiles_along)(to, a + k, g->lda, lines, rows, depth - k);
        if (split) s->bad |= MIXPI_P(tiles_split)(to, lines);
    }
}

/* --- Inf and NaN in split operands --- */

/* bad[i] = 1 if line i holds Inf or NaN, else 0. A line has k elements: a row of p (along is 1) or
 * a column. */
static void mixpi_tiles_mark(uint8_t *bad, const uint16_t *p, int64_t ld, int64_t lines, int64_t k,
                             int along) {
    const int64_t rows = along ? lines : k, columns = along ? k : lines;
    memset(bad, 0, (size_t)lines);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j++)
            if ((p[i * ld + j] & 0x7C00u) == 0x7C00u) bad[along ? i : j] = 1;
}
static void mixpi_tiles_mark_columns(mixpi_tiles_block *s) {
    const mixp_gemm_args *g = s->job->cut.g;
    const uint16_t *b = (const uint16_t *)g->b.data + s->at.b_at;
    b += g->trans_b ? s->at.n0 * g->ldb : s->at.n0;
    mixpi_tiles_mark(s->bad_columns, b, g->ldb, s->at.n1 - s->at.n0, g->k, g->trans_b);
}
static void mixpi_tiles_mark_rows(mixpi_tiles_block *s, int64_t i, int64_t rows) {
    const mixp_gemm_args *g = s->job->cut.g;
    const uint16_t *a = (const uint16_t *)g->a.data + s->at.a_at;
    a += g->trans_a ? i : i * g->lda;
    mixpi_tiles_mark(s->bad_rows, a, g->lda, rows, g->k, !g->trans_a);
}

/* Does a row of the panel, or a column of the tile at column j, hold Inf or NaN? */
static int mixpi_tiles_are_bad(const mixpi_tiles_block *s, const mixpi_tiles *t, int64_t j) {
    if (memchr(s->bad_rows, 1, (size_t)t->rows)) return 1;
    return memchr(s->bad_columns + j, 1, (size_t)t->columns) != NULL;
}

/* Where a tile is in c. */
typedef struct mixpi_tiles_place { int64_t row, column, rows, columns; } mixpi_tiles_place;

/* The place of t, which begins at row i and at column j of the block. */
static mixpi_tiles_place mixpi_tiles_place_of(const mixpi_tiles_block *s, const mixpi_tiles *t,
                                              int64_t i, int64_t j) {
    mixpi_tiles_place p = { i, s->at.n0 + j, t->rows, t->columns };
    if (s->job->exchanged) {
        p.row = s->at.n0 + j;
        p.column = i;
        p.rows = t->columns;
        p.columns = t->rows;
    }
    return p;
}

/* Computes the elements of a place as AVX-512 does: to s->exact, in rows of 32. c is only read. */
MIXPI_K void MIXPI_P(tiles_again)(const mixpi_tiles_block *s, mixpi_tiles_place at) {
    mixp_gemm_args g = *s->job->of;
    const int64_t size = MIXPI_P(size)(g.c.dtype);
    const char   *c = (const char *)g.c.data + (s->at.c_at + at.row * g.ldc + at.column) * size;
    const int64_t a_at = s->job->exchanged ? s->at.b_at : s->at.a_at;
    const int64_t b_at = s->job->exchanged ? s->at.a_at : s->at.b_at;
    mixpi_gemm_job one;
    g.m = at.rows;
    g.n = at.columns;
    g.batch = 1;
    g.a = mixpi_in_at(g.a, a_at + at.row * (g.trans_a ? 1 : g.lda));
    g.b = mixpi_in_at(g.b, b_at + at.column * (g.trans_b ? g.ldb : 1));
    if (g.bias.data) g.bias = mixpi_in_at(g.bias, at.column);

    /* The old c, if c accumulates. */
    for (int64_t r = 0; g.c.accumulate && r < g.m; r++)
        memcpy((char *)s->exact + r * 32 * size, c + r * g.ldc * size, (size_t)(g.n * size));
    g.c.data = s->exact;
    g.ldc = 32;

    mixpi_gemm_plan(&one, &g, MIXPI_FLOATS, &MIXPI_P(gemm_shape), 1, NULL);
    one.slices.first = s->again;
    MIXPI_P(gemm_task)(&one, 0, 0);
}

/* Replaces the elements of bad rows and bad columns by those of s->exact. j: the block's column at
 * which the tile begins. */
MIXPI_K void MIXPI_P(tiles_replace)(const mixpi_tiles_block *s, mixpi_tiles_place at, int64_t j) {
    const mixp_gemm_args *g = s->job->of;
    const int64_t  size = MIXPI_P(size)(g->c.dtype);
    const uint8_t *rows = s->job->exchanged ? s->bad_columns + j : s->bad_rows;
    const uint8_t *columns = s->job->exchanged ? s->bad_rows : s->bad_columns + j;
    char *c = (char *)g->c.data + (s->at.c_at + at.row * g->ldc + at.column) * size;
    for (int64_t r = 0; r < at.rows; r++)
        for (int64_t q = 0; q < at.columns; q++) {
            if (!rows[r] && !columns[q]) continue;
            memcpy(c + (r * g->ldc + q) * size, (const char *)s->exact + (r * 32 + q) * size,
                   (size_t)size);
        }
}

/* --- a block --- */

/* The bias of n <= 32 columns from `column` on, and 0 beyond. */
MIXPI_V void MIXPI_P(tiles_bias)(mixp_in bias, int64_t column, int64_t n, mixpi_v *x, mixpi_v *y) {
    *x = *y = mixpi_vzero();
    if (!bias.data) return;
    bias = mixpi_in_at(bias, column);
    if (bias.dtype == MIXP_F32) MIXPI_P(tiles_get)(MIXP_F32, bias.data, x, y, n);
    else if (bias.dtype == MIXP_F16) MIXPI_P(tiles_get)(MIXP_F16, bias.data, x, y, n);
    else MIXPI_P(tiles_get)(MIXP_BF16, bias.data, x, y, n);
}

/* Writes finished sums, in rows of 32: c = alpha * sums + bias (+ c), rounded once to c's dtype
 * `to`. Sums of columns from 16 on exist only if there are such columns: other memory could hold
 * subnormals, which are slow. */
MIXPI_V void MIXPI_P(tiles_write_to)(mixp_dtype to, const mixpi_tiles_block *s,
                                     mixpi_tiles_place at, const float *sums) {
    const mixp_gemm_args *g = s->job->of;
    const mixpi_v alpha = mixpi_vset(mixpi_gemm_alpha(g));
    const int64_t size = MIXPI_P(size)(to), row = g->ldc * size;
    const int accumulate = g->c.accumulate, wide = at.columns > 16;
    char   *c = (char *)g->c.data + (s->at.c_at + at.row * g->ldc + at.column) * size;
    mixpi_v b0, b1;
    MIXPI_P(tiles_bias)(g->bias, at.column, at.columns, &b0, &b1);
    for (int64_t r = 0; r < at.rows; r++, sums += 32, c += row) {
        mixpi_v x = mixpi_vfma(alpha, mixpi_vload(sums), b0);
        mixpi_v y = wide ? mixpi_vfma(alpha, mixpi_vload(sums + 16), b1) : b1;
        if (accumulate) {
            mixpi_v p, q;
            MIXPI_P(tiles_get)(to, c, &p, &q, at.columns);
            x = mixpi_vadd(x, p);
            y = mixpi_vadd(y, q);
        }
        if (to == MIXP_F32 && s->job->streams && at.columns == 32) {
            mixpi_vput_f32(c, x, 1);
            mixpi_vput_f32(c + 64, y, 1);
        } else {
            MIXPI_P(tiles_put)(to, c, x, y, at.columns);
        }
    }
}
MIXPI_K void MIXPI_P(tiles_write)(const mixpi_tiles_block *s, mixpi_tiles_place at,
                                  const float *sums) {
    const mixp_dtype to = s->job->of->c.dtype;
    if (to == MIXP_F32) MIXPI_P(tiles_write_to)(MIXP_F32, s, at, sums);
    else if (to == MIXP_F16) MIXPI_P(tiles_write_to)(MIXP_F16, s, at, sums);
    else MIXPI_P(tiles_write_to)(MIXP_BF16, s, at, sums);
}

/* The last pass: finishes the sums of t, which begins at row i and at column j of the block. */
MIXPI_K void MIXPI_P(tiles_finish)(const mixpi_tiles_block *s, const mixpi_tiles *t, int64_t i,
                                   int64_t j, const float *sums) {
    const int again = s->bad && mixpi_tiles_are_bad(s, t, j);
    const mixpi_tiles_place at = mixpi_tiles_place_of(s, t, i, j);
    for (int64_t r = 0; s->job->exchanged && r < t->rows; r += 16)
        for (int64_t q = 0; q < t->columns; q += 16)
            MIXPI_P(transpose16)(s->transposed + q * 32 + r, 32, sums + r * 32 + q, 32);

    if (again) MIXPI_P(tiles_again)(s, at);
    MIXPI_P(tiles_write)(s, at, s->job->exchanged ? s->transposed : sums);
    if (again) MIXPI_P(tiles_replace)(s, at, j);
}

/* Adds a pass's sums of a tile to those of the passes before. */
MIXPI_V void MIXPI_P(tiles_join)(float *kept, const float *sums) {
    for (int i = 0; i < MIXPI_TILES_SUM; i += 16)
        mixpi_vstore(kept + i, mixpi_vadd(mixpi_vload(kept + i), mixpi_vload(sums + i)));
}

/* The steps of a tile in panel j of `panels` prefetch their share of op(a)'s panel from row i. */
MIXPI_V void MIXPI_P(tiles_ask)(const mixpi_tiles_block *s, mixpi_tiles *t, int64_t i, int64_t j,
                                int64_t panels) {
    const mixp_gemm_args *g = s->job->cut.g;
    const int64_t line = 32 * j / panels;
    int64_t at = s->at.a_at + (i + line) * g->lda + s->at.p0;
    t->ask_step = 64;
    if (g->trans_a) {
        at = s->at.a_at + (s->at.p0 + line) * g->lda + i;
        t->ask_step = (uintptr_t)(64 * g->lda);
    }
    t->ask = (uintptr_t)g->a.data + (uintptr_t)(2 * at);
    t->ask_row = (uintptr_t)(2 * g->lda);
    t->asks = i + 32 <= s->at.m1 ? 32 * (j + 1) / panels - line : 0;
}

/* Runs a pass: packs b, then multiplies panel after panel of op(a) by all of it. */
MIXPI_K void MIXPI_P(tiles_pass)(mixpi_tiles_block *s) {
    const mixpi_gemm_job *cut = &s->job->cut;
    const int64_t n = s->at.n1 - s->at.n0, panels = mixpi_ceil_div(n, 32);
    const int first = s->at.p0 == 0, last = s->at.p0 + s->at.depth == cut->g->k;
    mixpi_tiles t;
    memset(&t, 0, sizeof t);
    t.how = s->job->how;
    t.c_row = 32;
    MIXPI_P(tiles_pack_b)(s);

    /* Which columns are bad? None, if nothing packed so far is: all of op(b) is packed by now. */
    if (last && s->bad) mixpi_tiles_mark_columns(s);
    else if (last && s->job->split) memset(s->bad_columns, 0, (size_t)n);

    for (int64_t i = s->at.m0; i < s->at.m1; i += 32) {
        MIXPI_P(tiles_panel)(s, &t, i);
        if (last && s->bad) mixpi_tiles_mark_rows(s, i, t.rows);
        for (int64_t j = 0; j < n; j += 32) {
            const int64_t tile = (i - s->at.m0) / 32 * panels + j / 32;
            float *kept = first && last ? s->sums : s->part + tile * MIXPI_TILES_SUM;
            t.b = s->b_pack + j / 32 * s->at.steps * s->job->step;
            t.columns = mixpi_min(32, n - j);
            t.c = first ? kept : s->sums;
            MIXPI_P(tiles_ask)(s, &t, i + 32, j / 32, panels);
            MIXPI_P(tiles_sum)(&t);
            if (!first) MIXPI_P(tiles_join)(kept, s->sums);
            if (last) MIXPI_P(tiles_finish)(s, &t, i, j, kept);
        }
    }
}

MIXPI_K void MIXPI_P(tiles_task)(void *arg, int64_t index, int worker) {
    const mixpi_tiles_job *job = (const mixpi_tiles_job *)arg;
    const mixp_gemm_args  *g = job->cut.g;
    mixpi_tiles_block s;
    s.job = job;
    s.bad = 0;
    mixpi_gemm_block_of(&s.at, &job->cut, index);
    (void)mixpi_tiles_carve(&s, mixpi_slice(&job->cut.slices, worker));

    MIXPI_AMX_CONFIGURE(&mixpi_amx_tiles);
    for (; s.at.p0 == 0 || s.at.p0 < g->k; s.at.p0 += job->cut.depth) {
        s.at.depth = mixpi_min(job->cut.depth, g->k - s.at.p0);
        s.at.steps = mixpi_ceil_div(s.at.depth, 32);
        MIXPI_P(tiles_pass)(&s);
    }
    MIXPI_AMX_RELEASE();
    if (job->streams) mixpi_vfence();
}

/* --- the kernel --- */

/* On an Emerald Rapids products of bf16 by tiles took a fifth of AVX-512's time (600 to 830 and 120
 * to 149 GFLOP/s), and products of split f16 half of it. */
static const mixpi_gemm_shape MIXPI_P(tiles_shape) =
    { 32, 32, 5 * MIXPI_SUM_LANES, MIXPI_P(tiles_task) };
static const mixpi_gemm_shape MIXPI_P(tiles_shape_split) =
    { 32, 32, 2 * MIXPI_SUM_LANES, MIXPI_P(tiles_task) };

/* The product of g with its operands exchanged: c' = op(b)' op(a)'. */
static mixp_gemm_args mixpi_tiles_exchanged(const mixp_gemm_args *g) {
    mixp_gemm_args e = *g;
    e.m = g->n;
    e.n = g->m;
    e.a = g->b;
    e.b = g->a;
    e.trans_a = !g->trans_b;
    e.trans_b = !g->trans_a;
    e.lda = g->ldb;
    e.ldb = g->lda;
    e.stride_a = g->stride_b;
    e.stride_b = g->stride_a;
    return e;
}

/* Has g few rows of a and a transposed b? Then transposing c' is less work than packing b. */
static int mixpi_tiles_exchanges(const mixp_gemm_args *g) {
    if (!g->trans_b) return 0;
    if (g->m <= MIXPI_TILES_FEW) return 1;
    return g->m <= MIXPI_TILES_FEW_OF_MANY && 2 * g->m <= g->k && 2 * g->m <= g->n;
}

/* Is c better written past the caches? A large a' b is the gradient of a weight: its readers come
 * after the backward pass, and a store past the caches does not read c's old lines from memory. On
 * an Emerald Rapids such products are 1.4 to 1.9 times as fast. */
static int mixpi_tiles_streams(const mixp_gemm_args *g) {
    const size_t bytes = (size_t)(g->m * g->n * g->batch) * sizeof(float);
    return g->trans_a && g->c.dtype == MIXP_F32 && !g->c.accumulate && bytes > MIXPI_STREAM_BYTES &&
           (uintptr_t)g->c.data % 64 == 0 && g->ldc % 16 == 0 && g->stride_c % 16 == 0;
}

/* Cuts c into blocks and k into passes. set: the shape for `how`. */
MIXPI_K void MIXPI_P(tiles_plan)(mixpi_tiles_job *job, const mixp_gemm_args *of, int how,
                                 const mixpi_gemm_shape *set, int64_t threads) {
    mixpi_gemm_job *cut = &job->cut;
    const mixp_gemm_args *g = of;
    const int     split = how == MIXPI_TILES_SPLIT;
    const int64_t most = split ? MIXPI_TILES_KC_SPLIT : MIXPI_TILES_KC;
    const int64_t passes = mixpi_ceil_div(of->k, most);
    mixpi_tiles_block block;
    job->of = of;
    job->exchanged = mixpi_tiles_exchanges(of);
    if (job->exchanged) {
        job->g = mixpi_tiles_exchanged(of);
        g = &job->g;
    }
    job->how = split && job->exchanged ? MIXPI_TILES_SPLIT_BACK : how;
    job->split = split;
    job->streams = mixpi_tiles_streams(of);
    job->step = split ? 2 * MIXPI_TILES_STEP : MIXPI_TILES_STEP;
    job->again = 0;
    cut->g = g;
    cut->set = set;
    cut->tall = cut->grain = 32;
    cut->depth = mixpi_ceil_div(mixpi_ceil_div(g->k, passes), 32) * 32;
    cut->most_m = passes > 1 ? MIXPI_TILES_MB : g->m;
    cut->most_n = MIXPI_TILES_B / (cut->depth / 32 * job->step * 2) * 32;
    mixpi_gemm_cut(cut, threads);

    /* Memory for a tile's product by AVX-512. */
    if (split) {
        mixp_gemm_args tile;    /* only what a plan reads */
        mixpi_gemm_job one;
        tile.m = mixpi_min(32, of->m);
        tile.n = mixpi_min(32, of->n);
        tile.k = of->k;
        tile.batch = 1;
        tile.c = of->c;
        mixpi_gemm_plan(&one, &tile, MIXPI_FLOATS, &MIXPI_P(gemm_shape), 1, NULL);
        job->again = one.slices.floats;
    }
    block.job = job;
    cut->slices.floats = mixpi_tiles_carve(&block, NULL);
}

/* f16: how the set multiplies f16 by f16. */
MIXPI_K mixp_result MIXPI_P(gemm_by_tiles)(const mixp_exec *x, const mixp_gemm_args *g, int f16) {
    const int low = g->a.dtype == MIXP_BF16 || g->a.dtype == MIXP_F16;
    const int how = g->a.dtype == MIXP_BF16 ? MIXPI_TILES_BF16 : f16;
    const mixpi_gemm_shape *set = &MIXPI_P(tiles_shape);
    mixp_result r;
    mixpi_tiles_job job;
    if (!low || g->a.dtype != g->b.dtype || g->k <= 0) return MIXPI_P(gemm)(x, g);
    if (!mixpi_gemm_starts(g, &r)) return r;
    if (how == MIXPI_TILES_SPLIT) set = &MIXPI_P(tiles_shape_split);

    /* A tile of one row takes as long as a tile of 16. */
    int64_t work = (g->m < 16 ? 16 : g->m) * g->n * g->k * g->batch / set->lanes;
    MIXPI_P(tiles_plan)(&job, g, how, set, mixpi_workers(x, work));
    return mixpi_run_sliced(x, g->batch * job.cut.down * job.cut.across, work,
                            MIXPI_P(tiles_task), &job, &job.cut.slices);
}
MIXPI_K mixp_result MIXPI_P(gemm_amx)(const mixp_exec *x, const mixp_gemm_args *g)
{ return MIXPI_P(gemm_by_tiles)(x, g, MIXPI_TILES_SPLIT); }
MIXPI_K mixp_result MIXPI_P(gemm_amx_f16)(const mixp_exec *x, const mixp_gemm_args *g)
{ return MIXPI_P(gemm_by_tiles)(x, g, MIXPI_TILES_F16); }
#endif
