#pragma once
#include "params.c"
/* --- buffers ------------------------------------------------------------------------------- */

/* Can a buffer, and its entry in a file, have this dtype? */
static int mixpi_is_buffer_dtype(mixp_dtype dtype) {
    return mixpi_is_real(dtype) || dtype == MIXP_F64 || dtype == MIXP_I32 || dtype == MIXP_I64 ||
           dtype == MIXP_U8;
}

MIXPREC_API mixp_tensor *mixp_buffer(
    mixp_context *ctx, const char *name, mixp_dtype dtype, int rank, const int64_t *shape) {
    if (!ctx) return NULL;
    if (!mixpi_is_buffer_dtype(dtype)) {
        mixp_context_fail(ctx, MIXP_ERR_DTYPE,
            "mixp_buffer '%s': a buffer must be f32, f64, f16, bf16, i32, i64 or u8, not %s",
            name ? name : "", mixp_dtype_name(dtype));
        return NULL;
    }

    if (mixpi_name_is_taken(ctx, "mixp_buffer", name)) return NULL;
    if (mixpi_check_made(ctx, "mixp_buffer", name) != MIXP_OK) return NULL;
    if (mixpi_params_grow(ctx, &ctx->buffers.all) != MIXP_OK) return NULL;

    /* The tensor and its backup point to each other. */
    mixpi_backup *b = (mixpi_backup *)mixpi_host_alloc(ctx, sizeof *b);
    mixp_tensor *t = b ? mixpi_tensor_new(ctx, name, dtype, rank, shape, 1, 1) : NULL;
    if (!t) return NULL;

    b->buffer = t;
    t->own.backup = b;
    mixpi_params_add(&ctx->buffers.all, t);
    return t;
}

/* Returns t's backup; NULL, with the error set, if t is not a buffer. */
static mixpi_backup *mixpi_need_buffer(const mixp_tensor *t, const char *who, mixp_result *r) {
    mixpi_backup *b = NULL;
    *r = mixpi_check_live(t, who);
    if (*r == MIXP_OK) b = mixpi_backup_of(t);
    if (*r == MIXP_OK && !b)
        *r = mixp_context_fail(t->ctx, MIXP_ERR_ARGUMENT,
            "%s: '%.60s' is not a buffer: make it with mixp_buffer", who,
            t->own.generation ? "" : t->name);
    return b;
}

MIXPREC_API mixp_result mixp_buffer_set_ranks(mixp_tensor *buffer, mixp_buffer_ranks ranks) {
    mixp_result r;
    mixpi_backup *b = mixpi_need_buffer(buffer, "mixp_buffer_set_ranks", &r);
    const char *wrong = NULL;
    if (!b) return r;
    if ((unsigned)ranks > MIXP_BUFFER_MEAN) wrong = "ranks is not a mixp_buffer_ranks";
    else if (ranks == MIXP_BUFFER_MEAN && !mixpi_is_real(buffer->dtype))
        wrong = "a mean needs f32, f16 or bf16: use MIXP_BUFFER_RANK_0 or MIXP_BUFFER_OWN";
    if (wrong)
        return mixp_context_fail(buffer->ctx, MIXP_ERR_ARGUMENT,
            "mixp_buffer_set_ranks '%.60s': %s", b->buffer->name, wrong);
    b->ranks = ranks;
    return MIXP_OK;
}

MIXPREC_API mixp_result mixp_buffer_save(mixp_tensor *buffer) {
    mixp_result r;
    mixpi_backup *b = mixpi_need_buffer(buffer, "mixp_buffer_save", &r);
    if (b) r = mixpi_backup_keep(b);
    if (b && r == MIXP_OK) b->computed = buffer->ctx->buffers.window;
    return r;
}

MIXPREC_API mixp_tensor *mixp_context_buffer(const mixp_context *ctx, int64_t i) {
    return ctx && i >= 0 && i < ctx->buffers.all.count ? ctx->buffers.all.made[i] : NULL;
}
