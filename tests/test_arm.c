/* test_arm.c - products of f16 and bf16 with FMLAL, BFMLAL and BFMMLA, against fmaf, against NEON
 * that widens, and against what Arm's manual says of BFMMLA. tests/variant.sh runs it in an
 * emulator where the machine is another.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include "test.h"
#include "arrays.h"
#include "pairs.h"
#include "products.h"

static float widened(mixp_dtype dtype, uint16_t code) {
    mixp_f16 h;
    h.bits = code;
    return dtype == MIXP_F16 ? mixp_f32_from_f16(h) : mixp_f32_of_bits((uint32_t)code << 16);
}

/* --- the same bits as widening --- */

/* a and b become codes of any kind: subnormals, Inf and NaN as well. */
static void problem_any_codes(problem *p) {
    int64_t i;
    for (i = 0; i < p->a_size; i++) ((uint16_t *)p->a.data)[i] = (uint16_t)(random_bits() >> 7);
    for (i = 0; i < p->b_size; i++) ((uint16_t *)p->b.data)[i] = (uint16_t)(random_bits() >> 7);
}

/* Are two results the same, but for which NaN it is? */
static int same_results(const problem *p, const char *first) {
    size_t  size = mixp_dtype_size(p->c.dtype);
    int64_t i;
    test_array a;
    a.dtype = p->c.dtype;
    memcpy(&a.data, &first, sizeof first);
    for (i = 0; i < p->c_size; i++) {
        double x = array_get(a, i), y = array_get(p->c, i);
        if (x != x && y != y) continue;
        if (memcmp(first + (size_t)i * size, (char *)p->c.data + (size_t)i * size, size)) return 0;
    }
    return 1;
}

static void whole_products(mixp_isa isa, mixp_dtype dtype, int any_codes) {
    const mixp_device *d = mixp_cpu_with(isa), *neon = mixp_cpu_with(MIXP_ISA_NEON);
    int i;
    if (!d) SKIP("the processor does not multiply them");
    for (i = 0; i < 60; i++) {
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
static void f16_with_bf16s_instructions_too(void) {
    whole_products(MIXP_ISA_NEON_BF16, MIXP_F16, 0);
    whole_products(MIXP_ISA_NEON_BFMMLA, MIXP_F16, 0);
}

/* Lane by lane, subnormals and NaN included. */
static void bf16_is_two_fused_steps(void) {
    const mixp_device *d = mixp_cpu_with(MIXP_ISA_NEON_BF16);
    if (!d) SKIP("no FEAT_BF16");
    CHECK_INT(pairs_differ(d, PAIRS_NORMAL, 3, 0), 0);
    CHECK_INT(pairs_differ(d, PAIRS_SMALL, 3, 0), 0);
    CHECK_INT(pairs_differ(d, PAIRS_ANY, 3, 0), 0);
}

/* --- BFMMLA's own bits --- */

/* Rounded to odd: an inexact sum is the neighbour whose last bit is 1. */
static float odd_sum(float a, float b) {
    volatile float s = a + b, back = s - a, rest = (a - (s - back)) + (b - back);
    if (rest == 0.0f || (mixp_bits_of_f32(s) & 1u)) return s;
    return nextafterf(s, rest > 0.0f ? INFINITY : -INFINITY);
}

/* One element over k: pairs' products, exact here, are added, then added to the sum; products of
 * more than 384 are cut into passes of one size. */
static float model_element(const problem *p, int64_t i, int64_t j) {
    const mixp_gemm_args *g = &p->g;
    int64_t passes = (g->k + 383) / 384, depth = passes ? (g->k + passes - 1) / passes : 1, from, q;
    float   total = 0.0f;
    for (from = 0; from < g->k; from += depth) {
        int64_t end = from + depth < g->k ? from + depth : g->k;
        float   sum = 0.0f;
        for (q = from; q < end; q += 2) {
            float   pair[2] = { 0.0f, 0.0f };
            int64_t h;
            for (h = 0; h < 2 && q + h < end; h++) {
                int64_t a = g->trans_a ? (q + h) * g->lda + i : i * g->lda + q + h;
                int64_t b = g->trans_b ? j * g->ldb + q + h : (q + h) * g->ldb + j;
                pair[h] = widened(MIXP_BF16, ((const uint16_t *)p->a.data)[a]) *
                          widened(MIXP_BF16, ((const uint16_t *)p->b.data)[b]);
            }
            sum = odd_sum(sum, odd_sum(pair[0], pair[1]));
        }
        total = from ? fmaf(g->alpha, sum, 0.0f) + total : fmaf(g->alpha, sum, 0.0f);
    }
    return total;
}

static void bfmmla_rounds_to_odd(void) {
    const mixp_device *d = mixp_cpu_with(MIXP_ISA_NEON_BFMMLA);
    int64_t differ = 0;
    int t;
    if (!d) SKIP("no FEAT_BF16");
    for (t = 0; t < 40; t++) {
        problem p = problem_new(1 + random_to(30), 1 + random_to(40), random_to(t % 8 ? 70 : 900),
                                1, 0);
        int64_t i, j;
        problem_to(&p, MIXP_BF16);
        array_free(p.c);
        array_free(p.old);
        p.c = array_new(MIXP_F32, p.c_size);
        p.old = array_new(MIXP_F32, p.c_size);
        p.g.c = args_out(p.c, 0);
        p.g.bias.data = NULL;
        run(d, &p, 1 + t % 3);
        for (i = 0; i < p.g.m; i++)
            for (j = 0; j < p.g.n; j++) {
                float c = ((const float *)p.c.data)[i * p.g.ldc + j];
                differ += mixp_bits_of_f32(c) != mixp_bits_of_f32(model_element(&p, i, j) + 0.0f);
            }
        problem_free(&p);
    }
    CHECK_INT(differ, 0);
}

/* --- which is used --- */

static void the_best_of_the_same_bits_is_used(void) {
    const mixp_device *f16 = mixp_cpu_with(MIXP_ISA_NEON_F16);
    const mixp_device *bf16 = mixp_cpu_with(MIXP_ISA_NEON_BF16);
    const mixp_device *bfmmla = mixp_cpu_with(MIXP_ISA_NEON_BFMMLA);
    CHECK(mixp_cpu() == (bf16 ? bf16 : f16 ? f16 : mixp_cpu_with(MIXP_ISA_NEON)));
    if (f16) CHECK(strcmp(f16->name, "cpu neon f16") == 0);
    if (bf16) CHECK(strcmp(bf16->name, "cpu neon f16 bf16") == 0);
    if (bfmmla) CHECK(strcmp(bfmmla->name, "cpu neon f16 bfmmla") == 0);
    CHECK(!bf16 || f16);
    CHECK(!bfmmla || bf16);
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
    RUN(bfmmla_rounds_to_odd);
    RUN(the_best_of_the_same_bits_is_used);
    return test_report();
}
