/* own_gradients.c - a program with its own arrays and its own backward pass, with gradients
 * kept in fp16. mixprec wraps the arrays, scales, unscales, clips, checks and steps.
 * SPDX-License-Identifier: MIT OR Unlicense
 *   cc -O2 examples/own_gradients.c -I. -lm && ./a.out
 * 32 tanh units learn sin(3x). One sample is broken on purpose: its gradients overflow, that
 * step is skipped, and the verdict says which tensor it was. */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include <stdio.h>

enum { H = 32, BATCH = 64, STEPS = 400, BROKEN = 250 };

static float    w1[H], b1[H], w2[H], b2[1];         /* weights, fp32 */
static mixp_f16 d_w1[H], d_b1[H], d_w2[H], d_b2[1]; /* their gradients, fp16 */
static float noise(uint64_t i) { return (float)mixp_random_u32(1, 0, 0, i) / 2147483648.0f - 1.0f; }

/* Your own forward and backward: returns the mean loss, fills gradients times loss_scale. */
static float forward_backward(int step, float loss_scale) {
    float g_w1[H] = { 0 }, g_b1[H] = { 0 }, g_w2[H] = { 0 }, g_b2 = 0.0f, loss = 0.0f;
    for (int i = 0; i < BATCH; i++) {
        float x = noise((uint64_t)(step * BATCH + i)), y = b2[0], h[H], e;
        for (int j = 0; j < H; j++) { h[j] = tanhf(w1[j] * x + b1[j]); y += w2[j] * h[j]; }
        e = step == BROKEN && i == 0 ? 1e6f : y - sinf(3.0f * x);
        loss += e * e / BATCH;
        e *= 2.0f / BATCH * loss_scale;
        g_b2 += e;
        for (int j = 0; j < H; j++) {
            float back = e * w2[j] * (1.0f - h[j] * h[j]);
            g_w2[j] += e * h[j]; g_w1[j] += back * x; g_b1[j] += back;
        }
    }
    mixp_convert(d_w1, MIXP_F16, g_w1, MIXP_F32, H);
    mixp_convert(d_b1, MIXP_F16, g_b1, MIXP_F32, H);
    mixp_convert(d_w2, MIXP_F16, g_w2, MIXP_F32, H);
    mixp_convert(d_b2, MIXP_F16, &g_b2, MIXP_F32, 1);
    return loss;
}

static void add(mixp_optimizer *opt, mixp_context *ctx, const char *name, int64_t n, float *w,
                mixp_f16 *d) {
    mixp_optimizer_add(opt, mixp_view(ctx, name, MIXP_F32, 1, &n, w),
                       mixp_view(ctx, name, MIXP_F16, 1, &n, d));
}

int main(void) {
    mixp_context   *ctx    = mixp_context_new(NULL);
    mixp_scaler    *scaler = mixp_scaler_new(ctx, NULL);
    mixp_adamw_desc adamw  = mixp_adamw_defaults();
    adamw.lr = 0.02;
    adamw.max_norm = 1.0;
    mixp_optimizer *opt = mixp_adamw_new(ctx, &adamw);
    for (int j = 0; j < H; j++) w1[j] = 3.0f * noise(900000u + (uint64_t)j);
    for (int j = 0; j < H; j++) w2[j] = 0.3f * noise(910000u + (uint64_t)j);
    add(opt, ctx, "w1", H, w1, d_w1);
    add(opt, ctx, "b1", H, b1, d_b1);
    add(opt, ctx, "w2", H, w2, d_w2);
    add(opt, ctx, "b2", 1, b2, d_b2);

    for (int step = 0; step < STEPS; step++) {
        float loss = forward_backward(step, mixp_scaler_loss_scale(scaler));
        mixp_scaler_step(scaler, opt);
        mixp_scaler_update(scaler);
        mixp_verdict v = mixp_scaler_verdict(scaler);
        if (v.outcome == MIXP_STEP_SKIPPED)
            printf("step %3d skipped: %s in the gradient of %s[%d] at scale %g\n", step,
                   v.bad_is_nan ? "NaN" : "Inf", v.bad_tensor, (int)v.bad_element, (double)v.scale);
        else if (step % 50 == 0 || step == STEPS - 1)
            printf("step %3d | loss %.5f | norm %.4f | scale %g\n", step, (double)loss, v.grad_norm,
                   (double)v.scale);
    }
    const char *message;
    int failed = mixp_context_error(ctx, &message) != MIXP_OK;
    if (failed) printf("error: %s\n", message);
    mixp_context_free(ctx);
    return failed;
}
