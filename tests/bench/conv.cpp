// conv.cpp - a convolution forward and back, behind plain functions for conv.py.
// SPDX-License-Identifier: MIT OR Unlicense
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include "../../examples/conv.h"
#include <ctime>

struct layer {
    mixp_context *ctx;
    mixp_tensor  *x, *w, *mean;
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

void layer_forward(layer *l) {
    mixp_step_begin(l->ctx);
    l->x->grad = l->w->grad = NULL;
    l->mean = mixp_mean(l->ctx, conv2d(l->ctx, l->x, l->w, NULL, &l->desc), MIXP_ALL, 0);
}
void layer_backward(layer *l) { mixp_backward(l->ctx, l->mean); }

// Runs a loop's tasks one after another, and adds up what two threads would save: each task goes to the thread that is
// done first.
static double saved;
static double busy() {          // seconds of the processor for this thread
    timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}
static void in_turn(void *, int64_t tasks, mixp_task task, void *arg) {
    double thread[2] = { 0, 0 };
    for (int64_t i = 0; i < tasks; i++) {
        double start = busy();
        task(arg, i, 0);
        thread[thread[1] < thread[0]] += busy() - start;
    }
    saved += thread[0] < thread[1] ? thread[0] : thread[1];
}

// How many times as fast as one thread two would be, if both had a core and a loop began at no cost. The fastest of
// `count` steps counts.
double layer_two_threads(layer *l, int count) {
    mixp_exec *x = const_cast<mixp_exec *>(mixp_context_exec(l->ctx));
    auto parallel = x->parallel;
    double least = 1e9, times = 0;
    x->parallel = in_turn;
    for (int i = 0; i < count; i++) {
        saved = 0;
        double start = busy();
        layer_forward(l);
        layer_backward(l);
        double seconds = busy() - start;
        if (seconds < least) times = seconds / (seconds - saved);
        if (seconds < least) least = seconds;
    }
    x->parallel = parallel;
    return times;
}

// The sum of the result, to see that both compute the same; NaN on an error.
double layer_sum(layer *l) {
    mixp_step_begin(l->ctx);
    return mixp_item(mixp_sum(l->ctx, conv2d(l->ctx, l->x, l->w, NULL, &l->desc), MIXP_ALL, 0));
}

}
