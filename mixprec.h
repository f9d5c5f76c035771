/* mixprec.h - automatic mixed-precision training for C, C++ and CUDA C
 * SPDX-License-Identifier: MIT OR Unlicense          (full texts: the file LICENSE)
 *
 * What PyTorch users have in torch.amp, in one header that needs libc and libm alone:
 * number formats, autocast, a dynamic loss scaler, fused Adam on fp32 master weights, a tape
 * of operators, and checkpoints.
 *
 * In ONE source file of your program:
 *
 *     #define MIXPREC_IMPLEMENTATION
 *     #include "mixprec.h"
 *
 * and in all others only the #include. Compile with -O2, link with -lm; -fopenmp uses all cores.
 * A complete program, y = 3x learned in fp16:
 *
 *     #define MIXPREC_IMPLEMENTATION
 *     #include "mixprec.h"
 *     #include <stdio.h>
 *
 *     int main(void)
 *     {
 *         int64_t shape[2] = { 1, 1 }, batch[2] = { 4, 1 };
 *         float x[4] = { 1, 2, 3, 4 }, y[4] = { 3, 6, 9, 12 };
 *         mixp_context    *ctx    = mixp_context_new(NULL);
 *         mixp_tensor     *w      = mixp_param(ctx, "w", MIXP_F32, 2, shape), *loss = NULL;
 *         mixp_scaler     *scaler = mixp_scaler_new(ctx, NULL);
 *         mixp_adamw_desc  adamw  = mixp_adamw_defaults();
 *         mixp_optimizer  *opt;
 *         const char      *why;
 *         int              step;
 *
 *         adamw.lr = 0.1;
 *         opt = mixp_adamw_new(ctx, &adamw);
 *         mixp_optimizer_add(opt, w, NULL);
 *         for (step = 0; step < 200; step++) {
 *             mixp_step_begin(ctx);
 *             mixp_zero_grad(opt);
 *             MIXP_AUTOCAST(ctx, MIXP_F16) {
 *                 mixp_tensor *in = mixp_input(ctx, MIXP_F32, 2, batch, x);
 *                 loss = mixp_mse(ctx, mixp_linear(ctx, in, w, NULL),
 *                                 mixp_input(ctx, MIXP_F32, 2, batch, y));
 *             }
 *             mixp_backward(ctx, mixp_scaler_scale(scaler, loss));
 *             mixp_scaler_step(scaler, opt);
 *             mixp_scaler_update(scaler);
 *         }
 *         if (mixp_context_error(ctx, &why) != MIXP_OK) { fprintf(stderr, "%s\n", why); return 1; }
 *         printf("w = %.2f, loss scale %g\n", mixp_item(w),
 *                (double)mixp_scaler_loss_scale(scaler));
 *         mixp_context_free(ctx);
 *         return 0;
 *     }
 *
 * CONTENTS: each section has a banner; search for its mark
 *
 *      1. results      >>results       codes and texts
 *      2. formats      >>formats       f16, bf16, fp8, tf32: scalars; random numbers
 *      3. arithmetic   >>arithmetic    what the host and all devices compute alike
 *      4. kernels      >>kernels       a device is a table of kernels; the CPU's; mixp_convert
 *      5. tensors      >>tensors       context, memory, parameters, views, activations
 *      6. autocast     >>autocast      operator classes, regions, cast cache
 *      7. tape         >>tape          applying an operator, walking back, your own operators
 *      8. operators    >>operators     linear, attention, norms, losses, ...
 *      9. scaler       >>scaler        dynamic loss scaling and its rules
 *     10. optimizers   >>optimizers    Adam, AdamW, SGD, groups, schedules
 *     11. step         >>step          unscale, clip, step, update; what became of it, and why
 *     12. watch        >>watch         falling back to f32, where a step went wrong, comparing runs
 *     13. checkpoint   >>checkpoint    safetensors, crash-safe save, exact resume
 *
 * The public half comes first, in this order, then the implementation, in the same order. A
 * section uses only the sections above it.
 *
 * OPTIONS: define them before the #include
 *
 *     MIXPREC_IMPLEMENTATION   one file          the implementation
 *     MIXPREC_STATIC           every file        everything static: a private copy
 *     MIXPREC_API              every file        your own linkage, say __declspec(dllexport)
 *     MIXPREC_NO_SIMD          implementation    scalar code only
 *     MIXPREC_CBLAS            implementation    f32 products by cblas_sgemm of your BLAS
 *     MIXPREC_ASSERT(x)        implementation    checks of what must hold inside; none unless
 *                                                given. A failure is a fault of mixprec's
 *     MIXPREC_SELF             implementation    this file's name, when you renamed it
 *
 * Memory comes from the allocator in mixp_context_desc. The instruction set is chosen at run
 * time (AVX-512, on AMD with AVX512_BF16; AVX2 with F16C; NEON; plain C); no -march is needed.
 * With mixprec_cuda.cu beside this file the same programs run on a GPU: see mixp_cuda, and
 * mixp_capture_begin for graphs.
 *
 * SAME BITS: what one build of a program computes twice, without fast-math
 *
 *                                            runs, threads,  instruction      CPU and
 *                                            resume          sets             CUDA
 *     conversions, casts, copies             same            same             same
 *     random numbers, dropout                same            same             same
 *     + - * / relu sqrt scale, embedding     same            same             same
 *     unscale, clip, Adam, SGD, scaler       same            same             same; norm: 2^-22
 *     other elementwise, sums, softmax,
 *     norms, losses                          same            same             close
 *     products of f16 and bf16               same            same             close
 *     products with an f32 factor            same            all SIMD same    close
 *     attention                              same            all SIMD same    close
 *
 * The first row holds under any flags, rounding mode and FTZ/DAZ; + - * / are meant forward. In
 * the last two rows SIMD rounds a product and its sum once, plain C twice, where fmaf would be
 * a call: a product of two f16 or bf16 is exact, so both agree; one of f32 is not, and attention
 * multiplies v by probabilities in f32. The instructions of AVX512_BF16 (MIXP_ISA_AVX512_BF16),
 * which multiply bf16 by bf16, count a subnormal as 0: an element of a product in which a
 * subnormal input or sum is met, below 2^-126, may be another there than elsewhere, and never on
 * two machines with them. `close`: tests/test_cuda*.cpp have the bounds. A NaN is
 * a NaN everywhere; which one arithmetic makes is the processor's. MIXPREC_CBLAS: the BLAS's.
 *
 * DOES NOT: compile graphs, run Python, convolve, stride (tensors are row-major and dense),
 * train tokenizers, print, exit or abort. There is no double backward: a gradient is a constant
 * and no part of a loss, so an operator takes one under MIXP_NO_GRAD alone.
 */
#if !defined(MIXPI_PASS) && !defined(MIXPREC_H_INCLUDED)
#define MIXPREC_H_INCLUDED

#include <stddef.h>
#include <stdint.h>
#include <string.h>     /* memcpy: how to see a float's bits that all compilers keep */
#include <math.h>       /* fmaf, sqrtf: the arithmetic that must agree on every device */

#define MIXPREC_VERSION_MAJOR 0
#define MIXPREC_VERSION_MINOR 1
#define MIXPREC_VERSION_PATCH 0
#define MIXPREC_VERSION "0.1.0"

/* MIXPREC_STATIC makes the whole library private to one source file. */
#ifndef MIXPREC_API
#  if !defined(MIXPREC_STATIC)
#    define MIXPREC_API extern
#  elif defined(__GNUC__)
#    define MIXPREC_API static __attribute__((__unused__))
#  else
#    define MIXPREC_API static
#  endif
#endif

/* Arithmetic that host and device share: one definition, inlined on both sides. */
#if defined(__CUDACC__)
#  define MIXPREC_HD static __host__ __device__ __forceinline__
#elif defined(__GNUC__)
#  define MIXPREC_HD static __inline__ __attribute__((__unused__))
#else
#  define MIXPREC_HD static inline
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ==== 1. RESULTS ======================================================= >>results ====
 *
 * A call returns a mixp_result, or a pointer that is NULL on error. The first error stays
 * in its context, with a message that says what, where and what to do; later errors do not
 * replace it. An overflow of the gradients is a state of the step, never an error.
 */
#define MIXP_RESULTS(X)                                                                   \
    X(MIXP_OK,           "ok")                                                            \
    X(MIXP_ERR_ARGUMENT, "invalid argument")                                              \
    X(MIXP_ERR_SHAPE,    "shapes do not fit")                                             \
    X(MIXP_ERR_DTYPE,    "dtype not supported here")                                      \
    X(MIXP_ERR_MEMORY,   "out of memory")                                                 \
    X(MIXP_ERR_ORDER,    "calls in the wrong order")                                      \
    X(MIXP_ERR_BANNED,   "operator is unsafe in low precision")                           \
    X(MIXP_ERR_DIVERGED, "non-finite gradients that no loss scale can cure")              \
    X(MIXP_ERR_IO,       "file could not be read or written")                             \
    X(MIXP_ERR_FORMAT,   "file is malformed")                                             \
    X(MIXP_ERR_DEVICE,   "device failed")

#define MIXPI_RESULT_NAME(name, text) name,
typedef enum mixp_result { MIXP_RESULTS(MIXPI_RESULT_NAME) MIXP_RESULT_COUNT } mixp_result;
#undef MIXPI_RESULT_NAME

/* The text of a result: a constant string, "unknown result" for a value outside the enum. */
MIXPREC_API const char *mixp_result_text(mixp_result result);

/* The implementation's MIXPREC_VERSION: another in a stale object file. A constant string. */
MIXPREC_API const char *mixp_version(void);

/* ==== 2. FORMATS ======================================================= >>formats ====
 *
 * Everything here is integer arithmetic on bits: the same result under every rounding mode,
 * under FTZ/DAZ, under -Ofast, on host and device. No context, no allocation, no state;
 * safe from any thread. Arrays are converted by kernels: see mixp_convert.
 *
 * Rounding is to nearest, ties to even, once: f64 converts directly, never through f32.
 * Overflow gives Inf, or NaN in a format without Inf; the _sat functions give the largest
 * finite value instead, for Inf too. NaN stays NaN: quiet, with its sign and the top bits of
 * its payload where the format has room. Widening is exact; bf16 keeps all its bits.
 */
typedef struct mixp_f16  { uint16_t bits; } mixp_f16;    /* IEEE binary16: 1 + 5 + 10      */
typedef struct mixp_bf16 { uint16_t bits; } mixp_bf16;   /* bfloat16:      1 + 8 + 7       */
typedef struct mixp_e4m3 { uint8_t  bits; } mixp_e4m3;   /* OCP fp8 e4m3fn: 1 + 4 + 3      */
typedef struct mixp_e5m2 { uint8_t  bits; } mixp_e5m2;   /* OCP fp8 e5m2:  1 + 5 + 2       */

typedef enum mixp_format_kind {     /* what the largest codes mean                             */
    MIXP_SPECIAL_IEEE,          /* top exponent: Inf and NaNs                              */
    MIXP_SPECIAL_FN,            /* no Inf; all ones: NaN                                   */
    MIXP_SPECIAL_FNUZ,          /* no Inf, no -0; the code of -0: NaN                      */
    MIXP_SPECIAL_FINITE,        /* numbers only: overflow saturates, NaN becomes +max      */
    MIXP_SPECIAL_SCALE,         /* 2^(code-bias), no sign, no zero; FF, and any x < 0: NaN */
    MIXP_SPECIAL_INTEGER        /* truncates and saturates, NaN becomes 0                  */
} mixp_format_kind;

/* An element's type is a row: its constant and name, bytes an element, bits of exponent and
 * mantissa, bias, and what its largest codes mean. Those under one byte take one byte an
 * element, code in the low bits; u8 alone has no sign. */
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

/* sizeof one element; 0 for an unknown dtype. Its name, "f16"; "?" for an unknown one. */
MIXPREC_API size_t      mixp_dtype_size(mixp_dtype dtype);
MIXPREC_API const char *mixp_dtype_name(mixp_dtype dtype);

/* Largest finite, smallest normal and smallest subnormal number; from 1 to the next number. */
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

/* Keeps clang under fast-math from reasoning that what these bits come from cannot be a NaN. */
#if defined(__clang__) && !defined(__CUDA_ARCH__) && __FINITE_MATH_ONLY__
#  define MIXPI_HIDE(u) __asm__("" : "+r"(u))
#else
#  define MIXPI_HIDE(u) (void)0
#endif
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

/* Where an ABI returns floats in x87 registers (32-bit x86), a signalling NaN comes back quiet. */
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

/* An unknown dtype's is that of u8. */
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
/* Bits without the sign. */
MIXPREC_HD int mixpi_width(mixp_format f) { return f.exponent_bits + f.mantissa_bits; }

/* The largest finite code, without sign. */
MIXPREC_HD uint64_t mixpi_max_code(mixp_format f) {
    uint64_t all = mixpi_ones(mixpi_width(f));
    /* plant: max_code */
    if (f.special == MIXP_SPECIAL_IEEE) return all - ((uint64_t)1 << f.mantissa_bits);
    if (f.special == MIXP_SPECIAL_FN || f.special == MIXP_SPECIAL_SCALE) return all - 1u;
    return all;
}

/* A number taken apart: significand * 2^exponent, bit 62 of the significand set unless it is
 * 0. A NaN keeps its payload below that bit. */
typedef struct mixpi_number {
    uint64_t significand;
    int      exponent, negative, inf, nan;
} mixpi_number;

MIXPREC_HD mixpi_number mixpi_number_of(uint64_t significand, int exponent,
                                        int negative) {
    mixpi_number x = { 0, 0, 0, 0, 0 };
    int step;
    if (significand >> 63) {            /* only ever 2^63 */
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
    /* plant: unpack_subnormal */
    else e = 1;                         /* subnormals have the exponent of the smallest normal */
    x = mixpi_number_of(m, e - f.bias - f.mantissa_bits, (int)(code >> width) & 1);
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
    if (a > limit) a = limit;  /* plant: integer_limit */
    return x.negative ? 0u - a : a;
}

/* NaN, or what overflow gives. */
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

/* Does the part that is cut off, `rest` below bit `shift`, round the code up? `odd`: the code's
 * lowest bit, which decides ties. Stochastic: when a 31-bit random number lies below the rest. */
MIXPREC_HD int mixpi_rounds_up(uint64_t rest, int shift, int odd, int stochastic,
                               uint32_t random) {
    uint64_t half = (uint64_t)1 << (shift - 1);
    if (stochastic)
        /* plant: stochastic */
        return random >> 1 < (shift > 31 ? rest >> (shift - 31) : rest << (31 - shift));
    return rest > half || (rest == half && odd);  /* plant: pack_tie */
}

/* Rounds once, to nearest even, or at random. */
MIXPREC_HD uint64_t mixpi_pack(mixp_format f, mixpi_number x, int saturate,
                               int stochastic, uint32_t random) {
    /* The codes of a scale count from one up until its end: the smallest code is a number too. */
    int scale = f.special == MIXP_SPECIAL_SCALE;
    int e = x.exponent + 62 + f.bias + scale, shift = 62 - f.mantissa_bits;
    uint64_t code;
    if (f.special == MIXP_SPECIAL_INTEGER) return mixpi_pack_integer(f, x);
    if (x.nan || x.inf || (scale && x.negative && x.significand))
        return mixpi_pack_special(f, x, saturate);
    if (e < 1) {                        /* a subnormal */
        shift += 1 - e;
        e = 1;
    }
    if (shift > 63) {
        x.significand = shift < 126 ? x.significand >> (shift - 63) : 0;
        shift = 63;
    }
    code = ((uint64_t)(e - 1) << f.mantissa_bits) + (x.significand >> shift);
    if (!x.significand) code = 0;
    else code += (uint64_t)mixpi_rounds_up(x.significand & mixpi_ones(shift), shift,
                                           (int)(code & 1u) ^ scale, stochastic, random);
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

/* Any dtype's code (an integer's two's complement) from a double, and back. The stochastic
 * form takes a random number, uniform in [0, 2^32). i64 beyond 2^53 is rounded by decode. */
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
 * One shift cuts the significand to size, by 13 bits, or more where the result is subnormal;
 * a carry out of it moves the exponent on, up to Inf. */
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
/* Subnormals are whole numbers times the smallest one: an exact product. */
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

/* The stochastic forms round up when `random`, uniform in [0, 2^32), lies below what is cut off. */
MIXPREC_HD mixp_f16 mixp_f16_from_f32(float x)
{ return mixp_f16_of_bits(mixpi_f16_of_f32(mixp_bits_of_f32(x))); }
MIXPREC_HD mixp_f16 mixp_f16_from_f32_stochastic(float x, uint32_t random)
{ return mixp_f16_of_bits(mixpi_round_f32(MIXP_F16, mixp_bits_of_f32(x), 0, 1, random)); }
MIXPREC_HD mixp_f16 mixp_f16_from_f64(double x)
{ return mixp_f16_of_bits((uint32_t)mixp_encode(MIXP_F16, x, 0)); }
MIXPREC_HD float mixp_f32_from_f16(mixp_f16 h)
{ return mixp_f32_of_bits(mixpi_f32_of_f16(h.bits)); }

MIXPREC_HD mixp_bf16 mixp_bf16_from_f32(float x)
{ return mixp_bf16_of_bits(mixpi_bf16_of_f32(mixp_bits_of_f32(x))); }
MIXPREC_HD mixp_bf16 mixp_bf16_from_f32_stochastic(float x, uint32_t random) {
    return mixp_bf16_of_bits(
        mixpi_round_f32(MIXP_BF16, mixp_bits_of_f32(x), 0, 1, random));
}
MIXPREC_HD mixp_bf16 mixp_bf16_from_f64(double x)
{ return mixp_bf16_of_bits((uint32_t)mixp_encode(MIXP_BF16, x, 0)); }
MIXPREC_HD float mixp_f32_from_bf16(mixp_bf16 h)
{ return mixp_f32_of_bits((uint32_t)h.bits << 16); }

MIXPREC_HD mixp_e4m3 mixp_e4m3_from_f32(float x)
{ return mixp_e4m3_of_bits(mixpi_round_f32(MIXP_F8_E4M3, mixp_bits_of_f32(x), 0, 0, 0)); }
MIXPREC_HD mixp_e4m3 mixp_e4m3_from_f32_sat(float x)
{ return mixp_e4m3_of_bits(mixpi_round_f32(MIXP_F8_E4M3, mixp_bits_of_f32(x), 1, 0, 0)); }
MIXPREC_HD mixp_e4m3 mixp_e4m3_from_f32_stochastic(float x, uint32_t random) {
    return mixp_e4m3_of_bits(
        mixpi_round_f32(MIXP_F8_E4M3, mixp_bits_of_f32(x), 0, 1, random));
}
MIXPREC_HD mixp_e4m3 mixp_e4m3_from_f64(double x)
{ return mixp_e4m3_of_bits((uint32_t)mixp_encode(MIXP_F8_E4M3, x, 0)); }
MIXPREC_HD mixp_e4m3 mixp_e4m3_from_f64_sat(double x)
{ return mixp_e4m3_of_bits((uint32_t)mixp_encode(MIXP_F8_E4M3, x, 1)); }
MIXPREC_HD float mixp_f32_from_e4m3(mixp_e4m3 h)
{ return mixp_f32_of_bits(mixpi_f32_of_e4m3(h.bits)); }

MIXPREC_HD mixp_e5m2 mixp_e5m2_from_f32(float x)
{ return mixp_e5m2_of_bits(mixpi_round_f32(MIXP_F8_E5M2, mixp_bits_of_f32(x), 0, 0, 0)); }
MIXPREC_HD mixp_e5m2 mixp_e5m2_from_f32_sat(float x)
{ return mixp_e5m2_of_bits(mixpi_round_f32(MIXP_F8_E5M2, mixp_bits_of_f32(x), 1, 0, 0)); }
MIXPREC_HD mixp_e5m2 mixp_e5m2_from_f32_stochastic(float x, uint32_t random) {
    return mixp_e5m2_of_bits(
        mixpi_round_f32(MIXP_F8_E5M2, mixp_bits_of_f32(x), 0, 1, random));
}
MIXPREC_HD mixp_e5m2 mixp_e5m2_from_f64(double x)
{ return mixp_e5m2_of_bits((uint32_t)mixp_encode(MIXP_F8_E5M2, x, 0)); }
MIXPREC_HD mixp_e5m2 mixp_e5m2_from_f64_sat(double x)
{ return mixp_e5m2_of_bits((uint32_t)mixp_encode(MIXP_F8_E5M2, x, 1)); }
MIXPREC_HD float mixp_f32_from_e5m2(mixp_e5m2 h)
{ return mixp_f32_of_bits(mixpi_f32_of_f16((uint32_t)h.bits << 8)); }

MIXPREC_HD float mixp_f32_from_f64(double x)
{ return mixp_f32_of_bits((uint32_t)mixp_encode(MIXP_F32, x, 0)); }
MIXPREC_HD double mixp_f64_from_f32(float x) {
    return mixp_decode(MIXP_F32, mixp_bits_of_f32(x));
}

/* x rounded to the 10 mantissa bits of tf32, the low 13 bits of the result 0. */
MIXPREC_HD float mixp_tf32_round(float x) {
    uint32_t u = mixp_bits_of_f32(x), r = u + 0xFFFu + (u >> 13 & 1u);
    if ((u & 0x7FFFFFFFu) > 0x7F800000u) r = u | 0x400000u;
    return mixp_f32_of_bits(r & 0xFFFFE000u);
}

/* --- random numbers for stochastic rounding, dropout and initialisation ------------------ */

/* The random number of one element: uniform in [0, 2^32), a pure function of its key. The
 * first three are hashed into the start of a SplitMix64 sequence, of which it is one term. */
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

/* How values are narrowed. Zeroed: to nearest even, overflow to Inf, or NaN without an Inf. */
typedef struct mixp_rounding {
    int      saturate;          /* 1: finite overflow and Inf become the largest value     */
    int      stochastic;        /* 1: up with a probability equal to the part cut off, to
                                   within 2^-31                                            */
    uint64_t seed, step, tensor;/* with the element's index, the key of its random number  */
    int64_t  first;             /* index of the array's first element                      */
} mixp_rounding;

/* ==== 3. ARITHMETIC ================================================= >>arithmetic ====
 *
 * What the host and every device compute alike: how a loss scale moves, whether a step is applied,
 * the scalars of an update, one element of each optimizer. Pure functions over plain structs, each
 * rounding in its place. Users meet here the learning rate's schedule and the hyper-parameters of a
 * group; the rest is for authors of devices.
 */
#define MIXP_MAX_GROUPS 16

/* The learning rate as a function of the number of applied steps (skipped ones do not
 * count). Warm-up: lr * (step + 1) / (warmup + 1) while step < warmup (nanoGPT's). Then
 * constant, or linear or cosine from lr to lr * min_factor at step `total` and after. */
typedef enum mixp_schedule_kind {
    MIXP_SCHEDULE_CONSTANT, MIXP_SCHEDULE_LINEAR, MIXP_SCHEDULE_COSINE
} mixp_schedule_kind;
typedef struct mixp_schedule {
    mixp_schedule_kind kind;
    int64_t            warmup;      /* steps; 0 = none                                     */
    int64_t            total;       /* steps, warm-up included; unused when constant       */
    double             min_factor;  /* of lr, 0..1                                         */
} mixp_schedule;

typedef enum mixp_adam_order {
    MIXP_ADAM_ORDER_TORCH,           /* decay first; denominator sqrt(v)/sqrt(bc2) + eps        */
    MIXP_ADAM_ORDER_APEX             /* decay inside the update; denominator sqrt(v/bc2) + eps  */
} mixp_adam_order;

/* The hyper-parameters of one group; those that the optimizer's kind lacks are unused. */
typedef struct mixp_param_group {
    double lr, beta1, beta2, eps, weight_decay, momentum, dampening;
    int    nesterov;
} mixp_param_group;

/* --- for authors of devices: the loss scale ----------------------------------------------- */

/* When hysteresis_left is refilled. */
enum { MIXP_REFILL_CLEAN = 1, MIXP_REFILL_GROWTH = 2, MIXP_REFILL_BACKOFF = 4 };

/* A rule with every default resolved: what the device needs to advance the state. */
typedef struct mixp_scaler_rule {
    double  growth_factor, backoff_factor;         /* double: products round once, as PyTorch's */
    float   init_scale, min_scale, max_scale;
    int32_t growth_interval, hysteresis, refill;   /* refill: MIXP_REFILL_... flags        */
    int32_t recovery_interval;                     /* interval while scale <= recovery_scale */
    float   recovery_scale;
    int32_t fixed;                                 /* 1: static or disabled                */
    int32_t delay;      /* clean steps that do not count, at first and after an overflow   */
    int32_t divides;    /* 1: one factor: backoff divides by the growth factor             */
    int32_t f32_factors;/* 1: factors are rounded to f32                                   */
} mixp_scaler_rule;

/* Gradients may wait for their step while the scale goes on: so many scales are remembered. */
#define MIXP_PAST_SCALES 16

/* The state of a scaler, in device memory. Checkpoints hold all but found_inf and past. */
typedef struct mixp_scaler_state {
    float   scale;
    int32_t growth_tracker;     /* clean steps since the last change                       */
    int32_t hysteresis_left;    /* overflows that may still pass without a backoff, and one */
    int32_t found_inf;          /* since the last update: set by the optimizers' steps     */
    int32_t floor_skips;        /* skips in a row while the scale could not go lower       */
    int64_t updates, skips;     /* how many, in all                                        */
    float   past[MIXP_PAST_SCALES]; /* the scales before this one, newest first            */
} mixp_scaler_state;

/* After an overflow: spend hysteresis, then back off, never below the floor. */
MIXPREC_HD void mixpi_scaler_overflow(mixp_scaler_state *s, const mixp_scaler_rule *r) {
    float lower;
    s->skips++;
    s->growth_tracker = 0;
    if (!r->fixed && s->scale > r->min_scale) s->floor_skips = 0;
    else if (s->floor_skips < INT32_MAX) s->floor_skips++;
    if (r->fixed) return;
    if (s->hysteresis_left > r->hysteresis) s->hysteresis_left = r->hysteresis;
    if (s->hysteresis_left > 0) s->hysteresis_left--;  /* plant: scaler_hysteresis */
    if (s->hysteresis_left > 0) return;
    lower = r->divides ? (float)((double)s->scale / r->growth_factor)
                       : (float)((double)s->scale * r->backoff_factor);
    s->scale = lower < r->min_scale ? r->min_scale : lower;  /* plant: scaler_floor */
    if (r->refill & MIXP_REFILL_BACKOFF) s->hysteresis_left = r->hysteresis;
}

/* After a clean step. The comparison is >=, not PyTorch's ==: lowering the interval below
 * the tracker must not stop growth for good. */
MIXPREC_HD void mixpi_scaler_clean(mixp_scaler_state *s, const mixp_scaler_rule *r) {
    int32_t interval =
        s->scale <= r->recovery_scale ? r->recovery_interval : r->growth_interval;
    double  higher = (double)s->scale * r->growth_factor;
    s->floor_skips = 0;
    if (r->fixed) return;
    if (r->refill & MIXP_REFILL_CLEAN) s->hysteresis_left = r->hysteresis;
    if (s->growth_tracker < interval - 1 + r->delay) {
        s->growth_tracker++;
        return;
    }
    s->growth_tracker = r->delay;  /* plant: scaler_delay */
    if (r->refill & MIXP_REFILL_GROWTH) s->hysteresis_left = r->hysteresis;
    /* plant: scaler_ceiling */
    if (higher > (double)r->max_scale) higher = (double)r->max_scale;
    /* Past 2^126 the reciprocal is subnormal, and some devices flush that to 0. */
    if ((float)higher <= 8.50705917e37f) s->scale = (float)higher;
}

/* The scale in force is about to become a past one. */
MIXPREC_HD void mixpi_scaler_remember(mixp_scaler_state *s) {
    int i;
    for (i = MIXP_PAST_SCALES - 1; i > 0; i--) s->past[i] = s->past[i - 1];
    s->past[0] = s->scale;  /* plant: scaler_past */
}

/* The scale of `age` scales ago: 0 is the one in force. */
MIXPREC_HD float mixp_scaler_scale_at(const mixp_scaler_state *s, int age)
{ return age > 0 ? s->past[age - 1] : s->scale; }

/* Advances the state by one update. The whole arithmetic of a scaler, on every device. */
MIXPREC_HD void mixp_scaler_advance(mixp_scaler_state *s, const mixp_scaler_rule *r,
                                    int found_inf) {
    s->updates++;
    s->found_inf = 0;
    if (!r->fixed) mixpi_scaler_remember(s);
    if (found_inf) mixpi_scaler_overflow(s, r);
    else           mixpi_scaler_clean(s, r);
}

/* What gradients are multiplied by to undo the scale: PyTorch's rounding. */
MIXPREC_HD float mixp_scaler_inverse(float scale) { return (float)(1.0 / (double)scale); }

/* --- a step ----------------------------------------------------------------------------- */

/* What one look at all gradients found. */
typedef struct mixp_grad_stats {
    double  norm;               /* square root of the sum of squares                       */
    float   largest;            /* largest finite magnitude                                */
    int32_t found_inf;          /* 1: some gradient is Inf or NaN                          */
    int64_t bad_row, bad_element;   /* the first such: row of the table, -1 = none         */
    int32_t bad_is_nan;
} mixp_grad_stats;

typedef enum mixp_optimizer_kind {
    MIXP_OPTIMIZER_ADAM,
    MIXP_OPTIMIZER_ADAMW,
    MIXP_OPTIMIZER_SGD
} mixp_optimizer_kind;

/* What the host prescribes for one step. */
typedef struct mixp_step_plan {
    mixp_optimizer_kind     kind;
    mixp_adam_order    order;
    int32_t       check;        /* 1: skip the step when a gradient is non-finite          */
    int32_t       unscaled;     /* 1: the gradients are true ones already                  */
    int32_t       age;          /* else: how many scales ago they were multiplied          */
    int32_t       noted;        /* 1: what unscale found counts too                        */
    int32_t       gathered;     /* 1: the statistics are of this step                      */
    int32_t       look_only;    /* 1: note what unscale found, decide nothing              */
    double        max_norm;
    mixp_schedule schedule;
    mixp_param_group    groups[MIXP_MAX_GROUPS];
    int32_t       n_groups;
} mixp_step_plan;

/* The scalars of one update, in the precision of its arithmetic. SGD: beta1 is the momentum,
 * rest1 is 1 - dampening. */
typedef struct mixp_step_scalars {
    mixp_adam_order order;
    int32_t    nesterov;
    float factor;               /* of the gradient: 1/scale and the clip coefficient       */
    float l2;                   /* weight decay that joins the gradient                    */
    float decay;                /* decoupled: lr * weight_decay; apex: weight_decay        */
    float beta1, rest1, beta2, rest2, momentum, eps;
    float rate;                 /* torch: lr / bc1; apex and SGD: lr                       */
    float scale_m, scale_v;     /* torch: 1 and 1/sqrt(bc2); apex: 1/bc1 and 1/bc2         */
} mixp_step_scalars;

/* An optimizer's state of steps, in device memory. */
typedef struct mixp_step_state {
    mixp_grad_stats stats;      /* of the newest look; of the verdict after a step         */
    mixp_grad_stats at_unscale; /* what mixp_scaler_unscale found                          */
    float   clipped;            /* what gradients were multiplied by since the newest look */
    float   clip;               /* the whole coefficient of the newest step                */
    float   scale;              /* that it used                                            */
    int32_t skip;
    int32_t stopped;            /* 1: an index was out of range, and nobody was told yet   */
    double  lr, factor;         /* of group 0; what the update multiplies gradients by     */
    int64_t steps, applied, skipped;
    mixp_step_scalars update[MIXP_MAX_GROUPS];
} mixp_step_state;

/* cos(pi x) for x in [0, 1], by its series: the same bits on every device, as libm's are not. */
MIXPREC_HD double mixpi_cospi(double x) {
    double t = 3.14159265358979323846 * (x < 0.5 ? x : 1.0 - x), c = 1.0;
    int k;
    for (k = 20; k > 0; k -= 2) c = fma(-t * t / (double)(k * (k - 1)), c, 1.0);
    return x < 0.5 ? c : -c;
}

/* The learning rate after `applied` steps. */
MIXPREC_HD double mixp_schedule_lr(const mixp_schedule *s, double lr, int64_t applied) {
    double done, shape;
    if (applied < s->warmup)
        return lr * ((double)applied + 1.0) / ((double)s->warmup + 1.0);
    if (s->kind == MIXP_SCHEDULE_CONSTANT) return lr;
    if (applied >= s->total) return lr * s->min_factor;
    done = (double)(applied - s->warmup) / (double)(s->total - s->warmup);
    shape =
        s->kind == MIXP_SCHEDULE_LINEAR ? 1.0 - done : 0.5 * (1.0 + mixpi_cospi(done));
    return lr * fma(shape, 1.0 - s->min_factor, s->min_factor);
}

/* The scalars of SGD's update. The first momentum buffer is the gradient itself, without
 * dampening. */
MIXPREC_HD void mixpi_update_sgd(const mixp_param_group *g, double lr, int64_t t,
                                 mixp_step_scalars *u) {
    u->beta1 = (float)(t == 1 ? 0.0 : g->momentum);
    u->rest1 = (float)(t == 1 ? 1.0 : 1.0 - g->dampening);
    u->rate = (float)lr;
    u->scale_m = 1.0f;
    u->scale_v = 1.0f;
}

/* Adam's, with the bias corrections of step t. torch divides the rate by bc1 and sqrt(v) by
 * sqrt(bc2); apex divides m and v themselves. */
MIXPREC_HD void mixpi_update_adam(const mixp_param_group *g, double lr, int64_t t,
                                  mixp_step_scalars *u) {
    double n = (double)(t > 1 ? t : 1);
    double bc1 = 1.0 - pow(g->beta1, n), bc2 = 1.0 - pow(g->beta2, n);
    u->beta1 = (float)g->beta1;
    u->rest1 = (float)(1.0 - g->beta1);
    if (u->order == MIXP_ADAM_ORDER_APEX) {
        u->rate = (float)lr;
        u->scale_m = (float)(1.0 / bc1);
        u->scale_v = (float)(1.0 / bc2);
    } else {
        u->rate = (float)(lr / bc1);
        u->scale_m = 1.0f;
        u->scale_v = (float)(1.0 / sqrt(bc2));
    }
}

/* Weight decay: AdamW's is decoupled, that of the others joins the gradient. */
MIXPREC_HD void mixpi_update_decay(mixp_optimizer_kind kind, const mixp_param_group *g,
                                   double lr, mixp_step_scalars *u) {
    int decoupled = kind == MIXP_OPTIMIZER_ADAMW, apex = u->order == MIXP_ADAM_ORDER_APEX;
    u->l2 = decoupled ? 0.0f : (float)g->weight_decay;
    u->decay = !decoupled ? 0.0f : (float)(apex ? g->weight_decay : lr * g->weight_decay);
}

/* The scalars of group's update for a parameter whose t-th step this is. */
MIXPREC_HD void mixp_step_scalars_of(const mixp_step_plan *plan,
                                     const mixp_step_state *state, int group, int64_t t,
                                     mixp_step_scalars *u) {
    const mixp_param_group *g = &plan->groups[group];
    double lr = mixp_schedule_lr(&plan->schedule, g->lr, state->applied - 1);
    u->order = plan->order;
    u->nesterov = g->nesterov;
    u->factor = (float)state->factor;
    u->momentum = (float)g->momentum;
    u->beta2 = (float)g->beta2;
    u->rest2 = (float)(1.0 - g->beta2);
    u->eps = (float)g->eps;
    mixpi_update_decay(plan->kind, g, lr, u);
    if (plan->kind == MIXP_OPTIMIZER_SGD) mixpi_update_sgd(g, lr, t, u);
    else mixpi_update_adam(g, lr, t, u);
}

/* min(1, max_norm / (norm + 1e-6)): PyTorch's. A NaN norm gives 1. */
MIXPREC_HD double mixp_clip_coefficient(double norm, double max_norm) {
    double c = max_norm / (norm + 1e-6);
    return c < 1.0 ? c : 1.0;
}

/* Which statistics count: those of this look, or what unscale found before it. */
MIXPREC_HD void mixpi_step_look(const mixp_step_plan *plan, mixp_step_state *s) {
    if (!plan->gathered) {
        memset(&s->stats, 0, sizeof s->stats);
        s->stats.norm = (double)mixp_f32_of_bits(0x7FC00000u);
    }
    if (plan->look_only) s->at_unscale = s->stats;
    else if (plan->noted && plan->check && s->at_unscale.found_inf)
        s->stats = s->at_unscale;
}

/* What the update multiplies gradients by: the scale's inverse, and the clip coefficient. */
MIXPREC_HD void mixpi_step_factor(const mixp_step_plan *plan, mixp_step_state *s,
                                  const mixp_scaler_state *scaler) {
    double clip = 1.0, norm;
#if defined(__CUDA_ARCH__)
    norm = __dmul_rn(s->stats.norm, (double)s->clipped);    /* not joined with the sum after it */
#else
    norm = s->stats.norm * (double)s->clipped;
#endif
    if (plan->gathered && plan->max_norm > 0.0)
        clip = mixp_clip_coefficient(norm, plan->max_norm);
    s->scale = scaler ? mixp_scaler_scale_at(scaler, plan->age) : 1.0f;
    s->factor = clip;
    if (scaler && !plan->unscaled)
        s->factor = clip * (double)mixp_scaler_inverse(s->scale);
    s->clip = (float)(clip * (plan->gathered ? (double)s->clipped : 1.0));
}

/* Everything scalar in one step but the groups' updates; 1: they are due. */
MIXPREC_HD int mixpi_step_decide(const mixp_step_plan *plan, mixp_step_state *s,
                                 mixp_scaler_state *scaler) {
    int bad;
    mixpi_step_look(plan, s);
    bad = s->stats.found_inf != 0;
    if (scaler && bad && !s->stopped) scaler->found_inf = 1;
    if (plan->look_only) return 0;
    mixpi_step_factor(plan, s, scaler);
    s->skip = s->stopped || (plan->check && bad);
    s->lr = mixp_schedule_lr(&plan->schedule, plan->groups[0].lr, s->applied);
    s->steps++;
    if (s->skip) s->skipped++;
    else s->applied++;
    return !s->skip;
}

/* Everything scalar in one step: pure, the same on every device. */
MIXPREC_HD void mixp_step_prepare(const mixp_step_plan *plan, mixp_step_state *s,
                                  mixp_scaler_state *scaler) {
    int g, n = mixpi_step_decide(plan, s, scaler) ? plan->n_groups : 0;
    for (g = 0; g < n; g++) mixp_step_scalars_of(plan, s, g, s->applied, &s->update[g]);
}

/* One element of Adam or AdamW, every rounding in its place: p the master weight, m and v the
 * moments, grad as stored. */
MIXPREC_HD void mixp_adam_element(const mixp_step_scalars *u, float grad, float *p,
                                  float *m, float *v) {
    float g = fmaf(u->l2, *p, grad * u->factor), ratio;
    *m = fmaf(u->beta1, *m, u->rest1 * g);
    *v = fmaf(u->beta2, *v, (u->rest2 * g) * g);
    if (u->order == MIXP_ADAM_ORDER_APEX) {
        ratio = (*m * u->scale_m) / (sqrtf(*v * u->scale_v) + u->eps);
        *p = fmaf(-u->rate, fmaf(u->decay, *p, ratio), *p);
    } else {
        *p = fmaf(-u->decay, *p, *p);
        *p = fmaf(-u->rate, *m / fmaf(sqrtf(*v), u->scale_v, u->eps), *p);
    }
}

/* One element of SGD; m NULL without momentum. */
MIXPREC_HD void mixp_sgd_element(const mixp_step_scalars *u, float grad, float *p,
                                 float *m) {
    float g = fmaf(u->l2, *p, grad * u->factor);
    if (m) {
        *m = fmaf(u->beta1, *m, u->rest1 * g);
        g = u->nesterov ? fmaf(u->momentum, *m, g) : *m;
    }
    *p = fmaf(-u->rate, g, *p);
}

/* ==== 4. KERNELS ======================================================= >>kernels ====
 *
 * A device is a table of kernels and memory functions: the CPU's tables are here, a GPU's is in
 * mixprec_cuda.cu. Arrays are converted here, because every table has a kernel for that.
 */
#define MIXP_MAX_RANK 8         /* axes of an array                                        */

typedef struct mixp_device mixp_device;

/* Where memory comes from. */
typedef struct mixp_allocator {
    void *(*allocate)(size_t bytes, void *user);    /* NULL = out of memory                */
    void  (*release)(void *p, void *user);          /* both or neither                     */
    void   *user;
} mixp_allocator;

typedef enum mixp_isa {
    MIXP_ISA_SCALAR, MIXP_ISA_AVX2, MIXP_ISA_AVX512,
    MIXP_ISA_AVX512_BF16,       /* AVX512, but for the products of bf16 by bf16 in gemm and
                                   attention: twice as quick on Zen 4 and 5, where it is the
                                   default; half as quick on Intel's, where it is not         */
    MIXP_ISA_NEON, MIXP_ISA_COUNT
} mixp_isa;

/* The CPU with the best instruction set this machine has. A constant; never NULL. */
MIXPREC_API const mixp_device *mixp_cpu(void);

/* The CPU held to one instruction set: NULL when this machine or build lacks it. All of
 * them give the same bits wherever this file promises bits. */
MIXPREC_API const mixp_device *mixp_cpu_with(mixp_isa isa);

/* n elements of any dtype to any other, with this machine's best instruction set, in the
 * calling thread. Integers convert exactly or saturate; a fraction is cut off, as in C.
 * dst may be src when its elements are not wider; they must not overlap otherwise. No
 * alignment is asked for. MIXP_ERR_ARGUMENT: NULL with n > 0, n < 0, an overlap;
 * MIXP_ERR_DTYPE: an unknown dtype. Nothing is written then. */
MIXPREC_API mixp_result mixp_convert(void *dst, mixp_dtype to, const void *src,
                                     mixp_dtype from, int64_t n);

/* The same with a choice of rounding; NULL = as above. */
MIXPREC_API mixp_result mixp_convert_rounded(void *dst, mixp_dtype to, const void *src,
    mixp_dtype from, int64_t n, const mixp_rounding *rounding);

/* The same on a device of mixp_cpu_with: every one gives the same bits. NULL = the best. */
MIXPREC_API mixp_result mixp_convert_with(const mixp_device *cpu, void *dst,
                                          mixp_dtype to, const void *src, mixp_dtype from,
                                          int64_t n, const mixp_rounding *rounding);

/* Does this build, in this thread's floating-point environment, compute as this file promises?
 * Compares conversions on every instruction set, a loss scale's path and one update with stored
 * numbers, in well under a millisecond; changes nothing. MIXP_ERR_DEVICE: one line in message
 * (`size` bytes, cut when longer; NULL with 0: none) says which promise is void, and what to do:
 * fast-math, arithmetic in a wider type, another rounding mode, FTZ or DAZ, wrong results. */
MIXPREC_API mixp_result mixp_self_check(char *message, size_t size);

/* The GPU `ordinal` (0 = the first), for mixp_context_desc: link with mixprec_cuda.cu. NULL when
 * it cannot be used, and then *why (if given) says why: a constant string. */
extern const mixp_device *mixp_cuda(int ordinal, const char **why);

/* --- for authors of devices and operators: users go on to section 5 ---------------------- *
 *
 * A device is a table of kernels and memory functions. Kernels see pointers, dtypes and
 * sizes, and know nothing of tensors, tapes or scalers. A third device (a test double, an
 * accelerator of yours) is one more table.
 *
 * Rules every table keeps. Arrays are row-major and dense unless strides are given. Any
 * array may be f32, f16 or bf16 where the comment says `real`; kernels widen as they load,
 * compute in f32 and round once as they store. `accumulate` 1 adds to what the output
 * holds, 0 overwrites it (the old content may be garbage, NaN included). Outputs alias
 * inputs only where said. Same inputs give the same bits at any number of threads.
 */
/* What a kernel reads, and what it writes: each kernel takes one struct of these, which is its
 * contract. data NULL: not there, where the struct's comment allows that. */
typedef struct mixp_in  { const void *data; mixp_dtype dtype; } mixp_in;
typedef struct mixp_out { void *data; mixp_dtype dtype; int accumulate; } mixp_out;

MIXPREC_HD mixp_in mixpi_in(const void *data, mixp_dtype dtype)
{ mixp_in a = { data, dtype }; return a; }
MIXPREC_HD mixp_out mixpi_out_to(void *data, mixp_dtype dtype, int accumulate)
{ mixp_out a = { data, dtype, accumulate }; return a; }

/* One piece of a parallel loop: index in [0, tasks), worker in [0, threads). */
typedef void (*mixp_task)(void *arg, int64_t index, int worker);

/* Where a kernel runs. The context fills it; kernels only read it. */
typedef struct mixp_exec {
    int    threads;             /* workers that `parallel` may use at once                 */
    void  *stream;              /* the device's queue; NULL on the CPU                     */
    void  *state;               /* the device's own, made by its `attach`                  */
    void  *user;                /* of the two hooks below                                  */
    /* Runs task(arg, i, worker) for every i in [0, tasks), in any order, and returns when
     * all are done. NULL = one after another. */
    void (*parallel)(void *user, int64_t tasks, mixp_task task, void *arg);
    /* Device memory for this kernel alone, until the next kernel starts; 64-byte aligned;
     * NULL = out of memory. At most one such request in a kernel. */
    void *(*scratch)(void *user, size_t bytes);
    mixp_allocator host, device;    /* the context's; unset = malloc, the device's own     */
} mixp_exec;

typedef enum mixp_unary {
    MIXP_UNARY_RELU, MIXP_UNARY_GELU_TANH, MIXP_UNARY_GELU_ERF, MIXP_UNARY_SILU,
    MIXP_UNARY_TANH, MIXP_UNARY_SIGMOID, MIXP_UNARY_EXP, MIXP_UNARY_LOG, MIXP_UNARY_SQRT,
    MIXP_UNARY_POW,             /* x to the power p                                        */
    MIXP_UNARY_SCALE,           /* x times p                                               */
    MIXP_UNARY_RELU_SQUARED, MIXP_UNARY_ABS, MIXP_UNARY_SIN, MIXP_UNARY_COS,
    MIXP_UNARY_SOFT_CAP,        /* p tanh(x / p)                                           */
    MIXP_UNARY_CLAMP,           /* x, but at least p and at most q                         */
    MIXP_UNARY_COUNT
} mixp_unary;

typedef enum mixp_binary {
    MIXP_BINARY_ADD, MIXP_BINARY_SUB, MIXP_BINARY_MUL, MIXP_BINARY_DIV,
    MIXP_BINARY_MAXIMUM, MIXP_BINARY_MINIMUM,   /* NaN where either is; equal operands share
                                                   the gradient, half to each              */
    MIXP_BINARY_SWIGLU,         /* silu(a) b                                               */
    MIXP_BINARY_COUNT
} mixp_binary;

/* Is the slope of op told by its result? Those of the others are told by what it was given, but
 * for SCALE, whose slope is p. */
MIXPREC_HD int mixpi_unary_by_result(mixp_unary op) {
    return op == MIXP_UNARY_TANH || op == MIXP_UNARY_SIGMOID || op == MIXP_UNARY_EXP ||
           op == MIXP_UNARY_SQRT;
}

typedef enum mixp_loss_kind {
    MIXP_LOSS_MSE,              /* (x - t)^2                                               */
    MIXP_LOSS_BCE_LOGITS,       /* max(x,0) - x t + log(1 + exp(-|x|))                     */
    MIXP_LOSS_BCE,              /* -t log x - (1-t) log(1-x), logs clamped at -100         */
    MIXP_LOSS_L1,               /* |x - t|, of slope 0 at 0                                */
    MIXP_LOSS_HUBER,            /* d^2 / 2 where d = |x - t| < delta, else delta (d - delta/2) */
    MIXP_LOSS_SMOOTH_L1,        /* d^2 / (2 delta) there, else d - delta/2                 */
    MIXP_LOSS_KL,               /* t (log t - x), 0 at t = 0: x are log-probabilities      */
    MIXP_LOSS_KL_LOG,           /* e^t (t - x): the target's are, too                      */
    MIXP_LOSS_COUNT
} mixp_loss_kind;

/* Constants of these functions, on every device. gelu in its tanh form is x sigmoid(2u) with
 * 2u = x (GELU_LINEAR + GELU_CUBIC x^2), that is 2 sqrt(2/pi) (x + 0.044715 x^3), and
 * (2u)' = GELU_LINEAR + GELU_SLOPE x^2. Beyond these bounds gelu and silu are flat or x itself,
 * and their slopes are taken at the bound: Inf gives no NaN there. */
#define MIXPI_GELU_LINEAR   1.59576912f
#define MIXPI_GELU_CUBIC    0.0713548163f
#define MIXPI_GELU_SLOPE    0.214064449f
#define MIXPI_GELU_BOUND    20.0f       /* of its tanh form                                */
#define MIXPI_ERF_BOUND     14.5f       /* of its erf form                                 */
#define MIXPI_SILU_BOUND    200.0f      /* e^-200 is 0 already                             */
#define MIXPI_DENSITY       0.398942280f    /* of the normal distribution at 0: 1/sqrt(2pi)*/
#define MIXPI_BCE_LOG_LEAST (-100.0f)   /* logs of probabilities are no smaller            */
#define MIXPI_BCE_LEAST     1e-12f      /* nor is p (1-p), by which the slope is divided   */

/* 2^-40: where no gradient of a few is larger, sums of squares in f32 lose what is small. */
#define MIXPI_SQUARES_LOST  9.0949470e-13f

/* --- over rows: softmax, norms, embedding, cross entropy; losses ---
 *
 * (+)=: as the output's `accumulate` says. Where a plain = stands, accumulate is refused:
 * MIXP_ERR_ARGUMENT. */

/* y = softmax (or its log) of each row of a[rows, cols]. A row of -Inf alone gives NaN, as in
 * PyTorch. y may be a. */
typedef struct mixp_softmax_args {
    int64_t  rows, cols;
    int      log_of;
    mixp_in  a;
    mixp_out y;
} mixp_softmax_args;

/* da (+)= y (dy - sum(dy y)), y as forward left it; of the log: dy - e^y sum(dy). */
typedef struct mixp_softmax_backward_args {
    int64_t  rows, cols;
    int      log_of;
    mixp_in  dy, y;
    mixp_out da;
} mixp_softmax_backward_args;

/* y = (a - mean) * rstd * gamma + beta for each row of a[rows, cols]. Variance is biased
 * (divides by cols). */
typedef struct mixp_norm_args {
    int64_t  rows, cols;
    int      rms;               /* 1: mean is 0, and neither beta nor `mean` is looked at  */
    float    eps;
    mixp_in  a;
    mixp_in  gamma, beta;       /* cols values each; not there = 1 and 0                   */
    mixp_out y;
    float   *mean, *rstd;       /* rows values each, written for the backward pass         */
} mixp_norm_args;

/* With h = (a - mean) * rstd and d = dy * gamma: da (+)= rstd * (d - mean(d) - h * mean(d h)),
 * without mean(d) when rms; dgamma (+)= the sum over rows of dy h, dbeta (+)= that of dy. */
typedef struct mixp_norm_backward_args {
    int64_t      rows, cols;
    int          rms;
    mixp_in      dy, a, gamma;
    const float *mean, *rstd;
    mixp_out     da, dgamma, dbeta;     /* any of them may be not there: not wanted        */
} mixp_norm_backward_args;

/* y[i] = table[ids[i]] for rows ids in device memory; table[vocab, cols].
 *
 * Indices, here and in cross entropy: one that is outside its range is MIXP_ERR_ARGUMENT before
 * anything is written. A device that runs a kernel after its call has returned cannot know by
 * then: it writes NaN to what the index is for, applies no step until it has told, and tells in
 * the next call that waits or peeks, so with the verdict of the next step at the latest. */
typedef struct mixp_embedding_args {
    int64_t        rows, cols, vocab;
    const int32_t *ids;
    mixp_in        table;
    mixp_out       y;
} mixp_embedding_args;

/* dtable[ids[i]] += dy[i] in increasing i, rounded once; without accumulate rows that no id names
 * become 0. On a device that cannot know in time, an id outside adds to no row. */
typedef struct mixp_embedding_backward_args {
    int64_t        rows, cols, vocab;
    const int32_t *ids;
    mixp_in        dy;
    mixp_out       dtable;
} mixp_embedding_backward_args;

/* loss[0] = mean over the counted rows of lse(row) - row[target]; rows whose target is `ignore`
 * do not count (no counted row: NaN, as in PyTorch). A target is in [0, cols), or `ignore`. With
 * smoothing the target keeps 1 - smoothing, and all columns share the rest: lse(row) -
 * (1 - smoothing) row[target] - smoothing mean(row). */
typedef struct mixp_cross_entropy_args {
    int64_t        rows, cols;
    int32_t        ignore;
    float          smoothing;   /* in [0, 1]                                               */
    const int32_t *targets;
    mixp_in        logits;
    float         *loss;
    float         *lse;         /* rows values, and                                        */
    float         *counted;     /* how many rows count: both for the backward pass         */
} mixp_cross_entropy_args;

/* dlogits (+)= dloss[0] / counted[0] * (softmax(row) - (1 - smoothing) onehot - smoothing / cols),
 * zeros for a row that does not count; dlogits may be logits. */
typedef struct mixp_cross_entropy_backward_args {
    int64_t        rows, cols;
    int32_t        ignore;
    float          smoothing;
    const int32_t *targets;
    mixp_in        dloss, logits;
    const float   *lse, *counted;
    mixp_out       dlogits;
} mixp_cross_entropy_backward_args;

/* y[0] = the sum over n of the loss of a against target, over `over`. */
typedef struct mixp_loss_args {
    mixp_loss_kind kind;
    int64_t   n, over;          /* over 0 = n: the mean                                    */
    float     delta;            /* of HUBER and SMOOTH_L1: above 0                         */
    mixp_in   a, target;
    float    *y;
} mixp_loss_args;

/* da (+)= dloss[0] / over * d loss / d a. */
typedef struct mixp_loss_backward_args {
    mixp_loss_kind kind;
    int64_t   n, over;
    float     delta;
    mixp_in   dloss, a, target;
    mixp_out  da;
} mixp_loss_backward_args;

/* --- products ---
 *
 * c[m,n] (+)= alpha * op(a) op(b) + bias, summed in f32 and rounded once.
 * op(a) is m x k: stored k x m when trans_a. op(b) is k x n: stored n x k when trans_b.
 * ld* count elements between rows as stored. bias: n values added to each row, or data NULL.
 * batch matrices lie stride_* elements apart; stride_a and stride_b 0: all read the same one.
 * a, b, c, bias: real. k may be 0. */
typedef struct mixp_gemm_args {
    int64_t  m, n, k, batch;
    int      trans_a, trans_b;
    float    alpha;
    mixp_in  a, b, bias;
    mixp_out c;
    int64_t  lda, ldb, ldc;
    int64_t  stride_a, stride_b, stride_c;
} mixp_gemm_args;

/* Multi-head attention over qkv[b, t, 3, heads, d]: y[b, t, heads, d] (+)=
 * softmax(scale * q k' (, causal)) v. lse[b, heads, t] f32: log-sum-exp of each row, written
 * for the backward pass. No t x t array is ever stored. */
typedef struct mixp_attention_args {
    int64_t  b, t, heads, d;
    int      causal;
    float    scale;
    mixp_in  qkv;
    mixp_out y;
    float   *lse;
} mixp_attention_args;

/* dqkv (+)= the gradient of qkv, from dy, from the forward's y and from its lse. */
typedef struct mixp_attention_backward_args {
    int64_t      b, t, heads, d;
    int          causal;
    float        scale;
    mixp_in      qkv, y, dy;
    const float *lse;
    mixp_out     dqkv;
} mixp_attention_backward_args;

/* --- what kernels are given --------------------------------------------------------------- */

/* dst = src, n elements of any dtype to any dtype; integers convert exactly or saturate. dst may
 * be src when its elements are not wider. It cannot accumulate: MIXP_ERR_ARGUMENT. */
typedef struct mixp_convert_args {
    int64_t       n;
    mixp_in       src;
    mixp_out      dst;
    mixp_rounding rounding;     /* zeroed: to nearest even                                 */
} mixp_convert_args;

/* n elements of dst, of any dtype, become value. It cannot accumulate: MIXP_ERR_ARGUMENT. */
typedef struct mixp_fill_args {
    int64_t  n;
    double   value;
    mixp_out dst;
} mixp_fill_args;

/* dst[i . dst_strides] (+)= src[i . src_strides] over every index i of shape (rank 0..8). The
 * same dtype without accumulate: a copy of bits, of any dtype; else both are real. */
typedef struct mixp_copy_args {
    int      rank;
    int64_t  shape[MIXP_MAX_RANK];
    mixp_in  src;
    int64_t  src_strides[MIXP_MAX_RANK];
    mixp_out dst;
    int64_t  dst_strides[MIXP_MAX_RANK];
} mixp_copy_args;

/* y (+)= op(a), n elements. y may be a. real. */
typedef struct mixp_unary_args {
    mixp_unary op;
    float      p, q;            /* p: of POW, SCALE, SOFT_CAP; both: of CLAMP              */
    int64_t    n;
    mixp_in    a;
    mixp_out   y;
} mixp_unary_args;

/* da (+)= dy * op'(a), n elements. y: the forward's result. da may be dy. The slopes of exp, tanh,
 * sigmoid and sqrt are told by y alone, the others by a alone: the unused one may be missing. */
typedef struct mixp_unary_backward_args {
    mixp_unary op;
    float      p, q;
    int64_t    n;
    mixp_in    dy, a, y;
    mixp_out   da;
} mixp_unary_backward_args;

/* binary: y (+)= a op b over shape (rank 0..8), y dense; a stride of 0 repeats an element. y may be
 * a or b where that operand is dense. real.
 * binary_backward: dx (+)= the gradient of operand `which`, summed over the axes that this was
 * repeated along: dx is dense in the operand's own shape, addressed by that operand's strides. */
typedef struct mixp_binary_args {
    mixp_binary op;
    int         rank;
    int64_t     shape[MIXP_MAX_RANK];
    mixp_in     a, b;
    int64_t     a_strides[MIXP_MAX_RANK], b_strides[MIXP_MAX_RANK];
    mixp_out    y;              /* of binary                                               */
    int         which;          /* of binary_backward: 0 = a, 1 = b                        */
    mixp_in     dy;
    mixp_out    dx;
} mixp_binary_args;

/* Which arrays the gradient of an operand is a function of, in order: a, b, and d for dy. That of
 * the smaller of two is that of the larger with its operands exchanged; silu(a) b changes with b
 * by silu(a) dy. */
MIXPREC_HD const char *mixpi_binary_slope_of(const mixp_binary_args *k) {
    switch (k->op) {
    case MIXP_BINARY_ADD:
    case MIXP_BINARY_SUB: return "d";
    case MIXP_BINARY_MUL: return k->which ? "da" : "db";
    case MIXP_BINARY_DIV: return k->which ? "dab" : "db";
    case MIXP_BINARY_MAXIMUM: return k->which ? "dba" : "dab";
    case MIXP_BINARY_MINIMUM: return k->which ? "dab" : "dba";
    case MIXP_BINARY_SWIGLU: return k->which ? "ad" : "dab";
    case MIXP_BINARY_COUNT: break;
    }
    return "";
}

/* reduce: y[outer, inner] (+)= factor * sum over n of a[outer, n, inner], in a fixed order.
 * reduce_backward undoes it: y[outer, n, inner] (+)= factor * a[outer, inner]. real. */
typedef struct mixp_reduce_args {
    int64_t  outer, n, inner;
    float    factor;
    mixp_in  a;
    mixp_out y;
} mixp_reduce_args;

/* y (+)= a / (1-p) where kept, else 0, n elements; kept when mixp_random_u32(seed, step, tensor, i)
 * >= p * 2^32. With dy for a it is the backward pass. y may be a. real. p outside [0, 1]:
 * MIXP_ERR_ARGUMENT. */
typedef struct mixp_dropout_args {
    int64_t  n;
    float    p;
    uint64_t seed, step, tensor;
    mixp_in  a;
    mixp_out y;
} mixp_dropout_args;

/* y (+)= a * factor[0], the product in f32, n elements: factor lies in device memory. y may be a.
 * real. */
typedef struct mixp_scale_by_args {
    int64_t      n;
    const float *factor;
    mixp_in      a;
    mixp_out     y;
} mixp_scale_by_args;

/* One parameter as the optimizer's kernels see it; an array of these is uploaded once. Each state
 * has its dtype beside it; all that are not the weight or the gradient are f32 as yet. */
typedef struct mixp_param_row {
    void      *weight;          /* what the model reads: real                              */
    void      *grad;            /* real                                                    */
    void      *master;          /* master weight, or NULL when weight is f32 itself        */
    void      *m, *v;           /* moments; v NULL for SGD, m NULL without momentum        */
    mixp_f16  *low_f16;         /* copies for autocast, refreshed by the update, or NULL   */
    mixp_bf16 *low_bf16;
    int64_t    count;
    mixp_dtype weight_dtype, grad_dtype, master_dtype, m_dtype, v_dtype;
    int        group;           /* index of its hyper-parameters                           */
    int        active;          /* 0: has no gradient this step: left alone; 1: is updated;
                                   2: and its gradient cleared, in a skipped step too      */
    int64_t   *missed;          /* how many applied steps left it alone, or NULL           */
} mixp_param_row;

/* One pass over all gradients of active rows: found_inf, sum of squares, largest, first bad
 * element, into `step`. rows, step, scaler and scale: device memory. */
typedef struct mixp_grad_stats_args {
    const mixp_param_row *rows;
    int64_t               count;
    const float          *scale;    /* that gradients were multiplied by; NULL = 1         */
    int                   unscale;  /* 1: also multiplies them by 1/scale in place         */
    mixp_step_state      *step;
    const mixp_step_plan *plan;     /* host memory; not NULL: does what `prepare` does too */
    mixp_scaler_state    *scaler;   /* of that; NULL = none                                */
} mixp_grad_stats_args;

/* Multiplies the gradients of active rows by the clip coefficient for max_norm, from the norm in
 * `step`; does nothing when step->stats.found_inf. */
typedef struct mixp_clip_args {
    const mixp_param_row *rows;
    int64_t               count;
    double                max_norm;
    mixp_step_state      *step;
} mixp_clip_args;

/* All scalar work of one step: decides apply or skip, counts it, computes learning rates and bias
 * corrections, ORs found_inf into the scaler. See mixp_step_prepare, which it runs once on the
 * device: for statistics that changed since grad_stats (clipped, or reduced over machines), or
 * without any. */
typedef struct mixp_prepare_args {
    const mixp_step_plan *plan;     /* host memory                                         */
    mixp_step_state      *step;
    mixp_scaler_state    *scaler;   /* NULL = none                                         */
} mixp_prepare_args;

/* One pass over all active rows: the update that `step` prescribes, or nothing but the clearing of
 * gradients when the step is skipped. */
typedef struct mixp_update_args {
    const mixp_step_plan  *plan;    /* host memory                                         */
    const mixp_param_row  *rows;
    int64_t                count;
    const mixp_step_state *step;
} mixp_update_args;

/* mixp_scaler_advance on the device, with the found_inf that prepare collected. */
typedef struct mixp_advance_args {
    const mixp_scaler_rule *rule;   /* host memory                                         */
    mixp_scaler_state      *scaler;
} mixp_advance_args;

/* What one look at an array found; counts are of elements. Of an array that is stored in `low`
 * already nobody can see what was flushed to zero there: `least` tells, for where a density is flat
 * near 0 half as many were flushed as hold the smallest subnormal. */
typedef struct mixp_look {
    float   largest;            /* largest finite magnitude; 0: there is none */
    int32_t unused;
    int64_t count;              /* looked at */
    int64_t nonfinite, zeros;
    int64_t flushed;            /* not 0, and the nearest number of `low` is 0 */
    int64_t least;              /* the nearest is the smallest subnormal */
    int64_t subnormal;          /* the nearest is subnormal, that one included */
} mixp_look;

/* Bits of magnitudes, as f32, at which rounding to a format takes another course. */
typedef struct mixpi_look_limits { uint32_t flushed, least, subnormal; } mixpi_look_limits;

MIXPREC_HD mixpi_look_limits mixpi_look_limits_of(mixp_dtype low) {
    const mixp_format f = mixp_format_of(low);
    const double normal = ldexp(1.0, 1 - f.bias), tiny = ldexp(normal, -f.mantissa_bits);
    mixpi_look_limits at;
    at.flushed = (uint32_t)mixp_encode(MIXP_F32, 0.5 * tiny, 0);    /* a tie goes to 0 */
    at.least = (uint32_t)mixp_encode(MIXP_F32, 1.5 * tiny, 0);      /* the first that is more */
    at.subnormal = (uint32_t)mixp_encode(MIXP_F32, normal - 0.5 * tiny, 0);
    return at;
}

/* Looks at n elements of x (real) and joins what it finds with what `row` holds, and with `total`
 * unless that is NULL: counts are added, the larger magnitude stays. exponents, unless NULL: counts
 * of elements by exponent, 256 of them: bits 23 to 30 of the element as f32; zeros are in bin 0 with
 * the subnormals, Inf and NaN in 255. low: a floating-point dtype of more than 8 bits, or one of
 * fp8. row, total and exponents: device memory. Integers and a maximum: the same on every device. */
typedef struct mixp_look_args {
    int64_t    n;
    mixp_in    x;
    mixp_dtype low;
    mixp_look *row, *total;
    int64_t   *exponents;
} mixp_look_args;

/* where: y (+)= mask ? a : b over shape (rank 0..8), y dense; a stride of 0 repeats an element.
 * The mask holds where it is not 0 (a NaN is none); an a or a b without data is `value`
 * everywhere. real.
 * where_backward: dx (+)= dy where the mask chooses operand `which`, else 0; summed over the axes
 * that it was repeated along, and addressed, as in binary_backward. */
typedef struct mixp_where_args {
    int      rank;
    int64_t  shape[MIXP_MAX_RANK];
    mixp_in  mask, a, b;
    int64_t  mask_strides[MIXP_MAX_RANK], a_strides[MIXP_MAX_RANK], b_strides[MIXP_MAX_RANK];
    float    value;
    mixp_out y;                 /* of where                                                */
    int      which;             /* of where_backward: 0 = a, 1 = b                         */
    mixp_in  dy;
    mixp_out dx;
} mixp_where_args;

/* y[outer, inner] = the largest over n of a[outer, n, inner]; a NaN is larger than all. index:
 * where the first of them is; ties: how many there are; outer * inner values each. y and ties may
 * be not there. n from 1 to 2^31 - 1. real. */
typedef struct mixp_max_args {
    int64_t  outer, n, inner;
    mixp_in  a;
    mixp_out y;
    int32_t *index, *ties;
} mixp_max_args;

/* da[outer, n, inner] (+)= dy[outer, inner] at the first of the largest, else 0; with shared, dy
 * over their number at each of them. index, ties: as max left them. */
typedef struct mixp_max_backward_args {
    int64_t        outer, n, inner;
    int            shared;
    mixp_in        a, dy;       /* a: looked at only when shared                           */
    const int32_t *index, *ties;
    mixp_out       da;
} mixp_max_backward_args;

/* gather: y[o, j, i] = a[o, ids[o, j, i], i] for o, j, i in [outer, m, inner]; ids in [0, n), as
 * those of embedding.
 * gather_backward: y[o, ids[o, j, i], i] += a[o, j, i] in increasing j, each sum rounded to y's
 * dtype; y is [outer, n, inner] then, and must accumulate: MIXP_ERR_ARGUMENT. real. */
typedef struct mixp_gather_args {
    int64_t        outer, n, m, inner;
    const int32_t *ids;
    mixp_in        a;
    mixp_out       y;
} mixp_gather_args;

/* Turns the pairs of each head of a[rows, t, heads, d] by position times base^(-2i/d), i = 0 ..
 * d/2 - 1 (rotary embeddings, Su et al., 2021): y (+)= (p cos - q sin, q cos + p sin). Positions
 * count from `first` along t. The pair i is (i, i + d/2), or (2i, 2i + 1) when interleaved. Angles
 * are computed in f64, the rest in f32. y may be a. real. */
typedef struct mixp_rope_args {
    int64_t  rows, t, heads, d; /* d: even                                                 */
    int64_t  first;
    double   base;
    int      interleaved;
    int      back;              /* 1: by the negative angle, which is the gradient         */
    mixp_in  a;
    mixp_out y;
} mixp_rope_args;

typedef struct mixp_kernels {
    mixp_result (*convert)(const mixp_exec *x, const mixp_convert_args *k);
    mixp_result (*fill)(const mixp_exec *x, const mixp_fill_args *k);
    mixp_result (*copy)(const mixp_exec *x, const mixp_copy_args *k);

    mixp_result (*unary)(const mixp_exec *x, const mixp_unary_args *k);
    mixp_result (*unary_backward)(const mixp_exec *x, const mixp_unary_backward_args *k);
    mixp_result (*binary)(const mixp_exec *x, const mixp_binary_args *k);
    mixp_result (*binary_backward)(const mixp_exec *x, const mixp_binary_args *k);
    mixp_result (*reduce)(const mixp_exec *x, const mixp_reduce_args *k);
    mixp_result (*reduce_backward)(const mixp_exec *x, const mixp_reduce_args *k);
    mixp_result (*softmax)(const mixp_exec *x, const mixp_softmax_args *k);
    mixp_result (*softmax_backward)(const mixp_exec *x,
                                    const mixp_softmax_backward_args *k);
    mixp_result (*norm)(const mixp_exec *x, const mixp_norm_args *k);
    mixp_result (*norm_backward)(const mixp_exec *x, const mixp_norm_backward_args *k);
    mixp_result (*embedding)(const mixp_exec *x, const mixp_embedding_args *k);
    mixp_result (*embedding_backward)(const mixp_exec *x,
                                      const mixp_embedding_backward_args *k);
    mixp_result (*attention)(const mixp_exec *x, const mixp_attention_args *k);
    mixp_result (*attention_backward)(const mixp_exec *x,
                                      const mixp_attention_backward_args *k);
    mixp_result (*cross_entropy)(const mixp_exec *x, const mixp_cross_entropy_args *k);
    mixp_result (*cross_entropy_backward)(const mixp_exec *x,
                                          const mixp_cross_entropy_backward_args *k);
    mixp_result (*loss)(const mixp_exec *x, const mixp_loss_args *k);
    mixp_result (*loss_backward)(const mixp_exec *x, const mixp_loss_backward_args *k);
    mixp_result (*dropout)(const mixp_exec *x, const mixp_dropout_args *k);
    mixp_result (*gemm)(const mixp_exec *x, const mixp_gemm_args *k);
    mixp_result (*scale_by)(const mixp_exec *x, const mixp_scale_by_args *k);

    mixp_result (*grad_stats)(const mixp_exec *x, const mixp_grad_stats_args *k);
    mixp_result (*clip)(const mixp_exec *x, const mixp_clip_args *k);
    mixp_result (*prepare)(const mixp_exec *x, const mixp_prepare_args *k);
    mixp_result (*update)(const mixp_exec *x, const mixp_update_args *k);
    mixp_result (*advance)(const mixp_exec *x, const mixp_advance_args *k);
    mixp_result (*look)(const mixp_exec *x, const mixp_look_args *k);

    mixp_result (*where)(const mixp_exec *x, const mixp_where_args *k);
    mixp_result (*where_backward)(const mixp_exec *x, const mixp_where_args *k);
    mixp_result (*max)(const mixp_exec *x, const mixp_max_args *k);
    mixp_result (*max_backward)(const mixp_exec *x, const mixp_max_backward_args *k);
    mixp_result (*gather)(const mixp_exec *x, const mixp_gather_args *k);
    mixp_result (*gather_backward)(const mixp_exec *x, const mixp_gather_args *k);
    mixp_result (*rope)(const mixp_exec *x, const mixp_rope_args *k);
} mixp_kernels;

/* Which way products of matrices have gone on a GPU; a captured one counts once. */
typedef struct mixp_gemm_count {
    int64_t direct;             /* to the vendor's library, as they are                    */
    int64_t packed;             /* to it, with copies of their operands                    */
    int64_t plain;              /* to a kernel without tensor cores, about 50 times slower */
} mixp_gemm_count;

struct mixp_device {
    const char         *name;   /* "cpu avx512", "cuda", ...                               */
    const mixp_kernels *kernels;
    /* NULL members: memory is the host's, taken from the context's allocator. */
    void       *(*allocate)(const mixp_exec *x, size_t bytes);
    void        (*release)(const mixp_exec *x, void *p);
    mixp_result (*upload)(const mixp_exec *x, void *device, const void *host,
                          size_t bytes);
    mixp_result (*download)(const mixp_exec *x, void *host, const void *device,
                            size_t bytes);
    mixp_result (*wait)(const mixp_exec *x);  /* until all queued work is done             */
    /* Makes x->state for a new context on x->stream, and unmakes it. NULL = none needed. */
    mixp_result (*attach)(mixp_exec *x);
    void        (*detach)(mixp_exec *x);
    /* Bytes that prepare or advance wrote, of a moment ago, without waiting; NULL = download. */
    mixp_result (*peek)(const mixp_exec *x, void *host, const void *device, size_t bytes);
    /* Records queued work instead of running it; replays it, `later` steps after the recorded
     * one. NULL = cannot. The newest error in words, "" for none; NULL = has no words. */
    mixp_result (*capture_begin)(mixp_exec *x);
    mixp_result (*capture_end)(mixp_exec *x, void **graph);
    mixp_result (*replay)(const mixp_exec *x, void *graph, uint64_t later);
    void        (*graph_free)(const mixp_exec *x, void *graph);
    const char *(*message)(const mixp_exec *x);
    /* MIXP_OK when p is memory that kernels can use. NULL = any is. */
    mixp_result (*check)(const mixp_exec *x, const void *p, size_t bytes);
    /* As upload, but each replay of a captured step reads host anew; what upload was given is
     * read once. NULL = upload. */
    mixp_result (*feed)(const mixp_exec *x, void *device, const void *host, size_t bytes);
    mixp_gemm_count (*gemm_count)(const mixp_exec *x);  /* NULL = all go one way            */
};

/* ==== 5. TENSORS ======================================================= >>tensors ====
 *
 * Whatever is made from a context lives until the context is freed; activations live until
 * the next mixp_step_begin. A context and all that is made from it belong to one thread at
 * a time; two contexts are independent.
 */
typedef struct mixp_context mixp_context;
typedef struct mixp_tensor  mixp_tensor;

/* A gradient's own tag: what it was multiplied by. It is written where backward walks, and read by
 * those who clip, unscale and step; nobody else asks what it says. */
typedef struct mixpi_mark {
    const void *by;             /* the scaler, or NULL                                     */
    uint64_t    at;             /* which of its scales                                     */
    uint64_t    seen;           /* its update count when it unscaled or stepped this; 0 = not */
    int         kind;
} mixpi_mark;

/* Read the fields, write only through functions. Row-major and dense, always. */
struct mixp_tensor {
    mixp_context *ctx;
    const char   *name;         /* "" when it has none                                     */
    mixp_dtype    dtype;
    int           rank;         /* 0 = a scalar                                            */
    int64_t       shape[MIXP_MAX_RANK];
    int64_t       count;        /* product of shape                                        */
    void         *data;         /* device memory                                           */
    mixp_tensor  *grad;         /* NULL until a backward pass has filled it                */
    int           requires_grad;
    uint64_t      version;      /* goes up with every write: what the cast cache looks at  */
    struct mixpi_tensor_private {
        mixp_tensor *grad;      /* the gradient's storage, whether or not it holds one     */
        mixp_tensor *low[2];    /* cached f16 and bf16 copies                              */
        mixp_tensor *master;    /* of a cached copy: the tensor it was cast from           */
        mixp_tensor *next;      /* in the context's list of permanent tensors              */
        mixp_tensor *kept;      /* of an activation: the gradient the user asked to keep    */
        int          pending;   /* 1: own.grad holds a gradient not yet walked back; of a leaf:
                                   the walk under way has written to it                    */
        mixpi_mark   mark;      /* of a gradient: what it was multiplied by                 */
        uint64_t     low_version[2]; /* the version that each copy holds                    */
        uint64_t     generation;/* of the arena; 0 = permanent                             */
        int          walked;    /* 1: a loss that has been walked back                     */
        int64_t      id;        /* key of its random numbers                               */
        int          from_tape; /* 1: made by an operator that will be walked backwards    */
        int          is_param;  /* 1: saved in checkpoints                                 */
        int          is_grad;   /* 1: a gradient that a walk back has made                 */
    } own;
};

typedef struct mixp_context_desc {
    const mixp_device *device;                      /* NULL = mixp_cpu()                   */
    void *(*allocate)(size_t bytes, void *user);    /* NULL = malloc                       */
    void  (*release)(void *p, void *user);          /* NULL = free; both or neither        */
    void     *user;
    uint64_t  seed;                                 /* of dropout, initialisation, rounding*/
    int       threads;                              /* 0 = as many as OpenMP gives; without
                                                       OpenMP any number is 1              */
    void     *stream;                               /* of a GPU: your cudaStream_t; NULL = one
                                                       of the context's own: see below     */
    mixp_allocator device_allocator;                /* of a GPU; unset = cudaMalloc        */
    const char **why;                               /* where to say why there is no context:
                                                       a constant string, or ""            */
    void (*on_error)(mixp_result code, const char *message, void *user);
                                                    /* NULL, or told of the first error and,
                                                       once that is cleared, of the next   */
} mixp_context_desc;

/* On a GPU everything runs on one stream. Kernels and copies of your own are ordered with it when
 * they are on that stream, or, where it is the context's own, on the legacy default stream (plain
 * <<<grid, block>>> and cudaMemcpy); with any other stream, use events. A program compiled with
 * --default-stream per-thread passes cudaStreamPerThread.
 *
 * desc NULL = all defaults. NULL, and desc->why says which: out of memory, half an allocator,
 * threads < 0, or a device or stream that cannot be used.
 * device_allocator gives a GPU's memory, aligned to 256 bytes; it is called with that GPU current,
 * and takes back what nothing queued still uses. Pinned memory is cudaMallocHost's all the same. */
MIXPREC_API mixp_context *mixp_context_new(const mixp_context_desc *desc);

/* Frees the context and everything made from it. NULL is fine. */
MIXPREC_API void mixp_context_free(mixp_context *ctx);

/* The first error since the context was made or the error was cleared; MIXP_OK = none.
 * *message (when not NULL) is set to its text, "" for none; it lives in the context. */
MIXPREC_API mixp_result mixp_context_error(const mixp_context *ctx, const char **message);
MIXPREC_API void        mixp_context_clear_error(mixp_context *ctx);

/* Reports an error of your own operator: keeps the first, formats as printf does, returns code. */
MIXPREC_API mixp_result mixp_context_fail(mixp_context *ctx, mixp_result code,
                                          const char *format, ...)
#if defined(__GNUC__)
    __attribute__((__format__(__printf__, 3, 4)))
#endif
    ;

/* A whole step as a graph of the GPU, replayed without work of the host. Capture what lies from
 * mixp_step_begin to mixp_scaler_update, after an ordinary step has allocated all it needs: it is
 * recorded, not run. A replay reads anew the host memory that mixp_input and mixp_write were given
 * (keep that, with the next batch in it), each for itself, so that a step may hold several batches;
 * then it runs the step. Random numbers are fresh in each replay; schedule, loss scale and skipped
 * steps go on as always, but nobody looks for MIXP_ERR_DIVERGED, and what is changed later is not
 * seen: a group, the scaler's rule, autocast; a parameter written between replays keeps its low
 * copy and its master weight of before. Kernels of your own belong on the stream in
 * mixp_context_exec(ctx), which is another one meanwhile. The graph lives as long as the context;
 * NULL on error. MIXP_ERR_DEVICE: the device has no graphs (no CPU has). MIXP_ERR_ORDER: something
 * in it allocated, waited, or multiplied shapes that no step had before. */
typedef struct mixp_graph mixp_graph;
MIXPREC_API mixp_result mixp_capture_begin(mixp_context *ctx);
MIXPREC_API mixp_graph *mixp_capture_end(mixp_context *ctx);
MIXPREC_API mixp_result mixp_replay(mixp_graph *graph);
/* 1: a site changed the dtype that it stores (see WATCH) since the graph was recorded, which goes on
 * as it was, safe as ever: record it again. A guard looks in no replay: when mixp_guard_due says so,
 * run a step by hand instead. */
MIXPREC_API int         mixp_graph_stale(const mixp_graph *graph);

/* The device memory in use and the most ever used, in bytes; how many allocations were made
 * since the context was made; the step count. */
typedef struct mixp_memory { size_t used, peak; int64_t allocations; } mixp_memory;
MIXPREC_API mixp_memory mixp_context_memory(const mixp_context *ctx);
MIXPREC_API uint64_t    mixp_context_steps(const mixp_context *ctx);
/* Which way the context's products went so far: look here when a GPU is slow. Zeros on a CPU. */
MIXPREC_API mixp_gemm_count mixp_context_gemm_count(const mixp_context *ctx);
/* What execution the context hands to kernels; for your own operators. */
MIXPREC_API const mixp_exec   *mixp_context_exec(mixp_context *ctx);
MIXPREC_API const mixp_device *mixp_context_device(const mixp_context *ctx);

/* A trainable tensor: zeroed, permanent, requires_grad. dtype: f32, f16 or bf16. rank 0..8,
 * every dimension >= 1. name is copied; no other parameter of the context has it, but for "".
 * NULL on error. */
MIXPREC_API mixp_tensor *mixp_param(mixp_context *ctx, const char *name, mixp_dtype dtype,
                                    int rank, const int64_t *shape);

/* Your memory (device memory of the context's device) seen as a permanent tensor: never
 * copied, never freed, at least as long-lived as the context. Call it once, not every step;
 * tell mixp_tensor_touch when you write to it. NULL on error. */
MIXPREC_API mixp_tensor *mixp_view(mixp_context *ctx, const char *name, mixp_dtype dtype,
                                   int rank, const int64_t *shape, void *data);

/* An activation with a copy of host data (dtype as given), until the next step. The way to
 * feed a batch. Every dimension >= 1. NULL on error. */
MIXPREC_API mixp_tensor *mixp_input(mixp_context *ctx, mixp_dtype dtype, int rank,
                                    const int64_t *shape, const void *host_data);

/* An activation with undefined content, until the next step. NULL on error. */
MIXPREC_API mixp_tensor *mixp_activation(mixp_context *ctx, mixp_dtype dtype, int rank,
                                         const int64_t *shape);

/* Lets gradients flow into a view or an input that is f32, f16 or bf16. */
MIXPREC_API mixp_result mixp_tensor_set_requires_grad(mixp_tensor *t, int on);

/* Says that t's data was written behind the library's back: cached low copies are stale. */
MIXPREC_API void mixp_tensor_touch(mixp_tensor *t);

/* Copy all elements, t->count, to or from host memory of any dtype. Both wait for the device. */
MIXPREC_API mixp_result mixp_read(const mixp_tensor *t, void *host, mixp_dtype dtype,
                                  int64_t count);
MIXPREC_API mixp_result mixp_write(mixp_tensor *t, const void *host, mixp_dtype dtype,
                                   int64_t count);
/* The value of a one-element tensor; waits for the device. NaN when t is NULL or larger. */
MIXPREC_API double mixp_item(const mixp_tensor *t);

/* Initialisation, keyed by (seed, t's id, element): the same on every device. */
MIXPREC_API mixp_result mixp_fill(mixp_tensor *t, double value);
MIXPREC_API mixp_result mixp_init_normal(mixp_tensor *t, double mean, double std);
MIXPREC_API mixp_result mixp_init_uniform(mixp_tensor *t, double low, double high);
/* For weights [out, in, ...]: with fan_in = in ..., fan_out = out ..., of variance gain^2 times
 * 2 / (fan_in + fan_out) (Glorot and Bengio, 2010), or 1 / fan_in (He et al., 2015); normal, or
 * uniform from -sqrt(3 variance). gain: sqrt(2) before relu, 5/3 before tanh, 1 elsewhere.
 * MIXP_ERR_SHAPE: fewer than two dimensions. */
MIXPREC_API mixp_result mixp_init_xavier_normal(mixp_tensor *t, double gain);
MIXPREC_API mixp_result mixp_init_xavier_uniform(mixp_tensor *t, double gain);
MIXPREC_API mixp_result mixp_init_kaiming_normal(mixp_tensor *t, double gain);
MIXPREC_API mixp_result mixp_init_kaiming_uniform(mixp_tensor *t, double gain);

/* ==== 6. AUTOCAST ===================================================== >>autocast ====
 *
 * Inside a region every operator runs in the dtype its class asks for, as in PyTorch's
 * torch.amp.autocast on CUDA. Regions nest; leaving one restores the one around it.
 *
 * No up-cast is ever materialised. Down-casts of parameters are cached, keyed by (tensor, dtype,
 * version), and renewed by the optimizer's update: in steady state a step casts no weight.
 */
typedef enum mixp_op_class {
    MIXP_CLASS_KEEP,            /* runs in the dtype of its first input                    */
    MIXP_CLASS_LOW,             /* GEMM-like: inputs and result in the region's dtype      */
    MIXP_CLASS_F32,             /* losses, norms, exp, log, pow: f32 result                */
    MIXP_CLASS_F32_OUT,         /* softmax, sum: f32 result                                */
    MIXP_CLASS_PROMOTE,         /* the widest of its inputs                                */
    MIXP_CLASS_BANNED,          /* an error that names the safe operator                   */
    MIXP_CLASS_COUNT
} mixp_op_class;

/* Which results are stored in the region's dtype. Scalars (rank 0) are always f32, and all
 * arithmetic inside norms, softmax, losses and accumulations is f32 at every level.
 *   0  autocast off: every operator runs as given
 *   1  as PyTorch's autocast (Apex O1): results have the dtypes of the classes above
 *   2  every activation low, the residual stream included (Apex O2), over fp32 weights
 *   3  as 2, for parameters that are low themselves (Apex O3, "pure"): make the parameters
 *      with dtype f16 or bf16, and set the optimizer's no_master for no f32 copy at all */
typedef struct mixp_autocast {
    mixp_dtype dtype;           /* MIXP_F16 or MIXP_BF16; MIXP_F32 = off in this region    */
    int        level;           /* 0..3; the block form uses the context's, 1 at first     */
} mixp_autocast;

/* Opens a region until the matching pop. MIXP_ERR_ARGUMENT: other dtype or level, or more
 * than 64 nested; MIXP_ERR_ORDER: pop without push. */
MIXPREC_API mixp_result mixp_autocast_push(mixp_context *ctx,
                                           const mixp_autocast *region);
MIXPREC_API mixp_result mixp_autocast_pop(mixp_context *ctx);

/* The region in force: dtype MIXP_F32 and level 0 outside of all. */
MIXPREC_API mixp_autocast mixp_autocast_current(const mixp_context *ctx);

/* The level that the block form and mixp_autocast_call use from now on: 0..3. */
MIXPREC_API mixp_result mixp_autocast_set_level(mixp_context *ctx, int level);

/* MIXP_AUTOCAST(ctx, MIXP_F16) { loss = model(ctx, x); }
 * A region for one block. Leave the block at its end: return, goto and break leave the region
 * open, which the next mixp_step_begin reports; so begin steps outside of any such block. And
 * continue ends the block, not the round of the loop around it: C cannot tell it from the end. */
#define MIXP_AUTOCAST(ctx, dtype)                                                         \
    MIXPI_IN_REGION(mixpi_cast_, mixp_autocast_enter((ctx), (dtype)),                  \
                       mixp_autocast_leave(ctx), __LINE__)
/* Named by kind and line, so that nested blocks do not shadow each other. */
#define MIXPI_IN_REGION(kind, enter, leave, line)                                      \
    MIXPI_IN_REGION_AT(kind, enter, leave, line)
#define MIXPI_IN_REGION_AT(kind, enter, leave, line)                                   \
    for (int kind##line = (enter); kind##line; kind##line = (leave))
MIXPREC_API int mixp_autocast_enter(mixp_context *ctx, mixp_dtype dtype);  /* always 1 */
MIXPREC_API int mixp_autocast_leave(mixp_context *ctx);                    /* always 0 */

/* fn(ctx, user), run in a region that ends however fn returns: PyTorch's decorator form. */
MIXPREC_API mixp_tensor *mixp_autocast_call(mixp_context *ctx, mixp_dtype dtype,
                                            mixp_tensor *(*fn)(mixp_context *, void *),
                                            void *user);

/* MIXP_NO_GRAD(ctx) { loss = model(ctx, x); }
 * Evaluation: inside, operators are not recorded for backward. Nests. To be left, and kept
 * within a step, as MIXP_AUTOCAST. */
#define MIXP_NO_GRAD(ctx)                                                                 \
    MIXPI_IN_REGION(mixpi_no_grad_, mixp_no_grad_enter(ctx), mixp_no_grad_leave(ctx), __LINE__)
MIXPREC_API int mixp_no_grad_enter(mixp_context *ctx);                     /* always 1 */
MIXPREC_API int mixp_no_grad_leave(mixp_context *ctx);                     /* always 0 */

/* Regions for other ways to leave: open one, whatever kind, and keep the number; close takes
 * everything back that was opened since. Steps may begin in between. -1: ctx is NULL. */
MIXPREC_API int  mixp_autocast_open(mixp_context *ctx, mixp_dtype dtype);
MIXPREC_API int  mixp_no_grad_open(mixp_context *ctx);
MIXPREC_API void mixp_autocast_close(mixp_context *ctx, int opened);

/* MIXP_SCOPE(ctx, "h.3") { ... }
 * Names what is applied inside, for WATCH: see mixp_site. Scopes nest, joined by dots; a longer
 * name than 200 characters is cut. To be left, and kept within a step, as MIXP_AUTOCAST. */
#define MIXP_SCOPE(ctx, name) \
    MIXPI_IN_REGION(mixpi_scope_, mixp_scope_enter((ctx), (name)), mixp_scope_leave(ctx), __LINE__)
MIXPREC_API int mixp_scope_enter(mixp_context *ctx, const char *name);     /* always 1 */
MIXPREC_API int mixp_scope_leave(mixp_context *ctx);                       /* always 0 */

/* The same until the matching pop. MIXP_ERR_ARGUMENT: name is NULL or empty, or regions and scopes
 * are nested more than 64 deep; MIXP_ERR_ORDER: pop without push. */
MIXPREC_API mixp_result mixp_scope_push(mixp_context *ctx, const char *name);
MIXPREC_API mixp_result mixp_scope_pop(mixp_context *ctx);

#ifdef __cplusplus
/* C++: a region as long as the variable lives, however that ends: return, break, an exception.
 *     { mixp_autocast_scope scope(ctx, MIXP_F16); loss = model(ctx, x); } */
class mixp_autocast_scope {
public:
    mixp_autocast_scope(mixp_context *context, mixp_dtype dtype)
        : ctx(context), opened(mixp_autocast_open(context, dtype)) {}
    ~mixp_autocast_scope() { mixp_autocast_close(ctx, opened); }
    mixp_autocast_scope(const mixp_autocast_scope &) = delete;
    mixp_autocast_scope &operator=(const mixp_autocast_scope &) = delete;
private:
    mixp_context *ctx;
    int           opened;
};

class mixp_no_grad_scope {
public:
    explicit mixp_no_grad_scope(mixp_context *context)
        : ctx(context), opened(mixp_no_grad_open(context)) {}
    ~mixp_no_grad_scope() { mixp_autocast_close(ctx, opened); }
    mixp_no_grad_scope(const mixp_no_grad_scope &) = delete;
    mixp_no_grad_scope &operator=(const mixp_no_grad_scope &) = delete;
private:
    mixp_context *ctx;
    int           opened;
};
#endif

typedef struct mixp_op mixp_op;

/* Changes the class of an operator (mixp_op_builtin's, or yours) in one context; of 64 at most. */
MIXPREC_API mixp_result mixp_autocast_override(mixp_context *ctx, const mixp_op *op,
                                               mixp_op_class cls);

/* What ran in which dtype since the last reset: row 0, 1, ... until it returns 0. */
typedef struct mixp_op_count {
    const char *op;
    mixp_op_class  cls;            /* in force, override included                             */
    int64_t     calls[3];       /* results in f32, f16, bf16                               */
} mixp_op_count;
MIXPREC_API int mixp_autocast_count(const mixp_context *ctx, int row, mixp_op_count *out);
typedef struct mixp_cast_count {
    int64_t weight_casts;       /* parameter copies made because the cache was stale       */
    int64_t weight_hits;        /* parameter copies found fresh                            */
    int64_t activation_casts;
} mixp_cast_count;
MIXPREC_API mixp_cast_count mixp_autocast_casts(const mixp_context *ctx);
MIXPREC_API void            mixp_autocast_reset_counts(mixp_context *ctx);
MIXPREC_API const char     *mixp_op_class_name(mixp_op_class cls);   /* "low", "f32", ... */

/* ==== 7. TAPE ============================================================= >>tape ====
 *
 * An operator is a row. The built-in ones and yours go through the same mixp_apply, which
 * asks autocast for dtypes, infers the result, runs the forward and records the call;
 * mixp_backward walks the calls back.
 */
/* Begins a step: recycles the activations, gradients of activations and the tape of the
 * step before, whose tensors must not be used again. Call it first in every training or
 * evaluation step. Counts steps for random numbers. MIXP_ERR_ORDER: a MIXP_AUTOCAST or
 * MIXP_NO_GRAD block is open, say left by return, goto or break (it is closed all the same). */
MIXPREC_API mixp_result mixp_step_begin(mixp_context *ctx);

/* Fills the gradients of everything that loss (one element) was made from. Gradients of parameters
 * and views accumulate until mixp_zero_grad; of activations, t->grad is kept only where
 * mixp_tensor_set_requires_grad was asked for. Runs once per recorded tape and loss; several losses
 * of one step may each be walked. A walk that fails forgets the gradients that it touched.
 * MIXP_ERR_ORDER: loss was not recorded, was walked before, or belongs to an earlier step. */
MIXPREC_API mixp_result mixp_backward(mixp_context *ctx, mixp_tensor *loss);

/* Compares the gradients that backward gives for fn's scalar result with central differences, for
 * every element of inputs (f32, requires_grad). Largest |analytic - numeric| / max(1, |numeric|) in
 * *worst. eps: step, 0 = 1e-3. fn is called 2 * elements + 1 times, each after a mixp_step_begin,
 * and must be deterministic (no dropout). Inputs keep their values. */
MIXPREC_API mixp_result mixp_check_gradients(mixp_context *ctx,
                                             mixp_tensor *(*fn)(mixp_context *, void *),
                                             void *user, int n_inputs,
                                             mixp_tensor *const *inputs, double eps,
                                             double *worst);

/* --- for authors of operators ---------------------------------------------------------------- */

#define MIXP_MAX_INPUTS 65536   /* that a count which is none does not read on for ever    */
#define MIXP_MAX_SAVED  3

typedef struct mixp_call {
    mixp_context  *ctx;
    const mixp_op *op;
    int            n_in;
    mixp_tensor  **in;      /* at least 4, after autocast; NULL = an optional one left out  */
    mixp_tensor   *out;
    mixp_tensor   *saved[MIXP_MAX_SAVED];/* what forward keeps for backward                 */
    void          *attrs;                /* a copy of what was given to mixp_apply          */
} mixp_call;

struct mixp_op {
    const char *name;           /* "layer_norm": for messages and counts                   */
    mixp_op_class  cls;
    size_t      attrs_size;     /* bytes of attrs that mixp_apply copies                   */
    /* Checks inputs and attrs and calls mixp_call_output (or ..._alias). */
    mixp_result (*infer)(mixp_call *c);
    /* Computes c->out; may keep tensors with mixp_call_save. */
    mixp_result (*forward)(mixp_call *c);
    /* From c->out->grad, adds to what mixp_call_grad returns; operators that it applies run
     * as under MIXP_NO_GRAD. NULL: no gradient flows. */
    mixp_result (*backward)(mixp_call *c);
    const char *instead;        /* for BANNED: the operator to use instead                 */
};

/* Applies op to inputs (NULL where optional) with attrs (attrs_size bytes, or NULL when that is 0).
 * The first `required` of them, at least one, must be given: NULL there, as an earlier error leaves
 * it, gives NULL, like any other error. The result lives until the next step. */
MIXPREC_API mixp_tensor *mixp_apply(mixp_context *ctx, const mixp_op *op, int n_in,
                                    mixp_tensor *const *in, int required,
                                    const void *attrs);

/* For infer: declares the result. dtype is the natural one (the first input's); autocast may
 * change it, see c->out->dtype in forward. */
MIXPREC_API mixp_result mixp_call_output(mixp_call *c, mixp_dtype dtype, int rank,
                                         const int64_t *shape);
/* For infer: the result is c->in[0]'s memory under another shape of the same count. */
MIXPREC_API mixp_result mixp_call_alias(mixp_call *c, int rank, const int64_t *shape);
/* For forward: a tensor kept for backward in c->saved[slot]. NULL on error. */
MIXPREC_API mixp_tensor *mixp_call_save(mixp_call *c, int slot, mixp_dtype dtype,
                                        int rank, const int64_t *shape);
/* For backward: the gradient of input i, to be filled. NULL: not wanted. *accumulate 1: add
 * to what it holds; 0: overwrite (it holds garbage). Writing to it is a promise: after this
 * call the gradient counts as written. */
MIXPREC_API mixp_tensor *mixp_call_grad(mixp_call *c, int i, int *accumulate);
/* Is the gradient of input i wanted? */
MIXPREC_API int mixp_call_wants(const mixp_call *c, int i);

/* ==== 8. OPERATORS =================================================== >>operators ====
 *
 * Each returns a new activation, NULL on error or when an input is NULL. Inputs must be of
 * this context. Shapes: x[..., k] means any leading dimensions. Floating inputs may be f32,
 * f16 or bf16 in any mix. Classes are PyTorch's on CUDA.
 */

/* LOW. y[..., out] = x[..., in] w[out, in]' (+ b[out]). */
MIXPREC_API mixp_tensor *mixp_linear(mixp_context *ctx, mixp_tensor *x, mixp_tensor *w,
                                     mixp_tensor *b);
/* LOW. y = op(a) op(b) on the last two dimensions; op transposes when asked. Leading dimensions
 * broadcast, as NumPy's do: equal, or 1, or not there. A vector a is one row, a vector b one
 * column, never transposed, and the result lacks that dimension: of two vectors it is a scalar. */
MIXPREC_API mixp_tensor *mixp_matmul(mixp_context *ctx, mixp_tensor *a, mixp_tensor *b,
                                     int trans_a, int trans_b);
/* LOW. Multi-head attention of packed qkv[b, t, 3*c], each of q, k, v split into `heads`
 * heads of c/heads; y[b, t, c]. scale 0 = 1/sqrt(c/heads). */
MIXPREC_API mixp_tensor *mixp_attention(mixp_context *ctx, mixp_tensor *qkv, int heads,
                                        int causal, float scale);

/* PROMOTE. Elementwise, with NumPy's broadcasting. */
MIXPREC_API mixp_tensor *mixp_add(mixp_context *ctx, mixp_tensor *a, mixp_tensor *b);
MIXPREC_API mixp_tensor *mixp_sub(mixp_context *ctx, mixp_tensor *a, mixp_tensor *b);
MIXPREC_API mixp_tensor *mixp_mul(mixp_context *ctx, mixp_tensor *a, mixp_tensor *b);
MIXPREC_API mixp_tensor *mixp_div(mixp_context *ctx, mixp_tensor *a, mixp_tensor *b);
/* NaN where either is. Equal operands get half of the gradient each, as in PyTorch. */
MIXPREC_API mixp_tensor *mixp_maximum(mixp_context *ctx, mixp_tensor *a, mixp_tensor *b);
MIXPREC_API mixp_tensor *mixp_minimum(mixp_context *ctx, mixp_tensor *a, mixp_tensor *b);
/* silu(gate) up, rounded once; packed (KEEP): of x[..., 2c], whose first half is the gate, to
 * [..., c]. */
MIXPREC_API mixp_tensor *mixp_swiglu(mixp_context *ctx, mixp_tensor *gate, mixp_tensor *up);
MIXPREC_API mixp_tensor *mixp_swiglu_packed(mixp_context *ctx, mixp_tensor *x);

/* KEEP. Elementwise. */
MIXPREC_API mixp_tensor *mixp_scale(mixp_context *ctx, mixp_tensor *x, float factor);
MIXPREC_API mixp_tensor *mixp_relu(mixp_context *ctx, mixp_tensor *x);
MIXPREC_API mixp_tensor *mixp_gelu(mixp_context *ctx, mixp_tensor *x);      /* x Phi(x)      */
MIXPREC_API mixp_tensor *mixp_gelu_tanh(mixp_context *ctx, mixp_tensor *x); /* tanh form     */
MIXPREC_API mixp_tensor *mixp_silu(mixp_context *ctx, mixp_tensor *x);
MIXPREC_API mixp_tensor *mixp_tanh(mixp_context *ctx, mixp_tensor *x);
MIXPREC_API mixp_tensor *mixp_sigmoid(mixp_context *ctx, mixp_tensor *x);
MIXPREC_API mixp_tensor *mixp_sqrt(mixp_context *ctx, mixp_tensor *x);
MIXPREC_API mixp_tensor *mixp_neg(mixp_context *ctx, mixp_tensor *x);
MIXPREC_API mixp_tensor *mixp_abs(mixp_context *ctx, mixp_tensor *x);       /* slope 0 at 0 */
MIXPREC_API mixp_tensor *mixp_sin(mixp_context *ctx, mixp_tensor *x);
MIXPREC_API mixp_tensor *mixp_cos(mixp_context *ctx, mixp_tensor *x);
/* At least low and at most high, either of which may be infinite; the gradient passes at the
 * bounds. MIXP_ERR_ARGUMENT: low > high, or NaN. */
MIXPREC_API mixp_tensor *mixp_clamp(mixp_context *ctx, mixp_tensor *x, float low,
                                    float high);
/* relu(x)^2 (So et al., Primer, 2021). In f16 it is Inf from 256 on. */
MIXPREC_API mixp_tensor *mixp_relu_squared(mixp_context *ctx, mixp_tensor *x);
/* cap tanh(x / cap), cap > 0: for logits (Gemma 2, 2024). */
MIXPREC_API mixp_tensor *mixp_soft_cap(mixp_context *ctx, mixp_tensor *x, float cap);
/* F32. Elementwise. */
MIXPREC_API mixp_tensor *mixp_exp(mixp_context *ctx, mixp_tensor *x);
MIXPREC_API mixp_tensor *mixp_log(mixp_context *ctx, mixp_tensor *x);
MIXPREC_API mixp_tensor *mixp_pow(mixp_context *ctx, mixp_tensor *x, float exponent);

/* dim: -rank..rank-1, or MIXP_ALL for every element (a scalar). keep 1 leaves the dimension
 * with size 1. sum: F32_OUT. mean: KEEP, as in PyTorch. */
#define MIXP_ALL (-100)
MIXPREC_API mixp_tensor *mixp_sum(mixp_context *ctx, mixp_tensor *x, int dim, int keep);
/* KEEP. The largest; NaN where one is. The gradient goes to the first of the largest, and with
 * MIXP_ALL in equal shares to all of them: as in PyTorch. argmax: i32, of the first one (counted
 * through the whole array with MIXP_ALL), without a gradient. */
MIXPREC_API mixp_tensor *mixp_max(mixp_context *ctx, mixp_tensor *x, int dim, int keep);
MIXPREC_API mixp_tensor *mixp_argmax(mixp_context *ctx, mixp_tensor *x, int dim, int keep);
MIXPREC_API mixp_tensor *mixp_mean(mixp_context *ctx, mixp_tensor *x, int dim, int keep);

/* F32_OUT. Over the last dimension. */
MIXPREC_API mixp_tensor *mixp_softmax(mixp_context *ctx, mixp_tensor *x);
MIXPREC_API mixp_tensor *mixp_log_softmax(mixp_context *ctx, mixp_tensor *x);
/* F32. Over the last dimension; gamma and beta have its size, or are NULL. eps > 0. */
MIXPREC_API mixp_tensor *mixp_layer_norm(mixp_context *ctx, mixp_tensor *x,
                                         mixp_tensor *gamma, mixp_tensor *beta,
                                         float eps);
MIXPREC_API mixp_tensor *mixp_rms_norm(mixp_context *ctx, mixp_tensor *x,
                                       mixp_tensor *gamma, float eps);
/* KEEP. y[..., c] = table[vocab, c] at ids[...] (i32). An id outside [0, vocab), here, or a target
 * outside below: MIXP_ERR_ARGUMENT and no step. A GPU tells later, with the verdict at the latest,
 * and applies no step until it has told: mixp_scaler_update then returns it. */
MIXPREC_API mixp_tensor *mixp_embedding(mixp_context *ctx, mixp_tensor *table,
                                        mixp_tensor *ids);
/* KEEP. y[.., j, ..] = x[.., ids[.., j, ..], ..] along dim; ids (i32) has the rank of x, and its
 * other dimensions: a target's log-probability, say, of ids[rows, 1]. Errors as above. Ids that
 * meet add their gradients in order. */
MIXPREC_API mixp_tensor *mixp_gather(mixp_context *ctx, mixp_tensor *x, int dim,
                                     mixp_tensor *ids);
/* PROMOTE. mask ? a : b, with NumPy's broadcasting; the mask is u8 or i32, true where not 0.
 * masked_fill (KEEP): value where the mask is true, else x. */
MIXPREC_API mixp_tensor *mixp_where(mixp_context *ctx, mixp_tensor *mask, mixp_tensor *a,
                                    mixp_tensor *b);
MIXPREC_API mixp_tensor *mixp_masked_fill(mixp_context *ctx, mixp_tensor *x,
                                          mixp_tensor *mask, float value);
/* KEEP. Rotary position embedding of x[..., t, c] whose last dimension is heads of head_dim (even):
 * the pair i of a head at position first + t turns by the angle position * base^(-2i/head_dim).
 * Pairs are (i, i + head_dim/2), as in GPT-NeoX and Llama, or (2i, 2i + 1) when interleaved. Zero
 * base: 10000. */
typedef struct mixp_rope_desc {
    int     head_dim;
    int     interleaved;
    double  base;               /* 0 = 10000                                               */
    int64_t first;              /* position of the first of t                              */
} mixp_rope_desc;
MIXPREC_API mixp_tensor *mixp_rope(mixp_context *ctx, mixp_tensor *x,
                                   const mixp_rope_desc *desc);
/* KEEP. p in [0, 1): the share dropped. training 0: returns x. */
MIXPREC_API mixp_tensor *mixp_dropout(mixp_context *ctx, mixp_tensor *x, float p,
                                      int training);

/* F32. Losses are f32 scalars, means over all elements (rows, for cross_entropy).
 * cross_entropy: logits[..., vocab], targets[...] i32; targets equal to `ignore` do not
 * count (PyTorch's default is -100: MIXP_IGNORE). */
#define MIXP_IGNORE (-100)
MIXPREC_API mixp_tensor *mixp_cross_entropy(mixp_context *ctx, mixp_tensor *logits,
                                            mixp_tensor *targets, int32_t ignore);
/* With label smoothing: the target counts 1 - smoothing, and all classes share the rest; in
 * [0, 1]. */
MIXPREC_API mixp_tensor *mixp_cross_entropy_smooth(mixp_context *ctx, mixp_tensor *logits,
                                                   mixp_tensor *targets, int32_t ignore,
                                                   float smoothing);
MIXPREC_API mixp_tensor *mixp_mse(mixp_context *ctx, mixp_tensor *x, mixp_tensor *target);
MIXPREC_API mixp_tensor *mixp_bce_with_logits(mixp_context *ctx, mixp_tensor *x,
                                              mixp_tensor *target);
/* |d|, d = x - target, of slope 0 at 0. huber: d^2 / 2 where |d| < delta, else delta (|d| -
 * delta / 2), delta > 0; smooth_l1 is huber over its bound beta, and l1 where that is 0. */
MIXPREC_API mixp_tensor *mixp_l1(mixp_context *ctx, mixp_tensor *x, mixp_tensor *target);
MIXPREC_API mixp_tensor *mixp_smooth_l1(mixp_context *ctx, mixp_tensor *x,
                                        mixp_tensor *target, float beta);
MIXPREC_API mixp_tensor *mixp_huber(mixp_context *ctx, mixp_tensor *x, mixp_tensor *target,
                                    float delta);
/* KL(target || x) over the last dimension, x log-probabilities (mixp_log_softmax) and target
 * probabilities, or with log_target 1 their logarithms; the mean over rows, which for a matrix is
 * PyTorch's "batchmean". */
MIXPREC_API mixp_tensor *mixp_kl_div(mixp_context *ctx, mixp_tensor *x, mixp_tensor *target,
                                     int log_target);
/* BANNED under autocast: use mixp_bce_with_logits. x: probabilities. */
MIXPREC_API mixp_tensor *mixp_bce(mixp_context *ctx, mixp_tensor *x, mixp_tensor *target);

/* KEEP. cast: to f32, f16 or bf16. reshape: same memory, one dimension may be -1.
 * transpose swaps two dimensions (negative counts from the end) and copies. */
MIXPREC_API mixp_tensor *mixp_cast(mixp_context *ctx, mixp_tensor *x, mixp_dtype dtype);
MIXPREC_API mixp_tensor *mixp_reshape(mixp_context *ctx, mixp_tensor *x, int rank,
                                      const int64_t *shape);
MIXPREC_API mixp_tensor *mixp_transpose(mixp_context *ctx, mixp_tensor *x, int dim0,
                                        int dim1);
/* PROMOTE. Joins n tensors along dim; the other dimensions must be equal. */
MIXPREC_API mixp_tensor *mixp_concat(mixp_context *ctx, int n, mixp_tensor *const *x,
                                     int dim);
/* KEEP. A copy of [first, first + count) along dim, of any dtype. A negative dim or first counts
 * from the end: mixp_slice(ctx, x, 1, -1, 1) is the last column. */
MIXPREC_API mixp_tensor *mixp_slice(mixp_context *ctx, mixp_tensor *x, int dim,
                                    int64_t first, int64_t count);
/* Fills parts[n] with n slices of equal size, in order; on an error with NULL. */
MIXPREC_API mixp_result mixp_split(mixp_context *ctx, mixp_tensor *x, int dim, int n,
                                   mixp_tensor **parts);

/* The rows behind them, for mixp_autocast_override and mixp_apply. */
typedef enum mixp_op_id {
    MIXP_OP_LINEAR, MIXP_OP_MATMUL, MIXP_OP_ATTENTION, MIXP_OP_ADD, MIXP_OP_SUB, MIXP_OP_MUL,
    MIXP_OP_DIV, MIXP_OP_SCALE, MIXP_OP_RELU, MIXP_OP_GELU, MIXP_OP_GELU_TANH, MIXP_OP_SILU,
    MIXP_OP_TANH, MIXP_OP_SIGMOID, MIXP_OP_SQRT, MIXP_OP_EXP, MIXP_OP_LOG, MIXP_OP_POW,
    MIXP_OP_SUM, MIXP_OP_MEAN, MIXP_OP_SOFTMAX, MIXP_OP_LOG_SOFTMAX, MIXP_OP_LAYER_NORM,
    MIXP_OP_RMS_NORM, MIXP_OP_EMBEDDING, MIXP_OP_DROPOUT, MIXP_OP_CROSS_ENTROPY, MIXP_OP_MSE,
    MIXP_OP_BCE_WITH_LOGITS, MIXP_OP_BCE, MIXP_OP_CAST, MIXP_OP_RESHAPE, MIXP_OP_TRANSPOSE,
    MIXP_OP_CONCAT, MIXP_OP_SLICE,
    MIXP_OP_NEG, MIXP_OP_ABS, MIXP_OP_SIN, MIXP_OP_COS, MIXP_OP_CLAMP, MIXP_OP_RELU_SQUARED,
    MIXP_OP_SOFT_CAP, MIXP_OP_MAXIMUM, MIXP_OP_MINIMUM, MIXP_OP_SWIGLU, MIXP_OP_SWIGLU_PACKED,
    MIXP_OP_L1, MIXP_OP_SMOOTH_L1, MIXP_OP_HUBER, MIXP_OP_KL_DIV, MIXP_OP_MAX, MIXP_OP_ARGMAX,
    MIXP_OP_GATHER, MIXP_OP_WHERE, MIXP_OP_MASKED_FILL, MIXP_OP_ROPE,
    MIXP_OP_COUNT
} mixp_op_id;
/* The row of a built-in operator: MIXP_OP_LINEAR, ... NULL for an unknown id. */
MIXPREC_API const mixp_op *mixp_op_builtin(mixp_op_id id);

/* ==== 9. SCALER ========================================================= >>scaler ====
 *
 * Dynamic loss scaling as in torch.amp.GradScaler. The numbers are a small block of device
 * memory that one pure function advances. Whatever the rule: the scale stays where it and its
 * reciprocal are finite normal numbers (growth past 2^126 is left out, backoff stops at 2^-126);
 * gradients that only become non-finite when they are unscaled count as found_inf.
 *
 * The order is: scale, backward, [unscale, [clip]], step, update. Backward marks each gradient with
 * the scaler, and with which of its scales, it was multiplied by; whoever uses it looks there. So
 * any number of scalers and optimizers may share a context, with or without each other, and a
 * gradient is unscaled by its own scale, though the scaler went on meanwhile (MIXP_PAST_SCALES
 * times at most). What cannot be unscaled is MIXP_ERR_ORDER: a gradient into which two scales were
 * added, one scaled by two scalers, one that a step has used before the last update. Gradients
 * in views of yours bear no mark: they count as scaled by the scale in force.
 */
typedef enum mixp_scaler_preset {
    MIXP_RULE_TORCH,            /* torch.amp.GradScaler, bit for bit                       */
    MIXP_RULE_STATIC,           /* the scale never changes                                 */
    MIXP_RULE_APEX,             /* apex.amp: ceiling 2^24                                  */
    MIXP_RULE_APEX_HYSTERESIS,  /* apex update_scale_hysteresis: refilled by a clean step  */
    MIXP_RULE_DEEPSPEED,        /* 2^32, every 1000, floor 1; since 0.17.1: after an overflow, and
                                   at first, it grows one step later. One factor, see below */
    MIXP_RULE_MEGATRON,         /* 2^32, every 1000, floor 1, hysteresis 2                 */
    MIXP_RULE_TENSORFLOW,       /* 2^15, floor 1; one factor                               */
    MIXP_RULE_KERAS,            /* 2^15, no floor                                          */
    MIXP_RULE_PADDLE,           /* hysteresis counts consecutive overflows; no floor, as in dynamic
                                   graphs: with min_scale 1 it is the static graphs' rule  */
    MIXP_RULE_JMP,              /* 2^15, floor 1; one factor                               */
    MIXP_RULE_MODULUS,          /* every 100 while the scale is at most 2^6; ceiling 2^30  */
    MIXP_RULE_COLOSSALAI,       /* Megatron's from 2^16, between 1 and 2^32                */
    MIXP_RULE_COUNT
} mixp_scaler_preset;

/* Zero in any field (in C++ start with `= {}`) = the rule's own value; MIXP_RULE_TORCH's here.
 * Where a rule has one factor, backoff divides by growth_factor unless backoff_factor is given.
 * Where its system keeps factors in f32 (Megatron, ColossalAI, Paddle, Modulus, TensorFlow, jmp)
 * they are rounded to f32 here too: of those that are no powers of two the products then agree. */
typedef struct mixp_scaler_desc {
    mixp_scaler_preset rule;
    float     init_scale;       /* 0 = 65536                                               */
    double    growth_factor;    /* 0 = 2                                                   */
    double    backoff_factor;   /* 0 = 0.5                                                 */
    int       growth_interval;  /* 0 = 2000 clean steps                                    */
    int       hysteresis;       /* 0 = 1: the first overflow already backs off             */
    float     min_scale, max_scale; /* 0 = the rule's own floor and ceiling                */
    int       max_floor_skips;  /* 0 = 20 in a row at min_scale: MIXP_ERR_DIVERGED; negative =
                                   never. From 65536 it takes 142 skips to 2^-126, 16 to 1 */
    int       disabled;         /* 1: scale is 1, every step is applied                    */
    int       recovery_interval; /* 0 = the rule's (Modulus': 100): the growth interval while the */
    float     recovery_scale;   /* scale is at most this; 0 = the rule's own: 64, others never */
} mixp_scaler_desc;

/* The rule behind a description; MIXP_ERR_ARGUMENT when a field is out of range. Pure. */
MIXPREC_API mixp_result mixp_scaler_rule_resolve(const mixp_scaler_desc *desc,
                                                 mixp_scaler_rule *rule);

typedef struct mixp_scaler    mixp_scaler;
typedef struct mixp_optimizer mixp_optimizer;

/* desc NULL = all defaults. NULL on error: growth_factor <= 1, backoff_factor outside (0,1),
 * a negative interval, a scale whose value or reciprocal is not a normal number, NaN, an
 * init_scale outside [min_scale, max_scale]. */
MIXPREC_API mixp_scaler *mixp_scaler_new(mixp_context *ctx, const mixp_scaler_desc *desc);

/* loss * scale, as f32 when loss is low; recorded, so that backward sees it. The loss itself
 * when disabled. Gradients of it are scaled until mixp_scaler_unscale: clipping them or stepping
 * without the scaler is MIXP_ERR_ORDER. So is a scaler that steps the gradients of a loss that was
 * not scaled (MIXP_RULE_STATIC may: it takes them as they are). */
MIXPREC_API mixp_tensor *mixp_scaler_scale(mixp_scaler *scaler, mixp_tensor *loss);
/* Sets the scale to a new value instead; needs no step before it, keeps the growth tracker.
 * Gradients that were made before are still unscaled by the scale that they have. */
MIXPREC_API mixp_result mixp_scaler_update_to(mixp_scaler *scaler, float new_scale);
/* The scale; waits for the device. 1 when disabled. */
MIXPREC_API float mixp_scaler_loss_scale(const mixp_scaler *scaler);

/* Changes of a running scaler, as PyTorch's set_growth_factor and its kin: the desc's field
 * is replaced where the new one is not 0; the scale stays (mixp_scaler_update_to sets it).
 * MIXP_ERR_ARGUMENT as in mixp_scaler_new, or init_scale or disabled given. */
MIXPREC_API mixp_result mixp_scaler_change(mixp_scaler *scaler,
                                           const mixp_scaler_desc *desc);

/* PyTorch's state_dict and load_state_dict. Waits for the device. A disabled scaler saves
 * zeros and ignores a load. MIXP_ERR_ARGUMENT: a saved state with scale 0 (of a disabled
 * scaler), or fields that are out of range; the scaler is then as it was. */
typedef struct mixp_scaler_saved {
    double  growth_factor, backoff_factor;
    float   scale;
    int32_t growth_interval, growth_tracker, hysteresis_left;
} mixp_scaler_saved;
MIXPREC_API mixp_result mixp_scaler_save(const mixp_scaler *scaler,
                                         mixp_scaler_saved *out);
MIXPREC_API mixp_result mixp_scaler_load(mixp_scaler *scaler,
                                         const mixp_scaler_saved *in);

/* ==== 10. OPTIMIZERS ================================================= >>optimizers ====
 *
 * One pass over all gradients gathers found_inf, norm and largest value; one over all parameters
 * unscales, clips, updates moments and f32 master weights, and writes the low copies.
 * Hyper-parameters are double; moments and master weights are f32. Without fast-math, steps
 * give the same bits on every instruction set, at any number of threads.
 */
/* Fill with mixp_adamw_defaults: beta1 = 0 is legal, so 0 is no default. */
typedef struct mixp_adamw_desc {
    double        lr;           /* 1e-3                                                    */
    double        beta1, beta2; /* 0.9, 0.999                                              */
    double        eps;          /* 1e-8, outside the root, after bias correction           */
    double        weight_decay; /* 0.01, decoupled: lr times it is taken off the weight    */
    double        max_norm;     /* clip by global norm inside the step; 0 = off            */
    mixp_adam_order order;      /* MIXP_ADAM_ORDER_TORCH                                   */
    int           no_master;    /* 0: f16 and bf16 parameters get an f32 master weight     */
    int           zero_grad;    /* 1: each step clears them, as mixp_zero_grad does        */
    mixp_schedule schedule;     /* constant                                                */
} mixp_adamw_desc;
MIXPREC_API mixp_adamw_desc mixp_adamw_defaults(void);

/* Adam's fields are AdamW's, but its decay joins the gradient, and is 0 by default. A type of its
 * own, so that AdamW's defaults cannot decay an Adam's weights. */
typedef struct mixp_adam_desc {
    double        lr;           /* 1e-3                                                    */
    double        beta1, beta2; /* 0.9, 0.999                                              */
    double        eps;          /* 1e-8                                                    */
    double        weight_decay; /* 0                                                       */
    double        max_norm;     /* 0 = off                                                 */
    mixp_adam_order order;      /* MIXP_ADAM_ORDER_TORCH                                   */
    int           no_master, zero_grad;     /* as above                                    */
    mixp_schedule schedule;
} mixp_adam_desc;
MIXPREC_API mixp_adam_desc mixp_adam_defaults(void);

typedef struct mixp_sgd_desc {
    double        lr;           /* 1e-3                                                    */
    double        momentum, dampening, weight_decay;    /* 0                               */
    int           nesterov;     /* 0; 1 needs momentum and no dampening                    */
    double        max_norm;     /* 0 = off                                                 */
    int           no_master, zero_grad;     /* as above                                    */
    mixp_schedule schedule;
} mixp_sgd_desc;
MIXPREC_API mixp_sgd_desc mixp_sgd_defaults(void);

/* An optimizer without parameters. NULL on error: a hyper-parameter that is NaN, negative or
 * out of range (betas in [0,1), eps >= 0). */
MIXPREC_API mixp_optimizer *mixp_adamw_new(mixp_context *ctx,
                                           const mixp_adamw_desc *desc);
MIXPREC_API mixp_optimizer *mixp_adam_new(mixp_context *ctx, const mixp_adam_desc *desc);
MIXPREC_API mixp_optimizer *mixp_sgd_new(mixp_context *ctx, const mixp_sgd_desc *desc);

/* Opens a group that later mixp_optimizer_add calls go to; group 0 is the description's.
 * Returns its index, or -1 on error (more than MIXP_MAX_GROUPS, values out of range). */
MIXPREC_API int mixp_optimizer_add_group(mixp_optimizer *opt,
                                         const mixp_param_group *group);
/* Reads or changes a group at any time: by hand, or by a schedule of your own. */
MIXPREC_API mixp_result mixp_optimizer_group(const mixp_optimizer *opt, int index,
                                                 mixp_param_group *out);
MIXPREC_API mixp_result mixp_optimizer_set_group(mixp_optimizer *opt, int index,
                                                 const mixp_param_group *group);

/* Adds a parameter (f32, f16 or bf16) to the newest group. grad NULL: the gradient that
 * backward fills, left alone in a step that gave it none (as PyTorch's None; bias correction
 * counts the steps of each parameter). Otherwise a view of yours with the same count, which
 * you fill, always taken as given. Master weights follow the parameter when you write it.
 * MIXP_ERR_ARGUMENT: added before. */
MIXPREC_API mixp_result mixp_optimizer_add(mixp_optimizer *opt, mixp_tensor *param,
                                           mixp_tensor *grad);

/* Forgets the gradients of all parameters (a view of yours is cleared to 0). With zero_grad in
 * the description each step does so itself, a view in the pass that reads it: for programs that
 * accumulate into buffers of their own. A skipped step clears them too, for an Inf would stay in
 * the next sum; it touches nothing else. No other parameter of any optimizer may share it. */
MIXPREC_API mixp_result mixp_zero_grad(mixp_optimizer *opt);

/* Applied steps, and the learning rate of a group's next step. Both wait for the device. */
MIXPREC_API int64_t mixp_optimizer_applied(const mixp_optimizer *opt);
MIXPREC_API double  mixp_optimizer_lr(const mixp_optimizer *opt, int group);

/* ==== 11. STEP ============================================================ >>step ====
 *
 * Unscale, clip, step, update, in this order: who may do what with which gradients is read from the
 * gradients' own marks. Then the verdict: what became of the step, and why.
 */

/* Divides the gradients of opt by their scale, in place, and looks for Inf and NaN. At most
 * once before each step: MIXP_ERR_ORDER, as when no parameter has a gradient. */
MIXPREC_API mixp_result mixp_scaler_unscale(mixp_scaler *scaler, mixp_optimizer *opt);
/* Steps opt unless its gradients are non-finite; unscales first (without writing gradients)
 * when mixp_scaler_unscale was not called. Gradients that you changed after unscaling are
 * looked at again. MIXP_ERR_ORDER: called twice before an update, or no gradient at all; a
 * call that fails changes nothing. A skipped step is MIXP_OK: see mixp_scaler_verdict. */
MIXPREC_API mixp_result mixp_scaler_step(mixp_scaler *scaler, mixp_optimizer *opt);
/* Advances the scale once for all optimizers stepped or unscaled since the last update, and
 * makes them ready again. MIXP_ERR_ORDER: there is none. MIXP_ERR_DIVERGED: max_floor_skips
 * skips in a row at the lowest scale; the message names the first bad tensor. */
MIXPREC_API mixp_result mixp_scaler_update(mixp_scaler *scaler);

/* Scales the gradients, in place, so that their global norm is at most max_norm:
 * coefficient min(1, max_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_. Leaves
 * them alone when one is non-finite. MIXP_ERR_ORDER: no gradient, or the loss was scaled and
 * mixp_scaler_unscale has not been called. */
MIXPREC_API mixp_result mixp_clip_grad_norm(mixp_optimizer *opt, double max_norm);

/* A step without a scaler. Applies whatever the gradients are, as PyTorch does; for a finite
 * check without scaling use a scaler of MIXP_RULE_STATIC with init_scale 1. MIXP_ERR_ORDER:
 * no gradient at all, or scaled ones that mixp_scaler_unscale has not seen. */
MIXPREC_API mixp_result mixp_optimizer_step(mixp_optimizer *opt);

/* NONE: there was no step yet. */
typedef enum mixp_outcome {
    MIXP_STEP_NONE,
    MIXP_STEP_APPLIED,
    MIXP_STEP_SKIPPED
} mixp_outcome;

/* Where the first non-finite value of a skipped step arose. Only a guard tells; see WATCH. */
typedef enum mixp_origin {
    MIXP_ORIGIN_UNKNOWN,        /* no guard, or the step was not sampled: the next one is */
    MIXP_ORIGIN_FORWARD,        /* in what `site` stored, of finite inputs */
    MIXP_ORIGIN_BACKWARD,       /* in a gradient of `site`: the loss scale is too large */
    MIXP_ORIGIN_UNSCALE,        /* only when gradients were unscaled */
    MIXP_ORIGIN_LOSS,           /* in the loss, which `site` made of finite activations */
    MIXP_ORIGIN_WEIGHT,         /* a weight that `site` reads is not finite */
    MIXP_ORIGIN_INPUT,          /* the batch: an input tensor that `site` reads */
    MIXP_ORIGIN_COUNT
} mixp_origin;

/* A sentence on it for people: what it means, and what to do. A constant string. */
MIXPREC_API const char *mixp_origin_text(mixp_origin origin);

/* What became of one optimizer step. */
typedef struct mixp_verdict {
    mixp_outcome outcome;
    int64_t      step;          /* which step of this optimizer, skipped ones counted      */
    int64_t      applied, skipped;  /* how many so far, in all                             */
    float        scale;         /* the scale that step used; 1 without a scaler            */
    double       grad_norm;     /* of the true gradients, before clipping; Inf or NaN as they
                                   are; NaN when not gathered (no scaler, no max_norm)     */
    float        largest, clip; /* largest finite |gradient|; the coefficient applied      */
    double       lr;            /* of group 0, as used                                     */
    const char  *bad_tensor;    /* with a non-finite gradient, the first added; NULL = none */
    int64_t      bad_element;   /* an overflow nearer the loss often arrives here as NaN   */
    int          bad_is_nan;    /* 1 NaN, 0 Inf                                            */
    mixp_origin  origin;        /* of a skip: where it began */
    const char  *site;          /* its site's name, "" for none; as long as the context */
} mixp_verdict;

/* The newest verdict: of an optimizer, or of the optimizer that the scaler stepped last (a
 * skipped one, if any was skipped since the last update). Never waits; on a GPU it may be
 * of an earlier step. */
MIXPREC_API mixp_verdict mixp_optimizer_verdict(const mixp_optimizer *opt);
MIXPREC_API mixp_verdict mixp_scaler_verdict(const mixp_scaler *scaler);

/* ==== 12. WATCH =========================================================== >>watch ====
 *
 * A guard watches what operators store, and lets those fall back to f32 that overflow their low
 * dtype or flush too much of it to zero, for no loss scale cures that. Every change is an event.
 *
 * A site is one application of an operator that comes again in every step: the same operator, on
 * the same parameters and on what the same sites made. Passes over other data in one step are the
 * same sites again; an `if` in the program changes only those behind it. Its name is that of its
 * parameter, else of its scope, else of the site that it reads: "h.3.mlp.proj.w: linear",
 * "h.3: add"; where several have one name, "h.3: add #2".
 *
 * In a sampled step, one in `every` and each that follows a skip, a kernel looks at what each site
 * stores and at its gradient; in no other step anything is looked at. On a GPU what was found stays
 * there, and is read two steps later.
 *
 * A site falls back when it stores a non-finite value though its inputs are finite, or more than
 * `high` of the largest number of its dtype, or when too large a share of it is flushed: it stores
 * f32 from then on. So do, at levels 2 and 3, the operators of the classes KEEP and PROMOTE that
 * read it (at level 1 they do by themselves), and a product reads it as it is: f32, with a low
 * weight. It comes back after `clean` samples in a row that lie below `low_again`; after each
 * relapse it takes twice as many. While a guard is on, a skip that began in the forward pass leaves
 * the loss scale as it is. With none, nothing here is called, and nothing is allocated.
 */

/* Zero in any field = the default. */
typedef struct mixp_guard_desc {
    int     every;              /* 0 = 16: one step in so many is sampled; at most 2^20 */
    int     clean;              /* 0 = 4 samples until a site is low again; at most 2^20 */
    float   high;               /* 0 = 0.25 of the dtype's largest number; below 1 */
    float   low_again;          /* 0 = 0.0625 of it; below high */
    float   flushed;            /* 0 = 0.02 of the values that are not 0; at most 1 */
    int     patience;           /* 0 = 20 skips in a row that began forward, with nothing left to
                                   fall back: MIXP_ERR_DIVERGED; negative = never */
    int     max_sites;          /* 0 = 4096; more are not watched, and an event says so */
} mixp_guard_desc;

/* Turns the guard on, or changes its settings: what it knows of its sites is kept. desc NULL = all
 * defaults. Between steps: MIXP_ERR_ORDER when a region or a scope is open. MIXP_ERR_ARGUMENT: a
 * field is out of range, or max_sites another than at first. MIXP_ERR_DEVICE: the device has no
 * kernel for it. Nothing changes then. */
MIXPREC_API mixp_result mixp_guard_start(mixp_context *ctx, const mixp_guard_desc *desc);
/* Turns it off: every site stores what autocast says. Started again, it remembers. MIXP_ERR_ORDER
 * as above. */
MIXPREC_API mixp_result mixp_guard_stop(mixp_context *ctx);
/* 1: the next step is to be a sampled one: do not replay a graph instead. */
MIXPREC_API int mixp_guard_due(const mixp_context *ctx);

/* Holds the sites whose name, or the part of it before ": ", fits the pattern (* stands for any
 * characters, ? for one; a copy is kept). MIXP_F32: they store f32. MIXP_F16 or MIXP_BF16: they
 * store what autocast says and never fall back. MIXP_DTYPE_COUNT: they are free again. The newest
 * pattern that fits counts; at most 64. Before or during training, on or off.
 * MIXP_ERR_ARGUMENT: another dtype, too long (95 characters), too many, or no site has such a name:
 * told here when sites are known, else, as the context's error, after the first sampled step.
 * MIXP_ERR_ORDER: a region or a scope is open. */
MIXPREC_API mixp_result mixp_guard_pin(mixp_context *ctx, const char *pattern,
                                       mixp_dtype dtype);

typedef enum mixp_event_kind {
    MIXP_EVENT_OVERFLOW,        /* the site stored a non-finite value: it stores f32 now */
    MIXP_EVENT_HIGH,            /* its largest came near the end of the range: likewise */
    MIXP_EVENT_FLUSHED,         /* too large a share was flushed to zero: likewise */
    MIXP_EVENT_BACK,            /* clean for long enough: it stores low again */
    MIXP_EVENT_PINNED,          /* a pattern fits it */
    MIXP_EVENT_SKIP,            /* a step was skipped: `origin` and `site` say where it began */
    MIXP_EVENT_FULL,            /* max_sites is reached: further ones are not watched */
    MIXP_EVENT_COUNT
} mixp_event_kind;

typedef struct mixp_event {
    int64_t         number;     /* 0, 1, 2, ... since the guard was first started */
    int64_t         step;       /* of the context, that was looked at */
    mixp_event_kind kind;
    const char     *what;       /* the kind, in words: a constant string */
    const char     *site;       /* its name, "" for none */
    mixp_dtype      dtype;      /* what the site stores from now on */
    float           largest;    /* what was seen */
    double          flushed;    /* share of the values that are not 0 */
    int64_t         nonfinite;
    mixp_origin     origin;     /* of a skip */
} mixp_event;

/* Event i of those still kept, oldest first, until it returns 0: the newest 1024. Like all that
 * reads what the guard knows, it does not wait for the device. */
MIXPREC_API int mixp_guard_event(const mixp_context *ctx, int i, mixp_event *out);

typedef struct mixp_site_info {
    const char *name, *op;
    mixp_dtype  dtype;          /* what it stored when it was applied last */
    int         fallen;         /* 1: it fell back */
    int         pinned;         /* 1: a pattern holds it */
    int         falls;          /* how often it fell back */
    int         clean;          /* clean samples since; it comes back at `clean_needed` */
    int         clean_needed;
    int64_t     samples;        /* how often it was looked at */
    mixp_look   value, grad;    /* of the newest sample: what it stored, and its gradient, as
                                   multiplied by the loss scale */
} mixp_site_info;

/* Site i, in the order of their first application, until it returns 0. */
MIXPREC_API int mixp_site(const mixp_context *ctx, int i, mixp_site_info *out);

/* Of a look: the share of values that are not 0 which their low dtype flushes to zero (where x is
 * stored low already, as `least` tells), and which are subnormal there. */
MIXPREC_API double mixp_look_flushed(const mixp_look *look, int stored_low);
MIXPREC_API double mixp_look_subnormal(const mixp_look *look);

/* do { mixp_step_begin(ctx); ... mixp_scaler_update(scaler); } while (mixp_retry(scaler, 3));
 * 1: the newest update skipped its step, and it is worth another try with the same batch: at the
 * new scale, or with a site fallen back; at most `times` in a row, at least 1. The random step does
 * not move: dropout draws what it drew, as long as the same operators are applied. 0: go on. With a
 * guard on, the retry is sampled, and a step whose batch or weights are not finite is not retried.
 * Works without a guard, too. Waits for the device. */
MIXPREC_API int mixp_retry(mixp_scaler *scaler, int times);

/* How far a site's results lie apart in two runs. */
typedef struct mixp_difference {
    const char *site;
    mixp_dtype  dtype_a, dtype_b;
    double      relative;       /* |a - b| / |b|, Euclidean norms; Inf where b is 0 or a value of
                                   either is not finite */
    double      largest;        /* of |a - b| */
    double      cosine;         /* of the angle between them; 1 where both are 0 */
    double      grad_relative, grad_largest, grad_cosine;   /* the same of its gradient */
    int         has_grad;
} mixp_difference;

typedef struct mixp_compare_desc {
    mixp_autocast a, b;         /* b: what a is compared with, say { MIXP_F32, 0 } */
    mixp_tensor *(*fn)(mixp_context *ctx, void *user);  /* forward: the loss; opens no region */
    void  *user;
    float  scale;               /* of the loss; 0 = 1. Gradients are compared without it */
} mixp_compare_desc;

/* Runs fn in a step under a and one under b, on the same batch and weights, each forward and back,
 * and writes the sites that both have to rows, the largest `relative` first: as many as there is
 * `room` for; *n: how many there are. Needs no guard; one that is on stays as it is, and what has
 * fallen back counts in both runs. Weights, loss scale, random numbers and the step count stay as
 * they were; gradients of parameters are forgotten. Takes host memory for what all sites make, and
 * gives it back. MIXP_ERR_ORDER: a region is open, or fn drops out: dropout would draw other numbers
 * in each; pass training 0. MIXP_ERR_ARGUMENT: no fn, room or n, or settings out of range. */
MIXPREC_API mixp_result mixp_compare(mixp_context *ctx, const mixp_compare_desc *desc,
                                     mixp_difference *rows, int64_t room, int64_t *n);

/* ==== 13. CHECKPOINT ================================================ >>checkpoint ====
 *
 * One safetensors file holds weights, master weights, optimizer state, scaler, random-number
 * state, counters and values of yours. Other tools see a model: the weights stand under their
 * parameters' names; the rest is "optimizer.0.m.NAME", "scaler.scale", "mixprec.step",
 * "value.NAME" and so on, numbers as 0-d tensors, bit for bit.
 *
 * Saving writes a temporary file (.NAME.PID.0.tmp) beside the target, flushes it to the disk,
 * sees that it is as long as it should be, renames it and flushes the folder: after a crash, a
 * power cut, a full disk or a system that loses bytes, the old file or the new one is there,
 * never half of either. A symbolic link to a file stays one (one that leads nowhere is replaced),
 * an existing file keeps its mode; another hard link to it keeps the old content. A process that
 * is killed while saving leaves its temporary file for you to remove. Big-endian machines get
 * MIXP_ERR_DEVICE.
 * Without POSIX (Windows, or MIXPREC_NO_POSIX defined beside the implementation) plain stdio
 * does it: temporary file NAME.tmp, no flush to the disk, and where rename does not replace
 * a file, a crash between removing the old and renaming the new leaves the new one as NAME.tmp.
 * There any error of stdio's is MIXP_ERR_IO, a file whose length cannot be found, too.
 */

/* Values of the caller that are saved and restored with the rest: a data position, say. */
typedef struct mixp_checkpoint_value {
    const char *name;
    mixp_dtype  dtype;          /* one that safetensors has, as mixp_safetensors_write     */
    int64_t     count;          /* of elements, at least 1                                 */
    void       *data;           /* host memory                                             */
} mixp_checkpoint_value;

typedef struct mixp_checkpoint {
    mixp_context          *ctx;            /* its parameters, step count and seed          */
    mixp_scaler           *scaler;         /* NULL = none                                  */
    mixp_optimizer *const *optimizers;
    int                    n_optimizers;
    const mixp_checkpoint_value *values;
    int                    n_values;
} mixp_checkpoint;

/* Saves to path: every parameter of the context and every view that an optimizer trains, each with
 * a name of its own. Call it after mixp_scaler_update: no gradient is saved. Waits for the device.
 * MIXP_ERR_ARGUMENT: a name is missing or used twice. MIXP_ERR_ORDER: the scaler awaits its update.
 * MIXP_ERR_IO with the system's reason; whatever was at path is then as it was (but for one case,
 * which the message tells: the new file is there and its folder could not be flushed). */
MIXPREC_API mixp_result mixp_checkpoint_save(const char *path,
                                             const mixp_checkpoint *what);

/* Restores what mixp_checkpoint_save wrote, into a context, optimizers and scaler made the
 * same way; training goes on as if it had never stopped, to the bit. As in PyTorch, the
 * saved hyper-parameters of the optimizers' groups replace those in place: change them
 * afterwards. The scaler's rule and the schedules are the program's.
 * MIXP_ERR_IO, MIXP_ERR_FORMAT (malformed, no checkpoint, or a number that no save can have
 * written), MIXP_ERR_SHAPE or MIXP_ERR_DTYPE (another model: the message lists what differs, and
 * no memory was taken for its tensors); nothing is changed then. */
MIXPREC_API mixp_result mixp_checkpoint_load(const char *path,
                                             const mixp_checkpoint *what);

/* Loads the parameters of a context alone, by name, from a checkpoint of mixprec's (whose other
 * state is passed over) or from anybody's safetensors file: for inference and for fine-tuning.
 * Master weights follow. desc NULL: every parameter and every tensor must fit, with its dtype. */
typedef enum mixp_weight_fate {
    MIXP_WEIGHT_LOADED,
    MIXP_WEIGHT_CONVERTED,
    MIXP_WEIGHT_MISSING,        /* the file lacks the parameter, which stays as it is      */
    MIXP_WEIGHT_EXTRA           /* no parameter has the name of the file's tensor          */
} mixp_weight_fate;

typedef struct mixp_weights_desc {
    int   allow_missing, allow_extra;   /* 1: such is no error                             */
    int   convert;              /* 1: another floating-point dtype is no error: it is rounded to
                                   the parameter's, to nearest even                        */
    /* Called for each parameter, in the order of names, then for each extra tensor, once all is
     * loaded. NULL = none. */
    void (*tell)(void *user, const char *name, mixp_weight_fate fate);
    void *user;
} mixp_weights_desc;

/* MIXP_ERR_IO, MIXP_ERR_FORMAT, MIXP_ERR_SHAPE (shapes, missing and extra tensors) or
 * MIXP_ERR_DTYPE; the message lists what differs, and nothing is changed then. */
MIXPREC_API mixp_result mixp_checkpoint_load_weights(const char *path, mixp_context *ctx,
                                                     const mixp_weights_desc *desc);

/* --- safetensors files by themselves --- */

#define MIXP_MESSAGE_SIZE 256       /* enough for any message of the calls below           */

typedef struct mixp_st_entry {
    const char *name;
    const char *type;           /* the file's word: "F32", "BF16", ...; on writing, NULL = the
                                   one of dtype                                            */
    mixp_dtype  dtype;          /* MIXP_DTYPE_COUNT: BOOL, I8, I16, U16, U32, U64, C64 and the
                                   packed F4, F6_E2M3, F6_E3M2: bytes to pass on           */
    int         rank;
    int64_t     shape[MIXP_MAX_RANK];
    const void *data;           /* host memory; on reading, aligned to 64 bytes            */
    size_t      bytes;
} mixp_st_entry;

/* Writes n entries and metadata pairs (names and texts in UTF-8) to path, crash-safe. The
 * bytes depend on nothing but the content; they are those of the format's own library.
 * Other readers ask for the pair "format", "pt". What is wrong is written to error, which has
 * error_size bytes; NULL: nowhere. MIXP_ERR_ARGUMENT: a name that is NULL, used twice, not UTF-8
 * or "__metadata__", a metadata key used twice, or bytes that do not fit the shape.
 * MIXP_ERR_DTYPE: one that the format has not; mixprec's F6 and F4 take a byte an element, the
 * format's are packed: write them as U8. */
MIXPREC_API mixp_result mixp_safetensors_write(const char *path,
                                               const mixp_st_entry *entries, int64_t n,
                                               const char *const (*metadata)[2],
                                               int64_t n_metadata, char *error,
                                               size_t error_size);

/* Reads a whole file; *out is NULL on error. Takes no byte on trust: the header is checked, with
 * all sizes and offsets, before memory for tensors is allocated. MIXP_ERR_FORMAT: malformed, and
 * where; stricter than the format's own library: unknown keys of a tensor, a name or a metadata
 * key used twice, NUL in a name are errors, and of an empty tensor the other dimensions must
 * multiply to a size of 64 bits, wherever its 0 stands. MIXP_ERR_DTYPE, MIXP_ERR_SHAPE: a dtype
 * unknown to the format, a rank above MIXP_MAX_RANK. MIXP_ERR_IO: not a regular file, or
 * unreadable. */
typedef struct mixp_safetensors mixp_safetensors;
MIXPREC_API mixp_result mixp_safetensors_read(const char *path, mixp_safetensors **out,
                                              char *error, size_t error_size);
MIXPREC_API void        mixp_safetensors_free(mixp_safetensors *file);
MIXPREC_API int64_t     mixp_safetensors_count(const mixp_safetensors *file);
/* Entry i in the order of the data; by name; the metadata text of a key. NULL when there is
 * none. They live as long as the file. */
MIXPREC_API const mixp_st_entry *mixp_safetensors_at(const mixp_safetensors *file,
                                                     int64_t i);
MIXPREC_API const mixp_st_entry *mixp_safetensors_find(const mixp_safetensors *file,
                                                       const char *name);
MIXPREC_API const char *mixp_safetensors_metadata(const mixp_safetensors *file,
                                                  const char *key);

#ifdef __cplusplus
}   /* extern "C" */
#endif
#endif  /* MIXPREC_H_INCLUDED */

/* ==================================================================================== *
 *  Stop here if you only need the API: what follows is the implementation.             *
 * ==================================================================================== */
/* A comment `plant: NAME` marks a line in which tests/mutation_c.sh plants a fault, to see that a
 * test finds it. It moves with its line. */
#if defined(MIXPREC_IMPLEMENTATION) && !defined(MIXPI_PASS) && !defined(MIXPREC_IMPLEMENTATION_DONE)
#define MIXPREC_IMPLEMENTATION_DONE
#define MIXPI_IMPLEMENT 1

#include <float.h>
#include <stdarg.h>
#include <stdio.h>      /* vsnprintf for messages; files for checkpoints */
#include <stdlib.h>
#include <errno.h>

/* The kernels' bits are those of arithmetic in float: the x87, and gcc on s390x in its strict
 * modes, would compute in a wider type and round later. */
#if defined(FLT_EVAL_METHOD) && (FLT_EVAL_METHOD == 1 || FLT_EVAL_METHOD == 2)
#  error mixprec.h needs FLT_EVAL_METHOD 0: x86 -msse2 -mfpmath=sse, s390x -fexcess-precision=fast
#endif

/* POSIX calls write checkpoints where they exist: stdio cannot flush to the disk. */
#if !defined(MIXPREC_NO_POSIX) && (defined(__unix__) || defined(__APPLE__))
#  define MIXPI_POSIX 1
#  include <fcntl.h>
#  include <sys/stat.h>
#  include <time.h>
#  include <unistd.h>
#else
#  define MIXPI_POSIX 0
#endif

/* This file: it is included again to compile the kernels once per instruction set. */
#ifndef MIXPREC_SELF
#  define MIXPREC_SELF "mixprec.h"
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Does not compile unless the condition holds. */
#define MIXPI_STATIC_ASSERT(name, condition)                                              \
    struct mixpi_static_##name { char holds[(condition) ? 1 : -1]; }

#ifdef MIXPREC_ASSERT
#  define MIXPI_ASSERT(condition) MIXPREC_ASSERT(condition)
#else
#  define MIXPI_ASSERT(condition) ((void)0)
#endif

/* ==== 1. RESULTS (implementation) ===================================================== */

MIXPREC_API const char *mixp_result_text(mixp_result result) {
#define MIXPI_RESULT_TEXT(name, text) text,
    static const char *const texts[] = { MIXP_RESULTS(MIXPI_RESULT_TEXT) };
#undef MIXPI_RESULT_TEXT
    return (unsigned)result < MIXP_RESULT_COUNT ? texts[result] : "unknown result";
}

MIXPREC_API const char *mixp_version(void) { return MIXPREC_VERSION; }

/* ==== 2. FORMATS (implementation) ===================================================== */

MIXPREC_API size_t mixp_dtype_size(mixp_dtype dtype) {
#define MIXPI_DTYPE_BYTES(constant, name, bytes, e, m, bias, special) bytes,
    static const unsigned char size[] = { MIXP_DTYPES(MIXPI_DTYPE_BYTES) };
#undef MIXPI_DTYPE_BYTES
    return (unsigned)dtype < MIXP_DTYPE_COUNT ? size[dtype] : 0;
}

MIXPREC_API const char *mixp_dtype_name(mixp_dtype dtype) {
#define MIXPI_DTYPE_NAME(constant, name, bytes, e, m, bias, special) name,
    static const char *const names[] = { MIXP_DTYPES(MIXPI_DTYPE_NAME) };
#undef MIXPI_DTYPE_NAME
    return (unsigned)dtype < MIXP_DTYPE_COUNT ? names[dtype] : "?";
}

static int mixpi_real(mixp_dtype d) {
    return d == MIXP_F32 || d == MIXP_F16 || d == MIXP_BF16;
}

/* Is it converted by vectors? */
static int mixpi_has_vectors(mixp_dtype d)
{ return mixpi_real(d) || d == MIXP_F8_E4M3 || d == MIXP_F8_E5M2; }

static uint64_t mixpi_load_code(const void *p, size_t size) {
    uint16_t h;
    uint32_t u;
    uint64_t d;
    switch (size) {
    case 1:
        return *(const uint8_t *)p;
    case 2:
        memcpy(&h, p, 2);
        return h;
    case 4:
        memcpy(&u, p, 4);
        return u;
    default:
        memcpy(&d, p, 8);
        return d;
    }
}

static void mixpi_store_code(void *p, size_t size, uint64_t code) {
    uint16_t h = (uint16_t)code;
    uint32_t u = (uint32_t)code;
    switch (size) {
    case 1:
        *(uint8_t *)p = (uint8_t)code;
        break;
    case 2:
        memcpy(p, &h, 2);
        break;
    case 4:
        memcpy(p, &u, 4);
        break;
    default:
        memcpy(p, &code, 8);
    }
}

/* ==== 4. KERNELS (implementation) =====================================================
 *
 * Kernels are written once, in plain functions over vectors of 16 floats, and compiled once
 * per instruction set: the section between MIXPI_PASS and its #endif is included again for
 * each. MIXPI_P(name) gives a function its set's suffix.
 *
 * Where bits are promised, a product that feeds a sum is an explicit vfma: compilers may
 * contract the two-step form on one instruction set and not on another.
 */
#define MIXPI_CAT3(a, b, c) a##b##c
#define MIXPI_CAT(a, b, c)  MIXPI_CAT3(a, b, c)
#define MIXPI_P(name)       MIXPI_CAT(mixpi, _##name##_, MIXPI_SUFFIX)

#define MIXPI_BLOCK 1024        /* floats widened at a time: a few such buffers fit in L1  */
/* Goes through count elements from i = 0 on, n <= MIXPI_BLOCK at a time; declares i and n. */
#define MIXPI_BLOCKS(i, n, count)                                                         \
    for (int64_t i = 0, n; (n = mixpi_min(MIXPI_BLOCK, (count) - i)) > 0; i += MIXPI_BLOCK)

static void mixpi_parallel(const mixp_exec *x, int64_t tasks, mixp_task task, void *arg) {
    int64_t i;
    if (x->parallel && tasks > 1) { x->parallel(x->user, tasks, task, arg); return; }
    for (i = 0; i < tasks; i++) task(arg, i, 0);
}
static void *mixpi_scratch(const mixp_exec *x, size_t bytes)
{ return x->scratch ? x->scratch(x->user, bytes ? bytes : 1) : NULL; }
static int64_t mixpi_ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static int64_t mixpi_min(int64_t a, int64_t b) { return a < b ? a : b; }
/* May a kernel read a, write y? The second pair: or is it not there? */
static int mixpi_reads(mixp_in a) { return mixpi_real(a.dtype); }
static int mixpi_writes(mixp_out y) { return mixpi_real(y.dtype); }
static int mixpi_may_read(mixp_in a) { return !a.data || mixpi_real(a.dtype); }
static int mixpi_may_write(mixp_out y) { return !y.data || mixpi_real(y.dtype); }

/* The same from element i on. */
static mixp_in mixpi_in_at(mixp_in a, int64_t i)
{ return mixpi_in((const char *)a.data + (size_t)i * mixp_dtype_size(a.dtype), a.dtype); }
static mixp_out mixpi_out_at(mixp_out a, int64_t i) {
    a.data = (char *)a.data + (size_t)i * mixp_dtype_size(a.dtype);
    return a;
}

#define MIXPI_GRAIN 16384       /* elements that are worth a task of their own             */

/* Work that is cut into units: so many of them are a task. */
typedef void (*mixpi_unit)(const void *job, int64_t unit);
typedef struct mixpi_units {
    mixpi_unit  unit;
    const void *job;
    int64_t     count, per_task;
} mixpi_units;

static void mixpi_units_task(void *arg, int64_t index, int worker) {
    const mixpi_units *u = (const mixpi_units *)arg;
    int64_t i = index * u->per_task, end = mixpi_min(i + u->per_task, u->count);
    (void)worker;
    for (; i < end; i++) u->unit(u->job, i);
}

static void mixpi_each_unit(const mixp_exec *x, int64_t count, int64_t per_task,
                            mixpi_unit unit, const void *job) {
    mixpi_units u;
    u.unit = unit;
    u.job = job;
    u.count = count;
    u.per_task = per_task;
    mixpi_parallel(x, mixpi_ceil_div(count, per_task), mixpi_units_task, &u);
}

/* --- axes ---------------------------------------------------------------------------------
 * Of a shape, and how far one step along each goes in up to four arrays. Array 0 is the output.
 */
typedef struct mixpi_axes {
    int     rank, arrays;
    int64_t n[MIXP_MAX_RANK], s[4][MIXP_MAX_RANK];
} mixpi_axes;

static void mixpi_axes_swap(mixpi_axes *x, int i, int j) {
    mixpi_axes was = *x;
    int k;
    x->n[i] = was.n[j];
    x->n[j] = was.n[i];
    for (k = 0; k < x->arrays; k++) {
        x->s[k][i] = was.s[k][j];
        x->s[k][j] = was.s[k][i];
    }
}

/* Does axis `last` go on where axis i ends, in every array? */
static int mixpi_axes_adjoin(const mixpi_axes *x, int last, int i) {
    int k;
    if (last < 0) return 0;
    for (k = 0; k < x->arrays; k++)
        if (x->s[k][last] != x->s[k][i] * x->n[i]) return 0;  /* plant: axes_adjoin */
    return 1;
}

/* Drops axes of 1 and joins neighbours; one axis is left at least. */
static void mixpi_axes_join(mixpi_axes *x) {
    int i, k, rank = 0;
    for (i = 0; i < x->rank; i++) {
        int64_t n = x->n[i];
        if (n == 1) continue;
        if (mixpi_axes_adjoin(x, rank - 1, i)) n *= x->n[--rank];
        x->n[rank] = n;
        for (k = 0; k < x->arrays; k++) x->s[k][rank] = x->s[k][i];
        rank++;
    }
    if (rank == 0) {
        x->n[rank++] = 1;
        for (k = 0; k < x->arrays; k++) x->s[k][0] = 1;
    }
    x->rank = rank;
}

/* --- what conversions and copies are cut into --------------------------------------------- */

#define MIXPI_CONVERT_CHUNK 65536           /* elements of a task                          */
#define MIXPI_STREAM_BYTES  ((size_t)2 << 20)   /* output beyond this bypasses the caches  */

/* Any dtype to any, for pairs without vector code. `first`: element 0's, for random numbers. */
static void mixpi_convert_each(mixp_out dst, mixp_in src, int64_t n,
                               const mixp_rounding *r, uint64_t key, uint64_t first) {
    mixp_format from = mixp_format_of(src.dtype), to = mixp_format_of(dst.dtype);
    size_t in = mixp_dtype_size(src.dtype), out = mixp_dtype_size(dst.dtype), i;
    for (i = 0; i < (size_t)n; i++) {
        mixpi_number x =
            mixpi_unpack(from, mixpi_load_code((const char *)src.data + i * in, in));
        uint32_t random = r->stochastic ? mixp_random_at(key, first + i) : 0;
        uint64_t code = mixpi_pack(to, x, r->saturate, r->stochastic, random);
        mixpi_store_code((char *)dst.data + i * out, out, code);
    }
}

typedef struct mixpi_convert_job {
    const mixp_convert_args *k;
    int64_t  chunk;             /* elements of a task                                      */
    uint64_t key;               /* of random numbers                                       */
    int      plain;             /* to nearest even                                         */
    int      vector;            /* vector code serves this pair                            */
    int      pages;             /* stores bypass the caches, so many pages side by side    */
} mixpi_convert_job;

/* What one task of it does: n elements, of which the first has this index. */
typedef struct mixpi_convert_piece {
    mixp_out dst;
    mixp_in  src;
    int64_t  n, first;
} mixpi_convert_piece;

static mixpi_convert_piece mixpi_convert_piece_of(const mixpi_convert_job *c,
                                                  int64_t index) {
    mixpi_convert_piece p;
    int64_t i = index * c->chunk;
    p.dst = mixpi_out_at(c->k->dst, i);
    p.src = mixpi_in_at(c->k->src, i);
    p.n = mixpi_min(c->k->n - i, c->chunk);
    p.first = c->k->rounding.first + i;
    return p;
}

/* Does convert have work? What is wrong otherwise, or MIXP_OK with nothing to do, in *r. */
static int mixpi_convert_starts(const mixp_convert_args *k, mixp_result *r) {
    *r = MIXP_ERR_DTYPE;
    if (!mixp_dtype_size(k->dst.dtype) || !mixp_dtype_size(k->src.dtype)) return 0;
    *r = MIXP_ERR_ARGUMENT;
    if (k->n < 0 || k->dst.accumulate || (k->n && (!k->dst.data || !k->src.data)))
        return 0;
    *r = MIXP_OK;
    return k->n > 0;
}

/* Large and to or from f32: then loads and stores are all that takes time. */
static int mixpi_convert_streams(const mixp_convert_args *k) {
    size_t size = mixp_dtype_size(k->dst.dtype);
    return (k->dst.dtype == MIXP_F32) != (k->src.dtype == MIXP_F32) &&
           k->dst.data != k->src.data && (size_t)k->n * size > MIXPI_STREAM_BYTES &&
           (uintptr_t)k->dst.data % size == 0;
}

static void mixpi_convert_plan(mixpi_convert_job *c, const mixp_convert_args *k) {
    const mixp_rounding *r = &k->rounding;
    mixp_dtype to = k->dst.dtype, from = k->src.dtype;
    int in_place =
        k->dst.data == k->src.data && mixp_dtype_size(to) != mixp_dtype_size(from);
    c->k = k;
    c->key = mixp_random_key(r->seed, r->step, r->tensor);
    c->plain = !r->saturate && !r->stochastic;
    c->vector = to == from || (mixpi_has_vectors(to) && mixpi_has_vectors(from));
    c->pages = c->vector && c->plain && mixpi_convert_streams(k);
    /* In place and narrower, a later piece would overwrite what an earlier one still reads. */
    c->chunk = in_place ? k->n : MIXPI_CONVERT_CHUNK;
}

#define MIXPI_COPY_TILE 32      /* elements along each side, where a copy transposes       */

/* A copy is cut into tiles of the last two axes, and these are its units. Where both sides are
 * dense along the last, rows go straight across; otherwise the tile is gathered first, reading
 * along the axis that is densest in src, so that a transpose touches each cache line once. */
typedef struct mixpi_copy_job {
    mixp_out   dst;
    mixp_in    src;
    mixpi_axes axes;            /* array 0: dst, 1: src; at least two axes                 */
    int        dense;           /* both sides are, along the last axis                     */
    int64_t    tile_rows, tile_cols;    /* of a tile                                       */
    int64_t    down, across;    /* tiles along the last two axes                           */
    int64_t    tiles;           /* in all                                                  */
} mixpi_copy_job;

static int64_t mixpi_abs(int64_t a) { return a < 0 ? -a : a; }

/* Sorts the axes so that the one that is densest in dst is last, and joins those that both sides
 * walk through evenly; then the one that is densest in src goes second to last. At least two. */
static void mixpi_copy_axes(mixpi_axes *x) {
    const int64_t *d = x->s[0], *s = x->s[1];
    int i, j, best;
    for (i = 1; i < x->rank; i++)
        for (j = i; j > 0 && mixpi_abs(d[j - 1]) < mixpi_abs(d[j]); j--)
            mixpi_axes_swap(x, j, j - 1);
    mixpi_axes_join(x);
    if (x->rank == 1) {
        mixpi_axes_swap(x, 0, 1);
        x->n[0] = 1;
        x->rank = 2;
    }
    best = x->rank - 2;
    for (i = best - 1; i >= 0; i--)
        if (mixpi_abs(s[i]) < mixpi_abs(s[best])) best = i;
    if (s[x->rank - 1] != 1) mixpi_axes_swap(x, best, x->rank - 2);
}

static void mixpi_copy_plan(mixpi_copy_job *c, const mixp_copy_args *k) {
    size_t bytes = (size_t)k->rank * sizeof(int64_t);
    int i, last;
    memset(c, 0, sizeof *c);
    c->dst = k->dst;
    c->src = k->src;
    c->axes.rank = k->rank;
    c->axes.arrays = 2;
    memcpy(c->axes.n, k->shape, bytes);
    memcpy(c->axes.s[0], k->dst_strides, bytes);
    memcpy(c->axes.s[1], k->src_strides, bytes);
    mixpi_copy_axes(&c->axes);
    last = c->axes.rank - 1;
    c->dense = c->axes.s[0][last] == 1 && c->axes.s[1][last] == 1;
    c->tile_cols = c->tile_rows = MIXPI_COPY_TILE;
    if (c->dense) {
        c->tile_cols = mixpi_min(c->axes.n[last], MIXPI_GRAIN);
        c->tile_rows = 1 + MIXPI_GRAIN / c->tile_cols;
    }
    c->down = mixpi_ceil_div(c->axes.n[last - 1], c->tile_rows);
    c->across = mixpi_ceil_div(c->axes.n[last], c->tile_cols);
    c->tiles = c->down * c->across;
    for (i = 0; i < last - 1; i++) c->tiles *= c->axes.n[i];
}

/* Does copy have work? What is wrong otherwise, or MIXP_OK with nothing to do, in *r. */
static int mixpi_copy_starts(const mixp_copy_args *k, mixp_result *r) {
    int i, empty = 0, bits = k->dst.dtype == k->src.dtype && !k->dst.accumulate;
    *r = MIXP_ERR_DTYPE;
    if (!mixp_dtype_size(k->dst.dtype) || !mixp_dtype_size(k->src.dtype)) return 0;
    if (!bits && !(mixpi_real(k->dst.dtype) && mixpi_real(k->src.dtype))) return 0;
    *r = MIXP_ERR_SHAPE;
    if (k->rank < 0 || k->rank > MIXP_MAX_RANK) return 0;
    for (i = 0; i < k->rank; i++) {
        if (k->shape[i] < 0) return 0;
        empty |= k->shape[i] == 0;
    }
    *r = empty || (k->dst.data && k->src.data) ? MIXP_OK : MIXP_ERR_ARGUMENT;
    return !empty && *r == MIXP_OK;
}

/* --- maps and sums ----------------------------------------------------------------------- *
 * Every elementwise kernel is a map: out = fn(sources), each array with its own strides over
 * one shape. Axes that lie together are merged. A short last axis is merged with the one before
 * it even where an operand repeats along that ("periodic"): inner loops need long rows.
 *
 * A sum is a map whose output repeats. A unit of its work, cut by the shapes alone, is a run of
 * rows of one tile of the output: at most 128 rows in f32; then runs are added in double. So
 * the bits do not depend on threads, nor the error on the length. */
/* What a map computes from up to three sources a, b, c. Slopes (_D): of dy, then x or y. */
enum {
    MIXPI_FN_UNARY = 0,                                     /* + mixp_unary                */
    MIXPI_FN_UNARY_D = MIXPI_FN_UNARY + MIXP_UNARY_COUNT,   /* + mixp_unary                */
    MIXPI_FN_BINARY = MIXPI_FN_UNARY_D + MIXP_UNARY_COUNT,  /* + mixp_binary               */
    /* Of dy, a, b: the gradient of b in a / b. */
    MIXPI_FN_DIVISOR_D = MIXPI_FN_BINARY + MIXP_BINARY_COUNT,
    MIXPI_FN_LARGER_D,          /* of dy, x, y: the gradient of x in the larger of both    */
    MIXPI_FN_GATE_D,            /* of dy, a, b: the gradient of a in silu(a) b             */
    MIXPI_FN_WHERE,             /* of mask, a, b: mask ? a : b                             */
    MIXPI_FN_KEPT,              /* of mask, a: mask ? a : q                                */
    MIXPI_FN_MASKED,            /* of mask, b: mask ? q : b                                */
    MIXPI_FN_LOSS,                                          /* + mixp_loss_kind                 */
    MIXPI_FN_LOSS_D = MIXPI_FN_LOSS + MIXP_LOSS_COUNT,      /* + mixp_loss_kind                 */
    MIXPI_FN_COPY = MIXPI_FN_LOSS_D + MIXP_LOSS_COUNT       /* a itself, in sums           */
};

/* All of them, for the loops that are written once for each. A new one needs a case in
 * MIXPI_P(unary_value) and MIXPI_P(unary_slope), in binary_value or in loss_value and
 * loss_slope. */
#define MIXPI_UNARIES(X)  X(RELU) X(GELU_TANH) X(GELU_ERF) X(SILU) X(TANH) X(SIGMOID) X(EXP)   \
                          X(LOG) X(SQRT) X(POW) X(SCALE) X(RELU_SQUARED) X(ABS) X(SIN)         \
                          X(COS) X(SOFT_CAP) X(CLAMP)
#define MIXPI_BINARIES(X) X(ADD) X(SUB) X(MUL) X(DIV) X(MAXIMUM) X(MINIMUM) X(SWIGLU)
#define MIXPI_LOSSES(X)   X(MSE) X(BCE_LOGITS) X(BCE) X(L1) X(HUBER) X(SMOOTH_L1) X(KL)        \
                          X(KL_LOG)

#define MIXPI_ONE(name) + 1
MIXPI_STATIC_ASSERT(every_unary_has_a_case,
                    0 MIXPI_UNARIES(MIXPI_ONE) == MIXP_UNARY_COUNT);
MIXPI_STATIC_ASSERT(every_binary_has_a_case,
                    0 MIXPI_BINARIES(MIXPI_ONE) == MIXP_BINARY_COUNT);
MIXPI_STATIC_ASSERT(every_loss_has_a_case, 0 MIXPI_LOSSES(MIXPI_ONE) == MIXP_LOSS_COUNT);
#undef MIXPI_ONE

typedef struct mixpi_map {
    int        fn, sources;
    float      p, q;            /* of fn                                                   */
    mixp_out   y;
    mixp_in    a[3];
    mixpi_axes axes;            /* array 0: y, then the sources                            */
    int        periodic[4];     /* repeats along the last axis, every `period` elements    */
    int64_t    period, width;   /* width: elements of a block, a multiple of period        */
    int64_t    cols, blocks;    /* along the last axis                                     */
    int64_t    outputs, rows;   /* points of the outer axes that y has, and has not        */
} mixpi_map;

typedef struct mixpi_sum {
    mixpi_map map;
    float     factor;           /* of the result                                           */
    int       fold;             /* the last axis ends in out_cols outputs, and its blocks
                                   are rows as well                                        */
    int64_t   rows, out_cols;
    int64_t   tiles;            /* of the outputs, along the last axis                     */
    int64_t   run, runs;        /* rows of a run; runs of a tile                           */
    float    *partial;          /* [runs][outputs][out_cols], of more than one run         */
} mixpi_sum;

/* A map over a shape; all arrays are dense until told otherwise. */
static void mixpi_map_init(mixpi_map *m, int fn, int rank, const int64_t *shape,
                           mixp_out y) {
    int64_t step = 1;
    int i, k;
    memset(m, 0, sizeof *m);
    m->fn = fn;
    m->y = y;
    m->axes.rank = rank;
    m->axes.arrays = 1;
    for (i = rank - 1; i >= 0; i--) {
        m->axes.n[i] = shape[i];
        for (k = 0; k < 4; k++) m->axes.s[k][i] = step;
        step *= shape[i];
    }
}

/* strides NULL: dense. */
static void mixpi_map_source(mixpi_map *m, mixp_in a, const int64_t *strides) {
    int k = m->axes.arrays++;
    m->a[m->sources++] = a;
    if (strides) memcpy(m->axes.s[k], strides, (size_t)m->axes.rank * sizeof *strides);
}

static int mixpi_map_is_real(const mixpi_map *m) {
    int k;
    for (k = 0; k < m->sources; k++)
        if (!mixpi_reads(m->a[k])) return 0;
    return mixpi_writes(m->y);
}

/* May the last axis of array k be merged with the one before it? Where it is dense, where it
 * repeats along that one, and where both are one value. */
static int mixpi_axes_merge(const mixpi_axes *x, int k) {
    int last = x->rank - 1;
    int64_t inner = x->s[k][last], outer = x->s[k][last - 1];
    if (inner == 1) return outer == x->n[last] || outer == 0;
    return inner == 0 && outer == 0;
}

/* Joins axes; then the short last axis with the one before it, if it can be. */
static void mixpi_map_merge(mixpi_map *m) {
    mixpi_axes *x = &m->axes;
    int k, last;
    mixpi_axes_join(x);
    m->width = MIXPI_BLOCK;
    last = x->rank - 1;
    if (last < 1 || x->n[last] > MIXPI_BLOCK / 2 || x->n[last] == 0 || x->s[0][last] == 0)
        return;
    for (k = 0; k < x->arrays; k++)
        if (!mixpi_axes_merge(x, k)) return;
    m->period = x->n[last];
    m->width = MIXPI_BLOCK / m->period * m->period;
    x->n[last - 1] *= m->period;
    for (k = 0; k < x->arrays; k++) {
        m->periodic[k] = x->s[k][last] == 1 && x->s[k][last - 1] == 0;
        x->s[k][last - 1] = m->periodic[k] ? 0 : x->s[k][last];
    }
    x->rank = last;
}

/* Adds to off[] where the index-th point lies of those outer axes that the output has, or, when
 * summed, of those along which it repeats. */
static void mixpi_map_offsets(const mixpi_map *m, int summed, int64_t index,
                              int64_t *off) {
    const mixpi_axes *x = &m->axes;
    int axis, k;
    for (axis = x->rank - 2; axis >= 0 && index > 0; axis--) {
        int64_t n = x->n[axis], i = index < n ? index : index % n;
        if ((x->s[0][axis] == 0) != summed) continue;
        for (k = 0; k < x->arrays; k++) off[k] += i * x->s[k][axis];
        index = index < n ? 0 : index / n;
    }
}

/* Cuts the last axis in blocks. */
static void mixpi_map_plan(mixpi_map *m) {
    int i, last;
    mixpi_map_merge(m);
    last = m->axes.rank - 1;
    m->cols = m->axes.n[last];
    m->blocks = mixpi_ceil_div(m->cols, m->width);
    m->outputs = m->rows = 1;
    for (i = 0; i < last; i++) {
        if (m->axes.s[0][i]) m->outputs *= m->axes.n[i];
        else m->rows *= m->axes.n[i];
    }
}

/* Elements of a block, where there are so many. */
static int64_t mixpi_map_block(const mixpi_map *m)
{ return mixpi_min(m->width, m->cols > 0 ? m->cols : 1); }

/* Cuts the rows in runs: in short ones where outputs are few, for the sake of threads. */
static void mixpi_sum_plan(mixpi_sum *s) {
    mixpi_map *m = &s->map;
    int last, few;
    mixpi_map_plan(m);
    last = m->axes.rank - 1;
    s->fold = m->periodic[0] || m->axes.s[0][last] == 0;
    s->rows = s->fold ? m->rows * m->blocks : m->rows;
    s->tiles = s->fold ? 1 : m->blocks;
    s->out_cols = m->cols;
    if (s->fold) s->out_cols = m->periodic[0] ? m->period : 1;
    few = m->outputs * s->tiles < 64;
    s->run = 128;
    if (few) s->run = mixpi_min(s->run, mixpi_ceil_div(MIXPI_GRAIN, mixpi_map_block(m)));
    s->runs = s->rows > 0 ? mixpi_ceil_div(s->rows, s->run) : 1;
}

/* Units that are worth a task. */
static int64_t mixpi_sum_per_task(const mixpi_sum *s) {
    int64_t rows = mixpi_min(s->run, s->rows > 0 ? s->rows : 1);
    return mixpi_ceil_div(MIXPI_GRAIN, rows * mixpi_map_block(&s->map));
}

/* Where the sums of a run lie in s->partial; of run s->runs: how many there are in all. */
static int64_t mixpi_sum_partial(const mixpi_sum *s, int64_t run, int64_t output)
{ return (run * s->map.outputs + output) * s->out_cols; }

/* The function whose values, or the sums of them, are the gradient that k asks for: of a sum dy,
 * or -dy; of a product dy times the other factor; of a quotient dy / b or DIVISOR_D. */
static int mixpi_binary_slope(const mixp_binary_args *k, int sums) {
    switch (k->op) {
    case MIXP_BINARY_ADD:
    case MIXP_BINARY_SUB:
        return sums ? MIXPI_FN_COPY : MIXPI_FN_UNARY + (int)MIXP_UNARY_SCALE;
    case MIXP_BINARY_MUL: return MIXPI_FN_BINARY + (int)MIXP_BINARY_MUL;
    case MIXP_BINARY_DIV:
        return k->which ? MIXPI_FN_DIVISOR_D : MIXPI_FN_BINARY + (int)MIXP_BINARY_DIV;
    case MIXP_BINARY_MAXIMUM:
    case MIXP_BINARY_MINIMUM: return MIXPI_FN_LARGER_D;
    case MIXP_BINARY_SWIGLU: break;
    case MIXP_BINARY_COUNT: break;
    }
    return k->which ? MIXPI_FN_BINARY + (int)MIXP_BINARY_SWIGLU : MIXPI_FN_GATE_D;
}

static void mixpi_binary_slope_map(mixpi_map *m, const mixp_binary_args *k, int sums) {
    const int64_t *own = k->which ? k->b_strides : k->a_strides;
    const char *of = mixpi_binary_slope_of(k);
    mixpi_map_init(m, mixpi_binary_slope(k, sums), k->rank, k->shape, k->dx);
    if (k->rank > 0) memcpy(m->axes.s[0], own, (size_t)k->rank * sizeof *own);
    for (; *of; of++) {
        if (*of == 'd') mixpi_map_source(m, k->dy, NULL);
        if (*of == 'a') mixpi_map_source(m, k->a, k->a_strides);
        if (*of == 'b') mixpi_map_source(m, k->b, k->b_strides);
    }
}

/* Is an operand of these strides repeated over the shape? */
static int mixpi_repeats(int rank, const int64_t *shape, const int64_t *own) {
    int i;
    for (i = 0; i < rank; i++)
        if (own[i] == 0 && shape[i] != 1) return 1;
    return 0;
}
/* Is the operand whose gradient is asked for? */
static int mixpi_binary_repeats(const mixp_binary_args *k)
{ return mixpi_repeats(k->rank, k->shape, k->which ? k->b_strides : k->a_strides); }

static int mixpi_binary_valid(const mixp_binary_args *k) {
    return (unsigned)k->op < MIXP_BINARY_COUNT && k->rank >= 0 &&
           k->rank <= MIXP_MAX_RANK;
}

static int mixpi_where_valid(const mixp_where_args *k) {
    return k->rank >= 0 && k->rank <= MIXP_MAX_RANK && k->mask.data &&
           (k->a.data || k->b.data);
}

static void mixpi_where_map(mixpi_map *m, const mixp_where_args *k) {
    int fn = k->a.data ? k->b.data ? MIXPI_FN_WHERE : MIXPI_FN_KEPT : MIXPI_FN_MASKED;
    mixpi_map_init(m, fn, k->rank, k->shape, k->y);
    mixpi_map_source(m, k->mask, k->mask_strides);
    if (k->a.data) mixpi_map_source(m, k->a, k->a_strides);
    if (k->b.data) mixpi_map_source(m, k->b, k->b_strides);
    m->q = k->value;
}

/* The map whose values, or the sums of them, are the gradient that k asks for. */
static void mixpi_where_slope_map(mixpi_map *m, const mixp_where_args *k) {
    const int64_t *own = k->which ? k->b_strides : k->a_strides;
    mixpi_map_init(m, k->which ? MIXPI_FN_MASKED : MIXPI_FN_KEPT, k->rank, k->shape, k->dx);
    if (k->rank > 0) memcpy(m->axes.s[0], own, (size_t)k->rank * sizeof *own);
    mixpi_map_source(m, k->mask, k->mask_strides);
    mixpi_map_source(m, k->dy, NULL);
}

/* Over (outer, n, inner); array `repeated`, the output or the source, repeats along n. */
static void mixpi_reduce_map(mixpi_map *m, int fn, const mixp_reduce_args *k,
                             int repeated) {
    int64_t shape[3];
    shape[0] = k->outer;
    shape[1] = k->n;
    shape[2] = k->inner;
    mixpi_map_init(m, fn, 3, shape, k->y);
    mixpi_map_source(m, k->a, NULL);
    m->axes.s[repeated][0] = k->inner;
    m->axes.s[repeated][1] = 0;
}

typedef struct mixpi_dropout_job {
    const mixp_dropout_args *k;
    uint64_t key, limit;        /* of random numbers; those below the limit drop           */
    float    scale;
} mixpi_dropout_job;

static void mixpi_dropout_plan(mixpi_dropout_job *d, const mixp_dropout_args *k) {
    d->k = k;
    d->key = mixp_random_key(k->seed, k->step, k->tensor);
    d->limit = (uint64_t)ceil((double)k->p * 4294967296.0);
    d->scale = k->p < 1.0f ? (float)(1.0 / (1.0 - (double)k->p)) : 0.0f;
}

/* A unit is a row, or what else there are `rows` of. */
static mixp_result mixpi_each_row(const mixp_exec *x, int64_t rows, int64_t per_task,
                                  mixpi_unit row, const void *args) {
    mixpi_each_unit(x, rows, per_task, row, args);
    return MIXP_OK;
}

/* As many rows of cols elements as are worth a task. */
static int64_t mixpi_rows_of_task(int64_t cols)
{ return mixpi_ceil_div(MIXPI_GRAIN, cols > 0 ? cols : 1); }

/* The first row whose id is neither in [0, limit) nor `ignore`; -1 when there is none. */
#define MIXPI_NO_INDEX ((int64_t)1 << 40)   /* as `ignore`: no id is left out                */
static int64_t mixpi_bad_id(const int32_t *ids, int64_t rows, int64_t limit,
                            int64_t ignore) {
    int64_t i;
    for (i = 0; i < rows; i++)
        if ((ids[i] < 0 || ids[i] >= limit) && ids[i] != ignore) return i;
    return -1;
}

/* norm_backward: each task adds its rows' parts of dgamma and dbeta to sums of its own. */
#define MIXPI_NORM_TASKS 256                /* at most                                       */
typedef struct mixpi_norm_back_job {
    const mixp_norm_backward_args *k;
    int64_t per_task, tasks;
    int64_t wide;               /* cols, as whole vectors                                  */
    float  *sums;               /* 2 * wide of each task; NULL: neither is wanted          */
} mixpi_norm_back_job;

static mixpi_norm_back_job mixpi_norm_back_plan(const mixp_norm_backward_args *k) {
    mixpi_norm_back_job job = { k, mixpi_rows_of_task(k->cols), 0, 0, NULL };
    int64_t least = mixpi_ceil_div(k->rows, MIXPI_NORM_TASKS);
    if (job.per_task < least) job.per_task = least;
    job.tasks = mixpi_ceil_div(k->rows, job.per_task);
    job.wide = (k->cols + 15) & ~(int64_t)15;
    return job;
}

/* embedding_backward: lists, one for each row of the table, of the rows of dy that used it in
 * increasing order: so each row of the table is one task's, whatever its dtype, and nothing is
 * rounded twice. */
typedef struct mixpi_embedding_back_job {
    const mixp_embedding_backward_args *k;
    int64_t *first;             /* of each id: its first row, -1 = none                    */
    int64_t *next;              /* of each row: the next of the same id, -1 = none         */
} mixpi_embedding_back_job;

/* Lays the lists out in memory, unless that is NULL; how many bytes they need. */
static size_t mixpi_embedding_back_carve(mixpi_embedding_back_job *job, void *memory) {
    size_t ids = (size_t)job->k->vocab, rows = (size_t)job->k->rows;
    if (memory) {
        job->first = (int64_t *)memory;
        job->next = job->first + ids;
    }
    return (ids + rows) * sizeof(int64_t);
}

static void mixpi_embedding_back_lists(const mixpi_embedding_back_job *job) {
    const mixp_embedding_backward_args *k = job->k;
    int64_t i;
    for (i = 0; i < k->vocab; i++) job->first[i] = -1;
    for (i = k->rows - 1; i >= 0; i--) {
        job->next[i] = job->first[k->ids[i]];
        job->first[k->ids[i]] = i;
    }
}

/* How many ids are worth a task: by how many rows of dy come to one. */
static int64_t mixpi_embedding_back_per_task(const mixp_embedding_backward_args *k) {
    int64_t elements = (k->rows + k->vocab) * k->cols, ids = k->vocab > 0 ? k->vocab : 1;
    return mixpi_ceil_div(MIXPI_GRAIN * ids, elements > 0 ? elements : 1);
}

/* cross_entropy; the rows' losses in double, to be added in order. */
typedef struct mixpi_entropy_job {
    const mixp_cross_entropy_args *k;
    double *losses;
} mixpi_entropy_job;

static void mixpi_entropy_mean(const mixpi_entropy_job *job) {
    const mixp_cross_entropy_args *k = job->k;
    double sum = 0.0;
    int64_t i, count = 0;
    for (i = 0; i < k->rows; i++) {
        if (k->targets[i] == k->ignore) continue;
        sum += job->losses[i];
        count++;
    }
    *k->counted = (float)count;
    *k->loss = count ? (float)(sum / (double)count) : mixp_f32_of_bits(0x7FC00000u);
}

typedef struct mixpi_entropy_back_job {
    const mixp_cross_entropy_backward_args *k;
    float factor;
} mixpi_entropy_back_job;

/* --- the largest --- */

typedef struct mixpi_most {
    float   value;
    int32_t index, ties;
} mixpi_most;

static int mixpi_is_nan(float x) { return mixp_bits_of_f32(x) << 1 > 0xFF000000u; }

/* As large: equal, or both NaN. */
static int mixpi_most_equals(float x, float most)
{ return x == most || (mixpi_is_nan(x) && mixpi_is_nan(most)); }

static void mixpi_most_take(mixpi_most *m, float x, int64_t index) {
    int larger = x > m->value || mixpi_is_nan(x);
    if (index > 0 && mixpi_most_equals(x, m->value)) {
        m->ties++;  /* plant: max_first */
    } else if (index == 0 || (larger && !mixpi_is_nan(m->value))) {
        m->value = x;
        m->index = (int32_t)index;
        m->ties = 1;
    }
}

/* How a kernel over [outer, n, inner] goes through it: line by line, in pieces of a block. Where
 * inner is 1 a line runs along n, one for each o; otherwise along inner, one for each o and j. */
typedef struct mixpi_lines {
    int     along_n;
    int64_t length, blocks;
} mixpi_lines;

static mixpi_lines mixpi_lines_of(int64_t n, int64_t inner) {
    mixpi_lines lines;
    lines.along_n = inner == 1;
    lines.length = lines.along_n ? n : inner;
    lines.blocks = (lines.length + MIXPI_BLOCK - 1) / MIXPI_BLOCK;
    return lines;
}

/* --- rotary embeddings --- */

typedef struct mixpi_rope_job {
    const mixp_rope_args *k;
    float *cosine, *sine;       /* [t][d / 2]                                              */
} mixpi_rope_job;

#define MIXPI_ROPE_RUN 256      /* positions that are turned on from one sine and cosine   */

/* A run of positions: from one to the next a frequency's pair turns by its angle. In f64 the last
 * of them is off by some 1e-14, a hundred-thousandth of what f32 rounds. */
static void mixpi_rope_run(const void *args, int64_t run) {
    const mixpi_rope_job *job = (const mixpi_rope_job *)args;
    int64_t half = job->k->d / 2, i, p, from = run * MIXPI_ROPE_RUN;
    int64_t end = mixpi_min(from + MIXPI_ROPE_RUN, job->k->t);
    for (i = 0; i < half; i++) {
        double step = pow(job->k->base, -2.0 * (double)i / (double)job->k->d);
        double angle = (double)(job->k->first + from) * step;
        double c = cos(angle), s = sin(angle), turn_c = cos(step), turn_s = sin(step);
        for (p = from; p < end; p++) {
            double next = c * turn_c - s * turn_s;
            job->cosine[p * half + i] = (float)c;
            job->sine[p * half + i] = (float)s;
            s = s * turn_c + c * turn_s;
            c = next;
        }
    }
}

#if defined(__GNUC__) && defined(__x86_64__) && !defined(MIXPREC_NO_SIMD)
#  define MIXPI_X86 1
#  include <immintrin.h>
#else
#  define MIXPI_X86 0
#endif
/* Compilers that know AVX512_BF16. */
#define MIXPI_BF16 0
#if MIXPI_X86 && defined(__clang__)
#  if __clang_major__ >= 9
#    undef MIXPI_BF16
#    define MIXPI_BF16 1
#  endif
#elif MIXPI_X86
#  if __GNUC__ >= 10
#    undef MIXPI_BF16
#    define MIXPI_BF16 1
#  endif
#endif
#if defined(__GNUC__) && defined(__aarch64__) && !defined(MIXPREC_NO_SIMD)
#  define MIXPI_ARM 1
#  include <arm_neon.h>
#else
#  define MIXPI_ARM 0
#endif

#if defined(__SANITIZE_ADDRESS__)
#  define MIXPI_SANITIZED 1
#elif defined(__has_feature)
#  if __has_feature(address_sanitizer) || __has_feature(memory_sanitizer)
#    define MIXPI_SANITIZED 1
#  endif
#endif

#ifdef __cplusplus
}
#endif
#endif  /* implementation, first half */

/* ------------------------ compiled once per instruction set --------------------------- */
#ifdef MIXPI_PASS

/* gcc 12 takes the "undefined" operand, and at -O0 the mask, of its own AVX-512 intrinsics for
 * mistakes of ours. */
#if MIXPI_PASS == 2 && defined(__GNUC__) && !defined(__clang__)
#  pragma GCC diagnostic push
#  pragma GCC diagnostic ignored "-Wuninitialized"
#  pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#  pragma GCC diagnostic ignored "-Wsign-conversion"
#endif

#define MIXPI_K static MIXPI_TARGET                  /* a kernel or one of its tasks */
/* Vectors stay in registers only when their functions are inlined. Where speed is not the
 * point (16 floats in plain C, -O0, sanitizers) that would cost minutes of compiling. */
#if MIXPI_PASS != 0 && defined(__OPTIMIZE__) && !defined(MIXPI_SANITIZED)
#  define MIXPI_V static __inline__ MIXPI_TARGET __attribute__((__always_inline__, __unused__))
#elif defined(__GNUC__)
#  define MIXPI_V static __inline__ MIXPI_TARGET __attribute__((__unused__))
#else
#  define MIXPI_V static inline
#endif

#if defined(__GNUC__)
#  define MIXPI_PREFETCH(p) __builtin_prefetch(p)
#else
#  define MIXPI_PREFETCH(p) (void)(p)
#endif

/* --- vectors of 16 floats ------------------------------------------------------------- *
 * mixpi_v is 16 floats: one register of AVX-512, two of AVX2, four of NEON, an array in plain C.
 * What works on them is a function mixpi_v..., written once for each instruction set in the
 * blocks below, and called by that name in every kernel; this list gives it the pass's suffix.
 *
 * vfma rounds once on every set; vmla may round twice (plain C would pay for a true fma). vsum
 * adds in one fixed tree: halves, quarters, pairs. vmax and vmin give b when either is NaN, as
 * on x86. vround is to the nearest whole number; vldexp multiplies by 2^b, b a whole number in
 * [-126, 127]; vselect_gt is a > b ? x : y. The forms in _n touch n <= 16 floats and read 0
 * beyond. vget and vput convert 16 elements of any of the dtypes that mixpi_has_vectors names. */
#define mixpi_v              MIXPI_P(v)             /* 16 floats                           */
#define mixpi_vcodes         MIXPI_P(vcodes)        /* 16 codes of a narrow dtype          */
#define mixpi_vreg           MIXPI_P(vreg)          /* one register of floats              */
#define mixpi_vbits          MIXPI_P(vbits)         /* its bits: C's operators work on it  */
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
#define mixpi_vget_reg       MIXPI_P(vget_reg)
#define mixpi_vput           MIXPI_P(vput)
#define mixpi_vput_f32       MIXPI_P(vput_f32)
#define mixpi_vput_f16       MIXPI_P(vput_f16)
#define mixpi_vput_256       MIXPI_P(vput_256)
#define mixpi_vput_codes     MIXPI_P(vput_codes)
#define mixpi_vput_rounded   MIXPI_P(vput_rounded)
#define mixpi_vnarrow        MIXPI_P(vnarrow)
#define mixpi_vnarrow_by     MIXPI_P(vnarrow_by)
#define mixpi_vpack_16       MIXPI_P(vpack_16)
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
#define mixpi_vwave          MIXPI_P(vwave)
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
#define mixpi_vcode_widen    MIXPI_P(vcode_widen)

/* --- one register, and its bits --- *
 * vbits_gt, _max and _min compare as signed numbers; vbits_times is a whole number times unit. */
#if MIXPI_PASS == 2
#  define MIXPI_SUFFIX avx512
#  define MIXPI_TARGET                                                                    \
       __attribute__((__target__("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")))
typedef __m512   mixpi_vreg;
typedef uint32_t mixpi_vbits __attribute__((__vector_size__(64)));

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

#elif MIXPI_PASS == 1
#  define MIXPI_SUFFIX avx2
#  define MIXPI_TARGET __attribute__((__target__("avx2,fma,f16c")))
typedef __m256   mixpi_vreg;
typedef uint32_t mixpi_vbits __attribute__((__vector_size__(32)));

MIXPI_V mixpi_vbits mixpi_vbits_gt(mixpi_vbits a, mixpi_vbits b, mixpi_vbits x,
                                   mixpi_vbits y) {
    __m256i greater = _mm256_cmpgt_epi32((__m256i)a, (__m256i)b);
    return (mixpi_vbits)_mm256_blendv_epi8((__m256i)y, (__m256i)x, greater);
}
MIXPI_V mixpi_vbits mixpi_vbits_max(mixpi_vbits a, mixpi_vbits b)
{ return (mixpi_vbits)_mm256_max_epi32((__m256i)a, (__m256i)b); }
MIXPI_V mixpi_vbits mixpi_vbits_min(mixpi_vbits a, mixpi_vbits b)
{ return (mixpi_vbits)_mm256_min_epi32((__m256i)a, (__m256i)b); }
MIXPI_V mixpi_vreg mixpi_vbits_times(mixpi_vbits a, float unit)
{ return _mm256_mul_ps(_mm256_cvtepi32_ps((__m256i)a), _mm256_set1_ps(unit)); }

#elif MIXPI_PASS == 3
#  define MIXPI_SUFFIX neon
#  define MIXPI_TARGET
typedef float32x4_t mixpi_vreg;
typedef uint32_t    mixpi_vbits __attribute__((__vector_size__(16)));

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

#else
#  define MIXPI_SUFFIX scalar
#  define MIXPI_TARGET
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
    __asm__("" : "+v"(r));      /* else gcc loads it anew for each use, at twice the time */
#endif
    return r;
}

/* mixpi_round_f32 on a register; bit for bit the same. */
MIXPI_V mixpi_vbits mixpi_vcode_rounded(mixp_dtype to, mixpi_vbits u, int saturate,
                                        int stochastic, mixpi_vbits random) {
    const mixp_format f = mixp_format_of(to);
    const uint32_t top = (uint32_t)mixpi_max_code(f);
    const uint32_t keep = (uint32_t)f.mantissa_bits, cut = 23u - keep;
    const uint32_t lift = 128u - (uint32_t)f.bias;
    const mixpi_vbits zero = mixpi_vbits_all(0), last = mixpi_vbits_all(31);
    mixpi_vbits a = u & 0x7FFFFFFFu, e = a >> 23, payload = a & 0x7FFFFFu;
    mixpi_vbits m = payload | 0x800000u, shift, add, nan;
    if (to == MIXP_BF16) {      /* the only one of them to see f32's own subnormals */
        m = mixpi_vbits_gt(mixpi_vbits_all(0x800000u), a, payload, m);
        e = mixpi_vbits_max(e, mixpi_vbits_all(1));
    }
    shift = mixpi_vbits_max(mixpi_vbits_all(cut), cut + lift - e);
    if (stochastic) m >>= mixpi_vbits_min(mixpi_vbits_max(shift - 31u, zero), last);
    shift = mixpi_vbits_min(shift, last);
    if (stochastic) add = ~random >> (32u - shift);
    else add = (0x7FFFFFFFu >> (32u - shift)) + (m >> shift & 1u);
    e = mixpi_vbits_max(e - lift, zero);
    m = (e << keep) + ((m + add) >> shift);
    m = mixpi_vbits_min(m, mixpi_vbits_all(saturate ? top : top + 1u));
    nan = mixpi_vbits_all((top + 1u) | 1u << (keep - 1u));
    if (to != MIXP_F8_E4M3) nan |= payload >> cut;
    m = mixpi_vbits_gt(a, mixpi_vbits_all(0x7F800000u), nan, m);
    return m | (u & 0x80000000u) >> (cut + 8u - (uint32_t)f.exponent_bits);
}

MIXPI_V mixpi_vbits mixpi_vcode_bf16(mixpi_vbits u) {
    mixpi_vbits a = u & 0x7FFFFFFFu, r = u + 0x7FFFu + (u >> 16 & 1u);
    return mixpi_vbits_gt(a, mixpi_vbits_all(0x7F800000u), u | 0x400000u, r) >> 16;
}

MIXPI_V mixpi_vbits mixpi_vcode_nearest(mixp_dtype to, mixpi_vbits u) {
    if (to == MIXP_BF16) return mixpi_vcode_bf16(u);
    return mixpi_vcode_rounded(to, u, 0, 0, u);
}

/* The bits as f32 of f16, bf16, e4m3 or e5m2. */
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
    if (from == MIXP_F8_E4M3) {
        r = mixpi_vbits_gt(a, mixpi_vbits_all(top), mixpi_vbits_all(0x7FC00000u), r);
    } else {
        r = mixpi_vbits_gt(a, mixpi_vbits_all(top), r + lift, r);
        r = mixpi_vbits_gt(a, mixpi_vbits_all(top + 1u), r | 0x400000u, r);
    }
    r = mixpi_vbits_gt(mixpi_vbits_all(0x800000u >> cut), a, (mixpi_vbits)tiny, r);
    return r | (h & sign) << (cut + 8u - (uint32_t)f.exponent_bits);
}
#endif

/* --- what AVX-512 and AVX2 share --- */
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

/* stream 1, here and below: past the caches. Then p is aligned to a cache line. */
MIXPI_V void mixpi_vput_256(void *p, __m256i a, int stream) {
    if (stream) _mm256_stream_si256((__m256i *)p, a);
    else _mm256_storeu_si256((__m256i *)p, a);
}

/* Comes after stores that passed the caches. */
MIXPI_V void mixpi_vfence(void) { _mm_sfence(); }
#else
MIXPI_V void mixpi_vfence(void) { }
#endif

#if MIXPI_PASS == 2
/* --- AVX-512: one register --- */
typedef mixpi_vreg  mixpi_v;
typedef mixpi_vbits mixpi_vcodes;

MIXPI_V mixpi_v mixpi_vset(float x)                 { return _mm512_set1_ps(x); }
MIXPI_V mixpi_v mixpi_vload(const float *p)         { return _mm512_loadu_ps(p); }
MIXPI_V void    mixpi_vstore(float *p, mixpi_v a)   { _mm512_storeu_ps(p, a); }
MIXPI_V mixpi_v mixpi_vadd(mixpi_v a, mixpi_v b)    { return _mm512_add_ps(a, b); }
MIXPI_V mixpi_v mixpi_vsub(mixpi_v a, mixpi_v b)    { return _mm512_sub_ps(a, b); }
MIXPI_V mixpi_v mixpi_vmul(mixpi_v a, mixpi_v b)    { return _mm512_mul_ps(a, b); }
MIXPI_V mixpi_v mixpi_vdiv(mixpi_v a, mixpi_v b)    { return _mm512_div_ps(a, b); }
MIXPI_V mixpi_v mixpi_vmax(mixpi_v a, mixpi_v b)    { return _mm512_max_ps(a, b); }
MIXPI_V mixpi_v mixpi_vmin(mixpi_v a, mixpi_v b)    { return _mm512_min_ps(a, b); }
MIXPI_V mixpi_v mixpi_vsqrt(mixpi_v a)              { return _mm512_sqrt_ps(a); }
MIXPI_V mixpi_v mixpi_vneg(mixpi_v a) { return _mm512_xor_ps(a, _mm512_set1_ps(-0.0f)); }
MIXPI_V mixpi_v mixpi_vabs(mixpi_v a) {
    return _mm512_andnot_ps(_mm512_set1_ps(-0.0f), a);
}
MIXPI_V mixpi_v mixpi_vround(mixpi_v a)
{ return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
MIXPI_V mixpi_v mixpi_vfma(mixpi_v a, mixpi_v b, mixpi_v c) {
    return _mm512_fmadd_ps(a, b, c);
}
MIXPI_V mixpi_v mixpi_vmla(mixpi_v a, mixpi_v b, mixpi_v c) {
    return _mm512_fmadd_ps(a, b, c);
}
MIXPI_V mixpi_v mixpi_vldexp(mixpi_v a, mixpi_v b) {
    mixpi_vbits power = ((mixpi_vbits)_mm512_cvtps_epi32(b) + 127u) << 23;
    return _mm512_mul_ps(a, (__m512)power);
}
MIXPI_V mixpi_v mixpi_vselect_gt(mixpi_v a, mixpi_v b, mixpi_v x, mixpi_v y)
{ return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), y, x); }

MIXPI_V float mixpi_vsum(mixpi_v a) {
    return mixpi_vsum8(
        _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1)));
}
MIXPI_V float mixpi_vmaxof(mixpi_v a) {
    return mixpi_vmaxof8(
        _mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1)));
}

MIXPI_V mixpi_v mixpi_vload_n(const float *p, int n)
{ return _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1u), p); }
MIXPI_V void mixpi_vstore_n(float *p, mixpi_v a, int n)
{ _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1u), a); }

MIXPI_V mixpi_v mixpi_vget(mixp_dtype from, const void *p) {
    __m256i h;
    if (from == MIXP_F32) return (mixpi_v)mixpi_vbits_at(p, 0);
    if (from == MIXP_F16 || from == MIXP_BF16) {
        h = _mm256_loadu_si256((const __m256i *)p);
        if (from == MIXP_F16) return _mm512_cvtph_ps(h);
        return (mixpi_v)((mixpi_vbits)_mm512_cvtepu16_epi32(h) << 16);
    }
    if (from == MIXP_F8_E5M2) {         /* an f16 without its low byte */
        h = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p));
        return _mm512_cvtph_ps(_mm256_slli_epi16(h, 8));
    }
    return (mixpi_v)mixpi_vcode_widen(from, (mixpi_vbits)_mm512_cvtepu8_epi32(
                                                _mm_loadu_si128((const __m128i *)p)));
}

MIXPI_V mixpi_vcodes mixpi_vnarrow(mixp_dtype to, mixpi_v a)
{ return mixpi_vcode_nearest(to, (mixpi_vbits)a); }
MIXPI_V mixpi_vcodes mixpi_vnarrow_by(mixp_dtype to, mixpi_v a, const mixp_rounding *r,
                                      const uint32_t *random) {
    return mixpi_vcode_rounded(to, (mixpi_vbits)a, r->saturate, r->stochastic,
                               mixpi_vbits_at(random, 0));
}

MIXPI_V void mixpi_vput_f32(void *p, mixpi_v a, int stream) {
    if (stream) _mm512_stream_ps((float *)p, a);
    else _mm512_storeu_ps((float *)p, a);
}
MIXPI_V void mixpi_vput_f16(void *p, mixpi_v a, int stream) {
    __m256i h = _mm512_maskz_cvtps_ph((__mmask16)0xFFFF, a,     /* masked: g++ 12 warns else */
                                      _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    mixpi_vput_256(p, h, stream);
}
MIXPI_V void mixpi_vput_codes(void *p, mixpi_vcodes a, int wide, int stream) {
    if (wide) mixpi_vput_256(p, _mm512_cvtepi32_epi16((__m512i)a), stream);
    else if (stream) _mm_stream_si128((__m128i *)p, _mm512_cvtepi32_epi8((__m512i)a));
    else _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8((__m512i)a));
}

/* mixp_random_at for 16 elements from `first` on. */
MIXPI_V void mixpi_vrandom(uint64_t key, uint64_t first, uint32_t *out) {
    typedef uint64_t mixpi_u64x8 __attribute__((__vector_size__(64)));
    const mixpi_u64x8 lane = { 0, 1, 2, 3, 4, 5, 6, 7 };
    uint64_t k;
    for (k = 0; k < 16; k += 8) {
        mixpi_u64x8 z = key + (lane + (first + k)) * 0x9E3779B97F4A7C15u;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
        z = (z ^ (z >> 31)) >> 32;
        _mm256_storeu_si256((__m256i *)(void *)(out + k),
                            _mm512_cvtepi64_epi32((__m512i)z));
    }
}

#elif MIXPI_PASS == 1
/* --- AVX2 with FMA and F16C: two registers --- */
typedef struct mixpi_v { __m256 lo, hi; } mixpi_v;
typedef struct mixpi_vcodes { mixpi_vbits lo, hi; } mixpi_vcodes;

MIXPI_V mixpi_v mixpi_vset(float x) {
    mixpi_v r;
    r.lo = _mm256_set1_ps(x);
    r.hi = _mm256_set1_ps(x);
    return r;
}
MIXPI_V mixpi_v mixpi_vload(const float *p) {
    mixpi_v r;
    r.lo = _mm256_loadu_ps(p);
    r.hi = _mm256_loadu_ps(p + 8);
    return r;
}
MIXPI_V void mixpi_vstore(float *p, mixpi_v a) {
    _mm256_storeu_ps(p, a.lo);
    _mm256_storeu_ps(p + 8, a.hi);
}
MIXPI_V mixpi_v mixpi_vadd(mixpi_v a, mixpi_v b) {
    a.lo = _mm256_add_ps(a.lo, b.lo);
    a.hi = _mm256_add_ps(a.hi, b.hi);
    return a;
}
MIXPI_V mixpi_v mixpi_vsub(mixpi_v a, mixpi_v b) {
    a.lo = _mm256_sub_ps(a.lo, b.lo);
    a.hi = _mm256_sub_ps(a.hi, b.hi);
    return a;
}
MIXPI_V mixpi_v mixpi_vmul(mixpi_v a, mixpi_v b) {
    a.lo = _mm256_mul_ps(a.lo, b.lo);
    a.hi = _mm256_mul_ps(a.hi, b.hi);
    return a;
}
MIXPI_V mixpi_v mixpi_vdiv(mixpi_v a, mixpi_v b) {
    a.lo = _mm256_div_ps(a.lo, b.lo);
    a.hi = _mm256_div_ps(a.hi, b.hi);
    return a;
}
MIXPI_V mixpi_v mixpi_vmax(mixpi_v a, mixpi_v b) {
    a.lo = _mm256_max_ps(a.lo, b.lo);
    a.hi = _mm256_max_ps(a.hi, b.hi);
    return a;
}
MIXPI_V mixpi_v mixpi_vmin(mixpi_v a, mixpi_v b) {
    a.lo = _mm256_min_ps(a.lo, b.lo);
    a.hi = _mm256_min_ps(a.hi, b.hi);
    return a;
}
MIXPI_V mixpi_v mixpi_vsqrt(mixpi_v a) {
    a.lo = _mm256_sqrt_ps(a.lo);
    a.hi = _mm256_sqrt_ps(a.hi);
    return a;
}
MIXPI_V mixpi_v mixpi_vneg(mixpi_v a) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    a.lo = _mm256_xor_ps(a.lo, sign);
    a.hi = _mm256_xor_ps(a.hi, sign);
    return a;
}
MIXPI_V mixpi_v mixpi_vabs(mixpi_v a) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    a.lo = _mm256_andnot_ps(sign, a.lo);
    a.hi = _mm256_andnot_ps(sign, a.hi);
    return a;
}
MIXPI_V mixpi_v mixpi_vround(mixpi_v a) {
    a.lo = _mm256_round_ps(a.lo, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    a.hi = _mm256_round_ps(a.hi, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return a;
}
MIXPI_V mixpi_v mixpi_vfma(mixpi_v a, mixpi_v b, mixpi_v c) {
    a.lo = _mm256_fmadd_ps(a.lo, b.lo, c.lo);
    a.hi = _mm256_fmadd_ps(a.hi, b.hi, c.hi);
    return a;
}
MIXPI_V mixpi_v mixpi_vmla(mixpi_v a, mixpi_v b, mixpi_v c) {
    return mixpi_vfma(a, b, c);
}
MIXPI_V mixpi_v mixpi_vldexp(mixpi_v a, mixpi_v b) {
    mixpi_vbits lo = ((mixpi_vbits)_mm256_cvtps_epi32(b.lo) + 127u) << 23;
    mixpi_vbits hi = ((mixpi_vbits)_mm256_cvtps_epi32(b.hi) + 127u) << 23;
    a.lo = _mm256_mul_ps(a.lo, (__m256)lo);
    a.hi = _mm256_mul_ps(a.hi, (__m256)hi);
    return a;
}
MIXPI_V mixpi_v mixpi_vselect_gt(mixpi_v a, mixpi_v b, mixpi_v x, mixpi_v y) {
    x.lo = _mm256_blendv_ps(y.lo, x.lo, _mm256_cmp_ps(a.lo, b.lo, _CMP_GT_OQ));
    x.hi = _mm256_blendv_ps(y.hi, x.hi, _mm256_cmp_ps(a.hi, b.hi, _CMP_GT_OQ));
    return x;
}

MIXPI_V float mixpi_vsum(mixpi_v a)   { return mixpi_vsum8(_mm256_add_ps(a.lo, a.hi)); }
MIXPI_V float mixpi_vmaxof(mixpi_v a) { return mixpi_vmaxof8(_mm256_max_ps(a.lo, a.hi)); }

/* Register i of an array of any dtype. */
MIXPI_V mixpi_vreg mixpi_vget_reg(mixp_dtype from, const void *p, int i) {
    const size_t size = from == MIXP_F16 || from == MIXP_BF16 ? 2 : 1;
    const char *at = (const char *)p + (size_t)i * 8 * size;
    __m128i h;
    if (from == MIXP_F32) return (mixpi_vreg)mixpi_vbits_at(p, i);
    if (size == 2) {
        h = _mm_loadu_si128((const __m128i *)(const void *)at);
        if (from == MIXP_F16) return _mm256_cvtph_ps(h);
        return (mixpi_vreg)((mixpi_vbits)_mm256_cvtepu16_epi32(h) << 16);
    }
    h = _mm_loadl_epi64((const __m128i *)(const void *)at);
    if (from == MIXP_F8_E5M2)           /* an f16 without its low byte */
        return _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(h), 8));
    return (mixpi_vreg)mixpi_vcode_widen(from, (mixpi_vbits)_mm256_cvtepu8_epi32(h));
}
MIXPI_V mixpi_v mixpi_vget(mixp_dtype from, const void *p) {
    mixpi_v r;
    r.lo = mixpi_vget_reg(from, p, 0);
    r.hi = mixpi_vget_reg(from, p, 1);
    return r;
}

MIXPI_V mixpi_vcodes mixpi_vnarrow(mixp_dtype to, mixpi_v a) {
    mixpi_vcodes r;
    r.lo = mixpi_vcode_nearest(to, (mixpi_vbits)a.lo);
    r.hi = mixpi_vcode_nearest(to, (mixpi_vbits)a.hi);
    return r;
}
MIXPI_V mixpi_vcodes mixpi_vnarrow_by(mixp_dtype to, mixpi_v a, const mixp_rounding *r,
                                      const uint32_t *random) {
    mixpi_vcodes c;
    c.lo = mixpi_vcode_rounded(to, (mixpi_vbits)a.lo, r->saturate, r->stochastic,
                               mixpi_vbits_at(random, 0));
    c.hi = mixpi_vcode_rounded(to, (mixpi_vbits)a.hi, r->saturate, r->stochastic,
                               mixpi_vbits_at(random, 1));
    return c;
}

MIXPI_V void mixpi_vput_f32(void *p, mixpi_v a, int stream) {
    if (!stream) {
        mixpi_vstore((float *)p, a);
        return;
    }
    _mm256_stream_ps((float *)p, a.lo);
    _mm256_stream_ps((float *)p + 8, a.hi);
}
MIXPI_V void mixpi_vput_f16(void *p, mixpi_v a, int stream) {
    __m128i lo = _mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT);
    __m128i hi = _mm256_cvtps_ph(a.hi, _MM_FROUND_TO_NEAREST_INT);
    mixpi_vput_256(p, _mm256_inserti128_si256(_mm256_castsi128_si256(lo), hi, 1), stream);
}
/* The low 16 bits of each code, in order: the instruction packs within halves. */
MIXPI_V __m256i mixpi_vpack_16(mixpi_vcodes a) {
    __m256i packed = _mm256_packus_epi32((__m256i)a.lo, (__m256i)a.hi);
    return _mm256_permute4x64_epi64(packed, 0xD8);
}
MIXPI_V void mixpi_vput_codes(void *p, mixpi_vcodes a, int wide, int stream) {
    __m256i words = mixpi_vpack_16(a);
    __m128i bytes;
    if (wide) {
        mixpi_vput_256(p, words, stream);
        return;
    }
    bytes = _mm_packus_epi16(_mm256_castsi256_si128(words),
                             _mm256_extracti128_si256(words, 1));
    if (stream) _mm_stream_si128((__m128i *)p, bytes);
    else _mm_storeu_si128((__m128i *)p, bytes);
}

#elif MIXPI_PASS == 3
/* --- NEON: four registers --- */
typedef struct mixpi_v { float32x4_t q[4]; } mixpi_v;
typedef struct mixpi_vcodes { mixpi_vbits q[4]; } mixpi_vcodes;

MIXPI_V mixpi_v mixpi_vset(float x) {
    mixpi_v r;
    int i;
    for (i = 0; i < 4; i++) r.q[i] = vdupq_n_f32(x);
    return r;
}
MIXPI_V mixpi_v mixpi_vload(const float *p) {
    mixpi_v r;
    int i;
    for (i = 0; i < 4; i++) r.q[i] = vld1q_f32(p + 4 * i);
    return r;
}
MIXPI_V void mixpi_vstore(float *p, mixpi_v a) {
    int i;
    for (i = 0; i < 4; i++) vst1q_f32(p + 4 * i, a.q[i]);
}
MIXPI_V mixpi_v mixpi_vadd(mixpi_v a, mixpi_v b) {
    int i;
    for (i = 0; i < 4; i++) a.q[i] = vaddq_f32(a.q[i], b.q[i]);
    return a;
}
MIXPI_V mixpi_v mixpi_vsub(mixpi_v a, mixpi_v b) {
    int i;
    for (i = 0; i < 4; i++) a.q[i] = vsubq_f32(a.q[i], b.q[i]);
    return a;
}
MIXPI_V mixpi_v mixpi_vmul(mixpi_v a, mixpi_v b) {
    int i;
    for (i = 0; i < 4; i++) a.q[i] = vmulq_f32(a.q[i], b.q[i]);
    return a;
}
MIXPI_V mixpi_v mixpi_vdiv(mixpi_v a, mixpi_v b) {
    int i;
    for (i = 0; i < 4; i++) a.q[i] = vdivq_f32(a.q[i], b.q[i]);
    return a;
}
MIXPI_V mixpi_v mixpi_vmax(mixpi_v a, mixpi_v b) {
    int i;
    for (i = 0; i < 4; i++) a.q[i] = vbslq_f32(vcgtq_f32(a.q[i], b.q[i]), a.q[i], b.q[i]);
    return a;
}
MIXPI_V mixpi_v mixpi_vmin(mixpi_v a, mixpi_v b) {
    int i;
    for (i = 0; i < 4; i++) a.q[i] = vbslq_f32(vcgtq_f32(b.q[i], a.q[i]), a.q[i], b.q[i]);
    return a;
}
MIXPI_V mixpi_v mixpi_vsqrt(mixpi_v a) {
    int i;
    for (i = 0; i < 4; i++) a.q[i] = vsqrtq_f32(a.q[i]);
    return a;
}
MIXPI_V mixpi_v mixpi_vneg(mixpi_v a) {
    int i;
    for (i = 0; i < 4; i++) a.q[i] = vnegq_f32(a.q[i]);
    return a;
}
MIXPI_V mixpi_v mixpi_vabs(mixpi_v a) {
    int i;
    for (i = 0; i < 4; i++) a.q[i] = vabsq_f32(a.q[i]);
    return a;
}
MIXPI_V mixpi_v mixpi_vround(mixpi_v a) {
    int i;
    for (i = 0; i < 4; i++) a.q[i] = vrndnq_f32(a.q[i]);
    return a;
}
MIXPI_V mixpi_v mixpi_vfma(mixpi_v a, mixpi_v b, mixpi_v c) {
    int i;
    for (i = 0; i < 4; i++) a.q[i] = vfmaq_f32(c.q[i], a.q[i], b.q[i]);
    return a;
}
MIXPI_V mixpi_v mixpi_vmla(mixpi_v a, mixpi_v b, mixpi_v c) {
    return mixpi_vfma(a, b, c);
}
MIXPI_V mixpi_v mixpi_vldexp(mixpi_v a, mixpi_v b) {
    int i;
    for (i = 0; i < 4; i++) {
        mixpi_vbits power = ((mixpi_vbits)vcvtnq_s32_f32(b.q[i]) + 127u) << 23;
        a.q[i] = vmulq_f32(a.q[i], (float32x4_t)power);
    }
    return a;
}
MIXPI_V mixpi_v mixpi_vselect_gt(mixpi_v a, mixpi_v b, mixpi_v x, mixpi_v y) {
    int i;
    for (i = 0; i < 4; i++) x.q[i] = vbslq_f32(vcgtq_f32(a.q[i], b.q[i]), x.q[i], y.q[i]);
    return x;
}

MIXPI_V float mixpi_vsum(mixpi_v a) {
    float32x4_t h = vaddq_f32(vaddq_f32(a.q[0], a.q[2]), vaddq_f32(a.q[1], a.q[3]));
    float32x2_t p = vadd_f32(vget_low_f32(h), vget_high_f32(h));
    return vget_lane_f32(vpadd_f32(p, p), 0);
}
MIXPI_V float mixpi_vmaxof(mixpi_v a)
{ return vmaxvq_f32(vmaxq_f32(vmaxq_f32(a.q[0], a.q[1]), vmaxq_f32(a.q[2], a.q[3]))); }

/* Register i of an array of any dtype. Not by fcvtl: that obeys FPCR's alternative
 * half-precision mode. */
MIXPI_V mixpi_vreg mixpi_vget_reg(mixp_dtype from, const void *p, int i) {
    const size_t size = from == MIXP_F16 || from == MIXP_BF16 ? 2 : 1;
    const char *at = (const char *)p + (size_t)i * 4 * size;
    uint16x4_t h;
    if (from == MIXP_F32) return (mixpi_vreg)mixpi_vbits_at(p, i);
    if (size == 2) h = vcreate_u16(mixpi_load_code(at, 8));
    else h = vget_low_u16(vmovl_u8(vcreate_u8(mixpi_load_code(at, 4))));
    return (mixpi_vreg)mixpi_vcode_widen(from, (mixpi_vbits)vmovl_u16(h));
}
MIXPI_V mixpi_v mixpi_vget(mixp_dtype from, const void *p) {
    mixpi_v r;
    int i;
    for (i = 0; i < 4; i++) r.q[i] = mixpi_vget_reg(from, p, i);
    return r;
}

MIXPI_V mixpi_vcodes mixpi_vnarrow(mixp_dtype to, mixpi_v a) {
    mixpi_vcodes r;
    int i;
    for (i = 0; i < 4; i++) r.q[i] = mixpi_vcode_nearest(to, (mixpi_vbits)a.q[i]);
    return r;
}
MIXPI_V mixpi_vcodes mixpi_vnarrow_by(mixp_dtype to, mixpi_v a, const mixp_rounding *r,
                                      const uint32_t *random) {
    mixpi_vcodes c;
    int i;
    for (i = 0; i < 4; i++)
        c.q[i] = mixpi_vcode_rounded(to, (mixpi_vbits)a.q[i], r->saturate, r->stochastic,
                                     mixpi_vbits_at(random, i));
    return c;
}

MIXPI_V void mixpi_vput_codes(void *p, mixpi_vcodes a, int wide, int stream) {
    uint16_t t[16];
    int i;
    (void)stream;
    for (i = 0; i < 4; i++) vst1_u16(t + 4 * i, vmovn_u32((uint32x4_t)a.q[i]));
    if (wide) memcpy(p, t, sizeof t);
    for (i = 0; i < 16 && !wide; i++) ((uint8_t *)p)[i] = (uint8_t)t[i];
}

#else
/* --- plain C: an array --- */
typedef struct mixpi_v { float f[16]; } mixpi_v;
typedef struct mixpi_vcodes { uint32_t u[16]; } mixpi_vcodes;

MIXPI_V mixpi_v mixpi_vset(float x) {
    mixpi_v r;
    int i;
    for (i = 0; i < 16; i++) r.f[i] = x;
    return r;
}
MIXPI_V mixpi_v mixpi_vload(const float *p) {
    mixpi_v r;
    memcpy(r.f, p, sizeof r.f);
    return r;
}
MIXPI_V void mixpi_vstore(float *p, mixpi_v a) { memcpy(p, a.f, sizeof a.f); }
MIXPI_V mixpi_v mixpi_vadd(mixpi_v a, mixpi_v b) {
    int i;
    for (i = 0; i < 16; i++) a.f[i] += b.f[i];
    return a;
}
MIXPI_V mixpi_v mixpi_vsub(mixpi_v a, mixpi_v b) {
    int i;
    for (i = 0; i < 16; i++) a.f[i] -= b.f[i];
    return a;
}
MIXPI_V mixpi_v mixpi_vmul(mixpi_v a, mixpi_v b) {
    int i;
    for (i = 0; i < 16; i++) a.f[i] *= b.f[i];
    return a;
}
MIXPI_V mixpi_v mixpi_vdiv(mixpi_v a, mixpi_v b) {
    int i;
    for (i = 0; i < 16; i++) a.f[i] /= b.f[i];
    return a;
}
MIXPI_V mixpi_v mixpi_vmax(mixpi_v a, mixpi_v b) {
    int i;
    for (i = 0; i < 16; i++) a.f[i] = a.f[i] > b.f[i] ? a.f[i] : b.f[i];
    return a;
}
MIXPI_V mixpi_v mixpi_vmin(mixpi_v a, mixpi_v b) {
    int i;
    for (i = 0; i < 16; i++) a.f[i] = a.f[i] < b.f[i] ? a.f[i] : b.f[i];
    return a;
}
MIXPI_V mixpi_v mixpi_vsqrt(mixpi_v a) {
    int i;
    for (i = 0; i < 16; i++) a.f[i] = sqrtf(a.f[i]);
    return a;
}
MIXPI_V mixpi_v mixpi_vneg(mixpi_v a) {
    int i;
    for (i = 0; i < 16; i++) a.f[i] = -a.f[i];
    return a;
}
MIXPI_V mixpi_v mixpi_vabs(mixpi_v a) {
    int i;
    for (i = 0; i < 16; i++) a.f[i] = fabsf(a.f[i]);
    return a;
}
MIXPI_V mixpi_v mixpi_vround(mixpi_v a) {
    int i;
    for (i = 0; i < 16; i++) a.f[i] = nearbyintf(a.f[i]);
    return a;
}
MIXPI_V mixpi_v mixpi_vfma(mixpi_v a, mixpi_v b, mixpi_v c) {
    int i;
    for (i = 0; i < 16; i++) a.f[i] = fmaf(a.f[i], b.f[i], c.f[i]);
    return a;
}
MIXPI_V mixpi_v mixpi_vmla(mixpi_v a, mixpi_v b, mixpi_v c) {
    int i;
    for (i = 0; i < 16; i++) a.f[i] = a.f[i] * b.f[i] + c.f[i];
    return a;
}
MIXPI_V mixpi_v mixpi_vldexp(mixpi_v a, mixpi_v b) {
    int i;
    for (i = 0; i < 16; i++)
        a.f[i] *= mixp_f32_of_bits(((uint32_t)(int32_t)b.f[i] + 127u) << 23);
    return a;
}
MIXPI_V mixpi_v mixpi_vselect_gt(mixpi_v a, mixpi_v b, mixpi_v x, mixpi_v y) {
    int i;
    for (i = 0; i < 16; i++) x.f[i] = a.f[i] > b.f[i] ? x.f[i] : y.f[i];
    return x;
}

MIXPI_V float mixpi_vsum(mixpi_v a) {
    int i, half;
    for (half = 8; half >= 1; half /= 2)
        for (i = 0; i < half; i++) a.f[i] += a.f[i + half];
    return a.f[0];
}
MIXPI_V float mixpi_vmaxof(mixpi_v a) {
    int i;
    for (i = 1; i < 16; i++) a.f[0] = a.f[0] > a.f[i] ? a.f[0] : a.f[i];
    return a.f[0];
}

/* The bits as f32 of the code at p. */
MIXPI_V uint32_t mixpi_vcode_widen(mixp_dtype from, const void *p) {
    if (from == MIXP_F32) return (uint32_t)mixpi_load_code(p, 4);
    if (from == MIXP_BF16) return (uint32_t)mixpi_load_code(p, 2) << 16;
    if (from == MIXP_F16) return mixpi_f32_of_f16((uint32_t)mixpi_load_code(p, 2));
    if (from == MIXP_F8_E4M3) return mixpi_f32_of_e4m3((uint32_t)mixpi_load_code(p, 1));
    return mixpi_f32_of_f16((uint32_t)mixpi_load_code(p, 1) << 8);
}
MIXPI_V mixpi_v mixpi_vget(mixp_dtype from, const void *p) {
    const size_t size = from == MIXP_F32                        ? 4
                        : from == MIXP_F16 || from == MIXP_BF16 ? 2
                                                                : 1;
    mixpi_v r;
    size_t i;
    for (i = 0; i < 16; i++) {
        uint32_t u = mixpi_vcode_widen(from, (const char *)p + i * size);
        memcpy(&r.f[i], &u, sizeof u);
    }
    return r;
}

MIXPI_V uint32_t mixpi_vcode_nearest(mixp_dtype to, uint32_t u) {
    if (to == MIXP_BF16) return mixpi_bf16_of_f32(u);
    return to == MIXP_F16 ? mixpi_f16_of_f32(u) : mixpi_round_f32(to, u, 0, 0, 0);
}
MIXPI_V mixpi_vcodes mixpi_vnarrow(mixp_dtype to, mixpi_v a) {
    mixpi_vcodes r;
    int i;
    for (i = 0; i < 16; i++) r.u[i] = mixpi_vcode_nearest(to, mixp_bits_of_f32(a.f[i]));
    return r;
}
MIXPI_V mixpi_vcodes mixpi_vnarrow_by(mixp_dtype to, mixpi_v a, const mixp_rounding *r,
                                      const uint32_t *random) {
    mixpi_vcodes c;
    int i;
    for (i = 0; i < 16; i++)
        c.u[i] = mixpi_round_f32(to, mixp_bits_of_f32(a.f[i]), r->saturate, r->stochastic,
                                 random[i]);
    return c;
}

MIXPI_V void mixpi_vput_codes(void *p, mixpi_vcodes a, int wide, int stream) {
    uint16_t t[16];
    int i;
    (void)stream;
    for (i = 0; i < 16; i++) t[i] = (uint16_t)a.u[i];
    if (wide) memcpy(p, t, sizeof t);
    for (i = 0; i < 16 && !wide; i++) ((uint8_t *)p)[i] = (uint8_t)t[i];
}
#endif

/* --- what remains is the same everywhere, or where an instruction is missing --- */
MIXPI_V mixpi_v mixpi_vzero(void) { return mixpi_vset(0.0f); }

#if MIXPI_PASS != 2
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

/* mixp_random_at for 16 elements from `first` on. */
MIXPI_V void mixpi_vrandom(uint64_t key, uint64_t first, uint32_t *out) {
    uint64_t k;
    for (k = 0; k < 16; k++) out[k] = mixp_random_at(key, first + k);
}
#endif

#if MIXPI_PASS == 0 || MIXPI_PASS == 3
MIXPI_V void mixpi_vput_f32(void *p, mixpi_v a, int stream) {
    (void)stream;
    memcpy(p, &a, sizeof a);
}
MIXPI_V void mixpi_vput_f16(void *p, mixpi_v a, int stream)
{ mixpi_vput_codes(p, mixpi_vnarrow(MIXP_F16, a), 1, stream); }
#endif

/* The first min(left, 16) floats of p, then 0. */
MIXPI_V mixpi_v mixpi_vpart(const float *p, int64_t left)
{ return left >= 16 ? mixpi_vload(p) : mixpi_vload_n(p, (int)left); }

/* 16 elements to p, to nearest even. */
MIXPI_V void mixpi_vput(mixp_dtype to, void *p, mixpi_v a, int stream) {
    if (to == MIXP_F32) mixpi_vput_f32(p, a, stream);
    else if (to == MIXP_F16) mixpi_vput_f16(p, a, stream);
    else mixpi_vput_codes(p, mixpi_vnarrow(to, a), to == MIXP_BF16, stream);
}

/* The same, rounded as r says; to is narrow; index: of the first of them. */
MIXPI_V void mixpi_vput_rounded(mixp_dtype to, void *p, mixpi_v a, const mixp_rounding *r,
                                uint64_t key, uint64_t index) {
    uint32_t random[16] = { 0 };
    if (r->stochastic) mixpi_vrandom(key, index, random);
    mixpi_vput_codes(p, mixpi_vnarrow_by(to, a, r, random),
                     to == MIXP_F16 || to == MIXP_BF16, 0);
}

/* --- any narrow dtype as f32, a block at a time ---------------------------------------- *
 * A kernel's inner loop sees f32 only: the array itself when that is f32, otherwise a small
 * buffer that stays in L1. So every kernel takes every mix of dtypes and is written once. */
MIXPI_V int MIXPI_P(size)(mixp_dtype d)
{ return d == MIXP_F32 ? 4 : d == MIXP_F16 || d == MIXP_BF16 ? 2 : 1; }

/* n elements from i on will be read soon: their cache lines are asked for. None may exist. */
MIXPI_V void MIXPI_P(ask)(mixp_in a, int64_t i, int64_t n) {
    const char *p = (const char *)a.data + i * MIXPI_P(size)(a.dtype);
    int64_t at;
    for (at = 0; at < n * MIXPI_P(size)(a.dtype); at += 64) MIXPI_PREFETCH(p + at);
}

/* Inlined in plain C too: the dtypes must be known when the loop is compiled. */
#if defined(__GNUC__) && defined(__OPTIMIZE__) && !defined(MIXPI_SANITIZED)
#  define MIXPI_LOOP MIXPI_V __attribute__((__always_inline__))
#else
#  define MIXPI_LOOP MIXPI_V
#endif

/* n elements of one dtype to another, to nearest even. In place it works upwards: `to` must
 * not be wider. */
MIXPI_LOOP void MIXPI_P(run)(mixp_dtype to, mixp_dtype from, void *dst, const void *src,
                             int64_t n) {
    const int out = MIXPI_P(size)(to), in = MIXPI_P(size)(from);
    char *d = (char *)dst;
    const char *s = (const char *)src;
    unsigned char tail[64] = { 0 }, end[64];
    int64_t i;
    for (i = 0; i + 16 <= n; i += 16)
        mixpi_vput(to, d + i * out, mixpi_vget(from, s + i * in), 0);
    if (i == n) return;
    memcpy(tail, s + i * in, (size_t)(n - i) * (size_t)in);
    mixpi_vput(to, end, mixpi_vget(from, tail), 0);
    memcpy(d + i * out, end, (size_t)(n - i) * (size_t)out);
}

/* n floats to a narrow dtype, rounded as r says; index: of the first. */
MIXPI_LOOP void MIXPI_P(run_rounded)(mixp_dtype to, void *dst, const void *src, int64_t n,
                                     const mixp_rounding *r, uint64_t key,
                                     uint64_t index) {
    const int out = MIXPI_P(size)(to);
    char *d = (char *)dst;
    const char *s = (const char *)src;
    unsigned char tail[64] = { 0 }, end[32];
    int64_t i;
    for (i = 0; i + 16 <= n; i += 16, index += 16)
        mixpi_vput_rounded(to, d + i * out, mixpi_vget(MIXP_F32, s + i * 4), r, key,
                           index);
    if (i == n) return;
    memcpy(tail, s + i * 4, (size_t)(n - i) * 4);
    mixpi_vput_rounded(to, end, mixpi_vget(MIXP_F32, tail), r, key, index);
    memcpy(d + i * out, end, (size_t)(n - i) * (size_t)out);
}

MIXPI_K void MIXPI_P(widen_run)(mixp_dtype from, void *dst, const void *src, int64_t n) {
    if (from == MIXP_F16) MIXPI_P(run)(MIXP_F32, MIXP_F16, dst, src, n);
    if (from == MIXP_BF16) MIXPI_P(run)(MIXP_F32, MIXP_BF16, dst, src, n);
    if (from == MIXP_F8_E4M3) MIXPI_P(run)(MIXP_F32, MIXP_F8_E4M3, dst, src, n);
    if (from == MIXP_F8_E5M2) MIXPI_P(run)(MIXP_F32, MIXP_F8_E5M2, dst, src, n);
}
MIXPI_K void MIXPI_P(narrow_run)(mixp_dtype to, void *dst, const void *src, int64_t n) {
    if (to == MIXP_F16) MIXPI_P(run)(MIXP_F16, MIXP_F32, dst, src, n);
    if (to == MIXP_BF16) MIXPI_P(run)(MIXP_BF16, MIXP_F32, dst, src, n);
    if (to == MIXP_F8_E4M3) MIXPI_P(run)(MIXP_F8_E4M3, MIXP_F32, dst, src, n);
    if (to == MIXP_F8_E5M2) MIXPI_P(run)(MIXP_F8_E5M2, MIXP_F32, dst, src, n);
}
MIXPI_K void MIXPI_P(narrow_rounded)(mixp_dtype to, void *dst, const void *src, int64_t n,
                                     const mixp_rounding *r, uint64_t key,
                                     uint64_t index) {
    if (to == MIXP_F16) MIXPI_P(run_rounded)(MIXP_F16, dst, src, n, r, key, index);
    if (to == MIXP_BF16) MIXPI_P(run_rounded)(MIXP_BF16, dst, src, n, r, key, index);
    if (to == MIXP_F8_E4M3)
        MIXPI_P(run_rounded)(MIXP_F8_E4M3, dst, src, n, r, key, index);
    if (to == MIXP_F8_E5M2)
        MIXPI_P(run_rounded)(MIXP_F8_E5M2, dst, src, n, r, key, index);
}
#undef MIXPI_LOOP

/* Elements [i, i+n) of a as f32: where they lie, or in buf, which has room for MIXPI_BLOCK. */
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

/* p[0] q[0] + ... + p[n-1] q[n-1], likewise. */
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

/* What an output holds before it is written. */
MIXPI_V const float *MIXPI_P(held)(mixp_out a, int64_t i, int64_t n, float *buf)
{ return MIXPI_P(read)(mixpi_in(a.data, a.dtype), i, n, buf); }
/* Where to compute elements [i, ...) of a: in place when f32, else buf; then `placed`. */
MIXPI_V float *MIXPI_P(place)(mixp_out a, int64_t i, float *buf)
{ return a.dtype == MIXP_F32 ? (float *)a.data + i : buf; }
MIXPI_V void MIXPI_P(placed)(mixp_out a, int64_t i, int64_t n, const float *buf) {
    if (a.dtype == MIXP_F32) return;
    MIXPI_P(narrow_run)(a.dtype, (char *)a.data + i * MIXPI_P(size)(a.dtype), buf, n);
}

/* y[at, at+n) = v, or += v where y accumulates; n <= MIXPI_BLOCK. v is spoiled. */
MIXPI_K void MIXPI_P(write)(mixp_out y, int64_t at, int64_t n, float *v) {
    float buf[MIXPI_BLOCK];
    if (y.accumulate) MIXPI_P(floats_add)(v, v, MIXPI_P(held)(y, at, n, buf), n);
    if (y.dtype != MIXP_F32) MIXPI_P(placed)(y, at, n, v);
    else memcpy((float *)y.data + at, v, (size_t)n * sizeof(float));
}

/* --- convert, copy, fill ---------------------------------------------------------------- */
/* n elements of the same dtype, or of a pair that vector code serves, to nearest even: through
 * f32 where neither side is. */
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

/* The same, rounded as c says. */
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
/* A large array: stores pass the caches by. `pages` of 1024 elements are walked side by side: four
 * keep as many prefetchers of an Intel core busy, while an AMD core (Zen 5 was measured) narrows
 * 1.3 times as fast with one. dst is aligned to a cache line. Returns how many elements. */
MIXPI_V int64_t MIXPI_P(stream_run)(mixp_dtype to, mixp_dtype from, void *dst,
                                    const void *src, int64_t n, int pages) {
    const int out = MIXPI_P(size)(to), in = MIXPI_P(size)(from), line = 64 / out;
    const int64_t step = 1024 * (int64_t)pages;
    int64_t i, j, k;
    for (i = 0; i + step <= n; i += step)
        for (j = 0; j < 1024; j += line)
            for (k = i + j; k < i + step; k += 1024) {
                char *d = (char *)dst + k * out;
                const char *s = (const char *)src + k * in;
                int v;
                for (v = 0; v < line * in; v += 64) MIXPI_PREFETCH(s + step * in + v);
                for (v = 0; v < line; v += 16)
                    mixpi_vput(to, d + v * out, mixpi_vget(from, s + v * in), 1);
            }
    return i;
}
/* From f32 to a narrow dtype, or back. */
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
    _mm_sfence();
    return done;
}

/* Pairs that the processor converts rightly once the environment is the default one. Inlined, the
 * loops would run out of registers. */
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

/* The piece's first n elements are done. */
MIXPI_K void MIXPI_P(convert_skip)(mixpi_convert_piece *p, int64_t n) {
    p->dst = mixpi_out_at(p->dst, n);
    p->src = mixpi_in_at(p->src, n);
    p->first += n;
    p->n -= n;
}

/* The piece's stores pass the caches by, from dst's first whole cache line on; a rest is left. */
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

/* Conversions neither obey nor disturb the caller's floating-point environment: no rounding
 * mode, no flush to zero, no trap, no flag. Outside x86 they are integers and exact floats. */
MIXPI_K void MIXPI_P(convert_task)(void *arg, int64_t index, int worker) {
    const mixpi_convert_job *c = (const mixpi_convert_job *)arg;
    mixpi_convert_piece p = mixpi_convert_piece_of(c, index);
#if MIXPI_PASS == 1 || MIXPI_PASS == 2
    const unsigned usual = 0x1F80u;         /* to nearest, no trap, no flush to zero */
    unsigned env = _mm_getcsr();
    _mm_setcsr(usual);
    MIXPI_P(convert_piece)(c, &p);
    _mm_setcsr(env);
#else
    MIXPI_P(convert_piece)(c, &p);
#endif
    (void)worker;
}

MIXPI_K mixp_result MIXPI_P(convert)(const mixp_exec *x, const mixp_convert_args *k) {
    mixpi_convert_job c;
    mixp_result r;
    if (!mixpi_convert_starts(k, &r)) return r;
    mixpi_convert_plan(&c, k);
#if MIXPI_PASS == 1 || MIXPI_PASS == 2
    if (c.pages && !__builtin_cpu_is("amd")) c.pages = 4;
#endif
    mixpi_parallel(x, mixpi_ceil_div(k->n, c.chunk), MIXPI_P(convert_task), &c);
    return MIXP_OK;
}

/* One dense row; accumulate adds in f32 and rounds once. */
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

/* rows x cols elements at strides (r, c) to a dense tile; a size known when compiled is fast. */
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

/* A row to where its elements lie `step` apart. */
MIXPI_K void MIXPI_P(copy_spread)(mixp_out d, int64_t step, mixp_in s, int64_t n) {
    const int64_t size = (int64_t)mixp_dtype_size(d.dtype);
    char row[MIXPI_COPY_TILE * 8], *to = (char *)d.data;
    mixp_out dense = d;
    int64_t i;
    dense.data = row;
    if (d.accumulate) MIXPI_P(gather_any)(size, row, to, 1, n, 0, step);
    MIXPI_P(copy_row)(dense, s, n);
    for (i = 0; i < n; i++) memcpy(to + i * step * size, row + i * size, (size_t)size);
}

/* One tile, at dst and src. */
MIXPI_K void MIXPI_P(copy_tile)(const mixpi_copy_job *c, mixp_out dst, mixp_in src,
                                int64_t rows, int64_t cols) {
    const int a = c->axes.rank - 2, b = a + 1;
    const int64_t *d = c->axes.s[0], *s = c->axes.s[1];
    const int64_t size = (int64_t)mixp_dtype_size(src.dtype);
    char tile[MIXPI_COPY_TILE * MIXPI_COPY_TILE * 8];
    int64_t row_step = s[a], r;
    if (!c->dense) {
        MIXPI_P(gather_any)(size, tile, (const char *)src.data, rows, cols, s[a], s[b]);
        src.data = tile;
        row_step = cols;
    }
    for (r = 0; r < rows; r++) {
        mixp_out to = mixpi_out_at(dst, r * d[a]);
        mixp_in from = mixpi_in_at(src, r * row_step);
        if (d[b] == 1) MIXPI_P(copy_row)(to, from, cols);
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
    int k, axis;
    for (k = 0; k < 2; k++) off[k] = row * x->s[k][a] + col * x->s[k][b];
    for (axis = a - 1; axis >= 0; axis--) {
        for (k = 0; k < 2; k++) off[k] += rest % x->n[axis] * x->s[k][axis];
        rest /= x->n[axis];
    }
    MIXPI_P(copy_tile)(c, mixpi_out_at(c->dst, off[0]), mixpi_in_at(c->src, off[1]),
                       mixpi_min(x->n[a] - row, c->tile_rows),
                       mixpi_min(x->n[b] - col, c->tile_cols));
}

MIXPI_K mixp_result MIXPI_P(copy)(const mixp_exec *x, const mixp_copy_args *k) {
    mixpi_copy_job c;
    mixp_result r;
    if (!mixpi_copy_starts(k, &r)) return r;
    mixpi_copy_plan(&c, k);
    mixpi_each_unit(x, c.tiles, c.dense ? 1 : 16, MIXPI_P(copy_unit), &c);
    return MIXP_OK;
}

/* Copies a pattern of the value's bytes over and over. */
MIXPI_K mixp_result MIXPI_P(fill)(const mixp_exec *x, const mixp_fill_args *k) {
    const size_t size = mixp_dtype_size(k->dst.dtype), bytes = (size_t)k->n * size;
    unsigned char pattern[4096];
    mixp_copy_args c;
    uint64_t code;
    size_t wide, i;
    if (!size) return MIXP_ERR_DTYPE;
    if (k->n < 0 || k->dst.accumulate || (k->n && !k->dst.data)) return MIXP_ERR_ARGUMENT;
    if (k->n == 0) return MIXP_OK;
    code = mixp_encode(k->dst.dtype, k->value, 0);
    wide = bytes < sizeof pattern ? bytes : sizeof pattern;
    for (i = 0; i < wide; i += size) mixpi_store_code(pattern + i, size, code);
    memset(&c, 0, sizeof c);
    c.rank = 2;
    c.shape[0] = (int64_t)(bytes / wide);
    c.shape[1] = (int64_t)wide;
    c.src = mixpi_in(pattern, MIXP_U8);
    c.src_strides[1] = 1;
    c.dst = mixpi_out_to(k->dst.data, MIXP_U8, 0);
    c.dst_strides[0] = (int64_t)wide;
    c.dst_strides[1] = 1;
    memcpy((char *)k->dst.data + bytes / wide * wide, pattern, bytes % wide);
    return MIXPI_P(copy)(x, &c);
}

/* --- elementwise, reductions, dropout -------------------------------------------------- */
/* NaN stays NaN. */
MIXPI_V mixpi_v mixpi_vclamp(mixpi_v x, float low, float high)
{ return mixpi_vmin(mixpi_vset(high), mixpi_vmax(mixpi_vset(low), x)); }

/* Four steps of a polynomial in x: from p to (((p x + a) x + b) x + c) x + d. */
MIXPI_V mixpi_v mixpi_vpoly(mixpi_v p, mixpi_v x, float a, float b, float c, float d) {
    p = mixpi_vfma(mixpi_vfma(p, x, mixpi_vset(a)), x, mixpi_vset(b));
    return mixpi_vfma(mixpi_vfma(p, x, mixpi_vset(c)), x, mixpi_vset(d));
}

/* x in [-104, 89] or NaN: e^x = 2^n (1 + the result), n a whole number. */
MIXPI_V mixpi_v mixpi_vexpm1_part(mixpi_v x, mixpi_v *n) {
    mixpi_v r, p;
    *n = mixpi_vround(mixpi_vmax(mixpi_vmul(x, mixpi_vset(1.44269504f)), mixpi_vset(-151.0f)));
    r = mixpi_vfma(*n, mixpi_vset(-0.693147182f), x);
    r = mixpi_vfma(*n, mixpi_vset(1.90465430e-9f), r);
    p = mixpi_vpoly(mixpi_vset(0.001395077975f), r,
                    0.008369072816f, 0.04166620157f, 0.1666651731f, 0.5000000096f);
    return mixpi_vfma(mixpi_vmul(r, r), p, r);
}

/* e^x to about 1 ulp; 0, Inf and subnormals where they belong; NaN stays NaN. The power of
 * two goes on in two halves, so that only the last step can round or overflow. */
MIXPI_V mixpi_v mixpi_vexp(mixpi_v x) {
    mixpi_v n, half, p = mixpi_vexpm1_part(mixpi_vclamp(x, -104.0f, 89.0f), &n);
    half = mixpi_vround(mixpi_vmul(n, mixpi_vset(0.5f)));
    p = mixpi_vadd(p, mixpi_vset(1.0f));
    return mixpi_vldexp(mixpi_vldexp(p, half), mixpi_vsub(n, half));
}

/* Natural logarithm to about 1 ulp: -Inf at 0, NaN below. x = 2^e (1 + f), -0.293 < f < 0.415. */
MIXPI_V mixpi_v mixpi_vlog(mixpi_v x) {
    const mixpi_v inf = mixpi_vset(mixp_f32_of_bits(0x7F800000u));
    const mixpi_v tiny = mixpi_vset(1.17549435e-38f);
    mixpi_v f, e, q, bad;
    uint32_t u[16], base = 0x3F3504F3u;
    float t[16];
    int i;
    mixpi_vstore(t, mixpi_vselect_gt(tiny, x, mixpi_vmul(x, mixpi_vset(8388608.0f)), x));
    memcpy(u, t, sizeof u);
    for (i = 0; i < 16; i++) {
        uint32_t v = u[i] + (0x3F800000u - base);
        t[i] = (float)((int32_t)(v >> 23) - 127);
        u[i] = (v & 0x7FFFFFu) + base;
    }
    e = mixpi_vsub(mixpi_vload(t),
                   mixpi_vselect_gt(tiny, x, mixpi_vset(23.0f), mixpi_vzero()));
    memcpy(t, u, sizeof u);
    f = mixpi_vsub(mixpi_vload(t), mixpi_vset(1.0f));
    q = mixpi_vpoly(mixpi_vset(-0.07873066208f), f,
                    0.1289963641f, -0.1313190387f, 0.141788926f, -0.166240422f);
    q = mixpi_vpoly(q, f, 0.200023723f, -0.2500082519f, 0.3333331583f, -0.5f);
    q = mixpi_vfma(mixpi_vmul(f, f), q, mixpi_vmul(e, mixpi_vset(-1.90465430e-9f)));
    q = mixpi_vfma(e, mixpi_vset(0.693147182f), mixpi_vadd(q, f));
    q = mixpi_vselect_gt(x, mixpi_vset(3.40282347e38f), x, q);
    bad = mixpi_vselect_gt(mixpi_vzero(), x, mixpi_vset(mixp_f32_of_bits(0x7FC00000u)),
                           mixpi_vsub(x, inf));     /* 0 gives -Inf, NaN stays */
    return mixpi_vselect_gt(x, mixpi_vzero(), q, bad);
}

/* log(1 + u) for u >= -1, accurate for small u: what 1 + u cut off comes back in c. */
MIXPI_V mixpi_v mixpi_vlog1p(mixpi_v u) {
    mixpi_v one = mixpi_vset(1.0f), w = mixpi_vadd(one, u);
    mixpi_v c = mixpi_vsub(u, mixpi_vsub(w, one));
    return mixpi_vadd(mixpi_vlog(w), mixpi_vdiv(c, mixpi_vmax(w, mixpi_vset(1e-30f))));
}

/* (e^2x - 1) / (e^2x + 1), with an e^2x - 1 that does not cancel. At -0 that would be +0. */
MIXPI_V mixpi_v mixpi_vtanh(mixpi_v x) {
    mixpi_v n, s,
        m = mixpi_vexpm1_part(mixpi_vclamp(mixpi_vadd(x, x), -20.0f, 20.0f), &n);
    s = mixpi_vldexp(mixpi_vset(1.0f), mixpi_vmax(n, mixpi_vset(-30.0f)));
    m = mixpi_vfma(m, s, mixpi_vsub(s, mixpi_vset(1.0f)));
    m = mixpi_vdiv(m, mixpi_vadd(m, mixpi_vset(2.0f)));
    return mixpi_vselect_gt(mixpi_vabs(x), mixpi_vzero(), m, x);
}

/* 1 / (1 + e^-x), and in *rest one minus that: both accurate in their tails. */
MIXPI_V mixpi_v mixpi_vsigmoid(mixpi_v x, mixpi_v *rest) {
    mixpi_v e = mixpi_vexp(mixpi_vneg(mixpi_vabs(x)));
    mixpi_v q = mixpi_vdiv(mixpi_vset(1.0f), mixpi_vadd(e, mixpi_vset(1.0f)));
    mixpi_v t = mixpi_vmul(e, q);
    *rest = mixpi_vselect_gt(x, mixpi_vzero(), t, q);
    return mixpi_vselect_gt(x, mixpi_vzero(), q, t);
}

/* The normal distribution up to x, and its *density at x. The tail beyond |x| is
 * e^(-x^2/2) w P(w) with w = 1 / (1 + |x|/4); x^2 keeps the bits that its product loses. */
MIXPI_V mixpi_v mixpi_vnormal(mixpi_v x, mixpi_v *density) {
    mixpi_v a = mixpi_vabs(x), h = mixpi_vmul(a, a),
            low = mixpi_vfma(a, a, mixpi_vneg(h));
    mixpi_v e = mixpi_vexp(mixpi_vmul(h, mixpi_vset(-0.5f))), w, t;
    e = mixpi_vfma(e, mixpi_vmul(low, mixpi_vset(-0.5f)), e);
    w = mixpi_vdiv(mixpi_vset(1.0f), mixpi_vfma(a, mixpi_vset(0.25f), mixpi_vset(1.0f)));
    t = mixpi_vfma(mixpi_vset(0.01689220812f), w, mixpi_vset(-0.06453599243f));
    t = mixpi_vpoly(t, w, 0.05587645189f, 0.022615288f, 0.01773075942f, 0.08385351653f);
    t = mixpi_vpoly(t, w, 0.07301195564f, 0.0952880527f, 0.09952143354f, 0.0997463309f);
    t = mixpi_vmul(mixpi_vmul(t, w), e);
    *density = mixpi_vmul(e, mixpi_vset(MIXPI_DENSITY));
    return mixpi_vselect_gt(x, mixpi_vzero(), mixpi_vsub(mixpi_vset(1.0f), t), t);
}

MIXPI_V mixpi_v mixpi_vpow(mixpi_v x, float p) {
    float t[16];
    int i;
    if (p == 1.0f) return x;
    if (p == 2.0f) return mixpi_vmul(x, x);
    if (p == 3.0f) return mixpi_vmul(mixpi_vmul(x, x), x);
    if (p == 0.5f) return mixpi_vsqrt(x);
    if (p == -1.0f) return mixpi_vdiv(mixpi_vset(1.0f), x);
    mixpi_vstore(t, x);
    for (i = 0; i < 16; i++) t[i] = powf(t[i], p);
    return mixpi_vload(t);
}

/* sin x, or cos x: libm's, on every instruction set. */
MIXPI_V mixpi_v mixpi_vwave(mixpi_v x, int cosine) {
    float t[16];
    int i;
    mixpi_vstore(t, x);
    for (i = 0; i < 16; i++) t[i] = cosine ? cosf(t[i]) : sinf(t[i]);
    return mixpi_vload(t);
}

/* The larger, or the smaller; NaN where either is: vmax and vmin keep b's, and a's comes back in
 * a product with 0. */
MIXPI_V mixpi_v mixpi_vlarger(mixpi_v a, mixpi_v b)
{ return mixpi_vfma(mixpi_vclamp(a, -1.0f, 1.0f), mixpi_vzero(), mixpi_vmax(a, b)); }
MIXPI_V mixpi_v mixpi_vsmaller(mixpi_v a, mixpi_v b)
{ return mixpi_vfma(mixpi_vclamp(a, -1.0f, 1.0f), mixpi_vzero(), mixpi_vmin(a, b)); }

/* x with the sign of s; 0 where s is 0. */
MIXPI_V mixpi_v mixpi_vsign(mixpi_v s, mixpi_v x) {
    mixpi_v below = mixpi_vselect_gt(mixpi_vzero(), s, mixpi_vneg(x), mixpi_vzero());
    return mixpi_vselect_gt(s, mixpi_vzero(), x, below);
}

/* As mixpi_vtanh, of 0.6 and more in absolute value; *rest: what the sum and the division round
 * off. */
MIXPI_V mixpi_v MIXPI_P(tanh_far)(mixpi_v x, mixpi_v *rest) {
    mixpi_v one = mixpi_vset(1.0f), two = mixpi_vset(2.0f), n, s, m, q, t, low;
    m = mixpi_vexpm1_part(mixpi_vclamp(mixpi_vadd(x, x), -20.0f, 20.0f), &n);
    s = mixpi_vldexp(one, mixpi_vmax(n, mixpi_vset(-30.0f)));
    m = mixpi_vfma(m, s, mixpi_vsub(s, one));
    q = mixpi_vadd(m, two);
    t = mixpi_vdiv(m, q);
    low = mixpi_vsub(m, mixpi_vsub(q, two));            /* q + low is m + 2 */
    low = mixpi_vsub(mixpi_vfma(mixpi_vneg(t), q, m), mixpi_vmul(t, low));
    *rest = mixpi_vdiv(low, q);
    return t;
}

/* tanh(x / p) is the result + *rest, for a logit is p times that: below 0.6 by a polynomial, and
 * with what the first division rounds off. */
MIXPI_V mixpi_v mixpi_vtanh_of(mixpi_v x, float p, mixpi_v *rest) {
    mixpi_v by = mixpi_vset(p), u = mixpi_vdiv(x, by), z = mixpi_vmul(u, u), low, far, t;
    mixpi_v q = mixpi_vset(0.002231052844f), zero = mixpi_vzero();
    q = mixpi_vpoly(q, z, -0.008267078549f, 0.02173443511f, -0.05395247415f, 0.133332476f);
    q = mixpi_vmul(mixpi_vmul(mixpi_vfma(q, z, mixpi_vset(-0.3333333135f)), z), u);
    t = mixpi_vadd(u, q);
    low = mixpi_vadd(mixpi_vsub(u, t), q);
    far = MIXPI_P(tanh_far)(u, rest);
    low = mixpi_vselect_gt(mixpi_vset(0.36f), z, low, *rest);
    t = mixpi_vselect_gt(mixpi_vset(0.36f), z, t, far);
    q = mixpi_vdiv(mixpi_vfma(mixpi_vneg(u), by, x), by);       /* u + q is x / p */
    low = mixpi_vfma(q, mixpi_vfma(mixpi_vneg(t), t, mixpi_vset(1.0f)), low);
    *rest = mixpi_vselect_gt(mixpi_vset(20.0f), mixpi_vabs(u), low, zero);
    return t;
}

MIXPI_V mixpi_v mixpi_vwhere(mixpi_v mask, mixpi_v a, mixpi_v b)
{ return mixpi_vselect_gt(mixpi_vabs(mask), mixpi_vzero(), a, b); }

/* x (GELU_LINEAR + GELU_CUBIC x^2). */
MIXPI_V mixpi_v MIXPI_P(gelu_2u)(mixpi_v x, mixpi_v square) {
    const mixpi_v linear = mixpi_vset(MIXPI_GELU_LINEAR),
                  cubic = mixpi_vset(MIXPI_GELU_CUBIC);
    return mixpi_vmul(x, mixpi_vfma(square, cubic, linear));
}

MIXPI_V mixpi_v MIXPI_P(unary_value)(mixp_unary op, mixpi_v a, float p, float q) {
    mixpi_v t;
    switch (op) {
    case MIXP_UNARY_RELU:
        return mixpi_vmax(mixpi_vzero(), a);
    case MIXP_UNARY_GELU_TANH:          /* a (1 + tanh u) / 2 = a sigmoid(2u) */
        t = MIXPI_P(gelu_2u)(a, mixpi_vmul(a, a));
        return mixpi_vmul(a, mixpi_vsigmoid(t, &t));
    case MIXP_UNARY_GELU_ERF:
        t = mixpi_vclamp(a, -MIXPI_ERF_BOUND, MIXPI_ERF_BOUND);
        return mixpi_vmul(a, mixpi_vnormal(t, &t));
    case MIXP_UNARY_SILU:
        return mixpi_vmul(a, mixpi_vsigmoid(a, &t));
    case MIXP_UNARY_TANH:
        return mixpi_vtanh(a);
    case MIXP_UNARY_SIGMOID:
        return mixpi_vsigmoid(a, &t);
    case MIXP_UNARY_EXP:
        return mixpi_vexp(a);
    case MIXP_UNARY_LOG:
        return mixpi_vlog(a);
    case MIXP_UNARY_SQRT:
        return mixpi_vsqrt(a);
    case MIXP_UNARY_POW:
        return mixpi_vpow(a, p);
    case MIXP_UNARY_SCALE:
        return mixpi_vmul(a, mixpi_vset(p));
    case MIXP_UNARY_RELU_SQUARED:
        t = mixpi_vmax(mixpi_vzero(), a);
        return mixpi_vmul(t, t);
    case MIXP_UNARY_ABS:
        return mixpi_vabs(a);
    case MIXP_UNARY_SIN:
        return mixpi_vwave(a, 0);
    case MIXP_UNARY_COS:
        return mixpi_vwave(a, 1);
    case MIXP_UNARY_SOFT_CAP:
        a = mixpi_vtanh_of(a, p, &t);
        return mixpi_vfma(mixpi_vset(p), a, mixpi_vmul(mixpi_vset(p), t));
    case MIXP_UNARY_CLAMP:
        return mixpi_vclamp(a, p, q);
    case MIXP_UNARY_COUNT:
        break;
    }
    return a;
}

/* dy sigmoid(2u) + dy x sigmoid(2u) (1 - sigmoid(2u)) (2u)'; flat beyond the bound. */
MIXPI_V mixpi_v MIXPI_P(gelu_tanh_slope)(mixpi_v dy, mixpi_v x) {
    const mixpi_v linear = mixpi_vset(MIXPI_GELU_LINEAR),
                  cubic = mixpi_vset(MIXPI_GELU_SLOPE);
    mixpi_v square, s, rest, t;
    x = mixpi_vclamp(x, -MIXPI_GELU_BOUND, MIXPI_GELU_BOUND);
    square = mixpi_vmul(x, x);
    s = mixpi_vsigmoid(MIXPI_P(gelu_2u)(x, square), &rest);
    t = mixpi_vmul(mixpi_vmul(s, rest), x);
    return mixpi_vmul(dy, mixpi_vfma(t, mixpi_vfma(square, cubic, linear), s));
}

MIXPI_V mixpi_v MIXPI_P(gelu_erf_slope)(mixpi_v dy, mixpi_v x) {
    mixpi_v up_to, density;
    x = mixpi_vclamp(x, -MIXPI_ERF_BOUND, MIXPI_ERF_BOUND);
    up_to = mixpi_vnormal(x, &density);
    return mixpi_vmul(dy, mixpi_vfma(x, density, up_to));
}

MIXPI_V mixpi_v MIXPI_P(silu_slope)(mixpi_v dy, mixpi_v x) {
    mixpi_v s, rest;
    x = mixpi_vclamp(x, -MIXPI_SILU_BOUND, MIXPI_SILU_BOUND);
    s = mixpi_vsigmoid(x, &rest);
    return mixpi_vmul(dy, mixpi_vfma(mixpi_vmul(s, rest), x, s));
}

/* 1 - tanh^2(x / p), times dy. */
MIXPI_V mixpi_v MIXPI_P(soft_cap_slope)(mixpi_v dy, mixpi_v x, float p) {
    mixpi_v rest, t = mixpi_vtanh_of(x, p, &rest), s;
    s = mixpi_vfma(mixpi_vneg(t), t, mixpi_vset(1.0f));
    return mixpi_vmul(dy, mixpi_vfma(mixpi_vmul(mixpi_vset(-2.0f), t), rest, s));
}

/* 0 where x lies outside [p, q]: at the bounds dy passes, and of a NaN. */
MIXPI_V mixpi_v MIXPI_P(clamp_slope)(mixpi_v dy, mixpi_v x, float p, float q) {
    dy = mixpi_vselect_gt(mixpi_vset(p), x, mixpi_vzero(), dy);
    return mixpi_vselect_gt(x, mixpi_vset(q), mixpi_vzero(), dy);
}

/* dy times the slope; b: x, or y for those that are told by their result. */
MIXPI_V mixpi_v MIXPI_P(unary_slope)(mixp_unary op, mixpi_v dy, mixpi_v b, float p,
                                     float q) {
    const mixpi_v zero = mixpi_vzero(), one = mixpi_vset(1.0f);
    mixpi_v t;
    switch (op) {
    case MIXP_UNARY_RELU:               /* x <= 0 ? 0 : dy: NaN lets dy pass */
        return mixpi_vselect_gt(mixpi_vmin(b, one), zero, dy, zero);
    case MIXP_UNARY_GELU_TANH:
        return MIXPI_P(gelu_tanh_slope)(dy, b);
    case MIXP_UNARY_GELU_ERF:
        return MIXPI_P(gelu_erf_slope)(dy, b);
    case MIXP_UNARY_SILU:
        return MIXPI_P(silu_slope)(dy, b);
    case MIXP_UNARY_TANH:               /* 1 - y^2 */
        return mixpi_vmul(dy, mixpi_vfma(mixpi_vneg(b), b, one));
    case MIXP_UNARY_SIGMOID:            /* y - y^2 */
        return mixpi_vmul(dy, mixpi_vfma(mixpi_vneg(b), b, b));
    case MIXP_UNARY_EXP:
        return mixpi_vmul(dy, b);
    case MIXP_UNARY_LOG:
        return mixpi_vdiv(dy, b);
    case MIXP_UNARY_SQRT:
        return mixpi_vdiv(dy, mixpi_vadd(b, b));
    case MIXP_UNARY_POW:
        if (p == 0.0f) return zero;
        return mixpi_vmul(dy, mixpi_vmul(mixpi_vset(p), mixpi_vpow(b, p - 1.0f)));
    case MIXP_UNARY_SCALE:
        return mixpi_vmul(dy, mixpi_vset(p));
    case MIXP_UNARY_RELU_SQUARED:
        t = mixpi_vmax(zero, b);
        return mixpi_vmul(dy, mixpi_vadd(t, t));
    case MIXP_UNARY_ABS:
        return mixpi_vsign(b, dy);  /* plant: abs_slope */
    case MIXP_UNARY_SIN:
        return mixpi_vmul(dy, mixpi_vwave(b, 1));
    case MIXP_UNARY_COS:
        return mixpi_vneg(mixpi_vmul(dy, mixpi_vwave(b, 0)));
    case MIXP_UNARY_SOFT_CAP:
        return MIXPI_P(soft_cap_slope)(dy, b, p);
    case MIXP_UNARY_CLAMP:
        return MIXPI_P(clamp_slope)(dy, b, p, q);
    case MIXP_UNARY_COUNT:
        break;
    }
    return dy;
}

MIXPI_V mixpi_v MIXPI_P(binary_value)(mixp_binary op, mixpi_v a, mixpi_v b) {
    mixpi_v t;
    switch (op) {
    case MIXP_BINARY_ADD: return mixpi_vadd(a, b);
    case MIXP_BINARY_SUB: return mixpi_vsub(a, b);
    case MIXP_BINARY_MUL: return mixpi_vmul(a, b);
    case MIXP_BINARY_DIV: return mixpi_vdiv(a, b);
    case MIXP_BINARY_MAXIMUM: return mixpi_vlarger(a, b);
    case MIXP_BINARY_MINIMUM: return mixpi_vsmaller(a, b);
    case MIXP_BINARY_SWIGLU:
        a = mixpi_vmul(a, mixpi_vsigmoid(a, &t));
        return mixpi_vmul(a, b);
    case MIXP_BINARY_COUNT: break;
    }
    return a;
}

/* The gradient of b in a / b: -dy a / b^2. */
MIXPI_V mixpi_v MIXPI_P(divisor_slope)(mixpi_v dy, mixpi_v a, mixpi_v b)
{ return mixpi_vneg(mixpi_vdiv(mixpi_vmul(dy, mixpi_vdiv(a, b)), b)); }

/* The gradient of x in the larger of x and y: of equal ones, half. */
MIXPI_V mixpi_v MIXPI_P(larger_slope)(mixpi_v dy, mixpi_v x, mixpi_v y) {
    mixpi_v half = mixpi_vmul(dy, mixpi_vset(0.5f));  /* plant: maximum_tie */
    half = mixpi_vselect_gt(y, x, mixpi_vzero(), half);
    return mixpi_vselect_gt(x, y, dy, half);
}

/* A probability's logarithm. */
MIXPI_V mixpi_v MIXPI_P(bce_log)(mixpi_v log)
{ return mixpi_vmax(mixpi_vset(MIXPI_BCE_LOG_LEAST), log); }

/* Of a difference d; one of up to delta counts by its square. */
MIXPI_V mixpi_v MIXPI_P(huber_value)(mixpi_v d, float delta) {
    mixpi_v half = mixpi_vset(0.5f), bound = mixpi_vset(delta), far;
    d = mixpi_vabs(d);
    far = mixpi_vmul(bound, mixpi_vsub(d, mixpi_vmul(half, bound)));
    return mixpi_vselect_gt(bound, d, mixpi_vmul(mixpi_vmul(half, d), d), far);
}

/* Of x against its target; a probability of 0 counts nothing. */
MIXPI_V mixpi_v MIXPI_P(kl_value)(mixpi_v x, mixpi_v target) {
    mixpi_v t = mixpi_vmul(target, mixpi_vsub(mixpi_vlog(target), x));
    return mixpi_vselect_gt(mixpi_vabs(target), mixpi_vzero(), t, mixpi_vmul(target, target));
}

/* Of x against its target. */
MIXPI_V mixpi_v MIXPI_P(loss_value)(mixp_loss_kind kind, mixpi_v x, mixpi_v target,
                                    float delta) {
    const mixpi_v one = mixpi_vset(1.0f);
    mixpi_v s, t;
    switch (kind) {
    case MIXP_LOSS_MSE:
        s = mixpi_vsub(x, target);
        return mixpi_vmul(s, s);
    case MIXP_LOSS_BCE_LOGITS:
        t = mixpi_vlog1p(mixpi_vexp(mixpi_vneg(mixpi_vabs(x))));
        s = mixpi_vfma(mixpi_vneg(x), target, mixpi_vmax(mixpi_vzero(), x));
        return mixpi_vadd(s, t);
    case MIXP_LOSS_BCE:
        s = MIXPI_P(bce_log)(mixpi_vlog(x));
        t = MIXPI_P(bce_log)(mixpi_vlog1p(mixpi_vneg(x)));
        t = mixpi_vmul(mixpi_vsub(one, target), t);
        return mixpi_vneg(mixpi_vfma(target, s, t));
    case MIXP_LOSS_L1:
        return mixpi_vabs(mixpi_vsub(x, target));
    case MIXP_LOSS_HUBER:
        return MIXPI_P(huber_value)(mixpi_vsub(x, target), delta);
    case MIXP_LOSS_SMOOTH_L1:
        s = MIXPI_P(huber_value)(mixpi_vsub(x, target), delta);
        return mixpi_vdiv(s, mixpi_vset(delta));
    case MIXP_LOSS_KL:
        return MIXPI_P(kl_value)(x, target);
    case MIXP_LOSS_KL_LOG:
        return mixpi_vmul(mixpi_vexp(target), mixpi_vsub(target, x));
    case MIXP_LOSS_COUNT:
        break;
    }
    return x;
}

/* p times its slope. */
MIXPI_V mixpi_v MIXPI_P(loss_slope)(mixp_loss_kind kind, mixpi_v x, mixpi_v target,
                                    float p, float delta) {
    const mixpi_v one = mixpi_vset(1.0f), by = mixpi_vset(p);
    mixpi_v s, t;
    switch (kind) {
    case MIXP_LOSS_MSE:
        s = mixpi_vmul(mixpi_vset(2.0f), mixpi_vsub(x, target));
        return mixpi_vmul(s, by);
    case MIXP_LOSS_BCE_LOGITS:          /* (1-t) s - t (1-s): no cancelling */
        s = mixpi_vsigmoid(x, &t);
        s = mixpi_vmul(mixpi_vsub(one, target), s);
        return mixpi_vmul(mixpi_vfma(mixpi_vneg(target), t, s), by);
    case MIXP_LOSS_BCE:
        s = mixpi_vmul(mixpi_vsub(x, target), by);
        t = mixpi_vmul(mixpi_vsub(one, x), x);
        return mixpi_vdiv(s, mixpi_vmax(mixpi_vset(MIXPI_BCE_LEAST), t));
    case MIXP_LOSS_L1:
        return mixpi_vsign(mixpi_vsub(x, target), by);
    case MIXP_LOSS_HUBER:
        return mixpi_vmul(mixpi_vclamp(mixpi_vsub(x, target), -delta, delta), by);
    case MIXP_LOSS_SMOOTH_L1:
        s = mixpi_vdiv(mixpi_vsub(x, target), mixpi_vset(delta));
        return mixpi_vmul(mixpi_vclamp(s, -1.0f, 1.0f), by);
    case MIXP_LOSS_KL:
        return mixpi_vneg(mixpi_vmul(target, by));
    case MIXP_LOSS_KL_LOG:
        return mixpi_vneg(mixpi_vmul(mixpi_vexp(target), by));
    case MIXP_LOSS_COUNT:
        break;
    }
    return x;
}

/* y = fn over n floats: one loop for each fn; what is left beyond 16s goes by way of t. */
#define MIXPI_CASE(fn, value)                                                             \
    case fn:                                                                              \
        for (j = 0; j < full; j += 16) mixpi_vstore(y + j, value);                        \
        break;
#define MIXPI_A mixpi_vload(a + j)
#define MIXPI_B mixpi_vload(b + j)
#define MIXPI_C mixpi_vload(c + j)
#define MIXPI_UNARY_CASE(op)                                                              \
    MIXPI_CASE(MIXPI_FN_UNARY + (int)MIXP_UNARY_##op,                                     \
               MIXPI_P(unary_value)(MIXP_UNARY_##op, MIXPI_A, p, q))                      \
    MIXPI_CASE(MIXPI_FN_UNARY_D + (int)MIXP_UNARY_##op,                                   \
               MIXPI_P(unary_slope)(MIXP_UNARY_##op, MIXPI_A, MIXPI_B, p, q))
#define MIXPI_BINARY_CASE(op)                                                             \
    MIXPI_CASE(MIXPI_FN_BINARY + (int)MIXP_BINARY_##op,                                   \
               MIXPI_P(binary_value)(MIXP_BINARY_##op, MIXPI_A, MIXPI_B))
#define MIXPI_LOSS_CASE(kind)                                                             \
    MIXPI_CASE(MIXPI_FN_LOSS + (int)MIXP_LOSS_##kind,                                     \
               MIXPI_P(loss_value)(MIXP_LOSS_##kind, MIXPI_A, MIXPI_B, q))                \
    MIXPI_CASE(MIXPI_FN_LOSS_D + (int)MIXP_LOSS_##kind,                                   \
               MIXPI_P(loss_slope)(MIXP_LOSS_##kind, MIXPI_A, MIXPI_B, p, q))
MIXPI_K void MIXPI_P(values)(int fn, float p, float q, float *y, const float *const *s,
                             int64_t n) {
    const float *a = s[0], *b = s[1], *c = s[2], *tail[3];
    float t[4][16];
    int64_t j, full = n & ~(int64_t)15;
    size_t left = (size_t)(n - full) * sizeof(float);
    switch (fn) {
    MIXPI_UNARIES(MIXPI_UNARY_CASE)
    MIXPI_BINARIES(MIXPI_BINARY_CASE)
    MIXPI_CASE(MIXPI_FN_DIVISOR_D, MIXPI_P(divisor_slope)(MIXPI_A, MIXPI_B, MIXPI_C))
    MIXPI_CASE(MIXPI_FN_LARGER_D, MIXPI_P(larger_slope)(MIXPI_A, MIXPI_B, MIXPI_C))
    MIXPI_CASE(MIXPI_FN_GATE_D,
               MIXPI_P(silu_slope)(mixpi_vmul(MIXPI_A, MIXPI_C), MIXPI_B))
    MIXPI_CASE(MIXPI_FN_WHERE, mixpi_vwhere(MIXPI_A, MIXPI_B, MIXPI_C))
    MIXPI_CASE(MIXPI_FN_KEPT, mixpi_vwhere(MIXPI_A, MIXPI_B, mixpi_vset(q)))
    MIXPI_CASE(MIXPI_FN_MASKED, mixpi_vwhere(MIXPI_A, mixpi_vset(q), MIXPI_B))
    MIXPI_LOSSES(MIXPI_LOSS_CASE)
    default: break;
    }
    if (left == 0) return;
    memset(t, 0, sizeof t);
    for (j = 0; j < 3; j++) {
        memcpy(t[j], s[j] + full, left);
        tail[j] = t[j];
    }
    MIXPI_P(values)(fn, p, q, t[3], tail, 16);
    memcpy(y + full, t[3], left);
}

/* buf holds n elements: what it begins with, over and over. */
MIXPI_K void MIXPI_P(repeat)(float *buf, int64_t period, int64_t n) {
    int64_t have;
    for (have = period; have < n; have += have)
        memcpy(buf + have, buf, (size_t)mixpi_min(n - have, have) * sizeof(float));
}

/* Elements [j, j+n) along the last axis of source k as floats; at: where its row starts. */
MIXPI_K const float *MIXPI_P(map_source)(const mixpi_map *m, int k, int64_t at, int64_t j,
                                         int64_t n, float *buf) {
    mixp_in a = m->a[k];
    int64_t i, step = m->axes.s[k + 1][m->axes.rank - 1];
    if (step == 1) return MIXPI_P(read)(a, at + j, n, buf);
    if (m->periodic[k + 1]) {
        const float *p = MIXPI_P(read)(a, at, m->period, buf);
        if (p != buf) memcpy(buf, p, (size_t)m->period * sizeof(float));
        MIXPI_P(repeat)(buf, m->period, n);
    } else if (step == 0) {
        mixpi_v v = mixpi_vset(MIXPI_P(read_one)(a, at));
        for (i = 0; i < n; i += 16) mixpi_vstore(buf + i, v);
    } else {
        for (i = 0; i < n; i++) buf[i] = MIXPI_P(read_one)(a, at + (j + i) * step);
    }
    return buf;
}

/* Elements [j, j+n) of the row at off[] as floats: in y, or where they lie already. */
MIXPI_K const float *MIXPI_P(map_block)(const mixpi_map *m, const int64_t *off, int64_t j,
                                        int64_t n, float *y) {
    float buf[3][MIXPI_BLOCK];
    const float *s[3] = { NULL, NULL, NULL };
    int k;
    if (m->fn == MIXPI_FN_COPY) return MIXPI_P(map_source)(m, 0, off[1], j, n, y);
    for (k = 0; k < m->sources; k++)
        s[k] = MIXPI_P(map_source)(m, k, off[k + 1], j, n, buf[k]);
    for (; k < 3; k++) s[k] = s[0];         /* read for nothing, by functions of fewer */
    MIXPI_P(values)(m->fn, m->p, m->q, y, s, n);
    return y;
}

/* One block of a map. */
MIXPI_K void MIXPI_P(map_unit)(const void *job, int64_t unit) {
    const mixpi_map *m = (const mixpi_map *)job;
    float buf[MIXPI_BLOCK], *y = buf;
    int64_t off[4] = { 0, 0, 0, 0 }, j = unit % m->blocks * m->width;
    int64_t n = mixpi_min(m->width, m->cols - j);
    mixpi_map_offsets(m, 0, unit / m->blocks, off);
    if (!m->y.accumulate) y = MIXPI_P(place)(m->y, off[0] + j, buf);
    MIXPI_P(map_block)(m, off, j, n, y);
    if (y == buf) MIXPI_P(write)(m->y, off[0] + j, n, y);
}

/* y (+)= m's values. */
MIXPI_K mixp_result MIXPI_P(map_run)(const mixp_exec *x, mixpi_map *m) {
    if (!mixpi_map_is_real(m)) return MIXP_ERR_DTYPE;
    mixpi_map_plan(m);
    mixpi_each_unit(x, m->outputs * m->blocks,
                    mixpi_ceil_div(MIXPI_GRAIN, mixpi_map_block(m)), MIXPI_P(map_unit),
                    m);
    return MIXP_OK;
}

/* --- sums --- */

/* acc[i] = sum of acc[i], acc[i + period], ... below n. */
MIXPI_K void MIXPI_P(sum_fold)(float *acc, int64_t n, int64_t period) {
    int64_t i, k;
    if (period == 1) {
        acc[0] = MIXPI_P(floats_sum)(acc, n);
        return;
    }
    for (i = 0; i < period; i++) {
        double t = 0.0;
        for (k = i; k < n; k += period) t += (double)acc[k];
        acc[i] = (float)t;
    }
}

/* acc[0, n) = the sum of a run of rows of the tile that starts in column j, at base[]. */
MIXPI_K void MIXPI_P(sum_rows)(const mixpi_sum *s, const int64_t *base, int64_t run,
                               int64_t j, int64_t n, float *acc) {
    const mixpi_map *m = &s->map;
    int64_t row = run * s->run, end = mixpi_min(row + s->run, s->rows), off[4];
    float y[MIXPI_BLOCK];
    memset(acc, 0, (size_t)n * sizeof *acc);
    for (; row < end; row++) {
        int64_t outer = row, count;
        if (s->fold) {
            outer = row / m->blocks;
            j = row % m->blocks * m->width;
        }
        memcpy(off, base, sizeof off);
        mixpi_map_offsets(m, 1, outer, off);
        count = mixpi_min(n, m->cols - j);
        MIXPI_P(floats_add)(acc, acc, MIXPI_P(map_block)(m, off, j, count, y), count);
    }
}

/* One run of rows of one tile of the output. */
MIXPI_K void MIXPI_P(sum_unit)(const void *job, int64_t unit) {
    const mixpi_sum *s = (const mixpi_sum *)job;
    const mixpi_map *m = &s->map;
    float acc[MIXPI_BLOCK];
    int64_t run = unit % s->runs, j = unit / s->runs % s->tiles * m->width;
    int64_t output = unit / s->runs / s->tiles, n = mixpi_min(m->width, m->cols - j), i;
    int64_t off[4] = { 0, 0, 0, 0 };
    mixpi_map_offsets(m, 0, output, off);
    MIXPI_P(sum_rows)(s, off, run, j, n, acc);
    if (s->fold) {
        MIXPI_P(sum_fold)(acc, n, s->out_cols);
        n = s->out_cols;
    }
    if (s->runs > 1) {
        float *to = s->partial + mixpi_sum_partial(s, run, output) + j;
        memcpy(to, acc, (size_t)n * sizeof *acc);
        return;
    }
    for (i = 0; i < n; i++) acc[i] *= s->factor;
    MIXPI_P(write)(m->y, off[0] + j, n, acc);
}

/* The runs of one tile of the output, added in order. */
MIXPI_K void MIXPI_P(sum_join)(const void *job, int64_t unit) {
    const mixpi_sum *s = (const mixpi_sum *)job;
    const mixpi_map *m = &s->map;
    int64_t output = unit / s->tiles, j = unit % s->tiles * m->width;
    int64_t i, run, n = mixpi_min(m->width, s->out_cols - j), off[4] = { 0, 0, 0, 0 };
    float acc[MIXPI_BLOCK];
    for (i = 0; i < n; i++) {
        double t = 0.0;
        for (run = 0; run < s->runs; run++)
            t += (double)s->partial[mixpi_sum_partial(s, run, output) + j + i];
        acc[i] = (float)(t * (double)s->factor);
    }
    mixpi_map_offsets(m, 0, output, off);
    MIXPI_P(write)(m->y, off[0] + j, n, acc);
}

/* y (+)= factor times the sum of the map's values over the axes along which y repeats. */
MIXPI_K mixp_result MIXPI_P(sum_run)(const mixp_exec *x, mixpi_sum *s) {
    int64_t tiles;
    if (!mixpi_map_is_real(&s->map)) return MIXP_ERR_DTYPE;
    mixpi_sum_plan(s);
    tiles = s->map.outputs * s->tiles;
    if (tiles == 0) return MIXP_OK;
    if (s->runs > 1) {
        size_t count = (size_t)mixpi_sum_partial(s, s->runs, 0);
        s->partial = (float *)mixpi_scratch(x, count * sizeof(float));
        if (!s->partial) return MIXP_ERR_MEMORY;
    }
    mixpi_each_unit(x, tiles * s->runs, mixpi_sum_per_task(s), MIXPI_P(sum_unit), s);
    if (s->runs > 1) mixpi_each_unit(x, tiles, 1, MIXPI_P(sum_join), s);
    return MIXP_OK;
}

/* --- the kernels themselves --- */

MIXPI_K mixp_result MIXPI_P(unary)(const mixp_exec *x, const mixp_unary_args *k) {
    mixpi_map m;
    if ((unsigned)k->op >= MIXP_UNARY_COUNT) return MIXP_ERR_ARGUMENT;
    mixpi_map_init(&m, MIXPI_FN_UNARY + (int)k->op, 1, &k->n, k->y);
    mixpi_map_source(&m, k->a, NULL);
    m.p = k->p;
    m.q = k->q;
    return MIXPI_P(map_run)(x, &m);
}

MIXPI_K mixp_result MIXPI_P(unary_backward)(const mixp_exec *x,
                                            const mixp_unary_backward_args *k) {
    mixpi_map m;
    if ((unsigned)k->op >= MIXP_UNARY_COUNT) return MIXP_ERR_ARGUMENT;
    mixpi_map_init(&m, MIXPI_FN_UNARY_D + (int)k->op, 1, &k->n, k->da);
    mixpi_map_source(&m, k->dy, NULL);
    /* plant: unary_by_result */
    if (mixpi_unary_by_result(k->op)) mixpi_map_source(&m, k->y, NULL);
    else if (k->op != MIXP_UNARY_SCALE) mixpi_map_source(&m, k->a, NULL);
    m.p = k->p;
    m.q = k->q;
    return MIXPI_P(map_run)(x, &m);
}

MIXPI_K mixp_result MIXPI_P(binary)(const mixp_exec *x, const mixp_binary_args *k) {
    mixpi_map m;
    if (!mixpi_binary_valid(k)) return MIXP_ERR_ARGUMENT;
    mixpi_map_init(&m, MIXPI_FN_BINARY + (int)k->op, k->rank, k->shape, k->y);
    mixpi_map_source(&m, k->a, k->a_strides);
    mixpi_map_source(&m, k->b, k->b_strides);
    return MIXPI_P(map_run)(x, &m);
}

MIXPI_K mixp_result MIXPI_P(binary_backward)(const mixp_exec *x,
                                             const mixp_binary_args *k) {
    mixpi_sum s;
    /* plant: binary_sign */
    float sign = k->which && k->op == MIXP_BINARY_SUB ? -1.0f : 1.0f;
    int sums;
    if (!mixpi_binary_valid(k)) return MIXP_ERR_ARGUMENT;
    sums = mixpi_binary_repeats(k);
    mixpi_binary_slope_map(&s.map, k, sums);
    s.map.p = s.factor = sign;
    return sums ? MIXPI_P(sum_run)(x, &s) : MIXPI_P(map_run)(x, &s.map);
}

MIXPI_K mixp_result MIXPI_P(reduce)(const mixp_exec *x, const mixp_reduce_args *k) {
    mixpi_sum s;
    mixpi_reduce_map(&s.map, MIXPI_FN_COPY, k, 0);
    s.factor = k->factor;
    return MIXPI_P(sum_run)(x, &s);
}

MIXPI_K mixp_result MIXPI_P(reduce_backward)(const mixp_exec *x,
                                             const mixp_reduce_args *k) {
    mixpi_map m;
    mixpi_reduce_map(&m, MIXPI_FN_UNARY + (int)MIXP_UNARY_SCALE, k, 1);
    m.p = k->factor;
    return MIXPI_P(map_run)(x, &m);
}

MIXPI_K mixp_result MIXPI_P(scale_by)(const mixp_exec *x, const mixp_scale_by_args *k) {
    mixpi_map m;
    if (!k->factor) return MIXP_ERR_ARGUMENT;
    mixpi_map_init(&m, MIXPI_FN_UNARY + (int)MIXP_UNARY_SCALE, 1, &k->n, k->y);
    mixpi_map_source(&m, k->a, NULL);
    m.p = k->factor[0];
    return MIXPI_P(map_run)(x, &m);
}

MIXPI_K mixp_result MIXPI_P(where)(const mixp_exec *x, const mixp_where_args *k) {
    mixpi_map m;
    if (!mixpi_where_valid(k)) return MIXP_ERR_ARGUMENT;
    mixpi_where_map(&m, k);
    return MIXPI_P(map_run)(x, &m);
}

MIXPI_K mixp_result MIXPI_P(where_backward)(const mixp_exec *x, const mixp_where_args *k) {
    mixpi_sum s;
    if (k->rank < 0 || k->rank > MIXP_MAX_RANK || !k->mask.data) return MIXP_ERR_ARGUMENT;
    mixpi_where_slope_map(&s.map, k);
    s.factor = 1.0f;
    if (!mixpi_repeats(k->rank, k->shape, k->which ? k->b_strides : k->a_strides))
        return MIXPI_P(map_run)(x, &s.map);
    return MIXPI_P(sum_run)(x, &s);
}

/* One block. */
MIXPI_K void MIXPI_P(dropout_unit)(const void *job, int64_t unit) {
    const mixpi_dropout_job *d = (const mixpi_dropout_job *)job;
    const mixp_dropout_args *k = d->k;
    float buf[MIXPI_BLOCK], out[MIXPI_BLOCK], *y = out;
    uint32_t random[MIXPI_BLOCK];
    int64_t i, first = unit * MIXPI_BLOCK, n = mixpi_min(MIXPI_BLOCK, k->n - first);
    const float *a = MIXPI_P(read)(k->a, first, n, buf);
    if (!k->y.accumulate) y = MIXPI_P(place)(k->y, first, out);
    for (i = 0; i < n; i += 16) mixpi_vrandom(d->key, (uint64_t)(first + i), random + i);
    /* plant: dropout_scale */
    for (i = 0; i < n; i++) y[i] = random[i] >= d->limit ? a[i] * d->scale : 0.0f;
    if (y == out) MIXPI_P(write)(k->y, first, n, out);
}

MIXPI_K mixp_result MIXPI_P(dropout)(const mixp_exec *x, const mixp_dropout_args *k) {
    mixpi_dropout_job d;
    /* plant: dropout_range */
    if (!(k->p >= 0.0f && k->p <= 1.0f)) return MIXP_ERR_ARGUMENT;
    if (!mixpi_reads(k->a) || !mixpi_writes(k->y)) return MIXP_ERR_DTYPE;
    mixpi_dropout_plan(&d, k);
    mixpi_each_unit(x, mixpi_ceil_div(k->n, MIXPI_BLOCK), MIXPI_GRAIN / MIXPI_BLOCK,
                    MIXPI_P(dropout_unit), &d);
    return MIXP_OK;
}

/* --- the largest, and what an index says --- */

/* Up to a block of columns of one o. */
MIXPI_K void MIXPI_P(max_columns)(const mixp_max_args *k, int64_t o, int64_t first,
                                  int64_t n, mixpi_most *most) {
    float buf[MIXPI_BLOCK];
    int64_t i, j;
    for (j = 0; j < k->n; j++) {
        const float *p =
            MIXPI_P(read)(k->a, (o * k->n + j) * k->inner + first, n, buf);
        for (i = 0; i < n; i++) mixpi_most_take(&most[i], p[i], j);
    }
}

/* The one column of one o, along which the array is dense. */
MIXPI_K void MIXPI_P(max_line)(const mixp_max_args *k, int64_t o, mixpi_most *most) {
    float buf[MIXPI_BLOCK];
    int64_t j;
    MIXPI_BLOCKS(i, n, k->n) {
        const float *p = MIXPI_P(read)(k->a, o * k->n + i, n, buf);
        for (j = 0; j < n; j++) mixpi_most_take(most, p[j], i + j);
    }
}

MIXPI_K void MIXPI_P(max_unit)(const void *args, int64_t unit) {
    const mixp_max_args *k = (const mixp_max_args *)args;
    int64_t tiles = mixpi_ceil_div(k->inner, MIXPI_BLOCK), o = unit / tiles;
    int64_t first = unit % tiles * MIXPI_BLOCK, at = o * k->inner + first, i;
    int64_t n = mixpi_min(MIXPI_BLOCK, k->inner - first);
    mixpi_most most[MIXPI_BLOCK];
    float value[MIXPI_BLOCK];
    memset(most, 0, sizeof most);
    if (k->inner == 1) MIXPI_P(max_line)(k, o, most);
    else MIXPI_P(max_columns)(k, o, first, n, most);
    for (i = 0; i < n; i++) {
        value[i] = most[i].value;
        k->index[at + i] = most[i].index;
        if (k->ties) k->ties[at + i] = most[i].ties;
    }
    if (k->y.data) MIXPI_P(write)(k->y, at, n, value);
}

MIXPI_K mixp_result MIXPI_P(max)(const mixp_exec *x, const mixp_max_args *k) {
    int64_t tiles = mixpi_ceil_div(k->inner, MIXPI_BLOCK);
    if (!mixpi_reads(k->a) || !mixpi_may_write(k->y)) return MIXP_ERR_DTYPE;
    if (k->n < 1 || k->n > 0x7FFFFFFF || !k->index || k->y.accumulate)
        return MIXP_ERR_ARGUMENT;
    return mixpi_each_row(x, k->outer * tiles,
                          mixpi_rows_of_task(k->n * mixpi_min(k->inner, MIXPI_BLOCK)),
                          MIXPI_P(max_unit), k);
}

/* The share of element j of a column, whose index, and more, is at `at`. */
MIXPI_V float MIXPI_P(max_share)(const mixp_max_backward_args *k, int64_t at, int64_t j,
                                 float x, float dy) {
    int64_t row;
    if (!k->shared) return k->index[at] == j ? dy : 0.0f;
    row = at / k->inner * k->n + k->index[at];
    if (!mixpi_most_equals(x, MIXPI_P(read_one)(k->a, row * k->inner + at % k->inner)))
        return 0.0f;
    return dy / (float)k->ties[at];  /* plant: max_ties */
}

/* A piece of a line. */
MIXPI_K void MIXPI_P(max_back_unit)(const void *args, int64_t unit) {
    const mixp_max_backward_args *k = (const mixp_max_backward_args *)args;
    mixpi_lines lines = mixpi_lines_of(k->n, k->inner);
    int64_t line = unit / lines.blocks, first = unit % lines.blocks * MIXPI_BLOCK, i;
    int64_t n = mixpi_min(MIXPI_BLOCK, lines.length - first), from = line * lines.length + first;
    int64_t at = lines.along_n ? line : line / k->n * k->inner + first;
    int64_t j = lines.along_n ? first : line % k->n, step = lines.along_n ? 0 : 1;
    float dys[MIXPI_BLOCK], xs[MIXPI_BLOCK], out[MIXPI_BLOCK];
    const float *dy = MIXPI_P(read)(k->dy, at, lines.along_n ? 1 : n, dys), *x = xs;
    memset(xs, 0, sizeof xs);
    if (k->shared) x = MIXPI_P(read)(k->a, from, n, xs);
    for (i = 0; i < n; i++)
        out[i] = MIXPI_P(max_share)(k, at + i * step, j + i * !step, x[i], dy[i * step]);
    MIXPI_P(write)(k->da, from, n, out);
}

MIXPI_K mixp_result MIXPI_P(max_backward)(const mixp_exec *x,
                                          const mixp_max_backward_args *k) {
    mixpi_lines lines = mixpi_lines_of(k->n, k->inner);
    int64_t each = mixpi_min(lines.length, MIXPI_BLOCK);
    if (!mixpi_reads(k->dy) || !mixpi_writes(k->da) || (k->shared && !mixpi_reads(k->a)))
        return MIXP_ERR_DTYPE;
    if (!k->index || (k->shared && !k->ties)) return MIXP_ERR_ARGUMENT;
    return mixpi_each_row(x, k->outer * (lines.along_n ? 1 : k->n) * lines.blocks,
                          mixpi_rows_of_task(each), MIXPI_P(max_back_unit), k);
}

/* A piece of what is gathered. */
MIXPI_K void MIXPI_P(gather_unit)(const void *args, int64_t unit) {
    const mixp_gather_args *k = (const mixp_gather_args *)args;
    int64_t first = unit * MIXPI_BLOCK, of_o = k->m * k->inner, i;
    int64_t n = mixpi_min(MIXPI_BLOCK, k->outer * of_o - first);
    float out[MIXPI_BLOCK];
    for (i = 0; i < n; i++) {
        int64_t at = first + i, row = at / of_o * k->n + k->ids[at];
        out[i] = MIXPI_P(read_one)(k->a, row * k->inner + at % k->inner);
    }
    MIXPI_P(write)(k->y, first, n, out);
}

MIXPI_K mixp_result MIXPI_P(gather)(const mixp_exec *x, const mixp_gather_args *k) {
    int64_t count = k->outer * k->m * k->inner;
    if (!mixpi_reads(k->a) || !mixpi_writes(k->y)) return MIXP_ERR_DTYPE;
    if (k->y.accumulate || mixpi_bad_id(k->ids, count, k->n, MIXPI_NO_INDEX) >= 0)
        return MIXP_ERR_ARGUMENT;
    return mixpi_each_row(x, mixpi_ceil_div(count, MIXPI_BLOCK), 4, MIXPI_P(gather_unit), k);
}

/* Up to a block of columns of one o: no other unit adds to them. */
MIXPI_K void MIXPI_P(gather_back_unit)(const void *args, int64_t unit) {
    const mixp_gather_args *k = (const mixp_gather_args *)args;
    int64_t tiles = mixpi_ceil_div(k->inner, MIXPI_BLOCK), o = unit / tiles;
    int64_t first = unit % tiles * MIXPI_BLOCK, i, j;
    int64_t n = mixpi_min(MIXPI_BLOCK, k->inner - first);
    float buf[MIXPI_BLOCK];
    for (j = 0; j < k->m; j++) {
        int64_t from = (o * k->m + j) * k->inner + first;
        const float *dy = MIXPI_P(read)(k->a, from, n, buf);
        for (i = 0; i < n; i++) {
            int64_t row = o * k->n + k->ids[from + i];
            float one = dy[i];
            MIXPI_P(write)(k->y, row * k->inner + first + i, 1, &one);
        }
    }
}

MIXPI_K mixp_result MIXPI_P(gather_backward)(const mixp_exec *x,
                                             const mixp_gather_args *k) {
    int64_t count = k->outer * k->m * k->inner, tiles = mixpi_ceil_div(k->inner, MIXPI_BLOCK);
    if (!mixpi_reads(k->a) || !mixpi_writes(k->y)) return MIXP_ERR_DTYPE;
    if (!k->y.accumulate || mixpi_bad_id(k->ids, count, k->n, MIXPI_NO_INDEX) >= 0)
        return MIXP_ERR_ARGUMENT;
    return mixpi_each_row(x, k->outer * tiles,
                          mixpi_rows_of_task(k->m * mixpi_min(k->inner, MIXPI_BLOCK)),
                          MIXPI_P(gather_back_unit), k);
}

/* --- rotary embeddings --- */

#define MIXPI_ROPE_PART (MIXPI_BLOCK / 2)

/* p and q become p cos - q sin and q cos + p sin; all have room for a multiple of 16. */
MIXPI_K void MIXPI_P(rope_turn)(float *p, float *q, const float *c, const float *s,
                                float sign, int64_t n) {
    int64_t j;
    for (j = 0; j < n; j += 16) {
        mixpi_v a = mixpi_vload(p + j), b = mixpi_vload(q + j);
        mixpi_v cosine = mixpi_vpart(c + j, n - j);
        mixpi_v sine = mixpi_vmul(mixpi_vset(sign), mixpi_vpart(s + j, n - j));
        mixpi_vstore(p + j, mixpi_vfma(a, cosine, mixpi_vneg(mixpi_vmul(b, sine))));
        mixpi_vstore(q + j, mixpi_vfma(b, cosine, mixpi_vmul(a, sine)));
    }
}

/* Pairs [i, i+n) of the head at `at`, which lie beside each other. */
MIXPI_K void MIXPI_P(rope_interleaved)(const mixpi_rope_job *job, int64_t at, int64_t row,
                                       int64_t i, int64_t n) {
    const mixp_rope_args *k = job->k;
    float buf[MIXPI_BLOCK], p[MIXPI_ROPE_PART], q[MIXPI_ROPE_PART];
    const float *a = MIXPI_P(read)(k->a, at + 2 * i, 2 * n, buf);
    int64_t j;
    memset(p, 0, sizeof p);
    memset(q, 0, sizeof q);
    for (j = 0; j < n; j++) {
        p[j] = a[2 * j];
        q[j] = a[2 * j + 1];
    }
    MIXPI_P(rope_turn)(p, q, job->cosine + row + i, job->sine + row + i,
                       k->back ? -1.0f : 1.0f, n);
    for (j = 0; j < n; j++) {
        buf[2 * j] = p[j];
        buf[2 * j + 1] = q[j];
    }
    MIXPI_P(write)(k->y, at + 2 * i, 2 * n, buf);
}

/* Likewise, half a head apart. */
MIXPI_K void MIXPI_P(rope_halves)(const mixpi_rope_job *job, int64_t at, int64_t row,
                                  int64_t i, int64_t n) {
    const mixp_rope_args *k = job->k;
    float buf[MIXPI_BLOCK], p[MIXPI_ROPE_PART], q[MIXPI_ROPE_PART];
    int64_t half = k->d / 2;
    memset(p, 0, sizeof p);
    memset(q, 0, sizeof q);
    memcpy(p, MIXPI_P(read)(k->a, at + i, n, buf), (size_t)n * sizeof *p);
    memcpy(q, MIXPI_P(read)(k->a, at + half + i, n, buf), (size_t)n * sizeof *q);
    MIXPI_P(rope_turn)(p, q, job->cosine + row + i, job->sine + row + i,
                       k->back ? -1.0f : 1.0f, n);
    MIXPI_P(write)(k->y, at + i, n, p);
    MIXPI_P(write)(k->y, at + half + i, n, q);
}

/* All heads of a position. */
MIXPI_K void MIXPI_P(rope_unit)(const void *args, int64_t unit) {
    const mixpi_rope_job *job = (const mixpi_rope_job *)args;
    const mixp_rope_args *k = job->k;
    int64_t half = k->d / 2, row = unit % k->t * half, h, i;
    for (h = 0; h < k->heads; h++)
        for (i = 0; i < half; i += MIXPI_ROPE_PART) {
            int64_t n = mixpi_min(MIXPI_ROPE_PART, half - i);
            int64_t at = (unit * k->heads + h) * k->d;
            if (k->interleaved) MIXPI_P(rope_interleaved)(job, at, row, i, n);
            else MIXPI_P(rope_halves)(job, at, row, i, n);
        }
}
#undef MIXPI_ROPE_PART

MIXPI_K mixp_result MIXPI_P(rope)(const mixp_exec *x, const mixp_rope_args *k) {
    mixpi_rope_job job = { k, NULL, NULL };
    int64_t pairs = k->t * (k->d / 2);
    if (!mixpi_reads(k->a) || !mixpi_writes(k->y)) return MIXP_ERR_DTYPE;
    if (k->d < 2 || k->d % 2 || !(k->base > 0.0)) return MIXP_ERR_ARGUMENT;
    job.cosine = (float *)mixpi_scratch(x, (size_t)(2 * pairs) * sizeof(float));
    if (!job.cosine) return MIXP_ERR_MEMORY;
    job.sine = job.cosine + pairs;
    mixpi_each_row(x, mixpi_ceil_div(k->t, MIXPI_ROPE_RUN), 1, mixpi_rope_run, &job);
    return mixpi_each_row(x, k->rows * k->t, mixpi_rows_of_task(k->heads * k->d),
                          MIXPI_P(rope_unit), &job);
}

/* --- softmax, norms, embedding, losses ------------------------------------------------- */
/* e = exp(p + shift); e has room for a multiple of 16, p need not. */
MIXPI_K void MIXPI_P(floats_exp)(float *e, const float *p, float shift, int64_t n) {
    mixpi_v s = mixpi_vset(shift);
    int64_t j;
    for (j = 0; j < n; j += 16)
        mixpi_vstore(e + j, mixpi_vexp(mixpi_vadd(mixpi_vpart(p + j, n - j), s)));
}

/* y = (p + shift) * by; room as above. */
MIXPI_K void MIXPI_P(floats_affine)(float *y, const float *p, float shift, float by,
                                    int64_t n) {
    mixpi_v s = mixpi_vset(shift), f = mixpi_vset(by);
    int64_t j;
    for (j = 0; j < n; j += 16)
        mixpi_vstore(y + j, mixpi_vmul(mixpi_vadd(mixpi_vpart(p + j, n - j), s), f));
}

/* The largest of a[at, at+cols); a NaN may be missed: it comes back through the sum. */
MIXPI_K float MIXPI_P(row_max)(mixp_in a, int64_t at, int64_t cols) {
    float buf[MIXPI_BLOCK], best = mixp_f32_of_bits(0xFF800000u);
    int64_t j;
    MIXPI_BLOCKS(i, n, cols) {
        const float *p = MIXPI_P(read)(a, at + i, n, buf);
        mixpi_v m = mixpi_vset(best);
        for (j = 0; j + 16 <= n; j += 16) m = mixpi_vmax(mixpi_vload(p + j), m);
        best = mixpi_vmaxof(m);
        for (; j < n; j++) best = p[j] > best ? p[j] : best;
    }
    return best;
}

/* Sum of exp(a - max) over a[at, at+cols); the last block's exps stay in e. */
MIXPI_K float MIXPI_P(row_sumexp)(mixp_in a, int64_t at, int64_t cols, float max,
                                  float *e) {
    float buf[MIXPI_BLOCK];
    double sum = 0.0;
    MIXPI_BLOCKS(i, n, cols) {
        MIXPI_P(floats_exp)(e, MIXPI_P(read)(a, at + i, n, buf), -max, n);
        sum += (double)MIXPI_P(floats_sum)(e, n);
    }
    return (float)sum;
}

/* --- softmax --- */

/* (a - max) - log(sum), each difference rounded. */
MIXPI_K void MIXPI_P(log_softmax_row)(const mixp_softmax_args *k, int64_t at, float max,
                                      float sum) {
    float buf[MIXPI_BLOCK], v[MIXPI_BLOCK], lse = logf(sum);
    MIXPI_BLOCKS(i, n, k->cols) {
        MIXPI_P(floats_affine)(v, MIXPI_P(read)(k->a, at + i, n, buf), -max, 1.0f, n);
        MIXPI_P(floats_affine)(v, v, -lse, 1.0f, n);  /* plant: log_softmax */
        MIXPI_P(write)(k->y, at + i, n, v);
    }
}

/* The exps of a row of one block are in e still. */
MIXPI_K void MIXPI_P(softmax_row)(const void *args, int64_t row) {
    const mixp_softmax_args *k = (const mixp_softmax_args *)args;
    int64_t at = row * k->cols;
    float buf[MIXPI_BLOCK], e[MIXPI_BLOCK];
    float max = MIXPI_P(row_max)(k->a, at, k->cols);
    float sum = MIXPI_P(row_sumexp)(k->a, at, k->cols, max, e);
    if (k->log_of) {
        MIXPI_P(log_softmax_row)(k, at, max, sum);
        return;
    }
    MIXPI_BLOCKS(i, n, k->cols) {
        if (k->cols > MIXPI_BLOCK)
            MIXPI_P(floats_exp)(e, MIXPI_P(read)(k->a, at + i, n, buf), -max, n);
        MIXPI_P(floats_affine)(e, e, 0.0f, 1.0f / sum, n);
        MIXPI_P(write)(k->y, at + i, n, e);
    }
}

MIXPI_K mixp_result MIXPI_P(softmax)(const mixp_exec *x, const mixp_softmax_args *k) {
    if (!mixpi_reads(k->a) || !mixpi_writes(k->y)) return MIXP_ERR_DTYPE;
    if (k->y.accumulate) return MIXP_ERR_ARGUMENT;
    return mixpi_each_row(x, k->rows, mixpi_rows_of_task(k->cols), MIXPI_P(softmax_row),
                          k);
}

/* -sum(dy y) of the row at `at`; of the log: -sum(dy). */
MIXPI_K float MIXPI_P(softmax_back_sum)(const mixp_softmax_backward_args *k, int64_t at) {
    float dy_buf[MIXPI_BLOCK], y_buf[MIXPI_BLOCK];
    double sum = 0.0;
    MIXPI_BLOCKS(i, n, k->cols) {
        const float *dy = MIXPI_P(read)(k->dy, at + i, n, dy_buf);
        if (k->log_of) sum += (double)MIXPI_P(floats_sum)(dy, n);
        else
            sum +=
                (double)MIXPI_P(floats_dot)(dy, MIXPI_P(read)(k->y, at + i, n, y_buf), n);
    }
    return -(float)sum;  /* plant: softmax_slope */
}

MIXPI_K void MIXPI_P(softmax_back_row)(const void *args, int64_t row) {
    const mixp_softmax_backward_args *k = (const mixp_softmax_backward_args *)args;
    float dy_buf[MIXPI_BLOCK], y_buf[MIXPI_BLOCK], da[MIXPI_BLOCK];
    int64_t j, at = row * k->cols;
    mixpi_v sum = mixpi_vset(MIXPI_P(softmax_back_sum)(k, at));
    MIXPI_BLOCKS(i, n, k->cols) {
        const float *dy = MIXPI_P(read)(k->dy, at + i, n, dy_buf);
        const float *y = MIXPI_P(read)(k->y, at + i, n, y_buf);
        for (j = 0; j < n; j += 16) {
            mixpi_v g = mixpi_vpart(dy + j, n - j), v = mixpi_vpart(y + j, n - j);
            if (k->log_of) v = mixpi_vfma(mixpi_vexp(v), sum, g);
            else v = mixpi_vmul(v, mixpi_vadd(g, sum));
            mixpi_vstore(da + j, v);
        }
        MIXPI_P(write)(k->da, at + i, n, da);
    }
}

MIXPI_K mixp_result MIXPI_P(softmax_backward)(const mixp_exec *x,
                                              const mixp_softmax_backward_args *k) {
    if (!mixpi_reads(k->dy) || !mixpi_reads(k->y) || !mixpi_writes(k->da))
        return MIXP_ERR_DTYPE;
    return mixpi_each_row(x, k->rows, mixpi_rows_of_task(k->cols),
                          MIXPI_P(softmax_back_row), k);
}

/* --- layer norm, rms norm --- */

/* Elements [i, i+n) of a as floats, or `value` where a is not there. */
MIXPI_V const float *MIXPI_P(read_or)(mixp_in a, float value, int64_t i, int64_t n,
                                      float *buf) {
    int64_t j;
    if (a.data) return MIXPI_P(read)(a, i, n, buf);
    for (j = 0; j < n; j += 16) mixpi_vstore(buf + j, mixpi_vset(value));
    return buf;
}

MIXPI_K float MIXPI_P(norm_mean)(const mixp_norm_args *k, int64_t at) {
    float buf[MIXPI_BLOCK];
    double sum = 0.0;
    MIXPI_BLOCKS(i, n, k->cols)
        sum += (double)MIXPI_P(floats_sum)(MIXPI_P(read)(k->a, at + i, n, buf), n);
    return (float)(sum / (double)k->cols);
}

/* x = a[at, at+n) - mean. */
MIXPI_K void MIXPI_P(norm_center)(mixp_in a, int64_t at, int64_t n, float mean,
                                  float *x) {
    float buf[MIXPI_BLOCK];
    MIXPI_P(floats_affine)(x, MIXPI_P(read)(a, at, n, buf), -mean, 1.0f, n);
}

/* The last block's a - mean stay in x. */
MIXPI_K float MIXPI_P(norm_rstd)(const mixp_norm_args *k, int64_t at, float mean,
                                 float *x) {
    double sum = 0.0;
    MIXPI_BLOCKS(i, n, k->cols) {
        MIXPI_P(norm_center)(k->a, at + i, n, mean, x);
        sum += (double)MIXPI_P(floats_dot)(x, x, n);
    }
    /* plant: norm_eps */
    return (float)(1.0 / sqrt(sum / (double)k->cols + (double)k->eps));
}

/* x = x * rstd * gamma + beta for columns [i, i+n). */
MIXPI_K void MIXPI_P(norm_scale)(const mixp_norm_args *k, int64_t i, int64_t n,
                                 float rstd, float *x) {
    static const mixp_in none = { NULL, MIXP_F32 };
    float gamma_buf[MIXPI_BLOCK], beta_buf[MIXPI_BLOCK];
    const float *gamma = MIXPI_P(read_or)(k->gamma, 1.0f, i, n, gamma_buf);
    const float *beta = MIXPI_P(read_or)(k->rms ? none : k->beta, 0.0f, i, n, beta_buf);
    int64_t j;
    for (j = 0; j < n; j += 16) {
        mixpi_v h = mixpi_vmul(mixpi_vload(x + j), mixpi_vset(rstd));
        mixpi_v g = mixpi_vpart(gamma + j, n - j);
        mixpi_vstore(x + j, mixpi_vfma(h, g, mixpi_vpart(beta + j, n - j)));
    }
}

MIXPI_K void MIXPI_P(norm_row)(const void *args, int64_t row) {
    const mixp_norm_args *k = (const mixp_norm_args *)args;
    int64_t at = row * k->cols;
    float x[MIXPI_BLOCK];
    float mean = k->rms ? 0.0f : MIXPI_P(norm_mean)(k, at);
    float rstd = MIXPI_P(norm_rstd)(k, at, mean, x);
    if (!k->rms) k->mean[row] = mean;  /* plant: norm_mean */
    k->rstd[row] = rstd;
    MIXPI_BLOCKS(i, n, k->cols) {
        if (k->cols > MIXPI_BLOCK) MIXPI_P(norm_center)(k->a, at + i, n, mean, x);
        MIXPI_P(norm_scale)(k, i, n, rstd, x);
        MIXPI_P(write)(k->y, at + i, n, x);
    }
}

MIXPI_K mixp_result MIXPI_P(norm)(const mixp_exec *x, const mixp_norm_args *k) {
    if (!mixpi_reads(k->a) || !mixpi_writes(k->y) || !mixpi_may_read(k->gamma) ||
        !(k->rms || mixpi_may_read(k->beta))) return MIXP_ERR_DTYPE;
    if (k->y.accumulate) return MIXP_ERR_ARGUMENT;
    return mixpi_each_row(x, k->rows, mixpi_rows_of_task(k->cols), MIXPI_P(norm_row), k);
}

/* h = (a - mean) rstd and d = dy gamma for columns [i, i+n) of a row; returns dy. */
MIXPI_K const float *MIXPI_P(norm_back_block)(const mixp_norm_backward_args *k,
                                              int64_t row, int64_t i, int64_t n, float *h,
                                              float *d, float *dy_buf) {
    float buf[MIXPI_BLOCK], shift = k->rms ? 0.0f : -k->mean[row];
    const float *a = MIXPI_P(read)(k->a, row * k->cols + i, n, buf), *gamma;
    const float *dy = MIXPI_P(read)(k->dy, row * k->cols + i, n, dy_buf);
    int64_t j;
    MIXPI_P(floats_affine)(h, a, shift, k->rstd[row], n);
    gamma = MIXPI_P(read_or)(k->gamma, 1.0f, i, n, buf);
    for (j = 0; j < n; j += 16) {
        mixpi_v g = mixpi_vpart(gamma + j, n - j);
        mixpi_vstore(d + j, mixpi_vmul(mixpi_vpart(dy + j, n - j), g));
    }
    return dy;
}

/* dgamma += dy h and dbeta += dy, n columns of each. */
MIXPI_K void MIXPI_P(norm_back_add)(const float *dy, const float *h, int64_t n,
                                    float *dgamma, float *dbeta) {
    int64_t j;
    for (j = 0; j < n; j += 16) {
        mixpi_v g = mixpi_vpart(dy + j, n - j);
        mixpi_v hg = mixpi_vfma(g, mixpi_vload(h + j), mixpi_vload(dgamma + j));
        mixpi_vstore(dgamma + j, hg);
        /* plant: norm_beta */
        mixpi_vstore(dbeta + j, mixpi_vadd(g, mixpi_vload(dbeta + j)));
    }
}

/* d = rstd (d + minus_mean + h minus_dot). */
MIXPI_K void MIXPI_P(norm_back_slope)(const float *h, float *d, int64_t n,
                                      float minus_mean, float minus_dot, float rstd) {
    mixpi_v m1 = mixpi_vset(minus_mean), m2 = mixpi_vset(minus_dot), r = mixpi_vset(rstd);
    int64_t j;
    for (j = 0; j < n; j += 16) {
        mixpi_v v = mixpi_vadd(mixpi_vload(d + j), m1);
        mixpi_vstore(d + j, mixpi_vmul(mixpi_vfma(mixpi_vload(h + j), m2, v), r));
    }
}

/* A row's da; before that, its part of the task's sums. */
MIXPI_K void MIXPI_P(norm_back_row)(const void *args, int64_t row) {
    const mixpi_norm_back_job *job = (const mixpi_norm_back_job *)args;
    const mixp_norm_backward_args *k = job->k;
    int64_t wide = job->wide;
    float *sums = job->sums ? job->sums + row / job->per_task * 2 * wide : NULL;
    float h[MIXPI_BLOCK], d[MIXPI_BLOCK], dy_buf[MIXPI_BLOCK], minus_mean, minus_dot;
    double sum = 0.0, dot = 0.0;
    if (sums && row % job->per_task == 0)
        memset(sums, 0, (size_t)(2 * wide) * sizeof(float));
    MIXPI_BLOCKS(i, n, k->cols) {
        const float *dy = MIXPI_P(norm_back_block)(k, row, i, n, h, d, dy_buf);
        if (!k->rms) sum += (double)MIXPI_P(floats_sum)(d, n);
        dot += (double)MIXPI_P(floats_dot)(d, h, n);
        if (sums) MIXPI_P(norm_back_add)(dy, h, n, sums + i, sums + wide + i);
    }
    if (!k->da.data) return;
    minus_mean = -(float)(sum / (double)k->cols);
    minus_dot = -(float)(dot / (double)k->cols);  /* plant: norm_slope */
    MIXPI_BLOCKS(i, n, k->cols) {
        if (k->cols > MIXPI_BLOCK) MIXPI_P(norm_back_block)(k, row, i, n, h, d, dy_buf);
        MIXPI_P(norm_back_slope)(h, d, n, minus_mean, minus_dot, k->rstd[row]);
        MIXPI_P(write)(k->da, row * k->cols + i, n, d);
    }
}

/* out (+)= the tasks' sums of columns [i, i+n), which begin at `sums`, in the order of tasks. */
MIXPI_K void MIXPI_P(norm_back_total)(const mixpi_norm_back_job *job, const float *sums,
                                      mixp_out out, int64_t i, int64_t n) {
    float total[MIXPI_BLOCK];
    int64_t task;
    if (!out.data) return;
    memset(total, 0, sizeof total);
    for (task = 0; task < job->tasks; task++)
        MIXPI_P(floats_add)(total, total, sums + task * 2 * job->wide + i, n);
    MIXPI_P(write)(out, i, n, total);
}

/* A block of columns of dgamma and dbeta. */
MIXPI_K void MIXPI_P(norm_back_join)(const void *args, int64_t block) {
    const mixpi_norm_back_job *job = (const mixpi_norm_back_job *)args;
    int64_t i = block * MIXPI_BLOCK, n = mixpi_min(MIXPI_BLOCK, job->k->cols - i);
    MIXPI_P(norm_back_total)(job, job->sums, job->k->dgamma, i, n);
    MIXPI_P(norm_back_total)(job, job->sums + job->wide, job->k->dbeta, i, n);
}

MIXPI_K mixp_result MIXPI_P(norm_backward)(const mixp_exec *x,
                                           const mixp_norm_backward_args *k) {
    mixpi_norm_back_job job = mixpi_norm_back_plan(k);
    if (!mixpi_reads(k->dy) || !mixpi_reads(k->a) || !mixpi_may_read(k->gamma) ||
        !mixpi_may_write(k->da) || !mixpi_may_write(k->dgamma) ||
        !mixpi_may_write(k->dbeta))
        return MIXP_ERR_DTYPE;
    if (k->dgamma.data || k->dbeta.data) {
        size_t count = (size_t)(job.tasks * 2 * job.wide);
        job.sums = (float *)mixpi_scratch(x, count * sizeof(float));
        if (!job.sums) return MIXP_ERR_MEMORY;
    }
    mixpi_each_row(x, k->rows, job.per_task, MIXPI_P(norm_back_row), &job);
    if (!job.sums) return MIXP_OK;
    return mixpi_each_row(x, mixpi_ceil_div(k->cols, MIXPI_BLOCK), 1,
                          MIXPI_P(norm_back_join), &job);
}

/* --- embedding --- */

MIXPI_K void MIXPI_P(embedding_row)(const void *args, int64_t row) {
    const mixp_embedding_args *k = (const mixp_embedding_args *)args;
    mixp_in from = mixpi_in_at(k->table, k->ids[row] * k->cols);
    MIXPI_P(convert_plain)(mixpi_out_at(k->y, row * k->cols), from, k->cols);
}

MIXPI_K mixp_result MIXPI_P(embedding)(const mixp_exec *x, const mixp_embedding_args *k) {
    if (!mixpi_reads(k->table) || !mixpi_writes(k->y)) return MIXP_ERR_DTYPE;
    if (k->y.accumulate) return MIXP_ERR_ARGUMENT;
    if (mixpi_bad_id(k->ids, k->rows, k->vocab, MIXPI_NO_INDEX) >= 0)
        return MIXP_ERR_ARGUMENT;
    return mixpi_each_row(x, k->rows, mixpi_rows_of_task(k->cols), MIXPI_P(embedding_row),
                          k);
}

/* A row of dtable: the rows of dy that used it, along its list, rounded once. */
MIXPI_K void MIXPI_P(embedding_back_row)(const void *args, int64_t id) {
    const mixpi_embedding_back_job *job = (const mixpi_embedding_back_job *)args;
    const mixp_embedding_backward_args *k = job->k;
    mixp_in had = { k->dtable.data, k->dtable.dtype };
    mixp_out sums = { k->dtable.data, k->dtable.dtype, 0 };
    float sum[MIXPI_BLOCK], buf[MIXPI_BLOCK];
    int64_t row, at = id * k->cols;
    if (job->first[id] < 0 && k->dtable.accumulate) return;  /* plant: embedding_absent */
    MIXPI_BLOCKS(i, n, k->cols) {
        memset(sum, 0, sizeof sum);
        if (k->dtable.accumulate)
            memcpy(sum, MIXPI_P(read)(had, at + i, n, buf), (size_t)n * sizeof(float));
        for (row = job->first[id]; row >= 0; row = job->next[row]) {
            const float *dy = MIXPI_P(read)(k->dy, row * k->cols + i, n, buf);
            MIXPI_P(floats_add)(sum, sum, dy, n);
        }
        MIXPI_P(write)(sums, at + i, n, sum);
    }
}

MIXPI_K mixp_result MIXPI_P(embedding_backward)(const mixp_exec *x,
                                                const mixp_embedding_backward_args *k) {
    mixpi_embedding_back_job job = { k, NULL, NULL };
    void *memory;
    if (!mixpi_reads(k->dy) || !mixpi_writes(k->dtable)) return MIXP_ERR_DTYPE;
    if (mixpi_bad_id(k->ids, k->rows, k->vocab, MIXPI_NO_INDEX) >= 0)
        return MIXP_ERR_ARGUMENT;
    memory = mixpi_scratch(x, mixpi_embedding_back_carve(&job, NULL));
    if (!memory) return MIXP_ERR_MEMORY;
    mixpi_embedding_back_carve(&job, memory);
    mixpi_embedding_back_lists(&job);
    return mixpi_each_row(x, k->vocab, mixpi_embedding_back_per_task(k),
                          MIXPI_P(embedding_back_row), &job);
}

/* --- losses --- */

/* The mean of a row. */
MIXPI_K double MIXPI_P(row_mean)(mixp_in a, int64_t at, int64_t cols) {
    float buf[MIXPI_BLOCK];
    double sum = 0.0;
    MIXPI_BLOCKS(i, n, cols)
        sum += (double)MIXPI_P(floats_sum)(MIXPI_P(read)(a, at + i, n, buf), n);
    return sum / (double)cols;
}

/* The row's loss in double: lse alone would round it once more. */
MIXPI_K void MIXPI_P(entropy_row)(const void *args, int64_t row) {
    const mixpi_entropy_job *job = (const mixpi_entropy_job *)args;
    const mixp_cross_entropy_args *k = job->k;
    int64_t at = row * k->cols;
    int32_t target = k->targets[row];
    float e[MIXPI_BLOCK], max = MIXPI_P(row_max)(k->logits, at, k->cols);
    float log_sum = logf(MIXPI_P(row_sumexp)(k->logits, at, k->cols, max, e));
    double smooth = (double)k->smoothing;
    k->lse[row] = max + log_sum;
    if (target == k->ignore) return;
    job->losses[row] =
        (double)(max - MIXPI_P(read_one)(k->logits, at + target)) + (double)log_sum;
    if (!(smooth > 0.0)) return;
    job->losses[row] *= 1.0 - smooth;  /* plant: entropy_smooth */
    job->losses[row] += smooth * ((double)max - MIXPI_P(row_mean)(k->logits, at, k->cols) +
                                  (double)log_sum);
}

MIXPI_K mixp_result MIXPI_P(cross_entropy)(const mixp_exec *x,
                                           const mixp_cross_entropy_args *k) {
    mixpi_entropy_job job = { k, NULL };
    if (!mixpi_reads(k->logits)) return MIXP_ERR_DTYPE;
    if (mixpi_bad_id(k->targets, k->rows, k->cols, k->ignore) >= 0)
        return MIXP_ERR_ARGUMENT;
    job.losses = (double *)mixpi_scratch(x, (size_t)k->rows * sizeof(double));
    if (!job.losses) return MIXP_ERR_MEMORY;
    mixpi_each_row(x, k->rows, mixpi_rows_of_task(k->cols), MIXPI_P(entropy_row), &job);
    mixpi_entropy_mean(&job);
    return MIXP_OK;
}

/* factor (softmax - onehot) of a row. */
MIXPI_K void MIXPI_P(entropy_back_row)(const void *args, int64_t row) {
    const mixpi_entropy_back_job *job = (const mixpi_entropy_back_job *)args;
    const mixp_cross_entropy_backward_args *k = job->k;
    int64_t at = row * k->cols, target = k->targets[row];
    int ignored = target == k->ignore;
    float hot = 1.0f - k->smoothing, others = 0.0f;
    float buf[MIXPI_BLOCK], d[MIXPI_BLOCK];
    if (k->smoothing > 0.0f) others = -k->smoothing / (float)k->cols;
    if (ignored && k->dlogits.accumulate) return;
    MIXPI_BLOCKS(i, n, k->cols) {
        if (ignored) {
            memset(d, 0, sizeof d);
        } else {
            const float *a = MIXPI_P(read)(k->logits, at + i, n, buf);
            MIXPI_P(floats_exp)(d, a, -k->lse[row], n);
            /* plant: entropy_hot */
            if (target >= i && target < i + n) d[target - i] -= hot;
            MIXPI_P(floats_affine)(d, d, others, job->factor, n);
        }
        MIXPI_P(write)(k->dlogits, at + i, n, d);
    }
}

MIXPI_K mixp_result MIXPI_P(cross_entropy_backward)(const mixp_exec *x,
        const mixp_cross_entropy_backward_args *k) {
    mixpi_entropy_back_job job = { k, 0.0f };
    if (!mixpi_reads(k->dloss) || !mixpi_reads(k->logits) || !mixpi_writes(k->dlogits))
        return MIXP_ERR_DTYPE;
    if (mixpi_bad_id(k->targets, k->rows, k->cols, k->ignore) >= 0)
        return MIXP_ERR_ARGUMENT;
    job.factor = MIXPI_P(read_one)(k->dloss, 0) / k->counted[0];
    return mixpi_each_row(x, k->rows, mixpi_rows_of_task(k->cols),
                          MIXPI_P(entropy_back_row), &job);
}

MIXPI_K mixp_result MIXPI_P(loss)(const mixp_exec *x, const mixp_loss_args *k) {
    mixpi_sum s;
    if ((unsigned)k->kind >= MIXP_LOSS_COUNT) return MIXP_ERR_ARGUMENT;
    mixpi_map_init(&s.map, MIXPI_FN_LOSS + (int)k->kind, 1, &k->n,
                   mixpi_out_to(k->y, MIXP_F32, 0));
    mixpi_map_source(&s.map, k->a, NULL);
    mixpi_map_source(&s.map, k->target, NULL);
    s.map.axes.s[0][0] = 0;
    s.map.q = k->delta;
    s.factor = (float)(1.0 / (double)(k->over ? k->over : k->n));
    return MIXPI_P(sum_run)(x, &s);
}

MIXPI_K mixp_result MIXPI_P(loss_backward)(const mixp_exec *x,
                                           const mixp_loss_backward_args *k) {
    mixpi_map m;
    if ((unsigned)k->kind >= MIXP_LOSS_COUNT) return MIXP_ERR_ARGUMENT;
    if (!mixpi_reads(k->dloss)) return MIXP_ERR_DTYPE;
    mixpi_map_init(&m, MIXPI_FN_LOSS_D + (int)k->kind, 1, &k->n, k->da);
    mixpi_map_source(&m, k->a, NULL);
    mixpi_map_source(&m, k->target, NULL);
    m.p = MIXPI_P(read_one)(k->dloss, 0) / (float)(k->over ? k->over : k->n);
    m.q = k->delta;
    return MIXPI_P(map_run)(x, &m);
}

/* --- gemm ------------------------------------------------------------------------------- *
 *
 * C is cut into blocks, a task each. A task packs its part of op(b) into panels of MIXPI_NR
 * columns, f16 and bf16 widened on the way (a small f32 b stays where it lies), and runs tiles
 * of MIXPI_MR x MIXPI_NR accumulators over them. An element is one chain of multiply-adds in
 * increasing k, cut at places that depend on k alone: neither blocks nor threads change its bits.
 * A kernel for AMX, which none of the measured machines has, would be a MIXPI_PASS of its own
 * that keeps bf16 while packing and puts its tiles in the place of tile_body.
 */
#if MIXPI_PASS == 0
#  if defined(MIXPREC_CBLAS)
#    include <cblas.h>
/* Is it a large product all in f32, in numbers that BLAS's int can count? */
static int mixpi_gemm_suits_cblas(const mixp_gemm_args *g) {
    const int64_t most = 0x7FFFFFFF;
    if (g->a.dtype != MIXP_F32 || g->b.dtype != MIXP_F32 || g->c.dtype != MIXP_F32)
        return 0;
    if (g->bias.data && g->bias.dtype != MIXP_F32) return 0;
    if (g->m > most || g->n > most || g->k > most) return 0;
    if (g->lda > most || g->ldb > most || g->ldc > most) return 0;
    return (double)g->m * (double)g->n * (double)g->k >= 1e6;
}

/* c = bias, or c += bias where c accumulates. */
static void mixpi_gemm_cblas_bias(const mixp_gemm_args *g, float *c) {
    const float *bias = (const float *)g->bias.data;
    int64_t i, j;
    for (i = 0; i < g->m; i++, c += g->ldc)
        for (j = 0; j < g->n; j++) c[j] = g->c.accumulate ? c[j] + bias[j] : bias[j];
}

/* Such a product by the BLAS, with its own threads and its own idea of order: the promise of
 * equal bits is then the BLAS's to keep. 0 = not such a product. */
static int mixpi_gemm_cblas(const mixp_gemm_args *g) {
    int64_t z;
    if (!mixpi_gemm_suits_cblas(g)) return 0;
    for (z = 0; z < g->batch; z++) {
        const float *a = (const float *)g->a.data + z * g->stride_a;
        const float *b = (const float *)g->b.data + z * g->stride_b;
        float *c = (float *)g->c.data + z * g->stride_c;
        if (g->bias.data) mixpi_gemm_cblas_bias(g, c);
        cblas_sgemm(CblasRowMajor, g->trans_a ? CblasTrans : CblasNoTrans,
                    g->trans_b ? CblasTrans : CblasNoTrans, (int)g->m, (int)g->n,
                    (int)g->k, g->alpha, a, (int)g->lda, b, (int)g->ldb,
                    g->bias.data || g->c.accumulate ? 1.0f : 0.0f, c, (int)g->ldc);
    }
    return 1;
}
#  endif
/* Rows of a tile, each with the pointer and offset that reach it: five pointers for fourteen
 * rows. Written out, for accumulators in an array stay in memory under some compilers. */
#  define MIXPI_TILE_ROWS(X)                                                              \
       X(0, a0, 0) X(1, a0, row) X(2, a0, 2 * row)                                        \
       X(3, a3, 0) X(4, a3, row) X(5, a3, 2 * row)                                        \
       X(6, a6, 0) X(7, a6, row) X(8, a6, 2 * row)                                        \
       X(9, a9, 0) X(10, a9, row) X(11, a9, 2 * row)                                      \
       X(12, a12, 0) X(13, a12, row)
#  define MIXPI_TILE_BEGIN(i, a, at) mixpi_v p##i = mixpi_vzero(), q##i = p##i;
#  define MIXPI_TILE_STEP(i, a, at)                                                       \
       if (rows > i) {                                                                    \
           mixpi_v s = mixpi_vset((a)[at]);                                               \
           p##i = mixpi_vmla(s, b0, p##i);                                                \
           if (nv > 1) q##i = mixpi_vmla(s, b1, q##i);                                    \
       }
/* The same for pairs: two multiply-adds, k's first. */
#  define MIXPI_TILE_STEP_PAIRS(i, a, at)                                                 \
       if (rows > i) {                                                                    \
           __m512bh s = (__m512bh)mixpi_vset((a)[at]);                                    \
           p##i = _mm512_dpbf16_ps(p##i, s, (__m512bh)b0);                                \
           if (nv > 1) q##i = _mm512_dpbf16_ps(q##i, s, (__m512bh)b1);                    \
       }
#  define MIXPI_TILE_ADD(i, a, at)                                                        \
       if (rows > i) {                                                                    \
           p##i = mixpi_vadd(mixpi_vfma(alpha, p##i, b0), mixpi_vload(c));                \
           if (nv > 1) q##i = mixpi_vadd(mixpi_vfma(alpha, q##i, b1), mixpi_vload(c + 16)); \
           mixpi_vstore(c, p##i);                                                         \
           if (nv > 1) mixpi_vstore(c + 16, q##i);                                        \
           c += t->c_row;                                                                 \
       }
#  define MIXPI_TILE_PUT(i, a, at)                                                        \
       if (rows > i) {                                                                    \
           mixpi_vstore(c, mixpi_vfma(alpha, p##i, b0));                                  \
           if (nv > 1) mixpi_vstore(c + 16, mixpi_vfma(alpha, q##i, b1));                 \
           c += t->c_row;                                                                 \
       }
#  define MIXPI_TILE_CODE(STEP)                                                           \
       const int64_t row = t->a_row, step = t->a_step;                                    \
       const float  *b = t->b;                                                            \
       const float  *a0 = t->a;                                                           \
       const float  *a3 = a0 + (rows > 3 ? 3 * row : 0);                                  \
       const float  *a6 = a3 + (rows > 6 ? 3 * row : 0);                                  \
       const float  *a9 = a6 + (rows > 9 ? 3 * row : 0);                                  \
       const float  *a12 = a9 + (rows > 12 ? 3 * row : 0);                                \
       float        *c = t->c;                                                            \
       int64_t       p;                                                                   \
       mixpi_v       b0, b1 = mixpi_vzero(), alpha = mixpi_vset(t->alpha);                \
       MIXPI_TILE_ROWS(MIXPI_TILE_BEGIN)                                                  \
       for (p = t->depth; p > 0; p--) {                                                   \
           b0 = mixpi_vload(b);                                                           \
           if (nv > 1) b1 = mixpi_vload(b + 16);                                          \
           MIXPI_TILE_ROWS(STEP)                                                          \
           a0 += step;                                                                    \
           a3 += step;                                                                    \
           a6 += step;                                                                    \
           a9 += step;                                                                    \
           a12 += step;                                                                   \
           b += t->b_step;                                                                \
       }                                                                                  \
       b0 = t->bias ? mixpi_vload(t->bias) : mixpi_vzero();                               \
       if (nv > 1) b1 = t->bias ? mixpi_vload(t->bias + 16) : mixpi_vzero();              \
       if (t->add) {                                                                      \
           MIXPI_TILE_ROWS(MIXPI_TILE_ADD)                                                \
       } else {                                                                           \
           MIXPI_TILE_ROWS(MIXPI_TILE_PUT)                                                \
       }
/* The tile: MIXPI_MR rows by MIXPI_NV vectors, all in registers; MIXPI_PASS is of the use. */
#  define MIXPI_MR (MIXPI_PASS == 2 ? 14 : 6)
#  define MIXPI_NV (MIXPI_PASS == 2 ? 2 : 1)
#  define MIXPI_NR (16 * MIXPI_NV)
#  define MIXPI_PANELS 8        /* panels of MIXPI_MR rows of a that are packed at a time   */
#  define MIXPI_KC 384          /* k of one pass: an A panel stays in L1                    */
#  define MIXPI_MB 512          /* largest block of C; with KC, the packed b stays in L2    */
#  define MIXPI_NB 512
#  define MIXPI_PAD 16          /* keeps rows of packed A off each other's cache sets       */

/* c = alpha * a b + bias (+ c when add), all f32. b has whole vectors of columns to read;
 * cols <= MIXPI_NR of them count. Distances are in floats. */
typedef struct mixpi_tile {
    int64_t      depth;         /* of the sum                                              */
    const float *a;             /* a(i, p) = a[i * a_row + p * a_step]                     */
    int64_t      a_row, a_step;
    const float *b;             /* b(p, j) = b[p * b_step + j]                             */
    int64_t      b_step;
    float       *c;             /* c(i, j) = c[i * c_row + j]                              */
    int64_t      c_row;
    const float *bias;          /* NULL = 0                                                */
    float        alpha;
    int          add, cols;
    int          pairs;         /* a and b hold pairs of bf16 in the place of floats       */
} mixpi_tile;

#  if MIXPI_BF16
/* A small product with a known answer, for a tile of one row that multiplies pairs: does it add
 * k before k+1, in two steps, each rounded to nearest even? Column 1 tells the order, column 2
 * the rounding. */
static int mixpi_pairs_answer(void (*tile)(const mixpi_tile *t)) {
    static const uint32_t a[2] = { 0x3F803F80u, 0x3F803FC0u };      /* 1, 1; 1, 1.5 */
    static const uint32_t b[2][4] = {
        { 0x40403F00u, 0x3F804B80u, 0x4B804040u, 0x3F804B80u },     /* 3, 1/2; 1, 2^24; ... */
        { 0xC0E04120u, 0x3F80CB80u, 0x00000000u, 0xBF804B80u }      /* -7, 10; 1, -2^24; ... */
    };
    static const float want[4] = { 11.5f, -8388608.0f, 16777220.0f, 41943040.0f };
    float      rows[2], columns[2 * 16], sums[16];
    mixpi_tile t;
    int        i, j;
    for (i = 0; i < 2; i++) {
        rows[i] = mixp_f32_of_bits(a[i]);
        for (j = 0; j < 16; j++) columns[i * 16 + j] = mixp_f32_of_bits(b[i][j % 4]);
    }
    memset(&t, 0, sizeof t);
    t.depth = 2;
    t.a = rows;
    t.a_step = 1;
    t.b = columns;
    t.b_step = 16;
    t.c = sums;
    t.c_row = 16;
    t.alpha = 1.0f;
    t.cols = 16;
    t.pairs = 1;
    tile(&t);
    for (j = 0; j < 16; j++)
        if (mixp_bits_of_f32(sums[j]) != mixp_bits_of_f32(want[j % 4])) return 0;
    return 1;
}
#  endif

/* Scratch memory, a slice of so many floats for each worker. */
typedef struct mixpi_slices { float *first; int64_t floats; } mixpi_slices;

static float *mixpi_slice(const mixpi_slices *s, int worker)
{ return s->first + worker * s->floats; }

/* Pieces of a slice, cut off one after another in whole cache lines; `from` NULL only counts.
 * One function that cuts serves for both, so that size and pointers cannot disagree. */
typedef struct mixpi_carver { float *from; int64_t used; } mixpi_carver;

static float *mixpi_carve(mixpi_carver *c, int64_t floats) {
    float *piece = c->from ? c->from + c->used : NULL;
    c->used += (floats + 15) / 16 * 16;
    return piece;
}

/* Runs tasks; each worker has a slice of `floats`, found through the job's `slices`. */
static mixp_result mixpi_run_sliced(const mixp_exec *x, int64_t tasks, int64_t floats,
                                    mixp_task task, void *job, mixpi_slices *slices) {
    int64_t workers = tasks > 1 && x->threads > 1 ? x->threads : 1;
    slices->floats = floats;
    slices->first = (float *)mixpi_scratch(x, (size_t)(floats * workers) * sizeof(float));
    if (!slices->first) return MIXP_ERR_MEMORY;
    mixpi_parallel(x, tasks, task, job);
    return MIXP_OK;
}

static int mixpi_gemm_readable(const mixp_gemm_args *g) {
    if (!mixpi_writes(g->c) || !mixpi_may_read(g->bias)) return 0;
    return g->k <= 0 || (mixpi_reads(g->a) && mixpi_reads(g->b));
}

/* Rows that lie in an array: row i begins at element first + i * ld. */
typedef struct mixpi_source { mixp_in a; int64_t first, ld; } mixpi_source;

static mixpi_source mixpi_source_of(mixp_in a, int64_t first, int64_t ld) {
    mixpi_source s = { a, first, ld };
    return s;
}

typedef struct mixpi_gemm_job {
    const mixp_gemm_args *g;
    int64_t down, across;       /* blocks along m and n                                    */
    int64_t depth;              /* k of one pass                                           */
    int64_t cols;               /* of the widest block                                     */
    int     low;                /* c is f16 or bf16: sums wait in `part`                   */
    int     pairs;              /* bf16 is packed in pairs, not widened                    */
    mixpi_slices slices;
} mixpi_gemm_job;

/* MIXPI_NR columns of packed op(b), from `first` on, or 16 when that is enough for the last ones:
 * row p begins at b_pack + first * steps + p * wide. */
typedef struct mixpi_panel { int64_t first, wide; } mixpi_panel;

/* One pass over one block: c[m0 .. m1, n0 .. n1] from k in [p0, p0 + depth). */
typedef struct mixpi_gemm_block {
    const mixpi_gemm_job *job;
    int64_t a_at, b_at, c_at;   /* where the matrices of this batch element begin          */
    int64_t m0, m1, n0, n1, p0, depth;
    int64_t steps;              /* of a tile: depth, or so many pairs                      */
    float  *a_pack;             /* MIXPI_PANELS panels of op(a)                            */
    float  *b_pack;             /* op(b) in panels of MIXPI_NR columns                     */
    float  *strip;              /* widened: 16 rows of a transposed b, or one row          */
    float  *bias;               /* widened: of the block's columns                         */
    float  *part;               /* sums of a c that is not f32, job->cols a row            */
} mixpi_gemm_block;
#endif

MIXPI_V void MIXPI_P(tile_body)(const mixpi_tile *t, const int rows, const int nv)
{ MIXPI_TILE_CODE(MIXPI_TILE_STEP) }

/* One function a height: a block's rows are dealt out evenly, none computed in vain. */
#define MIXPI_TILE(rows)                                                                  \
    MIXPI_K void MIXPI_P(tile##rows)(const mixpi_tile *t) {                               \
        if (t->cols > 16) MIXPI_P(tile_body)(t, rows, MIXPI_NV);                          \
        else MIXPI_P(tile_body)(t, rows, 1);                                              \
    }
MIXPI_TILE(1) MIXPI_TILE(2) MIXPI_TILE(3) MIXPI_TILE(4) MIXPI_TILE(5) MIXPI_TILE(6)
#if MIXPI_MR > 6
MIXPI_TILE(7) MIXPI_TILE(8) MIXPI_TILE(9) MIXPI_TILE(10)
MIXPI_TILE(11) MIXPI_TILE(12) MIXPI_TILE(13) MIXPI_TILE(14)
#endif
#undef MIXPI_TILE

/* Products of bf16 by bf16 without widening. A pair takes a float's place: k in its high half,
 * which vdpbf16ps multiplies and adds first, and k+1 in its low half; 0 beyond an odd end. So an
 * element is the same chain of multiply-adds as ever: a product of two bf16 is exact in f32. */
#if MIXPI_PASS == 2 && MIXPI_BF16
#  define MIXPI_TARGET_BF16                                                               \
       __attribute__((__target__("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")))
#  if defined(__OPTIMIZE__) && !defined(MIXPI_SANITIZED)
__attribute__((__always_inline__))
#  endif
static __inline__ MIXPI_TARGET_BF16 void MIXPI_P(pairs_body)(const mixpi_tile *t, const int rows,
                                                             const int nv)
{ MIXPI_TILE_CODE(MIXPI_TILE_STEP_PAIRS) }

#  define MIXPI_TILE(rows)                                                                \
       static MIXPI_TARGET_BF16 void MIXPI_P(pairs##rows)(const mixpi_tile *t) {          \
           if (t->cols > 16) MIXPI_P(pairs_body)(t, rows, 2);                             \
           else MIXPI_P(pairs_body)(t, rows, 1);                                          \
       }
MIXPI_TILE(1) MIXPI_TILE(2) MIXPI_TILE(3) MIXPI_TILE(4) MIXPI_TILE(5) MIXPI_TILE(6) MIXPI_TILE(7)
MIXPI_TILE(8) MIXPI_TILE(9) MIXPI_TILE(10) MIXPI_TILE(11) MIXPI_TILE(12) MIXPI_TILE(13)
MIXPI_TILE(14)
#  undef MIXPI_TILE

/* The same tile of 1 to 14 rows in pairs. */
MIXPI_K void MIXPI_P(tile_pairs)(const mixpi_tile *t, int64_t rows) {
    static void (*const tiles[MIXPI_MR])(const mixpi_tile *) = {
        MIXPI_P(pairs1),  MIXPI_P(pairs2),  MIXPI_P(pairs3),  MIXPI_P(pairs4),
        MIXPI_P(pairs5),  MIXPI_P(pairs6),  MIXPI_P(pairs7),  MIXPI_P(pairs8),
        MIXPI_P(pairs9),  MIXPI_P(pairs10), MIXPI_P(pairs11), MIXPI_P(pairs12),
        MIXPI_P(pairs13), MIXPI_P(pairs14)
    };
    tiles[rows - 1](t);
}

/* 16 pairs of neighbours from p on; 0 beyond the first `left` elements. */
MIXPI_V mixpi_v MIXPI_P(pairs_at)(const uint16_t *p, int64_t left) {
    __mmask32 there = left >= 32 ? 0xFFFFFFFFu : (1u << left) - 1u;
    return (mixpi_v)_mm512_rol_epi32(_mm512_maskz_loadu_epi16(there, p), 16);
}

/* 16 pairs of p[j] and q[j], likewise; q NULL = 0. */
MIXPI_V mixpi_v MIXPI_P(pairs_down)(const uint16_t *p, const uint16_t *q, int64_t left) {
    __mmask16 there = (__mmask16)(left >= 16 ? 0xFFFFu : (1u << left) - 1u);
    __m512i   high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, p));
    __m512i   low = _mm512_setzero_si512();
    if (q) low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, q));
    return (mixpi_v)_mm512_or_si512(_mm512_slli_epi32(high, 16), low);
}
#endif

/* The tile of so many rows, straight into c: cols is whole vectors. */
MIXPI_K void MIXPI_P(tile_whole)(const mixpi_tile *t, int64_t rows) {
    static void (*const tiles[MIXPI_MR])(const mixpi_tile *) = {
        MIXPI_P(tile1), MIXPI_P(tile2), MIXPI_P(tile3), MIXPI_P(tile4), MIXPI_P(tile5),
        MIXPI_P(tile6),
#if MIXPI_MR > 6
        MIXPI_P(tile7), MIXPI_P(tile8), MIXPI_P(tile9), MIXPI_P(tile10), MIXPI_P(tile11),
        MIXPI_P(tile12), MIXPI_P(tile13), MIXPI_P(tile14),
#endif
    };
#if MIXPI_PASS == 2 && MIXPI_BF16
    if (t->pairs) {
        MIXPI_P(tile_pairs)(t, rows);
        return;
    }
#endif
    tiles[rows - 1](t);
}

/* A tile whose last vector is cut off goes by a copy of c. */
MIXPI_K void MIXPI_P(tile_run)(const mixpi_tile *t, int64_t rows) {
    float      copy[MIXPI_MR * MIXPI_NR], *from = copy, *c = t->c;
    mixpi_tile whole = *t;
    int64_t    i, j;
    if (t->cols % 16 == 0) {
        MIXPI_P(tile_whole)(t, rows);
        return;
    }
    whole.c = copy;
    whole.c_row = MIXPI_NR;
    whole.add = 0;
    MIXPI_P(tile_whole)(&whole, rows);
    for (i = 0; i < rows; i++, c += t->c_row, from += MIXPI_NR)
        for (j = 0; j < t->cols; j++) c[j] = t->add ? from[j] + c[j] : from[j];
}

/* Four rows of a transpose, from four columns of as many rows as fill a register. */
#if MIXPI_PASS == 2
/* Four floats each of four rows, 4 * ld floats apart. */
MIXPI_V __m512 MIXPI_P(lanes)(const float *s, int64_t ld) {
    __m512 r = _mm512_castps128_ps512(_mm_loadu_ps(s));
    r = _mm512_insertf32x4(r, _mm_loadu_ps(s + 4 * ld), 1);
    r = _mm512_insertf32x4(r, _mm_loadu_ps(s + 8 * ld), 2);
    return _mm512_insertf32x4(r, _mm_loadu_ps(s + 12 * ld), 3);
}
/* (By masks: g++ 12 warns of the plain forms.) */
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
/* Four floats each of two rows, 4 * ld floats apart. */
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

/* dst[p * ldd + j] = src[j * ld + p] for 16 by 16 floats. */
MIXPI_V void MIXPI_P(transpose16)(float *dst, int64_t ldd, const float *src, int64_t ld) {
#if MIXPI_PASS == 1 || MIXPI_PASS == 2
    const int lanes = MIXPI_PASS == 2 ? 16 : 8;     /* of a register */
    int row, column;
    for (row = 0; row < 16; row += lanes)
        for (column = 0; column < 16; column += 4)
            MIXPI_P(transpose4)
            (dst + row + column * ldd, ldd, src + row * ld + column, ld);
#else
    int p, j;
    for (p = 0; p < 16; p++)
        for (j = 0; j < 16; j++) dst[p * ldd + j] = src[j * ld + p];
#endif
}

/* dst = n floats of src: whole vectors, then what is left of one. */
MIXPI_V void MIXPI_P(copy_floats)(float *dst, const float *src, int n) {
    int j;
    for (j = 0; j + 16 <= n; j += 16) mixpi_vstore(dst + j, mixpi_vload(src + j));
    if (j < n) mixpi_vstore_n(dst + j, mixpi_vload_n(src + j, n - j), n - j);
}

/* dst[i * ldd + j] = row i's element j, as f32, for j < n <= MIXPI_BLOCK. Rows are short: a call
 * of memcpy would take longer than its copy, and no prefetcher sees where the next one starts. */
MIXPI_K void MIXPI_P(widen_rows)(float *dst, int64_t ldd, mixpi_source from, int64_t rows,
                                 int n) {
    for (; rows > 0; rows--, dst += ldd, from.first += from.ld) {
        const float *row = MIXPI_P(read)(from.a, from.first, n, dst);
        if (n > 128) MIXPI_P(ask)(from.a, from.first + 6 * from.ld, n);
        if (row != dst) MIXPI_P(copy_floats)(dst, row, n);
    }
}

/* Rows for a sum along each of them: of n floats, or of n / 2 pairs, rounded up. */
MIXPI_K void MIXPI_P(load_along)(float *dst, int64_t ldd, mixpi_source from, int64_t rows, int n,
                                 int pairs) {
#if MIXPI_PASS == 2 && MIXPI_BF16
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

/* Rows for a sum across them: of n floats, or half as many rows, rounded up, of n pairs. */
MIXPI_K void MIXPI_P(load_across)(float *dst, int64_t ldd, mixpi_source from, int64_t rows, int n,
                                  int pairs) {
#if MIXPI_PASS == 2 && MIXPI_BF16
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

/* The panel that column j of n lies in. */
MIXPI_V mixpi_panel MIXPI_P(panel_of)(int64_t j, int64_t n) {
    mixpi_panel p;
    p.first = j / MIXPI_NR * MIXPI_NR;
    p.wide = n - p.first > 16 ? MIXPI_NR : 16;
    return p;
}

/* Packs b[p0 .. p0+depth, n0 .. n1], with zeros beyond n1: a row of b, or a pair of them, is a
 * row of panels. */
MIXPI_K void MIXPI_P(pack_straight)(const mixpi_gemm_block *s) {
    const mixp_gemm_args *g = s->job->g;
    int64_t n = s->n1 - s->n0, at = s->b_at + s->p0 * g->ldb + s->n0, j, p;
    int64_t each = s->job->pairs ? 2 : 1;
    for (p = 0; p < s->steps; p++, at += each * g->ldb) {
        const float *row = s->strip;
        int64_t left = s->depth - p * each;
        if (!s->job->pairs) {
            row = MIXPI_P(read)(g->b, at, n, s->strip);
            MIXPI_P(ask)(g->b, at + 8 * g->ldb, n);
        } else {
            MIXPI_P(load_across)(s->strip, 0, mixpi_source_of(g->b, at, g->ldb),
                                 mixpi_min(each, left), (int)n, 1);
        }
        for (j = 0; j < n; j += 16) {
            mixpi_panel to = MIXPI_P(panel_of)(j, n);
            mixpi_vstore(s->b_pack + to.first * s->steps + p * to.wide + j - to.first,
                         mixpi_vpart(row + j, n - j));
        }
    }
}

/* Packs op(b) = b' from b[n0 .. n1, p0 .. p0+depth], 16 rows of b at a time. Whole ones of f32
 * are read where they lie. */
MIXPI_K void MIXPI_P(pack_transposed)(const mixpi_gemm_block *s) {
    const mixp_gemm_args *g = s->job->g;
    int64_t n = s->n1 - s->n0, strip = s->job->depth + MIXPI_PAD, i, j, p;
    for (j = 0; j < n; j += 16) {
        mixpi_panel to = MIXPI_P(panel_of)(j, n);
        int64_t at = s->b_at + (s->n0 + j) * g->ldb + s->p0, rows = mixpi_min(16, n - j);
        int     here = g->b.dtype == MIXP_F32 && rows == 16 && s->depth % 16 == 0;
        int64_t ld = here ? g->ldb : strip;
        const float *src = here ? (const float *)g->b.data + at : s->strip;
        float  *dst = s->b_pack + to.first * s->steps + j - to.first;
        if (!here) {
            size_t bytes = (size_t)strip * sizeof(float);
            MIXPI_P(load_along)(s->strip, strip, mixpi_source_of(g->b, at, g->ldb), rows,
                                (int)s->depth, s->job->pairs);
            for (i = rows; i < 16; i++) memset(s->strip + i * strip, 0, bytes);
        }
        /* Writes up to 15 rows too many: into the next panel, which is packed later. */
        for (p = 0; p < s->steps; p += 16) {
            for (i = 16; here && i < 32; i++) MIXPI_PREFETCH(src + i * ld + p);
            MIXPI_P(transpose16)(dst + p * to.wide, to.wide, src + p, ld);
        }
    }
}

/* op(a)[i .. i+rows, p0 .. p0+depth] for the tile: f32 rows in place, anything else packed. */
MIXPI_K const float *MIXPI_P(pack_rows)(const mixpi_gemm_block *s, int64_t i,
                                        int64_t rows, mixpi_tile *t) {
    const mixp_gemm_args *g = s->job->g;
    if (g->trans_a) {
        int64_t at = s->a_at + s->p0 * g->lda + i;
        t->a_row = 1;
        t->a_step = MIXPI_PANELS * MIXPI_MR;
        MIXPI_P(load_across)
        (s->a_pack, t->a_step, mixpi_source_of(g->a, at, g->lda), s->depth, (int)rows,
         s->job->pairs);
        return s->a_pack;
    }
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

/* Whether tiles read b where it lies: whole vectors of f32, small enough to stay near, in rows
 * that do not all fall on the same cache sets. */
MIXPI_V int MIXPI_P(b_in_place)(const mixpi_gemm_block *s) {
    const mixp_gemm_args *g = s->job->g;
    return !g->trans_b && g->b.dtype == MIXP_F32 && (s->n1 - s->n0) % 16 == 0 &&
           g->ldb % 1024 && g->k * g->n <= 1 << 19;
}

/* Where tiles find column j of the pass's op(b): where it lies, or packed. */
MIXPI_V void MIXPI_P(tile_b)(const mixpi_gemm_block *s, mixpi_tile *t, int64_t j) {
    const mixp_gemm_args *g = s->job->g;
    if (MIXPI_P(b_in_place)(s)) {
        t->b = (const float *)g->b.data + s->b_at + s->p0 * g->ldb + s->n0 + j;
        t->b_step = g->ldb;
        return;
    }
    t->b = s->b_pack + j * s->steps;
    t->b_step = MIXPI_P(panel_of)(j, s->n1 - s->n0).wide;
}

/* The tiles of rows [i, i+rows), rows <= MIXPI_MR. Sums of a c that is not f32 wait in `part`:
 * all the block's where k takes several passes, else those of these rows. */
MIXPI_K void MIXPI_P(gemm_panel)(const mixpi_gemm_block *s, mixpi_tile *t, int64_t i,
                                 int64_t rows) {
    const mixpi_gemm_job *job = s->job;
    const mixp_gemm_args *g = job->g;
    int64_t n = s->n1 - s->n0, at = s->c_at + i * g->ldc + s->n0, j;
    int     first = s->p0 == 0, last = s->p0 + s->depth == g->k;
    float  *part = s->part + (first && last ? 0 : (i - s->m0) * job->cols);
    float  *c = job->low ? part : (float *)g->c.data + at;
    t->add = !first || (g->c.accumulate && !job->low);
    t->c_row = job->low ? job->cols : g->ldc;
    for (j = 0; j < n; j += MIXPI_NR) {
        t->cols = (int)mixpi_min(MIXPI_NR, n - j);
        t->bias = first && g->bias.data ? s->bias + j : NULL;
        t->c = c + j;
        MIXPI_P(tile_b)(s, t, j);
        MIXPI_P(tile_run)(t, rows);
    }
    if (!job->low || !last) return;
    for (; rows > 0; rows--, part += job->cols, at += g->ldc)
        MIXPI_P(write)(g->c, at, n, part);
}

/* MIXPI_PANELS panels of rows at a time, dealt out evenly. */
MIXPI_K void MIXPI_P(gemm_pass)(const mixpi_gemm_block *s) {
    int64_t m = s->m1 - s->m0, panels = mixpi_ceil_div(m, MIXPI_MR), i, j;
    mixpi_tile t;
    t.depth = s->steps;
    t.pairs = s->job->pairs;
    t.alpha = s->job->g->alpha;
    if (!MIXPI_P(b_in_place)(s)) {
        if (s->job->g->trans_b) MIXPI_P(pack_transposed)(s);
        else MIXPI_P(pack_straight)(s);
    }
    for (i = 0; i < panels; i += MIXPI_PANELS) {
        int64_t end = mixpi_min(i + MIXPI_PANELS, panels), first = m * i / panels;
        const float *a =
            MIXPI_P(pack_rows)(s, s->m0 + first, m * end / panels - first, &t);
        for (j = i; j < end; j++) {
            int64_t row = m * j / panels;
            t.a = a + (row - first) * t.a_row;
            MIXPI_P(gemm_panel)(s, &t, s->m0 + row, m * (j + 1) / panels - row);
        }
    }
}

/* A block's scratch memory, its size returned; `from` NULL only measures. */
MIXPI_K int64_t MIXPI_P(gemm_carve)(mixpi_gemm_block *s, float *from) {
    const mixpi_gemm_job *job = s->job;
    int64_t ld = job->depth + MIXPI_PAD, strip = 16 * ld > MIXPI_NB ? 16 * ld : MIXPI_NB;
    int64_t spill = 15 * MIXPI_NR;      /* what pack_transposed writes beyond the last panel */
    int64_t rows =
        job->depth < job->g->k ? mixpi_ceil_div(job->g->m, job->down) : MIXPI_MR;
    mixpi_carver c = { from, 0 };
    s->a_pack = mixpi_carve(&c, MIXPI_PANELS * MIXPI_MR * ld);
    s->strip = mixpi_carve(&c, strip);
    s->bias = mixpi_carve(&c, job->cols);
    s->b_pack = mixpi_carve(&c, job->cols * job->depth + spill);
    s->part = mixpi_carve(&c, job->low ? job->cols * rows : 0);
    return c.used;
}

/* The block of a task, before its first pass. */
MIXPI_K void MIXPI_P(gemm_block)(mixpi_gemm_block *s, const mixpi_gemm_job *job,
                                 int64_t index) {
    const mixp_gemm_args *g = job->g;
    int64_t panels = mixpi_ceil_div(g->n, MIXPI_NR),
            z = index / (job->down * job->across);
    int64_t down = index / job->across % job->down, across = index % job->across;
    memset(s, 0, sizeof *s);
    s->job = job;
    s->a_at = z * g->stride_a;
    s->b_at = z * g->stride_b;
    s->c_at = z * g->stride_c;
    s->m0 = g->m * down / job->down;
    s->m1 = g->m * (down + 1) / job->down;
    s->n0 = panels * across / job->across * MIXPI_NR;
    s->n1 = mixpi_min(g->n, panels * (across + 1) / job->across * MIXPI_NR);
}

MIXPI_K void MIXPI_P(gemm_task)(void *arg, int64_t index, int worker) {
    const mixpi_gemm_job *job = (const mixpi_gemm_job *)arg;
    const mixp_gemm_args *g = job->g;
    mixpi_gemm_block s;
    MIXPI_P(gemm_block)(&s, job, index);
    (void)MIXPI_P(gemm_carve)(&s, mixpi_slice(&job->slices, worker));
    if (g->bias.data)
        MIXPI_P(widen_rows)
        (s.bias, 0, mixpi_source_of(g->bias, s.n0, 0), 1, (int)(s.n1 - s.n0));
    for (; s.p0 == 0 || s.p0 < g->k; s.p0 += job->depth) {
        s.depth = mixpi_min(job->depth, g->k - s.p0);
        s.steps = job->pairs ? (s.depth + 1) / 2 : s.depth;
        MIXPI_P(gemm_pass)(&s);
    }
}

/* What a cut costs: elements packed twice, and most of all threads idle in the last round. */
MIXPI_K double MIXPI_P(gemm_cost)(const mixp_gemm_args *g, int64_t down, int64_t across,
                                  int64_t idle) {
    int64_t blocks = g->batch * down * across;
    double  waste = (double)(blocks + idle) / (double)blocks;
    double  packed = (double)across * (double)g->m + (double)down * (double)g->n;
    return packed * (waste * waste * waste);
}

/* How many blocks: as few as their largest size allows, or more, for the sake of threads. */
MIXPI_K void MIXPI_P(gemm_grid)(mixpi_gemm_job *job, int64_t threads) {
    const mixp_gemm_args *g = job->g;
    int64_t least_m = mixpi_ceil_div(g->m, MIXPI_MB),
            least_n = mixpi_ceil_div(g->n, MIXPI_NB);
    int64_t most_m = mixpi_ceil_div(g->m, MIXPI_MR),
            most_n = mixpi_ceil_div(g->n, MIXPI_NR);
    double work = (double)g->m * (double)g->n * (double)g->k * (double)g->batch, best = 0;
    int64_t m, n;
    job->down = least_m;
    job->across = least_n;
    if (work < 65536.0 * (double)threads) threads = 1 + (int64_t)(work / 65536.0);
    if (threads == 1 || g->batch * least_m * least_n >= 8 * threads) return;
    most_m = mixpi_min(most_m, least_m + threads);
    most_n = mixpi_min(most_n, least_n + threads);
    for (m = least_m; m <= most_m; m++)
        for (n = least_n; n <= most_n; n++) {
            int64_t idle = (threads - g->batch * m * n % threads) % threads;
            double  cost = MIXPI_P(gemm_cost)(g, m, n, idle);
            if (best <= 0 || cost < best) {
                best = cost;
                job->down = m;
                job->across = n;
            }
            if (!idle) break;
        }
}

/* pairs: has the device them? */
MIXPI_K mixp_result MIXPI_P(gemm_run)(const mixp_exec *x, const mixp_gemm_args *g,
                                      int pairs) {
    mixpi_gemm_job   job;
    mixpi_gemm_block block;
    int64_t          passes = mixpi_ceil_div(g->k, MIXPI_KC);
    if (g->m <= 0 || g->n <= 0 || g->batch <= 0) return MIXP_OK;
    if (!mixpi_gemm_readable(g)) return MIXP_ERR_DTYPE;
#if defined(MIXPREC_CBLAS)
    if (mixpi_gemm_cblas(g)) return MIXP_OK;
#endif
    job.g = g;
    job.low = g->c.dtype != MIXP_F32;
    job.pairs = pairs && g->a.dtype == MIXP_BF16 && g->b.dtype == MIXP_BF16;
    job.depth = passes ? mixpi_ceil_div(g->k, passes) : 1;
    MIXPI_P(gemm_grid)(&job, x->threads > 1 ? x->threads : 1);
    job.cols = mixpi_ceil_div(mixpi_ceil_div(g->n, MIXPI_NR), job.across) * MIXPI_NR;
    block.job = &job;
    return mixpi_run_sliced(x, g->batch * job.down * job.across,
                            MIXPI_P(gemm_carve)(&block, NULL), MIXPI_P(gemm_task), &job,
                            &job.slices);
}

MIXPI_K mixp_result MIXPI_P(gemm)(const mixp_exec *x, const mixp_gemm_args *g)
{ return MIXPI_P(gemm_run)(x, g, 0); }

/* --- attention -------------------------------------------------------------------------- *
 *
 * A task takes one head of one sequence (forward: some of its queries). It widens what it
 * needs to f32 and works on blocks of MIXPI_QUERIES x MIXPI_KEYS scores with gemm's tiles.
 * Blocks start at multiples of their size and sums run in a fixed order: the same bits
 * however tasks are dealt out.
 */
#if MIXPI_PASS == 0
#  define MIXPI_QUERIES 32
#  define MIXPI_KEYS 64
#  define MIXPI_LOWEST (-3.402823466e+38f)
static const float mixpi_lane_numbers[16] = { 0, 1, 2,  3,  4,  5,  6,  7,
                                              8, 9, 10, 11, 12, 13, 14, 15 };

/* The sizes of one problem; wide: d in whole vectors, the row length of copies. pairs: q and k,
 * dy and v are multiplied in pairs of bf16. */
typedef struct mixpi_heads { int64_t t, heads, d, wide; int pairs; } mixpi_heads;

static mixpi_heads mixpi_heads_of(int64_t t, int64_t heads, int64_t d, int pairs) {
    mixpi_heads h = { t, heads, d, (d + 15) / 16 * 16, pairs };
    return h;
}

/* Where the rows of one head lie in an array: row i begins at element first + i * ld. */
typedef struct mixpi_head { int64_t first, ld; } mixpi_head;

enum { MIXPI_PART_Q, MIXPI_PART_K, MIXPI_PART_V, MIXPI_PARTS };

/* In qkv and its gradient, where q, k and v of all heads lie in one row. */
static mixpi_head mixpi_head_packed(const mixpi_heads *h, int64_t head, int part) {
    mixpi_head at;
    at.ld = MIXPI_PARTS * h->heads * h->d;
    at.first =
        head / h->heads * h->t * at.ld + (part * h->heads + head % h->heads) * h->d;
    return at;
}

/* In y and its gradient. */
static mixpi_head mixpi_head_merged(const mixpi_heads *h, int64_t head) {
    mixpi_head at;
    at.ld = h->heads * h->d;
    at.first = head / h->heads * h->t * at.ld + head % h->heads * h->d;
    return at;
}

typedef struct mixpi_attention_job {
    const mixp_attention_args *k;
    mixpi_heads  heads;
    int64_t      chunks;        /* tasks a head                                            */
    mixpi_slices slices;
} mixpi_attention_job;

/* Its scratch memory. */
typedef struct mixpi_attention_room {
    float *columns;             /* blocks of MIXPI_KEYS keys, transposed                   */
    float *v;                   /* rows of values                                          */
    float *rows;                /* a block of keys before that                             */
    float *q, *o;               /* a block of queries, and of their results                */
    float *scores;              /* MIXPI_QUERIES x MIXPI_KEYS                              */
} mixpi_attention_room;

static int64_t mixpi_attention_carve(mixpi_attention_room *room, const mixpi_heads *h,
                                     float *from) {
    int64_t blocks = mixpi_ceil_div(h->t, MIXPI_KEYS);
    mixpi_carver c = { from, 0 };
    room->columns = mixpi_carve(&c, blocks * MIXPI_KEYS * h->wide);
    room->v = mixpi_carve(&c, h->t * h->wide);
    room->rows = mixpi_carve(&c, MIXPI_KEYS * h->wide);
    room->q = mixpi_carve(&c, MIXPI_QUERIES * h->wide);
    room->o = mixpi_carve(&c, MIXPI_QUERIES * h->wide);
    room->scores = mixpi_carve(&c, MIXPI_QUERIES * MIXPI_KEYS);
    return c.used;
}

typedef struct mixpi_attention_grad_job {
    const mixp_attention_backward_args *k;
    mixpi_heads  heads;
    mixpi_slices slices;
} mixpi_attention_grad_job;

typedef struct mixpi_attention_grad_room {
    float *q, *dy, *dq;         /* all rows of the head                                    */
    float *score_q, *score_dy;  /* q and dy as scores want them                            */
    float *delta;               /* dy . y of each row                                      */
    float *k, *k_columns, *v_columns, *dk, *dv; /* of a block of keys                      */
    float *p, *g;               /* probabilities and their gradients: as scores            */
} mixpi_attention_grad_room;

static int64_t mixpi_attention_grad_carve(mixpi_attention_grad_room *room,
                                          const mixpi_heads *h, float *from) {
    int64_t all = h->t * h->wide, block = MIXPI_KEYS * h->wide;
    mixpi_carver c = { from, 0 };
    room->q = mixpi_carve(&c, all);
    room->dy = mixpi_carve(&c, all);
    room->dq = mixpi_carve(&c, all);
    room->score_q = h->pairs ? mixpi_carve(&c, all) : room->q;
    room->score_dy = h->pairs ? mixpi_carve(&c, all) : room->dy;
    room->delta = mixpi_carve(&c, h->t);
    room->k = mixpi_carve(&c, block);
    room->k_columns = mixpi_carve(&c, block);
    room->v_columns = mixpi_carve(&c, block);
    room->dk = mixpi_carve(&c, block);
    room->dv = mixpi_carve(&c, block);
    room->p = mixpi_carve(&c, MIXPI_QUERIES * MIXPI_KEYS);
    room->g = mixpi_carve(&c, MIXPI_QUERIES * MIXPI_KEYS);
    return c.used;
}
#endif

/* All of c[m, n], n whole vectors, by tiles: `all` says how the three matrices lie. */
MIXPI_K void MIXPI_P(product)(const mixpi_tile *all, int64_t m, int64_t n) {
    int64_t panels = mixpi_ceil_div(m, MIXPI_MR), i, j;
    mixpi_tile t = *all;
    for (i = 0; i < panels; i++)
        for (j = 0; j < n; j += MIXPI_NR) {
            int64_t row = m * i / panels;
            t.a = all->a + row * t.a_row;
            t.b = all->b + j;
            t.c = all->c + row * t.c_row + j;
            t.cols = (int)mixpi_min(MIXPI_NR, n - j);
            MIXPI_P(tile_run)(&t, m * (i + 1) / panels - row);
        }
}

/* scores[rows, n] = scale * q k', with the keys as columns; n is whole vectors. */
MIXPI_K void MIXPI_P(scores)(const mixpi_heads *h, int64_t rows, int64_t n, float scale,
                             const float *q, const float *columns, float *scores) {
    mixpi_tile t;
    memset(&t, 0, sizeof t);
    t.depth = h->pairs ? (h->d + 1) / 2 : h->d;
    t.pairs = h->pairs;
    t.a = q;
    t.a_row = h->wide;
    t.a_step = 1;
    t.b = columns;
    t.b_step = MIXPI_KEYS;
    t.c = scores;
    t.c_row = MIXPI_KEYS;
    t.alpha = scale;
    MIXPI_P(product)(&t, rows, n);
}

/* How `sums` of rows of b, weighted by p, are made: of `depth` rows. p is of scores' shape. */
MIXPI_V mixpi_tile MIXPI_P(weighted)(const mixpi_heads *h, int64_t depth, const float *p,
                                     const float *b, float *sums) {
    mixpi_tile t;
    memset(&t, 0, sizeof t);
    t.depth = depth;
    t.a = p;
    t.b = b;
    t.b_step = h->wide;
    t.c = sums;
    t.c_row = h->wide;
    t.alpha = 1.0f;
    t.add = 1;
    return t;
}

/* sums[rows] += p[rows, keys] b[keys]. */
MIXPI_K void MIXPI_P(add_by_queries)(const mixpi_heads *h, int64_t rows, int64_t keys,
                                     const float *p, const float *b, float *sums) {
    mixpi_tile t = MIXPI_P(weighted)(h, keys, p, b, sums);
    t.a_row = MIXPI_KEYS;
    t.a_step = 1;
    MIXPI_P(product)(&t, rows, h->wide);
}

/* sums[keys] += p'[keys, rows] b[rows]. */
MIXPI_K void MIXPI_P(add_by_keys)(const mixpi_heads *h, int64_t rows, int64_t keys,
                                  const float *p, const float *b, float *sums) {
    mixpi_tile t = MIXPI_P(weighted)(h, rows, p, b, sums);
    t.a_row = 1;
    t.a_step = MIXPI_KEYS;
    MIXPI_P(product)(&t, keys, h->wide);
}

/* Rows [row, row+rows) of a head, as f32 rows of `wide` with zeros beyond d, then rows of zeros
 * up to `total`. */
MIXPI_K void MIXPI_P(head_rows)(const mixpi_heads *h, mixp_in a, mixpi_head at,
                                int64_t row, int64_t rows, int64_t total, float *dst) {
    int64_t wide = h->wide, i, j;
    MIXPI_P(widen_rows)
    (dst, wide, mixpi_source_of(a, at.first + row * at.ld, at.ld), rows, (int)h->d);
    for (i = 0; i < rows; i++)
        for (j = h->d; j < wide; j++) dst[i * wide + j] = 0.0f;
    memset(dst + rows * wide, 0, (size_t)((total - rows) * wide) * sizeof(float));
}

/* The same for scores: rows that are multiplied along their length, in pairs where h has them. */
MIXPI_K void MIXPI_P(score_rows)(const mixpi_heads *h, mixp_in a, mixpi_head at,
                                 int64_t row, int64_t rows, int64_t total, float *dst) {
    mixpi_source from = mixpi_source_of(a, at.first + row * at.ld, at.ld);
    if (!h->pairs) {
        MIXPI_P(head_rows)(h, a, at, row, rows, total, dst);
        return;
    }
    MIXPI_P(load_along)(dst, h->wide, from, rows, (int)h->d, 1);
    memset(dst + rows * h->wide, 0, (size_t)((total - rows) * h->wide) * sizeof(float));
}

/* Stores such rows, or adds them. */
MIXPI_K void MIXPI_P(head_put)(const mixpi_heads *h, mixp_out y, mixpi_head at,
                               int64_t row, int64_t rows, float *src) {
    int64_t to = at.first + row * at.ld;
    for (; rows > 0; rows--, src += h->wide, to += at.ld)
        MIXPI_BLOCKS(j, n, h->d) MIXPI_P(write)(y, to + j, n, src + j);
}

/* dst[wide, MIXPI_KEYS] = the transpose of rows[MIXPI_KEYS, wide], as much as scores need. */
MIXPI_K void MIXPI_P(columns_of)(const mixpi_heads *h, const float *rows, float *dst) {
    int64_t wide = h->wide, steps = h->pairs ? (h->d + 1) / 2 : h->d, i, j;
    for (i = 0; i < MIXPI_KEYS; i += 16)
        for (j = 0; j < steps; j += 16)
            MIXPI_P(transpose16)
            (dst + j * MIXPI_KEYS + i, MIXPI_KEYS, rows + i * wide + j, wide);
}

/* x in the lanes j + lane < n, y in the others. */
MIXPI_V mixpi_v MIXPI_P(below)(int64_t n, int64_t j, mixpi_v x, mixpi_v y) {
    return mixpi_vselect_gt(mixpi_vset((float)(n - j)), mixpi_vload(mixpi_lane_numbers),
                            x, y);
}

/* row[0 .. n) times factor, n whole vectors. */
MIXPI_V void MIXPI_P(scale_row)(float *row, int64_t n, mixpi_v factor) {
    int64_t j;
    for (j = 0; j < n; j += 16)
        mixpi_vstore(row + j, mixpi_vmul(mixpi_vload(row + j), factor));
}

/* Turns one row of n scores into exp(score - max), and 0 from `seen` on. top: the largest
 * score so far; sum and o, which belong to the old top, move to the new one. It starts at
 * MIXPI_LOWEST, so that scores of -Inf alone give a sum of 0 and NaN in the end. */
MIXPI_V void MIXPI_P(softmax_block)(float *s, int64_t n, int64_t seen, float *top,
                                    float *sum, float *o, int64_t wide) {
    mixpi_v most = mixpi_vset(*top), add = mixpi_vzero(),
            lowest = mixpi_vset(MIXPI_LOWEST);
    float   max;
    int64_t j;
    for (j = 0; j < n; j += 16)
        most = mixpi_vmax(MIXPI_P(below)(seen, j, mixpi_vload(s + j), lowest), most);
    max = mixpi_vmaxof(most);
    if (max > *top && *sum > 0.0f) {
        mixpi_v factor = mixpi_vexp(mixpi_vset(*top - max));
        *sum *= mixpi_vmaxof(factor);
        MIXPI_P(scale_row)(o, wide, factor);
    }
    *top = max;
    for (j = 0; j < n; j += 16) {
        mixpi_v e = mixpi_vexp(mixpi_vsub(mixpi_vload(s + j), mixpi_vset(max)));
        e = MIXPI_P(below)(seen, j, e, mixpi_vzero());
        mixpi_vstore(s + j, e);
        add = mixpi_vadd(add, e);
    }
    *sum += mixpi_vsum(add);
}

/* Forward of up to MIXPI_QUERIES queries from q0 on, with columns and values in place. */
MIXPI_K void MIXPI_P(attention_queries)(const mixpi_attention_job *job,
                                        const mixpi_attention_room *room, int64_t head,
                                        int64_t q0) {
    const mixp_attention_args *k = job->k;
    const mixpi_heads *h = &job->heads;
    int64_t rows = mixpi_min(MIXPI_QUERIES, h->t - q0), wide = h->wide, k0, r;
    int64_t last = k->causal ? q0 + rows : h->t;  /* plant: attention_last */
    float  *o = room->o, *scores = room->scores, *lse = k->lse + head * h->t + q0;
    float   top[MIXPI_QUERIES], sum[MIXPI_QUERIES];
    MIXPI_P(score_rows)
    (h, k->qkv, mixpi_head_packed(h, head, MIXPI_PART_Q), q0, rows, rows, room->q);
    memset(o, 0, (size_t)(rows * wide) * sizeof(float));
    for (r = 0; r < rows; r++) {
        top[r] = MIXPI_LOWEST;
        sum[r] = 0.0f;
    }
    for (k0 = 0; k0 < last; k0 += MIXPI_KEYS) {
        int64_t keys = mixpi_min(MIXPI_KEYS, last - k0), n = (keys + 15) / 16 * 16;
        /* plant: attention_reach */
        int64_t reach = k->causal ? q0 - k0 + 1 : keys;     /* how many keys row 0 may see */
        MIXPI_P(scores)(h, rows, n, k->scale, room->q, room->columns + k0 * wide, scores);
        for (r = 0; r < rows; r++)
            MIXPI_P(softmax_block)(scores + r * MIXPI_KEYS, n, mixpi_min(keys, reach + r),
                                   &top[r], &sum[r], o + r * wide, wide);
        MIXPI_P(add_by_queries)(h, rows, keys, scores, room->v + k0 * wide, o);
    }
    for (r = 0; r < rows; r++) {
        MIXPI_P(scale_row)(o + r * wide, wide, mixpi_vset(1.0f / sum[r]));
        lse[r] = top[r] + logf(sum[r]);
    }
    MIXPI_P(head_put)(h, k->y, mixpi_head_merged(h, head), q0, rows, o);
}

/* Some blocks of queries of one head. */
MIXPI_K void MIXPI_P(attention_task)(void *arg, int64_t index, int worker) {
    const mixpi_attention_job *job = (const mixpi_attention_job *)arg;
    const mixp_attention_args *k = job->k;
    const mixpi_heads *h = &job->heads;
    int64_t head = index / job->chunks, chunk = index % job->chunks, i, k0;
    int64_t blocks = mixpi_ceil_div(h->t, MIXPI_QUERIES);
    int64_t first = blocks * chunk / job->chunks,
            end = blocks * (chunk + 1) / job->chunks;
    int64_t last = k->causal ? mixpi_min(h->t, end * MIXPI_QUERIES) : h->t;
    mixpi_head keys = mixpi_head_packed(h, head, MIXPI_PART_K);
    mixpi_attention_room room;
    (void)mixpi_attention_carve(&room, h, mixpi_slice(&job->slices, worker));
    for (k0 = 0; k0 < last; k0 += MIXPI_KEYS) {
        int64_t rows = mixpi_min(MIXPI_KEYS, last - k0);
        MIXPI_P(score_rows)(h, k->qkv, keys, k0, rows, MIXPI_KEYS, room.rows);
        MIXPI_P(columns_of)(h, room.rows, room.columns + k0 * h->wide);
    }
    MIXPI_P(head_rows)(h, k->qkv, mixpi_head_packed(h, head, MIXPI_PART_V), 0, last, last,
                       room.v);
    for (i = first; i < end; i++)
        MIXPI_P(attention_queries)(job, &room, head, i * MIXPI_QUERIES);
}

/* delta[i] = dy[i] . y[i], the sum over keys of probability times its gradient. row: room for
 * one row of y. */
MIXPI_K void MIXPI_P(attention_deltas)(const mixpi_attention_grad_job *job, int64_t head,
                                       const float *dy, float *row, float *delta) {
    const mixpi_heads *h = &job->heads;
    int64_t i, j;
    for (i = 0; i < h->t; i++, dy += h->wide) {
        mixpi_v sum = mixpi_vzero();
        MIXPI_P(head_rows)(h, job->k->y, mixpi_head_merged(h, head), i, 1, 1, row);
        for (j = 0; j < h->wide; j += 16)
            sum = mixpi_vfma(mixpi_vload(dy + j), mixpi_vload(row + j), sum);
        delta[i] = mixpi_vsum(sum);
    }
}

/* p: scores become probabilities; g: their gradients become those of q k'. */
MIXPI_V void MIXPI_P(score_grads)(float *p, float *g, int64_t n, int64_t seen, float lse,
                                  float delta, float scale) {
    int64_t j;
    for (j = 0; j < n; j += 16) {
        mixpi_v e = mixpi_vexp(mixpi_vsub(mixpi_vload(p + j), mixpi_vset(lse)));
        mixpi_v d = mixpi_vmul(mixpi_vsub(mixpi_vload(g + j), mixpi_vset(delta)),
                               mixpi_vset(scale));
        mixpi_vstore(p + j, MIXPI_P(below)(seen, j, e, mixpi_vzero()));
        mixpi_vstore(g + j, MIXPI_P(below)(seen, j, mixpi_vmul(e, d), mixpi_vzero()));
    }
}

/* One block of keys, from k0 on, meets one of queries, from q0 on: adds to dq, dk and dv. */
MIXPI_K void MIXPI_P(attention_meet)(const mixpi_attention_grad_job *job,
                                     const mixpi_attention_grad_room *room, int64_t head,
                                     int64_t k0, int64_t q0) {
    const mixp_attention_backward_args *k = job->k;
    const mixpi_heads *h = &job->heads;
    int64_t rows = mixpi_min(MIXPI_QUERIES, h->t - q0),
            keys = mixpi_min(MIXPI_KEYS, h->t - k0);
    int64_t reach = k->causal ? mixpi_min(keys, q0 + rows - k0) : keys, r;
    /* plant: attention_first */
    int64_t first = k->causal ? q0 - k0 + 1 : reach;        /* how many keys row 0 may see */
    int64_t n = (reach + 15) / 16 * 16;
    const float *q = room->q + q0 * h->wide, *dy = room->dy + q0 * h->wide;
    const float *lse = k->lse + head * h->t + q0;
    MIXPI_P(scores)
    (h, rows, n, k->scale, room->score_q + q0 * h->wide, room->k_columns, room->p);
    MIXPI_P(scores)
    (h, rows, n, 1.0f, room->score_dy + q0 * h->wide, room->v_columns, room->g);
    for (r = 0; r < rows; r++)
        MIXPI_P(score_grads)
        (room->p + r * MIXPI_KEYS, room->g + r * MIXPI_KEYS, n,
         mixpi_min(reach, first + r), lse[r], room->delta[q0 + r], k->scale);
    MIXPI_P(add_by_keys)(h, rows, reach, room->p, dy, room->dv);
    MIXPI_P(add_by_keys)(h, rows, reach, room->g, q, room->dk);
    MIXPI_P(add_by_queries)(h, rows, reach, room->g, room->k, room->dq + q0 * h->wide);
}

/* Backward of one block of keys against all queries. */
MIXPI_K void MIXPI_P(attention_keys)(const mixpi_attention_grad_job *job,
                                     const mixpi_attention_grad_room *room, int64_t head,
                                     int64_t k0) {
    const mixp_attention_backward_args *k = job->k;
    const mixpi_heads *h = &job->heads;
    mixpi_head at_k = mixpi_head_packed(h, head, MIXPI_PART_K);
    mixpi_head at_v = mixpi_head_packed(h, head, MIXPI_PART_V);
    int64_t keys = mixpi_min(MIXPI_KEYS, h->t - k0), q0;
    size_t  bytes = (size_t)(MIXPI_KEYS * h->wide) * sizeof(float);
    MIXPI_P(score_rows)(h, k->qkv, at_v, k0, keys, MIXPI_KEYS, room->k);
    MIXPI_P(columns_of)(h, room->k, room->v_columns);
    MIXPI_P(score_rows)(h, k->qkv, at_k, k0, keys, MIXPI_KEYS, room->k);
    MIXPI_P(columns_of)(h, room->k, room->k_columns);
    if (h->pairs) MIXPI_P(head_rows)(h, k->qkv, at_k, k0, keys, MIXPI_KEYS, room->k);
    memset(room->dk, 0, bytes);
    memset(room->dv, 0, bytes);
    for (q0 = k->causal ? k0 : 0; q0 < h->t; q0 += MIXPI_QUERIES)
        MIXPI_P(attention_meet)(job, room, head, k0, q0);
    MIXPI_P(head_put)(h, k->dqkv, at_k, k0, keys, room->dk);
    MIXPI_P(head_put)(h, k->dqkv, at_v, k0, keys, room->dv);
}

MIXPI_K void MIXPI_P(attention_grad_task)(void *arg, int64_t head, int worker) {
    const mixpi_attention_grad_job *job = (const mixpi_attention_grad_job *)arg;
    const mixp_attention_backward_args *k = job->k;
    const mixpi_heads *h = &job->heads;
    mixpi_head at_q = mixpi_head_packed(h, head, MIXPI_PART_Q);
    mixpi_attention_grad_room room;
    int64_t k0;
    (void)mixpi_attention_grad_carve(&room, h, mixpi_slice(&job->slices, worker));
    MIXPI_P(head_rows)(h, k->qkv, at_q, 0, h->t, h->t, room.q);
    MIXPI_P(head_rows)(h, k->dy, mixpi_head_merged(h, head), 0, h->t, h->t, room.dy);
    if (h->pairs) {
        MIXPI_P(score_rows)(h, k->qkv, at_q, 0, h->t, h->t, room.score_q);
        MIXPI_P(score_rows)
        (h, k->dy, mixpi_head_merged(h, head), 0, h->t, h->t, room.score_dy);
    }
    memset(room.dq, 0, (size_t)(h->t * h->wide) * sizeof(float));
    MIXPI_P(attention_deltas)(job, head, room.dy, room.k, room.delta);
    for (k0 = 0; k0 < h->t; k0 += MIXPI_KEYS)
        MIXPI_P(attention_keys)(job, &room, head, k0);
    MIXPI_P(head_put)(h, k->dqkv, at_q, 0, h->t, room.dq);
}

MIXPI_K mixp_result MIXPI_P(attention_run)(const mixp_exec *x,
                                           const mixp_attention_args *k, int pairs) {
    int64_t many = k->b * k->heads;
    mixpi_attention_job  job;
    mixpi_attention_room room;
    if (many <= 0 || k->t <= 0 || k->d <= 0) return MIXP_OK;
    if (!mixpi_reads(k->qkv) || !mixpi_writes(k->y)) return MIXP_ERR_DTYPE;
    job.k = k;
    job.heads = mixpi_heads_of(k->t, k->heads, k->d, pairs && k->qkv.dtype == MIXP_BF16);
    job.chunks = 1;
    if (many < 2 * x->threads)  /* too few heads: cut them by queries */
        job.chunks = mixpi_min(mixpi_ceil_div(2 * x->threads, many),
                               mixpi_ceil_div(k->t, MIXPI_QUERIES));
    return mixpi_run_sliced(x, many * job.chunks,
                            mixpi_attention_carve(&room, &job.heads, NULL),
                            MIXPI_P(attention_task), &job, &job.slices);
}

MIXPI_K mixp_result MIXPI_P(attention_backward_run)(const mixp_exec *x,
                                                    const mixp_attention_backward_args *k,
                                                    int pairs) {
    int64_t many = k->b * k->heads;
    mixpi_attention_grad_job  job;
    mixpi_attention_grad_room room;
    if (many <= 0 || k->t <= 0 || k->d <= 0) return MIXP_OK;
    if (!mixpi_reads(k->qkv) || !mixpi_reads(k->y) || !mixpi_reads(k->dy) ||
        !mixpi_writes(k->dqkv)) return MIXP_ERR_DTYPE;
    job.k = k;
    pairs = pairs && k->qkv.dtype == MIXP_BF16 && k->dy.dtype == MIXP_BF16;
    job.heads = mixpi_heads_of(k->t, k->heads, k->d, pairs);
    return mixpi_run_sliced(x, many, mixpi_attention_grad_carve(&room, &job.heads, NULL),
                            MIXPI_P(attention_grad_task), &job, &job.slices);
}

MIXPI_K mixp_result MIXPI_P(attention)(const mixp_exec *x, const mixp_attention_args *k)
{ return MIXPI_P(attention_run)(x, k, 0); }
MIXPI_K mixp_result MIXPI_P(attention_backward)(const mixp_exec *x,
                                                const mixp_attention_backward_args *k)
{ return MIXPI_P(attention_backward_run)(x, k, 0); }

/* The three with pairs, for a table of their own. */
#if MIXPI_PASS == 2 && MIXPI_BF16
MIXPI_K mixp_result MIXPI_P(gemm_bf16)(const mixp_exec *x, const mixp_gemm_args *g)
{ return MIXPI_P(gemm_run)(x, g, 1); }
MIXPI_K mixp_result MIXPI_P(attention_bf16)(const mixp_exec *x,
                                            const mixp_attention_args *k) {
    return MIXPI_P(attention_run)(x, k, 1);
}
MIXPI_K mixp_result MIXPI_P(attention_backward_bf16)(
    const mixp_exec *x, const mixp_attention_backward_args *k) {
    return MIXPI_P(attention_backward_run)(x, k, 1);
}

#endif

/* --- grad_stats, clip, prepare, update, advance ---------------------------------------- *
 *
 * All active gradients are cut into chunks of a fixed size, across tensors; one parallel loop
 * runs over them, and sums are added in the order of the chunks: the same bits at any number
 * of threads and on any instruction set.
 */
#if MIXPI_PASS == 0     /* shared by every pass */
#define MIXPI_CHUNK 32768
#define MIXPI_CHUNK_SCALE 2     /* `write` of a job that multiplies and looks at nothing      */

typedef struct mixpi_chunk {
    int64_t row, first;         /* of the table; element it begins at                      */
    double  squares;
    int64_t bad_element;        /* -1 = none                                               */
    float   largest;
    int32_t bad_is_nan;
} mixpi_chunk;

typedef struct mixpi_chunk_job {
    const mixp_param_row  *rows;
    const mixp_step_plan  *plan;
    const mixp_step_state *step;
    mixpi_chunk *chunks;
    int64_t      count;         /* of chunks                                               */
    float        factor;
    int          write;
} mixpi_chunk_job;

/* Cuts the active rows into chunks, in scratch memory, and runs task over them. */
static mixp_result mixpi_each_chunk(const mixp_exec *x, mixpi_chunk_job *job,
                                    const mixp_param_row *rows, int64_t count,
                                    mixp_task task) {
    int64_t i, first, n = 0;
    for (i = 0; i < count; i++)
        if (rows[i].active) n += mixpi_ceil_div(rows[i].count, MIXPI_CHUNK);
    job->rows = rows;
    job->count = n;
    job->chunks = (mixpi_chunk *)mixpi_scratch(x, (size_t)n * sizeof *job->chunks);
    if (!job->chunks) return MIXP_ERR_MEMORY;
    for (n = 0, i = 0; i < count; i++)
        for (first = 0; rows[i].active && first < rows[i].count;
             first += MIXPI_CHUNK, n++) {
            const mixpi_chunk fresh = { i, first, 0.0, -1, 0.0f, 0 };
            job->chunks[n] = fresh;
        }
    mixpi_parallel(x, n, task, job);
    return MIXP_OK;
}

/* The careful look at a block: finds the bad element, and squares in double, where neither
 * 3e38 nor 1e-38 leaves the range. */
static void mixpi_look_closely(mixpi_chunk *c, const float *x, int n, float factor,
                               int64_t first) {
    int i;
    for (i = 0; i < n; i++) {
        float v = x[i] * factor;
        uint32_t raw = mixp_bits_of_f32(x[i]) & 0x7FFFFFFFu,
                 a = mixp_bits_of_f32(v) & 0x7FFFFFFFu;
        c->squares += (double)v * (double)v;
        if (raw < 0x7F800000u && a < 0x7F800000u) {
            if (mixp_f32_of_bits(a) > c->largest) c->largest = mixp_f32_of_bits(a);
        } else if (c->bad_element < 0) {  /* plant: bad_first */
            c->bad_element = first + i;
            /* plant: bad_is_nan */
            c->bad_is_nan = (raw >= 0x7F800000u ? raw : a) > 0x7F800000u;
        }
    }
}

/* A piece of a gradient that was read for the last time. */
static void mixpi_clear_grad(const mixp_param_row *row, int64_t first, int64_t n) {
    size_t size = mixp_dtype_size(row->grad_dtype);
    if (row->active == 2)
        memset((char *)row->grad + (size_t)first * size, 0, (size_t)n * size);
}

static void mixpi_sum_up(const mixpi_chunk_job *job, mixp_step_state *step) {
    mixp_grad_stats *s = &step->stats;
    double squares = 0.0;
    int64_t i;
    memset(s, 0, sizeof *s);
    s->bad_row = s->bad_element = -1;
    for (i = 0; i < job->count; i++) {
        const mixpi_chunk *c = &job->chunks[i];
        squares += c->squares;
        if (c->largest > s->largest) s->largest = c->largest;
        if (c->bad_element < 0 || s->found_inf) continue;
        s->found_inf = 1;
        s->bad_row = c->row;
        s->bad_element = c->bad_element;
        s->bad_is_nan = c->bad_is_nan;
    }
    s->norm = sqrt(squares);
    step->clipped = 1.0f;
}
#endif

/* 16 floats, and a word ahead to the cache. */
MIXPI_V mixpi_v MIXPI_P(stream)(const float *p) {
    MIXPI_PREFETCH((const char *)p + 2048);
    return mixpi_vload(p);
}

/* x * factor for n elements, into out unless that is NULL; the sum of squares and the largest
 * magnitude. Inf or NaN anywhere makes the sum Inf or NaN. */
MIXPI_V float MIXPI_P(look)(const float *x, float *out, int n, float factor,
                            float *largest) {
    mixpi_v f = mixpi_vset(factor), top = mixpi_vzero(), s0 = top, s1 = top, a, b;
    int i;
    for (i = 0; i + 32 <= n; i += 32) {
        a = mixpi_vmul(MIXPI_P(stream)(x + i), f);
        b = mixpi_vmul(MIXPI_P(stream)(x + i + 16), f);
        if (out) { mixpi_vstore(out + i, a); mixpi_vstore(out + i + 16, b); }
        s0 = mixpi_vfma(a, a, s0);
        s1 = mixpi_vfma(b, b, s1);
        top = mixpi_vmax(mixpi_vmax(mixpi_vabs(a), mixpi_vabs(b)), top);
    }
    for (; i < n; i += 16) {
        int left = n - i < 16 ? n - i : 16;
        a = mixpi_vmul(mixpi_vload_n(x + i, left), f);
        if (out) mixpi_vstore_n(out + i, a, left);
        s0 = mixpi_vfma(a, a, s0);
        top = mixpi_vmax(mixpi_vabs(a), top);
    }
    *largest = mixpi_vmaxof(top);
    return mixpi_vsum(mixpi_vadd(s0, s1));
}

/* One chunk of gather. Inf and NaN are looked for after unscaling: the inverse of a scale is
 * finite and not 0, so a bad value stays bad. */
MIXPI_K void MIXPI_P(gather_chunk)(void *arg, int64_t index, int worker) {
    const mixpi_chunk_job *job = (const mixpi_chunk_job *)arg;
    mixpi_chunk *c = &job->chunks[index];
    const mixp_param_row *row = &job->rows[c->row];
    const mixp_out grad = mixpi_out_to(row->grad, row->grad_dtype, 0);
    int64_t i, end = mixpi_min(c->first + MIXPI_CHUNK, row->count);
    float buf[MIXPI_BLOCK], largest;
    (void)worker;
    for (i = c->first; i < end; i += MIXPI_BLOCK) {
        int n = (int)mixpi_min(MIXPI_BLOCK, end - i);
        const float *x = MIXPI_P(held)(grad, i, n, buf);
        float factor = job->factor, squares = 0.0f;
        if (job->write == MIXPI_CHUNK_SCALE) {      /* sums that nobody reads are compiled away */
            (void)MIXPI_P(look)(x, MIXPI_P(place)(grad, i, buf), n, factor, &largest);
            MIXPI_P(placed)(grad, i, n, buf);
            continue;
        }
        /* Unscaling in place: what counts is what the gradient's own dtype holds of it. */
        if (job->write) {
            squares = MIXPI_P(look)(x, MIXPI_P(place)(grad, i, buf), n, factor, &largest);
            MIXPI_P(placed)(grad, i, n, buf);
            x = MIXPI_P(held)(grad, i, n, buf);
            factor = 1.0f;
        }
        if (!job->write || grad.dtype != MIXP_F32)
            squares = MIXPI_P(look)(x, NULL, n, factor, &largest);
        /* Not a plain sum (overflow, Inf, NaN), or one that lost small squares. */
        if ((mixp_bits_of_f32(squares) & 0x7FFFFFFFu) >= 0x7F800000u ||
            (largest < MIXPI_SQUARES_LOST && largest > 0.0f)) {
            mixpi_look_closely(c, x, n, factor, i);
            continue;
        }
        c->squares += (double)squares;
        if (largest > c->largest) c->largest = largest;
    }
}

/* factor: of the gradients that are looked at; write: 1 unscales them, MIXPI_CHUNK_SCALE only
 * multiplies. */
MIXPI_K mixpi_chunk_job MIXPI_P(look_job)(float factor, int write) {
    mixpi_chunk_job job;
    memset(&job, 0, sizeof job);
    job.factor = factor;
    job.write = write;
    return job;
}

MIXPI_K mixp_result MIXPI_P(grad_stats)(const mixp_exec *x,
                                        const mixp_grad_stats_args *k) {
    const float factor = k->scale ? mixp_scaler_inverse(*k->scale) : 1.0f;
    mixpi_chunk_job job = MIXPI_P(look_job)(factor, k->unscale != 0);
    mixp_result r = mixpi_each_chunk(x, &job, k->rows, k->count, MIXPI_P(gather_chunk));
    if (r != MIXP_OK) return r;
    mixpi_sum_up(&job, k->step);
    if (k->plan) mixp_step_prepare(k->plan, k->step, k->scaler);
    return MIXP_OK;
}

MIXPI_K mixp_result MIXPI_P(clip)(const mixp_exec *x, const mixp_clip_args *k) {
    const float factor = (float)mixp_clip_coefficient(k->step->stats.norm, k->max_norm);
    mixpi_chunk_job job = MIXPI_P(look_job)(factor, MIXPI_CHUNK_SCALE);
    mixp_result r;
    /* plant: clip_nothing */
    if (k->step->stats.found_inf || factor >= 1.0f) return MIXP_OK;
    r = mixpi_each_chunk(x, &job, k->rows, k->count, MIXPI_P(gather_chunk));
    if (r == MIXP_OK) k->step->clipped = factor;
    return r;
}

MIXPI_K mixp_result MIXPI_P(prepare)(const mixp_exec *x, const mixp_prepare_args *k) {
    (void)x;
    mixp_step_prepare(k->plan, k->step, k->scaler);
    return MIXP_OK;
}

MIXPI_K mixp_result MIXPI_P(advance)(const mixp_exec *x, const mixp_advance_args *k) {
    (void)x;
    mixp_scaler_advance(k->scaler, k->rule, k->scaler->found_inf);
    return MIXP_OK;
}

/* 16 elements of mixp_adam_element, the same operations in the same order. */
MIXPI_V mixpi_v MIXPI_P(adam)(const mixp_step_scalars *u, int apex, mixpi_v g, mixpi_v p,
                              mixpi_v *m, mixpi_v *v) {
    mixpi_v ratio, rate = mixpi_vset(-u->rate), eps = mixpi_vset(u->eps);
    g = mixpi_vfma(mixpi_vset(u->l2), p, mixpi_vmul(g, mixpi_vset(u->factor)));
    *m = mixpi_vfma(mixpi_vset(u->beta1), *m, mixpi_vmul(mixpi_vset(u->rest1), g));
    *v = mixpi_vfma(mixpi_vset(u->beta2), *v, mixpi_vmul(mixpi_vmul(mixpi_vset(u->rest2), g), g));
    if (apex) {
        ratio = mixpi_vadd(mixpi_vsqrt(mixpi_vmul(*v, mixpi_vset(u->scale_v))), eps);
        ratio = mixpi_vdiv(mixpi_vmul(*m, mixpi_vset(u->scale_m)), ratio);
        return mixpi_vfma(rate, mixpi_vfma(mixpi_vset(u->decay), p, ratio), p);
    }
    p = mixpi_vfma(mixpi_vset(-u->decay), p, p);
    ratio = mixpi_vdiv(*m, mixpi_vfma(mixpi_vsqrt(*v), mixpi_vset(u->scale_v), eps));
    return mixpi_vfma(rate, ratio, p);
}

MIXPI_V void MIXPI_P(adam_block)(const mixp_step_scalars *u, int apex, const float *g,
                                 float *p, float *m, float *v, int n) {
    mixpi_v a, b, w;
    int i;
    for (i = 0; i + 16 <= n; i += 16) {
        a = MIXPI_P(stream)(m + i); b = MIXPI_P(stream)(v + i);
        w = MIXPI_P(adam)(u, apex, MIXPI_P(stream)(g + i), MIXPI_P(stream)(p + i), &a,
                          &b);
        mixpi_vstore(p + i, w); mixpi_vstore(m + i, a); mixpi_vstore(v + i, b);
    }
    for (; i < n; i++) mixp_adam_element(u, g[i], p + i, m + i, v + i);
}

/* As mixp_sgd_element; m NULL without momentum. */
MIXPI_V void MIXPI_P(sgd_block)(const mixp_step_scalars *u, const float *g, float *p,
                                float *m, int n) {
    mixpi_v d, w, a;
    int i;
    for (i = 0; i + 16 <= n; i += 16) {
        w = MIXPI_P(stream)(p + i);
        d = mixpi_vmul(MIXPI_P(stream)(g + i), mixpi_vset(u->factor));
        d = mixpi_vfma(mixpi_vset(u->l2), w, d);
        if (m) {
            a = mixpi_vmul(mixpi_vset(u->rest1), d);
            a = mixpi_vfma(mixpi_vset(u->beta1), MIXPI_P(stream)(m + i), a);
            mixpi_vstore(m + i, a);
            d = u->nesterov ? mixpi_vfma(mixpi_vset(u->momentum), a, d) : a;
        }
        mixpi_vstore(p + i, mixpi_vfma(mixpi_vset(-u->rate), d, w));
    }
    for (; i < n; i++) mixp_sgd_element(u, g[i], p + i, m ? m + i : NULL);
}

/* n of a low copy's count elements, from `at` on. Those of a large one pass the caches by. */
MIXPI_V void MIXPI_P(put_low)(mixp_dtype dtype, void *low, int64_t count, int64_t at,
                              int64_t n, const float *p) {
    char *to = (char *)low + 2 * at;
    int64_t i = 0;
    if ((size_t)count * 2 > MIXPI_STREAM_BYTES && (uintptr_t)to % 32 == 0)
        for (; i + 16 <= n; i += 16) mixpi_vput(dtype, to + 2 * i, mixpi_vload(p + i), 1);
    MIXPI_P(placed)(mixpi_out_to(low, dtype, 0), at + i, n - i, p + i);
}

MIXPI_K void MIXPI_P(update_chunk)(void *arg, int64_t index, int worker) {
    const mixpi_chunk_job *job = (const mixpi_chunk_job *)arg;
    const mixp_param_row *row = &job->rows[job->chunks[index].row];
    const mixp_in grad = mixpi_in(row->grad, row->grad_dtype);
    const mixp_out weight = mixpi_out_to(row->weight, row->weight_dtype, 0);
    int64_t i = job->chunks[index].first, end = mixpi_min(i + MIXPI_CHUNK, row->count);
    float *master = (float *)row->master, *m = (float *)row->m, *v = (float *)row->v;
    float gbuf[MIXPI_BLOCK], pbuf[MIXPI_BLOCK];
    mixp_step_scalars late;
    const mixp_step_scalars *u = &job->step->update[row->group];
    (void)worker;
    if (job->step->skip) { mixpi_clear_grad(row, i, end - i); return; }
    if (row->missed && *row->missed) {
        mixp_step_scalars_of(job->plan, job->step, row->group,
                             job->step->applied - *row->missed, &late);
        u = &late;
    }
    for (; i < end; i += MIXPI_BLOCK) {
        int n = (int)mixpi_min(MIXPI_BLOCK, end - i);
        const float *g = MIXPI_P(read)(grad, i, n, gbuf);
        if (g == gbuf) MIXPI_P(ask)(grad, i + n, n);    /* f32 comes by `stream` */
        float *p = row->master ? master + i : MIXPI_P(place)(weight, i, pbuf);
        if (!row->master) (void)MIXPI_P(held)(weight, i, n, pbuf);
        if (job->plan->kind == MIXP_OPTIMIZER_SGD)
            MIXPI_P(sgd_block)(u, g, p, m ? m + i : NULL, n);
        else if (u->order == MIXP_ADAM_ORDER_APEX)
            MIXPI_P(adam_block)(u, 1, g, p, m + i, v + i, n);
        else MIXPI_P(adam_block)(u, 0, g, p, m + i, v + i, n);
        MIXPI_P(placed)(weight, i, n, p);
        if (row->low_f16) MIXPI_P(put_low)(MIXP_F16, row->low_f16, row->count, i, n, p);
        if (row->low_bf16)
            MIXPI_P(put_low)(MIXP_BF16, row->low_bf16, row->count, i, n, p);
        mixpi_clear_grad(row, i, n);
    }
    mixpi_vfence();
}

MIXPI_K mixp_result MIXPI_P(update)(const mixp_exec *x, const mixp_update_args *k) {
    mixpi_chunk_job job;
    mixp_result r;
    int64_t i;
    memset(&job, 0, sizeof job);
    job.plan = k->plan;
    job.step = k->step;
    r = mixpi_each_chunk(x, &job, k->rows, k->count, MIXPI_P(update_chunk));
    if (r != MIXP_OK || k->step->skip) return r;
    for (i = 0; i < k->count; i++)
        if (!k->rows[i].active && k->rows[i].missed) ++*k->rows[i].missed;  /* plant: missed */
    return MIXP_OK;
}

/* --- look -------------------------------------------------------------------------------- */

#if MIXPI_PASS == 0
#define MIXPI_LOOK_LANES 16
#define MIXPI_EXPONENTS  256

/* What one piece of an array holds: how many magnitudes lie below each limit. */
typedef struct mixpi_look_piece {
    int32_t top, nonfinite, zeros, flushed, least, subnormal;
    int32_t exponents[MIXPI_EXPONENTS];
} mixpi_look_piece;

typedef struct mixpi_look_job {
    const mixp_look_args *k;
    mixpi_look_limits     at;
    mixpi_look_piece     *pieces;
} mixpi_look_job;

static void mixpi_look_join(mixp_look *to, const mixpi_look_piece *p, int64_t n) {
    float top = mixp_f32_of_bits((uint32_t)p->top);
    if (top > to->largest) to->largest = top;
    to->count += n;
    to->nonfinite += p->nonfinite;
    to->zeros += p->zeros;
    to->flushed += p->flushed - p->zeros;
    to->least += p->least - p->flushed;  /* plant: look_least */
    to->subnormal += p->subnormal - p->flushed;
}
#endif

/* 16 magnitudes at a time, as integers: fast-math, FTZ and DAZ cannot change them. */
MIXPI_K void MIXPI_P(look_block)(mixpi_look_piece *p, const float *x, int n,
                                 const mixpi_look_limits *at) {
    const int32_t inf = 0x7F800000, flushed = (int32_t)at->flushed;
    const int32_t least = (int32_t)at->least, subnormal = (int32_t)at->subnormal;
    int32_t a[MIXPI_LOOK_LANES], found[6][MIXPI_LOOK_LANES];
    int i, j;
    memset(found, 0, sizeof found);
    for (i = 0; i < n; i += MIXPI_LOOK_LANES) {
        int m = n - i < MIXPI_LOOK_LANES ? n - i : MIXPI_LOOK_LANES;
        /* Lanes beyond the end are NaN, which only `nonfinite` counts. */
        if (m < MIXPI_LOOK_LANES) memset(a, 0x7F, sizeof a);
        memcpy(a, x + i, (size_t)m * sizeof *a);
        for (j = 0; j < MIXPI_LOOK_LANES; j++) {
            int32_t v = a[j] & 0x7FFFFFFF, finite = v < inf ? v : 0;
            found[0][j] = finite > found[0][j] ? finite : found[0][j];
            found[1][j] += v >= inf;
            found[2][j] += v == 0;
            found[3][j] += v <= flushed;  /* plant: look_flushed */
            found[4][j] += v < least;
            found[5][j] += v < subnormal;
        }
    }
    for (j = 0; j < MIXPI_LOOK_LANES; j++) {
        if (found[0][j] > p->top) p->top = found[0][j];
        p->nonfinite += found[1][j];
        p->zeros += found[2][j];
        p->flushed += found[3][j];
        p->least += found[4][j];
        p->subnormal += found[5][j];
    }
    p->nonfinite -= (MIXPI_LOOK_LANES - n % MIXPI_LOOK_LANES) % MIXPI_LOOK_LANES;
}

MIXPI_K void MIXPI_P(look_piece)(void *arg, int64_t index, int worker) {
    const mixpi_look_job *job = (const mixpi_look_job *)arg;
    const mixp_look_args *k = job->k;
    mixpi_look_piece *p = &job->pieces[index];
    int64_t i = index * MIXPI_CHUNK, end = mixpi_min(i + MIXPI_CHUNK, k->n);
    float buf[MIXPI_BLOCK];
    (void)worker;
    memset(p, 0, sizeof *p);
    for (; i < end; i += MIXPI_BLOCK) {
        int n = (int)mixpi_min(MIXPI_BLOCK, end - i), j;
        const float *x = MIXPI_P(read)(k->x, i, n, buf);
        MIXPI_P(look_block)(p, x, n, &job->at);
        for (j = 0; k->exponents && j < n; j++)
            p->exponents[(mixp_bits_of_f32(x[j]) >> 23) & 255u]++;
    }
}

MIXPI_K mixp_result MIXPI_P(look_at)(const mixp_exec *x, const mixp_look_args *k) {
    int64_t i, n = mixpi_ceil_div(k->n, MIXPI_CHUNK);
    mixpi_look_job job;
    job.k = k;
    job.at = mixpi_look_limits_of(k->low);
    job.pieces = (mixpi_look_piece *)mixpi_scratch(x, (size_t)n * sizeof *job.pieces);
    if (!job.pieces) return MIXP_ERR_MEMORY;
    mixpi_parallel(x, n, MIXPI_P(look_piece), &job);
    for (i = 0; i < n; i++) {
        int64_t count = mixpi_min(MIXPI_CHUNK, k->n - i * MIXPI_CHUNK);
        int e;
        mixpi_look_join(k->row, &job.pieces[i], count);
        if (k->total) mixpi_look_join(k->total, &job.pieces[i], count);
        for (e = 0; k->exponents && e < MIXPI_EXPONENTS; e++)
            k->exponents[e] += job.pieces[i].exponents[e];
    }
    return MIXP_OK;
}

/* --- the table -------------------------------------------------------------------------- */

#define MIXPI_TABLE(attention, attention_backward, gemm) {                                \
    MIXPI_P(convert), MIXPI_P(fill), MIXPI_P(copy), MIXPI_P(unary), MIXPI_P(unary_backward),\
    MIXPI_P(binary), MIXPI_P(binary_backward), MIXPI_P(reduce), MIXPI_P(reduce_backward), \
    MIXPI_P(softmax), MIXPI_P(softmax_backward), MIXPI_P(norm), MIXPI_P(norm_backward),   \
    MIXPI_P(embedding), MIXPI_P(embedding_backward), attention,                           \
    attention_backward, MIXPI_P(cross_entropy), MIXPI_P(cross_entropy_backward),          \
    MIXPI_P(loss), MIXPI_P(loss_backward), MIXPI_P(dropout), gemm, MIXPI_P(scale_by),     \
    MIXPI_P(grad_stats), MIXPI_P(clip), MIXPI_P(prepare), MIXPI_P(update),                \
    MIXPI_P(advance), MIXPI_P(look_at),                                                   \
    MIXPI_P(where), MIXPI_P(where_backward), MIXPI_P(max), MIXPI_P(max_backward),         \
    MIXPI_P(gather), MIXPI_P(gather_backward), MIXPI_P(rope)                              \
}
static const mixp_kernels MIXPI_P(kernels) =
    MIXPI_TABLE(MIXPI_P(attention), MIXPI_P(attention_backward), MIXPI_P(gemm));
#if MIXPI_PASS == 2 && MIXPI_BF16
static const mixp_kernels MIXPI_P(kernels_bf16) =
    MIXPI_TABLE(MIXPI_P(attention_bf16), MIXPI_P(attention_backward_bf16), MIXPI_P(gemm_bf16));
#endif
#undef MIXPI_TABLE

#if MIXPI_PASS == 2 && defined(__GNUC__) && !defined(__clang__)
#  pragma GCC diagnostic pop
#endif
#undef MIXPI_SUFFIX
#undef MIXPI_TARGET
#undef MIXPI_K
#undef MIXPI_V
#undef MIXPI_PREFETCH
#endif  /* MIXPI_PASS */

#if defined(MIXPI_IMPLEMENT) && !defined(MIXPI_PASS)

#define MIXPI_PASS 0
#include MIXPREC_SELF
#undef MIXPI_PASS
#if MIXPI_X86
#  define MIXPI_PASS 1
#  include MIXPREC_SELF
#  undef MIXPI_PASS
#  define MIXPI_PASS 2
#  include MIXPREC_SELF
#  undef MIXPI_PASS
#endif
#if MIXPI_ARM
#  define MIXPI_PASS 3
#  include MIXPREC_SELF
#  undef MIXPI_PASS
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Its memory is the host's: no function but the kernels. */
#define MIXPI_CPU(isa, kernels, name)                                                     \
    static const mixp_device isa =                                                        \
        { name, &kernels, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,   \
          NULL, NULL, NULL, NULL, NULL }

#if MIXPI_X86
/* The compiler's cached answers: a CPUID of our own would trap under a hypervisor. */
static int mixpi_has_avx2(void)
{ return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
static int mixpi_has_avx512(void) {
    return mixpi_has_avx2() && __builtin_cpu_supports("avx512f") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl");
}
/* With its known answer, which takes some 20 ns: asked each time, for nothing is kept. */
static int mixpi_has_avx512_bf16(void) {
#  if MIXPI_BF16
    return mixpi_has_avx512() && __builtin_cpu_supports("avx512bf16") &&
           mixpi_pairs_answer(mixpi_pairs1_avx512);
#  else
    return 0;
#  endif
}
#endif

MIXPREC_API const mixp_device *mixp_cpu_with(mixp_isa isa) {
    MIXPI_CPU(scalar, mixpi_kernels_scalar, "cpu scalar");
#if MIXPI_X86
    MIXPI_CPU(avx2, mixpi_kernels_avx2, "cpu avx2");
    MIXPI_CPU(avx512, mixpi_kernels_avx512, "cpu avx512");
    if (isa == MIXP_ISA_AVX2) return mixpi_has_avx2() ? &avx2 : NULL;
    if (isa == MIXP_ISA_AVX512) return mixpi_has_avx512() ? &avx512 : NULL;
#  if MIXPI_BF16
    MIXPI_CPU(avx512_bf16, mixpi_kernels_bf16_avx512, "cpu avx512 bf16");
    if (isa == MIXP_ISA_AVX512_BF16) return mixpi_has_avx512_bf16() ? &avx512_bf16 : NULL;
#  endif
#endif
#if MIXPI_ARM
    MIXPI_CPU(neon, mixpi_kernels_neon, "cpu neon");
    if (isa == MIXP_ISA_NEON) return &neon;
#endif
    return isa == MIXP_ISA_SCALAR ? &scalar : NULL;
}

#undef MIXPI_CPU

/* Where is it the best, and not only there? vdpbf16ps has twice the rate of f32's multiply-add
 * on AMD's processors that have it, Zen 4 and later, and half of it on Intel's. */
static int mixpi_isa_pays(mixp_isa isa) {
#if MIXPI_X86
    if (isa == MIXP_ISA_AVX512_BF16) return __builtin_cpu_is("amd");
#endif
    (void)isa;
    return 1;
}

MIXPREC_API const mixp_device *mixp_cpu(void) {
    const mixp_device *d = NULL;
    int isa;
    for (isa = MIXP_ISA_COUNT - 1; !d; isa--)
        if (mixpi_isa_pays((mixp_isa)isa)) d = mixp_cpu_with((mixp_isa)isa);
    return d;
}

/* --- arrays ---------------------------------------------------------------------------- */

/* May `from` go to `to` where they overlap? Only in place, and when it does not get wider. */
static int mixpi_convert_overlaps(const void *to, size_t to_bytes, const void *from,
                                  size_t from_bytes) {
    uintptr_t d = (uintptr_t)to, s = (uintptr_t)from;
    if (d == s) return to_bytes > from_bytes;
    return d < s ? s - d < to_bytes : d - s < from_bytes;
}

MIXPREC_API mixp_result mixp_convert_with(const mixp_device *cpu, void *dst,
                                          mixp_dtype to, const void *src, mixp_dtype from,
                                          int64_t n, const mixp_rounding *rounding) {
    size_t out = mixp_dtype_size(to), in = mixp_dtype_size(from);
    mixp_convert_args k;
    mixp_exec x;
    if (!out || !in) return MIXP_ERR_DTYPE;
    if (n == 0) return MIXP_OK;
    if (n < 0 || !dst || !src || (uint64_t)n > (size_t)-1 / 8 / 2)
        return MIXP_ERR_ARGUMENT;
    if (mixpi_convert_overlaps(dst, (size_t)n * out, src, (size_t)n * in))
        return MIXP_ERR_ARGUMENT;
    memset(&x, 0, sizeof x);
    x.threads = 1;
    memset(&k, 0, sizeof k);
    k.n = n;
    k.src = mixpi_in(src, from);
    k.dst = mixpi_out_to(dst, to, 0);
    if (rounding) k.rounding = *rounding;
    if (!cpu) cpu = mixp_cpu();
    return cpu->kernels->convert(&x, &k);
}

MIXPREC_API mixp_result mixp_convert_rounded(void *dst, mixp_dtype to, const void *src,
        mixp_dtype from, int64_t n, const mixp_rounding *rounding)
{ return mixp_convert_with(NULL, dst, to, src, from, n, rounding); }

MIXPREC_API mixp_result mixp_convert(void *dst, mixp_dtype to, const void *src,
                                     mixp_dtype from, int64_t n) {
    return mixp_convert_with(NULL, dst, to, src, from, n, NULL);
}

/* --- the environment -------------------------------------------------------------------- */

/* Values at the edges of formats and their codes, from the formats' definitions by exact
 * fractions: ones, zeros, the largest numbers, ties, subnormals, what overflows. */
typedef struct mixpi_known_code {
    uint32_t f32;
    uint16_t f16, bf16;
    uint8_t  e4m3, e5m2;
} mixpi_known_code;

static const mixpi_known_code mixpi_known_codes[] = {
    { 0x3F800000, 0x3C00, 0x3F80, 0x38, 0x3C },
    { 0x80000000, 0x8000, 0x8000, 0x80, 0x80 },
    { 0x477FE000, 0x7BFF, 0x4780, 0x7F, 0x7C },
    { 0x477FEFFF, 0x7BFF, 0x4780, 0x7F, 0x7C },
    { 0x477FF000, 0x7C00, 0x4780, 0x7F, 0x7C },
    { 0x33800000, 0x0001, 0x3380, 0x00, 0x00 },
    { 0x33000000, 0x0000, 0x3300, 0x00, 0x00 },
    { 0x33000001, 0x0001, 0x3300, 0x00, 0x00 },
    { 0xBEAAAAAB, 0xB555, 0xBEAB, 0xAB, 0xB5 },
    { 0x43E00000, 0x5F00, 0x43E0, 0x7E, 0x5F },
    { 0x43E80000, 0x5F40, 0x43E8, 0x7E, 0x5F },
    { 0x43E80001, 0x5F40, 0x43E8, 0x7F, 0x5F },
    { 0xC7600000, 0xFB00, 0xC760, 0xFF, 0xFB },
    { 0x47700000, 0x7B80, 0x4770, 0x7F, 0x7C },
    { 0x7F7F8000, 0x7C00, 0x7F80, 0x7F, 0x7C },
    { 0x7F7FFFFF, 0x7C00, 0x7F80, 0x7F, 0x7C },
    { 0x00400000, 0x0000, 0x0040, 0x00, 0x00 },
    { 0x80000001, 0x8000, 0x8000, 0x80, 0x80 },
    { 0x3A800000, 0x1400, 0x3A80, 0x00, 0x14 },
    { 0xFF800000, 0xFC00, 0xFF80, 0xFF, 0xFC }
};
enum { MIXPI_KNOWN_CODES = sizeof mixpi_known_codes / sizeof mixpi_known_codes[0] };

static uint32_t mixpi_known_code_as(const mixpi_known_code *k, mixp_dtype to) {
    switch (to) {
    case MIXP_F16:     return k->f16;
    case MIXP_BF16:    return k->bf16;
    case MIXP_F8_E4M3: return k->e4m3;
    case MIXP_F8_E5M2: return k->e5m2;
    default:           return k->f32;
    }
}

/* All of them, in one array: whole vectors and what is left over. */
static int mixpi_check_array(const mixp_device *cpu, mixp_dtype to) {
    uint32_t from[MIXPI_KNOWN_CODES];
    unsigned char codes[MIXPI_KNOWN_CODES * 2];
    size_t size = mixp_dtype_size(to);
    int i;
    for (i = 0; i < MIXPI_KNOWN_CODES; i++) from[i] = mixpi_known_codes[i].f32;
    if (mixp_convert_with(cpu, codes, to, from, MIXP_F32, MIXPI_KNOWN_CODES, NULL) !=
        MIXP_OK)
        return 0;
    for (i = 0; i < MIXPI_KNOWN_CODES; i++)
        if (mixpi_load_code(codes + (size_t)i * size, size) !=
            mixpi_known_code_as(&mixpi_known_codes[i], to)) return 0;
    return 1;
}

static int mixpi_check_conversions(const mixp_device *cpu) {
    return mixpi_check_array(cpu, MIXP_F16) && mixpi_check_array(cpu, MIXP_BF16) &&
           mixpi_check_array(cpu, MIXP_F8_E4M3) && mixpi_check_array(cpu, MIXP_F8_E5M2);
}

/* Two clean steps, an overflow, three clean steps, of a scale that doubles after three. */
static int mixpi_check_scaler(void) {
    static const int found_inf[] = { 0, 0, 1, 0, 0, 0 };
    static const float scales[] = { 1024.0f, 1024.0f, 512.0f, 512.0f, 512.0f, 1024.0f };
    mixp_scaler_state s;
    mixp_scaler_rule rule;
    int i;
    memset(&s, 0, sizeof s);
    memset(&rule, 0, sizeof rule);
    s.scale = 1024.0f;
    s.hysteresis_left = rule.hysteresis = 1;
    rule.growth_factor = 2.0;
    rule.backoff_factor = 0.5;
    rule.growth_interval = rule.recovery_interval = 3;
    rule.min_scale = 1.0f;
    rule.max_scale = 65536.0f;
    for (i = 0; i < 6; i++) {
        mixp_scaler_advance(&s, &rule, found_inf[i]);
        if (mixp_bits_of_f32(s.scale) != mixp_bits_of_f32(scales[i])) return 0;
    }
    return 1;
}

/* To within what a few roundings of f32 may add; a NaN fails. */
static int mixpi_check_near(float got, double want) {
    double off = fabs((double)got - want);
    return mixp_bits_of_f64(off) <= mixp_bits_of_f64(4e-7 * fabs(want));
}

/* The third step of Adam with its defaults, which a plan of zeros means, of a gradient scaled by
 * 1024. The results are those of its definition in double precision. */
static int mixpi_check_update(void) {
    float p = 0.5f, m = 0.125f, v = 0.01f;
    mixp_step_plan plan;
    mixp_step_state state;
    mixp_step_scalars u;
    memset(&plan, 0, sizeof plan);
    memset(&state, 0, sizeof state);
    plan.groups[0].lr = 1e-3;
    plan.groups[0].beta1 = 0.9;
    plan.groups[0].beta2 = 0.999;
    plan.groups[0].eps = 1e-8;
    state.applied = 3;
    state.factor = 1.0 / 1024.0;
    mixp_step_scalars_of(&plan, &state, 0, 3, &u);
    mixp_adam_element(&u, -256.0f, &p, &m, &v);
    return mixpi_check_near(m, 0.08750000000000001) && mixpi_check_near(v, 0.0100525) &&
           mixpi_check_near(p, 0.4998237029022782);
}

/* x + y and x * y, as the machine computes them now. */
static uint32_t mixpi_check_sum(float x, float y) {
    volatile float a = x, b = y, sum = a + b;
    return mixp_bits_of_f32(sum);
}
static uint32_t mixpi_check_product(float x, float y) {
    volatile float a = x, b = y, product = a * b;
    return mixp_bits_of_f32(product);
}

/* (2^24 + 1) - 2^24 is 0 in f32: 1 in a wider type, or where the compiler cancels. */
static int mixpi_check_float(void) {
    volatile float big = 16777216.0f, one = 1.0f;
    float a = big, b = one;
    volatile float left = (a + b) - a;
    return mixp_bits_of_f32(left) == 0;
}

static int mixpi_check_nearest(void) {
    const float least = 1.4901161193847656e-08f;        /* 2^-26 */
    return mixpi_check_sum(1.0f, least) == 0x3F800000u &&
           mixpi_check_sum(-1.0f, -least) == 0xBF800000u &&
           mixpi_check_sum(1.0f, -least) == 0x3F800000u;
}

/* Half of the smallest normal number, and twice that half. */
static int mixpi_check_subnormals(void) {
    return mixpi_check_product(mixp_f32_of_bits(0x00800000u), 0.5f) == 0x00400000u &&
           mixpi_check_product(mixp_f32_of_bits(0x00400000u), 2.0f) == 0x00800000u;
}

/* What the environment and the compiler's flags break; NULL: nothing. */
static const char *mixpi_check_environment(void) {
#if defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__)
    return "compiled with fast-math: operators may lose Inf and NaN, and bits differ from other "
           "builds; conversions and the search for Inf and NaN hold; compile without -ffast-math";
#else
    if (!mixpi_check_nearest())
        return "the rounding mode is not to nearest: all but conversions is rounded otherwise; "
               "call fesetround(FE_TONEAREST) in this thread";
    if (!mixpi_check_subnormals())
        return "subnormal numbers are flushed to 0 (FTZ or DAZ): small gradients and moments are "
               "lost; clear both in this thread, and link without -ffast-math";
    if (!mixpi_check_float())
        return "floats are computed in a wider type or regrouped: bits differ from other builds; "
               "compile with -msse2 -mfpmath=sse and without -ffast-math";
    return NULL;
#endif
}

static mixp_result mixpi_check_failed(char *message, size_t size, const char *why,
                                      const char *where) {
    if (message && size) snprintf(message, size, "%s%s", why, where);
    return MIXP_ERR_DEVICE;
}

MIXPREC_API mixp_result mixp_self_check(char *message, size_t size) {
    const char *why = mixpi_check_environment();
    int isa;
    if (message && size) message[0] = '\0';
    if (why) return mixpi_check_failed(message, size, why, "");
    for (isa = 0; isa < MIXP_ISA_COUNT; isa++) {
        const mixp_device *cpu = mixp_cpu_with((mixp_isa)isa);
        if (cpu && !mixpi_check_conversions(cpu))
            return mixpi_check_failed(message, size,
                                      "wrong conversions: do not trust this build "
                                      "or machine; another compiler may help; device ",
                                      cpu->name);
    }
    if (!mixpi_check_scaler())
        return mixpi_check_failed(message, size, "a loss scale goes wrong: ",
                                  "do not trust this "
                                  "build or machine; another compiler may help");
    if (!mixpi_check_update())
        return mixpi_check_failed(message, size, "an update of Adam goes wrong: ",
                                  "do not trust "
                                  "this build or machine; another compiler may help");
    return MIXP_OK;
}

/* ==== 5. TENSORS (implementation) ===================================================== */

/* One piece of memory from the allocator, in a list that the context frees. */
typedef struct mixpi_piece {
    struct mixpi_piece *next;
    void   *data;               /* device or host memory, 64-byte aligned                  */
    size_t  size;
    int     from_device;        /* 0: the record and the memory are one                    */
} mixpi_piece;

/* Memory that is handed out upwards and taken back all at once. The pieces stay, so that a
 * loop which repeats itself allocates nothing after its first round. */
typedef struct mixpi_arena {
    mixpi_piece *first, *current;
    size_t       offset, used;  /* bytes: of current; handed out since the last reset      */
    int          on_device;
    struct mixpi_free *free;    /* buffers given back within the step                      */
} mixpi_arena;

typedef struct mixpi_free {
    struct mixpi_free *next;
    void *data;
    size_t size;
} mixpi_free;
typedef struct mixpi_tape_entry mixpi_tape_entry;
typedef struct mixpi_casting mixpi_casting;
typedef mixp_tensor *(*mixpi_tensor_fn)(mixp_context *ctx, void *user);

/* What the looks of a sampled step find: device memory. Rows of sites come behind these two. */
enum {
    MIXPI_ROW_BACKWARD,         /* all gradients met so far, of activations and of leaves */
    MIXPI_ROW_FORWARD,          /* all that sites stored */
    MIXPI_ROW_SITES
};

/* What a context knows of its sites, from mixp_guard_start on. */
typedef struct mixpi_watch {
    int         on;             /* 0: stopped */
    int         sampled;        /* 1: this step is a sampled one */
    mixp_look  *rows;           /* device memory */
} mixpi_watch;

struct mixp_context {
    const mixp_device *device;
    mixp_exec          exec;
    mixp_result  error;
    char         message[512];
    void       (*on_error)(mixp_result code, const char *message, void *user);
    uint64_t     seed, step, generation;
    uint64_t     capture_step;  /* the step count when a capture began                     */
    int64_t      tensors_made;  /* ids of permanent tensors                                */
    int64_t      calls_made;    /* operators applied in this step: keys of their dropout   */
    int64_t      allocations;
    size_t       permanent, peak;
    mixpi_piece *pieces;        /* permanent memory                                        */
    mixpi_piece *scratch;       /* what exec.scratch hands out                             */
    mixpi_arena  host, dev;
    mixp_tensor *tensors;       /* permanent tensors, newest first                         */
    mixpi_casting *casting;     /* the state of AUTOCAST, made at its first use             */
    mixpi_watch   *watch;       /* NULL: no guard was ever started */
    /* tape */
    mixpi_tape_entry *tape;     /* newest first                                            */
    mixp_graph    *graphs;
    uint64_t       replays;     /* of steps that move a loss scale: the device did so alone */
    int            scale_moved; /* since the newest mixp_capture_begin                      */
};

/* --- errors ---------------------------------------------------------------------------- */

MIXPREC_API mixp_result mixp_context_fail(mixp_context *ctx, mixp_result code,
                                          const char *format, ...) {
    va_list args;
    if (!ctx || ctx->error != MIXP_OK) return code;  /* plant: first_error */
    ctx->error = code;
    va_start(args, format);
    vsnprintf(ctx->message, sizeof ctx->message, format, args);
    va_end(args);
    if (ctx->on_error) ctx->on_error(code, ctx->message, ctx->exec.host.user);
    return code;
}

MIXPREC_API mixp_result mixp_context_error(const mixp_context *ctx,
                                           const char **message) {
    if (message) *message = ctx ? ctx->message : "the context is NULL";
    return ctx ? ctx->error : MIXP_ERR_ARGUMENT;
}

MIXPREC_API void mixp_context_clear_error(mixp_context *ctx) {
    if (!ctx) return;
    ctx->error = MIXP_OK;
    ctx->message[0] = '\0';
}

/* --- memory ---------------------------------------------------------------------------- */

static void *mixpi_default_allocate(size_t bytes, void *user) {
    (void)user;
    return malloc(bytes);
}

static void mixpi_default_release(void *p, void *user) {
    (void)user;
    free(p);
}

static void *mixpi_host_take(mixp_context *ctx, size_t bytes) {
    return ctx->exec.host.allocate(bytes, ctx->exec.host.user);
}

static void mixpi_host_put(mixp_context *ctx, void *p) {
    ctx->exec.host.release(p, ctx->exec.host.user);
}

/* Why a call of the device failed, as well as it can say. */
static const char *mixpi_why(const mixp_context *ctx, mixp_result r) {
    const char *why = ctx->device->message ? ctx->device->message(&ctx->exec) : "";
    return *why ? why : mixp_result_text(r);
}

static mixp_result mixpi_out_of_memory(mixp_context *ctx, size_t bytes) {
    return mixp_context_fail(ctx, MIXP_ERR_MEMORY,
                             "out of memory: %.0f bytes could not be had (%.0f in "
                             "use); use a smaller batch or model",
                             (double)bytes, (double)ctx->permanent);
}

/* The first address behind a piece's record that is a multiple of 64. */
static void *mixpi_piece_inside(mixpi_piece *p) {
    return (void *)(((uintptr_t)(p + 1) + 63u) & ~(uintptr_t)63u);
}

/* A piece of memory, or NULL with the error set. Its record comes from the host. */
static mixpi_piece *mixpi_piece_new(mixp_context *ctx, size_t bytes, int on_device) {
    int from_device = on_device && ctx->device->allocate;
    size_t extra = sizeof(mixpi_piece) + 64;
    mixpi_piece *p = NULL;
    if (bytes <= (size_t)-1 - extra)
        p = (mixpi_piece *)mixpi_host_take(ctx, from_device ? sizeof *p : bytes + extra);
    if (!p) {
        mixpi_out_of_memory(ctx, bytes);
        return NULL;
    }
    p->next = NULL;
    p->size = bytes;
    p->from_device = from_device;
    p->data =
        from_device ? ctx->device->allocate(&ctx->exec, bytes) : mixpi_piece_inside(p);
    if (!p->data) {
        mixp_context_fail(ctx, MIXP_ERR_MEMORY,
                          "%.0f bytes of device memory could not be had (%.0f in "
                          "use): %s",
                          (double)bytes, (double)ctx->permanent,
                          mixpi_why(ctx, MIXP_ERR_MEMORY));
        mixpi_host_put(ctx, p);
        return NULL;
    }
    ctx->allocations++;
    return p;
}

static void mixpi_piece_free(mixp_context *ctx, mixpi_piece *p) {
    mixpi_piece *next;
    for (; p; p = next) {
        next = p->next;
        if (p->from_device && ctx->device->release)
            ctx->device->release(&ctx->exec, p->data);
        mixpi_host_put(ctx, p);
    }
}

static void mixpi_note_peak(mixp_context *ctx) {
    size_t used = ctx->permanent + ctx->dev.used;
    if (used > ctx->peak) ctx->peak = used;
}

/* n elements of dst become value; of src, dst. */
static mixp_result mixpi_fill_with(mixp_context *ctx, mixp_out dst, int64_t n,
                                   double value) {
    mixp_fill_args k;
    memset(&k, 0, sizeof k);
    k.n = n;
    k.value = value;
    k.dst = dst;
    return ctx->device->kernels->fill(&ctx->exec, &k);
}
static mixp_result mixpi_convert_to(mixp_context *ctx, mixp_out dst, mixp_in src,
                                    int64_t n) {
    mixp_convert_args k;
    memset(&k, 0, sizeof k);
    k.n = n;
    k.src = src;
    k.dst = dst;
    return ctx->device->kernels->convert(&ctx->exec, &k);
}

static mixp_result mixpi_device_zero(mixp_context *ctx, void *data, size_t bytes)
{ return mixpi_fill_with(ctx, mixpi_out_to(data, MIXP_U8, 0), (int64_t)bytes, 0.0); }

/* Zeroed memory that lives as long as the context; NULL with the error set. */
static void *mixpi_permanent(mixp_context *ctx, size_t bytes, int on_device) {
    mixpi_piece *p = mixpi_piece_new(ctx, bytes, on_device);
    if (!p) return NULL;
    p->next = ctx->pieces;
    ctx->pieces = p;
    if (!on_device) return memset(p->data, 0, bytes);
    ctx->permanent += bytes;
    mixpi_note_peak(ctx);
    return mixpi_device_zero(ctx, p->data, bytes) == MIXP_OK ? p->data : NULL;
}

static void *mixpi_device_alloc(mixp_context *ctx, size_t n) {
    return mixpi_permanent(ctx, n, 1);
}
static void *mixpi_host_alloc(mixp_context *ctx, size_t n) {
    return mixpi_permanent(ctx, n, 0);
}
/* plant: round_up */
static size_t mixpi_round_up(size_t bytes) { return (bytes + 63u) & ~(size_t)63u; }

/* Makes room for `bytes` in the arena's current piece: the next one that is large enough, or
 * a new one, at least as large as all before it. */
static mixp_result mixpi_arena_grow(mixp_context *ctx, mixpi_arena *a, size_t bytes) {
    size_t total = (size_t)1 << 16, most = (size_t)1 << 28;
    mixpi_piece **at = a->current ? &a->current->next : &a->first, *p;
    while (*at && (*at)->size < bytes) at = &(*at)->next;
    if (!*at) {
        for (p = a->first; p; p = p->next) total += p->size;
        if (total > most) total = most;
        *at = mixpi_piece_new(ctx, bytes > total ? bytes : total, a->on_device);
        if (!*at) return MIXP_ERR_MEMORY;
    }
    a->current = *at;
    a->offset = 0;
    return MIXP_OK;
}

/* A buffer of just that size that was given back, taken off the list; NULL: there is none. */
static void *mixpi_arena_again(mixpi_arena *a, size_t bytes) {
    mixpi_free **at = &a->free;
    void *data = NULL;
    while (*at && (*at)->size != bytes) at = &(*at)->next;
    if (*at) {
        data = (*at)->data;
        *at = (*at)->next;  /* plant: arena_again */
    }
    return data;
}

/* Memory until the next reset; NULL with the error set. Not cleared. */
static void *mixpi_arena_take(mixp_context *ctx, mixpi_arena *a, size_t bytes) {
    void *p;
    if (bytes > (size_t)-1 - 64) {
        mixpi_out_of_memory(ctx, bytes);
        return NULL;
    }
    bytes = mixpi_round_up(bytes ? bytes : 1);
    p = mixpi_arena_again(a, bytes);
    if (p) {
        a->used += bytes;
        return p;
    }
    if (!a->current || a->current->size - a->offset < bytes)
        if (mixpi_arena_grow(ctx, a, bytes) != MIXP_OK) return NULL;
    p = (char *)a->current->data + a->offset;
    MIXPI_ASSERT((uintptr_t)p % 64 == 0 || ctx->device->allocate);
    a->offset += bytes;
    MIXPI_ASSERT(a->offset <= a->current->size);
    a->used += bytes;
    mixpi_note_peak(ctx);
    return p;
}

/* Host memory until the next step, zeroed. */
static void *mixpi_step_alloc(mixp_context *ctx, size_t bytes) {
    void *p = mixpi_arena_take(ctx, &ctx->host, bytes);
    if (p) memset(p, 0, bytes);
    return p;
}

/* Gives a buffer back within the step, for the next request of the same size. */
static void mixpi_arena_give(mixp_context *ctx, mixpi_arena *a, void *data,
                             size_t bytes) {
    mixpi_free *f = (mixpi_free *)mixpi_step_alloc(ctx, sizeof *f);
    if (!f) return;             /* only reuse is lost */
    f->data = data;
    f->size = mixpi_round_up(bytes ? bytes : 1);
    f->next = a->free;
    a->free = f;
    MIXPI_ASSERT(a->used >= f->size);
    a->used -= f->size;
}

static void mixpi_arena_reset(mixpi_arena *a) {
    a->current = a->first;
    a->offset = 0;
    a->used = 0;
    a->free = NULL;
}

static void *mixpi_context_scratch(void *user, size_t bytes) {
    mixp_context *ctx = (mixp_context *)user;
    mixpi_piece *p = ctx->scratch;
    if (p && p->size >= bytes) return p->data;
    p = mixpi_piece_new(ctx, bytes + bytes / 4, 1);
    if (!p) return NULL;
    p->next = ctx->scratch;     /* the old one may still be in use by a queued kernel */
    ctx->scratch = p;
    return p->data;
}

#ifdef _OPENMP
#  include <omp.h>
static void mixpi_context_parallel(void *user, int64_t tasks, mixp_task task, void *arg) {
    int threads = ((mixp_context *)user)->exec.threads;
    int64_t i;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (i = 0; i < tasks; i++) task(arg, i, omp_get_thread_num());
}
#endif

/* A failure of the device, whatever call it came up in, must not pass unseen. */
static mixp_result mixpi_noted(mixp_context *ctx, const char *who, mixp_result r) {
    return r == MIXP_OK ? r : mixp_context_fail(ctx, r, "%s: %s", who, mixpi_why(ctx, r));
}

/* A copy between host and device memory, as a device's upload and download make it. */
typedef mixp_result (*mixpi_transfer)(const mixp_exec *x, void *to, const void *from,
                                      size_t bytes);

/* Copies by a function of the device; NULL: its memory is the host's. */
static mixp_result mixpi_copy_by(mixp_context *ctx, mixpi_transfer by, void *to,
                                 const void *from, size_t bytes) {
    if (by) return mixpi_noted(ctx, ctx->device->name, by(&ctx->exec, to, from, bytes));
    if (bytes) memcpy(to, from, bytes);
    return MIXP_OK;
}

static mixp_result mixpi_upload(mixp_context *ctx, void *device, const void *host,
                                size_t bytes) {
    return mixpi_copy_by(ctx, ctx->device->upload, device, host, bytes);
}

/* Of the program's own memory, which each replay of a captured step reads anew. */
static mixp_result mixpi_feed(mixp_context *ctx, void *device, const void *host,
                              size_t bytes) {
    const mixp_device *d = ctx->device;
    return mixpi_copy_by(ctx, d->feed ? d->feed : d->upload, device, host, bytes);
}

static mixp_result mixpi_download(mixp_context *ctx, void *host, const void *device,
                                  size_t bytes) {
    return mixpi_copy_by(ctx, ctx->device->download, host, device, bytes);
}

/* What a step's kernels wrote of late, without waiting. */
static mixp_result mixpi_peek(mixp_context *ctx, void *host, const void *device,
                              size_t bytes) {
    const mixp_device *d = ctx->device;
    return mixpi_copy_by(ctx, d->peek ? d->peek : d->download, host, device, bytes);
}

/* --- context --------------------------------------------------------------------------- */

/* What is wrong with a description; NULL: nothing. */
static const char *mixpi_desc_wrong(const mixp_context_desc *d) {
    const mixp_allocator *device = &d->device_allocator;
    if (!d->allocate != !d->release) return "allocate and release: give both or neither";
    if (!device->allocate != !device->release)
        return "device_allocator: give both of its functions or neither";
    if (d->threads < 0) return "threads is negative; 0 means as many as OpenMP gives";
    return NULL;
}

static void mixpi_exec_fill(mixp_context *ctx, const mixp_context_desc *d) {
    mixp_exec *x = &ctx->exec;
    x->host.allocate = d->allocate;
    x->host.release = d->release;
    x->host.user = d->user;
    x->device = d->device_allocator;
    x->stream = d->stream;
    x->user = ctx;
    x->scratch = mixpi_context_scratch;
    x->threads = 1;             /* without OpenMP nothing here could use more */
#ifdef _OPENMP
    x->threads = d->threads ? d->threads : omp_get_max_threads();
    if (x->threads > 1) x->parallel = mixpi_context_parallel;
#endif
}

/* NULL: *wrong says why. */
static mixp_context *mixpi_context_make(const mixp_context_desc *d, const char **wrong) {
    mixp_context *ctx = (mixp_context *)d->allocate(sizeof *ctx, d->user);
    mixp_result r;
    if (!ctx) {
        *wrong = "out of memory: the allocator gave none for the context itself";
        return NULL;
    }
    memset(ctx, 0, sizeof *ctx);
    ctx->device = d->device ? d->device : mixp_cpu();
    ctx->seed = d->seed;
    ctx->on_error = d->on_error;
    ctx->generation = 1;
    ctx->allocations = 1;
    ctx->dev.on_device = 1;
    mixpi_exec_fill(ctx, d);
    r = ctx->device->attach ? ctx->device->attach(&ctx->exec) : MIXP_OK;
    if (r == MIXP_OK) return ctx;
    mixpi_host_put(ctx, ctx);
    *wrong = r == MIXP_ERR_ARGUMENT ? "the stream is none of this device's"
           : r == MIXP_ERR_MEMORY ? "the device has too little memory left for a context"
           : "the device cannot be used; is another program holding it?";
    return NULL;
}

MIXPREC_API mixp_context *mixp_context_new(const mixp_context_desc *desc) {
    mixp_context_desc d;
    mixp_context *ctx = NULL;
    const char *wrong;
    memset(&d, 0, sizeof d);
    if (desc) d = *desc;
    wrong = mixpi_desc_wrong(&d);
    if (!d.allocate) {
        d.allocate = mixpi_default_allocate;
        d.release = mixpi_default_release;
    }
    if (!wrong) ctx = mixpi_context_make(&d, &wrong);
    if (d.why) *d.why = wrong ? wrong : "";
    return ctx;
}

struct mixp_graph {
    mixp_context *ctx;
    mixp_graph   *next;
    void         *handle;
    uint64_t      step;
    int           moves_scale;  /* 0: gradients of before and after a replay may be added   */
};

MIXPREC_API void mixp_context_free(mixp_context *ctx) {
    mixp_graph *g;
    if (!ctx) return;
    if (ctx->device->wait) ctx->device->wait(&ctx->exec);
    for (g = ctx->graphs; g; g = g->next) ctx->device->graph_free(&ctx->exec, g->handle);
    mixpi_piece_free(ctx, ctx->host.first);
    mixpi_piece_free(ctx, ctx->dev.first);
    mixpi_piece_free(ctx, ctx->scratch);
    mixpi_piece_free(ctx, ctx->pieces);
    if (ctx->device->detach) ctx->device->detach(&ctx->exec);
    mixpi_host_put(ctx, ctx);
}

MIXPREC_API mixp_result mixp_capture_begin(mixp_context *ctx) {
    if (!ctx) return MIXP_ERR_ARGUMENT;
    if (!ctx->device->capture_begin)
        return mixp_context_fail(ctx, MIXP_ERR_DEVICE,
                                 "mixp_capture_begin: %s has no graphs; run the step "
                                 "each time",
                                 ctx->device->name);
    ctx->capture_step = ctx->step;
    ctx->scale_moved = 0;
    return mixpi_noted(ctx, "mixp_capture_begin", ctx->device->capture_begin(&ctx->exec));
}

MIXPREC_API mixp_graph *mixp_capture_end(mixp_context *ctx) {
    void *handle = NULL;
    mixp_result r = MIXP_ERR_DEVICE;
    mixp_graph *g = ctx ? (mixp_graph *)mixpi_host_alloc(ctx, sizeof *g) : NULL;
    if (ctx && ctx->device->capture_end)
        r = ctx->device->capture_end(&ctx->exec, &handle);
    if (!g && handle) ctx->device->graph_free(&ctx->exec, handle);
    if (!g || mixpi_noted(ctx, "mixp_capture_end", r) != MIXP_OK) return NULL;
    g->ctx = ctx;
    g->next = ctx->graphs;
    g->handle = handle;
    g->step = ctx->step;
    g->moves_scale = ctx->scale_moved;
    ctx->step = ctx->capture_step;      /* recorded, not run: the replays count */
    ctx->graphs = g;
    ctx->replays += g->moves_scale != 0;
    return g;
}

MIXPREC_API mixp_result mixp_replay(mixp_graph *graph) {
    mixp_context *ctx = graph ? graph->ctx : NULL;
    if (!ctx) return MIXP_ERR_ARGUMENT;
    ctx->replays += graph->moves_scale != 0;
    return mixpi_noted(
        ctx, "mixp_replay",
        ctx->device->replay(&ctx->exec, graph->handle, ++ctx->step - graph->step));
}

MIXPREC_API mixp_memory mixp_context_memory(const mixp_context *ctx) {
    mixp_memory m = { 0, 0, 0 };
    if (!ctx) return m;
    m.used = ctx->permanent + ctx->dev.used;
    m.peak = ctx->peak;
    m.allocations = ctx->allocations;
    return m;
}

MIXPREC_API uint64_t mixp_context_steps(const mixp_context *ctx) {
    return ctx ? ctx->step : 0;
}

MIXPREC_API mixp_gemm_count mixp_context_gemm_count(const mixp_context *ctx) {
    mixp_gemm_count none = { 0, 0, 0 };
    return ctx && ctx->device->gemm_count ? ctx->device->gemm_count(&ctx->exec) : none;
}

MIXPREC_API const mixp_exec *mixp_context_exec(mixp_context *ctx) {
    return ctx ? &ctx->exec : NULL;
}
MIXPREC_API const mixp_device *mixp_context_device(const mixp_context *ctx) {
    return ctx ? ctx->device : NULL;
}

/* Is this step a sampled one? Set by mixp_step_begin; never without a guard. */
MIXPREC_HD int mixpi_context_sampled(const mixp_context *ctx)
{ return ctx->watch && ctx->watch->sampled; }

/* What all gradients of this sampled step have shown so far, activations' and parameters', as they
 * are: multiplied by the loss scale. Device memory, cleared when a sampled step begins; NULL: this
 * is none. A kernel of the scaler may read `largest` and `nonfinite` here. */
MIXPREC_HD const mixp_look *mixpi_context_gradients(const mixp_context *ctx)
{ return mixpi_context_sampled(ctx) ? &ctx->watch->rows[MIXPI_ROW_BACKWARD] : NULL; }

/* --- tensors --------------------------------------------------------------------------- */

/* A tensor as kernels see it; NULL: not there. */
static mixp_in mixpi_tensor_in(const mixp_tensor *t)
{ return t ? mixpi_in(t->data, t->dtype) : mixpi_in(NULL, MIXP_F32); }
static mixp_out mixpi_tensor_out(const mixp_tensor *t, int accumulate) {
    return t ? mixpi_out_to(t->data, t->dtype, accumulate)
             : mixpi_out_to(NULL, MIXP_F32, 0);
}

static size_t mixpi_bytes(const mixp_tensor *t) {
    return (size_t)t->count * mixp_dtype_size(t->dtype);
}

/* "[2, 3, 4]" for messages. */
static const char *mixpi_shape_text(int rank, const int64_t *shape, char *text,
                                    size_t room) {
    size_t at = 0;
    int i;
    for (i = 0; i < rank && at + 24 < room; i++)
        at += (size_t)snprintf(text + at, room - at, i ? ", %.0f" : "[%.0f",
                               (double)shape[i]);
    snprintf(text + at, room - at, "%s", rank ? "]" : "[]");
    return text;
}

/* Every dimension at least 1, the size in bytes within ptrdiff_t. */
static mixp_result mixpi_check_shape(mixp_context *ctx, const char *who, mixp_dtype dtype,
                                     int rank, const int64_t *shape) {
    int64_t n = 1, size = (int64_t)mixp_dtype_size(dtype);
    int i;
    if (!size)
        return mixp_context_fail(ctx, MIXP_ERR_DTYPE,
                                 "%s: %d is no dtype; see mixp_dtype", who, (int)dtype);
    if (rank < 0 || rank > MIXP_MAX_RANK || (rank > 0 && !shape))
        return mixp_context_fail(ctx, MIXP_ERR_SHAPE,
                                 "%s: rank %d with shape %s; the rank must be 0 to %d",
                                 who, rank, shape ? "given" : "NULL", MIXP_MAX_RANK);
    for (i = 0; i < rank; i++) {
        if (shape[i] < 1)  /* plant: shape_one */
            return mixp_context_fail(ctx, MIXP_ERR_SHAPE,
                                     "%s: dimension %d is %.0f; every dimension must "
                                     "be at least 1",
                                     who, i, (double)shape[i]);
        if (shape[i] > PTRDIFF_MAX / size / n)  /* plant: shape_limit */
            return mixp_context_fail(ctx, MIXP_ERR_SHAPE,
                                     "%s: dimension %d (%.0f) makes the tensor larger "
                                     "than memory can be",
                                     who, i, (double)shape[i]);
        n *= shape[i];
    }
    return MIXP_OK;
}

static void mixpi_set_shape(mixp_tensor *t, int rank, const int64_t *shape) {
    int i;
    t->rank = rank;
    t->count = 1;
    for (i = 0; i < MIXP_MAX_RANK; i++) {
        t->shape[i] = i < rank ? shape[i] : 1;
        t->count *= t->shape[i];
    }
    MIXPI_ASSERT(t->count >= 1);
}

/* A zeroed record, and device memory for its data: permanent or of this step. */
static mixp_tensor *mixpi_record(mixp_context *ctx, size_t n, int permanent) {
    return (mixp_tensor *)(permanent ? mixpi_host_alloc(ctx, n)
                                     : mixpi_step_alloc(ctx, n));
}

static void *mixpi_data_alloc(const mixp_tensor *t) {
    return t->own.generation ? mixpi_arena_take(t->ctx, &t->ctx->dev, mixpi_bytes(t))
                             : mixpi_device_alloc(t->ctx, mixpi_bytes(t));
}

/* A tensor without data that goes with t: of its name and shape, and as long-lived. */
static mixp_tensor *mixpi_twin(const mixp_tensor *t, mixp_dtype dtype) {
    mixp_tensor *twin = mixpi_record(t->ctx, sizeof *twin, !t->own.generation);
    if (!twin) return NULL;
    twin->ctx = t->ctx;
    twin->name = t->name;
    twin->dtype = dtype;
    twin->own.generation = t->own.generation;
    mixpi_set_shape(twin, t->rank, t->shape);
    return twin;
}

/* A permanent tensor (with a copy of its name) or one of this step. */
static mixp_tensor *mixpi_tensor_new(mixp_context *ctx, const char *name,
                                     mixp_dtype dtype, int rank, const int64_t *shape,
                                     int permanent, int with_data) {
    size_t length = name ? strlen(name) : 0;
    const char *who = length ? name : permanent && with_data ? "mixp_param" : "tensor";
    mixp_tensor *t;
    if (!ctx || mixpi_check_shape(ctx, who, dtype, rank, shape) != MIXP_OK) return NULL;
    t = mixpi_record(ctx, sizeof *t + (permanent ? length + 1 : 0), permanent);
    if (!t) return NULL;
    t->ctx = ctx;
    t->name = "";
    t->dtype = dtype;
    t->own.generation = permanent ? 0 : ctx->generation;
    mixpi_set_shape(t, rank, shape);
    /* Data first: a tensor without memory must never be in the context's list. */
    if (with_data) t->data = mixpi_data_alloc(t);
    if (with_data && !t->data) return NULL;
    if (!permanent) return t;
    if (length) {
        memcpy(t + 1, name, length + 1);
        t->name = (const char *)(t + 1);
    }
    MIXPI_ASSERT(t->data || !with_data);
    t->own.id = ++ctx->tensors_made;
    t->own.next = ctx->tensors;
    ctx->tensors = t;
    return t;
}

/* Is there a parameter of this name? One without a name is like no other. */
static int mixpi_param_exists(const mixp_context *ctx, const char *name) {
    const mixp_tensor *t = ctx && name && *name ? ctx->tensors : NULL;
    /* plant: name_used */
    while (t && !(t->own.is_param && strcmp(t->name, name) == 0)) t = t->own.next;
    return t != NULL;
}

MIXPREC_API mixp_tensor *mixp_param(mixp_context *ctx, const char *name, mixp_dtype dtype,
                                    int rank, const int64_t *shape) {
    mixp_tensor *t;
    if (!mixpi_real(dtype)) {
        mixp_context_fail(ctx, MIXP_ERR_DTYPE,
                          "mixp_param '%s': a parameter is f32, f16 or bf16, not %s",
                          name ? name : "", mixp_dtype_name(dtype));
        return NULL;
    }
    if (mixpi_param_exists(ctx, name)) {
        mixp_context_fail(ctx, MIXP_ERR_ARGUMENT,
                          "mixp_param '%s': there is one of this name; make "
                          "parameters once, before the loop, each with a name of its own",
                          name);
        return NULL;
    }
    t = mixpi_tensor_new(ctx, name, dtype, rank, shape, 1, 1);
    if (t) t->requires_grad = t->own.is_param = 1;
    return t;
}

static const char *mixpi_view_wrong(const mixp_context *ctx, mixp_dtype dtype,
                                    const void *data) {
    size_t size = mixp_dtype_size(dtype);
    if (!data) return "data is NULL; pass your memory";
    /* plant: view_aligned */
    if (size && (uintptr_t)data % size) return "data is not aligned to its elements";
    if (ctx && ctx->device->check && ctx->device->check(&ctx->exec, data, 1) != MIXP_OK)
        return "data is no memory of the device; allocate it there (cudaMalloc)";
    return NULL;
}

MIXPREC_API mixp_tensor *mixp_view(mixp_context *ctx, const char *name, mixp_dtype dtype,
                                   int rank, const int64_t *shape, void *data) {
    const char *wrong = mixpi_view_wrong(ctx, dtype, data);
    mixp_tensor *t = NULL;
    if (wrong)
        mixp_context_fail(ctx, MIXP_ERR_ARGUMENT, "mixp_view '%s': %s", name ? name : "",
                          wrong);
    else t = mixpi_tensor_new(ctx, name, dtype, rank, shape, 1, 0);
    if (t) t->data = data;
    return t;
}

MIXPREC_API mixp_tensor *mixp_activation(mixp_context *ctx, mixp_dtype dtype, int rank,
                                         const int64_t *shape) {
    return mixpi_tensor_new(ctx, "", dtype, rank, shape, 0, 1);
}

MIXPREC_API mixp_tensor *mixp_input(mixp_context *ctx, mixp_dtype dtype, int rank,
                                    const int64_t *shape, const void *host_data) {
    mixp_tensor *t;
    if (!host_data) {
        mixp_context_fail(ctx, MIXP_ERR_ARGUMENT,
                          "mixp_input: host_data is NULL; pass the batch to copy");
        return NULL;
    }
    t = mixp_activation(ctx, dtype, rank, shape);
    return t && mixpi_feed(ctx, t->data, host_data, mixpi_bytes(t)) == MIXP_OK ? t : NULL;
}

MIXPREC_API mixp_result mixp_tensor_set_requires_grad(mixp_tensor *t, int on) {
    if (!t) return MIXP_ERR_ARGUMENT;
    if (on && !mixpi_real(t->dtype))
        return mixp_context_fail(
            t->ctx, MIXP_ERR_DTYPE,
            "mixp_tensor_set_requires_grad '%s': gradients need f32, "
            "f16 or bf16, not %s",
            t->name, mixp_dtype_name(t->dtype));
    t->requires_grad = on != 0;
    return MIXP_OK;
}

MIXPREC_API void mixp_tensor_touch(mixp_tensor *t) { if (t) t->version++; }

static mixp_result mixpi_transfer_check(const mixp_tensor *t, const void *host,
                                        mixp_dtype dtype, int64_t count,
                                        const char *who) {
    char shape[224];
    if (!t) return MIXP_ERR_ARGUMENT;
    mixpi_shape_text(t->rank, t->shape, shape, sizeof shape);
    if (!host)
        return mixp_context_fail(t->ctx, MIXP_ERR_ARGUMENT,
                                 "%s '%s': the host memory is NULL", who, t->name);
    if (!mixp_dtype_size(dtype))
        return mixp_context_fail(t->ctx, MIXP_ERR_DTYPE,
                                 "%s '%s': %d is no dtype; see mixp_dtype", who, t->name,
                                 (int)dtype);
    if (count == t->count) return MIXP_OK;
    return mixp_context_fail(t->ctx, MIXP_ERR_SHAPE,
                             "%s '%s': count is %.0f, but the tensor %s has %.0f "
                             "elements; all of them are copied",
                             who, t->name, (double)count, shape, (double)t->count);
}

/* The device converts; one with memory of its own stages the converted copy in scratch memory. */
MIXPREC_API mixp_result mixp_read(const mixp_tensor *t, void *host, mixp_dtype dtype,
                                  int64_t count) {
    mixp_result r = mixpi_transfer_check(t, host, dtype, count, "mixp_read");
    size_t bytes = (size_t)count * mixp_dtype_size(dtype);
    void *stage;
    if (r != MIXP_OK) return r;
    if (dtype == t->dtype) return mixpi_download(t->ctx, host, t->data, bytes);
    stage = t->ctx->device->download ? mixpi_context_scratch(t->ctx, bytes) : host;
    if (!stage) return MIXP_ERR_MEMORY;
    r = mixpi_convert_to(t->ctx, mixpi_out_to(stage, dtype, 0), mixpi_tensor_in(t),
                         count);
    return r != MIXP_OK || stage == host ? r : mixpi_download(t->ctx, host, stage, bytes);
}

MIXPREC_API mixp_result mixp_write(mixp_tensor *t, const void *host, mixp_dtype dtype,
                                   int64_t count) {
    mixp_result r = mixpi_transfer_check(t, host, dtype, count, "mixp_write");
    size_t bytes = (size_t)count * mixp_dtype_size(dtype);
    mixp_in src = mixpi_in(host, dtype);
    if (r != MIXP_OK) return r;
    t->version++;
    if (dtype == t->dtype) return mixpi_feed(t->ctx, t->data, host, bytes);
    if (t->ctx->device->upload) {
        void *stage = mixpi_context_scratch(t->ctx, bytes);
        if (!stage) return MIXP_ERR_MEMORY;
        r = mixpi_feed(t->ctx, stage, host, bytes);
        if (r != MIXP_OK) return r;
        src.data = stage;
    }
    return mixpi_convert_to(t->ctx, mixpi_tensor_out(t, 0), src, count);
}

MIXPREC_API double mixp_item(const mixp_tensor *t) {
    double value = 0.0;
    if (t && t->count == 1 && mixp_read(t, &value, MIXP_F64, 1) == MIXP_OK) return value;
    return (double)mixp_f32_of_bits(0x7FC00000u);   /* fast-math would fold 0/0 */
}

MIXPREC_API mixp_result mixp_fill(mixp_tensor *t, double value) {
    if (!t) return MIXP_ERR_ARGUMENT;
    t->version++;
    return mixpi_fill_with(t->ctx, mixpi_tensor_out(t, 0), t->count, value);
}

/* Uniform in (0, 1): the middle of one of 2^32 cells, so that its log is finite. */
static double mixpi_uniform(const mixp_tensor *t, int64_t element) {
    uint32_t u = mixp_random_u32(t->ctx->seed, 0, (uint64_t)t->own.id, (uint64_t)element);
    return ((double)u + 0.5) * (1.0 / 4294967296.0);  /* plant: uniform */
}

/* Standard normal by Box and Muller, 1958; of two uniform numbers. */
static double mixpi_normal(const mixp_tensor *t, int64_t element) {
    const double two_pi = 6.283185307179586;
    double radius = sqrt(-2.0 * log(mixpi_uniform(t, 2 * element)));  /* plant: normal */
    return radius * cos(two_pi * mixpi_uniform(t, 2 * element + 1));
}

/* Writes a + b * (uniform or standard normal) to every element. */
static mixp_result mixpi_init(mixp_tensor *t, int normal, double a, double b) {
    double  value[256], narrow[256];    /* narrow: aligned room for any dtype */
    int64_t i, j, n;
    if (!t) return MIXP_ERR_ARGUMENT;
    t->version++;
    for (i = 0; i < t->count; i += n) {
        n = mixpi_min(256, t->count - i);
        for (j = 0; j < n; j++) {
            double x = normal ? mixpi_normal(t, i + j) : mixpi_uniform(t, 2 * (i + j));
            value[j] = a + b * x;
        }
        if (mixp_convert(narrow, t->dtype, value, MIXP_F64, n) != MIXP_OK)
            return MIXP_ERR_DTYPE;
        if (mixpi_upload(t->ctx, mixpi_out_at(mixpi_tensor_out(t, 0), i).data, narrow,
                         (size_t)n * mixp_dtype_size(t->dtype)) != MIXP_OK)
            return MIXP_ERR_DEVICE;
    }
    return MIXP_OK;
}

MIXPREC_API mixp_result mixp_init_normal(mixp_tensor *t, double mean, double std) {
    return mixpi_init(t, 1, mean, std);
}

MIXPREC_API mixp_result mixp_init_uniform(mixp_tensor *t, double low, double high) {
    return mixpi_init(t, 0, low, high - low);
}

/* Of this standard deviation times gain; fans: the sum of fan_in and fan_out counts, halved. */
static mixp_result mixpi_init_fan(mixp_tensor *t, int normal, int fans, double gain) {
    double in, out, std, bound;
    if (!t) return MIXP_ERR_ARGUMENT;
    if (t->rank < 2)
        return mixp_context_fail(t->ctx, MIXP_ERR_SHAPE,
                                 "mixp_init: '%.60s' has rank %d; fans need [out, in, ...]",
                                 t->name, t->rank);
    in = (double)(t->count / t->shape[0]);
    out = (double)(t->count / t->shape[1]);
    std = gain / sqrt(fans ? (in + out) / 2.0 : in);  /* plant: fan_in */
    bound = sqrt(3.0) * std;
    return normal ? mixp_init_normal(t, 0.0, std) : mixp_init_uniform(t, -bound, bound);
}

MIXPREC_API mixp_result mixp_init_xavier_normal(mixp_tensor *t, double gain)
{ return mixpi_init_fan(t, 1, 1, gain); }
MIXPREC_API mixp_result mixp_init_xavier_uniform(mixp_tensor *t, double gain)
{ return mixpi_init_fan(t, 0, 1, gain); }
MIXPREC_API mixp_result mixp_init_kaiming_normal(mixp_tensor *t, double gain)
{ return mixpi_init_fan(t, 1, 0, gain); }
MIXPREC_API mixp_result mixp_init_kaiming_uniform(mixp_tensor *t, double gain)
{ return mixpi_init_fan(t, 0, 0, gain); }

/* ==== 6. AUTOCAST (implementation) ==================================================== */

#define MIXPI_MAX_REGIONS   64
#define MIXPI_MAX_OVERRIDES 64

/* What ends a region: mixp_autocast_pop, the end of its block, or mixp_autocast_close. */
typedef enum mixpi_region_kind {
    MIXPI_REGION_PUSHED,
    MIXPI_REGION_IN_BLOCK,
    MIXPI_REGION_IN_SCOPE
} mixpi_region_kind;

typedef struct mixpi_region {
    mixp_autocast     cast;
    mixpi_region_kind kind;
    int               no_grad;  /* 1: operators in it are not recorded                     */
} mixpi_region;

typedef struct mixpi_override { const mixp_op *op; mixp_op_class cls; } mixpi_override;
typedef struct mixpi_tally { const mixp_op *op; int64_t calls[3]; } mixpi_tally;

struct mixpi_casting {
    mixpi_region    regions[MIXPI_MAX_REGIONS];
    mixpi_override  overrides[MIXPI_MAX_OVERRIDES];
    mixpi_tally     tallies[MIXPI_MAX_OVERRIDES * 2];
    int             n_regions;  /* those that were refused for want of room included       */
    int             n_overrides, n_tallies;
    int             block_level;
    mixp_cast_count casts;
};

/* The context's state of autocast. NULL: there is no memory for it, and the error is set. */
static mixpi_casting *mixpi_casting_of(mixp_context *ctx) {
    if (ctx->casting) return ctx->casting;
    ctx->casting = (mixpi_casting *)mixpi_host_alloc(ctx, sizeof *ctx->casting);
    if (ctx->casting) ctx->casting->block_level = 1;
    return ctx->casting;
}

/* --- regions --------------------------------------------------------------------------- */

/* The innermost region, NULL outside of all. */
static const mixpi_region *mixpi_region_now(const mixp_context *ctx) {
    const mixpi_casting *c = ctx ? ctx->casting : NULL;
    if (!c || !c->n_regions) return NULL;
    return &c->regions[mixpi_min(c->n_regions, MIXPI_MAX_REGIONS) - 1];
}

MIXPREC_API mixp_autocast mixp_autocast_current(const mixp_context *ctx) {
    const mixp_autocast off = { MIXP_F32, 0 };
    const mixpi_region *region = mixpi_region_now(ctx);
    if (!region || region->cast.dtype == MIXP_F32 || !region->cast.level) return off;
    return region->cast;
}

static int mixpi_no_grad_now(const mixp_context *ctx) {
    const mixpi_region *region = mixpi_region_now(ctx);
    return region && region->no_grad;
}

/* Opens a region even when it is refused, as one that changes nothing: whoever leaves it must
 * find it. */
static mixp_result mixpi_region_open(mixp_context *ctx, mixp_autocast cast,
                                     mixpi_region_kind kind, int no_grad) {
    mixpi_casting *c = mixpi_casting_of(ctx);
    const char *wrong = NULL;
    if (!c) return MIXP_ERR_MEMORY;
    if (!mixpi_real(cast.dtype)) wrong = "the dtype must be f16, bf16 or f32 (off)";
    else if (cast.level < 0 || cast.level > 3) wrong = "the level must be 0 to 3";
    else if (c->n_regions >= MIXPI_MAX_REGIONS) wrong = "too many nested regions";
    if (c->n_regions < MIXPI_MAX_REGIONS) {
        mixpi_region *region = &c->regions[c->n_regions];
        region->cast = wrong ? mixp_autocast_current(ctx) : cast;  /* plant: region_refused */
        region->kind = kind;
        region->no_grad = no_grad || mixpi_no_grad_now(ctx);  /* plant: region_no_grad */
    }
    c->n_regions++;
    return !wrong ? MIXP_OK
                  : mixp_context_fail(ctx, MIXP_ERR_ARGUMENT,
                                      "autocast to %s at level %d: %s",
                                      mixp_dtype_name(cast.dtype), cast.level, wrong);
}

/* One of the level that blocks have. */
static void mixpi_region_open_at(mixp_context *ctx, mixp_dtype dtype,
                                 mixpi_region_kind kind) {
    mixpi_casting *c = mixpi_casting_of(ctx);
    mixp_autocast cast = { MIXP_F32, 0 };
    cast.dtype = dtype;
    if (c) cast.level = c->block_level;
    mixpi_region_open(ctx, cast, kind, 0);
}

MIXPREC_API mixp_result mixp_autocast_push(mixp_context *ctx,
                                           const mixp_autocast *region) {
    mixp_result r;
    if (!ctx || !region)
        return mixp_context_fail(ctx, MIXP_ERR_ARGUMENT,
                                 "mixp_autocast_push: region is NULL");
    r = mixpi_region_open(ctx, *region, MIXPI_REGION_PUSHED, 0);
    /* plant: region_pushed */
    if (r == MIXP_ERR_ARGUMENT) ctx->casting->n_regions--;  /* a refused push has no pop */
    return r;
}

MIXPREC_API mixp_result mixp_autocast_pop(mixp_context *ctx) {
    const mixpi_region *region = mixpi_region_now(ctx);
    if (!ctx) return MIXP_ERR_ARGUMENT;
    if (!region || region->kind != MIXPI_REGION_PUSHED)  /* plant: region_pop */
        return mixp_context_fail(ctx, MIXP_ERR_ORDER,
                                 "mixp_autocast_pop: no region is open that "
                                 "mixp_autocast_push opened");
    ctx->casting->n_regions--;
    return MIXP_OK;
}

MIXPREC_API mixp_result mixp_autocast_set_level(mixp_context *ctx, int level) {
    if (!ctx || level < 0 || level > 3)
        return mixp_context_fail(ctx, MIXP_ERR_ARGUMENT,
                                 "mixp_autocast_set_level: %d is not 0 to 3", level);
    if (!mixpi_casting_of(ctx)) return MIXP_ERR_MEMORY;
    ctx->casting->block_level = level;
    return MIXP_OK;
}

MIXPREC_API int mixp_autocast_enter(mixp_context *ctx, mixp_dtype dtype) {
    if (ctx) mixpi_region_open_at(ctx, dtype, MIXPI_REGION_IN_BLOCK);
    return 1;
}

MIXPREC_API int mixp_no_grad_enter(mixp_context *ctx) {
    if (ctx) mixpi_region_open(ctx, mixp_autocast_current(ctx), MIXPI_REGION_IN_BLOCK, 1);
    return 1;
}

/* Closes the innermost block, and what was pushed and not popped in it. */
MIXPREC_API int mixp_autocast_leave(mixp_context *ctx) {
    mixpi_casting *c = ctx ? ctx->casting : NULL;
    int i;
    if (!c) return 0;
    if (c->n_regions > MIXPI_MAX_REGIONS) {
        c->n_regions--;
        return 0;
    }
    for (i = c->n_regions; i > 0; i--) {
        if (c->regions[i - 1].kind != MIXPI_REGION_IN_BLOCK) continue;
        c->n_regions = i - 1;  /* plant: region_leave */
        break;
    }
    return 0;
}

MIXPREC_API int mixp_no_grad_leave(mixp_context *ctx) { return mixp_autocast_leave(ctx); }

static int mixpi_regions_open(const mixp_context *ctx) {
    return ctx->casting ? ctx->casting->n_regions : 0;
}

MIXPREC_API int mixp_autocast_open(mixp_context *ctx, mixp_dtype dtype) {
    int opened = ctx ? mixpi_regions_open(ctx) : -1;
    if (ctx) mixpi_region_open_at(ctx, dtype, MIXPI_REGION_IN_SCOPE);
    return opened;
}

MIXPREC_API int mixp_no_grad_open(mixp_context *ctx) {
    int opened = ctx ? mixpi_regions_open(ctx) : -1;
    if (ctx) mixpi_region_open(ctx, mixp_autocast_current(ctx), MIXPI_REGION_IN_SCOPE, 1);
    return opened;
}

MIXPREC_API void mixp_autocast_close(mixp_context *ctx, int opened) {
    if (ctx && opened >= 0 && opened < mixpi_regions_open(ctx))
        ctx->casting->n_regions = opened;
}

MIXPREC_API mixp_tensor *mixp_autocast_call(mixp_context *ctx, mixp_dtype dtype,
                                            mixpi_tensor_fn fn, void *user) {
    mixp_tensor *t;
    int opened;
    if (!ctx || !fn) return NULL;
    opened = mixp_autocast_open(ctx, dtype);
    t = fn(ctx, user);
    mixp_autocast_close(ctx, opened);
    return t;
}

/* Closes blocks that were left by return, goto or break; reports that there were some. */
static mixp_result mixpi_regions_check(mixp_context *ctx) {
    int i = 0, open = (int)mixpi_min(mixpi_regions_open(ctx), MIXPI_MAX_REGIONS);
    while (i < open && ctx->casting->regions[i].kind != MIXPI_REGION_IN_BLOCK) i++;
    if (i == open) return MIXP_OK;
    ctx->casting->n_regions = i;  /* plant: region_told */
    return mixp_context_fail(
        ctx, MIXP_ERR_ORDER,
        "mixp_step_begin: a MIXP_AUTOCAST or MIXP_NO_GRAD block "
        "is still open; leave it at its end, not by return, goto or break, and begin "
        "steps outside of it; a region around a loop of steps is mixp_no_grad_open's or "
        "mixp_autocast_open's");
}

/* --- policy ---------------------------------------------------------------------------- */

MIXPREC_API const char *mixp_op_class_name(mixp_op_class cls) {
    static const char *const names[] = { "keep",    "low",     "f32",
                                         "f32_out", "promote", "banned" };
    MIXPI_STATIC_ASSERT(class_names, sizeof names / sizeof names[0] == MIXP_CLASS_COUNT);
    return (unsigned)cls < MIXP_CLASS_COUNT ? names[cls] : "?";
}

static mixp_op_class mixpi_class_of(const mixp_context *ctx, const mixp_op *op) {
    const mixpi_casting *c = ctx->casting;
    int i;
    for (i = 0; c && i < c->n_overrides; i++)
        if (c->overrides[i].op == op) return c->overrides[i].cls;
    return op->cls;
}

MIXPREC_API mixp_result mixp_autocast_override(mixp_context *ctx, const mixp_op *op,
                                               mixp_op_class cls) {
    mixpi_casting *c = ctx ? mixpi_casting_of(ctx) : NULL;
    int i = 0;
    if (ctx && !c) return MIXP_ERR_MEMORY;
    if (!ctx || !op || (unsigned)cls >= MIXP_CLASS_COUNT)
        return mixp_context_fail(ctx, MIXP_ERR_ARGUMENT, "mixp_autocast_override: %s",
                         !op ? "op is NULL" : "no such class");
    while (i < c->n_overrides && c->overrides[i].op != op) i++;
    if (i == MIXPI_MAX_OVERRIDES)
        return mixp_context_fail(ctx, MIXP_ERR_ARGUMENT,
                                 "mixp_autocast_override: %d operators have one "
                                 "already, the most there can be",
                                 MIXPI_MAX_OVERRIDES);
    if (i == c->n_overrides) c->n_overrides++;
    c->overrides[i].op = op;
    c->overrides[i].cls = cls;  /* plant: override */
    return MIXP_OK;
}

/* The dtype a result is stored in. natural: what the operator would give by itself. */
static mixp_dtype mixpi_result_dtype(mixp_autocast region, mixp_op_class cls,
                                     mixp_dtype natural, int rank) {
    if (region.level == 0 || !mixpi_real(natural)) return natural;
    /* plant: level_two */
    if (region.level >= 2) return rank == 0 ? MIXP_F32 : region.dtype;
    if (cls == MIXP_CLASS_LOW) return region.dtype;
    return cls == MIXP_CLASS_F32 || cls == MIXP_CLASS_F32_OUT ? MIXP_F32 : natural;
}

/* f16 with bf16 gives f32: neither holds the other's values. */
static mixp_dtype mixpi_widest(int n, mixp_tensor *const *t) {
    mixp_dtype d = MIXP_DTYPE_COUNT;
    int i;
    for (i = 0; i < n; i++) {
        if (!t[i] || !mixpi_real(t[i]->dtype)) continue;
        /* plant: widest */
        d = d == MIXP_DTYPE_COUNT || d == t[i]->dtype ? t[i]->dtype : MIXP_F32;
    }
    return d == MIXP_DTYPE_COUNT ? MIXP_F32 : d;
}

/* --- counts ---------------------------------------------------------------------------- */

static void mixpi_count_call(mixp_context *ctx, const mixp_op *op, mixp_dtype dtype) {
    mixpi_casting *c = mixpi_casting_of(ctx);
    int i = 0, most = MIXPI_MAX_OVERRIDES * 2;
    if (!c) return;
    while (i < c->n_tallies && c->tallies[i].op != op) i++;
    if (i == most) return;      /* counts are for reading; more operators than rows lose them */
    if (i == c->n_tallies) {
        c->n_tallies++;
        c->tallies[i].op = op;
    }
    c->tallies[i].calls[dtype == MIXP_F16 ? 1 : dtype == MIXP_BF16 ? 2 : 0]++;
}

static void mixpi_count_activation_cast(mixp_context *ctx) {
    if (mixpi_casting_of(ctx)) ctx->casting->casts.activation_casts++;
}

static void mixpi_count_weight(mixp_context *ctx, int fresh) {
    mixpi_casting *c = mixpi_casting_of(ctx);
    if (!c) return;
    if (fresh) c->casts.weight_hits++;  /* plant: weight_hits */
    else c->casts.weight_casts++;
}

MIXPREC_API int mixp_autocast_count(const mixp_context *ctx, int row,
                                    mixp_op_count *out) {
    const mixpi_casting *c = ctx ? ctx->casting : NULL;
    if (!c || !out || row < 0 || row >= c->n_tallies) return 0;
    out->op = c->tallies[row].op->name;
    out->cls = mixpi_class_of(ctx, c->tallies[row].op);
    memcpy(out->calls, c->tallies[row].calls, sizeof out->calls);
    return 1;
}

MIXPREC_API mixp_cast_count mixp_autocast_casts(const mixp_context *ctx) {
    const mixp_cast_count none = { 0, 0, 0 };
    return ctx && ctx->casting ? ctx->casting->casts : none;
}

MIXPREC_API void mixp_autocast_reset_counts(mixp_context *ctx) {
    mixpi_casting *c = ctx ? ctx->casting : NULL;
    if (!c) return;
    memset(c->tallies, 0, sizeof c->tallies);
    memset(&c->casts, 0, sizeof c->casts);
    c->n_tallies = 0;
}

/* --- cast cache ------------------------------------------------------------------------ */

/* The low copy of a permanent tensor, fresh. One copy for each dtype, kept for good. */
static mixp_tensor *mixpi_low_copy(mixp_context *ctx, mixp_tensor *t, mixp_dtype dtype) {
    int which = dtype == MIXP_BF16;
    mixp_tensor *low = t->own.low[which];
    int fresh = low && t->own.low_version[which] == t->version;
    mixp_result r;
    if (!low) {
        low = mixpi_twin(t, dtype);
        if (low) low->data = mixpi_data_alloc(low);
        if (!low || !low->data) return NULL;
        low->own.master = t;
        t->own.low[which] = low;
    }
    MIXPI_ASSERT(low->dtype == dtype && low->count == t->count && low->own.master == t);
    MIXPI_ASSERT(t->own.low_version[which] <= t->version);
    low->requires_grad = t->requires_grad;
    mixpi_count_weight(ctx, fresh);
    if (fresh) return low;
    t->own.low_version[which] = t->version;  /* plant: low_version */
    r = mixpi_convert_to(ctx, mixpi_tensor_out(low, 0), mixpi_tensor_in(t), t->count);
    return r == MIXP_OK ? low : NULL;
}

/* ==== 7. TAPE (implementation) ======================================================== */

/* The call's inputs and attributes lie behind it. */
struct mixpi_tape_entry {
    mixp_call         call;     /* first: a call's entry is found by its address           */
    mixpi_tape_entry *older;
    int               fixed_dtype;  /* infer's dtype stands, whatever autocast says        */
    int               alias;    /* the result shares its input's memory                    */
};

static mixpi_tape_entry *mixpi_entry(mixp_call *c) {
    return (mixpi_tape_entry *)(void *)c;
}

MIXPREC_API mixp_result mixp_step_begin(mixp_context *ctx) {
    mixp_result r;
    if (!ctx) return MIXP_ERR_ARGUMENT;
    r = mixpi_regions_check(ctx);
    mixpi_arena_reset(&ctx->host); mixpi_arena_reset(&ctx->dev);
    ctx->tape = NULL; ctx->calls_made = 0;
    ctx->generation++; ctx->step++;
    return r;
}

/* --- applying one operator ------------------------------------------------------------- */

/* Does a gradient flow into t? */
static int mixpi_wants_grad(const mixp_tensor *t)
{ return t && (t->requires_grad || t->own.from_tape); }

enum { MIXPI_QUOTED = 96 };     /* room for a name in a message */

/* " 'h.3.w'" for messages; "" when t has no name, or may have been recycled with it. */
static const char *mixpi_quoted(const mixp_tensor *t, char *text) {
    *text = '\0';
    if (t && !t->own.generation && *t->name)
        snprintf(text, MIXPI_QUOTED, " '%.90s'", t->name);
    return text;
}

static mixp_result mixpi_check_input(mixp_context *ctx, const mixp_op *op, int i,
                                     int required, const mixp_tensor *t) {
    const char *wrong = NULL;
    char quoted[MIXPI_QUOTED];
    if (!t && i < required) wrong = "is NULL";
    if (t && t->own.generation && t->own.generation != ctx->generation)
        wrong = "is an activation of an earlier step; mixp_step_begin has recycled it";
    if (t && t->own.is_grad && !mixpi_no_grad_now(ctx))  /* plant: double_backward */
        wrong = "is a gradient, which is a constant here: there is no double backward; compute "
                "with it under MIXP_NO_GRAD";
    if (t && t->ctx != ctx)
        wrong = "belongs to another context, perhaps device; copy it with mixp_read and mixp_input";
    if (!wrong) return MIXP_OK;
    return mixp_context_fail(
        ctx, t && t->ctx == ctx ? MIXP_ERR_ORDER : MIXP_ERR_ARGUMENT,
        "%s: input %d%s %s", op->name, i, mixpi_quoted(t, quoted), wrong);
}

static mixp_result mixpi_check_apply(mixp_context *ctx, const mixp_op *op, int n_in,
                                     mixp_tensor *const *in, int required,
                                     const void *attrs) {
    mixp_result r = MIXP_OK;
    int i;
    if (!op || !op->name || !op->infer || !op->forward || !in ||
        (op->attrs_size && !attrs))
        return mixp_context_fail(ctx, MIXP_ERR_ARGUMENT,
                                 "mixp_apply: the operator, its infer, forward, "
                                 "inputs or attributes are missing");
    if (n_in < 1 || n_in > MIXP_MAX_INPUTS || required < 0 || required > n_in)
        return mixp_context_fail(ctx, MIXP_ERR_ARGUMENT,
                                 "%s: %d inputs, of which %d required; at most %d",
                                 op->name, n_in, required, MIXP_MAX_INPUTS);
    for (i = 0; i < n_in && r == MIXP_OK; i++)
        r = mixpi_check_input(ctx, op, i, required ? required : 1, in[i]);
    return r;
}

/* By the tape's own operator, below. */
static mixp_tensor *mixpi_cast(mixp_context *ctx, mixp_tensor *x, mixp_dtype dtype);

/* Brings the inputs of a LOW operator to the region's dtype. */
static mixp_result mixpi_cast_inputs(mixp_call *c, mixp_dtype low) {
    int i, cached;
    for (i = 0; i < c->n_in; i++) {
        mixp_tensor *t = c->in[i];
        if (!t || !mixpi_real(t->dtype) || t->dtype == low) continue;
        cached = t->dtype == MIXP_F32 && !t->own.generation && t->requires_grad;
        c->in[i] = cached ? mixpi_low_copy(c->ctx, t, low) : mixpi_cast(c->ctx, t, low);
        if (!cached) mixpi_count_activation_cast(c->ctx);
        if (!c->in[i]) return MIXP_ERR_MEMORY;
    }
    return MIXP_OK;
}

static mixp_result mixpi_allocate_output(mixp_call *c, mixp_op_class cls,
                                         mixp_autocast region) {
    mixpi_tape_entry *e = mixpi_entry(c);
    mixp_tensor *out = c->out;
    if (!out)
        return mixp_context_fail(c->ctx, MIXP_ERR_ARGUMENT,
                                 "%s: infer declared no result", c->op->name);
    if (e->alias) { out->data = c->in[0]->data; return MIXP_OK; }
    if (!e->fixed_dtype) {
        mixp_dtype natural =
            cls == MIXP_CLASS_PROMOTE ? mixpi_widest(c->n_in, c->in) : out->dtype;
        out->dtype = mixpi_result_dtype(region, cls, natural, out->rank);
    }
    out->data = mixpi_data_alloc(out);
    return out->data ? MIXP_OK : MIXP_ERR_MEMORY;
}

static mixp_result mixpi_run_forward(mixp_call *c) {
    mixp_autocast region = mixp_autocast_current(c->ctx);
    mixp_op_class cls = mixpi_class_of(c->ctx, c->op);
    mixp_result r = MIXP_OK;
    if (region.level && cls == MIXP_CLASS_BANNED)
        return mixp_context_fail(c->ctx, MIXP_ERR_BANNED,
                                 "%s is unsafe in low precision: use %s, or run "
                                 "it in a region of MIXP_F32",
                                 c->op->name,
                                 c->op->instead ? c->op->instead : "another operator");
    if (region.level && cls == MIXP_CLASS_LOW) r = mixpi_cast_inputs(c, region.dtype);
    if (r == MIXP_OK) r = c->op->infer(c);
    if (r == MIXP_OK) r = mixpi_allocate_output(c, cls, region);
    if (r == MIXP_OK) r = c->op->forward(c);
    if (r == MIXP_OK && mixpi_real(c->out->dtype))
        mixpi_count_call(c->ctx, c->op, c->out->dtype);
    return r;
}

/* Inputs are kept in whole fours, so that operators may look at those left out, and attributes
 * behind them are aligned as the entry is. */
static mixpi_tape_entry *mixpi_entry_new(mixp_context *ctx, const mixp_op *op, int n_in,
                                         mixp_tensor *const *in, const void *attrs) {
    size_t slots = ((size_t)n_in + 3) / 4 * 4;
    mixpi_tape_entry *e = (mixpi_tape_entry *)mixpi_step_alloc(
        ctx, sizeof *e + slots * sizeof *in + op->attrs_size);
    if (!e) return NULL;
    e->call.ctx = ctx;
    e->call.op = op;
    e->call.n_in = n_in;
    e->call.in = (mixp_tensor **)(void *)(e + 1);
    memcpy(e->call.in, in, (size_t)n_in * sizeof *in);
    if (op->attrs_size) e->call.attrs = memcpy(e->call.in + slots, attrs, op->attrs_size);
    return e;
}

MIXPREC_API mixp_tensor *mixp_apply(mixp_context *ctx, const mixp_op *op, int n_in,
                                    mixp_tensor *const *in, int required,
                                    const void *attrs) {
    mixpi_tape_entry *e;
    int i, grad = 0;
    if (!ctx || mixpi_check_apply(ctx, op, n_in, in, required, attrs) != MIXP_OK)
        return NULL;
    e = mixpi_entry_new(ctx, op, n_in, in, attrs);
    if (!e) return NULL;
    ctx->calls_made++;
    if (mixpi_noted(ctx, op->name, mixpi_run_forward(&e->call)) != MIXP_OK) return NULL;
    for (i = 0; i < n_in; i++) grad |= mixpi_wants_grad(e->call.in[i]);
    if (grad && op->backward && !mixpi_no_grad_now(ctx) &&
        mixpi_real(e->call.out->dtype)) {
        e->call.out->own.from_tape = 1;
        e->older = ctx->tape; ctx->tape = e;
    }
    return e->call.out;
}

MIXPREC_API mixp_result mixp_call_output(mixp_call *c, mixp_dtype dtype, int rank,
                                         const int64_t *shape) {
    c->out = mixpi_tensor_new(c->ctx, "", dtype, rank, shape, 0, 0);
    return c->out ? MIXP_OK : mixp_context_error(c->ctx, NULL);
}

/* As mixp_call_output, for a dtype that autocast must not change. */
static mixp_result mixpi_call_output_fixed(mixp_call *c, mixp_dtype dtype, int rank,
                                           const int64_t *shape) {
    mixpi_entry(c)->fixed_dtype = 1;
    return mixp_call_output(c, dtype, rank, shape);
}

MIXPREC_API mixp_result mixp_call_alias(mixp_call *c, int rank, const int64_t *shape) {
    mixp_result r = mixpi_call_output_fixed(c, c->in[0]->dtype, rank, shape);
    mixpi_entry(c)->alias = 1;
    if (r == MIXP_OK && c->out->count != c->in[0]->count)
        return mixp_context_fail(
            c->ctx, MIXP_ERR_SHAPE, "%s: %.0f elements cannot have a shape of %.0f",
            c->op->name, (double)c->in[0]->count, (double)c->out->count);
    return r;
}

MIXPREC_API mixp_tensor *mixp_call_save(mixp_call *c, int slot, mixp_dtype dtype,
                                        int rank, const int64_t *shape) {
    if (slot >= 0 && slot < MIXP_MAX_SAVED)
        return c->saved[slot] = mixp_activation(c->ctx, dtype, rank, shape);
    mixp_context_fail(c->ctx, MIXP_ERR_ARGUMENT, "%s: slot %d; there are %d", c->op->name,
                      slot, MIXP_MAX_SAVED);
    return NULL;
}

/* --- marks of gradients ---------------------------------------------------------------- *
 *
 * A gradient is marked with what it was multiplied by. The walk begins with a true one, a scaler's
 * operator marks what passes it, and each operator hands its mark on to the inputs.
 */
enum {
    MIXPI_MARK_NONE,            /* nobody knows: zeros, or filled by the user              */
    MIXPI_MARK_TRUE,            /* of a loss as it is                                      */
    MIXPI_MARK_SCALED,
    MIXPI_MARK_UNSCALED,        /* true again                                              */
    MIXPI_MARK_MIXED            /* a sum over two scales: no factor makes it true          */
};

/* The mark of a gradient that another was written to, or added to. */
static void mixpi_mark_add(mixpi_mark *to, const mixpi_mark *from, int accumulate) {
    int same = to->kind == from->kind && to->by == from->by && to->at == from->at;
    int both_true = to->kind == MIXPI_MARK_UNSCALED && from->kind == MIXPI_MARK_TRUE;
    if (!accumulate || to->kind == MIXPI_MARK_NONE || same) *to = *from;
    else if (!both_true) to->kind = MIXPI_MARK_MIXED;  /* plant: mark_mixed */
}

/* --- walking back ---------------------------------------------------------------------- *
 *
 * own.grad is a tensor's gradient buffer. A leaf's is permanent and in use while t->grad is
 * set. An activation's is taken from the arena when its first consumer writes it and given
 * back once its own operator has been walked, so that few are alive at a time.
 */

/* The record of t's gradient, perhaps without data. */
static mixp_tensor *mixpi_grad_record(mixp_tensor *t) {
    if (t->own.grad) return t->own.grad;
    t->own.grad = mixpi_twin(t, t->dtype);
    if (t->own.grad) t->own.grad->own.is_grad = 1;
    return t->own.grad;
}

static mixp_tensor *mixpi_grad_buffer(mixp_tensor *t) {
    mixp_tensor *g = mixpi_grad_record(t);
    if (g && !g->data) g->data = mixpi_data_alloc(g);
    return g && g->data ? g : NULL;
}

/* The tensor whose gradient input i's is: a cached copy stands for the parameter itself. */
static mixp_tensor *mixpi_grad_owner(const mixp_call *c, int i) {
    mixp_tensor *t = i >= 0 && i < c->n_in ? c->in[i] : NULL;
    return t && t->own.master ? t->own.master : t;
}

MIXPREC_API int mixp_call_wants(const mixp_call *c, int i)
{ return mixpi_wants_grad(mixpi_grad_owner(c, i)); }

MIXPREC_API mixp_tensor *mixp_call_grad(mixp_call *c, int i, int *accumulate) {
    mixp_tensor *t = mixpi_grad_owner(c, i);
    mixp_tensor *g = mixpi_wants_grad(t) ? mixpi_grad_buffer(t) : NULL;
    if (!g) return NULL;
    *accumulate = t->own.from_tape ? t->own.pending : t->grad != NULL;
    mixpi_mark_add(&g->own.mark, &c->out->own.grad->own.mark, *accumulate);
    t->own.pending = 1;
    if (t->own.from_tape) return g;
    t->grad = g;
    g->version++;
    return g;
}

/* Hands the incoming gradient's buffer on to input i, unread, when nothing else needs it: a
 * sum's gradient is the gradient of both its terms. Call it after all other reads of it.
 * 0: not possible, the caller must copy. */
static int mixpi_call_move_grad(mixp_call *c, int i) {
    mixp_tensor *t = mixpi_grad_owner(c, i), *g;
    if (!t || !t->own.from_tape || t->own.pending || t->dtype != c->out->dtype ||
        /* plant: kept_grad */
        t->count != c->out->count || c->out->requires_grad) return 0;
    g = mixpi_grad_record(t);
    if (!g || g->data) return 0;
    g->data = c->out->own.grad->data;
    g->own.mark = c->out->own.grad->own.mark;
    c->out->own.grad->data = NULL;
    t->own.pending = 1;
    return 1;
}

/* grad (+)= src, any real dtypes, same count. */
static mixp_result mixpi_add_into(mixp_context *ctx, mixp_out grad, mixp_in src,
                                  int64_t count) {
    mixp_copy_args k;
    if (!grad.accumulate) return mixpi_convert_to(ctx, grad, src, count);
    memset(&k, 0, sizeof k);
    k.rank = 1;
    k.shape[0] = count;
    k.src = src;
    k.dst = grad;
    k.src_strides[0] = k.dst_strides[0] = 1;
    return ctx->device->kernels->copy(&ctx->exec, &k);
}

/* A gradient that the user asked to keep, summed over the losses of a step. */
static mixp_result mixpi_keep_grad(mixp_tensor *t) {
    mixp_tensor *g = t->own.grad, *kept = t->own.kept;
    t->grad = kept ? kept : g;
    if (kept)
        return mixpi_add_into(t->ctx, mixpi_tensor_out(kept, 1), mixpi_tensor_in(g),
                              g->count);
    t->own.kept = g; t->own.grad = NULL;
    return MIXP_OK;
}

static mixp_result mixpi_walk_entry(mixp_call *c) {
    mixp_context *ctx = c->ctx;
    mixp_tensor *out = c->out, *g = out->own.grad;
    mixp_result r;
    out->grad = g; out->own.pending = 0;
    r = c->op->backward(c);
    out->grad = NULL;
    if (r != MIXP_OK)
        return mixp_context_fail(ctx, r, "%s backward: %s", c->op->name,
                                 mixpi_why(ctx, r));
    if (out->requires_grad) return mixpi_keep_grad(out);
    if (g->data) mixpi_arena_give(ctx, &ctx->dev, g->data, mixpi_bytes(g));
    g->data = NULL;
    return MIXP_OK;
}

/* Nothing is pending any more. A walk that failed leaves no half-made gradient: those that it
 * wrote to are forgotten. */
static void mixpi_walk_end(mixp_context *ctx, int failed) {
    mixpi_tape_entry *e;
    int i;
    for (e = ctx->tape; e; e = e->older) {
        e->call.out->own.pending = 0;
        for (i = 0; i < e->call.n_in; i++) {
            mixp_tensor *t = mixpi_grad_owner(&e->call, i);
            if (!t || t->own.from_tape || !t->own.pending) continue;
            t->own.pending = 0;
            if (failed) t->grad = NULL;
        }
    }
}

/* Why loss cannot be walked back, said; or MIXP_OK. */
static mixp_result mixpi_check_loss(mixp_context *ctx, const mixp_tensor *loss) {
    if (!ctx || !loss || loss->ctx != ctx || loss->count != 1)
        return mixp_context_fail(
            ctx, loss && loss->ctx == ctx ? MIXP_ERR_SHAPE : MIXP_ERR_ARGUMENT,
            "mixp_backward: the loss must be one element of this context%s; take its "
            "mean or sum first",
            loss ? "" : ", not NULL");
    if (!loss->own.from_tape || loss->own.generation != ctx->generation)
        return mixp_context_fail(
            ctx, MIXP_ERR_ORDER,
            "mixp_backward: nothing was recorded for this loss: "
            "it is of an earlier step, made under MIXP_NO_GRAD, or needs no gradient");
    if (loss->own.walked)
        return mixp_context_fail(ctx, MIXP_ERR_ORDER,
                                 "mixp_backward: walked already; run forward again");
    return MIXP_OK;
}

MIXPREC_API mixp_result mixp_backward(mixp_context *ctx, mixp_tensor *loss) {
    static const mixpi_mark as_it_is = { NULL, 0, 0, MIXPI_MARK_TRUE };
    mixpi_tape_entry *e;
    mixp_tensor *g;
    mixp_result r = mixpi_check_loss(ctx, loss);
    int opened;
    if (r != MIXP_OK) return r;
    g = mixpi_grad_buffer(loss);
    if (!g) return MIXP_ERR_MEMORY;
    r = mixpi_fill_with(ctx, mixpi_tensor_out(g, 0), 1, 1.0);
    g->own.mark = as_it_is;
    loss->own.pending = loss->own.walked = 1;
    opened = mixp_no_grad_open(ctx);    /* a user's backward may apply operators */
    for (e = ctx->tape; e && r == MIXP_OK; e = e->older)
        if (e->call.out->own.pending) r = mixpi_walk_entry(&e->call);
    mixp_autocast_close(ctx, opened);
    mixpi_walk_end(ctx, r != MIXP_OK);
    return r;
}

/* --- cast: the one operator that the tape itself applies ------------------------------- */

static mixp_result mixpi_cast_infer(mixp_call *c) {
    mixp_dtype from = c->in[0]->dtype, to = *(const mixp_dtype *)c->attrs;
    if (!mixpi_real(from))
        return mixp_context_fail(c->ctx, MIXP_ERR_DTYPE,
                                 "cast: input 0 is %s; it must be f32, f16 or bf16",
                                 mixp_dtype_name(from));
    if (!mixpi_real(to))
        return mixp_context_fail(c->ctx, MIXP_ERR_DTYPE,
                                 "cast: to f32, f16 or bf16, not %s",
                                 mixp_dtype_name(to));
    return mixpi_call_output_fixed(c, to, c->in[0]->rank, c->in[0]->shape);
}

/* Of cast and reshape: the same numbers in the other dtype. */
static mixp_result mixpi_cast_forward(mixp_call *c) {
    if (c->out->data == c->in[0]->data) return MIXP_OK;     /* an alias */
    return mixpi_add_into(c->ctx, mixpi_tensor_out(c->out, 0), mixpi_tensor_in(c->in[0]),
                          c->out->count);
}
static mixp_result mixpi_cast_backward(mixp_call *c) {
    int accumulate = 0;
    mixp_tensor *grad;
    if (mixpi_call_move_grad(c, 0)) return MIXP_OK;
    grad = mixp_call_grad(c, 0, &accumulate);
    if (!grad) return MIXP_OK;                              /* not wanted */
    return mixpi_add_into(c->ctx, mixpi_tensor_out(grad, accumulate),
                          mixpi_tensor_in(c->out->grad), c->out->count);
}

static const mixp_op mixpi_cast_op = {
    "cast", MIXP_CLASS_KEEP, sizeof(mixp_dtype), mixpi_cast_infer, mixpi_cast_forward,
    mixpi_cast_backward, NULL
};

static mixp_tensor *mixpi_cast(mixp_context *ctx, mixp_tensor *x, mixp_dtype dtype)
{ return mixp_apply(ctx, &mixpi_cast_op, 1, &x, 1, &dtype); }

/* --- checking gradients ---------------------------------------------------------------- */

/* The loss with x for one of t's values. */
static double mixpi_loss_at(mixp_context *ctx, mixpi_tensor_fn fn, void *user,
                            mixp_tensor *t, float *value, int64_t i, float x) {
    value[i] = x;
    mixp_write(t, value, MIXP_F32, t->count);
    mixp_step_begin(ctx);
    return mixp_item(fn(ctx, user));
}

/* The largest relative deviation over one input. memory: for its gradient and its values. */
static mixp_result mixpi_check_input_gradient(mixp_context *ctx, mixpi_tensor_fn fn,
                                              void *user, mixp_tensor *t, double eps,
                                              float *memory, double *worst) {
    float *analytic = memory, *value = memory + t->count;
    mixp_result r = mixp_read(t, value, MIXP_F32, t->count);
    int64_t i;
    memset(analytic, 0, (size_t)t->count * sizeof(float));
    if (r == MIXP_OK && t->grad) r = mixp_read(t->grad, analytic, MIXP_F32, t->count);
    for (i = 0; i < t->count && r == MIXP_OK; i++) {
        float old = value[i], up = (float)((double)old + eps),
              down = (float)((double)old - eps);
        double above = mixpi_loss_at(ctx, fn, user, t, value, i, up), numeric, off;
        double below = mixpi_loss_at(ctx, fn, user, t, value, i, down);
        value[i] = old;
        r = mixp_write(t, value, MIXP_F32, t->count);
        numeric = (above - below) / ((double)up - (double)down);
        off = fabs((double)analytic[i] - numeric) /
              (fabs(numeric) > 1.0 ? fabs(numeric) : 1.0);
        if (!(off <= *worst)) *worst = off;  /* plant: checker_worst */
    }
    t->grad = NULL;
    return r;
}

MIXPREC_API mixp_result mixp_check_gradients(mixp_context *ctx, mixpi_tensor_fn fn,
                                             void *user, int n_inputs,
                                             mixp_tensor *const *inputs, double eps,
                                             double *worst) {
    int64_t most = 0;
    mixp_result r;
    float *memory;
    int i;
    if (!ctx || !fn || !inputs || !worst || n_inputs < 1) return MIXP_ERR_ARGUMENT;
    for (i = 0; i < n_inputs; i++) {
        if (!inputs[i] || inputs[i]->dtype != MIXP_F32 || inputs[i]->own.generation)
            return mixp_context_fail(ctx, MIXP_ERR_DTYPE,
                                     "mixp_check_gradients: input %d must be a "
                                     "permanent f32 tensor (mixp_param or mixp_view)",
                                     i);
        if (inputs[i]->count > most) most = inputs[i]->count;
        inputs[i]->grad = NULL;
    }
    memory = (float *)mixpi_host_take(ctx, (size_t)(2 * most) * sizeof(float));
    if (!memory) return mixpi_out_of_memory(ctx, (size_t)(2 * most) * sizeof(float));
    mixp_step_begin(ctx);
    r = mixp_backward(ctx, fn(ctx, user));
    *worst = 0.0;
    if (eps <= 0.0) eps = 1e-3;
    for (i = 0; i < n_inputs && r == MIXP_OK; i++)
        r = mixpi_check_input_gradient(ctx, fn, user, inputs[i], eps, memory, worst);
    mixpi_host_put(ctx, memory);
    return r == MIXP_OK ? mixp_context_error(ctx, NULL) : r;
}
/* ==== 8. OPERATORS (implementation) =================================================== */

/* --- small helpers --------------------------------------------------------------------- */

/* Runs one kernel of the device that x (a call, an optimizer, a scaler) lives on. */
#define MIXPI_RUN(x, kernel, ...)                                                         \
    (x)->ctx->device->kernels->kernel(&(x)->ctx->exec, __VA_ARGS__)

static int64_t mixpi_last_dim(const mixp_tensor *t) {
    return t->rank ? t->shape[t->rank - 1] : 1;
}
static int64_t mixpi_rows_of(const mixp_tensor *t) {
    return t->count / mixpi_last_dim(t);
}

/* Applies a built-in operator to up to three inputs; NULL among the first `required` fails. */
static mixp_tensor *mixpi_apply_op(mixp_context *ctx, mixp_op_id id, int required,
                                   mixp_tensor *a, mixp_tensor *b, mixp_tensor *c,
                                   const void *attrs) {
    mixp_tensor *in[3] = { a, b, c };
    return mixp_apply(ctx, mixp_op_builtin(id), 3, in, required, attrs);
}

static mixp_tensor *mixpi_apply_one(mixp_context *ctx, mixp_op_id id, mixp_tensor *x,
                                    const void *attrs)
{ return mixpi_apply_op(ctx, id, 1, x, NULL, NULL, attrs); }

/* What a kernel of an operator reads and writes: input i, the result; and, walking back, the
 * result's gradient and that of input i: data NULL where that is not there or not wanted. */
static mixp_in mixpi_call_x(const mixp_call *c, int i) {
    return mixpi_tensor_in(c->in[i]);
}
static mixp_in mixpi_call_dy(const mixp_call *c) { return mixpi_tensor_in(c->out->grad); }
static mixp_out mixpi_call_y(const mixp_call *c) { return mixpi_tensor_out(c->out, 0); }
static mixp_out mixpi_call_dx(mixp_call *c, int i) {
    int accumulate = 0;
    const mixp_tensor *grad = mixp_call_grad(c, i, &accumulate);
    return mixpi_tensor_out(grad, accumulate);
}

/* For an operator whose one function passes values on and gradients back: from the input to the
 * result, or, once that has a gradient, from there to the input's. */
static mixp_in mixpi_call_from(const mixp_call *c)
{ return c->out->grad ? mixpi_call_dy(c) : mixpi_call_x(c, 0); }
static mixp_out mixpi_call_to(mixp_call *c)
{ return c->out->grad ? mixpi_call_dx(c, 0) : mixpi_call_y(c); }

/* An f32 array that forward kept for backward. */
static float *mixpi_saved(const mixp_call *c, int slot) {
    return (float *)c->saved[slot]->data;
}

/* The first `required` of `count` inputs must be there, and all that are must be real. */
static mixp_result mixpi_need_real(mixp_call *c, int required, int count) {
    char quoted[MIXPI_QUOTED];
    int i;
    for (i = 0; i < count; i++) {
        const mixp_tensor *t = c->in[i];
        if (!t && i < required)
            return mixp_context_fail(c->ctx, MIXP_ERR_ARGUMENT, "%s: input %d is NULL",
                                     c->op->name, i);
        if (t && !mixpi_real(t->dtype))
            return mixp_context_fail(c->ctx, MIXP_ERR_DTYPE,
                                     "%s: input %d%s is %s; it must be f32, f16 or "
                                     "bf16",
                                     c->op->name, i, mixpi_quoted(t, quoted),
                                     mixp_dtype_name(t->dtype));
    }
    return MIXP_OK;
}

/* Input 0 is real, input 1 an array of indices. */
static mixp_result mixpi_need_indices(mixp_call *c) {
    mixp_result r = mixpi_need_real(c, 1, 1);
    const mixp_tensor *ids = c->in[1];
    char quoted[MIXPI_QUOTED];
    if (r != MIXP_OK || (ids && ids->dtype == MIXP_I32)) return r;
    return mixp_context_fail(c->ctx, MIXP_ERR_DTYPE,
                             "%s: input 1%s is %s; indices must be i32", c->op->name,
                             ids ? mixpi_quoted(ids, quoted) : "",
                             ids ? mixp_dtype_name(ids->dtype) : "NULL");
}

/* The first input of a call that has a name, a low copy's and a gradient's included. */
static const char *mixpi_call_named(const mixp_call *c) {
    int i;
    for (i = 0; i < c->n_in; i++)
        if (c->in[i] && *c->in[i]->name) return c->in[i]->name;
    return "";
}

/* The operator on the tape that made t, seen through casts; NULL: none is there. */
static const mixp_call *mixpi_maker(const mixp_tensor *t) {
    const mixpi_tape_entry *e = t->own.generation ? t->ctx->tape : NULL;
    for (; e; e = e->older) {
        if (e->call.out != t) continue;
        if (e->call.op != &mixpi_cast_op || *e->call.in[0]->name) return &e->call;
        t = e->call.in[0];
    }
    return NULL;
}

/* "x 'h.3.ln_1' [8, 4]", or "x [8, 4] of gelu('h.3.w')" where an operator made it. */
static void mixpi_input_text(const mixp_tensor *t, const char *letter, char *text,
                             size_t room) {
    const mixp_call *maker = *t->name ? NULL : mixpi_maker(t);
    const char *of = maker ? mixpi_call_named(maker) : "";
    char shape[224], made[96] = "";
    mixpi_shape_text(t->rank, t->shape, shape, sizeof shape);
    if (maker)
        snprintf(made, sizeof made, *of ? " of %.24s('%.60s')" : " of %.24s%s",
                 maker->op->name, of);
    if (*t->name) snprintf(text, room, "%.24s '%.60s' %s", letter, t->name, shape);
    else snprintf(text, room, "%.24s %s%s", letter, shape, made);
}

/* What the declarations call the inputs of an operator, where it has several. */
static const char *const mixpi_input_names[][4] = {
    { "linear", "x", "w", "b" },
    { "matmul", "a", "b", "" },
    { "add", "a", "b", "" },
    { "sub", "a", "b", "" },
    { "mul", "a", "b", "" },
    { "div", "a", "b", "" },
    { "maximum", "a", "b", "" },
    { "minimum", "a", "b", "" },
    { "swiglu", "gate", "up", "" },
    { "layer_norm", "x", "gamma", "beta" },
    { "rms_norm", "x", "gamma", "" },
    { "embedding", "table", "ids", "" },
    { "cross_entropy", "logits", "targets", "" },
    { "mse", "x", "target", "" },
    { "bce_with_logits", "x", "target", "" },
    { "bce", "x", "target", "" },
    { "l1", "x", "target", "" },
    { "smooth_l1", "x", "target", "" },
    { "huber", "x", "target", "" },
    { "kl_div", "x", "target", "" },
    { "gather", "x", "ids", "" },
    { "where", "mask", "a", "b" },
    { "masked_fill", "x", "mask", "" }
};

static const char *mixpi_input_name(const mixp_call *c, int i, char number[24]) {
    const size_t rows = sizeof mixpi_input_names / sizeof mixpi_input_names[0];
    size_t k = 0;
    while (k < rows && strcmp(mixpi_input_names[k][0], c->op->name) != 0) k++;
    if (k < rows && i < 3) return mixpi_input_names[k][1 + i];
    if (c->n_in < 2 || !c->in[1]) return "x";
    snprintf(number, 24, "input %d", i);
    return number;
}

/* The inputs with their names and shapes, and the rule that they break. */
static mixp_result mixpi_bad_shapes(mixp_call *c, const char *rule) {
    char text[4][352], number[24];
    int i, n = 0;
    memset(text, 0, sizeof text);
    for (i = 0; i < c->n_in && n < 4; i++) {
        const char *name = mixpi_input_name(c, i, number);
        if (c->in[i]) mixpi_input_text(c->in[i], name, text[n++], sizeof text[0]);
    }
    return mixp_context_fail(c->ctx, MIXP_ERR_SHAPE, "%s: %s%s%s%s%s%s%s %s not fit: %s",
                             c->op->name, text[0], n > 1 ? " and " : "", text[1],
                             n > 2 ? " and " : "", text[2], n > 3 ? " and " : "",
                             text[3], n > 1 ? "do" : "does", rule);
}

static void mixpi_dense_strides(int rank, const int64_t *shape, int64_t *strides) {
    int64_t step = 1;
    int i;
    for (i = rank - 1; i >= 0; i--) { strides[i] = step; step *= shape[i]; }
}

/* dim as an index from the front, or -1. */
static int mixpi_axis(int dim, int rank) {
    if (dim < 0) dim += rank;
    return dim >= 0 && dim < rank ? dim : -1;
}

static mixp_result mixpi_same_infer(mixp_call *c) {
    if (mixpi_need_real(c, 1, 1) != MIXP_OK) return MIXP_ERR_DTYPE;
    return mixp_call_output(c, c->in[0]->dtype, c->in[0]->rank, c->in[0]->shape);
}

/* --- linear and matmul: one product ----------------------------------------------------- */

/* Of the forward pass; linear: a weight w[out, in] and a bias. g has the batch that is one call of
 * the kernel, the last of these axes; array 0: c, 1: a, 2: b. */
typedef struct mixpi_product {
    int            linear;
    mixp_gemm_args g;
    mixpi_axes     batches;
} mixpi_product;

/* An operand as matrices: a vector is one row of a, or one column of b. */
typedef struct mixpi_matrices {
    int     rank, vector;
    int64_t rows, cols;         /* as stored                                               */
} mixpi_matrices;

static mixpi_matrices mixpi_matrices_of(const mixp_tensor *t, int column) {
    mixpi_matrices m;
    m.vector = t->rank == 1;
    m.rank = m.vector ? 2 : t->rank;
    m.rows = m.vector ? (column ? t->shape[0] : 1) : t->shape[t->rank - 2];
    m.cols = m.vector ? (column ? 1 : t->shape[0]) : t->shape[t->rank - 1];
    return m;
}

/* Leading axis i, of `rank`, as an operand has it; as mixpi_broadcast_axis. */
static int64_t mixpi_batch_axis(const mixp_tensor *t, int rank, int i, int64_t *step,
                                int64_t *stride) {
    int own = i - (rank - (t->rank > 2 ? t->rank - 2 : 0));
    int64_t n = own < 0 ? 1 : t->shape[own];
    *stride = n == 1 ? 0 : *step;
    *step *= n;
    return n;
}

/* The batches that a and b make together, broadcast; 0: they do not fit. */
static int mixpi_product_batches(mixpi_product *p, const mixp_tensor *a,
                                 const mixp_tensor *b) {
    mixpi_axes *x = &p->batches;
    int64_t step[3];
    int i, most = a->rank > b->rank ? a->rank : b->rank;
    step[0] = p->g.m * p->g.n;
    step[1] = p->g.m * p->g.k;
    step[2] = p->g.k * p->g.n;
    x->rank = most > 2 ? most - 2 : 0;
    x->arrays = 3;
    for (i = x->rank - 1; i >= 0; i--) {
        int64_t na = mixpi_batch_axis(a, x->rank, i, &step[1], &x->s[1][i]);
        int64_t nb = mixpi_batch_axis(b, x->rank, i, &step[2], &x->s[2][i]);
        if (na != nb && na != 1 && nb != 1) return 0;
        x->n[i] = na > nb ? na : nb;
        x->s[0][i] = step[0];
        step[0] *= x->n[i];
    }
    return 1;
}

/* m, n, k and the batches; 0: they do not fit. */
static int mixpi_product_sizes(mixpi_product *p, mixp_tensor *const *in) {
    mixp_gemm_args *g = &p->g;
    mixpi_matrices a = mixpi_matrices_of(in[0], 0), b = mixpi_matrices_of(in[1], 1);
    g->trans_a = g->trans_a && !a.vector;
    g->trans_b = g->trans_b && !b.vector;
    g->m = g->trans_a ? a.cols : a.rows;
    g->k = g->trans_a ? a.rows : a.cols;
    g->n = g->trans_b ? b.rows : b.cols;
    if (g->k != (g->trans_b ? b.cols : b.rows)) return 0;
    if (in[2] && (in[2]->rank != 1 || in[2]->count != g->n)) return 0;
    return mixpi_product_batches(p, in[0], in[1]);
}

/* The last axis of the batches, joined, is the kernel's batch. */
static void mixpi_product_plan(mixpi_product *p) {
    mixp_gemm_args *g = &p->g;
    mixpi_axes *x = &p->batches;
    int last;
    mixpi_axes_join(x);
    last = x->rank - 1;
    g->batch = x->n[last];
    g->stride_a = g->batch > 1 ? x->s[1][last] : 0;
    g->stride_b = g->batch > 1 ? x->s[2][last] : 0;
    g->stride_c = g->m * g->n;
    if (g->stride_b || g->trans_a) return;
    g->m *= g->batch;                       /* one tall product instead of many */
    g->stride_a = g->m * g->k;
    g->batch = 1;
}

static mixp_result mixpi_product_infer(mixp_call *c) {
    mixpi_product *p = (mixpi_product *)c->attrs;
    const mixp_tensor *a = c->in[0], *b = c->in[1];
    int64_t shape[MIXP_MAX_RANK];
    int rank;
    const char *rule = p->linear ? "x[..., in], w[out, in], b[out]"
                     : "a[..., m, k] b[..., k, n], leading dimensions equal, 1 or not there";
    if (mixpi_need_real(c, 2, 3) != MIXP_OK) return MIXP_ERR_DTYPE;
    if (a->rank < 1 || b->rank < 1 || (p->linear && b->rank != 2) ||
        !mixpi_product_sizes(p, c->in))
        return mixpi_bad_shapes(c, rule);
    rank = p->batches.rank;
    memcpy(shape, p->batches.n, sizeof shape);
    if (a->rank > 1) shape[rank++] = p->g.m;
    if (b->rank > 1) shape[rank++] = p->g.n;
    mixpi_product_plan(p);
    return mixp_call_output(c, a->dtype, rank, shape);
}

/* A matrix as it is stored, or its transpose; of a batch, so many elements apart. */
typedef struct mixpi_operand { mixp_in at; int64_t stride; int trans; } mixpi_operand;

static mixpi_operand mixpi_stored(mixp_in at, int64_t stride) {
    mixpi_operand o = { at, stride, 0 };
    return o;
}
static mixpi_operand mixpi_turned(mixp_in at, int64_t stride) {
    mixpi_operand o = { at, stride, 1 };
    return o;
}

/* c[m, n] = op(a) op(b), one dense matrix or many; where c lies is not said yet. */
static mixp_gemm_args mixpi_gemm_of(int64_t m, int64_t n, int64_t k, mixpi_operand a,
                                    mixpi_operand b) {
    mixp_gemm_args g;
    memset(&g, 0, sizeof g);
    g.m = m;
    g.n = n;
    g.k = k;
    g.batch = 1;
    g.alpha = 1.0f;
    g.a = a.at;
    g.b = b.at;
    g.trans_a = a.trans;
    g.trans_b = b.trans;
    g.lda = a.trans ? m : k;
    g.ldb = b.trans ? k : n;
    g.ldc = n;
    g.stride_a = a.stride;
    g.stride_b = b.stride;
    return g;
}

/* How many calls of the kernel the batches need. */
static int64_t mixpi_product_calls(const mixpi_axes *x) {
    int64_t calls = 1;
    int i;
    for (i = 0; i < x->rank - 1; i++) calls *= x->n[i];
    return calls;
}

/* Where the matrices of a call begin, in each array; *again: whether `array` was there before. */
static void mixpi_product_at(const mixpi_axes *x, int64_t call, int array, int64_t at[3],
                             int *again) {
    int i, k;
    at[0] = at[1] = at[2] = 0;
    *again = 0;
    for (i = x->rank - 2; i >= 0; i--) {
        int64_t index = call % x->n[i];
        for (k = 0; k < 3; k++) at[k] += index * x->s[k][i];
        if (index > 0 && x->s[array][i] == 0) *again = 1;  /* plant: product_again */
        call /= x->n[i];
    }
}

static mixp_result mixpi_product_forward(mixp_call *c) {
    mixpi_product *p = (mixpi_product *)c->attrs;
    mixp_gemm_args *g = &p->g, one;
    int64_t calls = mixpi_product_calls(&p->batches), i, at[3];
    mixp_result r = MIXP_OK;
    int again;
    g->alpha = 1.0f;
    g->lda = g->trans_a ? g->m : g->k;
    g->ldb = g->trans_b ? g->k : g->n;
    g->ldc = g->n;
    g->a = mixpi_call_x(c, 0);
    g->b = mixpi_call_x(c, 1);
    g->bias = mixpi_call_x(c, 2);
    g->c = mixpi_call_y(c);
    for (i = 0; i < calls && r == MIXP_OK; i++) {
        one = *g;
        mixpi_product_at(&p->batches, i, 0, at, &again);
        one.c = mixpi_out_at(g->c, at[0]);
        one.a = mixpi_in_at(g->a, at[1]);
        one.b = mixpi_in_at(g->b, at[2]);
        r = MIXPI_RUN(c, gemm, &one);
    }
    return r;
}

/* The gradient of a, in the shape that a is stored in: m x k, or k x m when trans_a. */
static mixp_gemm_args mixpi_product_da(const mixp_gemm_args *g, mixp_in dy) {
    mixpi_operand dc = mixpi_stored(dy, g->stride_c),
                  dc_turned = mixpi_turned(dy, g->stride_c);
    mixpi_operand b = mixpi_stored(g->b, g->stride_b),
                  b_turned = mixpi_turned(g->b, g->stride_b);
    switch ((g->trans_a ? 2 : 0) + (g->trans_b ? 1 : 0)) {
    case 0:  return mixpi_gemm_of(g->m, g->k, g->n, dc, b_turned);          /* c = a b   */
    case 1:  return mixpi_gemm_of(g->m, g->k, g->n, dc, b);                 /* c = a b'  */
    case 2:  return mixpi_gemm_of(g->k, g->m, g->n, b, dc_turned);          /* c = a' b  */
    default: return mixpi_gemm_of(g->k, g->m, g->n, b_turned, dc_turned);   /* c = a' b' */
    }
}

/* The gradient of b, in the shape that b is stored in: k x n, or n x k when trans_b. */
static mixp_gemm_args mixpi_product_db(const mixp_gemm_args *g, mixp_in dy) {
    mixpi_operand dc = mixpi_stored(dy, g->stride_c),
                  dc_turned = mixpi_turned(dy, g->stride_c);
    mixpi_operand a = mixpi_stored(g->a, g->stride_a),
                  a_turned = mixpi_turned(g->a, g->stride_a);
    switch ((g->trans_a ? 2 : 0) + (g->trans_b ? 1 : 0)) {
    case 0:  return mixpi_gemm_of(g->k, g->n, g->m, a_turned, dc);          /* c = a b   */
    case 1:  return mixpi_gemm_of(g->n, g->k, g->m, dc_turned, a);          /* c = a b'  */
    case 2:  return mixpi_gemm_of(g->k, g->n, g->m, a, dc);                 /* c = a' b  */
    default: return mixpi_gemm_of(g->n, g->k, g->m, dc_turned, a_turned);   /* c = a' b' */
    }
}

/* The sum of a batch of products, for a result that the whole batch shares: one product after
 * another, in f32. A result of fewer bits is rounded once, at the end. */
static mixp_result mixpi_product_sum(mixp_call *c, mixp_gemm_args *g, int64_t batch) {
    mixp_context *ctx = c->ctx;
    mixp_out out = g->c;
    mixp_tensor *sums = NULL;
    int64_t count = g->m * g->n;
    mixp_result r = MIXP_OK;
    if (batch > 1 && out.dtype != MIXP_F32) {
        sums = mixp_activation(ctx, MIXP_F32, 1, &count);
        if (!sums) return MIXP_ERR_MEMORY;
        g->c = mixpi_tensor_out(sums, 0);
    }
    for (; batch > 0 && r == MIXP_OK; batch--) {
        r = MIXPI_RUN(c, gemm, g);
        g->a = mixpi_in_at(g->a, g->stride_a);
        g->b = mixpi_in_at(g->b, g->stride_b);
        g->c.accumulate = 1;
    }
    if (!sums) return r;
    if (r == MIXP_OK) r = mixpi_add_into(ctx, out, mixpi_tensor_in(sums), count);
    mixpi_arena_give(ctx, &ctx->dev, sums->data, mixpi_bytes(sums));
    return r;
}

/* One call's part of the gradient of an operand, whose matrices lie `stride` apart; 0: the batch
 * shares one. */
static mixp_result mixpi_product_into(mixp_call *c, mixp_gemm_args *g, int64_t stride) {
    const mixpi_product *p = (const mixpi_product *)c->attrs;
    if (!stride) return mixpi_product_sum(c, g, p->g.batch);
    g->batch = p->g.batch;
    g->stride_c = stride;
    return MIXPI_RUN(c, gemm, g);
}

/* The gradient of operand i, call by call, into `to`. */
static mixp_result mixpi_product_walk(mixp_call *c, int i, mixp_out to) {
    const mixpi_product *p = (const mixpi_product *)c->attrs;
    int64_t calls = mixpi_product_calls(&p->batches), call, at[3];
    mixp_result r = MIXP_OK;
    int again;
    for (call = 0; call < calls && r == MIXP_OK; call++) {
        mixp_gemm_args g = p->g, part;
        mixp_in dy;
        mixpi_product_at(&p->batches, call, 1 + i, at, &again);
        dy = mixpi_in_at(mixpi_call_dy(c), at[0]);
        g.a = mixpi_in_at(g.a, at[1]);
        g.b = mixpi_in_at(g.b, at[2]);
        part = i ? mixpi_product_db(&g, dy) : mixpi_product_da(&g, dy);
        part.c = mixpi_out_at(to, at[1 + i]);
        part.c.accumulate |= again;
        r = mixpi_product_into(c, &part, i ? g.stride_b : g.stride_a);
    }
    return r;
}

/* Several calls may add to the same matrix: in f32, rounded once at the end. */
static mixp_result mixpi_product_grad(mixp_call *c, int i) {
    const mixpi_product *p = (const mixpi_product *)c->attrs;
    mixp_out to = mixpi_call_dx(c, i);
    int64_t count = c->in[i]->count;
    mixp_tensor *sums;
    mixp_result r;
    if (!to.data) return MIXP_OK;
    if (to.dtype == MIXP_F32 || mixpi_product_calls(&p->batches) == 1)
        return mixpi_product_walk(c, i, to);
    sums = mixp_activation(c->ctx, MIXP_F32, 1, &count);
    if (!sums) return MIXP_ERR_MEMORY;
    r = mixpi_product_walk(c, i, mixpi_tensor_out(sums, 0));
    if (r == MIXP_OK) r = mixpi_add_into(c->ctx, to, mixpi_tensor_in(sums), count);
    mixpi_arena_give(c->ctx, &c->ctx->dev, sums->data, mixpi_bytes(sums));
    return r;
}

/* A bias is added to every row, so its gradient is their sum. */
static mixp_result mixpi_product_dbias(mixp_call *c, const mixp_gemm_args *g) {
    mixp_reduce_args k;
    memset(&k, 0, sizeof k);
    k.outer = 1;
    k.n = g->m;
    k.inner = g->n;
    k.factor = 1.0f;
    k.a = mixpi_call_dy(c);
    k.y = mixpi_call_dx(c, 2);
    return k.y.data ? MIXPI_RUN(c, reduce, &k) : MIXP_OK;
}

static mixp_result mixpi_product_backward(mixp_call *c) {
    mixp_result r = mixpi_product_grad(c, 0);
    if (r == MIXP_OK) r = mixpi_product_grad(c, 1);
    return r == MIXP_OK ? mixpi_product_dbias(c, &((const mixpi_product *)c->attrs)->g) : r;
}

MIXPREC_API mixp_tensor *mixp_linear(mixp_context *ctx, mixp_tensor *x, mixp_tensor *w,
                                     mixp_tensor *b) {
    mixpi_product p;
    memset(&p, 0, sizeof p);
    p.linear = 1;
    p.g.trans_b = 1;
    return mixpi_apply_op(ctx, MIXP_OP_LINEAR, 2, x, w, b, &p);
}

MIXPREC_API mixp_tensor *mixp_matmul(mixp_context *ctx, mixp_tensor *a, mixp_tensor *b,
                                     int trans_a, int trans_b) {
    mixpi_product p;
    memset(&p, 0, sizeof p);
    p.g.trans_a = trans_a != 0;
    p.g.trans_b = trans_b != 0;
    return mixpi_apply_op(ctx, MIXP_OP_MATMUL, 2, a, b, NULL, &p);
}

/* --- attention ------------------------------------------------------------------------- */

static mixp_result mixpi_attention_infer(mixp_call *c) {
    mixp_attention_args *k = (mixp_attention_args *)c->attrs;
    mixp_tensor *x = c->in[0];
    int64_t shape[3];
    if (mixpi_need_real(c, 1, 1) != MIXP_OK) return MIXP_ERR_DTYPE;
    if (x->rank != 3 || k->heads < 1 || x->shape[2] % (3 * k->heads))
        return mixpi_bad_shapes(c, "qkv[b, t, 3*c] with c a multiple of heads >= 1");
    k->b = x->shape[0];
    k->t = x->shape[1];
    k->d = x->shape[2] / (3 * k->heads);
    if (mixp_bits_of_f32(k->scale) << 1 == 0)
        k->scale = (float)(1.0 / sqrt((double)k->d));
    if (mixp_bits_of_f32(k->scale) - 1u >= 0x7F7FFFFFu)     /* by bits: not positive and finite */
        return mixp_context_fail(c->ctx, MIXP_ERR_ARGUMENT,
                                 "attention: scale is %g; it must be above 0, "
                                 "or 0 for 1/sqrt(c/heads)",
                                 (double)k->scale);
    shape[0] = k->b;
    shape[1] = k->t;
    shape[2] = k->d * k->heads;
    return mixp_call_output(c, x->dtype, 3, shape);
}

static mixp_result mixpi_attention_forward(mixp_call *c) {
    mixp_attention_args *k = (mixp_attention_args *)c->attrs;
    int64_t shape[3] = { k->b, k->heads, k->t };
    if (!mixp_call_save(c, 0, MIXP_F32, 3, shape)) return MIXP_ERR_MEMORY;
    k->qkv = mixpi_call_x(c, 0);
    k->y = mixpi_call_y(c);
    k->lse = mixpi_saved(c, 0);
    return MIXPI_RUN(c, attention, k);
}

static mixp_result mixpi_attention_backward(mixp_call *c) {
    const mixp_attention_args *forward = (const mixp_attention_args *)c->attrs;
    mixp_attention_backward_args k;
    memset(&k, 0, sizeof k);
    k.b = forward->b;
    k.t = forward->t;
    k.heads = forward->heads;
    k.d = forward->d;
    k.causal = forward->causal;
    k.scale = forward->scale;
    k.qkv = forward->qkv;
    k.y = mixpi_tensor_in(c->out);
    k.dy = mixpi_call_dy(c);
    k.lse = forward->lse;
    k.dqkv = mixpi_call_dx(c, 0);
    return k.dqkv.data ? MIXPI_RUN(c, attention_backward, &k) : MIXP_OK;
}

MIXPREC_API mixp_tensor *mixp_attention(mixp_context *ctx, mixp_tensor *qkv, int heads,
                                        int causal, float scale) {
    mixp_attention_args k;
    memset(&k, 0, sizeof k);
    k.heads = heads;
    k.causal = causal != 0;
    k.scale = scale;
    return mixpi_apply_one(ctx, MIXP_OP_ATTENTION, qkv, &k);
}

/* --- add, sub, mul, div, maximum, minimum, swiglu ---------------------------------------- */

/* Axis i of a result of this rank, as t has it; *stride: from one element to the next along it, 0
 * where t repeats; *step: the product of the axes behind. */
static int64_t mixpi_broadcast_axis(const mixp_tensor *t, int rank, int i, int64_t *step,
                                    int64_t *stride) {
    int own = i - (rank - t->rank);
    int64_t n = own < 0 ? 1 : t->shape[own];
    *stride = n == 1 ? 0 : *step;
    *step *= n;
    return n;
}

static mixp_result mixpi_binary_infer(mixp_call *c) {
    mixp_binary_args *k = (mixp_binary_args *)c->attrs;
    const mixp_tensor *a = c->in[0], *b = c->in[1];
    int64_t step_a = 1, step_b = 1;
    int i;
    if (mixpi_need_real(c, 2, 2) != MIXP_OK) return MIXP_ERR_DTYPE;
    k->rank = a->rank > b->rank ? a->rank : b->rank;
    for (i = k->rank - 1; i >= 0; i--) {
        int64_t na = mixpi_broadcast_axis(a, k->rank, i, &step_a, &k->a_strides[i]);
        int64_t nb = mixpi_broadcast_axis(b, k->rank, i, &step_b, &k->b_strides[i]);
        if (na != nb && na != 1 && nb != 1)
            return mixpi_bad_shapes(
                c, "aligned at the right, dimensions must be equal or 1");
        k->shape[i] = na > nb ? na : nb;
    }
    return mixp_call_output(c, mixpi_widest(2, c->in), k->rank, k->shape);
}

static mixp_result mixpi_binary_forward(mixp_call *c) {
    mixp_binary_args *k = (mixp_binary_args *)c->attrs;
    k->a = mixpi_call_x(c, 0);
    k->b = mixpi_call_x(c, 1);
    k->y = mixpi_call_y(c);
    return MIXPI_RUN(c, binary, k);
}

/* The second operand first: the first may then take over the incoming gradient's buffer. */
static mixp_result mixpi_binary_backward(mixp_call *c) {
    mixp_binary_args *k = (mixp_binary_args *)c->attrs;
    int passes = k->op == MIXP_BINARY_ADD || k->op == MIXP_BINARY_SUB;
    mixp_result r = MIXP_OK;
    for (k->which = 1; k->which >= 0 && r == MIXP_OK; k->which--) {
        if (k->which == 0 && passes && mixpi_call_move_grad(c, 0)) break;
        k->dx = mixpi_call_dx(c, k->which);
        k->dy = mixpi_call_dy(c);
        if (k->dx.data) r = MIXPI_RUN(c, binary_backward, k);
    }
    return r;
}

static mixp_tensor *mixpi_apply_binary(mixp_context *ctx, mixp_op_id id, mixp_binary op,
                                       mixp_tensor *a, mixp_tensor *b) {
    mixp_binary_args k;
    memset(&k, 0, sizeof k);
    k.op = op;
    return mixpi_apply_op(ctx, id, 2, a, b, NULL, &k);
}

#define MIXPI_BINARY(name, kind)                                                          \
    MIXPREC_API mixp_tensor *mixp_##name(mixp_context *ctx, mixp_tensor *a, mixp_tensor *b) \
    { return mixpi_apply_binary(ctx, MIXP_OP_##kind, MIXP_BINARY_##kind, a, b); }
MIXPI_BINARY(add, ADD)
MIXPI_BINARY(sub, SUB)
MIXPI_BINARY(mul, MUL)
MIXPI_BINARY(div, DIV)
MIXPI_BINARY(maximum, MAXIMUM)
MIXPI_BINARY(minimum, MINIMUM)
MIXPI_BINARY(swiglu, SWIGLU)
#undef MIXPI_BINARY

/* The operands are the two halves of every row: a step from row to row passes over both. */
static mixp_result mixpi_packed_infer(mixp_call *c) {
    mixp_binary_args *k = (mixp_binary_args *)c->attrs;
    const mixp_tensor *x = c->in[0];
    int last = x->rank - 1, i;
    if (mixpi_need_real(c, 1, 1) != MIXP_OK) return MIXP_ERR_DTYPE;
    if (last < 0 || x->shape[last] % 2)
        return mixpi_bad_shapes(c, "x[..., 2c] needs an even last dimension");
    k->rank = x->rank;
    memcpy(k->shape, x->shape, sizeof k->shape);
    mixpi_dense_strides(k->rank, k->shape, k->a_strides);
    for (i = 0; i < k->rank; i++) k->b_strides[i] = k->a_strides[i];
    k->shape[last] /= 2;
    return mixp_call_output(c, x->dtype, k->rank, k->shape);
}

static mixp_result mixpi_packed_forward(mixp_call *c) {
    mixp_binary_args *k = (mixp_binary_args *)c->attrs;
    k->a = mixpi_call_x(c, 0);
    k->b = mixpi_in_at(k->a, k->shape[k->rank - 1]);
    k->y = mixpi_call_y(c);
    return MIXPI_RUN(c, binary, k);
}

static mixp_result mixpi_packed_backward(mixp_call *c) {
    mixp_binary_args *k = (mixp_binary_args *)c->attrs;
    mixp_out dx = mixpi_call_dx(c, 0);
    mixp_result r;
    if (!dx.data) return MIXP_OK;
    k->dy = mixpi_call_dy(c);
    k->dx = dx;
    k->which = 0;
    r = MIXPI_RUN(c, binary_backward, k);
    if (r != MIXP_OK) return r;
    k->dx = mixpi_out_at(dx, k->shape[k->rank - 1]);
    k->which = 1;
    return MIXPI_RUN(c, binary_backward, k);
}

MIXPREC_API mixp_tensor *mixp_swiglu_packed(mixp_context *ctx, mixp_tensor *x) {
    mixp_binary_args k;
    memset(&k, 0, sizeof k);
    k.op = MIXP_BINARY_SWIGLU;
    return mixpi_apply_one(ctx, MIXP_OP_SWIGLU_PACKED, x, &k);
}

/* --- elementwise ----------------------------------------------------------------------- */

static mixp_result mixpi_unary_forward(mixp_call *c) {
    mixp_unary_args *k = (mixp_unary_args *)c->attrs;
    k->n = c->out->count;
    k->a = mixpi_call_x(c, 0);
    k->y = mixpi_call_y(c);
    return MIXPI_RUN(c, unary, k);
}

static mixp_result mixpi_unary_backward(mixp_call *c) {
    const mixp_unary_args *forward = (const mixp_unary_args *)c->attrs;
    mixp_unary_backward_args k;
    memset(&k, 0, sizeof k);
    k.op = forward->op;
    k.p = forward->p;
    k.q = forward->q;
    k.n = forward->n;
    k.dy = mixpi_call_dy(c);
    k.a = forward->a;
    k.y = mixpi_tensor_in(c->out);
    k.da = mixpi_call_dx(c, 0);
    return k.da.data ? MIXPI_RUN(c, unary_backward, &k) : MIXP_OK;
}

static mixp_tensor *mixpi_apply_unary(mixp_context *ctx, mixp_op_id id, mixp_unary op,
                                      mixp_tensor *x, float p) {
    mixp_unary_args k;
    memset(&k, 0, sizeof k);
    k.op = op;
    k.p = p;
    return mixpi_apply_one(ctx, id, x, &k);
}

#define MIXPI_UNARY(name, id, kind)                                                       \
    MIXPREC_API mixp_tensor *mixp_##name(mixp_context *ctx, mixp_tensor *x)               \
    { return mixpi_apply_unary(ctx, MIXP_OP_##id, MIXP_UNARY_##kind, x, 0.0f); }
MIXPI_UNARY(relu, RELU, RELU)
MIXPI_UNARY(gelu, GELU, GELU_ERF)
MIXPI_UNARY(gelu_tanh, GELU_TANH, GELU_TANH)
MIXPI_UNARY(silu, SILU, SILU)
MIXPI_UNARY(tanh, TANH, TANH)
MIXPI_UNARY(sigmoid, SIGMOID, SIGMOID)
MIXPI_UNARY(sqrt, SQRT, SQRT)
MIXPI_UNARY(exp, EXP, EXP)
MIXPI_UNARY(log, LOG, LOG)
MIXPI_UNARY(abs, ABS, ABS)
MIXPI_UNARY(sin, SIN, SIN)
MIXPI_UNARY(cos, COS, COS)
MIXPI_UNARY(relu_squared, RELU_SQUARED, RELU_SQUARED)
#undef MIXPI_UNARY

MIXPREC_API mixp_tensor *mixp_scale(mixp_context *ctx, mixp_tensor *x, float factor)
{ return mixpi_apply_unary(ctx, MIXP_OP_SCALE, MIXP_UNARY_SCALE, x, factor); }
MIXPREC_API mixp_tensor *mixp_pow(mixp_context *ctx, mixp_tensor *x, float exponent)
{ return mixpi_apply_unary(ctx, MIXP_OP_POW, MIXP_UNARY_POW, x, exponent); }
MIXPREC_API mixp_tensor *mixp_neg(mixp_context *ctx, mixp_tensor *x)
{ return mixpi_apply_unary(ctx, MIXP_OP_NEG, MIXP_UNARY_SCALE, x, -1.0f); }

/* By bits: above 0 and finite. */
static int mixpi_is_positive(float x) { return mixp_bits_of_f32(x) - 1u < 0x7F7FFFFFu; }

static mixp_result mixpi_soft_cap_infer(mixp_call *c) {
    const mixp_unary_args *k = (const mixp_unary_args *)c->attrs;
    if (mixpi_is_positive(k->p)) return mixpi_same_infer(c);
    return mixp_context_fail(c->ctx, MIXP_ERR_ARGUMENT,
                             "soft_cap: cap is %g; it must be above 0", (double)k->p);
}

MIXPREC_API mixp_tensor *mixp_soft_cap(mixp_context *ctx, mixp_tensor *x, float cap)
{ return mixpi_apply_unary(ctx, MIXP_OP_SOFT_CAP, MIXP_UNARY_SOFT_CAP, x, cap); }

static mixp_result mixpi_clamp_infer(mixp_call *c) {
    const mixp_unary_args *k = (const mixp_unary_args *)c->attrs;
    if (!mixpi_is_nan(k->p) && !mixpi_is_nan(k->q) && k->p <= k->q)
        return mixpi_same_infer(c);
    return mixp_context_fail(c->ctx, MIXP_ERR_ARGUMENT,
                             "clamp: low is %g and high is %g; low must not be above high",
                             (double)k->p, (double)k->q);
}

MIXPREC_API mixp_tensor *mixp_clamp(mixp_context *ctx, mixp_tensor *x, float low,
                                    float high) {
    mixp_unary_args k;
    memset(&k, 0, sizeof k);
    k.op = MIXP_UNARY_CLAMP;
    k.p = low;
    k.q = high;
    return mixpi_apply_one(ctx, MIXP_OP_CLAMP, x, &k);
}

/* --- sum, mean ------------------------------------------------------------------------ */

typedef struct mixpi_reduction {
    int dim, keep, mean;
    mixp_reduce_args k;
} mixpi_reduction;

/* x as [outer, n, inner] around the dimension that is reduced, and the result's shape. */
typedef struct mixpi_reduced {
    int64_t outer, n, inner;
    int     rank;
    int64_t shape[MIXP_MAX_RANK];
} mixpi_reduced;

static mixp_result mixpi_reduce_shape(mixp_call *c, int dim, int keep, mixpi_reduced *to) {
    const mixp_tensor *x = c->in[0];
    int i, axis = mixpi_axis(dim, x->rank);
    if (mixpi_need_real(c, 1, 1) != MIXP_OK) return MIXP_ERR_DTYPE;
    if (dim != MIXP_ALL && axis < 0)
        return mixpi_bad_shapes(c, "dim must be one of its own");
    to->outer = to->n = to->inner = 1;
    to->rank = 0;
    for (i = 0; i < x->rank; i++) {
        int gone = dim == MIXP_ALL || i == axis;
        int64_t *size = gone ? &to->n : i < axis ? &to->outer : &to->inner;
        *size *= x->shape[i];
        if (!gone || keep) to->shape[to->rank++] = gone ? 1 : x->shape[i];
    }
    return MIXP_OK;
}

static mixp_result mixpi_reduce_infer(mixp_call *c) {
    mixpi_reduction *p = (mixpi_reduction *)c->attrs;
    mixpi_reduced to;
    mixp_result r = mixpi_reduce_shape(c, p->dim, p->keep, &to);
    if (r != MIXP_OK) return r;
    p->k.outer = to.outer;
    p->k.n = to.n;
    p->k.inner = to.inner;
    p->k.factor = p->mean ? (float)(1.0 / (double)to.n) : 1.0f;
    return mixp_call_output(c, c->in[0]->dtype, to.rank, to.shape);
}

static mixp_result mixpi_reduce_both(mixp_call *c) {
    mixp_reduce_args *k = &((mixpi_reduction *)c->attrs)->k;
    k->a = mixpi_call_from(c);
    k->y = mixpi_call_to(c);
    if (!k->y.data) return MIXP_OK;
    return c->out->grad ? MIXPI_RUN(c, reduce_backward, k) : MIXPI_RUN(c, reduce, k);
}

static mixp_tensor *mixpi_apply_reduction(mixp_context *ctx, mixp_op_id id,
                                          mixp_tensor *x, int dim, int keep) {
    mixpi_reduction p;
    memset(&p, 0, sizeof p);
    p.dim = dim;
    p.keep = keep != 0;
    p.mean = id == MIXP_OP_MEAN;
    return mixpi_apply_one(ctx, id, x, &p);
}

MIXPREC_API mixp_tensor *mixp_sum(mixp_context *ctx, mixp_tensor *x, int dim, int keep)
{ return mixpi_apply_reduction(ctx, MIXP_OP_SUM, x, dim, keep); }
MIXPREC_API mixp_tensor *mixp_mean(mixp_context *ctx, mixp_tensor *x, int dim, int keep)
{ return mixpi_apply_reduction(ctx, MIXP_OP_MEAN, x, dim, keep); }

/* --- max, argmax ----------------------------------------------------------------------- */

typedef struct mixpi_maximum {
    int dim, keep, index;       /* index: argmax                                           */
    mixp_max_args k;
} mixpi_maximum;

static mixp_result mixpi_max_infer(mixp_call *c) {
    mixpi_maximum *p = (mixpi_maximum *)c->attrs;
    mixpi_reduced to;
    mixp_result r = mixpi_reduce_shape(c, p->dim, p->keep, &to);
    if (r != MIXP_OK) return r;
    p->k.outer = to.outer;
    p->k.n = to.n;
    p->k.inner = to.inner;
    if (to.n > 0x7FFFFFFF)
        return mixp_context_fail(c->ctx, MIXP_ERR_SHAPE,
                                 "%s: among %.0f elements; there may be 2^31 - 1",
                                 c->op->name, (double)to.n);
    if (p->index) return mixpi_call_output_fixed(c, MIXP_I32, to.rank, to.shape);
    return mixp_call_output(c, c->in[0]->dtype, to.rank, to.shape);
}

static mixp_result mixpi_max_forward(mixp_call *c) {
    mixpi_maximum *p = (mixpi_maximum *)c->attrs;
    mixp_max_args *k = &p->k;
    int64_t count = c->out->count;
    k->a = mixpi_call_x(c, 0);
    if (p->index) {
        k->index = (int32_t *)c->out->data;
        return MIXPI_RUN(c, max, k);
    }
    if (!mixp_call_save(c, 0, MIXP_I32, 1, &count) ||
        !mixp_call_save(c, 1, MIXP_I32, 1, &count)) return MIXP_ERR_MEMORY;
    k->index = (int32_t *)c->saved[0]->data;
    k->ties = (int32_t *)c->saved[1]->data;
    k->y = mixpi_call_y(c);
    return MIXPI_RUN(c, max, k);
}

static mixp_result mixpi_max_backward(mixp_call *c) {
    const mixpi_maximum *p = (const mixpi_maximum *)c->attrs;
    mixp_max_backward_args k;
    memset(&k, 0, sizeof k);
    k.outer = p->k.outer;
    k.n = p->k.n;
    k.inner = p->k.inner;
    k.shared = p->dim == MIXP_ALL;  /* plant: max_shared */
    k.a = p->k.a;
    k.dy = mixpi_call_dy(c);
    k.index = p->k.index;
    k.ties = p->k.ties;
    k.da = mixpi_call_dx(c, 0);
    return k.da.data ? MIXPI_RUN(c, max_backward, &k) : MIXP_OK;
}

static mixp_tensor *mixpi_apply_max(mixp_context *ctx, mixp_op_id id, mixp_tensor *x, int dim,
                                    int keep) {
    mixpi_maximum p;
    memset(&p, 0, sizeof p);
    p.dim = dim;
    p.keep = keep != 0;
    p.index = id == MIXP_OP_ARGMAX;
    return mixpi_apply_one(ctx, id, x, &p);
}

MIXPREC_API mixp_tensor *mixp_max(mixp_context *ctx, mixp_tensor *x, int dim, int keep)
{ return mixpi_apply_max(ctx, MIXP_OP_MAX, x, dim, keep); }
MIXPREC_API mixp_tensor *mixp_argmax(mixp_context *ctx, mixp_tensor *x, int dim, int keep)
{ return mixpi_apply_max(ctx, MIXP_OP_ARGMAX, x, dim, keep); }

/* --- softmax, norms -------------------------------------------------------------------- */

static mixp_result mixpi_softmax_infer(mixp_call *c) {
    if (c->in[0]->rank < 1)
        return mixpi_bad_shapes(c, "x[..., n] needs a last dimension");
    return mixpi_same_infer(c);
}

static mixp_result mixpi_softmax_forward(mixp_call *c) {
    mixp_softmax_args *k = (mixp_softmax_args *)c->attrs;       /* log_of is there already */
    k->rows = mixpi_rows_of(c->out);
    k->cols = mixpi_last_dim(c->out);
    k->a = mixpi_call_x(c, 0);
    k->y = mixpi_call_y(c);
    return MIXPI_RUN(c, softmax, k);
}

static mixp_result mixpi_softmax_backward(mixp_call *c) {
    const mixp_softmax_args *forward = (const mixp_softmax_args *)c->attrs;
    mixp_softmax_backward_args k;
    memset(&k, 0, sizeof k);
    k.rows = forward->rows;
    k.cols = forward->cols;
    k.log_of = forward->log_of;
    k.dy = mixpi_call_dy(c);
    k.y = mixpi_tensor_in(c->out);
    k.da = mixpi_call_dx(c, 0);
    return k.da.data ? MIXPI_RUN(c, softmax_backward, &k) : MIXP_OK;
}

static mixp_tensor *mixpi_apply_softmax(mixp_context *ctx, mixp_op_id id, mixp_tensor *x,
                                        int log_of) {
    mixp_softmax_args k;
    memset(&k, 0, sizeof k);
    k.log_of = log_of;
    return mixpi_apply_one(ctx, id, x, &k);
}

MIXPREC_API mixp_tensor *mixp_softmax(mixp_context *ctx, mixp_tensor *x)
{ return mixpi_apply_softmax(ctx, MIXP_OP_SOFTMAX, x, 0); }
MIXPREC_API mixp_tensor *mixp_log_softmax(mixp_context *ctx, mixp_tensor *x)
{ return mixpi_apply_softmax(ctx, MIXP_OP_LOG_SOFTMAX, x, 1); }

static mixp_result mixpi_norm_infer(mixp_call *c) {
    const mixp_norm_args *k = (const mixp_norm_args *)c->attrs;
    int i;
    if (mixpi_need_real(c, 1, 3) != MIXP_OK) return MIXP_ERR_DTYPE;
    if (mixp_bits_of_f32(k->eps) - 1u >= 0x7F7FFFFFu)   /* by bits: not positive and finite */
        return mixp_context_fail(c->ctx, MIXP_ERR_ARGUMENT,
                                 "%s: eps is %g; it must be above 0", c->op->name,
                                 (double)k->eps);
    for (i = 1; i < 3; i++)
        if (c->in[i] &&
            (c->in[i]->rank != 1 || c->in[i]->count != mixpi_last_dim(c->in[0])))
            return mixpi_bad_shapes(c,
                                    "gamma and beta have the size of the last dimension");
    return mixpi_softmax_infer(c);
}

static mixp_result mixpi_norm_forward(mixp_call *c) {
    mixp_norm_args *k = (mixp_norm_args *)c->attrs;     /* rms and eps are there already */
    k->rows = mixpi_rows_of(c->out);
    k->cols = mixpi_last_dim(c->out);
    if (!mixp_call_save(c, 0, MIXP_F32, 1, &k->rows) ||
        !mixp_call_save(c, 1, MIXP_F32, 1, &k->rows)) return MIXP_ERR_MEMORY;
    k->a = mixpi_call_x(c, 0);
    k->gamma = mixpi_call_x(c, 1);
    k->beta = mixpi_call_x(c, 2);
    k->y = mixpi_call_y(c);
    k->mean = mixpi_saved(c, 0);
    k->rstd = mixpi_saved(c, 1);
    return MIXPI_RUN(c, norm, k);
}

static mixp_result mixpi_norm_backward(mixp_call *c) {
    const mixp_norm_args *forward = (const mixp_norm_args *)c->attrs;
    mixp_norm_backward_args k;
    memset(&k, 0, sizeof k);
    k.rows = forward->rows;
    k.cols = forward->cols;
    k.rms = forward->rms;
    k.dy = mixpi_call_dy(c);
    k.a = forward->a;
    k.gamma = forward->gamma;
    k.mean = forward->mean;
    k.rstd = forward->rstd;
    k.da = mixpi_call_dx(c, 0);
    k.dgamma = mixpi_call_dx(c, 1);
    k.dbeta = mixpi_call_dx(c, 2);
    return MIXPI_RUN(c, norm_backward, &k);
}

MIXPREC_API mixp_tensor *mixp_layer_norm(mixp_context *ctx, mixp_tensor *x,
                                         mixp_tensor *gamma, mixp_tensor *beta,
                                         float eps) {
    mixp_norm_args k;
    memset(&k, 0, sizeof k);
    k.eps = eps;
    return mixpi_apply_op(ctx, MIXP_OP_LAYER_NORM, 1, x, gamma, beta, &k);
}

MIXPREC_API mixp_tensor *mixp_rms_norm(mixp_context *ctx, mixp_tensor *x,
                                       mixp_tensor *gamma, float eps) {
    mixp_norm_args k;
    memset(&k, 0, sizeof k);
    k.rms = 1;
    k.eps = eps;
    return mixpi_apply_op(ctx, MIXP_OP_RMS_NORM, 1, x, gamma, NULL, &k);
}

/* --- embedding ------------------------------------------------------------------------- */

/* A kernel whose indices lie in host memory has refused them: says which is wrong. */
static mixp_result mixpi_bad_index(mixp_call *c, const char *what, int64_t limit,
                                   int64_t ignore) {
    const mixp_tensor *t = c->in[1];
    const int32_t *ids = (const int32_t *)t->data;
    int64_t i =
        c->ctx->device->download ? -1 : mixpi_bad_id(ids, t->count, limit, ignore);
    if (i < 0) return MIXP_ERR_ARGUMENT;
    return mixp_context_fail(c->ctx, MIXP_ERR_ARGUMENT,
                             "%s: %s %d at row %.0f is outside [0, %.0f)", c->op->name,
                             what, (int)ids[i], (double)i, (double)limit);
}

static mixp_result mixpi_embedding_infer(mixp_call *c) {
    mixp_tensor *table = c->in[0], *ids = c->in[1];
    int64_t shape[MIXP_MAX_RANK];
    if (mixpi_need_indices(c) != MIXP_OK) return MIXP_ERR_DTYPE;
    if (table->rank != 2 || ids->rank >= MIXP_MAX_RANK)
        return mixpi_bad_shapes(c, "table[vocab, c] and ids of rank at most 7");
    memcpy(shape, ids->shape, sizeof shape);
    shape[ids->rank] = table->shape[1];  /* plant: embedding_shape */
    return mixp_call_output(c, table->dtype, ids->rank + 1, shape);
}

static mixp_result mixpi_embedding_forward(mixp_call *c) {
    mixp_embedding_args *k = (mixp_embedding_args *)c->attrs;
    mixp_result r;
    k->rows = c->in[1]->count;
    k->cols = c->in[0]->shape[1];
    k->vocab = c->in[0]->shape[0];
    k->ids = (const int32_t *)c->in[1]->data;
    k->table = mixpi_call_x(c, 0);
    k->y = mixpi_call_y(c);
    r = MIXPI_RUN(c, embedding, k);
    return r == MIXP_ERR_ARGUMENT ? mixpi_bad_index(c, "id", k->vocab, MIXPI_NO_INDEX)
                                  : r;
}

static mixp_result mixpi_embedding_backward(mixp_call *c) {
    const mixp_embedding_args *forward = (const mixp_embedding_args *)c->attrs;
    mixp_embedding_backward_args k;
    memset(&k, 0, sizeof k);
    k.rows = forward->rows;
    k.cols = forward->cols;
    k.vocab = forward->vocab;
    k.ids = forward->ids;
    k.dy = mixpi_call_dy(c);
    k.dtable = mixpi_call_dx(c, 0);
    return k.dtable.data ? MIXPI_RUN(c, embedding_backward, &k) : MIXP_OK;
}

MIXPREC_API mixp_tensor *mixp_embedding(mixp_context *ctx, mixp_tensor *table,
                                        mixp_tensor *ids) {
    mixp_embedding_args k;
    memset(&k, 0, sizeof k);
    return mixpi_apply_op(ctx, MIXP_OP_EMBEDDING, 2, table, ids, NULL, &k);
}

/* --- gather, where, masked_fill, rope -------------------------------------------------- */

typedef struct mixpi_gathering {
    int dim;
    mixp_gather_args k;
} mixpi_gathering;

static mixp_result mixpi_gather_infer(mixp_call *c) {
    mixpi_gathering *p = (mixpi_gathering *)c->attrs;
    const mixp_tensor *x = c->in[0], *ids = c->in[1];
    int axis = mixpi_axis(p->dim, x->rank), i;
    if (mixpi_need_indices(c) != MIXP_OK) return MIXP_ERR_DTYPE;
    if (axis < 0 || ids->rank != x->rank)
        return mixpi_bad_shapes(c, "dim must be one of theirs, and they have the same rank");
    p->k.outer = p->k.inner = 1;
    for (i = 0; i < x->rank; i++) {
        if (i == axis) continue;
        if (x->shape[i] != ids->shape[i])
            return mixpi_bad_shapes(c, "all dimensions but dim must be equal");
        if (i < axis) p->k.outer *= x->shape[i];
        else p->k.inner *= x->shape[i];
    }
    p->k.n = x->shape[axis];
    p->k.m = ids->shape[axis];
    return mixp_call_output(c, x->dtype, ids->rank, ids->shape);
}

static mixp_result mixpi_gather_forward(mixp_call *c) {
    mixp_gather_args *k = &((mixpi_gathering *)c->attrs)->k;
    mixp_result r;
    k->ids = (const int32_t *)c->in[1]->data;
    k->a = mixpi_call_x(c, 0);
    k->y = mixpi_call_y(c);
    r = MIXPI_RUN(c, gather, k);
    return r == MIXP_ERR_ARGUMENT ? mixpi_bad_index(c, "id", k->n, MIXPI_NO_INDEX) : r;
}

/* Zeros, then what the ids name is added. */
static mixp_result mixpi_gather_add(mixp_call *c, mixp_out to) {
    mixp_gather_args k = ((const mixpi_gathering *)c->attrs)->k;
    mixp_result r = MIXP_OK;
    if (!to.accumulate) r = mixpi_fill_with(c->ctx, to, c->in[0]->count, 0.0);
    k.a = mixpi_call_dy(c);
    k.y = to;
    k.y.accumulate = 1;
    return r == MIXP_OK ? MIXPI_RUN(c, gather_backward, &k) : r;
}

/* Ids that meet in an array of few bits: their sum is made in f32, and rounded once. */
static mixp_result mixpi_gather_backward(mixp_call *c) {
    mixp_out to = mixpi_call_dx(c, 0);
    int64_t count = c->in[0]->count;
    mixp_tensor *sums;
    mixp_result r;
    if (!to.data) return MIXP_OK;
    if (to.dtype == MIXP_F32 || ((const mixpi_gathering *)c->attrs)->k.m == 1)
        return mixpi_gather_add(c, to);
    sums = mixp_activation(c->ctx, MIXP_F32, 1, &count);
    if (!sums) return MIXP_ERR_MEMORY;
    r = mixpi_gather_add(c, mixpi_tensor_out(sums, 0));
    if (r == MIXP_OK) r = mixpi_add_into(c->ctx, to, mixpi_tensor_in(sums), count);
    mixpi_arena_give(c->ctx, &c->ctx->dev, sums->data, mixpi_bytes(sums));
    return r;
}

MIXPREC_API mixp_tensor *mixp_gather(mixp_context *ctx, mixp_tensor *x, int dim,
                                     mixp_tensor *ids) {
    mixpi_gathering p;
    memset(&p, 0, sizeof p);
    p.dim = dim;
    return mixpi_apply_op(ctx, MIXP_OP_GATHER, 2, x, ids, NULL, &p);
}

/* Inputs: the mask, and up to two that it chooses from; filled: masked_fill, whose inputs are x and
 * the mask. */
typedef struct mixpi_choice {
    int filled;
    mixp_where_args k;
} mixpi_choice;

/* Input 0, 1, 2 of where as the call has it: mask, a, b. */
static int mixpi_choice_input(const mixpi_choice *p, int i) {
    if (!p->filled) return i;
    return i == 0 ? 1 : i == 2 ? 0 : -1;
}

/* All axes, and the dtypes. */
static mixp_result mixpi_where_infer(mixp_call *c) {
    mixpi_choice *p = (mixpi_choice *)c->attrs;
    mixp_where_args *k = &p->k;
    int64_t *strides[3], step[3] = { 1, 1, 1 };
    int i, axis;
    strides[0] = k->mask_strides;
    strides[1] = k->a_strides;
    strides[2] = k->b_strides;
    for (i = 0; i < c->n_in; i++)
        if (c->in[i] && c->in[i]->rank > k->rank) k->rank = c->in[i]->rank;
    for (axis = k->rank - 1; axis >= 0; axis--) {
        k->shape[axis] = 1;
        for (i = 0; i < 3; i++) {
            int own = mixpi_choice_input(p, i);
            int64_t n = own < 0 ? 1 : mixpi_broadcast_axis(c->in[own], k->rank, axis, &step[i],
                                                           &strides[i][axis]);
            if (n != 1 && k->shape[axis] != 1 && n != k->shape[axis])
                return mixpi_bad_shapes(
                    c, "aligned at the right, dimensions must be equal or 1");
            if (n != 1) k->shape[axis] = n;
        }
    }
    return mixp_call_output(c, mixpi_widest(c->n_in, c->in), k->rank, k->shape);
}

static mixp_result mixpi_choice_infer(mixp_call *c) {
    const mixpi_choice *p = (const mixpi_choice *)c->attrs;
    const mixp_tensor *mask = c->in[mixpi_choice_input(p, 0)];
    char quoted[MIXPI_QUOTED];
    int i;
    if (mask->dtype != MIXP_U8 && mask->dtype != MIXP_I32)
        return mixp_context_fail(c->ctx, MIXP_ERR_DTYPE,
                                 "%s: the mask%s is %s; it must be u8 or i32", c->op->name,
                                 mixpi_quoted(mask, quoted), mixp_dtype_name(mask->dtype));
    for (i = 1; i < 3; i++) {
        int own = mixpi_choice_input(p, i);
        if (own < 0 || mixpi_real(c->in[own]->dtype)) continue;
        return mixp_context_fail(c->ctx, MIXP_ERR_DTYPE,
                                 "%s: input %d%s is %s; it must be f32, f16 or bf16",
                                 c->op->name, own, mixpi_quoted(c->in[own], quoted),
                                 mixp_dtype_name(c->in[own]->dtype));
    }
    return mixpi_where_infer(c);
}

/* Kernels read a mask of real numbers; in bf16 no integer becomes 0. */
static mixp_result mixpi_choice_forward(mixp_call *c) {
    mixpi_choice *p = (mixpi_choice *)c->attrs;
    mixp_where_args *k = &p->k;
    const mixp_tensor *mask = c->in[mixpi_choice_input(p, 0)];
    int a = mixpi_choice_input(p, 1);
    mixp_tensor *saved = mixp_call_save(c, 0, MIXP_BF16, mask->rank, mask->shape);
    mixp_result r;
    if (!saved) return MIXP_ERR_MEMORY;
    r = mixpi_convert_to(c->ctx, mixpi_tensor_out(saved, 0), mixpi_tensor_in(mask),
                         mask->count);
    k->mask = mixpi_tensor_in(saved);
    if (a >= 0) k->a = mixpi_call_x(c, a);
    k->b = mixpi_call_x(c, mixpi_choice_input(p, 2));
    k->y = mixpi_call_y(c);
    return r == MIXP_OK ? MIXPI_RUN(c, where, k) : r;
}

static mixp_result mixpi_choice_backward(mixp_call *c) {
    mixpi_choice *p = (mixpi_choice *)c->attrs;
    mixp_where_args *k = &p->k;
    mixp_result r = MIXP_OK;
    k->dy = mixpi_call_dy(c);
    for (k->which = 0; k->which < 2 && r == MIXP_OK; k->which++) {
        int own = mixpi_choice_input(p, 1 + k->which);
        if (own < 0) continue;
        k->dx = mixpi_call_dx(c, own);
        if (k->dx.data) r = MIXPI_RUN(c, where_backward, k);
    }
    return r;
}

MIXPREC_API mixp_tensor *mixp_where(mixp_context *ctx, mixp_tensor *mask, mixp_tensor *a,
                                    mixp_tensor *b) {
    mixpi_choice p;
    memset(&p, 0, sizeof p);
    return mixpi_apply_op(ctx, MIXP_OP_WHERE, 3, mask, a, b, &p);
}

MIXPREC_API mixp_tensor *mixp_masked_fill(mixp_context *ctx, mixp_tensor *x,
                                          mixp_tensor *mask, float value) {
    mixpi_choice p;
    memset(&p, 0, sizeof p);
    p.filled = 1;
    p.k.value = value;
    return mixpi_apply_op(ctx, MIXP_OP_MASKED_FILL, 2, x, mask, NULL, &p);
}

static mixp_result mixpi_rope_infer(mixp_call *c) {
    mixp_rope_args *k = (mixp_rope_args *)c->attrs;
    const mixp_tensor *x = c->in[0];
    if (x->rank < 2 || k->d < 2 || k->d % 2 || x->shape[x->rank - 1] % k->d)
        return mixpi_bad_shapes(c, "x[..., t, c] with c a multiple of head_dim, which is even");
    if (!(k->base > 0.0) || k->first < 0)
        return mixp_context_fail(c->ctx, MIXP_ERR_ARGUMENT,
                                 "rope: base is %g and first %.0f; base must be above 0, "
                                 "first not below",
                                 k->base, (double)k->first);
    k->t = x->shape[x->rank - 2];
    k->heads = x->shape[x->rank - 1] / k->d;
    k->rows = x->count / (k->t * k->heads * k->d);
    return mixpi_same_infer(c);
}

static mixp_result mixpi_rope_both(mixp_call *c) {
    mixp_rope_args *k = (mixp_rope_args *)c->attrs;
    k->back = c->out->grad != NULL;  /* plant: rope_back */
    k->a = mixpi_call_from(c);
    k->y = mixpi_call_to(c);
    return k->y.data ? MIXPI_RUN(c, rope, k) : MIXP_OK;
}

MIXPREC_API mixp_tensor *mixp_rope(mixp_context *ctx, mixp_tensor *x,
                                   const mixp_rope_desc *desc) {
    mixp_rope_args k;
    memset(&k, 0, sizeof k);
    if (desc) {
        k.d = desc->head_dim;
        k.interleaved = desc->interleaved != 0;
        k.base = mixp_bits_of_f64(desc->base) << 1 == 0 ? 10000.0 : desc->base;
        k.first = desc->first;
    }
    return mixpi_apply_one(ctx, MIXP_OP_ROPE, x, &k);
}

/* --- dropout --------------------------------------------------------------------------- */

static mixp_result mixpi_dropout_infer(mixp_call *c) {
    const mixp_dropout_args *k = (const mixp_dropout_args *)c->attrs;
    if (mixp_bits_of_f32(k->p) >= 0x3F800000u)     /* by bits: NaN, negative, or 1 and above */
        return mixp_context_fail(c->ctx, MIXP_ERR_ARGUMENT,
                                 "dropout: p is %g; it must be in [0, 1)", (double)k->p);
    return mixpi_same_infer(c);
}

static mixp_result mixpi_dropout_both(mixp_call *c) {
    mixp_dropout_args *k = (mixp_dropout_args *)c->attrs;
    k->n = c->out->count;
    k->a = mixpi_call_from(c);
    k->y = mixpi_call_to(c);
    return k->y.data ? MIXPI_RUN(c, dropout, k) : MIXP_OK;
}

MIXPREC_API mixp_tensor *mixp_dropout(mixp_context *ctx, mixp_tensor *x, float p,
                                      int training) {
    mixp_dropout_args k;
    if (ctx && x && x->ctx == ctx && (!training || p == 0.0f)) return x;
    memset(&k, 0, sizeof k);
    k.p = p;
    if (ctx) {
        k.seed = ctx->seed;
        k.step = ctx->step;
        /* plant: dropout_key */
        k.tensor = (uint64_t)ctx->calls_made;   /* the call's place in the step stands for it */
    }
    return mixpi_apply_one(ctx, MIXP_OP_DROPOUT, x, &k);
}

/* --- losses ---------------------------------------------------------------------------- */

static mixp_result mixpi_cross_entropy_infer(mixp_call *c) {
    mixp_tensor *logits = c->in[0], *targets = c->in[1];
    const mixp_cross_entropy_args *k = (const mixp_cross_entropy_args *)c->attrs;
    if (mixpi_need_indices(c) != MIXP_OK) return MIXP_ERR_DTYPE;
    if (mixp_bits_of_f32(k->smoothing) > 0x3F800000u)   /* by bits: NaN, below 0 or above 1 */
        return mixp_context_fail(c->ctx, MIXP_ERR_ARGUMENT,
                                 "cross_entropy: smoothing is %g; it must be in [0, 1]",
                                 (double)k->smoothing);
    if (logits->rank < 1 || targets->rank != logits->rank - 1 ||
        targets->count != mixpi_rows_of(logits))
        return mixpi_bad_shapes(c, "logits[..., vocab] and targets[...]");
    return mixpi_call_output_fixed(c, MIXP_F32, 0, NULL);
}

static mixp_result mixpi_cross_entropy_forward(mixp_call *c) {
    mixp_cross_entropy_args *k = (mixp_cross_entropy_args *)c->attrs;   /* with `ignore` */
    mixp_result r;
    k->rows = mixpi_rows_of(c->in[0]);
    k->cols = mixpi_last_dim(c->in[0]);
    if (!mixp_call_save(c, 0, MIXP_F32, 1, &k->rows) ||
        !mixp_call_save(c, 1, MIXP_F32, 0, NULL))
        return MIXP_ERR_MEMORY;
    k->targets = (const int32_t *)c->in[1]->data;
    k->logits = mixpi_call_x(c, 0);
    k->loss = (float *)c->out->data;
    k->lse = mixpi_saved(c, 0);
    k->counted = mixpi_saved(c, 1);
    r = MIXPI_RUN(c, cross_entropy, k);
    return r == MIXP_ERR_ARGUMENT ? mixpi_bad_index(c, "target", k->cols, k->ignore) : r;
}

static mixp_result mixpi_cross_entropy_backward(mixp_call *c) {
    const mixp_cross_entropy_args *forward = (const mixp_cross_entropy_args *)c->attrs;
    mixp_cross_entropy_backward_args k;
    memset(&k, 0, sizeof k);
    k.rows = forward->rows;
    k.cols = forward->cols;
    k.ignore = forward->ignore;
    k.smoothing = forward->smoothing;
    k.targets = forward->targets;
    k.dloss = mixpi_call_dy(c);
    k.logits = forward->logits;
    k.lse = forward->lse;
    k.counted = forward->counted;
    k.dlogits = mixpi_call_dx(c, 0);
    return k.dlogits.data ? MIXPI_RUN(c, cross_entropy_backward, &k) : MIXP_OK;
}

MIXPREC_API mixp_tensor *mixp_cross_entropy(mixp_context *ctx, mixp_tensor *logits,
                                            mixp_tensor *targets, int32_t ignore)
{ return mixp_cross_entropy_smooth(ctx, logits, targets, ignore, 0.0f); }

MIXPREC_API mixp_tensor *mixp_cross_entropy_smooth(mixp_context *ctx, mixp_tensor *logits,
                                                   mixp_tensor *targets, int32_t ignore,
                                                   float smoothing) {
    mixp_cross_entropy_args k;
    memset(&k, 0, sizeof k);
    k.ignore = ignore;
    k.smoothing = smoothing + 0.0f;     /* -0 is 0 */
    return mixpi_apply_op(ctx, MIXP_OP_CROSS_ENTROPY, 2, logits, targets, NULL, &k);
}

/* Those of a difference alone are the same with their two inputs exchanged, and so is the
 * gradient: the target may have one. */
static int mixpi_loss_is_even(mixp_loss_kind kind) {
    return kind == MIXP_LOSS_MSE || kind == MIXP_LOSS_L1 || kind == MIXP_LOSS_HUBER ||
           kind == MIXP_LOSS_SMOOTH_L1;
}

static mixp_result mixpi_loss_infer(mixp_call *c) {
    const mixp_loss_args *k = (const mixp_loss_args *)c->attrs;
    const mixp_tensor *x = c->in[0], *t = c->in[1];
    int bounded = k->kind == MIXP_LOSS_HUBER || k->kind == MIXP_LOSS_SMOOTH_L1;
    if (mixpi_need_real(c, 2, 2) != MIXP_OK) return MIXP_ERR_DTYPE;
    if (x->rank != t->rank || memcmp(x->shape, t->shape, sizeof x->shape))
        return mixpi_bad_shapes(c, "they must be equal");
    if (!mixpi_loss_is_even(k->kind) && mixpi_wants_grad(t))
        return mixp_context_fail(c->ctx, MIXP_ERR_ARGUMENT,
                                 "%s: the target cannot have a gradient; only "
                                 "mse, l1, smooth_l1 and huber give one",
                                 c->op->name);
    if (bounded && !mixpi_is_positive(k->delta))
        return mixp_context_fail(c->ctx, MIXP_ERR_ARGUMENT,
                                 "%s: its bound is %g; it must be above 0", c->op->name,
                                 (double)k->delta);
    return mixpi_call_output_fixed(c, MIXP_F32, 0, NULL);
}

static mixp_result mixpi_loss_forward(mixp_call *c) {
    mixp_loss_args *k = (mixp_loss_args *)c->attrs;     /* kind and delta are there already */
    int by_rows = k->kind == MIXP_LOSS_KL || k->kind == MIXP_LOSS_KL_LOG;
    k->n = c->in[0]->count;
    k->over = by_rows ? mixpi_rows_of(c->in[0]) : k->n;
    k->a = mixpi_call_x(c, 0);
    k->target = mixpi_call_x(c, 1);
    k->y = (float *)c->out->data;
    return MIXPI_RUN(c, loss, k);
}

static mixp_result mixpi_loss_backward(mixp_call *c) {
    const mixp_loss_args *forward = (const mixp_loss_args *)c->attrs;
    mixp_result r = MIXP_OK;
    int i;
    for (i = 0; i < 2 && r == MIXP_OK; i++) {
        mixp_loss_backward_args k;
        memset(&k, 0, sizeof k);
        k.kind = forward->kind;
        k.n = forward->n;
        k.over = forward->over;
        k.delta = forward->delta;
        k.dloss = mixpi_call_dy(c);
        k.a = mixpi_call_x(c, i);
        k.target = mixpi_call_x(c, 1 - i);
        k.da = mixpi_call_dx(c, i);
        if (k.da.data) r = MIXPI_RUN(c, loss_backward, &k);
    }
    return r;
}

static mixp_tensor *mixpi_apply_loss(mixp_context *ctx, mixp_op_id id, mixp_loss_kind kind,
                                     float delta, mixp_tensor *x, mixp_tensor *t) {
    mixp_loss_args k;
    memset(&k, 0, sizeof k);
    k.kind = kind;
    k.delta = delta;
    return mixpi_apply_op(ctx, id, 2, x, t, NULL, &k);
}

#define MIXPI_LOSS(name, id, which)                                                       \
    MIXPREC_API mixp_tensor *mixp_##name(mixp_context *ctx, mixp_tensor *x, mixp_tensor *t) \
    { return mixpi_apply_loss(ctx, MIXP_OP_##id, MIXP_LOSS_##which, 0.0f, x, t); }
MIXPI_LOSS(mse, MSE, MSE)
MIXPI_LOSS(bce_with_logits, BCE_WITH_LOGITS, BCE_LOGITS)
MIXPI_LOSS(bce, BCE, BCE)
MIXPI_LOSS(l1, L1, L1)
#undef MIXPI_LOSS

MIXPREC_API mixp_tensor *mixp_huber(mixp_context *ctx, mixp_tensor *x, mixp_tensor *target,
                                    float delta)
{ return mixpi_apply_loss(ctx, MIXP_OP_HUBER, MIXP_LOSS_HUBER, delta, x, target); }

MIXPREC_API mixp_tensor *mixp_smooth_l1(mixp_context *ctx, mixp_tensor *x,
                                        mixp_tensor *target, float beta) {
    int plain = mixp_bits_of_f32(beta) << 1 == 0;
    return mixpi_apply_loss(ctx, MIXP_OP_SMOOTH_L1,
                            plain ? MIXP_LOSS_L1 : MIXP_LOSS_SMOOTH_L1, beta, x, target);
}

MIXPREC_API mixp_tensor *mixp_kl_div(mixp_context *ctx, mixp_tensor *x, mixp_tensor *target,
                                     int log_target) {
    return mixpi_apply_loss(ctx, MIXP_OP_KL_DIV,
                            log_target ? MIXP_LOSS_KL_LOG : MIXP_LOSS_KL, 0.0f, x, target);
}

/* --- cast, reshape, transpose, concat, slice -------------------------------------------- */

MIXPREC_API mixp_tensor *mixp_cast(mixp_context *ctx, mixp_tensor *x, mixp_dtype dtype)
{ return mixpi_cast(ctx, x, dtype); }

typedef struct mixpi_reshape { int rank; const int64_t *shape; } mixpi_reshape;  /* the caller's */

static mixp_result mixpi_reshape_infer(mixp_call *c) {
    const mixpi_reshape *p = (const mixpi_reshape *)c->attrs;
    int64_t shape[MIXP_MAX_RANK], known = 1, count = c->in[0]->count;
    int i, open = -1;
    if (p->rank < 0 || p->rank > MIXP_MAX_RANK || (p->rank && !p->shape))
        return mixp_context_fail(c->ctx, MIXP_ERR_SHAPE,
                                 "reshape: rank %d with shape %s; the rank must be "
                                 "0 to %d",
                                 p->rank, p->shape ? "given" : "NULL", MIXP_MAX_RANK);
    for (i = 0; i < p->rank; i++) {
        shape[i] = p->shape[i];
        if (shape[i] == -1 && open < 0) open = i;
        /* plant: reshape_known */
        else if (shape[i] >= 1 && shape[i] <= count / known) known *= shape[i];
        else
            return mixpi_bad_shapes(
                c, "new dimensions are at least 1, one of them may be -1");
    }
    if (open >= 0 && count % known == 0) shape[open] = count / known;
    else if (open >= 0) return mixpi_bad_shapes(c, "the dimension -1 would not be whole");
    return mixp_call_alias(c, p->rank, shape);
}

MIXPREC_API mixp_tensor *mixp_reshape(mixp_context *ctx, mixp_tensor *x, int rank,
                                      const int64_t *shape) {
    mixpi_reshape p = { rank, shape };
    return mixpi_apply_one(ctx, MIXP_OP_RESHAPE, x, &p);
}

typedef struct mixpi_transpose { int dim0, dim1; } mixpi_transpose;

static mixp_result mixpi_transpose_infer(mixp_call *c) {
    mixpi_transpose *p = (mixpi_transpose *)c->attrs;
    mixp_tensor *x = c->in[0];
    int64_t shape[MIXP_MAX_RANK];
    if (mixpi_need_real(c, 1, 1) != MIXP_OK) return MIXP_ERR_DTYPE;
    p->dim0 = mixpi_axis(p->dim0, x->rank);
    p->dim1 = mixpi_axis(p->dim1, x->rank);
    if (p->dim0 < 0 || p->dim1 < 0)
        return mixpi_bad_shapes(c, "both dims must be its own");
    memcpy(shape, x->shape, sizeof shape);
    shape[p->dim0] = x->shape[p->dim1];
    shape[p->dim1] = x->shape[p->dim0];
    return mixp_call_output(c, x->dtype, x->rank, shape);
}

/* A copy over the shape of t; arrays and strides are still to be filled in. */
static mixp_copy_args mixpi_copy_to(const mixp_tensor *t) {
    mixp_copy_args k;
    memset(&k, 0, sizeof k);
    k.rank = t->rank;
    memcpy(k.shape, t->shape, sizeof k.shape);
    return k;
}

/* to[.., i, .., j, ..] (+)= from[.., j, .., i, ..] */
static mixp_result mixpi_transpose_both(mixp_call *c) {
    const mixpi_transpose *p = (const mixpi_transpose *)c->attrs;
    const mixp_tensor *to = c->out->grad ? c->in[0] : c->out;
    const mixp_tensor *from = c->out->grad ? c->out : c->in[0];
    mixp_copy_args k = mixpi_copy_to(to);
    int64_t *s = k.src_strides, swap;
    k.src = mixpi_call_from(c);
    k.dst = mixpi_call_to(c);
    if (!k.dst.data) return MIXP_OK;
    mixpi_dense_strides(to->rank, to->shape, k.dst_strides);
    mixpi_dense_strides(from->rank, from->shape, s);
    swap = s[p->dim0];
    s[p->dim0] = s[p->dim1];  /* plant: transpose */
    s[p->dim1] = swap;
    return MIXPI_RUN(c, copy, &k);
}

MIXPREC_API mixp_tensor *mixp_transpose(mixp_context *ctx, mixp_tensor *x, int dim0,
                                        int dim1) {
    mixpi_transpose p = { dim0, dim1 };
    return mixpi_apply_one(ctx, MIXP_OP_TRANSPOSE, x, &p);
}

/* Input i does not fit the first. */
static mixp_result mixpi_concat_misfit(mixp_call *c, int i, const char *rule) {
    char first[352], other[352], number[24];
    snprintf(number, sizeof number, "input %d", i);
    mixpi_input_text(c->in[0], "input 0", first, sizeof first);
    mixpi_input_text(c->in[i], number, other, sizeof other);
    return mixp_context_fail(c->ctx, MIXP_ERR_SHAPE, "concat: %s and %s do not fit: %s",
                             first, other, rule);
}

static mixp_result mixpi_concat_infer(mixp_call *c) {
    int *axis = (int *)c->attrs, i, j;
    mixp_tensor *x = c->in[0];
    int64_t shape[MIXP_MAX_RANK];
    if (mixpi_need_real(c, c->n_in, c->n_in) != MIXP_OK) return MIXP_ERR_DTYPE;
    *axis = mixpi_axis(*axis, x->rank);
    if (*axis < 0) return mixpi_bad_shapes(c, "dim must be one of their dimensions");
    memcpy(shape, x->shape, sizeof shape);
    for (i = 1; i < c->n_in; i++) {
        if (c->in[i]->rank != x->rank)
            return mixpi_concat_misfit(c, i, "all need the same rank");
        for (j = 0; j < x->rank; j++)
            /* plant: concat_others */
            if (j != *axis && c->in[i]->shape[j] != x->shape[j])
                return mixpi_concat_misfit(c, i, "all other dimensions must be equal");
        shape[*axis] += c->in[i]->shape[*axis];
    }
    return mixp_call_output(c, mixpi_widest(c->n_in, c->in), x->rank, shape);
}

/* Input i, whose first element is this one of the joined array: copied there, or its gradient
 * from there. */
static mixp_result mixpi_concat_part(mixp_call *c, int i, int64_t first) {
    mixp_copy_args k = mixpi_copy_to(c->in[i]);
    int back = c->out->grad != NULL;
    mixpi_dense_strides(k.rank, k.shape, back ? k.dst_strides : k.src_strides);
    mixpi_dense_strides(k.rank, c->out->shape, back ? k.src_strides : k.dst_strides);
    k.src = back ? mixpi_in_at(mixpi_call_dy(c), first) : mixpi_call_x(c, i);
    k.dst = back ? mixpi_call_dx(c, i) : mixpi_out_at(mixpi_call_y(c), first);
    return k.dst.data ? MIXPI_RUN(c, copy, &k) : MIXP_OK;
}

/* Copies the inputs into the joined array, or back: parts of its gradient to theirs. */
static mixp_result mixpi_concat_both(mixp_call *c) {
    int i, axis = *(const int *)c->attrs;
    int64_t first = 0, whole[MIXP_MAX_RANK];
    mixp_result r = MIXP_OK;
    mixpi_dense_strides(c->out->rank, c->out->shape, whole);
    for (i = 0; i < c->n_in && r == MIXP_OK; i++) {
        r = mixpi_concat_part(c, i, first);
        first += c->in[i]->shape[axis] * whole[axis];  /* plant: concat_first */
    }
    return r;
}

MIXPREC_API mixp_tensor *mixp_concat(mixp_context *ctx, int n, mixp_tensor *const *x,
                                     int dim) {
    return mixp_apply(ctx, mixp_op_builtin(MIXP_OP_CONCAT), n, x, n, &dim);
}

typedef struct mixpi_range {
    int     dim;
    int64_t first, count;
} mixpi_range;

/* size: of the dimension, or -1 when there is none. */
static mixp_result mixpi_bad_slice(mixp_call *c, int64_t size) {
    const mixpi_range *p = (const mixpi_range *)c->attrs;
    char text[336];
    mixpi_input_text(c->in[0], "x", text, sizeof text);
    if (size < 0)
        return mixp_context_fail(c->ctx, MIXP_ERR_SHAPE,
                                 "slice: %d is no dimension of %s", p->dim, text);
    return mixp_context_fail(c->ctx, MIXP_ERR_SHAPE,
                             "slice: %.0f from %.0f on along dim %d of %s; there must be "
                             "at least one, and all within its %.0f",
                             (double)p->count, (double)p->first, p->dim, text,
                             (double)size);
}

static mixp_result mixpi_slice_infer(mixp_call *c) {
    mixpi_range *p = (mixpi_range *)c->attrs;
    const mixp_tensor *x = c->in[0];
    int64_t shape[MIXP_MAX_RANK], size, first = p->first;
    int axis = mixpi_axis(p->dim, x->rank);
    if (axis < 0) return mixpi_bad_slice(c, -1);
    size = x->shape[axis];
    if (first < 0) first += size;
    /* plant: slice_inside */
    if (first > size - p->count || first < 0 || p->count < 1)
        return mixpi_bad_slice(c, size);
    p->dim = axis;
    p->first = first;
    memcpy(shape, x->shape, sizeof shape);
    shape[axis] = p->count;
    return mixp_call_output(c, x->dtype, x->rank, shape);
}

static mixp_result mixpi_slice_forward(mixp_call *c) {
    const mixpi_range *p = (const mixpi_range *)c->attrs;
    mixp_copy_args k = mixpi_copy_to(c->out);
    mixpi_dense_strides(k.rank, k.shape, k.dst_strides);
    mixpi_dense_strides(k.rank, c->in[0]->shape, k.src_strides);
    k.src = mixpi_in_at(mixpi_call_x(c, 0), p->first * k.src_strides[p->dim]);
    k.dst = mixpi_call_y(c);
    return MIXPI_RUN(c, copy, &k);
}

/* The first slice of x that is walked makes its gradient zero everywhere else; what others have
 * written there is only added to. */
static mixp_result mixpi_slice_backward(mixp_call *c) {
    const mixpi_range *p = (const mixpi_range *)c->attrs;
    mixp_copy_args k = mixpi_copy_to(c->out);
    mixp_out dx = mixpi_call_dx(c, 0);
    mixp_result r = MIXP_OK;
    if (!dx.data) return MIXP_OK;
    if (!dx.accumulate)
        r = mixpi_fill_with(c->ctx, dx, c->in[0]->count, 0.0);  /* plant: slice_rest */
    mixpi_dense_strides(k.rank, k.shape, k.src_strides);
    mixpi_dense_strides(k.rank, c->in[0]->shape, k.dst_strides);
    k.src = mixpi_call_dy(c);
    k.dst = mixpi_out_at(dx, p->first * k.dst_strides[p->dim]);
    return r == MIXP_OK ? MIXPI_RUN(c, copy, &k) : r;
}

MIXPREC_API mixp_tensor *mixp_slice(mixp_context *ctx, mixp_tensor *x, int dim,
                                    int64_t first, int64_t count) {
    mixpi_range p;
    memset(&p, 0, sizeof p);
    p.dim = dim;
    p.first = first;
    p.count = count;
    return mixpi_apply_one(ctx, MIXP_OP_SLICE, x, &p);
}

/* Why x cannot be split so, said; or MIXP_OK. */
static mixp_result mixpi_check_split(mixp_context *ctx, const mixp_tensor *x, int dim,
                                     int n) {
    int axis = mixpi_axis(dim, x->rank);
    char text[336];
    if (axis >= 0 && x->shape[axis] % n == 0) return MIXP_OK;
    mixpi_input_text(x, "x", text, sizeof text);
    return mixp_context_fail(ctx, MIXP_ERR_SHAPE, "mixp_split: %s has no dim %d%s %d",
                             text, dim,
                             axis < 0 ? " to be cut; parts:" : " that is a multiple of",
                             n);
}

MIXPREC_API mixp_result mixp_split(mixp_context *ctx, mixp_tensor *x, int dim, int n,
                                   mixp_tensor **parts) {
    int64_t size = 1;
    int i, done = 0;
    if (!ctx || !parts || n < 1)
        return mixp_context_fail(ctx, MIXP_ERR_ARGUMENT,
                                 "mixp_split: %d parts in %s; it needs at least one, and "
                                 "an array for them",
                                 n, parts ? "an array" : "no array");
    for (i = 0; i < n; i++) parts[i] = NULL;
    if (x && mixpi_check_split(ctx, x, dim, n) != MIXP_OK) return MIXP_ERR_SHAPE;
    if (x) size = x->shape[mixpi_axis(dim, x->rank)] / n;
    while (done < n && (parts[done] = mixp_slice(ctx, x, dim, done * size, size)) != NULL)
        done++;
    if (done == n) return MIXP_OK;
    for (i = 0; i < n; i++) parts[i] = NULL;
    return mixp_context_error(ctx, NULL);
}

/* --- the table ------------------------------------------------------------------------- */

#define MIXPI_ROW(name, cls, attrs, infer, forward, backward)                             \
    { #name, MIXP_CLASS_##cls, attrs, mixpi_##infer##_infer, mixpi_##forward,             \
      mixpi_##backward, NULL }
#define MIXPI_OP(name, cls, attrs, infer, family)                                         \
    MIXPI_ROW(name, cls, attrs, infer, family##_forward, family##_backward)
#define MIXPI_BOTH(name, cls, attrs, infer, family)                                       \
    MIXPI_ROW(name, cls, attrs, infer, family##_both, family##_both)
#define MIXPI_UNARY(name, cls) MIXPI_OP(name, cls, sizeof(mixp_unary_args), same, unary)
#define MIXPI_BINARY(name) MIXPI_OP(name, PROMOTE, sizeof(mixp_binary_args), binary, binary)
#define MIXPI_LOSS(name) MIXPI_OP(name, F32, sizeof(mixp_loss_args), loss, loss)

/* One row an operator, in the order of mixp_op_id, with PyTorch's class on CUDA. */
MIXPREC_API const mixp_op *mixp_op_builtin(mixp_op_id id) {
    static const mixp_op ops[MIXP_OP_COUNT] = {
        MIXPI_OP(linear, LOW, sizeof(mixpi_product), product, product),
        MIXPI_OP(matmul, LOW, sizeof(mixpi_product), product, product),
        MIXPI_OP(attention, LOW, sizeof(mixp_attention_args), attention, attention),
        MIXPI_BINARY(add), MIXPI_BINARY(sub), MIXPI_BINARY(mul), MIXPI_BINARY(div),
        MIXPI_UNARY(scale, KEEP), MIXPI_UNARY(relu, KEEP), MIXPI_UNARY(gelu, KEEP),
        MIXPI_UNARY(gelu_tanh, KEEP), MIXPI_UNARY(silu, KEEP), MIXPI_UNARY(tanh, KEEP),
        MIXPI_UNARY(sigmoid, KEEP), MIXPI_UNARY(sqrt, KEEP), MIXPI_UNARY(exp, F32),
        MIXPI_UNARY(log, F32), MIXPI_UNARY(pow, F32),
        MIXPI_BOTH(sum, F32_OUT, sizeof(mixpi_reduction), reduce, reduce),
        MIXPI_BOTH(mean, KEEP, sizeof(mixpi_reduction), reduce, reduce),
        MIXPI_OP(softmax, F32_OUT, sizeof(mixp_softmax_args), softmax, softmax),
        MIXPI_OP(log_softmax, F32_OUT, sizeof(mixp_softmax_args), softmax, softmax),
        MIXPI_OP(layer_norm, F32, sizeof(mixp_norm_args), norm, norm),
        MIXPI_OP(rms_norm, F32, sizeof(mixp_norm_args), norm, norm),
        MIXPI_OP(embedding, KEEP, sizeof(mixp_embedding_args), embedding, embedding),
        MIXPI_BOTH(dropout, KEEP, sizeof(mixp_dropout_args), dropout, dropout),
        MIXPI_OP(cross_entropy, F32, sizeof(mixp_cross_entropy_args), cross_entropy,
                 cross_entropy),
        MIXPI_LOSS(mse), MIXPI_LOSS(bce_with_logits),
        { "bce", MIXP_CLASS_BANNED, sizeof(mixp_loss_args), mixpi_loss_infer, mixpi_loss_forward,
          mixpi_loss_backward, "mixp_bce_with_logits on the logits" },
        { NULL, MIXP_CLASS_KEEP, 0, NULL, NULL, NULL, NULL },   /* cast is the tape's own row */
        MIXPI_OP(reshape, KEEP, sizeof(mixpi_reshape), reshape, cast),
        MIXPI_BOTH(transpose, KEEP, sizeof(mixpi_transpose), transpose, transpose),
        MIXPI_BOTH(concat, PROMOTE, sizeof(int), concat, concat),
        MIXPI_OP(slice, KEEP, sizeof(mixpi_range), slice, slice),
        MIXPI_UNARY(neg, KEEP), MIXPI_UNARY(abs, KEEP), MIXPI_UNARY(sin, KEEP),
        MIXPI_UNARY(cos, KEEP),
        MIXPI_OP(clamp, KEEP, sizeof(mixp_unary_args), clamp, unary),
        MIXPI_UNARY(relu_squared, KEEP),
        MIXPI_OP(soft_cap, KEEP, sizeof(mixp_unary_args), soft_cap, unary),
        MIXPI_BINARY(maximum), MIXPI_BINARY(minimum), MIXPI_BINARY(swiglu),
        MIXPI_OP(swiglu_packed, KEEP, sizeof(mixp_binary_args), packed, packed),
        MIXPI_LOSS(l1), MIXPI_LOSS(smooth_l1), MIXPI_LOSS(huber), MIXPI_LOSS(kl_div),
        MIXPI_OP(max, KEEP, sizeof(mixpi_maximum), max, max),
        { "argmax", MIXP_CLASS_KEEP, sizeof(mixpi_maximum), mixpi_max_infer, mixpi_max_forward,
          NULL, NULL },
        MIXPI_OP(gather, KEEP, sizeof(mixpi_gathering), gather, gather),
        MIXPI_OP(where, PROMOTE, sizeof(mixpi_choice), choice, choice),
        MIXPI_OP(masked_fill, KEEP, sizeof(mixpi_choice), choice, choice),
        MIXPI_BOTH(rope, KEEP, sizeof(mixp_rope_args), rope, rope)
    };
    if (id == MIXP_OP_CAST) return &mixpi_cast_op;
    return (unsigned)id < MIXP_OP_COUNT ? &ops[id] : NULL;
}
#undef MIXPI_UNARY
#undef MIXPI_BINARY
#undef MIXPI_LOSS

/* ==== 9. SCALER (implementation) ====================================================== */

struct mixp_scaler {
    mixp_context      *ctx;
    mixp_scaler_desc   desc;    /* as given, changes merged in                             */
    mixp_scaler_rule   rule;
    mixp_scaler_state *state;   /* device memory                                           */
    uint64_t           epoch;   /* updates so far, by the host's count; 1 at first         */
    uint64_t           scales;  /* scales so far: each has its number, and marks bear it   */
    uint64_t           replays; /* the context's, when `scales` was true last              */
    mixp_optimizer    *checked; /* unscaled or stepped in checked_epoch, newest first      */
    uint64_t           checked_epoch;
};

/* --- rules ------------------------------------------------------------------------------ */

/* Finite, by its bits: fast-math must not delete it. */
static int mixpi_finite(double x)
{ return (mixp_bits_of_f64(x) & 0x7FF0000000000000u) != 0x7FF0000000000000u; }

/* Is x in [2^-126, 2^126], where it and its reciprocal are normal? */
static int mixpi_scale_is_usable(float x)
/* plant: usable_scale */
{ return mixp_bits_of_f32(x) - 0x00800000u <= 0x7E800000u - 0x00800000u; }

/* The values of other systems, read in their sources. Keras' and jmp's scales begin where
 * the user says; theirs here is the one their guides use. 0 as floor and ceiling: none. */
static const mixp_scaler_rule mixpi_rules[MIXP_RULE_COUNT] = {
#define MIXPI_RULE(first_scale, floor, ceiling, interval, hysteresis, refill, recovery,   \
                   recovery_scale, fixed, delay, divides, f32_factors)                     \
    { 2.0, 0.5, first_scale, floor, ceiling, interval, hysteresis, refill, recovery,       \
      recovery_scale, fixed, delay, divides, f32_factors },
#define MIXPI_CLEAN  MIXP_REFILL_CLEAN
#define MIXPI_GROWTH MIXP_REFILL_GROWTH
#define MIXPI_RUN_OF (MIXP_REFILL_CLEAN | MIXP_REFILL_BACKOFF)
    /* first scale, floor, ceiling, interval, hysteresis, refill, recovery interval and scale,
     *          fixed, delay, divides, f32 factors */
    MIXPI_RULE(65536,      0, 0,          2000, 1, MIXPI_CLEAN,  1,   0,  0, 0, 0, 0)   /* torch */
    MIXPI_RULE(65536,      0, 0,          2000, 1, MIXPI_CLEAN,  1,   0,  1, 0, 0, 0)  /* static */
    MIXPI_RULE(65536,      0, 16777216,   2000, 1, MIXPI_CLEAN,  1,   0,  0, 0, 0, 0)    /* apex */
    MIXPI_RULE(65536,      0, 0,          2000, 1, MIXPI_CLEAN,  1,   0,  0, 0, 0, 0)  /* apex h */
    MIXPI_RULE(4294967296, 1, 0,          1000, 1, MIXPI_GROWTH, 1,   0,  0, 1, 1, 0) /* deepsp. */
    MIXPI_RULE(4294967296, 1, 0,          1000, 2, MIXPI_GROWTH, 1,   0,  0, 0, 0, 1)   /* mega. */
    MIXPI_RULE(32768,      1, 0,          2000, 1, MIXPI_CLEAN,  1,   0,  0, 0, 1, 1)      /* TF */
    MIXPI_RULE(32768,      0, 0,          2000, 1, MIXPI_CLEAN,  1,   0,  0, 0, 0, 0)   /* keras */
    MIXPI_RULE(65536,      0, 0,          2000, 1, MIXPI_RUN_OF, 1,   0,  0, 0, 0, 1)  /* paddle */
    MIXPI_RULE(32768,      1, 0,          2000, 1, MIXPI_CLEAN,  1,   0,  0, 0, 1, 1)     /* jmp */
    MIXPI_RULE(65536,      0, 1073741824, 2000, 1, MIXPI_CLEAN,  100, 64, 0, 0, 0, 1) /* modulus */
    MIXPI_RULE(65536,      1, 4294967296, 1000, 2, MIXPI_GROWTH, 1,   0,  0, 0, 0, 1) /* coloss. */
};
#undef MIXPI_RULE
#undef MIXPI_CLEAN
#undef MIXPI_GROWTH
#undef MIXPI_RUN_OF

/* Fields that a running scaler may change: where one is not 0 in `from`, it replaces that of
 * `to`, a rule or another description. */
#define MIXPI_CHANGES(X) X(growth_factor) X(backoff_factor) X(growth_interval) X(hysteresis) \
                         X(min_scale) X(max_scale) X(recovery_interval) X(recovery_scale)
#define MIXPI_TAKE(field) if (from->field != 0) to->field = from->field;

static int mixpi_desc_is_finite(const mixp_scaler_desc *d) {
    return mixpi_finite(d->growth_factor) && mixpi_finite(d->backoff_factor) &&
           mixpi_finite((double)d->init_scale) && mixpi_finite((double)d->min_scale) &&
           mixpi_finite((double)d->max_scale) && mixpi_finite((double)d->recovery_scale);
}

/* What is wrong with the factors and intervals of a rule, or NULL. */
static const char *mixpi_rule_pace_wrong(const mixp_scaler_rule *r) {
    if (r->growth_factor <= 1.0) return "growth_factor must be above 1";
    if (r->backoff_factor <= 0.0 || r->backoff_factor >= 1.0)
        return "backoff_factor must lie between 0 and 1";
    if (r->growth_interval < 1) return "growth_interval must be at least 1";
    if (r->growth_interval > INT32_MAX - 1)
        return "growth_interval must be below 2^31 - 1";
    if (r->hysteresis < 1) return "hysteresis must be at least 1";
    if (r->recovery_interval < 1 || r->recovery_interval > INT32_MAX - 1)
        return "recovery_interval must lie in [1, 2^31 - 1)";
    if (r->recovery_scale < 0.0f) return "recovery_scale must be at least 0";
    return NULL;
}

/* What is wrong with the limits of a rule that was made from `from`, or NULL. */
static const char *mixpi_rule_limits_wrong(const mixp_scaler_rule *r,
                                           const mixp_scaler_desc *from) {
    /* By bits: where subnormals count as 0, a subnormal scale must not pass for the default. */
    if (mixp_bits_of_f32(from->init_scale) << 1 &&
        !mixpi_scale_is_usable(from->init_scale))
        return "init_scale must lie in [2^-126, 2^126]";
    if (!mixpi_scale_is_usable(r->min_scale))
        return "min_scale must lie in [2^-126, 2^126]";
    if (from->max_scale != 0.0f && !mixpi_scale_is_usable(r->max_scale))
        return "max_scale must lie in [2^-126, 2^126]";
    return NULL;
}

/* Resolves a description into *rule; what is wrong with it, or NULL. */
static const char *mixpi_rule_resolve(const mixp_scaler_desc *from,
                                      mixp_scaler_rule *rule) {
    mixp_scaler_rule r, *to = &r;
    const char *wrong;
    if ((unsigned)from->rule >= MIXP_RULE_COUNT)
        return "rule is none of mixp_scaler_preset";
    if (!mixpi_desc_is_finite(from)) return "a field is Inf or NaN";
    r = mixpi_rules[from->rule];
    MIXPI_CHANGES(MIXPI_TAKE) MIXPI_TAKE(init_scale)
    if (from->backoff_factor != 0.0) r.divides = 0;
    if (r.f32_factors) {
        r.growth_factor = (double)(float)r.growth_factor;  /* plant: f32_factor */
        r.backoff_factor = (double)(float)r.backoff_factor;
    }
    if (r.divides) r.backoff_factor = 1.0 / r.growth_factor;  /* plant: one_multiplier */
    if (r.min_scale == 0.0f) r.min_scale = 1.17549435e-38f;
    if (r.max_scale == 0.0f) r.max_scale = 3.40282347e38f;
    wrong = mixpi_rule_pace_wrong(&r);
    if (!wrong) wrong = mixpi_rule_limits_wrong(&r, from);
    if (wrong) return wrong;
    if (from->disabled) {
        r.fixed = 1;
        r.init_scale = r.min_scale = r.max_scale = 1.0f;
    }
    /* plant: scaler_limits */
    if (r.min_scale > r.max_scale) return "min_scale must not be above max_scale";
    if (from->init_scale == 0.0f)
        r.init_scale = fmaxf(fminf(r.init_scale, r.max_scale), r.min_scale);
    if (r.init_scale < r.min_scale || r.init_scale > r.max_scale)
        return "init_scale must lie between min_scale and max_scale";
    *rule = r;
    return NULL;
}

MIXPREC_API mixp_result mixp_scaler_rule_resolve(const mixp_scaler_desc *desc,
                                                 mixp_scaler_rule *rule) {
    static const mixp_scaler_desc none = {
        MIXP_RULE_TORCH, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0
    };
    return rule && !mixpi_rule_resolve(desc ? desc : &none, rule) ? MIXP_OK
                                                                  : MIXP_ERR_ARGUMENT;
}

/* --- making, reading, changing ---------------------------------------------------------- */

/* Takes d and the rule it stands for, unless something is wrong; then nothing changes. */
static mixp_result mixpi_scaler_adopt(mixp_scaler *s, const mixp_scaler_desc *d,
                                      const char *wrong, const char *who) {
    if (!wrong) wrong = mixpi_rule_resolve(d, &s->rule);
    if (!wrong) { s->desc = *d; return MIXP_OK; }
    return mixp_context_fail(s->ctx, MIXP_ERR_ARGUMENT, "%s: %s", who, wrong);
}

/* The state now: waits for the device. */
static mixp_result mixpi_scaler_get(const mixp_scaler *s, mixp_scaler_state *state)
{ return mixpi_download(s->ctx, state, s->state, sizeof *state); }

MIXPREC_API mixp_scaler *mixp_scaler_new(mixp_context *ctx,
                                         const mixp_scaler_desc *desc) {
    mixp_scaler_state first;
    mixp_scaler *s = ctx ? (mixp_scaler *)mixpi_host_alloc(ctx, sizeof *s) : NULL;
    if (!s) return NULL;
    s->ctx = ctx;
    s->epoch = 1;
    if (mixpi_scaler_adopt(s, desc ? desc : &s->desc, NULL, "mixp_scaler_new") != MIXP_OK)
        return NULL;
    memset(&first, 0, sizeof first);
    first.scale = s->rule.init_scale; first.hysteresis_left = s->rule.hysteresis;
    s->state = (mixp_scaler_state *)mixpi_device_alloc(ctx, sizeof first);
    if (!s->state || mixpi_upload(ctx, s->state, &first, sizeof first) != MIXP_OK)
        return NULL;
    return s;
}

MIXPREC_API float mixp_scaler_loss_scale(const mixp_scaler *scaler) {
    mixp_scaler_state state;
    if (!scaler || scaler->desc.disabled) return 1.0f;
    return mixpi_scaler_get(scaler, &state) == MIXP_OK ? state.scale : 0.0f;
}

/* The number of the scale in force. Replayed graphs update the state without the host: what was
 * counted before one is then too old to be known. */
static uint64_t mixpi_scale_now(mixp_scaler *s) {
    if (s->replays != s->ctx->replays) s->scales += MIXP_PAST_SCALES + 1;
    s->replays = s->ctx->replays;
    return s->scales;
}

/* Another state, whose scale is a new one: as after an update. */
static mixp_result mixpi_scaler_replace(mixp_scaler *s, const mixp_scaler_state *state) {
    mixp_result r = mixpi_upload(s->ctx, s->state, state, sizeof *state);
    if (r != MIXP_OK) return r;
    s->epoch++;
    s->scales++;
    s->ctx->scale_moved = 1;
    return MIXP_OK;
}

/* No gradient made before can be unscaled any more: the state was loaded. */
static void mixpi_scaler_forget(mixp_scaler *s) {
    s->epoch++;
    s->scales += MIXP_PAST_SCALES + 1;
}

MIXPREC_API mixp_result mixp_scaler_update_to(mixp_scaler *scaler, float new_scale) {
    mixp_scaler_state state;
    mixp_result r;
    if (!scaler || scaler->desc.disabled) return scaler ? MIXP_OK : MIXP_ERR_ARGUMENT;
    if (!mixpi_scale_is_usable(new_scale))
        return mixp_context_fail(
            scaler->ctx, MIXP_ERR_ARGUMENT,
            "mixp_scaler_update_to: %g; a scale must "
            "lie in [2^-126, 2^126], where its reciprocal is a normal number too",
            (double)new_scale);
    r = mixpi_scaler_get(scaler, &state);
    if (r != MIXP_OK) return r;
    mixpi_scaler_remember(&state);
    state.scale = new_scale;
    state.found_inf = 0;
    return mixpi_scaler_replace(scaler, &state);
}

MIXPREC_API mixp_result mixp_scaler_change(mixp_scaler *scaler,
                                           const mixp_scaler_desc *from) {
    mixp_scaler_desc d, *to = &d;
    const char *wrong = NULL;
    if (!scaler || !from) return MIXP_ERR_ARGUMENT;
    d = scaler->desc;
    MIXPI_CHANGES(MIXPI_TAKE) MIXPI_TAKE(rule) MIXPI_TAKE(max_floor_skips)
    d.init_scale = 0.0f;        /* spent: it must not stand in the way of new limits */
    if (from->init_scale != 0.0f) wrong = "init_scale is past; use mixp_scaler_update_to";
    if (from->disabled) wrong = "disabled is for mixp_scaler_new only";
    return mixpi_scaler_adopt(scaler, &d, wrong, "mixp_scaler_change");
}

MIXPREC_API mixp_result mixp_scaler_save(const mixp_scaler *scaler,
                                         mixp_scaler_saved *out) {
    mixp_scaler_state state;
    mixp_result r;
    if (!scaler || !out) return MIXP_ERR_ARGUMENT;
    memset(out, 0, sizeof *out);
    if (scaler->desc.disabled) return MIXP_OK;
    r = mixpi_scaler_get(scaler, &state);
    if (r != MIXP_OK) return r;
    out->growth_factor = scaler->rule.growth_factor; out->scale = state.scale;
    out->backoff_factor = scaler->rule.backoff_factor;
    out->growth_tracker = state.growth_tracker;
    out->hysteresis_left = state.hysteresis_left;
    out->growth_interval = scaler->rule.growth_interval;
    return MIXP_OK;
}

MIXPREC_API mixp_result mixp_scaler_load(mixp_scaler *scaler,
                                         const mixp_scaler_saved *in) {
    mixp_scaler_desc d;
    mixp_scaler_state state;
    const char *wrong = NULL;
    mixp_result r;
    if (!scaler || !in) return MIXP_ERR_ARGUMENT;
    if (scaler->desc.disabled) return MIXP_OK;
    d = scaler->desc;
    d.growth_factor = in->growth_factor;
    d.backoff_factor = in->backoff_factor;
    /* A rule of one factor goes on dividing by it. */
    if (mixpi_rules[d.rule].divides && 1.0 / in->growth_factor == in->backoff_factor)
        d.backoff_factor = 0.0;
    d.growth_interval = in->growth_interval;
    d.init_scale = 0.0f;
    if (in->growth_tracker < 0 || in->hysteresis_left < 0)
        wrong = "a counter is negative";
    if (!mixpi_scale_is_usable(in->scale)) wrong = "the scale is not in [2^-126, 2^126]";
    if (in->scale == 0.0f) wrong = "it was saved by a disabled scaler";
    r = mixpi_scaler_get(scaler, &state);
    if (r == MIXP_OK) r = mixpi_scaler_adopt(scaler, &d, wrong, "mixp_scaler_load");
    if (r != MIXP_OK) return r;
    mixpi_scaler_remember(&state);
    state.scale = in->scale;
    state.growth_tracker = in->growth_tracker;
    state.hysteresis_left = in->hysteresis_left;  /* plant: load_hysteresis */
    return mixpi_scaler_replace(scaler, &state);
}

/* --- the loss times the scale ------------------------------------------------------------ */

static mixp_result mixpi_scale_infer(mixp_call *c) {
    if (mixpi_need_real(c, 1, 1) != MIXP_OK) return MIXP_ERR_DTYPE;
    return mixp_call_output(c, MIXP_F32, c->in[0]->rank, c->in[0]->shape);
}

/* A gradient that passes the scale is a scaled one from there on; a second scale spoils it. */
static void mixpi_scale_mark(mixp_scaler *s, mixpi_mark *m) {
    if (m->kind != MIXPI_MARK_TRUE) {
        m->kind = MIXPI_MARK_MIXED;
        return;
    }
    m->kind = MIXPI_MARK_SCALED;
    m->by = s;
    m->at = mixpi_scale_now(s);  /* plant: scaled_at */
}

static mixp_result mixpi_scale_both(mixp_call *c) {
    mixp_scaler *scaler = *(mixp_scaler *const *)c->attrs;
    mixp_scale_by_args k;
    if (c->out->grad) mixpi_scale_mark(scaler, &c->out->grad->own.mark);
    memset(&k, 0, sizeof k);
    k.n = c->out->count;
    k.factor = &scaler->state->scale;
    k.a = mixpi_call_from(c);
    k.y = mixpi_call_to(c);
    return k.y.data ? MIXPI_RUN(c, scale_by, &k) : MIXP_OK;
}

MIXPREC_API mixp_tensor *mixp_scaler_scale(mixp_scaler *scaler, mixp_tensor *loss) {
    static const mixp_op op =
        MIXPI_BOTH(scaler_scale, F32, sizeof(mixp_scaler *), scale, scale);
    if (!scaler || !loss || scaler->desc.disabled) return scaler ? loss : NULL;
    return mixp_apply(scaler->ctx, &op, 1, &loss, 1, &scaler);
}

/* ==== 10. OPTIMIZERS (implementation) ================================================== */

/* A parameter as the host sees it; the row of the same index is what kernels see. */
typedef struct mixpi_slot {
    mixp_tensor *param;
    mixp_tensor *grad;          /* the caller's view, or NULL: param->grad                 */
    uint64_t     version;       /* of param, when its master weight last agreed with it    */
} mixpi_slot;

enum { MIXPI_READY, MIXPI_UNSCALED, MIXPI_STEPPED };

struct mixp_optimizer {
    mixp_context    *ctx;
    mixp_step_plan   plan;
    int              no_master, zero_grad;
    int64_t          count, capacity;
    mixpi_slot      *slots;
    mixp_param_row  *rows, *device_rows;    /* what kernels should see, and do see         */
    int              rows_changed;
    int              clipped;   /* the statistics are those of the last clip: keep them    */
    uint64_t         clipped_versions;  /* of the gradients, added up, at that clip        */
    mixp_step_state *state;     /* device memory                                           */
    /* What a scaler did to it last, and when. It counts until that scaler's update, which speaks
     * for all optimizers in its list. */
    mixp_scaler     *scaler;
    uint64_t         epoch;
    int              stage;
    mixp_optimizer  *next_checked;
};

/* --- making, groups -------------------------------------------------------------------- */

/* Descriptions and groups are written in the order of their fields. */
MIXPREC_API mixp_adamw_desc mixp_adamw_defaults(void) {
    mixp_adamw_desc d = { 1e-3, 0.9, 0.999, 1e-8, 0.01, 0.0, MIXP_ADAM_ORDER_TORCH, 0, 0,
                          { MIXP_SCHEDULE_CONSTANT, 0, 0, 0.0 } };
    return d;
}

MIXPREC_API mixp_adam_desc mixp_adam_defaults(void) {
    mixp_adam_desc d = { 1e-3, 0.9, 0.999, 1e-8, 0.0, 0.0, MIXP_ADAM_ORDER_TORCH, 0, 0,
                         { MIXP_SCHEDULE_CONSTANT, 0, 0, 0.0 } };
    return d;
}

MIXPREC_API mixp_sgd_desc mixp_sgd_defaults(void) {
    mixp_sgd_desc d = { 1e-3, 0.0, 0.0,
                        0.0,  0,   0.0,
                        0,    0,   { MIXP_SCHEDULE_CONSTANT, 0, 0, 0.0 } };
    return d;
}

static int mixpi_at_least_0(double x) { return mixpi_finite(x) && x >= 0.0; }
static int mixpi_is_beta(double x) { return mixpi_at_least_0(x) && x < 1.0; }

/* Did somebody set lr alone, in a struct of zeros? Adam would divide by 0. */
static int mixpi_group_zeroed(mixp_optimizer_kind kind, const mixp_param_group *g) {
    int is_sgd = kind == MIXP_OPTIMIZER_SGD;
    return !is_sgd && mixpi_at_least_0(g->beta2) && g->beta2 + g->eps <= 0.0;
}

/* What is wrong with a group, or NULL. */
static const char *mixpi_group_wrong(mixp_optimizer_kind kind,
                                     const mixp_param_group *g) {
    if (!mixpi_at_least_0(g->lr)) return "lr must be finite and at least 0";
    if (!mixpi_at_least_0(g->weight_decay))
        return "weight_decay must be finite and at least 0";
    if (kind != MIXP_OPTIMIZER_SGD) {
        if (!mixpi_is_beta(g->beta1)) return "beta1 must lie in [0,1)";
        if (!mixpi_is_beta(g->beta2)) return "beta2 must lie in [0,1)";
        if (mixpi_group_zeroed(kind, g))
            return "beta2 and eps are 0: start from the defaults";
        return mixpi_at_least_0(g->eps) ? NULL : "eps must be finite and at least 0";
    }
    if (!mixpi_at_least_0(g->momentum)) return "momentum must be finite and at least 0";
    if (!mixpi_finite(g->dampening)) return "dampening must be finite";
    if (g->nesterov && (g->momentum <= 0.0 || g->dampening < 0.0 || g->dampening > 0.0))
        return "nesterov needs momentum and no dampening";
    return NULL;
}

static const char *mixpi_schedule_wrong(const mixp_schedule *s) {
    if ((unsigned)s->kind > MIXP_SCHEDULE_COSINE)
        return "schedule.kind is none of its values";
    if (s->warmup < 0) return "schedule.warmup is negative";
    if (s->kind != MIXP_SCHEDULE_CONSTANT && s->total <= s->warmup)
        return "schedule.total must be above schedule.warmup";
    if (!mixpi_at_least_0(s->min_factor) || s->min_factor > 1.0)
        return "schedule.min_factor must lie in [0,1]";
    return NULL;
}

/* What all kinds have in common; their hyper-parameters are in a group. */
typedef struct mixpi_optimizer_desc {
    mixp_optimizer_kind     kind;
    mixp_adam_order    order;
    double        max_norm;
    int           no_master, zero_grad;
    mixp_schedule schedule;
} mixpi_optimizer_desc;

static mixp_optimizer *mixpi_optimizer_new(mixp_context *ctx, const char *who,
                                           const mixp_param_group *group,
                                           const mixpi_optimizer_desc *d) {
    const char *wrong = mixpi_group_wrong(d->kind, group);
    mixp_optimizer *opt;
    if (!wrong) wrong = mixpi_schedule_wrong(&d->schedule);
    if (!mixpi_at_least_0(d->max_norm)) wrong = "max_norm must be finite and at least 0";
    if ((unsigned)d->order > MIXP_ADAM_ORDER_APEX)
        wrong = "order is none of mixp_adam_order";
    if (wrong) mixp_context_fail(ctx, MIXP_ERR_ARGUMENT, "%s: %s", who, wrong);
    opt = wrong || !ctx ? NULL : (mixp_optimizer *)mixpi_host_alloc(ctx, sizeof *opt);
    if (!opt) return NULL;
    opt->ctx = ctx;
    opt->plan.kind = d->kind;
    opt->plan.order = d->order;
    opt->plan.max_norm = d->max_norm;
    opt->plan.schedule = d->schedule;
    opt->plan.groups[0] = *group;
    opt->plan.n_groups = 1;
    opt->no_master = d->no_master;
    opt->zero_grad = d->zero_grad;
    opt->state = (mixp_step_state *)mixpi_device_alloc(ctx, sizeof *opt->state);
    return opt->state ? opt : NULL;
}

MIXPREC_API mixp_optimizer *mixp_adamw_new(mixp_context *ctx,
                                           const mixp_adamw_desc *desc) {
    mixp_adamw_desc d = desc ? *desc : mixp_adamw_defaults();
    mixp_param_group g = { d.lr, d.beta1, d.beta2, d.eps, d.weight_decay, 0.0, 0.0, 0 };
    mixpi_optimizer_desc common = { MIXP_OPTIMIZER_ADAMW, d.order,     d.max_norm,
                                    d.no_master,          d.zero_grad, d.schedule };
    return mixpi_optimizer_new(ctx, "mixp_adamw_new", &g, &common);
}

MIXPREC_API mixp_optimizer *mixp_adam_new(mixp_context *ctx, const mixp_adam_desc *desc) {
    mixp_adam_desc d = desc ? *desc : mixp_adam_defaults();
    mixp_param_group g = { d.lr, d.beta1, d.beta2, d.eps, d.weight_decay, 0.0, 0.0, 0 };
    mixpi_optimizer_desc common = { MIXP_OPTIMIZER_ADAM, d.order,     d.max_norm,
                                    d.no_master,         d.zero_grad, d.schedule };
    return mixpi_optimizer_new(ctx, "mixp_adam_new", &g, &common);
}

MIXPREC_API mixp_optimizer *mixp_sgd_new(mixp_context *ctx, const mixp_sgd_desc *desc) {
    mixp_sgd_desc d = desc ? *desc : mixp_sgd_defaults();
    mixp_param_group g = { d.lr,           0.0,        0.0,         0.0,
                           d.weight_decay, d.momentum, d.dampening, d.nesterov };
    mixpi_optimizer_desc common = {
        MIXP_OPTIMIZER_SGD, MIXP_ADAM_ORDER_TORCH, d.max_norm,
        d.no_master,        d.zero_grad,           d.schedule
    };
    return mixpi_optimizer_new(ctx, "mixp_sgd_new", &g, &common);
}

/* Writes group `index`, if it is one of `count`. */
static mixp_result mixpi_group_put(mixp_optimizer *opt, int index, int count,
                                   const mixp_param_group *group) {
    const char *wrong = mixpi_group_wrong(opt->plan.kind, group);
    if (opt->plan.kind == MIXP_OPTIMIZER_SGD &&
        (group->momentum > 0.0) != (opt->plan.groups[0].momentum > 0.0))
        wrong = "momentum must stay 0 in all groups, or stay above 0 in all";
    if (mixpi_group_zeroed(opt->plan.kind, group))
        wrong = "beta2 and eps are 0: start from mixp_optimizer_group(opt, 0, &g)";
    if (index < 0 || index >= count) wrong = "there are fewer groups";
    if (index >= MIXP_MAX_GROUPS) wrong = "MIXP_MAX_GROUPS groups are the most";
    if (!wrong) { opt->plan.groups[index] = *group; return MIXP_OK; }
    return mixp_context_fail(opt->ctx, MIXP_ERR_ARGUMENT, "optimizer group %d: %s", index,
                             wrong);
}

MIXPREC_API int mixp_optimizer_add_group(mixp_optimizer *opt,
                                         const mixp_param_group *group) {
    int index = opt ? opt->plan.n_groups : 0;
    if (!opt || !group || mixpi_group_put(opt, index, index + 1, group) != MIXP_OK)
        return -1;
    return opt->plan.n_groups++;
}

MIXPREC_API mixp_result mixp_optimizer_group(const mixp_optimizer *opt, int index,
                                                 mixp_param_group *out) {
    if (!opt || !out || index < 0 || index >= opt->plan.n_groups)
        return mixp_context_fail(opt ? opt->ctx : NULL, MIXP_ERR_ARGUMENT,
                                 "optimizer group %d: no such "
                                 "group, or nowhere to put it",
                                 index);
    *out = opt->plan.groups[index];
    return MIXP_OK;
}

MIXPREC_API mixp_result mixp_optimizer_set_group(mixp_optimizer *opt, int index,
                                                 const mixp_param_group *g) {
    return opt && g ? mixpi_group_put(opt, index, opt->plan.n_groups, g)
                    : MIXP_ERR_ARGUMENT;
}

/* --- parameters -------------------------------------------------------------------------- */

static mixp_result mixpi_optimizer_grow(mixp_optimizer *opt) {
    int64_t n = opt->capacity ? 2 * opt->capacity : 32;
    size_t bytes = (size_t)n * sizeof(mixp_param_row);
    mixpi_slot *slots =
        (mixpi_slot *)mixpi_host_alloc(opt->ctx, (size_t)n * sizeof *slots);
    mixp_param_row *rows = (mixp_param_row *)mixpi_host_alloc(opt->ctx, bytes);
    mixp_param_row *device = (mixp_param_row *)mixpi_device_alloc(opt->ctx, bytes);
    if (!slots || !rows || !device) return MIXP_ERR_MEMORY;
    if (opt->count) memcpy(slots, opt->slots, (size_t)opt->count * sizeof *slots);
    /* plant: rows_grow */
    if (opt->count) memcpy(rows, opt->rows, (size_t)opt->count * sizeof *rows);
    opt->slots = slots; opt->rows = rows; opt->device_rows = device; opt->capacity = n;
    return MIXP_OK;
}

/* The stage, given that a scaler's update forgets it. */
static int mixpi_stage(const mixp_optimizer *opt)
{ return opt->scaler && opt->epoch == opt->scaler->epoch ? opt->stage : MIXPI_READY; }

/* Why p, with gradient g or NULL, cannot join the parameters that are there; or NULL. */
static const char *mixpi_add_clash(const mixp_optimizer *opt, const mixp_tensor *p,
                                   const mixp_tensor *g) {
    int64_t i;
    for (i = 0; i < opt->count; i++) {
        const mixpi_slot *slot = &opt->slots[i];
        if (slot->param == p) return "was added before";
        if (opt->zero_grad && g && slot->grad && slot->grad->data == g->data)
            return "shares its gradient, which the first of them to be updated would clear";
    }
    return NULL;
}

/* The first thing that is wrong is told. */
static mixp_result mixpi_add_check(mixp_optimizer *opt, const mixp_tensor *p,
                                   const mixp_tensor *g) {
    mixp_result code = MIXP_ERR_ARGUMENT;
    const char *wrong = NULL;
    if (!mixpi_real(p->dtype) || (g && !mixpi_real(g->dtype))) {
        code = MIXP_ERR_DTYPE;
        wrong = "and its gradient must be f32, f16 or bf16";
    } else if (g && g->count != p->count) {
        code = MIXP_ERR_SHAPE;
        wrong = "and its gradient differ in their number of elements";
    } else if (mixpi_stage(opt) != MIXPI_READY) {
        code = MIXP_ERR_ORDER;
        wrong = "comes in the middle of a step: update the scaler first";
    } else if (g && g->data == p->data) wrong = "is its own gradient";
    else if (p->own.generation || (g && g->own.generation))
        wrong = "lives for one step only";
    else if (p->ctx != opt->ctx || (g && g->ctx != opt->ctx))
        wrong = "is of another context";
    else if (!g && !p->requires_grad && !p->own.is_param)
        wrong = "is a view without a gradient: give one, or call mixp_tensor_set_requires_grad";
    else wrong = mixpi_add_clash(opt, p, g);
    if (!wrong) return MIXP_OK;
    return mixp_context_fail(opt->ctx, code, "mixp_optimizer_add: '%s' %s", p->name,
                             wrong);
}

static mixp_result mixpi_master_sync(mixp_optimizer *opt, int64_t i) {
    const mixp_tensor *p = opt->slots[i].param;
    opt->slots[i].version = p->version;
    if (!opt->rows[i].master) return MIXP_OK;
    return mixpi_convert_to(opt->ctx, mixpi_out_to(opt->rows[i].master, MIXP_F32, 0),
                            mixpi_tensor_in(p), p->count);
}

/* One piece of zeroed device memory: steps missed, moments, master weight. The gap keeps
 * streams of a power of two apart from falling on the same cache sets. */
static mixp_result mixpi_row_memory(mixp_optimizer *opt, mixp_param_row *row,
                                    int64_t joined_at) {
    int adam = opt->plan.kind != MIXP_OPTIMIZER_SGD;
    int m = adam || opt->plan.groups[0].momentum > 0.0;
    int master = row->weight_dtype != MIXP_F32 && !opt->no_master;
    size_t arrays = (size_t)(m + adam + master),
           part = (size_t)row->count * sizeof(float);
    char *p;
    if (part > ((size_t)-1 - 4096) / 4) return mixpi_out_of_memory(opt->ctx, part);
    part = mixpi_round_up(part) + 320;
    p = (char *)mixpi_device_alloc(opt->ctx, 64 + arrays * part);
    if (!p) return MIXP_ERR_MEMORY;
    row->missed = (int64_t *)(void *)p;
    p += 64;
    row->m_dtype = row->v_dtype = row->master_dtype = MIXP_F32;
    if (m) {
        row->m = p;
        p += part;
    }
    if (adam) {
        row->v = p;
        p += part;
    }
    if (master) row->master = p;
    return joined_at ? mixpi_upload(opt->ctx, row->missed, &joined_at, sizeof joined_at)
                     : MIXP_OK;
}

MIXPREC_API mixp_result mixp_optimizer_add(mixp_optimizer *opt, mixp_tensor *param,
                                           mixp_tensor *grad) {
    mixp_param_row *row;
    mixp_result r;
    if (!opt) return MIXP_ERR_ARGUMENT;
    if (!param)
        return mixp_context_fail(opt->ctx, MIXP_ERR_ARGUMENT,
                                 "mixp_optimizer_add: param is NULL");
    r = mixpi_add_check(opt, param, grad);
    if (r == MIXP_OK && opt->count == opt->capacity) r = mixpi_optimizer_grow(opt);
    if (r != MIXP_OK) return r;
    row = &opt->rows[opt->count];
    memset(row, 0, sizeof *row);
    row->weight = param->data;
    row->weight_dtype = param->dtype;
    row->count = param->count;
    row->group = opt->plan.n_groups - 1;
    opt->slots[opt->count].param = param; opt->slots[opt->count].grad = grad;
    r = mixpi_row_memory(opt, row, mixp_optimizer_applied(opt));
    if (r == MIXP_OK) r = mixpi_master_sync(opt, opt->count);
    if (r == MIXP_OK) { opt->count++; opt->rows_changed = 1; }
    return r;
}

MIXPREC_API mixp_result mixp_zero_grad(mixp_optimizer *opt) {
    mixp_result r = MIXP_OK;
    int64_t i;
    if (!opt) return MIXP_ERR_ARGUMENT;
    for (i = 0; i < opt->count && r == MIXP_OK; i++) {
        mixp_tensor *view = opt->slots[i].grad;
        if (!view) {
            opt->slots[i].param->grad = NULL;
            continue;
        }
        r = mixpi_device_zero(opt->ctx, view->data, mixpi_bytes(view));
        view->own.mark.kind = MIXPI_MARK_NONE;
    }
    if (opt->stage == MIXPI_UNSCALED) opt->stage = MIXPI_READY;
    opt->clipped = 0;
    return r;
}

/* --- asking --------------------------------------------------------------------------------- */

MIXPREC_API int64_t mixp_optimizer_applied(const mixp_optimizer *opt) {
    int64_t applied = 0;
    if (opt) mixpi_download(opt->ctx, &applied, &opt->state->applied, sizeof applied);
    return applied;
}

MIXPREC_API double mixp_optimizer_lr(const mixp_optimizer *opt, int group) {
    if (!opt || group < 0 || group >= opt->plan.n_groups) return 0.0;
    return mixp_schedule_lr(&opt->plan.schedule, opt->plan.groups[group].lr,
                            mixp_optimizer_applied(opt));
}

/* ==== 11. STEP (implementation) ======================================================= */

/* --- the table of parameters -------------------------------------------------------------- */

static mixp_tensor *mixpi_slot_grad(const mixpi_slot *slot)
{ return slot->grad ? slot->grad : slot->param->grad; }

/* A parameter's row as it should be now. */
static mixp_param_row mixpi_row_now(const mixp_optimizer *opt, int64_t i) {
    const mixp_tensor *p = opt->slots[i].param, *g = mixpi_slot_grad(&opt->slots[i]);
    mixp_param_row now = opt->rows[i];
    now.active = !g ? 0 : opt->zero_grad && opt->slots[i].grad ? 2 : 1;
    if (g) {
        now.grad = g->data;
        now.grad_dtype = g->dtype;
    }
    now.low_f16 = p->own.low[0] ? (mixp_f16 *)p->own.low[0]->data : NULL;
    /* plant: low_bf16 */
    now.low_bf16 = p->own.low[1] ? (mixp_bf16 *)p->own.low[1]->data : NULL;
    return now;
}

/* Brings the table up to date: which parameters have a gradient, and where. In steady state
 * nothing changed, and nothing is sent. MIXP_ERR_ORDER when there is no gradient at all. */
static mixp_result mixpi_refresh(mixp_optimizer *opt, const char *who) {
    int64_t i, active = 0;
    for (i = 0; i < opt->count; i++) {
        mixp_param_row now = mixpi_row_now(opt, i);
        active += now.active != 0;
        /* Padding may differ where fields do not: then the table is sent once more. */
        if (memcmp(&opt->rows[i], &now, sizeof now)) opt->rows_changed = 1;
        opt->rows[i] = now;
        if (opt->slots[i].version == opt->slots[i].param->version) continue;
        if (mixpi_master_sync(opt, i) != MIXP_OK) return MIXP_ERR_DEVICE;
    }
    if (!opt->count)
        return mixp_context_fail(opt->ctx, MIXP_ERR_ORDER,
                                 "%s: no parameter was added to this optimizer: call "
                                 "mixp_optimizer_add for each of them, before the loop",
                                 who);
    if (!active)
        return mixp_context_fail(
            opt->ctx, MIXP_ERR_ORDER,
            "%s: no parameter of this optimizer has a "
            "gradient; call mixp_backward first, on a loss made from them",
            who);
    if (!opt->rows_changed) return MIXP_OK;
    opt->rows_changed = 0;
    return mixpi_upload(opt->ctx, opt->device_rows, opt->rows,
                        (size_t)opt->count * sizeof *opt->rows);
}

/* The kernel wrote a weight and its low copies together, or, skipping, neither: a copy that
 * was fresh stays fresh, whichever it was. A stale one is left for autocast to renew. */
static void mixpi_weight_written(mixp_tensor *p) {
    int k;
    for (k = 0; k < 2; k++)
        /* plant: low_fresh */
        if (p->own.low[k] && p->own.low_version[k] == p->version) p->own.low_version[k]++;
    p->version++;
}

/* After the update kernel: weights are new, and gradients cleared where zero_grad says so. */
static void mixpi_opt_written(mixp_optimizer *opt) {
    int64_t i;
    for (i = 0; i < opt->count; i++) {
        mixpi_slot *slot = &opt->slots[i];
        if (!opt->rows[i].active) continue;
        mixpi_weight_written(slot->param);
        slot->version = slot->param->version;
        if (!opt->zero_grad) continue;
        if (slot->grad) slot->grad->own.mark.kind = MIXPI_MARK_NONE;
        else slot->param->grad = NULL;
    }
}

/* Changes whenever a gradient is written by the library, or told to be by mixp_tensor_touch. */
static uint64_t mixpi_grad_versions(const mixp_optimizer *opt) {
    uint64_t sum = 0;
    int64_t i;
    for (i = 0; i < opt->count; i++) {
        const mixp_tensor *g = mixpi_slot_grad(&opt->slots[i]);
        if (g) sum += g->version;
    }
    return sum;
}

static mixp_result mixpi_opt_look(mixp_optimizer *o, const float *scale, int unscale,
                                  const mixp_step_plan *plan, mixp_scaler_state *s) {
    mixp_grad_stats_args k;
    memset(&k, 0, sizeof k);
    k.rows = o->device_rows;
    k.count = o->count;
    k.scale = scale;
    k.unscale = unscale;
    k.step = o->state;
    k.plan = plan;
    k.scaler = s;
    return MIXPI_RUN(o, grad_stats, &k);
}

static mixp_result mixpi_opt_prepare(mixp_optimizer *o, mixp_scaler_state *s) {
    mixp_prepare_args k;
    memset(&k, 0, sizeof k);
    k.plan = &o->plan;
    k.step = o->state;
    k.scaler = s;
    return MIXPI_RUN(o, prepare, &k);
}

static mixp_result mixpi_opt_update(mixp_optimizer *o) {
    mixp_update_args k;
    memset(&k, 0, sizeof k);
    k.plan = &o->plan;
    k.rows = o->device_rows;
    k.count = o->count;
    k.step = o->state;
    return MIXPI_RUN(o, update, &k);
}

static mixp_result mixpi_opt_clip(mixp_optimizer *o, double max_norm) {
    mixp_clip_args k;
    memset(&k, 0, sizeof k);
    k.rows = o->device_rows;
    k.count = o->count;
    k.max_norm = max_norm;
    k.step = o->state;
    return MIXPI_RUN(o, clip, &k);
}

/* --- what the gradients are ---------------------------------------------------------------- */

/* What all gradients of an optimizer are: true ones, or multiplied by the scale number `at`. */
typedef struct mixpi_scaling { int is_true; uint64_t at; } mixpi_scaling;

static int mixpi_seen_before_update(const mixpi_mark *m)
{ return m->seen && m->seen != ((const mixp_scaler *)m->by)->epoch; }

/* A gradient's mark. That of a view ends with the update, for then its owner fills it anew. */
static mixpi_mark mixpi_mark_of(const mixpi_slot *slot) {
    static const mixpi_mark none = { NULL, 0, 0, MIXPI_MARK_NONE };
    const mixpi_mark *m = &mixpi_slot_grad(slot)->own.mark;
    return slot->grad && m->by && mixpi_seen_before_update(m) ? none : *m;
}

/* Why a scaler cannot use a gradient, or NULL. */
static const char *mixpi_mark_wrong(const mixp_scaler *scaler, const mixpi_mark *m) {
    if (m->kind == MIXPI_MARK_MIXED)
        return "is a sum over two loss scales, which no factor undoes; walk back all losses of a "
               "step before mixp_scaler_update, and call mixp_zero_grad after it; an optimizer "
               "that waits longer than another needs a scaler of its own";
    if (m->kind == MIXPI_MARK_NONE || m->kind == MIXPI_MARK_TRUE) return NULL;
    if (m->by != scaler && m->kind == MIXPI_MARK_UNSCALED && !mixpi_seen_before_update(m))
        return "was unscaled by another scaler, which works on it still; update that first";
    if (m->by != scaler) return "was scaled by another scaler; step with that one";
    if (mixpi_seen_before_update(m))
        return m->kind == MIXPI_MARK_UNSCALED
             ? "was unscaled before the last mixp_scaler_update; begin again from the loss"
             : "was used by the step before; call mixp_zero_grad, and begin again from the loss";
    if (m->kind == MIXPI_MARK_SCALED && scaler->scales - m->at > MIXP_PAST_SCALES)
        return "was scaled too long ago: a graph was replayed, a state loaded or the scale changed "
               "too often since; begin again from the loss";
    return NULL;
}

/* How many gradients of each kind there are. */
typedef struct mixpi_mark_count { int64_t as_is, unscaled, scaled; } mixpi_mark_count;

/* What the gradients of opt, taken together, mean to scaler: true or scaled, all alike. */
static mixp_result mixpi_scaling_of(mixp_scaler *scaler, const mixp_optimizer *opt,
                                    const char *who, mixpi_scaling *out) {
    const uint64_t now = mixpi_scale_now(scaler);
    mixpi_mark_count n = { 0, 0, 0 };
    const char *name = "", *wrong = NULL;
    int64_t i;
    out->at = now;
    for (i = 0; i < opt->count && !wrong; i++) {
        mixpi_mark m;
        if (!mixpi_slot_grad(&opt->slots[i])) continue;
        m = mixpi_mark_of(&opt->slots[i]);
        name = opt->slots[i].param->name;
        wrong = mixpi_mark_wrong(scaler, &m);
        n.as_is += m.kind == MIXPI_MARK_TRUE;
        n.unscaled += m.kind == MIXPI_MARK_UNSCALED;
        if (wrong || m.kind == MIXPI_MARK_TRUE || m.kind == MIXPI_MARK_UNSCALED) continue;
        if (m.kind == MIXPI_MARK_NONE) m.at = now;
        if (n.scaled++ && m.at != out->at)
            wrong = "was scaled by another scale than the gradients before it; step them before "
                    "mixp_scaler_update, or give them optimizers of their own";
        out->at = m.at;
    }
    out->is_true = n.as_is + n.unscaled > 0;
    if (!wrong && out->is_true && n.scaled)
        wrong = "and others differ: some gradients are scaled, some are true ones";
    if (!wrong && n.as_is && !n.unscaled && scaler->desc.rule != MIXP_RULE_STATIC)
        wrong = "is of a loss that was not scaled; walk back mixp_scaler_scale(scaler, loss), not "
                "the loss itself";
    if (!wrong) return MIXP_OK;
    return mixp_context_fail(scaler->ctx, MIXP_ERR_ORDER, "%s: the gradient of '%s' %s",
                             who, name, wrong);
}

/* Before true gradients are used: they must be, and `instead` says how to get there. */
static mixp_result mixpi_need_true(const mixp_optimizer *opt, const char *who,
                                   const char *instead) {
    int64_t i;
    for (i = 0; i < opt->count; i++) {
        mixpi_mark m;
        if (!mixpi_slot_grad(&opt->slots[i])) continue;
        m = mixpi_mark_of(&opt->slots[i]);
        /* plant: still_scaled */
        if (m.kind == MIXPI_MARK_SCALED || m.kind == MIXPI_MARK_MIXED)
            return mixp_context_fail(opt->ctx, MIXP_ERR_ORDER,
                                     "%s: the gradient of '%s' is still "
                                     "multiplied by the loss scale; call %s",
                                     who, opt->slots[i].param->name, instead);
    }
    return MIXP_OK;
}

/* Where the scale lies that the gradients were multiplied by; NULL: they are true ones. */
static const float *mixpi_scale_address(const mixp_scaler *scaler,
                                        const mixpi_scaling *is) {
    const uint64_t age = scaler->scales - is->at;
    if (is->is_true) return NULL;
    return age ? &scaler->state->past[age - 1] : &scaler->state->scale;
}

/* --- stepping ----------------------------------------------------------------------------- */

/* One step, after mixpi_refresh. scaler NULL: apply whatever the gradients are. */
static mixp_result mixpi_step(mixp_optimizer *opt, mixp_scaler *scaler,
                              const mixpi_scaling *is) {
    mixp_step_plan *plan = &opt->plan;
    mixp_scaler_state *s = scaler ? scaler->state : NULL;
    mixp_result r;
    plan->check = scaler != NULL;
    plan->unscaled = is->is_true;
    plan->age = scaler && !is->is_true ? (int32_t)(scaler->scales - is->at) : 0;
    plan->noted = scaler && mixpi_stage(opt) == MIXPI_UNSCALED;
    plan->look_only = 0;
    /* plant: clipped_once */
    if (opt->clipped_versions != mixpi_grad_versions(opt)) opt->clipped = 0;
    plan->gathered = scaler || opt->clipped || plan->max_norm > 0.0;
    if (plan->gathered && !opt->clipped)
        r = mixpi_opt_look(opt, scaler ? mixpi_scale_address(scaler, is) : NULL, 0, plan,
                           s);
    else
        r = mixpi_opt_prepare(opt, s);
    if (r == MIXP_OK) r = mixpi_opt_update(opt);
    if (r == MIXP_OK) mixpi_opt_written(opt);
    opt->clipped = 0;
    return r;
}

MIXPREC_API mixp_result mixp_clip_grad_norm(mixp_optimizer *opt, double max_norm) {
    mixp_result r;
    int64_t i;
    if (!opt) return MIXP_ERR_ARGUMENT;
    if (!mixpi_at_least_0(max_norm))
        return mixp_context_fail(opt->ctx, MIXP_ERR_ARGUMENT,
                                 "mixp_clip_grad_norm: max_norm %g must be "
                                 "finite and at least 0",
                                 max_norm);
    r = mixpi_need_true(opt, "mixp_clip_grad_norm", "mixp_scaler_unscale first");
    if (r == MIXP_OK) r = mixpi_refresh(opt, "mixp_clip_grad_norm");
    if (r == MIXP_OK) r = mixpi_opt_look(opt, NULL, 0, NULL, NULL);
    if (r == MIXP_OK) r = mixpi_opt_clip(opt, max_norm);
    opt->clipped = r == MIXP_OK;
    for (i = 0; i < opt->count; i++) {
        mixp_tensor *g = mixpi_slot_grad(&opt->slots[i]);
        if (g) g->version++;    /* another optimizer that shares it must look again */
    }
    opt->clipped_versions = mixpi_grad_versions(opt);
    return r;
}

MIXPREC_API mixp_result mixp_optimizer_step(mixp_optimizer *opt) {
    static const mixpi_scaling as_they_are = { 1, 0 };
    mixp_result r;
    if (!opt) return MIXP_ERR_ARGUMENT;
    r = mixpi_need_true(opt, "mixp_optimizer_step", "mixp_scaler_step instead");
    if (r == MIXP_OK) r = mixpi_refresh(opt, "mixp_optimizer_step");
    return r == MIXP_OK ? mixpi_step(opt, NULL, &as_they_are) : r;
}

/* --- stepping with a scaler ---------------------------------------------------------------- */

/* May `who` work on opt now, and what are its gradients? Then the table is brought up to date. */
static mixp_result mixpi_begin_scaled(mixp_scaler *scaler, mixp_optimizer *opt,
                                      const char *who, mixpi_scaling *is) {
    mixp_result r;
    if (opt->ctx != scaler->ctx)
        return mixp_context_fail(scaler->ctx, MIXP_ERR_ARGUMENT,
                                 "%s: scaler and optimizer are of "
                                 "different contexts",
                                 who);
    if (opt->scaler && opt->scaler != scaler && opt->epoch == opt->scaler->epoch)
        return mixp_context_fail(scaler->ctx, MIXP_ERR_ORDER,
                                 "%s: another scaler works on this optimizer; "
                                 "update it first",
                                 who);
    if (mixpi_stage(opt) == MIXPI_STEPPED)
        return mixp_context_fail(scaler->ctx, MIXP_ERR_ORDER,
                                 "%s: mixp_scaler_step was called already; "
                                 "call mixp_scaler_update first",
                                 who);
    r = mixpi_scaling_of(scaler, opt, who, is);
    return r == MIXP_OK ? mixpi_refresh(opt, who) : r;
}

/* Sets the stage, and enters opt in the list of those that the next update speaks for. */
static void mixpi_stage_set(mixp_scaler *scaler, mixp_optimizer *opt, int stage) {
    if (opt->scaler != scaler || opt->epoch != scaler->epoch) {
        opt->next_checked =
            scaler->checked_epoch == scaler->epoch ? scaler->checked : NULL;
        scaler->checked = opt;
        scaler->checked_epoch = scaler->epoch;
    }
    opt->scaler = scaler;
    opt->epoch = scaler->epoch;
    opt->stage = stage;
}

/* The gradients of opt are true from here on. */
static void mixpi_mark_unscaled(mixp_scaler *scaler, mixp_optimizer *opt) {
    int64_t i;
    for (i = 0; i < opt->count; i++) {
        mixp_tensor *g = mixpi_slot_grad(&opt->slots[i]);
        if (!g) continue;
        g->version++;
        g->own.mark.kind = MIXPI_MARK_UNSCALED;
        g->own.mark.by = scaler;
        g->own.mark.seen = scaler->epoch;
    }
}

/* A step has used the gradients of opt, as they are. */
static void mixpi_mark_used(mixp_scaler *scaler, mixp_optimizer *opt) {
    int64_t i;
    for (i = 0; i < opt->count; i++) {
        mixp_tensor *g = mixpi_slot_grad(&opt->slots[i]);
        if (g && g->own.mark.kind == MIXPI_MARK_SCALED) g->own.mark.seen = scaler->epoch;
    }
}

MIXPREC_API mixp_result mixp_scaler_unscale(mixp_scaler *scaler, mixp_optimizer *opt) {
    mixpi_scaling is;
    mixp_result r;
    if (!scaler || !opt) return MIXP_ERR_ARGUMENT;
    if (scaler->desc.disabled) return MIXP_OK;
    if (opt->scaler == scaler && mixpi_stage(opt) == MIXPI_UNSCALED)
        return mixp_context_fail(scaler->ctx, MIXP_ERR_ORDER,
                                 "mixp_scaler_unscale: mixp_scaler_unscale "
                                 "was called already; call mixp_scaler_update first");
    r = mixpi_begin_scaled(scaler, opt, "mixp_scaler_unscale", &is);
    if (r != MIXP_OK) return r;
    opt->plan.look_only = opt->plan.gathered = 1;
    r = mixpi_opt_look(opt, mixpi_scale_address(scaler, &is), !is.is_true, &opt->plan,
                     scaler->state);
    if (r != MIXP_OK) return r;
    opt->clipped = 0;
    mixpi_mark_unscaled(scaler, opt);
    mixpi_stage_set(scaler, opt, MIXPI_UNSCALED);
    return MIXP_OK;
}

MIXPREC_API mixp_result mixp_scaler_step(mixp_scaler *scaler, mixp_optimizer *opt) {
    mixpi_scaling is;
    mixp_result r;
    if (!scaler || !opt) return MIXP_ERR_ARGUMENT;
    if (scaler->desc.disabled && opt->ctx == scaler->ctx) return mixp_optimizer_step(opt);
    r = mixpi_begin_scaled(scaler, opt, "mixp_scaler_step", &is);
    if (r == MIXP_OK) r = mixpi_step(opt, scaler, &is);
    if (r != MIXP_OK) return r;
    mixpi_mark_used(scaler, opt);
    mixpi_stage_set(scaler, opt, MIXPI_STEPPED);
    return MIXP_OK;
}

/* --- the verdict, and the update ------------------------------------------------------------ */

static mixp_verdict mixpi_verdict(const mixp_optimizer *opt) {
    mixp_step_state s;
    mixp_verdict v;
    memset(&v, 0, sizeof v);
    memset(&s, 0, sizeof s);
    if (!opt) return v;
    mixpi_peek(opt->ctx, &s, opt->state, offsetof(mixp_step_state, update));
    if (!s.steps) return v;
    v.outcome = s.skip ? MIXP_STEP_SKIPPED : MIXP_STEP_APPLIED;
    v.step = s.steps;
    v.applied = s.applied;
    v.skipped = s.skipped;
    v.scale = s.scale;
    v.grad_norm = s.stats.norm;
    v.largest = s.stats.largest;
    v.clip = s.clip;
    v.lr = s.lr;
    if (!s.stats.found_inf || s.stats.bad_row < 0 || s.stats.bad_row >= opt->count)
        return v;
    v.bad_tensor = opt->slots[s.stats.bad_row].param->name;
    v.bad_element = s.stats.bad_element;
    v.bad_is_nan = s.stats.bad_is_nan;
    return v;
}

/* Is opt one of those that the scaler unscaled or stepped before its last update, or since? */
static int mixpi_is_checked(const mixp_scaler *scaler, const mixp_optimizer *opt)
{ return opt && opt->scaler == scaler && opt->epoch == scaler->checked_epoch; }

/* A skipped one, if any was skipped since the last update. */
static mixp_verdict mixpi_worst_verdict(const mixp_scaler *scaler) {
    const mixp_optimizer *opt = scaler ? scaler->checked : NULL;
    mixp_verdict newest = mixpi_verdict(opt), v = newest;
    while (mixpi_is_checked(scaler, opt) && v.outcome != MIXP_STEP_SKIPPED) {
        opt = opt->next_checked;
        v = mixpi_verdict(opt);
    }
    return mixpi_is_checked(scaler, opt) ? v : newest;
}

/* After an update: a run of skips where the scale can go no lower is no scaling problem. */
static mixp_result mixpi_scaler_diverged(const mixp_scaler *scaler) {
    /* plant: skips_allowed */
    const int most = scaler->desc.max_floor_skips ? scaler->desc.max_floor_skips : 20;
    mixp_scaler_state state;
    mixp_verdict bad;
    mixp_result r = mixpi_peek(scaler->ctx, &state, scaler->state, sizeof state);
    if (r != MIXP_OK || most < 0 || state.floor_skips < most) return r;
    bad = mixpi_worst_verdict(scaler);
    return mixp_context_fail(
        scaler->ctx, MIXP_ERR_DIVERGED,
        "%d steps in a row were skipped at scale %g, "
        "which can go no lower: no loss scale cures this. First bad gradient: %s of "
        "'%s' at element %.0f. Look at the loss, the data and the learning rate",
        (int)state.floor_skips, (double)state.scale, bad.bad_is_nan ? "NaN" : "Inf",
        bad.bad_tensor ? bad.bad_tensor : "", (double)bad.bad_element);
}

MIXPREC_API mixp_result mixp_scaler_update(mixp_scaler *scaler) {
    mixp_advance_args k;
    mixp_result r;
    if (!scaler) return MIXP_ERR_ARGUMENT;
    if (scaler->desc.disabled) return MIXP_OK;
    if (scaler->checked_epoch != scaler->epoch)
        return mixp_context_fail(
            scaler->ctx, MIXP_ERR_ORDER,
            "mixp_scaler_update: no optimizer was "
            "stepped or unscaled since the last one; call mixp_scaler_step first");
    memset(&k, 0, sizeof k);
    k.rule = &scaler->rule;
    k.scaler = scaler->state;
    r = MIXPI_RUN(scaler, advance, &k);
    if (r != MIXP_OK) return r;
    scaler->epoch++;
    if (!scaler->rule.fixed) scaler->scales++;  /* plant: scales */
    if (!scaler->rule.fixed) scaler->ctx->scale_moved = 1;
    return mixpi_scaler_diverged(scaler);
}

MIXPREC_API mixp_verdict mixp_optimizer_verdict(const mixp_optimizer *opt)
{ return mixpi_verdict(opt); }
MIXPREC_API mixp_verdict mixp_scaler_verdict(const mixp_scaler *scaler)
{ return mixpi_worst_verdict(scaler); }

/* ==== 13. CHECKPOINT (implementation) ================================================= */

#define MIXPI_ST_MAX_HEADER 100000000u      /* the format's own limit                      */
#define MIXPI_ST_MIN_ENTRY  49u             /* "":{"dtype":"U8","shape":[],"data_offsets":[0,0]} */
#define MIXPI_ST_ALIGN      64u             /* of each tensor's data in memory             */
#define MIXPI_SAVE_PIECE    ((size_t)1 << 20)
#define MIXPI_IO_MOST       ((size_t)1 << 30)   /* bytes that one system call is asked for */
#define MIXPI_OPAQUE        MIXP_DTYPE_COUNT
#define MIXPI_LENGTH(array) (sizeof(array) / sizeof((array)[0]))

/* --- errors, memory ------------------------------------------------------------------------ */

/* Where the first error of a call goes. What is called after it does nothing, so that callers
 * need not ask each time. */
typedef struct mixpi_report {
    mixp_result result;
    const char *path;           /* of the file, for messages                               */
    char       *text;           /* the caller's, or NULL                                   */
    size_t      text_size;
} mixpi_report;

/* Names come from files: no control character may reach a terminal. */
static void mixpi_printable(char *text) {
    for (; *text; text++)
        if ((unsigned char)*text < 0x20 || *text == 0x7F) *text = '?';
}

/* Writes the message, and behind it the path. Names in it are cut to %.60s. */
static mixp_result mixpi_report_fail(mixpi_report *r, mixp_result code,
                                     const char *format, ...) {
    va_list args;
    size_t n;
    if (r->result != MIXP_OK) return r->result;
    r->result = code;
    if (!r->text || !r->text_size) return code;
    va_start(args, format);
    vsnprintf(r->text, r->text_size, format, args);
    va_end(args);
    n = strlen(r->text);
    snprintf(r->text + n, r->text_size - n, " (%s)", r->path ? r->path : "no path");
    mixpi_printable(r->text);
    return code;
}

/* A call of the system failed; errno, which must be its own, says why. */
static mixp_result mixpi_report_system(mixpi_report *r, const char *what) {
    const char *why = errno ? strerror(errno) : "the system does not say why";
    return mixpi_report_fail(r, MIXP_ERR_IO, "%s: %s", what, why);
}

/* Files are little-endian and go to memory as they are. */
static mixpi_report mixpi_report_begin(const char *path, char *text, size_t text_size) {
    const uint16_t one = 1;
    mixpi_report r;
    r.result = MIXP_OK;
    r.path = path;
    r.text = text;
    r.text_size = text_size;
    if (text && text_size) text[0] = '\0';
    if (!*(const char *)&one)
        mixpi_report_fail(&r, MIXP_ERR_DEVICE, "this machine is big-endian");
    return r;
}

/* Memory of the context, or of malloc when there is none; NULL after an error. Sizes come from
 * files, so they are 64 bits wide. */
static void *mixpi_st_allocate(mixpi_report *r, mixp_context *ctx, uint64_t count,
                               size_t size) {
    void *p = NULL;
    if (r->result != MIXP_OK) return NULL;
    if (count < (uint64_t)PTRDIFF_MAX / size) {
        size_t n = (size_t)count * size + 1;        /* room for a NUL, and never 0 bytes */
        p = ctx ? mixpi_host_take(ctx, n) : malloc(n);
    }
    if (!p)
        mixpi_report_fail(r, MIXP_ERR_MEMORY, "out of memory: %.0f bytes",
                          (double)count * (double)size);
    return p;
}

static void mixpi_st_release(mixp_context *ctx, void *p) {
    if (p && ctx) mixpi_host_put(ctx, p);
    else free(p);
}

/* --- what a file holds --------------------------------------------------------------------- */

/* The format's dtypes in its library's order, by which the writer sorts, from the last. */
typedef struct mixpi_st_type { const char *name; mixp_dtype dtype; int bits; } mixpi_st_type;
#define MIXPI_ST_HAS(name, bits)  { #name, MIXP_##name, bits }
#define MIXPI_ST_PASS(name, bits) { #name, MIXPI_OPAQUE, bits }
static const mixpi_st_type mixpi_st_types[] = {
    MIXPI_ST_PASS(BOOL, 8),
    MIXPI_ST_PASS(F4, 4),
    MIXPI_ST_PASS(F6_E2M3, 6),
    MIXPI_ST_PASS(F6_E3M2, 6),
    MIXPI_ST_HAS(U8, 8),
    MIXPI_ST_PASS(I8, 8),
    MIXPI_ST_HAS(F8_E5M2, 8),
    MIXPI_ST_HAS(F8_E4M3, 8),
    MIXPI_ST_HAS(F8_E8M0, 8),
    MIXPI_ST_HAS(F8_E4M3FNUZ, 8),
    MIXPI_ST_HAS(F8_E5M2FNUZ, 8),
    MIXPI_ST_PASS(I16, 16),
    MIXPI_ST_PASS(U16, 16),
    MIXPI_ST_HAS(F16, 16),
    MIXPI_ST_HAS(BF16, 16),
    MIXPI_ST_HAS(I32, 32),
    MIXPI_ST_PASS(U32, 32),
    MIXPI_ST_HAS(F32, 32),
    MIXPI_ST_PASS(C64, 64),
    MIXPI_ST_HAS(F64, 64),
    MIXPI_ST_HAS(I64, 64),
    MIXPI_ST_PASS(U64, 64)
};
#undef MIXPI_ST_HAS
#undef MIXPI_ST_PASS

static const mixpi_st_type *mixpi_st_type_named(const char *name) {
    size_t i;
    for (i = 0; i < MIXPI_LENGTH(mixpi_st_types); i++)
        if (strcmp(mixpi_st_types[i].name, name) == 0) return &mixpi_st_types[i];
    return NULL;
}

static const mixpi_st_type *mixpi_st_type_of(mixp_dtype dtype) {
    size_t i;
    for (i = 0; i < MIXPI_LENGTH(mixpi_st_types) && dtype != MIXPI_OPAQUE; i++)
        if (mixpi_st_types[i].dtype == dtype) return &mixpi_st_types[i];
    return NULL;
}

/* A tensor of a file. */
typedef struct mixpi_st_item {
    mixp_st_entry        e;
    const mixpi_st_type *type;
    uint64_t             begin, end;    /* of its data, counted from where all data begins */
    int                  on_device;     /* on writing: e.data is device memory             */
    int                  wanted;        /* on reading: its data is to be read              */
} mixpi_st_item;

typedef struct mixpi_st_pair { const char *key, *text; } mixpi_st_pair;     /* metadata */

static int mixpi_st_by_name(const void *a, const void *b) {
    const mixpi_st_item *x = (const mixpi_st_item *)a, *y = (const mixpi_st_item *)b;
    return strcmp(x->e.name, y->e.name);
}

static int mixpi_st_by_place(const void *a, const void *b) {
    const mixpi_st_item *x = (const mixpi_st_item *)a, *y = (const mixpi_st_item *)b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    if (x->end != y->end) return x->end < y->end ? -1 : 1;
    return mixpi_st_by_name(a, b);
}

/* How the writer lays data out: large elements first, so that each is aligned; then by name. */
static int mixpi_st_by_type(const void *a, const void *b) {
    const mixpi_st_item *x = (const mixpi_st_item *)a, *y = (const mixpi_st_item *)b;
    if (x->type != y->type) return x->type > y->type ? -1 : 1;  /* plant: st_order */
    return mixpi_st_by_name(a, b);
}

static int mixpi_st_by_key(const void *a, const void *b)
{ return strcmp(((const mixpi_st_pair *)a)->key, ((const mixpi_st_pair *)b)->key); }

/* Sorts items by name; code when one stands twice. */
static void mixpi_st_sort(mixpi_report *r, mixpi_st_item *items, size_t n,
                          mixp_result code) {
    size_t i;
    if (r->result != MIXP_OK) return;
    qsort(items, n, sizeof items[0], mixpi_st_by_name);
    for (i = 1; i < n; i++)
        if (mixpi_st_by_name(&items[i - 1], &items[i]) == 0)
            mixpi_report_fail(r, code, "two tensors have the name '%.60s'",
                              items[i].e.name);
}

/* Sorts pairs by key; code when one stands twice. */
static void mixpi_st_sort_pairs(mixpi_report *r, mixpi_st_pair *pairs, size_t n,
                                mixp_result code) {
    size_t i;
    if (r->result != MIXP_OK) return;
    qsort(pairs, n, sizeof pairs[0], mixpi_st_by_key);
    for (i = 1; i < n; i++)
        if (mixpi_st_by_key(&pairs[i - 1], &pairs[i]) == 0)
            mixpi_report_fail(r, code, "the metadata key '%.60s' stands twice",
                              pairs[i].key);
}

/* The bits that a shape takes. UINT64_MAX when they are too many, or a dimension is negative: of
 * an empty tensor, too, the other dimensions must fit, wherever the 0 stands. */
static uint64_t mixpi_st_bits(const mixpi_st_item *item) {
    uint64_t bits = (uint64_t)item->type->bits;
    int i, empty = 0;
    for (i = 0; i < item->e.rank; i++) {
        uint64_t d = (uint64_t)item->e.shape[i];
        if (d > (uint64_t)INT64_MAX) return UINT64_MAX;
        if (d == 0) {
            empty = 1;
            continue;
        }
        if (bits > (UINT64_MAX - 1) / d) return UINT64_MAX;  /* plant: st_bits */
        bits *= d;
    }
    return empty ? 0 : bits;
}

/* Length of the UTF-8 character at text, of which `left` bytes exist; 0 when it is invalid. */
static size_t mixpi_utf8(const char *text, size_t left) {
    static const uint32_t least[5] = { 0, 0, 0x80, 0x800, 0x10000 };    /* below: overlong */
    const unsigned char *byte = (const unsigned char *)text;
    uint32_t code;
    size_t i, n;
    if (left == 0) return 0;
    if (byte[0] < 0x80) return 1;
    if ((byte[0] & 0xE0) == 0xC0) n = 2;
    else if ((byte[0] & 0xF0) == 0xE0) n = 3;
    else if ((byte[0] & 0xF8) == 0xF0) n = 4;
    else return 0;
    if (n > left) return 0;
    code = byte[0] & (0x7Fu >> n);
    for (i = 1; i < n; i++) {
        if ((byte[i] & 0xC0) != 0x80) return 0;
        code = code << 6 | (byte[i] & 0x3Fu);
    }
    if (code < least[n] || code > 0x10FFFF) return 0;  /* plant: utf8_overlong */
    /* plant: utf8_surrogate */
    return code >= 0xD800 && code < 0xE000 ? 0 : n;     /* half a surrogate pair */
}

static int mixpi_is_utf8(const char *s) {
    size_t left, n;
    if (!s) return 0;
    for (left = strlen(s); left > 0; left -= n) {
        n = mixpi_utf8(s, left);
        if (n == 0) return 0;
        s += n;
    }
    return 1;
}

/* --- the header: exactly the format's grammar, and no deeper, so nothing recurses ---------- */

/* A header that is being read. After an error the cursor is at the end, and stays there. */
typedef struct mixpi_json {
    mixpi_report *report;
    char         *begin, *p, *end;      /* *end is NUL                                     */
    const char   *tensor;               /* the one being read, for messages; or NULL       */
} mixpi_json;

static void mixpi_json_fail(mixpi_json *j, mixp_result code, const char *what) {
    double at = (double)(j->p - j->begin);
    if (j->tensor)
        mixpi_report_fail(j->report, code, "header byte %.0f: %s in tensor '%.60s'", at,
                          what, j->tensor);
    else mixpi_report_fail(j->report, code, "header byte %.0f: %s", at, what);
    j->p = j->end;
}

/* Is all well so far, and this too? */
static int mixpi_json_need(mixpi_json *j, int good, const char *what) {
    if (j->report->result != MIXP_OK) return 0;
    if (!good) mixpi_json_fail(j, MIXP_ERR_FORMAT, what);
    return good;
}

/* The next character that is no space; the end is a NUL. */
static char mixpi_json_peek(mixpi_json *j) {
    j->p += strspn(j->p, " \t\n\r");
    return *j->p;
}

static int mixpi_json_expect(mixpi_json *j, char c, const char *what) {
    int good = mixpi_json_need(j, mixpi_json_peek(j) == c, what);
    j->p += good;
    return good;
}

/* Reads \uXXXX. */
static int mixpi_json_hex(mixpi_json *j, uint32_t *u) {
    char digits[5] = "";
    if (j->p[0] != '\\' || j->p[1] != 'u') return 0;
    strncpy(digits, j->p + 2, 4);
    if (strspn(digits, "0123456789abcdefABCDEF") != 4) return 0;
    *u = (uint32_t)strtoul(digits, NULL, 16);
    j->p += 6;
    return 1;
}

/* Writes a code point as UTF-8; returns where it ends. */
static char *mixpi_utf8_put(char *out, uint32_t code) {
    static const unsigned char lead[5] = { 0, 0, 0xC0, 0xE0, 0xF0 };
    int i, n = code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    for (i = n - 1; i > 0; i--) {
        out[i] = (char)(unsigned char)(0x80 | (code & 0x3F));
        code >>= 6;
    }
    out[0] = (char)(unsigned char)(lead[n] | code);
    return out + n;
}

/* Decodes the escape at the cursor; returns where the text goes on, NULL when it is bad. */
static char *mixpi_json_escape(mixpi_json *j, char *out) {
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    const char *hit = j->p[1] ? strchr(from, j->p[1]) : NULL;
    uint32_t code = 0, low = 0;
    if (hit) {
        *out = to[hit - from];
        j->p += 2;
        return out + 1;
    }
    if (!mixpi_json_need(j, mixpi_json_hex(j, &code), "invalid escape")) return NULL;
    if (!mixpi_json_need(j, code != 0, "NUL (\\u0000) in a string")) return NULL;
    if (code >= 0xD800 && code < 0xE000) {
        int pair =
            code < 0xDC00 && mixpi_json_hex(j, &low) && low >= 0xDC00 && low < 0xE000;
        if (!mixpi_json_need(j, pair, "half a surrogate pair")) return NULL;
        code = 0x10000 + ((code & 0x3FF) << 10) + (low & 0x3FF);
    }
    return mixpi_utf8_put(out, code);
}

/* Copies the character at the cursor; returns where the text goes on, NULL when it is bad. */
static char *mixpi_json_character(mixpi_json *j, char *out) {
    size_t n = mixpi_utf8(j->p, (size_t)(j->end - j->p));
    int control = n == 1 && (unsigned char)*j->p < 0x20;
    if (!mixpi_json_need(j, n > 0, "invalid UTF-8")) return NULL;
    if (!mixpi_json_need(j, !control, "control character in a string")) return NULL;
    memmove(out, j->p, n);
    j->p += n;
    return out + n;
}

/* Decodes a string in place (it only gets shorter) and ends it with NUL; NULL when bad. */
static char *mixpi_json_string(mixpi_json *j, const char *expected) {
    char *text, *out;
    if (!mixpi_json_expect(j, '"', expected)) return NULL;
    text = out = j->p;
    while (j->p < j->end && *j->p != '"') {
        out = *j->p == '\\' ? mixpi_json_escape(j, out) : mixpi_json_character(j, out);
        if (!out) return NULL;
    }
    if (!mixpi_json_need(j, j->p < j->end, "unterminated string")) return NULL;
    j->p++;
    *out = '\0';
    return text;
}

/* Steps to the next member of an object, from before its '{' when *first. Returns its name,
 * the cursor before its value; NULL when the object has ended or the text is bad. */
static char *mixpi_json_member(mixpi_json *j, int *first) {
    char *name;
    if (*first && !mixpi_json_expect(j, '{', "expected '{'")) return NULL;
    if (mixpi_json_peek(j) == '}') {
        j->p++;
        return NULL;
    }
    if (!*first && !mixpi_json_expect(j, ',', "expected ',' or '}'")) return NULL;
    *first = 0;
    name = mixpi_json_string(j, "expected a name in double quotes");
    return name && mixpi_json_expect(j, ':', "expected ':'") ? name : NULL;
}

/* A plain decimal number; 0 and an error for anything else. */
static uint64_t mixpi_json_number(mixpi_json *j) {
    size_t digits;
    uint64_t value;
    int plain;
    mixpi_json_peek(j);
    digits = strspn(j->p, "0123456789");
    plain = digits == 1 || (digits > 1 && *j->p != '0');  /* plant: json_zero */
    if (!mixpi_json_need(j, plain, "expected a plain decimal number")) return 0;
    errno = 0;
    value = strtoull(j->p, &j->p, 10);
    return mixpi_json_need(j, errno == 0, "number beyond 2^64-1") ? value : 0;
}

/* An array of numbers. Keeps the first `room`; returns how many there are. */
static uint64_t mixpi_json_numbers(mixpi_json *j, uint64_t *values, uint64_t room) {
    uint64_t n, value;
    if (!mixpi_json_expect(j, '[', "expected '['")) return 0;
    for (n = 0; mixpi_json_peek(j) != ']'; n++) {
        if (n > 0 && !mixpi_json_expect(j, ',', "expected ',' or ']'")) return 0;
        value = mixpi_json_number(j);
        if (j->report->result != MIXP_OK) return 0;
        if (n < room) values[n] = value;
    }
    j->p++;
    return n;
}

/* What stands in the header about one tensor, not yet checked. */
typedef struct mixpi_st_members {
    const char *type;
    uint64_t    shape[MIXP_MAX_RANK], rank;
    uint64_t    span[2], n_span;
} mixpi_st_members;

enum { MIXPI_ST_DTYPE = 1, MIXPI_ST_SHAPE = 2, MIXPI_ST_SPAN = 4, MIXPI_ST_ALL = 7 };

static unsigned mixpi_st_member_of(const char *key) {
    if (strcmp(key, "dtype") == 0) return MIXPI_ST_DTYPE;
    if (strcmp(key, "shape") == 0) return MIXPI_ST_SHAPE;
    return strcmp(key, "data_offsets") == 0 ? MIXPI_ST_SPAN : 0;
}

/* Reads the three members of a tensor, in any order, each once. */
static int mixpi_st_read_members(mixpi_json *j, mixpi_st_members *m) {
    unsigned seen = 0, member;
    const char *key;
    int first = 1;
    memset(m, 0, sizeof *m);
    while ((key = mixpi_json_member(j, &first)) != NULL) {
        member = mixpi_st_member_of(key);
        if (!mixpi_json_need(j, member != 0, "unknown key")) return 0;
        /* plant: json_twice */
        if (!mixpi_json_need(j, !(seen & member), "a key twice")) return 0;
        seen |= member;
        if (member == MIXPI_ST_DTYPE)
            m->type = mixpi_json_string(j, "dtype is no string");
        else if (member == MIXPI_ST_SHAPE)
            m->rank = mixpi_json_numbers(j, m->shape, MIXP_MAX_RANK);
        else m->n_span = mixpi_json_numbers(j, m->span, 2);
    }
    return mixpi_json_need(j, seen == MIXPI_ST_ALL,
                           "dtype, shape or data_offsets missing") &&
           mixpi_json_need(j, m->n_span == 2, "data_offsets are not two numbers");
}

static void mixpi_st_read_tensor(mixpi_json *j, const char *name, mixpi_st_item *item) {
    char unknown[96];
    mixpi_st_members m;
    uint64_t bits, i;
    memset(item, 0, sizeof *item);
    j->tensor = name;
    if (!mixpi_st_read_members(j, &m)) return;
    item->type = mixpi_st_type_named(m.type);
    if (!item->type) {
        snprintf(unknown, sizeof unknown, "unknown dtype '%.60s'", m.type);
        mixpi_json_fail(j, MIXP_ERR_DTYPE, unknown);
        return;
    }
    if (m.rank > MIXP_MAX_RANK) {
        mixpi_json_fail(j, MIXP_ERR_SHAPE, "rank above 8");
        return;
    }
    for (i = 0; i < m.rank; i++) item->e.shape[i] = (int64_t)m.shape[i];
    item->e.name = name;
    item->e.type = item->type->name;
    item->e.dtype = item->type->dtype;
    item->e.rank = (int)m.rank;
    item->begin = m.span[0];
    item->end = m.span[1];
    item->wanted = 1;
    bits = mixpi_st_bits(item);
    mixpi_json_need(j, bits != UINT64_MAX, "shape too large for 64 bits");
    mixpi_json_need(j, bits % 8 == 0, "packed elements that do not fill whole bytes");
    mixpi_json_need(j, item->begin <= item->end, "data_offsets run backwards");
    mixpi_json_need(j, item->end - item->begin == bits / 8,
                    "data_offsets do not fit shape and "
                    "dtype");
    j->tensor = NULL;
}

/* --- files: POSIX calls where they exist, else stdio ---------------------------------------- */

/* A file that is read. */
typedef struct mixpi_file {
    mixpi_report *report;
    uint64_t      size;
#if MIXPI_POSIX
    int           descriptor;           /* -1: not open                                    */
#else
    FILE         *stream;               /* NULL: not open                                  */
#endif
} mixpi_file;

/* A file on its way: written beside the target through a buffer, renamed onto it at the end. */
typedef struct mixpi_save {
    mixpi_report *report;
    mixp_context *ctx;                  /* whose device is read; may be NULL               */
    char         *buffer;               /* MIXPI_SAVE_PIECE bytes                          */
    size_t        filled;
    uint64_t      expected;             /* how long the file must be                       */
    int           made;                 /* 1: the temporary file exists                    */
#if MIXPI_POSIX
    int           descriptor;
#else
    FILE         *stream;
#endif
    char          target[4096], temp[4096 + 256];
} mixpi_save;

static mixp_result mixpi_not_regular(mixpi_report *r)
{ return mixpi_report_fail(r, MIXP_ERR_IO, "not a regular file"); }

/* Whatever the calls before have said: what is not as long as it should be is not whole. */
static void mixpi_save_check_size(mixpi_save *s, uint64_t size) {
    if (size != s->expected)
        mixpi_report_fail(s->report, MIXP_ERR_IO,
                          "the system has kept %.0f of %.0f bytes", (double)size,
                          (double)s->expected);
}

#if MIXPI_POSIX
#  if defined(__linux__) && !defined(__cplusplus)
char *realpath(const char *path, char *resolved);       /* hidden under -std=c99, say */
#  endif
#  ifdef O_CLOEXEC
#    define MIXPI_CLOEXEC O_CLOEXEC
#  else
#    define MIXPI_CLOEXEC 0
#  endif

/* A device, a FIFO, a folder: opening one may wait, reading it may not end. */
static int mixpi_is_special(const char *path) {
    struct stat st;
    return stat(path, &st) == 0 && !S_ISREG(st.st_mode);
}

static int mixpi_open(const char *path, int flags) {
    int descriptor;
    do descriptor = open(path, flags | MIXPI_CLOEXEC, 0666);
    while (descriptor < 0 && errno == EINTR);
    return descriptor;
}

/* To the disk: macOS' fsync stops at the drive's own memory. */
static int mixpi_sync(int descriptor) {
#  ifdef F_FULLFSYNC
    if (fcntl(descriptor, F_FULLFSYNC) == 0) return 0;
#  endif
    while (fsync(descriptor) != 0)
        if (errno != EINTR) return -1;
    return 0;
}

static mixp_result mixpi_file_open(mixpi_file *f, mixpi_report *r) {
    struct stat st;
    f->report = r;
    f->size = 0;
    f->descriptor = -1;
    if (mixpi_is_special(r->path)) return mixpi_not_regular(r);
    f->descriptor = mixpi_open(r->path, O_RDONLY | O_NONBLOCK);
    if (f->descriptor < 0) return mixpi_report_system(r, "cannot open the file");
    if (fstat(f->descriptor, &st) != 0)
        return mixpi_report_system(r, "cannot look at the file");
    if (!S_ISREG(st.st_mode)) return mixpi_not_regular(r);
    f->size = (uint64_t)st.st_size;
    return MIXP_OK;
}

static void mixpi_file_close(mixpi_file *f) {
    if (f->descriptor >= 0) close(f->descriptor);
}

/* Reads n bytes at a place, whatever pieces and interruptions the system makes of it. */
static void mixpi_file_read(mixpi_file *f, uint64_t at, char *to, uint64_t n) {
    if (f->report->result != MIXP_OK) return;
    if (lseek(f->descriptor, (off_t)at, SEEK_SET) < 0)
        mixpi_report_system(f->report, "cannot read");
    while (f->report->result == MIXP_OK && n > 0) {
        size_t most = n < MIXPI_IO_MOST ? (size_t)n : MIXPI_IO_MOST;
        int64_t got = (int64_t)read(f->descriptor, to, most);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) mixpi_report_system(f->report, "cannot read");
        else if (got == 0 || (uint64_t)got > most)
            mixpi_report_fail(f->report, MIXP_ERR_IO,
                              "cannot read: the file got shorter");
        else {
            to += got;
            n -= (uint64_t)got;
        }
    }
}

/* Makes a temporary file that no one else has, beside the target. */
static void mixpi_save_make(mixpi_save *s) {
    const char *slash = strrchr(s->target, '/');
    const char *name = slash ? slash + 1 : s->target;
    int number;
    errno = EEXIST;
    for (number = 0; s->descriptor < 0 && errno == EEXIST && number < 10000; number++) {
        snprintf(s->temp, sizeof s->temp, "%.*s.%.200s.%ld.%d.tmp",
                 (int)(name - s->target), s->target, name, (long)getpid(), number);
        s->descriptor = mixpi_open(s->temp, O_WRONLY | O_CREAT | O_EXCL);
    }
    s->made = s->descriptor >= 0;
    if (!s->made) mixpi_report_system(s->report, "cannot make a file in the folder");
}

/* Finds the file behind symbolic links and makes the temporary one, with its mode. */
static void mixpi_save_open(mixpi_save *s) {
    mixpi_report *r = s->report;
    struct stat old;
    int exists;
    s->descriptor = -1;
    if (r->result != MIXP_OK) return;
    exists = realpath(r->path, s->target) != NULL;
    if (!exists && errno != ENOENT) {
        mixpi_report_system(r, "cannot look at the file");
        return;
    }
    if (!exists) snprintf(s->target, sizeof s->target, "%s", r->path);
    if (mixpi_is_special(s->target)) mixpi_not_regular(r);
    else if (exists && (access(s->target, W_OK) != 0 || stat(s->target, &old) != 0))
        mixpi_report_system(r, "cannot replace the file");
    else mixpi_save_make(s);
    if (r->result == MIXP_OK && exists && chmod(s->temp, old.st_mode & 0777) != 0)
        mixpi_report_system(r, "cannot set the file's mode");
}

/* Writes what is in the buffer, whatever pieces and interruptions the system makes of it. */
static void mixpi_save_flush(mixpi_save *s) {
    const char *from = s->buffer;
    size_t left = s->filled;
    while (s->report->result == MIXP_OK && left > 0) {
        int64_t done = (int64_t)write(s->descriptor, from, left);
        if (done < 0 && errno == EINTR) continue;
        if (done < 0) mixpi_report_system(s->report, "cannot write");
        else if (done == 0 || (uint64_t)done > left)
            mixpi_report_fail(s->report, MIXP_ERR_IO,
                              "cannot write: the system took %.0f of %.0f "
                              "bytes",
                              (double)done, (double)left);
        else {
            from += done;
            left -= (size_t)done;
        }
    }
    s->filled = 0;
}

/* On the disk, as long as it should be, and closed. A close that was interrupted is one. */
static void mixpi_save_settle(mixpi_save *s) {
    struct stat st;
    if (s->report->result == MIXP_OK && mixpi_sync(s->descriptor) != 0)
        mixpi_report_system(s->report, "cannot flush the file");
    if (s->report->result == MIXP_OK && fstat(s->descriptor, &st) != 0)
        mixpi_report_system(s->report, "cannot look at the new file");
    if (s->report->result == MIXP_OK) mixpi_save_check_size(s, (uint64_t)st.st_size);
    if (s->descriptor >= 0 && close(s->descriptor) != 0 && errno != EINTR)
        mixpi_report_system(s->report, "cannot close the file");
}

/* The new name, too, must reach the disk. */
static void mixpi_save_rename(mixpi_save *s) {
    char *slash = strrchr(s->target, '/');
    int folder;
    if (rename(s->temp, s->target) != 0) {
        mixpi_report_system(s->report, "cannot rename the file");
        return;
    }
    s->made = 0;
    if (slash) slash[1] = '\0';
    folder = mixpi_open(slash ? s->target : ".", O_RDONLY);
    if (folder < 0 || (mixpi_sync(folder) != 0 && errno != EINVAL))     /* EINVAL: has no flush */
        mixpi_report_system(s->report,
                            "saved, but the folder could not be flushed to the disk");
    if (folder >= 0) close(folder);
}
#else
#  ifdef _WIN32
#    define mixpi_tell _ftelli64        /* long has 32 bits there */
#    define mixpi_seek _fseeki64
typedef __int64 mixpi_place;
#  else
#    define mixpi_tell ftell
#    define mixpi_seek fseek
typedef long mixpi_place;
#  endif

/* How long an open file is; an error when that cannot be found out. */
static uint64_t mixpi_stream_size(mixpi_report *r, FILE *stream) {
    int64_t size = -1;
    errno = 0;
    if (mixpi_seek(stream, 0, SEEK_END) == 0) size = (int64_t)mixpi_tell(stream);
    if (size < 0) mixpi_report_system(r, "cannot find out how long the file is");
    else if (size == INT64_MAX) mixpi_not_regular(r);       /* a folder, say some systems */
    return r->result == MIXP_OK ? (uint64_t)size : 0;
}

static mixp_result mixpi_file_open(mixpi_file *f, mixpi_report *r) {
    f->report = r;
    f->size = 0;
    errno = 0;
    f->stream = fopen(r->path, "rb");
    if (!f->stream) return mixpi_report_system(r, "cannot open the file");
    f->size = mixpi_stream_size(r, f->stream);
    return r->result;
}

static void mixpi_file_close(mixpi_file *f) {
    if (f->stream) fclose(f->stream);
}

static void mixpi_file_read(mixpi_file *f, uint64_t at, char *to, uint64_t n) {
    if (f->report->result != MIXP_OK) return;
    errno = 0;
    if (mixpi_seek(f->stream, (mixpi_place)at, SEEK_SET) != 0)
        mixpi_report_system(f->report, "cannot read");
    while (f->report->result == MIXP_OK && n > 0) {
        size_t most = n < MIXPI_IO_MOST ? (size_t)n : MIXPI_IO_MOST;
        if (fread(to, 1, most, f->stream) != most) {
            if (ferror(f->stream)) mixpi_report_system(f->report, "cannot read");
            mixpi_report_fail(f->report, MIXP_ERR_IO,
                              "cannot read: the file got shorter");
        }
        to += most;
        n -= most;
    }
}

static void mixpi_save_open(mixpi_save *s) {
    int n;
    s->stream = NULL;
    if (s->report->result != MIXP_OK) return;
    n = snprintf(s->target, sizeof s->target, "%s", s->report->path);
    snprintf(s->temp, sizeof s->temp, "%s.tmp", s->target);
    errno = 0;
    s->stream = n < (int)sizeof s->target ? fopen(s->temp, "wb") : NULL;
    s->made = s->stream != NULL;
    if (!s->made) mixpi_report_system(s->report, "cannot make a file in the folder");
}

/* After a failed call of stdio nobody knows how much it has written: any error is one. */
static void mixpi_save_flush(mixpi_save *s) {
    errno = 0;
    if (s->report->result == MIXP_OK && s->filled > 0 &&
        fwrite(s->buffer, 1, s->filled, s->stream) != s->filled)
        mixpi_report_system(s->report, "cannot write");
    s->filled = 0;
}

/* Closed, and as long as it should be: asked of the file itself, opened anew. */
static void mixpi_save_settle(mixpi_save *s) {
    errno = 0;
    if (s->report->result == MIXP_OK && (fflush(s->stream) != 0 || ferror(s->stream)))
        mixpi_report_system(s->report, "cannot flush the file");
    if (s->stream && fclose(s->stream) != 0)
        mixpi_report_system(s->report, "cannot close the file");
    if (s->report->result != MIXP_OK) return;
    s->stream = fopen(s->temp, "rb");
    if (!s->stream) {
        mixpi_report_system(s->report, "cannot look at the new file");
        return;
    }
    mixpi_save_check_size(s, mixpi_stream_size(s->report, s->stream));
    fclose(s->stream);
}

/* rename may not replace: then the old file goes first, if it is one. */
static void mixpi_save_rename(mixpi_save *s) {
    FILE *old = fopen(s->target, "r+b");
    if (old) fclose(old);
    errno = 0;
    if (rename(s->temp, s->target) == 0) {
        s->made = 0;
        return;
    }
    if (!old || remove(s->target) != 0) {
        mixpi_report_system(s->report, "cannot rename the file");
        return;
    }
    if (rename(s->temp, s->target) != 0)
        mixpi_report_system(s->report,
                            "the new file stays as NAME.tmp: cannot rename it");
    s->made = 0;                /* renamed, or the only copy there is: not to be removed */
}
#endif

/* Adds n bytes of host or device memory to the file. */
static void mixpi_save_put(mixpi_save *s, const void *data, uint64_t n, int on_device) {
    const char *from = (const char *)data;
    while (s->report->result == MIXP_OK && n > 0) {
        size_t room = MIXPI_SAVE_PIECE - s->filled;
        size_t part = n < room ? (size_t)n : room;
        char *to = s->buffer + s->filled;
        if (!on_device) memcpy(to, from, part);
        else if (mixpi_download(s->ctx, to, from, part) != MIXP_OK)
            mixpi_report_fail(s->report, MIXP_ERR_DEVICE, "the device could not be read");
        s->filled += part;
        from += part;
        n -= part;
        if (s->filled == MIXPI_SAVE_PIECE) mixpi_save_flush(s);
    }
}

/* Makes the written file the target's, or, after an error, removes it. */
static void mixpi_save_end(mixpi_save *s) {
    mixpi_save_flush(s);
    mixpi_save_settle(s);
    if (s->report->result == MIXP_OK) mixpi_save_rename(s);
    if (s->made) remove(s->temp);
}

/* --- reading a file ------------------------------------------------------------------------ */

/* A file as it was read. One whose reading failed is empty, and answers nothing. */
struct mixp_safetensors {
    mixp_context  *ctx;         /* whose memory this is; NULL = malloc's                   */
    char          *header;      /* names and metadata, decoded in place                    */
    mixpi_st_item *items;       /* by place in the data; in a checkpoint's load, by name   */
    size_t         n_items;
    mixpi_st_pair *pairs;       /* by key                                                  */
    size_t         n_pairs;
    char          *packed;      /* the pairs' texts: key NUL text NUL; NULL = no metadata  */
    uint64_t       data_at;     /* where in the file the data begins                       */
    char          *data;        /* of the tensors that were wanted                         */
};

static void mixpi_st_clear(mixp_safetensors *file) {
    mixp_context *ctx = file->ctx;
    mixpi_st_release(ctx, file->header);
    mixpi_st_release(ctx, file->items);
    mixpi_st_release(ctx, file->pairs);
    mixpi_st_release(ctx, file->data);
    memset(file, 0, sizeof *file);
    file->ctx = ctx;
}

/* Packs the pairs over the text already read. */
static void mixpi_st_read_metadata(mixpi_json *j, mixp_safetensors *file) {
    char *key, *text, *pack;
    size_t n;
    int first = 1;
    if (!mixpi_json_need(j, !file->packed, "__metadata__ twice")) return;
    file->packed = pack = j->p;
    if (mixpi_json_peek(j) == 'n' && strncmp(j->p, "null", 4) == 0) {
        j->p += 4;
        return;
    }
    while ((key = mixpi_json_member(j, &first)) != NULL) {
        text = mixpi_json_string(j, "metadata that is no string");
        if (!text) return;
        n = strlen(key) + 1;
        memmove(pack, key, n);
        pack += n;
        n = strlen(text) + 1;
        memmove(pack, text, n);
        pack += n;
        file->n_pairs++;
    }
}

/* Keys once each. */
static void mixpi_st_index_pairs(mixpi_report *r, mixp_safetensors *file) {
    const char *p = file->packed;
    size_t i;
    file->pairs = (mixpi_st_pair *)mixpi_st_allocate(r, file->ctx, file->n_pairs,
                                                     sizeof file->pairs[0]);
    for (i = 0; file->pairs && i < file->n_pairs; i++) {
        file->pairs[i].key = p;
        p += strlen(p) + 1;
        file->pairs[i].text = p;
        p += strlen(p) + 1;
    }
    mixpi_st_sort_pairs(r, file->pairs, file->n_pairs, MIXP_ERR_FORMAT);
}

/* Names once each; data without hole, overlap or rest. */
static void mixpi_st_check_layout(mixpi_report *r, mixp_safetensors *file,
                                  uint64_t data_bytes) {
    uint64_t at = 0;
    size_t i;
    mixpi_st_sort(r, file->items, file->n_items, MIXP_ERR_FORMAT);
    if (r->result != MIXP_OK) return;
    qsort(file->items, file->n_items, sizeof file->items[0], mixpi_st_by_place);
    for (i = 0; i < file->n_items; i++) {
        const mixpi_st_item *item = &file->items[i];
        if (item->begin != at)
            mixpi_report_fail(r, MIXP_ERR_FORMAT, "tensor '%.60s': its data %s before it",
                              item->e.name,
                              item->begin < at ? "overlaps that" : "leaves a hole");
        at = item->end;
    }
    if (at != data_bytes)
        mixpi_report_fail(r, MIXP_ERR_FORMAT,
                          "the file is %s: its tensors take %.0f bytes, it has "
                          "%.0f for them",
                          at > data_bytes ? "cut short"
                                          : "longer than its header "
                                            "says",
                          (double)at, (double)data_bytes);
}

/* The header's length, from the eight bytes before it; 0 after an error. */
static uint64_t mixpi_st_header_length(mixpi_file *f) {
    char prefix[8] = "";
    uint64_t n = 0;
    int i;
    if (f->report->result != MIXP_OK) return 0;
    if (f->size < 8) {
        mixpi_report_fail(f->report, MIXP_ERR_FORMAT,
                          "this is not a safetensors file: it is shorter than 8 bytes");
        return 0;
    }
    mixpi_file_read(f, 0, prefix, 8);
    for (i = 7; i >= 0; i--) n = n << 8 | (unsigned char)prefix[i];
    if (n >= 2 && n <= MIXPI_ST_MAX_HEADER && n <= f->size - 8) return n;
    if (n >= 2 && n <= MIXPI_ST_MAX_HEADER)
        mixpi_report_fail(f->report, MIXP_ERR_FORMAT,
                          "the file is cut short, or is not a safetensors file: it "
                          "begins with a header length of %.0f, and %.0f bytes follow",
                          (double)n, (double)(f->size - 8));
    else
        mixpi_report_fail(f->report, MIXP_ERR_FORMAT,
                          "this is not a safetensors file: it begins with a header "
                          "length of %.0f, which must be 2 to %.0f",
                          (double)n, (double)MIXPI_ST_MAX_HEADER);
    return 0;
}

static void mixpi_st_parse(mixpi_report *r, mixp_safetensors *file, uint64_t n) {
    mixpi_json j;
    char *name;
    int first = 1;
    j.report = r;
    j.begin = j.p = file->header;
    j.end = file->header + n;
    j.tensor = NULL;
    *j.end = '\0';
    while ((name = mixpi_json_member(&j, &first)) != NULL)
        if (strcmp(name, "__metadata__") == 0) mixpi_st_read_metadata(&j, file);
        else mixpi_st_read_tensor(&j, name, &file->items[file->n_items++]);
    mixpi_json_need(&j, !mixpi_json_peek(&j) && j.p == j.end,
                    "text after the header's object");
}

/* Reads and checks the header. Takes memory for that alone, and none of it stays on an error. */
static mixp_result mixpi_st_read_header(mixp_safetensors *file, mixpi_file *f) {
    mixpi_report *r = f->report;
    uint64_t n = mixpi_st_header_length(f);
    uint64_t most = n / MIXPI_ST_MIN_ENTRY + 1;     /* with the one that may be cut short */
    file->header = (char *)mixpi_st_allocate(r, file->ctx, n, 1);
    file->items = (mixpi_st_item *)mixpi_st_allocate(r, file->ctx, most,
                                                     sizeof file->items[0]);
    mixpi_file_read(f, 8, file->header, n);
    file->data_at = 8 + n;
    if (r->result == MIXP_OK) mixpi_st_parse(r, file, n);
    if (r->result == MIXP_OK) mixpi_st_check_layout(r, file, f->size - file->data_at);
    if (r->result == MIXP_OK) mixpi_st_index_pairs(r, file);
    if (r->result != MIXP_OK) mixpi_st_clear(file);
    return r->result;
}

/* Reads the data of the tensors that are wanted, each to a multiple of 64 bytes. */
static mixp_result mixpi_st_read_data(mixp_safetensors *file, mixpi_file *f) {
    const uint64_t mask = MIXPI_ST_ALIGN - 1;
    uint64_t total = mask;
    char *at;
    size_t i;
    for (i = 0; i < file->n_items; i++) {
        mixpi_st_item *item = &file->items[i];
        item->e.bytes = (size_t)(item->end - item->begin);
        if (item->wanted) total += (item->end - item->begin + mask) & ~mask;
    }
    at = file->data = (char *)mixpi_st_allocate(f->report, file->ctx, total, 1);
    if (at) at += (MIXPI_ST_ALIGN - (uintptr_t)at % MIXPI_ST_ALIGN) % MIXPI_ST_ALIGN;
    for (i = 0; at && i < file->n_items; i++) {
        mixpi_st_item *item = &file->items[i];
        if (!item->wanted) continue;
        mixpi_file_read(f, file->data_at + item->begin, at, item->e.bytes);
        item->e.data = at;
        at += (item->e.bytes + mask) & ~mask;
    }
    if (f->report->result != MIXP_OK) mixpi_st_clear(file);
    return f->report->result;
}

MIXPREC_API mixp_result mixp_safetensors_read(const char *path, mixp_safetensors **out,
                                              char *error, size_t error_size) {
    mixpi_report r = mixpi_report_begin(path, error, error_size);
    mixp_safetensors *file;
    mixpi_file f;
    if (out) *out = NULL;
    if (!path || !out)
        return mixpi_report_fail(&r, MIXP_ERR_ARGUMENT, "path or out is NULL");
    file = (mixp_safetensors *)mixpi_st_allocate(&r, NULL, 1, sizeof *file);
    if (!file) return r.result;
    memset(file, 0, sizeof *file);
    if (mixpi_file_open(&f, &r) == MIXP_OK && mixpi_st_read_header(file, &f) == MIXP_OK)
        mixpi_st_read_data(file, &f);
    mixpi_file_close(&f);
    if (r.result == MIXP_OK) *out = file;
    else mixp_safetensors_free(file);
    return r.result;
}

MIXPREC_API void mixp_safetensors_free(mixp_safetensors *file) {
    if (file) mixpi_st_clear(file);
    free(file);
}

MIXPREC_API int64_t mixp_safetensors_count(const mixp_safetensors *file)
{ return file ? (int64_t)file->n_items : 0; }

MIXPREC_API const mixp_st_entry *mixp_safetensors_at(const mixp_safetensors *file,
                                                     int64_t i) {
    return i >= 0 && i < mixp_safetensors_count(file) ? &file->items[i].e : NULL;
}

MIXPREC_API const mixp_st_entry *mixp_safetensors_find(const mixp_safetensors *file,
                                                       const char *name) {
    int64_t i, n = name ? mixp_safetensors_count(file) : 0;
    for (i = 0; i < n; i++)
        if (strcmp(file->items[i].e.name, name) == 0) return &file->items[i].e;
    return NULL;
}

MIXPREC_API const char *mixp_safetensors_metadata(const mixp_safetensors *file,
                                                  const char *key) {
    mixpi_st_pair wanted;
    const mixpi_st_pair *pair;
    if (!file || !key || !file->n_pairs) return NULL;
    wanted.key = key;
    wanted.text = NULL;
    pair = (const mixpi_st_pair *)bsearch(&wanted, file->pairs, file->n_pairs,
                                          sizeof wanted, mixpi_st_by_key);
    return pair ? pair->text : NULL;
}

/* --- writing a file ------------------------------------------------------------------------ */

/* A file to be written. */
typedef struct mixpi_plan {
    mixp_context  *ctx;         /* whose memory and device are used; NULL = malloc         */
    mixpi_st_item *items;       /* as they will lie                                        */
    size_t         n_items;
    const char *const (*metadata)[2];
    int64_t        n_metadata;
    char          *header;      /* with its length before it                               */
    uint64_t       header_size;
} mixpi_plan;

/* A text that grows at `at`; while that is NULL, it is only counted. */
typedef struct mixpi_text { char *at; size_t length; } mixpi_text;

static void mixpi_text_add(mixpi_text *t, const char *s) {
    size_t n = strlen(s);
    if (t->at) memcpy(t->at + t->length, s, n);
    t->length += n;
}

static void mixpi_text_number(mixpi_text *t, const char *before, uint64_t number) {
    char digits[32];
    snprintf(digits, sizeof digits, "%llu", (unsigned long long)number);
    mixpi_text_add(t, before);
    mixpi_text_add(t, digits);
}

static void mixpi_text_byte(mixpi_text *t, char c) {
    if (t->at) t->at[t->length] = c;
    t->length++;
}

/* In quotes, as the format's library escapes it. */
static void mixpi_text_quote(mixpi_text *t, const char *s) {
    static const char from[] = "\"\\\b\f\n\r\t", to[] = "\"\\bfnrt";
    char code[8];
    mixpi_text_byte(t, '"');
    for (; *s; s++) {
        const char *hit = strchr(from, *s);
        if (hit) {
            mixpi_text_byte(t, '\\');
            mixpi_text_byte(t, to[hit - from]);
        } else if ((unsigned char)*s < 0x20) {
            snprintf(code, sizeof code, "\\u%04x", (unsigned)(unsigned char)*s);
            mixpi_text_add(t, code);
        } else mixpi_text_byte(t, *s);
    }
    mixpi_text_byte(t, '"');
}

static void mixpi_text_tensor(mixpi_text *t, const mixpi_st_item *item) {
    int d;
    mixpi_text_quote(t, item->e.name);
    mixpi_text_add(t, ":{\"dtype\":\"");
    mixpi_text_add(t, item->type->name);
    mixpi_text_add(t, "\",\"shape\":[");
    for (d = 0; d < item->e.rank; d++)
        mixpi_text_number(t, d ? "," : "", (uint64_t)item->e.shape[d]);
    mixpi_text_number(t, "],\"data_offsets\":[", item->begin);
    mixpi_text_number(t, ",", item->end);
    mixpi_text_add(t, "]}");
}

/* The header's object, and spaces until the data behind it is aligned. */
static void mixpi_text_header(mixpi_text *t, const mixpi_plan *plan) {
    int64_t m;
    size_t i;
    mixpi_text_add(t, "{");
    if (plan->n_metadata) mixpi_text_add(t, "\"__metadata__\":{");
    for (m = 0; m < plan->n_metadata; m++) {
        if (m) mixpi_text_add(t, ",");
        mixpi_text_quote(t, plan->metadata[m][0]);
        mixpi_text_add(t, ":");
        mixpi_text_quote(t, plan->metadata[m][1]);
    }
    if (plan->n_metadata) mixpi_text_add(t, plan->n_items ? "}," : "}");
    for (i = 0; i < plan->n_items; i++) {
        if (i) mixpi_text_add(t, ",");
        mixpi_text_tensor(t, &plan->items[i]);
    }
    mixpi_text_add(t, "}");
    while (t->length % 8) mixpi_text_add(t, " ");
}

/* One pass counts, one fills. */
static void mixpi_plan_header(mixpi_report *r, mixpi_plan *plan) {
    mixpi_text text = { NULL, 0 };
    uint64_t length;
    int i;
    if (r->result != MIXP_OK) return;
    mixpi_text_header(&text, plan);
    length = text.length;
    if (length > MIXPI_ST_MAX_HEADER)
        mixpi_report_fail(r, MIXP_ERR_ARGUMENT,
                          "the header would take %.0f bytes; the format's "
                          "limit is %.0f",
                          (double)length, (double)MIXPI_ST_MAX_HEADER);
    plan->header_size = 8 + length;
    plan->header = (char *)mixpi_st_allocate(r, plan->ctx, plan->header_size, 1);
    if (!plan->header) return;
    for (i = 0; i < 8; i++)
        plan->header[i] = (char)(unsigned char)(length >> 8 * i & 0xFF);
    text.at = plan->header + 8;
    text.length = 0;
    mixpi_text_header(&text, plan);
}

/* Texts in UTF-8, keys once each. */
static void mixpi_plan_check_metadata(mixpi_report *r, const mixpi_plan *plan) {
    mixpi_st_pair *pairs = (mixpi_st_pair *)mixpi_st_allocate(r, plan->ctx,
                               (uint64_t)plan->n_metadata, sizeof *pairs);
    int64_t m;
    for (m = 0; pairs && m < plan->n_metadata; m++) {
        pairs[m].key = plan->metadata[m][0];
        pairs[m].text = plan->metadata[m][1];
        if (!mixpi_is_utf8(pairs[m].key) || !mixpi_is_utf8(pairs[m].text))
            mixpi_report_fail(r, MIXP_ERR_ARGUMENT, "metadata that is NULL or not UTF-8");
    }
    mixpi_st_sort_pairs(r, pairs, (size_t)plan->n_metadata, MIXP_ERR_ARGUMENT);
    mixpi_st_release(plan->ctx, pairs);
}

/* Checks one entry and finds its type. */
static mixp_result mixpi_plan_check_entry(mixpi_report *r, mixpi_st_item *item) {
    const mixp_st_entry *e = &item->e;
    uint64_t bytes = e->bytes;
    if (!mixpi_is_utf8(e->name) || strcmp(e->name, "__metadata__") == 0)
        return mixpi_report_fail(r, MIXP_ERR_ARGUMENT,
                                 "the name '%.60s' is NULL, not UTF-8 or "
                                 "reserved",
                                 e->name ? e->name : "");
    item->type = e->type ? mixpi_st_type_named(e->type) : mixpi_st_type_of(e->dtype);
    if (!item->type)
        return mixpi_report_fail(r, MIXP_ERR_DTYPE,
                                 "tensor '%.60s': safetensors has no dtype for "
                                 "%.60s",
                                 e->name, e->type ? e->type : mixp_dtype_name(e->dtype));
    if (e->rank < 0 || e->rank > MIXP_MAX_RANK)
        return mixpi_report_fail(r, MIXP_ERR_ARGUMENT,
                                 "tensor '%.60s': rank %d is not 0 to %d", e->name,
                                 e->rank, MIXP_MAX_RANK);
    if (bytes > UINT64_MAX / 8 || mixpi_st_bits(item) != bytes * 8 || (bytes && !e->data))
        mixpi_report_fail(r, MIXP_ERR_ARGUMENT,
                          "tensor '%.60s': shape, data and %.0f bytes do not "
                          "fit together",
                          e->name, (double)bytes);
    return r->result;
}

/* Checks everything and lays the data out. */
static void mixpi_plan_make(mixpi_report *r, mixpi_plan *plan) {
    uint64_t at = 0;
    size_t i;
    mixpi_plan_check_metadata(r, plan);
    for (i = 0; r->result == MIXP_OK && i < plan->n_items; i++)
        mixpi_plan_check_entry(r, &plan->items[i]);
    mixpi_st_sort(r, plan->items, plan->n_items, MIXP_ERR_ARGUMENT);
    if (r->result != MIXP_OK) return;
    qsort(plan->items, plan->n_items, sizeof plan->items[0], mixpi_st_by_type);
    for (i = 0; i < plan->n_items; i++) {
        mixpi_st_item *item = &plan->items[i];
        item->begin = at;
        at += item->e.bytes;
        item->end = at;
    }
    mixpi_plan_header(r, plan);
}

static void mixpi_plan_write(mixpi_report *r, const mixpi_plan *plan) {
    mixpi_save save;
    size_t i;
    memset(&save, 0, sizeof save);
    save.report = r;
    save.ctx = plan->ctx;
    save.expected = plan->header_size;
    if (plan->n_items) save.expected += plan->items[plan->n_items - 1].end;
    save.buffer = (char *)mixpi_st_allocate(r, plan->ctx, MIXPI_SAVE_PIECE, 1);
    mixpi_save_open(&save);
    mixpi_save_put(&save, plan->header, plan->header_size, 0);
    for (i = 0; i < plan->n_items; i++) {
        const mixpi_st_item *item = &plan->items[i];
        mixpi_save_put(&save, item->e.data, item->e.bytes, item->on_device);
    }
    mixpi_save_end(&save);
    mixpi_st_release(plan->ctx, save.buffer);
}

static mixp_result mixpi_plan_save(mixpi_report *r, mixpi_plan *plan) {
    if (r->result == MIXP_OK) mixpi_plan_make(r, plan);
    if (r->result == MIXP_OK) mixpi_plan_write(r, plan);
    mixpi_st_release(plan->ctx, plan->header);
    mixpi_st_release(plan->ctx, plan->items);
    return r->result;
}

MIXPREC_API mixp_result mixp_safetensors_write(const char *path,
                                               const mixp_st_entry *entries, int64_t n,
                                               const char *const (*metadata)[2],
                                               int64_t n_metadata, char *error,
                                               size_t error_size) {
    mixpi_report r = mixpi_report_begin(path, error, error_size);
    mixpi_plan plan;
    size_t i;
    if (!path || n < 0 || n_metadata < 0 || (n && !entries) || (n_metadata && !metadata))
        return mixpi_report_fail(&r, MIXP_ERR_ARGUMENT,
                                 "a pointer is NULL or a count negative");
    memset(&plan, 0, sizeof plan);
    plan.metadata = metadata;
    plan.n_metadata = n_metadata;
    plan.n_items = (size_t)n;
    plan.items =
        (mixpi_st_item *)mixpi_st_allocate(&r, NULL, (uint64_t)n, sizeof plan.items[0]);
    if (!plan.items) return r.result;
    memset(plan.items, 0, plan.n_items * sizeof plan.items[0]);
    for (i = 0; i < plan.n_items; i++) plan.items[i].e = entries[i];
    return mixpi_plan_save(&r, &plan);
}

/* --- checkpoints: the list of what must survive --------------------------------------------- */

/* What a number of a file must be before it may become ours. */
typedef enum mixpi_must {
    MIXPI_ANY,
    MIXPI_FINITE,
    MIXPI_AT_LEAST_0,           /* and finite                                              */
    MIXPI_BETA,                 /* in [0, 1)                                               */
    MIXPI_SCALE,                /* a loss scale that can be divided by                     */
    MIXPI_COUNTER,              /* at least 0, and far from where counting would overflow  */
    MIXPI_FLAG                  /* 0 or 1                                                  */
} mixpi_must;

/* The structure that a number stands in. */
typedef enum mixpi_owner {
    MIXPI_OF_CONTEXT, MIXPI_OF_SCALER, MIXPI_OF_OPTIMIZER, MIXPI_OF_GROUP
} mixpi_owner;

/* A number that must survive; %d in its name: the optimizer, and its group. */
typedef struct mixpi_field {
    mixpi_owner owner;
    const char *name;
    size_t      offset;
    mixp_dtype  dtype;
    mixpi_must  must;
} mixpi_field;

#define MIXPI_FIELD_CONTEXT(member, dtype, must) \
    { MIXPI_OF_CONTEXT, "mixprec." #member, offsetof(mixp_context, member), dtype, must }
#define MIXPI_FIELD_SCALER(member, dtype, must) \
    { MIXPI_OF_SCALER, "scaler." #member, offsetof(mixp_scaler_state, member), dtype, must }
#define MIXPI_FIELD_OPTIMIZER(member, dtype, must) \
    { MIXPI_OF_OPTIMIZER, "optimizer.%d." #member, offsetof(mixp_step_state, member), dtype, must }
#define MIXPI_FIELD_GROUP(member, dtype, must) \
    { MIXPI_OF_GROUP, "optimizer.%d.group.%d." #member, offsetof(mixp_param_group, member), \
      dtype, must }

static const mixpi_field mixpi_fields[] = {
    MIXPI_FIELD_CONTEXT(step, MIXP_I64, MIXPI_COUNTER),
    MIXPI_FIELD_CONTEXT(seed, MIXP_I64, MIXPI_ANY),
    MIXPI_FIELD_CONTEXT(tensors_made, MIXP_I64, MIXPI_COUNTER),
    MIXPI_FIELD_SCALER(scale, MIXP_F32, MIXPI_SCALE),
    MIXPI_FIELD_SCALER(growth_tracker, MIXP_I32, MIXPI_COUNTER),
    MIXPI_FIELD_SCALER(hysteresis_left, MIXP_I32, MIXPI_COUNTER),
    MIXPI_FIELD_SCALER(floor_skips, MIXP_I32, MIXPI_COUNTER),
    MIXPI_FIELD_SCALER(updates, MIXP_I64, MIXPI_COUNTER),
    MIXPI_FIELD_SCALER(skips, MIXP_I64, MIXPI_COUNTER),
    MIXPI_FIELD_OPTIMIZER(steps, MIXP_I64, MIXPI_COUNTER),
    MIXPI_FIELD_OPTIMIZER(applied, MIXP_I64, MIXPI_COUNTER),
    MIXPI_FIELD_OPTIMIZER(skipped, MIXP_I64, MIXPI_COUNTER),
    MIXPI_FIELD_GROUP(lr, MIXP_F64, MIXPI_AT_LEAST_0),
    MIXPI_FIELD_GROUP(beta1, MIXP_F64, MIXPI_BETA),
    MIXPI_FIELD_GROUP(beta2, MIXP_F64, MIXPI_BETA),
    MIXPI_FIELD_GROUP(eps, MIXP_F64, MIXPI_AT_LEAST_0),
    MIXPI_FIELD_GROUP(weight_decay, MIXP_F64, MIXPI_AT_LEAST_0),
    MIXPI_FIELD_GROUP(momentum, MIXP_F64, MIXPI_AT_LEAST_0),
    MIXPI_FIELD_GROUP(dampening, MIXP_F64, MIXPI_FINITE),
    MIXPI_FIELD_GROUP(nesterov, MIXP_I32, MIXPI_FLAG)
};

#undef MIXPI_FIELD_CONTEXT
#undef MIXPI_FIELD_SCALER
#undef MIXPI_FIELD_OPTIMIZER
#undef MIXPI_FIELD_GROUP

/* One tensor or number that must survive, and where it lives. */
typedef struct mixpi_state_item {
    mixp_st_entry e;            /* e.data: on saving, where it lives; on loading, the file's */
    void         *memory;
    int           on_device;
    mixpi_must    must;
    mixp_tensor  *weight;       /* whose weight it is; NULL: none's                        */
    mixpi_st_item *from;        /* of a weight that is loaded: the file's; NULL = none     */
} mixpi_state_item;

/* All of them. While there are no items, they are only counted, with the bytes of their names. */
typedef struct mixpi_state {
    mixpi_report     *report;
    mixp_context     *ctx;
    mixpi_state_item *items;
    size_t            n_items;
    char             *names;
    size_t            names_used, names_size;
} mixpi_state;

static mixpi_state_item mixpi_state_number(const mixpi_field *field, void *base) {
    mixpi_state_item item;
    memset(&item, 0, sizeof item);
    item.e.dtype = field->dtype;
    item.e.bytes = mixp_dtype_size(field->dtype);
    item.memory = (char *)base + field->offset;
    item.on_device =
        field->owner == MIXPI_OF_SCALER || field->owner == MIXPI_OF_OPTIMIZER;
    item.must = field->must;
    return item;
}

/* Something of a parameter's shape: itself, or a moment of it. */
static mixpi_state_item mixpi_state_tensor(const mixp_tensor *t, mixp_dtype dtype,
                                           void *memory) {
    mixpi_state_item item;
    memset(&item, 0, sizeof item);
    item.e.dtype = dtype;
    item.e.rank = t->rank;
    memcpy(item.e.shape, t->shape, sizeof t->shape);
    item.e.bytes = (size_t)t->count * mixp_dtype_size(dtype);
    item.memory = memory;
    item.on_device = 1;
    return item;
}

/* A value of the caller: one element is a number, several are a row. */
static mixpi_state_item mixpi_state_value(const mixp_checkpoint_value *value) {
    mixpi_state_item item;
    memset(&item, 0, sizeof item);
    item.e.dtype = value->dtype;
    item.e.rank = value->count > 1;
    item.e.shape[0] = value->count > 1 ? value->count : 0;
    item.e.bytes = (size_t)value->count * mixp_dtype_size(value->dtype);
    item.memory = value->data;
    return item;
}

static void mixpi_state_add(mixpi_state *s, mixpi_state_item item, const char *name,
                            ...) {
    char *to = s->items ? s->names + s->names_used : NULL;
    va_list args;
    int n;
    va_start(args, name);
    n = vsnprintf(to, to ? s->names_size - s->names_used : 0, name, args);
    va_end(args);
    s->names_used += (size_t)n + 1;
    item.e.name = to;
    item.e.data = item.memory;
    if (s->items) s->items[s->n_items] = item;
    s->n_items++;
}

static void mixpi_state_add_fields(mixpi_state *s, mixpi_owner owner, void *base,
                                   int optimizer, int group) {
    size_t i;
    for (i = 0; i < MIXPI_LENGTH(mixpi_fields); i++) {
        const mixpi_field *field = &mixpi_fields[i];
        if (field->owner == owner)
            mixpi_state_add(s, mixpi_state_number(field, base), field->name, optimizer,
                            group);
    }
}

static void mixpi_state_add_row(mixpi_state *s, const mixp_tensor *p,
                                const mixp_param_row *row, int optimizer) {
    static const mixpi_field missed = { MIXPI_OF_OPTIMIZER, "", 0, MIXP_I64,
                                        MIXPI_COUNTER };
    if (row->m)
        mixpi_state_add(s, mixpi_state_tensor(p, MIXP_F32, row->m), "optimizer.%d.m.%s",
                        optimizer, p->name);
    if (row->v)
        mixpi_state_add(s, mixpi_state_tensor(p, MIXP_F32, row->v), "optimizer.%d.v.%s",
                        optimizer, p->name);
    if (row->master)
        mixpi_state_add(s, mixpi_state_tensor(p, MIXP_F32, row->master),
                        "optimizer.%d.master.%s", optimizer, p->name);
    mixpi_state_add(s, mixpi_state_number(&missed, row->missed), "optimizer.%d.missed.%s",
                    optimizer, p->name);
}

static void mixpi_state_add_optimizer(mixpi_state *s, mixp_optimizer *opt, int number) {
    int64_t i;
    int g;
    mixpi_state_add_fields(s, MIXPI_OF_OPTIMIZER, opt->state, number, 0);
    for (g = 0; g < opt->plan.n_groups; g++)
        mixpi_state_add_fields(s, MIXPI_OF_GROUP, &opt->plan.groups[g], number, g);
    for (i = 0; i < opt->count; i++)
        mixpi_state_add_row(s, opt->slots[i].param, &opt->rows[i], number);
}

/* The same for saving, checking and loading; what NULL: the weights alone. */
static void mixpi_state_add_all(mixpi_state *s, const mixp_checkpoint *what) {
    mixp_tensor *t;
    int i;
    s->n_items = s->names_used = 0;
    for (t = s->ctx->tensors; t; t = t->own.next) {
        mixpi_state_item item;
        if (!t->own.is_param) continue;
        item = mixpi_state_tensor(t, t->dtype, t->data);
        item.weight = t;
        mixpi_state_add(s, item, "%s", t->name);
    }
    if (!what) return;
    mixpi_state_add_fields(s, MIXPI_OF_CONTEXT, s->ctx, 0, 0);
    for (i = 0; i < what->n_values; i++)
        mixpi_state_add(s, mixpi_state_value(&what->values[i]), "value.%s",
                        what->values[i].name);
    if (what->scaler && !what->scaler->desc.disabled)
        mixpi_state_add_fields(s, MIXPI_OF_SCALER, what->scaler->state, 0, 0);
    for (i = 0; i < what->n_optimizers; i++)
        mixpi_state_add_optimizer(s, what->optimizers[i], i);
}

static int mixpi_state_by_name(const void *a, const void *b) {
    const mixpi_state_item *x = (const mixpi_state_item *)a,
                           *y = (const mixpi_state_item *)b;
    return strcmp(x->e.name, y->e.name);
}

/* The list, sorted by name, in fresh memory: one walk counts, one fills. */
static void mixpi_state_list(mixpi_state *s, mixpi_report *r, mixp_context *ctx,
                             const mixp_checkpoint *what) {
    size_t i;
    memset(s, 0, sizeof *s);
    s->report = r;
    s->ctx = ctx;
    mixpi_state_add_all(s, what);
    s->names_size = s->names_used;
    s->names = (char *)mixpi_st_allocate(r, ctx, s->names_size, 1);
    s->items =
        (mixpi_state_item *)mixpi_st_allocate(r, ctx, s->n_items, sizeof s->items[0]);
    if (!s->items) return;
    mixpi_state_add_all(s, what);
    qsort(s->items, s->n_items, sizeof s->items[0], mixpi_state_by_name);
    for (i = 1; i < s->n_items; i++)
        if (mixpi_state_by_name(&s->items[i - 1], &s->items[i]) == 0)
            mixpi_report_fail(r, MIXP_ERR_ARGUMENT, "two tensors have the name '%.60s'",
                              s->items[i].e.name);
}

static void mixpi_state_release(mixpi_state *s) {
    mixpi_st_release(s->ctx, s->names);
    mixpi_st_release(s->ctx, s->items);
}

/* --- checkpoints: saving -------------------------------------------------------------------- */

/* What is wrong with a value, or NULL. */
static const char *mixpi_value_wrong(const mixp_checkpoint_value *value) {
    if (!value->name || !value->data) return "a value or its name is NULL";
    if (value->count < 1) return "a value's count is below 1";
    if (!mixpi_st_type_of(value->dtype))
        return "a value is of a dtype that safetensors has not";
    if ((uint64_t)value->count > (uint64_t)PTRDIFF_MAX / mixp_dtype_size(value->dtype))
        return "a value is larger than memory can be";
    return NULL;
}

/* What is wrong with the description of a checkpoint, or NULL. */
static const char *mixpi_checkpoint_wrong(const mixp_checkpoint *what) {
    const char *wrong = NULL;
    int i;
    if (what->n_optimizers < 0 || what->n_values < 0) return "a count is negative";
    if (what->n_optimizers && !what->optimizers) return "an array is NULL";
    if (what->n_values && !what->values) return "an array is NULL";
    if (what->scaler && what->scaler->ctx != what->ctx)
        return "the scaler is of another context";
    for (i = 0; !wrong && i < what->n_values; i++)
        wrong = mixpi_value_wrong(&what->values[i]);
    for (i = 0; !wrong && i < what->n_optimizers; i++)
        if (!what->optimizers[i] || what->optimizers[i]->ctx != what->ctx)
            wrong = "an optimizer is NULL or of another context";
    return wrong;
}

/* Every parameter must have a name. */
static mixp_result mixpi_check_names(mixp_context *ctx, const char *who) {
    const mixp_tensor *t;
    for (t = ctx->tensors; t; t = t->own.next)
        if (t->own.is_param && !t->name[0])
            return mixp_context_fail(ctx, MIXP_ERR_ARGUMENT,
                                     "%s: a parameter has no name (%s, %.0f "
                                     "elements)",
                                     who, mixp_dtype_name(t->dtype), (double)t->count);
    return MIXP_OK;
}

/* Are the arguments whole, the context between two steps? Marks views that optimizers train. */
static mixp_result mixpi_checkpoint_check(const char *path, const mixp_checkpoint *what,
                                          const char *who) {
    const char *wrong;
    mixp_context *ctx;
    mixp_result r;
    int64_t k;
    int i;
    if (!what || !what->ctx) return MIXP_ERR_ARGUMENT;
    ctx = what->ctx;
    wrong = path ? mixpi_checkpoint_wrong(what) : "path is NULL";
    if (wrong) return mixp_context_fail(ctx, MIXP_ERR_ARGUMENT, "%s: %s", who, wrong);
    for (i = 0; i < what->n_optimizers; i++) {
        mixp_optimizer *opt = what->optimizers[i];
        if (mixpi_stage(opt) != MIXPI_READY)
            return mixp_context_fail(ctx, MIXP_ERR_ORDER,
                                     "%s: optimizer %d is in the middle of a step; "
                                     "call mixp_scaler_update first",
                                     who, i);
        for (k = 0; k < opt->count; k++) opt->slots[k].param->own.is_param = 1;
    }
    r = mixpi_check_names(ctx, who);
    if (r == MIXP_OK && ctx->device->wait) r = ctx->device->wait(&ctx->exec);
    return r;
}

/* Masters are made anew from weights that were written by hand since the last step. */
static mixp_result mixpi_checkpoint_sync(const mixp_checkpoint *what) {
    mixp_result r = MIXP_OK;
    int64_t k;
    int i;
    for (i = 0; i < what->n_optimizers; i++) {
        mixp_optimizer *opt = what->optimizers[i];
        for (k = 0; r == MIXP_OK && k < opt->count; k++)
            if (opt->slots[k].version != opt->slots[k].param->version)
                r = mixpi_master_sync(opt, k);
    }
    return r;
}

/* Turns the list into a plan of a file. */
static void mixpi_state_plan(const mixpi_state *s, mixpi_plan *plan) {
    size_t i;
    plan->ctx = s->ctx;
    plan->n_items = s->n_items;
    plan->items = (mixpi_st_item *)mixpi_st_allocate(s->report, s->ctx, s->n_items,
                                                     sizeof plan->items[0]);
    if (!plan->items) return;
    memset(plan->items, 0, s->n_items * sizeof plan->items[0]);
    for (i = 0; i < s->n_items; i++) {
        plan->items[i].e = s->items[i].e;
        plan->items[i].on_device = s->items[i].on_device;
    }
}

MIXPREC_API mixp_result mixp_checkpoint_save(const char *path,
                                             const mixp_checkpoint *what) {
    static const char *const metadata[2][2] = { { "format", "pt" }, { "mixprec", "1" } };
    mixp_result result = mixpi_checkpoint_check(path, what, "mixp_checkpoint_save");
    char error[MIXP_MESSAGE_SIZE];
    mixpi_report r;
    mixpi_state state;
    mixpi_plan plan;
    if (result != MIXP_OK) return result;
    r = mixpi_report_begin(path, error, sizeof error);
    result = mixpi_checkpoint_sync(what);
    if (result != MIXP_OK) mixpi_report_fail(&r, result, "the device failed");
    mixpi_state_list(&state, &r, what->ctx, what);
    memset(&plan, 0, sizeof plan);
    plan.metadata = metadata;
    plan.n_metadata = 2;
    mixpi_state_plan(&state, &plan);
    mixpi_plan_save(&r, &plan);
    mixpi_state_release(&state);
    if (r.result == MIXP_OK) return MIXP_OK;
    return mixp_context_fail(what->ctx, r.result, "mixp_checkpoint_save: %s", error);
}

/* --- checkpoints: loading ------------------------------------------------------------------- */

/* What differs between a file and what is here; the first three are told. */
typedef struct mixpi_diff {
    mixp_result result;
    int         n;
    char        text[320];
} mixpi_diff;

/* "f32 [2, 3]" */
static const char *mixpi_describe(char *text, size_t room, const mixp_st_entry *e) {
    const char *dtype = e->dtype == MIXPI_OPAQUE ? e->type : mixp_dtype_name(e->dtype);
    int n = snprintf(text, room, "%s ", dtype);
    mixpi_shape_text(e->rank, e->shape, text + n, room - (size_t)n);
    return text;
}

static void mixpi_diff_note(mixpi_diff *d, mixp_result code, const char *name,
                            const char *format, ...) {
    size_t used = strlen(d->text);
    va_list args;
    if (d->result != MIXP_ERR_SHAPE) d->result = code;
    if (d->n++ >= 3) return;
    used +=
        (size_t)snprintf(d->text + used, sizeof d->text - used, "; '%.60s' is ", name);
    if (used >= sizeof d->text) return;
    va_start(args, format);
    vsnprintf(d->text + used, sizeof d->text - used, format, args);
    va_end(args);
}

static int mixpi_same_shape(const mixp_st_entry *a, const mixp_st_entry *b) {
    int i;
    if (a->rank != b->rank) return 0;
    for (i = 0; i < a->rank; i++)
        if (a->shape[i] != b->shape[i]) return 0;  /* plant: same_shape */
    return 1;
}

static void mixpi_diff_pair(mixpi_diff *d, const mixp_st_entry *here,
                            const mixp_st_entry *file) {
    char here_text[256], file_text[256];
    int same = mixpi_same_shape(here, file);
    if (same && here->dtype == file->dtype) return;
    mixpi_diff_note(d, same ? MIXP_ERR_DTYPE : MIXP_ERR_SHAPE, file->name,
                    "%.80s, not %.80s", mixpi_describe(file_text, sizeof file_text, file),
                    mixpi_describe(here_text, sizeof here_text, here));
}

static void mixpi_diff_tell(mixpi_diff *d, mixpi_report *r) {
    if (d->n)
        mixpi_report_fail(r, d->result, "%d tensors do not fit%s%s", d->n, d->text,
                          d->n > 3 ? "; ..." : "");
}

/* -1: a comes first, or is all there is; 1: b; 0: they have one name. */
static int mixpi_merge_order(const mixp_st_entry *a, const mixp_st_entry *b)
{ return !b ? -1 : !a ? 1 : strcmp(a->name, b->name); }

/* Both lists are sorted by name. */
static void mixpi_state_compare(const mixpi_state *s, const mixp_safetensors *file) {
    mixpi_diff diff;
    size_t i = 0, k = 0;
    memset(&diff, 0, sizeof diff);
    while (i < s->n_items || k < file->n_items) {
        const mixp_st_entry *here = i < s->n_items ? &s->items[i].e : NULL;
        const mixp_st_entry *there = k < file->n_items ? &file->items[k].e : NULL;
        int order = mixpi_merge_order(here, there);
        /* plant: merge_missing */
        if (order < 0) mixpi_diff_note(&diff, MIXP_ERR_SHAPE, here->name, "missing");
        else if (order > 0)
            mixpi_diff_note(&diff, MIXP_ERR_SHAPE, there->name, "in the file only");
        else mixpi_diff_pair(&diff, here, there);
        i += order <= 0;
        k += order >= 0;
    }
    mixpi_diff_tell(&diff, s->report);
}

/* Is the number one that a save can have written? */
static int mixpi_number_is_good(const mixpi_state_item *item) {
    double most = item->e.dtype == MIXP_I32 ? 1073741824.0 : 9007199254740992.0;   /* 2^30, 2^53 */
    uint64_t bits = 0;
    double x = 0.0;
    if (item->must == MIXPI_ANY) return 1;
    memcpy(&bits, item->e.data, item->e.bytes);
    mixp_convert(&x, MIXP_F64, &bits, item->e.dtype, 1);
    switch (item->must) {
    case MIXPI_FINITE:     return mixpi_finite(x);
    case MIXPI_AT_LEAST_0: return mixpi_at_least_0(x);
    case MIXPI_BETA:       return mixpi_is_beta(x);
    case MIXPI_SCALE:      return mixpi_scale_is_usable((float)x);
    case MIXPI_COUNTER:    return x >= 0.0 && x <= most;  /* plant: counter_range */
    case MIXPI_FLAG:       return x >= 0.0 && x <= 1.0;  /* plant: flag_range */
    default:               return 0;
    }
}

/* A group as the file would make it; its numbers must go together, too. */
static mixp_param_group mixpi_group_loaded(const mixpi_state *s,
                                           const mixp_param_group *now) {
    const uintptr_t begin = (uintptr_t)now;
    mixp_param_group group = *now;
    size_t i;
    for (i = 0; i < s->n_items; i++) {
        const mixpi_state_item *item = &s->items[i];
        uintptr_t at = (uintptr_t)item->memory;
        if (!item->on_device && at >= begin && at < begin + sizeof group)
            memcpy((char *)&group + (at - begin), item->e.data, item->e.bytes);
    }
    return group;
}

static void mixpi_state_check_groups(const mixpi_state *s, const mixp_checkpoint *what) {
    int i, g;
    for (i = 0; i < what->n_optimizers; i++) {
        const mixp_step_plan *plan = &what->optimizers[i]->plan;
        for (g = 0; g < plan->n_groups; g++) {
            mixp_param_group group = mixpi_group_loaded(s, &plan->groups[g]);
            const char *wrong = mixpi_group_wrong(plan->kind, &group);
            if (wrong)
                mixpi_report_fail(s->report, MIXP_ERR_FORMAT,
                                  "group %d of optimizer %d: %s", g, i, wrong);
        }
    }
}

/* Both lists have the same names, in the same order: items get the file's data, and numbers
 * are checked. */
static mixp_result mixpi_state_take(mixpi_state *s, const mixp_safetensors *file,
                                    const mixp_checkpoint *what) {
    size_t i;
    if (s->report->result != MIXP_OK) return s->report->result;
    for (i = 0; i < s->n_items; i++) {
        s->items[i].e.data = file->items[i].e.data;
        if (!mixpi_number_is_good(&s->items[i]))
            mixpi_report_fail(s->report, MIXP_ERR_FORMAT, "'%.60s' is out of range",
                              s->items[i].e.name);
    }
    if (s->report->result == MIXP_OK) mixpi_state_check_groups(s, what);
    return s->report->result;
}

/* Changes the state: nothing but a failing device can go wrong any more. */
static void mixpi_state_apply(mixpi_state *s, const mixp_checkpoint *what) {
    mixp_context *ctx = s->ctx;
    int64_t made = ctx->tensors_made, k;
    mixp_result r = MIXP_OK;
    mixp_tensor *t;
    size_t i;
    int o;
    for (i = 0; r == MIXP_OK && i < s->n_items; i++) {
        const mixpi_state_item *item = &s->items[i];
        if (item->on_device)
            r = mixpi_upload(ctx, item->memory, item->e.data, item->e.bytes);
        else memcpy(item->memory, item->e.data, item->e.bytes);
    }
    if (ctx->tensors_made < made) ctx->tensors_made = made;     /* ids stay unique */
    for (t = ctx->tensors; t; t = t->own.next)
        if (t->own.is_param) mixp_tensor_touch(t);
    for (o = 0; o < what->n_optimizers; o++)        /* weights and masters came together */
        for (k = 0; k < what->optimizers[o]->count; k++) {
            mixpi_slot *slot = &what->optimizers[o]->slots[k];
            slot->version = slot->param->version;
        }
    if (what->scaler) mixpi_scaler_forget(what->scaler);
    if (r != MIXP_OK)
        mixpi_report_fail(s->report, r,
                          "the device failed; the state is no longer whole");
}

static void mixpi_checkpoint_schema(mixpi_report *r, const mixp_safetensors *file) {
    const char *schema = mixp_safetensors_metadata(file, "mixprec");
    if (!schema) mixpi_report_fail(r, MIXP_ERR_FORMAT, "no checkpoint of mixprec's");
    else if (strcmp(schema, "1") != 0)
        mixpi_report_fail(r, MIXP_ERR_FORMAT,
                          "saved by another version of mixprec: its layout is "
                          "'%.20s', this one reads '1'",
                          schema);
}

/* Reads the header and compares it with what is here; only a file that fits has its data read,
 * and only data that is whole and in range changes anything. */
static void mixpi_checkpoint_read(mixpi_state *s, mixp_safetensors *file, mixpi_file *f,
                                  const mixp_checkpoint *what) {
    mixpi_report *r = s->report;
    if (mixpi_st_read_header(file, f) != MIXP_OK) return;
    mixpi_checkpoint_schema(r, file);
    mixpi_st_sort(r, file->items, file->n_items, MIXP_ERR_FORMAT);
    if (r->result == MIXP_OK) mixpi_state_compare(s, file);
    if (r->result == MIXP_OK) mixpi_st_read_data(file, f);
    if (mixpi_state_take(s, file, what) == MIXP_OK) mixpi_state_apply(s, what);
}

MIXPREC_API mixp_result mixp_checkpoint_load(const char *path,
                                             const mixp_checkpoint *what) {
    mixp_result result = mixpi_checkpoint_check(path, what, "mixp_checkpoint_load");
    char error[480];            /* three differences take more than other messages */
    mixp_safetensors file;
    mixpi_report r;
    mixpi_state state;
    mixpi_file f;
    if (result != MIXP_OK) return result;
    memset(&file, 0, sizeof file);
    file.ctx = what->ctx;
    r = mixpi_report_begin(path, error, sizeof error);
    mixpi_state_list(&state, &r, what->ctx, what);
    if (mixpi_file_open(&f, &r) == MIXP_OK)
        mixpi_checkpoint_read(&state, &file, &f, what);
    mixpi_file_close(&f);
    mixpi_st_clear(&file);
    mixpi_state_release(&state);
    if (r.result == MIXP_OK) return MIXP_OK;
    return mixp_context_fail(what->ctx, r.result, "mixp_checkpoint_load: %s", error);
}

/* --- weights alone -------------------------------------------------------------------------- */

/* Is a name of a checkpoint that of state, not of a weight? */
static int mixpi_is_state_name(const char *name) {
    static const char *const prefixes[] = { "optimizer.", "scaler.", "mixprec.",
                                            "value." };
    size_t i;
    for (i = 0; i < MIXPI_LENGTH(prefixes); i++)
        if (strncmp(name, prefixes[i], strlen(prefixes[i])) == 0) return 1;
    return 0;
}

static int mixpi_is_floating(mixp_dtype dtype) {
    return dtype != MIXP_I32 && dtype != MIXP_I64 && dtype != MIXP_U8 &&
           dtype != MIXPI_OPAQUE;
}

/* Gives a weight the file's tensor of its name. */
static void mixpi_weights_pair(mixpi_diff *d, mixpi_state_item *here,
                               mixpi_st_item *there, int convert) {
    mixp_dtype to = here->e.dtype, from = there->e.dtype;
    here->from = there;
    if (convert && mixpi_is_floating(to) && mixpi_is_floating(from)) {
        mixp_st_entry same = there->e;
        same.dtype = to;
        mixpi_diff_pair(d, &here->e, &same);
    } else mixpi_diff_pair(d, &here->e, &there->e);
}

/* Both lists are sorted by name. Only what is paired is wanted of the file. */
static void mixpi_weights_match(const mixpi_state *s, mixp_safetensors *file,
                                const mixp_weights_desc *desc) {
    int has_state = mixp_safetensors_metadata(file, "mixprec") != NULL;
    mixpi_diff diff;
    size_t i = 0, k = 0;
    memset(&diff, 0, sizeof diff);
    while (i < s->n_items || k < file->n_items) {
        mixpi_state_item *here = i < s->n_items ? &s->items[i] : NULL;
        mixpi_st_item *there = k < file->n_items ? &file->items[k] : NULL;
        int order = mixpi_merge_order(here ? &here->e : NULL, there ? &there->e : NULL);
        if (order < 0 && !desc->allow_missing)
            mixpi_diff_note(&diff, MIXP_ERR_SHAPE, here->e.name, "missing");
        else if (order == 0) mixpi_weights_pair(&diff, here, there, desc->convert);
        else if (order > 0) {
            int state = has_state && mixpi_is_state_name(there->e.name);
            there->wanted = 0;
            if (!state && !desc->allow_extra)
                mixpi_diff_note(&diff, MIXP_ERR_SHAPE, there->e.name, "in the file only");
        }
        i += order <= 0;
        k += order >= 0;
    }
    mixpi_diff_tell(&diff, s->report);
}

static int mixpi_is_converted(const mixpi_state_item *item)
{ return item->from && item->from->e.dtype != item->e.dtype; }

/* Gives each weight its data, in its own dtype. Returns the memory of those that are converted,
 * to be released. */
static void *mixpi_weights_convert(mixpi_state *s) {
    const uint64_t mask = MIXPI_ST_ALIGN - 1;
    uint64_t total = mask;
    char *memory, *at;
    size_t i;
    for (i = 0; i < s->n_items; i++)
        if (mixpi_is_converted(&s->items[i]))
            total += (s->items[i].e.bytes + mask) & ~mask;
    memory = at = (char *)mixpi_st_allocate(s->report, s->ctx, total, 1);
    if (!memory) return NULL;
    at += (MIXPI_ST_ALIGN - (uintptr_t)at % MIXPI_ST_ALIGN) % MIXPI_ST_ALIGN;
    for (i = 0; i < s->n_items; i++) {
        mixpi_state_item *item = &s->items[i];
        int64_t count = (int64_t)(item->e.bytes / mixp_dtype_size(item->e.dtype));
        if (item->from) item->e.data = item->from->e.data;
        if (!mixpi_is_converted(item)) continue;
        if (mixp_convert(at, item->e.dtype, item->from->e.data, item->from->e.dtype,
                         count))
            mixpi_report_fail(s->report, MIXP_ERR_DTYPE, "'%.60s' cannot be converted",
                              item->e.name);
        item->e.data = at;
        at += (item->e.bytes + mask) & ~mask;
    }
    return memory;
}

/* A weight that is not loaded stays untouched: its master weight knows more than it does. */
static void mixpi_weights_apply(mixpi_state *s) {
    mixp_result r = MIXP_OK;
    size_t i;
    for (i = 0; r == MIXP_OK && i < s->n_items; i++) {
        const mixpi_state_item *item = &s->items[i];
        if (!item->from) continue;
        r = mixpi_upload(s->ctx, item->memory, item->e.data, item->e.bytes);
        mixp_tensor_touch(item->weight);
    }
    if (r != MIXP_OK)
        mixpi_report_fail(s->report, r,
                          "the device failed; the weights are no longer whole");
}

static void mixpi_weights_tell(const mixpi_state *s, const mixp_safetensors *file,
                               const mixp_weights_desc *desc) {
    int has_state = mixp_safetensors_metadata(file, "mixprec") != NULL;
    size_t i;
    for (i = 0; i < s->n_items; i++) {
        const mixpi_state_item *item = &s->items[i];
        mixp_weight_fate fate = !item->from                ? MIXP_WEIGHT_MISSING
                                : mixpi_is_converted(item) ? MIXP_WEIGHT_CONVERTED
                                                           : MIXP_WEIGHT_LOADED;
        desc->tell(desc->user, item->e.name, fate);
    }
    for (i = 0; i < file->n_items; i++) {
        const mixpi_st_item *item = &file->items[i];
        if (!item->wanted && !(has_state && mixpi_is_state_name(item->e.name)))
            desc->tell(desc->user, item->e.name, MIXP_WEIGHT_EXTRA);
    }
}

/* As of a checkpoint: the header first, then the data, and only then a change. */
static void mixpi_weights_read(mixpi_state *s, mixp_safetensors *file, mixpi_file *f,
                               const mixp_weights_desc *desc) {
    mixpi_report *r = s->report;
    void *converted;
    if (mixpi_st_read_header(file, f) != MIXP_OK) return;
    mixpi_st_sort(r, file->items, file->n_items, MIXP_ERR_FORMAT);
    mixpi_weights_match(s, file, desc);
    if (r->result != MIXP_OK || mixpi_st_read_data(file, f) != MIXP_OK) return;
    converted = mixpi_weights_convert(s);
    if (r->result == MIXP_OK) mixpi_weights_apply(s);
    mixpi_st_release(s->ctx, converted);
    if (r->result == MIXP_OK && desc->tell) mixpi_weights_tell(s, file, desc);
}

MIXPREC_API mixp_result mixp_checkpoint_load_weights(const char *path, mixp_context *ctx,
                                                     const mixp_weights_desc *desc) {
    static const char *const who = "mixp_checkpoint_load_weights";
    mixp_weights_desc strict;
    char error[480];
    mixp_safetensors file;
    mixpi_report r;
    mixpi_state state;
    mixpi_file f;
    mixp_result result;
    if (!ctx) return MIXP_ERR_ARGUMENT;
    if (!path) return mixp_context_fail(ctx, MIXP_ERR_ARGUMENT, "%s: path is NULL", who);
    result = mixpi_check_names(ctx, who);
    if (result == MIXP_OK && ctx->device->wait) result = ctx->device->wait(&ctx->exec);
    if (result != MIXP_OK) return result;
    memset(&strict, 0, sizeof strict);
    memset(&file, 0, sizeof file);
    file.ctx = ctx;
    r = mixpi_report_begin(path, error, sizeof error);
    mixpi_state_list(&state, &r, ctx, NULL);
    if (mixpi_file_open(&f, &r) == MIXP_OK)
        mixpi_weights_read(&state, &file, &f, desc ? desc : &strict);
    mixpi_file_close(&f);
    mixpi_st_clear(&file);
    mixpi_state_release(&state);
    if (r.result == MIXP_OK) return MIXP_OK;
    return mixp_context_fail(ctx, r.result, "%s: %s", who, error);
}

#ifdef __cplusplus
}   /* extern "C" */
#endif
#undef MIXPREC_IMPLEMENTATION
#undef MIXPI_IMPLEMENT
#endif  /* implementation */
