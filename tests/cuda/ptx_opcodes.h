/* ptx_opcodes.h - what each instruction does to the lanes of a warp. Tests only.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * arithmetic_opcodes() lists instructions that only read and write registers by their whole name
 * ("add.rn.f32"), so that a modifier that is not listed is an unknown opcode. The rest, which
 * ptx_decode.h chooses by its modifiers, reaches memory or other lanes.
 */
#ifndef PTX_OPCODES_H
#define PTX_OPCODES_H
#include "ptx_memory.h"

namespace ptx {

/* ---- arithmetic of one, two, three operands --------------------------------------------- */

template <class T, class F> inline void unary(Warp &w, const Instr &i, u32 mask) {
    u64 *d = w.result(i.to);
    const u64 *a = w.value(i.from[0]);
    for_lanes(mask, [=](int l) { d[l] = bits_of(F()(as<T>(a[l]))); });
}
template <class T, class F> inline void binary(Warp &w, const Instr &i, u32 mask) {
    u64 *d = w.result(i.to);
    const u64 *a = w.value(i.from[0]), *b = w.value(i.from[1]);
    for_lanes(mask, [=](int l) { d[l] = bits_of(F()(as<T>(a[l]), as<T>(b[l]))); });
}
template <class T, class F> inline void ternary(Warp &w, const Instr &i, u32 mask) {
    u64 *d = w.result(i.to);
    const u64 *a = w.value(i.from[0]), *b = w.value(i.from[1]), *c = w.value(i.from[2]);
    for_lanes(mask, [=](int l) { d[l] = bits_of(F()(as<T>(a[l]), as<T>(b[l]), as<T>(c[l]))); });
}

/* Integers wrap around: the computation is unsigned. */
template <class T> inline u64 wide(T x) { return (u64)(s64)x; }
inline u64 wide(u32 x) { return x; }
inline u64 wide(u64 x) { return x; }

struct Add { template <class T> T operator()(T x, T y) const { return (T)(wide(x) + wide(y)); }
             float operator()(float x, float y) const { return canonical(x + y); }
             double operator()(double x, double y) const { return canonical(x + y); } };
struct Sub { template <class T> T operator()(T x, T y) const { return (T)(wide(x) - wide(y)); }
             float operator()(float x, float y) const { return canonical(x - y); }
             double operator()(double x, double y) const { return canonical(x - y); } };
struct Mul { template <class T> T operator()(T x, T y) const { return (T)(wide(x) * wide(y)); }
             float operator()(float x, float y) const { return canonical(x * y); }
             double operator()(double x, double y) const { return canonical(x * y); } };
struct MulFlushed { float operator()(float x, float y) const
                    { return canonical(flushed(flushed(x) * flushed(y))); } };
struct Mad { template <class T> T operator()(T x, T y, T z) const
             { return (T)(wide(x) * wide(y) + wide(z)); } };
struct Fma { template <class T> T operator()(T x, T y, T z) const
             { return canonical(std::fma(x, y, z)); } };

/* Division by 0 gives all ones, its remainder the dividend, as the hardware does. */
struct Div { template <class T> T operator()(T x, T y) const
             { return y == 0 ? (T)-1 : y == (T)-1 ? (T)(wide(x) / wide(y)) : (T)(x / y); }
             s32 operator()(s32 x, s32 y) const { return (s32)(*this)((s64)x, (s64)y); }
             s64 operator()(s64 x, s64 y) const
             { return !y ? -1 : y == -1 ? (s64)(0 - (u64)x) : x / y; }
             float operator()(float x, float y) const { return canonical(x / y); }
             double operator()(double x, double y) const { return canonical(x / y); } };
struct Rem { template <class T> T operator()(T x, T y) const
             { return y == 0 ? x : y == (T)-1 && std::is_signed<T>::value ? (T)0 : (T)(x % y); } };

template <class T> inline bool is_nan(T x) { return x != x; }
struct Min {
    template <class T> T operator()(T x, T y) const { return y < x ? y : x; }
    float operator()(float x, float y) const { return real(x, y); }
    double operator()(double x, double y) const { return real(x, y); }
    template <class T> static T real(T x, T y) {        /* a number goes before NaN, -0 before +0 */
        if (is_nan(x)) return canonical(y);
        if (is_nan(y)) return x;
        return x < y || (x == y && std::signbit(x)) ? x : y;
    }
};
struct Max {
    template <class T> T operator()(T x, T y) const { return x < y ? y : x; }
    float operator()(float x, float y) const { return canonical(-Min::real(-x, -y)); }
    double operator()(double x, double y) const { return canonical(-Min::real(-x, -y)); }
};
struct And { template <class T> T operator()(T x, T y) const { return (T)(x & y); } };
struct Or  { template <class T> T operator()(T x, T y) const { return (T)(x | y); } };
struct Xor { template <class T> T operator()(T x, T y) const { return (T)(x ^ y); } };
struct Not { template <class T> T operator()(T x) const { return (T)~x; } };
struct NotPredicate { u64 operator()(u64 x) const { return !x; } };

struct Neg { template <class T> T operator()(T x) const { return (T)(0 - wide(x)); }
             float operator()(float x) const { return -x; }
             double operator()(double x) const { return -x; } };
struct Abs { template <class T> T operator()(T x) const { return x < 0 ? Neg()(x) : x; }
             float operator()(float x) const { return std::fabs(x); }
             double operator()(double x) const { return std::fabs(x); } };
/* The sign of x on the size of y. */
struct CopySign { template <class T> T operator()(T x, T y) const { return std::copysign(y, x); } };

struct Sqrt { template <class T> T operator()(T x) const { return canonical(std::sqrt(x)); } };
struct Rcp  { template <class T> T operator()(T x) const { return canonical((T)1 / x); } };
struct Ex2Approx { float operator()(float x) const
    { return canonical(flushed(approximate(x, std::exp2(flushed(x)), 2))); } };
/* Without ftz, subnormals are kept. A power of two is exact for a whole x: expm1f of CUDA, which may be
 * off by one unit, needs it. */
struct Ex2ApproxFull { float operator()(float x) const {
    const float y = std::exp2(x);
    return canonical(x == std::trunc(x) ? y : approximate(x, y, 2));
} };
struct RcpApprox { float operator()(float x) const
    { return canonical(flushed(approximate(x, 1.0f / flushed(x), 1))); } };
struct RsqrtApprox { float operator()(float x) const
    { return canonical(flushed(approximate(x, 1.0f / std::sqrt(flushed(x)), 2))); } };
struct DivApprox { float operator()(float x, float y) const
    { return canonical(flushed(approximate(x, flushed(x) / flushed(y), 2))); } };
struct Lg2Approx { float operator()(float x) const
    { return canonical(flushed(approximate(x, std::log2(flushed(x)), 2))); } };
/* Only the upper half of the result is significant. */
struct RcpApproxDouble { double operator()(double x) const
    { return canonical(as<double>(bits_of(1.0 / flushed(x)) & ~(u64)0xFFFFFFFF)); } };

struct MulHigh {
    u64 operator()(u64 x, u64 y) const { return (u64)((unsigned __int128)x * y >> 64); }
    s64 operator()(s64 x, s64 y) const { return (s64)((__int128)x * y >> 64); }
    u32 operator()(u32 x, u32 y) const { return (u32)((u64)x * y >> 32); }
    s32 operator()(s32 x, s32 y) const { return (s32)((s64)x * y >> 32); }
};
struct MulWide {
    u64 operator()(u32 x, u32 y) const { return (u64)x * y; }
    s64 operator()(s32 x, s32 y) const { return (s64)x * y; }
    u32 operator()(u16 x, u16 y) const { return (u32)x * y; }
    s32 operator()(s16 x, s16 y) const { return (s32)x * y; }
};
template <class T> inline void mad_wide(Warp &w, const Instr &i, u32 mask) {
    u64 *d = w.result(i.to);
    const u64 *a = w.value(i.from[0]), *b = w.value(i.from[1]), *c = w.value(i.from[2]);
    for_lanes(mask, [=](int l) { d[l] = wide(MulWide()(as<T>(a[l]), as<T>(b[l]))) + c[l]; });
}

/* The result of an f32 operation in another rounding mode. The compiler may not move it. */
template <int mode, class F> struct Rounded {
    float operator()(float x, float y) const { return (*this)(x, y, 0.0f); }
    float operator()(float x, float y, float z) const {
        volatile float a = x, b = y, c = z, r;
        std::fesetround(mode);
        r = F::of(a, b, c);
        std::fesetround(FE_TONEAREST);
        return canonical(r);
    }
};
struct SumOf { static float of(float x, float y, float) { return x + y; } };
struct FmaOf { static float of(float x, float y, float z) { return std::fma(x, y, z); } };

/* Shifts by the width or more leave only copies of the sign, or zeros. */
template <class T> inline void shift_left(Warp &w, const Instr &i, u32 mask) {
    u64 *d = w.result(i.to);
    const u64 *a = w.value(i.from[0]), *b = w.value(i.from[1]);
    const u32 bits = 8 * sizeof(T);
    for_lanes(mask, [=](int l)
              { d[l] = (u32)b[l] >= bits ? 0 : bits_of((T)(a[l] << (u32)b[l])); });
}
template <class T> inline void shift_right(Warp &w, const Instr &i, u32 mask) {
    u64 *d = w.result(i.to);
    const u64 *a = w.value(i.from[0]), *b = w.value(i.from[1]);
    const u32 bits = 8 * sizeof(T);
    for_lanes(mask, [=](int l) {
        T x = as<T>(a[l]);
        d[l] = (u32)b[l] < bits ? bits_of((T)(x >> (u32)b[l])) : bits_of((T)(x < 0 ? -1 : 0));
    });
}

/* ---- comparison, choice, bits ----------------------------------------------------------- */

struct Eq { template <class T> static bool of(T x, T y) { return x == y; } };
struct Ne { template <class T> static bool of(T x, T y) { return x < y || y < x; } };
struct Lt { template <class T> static bool of(T x, T y) { return x < y; } };
struct Le { template <class T> static bool of(T x, T y) { return x <= y; } };
struct Gt { template <class T> static bool of(T x, T y) { return x > y; } };
struct Ge { template <class T> static bool of(T x, T y) { return x >= y; } };
template <class C> struct Compare
{ template <class T> u64 operator()(T x, T y) const { return C::of(x, y); } };
/* equ, ltu and their like: true as well when an operand is NaN. */
template <class C> struct Unordered
{ template <class T> u64 operator()(T x, T y) const
  { return is_nan(x) || is_nan(y) || C::of(x, y); } };

inline void select(Warp &w, const Instr &i, u32 mask) {
    u64 *d = w.result(i.to);
    const u64 *a = w.value(i.from[0]), *b = w.value(i.from[1]), *c = w.value(i.from[2]);
    for_lanes(mask, [=](int l) { d[l] = c[l] ? a[l] : b[l]; });
}

/* d = b, with c[lane] low bits of a in place of those from bit `at` on. */
template <class T> inline void insert_bits(Warp &w, const Instr &i, u32 mask) {
    u64 *d = w.result(i.to);
    const u64 *a = w.value(i.from[0]), *b = w.value(i.from[1]);
    const u64 *at = w.value(i.from[2]), *length = w.value(i.from[3]);
    for_lanes(mask, [=](int l) {
        u32 first = (u32)at[l] & 255, n = (u32)length[l] & 255;
        u64 ones = n > 63 ? ~(u64)0 : ((u64)1 << n) - 1;
        u64 taken = first > 63 ? 0 : ones << first, put = first > 63 ? 0 : (a[l] & ones) << first;
        d[l] = bits_of((T)((b[l] & ~taken) | put));
    });
}
inline u32 permuted(u32 a, u32 b, u32 choice) {
    u64 both = (u64)b << 32 | a;
    u32 result = 0;
    for (int k = 0; k < 4; k++) {
        u32 c = choice >> 4 * k & 15, byte = (u32)(both >> 8 * (c & 7)) & 255;
        if (c & 8) byte = byte & 128 ? 255 : 0;
        result |= byte << 8 * k;
    }
    return result;
}
inline void permute(Warp &w, const Instr &i, u32 mask) {
    u64 *d = w.result(i.to);
    const u64 *a = w.value(i.from[0]), *b = w.value(i.from[1]), *c = w.value(i.from[2]);
    for_lanes(mask, [=](int l) { d[l] = permuted((u32)a[l], (u32)b[l], (u32)c[l]); });
}

/* cvt.rn.f16x2.f32 d, high, low */
template <u16 code(float)> inline void convert_pair(Warp &w, const Instr &i, u32 mask) {
    u64 *d = w.result(i.to);
    const u64 *a = w.value(i.from[0]), *b = w.value(i.from[1]);
    for_lanes(mask, [=](int l)
              { d[l] = (u64)code(as<float>(a[l])) << 16 | code(as<float>(b[l])); });
}

/* cvt.rn.satfinite.e4m3x2.f32 d, high, low */
template <u8 code(float)> inline void convert_to_fp8(Warp &w, const Instr &i, u32 mask) {
    u64 *d = w.result(i.to);
    const u64 *a = w.value(i.from[0]), *b = w.value(i.from[1]);
    for_lanes(mask, [=](int l)
              { d[l] = (u64)code(as<float>(a[l])) << 8 | code(as<float>(b[l])); });
}
/* cvt.rn.f16x2.e4m3x2 d, codes */
template <u16 half(u8)> inline void convert_from_fp8(Warp &w, const Instr &i, u32 mask) {
    u64 *d = w.result(i.to);
    const u64 *a = w.value(i.from[0]);
    for_lanes(mask, [=](int l) { d[l] = (u64)half((u8)(a[l] >> 8)) << 16 | half((u8)a[l]); });
}

/* ---- the table -------------------------------------------------------------------------- */

typedef std::unordered_map<std::string, Handler> Opcodes;

template <class F> inline void add_integers(Opcodes &t, const std::string &name) {
    t[name + ".u16"] = binary<u16, F>;
    t[name + ".s16"] = binary<s16, F>;
    t[name + ".u32"] = binary<u32, F>;
    t[name + ".s32"] = binary<s32, F>;
    t[name + ".u64"] = binary<u64, F>;
    t[name + ".s64"] = binary<s64, F>;
}
template <class F> inline void add_bits(Opcodes &t, const std::string &name) {
    t[name + ".b16"] = binary<u16, F>;
    t[name + ".b32"] = binary<u32, F>;
    t[name + ".b64"] = binary<u64, F>;
}
/* Without a rounding mode nvcc's own assembler may join an operation with another: see ptxas's
 * --fmad. It may not across instructions that nvcc has already chosen, so .rn is the same here. */
template <class F> inline void add_reals(Opcodes &t, const std::string &name) {
    for (const char *rounding : { "", ".rn" }) {
        t[name + rounding + ".f32"] = binary<float, F>;
        t[name + rounding + ".f64"] = binary<double, F>;
    }
}
template <template <class> class Kind, class C>
inline void add_comparison(Opcodes &t, const std::string &name) {
    t[name + ".f32"] = binary<float, Kind<C>>;
    t[name + ".f64"] = binary<double, Kind<C>>;
}
template <class C> inline void add_comparisons(Opcodes &t, const std::string &relation) {
    std::string name = "setp." + relation;
    add_integers<Compare<C>>(t, name);
    add_bits<Compare<C>>(t, name);
    add_comparison<Compare, C>(t, name);
    add_comparison<Unordered, C>(t, name + "u");
}

inline void add_sums(Opcodes &t) {
    add_integers<Add>(t, "add");
    add_integers<Sub>(t, "sub");
    add_integers<Mul>(t, "mul.lo");
    add_integers<Div>(t, "div");
    add_integers<Rem>(t, "rem");
    add_integers<Min>(t, "min");
    add_integers<Max>(t, "max");
    add_reals<Add>(t, "add");
    add_reals<Sub>(t, "sub");
    add_reals<Mul>(t, "mul");
    add_reals<Div>(t, "div");
    add_reals<Min>(t, "min");
    add_reals<Max>(t, "max");
    t["add.rz.f32"] = binary<float, Rounded<FE_TOWARDZERO, SumOf>>;
    t["fma.rm.f32"] = ternary<float, Rounded<FE_DOWNWARD, FmaOf>>;
    t["fma.rn.f32"] = ternary<float, Fma>;
    t["fma.rn.f64"] = ternary<double, Fma>;
}
inline void add_products(Opcodes &t) {
    t["mul.hi.u32"] = binary<u32, MulHigh>;
    t["mul.hi.s32"] = binary<s32, MulHigh>;
    t["mul.hi.u64"] = binary<u64, MulHigh>;
    t["mul.hi.s64"] = binary<s64, MulHigh>;
    t["mul.wide.u16"] = binary<u16, MulWide>;
    t["mul.wide.s16"] = binary<s16, MulWide>;
    t["mul.wide.u32"] = binary<u32, MulWide>;
    t["mul.wide.s32"] = binary<s32, MulWide>;
    t["mad.lo.s32"] = t["mad.lo.u32"] = ternary<u32, Mad>;
    t["mad.lo.s64"] = t["mad.lo.u64"] = ternary<u64, Mad>;
    t["mad.wide.u32"] = mad_wide<u32>;
    t["mad.wide.s32"] = mad_wide<s32>;
}
inline void add_functions(Opcodes &t) {
    t["neg.f32"] = unary<float, Neg>;
    t["neg.f64"] = unary<double, Neg>;
    t["neg.s32"] = unary<s32, Neg>;
    t["neg.s64"] = unary<s64, Neg>;
    t["abs.f32"] = unary<float, Abs>;
    t["abs.f64"] = unary<double, Abs>;
    t["abs.s32"] = unary<s32, Abs>;
    t["abs.s64"] = unary<s64, Abs>;
    t["copysign.f32"] = binary<float, CopySign>;
    t["copysign.f64"] = binary<double, CopySign>;
    t["sqrt.rn.f32"] = unary<float, Sqrt>;
    t["sqrt.rn.f64"] = unary<double, Sqrt>;
    t["rcp.rn.f32"] = unary<float, Rcp>;
    t["rcp.rn.f64"] = unary<double, Rcp>;
    t["cvt.rn.f16x2.f32"] = convert_pair<half_code>;
    t["cvt.rn.bf16x2.f32"] = convert_pair<bf16_code>;
    t["cvt.rn.satfinite.e4m3x2.f32"] = convert_to_fp8<fp8_code<3, 7, 0x7E>>;
    t["cvt.rn.satfinite.e5m2x2.f32"] = convert_to_fp8<fp8_code<2, 15, 0x7B>>;
    t["cvt.rn.f16x2.e4m3x2"] = convert_from_fp8<fp8_half<3, 7, 0x7F, false>>;
    t["cvt.rn.f16x2.e5m2x2"] = convert_from_fp8<fp8_half<2, 15, 0x7C, true>>;
    t["mul.ftz.f32"] = binary<float, MulFlushed>;
    t["ex2.approx.ftz.f32"] = unary<float, Ex2Approx>;
    t["ex2.approx.f32"] = unary<float, Ex2ApproxFull>;
    t["rcp.approx.ftz.f32"] = unary<float, RcpApprox>;
    t["div.approx.ftz.f32"] = binary<float, DivApprox>;
    t["lg2.approx.ftz.f32"] = unary<float, Lg2Approx>;
    t["rsqrt.approx.ftz.f32"] = unary<float, RsqrtApprox>;
    t["rcp.approx.ftz.f64"] = unary<double, RcpApproxDouble>;
}
inline void add_shifts(Opcodes &t) {
    t["shl.b16"] = shift_left<u16>;
    t["shl.b32"] = shift_left<u32>;
    t["shl.b64"] = shift_left<u64>;
    t["shr.u16"] = t["shr.b16"] = shift_right<u16>;
    t["shr.u32"] = t["shr.b32"] = shift_right<u32>;
    t["shr.u64"] = t["shr.b64"] = shift_right<u64>;
    t["shr.s16"] = shift_right<s16>;
    t["shr.s32"] = shift_right<s32>;
    t["shr.s64"] = shift_right<s64>;
}
/* A predicate is 0 or 1. */
inline void add_logic(Opcodes &t) {
    add_bits<And>(t, "and");
    add_bits<Or>(t, "or");
    add_bits<Xor>(t, "xor");
    t["and.pred"] = binary<u64, And>;
    t["or.pred"] = binary<u64, Or>;
    t["xor.pred"] = binary<u64, Xor>;
    t["not.pred"] = unary<u64, NotPredicate>;
    t["not.b16"] = unary<u16, Not>;
    t["not.b32"] = unary<u32, Not>;
    t["not.b64"] = unary<u64, Not>;
    t["bfi.b32"] = insert_bits<u32>;
    t["bfi.b64"] = insert_bits<u64>;
    t["prmt.b32"] = permute;
    for (const char *type : { "b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64", "f32",
                              "f64" })
        t[std::string("selp.") + type] = select;
    add_comparisons<Eq>(t, "eq");
    add_comparisons<Ne>(t, "ne");
    add_comparisons<Lt>(t, "lt");
    add_comparisons<Le>(t, "le");
    add_comparisons<Gt>(t, "gt");
    add_comparisons<Ge>(t, "ge");
}
inline const Opcodes &arithmetic_opcodes() {
    static Opcodes t;
    if (!t.empty()) return t;
    add_sums(t);
    add_products(t);
    add_functions(t);
    add_shifts(t);
    add_logic(t);
    return t;
}

/* ---- moves and conversions -------------------------------------------------------------- */

inline void move(Warp &w, const Instr &i, u32 mask) {
    u64 *d = w.result(i.to), offset = (u64)i.from[0].offset;
    const u64 *a = w.value(i.from[0]);
    for_lanes(mask, [=](int l) { d[l] = a[l] + offset; });
}
/* mov.b64 %rd, {%r1, %r2}: the first element is the lowest. */
inline void pack(Warp &w, const Instr &i, u32 mask) {
    const std::vector<Operand> &items = i.from[0].items;
    int bits = 8 * bytes_of(i.type) / (int)items.size();
    u64 *d = w.result(i.to), ones = ((u64)1 << bits) - 1, packed[32] = { 0 };
    for (size_t k = 0; k < items.size(); k++) {
        const u64 *a = w.value(items[k]);
        for_lanes(mask, [&](int l) { packed[l] |= (a[l] & ones) << (size_t)bits * k; });
    }
    for_lanes(mask, [&](int l) { d[l] = packed[l]; });
}
inline void unpack(Warp &w, const Instr &i, u32 mask) {
    const std::vector<Operand> &items = i.to.items;
    int bits = 8 * bytes_of(i.type) / (int)items.size();
    u64 ones = ((u64)1 << bits) - 1, whole[32];
    std::memcpy(whole, w.value(i.from[0]), sizeof whole);
    for (size_t k = 0; k < items.size(); k++) {
        if (items[k].kind != Operand::in_register) continue;        /* _: not wanted            */
        u64 *d = w.result(items[k]);
        for_lanes(mask, [&](int l) { d[l] = whole[l] >> (size_t)bits * k & ones; });
    }
}
inline void convert_lanes(Warp &w, const Instr &i, u32 mask) {
    u64 *d = w.result(i.to);
    const u64 *a = w.value(i.from[0]);
    for_lanes(mask, [&](int l) { d[l] = convert(i.conversion, a[l]); });
}

/* cvta: mode 1 makes a generic address one of i.space, mode 0 the reverse. */
inline void convert_address(Warp &w, const Instr &i, u32 mask) {
    const Block &b = *w.block;
    u64 *d = w.result(i.to), shift = 0;
    if (i.space == shared) shift = (u64)(uintptr_t)b.shared_bytes;
    for_lanes(mask, [&](int l) {
        if (i.space == local)
            shift = (u64)(uintptr_t)(b.locals.data() +
                                     b.local_size * (size_t)(32 * w.number + l));
        u64 address = w.address(i.from[0], l);
        d[l] = i.mode ? address - shift : address + shift;
    });
}

/* ---- loads, stores, atomic operations --------------------------------------------------- */

inline u64 loaded(const char *p, Type type) {
    u64 v = 0;
    std::memcpy(&v, p, (size_t)bytes_of(type));
    return widen(v, type);
}
/* mode 1: volatile. */
inline void load(Warp &w, const Instr &i, u32 mask) {
    int size = bytes_of(i.type);
    Use use = i.mode ? use_volatile_read : use_read;
    for_lanes(mask, [&](int l) {
        u64 at = w.address(i.from[0], l);
        const char *p = resolve(w, l, i.space, at, size * i.vector, use);
        if (i.vector == 1) { w.result(i.to)[l] = loaded(p, i.type); return; }
        for (int k = 0; k < i.vector; k++)
            if (i.to.items[(size_t)k].kind == Operand::in_register)
                w.result(i.to.items[(size_t)k])[l] = loaded(p + k * size, i.type);
    });
}
inline void store(Warp &w, const Instr &i, u32 mask) {
    size_t size = (size_t)bytes_of(i.type);
    Use use = i.mode ? use_volatile_write : use_write;
    const Operand &o = i.from[1];
    for_lanes(mask, [&](int l) {
        u64 at = w.address(i.from[0], l);
        char *p = resolve(w, l, i.space, at, (int)size * i.vector, use);
        if (i.vector == 1) { std::memcpy(p, &w.value(o)[l], size); return; }
        for (size_t k = 0; k < i.vector; k++)
            std::memcpy(p + k * size, &w.value(o.items[k])[l], size);
    });
}

enum Atomic { atomic_add, atomic_min, atomic_max, atomic_inc };
template <class T> inline T changed(Atomic what, T old, T x) {
    switch (what) {
    case atomic_add: return Add()(old, x);
    case atomic_min: return Min()(old, x);
    case atomic_max: return Max()(old, x);
    default:         return old >= x ? (T)0 : (T)(old + 1);
    }
}
template <class T> inline void atomic(Warp &w, const Instr &i, u32 mask) {
    for_lanes(mask, [&](int l) {
        T old, x = as<T>(w.value(i.from[1])[l]);
        u64 at = w.address(i.from[0], l);
        char *p = resolve(w, l, i.space, at, sizeof(T), use_atomic);
        std::memcpy(&old, p, sizeof old);
        x = changed((Atomic)i.mode, old, x);
        std::memcpy(p, &x, sizeof x);
        note_release(w, at);
        w.result(i.to)[l] = bits_of(old);
    });
}
inline void fence(Warp &w, const Instr &, u32) { note_fence(w); }

/* ---- asynchronous copies ---------------------------------------------------------------- */

/* The source of a copy that takes nothing may be anywhere. */
inline void copy_async(Warp &w, const Instr &i, u32 mask) {
    for_lanes(mask, [&](int l) {
        int bytes = (int)w.value(i.from[2])[l], given = bytes;
        if (i.from.size() > 3) given = (int)(u32)w.value(i.from[3])[l];
        u64 to = w.address(i.from[0], l) & 0xFFFFFFFFu, from = w.address(i.from[1], l);
        if (given > bytes) fault(w, l, "cp.async takes more than it copies", from, given);
        resolve(w, l, shared, to, bytes, use_write);
        forget_shared(w, (u32)to, bytes);
        if (from % (u64)bytes) fault(w, l, "cp.async: misaligned", from, bytes);
        if (given) in_global(w, l, from, given, use_read);
        w.copies[l].push_back(Copy{ (u32)to, from, bytes, given, w.groups[l] });
    });
}
inline void commit_copies(Warp &w, const Instr &, u32 mask)
{ for_lanes(mask, [&](int l) { w.groups[l]++; }); }

/* Completes all but the newest groups, as many as the operand says. */
inline void wait_for_copies(Warp &w, const Instr &i, u32 mask) {
    for_lanes(mask, [&](int l) {
        int newest = (int)w.value(i.from[0])[l];
        std::vector<Copy> left;
        for (const Copy &c : w.copies[l]) {
            if (c.group >= w.groups[l] - newest) { left.push_back(c); continue; }
            char *to = resolve(w, l, shared, c.to, c.bytes, use_write);
            std::memcpy(to, (const char *)(uintptr_t)c.from, (size_t)c.given);
            std::memset(to + c.given, 0, (size_t)(c.bytes - c.given));
        }
        w.copies[l].swap(left);
    });
}

/* ---- collectives: all lanes of the mask have arrived ------------------------------------ */

inline void meet(Warp &, const Instr &, u32) {}

enum Shuffle { shuffle_up, shuffle_down, shuffle_xor, shuffle_index };

/* The lane that lane l reads; l itself when that is outside its segment. */
inline int source_lane(Shuffle how, int l, u32 b, u32 c, bool *inside) {
    int by = (int)(b & 31), segment = (int)(c >> 8 & 31);
    int first = l & segment, last = first | ((int)(c & 31) & ~segment);
    int from = how == shuffle_up ? l - by : how == shuffle_down ? l + by
             : how == shuffle_xor ? l ^ by : first | (by & ~segment);
    *inside = how == shuffle_up ? from >= last : from <= last;
    return *inside ? from : l;
}
inline void shuffle(Warp &w, const Instr &i, u32 mask) {
    const u64 *a = w.value(i.from[0]), *b = w.value(i.from[1]), *c = w.value(i.from[2]);
    u64 got[32], valid[32];
    for_lanes(mask, [&](int l) {
        bool inside;
        int from = source_lane((Shuffle)i.mode, l, (u32)b[l], (u32)c[l], &inside);
        if (!(mask >> from & 1)) fault(w, l, "shfl reads a lane outside its mask", (u64)from, 4);
        got[l] = (u32)a[from];
        valid[l] = inside;
    });
    u64 *d = w.result(i.to), *p = i.to2.kind == Operand::in_register ? w.result(i.to2) : valid;
    for_lanes(mask, [&](int l) {
        d[l] = got[l];
        p[l] = valid[l];
    });
}

/* Lane 8 k + j gives the address of row j of matrix k: 8 x 8 elements of 2 bytes. */
inline void load_matrices(Warp &w, const Instr &i, u32) {
    u16 rows[4][8][8];
    u64 at[32];
    for (int l = 0; l < 32; l++) at[l] = w.address(i.from[0], l);
    for (int l = 0; l < 8 * i.vector; l++)
        std::memcpy(rows[l / 8][l % 8], resolve(w, l, shared, at[l], 16, use_read), 16);
    for (int k = 0; k < i.vector; k++) {
        u64 *d = w.result(i.to.items[(size_t)k]);
        for (int l = 0; l < 32; l++) {
            int r = l / 4, c = l % 4 * 2;
            u32 low = i.trans ? rows[k][c][r] : rows[k][r][c];
            u32 high = i.trans ? rows[k][c + 1][r] : rows[k][r][c + 1];
            d[l] = low | high << 16;
        }
    }
}

/* The fragments of mma.m16n8kK: lane l has rows l / 4 and l / 4 + 8 of A, C and D, and column l / 4
 * of B; its elements stand in pairs from 2 (l % 4) on. */
struct Fragments { double a[16][16], b[8][16]; };

inline double element(u64 pair, int high, Type type) {
    u16 code = (u16)(high ? pair >> 16 : pair);
    return type == type_bf16 ? bf16_value(code) : half_value(code);
}
inline void gather_fragments(Warp &w, const Instr &i, Fragments &f) {
    const std::vector<Operand> &A = i.from[0].items, &B = i.from[1].items;
    for (size_t r = 0; r < A.size(); r++)
        for (int e = 0; e < 64; e++) {
            int l = e / 2, k = l % 4 * 2 + e % 2 + (int)(r / 2) * 8;
            f.a[l / 4 + (int)(r % 2) * 8][k] = element(w.value(A[r])[l], e % 2, i.type);
        }
    for (size_t r = 0; r < B.size(); r++)
        for (int e = 0; e < 64; e++) {
            int l = e / 2, k = l % 4 * 2 + e % 2 + (int)r * 8;
            f.b[l / 4][k] = element(w.value(B[r])[l], e % 2, i.type);
        }
}
inline void multiply_matrices(Warp &w, const Instr &i, u32) {
    Fragments f;
    float out[4][32];
    double terms[16];
    int K = i.mode;
    gather_fragments(w, i, f);
    for (int e = 0; e < 128; e++) {
        int l = e / 4, row = l / 4 + (e % 4 / 2) * 8, column = l % 4 * 2 + e % 2;
        for (int k = 0; k < K; k++) terms[k] = f.a[row][k] * f.b[column][k];
        out[e % 4][l] = tensor_sum(as<float>(w.value(i.from[2].items[(size_t)(e % 4)])[l]), terms,
                                   K);
    }
    for (size_t k = 0; k < 4; k++) {
        u64 *d = w.result(i.to.items[k]);
        for (int l = 0; l < 32; l++) d[l] = bits_of(out[k][l]);
    }
}

}   /* namespace ptx */
#endif
