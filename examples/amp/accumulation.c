/* accumulation.c - PyTorch's "Gradient accumulation": one update for several batches
 * SPDX-License-Identifier: MIT OR Unlicense
 *   cc -O2 examples/amp/accumulation.c -I. -lm && ./a.out */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include <stdio.h>

enum { ROWS = 8, IN = 4, BATCHES = 400, ACCUMULATE = 4 };

int main(void) {
    const int64_t   sw[2] = { 1, IN }, sx[2] = { ROWS, IN }, sy[2] = { ROWS, 1 };
    float           x[ROWS * IN], y[ROWS];
    mixp_context   *ctx = mixp_context_new(NULL);
    mixp_tensor    *w = mixp_param(ctx, "w", MIXP_F32, 2, sw), *loss = NULL;
    mixp_optimizer_desc sgd = mixp_sgd_defaults();
    mixp_optimizer *opt;
    mixp_scaler    *scaler = mixp_scaler_new(ctx, NULL);
    const char     *why;
    sgd.lr = 0.1;
    opt = mixp_optimizer_new(ctx, &sgd);
    mixp_optimizer_add(opt, w, NULL);
    for (int batch = 0; batch < BATCHES; batch++) {
        for (int i = 0; i < ROWS * IN; i++) x[i] = (float)((batch * 11 + i * 29) % 64 - 32) / 32.0f;
        for (int i = 0; i < ROWS; i++) y[i] = 2.0f * x[i * IN] - x[i * IN + 3];
        mixp_step_begin(ctx);                                        /* each batch has own activations   */
        MIXP_AUTOCAST(ctx, MIXP_F16) {
            mixp_tensor *out = mixp_linear(ctx, mixp_input_f32(ctx, 2, sx, x), w, NULL);
            loss = mixp_mse(ctx, out, mixp_input_f32(ctx, 2, sy, y));
        }
        loss = mixp_scale(ctx, loss, 1.0f / ACCUMULATE);             /* loss = loss / iters_to_accumulate */
        mixp_backward(ctx, mixp_scaler_scale(scaler, loss));         /* adds to the scaled gradients     */
        if ((batch + 1) % ACCUMULATE == 0) {                         /* unscale and clip here if desired */
            mixp_scaler_step(scaler, opt);
            mixp_scaler_update(scaler);                              /* the scale moves only here        */
            mixp_zero_grad(opt);
        }
        if (mixp_context_error(ctx, &why)) { fprintf(stderr, "%s\n", why); return 1; }
    }
    float got[IN];
    mixp_read_f32(w, got, IN);
    printf("%d updates, w = %.1f ... %.1f\n", (int)mixp_optimizer_applied(opt), (double)got[0], (double)got[IN - 1]);
    mixp_context_free(ctx);
    return 0;
}
/* prints:
100 updates, w = 2.0 ... -1.0
*/
