/* 09_pinn.c - a physics-informed network in fp16 learns u'' = -pi^2 sin(pi x), u(0) = u(1) = 0; u is
 * sin(pi x). mixp_jvp makes u' and u'', which are parts of the loss.
 * SPDX-License-Identifier: MIT OR Unlicense
 *   cc -O2 examples/09_pinn.c -I. -lm && ./a.out */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include <math.h>
#include <stdio.h>
enum { POINTS = 64, WIDTH = 32 };
static const double pi = 3.14159265358979323846;
static const int64_t rows[2] = { POINTS, 1 }, two[2] = { 2, 1 };
static float        at[POINTS], force[POINTS], u[POINTS], edge[2] = { 0, 1 }, none[2] = { 0, 0 };
static mixp_tensor *w[3], *b[3];

static mixp_tensor *network(mixp_context *ctx, mixp_tensor *x) {
    for (int i = 0; i < 2; i++) x = mixp_tanh(ctx, mixp_linear(ctx, x, w[i], b[i]));
    return mixp_linear(ctx, x, w[2], b[2]);
}

static mixp_tensor *loss_of(mixp_context *ctx) {
    mixp_tensor *x = mixp_input_f32(ctx, 2, rows, at), *bent, *ends;
    mixp_tensor_set_requires_grad(x, 1);                        /* before an operator reads x */
    bent = mixp_jvp(ctx, mixp_jvp(ctx, network(ctx, x), x, NULL), x, NULL);
    ends = network(ctx, mixp_input_f32(ctx, 2, two, edge));
    bent = mixp_mse(ctx, bent, mixp_input_f32(ctx, 2, rows, force));
    ends = mixp_mse(ctx, ends, mixp_input_f32(ctx, 2, two, none));
    return mixp_add(ctx, bent, mixp_scale(ctx, ends, 100.0f));
}

int main(void) {
    static const char *const name[2][3] = { { "w0", "w1", "w2" }, { "b0", "b1", "b2" } };
    double          worst = 0.0;
    mixp_context   *ctx = mixp_context_new(NULL);
    mixp_scaler    *scaler = mixp_scaler_new(ctx, NULL);
    mixp_optimizer *opt = mixp_optimizer_new(ctx, NULL);
    mixp_tensor    *loss = NULL;
    for (int i = 0; i < 3; i++) {
        const int64_t shape[2] = { i < 2 ? WIDTH : 1, i > 0 ? WIDTH : 1 };
        w[i] = mixp_param(ctx, name[0][i], MIXP_F32, 2, shape);
        b[i] = mixp_param(ctx, name[1][i], MIXP_F32, 1, shape);
    }
    mixp_init_all(ctx, "w*", mixp_init_xavier_normal, 5.0 / 3);
    mixp_optimizer_add_all(opt, "*");
    for (int i = 0; i < POINTS; i++) at[i] = ((float)i + 0.5f) / POINTS;
    for (int i = 0; i < POINTS; i++) force[i] = (float)(-pi * pi * sin(pi * at[i]));
    mixp_guard_start(ctx, NULL);
    for (int step = 0; step < 3000; step++) {
        mixp_step_begin(ctx);
        mixp_zero_grad(opt);
        MIXP_AUTOCAST(ctx, MIXP_F16) loss = loss_of(ctx);
        mixp_backward(ctx, mixp_scaler_scale(scaler, loss));
        mixp_scaler_step(scaler, opt);
        mixp_scaler_update(scaler);
    }
    MIXP_NO_GRAD(ctx) mixp_read_f32(network(ctx, mixp_input_f32(ctx, 2, rows, at)), u, POINTS);
    for (int i = 0; i < POINTS; i++) worst = fmax(worst, fabs(u[i] - sin(pi * at[i])));
    printf("u is within 0.02 of sin(pi x): %s\n", worst < 0.02 && !mixp_context_error(ctx, NULL) ? "yes" : "no");
    mixp_context_free(ctx);
    return 0;
}
/* prints:
u is within 0.02 of sin(pi x): yes
*/
