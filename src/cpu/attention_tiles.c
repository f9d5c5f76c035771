#pragma once
#include "attention.c"
#include "tiles.c"
/* --- attention by Intel's tiles (AMX) ------------------------------------------------------- *
 *
 * The blocks, masks and random numbers are attention.c's. Tiles compute the products of a block of
 * 32 queries and a block of 64 keys. q, k, v and dy are bf16, or f16 whose numbers are split into
 * two bf16 numbers, which is exact. A weight or its gradient is split into its upper 8 bits and a
 * rounded rest of 8 bits, so that 16 bits are kept. Products of two parts begin with the smaller
 * parts.
 *
 * A product by tiles would turn the Inf of v into NaN where a part of its weight is 0. So tiles
 * read 0 for a number that is not finite. In the forward pass such a number's scores, or its
 * products with weights, are then computed in f32. They reach the queries that see its key, and no
 * other query's bits change. In the backward pass a block of queries and a block of keys that meet
 * such a number are computed by attention.c.
 */
#if MIXPI_PASS == 2 && MIXPI_AMX

/* How tiles multiply scores, and weights by other numbers. */
MIXPI_V int MIXPI_P(tiled_scores_by)(const mixpi_heads *h) {
    if (h->parts == 1) return MIXPI_TILES_BF16;
    return h->score_parts == 1 ? MIXPI_TILES_F16 : MIXPI_TILES_SPLIT;
}

/* --- panels --- */

/* Copies up to 32 rows of a head from `row` on to a panel and puts 0 for numbers that are not
 * finite, beyond d and beyond the rows. Returns nonzero if a number is not finite. */
MIXPI_K unsigned MIXPI_P(tiled_rows)(const mixpi_heads *h, mixp_in a, mixpi_head at, int64_t row,
                                     int64_t rows, int parts, uint16_t *to) {
    const uint16_t *from = (const uint16_t *)a.data + at.first + row * at.ld;
    const __m512i exponent = _mm512_set1_epi16(a.dtype == MIXP_F16 ? 0x7C00 : 0x7F80);
    const int64_t ahead = at.ld * 2;
    __mmask32 bad = 0;
    for (int64_t j = 0; j < h->d; j += 32, to += parts * 1024) {
        const __mmask32 there = MIXPI_P(tiles_lanes)(h->d - j);
        for (int i = 0; i < 32; i++) {
            __m512i x = _mm512_setzero_si512();
            if (i < rows) x = _mm512_maskz_loadu_epi16(there, from + i * at.ld + j);
            MIXPI_PREFETCH((const char *)((uintptr_t)(from + j) + (uintptr_t)((i + 32) * ahead)));
            __mmask32 hit = _mm512_cmpeq_epi16_mask(_mm512_and_si512(x, exponent), exponent);
            bad |= hit;
            _mm512_storeu_si512(to + 32 * i, _mm512_maskz_mov_epi16((__mmask32)~hit, x));
        }
        if (parts == 2) (void)MIXPI_P(tiles_split)(to, 32);
    }
    return bad;
}

/* Transposes each tile of a panel: rows that are summed along d become columns. */
MIXPI_K void MIXPI_P(tiled_columns)(const mixpi_heads *h, int parts, const uint16_t *panel,
                                    uint16_t *to) {
    const int64_t codes = mixpi_panel_codes(h, parts);
    for (int64_t i = 0; i < codes; i += 512) MIXPI_P(tiles_transpose)(to + i, panel + i, 32);
}

/* Makes operands on the left, to be summed over keys, from a panel of keys or values: 32 rows of d
 * after 32, each with both halves of a block. half: which 32 keys. */
MIXPI_K void MIXPI_P(tiled_over_keys)(const mixpi_heads *h, const uint16_t *panel, int half,
                                      uint16_t *block) {
    const int64_t codes = h->parts * 1024, all = mixpi_panel_codes(h, h->parts);
    for (int64_t i = 0; i < all; i += 1024) {
        uint16_t *to = block + i / codes * 2 * codes + half * codes + i % codes;
        MIXPI_P(tiles_a_transposed)(to, panel + i, 32, 32, 32);
    }
}

/* to = from', both in blocks of 16 by 16; from has `rows` rows. */
MIXPI_K void MIXPI_P(transpose_blocks)(float *to, int64_t ldt, const float *from, int64_t ldf,
                                       int64_t rows, int64_t columns) {
    for (int64_t i = 0; i < rows; i += 16)
        for (int64_t j = 0; j < columns; j += 16)
            MIXPI_P(transpose16)(to + j * ldt + i, ldt, from + i * ldf + j, ldf);
}

/* --- products --- */

/* The two parts of weights, in the upper 16 bits: high is the upper 8 significant bits, low the
 * rest, rounded to 8. */
MIXPI_V mixpi_vbits MIXPI_P(tiled_high)(mixpi_v x) { return mixpi_rbits(x) & 0xFFFF0000u; }
MIXPI_V mixpi_vbits MIXPI_P(tiled_low)(mixpi_v x)
{ return mixpi_rbits(mixpi_vsub(x, mixpi_rof(MIXPI_P(tiled_high)(x)))) + 0x8000u; }

/* Stores 32 weights as a row of an operand on the left, in two parts. Returns the lanes of weights
 * that are not finite. */
MIXPI_V __mmask32 MIXPI_P(tiled_put_row)(uint16_t *to, mixpi_v x, mixpi_v y) {
    const __m512i exponent = _mm512_set1_epi16(0x7F80);
    const __m512i high = MIXPI_P(tiles_upper)(MIXPI_P(tiled_high)(x), MIXPI_P(tiled_high)(y));
    _mm512_storeu_si512(to, high);
    _mm512_storeu_si512(to + 1024,
                        MIXPI_P(tiles_upper)(MIXPI_P(tiled_low)(x), MIXPI_P(tiled_low)(y)));
    return _mm512_cmpeq_epi16_mask(_mm512_and_si512(high, exponent), exponent);
}

/* The upper 16 bits of x in the lower 16 bits of each lane, and those of y in the upper. It is one
 * shuffle of bytes: beside tiles, shifts wait for the port of the FMAs. */
MIXPI_V __m512i MIXPI_P(tiled_pair_of)(mixpi_vbits x, mixpi_vbits y) {
    const mixpi_vbits down = { 0x80800302, 0x80800706, 0x80800B0A, 0x80800F0E,
                               0x80800302, 0x80800706, 0x80800B0A, 0x80800F0E,
                               0x80800302, 0x80800706, 0x80800B0A, 0x80800F0E,
                               0x80800302, 0x80800706, 0x80800B0A, 0x80800F0E };
    return _mm512_mask_shuffle_epi8((__m512i)y, 0x3333333333333333u, (__m512i)x, (__m512i)down);
}

/* Stores the weights of two keys as a row of an operand on the right, in two parts. */
MIXPI_V void MIXPI_P(tiled_put_pair)(void *high, void *low, mixpi_v x, mixpi_v y) {
    _mm512_storeu_si512(high, MIXPI_P(tiled_pair_of)(mixpi_rbits(x), mixpi_rbits(y)));
    _mm512_storeu_si512(low, MIXPI_P(tiled_pair_of)(MIXPI_P(tiled_low)(x), MIXPI_P(tiled_low)(y)));
}

/* Splits rows of n weights, in whole vectors, to two steps of an operand on the left. Returns
 * nonzero if a weight is not finite. */
MIXPI_K unsigned MIXPI_P(tiled_weights)(const float *weights, int64_t rows, int64_t n,
                                        uint16_t *to) {
    __mmask32 bad = 0;
    for (int64_t i = 0; i < rows; i++, weights += MIXPI_KEYS, to += 32)
        for (int64_t j = 0; j < n; j += 32) {
            mixpi_v y = mixpi_vzero();
            if (j + 16 < n) y = mixpi_vload(weights + j + 16);
            bad |= MIXPI_P(tiled_put_row)(to + j * 64, mixpi_vload(weights + j), y);
        }
    return bad;
}

/* --- forward --- *
 *
 * Scores have a row for each key and a lane for each query, so that largest scores and sums need no
 * reduction across lanes. Their weights become an operand on the right without a transpose, and
 * results have a lane for each query until all keys are added.
 */

/* Makes the operands of one block of keys of a head: keys before `last` count. */
MIXPI_K void MIXPI_P(tiled_keys)(const mixpi_attention_job *job, const mixpi_tiled_room *room,
                                 int64_t head, int64_t k0, int64_t last) {
    const mixp_attention_args *k = job->k;
    const mixpi_heads *h = &job->heads;
    const mixpi_head at_k = mixpi_head_met(&k->k_at, h, head);
    const mixpi_head at_v = mixpi_head_met(&k->v_at, h, head);
    const int64_t panel = mixpi_panel_codes(h, h->score_parts), block = k0 / MIXPI_KEYS;
    uint16_t *keys = room->keys + block * 2 * panel;
    uint16_t *values = room->values + block * 2 * mixpi_panel_codes(h, h->parts);
    room->bad[block] = 0;
    for (int half = 0; half < 2; half++) {
        const int64_t row = k0 + 32 * half, rows = mixpi_min(32, last - row);
        if (MIXPI_P(tiled_rows)(h, k->k, at_k, row, rows, h->score_parts, keys + half * panel))
            room->bad[block] |= 1;
        if (MIXPI_P(tiled_rows)(h, k->v, at_v, row, rows, h->parts, room->rows))
            room->bad[block] |= 2;
        MIXPI_P(tiled_over_keys)(h, room->rows, half, values);
    }
}

/* A block of keys that a block of queries meets. Weights overwrite the scores: two rows of scores
 * become two rows of an operand on the right, that of the high parts and that of the low parts. */
typedef struct mixpi_tiled_block {
    mixpi_some_scores at;       /* n 0: there is no block                                  */
    float *scores;              /* MIXPI_KEYS x MIXPI_QUERIES                              */
    float *kept;                /* receives the weights in f32; NULL = not needed          */
    float  factors[MIXPI_QUERIES];      /* of the results before this block                */
} mixpi_tiled_block;

/* Products of 32 rows of a after 32, which are computed unit by unit. A unit is a part of a step,
 * or it stores the sums. */
typedef struct mixpi_tiled_run {
    mixpi_tiles t;              /* the products that are left; rows of at most 0: none     */
    int64_t     below;          /* bytes from 32 rows of a to the next                     */
    int64_t     step, part;     /* of the first product: the next unit                     */
} mixpi_tiled_run;

/* The number of units that are left, if none is begun. */
MIXPI_V int64_t MIXPI_P(tiled_units)(const mixpi_tiled_run *r) {
    if (r->t.rows <= 0) return 0;
    return mixpi_ceil_div(r->t.rows, 32) * (r->t.steps * MIXPI_P(tiles_parts)(r->t.how) + 1);
}

/* Two runs. The loops over weights compute MIXPI_WOVEN portions of them: tiles multiply beside
 * vectors, and after some 1,000 cycles without a product the next one waits for 600. */
#define MIXPI_WOVEN 16
typedef struct mixpi_tiled_weft {
    mixpi_tiled_run runs[2];
    int64_t portion;            /* units                                                   */
} mixpi_tiled_weft;

/* Computes a portion. */
MIXPI_RARE void MIXPI_P(tiled_weave)(mixpi_tiled_weft *w) {
    for (int64_t i = w->portion; i > 0; i--) {
        mixpi_tiled_run *r = w->runs + (w->runs[0].t.rows <= 0);
        const int tall = r->t.rows > 16, wide = r->t.columns > 16, how = r->t.how;
        if (r->t.rows <= 0) return;
        if (r->step < r->t.steps) {
            if (!r->step && !r->part) MIXPI_P(tiles_begin)(&r->t, tall, wide);
            MIXPI_P(tiles_do)(&r->t, r->step, (int)r->part, tall, wide, how);
            if (++r->part < MIXPI_P(tiles_parts)(how)) continue;
            r->part = 0;
            r->step++;
        } else {
            MIXPI_P(tiles_end)(&r->t, tall, wide);
            r->t.a = (const char *)r->t.a + r->below;
            r->t.c += 32 * r->t.c_row;
            r->t.rows -= 32;
            r->step = 0;
        }
    }
}

/* Computes what is left. */
MIXPI_V void MIXPI_P(tiled_finish)(mixpi_tiled_weft *w)
{ while (w->runs[0].t.rows > 0 || w->runs[1].t.rows > 0) MIXPI_P(tiled_weave)(w); }

/* scores[n, queries] = k q'. */
MIXPI_V mixpi_tiled_run MIXPI_P(tiled_scores)(const mixpi_heads *h, int64_t queries, int64_t n,
                                              const uint16_t *q, const uint16_t *keys,
                                              float *scores) {
    mixpi_tiled_run r;
    memset(&r, 0, sizeof r);
    r.t.a = keys;
    r.t.a_row = 64;
    r.t.a_below = 1024;
    r.t.a_step = h->score_parts * 2048;
    r.t.b = q;
    r.t.steps = mixpi_ceil_div(h->d, 32);
    r.t.c = scores;
    r.t.c_row = MIXPI_QUERIES;
    r.t.rows = n;
    r.t.columns = queries;
    r.t.how = MIXPI_P(tiled_scores_by)(h);
    r.below = 2 * mixpi_panel_codes(h, h->score_parts);
    return r;
}

MIXPI_K void MIXPI_P(tiled_scores_of)(const mixpi_heads *h, int64_t queries, int64_t n,
                                      const uint16_t *q, const uint16_t *keys, float *scores) {
    mixpi_tiled_run r = MIXPI_P(tiled_scores)(h, queries, n, q, keys, scores);
    for (; r.t.rows > 0; r.t.rows -= 32, r.t.c += 32 * MIXPI_QUERIES) {
        MIXPI_P(tiles_sum)(&r.t);
        r.t.a = (const char *)r.t.a + r.below;
    }
}

/* v' p' of a block, shaped as the sums of a block of queries. */
MIXPI_V mixpi_tiled_run MIXPI_P(tiled_values)(const mixpi_heads *h, const mixpi_tiled_room *room,
                                              const mixpi_tiled_block *b, int64_t queries) {
    mixpi_tiled_run r;
    memset(&r, 0, sizeof r);
    r.t.a = room->values + b->at.key / 32 * mixpi_panel_codes(h, h->parts);
    r.t.a_row = 64;
    r.t.a_below = 1024;
    r.t.a_step = h->parts * 2048;
    r.t.b = b->scores;
    r.t.b_row = 2 * MIXPI_QUERIES * 4;
    r.t.steps = mixpi_ceil_div(b->at.n, 32);
    r.t.c = room->o;
    r.t.c_row = MIXPI_QUERIES;
    r.t.rows = b->at.n > 0 ? h->d : 0;
    r.t.columns = queries;
    r.t.how = h->parts == 1 ? MIXPI_TILES_SPLIT_B : MIXPI_TILES_SPLIT;
    r.below = h->parts * 4096;
    return r;
}

/* e^x in the lanes of `there`, for x of at most 0; 0 in the others. NaN stays NaN. No polynomial of
 * this degree for 2^r, |r| <= 1/2, has a smaller largest relative error: 2^-28.9. */
MIXPI_V mixpi_v MIXPI_P(tiled_exp)(__mmask16 there, mixpi_v x) {
    mixpi_v y = mixpi_vfma(x, mixpi_vset(1.44269504f), mixpi_vset(-0.0f));
    mixpi_v n = mixpi_vsub(mixpi_vadd(y, mixpi_vset(12582912.0f)), mixpi_vset(12582912.0f));
    mixpi_v r = mixpi_vsub(y, n), p;
    there = _mm512_mask_cmp_ps_mask(there, x, mixpi_vset(-104.0f), _CMP_NLE_UQ);
    p = mixpi_vfma(mixpi_vset(0.0001535336f), r, mixpi_vset(0.0013398875f));
    p = mixpi_vpoly(p, r, 0.0096184369f, 0.0555033237f, 0.2402264774f, 0.6931471825f);
    return _mm512_maskz_scalef_ps(there, mixpi_vfma(p, r, mixpi_vset(1.0f)), n);
}

/* scale * score - top. The product is rounded, as the largest one was, so the difference is never
 * above 0. It is an FMA with -0, because compilers may contract a product and a difference. */
MIXPI_V mixpi_v MIXPI_P(tiled_below)(mixpi_v score, mixpi_v scale, mixpi_v top)
{ return mixpi_vsub(mixpi_vfma(score, scale, mixpi_vset(-0.0f)), top); }

/* The lanes of 16 queries that see key j. reach: how many keys the first of them sees. */
MIXPI_V __mmask16 MIXPI_P(tiled_sees)(int64_t reach, int64_t j) {
    const int64_t first = j - reach + 1;
    if (first <= 0) return (__mmask16)0xFFFF;
    if (first >= 16) return 0;
    return (__mmask16)(0xFFFFu << first);
}

/* The largest scores of 16 queries among n keys, or -Inf; a NaN does not count. Even and odd keys
 * have separate chains, because a maximum waits for the one before. */
MIXPI_V mixpi_v MIXPI_P(tiled_top)(const float *scores, int64_t n, int64_t reach,
                                   const int whole) {
    mixpi_v even = mixpi_vset(mixp_f32_of_bits(0xFF800000u)), odd = even;
    for (int64_t j = 0; j < n; j += 2, scores += 2 * MIXPI_QUERIES) {
        __mmask16 sees = (__mmask16)0xFFFF, sees_next = sees;
        if (!whole) {
            sees = MIXPI_P(tiled_sees)(reach, j);
            sees_next = j + 1 < n ? MIXPI_P(tiled_sees)(reach, j + 1) : (__mmask16)0;
        }
        even = _mm512_mask_max_ps(even, sees, mixpi_vload(scores), even);
        odd = _mm512_mask_max_ps(odd, sees_next, mixpi_vload(scores + MIXPI_QUERIES), odd);
    }
    return mixpi_vmax(even, odd);
}

/* Stores the weights of keys j and j + 1 with 16 queries, from query `first` on. */
MIXPI_V void MIXPI_P(tiled_put)(const mixpi_tiled_block *b, int64_t j, int64_t first, mixpi_v x,
                                mixpi_v y) {
    const int64_t at = j * MIXPI_QUERIES + first;
    MIXPI_P(tiled_put_pair)(b->scores + at, b->scores + at + MIXPI_QUERIES, x, y);
    if (!b->kept) return;
    mixpi_vstore(b->kept + at, x);
    mixpi_vstore(b->kept + at + MIXPI_QUERIES, y);
}

/* Turns the scores of 16 queries, from query `first` of the block on, into weights, and updates
 * their largest scores and sums. whole: there are MIXPI_KEYS keys, and each query sees all. The
 * scale is not negative. */
MIXPI_V void MIXPI_P(tiled_weigh_body)(const mixpi_attention_job *job, mixpi_met_queries *s,
                                       mixpi_tiled_block *b, mixpi_tiled_weft *w, int64_t first,
                                       const int whole) {
    const int64_t reach = MIXPI_P(queries_reach)(job->k, b->at) + first;
    const int64_t n = whole ? MIXPI_KEYS : b->at.n, end = (n + 31) / 32 * 32;
    const mixpi_v scale = mixpi_vset(job->k->scale), old = mixpi_vload(s->top + first);
    float  *scores = b->scores + first;
    mixpi_v sum = mixpi_vzero(), top = MIXPI_P(tiled_top)(scores, n, reach, whole), shrink;
    top = mixpi_vmax(mixpi_vmul(top, scale), old);
    shrink = MIXPI_P(tiled_exp)((__mmask16)0xFFFF, mixpi_vsub(old, top));

    /* Two keys at a time; rows up to a whole step are 0. */
    for (int64_t j = 0; j < end; j += 2) {
        float    *at_j = scores + j * MIXPI_QUERIES, *next = at_j + MIXPI_QUERIES;
        __mmask16 sees = (__mmask16)0xFFFF, sees_next = sees;
        mixpi_v   x, y;
        if (j % 8 == 0) MIXPI_P(tiled_weave)(w);
        if (!whole) {
            sees = j < n ? MIXPI_P(tiled_sees)(reach, j) : (__mmask16)0;
            sees_next = j + 1 < n ? MIXPI_P(tiled_sees)(reach, j + 1) : (__mmask16)0;
        }
        x = MIXPI_P(tiled_below)(mixpi_vload(at_j), scale, top);
        y = MIXPI_P(tiled_below)(mixpi_vload(next), scale, top);
        x = MIXPI_P(tiled_exp)(sees, x);
        y = MIXPI_P(tiled_exp)(sees_next, y);
        sum = mixpi_vadd(mixpi_vadd(sum, x), y);
        MIXPI_P(tiled_put)(b, j, first, x, y);
    }
    mixpi_vstore(s->top + first, top);
    mixpi_vstore(s->sum + first, mixpi_vfma(mixpi_vload(s->sum + first), shrink, sum));
    mixpi_vstore(b->factors + first, shrink);
}
MIXPI_K void MIXPI_P(tiled_weigh)(const mixpi_attention_job *job, mixpi_met_queries *s,
                                  mixpi_tiled_block *b, mixpi_tiled_weft *w) {
    const int whole = b->at.n == MIXPI_KEYS && MIXPI_P(queries_reach)(job->k, b->at) >= MIXPI_KEYS;
    for (int64_t i = 0; i < s->rows; i += 16) {
        if (whole) MIXPI_P(tiled_weigh_body)(job, s, b, w, i, 1);
        else MIXPI_P(tiled_weigh_body)(job, s, b, w, i, 0);
    }
}

/* Where the mask between 16 queries and at.n keys begins, as words of 32 bits: one f32 or two
 * 16-bit numbers. A block that is not whole is copied to `room`, with zeros beyond. *ld: words
 * from a row to the next one. */
MIXPI_K const float *MIXPI_P(tiled_mask_at)(const mixp_attention_args *k, const mixpi_heads *h,
                                            mixpi_some_scores at, int64_t queries, float *room,
                                            int64_t *ld) {
    const mixpi_head head = mixpi_head_at(&k->mask_at, h, at.head);
    const int64_t size = (int64_t)mixp_dtype_size(k->mask.dtype), row = head.ld * size;
    const int64_t first = head.first + at.query * head.ld + at.key * k->mask_key;
    const char *from = (const char *)k->mask.data + first * size;
    char *to = (char *)room;
    *ld = row / 4;
    if (queries >= 16 && at.n * size % 64 == 0 && row % 4 == 0 && k->mask_key)
        return (const float *)(const void *)from;

    *ld = MIXPI_KEYS * size / 4;
    memset(room, 0, (size_t)(16 * MIXPI_KEYS * size));
    for (int64_t i = 0; i < mixpi_min(16, queries); i++, from += row, to += MIXPI_KEYS * size) {
        if (k->mask_key) memcpy(to, from, (size_t)(at.n * size));
        for (int64_t j = 0; !k->mask_key && j < at.n; j++)
            memcpy(to + j * size, from, (size_t)size);
    }
    return room;
}

/* scores = scale * scores + mask, of 16 queries with a key. The product is rounded before the
 * sum: it is an FMA with -0. */
MIXPI_V void MIXPI_P(tiled_mask_key)(float *scores, mixpi_v scale, mixpi_v mask) {
    const mixpi_v x = mixpi_vfma(mixpi_vload(scores), scale, mixpi_vset(-0.0f));
    mixpi_vstore(scores, mixpi_vadd(x, mask));
}

/* The same with each of n keys, for a mask of words. dtype is a constant at each call. w NULL: no
 * runs are woven in. */
MIXPI_V void MIXPI_P(tiled_mask_of)(const mixp_dtype dtype, float *scores, mixpi_v scale, int64_t n,
                                    const float *at, int64_t ld, mixpi_tiled_weft *w) {
    const int64_t words = dtype == MIXP_F32 ? n : (n + 1) / 2;
    float columns[256] __attribute__((__aligned__(64)));
    for (int64_t j = 0; j < words; j++, scores += MIXPI_QUERIES) {
        if (j % 16 == 0 && w) MIXPI_P(tiled_weave)(w);
        if (j % 16 == 0) MIXPI_P(transpose16)(columns, 16, at + j, ld);
        mixpi_v x = mixpi_vload(columns + j % 16 * 16), y = x;
        if (dtype == MIXP_BF16) x = mixpi_rof(mixpi_rbits(y) << 16);
        if (dtype == MIXP_BF16) y = mixpi_rof(mixpi_rbits(y) & 0xFFFF0000u);
        if (dtype == MIXP_F16) x = _mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)y));
        if (dtype == MIXP_F16)
            y = _mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)(mixpi_rbits(y) >> 16)));
        if (dtype != MIXP_F32) {
            MIXPI_P(tiled_mask_key)(scores, scale, x);
            scores += MIXPI_QUERIES;
        }
        MIXPI_P(tiled_mask_key)(scores, scale, y);
    }
}

/* Scales a block of scores and adds the mask. room: scratch memory for 16 rows of the mask. */
MIXPI_K void MIXPI_P(tiled_mask)(const mixp_attention_args *k, const mixpi_heads *h,
                                 mixpi_some_scores at, int64_t queries, float *scores,
                                 float *room, mixpi_tiled_weft *w) {
    const mixpi_v scale = mixpi_vset(k->scale);
    const mixp_dtype dtype = k->mask.dtype;
    const int64_t n = at.n;
    for (int64_t j = 0; !at.masked && j < n * MIXPI_QUERIES; j += 16)
        MIXPI_P(tiled_mask_key)(scores + j, scale, mixpi_vzero());
    for (; at.masked && queries > 0; queries -= 16, at.query += 16, scores += 16) {
        int64_t ld;
        const float *mask = MIXPI_P(tiled_mask_at)(k, h, at, queries, room, &ld);
        if (dtype == MIXP_F32) MIXPI_P(tiled_mask_of)(MIXP_F32, scores, scale, n, mask, ld, w);
        else if (dtype == MIXP_F16) MIXPI_P(tiled_mask_of)(MIXP_F16, scores, scale, n, mask, ld, w);
        else MIXPI_P(tiled_mask_of)(MIXP_BF16, scores, scale, n, mask, ld, w);
    }
}

/* The sum of 16 vectors in the order in which mixpi_vsum adds 16 lanes. */
MIXPI_V mixpi_v MIXPI_P(tiled_sum)(float *v) {
    for (int n = 8; n > 0; n /= 2)
        for (int i = 0; i < n; i++)
            mixpi_vstore(v + 16 * i,
                         mixpi_vadd(mixpi_vload(v + 16 * i), mixpi_vload(v + 16 * (i + n))));
    return mixpi_vload(v);
}

/* mixpi_vexp in the lanes of `there`, for x of at most 0; 0 in the others. */
MIXPI_V mixpi_v MIXPI_P(tiled_vexp)(__mmask16 there, mixpi_v x) {
    mixpi_v n, part = mixpi_vexpm1_part(x, &n);
    there = _mm512_mask_cmp_ps_mask(there, x, mixpi_vset(-104.0f), _CMP_NLE_UQ);
    return _mm512_maskz_scalef_ps(there, mixpi_vadd(part, mixpi_vset(1.0f)), n);
}

/* tiled_weigh_body with the bits of attention.c's rows, for scores that are already scaled and
 * masked, or, if `bare`, are neither. */
MIXPI_V void MIXPI_P(tiled_weigh_lanes)(const mixpi_attention_job *job, mixpi_met_queries *s,
                                        mixpi_tiled_block *b, mixpi_tiled_weft *w,
                                        int64_t first, const int whole, const int bare) {
    const int64_t reach = MIXPI_P(queries_reach)(job->k, b->at) + first;
    const int64_t n = whole ? MIXPI_KEYS : b->at.n, end = (n + 31) / 32 * 32;
    const mixpi_v old = mixpi_vload(s->top + first), sum = mixpi_vload(s->sum + first);
    float  sums[256] __attribute__((__aligned__(64)));
    float *scores = b->scores + first;
    const mixpi_v scale = mixpi_vset(job->k->scale);
    mixpi_v top = MIXPI_P(tiled_top)(scores, n, reach, whole), shrink;
    __mmask16 grows;
    top = mixpi_vmax(bare ? mixpi_vmul(top, scale) : top, old);

    /* The old sum belongs to the old largest score. */
    grows = _mm512_cmp_ps_mask(top, old, _CMP_GT_OQ);
    grows = _mm512_mask_cmp_ps_mask(grows, sum, mixpi_vzero(), _CMP_GT_OQ);
    shrink = MIXPI_P(tiled_vexp)((__mmask16)0xFFFF, mixpi_vsub(old, top));
    shrink = _mm512_mask_mov_ps(mixpi_vset(1.0f), grows, shrink);

    /* Two keys at a time, and those 16 keys later, whose weights have the same sum; rows up to
     * a whole step are 0. */
    for (int64_t i = 0; i < 16; i += 2) {
        mixpi_v even = mixpi_vzero(), odd = even;
        MIXPI_P(tiled_weave)(w);
        for (int64_t j = i; j < end; j += 16) {
            float *at_j = scores + j * MIXPI_QUERIES, *next = at_j + MIXPI_QUERIES;
            __mmask16 sees = (__mmask16)0xFFFF, sees_next = sees;
            if (!whole) {
                sees = j < n ? MIXPI_P(tiled_sees)(reach, j) : (__mmask16)0;
                sees_next = j + 1 < n ? MIXPI_P(tiled_sees)(reach, j + 1) : (__mmask16)0;
            }
            mixpi_v x = mixpi_vload(at_j), y = mixpi_vload(next);
            x = bare ? MIXPI_P(tiled_below)(x, scale, top) : mixpi_vsub(x, top);
            y = bare ? MIXPI_P(tiled_below)(y, scale, top) : mixpi_vsub(y, top);
            x = MIXPI_P(tiled_vexp)(sees, x);
            y = MIXPI_P(tiled_vexp)(sees_next, y);
            even = mixpi_vadd(even, x);
            odd = mixpi_vadd(odd, y);
            MIXPI_P(tiled_put)(b, j, first, x, y);
        }
        mixpi_vstore(sums + 16 * i, even);
        mixpi_vstore(sums + 16 * i + 16, odd);
    }
    mixpi_vstore(s->top + first, top);
    mixpi_vstore(s->sum + first, mixpi_vadd(mixpi_vfma(sum, shrink, mixpi_vset(-0.0f)),
                                            MIXPI_P(tiled_sum)(sums)));
    mixpi_vstore(b->factors + first, shrink);
}
MIXPI_K void MIXPI_P(tiled_weigh_masked)(const mixpi_attention_job *job,
                                         const mixpi_tiled_room *room, mixpi_met_queries *s,
                                         mixpi_tiled_block *b, mixpi_tiled_weft *w) {
    const int whole = b->at.n == MIXPI_KEYS && MIXPI_P(queries_reach)(job->k, b->at) >= MIXPI_KEYS;
    const int bare = whole && !b->at.masked && job->k->scale > 0.0f;
    if (!bare)
        MIXPI_P(tiled_mask)
        (job->k, &job->heads, b->at, s->rows, b->scores, room->rows_of_scores, w);
    for (int64_t i = 0; i < s->rows; i += 16) {
        if (bare) MIXPI_P(tiled_weigh_lanes)(job, s, b, w, i, 1, 1);
        else if (whole) MIXPI_P(tiled_weigh_lanes)(job, s, b, w, i, 1, 0);
        else MIXPI_P(tiled_weigh_lanes)(job, s, b, w, i, 0, 0);
    }
}

/* Turns scores into weights by the rows of attention.c, for a cap or dropout. */
MIXPI_K void MIXPI_P(tiled_weigh_by_rows)(const mixpi_attention_job *job,
                                          const mixpi_tiled_room *room, mixpi_met_queries *s,
                                          mixpi_tiled_block *b) {
    const int64_t n = (b->at.n + 15) / 16 * 16;
    mixpi_attention_job by_rows = *job;
    mixpi_met_queries rows = *s;
    int64_t i, j;

    /* The results that the rows rescale are their factors. */
    by_rows.heads.wide = 16;
    rows.scores = room->rows_of_scores;
    rows.o = room->factors;
    for (i = 0; i < MIXPI_QUERIES; i++) mixpi_vstore(rows.o + 16 * i, mixpi_vset(1.0f));
    MIXPI_P(transpose_blocks)
    (rows.scores, MIXPI_KEYS, b->scores, MIXPI_QUERIES, n, s->rows);
    for (i = 0; i < s->rows; i++)
        MIXPI_P(scale_row)(rows.scores + i * MIXPI_KEYS, n, mixpi_vset(job->k->scale));
    MIXPI_P(queries_weigh)(&by_rows, &rows, b->at);
    memcpy(s->top, rows.top, sizeof s->top);
    memcpy(s->sum, rows.sum, sizeof s->sum);
    for (i = 0; i < MIXPI_QUERIES; i++) b->factors[i] = rows.o[16 * i];

    /* Rows become columns again. */
    (void)MIXPI_P(tiled_weights)(rows.scores, s->rows, n, room->weights);
    for (i = 0; i < mixpi_ceil_div(n, 32) * 4; i++) {
        float *to = b->scores + i / 4 * 32 * MIXPI_QUERIES + i / 2 % 2 * MIXPI_QUERIES + i % 2 * 16;
        const float *from = (const float *)(const void *)(room->weights + i * 512);
        MIXPI_P(transpose16)(to, 2 * MIXPI_QUERIES, from, 16);
    }
    for (i = 0; b->kept && i < s->rows; i++)
        for (j = 0; j < b->at.n; j++)
            b->kept[j * MIXPI_QUERIES + i] = rows.scores[i * MIXPI_KEYS + j];
}

/* sums = factors * sums + more, the product of a block and v. The product began at 0: a block whose
 * weights are all 0 changes no bit of a query's sums. */
MIXPI_K void MIXPI_P(tiled_add)(float *sums, const float *factors, const float *more,
                                int64_t d, int64_t queries) {
    const mixpi_v left = mixpi_vload(factors), right = mixpi_vload(factors + 16);
    for (; d > 0; d--, sums += MIXPI_QUERIES, more += MIXPI_QUERIES) {
        mixpi_vstore(sums, mixpi_vfma(mixpi_vload(sums), left, mixpi_vload(more)));
        if (queries <= 16) continue;
        mixpi_vstore(sums + 16, mixpi_vfma(mixpi_vload(sums + 16), right, mixpi_vload(more + 16)));
    }
}

/* Is a number of a row of f32 Inf or NaN? */
MIXPI_V int MIXPI_P(row_is_bad)(const float *row, int64_t n) {
    __mmask16 bad = 0;
    for (int64_t j = 0; j < n; j += 16)
        bad |= _mm512_fpclass_ps_mask(mixpi_vload(row + j), 0x99); /* NaN, Inf, -Inf */
    return bad != 0;
}

MIXPI_V float MIXPI_P(row_dot)(const float *a, const float *b, int64_t n) {
    mixpi_v sum = mixpi_vzero();
    for (int64_t j = 0; j < n; j += 16)
        sum = mixpi_vfma(mixpi_vload(a + j), mixpi_vload(b + j), sum);
    return mixpi_vsum(sum);
}

/* Computes the scores whose query or key is not finite. bad_q: is a query not finite? */
MIXPI_SELDOM
MIXPI_K void MIXPI_P(tiled_bad_scores)(const mixpi_attention_job *job,
                                       const mixpi_tiled_room *room, const mixpi_met_queries *s,
                                       const mixpi_tiled_block *b, int bad_q) {
    const mixp_attention_args *k = job->k;
    const mixpi_heads *h = &job->heads;
    float *q = room->plain, *key = q + MIXPI_QUERIES * h->wide;
    int    bad[MIXPI_QUERIES];
    MIXPI_P(head_rows)
    (h, k->q, mixpi_head_at(&k->q_at, h, s->head), s->q0, s->rows, s->rows, q);
    for (int64_t r = 0; r < s->rows; r++)
        bad[r] = bad_q && MIXPI_P(row_is_bad)(q + r * h->wide, h->wide);

    for (int64_t j = 0; j < b->at.n; j++) {
        float *scores = b->scores + j * MIXPI_QUERIES;
        int    bad_key;
        MIXPI_P(head_rows)
        (h, k->k, mixpi_head_met(&k->k_at, h, s->head), b->at.key + j, 1, 1, key);
        bad_key = MIXPI_P(row_is_bad)(key, h->wide);
        for (int64_t r = 0; r < s->rows; r++)
            if (bad_key || bad[r]) scores[r] = MIXPI_P(row_dot)(q + r * h->wide, key, h->wide);
    }
}

/* Adds the products of weights with numbers of v that are not finite, for the queries that see
 * their keys. */
MIXPI_SELDOM
MIXPI_K void MIXPI_P(tiled_bad_values)(const mixpi_attention_job *job,
                                       const mixpi_tiled_room *room, const mixpi_met_queries *s,
                                       const mixpi_tiled_block *b) {
    const mixp_attention_args *k = job->k;
    const mixpi_heads *h = &job->heads;
    const int64_t reach = MIXPI_P(queries_reach)(k, b->at);
    float *v = room->plain;
    for (int64_t j = 0; j < b->at.n; j++) {
        const float *p = b->kept + j * MIXPI_QUERIES;
        MIXPI_P(head_rows)
        (h, k->v, mixpi_head_met(&k->v_at, h, s->head), b->at.key + j, 1, 1, v);
        for (int64_t c = 0; c < h->d; c++) {
            float *sums = room->sums + c * MIXPI_QUERIES;
            if ((mixp_bits_of_f32(v[c]) & 0x7F800000u) != 0x7F800000u) continue;
            for (int64_t r = 0; r < s->rows; r++)
                if (j < reach + r) sums[r] += p[r] * v[c];
        }
    }
}

/* attention_queries by tiles. While the weights of a block of keys are computed, tiles multiply
 * those of the block before by its values, and q by the next block's keys. */
MIXPI_K void MIXPI_P(tiled_queries)(const mixpi_attention_job *job, const mixpi_tiled_room *room,
                                    int64_t head, int64_t q0) {
    const mixp_attention_args *k = job->k;
    const mixpi_heads *h = &job->heads;
    const int64_t pair = 2 * mixpi_panel_codes(h, h->score_parts);
    const int by_rows = mixpi_attention_modifies(k) || (!(k->scale >= 0.0f) && !k->mask.data);
    int64_t   last, i;
    int       bad_q;
    mixpi_tiled_block blocks[2], *b = blocks, *other = blocks + 1;
    mixpi_tiled_weft  w;
    mixpi_met_queries s;
    s.head = head;
    s.q0 = q0;
    s.o = room->o;
    MIXPI_P(queries_begin)(job, &s);
    memset(room->sums, 0, (size_t)mixpi_tiled_sums(h) * sizeof(float));
    for (i = s.rows; i < MIXPI_QUERIES; i++) s.top[i] = s.sum[i] = 0.0f;
    bad_q = MIXPI_P(tiled_rows)(h, k->q, mixpi_head_at(&k->q_at, h, head), q0, s.rows,
                                h->score_parts, room->rows) != 0;
    MIXPI_P(tiled_columns)(h, h->score_parts, room->rows, room->q);

    /* The first block. */
    memset(blocks, 0, sizeof blocks);
    b->scores = room->scores;
    other->scores = room->scores + MIXPI_KEYS * MIXPI_QUERIES;
    last = mixpi_keys_until(k, head, q0 + s.rows);
    b->at = MIXPI_P(queries_meet)(job, &s, 0, last);
    MIXPI_P(tiled_scores_of)
    (h, s.rows, b->at.n, room->q, room->keys + b->at.key / MIXPI_KEYS * pair, b->scores);

    while (b->at.n) {
        const int bad = room->bad[b->at.key / MIXPI_KEYS];
        const mixpi_some_scores next = MIXPI_P(queries_meet)(job, &s, b->at.key + MIXPI_KEYS, last);
        if (bad_q || bad & 1) MIXPI_P(tiled_bad_scores)(job, room, &s, b, bad_q);
        w.runs[0] = MIXPI_P(tiled_values)(h, room, other, s.rows);
        w.runs[1] = MIXPI_P(tiled_scores)
        (h, s.rows, next.n, room->q, room->keys + next.key / MIXPI_KEYS * pair, other->scores);
        w.portion = MIXPI_P(tiled_units)(w.runs) + MIXPI_P(tiled_units)(w.runs + 1);
        w.portion = 1 + (w.portion - 1) / MIXPI_WOVEN;
        b->kept = bad & 2 ? (float *)(void *)room->weights : NULL;
        if (by_rows) MIXPI_P(tiled_weigh_by_rows)(job, room, &s, b);
        else if (k->mask.data) MIXPI_P(tiled_weigh_masked)(job, room, &s, b, &w);
        else MIXPI_P(tiled_weigh)(job, &s, b, &w);

        MIXPI_P(tiled_finish)(&w);
        if (other->at.n) MIXPI_P(tiled_add)(room->sums, other->factors, room->o, h->d, s.rows);
        if (b->kept || !next.n) {
            w.runs[0] = MIXPI_P(tiled_values)(h, room, b, s.rows);
            MIXPI_P(tiled_finish)(&w);
            MIXPI_P(tiled_add)(room->sums, b->factors, room->o, h->d, s.rows);
            if (b->kept) MIXPI_P(tiled_bad_values)(job, room, &s, b);
            b->at.n = 0;
        }
        other->at = next;
        other = b;
        b = blocks + (b == blocks);
    }

    /* A row for each query. */
    MIXPI_P(transpose_blocks)(s.o, h->wide, room->sums, MIXPI_QUERIES, h->wide, s.rows);
    MIXPI_P(queries_end)(job, &s);
}

/* attention_task by tiles, if tiles multiply these dtypes. */
MIXPI_K void MIXPI_P(tiled_task)(void *arg, int64_t index, int worker) {
    const mixpi_attention_job *job = (const mixpi_attention_job *)arg;
    const mixpi_heads *h = &job->heads;
    const int64_t head = index / job->chunks, chunk = index % job->chunks;
    const int64_t blocks = mixpi_ceil_div(h->t, MIXPI_QUERIES);
    const int64_t first = blocks * chunk / job->chunks, end = blocks * (chunk + 1) / job->chunks;
    mixpi_tiled_room room;
    int64_t last, k0, i;
    if (!h->tiles) {
        MIXPI_P(attention_task)(arg, index, worker);
        return;
    }

    (void)mixpi_tiled_carve(&room, h, mixpi_slice(&job->slices, worker));
    last = mixpi_keys_until(job->k, head, mixpi_min(h->t, end * MIXPI_QUERIES));
    for (k0 = 0; k0 < last; k0 += MIXPI_KEYS) MIXPI_P(tiled_keys)(job, &room, head, k0, last);

    MIXPI_AMX_CONFIGURE(&mixpi_amx_tiles);
    for (i = first; i < end; i++) MIXPI_P(tiled_queries)(job, &room, head, i * MIXPI_QUERIES);
    MIXPI_AMX_RELEASE();
}
#endif
