/* clipping.c - PyTorch's "Gradient clipping": unscale first, then clip
 * SPDX-License-Identifier: MIT OR Unlicense
 *   cc -O2 examples/amp/clipping.c -I. -lm && ./a.out */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include <stdio.h>

enum { N = 4 };

int main(void) {
    const int64_t   shape[2] = { 1, N }, one[2] = { 1, 1 };
    const float     x[N] = { 3.0f, 4.0f, 0.0f, 0.0f }, target = -0.25f;
    mixp_context   *ctx = mixp_context_new(NULL);
    mixp_tensor    *w = mixp_param(ctx, "w", MIXP_F32, 2, shape), *loss = NULL;
    mixp_optimizer_desc sgd = mixp_sgd_defaults();
    mixp_optimizer *opt;
    mixp_scaler    *scaler = mixp_scaler_new(ctx, NULL);
    float           g[N], v[N];
    const char     *why;
    sgd.lr = 1.0;
    opt = mixp_optimizer_new(ctx, &sgd);
    mixp_optimizer_add(opt, w, NULL);

    mixp_step_begin(ctx);
    mixp_zero_grad(opt);
    MIXP_AUTOCAST(ctx, MIXP_F16) {
        mixp_tensor *out = mixp_linear(ctx, mixp_input_f32(ctx, 2, shape, x), w, NULL);
        loss = mixp_mse(ctx, out, mixp_input_f32(ctx, 2, one, &target));   /* slope: 0.5 x */
    }
    mixp_backward(ctx, mixp_scaler_scale(scaler, loss));             /* scaler.scale(loss).backward()    */
    mixp_scaler_unscale(scaler, opt);                                /* scaler.unscale_(optimizer)       */
    mixp_clip_grad_norm(opt, 1.0);                                   /* clip_grad_norm_(params, 1.0)     */
    mixp_read_f32(w->grad, g, N);
    mixp_scaler_step(scaler, opt);                                   /* does not unscale again           */
    mixp_scaler_update(scaler);
    mixp_read_f32(w, v, N);
    if (mixp_context_error(ctx, &why)) { fprintf(stderr, "%s\n", why); return 1; }
    printf("norm %.1f before, gradient %.2f %.2f after, w %.2f %.2f\n", mixp_scaler_verdict(scaler).grad_norm,
           (double)g[0], (double)g[1], (double)v[0], (double)v[1]);
    mixp_context_free(ctx);
    return 0;
}
/* prints:
norm 2.5 before, gradient 0.60 0.80 after, w -0.60 -0.80
*/
