/* test_cuda_recipes.cpp - the quantiser of recipes on the simulated GPU: the bits of the CPU's
 * quantiser, which tests/core/recipes/test_recipes.c holds to a search through the grid; linear layers whose sums
 * are exact, bit for bit; a training that stays near the CPU's; captured steps, which draw new random
 * numbers in each replay; and the state of delayed scaling. It must have the CPU's bits;
 * tests/core/recipes/test_delayed.c holds those to an emulation.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "cuda_pair.h"
#include "lossy.h"
#include "gpu_context.h"
#include <unistd.h>
#include <vector>

/* --- the quantiser ---------------------------------------------------------------------------- */

struct Form {
    mixp_block_scale scale;
    mixp_dtype element;
    int64_t    block_rows, block_cols, rows, cols;
    int        stochastic;
    mixp_e8m0_rounding e8m0;
    int        power;
    int        over6;           /* a mixp_4over6, with BOUND_448 and BY_LINES or without */
};
enum { BOUND_448 = 4, BY_LINES = 8 };
/* Each recipe's operands, then blocks that share warps otherwise, and arrays of odd sizes. */
static const Form forms[] = {
    { MIXP_SCALE_TENSOR, MIXP_F8_E4M3, 0, 0, 48, 64, 0, MIXP_E8M0_RCEIL, 0, 0 },
    { MIXP_SCALE_TENSOR, MIXP_F8_E5M2, 0, 0, 33, 37, 0, MIXP_E8M0_RCEIL, 0, 0 },
    { MIXP_SCALE_TENSOR, MIXP_F4_E2M1, 0, 0, 1, 5, 1, MIXP_E8M0_RCEIL, 0, 0 },
    { MIXP_SCALE_POWER, MIXP_F8_E4M3, 1, 128, 5, 384, 0, MIXP_E8M0_RCEIL, 0, 0 },
    { MIXP_SCALE_POWER, MIXP_F8_E4M3, 128, 1, 128, 35, 0, MIXP_E8M0_RCEIL, 0, 0 },
    { MIXP_SCALE_POWER, MIXP_F8_E4M3, 128, 128, 128, 256, 0, MIXP_E8M0_RCEIL, 0, 0 },
    { MIXP_SCALE_E8M0, MIXP_F8_E4M3, 1, 32, 7, 96, 0, MIXP_E8M0_RCEIL, 0, 0 },
    { MIXP_SCALE_E8M0, MIXP_F8_E4M3, 32, 1, 64, 300, 0, MIXP_E8M0_RCEIL, 0, 0 },
    { MIXP_SCALE_E8M0, MIXP_F8_E5M2, 1, 32, 3, 32, 0, MIXP_E8M0_RCEIL, 0, 0 },
    { MIXP_SCALE_E8M0, MIXP_F4_E2M1, 48, 48, 96, 96, 1, MIXP_E8M0_RCEIL, 0, 0 },
    { MIXP_SCALE_E4M3, MIXP_F4_E2M1, 1, 16, 9, 80, 0, MIXP_E8M0_RCEIL, 0, 0 },
    { MIXP_SCALE_E4M3, MIXP_F4_E2M1, 1, 16, 33, 48, 1, MIXP_E8M0_RCEIL, 0, 0 },
    { MIXP_SCALE_E4M3, MIXP_F4_E2M1, 16, 1, 48, 67, 1, MIXP_E8M0_RCEIL, 0, 0 },
    { MIXP_SCALE_E4M3, MIXP_F4_E2M1, 16, 16, 32, 48, 0, MIXP_E8M0_RCEIL, 0, 0 },
    { MIXP_SCALE_E4M3, MIXP_F4_E2M1, 1, 64, 4, 192, 1, MIXP_E8M0_RCEIL, 0, 0 },
    { MIXP_SCALE_POWER, MIXP_F8_E4M3, 1, 4096, 2, 4096, 0, MIXP_E8M0_RCEIL, 0, 0 },
    { MIXP_SCALE_E8M0, MIXP_F8_E4M3, 1, 32, 7, 96, 0, MIXP_E8M0_FLOOR, 0, 0 },
    { MIXP_SCALE_E8M0, MIXP_F8_E5M2, 32, 1, 64, 36, 0, MIXP_E8M0_FLOOR, 0, 0 },
    { MIXP_SCALE_E8M0, MIXP_F8_E4M3, 32, 1, 64, 36, 0, MIXP_E8M0_CEIL, 0, 0 },
    { MIXP_SCALE_E8M0, MIXP_F8_E4M3, 1, 32, 7, 96, 0, MIXP_E8M0_EVEN, 0, 0 },
    { MIXP_SCALE_E8M0, MIXP_F4_E2M1, 32, 32, 32, 64, 0, MIXP_E8M0_EVEN, 0, 0 },
    { MIXP_SCALE_TENSOR, MIXP_F8_E4M3, 0, 0, 48, 64, 0, MIXP_E8M0_RCEIL, 1, 0 },
    { MIXP_SCALE_TENSOR, MIXP_F8_E5M2, 0, 0, 33, 37, 0, MIXP_E8M0_RCEIL, 1, 0 },
    { MIXP_SCALE_POWER, MIXP_F8_E5M2, 1, 128, 5, 384, 0, MIXP_E8M0_RCEIL, 0, 0 },
    { MIXP_SCALE_POWER, MIXP_F8_E5M2, 128, 1, 128, 35, 0, MIXP_E8M0_RCEIL, 0, 0 },
    { MIXP_SCALE_E4M3, MIXP_F4_E2M1, 1, 16, 9, 80, 0, MIXP_E8M0_RCEIL, 0, MIXP_4OVER6_MAE },
    { MIXP_SCALE_E4M3, MIXP_F4_E2M1, 1, 16, 9, 80, 0, MIXP_E8M0_RCEIL, 0, MIXP_4OVER6_MSE | BOUND_448 },
    { MIXP_SCALE_E4M3, MIXP_F4_E2M1, 16, 1, 48, 67, 0, MIXP_E8M0_RCEIL, 0, MIXP_4OVER6_MSE },
    { MIXP_SCALE_E4M3, MIXP_F4_E2M1, 16, 1, 32, 300, 0, MIXP_E8M0_RCEIL, 0, MIXP_4OVER6_MAE | BOUND_448 },
    { MIXP_SCALE_E4M3, MIXP_F4_E2M1, 16, 16, 32, 176, 0, MIXP_E8M0_RCEIL, 0, MIXP_4OVER6_MAE },
    { MIXP_SCALE_E4M3, MIXP_F4_E2M1, 16, 16, 48, 32, 0, MIXP_E8M0_RCEIL, 0, MIXP_4OVER6_MSE },
    { MIXP_SCALE_E4M3, MIXP_F4_E2M1, 1, 16, 33, 272, 0, MIXP_E8M0_RCEIL, 0, BY_LINES },
    { MIXP_SCALE_E4M3, MIXP_F4_E2M1, 1, 16, 9, 80, 0, MIXP_E8M0_RCEIL, 0, MIXP_4OVER6_MAE | BY_LINES },
    { MIXP_SCALE_E4M3, MIXP_F4_E2M1, 16, 1, 48, 67, 0, MIXP_E8M0_RCEIL, 0, BY_LINES },
};

enum Edges { plain, spread, zeros, huge, with_nan, with_inf, tiny, edge_kinds };

/* Numbers like a network's; then with an edge in some blocks. */
static Pair source_of(const Form &p, mixp_dtype dtype, Edges edges, int off) {
    int64_t n = p.rows * p.cols;
    Pair x = numbers(dtype, n, 1.0, off);
    if (edges == spread)
        for (int64_t i = 0; i < n; i++)
            set_value(x, i, ldexp(value_at(x.cpu, dtype, i), (int)(random_u64() % 60) - 30));
    if (edges == zeros)
        for (int64_t i = 0; i < n / 2; i++) set_value(x, i, i % 2 ? 0.0 : -0.0);
    if (edges == tiny)
        for (int64_t i = 0; i < n; i++) set_value(x, i, (double)(i % 50) * 1e-41);
    if (edges == huge) set_value(x, n / 3, 3e38);
    if (edges == with_nan) set_value(x, n / 2, NAN);
    if (edges == with_inf) set_value(x, n - 1, -INFINITY);
    return x;
}

static mixp_quantise_args args_of(const Form &p, const Pair &x, const Pair &y) {
    mixp_quantise_args k;
    memset((void *)&k, 0, sizeof k);
    k.rows = p.rows;
    k.cols = p.cols;
    k.x = args_in(ON(x));
    k.y = AT(mixp_bf16, y);
    k.element = p.element;
    k.scale = p.scale;
    k.block_rows = p.block_rows;
    k.block_cols = p.block_cols;
    k.stochastic = p.stochastic;
    k.e8m0 = p.e8m0;
    k.power = p.power;
    k.choice = (mixp_4over6)(p.over6 % BOUND_448);
    k.bound_448 = (p.over6 & BOUND_448) != 0;
    k.by_lines = (p.over6 & BY_LINES) != 0;
    k.seed = 3;
    k.step = 4;
    k.tensor = 5;
    return k;
}

static void quantise_both(const Form &p, const Pair &x, const Pair &y, Pair &decode) {
    const int64_t block = p.block_rows * p.block_cols;
    Pair scales = empty(MIXP_U8, block ? p.rows * p.cols / block : 1, 0);
    Pair lines = empty(MIXP_F32, p.block_cols == 1 ? p.cols : p.rows, 0);
    on_gpu = 1;
    mixp_quantise_args k = args_of(p, x, y);
    k.decode = AT(float, decode);
    k.line_scales = AT(float, lines);
    if (block) k.scales = AT(uint8_t, scales);
    scratch_requests = 0;
    CHECK_INT(gpu_kernels->quantise(&gpu_exec, &k), MIXP_OK);
    CHECK(scratch_requests <= 1);
    on_gpu = 0;
    k = args_of(p, x, y);
    if (block) k.scales = AT(uint8_t, scales);
    k.line_scales = AT(float, lines);
    CHECK_INT(mixp_quantise(&cpu_exec, &k, AT(float, decode)), MIXP_OK);
    WAIT();
    if (block) same_bits(scales);
    if (k.by_lines) same_bits(lines);
    finish(scales);
    finish(lines);
}

static void same_numbers_body(void) {
    for (const Form &p : forms)
        for (mixp_dtype dtype : { MIXP_F32, MIXP_BF16 })
            for (int edges = 0; edges < edge_kinds; edges++) {
                int off = edges % 2;
                Pair x = source_of(p, dtype, (Edges)edges, off);
                Pair y = empty(MIXP_BF16, p.rows * p.cols, off), decode = empty(MIXP_F32, 1, 0);
                quantise_both(p, x, y, decode);
                same_but_nan(y);
                same_bits(decode);
                Pair *all[] = { &x, &y, &decode };
                for (Pair *one : all) finish(*one);
            }
}
static void same_numbers(void) { in_all_schedules(same_numbers_body); }

/* More parts of the array's amax than thread blocks look at together. */
static void large_body(void) {
    const Form large[] = { { MIXP_SCALE_TENSOR, MIXP_F8_E4M3, 0, 0, 801, 1001, 0, MIXP_E8M0_RCEIL, 0, 0 },
                           { MIXP_SCALE_E4M3, MIXP_F4_E2M1, 1, 16, 512, 1200, 1, MIXP_E8M0_RCEIL, 0, 0 } };
    for (const Form &p : large) {
        Pair x = source_of(p, MIXP_BF16, plain, 0);
        Pair y = empty(MIXP_BF16, p.rows * p.cols, 0), decode = empty(MIXP_F32, 1, 0);
        set_value(x, p.rows * p.cols - 1, 100.0);
        quantise_both(p, x, y, decode);
        same_bits(y);
        same_bits(decode);
        Pair *all[] = { &x, &y, &decode };
        for (Pair *one : all) finish(*one);
    }
}
static void large(void) { in_all_schedules(large_body); }

/* Codes of the quantised values, the scales of their blocks, and the values of the codes. `off`: of the
 * arrays, so that no 16 bytes are aligned; codes_off: of the codes. */
static void recode_one(const Form &p, Edges edges, int off, int codes_off) {
    const int64_t n = p.rows * p.cols;
    const bool low = p.element == MIXP_F4_E2M1;
    Pair x = source_of(p, MIXP_BF16, edges, off), y = empty(MIXP_BF16, n, off);
    Pair scales = empty(MIXP_U8, p.block_rows ? n / p.block_rows : 1, off);
    Pair codes = empty(MIXP_U8, low ? n / 2 : n, codes_off), back = empty(MIXP_BF16, n, off);
    Pair own = numbers(MIXP_F32, 1, 1.0, 0), times = numbers(MIXP_F32, 1, 1.0, 0), both = empty(MIXP_F32, 1, 0);
    for (int gpu = 1; gpu >= 0; gpu--) {
        const mixp_kernels *on = gpu ? gpu_kernels : mixp_cpu()->kernels;
        const mixp_exec *e = gpu ? &gpu_exec : &cpu_exec;
        mixp_recode_args c;
        on_gpu = gpu;
        mixp_quantise_args k = args_of(p, x, y);
        if (p.block_rows) k.scales = AT(uint8_t, scales);
        CHECK_INT(on->quantise(e, &k), MIXP_OK);
        memset((void *)&c, 0, sizeof c);
        c.rows = p.rows;
        c.cols = p.cols;
        c.y = AT(mixp_bf16, y);
        c.codes = AT(uint8_t, codes);
        c.element = p.element;
        c.scale = p.scale;
        c.block_rows = p.block_rows;
        c.scales = k.scales;
        CHECK_INT(on->recode(e, &c), MIXP_OK);
        c.y = AT(mixp_bf16, back);
        c.decodes = 1;
        c.own = AT(float, own);
        c.times = AT(float, times);
        c.decode = AT(float, both);
        CHECK_INT(on->recode(e, &c), MIXP_OK);
    }
    WAIT();
    if (p.block_rows) same_bits(scales);
    if (edges != with_nan && edges != with_inf) same_bits(codes);
    same_but_nan(back);
    same_bits(both);
    for (int64_t i = 0; i < n; i++) {
        mixp_bf16 a = ((mixp_bf16 *)y.gpu)[i], b = ((mixp_bf16 *)back.gpu)[i];
        const bool bad = (a.bits & 0x7FFF) >= 0x7F80;       /* an Inf becomes NaN */
        CHECK(bad ? (b.bits & 0x7FFF) > 0x7F80 : a.bits == b.bits);
    }
    Pair *all[] = { &x, &y, &scales, &codes, &back, &own, &times, &both };
    for (Pair *one : all) finish(*one);
}
static void recoded_body(void) {
    const Form columns[] = { { MIXP_SCALE_TENSOR, MIXP_F8_E4M3, 0, 0, 48, 64, 0, MIXP_E8M0_RCEIL, 0, 0 },
                             { MIXP_SCALE_POWER, MIXP_F8_E4M3, 128, 1, 256, 48, 0, MIXP_E8M0_RCEIL, 0, 0 },
                             { MIXP_SCALE_E8M0, MIXP_F8_E4M3, 32, 1, 64, 272, 0, MIXP_E8M0_RCEIL, 0, 0 },
                             { MIXP_SCALE_E8M0, MIXP_F8_E4M3, 32, 1, 32, 16, 0, MIXP_E8M0_FLOOR, 0, 0 },
                             { MIXP_SCALE_E4M3, MIXP_F8_E4M3, 16, 1, 48, 64, 0, MIXP_E8M0_RCEIL, 0, 0 },
                             { MIXP_SCALE_E4M3, MIXP_F4_E2M1, 16, 1, 48, 320, 0, MIXP_E8M0_RCEIL, 0, 0 } };
    for (const Form &p : columns) {
        for (int edges = 0; edges < edge_kinds; edges++)
            for (int off = 0; off < 2; off++) recode_one(p, (Edges)edges, off, off);
        recode_one(p, plain, 0, 1);
    }
}
static void recoded(void) { in_all_schedules(recoded_body); }

/* Each number of e2m1 times each scale: the code is the number's place in the format. Column c has the scale whose
 * code is c; row r has the number whose code is r. A column of scale 0 holds zeros. */
static void every_code_body(void) {
    const float numbers_of_e2m1[8] = { 0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f };
    const int64_t rows = 16, cols = 128;
    Pair y = empty(MIXP_BF16, rows * cols, 0), codes = empty(MIXP_U8, rows * cols / 2, 0), scales = empty(MIXP_U8, cols, 0);
    for (int64_t c = 0; c < cols; c++) set_code(scales, c, (uint64_t)(c < 127 ? c : 126));
    for (int64_t i = 0; i < rows * cols; i++) {
        const mixp_e4m3 scale = { ((uint8_t *)scales.cpu)[i % cols] };
        const double value = (double)numbers_of_e2m1[i / cols % 8] * (double)mixp_f32_from_e4m3(scale);
        set_value(y, i, i / cols < 8 ? value : -value);
    }
    mixp_recode_args k;
    memset((void *)&k, 0, sizeof k);
    on_gpu = 1;
    k.rows = rows;
    k.cols = cols;
    k.y = AT(mixp_bf16, y);
    k.codes = AT(uint8_t, codes);
    k.element = MIXP_F4_E2M1;
    k.scale = MIXP_SCALE_E4M3;
    k.block_rows = rows;
    k.scales = AT(uint8_t, scales);
    CHECK_INT(gpu_kernels->recode(&gpu_exec, &k), MIXP_OK);
    WAIT();
    int64_t wrong = 0;
    for (int64_t i = 0; i < rows * cols; i++) {
        const int code = ((uint8_t *)codes.gpu)[i / 2] >> i % 2 * 4 & 15, row = (int)(i / cols);
        wrong += code != (i % cols ? row : row & 8);
    }
    CHECK_INT(wrong, 0);
    Pair *all[] = { &y, &codes, &scales };
    for (Pair *one : all) finish(*one);
}
static void every_code(void) {
    const bool before = cudasim::other_libm;
    for (bool other : { false, true }) {
        cudasim::other_libm = other;
        in_all_schedules(every_code_body);
    }
    cudasim::other_libm = before;
}

/* Every bf16 number, each as it is and scaled by an amax beyond all. */
static void every_bf16_body(void) {
    for (mixp_dtype element : { MIXP_F8_E4M3, MIXP_F8_E5M2, MIXP_F4_E2M1 })
        for (int how = -1; how < MIXP_E8M0_COUNT; how++) {
            const int64_t n = how < 0 ? 0 : 16;
            const Form p = { n ? MIXP_SCALE_E8M0 : MIXP_SCALE_TENSOR, element, n ? 1 : 0, n, 256, 256, 0,
                             n ? (mixp_e8m0_rounding)how : MIXP_E8M0_RCEIL, 0, 0 };
            Pair x = empty(MIXP_BF16, 65536, 0), y = empty(MIXP_BF16, 65536, 0),
                 decode = empty(MIXP_F32, 1, 0);
            for (int64_t i = 0; i < 65536; i++) set_code(x, i, (uint64_t)i);
            quantise_both(p, x, y, decode);
            same_but_nan(y);
            same_bits(decode);
            Pair *all[] = { &x, &y, &decode };
            for (Pair *one : all) finish(*one);
        }
}
static void every_bf16(void) { in_all_schedules(every_bf16_body); }

/* The second operand's factor is that of the product. */
static void factors_body(void) {
    const Form p = { MIXP_SCALE_TENSOR, MIXP_F8_E4M3, 0, 0, 16, 16, 0, MIXP_E8M0_RCEIL, 0, 0 };
    Pair x = numbers(MIXP_BF16, 256, 1.0, 0), y = empty(MIXP_BF16, 256, 0);
    Pair first = empty(MIXP_F32, 1, 0), both = empty(MIXP_F32, 1, 0);
    on_gpu = 1;
    mixp_quantise_args k = args_of(p, x, y);
    k.decode = AT(float, first);
    CHECK_INT(gpu_kernels->quantise(&gpu_exec, &k), MIXP_OK);
    k.times = AT(float, first);
    k.decode = AT(float, both);
    CHECK_INT(gpu_kernels->quantise(&gpu_exec, &k), MIXP_OK);
    WAIT();
    float one = *(float *)first.gpu;
    CHECK(one > 0.0f && one < 1.0f);
    CHECK_INT(mixp_bits_of_f32(*(float *)both.gpu), mixp_bits_of_f32(one * one));
    Pair *all[] = { &x, &y, &first, &both };
    for (Pair *pair : all) finish(*pair);
}
static void factors(void) { in_all_schedules(factors_body); }

/* A given scale, and the amax, of an array whose size is odd. */
static void given_body(void) {
    const Form p = { MIXP_SCALE_TENSOR, MIXP_F8_E5M2, 0, 0, 37, 61, 0, MIXP_E8M0_RCEIL, 0, 0 };
    for (float given : { 0.0f, 3.5f }) {
        Pair x = numbers(MIXP_BF16, 37 * 61, 1.0, 0), y = empty(MIXP_BF16, 37 * 61, 0);
        Pair decode = empty(MIXP_F32, 1, 0), amax = empty(MIXP_F32, 1, 0);
        on_gpu = 1;
        mixp_quantise_args k = args_of(p, x, y);
        k.given = given;
        k.decode = AT(float, decode);
        k.amax = AT(float, amax);
        CHECK_INT(gpu_kernels->quantise(&gpu_exec, &k), MIXP_OK);
        on_gpu = 0;
        k = args_of(p, x, y);
        k.given = given;
        k.amax = AT(float, amax);
        CHECK_INT(mixp_quantise(&cpu_exec, &k, AT(float, decode)), MIXP_OK);
        Pair *all[] = { &x, &y, &decode, &amax };
        for (Pair *one : all) same_bits(*one);
        for (Pair *one : all) finish(*one);
    }
}
static void given(void) { in_all_schedules(given_body); }

/* A scale in device memory; an amax that joins an older one. A NaN does not. */
static void joined_body(void) {
    const Form p = { MIXP_SCALE_TENSOR, MIXP_F8_E4M3, 0, 0, 32, 48, 0, MIXP_E8M0_RCEIL, 0, 0 };
    struct Case { float old, largest, joined; };
    const Case cases[] = { { 0.0f, 7.0f, 7.0f }, { 9.0f, 7.0f, 9.0f }, { 3.0f, NAN, 3.0f },
                           { 3.0f, INFINITY, INFINITY } };
    for (const Case &c : cases) {
        Pair x = numbers(MIXP_BF16, 32 * 48, 1.0, 0), y = empty(MIXP_BF16, 32 * 48, 0);
        Pair amax = empty(MIXP_F32, 1, 0), decode = empty(MIXP_F32, 1, 0), s = empty(MIXP_F32, 1, 0);
        for (int64_t i = 0; i < 32 * 48; i++) set_value(x, i, (double)(i % 13) / 4 - 1.5);
        set_value(x, 5, (double)c.largest);
        set_value(amax, 0, (double)c.old);
        set_value(s, 0, 3.5);
        for (int cpu = 0; cpu < 2; cpu++) {
            on_gpu = !cpu;
            mixp_quantise_args k = args_of(p, x, y);
            k.given_at = AT(float, s);
            k.given = 100.0f;
            k.amax = AT(float, amax);
            k.amax_joins = 1;
            k.decode = AT(float, decode);
            CHECK_INT(cpu ? mixp_quantise(&cpu_exec, &k, AT(float, decode))
                           : gpu_kernels->quantise(&gpu_exec, &k), MIXP_OK);
        }
        WAIT();
        CHECK(*(float *)amax.gpu == c.joined);
        CHECK(*(float *)decode.gpu == 1.0f / 3.5f);
        CHECK(mixp_f32_from_bf16(((mixp_bf16 *)y.gpu)[0]) == -5.0f);     /* -1.5 * 3.5, to e4m3 */
        same_but_nan(y);
        same_bits(amax);
        same_bits(decode);
        Pair *all[] = { &x, &y, &amax, &decode, &s };
        for (Pair *one : all) finish(*one);
    }
}
static void joined(void) { in_all_schedules(joined_body); }

/* The end of an update, against a loop of its own. */
static void turned_body(void) {
    for (int length : { 1, 2, 5, 256, 257, 1000 })
        for (int edge = 0; edge < 5; edge++) {
            Pair history = empty(MIXP_F32, 3 * length, 0), scales = empty(MIXP_F32, 3, 0);
            std::vector<float> want((size_t)(3 * length)), want_scales(3);
            mixp_turn_args k;
            memset((void *)&k, 0, sizeof k);
            k.n = 3;
            k.length = length;
            k.most_recent = edge == 1;
            for (int i = 0; i < 3; i++) {
                const float limit = i == 2 ? 57344.0f : 448.0f, old = 0.25f + (float)i;
                float *h = want.data() + i * length, amax;
                k.limits[i] = limit;
                for (int j = 0; j < length; j++) h[j] = (float)((i + 3 * j) % 17) / 8.0f + 0.5f;
                if (edge == 2 && i == 1) h[0] = 0.0f;
                if (edge == 3 && i == 1) h[length / 2] = INFINITY;
                if (edge == 4 && i == 2) h[0] = INFINITY;
                for (int j = 0; j < length; j++) set_value(history, i * length + j, (double)h[j]);
                set_value(scales, i, (double)old);
                want_scales[(size_t)i] = old;
                if (edge == 4 && i == 2) h[0] = 0.0f;           /* an Inf enters nothing */
                if (edge == 3 && length == 1 && i == 1) h[0] = 0.0f;
                if (h[0] == 0.0f) continue;
                amax = h[0];
                for (int j = 1; j < length && !k.most_recent; j++) amax = amax > h[j] ? amax : h[j];
                if (amax < INFINITY) want_scales[(size_t)i] = limit / amax;
                amax = h[0];
                for (int j = 1; j < length; j++) h[j - 1] = h[j];
                h[length - 1] = amax;
                h[0] = 0.0f;
            }
            on_gpu = 1;
            k.history = AT(float, history);
            k.scales = AT(float, scales);
            CHECK_INT(gpu_kernels->turn(&gpu_exec, &k), MIXP_OK);
            WAIT();
            CHECK(memcmp(history.gpu, want.data(), want.size() * sizeof(float)) == 0);
            CHECK(memcmp(scales.gpu, want_scales.data(), 3 * sizeof(float)) == 0);
            k.n = 4;
            CHECK_INT(gpu_kernels->turn(&gpu_exec, &k), MIXP_ERR_ARGUMENT);
            k.n = 3;
            k.length = 0;
            CHECK_INT(gpu_kernels->turn(&gpu_exec, &k), MIXP_ERR_ARGUMENT);
            finish(history);
            finish(scales);
        }
}
static void turned(void) { in_all_schedules(turned_body); }

/* What quantising lost, against a loop in double: 0 and NaN do not count, an Inf is lost and clipped;
 * the larger loss stays; the first scale of delayed scaling is not judged. */
static void lost_body(void) {
    for (int64_t n : { 1, 7, 4099, 600001 })
        for (int scaled = 0; scaled < 3; scaled++) {
            Pair x = numbers(scaled ? MIXP_F32 : MIXP_BF16, n, 1.0, scaled % 2);
            const int64_t cols = scaled ? 5 : 7, rows = n / cols + 1;       /* of lines; none where scaled is 2 */
            Pair y = empty(MIXP_BF16, n, scaled % 2), decode = empty(MIXP_F32, 1, 0),
                 scale = empty(MIXP_F32, 1, 0), lines = empty(MIXP_F32, scaled ? cols : rows, 0);
            mixp_losses *out = (mixp_losses *)gpu_device->allocate(&gpu_exec, sizeof *out), found;
            const double before = scaled == 0 ? 0.75 : scaled == 2 ? 0.5 : 0.0;
            double error = 0, clipped = 0, seen = 0;
            mixp_lose_args k;
            memset((void *)&k, 0, sizeof k);
            memset((void *)&found, 0, sizeof found);
            found.error[1] = 0.25;
            found.clipped[1] = before;
            found.seen = 4;             /* operand 2 was measured before */
            CHECK_INT(gpu_device->upload(&gpu_exec, out, &found, sizeof found), MIXP_OK);
            if (n > 100) set_value(x, 5, NAN);
            if (n > 100) set_value(x, 99, -INFINITY);
            if (n > 100) set_value(x, 50, 0.0);
            for (int64_t j = 0; j < (scaled ? cols : rows); j++) set_value(lines, j, j % 2 ? 0.25 : 0.5);
            auto line_of = [&](int64_t i) { return scaled == 2 ? 0 : scaled ? i % cols : i / cols; };
            for (int64_t i = 0; i < n; i++)
                set_value(y, i, value_at(x.cpu, x.dtype, i) * (i % 3 ? 2.0 : 1.75) * (line_of(i) % 2 ? 2.0 : 1.0));
            set_value(decode, 0, scaled == 2 ? 0.5 : 77.0);
            set_value(scale, 0, scaled == 2 ? 1.0 : 300.0);
            for (int64_t i = 0; i < n; i++) {
                const double v = value_at(x.cpu, x.dtype, i), q = value_at(y.cpu, MIXP_BF16, i) * (line_of(i) % 2 ? 0.25 : 0.5);
                if (!(fabs(v) > 0)) continue;
                seen++;
                error += isinf(v) ? 1.0 : fabs(q - v) / fabs(v);
                clipped += isinf(v) || (scaled && fabs(v) * 300.0 > 464.0);
            }
            on_gpu = 1;
            k.n = n;
            k.x = args_in(ON(x));
            k.y = AT(mixp_bf16, y);
            k.decode = AT(float, decode);
            k.line_scales = scaled < 2 ? AT(float, lines) : NULL;
            k.cols = cols;
            k.of_columns = scaled == 1;
            k.scale = scaled ? AT(float, scale) : NULL;
            k.beyond = 464.0;
            k.operand = 1;
            k.out = out;
            CHECK_INT(gpu_kernels->lose(&gpu_exec, &k), MIXP_OK);
            CHECK_INT(gpu_device->download(&gpu_exec, &found, out, sizeof found), MIXP_OK);
            CHECK_INT(found.seen, scaled == 2 ? 4 : 6);
            CHECK_NEAR(found.error[1], scaled == 2 ? 0.25 : fmax(0.25, error / seen), 1e-12);
            CHECK_NEAR(found.clipped[1], scaled == 2 ? 0.5 : fmax(before, clipped / seen), 1e-15);
            found.error[1] = found.clipped[1] = 0.0;
            CHECK_INT(gpu_device->upload(&gpu_exec, out, &found, sizeof found), MIXP_OK);
            CHECK_INT(gpu_kernels->lose(&gpu_exec, &k), MIXP_OK);
            CHECK_INT(gpu_device->download(&gpu_exec, &found, out, sizeof found), MIXP_OK);
            if (scaled < 2) CHECK_NEAR(found.error[1], error / seen, 1e-12);
            CHECK(found.error[0] == 0 && found.error[2] == 0);
            k.operand = 3;
            CHECK_INT(gpu_kernels->lose(&gpu_exec, &k), MIXP_ERR_ARGUMENT);
            gpu_device->release(&gpu_exec, out);
            Pair *all[] = { &x, &y, &decode, &scale, &lines };
            for (Pair *one : all) finish(*one);
        }
}
static void lost(void) { in_all_schedules(lost_body); }

static void hadamard_body(void) {
    for (mixp_dtype dtype : { MIXP_F32, MIXP_BF16 })
        for (int64_t cols : { 1, 21, 64 }) {
            Pair a = numbers(dtype, 48 * cols, 1.0, 1), y = empty(MIXP_BF16, 48 * cols, 1);
            mixp_hadamard_args k;
            set_value(a, cols / 2, 3e38);
            on_gpu = 1;
            k.rows = 48; k.cols = cols; k.a = args_in(ON(a)); k.y = AT(mixp_bf16, y);
            CHECK_INT(gpu_kernels->hadamard(&gpu_exec, &k), MIXP_OK);
            on_gpu = 0;
            CHECK_INT(mixp_hadamard(&cpu_exec, 48, cols, args_in(ON(a)), AT(mixp_bf16, y)), MIXP_OK);
            same_but_nan(y);
            finish(a);
            finish(y);
        }
}
static void hadamard(void) { in_all_schedules(hadamard_body); }

static void *no_scratch(void *, size_t) { return NULL; }

/* The CPU's errors; nothing is written. */
static void refused_body(void) {
    const Form p = { MIXP_SCALE_E4M3, MIXP_F4_E2M1, 1, 16, 32, 32, 0, MIXP_E8M0_RCEIL, 0, 0 };
    Pair x = numbers(MIXP_F32, 1024, 1.0, 0), y = numbers(MIXP_BF16, 1024, 1.0, 0);
    Pair decode = numbers(MIXP_F32, 1, 1.0, 0);
    float ignored;
    on_gpu = 1;
    mixp_quantise_args good = args_of(p, x, y), k;
    mixp_hadamard_args h = { 32, 32, args_in(ON(x)), AT(mixp_bf16, y) };
    good.decode = AT(float, decode);
#define REFUSES(change, code)                                                             \
    do { k = good; change;                                                                \
         CHECK_INT(gpu_kernels->quantise(&gpu_exec, &k), code);                           \
         CHECK_INT(mixp_quantise(&cpu_exec, &k, &ignored), code); } while (0)
    REFUSES(k.x.data = NULL, MIXP_ERR_ARGUMENT);
    REFUSES(k.y = NULL, MIXP_ERR_ARGUMENT);
    REFUSES(k.cols = 0, MIXP_ERR_ARGUMENT);
    REFUSES(k.element = MIXP_F16, MIXP_ERR_ARGUMENT);
    REFUSES(k.scale = MIXP_SCALE_COUNT, MIXP_ERR_ARGUMENT);
    REFUSES(k.e8m0 = MIXP_E8M0_COUNT, MIXP_ERR_ARGUMENT);
    REFUSES(k.element = MIXP_F8_E4M3; k.stochastic = 1, MIXP_ERR_ARGUMENT);
    REFUSES(k.choice = MIXP_4OVER6_MAE; k.stochastic = 1, MIXP_ERR_ARGUMENT);
    REFUSES(k.choice = MIXP_4OVER6_MAE; k.block_cols = 32, MIXP_ERR_SHAPE);
    REFUSES(k.by_lines = 1, MIXP_ERR_ARGUMENT);
    REFUSES(k.given = -1.0f, MIXP_ERR_ARGUMENT);
    REFUSES(k.given = NAN, MIXP_ERR_ARGUMENT);
    REFUSES(k.x.dtype = MIXP_F16, MIXP_ERR_DTYPE);
    REFUSES(k.block_cols = 24, MIXP_ERR_SHAPE);
    REFUSES(k.block_rows = 16; k.block_cols = 32, MIXP_ERR_SHAPE);
    REFUSES(k.scale = MIXP_SCALE_TENSOR, MIXP_ERR_SHAPE);
    gpu_exec.scratch = no_scratch;
    CHECK_INT(gpu_kernels->quantise(&gpu_exec, &good), MIXP_ERR_MEMORY);
    gpu_exec.scratch = test_scratch;
    h.rows = 24;
    CHECK_INT(gpu_kernels->hadamard(&gpu_exec, &h), MIXP_ERR_SHAPE);
    h.rows = 32;
    h.a.dtype = MIXP_F16;
    CHECK_INT(gpu_kernels->hadamard(&gpu_exec, &h), MIXP_ERR_DTYPE);
    h.a.data = NULL;
    CHECK_INT(gpu_kernels->hadamard(&gpu_exec, &h), MIXP_ERR_ARGUMENT);
    mixp_recode_args c;
    memset((void *)&c, 0, sizeof c);
    CHECK_INT(gpu_kernels->recode(&gpu_exec, &c), MIXP_ERR_ARGUMENT);
    c.rows = c.cols = 32;
    c.y = AT(mixp_bf16, y);
    c.codes = AT(uint8_t, x);
    c.element = MIXP_F8_E4M3;
    c.block_rows = 32;
    CHECK_INT(gpu_kernels->recode(&gpu_exec, &c), MIXP_ERR_SHAPE);
    same_bits(x);
    same_bits(y);
    same_bits(decode);
    Pair *all[] = { &x, &y, &decode };
    for (Pair *pair : all) finish(*pair);
}
static void refused(void) { in_all_schedules(refused_body); }

/* --- linear layers ---------------------------------------------------------------------------- */

struct Mode { const char *name; mixp_recipe recipe; };

static Mode mode_of(mixp_recipe_kind kind, const char *name, int mixp_recipe::*one, int mixp_recipe::*two) {
    Mode m;
    memset((void *)&m, 0, sizeof m);
    m.name = name;
    m.recipe.kind = kind;
    m.recipe.*one = m.recipe.*two = 1;
    return m;
}

/* Switches that change how an operand is quantised, or whether a product is. */
static std::vector<Mode> switches(void) {
    typedef mixp_recipe R;
    return { mode_of(MIXP_RECIPE_FP8_CURRENT, "powers of two", &R::power_2, &R::power_2),
             mode_of(MIXP_RECIPE_FP8_BLOCK, "w in rows", &R::no_2d, &R::no_2d),
             mode_of(MIXP_RECIPE_MXFP8, "high gradient of w", &R::wgrad_high, &R::wgrad_high) };
}

static std::vector<Mode> modes(void) {
    std::vector<Mode> all;
    for (int kind = 1; kind < MIXP_RECIPE_COUNT; kind++) {
        Mode m;
        memset((void *)&m, 0, sizeof m);
        m.recipe.kind = (mixp_recipe_kind)kind;
        m.name = mixp_recipe_name(m.recipe.kind);
        all.push_back(m);
    }
    Mode bare = all.back();
    bare.name = "nvfp4 without its parts";
    bare.recipe.no_stochastic = bare.recipe.no_hadamard = bare.recipe.no_2d = 1;
    all.push_back(bare);
    bare.name = "nvfp4, high wgrad";
    bare.recipe.wgrad_high = 1;
    all.push_back(bare);
    bare.name = "nvfp4 with 4over6";
    bare.recipe.wgrad_high = 0;
    bare.recipe.x_4over6 = MIXP_4OVER6_MAE;
    bare.recipe.w_4over6 = MIXP_4OVER6_MSE;
    all.push_back(bare);
    bare.name = "nvfp4 with scales of rows";
    bare.recipe.x_4over6 = MIXP_4OVER6_NONE;
    bare.recipe.row_scaled = 1;
    all.push_back(bare);
    return all;
}

static int narrow;              /* narrow_products of the contexts to come */
static mixp_gemm_count ways;    /* of the context that `layer` made        */
static std::string     warned;  /* its warning                             */

static mixp_context *context_on(bool on_gpu) {
    mixp_context_desc desc;
    memset((void *)&desc, 0, sizeof desc);
    desc.device = on_gpu ? gpu() : mixp_cpu();
    desc.threads = 1;
    desc.seed = 7;
    desc.narrow_products = narrow;
    return mixp_context_new(&desc);
}

enum { ROWS = 128, OUT = 128, IN = 256 };

/* A small whole number, which sums of products keep exact in f32. */
static float whole(uint64_t key, int64_t i)
{ return (float)((int)(mixp_random_at(key, (uint64_t)i) % 7u) - 3); }

/* The layer's result and the gradients of x, w and bias. */
static std::vector<float> layer(const mixp_recipe &recipe, bool gpu) {
    const int64_t of_x[2] = { ROWS, IN }, of_w[2] = { OUT, IN }, of_y[2] = { ROWS, OUT }, of_b = OUT;
    std::vector<float> x(ROWS * IN), g(ROWS * OUT), w(OUT * IN), b(OUT), all, part;
    for (size_t i = 0; i < x.size(); i++) x[i] = whole(1, (int64_t)i);
    for (size_t i = 0; i < w.size(); i++) w[i] = whole(2, (int64_t)i);
    for (size_t i = 0; i < g.size(); i++) g[i] = whole(3, (int64_t)i);
    mixp_context *ctx = context_on(gpu);
    mixp_tensor *px = mixp_param(ctx, "x", MIXP_F32, 2, of_x),
                *pw = mixp_param(ctx, "w", MIXP_F32, 2, of_w),
                *pb = mixp_param(ctx, "b", MIXP_F32, 1, &of_b), *y = NULL, *sum;
    CHECK_INT(mixp_write(px, x.data(), MIXP_F32, ROWS * IN), MIXP_OK);
    CHECK_INT(mixp_write(pw, w.data(), MIXP_F32, OUT * IN), MIXP_OK);
    CHECK_INT(mixp_write(pb, b.data(), MIXP_F32, OUT), MIXP_OK);
    const mixp_recipe_rule rule = { "w*", &recipe };
    if (gpu) CHECK_INT(mixp_autocast_set_recipes(ctx, &rule, 1), MIXP_OK);
    else CHECK_INT(mixp_autocast_set_recipe(ctx, &recipe), MIXP_OK);
    mixp_step_begin(ctx);
    MIXP_AUTOCAST(ctx, MIXP_BF16) y = mixp_linear(ctx, px, pw, pb);
    sum = mixp_sum(ctx, mixp_mul(ctx, y, mixp_input(ctx, MIXP_F32, 2, of_y, g.data())), MIXP_ALL, 0);
    CHECK_INT(mixp_backward(ctx, sum), MIXP_OK);
    for (mixp_tensor *t : { y, px->grad, pw->grad, pb->grad }) {
        CHECK(t != NULL);
        if (!t) continue;
        part.resize((size_t)t->count);
        CHECK_INT(mixp_read(t, part.data(), MIXP_F32, t->count), MIXP_OK);
        all.insert(all.end(), part.begin(), part.end());
    }
    CHECK_INT(mixp_autocast_recipe_counts(ctx).quantised, 1);
    CHECK_INT(mixp_autocast_recipe_counts(ctx).products, 3 - recipe.wgrad_high);
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    ways = mixp_context_gemm_count(ctx);
    warned = mixp_context_warning(ctx);
    mixp_context_free(ctx);
    return all;
}

static std::vector<Mode> modes_and_switches(void) {
    std::vector<Mode> all = modes();
    for (const Mode &m : switches()) all.push_back(m);
    return all;
}

static void exact_sums(void) {
    for (const Mode &m : modes_and_switches()) {
        std::vector<float> cpu = layer(m.recipe, false), gpu = layer(m.recipe, true);
        int different = 0;
        CHECK_INT(gpu.size(), cpu.size());
        for (size_t i = 0; i < cpu.size() && i < gpu.size(); i++)
            if (mixp_bits_of_f32(cpu[i]) != mixp_bits_of_f32(gpu[i]) && !different++)
                printf("  %s: element %zu is %.9g on the GPU, %.9g on the CPU\n", m.name, i,
                       (double)gpu[i], (double)cpu[i]);
        CHECK_INT(different, 0);
    }
    CHECK_INT(cudasim::leaks(), 0);
}

/* --- training --------------------------------------------------------------------------------- */

enum { BATCH = 128, WIDTH = 128 };
static float batch[BATCH * WIDTH], target[BATCH * WIDTH];

struct Net {
    mixp_context   *ctx;
    mixp_optimizer *opt;
    mixp_tensor    *w[2];
};

static Net net_of(const mixp_recipe *recipe, bool gpu) {
    const int64_t shape[2] = { WIDTH, WIDTH };
    Net n;
    n.ctx = context_on(gpu);
    n.opt = mixp_optimizer_new(n.ctx, NULL);
    for (int i = 0; i < 2; i++) {
        n.w[i] = mixp_param(n.ctx, i ? "w1" : "w0", MIXP_F32, 2, shape);
        mixp_init_normal(n.w[i], 0, 0.1);
    }
    CHECK_INT(mixp_optimizer_add_all(n.opt, "*"), MIXP_OK);
    CHECK_INT(mixp_autocast_set_recipe(n.ctx, recipe), MIXP_OK);
    return n;
}

static mixp_tensor *two_linears(mixp_context *ctx, mixp_tensor *x, void *user) {
    const Net *n = (const Net *)user;
    x = mixp_gelu_tanh(ctx, mixp_linear(ctx, x, n->w[0], NULL));
    mixp_tensor_set_disposable(x, 1);
    return mixp_linear(ctx, x, n->w[1], NULL);
}

static void new_batch(int t) {
    for (int i = 0; i < BATCH * WIDTH; i++) {
        batch[i] = whole((uint64_t)(10 + t), i) * 0.37f;
        target[i] = 0.5f * batch[i] + 0.1f;
    }
}

/* One step; its loss. */
static mixp_tensor *train(Net &n, bool again) {
    const int64_t shape[2] = { BATCH, WIDTH };
    mixp_tensor *loss = NULL, *h;
    mixp_step_begin(n.ctx);
    mixp_zero_grad(n.opt);
    h = mixp_input(n.ctx, MIXP_F32, 2, shape, batch);
    mixp_tensor *t = mixp_input(n.ctx, MIXP_F32, 2, shape, target);
    MIXP_AUTOCAST(n.ctx, MIXP_BF16) {
        h = again ? mixp_recompute(n.ctx, two_linears, &n, h) : two_linears(n.ctx, h, &n);
        loss = mixp_mse(n.ctx, h, t);
    }
    CHECK_INT(mixp_backward(n.ctx, loss), MIXP_OK);
    CHECK_INT(mixp_optimizer_step(n.opt), MIXP_OK);
    return loss;
}

static std::vector<float> weights(Net &n) {
    std::vector<float> all(2 * WIDTH * WIDTH);
    for (int i = 0; i < 2; i++)
        CHECK_INT(mixp_read(n.w[i], all.data() + i * WIDTH * WIDTH, MIXP_F32, WIDTH * WIDTH), MIXP_OK);
    return all;
}

static void finish_net(Net &n) {
    const char *why = "";
    CHECK_INT(mixp_context_error(n.ctx, &why), MIXP_OK);
    if (*why) printf("  %s\n", why);
    mixp_context_free(n.ctx);
}

static bool quick(void) { return getenv("MIXPREC_TEST_QUICK") != NULL; }
static int steps_of_a_mode(void) { return quick() ? 2 : 4; }

/* make test trains every second mode; make test-long trains all. */
static std::vector<Mode> trained_modes(void) {
    const std::vector<Mode> all = modes();
    std::vector<Mode> some;
    for (size_t i = 0; i < all.size(); i += quick() ? 2 : 1)
        if (!all[i].recipe.x_4over6 && !all[i].recipe.row_scaled) some.push_back(all[i]);     /* sums show these */
    return some;
}

/* Sums in another order turn few roundings over. With `again` the GPU computes its blocks twice, and
 * its weights keep their bits. */
static void near_the_cpu(void) {
    for (const Mode &m : trained_modes()) {
        Net cpu = net_of(&m.recipe, false), gpu = net_of(&m.recipe, true),
            twice = net_of(&m.recipe, true);
        for (int t = 0; t < steps_of_a_mode(); t++) {
            new_batch(t);
            double a = mixp_item(train(cpu, false)), b = mixp_item(train(gpu, false));
            train(twice, true);
            CHECK_NEAR(b, a, 2e-3 * a);
        }
        CHECK(weights(gpu) == weights(twice));
        finish_net(cpu);
        finish_net(gpu);
        finish_net(twice);
    }
    CHECK_INT(cudasim::leaks(), 0);
}

/* A captured step: each replay is the eager step, with its own random numbers. */
static void replays(void) {
    for (const Mode &m : trained_modes()) {
        Net eager = net_of(&m.recipe, true), played = net_of(&m.recipe, true);
        new_batch(0);
        train(eager, false);
        train(played, false);
        CHECK_INT(mixp_capture_begin(played.ctx), MIXP_OK);
        train(played, false);
        mixp_graph *graph = mixp_capture_end(played.ctx);
        CHECK(graph != NULL);
        for (int t = 0; t < steps_of_a_mode() && graph; t++) {
            new_batch(t + 1);
            train(eager, false);
            CHECK_INT(mixp_replay(graph), MIXP_OK);
            CHECK(weights(eager) == weights(played));
        }
        finish_net(eager);
        finish_net(played);
    }
    CHECK_INT(cudasim::leaks(), 0);
}

/* An input kept as codes: the bits of a run without codes, in replays and under a guard, with less memory. */
static void with_codes(void) {
    std::vector<Mode> some = trained_modes();
    some.push_back(modes().back());
    for (size_t i = 0; i < some.size(); i += quick() ? 2 : 1) {
        Mode m = some[i];
        if (m.recipe.wgrad_high) continue;
        Net plain = net_of(&m.recipe, true);
        m.recipe.codes = 1;
        Net played = net_of(&m.recipe, true), guarded = net_of(&m.recipe, true);
        CHECK_INT(mixp_guard_start(guarded.ctx, NULL), MIXP_OK);
        new_batch(0);
        for (Net *n : { &plain, &played, &guarded }) train(*n, false);
        CHECK(weights(plain) == weights(played));
        CHECK_INT(mixp_autocast_recipe_counts(plain.ctx).coded, 0);
        CHECK_INT(mixp_autocast_recipe_counts(played.ctx).coded, 1);
        CHECK(mixp_autocast_recipe_counts(guarded.ctx).coded >= 1);
        CHECK(mixp_context_memory(played.ctx).peak < mixp_context_memory(plain.ctx).peak);
        CHECK_INT(mixp_capture_begin(played.ctx), MIXP_OK);
        train(played, false);
        mixp_graph *graph = mixp_capture_end(played.ctx);
        CHECK(graph != NULL);
        for (int t = 1; t < 3 && graph; t++) {
            new_batch(t);
            train(plain, false);
            train(guarded, false);
            CHECK_INT(mixp_replay(graph), MIXP_OK);
            CHECK(weights(plain) == weights(played));
            CHECK(weights(plain) == weights(guarded));
        }
        for (Net *n : { &plain, &played, &guarded }) finish_net(*n);
    }
    CHECK_INT(cudasim::leaks(), 0);
}

/* --- delayed scaling -------------------------------------------------------------------------- */

/* One layer whose sums are exact on both devices: whole numbers times powers of two, and scales that
 * the test sees. */
struct Layer {
    mixp_context   *ctx;
    mixp_tensor    *w;
    mixp_optimizer *opt;
    mixp_scaler    *scaler;
    float           x[32 * 64], dy[32 * 48];
};

static mixp_recipe delayed_recipe(int most_recent) {
    mixp_recipe r;
    memset((void *)&r, 0, sizeof r);
    r.kind = MIXP_RECIPE_FP8_DELAYED;
    r.history = 5;
    r.most_recent = most_recent;
    r.margin = most_recent;
    return r;
}

static void layer_open(Layer *l, bool gpu, int most_recent) {
    const int64_t shape[2] = { 48, 64 };
    const mixp_recipe r = delayed_recipe(most_recent);
    mixp_optimizer_desc sgd = mixp_sgd_defaults();
    mixp_scaler_desc scaling;
    std::vector<float> w(48 * 64);
    memset((void *)&scaling, 0, sizeof scaling);
    scaling.rule = MIXP_RULE_STATIC;
    scaling.init_scale = 1.0f;
    sgd.lr = 0;
    for (size_t i = 0; i < w.size(); i++) w[i] = whole(9, (int64_t)i);
    l->ctx = context_on(gpu);
    l->w = mixp_param(l->ctx, "w", MIXP_F32, 2, shape);
    CHECK_INT(mixp_write(l->w, w.data(), MIXP_F32, 48 * 64), MIXP_OK);
    l->opt = mixp_optimizer_new(l->ctx, &sgd);
    CHECK_INT(mixp_optimizer_add_all(l->opt, "*"), MIXP_OK);
    l->scaler = mixp_scaler_new(l->ctx, &scaling);
    CHECK_INT(mixp_autocast_set_recipe(l->ctx, &r), MIXP_OK);
}

/* Numbers of micro-batch `key`; sizes differ by powers of two, so that values are clipped. */
static void layer_fill(Layer *l, int key) {
    for (int i = 0; i < 32 * 64; i++) l->x[i] = ldexpf(whole((uint64_t)(2 * key), i), 3 * (key % 4));
    for (int i = 0; i < 32 * 48; i++) l->dy[i] = ldexpf(whole((uint64_t)(2 * key + 1), i), -2 * (key % 3));
}

static mixp_tensor *layer_walk(Layer *l, bool trains) {
    const int64_t xs[2] = { 32, 64 }, ys[2] = { 32, 48 };
    mixp_tensor *x, *y = NULL;
    mixp_step_begin(l->ctx);
    x = mixp_input(l->ctx, MIXP_F32, 2, xs, l->x);
    if (!trains) {
        MIXP_NO_GRAD(l->ctx) MIXP_AUTOCAST(l->ctx, MIXP_BF16) y = mixp_linear(l->ctx, x, l->w, NULL);
        return y;
    }
    MIXP_AUTOCAST(l->ctx, MIXP_BF16) y = mixp_linear(l->ctx, x, l->w, NULL);
    mixp_tensor *loss = mixp_sum(l->ctx, mixp_mul(l->ctx, y, mixp_input(l->ctx, MIXP_F32, 2, ys, l->dy)),
                                 MIXP_ALL, 0);
    CHECK_INT(mixp_backward(l->ctx, mixp_scaler_scale(l->scaler, loss)), MIXP_OK);
    return y;
}

static void layer_update(Layer *l) {
    CHECK_INT(mixp_scaler_step(l->scaler, l->opt), MIXP_OK);
    CHECK_INT(mixp_scaler_update(l->scaler), MIXP_OK);
}

static mixp_checkpoint checkpoint_of(Layer *l) {
    mixp_checkpoint c;
    memset((void *)&c, 0, sizeof c);
    c.ctx = l->ctx;
    c.scaler = l->scaler;
    c.optimizers = &l->opt;
    c.n_optimizers = 1;
    return c;
}

/* Scales [3] and history [3, 5] of a checkpoint, after the weight's gradient. */
static std::vector<float> layer_state(Layer *l) {
    static const char *const names[] = { "mixprec.recipe.scales.w", "mixprec.recipe.amax_history.w" };
    const mixp_checkpoint c = checkpoint_of(l);
    char path[64];
    std::vector<float> all(48 * 64 + 18, -1.0f);
    mixp_safetensors *file = NULL;
    snprintf(path, sizeof path, "/tmp/mixprec_cuda_delayed.%d", (int)getpid());
    if (l->w->grad) CHECK_INT(mixp_read(l->w->grad, all.data(), MIXP_F32, 48 * 64), MIXP_OK);
    CHECK_INT(mixp_checkpoint_save(path, &c), MIXP_OK);
    CHECK_INT(mixp_safetensors_read(path, &file, NULL, 0), MIXP_OK);
    for (int i = 0; i < 2 && file; i++) {
        const mixp_st_entry *e = mixp_safetensors_find(file, names[i]);
        CHECK(e && e->bytes == (i ? 60u : 12u));
        if (e && e->bytes <= 60) memcpy(all.data() + 48 * 64 + 3 * i, e->data, e->bytes);
    }
    mixp_safetensors_free(file);
    remove(path);
    return all;
}

/* Updates of one or two micro-batches, an evaluation that enters nothing, an Inf and a NaN: gradient,
 * scales and history have the CPU's bits after each. A later update waits for nothing. */
static void delayed_like_the_cpu(void) {
    for (int most_recent = 0; most_recent < 2; most_recent++) {
        Layer l[2];
        for (int gpu = 0; gpu < 2; gpu++) layer_open(&l[gpu], gpu != 0, most_recent);
        for (int step = 0; step < 9; step++) {
            std::vector<float> state[2];
            for (int gpu = 0; gpu < 2; gpu++) {
                const cudasim::Count before = cudasim::count;
                mixp_zero_grad(l[gpu].opt);
                for (int micro = 0; micro < 1 + (step % 3 == 1); micro++) {
                    layer_fill(&l[gpu], 2 * step + micro);
                    if (step == 6) l[gpu].x[70] = INFINITY;
                    if (step == 7) l[gpu].dy[70] = NAN;
                    layer_walk(&l[gpu], true);
                }
                layer_fill(&l[gpu], 3);
                if (step == 3) layer_walk(&l[gpu], false);
                layer_update(&l[gpu]);
                if (gpu && step == 5) CHECK_INT(cudasim::count.waits, before.waits);
                state[gpu] = layer_state(&l[gpu]);
            }
            CHECK(state[0].size() == state[1].size());
            /* the sum of two walks' gradients is rounded in another order */
            for (size_t i = step % 3 == 1 ? 48 * 64 : 0; i < state[0].size(); i++) {
                const uint32_t a = mixp_bits_of_f32(state[0][i]), b = mixp_bits_of_f32(state[1][i]);
                if (a == b || (state[0][i] != state[0][i] && state[1][i] != state[1][i])) continue;
                test_bad++;
                TEST_SHOW("step %d, number %zu: %.9g on the CPU, %.9g on the GPU", step, i,
                          (double)state[0][i], (double)state[1][i]);
                break;
            }
            CHECK(step < 1 || state[1][48 * 64] != 1.0f);      /* the scales have moved */
        }
        for (int gpu = 0; gpu < 2; gpu++) {
            CHECK_INT(mixp_context_error(l[gpu].ctx, NULL), MIXP_OK);
            mixp_context_free(l[gpu].ctx);
        }
    }
    CHECK_INT(cudasim::leaks(), 0);
}

/* A file that the GPU saved resumes on the GPU and on the CPU. A file without the state of delayed scaling
 * sets the state to its beginning. */
static void delayed_resumes(void) {
    char path[64];
    std::vector<float> end[3];
    snprintf(path, sizeof path, "/tmp/mixprec_cuda_resume.%d", (int)getpid());
    for (int run = 0; run < 3; run++) {         /* without a break; resumed on the GPU; on the CPU */
        Layer l;
        layer_open(&l, run < 2, 0);
        mixp_checkpoint c = checkpoint_of(&l);
        if (run == 1) {
            layer_fill(&l, 11);                 /* a state of its own, which the file replaces */
            layer_walk(&l, true);
            layer_update(&l);
        }
        if (run) CHECK_INT(mixp_checkpoint_load(path, &c), MIXP_OK);
        for (int step = run ? 3 : 0; step < 7; step++) {
            if (!run && step == 3) CHECK_INT(mixp_checkpoint_save(path, &c), MIXP_OK);
            mixp_zero_grad(l.opt);
            layer_fill(&l, step);
            layer_walk(&l, true);
            layer_update(&l);
        }
        end[run] = layer_state(&l);
        CHECK_INT(mixp_context_error(l.ctx, NULL), MIXP_OK);
        mixp_context_free(l.ctx);
    }
    CHECK(end[1] == end[0]);
    CHECK(end[2] == end[0]);
    {
        Layer plain, l;
        layer_open(&plain, true, 0);
        layer_open(&l, true, 0);
        mixp_checkpoint from = checkpoint_of(&plain), c = checkpoint_of(&l);
        layer_fill(&l, 1);
        layer_walk(&l, true);
        layer_update(&l);
        CHECK_INT(mixp_checkpoint_save(path, &from), MIXP_OK);      /* no linear has run */
        CHECK_INT(mixp_checkpoint_load(path, &c), MIXP_OK);
        end[0] = layer_state(&l);
        for (int i = 0; i < 18; i++) CHECK(end[0][(size_t)(48 * 64 + i)] == (i < 3 ? 1.0f : 0.0f));
        mixp_context_free(plain.ctx);
        mixp_context_free(l.ctx);
    }
    remove(path);
    CHECK_INT(cudasim::leaks(), 0);
}

static void expect_error(mixp_context *ctx, mixp_result code, const char *text) {
    const char *why = "";
    CHECK_INT(mixp_context_error(ctx, &why), code);
    CHECK_TEXT(why, text);
    mixp_context_clear_error(ctx);
}

static mixp_graph *layer_captured(Layer *l) {
    CHECK_INT(mixp_capture_begin(l->ctx), MIXP_OK);
    mixp_zero_grad(l->opt);
    if (layer_walk(l, true)) layer_update(l);
    return mixp_capture_end(l->ctx);
}

/* Replays advance scales and histories. A first step cannot be captured; a graph that does not know
 * all states is refused. */
static void delayed_replays(void) {
    const int64_t shape[2] = { 48, 64 };
    Layer eager, played;
    layer_open(&eager, true, 0);
    layer_open(&played, true, 0);
    const mixp_recipe r = delayed_recipe(0);
    CHECK_INT(mixp_autocast_set_recipe(played.ctx, NULL), MIXP_OK);
    layer_fill(&played, 0);
    mixp_zero_grad(played.opt);
    layer_walk(&played, true);                  /* a bf16 step, which takes the memory */
    layer_update(&played);
    CHECK_INT(mixp_autocast_set_recipe(played.ctx, &r), MIXP_OK);
    CHECK_INT(mixp_capture_begin(played.ctx), MIXP_OK);
    mixp_step_begin(played.ctx);
    const int64_t xs[2] = { 32, 64 };
    MIXP_AUTOCAST(played.ctx, MIXP_BF16)
        CHECK(!mixp_linear(played.ctx, mixp_input(played.ctx, MIXP_F32, 2, xs, played.x), played.w, NULL));
    expect_error(played.ctx, MIXP_ERR_ORDER, "run an ordinary step first");
    mixp_graph *none = mixp_capture_end(played.ctx);
    if (none) mixp_graph_free(none);
    mixp_context_clear_error(played.ctx);
    for (Layer *l : { &eager, &played }) {
        layer_fill(l, 0);
        mixp_zero_grad(l->opt);
        layer_walk(l, true);
        layer_update(l);
    }
    mixp_graph *graph = layer_captured(&played);
    CHECK(graph != NULL);
    for (int step = 1; step < 6 && graph; step++) {
        layer_fill(&eager, step);
        mixp_zero_grad(eager.opt);
        layer_walk(&eager, true);
        layer_update(&eager);
        layer_fill(&played, step);
        CHECK_INT(mixp_replay(graph), MIXP_OK);
        CHECK(layer_state(&eager) == layer_state(&played));
    }
    mixp_tensor *other = mixp_param(played.ctx, "other", MIXP_F32, 2, shape), *w = played.w;
    played.w = other;
    layer_walk(&played, true);
    played.w = w;
    CHECK_INT(mixp_replay(graph), MIXP_ERR_ORDER);
    expect_error(played.ctx, MIXP_ERR_ORDER, "record the step again");
    mixp_context_free(eager.ctx);
    mixp_context_free(played.ctx);
    CHECK_INT(cudasim::leaks(), 0);
}

/* --- narrow products -------------------------------------------------------------------------- */

/* Does cuBLASLt have the recipe's format on this capability? */
static bool has_format(mixp_recipe_kind kind, int capability) {
    if (kind == MIXP_RECIPE_FP8_BLOCK) return capability == 90;
    return kind < MIXP_RECIPE_FP8_BLOCK ? capability >= 89 : capability >= 100;
}

static void with_narrow(int capability, void (*body)(int)) {
    const int major = cudasim::capability_major, minor = cudasim::capability_minor;
    cudasim::capability_major = capability / 10;
    cudasim::capability_minor = capability % 10;
    narrow = 1;
    body(capability);
    narrow = 0;
    cudasim::capability_major = major;
    cudasim::capability_minor = minor;
}

static void narrow_sums(int capability) {
    for (const Mode &m : modes_and_switches()) {
        const int64_t products = 3 - m.recipe.wgrad_high;
        narrow = 0;
        const std::vector<float> cpu = layer(m.recipe, false);
        narrow = 1;
        const std::vector<float> gpu = layer(m.recipe, true);
        CHECK(cpu == gpu);
        CHECK_INT(ways.narrow, has_format(m.recipe.kind, capability) ? products : 0);
        CHECK_INT(ways.narrow + ways.direct + ways.packed, 3);
        CHECK_INT(warned.empty(), ways.narrow == products);
        if (ways.narrow == products) continue;
        CHECK(warned.find("codes of 128 x 128 x 256 for mixp_linear 'w'") != std::string::npos);
        CHECK(warned.find("It stays a bf16 product") != std::string::npos);
    }
}

static void narrow_training(int) {
    replays();
    if (!quick()) with_codes();
}

/* The three products of a linear as codes: the CPU's bits where sums are exact. Replays have the bits of
 * eager steps, and codes of activations those of a run without them. */
static void narrow_products(void) {
    NEEDS_SIMULATION;
    const std::vector<int> few = { 89, 100 }, all = { 80, 89, 90, 100 };
    for (int capability : quick() ? few : all) with_narrow(capability, narrow_sums);
    for (int capability = quick() ? 100 : 90; capability <= 100; capability += 10)
        with_narrow(capability, narrow_training);
}

/* --- fallback --------------------------------------------------------------------------------- */

static int x_event(mixp_context *ctx, mixp_event_kind kind, mixp_event *e) {
    for (int i = 0; mixp_guard_event(ctx, i, e); i++)
        if (e->kind == kind && strcmp(e->operand, "x") == 0) return 1;
    return 0;
}

/* x has a column of 16 at 10^4: it falls back with the numbers of a loop in double, and returns after
 * clean samples. Measuring adds no wait. Under delayed scaling x grows by 100 and is clipped. */
static void falls_back(void) {
    long waits[10], usual_waits = -1;
    for (int delayed = -1; delayed < 2; delayed++) {        /* -1: without a recipe */
        Layer l;
        mixp_recipe r = delayed_recipe(1);
        mixp_guard_desc guard;
        mixp_event e;
        double error = 0, clipped = 0;
        layer_open(&l, true, 1);
        memset((void *)&guard, 0, sizeof guard);
        guard.every = 1;
        guard.clean = 2;
        guard.imprecise = -1.0f;
        r.kind = delayed > 0 ? MIXP_RECIPE_FP8_DELAYED : delayed ? MIXP_RECIPE_NONE : MIXP_RECIPE_FP8_CURRENT;
        r.margin = 0;
        CHECK_INT(mixp_autocast_set_recipe(l.ctx, &r), MIXP_OK);
        CHECK_INT(mixp_guard_start(l.ctx, &guard), MIXP_OK);
        for (int step = 0; step < 10; step++) {
            const cudasim::Count before = cudasim::count;
            const bool bad = step == 3;
            for (int i = 0; i < 32 * 64; i++) {
                const float usual = 0.02f * (float)(i % 7 - 3);
                l.x[i] = delayed > 0 ? (bad ? 100.0f : 1.0f) * usual : bad && i % 16 == 0 ? 1e4f : usual;
            }
            for (int i = 0; i < 32 * 48; i++) l.dy[i] = (float)(i % 3 + 1);
            mixp_zero_grad(l.opt);
            layer_walk(&l, true);
            layer_update(&l);
            waits[step] = cudasim::count.waits - before.waits;
            if (step != 3) continue;
            CHECK(!x_event(l.ctx, MIXP_EVENT_OPERAND, &e));
            CHECK_INT(mixp_autocast_recipe_counts(l.ctx).fallen, 0);
            lose_at(l.x, 32 * 64, 448.0 / (double)(float)in_bf16(delayed > 0 ? (double)(0.02f * 3.0f) : 1e4), &error,
                    &clipped);
        }
        CHECK_INT(mixp_context_error(l.ctx, NULL), MIXP_OK);
        if (delayed < 0) {
            usual_waits = waits[2];
            CHECK(!x_event(l.ctx, MIXP_EVENT_OPERAND, &e));
            mixp_context_free(l.ctx);
            continue;
        }
        CHECK_INT(waits[2], usual_waits);
        CHECK(x_event(l.ctx, MIXP_EVENT_OPERAND, &e));
        CHECK_INT(e.step, 4);
        CHECK_NEAR(e.error, error, 1e-6);
        CHECK_NEAR(e.clipped, clipped, 1e-12);
        CHECK(delayed ? e.clipped > 0.5 : e.error > 0.3);
        CHECK(mixp_autocast_recipe_counts(l.ctx).fallen > 0);
        CHECK(x_event(l.ctx, MIXP_EVENT_OPERAND_BACK, &e));
        const int64_t fallen = mixp_autocast_recipe_counts(l.ctx).fallen;
        mixp_zero_grad(l.opt);
        layer_walk(&l, true);
        CHECK_INT(mixp_autocast_recipe_counts(l.ctx).fallen, fallen);
        mixp_context_free(l.ctx);
    }
    CHECK_INT(cudasim::leaks(), 0);
}

/* A device that cannot end an update: a typed error, and nothing changes. */
static void delayed_is_refused(void) {
    mixp_kernels kernels = *gpu()->kernels;
    mixp_device without = *gpu();
    mixp_context_desc desc;
    kernels.turn = NULL;
    without.kernels = &kernels;
    memset((void *)&desc, 0, sizeof desc);
    desc.device = &without;
    mixp_context *ctx = mixp_context_new(&desc);
    const mixp_recipe r = delayed_recipe(0);
    CHECK_INT(mixp_autocast_set_recipe(ctx, &r), MIXP_ERR_DEVICE);
    expect_error(ctx, MIXP_ERR_DEVICE, "use fp8_current");
    mixp_context_free(ctx);
    CHECK_INT(cudasim::leaks(), 0);
}

int main(void) {
    RUN(same_numbers);
    RUN(large);
    RUN(recoded);
    RUN(every_code);
    RUN(every_bf16);
    RUN(factors);
    RUN(given);
    RUN(joined);
    RUN(turned);
    RUN(lost);
    RUN(hadamard);
    RUN(refused);
    RUN(exact_sums);
    RUN_LATER(near_the_cpu);
    RUN_LATER(replays);
    RUN_LATER(with_codes);
    RUN_LATER(narrow_products);
    RUN(delayed_like_the_cpu);
    RUN(delayed_resumes);
    RUN(delayed_replays);
    RUN(falls_back);
    RUN(delayed_is_refused);
    return test_report();
}
