#pragma once
#include "../recipe.h"
#include "../cpu/device.c"
/* --- recipes: the quantiser ----------------------------------------------------------------- */

MIXPREC_API const char *mixp_recipe_name(mixp_recipe_kind kind) {
    static const char *const names[] = { "none", "fp8_current", "fp8_delayed", "fp8_block", "mxfp8",
        "nvfp4" };
    MIXPI_STATIC_ASSERT(recipe_names, sizeof names / sizeof names[0] == MIXP_RECIPE_COUNT);
    return (unsigned)kind < MIXP_RECIPE_COUNT ? names[kind] : "?";
}

/* Uses the best instruction set: all are bit-identical. */
MIXPREC_API mixp_result mixp_quantise(
    const mixp_exec *x, const mixp_quantise_args *k, float *decode) {
    mixp_quantise_args own;
    if (!x || !k || !decode) return MIXP_ERR_ARGUMENT;
    own = *k;
    own.decode = decode;
    own.times = NULL;
    const mixpi_float_mode mode = mixpi_float_calm();
    const mixp_result r = mixpi_cpu_portable()->kernels->quantise(x, &own);
    mixpi_float_leave(mode);
    return r;
}

MIXPREC_API mixp_result mixp_hadamard(
    const mixp_exec *x, int64_t rows, int64_t cols, mixp_in a, mixp_bf16 *y) {
    mixp_hadamard_args k;
    k.rows = rows;
    k.cols = cols;
    k.a = a;
    k.y = y;
    return x ? mixpi_cpu_portable()->kernels->hadamard(x, &k) : MIXP_ERR_ARGUMENT;
}
