/* penalty.c - PyTorch's "Gradient penalty". mixprec has no double backward: a difference replaces it.
 * SPDX-License-Identifier: MIT OR Unlicense
 *   cc -O2 examples/amp/penalty.c -I. -lm && ./a.out
 *
 * The penalty (|slope of f at x| - 1)^2 is that of WGAN-GP. A first walk back finds the slope's direction
 * d. Then |slope| = (f(x + e d) - f(x - e d)) / 2e + O(e^2), and an ordinary walk back differentiates that.
 * Not here: PyTorch's penalty on the gradients of weights. */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include <stdio.h>

enum { IN = 2, HIDDEN = 8, STEPS = 200 };
#define E 0.0625f
static const float   x[IN] = { 0.5f, -0.25f };
static const int64_t s1[2] = { HIDDEN, IN }, s2[2] = { 1, HIDDEN }, pair[2] = { 2, 1 };
static mixp_tensor  *w1, *w2;

static mixp_tensor *critic(mixp_context *ctx, int64_t rows, const float *at, mixp_tensor **in) {
    const int64_t shape[2] = { rows, IN };
    *in = mixp_input(ctx, MIXP_F32, 2, shape, at);
    mixp_tensor_set_requires_grad(*in, 1);
    return mixp_linear(ctx, mixp_tanh(ctx, mixp_linear(ctx, *in, w1, NULL)), w2, NULL);
}
int main(void) {
    const float     half[2] = { 0.5f / E, -0.5f / E }, one = 1.0f;
    mixp_context   *ctx = mixp_context_new(NULL);
    mixp_optimizer *opt = mixp_optimizer_new(ctx, NULL);
    const mixp_scaler_desc how = { .init_scale = 256 };              /* `half` multiplies gradients by 8 */
    mixp_scaler    *scaler = mixp_scaler_new(ctx, &how);
    mixp_tensor    *in = NULL, *f = NULL, *loss = NULL;
    float           g[IN], at[2 * IN], norm = 0.0f;
    const char     *why;
    w1 = mixp_param(ctx, "w1", MIXP_F32, 2, s1);
    w2 = mixp_param(ctx, "w2", MIXP_F32, 2, s2);
    mixp_init_all(ctx, "*", mixp_init_kaiming_normal, 2.0);
    mixp_optimizer_add_all(opt, "*");
    mixp_optimizer_set_lr(opt, 0.01);
    for (int step = 0; step <= STEPS; step++) {
        mixp_step_begin(ctx);
        MIXP_AUTOCAST(ctx, MIXP_F16) f = critic(ctx, 1, x, &in);
        mixp_backward(ctx, mixp_scaler_scale(scaler, f));            /* autograd.grad(scaler.scale(f), x) */
        mixp_read(in->grad, g, MIXP_F32, IN);
        norm = sqrtf(g[0] * g[0] + g[1] * g[1]);
        if (mixp_context_error(ctx, &why)) { fprintf(stderr, "%s\n", why); return 1; }
        if (step % STEPS == 0) printf("|slope| = %.2f\n", (double)(norm / mixp_scaler_loss_scale(scaler)));
        for (int i = 0; i < IN; i++) at[i] = x[i] + E * g[i] / norm; /* d needs no unscaling             */
        for (int i = 0; i < IN; i++) at[IN + i] = x[i] - E * g[i] / norm;
        mixp_zero_grad(opt);                                         /* only the penalty trains          */
        MIXP_AUTOCAST(ctx, MIXP_F16) {
            f = mixp_mul(ctx, critic(ctx, 2, at, &in), mixp_input(ctx, MIXP_F32, 2, pair, half));
            loss = mixp_mse(ctx, mixp_sum(ctx, f, MIXP_ALL, 0), mixp_input(ctx, MIXP_F32, 0, NULL, &one));
        }
        mixp_backward(ctx, mixp_scaler_scale(scaler, loss));         /* scaler.scale(loss).backward()    */
        mixp_scaler_step(scaler, opt);
        mixp_scaler_update(scaler);
    }
    mixp_context_free(ctx);
    return 0;
}
/* prints:
|slope| = 1.75
|slope| = 1.00
*/
