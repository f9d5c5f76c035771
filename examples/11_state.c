/* 11_state.c - a recurrent net predicts waves: its state, a buffer, goes on from step to step. Step 50's
 * batch overflows fp16. The guard and mixp_retry repeat that step, and the state counts the batch once.
 * (With a frozen parameter in place of the buffer, the run ends at step 50.)
 * SPDX-License-Identifier: MIT OR Unlicense
 *   cc -O2 examples/11_state.c -I. -lm && ./a.out */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include <math.h>
#include <stdio.h>
enum { ROWS = 16, WIDTH = 8, ALL = ROWS * WIDTH };
static const int64_t shape[2] = { ROWS, WIDTH }, square[2] = { WIDTH, WIDTH };
static float x[ALL], y[ALL], h32[ALL], h16[ALL];

static void fill_batch(int step) {                      /* fp16 holds 60000 x, but not its products */
    for (int i = 0; i < ALL; i++) x[i] = (step == 50 ? 60000.0f : 1.0f) * sinf((float)(i + step) / 4);
    for (int i = 0; i < ALL; i++) y[i] = sinf((float)(i + step + 1) / 4);
}

/* Returns the last loss, and the last state in `state`. */
static double train(mixp_dtype dtype, float *state) {
    mixp_context   *ctx = mixp_context_new(NULL);
    mixp_tensor    *wx = mixp_param(ctx, "wx", MIXP_F32, 2, square), *next = NULL, *loss = NULL;
    mixp_tensor    *wh = mixp_param(ctx, "wh", MIXP_F32, 2, square);
    mixp_tensor    *wo = mixp_param(ctx, "wo", MIXP_F32, 2, square);
    mixp_tensor    *h = mixp_buffer(ctx, "h", MIXP_F32, 2, shape);      /* 0 at first */
    mixp_scaler    *scaler = mixp_scaler_new(ctx, NULL);
    mixp_optimizer *opt = mixp_optimizer_new(ctx, NULL);
    mixp_init_all(ctx, "w*", mixp_init_xavier_normal, 1.0);
    mixp_optimizer_add_all(opt, "*");
    mixp_guard_start(ctx, NULL);
    for (int step = 0; step < 300; step++) {
        fill_batch(step);
        do {
            mixp_step_begin(ctx);
            mixp_zero_grad(opt);
            MIXP_AUTOCAST(ctx, dtype) {
                next = mixp_linear(ctx, mixp_input_f32(ctx, 2, shape, x), wx, NULL);
                next = mixp_relu(ctx, mixp_add(ctx, next, mixp_linear(ctx, h, wh, NULL)));
                loss = mixp_linear(ctx, mixp_rms_norm(ctx, next, NULL, 1e-5f), wo, NULL);
                loss = mixp_mse(ctx, loss, mixp_input_f32(ctx, 2, shape, y));
            }
            mixp_backward(ctx, mixp_scaler_scale(scaler, loss));
            mixp_copy(h, next);                         /* after mixp_backward, which reads h */
            mixp_scaler_step(scaler, opt);
            mixp_scaler_update(scaler);                 /* skipped: h is as before the step */
        } while (mixp_retry(scaler, 3));
    }
    double last = mixp_context_error(ctx, NULL) ? -1.0 : mixp_item(loss);
    printf("%s: %d steps applied\n", mixp_dtype_name(dtype), (int)mixp_scaler_verdict(scaler).applied);
    mixp_read_f32(h, state, ALL);
    mixp_context_free(ctx);
    return last;
}

int main(void) {
    double f32 = train(MIXP_F32, h32), apart = fabs(train(MIXP_F16, h16) - f32);
    for (int i = 0; i < ALL; i++) apart = fmax(apart, fabs((double)h16[i] - (double)h32[i]));
    printf("loss and state within 0.01 of fp32's: %s\n", apart < 0.01 ? "yes" : "no");
    return 0;
}
/* prints:
f32: 300 steps applied
f16: 300 steps applied
loss and state within 0.01 of fp32's: yes
*/
