/* microgpt_adam.c - microgpt-c with adam_step by mixprec, for both of its scalars: tests/bench/programs.sh compiles it in
 * place of microgpt.c.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#define adam_step adam_step_of_microgpt
#include "microgpt.c"
#undef adam_step
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#ifdef MICROGPT_USE_FLOAT
#  define view_scalar mixp_view_f32
#else
#  define view_scalar mixp_view_f64
#endif

typedef struct adam { mixp_context *ctx; mixp_optimizer *opt; scalar_t *grads; size_t at; } adam;

static void add(adam *a, const char *name, scalar_t *w, size_t n) {
    const int64_t shape[1] = { (int64_t)n };
    mixp_optimizer_add(a->opt, view_scalar(a->ctx, name, 1, shape, w), view_scalar(a->ctx, name, 1, shape, a->grads + a->at));
    a->at += n;
}

static void start(adam *a, Model *model, const scalar_t *grads) {
    mixp_optimizer_desc d = mixp_adamw_defaults();
    memcpy(&a->grads, &grads, sizeof grads); /* the optimizer only reads them */
    d.beta1 = BETA1;
    d.beta2 = BETA2;
    d.eps = EPS_ADAM;
    d.weight_decay = WEIGHT_DECAY;
    a->ctx = mixp_context_new(NULL);
    a->opt = mixp_optimizer_new(a->ctx, &d);
    add(a, "wte", model->wte, model->vocab_size * N_EMBD);
    add(a, "wpe", model->wpe, BLOCK_SIZE * N_EMBD);
    add(a, "lm_head", model->lm_head, model->vocab_size * N_EMBD);
    for (int l = 0; l < N_LAYER; l++) {
        add(a, "wq", model->attn_wq[l], N_EMBD * N_EMBD);
        add(a, "wk", model->attn_wk[l], N_EMBD * N_EMBD);
        add(a, "wv", model->attn_wv[l], N_EMBD * N_EMBD);
        add(a, "wo", model->attn_wo[l], N_EMBD * N_EMBD);
        add(a, "fc1", model->mlp_fc1[l], MLP_DIM * N_EMBD);
        add(a, "fc2", model->mlp_fc2[l], N_EMBD * MLP_DIM);
    }
}

void adam_step(Model *model, const scalar_t *grads, scalar_t *m, scalar_t *v, int step);
void adam_step(Model *model, const scalar_t *grads, scalar_t *m, scalar_t *v, int step) {
    static adam a;
    const char *why;
    (void)m, (void)v; /* mixprec keeps the moments */
    if (!a.ctx) start(&a, model, grads);
    const double progress = (double)(step - WARMUP_STEPS) / (NUM_STEPS - WARMUP_STEPS);
    mixp_optimizer_set_lr(a.opt, step < WARMUP_STEPS ? LEARNING_RATE * (step + 1) / WARMUP_STEPS
                                                     : LEARNING_RATE * 0.5 * (1.0 + cos(progress * 3.14159265358979323846)));
    mixp_optimizer_step(a.opt);
    if (mixp_context_error(a.ctx, &why) == MIXP_OK) return;
    fprintf(stderr, "%s\n", why);
    exit(1);
}
