/* test_gemm.c - the matrix product on every instruction set, compared with plain double loops.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include "test.h"
#include "arrays.h"
#include "pairs.h"
#include "products.h"

/* One problem on every instruction set, checked, then again with other threads: same bits. */
/* Quick: with two numbers of threads, other ones each time. */
static void try_everywhere(int m, int n, int k, int batch, int whole) {
    static const int threads[5] = { 1, 2, 3, 5, 16 };
    static int       calls;
    const int        each = getenv("MIXPREC_TEST_QUICK") ? 3 : 1;
    problem p = problem_new(m, n, k, batch, whole);
    size_t  bytes = (size_t)p.c_size * mixp_dtype_size(p.g.c.dtype);
    char   *first = (char *)malloc(bytes + 1);
    for (int isa = 0; isa < MIXP_ISA_COUNT; isa++) {
        const mixp_device *d = mixp_cpu_with((mixp_isa)isa);
        if (!d) continue;
        run(d, &p, 0);
        problem_check(&p, whole, isa_names[isa]);
        memcpy(first, p.c.data, bytes);
        for (int i = calls % each; i < 5; i += each) {
            run(d, &p, threads[i]);
            CHECK(memcmp(first, p.c.data, bytes) == 0);
        }
    }
    calls++;
    free(first);
    problem_free(&p);
}

static void small_sizes_any_mix(void) {
    for (int i = 0; i < 400; i++) try_everywhere(1 + random_to(70), 1 + random_to(70), random_to(70), 1, 0);
}

static void around_tile_edges(void) {
    static const int sizes[10] = { 1, 6, 7, 13, 14, 15, 16, 17, 32, 33 };
    for (int i = 0; i < 10; i++)
        for (int j = 0; j < 10; j++) try_everywhere(sizes[i], sizes[j], 1 + random_to(40), 1, 0);
}

/* k needs several passes, m and n several blocks. */
static void larger(void) {
    try_everywhere(3, 5, 2000, 1, 0);
    try_everywhere(14, 32, 384, 1, 0);
    try_everywhere(15, 33, 385, 1, 0);
    try_everywhere(530, 40, 61, 1, 0);
    try_everywhere(20, 1100, 30, 1, 0);
    try_everywhere(600, 530, 8, 1, 0);
    for (int i = 0; i < (test_later() ? 3 : 12); i++)
        try_everywhere(1 + random_to(200), 1 + random_to(200), 300 + random_to(600), 1, 0);
}

static void batches(void) {
    for (int i = 0; i < 60; i++)
        try_everywhere(1 + random_to(40), 1 + random_to(40), random_to(40), 1 + random_to(9), 0);
    try_everywhere(3, 4, 5, 300, 0);
}

/* Sums of whole numbers are exact in f32, so c must be the true value rounded once, even where
 * k takes several passes and f16 or bf16 would have dropped bits in between. */
static void rounds_once(void) {
    for (int i = 0; i < (test_later() ? 20 : 60); i++)
        try_everywhere(1 + random_to(40), 1 + random_to(70), 1 + random_to(1500), 1, 1);
}

static void no_k_gives_bias(void) {
    for (int i = 0; i < 20; i++) try_everywhere(1 + random_to(40), 1 + random_to(70), 0, 1 + random_to(3), 0);
}

static void empty_matrices_are_left_alone(void) {
    static const int sizes[3][4] = { { 0, 5, 3, 1 }, { 5, 0, 3, 1 }, { 5, 3, 4, 0 } };
    for (int isa = 0; isa < MIXP_ISA_COUNT; isa++)
        for (int i = 0; i < 3 && mixp_cpu_with((mixp_isa)isa); i++) {
            test_array c = array_new(MIXP_F32, 64);
            mixp_gemm_args g;
            runner     r;
            mixp_exec  x = runner_exec(&r, 2);
            memset(&g, 0, sizeof g);
            g.m = sizes[i][0]; g.n = sizes[i][1]; g.k = sizes[i][2]; g.batch = sizes[i][3];
            g.lda = g.ldb = g.ldc = 8;
            g.a = g.b = args_in(c);
            g.c = args_out(c, 0);
            CHECK_INT(mixp_cpu_with((mixp_isa)isa)->kernels->gemm(&x, &g), MIXP_OK);
            CHECK(array_untouched(c, 0) && array_untouched(c, 63) && array_guarded(c, 64));
            CHECK(runner_end(&r));
            array_free(c);
        }
}

/* alpha in memory gives the bits of alpha as an argument. */
static void alpha_in_memory(void) {
    for (int i = 0; i < 20; i++) {
        problem p = problem_new(1 + random_to(40), 1 + random_to(70), random_to(600), 2, 0);
        size_t bytes = (size_t)p.c_size * mixp_dtype_size(p.g.c.dtype);
        char *first = (char *)malloc(bytes + 1);
        float alpha = p.g.alpha;
        for (int isa = 0; isa < MIXP_ISA_COUNT; isa++) {
            const mixp_device *d = mixp_cpu_with((mixp_isa)isa);
            if (!d) continue;
            run(d, &p, 2);
            memcpy(first, p.c.data, bytes);
            p.g.alpha = -77.0f;
            p.g.alpha_at = &alpha;
            run(d, &p, 2);
            CHECK(memcmp(first, p.c.data, bytes) == 0);
            p.g.alpha = alpha;
            p.g.alpha_at = NULL;
        }
        free(first);
        problem_free(&p);
    }
}

/* Inf and NaN in an input reach exactly the elements that depend on it. */
static void non_finite_inputs_spread_as_they_should(void) {
    static const float bad[2] = { INFINITY, NAN };
    for (int isa = 0; isa < MIXP_ISA_COUNT; isa++)
        for (int v = 0; v < 2 && mixp_cpu_with((mixp_isa)isa); v++) {
            problem    p = problem_new(33, 45, 20, 1, 0);
            const mixp_gemm_args *g = &p.g;
            int64_t    at = g->trans_a ? 7 * g->lda + 30 : 30 * g->lda + 7;
            array_set(p.a, at, (double)bad[v]);
            run(mixp_cpu_with((mixp_isa)isa), &p, 3);
            for (int i = 0; i < 33; i++)
                for (int j = 0; j < 45; j++) {
                    double c = array_get(p.c, i * g->ldc + j);
                    CHECK((i == 30) == !(fabs(c) <= 1e4));
                }
            problem_free(&p);
        }
}

/* --- b or c in an image ------------------------------------------------------------------------------- */

enum { IMAGE = 6000 };
static float   image[2 * IMAGE], copy[2 * IMAGE], dense[2 * 90 * 900];
static int64_t tables[2000];

/* Rows and runs anywhere in an image. Rows with another index / taps have another part of it. */
static mixp_indexed indexed_new(int64_t rows, int64_t columns, int64_t taps) {
    const int    part = IMAGE / (int)(1 + rows / taps);
    mixp_indexed at = { tables, tables + rows, 1 + random_to(40) };
    for (int64_t i = 0; i < rows; i++) tables[i] = i / taps * part + random_to(8);
    for (int64_t i = 0; i * at.run < columns; i++) tables[rows + i] = random_to(part - 7 - (int)at.run);
    return at;
}
static float *indexed_at(float *base, const mixp_indexed *at, int64_t i, int64_t j)
{ return base + at->rows[i] + at->runs[j / at->run] + j % at->run; }

/* gemm of a copy of b has the bits of gemm_indexed. */
static void indexed_b(const mixp_device *d, problem *p, int threads) {
    const int64_t  rows = p->g.trans_b ? p->g.n : p->g.k, columns = p->g.trans_b ? p->g.k : p->g.n;
    const size_t   bytes = (size_t)p->c_size * mixp_dtype_size(p->c.dtype);
    mixp_gemm_args g = p->g;
    char          *first = (char *)malloc(bytes + 1);
    runner         r;
    mixp_exec      x = runner_exec(&r, threads);
    mixp_gemm_indexed_args k;
    memset(&k, 0, sizeof k);
    k.b = indexed_new(rows, columns, 1000);
    for (int64_t i = 0; i < 2 * rows * columns; i++)
        dense[i] = *indexed_at(image + i / (rows * columns) * IMAGE, &k.b, i / columns % rows, i % columns);
    p->g.b = mixpi_in(dense, MIXP_F32);
    p->g.ldb = columns;
    p->g.stride_b = rows * columns;
    run(d, p, 1);
    memcpy(first, p->c.data, bytes);
    p->g.b.data = image;
    p->g.stride_b = IMAGE;
    k.gemm = p->g;
    problem_reset(p);
    CHECK_INT(d->kernels->gemm_indexed(&x, &k), MIXP_OK);
    CHECK(memcmp(first, p->c.data, bytes) == 0);
    CHECK(runner_end(&r));
    p->g = g;
    free(first);
}

/* A loop that adds the result of gemm to an image, row after row, has the bits of gemm_indexed. */
static void indexed_c(const mixp_device *d, const problem *p, int threads) {
    runner    r, s;
    mixp_exec x = runner_exec(&r, threads), one = runner_exec(&s, 1);
    mixp_gemm_indexed_args k;
    memset(&k, 0, sizeof k);
    k.gemm = p->g;
    k.gemm.bias.data = NULL;
    k.taps = 1 + random_to(12);
    k.c = indexed_new(p->g.m, p->g.n, k.taps);
    k.gemm.c = args_out(p->c, 0);
    k.gemm.c.dtype = MIXP_F32;
    k.gemm.c.data = dense;
    k.gemm.ldc = p->g.n;
    k.gemm.stride_c = p->g.m * p->g.n;
    CHECK_INT(d->kernels->gemm(&one, &k.gemm), MIXP_OK);
    memcpy(copy, image, sizeof copy);
    for (int64_t i = 0; i < 2 * k.gemm.stride_c; i++)
        *indexed_at(copy + i / k.gemm.stride_c * IMAGE, &k.c, i / p->g.n % p->g.m, i % p->g.n) += dense[i];
    k.gemm.c.data = image;
    k.gemm.stride_c = IMAGE;
    CHECK_INT(d->kernels->gemm_indexed(&x, &k), MIXP_OK);
    CHECK(memcmp(copy, image, sizeof copy) == 0);
    CHECK(runner_end(&r) && runner_end(&s));
}

static void indexed_products(void) {
    for (int round = 0; round < (test_later() ? 50 : 200); round++) {
        problem p = problem_new(1 + random_to(90), 1 + random_to(90), random_to(round % 8 ? 90 : 900), 2, 0);
        for (int i = 0; i < 2 * IMAGE; i++) image[i] = (float)random_value();
        if (round % 2) problem_to(&p, MIXP_F32);
        for (int isa = 0; isa < MIXP_ISA_COUNT; isa++) {
            if (!mixp_cpu_with((mixp_isa)isa)) continue;
            if (round % 2) indexed_c(mixp_cpu_with((mixp_isa)isa), &p, 1 + round % 5);
            else indexed_b(mixp_cpu_with((mixp_isa)isa), &p, 1 + round % 5);
        }
        problem_free(&p);
    }
}

static void *no_scratch(void *user, size_t bytes) { (void)user; (void)bytes; return NULL; }

static void out_of_memory_is_reported(void) {
    problem   p = problem_new(40, 40, 40, 1, 0);
    runner    r;
    mixp_exec x = runner_exec(&r, 1);
    x.scratch = no_scratch;
    CHECK_INT(mixp_cpu()->kernels->gemm(&x, &p.g), MIXP_ERR_MEMORY);
    problem_free(&p);
}

/* Tasks that a product was cut into; 0 when it ran without the hook. */
static int64_t cut_into;
static void counting_parallel(void *user, int64_t tasks, mixp_task task, void *arg) {
    cut_into = tasks;
    runner_parallel(user, tasks, task, arg);
}

/* However many threads there are, odd numbers included, and few rows: half of them have work, or
 * every tile (64 by 64 at the largest) is a task of its own. */
static void threads_are_not_left_idle(void) {
    static const int shapes[][3] = { { 16, 64, 4096 }, { 16, 128, 4096 }, { 32, 64, 768 }, { 8, 768, 768 },
        { 1, 112, 8192 }, { 64, 64, 480 }, { 768, 128, 512 }, { 33, 1000, 700 } };
    static const int threads[] = { 2, 3, 7, 8, 12, 16, 32, 61 };
    for (int s = 0; s < 8; s += test_later() ? 3 : 1) {
        const int *d = shapes[s];
        problem    p = problem_new(d[0], d[1], d[2], 1, 0);
        for (int isa = 0; isa < MIXP_ISA_COUNT; isa++)
            for (int t = 0; t < 8 && mixp_cpu_with((mixp_isa)isa); t++) {
                int64_t    tiles = (int64_t)((d[0] + 63) / 64) * ((d[1] + 63) / 64);
                runner     r;
                mixp_exec  x = runner_exec(&r, threads[t]);
                x.parallel = counting_parallel;
                cut_into = 1;
                CHECK_INT(mixp_cpu_with((mixp_isa)isa)->kernels->gemm(&x, &p.g), MIXP_OK);
                CHECK(cut_into >= tiles || 2 * cut_into >= threads[t]);
                if (d[1] > 64) CHECK(cut_into > 1);
                CHECK(runner_end(&r));
            }
        problem_free(&p);
    }
}

/* --- AVX512_BF16 ------------------------------------------------------------------------- */

/* What pairs.h says of vdpbf16ps, lane by lane: see there. */
static void pairs_are_two_fused_steps(void) {
    const mixp_device *d = mixp_cpu_with(MIXP_ISA_AVX512_BF16);
    if (!d) SKIP("no AVX512_BF16");
    CHECK_INT(pairs_differ(d, PAIRS_NORMAL, 20, 0), 0);
    CHECK_INT(pairs_differ(d, PAIRS_NORMAL, 20, 1), 0);
}

/* Sums that are off when rounded twice, by what their last bits say; the wanted ones are by hand. */
static void reference_of_pairs_rounds_once(void) {
    const float tiny = mixp_f32_of_bits(1u), one = 1.0f, next = mixp_f32_of_bits(0x3F800001u);
    const float half = mixp_f32_of_bits(0x33800000u);       /* 2^-24, half of 1's last place */
    CHECK(pairs_fused(half, one, one) <= one);              /* a tie goes to even */
    CHECK(pairs_fused(half, one, next) > next);
    CHECK(pairs_fused(mixp_f32_of_bits(0x3F810000u), half, one) >= next);   /* past the tie */
    CHECK(pairs_fused(mixp_f32_of_bits(0x1A800000u), mixp_f32_of_bits(0x1A800000u), one) <= one);
    CHECK(pairs_fused(-half, 0.5f, one) <= one && pairs_fused(-half, 0.5f, one) >= one);
    CHECK(mixp_bits_of_f32(pairs_fused(tiny, 0.5f, 0.0f)) == 0u);
    CHECK(mixp_bits_of_f32(pairs_fused(tiny, 0.5f, tiny)) == 2u);
    CHECK(mixp_bits_of_f32(pairs_fused(3e38f, 2.0f, 0.0f)) == 0x7F800000u);
    CHECK(isnan(pairs_fused(0.0f, (float)INFINITY, one)));
}
static void subnormals_of_pairs_are_zero(void) {
    const mixp_device *d = mixp_cpu_with(MIXP_ISA_AVX512_BF16);
    if (!d) SKIP("no AVX512_BF16");
    CHECK_INT(pairs_differ(d, PAIRS_SMALL, 20, 1), 0);
    CHECK_INT(pairs_differ(d, PAIRS_ANY, 20, 1), 0);
    CHECK(pairs_differ(d, PAIRS_SMALL, 1, 0) > 0);
    CHECK_INT(pairs_differ(mixp_cpu_with(MIXP_ISA_AVX512), PAIRS_SMALL, 20, 0), 0);
}

/* Whole products of bf16, of any shape, as AVX-512 makes them by widening. */
static void pairs_give_the_bits_of_widening(void) {
    const mixp_device *wide = mixp_cpu_with(MIXP_ISA_AVX512);
    const mixp_device *pairs = mixp_cpu_with(MIXP_ISA_AVX512_BF16);
    if (!pairs) SKIP("no AVX512_BF16");
    for (int i = 0; i < 200; i++) {
        problem p = problem_new(1 + random_to(90), 1 + random_to(90), random_to(i % 8 ? 90 : 900),
                                1 + random_to(3), 0);
        size_t  bytes = (size_t)p.c_size * mixp_dtype_size(p.c.dtype);
        char   *first = (char *)malloc(bytes + 1);
        problem_to(&p, MIXP_BF16);
        run(wide, &p, 2);
        memcpy(first, p.c.data, bytes);
        run(pairs, &p, 1 + i % 3);
        CHECK(memcmp(first, p.c.data, bytes) == 0);
        free(first);
        problem_free(&p);
    }
}

/* AVX512_BF16 can be named on each machine that has it. mixp_cpu selects it only on AMD, without tiles. */
static void chosen_by_maker(void) {
    const mixp_device *pairs = mixp_cpu_with(MIXP_ISA_AVX512_BF16);
    char  line[4096];
    int   amd = 0, has = 0;
    FILE *f = fopen("/proc/cpuinfo", "r");
    if (!f) SKIP("no /proc/cpuinfo");
    while (fgets(line, sizeof line, f)) {
        amd |= strstr(line, "AuthenticAMD") != NULL;
        has |= strstr(line, " avx512_bf16") != NULL;
    }
    fclose(f);
    if (pairs) CHECK(has && strcmp(pairs->name, "cpu avx512 bf16") == 0);
    if (mixp_cpu_with(MIXP_ISA_AMX)) CHECK_TEXT(mixp_cpu()->name, " amx");
    else CHECK_INT(strcmp(mixp_cpu()->name, "cpu avx512 bf16") == 0, amd && pairs != NULL);
}

int main(void) {
    RUN(threads_are_not_left_idle);
    RUN(small_sizes_any_mix);
    RUN(around_tile_edges);
    RUN(larger);
    RUN(batches);
    RUN(rounds_once);
    RUN(alpha_in_memory);
    RUN(indexed_products);
    RUN(no_k_gives_bias);
    RUN(empty_matrices_are_left_alone);
    RUN(non_finite_inputs_spread_as_they_should);
    RUN(out_of_memory_is_reported);
    RUN(pairs_are_two_fused_steps);
    RUN(reference_of_pairs_rounds_once);
    RUN(subnormals_of_pairs_are_zero);
    RUN(pairs_give_the_bits_of_widening);
    RUN(chosen_by_maker);
    return test_report();
}
