/* args_rows.h - the arguments of a kernel over rows in one call, for tests and benches.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 *     table->softmax(&x, args_softmax(rows, cols, 0, y, a))
 *
 * Each function fills a struct of its own, which lives until its next call.
 */
#ifndef ARGS_ROWS_H
#define ARGS_ROWS_H
#include "args.h"

static inline const mixp_softmax_args *args_softmax(int64_t rows, int64_t cols, int log_of,
                                                    mixp_array y, mixp_array a) {
    static mixp_softmax_args k;
    memset((void *)&k, 0, sizeof k);
    k.rows = rows;
    k.cols = cols;
    k.log_of = log_of;
    k.a = args_in(a);
    k.y = args_out(y, 0);
    return &k;
}

static inline const mixp_softmax_backward_args *args_softmax_backward(int64_t rows, int64_t cols,
        int log_of, mixp_array da, int accumulate, mixp_array dy, mixp_array y) {
    static mixp_softmax_backward_args k;
    memset((void *)&k, 0, sizeof k);
    k.rows = rows;
    k.cols = cols;
    k.log_of = log_of;
    k.dy = args_in(dy);
    k.y = args_in(y);
    k.da = args_out(da, accumulate);
    return &k;
}

static inline const mixp_norm_args *args_norm(int64_t rows, int64_t cols, int rms, float eps,
        mixp_array y, mixp_array a, mixp_array gamma, mixp_array beta, float *mean, float *rstd) {
    static mixp_norm_args k;
    memset((void *)&k, 0, sizeof k);
    k.rows = rows;
    k.cols = cols;
    k.rms = rms;
    k.eps = eps;
    k.a = args_in(a);
    k.gamma = args_in(gamma);
    k.beta = args_in(beta);
    k.y = args_out(y, 0);
    k.mean = mean;
    k.rstd = rstd;
    return &k;
}

static inline const mixp_norm_backward_args *args_norm_backward(int64_t rows, int64_t cols, int rms,
        mixp_out da, mixp_out dgamma, mixp_out dbeta, mixp_array dy, mixp_array a,
        mixp_array gamma, const float *mean, const float *rstd) {
    static mixp_norm_backward_args k;
    memset((void *)&k, 0, sizeof k);
    k.rows = rows;
    k.cols = cols;
    k.rms = rms;
    k.dy = args_in(dy);
    k.a = args_in(a);
    k.gamma = args_in(gamma);
    k.mean = mean;
    k.rstd = rstd;
    k.da = da;
    k.dgamma = dgamma;
    k.dbeta = dbeta;
    return &k;
}

static inline const mixp_embedding_args *args_embedding(int64_t rows, int64_t cols, int64_t vocab,
        mixp_array y, mixp_array table, const int32_t *ids) {
    static mixp_embedding_args k;
    memset((void *)&k, 0, sizeof k);
    k.rows = rows;
    k.cols = cols;
    k.vocab = vocab;
    k.ids = ids;
    k.table = args_in(table);
    k.y = args_out(y, 0);
    return &k;
}

static inline const mixp_embedding_backward_args *args_embedding_backward(int64_t rows,
        int64_t cols, int64_t vocab, mixp_array dtable, int accumulate, mixp_array dy,
        const int32_t *ids) {
    static mixp_embedding_backward_args k;
    memset((void *)&k, 0, sizeof k);
    k.rows = rows;
    k.cols = cols;
    k.vocab = vocab;
    k.ids = ids;
    k.dy = args_in(dy);
    k.dtable = args_out(dtable, accumulate);
    return &k;
}

static inline const mixp_cross_entropy_args *args_cross_entropy(int64_t rows, int64_t cols,
        int32_t ignore, float *loss, float *lse, float *counted, mixp_array logits,
        const int32_t *targets) {
    static mixp_cross_entropy_args k;
    memset((void *)&k, 0, sizeof k);
    k.rows = rows;
    k.cols = cols;
    k.ignore = ignore;
    k.targets = targets;
    k.logits = args_in(logits);
    k.loss = loss;
    k.lse = lse;
    k.counted = counted;
    return &k;
}

static inline const mixp_cross_entropy_backward_args *args_cross_entropy_backward(int64_t rows,
        int64_t cols, int32_t ignore, mixp_out dlogits, mixp_array dloss, mixp_array logits,
        const int32_t *targets, const float *lse, const float *counted) {
    static mixp_cross_entropy_backward_args k;
    memset((void *)&k, 0, sizeof k);
    k.rows = rows;
    k.cols = cols;
    k.ignore = ignore;
    k.targets = targets;
    k.dloss = args_in(dloss);
    k.logits = args_in(logits);
    k.lse = lse;
    k.counted = counted;
    k.dlogits = dlogits;
    return &k;
}

static inline const mixp_loss_args *args_loss(mixp_loss_kind kind, int64_t n, float *y, mixp_array a,
                                              mixp_array target) {
    static mixp_loss_args k;
    memset((void *)&k, 0, sizeof k);
    k.kind = kind;
    k.n = n;
    k.a = args_in(a);
    k.target = args_in(target);
    k.y = y;
    return &k;
}

static inline const mixp_loss_backward_args *args_loss_backward(mixp_loss_kind kind, int64_t n,
        mixp_array da, int accumulate, mixp_array dloss, mixp_array a, mixp_array target) {
    static mixp_loss_backward_args k;
    memset((void *)&k, 0, sizeof k);
    k.kind = kind;
    k.n = n;
    k.dloss = args_in(dloss);
    k.a = args_in(a);
    k.target = args_in(target);
    k.da = args_out(da, accumulate);
    return &k;
}
#endif
