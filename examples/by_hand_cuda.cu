/* by_hand_cuda.cu - a training loop in CUDA with kernels of its own: loss scaling, an overflow check,
 * clipping and AdamW on f32 master weights are mixprec's. Weights and gradients are fp16.
 * SPDX-License-Identifier: MIT OR Unlicense
 *   nvcc -O2 -std=c++17 -arch=native examples/by_hand_cuda.cu mixprec_cuda.cu -I. -lcublasLt && ./a.out
 * y = x W' is learned. After the first step, which allocates, a graph is recorded and replayed. */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include <stdio.h>
#ifdef MIXPREC_CUDASIM          /* the tests' simulated GPU, which knows no <<< >>> */
#  include "cudasim.h"
#  define LAUNCH(kernel, blocks, stream, ...) \
       cudasim::launch(kernel, blocks, 256, 0, stream, __VA_ARGS__)
#else
#  include <cuda_runtime.h>
#  define LAUNCH(kernel, blocks, stream, ...) kernel<<<blocks, 256, 0, stream>>>(__VA_ARGS__)
#endif

enum { ROWS = 64, IN = 16, OUT = 8, STEPS = 100 };

struct arrays { mixp_f16 *w, *grad; float *x, *y, *slope, *error; };    /* all on the GPU */

/* The scale is read where it lies, so that nobody waits for it. */
static __global__ void forward(arrays a, const float *scale) {
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x), row = i / OUT, out = i % OUT;
    if (i >= ROWS * OUT) return;
    float sum = 0.0f;
    for (int k = 0; k < IN; k++) sum += a.x[row * IN + k] * mixp_f32_from_f16(a.w[out * IN + k]);
    a.error[i] = sum - a.y[i];
    a.slope[i] = *scale * 2.0f * a.error[i] / (ROWS * OUT);
}

static __global__ void backward(arrays a) {
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x), out = i / IN, k = i % IN;
    if (i >= OUT * IN) return;
    float sum = 0.0f;
    for (int row = 0; row < ROWS; row++) sum += a.slope[row * OUT + out] * a.x[row * IN + k];
    a.grad[i] = mixp_f16_from_f32(sum);
}

static void step(mixp_context *ctx, mixp_scaler *scaler, mixp_optimizer *opt, arrays a) {
    cudaStream_t stream = (cudaStream_t)mixp_context_exec(ctx)->stream; /* another one in a capture */
    LAUNCH(forward, (ROWS * OUT + 255) / 256, stream, a, mixp_scaler_loss_scale_data(scaler));
    LAUNCH(backward, (OUT * IN + 255) / 256, stream, a);
    mixp_scaler_step(scaler, opt);
    mixp_scaler_update(scaler);
}

template <class T> static T *on_gpu(const T *from, int count) {
    T *p = NULL;
    if (cudaMalloc((void **)&p, sizeof(T) * (size_t)count) != cudaSuccess) return NULL;
    return cudaMemcpy(p, from, sizeof(T) * (size_t)count, cudaMemcpyHostToDevice) ? NULL : p;
}

static arrays make_arrays(void) {
    static mixp_f16 w[OUT * IN], grad[OUT * IN];
    static float    x[ROWS * IN], y[ROWS * OUT], none[ROWS * OUT];
    unsigned        r = 1;
    for (int i = 0; i < ROWS * IN; i++)
        x[i] = (float)((r = r * 1664525u + 1013904223u) >> 8) / 8388608.0f - 1.0f;
    for (int i = 0; i < ROWS * OUT; i++)
        for (int k = 0; k < IN; k++) y[i] += x[i / OUT * IN + k] * (float)((k + i % OUT) % 5 - 2);
    return { on_gpu(w, OUT * IN), on_gpu(grad, OUT * IN), on_gpu(x, ROWS * IN), on_gpu(y, ROWS * OUT),
             on_gpu(none, ROWS * OUT), on_gpu(none, ROWS * OUT) };
}

int main(void) {
    const int64_t     shape[2] = { OUT, IN };
    const char       *why = "";
    mixp_context_desc desc = {};
    desc.device = mixp_cuda(0, &why);
    if (!desc.device) { printf("no GPU: %s\n", why); return 77; }
    mixp_context     *ctx = mixp_context_new(&desc);
    mixp_scaler      *scaler = mixp_scaler_new(ctx, NULL);
    mixp_optimizer_desc adamw = mixp_adamw_defaults();
    adamw.lr = 0.1;
    adamw.max_norm = 10.0;
    adamw.weight_decay = 0.0;
    mixp_optimizer   *opt = mixp_optimizer_new(ctx, &adamw);
    arrays            a = make_arrays();
    mixp_optimizer_add(opt, mixp_view_f16(ctx, "w", 2, shape, a.w),
                       mixp_view_f16(ctx, "w.grad", 2, shape, a.grad));
    step(ctx, scaler, opt, a);
    mixp_capture_begin(ctx);
    step(ctx, scaler, opt, a);
    mixp_graph *graph = mixp_capture_end(ctx);
    for (int i = 1; i < STEPS; i++) mixp_replay(graph);

    static float error[ROWS * OUT];
    double       loss = 0.0;
    cudaDeviceSynchronize();
    cudaMemcpy(error, a.error, sizeof error, cudaMemcpyDeviceToHost);
    for (float e : error) loss += (double)e * e / (ROWS * OUT);
    mixp_verdict v = mixp_scaler_verdict(scaler);
    printf("loss %.1e after %lld steps, %lld skipped, scale %g\n", loss, (long long)v.applied,
           (long long)v.skipped, (double)v.scale);
    if (mixp_context_error(ctx, &why)) { printf("%s\n", why); return 1; }
    mixp_context_free(ctx);
    float *rest[4] = { a.x, a.y, a.slope, a.error };
    for (float *p : rest) cudaFree(p);
    cudaFree(a.w);
    cudaFree(a.grad);
    return !(loss < 1e-3 && v.applied + v.skipped == STEPS && v.applied > STEPS - 20);
}
