#pragma once
#include "kernels.h"
/* --- numbers below 16 bits --------------------------------------------------------------- */

/* Scales of a quantised array. amax: the largest magnitude of a block, or of the array. max: the
 * largest value of the element. */
typedef enum mixp_block_scale {
    MIXP_SCALE_TENSOR,          /* s = max / amax for the whole array; y = element(x s)    */
    MIXP_SCALE_POWER,           /* s = max / amax rounded down to a power of two, for each block;
                                   y = element(x s) / s                                    */
    MIXP_SCALE_E8M0,            /* d = amax / max rounded to a power of two, for each block; y =
                                   element(x / d) d. See mixp_e8m0_rounding                */
    MIXP_SCALE_E4M3,            /* NVFP4. s = 2688 / the array's amax; for each block d =
                                   e4m3(amax s / 6) and y = element(x s / d) d. See mixp_4over6 */
    MIXP_SCALE_COUNT
} mixp_block_scale;

/* How the e8m0 scale d of a block is rounded; the names are torchao's. RCEIL and CEIL clip no
 * value. FLOOR and EVEN clip the largest values of blocks. The element's top is the largest power
 * of two that the element holds: 2^8 (e4m3), 2^15 (e5m2), 4 (e2m1). d is at least 2^-127. Source:
 * OCP MX 1.0, 6.3 (FLOOR); torchao, ScaleCalculationMode. */
typedef enum mixp_e8m0_rounding {
    MIXP_E8M0_RCEIL,            /* d = amax / max, rounded up to a power of two            */
    MIXP_E8M0_FLOOR,            /* d = amax rounded down to a power of two, / top          */
    MIXP_E8M0_CEIL,             /* d = amax rounded up to a power of two, / top            */
    MIXP_E8M0_EVEN,             /* as FLOOR, after amax is rounded to the element's mantissa bits
                                   (ties upwards)                                          */
    MIXP_E8M0_COUNT
} mixp_e8m0_rounding;

/* 4over6, for E4M3 in blocks of 16: each block is quantised with two scales, and keeps the scale
 * with the smaller error; equal errors keep d6. In f32, each operation rounded:
 *
 *     d6 = e4m3(min(amax / 6 s, 448))        the block's largest value becomes 6
 *     d4 = e4m3(min(amax / 6 s 1.5, 448))    the block's largest value becomes 4
 *     s  = 6 b / A      A: the array's amax; b: 256, or 448 with bound_448
 *     error = the sum of |q d A / (6 b) - x|, or of its square, over the block's elements x, in
 *             order; q: the element's value
 *
 * In a block of 16 x 16 each row has a sum; sums of rows 8 apart are added, then 4, 2 and 1 apart.
 * Source: arXiv 2512.02010; TransformerEngine, NVFP4BlockScaling, nvfp4_4over6. */
typedef enum mixp_4over6 {
    MIXP_4OVER6_NONE,           /* one scale                                               */
    MIXP_4OVER6_MAE,            /* two, compared by absolute errors: TransformerEngine's default */
    MIXP_4OVER6_MSE,            /* two, compared by squared errors: the paper's            */
    MIXP_4OVER6_COUNT
} mixp_4over6;

/* Quantises x[rows, cols] (f32 or bf16, row-major, dense) into y[rows, cols], which must not
 * overlap x. Rounds to nearest even, or stochastically; values beyond the element's largest become
 * the largest. Blocks of block_rows x block_cols each have a scale; TENSOR has one block.
 *
 * NaN stays NaN; for E8M0 and E4M3 the whole block becomes NaN. Inf stays Inf; for E4M3 the whole
 * block becomes NaN. So a product with y is not finite, and a step on an Inf is skipped (see
 * recipe.h). TENSOR, POWER: a block with amax 0, Inf or NaN
 * has s = 1. E4M3: an array with such an amax has s = 1. A block of zeros stays zero. bf16 holds
 * each y exactly unless |y| is below 2^-126, or 2^128 and above.
 *
 * Equal inputs give bit-identical results on every instruction set and at any number of threads. */
typedef struct mixp_quantise_args {
    int64_t          rows, cols;
    mixp_in          x;
    mixp_bf16       *y;
    mixp_dtype       element;   /* MIXP_F8_E4M3, MIXP_F8_E5M2 or MIXP_F4_E2M1              */
    mixp_block_scale scale;
    mixp_e8m0_rounding e8m0;    /* rounding of the scales of E8M0; otherwise ignored       */
    mixp_4over6      choice;    /* E4M3 with e2m1, not stochastic, in blocks of 1 x 16, 16 x 1 or
                                   16 x 16; NONE for other scales                          */
    int              bound_448; /* 1: b is 448 instead of 256; ignored without choice      */
    int              by_lines;  /* E4M3: 1: each row (blocks of 1 x n), or column (n x 1), counts
                                   as a separate array, with an amax and an s              */
    float           *line_scales;   /* by_lines: [rows] or [cols], in device memory. Receives 1 / s
                                   of each row or column: the factor for its part of a product */
    int64_t          block_rows, block_cols;    /* must divide rows and cols. One of: 1 x n, n x 1,
                                                   n x n, n a multiple of 16; 0 x 0 for TENSOR */
    int              stochastic;    /* 1: e2m1 rounds up when a random number lies below the part
                                       cut off, to within 2^-22                            */
    uint64_t         seed, step, tensor;    /* of mixp_random_u32; the element is the index in x;
                                               ignored unless stochastic                   */
    int              power;     /* TENSOR: 1: s from amax is rounded down to a power of two   */
    float            given;     /* TENSOR: the scale s; 0 = made from the amax of x        */
    const float     *given_at;  /* TENSOR: s in device memory, above 0 and finite; NULL = given */
    float           *amax;      /* TENSOR: becomes the amax of x, in device memory; or NULL   */
    int              amax_joins;    /* 1: *amax becomes the larger of its old value and the amax
                                       of x; a NaN is not larger                           */
    float           *decode;    /* of the kernel, in device memory: becomes the factor by which a
                                   product with y must be multiplied: 1 / s for TENSOR and E4M3,
                                   otherwise, and by_lines, 1. May be NULL                 */
    const float     *times;     /* device memory: *decode is multiplied by it; NULL = 1    */
    float           *own;       /* as decode, without times                                */
    uint8_t         *scales;    /* blocks: [rows / block_rows, cols / block_cols] becomes the factor
                                   that was applied last to each block's elements, as a code of
                                   e8m0 (POWER, E8M0) or e4m3 (E4M3); NULL = unwanted      */
} mixp_quantise_args;

/* Multiplies each group of 16 rows of a, column by column, by diag(signs) H_16 / 4 (a random
 * Hadamard transform). a[rows, cols] f32 or bf16, y[rows, cols], rows a multiple of 16; sums of 16
 * in f32, as a tree, rounded to bf16 once. The transform is orthogonal, so transforming both
 * factors changes their product by rounding only. The signs, and the rounding to bf16 before
 * quantising, are TransformerEngine's. */
typedef struct mixp_hadamard_args {
    int64_t    rows, cols;
    mixp_in    a;
    mixp_bf16 *y;
} mixp_hadamard_args;

/* Turns quantised values y[rows, cols] into codes of their elements, or codes into values. The
 * values of codes are those that were turned into codes, bit for bit; a NaN or Inf becomes some NaN
 * (e2m1: by the NaN of its block's scale). e4m3:
 * one byte per element. e2m1: element i lies in byte i / 2, first in the lower 4 bits. cols is a
 * multiple of 16. The kernel's results are the same on every instruction set and at any number of
 * threads. MIXP_ERR_ARGUMENT: an array is missing, another element or scale, or e2m1 without E4M3.
 * MIXP_ERR_SHAPE: sizes that do not fit. */
typedef struct mixp_recode_args {
    int64_t          rows, cols;
    mixp_bf16       *y;
    uint8_t         *codes;
    mixp_dtype       element;   /* MIXP_F8_E4M3 or MIXP_F4_E2M1                            */
    mixp_block_scale scale;     /* how `quantise` scaled y                                 */
    int64_t          block_rows;/* rows of a block of one column; 0 for TENSOR             */
    const uint8_t   *scales;    /* that `quantise` wrote; ignored for TENSOR               */
    int              decodes;   /* 0: y becomes codes; 1: codes become y                   */
    const float     *own, *times;   /* decodes: as in mixp_quantise_args, both in device memory, */
    float           *decode;        /* *decode becomes *own * *times; NULL = not wanted    */
} mixp_recode_args;

/* How an operand of a product was quantised: fields of mixp_quantise_args. */
typedef struct mixp_narrow {
    mixp_dtype       element;
    mixp_block_scale scale;
    int64_t          block_rows, block_cols;    /* block of the operand as it is stored    */
    const uint8_t   *scales;    /* written by `quantise`; NULL for TENSOR                  */
} mixp_narrow;

/* A product whose operands are quantised values: the result of `gemm` with the same arguments,
 * within the rounding of its sums. a and b of gemm are bf16 and dense. The kernel may multiply
 * codes of 8 or 4 bits in the device's own formats. Where it cannot, it runs `gemm`. */
typedef struct mixp_gemm_narrow_args {
    mixp_gemm_args gemm;
    mixp_narrow    a, b;
} mixp_gemm_narrow_args;

/* The losses by quantising: of each operand of a linear, the most that one array lost. */
typedef struct mixp_losses {
    int64_t seen;               /* bit i: operand i was measured                           */
    double  error[3], clipped[3];
} mixp_losses;

/* Measures what quantising x into y has lost: error is the mean of |y decode - x| / |x|, clipped is
 * the share of values with |x| scale > beyond; over the values that are neither 0 nor NaN. An Inf
 * counts 1 in both. Joins them to operand `operand` of *out. n elements; x f32 or bf16; all in
 * device memory. */
typedef struct mixp_lose_args {
    int64_t          n;
    mixp_in          x;
    const mixp_bf16 *y;
    const float     *decode;    /* NULL = 1                                                */
    const float     *line_scales;   /* replaces decode: a factor for each row of n / cols, or for
                                   each column with of_columns; NULL = decode counts       */
    int64_t          cols;      /* with line_scales                                        */
    int              of_columns;
    const float     *scale;     /* scale of delayed scaling; if it is 1, the first scale, nothing
                                   is measured. NULL = no finite value is clipped          */
    double           beyond;
    int              operand;   /* 0 to 2                                                  */
    mixp_losses     *out;
} mixp_lose_args;

/* Sums over the elements of an array. */
typedef struct mixpi_loss { double error; int64_t seen, clipped; } mixpi_loss;

/* Adds the loss of x, which was quantised to y. scale 0: no finite value is clipped. */
MIXPREC_HD void mixpi_loss_add(mixpi_loss *sum, float x, double y, double scale, double beyond) {
    const uint32_t a = mixp_bits_of_f32(x) & 0x7FFFFFFFu;
    const double size = MIXPI_LIBM(fabs)((double)x);
    if (!a || a > 0x7F800000u) return;
    sum->seen++;
    if (a == 0x7F800000u) {
        sum->error += 1.0;
        sum->clipped++;
        return;
    }
    sum->error += MIXPI_LIBM(fabs)(y - (double)x) / size;
    sum->clipped += scale > 0.0 && size * scale > beyond;
}

/* Delayed scaling: ends an update of the operands of one linear, n of them. history[n, length] has
 * the latest amax of each operand first, then earlier ones from old to new. For each operand whose
 * latest amax is above 0: amax = the latest, or the largest of the history; scales[i] = limits[i] /
 * amax if amax is finite and above 0; the history moves by one place: its first place becomes 0,
 * and the latest amax becomes the last. The histories hold no NaN. */
enum { MIXP_TURN_OPERANDS = 3 };
typedef struct mixp_turn_args {
    int    n, length;           /* 1 to MIXP_TURN_OPERANDS; 1 to 2^20                      */
    int    most_recent;         /* 1: amax is the latest; 0: the largest of the history    */
    float  limits[MIXP_TURN_OPERANDS];
    float *history, *scales;    /* device memory                                           */
} mixp_turn_args;

/* The scale after an update. newest: above 0; largest: of the history. */
MIXPREC_HD float mixpi_delayed_scale(const mixp_turn_args *k, int i, float newest, float largest,
                                     float old) {
    const uint32_t amax = mixp_bits_of_f32(k->most_recent ? newest : largest);
    return mixpi_amax_is_usable(amax) ? mixpi_scale_to(k->limits[i], amax) : old;
}

/* The sign of row i of 16. */
MIXPREC_HD float mixpi_hadamard_sign(int i) { return 0xD7E8u >> i & 1u ? -1.0f : 1.0f; }

/* Returns what is wrong with a call of `quantise`, or MIXP_OK. */
MIXPREC_HD mixp_result mixpi_quantise_wrong(const mixp_quantise_args *k) {
    const int64_t r = k->block_rows, c = k->block_cols;
    const int element = k->element == MIXP_F8_E4M3 || k->element == MIXP_F8_E5M2 ||
                        k->element == MIXP_F4_E2M1;
    if (!k->x.data || !k->y || k->rows < 1 || k->cols < 1) return MIXP_ERR_ARGUMENT;
    if (!element || (unsigned)k->scale >= MIXP_SCALE_COUNT) return MIXP_ERR_ARGUMENT;
    if ((unsigned)k->e8m0 >= MIXP_E8M0_COUNT) return MIXP_ERR_ARGUMENT;
    if (k->stochastic && k->element != MIXP_F4_E2M1) return MIXP_ERR_ARGUMENT;
    if ((unsigned)k->choice >= MIXP_4OVER6_COUNT) return MIXP_ERR_ARGUMENT;
    if (k->choice && (k->scale != MIXP_SCALE_E4M3 || k->element != MIXP_F4_E2M1 || k->stochastic))
        return MIXP_ERR_ARGUMENT;
    if (k->by_lines && (k->scale != MIXP_SCALE_E4M3 || !k->line_scales)) return MIXP_ERR_ARGUMENT;
    if (!(k->given >= 0.0f && k->given < mixp_f32_of_bits(0x7F800000u))) return MIXP_ERR_ARGUMENT;
    if (k->x.dtype != MIXP_F32 && k->x.dtype != MIXP_BF16) return MIXP_ERR_DTYPE;
    if (k->scale == MIXP_SCALE_TENSOR)
        return r == 0 && c == 0 && !k->scales ? MIXP_OK : MIXP_ERR_SHAPE;
    if (r < 1 || c < 1 || k->rows % r || k->cols % c) return MIXP_ERR_SHAPE;
    if (k->choice && (r > 16 || c > 16)) return MIXP_ERR_SHAPE;
    if (k->by_lines && r > 1 && c > 1) return MIXP_ERR_SHAPE;
    if (r == 1) return c % 16 ? MIXP_ERR_SHAPE : MIXP_OK;
    return r % 16 == 0 && (c == 1 || c == r) ? MIXP_OK : MIXP_ERR_SHAPE;
}

/* Returns what is wrong with a call of `recode`, or MIXP_OK. */
MIXPREC_HD mixp_result mixpi_recode_wrong(const mixp_recode_args *k) {
    const int blocks = k->scale != MIXP_SCALE_TENSOR;
    if (!k->y || !k->codes || (blocks && !k->scales)) return MIXP_ERR_ARGUMENT;
    if (k->rows < 1 || k->cols < 1) return MIXP_ERR_ARGUMENT;
    if ((unsigned)k->scale >= MIXP_SCALE_COUNT) return MIXP_ERR_ARGUMENT;
    if (k->element != MIXP_F8_E4M3 && k->element != MIXP_F4_E2M1) return MIXP_ERR_ARGUMENT;
    if (k->element == MIXP_F4_E2M1 && k->scale != MIXP_SCALE_E4M3) return MIXP_ERR_ARGUMENT;
    if (k->decodes && k->decode && !k->own) return MIXP_ERR_ARGUMENT;
    if (k->cols % 16) return MIXP_ERR_SHAPE;
    if (!blocks) return k->block_rows ? MIXP_ERR_SHAPE : MIXP_OK;
    return k->block_rows > 0 && k->rows % k->block_rows == 0 ? MIXP_OK : MIXP_ERR_SHAPE;
}

/* Returns what is wrong with a call of `hadamard`, or MIXP_OK. */
MIXPREC_HD mixp_result mixpi_hadamard_wrong(const mixp_hadamard_args *k) {
    if (!k->a.data || !k->y || k->rows < 1 || k->cols < 1) return MIXP_ERR_ARGUMENT;
    if (k->a.dtype != MIXP_F32 && k->a.dtype != MIXP_BF16) return MIXP_ERR_DTYPE;
    return k->rows % 16 ? MIXP_ERR_SHAPE : MIXP_OK;
}

/* The largest value of an array's elements times their blocks' scales, for E4M3. */
MIXPREC_HD float mixpi_e4m3_bound(const mixp_quantise_args *k)
{ return 6.0f * (k->choice && !k->bound_448 ? 256.0f : 448.0f); }

/* The scale of a whole array with this amax; 1 if only blocks have scales. */
MIXPREC_HD float mixpi_scale_of_array(const mixp_quantise_args *k, uint32_t amax) {
    float s;
    if (k->scale == MIXP_SCALE_E4M3) return mixpi_scale_to(mixpi_e4m3_bound(k), amax);
    if (k->scale != MIXP_SCALE_TENSOR) return 1.0f;
    if (k->given_at) return *k->given_at;
    if (k->given > 0.0f) return k->given;
    s = mixpi_scale_to(mixpi_grid_of(k->element).largest, amax);
    return k->power ? mixp_f32_of_bits(mixp_bits_of_f32(s) & 0xFF800000u) : s;
}

/* Does an array have such a scale? */
MIXPREC_HD int mixpi_has_scale_of_array(mixp_block_scale kind)
{ return kind == MIXP_SCALE_TENSOR || kind == MIXP_SCALE_E4M3; }

/* Returns the amax of x to the caller of `quantise`. */
MIXPREC_HD void mixpi_give_amax(const mixp_quantise_args *k, uint32_t amax) {
    const float found = mixp_f32_of_bits(amax);
    if (k->scale != MIXP_SCALE_TENSOR || !k->amax) return;
    if (!k->amax_joins || found > *k->amax) *k->amax = found;
}

/* The number of lines: rows, or columns. */
MIXPREC_HD int64_t mixpi_quantise_lines(const mixp_quantise_args *k)
{ return k->block_cols == 1 ? k->cols : k->rows; }

/* Does `quantise` need the amax of the array? */
MIXPREC_HD int mixpi_needs_amax(const mixp_quantise_args *k) {
    const int given = k->given_at || k->given > 0.0f;
    return mixpi_has_scale_of_array(k->scale) && !k->by_lines &&
           !(k->scale == MIXP_SCALE_TENSOR && given && !k->amax);
}

/* The number that rounds the bits of amax if only its exponent is kept; not for RCEIL. */
MIXPREC_HD uint32_t mixpi_e8m0_add(const mixpi_grid *g, mixp_e8m0_rounding how) {
    if (how == MIXP_E8M0_EVEN) return 1u << (g->shift - 1);
    return how == MIXP_E8M0_CEIL ? 0x7FFFFFu : 0u;
}

/* The biased exponent of a block's e8m0 scale. */
MIXPREC_HD int mixpi_e8m0_of(const mixpi_grid *g, mixp_e8m0_rounding how, uint32_t amax) {
    if (how == MIXP_E8M0_RCEIL) return mixpi_e8m0_above(g->largest, amax);
    return mixpi_e8m0_of_power(g, mixpi_e8m0_add(g, how), amax);
}

/* The code of the factor by which a block's elements are multiplied last, and the factor. A factor
 * of 0 is returned as 1: the block's values are zeros. */
MIXPREC_HD uint8_t mixpi_scale_code(mixp_block_scale kind, float out) {
    if (kind == MIXP_SCALE_E4M3) return mixp_e4m3_from_f32(out).bits;
    return (uint8_t)(mixp_bits_of_f32(out) >> 23 & 0xFFu);
}
MIXPREC_HD float mixpi_scale_of_code(mixp_block_scale kind, uint8_t code) {
    if (kind == MIXP_SCALE_E4M3) return code ? mixp_f32_of_bits(mixpi_f32_of_e4m3(code)) : 1.0f;
    return code == 255 ? mixp_f32_of_bits(0x7FC00000u) : mixpi_q_power(code);
}

/* 4over6: the value that x becomes with the scales s. */
MIXPREC_HD float mixpi_4over6_value(const mixpi_grid *g, mixpi_scales s, float x) {
    const uint32_t v = mixp_bits_of_f32(x * s.in);
    const uint32_t q = mixpi_grid_round(g, v & 0x7FFFFFFFu) | (v & 0x80000000u);
    return mixp_f32_of_bits(q) * s.out;
}

/* 4over6: what an element x adds to the error of its block's scales s. array: the array's amax. */
MIXPREC_HD float mixpi_4over6_error(const mixp_quantise_args *k, const mixpi_grid *g, float array,
                                    mixpi_scales s, float x) {
    const float value = mixpi_4over6_value(g, s, x) * array / mixpi_e4m3_bound(k);
    const float difference = value - x;
    if (k->choice == MIXP_4OVER6_MSE) return mixpi_rounded_product(difference, difference);
    return mixp_f32_of_bits(mixp_bits_of_f32(difference) & 0x7FFFFFFFu);
}

/* 4over6: the scales that a block keeps; errors: with the scale for 4, and for 6. A NaN of an error
 * keeps the scale for 6. */
MIXPREC_HD mixpi_scales mixpi_4over6_choose(const float errors[2], mixpi_scales four,
                                            mixpi_scales six) {
    return errors[0] < errors[1] ? four : six;
}

/* The scales of a block; with 4over6 those for 6. tensor: the array's. */
MIXPREC_HD mixpi_scales mixpi_scales_of(const mixp_quantise_args *k, const mixpi_grid *g,
                                        float tensor, uint32_t amax) {
    mixpi_scales s = { 1.0f, 1.0f };
    switch (k->scale) {
    case MIXP_SCALE_POWER: return mixpi_scales_power(g->largest, amax);
    case MIXP_SCALE_E8M0:  return mixpi_scales_e8m0(mixpi_e8m0_of(g, k->e8m0, amax), amax);
    case MIXP_SCALE_E4M3:  return mixpi_scales_e4m3(tensor, k->choice ? 1.0f : 0.0f, amax);
    case MIXP_SCALE_TENSOR:
    case MIXP_SCALE_COUNT:
    default: s.in = tensor; return s;
    }
}

