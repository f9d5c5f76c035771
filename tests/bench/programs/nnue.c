/* nnue.c - the chess net psqbb of AndyGrant/NNTrainer (768 sparse inputs, 512, 1), its loss and its Adam without bias
 * correction, on positions made here: its first layer by embedding_bag, by a row for each piece, or by a dense product.
 *     nnue bag|rows|dense f32|f16|bf16 EPOCHS
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { POSITIONS = 65536, BATCH = 4096, INPUTS = 768, HIDDEN = 512, PIECES = 32 };
static int32_t piece[POSITIONS][PIECES];    /* input numbers; INPUTS: none */
static float   target[POSITIONS], onehot[BATCH][INPUTS];
static const float k_sigmoid = 2.315f / 400.0f;

/* 4 to 32 pieces on squares of their own; a position's value is the sum of its pieces' values. */
static void make_positions(void) {
    uint64_t state = 1;
    for (int n = 0; n < POSITIONS; n++) {
        double value = 0.0;
        int count = 0;
        state = state * 6364136223846793005u + 1442695040888963407u;
        const int wanted = 4 + (int)(state >> 59 & 31) % 29;
        for (int square = 0; square < 64; square++) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            const int kind = (int)(state >> 40) % 12;
            if ((int)(state >> 33 & 63) >= wanted || count == PIECES) continue;
            piece[n][count++] = 64 * kind + square;
            value += (kind < 6 ? 40.0 : -40.0) * (kind % 6 + 1);
        }
        while (count < PIECES) piece[n][count++] = INPUTS;
        target[n] = 1.0f / (1.0f + expf(-k_sigmoid * (float)value));
    }
}

static mixp_tensor *first_layer(mixp_context *ctx, char how, mixp_tensor *table, int first) {
    mixp_tensor *ids = how == 'd' ? NULL : mixp_input_i32(ctx, MIXP_SHAPE(BATCH, PIECES), piece[first]);
    if (how == 'b') return mixp_embedding_bag(ctx, table, ids, NULL, NULL, MIXP_BAG_SUM, INPUTS);
    if (how == 'r') return mixp_sum(ctx, mixp_embedding_padded(ctx, table, ids, INPUTS), 1, 0);
    memset(onehot, 0, sizeof onehot);
    for (int n = 0; n < BATCH; n++)
        for (int i = 0; i < PIECES && piece[first + n][i] < INPUTS; i++) onehot[n][piece[first + n][i]] = 1.0f;
    return mixp_matmul(ctx, mixp_input_f32(ctx, MIXP_SHAPE(BATCH, INPUTS), onehot[0]), mixp_slice(ctx, table, 0, 0, INPUTS), 0, 0);
}

int main(int argc, char **argv) {
    if (argc != 4) return fprintf(stderr, "nnue bag|rows|dense f32|f16|bf16 EPOCHS\n"), 2;
    const mixp_dtype dtype = argv[2][0] == 'b' ? MIXP_BF16 : strcmp(argv[2], "f16") ? MIXP_F32 : MIXP_F16;
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_scaler  *scaler = mixp_scaler_new(ctx, NULL);
    mixp_optimizer_desc adam = mixp_adam_defaults();
    mixp_optimizer *opt = mixp_optimizer_new(ctx, &adam);
    mixp_tensor *table = mixp_param(ctx, "0.w", MIXP_F32, MIXP_SHAPE(INPUTS + 1, HIDDEN));  /* the last row is none */
    mixp_tensor *b0 = mixp_param(ctx, "0.b", MIXP_F32, MIXP_SHAPE(HIDDEN));
    mixp_tensor *w1 = mixp_param(ctx, "1.w", MIXP_F32, MIXP_SHAPE(1, HIDDEN)), *b1 = mixp_param(ctx, "1.b", MIXP_F32, MIXP_SHAPE(1));
    const char *why;
    int step = 0;
    make_positions();
    mixp_init_normal(table, 0, 0.05);
    float *rows = (float *)calloc((size_t)table->count, sizeof *rows);  /* the row of none is 0 */
    mixp_read_f32(table, rows, table->count);
    memset(rows + INPUTS * HIDDEN, 0, HIDDEN * sizeof *rows);
    mixp_write_f32(table, rows, table->count);
    free(rows);
    mixp_init_normal(w1, 0, 0.05);
    mixp_optimizer_add_all(opt, "*");
    for (int epoch = 0; epoch < atoi(argv[3]); epoch++) {
        const clock_t begin = clock();
        double sum = 0.0;
        for (int first = 0; first < POSITIONS; first += BATCH) {
            mixp_tensor *loss = NULL;
            step++;
            mixp_optimizer_set_lr(opt, 1e-3 * (1.0 - pow(0.9, step)) / sqrt(1.0 - pow(0.999, step)));
            mixp_step_begin(ctx);
            mixp_zero_grad(opt);
            MIXP_AUTOCAST(ctx, dtype) {
                mixp_tensor *h = mixp_relu(ctx, mixp_add(ctx, first_layer(ctx, argv[1][0], table, first), b0));
                h = mixp_sigmoid(ctx, mixp_scale(ctx, mixp_linear(ctx, h, w1, b1), k_sigmoid));
                loss = mixp_scale(ctx, mixp_mse(ctx, h, mixp_input_f32(ctx, MIXP_SHAPE(BATCH, 1), target + first)), BATCH);
            }
            mixp_backward(ctx, mixp_scaler_scale(scaler, loss));
            mixp_scaler_step(scaler, opt);
            mixp_scaler_update(scaler);
            sum += mixp_item(loss);
            if (mixp_context_error(ctx, &why)) return fprintf(stderr, "%s\n", why), 1;
        }
        printf("epoch %d: loss %.6f, %.2f s of the processor, %.0f MB\n", epoch, sum / POSITIONS,
               (double)(clock() - begin) / CLOCKS_PER_SEC, (double)mixp_context_memory(ctx).peak / 1e6);
    }
    mixp_context_free(ctx);
    return 0;
}
