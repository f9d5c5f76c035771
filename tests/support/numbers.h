/* numbers.h - number helpers shared by tests: random numbers, their bits, their distance.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#ifndef NUMBERS_H
#define NUMBERS_H
#include <math.h>
#include <stdint.h>
#include <string.h>

static uint64_t random_state = 88172645463325252u;

/* splitmix64: any state will do, also 0. */
static uint64_t random_u64(void) {
    uint64_t z = random_state += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

static uint32_t random_bits(void) { return (uint32_t)(random_u64() >> 32); }

/* Not every test needs all of these. */
#if defined(__GNUC__)
#  define NUMBERS_MAYBE static __attribute__((__unused__))
#else
#  define NUMBERS_MAYBE static
#endif
NUMBERS_MAYBE int    random_to(int n) { return (int)(random_bits() % (uint32_t)n); }      /* [0, n) */
NUMBERS_MAYBE double random_value(void) { return random_bits() / 2147483648.0 - 1.0; }    /* [-1, 1) */

NUMBERS_MAYBE float bits_f32(uint32_t u) {
    float x;
    memcpy(&x, &u, 4);
    return x;
}

NUMBERS_MAYBE uint32_t f32_bits(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    return u;
}

/* Half a unit in the last place of a value near v: the most that one rounding may add. */
NUMBERS_MAYBE double half_ulp(mixp_dtype dtype, double v) {
    int digits = dtype == MIXP_F16 ? 11 : dtype == MIXP_BF16 ? 8 : 24;
    int lowest = dtype == MIXP_F16 ? -24 : dtype == MIXP_BF16 ? -133 : -149, e;
    (void)frexp(v, &e);
    return ldexp(1.0, (e - digits > lowest ? e - digits : lowest) - 1);
}
#endif
