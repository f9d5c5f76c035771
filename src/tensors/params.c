#pragma once
#include "tensors.c"
/* --- parameters ------------------------------------------------------------------------ */

/* Does text[0..n) fit the pattern? * matches any characters, ? matches one. */
static int mixpi_pattern_fits(const char *pattern, const char *text, size_t n) {
    const char *star = NULL;
    size_t at = 0, retry = 0;
    while (at < n) {
        if (*pattern == '*') {
            star = pattern++;
            retry = at;
        } else if (*pattern == '?' || *pattern == text[at]) {
            pattern++;
            at++;
        } else if (star) { /* the last star matches one more character */
            pattern = star + 1;
            at = ++retry;
        } else return 0;
    }
    while (*pattern == '*') pattern++;
    return !*pattern;
}

/* FNV-1a, applied to words of 8 bytes and then to the remaining bytes. */
static uint64_t mixpi_hash(uint64_t h, const void *data, size_t bytes) {
    const unsigned char *p = (const unsigned char *)data;
    for (; bytes >= 8; bytes -= 8, p += 8) {
        uint64_t word;
        memcpy(&word, p, 8);
        h = (h ^ word) * 1099511628211u;
        h ^= h >> 29;
    }
    for (; bytes; bytes--, p++) h = (h ^ *p) * 1099511628211u;
    return h;
}

/* The place of a name in the table: its tensor, or the first free place behind its hash. At least
 * half of the places are free. */
static mixp_tensor **mixpi_name_place(const mixpi_params *p, const char *name) {
    const uint64_t last = 2 * (uint64_t)p->room - 1;
    const uint64_t h = mixpi_hash(1469598103934665603u, name, strlen(name));
    uint64_t at = (h ^ h >> 32) & last;
    while (p->named[at] && strcmp(p->named[at]->name, name) != 0) at = (at + 1) & last;
    return &p->named[at];
}

/* The tensor becomes the last of these. There is room for it. */
static void mixpi_params_add(mixpi_params *p, mixp_tensor *t) {
    p->made[p->count++] = t;
    if (*t->name) *mixpi_name_place(p, t->name) = t;
}

/* Makes room for one more tensor. Both arrays are one piece of memory, which doubles. */
static mixp_result mixpi_params_grow(mixp_context *ctx, mixpi_params *p) {
    mixpi_params old = *p, grown = { NULL, NULL, 0, 0 };
    if (old.count < old.room) return MIXP_OK;
    grown.room = old.room ? 2 * old.room : 16;
    grown.made = (mixp_tensor **)mixpi_owner_new(ctx, 3 * (size_t)grown.room * sizeof *grown.made);
    if (!grown.made) return MIXP_ERR_MEMORY;
    grown.named = grown.made + grown.room;
    for (int64_t i = 0; i < old.count; i++) mixpi_params_add(&grown, old.made[i]);
    *p = grown;
    if (old.made) mixpi_owned_free(ctx, old.made);
    return MIXP_OK;
}

static mixp_tensor *mixpi_params_find(const mixpi_params *p, const char *name) {
    return name && *name && p->room ? *mixpi_name_place(p, name) : NULL;
}

/* Finds no parameter or buffer without a name. */
MIXPREC_API mixp_tensor *mixp_context_find(const mixp_context *ctx, const char *name) {
    mixp_tensor *t = ctx ? mixpi_params_find(&ctx->params, name) : NULL;
    return t || !ctx ? t : mixpi_params_find(&ctx->buffers.all, name);
}

MIXPREC_API mixp_tensor *mixp_context_param(const mixp_context *ctx, int64_t i) {
    return ctx && i >= 0 && i < ctx->params.count ? ctx->params.made[i] : NULL;
}

/* The oldest parameter, from number *i on, whose name matches the pattern. Sets *i to the next
 * number. Returns NULL if no further parameter matches. */
static mixp_tensor *mixpi_param_next(const mixp_context *ctx, const char *pattern, int64_t *i) {
    mixp_tensor *t;
    while ((t = mixp_context_param(ctx, (*i)++)) != NULL)
        if (mixpi_pattern_fits(pattern, t->name, strlen(t->name))) return t;
    return NULL;
}

/* Fails because no parameter's name fits: shows the first name as an example. */
static mixp_result mixpi_fits_none(mixp_context *ctx, const char *who, const char *pattern) {
    const mixp_tensor *first = mixp_context_param(ctx, 0);
    if (!first)
        return mixp_context_fail(ctx, MIXP_ERR_ARGUMENT,
            "%s: the context has no parameters; make them with mixp_param first", who);
    return mixp_context_fail(ctx, MIXP_ERR_ARGUMENT,
        "%s: no parameter's name fits '%s'; the context has %.0f parameters, the first is '%s'",
        who, pattern, (double)ctx->params.count, first->name);
}

MIXPREC_API mixp_result mixp_init_all(mixp_context *ctx, const char *pattern,
    mixp_result (*init)(mixp_tensor *, double), double value) {
    mixp_result r = MIXP_OK;
    mixp_tensor *t;
    int64_t i = 0;
    int found = 0;
    if (!ctx || !pattern || !init)
        return mixp_context_fail(ctx, MIXP_ERR_ARGUMENT,
            "mixp_init_all: the context, the pattern or the function is NULL");
    while (r == MIXP_OK && (t = mixpi_param_next(ctx, pattern, &i)) != NULL) {
        r = init(t, value);
        found = 1;
    }
    return found ? r : mixpi_fits_none(ctx, "mixp_init_all", pattern);
}

MIXPREC_API mixp_result mixp_freeze_all(mixp_context *ctx, const char *pattern, int on) {
    mixp_tensor *t;
    int64_t i = 0;
    int found = 0;
    if (!ctx || !pattern)
        return mixp_context_fail(
            ctx, MIXP_ERR_ARGUMENT, "mixp_freeze_all: the context or the pattern is NULL");
    for (; (t = mixpi_param_next(ctx, pattern, &i)) != NULL; found = 1)
        mixp_tensor_set_requires_grad(t, !on);
    return found ? MIXP_OK : mixpi_fits_none(ctx, "mixp_freeze_all", pattern);
}

/* Reports a name that another parameter or buffer has. */
static int mixpi_name_is_taken(mixp_context *ctx, const char *who, const char *name) {
    if (!mixp_context_find(ctx, name)) return 0;
    mixp_context_fail(ctx, MIXP_ERR_ARGUMENT,
        "%s '%s': this name is taken; create each parameter and buffer once, before the loop, with "
        "its own name",
        who, name);
    return 1;
}

MIXPREC_API mixp_tensor *mixp_param(
    mixp_context *ctx, const char *name, mixp_dtype dtype, int rank, const int64_t *shape) {
    if (!mixpi_is_real(dtype)) {
        mixp_context_fail(ctx, MIXP_ERR_DTYPE,
            "mixp_param '%s': a parameter must be f32, f16 or bf16, not %s", name ? name : "",
            mixp_dtype_name(dtype));
        return NULL;
    }
    if (!ctx || mixpi_name_is_taken(ctx, "mixp_param", name)) return NULL;
    if (mixpi_check_made(ctx, "mixp_param", name) != MIXP_OK) return NULL;
    if (mixpi_params_grow(ctx, &ctx->params) != MIXP_OK) return NULL;
    mixp_tensor *t = mixpi_tensor_new(ctx, name, dtype, rank, shape, 1, 1);
    if (!t) return NULL;
    t->requires_grad = t->own.is_param = 1;
    mixpi_params_add(&ctx->params, t);
    return t;
}

MIXPREC_API mixp_tensor *mixp_param_named(
    mixp_context *ctx, mixp_dtype dtype, int rank, const int64_t *shape, const char *format, ...) {
    char name[256];
    va_list args;
    int n = -1;
    if (format) {
        va_start(args, format);
        n = vsnprintf(name, sizeof name, format, args);
        va_end(args);
    }
    if (n >= 0 && n < (int)sizeof name) return mixp_param(ctx, name, dtype, rank, shape);
    mixp_context_fail(ctx, MIXP_ERR_ARGUMENT, "mixp_param_named: %s",
        format ? "the name has more than 255 bytes" : "the format is NULL");
    return NULL;
}
