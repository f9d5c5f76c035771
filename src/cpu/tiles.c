#pragma once
#include "gemm.c"
/* --- Intel's tiles (AMX) ------------------------------------------------------------------ *
 *
 * What products and attention share. A tile holds 16 rows of 64 bytes. Tiles 0 to 3 hold the sums
 * of 32 rows by 32 columns, 4 and 5 rows of a, 6 and 7 columns of b:
 *
 *                     columns 0..15   16..31
 *     rows  0..15           0            1          tile 4 times tile 6, 4 times 7
 *     rows 16..31           2            3          tile 5 times tile 6, 5 times 7
 *
 * A step multiplies 32 elements of k. Each step has two chains of multiply-adds from 0: one of even
 * k, one of odd k. The two chains are added, and their sum is added to the element. Everything is
 * rounded to nearest even. Subnormals of f32 and bf16 count as zero; subnormals of f16 are kept
 * (Intel's manual, TDPBF16PS and TDPFP16PS).
 *
 * A packed step of a is 2 KB: 32 rows of 32 elements. A packed step of b is 2 KB: the tile of
 * columns 0..15, then that of 16..31; a row of a tile holds element 2p and 2p+1 of k of each
 * column. Where operands are split, a step is 4 KB: as above for the high parts, then for the low
 * parts.
 */
#if MIXPI_PASS == 2 && MIXPI_AMX

/* How tiles multiply. */
enum {
    MIXPI_TILES_BF16,           /* bf16 by bf16: TDPBF16PS                                 */
    MIXPI_TILES_F16,            /* f16 by f16: TDPFP16PS, of AMX_FP16                      */
    MIXPI_TILES_SPLIT,          /* f16 by f16, each split into two bf16: four TDPBF16PS    */
    MIXPI_TILES_SPLIT_A,        /* bf16 by bf16, a split: two TDPBF16PS, first the low parts */
    MIXPI_TILES_SPLIT_B,        /* bf16 by bf16, b split, likewise                         */
    MIXPI_TILES_SPLIT_BACK      /* MIXPI_TILES_SPLIT of b by a: high a by low b comes last */
};
#define MIXPI_TILES_STEP 1024   /* 16-bit numbers in a packed step; split: 2 * this        */

/* Eight tiles of 16 rows by 64 bytes: palette 1. */
typedef struct mixpi_amx_config {
    uint8_t  palette, start_row, zero[14];
    uint16_t row_bytes[16];
    uint8_t  rows[16];
} mixpi_amx_config;

static const mixpi_amx_config mixpi_amx_tiles = {
    1, 0, { 0 }, { 64, 64, 64, 64, 64, 64, 64, 64 }, { 16, 16, 16, 16, 16, 16, 16, 16 }
};

/* --- packing --- */

/* The first n of 32 lanes. */
MIXPI_V __mmask32 MIXPI_P(tiles_lanes)(int64_t n) {
    if (n >= 32) return 0xFFFFFFFFu;
    return n > 0 ? (1u << n) - 1u : 0u;
}

/* Packs `lines` rows of 32 elements; row i begins at from + i * ld. Rows from `rows` on and
 * elements from k on become 0. With 32 lines this packs a step of a from rows along k. */
MIXPI_V void MIXPI_P(tiles_along)(uint16_t *to, const uint16_t *from, int64_t ld, int lines,
                                  int64_t rows, int64_t k) {
    const __mmask32 there = MIXPI_P(tiles_lanes)(k);
    for (int i = 0; i < lines; i++) {
        __m512i row = _mm512_setzero_si512();
        if (i < rows) row = _mm512_maskz_loadu_epi16(there, from + i * ld);
        _mm512_storeu_si512(to + 32 * i, row);
    }
}

/* Interleaves two rows of 32 elements: pairs of columns 0..15 go to left, of 16..31 to right. */
MIXPI_V void MIXPI_P(tiles_weave)(uint16_t *left, uint16_t *right, __m512i even, __m512i odd) {
    const mixpi_vbits low = { 0x200000, 0x210001, 0x220002, 0x230003, 0x240004, 0x250005,
                              0x260006, 0x270007, 0x280008, 0x290009, 0x2A000A, 0x2B000B,
                              0x2C000C, 0x2D000D, 0x2E000E, 0x2F000F };
    const mixpi_vbits high = low + 0x100010u;
    _mm512_storeu_si512(left, _mm512_permutex2var_epi16(even, (__m512i)low, odd));
    _mm512_storeu_si512(right, _mm512_permutex2var_epi16(even, (__m512i)high, odd));
}

/* Packs a step of b: element k of column j is from[k * ld + j]. Columns from `columns` on and
 * elements from k on become 0. */
MIXPI_V void MIXPI_P(tiles_across)(uint16_t *to, const uint16_t *from, int64_t ld, int64_t columns,
                                   int64_t k) {
    const __mmask32 there = MIXPI_P(tiles_lanes)(columns);
    int p;
    for (p = 0; p < 32 && p + 1 < k; p += 2, from += 2 * ld) {
        __m512i even = _mm512_maskz_loadu_epi16(there, from);
        __m512i odd = _mm512_maskz_loadu_epi16(there, from + ld);
        MIXPI_P(tiles_weave)(to + 16 * p, to + 16 * p + 512, even, odd);
    }
    for (; p < 32; p += 2) {
        __m512i even = _mm512_setzero_si512();
        if (p < k) even = _mm512_maskz_loadu_epi16(there, from);
        MIXPI_P(tiles_weave)(to + 16 * p, to + 16 * p + 512, even, _mm512_setzero_si512());
    }
}

/* Transposes a tile: pair p of row i becomes pair i of row p. ld: elements between rows of
 * `from`. */
MIXPI_V void MIXPI_P(tiles_transpose)(uint16_t *to, const uint16_t *from, int64_t ld) {
    MIXPI_P(transpose16)((float *)(void *)to, 16, (const float *)(const void *)from, ld / 2);
}

/* Packs a step of a from a': element k of row i is from[k * ld + i]. */
MIXPI_V void MIXPI_P(tiles_a_transposed)(uint16_t *to, const uint16_t *from, int64_t ld,
                                         int64_t rows, int64_t k) {
    uint16_t woven[MIXPI_TILES_STEP] __attribute__((__aligned__(64)));
    MIXPI_P(tiles_across)(woven, from, ld, rows, k);
    MIXPI_P(tiles_transpose)(to, woven, 32);
    MIXPI_P(tiles_transpose)(to + 512, woven + 512, 32);
}

/* Packs one tile of b, 16 columns, from b': element k of column j is from[j * ld + k]. */
MIXPI_V void MIXPI_P(tiles_b_transposed)(uint16_t *to, const uint16_t *from, int64_t ld,
                                         int64_t columns, int64_t k) {
    uint16_t rows[MIXPI_TILES_STEP / 2] __attribute__((__aligned__(64)));
    if (columns >= 16 && k >= 32 && ld % 2 == 0) {
        MIXPI_P(tiles_transpose)(to, from, ld);
        return;
    }
    MIXPI_P(tiles_along)(rows, from, ld, 16, columns, k);
    MIXPI_P(tiles_transpose)(to, rows, 32);
}

/* The upper 16 bits of 32 words: those of p, then those of q. */
MIXPI_V __m512i MIXPI_P(tiles_upper)(mixpi_vbits p, mixpi_vbits q) {
    const mixpi_vbits upper = { 0x030001, 0x070005, 0x0B0009, 0x0F000D, 0x130011, 0x170015,
                                0x1B0019, 0x1F001D, 0x230021, 0x270025, 0x2B0029, 0x2F002D,
                                0x330031, 0x370035, 0x3B0039, 0x3F003D };
    return _mm512_permutex2var_epi16((__m512i)p, (__m512i)upper, (__m512i)q);
}

/* Splits 32 numbers x, y: high = their upper 16 bits as bf16, low = the rest, cut to bf16. For
 * numbers of at most 16 significant bits high + low is exact, unless low is below 2^-126. */
MIXPI_V void MIXPI_P(tiles_split_floats)(uint16_t *high, uint16_t *low, mixpi_v x, mixpi_v y) {
    const mixpi_vbits p = mixpi_rbits(x) & 0xFFFF0000u, q = mixpi_rbits(y) & 0xFFFF0000u;
    const mixpi_vbits r = mixpi_rbits(mixpi_vsub(x, mixpi_rof(p)));
    const mixpi_vbits s = mixpi_rbits(mixpi_vsub(y, mixpi_rof(q)));
    _mm512_storeu_si512(high, MIXPI_P(tiles_upper)(p, q));
    _mm512_storeu_si512(low, MIXPI_P(tiles_upper)(r, s));
}

/* Splits `lines` packed rows of 32 f16 in place: the high parts stay, the low parts move one step
 * further. Every finite f16 has 11 significant bits and is at least 2^-24, so the split is exact.
 * Returns nonzero if a number is Inf or NaN. */
MIXPI_V unsigned MIXPI_P(tiles_split)(uint16_t *packed, int lines) {
    const __m512i exponent = _mm512_set1_epi16(0x7C00);
    __mmask32 bad = 0;
    for (int i = 0; i < lines; i++, packed += 32) {
        __m512i codes = _mm512_loadu_si512(packed);
        mixpi_v x = mixpi_vget(MIXP_F16, packed), y = mixpi_vget(MIXP_F16, packed + 16);
        bad |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(codes, exponent), exponent);
        MIXPI_P(tiles_split_floats)(packed, packed + MIXPI_TILES_STEP, x, y);
    }
    return bad;
}

/* --- sums of products --- */

/* Sums of up to 32 x 32 elements. Rows and columns from 16 on are computed, and their sums written,
 * only if rows or columns is above 16. Distances are in bytes, those of c in floats. */
typedef struct mixpi_tiles {
    const void *a;              /* 32 rows, or 16: packed, or in place                     */
    int64_t     a_row;          /* from a row of a to the next; packed: 64                 */
    int64_t     a_below;        /* from row 0 of a to row 16; packed: 1,024                */
    int64_t     a_step;         /* from a step of a to the next; in place: 64              */
    const void *a_tail;         /* one more step of a, packed; NULL = none                 */
    const void *b;              /* packed, for all steps                                   */
    int64_t     b_row;          /* split, and the four tiles of a step are side by side: bytes
                                   from a row to the next; 0 = packed                      */
    int64_t     steps;          /* without the tail                                        */
    float      *c;              /* the sums: c(i, j) = c[i * c_row + j]                    */
    int64_t     c_row;
    int64_t     rows, columns;
    int         how;            /* MIXPI_TILES_BF16, ...; split: packed, without a tail    */
    int         more;           /* 1 = add to c's values; 0 = begin at 0                   */
    uintptr_t   ask;            /* the first line that the first step prefetches           */
    int64_t     asks;           /* lines that each step prefetches                         */
    uintptr_t   ask_row;        /* from such a line to the next                            */
    uintptr_t   ask_step;       /* from a step's first line to that of the next step       */
} mixpi_tiles;

/* The four products of the tiles of a by those of b. */
#define MIXPI_TILES_DOTS(DOT)                                                             \
    DOT(0, 4, 6);                                                                         \
    if (wide) DOT(1, 4, 7);                                                               \
    if (tall) DOT(2, 5, 6);                                                               \
    if (tall && wide) DOT(3, 5, 7);

/* A step of a and of b: the loads, then the products, because a core that works for two threads
 * does not overlap the two; there this order saves a tenth. b is loaded past L1: a panel of a meets
 * many panels of b, so it stays in L1. On an Emerald Rapids this is 2 to 14 % faster than a past
 * L1. */
#define MIXPI_TILES_STEP_BY(DOT)                                                          \
    MIXPI_AMX_LOAD(4, a, row);                                                            \
    MIXPI_AMX_LOAD_PAST(6, b, 64);                                                        \
    if (wide) MIXPI_AMX_LOAD_PAST(7, b + 1024, 64);                                       \
    if (tall) MIXPI_AMX_LOAD(5, a + below, row);                                          \
    MIXPI_TILES_DOTS(DOT)
MIXPI_V void MIXPI_P(tiles_step)(const char *a, int64_t row, int64_t below, const char *b,
                                 const int tall, const int wide, const int how) {
    if (how == MIXPI_TILES_F16) {
        MIXPI_TILES_STEP_BY(MIXPI_AMX_DOT_F16)
    } else {
        MIXPI_TILES_STEP_BY(MIXPI_AMX_DOT_BF16)
    }
}

/* The packed tiles of a, and two tiles of b. */
MIXPI_V void MIXPI_P(tiles_a)(const char *a, const int tall) {
    MIXPI_AMX_LOAD(4, a, 64);
    if (tall) MIXPI_AMX_LOAD(5, a + 1024, 64);
}
MIXPI_V void MIXPI_P(tiles_b)(const char *b, int64_t row, const int wide) {
    MIXPI_AMX_LOAD(6, b, row);
    if (wide) MIXPI_AMX_LOAD(7, b + (row == 64 ? 1024 : 64), row);
}

/* A part of a step of split operands: four products. Their order, L the low parts and H the high:
 * SPLIT aL bL, aH bL, aH bH, aL bH; SPLIT_BACK aL bL, aL bH, aH bH, aH bL; SPLIT_A aL b, aH b;
 * SPLIT_B a bL, a bH. */
MIXPI_V void MIXPI_P(tiles_part)(const char *a, const char *b, int64_t b_row, int part,
                                 const int tall, const int wide, const int how) {
    const int a_first = how == MIXPI_TILES_SPLIT || how == MIXPI_TILES_SPLIT_A;
    const int64_t row = b_row ? b_row : 64, b_low = b_row ? 128 : 2048;
    if (part == 0) {
        MIXPI_P(tiles_a)(a + (how == MIXPI_TILES_SPLIT_B ? 0 : 2048), tall);
        MIXPI_P(tiles_b)(b + (how == MIXPI_TILES_SPLIT_A ? 0 : b_low), row, wide);
    } else if (part % 2 == a_first) {
        MIXPI_P(tiles_a)(a + (part == 3 ? 2048 : 0), tall);
    } else {
        MIXPI_P(tiles_b)(b + (part == 3 ? b_low : 0), row, wide);
    }
    MIXPI_TILES_DOTS(MIXPI_AMX_DOT_BF16)
}
MIXPI_V int MIXPI_P(tiles_parts)(const int how) {
    if (how < MIXPI_TILES_SPLIT) return 1;
    return how == MIXPI_TILES_SPLIT || how == MIXPI_TILES_SPLIT_BACK ? 4 : 2;
}

/* The sums begin at 0 or at c. */
MIXPI_V void MIXPI_P(tiles_begin)(const mixpi_tiles *t, const int tall, const int wide) {
    const int64_t line = t->c_row * 4;
    float *c = t->c, *low = c + 16 * t->c_row;
    if (t->more) {
        MIXPI_AMX_LOAD(0, c, line);
        if (wide) MIXPI_AMX_LOAD(1, c + 16, line);
        if (tall) MIXPI_AMX_LOAD(2, low, line);
        if (tall && wide) MIXPI_AMX_LOAD(3, low + 16, line);
    } else {
        MIXPI_AMX_ZERO(0);
        MIXPI_AMX_ZERO(1);
        MIXPI_AMX_ZERO(2);
        MIXPI_AMX_ZERO(3);
    }
}
MIXPI_V void MIXPI_P(tiles_end)(const mixpi_tiles *t, const int tall, const int wide) {
    const int64_t line = t->c_row * 4;
    float *c = t->c, *low = c + 16 * t->c_row;
    MIXPI_AMX_STORE(0, c, line);
    if (wide) MIXPI_AMX_STORE(1, c + 16, line);
    if (tall) MIXPI_AMX_STORE(2, low, line);
    if (tall && wide) MIXPI_AMX_STORE(3, low + 16, line);
}

/* A part of step i of t. */
MIXPI_V void MIXPI_P(tiles_do)(const mixpi_tiles *t, int64_t i, int part, const int tall,
                               const int wide, const int how) {
    const int   splits_b = how >= MIXPI_TILES_SPLIT && how != MIXPI_TILES_SPLIT_A;
    const char *a = (const char *)t->a + i * t->a_step;
    const char *b = (const char *)t->b + i * (splits_b ? 4096 : 2048);
    if (how < MIXPI_TILES_SPLIT) MIXPI_P(tiles_step)(a, t->a_row, t->a_below, b, tall, wide, how);
    else MIXPI_P(tiles_part)(a, b, t->b_row, part, tall, wide, how);
}

MIXPI_V void MIXPI_P(tiles_body)(const mixpi_tiles *from, const int tall, const int wide,
                                 const int how) {
    mixpi_tiles t = *from;      /* a copy stays in registers */
    const char *b = (const char *)t.b + t.steps * 2048;
    uintptr_t ask = t.ask;
    t.b_row = 0;                /* a constant: only attention's steps have tiles side by side */
    MIXPI_P(tiles_begin)(&t, tall, wide);
    for (int64_t i = 0; i < t.steps; i++) {
        MIXPI_P(tiles_do)(&t, i, 0, tall, wide, how);
        if (MIXPI_P(tiles_parts)(how) > 1) MIXPI_P(tiles_do)(&t, i, 1, tall, wide, how);
        if (MIXPI_P(tiles_parts)(how) > 2) MIXPI_P(tiles_do)(&t, i, 2, tall, wide, how);
        if (MIXPI_P(tiles_parts)(how) > 2) MIXPI_P(tiles_do)(&t, i, 3, tall, wide, how);
        uintptr_t next = ask;
        for (int64_t r = t.asks; r > 0; r--, next += t.ask_row)
            MIXPI_PREFETCH_FAR((const char *)next);
        ask += t.ask_step;
    }
    if (how < MIXPI_TILES_SPLIT && t.a_tail)
        MIXPI_P(tiles_step)((const char *)t.a_tail, 64, 1024, b, tall, wide, how);
    MIXPI_P(tiles_end)(&t, tall, wide);
}
#undef MIXPI_TILES_DOTS
#undef MIXPI_TILES_STEP_BY

#define MIXPI_TILES_SUMS(name, how)                                                       \
    MIXPI_K void MIXPI_P(name##_11)(const mixpi_tiles *t)                                 \
    { MIXPI_P(tiles_body)(t, 0, 0, how); }                                                \
    MIXPI_K void MIXPI_P(name##_12)(const mixpi_tiles *t)                                 \
    { MIXPI_P(tiles_body)(t, 0, 1, how); }                                                \
    MIXPI_K void MIXPI_P(name##_21)(const mixpi_tiles *t)                                 \
    { MIXPI_P(tiles_body)(t, 1, 0, how); }                                                \
    MIXPI_K void MIXPI_P(name##_22)(const mixpi_tiles *t)                                 \
    { MIXPI_P(tiles_body)(t, 1, 1, how); }
MIXPI_TILES_SUMS(tiles_bf16, MIXPI_TILES_BF16)
MIXPI_TILES_SUMS(tiles_f16, MIXPI_TILES_F16)
MIXPI_TILES_SUMS(tiles_apart, MIXPI_TILES_SPLIT)
MIXPI_TILES_SUMS(tiles_a_apart, MIXPI_TILES_SPLIT_A)
MIXPI_TILES_SUMS(tiles_b_apart, MIXPI_TILES_SPLIT_B)
MIXPI_TILES_SUMS(tiles_back, MIXPI_TILES_SPLIT_BACK)
#undef MIXPI_TILES_SUMS

/* Computes t's sums. The calling thread has configured its tiles: MIXPI_AMX_CONFIGURE. */
MIXPI_K void MIXPI_P(tiles_sum)(const mixpi_tiles *t) {
    static void (*const sums[6][2][2])(const mixpi_tiles *) = {
        { { MIXPI_P(tiles_bf16_11), MIXPI_P(tiles_bf16_12) },
          { MIXPI_P(tiles_bf16_21), MIXPI_P(tiles_bf16_22) } },
        { { MIXPI_P(tiles_f16_11), MIXPI_P(tiles_f16_12) },
          { MIXPI_P(tiles_f16_21), MIXPI_P(tiles_f16_22) } },
        { { MIXPI_P(tiles_apart_11), MIXPI_P(tiles_apart_12) },
          { MIXPI_P(tiles_apart_21), MIXPI_P(tiles_apart_22) } },
        { { MIXPI_P(tiles_a_apart_11), MIXPI_P(tiles_a_apart_12) },
          { MIXPI_P(tiles_a_apart_21), MIXPI_P(tiles_a_apart_22) } },
        { { MIXPI_P(tiles_b_apart_11), MIXPI_P(tiles_b_apart_12) },
          { MIXPI_P(tiles_b_apart_21), MIXPI_P(tiles_b_apart_22) } },
        { { MIXPI_P(tiles_back_11), MIXPI_P(tiles_back_12) },
          { MIXPI_P(tiles_back_21), MIXPI_P(tiles_back_22) } }
    };
    sums[t->how][t->rows > 16][t->columns > 16](t);
}

/* --- finished sums --- */

/* 16 numbers rounded to bf16, to nearest even: the upper 16 bits are the codes. */
MIXPI_V mixpi_vbits MIXPI_P(tiles_round)(mixpi_v x) {
    const __m512i bits = (__m512i)mixpi_rbits(x);
    const __mmask16 odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000));
    const __mmask16 nan = _mm512_fpclass_ps_mask(x, 0x81);
    __m512i up = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF));
    up = _mm512_mask_add_epi32(up, odd, up, _mm512_set1_epi32(1));
    return (mixpi_vbits)_mm512_mask_or_epi32(up, nan, bits, _mm512_set1_epi32(0x400000));
}

/* 16 numbers as codes of f16, rounded to nearest even. */
MIXPI_V __m256i MIXPI_P(tiles_f16)(mixpi_v x) {
    return _mm512_maskz_cvtps_ph((__mmask16)0xFFFF, x,          /* g++ 12 warns if unmasked */
                                 _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

/* 32 numbers as codes of f16 or bf16, and 16 codes as numbers. */
MIXPI_V __m512i MIXPI_P(tiles_codes)(mixp_dtype to, mixpi_v x, mixpi_v y) {
    if (to == MIXP_BF16)
        return MIXPI_P(tiles_upper)(MIXPI_P(tiles_round)(x), MIXPI_P(tiles_round)(y));
    return _mm512_inserti64x4(_mm512_castsi256_si512(MIXPI_P(tiles_f16)(x)),
                              MIXPI_P(tiles_f16)(y), 1);
}
MIXPI_V mixpi_v MIXPI_P(tiles_numbers)(mixp_dtype from, __m256i codes) {
    if (from == MIXP_F16) return _mm512_cvtph_ps(codes);
    return (mixpi_v)_mm512_slli_epi32(_mm512_cvtepu16_epi32(codes), 16);
}

/* Writes the first n <= 32 numbers of x, y to p, in f32, f16 or bf16. */
MIXPI_V void MIXPI_P(tiles_put)(mixp_dtype to, void *p, mixpi_v x, mixpi_v y, int64_t n) {
    if (to == MIXP_F32 && n >= 32) {
        mixpi_vstore((float *)p, x);
        mixpi_vstore((float *)p + 16, y);
    } else if (to == MIXP_F32) {
        mixpi_vstore_n((float *)p, x, (int)mixpi_min(n, 16));
        if (n > 16) mixpi_vstore_n((float *)p + 16, y, (int)n - 16);
    } else {
        const __m512i codes = MIXPI_P(tiles_codes)(to, x, y);
        if (n >= 32) _mm512_storeu_si512(p, codes);
        else _mm512_mask_storeu_epi16(p, MIXPI_P(tiles_lanes)(n), codes);
    }
}

/* Reads n <= 32 numbers likewise; 0 beyond. */
MIXPI_V void MIXPI_P(tiles_get)(mixp_dtype from, const void *p, mixpi_v *x, mixpi_v *y,
                                int64_t n) {
    if (from == MIXP_F32) {
        *x = mixpi_vload_n((const float *)p, (int)mixpi_min(n, 16));
        *y = n > 16 ? mixpi_vload_n((const float *)p + 16, (int)n - 16) : mixpi_vzero();
    } else {
        __m512i codes = _mm512_maskz_loadu_epi16(MIXPI_P(tiles_lanes)(n), p);
        *x = MIXPI_P(tiles_numbers)(from, _mm512_castsi512_si256(codes));
        *y = MIXPI_P(tiles_numbers)(from, _mm512_extracti64x4_epi64(codes, 1));
    }
}

/* --- a known answer --- */

/* mixpi_amx_known is b(k, column), mixpi_amx_wanted the answer. a(k) is 1, except a(0) = 2^12.
 * Column 0 shows that each k of a meets the same k of b. Column 1 shows that even and odd k have
 * separate sums, rounded to nearest even. Column 2 shows that the next 32 elements begin at 0.
 * Column 3 shows how subnormals are treated. */
static float mixpi_amx_known(int f16, int k, int column) {
    const float tiny = f16 ? 5.9604644775390625e-8f : 5.877471754111438e-39f;
    const float least = f16 ? 6.103515625e-5f : 1.1754943508222875e-38f;
    if (column == 0) return (float)k;
    if (column == 3) {
        if (k == 2) return tiny;
        return k == 32 ? least : 0.0f;
    }
    if (k == 0) return 4096.0f;
    if (column == 1) return k < 4 ? 1.0f : 0.0f;
    return k == 32 || k == 33 ? 1.0f : 0.0f;
}
static float mixpi_amx_wanted(int f16, int column) {
    if (column == 0) return 2016.0f;
    if (column < 3) return 16777218.0f;
    return f16 ? 6.109476089477539e-05f : 1.1754943508222875e-38f;
}

/* x is exact in bf16 and in f16. */
static uint16_t mixpi_amx_code(int f16, float x)
{ return f16 ? mixp_f16_from_f32(x).bits : mixp_bf16_from_f32(x).bits; }

/* Do the tiles return the known answer for 32 rows by 32 columns? The rows are 1, 2, 4 and 8 times
 * the known row. */
MIXPI_LINKED MIXPI_SELDOM MIXPI_TARGET int MIXPI_P(amx_answers)(int f16) {
    uint16_t    a[32][64], b[64][32], packed[2][MIXPI_TILES_STEP];
    float       c[32][32];
    mixpi_tiles t;
    for (int i = 0; i < 32; i++)
        for (int k = 0; k < 64; k++) {
            float one = (float)(1 << i % 4);
            if (k == 0) one *= 4096.0f;
            a[i][k] = mixpi_amx_code(f16, one);
            b[k][i] = mixpi_amx_code(f16, mixpi_amx_known(f16, k, i % 4));
        }
    for (int step = 0; step < 2; step++)
        MIXPI_P(tiles_across)(packed[step], b[32 * step], 32, 32, 32);

    /* a in place. */
    memset(&t, 0, sizeof t);
    t.a = a;
    t.a_row = sizeof a[0];
    t.a_below = sizeof a / 2;
    t.a_step = 64;
    t.b = packed;
    t.steps = 2;
    t.c = c[0];
    t.c_row = 32;
    t.rows = t.columns = 32;
    t.how = f16 ? MIXPI_TILES_F16 : MIXPI_TILES_BF16;

    MIXPI_AMX_CONFIGURE(&mixpi_amx_tiles);
    MIXPI_P(tiles_sum)(&t);
    MIXPI_AMX_RELEASE();
    for (int i = 0; i < 32; i++)
        for (int j = 0; j < 32; j++) {
            float want = mixpi_amx_wanted(f16, j % 4);
            want *= (float)(1 << i % 4);
            if (mixp_bits_of_f32(c[i][j]) != mixp_bits_of_f32(want)) return 0;
        }
    return 1;
}
#endif
