/* penalty.c - PyTorch's "Gradient penalty" in C: the loss and the norm of its gradients by the weights
 * SPDX-License-Identifier: MIT OR Unlicense
 *   cc -O2 examples/amp/penalty.c -I. -lm && ./a.out
 *
 * PyTorch records the gradients with create_graph=True. Here a first walk back gives the gradients g. mixp_jvp then
 * differentiates the loss along d = g / |g|. This derivative is |g|, and with d constant its gradients are those of
 * |g|, exactly. The comment of mixp_jvp lists the operators that it supports, also mixp_mse and mixp_cross_entropy.
 * For a penalty on the slope at an input (WGAN-GP) take the input, which must require a gradient, in place of w. */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include <math.h>
#include <stdio.h>

enum { ROWS = 32, IN = 4, HIDDEN = 8, STEPS = 201, WEIGHTS = 2 };

int main(void) {
    const int64_t   sx[2] = { ROWS, IN }, s1[2] = { HIDDEN, IN }, s2[2] = { 1, HIDDEN }, sy[2] = { ROWS, 1 };
    float           x[ROWS * IN], y[ROWS];
    mixp_context   *ctx = mixp_context_new(NULL);
    mixp_tensor    *w[WEIGHTS], *d[WEIGHTS], *h, *loss = NULL, *norm = NULL;
    mixp_optimizer *opt = mixp_optimizer_new(ctx, NULL);
    mixp_scaler    *scaler = mixp_scaler_new(ctx, NULL);             /* scaler = GradScaler()            */
    const char     *why;
    for (int i = 0; i < ROWS * IN; i++) x[i] = (float)(i * 29 % 64 - 32) / 32.0f;
    for (int i = 0; i < ROWS; i++) y[i] = 2.0f * x[i * IN] * x[i * IN + 3];
    w[0] = mixp_param(ctx, "w1", MIXP_F32, 2, s1);
    w[1] = mixp_param(ctx, "w2", MIXP_F32, 2, s2);
    mixp_init_all(ctx, "*", mixp_init_kaiming_normal, 1.0);
    mixp_optimizer_add_all(opt, "*");
    mixp_optimizer_set_lr(opt, 0.01);
    for (int step = 0; step < STEPS; step++) {
        double square = 0.0;
        mixp_step_begin(ctx);
        mixp_zero_grad(opt);                                         /* optimizer.zero_grad()            */
        MIXP_AUTOCAST(ctx, MIXP_F16) {                               /* with autocast(dtype=float16):    */
            h = mixp_tanh(ctx, mixp_linear(ctx, mixp_input_f32(ctx, 2, sx, x), w[0], NULL));
            loss = mixp_mse(ctx, mixp_linear(ctx, h, w[1], NULL), mixp_input_f32(ctx, 2, sy, y));
        }
        mixp_backward(ctx, mixp_scaler_scale(scaler, loss));         /* autograd.grad(scaler.scale(loss) */
        MIXP_NO_GRAD(ctx) {                                          /*               , parameters)      */
            for (int i = 0; i < WEIGHTS; i++)
                square += mixp_item(mixp_sum(ctx, mixp_square(ctx, w[i]->grad), MIXP_ALL, 0));
            for (int i = 0; i < WEIGHTS; i++)                        /* d needs no unscaling             */
                d[i] = mixp_scale(ctx, w[i]->grad, (float)(1.0 / sqrt(square)));
        }
        mixp_zero_grad(opt);
        MIXP_AUTOCAST(ctx, MIXP_F16) {                               /* with autocast(dtype=float16):    */
            norm = mixp_add(ctx, mixp_jvp(ctx, loss, w[0], d[0]), mixp_jvp(ctx, loss, w[1], d[1]));
            loss = mixp_add(ctx, loss, norm);                        /*     loss = loss + grad_norm      */
        }
        mixp_backward(ctx, mixp_scaler_scale(scaler, loss));         /* scaler.scale(loss).backward()    */
        mixp_scaler_step(scaler, opt);                               /* scaler.step(optimizer)           */
        mixp_scaler_update(scaler);                                  /* scaler.update()                  */
        if (mixp_context_error(ctx, &why)) { fprintf(stderr, "%s\n", why); return 1; }
        if (step % 200 == 0) printf("loss + norm = %.2f, norm = %.2f\n", mixp_item(loss), mixp_item(norm));
    }
    mixp_context_free(ctx);
    return 0;
}
/* prints:
loss + norm = 0.80, norm = 0.59
loss + norm = 0.08, norm = 0.02
*/
