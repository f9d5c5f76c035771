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

static inline mixp_array args_nothing(void) {
    mixp_array a = { NULL, MIXP_F32 };
    return a;
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

static inline const mixp_unary_args *args_unary(mixp_unary op, int64_t n, mixp_array y,
                                                mixp_array a, float p) {
    static mixp_unary_args k;
    memset((void *)&k, 0, sizeof k);
    k.op = op;
    k.p = p;
    k.n = n;
    k.a = args_in(a);
    k.y = args_out(y, 0);
    return &k;
}

static inline const mixp_unary_backward_args *args_unary_backward(mixp_unary op, int64_t n,
        mixp_array da, int accumulate, mixp_array dy, mixp_array a, mixp_array y, float p) {
    static mixp_unary_backward_args k;
    memset((void *)&k, 0, sizeof k);
    k.op = op;
    k.p = p;
    k.n = n;
    k.dy = args_in(dy);
    k.a = args_in(a);
    k.y = args_in(y);
    k.da = args_out(da, accumulate);
    return &k;
}

static inline const mixp_binary_args *args_binary(mixp_binary op, int rank, const int64_t *shape,
        mixp_array y, mixp_array a, const int64_t *a_strides, mixp_array b,
        const int64_t *b_strides) {
    static mixp_binary_args k;
    memset((void *)&k, 0, sizeof k);
    k.op = op;
    k.rank = rank;
    args_axes(k.shape, shape, rank);
    k.a = args_in(a);
    args_axes(k.a_strides, a_strides, rank);
    k.b = args_in(b);
    args_axes(k.b_strides, b_strides, rank);
    k.y = args_out(y, 0);
    return &k;
}

static inline const mixp_binary_args *args_binary_backward(mixp_binary op, int which, int rank,
        const int64_t *shape, mixp_array dx, int accumulate, mixp_array dy, mixp_array a,
        const int64_t *a_strides, mixp_array b, const int64_t *b_strides) {
    static mixp_binary_args k;
    k = *args_binary(op, rank, shape, dx, a, a_strides, b, b_strides);
    k.y = args_out(args_nothing(), 0);
    k.which = which;
    k.dy = args_in(dy);
    k.dx = args_out(dx, accumulate);
    return &k;
}

/* Of reduce_backward too: y is what it writes. */
static inline const mixp_reduce_args *args_reduce(int64_t outer, int64_t n, int64_t inner,
        mixp_array y, int accumulate, mixp_array a, float factor) {
    static mixp_reduce_args k;
    memset((void *)&k, 0, sizeof k);
    k.outer = outer;
    k.n = n;
    k.inner = inner;
    k.factor = factor;
    k.a = args_in(a);
    k.y = args_out(y, accumulate);
    return &k;
}

static inline const mixp_dropout_args *args_dropout(int64_t n, mixp_array y, int accumulate,
        mixp_array a, float p, uint64_t seed, uint64_t step, uint64_t tensor) {
    static mixp_dropout_args k;
    memset((void *)&k, 0, sizeof k);
    k.n = n;
    k.p = p;
    k.seed = seed;
    k.step = step;
    k.tensor = tensor;
    k.a = args_in(a);
    k.y = args_out(y, accumulate);
    return &k;
}

static inline const mixp_scale_by_args *args_scale_by(int64_t n, mixp_array y, int accumulate,
                                                      mixp_array a, const float *factor) {
    static mixp_scale_by_args k;
    memset((void *)&k, 0, sizeof k);
    k.n = n;
    k.factor = factor;
    k.a = args_in(a);
    k.y = args_out(y, accumulate);
    return &k;
}

/* AdamW's description for Adam: the types differ, the fields do not. */
static inline mixp_adam_desc args_adam(const mixp_adamw_desc *a) {
    mixp_adam_desc d = mixp_adam_defaults();
    d.lr = a->lr;
    d.beta1 = a->beta1;
    d.beta2 = a->beta2;
    d.eps = a->eps;
    d.weight_decay = a->weight_decay;
    d.max_norm = a->max_norm;
    d.order = a->order;
    d.no_master = a->no_master;
    d.zero_grad = a->zero_grad;
    d.schedule = a->schedule;
    return d;
}

/* --- the optimizer's kernels ------------------------------------------------------------ */

static inline const mixp_grad_stats_args *args_grad_stats(const mixp_param_row *rows, int64_t count,
        const float *scale, int unscale, mixp_step_state *step, const mixp_step_plan *plan,
        mixp_scaler_state *scaler) {
    static mixp_grad_stats_args k;
    memset((void *)&k, 0, sizeof k);
    k.rows = rows;
    k.count = count;
    k.scale = scale;
    k.unscale = unscale;
    k.step = step;
    k.plan = plan;
    k.scaler = scaler;
    return &k;
}

static inline const mixp_clip_args *args_clip(const mixp_param_row *rows, int64_t count,
                                              double max_norm, mixp_step_state *step) {
    static mixp_clip_args k;
    memset((void *)&k, 0, sizeof k);
    k.rows = rows;
    k.count = count;
    k.max_norm = max_norm;
    k.step = step;
    return &k;
}

static inline const mixp_prepare_args *args_prepare(const mixp_step_plan *plan,
                                                    mixp_step_state *step,
                                                    mixp_scaler_state *scaler) {
    static mixp_prepare_args k;
    memset((void *)&k, 0, sizeof k);
    k.plan = plan;
    k.step = step;
    k.scaler = scaler;
    return &k;
}

static inline const mixp_update_args *args_update(const mixp_step_plan *plan,
                                                  const mixp_param_row *rows, int64_t count,
                                                  const mixp_step_state *step) {
    static mixp_update_args k;
    memset((void *)&k, 0, sizeof k);
    k.plan = plan;
    k.rows = rows;
    k.count = count;
    k.step = step;
    return &k;
}

static inline const mixp_advance_args *args_advance(const mixp_scaler_rule *rule,
                                                    mixp_scaler_state *scaler) {
    static mixp_advance_args k;
    memset((void *)&k, 0, sizeof k);
    k.rule = rule;
    k.scaler = scaler;
    return &k;
}
#endif
