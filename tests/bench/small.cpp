// small.cpp - the training step of a small network, behind plain functions for small.py.
// SPDX-License-Identifier: MIT OR Unlicense
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include <ctime>

enum { BATCH = 64, IN = 8, HIDDEN = 64, OUT = 4 };

// A network of three layers with biases, as PINNs and agents have them: 1.8 MFLOP a step.
struct small {
    mixp_context   *ctx;
    mixp_optimizer *opt;
    mixp_scaler    *scaler;
    mixp_tensor    *w[3], *b[3];
    mixp_dtype      dtype;
    float           x[BATCH * IN], y[BATCH * OUT];
};

static mixp_tensor *forward(small *s) {
    const int64_t x_shape[2] = { BATCH, IN }, y_shape[2] = { BATCH, OUT };
    mixp_tensor *h = mixp_input(s->ctx, MIXP_F32, 2, x_shape, s->x), *loss = NULL;
    MIXP_AUTOCAST(s->ctx, s->dtype) {
        for (int i = 0; i < 3; i++) {
            h = mixp_linear(s->ctx, h, s->w[i], s->b[i]);
            if (i < 2) h = mixp_relu(s->ctx, h);
        }
        loss = mixp_mse(s->ctx, h, mixp_input(s->ctx, MIXP_F32, 2, y_shape, s->y));
    }
    return loss;
}

static void step(small *s) {
    mixp_step_begin(s->ctx);
    mixp_zero_grad(s->opt);
    mixp_backward(s->ctx, mixp_scaler_scale(s->scaler, forward(s)));
    mixp_scaler_step(s->scaler, s->opt);
    mixp_scaler_update(s->scaler);
}

static void add_layer(small *s, int i, int64_t in, int64_t out) {
    const int64_t shape[2] = { out, in };
    s->w[i] = mixp_param(s->ctx, i == 0 ? "w0" : i == 1 ? "w1" : "w2", MIXP_F32, 2, shape);
    s->b[i] = mixp_param(s->ctx, i == 0 ? "b0" : i == 1 ? "b1" : "b2", MIXP_F32, 1, shape);
    mixp_init_kaiming_normal(s->w[i], 1.4);
    mixp_optimizer_add(s->opt, s->w[i], NULL);
    mixp_optimizer_add(s->opt, s->b[i], NULL);
}

extern "C" {

small *small_new(int f16, int threads) {
    small *s = new small();
    mixp_context_desc desc = mixp_context_desc();
    mixp_scaler_desc  scaler = mixp_scaler_desc();
    mixp_optimizer_desc adamw = mixp_adamw_defaults();
    desc.threads = threads;
    scaler.disabled = !f16;
    s->ctx = mixp_context_new(&desc);
    s->scaler = mixp_scaler_new(s->ctx, &scaler);
    s->opt = mixp_optimizer_new(s->ctx, &adamw);
    s->dtype = f16 ? MIXP_F16 : MIXP_F32;
    add_layer(s, 0, IN, HIDDEN);
    add_layer(s, 1, HIDDEN, HIDDEN);
    add_layer(s, 2, HIDDEN, OUT);
    for (int i = 0; i < BATCH * IN; i++) s->x[i] = (float)(i * 7919 % 1000) / 500.0f - 1.0f;
    for (int i = 0; i < BATCH * OUT; i++) s->y[i] = s->x[i % (BATCH * IN)];
    return s;
}

// Seconds of this thread's CPU time so far: other programs of a busy machine do not count.
static double cpu_seconds() {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// Seconds of one step, of `count` in a row.
double small_steps(small *s, int count) {
    const double start = cpu_seconds();
    for (int i = 0; i < count; i++) step(s);
    return (cpu_seconds() - start) / count;
}

// Frees the network; returns 1 if its context has met an error.
int small_free(small *s) {
    const int failed = mixp_context_error(s->ctx, NULL) != MIXP_OK;
    mixp_context_free(s->ctx);
    delete s;
    return failed;
}

}
