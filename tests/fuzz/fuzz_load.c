/* fuzz_load.c - a checkpoint with bytes changed, or any bytes: refused, and then nothing has
 * changed, or loaded, and then training goes on and saves again.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "memory_disk.h"
#include "fuzz.h"

/* A tiny model: an f16 matrix and an f32 vector, AdamW and SGD, a scaler, a buffer. */
typedef struct tiny {
    mixp_context   *ctx;
    mixp_tensor    *w, *b, *h;
    mixp_optimizer *opt[2];
    mixp_scaler    *scaler;
    double          best;
    mixp_checkpoint_value value;
    mixp_checkpoint all;
} tiny;

static void tiny_make(tiny *t) {
    static const int64_t w[2] = { 2, 3 }, b[1] = { 2 };
    mixp_optimizer_desc adamw = mixp_adamw_defaults();
    mixp_optimizer_desc sgd = mixp_sgd_defaults();
    mixp_scaler_desc scaler;
    memset(t, 0, sizeof *t);
    memset(&scaler, 0, sizeof scaler);
    scaler.growth_interval = 3;
    t->ctx = mixp_context_new(NULL);
    t->w = mixp_param(t->ctx, "w", MIXP_F16, 2, w);
    t->b = mixp_param(t->ctx, "b", MIXP_F32, 1, b);
    t->h = mixp_buffer(t->ctx, "h", MIXP_F32, 1, b);
    mixp_fill(t->w, 0.25);
    sgd.momentum = 0.5;
    t->opt[0] = mixp_optimizer_new(t->ctx, &adamw);
    t->opt[1] = mixp_optimizer_new(t->ctx, &sgd);
    mixp_optimizer_add(t->opt[0], t->w, NULL);
    mixp_optimizer_add(t->opt[1], t->b, NULL);
    t->scaler = mixp_scaler_new(t->ctx, &scaler);
    t->value.name = "best";
    t->value.dtype = MIXP_F64;
    t->value.count = 1;
    t->value.data = &t->best;
    t->all.ctx = t->ctx;
    t->all.scaler = t->scaler;
    t->all.optimizers = t->opt;
    t->all.n_optimizers = 2;
    t->all.values = &t->value;
    t->all.n_values = 1;
}

static void tiny_train(tiny *t, int steps) {
    static const int64_t shape[2] = { 2, 3 };
    static const float x[6] = { 1, 2, -3, 0.5f, 0, 1 };
    for (; steps > 0; steps--) {
        mixp_tensor *loss = NULL;
        mixp_step_begin(t->ctx);
        MIXP_AUTOCAST(t->ctx, MIXP_F16) {
            mixp_tensor *y = mixp_linear(t->ctx, mixp_input(t->ctx, MIXP_F32, 2, shape, x), t->w, t->b);
            loss = mixp_mean(t->ctx, mixp_mul(t->ctx, y, y), MIXP_ALL, 0);
        }
        mixp_backward(t->ctx, mixp_scaler_scale(t->scaler, loss));
        mixp_copy(t->h, t->b);
        for (int o = 0; o < 2; o++) mixp_scaler_step(t->scaler, t->opt[o]);
        mixp_scaler_update(t->scaler);
        for (int o = 0; o < 2; o++) mixp_zero_grad(t->opt[o]);
    }
}

static unsigned char *good, *fresh;     /* checkpoints: of a trained model, of a new one */
static size_t good_size, fresh_size, data_at;

static unsigned char *save(tiny *t, size_t *size) {
    EXPECT(mixp_checkpoint_save("out", &t->all) == MIXP_OK);
    const disk_file *f = &disk[disk_find("out")];
    unsigned char *copy = (unsigned char *)malloc(f->size);
    EXPECT(copy != NULL);
    memcpy(copy, f->data, f->size);
    *size = f->size;
    return copy;
}

static void prepare(void) {
    tiny t;
    if (good) return;
    tiny_make(&t);
    fresh = save(&t, &fresh_size);
    tiny_train(&t, 4);
    EXPECT(mixp_context_error(t.ctx, NULL) == MIXP_OK);
    good = save(&t, &good_size);
    data_at = 8 + ((size_t)good[0] | (size_t)good[1] << 8 | (size_t)good[2] << 16);
    EXPECT(data_at < good_size);
    mixp_context_free(t.ctx);
}

/* The input is the file itself, or three bytes a change of the good one: where, and to what. Even
 * ones change its data alone. */
static void put_input(const uint8_t *data, size_t size) {
    unsigned char *bytes = (unsigned char *)malloc(good_size);
    size_t i, from = size && data[0] % 4 == 0 ? 0 : data_at;
    EXPECT(bytes != NULL);
    memcpy(bytes, good, good_size);
    for (i = 1; i + 3 <= size; i += 3) {
        size_t at = (size_t)data[i] << 8 | data[i + 1];
        bytes[from + at % (good_size - from)] = data[i + 2];
    }
    disk_put("in", bytes, good_size);
    if (size && data[0] % 4 == 1) disk_put("in", data + 1, size - 1);
    free(bytes);
}

static void fuzz_one(const uint8_t *data, size_t size) {
    mixp_weights_desc weights;
    const char *why = "";
    tiny t;
    prepare();
    put_input(data, size);
    tiny_make(&t);
    if (mixp_checkpoint_load("in", &t.all) != MIXP_OK) {
        size_t n;
        EXPECT(mixp_context_error(t.ctx, &why) != MIXP_OK && why[0]);
        mixp_context_clear_error(t.ctx);
        unsigned char *now = save(&t, &n);
        EXPECT(n == fresh_size && memcmp(now, fresh, n) == 0);
        free(now);
    } else {
        tiny_train(&t, 3);
        mixp_context_clear_error(t.ctx);        /* a run may diverge from there: no crash is asked */
        EXPECT(mixp_checkpoint_save("out", &t.all) == MIXP_OK);
        EXPECT(mixp_checkpoint_load("out", &t.all) == MIXP_OK);
    }
    memset(&weights, 0, sizeof weights);
    weights.convert = weights.allow_extra = weights.allow_missing = 1;
    if (mixp_checkpoint_load_weights("in", t.ctx, &weights) == MIXP_OK) tiny_train(&t, 1);
    mixp_context_free(t.ctx);
}

static size_t fuzz_seed(int i, uint8_t *out) {
    prepare();
    out[0] = (uint8_t)i;
    if (i == 0 || i == 2 || i == 3) {
        memcpy(out + 1, "\0\0\0\1\7\40\0\100\200", 9);
        return i == 0 ? 1 : i == 2 ? 4 : 10;
    }
    if (i > 1) return 0;
    memcpy(out + 1, good, good_size);
    return 1 + good_size;
}
