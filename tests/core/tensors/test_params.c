/* test_params.c - parameters by name: listed, initialised, passed to optimizers, saved and loaded.
 * SPDX-License-Identifier: MIT OR Unlicense */
#include "mixprec.h"
#include "test.h"
#include <unistd.h>

static const char *const names[6] = { "enc.0.weight", "enc.0.bias", "enc.1.weight",
                                      "enc.1.bias", "head.weight", "head.bias" };
static char path[64];

typedef struct model {
    mixp_context *ctx;
    mixp_tensor  *t[6];
} model;

static void model_open(model *m) {
    static const int64_t matrix[2] = { 3, 2 }, row[1] = { 3 };
    m->ctx = mixp_context_new(NULL);
    for (int i = 0; i < 6; i++)
        m->t[i] = mixp_param(m->ctx, names[i], MIXP_F32, i % 2 ? 1 : 2, i % 2 ? row : matrix);
}

static float first(const mixp_tensor *t) {
    float v[6] = { -1 };
    CHECK_INT(mixp_read(t, v, MIXP_F32, t->count), MIXP_OK);
    return v[0];
}

static void listed(void) {
    static float mine[3];
    static const int64_t row[1] = { 3 };
    model m;
    int64_t i;
    model_open(&m);
    mixp_view(m.ctx, "a view", MIXP_F32, 1, row, mine);
    for (i = 0; mixp_context_param(m.ctx, i); i++) CHECK(i < 6 && mixp_context_param(m.ctx, i) == m.t[i]);
    CHECK_INT(i, 6);
    CHECK(mixp_context_param(m.ctx, -1) == NULL);
    CHECK(mixp_context_find(m.ctx, "enc.1.bias") == m.t[3]);
    CHECK(mixp_context_find(m.ctx, "enc.1") == NULL);
    CHECK(mixp_context_find(m.ctx, "a view") == NULL);
    CHECK(mixp_context_find(m.ctx, NULL) == NULL && mixp_context_find(NULL, "x") == NULL);
    CHECK_INT(mixp_context_error(m.ctx, NULL), MIXP_OK);
    mixp_context_free(m.ctx);
}

/* The same numbers as by hand, parameter by parameter. */
static void initialised(void) {
    const char *why;
    model m, hand;
    float a[6], b[6];
    model_open(&m);
    model_open(&hand);
    CHECK_INT(mixp_init_all(m.ctx, "*.weight", mixp_init_kaiming_normal, 1.4), MIXP_OK);
    CHECK_INT(mixp_init_all(m.ctx, "enc.?.bias", mixp_fill, 0.25), MIXP_OK);
    for (int i = 0; i < 6; i += 2) mixp_init_kaiming_normal(hand.t[i], 1.4);
    for (int i = 0; i < 6; i += 2) {
        mixp_read(m.t[i], a, MIXP_F32, 6);
        mixp_read(hand.t[i], b, MIXP_F32, 6);
        CHECK(memcmp(a, b, sizeof a) == 0 && (double)a[0] != 0.0);
    }
    CHECK_NEAR(first(m.t[1]), 0.25, 0);
    CHECK_NEAR(first(m.t[3]), 0.25, 0);
    CHECK_NEAR(first(m.t[5]), 0, 0);
    CHECK_INT(mixp_init_all(m.ctx, "dec.*", mixp_fill, 1), MIXP_ERR_ARGUMENT);
    mixp_context_error(m.ctx, &why);
    CHECK_TEXT(why, "no parameter's name fits 'dec.*'");
    mixp_context_clear_error(m.ctx);
    CHECK_INT(mixp_init_all(m.ctx, "*", mixp_init_kaiming_normal, 1), MIXP_ERR_SHAPE);
    mixp_context_free(m.ctx);
    mixp_context_free(hand.ctx);
}

/* Decay for weights alone: with gradients of 0, AdamW takes lr times the decay off. */
static void grouped(void) {
    mixp_optimizer_desc desc = mixp_adamw_defaults();
    mixp_param_group plain;
    model m;
    model_open(&m);
    desc.lr = 0.5;
    desc.weight_decay = 0.25;
    mixp_optimizer *opt = mixp_optimizer_new(m.ctx, &desc);
    mixp_optimizer *other = mixp_optimizer_new(m.ctx, &desc);
    mixp_init_all(m.ctx, "*", mixp_fill, 8);
    CHECK_INT(mixp_optimizer_add(other, m.t[4], NULL), MIXP_OK);
    mixp_tensor_set_requires_grad(m.t[3], 0);
    CHECK_INT(mixp_optimizer_add_all(opt, "*.weight"), MIXP_OK);
    mixp_optimizer_group(opt, 0, &plain);
    plain.weight_decay = 0;
    CHECK_INT(mixp_optimizer_add_group(opt, &plain), 1);
    CHECK_INT(mixp_optimizer_add_all(opt, "*"), MIXP_OK);
    for (int i = 0; i < 6; i++) {
        if (i == 3 || i == 4) continue;     /* frozen; of the other optimizer */
        mixp_step_begin(m.ctx);
        mixp_tensor *x = mixp_scale(m.ctx, m.t[i], 0);
        mixp_tensor *loss = mixp_sum(m.ctx, x, MIXP_ALL, 0);
        CHECK_INT(mixp_backward(m.ctx, loss), MIXP_OK);
    }
    CHECK_INT(mixp_optimizer_step(opt), MIXP_OK);
    CHECK_NEAR(first(m.t[0]), 7, 0);        /* 8 (1 - 0.5 0.25) */
    CHECK_NEAR(first(m.t[2]), 7, 0);
    CHECK_NEAR(first(m.t[1]), 8, 0);
    CHECK_NEAR(first(m.t[5]), 8, 0);
    CHECK_NEAR(first(m.t[3]), 8, 0);
    CHECK_NEAR(first(m.t[4]), 8, 0);
    CHECK_INT(mixp_context_error(m.ctx, NULL), MIXP_OK);
    CHECK_INT(mixp_optimizer_add_all(opt, "*"), MIXP_ERR_ARGUMENT);     /* all are taken, or frozen */
    CHECK_INT(mixp_optimizer_add_all(opt, NULL), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_optimizer_add_all(NULL, "*"), MIXP_ERR_ARGUMENT);
    mixp_context_free(m.ctx);
}

static void rates(void) {
    mixp_param_group g;
    model m;
    model_open(&m);
    mixp_optimizer *opt = mixp_optimizer_new(m.ctx, NULL);
    mixp_optimizer_group(opt, 0, &g);
    g.lr = 0.125;
    mixp_optimizer_add_group(opt, &g);
    CHECK_INT(mixp_optimizer_set_lr(opt, 0.5), MIXP_OK);
    CHECK_NEAR(mixp_optimizer_lr(opt, 0), 0.5, 0);
    CHECK_NEAR(mixp_optimizer_lr(opt, 1), 0.5, 0);
    CHECK_INT(mixp_optimizer_set_lr(opt, -1), MIXP_ERR_ARGUMENT);
    CHECK_NEAR(mixp_optimizer_lr(opt, 0), 0.5, 0);
    CHECK_INT(mixp_optimizer_set_lr(NULL, 1), MIXP_ERR_ARGUMENT);
    mixp_context_free(m.ctx);
}

/* A head alone, under other names, and back into a model that has nothing of it. */
static void saved(void) {
    mixp_weights_desc head;
    mixp_safetensors *f = NULL;
    const char *why;
    model m, to;
    model_open(&m);
    model_open(&to);
    memset(&head, 0, sizeof head);
    head.pattern = "head.*";
    head.prefix = "model.";
    mixp_init_all(m.ctx, "*", mixp_fill, 3);
    CHECK_INT(mixp_checkpoint_save_weights_of(path, m.ctx, &head), MIXP_OK);
    CHECK_INT(mixp_safetensors_read(path, &f, NULL, 0), MIXP_OK);
    CHECK_INT(mixp_safetensors_count(f), 2);
    CHECK(mixp_safetensors_find(f, "model.head.weight") != NULL);
    mixp_safetensors_free(f);
    CHECK_INT(mixp_checkpoint_load_weights(path, to.ctx, &head), MIXP_OK);
    CHECK_NEAR(first(to.t[4]), 3, 0);
    CHECK_NEAR(first(to.t[5]), 3, 0);
    CHECK_NEAR(first(to.t[0]), 0, 0);
    /* Without the prefix nothing of the model is in the file. */
    head.prefix = NULL;
    CHECK_INT(mixp_checkpoint_load_weights(path, to.ctx, &head), MIXP_ERR_SHAPE);
    mixp_context_clear_error(to.ctx);
    head.pattern = "tail.*";
    CHECK_INT(mixp_checkpoint_save_weights_of(path, m.ctx, &head), MIXP_ERR_ARGUMENT);
    mixp_context_error(m.ctx, &why);
    CHECK_TEXT(why, "no parameter's name fits 'tail.*'");
    CHECK_INT(mixp_checkpoint_load_weights(path, to.ctx, &head), MIXP_ERR_ARGUMENT);
    mixp_context_free(m.ctx);
    mixp_context_free(to.ctx);
}

/* From a file of everything: what the pattern leaves out is neither loaded nor too much. */
static void chosen(void) {
    mixp_weights_desc enc;
    model m, to;
    model_open(&m);
    model_open(&to);
    memset(&enc, 0, sizeof enc);
    enc.pattern = "enc.*";
    mixp_init_all(m.ctx, "*", mixp_fill, 5);
    CHECK_INT(mixp_checkpoint_save_weights(path, m.ctx), MIXP_OK);
    CHECK_INT(mixp_checkpoint_load_weights(path, to.ctx, &enc), MIXP_OK);
    CHECK_NEAR(first(to.t[3]), 5, 0);
    CHECK_NEAR(first(to.t[4]), 0, 0);
    mixp_context_free(m.ctx);
    mixp_context_free(to.ctx);
}

/* Names by a format, as printf's. */
static void named(void) {
    static const int64_t shape[1] = { 2 };
    mixp_context *ctx = mixp_context_new(NULL);
    const char *why;
    char longest[256];
    memset(longest, 'x', 255);
    longest[255] = 0;
    for (int i = 0; i < 3; i++) {
        mixp_tensor *t = mixp_param_named(ctx, MIXP_F32, 1, shape, "h.%d.%s", i, "w");
        CHECK(t && t->requires_grad && t == mixp_context_param(ctx, i));
    }
    CHECK(mixp_context_find(ctx, "h.2.w") == mixp_context_param(ctx, 2));
    CHECK(mixp_param_named(ctx, MIXP_F32, 1, shape, "%s", longest) != NULL);
    CHECK(mixp_context_find(ctx, longest) == mixp_context_param(ctx, 3));
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    CHECK(mixp_param_named(ctx, MIXP_F32, 1, shape, "%s.", longest) == NULL);
    CHECK_INT(mixp_context_error(ctx, &why), MIXP_ERR_ARGUMENT);
    CHECK_TEXT(why, "more than 255 bytes");
    mixp_context_clear_error(ctx);
    CHECK(mixp_param_named(ctx, MIXP_F32, 1, shape, "h.%d.w", 1) == NULL);
    mixp_context_error(ctx, &why);
    CHECK_TEXT(why, "'h.1.w': this name is taken");
    mixp_context_clear_error(ctx);
    CHECK(mixp_param_named(ctx, MIXP_F32, 1, shape, NULL) == NULL);
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_ERR_ARGUMENT);
    CHECK(mixp_param_named(NULL, MIXP_F32, 1, shape, "h.%d", 1) == NULL);
    mixp_context_free(ctx);
}

/* Frozen by a pattern: no gradient, no place in an optimizer; trained again, both. */
static void frozen(void) {
    const char *why;
    model m;
    model_open(&m);
    CHECK_INT(mixp_freeze_all(m.ctx, "enc.*", 1), MIXP_OK);
    for (int i = 0; i < 6; i++) CHECK_INT(m.t[i]->requires_grad, i >= 4);
    mixp_optimizer *opt = mixp_optimizer_new(m.ctx, NULL);
    CHECK_INT(mixp_optimizer_add_all(opt, "*"), MIXP_OK);
    CHECK(m.t[0]->own.optimizers == 0 && m.t[4]->own.optimizers == 1);
    CHECK_INT(mixp_optimizer_add_all(opt, "enc.*"), MIXP_ERR_ARGUMENT);
    mixp_context_error(m.ctx, &why);
    CHECK_TEXT(why, "no trainable parameter");
    mixp_context_clear_error(m.ctx);
    CHECK_INT(mixp_freeze_all(m.ctx, "enc.0.*", 0), MIXP_OK);
    CHECK_INT(mixp_optimizer_add_all(opt, "enc.*"), MIXP_OK);
    CHECK(m.t[0]->own.optimizers == 1 && m.t[2]->own.optimizers == 0);
    CHECK_INT(mixp_context_error(m.ctx, NULL), MIXP_OK);
    CHECK_INT(mixp_freeze_all(m.ctx, "decoder.*", 1), MIXP_ERR_ARGUMENT);
    mixp_context_error(m.ctx, &why);
    CHECK_TEXT(why, "'decoder.*'; the context has 6 parameters, the first is 'enc.0.weight'");
    mixp_context_clear_error(m.ctx);
    CHECK_INT(mixp_optimizer_add_all(opt, "enc.weight"), MIXP_ERR_ARGUMENT);
    mixp_context_error(m.ctx, &why);
    CHECK_TEXT(why, "the first is 'enc.0.weight'");
    mixp_context_clear_error(m.ctx);
    CHECK_INT(mixp_freeze_all(m.ctx, NULL, 1), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_freeze_all(NULL, "*", 1), MIXP_ERR_ARGUMENT);
    mixp_context_free(m.ctx);
    m.ctx = mixp_context_new(NULL);
    CHECK_INT(mixp_init_all(m.ctx, "*", mixp_fill, 0), MIXP_ERR_ARGUMENT);
    mixp_context_error(m.ctx, &why);
    CHECK_TEXT(why, "the context has no parameters");
    mixp_context_free(m.ctx);
}

int main(void) {
    snprintf(path, sizeof path, "/tmp/mixprec-params-%ld.safetensors", (long)getpid());
    RUN(listed);
    RUN(named);
    RUN(frozen);
    RUN(initialised);
    RUN(grouped);
    RUN(rates);
    RUN(saved);
    RUN(chosen);
    remove(path);
    return test_report();
}
