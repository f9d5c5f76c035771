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
 * and in all others only the #include. Compile with -O2, link with -lm; -fopenmp uses all cores,
 * and so does -DMIXPREC_THREADS -pthread, where the compiler has no OpenMP.
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
 *     10. optimizers   >>optimizers    Adam, AdamW, SGD, RMSprop, Lion, Muon, groups, small states
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
 *     MIXPREC_THREADS          implementation    threads of its own (POSIX) instead of OpenMP's:
 *                                                they sleep when they wait, and survive fork
 *     MIXPREC_ASSERT(x)        implementation    checks of what must hold inside; none unless
 *                                                given. A failure is a fault of mixprec's
 *     MIXPREC_SELF             implementation    this file's name, when you renamed it
 *
 * Memory comes from the allocator in mixp_context_desc. The instruction set is chosen at run
 * time (AVX-512, on AMD with AVX512_BF16; AVX2 with F16C; NEON; plain C); no -march is needed.
 * Several processes or machines train one model through mixp_ranks_desc.
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
 *     maximum, minimum, abs, clamp, where,
 *     max, gather, squares of relu           same            same             same
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
    X(MIXP_ERR_DEVICE,   "device failed")                                                 \
    X(MIXP_ERR_RANKS,    "ranks differ, or one cannot be reached")

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

/* How a moment is stored, with the bytes that an element of it takes. Whatever the choice, the
 * arithmetic is f32. What is cut off is rounded at random, up with a probability equal to it: to
 * nearest, a moment that changes by less than half a step of its format would never change. */
typedef enum mixp_moment_kind {
    MIXP_MOMENT_F32,            /* 4                                                       */
    MIXP_MOMENT_BF16,           /* 2                                                       */
    MIXP_MOMENT_8BIT            /* 1 + 1/128: blocks of MIXP_STATE_BLOCK elements, each with a
                                   power of two. The first moment is f8_e4m3; of the second the
                                   root, without a sign: 4 bits of exponent and 4 of mantissa,
                                   and never 0 unless it is                                */
} mixp_moment_kind;
#define MIXP_STATE_BLOCK 128

/* How the master weight of a bf16 parameter is stored, and the bytes it takes beside that. */
typedef enum mixp_master_kind {
    MIXP_MASTER_F32,            /* 4: a copy of its own                                    */
    MIXP_MASTER_16BIT,          /* 2: what the weight lacks of the same f32, no bit lost   */
    MIXP_MASTER_8BIT            /* 1: half of that, rounded at random                      */
} mixp_master_kind;

/* The hyper-parameters of one group; those that the optimizer's kind lacks are unused. RMSprop's
 * alpha is beta2. */
typedef struct mixp_param_group {
    double lr, beta1, beta2, eps, weight_decay, momentum, dampening;
    int    nesterov;
    int    f32_states;          /* 1: parameters added to it keep f32 moments and masters,
                                   whatever the description says: embeddings, say          */
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
    int32_t predicts;   /* 1: the scale is set from the largest gradients, as below     */
    int32_t margin, max_move;       /* in binades                                       */
    float   low_largest;
} mixp_scaler_rule;

/* Gradients may wait for their step while the scale goes on: so many scales are remembered. */
#define MIXP_PAST_SCALES 16

/* The state of a scaler, in device memory. Checkpoints hold all but found_inf and past; largest
 * and peak where the rule predicts. */
typedef struct mixp_scaler_state {
    float   scale;
    int32_t growth_tracker;     /* clean steps since the last change                       */
    int32_t hysteresis_left;    /* overflows that may still pass without a backoff, and one */
    int32_t found_inf;          /* since the last update: set by the optimizers' steps     */
    int32_t floor_skips;        /* skips in a row while the scale could not go lower       */
    int64_t updates, skips;     /* how many, in all                                        */
    float   past[MIXP_PAST_SCALES]; /* the scales before this one, newest first            */
    int32_t loss_bad;           /* 1: a loss since the last update was Inf or NaN */
    int32_t skipped;            /* 1: the newest update followed a skip */
    float   largest;            /* |gradient| since the last prediction, without the scale */
    float   peak;               /* the largest so far, slowly forgotten; 0 = none was seen */
} mixp_scaler_state;

/* Past this a scale's reciprocal is subnormal, and some devices flush that to 0. */
#define MIXPI_LARGEST_SCALE 8.50705917e37f      /* 2^126 */

/* A |gradient|, as it is without the scale, was met: what a rule that predicts goes by. */
MIXPREC_HD void mixp_scaler_note(mixp_scaler_state *s, float largest) {
    int is_finite = (mixp_bits_of_f32(largest) & 0x7F800000u) != 0x7F800000u;
    if (is_finite && largest > s->largest) s->largest = largest;
}

/* The same of a gradient that was multiplied by the scale in force. */
MIXPREC_HD void mixp_scaler_note_scaled(mixp_scaler_state *s, float largest)
{ mixp_scaler_note(s, (float)((double)largest / (double)s->scale)); }

/* After an overflow: spend hysteresis, then back off, never below the floor. */
MIXPREC_HD void mixpi_scaler_overflow(mixp_scaler_state *s, const mixp_scaler_rule *r) {
    float lower;
    s->skips++;
    s->growth_tracker = 0;
    if (r->predicts) mixp_scaler_note_scaled(s, r->low_largest);    /* it was no less */
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

/* The power of two at x or below it: the exponent of a positive normal number alone. */
MIXPREC_HD double mixpi_power_of_2_below(double x)
{ return mixp_f64_of_bits(mixp_bits_of_f64(x) & 0x7FF0000000000000u); }

/* The largest of all gradients, times the scale, is to be no more than this. */
MIXPREC_HD double mixpi_scaler_aim(const mixp_scaler_rule *r)
{ return ldexp((double)r->low_largest, -r->margin); }

/* Sets the scale, a power of two, by the peak; 1: a limit did not let it go all the way. The
 * peak is forgotten by a quarter of a binade each time: what comes now and then is waited for,
 * but not what is more than 2^10 above all that came since. */
MIXPREC_HD int mixpi_scaler_predict(mixp_scaler_state *s, const mixp_scaler_rule *r) {
    double now = (double)s->scale, to, most;
    s->peak *= 0.840896415f;  /* 2^(-1/4) */
    if (s->largest > 0.0f && s->peak > s->largest * 1024.0f)
        s->peak = s->largest * 1024.0f;
    if (s->largest > s->peak) s->peak = s->largest;
    s->largest = 0.0f;
    if (!(s->peak > 0.0f)) return 0;
    most = ldexp(now, r->max_move);
    to = mixpi_power_of_2_below(mixpi_scaler_aim(r) / (double)s->peak);
    if (to < most) most = to;
    if (most < ldexp(now, -r->max_move)) most = ldexp(now, -r->max_move);
    if (most > (double)r->max_scale) most = (double)r->max_scale;
    if (most < (double)r->min_scale) most = (double)r->min_scale;
    if (most > (double)MIXPI_LARGEST_SCALE) most = (double)MIXPI_LARGEST_SCALE;
    s->scale = (float)most;  /* plant: predicted_scale */
    return most < to || most > to;
}

/* After a clean step: every growth_interval steps; at once when nothing is known yet, and when a
 * gradient came nearer to the largest number than the margin. */
MIXPREC_HD void mixpi_scaler_foresee(mixp_scaler_state *s, const mixp_scaler_rule *r) {
    int is_near = (double)s->largest * (double)s->scale > mixpi_scaler_aim(r);
    int is_due = s->growth_tracker >= r->growth_interval - 1;
    if (!is_near && !is_due && s->peak > 0.0f) s->growth_tracker++;
    else if (mixpi_scaler_predict(s, r)) s->growth_tracker = r->growth_interval - 1;
    else s->growth_tracker = 0;
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
    if (r->predicts) {
        mixpi_scaler_foresee(s, r);
        return;
    }
    if (s->growth_tracker < interval - 1 + r->delay) {
        s->growth_tracker++;
        return;
    }
    s->growth_tracker = r->delay;  /* plant: scaler_delay */
    if (r->refill & MIXP_REFILL_GROWTH) s->hysteresis_left = r->hysteresis;
    /* plant: scaler_ceiling */
    if (higher > (double)r->max_scale) higher = (double)r->max_scale;
    if ((float)higher <= MIXPI_LARGEST_SCALE) s->scale = (float)higher;
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
    s->loss_bad = 0;
    s->skipped = found_inf != 0;
    if (found_inf) mixpi_scaler_overflow(s, r);
    else           mixpi_scaler_clean(s, r);
}

/* The same for a skip that began in the forward pass, which no scale cures: all stays but the
 * counts. */
MIXPREC_HD void mixpi_scaler_forgive(mixp_scaler_state *s, const mixp_scaler_rule *r) {
    s->updates++;
    s->skips++;
    s->found_inf = 0;
    s->loss_bad = 0;
    s->skipped = 1;
    if (!r->fixed) mixpi_scaler_remember(s);
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
    MIXP_OPTIMIZER_SGD,
    MIXP_OPTIMIZER_RMSPROP,
    MIXP_OPTIMIZER_LION,
    MIXP_OPTIMIZER_MUON,            /* the optimizer, and its last pass of `update`: a weight
                                       moves against the direction that the gradient became */
    MIXP_OPTIMIZER_MUON_MOMENTUM,   /* its first: momentum, and the direction, as a weight */
    MIXP_OPTIMIZER_MUON_UNIT        /* its second: the direction times the step's factor   */
} mixp_optimizer_kind;

/* Which values of a step are held against those of the steps before it. */
typedef enum mixp_spike_of {
    MIXP_SPIKE_OFF,
    MIXP_SPIKE_NORM,            /* of the true gradients, before clipping               */
    MIXP_SPIKE_LOSS,            /* see mixp_optimizer_set_loss                          */
    MIXP_SPIKE_BOTH             /* either is enough                                     */
} mixp_spike_of;

/* A step whose value lies more than z standard deviations above the mean of the last `window`
 * applied steps is skipped (llm.c's z-score; OLMo-core's SkipStepOptimizer, whose numbers these
 * are). Nothing is judged before half a window is there. A value that is not finite is a spike.
 * Of a spread below a thousandth of the mean, that thousandth is taken. Values of skipped steps
 * never enter; after max_in_a_row spikes one is applied all the same, and the window begins anew,
 * for then it is a new level. Zero in any field = its default. */
typedef struct mixp_spike_rule {
    mixp_spike_of of;           /* 0 = off                                              */
    int32_t window;             /* 0 = 128 applied steps; 4 to 4096                     */
    int32_t max_in_a_row;       /* 0 = 8; negative = no limit                           */
    double  z;                  /* 0 = 6 standard deviations                            */
} mixp_spike_rule;

enum { MIXPI_SPIKE_KINDS = 2 };     /* MIXP_SPIKE_NORM and MIXP_SPIKE_LOSS are bits     */

/* What became of the newest step's values, and how many each window was given. */
typedef struct mixp_spike_state {
    int64_t entered[2];         /* norms and losses: the window is a ring               */
    int32_t in_a_row;           /* skipped since the last applied step                  */
    int32_t of;                 /* why the newest step was skipped; 0 = no spike        */
    double  z, mean, sd;        /* of the value furthest up; 0 while nothing is judged  */
} mixp_spike_state;

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
    int32_t       cautious;     /* 1: weight decay only where it goes the update's way     */
    int32_t       small;        /* 1: some states of the table are of fewer bytes than f32 */
    uint64_t      seed;         /* of the random numbers that round states                 */
    mixp_spike_rule spike;      /* resolved                                             */
    double       *spike_window; /* device memory: `window` norms, as many losses        */
    const float  *loss;         /* device memory; NULL: not looked at                   */
} mixp_step_plan;

/* The scalars of one update, in the precision of its arithmetic. SGD: beta1 is the momentum,
 * rest1 is 1 - dampening. */
typedef struct mixp_step_scalars {
    mixp_adam_order order;
    int32_t    nesterov, cautious;
    float factor;               /* of the gradient: 1/scale and the clip coefficient       */
    float l2;                   /* weight decay that joins the gradient                    */
    float decay;                /* decoupled: lr * weight_decay; apex: weight_decay        */
    float beta1, rest1, beta2, rest2, momentum, eps;
    float rate;                 /* torch: lr / bc1; apex and SGD: lr                       */
    float scale_m, scale_v;     /* torch: 1 and 1/sqrt(bc2); apex: 1/bc1 and 1/bc2         */
} mixp_step_scalars;

/* What the ranks of a world told each other about one look. */
typedef struct mixp_agreement {
    int64_t bad_leaf, bad_element;  /* the first bad gradient of bad_rank, before it was
                                       summed: place in the arena of gradients             */
    int32_t bad_rank;           /* the lowest rank with one, plus 1; 0 = none              */
    int32_t bad_is_nan;
    int32_t differs;            /* the lowest rank unlike rank 0, plus 1; 0 = none         */
    int32_t word;               /* in which of MIXP_AGREE_...                              */
    double  here, there;        /* what rank 0 has there, and what that rank has           */
    int32_t ranks;              /* how many told; 0: nobody was asked                      */
    float   loss;               /* the mean of theirs, where spikes of it are looked for   */
} mixp_agreement;

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
    mixp_agreement agreed;      /* of all ranks, where there are several                   */
    mixp_spike_state spike;
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

/* RMSprop, Lion and Muon correct no bias: all their scalars are the group's. */
MIXPREC_HD void mixpi_update_plain(mixp_optimizer_kind kind, const mixp_param_group *g,
                                   double lr, mixp_step_scalars *u) {
    double first = kind < MIXP_OPTIMIZER_MUON ? g->beta1 : g->momentum;
    u->beta1 = (float)first;
    u->rest1 = (float)(1.0 - first);
    u->rate = (float)lr;
    u->scale_m = 1.0f;
    u->scale_v = 1.0f;
}

/* Is the weight decay of its own, or does it join the gradient? */
MIXPREC_HD int mixpi_is_decoupled(mixp_optimizer_kind kind)
{ return kind == MIXP_OPTIMIZER_ADAMW || kind >= MIXP_OPTIMIZER_LION; }

MIXPREC_HD void mixpi_update_decay(mixp_optimizer_kind kind, const mixp_param_group *g,
                                   double lr, mixp_step_scalars *u) {
    int decoupled = mixpi_is_decoupled(kind), apex = u->order == MIXP_ADAM_ORDER_APEX;
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
    u->cautious = plan->cautious;
    u->factor = (float)state->factor;
    u->momentum = (float)g->momentum;
    u->beta2 = (float)g->beta2;
    u->rest2 = (float)(1.0 - g->beta2);
    u->eps = (float)g->eps;
    mixpi_update_decay(plan->kind, g, lr, u);
    if (plan->kind == MIXP_OPTIMIZER_SGD) mixpi_update_sgd(g, lr, t, u);
    else if (plan->kind > MIXP_OPTIMIZER_SGD) mixpi_update_plain(plan->kind, g, lr, u);
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

/* What gives a Muon direction of this norm norm 1. The group's f32_states: its iteration is in f32;
 * in bf16 the norm is one, too, as PyTorch's. */
MIXPREC_HD double mixpi_muon_unit(double norm, const mixp_param_group *g) {
    float held = g->f32_states ? (float)norm
                               : mixp_f32_from_bf16(mixp_bf16_from_f32((float)norm));
    return 1.0 / ((double)held > g->eps ? (double)held : g->eps);  /* plant: muon_unit */
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
    if (plan->kind == MIXP_OPTIMIZER_MUON_UNIT)
        s->factor = mixpi_muon_unit(norm, &plan->groups[0]);
}

/* Finite, by its bits, on every device. */
MIXPREC_HD int mixpi_f64_is_finite(double x)
{ return (mixp_bits_of_f64(x) & 0x7FF0000000000000u) != 0x7FF0000000000000u; }

/* Mean and standard deviation of n values, 2 at least: the same roundings on every device. */
MIXPREC_HD void mixpi_spread_of(const double *x, int64_t n, double *mean, double *sd) {
    double sum = 0.0, squares = 0.0, least;
    int64_t i;
    for (i = 0; i < n; i++) sum += x[i];
    *mean = sum / (double)n;
    for (i = 0; i < n; i++) squares = fma(x[i] - *mean, x[i] - *mean, squares);
    *sd = sqrt(squares / (double)(n - 1));
    least = fabs(*mean) * 0.001;
    if (*sd < least) *sd = least;
    if (!(*sd > 0.0)) *sd = 1.17549435e-38;
}

/* Holds a value against its window; of several, what lies furthest up is noted. */
MIXPREC_HD void mixpi_spike_judge(const mixp_step_plan *plan, mixp_spike_state *s,
                                  int kind, double value) {
    const int64_t window = plan->spike.window;
    int64_t n = s->entered[kind] < window ? s->entered[kind] : window;
    double mean = 0.0, sd = 0.0, z = mixp_f64_of_bits(0x7FF0000000000000u);
    if (mixpi_f64_is_finite(value)) {
        if (2 * n < window) return;
        mixpi_spread_of(plan->spike_window + kind * window, n, &mean, &sd);
        z = (value - mean) / sd;
    }
    if (z <= s->z) return;
    s->z = z;
    s->mean = mean;
    s->sd = sd;
    if (z > plan->spike.z) s->of = kind + 1;  /* plant: spike_z */
}

/* The values of an applied step enter their windows. */
MIXPREC_HD void mixpi_spike_enter(const mixp_step_plan *plan, mixp_spike_state *s,
                                  const double *values) {
    int kind;
    for (kind = 0; kind < MIXPI_SPIKE_KINDS; kind++) {
        int64_t at = kind * (int64_t)plan->spike.window;
        if (!((int)plan->spike.of >> kind & 1)) continue;
        at += s->entered[kind]++ % plan->spike.window;
        plan->spike_window[at] = values[kind];
    }
}

/* So many spikes one after the other are none: the window begins anew. */
MIXPREC_HD void mixpi_spike_settle(const mixp_step_plan *plan, mixp_spike_state *s) {
    const int32_t most = plan->spike.max_in_a_row;
    if (!s->of || most < 0 || s->in_a_row < most || !mixpi_f64_is_finite(s->z)) return;
    s->of = 0;  /* plant: spike_level */
    s->entered[0] = s->entered[1] = 0;
}

/* The loss of this step: with ranks, the mean of theirs. */
MIXPREC_HD double mixpi_step_loss(const mixp_step_plan *plan, const mixp_step_state *s) {
    if (s->agreed.ranks) return (double)s->agreed.loss;
    return plan->loss ? (double)*plan->loss : 0.0;
}

/* Skips a step that is a spike. One that is skipped for its gradients is not looked at. */
MIXPREC_HD void mixpi_step_spike(const mixp_step_plan *plan, mixp_step_state *step) {
    mixp_spike_state *s = &step->spike;
    const double values[MIXPI_SPIKE_KINDS] = { step->stats.norm,
                                               mixpi_step_loss(plan, step) };
    int kind;
    s->of = 0;
    s->z = s->mean = s->sd = 0.0;
    if (step->skip) return;
    s->z = -mixp_f64_of_bits(0x7FF0000000000000u);
    for (kind = 0; kind < MIXPI_SPIKE_KINDS; kind++)
        if ((int)plan->spike.of >> kind & 1)
            mixpi_spike_judge(plan, s, kind, values[kind]);
    mixpi_spike_settle(plan, s);
    if (s->of) {
        step->skip = 1;
        s->in_a_row += mixpi_f64_is_finite(s->z);
        return;
    }
    if (!mixpi_f64_is_finite(s->z)) s->z = 0.0;
    s->in_a_row = 0;
    mixpi_spike_enter(plan, s, values);  /* plant: spike_enters */
}

/* Everything scalar in one step but the groups' updates; 1: they are due. */
MIXPREC_HD int mixpi_step_decide(const mixp_step_plan *plan, mixp_step_state *s,
                                 mixp_scaler_state *scaler) {
    int bad;
    mixpi_step_look(plan, s);
    bad = s->stats.found_inf != 0;
    if (scaler && bad && !s->stopped) scaler->found_inf = 1;
    if (scaler && plan->gathered) mixp_scaler_note(scaler, s->stats.largest);
    if (plan->look_only) return 0;
    mixpi_step_factor(plan, s, scaler);
    s->skip = s->stopped || s->agreed.differs || (plan->check && bad);
    if (plan->spike.of) mixpi_step_spike(plan, s);
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

/* The decay of weight p, which is about to move against `update`. Cautious: none where that moves
 * it away from 0 (Chen et al., "Cautious Weight Decay", 2025). */
MIXPREC_HD float mixpi_decay_of(const mixp_step_scalars *u, float update, float p)
{ return u->cautious && 0.0f > update * p ? 0.0f : u->decay; }  /* plant: cautious */

/* What a rank tells the others before anyone decides: a row of the table of all ranks. Each fills
 * its own row of a table of zeros, so the sum of the tables is exact in any order. */
enum {
    MIXP_AGREE_HERE,            /* 1: this rank is there                                   */
    MIXP_AGREE_SCALE, MIXP_AGREE_APPLIED, MIXP_AGREE_RATE,  /* these must be alike; so   */
    MIXP_AGREE_NORM,            /* must this, of summed gradients: else the sums are not   */
    MIXP_AGREE_FOUND,           /* a look at the summed gradients found Inf or NaN         */
    MIXP_AGREE_LARGEST,
    MIXP_AGREE_LOSS,
    MIXP_AGREE_FORWARD,         /* 1: its forward pass made Inf or NaN                     */
    MIXP_AGREE_BAD,             /* 1: so did one at this rank's own, before the sum        */
    MIXP_AGREE_LEAF, MIXP_AGREE_ELEMENT, MIXP_AGREE_NAN,    /* and where                   */
    MIXP_AGREE_WORDS
};

/* The first bad gradient of this rank, in the order of buckets. first: each bucket's first leaf. */
MIXPREC_HD void mixpi_agree_bad(double *row, const mixp_step_state *looks, int64_t n_looks,
                                const int64_t *first) {
    int64_t i;
    for (i = 0; i < n_looks && !looks[i].stats.found_inf; i++)
        continue;
    if (i == n_looks) return;
    row[MIXP_AGREE_BAD] = 1.0;
    row[MIXP_AGREE_LEAF] = (double)(first[i] + looks[i].stats.bad_row);
    row[MIXP_AGREE_ELEMENT] = (double)looks[i].stats.bad_element;
    row[MIXP_AGREE_NAN] = (double)looks[i].stats.bad_is_nan;
}

/* What this rank has found, into its row; but for the loss all numbers there are finite. */
MIXPREC_HD void mixp_agree_fill(double *row, const mixp_step_plan *plan,
                                const mixp_step_state *s,
                                const mixp_scaler_state *scaler) {
    int found = s->stats.found_inf != 0;
    int finite = (mixp_bits_of_f64(s->stats.norm) >> 52 & 0x7FFu) != 0x7FFu;
    row[MIXP_AGREE_HERE] = 1.0;
    row[MIXP_AGREE_SCALE] = scaler ? (double)scaler->scale : 1.0;
    row[MIXP_AGREE_APPLIED] = (double)s->applied;
    row[MIXP_AGREE_RATE] = mixp_schedule_lr(&plan->schedule, plan->groups[0].lr, s->applied);
    row[MIXP_AGREE_FOUND] = (double)found;
    row[MIXP_AGREE_LARGEST] = (double)s->stats.largest;
    row[MIXP_AGREE_NORM] = finite ? s->stats.norm : 0.0;
    row[MIXP_AGREE_LOSS] = plan->loss ? (double)*plan->loss : 0.0;
    row[MIXP_AGREE_FORWARD] = scaler && scaler->loss_bad ? 1.0 : 0.0;
}

/* Is rank r unlike rank 0? Then that is noted. */
MIXPREC_HD void mixpi_agree_differs(const double *table, int r, mixp_agreement *a) {
    const double *zero = table, *row = table + (int64_t)r * MIXP_AGREE_WORDS;
    int word = MIXP_AGREE_HERE;
    while (word <= MIXP_AGREE_NORM &&
           mixp_bits_of_f64(zero[word]) == mixp_bits_of_f64(row[word])) {
        word++;
    }
    if (word > MIXP_AGREE_NORM) return;
    a->differs = r + 1;
    a->word = word;
    a->here = zero[word];
    a->there = row[word];
}

/* Rank r's own bad gradient, if it has one. */
MIXPREC_HD void mixpi_agree_name(const double *row, int r, mixp_agreement *a) {
    if (a->bad_rank || !(row[MIXP_AGREE_BAD] > 0.0)) return;  /* plant: agree_lowest */
    a->bad_rank = r + 1;
    a->bad_leaf = (int64_t)row[MIXP_AGREE_LEAF];
    a->bad_element = (int64_t)row[MIXP_AGREE_ELEMENT];
    a->bad_is_nan = (int32_t)row[MIXP_AGREE_NAN];
}

/* What all ranks have found, out of their table. Ranks that differ skip the step, all of them. */
MIXPREC_HD void mixp_agree_read(const double *table, int size, mixp_step_state *s,
                                mixp_scaler_state *scaler) {
    double loss = 0.0;
    int r;
    memset(&s->agreed, 0, sizeof s->agreed);
    for (r = 0; r < size; r++) {
        const double *row = table + (int64_t)r * MIXP_AGREE_WORDS;
        float largest = (float)row[MIXP_AGREE_LARGEST];
        if (!s->agreed.differs) mixpi_agree_differs(table, r, &s->agreed);
        if (row[MIXP_AGREE_FOUND] > 0.0) s->stats.found_inf = 1;  /* plant: agree_found */
        if (largest > s->stats.largest) s->stats.largest = largest;
        loss += row[MIXP_AGREE_LOSS];
        if (scaler && row[MIXP_AGREE_FORWARD] > 0.0) scaler->loss_bad = 1;  /* plant: agree_forward */
        mixpi_agree_name(row, r, &s->agreed);
    }
    s->agreed.ranks = size;
    s->agreed.loss = (float)(loss / (double)size);
}

/* One element of Adam or AdamW, every rounding in its place: p the master weight, m and v the
 * moments, grad as stored. */
MIXPREC_HD void mixp_adam_element(const mixp_step_scalars *u, float grad, float *p,
                                  float *m, float *v) {
    float g = fmaf(u->l2, *p, grad * u->factor), ratio, decay;
    *m = fmaf(u->beta1, *m, u->rest1 * g);
    *v = fmaf(u->beta2, *v, (u->rest2 * g) * g);
    if (u->order == MIXP_ADAM_ORDER_APEX) {
        ratio = (*m * u->scale_m) / (sqrtf(*v * u->scale_v) + u->eps);
        decay = mixpi_decay_of(u, ratio, *p);
        *p = fmaf(-u->rate, fmaf(decay, *p, ratio), *p);
    } else {
        ratio = *m / fmaf(sqrtf(*v), u->scale_v, u->eps);
        decay = mixpi_decay_of(u, ratio, *p);
        *p = fmaf(-decay, *p, *p);
        *p = fmaf(-u->rate, ratio, *p);
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

/* One element of RMSprop, in PyTorch's order; m NULL without momentum. */
MIXPREC_HD void mixp_rmsprop_element(const mixp_step_scalars *u, float grad, float *p,
                                     float *m, float *v) {
    float g = fmaf(u->l2, *p, grad * u->factor), step;
    *v = fmaf(u->beta2, *v, (u->rest2 * g) * g);
    step = g / (sqrtf(*v) + u->eps);
    if (m) {
        step = fmaf(u->momentum, *m, step);
        *m = step;
    }
    *p = fmaf(-u->rate, step, *p);
}

/* One element of Lion, in the order of its authors: the sign of a blend moves the weight, and then
 * the gradient joins the momentum (Chen et al., "Symbolic Discovery of Optimization Algorithms",
 * 2023). */
MIXPREC_HD void mixp_lion_element(const mixp_step_scalars *u, float grad, float *p,
                                  float *m) {
    float g = grad * u->factor, blend = fmaf(u->beta1, *m, u->rest1 * g);
    float sign = blend > 0.0f ? 1.0f : 0.0f > blend ? -1.0f : blend;    /* NaN stays NaN */
    *p = fmaf(-mixpi_decay_of(u, blend, *p), *p, *p);
    *p = fmaf(-u->rate, sign, *p);
    *m = fmaf(u->beta2, *m, u->rest2 * g);
}

/* a + (b - a) w, rounded as PyTorch's. */
MIXPREC_HD float mixpi_lerp(float a, float b, float w) {
    float way = b - a;
    return w < 0.5f ? fmaf(w, way, a) : fmaf(w - 1.0f, way, b);
}

/* One element of Muon's first pass: momentum m, and the direction before it is made orthogonal. */
MIXPREC_HD void mixp_muon_momentum_element(const mixp_step_scalars *u, float grad,
                                           float *direction, float *m) {
    float g = grad * u->factor;
    *m = mixpi_lerp(*m, g, u->rest1);
    *direction = u->nesterov ? mixpi_lerp(g, *m, u->momentum) : *m;
}

/* One element of its last pass. shape: what the matrix' shape makes of the rate. */
MIXPREC_HD void mixp_muon_element(const mixp_step_scalars *u, float shape,
                                  float direction, float *p) {
    float rate = u->rate * shape;
    *p = fmaf(-mixpi_decay_of(u, direction, *p), *p, *p);
    *p = fmaf(-rate, direction, *p);
}

/* --- states of fewer bytes ----------------------------------------------------------------- *
 *
 * Random numbers are keyed by (seed, applied steps, tensor, element), one word an element: the
 * first moment takes its lower half, the second its upper half, a master a mix of both.
 */
MIXPREC_HD uint64_t mixp_state_key(uint64_t seed, int64_t applied, uint64_t tensor)
{ return mixp_random_key(seed ^ 0x6F70745F73746174u, (uint64_t)applied, tensor); }
MIXPREC_HD uint32_t mixpi_random_m(uint32_t word) { return word & 0xFFFFu; }
MIXPREC_HD uint32_t mixpi_random_v(uint32_t word) { return word >> 16; }
MIXPREC_HD uint32_t mixpi_random_master(uint32_t word) {
    return (word * 0x9E3779B1u) >> 24;
}

/* bf16, of 16 random bits. */
MIXPREC_HD uint32_t mixp_state_bf16(float x, uint32_t random) {
    uint32_t u = mixp_bits_of_f32(x);
    uint32_t nan = u | 0x400000u;
    u = (u & 0x7FFFFFFFu) > 0x7F800000u ? nan : u + random;
    return u >> 16;
}

/* What x says about its block's largest magnitude: Inf and NaN say nothing. */
MIXPREC_HD uint32_t mixpi_state_size(float x) {
    uint32_t a = mixp_bits_of_f32(x) & 0x7FFFFFFFu;
    return a < 0x7F800000u ? a : 0u;  /* plant: state_size */
}

/* The scale of a block of first moments, an f8_e8m0, from the bits of the largest: it becomes at
 * least 128 and less than 256. A power of two, so that a change of scale rounds nothing. */
MIXPREC_HD uint32_t mixp_state_scale_m(uint32_t largest) {
    uint32_t exponent = largest >> 23;
    return exponent > 7u ? exponent - 7u : 1u;
}

/* f8_e4m3 of a first moment, of 16 random bits. What is subnormal there is rounded to nearest: a
 * small moment made large at random would meet a small root. NaN and Inf become NaN. */
MIXPREC_HD uint32_t mixp_state_m(float x, uint32_t scale, uint32_t random) {
    uint32_t y = mixp_bits_of_f32(x * mixp_f32_of_bits((254u - scale) << 23));
    uint32_t a = y & 0x7FFFFFFFu;
    uint32_t normal = ((a + (random << 4)) >> 20) - (120u << 3);
    uint32_t tiny = mixp_bits_of_f32(mixp_f32_of_bits(a) + 16384.0f) - 0x46800000u;
    uint32_t code = a < 0x3C800000u ? tiny : normal;
    code = a < 0x7F800000u ? code : 0x7Fu;
    return (y >> 24 & 0x80u) | code;
}
MIXPREC_HD float mixp_state_m_value(uint32_t code, uint32_t scale) {
    float unit = mixp_f32_of_bits(scale << 23);
    return mixp_f32_of_bits(mixpi_f32_of_e4m3(code)) * unit;
}

/* The scale of a block of second moments, from the bits of the largest root, which becomes less
 * than 2 times it after rounding. */
MIXPREC_HD uint32_t mixp_state_scale_v(uint32_t largest) {
    uint32_t exponent = (largest + 0xFFFFFu) >> 23;
    return exponent > 15u ? exponent : 15u;
}

/* The code of a second moment's root, of 16 random bits: exponent and mantissa in one number, 1 to
 * 254, that counts 16 to the octave down from the scale. It is 0 for 0 alone: a weight whose root
 * vanished would move by its first moment over eps. 255 is Inf, and NaN, whose weight is NaN. */
MIXPREC_HD uint32_t mixp_state_v(float root, uint32_t scale, uint32_t random) {
    uint32_t a = mixp_bits_of_f32(root) & 0x7FFFFFFFu;
    int32_t code = (int32_t)((a + (random << 3)) >> 19) - (int32_t)((scale - 15u) << 4);
    code = code > 1 ? code : 1;  /* plant: state_floor */
    code = a < 0x7F800000u ? code : 255;
    return a ? (uint32_t)code : 0u;
}
MIXPREC_HD float mixp_state_v_value(uint32_t code, uint32_t scale) {
    uint32_t u = (code + ((scale - 15u) << 4)) << 19;
    float root;
    u = code < 255u ? u : 0x7F800000u;
    root = mixp_f32_of_bits(code ? u : 0u);
    return root * root;
}

/* A master as bf16 weight << 16 | what lies beside it. The weight is the nearest, and ties go up in
 * magnitude: to even, two masters would share a pair. NaN is kept apart, for its carry would make
 * it -0. */
typedef struct mixp_master_parts { uint32_t weight, rest; } mixp_master_parts;

/* All of the f32. */
MIXPREC_HD mixp_master_parts mixp_master_to_16(float master) {
    uint32_t u = mixp_bits_of_f32(master);
    uint32_t nan = (u & 0x7FFFFFFFu) > 0x7F800000u;
    mixp_master_parts s;
    s.weight = nan ? u >> 16 | 0x40u : (u + 0x8000u) >> 16;  /* plant: master_nan */
    s.rest = nan ? 0u : u & 0xFFFFu;
    return s;
}
MIXPREC_HD float mixp_master_from_16(uint32_t weight, uint32_t rest) {
    uint32_t carried = (rest & 0x8000u) << 1;
    return mixp_f32_of_bits((weight << 16) + rest - carried);
}

/* Its upper 24 bits, of 8 random bits. */
MIXPREC_HD mixp_master_parts mixp_master_to_8(float master, uint32_t random) {
    uint32_t u = mixp_bits_of_f32(master);
    uint32_t nan = (u & 0x7FFFFFFFu) > 0x7F800000u;
    uint32_t kept = (u + random) >> 8;
    mixp_master_parts s;
    s.weight = nan ? u >> 16 | 0x40u : (kept + 0x80u) >> 8;
    s.rest = nan ? 0u : kept & 0xFFu;
    return s;
}
MIXPREC_HD float mixp_master_from_8(uint32_t weight, uint32_t rest) {
    uint32_t carried = (rest & 0x80u) << 1;
    return mixp_f32_of_bits(((weight << 8) + rest - carried) << 8);
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

/* Element i of an array of any dtype as f32: for your own operators, on the host and in kernels
 * (examples/own_operator.c). What f32 cannot hold is rounded to nearest even. */
MIXPREC_HD float mixp_get(mixp_in a, int64_t i) {
    switch (a.dtype) {
    case MIXP_F32:  return ((const float *)a.data)[i];
    case MIXP_F16:  return mixp_f32_from_f16(((const mixp_f16 *)a.data)[i]);
    case MIXP_BF16: return mixp_f32_from_bf16(((const mixp_bf16 *)a.data)[i]);
    case MIXP_F64:  return (float)((const double *)a.data)[i];
    case MIXP_I32:  return (float)((const int32_t *)a.data)[i];
    case MIXP_I64:  return (float)((const int64_t *)a.data)[i];
    default:        return (float)mixp_decode(a.dtype, ((const uint8_t *)a.data)[i]);
    }
}

/* Element i becomes x, rounded to nearest even (an integer: cut off, and held within its range);
 * where y accumulates, what it holds plus x, rounded once. */
MIXPREC_HD void mixp_put(mixp_out y, int64_t i, float x) {
    if (y.accumulate) x += mixp_get(mixpi_in(y.data, y.dtype), i);
    switch (y.dtype) {
    case MIXP_F32:  ((float *)y.data)[i] = x; break;
    case MIXP_F16:  ((mixp_f16 *)y.data)[i] = mixp_f16_from_f32(x); break;
    case MIXP_BF16: ((mixp_bf16 *)y.data)[i] = mixp_bf16_from_f32(x); break;
    case MIXP_F64:  ((double *)y.data)[i] = (double)x; break;
    case MIXP_I32:
        ((int32_t *)y.data)[i] = (int32_t)(uint32_t)mixp_encode(MIXP_I32, (double)x, 0);
        break;
    case MIXP_I64:
        ((int64_t *)y.data)[i] = (int64_t)mixp_encode(MIXP_I64, (double)x, 0);
        break;
    default: ((uint8_t *)y.data)[i] = (uint8_t)mixp_encode(y.dtype, (double)x, 0); break;
    }
}

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
 * (divides by cols).
 * add_norm: sum = a + b first, as binary gives it, and then y of sum in place of a, as norm gives it:
 * the same bits in one pass. sum may be a or b where that has its dtype. */
typedef struct mixp_norm_args {
    int64_t  rows, cols;
    int      rms;               /* 1: mean is 0, and neither beta nor `mean` is looked at  */
    float    eps;
    mixp_in  a;
    mixp_in  gamma, beta;       /* cols values each; not there = 1 and 0                   */
    mixp_out y;
    float   *mean, *rstd;       /* rows values each, written for the backward pass         */
    mixp_in  b;                 /* of add_norm alone: rows * cols values                   */
    mixp_out sum;
} mixp_norm_args;

/* With h = (a - mean) * rstd and d = dy * gamma: da (+)= rstd * (d - mean(d) - h * mean(d h)),
 * without mean(d) when rms; dgamma (+)= the sum over rows of dy h, dbeta (+)= that of dy. db = what
 * da then holds: asked for where the table has add_norm, and da is there and f32. */
typedef struct mixp_norm_backward_args {
    int64_t      rows, cols;
    int          rms;
    mixp_in      dy, a, gamma;
    const float *mean, *rstd;
    mixp_out     da, dgamma, dbeta;     /* any of them may be not there: not wanted        */
    mixp_out     db;                    /* nor need it be                                  */
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
    int64_t        before;      /* rows of earlier calls whose mean and count loss and
                                   counted hold: both go on. 0: these rows are the first   */
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

/* Where the rows of heads lie: row i of head h of sequence s begins s * sequence + h * head +
 * i * row elements behind the first. A stride of 0: all share one. */
typedef struct mixp_head_strides { int64_t sequence, head, row; } mixp_head_strides;

/* Multi-head attention of t queries over `keys` keys and values:
 *
 *     y[b, t, heads, d] (+)= drop(softmax(cap(scale * q k') + mask)) v
 *
 * Head h of q meets head h / (heads / kv_heads) of k and v. cap(s) = softcap * tanh(s / softcap),
 * or s where softcap is 0. causal: query i sees keys up to i + past, past >= 0. lengths: sequence s
 * sees keys below lengths[s], which is in [0, keys]; one outside is told as an index is, see
 * mixp_embedding_args, and until then the nearest bound stands for it. drop: a
 * probability is kept, times 1 / (1 - dropout), when mixp_random_u32(seed, step, tensor,
 * ((s * heads + h) * t + i) * keys + j) >= dropout * 2^32. No array of scores is ever stored.
 *
 * A query that sees no key, since all of them are hidden or have scores of -Inf, has y of 0, lse of
 * +Inf and passes gradients of 0 where there is a mask or lengths; where not, y is NaN. */
typedef struct mixp_attention_args {
    int64_t  b, t, keys, heads, kv_heads, d;    /* heads: a multiple of kv_heads           */
    int      causal;
    int64_t  past;
    float    scale, softcap;
    float    dropout;           /* in [0, 1); 0: the next three are not looked at          */
    uint64_t seed, step, tensor;
    mixp_in  q, k, v;
    mixp_head_strides q_at, k_at, v_at;
    mixp_in  mask;              /* or not there                                            */
    mixp_head_strides mask_at;
    int64_t  mask_key;          /* elements from one key to the next: 1, or 0              */
    const int32_t *lengths;     /* b values in device memory, or NULL                      */
    mixp_out y;
    float   *lse;               /* [b, heads, t]: log-sum-exp of scores, for backward      */
} mixp_attention_args;

/* dq, dk, dv (+)= the gradients of q, k and v, which lie as those do, from dy, which lies as y. */
typedef struct mixp_attention_backward_args {
    mixp_attention_args forward;        /* as it was given: y and lse are read             */
    mixp_in  dy;
    mixp_out dq, dk, dv;                /* any of them may be not there: not wanted        */
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
 * real. bad, unless NULL, becomes 1 when an element of a is Inf or NaN, else it stays; y is not a
 * then. */
typedef struct mixp_scale_by_args {
    int64_t      n;
    const float *factor;
    mixp_in      a;
    mixp_out     y;
    int32_t     *bad;
} mixp_scale_by_args;

/* One parameter as the optimizer's kernels see it; an array of these is uploaded once. The dtype of
 * a state tells its kind. master: f32, bf16 for MIXP_MASTER_16BIT, u8 for MIXP_MASTER_8BIT. m: f32,
 * bf16, f8_e4m3 in blocks; v: f32, bf16, u8 in blocks. */
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
    uint8_t   *m_scale, *v_scale;   /* of moments in blocks, an f8_e8m0 each, or NULL      */
    uint64_t   tensor;          /* of the key of its random numbers                        */
    float      rate;            /* Muon: what the matrix' shape makes of the learning rate */
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
    struct mixp_lost      *lost;    /* device memory: of each row, added to; NULL = not asked */
} mixp_update_args;

/* Updates of a parameter's elements that are not 0; and those of them that would leave the weight
 * as it is, were its low dtype all there is: rounded to it, and added to what it holds. */
typedef struct mixp_lost { int64_t updates, lost; } mixp_lost;

/* The low dtype of a row's weight, or of its newest low copy; of one that has none, f16. */
MIXPREC_HD mixp_dtype mixpi_row_low_weight(const mixp_param_row *row) {
    if (row->weight_dtype != MIXP_F32) return row->weight_dtype;
    return row->low_bf16 && !row->low_f16 ? MIXP_BF16 : MIXP_F16;
}

MIXPREC_HD float mixpi_through_low(mixp_dtype low, float x) {
    return low == MIXP_BF16 ? mixp_f32_from_bf16(mixp_bf16_from_f32(x))
                            : mixp_f32_from_f16(mixp_f16_from_f32(x));
}

/* Is the update from `was` to `now` lost? */
MIXPREC_HD int mixpi_update_is_lost(mixp_dtype low, float was, float now) {
    float held = mixpi_through_low(low, was);
    float moved = mixpi_through_low(low, held + (now - was));
    return moved == held;  /* plant: update_lost */
}

/* mixp_scaler_advance on the device, with the found_inf that prepare collected. guarded: a skip
 * leaves the scale as it is when the loss was not finite, or `forward` (NULL: nobody looked) holds
 * something that is not. */
typedef struct mixp_advance_args {
    const mixp_scaler_rule *rule;   /* host memory                                         */
    mixp_scaler_state      *scaler;
    int                     guarded;
    const struct mixp_look *forward;
    const float            *largest;    /* device memory: of the scaled gradients that were met
                                           on the way back; NULL = nobody looked        */
} mixp_advance_args;

/* What one look at an array found; counts are of elements. Of an array that is stored in `low`
 * already nobody can see what was flushed to zero there: `least` tells, for where a density is flat
 * near 0 half as many were flushed as hold the smallest subnormal. */
typedef struct mixp_look {
    float   largest;            /* finite magnitude; 0: there is none */
    int32_t unused;
    int64_t count;              /* looked at */
    int64_t nonfinite, zeros;
    int64_t flushed;            /* not 0, and the nearest number of `low` is 0 */
    int64_t least;              /* the nearest is the smallest subnormal */
    int64_t subnormal;          /* the nearest is subnormal, that one included */
    int64_t saturated;          /* finite, and rounded it passes the largest number of `low`: a cast
                                   that saturates makes it that one */
} mixp_look;

/* What the kernel `advance` does: one function for every device. */
MIXPREC_HD void mixp_scaler_advance_guarded(mixp_scaler_state *s, const mixp_scaler_rule *r,
                                     int guarded, const mixp_look *forward) {
    const int began_forward = s->loss_bad || (forward && forward->nonfinite);
    if (guarded && s->found_inf && began_forward) mixpi_scaler_forgive(s, r);
    else mixp_scaler_advance(s, r, s->found_inf);
}

/* Bits of magnitudes, as f32, at which rounding to a format takes another course. */
typedef struct mixpi_look_limits { uint32_t flushed, least, subnormal, past; } mixpi_look_limits;

MIXPREC_HD mixpi_look_limits mixpi_look_limits_of(mixp_dtype low) {
    const mixp_format f = mixp_format_of(low);
    const double normal = ldexp(1.0, 1 - f.bias), tiny = ldexp(normal, -f.mantissa_bits);
    const uint64_t top = mixpi_max_code(f);
    const double most = mixp_decode(low, top), before = mixp_decode(low, top - 1u);
    const double past = most + 0.5 * (most - before);
    mixpi_look_limits at;
    at.flushed = (uint32_t)mixp_encode(MIXP_F32, 0.5 * tiny, 0);    /* a tie goes to 0 */
    at.least = (uint32_t)mixp_encode(MIXP_F32, 1.5 * tiny, 0);      /* the first that is more */
    at.subnormal = (uint32_t)mixp_encode(MIXP_F32, normal - 0.5 * tiny, 0);
    at.past = (uint32_t)mixp_encode(MIXP_F32, past, 0);
    if (mixp_encode(low, past, 0) == top) at.past++;    /* a tie goes to the even one */
    return at;
}

#define MIXP_EXPONENTS 256      /* of f32: bits 23 to 30                                */

/* Looks at n elements of x (real) and joins what it finds with what `row` holds, and with
 * `total` unless that is NULL: counts are added, the larger magnitude stays. exponents, unless
 * NULL: counts of elements by exponent, 256 of them: bits 23 to 30 of the element as f32; zeros
 * are in bin 0 with the subnormals, Inf and NaN in 255. low: a floating-point dtype of more than
 * 8 bits, or one of fp8. row, total and exponents: device memory. Integers and a maximum: the
 * same on every device. */
typedef struct mixp_look_args {
    int64_t    n;
    mixp_in    x;
    mixp_dtype low;
    mixp_look *row, *total;
    int64_t   *exponents;
} mixp_look_args;

/* Agreement of the ranks between grad_stats and prepare, in two halves with a sum over ranks
 * between them: fills this rank's row of table (and zeros the others), or, with `reads`, takes from
 * the whole table what all have found. See mixp_agree_fill and mixp_agree_read. looks: what
 * grad_stats found in each bucket of gradients before it was summed, first_leaf the place of its
 * first gradient. All but plan: device memory. */
typedef struct mixp_agree_args {
    const mixp_step_plan    *plan;      /* host memory                                     */
    const mixp_step_state   *looks;
    const int64_t           *first_leaf;
    int64_t                  n_looks;
    mixp_scaler_state       *scaler;    /* NULL = none                                     */
    const struct mixp_look  *forward;   /* of a sampled step: what its forward pass stored */
    mixp_step_state         *step;
    double                  *table;     /* size rows of MIXP_AGREE_WORDS                   */
    int                      rank, size, reads;
} mixp_agree_args;

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
    mixp_result (*agree)(const mixp_exec *x, const mixp_agree_args *k);

    mixp_result (*where)(const mixp_exec *x, const mixp_where_args *k);
    mixp_result (*where_backward)(const mixp_exec *x, const mixp_where_args *k);
    mixp_result (*max)(const mixp_exec *x, const mixp_max_args *k);
    mixp_result (*max_backward)(const mixp_exec *x, const mixp_max_backward_args *k);
    mixp_result (*gather)(const mixp_exec *x, const mixp_gather_args *k);
    mixp_result (*gather_backward)(const mixp_exec *x, const mixp_gather_args *k);
    mixp_result (*rope)(const mixp_exec *x, const mixp_rope_args *k);

    /* NULL: not there, and binary and norm do its work. */
    mixp_result (*add_norm)(const mixp_exec *x, const mixp_norm_args *k);
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
    /* post: queues a copy of device memory to pinned memory, slot 0 to 2; collect: waits until the
     * newest of that slot has arrived, and for nothing queued later. NULL = download. */
    mixp_result (*post)(const mixp_exec *x, int slot, const void *device, size_t bytes);
    mixp_result (*collect)(const mixp_exec *x, int slot, void *host, size_t bytes);
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
        mixp_tensor *lent;      /* of a gradient: one that reads this one's memory         */
        int          borrowed;  /* 1: a gradient whose memory is another's                 */
        int          disposable;/* 1: the program reads its values no more                 */
        int          site;      /* of an activation: number of what made it, from 1; 0 = data */
        mixp_dtype   raised;    /* the low dtype that it would have without a guard; MIXP_F32:
                                   it is as autocast says */
        int64_t      leaf;      /* its place in the arena of gradients, plus 1; 0 = none   */
    } own;
};

/* MANY MACHINES. mixprec says what must go between ranks, and when; what carries it is yours: MPI,
 * NCCL, shared memory (examples/ddp_mpi.c, ddp_nccl.c, ddp_fork.c). Each rank is a process with a
 * context of its own, makes the same calls in the same order, and gives mixp_backward its share of
 * the batch. Gradients are then those of the whole batch, and all ranks take the same step, with
 * the same scale, or skip it.
 *
 * A hook works on `count` elements of device memory, in place, in the order of `stream` (on a CPU,
 * NULL: before it returns), and gives up after `seconds`. It returns NULL, or why it failed, a text
 * that lives on: that is MIXP_ERR_RANKS. dtype: f32, f16, bf16, f64 (and i32 where ZeRO-1 gathers).
 * In a captured step hooks are called once, to be recorded. */
typedef const char *(*mixp_ranks_hook)(void *user, void *data, int64_t count,
                                       mixp_dtype dtype, void *stream, double seconds);

/* How gradients of size ranks become their mean. */
typedef enum mixp_ranks_mean {
    MIXP_MEAN_BEFORE,           /* each is divided, then they are summed: nothing overflows */
    MIXP_MEAN_AFTER,            /* the sum is divided: no small one is lost                */
    MIXP_MEAN_NONE              /* they are summed alone                                   */
} mixp_ranks_mean;

typedef struct mixp_ranks_desc {
    int             rank, size; /* of this process, from 0; of the world, at least 1       */
    mixp_ranks_hook sum;        /* over all ranks, the same bits on each. In the order of
                                   ranks, N of them give the bits of one with N parts      */
    mixp_ranks_hook max;        /* NULL = none: mixp_ranks_max is an error                 */
    mixp_ranks_hook all_gather; /* count elements of each rank, its own at data + rank *
                                   count: all get all. NULL = none                         */
    mixp_ranks_hook grad_ready; /* begins a sum that grad_wait ends, while backward goes on:
                                   a range of gradients is final. NULL = sum, at once      */
    const char *(*grad_wait)(void *user, void *stream, double seconds);
                                /* all that grad_ready began is in place after it          */
    void (*stop)(void *user, const char *why);
                                /* this rank has failed: the others need not wait for it.
                                   NULL = they wait until the time is up                   */
    void           *user;
    double          seconds;    /* 0 = 60: that one hook may take                          */
    int64_t         bucket_bytes;   /* 0 = 25 MiB: of gradients in a range, at least; a range
                                   ends where a tensor ends                                */
    mixp_ranks_mean mean;
    int             parts;      /* 0 = size: what the mean divides by                      */
    int             low_sums;   /* 1: f16 and bf16 gradients are summed as they are, not in f32:
                                   half the bytes, but each sum is rounded                 */
    int             apart;      /* 1: gradients of walks that mixp_ranks_hold keeps back are added
                                   as wholes, as those of ranks are: takes memory for another
                                   set. With size 1, parts N: the bits of N ranks          */
    int             shard;      /* 1: ZeRO-1. Each rank updates tensors of its own, and has moments
                                   and master weights of those alone; then all get the weights.
                                   The bits are the same. Needs all_gather; see CHECKPOINT    */
} mixp_ranks_desc;

typedef struct mixp_context_desc {
    const mixp_device *device;                      /* NULL = mixp_cpu()                   */
    void *(*allocate)(size_t bytes, void *user);    /* NULL = malloc                       */
    void  (*release)(void *p, void *user);          /* NULL = free; both or neither        */
    void     *user;
    uint64_t  seed;                                 /* of dropout, initialisation, rounding*/
    int       threads;                              /* 0 = as many as OpenMP gives, or as
                                                       there are cores (MIXPREC_THREADS);
                                                       without both any number is 1        */
    void     *stream;                               /* of a GPU: your cudaStream_t; NULL = one
                                                       of the context's own: see below     */
    mixp_allocator device_allocator;                /* of a GPU; unset = cudaMalloc        */
    const char **why;                               /* where to say why there is no context:
                                                       a constant string, or ""            */
    void (*on_error)(mixp_result code, const char *message, void *user);
                                                    /* NULL, or told of the first error and,
                                                       once that is cleared, of the next   */
    const mixp_ranks_desc *ranks;                   /* NULL = one rank; copied             */
} mixp_context_desc;

/* On a GPU everything runs on one stream. Kernels and copies of your own are ordered with it when
 * they are on that stream, or, where it is the context's own, on the legacy default stream (plain
 * <<<grid, block>>> and cudaMemcpy); with any other stream, use events. A program compiled with
 * --default-stream per-thread passes cudaStreamPerThread.
 *
 * desc NULL = all defaults. NULL, and desc->why says which: out of memory, half an allocator,
 * threads < 0, or a device or stream that cannot be used.
 * fork: with MIXPREC_THREADS a child goes on with threads of its own. OpenMP's may hang in a child
 * once the parent has used them: fork before the first step, or give the child's context threads 1.
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
/* 1: a site changed the dtype that it stores (see WATCH) since the graph was recorded, which
 * goes on as it was, safe as ever: record it again. A guard looks in no replay: when
 * mixp_guard_due says so, run a step by hand instead. */
MIXPREC_API int         mixp_graph_stale(const mixp_graph *graph);

/* The device memory in use and the most ever used, in bytes; how many allocations were made
 * since the context was made; and the bytes that the device really gave, which is what a GPU must
 * have: kernels' scratch memory, and what lies unused between buffers, belong to it. */
typedef struct mixp_memory {
    size_t  used, peak;
    int64_t allocations;
    size_t  allocated;
} mixp_memory;
/* All zeros for NULL. */
MIXPREC_API mixp_memory mixp_context_memory(const mixp_context *ctx);
/* The step count. With ranks it goes up by their number: one for each part of the batch. */
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

/* Says that the program itself will not read t's values again. Then mixp_cross_entropy's gradient
 * is written over logits that a product made and nothing else reads: with a large vocabulary they
 * are the largest array of a step. t is an activation: MIXP_ERR_ARGUMENT otherwise. */
MIXPREC_API mixp_result mixp_tensor_set_disposable(mixp_tensor *t, int on);

/* Says that t's data was written behind the library's back: cached low copies are stale. */
MIXPREC_API void mixp_tensor_touch(mixp_tensor *t);

/* Copy all elements, t->count, to or from host memory of any dtype. Both wait for the device. */
MIXPREC_API mixp_result mixp_read(const mixp_tensor *t, void *host, mixp_dtype dtype,
                                  int64_t count);
MIXPREC_API mixp_result mixp_write(mixp_tensor *t, const void *host, mixp_dtype dtype,
                                   int64_t count);
/* The value of a one-element tensor; waits for the device. NaN when t is NULL or larger. */
MIXPREC_API double mixp_item(const mixp_tensor *t);

/* The sum, the largest, over all ranks, of each element: in place, for numbers of yours, as the
 * loss that is shown. With one rank nothing changes. MIXP_ERR_RANKS: the hook failed, or there
 * is none. */
MIXPREC_API mixp_result mixp_ranks_sum(mixp_tensor *t);
MIXPREC_API mixp_result mixp_ranks_max(mixp_tensor *t);

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
    MIXP_CLASS_LOW_OUT,         /* inputs as they are, result in the region's dtype: for norms
                                   that only a LOW operator reads, which would cast it: the
                                   same bits, without the f32 array and its cast           */
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

/* With ranks, mixp_backward sums the gradients over them, and divides them. Where several walks
 * make one batch, hold those of all but the last back: on = 1 before the first, 0 before the last.
 * Then only the last one's gradients, with those that they were added to, leave the rank. Walking
 * back into a gradient that was summed, before mixp_zero_grad, is MIXP_ERR_ORDER.
 * The first walk compares what the ranks are: MIXP_ERR_RANKS says what differs, and where. Without
 * ranks nothing happens. */
MIXPREC_API mixp_result mixp_ranks_hold(mixp_context *ctx, int on);

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
/* What kernels, and mixp_get and mixp_put, read and write: input i and the result; for backward the
 * result's gradient, and that of input i as mixp_call_grad has it, which says whether it adds. No
 * data: not there, or not wanted. */
MIXPREC_API mixp_in  mixp_call_x(const mixp_call *c, int i);
MIXPREC_API mixp_out mixp_call_y(const mixp_call *c);
MIXPREC_API mixp_in  mixp_call_dy(const mixp_call *c);
MIXPREC_API mixp_out mixp_call_dx(mixp_call *c, int i);

/* ==== 8. OPERATORS =================================================== >>operators ====
 *
 * Each returns a new activation, NULL on error or when an input is NULL. Inputs must be of
 * this context. Shapes: x[..., k] means any leading dimensions. Floating inputs may be f32,
 * f16 or bf16 in any mix. Classes are PyTorch's on CUDA.
 *
 *     mixp_...                    class    inputs               gradient to   note
 *     linear                      LOW      x, w (, b)           all
 *     matmul                      LOW      a, b                 both          broadcasts
 *     attention (_apply)          LOW      qkv, or q, k, v      those         fused
 *     add sub mul div             PROMOTE  a, b                 both          broadcast
 *     maximum minimum             PROMOTE  a, b                 both          broadcast; ties half
 *     swiglu                      PROMOTE  gate, up             both          broadcasts
 *     swiglu_packed               KEEP     x                    x             last dimension halved
 *     scale neg abs clamp         KEEP     x                    x
 *     relu relu_squared           KEEP     x                    x             f16: Inf from 256 on
 *     gelu gelu_tanh silu         KEEP     x                    x
 *     tanh sigmoid soft_cap       KEEP     x                    x
 *     sqrt sin cos                KEEP     x                    x
 *     exp log pow                 F32      x                    x
 *     sum                         F32_OUT  x                    x
 *     mean                        KEEP     x                    x
 *     max                         KEEP     x                    x             ties: the first; all
 *     argmax                      KEEP     x                    none          i32
 *     softmax log_softmax         F32_OUT  x                    x
 *     layer_norm                  F32      x (, gamma, beta)    all
 *     rms_norm                    F32      x (, gamma)          both
 *     add_layer_norm              both     a, b (, gamma, beta) all           add, then the norm
 *     add_rms_norm                both     a, b (, gamma)       all           add, then the norm
 *     embedding                   KEEP     table, ids           table
 *     gather                      KEEP     x, ids               x
 *     where                       PROMOTE  mask, a, b           a, b          broadcasts
 *     masked_fill                 KEEP     x, mask              x             broadcasts
 *     rope                        KEEP     x                    x             both kinds of pairs
 *     dropout                     KEEP     x                    x
 *     cross_entropy (_smooth)     F32      logits, targets      logits        f32 scalar
 *     linear_cross_entropy        LOW      x, w, targets        x, w          f32 scalar
 *     mse l1 smooth_l1 huber      F32      x, target            both          f32 scalar
 *     bce_with_logits kl_div      F32      x, target            x             f32 scalar
 *     bce                         BANNED   x, target            x             f32 scalar
 *     cast reshape transpose      KEEP     x                    x             reshape: no copy
 *     concat                      PROMOTE  any number           all
 *     slice split                 KEEP     x                    x
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

/* Every other attention. Zeroed, with `heads`: softmax(q k' / sqrt(d)) v of as many heads. */
typedef struct mixp_attention_desc {
    int          heads;         /* of q. 0: q has them as a dimension, [b, t, heads, d]    */
    int          kv_heads;      /* of k and v; 0 = heads, of which each then meets
                                   heads / kv_heads (grouped; 1: multi-query)              */
    int          causal;        /* 1: query i sees keys up to i + past                     */
    int64_t      past;          /* keys before the first query's own; 0 is PyTorch's
                                   is_causal also where t and keys differ                  */
    float        scale;         /* 0 = 1/sqrt(d)                                           */
    float        softcap;       /* scores become softcap * tanh(score / softcap); 0 = as
                                   they are                                                */
    float        dropout;       /* share of probabilities dropped, in [0, 1); 0 when not
                                   training                                                */
    mixp_tensor *mask;          /* added to scores: any shape that broadcasts to
                                   [b, heads, t, keys]; -Inf hides. NULL = none            */
    mixp_tensor *lengths;       /* i32 [b]: a sequence sees that many of its keys, the rest
                                   is padding. NULL = all                                  */
} mixp_attention_desc;

/* LOW. Attention of q[b, t, heads*d], k and v[b, keys, kv_heads*d]: y has the shape of q. Each may
 * have its heads as a dimension instead: [b, t, heads, d] is the same memory, and no transpose to
 * PyTorch's [b, heads, t, d] is wanted. k and v NULL: q is packed, [b, t, (heads + 2 kv_heads)*d].
 *
 * Fused: no array of t x keys scores is stored; blocks that lengths, or on a CPU a mask, hide whole
 * are not computed. Apart and packed give the same bits. Autocast casts a mask as PyTorch does. A
 * mask gets no gradient: one that wants it is MIXP_ERR_ARGUMENT. Dropout's choice is a function of
 * seed, step, the call's place in the step, and the element; the same on every device.
 *
 * A query that sees no key (a mask row of -Inf, a length of 0) has a result of 0 and passes
 * gradients of 0, as in PyTorch's scaled_dot_product_attention since 2.5; its softmax, and its
 * MultiheadAttention when that returns weights, give NaN there.
 *
 * MIXP_ERR_SHAPE or MIXP_ERR_DTYPE, with names and shapes of what does not fit;
 * MIXP_ERR_ARGUMENT: a number outside its range, or a length outside [0, keys] (a GPU tells that
 * later, as an id of mixp_embedding). */
MIXPREC_API mixp_tensor *mixp_attention_apply(mixp_context *ctx, mixp_tensor *q,
                                              mixp_tensor *k, mixp_tensor *v,
                                              const mixp_attention_desc *desc);

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
/* The norm of *sum = mixp_add(ctx, a, b), and *sum (NULL: not wanted): x = x + f, h = norm(x) of a
 * residual block. They are those two operators, with their classes, names and bits; but where a and b
 * are of one shape, the device reads them once and writes both. On an error NULL, and *sum NULL. */
MIXPREC_API mixp_tensor *mixp_add_layer_norm(mixp_context *ctx, mixp_tensor *a,
                                             mixp_tensor *b, mixp_tensor *gamma,
                                             mixp_tensor *beta, float eps,
                                             mixp_tensor **sum);
MIXPREC_API mixp_tensor *mixp_add_rms_norm(mixp_context *ctx, mixp_tensor *a,
                                           mixp_tensor *b, mixp_tensor *gamma, float eps,
                                           mixp_tensor **sum);
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
/* LOW. The same of logits x[..., in] w[vocab, in]', which are never stored whole: they are made
 * `chunk` rows at a time, and once more to find gradients, a third more work in these products for
 * memory of chunk * vocab values instead of twice rows * vocab. chunk 0: an eighth of the rows, or
 * 2^22 values where that is more. The gradients are those of mixp_linear and mixp_cross_entropy but
 * for the order in which the sum over rows is made in w's. f32 scalar; chunk < 0, an id outside
 * [0, vocab): as in mixp_cross_entropy. */
MIXPREC_API mixp_tensor *mixp_linear_cross_entropy(mixp_context *ctx, mixp_tensor *x,
                                                   mixp_tensor *w, mixp_tensor *targets,
                                                   int32_t ignore, int64_t chunk);
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
    MIXP_OP_L1, MIXP_OP_SMOOTH_L1, MIXP_OP_HUBER, MIXP_OP_KL_DIV,
    MIXP_OP_LINEAR_CROSS_ENTROPY,
    MIXP_OP_MAX, MIXP_OP_ARGMAX, MIXP_OP_GATHER, MIXP_OP_WHERE, MIXP_OP_MASKED_FILL,
    MIXP_OP_ROPE,
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
    MIXP_RULE_PREDICTIVE,       /* set by the largest gradients, every 16: see below    */
    MIXP_RULE_COUNT
} mixp_scaler_preset;

/* MIXP_RULE_PREDICTIVE does not grope for the scale. It knows the largest |gradient| of every step,
 * of the parameters (and, in a step that the guard looks at, of everything met on the way back),
 * and makes the scale the power of two that puts it `margin` binades below low_largest: every
 * growth_interval clean steps, at once when a gradient comes nearer than that, and never by more
 * than max_move binades a step. An overflow backs off as PyTorch's rule does, and counts as a
 * gradient of low_largest / scale. What was largest is forgotten by half in four intervals. */
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
    /* Of MIXP_RULE_PREDICTIVE alone. */
    int       margin;           /* 0 = 3 binades; at most 30                            */
    int       max_move;         /* 0 = 4 binades a step; at most 252                    */
    float     low_largest;      /* 0 = 65504, f16's                                     */
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
 * Hyper-parameters are double; moments and master weights are f32, or of fewer bytes on request.
 * Without fast-math, steps give the same bits on every instruction set, at any number of threads.
 */
/* How an optimizer stores what it remembers: a trade of memory, and of the time that it takes to
 * pass through it, for noise. Zeroed: all f32; MIXP_MOMENT_BF16 or _8BIT, MIXP_MASTER_16BIT or
 * _8BIT otherwise (ARITHMETIC has their layouts). 16-bit masters lose nothing; bf16 moments cost next
 * to nothing; 8-bit moments let an update differ by about a tenth.
 * Parameters of one axis (norms, biases), of fewer than MIXP_STATE_SMALL elements, and of groups
 * with f32_states keep f32. Parameters of f32 are their own masters. */
#define MIXP_STATE_SMALL 4096
typedef struct mixp_optimizer_states {
    mixp_moment_kind m, v;      /* v: of Adam, AdamW and RMSprop                           */
    mixp_master_kind master;    /* of bf16 parameters; not F32: f16 ones are refused       */
} mixp_optimizer_states;

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
    mixp_optimizer_states states;   /* all f32                                             */
    int           cautious;     /* 1: decays only weights that the update moves towards 0  */
    mixp_spike_rule spike;      /* off: skips steps whose loss or norm is a spike       */
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
    mixp_optimizer_states states;
    mixp_spike_rule spike;      /* off                                                  */
} mixp_adam_desc;
MIXPREC_API mixp_adam_desc mixp_adam_defaults(void);

typedef struct mixp_sgd_desc {
    double        lr;           /* 1e-3                                                    */
    double        momentum, dampening, weight_decay;    /* 0                               */
    int           nesterov;     /* 0; 1 needs momentum and no dampening                    */
    double        max_norm;     /* 0 = off                                                 */
    int           no_master, zero_grad;     /* as above                                    */
    mixp_schedule schedule;
    mixp_optimizer_states states;
    mixp_spike_rule spike;      /* off                                                  */
} mixp_sgd_desc;
MIXPREC_API mixp_sgd_desc mixp_sgd_defaults(void);

/* torch.optim.RMSprop, but for its `centered`. */
typedef struct mixp_rmsprop_desc {
    double        lr;           /* 1e-2                                                    */
    double        alpha;        /* 0.99, of the second moment; a group's beta2             */
    double        eps;          /* 1e-8                                                    */
    double        weight_decay, momentum;   /* 0; the decay joins the gradient             */
    double        max_norm;     /* 0 = off                                                 */
    int           no_master, zero_grad;     /* as above                                    */
    mixp_schedule schedule;
    mixp_optimizer_states states;
    mixp_spike_rule spike;      /* off                                                  */
} mixp_rmsprop_desc;
MIXPREC_API mixp_rmsprop_desc mixp_rmsprop_defaults(void);

/* Lion, with its authors' defaults: a third to a tenth of AdamW's rate, and as many times its
 * weight decay, suit it. */
typedef struct mixp_lion_desc {
    double        lr;           /* 1e-4                                                    */
    double        beta1, beta2; /* 0.9, 0.99                                               */
    double        weight_decay; /* 0, decoupled                                            */
    double        max_norm;     /* 0 = off                                                 */
    int           no_master, zero_grad;     /* as above                                    */
    mixp_schedule schedule;
    mixp_optimizer_states states;
    int           cautious;     /* as above                                                */
    mixp_spike_rule spike;      /* off                                                  */
} mixp_lion_desc;
MIXPREC_API mixp_lion_desc mixp_lion_defaults(void);

/* How the shape of a matrix changes Muon's rate: rows are what a linear layer puts out. */
typedef enum mixp_muon_rate {
    MIXP_MUON_RATE_ORIGINAL,        /* sqrt(max(1, rows / cols))                           */
    MIXP_MUON_RATE_MATCH_RMS_ADAMW  /* 0.2 sqrt(max(rows, cols)): AdamW's rate and decay
                                       serve unchanged                                     */
} mixp_muon_rate;

/* Muon, as torch.optim.Muon: momentum whose direction becomes an orthogonal matrix by a
 * Newton-Schulz iteration, of products on the device. For the matrices inside a model: parameters
 * of 2 axes (MIXP_ERR_SHAPE otherwise); embeddings, the head, norms and biases are for an AdamW of
 * their own. It works with loss scaling, and a skipped step is skipped on the device, also in a
 * recorded step. An m x n matrix, m <= n, costs `iterations` (4 m m n + 2 m m m) operations a step,
 * which is little beside a large batch and much beside a small one. It needs memory for one matrix,
 * the largest: 6 bytes an element (8 in f32), and 8 (12) for its smaller side squared. */
typedef struct mixp_muon_desc {
    double        lr;           /* 1e-3                                                    */
    double        momentum;     /* 0.95                                                    */
    double        weight_decay; /* 0.1, decoupled, of lr before the shape changes it       */
    double        eps;          /* 1e-7: norms below it are divided by it                  */
    double        a, b, c;      /* 3.4445, -4.7750, 2.0315: X <- a X + (b A + c A A) X with
                                   A = X X'                                                */
    int           iterations;   /* 5; at most 99                                           */
    int           nesterov;     /* 1                                                       */
    int           f32;          /* 0: the iteration is in bf16                             */
    mixp_muon_rate rate;        /* MIXP_MUON_RATE_ORIGINAL                                 */
    double        max_norm;     /* 0 = off                                                 */
    int           no_master, zero_grad;     /* as above                                    */
    mixp_schedule schedule;
    mixp_optimizer_states states;
    int           cautious;     /* as above                                                */
    mixp_spike_rule spike;      /* off                                                  */
} mixp_muon_desc;
MIXPREC_API mixp_muon_desc mixp_muon_defaults(void);

/* An optimizer without parameters. NULL on error: a hyper-parameter that is NaN, negative or
 * out of range (betas in [0,1), eps >= 0), a spike rule that is. */
MIXPREC_API mixp_optimizer *mixp_adamw_new(mixp_context *ctx,
                                           const mixp_adamw_desc *desc);
MIXPREC_API mixp_optimizer *mixp_adam_new(mixp_context *ctx, const mixp_adam_desc *desc);
MIXPREC_API mixp_optimizer *mixp_sgd_new(mixp_context *ctx, const mixp_sgd_desc *desc);
MIXPREC_API mixp_optimizer *mixp_rmsprop_new(mixp_context *ctx,
                                             const mixp_rmsprop_desc *desc);
MIXPREC_API mixp_optimizer *mixp_lion_new(mixp_context *ctx, const mixp_lion_desc *desc);
MIXPREC_API mixp_optimizer *mixp_muon_new(mixp_context *ctx, const mixp_muon_desc *desc);

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
 * MIXP_ERR_ARGUMENT: added before. MIXP_ERR_DTYPE: f16 where masters are kept beside bf16.
 * MIXP_ERR_SHAPE: no matrix, for Muon. */
MIXPREC_API mixp_result mixp_optimizer_add(mixp_optimizer *opt, mixp_tensor *param,
                                           mixp_tensor *grad);

/* Forgets the gradients of all parameters (a view of yours is cleared to 0). With zero_grad in
 * the description each step does so itself, a view in the pass that reads it: for programs that
 * accumulate into buffers of their own. A skipped step clears them too, for an Inf would stay in
 * the next sum; it touches nothing else. No other parameter of any optimizer may share it. */
MIXPREC_API mixp_result mixp_zero_grad(mixp_optimizer *opt);

/* The true loss of the coming step, by which MIXP_SPIKE_LOSS judges it: one f32 element, of several
 * micro-batches or ranks (mixp_ranks_sum) their mean. It is read when the step is taken, on the
 * device, without waiting; each step needs one of its own. MIXP_ERR_ARGUMENT: loss has more
 * elements, is of another context or of an earlier step, or opt does not look at losses;
 * MIXP_ERR_DTYPE: it is not f32. */
MIXPREC_API mixp_result mixp_optimizer_set_loss(mixp_optimizer *opt,
                                                const mixp_tensor *loss);

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

/* Why a step was skipped. */
typedef enum mixp_skip_reason {
    MIXP_SKIP_NONE,             /* it was applied                                       */
    MIXP_SKIP_NON_FINITE,       /* a gradient is Inf or NaN                             */
    MIXP_SKIP_SPIKE_NORM,       /* see mixp_spike_rule                                  */
    MIXP_SKIP_SPIKE_LOSS,
    MIXP_SKIP_STOPPED           /* an index was out of range on a device; the error tells  */
} mixp_skip_reason;

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
    int          bad_rank;      /* on which rank it was bad; then bad_tensor is the one nearest the
                                   loss there. -1 = none is, or on none: in their sum alone */
    mixp_skip_reason reason;
    double       spike_z;       /* how many sd above mean the loss or norm lay, whichever lay */
    double       spike_mean, spike_sd;  /* higher; 0 while no spikes are looked for     */
    mixp_origin  origin;        /* of a skip: where it began */
    const char  *site;          /* its site's name, "" for none; as long as the context */
} mixp_verdict;

/* How the gradient of a parameter, or of all, lay in its low dtype when it was looked at last:
 * as backward left it, multiplied by the loss scale. Shares are of the values that are not 0. */
typedef struct mixp_underflow {
    const char *name;           /* of the parameter; "" for all of them                 */
    int64_t     step;           /* of the context, in which it was; -1 = never yet      */
    mixp_dtype  low;            /* of the gradient if that is low, else of the parameter's
                                   newest low copy, else f16; for all: of the first     */
    double      flushed;        /* share that is 0 in `low`; an estimate (see mixp_look) of a
                                   gradient that is stored low                          */
    double      subnormal;      /* share that loses bits there                          */
    mixp_look   look;
    int64_t     exponents[MIXP_EXPONENTS];  /* counts by exponent: e is at e + 127; see
                                   mixp_look_args                                       */
    mixp_lost   lost;           /* of the updates of that step: 0 if it was skipped     */
} mixp_underflow;

/* The next step or unscale of opt also counts, by a kernel of its own, which reads each gradient
 * once more; at the first call, memory for it is taken. Under a guard every sampled step does so
 * by itself. MIXP_ERR_DEVICE: the device has no kernel for it; MIXP_ERR_MEMORY. */
MIXPREC_API mixp_result mixp_optimizer_sample(mixp_optimizer *opt);

/* What was counted of parameter i, in the order in which they were added, or, for -1, of all. 1:
 * *out is filled; 0: there is no such parameter, or out is NULL. On a GPU it waits until that step
 * is done, and for nothing behind it: asked two steps later it finds the counts there. (For the
 * whole device, where a graph counts, or several optimizers did in one step.) */
MIXPREC_API int mixp_optimizer_underflow(mixp_optimizer *opt, int64_t i,
                                         mixp_underflow *out);

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
 * "h.3: add"; where several have one name, "h.3: add #2"; "cast" alone is that of an input.
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
 *
 * Gradients are looked at too, multiplied by the loss scale as they are; a site whose gradient is
 * flushed falls back likewise. Flushing counts where no value of the array reaches 16 times the
 * smallest normal number of the dtype: beside larger ones, what is lost is less than a rounding.
 * What was flushed cannot be seen in an array that is low already: there it is told from how many
 * hold the smallest subnormal, or from a neighbour with tiny values where all are zeros.
 *
 * Several ranks put together what they saw: their sites stay alike, and a skip that began in the
 * forward pass of any lowers the loss scale of none.
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
 * field is out of range, or max_sites another than at first (4096 after a mixp_compare).
 * MIXP_ERR_DEVICE: the device has no
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
    const char     *site;       /* its name, "" for none: a skip that no sample explains yet */
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

/* What a cast of t (f32, f16, bf16) to `low` would make of its elements: how many saturate, are
 * flushed, become subnormal. low: f16, bf16, f32 or one of fp8. For programs that cast to fp8, by
 * mixp_convert or kernels of their own, as it is now; no operator here does, and moments of 8 bits
 * have units that nothing passes. Waits for the device; the first call takes memory for one row.
 * MIXP_ERR_ARGUMENT: another dtype, no `out`, or a device without the kernel `look`. */
MIXPREC_API mixp_result mixp_look_at(const mixp_tensor *t, mixp_dtype low, mixp_look *out);

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
 * gives it back. MIXP_ERR_ORDER: a region is open, or fn drops out: dropout would draw other
 * numbers in each; pass training 0. MIXP_ERR_ARGUMENT: no fn, room or n, or settings out of
 * range. */
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
 * Where states are sharded over ranks, all of them call it, and rank 0 writes the file, whole: it
 * loads on any number of ranks, with or without.
 * MIXP_ERR_IO with the system's reason; whatever was at path is then as it was (but for one case,
 * which the message tells: the new file is there and its folder could not be flushed). */
MIXPREC_API mixp_result mixp_checkpoint_save(const char *path,
                                             const mixp_checkpoint *what);

/* Restores what mixp_checkpoint_save wrote, into a context, optimizers and scaler made the
 * same way; training goes on as if it had never stopped, to the bit. As in PyTorch, the
 * saved hyper-parameters of the optimizers' groups replace those in place: change them
 * afterwards. The scaler's rule and the schedules are the program's. A file without the state of
 * spikes or of a rule that predicts loads: these begin anew; one with a state that the program has
 * no use for loads, too.
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

/* Why norm refuses k, or MIXP_OK. */
static mixp_result mixpi_norm_check(const mixp_norm_args *k) {
    if (!mixpi_reads(k->a) || !mixpi_writes(k->y) || !mixpi_may_read(k->gamma) ||
        !(k->rms || mixpi_may_read(k->beta))) return MIXP_ERR_DTYPE;
    return k->y.accumulate ? MIXP_ERR_ARGUMENT : MIXP_OK;
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
    int64_t i, count = k->before > 0 ? (int64_t)*k->counted : 0;
    if (count > 0) sum = (double)*k->loss * (double)count;
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
        return mixpi_vsign(b, dy);
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
    mixpi_v half = mixpi_vmul(dy, mixpi_vset(0.5f));
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

MIXPI_K void MIXPI_P(note_bad)(const mixp_scale_by_args *k) {
    int64_t i;
    for (i = 0; i < k->n; i++) {
        float one = MIXPI_P(read_one)(k->a, i);
        if ((mixp_bits_of_f32(one) & 0x7FFFFFFFu) >= 0x7F800000u) *k->bad = 1;
    }
}

MIXPI_K mixp_result MIXPI_P(scale_by)(const mixp_exec *x, const mixp_scale_by_args *k) {
    mixpi_map m;
    if (!k->factor) return MIXP_ERR_ARGUMENT;
    mixpi_map_init(&m, MIXPI_FN_UNARY + (int)MIXP_UNARY_SCALE, 1, &k->n, k->y);
    mixpi_map_source(&m, k->a, NULL);
    m.p = k->factor[0];
    if (k->bad) MIXPI_P(note_bad)(k);
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
    mixp_result r = mixpi_norm_check(k);
    if (r != MIXP_OK) return r;
    return mixpi_each_row(x, k->rows, mixpi_rows_of_task(k->cols), MIXPI_P(norm_row), k);
}

/* A row of sums, and its norm while it is at hand. */
MIXPI_K void MIXPI_P(add_norm_row)(const void *args, int64_t row) {
    const mixp_norm_args *k = (const mixp_norm_args *)args;
    mixp_norm_args of_sum = *k;
    float a_buf[MIXPI_BLOCK], b_buf[MIXPI_BLOCK], sum[MIXPI_BLOCK];
    int64_t at = row * k->cols;
    MIXPI_BLOCKS(i, n, k->cols) {
        const float *a = MIXPI_P(read)(k->a, at + i, n, a_buf);
        const float *b = MIXPI_P(read)(k->b, at + i, n, b_buf);
        MIXPI_P(floats_add)(sum, a, b, n);
        MIXPI_P(write)(k->sum, at + i, n, sum);
    }
    of_sum.a = mixpi_in(k->sum.data, k->sum.dtype);  /* plant: add_norm_sum */
    MIXPI_P(norm_row)(&of_sum, row);
}

MIXPI_K mixp_result MIXPI_P(add_norm)(const mixp_exec *x, const mixp_norm_args *k) {
    mixp_result r = mixpi_norm_check(k);
    if (!mixpi_reads(k->b) || !mixpi_writes(k->sum)) return MIXP_ERR_DTYPE;
    if (r != MIXP_OK || k->sum.accumulate) return r != MIXP_OK ? r : MIXP_ERR_ARGUMENT;
    return mixpi_each_row(x, k->rows, mixpi_rows_of_task(k->cols), MIXPI_P(add_norm_row), k);
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

/* db = da, of the row at `at`. */
MIXPI_K void MIXPI_P(norm_back_copy)(const mixp_norm_backward_args *k, int64_t at) {
    float buf[MIXPI_BLOCK];
    if (!k->db.data) return;
    MIXPI_BLOCKS(i, n, k->cols) {
        memcpy(buf, (const float *)k->da.data + at + i, (size_t)n * sizeof *buf);
        MIXPI_P(write)(k->db, at + i, n, buf);  /* plant: norm_db */
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
    MIXPI_P(norm_back_copy)(k, row * k->cols);
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
        !mixpi_may_write(k->dbeta) || !mixpi_may_write(k->db))
        return MIXP_ERR_DTYPE;
    if (k->db.data && (!k->da.data || k->da.dtype != MIXP_F32 || k->db.accumulate))
        return MIXP_ERR_ARGUMENT;
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

/* The sizes of one problem; group: heads of q for one of k and v; wide: d in whole vectors, the
 * row length of copies. pairs: q and k, dy and v are multiplied in pairs of bf16. */
typedef struct mixpi_heads {
    int64_t t, keys, heads, group, d, wide;
    int     pairs;
} mixpi_heads;

static mixpi_heads mixpi_heads_of(const mixp_attention_args *k, int pairs) {
    mixpi_heads h;
    h.t = k->t;
    h.keys = k->keys;
    h.heads = k->heads;
    h.group = k->heads / k->kv_heads;
    h.d = k->d;
    h.wide = (k->d + 15) / 16 * 16;
    h.pairs = pairs;
    return h;
}

/* Where the rows of one head lie in an array: row i begins at element first + i * ld. */
typedef struct mixpi_head { int64_t first, ld; } mixpi_head;

/* In q, or a mask. head: counted through all sequences, as below. */
static mixpi_head mixpi_head_at(const mixp_head_strides *at, const mixpi_heads *h,
                                int64_t head) {
    mixpi_head to;
    to.first = head / h->heads * at->sequence + head % h->heads * at->head;
    to.ld = at->row;
    return to;
}

/* In k or v: the head of theirs that this one of q meets. */
static mixpi_head mixpi_head_met(const mixp_head_strides *at, const mixpi_heads *h,
                                 int64_t head) {
    mixpi_head to;
    int64_t met = head % h->heads / h->group;  /* plant: attention_met */
    to.first = head / h->heads * at->sequence + met * at->head;
    to.ld = at->row;
    return to;
}

/* In y and its gradient. */
static mixpi_head mixpi_head_merged(const mixpi_heads *h, int64_t head) {
    mixpi_head at;
    at.ld = h->heads * h->d;
    at.first = head / h->heads * h->t * at.ld + head % h->heads * h->d;
    return at;
}

/* How many keys a head may see: those behind them are padding. */
static int64_t mixpi_keys_of(const mixp_attention_args *k, int64_t head) {
    /* plant: attention_padding */
    return k->lengths ? k->lengths[head / k->heads] : k->keys;
}

/* And how many of them up to the query before `end`. */
static int64_t mixpi_keys_until(const mixp_attention_args *k, int64_t head, int64_t end) {
    int64_t keys = mixpi_keys_of(k, head);
    /* plant: attention_last */
    return k->causal ? mixpi_min(keys, end + k->past) : keys;
}

/* The first block of queries that may see a key. */
static int64_t mixpi_first_queries(const mixp_attention_args *k, int64_t key) {
    int64_t from = k->causal ? key - k->past : 0;  /* plant: attention_past */
    return from > 0 ? from / MIXPI_QUERIES * MIXPI_QUERIES : 0;
}

/* Some scores of one query: of keys [key, key + n), in a row of MIXPI_KEYS. */
typedef struct mixpi_some_scores { int64_t head, query, key, n; } mixpi_some_scores;

/* Is there anything between scores and probabilities but the softmax? */
static int mixpi_attention_bends(const mixp_attention_args *k)
{ return k->softcap > 0.0f || k->mask.data || k->dropout > 0.0f; }

/* What is wrong with a problem; MIXP_OK: nothing. */
static mixp_result mixpi_attention_check(const mixp_attention_args *k) {
    int64_t i;
    if (!mixpi_reads(k->q) || !mixpi_reads(k->k) || !mixpi_reads(k->v) ||
        !mixpi_may_read(k->mask) || !mixpi_writes(k->y)) return MIXP_ERR_DTYPE;
    if (k->kv_heads < 1 || k->heads % k->kv_heads || k->past < 0 ||
        !(k->softcap >= 0.0f) || !(k->dropout >= 0.0f && k->dropout < 1.0f))
        return MIXP_ERR_ARGUMENT;
    for (i = 0; k->lengths && i < k->b; i++)
        if (k->lengths[i] < 0 || k->lengths[i] > k->keys) return MIXP_ERR_ARGUMENT;
    return MIXP_OK;
}

static int mixpi_attention_empty(const mixp_attention_args *k) {
    return k->b <= 0 || k->t <= 0 || k->keys <= 0 || k->heads <= 0 || k->d <= 0;
}

/* Which probabilities are dropped: see mixpi_dropout_plan. limit 0: none. */
typedef struct mixpi_drops { uint64_t key, limit; float scale; } mixpi_drops;

static mixpi_drops mixpi_drops_of(const mixp_attention_args *k) {
    mixpi_drops drops;
    drops.key = mixp_random_key(k->seed, k->step, k->tensor);
    drops.limit = (uint64_t)ceil((double)k->dropout * 4294967296.0);
    drops.scale = (float)(1.0 / (1.0 - (double)k->dropout));
    return drops;
}

typedef struct mixpi_attention_job {
    const mixp_attention_args *k;
    mixpi_heads  heads;
    mixpi_drops  drops;
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
    int64_t blocks = mixpi_ceil_div(h->keys, MIXPI_KEYS);
    mixpi_carver c = { from, 0 };
    room->columns = mixpi_carve(&c, blocks * MIXPI_KEYS * h->wide);
    room->v = mixpi_carve(&c, h->keys * h->wide);
    room->rows = mixpi_carve(&c, MIXPI_KEYS * h->wide);
    room->q = mixpi_carve(&c, MIXPI_QUERIES * h->wide);
    room->o = mixpi_carve(&c, MIXPI_QUERIES * h->wide);
    room->scores = mixpi_carve(&c, MIXPI_QUERIES * MIXPI_KEYS);
    return c.used;
}

typedef struct mixpi_attention_grad_job {
    const mixp_attention_backward_args *k;
    mixpi_heads  heads;
    mixpi_drops  drops;
    mixpi_slices slices;
} mixpi_attention_grad_job;

typedef struct mixpi_attention_grad_room {
    float *q, *dy, *dq;         /* all rows of each head of the group                      */
    float *score_q, *score_dy;  /* q and dy as scores want them                            */
    float *delta;               /* dy . y of each row                                      */
    float *k, *k_columns, *v_columns, *dk, *dv; /* of a block of keys                      */
    float *p, *g;               /* probabilities and their gradients: as scores            */
} mixpi_attention_grad_room;

static int64_t mixpi_attention_grad_carve(mixpi_attention_grad_room *room,
                                          const mixpi_heads *h, float *from) {
    int64_t all = h->group * h->t * h->wide, block = MIXPI_KEYS * h->wide;
    mixpi_carver c = { from, 0 };
    room->q = mixpi_carve(&c, all);
    room->dy = mixpi_carve(&c, all);
    room->dq = mixpi_carve(&c, all);
    room->score_q = h->pairs ? mixpi_carve(&c, all) : room->q;
    room->score_dy = h->pairs ? mixpi_carve(&c, all) : room->dy;
    room->delta = mixpi_carve(&c, h->group * h->t);
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

/* --- what may stand between scores and probabilities: a cap, a mask, dropout --- */

/* s = softcap * tanh(s / softcap), whole vectors. */
MIXPI_K void MIXPI_P(cap_scores)(float *s, int64_t n, float softcap) {
    mixpi_v by = mixpi_vset(1.0f / softcap), cap = mixpi_vset(softcap);
    int64_t j;
    for (j = 0; j < n; j += 16)
        mixpi_vstore(s + j,
                     mixpi_vmul(mixpi_vtanh(mixpi_vmul(mixpi_vload(s + j), by)), cap));
}

/* Of scores that are capped: how much of a gradient the cap lets through, 1 - (s / softcap)^2. */
MIXPI_K void MIXPI_P(cap_slopes)(float *slopes, const float *s, int64_t n, float softcap) {
    mixpi_v by = mixpi_vset(1.0f / softcap), one = mixpi_vset(1.0f);
    int64_t j;
    for (j = 0; j < n; j += 16) {
        mixpi_v part = mixpi_vmul(mixpi_vload(s + j), by);
        mixpi_vstore(slopes + j, mixpi_vfma(mixpi_vneg(part), part, one));
    }
}

/* s += a row of a mask, which begins at element `first`. The processor does not guess where the
 * next rows are, ld elements apart: the eighth is asked for now. */
MIXPI_V void MIXPI_P(add_mask)(float *s, mixp_in mask, int64_t first, int64_t ld,
                               int64_t n) {
    int64_t size = MIXPI_P(size)(mask.dtype), j;
    const char *at = (const char *)mask.data + first * size;
    uintptr_t ahead = (uintptr_t)at + (uintptr_t)(8 * ld * size);
    for (j = 0; j + 16 <= n; j += 16, at += 16 * size, ahead += (uintptr_t)(16 * size)) {
        MIXPI_PREFETCH((const char *)ahead);
        mixpi_vstore(s + j,
                     mixpi_vadd(mixpi_vload(s + j), mixpi_vget(mask.dtype, at)));
    }
    for (; j < n; j++) s[j] += MIXPI_P(read_one)(mask, first + j);
}

MIXPI_K void MIXPI_P(mask_scores)(const mixp_attention_args *k, const mixpi_heads *h,
                                  const mixpi_some_scores *at, float *s) {
    mixpi_head head = mixpi_head_at(&k->mask_at, h, at->head);
    /* plant: attention_mask_at */
    int64_t first = head.first + at->query * head.ld + at->key * k->mask_key, j;
    float   one;
    if (k->mask_key) {
        MIXPI_P(add_mask)(s, k->mask, first, head.ld, at->n);
        return;
    }
    one = MIXPI_P(read_one)(k->mask, first);
    for (j = 0; j < at->n; j++) s[j] += one;
}

/* Does the mask hide all of these scores, of so many queries? They need not be computed then. */
MIXPI_K int MIXPI_P(mask_hides)(const mixp_attention_args *k, const mixpi_heads *h,
                                mixpi_some_scores at, int64_t rows) {
    int64_t n = k->mask_key ? at.n : 1, first, i, j;
    mixpi_head head = mixpi_head_at(&k->mask_at, h, at.head);
    float   buf[MIXPI_BLOCK];
    if (!k->mask.data) return 0;
    first = head.first + at.query * head.ld + at.key * k->mask_key;
    for (i = 0; i < (head.ld ? rows : 1); i++) {
        const float *row = MIXPI_P(read)(k->mask, first + i * head.ld, n, buf);
        for (j = 0; j < n; j++)
            if (!(row[j] < MIXPI_LOWEST)) return 0;  /* plant: attention_hides */
    }
    return 1;
}

/* The random numbers of these probabilities. */
MIXPI_K void MIXPI_P(draw)(const mixpi_drops *drops, const mixpi_heads *h,
                           const mixpi_some_scores *at, uint32_t *random) {
    /* plant: attention_draw */
    uint64_t first = (uint64_t)((at->head * h->t + at->query) * h->keys + at->key);
    int64_t  j;
    for (j = 0; j < at->n; j += 16)
        mixpi_vrandom(drops->key, first + (uint64_t)j, random + j);
}

MIXPI_K void MIXPI_P(drop)(const mixpi_drops *drops, const uint32_t *random, int64_t n,
                           float *p) {
    int64_t j;
    for (j = 0; j < n; j++) p[j] = random[j] >= drops->limit ? p[j] * drops->scale : 0.0f;
}

/* Caps and masks, where that is wanted. */
MIXPI_K void MIXPI_P(bend_scores)(const mixp_attention_args *k, const mixpi_heads *h,
                                  const mixpi_some_scores *at, float *s) {
    if (k->softcap > 0.0f) MIXPI_P(cap_scores)(s, at->n, k->softcap);
    if (k->mask.data) MIXPI_P(mask_scores)(k, h, at, s);
}

/* --- forward --- */

/* A row of results, and lse, from its sums. A query that saw nothing has zeros where that may
 * happen. */
MIXPI_V float MIXPI_P(attention_end)(const mixp_attention_args *k, float *o, int64_t wide,
                                     float top, float sum) {
    if (sum <= 0.0f && (k->mask.data || k->lengths)) {  /* plant: attention_none */
        memset(o, 0, (size_t)wide * sizeof(float));
        return mixp_f32_of_bits(0x7F800000u);
    }
    MIXPI_P(scale_row)(o, wide, mixpi_vset(1.0f / sum));
    return top + logf(sum);
}

/* One row of scores becomes weights, and its sums follow. seen: keys from the block's first. */
MIXPI_V void MIXPI_P(attention_row)(const mixpi_attention_job *job,
                                    const mixpi_some_scores *at, int64_t seen, float *s,
                                    float *top, float *sum, float *o) {
    int64_t  n = (at->n + 15) / 16 * 16;
    uint32_t random[MIXPI_KEYS];
    MIXPI_P(bend_scores)(job->k, &job->heads, at, s);
    MIXPI_P(softmax_block)(s, n, seen, top, sum, o, job->heads.wide);
    if (!job->drops.limit) return;
    MIXPI_P(draw)(&job->drops, &job->heads, at, random);
    MIXPI_P(drop)(&job->drops, random, at->n, s);
}

/* Forward of up to MIXPI_QUERIES queries from q0 on, with columns and values in place. */
MIXPI_K void MIXPI_P(attention_queries)(const mixpi_attention_job *job,
                                        const mixpi_attention_room *room, int64_t head,
                                        int64_t q0) {
    const mixp_attention_args *k = job->k;
    const mixpi_heads *h = &job->heads;
    int64_t rows = mixpi_min(MIXPI_QUERIES, h->t - q0), wide = h->wide, k0, r;
    int64_t last = mixpi_keys_until(k, head, q0 + rows);
    float  *o = room->o, *scores = room->scores, *lse = k->lse + head * h->t + q0;
    float   top[MIXPI_QUERIES], sum[MIXPI_QUERIES];
    MIXPI_P(score_rows)
    (h, k->q, mixpi_head_at(&k->q_at, h, head), q0, rows, rows, room->q);
    memset(o, 0, (size_t)(rows * wide) * sizeof(float));
    for (r = 0; r < rows; r++) {
        top[r] = MIXPI_LOWEST;
        sum[r] = 0.0f;
    }
    for (k0 = 0; k0 < last; k0 += MIXPI_KEYS) {
        int64_t keys = mixpi_min(MIXPI_KEYS, last - k0), n = (keys + 15) / 16 * 16;
        /* plant: attention_reach */
        int64_t reach = k->causal ? q0 + k->past - k0 + 1 : keys;   /* keys row 0 may see  */
        mixpi_some_scores at;
        at.head = head;
        at.query = q0;
        at.key = k0;
        at.n = keys;
        if (MIXPI_P(mask_hides)(k, h, at, rows)) continue;
        MIXPI_P(scores)(h, rows, n, k->scale, room->q, room->columns + k0 * wide, scores);
        for (r = 0; r < rows; r++) {
            at.query = q0 + r;
            MIXPI_P(attention_row)(job, &at, mixpi_min(keys, reach + r),
                                   scores + r * MIXPI_KEYS, &top[r], &sum[r],
                                   o + r * wide);
        }
        MIXPI_P(add_by_queries)(h, rows, keys, scores, room->v + k0 * wide, o);
    }
    for (r = 0; r < rows; r++)
        lse[r] = MIXPI_P(attention_end)(k, o + r * wide, wide, top[r], sum[r]);
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
    int64_t last = mixpi_keys_until(k, head, mixpi_min(h->t, end * MIXPI_QUERIES));
    mixpi_head keys = mixpi_head_met(&k->k_at, h, head);
    mixpi_attention_room room;
    (void)mixpi_attention_carve(&room, h, mixpi_slice(&job->slices, worker));
    for (k0 = 0; k0 < last; k0 += MIXPI_KEYS) {
        int64_t rows = mixpi_min(MIXPI_KEYS, last - k0);
        MIXPI_P(score_rows)(h, k->k, keys, k0, rows, MIXPI_KEYS, room.rows);
        MIXPI_P(columns_of)(h, room.rows, room.columns + k0 * h->wide);
    }
    MIXPI_P(head_rows)(h, k->v, mixpi_head_met(&k->v_at, h, head), 0, last, last, room.v);
    for (i = first; i < end; i++)
        MIXPI_P(attention_queries)(job, &room, head, i * MIXPI_QUERIES);
}

/* --- backward --- */

/* delta[i] = dy[i] . y[i], the sum over keys of probability times its gradient. row: room for
 * one row of y. */
MIXPI_K void MIXPI_P(attention_deltas)(const mixpi_attention_grad_job *job, int64_t head,
                                       const float *dy, float *row, float *delta) {
    const mixpi_heads *h = &job->heads;
    mixp_out y = job->k->forward.y;
    int64_t  i, j;
    for (i = 0; i < h->t; i++, dy += h->wide) {
        mixpi_v sum = mixpi_vzero();
        MIXPI_P(head_rows)
        (h, mixpi_in(y.data, y.dtype), mixpi_head_merged(h, head), i, 1, 1, row);
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

/* The same where scores are capped, masked or dropped; p loses what was dropped in the end. */
MIXPI_K void MIXPI_P(bent_grads)(const mixpi_attention_grad_job *job,
                                 const mixpi_some_scores *at, int64_t seen, float *p,
                                 float *g, float lse, float delta) {
    const mixp_attention_args *k = &job->k->forward;
    int64_t  n = (at->n + 15) / 16 * 16, j;
    uint32_t random[MIXPI_KEYS];
    float    slopes[MIXPI_KEYS];
    if (k->softcap > 0.0f) {
        MIXPI_P(cap_scores)(p, at->n, k->softcap);
        /* plant: attention_slope */
        MIXPI_P(cap_slopes)(slopes, p, at->n, k->softcap);
    }
    if (k->mask.data) MIXPI_P(mask_scores)(k, &job->heads, at, p);
    if (job->drops.limit) {
        MIXPI_P(draw)(&job->drops, &job->heads, at, random);
        MIXPI_P(drop)(&job->drops, random, at->n, g);  /* plant: attention_drops_dy */
    }
    MIXPI_P(score_grads)(p, g, n, seen, lse, delta, k->scale);
    for (j = 0; k->softcap > 0.0f && j < seen; j++) g[j] *= slopes[j];
    if (job->drops.limit) MIXPI_P(drop)(&job->drops, random, at->n, p);
}

/* Probabilities of one block of scores, and the gradients of the scores. */
MIXPI_K void MIXPI_P(block_grads)(const mixpi_attention_grad_job *job,
                                  const mixpi_attention_grad_room *room,
                                  mixpi_some_scores at, int64_t rows, int64_t first) {
    const mixp_attention_args *k = &job->k->forward;
    int64_t n = (at.n + 15) / 16 * 16, t = job->heads.t, r;
    const float *lse = k->lse + at.head * t;
    const float *delta = room->delta + at.head % job->heads.group * t;
    int bends = mixpi_attention_bends(k);
    for (r = 0; r < rows; r++, at.query++) {
        float  *p = room->p + r * MIXPI_KEYS, *g = room->g + r * MIXPI_KEYS;
        int64_t seen = mixpi_min(at.n, first + r);
        if (bends)
            MIXPI_P(bent_grads)(job, &at, seen, p, g, lse[at.query], delta[at.query]);
        else
            MIXPI_P(score_grads)(p, g, n, seen, lse[at.query], delta[at.query], k->scale);
    }
}

/* One block of keys, from k0 on, meets one of queries, from q0 on: adds to dq, dk and dv. */
MIXPI_K void MIXPI_P(attention_meet)(const mixpi_attention_grad_job *job,
                                     const mixpi_attention_grad_room *room, int64_t head,
                                     int64_t k0, int64_t q0) {
    const mixp_attention_args *k = &job->k->forward;
    const mixpi_heads *h = &job->heads;
    int64_t rows = mixpi_min(MIXPI_QUERIES, h->t - q0);
    int64_t reach = mixpi_keys_until(k, head, q0 + rows) - k0, n, row;
    /* plant: attention_first */
    int64_t first = k->causal ? q0 + k->past - k0 + 1 : MIXPI_KEYS; /* keys row 0 may see  */
    const float *q, *dy;
    mixpi_some_scores at;
    reach = mixpi_min(reach, MIXPI_KEYS);
    if (reach <= 0) return;
    n = (reach + 15) / 16 * 16;
    row = (head % h->group * h->t + q0) * h->wide;
    q = room->q + row;
    dy = room->dy + row;
    at.head = head;
    at.query = q0;
    at.key = k0;
    at.n = reach;
    if (MIXPI_P(mask_hides)(k, h, at, rows)) return;
    MIXPI_P(scores)
    (h, rows, n, k->scale, room->score_q + row, room->k_columns, room->p);
    MIXPI_P(scores)(h, rows, n, 1.0f, room->score_dy + row, room->v_columns, room->g);
    MIXPI_P(block_grads)(job, room, at, rows, first);
    MIXPI_P(add_by_keys)(h, rows, reach, room->p, dy, room->dv);
    MIXPI_P(add_by_keys)(h, rows, reach, room->g, q, room->dk);
    MIXPI_P(add_by_queries)(h, rows, reach, room->g, room->k, room->dq + row);
}

/* Backward of one block of keys against all queries of the group whose first head is `head`. */
MIXPI_K void MIXPI_P(attention_keys)(const mixpi_attention_grad_job *job,
                                     const mixpi_attention_grad_room *room, int64_t head,
                                     int64_t k0) {
    const mixp_attention_args *k = &job->k->forward;
    const mixpi_heads *h = &job->heads;
    mixpi_head at_k = mixpi_head_met(&k->k_at, h, head);
    mixpi_head at_v = mixpi_head_met(&k->v_at, h, head);
    int64_t keys = mixpi_min(MIXPI_KEYS, h->keys - k0), g, q0;
    size_t  bytes = (size_t)(MIXPI_KEYS * h->wide) * sizeof(float);
    MIXPI_P(score_rows)(h, k->v, at_v, k0, keys, MIXPI_KEYS, room->k);
    MIXPI_P(columns_of)(h, room->k, room->v_columns);
    MIXPI_P(score_rows)(h, k->k, at_k, k0, keys, MIXPI_KEYS, room->k);
    MIXPI_P(columns_of)(h, room->k, room->k_columns);
    if (h->pairs) MIXPI_P(head_rows)(h, k->k, at_k, k0, keys, MIXPI_KEYS, room->k);
    memset(room->dk, 0, bytes);
    memset(room->dv, 0, bytes);
    for (g = 0; g < h->group; g++)
        for (q0 = mixpi_first_queries(k, k0); q0 < h->t; q0 += MIXPI_QUERIES)
            MIXPI_P(attention_meet)(job, room, head + g, k0, q0);
    if (job->k->dk.data) MIXPI_P(head_put)(h, job->k->dk, at_k, k0, keys, room->dk);
    if (job->k->dv.data) MIXPI_P(head_put)(h, job->k->dv, at_v, k0, keys, room->dv);
}

/* Queries and their gradients of one head, into its part of the group's rows. */
MIXPI_K void MIXPI_P(attention_load)(const mixpi_attention_grad_job *job,
                                     const mixpi_attention_grad_room *room,
                                     int64_t head) {
    const mixp_attention_args *k = &job->k->forward;
    const mixpi_heads *h = &job->heads;
    mixp_in dy = job->k->dy;
    mixpi_head at_q = mixpi_head_at(&k->q_at, h, head),
               at_y = mixpi_head_merged(h, head);
    int64_t g = head % h->group, row = g * h->t * h->wide;
    MIXPI_P(head_rows)(h, k->q, at_q, 0, h->t, h->t, room->q + row);
    MIXPI_P(head_rows)(h, dy, at_y, 0, h->t, h->t, room->dy + row);
    if (h->pairs) {
        MIXPI_P(score_rows)(h, k->q, at_q, 0, h->t, h->t, room->score_q + row);
        MIXPI_P(score_rows)(h, dy, at_y, 0, h->t, h->t, room->score_dy + row);
    }
    memset(room->dq + row, 0, (size_t)(h->t * h->wide) * sizeof(float));
    MIXPI_P(attention_deltas)
    (job, head, room->dy + row, room->k, room->delta + g * h->t);
}

/* One head of k and v, with all those of q that meet it. */
MIXPI_K void MIXPI_P(attention_grad_task)(void *arg, int64_t index, int worker) {
    const mixpi_attention_grad_job *job = (const mixpi_attention_grad_job *)arg;
    const mixp_attention_args *k = &job->k->forward;
    const mixpi_heads *h = &job->heads;
    mixpi_attention_grad_room room;
    int64_t head = index * h->group, g, k0;
    (void)mixpi_attention_grad_carve(&room, h, mixpi_slice(&job->slices, worker));
    for (g = 0; g < h->group; g++) MIXPI_P(attention_load)(job, &room, head + g);
    for (k0 = 0; k0 < h->keys; k0 += MIXPI_KEYS)
        MIXPI_P(attention_keys)(job, &room, head, k0);
    for (g = 0; job->k->dq.data && g < h->group; g++)
        MIXPI_P(head_put)(h, job->k->dq, mixpi_head_at(&k->q_at, h, head + g), 0, h->t,
                          room.dq + g * h->t * h->wide);
}

MIXPI_K mixp_result MIXPI_P(attention_run)(const mixp_exec *x,
                                           const mixp_attention_args *k, int pairs) {
    int64_t many = k->b * k->heads;
    mixpi_attention_job  job;
    mixpi_attention_room room;
    mixp_result r;
    if (mixpi_attention_empty(k)) return MIXP_OK;
    r = mixpi_attention_check(k);
    if (r != MIXP_OK) return r;
    job.k = k;
    job.heads = mixpi_heads_of(
        k, pairs && k->q.dtype == MIXP_BF16 && k->k.dtype == MIXP_BF16);
    job.drops = mixpi_drops_of(k);
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
    const mixp_attention_args *forward = &k->forward;
    mixpi_attention_grad_job  job;
    mixpi_attention_grad_room room;
    mixp_result r;
    if (mixpi_attention_empty(forward)) return MIXP_OK;
    r = mixpi_attention_check(forward);
    if (r != MIXP_OK) return r;
    if (!mixpi_reads(k->dy) || !mixpi_may_write(k->dq) || !mixpi_may_write(k->dk) ||
        !mixpi_may_write(k->dv)) return MIXP_ERR_DTYPE;
    job.k = k;
    pairs = pairs && forward->q.dtype == MIXP_BF16 && forward->k.dtype == MIXP_BF16 &&
            forward->v.dtype == MIXP_BF16 && k->dy.dtype == MIXP_BF16;
    job.heads = mixpi_heads_of(forward, pairs);
    job.drops = mixpi_drops_of(forward);
    return mixpi_run_sliced(x, forward->b * forward->kv_heads,
                            mixpi_attention_grad_carve(&room, &job.heads, NULL),
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
    int32_t updates, lost;      /* see mixp_lost                                        */
} mixpi_chunk;

typedef struct mixpi_chunk_job {
    const mixp_param_row  *rows;
    const mixp_step_plan  *plan;
    const mixp_step_state *step;
    mixpi_chunk *chunks;
    int64_t      count;         /* of chunks                                               */
    float        factor;
    int          write;
    int          counting;      /* 1: updates that are lost                             */
} mixpi_chunk_job;

/* A stretch of a row whose states are f32 for the time of its update: in place, or widened into
 * the buffers, which are 0 behind the last element. v NULL, m NULL: the row has none. */
typedef struct mixpi_stretch {
    const mixp_param_row *row;
    int64_t  first;             /* element, a multiple of MIXPI_BLOCK                      */
    int      n;
    uint64_t key;               /* of its random numbers                                   */
    float   *p, *m, *v;
    float    p_buffer[MIXPI_BLOCK], m_buffer[MIXPI_BLOCK], v_buffer[MIXPI_BLOCK];
    uint32_t random[MIXPI_BLOCK];
} mixpi_stretch;

/* How many of its elements lie in the block that begins at i. */
static size_t mixpi_stretch_block(const mixpi_stretch *s, int i)
{ return (size_t)mixpi_min(MIXP_STATE_BLOCK, s->n - i); }

static int mixpi_row_is_split(const mixp_param_row *row)
{ return row->master && row->master_dtype != MIXP_F32; }

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
            const mixpi_chunk fresh = { i, first, 0.0, -1, 0.0f, 0, 0, 0 };
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

/* What of n updates is lost. */
static void mixpi_count_lost(mixpi_chunk *c, mixp_dtype low, const float *was,
                             const float *now, int n) {
    int i;
    for (i = 0; i < n; i++) {
        if (mixp_bits_of_f32(was[i]) == mixp_bits_of_f32(now[i])) continue;
        c->updates++;
        c->lost += mixpi_update_is_lost(low, was[i], now[i]);
    }
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
    if (k->largest) mixp_scaler_note_scaled(k->scaler, *k->largest);
    mixp_scaler_advance_guarded(k->scaler, k->rule, k->guarded, k->forward);
    return MIXP_OK;
}

MIXPI_K mixp_result MIXPI_P(agree)(const mixp_exec *x, const mixp_agree_args *k) {
    double *row = k->table + (int64_t)k->rank * MIXP_AGREE_WORDS;
    size_t bytes = (size_t)k->size * MIXP_AGREE_WORDS * sizeof *row;
    (void)x;
    if (k->reads) {
        mixp_agree_read(k->table, k->size, k->step, k->scaler);
        return MIXP_OK;
    }
    memset(k->table, 0, bytes);
    mixp_agree_fill(row, k->plan, k->step, k->scaler);
    mixpi_agree_bad(row, k->looks, k->n_looks, k->first_leaf);
    if (k->forward && k->forward->nonfinite) row[MIXP_AGREE_FORWARD] = 1.0;
    return MIXP_OK;
}

/* mixpi_decay_of for 16 elements. */
MIXPI_V mixpi_v MIXPI_P(decay)(const mixp_step_scalars *u, int cautious, mixpi_v update,
                               mixpi_v p) {
    mixpi_v none = mixpi_vzero(), decay = mixpi_vset(u->decay);
    if (!cautious) return decay;
    return mixpi_vselect_gt(none, mixpi_vmul(update, p), none, decay);
}

/* 16 elements of mixp_adam_element, the same operations in the same order. form: one of the two
 * that are compiled by themselves, or what u says. */
enum { MIXPI_P(form_torch), MIXPI_P(form_apex), MIXPI_P(form_any) };
MIXPI_V mixpi_v MIXPI_P(adam)(const mixp_step_scalars *u, int form, mixpi_v g, mixpi_v p,
                              mixpi_v *m, mixpi_v *v) {
    const int any = form == MIXPI_P(form_any), cautious = any && u->cautious;
    const int apex = any ? u->order == MIXP_ADAM_ORDER_APEX : form == MIXPI_P(form_apex);
    mixpi_v ratio, decay, rate = mixpi_vset(-u->rate), eps = mixpi_vset(u->eps);
    g = mixpi_vfma(mixpi_vset(u->l2), p, mixpi_vmul(g, mixpi_vset(u->factor)));
    *m = mixpi_vfma(mixpi_vset(u->beta1), *m, mixpi_vmul(mixpi_vset(u->rest1), g));
    *v = mixpi_vfma(mixpi_vset(u->beta2), *v, mixpi_vmul(mixpi_vmul(mixpi_vset(u->rest2), g), g));
    if (apex) {
        ratio = mixpi_vadd(mixpi_vsqrt(mixpi_vmul(*v, mixpi_vset(u->scale_v))), eps);
        ratio = mixpi_vdiv(mixpi_vmul(*m, mixpi_vset(u->scale_m)), ratio);
        decay = MIXPI_P(decay)(u, cautious, ratio, p);
        return mixpi_vfma(rate, mixpi_vfma(decay, p, ratio), p);
    }
    ratio = mixpi_vdiv(*m, mixpi_vfma(mixpi_vsqrt(*v), mixpi_vset(u->scale_v), eps));
    p = mixpi_vfma(mixpi_vneg(MIXPI_P(decay)(u, cautious, ratio, p)), p, p);
    return mixpi_vfma(rate, ratio, p);
}

MIXPI_V void MIXPI_P(adam_block)(const mixp_step_scalars *u, int form, const float *g,
                                 float *p, float *m, float *v, int n) {
    mixpi_v a, b, w;
    int i;
    for (i = 0; i + 16 <= n; i += 16) {
        a = MIXPI_P(stream)(m + i); b = MIXPI_P(stream)(v + i);
        w = MIXPI_P(adam)(u, form, MIXPI_P(stream)(g + i), MIXPI_P(stream)(p + i), &a,
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

/* As mixp_rmsprop_element. */
MIXPI_V void MIXPI_P(rmsprop_block)(const mixp_step_scalars *u, const float *g, float *p,
                                    float *m, float *v, int n) {
    const mixpi_v beta = mixpi_vset(u->beta2), rest = mixpi_vset(u->rest2);
    const mixpi_v eps = mixpi_vset(u->eps);
    mixpi_v d, w, a;
    int i;
    for (i = 0; i + 16 <= n; i += 16) {
        w = mixpi_vload(p + i);
        d = mixpi_vmul(mixpi_vload(g + i), mixpi_vset(u->factor));
        d = mixpi_vfma(mixpi_vset(u->l2), w, d);
        a = mixpi_vmul(mixpi_vmul(rest, d), d);
        a = mixpi_vfma(beta, mixpi_vload(v + i), a);
        mixpi_vstore(v + i, a);
        d = mixpi_vdiv(d, mixpi_vadd(mixpi_vsqrt(a), eps));
        if (m) {
            d = mixpi_vfma(mixpi_vset(u->momentum), mixpi_vload(m + i), d);
            mixpi_vstore(m + i, d);
        }
        mixpi_vstore(p + i, mixpi_vfma(mixpi_vset(-u->rate), d, w));
    }
    for (; i < n; i++) mixp_rmsprop_element(u, g[i], p + i, m ? m + i : NULL, v + i);
}

/* As mixp_lion_element. */
MIXPI_V void MIXPI_P(lion_block)(const mixp_step_scalars *u, const float *g, float *p,
                                 float *m, int n) {
    const mixpi_v zero = mixpi_vzero(), one = mixpi_vset(1.0f), less = mixpi_vset(-1.0f);
    mixpi_v d, w, a, blend, sign;
    int i;
    for (i = 0; i + 16 <= n; i += 16) {
        w = mixpi_vload(p + i);
        a = mixpi_vload(m + i);
        d = mixpi_vmul(mixpi_vload(g + i), mixpi_vset(u->factor));
        blend = mixpi_vmul(mixpi_vset(u->rest1), d);
        blend = mixpi_vfma(mixpi_vset(u->beta1), a, blend);
        sign = mixpi_vselect_gt(zero, blend, less, blend);
        sign = mixpi_vselect_gt(blend, zero, one, sign);
        w = mixpi_vfma(mixpi_vneg(MIXPI_P(decay)(u, u->cautious, blend, w)), w, w);
        mixpi_vstore(p + i, mixpi_vfma(mixpi_vset(-u->rate), sign, w));
        d = mixpi_vmul(mixpi_vset(u->rest2), d);
        mixpi_vstore(m + i, mixpi_vfma(mixpi_vset(u->beta2), a, d));
    }
    for (; i < n; i++) mixp_lion_element(u, g[i], p + i, m + i);
}

/* --- states of fewer bytes, a stretch at a time. Loops over whole blocks of arrays that can
 * overlap nothing: a compiler makes vectors of them, from the functions for one element. */

MIXPI_V void MIXPI_P(m_blocks)(const mixpi_stretch *s, float *m) {
    const uint8_t *from = (const uint8_t *)s->row->m + s->first;
    const uint8_t *scales = s->row->m_scale + s->first / MIXP_STATE_BLOCK;
    int i, k;
    for (i = 0; i < s->n; i += MIXP_STATE_BLOCK) {
        const uint32_t scale = scales[i / MIXP_STATE_BLOCK];
        const mixpi_v unit = mixpi_vset(mixp_f32_of_bits(scale << 23));
        uint8_t code[MIXP_STATE_BLOCK] = { 0 };
        memcpy(code, from + i, mixpi_stretch_block(s, i));
        MIXPI_P(widen_run)(MIXP_F8_E4M3, m + i, code, MIXP_STATE_BLOCK);
        for (k = i; k < i + MIXP_STATE_BLOCK; k += 16)
            mixpi_vstore(m + k, mixpi_vmul(mixpi_vload(m + k), unit));
    }
}

MIXPI_V void MIXPI_P(v_blocks)(const mixpi_stretch *s, float *v) {
    const uint8_t *from = (const uint8_t *)s->row->v + s->first;
    const uint8_t *scales = s->row->v_scale + s->first / MIXP_STATE_BLOCK;
    int i, k;
    for (i = 0; i < s->n; i += MIXP_STATE_BLOCK) {
        const uint32_t scale = scales[i / MIXP_STATE_BLOCK];
        uint8_t code[MIXP_STATE_BLOCK] = { 0 };
        memcpy(code, from + i, mixpi_stretch_block(s, i));
        for (k = 0; k < MIXP_STATE_BLOCK; k++)
            v[i + k] = mixp_state_v_value(code[k], scale);
    }
}

/* The bits of a block's largest finite magnitude: see mixpi_state_size. */
MIXPI_V uint32_t MIXPI_P(block_largest)(const float *x) {
    const mixpi_v zero = mixpi_vzero(), inf = mixpi_vset(mixp_f32_of_bits(0x7F800000u));
    mixpi_v top = zero;
    int k;
    for (k = 0; k < MIXP_STATE_BLOCK; k += 16) {
        mixpi_v size = mixpi_vabs(mixpi_vload(x + k));
        top = mixpi_vmax(top, mixpi_vselect_gt(inf, size, size, zero));
    }
    return mixp_bits_of_f32(mixpi_vmaxof(top));
}

MIXPI_V void MIXPI_P(m_blocks_close)(const mixpi_stretch *s) {
    uint8_t *to = (uint8_t *)s->row->m + s->first, code[MIXP_STATE_BLOCK];
    uint8_t *scales = s->row->m_scale + s->first / MIXP_STATE_BLOCK;
    int i, k;
    for (i = 0; i < s->n; i += MIXP_STATE_BLOCK) {
        const float *m = s->m_buffer + i;
        const uint32_t *random = s->random + i;
        uint32_t scale = mixp_state_scale_m(MIXPI_P(block_largest)(m));
        for (k = 0; k < MIXP_STATE_BLOCK; k++)
            code[k] = (uint8_t)mixp_state_m(m[k], scale, mixpi_random_m(random[k]));
        memcpy(to + i, code, mixpi_stretch_block(s, i));
        scales[i / MIXP_STATE_BLOCK] = (uint8_t)scale;
    }
}

MIXPI_V void MIXPI_P(v_blocks_close)(const mixpi_stretch *s) {
    uint8_t *to = (uint8_t *)s->row->v + s->first, code[MIXP_STATE_BLOCK];
    uint8_t *scales = s->row->v_scale + s->first / MIXP_STATE_BLOCK;
    float root[MIXP_STATE_BLOCK];
    int i, k;
    for (i = 0; i < s->n; i += MIXP_STATE_BLOCK) {
        const uint32_t *random = s->random + i;
        uint32_t scale;
        for (k = 0; k < MIXP_STATE_BLOCK; k += 16)
            mixpi_vstore(root + k, mixpi_vsqrt(mixpi_vload(s->v_buffer + i + k)));
        scale = mixp_state_scale_v(MIXPI_P(block_largest)(root));
        for (k = 0; k < MIXP_STATE_BLOCK; k++)
            code[k] = (uint8_t)mixp_state_v(root[k], scale, mixpi_random_v(random[k]));
        memcpy(to + i, code, mixpi_stretch_block(s, i));
        scales[i / MIXP_STATE_BLOCK] = (uint8_t)scale;
    }
}

/* shift: of the random bits in their word. */
MIXPI_V void MIXPI_P(bf16_close)(const mixpi_stretch *s, void *state, const float *x,
                                 int shift) {
    uint16_t *to = (uint16_t *)state + s->first, code[MIXP_STATE_BLOCK];
    int i, k;
    for (i = 0; i < s->n; i += MIXP_STATE_BLOCK) {
        for (k = 0; k < MIXP_STATE_BLOCK; k++) {
            uint32_t random = s->random[i + k] >> shift & 0xFFFFu;
            code[k] = (uint16_t)mixp_state_bf16(x[i + k], random);
        }
        memcpy(to + i, code, mixpi_stretch_block(s, i) * sizeof code[0]);
    }
}

MIXPI_V void MIXPI_P(split_16)(const mixpi_stretch *s, float *p) {
    const uint16_t *weight = (const uint16_t *)s->row->weight + s->first;
    const uint16_t *beside = (const uint16_t *)s->row->master + s->first;
    int i, k;
    for (i = 0; i < s->n; i += MIXP_STATE_BLOCK) {
        uint16_t high[MIXP_STATE_BLOCK] = { 0 };
        uint16_t rest[MIXP_STATE_BLOCK] = { 0 };
        memcpy(high, weight + i, mixpi_stretch_block(s, i) * sizeof high[0]);
        memcpy(rest, beside + i, mixpi_stretch_block(s, i) * sizeof rest[0]);
        for (k = 0; k < MIXP_STATE_BLOCK; k++)
            p[i + k] = mixp_master_from_16(high[k], rest[k]);
    }
}
MIXPI_V void MIXPI_P(split_8)(const mixpi_stretch *s, float *p) {
    const uint16_t *weight = (const uint16_t *)s->row->weight + s->first;
    const uint8_t *beside = (const uint8_t *)s->row->master + s->first;
    int i, k;
    for (i = 0; i < s->n; i += MIXP_STATE_BLOCK) {
        uint16_t high[MIXP_STATE_BLOCK] = { 0 };
        uint8_t rest[MIXP_STATE_BLOCK] = { 0 };
        memcpy(high, weight + i, mixpi_stretch_block(s, i) * sizeof high[0]);
        memcpy(rest, beside + i, mixpi_stretch_block(s, i) * sizeof rest[0]);
        for (k = 0; k < MIXP_STATE_BLOCK; k++)
            p[i + k] = mixp_master_from_8(high[k], rest[k]);
    }
}

MIXPI_V void MIXPI_P(split_16_close)(const mixpi_stretch *s) {
    uint16_t *weight = (uint16_t *)s->row->weight + s->first;
    uint16_t *beside = (uint16_t *)s->row->master + s->first;
    uint16_t high[MIXP_STATE_BLOCK], rest[MIXP_STATE_BLOCK];
    int i, k;
    for (i = 0; i < s->n; i += MIXP_STATE_BLOCK) {
        for (k = 0; k < MIXP_STATE_BLOCK; k++) {
            mixp_master_parts parts = mixp_master_to_16(s->p_buffer[i + k]);
            high[k] = (uint16_t)parts.weight;
            rest[k] = (uint16_t)parts.rest;
        }
        memcpy(weight + i, high, mixpi_stretch_block(s, i) * sizeof high[0]);
        memcpy(beside + i, rest, mixpi_stretch_block(s, i) * sizeof rest[0]);
    }
}
MIXPI_V void MIXPI_P(split_8_close)(const mixpi_stretch *s) {
    uint16_t *weight = (uint16_t *)s->row->weight + s->first, high[MIXP_STATE_BLOCK];
    uint8_t *beside = (uint8_t *)s->row->master + s->first, rest[MIXP_STATE_BLOCK];
    int i, k;
    for (i = 0; i < s->n; i += MIXP_STATE_BLOCK) {
        for (k = 0; k < MIXP_STATE_BLOCK; k++) {
            uint32_t random = mixpi_random_master(s->random[i + k]);
            mixp_master_parts parts = mixp_master_to_8(s->p_buffer[i + k], random);
            high[k] = (uint16_t)parts.weight;
            rest[k] = (uint8_t)parts.rest;
        }
        memcpy(weight + i, high, mixpi_stretch_block(s, i) * sizeof high[0]);
        memcpy(beside + i, rest, mixpi_stretch_block(s, i));
    }
}

/* One moment as f32. */
MIXPI_V float *MIXPI_P(moment)(const mixpi_stretch *s, void *state, mixp_dtype dtype,
                               float *buffer) {
    if (!state) return NULL;
    if (dtype == MIXP_F32) return (float *)state + s->first;
    memset(buffer + s->n, 0, (size_t)(MIXPI_BLOCK - s->n) * sizeof *buffer);
    if (dtype == MIXP_F8_E4M3) MIXPI_P(m_blocks)(s, buffer);
    else if (dtype == MIXP_U8) MIXPI_P(v_blocks)(s, buffer);
    else MIXPI_P(widen_run)(dtype, buffer, (const uint16_t *)state + s->first, s->n);
    return buffer;
}

/* n elements of a row from `first` on. */
MIXPI_V void MIXPI_P(stretch_open)(mixpi_stretch *s, int64_t first, int n) {
    const mixp_param_row *row = s->row;
    const mixp_out weight = mixpi_out_to(row->weight, row->weight_dtype, 0);
    s->first = first;
    s->n = n;
    s->m = MIXPI_P(moment)(s, row->m, row->m_dtype, s->m_buffer);
    s->v = MIXPI_P(moment)(s, row->v, row->v_dtype, s->v_buffer);
    s->p = row->master ? (float *)row->master + first
                       : MIXPI_P(place)(weight, first, s->p_buffer);
    if (!row->master) (void)MIXPI_P(held)(weight, first, n, s->p_buffer);
    if (!mixpi_row_is_split(row)) return;
    s->p = s->p_buffer;
    memset(s->p + n, 0, (size_t)(MIXPI_BLOCK - n) * sizeof *s->p);
    if (row->master_dtype == MIXP_BF16) MIXPI_P(split_16)(s, s->p);
    else MIXPI_P(split_8)(s, s->p);
}

/* Does the row round at random? */
MIXPI_V int MIXPI_P(is_random)(const mixp_param_row *row) {
    return row->m_dtype != MIXP_F32 || row->v_dtype != MIXP_F32 ||
           row->master_dtype == MIXP_U8;
}

MIXPI_V void MIXPI_P(stretch_close)(mixpi_stretch *s) {
    const mixp_param_row *row = s->row;
    const mixp_out weight = mixpi_out_to(row->weight, row->weight_dtype, 0);
    int i;
    if (MIXPI_P(is_random)(row))
        for (i = 0; i < s->n; i += 16)
            mixpi_vrandom(s->key, (uint64_t)(s->first + i), s->random + i);
    if (row->m_dtype == MIXP_F8_E4M3) MIXPI_P(m_blocks_close)(s);
    if (row->m_dtype == MIXP_BF16) MIXPI_P(bf16_close)(s, row->m, s->m, 0);
    if (row->v_dtype == MIXP_U8) MIXPI_P(v_blocks_close)(s);
    if (row->v_dtype == MIXP_BF16) MIXPI_P(bf16_close)(s, row->v, s->v, 16);
    if (!mixpi_row_is_split(row)) MIXPI_P(placed)(weight, s->first, s->n, s->p);
    else if (row->master_dtype == MIXP_BF16) MIXPI_P(split_16_close)(s);
    else MIXPI_P(split_8_close)(s);
}

MIXPI_V void MIXPI_P(muon_block)(const mixpi_stretch *s, mixp_optimizer_kind kind,
                                 const mixp_step_scalars *u, const float *g) {
    float *p = s->p, *m = s->m;
    int i;
    if (kind == MIXP_OPTIMIZER_MUON)
        for (i = 0; i < s->n; i++) mixp_muon_element(u, s->row->rate, g[i], p + i);
    else if (kind == MIXP_OPTIMIZER_MUON_UNIT)
        for (i = 0; i < s->n; i++) p[i] = g[i] * u->factor;
    else
        for (i = 0; i < s->n; i++) mixp_muon_momentum_element(u, g[i], p + i, m + i);
}

MIXPI_V void MIXPI_P(stretch_update)(const mixpi_stretch *s, mixp_optimizer_kind kind,
                                     const mixp_step_scalars *u, const float *g) {
    const int apex = u->order == MIXP_ADAM_ORDER_APEX, n = s->n;
    float *p = s->p, *m = s->m, *v = s->v;
    if (kind >= MIXP_OPTIMIZER_MUON) MIXPI_P(muon_block)(s, kind, u, g);
    else if (kind == MIXP_OPTIMIZER_SGD) MIXPI_P(sgd_block)(u, g, p, m, n);
    else if (kind == MIXP_OPTIMIZER_RMSPROP) MIXPI_P(rmsprop_block)(u, g, p, m, v, n);
    else if (kind == MIXP_OPTIMIZER_LION) MIXPI_P(lion_block)(u, g, p, m, n);
    else if (u->cautious) MIXPI_P(adam_block)(u, MIXPI_P(form_any), g, p, m, v, n);
    else if (apex) MIXPI_P(adam_block)(u, MIXPI_P(form_apex), g, p, m, v, n);
    else MIXPI_P(adam_block)(u, MIXPI_P(form_torch), g, p, m, v, n);
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
    int64_t i = job->chunks[index].first, end = mixpi_min(i + MIXPI_CHUNK, row->count);
    float gbuf[MIXPI_BLOCK], was[MIXPI_BLOCK];
    mixpi_stretch s;
    mixp_step_scalars late;
    const mixp_step_scalars *u = &job->step->update[row->group];
    (void)worker;
    if (job->step->skip) { mixpi_clear_grad(row, i, end - i); return; }
    if (row->missed && *row->missed) {
        mixp_step_scalars_of(job->plan, job->step, row->group,
                             job->step->applied - *row->missed, &late);
        u = &late;
    }
    s.row = row;
    s.key = mixp_state_key(job->plan->seed, job->step->applied, row->tensor);
    for (; i < end; i += MIXPI_BLOCK) {
        int n = (int)mixpi_min(MIXPI_BLOCK, end - i);
        const float *g = MIXPI_P(read)(grad, i, n, gbuf);
        if (g == gbuf) MIXPI_P(ask)(grad, i + n, n);    /* f32 comes by `stream` */
        MIXPI_P(stretch_open)(&s, i, n);
        if (job->counting) memcpy(was, s.p, (size_t)n * sizeof *was);
        MIXPI_P(stretch_update)(&s, job->plan->kind, u, g);
        if (job->counting)
            mixpi_count_lost(&job->chunks[index], mixpi_row_low_weight(row), was, s.p, n);
        MIXPI_P(stretch_close)(&s);
        if (row->low_f16)
            MIXPI_P(put_low)(MIXP_F16, row->low_f16, row->count, i, n, s.p);
        if (row->low_bf16)
            MIXPI_P(put_low)(MIXP_BF16, row->low_bf16, row->count, i, n, s.p);
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
    job.counting = k->lost != NULL;
    r = mixpi_each_chunk(x, &job, k->rows, k->count, MIXPI_P(update_chunk));
    if (r != MIXP_OK || k->step->skip) return r;
    for (i = 0; k->lost && i < job.count; i++) {
        k->lost[job.chunks[i].row].updates += job.chunks[i].updates;
        k->lost[job.chunks[i].row].lost += job.chunks[i].lost;
    }
    for (i = 0; i < k->count; i++)
        if (!k->rows[i].active && k->rows[i].missed) ++*k->rows[i].missed;  /* plant: missed */
    return MIXP_OK;
}

/* --- look -------------------------------------------------------------------------------- */

#if MIXPI_PASS == 0
#define MIXPI_LOOK_LANES 16
#define MIXPI_EXPONENTS  MIXP_EXPONENTS

/* What one piece of an array holds: how many magnitudes lie below each limit. */
typedef struct mixpi_look_piece {
    int32_t top, nonfinite, zeros, flushed, least, subnormal, past;
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
    to->saturated += p->past;
}
#endif

/* The common case: whole lanes, and nothing but zeros and numbers that are finite and normal in the
 * low format. 0: it is not that, and nothing was noted. */
MIXPI_K int MIXPI_P(look_plain)(mixpi_look_piece *p, const float *x, int n,
                                const mixpi_look_limits *at) {
    uint32_t a[MIXPI_LOOK_LANES], top[MIXPI_LOOK_LANES], low[MIXPI_LOOK_LANES];
    int32_t zeros[MIXPI_LOOK_LANES], all = 0;
    uint32_t largest = 0, smallest = 0xFFFFFFFFu;
    int i, j;
    if (n % MIXPI_LOOK_LANES) return 0;
    memset(top, 0, sizeof top);
    memset(low, 0xFF, sizeof low);
    memset(zeros, 0, sizeof zeros);
    for (i = 0; i < n; i += MIXPI_LOOK_LANES) {
        memcpy(a, x + i, sizeof a);
        for (j = 0; j < MIXPI_LOOK_LANES; j++) {
            uint32_t v = a[j] & 0x7FFFFFFFu, below = v - 1u;    /* of 0: the largest there is */
            top[j] = v > top[j] ? v : top[j];
            low[j] = below < low[j] ? below : low[j];
            zeros[j] += v == 0;
        }
    }
    for (j = 0; j < MIXPI_LOOK_LANES; j++) {
        largest = top[j] > largest ? top[j] : largest;
        smallest = low[j] < smallest ? low[j] : smallest;
        all += zeros[j];
    }
    if (largest >= at->past || smallest < at->subnormal) return 0;
    if ((int32_t)largest > p->top) p->top = (int32_t)largest;
    p->zeros += all;
    p->flushed += all;          /* counts are of all below a limit */
    p->least += all;
    p->subnormal += all;
    return 1;
}

/* 16 magnitudes at a time, as integers: fast-math, FTZ and DAZ cannot change them. */
MIXPI_K void MIXPI_P(look_block)(mixpi_look_piece *p, const float *x, int n,
                                 const mixpi_look_limits *at) {
    const int32_t inf = 0x7F800000, flushed = (int32_t)at->flushed;
    const int32_t least = (int32_t)at->least, subnormal = (int32_t)at->subnormal;
    const int32_t past = (int32_t)at->past;
    int32_t a[MIXPI_LOOK_LANES], found[7][MIXPI_LOOK_LANES];
    int i, j;
    memset(found, 0, sizeof found);
    for (i = 0; i < n; i += MIXPI_LOOK_LANES) {
        int m = n - i < MIXPI_LOOK_LANES ? n - i : MIXPI_LOOK_LANES;
        /* Lanes beyond the end are NaN, which only `nonfinite` counts. */
        if (m < MIXPI_LOOK_LANES) memset(a, 0xFF, sizeof a);
        memcpy(a, x + i, (size_t)m * sizeof *a);
        for (j = 0; j < MIXPI_LOOK_LANES; j++) {
            int32_t v = a[j] & 0x7FFFFFFF, finite = v < inf ? v : 0;
            found[0][j] = finite > found[0][j] ? finite : found[0][j];
            found[1][j] += v >= inf;
            found[2][j] += v == 0;
            found[3][j] += v <= flushed;  /* plant: look_flushed */
            found[4][j] += v < least;
            found[5][j] += v < subnormal;
            found[6][j] += finite >= past;  /* plant: look_past */
        }
    }
    for (j = 0; j < MIXPI_LOOK_LANES; j++) {
        if (found[0][j] > p->top) p->top = found[0][j];
        p->nonfinite += found[1][j];
        p->zeros += found[2][j];
        p->flushed += found[3][j];
        p->least += found[4][j];
        p->subnormal += found[5][j];
        p->past += found[6][j];
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
        if (!MIXPI_P(look_plain)(p, x, n, &job->at)) MIXPI_P(look_block)(p, x, n, &job->at);
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
    MIXPI_P(advance), MIXPI_P(look_at), MIXPI_P(agree),                                   \
    MIXPI_P(where), MIXPI_P(where_backward), MIXPI_P(max), MIXPI_P(max_backward),         \
    MIXPI_P(gather), MIXPI_P(gather_backward), MIXPI_P(rope), MIXPI_P(add_norm)           \
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
          NULL, NULL, NULL, NULL, NULL, NULL, NULL }

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
    size_t  used;               /* handed out by an arena                                  */
    int     from_device;        /* 0: the record and the memory are one                    */
} mixpi_piece;

/* Memory that is handed out upwards and taken back all at once. The pieces stay, in the order they
 * were made, and a request goes to the first with room for it: so the same requests find the same
 * places again, and a loop which repeats itself allocates nothing after its first round. */
typedef struct mixpi_arena {
    mixpi_piece *first;
    size_t       used;          /* bytes handed out and not given back since the last reset */
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
typedef struct mixpi_exchange mixpi_exchange;
typedef mixp_tensor *(*mixpi_tensor_fn)(mixp_context *ctx, void *user);

/* What the looks of a sampled step find: device memory. Rows of sites come behind these two. */
enum {
    MIXPI_ROW_BACKWARD,         /* all gradients met so far, of activations and of leaves */
    MIXPI_ROW_FORWARD,          /* all that sites stored */
    MIXPI_ROW_WEIGHT,           /* of a weight that is under suspicion */
    MIXPI_ROW_SITES
};

typedef struct mixpi_happening mixpi_happening;     /* an event, as WATCH keeps it */

enum {                          /* the rows of one site */
    MIXPI_LOOK_VALUE,           /* what it stored */
    MIXPI_LOOK_GRAD,            /* its gradient */
    MIXPI_LOOK_LEAF,            /* the gradients of leaves that it wrote */
    MIXPI_LOOK_DATA,            /* the batch: inputs that no site and no parameter gave */
    MIXPI_LOOKS
};

enum {
    MIXPI_SITE_NAME = 96, MIXPI_SITE_FROM = 4, MIXPI_SITE_STATES = 4, MIXPI_MAX_PINS = 64,
    MIXPI_MAX_EVENTS = 1024
};

/* What a guard knows of one site. TAPE finds it, AUTOCAST reads what it is to store, WATCH
 * decides. */
typedef struct mixpi_site {
    uint64_t     hash;          /* of operator, scope and what it reads; 0: not used yet */
    uint64_t     tensors;       /* which ones it read when it was applied last */
    uint64_t     pass;          /* that was in */
    int          next;          /* number of another site in the same bucket; 0 = none */
    int          from[MIXPI_SITE_FROM]; /* numbers of the sites that it reads */
    int          turn;          /* which application of its step it was, when sampled last */
    int          stores;        /* 1: it has memory of its own, of real numbers */
    int          scalar;        /* 1: its result is one element */
    int          casts;         /* 1: autocast casts what it reads */
    int          changed;       /* samples begun when its state changed: older ones do not count */
    mixp_dtype   dtype, low;    /* what it stored, and would store; low MIXP_F32: f32 anyway */
    mixp_dtype   around;        /* the region's low dtype, for the look */
    int32_t      fallen;        /* 1: it stores f32, 2: and reads f32 too */
    int32_t      falls, clean;
    int32_t      for_grad;      /* 1: it fell back for a gradient too large */
    int          pinned;        /* 0; 1: to f32; 2: to low */
    int          pin_told;      /* 1: an event has said so */
    int64_t      samples;
    mixp_tensor *read[2];       /* permanent tensors that it reads */
    mixp_look    value, grad;
    const char  *op;
    char         name[MIXPI_SITE_NAME];
} mixpi_site;

typedef struct mixpi_pin {
    char       pattern[MIXPI_SITE_NAME];
    mixp_dtype dtype;
    int        fits;            /* 1: a site of this name was met */
} mixpi_pin;

/* What a context knows of its sites, from mixp_guard_start on. Sites are numbered from 1. */
typedef struct mixpi_watch {
    int         on;             /* 0: stopped */
    int         sampled;        /* 1: this step is a sampled one */
    int         begun;          /* samples so far */
    int         fresh;          /* number of the sample that rows hold unread; 0 = none */
    int         posted;         /* of the one that is on its way to the host; 0 = none */
    int         looked;         /* 1: a sample was settled since the update */
    int         settled;        /* 1: one ever was */
    int         acted;          /* 1: a site fell back since the last skip */
    void       *comparing;      /* mixp_compare's, while it runs: nothing is sampled then */
    int         turns;          /* sites that this step has stored to */
    int32_t     force;          /* 1: the next step is to be a sampled one */
    int32_t     since;          /* steps since the last sampled one */
    int32_t     barren;         /* skips in a row that began forward and nothing was done about */
    int         every, clean, patience, capacity, n_sites, n_buckets;
    float       high, low_again, flushed;
    uint64_t    rows_step;      /* that the rows are of, and those on their way */
    uint64_t    posted_step, event_step, updated_step;
    size_t      posted_bytes;   /* of them, that are on their way */
    mixp_look  *rows, *seen;    /* device memory; the host's copy */
    mixp_look  *row;            /* device memory, of mixp_look_at; made at its first use */
    double     *shared;         /* what all ranks have seen, each in its row of a table */
    int64_t     shared_words;   /* of a row, that there is room for */
    mixpi_site *sites;
    int        *buckets;
    uint64_t    pass;           /* goes up with each step and each walk back */
    mixpi_pin  *pins;
    int         n_pins;
    int         full, full_told;/* 1: a site found no room; and an event has said so */
    int origin, found;  /* of the newest skip; of what was found since the update */
    int         origin_site, found_site;
    const void *posted_scaler;  /* whose state is on its way */
    int64_t    *hashes;         /* for checkpoints: of sites, and their states */
    int32_t    *states;
    mixpi_happening *events;
    int64_t     n_events;
    mixp_result (*settle)(mixp_context *ctx);   /* WATCH's, called when a step begins */
    mixp_result (*updated)(mixp_context *ctx, void *scaler);        /* and by a scaler's update */
    void      (*tap)(mixp_context *ctx, int site, const mixp_tensor *t, int backward);
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
    size_t       allocated;     /* bytes of all pieces of device memory                    */
    mixpi_piece *pieces;        /* permanent memory                                        */
    mixpi_piece *scratch;       /* what exec.scratch hands out                             */
    mixpi_arena  host, dev;
    mixp_tensor *tensors;       /* permanent tensors, newest first                         */
    mixpi_casting *casting;     /* the state of AUTOCAST, made at its first use             */
    mixpi_watch   *watch;       /* NULL: no guard was ever started */
    struct mixpi_pool *pool;    /* MIXPREC_THREADS: made by the first parallel loop */
    /* tape */
    mixpi_tape_entry *tape;     /* newest first                                            */
    mixp_graph    *graphs;
    mixp_ranks_desc  ranks;     /* size 0: none were given                                  */
    mixpi_exchange *exchange;  /* of gradients over them, made at its first use            */
    uint64_t       replays;     /* of steps that move a loss scale: the device did so alone */
    uint64_t       replayed;    /* the step count after the newest replay */
    uint64_t       sites_moved; /* goes up when a site changes the dtype that it stores */
    int            capturing;
    int            scale_moved; /* since the newest mixp_capture_begin                      */
    const void    *tally_of;    /* the optimizer whose counts are on their way to the host  */
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
    p->used = 0;
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
    if (on_device) ctx->allocated += bytes;
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

/* A new piece for `bytes`: a quarter of all before it, so that little of the last lies unused. */
static mixpi_piece *mixpi_arena_grow(mixp_context *ctx, mixpi_arena *a, size_t bytes) {
    size_t total = 0, least = (size_t)1 << 16, most = (size_t)1 << 30;
    mixpi_piece **at = &a->first;
    for (; *at; at = &(*at)->next) total += (*at)->size;
    total /= 4;
    if (total < least) total = least;
    if (total > most) total = most;
    *at = mixpi_piece_new(ctx, bytes > total ? bytes : total, a->on_device);
    return *at;
}

/* A buffer that was given back: of just that size, or part of a larger one; NULL: there is none. */
static void *mixpi_arena_again(mixpi_arena *a, size_t bytes) {
    mixpi_free **at = &a->free, **larger = NULL;
    void *data;
    for (; *at && (*at)->size != bytes; at = &(*at)->next)
        if ((*at)->size > bytes && !larger) larger = at;
    if (!*at) at = larger;
    if (!at) return NULL;
    data = (*at)->data;
    (*at)->data = (char *)data + bytes;
    (*at)->size -= bytes;
    if ((*at)->size == 0) *at = (*at)->next;  /* plant: arena_again */
    return data;
}

/* A place in the first piece that has room; NULL with the error set. */
static void *mixpi_arena_place(mixp_context *ctx, mixpi_arena *a, size_t bytes) {
    mixpi_piece *p = a->first;
    void *data;
    while (p && p->size - p->used < bytes) p = p->next;
    if (!p) p = mixpi_arena_grow(ctx, a, bytes);
    if (!p) return NULL;
    data = (char *)p->data + p->used;
    p->used += bytes;
    MIXPI_ASSERT((uintptr_t)data % 64 == 0 || ctx->device->allocate);
    MIXPI_ASSERT(p->used <= p->size);
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
    if (!p) p = mixpi_arena_place(ctx, a, bytes);
    if (!p) return NULL;
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

/* Gives a buffer back within the step, for the next requests that it has room for. */
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
    mixpi_piece *p;
    for (p = a->first; p; p = p->next) p->used = 0;
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

/* --- threads ----------------------------------------------------------------------------- */

#if defined(MIXPREC_THREADS)
#  if !defined(__GNUC__)
#    error "MIXPREC_THREADS needs gcc or clang, and POSIX threads: leave it out"
#  endif
#  include <pthread.h>
#  include <unistd.h>

/* A context's own threads, started by its first parallel loop. A loop is a round: the caller opens
 * the gate, workers pass it and take tasks, the caller takes tasks too, closes the gate and waits
 * for those who are inside. Whoever has not come by then is not waited for, so that a worker
 * without a core delays nobody. Waiting is a short spin and then sleep, so that it takes no core
 * from others: what a busy machine's other programs need most.
 *
 * The gate is one word: the round, whether it is open, and how many workers are inside. */
#define MIXPI_GATE_OPEN  ((uint64_t)1 << 16)
#define MIXPI_GATE_ROUND ((uint64_t)1 << 17)
#define MIXPI_GATE_INSIDE(gate) ((gate) & (MIXPI_GATE_OPEN - 1))
enum { MIXPI_SPINS = 1000, MIXPI_WORKERS_MOST = 1024 };     /* spins: some 20 to 50 us */

typedef struct mixpi_pool mixpi_pool;

typedef struct mixpi_worker {
    mixpi_pool *pool;
    pthread_t   thread;
    int         number;         /* 1, 2, ...: 0 is the caller                               */
} mixpi_worker;

struct mixpi_pool {
    pthread_mutex_t lock;
    pthread_cond_t  wake, left;
    uint64_t  gate;
    int64_t   next, tasks;      /* of the round                                            */
    mixp_task task;
    void     *arg;
    int       asleep;           /* workers that wait for `wake`                            */
    int       quit;
    int       started;          /* workers that run                                        */
    pid_t     owner;            /* threads do not follow a process through fork            */
    mixpi_worker worker[1];     /* as many as there are workers                            */
};

static void mixpi_pause(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

static uint64_t mixpi_gate(mixpi_pool *p) {
    return __atomic_load_n(&p->gate, __ATOMIC_SEQ_CST);
}

static void mixpi_take_tasks(mixpi_pool *p, int worker) {
    int64_t i;
    while ((i = __atomic_fetch_add(&p->next, 1, __ATOMIC_RELAXED)) < p->tasks)
        p->task(p->arg, i, worker);
}

/* Passes the gate when it is open for another round than *seen: 1, and *seen is that round. */
static int mixpi_gate_pass(mixpi_pool *p, uint64_t *seen) {
    uint64_t gate = mixpi_gate(p);
    while (gate & MIXPI_GATE_OPEN && gate / MIXPI_GATE_ROUND != *seen) {
        if (!__atomic_compare_exchange_n(&p->gate, &gate, gate + 1, 0, __ATOMIC_SEQ_CST,
                                         __ATOMIC_SEQ_CST))
            continue;           /* and gate is what it is now */
        *seen = gate / MIXPI_GATE_ROUND;
        return 1;
    }
    return 0;
}

/* The last one to leave a closed gate says so: the caller may be asleep. */
static void mixpi_gate_leave(mixpi_pool *p) {
    uint64_t gate = __atomic_sub_fetch(&p->gate, 1, __ATOMIC_SEQ_CST);
    if (gate & MIXPI_GATE_OPEN || MIXPI_GATE_INSIDE(gate) > 0) return;
    pthread_mutex_lock(&p->lock);
    pthread_cond_signal(&p->left);
    pthread_mutex_unlock(&p->lock);
}

/* 1: a round was entered; 0: the pool ends. Who sleeps has said so before it looks once more, and
 * the caller opens the gate before it asks who sleeps: one of both sees the other. */
static int mixpi_pool_await(mixpi_pool *p, uint64_t *seen) {
    int i, entered;
    for (i = 0; i < MIXPI_SPINS; i++) {
        if (mixpi_gate_pass(p, seen)) return 1;
        mixpi_pause();
    }
    pthread_mutex_lock(&p->lock);
    __atomic_add_fetch(&p->asleep, 1, __ATOMIC_SEQ_CST);
    while (!(entered = mixpi_gate_pass(p, seen)) && !p->quit)
        pthread_cond_wait(&p->wake, &p->lock);
    __atomic_sub_fetch(&p->asleep, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&p->lock);
    return entered;
}

static void *mixpi_pool_worker(void *arg) {
    mixpi_worker *self = (mixpi_worker *)arg;
    uint64_t seen = 0;
    while (mixpi_pool_await(self->pool, &seen)) {
        mixpi_take_tasks(self->pool, self->number);
        mixpi_gate_leave(self->pool);
    }
    return NULL;
}

/* With fewer threads than asked for, when the system gives no more, there is the same work. */
static void mixpi_pool_start(mixpi_pool *p, int workers) {
    memset(p, 0, sizeof *p);
    p->gate = MIXPI_GATE_ROUND;
    p->owner = getpid();
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->wake, NULL);
    pthread_cond_init(&p->left, NULL);
    while (p->started < workers) {
        mixpi_worker *w = &p->worker[p->started];
        w->pool = p;
        w->number = p->started + 1;
        if (pthread_create(&w->thread, NULL, mixpi_pool_worker, w) != 0) return;
        p->started++;
    }
}

static void mixpi_pool_open(mixpi_pool *p) {
    uint64_t round = mixpi_gate(p) / MIXPI_GATE_ROUND + 1;
    __atomic_store_n(&p->gate, round * MIXPI_GATE_ROUND | MIXPI_GATE_OPEN, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&p->asleep, __ATOMIC_SEQ_CST) == 0) return;
    pthread_mutex_lock(&p->lock);
    pthread_cond_broadcast(&p->wake);
    pthread_mutex_unlock(&p->lock);
}

static void mixpi_pool_close(mixpi_pool *p) {
    uint64_t gate = __atomic_and_fetch(&p->gate, ~MIXPI_GATE_OPEN, __ATOMIC_SEQ_CST);
    int i;
    for (i = 0; i < MIXPI_SPINS && MIXPI_GATE_INSIDE(gate) > 0; i++) {
        mixpi_pause();
        gate = mixpi_gate(p);
    }
    if (MIXPI_GATE_INSIDE(gate) == 0) return;
    pthread_mutex_lock(&p->lock);
    while (MIXPI_GATE_INSIDE(mixpi_gate(p)) > 0) pthread_cond_wait(&p->left, &p->lock);
    pthread_mutex_unlock(&p->lock);
}

static void mixpi_pool_stop(mixpi_pool *p) {
    int i;
    if (!p || p->owner != getpid()) return;
    pthread_mutex_lock(&p->lock);
    p->quit = 1;
    pthread_cond_broadcast(&p->wake);
    pthread_mutex_unlock(&p->lock);
    for (i = 0; i < p->started; i++) pthread_join(p->worker[i].thread, NULL);
    pthread_cond_destroy(&p->left);
    pthread_cond_destroy(&p->wake);
    pthread_mutex_destroy(&p->lock);
}

/* The context's pool, which a child of fork starts anew; NULL: no memory for it. */
static mixpi_pool *mixpi_context_pool(mixp_context *ctx) {
    int workers = ctx->exec.threads - 1;
    mixpi_pool *p = ctx->pool;
    if (p && p->owner == getpid()) return p;
    if (!p)
        p = (mixpi_pool *)mixpi_host_take(ctx, sizeof *p +
                                                   (size_t)workers * sizeof p->worker[0]);
    if (p) mixpi_pool_start(p, workers);
    ctx->pool = p;
    return p;
}

static void mixpi_context_parallel(void *user, int64_t tasks, mixp_task task, void *arg) {
    mixpi_pool *p = mixpi_context_pool((mixp_context *)user);
    int64_t i;
    if (!p) {
        for (i = 0; i < tasks; i++) task(arg, i, 0);
        return;
    }
    p->task = task;
    p->arg = arg;
    p->tasks = tasks;
    p->next = 0;
    mixpi_pool_open(p);
    mixpi_take_tasks(p, 0);
    mixpi_pool_close(p);
}

static int mixpi_threads_there(void) {
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n < 1 ? 1 : (int)mixpi_min(n, MIXPI_WORKERS_MOST);
}

#elif defined(_OPENMP)
#  include <omp.h>
static void mixpi_context_parallel(void *user, int64_t tasks, mixp_task task, void *arg) {
    int threads = ((mixp_context *)user)->exec.threads;
    int64_t i;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (i = 0; i < tasks; i++) task(arg, i, omp_get_thread_num());
}

static int mixpi_threads_there(void) { return omp_get_max_threads(); }
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

/* --- ranks ----------------------------------------------------------------------------- */

/* How many parts of a batch a step takes at once. */
static uint64_t mixpi_world(const mixp_context *ctx)
{ return ctx->ranks.size ? (uint64_t)ctx->ranks.size : 1u; }

/* The key of this step's random numbers: each rank has those of its part of the batch. */
static uint64_t mixpi_random_step(const mixp_context *ctx) {
    return ctx->step + 1u + (uint64_t)ctx->ranks.rank - mixpi_world(ctx);
}

/* Are the optimizers' states spread over ranks? */
static int mixpi_is_sharded(const mixp_context *ctx)
{ return ctx->ranks.shard && ctx->ranks.size > 1; }

/* What is wrong with a description; NULL: nothing. */
static const char *mixpi_ranks_wrong(const mixp_ranks_desc *k) {
    if (!k) return NULL;
    if (k->size < 1) return "ranks: size is below 1; it counts this process too";
    if (k->rank < 0 || k->rank >= k->size)
        return "ranks: rank must lie in [0, size): has the world shrunk?";
    if (k->size > 1 && !k->sum) return "ranks: sum is missing, without which none can agree";
    if (!k->grad_ready != !k->grad_wait)
        return "ranks: grad_ready and grad_wait: give both or neither";
    if (!mixpi_f64_is_finite(k->seconds) || k->seconds < 0.0)
        return "ranks: seconds must be finite and at least 0";
    if (k->bucket_bytes < 0) return "ranks: bucket_bytes is negative";
    if (k->parts < 0) return "ranks: parts is negative";
    if ((unsigned)k->mean > MIXP_MEAN_NONE) return "ranks: mean is none of mixp_ranks_mean";
    if (k->shard && k->size > 1 && !k->all_gather)
        return "ranks: shard needs all_gather, by which weights go to the other ranks";
    return NULL;
}

static void mixpi_ranks_take(mixp_context *ctx, const mixp_ranks_desc *given) {
    mixp_ranks_desc *k = &ctx->ranks;
    if (!given) return;
    *k = *given;
    if (!(k->seconds > 0.0)) k->seconds = 60.0;
    if (!k->bucket_bytes) k->bucket_bytes = (int64_t)25 << 20;
    if (!k->parts) k->parts = k->size;
}

/* The others need not wait for a rank that has failed. Returns r. */
static mixp_result mixpi_ranks_stop(mixp_context *ctx, mixp_result r) {
    const mixp_ranks_desc *k = ctx ? &ctx->ranks : NULL;
    if (r != MIXP_OK && k && k->size > 1 && k->stop) k->stop(k->user, ctx->message);
    return r;
}

/* What a hook returned: NULL, or why it failed. */
static mixp_result mixpi_ranks_heard(mixp_context *ctx, const char *what,
                                     const char *why) {
    if (!why) return MIXP_OK;
    mixp_context_fail(ctx, MIXP_ERR_RANKS, "%s, rank %d of %d: %s", what, ctx->ranks.rank,
                      ctx->ranks.size, why);
    return mixpi_ranks_stop(ctx, MIXP_ERR_RANKS);
}

/* Does nothing in a world of one. */
static mixp_result mixpi_ranks_run(mixp_context *ctx, const char *what,
                                   mixp_ranks_hook hook, mixp_out data, int64_t count) {
    const mixp_ranks_desc *k = &ctx->ranks;
    if (k->size < 2) return MIXP_OK;
    if (!hook) return mixpi_ranks_heard(ctx, what, "mixp_ranks_desc lacks this hook");
    return mixpi_ranks_heard(ctx, what,
                             hook(k->user, data.data, count, data.dtype,
                                  ctx->exec.stream, k->seconds));
}

MIXPREC_API mixp_result mixp_ranks_sum(mixp_tensor *t) {
    if (!t) return MIXP_ERR_ARGUMENT;
    t->version++;
    return mixpi_ranks_run(t->ctx, "mixp_ranks_sum", t->ctx->ranks.sum,
                           mixpi_out_to(t->data, t->dtype, 0), t->count);
}

MIXPREC_API mixp_result mixp_ranks_max(mixp_tensor *t) {
    if (!t) return MIXP_ERR_ARGUMENT;
    t->version++;
    return mixpi_ranks_run(t->ctx, "mixp_ranks_max", t->ctx->ranks.max,
                           mixpi_out_to(t->data, t->dtype, 0), t->count);
}

/* What each rank has to say, `words` doubles of it: table has a row for each, in host memory, this
 * one's filled and zeros elsewhere; afterwards all. Waits for the device. */
static mixp_result mixpi_ranks_share(mixp_context *ctx, double *table, int64_t words) {
    int64_t n = (int64_t)mixpi_world(ctx) * words;
    size_t bytes = (size_t)n * sizeof *table;
    int apart = ctx->device->upload != NULL;
    void *shared = apart ? mixpi_context_scratch(ctx, bytes) : table;
    mixp_result r = MIXP_OK;
    if (!shared) return MIXP_ERR_MEMORY;
    if (apart) r = mixpi_upload(ctx, shared, table, bytes);
    if (r == MIXP_OK)
        r = mixpi_ranks_run(ctx, "the sum of a table", ctx->ranks.sum,
                            mixpi_out_to(shared, MIXP_F64, 0), n);
    if (r == MIXP_OK && apart) r = mixpi_download(ctx, table, shared, bytes);
    return r;
}

/* --- context --------------------------------------------------------------------------- */

/* What is wrong with a description; NULL: nothing. */
static const char *mixpi_desc_wrong(const mixp_context_desc *d) {
    const mixp_allocator *device = &d->device_allocator;
    if (!d->allocate != !d->release) return "allocate and release: give both or neither";
    if (!device->allocate != !device->release)
        return "device_allocator: give both of its functions or neither";
    if (d->threads < 0) return "threads is negative; 0 means as many as there are";
    return mixpi_ranks_wrong(d->ranks);
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
    x->threads = 1;             /* without threads nothing here could use more */
#if defined(MIXPREC_THREADS) || defined(_OPENMP)
    x->threads = d->threads ? d->threads : mixpi_threads_there();
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
    mixpi_ranks_take(ctx, d->ranks);
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
    uint64_t      sites_moved;  /* the context's when it was recorded */
};

MIXPREC_API void mixp_context_free(mixp_context *ctx) {
    mixp_graph *g;
    if (!ctx) return;
    if (ctx->device->wait) ctx->device->wait(&ctx->exec);
    for (g = ctx->graphs; g; g = g->next) ctx->device->graph_free(&ctx->exec, g->handle);
#ifdef MIXPREC_THREADS
    mixpi_pool_stop(ctx->pool);
    if (ctx->pool) mixpi_host_put(ctx, ctx->pool);
#endif
    mixpi_piece_free(ctx, ctx->host.first);
    mixpi_piece_free(ctx, ctx->dev.first);
    mixpi_piece_free(ctx, ctx->scratch);
    mixpi_piece_free(ctx, ctx->pieces);
    if (ctx->device->detach) ctx->device->detach(&ctx->exec);
    mixpi_host_put(ctx, ctx);
}

MIXPREC_API mixp_result mixp_capture_begin(mixp_context *ctx) {
    mixp_result r;
    if (!ctx) return MIXP_ERR_ARGUMENT;
    if (!ctx->device->capture_begin)
        return mixp_context_fail(ctx, MIXP_ERR_DEVICE,
                                 "mixp_capture_begin: %s has no graphs; run the step "
                                 "each time",
                                 ctx->device->name);
    ctx->capture_step = ctx->step;
    ctx->scale_moved = 0;
    r = mixpi_noted(ctx, "mixp_capture_begin", ctx->device->capture_begin(&ctx->exec));
    ctx->capturing = r == MIXP_OK;
    return r;
}

MIXPREC_API mixp_graph *mixp_capture_end(mixp_context *ctx) {
    void *handle = NULL;
    mixp_result r = MIXP_ERR_DEVICE;
    mixp_graph *g = ctx ? (mixp_graph *)mixpi_host_alloc(ctx, sizeof *g) : NULL;
    if (ctx) ctx->capturing = 0;
    if (ctx && ctx->device->capture_end)
        r = ctx->device->capture_end(&ctx->exec, &handle);
    if (!g && handle) ctx->device->graph_free(&ctx->exec, handle);
    if (!g || mixpi_noted(ctx, "mixp_capture_end", r) != MIXP_OK) return NULL;
    g->ctx = ctx;
    g->next = ctx->graphs;
    g->handle = handle;
    g->step = ctx->step;
    g->moves_scale = ctx->scale_moved;
    g->sites_moved = ctx->sites_moved;
    ctx->step = ctx->capture_step;      /* recorded, not run: the replays count */
    ctx->graphs = g;
    ctx->replays += g->moves_scale != 0;
    return g;
}

MIXPREC_API mixp_result mixp_replay(mixp_graph *graph) {
    mixp_context *ctx = graph ? graph->ctx : NULL;
    if (!ctx) return MIXP_ERR_ARGUMENT;
    ctx->replays += graph->moves_scale != 0;
    ctx->step += mixpi_world(ctx);
    ctx->replayed = ctx->step;
    if (ctx->watch) ctx->watch->since++;
    return mixpi_noted(
        ctx, "mixp_replay",
        ctx->device->replay(&ctx->exec, graph->handle, ctx->step - graph->step));
}

MIXPREC_API int mixp_graph_stale(const mixp_graph *graph)
{ return graph && graph->sites_moved != graph->ctx->sites_moved; }

MIXPREC_API mixp_memory mixp_context_memory(const mixp_context *ctx) {
    mixp_memory m = { 0, 0, 0, 0 };
    if (!ctx) return m;
    m.used = ctx->permanent + ctx->dev.used;
    m.peak = ctx->peak;
    m.allocations = ctx->allocations;
    m.allocated = ctx->allocated;
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

static size_t mixpi_rows_bytes(int sites)
{ return (MIXPI_ROW_SITES + (size_t)sites * MIXPI_LOOKS) * sizeof(mixp_look); }

static int mixpi_guard_on(const mixp_context *ctx) { return ctx->watch && ctx->watch->on; }

/* Is this step a sampled one? Set by mixp_step_begin; never without a guard. */
static int mixpi_context_sampled(const mixp_context *ctx)
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

MIXPREC_API mixp_result mixp_tensor_set_disposable(mixp_tensor *t, int on) {
    if (!t) return MIXP_ERR_ARGUMENT;
    if (!t->own.generation)
        return mixp_context_fail(t->ctx, MIXP_ERR_ARGUMENT,
                                 "mixp_tensor_set_disposable '%s': only an activation can be; "
                                 "this lives as long as its context",
                                 t->name);
    t->own.disposable = on != 0;
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
#define MIXPI_SCOPE_ROOM    201

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
    int               scope;    /* how much of the scopes' text names it */
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
    char            scope[MIXPI_SCOPE_ROOM];    /* "h.3.mlp": names of scopes, joined */
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

/* The names of the open scopes; *length: of what counts of them. */
static const char *mixpi_scope_now(const mixp_context *ctx, int *length) {
    const mixpi_region *region = mixpi_region_now(ctx);
    *length = region ? region->scope : 0;
    return region ? ctx->casting->scope : "";
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
        (void)mixpi_scope_now(ctx, &region->scope);
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

/* A region that changes nothing but the names of what is applied in it. */
static mixp_result mixpi_scope_open(mixp_context *ctx, const char *name,
                                    mixpi_region_kind kind) {
    mixp_result r = mixpi_region_open(ctx, mixp_autocast_current(ctx), kind, 0);
    mixpi_casting *c = ctx->casting;
    mixpi_region *region;
    int n;
    if (r != MIXP_OK) return r;
    region = &c->regions[c->n_regions - 1];
    n = region->scope;
    if (!*name) return MIXP_OK;
    snprintf(c->scope + n, sizeof c->scope - (size_t)n, n ? ".%s" : "%s", name);
    region->scope = (int)strlen(c->scope);
    return MIXP_OK;
}

MIXPREC_API int mixp_scope_enter(mixp_context *ctx, const char *name) {
    if (ctx) mixpi_scope_open(ctx, name ? name : "", MIXPI_REGION_IN_BLOCK);
    return 1;
}
MIXPREC_API int mixp_scope_leave(mixp_context *ctx) { return mixp_autocast_leave(ctx); }

MIXPREC_API mixp_result mixp_scope_push(mixp_context *ctx, const char *name) {
    mixp_result r;
    if (!ctx || !name || !*name)
        return mixp_context_fail(ctx, MIXP_ERR_ARGUMENT,
                                 "mixp_scope_push: the name is %s; give one, say \"h.3\"",
                                 name ? "empty" : "NULL");
    r = mixpi_scope_open(ctx, name, MIXPI_REGION_PUSHED);
    if (r == MIXP_ERR_ARGUMENT) ctx->casting->n_regions--;
    return r;
}
MIXPREC_API mixp_result mixp_scope_pop(mixp_context *ctx) {
    const mixpi_region *region = mixpi_region_now(ctx);
    if (region && region->kind == MIXPI_REGION_PUSHED) return mixp_autocast_pop(ctx);
    return !ctx ? MIXP_ERR_ARGUMENT
                : mixp_context_fail(ctx, MIXP_ERR_ORDER,
                                    "mixp_scope_pop: no scope is open that "
                                    "mixp_scope_push opened");
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
                                         "f32_out", "promote", "banned", "low_out" };
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
    if (cls == MIXP_CLASS_LOW || cls == MIXP_CLASS_LOW_OUT) return region.dtype;
    return cls == MIXP_CLASS_F32 || cls == MIXP_CLASS_F32_OUT ? MIXP_F32 : natural;
}

/* What t would be without a guard. */
static mixp_dtype mixpi_plain_dtype(const mixp_tensor *t)
{ return t->own.raised != MIXP_F32 ? t->own.raised : t->dtype; }

/* f16 with bf16 gives f32: neither holds the other's values. Of what inputs would be without a
 * guard: that of a call with it is mixpi_guarded_dtype's. */
static mixp_dtype mixpi_widest(int n, mixp_tensor *const *t) {
    mixp_dtype d = MIXP_DTYPE_COUNT;
    int i;
    for (i = 0; i < n; i++) {
        mixp_dtype one = t[i] ? mixpi_plain_dtype(t[i]) : MIXP_F32;
        if (!t[i] || !mixpi_real(one)) continue;
        /* plant: widest */
        d = d == MIXP_DTYPE_COUNT || d == one ? one : MIXP_F32;
    }
    return d == MIXP_DTYPE_COUNT ? MIXP_F32 : d;
}

static int mixpi_is_low(mixp_dtype dtype)
{ return dtype == MIXP_F16 || dtype == MIXP_BF16; }

/* Does text[0..n) fit the pattern? * stands for any characters, ? for one. */
static int mixpi_pattern_fits(const char *pattern, const char *text, size_t n) {
    const char *star = NULL;
    size_t at = 0, retry = 0;
    while (at < n) {
        if (*pattern == '*') {
            star = pattern++;
            retry = at;
        } else if (*pattern == '?' || *pattern == text[at]) {
            pattern++;
            at++;
        } else if (star) {      /* let the newest star stand for one more */
            pattern = star + 1;
            at = ++retry;
        } else return 0;
    }
    while (*pattern == '*') pattern++;
    return !*pattern;
}

static int mixpi_pin_fits(const mixpi_pin *pin, const char *name) {
    const char *end = strstr(name, ": ");
    if (mixpi_pattern_fits(pin->pattern, name, strlen(name))) return 1;
    return end && mixpi_pattern_fits(pin->pattern, name, (size_t)(end - name));
}

/* What the newest pattern that fits makes of a site. */
static void mixpi_site_pin(mixpi_watch *w, mixpi_site *site) {
    int i, was = site->pinned;
    site->pinned = 0;
    for (i = 0; i < w->n_pins; i++) {
        mixp_dtype to = w->pins[i].dtype;
        if (!mixpi_pin_fits(&w->pins[i], site->name)) continue;
        w->pins[i].fits = 1;
        site->pinned = to == MIXP_F32 ? 1 : to == MIXP_DTYPE_COUNT ? 0 : 2;
    }
    if (site->pinned != was) site->pin_told = 0;
}

/* Does the site's own state make it store f32? */
static int mixpi_site_holds_f32(const mixpi_site *site) {
    if (!site || site->pinned == 2) return 0;
    return site->pinned == 1 || site->fallen;  /* plant: guard_pin */
}

/* Does a result follow its inputs into f32? Those that only pass values on or add them do. */
static int mixpi_site_carries(const mixpi_site *site, mixp_op_class cls, int n,
                              mixp_tensor *const *in) {
    int i, raised = 0;
    for (i = 0; i < n; i++) raised |= in[i] && in[i]->own.raised != MIXP_F32;
    if (site && site->pinned == 2) return 0;
    return raised && (cls == MIXP_CLASS_KEEP || cls == MIXP_CLASS_PROMOTE);
}

/* What a result is stored in, of which autocast says `plain`. */
static mixp_dtype mixpi_guarded_dtype(const mixpi_site *site, mixp_op_class cls, int n,
                                      mixp_tensor *const *in, mixp_dtype plain) {
    if (!mixpi_is_low(plain)) return plain;
    if (mixpi_site_holds_f32(site)) return MIXP_F32;
    return mixpi_site_carries(site, cls, n, in) ? MIXP_F32 : plain;  /* plant: guard_carry */
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
    int               site;     /* its number; 0: nobody watches */
    int               told;     /* gradients that the operator behind it has made: bit i */
};

static mixpi_tape_entry *mixpi_entry(mixp_call *c) {
    return (mixpi_tape_entry *)(void *)c;
}
/* The one recorded before c, or NULL. */
static mixpi_tape_entry *mixpi_entry_before(const mixp_call *c)
{ return ((const mixpi_tape_entry *)(const void *)c)->older; }

/* A step begins: what earlier ones found is settled, and whether this one is sampled. */
static mixp_result mixpi_watch_begin(mixp_context *ctx) {
    mixpi_watch *w = ctx->watch;
    mixp_result r;
    if (!w) return MIXP_OK;
    w->sampled = 0;
    w->pass++;
    if (!w->on || ctx->capturing || w->comparing) return MIXP_OK;
    r = w->settle(ctx);
    if (r != MIXP_OK) return r;
    w->since++;
    w->sampled = w->force || w->since >= w->every;  /* plant: guard_every */
    if (!w->sampled) return MIXP_OK;
    w->since = w->turns = 0;
    w->fresh = ++w->begun;
    w->rows_step = ctx->step + mixpi_world(ctx);
    return mixpi_device_zero(ctx, w->rows, mixpi_rows_bytes(w->capacity));
}

MIXPREC_API mixp_result mixp_step_begin(mixp_context *ctx) {
    mixp_result r, watched;
    if (!ctx) return MIXP_ERR_ARGUMENT;
    r = mixpi_regions_check(ctx);
    watched = mixpi_watch_begin(ctx);
    if (r == MIXP_OK) r = watched;
    mixpi_arena_reset(&ctx->host); mixpi_arena_reset(&ctx->dev);
    ctx->tape = NULL; ctx->calls_made = 0;
    ctx->generation++; ctx->step += mixpi_world(ctx);
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
static int mixpi_is_cast(const mixp_op *op);
static int mixpi_cast_site(mixp_context *ctx, mixp_tensor *x, int visit);

/* --- sites ----------------------------------------------------------------------------- *
 *
 * A site is known by a hash of its operator, the scope it is in, and what it reads: a parameter's
 * id, the hash of the site that made an activation, 0 for data. Several on the same tensors (three
 * slices of one qkv) are told apart by their order. On other tensors it is another pass through the
 * same site. Casts are seen through, for a fallback adds and removes them.
 */
static uint64_t mixpi_mix(uint64_t h, uint64_t x) {
    h = (h ^ x) * 0x9E3779B97F4A7C15u;
    return h ^ (h >> 29);
}

static uint64_t mixpi_mix_text(uint64_t h, const char *text, size_t n) {
    size_t i;
    for (i = 0; i < n; i++) h = (h ^ (unsigned char)text[i]) * 0x100000001B3u;     /* FNV-1a */
    return h;
}

static mixpi_site *mixpi_site_at(const mixp_context *ctx, int number)
{ return number ? &ctx->watch->sites[number - 1] : NULL; }

/* A permanent tensor, seen through its low copy; NULL: it is of this step. */
static mixp_tensor *mixpi_lasting(mixp_tensor *t) {
    if (t && t->own.master) t = t->own.master;
    return t && !t->own.generation ? t : NULL;
}

static uint64_t mixpi_identity(const mixp_context *ctx, mixp_tensor *t) {
    const mixp_tensor *lasting = mixpi_lasting(t);
    if (!t) return 1;
    if (lasting) return mixpi_mix(2, (uint64_t)lasting->own.id);
    return t->own.site ? mixpi_site_at(ctx, t->own.site)->hash : 0;  /* plant: site_inputs */
}

/* An application, as far as its site depends on it. */
typedef struct mixpi_visit {
    const mixp_op *op;
    int            n_in;
    mixp_tensor  **in;
    uint64_t       hash, tensors;   /* of the kind of site; of the tensors themselves */
    int            lasting;     /* 1: all of them are permanent: their addresses say nothing */
} mixpi_visit;

static mixpi_visit mixpi_visit_of(const mixp_context *ctx, const mixp_op *op, int n_in,
                                  mixp_tensor **in) {
    mixpi_visit v = { op, n_in, in, 0, 0, 1 };
    int i, length;
    const char *scope = mixpi_scope_now(ctx, &length);
    v.hash = mixpi_mix_text(0xCBF29CE484222325u, op->name, strlen(op->name));
    v.hash = mixpi_mix_text(mixpi_mix(v.hash, 3), scope, (size_t)length);
    for (i = 0; i < n_in; i++) {
        v.hash = mixpi_mix(v.hash, mixpi_identity(ctx, in[i]));
        v.tensors = mixpi_mix(v.tensors, (uint64_t)(uintptr_t)in[i]);
        if (in[i] && !mixpi_lasting(in[i])) v.lasting = 0;
    }
    return v;
}

static int mixpi_site_find(const mixpi_watch *w, uint64_t hash) {
    int n = w->buckets[hash & (uint64_t)(w->n_buckets - 1)];
    while (n && w->sites[n - 1].hash != hash) n = w->sites[n - 1].next;
    return n;
}

/* The number of the site that is visited, 0: a new one; *hash: its own. */
static int mixpi_site_visited(const mixpi_watch *w, const mixpi_visit *v, uint64_t *hash) {
    uint64_t sibling;
    int n;
    for (sibling = 0;; sibling++) {
        const mixpi_site *site;
        *hash = mixpi_mix(v->hash, sibling) | 1u;
        n = mixpi_site_find(w, *hash);
        if (!n) return 0;
        site = &w->sites[n - 1];
        if (site->pass != w->pass) return n;
        /* plant: site_sibling */
        if (site->tensors != v->tensors && !v->lasting) return n;
    }
}

/* The parameter that names a site: the first that has a name. */
static const char *mixpi_visit_param(const mixpi_visit *v) {
    int i;
    for (i = 0; i < v->n_in; i++) {
        const mixp_tensor *t = mixpi_lasting(v->in[i]);
        if (t && t->requires_grad && *t->name) return t->name;
    }
    return "";
}

/* "h.3.w": before the colon; into text of MIXPI_SITE_NAME characters. */
static void mixpi_site_stem(const mixp_context *ctx, const mixpi_visit *v, int from,
                            char *text) {
    int length;
    const char *scope = mixpi_scope_now(ctx, &length), *param = mixpi_visit_param(v);
    const char *producer = from ? mixpi_site_at(ctx, from)->name : "", *colon;
    int room = length > 40 ? 40 : length;
    *text = '\0';
    if (*param && length && strncmp(param, scope, (size_t)length) != 0)
        snprintf(text, MIXPI_SITE_NAME, "%.*s.%.40s", room, scope, param);
    else if (*param) snprintf(text, MIXPI_SITE_NAME, "%.60s", param);
    else if (length) snprintf(text, MIXPI_SITE_NAME, "%.*s", room, scope);
    else if ((colon = strstr(producer, ": ")) != NULL)
        snprintf(text, MIXPI_SITE_NAME, "%.*s", (int)(colon - producer), producer);
}

/* Gives a new site its name, unlike all others. */
static void mixpi_site_name(const mixp_context *ctx, const mixpi_visit *v, int number) {
    mixpi_site *site = mixpi_site_at(ctx, number);
    char stem[MIXPI_SITE_NAME], name[MIXPI_SITE_NAME];
    int i, same = 0;
    size_t n;
    mixpi_site_stem(ctx, v, site->from[0], stem);
    snprintf(name, sizeof name, *stem ? "%.64s: %.20s" : "%s%.20s", stem, v->op->name);
    n = strlen(name);
    for (i = 1; i <= ctx->watch->n_sites; i++) {
        const char *other = mixpi_site_at(ctx, i)->name;
        same += strncmp(other, name, n) == 0 && (!other[n] || other[n] == ' ');
    }
    snprintf(site->name, sizeof site->name, same ? "%.86s #%d" : "%.86s", name, same + 1);
}

/* What a site reads: the sites behind its inputs, and its weights. */
static void mixpi_site_reads(mixpi_site *site, const mixpi_visit *v) {
    int i, from = 0, read = 0;
    for (i = 0; i < v->n_in; i++) {
        mixp_tensor *t = v->in[i], *lasting = mixpi_lasting(t);
        if (lasting && read < 2) site->read[read++] = lasting;
        if (t && t->own.site && from < MIXPI_SITE_FROM) site->from[from++] = t->own.site;
    }
}

/* A site that was not met before; 0: there is no room for it. */
static int mixpi_site_new(mixp_context *ctx, uint64_t hash) {
    mixpi_watch *w = ctx->watch;
    int *bucket = &w->buckets[hash & (uint64_t)(w->n_buckets - 1)];
    mixpi_site *site;
    if (w->n_sites >= w->capacity) {
        w->full = 1;
        return 0;
    }
    site = &w->sites[w->n_sites++];
    site->hash = hash;
    site->next = *bucket;
    *bucket = w->n_sites;
    return w->n_sites;
}

/* The site of a visit, entered in the table, with its name and its pin. */
static int mixpi_site_of(mixp_context *ctx, const mixpi_visit *v) {
    mixpi_site *site;
    uint64_t hash;
    int number = mixpi_site_visited(ctx->watch, v, &hash);
    if (!number) number = mixpi_site_new(ctx, hash);
    if (!number) return 0;
    site = mixpi_site_at(ctx, number);
    if (site->op) return number;
    site->op = v->op->name;         /* met for the first time, or since a checkpoint was loaded */
    mixpi_site_reads(site, v);
    mixpi_site_name(ctx, v, number);
    mixpi_site_pin(ctx->watch, site);
    return number;
}

/* The site of an application, 0 without a guard; from here on this pass has been there. */
static int mixpi_site_enter(mixp_context *ctx, const mixp_op *op, int n_in,
                            mixp_tensor **in) {
    mixpi_visit v;
    mixpi_site *site;
    int number;
    if (!mixpi_guard_on(ctx)) return 0;
    v = mixpi_visit_of(ctx, op, n_in, in);
    number = mixpi_site_of(ctx, &v);
    if (!number) return 0;
    site = mixpi_site_at(ctx, number);
    site->tensors = v.tensors;
    site->pass = ctx->watch->pass;
    return number;
}

/* --- looks ----------------------------------------------------------------------------- */

/* Row `which` of a site, in device memory. */
static mixp_look *mixpi_look_row(const mixpi_watch *w, int number, int which)
{ return &w->rows[MIXPI_ROW_SITES + (number - 1) * MIXPI_LOOKS + which]; }

/* The dtype whose range counts for a site: where it stores f32 anyway, that of its region. */
static mixp_dtype mixpi_look_low(const mixpi_site *site) {
    if (site->low != MIXP_F32) return site->low;
    return mixpi_is_low(site->around) ? site->around : MIXP_F16;
}

/* Looks at t for a row of a site, and for a row of all of them unless total is NULL. */
static mixp_result mixpi_look(mixp_context *ctx, int number, int which, const mixp_tensor *t,
                              mixp_look *total) {
    mixp_look_args k;
    memset(&k, 0, sizeof k);
    k.n = t->count;
    k.x = mixpi_tensor_in(t);
    k.low = mixpi_look_low(mixpi_site_at(ctx, number));
    k.row = mixpi_look_row(ctx->watch, number, which);
    k.total = total;
    return mixpi_noted(ctx, "look", ctx->device->kernels->look(&ctx->exec, &k));
}

/* Is t the batch: neither a parameter nor made by a site? */
static int mixpi_is_data(const mixp_tensor *t) {
    if (!t || !mixpi_real(t->dtype) || t->requires_grad || t->own.master) return 0;
    return t->own.generation ? !t->own.site && !t->own.from_tape : !t->own.is_param;
}

/* Behind an operator: what its site stored, as `t`, which is a cast's input where that was left
 * out; and in a sampled step what it holds. */
static mixp_result mixpi_site_stored(mixp_context *ctx, int number, const mixp_tensor *t,
                                     mixp_dtype low) {
    mixpi_site *site = mixpi_site_at(ctx, number);
    mixpi_watch *w = ctx->watch;
    site->stores = 1;
    site->scalar = t->count == 1;
    site->dtype = t->dtype;
    site->low = low;
    site->around = mixp_autocast_current(ctx).dtype;
    if (w->tap) w->tap(ctx, number, t, 0);
    if (!w->sampled) return MIXP_OK;
    site->turn = ++w->turns;
    return mixpi_look(ctx, number, MIXPI_LOOK_VALUE, t, &w->rows[MIXPI_ROW_FORWARD]);
}

/* After the forward pass of a call. */
static mixp_result mixpi_look_forward(mixpi_tape_entry *e, mixp_tensor *const *given) {
    mixp_context *ctx = e->call.ctx;
    mixp_tensor *out = e->call.out;
    mixp_result r = MIXP_OK;
    int i, through = mixpi_is_cast(e->call.op) && given[0]->own.site;
    out->own.site = through ? given[0]->own.site : e->site;
    if (e->alias) out->own.raised = given[0]->own.raised;
    if (e->alias || !mixpi_real(out->dtype)) return MIXP_OK;
    r = mixpi_site_stored(ctx, e->site, out,
                          mixpi_is_low(mixpi_plain_dtype(out)) ? mixpi_plain_dtype(out)
                                                               : MIXP_F32);
    for (i = 0; i < e->call.n_in && r == MIXP_OK && mixpi_context_sampled(ctx); i++)
        if (mixpi_is_data(given[i]))
            r = mixpi_look(ctx, e->site, MIXPI_LOOK_DATA, given[i], NULL);
    return r;
}

/* Before an operator is walked back: the gradient of its result. */
static mixp_result mixpi_look_backward(mixp_context *ctx, int number, const mixp_tensor *g) {
    mixpi_watch *w = ctx->watch;
    if (!number || !w->on) return MIXP_OK;
    if (w->tap) w->tap(ctx, number, g, 1);
    if (!w->sampled) return MIXP_OK;
    return mixpi_look(ctx, number, MIXPI_LOOK_GRAD, g, &w->rows[MIXPI_ROW_BACKWARD]);
}

/* Does a product read t as it is? What a guard raised to f32 would overflow again; so would what
 * a cast has overflowed with, or a product that could not be helped otherwise. Casts have numbers
 * in a step (see mixp_dropout): one that is left out is counted all the same. */
static int mixpi_stays_uncast(mixp_call *c, mixp_tensor *t, int cached, mixp_dtype low,
                              mixp_result *r) {
    mixp_context *ctx = c->ctx;
    const mixpi_site *reader = mixpi_site_at(ctx, mixpi_entry(c)->site);
    int n;
    if (!reader) return 0;
    if (t->own.raised != MIXP_F32) return 1;  /* plant: guard_uncast */
    if (cached) return reader->fallen == 2;
    n = mixpi_cast_site(ctx, t, 0);
    if (reader->fallen != 2 && !mixpi_site_holds_f32(mixpi_site_at(ctx, n))) return 0;
    n = mixpi_cast_site(ctx, t, 1);
    ctx->calls_made++;  /* plant: guard_uncounted */
    if (!n) return 1;
    *r = mixpi_site_stored(ctx, n, t, low);
    return 1;
}

/* Brings the inputs of a LOW operator to the region's dtype. */
static mixp_result mixpi_cast_inputs(mixp_call *c, mixp_dtype low) {
    mixp_result r = MIXP_OK;
    int i, cached;
    if (mixpi_entry(c)->site) mixpi_site_at(c->ctx, mixpi_entry(c)->site)->casts = 1;
    for (i = 0; i < c->n_in && r == MIXP_OK; i++) {
        mixp_tensor *t = c->in[i];
        if (!t || !mixpi_real(t->dtype) || t->dtype == low) continue;
        cached = t->dtype == MIXP_F32 && !t->own.generation && t->requires_grad;
        if (mixpi_stays_uncast(c, t, cached, low, &r)) continue;
        c->in[i] = cached ? mixpi_low_copy(c->ctx, t, low) : mixpi_cast(c->ctx, t, low);
        if (!cached) mixpi_count_activation_cast(c->ctx);
        if (!c->in[i]) return MIXP_ERR_MEMORY;
    }
    return r;
}

/* The dtype of a result that autocast and the guard may choose. */
static void mixpi_output_dtype(mixp_call *c, mixp_op_class cls, mixp_autocast region) {
    mixp_tensor *out = c->out;
    const mixp_tensor *first = c->in[0];
    mixp_dtype natural = out->dtype, plain;
    if (cls == MIXP_CLASS_PROMOTE) natural = mixpi_widest(c->n_in, c->in);
    else if (first && first->dtype == natural) natural = mixpi_plain_dtype(first);
    plain = mixpi_result_dtype(region, cls, natural, out->rank);
    out->dtype = plain;
    if (!mixpi_guard_on(c->ctx)) return;
    out->dtype = mixpi_guarded_dtype(mixpi_site_at(c->ctx, mixpi_entry(c)->site), cls,
                                     c->n_in, c->in, plain);
    if (out->dtype != plain) out->own.raised = plain;
}

static mixp_result mixpi_allocate_output(mixp_call *c, mixp_op_class cls,
                                         mixp_autocast region) {
    mixpi_tape_entry *e = mixpi_entry(c);
    mixp_tensor *out = c->out;
    if (!out)
        return mixp_context_fail(c->ctx, MIXP_ERR_ARGUMENT,
                                 "%s: infer declared no result", c->op->name);
    if (e->alias) { out->data = c->in[0]->data; return MIXP_OK; }
    if (!e->fixed_dtype) mixpi_output_dtype(c, cls, region);
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
    /* A cast casts its input itself, whatever its class was made. */
    if (region.level && cls == MIXP_CLASS_LOW && !mixpi_is_cast(c->op))
        r = mixpi_cast_inputs(c, region.dtype);
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
    e->site = mixpi_site_enter(ctx, op, n_in, e->call.in);
    if (mixpi_noted(ctx, op->name, mixpi_run_forward(&e->call)) != MIXP_OK) return NULL;
    if (e->site && mixpi_look_forward(e, in) != MIXP_OK) return NULL;
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

/* A borrowed gradient gets memory of its own, with what it held. */
static mixp_result mixpi_end_loan(mixp_tensor *b) {
    mixp_in held = mixpi_tensor_in(b);
    if (!b->own.borrowed) return MIXP_OK;
    b->own.borrowed = 0;
    b->data = mixpi_data_alloc(b);
    if (!b->data) return MIXP_ERR_MEMORY;
    return mixpi_noted(b->ctx, "mixp_backward",
                       mixpi_convert_to(b->ctx, mixpi_tensor_out(b, 0), held, b->count));
}

/* g is about to change, or its memory to go: it must be its own, and nobody else's. */
static mixp_result mixpi_grad_settle(mixp_tensor *g) {
    mixp_tensor *b = g->own.lent;
    mixp_result r = mixpi_end_loan(g);  /* plant: settle_own */
    g->own.lent = NULL;
    return r == MIXP_OK && b ? mixpi_end_loan(b) : r;
}

MIXPREC_API mixp_tensor *mixp_call_grad(mixp_call *c, int i, int *accumulate) {
    mixp_tensor *t = mixpi_grad_owner(c, i);
    mixp_tensor *g = mixpi_wants_grad(t) ? mixpi_grad_buffer(t) : NULL;
    if (!g || mixpi_grad_settle(g) != MIXP_OK) return NULL;
    *accumulate = t->own.from_tape ? t->own.pending : t->grad != NULL;
    mixpi_mark_add(&g->own.mark, &c->out->own.grad->own.mark, *accumulate);
    t->own.pending = 1;
    if (t->own.from_tape) return g;
    t->grad = g;
    g->version++;
    return g;
}

/* Could input i's gradient be the memory of the incoming one? It is its first, and just like it. */
static int mixpi_call_can_take(const mixp_call *c, int i) {
    const mixp_tensor *t = mixpi_grad_owner(c, i);
    /* plant: kept_grad */
    if (c->out->requires_grad || c->out->own.grad->own.borrowed) return 0;
    if (!t || !t->own.from_tape || t->own.pending) return 0;
    if (t->own.grad && t->own.grad->data) return 0;
    return t->dtype == c->out->dtype && t->count == c->out->count;
}

/* Input i's gradient lies where the incoming one does. NULL: out of memory. */
static mixp_tensor *mixpi_call_share_grad(mixp_call *c, int i) {
    mixp_tensor *t = mixpi_grad_owner(c, i), *g = mixpi_grad_record(t);
    if (!g) return NULL;
    g->data = c->out->own.grad->data;
    g->own.mark = c->out->own.grad->own.mark;
    t->own.pending = 1;
    return g;
}

MIXPREC_API mixp_in mixp_call_x(const mixp_call *c, int i)
{ return mixpi_tensor_in(i >= 0 && i < c->n_in ? c->in[i] : NULL); }
MIXPREC_API mixp_out mixp_call_y(const mixp_call *c) { return mixpi_tensor_out(c->out, 0); }
MIXPREC_API mixp_in  mixp_call_dy(const mixp_call *c) { return mixpi_tensor_in(c->out->grad); }
MIXPREC_API mixp_out mixp_call_dx(mixp_call *c, int i) {
    int accumulate = 0;
    const mixp_tensor *grad = mixp_call_grad(c, i, &accumulate);
    return mixpi_tensor_out(grad, accumulate);
}

/* Hands the incoming gradient's buffer on to input i, unread, when nothing else needs it: a
 * sum's gradient is the gradient of both its terms. Call it after all other reads of it.
 * 0: not possible, the caller must copy. */
static int mixpi_call_move_grad(mixp_call *c, int i) {
    mixp_tensor *from = c->out->own.grad, *g;
    if (!mixpi_call_can_take(c, i)) return 0;
    g = mixpi_call_share_grad(c, i);
    if (!g) return 0;
    g->own.lent = from->own.lent;
    from->own.lent = NULL;
    from->data = NULL;
    return 1;
}

/* Lends the buffer to input i before input `owner` gets it: i's gradient is read, as a rule, before
 * more is added to the owner's; else it gets a copy then. 0: not possible. */
static int mixpi_call_lend_grad(mixp_call *c, int i, int owner) {
    const mixp_tensor *t = mixpi_grad_owner(c, i), *other = mixpi_grad_owner(c, owner);
    mixp_tensor *from = c->out->own.grad, *g;
    if (t == other || !mixpi_call_can_take(c, i) || !mixpi_call_can_take(c, owner)) return 0;
    if (t->requires_grad || from->own.lent) return 0;  /* plant: lent_kept */
    g = mixpi_call_share_grad(c, i);
    if (!g) return 0;
    g->own.borrowed = 1;
    from->own.lent = g;
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

/* After that: the gradients of parameters and views that it wrote, so far. */
static mixp_result mixpi_look_leaves(const mixp_call *c, int number) {
    mixp_context *ctx = c->ctx;
    mixp_result r = MIXP_OK;
    int i;
    if (!number || !mixpi_context_sampled(ctx)) return MIXP_OK;
    for (i = 0; i < c->n_in && r == MIXP_OK; i++) {
        mixp_tensor *t = mixpi_grad_owner(c, i);
        if (!t || t->own.from_tape || !t->grad || !mixpi_wants_grad(t)) continue;
        r = mixpi_look(ctx, number, MIXPI_LOOK_LEAF, t->grad,
                       &ctx->watch->rows[MIXPI_ROW_BACKWARD]);
    }
    return r;
}

/* What g borrowed it needs no more. 0: it is its own. */
static int mixpi_forget_loan(mixp_tensor *g) {
    int borrowed = g && g->own.borrowed;
    if (!borrowed) return 0;
    g->own.borrowed = 0;
    g->data = NULL;
    return 1;
}

/* Before c is walked: it must not read from where it will write. */
static mixp_result mixpi_settle_inputs(mixp_call *c) {
    const mixp_tensor *g = c->out->own.grad;
    mixp_result r = MIXP_OK;
    int i;
    for (i = 0; i < c->n_in && g->own.borrowed && r == MIXP_OK; i++) {
        mixp_tensor *t = mixpi_grad_owner(c, i);
        if (t && t->own.grad && t->own.grad->own.lent == g)
            r = mixpi_grad_settle(t->own.grad);
    }
    return r;
}

static mixp_result mixpi_walk_entry(mixp_call *c) {
    mixp_context *ctx = c->ctx;
    mixp_tensor *out = c->out, *g = out->own.grad;
    const int site = mixpi_entry(c)->site;
    mixp_result r = mixpi_settle_inputs(c);  /* plant: settle_inputs */
    out->grad = g; out->own.pending = 0;
    if (r == MIXP_OK) r = mixpi_look_backward(ctx, site, g);
    if (r == MIXP_OK) r = c->op->backward(c);
    if (r == MIXP_OK) r = mixpi_look_leaves(c, site);
    out->grad = NULL;
    if (r != MIXP_OK)
        return mixp_context_fail(ctx, r, "%s backward: %s", c->op->name,
                                 mixpi_why(ctx, r));
    if (out->requires_grad) return mixpi_keep_grad(out);
    if (mixpi_forget_loan(g)) return MIXP_OK;
    r = mixpi_grad_settle(g);
    if (g->data) mixpi_arena_give(ctx, &ctx->dev, g->data, mixpi_bytes(g));
    g->data = NULL;
    return r;
}

/* Nothing is pending any more. A walk that failed leaves no half-made gradient: those that it
 * wrote to are forgotten. */
static void mixpi_walk_end(mixp_context *ctx, int failed) {
    mixpi_tape_entry *e;
    int i;
    for (e = ctx->tape; e; e = e->older) {
        e->call.out->own.pending = e->told = 0;
        mixpi_forget_loan(e->call.out->own.grad);
        for (i = 0; i < e->call.n_in; i++) {
            mixp_tensor *t = mixpi_grad_owner(&e->call, i);
            if (!t || t->own.from_tape || !t->own.pending) continue;
            t->own.pending = 0;
            if (failed) t->grad = NULL;
        }
    }
}

/* --- gradients of many ranks ------------------------------------------------------------ *
 *
 * With ranks the gradients of leaves lie in one arena, in the order in which the first walk ends
 * them: each is final once the oldest entry of the tape that uses its tensor has been walked. A
 * bucket is a range of whole tensors of one dtype. As soon as all of it is final it is looked at,
 * for the sum would hide whose Inf it was, and goes out; buckets go in their order, which all
 * ranks have alike.
 */
typedef struct mixpi_leaf {
    mixp_tensor *tensor;
    int64_t      last;          /* the entry, as the walk counts, that ends it; -1 = none   */
    int64_t      bucket;
    int          summed;        /* since it was last made from nothing                      */
    mixpi_mark   mark;          /* of what is held of it                                    */
} mixpi_leaf;

typedef struct mixpi_bucket {
    int64_t  first, end;        /* its leaves                                               */
    int64_t  count;             /* of elements, with the gaps between tensors, which are 0  */
    mixp_out grads;             /* its range of the arena                                   */
    mixp_out wire;              /* what is summed: the same, or a copy in f32               */
    void    *held;              /* of the wire's dtype: the sum of earlier walks, or NULL   */
    int      holds;             /* 1: there is something in it                              */
    int      due;               /* 1: a walk has met a leaf of it                           */
    int64_t  awaited;           /* leaves that the walk has still to end                    */
} mixpi_bucket;

struct mixpi_exchange {
    mixpi_leaf      *leaves;
    int64_t          n_leaves;
    mixpi_bucket    *buckets;
    int64_t          n_buckets;
    mixp_param_row  *rows;      /* device memory: the leaves as grad_stats sees them        */
    mixp_step_state *looks;     /* device memory: what was found in each bucket             */
    int64_t         *first;     /* device memory: each bucket's first leaf                  */
    float           *parts;     /* device memory: what the mean divides by                  */
    int64_t          position, sent;    /* of the walk: entries, and buckets that went out  */
    int              hold;
};

/* Those of ctx, made at the first use; NULL with the error set. */
static mixpi_exchange *mixpi_exchange_of(mixp_context *ctx) {
    float parts = (float)ctx->ranks.parts;
    mixpi_exchange *d = ctx->exchange;
    if (d) return d;
    d = (mixpi_exchange *)mixpi_host_alloc(ctx, sizeof *d);
    if (!d) return NULL;
    d->parts = (float *)mixpi_device_alloc(ctx, sizeof parts);
    if (!d->parts || mixpi_upload(ctx, d->parts, &parts, sizeof parts) != MIXP_OK)
        return NULL;
    ctx->exchange = d;
    return d;
}

MIXPREC_API mixp_result mixp_ranks_hold(mixp_context *ctx, int on) {
    if (!ctx) return MIXP_ERR_ARGUMENT;
    if (!ctx->ranks.size) return MIXP_OK;
    if (!mixpi_exchange_of(ctx)) return MIXP_ERR_MEMORY;
    ctx->exchange->hold = on != 0;
    return MIXP_OK;
}

/* What was held back is not wanted any more. */
static void mixpi_exchange_forget(mixp_context *ctx) {
    mixpi_exchange *d = ctx->exchange;
    int64_t i;
    for (i = 0; d && i < d->n_buckets; i++) {
        d->buckets[i].holds = 0;
        d->buckets[i].due = 0;
    }
}

/* --- the arena --- */

/* The leaf that input i's gradient goes to, or NULL. */
static mixp_tensor *mixpi_leaf_of(const mixp_call *c, int i) {
    mixp_tensor *t = mixpi_grad_owner(c, i);
    int is_leaf = mixpi_wants_grad(t) && !t->own.from_tape && !t->own.generation;
    return is_leaf ? t : NULL;
}

/* Uses of leaves without a place on the tape: at least as many as such leaves. */
static int64_t mixpi_leaves_missing(const mixp_context *ctx) {
    const mixpi_tape_entry *e;
    int64_t n = 0;
    int i;
    for (e = ctx->tape; e; e = e->older)
        for (i = 0; i < e->call.n_in; i++) {
            const mixp_tensor *t = mixpi_leaf_of(&e->call, i);
            n += t && !t->own.leaf;
        }
    return n;
}

/* Memory for an array of n and its old content, or NULL. The old memory stays the context's. */
static void *mixpi_longer(mixp_context *ctx, const void *old, int64_t used, int64_t n,
                          size_t size) {
    void *p = mixpi_host_alloc(ctx, (size_t)n * size);
    if (p && used) memcpy(p, old, (size_t)used * size);
    return p;
}

/* Notes for each leaf of the tape where it ends; newcomers stand behind the others. */
static void mixpi_leaves_meet(mixp_context *ctx, mixpi_exchange *d) {
    const mixpi_tape_entry *e;
    int64_t position = 0;
    int i;
    for (e = ctx->tape; e; e = e->older, position++)
        for (i = 0; i < e->call.n_in; i++) {
            mixp_tensor *t = mixpi_leaf_of(&e->call, i);
            if (!t) continue;
            if (!t->own.leaf) {
                t->own.leaf = ++d->n_leaves;
                d->leaves[d->n_leaves - 1].tensor = t;
            }
            d->leaves[t->own.leaf - 1].last = position;
        }
}

/* By dtype, then in the order in which they end. */
static int mixpi_leaf_order(const void *a, const void *b) {
    const mixpi_leaf *x = (const mixpi_leaf *)a, *y = (const mixpi_leaf *)b;
    if (x->tensor->dtype != y->tensor->dtype)
        return x->tensor->dtype < y->tensor->dtype ? -1 : 1;
    if (x->last != y->last) return x->last < y->last ? -1 : 1;
    return x->tensor->own.id < y->tensor->own.id ? -1 : 1;
}

static size_t mixpi_leaf_bytes(const mixpi_leaf *l)
{ return mixpi_round_up(mixpi_bytes(l->tensor)); }

/* Does leaf i begin another bucket than the one that has `bytes` already? */
static int mixpi_bucket_begins(const mixp_context *ctx, const mixpi_leaf *l,
                               size_t bytes) {
    return !bytes || bytes >= (size_t)ctx->ranks.bucket_bytes ||
           l[-1].tensor->dtype != l->tensor->dtype;
}

/* Cuts the leaves from `from` on into buckets. */
static void mixpi_buckets_cut(mixp_context *ctx, mixpi_exchange *d, int64_t from,
                              char *arena) {
    mixpi_bucket *b = NULL;
    size_t bytes = 0;
    int64_t i;
    for (i = from; i < d->n_leaves; i++) {
        mixpi_leaf *l = &d->leaves[i];
        const mixp_tensor *t = l->tensor;
        if (mixpi_bucket_begins(ctx, l, bytes)) {
            b = &d->buckets[d->n_buckets++];
            b->first = i;
            b->grads = mixpi_out_to(arena, t->dtype, 0);
            b->wire = b->grads;
            bytes = 0;
        }
        t->own.grad->data = arena;
        l->bucket = d->n_buckets - 1;
        arena += mixpi_leaf_bytes(l);
        bytes += mixpi_leaf_bytes(l);
        b->end = i + 1;
        b->count = (int64_t)(bytes / mixp_dtype_size(t->dtype));
    }
}

/* Memory for the sums in f32 of what is narrower. */
static mixp_result mixpi_bucket_stage(mixp_context *ctx, mixpi_bucket *b) {
    const mixp_ranks_desc *k = &ctx->ranks;
    void *stage;
    if (b->grads.dtype == MIXP_F32 || k->low_sums) return MIXP_OK;
    if (k->size == 1 && !k->apart) return MIXP_OK;
    stage = mixpi_device_alloc(ctx, (size_t)b->count * sizeof(float));
    b->wire = mixpi_out_to(stage, MIXP_F32, 0);
    return stage ? MIXP_OK : MIXP_ERR_MEMORY;
}

/* The device's tables of leaves and buckets. */
static mixp_result mixpi_exchange_tables(mixp_context *ctx, mixpi_exchange *d) {
    size_t rows_size = (size_t)d->n_leaves * sizeof *d->rows,
           first_size = (size_t)d->n_buckets * sizeof *d->first;
    mixp_param_row *rows = (mixp_param_row *)mixpi_host_take(ctx, rows_size + first_size);
    int64_t i, *first = (int64_t *)(void *)(rows ? rows + d->n_leaves : NULL);
    mixp_result r = MIXP_ERR_MEMORY;
    if (!rows) return mixpi_out_of_memory(ctx, rows_size + first_size);
    memset(rows, 0, rows_size);
    for (i = 0; i < d->n_leaves; i++) {
        const mixp_tensor *g = d->leaves[i].tensor->own.grad;
        rows[i].grad = g->data;
        rows[i].grad_dtype = g->dtype;
        rows[i].count = g->count;
        rows[i].active = 1;
    }
    for (i = 0; i < d->n_buckets; i++) first[i] = d->buckets[i].first;
    d->rows = (mixp_param_row *)mixpi_device_alloc(ctx, rows_size);
    d->first = (int64_t *)mixpi_device_alloc(ctx, first_size);
    d->looks = (mixp_step_state *)mixpi_device_alloc(
        ctx, (size_t)d->n_buckets * sizeof *d->looks);
    if (d->rows && d->first && d->looks) r = mixpi_upload(ctx, d->rows, rows, rows_size);
    if (r == MIXP_OK) r = mixpi_upload(ctx, d->first, first, first_size);
    mixpi_host_put(ctx, rows);
    return r;
}

/* Gives the newcomers, which stand from `from` on, their places. */
static mixp_result mixpi_exchange_lay_out(mixp_context *ctx, mixpi_exchange *d,
                                           int64_t from) {
    int64_t i, new_leaves = d->n_leaves - from, old_buckets = d->n_buckets;
    mixp_result r = MIXP_OK;
    size_t bytes = 0;
    char *arena;
    qsort(d->leaves + from, (size_t)new_leaves, sizeof *d->leaves, mixpi_leaf_order);
    for (i = from; i < d->n_leaves; i++) {
        mixpi_leaf *l = &d->leaves[i];
        l->tensor->own.leaf = i + 1;
        if (!mixpi_grad_record(l->tensor)) return MIXP_ERR_MEMORY;
        bytes += mixpi_leaf_bytes(l);
    }
    arena = (char *)mixpi_device_alloc(ctx, bytes);
    d->buckets = (mixpi_bucket *)mixpi_longer(
        ctx, d->buckets, old_buckets, old_buckets + new_leaves, sizeof *d->buckets);
    if (!arena || !d->buckets) return MIXP_ERR_MEMORY;
    mixpi_buckets_cut(ctx, d, from, arena);
    for (i = old_buckets; i < d->n_buckets && r == MIXP_OK; i++)
        r = mixpi_bucket_stage(ctx, &d->buckets[i]);
    return r == MIXP_OK ? mixpi_exchange_tables(ctx, d) : r;
}

/* --- are all ranks alike? --- */

/* FNV-1a, in words of 8 bytes where it can. */
static uint64_t mixpi_hash(uint64_t h, const void *data, size_t bytes) {
    const unsigned char *p = (const unsigned char *)data;
    for (; bytes >= 8; bytes -= 8, p += 8) {
        uint64_t word;
        memcpy(&word, p, 8);
        h = (h ^ word) * 1099511628211u;
        h ^= h >> 29;
    }
    for (; bytes; bytes--, p++) h = (h ^ *p) * 1099511628211u;
    return h;
}

/* Of a device's memory, by pieces. */
static mixp_result mixpi_hash_data(mixp_context *ctx, const mixp_tensor *t, uint64_t *h) {
    const size_t piece = (size_t)1 << 20, bytes = mixpi_bytes(t);
    size_t at, n = bytes < piece ? bytes : piece;
    void *host = mixpi_host_take(ctx, n);
    mixp_result r = MIXP_OK;
    if (!host) return mixpi_out_of_memory(ctx, n);
    for (at = 0; at < bytes && r == MIXP_OK; at += n) {
        if (bytes - at < n) n = bytes - at;
        r = mixpi_download(ctx, host, (const char *)t->data + at, n);
        if (r == MIXP_OK) *h = mixpi_hash(*h, host, n);
    }
    mixpi_host_put(ctx, host);
    return r;
}

/* "'h.3.w' f16 [4, 4], values 1a2b3c" */
enum { MIXPI_LEAF_TEXT = 128 };

static mixp_result mixpi_leaf_describe(mixp_context *ctx, const mixp_tensor *t,
                                       char *text, uint64_t *hash) {
    char shape[48];
    uint64_t h = 1469598103934665603u;
    mixp_result r = mixpi_hash_data(ctx, t, &h);
    memset(text, 0, MIXPI_LEAF_TEXT);
    mixpi_shape_text(t->rank, t->shape, shape, sizeof shape);
    snprintf(text, MIXPI_LEAF_TEXT, "'%.48s' %s %s, values %06x", t->name,
             mixp_dtype_name(t->dtype), shape, (unsigned)(h >> 40));
    *hash = mixpi_hash(h, text, MIXPI_LEAF_TEXT) >> 16;     /* exact as a double */
    return r;
}

/* What must be alike before anything else is compared. */
enum { MIXPI_START_WORDS = 12 };

static void mixpi_start_fill(const mixp_context *ctx, const mixpi_exchange *d,
                             double *row) {
    const mixp_ranks_desc *k = &ctx->ranks;
    row[0] = MIXPREC_VERSION_MAJOR * 1e6 + MIXPREC_VERSION_MINOR * 1e3 +
             MIXPREC_VERSION_PATCH;
    row[1] = (double)k->size;
    row[2] = (double)(ctx->seed >> 32);
    row[3] = (double)(ctx->seed & 0xFFFFFFFFu);
    row[4] = (double)ctx->step;
    row[5] = (double)k->mean;
    row[6] = (double)k->parts;
    row[7] = (double)k->low_sums;
    row[8] = (double)k->apart;
    row[9] = (double)k->bucket_bytes;
    row[10] = (double)k->shard;
    row[11] = (double)d->n_leaves;
}

static const char *mixpi_start_name(int64_t word) {
    static const char *const names[MIXPI_START_WORDS] = {
        "the version of mixprec", "size", "seed", "seed", "the number of steps", "mean",
        "parts", "low_sums", "apart", "bucket_bytes", "shard", "the number of gradients"
    };
    return names[word];
}

/* The lowest rank whose row differs from rank 0's, or 0; *word: where. */
static int mixpi_rows_differ(const double *table, int size, int64_t words,
                             int64_t *word) {
    int r;
    for (r = 1; r < size; r++)
        for (*word = 0; *word < words; ++*word) {
            double here = table[*word], there = table[r * words + *word];
            if (here < there || here > there) return r;
        }
    return 0;
}

static mixp_result mixpi_start_settings(mixp_context *ctx, const mixpi_exchange *d,
                                        double *table) {
    const mixp_ranks_desc *k = &ctx->ranks;
    int64_t word;
    mixp_result r;
    int other;
    mixpi_start_fill(ctx, d, table + (int64_t)k->rank * MIXPI_START_WORDS);
    r = mixpi_ranks_share(ctx, table, MIXPI_START_WORDS);
    if (r != MIXP_OK) return r;
    other = mixpi_rows_differ(table, k->size, MIXPI_START_WORDS, &word);
    if (!other) return MIXP_OK;
    return mixp_context_fail(ctx, MIXP_ERR_RANKS,
                             "ranks differ: %s is %.0f on rank 0 and %.0f on rank %d",
                             mixpi_start_name(word), table[word],
                             table[other * MIXPI_START_WORDS + word], other);
}

/* Says what gradient `leaf` is of, on rank 0 and on another. */
static mixp_result mixpi_start_tell(mixp_context *ctx, const mixpi_exchange *d,
                                    double *table, int64_t leaf, int other) {
    const mixp_ranks_desc *k = &ctx->ranks;
    double *row = table + (int64_t)k->rank * MIXPI_LEAF_TEXT;
    char here[MIXPI_LEAF_TEXT], there[MIXPI_LEAF_TEXT];
    uint64_t hash;
    mixp_result r = mixpi_leaf_describe(ctx, d->leaves[leaf].tensor, here, &hash);
    int i;
    for (i = 0; i < MIXPI_LEAF_TEXT; i++) row[i] = (double)here[i];
    if (r == MIXP_OK) r = mixpi_ranks_share(ctx, table, MIXPI_LEAF_TEXT);
    if (r != MIXP_OK) return r;
    for (i = 0; i < MIXPI_LEAF_TEXT; i++) {
        here[i] = (char)table[i];
        there[i] = (char)table[other * MIXPI_LEAF_TEXT + i];
    }
    return mixp_context_fail(ctx, MIXP_ERR_RANKS,
                             "ranks differ: gradient %.0f is of %.127s on rank 0 and of "
                             "%.127s on rank %d",
                             (double)leaf, here, there, other);
}

/* Shapes, dtypes, names and values of what is trained. */
static mixp_result mixpi_start_leaves(mixp_context *ctx, const mixpi_exchange *d,
                                      double *table) {
    const mixp_ranks_desc *k = &ctx->ranks;
    double *row = table + (int64_t)k->rank * d->n_leaves;
    char text[MIXPI_LEAF_TEXT];
    mixp_result r = MIXP_OK;
    int64_t i;
    int other;
    for (i = 0; i < d->n_leaves && r == MIXP_OK; i++) {
        uint64_t hash = 0;
        r = mixpi_leaf_describe(ctx, d->leaves[i].tensor, text, &hash);
        row[i] = (double)hash;
    }
    if (r == MIXP_OK) r = mixpi_ranks_share(ctx, table, d->n_leaves);
    if (r != MIXP_OK) return r;
    other = mixpi_rows_differ(table, k->size, d->n_leaves, &i);
    if (!other) return MIXP_OK;
    memset(table, 0, (size_t)k->size * MIXPI_LEAF_TEXT * sizeof *table);
    return mixpi_start_tell(ctx, d, table, i, other);
}

/* Once for each layout: waits for the device. */
static mixp_result mixpi_exchange_compare(mixp_context *ctx, const mixpi_exchange *d) {
    const size_t words = (size_t)d->n_leaves + MIXPI_LEAF_TEXT;
    const size_t bytes = (size_t)ctx->ranks.size * words * sizeof(double);
    double *table;
    mixp_result r;
    if (ctx->ranks.size < 2) return MIXP_OK;
    table = (double *)mixpi_host_take(ctx, bytes);
    if (!table) return mixpi_out_of_memory(ctx, bytes);
    memset(table, 0, bytes);
    r = mixpi_start_settings(ctx, d, table);
    memset(table, 0, bytes);
    if (r == MIXP_OK) r = mixpi_start_leaves(ctx, d, table);
    mixpi_host_put(ctx, table);
    return r;
}

/* --- a walk --- */

/* A gradient of before that was summed already must not be added to. */
static mixp_result mixpi_exchange_fresh(mixp_context *ctx, mixpi_exchange *d) {
    int64_t i;
    for (i = 0; i < d->n_leaves; i++) {
        mixpi_leaf *l = &d->leaves[i];
        if (!l->tensor->grad) l->summed = 0;
        if (!l->summed || !d->buckets[l->bucket].due) continue;
        return mixp_context_fail(ctx, MIXP_ERR_ORDER,
                                 "mixp_backward: the gradient of '%s' was summed over the ranks "
                                 "already; call mixp_zero_grad first, and mixp_ranks_hold(ctx, 1) "
                                 "before all walks of a batch but the last",
                                 l->tensor->name);
    }
    return MIXP_OK;
}

/* Before a walk: newcomers get their places, and each bucket learns what it has to await. */
static mixp_result mixpi_exchange_begin(mixp_context *ctx) {
    mixpi_exchange *d;
    int64_t i, old, missing;
    mixp_result r = MIXP_OK;
    if (!ctx->ranks.size) return MIXP_OK;
    d = mixpi_exchange_of(ctx);
    if (!d) return MIXP_ERR_MEMORY;
    old = d->n_leaves;
    missing = mixpi_leaves_missing(ctx);
    if (missing)
        d->leaves = (mixpi_leaf *)mixpi_longer(ctx, d->leaves, old, old + missing,
                                               sizeof *d->leaves);
    if (missing && !d->leaves) return MIXP_ERR_MEMORY;
    for (i = 0; i < old; i++) d->leaves[i].last = -1;
    mixpi_leaves_meet(ctx, d);
    if (d->n_leaves > old) r = mixpi_exchange_lay_out(ctx, d, old);
    if (r == MIXP_OK && d->n_leaves > old) r = mixpi_exchange_compare(ctx, d);
    if (r != MIXP_OK) return r;
    d->position = d->sent = 0;
    for (i = 0; i < d->n_buckets; i++) d->buckets[i].awaited = 0;
    for (i = 0; i < d->n_leaves; i++) {
        mixpi_bucket *b = &d->buckets[d->leaves[i].bucket];
        b->awaited += d->leaves[i].last >= 0;
        b->due |= d->leaves[i].last >= 0;
    }
    return mixpi_exchange_fresh(ctx, d);
}

/* data *= 1/parts, n elements. */
static mixp_result mixpi_divide_by_parts(mixp_context *ctx, mixp_out data, int64_t n) {
    mixp_unary_args k;
    memset(&k, 0, sizeof k);
    k.op = MIXP_UNARY_SCALE;
    k.p = mixp_scaler_inverse((float)ctx->ranks.parts);
    k.n = n;
    k.a = mixpi_in(data.data, data.dtype);
    k.y = data;
    return ctx->device->kernels->unary(&ctx->exec, &k);
}

/* A look at a bucket's gradients as this rank has them. divide: as mixpi_divide_by_parts, in the
 * same pass. */
static mixp_result mixpi_bucket_look(mixp_context *ctx, const mixpi_exchange *d,
                                     const mixpi_bucket *b, int divide) {
    mixp_grad_stats_args k;
    memset(&k, 0, sizeof k);
    k.rows = d->rows + b->first;
    k.count = b->end - b->first;
    k.scale = divide ? d->parts : NULL;
    k.unscale = divide;
    k.step = d->looks + (b - d->buckets);
    return ctx->device->kernels->grad_stats(&ctx->exec, &k);
}

/* The mark of some gradient of this walk: what a rank leaves out counts as 0 of that kind. */
static mixpi_mark mixpi_some_mark(const mixpi_exchange *d) {
    mixpi_mark none;
    int64_t i;
    memset(&none, 0, sizeof none);
    for (i = 0; i < d->n_leaves; i++) {
        const mixp_tensor *t = d->leaves[i].tensor;
        if (t->grad && !d->leaves[i].summed) return t->grad->own.mark;
    }
    return none;
}

/* A leaf that has no gradient gets zeros: other ranks may have one. */
static mixp_result mixpi_bucket_fill(mixp_context *ctx, mixpi_exchange *d,
                                     const mixpi_bucket *b) {
    mixp_result r = MIXP_OK;
    int64_t i;
    for (i = b->first; i < b->end && r == MIXP_OK; i++) {
        mixp_tensor *t = d->leaves[i].tensor, *g = t->own.grad;
        if (t->grad) continue;
        r = mixpi_device_zero(ctx, g->data, mixpi_bytes(g));
        g->own.mark = mixpi_some_mark(d);
        t->grad = g;
    }
    return r;
}

/* The bucket of this walk, in its wire, divided if that comes first. */
static mixp_result mixpi_bucket_part(mixp_context *ctx, mixpi_exchange *d,
                                     mixpi_bucket *b) {
    const int staged = b->wire.data != b->grads.data;
    const int divide = ctx->ranks.mean == MIXP_MEAN_BEFORE && ctx->ranks.parts > 1;
    mixp_result r = mixpi_bucket_fill(ctx, d, b);
    if (r == MIXP_OK) r = mixpi_bucket_look(ctx, d, b, divide && !staged);
    if (!staged || r != MIXP_OK) return r;
    r = mixpi_convert_to(ctx, b->wire, mixpi_in(b->grads.data, b->grads.dtype), b->count);
    return r == MIXP_OK && divide ? mixpi_divide_by_parts(ctx, b->wire, b->count) : r;
}

/* Its walk has ended it: it goes out. */
static mixp_result mixpi_bucket_send(mixp_context *ctx, mixpi_exchange *d,
                                     mixpi_bucket *b) {
    const mixp_ranks_desc *k = &ctx->ranks;
    mixp_out sum = b->wire;
    mixp_result r = mixpi_bucket_part(ctx, d, b);
    sum.accumulate = 1;
    if (r == MIXP_OK && b->holds)
        r = mixpi_add_into(ctx, sum, mixpi_in(b->held, sum.dtype), b->count);
    if (r != MIXP_OK) return mixpi_noted(ctx, "a sum over ranks", r);
    return mixpi_ranks_run(ctx, "the sum of gradients",
                           k->grad_ready ? k->grad_ready : k->sum, b->wire, b->count);
}

/* Sends what is final, in order. all: nothing else will come. */
static mixp_result mixpi_buckets_send(mixp_context *ctx, mixpi_exchange *d, int all) {
    mixp_result r = MIXP_OK;
    while (r == MIXP_OK && d->sent < d->n_buckets &&
           (all || !d->buckets[d->sent].awaited)) {
        mixpi_bucket *b = &d->buckets[d->sent++];
        if (b->due) r = mixpi_bucket_send(ctx, d, b);
    }
    return r;
}

/* An entry has been walked, or passed by. */
static mixp_result mixpi_exchange_walked(mixp_context *ctx, const mixp_call *c) {
    mixpi_exchange *d = ctx->exchange;
    int i;
    if (!d) return MIXP_OK;
    for (i = 0; i < c->n_in; i++) {
        const mixp_tensor *t = mixpi_leaf_of(c, i);
        mixpi_leaf *l = t ? &d->leaves[t->own.leaf - 1] : NULL;
        if (!l || l->last != d->position) continue;
        l->last = -1;
        d->buckets[l->bucket].awaited--;  /* plant: ranks_awaited */
    }
    d->position++;
    return d->hold ? MIXP_OK : mixpi_buckets_send(ctx, d, 0);
}

/* Keeps a walk's part of a bucket, added to those before it. */
static mixp_result mixpi_bucket_hold(mixp_context *ctx, mixpi_exchange *d,
                                     mixpi_bucket *b) {
    const size_t bytes = (size_t)b->count * mixp_dtype_size(b->wire.dtype);
    mixp_result r = mixpi_bucket_part(ctx, d, b);
    int64_t i;
    if (!b->held) b->held = mixpi_device_alloc(ctx, bytes);
    if (!b->held) return MIXP_ERR_MEMORY;
    if (r == MIXP_OK)
        r = mixpi_add_into(ctx, mixpi_out_to(b->held, b->wire.dtype, b->holds),
                           mixpi_in(b->wire.data, b->wire.dtype), b->count);
    for (i = b->first; i < b->end; i++) {
        mixpi_leaf *l = &d->leaves[i];
        mixpi_mark_add(&l->mark, &l->tensor->own.grad->own.mark, b->holds);
        l->tensor->grad = NULL;
    }
    b->holds = 1;
    return r;
}

/* After the sum: what was put off is done, and the gradients are there for everyone. */
static mixp_result mixpi_bucket_take(mixp_context *ctx, mixpi_exchange *d,
                                     mixpi_bucket *b) {
    const mixp_ranks_desc *k = &ctx->ranks;
    mixp_result r = MIXP_OK;
    int64_t i;
    if (k->mean == MIXP_MEAN_AFTER && k->parts > 1)
        r = mixpi_divide_by_parts(ctx, b->wire, b->count);
    if (r == MIXP_OK && b->wire.data != b->grads.data)
        r = mixpi_convert_to(ctx, b->grads, mixpi_in(b->wire.data, b->wire.dtype),
                             b->count);
    for (i = b->first; i < b->end; i++) {
        mixpi_leaf *l = &d->leaves[i];
        mixp_tensor *g = l->tensor->own.grad;
        if (b->holds) mixpi_mark_add(&g->own.mark, &l->mark, 1);
        l->summed = 1;
        g->version++;
    }
    b->holds = b->due = 0;
    return mixpi_noted(ctx, "a mean over ranks", r);
}

/* After a walk. */
static mixp_result mixpi_exchange_end(mixp_context *ctx) {
    const mixp_ranks_desc *k = &ctx->ranks;
    mixpi_exchange *d = ctx->exchange;
    mixp_result r;
    int64_t i;
    if (!d) return MIXP_OK;
    r = d->hold ? MIXP_OK : mixpi_buckets_send(ctx, d, 1);
    if (r == MIXP_OK && !d->hold && k->grad_wait && k->size > 1)
        r = mixpi_ranks_heard(ctx, "the wait for gradients",
                              k->grad_wait(k->user, ctx->exec.stream, k->seconds));
    for (i = 0; i < d->n_buckets && r == MIXP_OK; i++) {
        mixpi_bucket *b = &d->buckets[i];
        if (!b->due) continue;
        if (!d->hold) r = mixpi_bucket_take(ctx, d, b);
        else if (k->apart) r = mixpi_bucket_hold(ctx, d, b);
    }
    return r;
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
    if (r == MIXP_OK) r = mixpi_exchange_begin(ctx);
    if (r != MIXP_OK) return mixpi_ranks_stop(ctx, r);
    g = mixpi_grad_buffer(loss);
    if (!g) return mixpi_ranks_stop(ctx, MIXP_ERR_MEMORY);
    r = mixpi_fill_with(ctx, mixpi_tensor_out(g, 0), 1, 1.0);
    g->own.mark = as_it_is;
    loss->own.pending = loss->own.walked = 1;
    opened = mixp_no_grad_open(ctx);    /* a user's backward may apply operators */
    for (e = ctx->tape; e && r == MIXP_OK; e = e->older) {
        if (e->call.out->own.pending) r = mixpi_walk_entry(&e->call);
        if (r == MIXP_OK) r = mixpi_exchange_walked(ctx, &e->call);
    }
    mixp_autocast_close(ctx, opened);
    if (r == MIXP_OK) r = mixpi_exchange_end(ctx);
    if (r != MIXP_OK) mixpi_exchange_forget(ctx);
    mixpi_walk_end(ctx, r != MIXP_OK);
    if (ctx->watch) ctx->watch->pass++;
    return mixpi_ranks_stop(ctx, r);
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

static int mixpi_is_cast(const mixp_op *op) { return op == &mixpi_cast_op; }

/* The site that a cast of x would have; it counts as visited when it is then left out. */
static int mixpi_cast_site(mixp_context *ctx, mixp_tensor *x, int visit) {
    mixpi_visit v = mixpi_visit_of(ctx, &mixpi_cast_op, 1, &x);
    return visit ? mixpi_site_enter(ctx, &mixpi_cast_op, 1, &x) : mixpi_site_of(ctx, &v);
}

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
static mixp_result mixpi_need_indices_after(mixp_call *c, int which) {
    mixp_result r = mixpi_need_real(c, which, which);
    const mixp_tensor *ids = c->in[which];
    char quoted[MIXPI_QUOTED];
    if (r != MIXP_OK || (ids && ids->dtype == MIXP_I32)) return r;
    return mixp_context_fail(c->ctx, MIXP_ERR_DTYPE,
                             "%s: input %d%s is %s; indices must be i32", c->op->name, which,
                             ids ? mixpi_quoted(ids, quoted) : "",
                             ids ? mixp_dtype_name(ids->dtype) : "NULL");
}

static mixp_result mixpi_need_indices(mixp_call *c) {
    return mixpi_need_indices_after(c, 1);
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
    { "linear_cross_entropy", "x", "w", "targets" },
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

enum {
    MIXPI_ATTENTION_Q, MIXPI_ATTENTION_K, MIXPI_ATTENTION_V, MIXPI_ATTENTION_MASK,
    MIXPI_ATTENTION_LENGTHS, MIXPI_ATTENTION_INPUTS
};

static mixp_tensor *mixpi_attention_input(const mixp_call *c, int i)
{ return i < c->n_in ? c->in[i] : NULL; }

/* q and one more input, and the rule that they break. */
static mixp_result mixpi_attention_misfit(mixp_call *c, int i, const char *rule) {
    static const char *const names[] = { "q", "k", "v", "mask", "lengths" };
    const mixp_tensor *q = c->in[MIXPI_ATTENTION_Q], *t = mixpi_attention_input(c, i);
    char first[352], second[352] = "";
    int  two = t != NULL && i > 0;
    mixpi_input_text(q, c->in[MIXPI_ATTENTION_K] ? "q" : "qkv", first, sizeof first);
    if (two) mixpi_input_text(t, names[i], second, sizeof second);
    return mixp_context_fail(c->ctx, MIXP_ERR_SHAPE, "attention: %s%s%s %s not fit: %s",
                             first, two ? " and " : "", second, two ? "do" : "does",
                             rule);
}

/* A number of the description that is outside its range. */
static mixp_result mixpi_attention_number(mixp_call *c, const char *name, double value,
                                          const char *rule) {
    return mixp_context_fail(c->ctx, MIXP_ERR_ARGUMENT, "attention: %s is %g; it must be %s",
                             name, value, rule);
}

static int mixpi_positive(float x)      /* by bits: above 0, and finite */
{ return mixp_bits_of_f32(x) - 1u < 0x7F7FFFFFu; }

/* The numbers of the description; a scale of 0 becomes the default. */
static mixp_result mixpi_attention_numbers(mixp_call *c, mixp_attention_args *k) {
    if (mixp_bits_of_f32(k->scale) << 1 == 0)
        k->scale = (float)(1.0 / sqrt((double)k->d));
    if (!mixpi_positive(k->scale))
        return mixpi_attention_number(c, "scale", (double)k->scale,
                                      "above 0, or 0 for 1/sqrt(c/heads)");
    if (mixp_bits_of_f32(k->softcap) << 1 != 0 && !mixpi_positive(k->softcap))
        return mixpi_attention_number(c, "softcap", (double)k->softcap,
                                      "above 0, or 0 for none");
    if (mixp_bits_of_f32(k->dropout) >= 0x3F800000u)
        return mixpi_attention_number(c, "dropout", (double)k->dropout, "in [0, 1)");
    if (k->past < 0)
        return mixpi_attention_number(c, "past", (double)k->past, "0 or more");
    return MIXP_OK;
}

/* Rows of `heads` heads of d side by side, after which come `other` elements of others'. */
static mixp_head_strides mixpi_head_rows_of(int64_t rows, int64_t heads, int64_t other,
                                            int64_t d) {
    mixp_head_strides at;
    at.head = d;
    at.row = heads * d + other;
    at.sequence = rows * at.row;
    return at;
}

/* qkv[b, t, heads*d, kv_heads*d, kv_heads*d] in one tensor. */
static mixp_result mixpi_attention_packed(mixp_call *c, mixp_attention_args *k) {
    const mixp_tensor *x = c->in[MIXPI_ATTENTION_Q];
    int64_t all = k->heads + 2 * k->kv_heads;
    if (x->rank != 3 || k->heads < 1 || k->heads % k->kv_heads || x->shape[2] % all)
        return mixpi_bad_shapes(c, k->heads == k->kv_heads || k->heads < 1
                                       ? "qkv[b, t, 3*c] with c a multiple of heads >= 1"
                                       : "qkv[b, t, (heads + 2*kv_heads)*d] with heads a "
                                         "multiple of kv_heads");
    k->b = x->shape[0];
    k->t = k->keys = x->shape[1];
    k->d = x->shape[2] / all;
    k->q_at = mixpi_head_rows_of(k->t, k->heads, 2 * k->kv_heads * k->d, k->d);
    k->k_at = k->v_at = k->q_at;
    return MIXP_OK;
}

/* The heads that t has as a dimension, or `given` where it has not; 0: neither fits. */
static int64_t mixpi_heads_in(const mixp_tensor *t, int64_t given) {
    if (t->rank == 4) return !given || t->shape[2] == given ? t->shape[2] : 0;
    return t->rank == 3 && given > 0 && t->shape[2] % given == 0 ? given : 0;
}

static int64_t mixpi_row_of(const mixp_tensor *t) {
    return t->rank == 4 ? t->shape[2] * t->shape[3] : t->shape[2];
}

/* Does k, or v, fit the problem? */
static int mixpi_attention_fits(const mixp_tensor *t, const mixp_attention_args *k) {
    return t && mixpi_heads_in(t, k->kv_heads) && t->shape[0] == k->b &&
           t->shape[1] == k->keys && mixpi_row_of(t) == k->kv_heads * k->d;
}

static mixp_result mixpi_attention_apart(mixp_call *c, mixp_attention_args *k) {
    const mixp_tensor *q = c->in[MIXPI_ATTENTION_Q], *key = c->in[MIXPI_ATTENTION_K];
    k->heads = mixpi_heads_in(q, k->heads);
    if (!k->heads)
        return mixpi_attention_misfit(c, 0, "q[b, t, heads*d], or q[b, t, heads, d]");
    if (!k->kv_heads) k->kv_heads = key->rank == 4 ? key->shape[2] : k->heads;
    if (k->kv_heads < 0 || k->heads % k->kv_heads)
        return mixpi_attention_misfit(c, 1, "heads must be a multiple of kv_heads");
    k->b = q->shape[0];
    k->t = q->shape[1];
    k->d = mixpi_row_of(q) / k->heads;
    k->keys = key->rank > 1 ? key->shape[1] : 0;
    if (!mixpi_attention_fits(key, k))
        return mixpi_attention_misfit(c, 1, "q[b, t, heads*d] and k[b, keys, kv_heads*d]");
    if (!mixpi_attention_fits(c->in[MIXPI_ATTENTION_V], k))
        return mixpi_attention_misfit(
            c, 2, "v must be as k, [b, keys, kv_heads*d], with d of q");
    k->q_at = mixpi_head_rows_of(k->t, k->heads, 0, k->d);
    k->k_at = k->v_at = mixpi_head_rows_of(k->keys, k->kv_heads, 0, k->d);
    return MIXP_OK;
}

/* The mask's strides: 0 along what it repeats. */
static mixp_result mixpi_attention_mask(mixp_call *c, mixp_attention_args *k) {
    const mixp_tensor *mask = mixpi_attention_input(c, MIXPI_ATTENTION_MASK);
    int64_t full[4], stride[4], step = 1;
    int i;
    if (!mask) return MIXP_OK;
    full[0] = k->b;
    full[1] = k->heads;
    full[2] = k->t;
    full[3] = k->keys;
    for (i = 3; i >= 0; i--) {
        int     own = i - (4 - mask->rank);
        int64_t n = own < 0 ? 1 : mask->shape[own];
        if (mask->rank > 4 || (n != 1 && n != full[i]))
            return mixpi_attention_misfit(
                c, MIXPI_ATTENTION_MASK, "a mask must broadcast to [b, heads, t, keys]");
        stride[i] = n == 1 ? 0 : step;  /* plant: attention_mask_step */
        step *= n;
    }
    k->mask_at.sequence = stride[0];
    k->mask_at.head = stride[1];
    k->mask_at.row = stride[2];
    k->mask_key = stride[3];
    if (mixpi_no_grad_now(c->ctx) || !mixp_call_wants(c, MIXPI_ATTENTION_MASK))
        return MIXP_OK;
    return mixp_context_fail(c->ctx, MIXP_ERR_ARGUMENT,
                             "attention: the mask '%.60s' wants a gradient and gets none; "
                             "add what is learned to scores of your own",
                             mask->name);
}

static mixp_result mixpi_attention_lengths(mixp_call *c, const mixp_attention_args *k) {
    const mixp_tensor *t = mixpi_attention_input(c, MIXPI_ATTENTION_LENGTHS);
    char quoted[MIXPI_QUOTED];
    if (!t) return MIXP_OK;
    if (t->dtype != MIXP_I32)
        return mixp_context_fail(c->ctx, MIXP_ERR_DTYPE,
                                 "attention: lengths%s is %s; it must be i32",
                                 mixpi_quoted(t, quoted), mixp_dtype_name(t->dtype));
    if (t->rank == 1 && t->count == k->b) return MIXP_OK;
    return mixpi_attention_misfit(c, MIXPI_ATTENTION_LENGTHS,
                                  "lengths has one of each sequence, [b]");
}

static mixp_result mixpi_attention_infer(mixp_call *c) {
    mixp_attention_args *k = (mixp_attention_args *)c->attrs;
    mixp_tensor *q = c->in[MIXPI_ATTENTION_Q];
    int64_t shape[3];
    int packed = !c->in[MIXPI_ATTENTION_K] && !c->in[MIXPI_ATTENTION_V];
    mixp_result r = mixpi_need_real(c, packed ? 1 : 3, 4);
    if (r != MIXP_OK) return r;
    if (packed && !k->kv_heads) k->kv_heads = k->heads;
    r = packed ? mixpi_attention_packed(c, k) : mixpi_attention_apart(c, k);
    if (r == MIXP_OK) r = mixpi_attention_numbers(c, k);
    if (r == MIXP_OK) r = mixpi_attention_mask(c, k);
    if (r == MIXP_OK) r = mixpi_attention_lengths(c, k);
    if (r != MIXP_OK) return r;
    if (!packed) return mixp_call_output(c, q->dtype, q->rank, q->shape);
    shape[0] = k->b;
    shape[1] = k->t;
    shape[2] = k->d * k->heads;
    return mixp_call_output(c, q->dtype, 3, shape);
}

/* A kernel whose lengths lie in host memory has refused them: says which is wrong. */
static mixp_result mixpi_attention_bad_length(mixp_call *c, const mixp_attention_args *k) {
    int64_t i = 0;
    if (c->ctx->device->download) return MIXP_ERR_ARGUMENT;
    while (i < k->b && k->lengths[i] >= 0 && k->lengths[i] <= k->keys) i++;
    if (i == k->b) return MIXP_ERR_ARGUMENT;
    return mixp_context_fail(c->ctx, MIXP_ERR_ARGUMENT,
                             "attention: length %d of sequence %.0f is outside [0, %.0f]",
                             (int)k->lengths[i], (double)i, (double)k->keys);
}

static mixp_result mixpi_attention_forward(mixp_call *c) {
    mixp_attention_args *k = (mixp_attention_args *)c->attrs;
    mixp_result r;
    const mixp_tensor *lengths = mixpi_attention_input(c, MIXPI_ATTENTION_LENGTHS);
    int64_t shape[3] = { k->b, k->heads, k->t };
    if (!mixp_call_save(c, 0, MIXP_F32, 3, shape)) return MIXP_ERR_MEMORY;
    k->q = mixpi_call_x(c, MIXPI_ATTENTION_Q);
    k->k = mixpi_call_x(c, MIXPI_ATTENTION_K);
    k->v = mixpi_call_x(c, MIXPI_ATTENTION_V);
    if (!k->k.data) {
        k->k = mixpi_in_at(k->q, k->heads * k->d);
        k->v = mixpi_in_at(k->k, k->kv_heads * k->d);
    }
    k->mask = mixpi_call_x(c, MIXPI_ATTENTION_MASK);
    k->lengths = lengths ? (const int32_t *)lengths->data : NULL;
    k->y = mixpi_call_y(c);
    k->lse = mixpi_saved(c, 0);
    r = MIXPI_RUN(c, attention, k);
    if (r != MIXP_ERR_ARGUMENT || !k->lengths) return r;
    return mixpi_attention_bad_length(c, k);
}

/* Gradients of a tensor that is two of q, k and v are added one after the other. */
static mixp_result mixpi_attention_in_turn(mixp_call *c,
                                           const mixp_attention_backward_args *all) {
    mixp_attention_backward_args one = *all;
    mixp_result r = MIXP_OK;
    int i;
    for (i = 0; i < 3 && r == MIXP_OK; i++) {
        one.dq = all->dq;
        one.dk = all->dk;
        one.dv = all->dv;
        if (i != 0) one.dq.data = NULL;
        if (i != 1) one.dk.data = NULL;
        if (i != 2) one.dv.data = NULL;
        if (one.dq.data || one.dk.data || one.dv.data)
            r = MIXPI_RUN(c, attention_backward, &one);
    }
    return r;
}

static mixp_result mixpi_attention_backward(mixp_call *c) {
    mixp_attention_backward_args k;
    int twice;
    memset(&k, 0, sizeof k);
    k.forward = *(const mixp_attention_args *)c->attrs;
    k.dy = mixpi_call_dy(c);
    k.dq = mixpi_call_dx(c, MIXPI_ATTENTION_Q);
    if (!c->in[MIXPI_ATTENTION_K]) {
        if (!k.dq.data) return MIXP_OK;
        k.dk = mixpi_out_at(k.dq, k.forward.heads * k.forward.d);
        k.dv = mixpi_out_at(k.dk, k.forward.kv_heads * k.forward.d);
        return MIXPI_RUN(c, attention_backward, &k);
    }
    k.dk = mixpi_call_dx(c, MIXPI_ATTENTION_K);
    k.dv = mixpi_call_dx(c, MIXPI_ATTENTION_V);
    twice = k.dq.data == k.dk.data || k.dq.data == k.dv.data || k.dk.data == k.dv.data;
    if (twice) return mixpi_attention_in_turn(c, &k);  /* plant: attention_aliased */
    return MIXPI_RUN(c, attention_backward, &k);
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

/* What is missing of a call, said; or MIXP_OK. */
static mixp_result mixpi_attention_given(mixp_context *ctx, const mixp_tensor *k,
                                         const mixp_tensor *v,
                                         const mixp_attention_desc *desc) {
    if (desc && (desc->heads < 0 || desc->kv_heads < 0))
        return mixp_context_fail(ctx, MIXP_ERR_ARGUMENT,
                                 "attention: heads is %d and kv_heads %d; neither may be "
                                 "below 0", desc->heads, desc->kv_heads);
    if (desc && !k == !v) return MIXP_OK;
    return mixp_context_fail(ctx, MIXP_ERR_ARGUMENT, "attention: %s is NULL%s",
                             !desc ? "the description" : k ? "v" : "k",
                             desc ? "; both are, or neither" : "");
}

MIXPREC_API mixp_tensor *mixp_attention_apply(mixp_context *ctx, mixp_tensor *q,
                                              mixp_tensor *k, mixp_tensor *v,
                                              const mixp_attention_desc *desc) {
    mixp_attention_args a;
    mixp_tensor *in[MIXPI_ATTENTION_INPUTS];
    if (!ctx || mixpi_attention_given(ctx, k, v, desc) != MIXP_OK) return NULL;
    memset(&a, 0, sizeof a);
    a.heads = desc->heads;
    a.kv_heads = desc->kv_heads;
    a.causal = desc->causal != 0;
    a.past = desc->past;
    a.scale = desc->scale;
    a.softcap = desc->softcap;
    a.dropout = desc->dropout;
    a.seed = ctx->seed;
    a.step = ctx->step;
    a.tensor = (uint64_t)ctx->calls_made;   /* as mixp_dropout's */
    in[MIXPI_ATTENTION_Q] = q;
    in[MIXPI_ATTENTION_K] = k;
    in[MIXPI_ATTENTION_V] = v;
    in[MIXPI_ATTENTION_MASK] = desc->mask;
    in[MIXPI_ATTENTION_LENGTHS] = desc->lengths;
    return mixp_apply(ctx, mixp_op_builtin(MIXP_OP_ATTENTION), MIXPI_ATTENTION_INPUTS, in, 1,
                      &a);
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

/* As `which` of a sum that is applied: the norm behind it computes it, too. */
enum { MIXPI_SUM_LATER = -1 };

static mixp_result mixpi_binary_forward(mixp_call *c) {
    mixp_binary_args *k = (mixp_binary_args *)c->attrs;
    k->a = mixpi_call_x(c, 0);
    k->b = mixpi_call_x(c, 1);
    k->y = mixpi_call_y(c);
    if (k->which == MIXPI_SUM_LATER) return MIXP_OK;
    return MIXPI_RUN(c, binary, k);
}

/* The second operand first: the first may then take over the incoming gradient's buffer, from which
 * the second of a sum reads meanwhile. */
static mixp_result mixpi_binary_backward(mixp_call *c) {
    mixp_binary_args *k = (mixp_binary_args *)c->attrs;
    int passes = k->op == MIXP_BINARY_ADD || k->op == MIXP_BINARY_SUB;
    int first = mixpi_entry(c)->told ? 0 : 1;
    mixp_result r = MIXP_OK;
    mixpi_entry(c)->told = 0;
    for (k->which = first; k->which >= 0 && r == MIXP_OK; k->which--) {
        if (k->which == 0 && passes && mixpi_call_move_grad(c, 0)) break;
        if (k->which && k->op == MIXP_BINARY_ADD && mixpi_call_lend_grad(c, 1, 0)) continue;
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
    k->gamma = mixpi_call_x(c, 1);
    k->beta = mixpi_call_x(c, 2);
    k->y = mixpi_call_y(c);
    k->mean = mixpi_saved(c, 0);
    k->rstd = mixpi_saved(c, 1);
    if (k->b.data) return MIXPI_RUN(c, add_norm, k);
    k->a = mixpi_call_x(c, 0);
    return MIXPI_RUN(c, norm, k);
}

/* The sum that this norm computed, where its second term's gradient is still to be made from the
 * sum's, which is complete, by a cast alone; or NULL. */
static mixp_call *mixpi_norm_sum(const mixp_call *c) {
    const mixp_norm_args *k = (const mixp_norm_args *)c->attrs;
    mixpi_tape_entry *sum = k->b.data ? mixpi_entry_before(c) : NULL;
    const mixp_tensor *b;
    if (!sum || sum->call.out != c->in[0] || c->in[0]->dtype != MIXP_F32) return NULL;
    b = sum->call.in[1];
    /* plant: norm_sum_kept */
    if (!b->own.from_tape || b->own.pending || b == sum->call.in[0]) return NULL;
    return b->dtype == MIXP_F32 ? NULL : &sum->call;
}

/* da's other form, for the second term of that sum. */
static mixp_out mixpi_norm_db(const mixp_call *c) {
    mixp_call *sum = mixpi_norm_sum(c);
    mixp_out db = mixpi_tensor_out(NULL, 0);
    if (sum) db = mixpi_call_dx(sum, 1);
    if (db.data) mixpi_entry(sum)->told = 1 << 1;  /* plant: norm_told */
    return db;
}

static mixp_result mixpi_norm_backward(mixp_call *c) {
    const mixp_norm_args *forward = (const mixp_norm_args *)c->attrs;
    mixp_norm_backward_args k;
    memset(&k, 0, sizeof k);
    k.rows = forward->rows;
    k.cols = forward->cols;
    k.rms = forward->rms;
    k.dy = mixpi_call_dy(c);
    k.a = mixpi_call_x(c, 0);
    k.gamma = forward->gamma;
    k.mean = forward->mean;
    k.rstd = forward->rstd;
    k.da = mixpi_call_dx(c, 0);
    k.db = mixpi_norm_db(c);
    k.dgamma = mixpi_call_dx(c, 1);
    k.dbeta = mixpi_call_dx(c, 2);
    return MIXPI_RUN(c, norm_backward, &k);
}

static mixp_norm_args mixpi_norm_of(int rms, float eps) {
    mixp_norm_args k;
    memset(&k, 0, sizeof k);
    k.rms = rms;
    k.eps = eps;
    return k;
}

MIXPREC_API mixp_tensor *mixp_layer_norm(mixp_context *ctx, mixp_tensor *x,
                                         mixp_tensor *gamma, mixp_tensor *beta,
                                         float eps) {
    mixp_norm_args k = mixpi_norm_of(0, eps);
    return mixpi_apply_op(ctx, MIXP_OP_LAYER_NORM, 1, x, gamma, beta, &k);
}

MIXPREC_API mixp_tensor *mixp_rms_norm(mixp_context *ctx, mixp_tensor *x,
                                       mixp_tensor *gamma, float eps) {
    mixp_norm_args k = mixpi_norm_of(1, eps);
    return mixpi_apply_op(ctx, MIXP_OP_RMS_NORM, 1, x, gamma, NULL, &k);
}

/* --- a sum and its norm ---
 *
 * Two operators on the tape, whose kernels are one where that can be: the sum's forward is left to the
 * norm's. Nobody may look at the sum between them, and no cast may read it: a guard's looks and
 * comparisons, and inputs of class LOW, take them apart.
 */
static int mixpi_adds_norm(mixp_context *ctx, const mixp_tensor *a, const mixp_tensor *b,
                           mixp_op_id norm) {
    const mixpi_watch *w = ctx->watch;
    if (!ctx->device->kernels->add_norm || (w && (w->sampled || w->tap))) return 0;
    if (mixpi_class_of(ctx, mixp_op_builtin(MIXP_OP_ADD)) == MIXP_CLASS_LOW ||
        mixpi_class_of(ctx, mixp_op_builtin(norm)) == MIXP_CLASS_LOW) return 0;
    if (!a || !b || a->rank != b->rank || a->rank < 1 || a->count < 1) return 0;
    return memcmp(a->shape, b->shape, (size_t)a->rank * sizeof *a->shape) == 0;
}

/* The sum, and what the norm behind it has to know. */
static mixp_tensor *mixpi_sum_before(mixp_context *ctx, mixp_tensor *a, mixp_tensor *b,
                                     mixp_norm_args *norm) {
    mixp_tensor *sum;
    mixp_binary_args k;
    memset(&k, 0, sizeof k);
    k.op = MIXP_BINARY_ADD;
    k.which = MIXPI_SUM_LATER;
    sum = mixpi_apply_op(ctx, MIXP_OP_ADD, 2, a, b, NULL, &k);
    if (!sum) return NULL;
    norm->a = mixpi_tensor_in(a);
    norm->b = mixpi_tensor_in(b);
    norm->sum = mixpi_tensor_out(sum, 0);
    return sum;
}

static mixp_tensor *mixpi_add_norm(mixp_context *ctx, mixp_op_id id, mixp_norm_args k,
                                   mixp_tensor *const *in, mixp_tensor **sum) {
    mixp_tensor *s, *y;
    if (sum) *sum = NULL;
    if (!ctx) return NULL;
    s = mixpi_adds_norm(ctx, in[0], in[1], id) ? mixpi_sum_before(ctx, in[0], in[1], &k)
                                               : mixp_add(ctx, in[0], in[1]);
    y = mixpi_apply_op(ctx, id, 1, s, in[2], in[3], &k);
    if (sum && y) *sum = s;
    return y;
}

MIXPREC_API mixp_tensor *mixp_add_layer_norm(mixp_context *ctx, mixp_tensor *a,
                                             mixp_tensor *b, mixp_tensor *gamma,
                                             mixp_tensor *beta, float eps,
                                             mixp_tensor **sum) {
    mixp_tensor *in[4] = { a, b, gamma, beta };
    return mixpi_add_norm(ctx, MIXP_OP_LAYER_NORM, mixpi_norm_of(0, eps), in, sum);
}

MIXPREC_API mixp_tensor *mixp_add_rms_norm(mixp_context *ctx, mixp_tensor *a,
                                           mixp_tensor *b, mixp_tensor *gamma, float eps,
                                           mixp_tensor **sum) {
    mixp_tensor *in[4] = { a, b, gamma, NULL };
    return mixpi_add_norm(ctx, MIXP_OP_RMS_NORM, mixpi_norm_of(1, eps), in, sum);
}

/* --- embedding ------------------------------------------------------------------------- */

/* A kernel whose indices lie in host memory has refused them: says which is wrong. */
static mixp_result mixpi_bad_index(mixp_call *c, const char *what, int64_t limit,
                                   int64_t ignore) {
    const mixp_tensor *t = c->in[c->in[2] ? 2 : 1];     /* the indices come last */
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
        k.step = mixpi_random_step(ctx);
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

/* Is this call the only reader of its input i, which a product made? A product's backward pass does
 * not look at its result. */
static int mixpi_call_reads_alone(const mixp_call *c, int i) {
    const mixp_op *makers[2];
    const mixpi_tape_entry *e;
    int readers = 0, made = 0, k;
    makers[0] = mixp_op_builtin(MIXP_OP_LINEAR);
    makers[1] = mixp_op_builtin(MIXP_OP_MATMUL);
    for (e = c->ctx->tape; e; e = e->older) {
        if (e->call.out == c->in[i])
            made = e->call.op == makers[0] || e->call.op == makers[1];
        for (k = 0; k < e->call.n_in; k++) readers += e->call.in[k] == c->in[i];
    }
    return made && readers == 1;
}

/* Lays the gradient of input i over its values, where these are read no more. */
static void mixpi_call_grad_over(mixp_call *c, int i) {
    mixp_tensor *t = c->in[i], *g;
    /* plant: grad_over */
    if (!t->own.disposable || t->requires_grad || !mixpi_call_reads_alone(c, i)) return;
    g = t->own.pending ? NULL : mixpi_grad_record(t);
    if (g && !g->data) g->data = t->data;
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
    mixpi_call_grad_over(c, 0);
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

/* --- a product and its cross entropy, some rows at a time --- */

typedef struct mixpi_chunked {
    mixp_cross_entropy_args k;  /* of the whole; logits and lse of the chunk at hand       */
    int64_t chunk, width;       /* rows at a time; columns of x and w                      */
    mixp_in x, w;
} mixpi_chunked;

static mixp_result mixpi_chunked_infer(mixp_call *c) {
    const mixpi_chunked *h = (const mixpi_chunked *)c->attrs;
    const mixp_tensor *x = c->in[0], *w = c->in[1], *targets = c->in[2];
    if (mixpi_need_indices_after(c, 2) != MIXP_OK) return MIXP_ERR_DTYPE;
    if (x->rank < 1 || w->rank != 2 || w->shape[1] != mixpi_last_dim(x) ||
        targets->count != mixpi_rows_of(x))
        return mixpi_bad_shapes(c, "x[..., in], w[vocab, in] and targets[...]");
    if (h->chunk < 0)
        return mixp_context_fail(c->ctx, MIXP_ERR_ARGUMENT,
                                 "linear_cross_entropy: a chunk of %.0f rows; give at least "
                                 "one, or 0 for as many as seem good",
                                 (double)h->chunk);
    return mixpi_call_output_fixed(c, MIXP_F32, 0, NULL);
}

/* An eighth of the rows, or 2^22 logits: fewer make the products slow. */
static int64_t mixpi_chunked_chunk(int64_t asked, int64_t rows, int64_t vocab) {
    int64_t eighth = mixpi_ceil_div(rows, 8), good = ((int64_t)1 << 22) / vocab;
    if (asked) return mixpi_min(asked, rows);
    return mixpi_min(eighth > good ? eighth : good, rows);
}

/* Rows [first, first + rows) of a matrix so wide. */
static mixp_in mixpi_rows_at(mixp_in m, int64_t first, int64_t width) {
    return mixpi_in_at(m, first * width);
}

/* The logits of the chunk that begins at row `first`. */
static mixp_result mixpi_chunked_logits(mixp_call *c, const mixpi_chunked *h, int64_t first,
                                     mixp_tensor *logits) {
    mixp_in x = mixpi_rows_at(h->x, first, h->width);
    mixp_gemm_args g = mixpi_gemm_of(mixpi_min(h->chunk, h->k.rows - first), h->k.cols,
                                     h->width, mixpi_stored(x, 0), mixpi_turned(h->w, 0));
    g.c = mixpi_tensor_out(logits, 0);
    return MIXPI_RUN(c, gemm, &g);
}

/* Room for the logits of one chunk, in the dtype that a product would give them. */
static mixp_tensor *mixpi_chunked_room(mixp_call *c, const mixpi_chunked *h) {
    int64_t count = h->chunk * h->k.cols;
    return mixp_activation(c->ctx, c->in[0]->dtype, 1, &count);
}

static mixp_result mixpi_chunked_loss(mixp_call *c, const mixpi_chunked *h, int64_t first,
                                   mixp_tensor *logits) {
    mixp_cross_entropy_args k = h->k;
    k.rows = mixpi_min(h->chunk, h->k.rows - first);
    k.targets += first;
    k.lse += first;
    k.logits = mixpi_tensor_in(logits);
    k.before = first;
    return MIXPI_RUN(c, cross_entropy, &k);
}

static mixp_result mixpi_chunked_forward(mixp_call *c) {
    mixpi_chunked *h = (mixpi_chunked *)c->attrs;
    mixp_tensor *logits;
    mixp_result r = MIXP_OK;
    int64_t first;
    h->k.rows = mixpi_rows_of(c->in[0]);
    h->k.cols = c->in[1]->shape[0];
    h->width = c->in[1]->shape[1];
    h->chunk = mixpi_chunked_chunk(h->chunk, h->k.rows, h->k.cols);
    h->x = mixpi_call_x(c, 0);
    h->w = mixpi_call_x(c, 1);
    h->k.targets = (const int32_t *)c->in[2]->data;
    logits = mixpi_chunked_room(c, h);
    if (!logits || !mixp_call_save(c, 0, MIXP_F32, 1, &h->k.rows) ||
        !mixp_call_save(c, 1, MIXP_F32, 0, NULL))
        return MIXP_ERR_MEMORY;
    h->k.loss = (float *)c->out->data;
    h->k.lse = mixpi_saved(c, 0);
    h->k.counted = mixpi_saved(c, 1);
    for (first = 0; first < h->k.rows && r == MIXP_OK; first += h->chunk) {
        r = mixpi_chunked_logits(c, h, first, logits);
        if (r == MIXP_OK) r = mixpi_chunked_loss(c, h, first, logits);
    }
    mixpi_arena_give(c->ctx, &c->ctx->dev, logits->data, mixpi_bytes(logits));
    return r == MIXP_ERR_ARGUMENT ? mixpi_bad_index(c, "target", h->k.cols, h->k.ignore) : r;
}

/* The gradient of a chunk's logits, over these. */
static mixp_result mixpi_chunked_dlogits(mixp_call *c, const mixpi_chunked *h, int64_t first,
                                      mixp_tensor *logits) {
    mixp_cross_entropy_backward_args k;
    memset(&k, 0, sizeof k);
    k.rows = mixpi_min(h->chunk, h->k.rows - first);
    k.cols = h->k.cols;
    k.ignore = h->k.ignore;
    k.targets = h->k.targets + first;
    k.dloss = mixpi_call_dy(c);
    k.logits = mixpi_tensor_in(logits);
    k.lse = h->k.lse + first;
    k.counted = h->k.counted;
    k.dlogits = mixpi_tensor_out(logits, 0);
    return MIXPI_RUN(c, cross_entropy_backward, &k);
}

/* dx of the chunk's rows, and its part of dw. */
static mixp_result mixpi_chunked_products(mixp_call *c, const mixpi_chunked *h, int64_t first,
                                       mixp_in dlogits, mixp_out dx, mixp_out dw) {
    int64_t rows = mixpi_min(h->chunk, h->k.rows - first);
    mixp_in x = mixpi_rows_at(h->x, first, h->width);
    mixp_gemm_args g = mixpi_gemm_of(rows, h->width, h->k.cols, mixpi_stored(dlogits, 0),
                                     mixpi_stored(h->w, 0));
    mixp_result r = MIXP_OK;
    g.c = dx;
    if (dx.data) {
        g.c.data = (char *)dx.data + (size_t)(first * h->width) * mixp_dtype_size(dx.dtype);
        r = MIXPI_RUN(c, gemm, &g);
    }
    if (!dw.data || r != MIXP_OK) return r;
    g = mixpi_gemm_of(h->k.cols, h->width, rows, mixpi_turned(dlogits, 0),
                      mixpi_stored(x, 0));
    g.c = dw;
    return MIXPI_RUN(c, gemm, &g);
}

/* The sum over chunks is f32; a dw of fewer bits is rounded once, at the end. */
static mixp_result mixpi_chunked_walk(mixp_call *c, const mixpi_chunked *h, mixp_tensor *logits,
                                   mixp_out dw) {
    mixp_out dx = mixpi_call_dx(c, 0);
    mixp_result r = MIXP_OK;
    int64_t first;
    for (first = 0; first < h->k.rows && r == MIXP_OK; first += h->chunk) {
        r = mixpi_chunked_logits(c, h, first, logits);
        if (r == MIXP_OK) r = mixpi_chunked_dlogits(c, h, first, logits);
        if (r == MIXP_OK)
            r = mixpi_chunked_products(c, h, first, mixpi_tensor_in(logits), dx, dw);
        dw.accumulate = 1;
    }
    return r;
}

static mixp_result mixpi_chunked_backward(mixp_call *c) {
    const mixpi_chunked *h = (const mixpi_chunked *)c->attrs;
    mixp_tensor *logits = mixpi_chunked_room(c, h), *sums = NULL;
    mixp_out dw = mixpi_call_dx(c, 1);
    int64_t count = h->k.cols * h->width;
    mixp_result r;
    if (!logits) return MIXP_ERR_MEMORY;
    if (!dw.data || dw.dtype == MIXP_F32 || h->chunk == h->k.rows) {
        r = mixpi_chunked_walk(c, h, logits, dw);
    } else {
        sums = mixp_activation(c->ctx, MIXP_F32, 1, &count);
        if (!sums) return MIXP_ERR_MEMORY;
        r = mixpi_chunked_walk(c, h, logits, mixpi_tensor_out(sums, 0));
        if (r == MIXP_OK) r = mixpi_add_into(c->ctx, dw, mixpi_tensor_in(sums), count);
        mixpi_arena_give(c->ctx, &c->ctx->dev, sums->data, mixpi_bytes(sums));
    }
    mixpi_arena_give(c->ctx, &c->ctx->dev, logits->data, mixpi_bytes(logits));
    return r;
}

MIXPREC_API mixp_tensor *mixp_linear_cross_entropy(mixp_context *ctx, mixp_tensor *x,
                                                   mixp_tensor *w, mixp_tensor *targets,
                                                   int32_t ignore, int64_t chunk) {
    mixpi_chunked h;
    memset(&h, 0, sizeof h);
    h.k.ignore = ignore;
    h.chunk = chunk;
    return mixpi_apply_op(ctx, MIXP_OP_LINEAR_CROSS_ENTROPY, 3, x, w, targets, &h);
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
    if (first < 0 || p->count < 1 || first > size - p->count)
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
        MIXPI_OP(linear_cross_entropy, LOW, sizeof(mixpi_chunked),
                 chunked, chunked),
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
    uint64_t           began;   /* step of the first loss since the update; 0 = none yet */
    uint64_t           first;   /* that of the update before */
    uint64_t           retried; /* its epoch when a retry was asked for last */
    int                tries;   /* retries in a row */
};

/* --- rules ------------------------------------------------------------------------------ */

/* Finite, by its bits: fast-math must not delete it. */
static int mixpi_finite(double x) { return mixpi_f64_is_finite(x); }

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
      recovery_scale, fixed, delay, divides, f32_factors, 0, 3, 4, 65504.0f },
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
    MIXPI_RULE(65536,      0, 0,          16,   1, MIXPI_CLEAN,  1,   0,  0, 0, 0, 0) /* predict */
};
#undef MIXPI_RULE
#undef MIXPI_CLEAN
#undef MIXPI_GROWTH
#undef MIXPI_RUN_OF

/* Fields that a running scaler may change: where one is not 0 in `from`, it replaces that of
 * `to`, a rule or another description. */
#define MIXPI_CHANGES(X) X(growth_factor) X(backoff_factor) X(growth_interval) X(hysteresis) \
                         X(min_scale) X(max_scale) X(recovery_interval) X(recovery_scale) \
                         X(margin) X(max_move) X(low_largest)
#define MIXPI_TAKE(field) if (from->field != 0) to->field = from->field;

static int mixpi_desc_is_finite(const mixp_scaler_desc *d) {
    return mixpi_finite(d->growth_factor) && mixpi_finite(d->backoff_factor) &&
           mixpi_finite((double)d->init_scale) && mixpi_finite((double)d->min_scale) &&
           mixpi_finite((double)d->max_scale) &&
           mixpi_finite((double)d->recovery_scale) &&
           mixpi_finite((double)d->low_largest);
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

/* What is wrong with how a rule predicts, or NULL. */
static const char *mixpi_rule_aim_wrong(const mixp_scaler_rule *r) {
    if (r->margin < 1 || r->margin > 30) return "margin must lie in [1, 30] binades";
    if (r->max_move < 1 || r->max_move > 252)
        return "max_move must lie in [1, 252] binades";
    if (!(r->low_largest > 0.0f)) return "low_largest must be above 0";
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
    r.predicts = from->rule == MIXP_RULE_PREDICTIVE;
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
    if (!wrong) wrong = mixpi_rule_aim_wrong(&r);
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
        MIXP_RULE_TORCH, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0
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
    if (!c->out->grad && mixpi_guard_on(c->ctx)) k.bad = &scaler->state->loss_bad;
    return k.y.data ? MIXPI_RUN(c, scale_by, &k) : MIXP_OK;
}

MIXPREC_API mixp_tensor *mixp_scaler_scale(mixp_scaler *scaler, mixp_tensor *loss) {
    static const mixp_op op =
        MIXPI_BOTH(scaler_scale, F32, sizeof(mixp_scaler *), scale, scale);
    if (!scaler || !loss || scaler->desc.disabled) return scaler ? loss : NULL;
    if (!scaler->began) scaler->began = scaler->ctx->step;
    return mixp_apply(scaler->ctx, &op, 1, &loss, 1, &scaler);
}

/* ==== 10. OPTIMIZERS (implementation) ================================================== */

/* A parameter as the host sees it; the row of the same index is what kernels see. */
typedef struct mixpi_slot {
    mixp_tensor *param;
    mixp_tensor *grad;          /* the caller's view, or NULL: param->grad                 */
    uint64_t     version;       /* of param, when its master weight last agreed with it    */
    int          owner;         /* the rank that updates it, where states are sharded      */
} mixpi_slot;

/* How the gradient of one parameter lay in its low dtype. */
typedef struct mixpi_grad_tally {
    mixp_look look;
    int64_t   exponents[MIXP_EXPONENTS];
} mixpi_grad_tally;

enum { MIXPI_READY, MIXPI_UNSCALED, MIXPI_STEPPED };

/* A matrix is updated in three passes of the kernel `update`, each with a row of its own. */
enum { MIXPI_MUON_MOMENTUM, MIXPI_MUON_UNIT, MIXPI_MUON_LAST, MIXPI_MUON_PASSES };

/* What Muon works with: device memory for the largest matrix, and the rows of its passes. */
typedef struct mixpi_muon {
    double   a, b, c;
    int      iterations, f32;
    mixp_muon_rate rate;
    int64_t  elements, side;    /* room: for a matrix, for its smaller side                */
    mixp_out x, gram, poly;     /* X, A and b A + c A A, in the iteration's dtype          */
    float   *x_sum, *poly_sum;  /* the last two in f32                                     */
    int64_t  room;              /* rows of the optimizer that there is room for            */
    mixp_param_row  *rows, *device_rows;
    mixp_step_state *look;      /* at the direction: its norm                              */
} mixpi_muon;

struct mixp_optimizer {
    mixp_context    *ctx;
    mixp_step_plan   plan;
    mixp_optimizer_states states;
    int              no_master, zero_grad;
    int64_t          count, capacity;
    mixpi_slot      *slots;
    mixp_param_row  *rows, *device_rows;    /* what kernels should see, and do see         */
    int              rows_changed;
    int              clipped;   /* the statistics are those of the last clip: keep them    */
    uint64_t         clipped_versions;  /* of the gradients, added up, at that clip        */
    mixp_step_state *state;     /* device memory                                           */
    uint64_t         loss_of;   /* the context's generation when plan.loss was set      */
    /* In one block, in device memory and in a copy of the host's: of each parameter. */
    mixp_lost       *lost, *lost_copy;
    mixpi_grad_tally *tally, *tally_copy;
    int              tally_here;    /* 1: the copy is the newest                        */
    int              tally_recorded; /* 1: a graph counts, too, and nobody is told      */
    int64_t          tallies;   /* how many there is memory for                         */
    int              tally_due; /* 1: the next look at the gradients counts, too        */
    int              tallied;   /* 1: those of this step are counted                    */
    int64_t          tally_step;    /* the context's then, and 1                        */
    /* What a scaler did to it last, and when. It counts until that scaler's update, which speaks
     * for all optimizers in its list. */
    mixp_scaler     *scaler;
    uint64_t         epoch;
    int              stage;
    mixp_optimizer  *next_checked;
    double          *table;     /* in which ranks agree; device memory, made at its first use */
    mixpi_muon      *muon;      /* NULL: another kind                                      */
    /* Where states are sharded: elements that each rank owns, the table that update sees, in which
     * the others' rows are inactive, and a slice of the weights of every rank. */
    int64_t         *owned;
    mixp_param_row  *own_rows, *device_own_rows;
    void            *slices;
    size_t           slice;     /* bytes of a slice that there is room for                 */
};

/* --- making, groups -------------------------------------------------------------------- */

/* What is not set is 0: kinds, orders and schedules count from what is the default. */
MIXPREC_API mixp_adamw_desc mixp_adamw_defaults(void) {
    mixp_adamw_desc d;
    memset(&d, 0, sizeof d);
    d.lr = 1e-3;
    d.beta1 = 0.9;
    d.beta2 = 0.999;
    d.eps = 1e-8;
    d.weight_decay = 0.01;
    return d;
}

MIXPREC_API mixp_adam_desc mixp_adam_defaults(void) {
    mixp_adam_desc d;
    memset(&d, 0, sizeof d);
    d.lr = 1e-3;
    d.beta1 = 0.9;
    d.beta2 = 0.999;
    d.eps = 1e-8;
    return d;
}

MIXPREC_API mixp_sgd_desc mixp_sgd_defaults(void) {
    mixp_sgd_desc d;
    memset(&d, 0, sizeof d);
    d.lr = 1e-3;
    return d;
}

MIXPREC_API mixp_rmsprop_desc mixp_rmsprop_defaults(void) {
    mixp_rmsprop_desc d;
    memset(&d, 0, sizeof d);
    d.lr = 1e-2;
    d.alpha = 0.99;
    d.eps = 1e-8;
    return d;
}

MIXPREC_API mixp_lion_desc mixp_lion_defaults(void) {
    mixp_lion_desc d;
    memset(&d, 0, sizeof d);
    d.lr = 1e-4;
    d.beta1 = 0.9;
    d.beta2 = 0.99;
    return d;
}

MIXPREC_API mixp_muon_desc mixp_muon_defaults(void) {
    mixp_muon_desc d;
    memset(&d, 0, sizeof d);
    d.lr = 1e-3;
    d.momentum = 0.95;
    d.weight_decay = 0.1;
    d.eps = 1e-7;
    d.a = 3.4445;
    d.b = -4.7750;
    d.c = 2.0315;
    d.iterations = 5;
    d.nesterov = 1;
    return d;
}

static int mixpi_at_least_0(double x) { return mixpi_finite(x) && x >= 0.0; }
static int mixpi_is_beta(double x) { return mixpi_at_least_0(x) && x < 1.0; }

/* Adam's and RMSprop's moments of the second order are divided by. */
static int mixpi_has_v(mixp_optimizer_kind kind)
{ return kind < MIXP_OPTIMIZER_SGD || kind == MIXP_OPTIMIZER_RMSPROP; }

/* Is m kept? SGD and RMSprop do where there is momentum, the same in all groups. */
static int mixpi_momentum_counts(mixp_optimizer_kind kind)
{ return kind == MIXP_OPTIMIZER_SGD || kind == MIXP_OPTIMIZER_RMSPROP; }
static int mixpi_has_m(const mixp_step_plan *plan)
{ return !mixpi_momentum_counts(plan->kind) || plan->groups[0].momentum > 0.0; }

/* Did somebody set lr alone, in a struct of zeros? Adam would divide by 0. */
static int mixpi_group_zeroed(mixp_optimizer_kind kind, const mixp_param_group *g) {
    return mixpi_has_v(kind) && mixpi_at_least_0(g->beta2) && g->beta2 + g->eps <= 0.0;
}

/* What is wrong with the betas and eps of those that have them, or NULL. */
static const char *mixpi_betas_wrong(mixp_optimizer_kind kind,
                                     const mixp_param_group *g) {
    const char *second = kind == MIXP_OPTIMIZER_RMSPROP ? "alpha (beta2) must lie in [0,1)"
                                                        : "beta2 must lie in [0,1)";
    if (!mixpi_is_beta(g->beta1)) return "beta1 must lie in [0,1)";
    if (!mixpi_is_beta(g->beta2)) return second;
    if (mixpi_group_zeroed(kind, g)) return "beta2 and eps are 0: start from the defaults";
    if (kind == MIXP_OPTIMIZER_MUON && !(g->eps > 0.0))
        return "Muon's eps must be above 0: start from mixp_optimizer_group(opt, 0, &g)";
    return mixpi_at_least_0(g->eps) ? NULL : "eps must be finite and at least 0";
}

/* What is wrong with a group, or NULL. */
static const char *mixpi_group_wrong(mixp_optimizer_kind kind,
                                     const mixp_param_group *g) {
    if (!mixpi_at_least_0(g->lr)) return "lr must be finite and at least 0";
    if (!mixpi_at_least_0(g->weight_decay))
        return "weight_decay must be finite and at least 0";
    if (!mixpi_at_least_0(g->momentum)) return "momentum must be finite and at least 0";
    if (kind != MIXP_OPTIMIZER_SGD) return mixpi_betas_wrong(kind, g);
    if (!mixpi_finite(g->dampening)) return "dampening must be finite";
    if (g->nesterov && (g->momentum <= 0.0 || g->dampening < 0.0 || g->dampening > 0.0))
        return "nesterov needs momentum and no dampening";
    return NULL;
}

static const char *mixpi_states_wrong(const mixp_optimizer_states *s, int no_master) {
    if ((unsigned)s->m > MIXP_MOMENT_8BIT) return "states.m is none of mixp_moment_kind";
    if ((unsigned)s->v > MIXP_MOMENT_8BIT) return "states.v is none of mixp_moment_kind";
    if ((unsigned)s->master > MIXP_MASTER_8BIT)
        return "states.master is none of mixp_master_kind";
    if (no_master && s->master != MIXP_MASTER_F32)
        return "no_master and states.master contradict each other";
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

/* Fills in the defaults of a rule; what is wrong with it, or NULL. */
static const char *mixpi_spike_resolve(mixp_spike_rule *r) {
    if ((unsigned)r->of > MIXP_SPIKE_BOTH) return "spike.of is none of mixp_spike_of";
    if (r->window == 0) r->window = 128;
    if (r->max_in_a_row == 0) r->max_in_a_row = 8;
    if (!mixpi_at_least_0(r->z)) return "spike.z must be finite and at least 0";
    if (!(r->z > 0.0)) r->z = 6.0;
    if (r->window >= 4 && r->window <= 4096) return NULL;
    return "spike.window must lie in [4, 4096]";
}

/* What all kinds have in common; their hyper-parameters are in a group. */
typedef struct mixpi_optimizer_desc {
    mixp_optimizer_kind     kind;
    mixp_adam_order    order;
    double        max_norm;
    int           no_master, zero_grad, cautious;
    mixp_schedule schedule;
    mixp_optimizer_states states;
    mixp_spike_rule spike;
} mixpi_optimizer_desc;

/* Every description has these under the same names: so none of them can be left out of one. */
#define MIXPI_SHARED_SETTINGS(to, from)                                                   \
    do {                                                                                  \
        (to).max_norm = (from).max_norm;                                                  \
        (to).no_master = (from).no_master;                                                \
        (to).zero_grad = (from).zero_grad;                                                \
        (to).schedule = (from).schedule;                                                  \
        (to).states = (from).states;                                                      \
        (to).spike = (from).spike;                                                        \
    } while (0)

/* Memory for the values of applied steps; 0: there is none. */
static int mixpi_spike_start(mixp_optimizer *opt) {
    size_t values = (size_t)opt->plan.spike.window * MIXPI_SPIKE_KINDS;
    if (!opt->plan.spike.of) return 1;
    opt->plan.spike_window =
        (double *)mixpi_device_alloc(opt->ctx, values * sizeof(double));
    return opt->plan.spike_window != NULL;
}

static mixp_optimizer *mixpi_optimizer_new(mixp_context *ctx, const char *who,
                                           const mixp_param_group *group,
                                           const mixpi_optimizer_desc *d) {
    const char *wrong = mixpi_group_wrong(d->kind, group);
    mixp_spike_rule spike = d->spike;
    mixp_optimizer *opt;
    if (!wrong) wrong = mixpi_spike_resolve(&spike);
    if (!wrong) wrong = mixpi_schedule_wrong(&d->schedule);
    if (!wrong) wrong = mixpi_states_wrong(&d->states, d->no_master);
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
    opt->plan.spike = spike;
    opt->plan.groups[0] = *group;
    opt->plan.n_groups = 1;
    opt->plan.cautious = d->cautious != 0;
    opt->states = d->states;
    opt->no_master = d->no_master;
    opt->zero_grad = d->zero_grad;
    opt->state = (mixp_step_state *)mixpi_device_alloc(ctx, sizeof *opt->state);
    if (mixpi_is_sharded(ctx)) {
        opt->owned = (int64_t *)mixpi_host_alloc(
            ctx, (size_t)ctx->ranks.size * sizeof *opt->owned);
        if (!opt->owned) return NULL;
    }
    return opt->state && mixpi_spike_start(opt) ? opt : NULL;
}

MIXPREC_API mixp_optimizer *mixp_adamw_new(mixp_context *ctx,
                                           const mixp_adamw_desc *desc) {
    mixp_adamw_desc d = desc ? *desc : mixp_adamw_defaults();
    mixp_param_group g;
    mixpi_optimizer_desc common;
    memset(&g, 0, sizeof g);
    memset(&common, 0, sizeof common);
    g.lr = d.lr;
    g.beta1 = d.beta1;
    g.beta2 = d.beta2;
    g.eps = d.eps;
    g.weight_decay = d.weight_decay;
    common.kind = MIXP_OPTIMIZER_ADAMW;
    common.order = d.order;
    common.cautious = d.cautious;
    MIXPI_SHARED_SETTINGS(common, d);
    return mixpi_optimizer_new(ctx, "mixp_adamw_new", &g, &common);
}

MIXPREC_API mixp_optimizer *mixp_adam_new(mixp_context *ctx, const mixp_adam_desc *desc) {
    mixp_adam_desc d = desc ? *desc : mixp_adam_defaults();
    mixp_param_group g;
    mixpi_optimizer_desc common;
    memset(&g, 0, sizeof g);
    memset(&common, 0, sizeof common);
    g.lr = d.lr;
    g.beta1 = d.beta1;
    g.beta2 = d.beta2;
    g.eps = d.eps;
    g.weight_decay = d.weight_decay;
    common.kind = MIXP_OPTIMIZER_ADAM;
    common.order = d.order;
    MIXPI_SHARED_SETTINGS(common, d);
    return mixpi_optimizer_new(ctx, "mixp_adam_new", &g, &common);
}

MIXPREC_API mixp_optimizer *mixp_sgd_new(mixp_context *ctx, const mixp_sgd_desc *desc) {
    mixp_sgd_desc d = desc ? *desc : mixp_sgd_defaults();
    mixp_param_group g;
    mixpi_optimizer_desc common;
    memset(&g, 0, sizeof g);
    memset(&common, 0, sizeof common);
    g.lr = d.lr;
    g.weight_decay = d.weight_decay;
    g.momentum = d.momentum;
    g.dampening = d.dampening;
    g.nesterov = d.nesterov;
    common.kind = MIXP_OPTIMIZER_SGD;
    MIXPI_SHARED_SETTINGS(common, d);
    return mixpi_optimizer_new(ctx, "mixp_sgd_new", &g, &common);
}

MIXPREC_API mixp_optimizer *mixp_rmsprop_new(mixp_context *ctx,
                                             const mixp_rmsprop_desc *desc) {
    mixp_rmsprop_desc d = desc ? *desc : mixp_rmsprop_defaults();
    mixp_param_group g;
    mixpi_optimizer_desc common;
    memset(&g, 0, sizeof g);
    memset(&common, 0, sizeof common);
    g.lr = d.lr;
    g.beta2 = d.alpha;
    g.eps = d.eps;
    g.weight_decay = d.weight_decay;
    g.momentum = d.momentum;
    common.kind = MIXP_OPTIMIZER_RMSPROP;
    MIXPI_SHARED_SETTINGS(common, d);
    return mixpi_optimizer_new(ctx, "mixp_rmsprop_new", &g, &common);
}

MIXPREC_API mixp_optimizer *mixp_lion_new(mixp_context *ctx, const mixp_lion_desc *desc) {
    mixp_lion_desc d = desc ? *desc : mixp_lion_defaults();
    mixp_param_group g;
    mixpi_optimizer_desc common;
    memset(&g, 0, sizeof g);
    memset(&common, 0, sizeof common);
    g.lr = d.lr;
    g.beta1 = d.beta1;
    g.beta2 = d.beta2;
    g.weight_decay = d.weight_decay;
    common.kind = MIXP_OPTIMIZER_LION;
    common.cautious = d.cautious;
    MIXPI_SHARED_SETTINGS(common, d);
    return mixpi_optimizer_new(ctx, "mixp_lion_new", &g, &common);
}

/* What is wrong with what Muon alone has, or NULL. */
static const char *mixpi_muon_wrong(const mixp_muon_desc *d) {
    if (!mixpi_finite(d->a) || !mixpi_finite(d->b) || !mixpi_finite(d->c))
        return "a, b and c must be finite";
    if (d->iterations < 1 || d->iterations > 99) return "iterations must lie in [1, 99]";
    if ((unsigned)d->rate > MIXP_MUON_RATE_MATCH_RMS_ADAMW)
        return "rate is none of mixp_muon_rate";
    return d->eps > 0.0 ? NULL : "eps must be above 0: start from mixp_muon_defaults";
}

/* Gives opt what Muon works with. NULL: out of memory. */
static mixp_optimizer *mixpi_muon_start(mixp_optimizer *opt, const mixp_muon_desc *d) {
    mixpi_muon *m = opt ? (mixpi_muon *)mixpi_host_alloc(opt->ctx, sizeof *m) : NULL;
    if (!m) return NULL;
    m->a = d->a;
    m->b = d->b;
    m->c = d->c;
    m->iterations = d->iterations;
    m->f32 = d->f32 != 0;
    m->rate = d->rate;
    m->look = (mixp_step_state *)mixpi_device_alloc(opt->ctx, sizeof *m->look);
    opt->muon = m;
    return m->look ? opt : NULL;
}

MIXPREC_API mixp_optimizer *mixp_muon_new(mixp_context *ctx, const mixp_muon_desc *desc) {
    mixp_muon_desc d = desc ? *desc : mixp_muon_defaults();
    const char *wrong = mixpi_muon_wrong(&d);
    mixp_param_group g;
    mixpi_optimizer_desc common;
    memset(&g, 0, sizeof g);
    memset(&common, 0, sizeof common);
    g.lr = d.lr;
    g.momentum = d.momentum;
    g.weight_decay = d.weight_decay;
    g.eps = d.eps;
    g.nesterov = d.nesterov != 0;
    common.kind = MIXP_OPTIMIZER_MUON;
    common.cautious = d.cautious;
    MIXPI_SHARED_SETTINGS(common, d);
    if (wrong) mixp_context_fail(ctx, MIXP_ERR_ARGUMENT, "mixp_muon_new: %s", wrong);
    if (wrong) return NULL;
    return mixpi_muon_start(mixpi_optimizer_new(ctx, "mixp_muon_new", &g, &common), &d);
}

/* Writes group `index`, if it is one of `count`. */
static mixp_result mixpi_group_put(mixp_optimizer *opt, int index, int count,
                                   const mixp_param_group *group) {
    const char *wrong = mixpi_group_wrong(opt->plan.kind, group);
    if (mixpi_momentum_counts(opt->plan.kind) &&
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

/* Is parameter i updated by this rank? */
static int mixpi_is_own(const mixp_optimizer *opt, int64_t i)
{ return !opt->owned || opt->slots[i].owner == opt->ctx->ranks.rank; }

/* The rank that gets a parameter of so many elements: the lowest of those that have the fewest. */
static int mixpi_owner_next(mixp_optimizer *opt, int64_t count) {
    int r, least = 0;
    if (!opt->owned) return 0;
    for (r = 1; r < opt->ctx->ranks.size; r++)
        if (opt->owned[r] < opt->owned[least]) least = r;
    opt->owned[least] += count;
    return least;
}

/* Room for the tables that a sharded optimizer has besides. */
static mixp_result mixpi_own_rows_grow(mixp_optimizer *opt, size_t bytes) {
    mixp_param_row *rows, *device;
    if (!opt->owned) return MIXP_OK;
    rows = (mixp_param_row *)mixpi_host_alloc(opt->ctx, bytes);
    device = (mixp_param_row *)mixpi_device_alloc(opt->ctx, bytes);
    if (!rows || !device) return MIXP_ERR_MEMORY;
    opt->own_rows = rows;
    opt->device_own_rows = device;
    return MIXP_OK;
}

static mixp_result mixpi_optimizer_grow(mixp_optimizer *opt) {
    int64_t n = opt->capacity ? 2 * opt->capacity : 32;
    size_t bytes = (size_t)n * sizeof(mixp_param_row);
    mixpi_slot *slots =
        (mixpi_slot *)mixpi_host_alloc(opt->ctx, (size_t)n * sizeof *slots);
    mixp_param_row *rows = (mixp_param_row *)mixpi_host_alloc(opt->ctx, bytes);
    mixp_param_row *device = (mixp_param_row *)mixpi_device_alloc(opt->ctx, bytes);
    if (!slots || !rows || !device) return MIXP_ERR_MEMORY;
    if (mixpi_own_rows_grow(opt, bytes) != MIXP_OK) return MIXP_ERR_MEMORY;
    if (opt->count) memcpy(slots, opt->slots, (size_t)opt->count * sizeof *slots);
    /* plant: rows_grow */
    if (opt->count) memcpy(rows, opt->rows, (size_t)opt->count * sizeof *rows);
    opt->slots = slots; opt->rows = rows; opt->device_rows = device; opt->capacity = n;
    opt->rows_changed = 1;      /* nothing was sent there yet */
    return MIXP_OK;
}

/* The stage, given that a scaler's update forgets it. */
static int mixpi_stage(const mixp_optimizer *opt)
{ return opt->scaler && opt->epoch == opt->scaler->epoch ? opt->stage : MIXPI_READY; }

/* Does a parameter, added now, keep f32 states whatever the description says? */
static int mixpi_keeps_f32(const mixp_optimizer *opt, const mixp_tensor *p) {
    return p->rank < 2 || p->count < MIXP_STATE_SMALL ||
           opt->plan.groups[opt->plan.n_groups - 1].f32_states;
}

static int mixpi_master_is_split(const mixp_optimizer *opt, const mixp_tensor *p) {
    return opt->states.master != MIXP_MASTER_F32 && p->dtype != MIXP_F32 &&
           !mixpi_keeps_f32(opt, p);
}

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
    else if (g && opt->zero_grad && opt->owned)
        wrong = "has a view for its gradient: where states are sharded, zero_grad cannot clear it";
    else wrong = mixpi_add_clash(opt, p, g);
    if (!wrong && opt->muon && p->rank != 2) {
        code = MIXP_ERR_SHAPE;
        wrong = "is no matrix, which Muon's parameters are: give it to an AdamW";
    }
    if (!wrong && mixpi_master_is_split(opt, p) && p->dtype == MIXP_F16) {
        code = MIXP_ERR_DTYPE;
        wrong = "is f16, and states.master keeps what a bf16 weight lacks: make it bf16, or choose "
                "MIXP_MASTER_F32";
    }
    if (!wrong) return MIXP_OK;
    return mixp_context_fail(opt->ctx, code, "mixp_optimizer_add: '%s' %s", p->name,
                             wrong);
}

static mixp_result mixpi_master_sync(mixp_optimizer *opt, int64_t i) {
    const mixp_tensor *p = opt->slots[i].param;
    const mixp_param_row *row = &opt->rows[i];
    size_t size = mixp_dtype_size(row->master_dtype);
    opt->slots[i].version = p->version;
    if (!row->master) return MIXP_OK;
    if (mixpi_row_is_split(row))        /* nothing beside the weight as it was written */
        return mixpi_device_zero(opt->ctx, row->master, (size_t)p->count * size);
    return mixpi_convert_to(opt->ctx, mixpi_out_to(row->master, MIXP_F32, 0),
                            mixpi_tensor_in(p), p->count);
}

/* The dtypes of a parameter's states: how kernels know the kinds. */
static void mixpi_row_kinds(const mixp_optimizer *opt, const mixp_tensor *p,
                            mixp_param_row *row) {
    const mixp_optimizer_states *s = &opt->states;
    row->m_dtype = row->v_dtype = row->master_dtype = MIXP_F32;
    if (mixpi_keeps_f32(opt, p)) return;
    if (s->m == MIXP_MOMENT_BF16) row->m_dtype = MIXP_BF16;
    if (s->m == MIXP_MOMENT_8BIT) row->m_dtype = MIXP_F8_E4M3;
    if (s->v == MIXP_MOMENT_BF16) row->v_dtype = MIXP_BF16;
    if (s->v == MIXP_MOMENT_8BIT) row->v_dtype = MIXP_U8;
    if (!mixpi_has_m(&opt->plan)) row->m_dtype = MIXP_F32;
    if (!mixpi_has_v(opt->plan.kind)) row->v_dtype = MIXP_F32;
    if (!mixpi_master_is_split(opt, p)) return;
    row->master_dtype = s->master == MIXP_MASTER_16BIT ? MIXP_BF16 : MIXP_U8;
}

static int mixpi_row_is_small(const mixp_param_row *row) {
    return row->m_dtype != MIXP_F32 || row->v_dtype != MIXP_F32 ||
           row->master_dtype != MIXP_F32;
}
static int mixpi_is_8bit(mixp_dtype dtype)
{ return dtype == MIXP_F8_E4M3 || dtype == MIXP_U8; }
static int64_t mixpi_state_blocks(const mixp_param_row *row)
{ return mixpi_ceil_div(row->count, MIXP_STATE_BLOCK); }

/* Takes n elements from a piece of memory, which is only measured while it has no address. The gap
 * keeps streams of a power of two apart from falling on the same cache sets. */
typedef struct mixpi_layout {
    char  *memory;
    size_t used;
} mixpi_layout;

static void *mixpi_layout_take(mixpi_layout *lay, int wanted, int64_t n,
                              mixp_dtype dtype) {
    char *at = lay->memory ? lay->memory + lay->used : NULL;
    if (!wanted) return NULL;
    lay->used += mixpi_round_up((size_t)n * mixp_dtype_size(dtype)) + 320;
    return at;
}

/* Lays out what a row remembers. */
static void mixpi_row_layout(const mixp_optimizer *opt, mixp_param_row *row,
                             mixpi_layout *lay) {
    const int m = mixpi_has_m(&opt->plan), v = mixpi_has_v(opt->plan.kind);
    const int master = row->weight_dtype != MIXP_F32 && !opt->no_master;
    const int64_t blocks = mixpi_state_blocks(row);
    row->missed = (int64_t *)(void *)lay->memory;
    lay->used = 64;
    row->m = mixpi_layout_take(lay, m, row->count, row->m_dtype);
    row->v = mixpi_layout_take(lay, v, row->count, row->v_dtype);
    row->master = mixpi_layout_take(lay, master, row->count, row->master_dtype);
    row->m_scale = (uint8_t *)mixpi_layout_take(lay, mixpi_is_8bit(row->m_dtype), blocks,
                                               MIXP_F8_E8M0);
    row->v_scale = (uint8_t *)mixpi_layout_take(lay, mixpi_is_8bit(row->v_dtype), blocks,
                                               MIXP_F8_E8M0);
}

/* One piece of zeroed device memory: steps missed, moments, master weight. */
static mixp_result mixpi_row_memory(mixp_optimizer *opt, mixp_param_row *row,
                                    int64_t joined_at) {
    const size_t part = (size_t)row->count * sizeof(float);
    mixpi_layout lay = { NULL, 0 };
    if (part > ((size_t)-1 - 4096) / 4) return mixpi_out_of_memory(opt->ctx, part);
    mixpi_row_layout(opt, row, &lay);
    lay.memory = (char *)mixpi_device_alloc(opt->ctx, lay.used);
    if (!lay.memory) return MIXP_ERR_MEMORY;
    mixpi_row_layout(opt, row, &lay);
    return joined_at ? mixpi_upload(opt->ctx, row->missed, &joined_at, sizeof joined_at)
                     : MIXP_OK;
}

/* --- Muon's memory ----------------------------------------------------------------------- */

static int64_t mixpi_muon_side(const mixp_tensor *p)
{ return mixpi_min(p->shape[0], p->shape[1]); }

/* An array of n elements of the iteration's dtype; data NULL: out of memory. */
static mixp_out mixpi_muon_array(const mixp_optimizer *opt, int64_t n) {
    mixp_dtype dtype = opt->muon->f32 ? MIXP_F32 : MIXP_BF16;
    size_t bytes = (size_t)n * mixp_dtype_size(dtype);
    return mixpi_out_to(mixpi_device_alloc(opt->ctx, bytes), dtype, 0);
}
static float *mixpi_muon_floats(const mixp_optimizer *opt, int64_t n)
{ return (float *)mixpi_device_alloc(opt->ctx, (size_t)n * sizeof(float)); }

/* Room for matrix p, or, without memory, what there was. What was too small stays the context's. */
static mixp_result mixpi_muon_room(mixp_optimizer *opt, const mixp_tensor *p) {
    mixpi_muon more = *opt->muon;
    const int64_t side = mixpi_muon_side(p);
    if (p->count > more.elements) {
        more.x = mixpi_muon_array(opt, p->count);
        more.x_sum = mixpi_muon_floats(opt, p->count);
        more.elements = p->count;
        if (!more.x.data || !more.x_sum) return MIXP_ERR_MEMORY;
    }
    if (side > more.side) {
        more.gram = mixpi_muon_array(opt, side * side);
        more.poly = mixpi_muon_array(opt, side * side);
        more.poly_sum = mixpi_muon_floats(opt, side * side);
        more.side = side;
        if (!more.gram.data || !more.poly.data || !more.poly_sum) return MIXP_ERR_MEMORY;
    }
    if (more.x.data != opt->muon->x.data) opt->rows_changed = 1;    /* passes point there */
    *opt->muon = more;
    return MIXP_OK;
}

/* Room for the rows of its passes, as many as the optimizer has room for. */
static mixp_result mixpi_muon_rows_grow(mixp_optimizer *opt) {
    mixpi_muon *m = opt->muon;
    size_t bytes = (size_t)opt->capacity * MIXPI_MUON_PASSES * sizeof *m->rows;
    mixp_param_row *rows, *device;
    if (m->room == opt->capacity) return MIXP_OK;
    rows = (mixp_param_row *)mixpi_host_alloc(opt->ctx, bytes);
    device = (mixp_param_row *)mixpi_device_alloc(opt->ctx, bytes);
    if (!rows || !device) return MIXP_ERR_MEMORY;
    m->rows = rows;
    m->device_rows = device;
    m->room = opt->capacity;
    opt->rows_changed = 1;
    return MIXP_OK;
}

static mixp_result mixpi_muon_add(mixp_optimizer *opt, const mixp_tensor *p,
                                  mixp_param_row *row) {
    double rows = (double)p->shape[0], cols = (double)p->shape[1];
    double larger = rows > cols ? rows : cols;
    mixp_result r = mixpi_muon_room(opt, p);
    row->rate = (float)sqrt(rows > cols ? rows / cols : 1.0);
    if (opt->muon->rate == MIXP_MUON_RATE_MATCH_RMS_ADAMW)
        row->rate = (float)(0.2 * sqrt(larger));
    return r == MIXP_OK ? mixpi_muon_rows_grow(opt) : r;
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
    row->tensor = (uint64_t)param->own.id;
    mixpi_row_kinds(opt, param, row);
    if (opt->muon) r = mixpi_muon_add(opt, param, row);
    if (r != MIXP_OK) return r;
    opt->slots[opt->count].param = param; opt->slots[opt->count].grad = grad;
    opt->slots[opt->count].owner = mixpi_owner_next(opt, param->count);
    if (mixpi_is_own(opt, opt->count))
        r = mixpi_row_memory(opt, row, mixp_optimizer_applied(opt));
    if (r == MIXP_OK) r = mixpi_master_sync(opt, opt->count);
    if (r == MIXP_OK) { opt->count++; opt->rows_changed = 1; }
    else if (opt->owned) opt->owned[opt->slots[opt->count].owner] -= param->count;
    if (r == MIXP_OK && mixpi_row_is_small(row)) opt->plan.small = 1;
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
    mixpi_exchange_forget(opt->ctx);
    return r;
}

static const char *mixpi_loss_wrong(const mixp_optimizer *opt, const mixp_tensor *loss) {
    if (!((int)opt->plan.spike.of & MIXP_SPIKE_LOSS))
        return "spike.of in the description is neither MIXP_SPIKE_LOSS nor MIXP_SPIKE_BOTH";
    if (loss->ctx != opt->ctx) return "the loss is of another context";
    if (loss->count != 1) return "a loss has one element; take mixp_mean of these";
    if (loss->own.generation && loss->own.generation != opt->ctx->generation)
        return "the loss is of an earlier step";
    return NULL;
}

MIXPREC_API mixp_result mixp_optimizer_set_loss(mixp_optimizer *opt,
                                                const mixp_tensor *loss) {
    const char *wrong;
    if (!opt || !loss) return MIXP_ERR_ARGUMENT;
    wrong = mixpi_loss_wrong(opt, loss);
    if (wrong)
        return mixp_context_fail(opt->ctx, MIXP_ERR_ARGUMENT,
                                 "mixp_optimizer_set_loss: %s", wrong);
    if (loss->dtype != MIXP_F32)
        return mixp_context_fail(opt->ctx, MIXP_ERR_DTYPE,
                                 "mixp_optimizer_set_loss: the loss is %s; give one in f32",
                                 mixp_dtype_name(loss->dtype));
    opt->plan.loss = (const float *)loss->data;
    opt->loss_of = opt->ctx->generation;
    return MIXP_OK;
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

/* The rows of Muon's passes over parameter i. */
static void mixpi_muon_rows_of(const mixp_optimizer *opt, int64_t i) {
    const mixp_param_row *row = &opt->rows[i];
    const mixp_out *x = &opt->muon->x;
    mixp_param_row *pass = &opt->muon->rows[i * MIXPI_MUON_PASSES];
    mixp_param_row *first = &pass[MIXPI_MUON_MOMENTUM], *unit = &pass[MIXPI_MUON_UNIT];
    mixp_param_row *last = &pass[MIXPI_MUON_LAST];
    *first = *last = *row;
    memset(unit, 0, sizeof *unit);
    unit->weight = unit->grad = first->weight = last->grad = x->data;
    unit->weight_dtype = unit->grad_dtype = first->weight_dtype = last->grad_dtype =
        x->dtype;
    unit->count = row->count;
    unit->active = last->active = 1;
    first->missed = last->missed = NULL;
    first->master = last->m = NULL;
    first->master_dtype = last->m_dtype = MIXP_F32;
    first->low_f16 = NULL;
    first->low_bf16 = NULL;
    last->m_scale = NULL;
}

static mixp_result mixpi_muon_refresh(mixp_optimizer *opt) {
    size_t n = (size_t)opt->count * MIXPI_MUON_PASSES;
    int64_t i;
    for (i = 0; i < opt->count; i++) mixpi_muon_rows_of(opt, i);
    return mixpi_upload(opt->ctx, opt->muon->device_rows, opt->muon->rows,
                        n * sizeof *opt->muon->rows);
}

/* The rows of parameters that another rank updates are inactive in the table that update sees. */
static mixp_result mixpi_own_rows_send(mixp_optimizer *opt) {
    size_t bytes = (size_t)opt->count * sizeof *opt->rows;
    int64_t i;
    if (!opt->owned) return MIXP_OK;
    memcpy(opt->own_rows, opt->rows, bytes);
    for (i = 0; i < opt->count; i++)
        if (!mixpi_is_own(opt, i)) opt->own_rows[i].active = 0;
    return mixpi_upload(opt->ctx, opt->device_own_rows, opt->own_rows, bytes);
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
    if (opt->muon && mixpi_muon_refresh(opt) != MIXP_OK) return MIXP_ERR_DEVICE;
    if (mixpi_own_rows_send(opt) != MIXP_OK) return MIXP_ERR_DEVICE;
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
        if (mixpi_is_own(opt, i)) mixpi_weight_written(slot->param);
        else slot->param->version++;        /* its low copies are of before */
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

/* --- Muon: the products between its passes ------------------------------------------------ */

/* c (+)= alpha op(a) op(b) of matrices that lie dense: sizes of the result, and what is summed. */
static mixp_gemm_args mixpi_muon_gemm(int64_t m, int64_t n, int64_t k, double alpha) {
    mixp_gemm_args g;
    memset(&g, 0, sizeof g);
    g.m = m;
    g.n = n;
    g.k = k;
    g.batch = 1;
    g.alpha = (float)alpha;
    g.lda = k;
    g.ldb = g.ldc = n;
    return g;
}

/* sum = factor * a, n elements: what a product is added to. */
static mixp_result mixpi_muon_begin_sum(mixp_optimizer *o, float *sum, mixp_out a,
                                        int64_t n, double factor) {
    mixp_unary_args k;
    memset(&k, 0, sizeof k);
    k.op = MIXP_UNARY_SCALE;
    k.p = (float)factor;
    k.n = n;
    k.a = mixpi_in(a.data, a.dtype);
    k.y = mixpi_out_to(sum, MIXP_F32, 0);
    return MIXPI_RUN(o, unary, &k);
}

/* to = sum, rounded once. */
static mixp_result mixpi_muon_end_sum(mixp_optimizer *o, mixp_out to, const float *sum,
                                      int64_t n) {
    mixp_convert_args k;
    memset(&k, 0, sizeof k);
    k.n = n;
    k.src = mixpi_in(sum, MIXP_F32);
    k.dst = to;
    return MIXPI_RUN(o, convert, &k);
}

/* gram = x x', or x' x where that is smaller: the same iteration, of the transposed matrix. */
static mixp_result mixpi_muon_gram(mixp_optimizer *o, int64_t rows, int64_t cols) {
    const mixpi_muon *m = o->muon;
    const int tall = rows > cols;  /* plant: muon_tall */
    const int64_t side = tall ? cols : rows;
    mixp_gemm_args g = mixpi_muon_gemm(side, side, tall ? rows : cols, 1.0);
    g.trans_a = tall;
    g.trans_b = !tall;
    g.a = g.b = mixpi_in(m->x.data, m->x.dtype);
    g.c = m->gram;
    g.lda = g.ldb = cols;
    return MIXPI_RUN(o, gemm, &g);
}

/* poly = b gram + c gram gram. */
static mixp_result mixpi_muon_poly(mixp_optimizer *o, int64_t side) {
    const mixpi_muon *m = o->muon;
    mixp_gemm_args g = mixpi_muon_gemm(side, side, side, m->c);
    mixp_result r = mixpi_muon_begin_sum(o, m->poly_sum, m->gram, side * side, m->b);
    g.a = g.b = mixpi_in(m->gram.data, m->gram.dtype);
    g.c = mixpi_out_to(m->poly_sum, MIXP_F32, 1);
    if (r == MIXP_OK) r = MIXPI_RUN(o, gemm, &g);
    return r == MIXP_OK ? mixpi_muon_end_sum(o, m->poly, m->poly_sum, side * side) : r;
}

/* x = a x + poly x, or a x + x poly. */
static mixp_result mixpi_muon_next(mixp_optimizer *o, int64_t rows, int64_t cols) {
    const mixpi_muon *m = o->muon;
    const int tall = rows > cols;
    mixp_in x = mixpi_in(m->x.data, m->x.dtype);
    mixp_in poly = mixpi_in(m->poly.data, m->poly.dtype);
    mixp_gemm_args g = mixpi_muon_gemm(rows, cols, tall ? cols : rows, 1.0);
    mixp_result r = mixpi_muon_begin_sum(o, m->x_sum, m->x, rows * cols, m->a);
    g.a = tall ? x : poly;
    g.b = tall ? poly : x;
    g.c = mixpi_out_to(m->x_sum, MIXP_F32, 1);
    if (r == MIXP_OK) r = MIXPI_RUN(o, gemm, &g);
    return r == MIXP_OK ? mixpi_muon_end_sum(o, m->x, m->x_sum, rows * cols) : r;
}

/* One pass of the kernel `update` over parameter i. */
static mixp_result mixpi_muon_pass(mixp_optimizer *o, int64_t i, int pass,
                                   const mixp_step_plan *plan,
                                   const mixp_step_state *step) {
    mixp_update_args k;
    memset(&k, 0, sizeof k);
    k.plan = plan;
    k.rows = &o->muon->device_rows[i * MIXPI_MUON_PASSES + pass];
    k.count = 1;
    k.step = step;
    return MIXPI_RUN(o, update, &k);
}

/* x gets norm 1: statistics of it, into a step of its own, and a pass that multiplies. */
static mixp_result mixpi_muon_unit_norm(mixp_optimizer *o, int64_t i) {
    mixp_grad_stats_args k;
    mixp_step_plan plan;
    mixp_result r;
    memset(&k, 0, sizeof k);
    memset(&plan, 0, sizeof plan);
    plan.kind = MIXP_OPTIMIZER_MUON_UNIT;
    plan.unscaled = plan.gathered = 1;
    plan.n_groups = 1;
    plan.groups[0] = o->plan.groups[o->rows[i].group];
    plan.groups[0].f32_states = o->muon->f32;
    k.rows = &o->muon->device_rows[i * MIXPI_MUON_PASSES + MIXPI_MUON_UNIT];
    k.count = 1;
    k.step = o->muon->look;
    k.plan = &plan;
    r = MIXPI_RUN(o, grad_stats, &k);
    return r == MIXP_OK ? mixpi_muon_pass(o, i, MIXPI_MUON_UNIT, &plan, o->muon->look) : r;
}

/* A whole update of parameter i. In a skipped step the passes touch nothing, and the products work
 * on what is left of another matrix: nobody reads what becomes of it. */
static mixp_result mixpi_muon_matrix(mixp_optimizer *o, int64_t i) {
    const mixp_tensor *p = o->slots[i].param;
    const int64_t rows = p->shape[0], cols = p->shape[1], side = mixpi_muon_side(p);
    mixp_step_plan plan = o->plan;
    mixp_result r;
    int k;
    plan.kind = MIXP_OPTIMIZER_MUON_MOMENTUM;
    r = mixpi_muon_pass(o, i, MIXPI_MUON_MOMENTUM, &plan, o->state);
    if (r == MIXP_OK) r = mixpi_muon_unit_norm(o, i);
    for (k = 0; k < o->muon->iterations && r == MIXP_OK; k++) {
        r = mixpi_muon_gram(o, rows, cols);
        if (r == MIXP_OK) r = mixpi_muon_poly(o, side);
        if (r == MIXP_OK) r = mixpi_muon_next(o, rows, cols);
    }
    return r == MIXP_OK ? mixpi_muon_pass(o, i, MIXPI_MUON_LAST, &o->plan, o->state) : r;
}

static mixp_result mixpi_muon_update(mixp_optimizer *o) {
    mixp_result r = MIXP_OK;
    int64_t i;
    for (i = 0; i < o->count && r == MIXP_OK; i++)
        if (o->rows[i].active && o->rows[i].count && mixpi_is_own(o, i))
            r = mixpi_muon_matrix(o, i);
    return r;
}

static mixp_result mixpi_opt_update(mixp_optimizer *o, int counting) {
    mixp_update_args k;
    if (o->muon) return mixpi_muon_update(o);
    memset(&k, 0, sizeof k);
    k.plan = &o->plan;
    k.rows = o->owned ? o->device_own_rows : o->device_rows;
    k.count = o->count;
    k.step = o->state;
    k.lost = counting ? o->lost : NULL;
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

/* --- how the gradients lie in their low dtypes --------------------------------------------- */

static size_t mixpi_tally_bytes(const mixp_optimizer *opt) {
    return (size_t)opt->tallies * sizeof *opt->lost +
           (size_t)opt->count * sizeof *opt->tally;
}

/* Memory for all parameters that were added. */
static mixp_result mixpi_tally_memory(mixp_optimizer *opt) {
    const size_t n = (size_t)opt->capacity;
    const size_t bytes = n * (sizeof *opt->lost + sizeof *opt->tally);
    if (opt->tallies >= opt->count) return MIXP_OK;
    opt->tallies = 0;
    opt->tally_step = opt->tally_here = 0;
    opt->lost_copy = (mixp_lost *)mixpi_host_alloc(opt->ctx, bytes);
    opt->lost = (mixp_lost *)mixpi_device_alloc(opt->ctx, bytes);
    if (!opt->lost_copy || !opt->lost) return MIXP_ERR_MEMORY;
    opt->tally_copy = (mixpi_grad_tally *)(void *)(opt->lost_copy + n);
    opt->tally = (mixpi_grad_tally *)(void *)(opt->lost + n);
    opt->tallies = opt->capacity;
    return MIXP_OK;
}

MIXPREC_API mixp_result mixp_optimizer_sample(mixp_optimizer *opt) {
    mixp_result r;
    if (!opt) return MIXP_ERR_ARGUMENT;
    if (!opt->ctx->device->kernels->look)
        return mixp_context_fail(opt->ctx, MIXP_ERR_DEVICE,
                                 "mixp_optimizer_sample: the device %s has no kernel `look`",
                                 opt->ctx->device->name);
    r = mixpi_tally_memory(opt);
    opt->tally_due = r == MIXP_OK;
    return r;
}

/* What the gradient of a row would be, or is, stored in. */
static mixp_dtype mixpi_row_low(const mixp_param_row *row) {
    if (row->active && row->grad_dtype != MIXP_F32) return row->grad_dtype;
    return mixpi_row_low_weight(row);
}

static mixp_result mixpi_tally_row(mixp_optimizer *opt, int64_t i) {
    const mixp_param_row *row = &opt->rows[i];
    mixp_look_args k;
    if (!row->active) return MIXP_OK;
    memset(&k, 0, sizeof k);
    k.n = row->count;
    k.x = mixpi_in(row->grad, row->grad_dtype);
    k.low = mixpi_row_low(row);
    k.row = &opt->tally[i].look;
    k.exponents = opt->tally[i].exponents;
    return MIXPI_RUN(opt, look, &k);
}

/* Before the first look at the gradients of a step, when it was asked for or is a sampled one. */
static mixp_result mixpi_tally_step(mixp_optimizer *opt) {
    const int due = opt->tally_due || mixpi_context_sampled(opt->ctx);
    mixp_result r = MIXP_OK;
    int64_t i;
    /* Parameters may have come since it was asked for. */
    if (due || (opt->ctx->watch && opt->ctx->watch->on)) r = mixpi_tally_memory(opt);
    if (r != MIXP_OK || !due || opt->tallied) return r;
    r = mixpi_device_zero(opt->ctx, opt->lost, mixpi_tally_bytes(opt));
    opt->tally_here = 0;
    if (opt->ctx->tally_of == opt) opt->ctx->tally_of = NULL;
    if (opt->ctx->capturing) opt->tally_recorded = 1;
    for (i = 0; r == MIXP_OK && i < opt->count; i++) r = mixpi_tally_row(opt, i);
    opt->tally_due = 0;
    opt->tallied = r == MIXP_OK;
    opt->tally_step = (int64_t)opt->ctx->step + 1;
    return r;
}

/* After the update of a counted step: the counts go to the host when their turn comes. */
static mixp_result mixpi_tally_post(mixp_optimizer *opt) {
    mixp_context *ctx = opt->ctx;
    mixp_result r;
    if (!ctx->device->post || ctx->capturing) return MIXP_OK;
    r = ctx->device->post(&ctx->exec, 2, opt->lost, mixpi_tally_bytes(opt));
    ctx->tally_of = r == MIXP_OK ? opt : NULL;
    return mixpi_noted(ctx, "mixp_optimizer_sample", r);
}

/* Brings the copy up to date. What a graph counted, and the counts of an optimizer behind which
 * another has posted its own, are asked for. */
static mixp_result mixpi_tally_fetch(mixp_optimizer *opt) {
    mixp_context *ctx = opt->ctx;
    const size_t bytes = mixpi_tally_bytes(opt);
    mixp_result r;
    if (opt->tally_here && !opt->tally_recorded) return MIXP_OK;
    if (ctx->tally_of == opt && !opt->tally_recorded)
        r = mixpi_noted(ctx, "mixp_optimizer_underflow",
                        ctx->device->collect(&ctx->exec, 2, opt->lost_copy, bytes));
    else r = mixpi_download(ctx, opt->lost_copy, opt->lost, bytes);
    opt->tally_here = r == MIXP_OK;
    return r;
}

static void mixpi_look_add(mixp_look *to, const mixp_look *from) {
    if (from->largest > to->largest) to->largest = from->largest;
    to->count += from->count;
    to->nonfinite += from->nonfinite;
    to->zeros += from->zeros;
    to->flushed += from->flushed;
    to->least += from->least;
    to->subnormal += from->subnormal;
    to->saturated += from->saturated;
}

/* Adds a parameter's counts to out; of shares, what they are shares of comes later. */
static void mixpi_underflow_join(mixp_underflow *out, const mixpi_grad_tally *t,
                                 const mixp_param_row *row) {
    const int stored_low = row->active && row->grad_dtype != MIXP_F32;
    int i;
    mixpi_look_add(&out->look, &t->look);
    for (i = 0; i < MIXP_EXPONENTS; i++) out->exponents[i] += t->exponents[i];
    out->flushed += stored_low ? 0.5 * (double)t->look.least : (double)t->look.flushed;
    out->subnormal += (double)t->look.subnormal;
}

/* Estimated flushes of what is stored low are among the zeros. */
static void mixpi_underflow_shares(mixp_underflow *out) {
    double values =
        (double)(out->look.count - out->look.zeros - out->look.nonfinite);
    if (out->flushed > (double)out->look.flushed)
        values += out->flushed - (double)out->look.flushed;
    out->flushed = values > 0.0 ? out->flushed / values : 0.0;
    out->subnormal = values > 0.0 ? out->subnormal / values : 0.0;
}

MIXPREC_API int mixp_optimizer_underflow(mixp_optimizer *opt, int64_t i,
                                         mixp_underflow *out) {
    int64_t first, last, k;
    if (!opt || !out || i < -1 || i >= opt->count || !opt->count) return 0;
    first = i < 0 ? 0 : i;
    last = i < 0 ? opt->count : i + 1;
    memset(out, 0, sizeof *out);
    out->name = i < 0 ? "" : opt->slots[i].param->name;
    out->low = mixpi_row_low(&opt->rows[first]);
    out->step = opt->tally_step - 1;
    if (!opt->tally_step) return 1;
    if (last > opt->tallies || mixpi_tally_fetch(opt) != MIXP_OK) return 0;
    for (k = first; k < last; k++) {
        mixpi_underflow_join(out, &opt->tally_copy[k], &opt->rows[k]);
        out->lost.updates += opt->lost_copy[k].updates;
        out->lost.lost += opt->lost_copy[k].lost;
    }
    mixpi_underflow_shares(out);
    return 1;
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

/* --- what all ranks have found --------------------------------------------------------------- *
 *
 * After the look and before the decision one small table is summed over the ranks, on the device;
 * the host is not asked. What is in it: see mixp_agree_fill.
 */
static mixp_result mixpi_opt_agree(mixp_optimizer *o, mixp_scaler_state *s) {
    const mixp_ranks_desc *ranks = &o->ctx->ranks;
    const mixpi_exchange *d = o->ctx->exchange;
    const int64_t n = (int64_t)ranks->size * MIXP_AGREE_WORDS;
    mixp_agree_args k;
    mixp_result r;
    if (!o->table)
        o->table = (double *)mixpi_device_alloc(o->ctx, (size_t)n * sizeof *o->table);
    if (!o->table) return MIXP_ERR_MEMORY;
    memset(&k, 0, sizeof k);
    k.plan = &o->plan;
    k.looks = d ? d->looks : NULL;
    k.first_leaf = d ? d->first : NULL;
    k.n_looks = d ? d->n_buckets : 0;
    k.scaler = s;
    if (mixpi_context_sampled(o->ctx)) k.forward = &o->ctx->watch->rows[MIXPI_ROW_FORWARD];
    k.step = o->state;
    k.table = o->table;
    k.rank = ranks->rank;
    k.size = ranks->size;
    r = MIXPI_RUN(o, agree, &k);
    if (r == MIXP_OK)
        r = mixpi_ranks_run(o->ctx, "the sum of what ranks found", ranks->sum,
                            mixpi_out_to(o->table, MIXP_F64, 0), n);
    k.reads = 1;
    return r == MIXP_OK ? MIXPI_RUN(o, agree, &k) : r;
}

/* Ranks that went apart, by a learning rate that one of them changed, say: told here; on a GPU
 * perhaps a step late, but that step was skipped by all. */
static mixp_result mixpi_opt_differs(const mixp_optimizer *o) {
    static const char *const words[] = { "a rank is missing:", "the loss scale",
                                         "the number of applied steps",
                                         "the learning rate",
                                         "the norm of the summed gradients" };
    mixp_step_state s;
    mixp_result r = mixpi_peek(o->ctx, &s, o->state, offsetof(mixp_step_state, update));
    const mixp_agreement *a = &s.agreed;
    if (r != MIXP_OK || !a->differs) return r;
    return mixp_context_fail(o->ctx, MIXP_ERR_RANKS,
                             "ranks differ: %s is %.17g on rank 0 and %.17g on rank %d; "
                             "the step was skipped",
                             words[a->word], a->here, a->there, (int)a->differs - 1);
}

/* After a look, or what stands for one: the ranks agree, and prepare follows. */
static mixp_result mixpi_ranks_prepare(mixp_optimizer *o, mixp_scaler_state *s) {
    mixp_result r;
    if (o->ctx->ranks.size < 2) return mixpi_opt_prepare(o, s);
    if (!o->ctx->device->kernels->agree)
        return mixp_context_fail(o->ctx, MIXP_ERR_DEVICE,
                                 "ranks: the device %s has no kernel `agree`; its table "
                                 "is older than this header",
                                 o->ctx->device->name);
    r = mixpi_opt_agree(o, s);
    if (r == MIXP_OK) r = mixpi_opt_prepare(o, s);
    if (r == MIXP_OK) r = mixpi_opt_differs(o);
    return mixpi_ranks_stop(o->ctx, r);
}

/* Gradients that the caller keeps in views were in no walk: they become their mean here, each once
 * in a step. */
static mixp_result mixpi_ranks_views(mixp_optimizer *o) {
    mixp_context *ctx = o->ctx;
    mixp_result r = MIXP_OK;
    int64_t i;
    if (ctx->ranks.size < 2 || mixpi_stage(o) == MIXPI_UNSCALED || o->clipped)
        return MIXP_OK;
    for (i = 0; i < o->count && r == MIXP_OK; i++) {
        mixp_tensor *view = o->slots[i].grad;
        if (!view) continue;
        r = mixpi_ranks_run(ctx, "the sum of a view", ctx->ranks.sum,
                            mixpi_tensor_out(view, 0), view->count);
        if (r == MIXP_OK && ctx->ranks.mean != MIXP_MEAN_NONE)
            r = mixpi_divide_by_parts(ctx, mixpi_tensor_out(view, 0), view->count);
        view->version++;
    }
    return r;
}

/* A look at all gradients, and what the ranks make of it together. */
static mixp_result mixpi_ranks_look(mixp_optimizer *o, const float *scale, int unscale,
                                    const mixp_step_plan *plan, mixp_scaler_state *s) {
    mixp_result r = mixpi_ranks_views(o);
    if (r != MIXP_OK) return r;
    if (o->ctx->ranks.size < 2) return mixpi_opt_look(o, scale, unscale, plan, s);
    r = mixpi_opt_look(o, scale, unscale, NULL, NULL);
    return r == MIXP_OK && plan ? mixpi_ranks_prepare(o, s) : r;
}

/* Copies bytes of device memory. */
static mixp_result mixpi_copy_bytes(mixp_context *ctx, void *to, const void *from,
                                    size_t bytes) {
    const size_t words = bytes / 4, rest = bytes % 4;
    mixp_result r =
        mixpi_convert_to(ctx, mixpi_out_to(to, MIXP_I32, 0), mixpi_in(from, MIXP_I32),
                         (int64_t)words);
    if (!rest || r != MIXP_OK) return r;
    return mixpi_convert_to(ctx, mixpi_out_to((char *)to + 4 * words, MIXP_U8, 0),
                            mixpi_in((const char *)from + 4 * words, MIXP_U8),
                            (int64_t)rest);
}

/* The weights of a rank, one behind the other: the bytes from `base` on, as many as a slice has,
 * into its slice, or, `out` 0, out of it. */
static mixp_result mixpi_slice_copy(mixp_optimizer *o, int rank, size_t base,
                                    size_t length, int out) {
    char *slice = (char *)o->slices + (size_t)rank * length;
    mixp_result r = MIXP_OK;
    size_t at = 0;
    int64_t i;
    for (i = 0; i < o->count && r == MIXP_OK; i++) {
        const mixp_tensor *p = o->slots[i].param;
        size_t bytes = mixpi_bytes(p), first = at > base ? at : base, end = base + length;
        if (o->slots[i].owner != rank) continue;
        if (end > at + bytes) end = at + bytes;
        if (first < end) {
            char *weight = (char *)p->data + (first - at), *there = slice + (first - base);
            r = mixpi_copy_bytes(o->ctx, out ? there : weight, out ? weight : there,
                                 end - first);
        }
        at += mixpi_round_up(bytes);
    }
    return r;
}

/* Bytes of the weights of the rank that owns most. */
static size_t mixpi_slices_total(const mixp_optimizer *o) {
    size_t most = 0;
    int r;
    for (r = 0; r < o->ctx->ranks.size; r++) {
        size_t bytes = 0;
        int64_t i;
        for (i = 0; i < o->count; i++)
            if (o->slots[i].owner == r)
                bytes += mixpi_round_up(mixpi_bytes(o->slots[i].param));
        if (bytes > most) most = bytes;
    }
    return most;
}

/* Room for a slice of every rank: more, when parameters came since the last step. */
static mixp_result mixpi_slices_room(mixp_optimizer *o, size_t length) {
    void *slices;
    if (o->slice >= length) return MIXP_OK;  /* plant: slices_grow */
    slices = mixpi_device_alloc(o->ctx, (size_t)o->ctx->ranks.size * length);
    if (!slices) return MIXP_ERR_MEMORY;
    o->slices = slices;
    o->slice = length;
    return MIXP_OK;
}

/* After an update of which each rank did its part: all get all weights, a slice of every rank's at
 * a time. */
static mixp_result mixpi_opt_gather(mixp_optimizer *o) {
    const mixp_ranks_desc *k = &o->ctx->ranks;
    const size_t total = mixpi_slices_total(o);
    size_t base, length = mixpi_round_up((size_t)k->bucket_bytes);
    mixp_result r = MIXP_OK;
    int rank;
    if (length > total) length = total;
    if (mixpi_slices_room(o, length) != MIXP_OK) return MIXP_ERR_MEMORY;
    for (base = 0; base < total && r == MIXP_OK; base += length) {
        r = mixpi_slice_copy(o, k->rank, base, length, 1);
        if (r == MIXP_OK)
            r = mixpi_ranks_run(o->ctx, "the gathering of weights", k->all_gather,
                                mixpi_out_to(o->slices, MIXP_I32, 0),
                                (int64_t)(length / 4));
        for (rank = 0; rank < k->size && r == MIXP_OK; rank++)
            if (rank != k->rank) r = mixpi_slice_copy(o, rank, base, length, 0);
    }
    return r;
}

/* Whose gradient was bad first, before the sum. */
static void mixpi_verdict_rank(const mixp_optimizer *opt, const mixp_agreement *a,
                               mixp_verdict *v) {
    const mixpi_exchange *d = opt->ctx->exchange;
    if (opt->ctx->ranks.size < 2 || !a->bad_rank) return;
    v->bad_rank = (int)a->bad_rank - 1;
    if (!d || a->bad_leaf < 0 || a->bad_leaf >= d->n_leaves) return;
    v->bad_tensor = d->leaves[a->bad_leaf].tensor->name;
    v->bad_element = a->bad_element;
    v->bad_is_nan = a->bad_is_nan;
}

/* " on rank 3" for messages; "" where there is one, or none is known. */
static const char *mixpi_on_rank(const mixp_context *ctx, int rank, char *text,
                                 size_t room) {
    *text = '\0';
    if (ctx->ranks.size > 1 && rank >= 0) snprintf(text, room, " on rank %d", rank);
    return text;
}

/* --- stepping ----------------------------------------------------------------------------- */

/* A step that is judged by its loss needs one, of this step. */
static mixp_result mixpi_need_loss(const mixp_optimizer *opt, const char *who) {
    if (!((int)opt->plan.spike.of & MIXP_SPIKE_LOSS)) return MIXP_OK;
    if (opt->plan.loss && opt->loss_of == opt->ctx->generation) return MIXP_OK;
    return mixp_context_fail(opt->ctx, MIXP_ERR_ORDER,
                             "%s: spikes of the loss are looked for, and this step gave "
                             "none: call mixp_optimizer_set_loss before it",
                             who);
}

/* One step, after mixpi_refresh. scaler NULL: apply whatever the gradients are. */
static mixp_result mixpi_step(mixp_optimizer *opt, mixp_scaler *scaler,
                              const mixpi_scaling *is) {
    mixp_step_plan *plan = &opt->plan;
    mixp_scaler_state *s = scaler ? scaler->state : NULL;
    mixp_result r;
    int tallied;
    plan->seed = opt->ctx->seed;
    plan->check = scaler != NULL;
    plan->unscaled = is->is_true;
    plan->age = scaler && !is->is_true ? (int32_t)(scaler->scales - is->at) : 0;
    plan->noted = scaler && mixpi_stage(opt) == MIXPI_UNSCALED;
    plan->look_only = 0;
    /* plant: clipped_once */
    if (opt->clipped_versions != mixpi_grad_versions(opt)) opt->clipped = 0;
    r = mixpi_tally_step(opt);
    tallied = opt->tallied;
    opt->tallied = 0;
    if (r != MIXP_OK) return r;
    plan->gathered = scaler || opt->clipped || plan->max_norm > 0.0 ||
                     ((int)plan->spike.of & MIXP_SPIKE_NORM);
    if (plan->gathered && !opt->clipped)
        r = mixpi_ranks_look(opt, scaler ? mixpi_scale_address(scaler, is) : NULL, 0, plan,
                             s);
    else {
        r = mixpi_ranks_views(opt);
        if (r == MIXP_OK) r = mixpi_ranks_prepare(opt, s);
    }
    if (r == MIXP_OK) r = mixpi_opt_update(opt, tallied);
    if (r == MIXP_OK && tallied) r = mixpi_tally_post(opt);
    if (r == MIXP_OK && opt->owned) r = mixpi_opt_gather(opt);
    if (r == MIXP_OK) mixpi_opt_written(opt);
    opt->clipped = 0;
    plan->loss = NULL;
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
    if (r == MIXP_OK) r = mixpi_ranks_look(opt, NULL, 0, NULL, NULL);
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
    if (r == MIXP_OK) r = mixpi_need_loss(opt, "mixp_optimizer_step");
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
    r = mixpi_tally_step(opt);
    if (r != MIXP_OK) return r;
    opt->plan.look_only = opt->plan.gathered = 1;
    r = mixpi_ranks_look(opt, mixpi_scale_address(scaler, &is), !is.is_true, &opt->plan,
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
    r = mixpi_need_loss(opt, "mixp_scaler_step");
    if (r == MIXP_OK) r = mixpi_begin_scaled(scaler, opt, "mixp_scaler_step", &is);
    if (r == MIXP_OK) r = mixpi_step(opt, scaler, &is);
    if (r != MIXP_OK) return r;
    mixpi_mark_used(scaler, opt);
    mixpi_stage_set(scaler, opt, MIXPI_STEPPED);
    return MIXP_OK;
}

/* --- the verdict, and the update ------------------------------------------------------------ */

MIXPREC_API const char *mixp_origin_text(mixp_origin origin) {
    static const char *const texts[] = {
        "not known: no guard is on, or the step was not sampled; the next one is",
        "an operator stored a number beyond its dtype: not a scaling problem; a guard lets its "
        "site fall back to f32",
        "a gradient overflowed: the loss scale was too large, and has been lowered",
        "a gradient overflowed when it was unscaled: the loss scale is below 1; look at the "
        "learning rate and at the gradient norm",
        "the loss is not finite though all activations are: not a scaling problem; look at "
        "logs and divisions in the loss",
        "a weight is not finite: not a scaling problem; go back to a checkpoint, with a smaller "
        "learning rate",
        "the batch holds Inf or NaN: not a scaling problem; look at the data"
    };
    MIXPI_STATIC_ASSERT(origin_texts, sizeof texts / sizeof texts[0] == MIXP_ORIGIN_COUNT);
    return (unsigned)origin < MIXP_ORIGIN_COUNT ? texts[origin] : "?";
}

/* What a guard knows of where the newest skip began. */
static void mixpi_verdict_origin(const mixp_context *ctx, mixp_verdict *v) {
    const mixpi_watch *w = ctx->watch;
    if (!w || !w->on || v->outcome != MIXP_STEP_SKIPPED) return;
    v->origin = (mixp_origin)w->origin;
    if (w->origin_site) v->site = mixpi_site_at(ctx, w->origin_site)->name;
}

static mixp_skip_reason mixpi_skip_reason(const mixp_step_state *s) {
    if (!s->skip) return MIXP_SKIP_NONE;
    if (s->stopped) return MIXP_SKIP_STOPPED;
    if (s->spike.of == MIXP_SPIKE_LOSS) return MIXP_SKIP_SPIKE_LOSS;
    return s->spike.of ? MIXP_SKIP_SPIKE_NORM : MIXP_SKIP_NON_FINITE;
}

static mixp_verdict mixpi_verdict(const mixp_optimizer *opt) {
    mixp_step_state s;
    mixp_verdict v;
    memset(&v, 0, sizeof v);
    memset(&s, 0, sizeof s);
    v.site = "";
    v.bad_rank = -1;
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
    mixpi_verdict_origin(opt->ctx, &v);
    v.reason = mixpi_skip_reason(&s);
    v.spike_z = s.spike.z;
    v.spike_mean = s.spike.mean;
    v.spike_sd = s.spike.sd;
    if (!s.stats.found_inf) return v;
    mixpi_verdict_rank(opt, &s.agreed, &v);
    if (v.bad_tensor || s.stats.bad_row < 0 || s.stats.bad_row >= opt->count) return v;
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
    char on_rank[32];
    mixp_result r = mixpi_peek(scaler->ctx, &state, scaler->state, sizeof state);
    if (r != MIXP_OK || most < 0 || state.floor_skips < most) return r;
    bad = mixpi_worst_verdict(scaler);
    return mixp_context_fail(
        scaler->ctx, MIXP_ERR_DIVERGED,
        "%d steps in a row were skipped at scale %g, "
        "which can go no lower: no loss scale cures this. First bad gradient: %s of "
        "'%s' at element %.0f%s. Look at the loss, the data and the learning rate",
        (int)state.floor_skips, (double)state.scale, bad.bad_is_nan ? "NaN" : "Inf",
        bad.bad_tensor ? bad.bad_tensor : "", (double)bad.bad_element,
        mixpi_on_rank(scaler->ctx, bad.bad_rank, on_rank, sizeof on_rank));
}

MIXPREC_API mixp_result mixp_scaler_update(mixp_scaler *scaler) {
    const mixp_look *met;
    mixp_advance_args k;
    mixp_context *ctx;
    mixp_result r, watched;
    if (!scaler) return MIXP_ERR_ARGUMENT;
    if (scaler->desc.disabled) return MIXP_OK;
    ctx = scaler->ctx;
    if (scaler->checked_epoch != scaler->epoch)
        return mixp_context_fail(
            scaler->ctx, MIXP_ERR_ORDER,
            "mixp_scaler_update: no optimizer was "
            "stepped or unscaled since the last one; call mixp_scaler_step first");
    memset(&k, 0, sizeof k);
    k.rule = &scaler->rule;
    k.scaler = scaler->state;
    k.guarded = mixpi_guard_on(ctx);
    /* Of several ranks what one alone met would part their scales: `agree` told all of them. */
    if (mixpi_context_sampled(ctx) && ctx->ranks.size < 2)
        k.forward = &ctx->watch->rows[MIXPI_ROW_FORWARD];
    /* What one of several ranks met would move its scale alone. */
    met = scaler->ctx->ranks.size > 1 ? NULL : mixpi_context_gradients(scaler->ctx);
    k.largest = met ? &met->largest : NULL;
    r = MIXPI_RUN(scaler, advance, &k);
    if (r != MIXP_OK) return r;
    scaler->first = scaler->began;
    scaler->began = 0;
    scaler->epoch++;
    if (!scaler->rule.fixed) scaler->scales++;  /* plant: scales */
    if (!scaler->rule.fixed) ctx->scale_moved = 1;
    r = mixpi_scaler_diverged(scaler);
    if (!mixpi_guard_on(ctx) || ctx->capturing) return r;
    watched = ctx->watch->updated(ctx, scaler);
    return r == MIXP_OK ? watched : r;
}

MIXPREC_API mixp_verdict mixp_optimizer_verdict(const mixp_optimizer *opt)
{ return mixpi_verdict(opt); }
MIXPREC_API mixp_verdict mixp_scaler_verdict(const mixp_scaler *scaler)
{ return mixpi_worst_verdict(scaler); }

/* ==== 12. WATCH (implementation) ====================================================== */

/* An event as it is kept: its site by number. */
struct mixpi_happening {
    int64_t         step;
    mixp_event_kind kind;
    int             site;
    mixp_dtype      dtype;
    mixp_look       look;
    double          flushed;
    mixp_origin     origin;
};

static const mixp_look mixpi_no_look = { 0.0f, 0, 0, 0, 0, 0, 0, 0, 0 };

/* --- shares ------------------------------------------------------------------------------ */

MIXPREC_API double mixp_look_flushed(const mixp_look *look, int stored_low) {
    double seen, lost;
    if (!look) return 0.0;
    seen = (double)(look->count - look->zeros - look->nonfinite);
    lost = stored_low ? 0.5 * (double)look->least : (double)look->flushed;
    if (stored_low) seen += lost;       /* those were counted as zeros */
    return seen > 0.0 ? lost / seen : 0.0;
}

MIXPREC_API double mixp_look_subnormal(const mixp_look *look) {
    int64_t seen = look ? look->count - look->zeros - look->nonfinite : 0;
    return seen > 0 ? (double)look->subnormal / (double)seen : 0.0;
}

/* The largest and the smallest normal number of a low dtype. */
static double mixpi_low_largest(mixp_dtype low)
{ return low == MIXP_BF16 ? (double)MIXP_BF16_MAX : (double)MIXP_F16_MAX; }
static double mixpi_low_normal(mixp_dtype low)
{ return low == MIXP_BF16 ? (double)MIXP_BF16_MIN : (double)MIXP_F16_MIN; }

/* Do flushed values count in this array? Beside a number of 16 times the smallest normal one, what
 * is lost is less than f32 would round away of it: a long tail of tiny values does no harm. */
static int mixpi_is_small(const mixp_look *look, mixp_dtype low)
{ return (double)look->largest < 16.0 * mixpi_low_normal(low); }

/* --- events ------------------------------------------------------------------------------ */

static void mixpi_event_add(mixp_context *ctx, mixp_event_kind kind, int number,
                            const mixp_look *look, mixp_origin origin) {
    mixpi_watch *w = ctx->watch;
    const mixpi_site *site = mixpi_site_at(ctx, number);
    mixpi_happening *e = &w->events[w->n_events++ % MIXPI_MAX_EVENTS];
    e->step = (int64_t)(w->event_step ? w->event_step : ctx->step);
    e->kind = kind;
    e->site = number;
    e->origin = origin;
    e->look = *look;
    e->dtype = site ? (mixpi_site_holds_f32(site) ? MIXP_F32 : site->low) : MIXP_F32;
    e->flushed = site ? mixp_look_flushed(look, site->dtype == site->low) : 0.0;
}

static const char *mixpi_event_text(mixp_event_kind kind) {
    static const char *const texts[] = {
        "overflowed: stores f32 now", "came near the end of its range: stores f32 now",
        "flushed too much to zero: stores f32 now", "clean again: stores its low dtype",
        "pinned", "skipped", "no room for more sites: they are not watched"
    };
    MIXPI_STATIC_ASSERT(event_texts, sizeof texts / sizeof texts[0] == MIXP_EVENT_COUNT);
    return texts[kind];
}

MIXPREC_API int mixp_guard_event(const mixp_context *ctx, int i, mixp_event *out) {
    const mixpi_watch *w = ctx ? ctx->watch : NULL;
    int64_t kept = w ? mixpi_min(w->n_events, MIXPI_MAX_EVENTS) : 0, number;
    const mixpi_happening *e;
    if (!out || i < 0 || i >= kept) return 0;
    number = w->n_events - kept + i;
    e = &w->events[number % MIXPI_MAX_EVENTS];
    memset(out, 0, sizeof *out);
    out->number = number;
    out->step = e->step;
    out->kind = e->kind;
    out->what = mixpi_event_text(e->kind);
    out->site = e->site ? mixpi_site_at(ctx, e->site)->name : "";
    out->dtype = e->dtype;
    out->largest = e->look.largest;
    out->flushed = e->flushed;
    out->nonfinite = e->look.nonfinite;
    out->origin = e->origin;
    return 1;
}

/* K, doubled with each relapse. */
static int64_t mixpi_clean_needed(const mixpi_watch *w, const mixpi_site *site) {
    int relapses = site->falls > 1 ? site->falls - 1 : 0;
    return (int64_t)w->clean << (relapses < 20 ? relapses : 20);  /* plant: guard_doubles */
}

MIXPREC_API int mixp_site(const mixp_context *ctx, int i, mixp_site_info *out) {
    const mixpi_watch *w = ctx ? ctx->watch : NULL;
    const mixpi_site *site = NULL;
    int n, at = -1;
    for (n = 0; w && n < w->n_sites && at < i; n++) {
        site = &w->sites[n];
        at += site->stores;
    }
    if (!site || !out || i < 0 || at < i) return 0;
    memset(out, 0, sizeof *out);
    out->name = site->name;
    out->op = site->op;
    out->dtype = site->dtype;
    out->fallen = site->fallen != 0;
    out->pinned = site->pinned != 0;
    out->falls = site->falls;
    out->clean = site->clean;
    out->clean_needed = (int)mixpi_min(mixpi_clean_needed(w, site), INT32_MAX);
    out->samples = site->samples;
    out->value = site->value;
    out->grad = site->grad;
    return 1;
}

/* --- deciding ------------------------------------------------------------------------------ */

static const mixp_look *mixpi_seen(const mixpi_watch *w, int number, int which)
{ return &w->seen[MIXPI_ROW_SITES + (number - 1) * MIXPI_LOOKS + which]; }

static void mixpi_site_fall(mixp_context *ctx, int number, mixp_event_kind kind,
                            const mixp_look *look) {
    mixpi_site *site = mixpi_site_at(ctx, number);
    site->fallen = site->fallen || site->dtype == MIXP_F32 ? 2 : 1;
    site->falls++;
    site->clean = 0;
    site->changed = ctx->watch->begun;
    ctx->watch->acted = 1;
    ctx->sites_moved++;
    mixpi_event_add(ctx, kind, number, look, MIXP_ORIGIN_UNKNOWN);
}

/* Could it still store, or read, something wider? */
static int mixpi_site_can_fall(const mixpi_site *site) {
    if (site->pinned) return 0;
    return (site->low != MIXP_F32 && !site->fallen) || (site->casts && site->fallen < 2);
}

/* Is a share of what is not 0 flushed, in an array of small numbers? */
static int mixpi_flushes(const mixpi_watch *w, const mixpi_site *site, const mixp_look *look) {
    int stored_low = site->dtype == site->low;
    return look->largest > 0.0f && mixpi_is_small(look, site->low) &&
           mixp_look_flushed(look, stored_low) > (double)w->flushed;
}

/* Nothing but zeros where a neighbour has tiny numbers: all were flushed. */
static int mixpi_vanished(const mixp_look *look, const mixp_look *neighbour, mixp_dtype low) {
    return look->count && look->zeros == look->count && neighbour->largest > 0.0f &&
           mixpi_is_small(neighbour, low);
}

/* A site that stores its low dtype, and may yet fall back by this sample. */
static int mixpi_site_is_low(const mixpi_site *site, int sample) {
    return site->low != MIXP_F32 && site->dtype == site->low && !site->fallen && !site->pinned &&
           site->changed < sample;
}

static void mixpi_settle_pair(mixp_context *ctx, int number, int neighbour, int which,
                              int sample) {
    const mixpi_site *site = mixpi_site_at(ctx, number);
    const mixp_look *look = mixpi_seen(ctx->watch, number, which);
    if (!mixpi_site_is_low(site, sample)) return;
    if (mixpi_vanished(look, mixpi_seen(ctx->watch, neighbour, which), site->low))
        mixpi_site_fall(ctx, number, MIXP_EVENT_FLUSHED, look);
}

/* Finds values that vanished on the way to a site, or gradients on the way from it. */
static void mixpi_settle_vanished(mixp_context *ctx, int number, int sample) {
    const mixpi_site *site = mixpi_site_at(ctx, number);
    int i;
    for (i = 0; i < MIXPI_SITE_FROM && site->from[i]; i++) {
        mixpi_settle_pair(ctx, number, site->from[i], MIXPI_LOOK_VALUE, sample);
        mixpi_settle_pair(ctx, site->from[i], number, MIXPI_LOOK_GRAD, sample);
    }
}

/* Whether a site that stores its low dtype must fall back, and why; COUNT: it must not. */
static mixp_event_kind mixpi_site_trouble(const mixpi_watch *w, const mixpi_site *site) {
    const mixp_look *value = &site->value, *grad = &site->grad;
    double high = (double)w->high * mixpi_low_largest(site->low);
    if (value->nonfinite) return MIXP_EVENT_COUNT;      /* see mixpi_settle_overflow */
    if ((double)value->largest > high) return MIXP_EVENT_HIGH;  /* plant: guard_high */
    if (mixpi_flushes(w, site, value) || mixpi_flushes(w, site, grad))
        return MIXP_EVENT_FLUSHED;
    return MIXP_EVENT_COUNT;
}

/* Would a site that has fallen back be well in its low dtype? */
static int mixpi_site_is_clean(const mixpi_watch *w, const mixpi_site *site) {
    double largest = mixpi_low_largest(site->low), low = (double)w->low_again * largest;
    if (site->for_grad && (double)site->grad.largest >= (double)w->high * largest) return 0;
    return !site->value.nonfinite && (double)site->value.largest < low &&
           !mixpi_flushes(w, site, &site->value) && !mixpi_flushes(w, site, &site->grad);
}

static int mixpi_site_is_cast(const mixpi_site *site)
{ return site->op && strcmp(site->op, "cast") == 0; }

static void mixpi_settle_site(mixp_context *ctx, int number, int sample) {
    mixpi_watch *w = ctx->watch;
    mixpi_site *site = mixpi_site_at(ctx, number);
    const mixp_look *at;
    mixp_event_kind trouble;
    if (!mixpi_seen(w, number, MIXPI_LOOK_VALUE)->count) return;
    site->value = *mixpi_seen(w, number, MIXPI_LOOK_VALUE);
    site->grad = *mixpi_seen(w, number, MIXPI_LOOK_GRAD);
    /* A cast that was left out has none of its own: what it would read is its producer's. */
    if (!site->grad.count && site->fallen && site->from[0] && mixpi_site_is_cast(site))
        site->grad = *mixpi_seen(w, site->from[0], MIXPI_LOOK_GRAD);
    site->samples++;
    if (site->low == MIXP_F32 || site->pinned || site->changed >= sample) return;
    if (mixpi_site_is_low(site, sample)) {
        trouble = mixpi_site_trouble(w, site);
        at = trouble == MIXP_EVENT_HIGH || mixpi_flushes(w, site, &site->value) ? &site->value
                                                                                : &site->grad;
        if (trouble != MIXP_EVENT_COUNT) mixpi_site_fall(ctx, number, trouble, at);
        return;
    }
    if (!site->fallen || site->dtype == site->low) return;
    site->clean = mixpi_site_is_clean(w, site) ? site->clean + 1 : 0;
    if (site->clean < mixpi_clean_needed(w, site)) return;
    site->fallen = site->for_grad = 0;
    site->changed = w->begun;
    ctx->sites_moved++;
    mixpi_event_add(ctx, MIXP_EVENT_BACK, number, &site->value, MIXP_ORIGIN_UNKNOWN);
}

/* Looks at t now, by way of a row of device memory: waits. */
static mixp_result mixpi_look_now(const mixp_tensor *t, mixp_dtype low, mixp_look *row,
                                  mixp_look *found) {
    mixp_context *ctx = t->ctx;
    mixp_look_args k;
    mixp_result r;
    memset(&k, 0, sizeof k);
    k.n = t->count;
    k.x = mixpi_tensor_in(t);
    k.low = low;
    k.row = row;
    r = mixpi_device_zero(ctx, row, sizeof *row);
    if (r == MIXP_OK) r = ctx->device->kernels->look(&ctx->exec, &k);
    return r == MIXP_OK ? mixpi_download(ctx, found, row, sizeof *found) : r;
}

/* Is a weight that the site reads not finite? Looks at it now: only after a failure. */
static int mixpi_site_bad_weight(mixp_context *ctx, const mixpi_site *site) {
    mixp_look *row = &ctx->watch->rows[MIXPI_ROW_WEIGHT], found;
    int i;
    for (i = 0; i < 2 && site->read[i]; i++) {
        if (!mixpi_real(site->read[i]->dtype)) continue;
        if (mixpi_look_now(site->read[i], MIXP_F16, row, &found) != MIXP_OK) return 0;
        if (found.nonfinite) return 1;  /* plant: guard_weight */
    }
    return 0;
}

/* Does a site read, from site `from`, through a cast that overflowed? */
static int mixpi_cast_is_bad(const mixp_context *ctx, int from) {
    const mixpi_watch *w = ctx->watch;
    int n;
    for (n = 1; n <= w->n_sites; n++) {
        const mixpi_site *site = mixpi_site_at(ctx, n);
        if (site->from[0] == from && mixpi_site_is_cast(site) &&
            mixpi_seen(w, n, MIXPI_LOOK_VALUE)->nonfinite)
            return 1;
    }
    return 0;
}

/* Did a site itself make what is not finite, of what is? */
static int mixpi_site_overflowed(mixp_context *ctx, int number) {
    const mixpi_watch *w = ctx->watch;
    const mixpi_site *site = mixpi_site_at(ctx, number);
    const int is_cast = mixpi_site_is_cast(site);
    int i;
    if (!mixpi_seen(w, number, MIXPI_LOOK_VALUE)->nonfinite) return 0;
    if (mixpi_seen(w, number, MIXPI_LOOK_DATA)->nonfinite) return 0;
    for (i = 0; i < MIXPI_SITE_FROM && site->from[i]; i++) {
        if (mixpi_seen(w, site->from[i], MIXPI_LOOK_VALUE)->nonfinite) return 0;
        if (!is_cast && mixpi_cast_is_bad(ctx, site->from[i])) return 0;
    }
    return !mixpi_site_bad_weight(ctx, site);
}

/* The first site, in the order of the step, whose row `which` holds something not finite, or, in
 * backward order, the last; 0: none does. */
static int mixpi_first_bad(const mixp_context *ctx, int which, int backward) {
    const mixpi_watch *w = ctx->watch;
    int n, best = 0;
    for (n = 1; n <= w->n_sites; n++) {
        int turn = mixpi_site_at(ctx, n)->turn;
        if (!mixpi_seen(w, n, which)->nonfinite) continue;
        if (!best || (backward ? turn > mixpi_site_at(ctx, best)->turn
                               : turn < mixpi_site_at(ctx, best)->turn))
            best = n;  /* plant: guard_first */
    }
    return best;
}

static mixp_origin mixpi_forward_origin(mixp_context *ctx, int number) {
    const mixpi_site *site = mixpi_site_at(ctx, number);
    if (mixpi_seen(ctx->watch, number, MIXPI_LOOK_DATA)->nonfinite)
        return MIXP_ORIGIN_INPUT;
    if (mixpi_site_bad_weight(ctx, site)) return MIXP_ORIGIN_WEIGHT;
    return site->scalar ? MIXP_ORIGIN_LOSS : MIXP_ORIGIN_FORWARD;
}

/* Notes where the first non-finite value since the update arose. */
static void mixpi_settle_origin(mixp_context *ctx) {
    mixpi_watch *w = ctx->watch;
    int number = mixpi_first_bad(ctx, MIXPI_LOOK_VALUE, 0), leaf;
    if (w->found) return;
    if (number) w->found = (int)mixpi_forward_origin(ctx, number);
    else {
        number = mixpi_first_bad(ctx, MIXPI_LOOK_GRAD, 1);
        leaf = mixpi_first_bad(ctx, MIXPI_LOOK_LEAF, 1);
        if (!number || (leaf && mixpi_site_at(ctx, leaf)->turn >
                                mixpi_site_at(ctx, number)->turn))
            number = leaf;
        w->found = number ? MIXP_ORIGIN_BACKWARD : MIXP_ORIGIN_UNKNOWN;
    }
    w->found_site = number;
}

/* The rows have arrived in w->seen: decides. */
static void mixpi_settle_rows(mixp_context *ctx, int sample) {
    mixpi_watch *w = ctx->watch;
    int n, known = w->n_sites;
    w->looked = w->settled = 1;
    mixpi_settle_origin(ctx);
    for (n = 1; n <= known; n++) {
        const mixpi_site *site = mixpi_site_at(ctx, n);
        if (site->changed >= sample || !mixpi_site_can_fall(site)) continue;
        if (mixpi_site_overflowed(ctx, n))
            mixpi_site_fall(ctx, n, MIXP_EVENT_OVERFLOW, mixpi_seen(w, n, MIXPI_LOOK_VALUE));
    }
    for (n = 1; n <= known; n++) mixpi_settle_vanished(ctx, n, sample);
    for (n = 1; n <= known; n++) mixpi_settle_site(ctx, n, sample);
}

/* A look as numbers that ranks can add, and back. */
enum { MIXPI_LOOK_WORDS = 8 };
static void mixpi_look_to_words(const mixp_look *look, double *words) {
    words[0] = (double)look->largest;
    words[1] = (double)look->count;
    words[2] = (double)look->nonfinite;
    words[3] = (double)look->zeros;
    words[4] = (double)look->flushed;
    words[5] = (double)look->least;
    words[6] = (double)look->subnormal;
    words[7] = (double)look->saturated;
}
static void mixpi_look_join_words(mixp_look *look, const double *words) {
    if ((float)words[0] > look->largest) look->largest = (float)words[0];
    look->count += (int64_t)words[1];
    look->nonfinite += (int64_t)words[2];
    look->zeros += (int64_t)words[3];
    look->flushed += (int64_t)words[4];
    look->least += (int64_t)words[5];
    look->subnormal += (int64_t)words[6];
    look->saturated += (int64_t)words[7];
}

/* Tells what is to be told once: pins that took hold, sites without room. */
static void mixpi_settle_events(mixp_context *ctx) {
    mixpi_watch *w = ctx->watch;
    int n;
    for (n = 1; n <= w->n_sites; n++) {
        mixpi_site *site = mixpi_site_at(ctx, n);
        if (!site->pinned || site->pin_told) continue;
        site->pin_told = 1;
        mixpi_event_add(ctx, MIXP_EVENT_PINNED, n, &site->value, MIXP_ORIGIN_UNKNOWN);
    }
    if (w->full && !w->full_told)
        mixpi_event_add(ctx, MIXP_EVENT_FULL, 0, &mixpi_no_look, MIXP_ORIGIN_UNKNOWN);
    w->full_told = w->full;
}

/* Patterns that no site of a whole step fits are said once. */
static mixp_result mixpi_settle_pins(mixp_context *ctx) {
    mixpi_watch *w = ctx->watch;
    int i;
    for (i = 0; i < w->n_pins; i++) {
        if (w->pins[i].fits) continue;
        w->pins[i].fits = 1;
        return mixp_context_fail(ctx, MIXP_ERR_ARGUMENT,
                                 "mixp_guard_pin '%.80s': no site has such a name after a whole "
                                 "step; mixp_site lists them, '%.90s' is the first",
                                 w->pins[i].pattern, w->n_sites ? w->sites[0].name : "");
    }
    return MIXP_OK;
}

/* What was seen on any rank counts on all, so that their sites stay alike: counts are added, the
 * larger magnitude stays. Waits for the device, in a sampled step of many ranks. */
static mixp_result mixpi_seen_share(mixp_context *ctx) {
    mixpi_watch *w = ctx->watch;
    const int64_t rows = (int64_t)(w->posted_bytes / sizeof(mixp_look));
    const int64_t words = MIXPI_LOOK_WORDS * rows;
    const int64_t world = (int64_t)mixpi_world(ctx);
    double *own;
    mixp_result r;
    int64_t i, k;
    if (world == 1) return MIXP_OK;
    if (w->shared_words < words)
        w->shared = (double *)mixpi_host_alloc(ctx, (size_t)(world * words) * sizeof *own);
    if (!w->shared) return MIXP_ERR_MEMORY;
    if (w->shared_words < words) w->shared_words = words;
    memset(w->shared, 0, (size_t)(world * words) * sizeof *own);
    own = w->shared + ctx->ranks.rank * words;
    for (i = 0; i < rows; i++)
        mixpi_look_to_words(&w->seen[i], own + MIXPI_LOOK_WORDS * i);
    r = mixpi_ranks_share(ctx, w->shared, words);
    if (r != MIXP_OK) return r;
    memset(w->seen, 0, (size_t)rows * sizeof *w->seen);
    for (k = 0; k < world; k++)
        for (i = 0; i < rows; i++)
            mixpi_look_join_words(&w->seen[i],
                                  w->shared + k * words + MIXPI_LOOK_WORDS * i);
    return MIXP_OK;
}

static mixp_result mixpi_settle_now(mixp_context *ctx, int sample, uint64_t step) {
    mixp_result r = mixpi_seen_share(ctx);
    if (r != MIXP_OK) return r;
    ctx->watch->event_step = step;
    mixpi_settle_rows(ctx, sample);
    mixpi_settle_events(ctx);
    return mixpi_settle_pins(ctx);
}

/* Rows that are in use. */
static size_t mixpi_rows_used(const mixpi_watch *w) { return mixpi_rows_bytes(w->n_sites); }

/* Settles a sample. A device that can post sends it first, and it is settled when the step after
 * the next one begins: always then, so that every run decides alike. */
static mixp_result mixpi_guard_settle(mixp_context *ctx) {
    mixpi_watch *w = ctx->watch;
    const mixp_device *d = ctx->device;
    const int posted = w->posted, fresh = w->fresh;
    mixp_result r = MIXP_OK;
    w->posted = w->fresh = 0;
    if (posted) {
        r = mixpi_noted(ctx, "guard", d->collect(&ctx->exec, 0, w->seen, w->posted_bytes));
        if (r == MIXP_OK) r = mixpi_settle_now(ctx, posted, w->posted_step);
    }
    if (r != MIXP_OK || !fresh) return r;
    w->posted_bytes = mixpi_rows_used(w);
    w->posted_step = w->rows_step;
    if (d->post) {
        r = mixpi_noted(ctx, "guard", d->post(&ctx->exec, 0, w->rows, w->posted_bytes));
        w->posted = r == MIXP_OK ? fresh : 0;
        return r;
    }
    r = mixpi_download(ctx, w->seen, w->rows, w->posted_bytes);
    return r == MIXP_OK ? mixpi_settle_now(ctx, fresh, w->rows_step) : r;
}

/* Nothing can cure what makes step after step fail: says so. */
static mixp_result mixpi_guard_diverged(mixp_context *ctx) {
    const mixpi_watch *w = ctx->watch;
    const mixp_origin origin = (mixp_origin)w->origin;
    return mixp_context_fail(
        ctx, MIXP_ERR_DIVERGED,
        "%d steps in a row were skipped for what their forward pass made, and nothing is left to "
        "fall back: no loss scale cures this. It began at '%.90s': %s",
        (int)w->barren, w->origin_site ? mixpi_site_at(ctx, w->origin_site)->name : "?",
        mixp_origin_text(origin));
}

/* A gradient that overflows though the scale is as low as it helps: its site falls back. */
static void mixpi_guard_at_floor(mixp_context *ctx, float scale) {
    const mixpi_watch *w = ctx->watch;
    mixpi_site *site = mixpi_site_at(ctx, w->origin_site);
    if (w->origin != MIXP_ORIGIN_BACKWARD || scale > 1.0f || !site) return;
    if (site->low == MIXP_F32 || site->dtype != site->low || !mixpi_site_can_fall(site))
        return;
    site->for_grad = 1;
    mixpi_site_fall(ctx, w->origin_site, MIXP_EVENT_OVERFLOW, &site->grad);
}

/* A scaler has updated: where did a skip begin, and was something done about it? */
static mixp_result mixpi_guard_after(mixp_context *ctx, const mixp_scaler_state *state) {
    mixpi_watch *w = ctx->watch;
    const int looked = w->looked, acted = w->acted;
    int forward;
    w->origin = state->skipped ? w->found : MIXP_ORIGIN_UNKNOWN;
    w->origin_site = state->skipped ? w->found_site : 0;
    w->found = w->found_site = w->looked = w->acted = 0;
    w->force = state->skipped;
    if (!state->skipped) {
        w->barren = 0;
        return MIXP_OK;
    }
    if (looked && !w->origin) w->origin = MIXP_ORIGIN_UNSCALE;
    w->event_step = w->updated_step;
    mixpi_event_add(ctx, MIXP_EVENT_SKIP, w->origin_site,
                    w->origin_site ? &mixpi_site_at(ctx, w->origin_site)->value
                                   : &mixpi_no_look,
                    (mixp_origin)w->origin);
    mixpi_guard_at_floor(ctx, state->scale);
    forward = w->origin && w->origin != MIXP_ORIGIN_BACKWARD && w->origin != MIXP_ORIGIN_UNSCALE;
    if (forward) w->barren = acted ? 0 : w->barren + 1;
    if (w->patience < 0 || !forward) return MIXP_OK;
    return w->barren >= w->patience || w->origin == MIXP_ORIGIN_WEIGHT
         ? mixpi_guard_diverged(ctx) : MIXP_OK;  /* plant: guard_patience */
}

/* The hook of mixp_scaler_update. A device that can post tells of a step one step later. */
static mixp_result mixpi_guard_updated(mixp_context *ctx, void *scaler) {
    const mixp_scaler *s = (const mixp_scaler *)scaler;
    mixpi_watch *w = ctx->watch;
    const mixp_device *d = ctx->device;
    mixp_scaler_state state;
    mixp_result r = MIXP_OK;
    if (!d->post) {
        w->updated_step = ctx->step;
        r = mixpi_guard_settle(ctx);
        if (r == MIXP_OK) r = mixpi_scaler_get(s, &state);
        return r == MIXP_OK ? mixpi_guard_after(ctx, &state) : r;
    }
    if (w->posted_scaler) {
        r = mixpi_noted(ctx, "guard", d->collect(&ctx->exec, 1, &state, sizeof state));
        if (r == MIXP_OK) r = mixpi_guard_after(ctx, &state);
    }
    w->posted_scaler = NULL;
    w->updated_step = ctx->step;
    if (r == MIXP_OK)
        r = mixpi_noted(ctx, "guard", d->post(&ctx->exec, 1, s->state, sizeof state));
    if (r == MIXP_OK) w->posted_scaler = s;
    return r;
}

/* All that is known is settled, without lag: waits. */
static mixp_result mixpi_guard_catch_up(mixp_context *ctx) {
    mixpi_watch *w = ctx->watch;
    const mixp_scaler *s;
    mixp_scaler_state state;
    mixp_result r;
    if (!mixpi_guard_on(ctx)) return MIXP_OK;
    /* One rank may save alone: it must not ask others. */
    if (mixpi_world(ctx) > 1) return MIXP_OK;
    r = mixpi_guard_settle(ctx);
    if (r == MIXP_OK && w->posted) r = mixpi_guard_settle(ctx);
    s = (const mixp_scaler *)w->posted_scaler;
    w->posted_scaler = NULL;
    if (r != MIXP_OK || !s) return r;
    r = mixpi_scaler_get(s, &state);
    return r == MIXP_OK ? mixpi_guard_after(ctx, &state) : r;
}

/* --- on and off ---------------------------------------------------------------------------- */

/* The context's watch, without room for sites yet. */
static mixpi_watch *mixpi_watch_of(mixp_context *ctx) {
    mixpi_watch *w = ctx->watch;
    if (w) return w;
    w = (mixpi_watch *)mixpi_host_alloc(ctx, sizeof *w);
    if (!w) return NULL;
    w->pins = (mixpi_pin *)mixpi_host_alloc(ctx, MIXPI_MAX_PINS * sizeof *w->pins);
    if (!w->pins) return NULL;
    w->settle = mixpi_guard_settle;
    w->updated = mixpi_guard_updated;
    return ctx->watch = w;
}

/* What is wrong with a look, or NULL. */
static const char *mixpi_look_wrong(const mixp_tensor *t, mixp_dtype low, const mixp_look *out) {
    mixp_format f;
    if (!out) return "there is nowhere to write what it finds";
    if (!mixpi_real(t->dtype)) return "the tensor must be f32, f16 or bf16";
    if ((unsigned)low >= MIXP_DTYPE_COUNT) return "low is none of mixp_dtype";
    f = mixp_format_of(low);
    if (f.special > MIXP_SPECIAL_FNUZ || low == MIXP_F64)
        return "low must be a floating-point dtype of 8 bits to 32";
    return t->ctx->device->kernels->look ? NULL : "the device has no kernel `look`";
}

MIXPREC_API mixp_result mixp_look_at(const mixp_tensor *t, mixp_dtype low, mixp_look *out) {
    const char *wrong;
    mixpi_watch *w;
    if (!t) return MIXP_ERR_ARGUMENT;
    wrong = mixpi_look_wrong(t, low, out);
    if (wrong)
        return mixp_context_fail(t->ctx, MIXP_ERR_ARGUMENT, "mixp_look_at: %s", wrong);
    w = mixpi_watch_of(t->ctx);
    if (w && !w->row) w->row = (mixp_look *)mixpi_device_alloc(t->ctx, sizeof *w->row);
    if (!w || !w->row) return MIXP_ERR_MEMORY;
    return mixpi_noted(t->ctx, "mixp_look_at", mixpi_look_now(t, low, w->row, out));
}

/* Room for n sites; asked for once. */
static mixp_result mixpi_watch_room(mixp_context *ctx, int n) {
    mixpi_watch *w = ctx->watch;
    size_t count = (size_t)n, bytes = mixpi_rows_bytes(n);
    if (w->capacity) return MIXP_OK;
    for (w->n_buckets = 64; w->n_buckets < 2 * n;) w->n_buckets *= 2;
    w->sites = (mixpi_site *)mixpi_host_alloc(ctx, count * sizeof *w->sites);
    w->buckets = (int *)mixpi_host_alloc(ctx, (size_t)w->n_buckets * sizeof *w->buckets);
    w->events = (mixpi_happening *)mixpi_host_alloc(
        ctx, MIXPI_MAX_EVENTS * sizeof *w->events);
    w->hashes = (int64_t *)mixpi_host_alloc(ctx, count * sizeof *w->hashes);
    w->states = (int32_t *)mixpi_host_alloc(ctx, count * MIXPI_SITE_STATES * sizeof *w->states);
    w->seen = (mixp_look *)mixpi_host_alloc(ctx, bytes);
    w->rows = (mixp_look *)mixpi_device_alloc(ctx, bytes);
    if (!w->sites || !w->buckets || !w->events || !w->hashes || !w->states || !w->seen ||
        !w->rows)
        return MIXP_ERR_MEMORY;
    w->capacity = n;
    return MIXP_OK;
}

/* The description with its defaults. */
static mixp_guard_desc mixpi_guard_resolved(const mixp_guard_desc *desc) {
    mixp_guard_desc d;
    memset(&d, 0, sizeof d);
    if (desc) d = *desc;
    if (!d.every) d.every = 16;
    if (!d.clean) d.clean = 4;
    if (!mixp_bits_of_f32(d.high)) d.high = 0.25f;
    if (!mixp_bits_of_f32(d.low_again)) d.low_again = d.high * 0.25f;
    if (!mixp_bits_of_f32(d.flushed)) d.flushed = 0.02f;
    if (!d.patience) d.patience = 20;
    if (!d.max_sites) d.max_sites = 4096;
    return d;
}

/* What is wrong with it, or NULL. Negated comparisons: a NaN fits none. */
static const char *mixpi_guard_wrong(const mixp_context *ctx, const mixp_guard_desc *d,
                                     int asked) {
    const int most = 1 << 20, now = ctx->watch ? ctx->watch->capacity : 0;
    if (d->every < 1 || d->every > most) return "every must lie in 1 to 2^20";
    if (d->clean < 1 || d->clean > most) return "clean must lie in 1 to 2^20";
    if (!(d->high > 0.0f && d->high < 1.0f)) return "high must lie between 0 and 1";
    if (!(d->low_again > 0.0f && d->low_again < d->high))
        return "low_again must lie between 0 and high";
    if (!(d->flushed > 0.0f && d->flushed <= 1.0f))
        return "flushed must be above 0 and at most 1";
    if (d->max_sites < 1 || d->max_sites > most) return "max_sites must lie in 1 to 2^20";
    if (now && asked && d->max_sites != now)
        return "max_sites cannot change: room for them was taken when the guard was started, or "
               "4096 by a mixp_compare before it";
    return NULL;
}

static mixp_result mixpi_guard_between(mixp_context *ctx, const char *who) {
    if (!mixpi_regions_open(ctx)) return MIXP_OK;
    return mixp_context_fail(ctx, MIXP_ERR_ORDER,
                             "%s: a region or a scope is open; change the guard between steps, "
                             "outside of MIXP_AUTOCAST, MIXP_NO_GRAD and MIXP_SCOPE",
                             who);
}

MIXPREC_API mixp_result mixp_guard_start(mixp_context *ctx, const mixp_guard_desc *desc) {
    mixp_guard_desc d = mixpi_guard_resolved(desc);
    const char *wrong;
    mixpi_watch *w;
    if (!ctx) return MIXP_ERR_ARGUMENT;
    if (mixpi_guard_between(ctx, "mixp_guard_start") != MIXP_OK) return MIXP_ERR_ORDER;
    wrong = mixpi_guard_wrong(ctx, &d, desc && desc->max_sites);
    if (wrong)
        return mixp_context_fail(ctx, MIXP_ERR_ARGUMENT, "mixp_guard_start: %s", wrong);
    if (!ctx->device->kernels->look)
        return mixp_context_fail(ctx, MIXP_ERR_DEVICE,
                                 "mixp_guard_start: the device '%s' has no kernel `look`",
                                 ctx->device->name);
    if (!mixpi_watch_of(ctx) || mixpi_watch_room(ctx, d.max_sites) != MIXP_OK)
        return MIXP_ERR_MEMORY;
    w = ctx->watch;
    w->every = d.every;
    w->clean = d.clean;
    w->high = d.high;
    w->low_again = d.low_again;
    w->flushed = d.flushed;
    w->patience = d.patience;
    if (!w->on) w->since = w->every - 1;    /* the first step is a sampled one */
    if (!w->on) ctx->sites_moved++;
    w->on = 1;
    return MIXP_OK;
}

MIXPREC_API mixp_result mixp_guard_stop(mixp_context *ctx) {
    mixpi_watch *w = ctx ? ctx->watch : NULL;
    if (!ctx) return MIXP_ERR_ARGUMENT;
    if (mixpi_guard_between(ctx, "mixp_guard_stop") != MIXP_OK) return MIXP_ERR_ORDER;
    if (!w || !w->on) return MIXP_OK;
    w->on = w->sampled = w->fresh = w->posted = w->force = 0;
    w->posted_scaler = NULL;
    ctx->sites_moved++;
    return MIXP_OK;
}

MIXPREC_API int mixp_guard_due(const mixp_context *ctx) {
    const mixpi_watch *w = ctx ? ctx->watch : NULL;
    return w && w->on && (w->force || w->since + 1 >= w->every);
}

/* What is wrong with a pattern, or NULL. */
static const char *mixpi_pin_wrong(const mixp_context *ctx, const char *pattern,
                                   mixp_dtype dtype) {
    const mixpi_watch *w = ctx->watch;
    mixpi_pin pin;
    int n = 0;
    if (!pattern || !*pattern) return "the pattern is empty";
    if (strlen(pattern) >= sizeof pin.pattern) return "the pattern has more than 95 characters";
    if (!mixpi_real(dtype) && dtype != MIXP_DTYPE_COUNT)
        return "the dtype must be f32, f16, bf16, or MIXP_DTYPE_COUNT for free";
    if (w && w->n_pins == MIXPI_MAX_PINS) return "there are 64 patterns already";
    if (!w || !w->settled) return NULL;
    memcpy(pin.pattern, pattern, strlen(pattern) + 1);
    while (n < w->n_sites && !mixpi_pin_fits(&pin, w->sites[n].name)) n++;
    return n < w->n_sites ? NULL : "no site has such a name; mixp_site lists them";
}

MIXPREC_API mixp_result mixp_guard_pin(mixp_context *ctx, const char *pattern,
                                       mixp_dtype dtype) {
    const char *wrong;
    mixpi_watch *w;
    mixpi_pin *pin;
    int n;
    if (!ctx) return MIXP_ERR_ARGUMENT;
    if (mixpi_guard_between(ctx, "mixp_guard_pin") != MIXP_OK) return MIXP_ERR_ORDER;
    wrong = mixpi_pin_wrong(ctx, pattern, dtype);
    if (wrong)
        return mixp_context_fail(ctx, MIXP_ERR_ARGUMENT, "mixp_guard_pin '%.80s': %s",
                                 pattern ? pattern : "NULL", wrong);
    w = mixpi_watch_of(ctx);
    if (!w) return MIXP_ERR_MEMORY;
    pin = &w->pins[w->n_pins++];
    memcpy(pin->pattern, pattern, strlen(pattern) + 1);
    pin->dtype = dtype;
    pin->fits = 0;
    for (n = 0; n < w->n_sites; n++) mixpi_site_pin(w, &w->sites[n]);
    if (w->settled) mixpi_settle_events(ctx);
    ctx->sites_moved++;
    return MIXP_OK;
}

/* --- retry --------------------------------------------------------------------------------- */

/* The random step goes back to where the skipped one began. */
static void mixpi_retry_rewind(const mixp_scaler *s) {
    mixp_context *ctx = s->ctx;
    if (ctx->replayed && ctx->step == ctx->replayed) ctx->step -= mixpi_world(ctx);
    else if (s->first) ctx->step = s->first - mixpi_world(ctx);
}

/* Was the newest update's step skipped, and may another try do better? */
static int mixpi_retry_pays(mixp_scaler *s) {
    mixp_context *ctx = s->ctx;
    const mixpi_watch *w = ctx->watch;
    mixp_scaler_state state;
    if (mixpi_scaler_get(s, &state) != MIXP_OK || !state.skipped) return 0;
    if (mixpi_guard_catch_up(ctx) != MIXP_OK || ctx->error != MIXP_OK) return 0;
    if (!mixpi_guard_on(ctx) || mixpi_world(ctx) > 1) return 1;     /* all ranks, or none */
    return w->origin != MIXP_ORIGIN_INPUT && w->origin != MIXP_ORIGIN_WEIGHT;
}

MIXPREC_API int mixp_retry(mixp_scaler *scaler, int times) {
    int updated;
    if (!scaler) return 0;
    if (times < 1) {
        mixp_context_fail(scaler->ctx, MIXP_ERR_ARGUMENT,
                          "mixp_retry: %d times; say at least 1", times);
        return 0;
    }
    updated = scaler->epoch + scaler->ctx->replays != scaler->retried;
    scaler->retried = scaler->epoch + scaler->ctx->replays;
    if (!updated || scaler->desc.disabled || scaler->tries >= times ||  /* plant: retries */
        !mixpi_retry_pays(scaler)) {
        scaler->tries = 0;
        return 0;
    }
    scaler->tries++;
    mixpi_retry_rewind(scaler);
    return 1;
}

/* --- checkpoints of it --------------------------------------------------------------------- */

/* Before saving: everything is settled, and sites lie in the rows that a file takes. */
static mixp_result mixpi_guard_pack(mixp_context *ctx) {
    mixpi_watch *w = ctx->watch;
    mixp_result r = mixpi_guard_catch_up(ctx);
    int n;
    for (n = 0; w && n < w->n_sites; n++) {
        const mixpi_site *site = &w->sites[n];
        int32_t *state = &w->states[n * MIXPI_SITE_STATES];
        memcpy(&w->hashes[n], &site->hash, sizeof site->hash);
        state[0] = site->fallen;
        state[1] = site->falls;
        state[2] = site->clean;
        state[3] = site->for_grad;
    }
    return r;
}

/* A count of a file, far from where counting on would overflow. */
static int mixpi_loaded_count(int32_t count)
{ return count < 0 || count > 1 << 30 ? 0 : count; }

/* After loading: the table is that of the file. Names come with the next step. */
static void mixpi_guard_unpack(mixp_context *ctx) {
    mixpi_watch *w = ctx->watch;
    int n, number;
    if (!w || !w->capacity) return;
    memset(w->sites, 0, (size_t)w->capacity * sizeof *w->sites);
    memset(w->buckets, 0, (size_t)w->n_buckets * sizeof *w->buckets);
    w->n_sites = w->fresh = w->posted = w->found = w->found_site = 0;
    w->origin = w->origin_site = 0;
    w->n_events = 0;
    w->posted_scaler = NULL;
    for (n = 0; n < w->capacity && w->hashes[n]; n++) {
        const int32_t *state = &w->states[n * MIXPI_SITE_STATES];
        uint64_t hash;
        memcpy(&hash, &w->hashes[n], sizeof hash);
        number = mixpi_site_new(ctx, hash);
        w->sites[number - 1].fallen = state[0] < 0 || state[0] > 2 ? 0 : state[0];
        w->sites[number - 1].falls = mixpi_loaded_count(state[1]);
        w->sites[number - 1].clean = mixpi_loaded_count(state[2]);
        w->sites[number - 1].for_grad = state[3] != 0;
    }
    ctx->sites_moved++;
}

/* --- comparing runs ------------------------------------------------------------------------ */

/* What one run keeps of a site for the other: host memory, f32. */
typedef struct mixpi_kept {
    int64_t    count;
    float     *value, *grad;
    mixp_dtype dtype;
    int        done;            /* 1: the second run came by, 2: its gradient too */
    mixp_difference row;
} mixpi_kept;

typedef struct mixpi_comparison {
    const mixp_compare_desc *desc;
    mixpi_kept *kept;           /* by the number of the site */
    int         capacity, second, dropped;
    mixp_result result;
} mixpi_comparison;

/* The elements of t in fresh host memory; NULL with the error set. */
static float *mixpi_compare_read(mixp_context *ctx, const mixp_tensor *t) {
    size_t bytes = (size_t)t->count * sizeof(float);
    float *values = (float *)mixpi_host_take(ctx, bytes);
    if (!values) {
        mixpi_out_of_memory(ctx, bytes);
        return NULL;
    }
    if (mixp_read(t, values, MIXP_F32, t->count) == MIXP_OK) return values;
    mixpi_host_put(ctx, values);
    return NULL;
}

typedef struct mixpi_distance { double relative, largest, cosine; } mixpi_distance;

static mixpi_distance mixpi_distance_of(const float *a, const float *b, int64_t n) {
    double aa = 0.0, bb = 0.0, ab = 0.0, dd = 0.0;
    mixpi_distance d = { 0.0, 0.0, 1.0 };
    int64_t i;
    for (i = 0; i < n; i++) {
        double x = (double)a[i], y = (double)b[i], off = fabs(x - y);
        aa += x * x;
        bb += y * y;
        ab += x * y;
        dd += off * off;
        if (off > d.largest) d.largest = off;
    }
    if (!mixpi_finite(aa) || !mixpi_finite(bb) || (dd > 0.0 && !(bb > 0.0)))
        d.relative = (double)mixp_f32_of_bits(0x7F800000u);
    else if (dd > 0.0) d.relative = sqrt(dd / bb);  /* plant: compare_relative */
    if (aa > 0.0 && bb > 0.0) d.cosine = ab / sqrt(aa) / sqrt(bb);
    else if (aa > 0.0 || bb > 0.0) d.cosine = 0.0;
    return d;
}

/* The first run keeps, the second compares: the first pass through a site counts. */
static void mixpi_compare_value(mixpi_comparison *m, mixp_context *ctx, mixpi_kept *kept,
                                const mixp_tensor *t) {
    mixpi_distance d;
    float *values;
    if (m->second ? kept->done || kept->count != t->count : kept->value != NULL) return;
    values = mixpi_compare_read(ctx, t);
    if (!values) {
        m->result = MIXP_ERR_MEMORY;
        return;
    }
    if (!m->second) {
        kept->value = values;
        kept->count = t->count;
        kept->dtype = t->dtype;
        return;
    }
    d = mixpi_distance_of(kept->value, values, t->count);
    mixpi_host_put(ctx, values);
    kept->done = 1;
    kept->row.dtype_a = kept->dtype;
    kept->row.dtype_b = t->dtype;
    kept->row.relative = d.relative;
    kept->row.largest = d.largest;
    kept->row.cosine = d.cosine;
}

static void mixpi_compare_grad(mixpi_comparison *m, mixp_context *ctx, mixpi_kept *kept,
                               const mixp_tensor *g) {
    double scale = m->desc->scale > 0.0f ? (double)m->desc->scale : 1.0;
    mixpi_distance d;
    float *values;
    if (m->second ? kept->done != 1 || !kept->grad : kept->grad != NULL) return;
    if (g->count != kept->count) return;
    values = mixpi_compare_read(ctx, g);
    if (!values) {
        m->result = MIXP_ERR_MEMORY;
        return;
    }
    if (!m->second) {
        kept->grad = values;
        return;
    }
    d = mixpi_distance_of(kept->grad, values, g->count);
    mixpi_host_put(ctx, values);
    kept->done = 2;
    kept->row.has_grad = 1;
    kept->row.grad_relative = d.relative;
    kept->row.grad_largest = d.largest / scale;
    kept->row.grad_cosine = d.cosine;
}

/* The tape's hook while runs are compared. */
static void mixpi_compare_tap(mixp_context *ctx, int number, const mixp_tensor *t,
                              int backward) {
    mixpi_comparison *m = (mixpi_comparison *)ctx->watch->comparing;
    const char *op = mixpi_site_at(ctx, number)->op;
    if (op && strcmp(op, "dropout") == 0) m->dropped = 1;
    if (number > m->capacity || m->result != MIXP_OK) return;
    if (backward) mixpi_compare_grad(m, ctx, &m->kept[number - 1], t);
    else mixpi_compare_value(m, ctx, &m->kept[number - 1], t);
}

/* All gradients of parameters are forgotten: runs must not add to them. */
static void mixpi_forget_grads(mixp_context *ctx) {
    mixp_tensor *t;
    for (t = ctx->tensors; t; t = t->own.next) t->grad = NULL;
}

/* Leaves the region of a run, and whatever fn has left open in it. */
static mixp_result mixpi_compare_close(mixp_context *ctx) {
    const int open = mixpi_regions_open(ctx);
    mixp_autocast_close(ctx, 0);
    if (open == 1) return MIXP_OK;
    return mixp_context_fail(ctx, MIXP_ERR_ORDER,
                             "mixp_compare: fn has %s a region or a scope; it is to leave them "
                             "as they are",
                             open ? "opened" : "closed");
}

/* One run, forward and back. */
static mixp_result mixpi_compare_run(mixp_context *ctx, mixpi_comparison *m,
                                     const mixp_autocast *region) {
    const mixp_compare_desc *d = m->desc;
    const uint64_t step = ctx->step;
    mixp_tensor *loss;
    mixp_result r = mixp_step_begin(ctx);
    mixpi_forget_grads(ctx);
    if (r == MIXP_OK) r = mixp_autocast_push(ctx, region);
    if (r != MIXP_OK) ctx->step = step;
    if (r != MIXP_OK) return r;
    loss = d->fn(ctx, d->user);
    r = mixpi_compare_close(ctx);
    if (loss && d->scale > 0.0f) loss = mixp_scale(ctx, loss, d->scale);
    if (r == MIXP_OK && !m->dropped) r = mixp_backward(ctx, loss);
    mixpi_forget_grads(ctx);
    ctx->step = step;
    if (r == MIXP_OK) r = m->result;
    if (!m->dropped) return r;
    return mixp_context_fail(ctx, MIXP_ERR_ORDER,
                             "mixp_compare: fn drops out, and the runs would draw other numbers; "
                             "pass training 0 to mixp_dropout");
}

static int mixpi_difference_order(const void *a, const void *b) {
    double x = ((const mixp_difference *)a)->relative;
    double y = ((const mixp_difference *)b)->relative;
    return x < y ? 1 : x > y ? -1 : 0;
}

/* The rows of sites that both runs have, in order; gives the memory back. */
static int64_t mixpi_compare_end(mixp_context *ctx, mixpi_comparison *m,
                                 mixp_difference *rows, int64_t room) {
    mixp_difference *all = (mixp_difference *)(void *)m->kept;
    int64_t i, n = 0;
    for (i = 0; i < m->capacity; i++) {
        mixpi_kept kept = m->kept[i];
        if (kept.value) mixpi_host_put(ctx, kept.value);
        if (kept.grad) mixpi_host_put(ctx, kept.grad);
        if (!kept.done) continue;
        kept.row.site = mixpi_site_at(ctx, (int)i + 1)->name;
        all[n++] = kept.row;    /* a row is smaller than what it was kept in */
    }
    qsort(all, (size_t)n, sizeof *all, mixpi_difference_order);
    for (i = 0; i < n && i < room; i++) rows[i] = all[i];
    mixpi_host_put(ctx, m->kept);
    return n;
}

/* What is wrong with the call, or NULL. */
static const char *mixpi_compare_wrong(const mixp_compare_desc *d, const mixp_difference *rows,
                                       int64_t room, const int64_t *n) {
    if (!d || !d->fn) return "no description, or no function";
    if (!rows || room < 1 || !n) return "rows, room and n must be given";
    if (!mixpi_real(d->a.dtype) || !mixpi_real(d->b.dtype))
        return "a dtype must be f16, bf16 or f32 (off)";
    if (d->a.level < 0 || d->a.level > 3 || d->b.level < 0 || d->b.level > 3)
        return "a level must be 0 to 3";
    if (!(d->scale >= 0.0f) || !mixpi_finite((double)d->scale))
        return "the scale must be finite and at least 0";
    return NULL;
}

/* Two runs with the tape's hook in place; the guard is as it was afterwards. */
static mixp_result mixpi_compare_runs(mixp_context *ctx, mixpi_comparison *m) {
    mixpi_watch *w = ctx->watch;
    const int on = w->on;
    mixp_result r;
    w->comparing = m;
    w->tap = mixpi_compare_tap;
    w->on = 1;
    w->sampled = 0;
    r = mixpi_compare_run(ctx, m, &m->desc->a);
    m->second = 1;
    if (r == MIXP_OK) r = mixpi_compare_run(ctx, m, &m->desc->b);
    w->on = on;
    w->tap = NULL;
    w->comparing = NULL;
    return r;
}

MIXPREC_API mixp_result mixp_compare(mixp_context *ctx, const mixp_compare_desc *desc,
                                     mixp_difference *rows, int64_t room, int64_t *n) {
    const char *wrong = mixpi_compare_wrong(desc, rows, room, n);
    mixpi_comparison m;
    size_t bytes;
    mixp_result r;
    if (!ctx) return MIXP_ERR_ARGUMENT;
    if (wrong) return mixp_context_fail(ctx, MIXP_ERR_ARGUMENT, "mixp_compare: %s", wrong);
    if (mixpi_guard_between(ctx, "mixp_compare") != MIXP_OK) return MIXP_ERR_ORDER;
    *n = 0;
    r = mixpi_guard_catch_up(ctx);
    if (r != MIXP_OK) return r;
    if (!mixpi_watch_of(ctx) || mixpi_watch_room(ctx, 4096) != MIXP_OK)
        return MIXP_ERR_MEMORY;
    memset(&m, 0, sizeof m);
    m.desc = desc;
    m.capacity = ctx->watch->capacity;
    bytes = (size_t)m.capacity * sizeof *m.kept;
    m.kept = (mixpi_kept *)mixpi_host_take(ctx, bytes);
    if (!m.kept) return mixpi_out_of_memory(ctx, bytes);
    memset(m.kept, 0, bytes);
    r = mixpi_compare_runs(ctx, &m);
    *n = mixpi_compare_end(ctx, &m, rows, room);
    return r;
}

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
    MIXPI_OF_CONTEXT, MIXPI_OF_SCALER, MIXPI_OF_OPTIMIZER, MIXPI_OF_GROUP,
    /* Only where the scaler's rule predicts, and where spikes are skipped. A file that lacks them
     * leaves them as they begin; a program that has no use for them passes them over. */
    MIXPI_OF_PREDICTION,
    MIXPI_OF_SPIKE,
    MIXPI_OF_WATCH
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
#define MIXPI_FIELD_PREDICTION(member) \
    { MIXPI_OF_PREDICTION, "scaler.prediction." #member, \
      offsetof(mixp_scaler_state, member), MIXP_F32, MIXPI_AT_LEAST_0 }
#define MIXPI_FIELD_SPIKE(name, member, dtype) \
    { MIXPI_OF_SPIKE, "optimizer.%d.spike." name, \
      offsetof(mixp_step_state, spike) + offsetof(mixp_spike_state, member), dtype, \
      MIXPI_COUNTER }
#define MIXPI_FIELD_WATCH(member, must) \
    { MIXPI_OF_WATCH, "mixprec.guard." #member, offsetof(mixpi_watch, member), MIXP_I32, must }
#define MIXPI_FIELD_GROUP(member, dtype, must) \
    { MIXPI_OF_GROUP, "optimizer.%d.group.%d." #member, offsetof(mixp_param_group, member), \
      dtype, must }

static const mixpi_field mixpi_fields[] = {
    MIXPI_FIELD_WATCH(since, MIXPI_COUNTER),
    MIXPI_FIELD_WATCH(force, MIXPI_FLAG),
    MIXPI_FIELD_WATCH(barren, MIXPI_COUNTER),
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
    MIXPI_FIELD_PREDICTION(largest),
    MIXPI_FIELD_PREDICTION(peak),
    MIXPI_FIELD_SPIKE("norms", entered[0], MIXP_I64),
    MIXPI_FIELD_SPIKE("losses", entered[1], MIXP_I64),
    MIXPI_FIELD_SPIKE("in_a_row", in_a_row, MIXP_I32),
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
#undef MIXPI_FIELD_PREDICTION
#undef MIXPI_FIELD_SPIKE
#undef MIXPI_FIELD_GROUP

/* One tensor or number that must survive, and where it lives. */
typedef struct mixpi_state_item {
    mixp_st_entry e;            /* e.data: on saving, where it lives; on loading, the file's */
    void         *memory;
    int           on_device;
    int           optional;     /* a file may lack it,                                  */
    int           absent;       /* and does: it begins with zeros then                  */
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
    item.on_device = field->owner != MIXPI_OF_CONTEXT &&
                     field->owner != MIXPI_OF_GROUP && field->owner != MIXPI_OF_WATCH;
    item.optional = field->owner == MIXPI_OF_PREDICTION ||
                    field->owner == MIXPI_OF_SPIKE || field->owner == MIXPI_OF_WATCH;
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

/* The scales of a moment in blocks. */
static mixpi_state_item mixpi_state_scales(const mixp_param_row *row, uint8_t *scales) {
    mixpi_state_item item;
    memset(&item, 0, sizeof item);
    item.e.dtype = MIXP_F8_E8M0;
    item.e.rank = 1;
    item.e.shape[0] = mixpi_state_blocks(row);
    item.e.bytes = (size_t)item.e.shape[0];
    item.memory = scales;
    item.on_device = 1;
    return item;
}

/* A master: what lies beside a bf16 weight is 16 or 8 bits, and no number by itself. */
static mixpi_state_item mixpi_state_master(const mixp_tensor *p,
                                           const mixp_param_row *row) {
    mixpi_state_item item = mixpi_state_tensor(p, row->master_dtype, row->master);
    if (row->master_dtype != MIXP_BF16) return item;
    item.e.dtype = MIXPI_OPAQUE;
    item.e.type = "U16";
    return item;
}

static void mixpi_state_add_row(mixpi_state *s, const mixp_tensor *p,
                                const mixp_param_row *row, int optimizer) {
    static const mixpi_field missed = { MIXPI_OF_OPTIMIZER, "", 0, MIXP_I64,
                                        MIXPI_COUNTER };
    if (row->m)
        mixpi_state_add(s, mixpi_state_tensor(p, row->m_dtype, row->m),
                        "optimizer.%d.m.%s", optimizer, p->name);
    if (row->m_scale)
        mixpi_state_add(s, mixpi_state_scales(row, row->m_scale),
                        "optimizer.%d.m_scale.%s", optimizer, p->name);
    if (row->v)
        mixpi_state_add(s, mixpi_state_tensor(p, row->v_dtype, row->v),
                        "optimizer.%d.v.%s", optimizer, p->name);
    if (row->v_scale)
        mixpi_state_add(s, mixpi_state_scales(row, row->v_scale),
                        "optimizer.%d.v_scale.%s", optimizer, p->name);
    if (row->master)
        mixpi_state_add(s, mixpi_state_master(p, row), "optimizer.%d.master.%s",
                        optimizer, p->name);
    mixpi_state_add(s, mixpi_state_number(&missed, row->missed), "optimizer.%d.missed.%s",
                    optimizer, p->name);
}

/* What an optimizer that skips spikes holds steps against. */
static void mixpi_state_add_spike(mixpi_state *s, mixp_optimizer *opt, int number) {
    mixp_checkpoint_value window = { NULL, MIXP_F64, 0, NULL };
    mixpi_state_item item;
    if (!opt->plan.spike.of) return;
    window.count = (int64_t)opt->plan.spike.window * MIXPI_SPIKE_KINDS;
    window.data = opt->plan.spike_window;
    item = mixpi_state_value(&window);
    item.on_device = 1;
    item.optional = 1;
    mixpi_state_add(s, item, "optimizer.%d.spike.window", number);
    mixpi_state_add_fields(s, MIXPI_OF_SPIKE, opt->state, number, 0);
}

static void mixpi_state_add_optimizer(mixpi_state *s, mixp_optimizer *opt, int number) {
    int64_t i;
    int g;
    mixpi_state_add_fields(s, MIXPI_OF_OPTIMIZER, opt->state, number, 0);
    for (g = 0; g < opt->plan.n_groups; g++)
        mixpi_state_add_fields(s, MIXPI_OF_GROUP, &opt->plan.groups[g], number, g);
    for (i = 0; i < opt->count; i++) {
        size_t item = s->n_items;
        mixpi_state_add_row(s, opt->slots[i].param, &opt->rows[i], number);
        if (!s->items || mixpi_is_own(opt, i)) continue;
        while (item < s->n_items) s->items[item++].on_device = 0;   /* borrowed: see below */
    }
    mixpi_state_add_spike(s, opt, number);
}

/* What a guard knows of its sites: a row each. */
static void mixpi_state_add_watch(mixpi_state *s, mixpi_watch *w) {
    mixpi_state_item item;
    memset(&item, 0, sizeof item);
    item.optional = 1;
    item.e.dtype = MIXP_I64;
    item.e.rank = 1;
    item.e.shape[0] = w->capacity;
    item.e.bytes = (size_t)w->capacity * sizeof *w->hashes;
    item.memory = w->hashes;
    mixpi_state_add(s, item, "mixprec.guard.sites");
    item.e.dtype = MIXP_I32;
    item.e.rank = 2;
    item.e.shape[1] = MIXPI_SITE_STATES;
    item.e.bytes = (size_t)w->capacity * MIXPI_SITE_STATES * sizeof *w->states;
    item.memory = w->states;
    mixpi_state_add(s, item, "mixprec.guard.states");
    mixpi_state_add_fields(s, MIXPI_OF_WATCH, w, 0, 0);
}

/* Is it of a kind that a file may have without a use for it here? */
static int mixpi_is_optional_name(const char *name) {
    if (strncmp(name, "mixprec.guard.", 14) == 0) return 1;
    if (strncmp(name, "scaler.prediction.", 18) == 0) return 1;
    return strncmp(name, "optimizer.", 10) == 0 && strstr(name, ".spike.") != NULL;
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
    if (s->ctx->watch && s->ctx->watch->capacity) mixpi_state_add_watch(s, s->ctx->watch);
    for (i = 0; i < what->n_values; i++)
        mixpi_state_add(s, mixpi_state_value(&what->values[i]), "value.%s",
                        what->values[i].name);
    if (what->scaler && !what->scaler->desc.disabled)
        mixpi_state_add_fields(s, MIXPI_OF_SCALER, what->scaler->state, 0, 0);
    if (what->scaler && what->scaler->rule.predicts && !what->scaler->desc.disabled)
        mixpi_state_add_fields(s, MIXPI_OF_PREDICTION, what->scaler->state, 0, 0);
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

/* --- checkpoints: states that other ranks have --------------------------------------------------
 *
 * For the time of a save or a load the rows of parameters that another rank owns point to host
 * memory, laid out as their owner's states are. Before a save, their owners fill it.
 */
static size_t mixpi_row_bytes(const mixp_optimizer *opt, int64_t i) {
    mixp_param_row row = opt->rows[i];
    mixpi_layout lay = { NULL, 0 };
    mixpi_row_layout(opt, &row, &lay);
    return lay.used;
}

/* Gives every row that is not this rank's its memory; or, with NULL, takes it away. */
static void mixpi_rows_borrow(mixp_optimizer *opt, char *memory) {
    int64_t i;
    for (i = 0; i < opt->count; i++) {
        mixp_param_row *row = &opt->rows[i];
        mixpi_layout lay = { memory, 0 };
        if (mixpi_is_own(opt, i)) continue;
        mixpi_row_layout(opt, row, &lay);
        if (memory) memory += lay.used;
        else {
            row->missed = NULL;
            row->m = row->v = row->master = NULL;
            row->m_scale = row->v_scale = NULL;
        }
    }
}

/* Fills them: each owner sends its states, as whole numbers that all add to zeros of their own. */
static mixp_result mixpi_rows_collect(mixp_optimizer *opt) {
    mixp_context *ctx = opt->ctx;
    mixp_result r = MIXP_OK;
    int64_t i;
    for (i = 0; i < opt->count && r == MIXP_OK; i++) {
        size_t bytes = mixpi_row_bytes(opt, i);
        void *all = mixpi_context_scratch(ctx, bytes);
        if (!all) return MIXP_ERR_MEMORY;
        if (mixpi_is_own(opt, i)) r = mixpi_copy_bytes(ctx, all, opt->rows[i].missed, bytes);
        else r = mixpi_device_zero(ctx, all, bytes);
        if (r == MIXP_OK)
            r = mixpi_ranks_run(ctx, "the sum of states", ctx->ranks.sum,
                                mixpi_out_to(all, MIXP_I32, 0), (int64_t)(bytes / 4));
        /* Without memory to borrow this rank goes along all the same: the others wait. */
        if (r == MIXP_OK && !mixpi_is_own(opt, i) && opt->rows[i].missed)
            r = mixpi_download(ctx, opt->rows[i].missed, all, bytes);
    }
    return r;
}

static int mixpi_any_sharded(const mixp_checkpoint *what)
{ return what->n_optimizers > 0 && mixpi_is_sharded(what->ctx); }

/* Memory for what all optimizers borrow, taken into use; NULL: none is needed, or there is none. */
static void *mixpi_states_borrow(const mixp_checkpoint *what, mixpi_report *report) {
    size_t bytes = 0;
    char *memory, *at;
    int o;
    int64_t i;
    if (!mixpi_any_sharded(what)) return NULL;
    for (o = 0; o < what->n_optimizers; o++)
        for (i = 0; i < what->optimizers[o]->count; i++)
            bytes += mixpi_row_bytes(what->optimizers[o], i);
    memory = (char *)mixpi_st_allocate(report, what->ctx, bytes, 1);
    if (!memory) return NULL;
    memset(memory, 0, bytes);
    for (o = 0, at = memory; o < what->n_optimizers; o++) {
        mixpi_rows_borrow(what->optimizers[o], at);
        for (i = 0; i < what->optimizers[o]->count; i++)
            at += mixpi_row_bytes(what->optimizers[o], i);
    }
    return memory;
}

static void mixpi_states_return(const mixp_checkpoint *what, void *memory) {
    int o;
    if (!memory) return;
    for (o = 0; o < what->n_optimizers; o++) mixpi_rows_borrow(what->optimizers[o], NULL);
    mixpi_st_release(what->ctx, memory);
}

static mixp_result mixpi_states_collect(const mixp_checkpoint *what) {
    mixp_result r = MIXP_OK;
    int o;
    if (!mixpi_any_sharded(what)) return MIXP_OK;
    for (o = 0; o < what->n_optimizers && r == MIXP_OK; o++)
        r = mixpi_rows_collect(what->optimizers[o]);
    return r;
}

/* What became of a save that rank 0 wrote, told to all; and all wait for it. */
static mixp_result mixpi_states_saved(const mixp_checkpoint *what, mixp_result r) {
    const mixp_ranks_desc *k = &what->ctx->ranks;
    double *table;
    mixp_result shared, of_0;
    if (!mixpi_any_sharded(what)) return r;
    table = (double *)mixpi_host_take(what->ctx, (size_t)k->size * sizeof *table);
    if (!table) return mixpi_out_of_memory(what->ctx, (size_t)k->size * sizeof *table);
    memset(table, 0, (size_t)k->size * sizeof *table);
    table[k->rank] = (double)(int)r;
    shared = mixpi_ranks_share(what->ctx, table, 1);
    of_0 = (mixp_result)(int)table[0];
    mixpi_host_put(what->ctx, table);
    if (r != MIXP_OK || shared != MIXP_OK) return r != MIXP_OK ? r : shared;
    if (of_0 == MIXP_OK) return MIXP_OK;
    return mixp_context_fail(what->ctx, of_0, "mixp_checkpoint_save: rank 0 could not: %s",
                             mixp_result_text(of_0));
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
    mixp_result r = mixpi_guard_pack(what->ctx);
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
    void *borrowed;
    int writes;
    if (result != MIXP_OK) return result;
    r = mixpi_report_begin(path, error, sizeof error);
    result = mixpi_checkpoint_sync(what);
    if (result != MIXP_OK) mixpi_report_fail(&r, result, "the device failed");
    writes = !mixpi_any_sharded(what) || what->ctx->ranks.rank == 0;
    borrowed = mixpi_states_borrow(what, &r);
    result = mixpi_states_collect(what);
    if (result != MIXP_OK) mixpi_report_fail(&r, result, "ranks did not send their states");
    mixpi_state_list(&state, &r, what->ctx, what);
    memset(&plan, 0, sizeof plan);
    plan.metadata = metadata;
    plan.n_metadata = 2;
    mixpi_state_plan(&state, &plan);
    if (writes) mixpi_plan_save(&r, &plan);
    else mixpi_st_release(plan.ctx, plan.items);
    mixpi_state_release(&state);
    mixpi_states_return(what, borrowed);
    if (r.result != MIXP_OK)
        mixp_context_fail(what->ctx, r.result, "mixp_checkpoint_save: %s", error);
    return mixpi_states_saved(what, r.result);
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

static int mixpi_same_type(const mixp_st_entry *a, const mixp_st_entry *b) {
    if (a->dtype != b->dtype) return 0;
    return a->dtype != MIXPI_OPAQUE || strcmp(a->type, b->type) == 0;
}

static void mixpi_diff_pair(mixpi_diff *d, const mixp_st_entry *here,
                            const mixp_st_entry *file) {
    char here_text[256], file_text[256];
    int same = mixpi_same_shape(here, file);
    if (same && mixpi_same_type(here, file)) return;
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

/* Both lists are sorted by name. What is in one alone, and may be, is left out of it. */
static void mixpi_state_compare(mixpi_state *s, mixp_safetensors *file) {
    mixpi_diff diff;
    size_t i = 0, k = 0;
    memset(&diff, 0, sizeof diff);
    while (i < s->n_items || k < file->n_items) {
        const mixp_st_entry *here = i < s->n_items ? &s->items[i].e : NULL;
        const mixp_st_entry *there = k < file->n_items ? &file->items[k].e : NULL;
        int order = mixpi_merge_order(here, there);
        /* plant: merge_missing */
        if (order < 0 && s->items[i].optional) s->items[i].absent = 1;
        else if (order < 0)
            mixpi_diff_note(&diff, MIXP_ERR_SHAPE, here->name, "missing");
        else if (order > 0 && mixpi_is_optional_name(there->name))
            file->items[k].wanted = 0;
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

/* Both lists have the same names, in the same order, but for what was left out: items get the
 * file's data, and numbers are checked. */
static mixp_result mixpi_state_take(mixpi_state *s, const mixp_safetensors *file,
                                    const mixp_checkpoint *what) {
    size_t i, k = 0;
    if (s->report->result != MIXP_OK) return s->report->result;
    for (i = 0; i < s->n_items; i++) {
        if (s->items[i].absent) continue;
        while (!file->items[k].wanted) k++;
        s->items[i].e.data = file->items[k++].e.data;
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
        if (item->absent && item->on_device)
            r = mixpi_device_zero(ctx, item->memory, item->e.bytes);
        else if (item->absent) memset(item->memory, 0, item->e.bytes);
        else if (item->on_device)
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
    mixpi_guard_unpack(ctx);
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
    void *borrowed;
    if (result != MIXP_OK) return result;
    memset(&file, 0, sizeof file);
    file.ctx = what->ctx;
    r = mixpi_report_begin(path, error, sizeof error);
    borrowed = mixpi_states_borrow(what, &r);
    mixpi_state_list(&state, &r, what->ctx, what);
    if (mixpi_file_open(&f, &r) == MIXP_OK)
        mixpi_checkpoint_read(&state, &file, &f, what);
    mixpi_file_close(&f);
    mixpi_st_clear(&file);
    mixpi_state_release(&state);
    mixpi_states_return(what, borrowed);
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
