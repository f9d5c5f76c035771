/* small_net.h - a network of three layers, 8 inputs and 4 outputs, and one step of its fp16
 * training.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#ifndef SMALL_NET_H
#define SMALL_NET_H
#include "mixprec.h"
#include <stdlib.h>
#include <string.h>

enum { SMALL_NET_IN = 8, SMALL_NET_OUT = 4, SMALL_NET_LAYERS = 3 };

typedef struct small_net {
    mixp_context   *ctx;
    mixp_optimizer *opt;
    mixp_scaler    *scaler;
    mixp_tensor    *w[SMALL_NET_LAYERS], *b[SMALL_NET_LAYERS];
    int64_t         batch;
    float          *x;
    float           loss;
} small_net;

static void small_net_layer(small_net *net, int i, int64_t in, int64_t out) {
    const char *const weights[] = { "w0", "w1", "w2" }, *const biases[] = { "b0", "b1", "b2" };
    int64_t shape[2];
    shape[0] = out;
    shape[1] = in;
    net->w[i] = mixp_param(net->ctx, weights[i], MIXP_F32, 2, shape);
    net->b[i] = mixp_param(net->ctx, biases[i], MIXP_F32, 1, shape);
    mixp_init_normal(net->w[i], 0, 0.1);
    mixp_fill(net->b[i], 0);
    mixp_optimizer_add(net->opt, net->w[i], NULL);
    mixp_optimizer_add(net->opt, net->b[i], NULL);
}

static void small_net_init(small_net *net, int threads, int64_t width, int64_t batch) {
    mixp_optimizer_desc adamw = mixp_adamw_defaults();
    mixp_context_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.threads = threads;
    desc.seed = 1;
    net->ctx = mixp_context_new(&desc);
    net->opt = mixp_optimizer_new(net->ctx, &adamw);
    net->scaler = mixp_scaler_new(net->ctx, NULL);
    net->batch = batch;
    small_net_layer(net, 0, SMALL_NET_IN, width);
    small_net_layer(net, 1, width, width);
    small_net_layer(net, 2, width, SMALL_NET_OUT);
    net->x = (float *)malloc((size_t)(batch * SMALL_NET_IN) * sizeof *net->x);
    for (int64_t i = 0; i < batch * SMALL_NET_IN; i++) net->x[i] = (float)(i * 7 % 17 - 8) / 8;
}

static void small_net_step(small_net *net) {
    mixp_context *ctx = net->ctx;
    mixp_tensor *h, *loss = NULL;
    int64_t shape[2];
    shape[0] = net->batch;
    shape[1] = SMALL_NET_IN;
    mixp_step_begin(ctx);
    mixp_zero_grad(net->opt);
    MIXP_AUTOCAST(ctx, MIXP_F16) {
        h = mixp_input(ctx, MIXP_F32, 2, shape, net->x);
        for (int i = 0; i < SMALL_NET_LAYERS; i++) {
            h = mixp_linear(ctx, h, net->w[i], net->b[i]);
            if (i + 1 < SMALL_NET_LAYERS) h = mixp_relu(ctx, h);
        }
        loss = mixp_mean(ctx, mixp_mul(ctx, h, h), MIXP_ALL, 0);
    }
    mixp_backward(ctx, mixp_scaler_scale(net->scaler, loss));
    mixp_scaler_step(net->scaler, net->opt);
    mixp_scaler_update(net->scaler);
    net->loss = (float)mixp_item(loss);
}

static void small_net_free(small_net *net) {
    mixp_context_free(net->ctx);
    free(net->x);
}
#endif
