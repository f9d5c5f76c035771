/* lossy.h - what quantising an operand to e4m3 loses, by loops in double: the reference of the numbers in a
 * guard's event of an operand, on the CPU and on the simulated GPU.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#ifndef LOSSY_H
#define LOSSY_H

static double in_bf16(double x) { return (double)mixp_f32_from_bf16(mixp_bf16_from_f32((float)x)); }

/* x on e4m3's grid, at most 448. */
static double on_e4m3(double x) {
    double a = fabs(x) > 448.0 ? 448.0 : fabs(x), step, whole, rest;
    int e = 0;
    frexp(a, &e);
    step = ldexp(1.0, (e - 1 < -6 ? -6 : e - 1) - 3);
    whole = floor(a / step);
    rest = a / step - whole;
    if (rest > 0.5 || (rest == 0.5 && fmod(whole, 2.0) == 1.0)) whole += 1.0;
    return x < 0 ? -whole * step : whole * step;
}

/* Mean relative error and clipped share of x[n] at a scale. */
static void lose_at(const float *x, int n, double scale, double *error, double *clipped) {
    int i, seen = 0;
    *error = *clipped = 0;
    for (i = 0; i < n; i++) {
        const double v = in_bf16((double)x[i]);
        if (v == 0) continue;
        seen++;
        *error += fabs(on_e4m3((double)(float)(v * scale)) * (double)(float)(1 / scale) - v) / fabs(v);
        *clipped += fabs(v) * scale > 464.0;
    }
    *error /= seen;
    *clipped /= seen;
}
#endif
