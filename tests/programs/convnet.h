/* convnet.h - images of stripes, two convolutions with batch norm and running statistics (examples/conv.h).
 * The first convolution stays within fp16, but in step 20 the images are eight times as large, and it
 * overflows.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "../../examples/conv.h"

enum { CONVNET_ROWS = FIT(8), CONVNET_SIZE = 8, CONVNET_NARROW = 4, CONVNET_WIDTH = FIT(4), CONVNET_KINDS = 4 };
enum { CONVNET_LARGE = 20 };

typedef struct convnet {
    mixp_tensor    *conv[2], *gamma[2], *beta[2], *head;
    norm_statistics norm[2];
    float           image[CONVNET_ROWS * CONVNET_SIZE * CONVNET_SIZE];
    int32_t         kind[CONVNET_ROWS];
} convnet;

/* The running statistics of a norm, among the session's buffers. */
static norm_statistics convnet_statistics(session *s, const char *name, int64_t width) {
    const norm_statistics made = batch_norm_statistics(s->ctx, name, width);
    s->shared[s->buffers] = s->shared[s->buffers + 1] = 1;
    s->buffer[s->buffers++] = made.mean;
    s->buffer[s->buffers++] = made.variance;
    return made;
}

static void convnet_open(session *s) {
    convnet *m = (convnet *)s->model;
    m->conv[0] = matrix(s, "conv1.w", CONVNET_NARROW, 9, 3000);
    m->conv[1] = matrix(s, "conv2.w", CONVNET_WIDTH, 9 * CONVNET_NARROW, 0.3);
    for (int i = 0; i < 2; i++) {
        const int width = i ? CONVNET_WIDTH : CONVNET_NARROW;
        m->gamma[i] = vector(s, i ? "norm2.gamma" : "norm1.gamma", width, 1);
        m->beta[i] = vector(s, i ? "norm2.beta" : "norm1.beta", width, 0);
        m->norm[i] = convnet_statistics(s, i ? "norm2" : "norm1", width);
    }
    m->head = matrix(s, "head", CONVNET_KINDS, CONVNET_WIDTH, 0.3);
}

/* Stripes along rows, columns and both diagonals. */
static void convnet_batch(session *s) {
    convnet    *m = (convnet *)s->model;
    const float size = s->step == CONVNET_LARGE ? 8.0f : 1.0f;
    for (int i = 0; i < CONVNET_ROWS; i++) {
        const float phase = 6.28f * uniform(s);
        m->kind[i] = below(s, CONVNET_KINDS);
        for (int k = 0; k < CONVNET_SIZE * CONVNET_SIZE; k++) {
            const int row = k / CONVNET_SIZE, column = k % CONVNET_SIZE;
            const int along = m->kind[i] == 0   ? row
                              : m->kind[i] == 1 ? column
                              : m->kind[i] == 2 ? row + column
                                                : row - column;
            m->image[i * CONVNET_SIZE * CONVNET_SIZE + k] =
                size * (sinf((float)along * 1.6f + phase) + 0.2f * normal(s));
        }
    }
}

static mixp_tensor *convnet_block(session *s, mixp_tensor *x, int i, int training) {
    convnet        *m = (convnet *)s->model;
    mixp_tensor    *w = shaped(s, m->conv[i], m->conv[i]->shape[0], m->conv[i]->shape[1] / 9, 3, 3);
    const conv_desc same = { { 0, 0 }, { 1, 1 }, { 0, 0 }, 0, { 0, 0 } };
    x = batch_norm(s->ctx, conv2d(s->ctx, x, w, NULL, &same), m->gamma[i], m->beta[i], &m->norm[i], training, 1e-5f);
    return mixp_relu(s->ctx, x);
}

static mixp_tensor *convnet_loss(session *s, int turn, int training) {
    convnet      *m = (convnet *)s->model;
    mixp_context *c = s->ctx;
    mixp_tensor  *x = floats(s, m->image, CONVNET_ROWS, CONVNET_SIZE, CONVNET_SIZE);
    (void)turn;
    x = convnet_block(s, shaped(s, x, CONVNET_ROWS, 1, CONVNET_SIZE, CONVNET_SIZE), 0, training);
    x = convnet_block(s, x, 1, training);
    x = shaped(s, avg_pool2d(c, x, CONVNET_SIZE, 0, 0), CONVNET_ROWS, CONVNET_WIDTH, 0, 0);
    return mixp_cross_entropy(c, mixp_linear(c, x, m->head, NULL), ints(s, m->kind, CONVNET_ROWS, 0), MIXP_IGNORE);
}
