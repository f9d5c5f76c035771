/* args.h - the arguments of a kernel in one call, for tests and benches.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 *     table->fill(&x, args_fill(y, n, 1.0))
 *
 * Each function fills a struct of its own, which lives until its next call.
 */
#ifndef ARGS_H
#define ARGS_H
#include "mixprec.h"

static inline mixp_in args_in(mixp_array a) {
    mixp_in in = { a.data, a.dtype };
    return in;
}
static inline mixp_out args_out(mixp_array a, int accumulate) {
    mixp_out out = { a.data, a.dtype, accumulate };
    return out;
}

static inline const mixp_convert_args *args_convert(mixp_array dst, mixp_array src, int64_t n,
                                                    const mixp_rounding *rounding) {
    static mixp_convert_args k;
    memset((void *)&k, 0, sizeof k);
    k.n = n;
    k.src = args_in(src);
    k.dst = args_out(dst, 0);
    if (rounding) k.rounding = *rounding;
    return &k;
}

static inline const mixp_fill_args *args_fill(mixp_array dst, int64_t n, double value) {
    static mixp_fill_args k;
    memset((void *)&k, 0, sizeof k);
    k.n = n;
    k.value = value;
    k.dst = args_out(dst, 0);
    return &k;
}

/* Shape or strides; nothing of a rank that no kernel takes. */
static inline void args_axes(int64_t *to, const int64_t *from, int rank) {
    int i;
    for (i = 0; rank <= MIXP_MAX_RANK && i < rank; i++) to[i] = from[i];
}

static inline const mixp_copy_args *args_copy(int rank, const int64_t *shape, mixp_array dst,
        const int64_t *dst_strides, mixp_array src, const int64_t *src_strides, int accumulate) {
    static mixp_copy_args k;
    memset((void *)&k, 0, sizeof k);
    k.rank = rank;
    args_axes(k.shape, shape, rank);
    k.src = args_in(src);
    args_axes(k.src_strides, src_strides, rank);
    k.dst = args_out(dst, accumulate);
    args_axes(k.dst_strides, dst_strides, rank);
    return &k;
}
#endif
