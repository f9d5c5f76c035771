/* long_formats.c - converts all 2^32 floats to f16, bf16, e4m3 and e5m2, on every instruction set
 * and by the scalar functions; and f64 around every midpoint of every format.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * The reference visits magnitudes in increasing order and steps through its table of midpoints. It
 * neither searches nor rounds, and shares nothing with the code under test. The test takes
 * minutes; OpenMP makes it faster.
 */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include "reference_formats.h"
#include "test.h"

enum { CHUNK = 1 << 20 };
static ref_table tables[REF_FORMATS];

typedef struct sweep { uint32_t *limit; } sweep;   /* code c ends before bits limit[c]        */

/* For each code, the first f32 bit pattern above its range: found from midpoints that are
 * themselves f32 numbers (ties belong to the even code). */
static sweep make_sweep(const ref_table *t) {
    sweep s;
    s.limit = (uint32_t *)malloc(t->f->finite * sizeof(uint32_t));
    for (uint32_t c = 0; s.limit && c < t->f->finite; c++) {
        double middle = (t->value[c] + t->value[c + 1]) / 2;
        int e;
        double m = frexp(middle, &e);           /* middle = m * 2^e, m in [1/2, 1) */
        uint32_t u = e > -126 ? (uint32_t)(e + 126) << 23 | ((uint32_t)ldexp(m, 24) & 0x7FFFFFu)
                              : (uint32_t)ldexp(middle, 149);
        s.limit[c] = u + (c % 2 == 0);
    }
    return s;
}

/* Fills want[0, CHUNK) for the f32 patterns start, start+1, ... of one sign. */
static void reference(const ref_table *t, const sweep *s, uint32_t start, uint16_t *want) {
    uint32_t sign = (start >> 31) << (t->f->exponent_bits + t->f->mantissa_bits), c = 0, i;
    uint32_t lo = 0, hi = t->f->finite, a = start & 0x7FFFFFFFu;
    while (lo < hi) {                           /* the first code whose limit lies above a */
        uint32_t mid = (lo + hi) / 2;
        if (s->limit[mid] <= a) lo = mid + 1; else hi = mid;
    }
    c = lo;
    for (i = 0; i < CHUNK; i++, a++) {
        while (c < t->f->finite && a >= s->limit[c]) c++;
        if (a <= 0x7F800000u) want[i] = (uint16_t)(sign | c);   /* finite itself stands for overflow */
        else if (t->f->kind == REF_FN) want[i] = (uint16_t)(sign | t->f->finite);
        else want[i] = (uint16_t)(sign | t->f->finite | 1u << (t->f->mantissa_bits - 1) |
                                  (a & 0x7FFFFFu) >> (23 - t->f->mantissa_bits));
    }
}

static int scalar_differs(mixp_dtype to, uint32_t start, const uint16_t *want) {
    int bad = 0;
    for (uint32_t i = 0; i < CHUNK; i++) {
        float x = mixp_f32_of_bits(start + i);
        unsigned got;
        if (to == MIXP_F16) got = mixp_f16_from_f32(x).bits;
        else if (to == MIXP_BF16) got = mixp_bf16_from_f32(x).bits;
        else if (to == MIXP_F8_E4M3) got = mixp_e4m3_from_f32(x).bits;
        else got = mixp_e5m2_from_f32(x).bits;
        bad += got != want[i];
    }
    return bad;
}

static void every_float(int which) {
    const ref_table *t = &tables[which];
    sweep s = make_sweep(t);
    int64_t bad[MIXP_ISA_COUNT + 1] = { 0 };
    CHECK(s.limit != NULL);
    if (!s.limit) return;
#ifdef _OPENMP
#   pragma omp parallel for schedule(dynamic)
#endif
    for (int chunk = 0; chunk < 4096; chunk++) {
        uint32_t *src = (uint32_t *)malloc(CHUNK * 4), start = (uint32_t)chunk * CHUNK, i;
        uint16_t *want = (uint16_t *)malloc(CHUNK * 2), *got = (uint16_t *)malloc(CHUNK * 2);
        size_t size = mixp_dtype_size(t->f->dtype);
        int64_t mine[MIXP_ISA_COUNT + 1] = { 0 };
        if (src && want && got) {
            for (i = 0; i < CHUNK; i++) src[i] = start + i;
            reference(t, &s, start, want);
            mine[MIXP_ISA_COUNT] = scalar_differs(t->f->dtype, start, want);
            if (size == 1) for (i = 0; i < CHUNK; i++) ((uint8_t *)want)[i] = (uint8_t)want[i];
            for (int isa = 0; isa < MIXP_ISA_COUNT; isa++) {
                const mixp_device *d = mixp_cpu_with((mixp_isa)isa);
                if (!d) continue;
                mine[isa] = mixp_convert_with(d, got, t->f->dtype, src, MIXP_F32, CHUNK, NULL) != MIXP_OK;
                mine[isa] += memcmp(got, want, CHUNK * size) != 0;
            }
        } else mine[MIXP_ISA_COUNT] = 1;
#ifdef _OPENMP
#       pragma omp critical
#endif
        for (int isa = 0; isa <= MIXP_ISA_COUNT; isa++) bad[isa] += mine[isa];
        free(src); free(want); free(got);
    }
    for (int k = 0; k < MIXP_ISA_COUNT; k++) CHECK_INT(bad[k], 0);  /* pieces that differ */
    CHECK_INT(bad[MIXP_ISA_COUNT], 0);                          /* scalar results that differ */
    free(s.limit);
}
static void all_f32_to_f16(void)  { every_float(0); }
static void all_f32_to_bf16(void) { every_float(1); }
static void all_f32_to_e4m3(void) { every_float(2); }
static void all_f32_to_e5m2(void) { every_float(3); }

/* Every number and every midpoint of every format, and neighbours at distances from one f64
 * step up to where f32 would see them, on both sides and with both signs. */
static void f64_around_every_midpoint(void) {
    for (int i = 0; i < REF_FORMATS; i++) {
        const ref_table *t = &tables[i];
        mixp_dtype d = t->f->dtype;
        for (uint32_t c = 0; c < 2 * t->f->finite; c++) {
            double x = c % 2 ? (t->value[c / 2] + t->value[c / 2 + 1]) / 2 : t->value[c / 2];
            for (int k = 0; k < 80; k++) {
                double y = ldexp(1.0, -52 + k / 2) * x;
                y = k % 2 ? x + y : x - y;
                CHECK_INT(mixp_encode(d, y, 0), ref_encode(t, y, 0));
                CHECK_INT(mixp_encode(d, -y, 1), ref_encode(t, -y, 1));
            }
        }
    }
}

/* All f32 values and midpoints between f32 neighbours would be 2^33; every 97th stands for them. */
static void f64_to_f32_sampled(void) {
    for (uint64_t u = 0; u < 0x7F800000u; u += 97) {
        double a = ref_f32((uint32_t)u), b = u + 1 == 0x7F800000u ? ldexp(1, 128) : ref_f32((uint32_t)u + 1);
        double middle = (a + b) / 2;
        uint32_t even = (uint32_t)(u + (u & 1u));
        CHECK_INT(mixp_bits_of_f32(mixp_f32_from_f64(middle)), even);
        CHECK_INT(mixp_bits_of_f32(mixp_f32_from_f64(nextafter(middle, 0))), u);
        CHECK_INT(mixp_bits_of_f32(mixp_f32_from_f64(-nextafter(middle, 1e300))), (u + 1) | 0x80000000u);
    }
}

int main(void) {
    for (int i = 0; i < REF_FORMATS; i++) tables[i] = ref_make(&ref_formats[i]);
    RUN(all_f32_to_f16);
    RUN(all_f32_to_bf16);
    RUN(all_f32_to_e4m3);
    RUN(all_f32_to_e5m2);
    RUN(f64_around_every_midpoint);
    RUN(f64_to_f32_sampled);
    for (int i = 0; i < REF_FORMATS; i++) free(tables[i].value);
    return test_report();
}
