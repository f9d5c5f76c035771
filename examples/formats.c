/* formats.c - level 1 of mixprec: numbers and arrays in f16, bf16 and fp8. No context.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 *     cc -O2 -I. examples/formats.c -o formats -lm && ./formats
 */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include <stdio.h>

enum { N = 100000 };
static float     x[N], back[N];
static mixp_f16  h[N];
static mixp_bf16 b[N];

int main(void) {
    static const double numbers[] = { 1.0, 0.1, 65520.0, 1e-8 };
    static const mixp_dtype formats[] = { MIXP_F16, MIXP_BF16, MIXP_F8_E4M3, MIXP_F8_E5M2 };
    mixp_rounding how = { 0, 1, 1234, 0, 0, 0 };    /* stochastic, with seed 1234 */
    double nearest = 0, stochastic = 0;
    int i, k;

    /* One number at a time. */
    mixp_f16 one_tenth = mixp_f16_from_f32(0.1f);
    printf("0.1 in f16 has the bits %04X and is %.9g\n\n", one_tenth.bits,
           (double)mixp_f32_from_f16(one_tenth));

    printf("%-10s", "");
    for (k = 0; k < 4; k++) printf("%-18s", mixp_dtype_name(formats[k]));
    for (i = 0; i < 4; i++) {
        printf("\n%-10g", numbers[i]);
        for (k = 0; k < 4; k++)
            printf("%-18.9g", mixp_decode(formats[k], mixp_encode(formats[k], numbers[i], 0)));
    }
    printf("\n\n500 in e4m3, whose largest number is 448: %g, or saturated %g\n\n",
           (double)mixp_f32_from_e4m3(mixp_e4m3_from_f32(500.0f)),
           (double)mixp_f32_from_e4m3(mixp_e4m3_from_f32_sat(500.0f)));

    /* Arrays, with the best instructions this machine has. */
    for (i = 0; i < N; i++) x[i] = 1.001f;
    if (mixp_convert(h, MIXP_F16, x, MIXP_F32, N) != MIXP_OK) return 1;
    if (mixp_convert(back, MIXP_F32, h, MIXP_F16, N) != MIXP_OK) return 1;
    printf("1.001 through f16 and back: %.9g\n", (double)back[N - 1]);

    /* Stochastic rounding is right on average, where nearest is always wrong the same way. */
    mixp_convert(b, MIXP_BF16, x, MIXP_F32, N);
    for (i = 0; i < N; i++) nearest += (double)mixp_f32_from_bf16(b[i]) / N;
    mixp_convert_rounded(b, MIXP_BF16, x, MIXP_F32, N, &how);
    for (i = 0; i < N; i++) stochastic += (double)mixp_f32_from_bf16(b[i]) / N;
    printf("mean of %d times 1.001 in bf16: nearest %.6f, stochastic %.6f\n", N, nearest, stochastic);
    return 0;
}
