// conv.cpp - a convolution forward and back, behind plain functions for conv.py.
// SPDX-License-Identifier: MIT OR Unlicense
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include "../../examples/conv.h"
#include <chrono>

struct layer {
    mixp_context *ctx;
    mixp_tensor  *x, *w;
    conv_desc     desc;
};

extern "C" {

// Images of `size` x `size`, `in` and `out` channels, a kernel of 3 with padding 1; the numbers given.
layer *layer_new(int threads, int64_t batch, int64_t in, int64_t out, int64_t size, int stride, const float *x,
                 const float *w) {
    const int64_t sx[4] = { batch, in, size, size }, sw[4] = { out, in, 3, 3 };
    layer *l = new layer();
    mixp_context_desc desc = mixp_context_desc();
    desc.threads = threads;
    l->ctx = mixp_context_new(&desc);
    l->x = mixp_param(l->ctx, "x", MIXP_F32, 4, sx);
    l->w = mixp_param(l->ctx, "w", MIXP_F32, 4, sw);
    mixp_write(l->x, x, MIXP_F32, l->x->count);
    mixp_write(l->w, w, MIXP_F32, l->w->count);
    l->desc.stride[0] = l->desc.stride[1] = stride;
    l->desc.padding[0] = l->desc.padding[1] = 1;
    return l;
}

static mixp_tensor *step(layer *l) {
    mixp_step_begin(l->ctx);
    l->x->grad = l->w->grad = NULL;
    mixp_tensor *y = conv2d(l->ctx, l->x, l->w, NULL, &l->desc);
    mixp_backward(l->ctx, mixp_mean(l->ctx, y, MIXP_ALL, 0));
    return y;
}

// Seconds of one forward and backward, of `count` in a row.
double layer_steps(layer *l, int count) {
    using clock = std::chrono::steady_clock;
    auto start = clock::now();
    for (int i = 0; i < count; i++) step(l);
    return std::chrono::duration<double>(clock::now() - start).count() / count;
}

// The sum of the result, to see that both compute the same; NaN on an error.
double layer_sum(layer *l) {
    mixp_step_begin(l->ctx);
    return mixp_item(mixp_sum(l->ctx, conv2d(l->ctx, l->x, l->w, NULL, &l->desc), MIXP_ALL, 0));
}

}
