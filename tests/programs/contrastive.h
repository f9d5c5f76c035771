/* contrastive.h - two encoders meet as in CLIP: unit vectors, a learned temperature, and a cross-entropy
 * over the rows and over the columns; a margin to the text of the next pair. An image is also told from the
 * texts of earlier batches, which a buffer queues (MoCo, He et al., 2020).
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "examples/ops.h"
enum { PAIR_ROWS = FIT(12), PAIR_IMAGE = FIT(10), PAIR_TEXT = FIT(8), PAIR_WIDTH = FIT(16) };
enum { PAIR_QUEUE = 2 * PAIR_ROWS };

typedef struct contrastive {
    mixp_tensor *image1, *image2, *text1, *text2, *heat, *queue, *keys;
    float        image[PAIR_ROWS * PAIR_IMAGE], text[PAIR_ROWS * PAIR_TEXT];
    int32_t      own[PAIR_ROWS];
} contrastive;

static void contrastive_open(session *s) {
    contrastive *m = (contrastive *)s->model;
    m->image1 = matrix(s, "image.fc1.w", 2 * PAIR_WIDTH, PAIR_IMAGE, 0.3);
    m->image2 = matrix(s, "image.fc2.w", PAIR_WIDTH, 2 * PAIR_WIDTH, 0.2);
    m->text1 = matrix(s, "text.fc1.w", 2 * PAIR_WIDTH, PAIR_TEXT, 0.35);
    m->text2 = matrix(s, "text.fc2.w", PAIR_WIDTH, 2 * PAIR_WIDTH, 0.2);
    m->heat = vector(s, "log_scale", 1, 1.0);
    m->queue = buffer(s, "queue", PAIR_QUEUE, PAIR_WIDTH, MIXP_BUFFER_OWN);
    for (int i = 0; i < PAIR_ROWS; i++) m->own[i] = i;
}

/* Both see the same six hidden numbers. */
static void contrastive_batch(session *s) {
    contrastive *m = (contrastive *)s->model;
    for (int i = 0; i < PAIR_ROWS; i++) {
        float hidden[6];
        for (int j = 0; j < 6; j++) hidden[j] = normal(s);
        for (int j = 0; j < PAIR_IMAGE; j++)
            m->image[i * PAIR_IMAGE + j] = hidden[j % 6] + 0.1f * normal(s);
        for (int j = 0; j < PAIR_TEXT; j++)
            m->text[i * PAIR_TEXT + j] = hidden[(j + 2) % 6] - hidden[j % 6];
    }
}

static mixp_tensor *contrastive_unit(session *s, mixp_tensor *x, mixp_tensor *w1, mixp_tensor *w2) {
    mixp_context *c = s->ctx;
    x = mixp_linear(c, mixp_gelu(c, mixp_linear(c, x, w1, NULL)), w2, NULL);
    return mixp_div(c, x, mixp_add_scalar(c, mixp_vector_norm(c, x, -1, 1), 1e-6f));
}

static mixp_tensor *contrastive_loss(session *s, int turn, int training) {
    contrastive  *m = (contrastive *)s->model;
    mixp_context *c = s->ctx;
    mixp_tensor *a = floats(s, m->image, PAIR_ROWS, PAIR_IMAGE, 0),
                *own = ints(s, m->own, PAIR_ROWS, 0);
    mixp_tensor  *b = floats(s, m->text, PAIR_ROWS, PAIR_TEXT, 0), *logits, *loss, *parts[2], *turned[2];
    const int64_t sizes[2] = { 1, PAIR_ROWS - 1 };
    (void)turn;
    a = contrastive_unit(s, a, m->image1, m->image2);
    b = contrastive_unit(s, b, m->text1, m->text2);
    logits = mixp_mul(c, mixp_matmul(c, a, b, 0, 1), mixp_exp(c, m->heat));
    loss = mixp_nll(c, mixp_log_softmax(c, mixp_transpose(c, logits, 0, 1)), own, MIXP_IGNORE);
    if (training) {
        m->keys = b;
        parts[0] = logits;
        parts[1] = mixp_mul(c, mixp_matmul(c, a, m->queue, 0, 1), mixp_exp(c, m->heat));
        logits = mixp_concat(c, 2, parts, 1);
    }
    loss = mixp_add(c, mixp_cross_entropy(c, logits, own, MIXP_IGNORE), loss);
    mixp_split_sizes(c, b, 0, 2, sizes, parts);
    turned[0] = parts[1];
    turned[1] = parts[0];
    loss = mixp_add(c, loss, mixp_triplet_margin(c, a, b, mixp_concat(c, 2, turned, 0), 0.2f, 0, MIXP_REDUCE_MEAN));
    return mixp_scale(c, loss, 0.5f);
}

/* The newest keys go in front, and the oldest fall off. */
static void contrastive_carry(session *s) {
    contrastive *m = (contrastive *)s->model;
    mixp_tensor *parts[2];
    parts[0] = m->keys;
    parts[1] = mixp_slice(s->ctx, m->queue, 0, 0, PAIR_QUEUE - PAIR_ROWS);
    mixp_copy(m->queue, mixp_concat(s->ctx, 2, parts, 0));
}
