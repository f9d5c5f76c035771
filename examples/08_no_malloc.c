/* 08_no_malloc.c - training from one static array: the first run measures how many bytes it needs, and
 * the second run gets no more.
 * SPDX-License-Identifier: MIT OR Unlicense
 *   cc -O2 examples/08_no_malloc.c -I. -lm && ./a.out */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include <stdio.h>

static char memory[1 << 20];

/* y = 3x learned from the first `bytes` of the array; w, and how much was used. */
static double learn(size_t bytes, int steps, size_t *used) {
    const int64_t shape[2] = { 1, 1 }, batch[2] = { 4, 1 };
    float x[4] = { 1, 2, 3, 4 }, y[4] = { 3, 6, 9, 12 };
    mixp_context_desc d = { .threads = 1, .memory = memory, .memory_bytes = bytes };
    mixp_context   *ctx = mixp_context_new(&d);
    mixp_tensor    *w = mixp_param(ctx, "w", MIXP_F32, 2, shape), *loss = NULL;
    mixp_optimizer_desc adamw = mixp_adamw_defaults();
    adamw.lr = 0.1;
    mixp_optimizer *opt = mixp_optimizer_new(ctx, &adamw);
    mixp_scaler    *scaler = mixp_scaler_new(ctx, NULL);
    const char     *why;
    double          learned;
    mixp_optimizer_add(opt, w, NULL);
    for (int step = 0; step < steps; step++) {
        mixp_step_begin(ctx);
        mixp_zero_grad(opt);
        MIXP_AUTOCAST(ctx, MIXP_F16)
            loss = mixp_mse(ctx, mixp_linear(ctx, mixp_input_f32(ctx, 2, batch, x), w, NULL),
                            mixp_input_f32(ctx, 2, batch, y));
        mixp_backward(ctx, mixp_scaler_scale(scaler, loss));
        mixp_scaler_step(scaler, opt);
        mixp_scaler_update(scaler);
    }
    if (mixp_context_error(ctx, &why)) printf("%s\n", why);
    learned = mixp_item(w);
    *used = mixp_context_memory(ctx).block;
    mixp_context_free(ctx);
    return learned;
}

int main(void) {
    size_t need, used;
    learn(sizeof memory, 2, &need);             /* a step after the first takes nothing more */
    printf("w = %.1f", learn(need, 200, &used));
    printf(", in the bytes that two steps needed: %s\n", used == need ? "yes" : "no");
    return 0;
}
/* prints:
w = 3.0, in the bytes that two steps needed: yes
*/
