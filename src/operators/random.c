#pragma once
#include "shared.c"
/* --- tensors of one number, and of random numbers ----------------------------------------- */

MIXPREC_API mixp_tensor *mixp_full(
    mixp_context *ctx, mixp_dtype dtype, int rank, const int64_t *shape, double value) {
    mixp_tensor *t = mixpi_tensor_new(ctx, "mixp_full", dtype, rank, shape, 0, 1);
    if (t && mixpi_overflows(dtype, value)) {
        mixp_context_fail(ctx, MIXP_ERR_ARGUMENT,
            "mixp_full: %g is beyond the range of %s, whose largest number is %g; use a number in "
            "that range, or another dtype",
            value, mixp_dtype_name(dtype), mixpi_largest(dtype));
        return NULL;
    }
    if (t) mixpi_note_written(t, value);
    if (!t || mixpi_fill_with(ctx, mixpi_tensor_out(t, 0), t->count, value) != MIXP_OK) return NULL;
    return t;
}

/* Tests the bits: neither Inf nor NaN. */
static int mixpi_is_finite(float x) { return mixp_bits_of_f32(x) << 1 < 0xFF000000u; }

/* A tensor of this step with the numbers of k, whose dtype is k's. */
static mixp_tensor *mixpi_random(
    mixp_context *ctx, const char *who, mixp_random_args *k, int rank, const int64_t *shape) {
    if (ctx && !mixpi_is_real(k->y.dtype)) {
        mixp_context_fail(ctx, MIXP_ERR_DTYPE, "%s: the dtype is %s; it must be f32, f16 or bf16",
            who, mixp_dtype_name(k->y.dtype));
        return NULL;
    }
    mixp_tensor *t = mixpi_tensor_new(ctx, who, k->y.dtype, rank, shape, 0, 1);
    if (!t) return NULL;
    k->n = t->count;
    k->seed = ctx->seed;
    k->step = mixpi_random_step(ctx);
    k->tensor = (uint64_t)ctx->tape.drawn++;
    k->y = mixpi_tensor_out(t, 0);
    return MIXPI_STEP_RUN(t, random, k) == MIXP_OK ? t : NULL;
}

static mixp_random_args mixpi_random_of(
    mixp_random_kind kind, mixp_dtype dtype, float at, float by) {
    mixp_random_args k = MIXPI_ZERO;
    k.kind = kind;
    k.at = at;
    k.by = by;
    k.y.dtype = dtype;
    return k;
}

MIXPREC_API mixp_tensor *mixp_uniform(
    mixp_context *ctx, mixp_dtype dtype, int rank, const int64_t *shape, float low, float high) {
    const int finite = mixpi_is_finite(low) && mixpi_is_finite(high);
    const double by = finite ? (double)high - (double)low : -1.0;
    const double most = finite && -low > high ? -(double)low : (double)high;
    if (by >= 0.0 && !mixpi_overflows(MIXP_F32, by) &&
        !(mixpi_is_real(dtype) && mixpi_overflows(dtype, most))) {
        mixp_random_args k = mixpi_random_of(MIXP_RANDOM_UNIFORM, dtype, low, high - low);
        return mixpi_random(ctx, "mixp_uniform", &k, rank, shape);
    }
    mixp_context_fail(ctx, MIXP_ERR_ARGUMENT,
        "mixp_uniform: low is %g and high is %g; both and their difference must be finite and in "
        "the range of %s, and low must not be above high",
        (double)low, (double)high, mixp_dtype_name(dtype));
    return NULL;
}

MIXPREC_API mixp_tensor *mixp_normal(
    mixp_context *ctx, mixp_dtype dtype, int rank, const int64_t *shape, float mean, float std) {
    mixp_random_args k = mixpi_random_of(MIXP_RANDOM_NORMAL, dtype, mean, std);
    if (mixpi_is_finite(mean) && mixpi_is_finite(std) && std >= 0.0f)
        return mixpi_random(ctx, "mixp_normal", &k, rank, shape);
    mixp_context_fail(ctx, MIXP_ERR_ARGUMENT,
        "mixp_normal: mean is %g and std is %g; both must be finite, and std at least 0",
        (double)mean, (double)std);
    return NULL;
}

MIXPREC_API mixp_tensor *mixp_bernoulli(
    mixp_context *ctx, mixp_dtype dtype, int rank, const int64_t *shape, float p) {
    mixp_random_args k = mixpi_random_of(MIXP_RANDOM_BERNOULLI, dtype, p, 0.0f);
    if (!mixpi_is_finite(p) || p < 0.0f || p > 1.0f) {
        mixp_context_fail(
            ctx, MIXP_ERR_ARGUMENT, "mixp_bernoulli: p is %g; it must be in [0, 1]", (double)p);
        return NULL;
    }
    if (dtype != MIXP_U8) return mixpi_random(ctx, "mixp_bernoulli", &k, rank, shape);

    /* A mask is drawn in bf16, which has 0 and 1, and converted. */
    k.y.dtype = MIXP_BF16;
    mixp_tensor *t = mixpi_random(ctx, "mixp_bernoulli", &k, rank, shape);
    mixp_tensor *mask = t ? mixp_activation(ctx, MIXP_U8, rank, shape) : NULL;
    if (!mask ||
        mixpi_convert_to(ctx, mixpi_tensor_out(mask, 0), mixpi_tensor_in(t), t->count) != MIXP_OK)
        return NULL;
    mixpi_arena_free(ctx, &ctx->memory.dev, t->data, mixpi_bytes(t));
    t->data = NULL;
    return mask;
}
