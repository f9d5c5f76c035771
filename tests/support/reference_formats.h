/* reference_formats.h - small formats from their written definitions, for the tests only.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * This file is independent of the method of mixprec.h. A format is decoded with ldexp into a table
 * of doubles. A number is encoded by finding its two neighbours in that table and comparing the
 * number with their midpoint, which a double holds exactly.
 */
#ifndef REFERENCE_FORMATS_H
#define REFERENCE_FORMATS_H
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef enum ref_kind { REF_IEEE, REF_FN, REF_FNUZ, REF_FINITE } ref_kind;
typedef struct ref_format {
    mixp_dtype dtype;
    int        exponent_bits, mantissa_bits, bias;
    ref_kind   kind;
    double     max;             /* as the standards print it                               */
    uint32_t   finite;          /* codes 0 .. finite-1 are the finite magnitudes           */
} ref_format;

static const ref_format ref_formats[] = {
    { MIXP_F16,            5, 10, 15,  REF_IEEE,   65504.0, 0x7C00 },
    { MIXP_BF16,           8, 7,  127, REF_IEEE,   3.3895313892515354759e38, 0x7F80 },
    { MIXP_F8_E4M3,        4, 3,  7,   REF_FN,     448.0, 0x7F },
    { MIXP_F8_E5M2,        5, 2,  15,  REF_IEEE,   57344.0, 0x7C },
    { MIXP_F8_E4M3FNUZ,    4, 3,  8,   REF_FNUZ,   240.0, 0x80 },
    { MIXP_F8_E5M2FNUZ,    5, 2,  16,  REF_FNUZ,   57344.0, 0x80 },
    { MIXP_F8_E4M3B11FNUZ, 4, 3,  11,  REF_FNUZ,   30.0, 0x80 },
    { MIXP_F8_E3M4,        3, 4,  3,   REF_IEEE,   15.5, 0x70 },
    { MIXP_F6_E3M2,        3, 2,  3,   REF_FINITE, 28.0, 0x20 },
    { MIXP_F6_E2M3,        2, 3,  1,   REF_FINITE, 7.5, 0x20 },
    { MIXP_F4_E2M1,        2, 1,  1,   REF_FINITE, 6.0, 0x08 }
};
enum { REF_FORMATS = sizeof ref_formats / sizeof ref_formats[0] };

typedef struct ref_table {
    const ref_format *f;
    double           *value;    /* of code 0 .. finite-1, and one step beyond              */
} ref_table;

static double ref_of_bits64(uint64_t u) { double x; memcpy(&x, &u, 8); return x; }
static uint64_t ref_bits64(double x) { uint64_t u; memcpy(&u, &x, 8); return u; }
static int ref_is_nan(double x) { return (ref_bits64(x) << 1) > ((uint64_t)0x7FF << 53); }
static int ref_is_inf(double x) { return (ref_bits64(x) << 1) == ((uint64_t)0x7FF << 53); }

/* The value of an f32's bits; a NaN's payload goes along. */
static double ref_f32(uint32_t u) {
    int e = (int)(u >> 23 & 255u);
    int32_t m = (int32_t)(u & 0x7FFFFFu);
    if (e == 255) return ref_of_bits64((uint64_t)(u >> 31) << 63 | (uint64_t)0x7FF << 52 | (uint64_t)m << 29);
    double x = e ? ldexp((double)(m + 0x800000), e - 150) : ldexp((double)m, -149);
    return u >> 31 ? -x : x;
}

static ref_table ref_make(const ref_format *f) {
    ref_table t;
    t.f = f;
    t.value = (double *)malloc((f->finite + 1u) * sizeof(double));
    for (uint32_t c = 0; t.value && c <= f->finite; c++) {
        int e = (int)(c >> f->mantissa_bits);
        int m = (int)(c & ((1u << f->mantissa_bits) - 1u)), one = 1 << f->mantissa_bits;
        t.value[c] = e ? ldexp((double)(m + one), e - f->bias - f->mantissa_bits)
                       : ldexp((double)m, 1 - f->bias - f->mantissa_bits);
    }
    return t;
}

/* Is this code a NaN of the format? Otherwise *x is its value (Inf included). */
static inline int ref_decode(const ref_table *t, uint32_t code, double *x) {
    int width = t->f->exponent_bits + t->f->mantissa_bits;
    uint32_t a = code & ((1u << width) - 1u);
    int negative = (int)(code >> width & 1u);
    if (t->f->kind == REF_FNUZ && code == 1u << width) return 1;
    if (a < t->f->finite) *x = negative ? -t->value[a] : t->value[a];
    else if (t->f->kind == REF_IEEE && a == t->f->finite)
        *x = ref_of_bits64((uint64_t)negative << 63 | (uint64_t)0x7FF << 52);
    else return 1;
    return 0;
}

/* What stands for overflow, with sign. */
static uint32_t ref_overflow(const ref_table *t, uint32_t sign, int saturate) {
    if (saturate || t->f->kind == REF_FINITE) return sign | (t->f->finite - 1u);
    return t->f->kind == REF_FNUZ ? t->f->finite : sign | t->f->finite;
}

/* To nearest even. NaN: quiet bit, sign, top of the payload where the format is IEEE's. */
static uint32_t ref_encode(const ref_table *t, double x, int saturate) {
    const ref_format *f = t->f;
    int width = f->exponent_bits + f->mantissa_bits;
    uint32_t sign = (uint32_t)(ref_bits64(x) >> 63) << width, lo = 0, hi = f->finite;
    double a = ref_of_bits64(ref_bits64(x) << 1 >> 1), middle;
    if (ref_is_nan(x)) {
        if (f->kind == REF_FINITE) return f->finite - 1u;
        if (f->kind == REF_FNUZ) return f->finite;
        if (f->kind == REF_FN) return sign | f->finite;
        return sign | f->finite | 1u << (f->mantissa_bits - 1) |
               ((uint32_t)(ref_bits64(x) >> (52 - f->mantissa_bits)) & ((1u << f->mantissa_bits) - 1u));
    }
    if (ref_is_inf(x) || a >= t->value[hi]) return ref_overflow(t, sign, saturate);
    while (hi - lo > 1) {
        uint32_t mid = (lo + hi) / 2;
        if (t->value[mid] <= a) lo = mid; else hi = mid;
    }
    middle = (t->value[lo] + t->value[hi]) / 2;
    if (a > middle || (a == middle && lo % 2 == 1)) lo = hi;
    if (lo == f->finite) return ref_overflow(t, sign, saturate);
    return f->kind == REF_FNUZ && lo == 0 ? 0 : sign | lo;
}
#endif
