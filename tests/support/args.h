/* args.h - the arguments of a kernel in one call, for tests and benches.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 *     table->fill(&x, args_fill(y, n, 1.0))
 *
 * Each function fills its own static struct, which is valid until the next call of that function.
 */
#ifndef ARGS_H
#define ARGS_H
#include "mixprec.h"

/* An array as tests hold it: read by one kernel, written by another. */
typedef struct test_array { void *data; mixp_dtype dtype; } test_array;

static inline test_array array_of(void *data, mixp_dtype dtype) {
    test_array a;
    a.data = data;
    a.dtype = dtype;
    return a;
}

static inline mixp_in args_in(test_array a) {
    mixp_in in = { a.data, a.dtype };
    return in;
}
static inline mixp_out args_out(test_array a, int accumulate) {
    mixp_out out = { a.data, a.dtype, accumulate };
    return out;
}

static inline test_array args_nothing(void) { return array_of(NULL, MIXP_F32); }

static inline const mixp_convert_args *args_convert(test_array dst, test_array src, int64_t n,
                                                    const mixp_rounding *rounding) {
    static mixp_convert_args k;
    memset((void *)&k, 0, sizeof k);
    k.n = n;
    k.src = args_in(src);
    k.dst = args_out(dst, 0);
    if (rounding) k.rounding = *rounding;
    return &k;
}

static inline const mixp_fill_args *args_fill(test_array dst, int64_t n, double value) {
    static mixp_fill_args k;
    memset((void *)&k, 0, sizeof k);
    k.n = n;
    k.value = value;
    k.dst = args_out(dst, 0);
    return &k;
}

/* Shape or strides; nothing of a rank that no kernel takes. */
static inline void args_axes(int64_t *to, const int64_t *from, int rank) {
    for (int i = 0; rank <= MIXP_MAX_RANK && i < rank; i++) to[i] = from[i];
}

static inline const mixp_copy_args *args_copy(int rank, const int64_t *shape, test_array dst,
        const int64_t *dst_strides, test_array src, const int64_t *src_strides, int accumulate) {
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

/* What few operations have a second parameter for is not in the calls below: the upper bound of
 * CLAMP lies so far above the lower one, and HUBER and SMOOTH_L1 have this bound. */
#define ARGS_CLAMP_WIDTH 1.5f
#define ARGS_DELTA       0.75f

static inline const mixp_unary_args *args_unary(mixp_unary op, int64_t n, test_array y,
                                                test_array a, float p) {
    static mixp_unary_args k;
    memset((void *)&k, 0, sizeof k);
    k.op = op;
    k.p = p;
    k.q = p + ARGS_CLAMP_WIDTH;
    k.n = n;
    k.a = args_in(a);
    k.y = args_out(y, 0);
    return &k;
}

static inline const mixp_unary_backward_args *args_unary_backward(mixp_unary op, int64_t n,
        test_array da, int accumulate, test_array dy, test_array a, test_array y, float p) {
    static mixp_unary_backward_args k;
    memset((void *)&k, 0, sizeof k);
    k.op = op;
    k.p = p;
    k.q = p + ARGS_CLAMP_WIDTH;
    k.n = n;
    k.dy = args_in(dy);
    k.a = args_in(a);
    k.y = args_in(y);
    k.da = args_out(da, accumulate);
    return &k;
}

static inline const mixp_binary_args *args_binary(mixp_binary op, int rank, const int64_t *shape,
        test_array y, test_array a, const int64_t *a_strides, test_array b,
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
        const int64_t *shape, test_array dx, int accumulate, test_array dy, test_array a,
        const int64_t *a_strides, test_array b, const int64_t *b_strides) {
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
        test_array y, int accumulate, test_array a, float factor) {
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

static inline const mixp_dropout_args *args_dropout(int64_t n, test_array y, int accumulate,
        test_array a, float p, uint64_t seed, uint64_t step, uint64_t tensor) {
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

static inline const mixp_scale_by_args *args_scale_by(int64_t n, test_array y, int accumulate,
                                                      test_array a, const float *factor) {
    static mixp_scale_by_args k;
    memset((void *)&k, 0, sizeof k);
    k.n = n;
    k.factor = factor;
    k.a = args_in(a);
    k.y = args_out(y, accumulate);
    return &k;
}

/* AdamW's description for Adam: the types differ, the fields do not. */
static inline mixp_optimizer_desc args_adam(const mixp_optimizer_desc *a) {
    mixp_optimizer_desc d = mixp_adam_defaults();
    d.lr = a->lr;
    d.beta1 = a->beta1;
    d.beta2 = a->beta2;
    d.eps = a->eps;
    d.weight_decay = a->weight_decay;
    d.max_norm = a->max_norm;
    d.no_master = a->no_master;
    d.zero_grad = a->zero_grad;
    d.schedule = a->schedule;
    d.states = a->states;
    return d;
}

/* --- the kernels over rows -------------------------------------------------------------- */

static inline const mixp_softmax_args *args_softmax(int64_t rows, int64_t cols, int log_of,
                                                    test_array y, test_array a) {
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
        int log_of, test_array da, int accumulate, test_array dy, test_array y) {
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
        test_array y, test_array a, test_array gamma, test_array beta, float *mean, float *rstd) {
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

/* norm is args_norm's, of the array that b is added to. */
static inline const mixp_norm_args *args_add_norm(const mixp_norm_args *norm, test_array sum,
                                                  test_array b) {
    static mixp_norm_args k;
    k = *norm;
    k.b = args_in(b);
    k.sum = args_out(sum, 0);
    return &k;
}

/* back is args_norm_backward's, with da f32. */
static inline const mixp_norm_backward_args *args_norm_db(const mixp_norm_backward_args *back,
                                                          test_array db) {
    static mixp_norm_backward_args k;
    k = *back;
    k.db = args_out(db, 0);
    return &k;
}

/* loss is args_cross_entropy's. */
static inline const mixp_cross_entropy_both_args *args_cross_entropy_both(
        const mixp_cross_entropy_args *loss, test_array dlogits, const float *scale, float share) {
    static mixp_cross_entropy_both_args k;
    memset((void *)&k, 0, sizeof k);
    k.loss = *loss;
    k.scale = scale;
    k.share = share;
    k.dlogits = args_out(dlogits, 0);
    return &k;
}

static inline const mixp_norm_backward_args *args_norm_backward(int64_t rows, int64_t cols, int rms,
        mixp_out da, mixp_out dgamma, mixp_out dbeta, test_array dy, test_array a,
        test_array gamma, const float *mean, const float *rstd) {
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
        test_array y, test_array table, const int32_t *ids) {
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
        int64_t cols, int64_t vocab, test_array dtable, int accumulate, test_array dy,
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
        int32_t ignore, float *loss, float *stats, float *counted, test_array logits,
        const int32_t *targets) {
    static mixp_cross_entropy_args k;
    memset((void *)&k, 0, sizeof k);
    k.rows = rows;
    k.cols = cols;
    k.ignore = ignore;
    k.targets = targets;
    k.logits = args_in(logits);
    k.loss = loss;
    k.stats = stats;
    k.counted = counted;
    return &k;
}

static inline const mixp_cross_entropy_backward_args *args_cross_entropy_backward(int64_t rows,
        int64_t cols, int32_t ignore, mixp_out dlogits, test_array dloss, test_array logits,
        const int32_t *targets, const float *stats, const float *counted) {
    static mixp_cross_entropy_backward_args k;
    memset((void *)&k, 0, sizeof k);
    k.rows = rows;
    k.cols = cols;
    k.ignore = ignore;
    k.targets = targets;
    k.dloss = args_in(dloss);
    k.logits = args_in(logits);
    k.stats = stats;
    k.counted = counted;
    k.dlogits = dlogits;
    return &k;
}

static inline const mixp_loss_args *args_loss(mixp_loss_kind kind, int64_t n, float *y, test_array a,
                                              test_array target) {
    static mixp_loss_args k;
    memset((void *)&k, 0, sizeof k);
    k.kind = kind;
    k.n = n;
    k.delta = ARGS_DELTA;
    k.a = args_in(a);
    k.target = args_in(target);
    k.y = y;
    return &k;
}

static inline const mixp_loss_backward_args *args_loss_backward(mixp_loss_kind kind, int64_t n,
        test_array da, int accumulate, test_array dloss, test_array a, test_array target) {
    static mixp_loss_backward_args k;
    memset((void *)&k, 0, sizeof k);
    k.kind = kind;
    k.n = n;
    k.delta = ARGS_DELTA;
    k.dloss = args_in(dloss);
    k.a = args_in(a);
    k.target = args_in(target);
    k.da = args_out(da, accumulate);
    return &k;
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

/* Attention of packed qkv[b, t, 3, heads, d]; of its own sizes, or any mask, the caller says more. */
static inline mixp_attention_args args_attention(int64_t b, int64_t t, int64_t heads, int64_t d,
                                                 test_array qkv, test_array y, float *lse) {
    mixp_attention_args k;
    size_t part = (size_t)(heads * d) * mixp_dtype_size(qkv.dtype);
    memset((void *)&k, 0, sizeof k);
    k.b = b;
    k.t = k.keys = t;
    k.heads = k.kv_heads = heads;
    k.d = d;
    k.q = args_in(qkv);
    k.k = args_in(array_of((char *)qkv.data + part, qkv.dtype));
    k.v = args_in(array_of((char *)qkv.data + 2 * part, qkv.dtype));
    k.q_at.row = 3 * heads * d;
    k.q_at.head = d;
    k.q_at.sequence = t * k.q_at.row;
    k.k_at = k.v_at = k.q_at;
    k.y = args_out(y, 0);
    k.lse = lse;
    return k;
}

/* Its gradient, packed as well. */
static inline mixp_attention_backward_args args_attention_backward(
    const mixp_attention_args *forward, test_array dy, test_array dqkv, int accumulate) {
    mixp_attention_backward_args k;
    size_t part = (size_t)(forward->heads * forward->d) * mixp_dtype_size(dqkv.dtype);
    memset((void *)&k, 0, sizeof k);
    k.forward = *forward;
    k.dy = args_in(dy);
    k.dq = args_out(dqkv, accumulate);
    k.dk = args_out(array_of((char *)dqkv.data + part, dqkv.dtype), accumulate);
    k.dv = args_out(array_of((char *)dqkv.data + 2 * part, dqkv.dtype), accumulate);
    return k;
}

/* With what was met on the way back. */
static inline const mixp_advance_args *args_advance_looked(const mixp_scaler_rule *rule,
                                                           mixp_scaler_state *scaler,
                                                           const mixp_look *wide) {
    static mixp_advance_args k;
    k = *args_advance(rule, scaler);
    k.wide = wide;
    return &k;
}
#endif
