#pragma once
#include "pass.c"
/* --- vectors of 16 floats ------------------------------------------------------------- *
 * mixpi_v is 16 floats: one register of AVX-512, two of AVX2, four of NEON, an array in plain C.
 * Each instruction set defines the operations on one register: functions mixpi_r... The operations
 * on 16 floats, functions mixpi_v..., are written once below; every kernel calls these. The list
 * below appends the pass's suffix to the names.
 *
 * vfma rounds once on every set. vmla may round twice, because a true fma is slow in plain C. vsum
 * adds in one fixed tree: halves, quarters, pairs. vmax and vmin return b if either is NaN, as on
 * x86. vround rounds to the nearest whole number. vldexp multiplies by 2^b, b a whole number in
 * [-126, 127], and by 0 if b is -127. vselect_gt is a > b ? x : y. The forms in _n access n <= 16
 * floats and read 0 beyond. vget and vput convert 16 elements of any dtype that mixpi_has_vectors
 * accepts. */
#define mixpi_v              MIXPI_P(v)             /* 16 floats                           */
#define mixpi_vcodes         MIXPI_P(vcodes)        /* 16 codes of a narrow dtype          */
#define mixpi_vreg           MIXPI_P(vreg)          /* one register of floats              */
#define mixpi_vbits          MIXPI_P(vbits)         /* its bits, for the operators of C    */
#define mixpi_vset           MIXPI_P(vset)
#define mixpi_vzero          MIXPI_P(vzero)
#define mixpi_vload          MIXPI_P(vload)
#define mixpi_vload_n        MIXPI_P(vload_n)
#define mixpi_vpart          MIXPI_P(vpart)
#define mixpi_vstore         MIXPI_P(vstore)
#define mixpi_vstore_n       MIXPI_P(vstore_n)
#define mixpi_vadd           MIXPI_P(vadd)
#define mixpi_vsub           MIXPI_P(vsub)
#define mixpi_vmul           MIXPI_P(vmul)
#define mixpi_vdiv           MIXPI_P(vdiv)
#define mixpi_vmax           MIXPI_P(vmax)
#define mixpi_vmin           MIXPI_P(vmin)
#define mixpi_vsqrt          MIXPI_P(vsqrt)
#define mixpi_vneg           MIXPI_P(vneg)
#define mixpi_vabs           MIXPI_P(vabs)
#define mixpi_vround         MIXPI_P(vround)
#define mixpi_vfma           MIXPI_P(vfma)
#define mixpi_vmla           MIXPI_P(vmla)
#define mixpi_vldexp         MIXPI_P(vldexp)
#define mixpi_vselect_gt     MIXPI_P(vselect_gt)
#define mixpi_vsum           MIXPI_P(vsum)
#define mixpi_vsum8          MIXPI_P(vsum8)
#define mixpi_vmaxof         MIXPI_P(vmaxof)
#define mixpi_vmaxof8        MIXPI_P(vmaxof8)
#define mixpi_vget           MIXPI_P(vget)
#define mixpi_rget           MIXPI_P(rget)
#define mixpi_rhalf          MIXPI_P(rhalf)
#define mixpi_rhalf_of       MIXPI_P(rhalf_of)
#define mixpi_vhalf_8        MIXPI_P(vhalf_8)
#define mixpi_rstream        MIXPI_P(rstream)
#define mixpi_rbits          MIXPI_P(rbits)
#define mixpi_rof            MIXPI_P(rof)
#define mixpi_rset           MIXPI_P(rset)
#define mixpi_rload          MIXPI_P(rload)
#define mixpi_rstore         MIXPI_P(rstore)
#define mixpi_rmax           MIXPI_P(rmax)
#define mixpi_rmin           MIXPI_P(rmin)
#define mixpi_rsqrt          MIXPI_P(rsqrt)
#define mixpi_rround         MIXPI_P(rround)
#define mixpi_rwhole         MIXPI_P(rwhole)
#define mixpi_rfma           MIXPI_P(rfma)
#define mixpi_rmla           MIXPI_P(rmla)
#define mixpi_rselect_gt     MIXPI_P(rselect_gt)
#define mixpi_rsum           MIXPI_P(rsum)
#define mixpi_rmaxof         MIXPI_P(rmaxof)
#define mixpi_vput           MIXPI_P(vput)
#define mixpi_vput_f32       MIXPI_P(vput_f32)
#define mixpi_vput_f16       MIXPI_P(vput_f16)
#define mixpi_vput_256       MIXPI_P(vput_256)
#define mixpi_vput_codes     MIXPI_P(vput_codes)
#define mixpi_vput_rounded   MIXPI_P(vput_rounded)
#define mixpi_vnarrow        MIXPI_P(vnarrow)
#define mixpi_vnarrow_by     MIXPI_P(vnarrow_by)
#define mixpi_vrandom        MIXPI_P(vrandom)
#define mixpi_vfence         MIXPI_P(vfence)
#define mixpi_vclamp         MIXPI_P(vclamp)
#define mixpi_vpoly          MIXPI_P(vpoly)
#define mixpi_vexpm1_part    MIXPI_P(vexpm1_part)
#define mixpi_vexp           MIXPI_P(vexp)
#define mixpi_vlog           MIXPI_P(vlog)
#define mixpi_vlog1p         MIXPI_P(vlog1p)
#define mixpi_vtanh          MIXPI_P(vtanh)
#define mixpi_vsigmoid       MIXPI_P(vsigmoid)
#define mixpi_vnormal        MIXPI_P(vnormal)
#define mixpi_vpow           MIXPI_P(vpow)
#define mixpi_vlarger        MIXPI_P(vlarger)
#define mixpi_vsmaller       MIXPI_P(vsmaller)
#define mixpi_vsign          MIXPI_P(vsign)
#define mixpi_vwhere         MIXPI_P(vwhere)
#define mixpi_vtanh_of       MIXPI_P(vtanh_of)
#define mixpi_vbits_all      MIXPI_P(vbits_all)
#define mixpi_vbits_at       MIXPI_P(vbits_at)
#define mixpi_vbits_gt       MIXPI_P(vbits_gt)
#define mixpi_vbits_max      MIXPI_P(vbits_max)
#define mixpi_vbits_min      MIXPI_P(vbits_min)
#define mixpi_vbits_times    MIXPI_P(vbits_times)
#define mixpi_vcode_nearest  MIXPI_P(vcode_nearest)
#define mixpi_vcode_rounded  MIXPI_P(vcode_rounded)
#define mixpi_vcode_bf16     MIXPI_P(vcode_bf16)
#define mixpi_vcode_e8m0     MIXPI_P(vcode_e8m0)
#define mixpi_vcode_of_e8m0  MIXPI_P(vcode_of_e8m0)
#define mixpi_vcode_random   MIXPI_P(vcode_random)
#define mixpi_vcode_widen    MIXPI_P(vcode_widen)
#define mixpi_vlanes         MIXPI_P(vlanes)        /* elements of one register           */
#define mixpi_vread_high     MIXPI_P(vread_high)
#define mixpi_vread_16       MIXPI_P(vread_16)
#define mixpi_vread_8        MIXPI_P(vread_8)
#define mixpi_vwrite_high    MIXPI_P(vwrite_high)
#define mixpi_vwrite_16      MIXPI_P(vwrite_16)
#define mixpi_vwrite_8       MIXPI_P(vwrite_8)
#define mixpi_vlow_16        MIXPI_P(vlow_16)
#define mixpi_vstate_random  MIXPI_P(vstate_random)
#define mixpi_vstate_place   MIXPI_P(vstate_place)
#define mixpi_vstate_word    MIXPI_P(vstate_word)
#define mixpi_vstate_bf16    MIXPI_P(vstate_bf16)
#define mixpi_vstate_m       MIXPI_P(vstate_m)
#define mixpi_vstate_m_value MIXPI_P(vstate_m_value)
#define mixpi_vstate_v       MIXPI_P(vstate_v)
#define mixpi_vstate_v_value MIXPI_P(vstate_v_value)
#define mixpi_vmaster_16     MIXPI_P(vmaster_16)
#define mixpi_vmaster_8      MIXPI_P(vmaster_8)
#define mixpi_vmaster_of     MIXPI_P(vmaster_of)
#define mixpi_vmaster_parts  MIXPI_P(vmaster_parts)

/* --- what an instruction set says ------------------------------------------------------ *
 * MIXPI_EACH runs its statement for each register i of 16 floats. MIXPI_FOLD combines the upper
 * half of the registers with the lower half, register i + n with register i, until one is left.
 * Both use constant indices, because gcc -O2 does not unroll a loop over registers and would keep
 * the registers in memory.
 */
#if MIXPI_PASS == 2
#  define MIXPI_SUFFIX avx512
#  define MIXPI_TARGET                                                                    \
       __attribute__((__target__("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")))
#  define MIXPI_TARGET_BF16                                                               \
       __attribute__((__target__("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")))
#  define MIXPI_REGS 1
#  define MIXPI_EACH(does) { enum { i = 0 }; does; }
#  define MIXPI_FOLD(does)
typedef __m512   mixpi_vreg;
typedef uint32_t mixpi_vbits __attribute__((__vector_size__(64)));
#elif MIXPI_PASS == 1
#  define MIXPI_SUFFIX avx2
#  define MIXPI_TARGET __attribute__((__target__("avx2,fma,f16c")))
#  define MIXPI_REGS 2
#  define MIXPI_EACH(does) { { enum { i = 0 }; does; } { enum { i = 1 }; does; } }
#  define MIXPI_FOLD(does) { enum { i = 0, n = 1 }; does; }
typedef __m256   mixpi_vreg;
typedef uint32_t mixpi_vbits __attribute__((__vector_size__(32)));
#elif MIXPI_PASS == 3
#  define MIXPI_SUFFIX neon
#  define MIXPI_TARGET
#  define MIXPI_REGS 4
#  define MIXPI_EACH(does)                                                                \
       { { enum { i = 0 }; does; } { enum { i = 1 }; does; }                              \
         { enum { i = 2 }; does; } { enum { i = 3 }; does; } }
#  define MIXPI_FOLD(does)                                                                \
       { { enum { i = 0, n = 2 }; does; } { enum { i = 1, n = 2 }; does; }                \
         { enum { i = 0, n = 1 }; does; } }
typedef float32x4_t mixpi_vreg;
typedef uint32_t    mixpi_vbits __attribute__((__vector_size__(16)));
#else
#  define MIXPI_SUFFIX scalar
#  define MIXPI_TARGET
#  define MIXPI_REGS 16
#  define MIXPI_EACH(does) { int i; for (i = 0; i < 16; i++) does; }
#  define MIXPI_FOLD(does) { int i, n; for (n = 8; n > 0; n /= 2) for (i = 0; i < n; i++) does; }
typedef float    mixpi_vreg;
typedef uint32_t mixpi_vbits;
#endif
#define MIXPI_LANES (16 / MIXPI_REGS)   /* floats of a register */

/* Operations on one register of floats and on its bits. vbits_gt, _max and _min compare as signed
 * numbers. vbits_times converts a whole number and multiplies it by `unit`. vread and vwrite move
 * codes of 16 or 8 bits; vread extends the sign. The forms in _high hold 16 bits in the upper half
 * of each element. rhalf widens f16, and rhalf_of register i of 16 f16, if the set has an
 * instruction for it. With stream 1, and in rstream, stores bypass the caches; p is then aligned to
 * a cache line. */
#if MIXPI_PASS == 1 || MIXPI_PASS == 2
MIXPI_V float mixpi_vsum8(__m256 h) {
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}

MIXPI_V float mixpi_vmaxof8(__m256 h) {
    __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(q, _mm_shuffle_ps(q, q, 1)));
}

MIXPI_V void mixpi_vput_256(void *p, __m256i a, int stream) {
    if (stream) _mm256_stream_si256((__m256i *)p, a);
    else _mm256_storeu_si256((__m256i *)p, a);
}

/* 16 codes of e5m2 as f16, or of e4m3 as f16 divided by 256. */
MIXPI_V __m256i mixpi_vhalf_8(mixp_dtype from, const void *p) {
    const __m256i top = _mm256_set1_epi16(0x3F80), quiet = _mm256_set1_epi16(0x3F80 ^ 0x7E00);
    __m256i h = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p)), nan;
    if (from == MIXP_F8_E5M2) return _mm256_slli_epi16(h, 8);
    h = _mm256_and_si256(_mm256_slli_epi16(h, 7), _mm256_set1_epi16((short)0xBFFF));
    nan = _mm256_cmpeq_epi16(_mm256_and_si256(h, top), top);
    return _mm256_xor_si256(h, _mm256_and_si256(nan, quiet));
}

/* Call this after stores that bypass the caches. */
MIXPI_V void mixpi_vfence(void) { _mm_sfence(); }
#else
MIXPI_V void mixpi_vfence(void) { }
#endif

#if MIXPI_PASS == 2
MIXPI_V mixpi_vbits mixpi_vbits_gt(mixpi_vbits a, mixpi_vbits b, mixpi_vbits x,
                                   mixpi_vbits y) {
    __mmask16 greater = _mm512_cmpgt_epi32_mask((__m512i)a, (__m512i)b);
    return (mixpi_vbits)_mm512_mask_blend_epi32(greater, (__m512i)y, (__m512i)x);
}
MIXPI_V mixpi_vbits mixpi_vbits_max(mixpi_vbits a, mixpi_vbits b)
{ return (mixpi_vbits)_mm512_max_epi32((__m512i)a, (__m512i)b); }
MIXPI_V mixpi_vbits mixpi_vbits_min(mixpi_vbits a, mixpi_vbits b)
{ return (mixpi_vbits)_mm512_min_epi32((__m512i)a, (__m512i)b); }
MIXPI_V mixpi_vreg mixpi_vbits_times(mixpi_vbits a, float unit)
{ return _mm512_mul_ps(_mm512_cvtepi32_ps((__m512i)a), _mm512_set1_ps(unit)); }
MIXPI_V mixpi_vbits mixpi_rbits(mixpi_vreg a)                { return (mixpi_vbits)a; }
MIXPI_V mixpi_vreg  mixpi_rof(mixpi_vbits a)                 { return (mixpi_vreg)a; }
MIXPI_V mixpi_vreg  mixpi_rset(float x)                      { return _mm512_set1_ps(x); }
MIXPI_V mixpi_vreg  mixpi_rload(const float *p)              { return _mm512_loadu_ps(p); }
MIXPI_V void        mixpi_rstore(float *p, mixpi_vreg a)     { _mm512_storeu_ps(p, a); }
MIXPI_V void        mixpi_rstream(float *p, mixpi_vreg a)    { _mm512_stream_ps(p, a); }
MIXPI_V mixpi_vreg  mixpi_rmax(mixpi_vreg a, mixpi_vreg b)   { return _mm512_max_ps(a, b); }
MIXPI_V mixpi_vreg  mixpi_rmin(mixpi_vreg a, mixpi_vreg b)   { return _mm512_min_ps(a, b); }
MIXPI_V mixpi_vreg  mixpi_rsqrt(mixpi_vreg a)                { return _mm512_sqrt_ps(a); }
MIXPI_V mixpi_vreg  mixpi_rround(mixpi_vreg a)
{ return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
MIXPI_V mixpi_vbits mixpi_rwhole(mixpi_vreg a)      { return (mixpi_vbits)_mm512_cvtps_epi32(a); }
MIXPI_V mixpi_vreg  mixpi_rfma(mixpi_vreg a, mixpi_vreg b, mixpi_vreg c)
{ return _mm512_fmadd_ps(a, b, c); }
MIXPI_V mixpi_vreg  mixpi_rmla(mixpi_vreg a, mixpi_vreg b, mixpi_vreg c)
{ return _mm512_fmadd_ps(a, b, c); }
MIXPI_V mixpi_vreg  mixpi_rselect_gt(mixpi_vreg a, mixpi_vreg b, mixpi_vreg x, mixpi_vreg y)
{ return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), y, x); }
MIXPI_V float       mixpi_rsum(mixpi_vreg a) {
    return mixpi_vsum8(
        _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1)));
}
MIXPI_V float       mixpi_rmaxof(mixpi_vreg a) {
    return mixpi_vmaxof8(
        _mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1)));
}
MIXPI_V mixpi_vreg  mixpi_rhalf(const char *p)
{ return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)p)); }
MIXPI_V mixpi_vreg  mixpi_rhalf_of(__m256i h, int i)         { (void)i; return _mm512_cvtph_ps(h); }
MIXPI_V mixpi_vbits mixpi_vread_high(const char *p) {       /* one instruction, not two */
    const mixpi_vbits to = { 0x0001F, 0x1001F, 0x2001F, 0x3001F, 0x4001F, 0x5001F, 0x6001F,
                             0x7001F, 0x8001F, 0x9001F, 0xA001F, 0xB001F, 0xC001F, 0xD001F,
                             0xE001F, 0xF001F };         /* elements from 16 on are 0 */
    const __m256i h = _mm256_loadu_si256((const __m256i *)(const void *)p);
    const __m512i zeros = _mm512_setzero_si512();
    return (mixpi_vbits)_mm512_permutexvar_epi16((__m512i)to, _mm512_inserti64x4(zeros, h, 0));
}
MIXPI_V mixpi_vbits mixpi_vread_16(const char *p) {
    __m256i h = _mm256_loadu_si256((const __m256i *)(const void *)p);
    return (mixpi_vbits)_mm512_cvtepi16_epi32(h);
}
MIXPI_V mixpi_vbits mixpi_vread_8(const char *p) {
    __m128i h = _mm_loadu_si128((const __m128i *)(const void *)p);
    return (mixpi_vbits)_mm512_cvtepi8_epi32(h);
}
MIXPI_V void mixpi_vwrite_high(char *p, mixpi_vbits a) {
    const mixpi_vbits odd = { 0x30001, 0x70005, 0xB0009, 0xF000D, 0x130011, 0x170015,
                              0x1B0019, 0x1F001D, 1, 1, 1, 1, 1, 1, 1, 1 };
    __m512i h = _mm512_permutexvar_epi16((__m512i)odd, (__m512i)a);
    _mm256_storeu_si256((__m256i *)(void *)p, _mm512_castsi512_si256(h));
}
MIXPI_V void mixpi_vwrite_16(char *p, mixpi_vbits a)
{ _mm256_storeu_si256((__m256i *)(void *)p, _mm512_cvtepi32_epi16((__m512i)a)); }
MIXPI_V void mixpi_vwrite_8(char *p, mixpi_vbits a)
{ _mm_storeu_si128((__m128i *)(void *)p, _mm512_cvtepi32_epi8((__m512i)a)); }

#elif MIXPI_PASS == 1
MIXPI_V mixpi_vbits mixpi_vbits_gt(mixpi_vbits a, mixpi_vbits b, mixpi_vbits x,
                                   mixpi_vbits y) {
    __m256 greater = (__m256)_mm256_cmpgt_epi32((__m256i)a, (__m256i)b);
    /* Not the blend of bytes: gcc 12 tests each char for a negative value, and an unsigned char is
     * never negative. */
    return (mixpi_vbits)_mm256_blendv_ps((__m256)y, (__m256)x, greater);
}
MIXPI_V mixpi_vbits mixpi_vbits_max(mixpi_vbits a, mixpi_vbits b)
{ return (mixpi_vbits)_mm256_max_epi32((__m256i)a, (__m256i)b); }
MIXPI_V mixpi_vbits mixpi_vbits_min(mixpi_vbits a, mixpi_vbits b)
{ return (mixpi_vbits)_mm256_min_epi32((__m256i)a, (__m256i)b); }
MIXPI_V mixpi_vreg mixpi_vbits_times(mixpi_vbits a, float unit)
{ return _mm256_mul_ps(_mm256_cvtepi32_ps((__m256i)a), _mm256_set1_ps(unit)); }
MIXPI_V mixpi_vbits mixpi_rbits(mixpi_vreg a)                { return (mixpi_vbits)a; }
MIXPI_V mixpi_vreg  mixpi_rof(mixpi_vbits a)                 { return (mixpi_vreg)a; }
MIXPI_V mixpi_vreg  mixpi_rset(float x)                      { return _mm256_set1_ps(x); }
MIXPI_V mixpi_vreg  mixpi_rload(const float *p)              { return _mm256_loadu_ps(p); }
MIXPI_V void        mixpi_rstore(float *p, mixpi_vreg a)     { _mm256_storeu_ps(p, a); }
MIXPI_V void        mixpi_rstream(float *p, mixpi_vreg a)    { _mm256_stream_ps(p, a); }
MIXPI_V mixpi_vreg  mixpi_rmax(mixpi_vreg a, mixpi_vreg b)   { return _mm256_max_ps(a, b); }
MIXPI_V mixpi_vreg  mixpi_rmin(mixpi_vreg a, mixpi_vreg b)   { return _mm256_min_ps(a, b); }
MIXPI_V mixpi_vreg  mixpi_rsqrt(mixpi_vreg a)                { return _mm256_sqrt_ps(a); }
MIXPI_V mixpi_vreg  mixpi_rround(mixpi_vreg a)
{ return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
MIXPI_V mixpi_vbits mixpi_rwhole(mixpi_vreg a)      { return (mixpi_vbits)_mm256_cvtps_epi32(a); }
MIXPI_V mixpi_vreg  mixpi_rfma(mixpi_vreg a, mixpi_vreg b, mixpi_vreg c)
{ return _mm256_fmadd_ps(a, b, c); }
MIXPI_V mixpi_vreg  mixpi_rmla(mixpi_vreg a, mixpi_vreg b, mixpi_vreg c)
{ return _mm256_fmadd_ps(a, b, c); }
MIXPI_V mixpi_vreg  mixpi_rselect_gt(mixpi_vreg a, mixpi_vreg b, mixpi_vreg x, mixpi_vreg y)
{ return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_GT_OQ)); }
MIXPI_V float       mixpi_rsum(mixpi_vreg a)                 { return mixpi_vsum8(a); }
MIXPI_V float       mixpi_rmaxof(mixpi_vreg a)               { return mixpi_vmaxof8(a); }
MIXPI_V mixpi_vreg  mixpi_rhalf(const char *p)
{ return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)p)); }
MIXPI_V mixpi_vreg  mixpi_rhalf_of(__m256i h, int i)
{ return _mm256_cvtph_ps(i ? _mm256_extracti128_si256(h, 1) : _mm256_castsi256_si128(h)); }
MIXPI_V mixpi_vbits mixpi_vread_16(const char *p) {
    __m128i h = _mm_loadu_si128((const __m128i *)(const void *)p);
    return (mixpi_vbits)_mm256_cvtepi16_epi32(h);
}
MIXPI_V mixpi_vbits mixpi_vread_8(const char *p) {
    __m128i h = _mm_loadl_epi64((const __m128i *)(const void *)p);
    return (mixpi_vbits)_mm256_cvtepi8_epi32(h);
}
/* The lower 16 bits of each element. The upper bits are cleared because packing saturates. */
MIXPI_V __m128i mixpi_vlow_16(mixpi_vbits a) {
    __m256i low = (__m256i)(a & 0xFFFFu);
    return _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
}
MIXPI_V void mixpi_vwrite_16(char *p, mixpi_vbits a)
{ _mm_storeu_si128((__m128i *)(void *)p, mixpi_vlow_16(a)); }
MIXPI_V void mixpi_vwrite_8(char *p, mixpi_vbits a) {
    __m128i words = mixpi_vlow_16(a & 0xFFu);
    _mm_storel_epi64((__m128i *)(void *)p, _mm_packus_epi16(words, words));
}

#elif MIXPI_PASS == 3
MIXPI_V mixpi_vbits mixpi_vbits_gt(mixpi_vbits a, mixpi_vbits b, mixpi_vbits x,
                                   mixpi_vbits y) {
    uint32x4_t greater = vcgtq_s32((int32x4_t)a, (int32x4_t)b);
    return (mixpi_vbits)vbslq_s32(greater, (int32x4_t)x, (int32x4_t)y);
}
MIXPI_V mixpi_vbits mixpi_vbits_max(mixpi_vbits a, mixpi_vbits b)
{ return (mixpi_vbits)vmaxq_s32((int32x4_t)a, (int32x4_t)b); }
MIXPI_V mixpi_vbits mixpi_vbits_min(mixpi_vbits a, mixpi_vbits b)
{ return (mixpi_vbits)vminq_s32((int32x4_t)a, (int32x4_t)b); }
MIXPI_V mixpi_vreg mixpi_vbits_times(mixpi_vbits a, float unit)
{ return vmulq_n_f32(vcvtq_f32_s32((int32x4_t)a), unit); }
MIXPI_V mixpi_vbits mixpi_rbits(mixpi_vreg a)                { return (mixpi_vbits)a; }
MIXPI_V mixpi_vreg  mixpi_rof(mixpi_vbits a)                 { return (mixpi_vreg)a; }
MIXPI_V mixpi_vreg  mixpi_rset(float x)                      { return vdupq_n_f32(x); }
MIXPI_V mixpi_vreg  mixpi_rload(const float *p)              { return vld1q_f32(p); }
MIXPI_V void        mixpi_rstore(float *p, mixpi_vreg a)     { vst1q_f32(p, a); }
MIXPI_V void        mixpi_rstream(float *p, mixpi_vreg a)    { vst1q_f32(p, a); }
MIXPI_V mixpi_vreg  mixpi_rselect_gt(mixpi_vreg a, mixpi_vreg b, mixpi_vreg x, mixpi_vreg y)
{ return vbslq_f32(vcgtq_f32(a, b), x, y); }
MIXPI_V mixpi_vreg  mixpi_rmax(mixpi_vreg a, mixpi_vreg b)
{ return mixpi_rselect_gt(a, b, a, b); }
MIXPI_V mixpi_vreg  mixpi_rmin(mixpi_vreg a, mixpi_vreg b)
{ return mixpi_rselect_gt(b, a, a, b); }
MIXPI_V mixpi_vreg  mixpi_rsqrt(mixpi_vreg a)                { return vsqrtq_f32(a); }
MIXPI_V mixpi_vreg  mixpi_rround(mixpi_vreg a)               { return vrndnq_f32(a); }
MIXPI_V mixpi_vbits mixpi_rwhole(mixpi_vreg a)  { return (mixpi_vbits)vcvtnq_s32_f32(a); }
MIXPI_V mixpi_vreg  mixpi_rfma(mixpi_vreg a, mixpi_vreg b, mixpi_vreg c)
{ return vfmaq_f32(c, a, b); }
MIXPI_V mixpi_vreg  mixpi_rmla(mixpi_vreg a, mixpi_vreg b, mixpi_vreg c)
{ return vfmaq_f32(c, a, b); }
MIXPI_V float       mixpi_rsum(mixpi_vreg a) {
    float32x2_t p = vadd_f32(vget_low_f32(a), vget_high_f32(a));
    return vget_lane_f32(vpadd_f32(p, p), 0);
}
MIXPI_V float       mixpi_rmaxof(mixpi_vreg a)               { return vmaxvq_f32(a); }
MIXPI_V mixpi_vbits mixpi_vread_16(const char *p) {
    int16x4_t words;
    memcpy(&words, p, sizeof words);
    return (mixpi_vbits)vmovl_s16(words);
}
MIXPI_V mixpi_vbits mixpi_vread_8(const char *p) {
    int8x8_t bytes = vcreate_s8(mixpi_load_code(p, 4));
    return (mixpi_vbits)vmovl_s16(vget_low_s16(vmovl_s8(bytes)));
}
MIXPI_V void mixpi_vwrite_16(char *p, mixpi_vbits a) {
    uint16x4_t words = vmovn_u32((uint32x4_t)a);
    memcpy(p, &words, sizeof words);
}
MIXPI_V void mixpi_vwrite_8(char *p, mixpi_vbits a) {
    uint16x4_t words = vmovn_u32((uint32x4_t)a);
    uint8x8_t bytes = vmovn_u16(vcombine_u16(words, words));
    memcpy(p, &bytes, 4);
}

#else
MIXPI_V mixpi_vreg mixpi_vbits_times(mixpi_vbits a, float unit)
{ return (float)(int32_t)a * unit; }
MIXPI_V mixpi_vbits mixpi_rbits(mixpi_vreg a)                { return mixp_bits_of_f32(a); }
MIXPI_V mixpi_vreg  mixpi_rof(mixpi_vbits a)                 { return mixp_f32_of_bits(a); }
MIXPI_V mixpi_vreg  mixpi_rset(float x)                      { return x; }
/* p may be at any address, as for the loads and stores of SIMD. */
MIXPI_V mixpi_vreg  mixpi_rload(const float *p) {
    float a;
    memcpy(&a, p, sizeof a);
    return a;
}
MIXPI_V void        mixpi_rstore(float *p, mixpi_vreg a)     { memcpy(p, &a, sizeof a); }
MIXPI_V void        mixpi_rstream(float *p, mixpi_vreg a)    { memcpy(p, &a, sizeof a); }
MIXPI_V mixpi_vreg  mixpi_rmax(mixpi_vreg a, mixpi_vreg b)   { return a > b ? a : b; }
MIXPI_V mixpi_vreg  mixpi_rmin(mixpi_vreg a, mixpi_vreg b)   { return a < b ? a : b; }
MIXPI_V mixpi_vreg  mixpi_rsqrt(mixpi_vreg a)                { return sqrtf(a); }
MIXPI_V mixpi_vreg  mixpi_rround(mixpi_vreg a)               { return nearbyintf(a); }
MIXPI_V mixpi_vbits mixpi_rwhole(mixpi_vreg a)               { return (uint32_t)(int32_t)a; }
MIXPI_V mixpi_vreg  mixpi_rfma(mixpi_vreg a, mixpi_vreg b, mixpi_vreg c)
{ return mixpi_fmaf(a, b, c); }
MIXPI_V mixpi_vreg  mixpi_rmla(mixpi_vreg a, mixpi_vreg b, mixpi_vreg c) { return a * b + c; }
MIXPI_V mixpi_vreg  mixpi_rselect_gt(mixpi_vreg a, mixpi_vreg b, mixpi_vreg x, mixpi_vreg y)
{ return a > b ? x : y; }
MIXPI_V float       mixpi_rsum(mixpi_vreg a)                 { return a; }
MIXPI_V float       mixpi_rmaxof(mixpi_vreg a)               { return a; }
MIXPI_V mixpi_vbits mixpi_vbits_at(const void *p, int i)
{ return (mixpi_vbits)mixpi_load_code((const char *)p + 4 * i, 4); }
MIXPI_V mixpi_vbits mixpi_vread_16(const char *p) {
    uint32_t code = (uint32_t)mixpi_load_code(p, 2);
    return code - ((code & 0x8000u) << 1);
}
MIXPI_V mixpi_vbits mixpi_vread_8(const char *p) {
    uint32_t code = (uint32_t)mixpi_load_code(p, 1);
    return code - ((code & 0x80u) << 1);
}
MIXPI_V void mixpi_vwrite_16(char *p, mixpi_vbits a) { mixpi_store_code(p, 2, a); }
MIXPI_V void mixpi_vwrite_8(char *p, mixpi_vbits a)  { mixpi_store_code(p, 1, a); }
#endif

#if MIXPI_PASS != 2
MIXPI_V mixpi_vbits mixpi_vread_high(const char *p)         { return mixpi_vread_16(p) << 16; }
MIXPI_V void mixpi_vwrite_high(char *p, mixpi_vbits a)      { mixpi_vwrite_16(p, a >> 16); }
#endif

/* --- conversions of one register --- */
#if MIXPI_PASS != 0
MIXPI_V mixpi_vbits mixpi_vbits_all(uint32_t x) {
    const mixpi_vbits zero = { 0 };
    return zero + x;
}

/* Register i of an array of 32-bit words. */
MIXPI_V mixpi_vbits mixpi_vbits_at(const void *p, int i) {
    mixpi_vbits r;
    memcpy(&r, (const char *)p + (size_t)i * sizeof r, sizeof r);
#if MIXPI_PASS == 1 || MIXPI_PASS == 2
    __asm__("" : "+v"(r));      /* without this gcc reloads r for each use: twice the time */
#endif
    return r;
}

/* mixpi_round_f32 to bf16 with stochastic rounding, on the bits of the f32. A carry out of the
 * mantissa produces the right exponent for every value. */
MIXPI_V mixpi_vbits mixpi_vcode_random(mixpi_vbits u, int saturate, mixpi_vbits random) {
    const mixpi_vbits a = u & 0x7FFFFFFFu, inf = mixpi_vbits_all(0x7F800000u);
    mixpi_vbits code = (a + (~random >> 16)) >> 16;
    code = mixpi_vbits_min(code, mixpi_vbits_all(saturate ? 0x7F7Fu : 0x7F80u));
    code = mixpi_vbits_gt(a, inf, a >> 16 | 0x7FC0u, code);
    return code | (u & 0x80000000u) >> 16;
}

/* mixpi_round_f32 on a register, with the same bits. */
MIXPI_V mixpi_vbits mixpi_vcode_rounded(mixp_dtype to, mixpi_vbits u, int saturate,
                                        int stochastic, mixpi_vbits random) {
    const mixp_format f = mixp_format_of(to);
    const uint32_t top = (uint32_t)mixpi_max_code(f);
    const uint32_t keep = (uint32_t)f.mantissa_bits, cut = 23u - keep;
    const uint32_t lift = 128u - (uint32_t)f.bias;
    const mixpi_vbits zero = mixpi_vbits_all(0), last = mixpi_vbits_all(31);
    mixpi_vbits a = u & 0x7FFFFFFFu, e = a >> 23, payload = a & 0x7FFFFFu;
    mixpi_vbits m = payload | 0x800000u, shift, add, nan;
    if (to == MIXP_BF16 && stochastic) return mixpi_vcode_random(u, saturate, random);
    if (to == MIXP_BF16) {      /* the only dtype here that keeps subnormals of f32 */
        m = mixpi_vbits_gt(mixpi_vbits_all(0x800000u), a, payload, m);
        e = mixpi_vbits_max(e, mixpi_vbits_all(1));
    }

    /* How many bits fall off, and what rounds those that stay? */
    shift = mixpi_vbits_max(mixpi_vbits_all(cut), cut + lift - e);
    if (stochastic) m >>= mixpi_vbits_min(mixpi_vbits_max(shift - 31u, zero), last);
    shift = mixpi_vbits_min(shift, last);
    if (stochastic) add = ~random >> (32u - shift);
    else add = (0x7FFFFFFFu >> (32u - shift)) + (m >> shift & 1u);

    /* Exponent and mantissa in one sum; a carry continues into the exponent. */
    e = mixpi_vbits_max(e - lift, zero);
    m = (e << keep) + ((m + add) >> shift);
    m = mixpi_vbits_min(m, mixpi_vbits_all(saturate ? top : top + 1u));

    /* NaN, which keeps the sign, and its payload if there is room. */
    nan = mixpi_vbits_all((top + 1u) | 1u << (keep - 1u));
    if (to != MIXP_F8_E4M3) nan |= payload >> cut;
    m = mixpi_vbits_gt(a, mixpi_vbits_all(0x7F800000u), nan, m);
    return m | (u & 0x80000000u) >> (cut + 8u - (uint32_t)f.exponent_bits);
}

MIXPI_V mixpi_vbits mixpi_vcode_bf16(mixpi_vbits u) {
    mixpi_vbits a = u & 0x7FFFFFFFu, r = u + 0x7FFFu + (u >> 16 & 1u);
    return mixpi_vbits_gt(a, mixpi_vbits_all(0x7F800000u), u | 0x400000u, r) >> 16;
}

/* The nearest power of two; a tie is rounded up. The code of a negative number is NaN. */
MIXPI_V mixpi_vbits mixpi_vcode_e8m0(mixpi_vbits u) {
    const mixpi_vbits a = u & 0x7FFFFFFFu, zero = mixpi_vbits_all(0), nan = zero + 255u;
    const mixpi_vbits half =
        mixpi_vbits_gt(zero + 0x800000u, a, zero + 0x200000u, zero + 0x400000u);
    const mixpi_vbits code = mixpi_vbits_min((a + half) >> 23, nan);
    return mixpi_vbits_gt(zero, u, mixpi_vbits_gt(a, zero, nan, zero), code);
}

MIXPI_V mixpi_vbits mixpi_vcode_nearest(mixp_dtype to, mixpi_vbits u) {
    if (to == MIXP_BF16) return mixpi_vcode_bf16(u);
    if (to == MIXP_F8_E8M0) return mixpi_vcode_e8m0(u);
    return mixpi_vcode_rounded(to, u, 0, 0, u);
}

MIXPI_V mixpi_vbits mixpi_vcode_of_e8m0(mixpi_vbits h) {
    const mixpi_vbits a = h & 0xFFu, zero = mixpi_vbits_all(0);
    const mixpi_vbits code = mixpi_vbits_gt(a, zero, a << 23, zero + 0x400000u);
    return mixpi_vbits_gt(a, zero + 254u, zero + 0x7FC00000u, code);
}

/* Widens codes of f16, bf16, e4m3, e5m2 or e8m0 to the bits of f32. */
MIXPI_V mixpi_vbits mixpi_vcode_widen(mixp_dtype from, mixpi_vbits h) {
    const mixp_format f = mixp_format_of(from);
    const uint32_t top = (uint32_t)mixpi_max_code(f),
                   cut = 23u - (uint32_t)f.mantissa_bits;
    const uint32_t sign = 1u << (31u - cut - 8u + (uint32_t)f.exponent_bits);
    const uint32_t lift = (127u - (uint32_t)f.bias) << 23;
    const float least = from == MIXP_F16 ? MIXP_F16_TINY
                      : from == MIXP_F8_E4M3 ? MIXP_E4M3_TINY : MIXP_E5M2_TINY;
    mixpi_vbits a = h & (sign - 1u), r = (a << cut) + lift;
    mixpi_vreg tiny = mixpi_vbits_times(a, least);      /* exact */
    if (from == MIXP_BF16) return h << 16;
    if (from == MIXP_F8_E8M0) return mixpi_vcode_of_e8m0(h);

    /* Inf and NaN. */
    if (from == MIXP_F8_E4M3) {
        r = mixpi_vbits_gt(a, mixpi_vbits_all(top), mixpi_vbits_all(0x7FC00000u), r);
    } else {
        r = mixpi_vbits_gt(a, mixpi_vbits_all(top), r + lift, r);
        r = mixpi_vbits_gt(a, mixpi_vbits_all(top + 1u), r | 0x400000u, r);
    }

    /* Subnormals, and the sign. */
    r = mixpi_vbits_gt(mixpi_vbits_all(0x800000u >> cut), a, (mixpi_vbits)tiny, r);
    return r | (h & sign) << (cut + 8u - (uint32_t)f.exponent_bits);
}

#else
MIXPI_V uint32_t mixpi_vcode_rounded(mixp_dtype to, uint32_t u, int saturate, int stochastic,
                                     uint32_t random)
{ return mixpi_round_f32(to, u, saturate, stochastic, random); }
MIXPI_V uint32_t mixpi_vcode_nearest(mixp_dtype to, uint32_t u) {
    if (to == MIXP_BF16) return mixpi_bf16_of_f32(u);
    if (to == MIXP_F8_E8M0) return (uint32_t)mixpi_recode(to, MIXP_F32, u, 0, 0, 0);
    return to == MIXP_F16 ? mixpi_f16_of_f32(u) : mixpi_round_f32(to, u, 0, 0, 0);
}
/* Widens a sign-extended code to the bits of f32. */
MIXPI_V uint32_t mixpi_vcode_widen(mixp_dtype from, uint32_t code) {
    if (from == MIXP_F16) return mixpi_f32_of_f16(code & 0xFFFFu);
    if (from == MIXP_F8_E4M3) return mixpi_f32_of_e4m3(code & 0xFFu);
    if (from == MIXP_F8_E8M0) return (uint32_t)mixpi_recode(MIXP_F32, from, code & 0xFFu, 0, 0, 0);
    return mixpi_f32_of_f16((code & 0xFFu) << 8);
}
#endif

/* Register i of an array of any dtype that has vectors. It avoids NEON's fcvtl, which obeys the
 * alternative half-precision mode of FPCR. */
MIXPI_V mixpi_vreg mixpi_rget(mixp_dtype from, const void *p, int i) {
    const int size = from == MIXP_F32 ? 4 : from == MIXP_F16 || from == MIXP_BF16 ? 2 : 1;
    const char *at = (const char *)p + i * MIXPI_LANES * size;
    if (from == MIXP_F32) return mixpi_rof(mixpi_vbits_at(p, i));
    if (from == MIXP_BF16) return mixpi_rof(mixpi_vread_16(at) << 16);
#if MIXPI_PASS == 1 || MIXPI_PASS == 2
    if (from == MIXP_F16) return mixpi_rhalf(at);
    if (from == MIXP_F8_E5M2) return mixpi_rhalf_of(mixpi_vhalf_8(from, p), i);
    if (from == MIXP_F8_E4M3) return mixpi_rhalf_of(mixpi_vhalf_8(from, p), i) * 256.0f;
#endif
    return mixpi_rof(mixpi_vcode_widen(from, size == 2 ? mixpi_vread_16(at) : mixpi_vread_8(at)));
}

/* --- 16 floats, written once --- */
#if MIXPI_REGS == 1
typedef mixpi_vreg  mixpi_v;
typedef mixpi_vbits mixpi_vcodes;
#  define MIXPI_R(a, i) (a)     /* register i of a */
#else
typedef struct mixpi_v { mixpi_vreg r[MIXPI_REGS]; } mixpi_v;
typedef struct mixpi_vcodes { mixpi_vbits r[MIXPI_REGS]; } mixpi_vcodes;
#  define MIXPI_R(a, i) ((a).r[i])
#endif

#define MIXPI_V1(name, a, result)                                                         \
    MIXPI_V mixpi_v name(mixpi_v a) { MIXPI_EACH(MIXPI_R(a, i) = result) return a; }
#define MIXPI_V2(name, a, b, result)                                                      \
    MIXPI_V mixpi_v name(mixpi_v a, mixpi_v b) { MIXPI_EACH(MIXPI_R(a, i) = result) return a; }
#define MIXPI_V3(name, a, b, c, result)                                                   \
    MIXPI_V mixpi_v name(mixpi_v a, mixpi_v b, mixpi_v c)                                 \
    { MIXPI_EACH(MIXPI_R(a, i) = result) return a; }

MIXPI_V mixpi_v mixpi_vset(float x) {
    mixpi_v v;
    MIXPI_EACH(MIXPI_R(v, i) = mixpi_rset(x))
    return v;
}
MIXPI_V mixpi_v mixpi_vload(const float *p) {
    mixpi_v v;
    MIXPI_EACH(MIXPI_R(v, i) = mixpi_rload(p + i * MIXPI_LANES))
    return v;
}
MIXPI_V void mixpi_vstore(float *p, mixpi_v v)
{ MIXPI_EACH(mixpi_rstore(p + i * MIXPI_LANES, MIXPI_R(v, i))) }

MIXPI_V2(mixpi_vadd, a, b, MIXPI_R(a, i) + MIXPI_R(b, i))
MIXPI_V2(mixpi_vsub, a, b, MIXPI_R(a, i) - MIXPI_R(b, i))
MIXPI_V2(mixpi_vmul, a, b, MIXPI_R(a, i) * MIXPI_R(b, i))
MIXPI_V2(mixpi_vdiv, a, b, MIXPI_R(a, i) / MIXPI_R(b, i))
MIXPI_V2(mixpi_vmax, a, b, mixpi_rmax(MIXPI_R(a, i), MIXPI_R(b, i)))
MIXPI_V2(mixpi_vmin, a, b, mixpi_rmin(MIXPI_R(a, i), MIXPI_R(b, i)))
MIXPI_V1(mixpi_vsqrt, a, mixpi_rsqrt(MIXPI_R(a, i)))
MIXPI_V1(mixpi_vneg, a, -MIXPI_R(a, i))
MIXPI_V1(mixpi_vabs, a, mixpi_rof(mixpi_rbits(MIXPI_R(a, i)) & 0x7FFFFFFFu))
MIXPI_V1(mixpi_vround, a, mixpi_rround(MIXPI_R(a, i)))
MIXPI_V3(mixpi_vfma, a, b, c, mixpi_rfma(MIXPI_R(a, i), MIXPI_R(b, i), MIXPI_R(c, i)))
MIXPI_V3(mixpi_vmla, a, b, c, mixpi_rmla(MIXPI_R(a, i), MIXPI_R(b, i), MIXPI_R(c, i)))
MIXPI_V2(mixpi_vldexp, a, b, MIXPI_R(a, i) * mixpi_rof((mixpi_rwhole(MIXPI_R(b, i)) + 127u) << 23))
#undef MIXPI_V1
#undef MIXPI_V2
#undef MIXPI_V3

MIXPI_V mixpi_v mixpi_vselect_gt(mixpi_v a, mixpi_v b, mixpi_v x, mixpi_v y) {
    MIXPI_EACH(MIXPI_R(x, i) = mixpi_rselect_gt(MIXPI_R(a, i), MIXPI_R(b, i), MIXPI_R(x, i),
                                                MIXPI_R(y, i)))
    return x;
}

/* The sum of 16 floats: halves, quarters, pairs. */
MIXPI_V float mixpi_vsum(mixpi_v a) {
    MIXPI_FOLD(MIXPI_R(a, i) = MIXPI_R(a, i) + MIXPI_R(a, i + n))
    return mixpi_rsum(MIXPI_R(a, 0));
}
MIXPI_V float mixpi_vmaxof(mixpi_v a) {
    MIXPI_FOLD(MIXPI_R(a, i) = mixpi_rmax(MIXPI_R(a, i), MIXPI_R(a, i + n)))
    return mixpi_rmaxof(MIXPI_R(a, 0));
}

MIXPI_V mixpi_v mixpi_vget(mixp_dtype from, const void *p) {
    mixpi_v v;
    MIXPI_EACH(MIXPI_R(v, i) = mixpi_rget(from, p, i))
    return v;
}
MIXPI_V mixpi_vcodes mixpi_vnarrow(mixp_dtype to, mixpi_v a) {
    mixpi_vcodes c;
    MIXPI_EACH(MIXPI_R(c, i) = mixpi_vcode_nearest(to, mixpi_rbits(MIXPI_R(a, i))))
    return c;
}
MIXPI_V mixpi_vcodes mixpi_vnarrow_by(mixp_dtype to, mixpi_v a, const mixp_rounding *r,
                                      const uint32_t *random) {
    mixpi_vcodes c;
    MIXPI_EACH(MIXPI_R(c, i) = mixpi_vcode_rounded(to, mixpi_rbits(MIXPI_R(a, i)), r->saturate,
                                            r->stochastic, mixpi_vbits_at(random, i)))
    return c;
}

MIXPI_V void mixpi_vput_f32(void *p, mixpi_v a, int stream) {
    float *to = (float *)p;
    if (stream) MIXPI_EACH(mixpi_rstream(to + i * MIXPI_LANES, MIXPI_R(a, i)))
    else MIXPI_EACH(mixpi_rstore(to + i * MIXPI_LANES, MIXPI_R(a, i)))
}

/* wide: the codes have 16 bits instead of 8. */
#if MIXPI_PASS == 2
MIXPI_V void mixpi_vput_f16(void *p, mixpi_v a, int stream) {
    __m256i h = _mm512_maskz_cvtps_ph((__mmask16)0xFFFF, a,     /* g++ 12 warns if unmasked */
                                      _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    mixpi_vput_256(p, h, stream);
}
MIXPI_V void mixpi_vput_codes(void *p, mixpi_vcodes a, int wide, int stream) {
    if (wide) mixpi_vput_256(p, _mm512_cvtepi32_epi16((__m512i)a), stream);
    else if (stream) _mm_stream_si128((__m128i *)p, _mm512_cvtepi32_epi8((__m512i)a));
    else _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8((__m512i)a));
}
#elif MIXPI_PASS == 1
MIXPI_V void mixpi_vput_f16(void *p, mixpi_v a, int stream) {
    __m128i lo = _mm256_cvtps_ph(a.r[0], _MM_FROUND_TO_NEAREST_INT);
    __m128i hi = _mm256_cvtps_ph(a.r[1], _MM_FROUND_TO_NEAREST_INT);
    mixpi_vput_256(p, _mm256_inserti128_si256(_mm256_castsi128_si256(lo), hi, 1), stream);
}
/* The permutation restores the order, because the instruction packs within halves. */
MIXPI_V void mixpi_vput_codes(void *p, mixpi_vcodes a, int wide, int stream) {
    __m256i words = _mm256_packus_epi32((__m256i)a.r[0], (__m256i)a.r[1]);
    words = _mm256_permute4x64_epi64(words, 0xD8);
    if (wide) {
        mixpi_vput_256(p, words, stream);
        return;
    }
    __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(words),
                                     _mm256_extracti128_si256(words, 1));
    if (stream) _mm_stream_si128((__m128i *)p, bytes);
    else _mm_storeu_si128((__m128i *)p, bytes);
}
#else
MIXPI_V void mixpi_vput_codes(void *p, mixpi_vcodes a, int wide, int stream) {
    char *to = (char *)p;
    (void)stream;
    if (wide) MIXPI_EACH(mixpi_vwrite_16(to + i * 2 * MIXPI_LANES, MIXPI_R(a, i)))
    else MIXPI_EACH(mixpi_vwrite_8(to + i * MIXPI_LANES, MIXPI_R(a, i)))
}
MIXPI_V void mixpi_vput_f16(void *p, mixpi_v a, int stream)
{ mixpi_vput_codes(p, mixpi_vnarrow(MIXP_F16, a), 1, stream); }
#endif

MIXPI_V mixpi_v mixpi_vzero(void) { return mixpi_vset(0.0f); }

/* vload_n reads n floats and fills with 0; vstore_n writes the first n floats of a. */
#if MIXPI_PASS == 2
MIXPI_V mixpi_v mixpi_vload_n(const float *p, int n)
{ return _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1u), p); }
MIXPI_V void mixpi_vstore_n(float *p, mixpi_v a, int n)
{ _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1u), a); }
#else
MIXPI_V mixpi_v mixpi_vload_n(const float *p, int n) {
    float t[16] = { 0 };
    memcpy(t, p, (size_t)n * sizeof(float));
    return mixpi_vload(t);
}
MIXPI_V void mixpi_vstore_n(float *p, mixpi_v a, int n) {
    float t[16];
    mixpi_vstore(t, a);
    memcpy(p, t, (size_t)n * sizeof(float));
}
#endif

/* mixp_random_at for the 16 elements from `first` on. */
#if MIXPI_PASS == 2
MIXPI_V void mixpi_vrandom(uint64_t key, uint64_t first, uint32_t *out) {
    typedef uint64_t mixpi_u64x8 __attribute__((__vector_size__(64)));
    const uint64_t step = 0x9E3779B97F4A7C15u;
    const mixpi_u64x8 ahead = { 0,        step,     2 * step, 3 * step,
                                4 * step, 5 * step, 6 * step, 7 * step };
    const mixpi_vbits upper = { 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31 };
    mixpi_u64x8 z[2];
    for (uint64_t k = 0; k < 2; k++) {
        z[k] = ahead + (key + (first + 8 * k) * step);
        z[k] = (z[k] ^ (z[k] >> 30)) * 0xBF58476D1CE4E5B9u;
        z[k] = (z[k] ^ (z[k] >> 27)) * 0x94D049BB133111EBu;
        z[k] ^= z[k] >> 31;
    }
    /* One store: a load of all 16 numbers waits for two. */
    _mm512_storeu_si512(out, _mm512_permutex2var_epi32((__m512i)z[0], (__m512i)upper,
                                                       (__m512i)z[1]));
}
#elif MIXPI_PASS == 1
MIXPI_V void mixpi_vrandom(uint64_t key, uint64_t first, uint32_t *out) {
    typedef uint64_t mixpi_u64x4 __attribute__((__vector_size__(32)));
    const uint64_t step = 0x9E3779B97F4A7C15u;
    const mixpi_u64x4 ahead = { 0, step, 2 * step, 3 * step };
    mixpi_u64x4 z[4];
    for (uint64_t k = 0; k < 4; k++) {
        z[k] = ahead + (key + (first + 4 * k) * step);
        z[k] = (z[k] ^ (z[k] >> 30)) * 0xBF58476D1CE4E5B9u;
        z[k] = (z[k] ^ (z[k] >> 27)) * 0x94D049BB133111EBu;
        z[k] ^= z[k] >> 31;
    }
    for (uint64_t k = 0; k < 4; k += 2) {        /* the upper halves, in order */
        const __m256i odd = (__m256i)_mm256_shuffle_ps((__m256)z[k], (__m256)z[k + 1], 0xDD);
        _mm256_storeu_si256((__m256i *)(void *)(out + 4 * k),
                            _mm256_permute4x64_epi64(odd, 0xD8));
    }
}
#else
MIXPI_V void mixpi_vrandom(uint64_t key, uint64_t first, uint32_t *out) {
    for (uint64_t k = 0; k < 16; k++) out[k] = mixp_random_at(key, first + k);
}
#endif

/* The first min(left, 16) floats of p, then 0. */
MIXPI_V mixpi_v mixpi_vpart(const float *p, int64_t left)
{ return left >= 16 ? mixpi_vload(p) : mixpi_vload_n(p, (int)left); }

/* Writes 16 elements to p, rounded to nearest even. */
MIXPI_V void mixpi_vput(mixp_dtype to, void *p, mixpi_v a, int stream) {
    if (to == MIXP_F32) mixpi_vput_f32(p, a, stream);
    else if (to == MIXP_F16) mixpi_vput_f16(p, a, stream);
    else mixpi_vput_codes(p, mixpi_vnarrow(to, a), to == MIXP_BF16, stream);
}

/* Writes 16 elements to p, rounded as r says. `to` is narrower than f32; `random` holds a number
 * for each element. */
MIXPI_V void mixpi_vput_rounded(mixp_dtype to, void *p, mixpi_v a, const mixp_rounding *r,
                                const uint32_t *random) {
    mixpi_vput_codes(p, mixpi_vnarrow_by(to, a, r, random),
                     to == MIXP_F16 || to == MIXP_BF16, 0);
}

