/* several.c - PyTorch's "Working with Multiple Models, Losses, and Optimizers": one scaler serves all
 * SPDX-License-Identifier: MIT OR Unlicense
 *   cc -O2 examples/amp/several.c -I. -lm && ./a.out */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include <stdio.h>

enum { ROWS = 16, STEPS = 400 };

int main(void) {
    const int64_t   sw[2] = { 1, 1 }, sx[2] = { ROWS, 1 };
    float           x[ROWS], y[ROWS];
    mixp_context   *ctx = mixp_context_new(NULL);
    mixp_tensor    *w0 = mixp_param(ctx, "model0.w", MIXP_F32, 2, sw), *loss0 = NULL;
    mixp_tensor    *w1 = mixp_param(ctx, "model1.w", MIXP_F32, 2, sw), *loss1 = NULL;
    mixp_optimizer_desc sgd = mixp_sgd_defaults(), adam = mixp_adam_defaults();
    mixp_optimizer *optimizer0 = mixp_optimizer_new(ctx, &sgd), *optimizer1;
    mixp_scaler    *scaler = mixp_scaler_new(ctx, NULL);
    const char     *why;
    adam.lr = 0.02;
    optimizer1 = mixp_optimizer_new(ctx, &adam);
    mixp_optimizer_set_lr(optimizer0, 0.01);
    mixp_optimizer_add_all(optimizer0, "model0.*");
    mixp_optimizer_add_all(optimizer1, "model1.*");
    for (int i = 0; i < ROWS; i++) x[i] = (float)(i - 7) / 4.0f;
    for (int i = 0; i < ROWS; i++) y[i] = 3.0f * x[i];
    for (int step = 0; step < STEPS; step++) {
        mixp_step_begin(ctx);
        mixp_zero_grad(optimizer0);
        mixp_zero_grad(optimizer1);
        MIXP_AUTOCAST(ctx, MIXP_F16) {
            mixp_tensor *in = mixp_input_f32(ctx, 2, sx, x), *target = mixp_input_f32(ctx, 2, sx, y);
            mixp_tensor *out0 = mixp_linear(ctx, in, w0, NULL), *out1 = mixp_linear(ctx, in, w1, NULL);
            loss0 = mixp_mse(ctx, mixp_add(ctx, mixp_scale(ctx, out0, 2), mixp_scale(ctx, out1, 3)), target);
            loss1 = mixp_mse(ctx, mixp_sub(ctx, mixp_scale(ctx, out0, 3), mixp_scale(ctx, out1, 5)), target);
        }
        mixp_backward(ctx, mixp_scaler_scale(scaler, loss0));        /* (retain_graph is not needed)     */
        mixp_backward(ctx, mixp_scaler_scale(scaler, loss1));        /* adds to the gradients of loss0   */
        mixp_scaler_unscale(scaler, optimizer0);                     /* only to inspect or clip them     */
        mixp_scaler_step(scaler, optimizer0);                        /* each decides for itself whether  */
        mixp_scaler_step(scaler, optimizer1);                        /* its gradients are finite         */
        mixp_scaler_update(scaler);                                  /* once, after both                 */
        if (mixp_context_error(ctx, &why)) { fprintf(stderr, "%s\n", why); return 1; }
    }
    printf("2 w0 + 3 w1 = %.2f, 3 w0 - 5 w1 = %.2f\n", 2 * mixp_item(w0) + 3 * mixp_item(w1),
           3 * mixp_item(w0) - 5 * mixp_item(w1));
    mixp_context_free(ctx);
    return 0;
}
/* prints:
2 w0 + 3 w1 = 3.00, 3 w0 - 5 w1 = 3.00
*/
