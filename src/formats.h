#pragma once
#include "base.h"
/* ==== 2. FORMATS ======================================================= >>formats ====
 *
 * Everything here is integer arithmetic on bits: the same result under every rounding mode,
 * under FTZ/DAZ, under -Ofast, on host and device. No context, no allocation, no state;
 * safe from any thread. Arrays are converted by kernels: see mixp_convert.
 *
 * Rounding is to nearest, ties to even, once: f64 converts directly, never through f32.
 * Overflow becomes Inf, or NaN in a format without Inf. The _sat functions return the largest
 * finite value instead, also for Inf. NaN stays NaN: quiet, with its sign, and with the top bits of
 * its payload if the format has room. Widening is exact; bf16 keeps all its bits.
 */
typedef struct mixp_f16  { uint16_t bits; } mixp_f16;    /* IEEE binary16: 1 + 5 + 10      */
typedef struct mixp_bf16 { uint16_t bits; } mixp_bf16;   /* bfloat16:      1 + 8 + 7       */
typedef struct mixp_e4m3 { uint8_t  bits; } mixp_e4m3;   /* OCP fp8 e4m3fn: 1 + 4 + 3      */
typedef struct mixp_e5m2 { uint8_t  bits; } mixp_e5m2;   /* OCP fp8 e5m2:  1 + 5 + 2       */

typedef enum mixp_format_kind {     /* meaning of the largest codes                            */
    MIXP_SPECIAL_IEEE,          /* top exponent: Inf and NaNs                              */
    MIXP_SPECIAL_FN,            /* no Inf; all ones: NaN                                   */
    MIXP_SPECIAL_FNUZ,          /* no Inf, no -0; the code of -0: NaN                      */
    MIXP_SPECIAL_FINITE,        /* numbers only: overflow saturates, NaN becomes +max      */
    MIXP_SPECIAL_SCALE,         /* 2^(code-bias), no sign, no zero; FF, and any x < 0: NaN */
    MIXP_SPECIAL_INTEGER        /* truncates and saturates, NaN becomes 0                  */
} mixp_format_kind;

/* Each dtype is a row: its constant and name, bytes per element, bits of exponent and mantissa,
 * bias, and the meaning of its largest codes. Dtypes below one byte use one byte per element, with
 * the code in the low bits. Only u8 has no sign. */
#define MIXP_DTYPES(X)                                                                    \
    /* constant             name            bytes  e   m   bias  special */               \
    X(MIXP_F32,            "f32",            4,   8, 23,  127, MIXP_SPECIAL_IEEE)         \
    X(MIXP_F64,            "f64",            8,  11, 52, 1023, MIXP_SPECIAL_IEEE)         \
    X(MIXP_F16,            "f16",            2,   5, 10,   15, MIXP_SPECIAL_IEEE)         \
    X(MIXP_BF16,           "bf16",           2,   8,  7,  127, MIXP_SPECIAL_IEEE)         \
    X(MIXP_F8_E4M3,        "f8_e4m3",        1,   4,  3,    7, MIXP_SPECIAL_FN)           \
    X(MIXP_F8_E5M2,        "f8_e5m2",        1,   5,  2,   15, MIXP_SPECIAL_IEEE)         \
    X(MIXP_F8_E4M3FNUZ,    "f8_e4m3fnuz",    1,   4,  3,    8, MIXP_SPECIAL_FNUZ)         \
    X(MIXP_F8_E5M2FNUZ,    "f8_e5m2fnuz",    1,   5,  2,   16, MIXP_SPECIAL_FNUZ)         \
    X(MIXP_F8_E4M3B11FNUZ, "f8_e4m3b11fnuz", 1,   4,  3,   11, MIXP_SPECIAL_FNUZ)         \
    X(MIXP_F8_E3M4,        "f8_e3m4",        1,   3,  4,    3, MIXP_SPECIAL_IEEE)         \
    X(MIXP_F8_E8M0,        "f8_e8m0",        1,   8,  0,  127, MIXP_SPECIAL_SCALE)        \
    X(MIXP_F6_E3M2,        "f6_e3m2",        1,   3,  2,    3, MIXP_SPECIAL_FINITE)       \
    X(MIXP_F6_E2M3,        "f6_e2m3",        1,   2,  3,    1, MIXP_SPECIAL_FINITE)       \
    X(MIXP_F4_E2M1,        "f4_e2m1",        1,   2,  1,    1, MIXP_SPECIAL_FINITE)       \
    X(MIXP_I32,            "i32",            4,   0, 31,    0, MIXP_SPECIAL_INTEGER)      \
    X(MIXP_I64,            "i64",            8,   0, 63,    0, MIXP_SPECIAL_INTEGER)      \
    X(MIXP_U8,             "u8",             1,   0,  8,    0, MIXP_SPECIAL_INTEGER)

#define MIXPI_DTYPE_CONSTANT(constant, name, bytes, e, m, bias, special) constant,
typedef enum mixp_dtype { MIXP_DTYPES(MIXPI_DTYPE_CONSTANT) MIXP_DTYPE_COUNT } mixp_dtype;
#undef MIXPI_DTYPE_CONSTANT

/* mixp_dtype_size: bytes per element; 0 for an unknown dtype. mixp_dtype_name: "f16", for example;
 * "?" for an unknown dtype. */
MIXPREC_API size_t      mixp_dtype_size(mixp_dtype dtype);
MIXPREC_API const char *mixp_dtype_name(mixp_dtype dtype);

/* Largest finite, smallest normal and smallest subnormal number; distance from 1 to the next
 * number. */
#define MIXP_F16_MAX      65504.0f
#define MIXP_F16_MIN      6.103515625e-05f
#define MIXP_F16_TINY     5.9604644775390625e-08f
#define MIXP_F16_EPSILON  9.765625e-04f
#define MIXP_BF16_MAX     3.38953138925153547590e+38f
#define MIXP_BF16_MIN     1.17549435082228750797e-38f
#define MIXP_BF16_TINY    9.18354961579912115601e-41f
#define MIXP_BF16_EPSILON 7.8125e-03f
#define MIXP_E4M3_MAX     448.0f
#define MIXP_E4M3_MIN     1.5625e-02f
#define MIXP_E4M3_TINY    1.953125e-03f
#define MIXP_E4M3_EPSILON 0.125f
#define MIXP_E5M2_MAX     57344.0f
#define MIXP_E5M2_MIN     6.103515625e-05f
#define MIXP_E5M2_TINY    1.52587890625e-05f
#define MIXP_E5M2_EPSILON 0.25f

/* --- bits ------------------------------------------------------------------------------ */

/* Under fast-math, prevents clang from concluding that the source of these bits is not NaN. */
#if defined(__clang__) && !defined(__CUDA_ARCH__) && __FINITE_MATH_ONLY__
#  define MIXPI_HIDE(u) __asm__("" : "+r"(u))
#else
#  define MIXPI_HIDE(u) (void)0
#endif
/* mixp_bits_of_f32, mixp_bits_of_f64: the bits of a number. */
MIXPREC_HD uint32_t mixp_bits_of_f32(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    MIXPI_HIDE(u);
    return u;
}
MIXPREC_HD uint64_t mixp_bits_of_f64(double x) {
    uint64_t u;
    memcpy(&u, &x, 8);
    MIXPI_HIDE(u);
    return u;
}
#undef MIXPI_HIDE

/* mixp_f32_of_bits, mixp_f64_of_bits, mixp_f16_of_bits, mixp_bf16_of_bits, mixp_e4m3_of_bits and
 * mixp_e5m2_of_bits: the number that has these bits. If an ABI returns floats in x87 registers
 * (32-bit x86), a signalling NaN becomes quiet. */
MIXPREC_HD float mixp_f32_of_bits(uint32_t u) {
    float x;
    memcpy(&x, &u, 4);
    return x;
}
MIXPREC_HD double mixp_f64_of_bits(uint64_t u) {
    double x;
    memcpy(&x, &u, 8);
    return x;
}
MIXPREC_HD mixp_f16 mixp_f16_of_bits(uint32_t u) {
    mixp_f16 h;
    h.bits = (uint16_t)u;
    return h;
}
MIXPREC_HD mixp_bf16 mixp_bf16_of_bits(uint32_t u) {
    mixp_bf16 h;
    h.bits = (uint16_t)u;
    return h;
}
MIXPREC_HD mixp_e4m3 mixp_e4m3_of_bits(uint32_t u) {
    mixp_e4m3 h;
    h.bits = (uint8_t)u;
    return h;
}
MIXPREC_HD mixp_e5m2 mixp_e5m2_of_bits(uint32_t u) {
    mixp_e5m2 h;
    h.bits = (uint8_t)u;
    return h;
}

/* --- any format, from its row ------------------------------------------------------------ */

typedef struct mixp_format {
    int exponent_bits, mantissa_bits, bias;
    mixp_format_kind special;
} mixp_format;

MIXPREC_HD mixp_format mixpi_format(int exponent_bits, int mantissa_bits, int bias,
                                    mixp_format_kind special) {
    mixp_format f = { exponent_bits, mantissa_bits, bias, special };
    return f;
}

/* For an unknown dtype, the format of u8. */
MIXPREC_HD mixp_format mixp_format_of(mixp_dtype dtype) {
#define MIXPI_DTYPE_FORMAT(constant, name, bytes, e, m, bias, special)                    \
    case constant: return mixpi_format(e, m, bias, special);
    switch (dtype) {
    MIXP_DTYPES(MIXPI_DTYPE_FORMAT)
    case MIXP_DTYPE_COUNT:
    default: return mixpi_format(0, 8, 0, MIXP_SPECIAL_INTEGER);
    }
#undef MIXPI_DTYPE_FORMAT
}

MIXPREC_HD uint64_t mixpi_ones(int n) { return ((uint64_t)1 << n) - 1u; }   /* n < 64 */
/* Number of bits without the sign. */
MIXPREC_HD int mixpi_width(mixp_format f) { return f.exponent_bits + f.mantissa_bits; }

/* The largest finite code, without sign. */
MIXPREC_HD uint64_t mixpi_max_code(mixp_format f) {
    uint64_t all = mixpi_ones(mixpi_width(f));
    if (f.special == MIXP_SPECIAL_IEEE) return all - ((uint64_t)1 << f.mantissa_bits);
    if (f.special == MIXP_SPECIAL_FN || f.special == MIXP_SPECIAL_SCALE) return all - 1u;
    return all;
}

/* A number in parts: significand * 2^exponent. Bit 62 of the significand is set unless the number
 * is 0. A NaN keeps its payload below bit 62. */
typedef struct mixpi_number {
    uint64_t significand;
    int      exponent, negative, inf, nan;
} mixpi_number;

MIXPREC_HD mixpi_number mixpi_number_of(uint64_t significand, int exponent,
                                        int negative) {
    mixpi_number x = { 0, 0, 0, 0, 0 };
    int step;
    if (significand >> 63) {            /* only for 2^63 */
        significand >>= 1;
        exponent++;
    }
    for (step = 32; significand && step; step /= 2) {
        if (significand >> (63 - step)) continue;
        significand <<= step;
        exponent -= step;
    }
    x.significand = significand;
    x.exponent = exponent;
    x.negative = negative;
    return x;
}

MIXPREC_HD mixpi_number mixpi_unpack_integer(mixp_format f, uint64_t code) {
    int width = mixpi_width(f);
    int negative = width != 8 && (code >> width) & 1u;
    if (negative) code = ((uint64_t)1 << width) - (code & mixpi_ones(width));
    return mixpi_number_of(code, 0, negative);
}

MIXPREC_HD mixpi_number mixpi_unpack(mixp_format f, uint64_t code) {
    int width = mixpi_width(f), e;
    uint64_t a = code & mixpi_ones(width), m, max = mixpi_max_code(f);
    mixpi_number x;
    if (f.special == MIXP_SPECIAL_INTEGER) return mixpi_unpack_integer(f, code);
    if (f.special == MIXP_SPECIAL_SCALE) {
        x = mixpi_number_of(1, (int)a - f.bias, 0);
        x.nan = a == 0xFFu;
        return x;
    }

    e = (int)(a >> f.mantissa_bits);
    m = a & mixpi_ones(f.mantissa_bits);
    if (e) m |= (uint64_t)1 << f.mantissa_bits;
    else e = 1;                         /* subnormals have the exponent of the smallest normal */
    x = mixpi_number_of(m, e - f.bias - f.mantissa_bits, (int)(code >> width) & 1);

    /* Inf and NaN. */
    x.inf = f.special == MIXP_SPECIAL_IEEE && a == max + 1u;
    if (f.special == MIXP_SPECIAL_FNUZ) x.nan = code == (uint64_t)1 << width;
    else x.nan = a > max && !x.inf;
    if (x.nan && f.special != MIXP_SPECIAL_IEEE) x.significand = 0;      /* no payload */
    return x;
}

MIXPREC_HD uint64_t mixpi_pack_integer(mixp_format f, mixpi_number x) {
    int top = x.exponent + 62;          /* weight of the leading bit */
    uint64_t limit = mixpi_ones(f.mantissa_bits), a = 0;
    if (x.negative) limit = f.mantissa_bits == 8 ? 0 : limit + 1u;
    if (x.nan || (!x.significand && !x.inf)) return 0;
    if (x.inf || top > 62) a = limit;
    else if (top >= 0) a = x.significand >> (62 - top);
    if (a > limit) a = limit;
    return x.negative ? 0u - a : a;
}

/* The code of a NaN or of an overflow. */
MIXPREC_HD uint64_t mixpi_pack_special(mixp_format f, mixpi_number x, int saturate) {
    uint64_t max = mixpi_max_code(f), quiet = max + 1u;
    uint64_t sign = (uint64_t)x.negative << mixpi_width(f);
    if (f.special == MIXP_SPECIAL_SCALE)
        return saturate && !x.nan && !x.negative ? max : quiet;
    if (f.special == MIXP_SPECIAL_FINITE) return x.nan ? max : sign | max;
    if (!x.nan && saturate) return sign | max;
    if (f.special == MIXP_SPECIAL_FNUZ) return quiet;
    if (x.nan && f.special == MIXP_SPECIAL_IEEE) {
        quiet |= (uint64_t)1 << (f.mantissa_bits - 1);
        quiet |= x.significand >> (62 - f.mantissa_bits) & mixpi_ones(f.mantissa_bits);
    }
    return sign | quiet;
}

/* Does the removed part, `rest` below bit `shift`, round the code up? `odd`: a tie rounds up.
 * Stochastic rounding rounds up if a 31-bit random number is below the rest. */
MIXPREC_HD int mixpi_rounds_up(uint64_t rest, int shift, int odd, int stochastic,
                               uint32_t random) {
    uint64_t half = (uint64_t)1 << (shift - 1);
    if (stochastic)
        return random >> 1 < (shift > 31 ? rest >> (shift - 31) : rest << (31 - shift));
    return rest > half || (rest == half && odd);
}

/* Rounds once: to nearest even, or stochastically. */
MIXPREC_HD uint64_t mixpi_pack(mixp_format f, mixpi_number x, int saturate,
                               int stochastic, uint32_t random) {
    /* A scale has no subnormals: its smallest code is a normal number. Its ties round up, as in
     * PyTorch: without mantissa bits, each power of two has the odd significand 1. */
    int scale = f.special == MIXP_SPECIAL_SCALE;
    int e = x.exponent + 62 + f.bias + scale, shift = 62 - f.mantissa_bits;
    uint64_t code;
    if (f.special == MIXP_SPECIAL_INTEGER) return mixpi_pack_integer(f, x);
    if (x.nan || x.inf || (scale && x.negative && x.significand))
        return mixpi_pack_special(f, x, saturate);

    /* How many bits fall off? */
    if (e < 1) {                        /* a subnormal */
        shift += 1 - e;
        e = 1;
    }
    if (shift > 63) {
        x.significand = shift < 126 ? x.significand >> (shift - 63) : 0;
        shift = 63;
    }

    /* Exponent and significand in one sum, rounded. */
    code = ((uint64_t)(e - 1) << f.mantissa_bits) + (x.significand >> shift);
    if (!x.significand) code = 0;
    else code += (uint64_t)mixpi_rounds_up(x.significand & mixpi_ones(shift), shift,
                                           (int)(code & 1u) | scale, stochastic, random);

    /* The first code of a scale, overflow, and the sign. */
    if (scale && code) code--;
    if (code > mixpi_max_code(f)) return mixpi_pack_special(f, x, saturate);
    if (scale || (code == 0 && f.special == MIXP_SPECIAL_FNUZ)) return code;
    return (uint64_t)x.negative << mixpi_width(f) | code;
}

MIXPREC_HD uint64_t mixpi_recode(mixp_dtype to, mixp_dtype from, uint64_t code,
                                 int saturate, int stochastic, uint32_t random) {
    mixpi_number x = mixpi_unpack(mixp_format_of(from), code);
    return mixpi_pack(mixp_format_of(to), x, saturate, stochastic, random);
}

/* mixp_encode converts a double to any dtype's code (two's complement for integers), mixp_decode
 * converts it back. mixp_encode_stochastic rounds by a random number, uniform in [0, 2^32).
 * Decoding rounds an i64 beyond 2^53. */
MIXPREC_HD uint64_t mixp_encode(mixp_dtype to, double x, int saturate)
{ return mixpi_recode(to, MIXP_F64, mixp_bits_of_f64(x), saturate, 0, 0); }
MIXPREC_HD uint64_t mixp_encode_stochastic(mixp_dtype to, double x, int saturate,
                                           uint32_t random) {
    return mixpi_recode(to, MIXP_F64, mixp_bits_of_f64(x), saturate, 1, random);
}
MIXPREC_HD double mixp_decode(mixp_dtype from, uint64_t code)
{ return mixp_f64_of_bits(mixpi_recode(MIXP_F64, from, code, 0, 0, 0)); }

/* --- scalar conversions ----------------------------------------------------------------- */

/* f32 bits -> f16 bits.    s eeeeeeee mmmmmmmmmmmmmmmmmmmmmmm -> s eeeee mmmmmmmmmm
 * One shift shortens the significand by 13 bits, or by more if the result is subnormal. A carry
 * out of the significand increases the exponent, up to Inf. */
MIXPREC_HD uint32_t mixpi_f16_of_f32(uint32_t u) {
    uint32_t a = u & 0x7FFFFFFFu, e = a >> 23, m = (a & 0x7FFFFFu) | 0x800000u;
    uint32_t shift = e > 112u ? 13u : e > 95u ? 126u - e : 31u;
    uint32_t r = (m + (1u << (shift - 1u)) - 1u + ((m >> shift) & 1u)) >> shift;
    r += e > 112u ? (e - 113u) << 10 : 0u;
    r = r > 0x7C00u ? 0x7C00u : r;
    r = a > 0x7F800000u ? 0x7E00u | ((a >> 13) & 0x3FFu) : r;
    return (u >> 16 & 0x8000u) | r;
}
MIXPREC_HD uint32_t mixpi_bf16_of_f32(uint32_t u) {
    uint32_t r = u + 0x7FFFu + (u >> 16 & 1u);
    return ((u & 0x7FFFFFFFu) > 0x7F800000u ? u | 0x400000u : r) >> 16;
}
/* A subnormal is an integer times the smallest subnormal: an exact product. */
MIXPREC_HD uint32_t mixpi_f32_of_f16(uint32_t h) {
    uint32_t a = h & 0x7FFFu, r = (a << 13) + 0x38000000u;
    uint32_t tiny = mixp_bits_of_f32((float)(int)a * MIXP_F16_TINY);
    r += a >= 0x7C00u ? 0x38000000u : 0u;
    r |= a > 0x7C00u ? 0x400000u : 0u;
    return (h & 0x8000u) << 16 | (a < 0x400u ? tiny : r);
}
MIXPREC_HD uint32_t mixpi_f32_of_e4m3(uint32_t h) {
    uint32_t a = h & 0x7Fu, r = a == 0x7Fu ? 0x7FC00000u : (a << 20) + 0x3C000000u;
    uint32_t tiny = mixp_bits_of_f32((float)(int)a * MIXP_E4M3_TINY);
    return (h & 0x80u) << 24 | (a < 8u ? tiny : r);
}

/* f32 bits to f16, bf16, e4m3 or e5m2 with every option: mixpi_pack in 32 bits. */
MIXPREC_HD uint32_t mixpi_round_f32(mixp_dtype to, uint32_t u, int saturate,
                                    int stochastic, uint32_t random) {
    mixp_format f = mixp_format_of(to);
    uint32_t a = u & 0x7FFFFFFFu, m = (a & 0x7FFFFFu) | (a >> 23 ? 0x800000u : 0u);
    uint32_t max = (uint32_t)mixpi_max_code(f), sign = (u >> 31) << mixpi_width(f), code,
             add;
    int e = (a >> 23 ? (int)(a >> 23) : 1) - 127 + f.bias, shift = 23 - f.mantissa_bits;
    if (a > 0x7F800000u && to == MIXP_F8_E4M3) return sign | 0x7Fu;
    if (a > 0x7F800000u)
        return sign | (max + 1u) | 1u << (f.mantissa_bits - 1) | (a & 0x7FFFFFu) >> shift;

    /* How many bits fall off? */
    if (e < 1) {                        /* a subnormal */
        shift += 1 - e;
        e = 1;
    }
    if (shift > 31) {
        m = shift < 62 ? m >> (shift - 31) : 0u;
        shift = 31;
    }

    add = stochastic ? ~random >> (32 - shift)
                     : (1u << (shift - 1)) - 1u + (m >> shift & 1u);
    code = ((uint32_t)(e - 1) << f.mantissa_bits) + ((m + add) >> shift);
    if (code > max) code = saturate ? max : max + 1u;
    return sign | code;
}

/* mixp_f16_from_f32 and mixp_f16_from_f64 round to nearest even; from 65,520 on the result is Inf.
 * mixp_f32_from_f16 is exact. */
MIXPREC_HD mixp_f16 mixp_f16_from_f32(float x)
{ return mixp_f16_of_bits(mixpi_f16_of_f32(mixp_bits_of_f32(x))); }
MIXPREC_HD mixp_f16 mixp_f16_from_f64(double x)
{ return mixp_f16_of_bits((uint32_t)mixp_encode(MIXP_F16, x, 0)); }
MIXPREC_HD float mixp_f32_from_f16(mixp_f16 h)
{ return mixp_f32_of_bits(mixpi_f32_of_f16(h.bits)); }

/* mixp_bf16_from_f32 and mixp_bf16_from_f64 round to nearest even. mixp_f32_from_bf16 is exact. */
MIXPREC_HD mixp_bf16 mixp_bf16_from_f32(float x)
{ return mixp_bf16_of_bits(mixpi_bf16_of_f32(mixp_bits_of_f32(x))); }
MIXPREC_HD mixp_bf16 mixp_bf16_from_f64(double x)
{ return mixp_bf16_of_bits((uint32_t)mixp_encode(MIXP_BF16, x, 0)); }
MIXPREC_HD float mixp_f32_from_bf16(mixp_bf16 h)
{ return mixp_f32_of_bits((uint32_t)h.bits << 16); }

/* mixp_e4m3_from_f32 rounds to nearest even; beyond 448 the result is NaN, since e4m3 has no
 * Inf. mixp_e4m3_from_f32_sat returns +-448 instead. mixp_f32_from_e4m3 is exact. */
MIXPREC_HD mixp_e4m3 mixp_e4m3_from_f32(float x)
{ return mixp_e4m3_of_bits(mixpi_round_f32(MIXP_F8_E4M3, mixp_bits_of_f32(x), 0, 0, 0)); }
MIXPREC_HD mixp_e4m3 mixp_e4m3_from_f32_sat(float x)
{ return mixp_e4m3_of_bits(mixpi_round_f32(MIXP_F8_E4M3, mixp_bits_of_f32(x), 1, 0, 0)); }
MIXPREC_HD float mixp_f32_from_e4m3(mixp_e4m3 h)
{ return mixp_f32_of_bits(mixpi_f32_of_e4m3(h.bits)); }

/* mixp_e5m2_from_f32 rounds to nearest even; a result beyond 57,344 is Inf.
 * mixp_e5m2_from_f32_sat returns +-57,344 instead. mixp_f32_from_e5m2 is exact. */
MIXPREC_HD mixp_e5m2 mixp_e5m2_from_f32(float x)
{ return mixp_e5m2_of_bits(mixpi_round_f32(MIXP_F8_E5M2, mixp_bits_of_f32(x), 0, 0, 0)); }
MIXPREC_HD mixp_e5m2 mixp_e5m2_from_f32_sat(float x)
{ return mixp_e5m2_of_bits(mixpi_round_f32(MIXP_F8_E5M2, mixp_bits_of_f32(x), 1, 0, 0)); }
MIXPREC_HD float mixp_f32_from_e5m2(mixp_e5m2 h)
{ return mixp_f32_of_bits(mixpi_f32_of_f16((uint32_t)h.bits << 8)); }

/* mixp_f32_from_f64 rounds to nearest even, in every rounding mode. mixp_f64_from_f32 is exact. */
MIXPREC_HD float mixp_f32_from_f64(double x)
{ return mixp_f32_of_bits((uint32_t)mixp_encode(MIXP_F32, x, 0)); }
MIXPREC_HD double mixp_f64_from_f32(float x) {
    return mixp_decode(MIXP_F32, mixp_bits_of_f32(x));
}

/* x rounded to the 10 mantissa bits of tf32. The low 13 bits of the result are 0. */
MIXPREC_HD float mixp_tf32_round(float x) {
    uint32_t u = mixp_bits_of_f32(x), r = u + 0xFFFu + (u >> 13 & 1u);
    if ((u & 0x7FFFFFFFu) > 0x7F800000u) r = u | 0x400000u;
    return mixp_f32_of_bits(r & 0xFFFFE000u);
}

/* --- random numbers for stochastic rounding, dropout and initialisation ------------------ */

/* mixp_random_u32: the random number of one element, mixp_random_at(mixp_random_key(...),
 * index): uniform in [0, 2^32), and a pure function of its key. The first three parts of the key
 * are hashed into the start of a SplitMix64 sequence; the index selects the term. */
MIXPREC_HD uint64_t mixp_random_key(uint64_t seed, uint64_t step, uint64_t tensor) {
    uint64_t z = seed + 0x9E3779B97F4A7C15u * (step + 1u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u + tensor * 0xD1342543DE82EF95u;
    return (z ^ (z >> 27)) * 0x94D049BB133111EBu;
}
MIXPREC_HD uint32_t mixp_random_at(uint64_t key, uint64_t element) {
    uint64_t z = key + element * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return (uint32_t)((z ^ (z >> 31)) >> 32);
}
MIXPREC_HD uint32_t mixp_random_u32(uint64_t seed, uint64_t step, uint64_t tensor,
                                    uint64_t element) {
    return mixp_random_at(mixp_random_key(seed, step, tensor), element);
}

/* How values are narrowed. Zeroed: to nearest even; overflow is Inf, or NaN in a format without
 * Inf. */
typedef struct mixp_rounding {
    int      saturate;          /* 1: finite overflow and Inf become the largest value; a copy, and
                                   f32 of f16, bf16 and e5m2, keep Inf                     */
    int      stochastic;        /* 1: up with a probability equal to the part cut off, to
                                   within 2^-31                                            */
    uint64_t seed, step, tensor;/* key of an element's random number, with the element's
                                   index                                                   */
    int64_t  first;             /* index of the array's first element                      */
} mixp_rounding;

