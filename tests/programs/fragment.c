/* fragment.c - what stands around a fragment of C in the README or docs/ (FRAGMENT): names that pages use freely.
 * SPDX-License-Identifier: MIT OR Unlicense */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include <stdio.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { N = 32 };
static float         x[N * 16], g[16], w[16];
static int32_t       label[N];
static const int64_t shape[1] = { 16 };
static const char   *why;
static mixp_context *ctx;
static mixp_tensor  *w1, *b1, *w2, *b2, *loss;
static mixp_optimizer_desc adamw;
static mixp_optimizer *opt;
static mixp_scaler  *scaler;

static void next_batch(float *points, int32_t *labels) {
    for (int i = 0; i < N; i++) {
        labels[i] = i % 4;
        for (int k = 0; k < 16; k++)
            points[16 * i + k] = (float)rand() / (float)RAND_MAX + (k == labels[i] ? 1.0f : 0.0f);
    }
}

static void my_backward(float scale) { for (int i = 0; i < 16; i++) g[i] = scale * (w[i] - 1.0f); }

/* A machine without a GPU. */
const mixp_device *mixp_cuda(int ordinal, const char **reason) {
    (void)ordinal;
    *reason = "none here";
    return NULL;
}

static int fragment(void) {
#include FRAGMENT
    return 0;
}

int main(void) {
    ctx = mixp_context_new(NULL);
    scaler = mixp_scaler_new(ctx, NULL);
    adamw = mixp_adamw_defaults();
    opt = mixp_optimizer_new(ctx, &adamw);
    w1 = mixp_param(ctx, "fc1.w", MIXP_F32, MIXP_SHAPE(64, 16));
    b1 = mixp_param(ctx, "fc1.b", MIXP_F32, MIXP_SHAPE(64));
    w2 = mixp_param(ctx, "fc2.w", MIXP_F32, MIXP_SHAPE(4, 64));
    b2 = mixp_param(ctx, "fc2.b", MIXP_F32, MIXP_SHAPE(4));
    mixp_init_all(ctx, "*.w", mixp_init_kaiming_normal, 1.4);
    mixp_optimizer_add_all(opt, "*");
    next_batch(x, label);
    my_backward(1.0f);
    int failed = fragment();
    if (mixp_context_error(ctx, &why) != MIXP_OK) failed = fprintf(stderr, "%s\n", why);
    mixp_context_free(ctx);
    return failed != 0;
}
