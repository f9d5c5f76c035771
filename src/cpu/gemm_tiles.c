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
 * A split f16 cannot hold Inf or NaN (0 times Inf is NaN). An element whose row of op(a) or column
 * of op(b) holds one has the bits of AVX-512's product instead: tiles_again.
 */
#if MIXPI_PASS == 2 && MIXPI_AMX

#define MIXPI_TILES_KC    1024      /* largest depth of a pass                             */
#define MIXPI_TILES_KC_SPLIT 512    /* the same for split operands                         */
#define MIXPI_TILES_B     786432    /* largest packed b, in bytes                          */
#define MIXPI_TILES_MB    512       /* rows of the largest block, if k takes several passes */
#define MIXPI_TILES_SUM   1024      /* floats of the sums of one tile                      */

typedef struct mixpi_tiles_job {
    mixpi_gemm_job cut;         /* how c is cut into blocks, and k into passes             */
    int     how;                /* MIXPI_TILES_BF16, ...                                   */
    int64_t step;               /* numbers of 16 bits in a packed step                     */
    int64_t again;              /* split: floats that AVX-512's product of a tile needs    */
} mixpi_tiles_job;

typedef struct mixpi_tiles_block {
    const mixpi_tiles_job *job;
    mixpi_gemm_block at;        /* which block of c, and which part of k                   */
    uint16_t *a_pack;           /* a panel of op(a)                                        */
    uint16_t *a_tail;           /* the last step of a panel that is read in place          */
    uint16_t *b_pack;           /* op(b): panels of 32 columns, each with all steps        */
    float    *bias;             /* of the block's columns; 0 = no bias, or no column       */
    float    *sums;             /* of one tile and one pass                                */
    float    *part;             /* of all tiles and passes, if there are several passes    */
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
    const int     split = job->how == MIXPI_TILES_SPLIT;
    mixpi_carver  c = { from, 0 };
    s->a_pack = (uint16_t *)(void *)mixpi_carve(&c, steps * job->step / 2);
    s->a_tail = (uint16_t *)(void *)mixpi_carve(&c, MIXPI_TILES_STEP / 2);
    s->b_pack = (uint16_t *)(void *)mixpi_carve(&c, panels * steps * job->step / 2);
    s->bias = mixpi_carve(&c, cut->cols);
    s->sums = mixpi_carve(&c, MIXPI_TILES_SUM);
    s->part = mixpi_carve(&c, cut->depth < cut->g->k ? rows * cut->cols : 0);
    s->again = mixpi_carve(&c, job->again);
    s->exact = mixpi_carve(&c, split ? MIXPI_TILES_SUM : 0);
    s->bad_columns = (uint8_t *)(void *)mixpi_carve(&c, split ? cut->cols / 4 : 0);
    return c.used;
}

/* --- packing --- */

MIXPI_K void MIXPI_P(tiles_pack_b)(mixpi_tiles_block *s) {
    const mixp_gemm_args *g = s->job->cut.g;
    const int64_t n = s->at.n1 - s->at.n0, depth = s->at.depth, step = s->job->step;
    const int     split = s->job->how == MIXPI_TILES_SPLIT;
    const uint16_t *b = (const uint16_t *)g->b.data + s->at.b_at;
    int64_t j, k;

    /* Rows of b', 16 at a time. */
    if (g->trans_b) {
        b += s->at.n0 * g->ldb + s->at.p0;
        for (j = 0; j < n; j += 16)
            for (k = 0; k < depth; k += 32) {
                uint16_t *to = s->b_pack + (j / 32 * s->at.steps + k / 32) * step + j % 32 * 32;
                MIXPI_P(tiles_b_turned)(to, b + j * g->ldb + k, g->ldb, n - j, depth - k);
                if (split) s->bad |= MIXPI_P(tiles_split)(to, 16);
            }
        return;
    }

    /* 32 rows of b at a time. */
    b += s->at.p0 * g->ldb + s->at.n0;
    for (k = 0; k < depth; k += 32)
        for (j = 0; j < n; j += 32) {
            uint16_t *to = s->b_pack + (j / 32 * s->at.steps + k / 32) * step;
            MIXPI_P(tiles_across)(to, b + k * g->ldb + j, g->ldb, n - j, depth - k);
            if (split) s->bad |= MIXPI_P(tiles_split)(to, 32);
        }
}

/* Tells t where the panel of op(a) from row i on is: packed, or in place. */
MIXPI_K void MIXPI_P(tiles_panel)(mixpi_tiles_block *s, mixpi_tiles *t, int64_t i) {
    const mixp_gemm_args *g = s->job->cut.g;
    const int64_t depth = s->at.depth, rows = mixpi_min(32, s->at.m1 - i);
    const int64_t whole = depth / 32 * 32;
    const int     split = s->job->how == MIXPI_TILES_SPLIT, lines = rows > 16 ? 32 : 16;
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
        if (g->trans_a) MIXPI_P(tiles_a_turned)(to, a + k * g->lda, g->lda, rows, depth - k);
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

/* Computes a tile of c, from row i and from column j of the block on, as AVX-512 does: to s->exact,
 * in rows of 32. c itself is only read. */
MIXPI_K void MIXPI_P(tiles_again)(const mixpi_tiles_block *s, const mixpi_tiles *t, int64_t i,
                                  int64_t j) {
    mixp_gemm_args g = *s->job->cut.g;
    const int64_t column = s->at.n0 + j, size = MIXPI_P(size)(g.c.dtype);
    const char   *c = (const char *)g.c.data + (s->at.c_at + i * g.ldc + column) * size;
    mixpi_gemm_job one;
    g.m = t->rows;
    g.n = t->columns;
    g.batch = 1;
    g.a = mixpi_in_at(g.a, s->at.a_at + (g.trans_a ? i : i * g.lda));
    g.b = mixpi_in_at(g.b, s->at.b_at + (g.trans_b ? column * g.ldb : column));
    if (g.bias.data) g.bias = mixpi_in_at(g.bias, column);

    /* The old c, if c accumulates. */
    for (int64_t r = 0; g.c.accumulate && r < g.m; r++)
        memcpy((char *)s->exact + r * 32 * size, c + r * g.ldc * size, (size_t)(g.n * size));
    g.c.data = s->exact;
    g.ldc = 32;

    mixpi_gemm_plan(&one, &g, MIXPI_FLOATS, &MIXPI_P(gemm_shape), 1);
    one.slices.first = s->again;
    MIXPI_P(gemm_task)(&one, 0, 0);
}

/* Replaces the elements of bad rows and bad columns by those of s->exact. */
MIXPI_K void MIXPI_P(tiles_replace)(const mixpi_tiles_block *s, const mixpi_tiles *t, int64_t i,
                                    int64_t j) {
    const mixp_gemm_args *g = s->job->cut.g;
    const int64_t size = MIXPI_P(size)(g->c.dtype);
    char *c = (char *)g->c.data + (s->at.c_at + i * g->ldc + s->at.n0 + j) * size;
    for (int64_t r = 0; r < t->rows; r++)
        for (int64_t q = 0; q < t->columns; q++) {
            if (!s->bad_rows[r] && !s->bad_columns[j + q]) continue;
            memcpy(c + (r * g->ldc + q) * size, (const char *)s->exact + (r * 32 + q) * size,
                   (size_t)size);
        }
}

/* --- a block --- */

/* Writes finished sums of a tile, from row i and from column j of the block on:
 * c = alpha * sums + bias (+ c), rounded once to c's dtype `to`. */
MIXPI_V void MIXPI_P(tiles_write_to)(mixp_dtype to, const mixpi_tiles_block *s,
                                     const mixpi_tiles *t, int64_t i, int64_t j,
                                     const float *sums) {
    const mixp_gemm_args *g = s->job->cut.g;
    const mixpi_v alpha = mixpi_vset(mixpi_gemm_alpha(g));
    const mixpi_v b0 = mixpi_vload(s->bias + j), b1 = mixpi_vload(s->bias + j + 16);
    const int64_t size = MIXPI_P(size)(to);
    char *c = (char *)g->c.data + (s->at.c_at + i * g->ldc + s->at.n0 + j) * size;
    for (int64_t r = 0; r < t->rows; r++, sums += 32, c += g->ldc * size) {
        mixpi_v x = mixpi_vfma(alpha, mixpi_vload(sums), b0);
        mixpi_v y = mixpi_vfma(alpha, mixpi_vload(sums + 16), b1);
        if (g->c.accumulate) {
            mixpi_v p, q;
            MIXPI_P(tiles_get)(to, c, &p, &q, t->columns);
            x = mixpi_vadd(x, p);
            y = mixpi_vadd(y, q);
        }
        MIXPI_P(tiles_put)(to, c, x, y, t->columns);
    }
}
MIXPI_K void MIXPI_P(tiles_write)(const mixpi_tiles_block *s, const mixpi_tiles *t, int64_t i,
                                  int64_t j, const float *sums) {
    const mixp_dtype to = s->job->cut.g->c.dtype;
    if (to == MIXP_F32) MIXPI_P(tiles_write_to)(MIXP_F32, s, t, i, j, sums);
    else if (to == MIXP_F16) MIXPI_P(tiles_write_to)(MIXP_F16, s, t, i, j, sums);
    else MIXPI_P(tiles_write_to)(MIXP_BF16, s, t, i, j, sums);
}

/* The last pass: a tile's sums are finished. */
MIXPI_K void MIXPI_P(tiles_finish)(const mixpi_tiles_block *s, const mixpi_tiles *t, int64_t i,
                                   int64_t j, const float *sums) {
    const int again = s->bad && mixpi_tiles_are_bad(s, t, j);
    if (again) MIXPI_P(tiles_again)(s, t, i, j);
    MIXPI_P(tiles_write)(s, t, i, j, sums);
    if (again) MIXPI_P(tiles_replace)(s, t, i, j);
}

/* Adds a pass's sums of a tile to those of the passes before. */
MIXPI_V void MIXPI_P(tiles_join)(float *kept, const float *sums) {
    for (int i = 0; i < MIXPI_TILES_SUM; i += 16)
        mixpi_vstore(kept + i, mixpi_vadd(mixpi_vload(kept + i), mixpi_vload(sums + i)));
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
    else if (last && t.how == MIXPI_TILES_SPLIT) memset(s->bad_columns, 0, (size_t)n);

    for (int64_t i = s->at.m0; i < s->at.m1; i += 32) {
        MIXPI_P(tiles_panel)(s, &t, i);
        if (last && s->bad) mixpi_tiles_mark_rows(s, i, t.rows);
        for (int64_t j = 0; j < n; j += 32) {
            const int64_t tile = (i - s->at.m0) / 32 * panels + j / 32;
            float *kept = first && last ? s->sums : s->part + tile * MIXPI_TILES_SUM;
            t.b = s->b_pack + j / 32 * s->at.steps * s->job->step;
            t.columns = mixpi_min(32, n - j);
            t.c = first ? kept : s->sums;
            MIXPI_P(tiles_sum)(&t);
            if (!first) MIXPI_P(tiles_join)(kept, s->sums);
            if (last) MIXPI_P(tiles_finish)(s, &t, i, j, kept);
        }
    }
}

/* Widens the bias of the block's columns. */
MIXPI_K void MIXPI_P(tiles_bias)(const mixpi_tiles_block *s) {
    const mixpi_source from = mixpi_source_of(s->job->cut.g->bias, s->at.n0, 0);
    MIXPI_P(widen_rows)(s->bias, 0, from, 1, (int)(s->at.n1 - s->at.n0));
}

MIXPI_K void MIXPI_P(tiles_task)(void *arg, int64_t index, int worker) {
    const mixpi_tiles_job *job = (const mixpi_tiles_job *)arg;
    const mixp_gemm_args  *g = job->cut.g;
    mixpi_tiles_block s;
    memset(&s, 0, sizeof s);
    s.job = job;
    mixpi_gemm_block_of(&s.at, &job->cut, index);
    (void)mixpi_tiles_carve(&s, mixpi_slice(&job->cut.slices, worker));
    memset(s.bias, 0, (size_t)job->cut.cols * sizeof(float));
    if (g->bias.data) MIXPI_P(tiles_bias)(&s);

    MIXPI_AMX_CONFIGURE(&mixpi_amx_tiles);
    for (; s.at.p0 == 0 || s.at.p0 < g->k; s.at.p0 += job->cut.depth) {
        s.at.depth = mixpi_min(job->cut.depth, g->k - s.at.p0);
        s.at.steps = mixpi_ceil_div(s.at.depth, 32);
        MIXPI_P(tiles_pass)(&s);
    }
    MIXPI_AMX_RELEASE();
}

/* --- the kernel --- */

static const mixpi_gemm_shape MIXPI_P(tiles_shape) =
    { 32, 32, MIXPI_SUM_LANES, MIXPI_P(tiles_task) };

/* Cuts c into blocks and k into passes. */
MIXPI_K void MIXPI_P(tiles_plan)(mixpi_tiles_job *job, const mixp_gemm_args *g, int how,
                                 int64_t threads) {
    mixpi_gemm_job *cut = &job->cut;
    const int     split = how == MIXPI_TILES_SPLIT;
    const int64_t most = split ? MIXPI_TILES_KC_SPLIT : MIXPI_TILES_KC;
    const int64_t passes = mixpi_ceil_div(g->k, most);
    mixpi_tiles_block block;
    memset(job, 0, sizeof *job);
    job->how = how;
    job->step = split ? 2 * MIXPI_TILES_STEP : MIXPI_TILES_STEP;
    cut->g = g;
    cut->set = &MIXPI_P(tiles_shape);
    cut->tall = cut->grain = 32;
    cut->depth = mixpi_ceil_div(mixpi_ceil_div(g->k, passes), 32) * 32;
    cut->most_m = passes > 1 ? MIXPI_TILES_MB : g->m;
    cut->most_n = MIXPI_TILES_B / (cut->depth / 32 * job->step * 2) * 32;
    mixpi_gemm_cut(cut, threads);

    /* Memory for a tile's product by AVX-512. */
    if (split) {
        mixp_gemm_args tile = *g;
        mixpi_gemm_job one;
        tile.m = mixpi_min(32, g->m);
        tile.n = mixpi_min(32, g->n);
        tile.batch = 1;
        mixpi_gemm_plan(&one, &tile, MIXPI_FLOATS, &MIXPI_P(gemm_shape), 1);
        job->again = one.slices.floats;
    }
    block.job = job;
    cut->slices.floats = mixpi_tiles_carve(&block, NULL);
}

/* f16: how the set multiplies f16 by f16. */
MIXPI_K mixp_result MIXPI_P(gemm_by_tiles)(const mixp_exec *x, const mixp_gemm_args *g, int f16) {
    const int64_t work = g->m * g->n * g->k * g->batch / MIXPI_SUM_LANES;
    const int     low = g->a.dtype == MIXP_BF16 || g->a.dtype == MIXP_F16;
    mixp_result   r;
    mixpi_tiles_job job;
    if (!low || g->a.dtype != g->b.dtype || g->k <= 0) return MIXPI_P(gemm)(x, g);
    if (!mixpi_gemm_starts(g, &r)) return r;
    MIXPI_P(tiles_plan)(&job, g, g->a.dtype == MIXP_BF16 ? MIXPI_TILES_BF16 : f16,
                        mixpi_workers(x, work));
    return mixpi_run_sliced(x, g->batch * job.cut.down * job.cut.across, work,
                            MIXPI_P(tiles_task), &job, &job.cut.slices);
}
MIXPI_K mixp_result MIXPI_P(gemm_amx)(const mixp_exec *x, const mixp_gemm_args *g)
{ return MIXPI_P(gemm_by_tiles)(x, g, MIXPI_TILES_SPLIT); }
MIXPI_K mixp_result MIXPI_P(gemm_amx_f16)(const mixp_exec *x, const mixp_gemm_args *g)
{ return MIXPI_P(gemm_by_tiles)(x, g, MIXPI_TILES_F16); }
#endif
