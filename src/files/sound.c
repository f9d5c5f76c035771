#pragma once
#include "reader.c"
#include "groups.c"
/* --- loaded weights that are not finite ------------------------------------------------------- */

/* How many of n elements are Inf or NaN. */
static int64_t mixpi_bad_elements(const void *data, mixp_dtype dtype, int64_t n) {
    const size_t size = mixp_dtype_size(dtype);
    const mixp_dtype wide = dtype == MIXP_F64 ? MIXP_F64 : MIXP_F32;
    double some[256]; /* of f32 or f64 */
    const float *narrow = (const float *)(const void *)some;
    int64_t at, bad = 0;
    for (at = 0; at < n; at += 256) {
        const int part = (int)mixpi_min(256, n - at);
        mixp_convert(some, wide, (const char *)data + (size_t)at * size, dtype, part);
        for (int i = 0; wide == MIXP_F64 && i < part; i++) bad += !mixpi_f64_is_finite(some[i]);
        for (int i = 0; wide == MIXP_F32 && i < part; i++)
            bad += mixp_bits_of_f32(narrow[i]) << 1 >= 0xFF000000u;
    }
    return bad;
}

/* Does the file have a scale for this fp8 tensor that no parameter uses? "fc.weight_scale_inv" and
 * "fc.scale" go with "fc.weight". */
static const char *mixpi_scale_left(const mixp_safetensors *file, const mixpi_st_item *weight) {
    const char *name = weight->e.name, *dot = strrchr(name, '.');
    const size_t stem = dot ? (size_t)(dot - name) + 1 : strlen(name);
    if (mixp_dtype_size(weight->e.dtype) != 1) return NULL;
    for (size_t i = 0; i < file->n_items; i++) {
        const char *other = file->items[i].e.name;
        if (!file->items[i].wanted && strncmp(other, name, stem) == 0 &&
            strstr(other + stem, "scale"))
            return other;
    }
    return NULL;
}

/* Warns of the first weight that is not finite, or whose scale was ignored. file: with dtypes that
 * may differ from the weights'; NULL: they are the same. */
static void mixpi_warn_of_weights(
    const mixpi_state *s, const mixp_safetensors *file, const char *who) {
    for (size_t i = 0; i < s->n_items && !*s->ctx->errors.warning; i++) {
        const mixpi_state_item *item = &s->items[i];
        const mixp_st_entry *from = item->from ? &item->from->e : &item->e;
        const char *scale = file && item->from ? mixpi_scale_left(file, item->from) : NULL;
        if (!item->weight || item->absent || item->elsewhere) continue;
        if ((file && !item->from) || !item->e.data) continue;

        int64_t bad = mixpi_bad_elements(item->e.data, item->e.dtype, item->weight->count);
        int64_t left = bad ? mixpi_bad_elements(from->data, from->dtype, item->weight->count) : 0;

        /* Warns of the first reason that holds. */
        if (left)
            mixpi_warn(s->ctx,
                "%s: '%.60s' holds %.0f values that are Inf or NaN in the file: use an earlier "
                "checkpoint",
                who, item->e.name, (double)left);
        else if (bad)
            mixpi_warn(s->ctx,
                "%s: %.0f values of '%.60s' became Inf: the file has %s, and the parameter is %s, "
                "whose largest number is %g; %s",
                who, (double)bad, item->e.name, mixp_dtype_name(from->dtype),
                mixp_dtype_name(item->e.dtype), mixpi_largest(item->e.dtype),
                mixpi_largest(item->e.dtype) < 3e38 ? "make it f32 or bf16"
                                                    : "scale these values in the file");
        else if (scale)
            mixpi_warn(s->ctx,
                "%s: '%.60s' is %s in the file, and its scale '%.60s' was ignored: multiply the "
                "weight by its scale after loading",
                who, item->e.name, mixp_dtype_name(from->dtype), scale);
    }
}
