#pragma once
#include "convert.c"
#include "gemm_plan.c"
/* --- gemm ------------------------------------------------------------------------------- *
 *
 * C is cut into blocks; each block is a task. A task packs its part of op(b) into panels of
 * MIXPI_NR columns and widens f16 and bf16 as it packs. A small f32 b is read in place. The task
 * then runs tiles of MIXPI_MR x MIXPI_NR accumulators over the panels. Each element of C is one
 * chain of multiply-adds in increasing k. The chain is cut at places that depend only on k, so
 * blocks and threads do not change the element's bits. Intel's tiles multiply in tiles.c.
 */

/* Each instruction set defines these macros again, with the same text. */

/* The rows of a tile, each with its pointer and its offset: five pointers reach fourteen rows.
 * The rows are written out because some compilers keep an array of accumulators in memory. */
#define MIXPI_TILE_ROWS(X)                                                                \
    X(0, a0, 0) X(1, a0, row) X(2, a0, 2 * row)                                           \
    X(3, a3, 0) X(4, a3, row) X(5, a3, 2 * row)                                           \
    X(6, a6, 0) X(7, a6, row) X(8, a6, 2 * row)                                           \
    X(9, a9, 0) X(10, a9, row) X(11, a9, 2 * row)                                         \
    X(12, a12, 0) X(13, a12, row)
/* The constant test of MIXPI_MR keeps rows that no tile of this pass has out of the code. */
#define MIXPI_TILE_HAS(i) (MIXPI_MR > (i) && rows > (i))
#define MIXPI_TILE_BEGIN(i, a, at) mixpi_v p##i = none, q##i = none;
#define MIXPI_TILE_STEP(i, a, at)                                                         \
    if (MIXPI_TILE_HAS(i)) {                                                              \
        mixpi_v s = mixpi_vset((a)[at]);                                                  \
        p##i = mixpi_vmla(s, b0, p##i);                                                   \
        if (nv > 1) q##i = mixpi_vmla(s, b1, q##i);                                       \
    }
/* The step for pairs: two multiply-adds, first k's, then that of k+1. */
#define MIXPI_TILE_STEP_PAIRS(i, a, at)                                                   \
    if (MIXPI_TILE_HAS(i)) {                                                              \
        __m512bh s = (__m512bh)mixpi_vset((a)[at]);                                       \
        p##i = _mm512_dpbf16_ps(p##i, s, (__m512bh)b0);                                   \
        if (nv > 1) q##i = _mm512_dpbf16_ps(q##i, s, (__m512bh)b1);                       \
    }
#define MIXPI_TILE_STEP_F16(i, a, at)                                                     \
    if (MIXPI_TILE_HAS(i)) p##i = MIXPI_P(f16_step)(p##i, vld1q_dup_f32((a) + (at)), b0);
#define MIXPI_TILE_STEP_BF16(i, a, at)                                                    \
    if (MIXPI_TILE_HAS(i)) p##i = MIXPI_P(bf16_step)(p##i, vld1q_dup_f32((a) + (at)), b0);
#define MIXPI_TILE_ASK(i, a, at)                                                          \
    if (MIXPI_TILE_HAS(i)) {                                                              \
        MIXPI_PREFETCH((const char *)(c + i * t->c_row));                                 \
        if (nv > 1) MIXPI_PREFETCH((const char *)(c + i * t->c_row + 16));                \
    }
/* Packs the step's row of b while it is in registers, for the tiles of further rows. */
#define MIXPI_TILE_KEEP                                                                   \
    if (MIXPI_NV > 1 && keep) {                                                           \
        mixpi_vstore(keep, b0);                                                           \
        if (nv > 1) mixpi_vstore(keep + 16, b1);                                          \
        keep += 16 * nv;                                                                  \
    }
/* Prefetches two lines of the data that later tiles read. Narrower tiles have no instruction to
 * spare for it. */
#define MIXPI_TILE_AHEAD                                                                  \
    if (nv > 1) {                                                                         \
        MIXPI_PREFETCH_FAR((const char *)ask);                                            \
        MIXPI_PREFETCH_FAR((const char *)(ask + t->ask_next));                            \
        ask += t->ask_step;                                                               \
        if (--until == 0) {                                                               \
            until = t->ask_every;                                                         \
            ask += t->ask_jump;                                                           \
        }                                                                                 \
    }
#define MIXPI_TILE_PUT(i, a, at)                                                          \
    if (MIXPI_TILE_HAS(i)) {                                                              \
        p##i = mixpi_vfma(alpha, p##i, b0);                                               \
        if (nv > 1) q##i = mixpi_vfma(alpha, q##i, b1);                                   \
        if (t->add) {                                                                     \
            p##i = mixpi_vadd(p##i, mixpi_vload(c));                                      \
            if (nv > 1) q##i = mixpi_vadd(q##i, mixpi_vload(c + 16));                     \
        }                                                                                 \
        mixpi_vstore(c, p##i);                                                            \
        if (nv > 1) mixpi_vstore(c + 16, q##i);                                           \
        c += t->c_row;                                                                    \
    }
#define MIXPI_TILE_CODE(STEP, LOAD)                                                       \
    const int64_t row = t->a_row, step = t->a_step;                                       \
    const float  *b = t->b;                                                               \
    const float  *a0 = t->a;                                                              \
    const float  *a3 = a0 + (rows > 3 ? 3 * row : 0);                                     \
    const float  *a6 = a3 + (rows > 6 ? 3 * row : 0);                                     \
    const float  *a9 = a6 + (rows > 9 ? 3 * row : 0);                                     \
    const float  *a12 = a9 + (rows > 12 ? 3 * row : 0);                                   \
    float        *c = t->c;                                                               \
    float        *keep = t->keep;                                                         \
    uintptr_t     ask = t->ask;                                                           \
    int64_t       p, until = t->ask_every;                                                \
    const mixpi_v none = mixpi_vzero(), alpha = mixpi_vset(t->alpha);                     \
    mixpi_v       b0, b1 = none;                                                          \
    MIXPI_TILE_ROWS(MIXPI_TILE_ASK)                                                       \
    MIXPI_TILE_ROWS(MIXPI_TILE_BEGIN)                                                     \
    for (p = t->depth; p > 0; p--) {                                                      \
        b0 = LOAD(b);                                                                     \
        if (nv > 1) b1 = LOAD(b + 16);                                                    \
        MIXPI_TILE_KEEP                                                                   \
        MIXPI_TILE_AHEAD                                                                  \
        MIXPI_TILE_ROWS(STEP)                                                             \
        a0 += step;                                                                       \
        a3 += step;                                                                       \
        a6 += step;                                                                       \
        a9 += step;                                                                       \
        a12 += step;                                                                      \
        b += t->b_step;                                                                   \
    }                                                                                     \
    b0 = t->bias ? mixpi_vload(t->bias) : mixpi_vzero();                                  \
    if (nv > 1) b1 = t->bias ? mixpi_vload(t->bias + 16) : mixpi_vzero();                 \
    MIXPI_TILE_ROWS(MIXPI_TILE_PUT)
/* The tile: MIXPI_MR rows by MIXPI_NV vectors, all in registers. MIXPI_PASS is evaluated where
 * the macro is used. */
#define MIXPI_MR (MIXPI_PASS == 2 ? 14 : 6)
#define MIXPI_NV (MIXPI_PASS == 2 ? 2 : 1)
#define MIXPI_NR (16 * MIXPI_NV)

MIXPI_V void MIXPI_P(tile_body)(const mixpi_tile *t, const int rows, const int nv)
{ MIXPI_TILE_CODE(MIXPI_TILE_STEP, mixpi_vload) }

/* One function per height, so no row is computed without use. Two vectors wide: heights 1 to 8, 10,
 * 12 and 14. One vector wide: heights 1 to 7, 12 and 14. Other heights run as two tiles of half
 * the height. */
#define MIXPI_TILE(rows)                                                                  \
    MIXPI_K void MIXPI_P(tile##rows)(const mixpi_tile *t) {                               \
        if (t->cols > 16) MIXPI_P(tile_body)(t, rows, MIXPI_NV);                          \
        else MIXPI_P(tile_body)(t, rows, 1);                                              \
    }
#define MIXPI_TILE_WIDE(rows)                                                             \
    MIXPI_K void MIXPI_P(tile##rows)(const mixpi_tile *t)                                 \
    { MIXPI_P(tile_body)(t, rows, MIXPI_NV); }
MIXPI_TILE(1) MIXPI_TILE(2) MIXPI_TILE(3) MIXPI_TILE(4) MIXPI_TILE(5) MIXPI_TILE(6)
#if MIXPI_MR > 6
MIXPI_TILE(7) MIXPI_TILE_WIDE(8) MIXPI_TILE_WIDE(10) MIXPI_TILE(12) MIXPI_TILE(14)
#endif
#undef MIXPI_TILE
#undef MIXPI_TILE_WIDE

/* The first row of panel i. The m rows are split evenly into panels; tall tiles begin at an even
 * row. */
MIXPI_V int64_t MIXPI_P(panel_row)(int64_t m, int64_t i, int64_t panels) {
    int64_t row = m * i / panels;
    if (MIXPI_MR > 6) row += row & 1;
    return mixpi_min(row, m);
}

/* Multiplies bf16 by bf16 without widening. A pair takes the place of a float: k in the high half,
 * which vdpbf16ps multiplies and adds first, and k+1 in the low half, 0 beyond an odd end. An
 * element is the same chain of multiply-adds as for floats, because a product of two bf16 is exact
 * in f32. */
#if MIXPI_PASS == 2 && MIXPI_BF16
#  if defined(__OPTIMIZE__) && !defined(MIXPI_SANITIZED)
__attribute__((__always_inline__))
#  endif
static __inline__ MIXPI_TARGET_BF16 void MIXPI_P(pairs_body)(const mixpi_tile *t, const int rows,
                                                             const int nv)
{ MIXPI_TILE_CODE(MIXPI_TILE_STEP_PAIRS, mixpi_vload) }

#  define MIXPI_TILE(rows)                                                                \
       static MIXPI_TARGET_BF16 void MIXPI_P(pairs##rows)(const mixpi_tile *t) {          \
           if (t->cols > 16) MIXPI_P(pairs_body)(t, rows, 2);                             \
           else MIXPI_P(pairs_body)(t, rows, 1);                                          \
       }
#  define MIXPI_TILE_WIDE(rows)                                                           \
       static MIXPI_TARGET_BF16 void MIXPI_P(pairs##rows)(const mixpi_tile *t)            \
       { MIXPI_P(pairs_body)(t, rows, 2); }
MIXPI_TILE(1) MIXPI_TILE(2) MIXPI_TILE(3) MIXPI_TILE(4) MIXPI_TILE(5) MIXPI_TILE(6) MIXPI_TILE(7)
MIXPI_TILE_WIDE(8) MIXPI_TILE_WIDE(10) MIXPI_TILE(12) MIXPI_TILE(14)
#  undef MIXPI_TILE
#  undef MIXPI_TILE_WIDE

/* The tile for pairs, of up to 14 rows. */
MIXPI_K void MIXPI_P(tile_pairs)(const mixpi_tile *t, int64_t rows) {
    static void (*const tiles[MIXPI_MR])(const mixpi_tile *) = {
        MIXPI_P(pairs1), MIXPI_P(pairs2),  MIXPI_P(pairs3), MIXPI_P(pairs4),
        MIXPI_P(pairs5), MIXPI_P(pairs6),  MIXPI_P(pairs7), MIXPI_P(pairs8),
        NULL,            MIXPI_P(pairs10), NULL,            MIXPI_P(pairs12),
        NULL,            MIXPI_P(pairs14)
    };
    tiles[rows - 1](t);
}

MIXPI_LINKED int MIXPI_P(bf16_answers)(void)
{ return mixpi_pairs_answer(MIXPI_P(pairs1), MIXPI_PAIRS_BF16); }

/* 16 pairs of neighbours from p on; 0 beyond the first `left` elements. */
MIXPI_V mixpi_v MIXPI_P(pairs_at)(const uint16_t *p, int64_t left) {
    __mmask32 there = left >= 32 ? 0xFFFFFFFFu : (1u << left) - 1u;
    return (mixpi_v)_mm512_rol_epi32(_mm512_maskz_loadu_epi16(there, p), 16);
}

/* 16 pairs (p[j], q[j]); 0 beyond the first `left`. q NULL = 0. */
MIXPI_V mixpi_v MIXPI_P(pairs_down)(const uint16_t *p, const uint16_t *q, int64_t left) {
    __mmask16 there = (__mmask16)(left >= 16 ? 0xFFFFu : (1u << left) - 1u);
    __m512i   high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, p));
    __m512i   low = _mm512_setzero_si512();
    if (q) low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, q));
    return (mixpi_v)_mm512_or_si512(_mm512_slli_epi32(high, 16), low);
}
#endif

#if MIXPI_PASS == 3 && MIXPI_ARM_PAIRS
/* The tile for pairs on Arm. FMLAL and BFMLAL multiply an element by one half of s and add, as the
 * f32 multiply-add does: rounded once, subnormals kept. They are inline assembly because compilers
 * name their intrinsics differently. */
#  if defined(__clang__)
#    define MIXPI_TARGET_LONG __attribute__((__target__("fullfp16,fp16fml,bf16")))
#  else
#    define MIXPI_TARGET_LONG                                                             \
         __attribute__((__target__("arch=armv8.2-a+fp16+fp16fml+bf16")))
#  endif
#  if defined(__OPTIMIZE__) && !defined(MIXPI_SANITIZED)
#    define MIXPI_V_LONG                                                                  \
         static __inline__ MIXPI_TARGET_LONG __attribute__((__always_inline__, __unused__))
#  else
#    define MIXPI_V_LONG static __inline__ MIXPI_TARGET_LONG __attribute__((__unused__))
#  endif
/* Steps for the columns from 0, 4, 8 and 12 on; b0 to b3 are the registers of b that hold them. */
#  define MIXPI_LONG(name, form, half, i, from)                                           \
       __asm__(name " %0.4s, %1." form ", %2.h[" half "]"                                 \
               : "+w"(sum.r[i]) : "w"(b.r[from]), "x"(s))
#  define MIXPI_LONGS(even, odd, form, half, b0, b1, b2, b3)                              \
       MIXPI_LONG(even, form, half, 0, b0);                                               \
       MIXPI_LONG(odd, form, half, 1, b1);                                                \
       MIXPI_LONG(even, form, half, 2, b2);                                               \
       MIXPI_LONG(odd, form, half, 3, b3)

/* Loads 16 pairs: columns 0 to 7 of k, the same of k+1, then columns 8 to 15 likewise. */
MIXPI_V_LONG mixpi_v MIXPI_P(load_apart)(const float *b) {
    const uint16_t *p = (const uint16_t *)(const void *)b;
    uint16x8x2_t    low = vld2q_u16(p);
    uint16x8x2_t    high = vld2q_u16(p + 16);
    mixpi_v         r;
    r.r[0] = vreinterpretq_f32_u16(low.val[0]);
    r.r[1] = vreinterpretq_f32_u16(low.val[1]);
    r.r[2] = vreinterpretq_f32_u16(high.val[0]);
    r.r[3] = vreinterpretq_f32_u16(high.val[1]);
    return r;
}
MIXPI_V_LONG mixpi_v MIXPI_P(f16_step)(mixpi_v sum, float32x4_t s, mixpi_v b) {
    MIXPI_LONGS("fmlal", "fmlal2", "4h", "0", 0, 0, 2, 2);
    MIXPI_LONGS("fmlal", "fmlal2", "4h", "1", 1, 1, 3, 3);
    return sum;
}
MIXPI_V_LONG mixpi_v MIXPI_P(bf16_step)(mixpi_v sum, float32x4_t s, mixpi_v b) {
    MIXPI_LONGS("bfmlalb", "bfmlalb", "8h", "0", 0, 1, 2, 3);
    MIXPI_LONGS("bfmlalt", "bfmlalt", "8h", "1", 0, 1, 2, 3);
    return sum;
}

MIXPI_V_LONG void MIXPI_P(f16_body)(const mixpi_tile *t, const int rows, const int nv)
{ MIXPI_TILE_CODE(MIXPI_TILE_STEP_F16, MIXPI_P(load_apart)) }
MIXPI_V_LONG void MIXPI_P(bf16_body)(const mixpi_tile *t, const int rows, const int nv)
{ MIXPI_TILE_CODE(MIXPI_TILE_STEP_BF16, mixpi_vload) }

#  define MIXPI_TILE(rows)                                                                \
       static MIXPI_TARGET_LONG void MIXPI_P(f16_##rows)(const mixpi_tile *t)             \
       { MIXPI_P(f16_body)(t, rows, 1); }                                                 \
       static MIXPI_TARGET_LONG void MIXPI_P(bf16_##rows)(const mixpi_tile *t)            \
       { MIXPI_P(bf16_body)(t, rows, 1); }
MIXPI_TILE(1) MIXPI_TILE(2) MIXPI_TILE(3) MIXPI_TILE(4) MIXPI_TILE(5) MIXPI_TILE(6)
#  undef MIXPI_TILE
#  undef MIXPI_LONG
#  undef MIXPI_LONGS

MIXPI_K void MIXPI_P(tile_pairs)(const mixpi_tile *t, int64_t rows) {
    static void (*const f16[MIXPI_MR])(const mixpi_tile *) = {
        MIXPI_P(f16_1), MIXPI_P(f16_2),
        MIXPI_P(f16_3), MIXPI_P(f16_4),
        MIXPI_P(f16_5), MIXPI_P(f16_6)
    };
    static void (*const bf16[MIXPI_MR])(const mixpi_tile *) = {
        MIXPI_P(bf16_1), MIXPI_P(bf16_2),
        MIXPI_P(bf16_3), MIXPI_P(bf16_4),
        MIXPI_P(bf16_5), MIXPI_P(bf16_6)
    };
    if (t->pairs == MIXPI_PAIRS_F16) f16[rows - 1](t);
    else bf16[rows - 1](t);
}

MIXPI_LINKED int MIXPI_P(f16_answers)(void)
{ return mixpi_pairs_answer(MIXPI_P(f16_1), MIXPI_PAIRS_F16); }
MIXPI_LINKED int MIXPI_P(bf16_answers)(void)
{ return mixpi_pairs_answer(MIXPI_P(bf16_1), MIXPI_PAIRS_BF16); }

/* 16 pairs of neighbours from p on; 0 beyond the first `left` elements. */
MIXPI_V mixpi_v MIXPI_P(pairs_at)(const uint16_t *p, int64_t left) {
    uint16_t some[32];
    mixpi_v  r;
    if (left < 32) {
        memset(some, 0, sizeof some);
        memcpy(some, p, (size_t)left * sizeof *p);
        p = some;
    }
    memcpy(&r, p, sizeof r);
    return r;
}

/* 16 pairs (p[j], q[j]); 0 beyond the first `left`. q NULL = 0. */
MIXPI_V mixpi_v MIXPI_P(pairs_down)(const uint16_t *p, const uint16_t *q, int64_t left) {
    uint16_t first[16], second[16];
    size_t   bytes = sizeof first;
    mixpi_v  r;
    if (left < 16) bytes = (size_t)left * sizeof *p;
    memset(first, 0, sizeof first);
    memset(second, 0, sizeof second);
    memcpy(first, p, bytes);
    if (q) memcpy(second, q, bytes);
    for (int i = 0; i < 2; i++) {
        uint16x8_t x = vld1q_u16(first + 8 * i);
        uint16x8_t y = vld1q_u16(second + 8 * i);
        r.r[2 * i] = vreinterpretq_f32_u16(vzip1q_u16(x, y));
        r.r[2 * i + 1] = vreinterpretq_f32_u16(vzip2q_u16(x, y));
    }
    return r;
}
#endif

#define MIXPI_PAIRED ((MIXPI_PASS == 2 && MIXPI_BF16) || (MIXPI_PASS == 3 && MIXPI_ARM_PAIRS))

/* Runs a tile whose height has a function. */
MIXPI_K void MIXPI_P(tile_one)(const mixpi_tile *t, int64_t rows) {
    static void (*const tiles[MIXPI_MR])(const mixpi_tile *) = {
        MIXPI_P(tile1), MIXPI_P(tile2), MIXPI_P(tile3), MIXPI_P(tile4), MIXPI_P(tile5),
        MIXPI_P(tile6),
#if MIXPI_MR > 6
        MIXPI_P(tile7), MIXPI_P(tile8), NULL, MIXPI_P(tile10), NULL, MIXPI_P(tile12), NULL,
        MIXPI_P(tile14),
#endif
    };
#if MIXPI_PAIRED
    if (t->pairs) {
        MIXPI_P(tile_pairs)(t, rows);
        return;
    }
#endif
    tiles[rows - 1](t);
}

/* Runs a tile of any height and writes directly to c. cols is whole vectors. */
MIXPI_K void MIXPI_P(tile_whole)(const mixpi_tile *t, int64_t rows) {
    const int64_t upper = (rows + 1) / 2;
    if (rows <= 7 || (rows % 2 == 0 && (rows >= 12 || t->cols > 16))) {
        MIXPI_P(tile_one)(t, rows);
        return;
    }
    MIXPI_P(tile_one)(t, upper);
    mixpi_tile lower = *t;
    lower.a += upper * t->a_row;
    lower.c += upper * t->c_row;
    lower.keep = NULL;
    MIXPI_P(tile_one)(&lower, rows - upper);
}

/* Runs any tile. If cols is not whole vectors, the tile writes to a copy, then to c. */
MIXPI_K void MIXPI_P(tile_run)(const mixpi_tile *t, int64_t rows) {
    if (t->cols % 16 == 0) {
        MIXPI_P(tile_whole)(t, rows);
        return;
    }

    float      copy[MIXPI_MR * MIXPI_NR], *from = copy, *c = t->c;
    mixpi_tile whole = *t;
    whole.c = copy;
    whole.c_row = MIXPI_NR;
    whole.add = 0;
    MIXPI_P(tile_whole)(&whole, rows);
    for (int64_t i = 0; i < rows; i++, c += t->c_row, from += MIXPI_NR)
        for (int j = 0; j < t->cols; j += 16) {
            const int n = (int)mixpi_min(16, t->cols - j);
            mixpi_v sums = mixpi_vload(from + j);
            if (t->add) sums = mixpi_vadd(sums, mixpi_vload_n(c + j, n));
            mixpi_vstore_n(c + j, sums, n);
        }
}

/* transpose4 makes four rows from four columns of src, as many rows of src as fill a register. */
#if MIXPI_PASS == 2
/* Four floats of each of four rows; the rows are 4 * ld floats apart. */
MIXPI_V __m512 MIXPI_P(lanes)(const float *s, int64_t ld) {
    __m512 r = _mm512_castps128_ps512(_mm_loadu_ps(s));
    r = _mm512_insertf32x4(r, _mm_loadu_ps(s + 4 * ld), 1);
    r = _mm512_insertf32x4(r, _mm_loadu_ps(s + 8 * ld), 2);
    return _mm512_insertf32x4(r, _mm_loadu_ps(s + 12 * ld), 3);
}
/* (The masked forms, because g++ 12 warns about the plain ones.) */
MIXPI_V __m512 MIXPI_P(unpack_lo)(__m512 a, __m512 b)
{ return _mm512_maskz_unpacklo_ps(0xFFFF, a, b); }
MIXPI_V __m512 MIXPI_P(unpack_hi)(__m512 a, __m512 b)
{ return _mm512_maskz_unpackhi_ps(0xFFFF, a, b); }
MIXPI_V void MIXPI_P(transpose4)(float *dst, int64_t ldd, const float *src, int64_t ld) {
    __m512 a = MIXPI_P(lanes)(src, ld), b = MIXPI_P(lanes)(src + ld, ld);
    __m512 c = MIXPI_P(lanes)(src + 2 * ld, ld), d = MIXPI_P(lanes)(src + 3 * ld, ld);
    __m512 ab = MIXPI_P(unpack_lo)(a, b), cd = MIXPI_P(unpack_lo)(c, d);
    _mm512_storeu_ps(dst, _mm512_shuffle_ps(ab, cd, 0x44));
    _mm512_storeu_ps(dst + ldd, _mm512_shuffle_ps(ab, cd, 0xEE));
    ab = MIXPI_P(unpack_hi)(a, b);
    cd = MIXPI_P(unpack_hi)(c, d);
    _mm512_storeu_ps(dst + 2 * ldd, _mm512_shuffle_ps(ab, cd, 0x44));
    _mm512_storeu_ps(dst + 3 * ldd, _mm512_shuffle_ps(ab, cd, 0xEE));
}
#elif MIXPI_PASS == 1
/* Four floats of each of two rows; the rows are 4 * ld floats apart. */
MIXPI_V __m256 MIXPI_P(lanes)(const float *s, int64_t ld) {
    __m256 r = _mm256_castps128_ps256(_mm_loadu_ps(s));
    return _mm256_insertf128_ps(r, _mm_loadu_ps(s + 4 * ld), 1);
}
MIXPI_V void MIXPI_P(transpose4)(float *dst, int64_t ldd, const float *src, int64_t ld) {
    __m256 a = MIXPI_P(lanes)(src, ld), b = MIXPI_P(lanes)(src + ld, ld);
    __m256 c = MIXPI_P(lanes)(src + 2 * ld, ld), d = MIXPI_P(lanes)(src + 3 * ld, ld);
    __m256 ab = _mm256_unpacklo_ps(a, b), cd = _mm256_unpacklo_ps(c, d);
    _mm256_storeu_ps(dst, _mm256_shuffle_ps(ab, cd, 0x44));
    _mm256_storeu_ps(dst + ldd, _mm256_shuffle_ps(ab, cd, 0xEE));
    ab = _mm256_unpackhi_ps(a, b);
    cd = _mm256_unpackhi_ps(c, d);
    _mm256_storeu_ps(dst + 2 * ldd, _mm256_shuffle_ps(ab, cd, 0x44));
    _mm256_storeu_ps(dst + 3 * ldd, _mm256_shuffle_ps(ab, cd, 0xEE));
}
#endif

/* Transposes 16 by 16 floats: dst[p * ldd + j] = src[j * ld + p]. */
MIXPI_F void MIXPI_P(transpose16)(float *dst, int64_t ldd, const float *src, int64_t ld) {
#if MIXPI_PASS == 1 || MIXPI_PASS == 2
    const int lanes = MIXPI_PASS == 2 ? 16 : 8;     /* of a register */
    for (int row = 0; row < 16; row += lanes)
        for (int column = 0; column < 16; column += 4)
            MIXPI_P(transpose4)
            (dst + row + column * ldd, ldd, src + row * ld + column, ld);
#else
    for (int p = 0; p < 16; p++)
        for (int j = 0; j < 16; j++) dst[p * ldd + j] = src[j * ld + p];
#endif
}

/* Copies n floats from src to dst: whole vectors, then the rest. */
MIXPI_V void MIXPI_P(copy_floats)(float *dst, const float *src, int n) {
    int j;
    for (j = 0; j + 16 <= n; j += 16) mixpi_vstore(dst + j, mixpi_vload(src + j));
    if (j < n) mixpi_vstore_n(dst + j, mixpi_vload_n(src + j, n - j), n - j);
}

/* dst[i * ldd + j] = element j of row i, as f32, for j < n <= MIXPI_BLOCK. Rows are short: calling
 * memcpy would take longer than the copy, and the hardware prefetcher cannot predict the start of
 * the next row. */
MIXPI_K void MIXPI_P(widen_rows)(float *dst, int64_t ldd, mixpi_source from, int64_t rows,
                                 int n) {
    for (; rows > 0; rows--, dst += ldd, from.first += from.ld) {
        const float *row = MIXPI_P(read)(from.a, from.first, n, dst);
        if (n > 128) MIXPI_P(ask)(from.a, from.first + 6 * from.ld, n);
        if (row != dst) MIXPI_P(copy_floats)(dst, row, n);
    }
}

/* Loads rows that are summed along: each gives n floats, or n / 2 pairs, rounded up. */
MIXPI_K void MIXPI_P(load_along)(float *dst, int64_t ldd, mixpi_source from, int64_t rows, int n,
                                 int pairs) {
#if MIXPI_PAIRED
    for (; pairs && rows > 0; rows--, dst += ldd, from.first += from.ld) {
        const uint16_t *row = (const uint16_t *)from.a.data + from.first;
        int j;
        if (n > 128) MIXPI_P(ask)(from.a, from.first + 6 * from.ld, n);
        for (j = 0; j < n; j += 32)
            mixpi_vstore(dst + j / 2, MIXPI_P(pairs_at)(row + j, n - j));
    }
#else
    (void)pairs;
#endif
    if (rows > 0) MIXPI_P(widen_rows)(dst, ldd, from, rows, n);
}

/* Loads rows that are summed across: each gives n floats, or each two rows give n pairs. */
MIXPI_K void MIXPI_P(load_across)(float *dst, int64_t ldd, mixpi_source from, int64_t rows, int n,
                                  int pairs) {
#if MIXPI_PAIRED
    for (; pairs && rows > 0; rows -= 2, dst += ldd, from.first += 2 * from.ld) {
        const uint16_t *row = (const uint16_t *)from.a.data + from.first;
        const uint16_t *next = rows > 1 ? row + from.ld : NULL;
        int j;
        MIXPI_P(ask)(from.a, from.first + 8 * from.ld, n);
        if (rows > 9) MIXPI_P(ask)(from.a, from.first + 9 * from.ld, n);
        for (j = 0; j < n; j += 16)
            mixpi_vstore(dst + j,
                         MIXPI_P(pairs_down)(row + j, next ? next + j : NULL, n - j));
    }
#else
    (void)pairs;
#endif
    if (rows > 0) MIXPI_P(widen_rows)(dst, ldd, from, rows, n);
}

/* Loads n columns, from j on, of rows of an indexed b. */
MIXPI_K void MIXPI_P(load_indexed)(float *dst, int64_t ldd, const mixpi_gemm_block *s, int64_t row,
                                   int64_t rows, int64_t j, int64_t n) {
    const mixp_indexed *b = &s->job->indexed->b;
    int64_t run = j / b->run, at = j % b->run, m;
    for (; n > 0; n -= m, dst += m, run++, at = 0) {
        const float *from = (const float *)s->job->g->b.data + s->b_at + b->runs[run] + at;
        m = mixpi_min(n, b->run - at);
        for (int64_t i = 0; i < rows; i++)
            MIXPI_P(copy_floats)(dst + i * ldd, from + b->rows[row + i], (int)m);
    }
}

/* Adds whole rows, from i on, to an indexed c, row after row. */
MIXPI_K void MIXPI_P(add_indexed)(const mixpi_gemm_block *s, int64_t i, int64_t rows,
                                  const float *part) {
    const mixp_indexed *c = &s->job->indexed->c;
    const int64_t n = s->job->g->n;
    for (; rows > 0; rows--, i++, part += s->job->cols) {
        float *to = (float *)s->job->g->c.data + s->c_at + c->rows[i];
        for (int64_t j = 0, run = 0; j < n; j += c->run, run++)
            MIXPI_P(copy_floats_by)(to + c->runs[run], 1, part + j, 1,
                                    mixpi_min(c->run, n - j), 1);
    }
}

/* The panel that holds column j of n columns. */
MIXPI_V mixpi_panel MIXPI_P(panel_of)(int64_t j, int64_t n) {
    mixpi_panel p;
    p.first = j / MIXPI_NR * MIXPI_NR;
    p.wide = n - p.first > 16 ? MIXPI_NR : 16;
    return p;
}

/* Packs the panel of b[p0 .. p0+depth] that begins at column j of the block. Columns beyond n1 are
 * zero. */
MIXPI_K void MIXPI_P(pack_straight)(const mixpi_gemm_block *s, int64_t j) {
    const mixp_gemm_args *g = s->job->g;
    mixpi_panel to = MIXPI_P(panel_of)(j, s->n1 - s->n0);
    int64_t n = mixpi_min(to.wide, s->n1 - s->n0 - j);
    mixpi_source from =
        mixpi_source_of(g->b, s->b_at + s->p0 * g->ldb + s->n0 + j, g->ldb);
    float  *dst = s->b_pack + j * s->steps;
    if (n % 16) memset(dst, 0, (size_t)(s->steps * to.wide) * sizeof(float));
    if (s->job->b_indexed)
        MIXPI_P(load_indexed)(dst, to.wide, s, s->p0, s->depth, s->n0 + j, n);
    else MIXPI_P(load_across)(dst, to.wide, from, s->depth, (int)n, s->job->pairs);
}

/* Packs the same panel if op(b) = b': from b[n0 + j .., p0 .. p0+depth], 16 rows of b at a time. 16
 * rows of f32 are read in place if the depth is a multiple of 16. */
MIXPI_K void MIXPI_P(pack_transposed)(const mixpi_gemm_block *s, int64_t j) {
    const mixp_gemm_args *g = s->job->g;
    int64_t n = s->n1 - s->n0, strip = s->job->depth + MIXPI_PAD, i, p;
    int64_t end = mixpi_min(j + MIXPI_NR, n);
    for (; j < end; j += 16) {
        mixpi_panel to = MIXPI_P(panel_of)(j, n);
        int64_t at = s->b_at + (s->n0 + j) * g->ldb + s->p0, rows = mixpi_min(16, n - j);
        int     whole = rows == 16 && s->depth % 16 == 0;
        int     here = whole && g->b.dtype == MIXP_F32 && !s->job->b_indexed;
        int64_t ld = here ? g->ldb : strip;
        const float *src = here ? (const float *)g->b.data + at : s->strip;
        float  *dst = s->b_pack + to.first * s->steps + j - to.first;
        if (!here) {
            size_t bytes = (size_t)strip * sizeof(float);
            if (s->job->b_indexed)
                MIXPI_P(load_indexed)(s->strip, strip, s, s->n0 + j, rows, s->p0, s->depth);
            else
                MIXPI_P(load_along)(s->strip, strip, mixpi_source_of(g->b, at, g->ldb), rows,
                                    (int)s->depth, s->job->pairs);
            for (i = rows; i < 16; i++) memset(s->strip + i * strip, 0, bytes);
        }

        /* Writes up to 15 rows too many, into the next panel, which is packed later. */
        for (p = 0; p < s->steps; p += 16) {
            for (i = 16; here && i < 32; i++) MIXPI_PREFETCH(src + i * ld + p);
            MIXPI_P(transpose16)(dst + p * to.wide, to.wide, src + p, ld);
        }
    }
}

/* Sets the tile's strides for op(a)[i .. i+rows, p0 .. p0+depth] and returns its first element.
 * f32 rows are read in place, unless lda is a multiple of 1024; so are the columns of an f32 a that
 * fits in L1. Everything else is packed. */
MIXPI_K const float *MIXPI_P(pack_rows)(const mixpi_gemm_block *s, int64_t i,
                                        int64_t rows, mixpi_tile *t) {
    const mixp_gemm_args *g = s->job->g;

    if (g->trans_a) {
        int64_t at = s->a_at + s->p0 * g->lda + i;
        t->a_row = 1;
        t->a_step = g->lda;
        if (g->a.dtype == MIXP_F32 && g->k * g->lda <= 1 << 13)
            return (const float *)g->a.data + at;
        t->a_step = s->job->panels * s->job->tall;
        MIXPI_P(load_across)
        (s->a_pack, t->a_step, mixpi_source_of(g->a, at, g->lda), s->depth, (int)rows,
         s->job->pairs);
        return s->a_pack;
    }

    /* Rows are read in place where they can be. */
    t->a_step = 1;
    if (g->a.dtype == MIXP_F32 && g->lda % 1024) {
        t->a_row = g->lda;
        return (const float *)g->a.data + s->a_at + i * g->lda + s->p0;
    }
    t->a_row = s->job->depth + MIXPI_PAD;
    MIXPI_P(load_along)(s->a_pack, t->a_row,
                        mixpi_source_of(g->a, s->a_at + i * g->lda + s->p0, g->lda), rows,
                        (int)s->depth, s->job->pairs);
    return s->a_pack;
}

/* Do tiles read b in place? They do if b is whole vectors of f32, is small enough to stay in the
 * cache, and its rows do not all fall into the same cache sets. */
MIXPI_V int MIXPI_P(b_in_place)(const mixpi_gemm_block *s) {
    const mixp_gemm_args *g = s->job->g;
    return !g->trans_b && g->b.dtype == MIXP_F32 && (s->n1 - s->n0) % 16 == 0 &&
           g->ldb % 1024 && g->k * g->n <= 1 << 19 && !s->job->b_indexed;
}

MIXPI_V uintptr_t MIXPI_P(line_of)(mixp_in a, int64_t i)
{ return (uintptr_t)a.data + (uintptr_t)(i * MIXPI_P(size)(a.dtype)); }

/* The tile reads b in place, from column j of the block on. */
MIXPI_V void MIXPI_P(tile_b_there)(const mixpi_gemm_block *s, mixpi_tile *t, int64_t j) {
    const mixp_gemm_args *g = s->job->g;
    t->b = (const float *)g->b.data + s->b_at + s->p0 * g->ldb + s->n0 + j;
    t->b_step = g->ldb;
}

/* The tile's steps prefetch the next panel of b, row after row. If b is transposed, they prefetch
 * two of its rows at a time, line after line. */
MIXPI_V void MIXPI_P(ask_columns)(const mixpi_gemm_block *s, mixpi_tile *t, int64_t j) {
    const mixp_gemm_args *g = s->job->g;
    int64_t size = MIXPI_P(size)(g->b.dtype);
    int64_t lines = mixpi_ceil_div(s->depth * size, 64);
    int64_t row = g->ldb * size;
    int64_t column = s->n0 + j + MIXPI_NR;
    int64_t at = s->b_at + s->p0 * g->ldb + column;
    if (column >= s->n1) return;
    if (g->trans_b) {
        at = s->b_at + column * g->ldb + s->p0;
        t->ask = MIXPI_P(line_of)(g->b, at);
        t->ask_next = (uintptr_t)(16 * row);
        t->ask_step = 64;
        t->ask_every = lines;
        t->ask_jump = (uintptr_t)(row - 64 * lines);
        return;
    }

    /* Row after row; two rows at a time where steps take pairs. */
    t->ask = MIXPI_P(line_of)(g->b, at);
    t->ask_next = 64;
    t->ask_step = (uintptr_t)row;
    if (!s->job->pairs) return;
    t->ask_next = (uintptr_t)row;
    t->ask_step = (uintptr_t)(2 * row);
}

/* The tile's steps prefetch one or two of the rows of a that follow its own. */
MIXPI_V void MIXPI_P(ask_rows)(mixpi_gemm_block *s, mixpi_tile *t) {
    t->ask = s->ask;
    t->ask_next = s->ask_next;
    t->ask_step = s->ask_step;
    s->ask += MIXPI_NV * s->ask_next;
    s->asks -= MIXPI_NV;
}

/* The panel of op(b) at column j, for the first rows of a block: packs the panel for all rows. If
 * the first tile can read b in place, that tile packs b while it reads, and only if `more` rows
 * follow. */
MIXPI_K void MIXPI_P(tile_b_first)(const mixpi_gemm_block *s, mixpi_tile *t, int64_t j,
                                   int more) {
    const mixp_gemm_args *g = s->job->g;
    const int indexed = s->job->b_indexed;
    if (!indexed) MIXPI_P(ask_columns)(s, t, j);
    if (MIXPI_NV > 1 && !g->trans_b && g->b.dtype == MIXP_F32 && t->cols % 16 == 0 && !indexed) {
        if (more) t->keep = s->b_pack + j * s->steps;
        MIXPI_P(tile_b_there)(s, t, j);
        return;
    }
    if (g->trans_b) MIXPI_P(pack_transposed)(s, j);
    else MIXPI_P(pack_straight)(s, j);
}

/* Tells the tiles of the rows from i on where op(b) from column j on is, and what to prefetch. */
MIXPI_K void MIXPI_P(tile_b)(mixpi_gemm_block *s, mixpi_tile *t, int64_t i, int64_t j,
                             int more) {
    t->ask = (uintptr_t)t->a;
    t->ask_next = t->ask_step = 0;
    t->ask_every = 0;
    t->ask_jump = 0;
    t->keep = NULL;
    t->b = s->b_pack + j * s->steps;
    t->b_step = MIXPI_P(panel_of)(j, s->n1 - s->n0).wide;
    if (MIXPI_P(b_in_place)(s)) MIXPI_P(tile_b_there)(s, t, j);
    else if (i == s->m0) MIXPI_P(tile_b_first)(s, t, j, more);
    if (MIXPI_NV > 1 && !t->ask_step && s->asks > 0) MIXPI_P(ask_rows)(s, t);
}

/* Runs the tiles of rows [i, i+rows), rows <= job->tall. If c is not f32, its sums wait in `part`:
 * the sums of the entire block if k takes several passes, otherwise of these rows only. */
MIXPI_K void MIXPI_P(gemm_panel)(mixpi_gemm_block *s, mixpi_tile *t, int64_t i,
                                 int64_t rows) {
    const mixpi_gemm_job *job = s->job;
    const mixp_gemm_args *g = job->g;
    int64_t n = s->n1 - s->n0, at = s->c_at + i * g->ldc + s->n0, j;
    int     first = s->p0 == 0, last = s->p0 + s->depth == g->k;
    float  *part = s->part + (first && last ? 0 : (i - s->m0) * job->cols);
    float  *c = job->low ? part : (float *)g->c.data + at;
    t->add = !first || (g->c.accumulate && !job->low);
    t->c_row = job->low ? job->cols : g->ldc;

    /* Tile after tile; the bias joins the first pass. */
    for (j = 0; j < n; j += MIXPI_NR) {
        t->cols = (int)mixpi_min(MIXPI_NR, n - j);
        t->bias = first && g->bias.data ? s->bias + j : NULL;
        t->c = c + j;
        MIXPI_P(tile_b)(s, t, i, j, i + rows < s->m1);
        MIXPI_P(tile_run)(t, rows);
    }

    /* The last pass rounds the sums. */
    if (!job->low || !last) return;
    if (job->c_indexed) {
        MIXPI_P(add_indexed)(s, i, rows, part);
        return;
    }
    for (; rows > 0; rows--, part += job->cols, at += g->ldc)
        MIXPI_P(write)(g->c, at, n, part);
}

/* Plans the prefetch of the rows from `row` on, which follow the current ones. At the block's end
 * these are the block's first rows in the next pass. After the last pass they are the same rows
 * from k = 0 on, because another block may begin with them. */
MIXPI_V void MIXPI_P(ask_after)(mixpi_gemm_block *s, int64_t row, int64_t rows) {
    const mixp_gemm_args *g = s->job->g;
    int64_t size = MIXPI_P(size)(g->a.dtype);
    int64_t p = s->p0;

    if (row == s->m1) {
        row = s->m0;
        p += s->depth;
        if (p == g->k) p = 0;
    }

    /* A row at a time; of a', a line across the rows at a time. */
    int64_t at = s->a_at + row * g->lda + p;
    s->ask_next = (uintptr_t)(g->lda * size);
    s->ask_step = (uintptr_t)size;
    s->asks = rows;
    if (g->trans_a) {
        at = s->a_at + p * g->lda + row;
        s->ask_step = s->ask_next;
        s->ask_next = 64;
        s->asks = rows * size / 64 + 1;
    }
    s->ask = MIXPI_P(line_of)(g->a, at);
    if (s->job->pairs) s->ask_step *= 2;
}

/* Runs one pass over a block: a panel of rows at a time, or job->panels panels if a' is packed.
 * The rows are split evenly into panels. */
MIXPI_K void MIXPI_P(gemm_pass)(mixpi_gemm_block *s) {
    int64_t m = s->m1 - s->m0, at_once = s->job->g->trans_a ? s->job->panels : 1, i, j;
    int64_t panels = mixpi_ceil_div(m, s->job->tall);
    mixpi_tile t;
    t.depth = s->steps;
    t.pairs = s->job->pairs;
    t.alpha = mixpi_gemm_alpha(s->job->g);

    /* Pack panels, plan the prefetch of those that follow, and multiply. */
    for (i = 0; i < panels; i += at_once) {
        int64_t end = mixpi_min(i + at_once, panels), first = MIXPI_P(panel_row)(m, i, panels);
        int64_t next = MIXPI_P(panel_row)(m, end, panels);
        const float *a = MIXPI_P(pack_rows)(s, s->m0 + first, next - first, &t);
        MIXPI_P(ask_after)(s, s->m0 + next, next - first);
        for (j = i; j < end; j++) {
            int64_t row = MIXPI_P(panel_row)(m, j, panels);
            t.a = a + (row - first) * t.a_row;
            MIXPI_P(gemm_panel)
            (s, &t, s->m0 + row, MIXPI_P(panel_row)(m, j + 1, panels) - row);
        }
    }
}

MIXPI_K void MIXPI_P(gemm_task)(void *arg, int64_t index, int worker) {
    const mixpi_gemm_job *job = (const mixpi_gemm_job *)arg;
    const mixp_gemm_args *g = job->g;
    mixpi_gemm_block s;
    mixpi_gemm_block_of(&s, job, index);

    (void)mixpi_gemm_carve(&s, mixpi_slice(&job->slices, worker));
    if (g->bias.data)
        MIXPI_P(widen_rows)
        (s.bias, 0, mixpi_source_of(g->bias, s.n0, 0), 1, (int)(s.n1 - s.n0));

    /* A pass for each part of k that packed memory has room for. */
    for (; s.p0 == 0 || s.p0 < g->k; s.p0 += job->depth) {
        s.depth = mixpi_min(job->depth, g->k - s.p0);
        s.steps = mixpi_pair_steps(job->pairs, s.depth);
        MIXPI_P(gemm_pass)(&s);
    }
}

#define MIXPI_SUM_LANES (MIXPI_PASS == 0 ? 1 : 16)
static const mixpi_gemm_shape MIXPI_P(gemm_shape) =
    { MIXPI_MR, MIXPI_NR, MIXPI_SUM_LANES, MIXPI_P(gemm_task) };

MIXPI_K mixp_result MIXPI_P(gemm)(const mixp_exec *x, const mixp_gemm_args *g)
{ return mixpi_cpu_gemm(x, g, mixpi_no_pairs, &MIXPI_P(gemm_shape), NULL); }

/* Without this kernel a program's BLAS multiplies copies. */
#if defined(MIXPREC_CBLAS)
#  define MIXPI_INDEXED(name) NULL
#else
#  define MIXPI_INDEXED(name) MIXPI_P(name)
MIXPI_K mixp_result MIXPI_P(gemm_indexed)(const mixp_exec *x, const mixp_gemm_indexed_args *k) {
    const int b = k->b.rows != NULL, c = k->c.rows != NULL;
    if ((b && k->gemm.b.dtype != MIXP_F32) || (c && k->gemm.c.dtype != MIXP_F32))
        return MIXP_ERR_DTYPE;
    if ((b && k->b.run < 1) || (c && (k->c.run < 1 || k->taps < 1))) return MIXP_ERR_ARGUMENT;
    if (c && k->gemm.bias.data) return MIXP_ERR_ARGUMENT;
    return mixpi_cpu_gemm(x, &k->gemm, mixpi_no_pairs, &MIXPI_P(gemm_shape), k);
}
#endif
