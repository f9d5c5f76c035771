/* test_recipes.c - recipes below 16 bits: the quantiser bit for bit against a search through the
 * grid in double precision, a linear layer's three products against loops in double, counts,
 * refusals, random numbers, and a short training beside bf16. The arithmetic of the scales is that
 * of the sources named in mixp_recipe_kind, written here a second time.
 * SPDX-License-Identifier: MIT OR Unlicense */
#include "mixprec.h"
#include "test.h"
#include "reference/e8m0.h"
#include "reference/nvfp4.h"

/* --- the reference -------------------------------------------------------------------------- */

typedef struct grid { int mantissa, least; double max; } grid;     /* least: normal exponent */
static const grid grids[3] = { { 3, -6, 448.0 }, { 2, -14, 57344.0 }, { 1, 0, 6.0 } };
static const mixp_dtype elements[3] = { MIXP_F8_E4M3, MIXP_F8_E5M2, MIXP_F4_E2M1 };

/* x on the grid: the nearest value, the even multiple of the step on a tie, at most max. */
static double on_grid(const grid *g, double x) {
    double a = fabs(x), step, whole, rest;
    int e = 0;
    if (a != a) return x;
    if (a > g->max) a = g->max;
    frexp(a, &e);
    e = e - 1 < g->least ? g->least : e - 1;
    step = ldexp(1.0, e - g->mantissa);
    whole = floor(a / step);
    rest = a / step - whole;
    if (rest > 0.5 || (rest == 0.5 && fmod(whole, 2.0) == 1.0)) whole += 1.0;
    return copysign(whole * step, x);
}

typedef struct factors { double in, out; } factors;     /* x in is rounded; the result times out */

static double f32(double x) { return (double)(float)x; }
static int usable(double amax) { return amax > 0 && amax < 1e39; }
static double scale_to(double max, double amax) {
    double s = usable(amax) ? f32(max / amax) : 1.0;
    return s > (double)3.40282346638528859812e38f ? (double)3.40282346638528859812e38f : s;
}

/* The largest power of two that is not above s. */
static double power_below(double s) {
    int e;
    frexp(s, &e);
    return ldexp(1.0, e - 1);
}

/* amax, finite and above 0, as `how` rounds it to a power of two, less the element's largest; of the
 * exponent. */
static int exponent_of(mixp_e8m0_rounding how, const grid *g, double amax) {
    int e, top;
    frexp(g->max, &top);
    double m = frexp(amax, &e);                                /* 0.5 <= m < 1 */
    if (how == MIXP_E8M0_CEIL && m > 0.5) e++;
    if (how == MIXP_E8M0_EVEN && floor(ldexp(m, g->mantissa + 1) + 0.5) == ldexp(1.0, g->mantissa + 1)) e++;
    return e - top;
}

/* The exponent of an e8m0 scale. */
static int scale_exponent(mixp_e8m0_rounding how, const grid *g, double amax) {
    double t = amax < 1e39 ? f32(amax * f32(1.0 / g->max)) : amax;
    int e = -127;
    if (how == MIXP_E8M0_RCEIL) {
        while (e < 127 && ldexp(1.0, e) < t) e++;
        return e;
    }
    if (amax > 1e39) amax = ldexp(1.0, 128);            /* as Inf counts */
    if (amax > 0) e = exponent_of(how, g, amax);
    return e < -127 ? -127 : e;
}

/* expand: 1 or 1.5 for the two scales of 4over6; 0 otherwise. */
static factors factors_of(const mixp_quantise_args *k, const grid *g, double amax, double tensor, double expand) {
    const mixp_block_scale kind = k->scale;
    factors f = { 1.0, 1.0 };
    int e = 0;
    if (kind == MIXP_SCALE_TENSOR) f.in = tensor;
    if (kind == MIXP_SCALE_POWER) {
        frexp(scale_to(g->max, amax), &e);
        f.in = ldexp(1.0, e - 1);
        f.out = ldexp(1.0, 1 - e);
    }
    if (kind == MIXP_SCALE_E8M0) {
        if (amax != amax) f.in = f.out = amax;
        else {
            e = scale_exponent(k->e8m0, g, amax);
            f.in = ldexp(1.0, -e);
            f.out = ldexp(1.0, e);
        }
    }
    if (kind == MIXP_SCALE_E4M3) {
        double want = f32(amax * f32(tensor * f32(1.0 / 6.0)));
        if (expand > 0) want = f32(f32(f32(amax / 6.0) * tensor) * expand);
        if (amax > 1e39) want = amax - amax;                /* a block with an Inf becomes NaN */
        f.out = on_grid(&grids[0], want);
        f.in = amax == 0 ? 0.0 : f32(1.0 / f32(f.out * f32(1.0 / tensor)));
        if (f.in > 3.4028234663852886e38) f.in = 3.4028234663852886e38;
    }
    return f;
}

enum { ROWS = 256, COLS = 384, COUNT = ROWS * COLS };
static float source[COUNT];
static mixp_bf16 source_low[COUNT], got[COUNT], again[COUNT];
static float want[COUNT];
static int64_t chosen[2];               /* blocks of 4over6 whose largest value became 6, or 4 */
static float lines_got[COLS], lines_want[COLS];     /* the factors of rows or columns */

static double larger(double a, double b) { return a != a || a > b ? a : b; }

/* 4over6: the error of a row of 16 elements, or of a column, from element i on, with the factors f. all: the array's
 * amax; bound: 6 times 256 or 448. */
static double line_error(const mixp_quantise_args *k, int64_t i, int64_t step, factors f, double all, double bound) {
    double sum = 0;
    for (int e = 0; e < 16; e++) {
        const double x = (double)mixp_get(k->x, i + e * step), q = on_grid(&grids[2], f32(x * f.in));
        const double off = f32(f32(f32(f32(q * f.out) * all) / bound) - x);
        sum = f32(sum + (k->choice == MIXP_4OVER6_MSE ? f32(off * off) : fabs(off)));
    }
    return sum;
}

/* The error of the block at element i: the sums of its rows, those 8, 4, 2 and 1 rows apart added. */
static double block_error(const mixp_quantise_args *k, int64_t i, factors f, double all, double bound) {
    double rows[16];
    if (k->block_cols == 1) return line_error(k, i, k->cols, f, all, bound);
    for (int r = 0; r < k->block_rows; r++) rows[r] = line_error(k, i + r * k->cols, 1, f, all, bound);
    for (int n = (int)k->block_rows / 2; n; n /= 2)
        for (int r = 0; r < n; r++) rows[r] = f32(rows[r] + rows[r + n]);
    return rows[0];
}

/* The amax of a row, or of a column where blocks have one column. Columns are looked at once for all rows. */
static double line_amax(const mixp_quantise_args *k, int64_t line) {
    static double of[COLS];
    int64_t i;
    if (k->block_cols == 1 && line == 0) {
        memset(of, 0, sizeof of);
        for (i = 0; i < k->rows * k->cols; i++)
            of[i % k->cols] = larger(fabs((double)mixp_get(k->x, i)), of[i % k->cols]);
    }
    if (k->block_cols == 1) return of[line];
    of[0] = 0;
    for (i = line * k->cols; i < (line + 1) * k->cols; i++) of[0] = larger(fabs((double)mixp_get(k->x, i)), of[0]);
    return of[0];
}

/* The reference of mixp_quantise into want; returns the factor of the product. */
static double reference(const mixp_quantise_args *k) {
    const grid *g = &grids[k->element == MIXP_F8_E4M3 ? 0 : k->element == MIXP_F8_E5M2 ? 1 : 2];
    int64_t br = k->block_rows ? k->block_rows : k->rows, bc = k->block_cols ? k->block_cols : k->cols;
    double all = 0, tensor = 1.0;
    for (int64_t i = 0; i < k->rows * k->cols; i++) all = larger(fabs((double)mixp_get(k->x, i)), all);
    if (k->scale == MIXP_SCALE_TENSOR) tensor = scale_to(g->max, all);
    if (k->power) tensor = power_below(tensor);
    const double bound = k->choice && !k->bound_448 ? 1536.0 : 2688.0;
    if (k->scale == MIXP_SCALE_E4M3) tensor = scale_to(bound, all);
    if (k->by_lines) tensor = 1.0;
    for (int64_t r = 0; r < k->rows; r += br)
        for (int64_t c = 0; c < k->cols; c += bc) {
            double amax = 0, of_array = tensor;
            if (k->by_lines) {              /* a row, or column, is an array of its own */
                const int64_t line = bc == 1 ? c : r;
                all = line_amax(k, line);
                of_array = scale_to(bound, all);
                lines_want[line] = (float)(1.0 / of_array);
            }
            for (int64_t i = r; i < r + br; i++)
                for (int64_t j = c; j < c + bc; j++)
                    amax = larger(fabs((double)mixp_get(k->x, i * k->cols + j)), amax);
            factors f = factors_of(k, g, amax, of_array, k->choice ? 1.0 : 0.0);
            if (k->choice) {
                const factors four = factors_of(k, g, amax, of_array, 1.5);
                const int64_t at = r * k->cols + c;
                const int fits_4 = block_error(k, at, four, all, bound) < block_error(k, at, f, all, bound);
                if (fits_4) f = four;
                chosen[fits_4]++;
            }
            for (int64_t i = r; i < r + br; i++)
                for (int64_t j = c; j < c + bc; j++) {
                    double own = (double)mixp_get(k->x, i * k->cols + j), x = f32(own * f.in);
                    want[i * k->cols + j] = (float)((fabs(own) > 1e39 ? own : on_grid(g, x)) * f.out);
                }
        }
    return f32(1.0 / tensor);
}

/* Values over many exponents; `spread` 0: like a network's. */
static void fill_source(int spread, uint64_t key) {
    for (int i = 0; i < COUNT; i++) {
        uint32_t a = mixp_random_at(key, (uint64_t)i), b = mixp_random_at(key + 1, (uint64_t)i);
        double x = ((double)a / 4294967296.0 - 0.5) * ldexp(1.0, (int)(b % 12) - 6);
        if (spread) x = ldexp(x, (int)(b >> 8 & 63u) - 31);
        source[i] = (float)x;
    }
}

/* Blocks of 128 x 128 with an edge each; the last rows stay as they are. nonfinite: 1: a NaN; 2: a NaN and an Inf;
 * 3: an Inf, beside which no scale is NaN. */
static void plant_edges(int nonfinite) {
    const float inf = mixp_f32_of_bits(0x7F800000u), nan = mixp_f32_of_bits(0x7FC00000u);
    for (int i = 0; i < 128; i++)
        for (int j = 0; j < 128; j++) {
            source[i * COLS + j] = i % 2 ? 0.0f : -0.0f;                    /* zeros        */
            source[i * COLS + 128 + j] *= 1e-30f;
        }
    source[3 * COLS + 200] = 3e38f;                                         /* one huge value */
    for (int j = 0; j < 128; j++) source[(128 + 5) * COLS + j] = (float)j * 1e-41f;     /* subnormals */
    if (!nonfinite) return;
    source[200 * COLS + 300] = nonfinite < 3 ? nan : 1.0f;
    source[210 * COLS + 340] = nonfinite > 1 ? -inf : 1.0f;
}

/* Is a value where bf16 holds it exactly? */
static int in_bf16(float x) { return x == 0 || (fabs((double)x) >= 1.2e-38 && fabs((double)x) < 3e38); }

static int differ(const mixp_bf16 *y) {
    int i, n = 0;
    for (i = 0; i < COUNT; i++) {
        mixp_bf16 w = mixp_bf16_from_f32(want[i]);
        int nan = (y[i].bits & 0x7FFF) > 0x7F80, want_nan = want[i] != want[i];
        if (nan || want_nan ? nan != want_nan : y[i].bits != w.bits) {
            if (!n++) printf("  element %d: x %g, got %g, want %g\n", i, (double)source[i],
                             (double)mixp_f32_from_bf16(y[i]), (double)want[i]);
        }
        if (!nan && !want_nan && in_bf16(want[i]) && mixp_f32_from_bf16(w) != want[i]) n++;
    }
    return n;
}

/* --- the quantiser -------------------------------------------------------------------------- */

static mixp_context *context(int threads) {
    mixp_context_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.threads = threads;
    desc.seed = 7;
    return mixp_context_new(&desc);
}

/* over6: a mixp_4over6, with BOUND_448 and BY_LINES or without. */
enum { BOUND_448 = 4, BY_LINES = 8 };
typedef struct plan { mixp_block_scale scale; int element; int64_t rows, cols; mixp_e8m0_rounding e8m0; int power; int over6; } plan;
static const plan plans[] = {
    { MIXP_SCALE_TENSOR, 0, 0, 0, MIXP_E8M0_RCEIL, 0, 0 },
    { MIXP_SCALE_TENSOR, 1, 0, 0, MIXP_E8M0_RCEIL, 0, 0 },
    { MIXP_SCALE_POWER, 0, 1, 128, MIXP_E8M0_RCEIL, 0, 0 },
    { MIXP_SCALE_POWER, 0, 128, 1, MIXP_E8M0_RCEIL, 0, 0 },
    { MIXP_SCALE_POWER, 0, 128, 128, MIXP_E8M0_RCEIL, 0, 0 },
    { MIXP_SCALE_E8M0, 0, 1, 32, MIXP_E8M0_RCEIL, 0, 0 },
    { MIXP_SCALE_E8M0, 0, 32, 1, MIXP_E8M0_RCEIL, 0, 0 },
    { MIXP_SCALE_E8M0, 0, 32, 32, MIXP_E8M0_RCEIL, 0, 0 },
    { MIXP_SCALE_E8M0, 1, 1, 32, MIXP_E8M0_RCEIL, 0, 0 },
    { MIXP_SCALE_E8M0, 2, 1, 32, MIXP_E8M0_RCEIL, 0, 0 },
    { MIXP_SCALE_E4M3, 2, 1, 16, MIXP_E8M0_RCEIL, 0, 0 },
    { MIXP_SCALE_E4M3, 2, 16, 1, MIXP_E8M0_RCEIL, 0, 0 },
    { MIXP_SCALE_E4M3, 2, 16, 16, MIXP_E8M0_RCEIL, 0, 0 },
    { MIXP_SCALE_E8M0, 0, 1, 32, MIXP_E8M0_FLOOR, 0, 0 },
    { MIXP_SCALE_E8M0, 0, 1, 32, MIXP_E8M0_CEIL, 0, 0 },
    { MIXP_SCALE_E8M0, 0, 1, 32, MIXP_E8M0_EVEN, 0, 0 },
    { MIXP_SCALE_E8M0, 1, 32, 1, MIXP_E8M0_FLOOR, 0, 0 },
    { MIXP_SCALE_E8M0, 1, 32, 1, MIXP_E8M0_CEIL, 0, 0 },
    { MIXP_SCALE_E8M0, 1, 32, 1, MIXP_E8M0_EVEN, 0, 0 },
    { MIXP_SCALE_E8M0, 2, 1, 32, MIXP_E8M0_FLOOR, 0, 0 },
    { MIXP_SCALE_E8M0, 2, 1, 32, MIXP_E8M0_CEIL, 0, 0 },
    { MIXP_SCALE_E8M0, 2, 1, 32, MIXP_E8M0_EVEN, 0, 0 },
    { MIXP_SCALE_TENSOR, 0, 0, 0, MIXP_E8M0_RCEIL, 1, 0 },
    { MIXP_SCALE_TENSOR, 1, 0, 0, MIXP_E8M0_RCEIL, 1, 0 },
    { MIXP_SCALE_POWER, 1, 1, 128, MIXP_E8M0_RCEIL, 0, 0 },
    { MIXP_SCALE_POWER, 1, 128, 1, MIXP_E8M0_RCEIL, 0, 0 },
    { MIXP_SCALE_E8M0, 1, 32, 1, MIXP_E8M0_RCEIL, 0, 0 },
    { MIXP_SCALE_E4M3, 2, 1, 16, MIXP_E8M0_RCEIL, 0, MIXP_4OVER6_MAE },
    { MIXP_SCALE_E4M3, 2, 16, 1, MIXP_E8M0_RCEIL, 0, MIXP_4OVER6_MAE },
    { MIXP_SCALE_E4M3, 2, 16, 16, MIXP_E8M0_RCEIL, 0, MIXP_4OVER6_MAE },
    { MIXP_SCALE_E4M3, 2, 1, 16, MIXP_E8M0_RCEIL, 0, MIXP_4OVER6_MSE | BOUND_448 },
    { MIXP_SCALE_E4M3, 2, 16, 1, MIXP_E8M0_RCEIL, 0, MIXP_4OVER6_MSE | BOUND_448 },
    { MIXP_SCALE_E4M3, 2, 16, 16, MIXP_E8M0_RCEIL, 0, MIXP_4OVER6_MSE },
    { MIXP_SCALE_E4M3, 2, 1, 16, MIXP_E8M0_RCEIL, 0, BY_LINES },
    { MIXP_SCALE_E4M3, 2, 16, 1, MIXP_E8M0_RCEIL, 0, BY_LINES },
    { MIXP_SCALE_E4M3, 2, 1, 16, MIXP_E8M0_RCEIL, 0, MIXP_4OVER6_MAE | BY_LINES },
    { MIXP_SCALE_E4M3, 2, 16, 1, MIXP_E8M0_RCEIL, 0, MIXP_4OVER6_MSE | BOUND_448 | BY_LINES }
};
enum { PLANS = sizeof plans / sizeof plans[0] };

static mixp_quantise_args args_of(const plan *p, int low) {
    mixp_quantise_args k;
    memset(&k, 0, sizeof k);
    k.rows = ROWS;
    k.cols = COLS;
    k.x = low ? mixpi_in(source_low, MIXP_BF16) : mixpi_in(source, MIXP_F32);
    k.y = got;
    k.element = elements[p->element];
    k.scale = p->scale;
    k.block_rows = p->rows;
    k.block_cols = p->cols;
    k.e8m0 = p->e8m0;
    k.power = p->power;
    k.choice = (mixp_4over6)(p->over6 % BOUND_448);
    k.bound_448 = (p->over6 & BOUND_448) != 0;
    k.by_lines = (p->over6 & BY_LINES) != 0;
    k.line_scales = lines_got;
    return k;
}

static void against_reference(void) {
    mixp_context *one = context(1), *four = context(4);
    int p, low, kind, bad = 0;
    int64_t values = 0;
    for (kind = 0; kind < 6; kind++)
        for (p = 0; p < PLANS; p++)
            for (low = 0; low < 2; low++) {
                mixp_quantise_args k = args_of(&plans[p], low);
                float decode = 0;
                if (plans[p].over6 && (kind + low) % 2) continue;
                fill_source(kind & 1, (uint64_t)(kind * 100 + p));
                if (kind > 1) plant_edges(kind - 2);
                mixp_convert(source_low, MIXP_BF16, source, MIXP_F32, COUNT);
                double factor = reference(&k);
                CHECK_INT(mixp_quantise(mixp_context_exec(one), &k, &decode), MIXP_OK);
                CHECK_INT(mixp_bits_of_f32(decode), mixp_bits_of_f32((float)factor));
                if (k.by_lines)
                    CHECK(memcmp(lines_got, lines_want, sizeof(float) * (size_t)(k.block_cols == 1 ? COLS : ROWS)) == 0);
                if (differ(got)) {
                    printf("  kind %d, plan %d, low %d\n", kind, p, low);
                    bad++;
                }
                k.y = again;
                CHECK_INT(mixp_quantise(mixp_context_exec(four), &k, &decode), MIXP_OK);
                CHECK(memcmp(got, again, sizeof got) == 0);
                values += COUNT;
            }
    CHECK_INT(bad, 0);
    CHECK(chosen[0] > 10000 && chosen[1] > 10000);
    printf("  %lld values\n", (long long)values);
    mixp_context_free(one);
    mixp_context_free(four);
}

/* Every bf16 number as the only value that is not the scale's; 4over6: beside its neighbours. */
static void every_bf16(void) {
    mixp_context *ctx = context(1);
    for (int p = 0; p < 4; p++) {
        mixp_quantise_args k = args_of(&plans[p < 2 ? p : p + 25], 1);
        float decode;
        for (int i = 0; i < COUNT; i++) {
            const int finite = (i & 0x7F80) != 0x7F80 || p < 2;     /* otherwise their blocks are NaN */
            source_low[i].bits = (uint16_t)(i < 65536 && finite ? i : 0);
        }
        k.x.data = source_low;
        (void)reference(&k);
        CHECK_INT(mixp_quantise(mixp_context_exec(ctx), &k, &decode), MIXP_OK);
        CHECK_INT(differ(got), 0);
    }
    mixp_context_free(ctx);
}

/* Blocks of 32 quantised by torchao in each rounding of the scale. */
static void recorded(void) {
    mixp_context *ctx = context(1);
    for (int i = 0; i < E8M0_BLOCKS; i++)
        for (int how = 0; how < MIXP_E8M0_COUNT; how++) {
            const e8m0_block *b = &e8m0_blocks[i];
            mixp_quantise_args k = args_of(&plans[5], 0);
            float decode = 0;
            k.rows = 1;
            k.cols = 32;
            k.element = elements[b->element];
            k.e8m0 = (mixp_e8m0_rounding)how;
            for (int j = 0; j < 32; j++) source[j] = mixp_f32_of_bits(b->x[j % E8M0_VALUES]);
            CHECK_INT(mixp_quantise(mixp_context_exec(ctx), &k, &decode), MIXP_OK);
            CHECK(decode == 1.0f);
            for (int j = 0; j < 32; j++) {
                if (got[j].bits != b->y[how][j % E8M0_VALUES]) printf("  block %d, rounding %d, %d\n", i, how, j);
                CHECK_INT(got[j].bits, b->y[how][j % E8M0_VALUES]);
            }
        }
    mixp_context_free(ctx);
}

/* The value of a code of e2m1, and a byte of hexadecimal digits. */
static float e2m1_of(char digit) {
    static const float values[8] = { 0, 0.5f, 1, 1.5f, 2, 3, 4, 6 };
    const int code = digit <= '9' ? digit - '0' : digit - 'a' + 10;
    return code & 8 ? -values[code & 7] : values[code & 7];
}
static uint8_t byte_of(const char *digits) {
    const char text[3] = { digits[0], digits[1], 0 };
    return (uint8_t)strtoul(text, NULL, 16);
}

/* One array quantised by TransformerEngine: the codes of its blocks' scales, and its elements. */
static void recorded_array(const mixp_exec *x, const nvfp4_record *o) {
    uint8_t scales[NVFP4_ROWS * NVFP4_COLS / 16];
    const plan p = { MIXP_SCALE_E4M3, 2, o->block_rows, o->block_cols, MIXP_E8M0_RCEIL, 0,
                     o->choice | o->bound_448 * BOUND_448 | o->lines * BY_LINES };
    mixp_quantise_args k = args_of(&p, 1);
    const int64_t across = NVFP4_COLS / o->block_cols, blocks = NVFP4_ROWS / o->block_rows * across;
    float decode = 0;
    int wrong = 0;
    k.rows = NVFP4_ROWS;
    k.cols = NVFP4_COLS;
    k.x = mixpi_in(nvfp4_arrays[o->array], MIXP_BF16);
    k.scales = scales;
    CHECK_INT(mixp_quantise(x, &k, &decode), MIXP_OK);
    for (int64_t i = 0; i < blocks; i++) wrong += scales[i] != byte_of(o->scales + 2 * i);
    for (int64_t i = 0; i < NVFP4_ROWS * NVFP4_COLS; i++) {
        const int64_t block = i / NVFP4_COLS / o->block_rows * across + i % NVFP4_COLS / o->block_cols;
        const mixp_e4m3 d = { byte_of(o->scales + 2 * block) };
        wrong += mixp_f32_from_bf16(got[i]) != e2m1_of(o->codes[i]) * mixp_f32_from_e4m3(d);
    }
    if (wrong) printf("  record %d\n", (int)(o - nvfp4_records));
    CHECK_INT(wrong, 0);
}
static void recorded_nvfp4(void) {
    mixp_context *ctx = context(1);
    for (int i = 0; i < NVFP4_RECORDS; i++) recorded_array(mixp_context_exec(ctx), &nvfp4_records[i]);
    mixp_context_free(ctx);
}

/* A value between two steps is rounded up as often as its distance says, and the same way each
 * time. */
static void stochastic(void) {
    mixp_context *ctx = context(1);
    mixp_quantise_args k = args_of(&plans[10], 0);
    const double values[6] = { 0.1, 0.7, 1.2, 2.3, 3.9, 5.5 };
    float decode;
    k.stochastic = 1;
    for (int v = 0; v < 6; v++) {
        double sum = 0, low, high, p, sigma;
        for (int i = 0; i < COUNT; i++) source[i] = i % 16 ? (float)values[v] : 6.0f;
        k.seed = 1;
        k.step = (uint64_t)v;
        k.tensor = 2;
        k.y = got;
        CHECK_INT(mixp_quantise(mixp_context_exec(ctx), &k, &decode), MIXP_OK);
        k.y = again;
        CHECK_INT(mixp_quantise(mixp_context_exec(ctx), &k, &decode), MIXP_OK);
        CHECK(memcmp(got, again, sizeof got) == 0);
        k.tensor++;
        CHECK_INT(mixp_quantise(mixp_context_exec(ctx), &k, &decode), MIXP_OK);
        CHECK(memcmp(got, again, sizeof got) != 0);
        low = high = (double)(mixp_f32_from_bf16(got[1]) * decode);
        for (int i = 0; i < COUNT; i++) {
            double y = (double)(mixp_f32_from_bf16(got[i]) * decode);
            if (i % 16 == 0) continue;
            sum += y;
            low = y < low ? y : low;
            high = y > high ? y : high;
        }
        CHECK(low <= values[v] && values[v] <= high);
        CHECK_NEAR(high - low, values[v] < 2 ? 0.5 : values[v] < 4 ? 1.0 : 2.0, 1e-5);
        p = (values[v] - low) / (high - low);
        sigma = (high - low) * sqrt(p * (1 - p) / (COUNT / 16 * 15));
        CHECK_NEAR(sum / (COUNT / 16 * 15), values[v], 4 * sigma + 1e-5);
    }
    mixp_context_free(ctx);
}

/* --- the statistics of stochastic rounding ---
 * For a value x between its neighbours low and high, p = (x - low) / (high - low) of the roundings go up; u = (up - p)
 * / sqrt(p (1 - p)) has mean 0 and variance 1. Each sum below, divided by its standard deviation, is a normal number
 * where rounding is right: it exceeds 5.5 with probability 4e-8, and one of the 24 with 1e-6. */

enum { ROUNDS = 12 };
static double above[COUNT], u_now[COUNT], u_last[COUNT], u_other[COUNT];

/* Values in blocks of 16 whose largest, 6, gives the scales 1: each is then on its own scale. */
static void fill_between(void) {
    static const double steps[8] = { 0, 0.5, 1, 1.5, 2, 3, 4, 6 };
    for (int i = 0; i < COUNT; i++) {
        const double share = 0.05 + 0.9 * (double)mixp_random_at(77, (uint64_t)i) / 4294967296.0;
        const int at = (int)(mixp_random_at(78, (uint64_t)i) % 7u);
        source[i] = (float)(steps[at] + share * (steps[at + 1] - steps[at]));
        if (mixp_random_at(79, (uint64_t)i) & 1u) source[i] = -source[i];
        above[i] = (fabs((double)source[i]) - steps[at]) / (steps[at + 1] - steps[at]);
        if (i % 16 == 0) source[i] = 6.0f;
    }
}

/* u of each value in u; 0 of the blocks' largest, which are on the grid. */
static void round_once(const mixp_exec *x, uint64_t seed, uint64_t step, uint64_t tensor, double *u) {
    mixp_quantise_args k = args_of(&plans[10], 0);
    float decode = 0;
    k.stochastic = 1;
    k.seed = seed;
    k.step = step;
    k.tensor = tensor;
    CHECK_INT(mixp_quantise(x, &k, &decode), MIXP_OK);
    for (int i = 0; i < COUNT; i++) {
        const double a = fabs((double)source[i]), y = fabs((double)(mixp_f32_from_bf16(got[i]) * decode));
        u[i] = 0;
        if (i % 16) u[i] = ((y > a) - above[i]) / sqrt(above[i] * (1 - above[i]));
        else CHECK_NEAR(y, 6.0, 1e-6);
    }
}

/* Sums of u v, and the number of their terms. v: of the element `lag` further on. */
typedef struct moments { double sum; int64_t n; } moments;
static void add_products(moments *m, const double *u, const double *v, int lag) {
    for (int i = 0; i + lag < COUNT; i++) {
        m->sum += u[i] * v[i + lag];
        m->n += i % 16 && (i + lag) % 16;
    }
}

static void is_normal(const char *what, double sum, double variance) {
    const double z = sum / sqrt(variance);
    if (!(fabs(z) < 5.5)) printf("  %s: %.2f standard deviations\n", what, z);
    CHECK(fabs(z) < 5.5);
}

static void statistics(void) {
    static const int lags[18] = { 1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 17, 31, 33, 63, 65, COLS - 1, COLS, COLS + 1 };
    mixp_context *one = context(1), *four = context(4);
    moments by_lag[18], steps = { 0, 0 }, tensors = { 0, 0 }, seeds = { 0, 0 };
    double mean = 0, squares = 0, spread = 0, low = 0, low_n = 0;
    int64_t n = 0;
    memset(by_lag, 0, sizeof by_lag);
    fill_between();
    for (int round = 0; round < ROUNDS; round++) {
        round_once(mixp_context_exec(four), 1, (uint64_t)round, 2, u_now);
        memcpy(again, got, sizeof got);
        round_once(mixp_context_exec(one), 1, (uint64_t)round, 2, u_other);
        CHECK(memcmp(again, got, sizeof got) == 0);     /* at any number of threads */
        for (int i = 0; i < COUNT; i++) {
            const double p = above[i], u = u_now[i];
            if (i % 16 == 0) continue;
            n++;
            mean += u;
            squares += u * u - 1;
            spread += 1 / (p * (1 - p)) - 4;            /* the variance of u^2 */
            if (fabs((double)source[i]) >= 1) continue;
            low += u;                                   /* e2m1 has a step of its own below 1 */
            low_n++;
        }
        for (int k = 0; k < 18; k++) add_products(&by_lag[k], u_now, u_now, lags[k]);
        if (round) add_products(&steps, u_now, u_last, 0);
        round_once(mixp_context_exec(one), 1, (uint64_t)round, 3, u_other);
        add_products(&tensors, u_now, u_other, 0);
        round_once(mixp_context_exec(one), 2, (uint64_t)round, 2, u_other);
        add_products(&seeds, u_now, u_other, 0);
        memcpy(u_last, u_now, sizeof u_now);
    }
    is_normal("the mean", mean, (double)n);
    is_normal("the mean of numbers below 1", low, low_n);
    is_normal("the variance", squares, spread);
    for (int k = 0; k < 18; k++) is_normal("neighbours", by_lag[k].sum, (double)by_lag[k].n);
    is_normal("steps", steps.sum, (double)steps.n);
    is_normal("tensors", tensors.sum, (double)tensors.n);
    is_normal("seeds", seeds.sum, (double)seeds.n);
    mixp_context_free(one);
    mixp_context_free(four);
}

/* Entry i, j of the transform: the sign of row i, times -1 to the number of common bits of i and j,
 * divided by 4. */
static double hadamard_entry(int i, int j) {
    const char signs[] = "+++-+------+-+--";
    int common = i & j, odd = signs[i] == '-';
    for (; common; common &= common - 1) odd = !odd;
    return odd ? -0.25 : 0.25;
}

/* y[rows, cols] = the transform of numbers of bf16, each sum rounded to bf16 once, as
 * TransformerEngine's kernels do. */
static void hadamard_reference(const float *x, int64_t rows, int64_t cols, float *y) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < cols; c++) {
            double sum = 0;
            for (int i = 0; i < 16; i++)
                sum += hadamard_entry(i, (int)(r % 16)) * (double)x[(r - r % 16 + i) * cols + c];
            y[r * cols + c] = mixp_f32_from_bf16(mixp_bf16_from_f32((float)sum));
        }
}

/* The transform of the unit vectors is the matrix itself, which is orthogonal. */
static void hadamard_matrix(const mixp_exec *x) {
    float unit[16 * 16];
    mixp_bf16 h[16 * 16];
    for (int i = 0; i < 16 * 16; i++) unit[i] = i / 16 == i % 16 ? 1.0f : 0.0f;
    CHECK_INT(mixp_hadamard(x, 16, 16, mixpi_in(unit, MIXP_F32), h), MIXP_OK);
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 16; j++) {
            double dot = 0;
            CHECK((double)mixp_f32_from_bf16(h[j * 16 + i]) == hadamard_entry(i, j));
            for (int k = 0; k < 16; k++)
                dot += (double)mixp_f32_from_bf16(h[k * 16 + i]) * (double)mixp_f32_from_bf16(h[k * 16 + j]);
            CHECK(dot == (i == j ? 1.0 : 0.0));
        }
}

/* Numbers of bf16 within 2^12 of each other: their sums are exact in f32, and are rounded once. */
static void hadamard(void) {
    static float turned[COUNT];
    static mixp_bf16 y[COUNT], narrow[32 * 20];
    mixp_context *ctx = context(2);
    double before = 0, after = 0;
    int i, wrong = 0;
    hadamard_matrix(mixp_context_exec(ctx));
    fill_source(0, 5);
    mixp_convert(source_low, MIXP_BF16, source, MIXP_F32, COUNT);
    mixp_convert(source, MIXP_F32, source_low, MIXP_BF16, COUNT);
    hadamard_reference(source, ROWS, COLS, turned);
    CHECK_INT(mixp_hadamard(mixp_context_exec(ctx), ROWS, COLS, mixpi_in(source, MIXP_F32), y), MIXP_OK);
    for (i = 0; i < COUNT; i++) wrong += mixp_f32_from_bf16(y[i]) != turned[i];
    CHECK_INT(wrong, 0);
    CHECK_INT(mixp_hadamard(mixp_context_exec(ctx), ROWS, COLS, mixpi_in(source_low, MIXP_BF16), got), MIXP_OK);
    CHECK(memcmp(got, y, sizeof y) == 0);
    for (i = 0; i < COUNT; i++) {
        before += (double)source[i] * (double)source[i];
        after += (double)turned[i] * (double)turned[i];
    }
    CHECK_NEAR(after / before, 1.0, 1e-4);
    for (i = 0; i < 32 * 20; i++) want[i] = source[i / 20 * COLS + i % 20];     /* 20 columns alone */
    CHECK_INT(mixp_hadamard(mixp_context_exec(ctx), 32, 20, mixpi_in(want, MIXP_F32), narrow), MIXP_OK);
    for (i = 0; i < 32 * 20; i++) CHECK_INT(narrow[i].bits, y[i / 20 * COLS + i % 20].bits);
    mixp_context_free(ctx);
}

/* --- one instruction set beside another ------------------------------------------------------- */

static void *scratch_of(void *user, size_t bytes) {
    static uint32_t room[COLS];
    (void)user;
    return bytes <= sizeof room ? room : NULL;
}

static mixp_exec one_thread(void) {
    mixp_exec x;
    memset(&x, 0, sizeof x);
    x.threads = 1;
    x.scratch = scratch_of;
    return x;
}

/* Elements with other bits; every NaN is alike. */
static int other_bits(const mixp_bf16 *a, const mixp_bf16 *b) {
    int i, n = 0;
    for (i = 0; i < COUNT; i++) {
        const int nan = (a[i].bits & 0x7FFF) > 0x7F80;
        n += nan ? (b[i].bits & 0x7FFF) <= 0x7F80 : a[i].bits != b[i].bits;
    }
    return n;
}

static int quantise_differs(const mixp_device *a, const mixp_device *b, mixp_quantise_args k) {
    const mixp_exec x = one_thread();
    float first = 0, second = 0;
    memset(got, 0, sizeof got);
    memset(again, 0, sizeof again);
    k.decode = &first;
    CHECK_INT(a->kernels->quantise(&x, &k), MIXP_OK);
    k.y = again;
    k.decode = &second;
    k.line_scales = lines_want;
    CHECK_INT(b->kernels->quantise(&x, &k), MIXP_OK);
    if (k.by_lines && memcmp(lines_got, lines_want, sizeof(float) * (size_t)mixpi_quantise_lines(&k))) return 1;
    return other_bits(got, again) || mixp_bits_of_f32(first) != mixp_bits_of_f32(second);
}

static int hadamard_differs(const mixp_device *a, const mixp_device *b, int low) {
    static mixp_bf16 one[COUNT], two[COUNT];
    const mixp_exec x = one_thread();
    mixp_hadamard_args k;
    k.rows = 48;
    k.cols = 16 * 3 + 5;
    k.a = low ? mixpi_in(source_low, MIXP_BF16) : mixpi_in(source, MIXP_F32);
    k.y = one;
    CHECK_INT(a->kernels->hadamard(&x, &k), MIXP_OK);
    k.y = two;
    CHECK_INT(b->kernels->hadamard(&x, &k), MIXP_OK);
    return memcmp(one, two, sizeof one) != 0;
}

/* One plan, from f32 or bf16, to nearest or at random, in rows that fill vectors or do not. */
static int plan_differs(const mixp_device *a, const mixp_device *b, const plan *p, int how) {
    mixp_quantise_args k = args_of(p, how & 1);
    k.stochastic = (how & 2) && k.element == MIXP_F4_E2M1;
    k.seed = (uint64_t)how;
    if ((how & 4) && k.block_cols < 2) k.cols = 131;
    if (!quantise_differs(a, b, k)) return 0;
    printf("  %s and %s: plan %d, %d\n", a->name, b->name, (int)(p - plans), how);
    return 1;
}

/* Quick: each plan in every fourth way, and in each way on every fourth set; `turn` counts the sets. */
static int sets_differ(const mixp_device *a, const mixp_device *b, int turn) {
    const int quick = getenv("MIXPREC_TEST_QUICK") != NULL;
    int kind, p, how, bad = 0;
    for (kind = 0; kind < 6; kind++) {
        fill_source(kind & 1, (uint64_t)(900 + kind));
        if (kind > 1) plant_edges(kind - 2);
        mixp_convert(source_low, MIXP_BF16, source, MIXP_F32, COUNT);
        if (kind < 2) bad += hadamard_differs(a, b, 0) + hadamard_differs(a, b, 1);
        for (p = 0; p < PLANS; p++)
            for (how = 0; how < 8; how++)
                if ((!quick || (kind + p + how + turn) % 4 == 0) && (!plans[p].over6 || (kind % 2 && !(how & 2))))
                    bad += plan_differs(a, b, &plans[p], how);
    }
    return bad;
}

static void instruction_sets(void) {
    const mixp_device *first = NULL;
    int isa, others = 0;
    for (isa = 0; isa < MIXP_ISA_COUNT; isa++) {
        const mixp_device *d = mixp_cpu_with((mixp_isa)isa);
        if (!d) continue;
        if (first) CHECK_INT(sets_differ(first, d, others), 0);
        if (first) others++;
        else first = d;
    }
    if (!others) SKIP("this processor has one instruction set");
}

/* --- refusals --------------------------------------------------------------------------------- */

static void nv(mixp_quantise_args *k) {
    k->element = MIXP_F4_E2M1;
    k->scale = MIXP_SCALE_E4M3;
    k->block_cols = 16;
}

static void quantiser_refuses(void) {
    mixp_context *ctx = context(1);
    const mixp_exec *x = mixp_context_exec(ctx);
    mixp_quantise_args good = args_of(&plans[5], 0), k;
    float decode = 77.0f;
    memset(got, 0x5A, sizeof got);
    memcpy(again, got, sizeof got);
#define REFUSES(change, code) do { k = good; change; CHECK_INT(mixp_quantise(x, &k, &decode), code); } while (0)
    REFUSES(k.x.data = NULL, MIXP_ERR_ARGUMENT);
    REFUSES(k.y = NULL, MIXP_ERR_ARGUMENT);
    REFUSES(k.rows = 0, MIXP_ERR_ARGUMENT);
    REFUSES(k.element = MIXP_F16, MIXP_ERR_ARGUMENT);
    REFUSES(k.scale = MIXP_SCALE_COUNT, MIXP_ERR_ARGUMENT);
    REFUSES(k.e8m0 = MIXP_E8M0_COUNT, MIXP_ERR_ARGUMENT);
    REFUSES(k.stochastic = 1, MIXP_ERR_ARGUMENT);
    REFUSES(k.choice = MIXP_4OVER6_MAE, MIXP_ERR_ARGUMENT);
    REFUSES(nv(&k); k.choice = MIXP_4OVER6_COUNT, MIXP_ERR_ARGUMENT);
    REFUSES(nv(&k); k.choice = MIXP_4OVER6_MSE; k.element = MIXP_F8_E4M3, MIXP_ERR_ARGUMENT);
    REFUSES(nv(&k); k.choice = MIXP_4OVER6_MSE; k.stochastic = 1, MIXP_ERR_ARGUMENT);
    REFUSES(nv(&k); k.choice = MIXP_4OVER6_MSE; k.block_cols = 32, MIXP_ERR_SHAPE);
    REFUSES(nv(&k); k.choice = MIXP_4OVER6_MSE; k.block_rows = 32; k.block_cols = 1, MIXP_ERR_SHAPE);
    REFUSES(k.by_lines = 1; k.line_scales = lines_got, MIXP_ERR_ARGUMENT);
    REFUSES(nv(&k); k.by_lines = 1; k.line_scales = NULL, MIXP_ERR_ARGUMENT);
    REFUSES(nv(&k); k.by_lines = 1; k.line_scales = lines_got; k.block_rows = 16, MIXP_ERR_SHAPE);
    REFUSES(k.x.dtype = MIXP_F16, MIXP_ERR_DTYPE);
    REFUSES(k.block_cols = 31, MIXP_ERR_SHAPE);
    REFUSES(k.block_cols = 0, MIXP_ERR_SHAPE);
    REFUSES(k.block_cols = 256, MIXP_ERR_SHAPE);
    REFUSES(k.block_rows = 2, MIXP_ERR_SHAPE);
    REFUSES(k.rows = 250; k.block_rows = 32; k.block_cols = 1, MIXP_ERR_SHAPE);
    REFUSES(k.scale = MIXP_SCALE_TENSOR, MIXP_ERR_SHAPE);
    CHECK_INT(mixp_quantise(x, NULL, &decode), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_quantise(NULL, &good, &decode), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_hadamard(x, 24, 4, mixpi_in(source, MIXP_F32), got), MIXP_ERR_SHAPE);
    CHECK_INT(mixp_hadamard(x, 16, 4, mixpi_in(source, MIXP_F16), got), MIXP_ERR_DTYPE);
    CHECK_INT(mixp_hadamard(x, 16, 4, mixpi_in(NULL, MIXP_F32), got), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_hadamard(x, 16, 4, mixpi_in(source, MIXP_F32), NULL), MIXP_ERR_ARGUMENT);
    CHECK(decode == 77.0f && memcmp(got, again, sizeof got) == 0);
    mixp_context_free(ctx);
}

/* --- a linear layer ------------------------------------------------------------------------- */

enum { M = 128, N = 256, K = 384 };     /* rows of x, outputs, inputs: x and w are `source` long */
static float xs[M * K], ws[N * K], dys[M * N];
static double qx[M * K], qw[N * K], qdy[M * N];

/* An operand as the recipe's source quantises it, in double; what the product is to be. A plan with the scale
 * MIXP_SCALE_COUNT leaves it as it is. */
static void operand(const float *x, int64_t rows, int64_t cols, const plan *p, int turn, double *y) {
    static float turned[N * K];
    mixp_quantise_args k;
    memset(&k, 0, sizeof k);
    k.rows = rows;
    k.cols = cols;
    k.x = mixpi_in(x, MIXP_F32);
    k.element = elements[p->element];
    k.scale = p->scale;
    k.block_rows = p->rows;
    k.block_cols = p->cols;
    k.e8m0 = p->e8m0;
    k.power = p->power;
    k.choice = (mixp_4over6)(p->over6 % BOUND_448);
    k.bound_448 = (p->over6 & BOUND_448) != 0;
    k.by_lines = (p->over6 & BY_LINES) != 0;
    k.line_scales = lines_got;
    if (p->scale == MIXP_SCALE_COUNT) {
        for (int64_t i = 0; i < rows * cols; i++) y[i] = (double)x[i];
        return;
    }
    if (turn) {
        hadamard_reference(x, rows, cols, turned);
        k.x = mixpi_in(turned, MIXP_F32);
    }
    double factor = reference(&k);
    for (int64_t i = 0; i < rows * cols; i++) {
        const double line = k.by_lines ? (double)lines_want[p->cols == 1 ? i % cols : i / cols] : 1.0;
        y[i] = (double)want[i] * factor * line;
    }
}

enum { IN_F32, IN_BF16 };

/* The largest error of got[rows, cols] against a sum over n, as a share of the sum's magnitudes. low: of what
 * exceeds one rounding to bf16. */
static double error_of(const double *a, int a_rows, const double *b, int b_rows, const float *y,
                       int64_t rows, int64_t cols, int64_t n, int low) {
    double worst = 0;
    int64_t i, j, s;
    for (i = 0; i < rows; i += 3)
        for (j = 0; j < cols; j += 5) {
            double sum = 0, size = 1e-30;
            for (s = 0; s < n; s++) {
                double p = (a_rows ? a[s * rows + i] : a[i * n + s]) *
                           (b_rows ? b[s * cols + j] : b[j * n + s]);
                sum += p;
                size += fabs(p);
            }
            sum = fabs((double)y[i * cols + j] - sum) - (low ? ldexp(fabs(sum), -8) : 0.0);
            worst = fmax(worst, sum / size);
        }
    return worst;
}

static void fill_low(float *x, int n, uint64_t key, double size) {
    for (int i = 0; i < n; i++) {
        double u = (double)mixp_random_at(key, (uint64_t)i) / 4294967296.0 - 0.5;
        double v = (double)mixp_random_at(key + 1, (uint64_t)i) / 4294967296.0;
        x[i] = mixp_f32_from_bf16(mixp_bf16_from_f32((float)(u * exp(3 * v) * size)));
    }
}

/* The same, but each second group of 16 rows, and of 16 columns, is 2^12 smaller: what a block does not share with
 * its neighbours shows. */
static void fill_groups(float *x, int rows, int cols, uint64_t key, double size) {
    fill_low(x, rows * cols, key, size);
    for (int i = 0; i < rows * cols; i++) {
        if (i / cols / 16 % 2) x[i] *= 1.0f / 4096;
        if (i % cols / 16 % 2) x[i] *= 1.0f / 4096;
    }
}

typedef struct six { plan x, w, dy, x_rows, w_rows, dy_rows; } six;

static void linear_of(const mixp_recipe *recipe, const six *p, int turn) {
    mixp_context *ctx = context(2);
    const int64_t ws_shape[2] = { N, K }, xs_shape[2] = { M, K }, dys_shape[2] = { M, N }, all[1] = { M * N };
    mixp_autocast region = { MIXP_BF16, 1, NULL };
    mixp_tensor *w = mixp_param(ctx, "w", MIXP_F32, 2, ws_shape), *x, *y, *dy;
    static float y_got[M * N], dx_got[M * K], dw_got[N * K];
    region.recipe = recipe;
    fill_groups(xs, M, K, 1, 1.0);
    fill_groups(ws, N, K, 3, 0.02);
    fill_groups(dys, M, N, 5, 1e-4);
    mixp_write(w, ws, MIXP_F32, N * K);
    mixp_step_begin(ctx);
    x = mixp_input(ctx, MIXP_F32, 2, xs_shape, xs);
    mixp_tensor_set_requires_grad(x, 1);
    dy = mixp_input(ctx, MIXP_F32, 2, dys_shape, dys);
    CHECK_INT(mixp_autocast_open_with(ctx, &region), 0);
    y = mixp_linear(ctx, x, w, NULL);
    mixp_autocast_close(ctx, 0);
    dy = mixp_reshape(ctx, mixp_mul(ctx, y, dy), 1, all);
    CHECK_INT(mixp_backward(ctx, mixp_sum(ctx, dy, 0, 0)), MIXP_OK);
    mixp_read(y, y_got, MIXP_F32, M * N);
    mixp_read(x->grad, dx_got, MIXP_F32, M * K);
    mixp_read(w->grad, dw_got, MIXP_F32, N * K);
    operand(xs, M, K, &p->x, 0, qx);
    operand(ws, N, K, &p->w, 0, qw);
    CHECK(error_of(qx, 0, qw, 0, y_got, M, N, K, IN_BF16) < 1e-6);
    operand(dys, M, N, &p->dy, 0, qdy);
    operand(ws, N, K, &p->w_rows, 0, qw);
    CHECK(error_of(qdy, 0, qw, 1, dx_got, M, K, N, IN_BF16) < 1e-6);
    operand(dys, M, N, &p->dy_rows, turn, qdy);
    operand(xs, M, K, &p->x_rows, turn, qx);
    CHECK(error_of(qdy, 1, qx, 1, dw_got, N, K, M, IN_F32) < 1e-6);
    mixp_recipe_counts counts = mixp_autocast_recipe_counts(ctx);
    CHECK_INT(counts.products, 3 - recipe->wgrad_high);
    CHECK_INT(counts.quantised, 1);
    CHECK_INT(counts.kept + counts.unfit, 0);
    mixp_context_free(ctx);
}

static mixp_recipe recipe_of(mixp_recipe_kind kind) {
    mixp_recipe r;
    memset(&r, 0, sizeof r);
    r.kind = kind;
    return r;
}

/* The switches that change how an operand is quantised, or whether a product is. */
static void switches(void) {
    const plan b1 = plans[2], b2 = plans[3], m1 = plans[5], m2 = plans[6], e4p = plans[22], e5p = plans[23];
    const plan none = { MIXP_SCALE_COUNT, 0, 0, 0, MIXP_E8M0_RCEIL, 0, 0 };
    const six power = { e4p, e4p, e5p, e4p, e4p, e5p }, rows = { b1, b1, b1, b2, b2, b2 };
    const six no_wgrad = { m1, m1, m1, none, m2, none };
    const struct {
        mixp_recipe recipe;
        const six  *operands;
    } cases[] = {
        { { .kind = MIXP_RECIPE_FP8_CURRENT, .power_2 = 1 }, &power },
        { { .kind = MIXP_RECIPE_FP8_BLOCK, .no_2d = 1 }, &rows },
        { { .kind = MIXP_RECIPE_MXFP8, .wgrad_high = 1 }, &no_wgrad }
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) linear_of(&cases[i].recipe, cases[i].operands, 0);
}

static void products(void) {
    const plan e4 = plans[0], e5 = plans[1], b1 = plans[2], b2 = plans[3], bb = plans[4];
    const plan m1 = plans[5], m2 = plans[6], n1 = plans[10], n2 = plans[11], nn = plans[12];
    const plan f1 = { MIXP_SCALE_E8M0, 0, 1, 32, MIXP_E8M0_FLOOR, 0, 0 }, f2 = { MIXP_SCALE_E8M0, 0, 32, 1, MIXP_E8M0_FLOOR, 0, 0 };
    const six floor_of = { f1, f1, f1, f2, f2, f2 };
    const six current = { e4, e4, e5, e4, e4, e5 }, current4 = { e4, e4, e4, e4, e4, e4 };
    const six block = { b1, bb, b1, b2, bb, b2 }, mx = { m1, m1, m1, m2, m2, m2 };
    const six nv = { n1, nn, n1, n2, nn, n2 }, nv1 = { n1, n1, n1, n2, n2, n2 };
    const six x_over6 = { plans[27], n1, n1, plans[28], n2, n2 }, w_over6 = { n1, plans[30], n1, n2, plans[31], n2 };
    const plan none = { MIXP_SCALE_COUNT, 0, 0, 0, MIXP_E8M0_RCEIL, 0, 0 };
    const six lines = { plans[33], nn, n1, plans[34], nn, n2 }, lines_forward = { plans[35], nn, n1, none, nn, none };
    const six lines_over6 = { plans[33], plans[30], n1, plans[34], plans[31], n2 };
    const six w_square = { n1, plans[32], n1, n2, plans[32], n2 };
    mixp_recipe r;
    memset(&r, 0, sizeof r);
    r.kind = MIXP_RECIPE_FP8_CURRENT;
    linear_of(&r, &current, 0);
    r.dy_e4m3 = 1;
    linear_of(&r, &current4, 0);
    r.kind = MIXP_RECIPE_FP8_BLOCK;
    linear_of(&r, &block, 0);
    r.kind = MIXP_RECIPE_MXFP8;
    linear_of(&r, &mx, 0);
    r.e8m0 = MIXP_E8M0_FLOOR;
    linear_of(&r, &floor_of, 0);
    r.e8m0 = MIXP_E8M0_RCEIL;
    r.kind = MIXP_RECIPE_NVFP4;
    r.no_stochastic = 1;
    linear_of(&r, &nv, 1);
    r.no_2d = r.no_hadamard = 1;
    linear_of(&r, &nv1, 0);
    r.x_4over6 = MIXP_4OVER6_MAE;
    linear_of(&r, &x_over6, 0);
    r.w_4over6 = MIXP_4OVER6_MSE;
    r.bound_448 = 1;
    r.x_4over6 = MIXP_4OVER6_NONE;
    linear_of(&r, &w_over6, 0);
    r.row_scaled = 1;
    linear_of(&r, &lines_over6, 0);
    r.row_scaled = r.no_2d = r.no_hadamard = r.bound_448 = 0;
    linear_of(&r, &w_square, 1);
    r.row_scaled = r.no_hadamard = 1;
    r.w_4over6 = MIXP_4OVER6_NONE;
    linear_of(&r, &lines, 0);
    r.wgrad_high = 1;
    r.x_4over6 = MIXP_4OVER6_MAE;
    linear_of(&r, &lines_forward, 0);
}

/* The first 16 rows of y = x w' + b, of `rows` rows, without a gradient; an outlier stands in the last row. */
static void first_rows(int row_scaled, int64_t rows, float *y) {
    mixp_context *ctx = context(2);
    const int64_t ws_shape[2] = { N, K }, xs_shape[2] = { rows, K }, bs_shape = N;
    mixp_recipe r = recipe_of(MIXP_RECIPE_NVFP4);
    mixp_tensor *w = mixp_param(ctx, "w", MIXP_F32, 2, ws_shape), *b = mixp_param(ctx, "b", MIXP_F32, 1, &bs_shape), *t;
    static float all[M * N];
    fill_low(xs, M * K, 1, 1.0);
    xs[(M - 1) * K + 5] = 3e4f;
    fill_low(ws, N * K, 3, 0.02);
    mixp_write(w, ws, MIXP_F32, N * K);
    mixp_fill(b, 0.25);
    r.no_hadamard = 1;
    r.row_scaled = row_scaled;
    CHECK_INT(mixp_autocast_set_recipe(ctx, &r), MIXP_OK);
    mixp_step_begin(ctx);
    t = mixp_input(ctx, MIXP_F32, 2, xs_shape, xs);
    MIXP_NO_GRAD(ctx) MIXP_AUTOCAST(ctx, MIXP_BF16) t = mixp_linear(ctx, t, w, b);
    CHECK_INT(mixp_read(t, all, MIXP_F32, rows * N), MIXP_OK);
    memcpy(y, all, 16 * N * sizeof *y);
    mixp_context_free(ctx);
}

/* With scales of rows no row depends on another. */
static void rows_alone(void) {
    static float few[16 * N], many[16 * N];
    for (int row_scaled = 0; row_scaled < 2; row_scaled++) {
        first_rows(row_scaled, 16, few);
        first_rows(row_scaled, M, many);
        CHECK_INT(memcmp(few, many, sizeof few) == 0, row_scaled);
    }
}

/* The gradients of x and w, for a dy whose blocks of 16 rows, and of 16 columns, each have the largest magnitude 1. */
static void gradients_of(mixp_context *ctx, mixp_tensor *w, float *dx, float *dw) {
    const int64_t xs_shape[2] = { M, K }, dys_shape[2] = { M, N };
    mixp_tensor *x = mixp_input(ctx, MIXP_F32, 2, xs_shape, xs), *y = NULL;
    mixp_tensor_set_requires_grad(x, 1);
    w->grad = NULL;
    MIXP_AUTOCAST(ctx, MIXP_BF16) y = mixp_linear(ctx, x, w, NULL);
    y = mixp_mul(ctx, y, mixp_input(ctx, MIXP_F32, 2, dys_shape, dys));
    CHECK_INT(mixp_backward(ctx, mixp_sum(ctx, y, MIXP_ALL, 0)), MIXP_OK);
    mixp_read(x->grad, dx, MIXP_F32, M * K);
    mixp_read(w->grad, dw, MIXP_F32, N * K);
}

/* NVFP4's gradient of a weight is right in the mean of many steps, and rounds otherwise in each step, in each
 * micro-batch, and for each of the products that read dy. Its 4,000 sums deviate by 5.5 standard deviations with
 * probability 5e-4; the mean of their squares has the deviation 0.02. */
static void unbiased(void) {
    enum { TIMES = 120, SOME = 4000 };
    static float dx[2][M * K], dw[2][N * K];
    static double sum[SOME], square[SOME];
    mixp_context *ctx = context(1);
    mixp_recipe r = recipe_of(MIXP_RECIPE_NVFP4);
    const int64_t ws_shape[2] = { N, K };
    mixp_tensor *w = mixp_param(ctx, "w", MIXP_F32, 2, ws_shape);
    double all = 0;
    int i, t, j, m, counted = 0;
    r.no_hadamard = 1;
    fill_low(xs, M * K, 1, 1.0);
    fill_low(ws, N * K, 3, 0.02);
    for (i = 0; i < M * N; i++) {
        const double v = (double)mixp_random_at(5, (uint64_t)i) / 4294967296.0 - 0.5;
        dys[i] = mixp_f32_from_bf16(mixp_bf16_from_f32((float)v));
        if (i / N % 16 == i % N % 16) dys[i] = v < 0 ? -1.0f : 1.0f;
    }
    operand(xs, M, K, &plans[11], 0, qx);
    memset(sum, 0, sizeof sum);
    memset(square, 0, sizeof square);
    mixp_write(w, ws, MIXP_F32, N * K);
    CHECK_INT(mixp_autocast_set_recipe(ctx, &r), MIXP_OK);
    for (t = 0; t < TIMES; t++) {
        mixp_step_begin(ctx);
        gradients_of(ctx, w, dx[t & 1], dw[t & 1]);
        if (t) CHECK(memcmp(dx[0], dx[1], sizeof dx[0]) != 0 && memcmp(dw[0], dw[1], sizeof dw[0]) != 0);
        for (i = 0; i < SOME; i++) {
            sum[i] += (double)dw[t & 1][i * 23];
            square[i] += (double)dw[t & 1][i * 23] * (double)dw[t & 1][i * 23];
        }
    }
    for (i = 0; i < SOME; i++) {
        const double mean = sum[i] / TIMES, variance = (square[i] / TIMES - mean * mean) / (TIMES - 1);
        double exact = 0, z;
        j = i * 23;
        for (m = 0; m < M; m++) exact += (double)dys[m * N + j / K] * qx[m * K + j % K];
        if (variance < 1e-12) continue;
        z = (mean - exact) / sqrt(variance);
        all += z * z;
        counted++;
        if (!(fabs(z) < 5.5)) printf("  dw[%d]: %.2f standard deviations\n", j, z);
        CHECK(fabs(z) < 5.5);
    }
    CHECK(counted > SOME / 2);
    CHECK_NEAR(all / counted, 1.0, 0.1);
    mixp_step_begin(ctx);           /* two micro-batches of one step */
    for (t = 0; t < 2; t++) gradients_of(ctx, w, dx[t], dw[t]);
    CHECK(memcmp(dx[0], dx[1], sizeof dx[0]) != 0);
    mixp_context_free(ctx);
}

static int heard;
static void hear(const char *message, void *user) {
    (void)message;
    (void)user;
    heard++;
}

/* Applies linears of these widths to 64 rows, in a block; returns the counts. */
static mixp_recipe_counts counted(const mixp_recipe *recipe, const int *widths, int n, int64_t rows) {
    mixp_context_desc desc;
    mixp_tensor *w[8], *x;
    int64_t shape[2];
    int i, pass;
    memset(&desc, 0, sizeof desc);
    desc.threads = 1;
    desc.on_warning = hear;
    mixp_context *ctx = mixp_context_new(&desc);
    heard = 0;
    for (i = 0; i + 1 < n; i++) {
        char name[16];
        snprintf(name, sizeof name, "w%d", i);
        shape[0] = widths[i + 1];
        shape[1] = widths[i];
        w[i] = mixp_param(ctx, name, MIXP_F32, 2, shape);
        mixp_init_normal(w[i], 0, 0.1);
    }
    CHECK_INT(mixp_autocast_set_recipe(ctx, recipe), MIXP_OK);
    for (pass = 0; pass < 2; pass++) {
        mixp_step_begin(ctx);
        shape[0] = rows;
        shape[1] = widths[0];
        x = mixp_activation(ctx, MIXP_F32, 2, shape);
        mixp_fill(x, 0.5);
        MIXP_AUTOCAST(ctx, MIXP_BF16) for (i = 0; i + 1 < n; i++) x = mixp_linear(ctx, x, w[i], NULL);
        MIXP_AUTOCAST(ctx, MIXP_F32) (void)mixp_linear(ctx, x, mixp_param(ctx, "f", MIXP_F32, 2, shape), NULL);
    }
    mixp_recipe_counts counts = mixp_autocast_recipe_counts(ctx);
    CHECK_INT(heard, counts.unfit != 0);        /* once, in two steps of several linears */
    if (counts.unfit) {
        char size[32];
        snprintf(size, sizeof size, "%d, %d and %d", (int)rows, (int)counts.unfit_sizes[1], (int)counts.unfit_sizes[2]);
        CHECK_TEXT(mixp_context_warning(ctx), counts.unfit_name);
        CHECK_TEXT(mixp_context_warning(ctx), size);
        CHECK_TEXT(mixp_context_warning(ctx), "are not all multiples of ");
        CHECK_TEXT(mixp_context_warning(ctx), mixp_recipe_name(recipe->kind));
    } else CHECK(!*mixp_context_warning(ctx));
    mixp_autocast_reset_counts(ctx);
    CHECK_INT(mixp_autocast_recipe_counts(ctx).quantised, 0);
    mixp_context_free(ctx);
    return counts;
}

static void counts(void) {
    const int even[6] = { 64, 64, 64, 64, 64, 64 }, odd[4] = { 64, 64, 65, 64 };
    mixp_recipe r;
    memset(&r, 0, sizeof r);
    r.kind = MIXP_RECIPE_MXFP8;
    mixp_recipe_counts c = counted(&r, even, 6, 64);
    CHECK_INT(c.quantised, 10);
    CHECK_INT(c.kept, 0);
    memset(&r, 0, sizeof r);
    r.kind = MIXP_RECIPE_FP8_CURRENT;
    c = counted(&r, odd, 4, 64);
    CHECK_INT(c.quantised, 2);
    CHECK_INT(c.unfit, 4);
    CHECK_TEXT(c.unfit_name, "w1");
    CHECK_INT(c.unfit_sizes[0], 64);
    CHECK_INT(c.unfit_sizes[1], 65);
    CHECK_INT(c.unfit_sizes[2], 64);
    c = counted(&r, even, 6, 63);
    CHECK_INT(c.unfit, 10);
    c = counted(NULL, even, 6, 64);
    CHECK_INT(c.quantised + c.kept + c.unfit, 0);
}

/* Three linears of one x, one after another. pin: a pattern, or NULL. Returns a letter for each result: b if the
 * result has the bits of a linear in bf16, q if it has the bits of a linear under the recipe's kind with no other field
 * set. */
static const char *kept(const mixp_recipe *recipe, const char *pin, mixp_dtype to) {
    enum { LINEARS = 3, SIZE = 32 };
    static float ran[3][LINEARS][SIZE * SIZE];
    static char letters[LINEARS + 1];
    const int64_t shape[2] = { SIZE, SIZE };
    mixp_recipe plain = recipe_of(recipe->kind);
    int way, i;
    fill_low(xs, SIZE * SIZE, 1, 1.0);
    for (way = 0; way < 3; way++) {             /* 0: in bf16; 1: under the kind alone; 2: under the recipe */
        mixp_context *ctx = context(1);
        mixp_tensor *w[LINEARS];
        for (i = 0; i < LINEARS; i++) {
            char name[8];
            snprintf(name, sizeof name, "w%d", i);
            w[i] = mixp_param(ctx, name, MIXP_F32, 2, shape);
            mixp_init_normal(w[i], 0, 0.1);
        }
        if (way) CHECK_INT(mixp_autocast_set_recipe(ctx, way == 2 ? recipe : &plain), MIXP_OK);
        CHECK_INT(mixp_guard_start(ctx, NULL), MIXP_OK);
        if (way == 2 && pin) CHECK_INT(mixp_guard_pin(ctx, pin, to), MIXP_OK);
        mixp_step_begin(ctx);
        MIXP_AUTOCAST(ctx, MIXP_BF16)
            for (i = 0; i < LINEARS; i++)
                mixp_read(mixp_linear(ctx, mixp_input(ctx, MIXP_F32, 2, shape, xs), w[i], NULL), ran[way][i], MIXP_F32,
                          SIZE * SIZE);
        CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
        if (way == 2) CHECK_INT(mixp_autocast_recipe_counts(ctx).kept, LINEARS - mixp_autocast_recipe_counts(ctx).quantised);
        mixp_context_free(ctx);
    }
    for (i = 0; i < LINEARS; i++) {
        const size_t bytes = sizeof ran[0][0];
        CHECK(memcmp(ran[0][i], ran[1][i], bytes) != 0);
        letters[i] = !memcmp(ran[2][i], ran[0][i], bytes) ? 'b' : !memcmp(ran[2][i], ran[1][i], bytes) ? 'q' : '?';
    }
    return letters;
}

/* Which linears stay bf16: those that a pin names. */
static void which_are_kept(void) {
    mixp_recipe r = recipe_of(MIXP_RECIPE_MXFP8);
    CHECK(strcmp(kept(&r, NULL, MIXP_BF16), "qqq") == 0);
    CHECK(strcmp(kept(&r, "*w1*", MIXP_BF16), "qbq") == 0);
    CHECK(strcmp(kept(&r, "*w?: linear", MIXP_BF16), "bbb") == 0);
    CHECK(strcmp(kept(&r, "*w2*", MIXP_DTYPE_COUNT), "qqq") == 0);
}

#define REFUSED(ctx, call, code, text)                                                    \
    do { const char *why_ = ""; CHECK_INT(call, code); mixp_context_error(ctx, &why_);    \
         CHECK_TEXT(why_, text); mixp_context_clear_error(ctx); } while (0)

/* --- refusals ------------------------------------------------------------------------------- */

static mixp_result no_download(const mixp_exec *x, void *to, const void *from, size_t bytes) {
    (void)x;
    memcpy(to, from, bytes);
    return MIXP_OK;
}

/* Each switch is 0 or 1. */
static void refused_flags(mixp_context *ctx) {
    mixp_recipe r;
    int *const flags[] = { &r.dy_e4m3, &r.power_2, &r.no_stochastic, &r.no_hadamard, &r.no_2d, &r.wgrad_high,
                           &r.most_recent, &r.codes, &r.bound_448, &r.row_scaled };
    for (size_t i = 0; i < sizeof flags / sizeof flags[0]; i++) {
        r = recipe_of(MIXP_RECIPE_MXFP8);
        *flags[i] = i % 2 ? 2 : -1;
        REFUSED(ctx, mixp_autocast_set_recipe(ctx, &r), MIXP_ERR_ARGUMENT, "neither 0 nor 1");
    }
}

/* 4over6 of x needs x without a Hadamard transform, for both products that read x. */
static void refused_over6(mixp_context *ctx) {
    mixp_recipe r = recipe_of(MIXP_RECIPE_NVFP4);
    r.w_4over6 = MIXP_4OVER6_COUNT;
    REFUSED(ctx, mixp_autocast_set_recipe(ctx, &r), MIXP_ERR_ARGUMENT, "not a mixp_4over6");
    r.w_4over6 = MIXP_4OVER6_MSE;
    CHECK_INT(mixp_autocast_set_recipe(ctx, &r), MIXP_OK);
    r.x_4over6 = MIXP_4OVER6_COUNT;
    REFUSED(ctx, mixp_autocast_set_recipe(ctx, &r), MIXP_ERR_ARGUMENT, "not a mixp_4over6");
    r.x_4over6 = MIXP_4OVER6_MAE;
    REFUSED(ctx, mixp_autocast_set_recipe(ctx, &r), MIXP_ERR_ARGUMENT, "set no_hadamard, or wgrad_high");
    r.wgrad_high = 1;
    CHECK_INT(mixp_autocast_set_recipe(ctx, &r), MIXP_OK);
    r.wgrad_high = 0;
    r.no_hadamard = 1;
    CHECK_INT(mixp_autocast_set_recipe(ctx, &r), MIXP_OK);
    r.row_scaled = 1;
    REFUSED(ctx, mixp_autocast_set_recipe(ctx, &r), MIXP_ERR_ARGUMENT, "go together only in forward: set wgrad_high");
    r.x_4over6 = MIXP_4OVER6_NONE;
    CHECK_INT(mixp_autocast_set_recipe(ctx, &r), MIXP_OK);
    r.no_hadamard = 0;
    REFUSED(ctx, mixp_autocast_set_recipe(ctx, &r), MIXP_ERR_ARGUMENT, "row_scaled do not go with the Hadamard");
    r.kind = MIXP_RECIPE_MXFP8;                 /* which ignores it */
    CHECK_INT(mixp_autocast_set_recipe(ctx, &r), MIXP_OK);
    CHECK_INT(mixp_autocast_set_recipe(ctx, NULL), MIXP_OK);
}

/* The result of opening a region. */
static mixp_result opened(mixp_context *ctx, const mixp_autocast *region) {
    mixp_autocast_close(ctx, mixp_autocast_open_with(ctx, region));
    return mixp_context_error(ctx, NULL);
}

static void refused(void) {
    mixp_context *ctx = context(1);
    mixp_context_desc desc;
    mixp_device far = *mixp_cpu();
    mixp_kernels without = *far.kernels;
    mixp_recipe r;
    mixp_autocast region = { MIXP_F16, 1, NULL };
    memset(&r, 0, sizeof r);
    r.kind = MIXP_RECIPE_MXFP8;
    region.recipe = &r;
    REFUSED(ctx, opened(ctx, &region), MIXP_ERR_DTYPE, "a recipe needs a bf16 region");
    region.dtype = MIXP_F32;
    REFUSED(ctx, opened(ctx, &region), MIXP_ERR_DTYPE, "a recipe needs a bf16 region");
    region.dtype = MIXP_BF16;
    r.e8m0 = MIXP_E8M0_COUNT;
    REFUSED(ctx, opened(ctx, &region), MIXP_ERR_ARGUMENT, "not a mixp_e8m0_rounding");
    REFUSED(ctx, mixp_autocast_set_recipe(ctx, &r), MIXP_ERR_ARGUMENT, "not a mixp_e8m0_rounding");
    r.e8m0 = MIXP_E8M0_RCEIL;
    refused_flags(ctx);
    refused_over6(ctx);
    r.kind = MIXP_RECIPE_COUNT;
    REFUSED(ctx, mixp_autocast_set_recipe(ctx, &r), MIXP_ERR_ARGUMENT, "not a mixp_recipe_kind");
    CHECK(mixp_autocast_current(ctx).recipe == NULL);
    CHECK_INT(mixp_autocast_set_recipe(NULL, &r), MIXP_ERR_ARGUMENT);
    r.kind = MIXP_RECIPE_NVFP4;
    CHECK_INT(mixp_autocast_set_recipe(ctx, &r), MIXP_OK);
    MIXP_AUTOCAST(ctx, MIXP_BF16) {
        CHECK(mixp_autocast_current(ctx).recipe && mixp_autocast_current(ctx).recipe != &r);
        MIXP_SCOPE(ctx, "inner") CHECK_INT(mixp_autocast_current(ctx).recipe->kind, MIXP_RECIPE_NVFP4);
        MIXP_AUTOCAST(ctx, MIXP_F32) CHECK(mixp_autocast_current(ctx).recipe == NULL);
    }
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    MIXP_AUTOCAST(ctx, MIXP_F16) CHECK(mixp_autocast_current(ctx).recipe == NULL);
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_ERR_DTYPE);
    mixp_context_free(ctx);
    memset(&desc, 0, sizeof desc);
    without.quantise = NULL;
    far.kernels = &without;
    far.download = no_download;
    far.name = "far";
    desc.device = &far;
    ctx = mixp_context_new(&desc);
    REFUSED(ctx, mixp_autocast_set_recipe(ctx, &r), MIXP_ERR_DEVICE, "cannot quantise");
    mixp_context_free(ctx);
    CHECK_TEXT(mixp_recipe_name(MIXP_RECIPE_FP8_BLOCK), "fp8_block");
    CHECK_TEXT(mixp_recipe_name(MIXP_RECIPE_COUNT), "?");
}

/* --- rules ---------------------------------------------------------------------------------- */

enum { RULED = 5, RULED_SIZE = 32 };
static const char *const ruled_names[RULED] = { "h.0.mlp.w", "h.1.attn.w", "h.1.mlp.w", "h.2.mlp.w", "head" };

/* What five linears of one x give in a step: each result, and each gradient of a weight. */
typedef struct ruled {
    float y[RULED][RULED_SIZE * RULED_SIZE], dw[RULED][RULED_SIZE * RULED_SIZE];
    mixp_recipe_counts counts;
} ruled;

static mixp_context *ruled_context(mixp_tensor **w) {
    const int64_t shape[2] = { RULED_SIZE, RULED_SIZE };
    mixp_context *ctx = context(1);
    for (int i = 0; i < RULED; i++) {
        w[i] = mixp_param(ctx, ruled_names[i], MIXP_F32, 2, shape);
        mixp_init_normal(w[i], 0, 0.1);
    }
    return ctx;
}

typedef struct five { mixp_tensor **w, **y; } five;

static mixp_tensor *five_linears(mixp_context *ctx, mixp_tensor *x, void *user) {
    const five *f = (const five *)user;
    const int64_t all = RULED_SIZE * RULED_SIZE;
    mixp_tensor *sum = NULL;
    for (int i = 0; i < RULED; i++) {
        mixp_tensor *y = mixp_linear(ctx, x, f->w[i], NULL);
        if (f->y) f->y[i] = y;
        sum = sum ? mixp_add(ctx, sum, y) : y;
    }
    return mixp_mean(ctx, mixp_reshape(ctx, mixp_mul(ctx, sum, sum), 1, &all), 0, 0);
}

/* n rules; -1: only `recipe`. how: 0: one block; 1: a scope within; 2: mixp_recompute; 3: a region that repeats the
 * block's. pin: a pattern for the guard, or NULL. */
static void run_ruled(const mixp_recipe_rule *rules, int n, const mixp_recipe *recipe, int how, const char *pin,
                      ruled *out) {
    const int64_t shape[2] = { RULED_SIZE, RULED_SIZE };
    mixp_tensor *w[RULED], *y[RULED], *x, *loss = NULL;
    mixp_context *ctx = ruled_context(w);
    five f = { w, NULL };
    int i;
    if (how != 2) f.y = y;
    fill_low(xs, RULED_SIZE * RULED_SIZE, 3, 1.0);
    if (n < 0) CHECK_INT(mixp_autocast_set_recipe(ctx, recipe), MIXP_OK);
    else CHECK_INT(mixp_autocast_set_recipes(ctx, rules, n), MIXP_OK);
    CHECK_INT(mixp_guard_start(ctx, NULL), MIXP_OK);
    if (pin) CHECK_INT(mixp_guard_pin(ctx, pin, MIXP_BF16), MIXP_OK);
    mixp_step_begin(ctx);
    x = mixp_input(ctx, MIXP_F32, 2, shape, xs);
    MIXP_AUTOCAST(ctx, MIXP_BF16) {
        mixp_autocast outer = mixp_autocast_current(ctx);
        if (how == 3) CHECK_INT(mixp_autocast_open_with(ctx, &outer), 1);
        if (how == 1) MIXP_SCOPE(ctx, "inner") loss = five_linears(ctx, x, &f);
        else if (how == 2) loss = mixp_recompute(ctx, five_linears, &f, x);
        else loss = five_linears(ctx, x, &f);
        if (how == 3) mixp_autocast_close(ctx, 1);
    }
    for (i = 0; i < RULED && f.y; i++) mixp_read(y[i], out->y[i], MIXP_F32, RULED_SIZE * RULED_SIZE);
    out->counts = mixp_autocast_recipe_counts(ctx);
    mixp_backward(ctx, loss);
    for (i = 0; i < RULED; i++) mixp_read(w[i]->grad, out->dw[i], MIXP_F32, RULED_SIZE * RULED_SIZE);
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    mixp_context_free(ctx);
}

/* Which recipe made each result: a letter of "b84" (bf16, fp8, fp4) whose run has the same bits; '?': none. */
static const char *made_by(const ruled *r, const ruled base[3]) {
    static char letters[RULED + 1];
    int i, k;
    for (i = 0; i < RULED; i++) {
        letters[i] = '?';
        for (k = 0; k < 3; k++)
            if (memcmp(r->y[i], base[k].y[i], sizeof r->y[i]) == 0) letters[i] = "b84"[k];
    }
    return letters;
}

static void by_rules(void) {
    static ruled base[3], got_ruled, other;
    mixp_recipe fp8 = recipe_of(MIXP_RECIPE_FP8_CURRENT), fp4 = recipe_of(MIXP_RECIPE_NVFP4), none = recipe_of(MIXP_RECIPE_NONE);
    const mixp_recipe_rule rules[4] = { { "h.0.*", NULL }, { "*attn*", &none }, { "h.?.mlp.w", &fp4 }, { "*", &fp8 } };
    const mixp_recipe_rule late[3] = { { "*", &fp8 }, { "head", &fp4 }, { "h.0.*", NULL } };
    run_ruled(NULL, -1, NULL, 0, NULL, &base[0]);
    run_ruled(NULL, -1, &fp8, 0, NULL, &base[1]);
    run_ruled(NULL, -1, &fp4, 0, NULL, &base[2]);
    for (int i = 0; i < RULED; i++) {               /* the letters mean something */
        CHECK(memcmp(base[0].y[i], base[1].y[i], sizeof base[0].y[i]) != 0);
        CHECK(memcmp(base[1].y[i], base[2].y[i], sizeof base[0].y[i]) != 0);
        CHECK(memcmp(base[0].y[i], base[2].y[i], sizeof base[0].y[i]) != 0);
    }

    /* The first rule that fits wins; no rule is bf16. */
    run_ruled(rules, 4, NULL, 0, NULL, &got_ruled);
    CHECK(strcmp(made_by(&got_ruled, base), "bb448") == 0);
    CHECK_INT(got_ruled.counts.quantised, 3);
    CHECK_INT(got_ruled.counts.kept, 2);
    run_ruled(rules, 3, NULL, 0, NULL, &other);
    CHECK(strcmp(made_by(&other, base), "bb44b") == 0);
    run_ruled(late, 3, NULL, 0, NULL, &other);
    CHECK(strcmp(made_by(&other, base), "88888") == 0);
    run_ruled(late + 1, 1, NULL, 0, NULL, &other);
    CHECK(strcmp(made_by(&other, base), "bbbb4") == 0);
    run_ruled(NULL, 0, NULL, 0, NULL, &other);
    CHECK(strcmp(made_by(&other, base), "bbbbb") == 0);

    /* Pins leave linears out of their rule. */
    run_ruled(rules, 4, NULL, 0, "h.1.*", &other);
    CHECK(strcmp(made_by(&other, base), "bbb48") == 0);

    /* One rule for all is that recipe, gradients included. */
    run_ruled(late, 1, NULL, 0, NULL, &other);
    CHECK(memcmp(other.dw, base[1].dw, sizeof other.dw) == 0);

    /* Inner regions and recomputed blocks follow the rules: the same results and gradients. */
    for (int how = 1; how < 4; how++) {
        run_ruled(rules, 4, NULL, how, NULL, &other);
        if (how != 2) CHECK(memcmp(other.y, got_ruled.y, sizeof other.y) == 0);
        for (int i = 0; i < RULED; i++) {           /* NVFP4 draws its random numbers by the place of a call */
            const int same = memcmp(other.dw[i], got_ruled.dw[i], sizeof other.dw[i]) == 0;
            if (how != 2 || i < 2 || i == 4) CHECK(same);
        }
        CHECK_INT(other.counts.quantised, 3);
    }
}

/* Rules and one recipe replace each other; an error changes nothing. */
static void rules_are_set(void) {
    mixp_tensor *w[RULED];
    mixp_context *ctx = ruled_context(w);
    mixp_recipe fp8 = recipe_of(MIXP_RECIPE_FP8_CURRENT), late = recipe_of(MIXP_RECIPE_FP8_DELAYED), later = late;
    mixp_recipe_rule rules[66] = { { "head", NULL }, { "*", &fp8 } };
    char text[97];
    later.margin = 1;
    CHECK_INT(mixp_autocast_set_recipes(ctx, rules, 2), MIXP_OK);
    MIXP_AUTOCAST(ctx, MIXP_BF16) {
        CHECK(mixp_autocast_current(ctx).recipe && mixp_autocast_current(ctx).recipe->kind == MIXP_RECIPE_NONE);
        MIXP_AUTOCAST(ctx, MIXP_F32) CHECK(mixp_autocast_current(ctx).recipe == NULL);
        REFUSED(ctx, mixp_autocast_set_recipes(ctx, rules, 2), MIXP_ERR_ORDER, "a region or a scope is open");
    }
    MIXP_AUTOCAST(ctx, MIXP_F16) CHECK(mixp_autocast_current(ctx).recipe == NULL);
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_ERR_DTYPE);
    mixp_context_clear_error(ctx);
    CHECK_INT(mixp_autocast_set_recipe(ctx, &fp8), MIXP_OK);
    MIXP_AUTOCAST(ctx, MIXP_BF16) CHECK_INT(mixp_autocast_current(ctx).recipe->kind, MIXP_RECIPE_FP8_CURRENT);

    REFUSED(ctx, mixp_autocast_set_recipes(ctx, NULL, 1), MIXP_ERR_ARGUMENT, "rules is NULL");
    REFUSED(ctx, mixp_autocast_set_recipes(ctx, rules, -1), MIXP_ERR_ARGUMENT, "pass 0 to 64 rules");
    for (int i = 2; i < 66; i++) rules[i] = rules[1];
    REFUSED(ctx, mixp_autocast_set_recipes(ctx, rules, 65), MIXP_ERR_ARGUMENT, "pass 0 to 64 rules");
    rules[0].pattern = "heat";
    REFUSED(ctx, mixp_autocast_set_recipes(ctx, rules, 2), MIXP_ERR_ARGUMENT, "rule 0, pattern 'heat': the pattern fits no");
    rules[0].pattern = "";
    REFUSED(ctx, mixp_autocast_set_recipes(ctx, rules, 2), MIXP_ERR_ARGUMENT, "the pattern is empty");
    rules[0].pattern = NULL;
    REFUSED(ctx, mixp_autocast_set_recipes(ctx, rules, 2), MIXP_ERR_ARGUMENT, "the pattern is empty");
    memset(text, '*', 96);
    text[96] = '\0';
    rules[0].pattern = text;
    REFUSED(ctx, mixp_autocast_set_recipes(ctx, rules, 2), MIXP_ERR_ARGUMENT, "more than 95 characters");
    rules[0].pattern = "head";
    fp8.codes = 2;
    REFUSED(ctx, mixp_autocast_set_recipes(ctx, rules, 2), MIXP_ERR_ARGUMENT, "rule 1, pattern '*': a switch");
    fp8.codes = 0;
    rules[0].recipe = &late;
    rules[1].recipe = &later;
    REFUSED(ctx, mixp_autocast_set_recipes(ctx, rules, 2), MIXP_ERR_ARGUMENT, "different recipes of delayed scaling");
    CHECK_INT(mixp_autocast_set_recipes(NULL, rules, 1), MIXP_ERR_ARGUMENT);
    MIXP_AUTOCAST(ctx, MIXP_BF16) CHECK_INT(mixp_autocast_current(ctx).recipe->kind, MIXP_RECIPE_FP8_CURRENT);
    rules[1].recipe = &fp8;
    CHECK_INT(mixp_autocast_set_recipes(ctx, rules, 64), MIXP_OK);
    CHECK_INT(mixp_autocast_set_recipes(ctx, NULL, 0), MIXP_OK);
    MIXP_AUTOCAST(ctx, MIXP_BF16) CHECK(mixp_autocast_current(ctx).recipe == NULL);
    mixp_context_free(ctx);
}

/* --- training ------------------------------------------------------------------------------- */

enum { BATCH = 128, WIDTH = 128, STEPS = 150 };

static mixp_tensor *two_linears(mixp_context *ctx, mixp_tensor *x, void *user) {
    mixp_tensor **w = (mixp_tensor **)user;
    return mixp_linear(ctx, mixp_gelu_tanh(ctx, mixp_linear(ctx, x, w[0], NULL)), w[1], NULL);
}

/* Trains two linears around GELU to a fixed target; returns the loss, in *bits its path. anew: with
 * mixp_recompute. */
static float trained(const mixp_recipe *recipe, int anew, uint64_t *bits) {
    mixp_optimizer_desc adamw = mixp_adamw_defaults();
    mixp_context *ctx = context(2);
    mixp_optimizer *opt = mixp_optimizer_new(ctx, &adamw);
    const int64_t shape[2] = { WIDTH, WIDTH }, batch[2] = { BATCH, WIDTH };
    mixp_tensor *w[2];
    static float x[BATCH * WIDTH], y[BATCH * WIDTH];
    float loss = 0;
    w[0] = mixp_param(ctx, "w0", MIXP_F32, 2, shape);
    w[1] = mixp_param(ctx, "w1", MIXP_F32, 2, shape);
    for (int i = 0; i < 2; i++) {
        mixp_init_normal(w[i], 0, 0.1);
        mixp_optimizer_add(opt, w[i], NULL);
    }
    fill_low(x, BATCH * WIDTH, 11, 1.0);
    for (int i = 0; i < BATCH * WIDTH; i++) y[i] = sinf(2.0f * x[i]) + 0.3f * x[i / WIDTH * WIDTH];
    CHECK_INT(mixp_autocast_set_recipe(ctx, recipe), MIXP_OK);
    *bits = 0;
    for (int step = 0; step < STEPS; step++) {
        mixp_tensor *h = NULL, *t;
        mixp_step_begin(ctx);
        mixp_zero_grad(opt);
        MIXP_AUTOCAST(ctx, MIXP_BF16) {
            h = mixp_input(ctx, MIXP_F32, 2, batch, x);
            h = anew ? mixp_recompute(ctx, two_linears, w, h) : two_linears(ctx, h, w);
            t = mixp_input(ctx, MIXP_F32, 2, batch, y);
            h = mixp_mse(ctx, h, t);
        }
        mixp_backward(ctx, h);
        mixp_optimizer_step(opt);
        loss = (float)mixp_item(h);
        *bits = *bits * 1000003u + mixp_bits_of_f32(loss);
    }
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    CHECK_INT(mixp_autocast_recipe_counts(ctx).quantised, recipe ? STEPS * 2 : 0);
    CHECK_INT(mixp_autocast_recipe_counts(ctx).products, recipe ? STEPS * (anew ? 7 : 5) : 0);
    mixp_context_free(ctx);
    return loss;
}

static void training(void) {
    const double bounds[MIXP_RECIPE_COUNT] = { 0, 0.06, 0.06, 0.06, 0.06, 0.5 };
    uint64_t bits, twice;
    const float bf16 = trained(NULL, 0, &bits);
    mixp_recipe r;
    memset(&r, 0, sizeof r);
    printf("  bf16 %.5f", (double)bf16);
    for (int kind = 1; kind < MIXP_RECIPE_COUNT; kind++) {
        r.kind = (mixp_recipe_kind)kind;
        float loss = trained(&r, 0, &bits);
        printf(", %s %.5f", mixp_recipe_name(r.kind), (double)loss);
        CHECK_NEAR(loss, bf16, bounds[kind] * (double)bf16 + 0.002);
        CHECK(loss != bf16);
        trained(&r, 0, &twice);
        CHECK(bits == twice);
        trained(&r, 1, &twice);
        CHECK(bits == twice);
    }
    printf("\n");
}

int main(void) {
    RUN(against_reference);
    RUN(every_bf16);
    RUN(recorded);
    RUN(recorded_nvfp4);
    RUN(stochastic);
    RUN(statistics);
    RUN(hadamard);
    RUN_LATER(instruction_sets);
    RUN(quantiser_refuses);
    RUN(products);
    RUN(switches);
    RUN(rows_alone);
    RUN(unbiased);
    RUN(counts);
    RUN(which_are_kept);
    RUN(refused);
    RUN(by_rules);
    RUN(rules_are_set);
    RUN(training);
    return test_report();
}
