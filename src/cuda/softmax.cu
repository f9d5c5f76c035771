#pragma once
#include "rows.cu"
namespace {

/* --- softmax --------------------------------------------------------------------------- */

/* The largest element so far, and the sum of e^(x - top). A NaN appears only in the sum. */
struct Exponents { float top, sum; };

/* The number to subtract before e^x: 0 for a top of -Inf, because e^(-Inf - -Inf) is NaN. */
__device__ inline float base_of(float top) { return top > minus_infinity() ? top : 0.0f; }

__device__ inline void add_exponents(Exponents &e, const float *v) {
    float top = e.top;
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) top = fmaxf(top, v[k]);

    /* Rescale the sum to the new top, then add the elements. */
    const float base = base_of(top);
    e.sum *= exp_of(e.top - base);
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) e.sum += exp_of(v[k] - base);
    e.top = top;
}
template <int T> __device__ inline Exponents team_exponents(const Exponents &e) {
    Exponents all;
    all.top = team_max<T>(e.top);
    all.sum = team_sum<T>(e.sum * exp_of(e.top - base_of(all.top)));
    return all;
}
/* Replaces column `at` of a part, if the part has that column. */
__device__ inline void set_column(const Part &p, int64_t at, float x, float *v) {
    const int k_at = (int)(at - p.col);
    if ((unsigned)k_at >= (unsigned)(8 * p.step)) return;
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++)
        if (k * p.step == k_at) v[k] = x;
}
/* Of a row without column `but`; -1: of all its columns. */
template <int T, mixp_dtype D = any_real>
__device__ inline Exponents row_exponents(
    const mixp_in &a, int64_t row, int64_t cols, bool wide, int64_t but = -1) {
    int rank = (int)threadIdx.x % T;
    Exponents e = { minus_infinity(), 0.0f };
    float v[8];
    Part p;
    MIXPI_TYPED_PARTS(D, p, cols, T, rank) {
        typed_get_part<D>(a, row, p, wide, minus_infinity(), v);
        set_column(p, but, minus_infinity(), v);
        add_exponents(e, v);
    }
    return team_exponents<T>(e);
}

struct SoftmaxJob : mixp_softmax_args { bool wide; };
struct SoftmaxBackJob : mixp_softmax_backward_args { bool wide; };

/* The sum of e^(x - top) of a row's elements below its top. */
const float sure_sum = 1.25f;
template <int T> __device__ inline float below_top(const SoftmaxJob &s, int64_t row, float top) {
    float sum = 0.0f, v[8];
    Part p;
    MIXPI_PARTS(p, s.cols, T, (int)threadIdx.x % T) {
        get_part(s.a, row * s.cols, p, s.wide, top, v);
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) sum += v[k] < top ? exp_of(v[k] - top) : 0.0f;
    }
    return team_sum<T>(sum);
}

template <int T>
__global__ void __launch_bounds__(team_threads, 3)
    softmax_rows(const __grid_constant__ SoftmaxJob s) {
    const int rank = (int)threadIdx.x % T;
    for (int64_t r = team_first<T>(); r < s.rows; r += team_step<T>()) {
        /* Sum the row's exponentials. If one column has almost all of the sum, its logarithm comes
         * from the sum of the others. */
        Exponents e = row_exponents<T>(s.a, r * s.cols, s.cols, s.wide);
        float log_sum = logf(e.sum), factor = 1.0f / e.sum;
        if (s.log_of && e.sum < sure_sum) log_sum = log1pf(below_top<T>(s, r, e.top));

        /* Read the row again, and write its softmax or the logarithm. */
        Part p;
        MIXPI_PARTS(p, s.cols, T, rank) {
            float v[8];
            get_part(s.a, r * s.cols, p, s.wide, 0.0f, v);
            MIXPI_UNROLL
            for (int k = 0; k < 8; k++) {
                float x = v[k] - e.top;
                v[k] = s.log_of ? x - log_sum : exp_of(x) * factor;
            }
            put_part(s.y, r * s.cols, p, s.wide, v);
        }
    }
}

/* A column with 3/4 of the probability or more is sure; at most one is. */
__device__ inline bool is_sure(float y, int log_of) { return y >= (log_of ? -0.2876821f : 0.75f); }

/* The sums of a row of a softmax's backward pass: dy of its sure column, or 0; over the other
 * columns, the sums of y and of dy y, or of dy for the log. */
struct BackSums { float sure, y, dy; };
template <int T> __device__ inline BackSums back_sums(const SoftmaxBackJob &s, int64_t r) {
    LongSum sums = { 0.0f, 0.0f };
    float dy[8], y[8], sure = 0.0f, share = 0.0f;
    Part p;
    MIXPI_PARTS(p, s.cols, T, (int)threadIdx.x % T) {
        float part = 0.0f;
        get_part(s.dy, r * s.cols, p, s.wide, 0.0f, dy);
        get_part(s.y, r * s.cols, p, s.wide, 0.0f, y);
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) {
            if (k >= p.n) continue;
            const bool is = is_sure(y[k], s.log_of);
            if (is) sure = dy[k];
            else part = s.log_of ? part + dy[k] : fmaf(dy[k], y[k], part);
            share += is ? 0.0f : y[k];
        }
        add_long(sums, part);
    }
    BackSums all;
    all.sure = team_sum<T>(sure);
    all.y = team_sum<T>(share);
    all.dy = value_of(team_sum<T>(sums));
    return all;
}

/* da = y (dy - sum(dy y)), or dy - e^y sum(dy) for the log. In a sure column these differences
 * cancel. Its slope comes from the other columns: all dy count from this column's, or, for the log,
 * the slope is -(the others' sum + sum(dy) (e^y - 1)). */
template <int T>
__global__ void __launch_bounds__(team_threads, 3)
    softmax_back_rows(const __grid_constant__ SoftmaxBackJob s) {
    const int rank = (int)threadIdx.x % T;
    for (int64_t r = team_first<T>(); r < s.rows; r += team_step<T>()) {
        const BackSums sums = back_sums<T>(s, r);
        const float all = s.log_of ? sums.dy + sums.sure : fmaf(-sums.sure, sums.y, sums.dy);

        /* Read the row again, and write its gradient. */
        float dy[8], y[8];
        Part p;
        MIXPI_PARTS(p, s.cols, T, rank) {
            get_part(s.dy, r * s.cols, p, s.wide, 0.0f, dy);
            get_part(s.y, r * s.cols, p, s.wide, 0.0f, y);
            MIXPI_UNROLL
            for (int k = 0; k < 8; k++) {
                if (!s.log_of) dy[k] = y[k] * ((dy[k] - sums.sure) - all);
                else if (is_sure(y[k], 1)) dy[k] = -fmaf(all, expm1f(y[k]), sums.dy);
                else dy[k] = fmaf(exp_of(y[k]), -all, dy[k]);
            }
            add_part(s.da, r * s.cols, p, s.wide, dy);
        }
    }
}

/* --- cross entropy --------------------------------------------------------------------- */

struct EntropyJob : mixp_cross_entropy_args {
    double   *losses;           /* one per row                                             */
    FaultFlag fault;
    bool      wide;
};
struct EntropyBackJob : mixp_cross_entropy_backward_args {
    FaultFlag fault;
    bool      wide;
};

/* The mean distance of a row's elements below the row's largest, times their columns' weights. */
template <int T> __device__ inline float row_below(const EntropyJob &s, int64_t row, float top) {
    int rank = (int)threadIdx.x % T;
    float sum = 0.0f, v[8];
    Part p;
    MIXPI_PARTS(p, s.cols, T, rank) {
        get_part(s.logits, row * s.cols, p, s.wide, top, v);
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) {
            float by = s.weights && k < p.n ? s.weights[p.col + k * p.step] : 1.0f;
            sum += k < p.n ? (top - v[k]) * by : 0.0f;
        }
    }
    return team_sum<T>(sum) / (float)s.cols;
}

/* The target's logit. Read it before dlogits overwrites it. */
__device__ inline float target_value(const EntropyJob &s, int64_t r) {
    int32_t target = s.targets[r];
    return is_id(target, s.cols) ? get1(s.logits, r * s.cols + target) : 0.0f;
}
/* A row of cross entropy: its largest element, and the exponentials of the target and of all other
 * columns. Their sum is not made before its use: it would lose `others` beside a target near 1. */
struct RowExponents { float top, hot, others; };
template <int T, mixp_dtype D>
__device__ inline RowExponents entropy_exponents(
    const EntropyJob &s, int64_t r, const mixp_in &a, int64_t from, float at_target) {
    const int32_t target = s.targets[r];
    const bool counts = target != s.ignore && is_id(target, s.cols);
    const Exponents e = row_exponents<T, D>(a, from, s.cols, s.wide, counts ? target : -1);
    RowExponents all = { e.top, 0.0f, e.sum };
    if (!counts) return all;
    all.top = fmaxf(e.top, at_target);
    all.hot = exp_of(at_target - base_of(all.top));
    all.others = e.sum * exp_of(e.top - base_of(all.top));
    return all;
}

/* The loss of a row whose target is valid. Its parts are added in double. */
__device__ inline double loss_of_row(
    const EntropyJob &s, int32_t target, const RowExponents &e, float below, float at_target) {
    float top = e.top - at_target, log_sum = log1pf(e.others + (e.hot - 1.0f));
    double loss = (double)top + (double)log_sum;
    if (s.weights) {
        double smooth = (double)s.smoothing, mean = (double)s.weights[s.cols];
        loss *= (1.0 - smooth) * (double)s.weights[target];
        if (s.smoothing > 0.0f) loss += smooth * ((double)below + mean * (double)log_sum);
    } else if (s.smoothing > 0.0f) {
        loss += s.smoothing * ((double)below - (double)top);
    }
    return loss;
}
/* Stores the row's loss. */
__device__ inline void put_loss(
    const EntropyJob &s, int64_t r, const RowExponents &e, float below, float at_target) {
    /* Compute the loss: 0 for an ignored row, NaN for a target that is no column. */
    const int32_t target = s.targets[r];
    double loss = 0.0;
    if (target != s.ignore && !is_id(target, s.cols)) {
        note_fault(s.fault, FAULT_TARGET, s.before + r, target);
        loss = (double)not_a_number();
    } else if (target != s.ignore) {
        loss = loss_of_row(s, target, e, below, at_target);
    }

    /* Store the loss, and what the backward pass needs of the row's softmax. */
    if (!s.logs) {
        s.stats[3 * r] = e.top;
        s.stats[3 * r + 1] = 1.0f / (e.hot + e.others);
        s.stats[3 * r + 2] = e.others / (e.hot + e.others);
    }
    s.losses[r] = loss;
    if (s.each) s.each[r] = (float)loss;
}
template <int T, mixp_dtype D>
__global__ void __launch_bounds__(team_threads, 3)
    entropy_rows(const __grid_constant__ EntropyJob s) {
    int rank = (int)threadIdx.x % T;
    for (int64_t r = team_first<T>(); r < s.rows; r += team_step<T>()) {
        const float at_target = target_value(s, r);
        RowExponents e = { 0.0f, 1.0f, 0.0f };
        float below = 0.0f;
        if (!s.logs) e = entropy_exponents<T, D>(s, r, s.logits, r * s.cols, at_target);
        if (s.smoothing > 0.0f) below = row_below<T>(s, r, e.top);
        if (rank == 0) put_loss(s, r, e, below, at_target);
    }
}

/* The two kernels below run as one block. No other block hides their load latency, so a thread
 * loads 8 values at a time. */
const int loads_ahead = 8;

/* How many of a thread's rows count. */
__device__ inline int64_t counted_rows(const EntropyJob &s) {
    const int64_t step = (int64_t)blockDim.x;
    int64_t i = (int64_t)threadIdx.x, count = 0;
    int32_t target[loads_ahead];
    for (; i + (loads_ahead - 1) * step < s.rows; i += loads_ahead * step) {
        MIXPI_UNROLL
        for (int k = 0; k < loads_ahead; k++) target[k] = s.targets[i + k * step];
        MIXPI_UNROLL
        for (int k = 0; k < loads_ahead; k++) count += target[k] != s.ignore;
    }
    for (; i < s.rows; i += step) count += s.targets[i] != s.ignore;
    return count;
}

/* The sum of a thread's rows' losses, in order. */
__device__ inline double summed_losses(const EntropyJob &s) {
    const int64_t step = (int64_t)blockDim.x;
    int64_t i = (int64_t)threadIdx.x;
    double sum = 0.0, loss[loads_ahead];
    for (; i + (loads_ahead - 1) * step < s.rows; i += loads_ahead * step) {
        MIXPI_UNROLL
        for (int k = 0; k < loads_ahead; k++) loss[k] = s.losses[i + k * step];
        MIXPI_UNROLL
        for (int k = 0; k < loads_ahead; k++) sum += loss[k];
    }
    for (; i < s.rows; i += step) sum += s.losses[i];
    return sum;
}

/* The weights of the targets of a thread's rows. */
__device__ inline double counted_weights(const EntropyJob &s) {
    double sum = 0.0;
    for (int64_t i = (int64_t)threadIdx.x; i < s.rows; i += (int64_t)blockDim.x) {
        int32_t target = s.targets[i];
        if (target != s.ignore && is_id(target, s.cols)) sum += (double)s.weights[target];
    }
    return sum;
}

/* The mean over the counted rows, or the sum. */
__global__ void __launch_bounds__(1024) entropy_mean(const __grid_constant__ EntropyJob s) {
    double sum = block_sum(summed_losses(s));
    double count = s.weights ? block_sum(counted_weights(s)) : (double)block_sum(counted_rows(s));
    if (threadIdx.x) return;

    /* Continue the mean of earlier rows. */
    if (s.before > 0) {
        const double had = (double)*s.counted;
        sum += (double)*s.loss * (had != 0.0 ? had : 1.0);
        count += had;
    }

    /* Divide by the count, which is 1 for a sum. The mean of no rows is NaN, unless more follow. */
    if (s.sum) count = 1.0;
    *s.counted = (float)count;
    if (count != 0.0) *s.loss = (float)(sum / count);
    else *s.loss = s.more ? (float)sum : not_a_number();
}

/* The gradient of a row: by (all softmax - others), and by (target - others) at the target, whose
 * all p - hot with p near 1 is made of the others' probability. */
struct Slopes {
    float by, all, target, others;
};
__device__ inline float target_slope(float all, float spread, float rest) {
    return fmaf(-all, rest, spread);
}
__device__ inline Slopes slopes_of(const EntropyBackJob &s, int64_t r, float factor, bool counts) {
    Slopes d = { factor, 1.0f, 0.0f, 0.0f };
    float hot = 1.0f - s.smoothing, spread = s.smoothing;
    if (s.smoothing > 0.0f) d.others = s.smoothing / (float)s.cols;
    if (s.each) d.by = get1(s.dloss, r);
    if (s.weights && counts) {
        hot *= s.weights[s.targets[r]];
        spread *= s.weights[s.cols];
        d.all = hot + spread;
    }
    d.target = s.logs ? -hot : target_slope(d.all, spread, s.stats[3 * r + 2]);
    return d;
}

/* factor (softmax - onehot); zeros for an ignored row, even if it contains NaN. */
template <int T, mixp_dtype D>
__global__ void __launch_bounds__(team_threads, 3)
    entropy_back_rows(const __grid_constant__ EntropyBackJob s) {
    const int rank = (int)threadIdx.x % T;
    const float factor = s.each ? 0.0f : get1(s.dloss, 0) / *s.counted;
    float v[8];
    for (int64_t r = team_first<T>(); r < s.rows; r += team_step<T>()) {
        /* Read the row's target, and what the forward pass stored. */
        const int32_t target = s.targets[r];
        const bool ignored = target == s.ignore, bad = !ignored && !is_id(target, s.cols);
        Slopes d = slopes_of(s, r, factor, !ignored && !bad);
        const float top = s.logs ? 0.0f : s.stats[3 * r];
        const float rsum = s.logs ? 0.0f : s.stats[3 * r + 1] * d.all;

        /* Skip an ignored row that adds nothing; report a target that is no column. */
        if (ignored && s.dlogits.accumulate) continue;
        if (bad) d.by = not_a_number();
        if (bad && rank == 0) note_fault(s.fault, FAULT_TARGET, r, target);

        /* Write the row's gradient. */
        Part p;
        MIXPI_TYPED_PARTS(D, p, s.cols, T, rank) {
            const int hot_at = (int)(target - p.col);
            if (!ignored) typed_get_part<D>(s.logits, r * s.cols, p, s.wide, 0.0f, v);
            MIXPI_UNROLL
            for (int k = 0; k < 8; k++) {
                float others = d.others, share = s.logs ? 0.0f : exp_of(v[k] - top) * rsum;
                if (k * p.step == hot_at) share = d.target;
                if (s.weights && k < p.n) others *= s.weights[p.col + k * p.step];
                v[k] = ignored ? 0.0f : (share - others) * d.by;
            }
            typed_add_part<D>(s.dlogits, r * s.cols, p, s.wide, v);
        }
    }
}

/* Loss and gradient in one pass. If it fits, a row stays in shared memory for its second read. Each
 * thread copies only the elements that it reads, so no thread waits for another. The block's next
 * row overwrites elements after their second read; its copy overlaps the rest of that read. */
struct EntropyBothJob : EntropyJob {
    mixp_out     dlogits;
    const float *scale;
    float        share;
    int          kept;          /* bytes of a row in shared memory; 0: rows are read twice */
};
/* Bytes for a block's sums. They and a row of 50,304 2-byte elements fit the 99 KB of capability
 * 8.6, 8.9 and 12.0. */
const int beside_row = 512;

/* Counts the rows that count: the divisor of each gradient. */
__global__ void __launch_bounds__(1024) entropy_count(const __grid_constant__ EntropyBothJob s) {
    int64_t count = block_sum(counted_rows(s));
    if (threadIdx.x == 0) *s.counted = (float)count;
}

/* The row to fetch into shared memory; NULL: there is no such row, or rows do not stay there. */
__device__ inline const char *row_to_fetch(const EntropyBothJob &s, int64_t row) {
    return s.kept && row < s.rows ? (const char *)s.logits.data + row * s.kept : NULL;
}
/* Starts the copy of a row's 8 elements from `col`. */
template <mixp_dtype D> __device__ inline void fetch_part(const char *row, int64_t col) {
    MIXPI_DYNAMIC_SHARED(char, kept);
    const int at = (int)col * dtype_bytes(D);
    cp_async_16(kept + at, row + at, 16);
    if (D == MIXP_F32) cp_async_16(kept + at + 16, row + at + 16, 16);
}
template <mixp_dtype D> __device__ inline void fetch_row(const EntropyBothJob &s, const char *row) {
    for (int64_t col = 8 * (int64_t)threadIdx.x; row && col < s.cols; col += 8 * team_threads)
        fetch_part<D>(row, col);
    cp_async_commit();
}
template <mixp_dtype D> __device__ inline mixp_in fetched_row() {
    MIXPI_DYNAMIC_SHARED(char, kept);
    cp_async_wait<0>();
    return mixpi_in(kept, D);
}

/* As entropy_back_rows: the row's gradient, from `a` at `from`. Row `next`, unless it is NULL,
 * overwrites each part in shared memory after the part's gradient is stored. */
template <int T, mixp_dtype D>
__device__ inline void put_slopes(const EntropyBothJob &s, int64_t r, const mixp_in &a,
    int64_t from, const RowExponents &e, const char *next) {
    /* Find the factors of the row's gradient. */
    const int32_t target = s.targets[r];
    const bool ignored = target == s.ignore;
    const float others = s.smoothing > 0.0f ? s.smoothing / (float)s.cols : 0.0f;
    float by = __fmul_rn(*s.scale, s.share) / *s.counted;
    const float rsum = 1.0f / (e.hot + e.others);
    const float at_target = target_slope(1.0f, s.smoothing, e.others / (e.hot + e.others));
    if (!ignored && !is_id(target, s.cols)) by = not_a_number();

    /* Write the gradient part by part, and fetch the next row's part in its place. */
    const int rank = (int)threadIdx.x % T;
    const float hot = (at_target - others) * by;
    float v[8];
    Part p;
    MIXPI_TYPED_PARTS(D, p, s.cols, T, rank) {
        if (!ignored) typed_get_part<D>(a, from, p, s.wide, 0.0f, v);
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++)
            v[k] = ignored ? 0.0f : (exp_of(v[k] - e.top) * rsum - others) * by;
        set_column(p, ignored ? -1 : target, hot, v);
        typed_add_part<D>(s.dlogits, r * s.cols, p, s.wide, v);
        if (T == team_threads && next) fetch_part<D>(next, p.col);
    }
    if (T == team_threads && s.kept) cp_async_commit();
}

template <int T, mixp_dtype D>
__global__ void __launch_bounds__(team_threads, 3)
    entropy_both_rows(const __grid_constant__ EntropyBothJob s) {
    const bool kept = T == team_threads && s.kept;
    const int rank = (int)threadIdx.x % T;
    if (kept) fetch_row<D>(s, row_to_fetch(s, team_first<T>()));
    for (int64_t r = team_first<T>(); r < s.rows; r += team_step<T>()) {
        float at_target = target_value(s, r), below = 0.0f;
        mixp_in a = kept ? fetched_row<D>() : s.logits;
        const int64_t from = kept ? 0 : r * s.cols;

        /* Sum the row's exponentials, and store its loss. */
        const RowExponents e = entropy_exponents<T, D>(s, r, a, from, at_target);
        if (s.smoothing > 0.0f) below = row_below<T>(s, r, e.top);
        if (rank == 0) put_loss(s, r, e, below, at_target);

        /* Write the gradient. dlogits may be logits: lane 0 has read its target by now. */
        __syncwarp();
        put_slopes<T, D>(s, r, a, from, e, row_to_fetch(s, r + team_step<T>()));
    }
}

}   /* namespace */

static mixp_result mixpi_cuda_softmax(const mixp_exec *x, const mixp_softmax_args *k) {
    Kernel on(x);
    SoftmaxJob job = mixpi_cuda_job<SoftmaxJob>(*k);
    job.wide = is_wide(k->y) && is_wide(k->a);
    if (!on.state) return MIXP_ERR_ORDER;
    if (!is_real(k->y.dtype) || !is_real(k->a.dtype)) return MIXP_ERR_DTYPE;
    if (k->y.accumulate) return MIXP_ERR_ARGUMENT;
    if (k->rows <= 0 || k->cols <= 0) return MIXP_OK;
    return on.report("softmax", MIXPI_ROWS(softmax_rows, on, job));
}

static mixp_result mixpi_cuda_softmax_backward(
    const mixp_exec *x, const mixp_softmax_backward_args *k) {
    Kernel on(x);
    SoftmaxBackJob job = mixpi_cuda_job<SoftmaxBackJob>(*k);
    job.wide = is_wide(k->da) && is_wide(k->dy) && is_wide(k->y);
    if (!on.state) return MIXP_ERR_ORDER;
    if (!is_real(k->da.dtype) || !is_real(k->dy.dtype) || !is_real(k->y.dtype))
        return MIXP_ERR_DTYPE;
    if (k->rows <= 0 || k->cols <= 0) return MIXP_OK;
    return on.report("softmax_backward", MIXPI_ROWS(softmax_back_rows, on, job));
}

static cudaError_t mixpi_cuda_launch_entropy(const Kernel &on, const EntropyJob &job) {
    switch ((int)typed_rows(job.wide, job.cols, job.logits.dtype)) {
    case MIXP_F16: return MIXPI_TYPED_ROWS(entropy_rows, MIXP_F16, on, job);
    case MIXP_BF16: return MIXPI_TYPED_ROWS(entropy_rows, MIXP_BF16, on, job);
    case MIXP_F32: return MIXPI_TYPED_ROWS(entropy_rows, MIXP_F32, on, job);
    default: return MIXPI_TYPED_ROWS(entropy_rows, any_real, on, job);
    }
}

static cudaError_t mixpi_cuda_launch_entropy_back(const Kernel &on, const EntropyBackJob &job) {
    const bool typed = job.wide && job.logits.dtype == job.dlogits.dtype;
    switch ((int)typed_rows(typed, job.cols, job.logits.dtype)) {
    case MIXP_F16: return MIXPI_TYPED_ROWS(entropy_back_rows, MIXP_F16, on, job);
    case MIXP_BF16: return MIXPI_TYPED_ROWS(entropy_back_rows, MIXP_BF16, on, job);
    default: return MIXPI_TYPED_ROWS(entropy_back_rows, any_real, on, job);
    }
}

static mixp_result mixpi_cuda_cross_entropy(const mixp_exec *x, const mixp_cross_entropy_args *k) {
    Kernel on(x);
    if (!on.state) return MIXP_ERR_ORDER;
    if (!is_real(k->logits.dtype)) return MIXP_ERR_DTYPE;

    /* Compute each row's loss. */
    EntropyJob job = mixpi_cuda_job<EntropyJob>(*k);
    job.fault = fault_flag(on.state);
    job.wide = is_wide(k->logits);
    job.losses = (double *)scratch_of(x, (size_t)k->rows * sizeof(double));
    if (!job.losses) return MIXP_ERR_MEMORY;
    mixp_result r = MIXP_OK;
    if (k->rows > 0) r = on.report("cross_entropy", mixpi_cuda_launch_entropy(on, job));
    if (r != MIXP_OK || k->each) return r;

    /* Reduce the losses to their mean, or to their sum. */
    return on.report("cross_entropy", MIXPI_LAUNCH(entropy_mean, 1, 1024, 0, on.stream, job));
}

static mixp_result mixpi_cuda_cross_entropy_backward(
    const mixp_exec *x, const mixp_cross_entropy_backward_args *k) {
    Kernel on(x);
    EntropyBackJob job = mixpi_cuda_job<EntropyBackJob>(*k);
    job.fault = fault_flag(on.state);
    job.wide = is_wide(k->dlogits) && is_wide(k->logits);
    if (!on.state) return MIXP_ERR_ORDER;
    if (!is_real(k->dlogits.dtype) || !is_real(k->dloss.dtype) || !is_real(k->logits.dtype))
        return MIXP_ERR_DTYPE;
    if (k->rows <= 0 || k->cols <= 0) return MIXP_OK;
    return on.report("cross_entropy_backward", mixpi_cuda_launch_entropy_back(on, job));
}

template <mixp_dtype D>
static cudaError_t mixpi_cuda_launch_both_of(const Kernel &on, const EntropyBothJob &job) {
    auto kernel = job.cols <= warp_cols ? entropy_both_rows<warp_size, D>
                                        : entropy_both_rows<team_threads, D>;
    const size_t room = job.kept ? (size_t)job.kept + beside_row : 0;
    cudaError_t e = make_room(on.state, (const void *)kernel, room);
    if (e != cudaSuccess) return e;

    /* If rows stay in shared memory, launch only as many blocks as run at once: each block loads
     * its next row while it computes. */
    const int64_t team = job.cols <= warp_cols ? warp_size : team_threads;
    const int64_t most = job.kept ? 2 * (int64_t)on.state->processors : INT64_MAX;
    const int64_t blocks = least(grid_for(job.rows * team, team_threads), most);
    return MIXPI_LAUNCH(kernel, (unsigned)blocks, team_threads, (size_t)job.kept, on.stream, job);
}
static cudaError_t mixpi_cuda_launch_both(const Kernel &on, const EntropyBothJob &job) {
    switch ((int)typed_rows(job.wide, job.cols, job.logits.dtype)) {
    case MIXP_F16: return mixpi_cuda_launch_both_of<MIXP_F16>(on, job);
    case MIXP_BF16: return mixpi_cuda_launch_both_of<MIXP_BF16>(on, job);
    case MIXP_F32: return mixpi_cuda_launch_both_of<MIXP_F32>(on, job);
    default: return mixpi_cuda_launch_both_of<any_real>(on, job);
    }
}

/* The bytes of a row that stays in shared memory, next to the memory for a block's sums. */
static int mixpi_cuda_kept_row(const EntropyBothJob &job, int most) {
    int64_t bytes = job.cols * dtype_bytes(job.logits.dtype);
    bool fits = job.wide && job.cols % 8 == 0 && bytes <= most - beside_row;
    return fits && job.cols > warp_cols ? (int)bytes : 0;
}

static mixp_result mixpi_cuda_cross_entropy_both(
    const mixp_exec *x, const mixp_cross_entropy_both_args *k) {
    Kernel on(x);
    EntropyBothJob job = mixpi_cuda_job<EntropyBothJob>(k->loss);
    if (!on.state) return MIXP_ERR_ORDER;
    if (!is_real(job.logits.dtype) || !is_real(k->dlogits.dtype)) return MIXP_ERR_DTYPE;
    if (k->dlogits.accumulate || mixpi_entropy_has_options(&k->loss)) return MIXP_ERR_ARGUMENT;

    /* Fill the job. */
    job.fault = fault_flag(on.state);
    job.dlogits = k->dlogits;
    job.scale = k->scale;
    job.share = k->share;
    job.wide = is_wide(job.logits) && is_wide(job.dlogits) && job.logits.dtype == job.dlogits.dtype;
    job.kept = mixpi_cuda_kept_row(job, on.state->most_shared);
    job.losses = (double *)scratch_of(x, (size_t)job.rows * sizeof(double));
    if (!job.losses) return MIXP_ERR_MEMORY;

    /* Count the rows, compute each row's loss and gradient, then the mean of the losses. */
    mixp_result r =
        on.report("cross_entropy", MIXPI_LAUNCH(entropy_count, 1, 1024, 0, on.stream, job));
    if (r == MIXP_OK && job.rows > 0)
        r = on.report("cross_entropy", mixpi_cuda_launch_both(on, job));
    if (r != MIXP_OK) return r;
    return on.report("cross_entropy",
        MIXPI_LAUNCH(entropy_mean, 1, 1024, 0, on.stream, (const EntropyJob &)job));
}
