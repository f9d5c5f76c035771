/* 01_numbers.c - numbers in f64, f32, f16, bf16 and fp8: bytes, decimal digits, range, and what becomes of some values.
 * The scalars are inline: nothing needs to be linked.
 * SPDX-License-Identifier: MIT OR Unlicense
 *   cc examples/01_numbers.c -I. -lm && ./a.out */
#include "mixprec.h"
#include <math.h>
#include <stdio.h>

/* Decimal digits: -log10 of the distance from 1 to the next number. */
static double digits(mixp_dtype dtype) {
    double step = 1.0;
    while (mixp_decode(dtype, mixp_encode(dtype, 1.0 + step / 2.0, 0)) > 1.0) step /= 2.0;
    return -log10(step);
}

int main(void) {
    static const struct { const char *name; mixp_dtype dtype; int bytes; double largest; } format[] = {
        { "f64", MIXP_F64, 8, 1.7976931348623157e308 }, { "f32", MIXP_F32, 4, 3.4028234663852886e38 },
        { "f16", MIXP_F16, 2, 65504.0 },                { "bf16", MIXP_BF16, 2, 3.3895313892515355e38 },
        { "e4m3", MIXP_F8_E4M3, 1, 448.0 },             { "e5m2", MIXP_F8_E5M2, 1, 57344.0 }
    };
    static const float x[] = { 0.1f, 1000.5f, 65520.0f, 1e-8f };
    printf("%-6s%-7s%-8s%-13s%s\n", "", "bytes", "digits", "largest", "1/3");
    for (int i = 0; i < 6; i++) {
        mixp_dtype d = format[i].dtype;
        printf("%-6s%-7d%-8.1f%-13.6g%.17g\n", format[i].name, format[i].bytes, digits(d), format[i].largest,
               mixp_decode(d, mixp_encode(d, 1.0 / 3.0, 0)));
    }
    printf("\n%-9s %-9s %-9s %s\n", "f32", "f16", "bf16", "e4m3, saturated");
    for (int i = 0; i < 4; i++) {
        mixp_f16  half  = mixp_f16_from_f32(x[i]);
        mixp_bf16 brain = mixp_bf16_from_f32(x[i]);
        mixp_e4m3 eight = mixp_e4m3_from_f32_sat(x[i]);
        printf("%-9g %-9g %-9g %g\n", (double)x[i], (double)mixp_f32_from_f16(half),
               (double)mixp_f32_from_bf16(brain), (double)mixp_f32_from_e4m3(eight));
    }
    /* Any format at run time, and its bits. f64 rounds directly: through f32 this number would become 0x3c00. */
    printf("1 + 2^-11 + 2^-40 in f16 is 0x%04x\n",
           (unsigned)mixp_encode(MIXP_F16, 1.0 + ldexp(1.0, -11) + ldexp(1.0, -40), 0));
    return 0;
}
/* prints:
      bytes  digits  largest      1/3
f64   8      15.7    1.79769e+308 0.33333333333333331
f32   4      6.9     3.40282e+38  0.3333333432674408
f16   2      3.0     65504        0.333251953125
bf16  2      2.1     3.38953e+38  0.333984375
e4m3  1      0.9     448          0.34375
e5m2  1      0.6     57344        0.3125

f32       f16       bf16      e4m3, saturated
0.1       0.0999756 0.100098  0.101562
1000.5    1000.5    1000      448
65520     inf       65536     448
1e-08     0         1.00117e-08 0
1 + 2^-11 + 2^-40 in f16 is 0x3c01
*/
