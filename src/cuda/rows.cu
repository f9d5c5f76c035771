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
 * below 2^-22 (1 + |x|). Embeddings match the CPU bit for bit.
 *
 * This room has what the rooms of rows share: teams, parts of rows, sums in two floats.
 */
namespace {

/* --- teams ----------------------------------------------------------------------------- */

const int     team_threads = 256;
const int64_t warp_cols = 1024;             /* longest row that one warp computes          */

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

/* MIXPI_ROWS for kernel<T, D>; see any_real. */
#define MIXPI_TYPED_ROWS(kernel, D, k, job)                                               \
    (job.cols <= warp_cols                                                                \
     ? MIXPI_LAUNCH((kernel<warp_size, D>), grid_for(job.rows * warp_size, team_threads), \
                    team_threads, 0, k.stream, job)                                       \
     : MIXPI_LAUNCH((kernel<team_threads, D>),                                            \
                    grid_for(job.rows * team_threads, team_threads), team_threads, 0,     \
                    k.stream, job))

/* The 8 or fewer elements of a row that a thread has in one turn of its team. They are neighbours
 * if the row length is a multiple of 8; otherwise they are a team's size apart. */
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
__device__ inline void get_part(
    const mixp_in &a, int64_t row, const Part &p, bool wide, float missing, float *v) {
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
__device__ inline void put_part(
    const mixp_out &a, int64_t row, const Part &p, bool wide, const float *v) {
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
__device__ inline void add_part(
    const mixp_out &a, int64_t row, const Part &p, bool wide, float *v) {
    float had[8];
    if (a.accumulate) {
        get_part(as_in(a), row, p, wide, 0.0f, had);
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) v[k] += had[k];
    }
    put_part(a, row, p, wide, v);
}
/* Kernels whose D is a dtype have rows of whole vectors of that dtype: the compiler knows each part.
 * Those of any_real have any rows. */
const mixp_dtype any_real = MIXP_DTYPE_COUNT;

inline mixp_dtype typed_rows(bool wide, int64_t cols, mixp_dtype dtype) {
    return wide && cols % 8 == 0 ? dtype : any_real;
}
template <mixp_dtype D>
__device__ inline Part typed_part(int64_t cols, int64_t start, int team, int rank) {
    const Part whole = { start + 8 * (int64_t)rank, 8, 1 };
    return D == any_real ? part_of(cols, start, team, rank) : whole;
}
template <mixp_dtype D>
__device__ inline void typed_get_part(
    const mixp_in &a, int64_t row, const Part &p, bool wide, float missing, float *v) {
    if constexpr (D == any_real) get_part(a, row, p, wide, missing, v);
    else plain_get8<D>(a.data, row + p.col, v);
}
template <mixp_dtype D>
__device__ inline void typed_add_part(
    const mixp_out &a, int64_t row, const Part &p, bool wide, float *v) {
    float had[8];
    if (a.accumulate) {
        typed_get_part<D>(as_in(a), row, p, wide, 0.0f, had);
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) v[k] += had[k];
    }
    if constexpr (D == any_real) put_part(a, row, p, wide, v);
    else plain_put8<D>(a.data, row + p.col, v);
}

/* An absent array reads as `otherwise` everywhere. */
__device__ inline void get_part_or(
    const mixp_in &a, const Part &p, bool wide, float otherwise, float *v) {
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

/* The same in a kernel with a D; a thread of a row of vectors has no part beyond the row. */
#define MIXPI_TYPED_PARTS(D, p, cols, team, rank)                                         \
    for (int64_t at_ = 0; at_ < (cols) - (D == any_real ? 0 : 8 * (int64_t)(rank)) &&     \
                          (p = typed_part<D>(cols, at_, team, rank), true);               \
         at_ += 8 * (int64_t)(team))

/* e^x; 0 where e^x is below 2^-126 (x < -87.3). */
__device__ inline float exp_of(float x) { return exp2_approx(x * 1.44269504f); }
__device__ inline float minus_infinity() { return mixp_f32_of_bits(0xFF800000u); }
__device__ inline float not_a_number() { return mixp_f32_of_bits(0x7FC00000u); }
__device__ inline bool is_id(int32_t id, int64_t vocab) { return id >= 0 && id < vocab; }

}   /* namespace */

/* A job on k; all other fields are 0. */
template <class Job, class Args> static Job mixpi_cuda_job(const Args &k) {
    Job job;
    memset((void *)&job, 0, sizeof job);
    (Args &)job = k;
    return job;
}

/* A missing array may have any dtype. */
template <class A> static bool is_real_or_absent(const A &a) { return !a.data || is_real(a.dtype); }
