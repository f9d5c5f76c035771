/* own_function.c - PyTorch's "Autocast and Custom Autograd Functions": an operator that needs f32
 * SPDX-License-Identifier: MIT OR Unlicense
 *   cc -O2 examples/amp/own_function.c -I. -lm && ./a.out */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include "../ops.h"
#include <math.h>
#include <stdio.h>

/* softplus, log(1 + e^x): in fp16 e^x would be Inf from x = 12 on. */
static mixp_result infer(mixp_call *c) { return mixp_call_output(c, MIXP_F32, c->in[0]->rank, c->in[0]->shape); }

static mixp_result forward(mixp_call *c) {                           /* @custom_fwd(cast_inputs=float32) */
    const float *x = (const float *)c->in[0]->data;                  /* f32: the row's class says so     */
    float       *y = (float *)c->out->data;
    for (int64_t i = 0; i < c->out->count; i++) y[i] = logf(1.0f + expf(x[i]));
    return MIXP_OK;
}

static mixp_result backward(mixp_call *c) {                          /* @custom_bwd                      */
    mixp_in  x = mixp_call_x(c, 0), dy = mixp_call_dy(c);
    mixp_out dx = mixp_call_dx(c, 0);                                /* puts add if gradients accumulate */
    if (!dx.data) return MIXP_OK;                                    /* not wanted                       */
    for (int64_t i = 0; i < c->out->count; i++) mixp_put(dx, i, mixp_get(dy, i) / (1.0f + expf(-mixp_get(x, i))));
    return MIXP_OK;
}

static const mixp_op softplus = { "softplus", MIXP_CLASS_ALL_F32, 0, infer, forward, backward, NULL };

static mixp_tensor *w;

static mixp_tensor *model(mixp_context *ctx, void *user) {           /* f32 here, fp16 below             */
    mixp_tensor *h = mixp_scale(ctx, mixp_linear(ctx, w, w, NULL), *(const float *)user);
    return mixp_sum(ctx, mixp_apply(ctx, &softplus, 1, &h, 1, NULL), MIXP_ALL, 0);
}

int main(void) {
    const int64_t shape[2] = { 1, 1 };
    float         factor = 1.0f;
    double        worst = 1.0;
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_tensor  *y = NULL;
    w = mixp_param(ctx, "w", MIXP_F32, 2, shape);
    mixp_fill(w, 4.0);
    mixp_check_gradients(ctx, model, &factor, 1, &w, 0, &worst);
    mixp_step_begin(ctx);
    MIXP_AUTOCAST(ctx, MIXP_F16) y = model(ctx, &factor);            /* h is 16 in fp16; e^16 > 65504    */
    printf("gradient %s, softplus(16) = %.2f in %s\n", worst < 0.02 ? "right" : "wrong", mixp_item(y),
           mixp_dtype_name(y->dtype));
    mixp_context_free(ctx);
    return worst >= 0.02;
}
/* prints:
gradient right, softplus(16) = 16.00 in f32
*/
