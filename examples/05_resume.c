/* 05_resume.c - a run that is stopped half-way and resumed from its checkpoint ends with the same bits.
 * SPDX-License-Identifier: MIT OR Unlicense
 *   cc -O2 examples/05_resume.c -I. -lm && ./a.out */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include <stdio.h>
#include <string.h>
enum { WIDE = 16 };
typedef struct run {
    mixp_context *ctx; mixp_tensor *w; mixp_optimizer *opt; mixp_scaler *scaler; int64_t step;
} run;

/* Made the same way each time; what it remembers comes from the file. */
static run start(void) {
    const int64_t shape[2] = { WIDE, WIDE };
    run r = { mixp_context_new(NULL), NULL, NULL, NULL, 0 };
    r.w = mixp_param(r.ctx, "w", MIXP_F32, 2, shape);
    r.opt = mixp_optimizer_new(r.ctx, NULL);
    r.scaler = mixp_scaler_new(r.ctx, NULL);
    mixp_init_normal(r.w, 0.0, 0.3);
    mixp_optimizer_add(r.opt, r.w, NULL);
    return r;
}

static mixp_result save_or_load(run *r, int load) {
    const char *path = "05_resume.safetensors";
    mixp_checkpoint_value step = { "step", MIXP_I64, 1, &r->step };     /* values of your own */
    mixp_checkpoint all = { .ctx = r->ctx, .scaler = r->scaler, .optimizers = &r->opt, .n_optimizers = 1,
                            .values = &step, .n_values = 1 };
    return load ? mixp_checkpoint_load(path, &all) : mixp_checkpoint_save(path, &all);
}

static void train(run *r, int64_t until) {
    for (; r->step < until; r->step++) {
        mixp_tensor *loss = NULL;
        mixp_step_begin(r->ctx);
        mixp_zero_grad(r->opt);
        MIXP_AUTOCAST(r->ctx, MIXP_F16) {
            mixp_tensor *y = mixp_dropout(r->ctx, mixp_linear(r->ctx, r->w, r->w, NULL), 0.1f, 1);
            loss = mixp_mean(r->ctx, mixp_mul(r->ctx, y, y), MIXP_ALL, 0);
        }
        mixp_backward(r->ctx, mixp_scaler_scale(r->scaler, loss));
        mixp_scaler_step(r->scaler, r->opt);
        mixp_scaler_update(r->scaler);
    }
}

int main(void) {
    run whole = start(), first = start(), second = start();
    train(&whole, 20);
    train(&first, 10);
    int bad = save_or_load(&first, 0) || save_or_load(&second, 1);      /* another process, as a rule */
    train(&second, 20);
    int same = memcmp(whole.w->data, second.w->data, WIDE * WIDE * sizeof(float)) == 0;
    printf("resumed at step 10, at step %d the same bits: %s\n", (int)second.step, same && !bad ? "yes" : "no");
    mixp_context_free(whole.ctx);
    mixp_context_free(first.ctx);
    mixp_context_free(second.ctx);
    return remove("05_resume.safetensors");
}
/* prints:
resumed at step 10, at step 20 the same bits: yes
*/
