/* typical.c - PyTorch's "Typical Mixed Precision Training" in C
 * SPDX-License-Identifier: MIT OR Unlicense
 *   cc -O2 examples/amp/typical.c -I. -lm && ./a.out */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include <math.h>
#include <stdio.h>

enum { ROWS = 32, IN = 4, STEPS = 200 };

int main(void) {
    const int64_t   sw[2] = { 1, IN }, sx[2] = { ROWS, IN }, sy[2] = { ROWS, 1 };
    float           x[ROWS * IN], y[ROWS];
    mixp_context   *ctx = mixp_context_new(NULL);
    mixp_tensor    *w = mixp_param(ctx, "w", MIXP_F32, 2, sw), *loss = NULL;
    mixp_optimizer_desc sgd = mixp_sgd_defaults();
    mixp_optimizer *opt;
    mixp_scaler    *scaler = mixp_scaler_new(ctx, NULL);             /* scaler = GradScaler()            */
    const char     *why;
    for (int i = 0; i < ROWS * IN; i++) x[i] = (float)(i * 29 % 64 - 32) / 32.0f;
    for (int i = 0; i < ROWS; i++) y[i] = 2.0f * x[i * IN] - x[i * IN + 3];
    sgd.lr = 0.1;
    opt = mixp_optimizer_new(ctx, &sgd);                             /* SGD(model.parameters(), lr=0.1)  */
    mixp_optimizer_add_all(opt, "*");
    for (int step = 0; step < STEPS; step++) {
        mixp_step_begin(ctx);
        mixp_zero_grad(opt);                                         /* optimizer.zero_grad()            */
        MIXP_AUTOCAST(ctx, MIXP_F16) {                               /* with autocast(dtype=float16):    */
            mixp_tensor *out = mixp_linear(ctx, mixp_input_f32(ctx, 2, sx, x), w, NULL);
            loss = mixp_mse(ctx, out, mixp_input_f32(ctx, 2, sy, y));
        }
        mixp_backward(ctx, mixp_scaler_scale(scaler, loss));         /* scaler.scale(loss).backward()    */
        mixp_scaler_step(scaler, opt);                               /* scaler.step(optimizer)           */
        mixp_scaler_update(scaler);                                  /* scaler.update()                  */
        if (mixp_context_error(ctx, &why)) { fprintf(stderr, "%s\n", why); return 1; }
    }
    float got[IN];
    mixp_read_f32(w, got, IN);
    printf("w = %.2f %.2f %.2f %.2f\n", (double)got[0], fabs((double)got[1]), fabs((double)got[2]), (double)got[3]);
    mixp_context_free(ctx);
    return 0;
}
/* prints:
w = 2.00 0.00 0.00 -1.00
*/
