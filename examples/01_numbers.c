/* 01_numbers.c - numbers in f16, bf16 and fp8. The scalars are inline: nothing needs to be linked.
 * SPDX-License-Identifier: MIT OR Unlicense
 *   cc examples/01_numbers.c -I. -lm && ./a.out */
#include "mixprec.h"
#include <stdio.h>

int main(void) {
    static const float x[] = { 0.1f, 1000.5f, 65520.0f, 1e-8f };
    printf("%-9s %-9s %-9s %s\n", "f32", "f16", "bf16", "e4m3, saturated");
    for (int i = 0; i < 4; i++) {
        mixp_f16  half  = mixp_f16_from_f32(x[i]);
        mixp_bf16 brain = mixp_bf16_from_f32(x[i]);
        mixp_e4m3 eight = mixp_e4m3_from_f32_sat(x[i]);
        printf("%-9g %-9g %-9g %g\n", (double)x[i], (double)mixp_f32_from_f16(half),
               (double)mixp_f32_from_bf16(brain), (double)mixp_f32_from_e4m3(eight));
    }
    /* Any format at run time, and its bits. */
    printf("1/3 in f16 is 0x%04x\n", (unsigned)mixp_encode(MIXP_F16, 1.0 / 3.0, 0));
    return 0;
}
/* prints:
f32       f16       bf16      e4m3, saturated
0.1       0.0999756 0.100098  0.101562
1000.5    1000.5    1000      448
65520     inf       65536     448
1e-08     0         1.00117e-08 0
1/3 in f16 is 0x3555
*/
