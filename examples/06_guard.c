/* 06_guard.c - an activation exceeds 65504, the largest number of fp16. No loss scale prevents that. A
 * guard finds the operator, lets it store f32, and reports it.
 * SPDX-License-Identifier: MIT OR Unlicense
 *   cc -O2 examples/06_guard.c -I. -lm && ./a.out */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include <stdio.h>

enum { N = 4 };

int main(void) {
    const int64_t   shape[2] = { N, N };
    mixp_context   *ctx = mixp_context_new(NULL);
    mixp_tensor    *big = mixp_param(ctx, "big", MIXP_F32, 2, shape);
    mixp_tensor    *w = mixp_param(ctx, "w", MIXP_F32, 2, shape);
    mixp_optimizer_desc sgd = mixp_sgd_defaults();
    mixp_optimizer *opt = mixp_optimizer_new(ctx, &sgd);
    mixp_scaler_desc how = { .init_scale = 1024 };
    mixp_scaler    *scaler = mixp_scaler_new(ctx, &how);
    mixp_event      e;
    char            text[400];
    float           x[N * N];
    for (int i = 0; i < N * N; i++) x[i] = 200.0f;
    mixp_fill(big, 100.0);                      /* 4 * 200 * 100 = 80000 */
    mixp_fill(w, 1e-3);
    mixp_tensor_set_requires_grad(big, 0);      /* frozen: no optimizer has it */
    mixp_optimizer_add(opt, w, NULL);
    mixp_guard_start(ctx, NULL);

    for (int step = 0; step < 3; step++) {
        do {                                    /* a skipped step is tried again with its batch */
            mixp_tensor *h = NULL, *loss = NULL;
            mixp_step_begin(ctx);
            mixp_zero_grad(opt);
            MIXP_AUTOCAST(ctx, MIXP_F16) {
                MIXP_SCOPE(ctx, "body")      /* names what is applied inside */
                    h = mixp_linear(ctx, mixp_input_f32(ctx, 2, shape, x), big, NULL);
                h = mixp_linear(ctx, mixp_scale(ctx, h, 1e-4f), w, NULL);
                loss = mixp_mean(ctx, h, MIXP_ALL, 0);
            }
            mixp_backward(ctx, mixp_scaler_scale(scaler, loss));
            mixp_scaler_step(scaler, opt);
            mixp_scaler_update(scaler);
        } while (mixp_retry(scaler, 3));
    }
    for (int i = 0; mixp_guard_event(ctx, i, &e); i++)
        puts(mixp_event_text(&e, text, sizeof text));
    mixp_verdict v = mixp_scaler_verdict(scaler);
    printf("%d steps applied, %d skipped, scale still %g\n", (int)v.applied, (int)v.skipped,
           (double)mixp_scaler_loss_scale(scaler));
    mixp_context_free(ctx);
    return 0;
}
/* prints:
step 1: body: linear overflowed: stores f32 now (16 values not finite). No action needed: the site returns to its low dtype once its values stay in range.
step 1: skipped because the result of 'body: linear' overflowed. A site stores f32 from now on. No action needed.
3 steps applied, 1 skipped, scale still 1024
*/
