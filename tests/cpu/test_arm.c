/* test_arm.c - products of f16 and bf16 with FMLAL and BFMLAL, compared with fmaf and with NEON
 * code that widens. On other machines, tests/tools/variant.sh runs it in an emulator.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include "test.h"
#include "arrays.h"
#include "pairs.h"
#include "products.h"

/* --- the same bits as widening --- */

/* a and b become codes of any kind: subnormals, Inf and NaN as well. */
static void problem_any_codes(problem *p) {
    for (int64_t i = 0; i < p->a_size; i++) ((uint16_t *)p->a.data)[i] = (uint16_t)(random_bits() >> 7);
    for (int64_t i = 0; i < p->b_size; i++) ((uint16_t *)p->b.data)[i] = (uint16_t)(random_bits() >> 7);
}

/* Are two results the same, but for which NaN it is? */
static int same_results(const problem *p, const char *first) {
    size_t  size = mixp_dtype_size(p->c.dtype);
    test_array a;
    a.dtype = p->c.dtype;
    memcpy(&a.data, &first, sizeof first);
    for (int64_t i = 0; i < p->c_size; i++) {
        double x = array_get(a, i), y = array_get(p->c, i);
        if (x != x && y != y) continue;
        if (memcmp(first + (size_t)i * size, (char *)p->c.data + (size_t)i * size, size)) return 0;
    }
    return 1;
}

static void whole_products(mixp_isa isa, mixp_dtype dtype, int any_codes) {
    const mixp_device *d = mixp_cpu_with(isa), *neon = mixp_cpu_with(MIXP_ISA_NEON);
    if (!d) SKIP("the processor does not multiply them");
    for (int i = 0; i < 60; i++) {
        problem p = problem_new(1 + random_to(50), 1 + random_to(50), random_to(i % 8 ? 60 : 900),
                                1 + random_to(2), 0);
        size_t  bytes = (size_t)p.c_size * mixp_dtype_size(p.c.dtype);
        char   *first = (char *)malloc(bytes + 1);
        problem_to(&p, dtype);
        if (any_codes) problem_any_codes(&p);
        run(neon, &p, 2);
        memcpy(first, p.c.data, bytes);
        run(d, &p, 1 + i % 3);
        CHECK(same_results(&p, first));
        free(first);
        problem_free(&p);
    }
}
static void f16_gives_the_bits_of_widening(void)
{ whole_products(MIXP_ISA_NEON_F16, MIXP_F16, 0); }
static void so_it_does_of_any_codes(void)
{ whole_products(MIXP_ISA_NEON_F16, MIXP_F16, 1); }
static void bf16_gives_the_bits_of_widening(void)
{ whole_products(MIXP_ISA_NEON_BF16, MIXP_BF16, 0); }
static void so_does_bf16_of_any_codes(void)
{ whole_products(MIXP_ISA_NEON_BF16, MIXP_BF16, 1); }
static void f16_with_bf16s_instructions_too(void)
{ whole_products(MIXP_ISA_NEON_BF16, MIXP_F16, 0); }

/* Lane by lane, subnormals and NaN included. */
static void bf16_is_two_fused_steps(void) {
    const mixp_device *d = mixp_cpu_with(MIXP_ISA_NEON_BF16);
    if (!d) SKIP("no FEAT_BF16");
    CHECK_INT(pairs_differ(d, PAIRS_NORMAL, 3, 0), 0);
    CHECK_INT(pairs_differ(d, PAIRS_SMALL, 3, 0), 0);
    CHECK_INT(pairs_differ(d, PAIRS_ANY, 3, 0), 0);
}

/* --- which is used --- */

static void the_best_of_the_same_bits_is_used(void) {
    const mixp_device *f16 = mixp_cpu_with(MIXP_ISA_NEON_F16);
    const mixp_device *bf16 = mixp_cpu_with(MIXP_ISA_NEON_BF16);
    CHECK(mixp_cpu() == (bf16 ? bf16 : f16 ? f16 : mixp_cpu_with(MIXP_ISA_NEON)));
    if (f16) CHECK(strcmp(f16->name, "cpu neon f16") == 0);
    if (bf16) CHECK(strcmp(bf16->name, "cpu neon f16 bf16") == 0);
    CHECK(!bf16 || f16);
}

static void products_of_arm(void) { SKIP("not Arm"); }

int main(void) {
    if (!mixp_cpu_with(MIXP_ISA_NEON)) {
        RUN(products_of_arm);
        return test_report();
    }
    RUN(f16_gives_the_bits_of_widening);
    RUN(so_it_does_of_any_codes);
    RUN(bf16_gives_the_bits_of_widening);
    RUN(so_does_bf16_of_any_codes);
    RUN(f16_with_bf16s_instructions_too);
    RUN(bf16_is_two_fused_steps);
    RUN(the_best_of_the_same_bits_is_used);
    return test_report();
}
