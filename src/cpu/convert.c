#pragma once
#include "vectors.c"
/* --- any narrow dtype as f32, a block at a time ---------------------------------------- *
 * The inner loop of a kernel reads only f32: the array itself if it is f32, otherwise a small
 * buffer that stays in L1. Each kernel is therefore written once, for every mix of dtypes. */
MIXPI_V int MIXPI_P(size)(mixp_dtype d)
{ return d == MIXP_F32 ? 4 : d == MIXP_F16 || d == MIXP_BF16 ? 2 : d == MIXP_F64 ? 8 : 1; }

/* Prefetches the cache lines of n elements from i on. The elements need not exist. */
MIXPI_V void MIXPI_P(ask)(mixp_in a, int64_t i, int64_t n) {
    const char *p = (const char *)a.data + i * MIXPI_P(size)(a.dtype);
    for (int64_t at = 0; at < n * MIXPI_P(size)(a.dtype); at += 64) MIXPI_PREFETCH(p + at);
}

/* MIXPI_LOOP is inlined even in plain C, because the dtypes must be constants in the loop. */
#if MIXPI_GNU && defined(__OPTIMIZE__) && !defined(MIXPI_SANITIZED)
#  define MIXPI_LOOP MIXPI_V __attribute__((__always_inline__))
#else
#  define MIXPI_LOOP MIXPI_V
#endif

/* Converts n elements, n a multiple of 16, to nearest even. It works upwards, so in place `to` must
 * not be wider than `from`. */
MIXPI_LOOP void MIXPI_P(run)(mixp_dtype to, mixp_dtype from, void *dst, const void *src,
                             int64_t n) {
    const int out = MIXPI_P(size)(to), in = MIXPI_P(size)(from);
    char *d = (char *)dst;
    const char *s = (const char *)src;
    int64_t i;
    for (i = 0; i < n; i += 16)
        mixpi_vput(to, d + i * out, mixpi_vget(from, s + i * in), 0);
}

/* Converts n floats to bf16 likewise. One instruction of AVX512_BF16 rounds 32 floats, but it
 * treats subnormals as 0: 32 floats with a subnormal are converted without it. */
#if MIXPI_PASS == 2 && MIXPI_BF16
/* Is one of 16 floats subnormal? (VFPCLASSPS says no if the host has set DAZ.) */
MIXPI_V int MIXPI_P(has_subnormal)(mixpi_v x) {
    const __m512i bits = (__m512i)mixpi_rbits(x);
    const __mmask16 tiny = _mm512_testn_epi32_mask(bits, _mm512_set1_epi32(0x7F800000));
    return _mm512_mask_test_epi32_mask(tiny, bits, _mm512_set1_epi32(0x007FFFFF)) != 0;
}

static MIXPI_TARGET_BF16 void MIXPI_P(run_bf16)(void *dst, const void *src, int64_t n) {
    const float *s = (const float *)src;
    uint16_t *d = (uint16_t *)dst;
    int64_t i, end = MIXPI_CPU_HAS(avx512bf16) ? n - 31 : 0;
    for (i = 0; i < end; i += 32) {
        const mixpi_v a = mixpi_vload(s + i), b = mixpi_vload(s + i + 16);
        if (MIXPI_P(has_subnormal)(a) || MIXPI_P(has_subnormal)(b))
            MIXPI_P(run)(MIXP_BF16, MIXP_F32, d + i, s + i, 32);
        else _mm512_storeu_si512(d + i, (__m512i)_mm512_cvtne2ps_pbh(b, a));
    }
    MIXPI_P(run)(MIXP_BF16, MIXP_F32, d + i, s + i, n - i);
}
#else
MIXPI_LOOP void MIXPI_P(run_bf16)(void *dst, const void *src, int64_t n)
{ MIXPI_P(run)(MIXP_BF16, MIXP_F32, dst, src, n); }
#endif

/* Converts n floats to e4m3 or e5m2 likewise. f16 has the exponents and subnormals of e5m2, and
 * those of e4m3 times 2^-8. One instruction therefore truncates the floats to f16, and words of 16
 * bits are rounded. Before the truncation, a sticky bit records the bits below the rounding bit. */
#if MIXPI_PASS == 1 || MIXPI_PASS == 2
typedef uint16_t MIXPI_P(words) __attribute__((__vector_size__(sizeof(mixpi_vbits))));

/* sticky sets a bit where bits below it are set. */
#if MIXPI_PASS == 2
MIXPI_V mixpi_vbits MIXPI_P(sticky)(mixpi_vbits u, uint32_t bit) {
    const __m512i set = _mm512_set1_epi32((int)bit), below = _mm512_set1_epi32((int)bit - 1);
    const __mmask16 some = _mm512_test_epi32_mask((__m512i)u, below);
    return (mixpi_vbits)_mm512_mask_or_epi32((__m512i)u, some, (__m512i)u, set);
}
MIXPI_V MIXPI_P(words) MIXPI_P(words_of)(mixpi_vbits a, mixpi_vbits b) {
    enum { how = _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC };
    const __m256i low = _mm512_maskz_cvtps_ph((__mmask16)0xFFFF, (__m512)a, how);
    const __m256i high = _mm512_maskz_cvtps_ph((__mmask16)0xFFFF, (__m512)b, how);
    return (MIXPI_P(words))_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}
MIXPI_V MIXPI_P(words) MIXPI_P(words_min)(MIXPI_P(words) a, MIXPI_P(words) b)
{ return (MIXPI_P(words))_mm512_min_epu16((__m512i)a, (__m512i)b); }
/* The upper bytes. The permutation restores the order, because packing works within lanes. */
MIXPI_V mixpi_vbits MIXPI_P(words_high)(MIXPI_P(words) a, MIXPI_P(words) b) {
    const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    const __m512i c = _mm512_packus_epi16((__m512i)(a >> 8), (__m512i)(b >> 8));
    return (mixpi_vbits)_mm512_permutexvar_epi64(order, c);
}
#else
MIXPI_V mixpi_vbits MIXPI_P(sticky)(mixpi_vbits u, uint32_t bit) {
    const __m256i below = (__m256i)(u & (bit - 1u));
    return u | (mixpi_vbits)_mm256_sign_epi32(_mm256_set1_epi32((int)bit), below);
}
MIXPI_V MIXPI_P(words) MIXPI_P(words_of)(mixpi_vbits a, mixpi_vbits b) {
    const __m128i low = _mm256_cvtps_ph((__m256)a, _MM_FROUND_TO_ZERO);
    const __m128i high = _mm256_cvtps_ph((__m256)b, _MM_FROUND_TO_ZERO);
    return (MIXPI_P(words))_mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
}
MIXPI_V MIXPI_P(words) MIXPI_P(words_min)(MIXPI_P(words) a, MIXPI_P(words) b)
{ return (MIXPI_P(words))_mm256_min_epu16((__m256i)a, (__m256i)b); }
MIXPI_V mixpi_vbits MIXPI_P(words_high)(MIXPI_P(words) a, MIXPI_P(words) b) {
    const __m256i c = _mm256_packus_epi16((__m256i)(a >> 8), (__m256i)(b >> 8));
    return (mixpi_vbits)_mm256_permute4x64_epi64(c, 0xD8);
}
#endif

/* The codes of two registers of floats, in the upper bytes of words. */
MIXPI_V MIXPI_P(words) MIXPI_P(words_codes)(mixp_dtype to, const float *s) {
    const uint32_t bit = to == MIXP_F8_E4M3 ? 0x40000u : 0x80000u;
    const MIXPI_P(words) none = { 0 };
    mixpi_vbits u[2];
    for (int k = 0; k < 2; k++) {
        mixpi_vreg x = mixpi_rload(s + k * MIXPI_LANES);
        if (to == MIXP_F8_E4M3) x *= 0.00390625f;
        u[k] = MIXPI_P(sticky)(mixpi_rbits(x), bit);
    }
    const MIXPI_P(words) h = MIXPI_P(words_of)(u[0], u[1]);
    const MIXPI_P(words) a =
        to == MIXP_F8_E4M3 ? MIXPI_P(words_min)(h + h, none + 0x7F00) : h & 0x7FFF;
    MIXPI_P(words) add = (a >> 8 & 1) + 0x7F;
    if (to == MIXP_F8_E5M2)             /* adds 0 to NaN, which keeps its payload */
        add = MIXPI_P(words_min)(add, 0x7C80 - MIXPI_P(words_min)(a, none + 0x7C80));
    return (a + add) | (h & 0x8000);
}

/* Writes the codes of four registers of floats. */
MIXPI_V void MIXPI_P(put_8)(mixp_dtype to, void *p, const float *s, int stream) {
    const MIXPI_P(words) low = MIXPI_P(words_codes)(to, s);
    const MIXPI_P(words) high = MIXPI_P(words_codes)(to, s + 2 * MIXPI_LANES);
    const mixpi_vreg codes = mixpi_rof(MIXPI_P(words_high)(low, high));
    if (stream) mixpi_rstream((float *)p, codes);
    else mixpi_rstore((float *)p, codes);
}

MIXPI_LOOP void MIXPI_P(run_8)(mixp_dtype to, void *dst, const void *src, int64_t n) {
    const float *s = (const float *)src;
    char *d = (char *)dst;
    int64_t i;
    for (i = 0; i + 4 * MIXPI_LANES <= n; i += 4 * MIXPI_LANES)
        MIXPI_P(put_8)(to, d + i, s + i, 0);
    MIXPI_P(run)(to, MIXP_F32, d + i, s + i, n - i);
}
#else
MIXPI_LOOP void MIXPI_P(run_8)(mixp_dtype to, void *dst, const void *src, int64_t n)
{ MIXPI_P(run)(to, MIXP_F32, dst, src, n); }
#endif

/* Converts n floats to a narrow dtype likewise, rounded as r says. `random` holds n numbers. */
MIXPI_LOOP void MIXPI_P(run_rounded)(mixp_dtype to, void *dst, const void *src, int64_t n,
                                     const mixp_rounding *r, const uint32_t *random) {
    const int out = MIXPI_P(size)(to);
    char *d = (char *)dst;
    const char *s = (const char *)src;
    int64_t i;
    for (i = 0; i < n; i += 16)
        mixpi_vput_rounded(to, d + i * out, mixpi_vget(MIXP_F32, s + i * 4), r, random + i);
}

/* Convert any number of elements. The remainder beyond a multiple of 16 goes through copies and the
 * same loop; a second loop would double the compiled code. */
MIXPI_RARE void MIXPI_P(widen_run)(mixp_dtype from, void *dst, const void *src, int64_t n) {
    const int64_t whole = n & ~(int64_t)15;
    const int64_t done = whole * MIXPI_P(size)(from);
    const size_t left = (size_t)(n - whole);
    unsigned char rest[32] = { 0 };
    float end[16];
    if (from == MIXP_F64) {     /* of an optimizer's rows */
        for (int64_t i = 0; i < n; i++) ((float *)dst)[i] = (float)((const double *)src)[i];
        return;
    }
    if (from == MIXP_F16) MIXPI_P(run)(MIXP_F32, MIXP_F16, dst, src, whole);
    if (from == MIXP_BF16) MIXPI_P(run)(MIXP_F32, MIXP_BF16, dst, src, whole);
    if (from == MIXP_F8_E4M3) MIXPI_P(run)(MIXP_F32, MIXP_F8_E4M3, dst, src, whole);
    if (from == MIXP_F8_E5M2) MIXPI_P(run)(MIXP_F32, MIXP_F8_E5M2, dst, src, whole);
    if (from == MIXP_F8_E8M0) MIXPI_P(run)(MIXP_F32, MIXP_F8_E8M0, dst, src, whole);
    if (left == 0) return;
    memcpy(rest, (const char *)src + done, left * (size_t)MIXPI_P(size)(from));
    MIXPI_P(widen_run)(from, end, rest, 16);
    memcpy((float *)dst + whole, end, left * sizeof *end);
}
MIXPI_RARE void MIXPI_P(narrow_run)(mixp_dtype to, void *dst, const void *src, int64_t n) {
    const int64_t whole = n & ~(int64_t)15;
    const int64_t done = whole * MIXPI_P(size)(to);
    const size_t left = (size_t)(n - whole);
    float rest[16] = { 0 };
    unsigned char end[32];
    if (to == MIXP_F64) {
        for (int64_t i = 0; i < n; i++) ((double *)dst)[i] = (double)((const float *)src)[i];
        return;
    }
    if (to == MIXP_F16) MIXPI_P(run)(MIXP_F16, MIXP_F32, dst, src, whole);
    if (to == MIXP_BF16) MIXPI_P(run_bf16)(dst, src, whole);
    if (to == MIXP_F8_E4M3) MIXPI_P(run_8)(MIXP_F8_E4M3, dst, src, whole);
    if (to == MIXP_F8_E5M2) MIXPI_P(run_8)(MIXP_F8_E5M2, dst, src, whole);
    if (to == MIXP_F8_E8M0) MIXPI_P(run)(MIXP_F8_E8M0, MIXP_F32, dst, src, whole);
    if (left == 0) return;
    memcpy(rest, (const float *)src + whole, left * sizeof *rest);
    MIXPI_P(narrow_run)(to, end, rest, 16);
    memcpy((char *)dst + done, end, left * (size_t)MIXPI_P(size)(to));
}
/* narrow_run, rounded as r says. index: the index of the first element. Random numbers are
 * generated 256 at a time. */
MIXPI_RARE void MIXPI_P(narrow_rounded)(mixp_dtype to, void *dst, const float *src, int64_t n,
                                        const mixp_rounding *r, uint64_t key,
                                        uint64_t index) {
    const int64_t whole = n & ~(int64_t)15;
    const size_t left = (size_t)(n - whole);
    uint32_t random[256];
    float rest[16] = { 0 };
    char end[32], *d = (char *)dst;
    int64_t i, k;
    if (!r->stochastic) memset(random, 0, (size_t)mixpi_min(256, whole) * sizeof *random);
    for (i = 0; i < whole; i += 256, d += 256 * MIXPI_P(size)(to)) {
        const int64_t m = mixpi_min(256, whole - i);
        for (k = 0; r->stochastic && k < m; k += 16)
            mixpi_vrandom(key, index + (uint64_t)(i + k), random + k);
        if (to == MIXP_F16) MIXPI_P(run_rounded)(MIXP_F16, d, src + i, m, r, random);
        if (to == MIXP_BF16) MIXPI_P(run_rounded)(MIXP_BF16, d, src + i, m, r, random);
        if (to == MIXP_F8_E4M3) MIXPI_P(run_rounded)(MIXP_F8_E4M3, d, src + i, m, r, random);
        if (to == MIXP_F8_E5M2) MIXPI_P(run_rounded)(MIXP_F8_E5M2, d, src + i, m, r, random);
    }

    /* The rest goes through a copy of 16. */
    if (left == 0) return;
    memcpy(rest, src + whole, left * sizeof *rest);
    MIXPI_P(narrow_rounded)(to, end, rest, 16, r, key, index + (uint64_t)whole);
    d = (char *)dst + whole * MIXPI_P(size)(to);
    memcpy(d, end, left * (size_t)MIXPI_P(size)(to));
}
#undef MIXPI_LOOP

/* Elements [i, i+n) of a as f32: in place, or in buf, which has room for MIXPI_BLOCK floats. */
MIXPI_V const float *MIXPI_P(read)(mixp_in a, int64_t i, int64_t n, float *buf) {
    if (a.dtype == MIXP_F32) return (const float *)a.data + i;
    MIXPI_P(widen_run)
    (a.dtype, buf, (const char *)a.data + i * MIXPI_P(size)(a.dtype), n);
    return buf;
}
/* Element i of a. */
MIXPI_V float MIXPI_P(read_one)(mixp_in a, int64_t i) {
    float one[1];
    return MIXPI_P(read)(a, i, 1, one)[0];
}
/* y = p + q; y may be p or q. */
MIXPI_K void MIXPI_P(floats_add)(float *y, const float *p, const float *q, int64_t n) {
    int64_t j;
    for (j = 0; j + 16 <= n; j += 16)
        mixpi_vstore(y + j, mixpi_vadd(mixpi_vload(p + j), mixpi_vload(q + j)));
    for (; j < n; j++) y[j] = p[j] + q[j];
}

/* p[0] + ... + p[n-1] in a fixed order. */
MIXPI_K float MIXPI_P(floats_sum)(const float *p, int64_t n) {
    mixpi_v a = mixpi_vzero(), b = a;
    int64_t j;
    for (j = 0; j + 32 <= n; j += 32) {
        a = mixpi_vadd(a, mixpi_vload(p + j));
        b = mixpi_vadd(b, mixpi_vload(p + j + 16));
    }
    for (; j < n; j += 16) a = mixpi_vadd(a, mixpi_vpart(p + j, n - j));
    return mixpi_vsum(mixpi_vadd(a, b));
}

/* p[0] q[0] + ... + p[n-1] q[n-1] in a fixed order. */
MIXPI_K float MIXPI_P(floats_dot)(const float *p, const float *q, int64_t n) {
    mixpi_v a = mixpi_vzero(), b = a;
    int64_t j;
    for (j = 0; j + 32 <= n; j += 32) {
        a = mixpi_vfma(mixpi_vload(p + j), mixpi_vload(q + j), a);
        b = mixpi_vfma(mixpi_vload(p + j + 16), mixpi_vload(q + j + 16), b);
    }
    for (; j < n; j += 16)
        a = mixpi_vfma(mixpi_vpart(p + j, n - j), mixpi_vpart(q + j, n - j), a);
    return mixpi_vsum(mixpi_vadd(a, b));
}

/* The values of an output before it is written, as f32. */
MIXPI_V const float *MIXPI_P(held)(mixp_out a, int64_t i, int64_t n, float *buf)
{ return MIXPI_P(read)(mixpi_in(a.data, a.dtype), i, n, buf); }
/* Where to compute elements [i, ...) of a: in place if a is f32, otherwise in buf. `placed` then
 * converts buf to a. */
MIXPI_V float *MIXPI_P(place)(mixp_out a, int64_t i, float *buf)
{ return a.dtype == MIXP_F32 ? (float *)a.data + i : buf; }
MIXPI_V void MIXPI_P(placed)(mixp_out a, int64_t i, int64_t n, const float *buf) {
    if (a.dtype == MIXP_F32) return;
    MIXPI_P(narrow_run)(a.dtype, (char *)a.data + i * MIXPI_P(size)(a.dtype), buf, n);
}

/* y[at, at+n) = v, or += v if y accumulates; n <= MIXPI_BLOCK. v is overwritten. */
MIXPI_K void MIXPI_P(write)(mixp_out y, int64_t at, int64_t n, float *v) {
    float buf[MIXPI_BLOCK];
    if (y.accumulate) MIXPI_P(floats_add)(v, v, MIXPI_P(held)(y, at, n, buf), n);
    if (y.dtype != MIXP_F32) MIXPI_P(placed)(y, at, n, v);
    else memcpy((float *)y.data + at, v, (size_t)n * sizeof(float));
}

/* --- convert, copy, fill ---------------------------------------------------------------- */
/* Converts n elements of the same dtype, or of two dtypes that have vector code, to nearest even.
 * If neither dtype is f32, it converts through f32. */
MIXPI_K void MIXPI_P(convert_plain)(mixp_out d, mixp_in s, int64_t n) {
    float buf[MIXPI_BLOCK];
    if (d.dtype == s.dtype) {
        if (n > 0) memmove(d.data, s.data, (size_t)n * mixp_dtype_size(d.dtype));
    } else if (d.dtype == MIXP_F32) {
        MIXPI_P(widen_run)(s.dtype, d.data, s.data, n);
    } else if (s.dtype == MIXP_F32) {
        MIXPI_P(narrow_run)(d.dtype, d.data, s.data, n);
    } else MIXPI_BLOCKS(i, m, n) {
        const float *from = MIXPI_P(read)(s, i, m, buf);
        MIXPI_P(narrow_run)(d.dtype, mixpi_out_at(d, i).data, from, m);
    }
}

/* Converts a piece by vector code, rounded as c says. */
MIXPI_K void MIXPI_P(convert_rounded)(const mixpi_convert_job *c,
                                      const mixpi_convert_piece *p) {
    float buf[MIXPI_BLOCK];
    MIXPI_BLOCKS(i, n, p->n) {
        const float *from = MIXPI_P(read)(p->src, i, n, buf);
        MIXPI_P(narrow_rounded)(p->dst.dtype, mixpi_out_at(p->dst, i).data, from, n,
                                &c->k->rounding, c->key, (uint64_t)(p->first + i));
    }
}

#if MIXPI_PASS == 1 || MIXPI_PASS == 2
/* Converts a large array with stores that bypass the caches. It advances through `pages` pages of
 * 1024 elements side by side. Four pages keep four prefetchers of an Intel core busy; an AMD core
 * (measured: Zen 5) narrows 1.3 times as fast with one. dst is aligned to a cache line. Returns the
 * number of elements converted. */
MIXPI_V int64_t MIXPI_P(stream_run)(mixp_dtype to, mixp_dtype from, void *dst,
                                    const void *src, int64_t n, int pages) {
    const int out = MIXPI_P(size)(to), in = MIXPI_P(size)(from), line = 64 / out;
    const int words = to == MIXP_F8_E4M3 || to == MIXP_F8_E5M2;
    const int many = words ? 4 * MIXPI_LANES : 16;
    const int64_t step = 1024 * (int64_t)pages;
    int64_t i, j, k;
    for (i = 0; i + step <= n; i += step)
        for (j = 0; j < 1024; j += line)
            for (k = i + j; k < i + step; k += 1024) {
                char *d = (char *)dst + k * out;
                const char *s = (const char *)src + k * in;
                int v;
                for (v = 0; v < line * in; v += 64) MIXPI_PREFETCH(s + step * in + v);
                for (v = 0; v < line; v += many)
                    if (words) MIXPI_P(put_8)(to, d + v, (const float *)(const void *)s + v, 1);
                    else mixpi_vput(to, d + v * out, mixpi_vget(from, s + v * in), 1);
            }
    return i;
}
/* stream_run from f32 to a narrow dtype, or back. */
MIXPI_K int64_t MIXPI_P(convert_stream)(const mixpi_convert_piece *p, int pages) {
    mixp_dtype to = p->dst.dtype, from = p->src.dtype;
    void *d = p->dst.data;
    const void *s = p->src.data;
    int64_t done = 0;
#define MIXPI_STREAM(t)                                                                   \
    if (to == (t)) done = MIXPI_P(stream_run)((t), MIXP_F32, d, s, p->n, pages);          \
    if (from == (t)) done = MIXPI_P(stream_run)(MIXP_F32, (t), d, s, p->n, pages);
    MIXPI_STREAM(MIXP_F16)
    MIXPI_STREAM(MIXP_BF16)
    MIXPI_STREAM(MIXP_F8_E4M3)
    MIXPI_STREAM(MIXP_F8_E5M2)
    MIXPI_STREAM(MIXP_F8_E8M0)
    _mm_sfence();
    return done;
}

/* Dtypes that a C cast converts correctly if the floating-point environment is the default. If
 * they were inlined, the loops would run out of registers. */
#define MIXPI_CAST(to_dtype, to_type, from_dtype, from_type)                              \
    if (to == (to_dtype) && from == (from_dtype)) {                                       \
        for (i = 0; i < n; i++) {                                                         \
            from_type a_;                                                                 \
            to_type b_;                                                                   \
            memcpy(&a_, s + i * sizeof a_, sizeof a_);                                    \
            b_ = (to_type)a_;                                                             \
            memcpy(d + i * sizeof b_, &b_, sizeof b_);                                    \
        }                                                                                 \
        return 1;                                                                         \
    }
MIXPI_K __attribute__((__noinline__))
int MIXPI_P(convert_cast)(const mixpi_convert_piece *p) {
    mixp_dtype to = p->dst.dtype, from = p->src.dtype;
    char *d = (char *)p->dst.data;
    const char *s = (const char *)p->src.data;
    size_t i, n = (size_t)p->n;
    MIXPI_CAST(MIXP_F32, float, MIXP_F64, double)
    MIXPI_CAST(MIXP_F64, double, MIXP_F32, float)
    MIXPI_CAST(MIXP_F32, float, MIXP_I32, int32_t)
    MIXPI_CAST(MIXP_F32, float, MIXP_U8, uint8_t)
    return 0;
}

/* Removes the first n elements from the piece, because they are done. */
MIXPI_K void MIXPI_P(convert_skip)(mixpi_convert_piece *p, int64_t n) {
    p->dst = mixpi_out_at(p->dst, n);
    p->src = mixpi_in_at(p->src, n);
    p->first += n;
    p->n -= n;
}

/* Converts most of the piece with stores that bypass the caches, from dst's first whole cache line
 * on. The remainder is left in the piece. */
MIXPI_K void MIXPI_P(convert_streamed)(const mixpi_convert_job *c,
                                       mixpi_convert_piece *p) {
    size_t unaligned = (64u - ((uintptr_t)p->dst.data & 63u)) % 64u;
    int64_t head = mixpi_min(p->n, (int64_t)(unaligned / mixp_dtype_size(p->dst.dtype)));
    MIXPI_P(convert_plain)(p->dst, p->src, head);
    MIXPI_P(convert_skip)(p, head);
    MIXPI_P(convert_skip)(p, MIXPI_P(convert_stream)(p, c->pages));
}
#endif

MIXPI_K void MIXPI_P(convert_piece)(const mixpi_convert_job *c, mixpi_convert_piece *p) {
    int exact = p->dst.dtype == p->src.dtype || p->dst.dtype == MIXP_F32;
#if MIXPI_PASS == 1 || MIXPI_PASS == 2
    if (c->pages) MIXPI_P(convert_streamed)(c, p);
    if (c->plain && !c->vector && MIXPI_P(convert_cast)(p)) return;
#endif
    if (!c->vector)
        mixpi_convert_each(p->dst, p->src, p->n, &c->k->rounding, c->key,
                           (uint64_t)p->first);
    else if (c->plain || exact) MIXPI_P(convert_plain)(p->dst, p->src, p->n);
    else MIXPI_P(convert_rounded)(c, p);
}

/* Conversions neither use nor change the caller's floating-point environment: rounding mode, flush
 * to zero, traps, flags. Outside x86 they need no such switch: they use integers and exact float
 * operations. */
MIXPI_K void MIXPI_P(convert_task)(void *arg, int64_t index, int worker) {
    const mixpi_convert_job *c = (const mixpi_convert_job *)arg;
    mixpi_convert_piece p = mixpi_convert_piece_of(c, index);
#if MIXPI_PASS == 1 || MIXPI_PASS == 2
    /* To nearest, no trap. Vector code flushes subnormals: only the way to e4m3 computes with them,
     * each becomes 0 there, and the processor would be slow. */
    const unsigned usual = c->vector ? 0x9FC0u : 0x1F80u;
    unsigned env = _mm_getcsr();
    _mm_setcsr(usual);
    MIXPI_P(convert_piece)(c, &p);
    _mm_setcsr(env);
#else
    MIXPI_P(convert_piece)(c, &p);
#endif
    (void)worker;
}

MIXPI_LINKED MIXPI_SPEED MIXPI_TARGET
mixp_result MIXPI_P(convert)(const mixp_exec *x, const mixp_convert_args *k) {
    mixpi_convert_job c;
    mixp_result r;
    if (!mixpi_convert_starts(k, &r)) return r;
    mixpi_convert_plan(&c, k);
#if MIXPI_PASS == 1 || MIXPI_PASS == 2
    if (c.pages && !MIXPI_CPU_IS_AMD()) c.pages = 4;
#endif
    mixpi_parallel(x, mixpi_ceil_div(k->n, c.chunk), k->n, MIXPI_P(convert_task), &c);
    return MIXP_OK;
}

/* Copies one dense row. If d accumulates, the row is added in f32 and rounded once. */
MIXPI_K void MIXPI_P(copy_row)(mixp_out d, mixp_in s, int64_t n) {
    float a[MIXPI_BLOCK], b[MIXPI_BLOCK];
    if (!d.accumulate) {
        MIXPI_P(convert_plain)(d, s, n);
        return;
    }
    MIXPI_BLOCKS(i, m, n) {
        const float *old = MIXPI_P(held)(d, i, m, b), *more = MIXPI_P(read)(s, i, m, a);
        float *to = MIXPI_P(place)(d, i, b);
        MIXPI_P(floats_add)(to, old, more, m);
        MIXPI_P(placed)(d, i, m, to);
    }
}

/* Can load_step use this step? With AVX-512 also 2, as a stride of 2 reads an image. */
MIXPI_V int MIXPI_P(has_step)(int64_t step)
{ return step == 1 || (MIXPI_PASS == 2 && step == 2); }

/* Up to 16 floats, `step` apart. */
MIXPI_V mixpi_v MIXPI_P(load_step)(const float *p, int64_t step, int64_t left) {
#if MIXPI_PASS == 2
    const mixpi_vbits even = { 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30 };
    const unsigned there = 0xFFFFFFFFu >> (33 - 2 * mixpi_min(left, 16));
    if (step == 2)
        return (mixpi_v)_mm512_permutex2var_ps(
            _mm512_maskz_loadu_ps((__mmask16)there, p), (__m512i)even,
            _mm512_maskz_loadu_ps((__mmask16)(there >> 16), p + 16));
#endif
    (void)step;
    return mixpi_vpart(p, left);
}

/* Stores them. */
MIXPI_V void MIXPI_P(store_step)(float *p, int64_t step, mixpi_v x, int64_t left) {
#if MIXPI_PASS == 2
    const unsigned there = 0x55555555u >> (32 - 2 * mixpi_min(left, 16));
    const __m512 low = (__m512)x, high = _mm512_maskz_shuffle_f32x4(0xFFFF, low, low, 0xEE);
    if (step == 2) {
        _mm512_mask_storeu_ps(p, (__mmask16)there, _mm512_maskz_expand_ps(0x5555, low));
        _mm512_mask_storeu_ps(p + 16, (__mmask16)(there >> 16),
                              _mm512_maskz_expand_ps(0x5555, high));
        return;
    }
#endif
    (void)step;
    if (left >= 16) mixpi_vstore(p, x);
    else mixpi_vstore_n(p, x, (int)left);
}

/* Copies a row of floats. Rows of an image are short: a call of memmove would take longer. */
MIXPI_V void MIXPI_P(copy_floats_by)(float *to, int64_t d, const float *from, int64_t s, int64_t n,
                                     int add) {
    for (; n > 0; n -= 16, to += 16 * d, from += 16 * s) {
        mixpi_v x = MIXPI_P(load_step)(from, s, n);
        if (add) x = mixpi_vadd(MIXPI_P(load_step)(to, d, n), x);
        MIXPI_P(store_step)(to, d, x, n);
    }
}

/* Copies rows x cols elements at strides (r, c) to a dense tile. The sizes are constants so that
 * the copies are fast. */
#define MIXPI_GATHER(bytes)                                                               \
    for (k = 0; k < cols && size == (bytes); k++)                                         \
        for (i = 0; i < rows; i++)                                                        \
            memcpy(tile + (i * cols + k) * (bytes), src + (i * r + k * c) * (bytes), (bytes));
MIXPI_K void MIXPI_P(gather_any)(int64_t size, char *tile, const char *src, int64_t rows,
                                 int64_t cols, int64_t r, int64_t c) {
    int64_t i, k;
    MIXPI_GATHER(1)
    MIXPI_GATHER(2)
    MIXPI_GATHER(4)
    MIXPI_GATHER(8)
}

/* Copies a dense row to elements that are `step` apart. */
#define MIXPI_SPREAD(bytes)                                                               \
    for (int64_t i = 0; i < n && size == (bytes); i++)                                    \
        memcpy(to + i * step * (bytes), row + i * (bytes), (bytes));
MIXPI_K void MIXPI_P(copy_spread)(mixp_out d, int64_t step, mixp_in s, int64_t n) {
    const int64_t size = (int64_t)mixp_dtype_size(d.dtype);
    char row[MIXPI_COPY_TILE * 8], *to = (char *)d.data;
    mixp_out dense = d;
    dense.data = row;
    if (d.accumulate) MIXPI_P(gather_any)(size, row, to, 1, n, 0, step);
    MIXPI_P(copy_row)(dense, s, n);
    MIXPI_SPREAD(1)
    MIXPI_SPREAD(2)
    MIXPI_SPREAD(4)
    MIXPI_SPREAD(8)
}

/* Copies one tile from src to dst. */
MIXPI_K void MIXPI_P(copy_tile)(const mixpi_copy_job *c, mixp_out dst, mixp_in src,
                                int64_t rows, int64_t cols) {
    const int a = c->axes.rank - 2, b = a + 1;
    const int64_t *d = c->axes.s[0], *s = c->axes.s[1];
    const int64_t size = (int64_t)mixp_dtype_size(src.dtype);
    char tile[MIXPI_COPY_TILE * MIXPI_COPY_TILE * 8];
    const int same = dst.dtype == MIXP_F32 && src.dtype == MIXP_F32;
    const int floats = MIXPI_PASS != 0 && same && MIXPI_P(has_step)(d[b]);
    int64_t row_step = s[a], step = s[b], r;
    if (!c->dense && !(floats && MIXPI_P(has_step)(step))) {
        MIXPI_P(gather_any)(size, tile, (const char *)src.data, rows, cols, s[a], s[b]);
        src.data = tile;
        row_step = cols;
        step = 1;
    }
    for (r = 0; r < rows; r++) {
        mixp_out to = mixpi_out_at(dst, r * d[a]);
        mixp_in from = mixpi_in_at(src, r * row_step);
        if (floats)
            MIXPI_P(copy_floats_by)((float *)to.data, d[b], (const float *)from.data, step, cols,
                                    dst.accumulate);
        else if (d[b] == 1) MIXPI_P(copy_row)(to, from, cols);
        else MIXPI_P(copy_spread)(to, d[b], from, cols);
    }
}

MIXPI_K void MIXPI_P(copy_unit)(const void *job, int64_t unit) {
    const mixpi_copy_job *c = (const mixpi_copy_job *)job;
    const mixpi_axes *x = &c->axes;
    const int a = x->rank - 2, b = a + 1;
    int64_t col = unit % c->across * c->tile_cols;
    int64_t row = unit / c->across % c->down * c->tile_rows;
    int64_t rest = unit / c->across / c->down, off[2];
    for (int k = 0; k < 2; k++) off[k] = row * x->s[k][a] + col * x->s[k][b];
    for (int axis = a - 1; axis >= 0; axis--) {
        for (int k = 0; k < 2; k++) off[k] += rest % x->n[axis] * x->s[k][axis];
        rest /= x->n[axis];
    }
    MIXPI_P(copy_tile)(c, mixpi_out_at(c->dst, off[0]), mixpi_in_at(c->src, off[1]),
                       mixpi_min(x->n[a] - row, c->tile_rows),
                       mixpi_min(x->n[b] - col, c->tile_cols));
}

MIXPI_KERNEL(copy, mixpi_cpu_copy, mixp_copy_args, MIXPI_P(copy_unit))
MIXPI_KERNEL(fill, mixpi_cpu_fill, mixp_fill_args, MIXPI_P(copy))
