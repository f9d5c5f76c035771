/* bert.c - BERT's architecture: an encoder of padded sequences predicts hidden letters. Three copies are trained side
 * by side: in fp32, and in fp16 with a loss scaler at level 1 (results as in PyTorch's autocast) and at
 * level 2 (every activation is fp16).
 * SPDX-License-Identifier: MIT OR Unlicense
 *   cc -O2 examples/bert.c -I. -lm && ./a.out [steps [names.txt]]
 *
 * The model is that of Devlin et al. (2018), small: embeddings of tokens and positions, a norm behind each residual
 * sum, GELU, dropout, and a head that shares the table of tokens. A sequence is a given name. Of its letters 15 % (at
 * least one) are to be predicted: 80 % of those are masked, 10 % replaced by a random letter, 10 % unchanged. */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include "names.h"
#include <stdio.h>

enum { PAD = 0, MASK = 27, TOKENS = 28, T = 12, C = 32, HEADS = 4, LAYERS = 2, BATCH = 48 };

typedef struct linear { mixp_tensor *w, *b; } linear;       /* or gain and shift of a norm */
typedef struct block { linear qkv, out, up, down, norm1, norm2; } block;
typedef struct bert {
    mixp_context   *ctx;
    mixp_dtype      dtype;
    mixp_tensor    *tokens, *places;
    linear          norm, head, head_norm;
    block           blocks[LAYERS];
    mixp_optimizer *opt;
    mixp_scaler    *scaler;
} bert;

static int32_t ids[BATCH * T], want[BATCH * T], lengths[BATCH];
static unsigned long long random_state;
static double random_number(void) {                         /* in [0, 1) */
    random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
    return (double)(random_state >> 11) / 9007199254740992.0;
}

/* The number of letters; PAD behind them. */
static int32_t put_name(int32_t *row, const char *name) {
    int32_t n = 0;
    for (; n < T && is_letter(name[n]); n++) row[n] = name[n] - 'a' + 1;
    for (int t = n; t < T; t++) row[t] = PAD;
    return n;
}
static void next_batch(void) {
    for (int i = 0; i < BATCH; i++) {
        const int n = put_name(ids + i * T, names.first[(int)(random_number() * names.count)]);
        const int certain = (int)(random_number() * n);
        lengths[i] = n;
        for (int t = i * T; t < (i + 1) * T; t++) {
            const int    chosen = t == i * T + certain || (ids[t] != PAD && random_number() < 0.15);
            const double how = random_number();
            want[t] = chosen ? ids[t] : MIXP_IGNORE;
            if (chosen && how < 0.9) ids[t] = how < 0.8 ? MASK : 1 + (int32_t)(random_number() * 26);
        }
    }
}

static linear make_linear(mixp_context *ctx, const char *name, int layer, int64_t in, int64_t out) {
    const int64_t shape[2] = { out, in };
    linear        l = { mixp_param_named(ctx, MIXP_F32, 2, shape, "%s.%d.weight", name, layer),
                        mixp_param_named(ctx, MIXP_F32, 1, shape, "%s.%d.bias", name, layer) };
    mixp_init_normal(l.w, 0.0, 0.08);
    return l;
}
static linear make_norm(mixp_context *ctx, const char *name, int layer) {
    const int64_t shape[1] = { C };
    linear        l = { mixp_param_named(ctx, MIXP_F32, 1, shape, "%s.%d.gain", name, layer),
                        mixp_param_named(ctx, MIXP_F32, 1, shape, "%s.%d.shift", name, layer) };
    mixp_fill(l.w, 1.0);
    return l;
}

static void make_bert(bert *m, mixp_dtype dtype, int level, int steps) {
    mixp_optimizer_desc adamw = mixp_adamw_defaults();
    mixp_context       *c = m->ctx = mixp_context_new(NULL);
    m->dtype = dtype;
    mixp_autocast_set_level(c, level);
    m->tokens = mixp_param(c, "tokens", MIXP_F32, MIXP_SHAPE(TOKENS, C));
    m->places = mixp_param(c, "places", MIXP_F32, MIXP_SHAPE(T, C));
    mixp_init_normal(m->tokens, 0.0, 0.08);
    mixp_init_normal(m->places, 0.0, 0.08);
    m->norm = make_norm(c, "norm", 0);
    m->head = make_linear(c, "head", 0, C, C);
    m->head_norm = make_norm(c, "head_norm", 0);
    for (int i = 0; i < LAYERS; i++)
        m->blocks[i] = (block){ make_linear(c, "qkv", i, C, 3 * C), make_linear(c, "out", i, C, C),
                                make_linear(c, "up", i, C, 4 * C), make_linear(c, "down", i, 4 * C, C),
                                make_norm(c, "norm1", i), make_norm(c, "norm2", i) };
    adamw.lr = 4e-3;
    adamw.max_norm = 1.0;
    adamw.schedule.kind = MIXP_SCHEDULE_LINEAR;
    adamw.schedule.warmup = steps / 10;
    adamw.schedule.total = steps;
    m->opt = mixp_optimizer_new(c, &adamw);
    mixp_optimizer_add_all(m->opt, "*");
    m->scaler = mixp_scaler_new(c, NULL);
}

static mixp_tensor *norm(bert *m, mixp_tensor *x, const linear *l)
{ return mixp_layer_norm(m->ctx, x, l->w, l->b, 1e-5f); }
static mixp_tensor *apply(bert *m, mixp_tensor *x, const linear *l) { return mixp_linear(m->ctx, x, l->w, l->b); }

/* Logits [rows, time, TOKENS] of sequences of n letters, padded to `time`. Attention does not see the padding. */
static mixp_tensor *logits_of(bert *m, const int32_t *row, const int32_t *n, int64_t rows, int64_t time, int training) {
    mixp_context       *c = m->ctx;
    mixp_attention_desc a = { .heads = HEADS, .lengths = mixp_input_i32(c, 1, &rows, n) };
    mixp_tensor        *x = mixp_input_i32(c, MIXP_SHAPE(rows, time), row), *h;
    x = mixp_add(c, mixp_embedding(c, m->tokens, x), mixp_slice(c, m->places, 0, 0, time));
    x = norm(m, x, &m->norm);
    for (int i = 0; i < LAYERS; i++) {
        block *b = &m->blocks[i];
        h = apply(m, mixp_attention_apply(c, apply(m, x, &b->qkv), NULL, NULL, &a), &b->out);
        x = norm(m, mixp_add(c, x, mixp_dropout(c, h, 0.1f, training)), &b->norm1);
        h = apply(m, mixp_gelu(c, apply(m, x, &b->up)), &b->down);
        x = norm(m, mixp_add(c, x, mixp_dropout(c, h, 0.1f, training)), &b->norm2);
    }
    x = norm(m, mixp_gelu(c, apply(m, x, &m->head)), &m->head_norm);
    return mixp_linear(c, x, m->tokens, NULL);
}

static double train_step(bert *m) {
    mixp_tensor *loss = NULL;
    mixp_step_begin(m->ctx);
    mixp_zero_grad(m->opt);
    MIXP_AUTOCAST(m->ctx, m->dtype)
        loss = mixp_cross_entropy(m->ctx, logits_of(m, ids, lengths, BATCH, T, 1),
                                  mixp_input_i32(m->ctx, MIXP_SHAPE(BATCH, T), want), MIXP_IGNORE);
    mixp_backward(m->ctx, mixp_scaler_scale(m->scaler, loss));
    mixp_scaler_step(m->scaler, m->opt);
    mixp_scaler_update(m->scaler);
    return mixp_item(loss);
}

/* Hides one letter of a name, and prints the letter that the model puts there. */
static void find_letter(bert *m, const char *name, int at) {
    float   padded[T * TOKENS], unpadded[T * TOKENS];
    int32_t row[T], n = put_name(row, name), best = 1;
    row[at] = MASK;
    mixp_eval_begin(m->ctx);
    MIXP_NO_GRAD(m->ctx) MIXP_AUTOCAST(m->ctx, m->dtype) {
        mixp_read_f32(logits_of(m, row, &n, 1, T, 0), padded, T * TOKENS);
        mixp_read_f32(logits_of(m, row, &n, 1, n, 0), unpadded, n * TOKENS);
    }
    for (int32_t i = 2; i <= 26; i++)
        if (padded[at * TOKENS + i] > padded[at * TOKENS + best]) best = i;
    printf("%.*s_%.*s: %c; without padding %s\n", at, name, n - at - 1, name + at + 1, 'a' + best - 1,
           memcmp(padded, unpadded, sizeof *unpadded * (size_t)(n * TOKENS)) ? "other bits" : "the same bits");
}

int main(int argc, char **argv) {
    const int   steps = argc > 1 ? atoi(argv[1]) : 600, every = steps < 6 ? 1 : steps / 6;
    const char *why;
    double      sum[3] = { 0 };
    bert        m[3];
    find_names(argc > 2 ? read_names(argv[2]) : bundled_names);
    if (names.count == 0) { fprintf(stderr, "bert: no names in %s\n", argv[2]); return 1; }
    for (int i = 0; i < 3; i++) make_bert(&m[i], i ? MIXP_F16 : MIXP_F32, i == 2 ? 2 : 1, steps);
    printf("step   fp32   fp16, level 1   fp16, level 2\n");
    for (int step = 1; step <= steps; step++) {
        next_batch();
        for (int i = 0; i < 3; i++) {
            sum[i] += train_step(&m[i]) / every;
            if (mixp_context_error(m[i].ctx, &why)) { fprintf(stderr, "bert: %s\n", why); return 1; }
        }
        if (step % every) continue;
        printf("%4d   %.3f  %.3f           %.3f\n", step, sum[0], sum[1], sum[2]);
        sum[0] = sum[1] = sum[2] = 0.0;
    }
    printf("KiB    %-6d %-15d %d\n", (int)(mixp_context_memory(m[0].ctx).peak >> 10),
           (int)(mixp_context_memory(m[1].ctx).peak >> 10), (int)(mixp_context_memory(m[2].ctx).peak >> 10));
    find_letter(&m[2], "katherine", 4);
    find_letter(&m[2], "amelia", 1);
    find_letter(&m[2], "victoria", 3);
    for (int i = 0; i < 3; i++) mixp_context_free(m[i].ctx);
    return 0;
}
