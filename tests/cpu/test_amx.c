/* test_amx.c - products and attention by AMX, run on the emulation in amxsim.h. The test compares
 * them with double loops and with the order of sums that mixprec.h states, and checks the conditions
 * that must hold before the instructions are used.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#ifndef _DEFAULT_SOURCE
#  define _DEFAULT_SOURCE     /* setitimer, getauxval */
#endif
#include "amxsim.h"
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include "test.h"
#include "arrays.h"
#include "products.h"
#include "shared_work.h"
#include "examples/conv.h"
#include "examples/recurrent.h"
#include "operators.h"
#include "any_batch.h"

#if MIXPI_AMX
#include <signal.h>
#include <sys/auxv.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

/* The device, or a skip where AVX-512, which packs for it, is missing. */
static const mixp_device *device_of(mixp_isa isa) {
    const mixp_device *d;
    amxsim.bf16 = amxsim.f16 = 1;
    amxsim.wrong = AMXSIM_RIGHT;
    d = mixp_cpu_with(isa);
    CHECK(d || !mixp_cpu_with(MIXP_ISA_AVX512));
    return d;
}

/* --- against double loops --- */

static void try_sizes(const mixp_device *d, mixp_dtype dtype, int m, int n, int k, int batch) {
    problem p = problem_new(m, n, k, batch, 0);
    size_t  bytes = (size_t)p.c_size * mixp_dtype_size(p.c.dtype);
    char   *first = (char *)malloc(bytes + 1);
    int64_t dots = amxsim_dots;
    problem_to(&p, dtype);
    run(d, &p, 0);
    CHECK(k == 0 || amxsim_dots > dots);
    problem_check(&p, 0, d->name);
    memcpy(first, p.c.data, bytes);
    run(d, &p, 2 + m % 4);
    CHECK(memcmp(first, p.c.data, bytes) == 0);
    CHECK_INT(amxsim_faults, 0);
    CHECK(!amxsim_cpu.configured);
    free(first);
    problem_free(&p);
}
static void any_size(mixp_isa isa, mixp_dtype dtype) {
    static const int edges[6] = { 1, 15, 16, 17, 32, 33 };
    const mixp_device *d = device_of(isa);
    if (!d) SKIP("no AVX-512");
    for (int i = 0; i < 6; i++)
        for (int j = 0; j < 6; j++) try_sizes(d, dtype, edges[i], edges[j], 1 + random_to(70), 1);
    for (int i = 0; i < 20; i++)
        try_sizes(d, dtype, 1 + random_to(70), 1 + random_to(70), random_to(70), 1 + random_to(2));
    try_sizes(d, dtype, 150, 40, 61, 1);
    try_sizes(d, dtype, 5, 40, 385, 1);
    try_sizes(d, dtype, 40, 5, 900, 1);
}
static void bf16_of_any_size(void)          { any_size(MIXP_ISA_AMX, MIXP_BF16); }
static void f16_of_any_size(void)           { any_size(MIXP_ISA_AMX_F16, MIXP_F16); }
static void split_of_any_size(void)         { any_size(MIXP_ISA_AMX, MIXP_F16); }

/* k takes two passes, and one thread several blocks. */
static void several_blocks(void) {
    const mixp_device *d = device_of(MIXP_ISA_AMX);
    if (!d) SKIP("no AVX-512");
    try_sizes(d, MIXP_BF16, 513, 1, 1030, 1);
    try_sizes(d, MIXP_BF16, 1, 720, 1030, 1);
    try_sizes(d, MIXP_F16, 513, 1, 520, 1);
    try_sizes(d, MIXP_F16, 1, 720, 520, 1);
}

/* The set with tiles of f16 multiplies bf16 as the other set does. */
static void bf16_of_the_larger_table(void) {
    const mixp_device *d = device_of(MIXP_ISA_AMX_F16);
    if (!d) SKIP("no AVX-512");
    for (int i = 0; i < 10; i++)
        try_sizes(d, MIXP_BF16, 1 + random_to(70), 1 + random_to(70), random_to(70), 1);
}

/* A large a' b in f32 whose rows are whole cache lines is written past the caches. At any other address it is not.
 * Both results are exact, and no store touches the padding. */
static void large_gradients(void) {
    enum { M = 544, N = 1008, LD = 1024 };      /* more than 2 MB, and a last panel of 16 columns */
    const mixp_device *d = device_of(MIXP_ISA_AMX);
    static mixp_bf16 a[2][M], b[2][N];
    static float     room[M * LD + 32];
    if (!d) SKIP("no AVX-512");
    for (int k = 0; k < 2; k++) {
        for (int i = 0; i < M; i++) a[k][i] = mixp_bf16_from_f32((float)(random_to(17) - 8));
        for (int j = 0; j < N; j++) b[k][j] = mixp_bf16_from_f32((float)(random_to(17) - 8));
    }
    for (int past = 0; past < 2; past++) {
        runner    r;
        mixp_exec x = runner_exec(&r, 2);
        float    *c = room + (64 - (uintptr_t)room % 64) / 4 + past;
        mixp_gemm_args g;
        memset(&g, 0, sizeof g);
        g.m = g.lda = M; g.n = g.ldb = N; g.k = 2; g.batch = 1;
        g.trans_a = 1; g.alpha = 1; g.ldc = LD;
        g.a = mixpi_in(a, MIXP_BF16);
        g.b = mixpi_in(b, MIXP_BF16);
        g.c = mixpi_out_to(c, MIXP_F32, 0);
        memset(room, 0xFF, sizeof room);
        CHECK_INT(d->kernels->gemm(&x, &g), MIXP_OK);
        CHECK(runner_end(&r));
        for (int i = 0; i < M; i++)
            for (int j = 0; j < N; j++)
                CHECK(c[i * LD + j] == mixp_get(g.a, i) * mixp_get(g.b, j) + mixp_get(g.a, M + i) * mixp_get(g.b, N + j));
        for (int i = 0; i < M - 1; i++)
            for (int j = N; j < LD; j++) CHECK(mixp_bits_of_f32(c[i * LD + j]) == 0xFFFFFFFFu);
    }
}

/* What tiles do not multiply goes as ever: not a bit differs. */
static void other_products_are_avx512s(void) {
    const mixp_device *d = device_of(MIXP_ISA_AMX), *avx = mixp_cpu_with(MIXP_ISA_AVX512);
    if (!d) SKIP("no AVX-512");
    for (int i = 0; i < 60; i++) {
        problem p = problem_new(1 + random_to(70), 1 + random_to(70), random_to(70), 1, 0);
        size_t  bytes = (size_t)p.c_size * mixp_dtype_size(p.c.dtype);
        char   *first = (char *)malloc(bytes + 1);
        int64_t dots = amxsim_dots;
        if (p.a.dtype != p.b.dtype || p.a.dtype == MIXP_F32) {
            run(avx, &p, 2);
            memcpy(first, p.c.data, bytes);
            run(d, &p, 2);
            CHECK(memcmp(first, p.c.data, bytes) == 0);
            CHECK_INT(amxsim_dots, dots);
        }
        free(first);
        problem_free(&p);
    }
}

/* --- against the stated order, to the bit --- */

static float flushed(float x)
{ return mixp_bits_of_f32(x) & 0x7F800000u ? x : mixp_f32_of_bits(mixp_bits_of_f32(x) & 0x80000000u); }

static float code_at(mixp_dtype dtype, const void *codes, int64_t i) {
    if (dtype == MIXP_F16) return mixp_f32_from_f16(((const mixp_f16 *)codes)[i]);
    return flushed(mixp_f32_from_bf16(((const mixp_bf16 *)codes)[i]));
}

/* x, or the part of it that a product of split operands multiplies: its upper 8 bits, or the rest. */
typedef enum { WHOLE, HIGH, LOW } part_of_x;

static float part(float x, part_of_x which) {
    float high = mixp_f32_of_bits(mixp_bits_of_f32(x) & 0xFFFF0000u);
    if (which == WHOLE) return x;
    return which == HIGH ? high : x - high;
}

static float a_at(const problem *p, int64_t i, int64_t q)
{ return code_at(p->a.dtype, p->a.data, p->g.trans_a ? q * p->g.lda + i : i * p->g.lda + q); }
static float b_at(const problem *p, int64_t q, int64_t j)
{ return code_at(p->b.dtype, p->b.data, p->g.trans_b ? j * p->g.ldb + q : q * p->g.ldb + j); }

/* Adds to sum up to 32 products from k = `from` on: a chain of even and a chain of odd elements. */
static float model_step(float sum, const problem *p, int64_t i, int64_t j, int64_t from, part_of_x a, part_of_x b) {
    float   chain[2] = { 0.0f, 0.0f };
    for (int64_t q = from; q < p->g.k && q < from + 32; q++) {
        float *c = &chain[(q - from) % 2];
        *c = flushed(fmaf(part(a_at(p, i, q), a), part(b_at(p, q, j), b), *c));
    }
    return flushed(sum + flushed(chain[0] + chain[1]));
}

/* The sum over [from, end) of k, from whole steps of 32. split: four products of a step. */
static float model_sum(const problem *p, int64_t i, int64_t j, int64_t from, int64_t end, int split) {
    float   sum = 0.0f;
    for (int64_t q = from; q < end; q += 32) {
        if (!split) {
            sum = model_step(sum, p, i, j, q, WHOLE, WHOLE);
            continue;
        }
        sum = model_step(sum, p, i, j, q, LOW, LOW);
        sum = model_step(sum, p, i, j, q, HIGH, LOW);
        sum = model_step(sum, p, i, j, q, HIGH, HIGH);
        sum = model_step(sum, p, i, j, q, LOW, HIGH);
    }
    return sum;
}

/* The passes, of at most 1,024 elements (split: 512), in order; then c = alpha * sum + bias, + c. */
static float model_element(const problem *p, int64_t i, int64_t j, int split) {
    const mixp_gemm_args *g = &p->g;
    int64_t most = split ? 512 : 1024, passes = (g->k + most - 1) / most, depth, from;
    float   c = g->c.accumulate ? ((const float *)p->old.data)[i * g->ldc + j] : 0.0f;
    float   bias = p->bias.data ? ((const float *)p->bias.data)[j] : 0.0f, sum = 0.0f;
    depth = passes ? ((g->k + passes - 1) / passes + 31) / 32 * 32 : 32;
    for (from = 0; from < g->k; from += depth) {
        float more = model_sum(p, i, j, from, from + depth < g->k ? from + depth : g->k, split);
        sum = from ? sum + more : more;
    }
    sum = fmaf(g->alpha, sum, bias);
    return g->c.accumulate ? sum + c : sum;
}

/* Codes about the smallest normal number of their format, above and below. */
static void problem_small(problem *p) {
    static const float unit[2] = { 1.1754943508222875e-38f, 6.103515625e-5f };
    float   small = unit[p->a.dtype == MIXP_F16];
    for (int64_t i = 0; i < p->a_size; i++) array_set(p->a, i, (double)small * random_value() * 4);
    for (int64_t i = 0; i < p->b_size; i++) array_set(p->b, i, random_value());
}

static void floats_of(test_array *a, int64_t n) {
    test_array f = array_new(MIXP_F32, n);
    for (int64_t i = 0; i < n; i++) array_set(f, i, array_get(*a, i));
    array_free(*a);
    *a = f;
}

static int64_t differ(const mixp_device *d, mixp_dtype dtype, int m, int n, int k, int small) {
    problem p = problem_new(m, n, k, 1, 0);
    int     split = dtype == MIXP_F16 && d == mixp_cpu_with(MIXP_ISA_AMX);
    int64_t bad = 0, i, j;
    if (n == k) p.g.trans_b = 1;
    problem_to(&p, dtype);
    if (small) problem_small(&p);
    floats_of(&p.c, p.c_size);
    floats_of(&p.old, p.c_size);
    if (p.bias.data) floats_of(&p.bias, n);
    p.g.bias = args_in(p.bias);
    p.g.c = args_out(p.c, p.g.c.accumulate);
    run(d, &p, 1 + m % 3);
    for (i = 0; i < m; i++)
        for (j = 0; j < n; j++) {
            float c = ((const float *)p.c.data)[i * p.g.ldc + j];
            bad += mixp_bits_of_f32(c) != mixp_bits_of_f32(model_element(&p, i, j, split));
        }
    problem_free(&p);
    return bad;
}
static void stated_order(mixp_isa isa, mixp_dtype dtype) {
    const mixp_device *d = device_of(isa);
    if (!d) SKIP("no AVX-512");
    for (int i = 0; i < 30; i++)
        CHECK_INT(differ(d, dtype, 1 + random_to(50), 1 + random_to(50), random_to(120), i % 3 == 2), 0);
    CHECK_INT(differ(d, dtype, 20, 9, 700, 0), 0);
    CHECK_INT(differ(d, dtype, 33, 17, 1100, 0), 0);
    CHECK_INT(differ(d, dtype, 9, 20, 2100, 0), 0);
    CHECK_INT(differ(d, dtype, 33, 132, 132, 0), 0);   /* b is read in place, c' is transposed */
}
static void bf16_in_the_stated_order(void) { stated_order(MIXP_ISA_AMX, MIXP_BF16); }
static void f16_in_the_stated_order(void)  { stated_order(MIXP_ISA_AMX_F16, MIXP_F16); }
static void split_in_the_stated_order(void) { stated_order(MIXP_ISA_AMX, MIXP_F16); }

/* --- f16, split into two bf16 --- */

/* c = a b in f32, m x n x k, dense, of f16 codes, in one thread. */
static void multiply(const mixp_device *d, int m, int n, int k, const uint16_t *a, const uint16_t *b, float *c) {
    mixp_gemm_args g;
    runner    r;
    mixp_exec x = runner_exec(&r, 1);
    memset(&g, 0, sizeof g);
    g.m = m; g.n = n; g.k = k; g.batch = 1;
    g.alpha = 1.0f;
    g.lda = k; g.ldb = g.ldc = n;
    g.a.data = a; g.b.data = b; g.c.data = c;
    g.a.dtype = g.b.dtype = MIXP_F16;
    g.c.dtype = MIXP_F32;
    CHECK_INT(d->kernels->gemm(&x, &g), MIXP_OK);
    CHECK(runner_end(&r));
}

static float of_code(uint16_t code) {
    mixp_f16 h;
    h.bits = code;
    return mixp_f32_from_f16(h);
}
static int is_finite(uint16_t code) { return (code & 0x7C00u) != 0x7C00u; }

/* The product of all finite codes by the unit matrix, from the left and from the right. */
static void the_split_is_exact(void) {
    enum { SIDE = 32, MANY = 65536 / SIDE };
    static uint16_t codes[65536], unit[SIDE * SIDE];
    static float    c[65536];
    const mixp_device *d = device_of(MIXP_ISA_AMX);
    int i, side, bad = 0;
    if (!d) SKIP("no AVX-512");
    for (i = 0; i < SIDE; i++) unit[i * SIDE + i] = 0x3C00;
    for (i = 0; i < 65536; i++) codes[i] = (uint16_t)(is_finite((uint16_t)i) ? i : 0);
    for (side = 0; side < 2; side++) {
        if (side) multiply(d, MANY, SIDE, SIDE, codes, unit, c);
        else multiply(d, SIDE, MANY, SIDE, unit, codes, c);
        for (i = 0; i < 65536; i++) bad += c[i] != of_code(codes[i]);
    }
    CHECK_INT(bad, 0);
}

/* Root mean square and largest error of c, in units of 2^-24 of the sum of magnitudes. */
typedef struct errors { double rms, most; } errors;
static errors errors_of(int m, int n, int k, const uint16_t *a, const uint16_t *b, const float *c) {
    errors e = { 0, 0 };
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) {
            double sum = 0, size = 0, off;
            for (int q = 0; q < k; q++) {
                double one = (double)of_code(a[i * k + q]) * (double)of_code(b[q * n + j]);
                sum += one;
                size += fabs(one);
            }
            off = fabs((double)c[i * n + j] - sum) / ldexp(size, -24);
            e.rms += off * off / (m * n);
            e.most = off > e.most ? off : e.most;
        }
    e.rms = sqrt(e.rms);
    return e;
}

/* Row i of a has numbers of one exponent: subnormals of the last 1 to 10 bits, then each normal exponent, and last
 * 65,504 in each place. Signs are mixed, then all the same. A block of tiles makes at most 16 + 1 + 4 roundings of a sum. */
static void errors_at_every_exponent(void) {
    enum { M = 41, N = 33, K = 600, BLOCKS = (K + 31) / 32 };
    static uint16_t a[M * K], b[K * N];
    static float    c[M * N];
    const mixp_device *d = device_of(MIXP_ISA_AMX), *avx = mixp_cpu_with(MIXP_ISA_AVX512);
    if (!d) SKIP("no AVX-512");
    for (int positive = 0; positive < 2; positive++) {
        for (int i = 0; i < K * N; i++)
            b[i] = (uint16_t)(random_to(31) << 10 | random_to(1024) | (positive ? 0 : random_to(2) << 15));
        for (int i = 0; i < M * K; i++) {
            int row = i / K;
            a[i] = (uint16_t)(row < 10 ? 1 << row | random_to(1 << row) : (row - 9) << 10 | random_to(1024));
            if (row == M - 1) a[i] = 0x7BFF;
            if (!positive) a[i] = (uint16_t)(a[i] | random_to(2) << 15);
        }
        multiply(d, M, N, K, a, b, c);
        errors tiles = errors_of(M, N, K, a, b, c);
        multiply(avx, M, N, K, a, b, c);
        errors floats = errors_of(M, N, K, a, b, c);
        CHECK(tiles.most <= 17 + 4 * BLOCKS);
        CHECK(tiles.rms > 0 && tiles.rms <= floats.rms);
        CHECK(tiles.most <= floats.most);
    }
}

/* A product with Inf and NaN in places: rows and columns that hold one have AVX-512's bits. Every other element has the
 * bits that it has when those places hold numbers. */
static int same_number(test_array x, test_array y, int64_t i) {
    const size_t size = mixp_dtype_size(x.dtype);
    if (memcmp((char *)x.data + (size_t)i * size, (char *)y.data + (size_t)i * size, size) == 0) return 1;
    return isnan(array_get(x, i)) && isnan(array_get(y, i));
}
static test_array copy_of_c(const problem *p) {
    test_array a = array_new(p->c.dtype, p->c_size);
    memcpy(a.data, p->c.data, (size_t)p->c_size * mixp_dtype_size(p->c.dtype));
    return a;
}

/* Puts one of Inf, -Inf, NaN at (line, q) of a matrix whose lines of k elements are rows, or columns if turned. */
static void put_bad(test_array a, int64_t at, int64_t line, int64_t q, int64_t ld, int turned) {
    static const uint16_t codes[3] = { 0x7C00, 0xFC00, 0x7E01 };
    ((uint16_t *)a.data)[at + (turned ? q * ld + line : line * ld + q)] = codes[random_to(3)];
}

static int64_t wrong_beside_bad(int m, int n, int k, int bad_a, int bad_b) {
    const mixp_device *d = mixp_cpu_with(MIXP_ISA_AMX), *avx = mixp_cpu_with(MIXP_ISA_AVX512);
    problem p = problem_new(m, n, k, 1, 0);
    const mixp_gemm_args *g = &p.g;
    char *rows = (char *)calloc((size_t)m, 1), *columns = (char *)calloc((size_t)n, 1);
    int64_t wrong = 0, i, j;
    problem_to(&p, MIXP_F16);
    run(d, &p, 1);
    test_array clean = copy_of_c(&p);
    for (; bad_a > 0; bad_a--) {
        i = random_to(m);
        rows[i] = 1;
        put_bad(p.a, 0, i, random_to(k), g->lda, g->trans_a);
    }
    for (; bad_b > 0; bad_b--) {
        j = random_to(n);
        columns[j] = 1;
        put_bad(p.b, 0, j, random_to(k), g->ldb, !g->trans_b);
    }
    run(avx, &p, 1);
    test_array want = copy_of_c(&p);
    run(d, &p, 1 + random_to(3));
    for (i = 0; i < m; i++)
        for (j = 0; j < n; j++)
            wrong += !same_number(p.c, rows[i] || columns[j] ? want : clean, i * g->ldc + j);
    array_free(clean);
    array_free(want);
    free(rows);
    free(columns);
    problem_free(&p);
    return wrong;
}
static void inf_and_nan_are_avx512s(void) {
    if (!device_of(MIXP_ISA_AMX)) SKIP("no AVX-512");
    for (int i = 0; i < 24; i++)
        CHECK_INT(wrong_beside_bad(1 + random_to(80), 1 + random_to(80), 1 + random_to(100), i % 3, i % 4), 0);
    CHECK_INT(wrong_beside_bad(70, 40, 1100, 2, 0), 0);
    CHECK_INT(wrong_beside_bad(40, 70, 1100, 0, 2), 0);
    CHECK_INT(wrong_beside_bad(40, 40, 600, 3, 3), 0);
}

/* --- whole programs, on threads --- */

/* A linear layer forward and backward at level 1: y and both gradients go to `out`. */
enum { ROWS = 70, IN = 96, OUT = 50, RESULTS = ROWS * OUT + ROWS * IN + OUT * IN };

static void layer(const mixp_device *d, int threads, float *out) {
    static const int64_t w_shape[2] = { OUT, IN }, x_shape[2] = { ROWS, IN };
    static float values[ROWS * IN];
    mixp_context_desc desc;
    mixp_tensor  *w, *x, *y = NULL;
    memset(&desc, 0, sizeof desc);
    desc.device = d;
    desc.threads = threads;
    mixp_context *ctx = mixp_context_new(&desc);
    for (int i = 0; i < ROWS * IN; i++) values[i] = (float)(i * 37 % 101) / 50.0f - 1.0f;
    mixp_step_begin(ctx);
    w = mixp_input(ctx, MIXP_F32, 2, w_shape, values);
    x = mixp_input(ctx, MIXP_F32, 2, x_shape, values);
    mixp_tensor_set_requires_grad(w, 1);
    mixp_tensor_set_requires_grad(x, 1);
    MIXP_AUTOCAST(ctx, MIXP_BF16) y = mixp_linear(ctx, x, w, NULL);
    CHECK_INT(mixp_backward(ctx, mixp_mean(ctx, mixp_mul(ctx, y, y), MIXP_ALL, 0)), MIXP_OK);
    CHECK_INT(mixp_read(y, out, MIXP_F32, ROWS * OUT), MIXP_OK);
    out += ROWS * OUT;
    CHECK_INT(mixp_read(x->grad, out, MIXP_F32, ROWS * IN), MIXP_OK);
    out += ROWS * IN;
    CHECK_INT(mixp_read(w->grad, out, MIXP_F32, OUT * IN), MIXP_OK);
    mixp_context_free(ctx);
}

static void every_thread_configures_its_tiles(void) {
    static float one[RESULTS], many[RESULTS], avx[RESULTS];
    const mixp_device *d = device_of(MIXP_ISA_AMX);
    double most = 0, off = 0;
    if (!d) SKIP("no AVX-512");
    layer(d, 1, one);
    layer(d, 4, many);
    layer(mixp_cpu_with(MIXP_ISA_AVX512), 1, avx);
    CHECK(memcmp(one, many, sizeof one) == 0);
    CHECK_INT(amxsim_faults, 0);
    for (int i = 0; i < RESULTS; i++) {         /* bf16 rounds y: two units of its last place */
        off = fabs((double)one[i] - (double)avx[i]) - ldexp(fabs((double)avx[i]), -7) - 1e-4;
        most = off > most ? off : most;
    }
    CHECK(most <= 0);
}

/* --- how many threads --- */

static int64_t tasks_shared;
static void counted_parallel(void *user, int64_t tasks, mixp_task task, void *arg) {
    tasks_shared = tasks;
    runner_parallel(user, tasks, task, arg);
}

/* The tasks of a product of zeros on eight threads; 0 = it stays in the calling thread. */
static int64_t tasks_of(mixp_isa isa, mixp_dtype dtype, int64_t m, int64_t n, int64_t k, int64_t least_work) {
    static uint16_t zeros[512 * 1024];
    static float    c[512 * 512];
    runner    r;
    mixp_exec x = runner_exec(&r, 8);
    mixp_gemm_args g;
    memset(&g, 0, sizeof g);
    x.parallel = counted_parallel;
    x.least_work = least_work;
    g.m = m;
    g.n = g.ldc = n;
    g.k = g.lda = g.ldb = k;
    g.batch = 1;
    g.a = g.b = mixpi_in(zeros, dtype);
    g.trans_b = 1;
    g.c.data = c;
    g.c.dtype = MIXP_F32;
    tasks_shared = 0;
    CHECK_INT(device_of(isa)->kernels->gemm(&x, &g), MIXP_OK);
    CHECK(runner_end(&r));
    return tasks_shared;
}

/* Products by tiles take less time than AVX-512's, so they must be larger to be worth threads: about 15 us in all, and
 * 1 us a part. One row takes as long as 16, and large weights are worth threads. */
static void small_products_stay_in_one_thread(void) {
    if (!device_of(MIXP_ISA_AMX)) SKIP("no AVX-512");
    CHECK(tasks_of(MIXP_ISA_AVX512, MIXP_BF16, 128, 128, 128, 65536) > 1);
    CHECK_INT(tasks_of(MIXP_ISA_AMX, MIXP_BF16, 128, 128, 128, 65536), 0);
    CHECK(tasks_of(MIXP_ISA_AMX, MIXP_F16, 128, 128, 128, 65536) > 1);
    CHECK_INT(tasks_of(MIXP_ISA_AMX_F16, MIXP_F16, 128, 128, 128, 65536), 0);
    CHECK(tasks_of(MIXP_ISA_AMX, MIXP_BF16, 256, 256, 128, 65536) > 1);
    CHECK(tasks_of(MIXP_ISA_AMX, MIXP_BF16, 1, 512, 1024, 65536) > 1);
    CHECK_INT(tasks_of(MIXP_ISA_AMX, MIXP_BF16, 1, 256, 1024, 65536), 0);
    CHECK_INT(tasks_of(MIXP_ISA_AMX, MIXP_BF16, 48, 48, 128, 0), 0);
    CHECK(tasks_of(MIXP_ISA_AVX512, MIXP_BF16, 48, 48, 128, 0) > 1);
    CHECK_INT(tasks_of(MIXP_ISA_AMX, MIXP_BF16, 512, 512, 128, 0), 8);
}

/* --- signals, fork, another float mode, a host with tiles of its own --- */

/* Handlers run on a stack as small as Linux allows beside tiles. */
static volatile sig_atomic_t alarms;
static void on_alarm(int signal) {
    (void)signal;
    alarms++;
}
static void signals_may_arrive(void) {
    static float quiet[RESULTS], disturbed[RESULTS];
    const struct itimerval often = { { 0, 300 }, { 0, 300 } }, never = { { 0, 0 }, { 0, 0 } };
    const mixp_device *d = device_of(MIXP_ISA_AMX);
    struct sigaction   act, before;
    stack_t stack, was;
    if (!d) SKIP("no AVX-512");
    layer(d, 2, quiet);
    memset(&stack, 0, sizeof stack);
    memset(&act, 0, sizeof act);
    stack.ss_size = (size_t)getauxval(51) + 16384;          /* AT_MINSIGSTKSZ */
    stack.ss_sp = malloc(stack.ss_size);
    act.sa_handler = on_alarm;
    act.sa_flags = SA_ONSTACK | SA_RESTART;
    CHECK_INT(sigaltstack(&stack, &was), 0);
    CHECK_INT(sigaction(SIGALRM, &act, &before), 0);
    alarms = 0;
    setitimer(ITIMER_REAL, &often, NULL);
    layer(d, 2, disturbed);
    while (alarms < 3) layer(d, 2, disturbed);
    setitimer(ITIMER_REAL, &never, NULL);
    sigaction(SIGALRM, &before, NULL);
    sigaltstack(&was, NULL);
    free(stack.ss_sp);
    CHECK(memcmp(quiet, disturbed, sizeof quiet) == 0);
    CHECK_INT(amxsim_faults, 0);
}

/* A step of one weight, whose context the child of a fork has as well. */
static void forked_step(mixp_context *ctx, mixp_tensor *w, mixp_optimizer *opt, float *out) {
    static const int64_t shape[2] = { 16, 64 };
    static float x[16 * 64];
    mixp_tensor *y = NULL;
    for (int i = 0; i < 16 * 64; i++) x[i] = (float)(i * 13 % 17) / 8.0f - 1.0f;
    mixp_step_begin(ctx);
    mixp_zero_grad(opt);
    MIXP_AUTOCAST(ctx, MIXP_BF16) y = mixp_linear(ctx, mixp_input(ctx, MIXP_F32, 2, shape, x), w, NULL);
    mixp_backward(ctx, mixp_mean(ctx, mixp_mul(ctx, y, y), MIXP_ALL, 0));
    mixp_optimizer_step(opt);
    CHECK_INT(mixp_read(w, out, MIXP_F32, 64 * 64), MIXP_OK);
}
static void a_child_computes_the_same_bits(void) {
    static const int64_t shape[2] = { 64, 64 };
    static float here[64 * 64], there[64 * 64];
    mixp_optimizer_desc adamw = mixp_adamw_defaults();
    mixp_context_desc desc;
    int   ends[2], status = 1;
    size_t got = 0;
    if (!device_of(MIXP_ISA_AMX_F16)) SKIP("no AVX-512");
    memset(&desc, 0, sizeof desc);
    desc.threads = 1;           /* threads of OpenMP may hang in a child */
    mixp_context *ctx = mixp_context_new(&desc);
    mixp_tensor *w = mixp_param(ctx, "w", MIXP_F32, 2, shape);
    mixp_init_normal(w, 0.0, 0.1);
    mixp_optimizer *opt = mixp_optimizer_new(ctx, &adamw);
    mixp_optimizer_add(opt, w, NULL);
    forked_step(ctx, w, opt, here);
    CHECK_INT(pipe(ends), 0);
    pid_t child = fork();
    if (child == 0) {
        int64_t dots = amxsim_dots;
        forked_step(ctx, w, opt, there);
        _exit(amxsim_dots == dots || amxsim_faults || write(ends[1], there, sizeof there) < 0);
    }
    forked_step(ctx, w, opt, here);
    close(ends[1]);
    while (got < sizeof there) {
        ssize_t n = read(ends[0], (char *)there + got, sizeof there - got);
        if (n <= 0) break;
        got += (size_t)n;
    }
    close(ends[0]);
    CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    CHECK(got == sizeof there && memcmp(here, there, sizeof here) == 0);
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    mixp_context_free(ctx);
}

/* Tiles ignore MXCSR. alpha 1, no bias and one pass leave nothing else that rounds. */
static void tiles_ignore_the_float_mode(void) {
    static const unsigned modes[3] = { 0x5F80u, 0x1F80u | 0x8040u, 0x3F80u }; /* up; FTZ, DAZ; down */
    enum { M = 20, N = 18, K = 64 };
    const mixp_device *d = device_of(MIXP_ISA_AMX);
    float   first[M * N];
    if (!d) SKIP("no AVX-512");
    problem p = problem_new(M, N, K, 1, 0);
    problem_to(&p, MIXP_BF16);
    floats_of(&p.c, p.c_size);
    p.g.c = args_out(p.c, 0);
    p.g.bias = mixpi_in(NULL, MIXP_F32);
    p.g.alpha = 1.0f;
    p.g.ldc = N;
    run(d, &p, 1);
    memcpy(first, p.c.data, sizeof first);
    for (int i = 0; i < 3; i++) {
        memset(p.c.data, 0, sizeof first);
        _mm_setcsr(modes[i]);
        run(d, &p, 1);
        _mm_setcsr(0x1F80u);
        CHECK(memcmp(first, p.c.data, sizeof first) == 0);
    }
    problem_free(&p);
}

/* A host that has configured tiles: products are right, and they release the host's tiles. */
static void tiles_of_the_host_are_released(void) {
    static float alone[RESULTS], beside[RESULTS];
    const mixp_device *d = device_of(MIXP_ISA_AMX);
    uint8_t config[64] = { 1 };
    if (!d) SKIP("no AVX-512");
    layer(d, 1, alone);
    config[16] = 8;             /* one small tile */
    config[48] = 3;
    amxsim_configure(config);
    layer(d, 1, beside);
    CHECK(memcmp(alone, beside, sizeof alone) == 0);
    CHECK(!amxsim_cpu.configured);
    CHECK_INT(amxsim_faults, 0);
}

/* --- what must hold before it is used --- */

/* The default without tiles. */
static const mixp_device *without_tiles(void) {
    const mixp_device *d;
    int bf16 = amxsim.bf16;
    amxsim.bf16 = 0;
    d = mixp_cpu();
    amxsim.bf16 = bf16;
    return d;
}

/* The set that the default has, and what the self check says in place of the reason: "" = nothing. */
static void default_is(const mixp_device *want, const char *why) {
    const mixp_device *amx = mixp_cpu_with(MIXP_ISA_AMX), *f16 = mixp_cpu_with(MIXP_ISA_AMX_F16);
    const char *reason = mixpi_check_amx(mixpi_amx_usable());
    mixp_context *ctx = mixp_context_new(NULL);
    char message[MIXP_MESSAGE_SIZE];
    CHECK(mixp_cpu() == want && mixp_context_device(ctx) == want);
    CHECK(want == amx || want == f16 || (!amx && !f16));
    CHECK_TEXT(reason ? reason : "", why);
    CHECK(!reason == !*why);
    CHECK_INT(mixp_self_check(message, sizeof message), MIXP_OK);
    CHECK(strncmp(message, "slow: compiled without", 22) == 0 || strcmp(message, reason ? reason : "") == 0);
    CHECK(strlen(message) < sizeof message - 1);
    mixp_context_free(ctx);
}

static void wrong_answers_are_not_used(void) {
    if (!device_of(MIXP_ISA_AMX)) SKIP("no AVX-512");
    for (int wrong = AMXSIM_RIGHT + 1; wrong < AMXSIM_WRONGS; wrong++) {
        amxsim.wrong = (amxsim_wrong)wrong;
        CHECK(!mixp_cpu_with(MIXP_ISA_AMX));
        CHECK(!mixp_cpu_with(MIXP_ISA_AMX_F16));
        default_is(without_tiles(), "computes a known product wrong");
    }
    amxsim.wrong = AMXSIM_RIGHT;
    CHECK(mixp_cpu_with(MIXP_ISA_AMX) && mixp_cpu_with(MIXP_ISA_AMX_F16));
    CHECK_INT(amxsim_faults, 0);
}

static void the_fastest_is_the_default(void) {
    if (!device_of(MIXP_ISA_AMX)) SKIP("no AVX-512");
    CHECK(strcmp(mixp_cpu_with(MIXP_ISA_AMX)->name, "cpu avx512 amx") == 0);
    CHECK(strcmp(mixp_cpu_with(MIXP_ISA_AMX_F16)->name, "cpu avx512 amx f16") == 0);
    default_is(mixp_cpu_with(MIXP_ISA_AMX_F16), "");
    amxsim.f16 = 0;
    CHECK(mixp_cpu_with(MIXP_ISA_AMX) && !mixp_cpu_with(MIXP_ISA_AMX_F16));
    default_is(mixp_cpu_with(MIXP_ISA_AMX), "");
    amxsim.bf16 = 0;
    CHECK(!mixp_cpu_with(MIXP_ISA_AMX) && !mixp_cpu_with(MIXP_ISA_AMX_F16));
    default_is(without_tiles(), "");
    CHECK_TEXT(mixp_cpu()->name, "cpu avx512");
    CHECK_INT(amxsim_faults, 0);            /* no instruction that the processor lacks */
}

/* What the system refuses is not used, without an error, and the self check says why. */
static void what_the_system_refuses_is_not_used(void) {
    static const int bits[3] = { 0x20000, 0x40000, 0x60000 };
    static const long codes[4] = { -1, -22, -28, -38 };     /* EPERM, EINVAL, ENOSPC, ENOSYS */
    if (!device_of(MIXP_ISA_AMX)) SKIP("no AVX-512");
    for (int i = 0; i < 3; i++) {
        amxsim.unsaved = bits[i];
        int requests = amxsim.requests;
        default_is(without_tiles(), "the system does not save tiles (XCR0)");
        CHECK_INT(amxsim.requests, requests);       /* nothing is requested in vain */
    }
    amxsim.unsaved = 0;
    for (int i = 0; i < 4; i++) {
        amxsim.refused = codes[i];
        default_is(without_tiles(), "the system refuses tiles to this process");
    }
    amxsim.refused = 0;
    default_is(mixp_cpu_with(MIXP_ISA_AMX_F16), "");
}

/* Bits that all machines share: a context without tiles, and without bf16 dot products. */
static void portable_bits_have_no_tiles(void) {
    mixp_context_desc desc;
    const char *why = NULL;
    if (!device_of(MIXP_ISA_AMX)) SKIP("no AVX-512");
    memset(&desc, 0, sizeof desc);
    desc.portable_bits = 1;
    desc.why = &why;
    int cpuids = amxsim.cpuids;
    mixp_context *ctx = mixp_context_new(&desc);
    CHECK(mixp_context_device(ctx) == mixp_cpu_with(MIXP_ISA_AVX512));
    CHECK_INT(amxsim.cpuids, cpuids);
    mixp_context_free(ctx);
    desc.device = mixp_cpu_with(MIXP_ISA_AMX);
    CHECK(!mixp_context_new(&desc));
    CHECK_TEXT(why, "set one of them");
}

/* CPUID traps under a hypervisor, and so calls that a program repeats must not ask it. */
static void calls_do_not_ask_the_processor(void) {
    static const int64_t shape[2] = { 32, 32 };
    mixp_optimizer_desc adamw = mixp_adamw_defaults();
    mixp_tensor    *w, *x, *y = NULL;
    mixp_recipe recipe;
    float    values[32 * 32];
    mixp_f16 halves[32 * 32];
    if (!device_of(MIXP_ISA_AMX)) SKIP("no AVX-512");
    mixp_context *ctx = mixp_context_new(NULL);
    w = mixp_param(ctx, "w", MIXP_F32, 2, shape);
    mixp_optimizer *opt = mixp_optimizer_new(ctx, &adamw);
    mixp_optimizer_add(opt, w, NULL);
    memset(&recipe, 0, sizeof recipe);
    recipe.kind = MIXP_RECIPE_MXFP8;
    mixp_autocast_set_recipe(ctx, &recipe);
    for (int i = 0; i < 32 * 32; i++) values[i] = (float)(i % 7);
    int asked = amxsim.cpuids + amxsim.requests;
    CHECK(asked > 0);
    for (int i = 0; i < 3; i++) {
        mixp_convert(halves, MIXP_F16, values, MIXP_F32, 32 * 32);
        mixp_step_begin(ctx);
        mixp_zero_grad(opt);
        x = mixp_input(ctx, MIXP_F32, 2, shape, values);
        MIXP_AUTOCAST(ctx, MIXP_BF16) y = mixp_linear(ctx, x, w, NULL);
        mixp_backward(ctx, mixp_mean(ctx, y, MIXP_ALL, 0));
        mixp_optimizer_step(opt);
    }
    CHECK(mixp_autocast_recipe_counts(ctx).quantised > 0);
    CHECK_INT(amxsim.cpuids + amxsim.requests, asked);
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    mixp_context_free(ctx);
}

/* The emulation itself, on one product that can be counted by hand: 1 * 1 + 2 * 3 + 5. */
static void emulation_is_as_counted_by_hand(void) {
    static const uint16_t a[32] = { 0x3F80, 0x4000 }, b[32] = { 0x3F80, 0x4040 };
    uint8_t config[64] = { 1 };
    float   c[16] = { 5.0f };
    config[16] = config[18] = config[20] = 64;
    config[48] = config[49] = 1;
    config[50] = 16;
    memset(&amxsim_cpu, 0, sizeof amxsim_cpu);
    amxsim_zero(0);
    CHECK_INT(amxsim_faults, 1);            /* not configured */
    amxsim_faults = 0;
    amxsim_configure(config);
    amxsim_load(0, c, 64);
    amxsim_load(1, a, 64);
    amxsim_load(2, b, 0);                   /* the same row for all k: those of a are 0 */
    amxsim_dot(0, 1, 2, 0);
    amxsim_store(0, c, 64);
    amxsim_release();
    CHECK_INT(amxsim_faults, 0);
    CHECK(mixp_bits_of_f32(c[0]) == mixp_bits_of_f32(12.0f));
}

/* AVX-512 computes the emulation's rows: its bits are those of the elements, and those of the processor where it has
 * tiles. Numbers of all sizes, many of them about the smallest normal one, and Inf and NaN. */
static void emulation_by_rows_is_that_by_elements(void) {
    static const uint16_t odd_ones[6] = { 0x7F80, 0xFF80, 0x7FC0, 0x0001, 0x8000, 0x0080 };
    static uint16_t a[16][32], b[16][32];
    static float    sums[16][16], by_rows[16][16], by_elements[16][16];
    int64_t bad = 0;
    if (!device_of(MIXP_ISA_AMX)) SKIP("no AVX-512");
    for (int round = 0; round < 400; round++) {
        const int f16 = round % 2, spread = 1 + random_to(250), from = random_to(256 - spread);
        for (int i = 0; i < 16; i++)
            for (int j = 0; j < 32; j++) {
                a[i][j] = (uint16_t)(random_to(2) << 15 | (from / 2 + random_to(spread)) % 255 << 7 | random_to(128));
                b[i][j] = (uint16_t)(random_to(2) << 15 | 0x3F00 | random_to(256));
                if (round % 8 > 5 && random_to(64) == 0) a[i][j] = odd_ones[random_to(6)];
                sums[i][j / 2] = mixp_f32_of_bits((uint32_t)a[i][j] << 16 | (uint32_t)random_to(65536));
            }

        /* The same product twice. */
        MIXPI_AMX_CONFIGURE(&mixpi_amx_tiles);
        amxsim_load(1, a, 64);
        amxsim_load(2, b, 64);
        amxsim_load(0, sums, 64);
        amxsim_dot(0, 1, 2, f16);
        amxsim_store(0, by_rows, 64);
        amxsim_load(0, sums, 64);
        amxsim_dot_by_elements(0, 1, 2, f16);
        amxsim_store(0, by_elements, 64);
        amxsim_release();
        for (int i = 0; i < 16; i++)
            for (int j = 0; j < 16; j++) {
                float x = by_rows[i][j], y = by_elements[i][j];
                bad += mixp_bits_of_f32(x) != mixp_bits_of_f32(y) && !(x != x && y != y);
            }
    }
    CHECK_INT(bad, 0);
    CHECK_INT(amxsim_faults, 0);
    CHECK_INT(amxsim_compared >= 200, amxsim_processor() & 1);
}

/* Training, evaluation and generation have one set of bits with tiles, too: see any_batch.h. Modes 3 to 5 are bf16. */
static void rows_do_not_depend_on_their_batch(void) {
    const mixp_device *bf16 = device_of(MIXP_ISA_AMX), *f16 = device_of(MIXP_ISA_AMX_F16);
    const int64_t dots = amxsim_dots;
    const int    quick = getenv("MIXPREC_TEST_QUICK") != NULL;
    if (!bf16 || !f16) SKIP("no AVX-512");
    ab_check(bf16, 1u << 5, quick ? 1 : 0, !quick);
    ab_check(bf16, 1u << 2, quick ? 1 : 0, !quick);
    ab_check(f16, 1u << 2, quick ? 1 : 0, !quick);
    CHECK(amxsim_dots > dots);
    CHECK_INT(amxsim_faults, 0);
}

/* --- attention --- */
#include "amx_attention.h"

int main(void) {
    RUN(emulation_is_as_counted_by_hand);
    RUN(emulation_by_rows_is_that_by_elements);
    RUN(bf16_of_any_size);
    RUN(bf16_of_the_larger_table);
    RUN(large_gradients);
    RUN(several_blocks);
    RUN(f16_of_any_size);
    RUN(split_of_any_size);
    RUN(other_products_are_avx512s);
    RUN(bf16_in_the_stated_order);
    RUN(f16_in_the_stated_order);
    RUN(split_in_the_stated_order);
    RUN(the_split_is_exact);
    RUN(errors_at_every_exponent);
    RUN(inf_and_nan_are_avx512s);
    RUN(every_thread_configures_its_tiles);
    RUN(small_products_stay_in_one_thread);
    RUN(signals_may_arrive);
    RUN(a_child_computes_the_same_bits);
    RUN(tiles_ignore_the_float_mode);
    RUN(tiles_of_the_host_are_released);
    RUN(wrong_answers_are_not_used);
    RUN(the_fastest_is_the_default);
    RUN(what_the_system_refuses_is_not_used);
    RUN(portable_bits_have_no_tiles);
    RUN(calls_do_not_ask_the_processor);
    RUN(rows_do_not_depend_on_their_batch);
    RUN(attention_of_bf16);
    RUN(attention_of_split);
    RUN(attention_of_f16);
    RUN(attention_around_edges);
    RUN(other_attention_is_avx512s);
    RUN(attention_of_parts);
    RUN(attention_of_inf_and_nan);
    RUN(attention_of_large_scores);
    RUN(attention_drops_as_avx512);
    RUN(repeated_maxima_have_no_bias);
    RUN(attention_scratch_is_linear);
    return test_report();
}
#else
static void products_by_amx(void) { SKIP("not a machine, system or compiler for AMX"); }
int main(void) {
    RUN(products_by_amx);
    return test_report();
}
#endif
