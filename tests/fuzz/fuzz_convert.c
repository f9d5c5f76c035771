/* fuzz_convert.c - conversions of any bytes between any two dtypes: every instruction set of this
 * machine gives the scalar code's bits, and writes nothing beside them.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include "fuzz.h"

enum { HEAD = 12, EDGE = 64 };

/* Twelve bytes say what to do, the rest is the source, which begins anywhere. */
static void fuzz_one(const uint8_t *data, size_t size) {
    mixp_rounding rounding;
    if (size < HEAD) return;
    mixp_dtype from = (mixp_dtype)(data[0] % MIXP_DTYPE_COUNT);
    mixp_dtype to = (mixp_dtype)(data[1] % MIXP_DTYPE_COUNT);
    memset(&rounding, 0, sizeof rounding);
    rounding.saturate = data[2] & 1;
    rounding.stochastic = data[2] >> 1 & 1;
    memcpy(&rounding.seed, data + 4, 8);
    rounding.step = data[3];
    rounding.first = (int64_t)data[3] << data[2] % 48;
    size_t n = (size - HEAD) / mixp_dtype_size(from);
    size_t bytes = n * mixp_dtype_size(to);
    uint8_t *want = (uint8_t *)malloc(bytes + 2 * EDGE);
    uint8_t *got = (uint8_t *)malloc(bytes + 2 * EDGE);
    EXPECT(want && got);
    memset(want, 0xA5, bytes + 2 * EDGE);
    mixp_result r = mixp_convert_with(mixp_cpu_with(MIXP_ISA_SCALAR), want + EDGE, to, data + HEAD, from, (int64_t)n,
                          &rounding);
    EXPECT(r == MIXP_OK);
    for (int isa = 0; isa < MIXP_ISA_COUNT; isa++) {
        const mixp_device *cpu = mixp_cpu_with((mixp_isa)isa);
        if (!cpu) continue;
        memset(got, 0xA5, bytes + 2 * EDGE);
        r = mixp_convert_with(cpu, got + EDGE, to, data + HEAD, from, (int64_t)n, &rounding);
        EXPECT(r == MIXP_OK);
        EXPECT(memcmp(got, want, bytes + 2 * EDGE) == 0);
    }
    free(want);
    free(got);
}

static size_t fuzz_seed(int i, uint8_t *out) {
    size_t k, n = HEAD + 8 * 70;
    if (i >= 2 * MIXP_DTYPE_COUNT) return 0;
    memset(out, 0, HEAD);
    out[0] = (uint8_t)(i % MIXP_DTYPE_COUNT);
    out[1] = (uint8_t)(i * 5 % MIXP_DTYPE_COUNT);
    out[2] = (uint8_t)(i * 7 % 4);
    for (k = HEAD; k < n; k++) out[k] = (uint8_t)(k * k * 31 + (size_t)i * 7 + (k % 8 == 7 ? 0x3C : 0));
    return n;
}
