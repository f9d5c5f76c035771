/* by_hand.c - a program with its own arrays, its own backward pass and its own AdamW, in fp32, as
 * llm.c has them. It knows nothing of mixprec. by_hand_scaled.c is the same with mixprec's loss
 * scaling, clipping and AdamW, by_hand_fp16.c also with products in fp16: compare the files with
 * diff.
 * SPDX-License-Identifier: MIT OR Unlicense
 *   cc -O2 examples/by_hand.c -lm && ./a.out
 * A network of two layers learns which letter follows four others. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SEEN = 4, VOCAB = 32, EMBED = 16, INPUT = SEEN * EMBED, HIDDEN = 64, ROWS = 32, STEPS = 400 };
static const char text[] = "the quick brown fox jumps over the lazy dog while the slow red hen looks "
                           "at the old grey wolf, and both of them wait for the rain to stop.";

/* All parameters in one array, one behind the other; their gradients lie alike. */
enum { TABLE, W1, B1, W2, B2, PARAMS };
static const long size[PARAMS] = { VOCAB * EMBED, HIDDEN * INPUT, HIDDEN, VOCAB * HIDDEN, VOCAB };
static float *param[PARAMS], *grad[PARAMS];
static long   total;

static int   seen[ROWS * SEEN], next[ROWS];
static float x[ROWS * INPUT], h[ROWS * HIDDEN], logits[ROWS * VOCAB];
static float dx[ROWS * INPUT], dh[ROWS * HIDDEN], dlogits[ROWS * VOCAB];

static float *arrays(float **at) {
    float *all = (float *)calloc((size_t)total, sizeof *all);
    for (int i = 0; i < PARAMS; i++) at[i] = i ? at[i - 1] + size[i - 1] : all;
    return all;
}

static void matmul_forward(float *out, const float *in, int w, int n, int m) {
    for (int r = 0; r < ROWS; r++)
        for (int o = 0; o < m; o++) {
            float sum = param[w + 1][o];
            for (int i = 0; i < n; i++) sum += in[r * n + i] * param[w][o * n + i];
            out[r * m + o] = sum;
        }
}

static void matmul_backward(float *din, const float *dout, const float *in, int w, int n, int m) {
    memset(din, 0, sizeof(float) * ROWS * (size_t)n);
    for (int r = 0; r < ROWS; r++)
        for (int o = 0; o < m; o++) {
            const float d = dout[r * m + o];
            for (int i = 0; i < n; i++) din[r * n + i] += d * param[w][o * n + i];
            for (int i = 0; i < n; i++) grad[w][o * n + i] += d * in[r * n + i];
            grad[w + 1][o] += d;
        }
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
static void backward(void) {
    for (int r = 0; r < ROWS; r++) dlogits[r * VOCAB + next[r]] -= 1.0f;
    for (int i = 0; i < ROWS * VOCAB; i++) dlogits[i] *= 1.0f / ROWS;
    matmul_backward(dh, dlogits, h, W2, HIDDEN, VOCAB);
    for (int i = 0; i < ROWS * HIDDEN; i++) dh[i] *= 1.0f - h[i] * h[i];
    matmul_backward(dx, dh, x, W1, INPUT, HIDDEN);
    for (int i = 0; i < ROWS * SEEN; i++)
        for (int j = 0; j < EMBED; j++) grad[TABLE][seen[i] * EMBED + j] += dx[i * EMBED + j];
}

/* The optimizer: moves each parameter a little against its gradient, so that the loss falls. */
static void adamw(float *p, const float *g, float *m, float *v, int t) {
    const float lr = 1e-2f, beta1 = 0.9f, beta2 = 0.999f, eps = 1e-8f, decay = 0.01f;
    for (long i = 0; i < total; i++) {
        m[i] = beta1 * m[i] + (1.0f - beta1) * g[i];
        v[i] = beta2 * v[i] + (1.0f - beta2) * g[i] * g[i];
        float m_hat = m[i] / (1.0f - powf(beta1, (float)t)), v_hat = v[i] / (1.0f - powf(beta2, (float)t));
        p[i] -= lr * (m_hat / (sqrtf(v_hat) + eps) + decay * p[i]);
    }
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
    float *params, *grads, *m, *v, loss = 0.0f, sum = 0.0f;
    for (int i = 0; i < PARAMS; i++) total += size[i];
    params = arrays(param);
    grads = arrays(grad);
    m = (float *)calloc((size_t)total, sizeof *m);
    v = (float *)calloc((size_t)total, sizeof *v);
    for (long i = 0; i < size[TABLE] + size[W1]; i++) params[i] = 0.2f * (float)(below(2001) - 1000) / 1000.0f;
    for (long i = 0; i < size[W2]; i++) param[W2][i] = 0.2f * (float)(below(2001) - 1000) / 1000.0f;

    for (int step = 1; step <= STEPS; step++) {
        load_batch();
        sum += forward();
        memset(grads, 0, (size_t)total * sizeof *grads);
        backward();
        adamw(params, grads, m, v, step);
        if (step % 80 > 0) continue;
        loss = sum / 80.0f;                     /* the mean of 80 batches */
        sum = 0.0f;
        printf("step %3d | loss %.4f\n", step, (double)loss);
    }
    free(params);
    free(grads);
    free(m);
    free(v);
    return !(loss < 0.3f);
}
