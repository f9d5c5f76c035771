/* 03_training_loop.c - the whole loop in fp16: a network of two layers learns y = x1 * x2.
 * SPDX-License-Identifier: MIT OR Unlicense
 *   cc -O2 examples/03_training_loop.c -I. -lm && ./a.out */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include <stdio.h>

enum { POINTS = 64, HIDDEN = 32 };

int main(void) {
    const int64_t first[2] = { HIDDEN, 2 }, second[2] = { 1, HIDDEN };
    const int64_t in[2] = { POINTS, 2 }, out[2] = { POINTS, 1 };
    float x[2 * POINTS], y[POINTS];
    for (int i = 0; i < POINTS; i++) {
        x[2 * i] = (float)(i % 8) / 4.0f - 1.0f;
        x[2 * i + 1] = (float)(i / 8) / 4.0f - 1.0f;
        y[i] = x[2 * i] * x[2 * i + 1];
    }
    mixp_context   *ctx = mixp_context_new(NULL);
    mixp_tensor    *w1 = mixp_param(ctx, "w1", MIXP_F32, 2, first);
    mixp_tensor    *b1 = mixp_param(ctx, "b1", MIXP_F32, 1, first);
    mixp_tensor    *w2 = mixp_param(ctx, "w2", MIXP_F32, 2, second), *loss = NULL;
    mixp_optimizer_desc adamw = mixp_adamw_defaults();
    adamw.lr = 0.01;
    mixp_optimizer *opt = mixp_optimizer_new(ctx, &adamw);
    mixp_scaler    *scaler = mixp_scaler_new(ctx, NULL);
    const char     *why;
    mixp_init_xavier_normal(w1, 5.0 / 3.0);
    mixp_init_xavier_normal(w2, 1.0);
    mixp_init_uniform(b1, -1.0, 1.0);
    mixp_optimizer_add(opt, w1, NULL);
    mixp_optimizer_add(opt, b1, NULL);
    mixp_optimizer_add(opt, w2, NULL);
    for (int step = 0; step < 300; step++) {
        mixp_step_begin(ctx);                   /* frees the last step's activations */
        mixp_zero_grad(opt);
        MIXP_AUTOCAST(ctx, MIXP_F16) {          /* products in fp16, weights stay fp32 */
            mixp_tensor *h = mixp_linear(ctx, mixp_input_f32(ctx, 2, in, x), w1, b1);
            mixp_tensor *guess = mixp_linear(ctx, mixp_tanh(ctx, h), w2, NULL);
            loss = mixp_mse(ctx, guess, mixp_input_f32(ctx, 2, out, y));
        }
        mixp_backward(ctx, mixp_scaler_scale(scaler, loss));
        mixp_scaler_step(scaler, opt);          /* unscales, looks for Inf and NaN, updates */
        mixp_scaler_update(scaler);
        if (mixp_context_error(ctx, &why)) { fprintf(stderr, "%s\n", why); return 1; }
    }
    printf("loss below 0.001: %s\n", mixp_item(loss) < 0.001 ? "yes" : "no");
    mixp_context_free(ctx);
    return 0;
}
/* prints:
loss below 0.001: yes
*/
