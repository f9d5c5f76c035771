#pragma once
#include "rows.cu"
namespace {

/* --- layer norm, rms norm -------------------------------------------------------------- *
 *
 * Means and squares: each thread adds 8 elements in f32, then sums in two floats. The variance
 * comes from a second read, around the mean. Each sum is multiplied by 2^-n before it is added,
 * where 2^n is the least power of two not below cols, so that it overflows only if the mean does.
 */
struct NormJob : mixp_norm_args {       /* rms: beta is absent                               */
    bool  wide;
    float share;                /* 2^-n, by which each sum is multiplied                     */
    float back, rest;           /* 2^n / cols in f32, and the remainder of that rounding     */
};

/* The mean of a row, from the sum of its elements times s.share. */
__device__ inline float row_share(const NormJob &s, const LongSum &a) {
    if (!is_finite(a.sum)) return a.sum;
    return fmaf(a.sum, s.back, fmaf(a.sum, s.rest, a.lost * s.back));
}
/* 1 / sqrt(variance + eps), from the sum of the squares times s.share. */
__device__ inline float rstd_of(const NormJob &s, const LongSum &squares) {
    return 1.0f / sqrtf(row_share(s, squares) + s.eps);
}

template <int T> __device__ inline float row_mean(const NormJob &s, int64_t row, int rank) {
    LongSum sum = { 0.0f, 0.0f };
    float v[8];
    Part p;
    MIXPI_PARTS(p, s.cols, T, rank) {
        float part = 0.0f;
        get_part(s.a, row, p, s.wide, 0.0f, v);
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) part += v[k];
        add_long(sum, part * s.share);
    }
    return row_share(s, team_sum<T>(sum));
}
template <int T>
__device__ inline float row_rstd(const NormJob &s, int64_t row, int rank, float mean) {
    LongSum sum = { 0.0f, 0.0f };
    float v[8];
    Part p;
    MIXPI_PARTS(p, s.cols, T, rank) {
        float part = 0.0f;
        get_part(s.a, row, p, s.wide, mean, v);
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) part = fmaf(v[k] - mean, v[k] - mean, part);
        add_long(sum, part * s.share);
    }
    return rstd_of(s, team_sum<T>(sum));
}

template <int T>
__global__ void __launch_bounds__(team_threads, 3) norm_rows(const __grid_constant__ NormJob s) {
    const int rank = (int)threadIdx.x % T;
    for (int64_t r = team_first<T>(); r < s.rows; r += team_step<T>()) {
        /* Find the row's mean and deviation, for which it is read twice. */
        const float mean = s.rms ? 0.0f : row_mean<T>(s, r * s.cols, rank);
        const float rstd = row_rstd<T>(s, r * s.cols, rank, mean);
        if (rank == 0 && !s.rms) s.mean[r] = mean;
        if (rank == 0) s.rstd[r] = rstd;

        /* Read the row again, and write its norm. */
        Part p;
        MIXPI_PARTS(p, s.cols, T, rank) {
            float v[8], g[8], b[8];
            get_part(s.a, r * s.cols, p, s.wide, 0.0f, v);
            get_part_or(s.gamma, p, s.wide, 1.0f, g);
            get_part_or(s.beta, p, s.wide, 0.0f, b);
            MIXPI_UNROLL
            for (int k = 0; k < 8; k++) v[k] = fmaf((v[k] - mean) * rstd, g[k], b[k]);
            put_part(s.y, r * s.cols, p, s.wide, v);
        }
    }
}

/* A row of up to 1,024 elements stays in the registers of its warp and is read once. The compiler
 * knows its dtype; gamma is f32. The sums have the same order, so the bits are the same. If B is a
 * dtype, b is added first, and the norm is computed from the stored sum, which has a's dtype. */
const mixp_dtype no_second = MIXP_DTYPE_COUNT;

template <mixp_dtype B, mixp_dtype In>
__device__ inline void add_second(const NormJob &s, int64_t at, float *v) {
    float b[8];
    plain_get8<B>(s.b.data, at, b);
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) v[k] += b[k];
    plain_put8<In>(s.sum.data, at, v);
    plain_round<In>(v);
}
template <mixp_dtype B, mixp_dtype In, int parts>
__device__ inline void read_row(const NormJob &s, int64_t row, int lane, float v[][8]) {
    MIXPI_UNROLL
    for (int q = 0; q < parts; q++) {
        int64_t col = 8 * (int64_t)(q * warp_size + lane);
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) v[q][k] = 0.0f;
        if (col < s.cols) plain_get8<In>(s.a.data, row + col, v[q]);
        if constexpr (B != no_second)
            if (col < s.cols) add_second<B, In>(s, row + col, v[q]);
    }
}
template <int parts> __device__ inline float kept_mean(const NormJob &s, const float v[][8]) {
    LongSum sum = { 0.0f, 0.0f };
    MIXPI_UNROLL
    for (int q = 0; q < parts; q++) {
        float part = 0.0f;
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) part += v[q][k];
        add_long(sum, part * s.share);
    }
    return row_share(s, warp_sum(sum));
}
template <int parts>
__device__ inline float kept_rstd(const NormJob &s, int lane, const float v[][8], float mean) {
    LongSum sum = { 0.0f, 0.0f };
    MIXPI_UNROLL
    for (int q = 0; q < parts; q++) {
        float part = 0.0f;
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) part = fmaf(v[q][k] - mean, v[q][k] - mean, part);
        if (8 * (int64_t)(q * warp_size + lane) < s.cols) add_long(sum, part * s.share);
    }
    return rstd_of(s, warp_sum(sum));
}
template <mixp_dtype Out>
__device__ inline void put_normed(
    const NormJob &s, int64_t row, int64_t col, float *v, float mean, float rstd) {
    float g[8], b[8] = { 0, 0, 0, 0, 0, 0, 0, 0 };
    plain_get8<MIXP_F32>(s.gamma.data, col, g);
    if (s.beta.data) plain_get8<MIXP_F32>(s.beta.data, col, b);
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) v[k] = fmaf((v[k] - mean) * rstd, g[k], b[k]);
    plain_put8<Out>(s.y.data, row + col, v);
}

template <mixp_dtype B, mixp_dtype In, mixp_dtype Out, int parts>
__global__ void __launch_bounds__(team_threads, parts == 4 ? 2 : 3)
    norm_kept_rows(const __grid_constant__ NormJob s) {
    const int lane = (int)threadIdx.x % warp_size;
    for (int64_t r = team_first<warp_size>(); r < s.rows; r += team_step<warp_size>()) {
        /* Read the row, and find its mean and deviation in registers. */
        float v[parts][8];
        read_row<B, In, parts>(s, r * s.cols, lane, v);
        const float mean = s.rms ? 0.0f : kept_mean<parts>(s, v);
        const float rstd = kept_rstd<parts>(s, lane, v, mean);
        if (lane == 0 && !s.rms) s.mean[r] = mean;
        if (lane == 0) s.rstd[r] = rstd;

        /* Write the norm. */
        MIXPI_UNROLL
        for (int q = 0; q < parts; q++) {
            int64_t col = 8 * (int64_t)(q * warp_size + lane);
            if (col < s.cols) put_normed<Out>(s, r * s.cols, col, v[q], mean, rstd);
        }
    }
}

typedef void (*NormKernel)(NormJob s);

template <mixp_dtype B, mixp_dtype In, mixp_dtype Out> inline NormKernel norm_kept(int64_t cols) {
    return cols <= 512   ? norm_kept_rows<B, In, Out, 2>
           : cols <= 768 ? norm_kept_rows<B, In, Out, 3>
                         : norm_kept_rows<B, In, Out, 4>;
}
/* Does a row stay in registers? */
inline bool is_kept_norm(const NormJob &s) {
    if (!s.wide || s.cols % 8 || s.cols > warp_cols) return false;
    if (!s.gamma.data || s.gamma.dtype != MIXP_F32) return false;
    return !s.beta.data || s.beta.dtype == MIXP_F32;
}
/* The kernel for these dtypes and that length, or NULL. */
inline NormKernel norm_kernel(const NormJob &s) {
    mixp_dtype in = s.a.dtype, out = s.y.dtype;
    if (!is_kept_norm(s)) return NULL;
    if (in == MIXP_BF16 && out == in) return norm_kept<no_second, MIXP_BF16, MIXP_BF16>(s.cols);
    if (in == MIXP_F16 && out == in) return norm_kept<no_second, MIXP_F16, MIXP_F16>(s.cols);
    if (in != MIXP_F32) return NULL;
    return out == MIXP_F32    ? norm_kept<no_second, MIXP_F32, MIXP_F32>(s.cols)
           : out == MIXP_BF16 ? norm_kept<no_second, MIXP_F32, MIXP_BF16>(s.cols)
                              : norm_kept<no_second, MIXP_F32, MIXP_F16>(s.cols);
}
/* norm_kernel for add_norm. Covers the dtypes of levels 0 to 2, where norms write the operands of
 * products. */
inline NormKernel add_norm_kernel(const NormJob &s) {
    mixp_dtype in = s.a.dtype, b = s.b.dtype;
    if (!is_kept_norm(s) || s.sum.dtype != in || s.y.dtype != b) return NULL;
    if (in == MIXP_BF16 && b == in) return norm_kept<MIXP_BF16, MIXP_BF16, MIXP_BF16>(s.cols);
    if (in == MIXP_F16 && b == in) return norm_kept<MIXP_F16, MIXP_F16, MIXP_F16>(s.cols);
    if (in != MIXP_F32) return NULL;
    return b == MIXP_F32    ? norm_kept<MIXP_F32, MIXP_F32, MIXP_F32>(s.cols)
           : b == MIXP_BF16 ? norm_kept<MIXP_BF16, MIXP_F32, MIXP_BF16>(s.cols)
                            : norm_kept<MIXP_F16, MIXP_F32, MIXP_F16>(s.cols);
}

/* The backward pass: a block takes a slice of consecutive rows, so its threads keep their columns'
 * parts of dgamma and dbeta in registers. A second kernel adds the slices in order. Rows of more
 * than 8 elements per thread of a block are read again for the remaining columns. */
struct NormBackJob : mixp_norm_backward_args {
    int64_t per;                /* rows of a slice                                         */
    float  *partial;            /* [slice][2][cols], or NULL                               */
    bool    wide;
};
const int     back_threads = 512, join_cols = 32, join_rows = 32;
const int64_t most_slices = 1024;

/* dy, h = (a - mean) rstd and d = dy gamma of row r. */
__device__ inline void back_part(
    const NormBackJob &s, int64_t r, const Part &p, float *dy, float *h, float *d) {
    float mean = s.rms ? 0.0f : s.mean[r], rstd = s.rstd[r];
    get_part(s.a, r * s.cols, p, s.wide, mean, h);
    get_part(s.dy, r * s.cols, p, s.wide, 0.0f, dy);
    get_part_or(s.gamma, p, s.wide, 1.0f, d);
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) {
        h[k] = (h[k] - mean) * rstd;
        d[k] *= dy[k];
    }
}

/* Sums a and b over the block. parts: 64 floats that the previous call did not use. */
__device__ inline void block_sums(float &a, float &b, float *parts) {
    int lane = (int)threadIdx.x % warp_size, warp = (int)threadIdx.x / warp_size;
    bool there = lane < (int)blockDim.x / warp_size;
    a = warp_sum(a);
    b = warp_sum(b);
    if (lane == 0) {
        parts[warp] = a;
        parts[32 + warp] = b;
    }
    __syncthreads();
    a = warp_sum(there ? parts[lane] : 0.0f);
    b = warp_sum(there ? parts[32 + lane] : 0.0f);
}

__device__ inline void add_columns(float *dgamma, float *dbeta, const float *dy, const float *h) {
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) {
        dgamma[k] = fmaf(dy[k], h[k], dgamma[k]);
        dbeta[k] += dy[k];
    }
}
__device__ inline void put_columns(
    const NormBackJob &s, const Part &p, const float *dgamma, const float *dbeta) {
    mixp_out to = { s.partial, MIXP_F32, 0 };
    int64_t at = (int64_t)blockIdx.x * 2 * s.cols;
    put_part(to, at, p, true, dgamma);
    put_part(to, at + s.cols, p, true, dbeta);
}

/* Writes one part of da = rstd (d - mean(d) - h mean(d h)). v: d. */
__device__ inline void put_back(
    const NormBackJob &s, int64_t r, const Part &p, const float *h, float *v, float m1, float m2) {
    float rstd = s.rstd[r];
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) v[k] = fmaf(h[k], m2, v[k] + m1) * rstd;
    add_part(s.da, r * s.cols, p, s.wide, v);
    if (s.db.data) put_part(s.db, r * s.cols, p, s.wide, v);
}

__global__ void __launch_bounds__(back_threads)
    norm_back_slices(const __grid_constant__ NormBackJob s) {
    MIXPI_SHARED(float, parts, 128);
    const int team = (int)blockDim.x, rank = (int)threadIdx.x;
    const int64_t panel = 8 * (int64_t)team, first = (int64_t)blockIdx.x * s.per;
    const int64_t end = least(first + s.per, s.rows);
    float dy[8], h[8], d[8], dgamma[8] = { 0 }, dbeta[8] = { 0 };
    Part p;
    for (int64_t r = first; r < end; r++) {
        /* Sum d and d h over the row; add its first panel to dgamma and dbeta. */
        float sum = 0.0f, dot = 0.0f, scale = -1.0f / (float)s.cols;
        MIXPI_PARTS(p, s.cols, team, rank) {
            back_part(s, r, p, dy, h, d);
            MIXPI_UNROLL
            for (int k = 0; k < 8; k++) {
                sum += d[k];
                dot = fmaf(d[k], h[k], dot);
            }
            if (at_ == 0) add_columns(dgamma, dbeta, dy, h);
        }
        if (!s.da.data) continue;
        block_sums(sum, dot, parts + (r & 1) * 64);
        if (s.rms) sum = 0.0f;

        /* Write the row's gradient; a row of one panel is still in registers. */
        MIXPI_PARTS(p, s.cols, team, rank) {
            if (s.cols > panel) back_part(s, r, p, dy, h, d);
            put_back(s, r, p, h, d, sum * scale, dot * scale);
        }
    }

    /* Store the slice's part of dgamma and dbeta, and compute it for the remaining panels. */
    if (!s.partial) return;
    put_columns(s, part_of(s.cols, 0, team, rank), dgamma, dbeta);
    for (int64_t start = panel; start < s.cols; start += panel) {
        p = part_of(s.cols, start, team, rank);
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) dgamma[k] = dbeta[k] = 0.0f;
        for (int64_t r = first; r < end; r++) {
            back_part(s, r, p, dy, h, d);
            add_columns(dgamma, dbeta, dy, h);
        }
        put_columns(s, p, dgamma, dbeta);
    }
}

/* The backward pass for rows of 8 columns per thread and known dtypes. The next row is fetched
 * while the current row is computed. The sums have the same order. */
const int kept_threads = 128;

template <mixp_dtype Dy, mixp_dtype A> struct BackRow {
    Raw8<Dy> dy;                /* 0 beyond the row                                        */
    Raw8<A>  a;
    float    mean, rstd;
};

template <mixp_dtype Dy, mixp_dtype A>
__device__ inline void read_back(
    BackRow<Dy, A> &row, const NormBackJob &s, int64_t r, int64_t col) {
    row.mean = s.rms ? 0.0f : s.mean[r];
    row.rstd = s.rstd[r];
    if (col >= s.cols) return;
    row.a = raw_get8<A>(s.a.data, r * s.cols + col);
    row.dy = raw_get8<Dy>(s.dy.data, r * s.cols + col);
}

template <mixp_dtype Dy, mixp_dtype A>
__global__ void __launch_bounds__(kept_threads, 6)
    norm_back_kept(const __grid_constant__ NormBackJob s) {
    MIXPI_SHARED(float, parts, 128);
    const int64_t first = (int64_t)blockIdx.x * s.per, end = least(first + s.per, s.rows);

    /* Read the columns' gamma, and begin to read the first row. */
    const int64_t col = 8 * (int64_t)threadIdx.x;
    const Part p = part_of(s.cols, 0, (int)blockDim.x, (int)threadIdx.x);
    float h[8], d[8], gamma[8], dgamma[8] = { 0 }, dbeta[8] = { 0 };
    BackRow<Dy, A> next;
    memset((void *)&next, 0, sizeof next);
    get_part_or(s.gamma, p, s.wide, 1.0f, gamma);
    if (first < end) read_back(next, s, first, col);

    for (int64_t r = first; r < end; r++) {
        /* Use the row, and begin to read the next one. */
        float sum = 0.0f, dot = 0.0f, scale = -1.0f / (float)s.cols, rstd = next.rstd;
        plain_values<A>(next.a, h);
        plain_values<Dy>(next.dy, d);
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) h[k] = (h[k] - next.mean) * rstd;
        if (r + 1 < end) read_back(next, s, r + 1, col);

        /* Add the row to dgamma and dbeta, and sum d and d h over it. */
        add_columns(dgamma, dbeta, d, h);
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) {
            d[k] *= gamma[k];
            sum += d[k];
            dot = fmaf(d[k], h[k], dot);
        }
        if (!s.da.data) continue;
        block_sums(sum, dot, parts + (r & 1) * 64);
        if (s.rms) sum = 0.0f;

        /* Write the row's gradient. */
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) d[k] = fmaf(h[k], dot * scale, d[k] + sum * scale) * rstd;
        if (col >= s.cols) continue;
        typed_add_part<A>(s.da, r * s.cols, p, s.wide, d);
        if constexpr (A == MIXP_F32)
            if (s.db.data) plain_put8<Dy>(s.db.data, r * s.cols + col, d);
    }
    if (s.partial) put_columns(s, p, dgamma, dbeta);
}

typedef void (*NormBackKernel)(NormBackJob s);

inline NormBackKernel norm_back_kernel(const NormBackJob &s) {
    mixp_dtype a = s.a.dtype, dy = s.dy.dtype;
    bool fits = s.wide && s.cols % 8 == 0 && s.cols <= 8 * kept_threads;
    if (!fits || (s.da.data && s.da.dtype != a)) return norm_back_slices;
    if (s.db.data && s.db.dtype != dy) return norm_back_slices;
    if (a == MIXP_BF16 && dy == a) return norm_back_kept<MIXP_BF16, MIXP_BF16>;
    if (a == MIXP_F16 && dy == a) return norm_back_kept<MIXP_F16, MIXP_F16>;
    if (a != MIXP_F32) return norm_back_slices;
    return dy == MIXP_F32    ? norm_back_kept<MIXP_F32, MIXP_F32>
           : dy == MIXP_BF16 ? norm_back_kept<MIXP_BF16, MIXP_F32>
                             : norm_back_kept<MIXP_F16, MIXP_F32>;
}

/* Adds the slices: 32 sums for each column of a warp, then these sums in order. */
__global__ void __launch_bounds__(join_cols *join_rows)
    norm_back_join(const __grid_constant__ NormBackJob s, int64_t slices) {
    MIXPI_SHARED(float, sums, join_rows *(join_cols + 1));
    const mixp_out to = blockIdx.y ? s.dbeta : s.dgamma;
    const int lane = (int)threadIdx.x % join_cols, own = (int)threadIdx.x / join_cols;
    const int64_t col = (int64_t)blockIdx.x * join_cols + lane;
    if (!to.data) return;

    /* Add every 32nd slice of the column. */
    float sum = 0.0f;
    for (int64_t i = own; i < slices && col < s.cols; i += join_rows)
        sum += s.partial[(2 * i + blockIdx.y) * s.cols + col];
    sums[own * (join_cols + 1) + lane] = sum;
    __syncthreads();

    /* Add the column's 32 sums in order. */
    if (own || col >= s.cols) return;
    for (int i = 1; i < join_rows; i++) sum += sums[i * (join_cols + 1) + lane];
    if (to.accumulate) sum += get1(as_in(to), col);
    put1(to, col, sum);
}

}   /* namespace */

static NormJob mixpi_cuda_norm_job(const mixp_norm_args *k) {
    NormJob job = mixpi_cuda_job<NormJob>(*k);
    double power = 1.0;
    while (power < (double)k->cols) power *= 2.0;
    job.share = (float)(1.0 / power);
    job.back = k->cols > 0 ? (float)(power / (double)k->cols) : 1.0f;
    job.rest = k->cols > 0 ? (float)(power / (double)k->cols - (double)job.back) : 0.0f;
    if (k->rms) job.beta.data = NULL;
    job.wide = is_wide(k->y) && is_wide(k->a) && is_wide(k->gamma) && is_wide(job.beta);
    return job;
}
static mixp_result mixpi_cuda_norm_check(const NormJob &job) {
    if (!is_real(job.y.dtype) || !is_real(job.a.dtype) || !is_real_or_absent(job.gamma) ||
        !is_real_or_absent(job.beta))
        return MIXP_ERR_DTYPE;
    return job.y.accumulate ? MIXP_ERR_ARGUMENT : MIXP_OK;
}

static mixp_result mixpi_cuda_norm(const mixp_exec *x, const mixp_norm_args *k) {
    Kernel on(x);
    NormJob job = mixpi_cuda_norm_job(k);
    mixp_result r = mixpi_cuda_norm_check(job);
    if (!on.state) return MIXP_ERR_ORDER;
    if (r != MIXP_OK) return r;
    if (k->rows <= 0 || k->cols <= 0) return MIXP_OK;
    NormKernel kept = norm_kernel(job);
    if (kept)
        return on.report("norm", MIXPI_LAUNCH(kept, grid_for(k->rows * warp_size, team_threads),
                                     team_threads, 0, on.stream, job));
    return on.report("norm", MIXPI_ROWS(norm_rows, on, job));
}

/* Computes the sum in a separate kernel, then its norm. */
static mixp_result mixpi_cuda_add_then_norm(const mixp_exec *x, const mixp_norm_args *k) {
    mixp_binary_args sum;
    memset((void *)&sum, 0, sizeof sum);
    sum.op = MIXP_BINARY_ADD;
    sum.rank = 1;
    sum.shape[0] = k->rows * k->cols;
    sum.a_strides[0] = sum.b_strides[0] = 1;
    sum.a = k->a;
    sum.b = k->b;
    sum.y = k->sum;
    mixp_result r = mixpi_cuda_binary(x, &sum);
    if (r != MIXP_OK) return r;

    mixp_norm_args norm = *k;
    norm.a = as_in(k->sum);
    return mixpi_cuda_norm(x, &norm);
}

static mixp_result mixpi_cuda_add_norm(const mixp_exec *x, const mixp_norm_args *k) {
    Kernel on(x);
    NormJob job = mixpi_cuda_norm_job(k);
    mixp_result r = mixpi_cuda_norm_check(job);
    job.wide = job.wide && is_wide(k->b) && is_wide(k->sum);
    if (!on.state) return MIXP_ERR_ORDER;
    if (!is_real(k->b.dtype) || !is_real(k->sum.dtype)) return MIXP_ERR_DTYPE;
    if (r != MIXP_OK || k->sum.accumulate) return r != MIXP_OK ? r : MIXP_ERR_ARGUMENT;
    if (k->rows <= 0 || k->cols <= 0) return MIXP_OK;
    NormKernel kept = add_norm_kernel(job);
    if (!kept) return mixpi_cuda_add_then_norm(x, k);
    return on.report("add_norm", MIXPI_LAUNCH(kept, grid_for(k->rows * warp_size, team_threads),
                                     team_threads, 0, on.stream, job));
}

static mixp_result mixpi_cuda_norm_backward(const mixp_exec *x, const mixp_norm_backward_args *k) {
    Kernel on(x);
    if (!on.state) return MIXP_ERR_ORDER;
    if (!is_real(k->dy.dtype) || !is_real(k->a.dtype) || !is_real_or_absent(k->gamma) ||
        !is_real_or_absent(k->da) || !is_real_or_absent(k->dgamma) ||
        !is_real_or_absent(k->dbeta) || !is_real_or_absent(k->db))
        return MIXP_ERR_DTYPE;
    if (k->db.data && (!k->da.data || k->da.dtype != MIXP_F32 || k->db.accumulate))
        return MIXP_ERR_ARGUMENT;

    /* Cut the rows into slices; with sums of columns, a slice has at least 4 rows. */
    NormBackJob job = mixpi_cuda_job<NormBackJob>(*k);
    const bool sums = k->dgamma.data || k->dbeta.data;
    job.wide =
        is_wide(k->da) && is_wide(k->dy) && is_wide(k->a) && is_wide(k->gamma) && is_wide(k->db);
    job.per = ceil_div(k->rows, most_slices);
    if (sums && job.per < 4) job.per = 4;
    const int64_t slices = ceil_div(k->rows, job.per > 0 ? job.per : 1);
    if (sums) job.partial = (float *)scratch_of(x, (size_t)(slices * 2 * k->cols) * sizeof(float));
    if (sums && !job.partial) return MIXP_ERR_MEMORY;
    if (k->cols <= 0) return MIXP_OK;

    /* Compute da and each slice's sums of columns. */
    mixp_result r = MIXP_OK;
    if (k->rows > 0 && (sums || k->da.data)) {
        const int64_t threads = least(round_up(ceil_div(k->cols, 8), warp_size), back_threads);
        r = on.report("norm_backward", MIXPI_LAUNCH(norm_back_kernel(job), (unsigned)slices,
                                           (unsigned)threads, 0, on.stream, job));
    }
    if (r != MIXP_OK || !sums) return r;

    /* Add the slices' sums. */
    return on.report("norm_backward",
        MIXPI_LAUNCH(norm_back_join, dim3((unsigned)ceil_div(k->cols, join_cols), 2),
            join_cols * join_rows, 0, on.stream, job, slices));
}
