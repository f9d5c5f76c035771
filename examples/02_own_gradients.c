/* 02_own_gradients.c - loss scaling, an overflow check, clipping and AdamW for a program that
 * computes its gradients itself. One gradient is broken on purpose.
 * SPDX-License-Identifier: MIT OR Unlicense
 *   cc -O2 examples/02_own_gradients.c -I. -lm && ./a.out */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include <stdio.h>

enum { N = 8 };
static float    w[N];                   /* your weights ... */
static mixp_f16 g[N];                   /* ... and their gradients, here in fp16 */

/* Of the loss sum((w - 1)^2) / 2, times the scale: what your backward pass does. */
static void my_backward(float scale, int broken) {
    for (int i = 0; i < N; i++) g[i] = mixp_f16_from_f32(scale * (w[i] - 1.0f));
    if (broken) g[3] = mixp_f16_from_f32(1e9f);
}

int main(void) {
    const int64_t   shape[1] = { N };
    mixp_context   *ctx = mixp_context_new(NULL);
    mixp_scaler_desc how = { .init_scale = 1024 };
    mixp_scaler    *scaler = mixp_scaler_new(ctx, &how);
    mixp_optimizer_desc adamw = mixp_adamw_defaults();
    adamw.lr = 0.1;
    adamw.max_norm = 1.0;
    mixp_optimizer *opt = mixp_optimizer_new(ctx, &adamw);
    const char     *why;

    mixp_optimizer_add(opt, mixp_view_f32(ctx, "w", 1, shape, w),      /* once, before the loop */
                       mixp_view_f16(ctx, "w.grad", 1, shape, g));
    for (int step = 0; step < 40; step++) {
        my_backward(mixp_scaler_loss_scale(scaler), step == 20);
        mixp_scaler_step(scaler, opt);
        mixp_scaler_update(scaler);
        mixp_verdict v = mixp_scaler_verdict(scaler);
        if (v.outcome == MIXP_STEP_SKIPPED)
            printf("step %d skipped: %s in %s[%d]\n", step, v.bad_is_nan ? "NaN" : "Inf", v.bad_tensor,
                   (int)v.bad_element);
        if (mixp_context_error(ctx, &why)) { fprintf(stderr, "%s\n", why); return 1; }
    }
    printf("w[3] = %.1f, scale %g\n", (double)w[3], (double)mixp_scaler_loss_scale(scaler));
    mixp_context_free(ctx);
    return 0;
}
/* prints:
step 20 skipped: Inf in w[3]
w[3] = 1.0, scale 512
*/
