/* amxsim.h - the AMX instructions that mixprec.h uses, in C, by Intel's manual. If it is included
 * before mixprec.h, the AMX kernel runs on processors without tiles. amxsim_faults counts what the
 * hardware would fault at: tiles that are not configured, or have another shape. Where AVX-512 is
 * there, it computes the same operations for sixteen columns at a time (amxsim_dot_by_rows).
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#ifndef AMXSIM_H
#define AMXSIM_H
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#  include <immintrin.h>
#endif

#define MIXPI_AMX_EMULATED
#define MIXPI_AMX_CPUID(part, out)         amxsim_cpuid(part, out)
#define MIXPI_AMX_XCR0()                   amxsim_xcr0()
#define MIXPI_AMX_PERMIT()                 amxsim_permit()
#define MIXPI_AMX_CONFIGURE(p)             amxsim_configure(p)
#define MIXPI_AMX_RELEASE()                amxsim_release()
#define MIXPI_AMX_ZERO(tile)               amxsim_zero(tile)
#define MIXPI_AMX_LOAD(tile, p, stride)    amxsim_load(tile, p, stride)
#define MIXPI_AMX_LOAD_PAST(tile, p, stride) amxsim_load(tile, p, stride)
#define MIXPI_AMX_STORE(tile, p, stride)   amxsim_store(tile, p, stride)
#define MIXPI_AMX_DOT_BF16(sum, a, b)      amxsim_dot(sum, a, b, 0)
#define MIXPI_AMX_DOT_F16(sum, a, b)       amxsim_dot(sum, a, b, 1)

/* The machine: what it has, and how it may be wrong. */
typedef enum amxsim_wrong {
    AMXSIM_RIGHT,
    AMXSIM_ONE_CHAIN,           /* even and odd elements in one sum                        */
    AMXSIM_FROM_SUM,            /* chains that begin at the sum                            */
    AMXSIM_SUBNORMALS,          /* flushed where they should be kept, kept where flushed   */
    AMXSIM_CUT,                 /* one unit too near to zero                               */
    AMXSIM_WRONGS
} amxsim_wrong;
static struct {
    int          bf16, f16;     /* the processor's: AMX-TILE with AMX-BF16; AMX-FP16       */
    amxsim_wrong wrong;
    int          unsaved;       /* bits of XCR0 that the system leaves 0                   */
    long         refused;       /* what Linux answers to the request; 0 = granted          */
    int          cpuids, requests;  /* CPUID instructions and system calls so far          */
} amxsim = { 1, 1, AMXSIM_RIGHT, 0, 0, 0, 0 };

/* CPUID leaf 7, by Intel's manual: 7.0 EDX bit 24 is AMX-TILE, bit 22 AMX-BF16; 7.1 EAX bit 21 is
 * AMX-FP16. EAX of 7.0 is the last part. */
static void amxsim_cpuid(uint32_t part, uint32_t out[4]) {
    memset(out, 0, 4 * sizeof *out);
    amxsim.cpuids++;
    if (part == 0) out[0] = 1;
    if (part == 0 && amxsim.bf16) out[3] = 1u << 24 | 1u << 22;
    if (part == 1 && amxsim.f16) out[0] = 1u << 21;
}
static uint32_t amxsim_xcr0(void) { return 0x600E7u & ~(uint32_t)amxsim.unsaved; }
static long amxsim_permit(void) {
    amxsim.requests++;
    return amxsim.refused;
}

/* Each thread has tiles of its own. */
static __thread struct {
    int     configured, rows[8], bytes[8];
    uint8_t tile[8][16][64];
} amxsim_cpu;
static __thread int64_t amxsim_dots, amxsim_loads;
static int amxsim_faults;
static void amxsim_fault(int faults) { (void)__sync_fetch_and_add(&amxsim_faults, faults != 0); }

static int amxsim_good(int tile) {
    int good = amxsim_cpu.configured && tile >= 0 && tile < 8;
    amxsim_fault(!good);
    return good;
}

static void amxsim_configure(const void *p) {
    uint8_t  c[64];
    uint16_t bytes[16];
    memcpy(c, p, sizeof c);
    memcpy(bytes, c + 16, sizeof bytes);
    amxsim_fault(c[0] != 1);
    for (int i = 0; i < 16; i++) {
        amxsim_fault((i < 14 && c[2 + i]) || (i >= 8 && (bytes[i] || c[48 + i])));
        amxsim_fault(bytes[i] > 64 || c[48 + i] > 16 || !bytes[i] != !c[48 + i]);
        if (i >= 8) continue;
        amxsim_cpu.rows[i] = c[48 + i];
        amxsim_cpu.bytes[i] = bytes[i];
    }
    memset(amxsim_cpu.tile, 0, sizeof amxsim_cpu.tile);
    amxsim_cpu.configured = 1;
}
static void amxsim_release(void) {
    amxsim_fault(!amxsim_cpu.configured);
    memset(&amxsim_cpu, 0, sizeof amxsim_cpu);
}
static void amxsim_zero(int tile) {
    if (amxsim_good(tile)) memset(amxsim_cpu.tile[tile], 0, sizeof amxsim_cpu.tile[tile]);
}
static void amxsim_load(int tile, const void *p, int64_t stride) {
    if (!amxsim_good(tile)) return;
    amxsim_loads++;
    memset(amxsim_cpu.tile[tile], 0, sizeof amxsim_cpu.tile[tile]);
    for (int i = 0; i < amxsim_cpu.rows[tile]; i++)
        memcpy(amxsim_cpu.tile[tile][i], (const char *)p + i * stride, (size_t)amxsim_cpu.bytes[tile]);
}
static void amxsim_store(int tile, void *p, int64_t stride) {
    if (!amxsim_good(tile)) return;
    for (int i = 0; i < amxsim_cpu.rows[tile]; i++)
        memcpy((char *)p + i * stride, amxsim_cpu.tile[tile][i], (size_t)amxsim_cpu.bytes[tile]);
}

/* --- arithmetic: subnormals of f32 are zeros, before and after; always to nearest even --- */

static float amxsim_float(uint32_t u) {
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}
static uint32_t amxsim_bits(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}
static float amxsim_flush(float x) {
    uint32_t u = amxsim_bits(x);
    if (u & 0x7F800000u || amxsim.wrong == AMXSIM_SUBNORMALS) return x;
    return amxsim_float(u & 0x80000000u);
}
static float amxsim_fma(float a, float b, float c)
{ return amxsim_flush(fmaf(amxsim_flush(a), amxsim_flush(b), amxsim_flush(c))); }
static float amxsim_add(float a, float b)
{ return amxsim_flush(amxsim_flush(a) + amxsim_flush(b)); }

/* Element k of a row of bf16 or f16. */
static float amxsim_widen(const uint8_t *row, int k, int f16) {
    uint16_t h;
    memcpy(&h, row + 2 * k, sizeof h);
    if (!f16) return amxsim_float((uint32_t)h << 16);
    int exponent = h >> 10 & 31;
    if (exponent == 31) return amxsim_float((h & 0x8000u) << 16 | 0x7F800000u | (h & 0x3FFu) << 13);
    if (exponent == 0 && amxsim.wrong == AMXSIM_SUBNORMALS) return 0.0f;
    float x = exponent ? ldexpf((float)(1024 + (h & 0x3FF)), exponent - 25) : ldexpf((float)(h & 0x3FF), -24);
    return h & 0x8000u ? -x : x;
}

static float amxsim_element(float sum, const uint8_t *a, int b, int n, int f16, int pairs) {
    float even = amxsim.wrong == AMXSIM_FROM_SUM ? sum : 0.0f, odd = 0.0f, y;
    for (int k = 0; k < pairs; k++) {
        const uint8_t *row = amxsim_cpu.tile[b][k];
        float *second = amxsim.wrong == AMXSIM_ONE_CHAIN ? &even : &odd;
        even = amxsim_fma(amxsim_widen(a, 2 * k, f16), amxsim_widen(row, 2 * n, f16), even);
        *second = amxsim_fma(amxsim_widen(a, 2 * k + 1, f16), amxsim_widen(row, 2 * n + 1, f16),
                             *second);
    }
    y = amxsim_add(even, odd);
    if (amxsim.wrong == AMXSIM_FROM_SUM) return y;
    if (amxsim.wrong == AMXSIM_CUT && y != 0.0f) return nextafterf(amxsim_add(sum, y), 0.0f);
    return amxsim_add(sum, y);
}

#if defined(__x86_64__)
/* Most of the tests' time, and they are compiled without optimisation. With gcc's pragma in place of the attribute, gcc
 * optimises the rest of the file as well, for 8 seconds. */
#  if defined(__clang__)
#    define AMXSIM_TARGET __attribute__((__target__("avx512f,avx2,fma,f16c")))
#    define AMXSIM_INLINE static inline AMXSIM_TARGET
#  else
#    define AMXSIM_TARGET __attribute__((__target__("avx512f,avx2,fma,f16c"), __optimize__("O2")))
#    define AMXSIM_INLINE static inline AMXSIM_TARGET __attribute__((__always_inline__))
#  endif

/* Subnormals become zeros of the same sign. */
AMXSIM_INLINE __m512 amxsim_flush16(__m512 x) {
    __m512i   u = _mm512_castps_si512(x);
    __mmask16 tiny = _mm512_testn_epi32_mask(u, _mm512_set1_epi32(0x7F800000));
    u = _mm512_mask_and_epi32(u, tiny, u, _mm512_set1_epi32((int)0x80000000u));
    return _mm512_castsi512_ps(u);
}

/* The lower elements of 16 pairs, as f32. */
AMXSIM_INLINE __m512 amxsim_widen16(__m512i pairs, int f16) {
    if (f16) return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(pairs));
    return amxsim_flush16(_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)));
}

static AMXSIM_TARGET void amxsim_dot_by_rows(int sum, int a, int b, int f16) {
    const int       pairs = amxsim_cpu.bytes[a] / 4;
    const __mmask16 columns = (__mmask16)((1u << amxsim_cpu.bytes[sum] / 4) - 1u);
    for (int m = 0; m < amxsim_cpu.rows[sum]; m++) {
        __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps(), old;
        float *to = (float *)(void *)amxsim_cpu.tile[sum][m];
        for (int k = 0; k < pairs; k++) {
            int     pair;
            __m512i x, y = _mm512_loadu_si512(amxsim_cpu.tile[b][k]);
            memcpy(&pair, amxsim_cpu.tile[a][m] + 4 * k, sizeof pair);
            x = _mm512_set1_epi32(pair);
            even = _mm512_fmadd_ps(amxsim_widen16(x, f16), amxsim_widen16(y, f16), even);
            even = amxsim_flush16(even);
            x = _mm512_srli_epi32(x, 16);
            y = _mm512_srli_epi32(y, 16);
            odd = _mm512_fmadd_ps(amxsim_widen16(x, f16), amxsim_widen16(y, f16), odd);
            odd = amxsim_flush16(odd);
        }
        old = amxsim_flush16(_mm512_loadu_ps(to));
        even = amxsim_flush16(_mm512_add_ps(even, odd));
        _mm512_mask_storeu_ps(to, columns, amxsim_flush16(_mm512_add_ps(old, even)));
    }
}
static int amxsim_has_rows(void)
{ return amxsim.wrong == AMXSIM_RIGHT && __builtin_cpu_supports("avx512f"); }
#else
static void amxsim_dot_by_rows(int sum, int a, int b, int f16) { (void)sum, (void)a, (void)b, (void)f16; }
static int  amxsim_has_rows(void) { return 0; }
#endif

static void amxsim_dot_by_elements(int sum, int a, int b, int f16) {
    float x;
    for (int m = 0; m < amxsim_cpu.rows[sum]; m++)
        for (int n = 0; n < amxsim_cpu.bytes[sum] / 4; n++) {
            memcpy(&x, amxsim_cpu.tile[sum][m] + 4 * n, sizeof x);
            x = amxsim_element(x, amxsim_cpu.tile[a][m], b, n, f16, amxsim_cpu.bytes[a] / 4);
            memcpy(amxsim_cpu.tile[sum][m] + 4 * n, &x, sizeof x);
        }
}

/* The hardware ignores MXCSR: the emulation computes in the default mode. */
static unsigned amxsim_mode_enter(void) {
    unsigned before = 0;
#if defined(__x86_64__)
    before = _mm_getcsr();
    _mm_setcsr(0x1F80u);
#endif
    return before;
}
static void amxsim_mode_leave(unsigned before) {
#if defined(__x86_64__)
    _mm_setcsr(before);
#else
    (void)before;
#endif
}

/* --- the processor's own tiles, where there are some --- */

#if defined(__x86_64__) && defined(__linux__)
#  define AMXSIM_BYTES(bytes)            __asm__ volatile(".byte 0xC4, 0xE2, " bytes ::: "memory")
#  define AMXSIM_MEMORY(bytes, p)        __asm__ volatile(".byte 0xC4, 0xE2, " bytes ::"a"(p), "d"(64L) : "memory")

/* 1: the processor multiplies bf16 by tiles, and Linux grants them; 3: it also multiplies f16. */
static int amxsim_processor(void) {
    static int kept;
    uint32_t id[4] = { 7, 0, 0, 0 }, more[4] = { 7, 0, 1, 0 }, features = 0;
    long answer = 158;                      /* arch_prctl(ARCH_REQ_XCOMP_PERM, tiles) */
    int  has = __atomic_load_n(&kept, __ATOMIC_RELAXED);
    if (has) return has - 1;
    if (__builtin_cpu_supports("avx512f")) {
        __asm__ volatile("cpuid" : "+a"(id[0]), "=b"(id[1]), "+c"(id[2]), "=d"(id[3]));
        __asm__ volatile("cpuid" : "+a"(more[0]), "=b"(more[1]), "+c"(more[2]), "=d"(more[3]));
        __asm__ volatile("xgetbv" : "=a"(features) : "c"(0) : "edx");
    }
    if ((id[3] & 0x1400000u) == 0x1400000u && (features & 0x60000u) == 0x60000u) {
        __asm__ volatile("syscall" : "+a"(answer) : "D"(0x1023L), "S"(18L) : "rcx", "r11", "memory");
        if (answer == 0) has = more[0] >> 21 & 1u ? 3 : 1;
    }
    __atomic_store_n(&kept, has + 1, __ATOMIC_RELAXED);
    return has;
}

/* Computes the product of amxsim_dot by the processor, from the same tiles. */
static void amxsim_dot_by_processor(int sum, int a, int b, int f16, uint8_t result[16][64]) {
    const int tiles[3] = { sum, a, b };
    uint8_t   config[64] = { 1 };
    for (int i = 0; i < 3; i++) {
        config[16 + 2 * i] = (uint8_t)amxsim_cpu.bytes[tiles[i]];
        config[48 + i] = (uint8_t)amxsim_cpu.rows[tiles[i]];
    }
    AMXSIM_MEMORY("0x78, 0x49, 0x00", config);
    AMXSIM_MEMORY("0x7B, 0x4B, 0x04, 0x10", amxsim_cpu.tile[sum]);
    AMXSIM_MEMORY("0x7B, 0x4B, 0x0C, 0x10", amxsim_cpu.tile[a]);
    AMXSIM_MEMORY("0x7B, 0x4B, 0x14, 0x10", amxsim_cpu.tile[b]);
    if (f16) AMXSIM_BYTES("0x6B, 0x5C, 0xC1");
    else AMXSIM_BYTES("0x6A, 0x5C, 0xC1");
    AMXSIM_MEMORY("0x7A, 0x4B, 0x04, 0x10", result);
    AMXSIM_BYTES("0x78, 0x49, 0xC0");
}
#else
static int  amxsim_processor(void) { return 0; }
static void amxsim_dot_by_processor(int sum, int a, int b, int f16, uint8_t result[16][64]) {
    (void)sum, (void)a, (void)b, (void)f16, (void)result;
}
#endif

/* The sums of tile `sum` whose bits are not the processor's; a NaN is a NaN. */
static int amxsim_differing(int sum, uint8_t result[16][64]) {
    int differing = 0;
    for (int m = 0; m < amxsim_cpu.rows[sum]; m++)
        for (int n = 0; n < amxsim_cpu.bytes[sum]; n += 4) {
            uint32_t mine, other;
            memcpy(&mine, amxsim_cpu.tile[sum][m] + n, sizeof mine);
            memcpy(&other, result[m] + n, sizeof other);
            differing += mine != other && !((mine & other) << 1 > 0xFF000000u);
        }
    return differing;
}

/* sum += a b: a has rows of pairs, b a row for each pair of a's. If the processor can compute the same, other bits are a
 * fault. */
static __thread int64_t amxsim_compared;
static void amxsim_dot(int sum, int a, int b, int f16) {
    const int same = amxsim.wrong == AMXSIM_RIGHT && (amxsim_processor() & (f16 ? 2 : 1));
    uint8_t   result[16][64];
    unsigned  mode;
    if (!amxsim_good(sum) || !amxsim_good(a) || !amxsim_good(b)) return;
    amxsim_fault(f16 ? !amxsim.f16 : !amxsim.bf16);     /* an instruction that the processor lacks */
    amxsim_dots++;
    amxsim_fault(sum == a || sum == b || a == b || amxsim_cpu.rows[sum] != amxsim_cpu.rows[a] ||
                 amxsim_cpu.bytes[sum] != amxsim_cpu.bytes[b] ||
                 amxsim_cpu.bytes[a] / 4 != amxsim_cpu.rows[b]);
    if (same) amxsim_dot_by_processor(sum, a, b, f16, result);
    mode = amxsim_mode_enter();
    if (amxsim_has_rows()) amxsim_dot_by_rows(sum, a, b, f16);
    else amxsim_dot_by_elements(sum, a, b, f16);
    amxsim_mode_leave(mode);
    if (!same) return;
    amxsim_compared++;
    amxsim_fault(amxsim_differing(sum, result));
}

#endif
