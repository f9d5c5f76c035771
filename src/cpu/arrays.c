#pragma once
#include "device.c"
/* --- arrays ---------------------------------------------------------------------------- */

/* Do the arrays overlap in a way that conversion cannot handle? Converting in place is allowed if
 * the elements do not get wider. */
static int mixpi_convert_overlaps(
    const void *to, size_t to_bytes, const void *from, size_t from_bytes) {
    uintptr_t d = (uintptr_t)to, s = (uintptr_t)from;
    if (d == s) return to_bytes > from_bytes;
    return d < s ? s - d < to_bytes : d - s < from_bytes;
}

typedef mixp_result (*mixpi_convert_kernel)(const mixp_exec *, const mixp_convert_args *);

/* The best convert kernel. It is selected without a table of kernels, so that a program that only
 * converts links no other kernel. */
static mixpi_convert_kernel mixpi_convert_best(void) {
#if MIXPI_ARM
    return mixpi_convert_neon;
#elif MIXPI_X86 && MIXPI_LEAST == 2
    return mixpi_convert_avx512;
#elif MIXPI_X86 && MIXPI_LEAST == 1 && defined(MIXPREC_ONLY_FORMATS)
    return mixpi_convert_avx2;
#elif MIXPI_X86 && defined(MIXPREC_ONLY_FORMATS)
    return mixpi_has_avx2() ? mixpi_convert_avx2 : mixpi_convert_scalar;
#elif MIXPI_X86 && MIXPI_LEAST == 1
    return mixpi_has_avx512() ? mixpi_convert_avx512 : mixpi_convert_avx2;
#elif MIXPI_X86
    if (mixpi_has_avx512()) return mixpi_convert_avx512;
    return mixpi_has_avx2() ? mixpi_convert_avx2 : mixpi_convert_scalar;
#else
    return mixpi_convert_scalar;
#endif
}

static mixp_result mixpi_convert_by(mixpi_convert_kernel convert, mixp_out dst, mixp_in src,
    int64_t n, const mixp_rounding *rounding) {
    size_t out = mixp_dtype_size(dst.dtype), in = mixp_dtype_size(src.dtype);
    if (!out || !in) return MIXP_ERR_DTYPE;
    if (n == 0) return MIXP_OK;
    if (n < 0 || !dst.data || !src.data || (uint64_t)n > (size_t)-1 / 8 / 2)
        return MIXP_ERR_ARGUMENT;
    if (mixpi_convert_overlaps(dst.data, (size_t)n * out, src.data, (size_t)n * in))
        return MIXP_ERR_ARGUMENT;

    /* One call of the kernel, on this thread. */
    mixp_exec x = MIXPI_ZERO;
    x.threads = 1;
    mixp_convert_args k = MIXPI_ZERO;
    k.n = n;
    k.src = src;
    k.dst = dst;
    if (rounding) k.rounding = *rounding;
    return convert(&x, &k);
}

MIXPREC_API mixp_result mixp_convert_with(const mixp_device *cpu, void *dst, mixp_dtype to,
    const void *src, mixp_dtype from, int64_t n, const mixp_rounding *rounding) {
    return mixpi_convert_by(cpu ? cpu->kernels->convert : mixpi_convert_best(),
        mixpi_out_to(dst, to, 0), mixpi_in(src, from), n, rounding);
}

MIXPREC_API mixp_result mixp_convert_rounded(void *dst, mixp_dtype to, const void *src,
    mixp_dtype from, int64_t n, const mixp_rounding *rounding) {
    return mixpi_convert_by(
        mixpi_convert_best(), mixpi_out_to(dst, to, 0), mixpi_in(src, from), n, rounding);
}

MIXPREC_API mixp_result mixp_convert(
    void *dst, mixp_dtype to, const void *src, mixp_dtype from, int64_t n) {
    return mixp_convert_rounded(dst, to, src, from, n, NULL);
}
