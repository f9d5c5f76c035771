/* by_hand_fp16.c - by_hand_scaled.c with products in fp16: weights are mixprec's low copies of the
 * fp32 ones, which the optimizer writes in its own pass; sums are in fp32.
 * SPDX-License-Identifier: MIT OR Unlicense
 *   cc -O2 examples/by_hand_fp16.c -I. -lm && ./a.out
 * A network of two layers learns which letter follows four others. */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SEEN = 4, VOCAB = 32, EMBED = 16, INPUT = SEEN * EMBED, HIDDEN = 64, ROWS = 32, STEPS = 400 };
static const char text[] = "the quick brown fox jumps over the lazy dog while the slow red hen looks "
                           "at the old grey wolf, and both of them wait for the rain to stop.";

/* All parameters in one array, one behind the other; their gradients lie alike. */
enum { TABLE, W1, B1, W2, B2, PARAMS };
static const char *const name[PARAMS] = { "table", "w1", "b1", "w2", "b2" };
static const int64_t size[PARAMS] = { VOCAB * EMBED, HIDDEN * INPUT, HIDDEN, VOCAB * HIDDEN, VOCAB };
static float *param[PARAMS], *grad[PARAMS];
static long   total;
static mixp_context *ctx;
static mixp_tensor  *weight[PARAMS];

static int   seen[ROWS * SEEN], next[ROWS];
static float x[ROWS * INPUT], h[ROWS * HIDDEN], logits[ROWS * VOCAB];
static float dx[ROWS * INPUT], dh[ROWS * HIDDEN], dlogits[ROWS * VOCAB];

static float *arrays(float **at) {
    float *all = (float *)calloc((size_t)total, sizeof *all);
    for (int i = 0; i < PARAMS; i++) at[i] = i ? at[i - 1] + size[i - 1] : all;
    return all;
}

static mixp_f16 in_low[ROWS * HIDDEN], out_low[ROWS * HIDDEN];

static mixp_in low(mixp_f16 *room, const float *from, int count) {
    mixp_convert(room, MIXP_F16, from, MIXP_F32, count);
    return (mixp_in){ room, MIXP_F16 };
}
static mixp_in low_weight(int w) {
    mixp_tensor *t = mixp_tensor_low(weight[w], MIXP_F16);
    return (mixp_in){ t ? t->data : NULL, MIXP_F16 };
}

static void matmul_forward(float *out, const float *in, int w, int n, int m) {
    mixp_gemm_args g = { .m = ROWS, .n = m, .k = n, .batch = 1, .trans_b = 1, .alpha = 1.0f };
    g.a = low(in_low, in, ROWS * n), g.lda = n;
    g.b = low_weight(w), g.ldb = n;
    g.bias = (mixp_in){ param[w + 1], MIXP_F32 };
    g.c = (mixp_out){ out, MIXP_F32, 0 }, g.ldc = m;
    mixp_gemm(ctx, &g);
}

static void matmul_backward(float *din, const float *dout, const float *in, int w, int n, int m) {
    mixp_gemm_args d = { .m = ROWS, .n = n, .k = m, .batch = 1, .alpha = 1.0f };
    mixp_gemm_args g = { .m = m, .n = n, .k = ROWS, .batch = 1, .trans_a = 1, .alpha = 1.0f };
    d.a = g.a = low(out_low, dout, ROWS * m), d.lda = g.lda = m;
    d.b = low_weight(w), d.ldb = n;
    d.c = (mixp_out){ din, MIXP_F32, 0 }, d.ldc = n;
    mixp_gemm(ctx, &d);
    g.b = low(in_low, in, ROWS * n), g.ldb = n;
    g.c = (mixp_out){ grad[w], MIXP_F32, 1 }, g.ldc = n;
    mixp_gemm(ctx, &g);
    for (int i = 0; i < ROWS * m; i++) grad[w + 1][i % m] += dout[i];
}

/* The loss: one number, how wrong the network is; 0 = it names each next letter for sure. */
static float forward(void) {
    float loss = 0.0f;
    for (int i = 0; i < ROWS * SEEN; i++)
        memcpy(x + i * EMBED, param[TABLE] + seen[i] * EMBED, sizeof(float) * EMBED);
    matmul_forward(h, x, W1, INPUT, HIDDEN);
    for (int i = 0; i < ROWS * HIDDEN; i++) h[i] = tanhf(h[i]);
    matmul_forward(logits, h, W2, HIDDEN, VOCAB);
    for (int r = 0; r < ROWS; r++) {
        const float *z = logits + r * VOCAB;
        float top = z[0], sum = 0.0f;
        for (int i = 1; i < VOCAB; i++) top = z[i] > top ? z[i] : top;
        for (int i = 0; i < VOCAB; i++) sum += expf(z[i] - top);
        for (int i = 0; i < VOCAB; i++) dlogits[r * VOCAB + i] = expf(z[i] - top) / sum;
        loss += (logf(sum) + top - z[next[r]]) / ROWS;
    }
    return loss;
}

/* Backward: the gradient of each parameter, how the loss changes when that parameter grows. */
static void backward(float loss_scale) {
    for (int r = 0; r < ROWS; r++) dlogits[r * VOCAB + next[r]] -= 1.0f;
    for (int i = 0; i < ROWS * VOCAB; i++) dlogits[i] *= loss_scale / ROWS;
    matmul_backward(dh, dlogits, h, W2, HIDDEN, VOCAB);
    for (int i = 0; i < ROWS * HIDDEN; i++) dh[i] *= 1.0f - h[i] * h[i];
    matmul_backward(dx, dh, x, W1, INPUT, HIDDEN);
    for (int i = 0; i < ROWS * SEEN; i++)
        for (int j = 0; j < EMBED; j++) grad[TABLE][seen[i] * EMBED + j] += dx[i * EMBED + j];
}

static unsigned random_state = 1;
static int below(int n) {
    random_state = random_state * 1664525u + 1013904223u;
    return (int)((random_state >> 8) % (unsigned)n);
}
static void load_batch(void) {
    for (int r = 0; r < ROWS; r++) {
        const int at = below((int)sizeof text - 1 - SEEN);
        for (int i = 0; i < SEEN; i++) seen[r * SEEN + i] = text[at + i] & 31;
        next[r] = text[at + SEEN] & 31;
    }
}

int main(void) {
    float *params, *grads, loss = 0.0f, sum = 0.0f;
    ctx = mixp_context_new(NULL);
    mixp_scaler *scaler = mixp_scaler_new(ctx, NULL);
    mixp_optimizer_desc adamw = mixp_adamw_defaults();
    mixp_optimizer *opt;
    const char *why;
    for (int i = 0; i < PARAMS; i++) total += size[i];
    params = arrays(param);
    grads = arrays(grad);
    adamw.lr = 1e-2;
    adamw.max_norm = 1.0;
    opt = mixp_optimizer_new(ctx, &adamw);
    for (int i = 0; i < PARAMS; i++) {
        weight[i] = mixp_view_f32(ctx, name[i], 1, &size[i], param[i]);
        mixp_optimizer_add(opt, weight[i], mixp_view_f32(ctx, name[i], 1, &size[i], grad[i]));
    }
    for (long i = 0; i < size[TABLE] + size[W1]; i++) params[i] = 0.2f * (float)(below(2001) - 1000) / 1000.0f;
    for (long i = 0; i < size[W2]; i++) param[W2][i] = 0.2f * (float)(below(2001) - 1000) / 1000.0f;

    for (int step = 1; step <= STEPS; step++) {
        load_batch();
        sum += forward();
        memset(grads, 0, (size_t)total * sizeof *grads);
        backward(mixp_scaler_loss_scale(scaler));
        mixp_scaler_step(scaler, opt);
        mixp_scaler_update(scaler);
        if (mixp_context_error(ctx, &why)) return fprintf(stderr, "%s\n", why), 1;
        if (step % 80 > 0) continue;
        loss = sum / 80.0f;                     /* the mean of 80 batches */
        sum = 0.0f;
        printf("step %3d | loss %.4f\n", step, (double)loss);
    }
    free(params);
    free(grads);
    mixp_context_free(ctx);
    return !(loss < 0.3f);
}
