/* ptx_values.h - types and values of PTX: bits, conversions, arithmetic of one lane. Tests only.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * A register of one lane is 64 bits. A narrower value occupies the low bits; an instruction ignores
 * the others.
 * Arithmetic follows the PTX ISA of CUDA 13.0: an f32 or f64 result that is NaN has one bit pattern,
 * products and sums are joined only by fma, and subnormal values are flushed only where .ftz stands.
 */
#ifndef PTX_VALUES_H
#define PTX_VALUES_H
#include <algorithm>
#include <cfenv>
#include <climits>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>

namespace ptx {

typedef uint64_t u64;
typedef int64_t  s64;
typedef uint32_t u32;
typedef int32_t  s32;
typedef uint16_t u16;
typedef int16_t  s16;
typedef uint8_t  u8;
typedef int8_t   s8;

/* Ends the program: one line that names the cause. Exit status 77 means "skipped". */
[[noreturn]] inline void stop(int status, const char *format, ...) {
    va_list list;
    va_start(list, format);
    std::fflush(stdout);
    std::fputs("ptx: ", stderr);
    std::vfprintf(stderr, format, list);
    std::fputs("\n", stderr);
    va_end(list);
    std::fflush(stderr);
    std::_Exit(status);
}

/* ---- settings --------------------------------------------------------------------------- */

/* PTX_ROUGH in the environment: approximations are as far off as the ISA allows, and the sums of
 * tensor cores are truncated. */
inline bool is_rough() {
    static const bool rough = std::getenv("PTX_ROUGH") != nullptr;
    return rough;
}

/* ---- types ------------------------------------------------------------------------------ */

enum Type : u8 { no_type, type_u8, type_u16, type_u32, type_u64, type_s8, type_s16, type_s32,
                 type_s64, type_b8, type_b16, type_b32, type_b64, type_f16, type_bf16, type_f32,
                 type_f64, type_pred };

inline Type type_of(const std::string &name) {
    static const char *const names[] = { "", "u8", "u16", "u32", "u64", "s8", "s16", "s32", "s64",
        "b8", "b16", "b32", "b64", "f16", "bf16", "f32", "f64", "pred" };
    for (int t = 1; t <= type_pred; t++)
        if (name == names[t]) return (Type)t;
    return no_type;
}

inline int bytes_of(Type t) {
    switch (t) {
    case type_u8: case type_s8: case type_b8: return 1;
    case type_u16: case type_s16: case type_b16: case type_f16: case type_bf16: return 2;
    case type_u64: case type_s64: case type_b64: case type_f64: return 8;
    default: return 4;
    }
}
inline bool is_signed(Type t) { return t >= type_s8 && t <= type_s64; }
inline bool is_real(Type t) { return t >= type_f16 && t <= type_f64; }

/* ---- bits ------------------------------------------------------------------------------- */

template <class T> inline T as(u64 bits) {
    T value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
template <class T> inline u64 bits_of(T value) {
    u64 bits = 0;
    std::memcpy(&bits, &value, sizeof value);
    return bits;
}

/* The low bits of v that type t has. */
inline u64 narrow(u64 v, Type t) {
    int n = 8 * bytes_of(t);
    return n == 64 ? v : v & (((u64)1 << n) - 1);
}
/* v, of type t, extended to 64 bits by its sign or by zeros. */
inline u64 widen(u64 v, Type t) {
    int unused = 64 - 8 * bytes_of(t);
    if (!is_signed(t)) return narrow(v, t);
    return (u64)((s64)(v << unused) >> unused);
}

/* ---- floating point --------------------------------------------------------------------- */

inline float  canonical(float x) { return x != x ? as<float>(0x7FFFFFFFu) : x; }
inline double canonical(double x) { return x != x ? as<double>(0x7FFFFFFFFFFFFFFFull) : x; }
inline float  flushed(float x)
{ return std::fabs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0f, x) : x; }
inline double flushed(double x)
{ return std::fabs(x) < std::numeric_limits<double>::min() ? std::copysign(0.0, x) : x; }

/* Both conversions are exact, written here so that the interpreter depends on no other code. */
inline float half_value(u16 code) {
    float sign = code & 0x8000 ? -1.0f : 1.0f;
    bool special = (code >> 10 & 31) == 31;
    if (special && (code & 1023)) return as<float>(0x7FFFFFFFu);
    if (special) return sign * std::numeric_limits<float>::infinity();
    return sign * as<float>((u64)(code & 0x7FFF) << 13) * 5.192296858534828e33f;    /* 2^112 */
}
inline float bf16_value(u16 code) { return as<float>((u64)code << 16); }

/* To nearest, ties to even; subnormal halves included. */
inline u16 half_code(float x) {
    u16 sign = (u16)((u32)bits_of(x) >> 16 & 0x8000), code;
    float size = std::fabs(x);
    if (x != x) return 0x7FFF;
    if (size >= 65520.0f) return (u16)(sign | 0x7C00);
    if (size < 6.103515625e-5f) return (u16)(sign | (u16)std::nearbyint(size * 16777216.0f));
    u32 bits = (u32)bits_of(size) - (112u << 23);
    code = (u16)((bits + 0xFFF + (bits >> 13 & 1)) >> 13);
    return (u16)(sign | code);
}

inline u16 bf16_code(float x) {
    u32 bits = (u32)bits_of(x);
    if (x != x) return 0x7FFF;
    return (u16)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

/* fp8, e4m3 or e5m2 by its mantissa bits m, its bias, and its largest finite code `most`, as cvt with
 * .satfinite: to nearest, ties to even; numbers beyond the format and Inf become the largest; one NaN. */
template <int m, int bias, int most> inline u8 fp8_code(float x) {
    const u8 sign = (u8)((u32)bits_of(x) >> 24 & 0x80);
    const double size = std::fabs((double)x);
    if (x != x) return 0x7F;
    if (size > 1e6) return (u8)(sign | most);
    int e = size > 0.0 ? std::ilogb(size) : 1 - bias;
    e = std::max(e, 1 - bias);                  /* subnormals have the spacing of the smallest octave */
    const int steps = (int)std::nearbyint(std::ldexp(size, m - e));
    return (u8)(sign | std::min(((e + bias - 1) << m) + steps, most));
}
/* The half with the value of a code; exact. inf: the code of Inf, or of the first NaN. */
template <int m, int bias, int inf, bool has_inf> inline u16 fp8_half(u8 code) {
    const int size = code & 0x7F, e = size >> m, rest = size & ((1 << m) - 1);
    const u16 sign = (u16)((code & 0x80) << 8);
    if (size > inf || (size == inf && !has_inf)) return 0x7FFF;
    if (size == inf) return (u16)(sign | 0x7C00);
    const double x = std::ldexp(e ? (1 << m) + rest : rest, (e ? e : 1) - bias - m);
    return (u16)(sign | half_code((float)x));
}

enum Rounding : u8 { by_default, nearest, to_zero, down, up };

inline double rounded(double x, Rounding how) {
    switch (how) {
    case nearest: return std::nearbyint(x);
    case down:    return std::floor(x);
    case up:      return std::ceil(x);
    default:      return std::trunc(x);
    }
}

/* A whole number as a value of T, limited to its range; NaN becomes 0. */
template <class T> inline T limited(double x) {
    if (x != x) return 0;
    if (x <= (double)std::numeric_limits<T>::min()) return std::numeric_limits<T>::min();
    if (x >= (double)std::numeric_limits<T>::max()) return std::numeric_limits<T>::max();
    return (T)x;
}
inline u64 whole_number(double x, Type to) {
    switch (to) {
    case type_u8:  return limited<u8>(x);
    case type_s8:  return bits_of(limited<s8>(x));
    case type_u16: return limited<u16>(x);
    case type_s16: return bits_of(limited<s16>(x));
    case type_u32: return limited<u32>(x);
    case type_s32: return bits_of(limited<s32>(x));
    case type_u64: return limited<u64>(x);
    default:       return bits_of(limited<s64>(x));
    }
}

inline double real_value(u64 v, Type from) {
    switch (from) {
    case type_f16:  return half_value((u16)v);
    case type_bf16: return bf16_value((u16)v);
    case type_f32:  return as<float>(v);
    default:        return as<double>(v);
    }
}

struct Conversion {
    Type     to, from;
    Rounding rounding;
    bool     whole, saturate, flush;        /* whole: to a whole number (.rni and its like)     */
};

inline u64 convert_real(const Conversion &c, u64 v) {
    double x = real_value(v, c.from);
    if (c.flush && c.from == type_f32) x = flushed((float)x);
    if (!is_real(c.to)) return whole_number(rounded(x, c.rounding), c.to);
    if (c.whole) x = rounded(x, c.rounding);
    if (c.saturate) x = x != x || x < 0.0 ? 0.0 : x > 1.0 ? 1.0 : x;
    if (c.to == type_f16) return half_code((float)x);
    if (c.to == type_f64) return bits_of(canonical(x));
    return bits_of(canonical(c.flush ? flushed((float)x) : (float)x));
}

/* Integers round once, from 64 bits. */
template <class Real> inline u64 from_integer(u64 v, Type from)
{ return is_signed(from) ? bits_of((Real)(s64)widen(v, from)) : bits_of((Real)widen(v, from)); }

inline u64 convert(const Conversion &c, u64 v) {
    if (is_real(c.from)) return convert_real(c, v);
    if (c.to == type_f32) return from_integer<float>(v, c.from);
    if (c.to == type_f64) return from_integer<double>(v, c.from);
    return widen(widen(v, c.from), c.to);
}

/* ---- approximations --------------------------------------------------------------------- */

/* y, up to `units` away in the last place by the bits of x, when the interpreter is rough. */
inline float approximate(float x, float y, int units) {
    if (!is_rough() || !std::isfinite(y) || std::fabs(y) < 1e-37f) return y;
    u32 hash = (u32)bits_of(x) * 2654435761u >> 16;
    int off = (int)(hash % (u32)(2 * units + 1)) - units;
    return as<float>((u32)bits_of(y) + (u32)off);
}

/* ---- sums of tensor cores --------------------------------------------------------------- */

/* x without what lies below the last bit that f32 has of a number as large as `largest`. */
inline double truncated(double x, double largest) {
    int e;
    std::frexp(largest, &e);
    return std::ldexp(std::trunc(std::ldexp(x, 24 - e)), e - 24);
}

/* start plus four terms, all truncated where the largest ends, and their sum as well, as Fasi,
 * Higham, Mikaitis and Pranesh found on V100 (Numerical behavior of NVIDIA tensor cores, 2021). */
inline float truncated_four(float start, const double *terms) {
    double largest = std::fabs((double)start), sum = 0.0;
    for (int i = 0; i < 4; i++) largest = std::fmax(largest, std::fabs(terms[i]));
    if (!std::isfinite(largest + start + terms[0] + terms[1] + terms[2] + terms[3]))
        return (float)(start + terms[0] + terms[1] + terms[2] + terms[3]);
    sum = truncated((double)start, largest);
    for (int i = 0; i < 4; i++) sum += truncated(terms[i], largest);
    return (float)truncated(sum, std::fabs(sum));
}

/* start plus n terms, n a multiple of 4. */
inline float tensor_sum(float start, const double *terms, int n) {
    double sum = 0.0;
    if (is_rough()) {
        for (int i = 0; i < n; i += 4) start = truncated_four(start, terms + i);
        return canonical(start);
    }
    for (int i = 0; i < n; i++) sum += terms[i];
    return canonical((float)((double)start + sum));
}

}   /* namespace ptx */
#endif
