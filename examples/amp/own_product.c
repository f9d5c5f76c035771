/* own_product.c - PyTorch's "Functions with Multiple Inputs or Autocastable Ops": your own product
 * SPDX-License-Identifier: MIT OR Unlicense
 *   cc -O2 examples/amp/own_product.c -I. -lm && ./a.out */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include "../ops.h"
#include <stdio.h>

/* c = op(a) op(b); a and b are n x n. */
static mixp_result product(mixp_call *call, mixp_in a, int trans_a, mixp_in b, int trans_b, mixp_out c) {
    const int64_t  n = call->in[0]->shape[0];
    mixp_gemm_args k = { .m = n, .n = n, .k = n, .batch = 1, .trans_a = trans_a, .trans_b = trans_b, .alpha = 1.0f,
                         .a = a, .b = b, .c = c, .lda = n, .ldb = n, .ldc = n };
    return c.data ? mixp_gemm(call->ctx, &k) : MIXP_OK;              /* no data: not wanted              */
}

static mixp_result infer(mixp_call *c) {                             /* both inputs have one dtype here  */
    return mixp_call_output(c, c->in[0]->dtype, 2, c->in[0]->shape);
}

static mixp_result forward(mixp_call *c) {                           /* @custom_fwd: a.mm(b)             */
    return product(c, mixp_call_x(c, 0), 0, mixp_call_x(c, 1), 0, mixp_call_y(c));
}

static mixp_result backward(mixp_call *c) {                          /* @custom_bwd                      */
    mixp_result r = product(c, mixp_call_dy(c), 0, mixp_call_x(c, 1), 1, mixp_call_dx(c, 0));       /* grad.mm(b.t()) */
    return r ? r : product(c, mixp_call_x(c, 0), 1, mixp_call_dy(c), 0, mixp_call_dx(c, 1));        /* a.t().mm(grad) */
}

static const mixp_op mm = { "mm", MIXP_CLASS_LOW, 0, infer, forward, backward, NULL };

static mixp_tensor *model(mixp_context *ctx, void *inputs) {
    return mixp_mean(ctx, mixp_tanh(ctx, mixp_apply(ctx, &mm, 2, (mixp_tensor **)inputs, 2, NULL)), MIXP_ALL, 0);
}

int main(void) {
    const int64_t shape[2] = { 3, 3 };
    double        worst = 1.0;
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_tensor  *in[2] = { NULL, NULL }, *y = NULL;
    in[0] = mixp_param(ctx, "a", MIXP_F32, 2, shape);
    in[1] = mixp_param(ctx, "b", MIXP_F32, 2, shape);
    for (int i = 0; i < 2; i++) mixp_init_normal(in[i], 0.0, 1.0);
    mixp_check_gradients(ctx, model, in, 2, in, 0, &worst);
    mixp_step_begin(ctx);
    MIXP_AUTOCAST(ctx, MIXP_F16) y = mixp_apply(ctx, &mm, 2, in, 2, NULL);
    printf("gradients %s; the product is %s\n", worst < 0.01 ? "right" : "wrong", mixp_dtype_name(y->dtype));
    mixp_context_free(ctx);
    return 0;
}
/* prints:
gradients right; the product is f16
*/
