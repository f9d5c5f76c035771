/* underflow.c - gradients too small for fp16: what the counts report if the loss scaler is missing.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 *     make build/underflow && build/underflow
 *
 * A network of six layers. Its loss is a mean over half a million positions, as in GPT-2's batch, but
 * a step here has 64 of the positions: gradients are about 2^-30. The network is trained in f32, in
 * fp16 without a scaler, and in fp16 with a scale that is set from the largest gradients. Each run
 * prints the share of its gradients that fp16 flushes to zero, and draws their exponents.
 * test_overflow.sh checks the output. `make show` has GPT-2's batch in a GPT.
 */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include <stdio.h>

enum { LAYERS = 6, WIDTH = 24, POINTS = 64, STEPS = 600, LOOK_AT = 200 };

typedef struct net { mixp_tensor *w[LAYERS + 1], *b[LAYERS + 1]; } net;

static void make_net(mixp_context *ctx, net *m) {
    for (int i = 0; i <= LAYERS; i++) {
        int64_t shape[2] = {i < LAYERS ? WIDTH : 1, i ? WIDTH : 1};
        char    weight[16], bias[16];
        snprintf(weight, sizeof weight, "%d.weight", i);
        snprintf(bias, sizeof bias, "%d.bias", i);
        m->w[i] = mixp_param(ctx, weight, MIXP_F32, 2, shape);
        m->b[i] = mixp_param(ctx, bias, MIXP_F32, 1, shape);
        mixp_init_normal(m->w[i], 0, i ? 0.9 / sqrt((double)WIDTH) : 2.0);
        mixp_init_normal(m->b[i], 0, 0.5);
    }
}

/* The mean squared error of y = sin 3x at some points, as its part of the whole batch's mean. */
static mixp_tensor *loss_of(mixp_context *ctx, const net *m, mixp_tensor **error) {
    const int64_t shape[2] = {POINTS, 1};
    float         x[POINTS], y[POINTS];
    for (int i = 0; i < POINTS; i++) {
        x[i] = (float)(2.0 * (i + 0.5) / POINTS - 1.0);
        y[i] = sinf(3.0f * x[i]);
    }
    mixp_tensor *h = mixp_input(ctx, MIXP_F32, 2, shape, x);
    for (int i = 0; i <= LAYERS; i++) {
        h = mixp_linear(ctx, h, m->w[i], m->b[i]);
        if (i < LAYERS) h = mixp_tanh(ctx, h);
    }
    *error = mixp_mse(ctx, h, mixp_input(ctx, MIXP_F32, 2, shape, y));
    return mixp_scale(ctx, *error, 1.0f / 524288.0f);
}

/* How many gradients there are of each size: a darker letter is ten times as many. */
static void draw(const mixp_underflow *u) {
    static const char shades[] = " .:+*#";
    printf("  size  ");
    for (int e = -48; e < 16; e++) {
        int shade = 0;
        for (int64_t n = u->exponents[e + 127]; n > 0; n /= 10) shade++;
        putchar(shades[shade < 5 ? shade : 5]);
    }
    printf("\n        flushed to zero, < 2^-24|subnormal|normal, from 2^-14 to 2^15\n");
}

static int train(const char *name, mixp_dtype dtype, int with_scaler) {
    mixp_context    *ctx = mixp_context_new(NULL);
    mixp_scaler_desc scale = {.rule = MIXP_RULE_PREDICTIVE, .init_scale = 1};
    mixp_optimizer_desc adamw = mixp_adamw_defaults();
    mixp_tensor     *loss = NULL, *error = NULL;
    mixp_underflow   u;
    const char      *why;
    net              m;
    make_net(ctx, &m);
    adamw.lr = 2e-3;
    adamw.eps = 1e-16;                  /* Adam divides by gradients: let it see small ones */
    mixp_optimizer *opt = mixp_optimizer_new(ctx, &adamw);
    mixp_scaler    *scaler = mixp_scaler_new(ctx, &scale);
    for (int i = 0; i <= LAYERS; i++) {
        mixp_optimizer_add(opt, m.w[i], NULL);
        mixp_optimizer_add(opt, m.b[i], NULL);
    }
    for (int step = 1; step <= STEPS; step++) {
        mixp_step_begin(ctx);
        mixp_zero_grad(opt);
        MIXP_AUTOCAST(ctx, dtype) loss = loss_of(ctx, &m, &error);
        mixp_backward(ctx, with_scaler ? mixp_scaler_scale(scaler, loss) : loss);
        if (step == LOOK_AT) mixp_optimizer_sample(opt);
        if (with_scaler) {
            mixp_scaler_step(scaler, opt);
            mixp_scaler_update(scaler);
        } else mixp_optimizer_step(opt);
    }
    printf("%s: loss %.5f after %d steps, scale %g\n", name, mixp_item(error), STEPS,
           with_scaler ? (double)mixp_scaler_loss_scale(scaler) : 1.0);
    if (mixp_optimizer_underflow(opt, -1, &u)) {
        printf("  gradients at step %d: %.1f%% of them 0 altogether; of the rest fp16 flushes %.1f%%\n",
               LOOK_AT, 100.0 * (double)u.look.zeros / (double)u.look.count, 100.0 * u.flushed);
        draw(&u);
    }
    int failed = mixp_context_error(ctx, &why) != MIXP_OK;
    if (failed) fprintf(stderr, "underflow: %s\n", why);
    mixp_context_free(ctx);
    return failed;
}

int main(void) {
    int failed = train("f32", MIXP_F32, 0);
    failed |= train("fp16, scaler forgotten", MIXP_F16, 0);
    failed |= train("fp16, scale set from the gradients", MIXP_F16, 1);
    return failed;
}
