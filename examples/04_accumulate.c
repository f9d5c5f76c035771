/* 04_accumulate.c - a batch that does not fit is walked back in four parts; their gradients are the
 * whole batch's.
 * SPDX-License-Identifier: MIT OR Unlicense
 *   cc -O2 examples/04_accumulate.c -I. -lm && ./a.out */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include <math.h>
#include <stdio.h>

enum { ROWS = 32, COLS = 8 };
static float x[ROWS * COLS];
static int32_t label[ROWS];

/* Walks the batch back in `parts`; w's first gradient, unscaled. */
static double gradient(int parts) {
    const int64_t   rows = ROWS / parts, shape[2] = { 4, COLS }, batch[2] = { rows, COLS };
    mixp_context   *ctx = mixp_context_new(NULL);
    mixp_tensor    *w = mixp_param(ctx, "w", MIXP_F32, 2, shape), *loss = NULL;
    mixp_optimizer_desc sgd = mixp_sgd_defaults();
    mixp_optimizer *opt = mixp_optimizer_new(ctx, &sgd);
    mixp_scaler    *scaler = mixp_scaler_new(ctx, NULL);
    float           g[4 * COLS] = { 0 };
    mixp_init_normal(w, 0.0, 0.5);
    mixp_optimizer_add(opt, w, NULL);

    mixp_zero_grad(opt);                        /* once for the whole batch */
    for (int part = 0; part < parts; part++) {
        mixp_step_begin(ctx);                   /* each part has activations of its own */
        MIXP_AUTOCAST(ctx, MIXP_BF16) {
            mixp_tensor *in = mixp_input_f32(ctx, 2, batch, x + part * rows * COLS);
            mixp_tensor *class_of = mixp_input_i32(ctx, 1, &rows, label + part * rows);
            loss = mixp_cross_entropy(ctx, mixp_linear(ctx, in, w, NULL), class_of, MIXP_IGNORE);
        }
        loss = mixp_scale(ctx, loss, 1.0f / (float)parts);      /* the mean of means */
        mixp_backward(ctx, mixp_scaler_scale(scaler, loss));    /* adds to the gradients */
    }
    mixp_scaler_unscale(scaler, opt);           /* (only to show them) */
    mixp_read_f32(w->grad, g, w->count);
    mixp_scaler_step(scaler, opt);              /* one update for all parts */
    mixp_scaler_update(scaler);
    if (mixp_context_error(ctx, NULL)) printf("failed\n");
    mixp_context_free(ctx);
    return (double)g[0];
}

int main(void) {
    for (int i = 0; i < ROWS * COLS; i++) x[i] = (float)((i * 37) % 64 - 32) / 32.0f;
    for (int i = 0; i < ROWS; i++) label[i] = i * 7 % 4;
    double whole = gradient(1), parts = gradient(4);
    printf("the same gradient to 1%%: %s\n", fabs(whole - parts) < 0.01 * fabs(whole) ? "yes" : "no");
    return 0;
}
/* prints:
the same gradient to 1%: yes
*/
