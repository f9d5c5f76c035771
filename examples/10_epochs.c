/* 10_epochs.c - epochs, shuffling, validation, accuracy, early stopping, the best weights restored.
 * A layer is a struct of tensors and a function; shapes are written where they are used.
 * SPDX-License-Identifier: MIT OR Unlicense
 *   cc -O2 examples/10_epochs.c -I. -lm && ./a.out */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include <stdio.h>

enum { TRAIN = 512, TEST = 256, BATCH = 32, WIDE = 64, PATIENCE = 6, EPOCHS = 200 };
typedef struct sample { float at[2]; int32_t inside; } sample;  /* does it lie in a ring? */
typedef struct layer { mixp_tensor *w, *b; } layer;

static unsigned seed = 1;
static int below(int n) {               /* a random number in [0, n) */
    seed = seed * 1664525u + 1013904223u;
    return (int)((seed >> 16) % (unsigned)n);
}

static mixp_tensor *apply(mixp_context *ctx, layer l, mixp_tensor *x) {
    return mixp_linear(ctx, x, l.w, l.b);
}
static mixp_tensor *model(mixp_context *ctx, const layer *l, mixp_tensor *x) {
    return apply(ctx, l[1], mixp_relu(ctx, apply(ctx, l[0], x)));
}

static void shuffle(sample *data, int n) {
    for (int i = n - 1; i > 0; i--) {
        int    j = below(i + 1);
        sample kept = data[i];
        data[i] = data[j];
        data[j] = kept;
    }
}

/* The logits of n samples. */
static mixp_tensor *forward(mixp_context *ctx, const layer *l, const sample *data, int64_t n) {
    float x[TEST][2];
    for (int i = 0; i < n; i++) memcpy(x[i], data[i].at, sizeof x[i]);
    return model(ctx, l, mixp_input_f32(ctx, MIXP_SHAPE(n, 2), x[0]));
}

static mixp_tensor *batch_loss(mixp_context *ctx, const layer *l, const sample *data) {
    int32_t label[BATCH];
    for (int i = 0; i < BATCH; i++) label[i] = data[i].inside;
    return mixp_cross_entropy(ctx, forward(ctx, l, data, BATCH),
                              mixp_input_i32(ctx, MIXP_SHAPE(BATCH), label), MIXP_IGNORE);
}

static double accuracy(mixp_context *ctx, const layer *l, const sample *data) {
    int32_t guess[TEST], right = 0;
    mixp_eval_begin(ctx);               /* changes no bit of the training */
    MIXP_NO_GRAD(ctx)
        mixp_read_i32(mixp_argmax(ctx, forward(ctx, l, data, TEST), -1, 0), guess, TEST);
    for (int i = 0; i < TEST; i++) right += guess[i] == data[i].inside;
    return (double)right / TEST;
}

int main(void) {
    static sample data[TRAIN + TEST];
    const char   *file = "10_epochs.safetensors", *why;
    double        best = 0;
    int           epoch, best_epoch = 0;
    for (int i = 0; i < TRAIN + TEST; i++) {
        float x = (float)below(2001) / 1000.0f - 1.0f, y = (float)below(2001) / 1000.0f - 1.0f, r = x * x + y * y;
        data[i] = (sample){ { x, y }, r > 0.2f && r < 0.7f };
    }

    mixp_context *ctx = mixp_context_new(NULL);
    const layer l[2] = {
        { mixp_param(ctx, "0.w", MIXP_F32, MIXP_SHAPE(WIDE, 2)),
          mixp_param(ctx, "0.b", MIXP_F32, MIXP_SHAPE(WIDE)) },
        { mixp_param(ctx, "1.w", MIXP_F32, MIXP_SHAPE(2, WIDE)),
          mixp_param(ctx, "1.b", MIXP_F32, MIXP_SHAPE(2)) }
    };
    mixp_scaler *scaler = mixp_scaler_new(ctx, NULL);
    mixp_optimizer_desc adamw = mixp_adamw_defaults();
    adamw.lr = 0.02;
    mixp_optimizer *opt = mixp_optimizer_new(ctx, &adamw);
    mixp_init_all(ctx, "*.w", mixp_init_kaiming_normal, 1.4);       /* biases begin at 0 */
    mixp_optimizer_add_all(opt, "*");

    for (epoch = 1; epoch <= EPOCHS && epoch - best_epoch <= PATIENCE; epoch++) {
        shuffle(data, TRAIN);
        for (int first = 0; first < TRAIN; first += BATCH) {
            mixp_tensor *loss = NULL;
            mixp_step_begin(ctx);
            mixp_zero_grad(opt);
            MIXP_AUTOCAST(ctx, MIXP_F16) { loss = batch_loss(ctx, l, data + first); }
            mixp_backward(ctx, mixp_scaler_scale(scaler, loss));
            mixp_scaler_step(scaler, opt);
            mixp_scaler_update(scaler);
        }
        double now = accuracy(ctx, l, data + TRAIN);
        if (now > best) {
            best = now;
            best_epoch = epoch;
            mixp_checkpoint_save_weights(file, ctx);
        }
        if (mixp_context_error(ctx, &why)) { fprintf(stderr, "%s\n", why); return 1; }
    }
    mixp_checkpoint_load_weights(file, ctx, NULL);
    printf("validation accuracy above 0.9: %s\n", best > 0.9 ? "yes" : "no");
    printf("stopped early: %s\n", epoch <= EPOCHS ? "yes" : "no");
    printf("the best weights are back: %s\n", accuracy(ctx, l, data + TRAIN) == best ? "yes" : "no");
    mixp_context_free(ctx);
    return remove(file);
}
/* prints:
validation accuracy above 0.9: yes
stopped early: yes
the best weights are back: yes
*/
