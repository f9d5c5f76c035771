/* test_formats.c - conversions compared with tests/support/reference_formats.h, on every instruction set.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#ifndef _GNU_SOURCE
#  define _GNU_SOURCE           /* feenableexcept */
#endif
#include <fenv.h>
#if defined(__SSE__)
#  include <xmmintrin.h>
#endif
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include "reference_formats.h"
#include "test.h"
#include "args.h"

static ref_table tables[REF_FORMATS];
static const mixp_dtype vector_dtypes[] = { MIXP_F32, MIXP_F16, MIXP_BF16, MIXP_F8_E4M3, MIXP_F8_E5M2 };

static const ref_table *table_of(mixp_dtype d) {
    int i;
    for (i = 0; i < REF_FORMATS; i++) if (ref_formats[i].dtype == d) return &tables[i];
    return NULL;
}

/* Where the code of `size` bytes lies in a uint64_t: at its end on a big-endian machine. */
static size_t code_offset(size_t size) {
    const uint16_t one = 1;
    return *(const unsigned char *)&one ? 0 : 8 - size;
}
static uint64_t code_at(const void *p, mixp_dtype d, size_t i) {
    size_t size = mixp_dtype_size(d);
    uint64_t code = 0;
    memcpy((char *)&code + code_offset(size), (const char *)p + i * size, size);
    return code;
}
static void set_code(void *p, mixp_dtype d, size_t i, uint64_t code) {
    size_t size = mixp_dtype_size(d);
    memcpy((char *)p + i * size, (const char *)&code + code_offset(size), size);
}

/* The value of a code of a format that vector code serves; NaN with its payload. */
static double value_of(mixp_dtype d, uint64_t code) {
    double x = 0;
    const ref_table *t = table_of(d);
    if (d == MIXP_F32) return ref_f32((uint32_t)code);
    if (!ref_decode(t, (uint32_t)code, &x)) return x;
    {   /* NaN: fp8 e4m3 has no payload; the others keep theirs on top */
        int width = t->f->exponent_bits + t->f->mantissa_bits;
        uint64_t m = d == MIXP_F8_E4M3 ? 0 : code & ((1u << t->f->mantissa_bits) - 1u);
        return ref_of_bits64((code >> width & 1u) << 63 | (uint64_t)0x7FF8 << 48 | m << (52 - t->f->mantissa_bits));
    }
}
/* f64 to f32 is what the machine does in its default environment, where tests start. */
static uint64_t expect(mixp_dtype to, double x, int saturate) {
    uint32_t u;
    if (to != MIXP_F32) return ref_encode(table_of(to), x, saturate);
    if (ref_is_nan(x)) return (ref_bits64(x) >> 63) << 31 | 0x7FC00000u | (ref_bits64(x) >> 29 & 0x7FFFFFu);
    float f = (float)x;
    memcpy(&u, &f, 4);
    return u;
}

static uint32_t lcg(uint32_t *s) { return *s = *s * 1664525u + 1013904223u; }
/* Bit patterns that meet every exponent, both zeros, subnormals, Inf and NaNs. */
static uint32_t pattern(uint32_t *s) {
    uint32_t u = lcg(s) ^ lcg(s) >> 13;
    switch (lcg(s) >> 28) {
    case 0: return u & 0x807FFFFFu;
    case 1: return u | 0x7F800000u;
    case 2: return u & 0xFF800000u;
    case 3: return (u & 0x80001FFFu) | 0x477FE000u;
    case 4: case 5: case 6: case 7: case 8: return (u & 0x8FFFFFFFu) | 0x30000000u;
    default: return u;
    }
}

#define EACH_CPU(d)                                                                       \
    for (isa_ = 0; isa_ < MIXP_ISA_COUNT; isa_++)                                         \
        if (((d) = mixp_cpu_with((mixp_isa)isa_)) != NULL)

/* --- scalars --------------------------------------------------------------------------- */

static void decode_every_code(void) {
    for (int i = 0; i < REF_FORMATS; i++) {
        const ref_table *t = &tables[i];
        int width = t->f->exponent_bits + t->f->mantissa_bits;
        CHECK(t->value[t->f->finite - 1] == t->f->max);
        for (uint32_t c = 0; c < 2u << width; c++) {
            double want = 0, got = mixp_decode(t->f->dtype, c);
            if (ref_decode(t, c, &want)) CHECK(ref_is_nan(got));
            else {
                CHECK(ref_bits64(got) == ref_bits64(want));
                CHECK_INT(mixp_encode(t->f->dtype, want, 0), c);
                if (!ref_is_inf(want)) CHECK_INT(mixp_encode(t->f->dtype, want, 1), c);
            }
        }
    }
    for (int i = 0; i < 255; i++) {
        CHECK(mixp_decode(MIXP_F8_E8M0, (uint64_t)i) == ldexp(1.0, i - 127));
        CHECK_INT(mixp_encode(MIXP_F8_E8M0, ldexp(1.0, i - 127), 0), i);
    }
    CHECK(ref_is_nan(mixp_decode(MIXP_F8_E8M0, 255)));
}

/* 32-bit x86 returns floats in x87 registers, which make a signalling NaN a quiet one. */
static uint32_t as_returned(uint32_t u) {
#if defined(__i386__)
    if ((u & 0x7FFFFFFFu) > 0x7F800000u) u |= 0x400000u;
#endif
    return u;
}

static void widen_every_code(void) {
    for (uint32_t c = 0; c < 65536; c++) {
        uint32_t f = mixp_bits_of_f32(mixp_f32_from_f16(mixp_f16_of_bits(c)));
        uint32_t b = mixp_bits_of_f32(mixp_f32_from_bf16(mixp_bf16_of_bits(c)));
        CHECK_INT(f, expect(MIXP_F32, value_of(MIXP_F16, c), 0));
        CHECK_INT(as_returned(b), as_returned(c << 16));
        if (c >= 256) continue;
        f = mixp_bits_of_f32(mixp_f32_from_e4m3(mixp_e4m3_of_bits(c)));
        b = mixp_bits_of_f32(mixp_f32_from_e5m2(mixp_e5m2_of_bits(c)));
        CHECK_INT(f, expect(MIXP_F32, value_of(MIXP_F8_E4M3, c), 0));
        CHECK_INT(b, expect(MIXP_F32, value_of(MIXP_F8_E5M2, c), 0));
    }
}

static void check_f32(uint32_t u) {
    float x = mixp_f32_of_bits(u);
    double d = ref_f32(u);
    CHECK_INT(mixp_f16_from_f32(x).bits, expect(MIXP_F16, d, 0));
    CHECK_INT(mixp_bf16_from_f32(x).bits, expect(MIXP_BF16, d, 0));
    CHECK_INT(mixp_e4m3_from_f32(x).bits, expect(MIXP_F8_E4M3, d, 0));
    CHECK_INT(mixp_e5m2_from_f32(x).bits, expect(MIXP_F8_E5M2, d, 0));
    CHECK_INT(mixp_e4m3_from_f32_sat(x).bits, expect(MIXP_F8_E4M3, d, 1));
    CHECK_INT(mixp_e5m2_from_f32_sat(x).bits, expect(MIXP_F8_E5M2, d, 1));
}

static void narrow_sampled_f32(void) {
    uint32_t s = 1, u = 0, i;
    do check_f32(u); while ((u += 16411u) >= 16411u);
    for (i = 0; i < 100000; i++) check_f32(pattern(&s));
}

/* The numbers people got wrong: written down, not computed. */
static void known_answers(void) {
    static const struct { double x; unsigned f16, bf16, e4m3, e5m2; } known[] = {
        { 1.0, 0x3C00, 0x3F80, 0x38, 0x3C },        { -0.0, 0x8000, 0x8000, 0x80, 0x80 },
        { 65504.0, 0x7BFF, 0x4780, 0x7F, 0x7C },    { 65519.99609375, 0x7BFF, 0x4780, 0x7F, 0x7C },
        { 65520.0, 0x7C00, 0x4780, 0x7F, 0x7C },    { 464.0, 0x5F40, 0x43E8, 0x7E, 0x5F },
        { 448.0, 0x5F00, 0x43E0, 0x7E, 0x5F },      { 480.0, 0x5F80, 0x43F0, 0x7F, 0x60 },
        { 57344.0, 0x7B00, 0x4760, 0x7F, 0x7B },    { 61440.0, 0x7B80, 0x4770, 0x7F, 0x7C },
        { 5.9604644775390625e-08, 0x0001, 0x3380, 0x00, 0x00 },     /* 2^-24 */
        { 2.98023223876953125e-08, 0x0000, 0x3300, 0x00, 0x00 },    /* 2^-25: a tie */
        { 0.0009765625, 0x1400, 0x3A80, 0x00, 0x14 },               /* 2^-10: a tie in e4m3 */
        { 0.1, 0x2E66, 0x3DCD, 0x1D, 0x2E },        { 1e-8, 0x0000, 0x322C, 0x00, 0x00 }
    };
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        double x = known[i].x;
        CHECK_INT(mixp_f16_from_f64(x).bits, known[i].f16);
        CHECK_INT(mixp_bf16_from_f64(x).bits, known[i].bf16);
        CHECK_INT(mixp_encode(MIXP_F8_E4M3, x, 0), known[i].e4m3);
        CHECK_INT(mixp_encode(MIXP_F8_E5M2, x, 0), known[i].e5m2);
    }
    /* Through f32 these three round twice: 3C01, 7C00, 0001. */
    CHECK_INT(mixp_f16_from_f64(1 + ldexp(1, -11)).bits, 0x3C00);
    CHECK_INT(mixp_f16_from_f64(1 + ldexp(1, -11) + ldexp(1, -30)).bits, 0x3C01);
    CHECK_INT(mixp_f16_from_f64(1 + ldexp(1, -11) - ldexp(1, -30)).bits, 0x3C00);
    CHECK_INT(mixp_f16_from_f64(1 + 3 * ldexp(1, -11) - ldexp(1, -30)).bits, 0x3C01);
    CHECK_INT(mixp_f16_from_f64(65520 - ldexp(1, -30)).bits, 0x7BFF);
    CHECK_INT(mixp_f16_from_f64(ldexp(1, -25) + ldexp(1, -60)).bits, 0x0001);
    CHECK_INT(mixp_f16_from_f32(mixp_f32_of_bits(0x7F800001)).bits, 0x7E00);    /* not Inf */
    CHECK_INT(mixp_bf16_from_f32(mixp_f32_of_bits(0x7FFFFFFF)).bits, 0x7FFF);   /* not -0 */
    CHECK_INT(mixp_bf16_from_f32(mixp_f32_of_bits(0xFF800001)).bits, 0xFFC0);
    CHECK_INT(mixp_f16_from_f32(mixp_f32_of_bits(0xFFA12345)).bits, 0xFF09);
    CHECK_INT(mixp_bf16_from_f32(mixp_f32_of_bits(0x7F7F8000)).bits, 0x7F80);
    CHECK_INT(mixp_bf16_from_f32(mixp_f32_of_bits(0x7F7F7FFF)).bits, 0x7F7F);
    /* e2m1's printed ties, and e8m0's corners. */
    CHECK_INT(mixp_encode(MIXP_F4_E2M1, 0.25, 0), 0);
    CHECK_INT(mixp_encode(MIXP_F4_E2M1, 2.5, 0), 4);
    CHECK_INT(mixp_encode(MIXP_F4_E2M1, 5.0, 0), 6);
    CHECK_INT(mixp_encode(MIXP_F4_E2M1, -1e30, 0), 15);
    CHECK_INT(mixp_encode(MIXP_F8_E8M0, 1.4142135, 0), 0x7F);
    CHECK_INT(mixp_encode(MIXP_F8_E8M0, 1.5, 0), 0x80);
    CHECK_INT(mixp_encode(MIXP_F8_E8M0, 3.0, 0), 0x81);
    CHECK_INT(mixp_encode(MIXP_F8_E8M0, 0.0, 0), 0x00);
    CHECK_INT(mixp_encode(MIXP_F8_E8M0, 1e-60, 0), 0x00);
    CHECK_INT(mixp_encode(MIXP_F8_E8M0, 1.2 * ldexp(1, -127), 0), 0x00);
    CHECK_INT(mixp_encode(MIXP_F8_E8M0, -2.0, 0), 0xFF);
    CHECK_INT(mixp_encode(MIXP_F8_E8M0, 1e300, 0), 0xFF);
    CHECK_INT(mixp_encode(MIXP_F8_E8M0, 1e300, 1), 0xFE);
}

static void constants_match_codes(void) {
    CHECK(mixp_decode(MIXP_F16, 0x7BFF) == (double)MIXP_F16_MAX);
    CHECK(mixp_decode(MIXP_F16, 0x0400) == (double)MIXP_F16_MIN);
    CHECK(mixp_decode(MIXP_F16, 0x0001) == (double)MIXP_F16_TINY);
    CHECK(mixp_decode(MIXP_F16, 0x3C01) == 1 + (double)MIXP_F16_EPSILON);
    CHECK(mixp_decode(MIXP_BF16, 0x7F7F) == (double)MIXP_BF16_MAX);
    CHECK_INT(mixp_bits_of_f32(MIXP_BF16_MIN), 0x00800000);
    CHECK_INT(mixp_bits_of_f32(MIXP_BF16_TINY), 0x00010000);
    CHECK(mixp_decode(MIXP_BF16, 0x3F81) == 1 + (double)MIXP_BF16_EPSILON);
    CHECK(mixp_decode(MIXP_F8_E4M3, 0x7E) == (double)MIXP_E4M3_MAX);
    CHECK(mixp_decode(MIXP_F8_E4M3, 0x08) == (double)MIXP_E4M3_MIN);
    CHECK(mixp_decode(MIXP_F8_E4M3, 0x01) == (double)MIXP_E4M3_TINY);
    CHECK(mixp_decode(MIXP_F8_E4M3, 0x39) == 1 + (double)MIXP_E4M3_EPSILON);
    CHECK(mixp_decode(MIXP_F8_E5M2, 0x7B) == (double)MIXP_E5M2_MAX);
    CHECK(mixp_decode(MIXP_F8_E5M2, 0x04) == (double)MIXP_E5M2_MIN);
    CHECK(mixp_decode(MIXP_F8_E5M2, 0x01) == (double)MIXP_E5M2_TINY);
    CHECK(mixp_decode(MIXP_F8_E5M2, 0x3D) == 1 + (double)MIXP_E5M2_EPSILON);
}

/* Every number of every format, every midpoint, and a hair to both sides of each. */
static void check_around(const ref_table *t, double x) {
    for (int k = 0; k < 10; k++) {
        double y = k < 2 ? x : k < 4 ? nextafter(x, 1e300) : k < 6 ? nextafter(x, -1e300)
                 : k < 8 ? x * (1 + ldexp(1, -30)) : x * (1 - ldexp(1, -30));
        if (k % 2) y = -y;
        CHECK_INT(mixp_encode(t->f->dtype, y, 0), ref_encode(t, y, 0));
        CHECK_INT(mixp_encode(t->f->dtype, y, 1), ref_encode(t, y, 1));
    }
}
static void narrow_f64_around_midpoints(void) {
    for (int i = 0; i < REF_FORMATS; i++) {
        const ref_table *t = &tables[i];
        uint32_t c, step = t->f->finite > 1000 ? 13 : 1;
        for (c = 0; c < t->f->finite; c += step) {
            check_around(t, t->value[c]);
            check_around(t, (t->value[c] + t->value[c + 1]) / 2);
        }
        check_around(t, (t->f->max + t->value[t->f->finite]) / 2);
        check_around(t, t->value[1] / 2);
        check_around(t, 1e300);
        check_around(t, 1e-300);
        CHECK_INT(mixp_encode(t->f->dtype, HUGE_VAL, 0), ref_encode(t, HUGE_VAL, 0));
        CHECK_INT(mixp_encode(t->f->dtype, -HUGE_VAL, 1), ref_encode(t, -HUGE_VAL, 1));
        CHECK_INT(mixp_encode(t->f->dtype, ref_of_bits64(0xFFF0000000000001u), 0),
                  ref_encode(t, ref_of_bits64(0xFFF0000000000001u), 0));
        CHECK_INT(mixp_encode(t->f->dtype, ref_of_bits64(0x7FFABCDEF0123456u), 1),
                  ref_encode(t, ref_of_bits64(0x7FFABCDEF0123456u), 1));
    }
}

static void f64_to_f32_and_back(void) {
    static double x[5003], z[5003];
    static uint32_t y[5003];
    const mixp_device *d;
    uint32_t s = 3, i;
    int isa_;
    for (i = 0; i < 300000; i++) {
        uint32_t u = pattern(&s);
        double exact = ref_f32(u), next = ref_f32(u + 1), middle = (exact + next) / 2, q = middle;
        if (!ref_is_nan(exact)) CHECK(ref_bits64(mixp_f64_from_f32(mixp_f32_of_bits(u))) == ref_bits64(exact));
        if (i % 3 == 1) q = nextafter(middle, exact);
        if (i % 3 == 2) q = nextafter(middle, next);
        CHECK_INT(mixp_bits_of_f32(mixp_f32_from_f64(q)), expect(MIXP_F32, q, 0));
    }
    CHECK_INT(mixp_bits_of_f32(mixp_f32_from_f64(1e39)), 0x7F800000);
    EACH_CPU(d) {
        for (i = 0; i < 5003; i++) {
            uint64_t u = (uint64_t)pattern(&s) << 32 | lcg(&s);
            x[i] = i % 2 ? ref_of_bits64(u) : ref_f32((uint32_t)(u >> 32)) * (1 + ldexp((double)(u & 0xFFFFFFu), -50));
        }
        CHECK_INT(mixp_convert_with(d, y, MIXP_F32, x, MIXP_F64, 5003, NULL), MIXP_OK);
        CHECK_INT(mixp_convert_with(d, z, MIXP_F64, y, MIXP_F32, 5003, NULL), MIXP_OK);
        for (i = 0; i < 5003; i++) {
            CHECK_INT(y[i], expect(MIXP_F32, x[i], 0));
            CHECK(ref_bits64(z[i]) == ref_bits64(ref_f32(y[i])));
        }
    }
    CHECK_INT(mixp_bits_of_f32(mixp_f32_from_f64(-1e-60)), 0x80000000);
}

static void tf32_rounds_to_nearest_even(void) {
    uint32_t s = 9, i;
    for (i = 0; i < 200000; i++) {
        uint32_t u = pattern(&s), down = u & 0xFFFFE000u, got = mixp_bits_of_f32(mixp_tf32_round(mixp_f32_of_bits(u)));
        double x = ref_f32(u), a = ref_f32(down), b = ref_f32(down + 0x2000u);
        CHECK_INT(got & 0x1FFFu, 0);
        if (ref_is_nan(x)) CHECK_INT(got, down | 0x400000u);
        else if (ref_is_inf(x)) CHECK_INT(got, u);
        else if ((down & 0x7FFFE000u) == 0x7F7FE000u) CHECK_INT(got, u & 0x1000u ? down + 0x2000u : down);
        else if (fabs(x - a) != fabs(b - x)) CHECK_INT(got, fabs(x - a) < fabs(b - x) ? down : down + 0x2000u);
        else CHECK_INT(got, down & 0x2000u ? down + 0x2000u : down);
    }
}

#if defined(__FLT16_MAX__) && !defined(__cplusplus)
__extension__ typedef _Float16 test_half;
static void agrees_with_the_compiler(void) {
    uint32_t s = 5, i;
    for (i = 0; i < 65536; i++) {
        uint16_t h = (uint16_t)i;
        test_half x;
        uint32_t u;
        memcpy(&x, &h, 2);
        float f = (float)x;
        memcpy(&u, &f, 4);
        CHECK_INT(mixp_bits_of_f32(mixp_f32_from_f16(mixp_f16_of_bits(i))), u);
    }
    for (i = 0; i < 300000; i++) {
        uint32_t u = pattern(&s);
        float f = mixp_f32_of_bits(u);
        double d = ref_f32(u) * (1 + ldexp((double)(lcg(&s) >> 8), -50));
        test_half x = (test_half)f, y = (test_half)d;
        uint16_t h;
        memcpy(&h, &x, 2);
        if (!ref_is_nan(ref_f32(u))) CHECK_INT(mixp_f16_from_f32(f).bits, h);
        memcpy(&h, &y, 2);
        if (!ref_is_nan(d)) CHECK_INT(mixp_f16_from_f64(d).bits, h);
    }
}
#else
static void agrees_with_the_compiler(void) { SKIP("this compiler has no _Float16"); }
#endif

/* --- arrays ------------------------------------------------------------------------------ */

/* Every pair of the five dtypes that vector code serves, on 2^18 patterns or all codes. */
static void arrays_of_every_pair(void) {
    enum { N = 1 << 18 };
    static char src[N * 4], dst[N * 4], sat[N * 4];
    const mixp_device *d;
    int isa_, a, b;
    for (a = 0; a < 5; a++) {
        mixp_dtype from = vector_dtypes[a];
        uint32_t s = 11;
        size_t n = from == MIXP_F32 ? N : from == MIXP_F16 || from == MIXP_BF16 ? 65536 : 256;
        for (size_t i = 0; i < n; i++) set_code(src, from, i, from == MIXP_F32 ? pattern(&s) : i);
        for (b = 0; b < 5; b++) EACH_CPU(d) {
            mixp_dtype to = vector_dtypes[b];
            mixp_rounding saturate;
            memset(&saturate, 0, sizeof saturate);
            saturate.saturate = 1;
            CHECK_INT(mixp_convert_with(d, dst, to, src, from, (int64_t)n, NULL), MIXP_OK);
            CHECK_INT(mixp_convert_with(d, sat, to, src, from, (int64_t)n, &saturate), MIXP_OK);
            for (size_t i = 0; i < n; i++) {
                uint64_t code = code_at(src, from, i), want = expect(to, value_of(from, code), 0);
                if (to == from) want = code;
                if (from == MIXP_BF16 && to == MIXP_F32) want = code << 16;
                if (code_at(dst, to, i) != want) {
                    test_bad++;
                    TEST_SHOW("%s: %s %llx to %s is %llx, not %llx", d->name, mixp_dtype_name(from),
                              (unsigned long long)code, mixp_dtype_name(to),
                              (unsigned long long)code_at(dst, to, i), (unsigned long long)want);
                }
                if (to != from && to != MIXP_F32) CHECK_INT(code_at(sat, to, i), expect(to, value_of(from, code), 1));
            }
        }
    }
}

/* Every other dtype, from and to the five and f64. */
static void arrays_of_other_formats(void) {
    static double src[4096], back[4096];
    static uint8_t codes[4096];
    uint32_t s = 17;
    for (int i = 0; i < 4096; i++) src[i] = i < 2000 ? ref_f32(pattern(&s)) : ldexp((double)(int32_t)lcg(&s), -34);
    for (int k = 4; k < REF_FORMATS; k++) {
        const ref_table *t = &tables[k];
        CHECK_INT(mixp_convert(codes, t->f->dtype, src, MIXP_F64, 4096), MIXP_OK);
        CHECK_INT(mixp_convert(back, MIXP_F64, codes, t->f->dtype, 4096), MIXP_OK);
        for (int i = 0; i < 4096; i++) {
            double x;
            CHECK_INT(codes[i], ref_encode(t, src[i], 0));
            if (ref_decode(t, codes[i], &x)) CHECK(ref_is_nan(back[i]));
            else CHECK(ref_bits64(x) == ref_bits64(back[i]));
        }
    }
}

/* Scales from f32, with the neighbours of each tie and of each power of two, and back. */
static void arrays_of_scales(void) {
    enum { N = 1 << 14, TIES = 256 * 2 * 6 };
    static uint32_t src[N], back[256];
    static uint8_t codes[N], sat[N], all[256];
    const mixp_device *d;
    mixp_rounding saturate;
    uint32_t s = 19;
    int isa_, i;
    memset(&saturate, 0, sizeof saturate);
    saturate.saturate = 1;
    for (i = 0; i < TIES; i++)
        src[i] = ((uint32_t)(i / 12) << 23) + ((uint32_t)(i / 6 % 2) << 21) * (i % 2 ? 2u : 3u) +
                 (uint32_t)(i % 6 / 2) - 1u;
    for (; i < N; i++) src[i] = pattern(&s);
    for (i = 0; i < 256; i++) all[i] = (uint8_t)i;
    EACH_CPU(d) {
        CHECK_INT(mixp_convert_with(d, codes, MIXP_F8_E8M0, src, MIXP_F32, N, NULL), MIXP_OK);
        CHECK_INT(mixp_convert_with(d, sat, MIXP_F8_E8M0, src, MIXP_F32, N, &saturate), MIXP_OK);
        CHECK_INT(mixp_convert_with(d, back, MIXP_F32, all, MIXP_F8_E8M0, 256, NULL), MIXP_OK);
        for (i = 0; i < N; i++) {
            CHECK_INT(codes[i], mixp_encode(MIXP_F8_E8M0, ref_f32(src[i]), 0));
            CHECK_INT(sat[i], mixp_encode(MIXP_F8_E8M0, ref_f32(src[i]), 1));
        }
        for (i = 0; i < 255; i++) CHECK(ref_f32(back[i]) == ldexp(1.0, i - 127));
        CHECK_INT(back[255], 0x7FC00000);
    }
}

/* Lengths around the vector width, every misalignment, and not a byte beyond the end. */
static void odd_lengths_and_alignments(void) {
    static char src[1024], dst[1024];
    const mixp_device *d;
    int isa_, a, b, n, shift;
    EACH_CPU(d) for (a = 0; a < 5; a++) for (b = 0; b < 5; b++) for (n = 0; n <= 70; n++) {
        mixp_dtype from = vector_dtypes[a], to = vector_dtypes[b];
        size_t bytes = (size_t)n * mixp_dtype_size(to), i;
        uint32_t s = (uint32_t)(n * 31 + a * 7 + b);
        for (shift = n % 3; shift < 16; shift += 3) {
            char *p = src + shift, *q = dst + (shift * 5) % 16;
            for (i = 0; i < (size_t)n; i++)
                set_code(p, from, i, from == MIXP_F32 ? pattern(&s) : pattern(&s) >> 16);
            memset(dst, 0x5A, sizeof dst);
            CHECK_INT(mixp_convert_with(d, q, to, p, from, n, NULL), MIXP_OK);
            for (i = 0; i < (size_t)n; i++) {
                uint64_t code = code_at(p, from, i), want = expect(to, value_of(from, code), 0);
                if (to == from) want = code;
                if (from == MIXP_BF16 && to == MIXP_F32) want = code << 16;
                CHECK_INT(code_at(q, to, i), want);
            }
            for (i = 0; i < sizeof dst; i++)
                if (dst + i < q || dst + i >= q + bytes) CHECK_INT(dst[i], 0x5A);
        }
    }
}

/* Floats that an instruction for bf16 could treat otherwise, one at a time, in each place among
 * floats that it rounds: subnormals, the numbers around them, Inf, NaN. */
static void one_float_among_others(void) {
    enum { N = 83 };
    static const uint32_t special[] = { 0, 1, 0x7FFF, 0x8000, 0x8001, 0x18000, 0x7FFFFF, 0x800000,
                                        0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC12345 };
    uint32_t src[N], s = 5;
    uint16_t got[N], want[N];
    const mixp_device *d;
    int isa_, i, at, k;
    for (i = 0; i < N; i++) {
        src[i] = (pattern(&s) & 0x807FFFFFu) | 0x3F800000u;
        want[i] = (uint16_t)expect(MIXP_BF16, ref_f32(src[i]), 0);
    }
    EACH_CPU(d) for (at = 0; at < N; at++) for (k = 0; k < 24; k++) {
        const uint32_t was = src[at];
        const uint16_t wanted = want[at];
        src[at] = special[k / 2] | (uint32_t)(k % 2) << 31;
        want[at] = (uint16_t)expect(MIXP_BF16, ref_f32(src[at]), 0);
        CHECK_INT(mixp_convert_with(d, got, MIXP_BF16, src, MIXP_F32, N, NULL), MIXP_OK);
        for (i = 0; i < N; i++) CHECK_INT(got[i], want[i]);
        src[at] = was;
        want[at] = wanted;
    }
}

/* 5 MB and more: the stores that bypass the caches, tails and unaligned heads included. */
static void reverse_parallel(void *user, int64_t tasks, mixp_task task, void *arg) {
    (void)user;
    for (int64_t i = tasks; i-- > 0;) task(arg, i, 0);
}
static void large_arrays(void) {
    enum { N = 2200003 };
    char *src = (char *)malloc(N * 4 + 64), *dst = (char *)malloc(N * 4 + 64), *want = (char *)malloc(N * 4 + 64);
    const mixp_device *d;
    int isa_, b, k;
    uint32_t s = 77;
    for (b = 1; b < 5; b++) for (k = 0; k < 2; k++) {
        mixp_dtype to = k ? MIXP_F32 : vector_dtypes[b], from = k ? vector_dtypes[b] : MIXP_F32;
        size_t off = (size_t)(b + k) * mixp_dtype_size(to);
        for (size_t i = 0; i < N; i++) set_code(src + 1, from, i, from == MIXP_F32 ? pattern(&s) : pattern(&s) >> 9);
        mixp_convert_with(mixp_cpu_with(MIXP_ISA_SCALAR), want, to, src + 1, from, N, NULL);
        EACH_CPU(d) {
            mixp_exec x;
            test_array to_array, from_array;
            memset(&x, 0, sizeof x);
            x.threads = 2;
            x.parallel = reverse_parallel;
            to_array.data = dst + off;
            to_array.dtype = to;
            from_array.data = src + 1;
            from_array.dtype = from;
            memset(dst, 0, N * 4 + 64);
            CHECK_INT(mixp_convert_with(d, dst + off, to, src + 1, from, N, NULL), MIXP_OK);
            CHECK(memcmp(dst + off, want, N * mixp_dtype_size(to)) == 0);
            memset(dst, 0, N * 4 + 64);
            CHECK_INT(d->kernels->convert(&x, args_convert(to_array, from_array, N, NULL)), MIXP_OK);
            CHECK(memcmp(dst + off, want, N * mixp_dtype_size(to)) == 0);
        }
    }
    free(src); free(dst); free(want);
}

static void in_place_and_overlap(void) {
    enum { N = 70000 };
    static char buf[N * 4 + 16], want[N * 4];
    const mixp_device *d;
    int isa_, a, b;
    EACH_CPU(d) for (a = 0; a < 5; a++) for (b = 0; b < 5; b++) {
        mixp_dtype from = vector_dtypes[a], to = vector_dtypes[b];
        uint32_t s = 123;
        for (size_t i = 0; i < N; i++) set_code(buf, from, i, pattern(&s));
        CHECK_INT(mixp_convert_with(d, want, to, buf, from, N, NULL), MIXP_OK);
        if (mixp_dtype_size(to) <= mixp_dtype_size(from)) {
            mixp_exec x;        /* a context that runs its tasks in any order */
            memset(&x, 0, sizeof x);
            x.threads = 2;
            x.parallel = reverse_parallel;
            if (isa_ % 2) CHECK_INT(mixp_convert_with(d, buf, to, buf, from, N, NULL), MIXP_OK);
            else CHECK_INT(d->kernels->convert(&x, args_convert(array_of(buf, to),
                                                      array_of(buf, from), N, NULL)), MIXP_OK);
            CHECK(memcmp(buf, want, N * mixp_dtype_size(to)) == 0);
        } else CHECK_INT(mixp_convert_with(d, buf, to, buf, from, N, NULL), MIXP_ERR_ARGUMENT);
    }
    CHECK_INT(mixp_convert(buf, MIXP_F16, buf + 1, MIXP_F32, 100), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_convert(buf + 1, MIXP_F16, buf, MIXP_F32, 100), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_convert(buf + 399, MIXP_F16, buf, MIXP_F32, 100), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_convert(buf + 400, MIXP_F16, buf, MIXP_F32, 100), MIXP_OK);
    CHECK_INT(mixp_convert(buf, MIXP_F16, buf + 199, MIXP_F32, 100), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_convert(buf, MIXP_F16, buf + 200, MIXP_F32, 100), MIXP_OK);
}

static void bad_arguments(void) {
    float f[4] = { 1, 2, 3, 4 };
    mixp_f16 h[4];
    memset(h, 0xAA, sizeof h);
    CHECK_INT(mixp_convert(NULL, MIXP_F16, f, MIXP_F32, 4), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_convert(h, MIXP_F16, NULL, MIXP_F32, 4), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_convert(h, MIXP_F16, f, MIXP_F32, -1), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_convert(h, MIXP_F16, f, MIXP_F32, INT64_MAX), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_convert(h, MIXP_DTYPE_COUNT, f, MIXP_F32, 4), MIXP_ERR_DTYPE);
    CHECK_INT(mixp_convert(h, MIXP_F16, f, (mixp_dtype)30, 4), MIXP_ERR_DTYPE);
    CHECK_INT(mixp_convert(NULL, MIXP_F16, NULL, MIXP_F32, 0), MIXP_OK);
    CHECK_INT(h[0].bits, 0xAAAA);
    CHECK_INT(h[3].bits, 0xAAAA);
    CHECK_INT(mixp_dtype_size((mixp_dtype)30), 0);
    CHECK_TEXT(mixp_dtype_name((mixp_dtype)30), "?");
    CHECK_TEXT(mixp_dtype_name(MIXP_BF16), "bf16");
    CHECK_INT(mixp_dtype_size(MIXP_F64), 8);
    CHECK_INT(mixp_dtype_size(MIXP_F4_E2M1), 1);
}

/* --- environment -------------------------------------------------------------------------- */

/* Found before any mode is set: an instruction set is asked for its known answers each time, and
 * under another rounding mode gives others. */
static const mixp_device *devices[MIXP_ISA_COUNT];
static int device_count;

static void convert_everything(char *out, size_t each, const float *src, int n) {
    int k, b, i;
    mixp_rounding r;
    memset(&r, 0, sizeof r);
    r.stochastic = 1;
    for (k = 0; k < device_count; k++) for (b = 0; b < 5; b++) {
        const mixp_device *d = devices[k];
        mixp_convert_with(d, out, vector_dtypes[b], src, MIXP_F32, n, NULL);
        mixp_convert_with(d, out + each, vector_dtypes[b], src, MIXP_F32, n, &r);
        mixp_convert_with(d, out + 2 * each, MIXP_F32, out, vector_dtypes[b], n, NULL);
        mixp_convert_with(d, out + 3 * each, MIXP_F64, out, vector_dtypes[b], n / 2, NULL);
        mixp_convert_with(d, out + 4 * each, MIXP_F16, out + 3 * each, MIXP_F64, n / 2, NULL);
        out += 5 * each;
    }
    for (i = 0; i < n; i++) {
        uint32_t h = mixp_f16_from_f32(src[i]).bits, e = mixp_e4m3_from_f32(src[i]).bits;
        uint32_t b16 = mixp_bf16_from_f32(src[i]).bits;
        uint32_t w = mixp_bits_of_f32(mixp_f32_from_f16(mixp_f16_of_bits(h)));
        memcpy(out + 16 * i, &h, 4);
        memcpy(out + 16 * i + 4, &e, 4);
        memcpy(out + 16 * i + 8, &b16, 4);
        memcpy(out + 16 * i + 12, &w, 4);
    }
}
static uint64_t flush_subnormals(int on) {
#if defined(__x86_64__) && !defined(__TINYC__)
    unsigned old = __builtin_ia32_stmxcsr();
    if (on) __builtin_ia32_ldmxcsr(old | 0x8040u);
    return old;
#elif defined(__aarch64__)
    uint64_t old;
    __asm__ volatile("mrs %0, fpcr" : "=r"(old));
    if (on) __asm__ volatile("msr fpcr, %0" : : "r"(old | 1u << 24 | 1u << 26));    /* FZ, AHP */
    return old;
#else
    (void)on;
    return 0;
#endif
}
/* Back to what flush_subnormals has found. */
static void flush_as(uint64_t old) {
#if defined(__x86_64__) && !defined(__TINYC__)
    __builtin_ia32_ldmxcsr((unsigned)old);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"(old));
#else
    (void)old;
#endif
}
static void any_floating_point_environment(void) {
    enum { N = 4000, EACH = N * 4 + 64, BYTES = EACH * 5 * 5 * MIXP_ISA_COUNT + 16 * N };
    static const int modes[] = { FE_TONEAREST, FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO };
    static float src[N];
    char *want = (char *)calloc(1, BYTES), *got = (char *)calloc(1, BYTES);
    const uint64_t normal = flush_subnormals(0);
    const mixp_device *d;
    uint32_t s = 42;
    int i, k, isa_;
    device_count = 0;
    EACH_CPU(d) devices[device_count++] = d;
    for (i = 0; i < N; i++) src[i] = mixp_f32_of_bits(pattern(&s));
    convert_everything(want, EACH, src, N);
    for (k = 0; k < 12; k++) {
        fenv_t before;
        memset(got, 0, BYTES);
        fegetenv(&before);
        fesetround(modes[k % 4]);
        if (k / 4 == 1) flush_subnormals(1);
#if defined(__GLIBC__) && defined(__x86_64__)
        if (k / 4 == 2) { feclearexcept(FE_ALL_EXCEPT); feenableexcept(FE_INVALID | FE_INEXACT | FE_OVERFLOW | FE_UNDERFLOW); }
        {
            uint64_t entered = flush_subnormals(0);
            convert_everything(got, EACH, src, N);
            CHECK_INT(flush_subnormals(0), entered);        /* modes and flags untouched */
        }
#else
        convert_everything(got, EACH, src, N);
#endif
        fesetenv(&before);
        fesetround(FE_TONEAREST);       /* Windows' fesetenv leaves both as they are */
        flush_as(normal);
        CHECK(memcmp(got, want, BYTES) == 0);
    }
    free(want); free(got);
}

/* --- stochastic rounding --------------------------------------------------------------------- */

static void random_numbers(void) {
    uint64_t sum = 0;
    int bit[32] = { 0 }, i, k, collisions = 0;
    for (i = 0; i < 100000; i++) {
        uint32_t r = mixp_random_u32(1, 2, 3, (uint64_t)i);
        sum += r;
        for (k = 0; k < 32; k++) bit[k] += (int)(r >> k & 1u);
        collisions += r == mixp_random_u32(1, 2, 4, (uint64_t)i) || r == mixp_random_u32(1, 3, 3, (uint64_t)i) ||
                      r == mixp_random_u32(2, 2, 3, (uint64_t)i) || r == mixp_random_u32(1, 2, 3, (uint64_t)i + 1);
    }
    CHECK_NEAR((double)sum / 100000 / 4294967296.0, 0.5, 0.005);    /* 5 sigma */
    for (k = 0; k < 32; k++) CHECK_NEAR(bit[k], 50000, 800);
    CHECK(collisions <= 2);
}

/* Only the two neighbours, the right one on average, exact numbers never moved. */
static void stochastic_expectation(void) {
    static const double fractions[] = { 0.0, 0.001, 0.25, 0.5, 0.75, 0.999 };
    enum { N = 40000 };
    static double src[N];
    static uint16_t codes[N];
    uint32_t s = 4;
    int k, q, i, trial;
    for (k = 0; k < REF_FORMATS; k++) for (q = 0; q < 6; q++) for (trial = 0; trial < 3; trial++) {
        const ref_table *t = &tables[k];
        size_t size = mixp_dtype_size(t->f->dtype);
        uint32_t c = trial == 0 ? 0 : lcg(&s) % (t->f->finite - 1u), ups = 0;
        double x = t->value[c] + fractions[q] * (t->value[c + 1] - t->value[c]);
        mixp_rounding r;
        memset(&r, 0, sizeof r);
        r.stochastic = 1;
        r.seed = (uint64_t)(k * 100 + q * 10 + trial);
        for (i = 0; i < N; i++) src[i] = i % 2 ? -x : x;
        CHECK_INT(mixp_convert_rounded(codes, t->f->dtype, src, MIXP_F64, N, &r), MIXP_OK);
        for (i = 0; i < N; i++) {
            uint32_t got = (uint32_t)code_at(codes, t->f->dtype, (size_t)i);
            uint32_t a = got & ((1u << (t->f->exponent_bits + t->f->mantissa_bits)) - 1u);
            CHECK(a == c || a == c + 1u);
            CHECK(a == 0 || (got != a) == i % 2);
            ups += a == c + 1u;
        }
        CHECK_NEAR(ups / (double)N, fractions[q], fractions[q] > 0 ? 5 * sqrt(fractions[q] * (1 - fractions[q]) / N) : 0);
        (void)size;
    }
}

/* Up exactly when the random number's top 31 bits lie below the part cut off, however small. */
static void stochastic_threshold(void) {
    uint32_t s = 6, i;
    for (i = 0; i < 60000; i++) {
        double fraction = ldexp((double)(0x800000u | lcg(&s) >> 9), -24 - (int)(i % 40));
        float x = (float)(fraction * (double)MIXP_F16_TINY);
        uint32_t threshold = (uint32_t)floor(ldexp(fraction, 31));
        uint32_t random = 2 * threshold + (lcg(&s) >> 30) - 2;
        if (threshold == 0) random = lcg(&s) >> 30;
        CHECK_INT(mixpi_round_f32(MIXP_F16, mixp_bits_of_f32(x), 0, 1, random), random / 2 < threshold);
        CHECK_INT(mixp_encode_stochastic(MIXP_F16, (double)x, 0, random), random / 2 < threshold);
        x = (float)(fraction * (double)MIXP_E4M3_TINY);
        CHECK_INT(mixpi_round_f32(MIXP_F8_E4M3, mixp_bits_of_f32(x), 0, 1, random), random / 2 < threshold);
    }
}

/* One definition: scalar functions, every instruction set, any cut into pieces. */
static void stochastic_is_reproducible(void) {
    enum { N = 20011 };
    static float src[N];
    static char a[N * 2], b[N * 2];
    const mixp_device *d;
    mixp_rounding r;
    uint32_t s = 8;
    int isa_, k, i;
    memset(&r, 0, sizeof r);
    r.stochastic = 1;
    r.seed = 5; r.step = 6; r.tensor = 7; r.first = 1000;
    for (i = 0; i < N; i++) src[i] = mixp_f32_of_bits(pattern(&s));
    for (k = 1; k < 5; k++) EACH_CPU(d) {
        mixp_dtype to = vector_dtypes[k];
        mixp_rounding tail = r;
        size_t cut = 777, size = mixp_dtype_size(to);
        CHECK_INT(mixp_convert_with(d, a, to, src, MIXP_F32, N, &r), MIXP_OK);
        tail.first += (int64_t)cut;
        CHECK_INT(mixp_convert_with(d, b, to, src, MIXP_F32, (int64_t)cut, &r), MIXP_OK);
        CHECK_INT(mixp_convert_with(d, b + cut * size, to, src + cut, MIXP_F32, N - (int64_t)cut, &tail), MIXP_OK);
        CHECK(memcmp(a, b, N * size) == 0);
        for (i = 0; i < N; i++) {
            uint32_t random = mixp_random_u32(5, 6, 7, (uint64_t)(1000 + i));
            uint32_t want = mixpi_round_f32(to, mixp_bits_of_f32(src[i]), 0, 1, random);
            CHECK_INT(code_at(a, to, (size_t)i), want);
            if (!ref_is_nan(ref_f32(mixp_bits_of_f32(src[i]))))
                CHECK_INT(want, mixp_encode_stochastic(to, ref_f32(mixp_bits_of_f32(src[i])), 0, random));
        }
    }
}

/* --- integers ---------------------------------------------------------------------------------- */

static void integers_on(const mixp_device *d) {
    static const int64_t wide[] = {
        0, 1, -1, 255, 256, -256, 65519, 65520, 16777217, -16777219, 2147483647, -2147483647 - 1,
        2147483648, 9007199254740993, -9007199254740993, INT64_MAX, -INT64_MAX - 1,
        ((int64_t)1 << 60) + ((int64_t)1 << 36), ((int64_t)1 << 60) + ((int64_t)1 << 36) + 1
    };
    static const struct { double x; int64_t i64; int32_t i32; unsigned u8; } cut[] = {
        { 1.9, 1, 1, 1 }, { -1.9, -1, -1, 0 }, { 255.5, 255, 255, 255 }, { 256, 256, 256, 255 },
        { 0.99, 0, 0, 0 }, { -0.0, 0, 0, 0 }, { 3e9, 3000000000, 2147483647, 255 },
        { -3e9, -3000000000, -2147483647 - 1, 0 }, { 1e30, INT64_MAX, 2147483647, 255 },
        { -1e30, -INT64_MAX - 1, -2147483647 - 1, 0 },
        { 9223372036854774784.0, 9223372036854774784, 2147483647, 255 },
        { -9223372036854775808.0, -INT64_MAX - 1, -2147483647 - 1, 0 }
    };
    enum { W = sizeof wide / sizeof wide[0] };
    float f[W];
    double g[W];
    int32_t i32[W];
    int64_t i64[W];
    uint8_t u8[W];
    mixp_f16 h[W];
    CHECK_INT(mixp_convert_with(d, f, MIXP_F32, wide, MIXP_I64, W, NULL), MIXP_OK);
    CHECK_INT(mixp_convert_with(d, g, MIXP_F64, wide, MIXP_I64, W, NULL), MIXP_OK);
    CHECK_INT(mixp_convert_with(d, i32, MIXP_I32, wide, MIXP_I64, W, NULL), MIXP_OK);
    CHECK_INT(mixp_convert_with(d, u8, MIXP_U8, wide, MIXP_I64, W, NULL), MIXP_OK);
    CHECK_INT(mixp_convert_with(d, h, MIXP_F16, wide, MIXP_I64, W, NULL), MIXP_OK);
    for (size_t i = 0; i < W; i++) {
        CHECK(f[i] == (float)wide[i]);
        CHECK(g[i] == (double)wide[i]);
        CHECK_INT(i32[i], wide[i] > 2147483647 ? 2147483647 : wide[i] < -2147483647 - 1 ? -2147483647 - 1 : wide[i]);
        CHECK_INT(u8[i], wide[i] > 255 ? 255 : wide[i] < 0 ? 0 : wide[i]);
    }
    CHECK_INT(h[6].bits, 0x7BFF);
    CHECK_INT(h[7].bits, 0x7C00);
    CHECK_INT(mixp_convert_with(d, i64, MIXP_I64, i32, MIXP_I32, W, NULL), MIXP_OK);
    CHECK_INT(mixp_convert_with(d, f, MIXP_F32, i32, MIXP_I32, W, NULL), MIXP_OK);
    for (size_t i = 0; i < W; i++) CHECK(i64[i] == i32[i] && f[i] == (float)i32[i]);
    CHECK_INT(mixp_convert_with(d, f, MIXP_F32, u8, MIXP_U8, W, NULL), MIXP_OK);
    for (size_t i = 0; i < W; i++) CHECK(f[i] == (float)u8[i]);
    for (size_t i = 0; i < sizeof cut / sizeof cut[0]; i++) {
        CHECK_INT(mixp_convert_with(d, i64, MIXP_I64, &cut[i].x, MIXP_F64, 1, NULL), MIXP_OK);
        CHECK_INT(mixp_convert_with(d, i32, MIXP_I32, &cut[i].x, MIXP_F64, 1, NULL), MIXP_OK);
        CHECK_INT(mixp_convert_with(d, u8, MIXP_U8, &cut[i].x, MIXP_F64, 1, NULL), MIXP_OK);
        CHECK_INT(i64[0], cut[i].i64);
        CHECK_INT(i32[0], cut[i].i32);
        CHECK_INT(u8[0], cut[i].u8);
    }
    h[0].bits = 0x7E00; h[1].bits = 0xFC00; h[2].bits = 0x7C00;
    CHECK_INT(mixp_convert_with(d, i32, MIXP_I32, h, MIXP_F16, 3, NULL), MIXP_OK);
    CHECK_INT(i32[0], 0);
    CHECK_INT(i32[1], -2147483647 - 1);
    CHECK_INT(i32[2], 2147483647);
}

static void integers(void) {
    const mixp_device *d;
    int isa_;
    EACH_CPU(d) integers_on(d);
}

/* --- fill and copy --------------------------------------------------------------------------- */

static void fill_any_dtype(void) {
    static char buf[300000 * 8 + 8];
    static const int64_t counts[] = { 0, 1, 63, 64, 65, 300000 };
    const mixp_device *d;
    mixp_exec x;
    int isa_, t, k;
    memset(&x, 0, sizeof x);
    EACH_CPU(d) for (t = 0; t < MIXP_DTYPE_COUNT; t++) for (k = 0; k < 12; k++) {
        mixp_dtype dt = (mixp_dtype)t;
        int64_t n = counts[k / 2];
        double value = k % 2 ? 0.0 : 1.5;
        uint64_t want = mixp_encode(dt, value, 0);
        if (dt == MIXP_F32) want = k % 2 ? 0 : 0x3FC00000;
        if (dt == MIXP_F16) want = k % 2 ? 0 : 0x3E00;
        if (dt == MIXP_I64) want = k % 2 ? 0 : 1;
        memset(buf, 0x5A, sizeof buf);
        CHECK_INT(d->kernels->fill(&x, args_fill(array_of(buf, dt), n, value)), MIXP_OK);
        for (int64_t i = 0; i < n; i++) CHECK(code_at(buf, dt, (size_t)i) == want);
        CHECK_INT(buf[(size_t)n * mixp_dtype_size(dt)], 0x5A);
    }
    CHECK_INT(mixp_cpu()->kernels->fill(&x, args_fill(array_of(buf, (mixp_dtype)30), 1, 0)), MIXP_ERR_DTYPE);
    CHECK_INT(mixp_cpu()->kernels->fill(&x, args_fill(array_of(NULL, MIXP_F32), 1, 0)), MIXP_ERR_ARGUMENT);
}

typedef struct copy_case { int rank; int64_t shape[8], d[8], s[8]; } copy_case;

/* A random permutation and padding of axes on both sides; sometimes a repeated axis in src. */
static copy_case random_copy(uint32_t *s) {
    copy_case c;
    int order[2][8], i, k, side;
    memset(&c, 0, sizeof c);
    c.rank = (int)(lcg(s) >> 8) % 6;
    for (i = 0; i < c.rank; i++) c.shape[i] = 1 + (lcg(s) >> 8) % (c.rank < 3 ? 70 : c.rank < 4 ? 20 : 6);
    for (side = 0; side < 2; side++) {
        int64_t stride = 1 + (lcg(s) >> 8) % 8 / 7;
        for (i = 0; i < c.rank; i++) order[side][i] = c.rank - 1 - i;
        for (i = c.rank - 1; i > 0 && (lcg(s) >> 8) % 3; i--) {
            int j = (int)((lcg(s) >> 8) % (uint32_t)(i + 1)), t = order[side][i];
            order[side][i] = order[side][j];
            order[side][j] = t;
        }
        for (k = 0; k < c.rank; k++) {
            i = order[side][k];
            (side ? c.s : c.d)[i] = stride;
            stride *= c.shape[i] + (lcg(s) >> 8) % 5 / 4;
        }
    }
    if (c.rank && (lcg(s) >> 8) % 6 == 0) c.s[(lcg(s) >> 8) % (uint32_t)c.rank] = 0;
    return c;
}

static void copy_strided(void) {
    enum { ROOM = 1 << 18 };
    static char src[ROOM], dst[ROOM], want[ROOM];
    static const mixp_dtype same[] = { MIXP_F8_E3M4, MIXP_F64, MIXP_I32 };
    const mixp_device *d;
    mixp_exec x;
    uint32_t s = 2024;
    int isa_, trial, k;
    memset(&x, 0, sizeof x);
    x.threads = 2;
    x.parallel = reverse_parallel;
    EACH_CPU(d) for (trial = 0; trial < 400; trial++) {
        copy_case c = random_copy(&s);
        int accumulate = trial % 3 == 2;
        mixp_dtype from = vector_dtypes[trial % 3], to = vector_dtypes[trial / 3 % 3];
        int64_t count = 1, index;
        if (trial % 10 == 0) { to = from = same[trial / 10 % 3]; accumulate = 0; }
        if (mixp_dtype_size(from) == 8) for (k = 0; k < c.rank; k++) c.shape[k] = (c.shape[k] + 1) / 2;
        for (int64_t i = 0; i < ROOM; i += 4) {
            uint32_t u = 0x3C003C00u ^ (lcg(&s) >> 7 & 0x83FF83FFu);    /* small in every dtype */
            memcpy(src + i, &u, 4);
            u ^= lcg(&s) >> 9 & 0x03FF03FFu;
            memcpy(dst + i, &u, 4);
        }
        memcpy(want, dst, ROOM);
        for (k = 0; k < c.rank; k++) count *= c.shape[k];
        for (index = 0; index < count; index++) {
            int64_t rest = index, a = 0, b = 0;
            for (k = c.rank - 1; k >= 0; rest /= c.shape[k--]) {
                a += rest % c.shape[k] * c.d[k];
                b += rest % c.shape[k] * c.s[k];
            }
            uint64_t code = code_at(src, from, (size_t)b);
            if (accumulate) {
                float sum = (float)value_of(from, code) + (float)value_of(to, code_at(want, to, (size_t)a));
                code = expect(to, (double)sum, 0);
            } else if (from != to) code = expect(to, value_of(from, code), 0);
            set_code(want, to, (size_t)a, code);
        }
        CHECK_INT(d->kernels->copy(&x, args_copy(c.rank, c.shape, array_of(dst, to), c.d,
                                                 array_of(src, from), c.s, accumulate)), MIXP_OK);
        if (memcmp(dst, want, ROOM)) { test_bad++; TEST_SHOW("%s: trial %d differs", d->name, trial); }
    }
    {
        int64_t shape[2] = { 2, 0 }, big[2] = { 2, 3 }, st[2] = { 3, 1 };
        const mixp_kernels *k0 = mixp_cpu()->kernels;
        CHECK_INT(k0->copy(&x, args_copy(2, shape, array_of(NULL, MIXP_F32), st, array_of(NULL, MIXP_F32), st, 0)),
                  MIXP_OK);
        CHECK_INT(k0->copy(&x, args_copy(2, big, array_of(NULL, MIXP_F32), st, array_of(src, MIXP_F32), st, 0)),
                  MIXP_ERR_ARGUMENT);
        CHECK_INT(k0->copy(&x, args_copy(2, big, array_of(dst, MIXP_I32), st, array_of(src, MIXP_F32), st, 0)),
                  MIXP_ERR_DTYPE);
        CHECK_INT(k0->copy(&x, args_copy(2, big, array_of(dst, MIXP_I32), st, array_of(src, MIXP_I32), st, 1)),
                  MIXP_ERR_DTYPE);
        CHECK_INT(k0->copy(&x, args_copy(9, big, array_of(dst, MIXP_F32), st, array_of(src, MIXP_F32), st, 0)),
                  MIXP_ERR_SHAPE);
    }
}

/* What breaks a promise is said in one line; the message stays in its buffer. */
static void self_check(void) {
    char message[256];
    mixp_result good = mixp_self_check(message, sizeof message);
#if defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__)
    CHECK_INT(good, MIXP_ERR_DEVICE);
    CHECK_TEXT(message, "fast-math");
#else
    static const int modes[] = { FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO };
    char cut[8];
    CHECK_INT(good, MIXP_OK);
    CHECK(message[0] == '\0' || strncmp(message, "slow: compiled without ", 23) == 0);
    for (int i = 0; i < 3; i++) {
        fesetround(modes[i]);
        CHECK_INT(mixp_self_check(message, sizeof message), MIXP_ERR_DEVICE);
        memset(cut, '#', sizeof cut);
        CHECK_INT(mixp_self_check(cut, 5), MIXP_ERR_DEVICE);
        CHECK_INT(mixp_self_check(NULL, 0), MIXP_ERR_DEVICE);
        fesetround(FE_TONEAREST);
        CHECK_TEXT(message, "rounding mode");
        CHECK(strlen(message) < sizeof message - 1 && !strchr(message, '\n'));
        CHECK(strcmp(cut, "the ") == 0 && cut[5] == '#');
    }
#if defined(__SSE__)
    for (int i = 0; i < 2; i++) {
        unsigned env = _mm_getcsr();
        _mm_setcsr(env | (i ? 0x8000u : 0x40u));        /* FTZ; DAZ */
        good = mixp_self_check(message, sizeof message);
        _mm_setcsr(env);
        CHECK_INT(good, MIXP_ERR_DEVICE);
        CHECK_TEXT(message, "FTZ or DAZ");
    }
#endif
    CHECK_INT(mixp_self_check(message, sizeof message), MIXP_OK);
#endif
}

int main(void) {
    fesetenv(FE_DFL_ENV);       /* -Ofast starts a program with subnormals flushed */
    for (int i = 0; i < REF_FORMATS; i++) tables[i] = ref_make(&ref_formats[i]);
    RUN(decode_every_code);
    RUN(widen_every_code);
    RUN(narrow_sampled_f32);
    RUN(known_answers);
    RUN(constants_match_codes);
    RUN(narrow_f64_around_midpoints);
    RUN(f64_to_f32_and_back);
    RUN(tf32_rounds_to_nearest_even);
    RUN(agrees_with_the_compiler);
    RUN(arrays_of_every_pair);
    RUN(arrays_of_other_formats);
    RUN(arrays_of_scales);
    RUN(odd_lengths_and_alignments);
    RUN(one_float_among_others);
    RUN(large_arrays);
    RUN(in_place_and_overlap);
    RUN(bad_arguments);
    RUN(any_floating_point_environment);
    RUN(random_numbers);
    RUN(stochastic_expectation);
    RUN(stochastic_threshold);
    RUN(stochastic_is_reproducible);
    RUN(integers);
    RUN(fill_any_dtype);
    RUN(copy_strided);
    RUN(self_check);
    for (int i = 0; i < REF_FORMATS; i++) free(tables[i].value);
    return test_report();
}
