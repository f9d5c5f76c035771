/* long_pairs.c - AVX512_BF16's products over more than 10^9 lanes: see pairs.h.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include "test.h"
#include "arrays.h"
#include "pairs.h"

/* 14,336 elements a product, three lanes an element. */
static void lanes(pairs_kind kind, int64_t products, int flush) {
    const mixp_device *d = mixp_cpu_with(MIXP_ISA_AVX512_BF16);
    if (!d) SKIP("no AVX512_BF16");
    printf("  %.3g lanes\n", 3.0 * PAIRS_M * PAIRS_N * (double)products);
    CHECK_INT(pairs_differ(d, kind, products, flush), 0);
}
static void normal_numbers(void) { lanes(PAIRS_NORMAL, 25000, 0); }
static void small_numbers(void)  { lanes(PAIRS_SMALL, 3000, 1); }
static void any_numbers(void)    { lanes(PAIRS_ANY, 3000, 1); }

int main(void) {
    RUN(normal_numbers);
    RUN(small_numbers);
    RUN(any_numbers);
    return test_report();
}
