/* resnet.c - a small residual network of convolutions, trained in fp32 and in fp16 with scaler and guard.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 *     cc -O2 -fopenmp examples/resnet.c -o resnet -lm && ./resnet
 *
 * The network classifies noisy images of stripes: horizontal, vertical and both diagonals. conv.h has the
 * convolutions, the norm and the pooling, written with mixprec's public API. New images are classified with
 * the running statistics of batch norm, which are buffers: skipped batches do not count in them. Exit
 * status: 0 if fp16 ends within 0.02 of fp32's loss, and both classify more than 95 of 100 new images
 * correctly. */
#define MIXPREC_IMPLEMENTATION
#include "../mixprec.h"
#include "conv.h"

#include <math.h>
#include <stdio.h>

enum { BATCH = 32, SIZE = 16, CLASSES = 4, STEPS = 120, LAST = 20, WIDTH = 16 };

typedef struct block {
    mixp_tensor    *w1, *w2, *shortcut, *g1, *b1, *g2, *b2;
    norm_statistics kept1, kept2;
} block;
typedef struct net {
    mixp_context *ctx;
    mixp_tensor  *stem, *head;
    block         blocks[2];
} net;

/* --- the model ------------------------------------------------------------------------------------ */

static mixp_tensor *kernel(net *n, const char *name, int64_t out, int64_t in, int64_t size) {
    const int64_t shape[4] = { out, in, size, size };
    mixp_tensor  *w = mixp_param(n->ctx, name, MIXP_F32, 4, shape);
    mixp_init_kaiming_normal(w, 1.4);
    return w;
}

static mixp_tensor *channel(net *n, const char *name, double value) {
    const int64_t shape[1] = { WIDTH };
    mixp_tensor  *t = mixp_param(n->ctx, name, MIXP_F32, 1, shape);
    mixp_fill(t, value);
    return t;
}

static void make(net *n) {
    const int64_t head[2] = { CLASSES, WIDTH };
    char name[40];
    n->stem = kernel(n, "stem.weight", WIDTH, 1, 3);
    for (int i = 0; i < 2; i++) {
        block *b = &n->blocks[i];
#define NAMED(part) (snprintf(name, sizeof name, "block.%d." part, i), name)
        b->w1 = kernel(n, NAMED("conv1.weight"), WIDTH, WIDTH, 3);
        b->w2 = kernel(n, NAMED("conv2.weight"), WIDTH, WIDTH, 3);
        b->shortcut = kernel(n, NAMED("shortcut.weight"), WIDTH, WIDTH, 1);
        b->g1 = channel(n, NAMED("norm1.gamma"), 1);
        b->b1 = channel(n, NAMED("norm1.beta"), 0);
        b->g2 = channel(n, NAMED("norm2.gamma"), 1);
        b->b2 = channel(n, NAMED("norm2.beta"), 0);
        b->kept1 = batch_norm_statistics(n->ctx, NAMED("norm1"), WIDTH);
        b->kept2 = batch_norm_statistics(n->ctx, NAMED("norm2"), WIDTH);
#undef NAMED
    }
    n->head = mixp_param(n->ctx, "head.weight", MIXP_F32, 2, head);
    mixp_init_kaiming_normal(n->head, 1);
}

static mixp_tensor *residual(net *n, const block *b, mixp_tensor *x, int training) {
    const conv_desc half = { { 2, 2 }, { 1, 1 }, { 0, 0 }, 0, { 0, 0 } }, same = { { 0, 0 }, { 1, 1 }, { 0, 0 }, 0, { 0, 0 } };
    const conv_desc skip = { { 2, 2 }, { 0, 0 }, { 0, 0 }, 0, { 0, 0 } };
    mixp_tensor *y = conv2d(n->ctx, x, b->w1, NULL, &half);
    y = mixp_relu(n->ctx, batch_norm(n->ctx, y, b->g1, b->b1, &b->kept1, training, 1e-5f));
    y = batch_norm(n->ctx, conv2d(n->ctx, y, b->w2, NULL, &same), b->g2, b->b2, &b->kept2, training, 1e-5f);
    return mixp_relu(n->ctx, mixp_add(n->ctx, y, conv2d(n->ctx, x, b->shortcut, NULL, &skip)));
}

static mixp_tensor *logits(net *n, const float *pixels, int training) {
    const int64_t   shape[4] = { BATCH, 1, SIZE, SIZE }, flat[2] = { BATCH, WIDTH };
    const conv_desc same = { { 0, 0 }, { 1, 1 }, { 0, 0 }, 0, { 0, 0 } };
    mixp_tensor *h = mixp_relu(n->ctx, conv2d(n->ctx, mixp_input_f32(n->ctx, 4, shape, pixels), n->stem, NULL, &same));
    for (int i = 0; i < 2; i++) h = residual(n, &n->blocks[i], h, training);
    return mixp_linear(n->ctx, mixp_reshape(n->ctx, avg_pool2d(n->ctx, h, SIZE / 4, 0, 0), 2, flat), n->head, NULL);
}

/* --- images ------------------------------------------------------------------------------------------ */

static float    images[BATCH * SIZE * SIZE];
static int32_t  kinds[BATCH];
static uint32_t random_state;

static float uniform(void) {
    random_state = random_state * 1664525u + 1013904223u;
    return (float)(random_state >> 8) / 16777216.0f;
}

static void next_batch(void) {
    for (int i = 0; i < BATCH; i++) {
        float phase = 6.28f * uniform();
        kinds[i] = (int32_t)(4.0f * uniform());
        for (int r = 0; r < SIZE; r++)
            for (int c = 0; c < SIZE; c++) {
                int along = kinds[i] == 0 ? r : kinds[i] == 1 ? c : kinds[i] == 2 ? r + c : r - c;
                images[(i * SIZE + r) * SIZE + c] = sinf((float)along * 1.1f + phase) + 2.0f * uniform() - 1.0f;
            }
    }
}

/* --- training -------------------------------------------------------------------------------------------- */

static double right(net *n) {
    float   out[BATCH * CLASSES];
    int     good = 0;
    for (int round = 0; round < 8; round++) {
        next_batch();
        mixp_eval_begin(n->ctx);
        MIXP_NO_GRAD(n->ctx) { mixp_read_f32(logits(n, images, 0), out, BATCH * CLASSES); }
        for (int i = 0; i < BATCH; i++) {
            int best = 0;
            for (int k = 1; k < CLASSES; k++)
                if (out[i * CLASSES + k] > out[i * CLASSES + best]) best = k;
            good += best == kinds[i];
        }
    }
    return good / (8.0 * BATCH);
}

static double train(mixp_dtype dtype, double *share) {
    const int64_t   rows[1] = { BATCH };
    mixp_optimizer_desc adamw = mixp_adamw_defaults();
    double          last = 0;
    const char     *why;
    net             n;
    n.ctx = mixp_context_new(NULL);
    make(&n);
    adamw.lr = 3e-3;
    mixp_optimizer *opt = mixp_optimizer_new(n.ctx, &adamw);
    mixp_scaler    *scaler = mixp_scaler_new(n.ctx, NULL);
    mixp_optimizer_add_all(opt, "*");
    if (dtype == MIXP_F16) mixp_guard_start(n.ctx, NULL);
    random_state = 1;
    for (int step = 0; step < STEPS; step++) {
        mixp_tensor *loss = NULL;
        next_batch();
        do {
            mixp_step_begin(n.ctx);
            mixp_zero_grad(opt);
            MIXP_AUTOCAST(n.ctx, dtype) {
                loss = mixp_cross_entropy(n.ctx, logits(&n, images, 1), mixp_input_i32(n.ctx, 1, rows, kinds), MIXP_IGNORE);
            }
            mixp_backward(n.ctx, mixp_scaler_scale(scaler, loss));
            mixp_scaler_step(scaler, opt);
            mixp_scaler_update(scaler);
        } while (mixp_retry(scaler, 3));
        if (step >= STEPS - LAST) last += mixp_item(loss) / LAST;
    }
    *share = right(&n);
    if (mixp_context_error(n.ctx, &why)) fprintf(stderr, "%s\n", why);
    mixp_context_free(n.ctx);
    return last;
}

int main(void) {
    double share32, share16, loss32 = train(MIXP_F32, &share32), loss16 = train(MIXP_F16, &share16);
    printf("fp32: loss %.4f, %.1f %% right\nfp16 with scaler and guard: loss %.4f, %.1f %% right\n", loss32, 100 * share32,
           loss16, 100 * share16);
    return fabs(loss32 - loss16) < 0.02 && share32 > 0.95 && share16 > 0.95 ? 0 : 1;
}
