/* recipe_llama.c - what recipes below 16 bits do to the loss of a small Llama: RMSNorm, rotary positions, SwiGLU.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 *     recipe_llama TEXT [STEPS [SEED [WIDTH [LAYERS]]]]         2000 steps, seed 1, width 128, 4 layers
 *
 * One model for each row of `ways`, trained side by side in one thread: the same first weights and the same
 * batches. The tokens are TEXT's bytes; its last tenth validates. Heads of 32, SwiGLU of 11/4 of the width, 16 x 64
 * tokens a step, AdamW (0.9, 0.95, weight decay 0.1 on matrices), clipped at a norm of 1 (matrices and vectors
 * apart), rate 2e-3 with 100 steps of warm-up, then a cosine down to a tenth. The head and the embedding stay bf16;
 * every other linear is quantised. Prints a line each fifth of the steps: the loss of bf16 over the same 64 batches,
 * then how far each recipe's loss lies above it.
 */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include <stdio.h>
#include <stdlib.h>

enum { TIME = 64, BATCH = 16, TOKENS = TIME * BATCH, MOST_LAYERS = 16, HEAD = 32, EVALS = 64 };

typedef struct way { const char *name; mixp_recipe_kind kind; int no_2d; } way;
static const way ways[] = {
    { "bf16", MIXP_RECIPE_NONE, 0 },   { "fp8_current", MIXP_RECIPE_FP8_CURRENT, 0 },
    { "mxfp8", MIXP_RECIPE_MXFP8, 0 }, { "nvfp4", MIXP_RECIPE_NVFP4, 0 },
    { "nvfp4 1x16", MIXP_RECIPE_NVFP4, 1 },
};
enum { WAYS = sizeof ways / sizeof ways[0] };

typedef struct layer { mixp_tensor *norm1, *qkv, *out, *norm2, *up, *down; } layer;
typedef struct llama {
    mixp_context   *ctx;
    mixp_optimizer *matrices, *vectors;
    mixp_recipe     recipe;
    int             width, layers;
    mixp_tensor    *embedding, *norm, *head;
    layer           layer[MOST_LAYERS];
    int64_t         weights, quantised;
} llama;

typedef struct text { unsigned char *bytes; long count, train; } text;

static void failed(const char *what) {
    fprintf(stderr, "recipe_llama: %s\n", what);
    exit(1);
}

static text read_text(const char *path) {
    text t = { NULL, 0, 0 };
    FILE *f = fopen(path, "rb");
    if (!f) failed("cannot open the text");
    fseek(f, 0, SEEK_END);
    t.count = ftell(f);
    rewind(f);
    t.bytes = (unsigned char *)malloc((size_t)t.count + 1);
    if (!t.bytes || fread(t.bytes, 1, (size_t)t.count, f) != (size_t)t.count) failed("cannot read the text");
    fclose(f);
    t.train = t.count / 10 * 9;
    if (t.count - t.train < 2 * TIME) failed("the text is too short");
    return t;
}

static mixp_tensor *matrix(llama *m, const char *name, int at, int rows, int cols, double std) {
    int64_t size[2];
    char full[32];
    size[0] = rows;
    size[1] = cols;
    snprintf(full, sizeof full, "%d.%s", at, name);
    mixp_tensor *t = mixp_param(m->ctx, full, MIXP_F32, 2, size);
    mixp_init_normal(t, 0.0, std);
    mixp_optimizer_add(m->matrices, t, NULL);
    m->weights += size[0] * size[1];
    return t;
}

static mixp_tensor *gain(llama *m, const char *name, int at) {
    int64_t size = m->width;
    char full[32];
    snprintf(full, sizeof full, "%d.%s", at, name);
    mixp_tensor *t = mixp_param(m->ctx, full, MIXP_F32, 1, &size);
    mixp_fill(t, 1.0);
    mixp_optimizer_add(m->vectors, t, NULL);
    m->weights += size;
    return t;
}

static mixp_optimizer *optimizer(llama *m, int steps, double decay) {
    mixp_optimizer_desc d = mixp_adamw_defaults();
    d.lr = 2e-3;
    d.beta2 = 0.95;
    d.weight_decay = decay;
    d.schedule.kind = MIXP_SCHEDULE_COSINE;
    d.schedule.warmup = 100;
    d.schedule.total = steps;
    d.schedule.min_factor = 0.1;
    return mixp_optimizer_new(m->ctx, &d);
}

static void open_layer(llama *m, int i) {
    const int w = m->width, wide = w * 11 / 4;
    const double std = 0.02, last = 0.02 / sqrt(2.0 * m->layers);
    const int64_t before = m->weights;
    layer *l = &m->layer[i];
    l->norm1 = gain(m, "norm1", i);
    l->norm2 = gain(m, "norm2", i);
    l->qkv = matrix(m, "qkv", i, 3 * w, w, std);
    l->out = matrix(m, "out", i, w, w, last);
    l->up = matrix(m, "up", i, 2 * wide, w, std);
    l->down = matrix(m, "down", i, w, wide, last);
    m->quantised += m->weights - before - 2 * w;
}

static void open_model(llama *m, const way *how, int width, int layers, int steps, int seed) {
    mixp_context_desc d;
    memset(m, 0, sizeof *m);
    memset(&d, 0, sizeof d);
    d.threads = 1;
    d.seed = (uint64_t)seed;
    m->ctx = mixp_context_new(&d);
    if (!m->ctx) failed("out of memory");
    m->width = width;
    m->layers = layers;
    m->recipe.kind = how->kind;
    m->recipe.no_2d = how->no_2d;
    m->matrices = optimizer(m, steps, 0.1);
    m->vectors = optimizer(m, steps, 0.0);
    m->embedding = matrix(m, "embedding", -1, 256, width, 0.02);
    m->head = matrix(m, "head", -1, 256, width, 0.02);
    m->norm = gain(m, "norm", -1);
    for (int i = 0; i < layers; i++) open_layer(m, i);
}

static mixp_tensor *attention(llama *m, const layer *l, mixp_tensor *x) {
    mixp_attention_desc a;
    mixp_rope_desc rope;
    mixp_tensor *part[3];
    memset(&a, 0, sizeof a);
    memset(&rope, 0, sizeof rope);
    a.heads = m->width / HEAD;
    a.causal = 1;
    rope.head_dim = HEAD;
    mixp_split(m->ctx, mixp_linear(m->ctx, x, l->qkv, NULL), -1, 3, part);
    x = mixp_attention_apply(m->ctx, mixp_rope(m->ctx, part[0], &rope), mixp_rope(m->ctx, part[1], &rope), part[2],
                             &a);
    return mixp_linear(m->ctx, x, l->out, NULL);
}

static mixp_tensor *top_of(llama *m, const int32_t *in) {
    const int64_t size[2] = { BATCH, TIME };
    mixp_tensor *x = mixp_embedding(m->ctx, m->embedding, mixp_input(m->ctx, MIXP_I32, 2, size, in)), *h;
    for (int i = 0; i < m->layers; i++) {
        const layer *l = &m->layer[i];
        h = attention(m, l, mixp_rms_norm(m->ctx, x, l->norm1, 1e-6f));
        h = mixp_add_rms_norm(m->ctx, x, h, l->norm2, 1e-6f, &x);
        h = mixp_swiglu_packed(m->ctx, mixp_linear(m->ctx, h, l->up, NULL));
        x = mixp_add(m->ctx, x, mixp_linear(m->ctx, h, l->down, NULL));
    }
    return mixp_rms_norm(m->ctx, x, m->norm, 1e-6f);
}

static mixp_tensor *loss_of(llama *m, const int32_t *in, const int32_t *next) {
    const int64_t size[2] = { BATCH, TIME };
    mixp_tensor *x = NULL;
    mixp_autocast_set_recipe(m->ctx, &m->recipe);
    MIXP_AUTOCAST(m->ctx, MIXP_BF16) x = top_of(m, in);
    mixp_autocast_set_recipe(m->ctx, NULL);
    MIXP_AUTOCAST(m->ctx, MIXP_BF16) x = mixp_linear(m->ctx, x, m->head, NULL);
    return mixp_cross_entropy(m->ctx, x, mixp_input(m->ctx, MIXP_I32, 2, size, next), MIXP_IGNORE);
}

/* Batch number `at` of bytes [first, last). */
static void batch_of(const text *t, long first, long last, uint64_t seed, uint64_t at, int32_t *in, int32_t *next) {
    for (int b = 0; b < BATCH; b++) {
        const long room = last - first - TIME - 1;
        const long from = first + (long)(mixp_random_u32(seed, at, 0, (uint64_t)b) % (uint64_t)room);
        for (int i = 0; i < TIME; i++) {
            in[b * TIME + i] = t->bytes[from + i];
            next[b * TIME + i] = t->bytes[from + i + 1];
        }
    }
}

static void step(llama *m, const int32_t *in, const int32_t *next) {
    mixp_step_begin(m->ctx);
    mixp_zero_grad(m->matrices);
    mixp_zero_grad(m->vectors);
    mixp_backward(m->ctx, loss_of(m, in, next));
    mixp_clip_grad_norm(m->matrices, 1.0);
    mixp_clip_grad_norm(m->vectors, 1.0);
    mixp_optimizer_step(m->matrices);
    mixp_optimizer_step(m->vectors);
}

static double validation(llama *m, const text *t) {
    int32_t in[TOKENS], next[TOKENS];
    double sum = 0.0;
    for (int i = 0; i < EVALS; i++) {
        batch_of(t, t->train, t->count, 99, (uint64_t)i, in, next);
        mixp_eval_begin(m->ctx);
        MIXP_NO_GRAD(m->ctx) sum += (double)mixp_item(loss_of(m, in, next));
    }
    return sum / EVALS;
}

static void print_line(llama *m, const text *t, int steps) {
    double first = 0.0;
    printf("%8d %11.0f", steps, (double)steps * TOKENS);
    for (int i = 0; i < WAYS; i++) {
        const double loss = validation(&m[i], t);
        const char *why;
        if (mixp_context_error(m[i].ctx, &why) != MIXP_OK) failed(why);
        if (i == 0) printf("  %8.4f", first = loss);
        else printf("  %+10.4f", loss - first);
    }
    printf("\n");
    fflush(stdout);
}

int main(int argc, char **argv) {
    static llama m[WAYS];
    static int32_t in[TOKENS], next[TOKENS];
    const int steps = argc > 2 ? atoi(argv[2]) : 2000, seed = argc > 3 ? atoi(argv[3]) : 1;
    const int width = argc > 4 ? atoi(argv[4]) : 128, layers = argc > 5 ? atoi(argv[5]) : 4;
    if (argc < 2 || steps < 200 || width < 128 || width % 128 || layers < 1 || layers > MOST_LAYERS) {
        fprintf(stderr, "usage: recipe_llama TEXT [STEPS [SEED [WIDTH [LAYERS]]]]; 200 steps or more, WIDTH a multiple "
                        "of 128, 1 to 16 LAYERS\n");
        return 2;
    }
    text t = read_text(argv[1]);
    for (int w = 0; w < WAYS; w++) open_model(&m[w], &ways[w], width, layers, steps, seed);
    printf("%.0f weights, %.0f in quantised linears; seed %d\n   steps      tokens", (double)m[0].weights,
           (double)m[0].quantised, seed);
    for (int w = 0; w < WAYS; w++) printf("  %*s", w ? 10 : 8, ways[w].name);
    printf("\n");
    for (int i = 1; i <= steps; i++) {
        batch_of(&t, 0, t.train, (uint64_t)seed, (uint64_t)i, in, next);
        for (int w = 0; w < WAYS; w++) step(&m[w], in, next);
        if (i % (steps / 5) == 0) print_line(m, &t, i);
    }
    for (int w = 0; w < WAYS; w++) {
        if (w && mixp_autocast_recipe_counts(m[w].ctx).unfit + mixp_autocast_recipe_counts(m[w].ctx).kept)
            failed("a linear was not quantised");
        mixp_context_free(m[w].ctx);
    }
    free(t.bytes);
    return 0;
}
