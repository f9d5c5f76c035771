/* quantisers.c - mixp_quantise as a function that Python can call; quantisers.sh builds it.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"

typedef struct operand { mixp_dtype element; mixp_block_scale scale; int64_t block_rows, block_cols; mixp_e8m0_rounding e8m0; } operand;

/* In the order of quantisers.py's table. */
static const operand operands[] = {
    { MIXP_F8_E4M3, MIXP_SCALE_TENSOR, 0, 0, MIXP_E8M0_RCEIL },
    { MIXP_F8_E5M2, MIXP_SCALE_TENSOR, 0, 0, MIXP_E8M0_RCEIL },
    { MIXP_F8_E4M3, MIXP_SCALE_POWER, 1, 128, MIXP_E8M0_RCEIL },
    { MIXP_F8_E4M3, MIXP_SCALE_POWER, 128, 128, MIXP_E8M0_RCEIL },
    { MIXP_F8_E4M3, MIXP_SCALE_E8M0, 1, 32, MIXP_E8M0_RCEIL },
    { MIXP_F4_E2M1, MIXP_SCALE_E4M3, 1, 16, MIXP_E8M0_RCEIL },
    { MIXP_F4_E2M1, MIXP_SCALE_E4M3, 16, 16, MIXP_E8M0_RCEIL },
    { MIXP_F8_E4M3, MIXP_SCALE_E8M0, 1, 32, MIXP_E8M0_FLOOR },
    { MIXP_F8_E4M3, MIXP_SCALE_E8M0, 1, 32, MIXP_E8M0_CEIL },
    { MIXP_F8_E4M3, MIXP_SCALE_E8M0, 1, 32, MIXP_E8M0_EVEN },
};

/* Quantises x[rows, cols], bf16 or f32, as row `which` of the table says. Returns a mixp_result. */
int quantise(int which, int is_bf16, const void *x, mixp_bf16 *y, float *decode, int64_t rows, int64_t cols);

int quantise(int which, int is_bf16, const void *x, mixp_bf16 *y, float *decode, int64_t rows, int64_t cols) {
    const operand      *o = &operands[which];
    mixp_context       *ctx = mixp_context_new(NULL);
    mixp_quantise_args  k;
    mixp_result         r;
    memset(&k, 0, sizeof k);
    k.rows = rows;
    k.cols = cols;
    k.x.data = x;
    k.x.dtype = is_bf16 ? MIXP_BF16 : MIXP_F32;
    k.y = y;
    k.element = o->element;
    k.scale = o->scale;
    k.block_rows = o->block_rows;
    k.block_cols = o->block_cols;
    k.e8m0 = o->e8m0;
    r = ctx ? mixp_quantise(mixp_context_exec(ctx), &k, decode) : MIXP_ERR_MEMORY;
    mixp_context_free(ctx);
    return (int)r;
}
