#pragma once
#include "../tensors/buffers.c"
#include "../walk/walk.c"
/* --- cast: the one operator that the tape itself applies ------------------------------- */

static mixp_result mixpi_cast_infer(mixp_call *c) {
    mixp_dtype from = c->in[0]->dtype, to = *(const mixp_dtype *)c->attrs;
    if (!mixpi_is_buffer_dtype(from))
        return mixp_context_fail(c->ctx, MIXP_ERR_DTYPE,
            "cast: input 0 is %s; it must be f32, f64, f16, bf16, u8, i32 or i64",
            mixp_dtype_name(from));
    if (!mixpi_is_real(to))
        return mixp_context_fail(c->ctx, MIXP_ERR_DTYPE,
            "cast: the result must be f32, f16 or bf16, not %s", mixp_dtype_name(to));
    mixpi_call_reads_all(c, 0);
    return mixpi_call_output_fixed(c, to, c->in[0]->rank, c->in[0]->shape);
}

/* A cast whose result a guard may keep in f32: the last operator of a reduction that is made of
 * several operators. */
static mixp_result mixpi_rounding_infer(mixp_call *c) {
    mixpi_call_reads_all(c, 0);
    return mixp_call_output(c, *(const mixp_dtype *)c->attrs, c->in[0]->rank, c->in[0]->shape);
}

/* Converts to the other dtype. Also the forward of reshape. */
static mixp_result mixpi_cast_forward(mixp_call *c) {
    if (c->out->data == c->in[0]->data) return MIXP_OK; /* an alias */
    return mixpi_add_into(
        c->ctx, mixpi_tensor_out(c->out, 0), mixpi_tensor_in(c->in[0]), c->out->count);
}
static mixp_result mixpi_cast_backward(mixp_call *c) {
    int accumulate = 0;
    if (mixpi_call_move_grad(c, 0)) return MIXP_OK;
    mixp_tensor *grad = mixp_call_grad(c, 0, &accumulate);
    if (!grad) return MIXP_OK; /* not wanted */
    return mixpi_add_into(
        c->ctx, mixpi_tensor_out(grad, accumulate), mixpi_tensor_in(c->out->grad), c->out->count);
}

static const mixp_op mixpi_cast_op = {
    "cast", MIXP_CLASS_KEEP, sizeof(mixp_dtype), mixpi_cast_infer, mixpi_cast_forward,
    mixpi_cast_backward, NULL
};

static int mixpi_is_cast(const mixp_op *op) { return op == &mixpi_cast_op; }

static mixp_tensor *mixpi_cast(mixp_context *ctx, mixp_tensor *x, mixp_dtype dtype) {
    return mixp_apply(ctx, &mixpi_cast_op, 1, &x, 1, &dtype);
}
