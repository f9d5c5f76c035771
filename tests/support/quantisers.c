/* quantisers.c - mixp_quantise, and a linear under a recipe, as functions that Python can call; quantisers.sh and
 * linears.sh build it.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"

typedef struct operand {
    mixp_dtype         element;
    mixp_block_scale   scale;
    int64_t            block_rows, block_cols;
    mixp_e8m0_rounding e8m0;
    int                power, over6;    /* over6: a mixp_4over6, 4 for bound_448, and 8 for by_lines */
} operand;

enum { TURNED = 10 };       /* the row whose x is transformed first, 16 rows at a time */

/* In the order of quantisers.py's table. */
static const operand operands[] = {
    { MIXP_F8_E4M3, MIXP_SCALE_TENSOR, 0, 0, MIXP_E8M0_RCEIL, 0, 0 },
    { MIXP_F8_E5M2, MIXP_SCALE_TENSOR, 0, 0, MIXP_E8M0_RCEIL, 0, 0 },
    { MIXP_F8_E4M3, MIXP_SCALE_POWER, 1, 128, MIXP_E8M0_RCEIL, 0, 0 },
    { MIXP_F8_E4M3, MIXP_SCALE_POWER, 128, 128, MIXP_E8M0_RCEIL, 0, 0 },
    { MIXP_F8_E4M3, MIXP_SCALE_E8M0, 1, 32, MIXP_E8M0_RCEIL, 0, 0 },
    { MIXP_F4_E2M1, MIXP_SCALE_E4M3, 1, 16, MIXP_E8M0_RCEIL, 0, 0 },
    { MIXP_F4_E2M1, MIXP_SCALE_E4M3, 16, 16, MIXP_E8M0_RCEIL, 0, 0 },
    { MIXP_F8_E4M3, MIXP_SCALE_E8M0, 1, 32, MIXP_E8M0_FLOOR, 0, 0 },
    { MIXP_F8_E4M3, MIXP_SCALE_E8M0, 1, 32, MIXP_E8M0_CEIL, 0, 0 },
    { MIXP_F8_E4M3, MIXP_SCALE_E8M0, 1, 32, MIXP_E8M0_EVEN, 0, 0 },
    { MIXP_F4_E2M1, MIXP_SCALE_E4M3, 16, 1, MIXP_E8M0_RCEIL, 0, 0 },
    { MIXP_F8_E4M3, MIXP_SCALE_TENSOR, 0, 0, MIXP_E8M0_RCEIL, 1, 0 },
    { MIXP_F8_E5M2, MIXP_SCALE_TENSOR, 0, 0, MIXP_E8M0_RCEIL, 1, 0 },
    { MIXP_F8_E5M2, MIXP_SCALE_POWER, 1, 128, MIXP_E8M0_RCEIL, 0, 0 },
    { MIXP_F8_E5M2, MIXP_SCALE_E8M0, 1, 32, MIXP_E8M0_RCEIL, 0, 0 },
    { MIXP_F4_E2M1, MIXP_SCALE_E4M3, 1, 16, MIXP_E8M0_RCEIL, 0, MIXP_4OVER6_MAE },
    { MIXP_F4_E2M1, MIXP_SCALE_E4M3, 16, 16, MIXP_E8M0_RCEIL, 0, MIXP_4OVER6_MAE },
    { MIXP_F4_E2M1, MIXP_SCALE_E4M3, 1, 16, MIXP_E8M0_RCEIL, 0, MIXP_4OVER6_MSE | 4 },
    { MIXP_F4_E2M1, MIXP_SCALE_E4M3, 16, 16, MIXP_E8M0_RCEIL, 0, MIXP_4OVER6_MSE | 4 },
    { MIXP_F4_E2M1, MIXP_SCALE_E4M3, 1, 16, MIXP_E8M0_RCEIL, 0, 8 },
    { MIXP_F4_E2M1, MIXP_SCALE_E4M3, 16, 1, MIXP_E8M0_RCEIL, 0, 8 },
    { MIXP_F4_E2M1, MIXP_SCALE_E4M3, 1, 16, MIXP_E8M0_RCEIL, 0, MIXP_4OVER6_MAE | 8 },
};

/* Quantises x[rows, cols], bf16 or f32, as row `which` of the table says. decode: room for rows or cols numbers: by_lines
 * it becomes the factors of the rows, or columns. Returns a mixp_result. */
int quantise(int which, int is_bf16, const void *x, mixp_bf16 *y, float *decode, int64_t rows, int64_t cols);

int quantise(int which, int is_bf16, const void *x, mixp_bf16 *y, float *decode, int64_t rows, int64_t cols) {
    const operand      *o = &operands[which];
    mixp_context       *ctx = mixp_context_new(NULL);
    mixp_bf16          *turned = (mixp_bf16 *)malloc((size_t)(rows * cols) * sizeof *turned);
    mixp_quantise_args  k;
    float               one;
    mixp_result         r = ctx && turned ? MIXP_OK : MIXP_ERR_MEMORY;
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
    k.power = o->power;
    k.choice = (mixp_4over6)(o->over6 & 3);
    k.bound_448 = (o->over6 & 4) != 0;
    k.by_lines = (o->over6 & 8) != 0;
    k.line_scales = decode;
    if (r == MIXP_OK && which == TURNED) {
        r = mixp_hadamard(mixp_context_exec(ctx), rows, cols, k.x, turned);
        k.x.data = turned;
        k.x.dtype = MIXP_BF16;
    }
    if (r == MIXP_OK) r = mixp_quantise(mixp_context_exec(ctx), &k, k.by_lines ? &one : decode);
    free(turned);
    mixp_context_free(ctx);
    return (int)r;
}

/* y[rows, outs] = x[rows, ins] w[outs, ins]', and the gradients of x and w for the gradient dy of y. x, w and dy hold
 * numbers of bf16. */
typedef struct linear_call {
    int          kind, dy_e4m3, e8m0;
    int64_t      rows, outs, ins;
    const float *x, *w, *dy;
    float       *y, *dx, *dw;
} linear_call;

/* Runs a linear under a recipe. Returns a mixp_result, or -1: the linear was not quantised. */
int linear(const linear_call *l);

static mixp_result applied(mixp_context *ctx, const linear_call *l) {
    int64_t x_size[2], w_size[2], y_size[2];
    mixp_tensor *x, *w, *y = NULL, *dy;
    x_size[0] = y_size[0] = l->rows;
    x_size[1] = w_size[1] = l->ins;
    w_size[0] = y_size[1] = l->outs;
    x = mixp_param(ctx, "x", MIXP_F32, 2, x_size);
    w = mixp_param(ctx, "w", MIXP_F32, 2, w_size);
    mixp_write(x, l->x, MIXP_F32, l->rows * l->ins);
    mixp_write(w, l->w, MIXP_F32, l->outs * l->ins);
    mixp_step_begin(ctx);
    dy = mixp_input(ctx, MIXP_F32, 2, y_size, l->dy);
    MIXP_AUTOCAST(ctx, MIXP_BF16) y = mixp_linear(ctx, x, w, NULL);
    mixp_backward(ctx, mixp_sum(ctx, mixp_mul(ctx, y, dy), MIXP_ALL, 0));
    mixp_read(y, l->y, MIXP_F32, l->rows * l->outs);
    mixp_read(x->grad, l->dx, MIXP_F32, l->rows * l->ins);
    mixp_read(w->grad, l->dw, MIXP_F32, l->outs * l->ins);
    return mixp_context_error(ctx, NULL);
}

int linear(const linear_call *l) {
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_recipe recipe;
    if (!ctx) return MIXP_ERR_MEMORY;
    memset(&recipe, 0, sizeof recipe);
    recipe.kind = (mixp_recipe_kind)l->kind;
    recipe.dy_e4m3 = l->dy_e4m3;
    recipe.e8m0 = (mixp_e8m0_rounding)l->e8m0;
    mixp_autocast_set_recipe(ctx, &recipe);
    int r = (int)applied(ctx, l);
    if (r == MIXP_OK && mixp_autocast_recipe_counts(ctx).products != 3) r = -1;
    mixp_context_free(ctx);
    return r;
}
