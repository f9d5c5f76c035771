/* bench_convert.c - speed of array conversions against memcpy.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 *     cc -O2 -I../.. bench_convert.c -o bench_convert -lm && ./bench_convert [million elements]
 *
 * Each sample of a conversion is paired with a sample of memcpy taken right before it; the
 * columns are the median GB/s (bytes read plus written) and the median of the ratios.
 */
#ifndef _POSIX_C_SOURCE
#  define _POSIX_C_SOURCE 200112L
#endif
#include <time.h>
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include <stdio.h>
#include <stdlib.h>

enum { SAMPLES = 15 };

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
static int by_value(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}
static double median(double *v) { qsort(v, SAMPLES, sizeof *v, by_value); return v[SAMPLES / 2]; }

/* Seconds for one pass over n elements, the best way to repeat small ones included. */
static double time_convert(const mixp_device *d, char *dst, mixp_dtype to, const char *src,
                           mixp_dtype from, int64_t n, const mixp_rounding *r, int repeats) {
    double t = now();
    int i;
    for (i = 0; i < repeats; i++) mixp_convert_with(d, dst, to, src, from, n, r);
    return (now() - t) / repeats;
}
static double time_memcpy(char *dst, const char *src, size_t bytes, int repeats) {
    double t = now();
    for (int i = 0; i < repeats; i++) {
        memcpy(dst, src, bytes);
        src += i & 1 ? 64 : -64;        /* else it is one copy to the compiler */
    }
    return (now() - t) / repeats;
}

static void measure(const mixp_device *d, char *dst, mixp_dtype to, char *src, mixp_dtype from,
                    int64_t n, const mixp_rounding *r) {
    double rate[SAMPLES], ratio[SAMPLES];
    size_t in = mixp_dtype_size(from), out = mixp_dtype_size(to), half = (size_t)n * (in + out) / 2;
    int i, repeats = n < 1000000 ? 2000000 / (int)n : 1;
    for (i = -2; i < SAMPLES; i++) {
        double m = time_memcpy(dst, src + 64, half, repeats);
        double t = time_convert(d, dst, to, src + 64, from, n, r, repeats);
        if (i < 0) continue;
        rate[i] = 2e-9 * (double)half / t;
        ratio[i] = m / t;
    }
    printf("%-11s %9lld  %-8s -> %-8s%-12s %7.1f GB/s  %5.2f of memcpy\n", d->name, (long long)n,
           mixp_dtype_name(from), mixp_dtype_name(to), r ? " stochastic" : "", median(rate), median(ratio));
}

int main(int argc, char **argv) {
    static const mixp_dtype pairs[][2] = {
        { MIXP_F32, MIXP_F16 }, { MIXP_F16, MIXP_F32 }, { MIXP_F32, MIXP_BF16 }, { MIXP_BF16, MIXP_F32 },
        { MIXP_F16, MIXP_BF16 }, { MIXP_F32, MIXP_F8_E4M3 }, { MIXP_F8_E4M3, MIXP_F32 },
        { MIXP_F32, MIXP_F8_E5M2 }, { MIXP_F8_E5M2, MIXP_F32 }, { MIXP_F64, MIXP_F32 },
        { MIXP_F32, MIXP_F8_E8M0 }, { MIXP_F8_E8M0, MIXP_F32 }
    };
    int64_t large = (argc > 1 ? atoi(argv[1]) : 64) * (int64_t)1000000, i;
    char *src = (char *)malloc((size_t)large * 8 + 128), *dst = (char *)malloc((size_t)large * 8 + 128);
    mixp_rounding r;
    memset(&r, 0, sizeof r);
    r.stochastic = 1;
    if (!src || !dst) return 1;
    for (i = 0; i < large * 2 + 32; i++) {      /* ordinary numbers in every dtype */
        uint32_t u = 0x3C003C00u ^ ((uint32_t)i * 2654435761u & 0x83FF83FFu);
        memcpy(src + 4 * i, &u, 4);
    }
    memset(dst, 1, (size_t)large * 8 + 128);
    for (int isa = MIXP_ISA_COUNT - 1; isa >= 0; isa--) {
        const mixp_device *d = mixp_cpu_with((mixp_isa)isa);
        for (int k = 0; d && k < 12; k++) {
            measure(d, dst, pairs[k][1], src, pairs[k][0], 65536, NULL);
            measure(d, dst, pairs[k][1], src, pairs[k][0], large, NULL);
        }
        if (d) measure(d, dst, MIXP_BF16, src, MIXP_F32, 65536, &r);
        if (d) measure(d, dst, MIXP_F16, src, MIXP_F32, 65536, &r);
    }
    free(src);
    free(dst);
    return 0;
}
