/* vit.h - a vision transformer of two blocks on images of 4 x 4 patches, with a class token, positions
 * and label smoothing. Nothing in it leaves fp16's range.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
enum { VIT_ROWS = FIT(4), VIT_PATCHES = 16, VIT_PIXELS = 9, VIT_WIDTH = FIT(16), VIT_HEADS = 2, VIT_BLOCKS = 2,
       VIT_CLASSES = 4 };

typedef struct vit {
    mixp_tensor *patch, *bias, *token, *place, *head;
    mixp_tensor *gain[VIT_BLOCKS], *qkv[VIT_BLOCKS], *proj[VIT_BLOCKS], *up[VIT_BLOCKS],
        *down[VIT_BLOCKS];
    float        image[VIT_ROWS * VIT_PATCHES * VIT_PIXELS], zero[VIT_ROWS * VIT_WIDTH];
    int32_t      label[VIT_ROWS];
} vit;

static void vit_open(session *s) {
    vit *m = (vit *)s->model;
    m->patch = matrix(s, "patch.w", VIT_WIDTH, VIT_PIXELS, 0.3);
    m->bias = vector(s, "patch.b", VIT_WIDTH, 0);
    m->token = vector(s, "token", VIT_WIDTH, 0.1);
    m->place = matrix(s, "place", VIT_PATCHES + 1, VIT_WIDTH, 0.1);
    for (int i = 0; i < VIT_BLOCKS; i++) {
        m->gain[i] = vector(s, i ? "h.1.gain" : "h.0.gain", VIT_WIDTH, 1);
        m->qkv[i] = layer(s, i, "qkv", 3 * VIT_WIDTH, VIT_WIDTH, 0.2);
        m->proj[i] = layer(s, i, "proj", VIT_WIDTH, VIT_WIDTH, 0.1);
        m->up[i] = layer(s, i, "up", 2 * VIT_WIDTH, VIT_WIDTH, 0.2);
        m->down[i] = layer(s, i, "down", VIT_WIDTH, 2 * VIT_WIDTH, 0.1);
    }
    m->head = matrix(s, "head", VIT_CLASSES, VIT_WIDTH, 0.2);
}

static void vit_batch(session *s) {
    vit *m = (vit *)s->model;
    for (int i = 0; i < VIT_ROWS * VIT_PATCHES * VIT_PIXELS; i++) {
        int row = i / (VIT_PATCHES * VIT_PIXELS), patch = i / VIT_PIXELS % VIT_PATCHES;
        if (i % (VIT_PATCHES * VIT_PIXELS) == 0) m->label[row] = below(s, VIT_CLASSES);
        m->image[i] = 0.3f * uniform(s) + (patch / 4 == m->label[row] ? 0.6f : 0.0f);
    }
}

static mixp_tensor *vit_loss(session *s, int turn, int training) {
    vit          *m = (vit *)s->model;
    mixp_context *c = s->ctx;
    mixp_tensor  *x = floats(s, m->image, VIT_ROWS, VIT_PATCHES, VIT_PIXELS), *parts[2], *h;
    (void)turn, (void)training;
    parts[0] = mixp_add(c, floats(s, m->zero, VIT_ROWS, 1, VIT_WIDTH), m->token);
    parts[1] = mixp_linear(c, x, m->patch, m->bias);
    x = mixp_add(c, mixp_concat(c, 2, parts, 1), m->place);
    for (int i = 0; i < VIT_BLOCKS; i++) {
        h = mixp_linear(c, mixp_layer_norm(c, x, m->gain[i], NULL, 1e-5f), m->qkv[i], NULL);
        x = mixp_add(c, x, mixp_linear(c, mixp_attention(c, h, VIT_HEADS, 0, 0), m->proj[i], NULL));
        h = mixp_linear(c, mixp_layer_norm(c, x, NULL, NULL, 1e-5f), m->up[i], NULL);
        x = mixp_add(c, x, mixp_linear(c, mixp_gelu(c, h), m->down[i], NULL));
    }
    x = shaped(s, mixp_slice(c, x, 1, 0, 1), VIT_ROWS, VIT_WIDTH, 0, 0);
    return mixp_cross_entropy_smooth(c, mixp_linear(c, x, m->head, NULL),
                                     ints(s, m->label, VIT_ROWS, 0), MIXP_IGNORE, 0.1f);
}
