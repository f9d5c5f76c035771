#pragma once
#include "codes.c"
#include "update.c"
/* --- states of fewer bytes: blocks of codes to f32 and back, a register at a time ---------- *
 * `size`, the bytes of a code, is a constant where these functions are inlined in a hot loop. */

enum { MIXPI_P(registers) = 16 / mixpi_vlanes };

/* 16 elements of a moment from k on. second: 1 for the second moment. Stays in registers, because a
 * 64-byte load right after the store of its bytes would stall. */
MIXPI_F mixpi_v MIXPI_P(small_moment)(const char *codes, int size, int second,
                                      uint32_t scale, int k) {
    mixpi_vbits u[MIXPI_P(registers)];
    mixpi_vreg r[MIXPI_P(registers)];
    mixpi_v x;
    for (int j = 0; j < MIXPI_P(registers); j++, k += mixpi_vlanes) {
        u[j] = size == 2 ? mixpi_vread_high(codes + 2 * k) : mixpi_vread_8(codes + k);
        if (size == 2) continue;
        r[j] = second ? mixpi_vstate_v_value(u[j], scale) : mixpi_vstate_m_value(u[j], scale);
    }
    if (size == 2) memcpy(&x, u, sizeof x);
    else memcpy(&x, r, sizeof x);
    return x;
}
MIXPI_F mixpi_v MIXPI_P(small_master)(const mixpi_small *b, int k) {
    mixpi_vbits u[MIXPI_P(registers)];
    mixpi_v x;
    for (int j = 0; j < MIXPI_P(registers); j++, k += mixpi_vlanes) {
        u[j] = b->rest_size == 2 ? mixpi_vread_16(b->rest + 2 * k)
                                 : mixpi_vread_8(b->rest + k) << 8;
        u[j] += mixpi_vread_high(b->weight + 2 * k);
    }
    memcpy(&x, u, sizeof x);
    return x;
}
MIXPI_V void MIXPI_P(small_words)(uint64_t key, int64_t first, int k, float *word) {
    for (int j = k; j < k + 16; j += mixpi_vlanes) {
        const mixpi_vbits r = mixpi_vstate_random(key, (uint32_t)first + (uint32_t)j);
        memcpy(word + j, &r, sizeof r);
    }
}

MIXPI_F void MIXPI_P(small_put_bf16)(char *to, const float *x, const float *word,
                                     int shift) {
    for (int k = 0; k < MIXP_STATE_BLOCK; k += mixpi_vlanes) {
        const mixpi_vbits random = mixpi_vbits_at(word + k, 0) >> shift & 0xFFFFu;
        mixpi_vwrite_high(to + 2 * k, mixpi_vstate_bf16(mixpi_vbits_at(x + k, 0), random));
    }
}
MIXPI_F void MIXPI_P(small_put_m)(const mixpi_small *b, uint32_t scale, const float *m,
                                  const float *word) {
    for (int k = 0; k < MIXP_STATE_BLOCK; k += mixpi_vlanes) {
        const mixpi_vbits random = mixpi_vbits_at(word + k, 0) & 0xFFFFu;
        mixpi_vwrite_8(b->m + k, mixpi_vstate_m(mixpi_vbits_at(m + k, 0), scale, random));
    }
}
MIXPI_F void MIXPI_P(small_put_v)(const mixpi_small *b, uint32_t scale, const float *roots,
                                  const float *word) {
    for (int k = 0; k < MIXP_STATE_BLOCK; k += mixpi_vlanes) {
        const mixpi_vbits random = mixpi_vbits_at(word + k, 0) >> 16;
        mixpi_vwrite_8(b->v + k, mixpi_vstate_v(mixpi_vbits_at(roots + k, 0), scale, random));
    }
}
MIXPI_F void MIXPI_P(small_put_16)(const mixpi_small *b, const float *p) {
    for (int k = 0; k < MIXP_STATE_BLOCK; k += mixpi_vlanes) {
        const mixpi_vmaster_parts parts = mixpi_vmaster_16(mixpi_vbits_at(p + k, 0));
        mixpi_vwrite_high(b->weight + 2 * k, parts.weight);
        mixpi_vwrite_16(b->rest + 2 * k, parts.rest);
    }
}
MIXPI_F void MIXPI_P(small_put_8)(const mixpi_small *b, const float *p,
                                  const float *word) {
    for (int k = 0; k < MIXP_STATE_BLOCK; k += mixpi_vlanes) {
        const mixpi_vbits random = (mixpi_vbits_at(word + k, 0) * 0x9E3779B1u) >> 24;
        const mixpi_vmaster_parts parts = mixpi_vmaster_8(mixpi_vbits_at(p + k, 0), random);
        mixpi_vwrite_high(b->weight + 2 * k, parts.weight);
        mixpi_vwrite_8(b->rest + k, parts.rest);
    }
}

/* The bits of a block's largest finite magnitude, see mixpi_state_size. The slow path, for a block
 * with an Inf, which is rare. Comparisons skip NaN. */
MIXPI_RARE uint32_t MIXPI_P(block_largest_finite)(const float *x) {
    uint32_t largest = 0;
    for (int k = 0; k < MIXP_STATE_BLOCK; k++) {
        uint32_t size = mixpi_state_size(x[k]);
        if (size > largest) largest = size;
    }
    return largest;
}
MIXPI_F uint32_t MIXPI_P(block_largest)(const float *x) {
    mixpi_v  top = mixpi_vzero();
    for (int k = 0; k < MIXP_STATE_BLOCK; k += 16)
        top = mixpi_vmax(mixpi_vabs(mixpi_vload(x + k)), top);
    uint32_t largest = mixp_bits_of_f32(mixpi_vmaxof(top));
    if (largest < 0x7F800000u) return largest;
    return MIXPI_P(block_largest_finite)(x);
}
MIXPI_F void MIXPI_P(block_roots)(float *v) {
    for (int k = 0; k < MIXP_STATE_BLOCK; k += 16)
        mixpi_vstore(v + k, mixpi_vsqrt(mixpi_vload(v + k)));
}

/* Rounds and stores the moments of a block. */
MIXPI_F void MIXPI_P(small_put_moments)(const mixpi_small *b, const mixp_param_row *row,
                                        const float *m, float *v, const float *word) {
    const int64_t block = b->first / MIXP_STATE_BLOCK;
    uint32_t scale;
    if (b->m && b->m_size == 2) MIXPI_P(small_put_bf16)(b->m, m, word, 0);
    if (b->v && b->v_size == 2) MIXPI_P(small_put_bf16)(b->v, v, word, 16);
    if (b->m && b->m_size == 1) {
        scale = mixpi_state_scale_m(MIXPI_P(block_largest)(m));
        MIXPI_P(small_put_m)(b, scale, m, word);
        row->m_scale[block] = (uint8_t)scale;
    }
    if (b->v && b->v_size == 1) {
        scale = mixpi_state_scale_v(MIXPI_P(block_largest)(v));
        MIXPI_P(small_put_v)(b, scale, v, word);
        row->v_scale[block] = (uint8_t)scale;
    }
}

/* The block of a stretch that begins at its element i. */
MIXPI_V mixpi_small MIXPI_P(small_at)(const mixpi_stretch *s, int i, mixpi_small_copy *copy)
{ return mixpi_small_of(s->row, s->first + i, mixpi_stretch_block(s, i), copy); }

/* Widens a block's states to f32 and makes its random words. */
MIXPI_F void MIXPI_P(small_open)(mixpi_stretch *s, int i) {
    const mixp_param_row *row = s->row;
    mixpi_small_copy copy;
    const mixpi_small b = MIXPI_P(small_at)(s, i, &copy);
    const int64_t block = b.first / MIXP_STATE_BLOCK;
    const uint32_t m_scale = row->m_scale ? row->m_scale[block] : 0u;
    const uint32_t v_scale = row->v_scale ? row->v_scale[block] : 0u;
    const uint64_t key = mixpi_state_key_of(s->key, (uint64_t)b.first);
    for (int k = 0; k < MIXP_STATE_BLOCK; k += 16) {
        MIXPI_P(small_words)(key, b.first, k, s->word + i);
        if (b.m)
            mixpi_vstore(s->m + i + k, MIXPI_P(small_moment)(b.m, b.m_size, 0, m_scale, k));
        if (b.v)
            mixpi_vstore(s->v + i + k, MIXPI_P(small_moment)(b.v, b.v_size, 1, v_scale, k));
        if (b.rest) mixpi_vstore(s->p + i + k, MIXPI_P(small_master)(&b, k));
    }
}

/* Prefetches a block of the next stretch: the hardware prefetcher restarts at each page of each
 * array. */
MIXPI_V void MIXPI_P(ask_codes)(const char *codes, int size) {
    for (int at = 0; codes && at < size * MIXP_STATE_BLOCK; at += 64)
        MIXPI_PREFETCH(codes + size * MIXPI_BLOCK + at);
}
MIXPI_V void MIXPI_P(small_ask)(const mixpi_small *b) {
    MIXPI_P(ask_codes)(b->m, b->m_size);
    MIXPI_P(ask_codes)(b->v, b->v_size);
    MIXPI_P(ask_codes)(b->weight, 2);
    MIXPI_P(ask_codes)(b->rest, b->rest_size);
}

/* small_open and Adam in one loop, for a full block whose two moments have codes of `size` bytes.
 * The random words and the widening overlap the latency of roots and quotients. */
MIXPI_F void MIXPI_P(small_adam)(mixpi_stretch *s, int i, int size,
                                 const mixp_step_scalars *u, const float *g) {
    const mixp_param_row *row = s->row;
    mixpi_small_copy copy;
    const mixpi_small b = MIXPI_P(small_at)(s, i, &copy);
    const int64_t block = b.first / MIXP_STATE_BLOCK;
    const uint32_t m_scale = size == 1 ? row->m_scale[block] : 0u;
    const uint32_t v_scale = size == 1 ? row->v_scale[block] : 0u;
    const uint64_t key = mixpi_state_key_of(s->key, (uint64_t)b.first);
    float *m = s->m + i, *v = s->v + i, *p = s->p + i;
    const int roots = s->roots;

    MIXPI_P(small_ask)(&b);
    for (int k = 0; k < MIXP_STATE_BLOCK; k += 16) {
        mixpi_v c = MIXPI_P(small_moment)(b.m, size, 0, m_scale, k), root;
        mixpi_v d = MIXPI_P(small_moment)(b.v, size, 1, v_scale, k);
        mixpi_v w = b.rest ? MIXPI_P(small_master)(&b, k) : mixpi_vload(p + k);
        w = MIXPI_P(adam)(u, u->cautious, mixpi_vload(g + i + k), w, &c, &d, &root);
        MIXPI_P(small_words)(key, b.first, k, s->word + i);
        mixpi_vstore(p + k, w);
        mixpi_vstore(m + k, c);
        mixpi_vstore(v + k, roots ? root : d);
    }
}

#if MIXPI_PASS == 2
/* --- the same for moments of one byte, rounded at once ------------------------------------- *
 * The same bits as small_open, the update and small_close, with fewer operations, for finite
 * numbers and usual scales. A code's bits form an f16, or lie within an f32, with an exponent that
 * is off by 8. One product corrects the exponent and applies the block's unit.
 */
enum { MIXPI_BYTES_MOST = 245 };         /* the largest usual scale of first moments */

/* 2^-8 of 16 first moments in their block's unit. */
MIXPI_V mixpi_v MIXPI_P(bytes_m)(const char *codes) {
    const __m128i c = _mm_loadu_si128((const __m128i *)(const void *)codes);
    const __m256i h = _mm256_slli_epi16(_mm256_cvtepi8_epi16(c), 7);
    return _mm512_cvtph_ps(_mm256_and_si256(h, _mm256_set1_epi16(-0x4001)));
}
/* 16 second moments, whose roots count up from base. */
MIXPI_V mixpi_v MIXPI_P(bytes_v)(const char *codes, uint32_t base) {
    const __m128i c = _mm_loadu_si128((const __m128i *)(const void *)codes);
    const mixpi_vbits u = ((mixpi_vbits)_mm512_cvtepu8_epi32(c) << 19) + base;
    return _mm512_maskz_mul_ps(_mm_test_epi8_mask(c, c), (mixpi_v)u, (mixpi_v)u);
}

/* 16 gradients from k on, of any dtype that autocast supports. */
MIXPI_V mixpi_v MIXPI_P(bytes_grad)(mixp_in grad, int64_t k) {
    const char *p = (const char *)grad.data + k * (grad.dtype == MIXP_F32 ? 4 : 2);
    if (grad.dtype == MIXP_F32) return mixpi_vget(MIXP_F32, p);
    if (grad.dtype == MIXP_F16) return mixpi_vget(MIXP_F16, p);
    return (mixpi_v)mixpi_vread_high(p);
}
/* As mixpi_state_m. m times `unit` is 2^-8 of m in the block's unit; the low bits of its exponent
 * and the top bits of its mantissa are then the code. For a subnormal, the last bits of its sum
 * with 64 are the code. */
MIXPI_V void MIXPI_P(bytes_put_m)(char *codes, const float *m, mixpi_v unit,
                                  mixpi_vbits word) {
    const mixpi_vbits y = (mixpi_vbits)mixpi_vmul(mixpi_vload(m), unit);
    const mixpi_vbits a = y & 0x7FFFFFFFu, sign = y >> 24;
    const __m512i least = _mm512_set1_epi32(0x38800000), bit = _mm512_set1_epi32(0x80);
    const __mmask16 tiny = _mm512_cmplt_epi32_mask((__m512i)a, least);
    mixpi_vbits code = (a + ((word & 0xFFFFu) << 4)) >> 20;
    mixpi_v c = _mm512_mask_add_ps((mixpi_v)code, tiny, (mixpi_v)a, mixpi_vset(64.0f));
    code = (mixpi_vbits)_mm512_ternarylogic_epi32(bit, (__m512i)sign, (__m512i)c, 0xCA);
    mixpi_vwrite_8(codes, code);
}
/* As mixpi_state_v. */
MIXPI_V void MIXPI_P(bytes_put_v)(char *codes, const float *roots, uint32_t base,
                                  mixpi_vbits word) {
    const mixpi_vbits a = (mixpi_vbits)mixpi_vload(roots);
    const mixpi_vbits code = ((a + (word >> 13 & 0x7FFF8u)) >> 19) - base;
    const __mmask16 some = _mm512_test_epi32_mask((__m512i)a, (__m512i)a);
    const __m512i least = _mm512_set1_epi32(1);
    mixpi_vwrite_8(codes, (mixpi_vbits)_mm512_maskz_max_epi32(some, (__m512i)code, least));
}
/* As mixpi_master_to_8. */
MIXPI_V void MIXPI_P(bytes_put_master)(const mixpi_small *b, int k, mixpi_v p,
                                       mixpi_vbits word) {
    const __m512i inf = _mm512_set1_epi32(0x7F800000);
    const __mmask16 real = _mm512_cmple_epi32_mask((__m512i)mixpi_vabs(p), inf);
    const __mmask16 nan = (__mmask16)~real;
    const mixpi_vbits sum = (mixpi_vbits)p + ((word * 0x9E3779B1u) >> 24);
    const __m512i quiet = _mm512_set1_epi32(0x400000);
    const __m512i carried = (__m512i)(sum + 0x8000u);
    const __m512i high = _mm512_mask_or_epi32(carried, nan, (__m512i)p, quiet);
    mixpi_vwrite_high(b->weight + 2 * k, (mixpi_vbits)high);
    mixpi_vwrite_8(b->rest + k,
                   (mixpi_vbits)_mm512_maskz_srli_epi32(real, (__m512i)sum, 8));
}

/* Does a block have only codes of finite moments, and a usual scale? */
MIXPI_V int MIXPI_P(bytes_usual)(const mixpi_small *b, uint32_t m_scale) {
    const __m512i sign = _mm512_set1_epi8(-0x80);
    __m512i top = sign;
    for (int k = 0; k < MIXP_STATE_BLOCK; k += 64) {
        top = _mm512_max_epu8(top, _mm512_or_si512(sign, _mm512_loadu_si512(b->m + k)));
        top = _mm512_max_epu8(top, _mm512_loadu_si512(b->v + k));
    }
    return !_mm512_cmpeq_epi8_mask(top, _mm512_set1_epi8(-1)) &&
           m_scale - 1u < (uint32_t)MIXPI_BYTES_MOST;
}

/* Stores a block's moments, rounded. Returns 0 and stores nothing if a moment is not finite. */
MIXPI_V int MIXPI_P(bytes_close)(const mixpi_stretch *s, const mixpi_small *b, int i,
                                 uint32_t m_top, uint32_t v_top) {
    const uint32_t m_scale = mixpi_state_scale_m(m_top), v_scale = mixpi_state_scale_v(v_top);
    const mixpi_v unit = mixpi_vset(mixp_f32_of_bits((246u - m_scale) << 23));
    const int64_t block = b->first / MIXP_STATE_BLOCK;
    if (m_top >= 0x7F800000u || v_top >= 0x7F800000u) return 0;
    if (m_scale > (uint32_t)MIXPI_BYTES_MOST) return 0;
    for (int k = 0; k < MIXP_STATE_BLOCK; k += 16) {
        const mixpi_vbits word = mixpi_vbits_at(s->word + i + k, 0);
        MIXPI_P(bytes_put_m)(b->m + k, s->m + i + k, unit, word);
        MIXPI_P(bytes_put_v)(b->v + k, s->v + i + k, (v_scale - 15u) << 4, word);
    }
    s->row->m_scale[block] = (uint8_t)m_scale;
    s->row->v_scale[block] = (uint8_t)v_scale;
    return 1;
}

/* Opens, updates and closes a block of Adam. The block stays open if an Inf or NaN appears. */
MIXPI_V int MIXPI_P(bytes_adam)(mixpi_stretch *s, const mixpi_small *b, int i,
                                const mixp_step_scalars *u, mixp_in grad) {
    const int64_t block = b->first / MIXP_STATE_BLOCK;
    const uint32_t m_scale = s->row->m_scale[block] + 8u;
    const uint32_t base = (s->row->v_scale[block] - 15u) << 23;
    const mixpi_v unit = mixpi_vset(mixp_f32_of_bits(m_scale << 23));
    const uint64_t key = mixpi_state_key_of(s->key, (uint64_t)b->first);
    const mixp_step_scalars own = *u;           /* a copy that stores of codes cannot alias */
    mixpi_vbits place = mixpi_vstate_place(key, (uint32_t)b->first);
    __m512i m_top = _mm512_setzero_si512(), v_top = m_top;
    float *m = s->m + i, *v = s->v + i, *p = s->p + i, *words = s->word + i;
    for (int k = 0; k < MIXP_STATE_BLOCK; k += 16) {
        const mixpi_vbits word = mixpi_vstate_word(key, place);
        mixpi_v w = b->rest ? MIXPI_P(small_master)(b, k) : mixpi_vload(p + k);
        mixpi_v c = mixpi_vmul(MIXPI_P(bytes_m)(b->m + k), unit);
        mixpi_v d = MIXPI_P(bytes_v)(b->v + k, base), root;
        mixpi_v g = MIXPI_P(bytes_grad)(grad, b->first + k);
        w = MIXPI_P(adam)(&own, own.cautious, g, w, &c, &d, &root);
        m_top = _mm512_max_epu32(m_top, (__m512i)mixpi_vabs(c));
        v_top = _mm512_max_epu32(v_top, (__m512i)root);
        mixpi_vstore(p + k, w);
        mixpi_vstore(m + k, c);
        mixpi_vstore(v + k, root);
        memcpy(words + k, &word, sizeof word);
        if (b->rest && b->rest_size == 1) MIXPI_P(bytes_put_master)(b, k, w, word);
        place += 16;
    }

    /* Masters of 16 bits and the scales wait for the whole block. */
    if (b->rest && b->rest_size == 2) MIXPI_P(small_put_16)(b, p);
    return MIXPI_P(bytes_close)(s, b, i, _mm512_reduce_max_epu32(m_top),
                                _mm512_reduce_max_epu32(v_top));
}

/* Opens, updates and closes a stretch. Returns 0 and changes nothing if the stretch is of another
 * kind or a block is not usual. */
MIXPI_RARE int MIXPI_P(stretch_bytes)(mixpi_stretch *s, mixp_optimizer_kind kind,
                                      const mixp_step_scalars *u, mixp_in grad) {
    const mixp_dtype m = s->row->m_dtype, v = s->row->v_dtype;
    mixpi_small_copy copy;
    if (!mixpi_is_adam(kind) || s->row->third) return 0;
    if (s->n % MIXP_STATE_BLOCK || m != MIXP_F8_E4M3 || v != MIXP_U8) return 0;
    if (grad.dtype != MIXP_F32 && grad.dtype != MIXP_F16 && grad.dtype != MIXP_BF16) return 0;
    for (int i = 0; i < s->n; i += MIXP_STATE_BLOCK) {
        const mixpi_small b = MIXPI_P(small_at)(s, i, &copy);
        const uint32_t scale = s->row->m_scale[b.first / MIXP_STATE_BLOCK];
        if (!MIXPI_P(bytes_usual)(&b, scale)) return 0;
    }

    /* All blocks are usual. */
    s->roots = 1;
    for (int i = 0; i < s->n; i += MIXP_STATE_BLOCK) {
        const mixpi_small b = MIXPI_P(small_at)(s, i, &copy);
        MIXPI_P(small_ask)(&b);
        MIXPI_P(ask)(grad, b.first + MIXPI_BLOCK, MIXP_STATE_BLOCK);
        if (MIXPI_P(bytes_adam)(s, &b, i, u, grad)) s->closed |= 1u << i / MIXP_STATE_BLOCK;
    }
    return 1;
}
#else
MIXPI_V int MIXPI_P(stretch_bytes)(mixpi_stretch *s, mixp_optimizer_kind kind,
                                   const mixp_step_scalars *u, mixp_in grad) {
    (void)s;
    (void)kind;
    (void)u;
    (void)grad;
    return 0;
}
#endif

/* Stores a block's states, rounded. May overwrite v with its roots. */
MIXPI_F void MIXPI_P(small_close)(const mixpi_stretch *s, int i) {
    const float *word = s->word + i;
    mixpi_small_copy copy;
    const mixpi_small b = MIXPI_P(small_at)(s, i, &copy);
    if (b.v && b.v_size == 1 && !s->roots) MIXPI_P(block_roots)(s->v + i);
    MIXPI_P(small_put_moments)(&b, s->row, s->m ? s->m + i : NULL, s->v ? s->v + i : NULL,
                               word);
    if (b.rest && b.rest_size == 2) MIXPI_P(small_put_16)(&b, s->p + i);
    if (b.rest && b.rest_size == 1) MIXPI_P(small_put_8)(&b, s->p + i, word);
    mixpi_small_done(&b, s->row);
}

/* The address of a moment as f32: in place, or in a buffer. */
MIXPI_V float *MIXPI_P(moment)(const mixpi_stretch *s, void *state, mixp_dtype dtype,
                               float *buffer) {
    if (!state) return NULL;
    return dtype == MIXP_F32 ? (float *)state + s->first : buffer;
}

/* Begins a stretch of n elements of a row from `first` on. Does not read the states yet. */
MIXPI_V void MIXPI_P(stretch_begin)(mixpi_stretch *s, int64_t first, int n) {
    const mixp_param_row *row = s->row;
    const mixp_out weight = mixpi_out_to(row->weight, row->weight_dtype, 0);
    s->first = first;
    s->n = n;
    s->roots = 0;
    s->closed = 0;
    s->m = MIXPI_P(moment)(s, row->m, row->m_dtype, s->m_buffer);
    s->v = MIXPI_P(moment)(s, row->v, row->v_dtype, s->v_buffer);
    s->p = row->master ? (float *)row->master + first
                       : MIXPI_P(place)(weight, first, s->p_buffer);
    if (!row->master) (void)MIXPI_P(held)(weight, first, n, s->p_buffer);
    if (mixpi_row_is_split(row)) s->p = s->p_buffer;
}
MIXPI_V void MIXPI_P(stretch_open)(mixpi_stretch *s) {
    if (mixpi_row_is_coded(s->row))
        for (int i = 0; i < s->n; i += MIXP_STATE_BLOCK) MIXPI_P(small_open)(s, i);
}

MIXPI_V void MIXPI_P(stretch_close)(mixpi_stretch *s) {
    const mixp_param_row *row = s->row;
    const mixp_out weight = mixpi_out_to(row->weight, row->weight_dtype, 0);
    if (!mixpi_row_is_split(row)) MIXPI_P(placed)(weight, s->first, s->n, s->p);
    if (mixpi_row_is_coded(row))
        for (int i = 0; i < s->n; i += MIXP_STATE_BLOCK)
            if (!(s->closed >> i / MIXP_STATE_BLOCK & 1u)) MIXPI_P(small_close)(s, i);
}

/* Averages: p = lerp(p, weight, rate), as mixpi_lerp. */
MIXPI_RARE void MIXPI_P(ema_block)(float rate, const float *weight, float *p, int n) {
    int i = 0;
    if (rate < 0.5f)
        for (; i + 16 <= n; i += 16) {
            const mixpi_v a = mixpi_vload(p + i);
            const mixpi_v way = mixpi_vsub(mixpi_vload(weight + i), a);
            mixpi_vstore(p + i, mixpi_vfma(mixpi_vset(rate), way, a));
        }
    for (; i < n; i++) p[i] = mixpi_lerp(p[i], weight[i], rate);
}

MIXPI_RARE void MIXPI_P(muon_block)(const mixpi_stretch *s, mixp_optimizer_kind kind,
                                    const mixp_step_scalars *u, const float *g) {
    float *p = s->p, *m = s->m;
    if (kind == MIXP_OPTIMIZER_MUON)
        for (int i = 0; i < s->n; i++) mixpi_muon_element(u, s->row->rate, g[i], p + i);
    else if (kind == MIXP_OPTIMIZER_MUON_UNIT)
        for (int i = 0; i < s->n; i++) p[i] = g[i] * u->factor;
    else
        for (int i = 0; i < s->n; i++) mixpi_muon_momentum_element(u, g[i], p + i, m + i);
}

MIXPI_F void MIXPI_P(stretch_adam)(mixpi_stretch *s, const mixp_step_scalars *u,
                                   const float *g) {
    s->roots = s->row->v_dtype == MIXP_U8;
    if (u->cautious) MIXPI_P(adam_block)(u, 1, s, g);
    else MIXPI_P(adam_block)(u, 0, s, g);
}

/* Opens and updates a stretch in one pass. Returns 0 and changes nothing for another kind. */
MIXPI_K int MIXPI_P(stretch_small)(mixpi_stretch *s, mixp_optimizer_kind kind,
                                   const mixp_step_scalars *u, const float *g) {
    const mixp_dtype m = s->row->m_dtype, v = s->row->v_dtype;
    const int bf16 = m == MIXP_BF16 && v == MIXP_BF16;
    const int bytes = m == MIXP_F8_E4M3 && v == MIXP_U8;
    if (!mixpi_is_adam(kind) || s->row->third) return 0;
    if (s->n % MIXP_STATE_BLOCK || !(bf16 || bytes)) return 0;
    for (int i = 0; bf16 && i < s->n; i += MIXP_STATE_BLOCK) MIXPI_P(small_adam)(s, i, 2, u, g);
    s->roots = bytes;
    for (int i = 0; bytes && i < s->n; i += MIXP_STATE_BLOCK) MIXPI_P(small_adam)(s, i, 1, u, g);
    return 1;
}

MIXPI_V void MIXPI_P(stretch_update)(mixpi_stretch *s, mixp_optimizer_kind kind,
                                     const mixp_step_scalars *u, const float *g) {
    const int n = s->n;
    float *p = s->p, *m = s->m, *v = s->v;
    if (kind == MIXP_OPTIMIZER_EMA) MIXPI_P(ema_block)(s->row->rate, g, p, n);
    else if (kind == MIXP_OPTIMIZER_NADAM || kind == MIXP_OPTIMIZER_ADAMAX || s->row->third)
        MIXPI_P(later_block)(s, kind, u, g);
    else if (kind >= MIXP_OPTIMIZER_MUON) MIXPI_P(muon_block)(s, kind, u, g);
    else if (kind == MIXP_OPTIMIZER_SGD) MIXPI_P(sgd_block)(u, g, p, m, n);
    else if (kind == MIXP_OPTIMIZER_RMSPROP || kind == MIXP_OPTIMIZER_ADAGRAD)
        MIXPI_P(rmsprop_block)(u, g, p, m, v, n);
    else if (kind == MIXP_OPTIMIZER_LION) MIXPI_P(lion_block)(u, g, p, m, n);
    else MIXPI_P(stretch_adam)(s, u, g);
}

/* Stores n of a low copy's count elements from `at` on. A large copy's stores bypass the caches. */
MIXPI_V void MIXPI_P(put_low)(mixp_dtype dtype, void *low, int64_t count, int64_t at,
                              int64_t n, const float *p) {
    char *to = (char *)low + 2 * at;
    int64_t i = 0;
    if ((size_t)count * 2 > MIXPI_STREAM_BYTES && (uintptr_t)to % 32 == 0)
        for (; i + 16 <= n; i += 16) mixpi_vput(dtype, to + 2 * i, mixpi_vload(p + i), 1);
    MIXPI_P(placed)(mixpi_out_to(low, dtype, 0), at + i, n - i, p + i);
}

/* Counts, per lane, which of 16 elements have changed, and which of them would not have changed in
 * a low dtype, where `held` would have become `moved`. */
MIXPI_V void MIXPI_P(count_16)(int32_t *updates, int32_t *lost, const float *was,
                               const float *now, const float *held, const float *moved) {
    for (int i = 0; i < 16; i++) {
        const int32_t differs = mixp_bits_of_f32(was[i]) != mixp_bits_of_f32(now[i]);
        updates[i] += differs;
        lost[i] += differs & (moved[i] == held[i]);
    }
}

/* Counts the lost ones of n updates: a vector form of mixpi_update_is_lost. `was` has room for a
 * block; elements after the n are set to 0. */
MIXPI_K void MIXPI_P(count_lost)(mixpi_chunk *c, mixp_dtype low, float *was,
                                 const float *now, int n) {
    float to[MIXPI_BLOCK], held[MIXPI_BLOCK], moved[MIXPI_BLOCK];
    uint16_t stored[MIXPI_BLOCK];
    int32_t updates[16] = { 0 }, lost[16] = { 0 };
    int i, whole = n;

    /* Compute the old values of the low copy. */
    memcpy(to, now, (size_t)n * sizeof *to);
    for (; whole % 16; whole++) was[whole] = to[whole] = 0.0f;
    MIXPI_P(narrow_run)(low, stored, was, whole);
    MIXPI_P(widen_run)(low, held, stored, whole);

    /* Compare them with its values after the same step. */
    for (i = 0; i < whole; i += 16) {
        mixpi_v step = mixpi_vsub(mixpi_vload(to + i), mixpi_vload(was + i));
        mixpi_vstore(moved + i, mixpi_vadd(mixpi_vload(held + i), step));
    }
    MIXPI_P(narrow_run)(low, stored, moved, whole);
    MIXPI_P(widen_run)(low, moved, stored, whole);
    for (i = 0; i < whole; i += 16)
        MIXPI_P(count_16)(updates, lost, was + i, to + i, held + i, moved + i);
    for (i = 0; i < 16; i++) {
        c->updates += updates[i];
        c->lost += lost[i];
    }
}

MIXPI_K void MIXPI_P(update_chunk)(void *arg, int64_t index, int worker) {
    const mixpi_chunk_job *job = (const mixpi_chunk_job *)arg;
    const mixp_param_row *row = &job->rows[job->chunks[index].row];
    const mixp_in grad = mixpi_in(row->grad, row->grad_dtype);
    int64_t i = job->chunks[index].first, end = mixpi_min(i + MIXPI_CHUNK, row->count);
    float was[MIXPI_BLOCK];
    mixpi_kept kept[2];         /* of a row with padding: the gradient, the weight */
    mixpi_stretch_room room;
    mixpi_stretch s;
    mixp_step_scalars late;
    const mixp_step_scalars *u = &job->step->update[row->group];
    (void)worker;

    if (job->step->skip) { mixpi_clear_grad(row, i, end - i); return; }
    if (row->missed && *row->missed) {
        mixpi_step_scalars_of(job->plan, job->step, row->group,
                             job->step->applied - *row->missed, &late);
        u = &late;
    }

    mixpi_stretch_carve(&s, &room);
    s.row = row;
    s.key = mixpi_state_key(job->plan->seed, job->step->applied, row->tensor);
    for (; i < end; i += MIXPI_BLOCK) {
        int n = (int)mixpi_min(MIXPI_BLOCK, end - i);
        if (row->pitch) {
            mixpi_padding_keep(&kept[0], row->grad, row->grad_dtype, i, n);
            mixpi_padding_keep(&kept[1], row->weight, row->weight_dtype, i, n);
            mixpi_padding_put(row, row->grad, row->grad_dtype, i, n, NULL);
            mixpi_padding_put(row, row->weight, row->weight_dtype, i, n, NULL);
            if (row->master) mixpi_padding_put(row, row->master, row->master_dtype, i, n, NULL);
        }

        /* The update of a block, by the fastest function that its states allow. */
        MIXPI_P(stretch_begin)(&s, i, n);
        if (job->counting || !MIXPI_P(stretch_bytes)(&s, job->plan->kind, u, grad)) {
            const float *g = MIXPI_P(read)(grad, i, n, s.g_buffer);
            if (g == s.g_buffer) MIXPI_P(ask)(grad, i + n, n);  /* f32 comes by `stream` */
            if (job->counting || !MIXPI_P(stretch_small)(&s, job->plan->kind, u, g)) {
                MIXPI_P(stretch_open)(&s);
                if (job->counting) memcpy(was, s.p, (size_t)n * sizeof *was);
                MIXPI_P(stretch_update)(&s, job->plan->kind, u, g);
            }
        }
        if (job->counting)
            MIXPI_P(count_lost)(&job->chunks[index], mixpi_row_low_weight(row), was, s.p, n);

        /* States, weights and low copies are written; the gradient is cleared if asked. */
        MIXPI_P(stretch_close)(&s);
        if (row->low_f16)
            MIXPI_P(put_low)(MIXP_F16, row->low_f16, row->count, i, n, s.p);
        if (row->low_bf16)
            MIXPI_P(put_low)(MIXP_BF16, row->low_bf16, row->count, i, n, s.p);
        mixpi_clear_grad(row, i, n);
        if (!row->pitch) continue;
        mixpi_padding_put(row, row->grad, row->grad_dtype, i, n, &kept[0]);
        mixpi_padding_put(row, row->weight, row->weight_dtype, i, n, &kept[1]);
    }
    mixpi_vfence();
}

MIXPI_KERNEL(update, mixpi_cpu_update, mixp_update_args, MIXPI_P(update_chunk))

