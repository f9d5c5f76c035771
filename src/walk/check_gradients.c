#pragma once
#include "../tape.h"
#include "../tensors/errors.c"
#include "../tensors/memory.c"
/* --- checking gradients ---------------------------------------------------------------- */

/* The loss with t's element i set to x. */
static double mixpi_loss_at(mixp_context *ctx, mixpi_tensor_fn fn, void *user, mixp_tensor *t,
    float *value, int64_t i, float x) {
    value[i] = x;
    mixp_write(t, value, MIXP_F32, t->count);
    mixp_step_begin(ctx);
    const double loss = mixp_item(fn(ctx, user));
    (void)mixpi_float_calm(); /* a step that fn began itself may have let exceptions trap again */
    return loss;
}

/* Raises *worst to the largest relative deviation over one input. memory: 2 t->count floats, for
 * the gradient and the values. */
static mixp_result mixpi_check_input_gradient(mixp_context *ctx, mixpi_tensor_fn fn, void *user,
    mixp_tensor *t, double eps, float *memory, double *worst) {
    float *analytic = memory, *value = memory + t->count;
    mixp_result r = mixp_read(t, value, MIXP_F32, t->count);
    int64_t i;
    memset(analytic, 0, (size_t)t->count * sizeof(float));
    if (r == MIXP_OK && t->grad) r = mixp_read(t->grad, analytic, MIXP_F32, t->count);

    /* One element at a time goes up and down. */
    for (i = 0; i < t->count && r == MIXP_OK; i++) {
        float old = value[i], up = (float)((double)old + eps), down = (float)((double)old - eps);
        double above = mixpi_loss_at(ctx, fn, user, t, value, i, up), numeric, off;
        double below = mixpi_loss_at(ctx, fn, user, t, value, i, down);
        value[i] = old;
        r = mixp_write(t, value, MIXP_F32, t->count);
        numeric = (above - below) / ((double)up - (double)down);
        off = fabs((double)analytic[i] - numeric) / (fabs(numeric) > 1.0 ? fabs(numeric) : 1.0);
        if (mixpi_f64_is_finite(*worst) && !(off <= *worst)) *worst = off; /* a NaN stays */
    }

    t->grad = NULL;
    return r;
}

/* Runs the function once and walks back. Fails if differences of eps could not show the gradients:
 * with dropout, or under autocast. */
static mixp_result mixpi_check_walk(mixp_context *ctx, mixpi_tensor_fn fn, void *user) {
    const int64_t regions = ctx->low_copies.regions;
    const mixp_dtype around = mixp_autocast_current(ctx).dtype;
    MIXPI_TRY(mixp_step_begin(ctx));
    mixp_tensor *loss = fn(ctx, user);
    if (ctx->tape.drawn)
        return mixp_context_fail(ctx, MIXP_ERR_ORDER,
            "mixp_check_gradients: fn uses dropout, which draws other random numbers in each run; "
            "pass training 0 to mixp_dropout, and set attention's dropout to 0");
    if (ctx->low_copies.regions != regions || around != MIXP_F32)
        return mixp_context_fail(ctx, MIXP_ERR_ORDER,
            "mixp_check_gradients: fn runs under autocast, whose rounding errors exceed the effect "
            "of eps; check it in f32");
    return mixp_backward(ctx, loss);
}

/* Can all inputs be checked? *most: elements of the largest input. */
static mixp_result mixpi_check_inputs(
    mixp_context *ctx, int n, mixp_tensor *const *inputs, int64_t *most) {
    int i;
    *most = 0;
    for (i = 0; i < n; i++) {
        const mixp_tensor *t = inputs[i];
        if (!mixpi_is_tensor(t) || t->dtype != MIXP_F32 || t->own.generation)
            return mixp_context_fail(ctx, MIXP_ERR_DTYPE,
                "mixp_check_gradients: input %d must be a permanent f32 tensor (mixp_param or "
                "mixp_view)",
                i);
        if (t->ctx != ctx)
            return mixp_context_fail(ctx, MIXP_ERR_ARGUMENT,
                "mixp_check_gradients: input %d belongs to another context", i);
        if (t->count > *most) *most = t->count;
    }
    return MIXP_OK;
}

MIXPI_SELDOM
static mixp_result mixpi_do_check_gradients(mixp_context *ctx, mixpi_tensor_fn fn, void *user,
    int n_inputs, mixp_tensor *const *inputs, double eps, double *worst) {
    int64_t most;
    int i;
    if (!ctx || !fn || !inputs || !worst || n_inputs < 1) return MIXP_ERR_ARGUMENT;
    MIXPI_TRY(mixpi_check_inputs(ctx, n_inputs, inputs, &most));
    float *memory = (float *)mixpi_host_take(ctx, (size_t)(2 * most) * sizeof(float));
    if (!memory) return mixpi_out_of_memory(ctx, (size_t)(2 * most) * sizeof(float));

    /* The gradients that the walk computes. */
    for (i = 0; i < n_inputs; i++) inputs[i]->grad = NULL;
    mixp_result r = mixpi_check_walk(ctx, fn, user);

    /* Beside differences of the loss. */
    *worst = 0.0;
    if (eps <= 0.0) eps = 1e-3;
    for (i = 0; i < n_inputs && r == MIXP_OK; i++)
        r = mixpi_check_input_gradient(ctx, fn, user, inputs[i], eps, memory, worst);

    mixpi_host_free(ctx, memory);
    return r == MIXP_OK ? mixp_context_error(ctx, NULL) : r;
}

MIXPI_SELDOM
MIXPREC_API mixp_result mixp_check_gradients(mixp_context *ctx, mixpi_tensor_fn fn, void *user,
    int n_inputs, mixp_tensor *const *inputs, double eps, double *worst) {
    MIXPI_RETURN_INSIDE(ctx, mixpi_do_check_gradients(ctx, fn, user, n_inputs, inputs, eps, worst));
}
