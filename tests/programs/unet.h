/* unet.h - a small U-Net that marks the pixels of a bright rectangle in a noisy image (examples/conv.h): a
 * convolution, max pooling, a convolution of the half image, a transposed convolution and a bilinear resize back,
 * joined with what was before the pooling. The first convolution stays within fp16, but in step 20 the images are
 * eight times as bright, and it overflows.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "../../examples/conv.h"

enum { UNET_ROWS = FIT(4), UNET_SIZE = 8, UNET_WIDTH = 4, UNET_LARGE = 20 };
enum { UNET_PIXELS = UNET_ROWS * UNET_SIZE * UNET_SIZE };

typedef struct unet {
    mixp_tensor *down, *deep, *up, *head, *gamma, *beta, *bias;
    float        image[UNET_PIXELS], inside[UNET_PIXELS];
} unet;

static void unet_open(session *s) {
    unet *m = (unet *)s->model;
    m->down = matrix(s, "down.w", UNET_WIDTH, 9, 3000);
    m->gamma = vector(s, "norm.gamma", UNET_WIDTH, 1);
    m->beta = vector(s, "norm.beta", UNET_WIDTH, 0);
    m->deep = matrix(s, "deep.w", UNET_WIDTH, 9 * UNET_WIDTH, 0.3);
    m->up = matrix(s, "up.w", UNET_WIDTH, 4 * UNET_WIDTH, 0.3);
    m->head = matrix(s, "head.w", 1, 3 * UNET_WIDTH, 0.3);
    m->bias = vector(s, "head.b", 1, 0);
}

static void unet_batch(session *s) {
    unet       *m = (unet *)s->model;
    const float size = s->step == UNET_LARGE ? 8.0f : 1.0f;
    for (int i = 0; i < UNET_ROWS; i++) {
        const int top = below(s, 4), left = below(s, 4), rows = 2 + below(s, 3), columns = 2 + below(s, 3);
        for (int k = 0; k < UNET_SIZE * UNET_SIZE; k++) {
            const int row = k / UNET_SIZE - top, column = k % UNET_SIZE - left;
            const int in = row >= 0 && row < rows && column >= 0 && column < columns;
            m->inside[i * UNET_SIZE * UNET_SIZE + k] = (float)in;
            m->image[i * UNET_SIZE * UNET_SIZE + k] = size * ((in ? 2.0f : 0.0f) + 0.5f * normal(s));
        }
    }
}

static mixp_tensor *unet_loss(session *s, int turn, int training) {
    unet            *m = (unet *)s->model;
    mixp_context    *c = s->ctx;
    const conv_desc  same = { { 0, 0, 0 }, { CONV_SAME, CONV_SAME, 0 }, { 0, 0, 0 }, 0, { 0, 0, 0 } };
    const conv_desc  twice = { { 2, 2, 0 }, { 0, 0, 0 }, { 0, 0, 0 }, 0, { 0, 0, 0 } };
    mixp_loss_desc   few;
    interpolate_desc back = { INTERPOLATE_LINEAR, { UNET_SIZE, UNET_SIZE, 0 }, { 0, 0, 0 }, 0 };
    mixp_tensor     *x = floats(s, m->image, UNET_ROWS, UNET_SIZE, UNET_SIZE), *half, *join[3];
    (void)turn;
    (void)training;
    x = shaped(s, x, UNET_ROWS, 1, UNET_SIZE, UNET_SIZE);
    x = conv2d(c, x, shaped(s, m->down, UNET_WIDTH, 1, 3, 3), NULL, &same);
    x = mixp_relu(c, group_norm(c, x, 2, m->gamma, m->beta, 1e-5f));
    half = max_pool2d(c, x, 2, 0, 0);
    half = mixp_relu(c, conv2d(c, half, shaped(s, m->deep, UNET_WIDTH, UNET_WIDTH, 3, 3), NULL, &same));
    join[0] = x;
    join[1] = conv_transpose2d(c, half, shaped(s, m->up, UNET_WIDTH, UNET_WIDTH, 2, 2), NULL, &twice);
    join[2] = interpolate(c, half, &back);
    x = conv2d(c, mixp_concat(c, 3, join, 1), shaped(s, m->head, 1, 3 * UNET_WIDTH, 1, 1), m->bias, NULL);
    memset(&few, 0, sizeof few);
    few.pos_weight = mixp_full(c, MIXP_F32, 0, NULL, 3);        /* few pixels lie inside */
    x = shaped(s, x, UNET_PIXELS, 1, 0, 0);
    return mixp_loss_apply(c, MIXP_OP_BCE_WITH_LOGITS, x, floats(s, m->inside, UNET_PIXELS, 1, 0), &few);
}
