/* 12_small_loss.c - a loss that becomes small by itself: its gradients fall below fp16's range, and training stops. A
 * dynamic loss scale keeps them in range. The data: 32,768 examples of 8 inputs and 8 outputs. At an error of 1e-3
 * the gradient of a prediction, 2 error / 262,144, is 8e-9; fp16's smallest number is 6e-8.
 * SPDX-License-Identifier: MIT OR Unlicense
 *   cc -O2 examples/12_small_loss.c -I. -lm && ./a.out */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include <stdio.h>

enum { ROWS = 32768, WIDTH = 8, STEPS = 80, EVERY = 20 };
static float x[ROWS * WIDTH], target[ROWS * WIDTH];

/* Output j of the map to be found is 1/2 of input j less 1/4 of its neighbour. */
static void make_data(void) {
    unsigned seed = 1;
    for (int i = 0; i < ROWS * WIDTH; i++) {
        seed = seed * 1664525u + 1013904223u;
        x[i] = (float)(seed >> 8) / 8388608.0f - 1.0f;
    }
    for (int i = 0; i < ROWS * WIDTH; i++)
        target[i] = 0.5f * x[i] - 0.25f * x[i / WIDTH * WIDTH + (i + 1) % WIDTH];
}

/* Trains in a dtype; the loss of every 20th step. */
static void train(mixp_dtype dtype, int scaled, double *curve) {
    const int64_t       shape[2] = { WIDTH, WIDTH }, batch[2] = { ROWS, WIDTH };
    mixp_scaler_desc    rule = { .growth_interval = EVERY, .disabled = !scaled };
    mixp_optimizer_desc sgd = mixp_sgd_defaults();
    mixp_context       *ctx = mixp_context_new(NULL);
    mixp_tensor        *w = mixp_param(ctx, "w", MIXP_F32, 2, shape), *loss = NULL;
    mixp_scaler        *scaler = mixp_scaler_new(ctx, &rule);
    sgd.lr = 1.2;
    mixp_optimizer *opt = mixp_optimizer_new(ctx, &sgd);
    mixp_optimizer_add(opt, w, NULL);
    for (int step = 0; step <= STEPS; step++) {
        mixp_step_begin(ctx);
        mixp_zero_grad(opt);
        MIXP_AUTOCAST(ctx, dtype) {
            mixp_tensor *y = mixp_linear(ctx, mixp_input_f32(ctx, 2, batch, x), w, NULL);
            loss = mixp_mse(ctx, y, mixp_input_f32(ctx, 2, batch, target));
        }
        mixp_backward(ctx, mixp_scaler_scale(scaler, loss));
        mixp_scaler_step(scaler, opt);
        mixp_scaler_update(scaler);
        if (step % EVERY == 0) curve[step / EVERY] = mixp_item(loss);
    }
    mixp_context_free(ctx);
}

int main(void) {
    double f32[STEPS / EVERY + 1], f16[STEPS / EVERY + 1], dynamic[STEPS / EVERY + 1];
    make_data();
    train(MIXP_F32, 0, f32);
    train(MIXP_F16, 0, f16);
    train(MIXP_F16, 1, dynamic);
    printf("step  fp32   fp16   fp16, dynamic scale\n");
    for (int i = 0; i <= STEPS / EVERY; i++) printf("%4d  %.0e  %.0e  %.0e\n", i * EVERY, f32[i], f16[i], dynamic[i]);
    return 0;
}
/* prints:
step  fp32   fp16   fp16, dynamic scale
   0  1e-01  1e-01  1e-01
  20  2e-03  2e-03  2e-03
  40  2e-05  2e-05  2e-05
  60  3e-07  4e-06  4e-07
  80  5e-09  3e-06  9e-09
*/
