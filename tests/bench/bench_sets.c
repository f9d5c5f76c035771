/* bench_sets.c - each kernel of values and rows on each instruction set, in one process, one thread
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 *   bench_sets [rounds, 15]
 *
 * Prints the processor's nanoseconds for 1,000 values (medians; the sets take turns), and AVX2's time over AVX-512's.
 * AVX2's registers are half as wide, so a kernel that AVX-512 runs more than 4 times as fast has a fault on AVX2, and
 * one that it runs more slowly has a fault on AVX-512: such lines end with "off". Bytes: what 1,000 values read and
 * write; both sets move the same.
 */
#define _POSIX_C_SOURCE 199309L
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { COUNT = 65536, ROWS = 64, COLS = COUNT / ROWS, SETS = 3, ROUNDS = 101 };

static const mixp_isa sets[SETS] = { MIXP_ISA_SCALAR, MIXP_ISA_AVX2, MIXP_ISA_AVX512 };
static const char *const unary[MIXP_UNARY_COUNT] = {
    "relu", "gelu_tanh", "gelu", "silu", "tanh", "sigmoid", "exp", "log", "sqrt", "pow", "scale", "relu_squared", "abs",
    "sin", "cos", "soft_cap", "clamp", "affine", "log1p", "expm1", "erf", "softplus", "leaky_relu", "elu", "root", "log2",
    "log10", "acos", "asin", "tan", "sinh", "cosh", "erfinv" };
static const char *const binary[MIXP_BINARY_COUNT] = {
    "add", "sub", "mul", "div", "maximum", "minimum", "swiglu", "power", "atan2", "prelu" };
static const char *const losses[MIXP_LOSS_COUNT] = {
    "mse", "bce_logits", "bce", "l1", "huber", "smooth_l1", "kl_div", "kl_div of logs" };

typedef enum family {
    UNARY, UNARY_SLOPE, BINARY, BINARY_SLOPE, LOSS, LOSS_SLOPE, SOFTMAX, SOFTMAX_SLOPE, NORM, CONVERT, FAMILIES
} family;
typedef struct kernel { family of; int op; mixp_dtype dtype; } kernel;

static const mixp_kernels *calls;
static mixp_exec           exec = { .threads = 1 };
static float               values[3][COUNT], result[COUNT], mean[ROWS], rstd[ROWS], gamma[COLS];
static mixp_bf16           narrow[3][COUNT], narrow_result[COUNT];

static mixp_in in(mixp_dtype dtype, int i)
{ return dtype == MIXP_F32 ? mixpi_in(values[i], MIXP_F32) : mixpi_in(narrow[i], dtype); }
static mixp_out out(mixp_dtype dtype)
{ return mixpi_out_to(dtype == MIXP_F32 ? (void *)result : (void *)narrow_result, dtype, 0); }

static mixp_result run_values(const kernel *k) {
    const mixp_in  a = in(k->dtype, 0), b = in(k->dtype, 1), dy = in(k->dtype, 2);
    const mixp_out y = out(k->dtype);
    if (k->of == UNARY) {
        const mixp_unary_args args = { (mixp_unary)k->op, 1.5f, 2.0f, COUNT, a, y };
        return calls->unary(&exec, &args);
    }
    if (k->of == UNARY_SLOPE) {
        const mixp_unary_backward_args args = { (mixp_unary)k->op, 1.5f, 2.0f, COUNT, dy, a, b, y };
        return calls->unary_backward(&exec, &args);
    }
    mixp_binary_args args = { .op = (mixp_binary)k->op, .rank = 1, .shape = { COUNT }, .a = a, .b = b, .y = y };
    args.a_strides[0] = args.b_strides[0] = 1;
    args.dy = dy;
    args.dx = y;
    return k->of == BINARY ? calls->binary(&exec, &args) : calls->binary_backward(&exec, &args);
}

static mixp_result run_losses(const kernel *k) {
    static const float one = 1.0f;
    const mixp_loss_args args = { .kind = (mixp_loss_kind)k->op, .n = COUNT, .delta = 1.0f, .a = in(k->dtype, 0),
                                  .target = in(k->dtype, 1), .y = result };
    const mixp_loss_backward_args slope = { .kind = args.kind, .n = COUNT, .over = COUNT, .delta = 1.0f,
        .dloss = mixpi_in(&one, MIXP_F32), .a = args.a, .target = args.target, .da = out(k->dtype) };
    return k->of == LOSS ? calls->loss(&exec, &args) : calls->loss_backward(&exec, &slope);
}

static mixp_result run_rows(const kernel *k) {
    const mixp_in  a = in(k->dtype, 0), dy = in(k->dtype, 2), ones = mixpi_in(gamma, MIXP_F32);
    const mixp_out y = out(k->dtype);
    if (k->of == SOFTMAX) {
        const mixp_softmax_args args = { ROWS, COLS, k->op, a, y };
        return calls->softmax(&exec, &args);
    }
    if (k->of == SOFTMAX_SLOPE) {
        const mixp_softmax_backward_args args = { ROWS, COLS, k->op, dy, a, y };
        return calls->softmax_backward(&exec, &args);
    }
    const mixp_norm_args args = { .rows = ROWS, .cols = COLS, .rms = k->op, .eps = 1e-5f, .a = a, .gamma = ones,
                                  .y = y, .mean = mean, .rstd = rstd };
    return calls->norm(&exec, &args);
}

/* To the dtype, or from it where op is 1. */
static mixp_result run_conversion(const kernel *k) {
    static uint8_t codes[COUNT * 2];
    const int      from = k->op;
    const mixp_in  a = mixpi_in(from ? (const void *)narrow[0] : values[0], from ? k->dtype : MIXP_F32);
    const mixp_out y = mixpi_out_to(from ? (void *)result : codes, from ? MIXP_F32 : k->dtype, 0);
    const mixp_convert_args args = { .n = COUNT, .src = a, .dst = y };
    return calls->convert(&exec, &args);
}

static mixp_result run(const kernel *k) {
    if (k->of <= BINARY_SLOPE) return run_values(k);
    if (k->of <= LOSS_SLOPE) return run_losses(k);
    return k->of == CONVERT ? run_conversion(k) : run_rows(k);
}

static const char *name_of(const kernel *k) {
    static char text[64];
    static const char *const rows[][2] = { { "softmax", "log_softmax" }, { "softmax", "log_softmax" },
                                           { "layer_norm", "rms_norm" } };
    const char *op = k->of <= UNARY_SLOPE ? unary[k->op] : k->of <= BINARY_SLOPE ? binary[k->op]
                   : k->of <= LOSS_SLOPE ? losses[k->op] : k->of == CONVERT ? (k->op ? "to f32 from" : "from f32 to")
                   : rows[k->of - SOFTMAX][k->op];
    const int is_slope = k->of == UNARY_SLOPE || k->of == BINARY_SLOPE || k->of == LOSS_SLOPE || k->of == SOFTMAX_SLOPE;
    snprintf(text, sizeof text, "%s %s%s", op, mixp_dtype_name(k->dtype), is_slope ? " backward" : "");
    return text;
}

static double bytes_of(const kernel *k) {
    const double size = (double)mixp_dtype_size(k->dtype), arrays[FAMILIES] = { 2, 3, 3, 3, 2, 3, 2, 3, 2, 1 };
    if (k->of == CONVERT) return 4 + size;
    return (arrays[k->of] + (k->of == BINARY_SLOPE && k->op > MIXP_BINARY_SUB)) * size;
}

static int by_value(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Nanoseconds of the processor for 1,000 values. */
static double timed(const kernel *k) {
    struct timespec start, end;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &start);
    if (run(k) != MIXP_OK) return -1;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &end);
    return (1e9 * (double)(end.tv_sec - start.tv_sec) + (double)(end.tv_nsec - start.tv_nsec)) / (COUNT / 1000.0);
}

/* Times a kernel on each set in turns, and prints its line. Returns 1 if AVX2 and AVX-512 are off. */
static int measure(const kernel *k, int rounds) {
    static double ns[SETS][ROUNDS];
    double        median[SETS] = { 0 };
    for (int r = -1; r < rounds; r++)
        for (int s = 0; s < SETS; s++) {
            const mixp_device *device = mixp_cpu_with(sets[s]);
            if (!device || (s == 0 && r > 1)) continue;     /* plain C is slow: two rounds */
            calls = device->kernels;
            ns[s][r < 0 ? 0 : r] = timed(k);
        }
    for (int s = 0; s < SETS; s++) {
        const int n = s == 0 && rounds > 2 ? 2 : rounds;
        qsort(ns[s], (size_t)n, sizeof ns[s][0], by_value);
        median[s] = ns[s][n / 2];
    }
    const double ratio = median[2] > 0 ? median[1] / median[2] : 0;
    const int    off = ratio > 0 && (ratio > 4 || ratio < 0.9);
    printf("%-28s %6.0f bytes  %9.0f %9.0f %9.0f   %5.2f%s\n", name_of(k), 1000 * bytes_of(k), median[0], median[1],
           median[2], ratio, off ? "  off" : "");
    return off;
}

static void fill(void) {
    uint32_t state = 1;
    for (int i = 0; i < 3; i++)
        for (int j = 0; j < COUNT; j++) {
            state = state * 1664525u + 1013904223u;
            values[i][j] = (float)((state >> 8) + 1) / 16777218.0f;     /* in (0, 1): every function and loss has it */
            narrow[i][j] = mixp_bf16_from_f32(values[i][j]);
        }
    for (int j = 0; j < COLS; j++) gamma[j] = 1;
}

int main(int argc, char **argv) {
    static const int        counts[FAMILIES] = { MIXP_UNARY_COUNT, MIXP_UNARY_COUNT, MIXP_BINARY_COUNT, MIXP_BINARY_COUNT,
                                                 MIXP_LOSS_COUNT, MIXP_LOSS_COUNT, 2, 2, 2, 2 };
    static const mixp_dtype dtypes[] = { MIXP_F32, MIXP_BF16, MIXP_F16, MIXP_F8_E4M3, MIXP_F8_E5M2 };
    const int rounds = argc > 1 ? atoi(argv[1]) : 15;
    int       off = 0;
    if (rounds < 1 || rounds > ROUNDS) {
        fprintf(stderr, "bench_sets: rounds are 1 to %d\n", ROUNDS);
        return 2;
    }
    fill();
    printf("ns for 1,000 values: plain C, AVX2, AVX-512 (0: not on this processor); AVX2 / AVX-512\n");
    for (int f = 0; f < FAMILIES; f++)
        for (int d = f == CONVERT; d < (f == CONVERT ? 5 : 2); d++)
            for (int op = 0; op < counts[f]; op++) {
                const kernel k = { (family)f, op, dtypes[d] };
                off += measure(&k, rounds);
            }
    printf("%d off\n", off);
    return 0;
}
