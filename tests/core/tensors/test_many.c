/* test_many.c - 10,000 parameters: a mixture of experts has as many. The time grows as their number.
 * SPDX-License-Identifier: MIT OR Unlicense */
#include "mixprec.h"
#include "test.h"
#include <time.h>

enum { MANY = 10000 };

/* Seconds of the processor since `from`. Other programs on the machine do not count. */
static double since(clock_t from) { return (double)(clock() - from) / CLOCKS_PER_SEC; }

/* 0.05 s on an idle machine; 53 s when each call walked a list. Sanitizers take ten times as long. */
static const double limit = 2.0;

static const char *message_of(const mixp_context *ctx) {
    const char *message = "";
    mixp_context_error(ctx, &message);
    return message;
}

static const char *name_of(int i) {
    static char name[64];
    snprintf(name, sizeof name, "h.%d.expert.%d.w", i / 64, i % 64);
    return name;
}

static void made_added_and_filled(mixp_context *ctx) {
    static const int64_t shape[2] = { 2, 3 };
    const clock_t from = clock();
    int i, found = 0, in_order = 0;
    float last[6] = { 0 };
    for (i = 0; i < MANY; i++) mixp_param(ctx, name_of(i), MIXP_F32, 2, shape);
    CHECK_INT(mixp_init_all(ctx, "*.w", mixp_fill, 0.25), MIXP_OK);
    mixp_optimizer *opt = mixp_optimizer_new(ctx, NULL);
    CHECK_INT(mixp_optimizer_add_all(opt, "h.*"), MIXP_OK);
    for (i = 0; i < MANY; i++) {
        mixp_tensor *t = mixp_context_param(ctx, i);
        found += t && mixp_context_find(ctx, name_of(i)) == t;
        in_order += t && strcmp(t->name, name_of(i)) == 0;
    }
    printf("  %d parameters: %.3f s\n", MANY, since(from));
    CHECK(since(from) < limit);
    CHECK_INT(found, MANY);
    CHECK_INT(in_order, MANY);
    CHECK(mixp_context_param(ctx, MANY) == NULL);
    CHECK(mixp_context_find(ctx, "h.0.expert.64.w") == NULL);
    CHECK_INT(mixp_read(mixp_context_param(ctx, MANY - 1), last, MIXP_F32, 6), MIXP_OK);
    CHECK(last[0] == 0.25f && last[5] == 0.25f);
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    CHECK(mixp_param(ctx, name_of(MANY / 2), MIXP_F32, 2, shape) == NULL);
    CHECK_TEXT(message_of(ctx), "this name is taken");
}

static void in_a_context(void) {
    mixp_context *ctx = mixp_context_new(NULL);
    made_added_and_filled(ctx);
    mixp_context_free(ctx);
}

/* The same in one block of the caller's memory, whose chunks are a list. */
static void in_a_block(void) {
    const size_t bytes = (size_t)64 << 20;
    mixp_context_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.memory = malloc(bytes);
    desc.memory_bytes = bytes;
    mixp_context *ctx = mixp_context_new(&desc);
    made_added_and_filled(ctx);
    mixp_context_free(ctx);
    free(desc.memory);
}

/* Parameters without a name are many, and are found by their number only. */
static void without_names(void) {
    static const int64_t shape[1] = { 1 };
    mixp_context *ctx = mixp_context_new(NULL);
    const clock_t from = clock();
    int i, in_order = 0;
    for (i = 0; i < MANY; i++) {
        mixp_tensor *t = mixp_param(ctx, i % 2 ? NULL : "", MIXP_F32, 1, shape);
        in_order += t && t == mixp_context_param(ctx, i);
    }
    CHECK(since(from) < limit);
    CHECK_INT(in_order, MANY);
    CHECK(mixp_context_find(ctx, "") == NULL);
    mixp_context_free(ctx);
}

/* Views of one array in any order, as a program with its own tensors adds them. The oracle marks
 * the elements that a parameter has. */
static void overlaps(void) {
    enum { ELEMENTS = 4 * MANY };
    static float weights[ELEMENTS], grads[ELEMENTS];
    static char taken[ELEMENTS];
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_optimizer *opt = mixp_optimizer_new(ctx, NULL);
    const clock_t from = clock();
    uint32_t random = 1;
    int i, k, wrong = 0, added = 0, refused = 0;
    for (i = 0; i < MANY; i++) {
        int64_t shape[1];
        int at, free_here = 1;
        random = random * 1664525u + 1013904223u;
        shape[0] = 1 + (int64_t)(random >> 28) % 5;
        at = (int)((random >> 4) % (uint32_t)(ELEMENTS - 5));
        mixp_tensor *w = mixp_view(ctx, "w", MIXP_F32, 1, shape, weights + at);
        mixp_tensor *g = mixp_view(ctx, "g", MIXP_F32, 1, shape, grads + at);
        for (k = 0; k < shape[0]; k++) free_here &= !taken[at + k];
        mixp_result r = mixp_optimizer_add(opt, w, g);
        wrong += (r == MIXP_OK) != free_here;
        for (k = 0; k < shape[0]; k++) taken[at + k] |= (char)free_here;
        added += free_here;
        refused += !free_here;
        mixp_context_clear_error(ctx);
    }
    printf("  %d views added, %d refused: %.3f s\n", added, refused, since(from));
    CHECK(since(from) < limit);
    CHECK_INT(wrong, 0);
    CHECK(added > 1000 && refused > 1000);
    mixp_context_free(ctx);
}

/* With zero_grad, two parameters share no gradient; without, they may. A parameter of two
 * optimizers is no error; of one optimizer twice it is. */
static void shared_gradients(void) {
    static float weights[8], grad[4];
    static const int64_t shape[1] = { 4 };
    for (int clears = 0; clears < 2; clears++) {
        mixp_context *ctx = mixp_context_new(NULL);
        mixp_optimizer_desc d = mixp_adamw_defaults();
        mixp_tensor *a = mixp_view(ctx, "a", MIXP_F32, 1, shape, weights);
        mixp_tensor *b = mixp_view(ctx, "b", MIXP_F32, 1, shape, weights + 4);
        mixp_tensor *g = mixp_view(ctx, "g", MIXP_F32, 1, shape, grad);
        d.zero_grad = clears;
        mixp_optimizer *opt = mixp_optimizer_new(ctx, &d);
        mixp_optimizer *other = mixp_optimizer_new(ctx, NULL);
        CHECK_INT(mixp_optimizer_add(opt, b, g), MIXP_OK);
        CHECK_INT(mixp_optimizer_add(other, b, g), MIXP_OK);
        CHECK_INT(mixp_optimizer_add(opt, a, g), clears ? MIXP_ERR_ARGUMENT : MIXP_OK);
        if (clears) CHECK_TEXT(message_of(ctx), "shares its gradient");
        mixp_context_clear_error(ctx);
        CHECK_INT(mixp_optimizer_add(opt, b, g), MIXP_ERR_ARGUMENT);
        CHECK_TEXT(message_of(ctx), "was added before");
        mixp_context_free(ctx);
    }
}

int main(void) {
    RUN(in_a_context);
    RUN(in_a_block);
    RUN(without_names);
    RUN(overlaps);
    RUN(shared_gradients);
    return test_report();
}
