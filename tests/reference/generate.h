/* generate.h - the numbers that the recorded references start from.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * generate.py is the same generator in Python. Every value is an integer times a power of
 * two, so both give the same bits and no weight has to be stored.
 */
#ifndef GENERATE_H
#define GENERATE_H
#include <stdint.h>

/* The next 32 bits (xorshift); the state is never 0. */
static uint32_t gen_next(uint32_t *x) {
    *x ^= *x << 13;
    *x ^= *x >> 17;
    *x ^= *x << 5;
    return *x;
}

static uint32_t gen_start(uint32_t seed) {
    uint32_t x = (seed + 1u) * 0x9E3779B9u;
    for (int i = 0; i < 8; i++) gen_next(&x);
    return x;
}

/* n values in [-amplitude, amplitude) with 24 bits; amplitude is a power of two. */
static inline void gen_fill(uint32_t *x, float amplitude, float *out, int n) {
    for (int i = 0; i < n; i++)
        out[i] = (float)((int32_t)(gen_next(x) >> 8) - 8388608) * (amplitude / 8388608.0f);
}

/* n values in [-2, 2) in steps of 1/64: exact in f32, f16 and bf16. */
static inline void gen_short(uint32_t *x, float *out, int n) {
    for (int i = 0; i < n; i++) out[i] = (float)((int32_t)(gen_next(x) >> 24) - 128) / 64.0f;
}

/* n integers in [0, below). */
static inline void gen_ints(uint32_t *x, int32_t below, int32_t *out, int n) {
    for (int i = 0; i < n; i++) out[i] = (int32_t)((gen_next(x) >> 8) % (uint32_t)below);
}
#endif
