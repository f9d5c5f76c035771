#pragma once
#include "sums.cu"
/* ==== 4. ROWS ============================================================== >>rows ====
 *
 * A team computes a row: a warp for short rows, otherwise a block. Rows are read again rather than
 * kept; the second read comes from the cache. A thread reads the same elements of a row each time,
 * so outputs may be inputs where the table allows it. Which elements a thread reads depends only
 * on the shape, and so do the bits of every sum.
 *
 * Results differ from the CPU's by the order of sums in f32 and by e^x, whose relative error is
 * below 2^-22 (1 + |x|). Embeddings give the CPU's bits.
 */
namespace {

/* --- a block's scans ------------------------------------------------------------------- */

/* The sum of v over this thread and all earlier threads. *all: the sum over the block. */
template <class T> __device__ inline T block_scan(T v, T *all) {
    MIXPI_SHARED(T, part, 32);
    int lane = (int)threadIdx.x % warp_size, warp = (int)threadIdx.x / warp_size;
    T before = 0, sum = 0;
    for (int k = 1; k < warp_size; k *= 2) {
        T u = __shfl_up_sync(0xFFFFFFFFu, v, (unsigned)k);
        if (lane >= k) v += u;
    }
    if (lane == warp_size - 1) part[warp] = v;
    __syncthreads();
    for (int i = 0; i < (int)blockDim.x / warp_size; i++) {
        if (i < warp) before += part[i];
        sum += part[i];
    }
    __syncthreads();
    *all = sum;
    return before + v;
}

/* The minimum over the block. */
template <class T> __device__ inline T block_min(T v) {
    MIXPI_SHARED(T, part, 32);
    int lane = (int)threadIdx.x % warp_size, warp = (int)threadIdx.x / warp_size;
    for (int k = 16; k; k /= 2) {
        T u = __shfl_xor_sync(0xFFFFFFFFu, v, k);
        v = u < v ? u : v;
    }
    if (lane == 0) part[warp] = v;
    __syncthreads();
    for (int i = 0; i < (int)blockDim.x / warp_size; i++) v = part[i] < v ? part[i] : v;
    __syncthreads();
    return v;
}

/* An array that a step updates in place. */
__device__ inline mixp_out array_at(void *data, mixp_dtype dtype) {
    mixp_out a = { data, dtype, 0 };
    return a;
}
__host__ __device__ inline bool is_aligned(const void *p) { return (uintptr_t)p % 16 == 0; }

/* --- teams ----------------------------------------------------------------------------- */

const int     team_threads = 256;
const int64_t warp_cols = 1024;             /* rows up to this length are a warp's         */

template <int T> __device__ inline int64_t team_first() {
    return (int64_t)blockIdx.x * (team_threads / T) + threadIdx.x / T;
}
template <int T> __device__ inline int64_t team_step() {
    return (int64_t)gridDim.x * (team_threads / T);
}

template <int T, class V> __device__ inline V team_sum(V v) {
    return T == warp_size ? warp_sum(v) : block_sum(v);
}
template <int T> __device__ inline float team_max(float v) {
    return T == warp_size ? warp_max(v) : block_max(v);
}

/* A sum in two floats, 48 bits together: `lost` is what the additions to `sum` rounded away. Rows
 * are summed so and not in double, because most GPUs (T4, RTX, L40S) have one double unit for 32 or
 * 64 f32 units: a norm's row would take longer for its arithmetic than for its memory. */
struct LongSum { float sum, lost; };

/* The error of a + b is exact: Knuth, The Art of Computer Programming, 2, 4.2.2, theorem B. */
__device__ inline void add_long(LongSum &a, float b) {
    float sum = a.sum + b, rounded = sum - a.sum;
    a.lost += (a.sum - (sum - rounded)) + (b - rounded);
    a.sum = sum;
}
__device__ inline void add_long(LongSum &a, const LongSum &b) {
    a.lost += b.lost;
    add_long(a, b.sum);
}
__device__ inline LongSum warp_sum(LongSum v) {
    MIXPI_UNROLL
    for (int k = 16; k; k /= 2) {
        LongSum other;
        other.sum = __shfl_xor_sync(0xFFFFFFFFu, v.sum, k);
        other.lost = __shfl_xor_sync(0xFFFFFFFFu, v.lost, k);
        add_long(v, other);
    }
    return v;
}
__device__ inline LongSum block_sum(LongSum v) {
    MIXPI_SHARED(LongSum, part, 32);
    const LongSum zero = { 0.0f, 0.0f };
    int lane = (int)threadIdx.x % warp_size, warp = (int)threadIdx.x / warp_size;
    v = warp_sum(v);
    if (lane == 0) part[warp] = v;
    __syncthreads();
    v = warp_sum(lane < (int)blockDim.x / warp_size ? part[lane] : zero);
    __syncthreads();
    return v;
}
/* A sum that is Inf or NaN has lost nothing that counts. */
__device__ inline bool is_finite(float x) {
    return (mixp_bits_of_f32(x) & 0x7F800000u) != 0x7F800000u;
}
__device__ inline float value_of(const LongSum &a) {
    return is_finite(a.sum) ? a.sum + a.lost : a.sum;
}

/* Launches kernel<T> over rows. A job holds the arguments of the table's kernel, and what the
 * threads need in addition. */
#define MIXPI_ROWS(kernel, k, job)                                                        \
    (job.cols <= warp_cols                                                                \
     ? MIXPI_LAUNCH(kernel<warp_size>, grid_for(job.rows * warp_size, team_threads),      \
                    team_threads, 0, k.stream, job)                                       \
     : MIXPI_LAUNCH(kernel<team_threads>, grid_for(job.rows * team_threads, team_threads),  \
                    team_threads, 0, k.stream, job))

/* MIXPI_ROWS for kernel<T, D>. D: the dtype of all its large arrays, or any_real. */
#define MIXPI_TYPED_ROWS(kernel, D, k, job)                                               \
    (job.cols <= warp_cols                                                                \
     ? MIXPI_LAUNCH((kernel<warp_size, D>), grid_for(job.rows * warp_size, team_threads), \
                    team_threads, 0, k.stream, job)                                       \
     : MIXPI_LAUNCH((kernel<team_threads, D>),                                            \
                    grid_for(job.rows * team_threads, team_threads), team_threads, 0,     \
                    k.stream, job))

/* The 8 or fewer elements of a row that a thread has in one turn of its team. They are neighbours
 * if the row length is a multiple of 8; otherwise they lie a team's size apart. */
struct Part {
    int64_t col;
    int     n, step;
};

__device__ inline Part part_of(int64_t cols, int64_t start, int team, int rank) {
    Part p;
    if (cols % 8 == 0) {
        p.col = start + 8 * (int64_t)rank;
        p.step = 1;
        p.n = p.col < cols ? 8 : 0;
    } else {
        p.col = start + rank;
        p.step = team;
        p.n = p.col < cols ? (int)least(8, ceil_div(cols - p.col, team)) : 0;
    }
    return p;
}

/* Reads a[row + ...]; elements out of range read as `missing`. */
__device__ inline void get_part(const mixp_in &a, int64_t row, const Part &p, bool wide,
                                float missing, float *v) {
    int64_t i = row + p.col;
    if (wide && p.step == 1 && p.n == 8) {
        get8(a, i, v);
        return;
    }
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) v[k] = k < p.n ? get1(a, i + k * p.step) : missing;
}
/* As put8, but always one 16-byte store: the compiler would merge a plain store with the scalar
 * path's stores. */
__device__ inline void put8_whole(const mixp_out &a, int64_t i, const float *v) {
    if (a.dtype == MIXP_F32) {
        float4 *p = (float4 *)(void *)((float *)a.data + i);
        __stwb(p, make_float4(v[0], v[1], v[2], v[3]));
        __stwb(p + 1, make_float4(v[4], v[5], v[6], v[7]));
    } else {
        __stwb((uint4 *)(void *)((uint16_t *)a.data + i),
               make_uint4(low_pair(a.dtype, v[0], v[1]), low_pair(a.dtype, v[2], v[3]),
                          low_pair(a.dtype, v[4], v[5]), low_pair(a.dtype, v[6], v[7])));
    }
}
/* a = v, whatever a.accumulate says. */
__device__ inline void put_part(const mixp_out &a, int64_t row, const Part &p, bool wide,
                                const float *v) {
    int64_t i = row + p.col;
    if (wide && p.step == 1 && p.n == 8) {
        put8_whole(a, i, v);
        return;
    }
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++)
        if (k < p.n) put1(a, i + k * p.step, v[k]);
}
/* a = v, or += v where a accumulates. */
__device__ inline void add_part(const mixp_out &a, int64_t row, const Part &p, bool wide,
                                float *v) {
    float had[8];
    if (a.accumulate) {
        get_part(as_in(a), row, p, wide, 0.0f, had);
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) v[k] += had[k];
    }
    put_part(a, row, p, wide, v);
}
/* The same for an array whose dtype the compiler knows, or any_real: numbers of arithmetic. */
const mixp_dtype any_real = MIXP_DTYPE_COUNT;

template <mixp_dtype D>
__device__ inline void plain_get_part(const mixp_in &a, int64_t row, const Part &p, bool wide,
                                      float missing, float *v) {
    if constexpr (D == any_real) get_part(a, row, p, wide, missing, v);
    else if (wide && p.step == 1 && p.n == 8) plain_get8<D>(a.data, row + p.col, v);
    else get_part(mixpi_in(a.data, D), row, p, false, missing, v);
}
template <mixp_dtype D>
__device__ inline void plain_add_part(const mixp_out &a, int64_t row, const Part &p, bool wide,
                                      float *v) {
    float had[8];
    if (a.accumulate) {
        plain_get_part<D>(as_in(a), row, p, wide, 0.0f, had);
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) v[k] += had[k];
    }
    if constexpr (D == any_real) put_part(a, row, p, wide, v);
    else if (wide && p.step == 1 && p.n == 8) plain_put8<D>(a.data, row + p.col, v);
    else put_part(mixpi_out_to(a.data, D, 0), row, p, false, v);
}

/* An absent array reads as `otherwise` everywhere. */
__device__ inline void get_part_or(const mixp_in &a, const Part &p, bool wide, float otherwise,
                                   float *v) {
    if (a.data) {
        get_part(a, 0, p, wide, otherwise, v);
        return;
    }
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) v[k] = otherwise;
}

/* Goes through a row, a Part p at a time. */
#define MIXPI_PARTS(p, cols, team, rank)                                                  \
    for (int64_t at_ = 0; at_ < (cols) && (p = part_of(cols, at_, team, rank), true);     \
         at_ += 8 * (int64_t)(team))

/* e^x; 0 where e^x is below 2^-126 (x < -87.3). */
__device__ inline float exp_of(float x) { return exp2_approx(x * 1.44269504f); }
__device__ inline float minus_infinity() { return mixp_f32_of_bits(0xFF800000u); }
__device__ inline float not_a_number() { return mixp_f32_of_bits(0x7FC00000u); }

/* --- softmax --------------------------------------------------------------------------- */

/* The largest element so far, and the sum of e^(x - top). A NaN appears only in the sum. */
struct Exponents { float top, sum; };

/* The number to subtract before e^x: 0 for a top of -Inf, because e^(-Inf - -Inf) is NaN. */
__device__ inline float base_of(float top) { return top > minus_infinity() ? top : 0.0f; }

__device__ inline void add_exponents(Exponents &e, const float *v) {
    float top = e.top, base;
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) top = fmaxf(top, v[k]);
    base = base_of(top);
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
template <int T, mixp_dtype D = any_real>
__device__ inline Exponents row_exponents(const mixp_in &a, int64_t row, int64_t cols, bool wide) {
    int rank = (int)threadIdx.x % T;
    Exponents e = { minus_infinity(), 0.0f };
    float v[8];
    Part p;
    MIXPI_PARTS(p, cols, T, rank) {
        plain_get_part<D>(a, row, p, wide, minus_infinity(), v);
        add_exponents(e, v);
    }
    return team_exponents<T>(e);
}

struct SoftmaxJob : mixp_softmax_args { bool wide; };
struct SoftmaxBackJob : mixp_softmax_backward_args { bool wide; };

template <int T>
__global__ void __launch_bounds__(team_threads, 3)
    softmax_rows(const __grid_constant__ SoftmaxJob s) {
    int rank = (int)threadIdx.x % T;
    Part p;
    for (int64_t r = team_first<T>(); r < s.rows; r += team_step<T>()) {
        Exponents e = row_exponents<T>(s.a, r * s.cols, s.cols, s.wide);
        float log_sum = logf(e.sum), factor = 1.0f / e.sum, v[8];
        MIXPI_PARTS(p, s.cols, T, rank) {
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

/* da = y (dy - sum(dy y)), or dy - e^y sum(dy) for the log. */
template <int T>
__global__ void __launch_bounds__(team_threads, 3)
    softmax_back_rows(const __grid_constant__ SoftmaxBackJob s) {
    int rank = (int)threadIdx.x % T;
    Part p;
    for (int64_t r = team_first<T>(); r < s.rows; r += team_step<T>()) {
        float dy[8], y[8], total;
        LongSum sum = { 0.0f, 0.0f };
        MIXPI_PARTS(p, s.cols, T, rank) {
            float part = 0.0f;
            get_part(s.dy, r * s.cols, p, s.wide, 0.0f, dy);
            get_part(s.y, r * s.cols, p, s.wide, 0.0f, y);
            MIXPI_UNROLL
            for (int k = 0; k < 8; k++) part = s.log_of ? part + dy[k] : fmaf(dy[k], y[k], part);
            add_long(sum, part);
        }
        total = value_of(team_sum<T>(sum));
        MIXPI_PARTS(p, s.cols, T, rank) {
            get_part(s.dy, r * s.cols, p, s.wide, 0.0f, dy);
            get_part(s.y, r * s.cols, p, s.wide, 0.0f, y);
            MIXPI_UNROLL
            for (int k = 0; k < 8; k++)
                dy[k] = s.log_of ? fmaf(exp_of(y[k]), -total, dy[k]) : y[k] * (dy[k] - total);
            add_part(s.da, r * s.cols, p, s.wide, dy);
        }
    }
}

/* --- layer norm, rms norm -------------------------------------------------------------- *
 *
 * Means and squares: each thread adds 8 elements in f32, then sums in two floats. The variance
 * comes from a second read, around the mean. Each sum is multiplied by 2^-n before it is added,
 * where 2^n is the least power of two not below cols, so that it overflows only if the mean does.
 */
struct NormJob : mixp_norm_args {       /* rms: beta is absent                               */
    bool  wide;
    float share;                /* 2^-n                                                      */
    float back, rest;           /* 2^n / cols, and what rounding it to f32 leaves            */
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
    int rank = (int)threadIdx.x % T;
    Part p;
    for (int64_t r = team_first<T>(); r < s.rows; r += team_step<T>()) {
        float mean = s.rms ? 0.0f : row_mean<T>(s, r * s.cols, rank);
        float rstd = row_rstd<T>(s, r * s.cols, rank, mean), v[8], g[8], b[8];
        if (rank == 0 && !s.rms) s.mean[r] = mean;
        if (rank == 0) s.rstd[r] = rstd;
        MIXPI_PARTS(p, s.cols, T, rank) {
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
    plain_rounded<In>(v);
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
__device__ inline void put_normed(const NormJob &s, int64_t row, int64_t col, float *v, float mean,
                                  float rstd) {
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
    int lane = (int)threadIdx.x % warp_size;
    for (int64_t r = team_first<warp_size>(); r < s.rows; r += team_step<warp_size>()) {
        float v[parts][8], mean, rstd;
        read_row<B, In, parts>(s, r * s.cols, lane, v);
        mean = s.rms ? 0.0f : kept_mean<parts>(s, v);
        rstd = kept_rstd<parts>(s, lane, v, mean);
        if (lane == 0 && !s.rms) s.mean[r] = mean;
        if (lane == 0) s.rstd[r] = rstd;
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
inline bool norm_is_kept(const NormJob &s) {
    if (!s.wide || s.cols % 8 || s.cols > warp_cols) return false;
    if (!s.gamma.data || s.gamma.dtype != MIXP_F32) return false;
    return !s.beta.data || s.beta.dtype == MIXP_F32;
}
/* The kernel for these dtypes and that length, or NULL. */
inline NormKernel norm_kernel(const NormJob &s) {
    mixp_dtype in = s.a.dtype, out = s.y.dtype;
    if (!norm_is_kept(s)) return NULL;
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
    if (!norm_is_kept(s) || s.sum.dtype != in || s.y.dtype != b) return NULL;
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
__device__ inline void back_part(const NormBackJob &s, int64_t r, const Part &p, float *dy,
                                 float *h, float *d) {
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
__device__ inline void put_columns(const NormBackJob &s, const Part &p, const float *dgamma,
                                   const float *dbeta) {
    mixp_out to = { s.partial, MIXP_F32, 0 };
    int64_t at = (int64_t)blockIdx.x * 2 * s.cols;
    put_part(to, at, p, true, dgamma);
    put_part(to, at + s.cols, p, true, dbeta);
}

/* Writes one part of da = rstd (d - mean(d) - h mean(d h)). v: d. */
__device__ inline void put_back(const NormBackJob &s, int64_t r, const Part &p, const float *h,
                                float *v, float m1, float m2) {
    float rstd = s.rstd[r];
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) v[k] = fmaf(h[k], m2, v[k] + m1) * rstd;
    add_part(s.da, r * s.cols, p, s.wide, v);
    if (s.db.data) put_part(s.db, r * s.cols, p, s.wide, v);
}

__global__ void __launch_bounds__(back_threads)
    norm_back_slices(const __grid_constant__ NormBackJob s) {
    MIXPI_SHARED(float, parts, 128);
    int team = (int)blockDim.x, rank = (int)threadIdx.x;
    int64_t panel = 8 * (int64_t)team, first = (int64_t)blockIdx.x * s.per;
    int64_t end = least(first + s.per, s.rows);
    float dy[8], h[8], d[8], dgamma[8] = { 0 }, dbeta[8] = { 0 };
    Part p;
    for (int64_t r = first; r < end; r++) {
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
        MIXPI_PARTS(p, s.cols, team, rank) {
            if (s.cols > panel) back_part(s, r, p, dy, h, d);
            put_back(s, r, p, h, d, sum * scale, dot * scale);
        }
    }
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
__device__ inline void read_back(BackRow<Dy, A> &row, const NormBackJob &s, int64_t r,
                                 int64_t col) {
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
    int64_t first = (int64_t)blockIdx.x * s.per, end = least(first + s.per, s.rows);
    int64_t col = 8 * (int64_t)threadIdx.x;
    float h[8], d[8], gamma[8], dgamma[8] = { 0 }, dbeta[8] = { 0 };
    Part p = part_of(s.cols, 0, (int)blockDim.x, (int)threadIdx.x);
    BackRow<Dy, A> next;
    memset((void *)&next, 0, sizeof next);
    get_part_or(s.gamma, p, s.wide, 1.0f, gamma);
    if (first < end) read_back(next, s, first, col);
    for (int64_t r = first; r < end; r++) {
        float sum = 0.0f, dot = 0.0f, scale = -1.0f / (float)s.cols, rstd = next.rstd;
        plain_values<A>(next.a, h);
        plain_values<Dy>(next.dy, d);
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) h[k] = (h[k] - next.mean) * rstd;
        if (r + 1 < end) read_back(next, s, r + 1, col);
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
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) d[k] = fmaf(h[k], dot * scale, d[k] + sum * scale) * rstd;
        plain_add_part<A>(s.da, r * s.cols, p, s.wide, d);
        if constexpr (A == MIXP_F32)
            if (s.db.data && col < s.cols) plain_put8<Dy>(s.db.data, r * s.cols + col, d);
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
    int lane = (int)threadIdx.x % join_cols, own = (int)threadIdx.x / join_cols;
    int64_t col = (int64_t)blockIdx.x * join_cols + lane;
    float sum = 0.0f;
    if (!to.data) return;
    for (int64_t i = own; i < slices && col < s.cols; i += join_rows)
        sum += s.partial[(2 * i + blockIdx.y) * s.cols + col];
    sums[own * (join_cols + 1) + lane] = sum;
    __syncthreads();
    if (own || col >= s.cols) return;
    for (int i = 1; i < join_rows; i++) sum += sums[i * (join_cols + 1) + lane];
    if (to.accumulate) sum += get1(as_in(to), col);
    put1(to, col, sum);
}

/* --- embedding ------------------------------------------------------------------------- */

struct EmbeddingJob : mixp_embedding_args {
    FaultFlag fault;
    bool      wide;
};
struct EmbeddingBackJob : mixp_embedding_backward_args { FaultFlag fault; };

__device__ inline bool is_id(int32_t id, int64_t vocab) { return id >= 0 && id < vocab; }

/* Copies a row's bits with a warp: from element `from` of the table to element `to` of y. */
__device__ inline void copy_row(const EmbeddingJob &s, int64_t to, int64_t from, int lane) {
    if (s.wide && s.cols % 8 == 0) {
        int64_t size = dtype_bytes(s.y.dtype), n = s.cols * size / 16;
        uint4 *q = (uint4 *)(void *)((char *)s.y.data + to * size);
        const uint4 *p = (const uint4 *)(const void *)((const char *)s.table.data + from * size);
        for (int64_t i = lane; i < n; i += warp_size) q[i] = p[i];
    } else if (s.y.dtype == MIXP_F32) {
        for (int64_t i = lane; i < s.cols; i += warp_size)
            ((uint32_t *)s.y.data)[to + i] = ((const uint32_t *)s.table.data)[from + i];
    } else {
        for (int64_t i = lane; i < s.cols; i += warp_size)
            ((uint16_t *)s.y.data)[to + i] = ((const uint16_t *)s.table.data)[from + i];
    }
}

__global__ void __launch_bounds__(team_threads, 4)
    embedding_rows(const __grid_constant__ EmbeddingJob s) {
    int lane = (int)threadIdx.x % warp_size;
    Part p;
    for (int64_t r = team_first<warp_size>(); r < s.rows; r += team_step<warp_size>()) {
        int32_t id = s.ids[r];
        bool good = is_id(id, s.vocab);
        float v[8];
        if (!good && lane == 0) note_fault(s.fault, FAULT_EMBEDDING_ID, r, id);
        if (good && s.y.dtype == s.table.dtype) {
            copy_row(s, r * s.cols, id * s.cols, lane);
            continue;
        }
        MIXPI_PARTS(p, s.cols, warp_size, lane) {
            if (good) get_part(s.table, id * s.cols, p, s.wide, 0.0f, v);
            MIXPI_UNROLL
            for (int k = 0; k < 8; k++)
                if (!good) v[k] = not_a_number();
            put_part(s.y, r * s.cols, p, s.wide, v);
        }
    }
}

/* The backward pass sorts the rows of dy by their id, stably, then adds the rows of each id in
 * order, in f32, and rounds once.
 *
 * The sort: a block owns up to 256 consecutive ids, [low, high). It counts the rows with smaller
 * ids, which gives the place where its own rows begin. It collects the rows that have its ids, and
 * places them, one thread per id. No block waits for another. */
struct Sorted {
    int64_t *list, *order;      /* rows: by block, then by id                              */
    int64_t *start;             /* vocab + 1: where an id's rows begin in `order`          */
};
const int64_t id_blocks = 1024;
const int     ids_each = 4;     /* ids that a thread reads at a time                       */

/* Rows whose id lies in [low, high), in order, to `to`. */
__device__ inline void collect(const EmbeddingBackJob &s, int64_t low, int64_t high, int64_t *to) {
    int64_t tile = ids_each * (int64_t)blockDim.x, done = 0;
    for (int64_t first = 0; first < s.rows; first += tile) {
        int64_t i = first + ids_each * (int64_t)threadIdx.x;
        int mine = 0, all, at;
        for (int k = 0; k < ids_each; k++)
            mine += i + k < s.rows && s.ids[i + k] >= low && s.ids[i + k] < high;
        at = block_scan(mine, &all) - mine;
        for (int k = 0; k < ids_each; k++)
            if (i + k < s.rows && s.ids[i + k] >= low && s.ids[i + k] < high)
                to[done + at++] = i + k;
        done += all;
    }
}

/* Goes through n collected rows. Thread t counts the rows of id low + t, and writes them to `to`
 * unless `to` is NULL. */
__device__ inline int64_t take(const EmbeddingBackJob &s, int64_t low, const int64_t *list,
                               int64_t n, int64_t *to) {
    MIXPI_SHARED(int64_t, row, team_threads);
    MIXPI_SHARED(int32_t, id, team_threads);
    int64_t count = 0;
    int me = (int)threadIdx.x;
    for (int64_t first = 0; first < n; first += team_threads) {
        int m = (int)least(team_threads, n - first);
        if (me < m) {
            row[me] = list[first + me];
            id[me] = (int32_t)(s.ids[row[me]] - low);
        }
        __syncthreads();
        for (int i = 0; i < m; i++) {
            if (id[i] != me) continue;
            if (to) to[count] = row[i];
            count++;
        }
        __syncthreads();
    }
    return count;
}

__global__ void __launch_bounds__(team_threads)
    embedding_sort(const __grid_constant__ EmbeddingBackJob s, const Sorted to, int64_t each) {
    int64_t low = (int64_t)blockIdx.x * each, high = least(low + each, s.vocab);
    int64_t below = 0, own = 0, mine, all, me = (int64_t)threadIdx.x;
    for (int64_t i = me; i < s.rows; i += (int64_t)blockDim.x) {
        int32_t id = s.ids[i];
        if (blockIdx.x == 0 && !is_id(id, s.vocab)) note_fault(s.fault, FAULT_EMBEDDING_ID, i, id);
        below += id >= 0 && id < low;
        own += id >= low && id < high;
    }
    below = block_sum(below);
    own = block_sum(own);
    if (own) collect(s, low, high, each == 1 ? to.order + below : to.list + below);
    __syncthreads();
    mine = each == 1 ? (me == 0 ? own : 0) : take(s, low, to.list + below, own, NULL);
    mine = below + block_scan(mine, &all) - mine;
    if (low + me < high) to.start[low + me] = mine;
    if (high == s.vocab && me == 0) to.start[s.vocab] = below + own;
    if (each > 1) take(s, low, to.list + below, own, to.order + mine);
}

/* Each thread computes one column of an id's row. */
__global__ void __launch_bounds__(team_threads)
    embedding_sums(const __grid_constant__ EmbeddingBackJob s, const Sorted by) {
    int64_t panels = ceil_div(s.cols, blockDim.x);
    for (int64_t unit = blockIdx.x; unit < s.vocab * panels; unit += gridDim.x) {
        int64_t id = unit / panels, col = unit % panels * blockDim.x + threadIdx.x;
        int64_t i = by.start[id], end = by.start[id + 1];
        float sum, v[8];
        if (col >= s.cols || (i == end && s.dtable.accumulate)) continue;
        sum = s.dtable.accumulate ? get1(as_in(s.dtable), id * s.cols + col) : 0.0f;
        for (; i + 8 <= end; i += 8) {
            MIXPI_UNROLL
            for (int k = 0; k < 8; k++) v[k] = get1(s.dy, by.order[i + k] * s.cols + col);
            MIXPI_UNROLL
            for (int k = 0; k < 8; k++) sum += v[k];
        }
        for (; i < end; i++) sum += get1(s.dy, by.order[i] * s.cols + col);
        put1(s.dtable, id * s.cols + col, sum);
    }
}

/* Lets a kernel use more than 48 KB of dynamic shared memory: all of the GPU's, except what CUDA
 * says that the kernel has beside it. Requests it once per kernel, because CUDA takes a lock for a
 * request; kernels that do not fit the table request it at every launch. The limit is a property of
 * the GPU, not of the context. So it is always the maximum: a context that needs less must not
 * lower the limit of a context that needs more. */
inline cudaError_t make_room(State *s, const void *kernel, size_t bytes) {
    cudaFuncAttributes own = {};
    int i = 0;
    if (bytes <= 48 * 1024) return cudaSuccess;
    while (i < roomy_kernels && s->roomy[i] && s->roomy[i] != kernel) i++;
    if (i < roomy_kernels && s->roomy[i] == kernel) return cudaSuccess;
    cudaError_t e = cudaFuncGetAttributes(&own, kernel);
    if (e == cudaSuccess)
        e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 s->most_shared - (int)own.sharedSizeBytes);
    if (e == cudaSuccess && i < roomy_kernels) s->roomy[i] = kernel;
    return e;
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
/* The loss of a row whose target is valid. Its parts are added in double. */
__device__ inline double loss_of_row(const EntropyJob &s, int32_t target, const Exponents &e,
                                     float below, float at_target) {
    float top = e.top - at_target, log_sum = logf(e.sum);
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
__device__ inline void put_loss(const EntropyJob &s, int64_t r, const Exponents &e, float below,
                                float at_target) {
    int32_t target = s.targets[r];
    double loss = 0.0;
    if (target != s.ignore && !is_id(target, s.cols)) {
        note_fault(s.fault, FAULT_TARGET, s.before + r, target);
        loss = (double)not_a_number();
    } else if (target != s.ignore) {
        loss = loss_of_row(s, target, e, below, at_target);
    }
    if (!s.logs) s.top_rsum[2 * r] = e.top;
    if (!s.logs) s.top_rsum[2 * r + 1] = 1.0f / e.sum;
    s.losses[r] = loss;
    if (s.each) s.each[r] = (float)loss;
}
template <int T, mixp_dtype D>
__global__ void __launch_bounds__(team_threads, 3)
    entropy_rows(const __grid_constant__ EntropyJob s) {
    int rank = (int)threadIdx.x % T;
    for (int64_t r = team_first<T>(); r < s.rows; r += team_step<T>()) {
        Exponents e = { 0.0f, 1.0f };
        float below = 0.0f;
        if (!s.logs) e = row_exponents<T, D>(s.logits, r * s.cols, s.cols, s.wide);
        if (s.smoothing > 0.0f) below = row_below<T>(s, r, e.top);
        if (rank == 0) put_loss(s, r, e, below, target_value(s, r));
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
    if (s.before > 0) { /* the mean of earlier rows goes on */
        const double had = (double)*s.counted;
        sum += (double)*s.loss * (had != 0.0 ? had : 1.0);
        count += had;
    }
    if (s.sum) count = 1.0;
    *s.counted = (float)count;
    if (count != 0.0) *s.loss = (float)(sum / count);
    else *s.loss = s.more ? (float)sum : not_a_number();
}

/* The gradient of a row: by (all softmax - hot onehot - others). */
struct Slopes {
    float by, all, hot, others;
};
__device__ inline Slopes slopes_of(const EntropyBackJob &s, int64_t r, float factor, bool counts) {
    Slopes d = { factor, 1.0f, 1.0f - s.smoothing, 0.0f };
    if (s.smoothing > 0.0f) d.others = s.smoothing / (float)s.cols;
    if (s.each) d.by = get1(s.dloss, r);
    if (s.weights && counts) {
        d.hot *= s.weights[s.targets[r]];
        d.all = d.hot + s.smoothing * s.weights[s.cols];
    }
    if (s.logs) d.all = 0.0f;
    return d;
}

/* factor (softmax - onehot); zeros for an ignored row, even if it holds NaN. */
template <int T, mixp_dtype D>
__global__ void __launch_bounds__(team_threads, 3)
    entropy_back_rows(const __grid_constant__ EntropyBackJob s) {
    int rank = (int)threadIdx.x % T;
    float factor = s.each ? 0.0f : get1(s.dloss, 0) / *s.counted, v[8];
    Part p;
    for (int64_t r = team_first<T>(); r < s.rows; r += team_step<T>()) {
        int32_t target = s.targets[r];
        bool ignored = target == s.ignore, bad = !ignored && !is_id(target, s.cols);
        Slopes d = slopes_of(s, r, factor, !ignored && !bad);
        float top = s.logs ? 0.0f : s.top_rsum[2 * r];
        float rsum = s.logs ? 0.0f : s.top_rsum[2 * r + 1] * d.all;
        if (ignored && s.dlogits.accumulate) continue;
        if (bad) d.by = not_a_number();
        if (bad && rank == 0) note_fault(s.fault, FAULT_TARGET, r, target);
        MIXPI_PARTS(p, s.cols, T, rank) {
            int hot_at = (int)(target - p.col);
            if (!ignored) plain_get_part<D>(s.logits, r * s.cols, p, s.wide, 0.0f, v);
            MIXPI_UNROLL
            for (int k = 0; k < 8; k++) {
                float hot = k * p.step == hot_at ? d.hot : 0.0f, others = d.others;
                float share = s.logs ? 0.0f : exp_of(v[k] - top) * rsum;
                if (s.weights && k < p.n) others *= s.weights[p.col + k * p.step];
                v[k] = ignored ? 0.0f : (share - hot - others) * d.by;
            }
            plain_add_part<D>(s.dlogits, r * s.cols, p, s.wide, v);
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

/* Starts the copy of 8 elements of a row to shared memory. Does nothing if the row is absent. */
template <mixp_dtype D>
__device__ inline void fetch_part(const EntropyBothJob &s, int64_t row, int64_t col) {
    MIXPI_DYNAMIC_SHARED(char, kept);
    const int64_t at = col * dtype_bytes(D);
    const char *from = (const char *)s.logits.data + row * s.kept + at;
    if (row >= s.rows || at >= s.kept) return;
    cp_async_16(kept + at, from, 16);
    if (D == MIXP_F32) cp_async_16(kept + at + 16, from + 16, 16);
}
template <mixp_dtype D> __device__ inline void fetch_row(const EntropyBothJob &s, int64_t row) {
    for (int64_t col = 8 * (int64_t)threadIdx.x; col < s.cols; col += 8 * team_threads)
        fetch_part<D>(s, row, col);
    cp_async_commit();
}
template <mixp_dtype D> __device__ inline mixp_in fetched_row() {
    MIXPI_DYNAMIC_SHARED(char, kept);
    cp_async_wait<0>();
    return mixpi_in(kept, D);
}

/* As entropy_back_rows: the row's gradient, from `a` at `from`. If rows stay in shared memory, row
 * `next` overwrites each part after the part's gradient is stored. */
template <int T, mixp_dtype D>
__device__ inline void put_slopes(const EntropyBothJob &s, int64_t r, const mixp_in &a,
                                  int64_t from, const Exponents &e, int64_t next) {
    int rank = (int)threadIdx.x % T;
    int32_t target = s.targets[r];
    bool ignored = target == s.ignore;
    float others = s.smoothing > 0.0f ? s.smoothing / (float)s.cols : 0.0f, v[8];
    float by = __fmul_rn(*s.scale, s.share) / *s.counted, rsum = 1.0f / e.sum;
    Part p;
    if (!ignored && !is_id(target, s.cols)) by = not_a_number();
    MIXPI_PARTS(p, s.cols, T, rank) {
        int hot_at = (int)(target - p.col);
        if (!ignored) plain_get_part<D>(a, from, p, s.wide, 0.0f, v);
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) {
            float hot = k * p.step == hot_at ? 1.0f - s.smoothing : 0.0f;
            float share = exp_of(v[k] - e.top) * rsum;
            v[k] = ignored ? 0.0f : (share - hot - others) * by;
        }
        if (s.dlogits.dtype == D) plain_add_part<D>(s.dlogits, r * s.cols, p, s.wide, v);
        else put_part(s.dlogits, r * s.cols, p, s.wide, v);
        if (T == team_threads && s.kept) fetch_part<D>(s, next, p.col);
    }
    if (T == team_threads && s.kept) cp_async_commit();
}

template <int T, mixp_dtype D>
__global__ void __launch_bounds__(team_threads, 3)
    entropy_both_rows(const __grid_constant__ EntropyBothJob s) {
    const bool kept = T == team_threads && s.kept;
    int rank = (int)threadIdx.x % T;
    if (kept) fetch_row<D>(s, team_first<T>());
    for (int64_t r = team_first<T>(); r < s.rows; r += team_step<T>()) {
        float at_target = target_value(s, r), below = 0.0f;
        mixp_in a = kept ? fetched_row<D>() : s.logits;
        int64_t from = kept ? 0 : r * s.cols;
        Exponents e = row_exponents<T, D>(a, from, s.cols, s.wide);
        if (s.smoothing > 0.0f) below = row_below<T>(s, r, e.top);
        if (rank == 0) put_loss(s, r, e, below, at_target);
        __syncwarp(); /* dlogits may be logits: lane 0 has read its target by now */
        put_slopes<T, D>(s, r, a, from, e, r + team_step<T>());
    }
}

/* --- the largest, what an index says, rotary embeddings ---------------------------------- */

__device__ inline bool is_nan(float x) { return mixp_bits_of_f32(x) << 1 > 0xFF000000u; }
/* Is x as large as y: equal, or both NaN? */
__device__ inline bool as_large(float x, float y) { return x == y || (is_nan(x) && is_nan(y)); }

/* The largest of some elements, the index of the first such, and their number. Without elements,
 * index is -1. */
struct Most {
    float   value;
    int32_t index, ties;
};

__device__ inline Most larger_of(const Most &a, const Most &b) {
    Most m = a;
    if (a.index < 0 || b.index < 0) return a.index < 0 ? b : a;
    if (as_large(a.value, b.value)) {
        m.index = a.index < b.index ? a.index : b.index;
        m.ties = a.ties + b.ties;
        return m;
    }
    return b.value > a.value || is_nan(b.value) ? (is_nan(a.value) ? a : b) : a;
}

/* One warp per column if columns are few and long; otherwise one thread per column. */
__global__ void __launch_bounds__(team_threads)
    max_columns(const __grid_constant__ mixp_max_args s, int lanes) {
    int64_t first = ((int64_t)blockIdx.x * team_threads + threadIdx.x) / lanes;
    int64_t step = (int64_t)gridDim.x * team_threads / lanes;
    int lane = (int)threadIdx.x % lanes;
    for (int64_t c = first; c < s.outer * s.inner; c += step) {
        int64_t from = c / s.inner * s.n * s.inner + c % s.inner;
        Most most = { 0.0f, -1, 0 };
        for (int64_t j = lane; j < s.n; j += lanes) {
            Most one = { get1(s.a, from + j * s.inner), (int32_t)j, 1 };
            most = larger_of(most, one);
        }
        for (int k = lanes / 2; k > 0; k /= 2) {
            Most other;
            other.value = __shfl_down_sync(0xFFFFFFFFu, most.value, (unsigned)k);
            other.index = __shfl_down_sync(0xFFFFFFFFu, most.index, (unsigned)k);
            other.ties = __shfl_down_sync(0xFFFFFFFFu, most.ties, (unsigned)k);
            most = larger_of(most, other);
        }
        if (lane) continue;
        s.index[c] = most.index;
        if (s.ties) s.ties[c] = most.ties;
        if (s.y.data) put1(s.y, c, most.value);
    }
}

/* One thread per element of da. */
__global__ void __launch_bounds__(team_threads)
    max_back(const __grid_constant__ mixp_max_backward_args s) {
    int64_t i = (int64_t)blockIdx.x * team_threads + threadIdx.x;
    for (; i < s.outer * s.n * s.inner; i += (int64_t)gridDim.x * team_threads) {
        int64_t o = i / (s.n * s.inner), j = i / s.inner % s.n, c = i % s.inner;
        int64_t at = o * s.inner + c, best = (o * s.n + s.index[at]) * s.inner + c;
        float dy = 0.0f;
        if (!s.shared && s.index[at] == j) dy = get1(s.dy, at);
        if (s.shared && as_large(get1(s.a, i), get1(s.a, best)))
            dy = get1(s.dy, at) / (float)s.ties[at];
        store_real(s.da, i, dy);
    }
}

struct GatherJob : mixp_gather_args { FaultFlag fault; };

/* One thread per element of y. */
__global__ void __launch_bounds__(team_threads)
    gather_elements(const __grid_constant__ GatherJob s) {
    int64_t i = (int64_t)blockIdx.x * team_threads + threadIdx.x;
    for (; i < s.outer * s.m * s.inner; i += (int64_t)gridDim.x * team_threads) {
        int64_t o = i / (s.m * s.inner), c = i % s.inner;
        int32_t id = s.ids[i];
        bool good = is_id(id, s.n);
        if (!good) note_fault(s.fault, FAULT_GATHER_ID, i, id);
        put1(s.y, i, good ? get1(s.a, (o * s.n + id) * s.inner + c) : not_a_number());
    }
}

/* One thread per column: no other thread adds to the column. */
__global__ void __launch_bounds__(team_threads) gather_back(const __grid_constant__ GatherJob s) {
    int64_t i = (int64_t)blockIdx.x * team_threads + threadIdx.x;
    for (; i < s.outer * s.inner; i += (int64_t)gridDim.x * team_threads) {
        int64_t o = i / s.inner, c = i % s.inner;
        for (int64_t j = 0; j < s.m; j++) {
            int64_t from = (o * s.m + j) * s.inner + c;
            int32_t id = s.ids[from];
            if (is_id(id, s.n)) store_real(s.y, (o * s.n + id) * s.inner + c, get1(s.a, from));
            else note_fault(s.fault, FAULT_GATHER_ID, from, id);
        }
    }
}

/* Array 0 of the axes: y, 1: a, 2: b. */
struct CompareJob {
    mixp_comparison how;
    Axes     axes;
    int64_t  count;
    mixp_in  a, b;
    uint8_t *y;
};

/* Element i of a real array, of u8 or of i32, exactly. */
__device__ inline double exact1(const mixp_in &a, int64_t i) {
    if (a.dtype == MIXP_I32) return (double)((const int32_t *)a.data)[i];
    if (a.dtype == MIXP_U8) return (double)((const uint8_t *)a.data)[i];
    return (double)get1(a, i);
}

/* One thread per element of y. */
__global__ void __launch_bounds__(team_threads)
    compare_elements(const __grid_constant__ CompareJob s) {
    int64_t i = (int64_t)blockIdx.x * team_threads + threadIdx.x;
    for (; i < s.count; i += (int64_t)gridDim.x * team_threads) {
        int64_t at[4] = { 0, 0, 0, 0 };
        locate(s.axes, i, at);
        s.y[i] = (uint8_t)mixpi_holds(s.how, exact1(s.a, at[1]), exact1(s.b, at[2]));
    }
}

/* Rows of up to this length are cheaper without a sorting network. */
const int topk_short = 64;

/* One thread per element of a: the element's place is the number of elements before it. */
__global__ void __launch_bounds__(team_threads)
    topk_places(const __grid_constant__ mixp_topk_args s) {
    int64_t i = (int64_t)blockIdx.x * team_threads + threadIdx.x;
    for (; i < s.rows * s.cols; i += (int64_t)gridDim.x * team_threads) {
        int64_t row = i / s.cols, own = i - row * s.cols, before = 0;
        uint32_t key = mixpi_topk_key(get1(s.a, i), s.smallest);
        for (int64_t j = 0; j < s.cols; j++) {
            uint32_t other = mixpi_topk_key(get1(s.a, row * s.cols + j), s.smallest);
            before += other > key || (other == key && j < own);
        }
        if (before < s.k) s.index[row * s.k + before] = (int32_t)own;
    }
}

/* Elements that a block sorts at once. */
const int sort_room = 2048;

/* Does topk_sorted run this call? */
inline bool topk_is_sorted(const mixp_topk_args &k) {
    return k.cols <= sort_room || k.k <= sort_room / 2;
}

/* The rank of element i of a row: earlier of equal elements have larger ranks. 0: no element. */
__device__ inline uint64_t topk_rank(const mixp_topk_args &s, int64_t row, int64_t i) {
    if (i >= s.cols) return 0;
    uint32_t key = mixpi_topk_key(get1(s.a, row * s.cols + i), s.smallest);
    return (uint64_t)key << 32 | (uint32_t) ~(uint32_t)i;
}

/* Sorts n ranks, a power of two, the largest first: Batcher's bitonic network (1968). */
__device__ inline void sort_ranks(uint64_t *ranks, int n) {
    for (int run = 2; run <= n; run *= 2)
        for (int step = run / 2; step; step /= 2) {
            __syncthreads();
            for (int t = (int)threadIdx.x; t < n / 2; t += team_threads) {
                int i = 2 * t - (t & (step - 1)), j = i + step;
                uint64_t a = ranks[i], b = ranks[j];
                if ((a < b) != ((i & run) == 0)) continue;
                ranks[i] = b;
                ranks[j] = a;
            }
        }
    __syncthreads();
}

/* A block per row. Of a row of more than sort_room elements, each turn keeps the best half of the
 * room and reads as many elements again. */
__global__ void __launch_bounds__(team_threads)
    topk_sorted(const __grid_constant__ mixp_topk_args s) {
    MIXPI_SHARED(uint64_t, best, sort_room);
    int n = 2;
    while (n < s.cols && n < sort_room) n *= 2;
    for (int64_t row = blockIdx.x; row < s.rows; row += gridDim.x) {
        int64_t read = 0;
        for (int kept = 0; read < s.cols; kept = n / 2) {
            for (int t = kept + (int)threadIdx.x; t < n; t += team_threads)
                best[t] = topk_rank(s, row, read + t - kept);
            read += n - kept;
            sort_ranks(best, n);
        }
        for (int64_t t = threadIdx.x; t < s.k; t += team_threads)
            s.index[row * s.k + t] = (int32_t) ~(uint32_t)best[t];
        __syncthreads();
    }
}

/* Long rows, of which more is wanted than topk_sorted keeps: blocks sort pieces of sort_room
 * elements, then each pass merges runs of `width` elements in pairs, until one run is left. */
struct MergeJob : mixp_topk_args {
    uint64_t *from, *to;        /* ranks [rows, cols]; to NULL: the last pass, which fills index */
    int64_t   width;
};

/* A block per piece. */
__global__ void __launch_bounds__(team_threads) topk_pieces(const __grid_constant__ MergeJob s) {
    MIXPI_SHARED(uint64_t, ranks, sort_room);
    int64_t pieces = ceil_div(s.cols, sort_room);
    for (int64_t unit = blockIdx.x; unit < s.rows * pieces; unit += gridDim.x) {
        int64_t row = unit / pieces, first = unit % pieces * sort_room;
        int n = (int)least(sort_room, s.cols - first);
        for (int t = (int)threadIdx.x; t < sort_room; t += team_threads)
            ranks[t] = topk_rank(s, row, first + t);
        sort_ranks(ranks, sort_room);
        for (int t = (int)threadIdx.x; t < n; t += team_threads)
            s.to[row * s.cols + first + t] = ranks[t];
        __syncthreads();
    }
}

/* How many of n sorted ranks, the largest first, are larger than `rank`? n <= 0: none. */
__device__ inline int64_t ranks_above(const uint64_t *ranks, int64_t n, uint64_t rank) {
    int64_t low = 0;
    while (low < n) {
        int64_t middle = low + (n - low) / 2;
        if (ranks[middle] > rank) low = middle + 1;
        else n = middle;
    }
    return low;
}

/* One thread per rank: its place is its place in its own run, plus the number of larger ranks in
 * the other run of the pair. No two ranks of a row are equal. */
__global__ void __launch_bounds__(team_threads) topk_merge(const __grid_constant__ MergeJob s) {
    int64_t i = (int64_t)blockIdx.x * team_threads + threadIdx.x;
    for (; i < s.rows * s.cols; i += (int64_t)gridDim.x * team_threads) {
        int64_t row = i / s.cols, own = i - row * s.cols;
        int64_t in_run = own % s.width, pair = own - own % (2 * s.width);
        int64_t other = own - in_run == pair ? pair + s.width : pair;
        uint64_t rank = s.from[i];
        int64_t place =
            pair + in_run +
            ranks_above(s.from + row * s.cols + other, least(s.width, s.cols - other), rank);
        if (s.to) s.to[row * s.cols + place] = rank;
        else if (place < s.k) s.index[row * s.k + place] = (int32_t) ~(uint32_t)rank;
    }
}

struct RopeJob : mixp_rope_args { float *cosine, *sine; };

__global__ void __launch_bounds__(team_threads) rope_angles(const __grid_constant__ RopeJob s) {
    int64_t half = s.d / 2, i = (int64_t)blockIdx.x * team_threads + threadIdx.x;
    for (; i < s.t * half; i += (int64_t)gridDim.x * team_threads) {
        double step = pow(s.base, -2.0 * (double)(i % half) / (double)s.d);
        double sine, cosine; /* by sincospi: sin and cos would need a stack           */
        sincospi((double)(s.first + i / half) * step * 0.31830988618379067154, &sine, &cosine);
        s.cosine[i] = (float)cosine;
        s.sine[i] = (float)sine;
    }
}

/* One thread per pair. */
__global__ void __launch_bounds__(team_threads) rope_pairs(const __grid_constant__ RopeJob s) {
    int64_t half = s.d / 2, i = (int64_t)blockIdx.x * team_threads + threadIdx.x;
    for (; i < s.rows * s.t * s.heads * half; i += (int64_t)gridDim.x * team_threads) {
        int64_t pair = i % half, head = i / half, row = head / s.heads % s.t * half + pair;
        int64_t p = head * s.d + (s.interleaved ? 2 * pair : pair);
        int64_t q = p + (s.interleaved ? 1 : half);
        float c = s.cosine[row], w = s.back ? -s.sine[row] : s.sine[row];
        float a = get1(s.a, p), b = get1(s.a, q);
        store_real(s.y, p, fmaf(a, c, -__fmul_rn(b, w)));
        store_real(s.y, q, fmaf(b, c, __fmul_rn(a, w)));
    }
}

}   /* namespace */
