/* own_operator.c - your own operator, for CPUs and GPUs, in any mix of dtypes
 * SPDX-License-Identifier: MIT OR Unlicense
 *   cc -O2 examples/own_operator.c -I. -lm && ./a.out
 *   nvcc -O2 -std=c++17 -arch=native -x cu examples/own_operator.c mixprec_cuda.cu -I. -lcublasLt
 *
 * Snake, x + sin(a x)^2 / a (Ziyin, Hartwig and Ueda, 2020), lets a network learn periodic functions.
 * mixp_apply runs it like a built-in operator: autocast, messages and mixp_backward treat it the
 * same way. The program checks its gradient against finite differences; then a small network learns
 * a wave with it, in bf16. */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include "ops.h"
#include <math.h>
#include <stdio.h>

/* --- one element: the same text for the host and for kernels ------------------------------- */

MIXPREC_HD float snake_value(float x, float a) {
    float s = sinf(a * x);
    return x + s * s / a;
}

MIXPREC_HD float snake_slope(float x, float a) { return 1.0f + sinf(2.0f * a * x); }

/* A kernel's arguments, forward (dy.data NULL) or backward. mixp_get and mixp_put handle dtypes,
 * and add if an output accumulates. */
typedef struct snake_job {
    int64_t  n;
    float    a;
    mixp_in  x, dy;
    mixp_out y;
} snake_job;

MIXPREC_HD void snake_element(snake_job k, int64_t i) {
    float x = mixp_get(k.x, i);
    if (k.dy.data) mixp_put(k.y, i, mixp_get(k.dy, i) * snake_slope(x, k.a));
    else mixp_put(k.y, i, snake_value(x, k.a));
}

/* --- the GPU's half -------------------------------------------------------------------------- */

#ifdef __CUDACC__
static __global__ void snake_kernel(snake_job k) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i < k.n; i += (int64_t)gridDim.x * blockDim.x) snake_element(k, i);
}

/* Launches on the context's stream, so the kernel runs in order and is part of a captured step. */
static mixp_result snake_on_gpu(mixp_context *ctx, snake_job k) {
    cudaStream_t stream = (cudaStream_t)mixp_context_exec(ctx)->stream;
    unsigned blocks = (unsigned)(k.n / 256 < 4096 ? k.n / 256 + 1 : 4096);
    snake_kernel<<<blocks, 256, 0, stream>>>(k);
    return cudaPeekAtLastError() == cudaSuccess ? MIXP_OK : MIXP_ERR_DEVICE;
}
#endif

static mixp_result snake_run(mixp_context *ctx, snake_job k) {
    int64_t i;
#ifdef __CUDACC__
    if (mixp_context_device(ctx)->download) return snake_on_gpu(ctx, k);  /* separate device memory */
#endif
    (void)ctx;
    for (i = 0; i < k.n; i++) snake_element(k, i);
    return MIXP_OK;
}

/* --- the operator: a row -------------------------------------------------------------------- */

static mixp_result snake_infer(mixp_call *c) {
    if (!(*(const float *)c->attrs > 0.0f))
        return mixp_context_fail(c->ctx, MIXP_ERR_ARGUMENT, "snake: a must be above 0");
    return mixp_call_output(c, c->in[0]->dtype, c->in[0]->rank, c->in[0]->shape);
}

static snake_job snake_job_of(const mixp_call *c) {
    snake_job k;
    memset((void *)&k, 0, sizeof k);
    k.n = c->out->count;
    k.a = *(const float *)c->attrs;
    k.x = mixp_call_x(c, 0);
    return k;
}

static mixp_result snake_forward(mixp_call *c) {
    snake_job k = snake_job_of(c);
    k.y = mixp_call_y(c);
    return snake_run(c->ctx, k);
}

static mixp_result snake_backward(mixp_call *c) {
    snake_job k = snake_job_of(c);
    k.dy = mixp_call_dy(c);
    k.y = mixp_call_dx(c, 0);
    return k.y.data ? snake_run(c->ctx, k) : MIXP_OK;       /* missing: no gradient needed */
}

static const mixp_op snake_row = { "snake", MIXP_CLASS_KEEP, sizeof(float), snake_infer,
                                   snake_forward, snake_backward, NULL };

static mixp_tensor *snake(mixp_context *ctx, mixp_tensor *x, float a)
{ return mixp_apply(ctx, &snake_row, 1, &x, 1, &a); }

/* --- a program with it ----------------------------------------------------------------------- */

enum { WIDTH = 32, BATCH = 64, STEPS = 400 };

static mixp_tensor *weight[4];          /* w1, b1, w2, b2 */

static mixp_tensor *checked(mixp_context *ctx, void *user) {
    (void)user;
    return mixp_mean(ctx, snake(ctx, weight[0], 2.0f), MIXP_ALL, 0);
}

static mixp_tensor *loss_of(mixp_context *ctx, const float *x, const float *y) {
    int64_t   shape[2] = { BATCH, 1 };
    mixp_tensor *h = mixp_input_f32(ctx, 2, shape, x);
    h = snake(ctx, mixp_linear(ctx, h, weight[0], weight[1]), 2.0f);
    h = mixp_linear(ctx, h, weight[2], weight[3]);
    return mixp_mse(ctx, h, mixp_input_f32(ctx, 2, shape, y));
}

static double train(mixp_context *ctx, mixp_optimizer *opt) {
    double last = 0.0;
    int step, i;
    for (step = 0; step < STEPS; step++) {
        float x[BATCH], y[BATCH];
        mixp_tensor *loss = NULL;
        for (i = 0; i < BATCH; i++) {
            x[i] = (float)((step * 29 + i * 37) % 640) / 160.0f - 2.0f;
            y[i] = sinf(3.0f * x[i]);
        }
        mixp_step_begin(ctx);
        mixp_zero_grad(opt);
        MIXP_AUTOCAST(ctx, MIXP_BF16) { loss = loss_of(ctx, x, y); }
        mixp_backward(ctx, loss);
        mixp_optimizer_step(opt);
        last = mixp_item(loss);
    }
    return last;
}

static mixp_context *context(void) {
    mixp_context_desc desc;
    memset(&desc, 0, sizeof desc);
#ifdef __CUDACC__
    desc.device = mixp_cuda(0, NULL);       /* NULL without a GPU: the CPU          */
#endif
    return mixp_context_new(&desc);
}

int main(void) {
    int64_t w1[2] = { WIDTH, 1 }, w2[2] = { 1, WIDTH }, b1[1] = { WIDTH }, b2[1] = { 1 };
    mixp_context    *ctx   = context();
    mixp_optimizer_desc adamw = mixp_adamw_defaults();
    mixp_optimizer  *opt;
    const char      *why   = "out of memory";
    double           worst = 1.0, last;
    int              i;
    weight[0] = mixp_param(ctx, "w1", MIXP_F32, 2, w1);
    weight[1] = mixp_param(ctx, "b1", MIXP_F32, 1, b1);
    weight[2] = mixp_param(ctx, "w2", MIXP_F32, 2, w2);
    weight[3] = mixp_param(ctx, "b2", MIXP_F32, 1, b2);
    mixp_init_kaiming_normal(weight[0], 1.0);
    mixp_init_kaiming_normal(weight[2], 1.0);
    adamw.lr = 0.02;
    opt = mixp_optimizer_new(ctx, &adamw);
    for (i = 0; i < 4; i++) mixp_optimizer_add(opt, weight[i], NULL);
    mixp_check_gradients(ctx, checked, NULL, 1, weight, 1e-2, &worst);
    last = train(ctx, opt);
    if (mixp_context_error(ctx, &why) != MIXP_OK) {
        fprintf(stderr, "%s\n", why);
        return 1;
    }
    printf("gradients %s; loss after %d steps %s\n", worst < 2e-3 ? "agree with differences"
           : "are wrong", STEPS, last < 0.05 ? "below 0.05" : "too high");
    mixp_context_free(ctx);
    return !(worst < 2e-3 && last < 0.05);
}
