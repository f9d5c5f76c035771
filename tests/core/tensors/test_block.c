/* test_block.c - training from one static array. malloc is forbidden in mixprec.h here, and an
 * error states exactly how many bytes are needed. The test compiles its own implementation, or the
 * host's part of it, with the forbidden names.
 * SPDX-License-Identifier: MIT OR Unlicense */
#include <stdlib.h>
static int forbidden;
static void *no_malloc(size_t bytes) {
    forbidden++;
    return malloc(bytes);
}
static void no_free(void *p) {
    forbidden += p != NULL;
    free(p);
}
#define malloc no_malloc
#define free no_free
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#undef malloc
#undef free
#include "test.h"
#include "new_optimizer.h"
#include <unistd.h>

/* A save has a buffer of 1 MiB. */
enum { BLOCK = 1 << 21, POINTS = 32, HIDDEN = 16 };
static char block[BLOCK + 64];

typedef struct training {
    mixp_context   *ctx;
    mixp_tensor    *w[2];
    mixp_optimizer *opt;
    mixp_scaler    *scaler;
    double          loss;
} training;

/* y = x1 x2, learned in fp16 from the block or, NULL, by malloc. */
static training train(void *memory, size_t bytes, int steps) {
    static const int64_t shape[2][2] = { { HIDDEN, 2 }, { 1, HIDDEN } };
    static const int64_t in[2] = { POINTS, 2 }, out[2] = { POINTS, 1 };
    float x[2 * POINTS], y[POINTS];
    mixp_context_desc d;
    training t;
    memset(&t, 0, sizeof t);
    memset(&d, 0, sizeof d);
    d.memory = memory;
    d.memory_bytes = bytes;
    d.threads = 1;
    t.ctx = mixp_context_new(&d);
    if (!t.ctx) return t;
    for (int i = 0; i < 2; i++) {
        t.w[i] = mixp_param(t.ctx, i ? "w1" : "w0", MIXP_F32, 2, shape[i]);
        mixp_init_xavier_normal(t.w[i], 1.0);
    }
    t.opt = mixp_optimizer_new(t.ctx, NULL);
    for (int i = 0; i < 2; i++) mixp_optimizer_add(t.opt, t.w[i], NULL);
    t.scaler = mixp_scaler_new(t.ctx, NULL);
    for (int step = 0; step < steps; step++) {
        mixp_tensor *h, *loss = NULL;
        for (int i = 0; i < POINTS; i++) {
            x[2 * i] = (float)(i % 8) / 4.0f - 1.0f;
            x[2 * i + 1] = (float)(i / 8) / 2.0f - 1.0f;
            y[i] = x[2 * i] * x[2 * i + 1];
        }
        mixp_step_begin(t.ctx);
        mixp_zero_grad(t.opt);
        MIXP_AUTOCAST(t.ctx, MIXP_F16) {
            h = mixp_tanh(t.ctx, mixp_linear(t.ctx, mixp_input(t.ctx, MIXP_F32, 2, in, x), t.w[0],
                                             NULL));
            loss = mixp_mse(t.ctx, mixp_linear(t.ctx, h, t.w[1], NULL),
                            mixp_input(t.ctx, MIXP_F32, 2, out, y));
        }
        mixp_backward(t.ctx, mixp_scaler_scale(t.scaler, loss));
        mixp_scaler_step(t.scaler, t.opt);
        mixp_scaler_update(t.scaler);
        t.loss = mixp_item(loss);
    }
    return t;
}

/* The same numbers as with malloc, and nothing outside of the array. */
static void test_training_from_a_block(void) {
    training by_malloc = train(NULL, 0, 20), by_block;
    float w[2][2 * HIDDEN];
    CHECK(forbidden > 0);               /* the wrapper is in place */
    CHECK_INT(mixp_read(by_malloc.w[0], w[0], MIXP_F32, 2 * HIDDEN), MIXP_OK);
    mixp_context_free(by_malloc.ctx);
    forbidden = 0;
    memset(block, 0x5A, sizeof block);
    by_block = train(block, BLOCK, 20);
    CHECK_INT(mixp_read(by_block.w[0], w[1], MIXP_F32, 2 * HIDDEN), MIXP_OK);
    CHECK_INT(mixp_context_error(by_block.ctx, NULL), MIXP_OK);
    CHECK(memcmp(w[0], w[1], sizeof w[0]) == 0);
    CHECK_NEAR(by_block.loss, by_malloc.loss, 0.0);
    mixp_context_free(by_block.ctx);
    CHECK_INT(forbidden, 0);
    for (size_t i = BLOCK; i < sizeof block; i++) CHECK_INT(block[i], 0x5A);
}

/* What it says is enough, at any alignment, and 64 bytes less is not. */
static void test_how_much_it_needs(void) {
    training t = train(block, BLOCK, 3);
    size_t need = mixp_context_memory(t.ctx).block, used;
    char block_of[40];
    const char *why;
    CHECK(need > 1000 && need < 300000);
    mixp_context_free(t.ctx);
    t = train(block, need, 30);
    CHECK_INT(mixp_context_error(t.ctx, NULL), MIXP_OK);
    used = mixp_context_memory(t.ctx).block;
    CHECK_INT(used, need);              /* a step after the first takes nothing */
    mixp_context_free(t.ctx);
    t = train(block, need - 64, 3);
    CHECK_INT(mixp_context_error(t.ctx, &why), MIXP_ERR_MEMORY);
    snprintf(block_of, sizeof block_of, "in the block of %zu bytes; ", need - 64);
    CHECK_TEXT(why, block_of);
    CHECK_TEXT(why, "read mixp_context_memory(ctx).block");
    mixp_context_free(t.ctx);
    t = train(block + 1, need + 63, 3);
    CHECK_INT(mixp_context_error(t.ctx, NULL), MIXP_OK);
    mixp_context_free(t.ctx);
}

/* At every size: a context that trains, one with MIXP_ERR_MEMORY, or none; nothing beyond the end. */
static void test_every_size(void) {
    int trained = 0, refused = 0, none = 0;
    for (size_t bytes = 0; bytes < 300000; bytes += bytes < 2000 ? 17 : 4099) {
        memset(block + bytes, 0x5A, 64);
        training t = train(block, bytes, 2);
        if (!t.ctx) none++;
        else if (mixp_context_error(t.ctx, NULL) == MIXP_OK) trained++;
        else refused += mixp_context_error(t.ctx, NULL) == MIXP_ERR_MEMORY;
        mixp_context_free(t.ctx);
        for (size_t i = 0; i < 64; i++) CHECK_INT(block[bytes + i], 0x5A);
    }
    CHECK(none > 10 && refused > 10 && trained > 0);
}

/* What is freed is taken again, in any order, and neighbours are joined. */
static void test_a_block_is_used_again(void) {
    mixp_context_desc d;
    mixp_optimizer *opt[8];
    mixp_optimizer_desc large = mixp_sgd_defaults();
    size_t need = 0;
    memset(&d, 0, sizeof d);
    d.memory = block;
    d.memory_bytes = BLOCK;
    d.threads = 1;
    mixp_context *ctx = mixp_context_new(&d);
    for (int round = 0; round < 20; round++) {
        for (int i = 0; i < 8; i++) opt[i] = new_sgd(ctx);
        for (int i = 0; i < 8; i++) CHECK_INT(mixp_optimizer_free(opt[(5 * i + round) % 8]), MIXP_OK);
        if (round == 0) need = mixp_context_memory(ctx).block;
        CHECK_INT(mixp_context_memory(ctx).block, need);
    }
    large.spike.of = MIXP_SPIKE_NORM;   /* a window of 16000 bytes: more than one of them had */
    large.spike.window = 1000;
    CHECK(mixp_optimizer_new(ctx, &large) != NULL);
    CHECK_INT(mixp_context_memory(ctx).block, need);
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    mixp_context_free(ctx);
}

/* Saving and loading take their buffers there, too. */
static void test_a_checkpoint_from_a_block(void) {
    char path[64];
    training t = train(block, BLOCK, 3);
    mixp_checkpoint what;
    float w[2][2 * HIDDEN];
    snprintf(path, sizeof path, "/tmp/mixprec_block_%ld.safetensors", (long)getpid());
    forbidden = 0;
    memset(&what, 0, sizeof what);
    what.ctx = t.ctx;
    what.scaler = t.scaler;
    what.optimizers = &t.opt;
    what.n_optimizers = 1;
    CHECK_INT(mixp_read(t.w[0], w[0], MIXP_F32, 2 * HIDDEN), MIXP_OK);
    CHECK_INT(mixp_checkpoint_save(path, &what), MIXP_OK);
    CHECK_INT(mixp_fill(t.w[0], 0.0), MIXP_OK);
    CHECK_INT(mixp_checkpoint_load(path, &what), MIXP_OK);
    CHECK_INT(mixp_read(t.w[0], w[1], MIXP_F32, 2 * HIDDEN), MIXP_OK);
    CHECK(memcmp(w[0], w[1], sizeof w[0]) == 0);
    CHECK_INT(forbidden, 0);
    mixp_context_free(t.ctx);
    remove(path);
}

static void *no_malloc_for(size_t bytes, void *user) {
    (void)user;
    return no_malloc(bytes);
}
static void no_free_for(void *p, void *user) {
    (void)user;
    no_free(p);
}

static void test_what_is_refused(void) {
    mixp_context_desc d;
    const char *why = "";
    memset(&d, 0, sizeof d);
    d.why = &why;
    d.memory = block;
    CHECK(mixp_context_new(&d) == NULL);
    CHECK_TEXT(why, "memory_bytes is too small");
    d.memory_bytes = 700;                               /* a block, but no context */
    CHECK(mixp_context_new(&d) == NULL);
    CHECK_TEXT(why, "memory_bytes is too small");
    d.memory_bytes = BLOCK;
    d.allocate = no_malloc_for;
    d.release = no_free_for;
    CHECK(mixp_context_new(&d) == NULL);
    CHECK_TEXT(why, "set one of them");
}

int main(void) {
    RUN(test_training_from_a_block);
    RUN(test_how_much_it_needs);
    RUN(test_every_size);
    RUN(test_a_block_is_used_again);
    RUN(test_a_checkpoint_from_a_block);
    RUN(test_what_is_refused);
    return test_report();
}
