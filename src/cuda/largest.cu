#pragma once
#include "rows.cu"
namespace {

/* --- the largest element ----------------------------------------------------------- */

__device__ inline bool is_nan(float x) { return mixp_bits_of_f32(x) << 1 > 0xFF000000u; }
/* Is x as large as y: equal, or both NaN? */
__device__ inline bool is_as_large(float x, float y) { return x == y || (is_nan(x) && is_nan(y)); }

/* The largest of some elements, the index of the first such, and their number. Without elements,
 * index is -1. */
struct Most {
    float   value;
    int32_t index, ties;
};

__device__ inline Most larger_of(const Most &a, const Most &b) {
    Most m = a;
    if (a.index < 0 || b.index < 0) return a.index < 0 ? b : a;
    if (is_as_large(a.value, b.value)) {
        m.index = a.index < b.index ? a.index : b.index;
        m.ties = a.ties + b.ties;
        return m;
    }
    return b.value > a.value || is_nan(b.value) ? (is_nan(a.value) ? a : b) : a;
}

/* One warp per column if columns are few and long; otherwise one thread per column. */
__global__ void __launch_bounds__(team_threads)
    max_columns(const __grid_constant__ mixp_max_args s, int lanes) {
    const int64_t first = ((int64_t)blockIdx.x * team_threads + threadIdx.x) / lanes;
    const int64_t step = (int64_t)gridDim.x * team_threads / lanes;
    const int lane = (int)threadIdx.x % lanes;
    for (int64_t c = first; c < s.outer * s.inner; c += step) {
        /* Find the largest of the lane's elements. */
        const int64_t from = c / s.inner * s.n * s.inner + c % s.inner;
        Most most = { 0.0f, -1, 0 };
        for (int64_t j = lane; j < s.n; j += lanes) {
            Most one = { get1(s.a, from + j * s.inner), (int32_t)j, 1 };
            most = larger_of(most, one);
        }

        /* Join the lanes in lane 0. */
        for (int k = lanes / 2; k > 0; k /= 2) {
            Most other;
            other.value = __shfl_down_sync(0xFFFFFFFFu, most.value, (unsigned)k);
            other.index = __shfl_down_sync(0xFFFFFFFFu, most.index, (unsigned)k);
            other.ties = __shfl_down_sync(0xFFFFFFFFu, most.ties, (unsigned)k);
            most = larger_of(most, other);
        }

        /* Store the column's index, ties and value. */
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
        if (s.shared && is_as_large(get1(s.a, i), get1(s.a, best)))
            dy = get1(s.dy, at) / (float)s.ties[at];
        store_real(s.da, i, dy);
    }
}

/* --- the k largest elements -------------------------------------------------------- */

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
inline bool is_topk_sorted(const mixp_topk_args &k) {
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
        /* Fill the room after the ranks kept so far, and sort it, until the row is read. */
        int64_t read = 0;
        for (int kept = 0; read < s.cols; kept = n / 2) {
            for (int t = kept + (int)threadIdx.x; t < n; t += team_threads)
                best[t] = topk_rank(s, row, read + t - kept);
            read += n - kept;
            sort_ranks(best, n);
        }

        /* Write the places of the k largest. */
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
        /* Find the rank's own run, and the other run of the pair. */
        const int64_t row = i / s.cols, own = i - row * s.cols;
        const int64_t in_run = own % s.width, pair = own - own % (2 * s.width);
        const int64_t other = own - in_run == pair ? pair + s.width : pair;

        /* Count the larger ranks of both, and store the rank after them. */
        const uint64_t rank = s.from[i];
        const uint64_t *const others = s.from + row * s.cols + other;
        const int64_t place =
            pair + in_run + ranks_above(others, least(s.width, s.cols - other), rank);
        if (s.to) s.to[row * s.cols + place] = rank;
        else if (place < s.k) s.index[row * s.k + place] = (int32_t) ~(uint32_t)rank;
    }
}

}   /* namespace */

static mixp_result mixpi_cuda_max(const mixp_exec *x, const mixp_max_args *k) {
    Kernel on(x);
    int64_t columns = k->outer * k->inner;
    int lanes = columns < 4096 || k->inner == 1 ? warp_size : 1;
    if (!on.state) return MIXP_ERR_ORDER;
    if (!is_real(k->a.dtype) || !is_real_or_absent(k->y)) return MIXP_ERR_DTYPE;
    if (k->n < 1 || k->n > 0x7FFFFFFF || !k->index || k->y.accumulate) return MIXP_ERR_ARGUMENT;
    if (columns <= 0) return MIXP_OK;
    return on.report("max", MIXPI_LAUNCH(max_columns, grid_for(columns * lanes, team_threads),
                                team_threads, 0, on.stream, *k, lanes));
}

static mixp_result mixpi_cuda_max_backward(const mixp_exec *x, const mixp_max_backward_args *k) {
    Kernel on(x);
    int64_t count = k->outer * k->n * k->inner;
    if (!on.state) return MIXP_ERR_ORDER;
    if (!is_real(k->dy.dtype) || !is_real(k->da.dtype) || (k->shared && !is_real(k->a.dtype)))
        return MIXP_ERR_DTYPE;
    if (!k->index || (k->shared && !k->ties)) return MIXP_ERR_ARGUMENT;
    if (count <= 0) return MIXP_OK;
    return on.report("max_backward",
        MIXPI_LAUNCH(max_back, grid_for(count, team_threads), team_threads, 0, on.stream, *k));
}

/* The ranks of a pass and of the next one alternate between two halves of scratch memory. */
static mixp_result mixpi_cuda_merge_topk(Kernel *on, const mixp_exec *x, const mixp_topk_args *k) {
    MergeJob job = mixpi_cuda_job<MergeJob>(*k);
    const int64_t count = k->rows * k->cols;
    uint64_t *ranks = (uint64_t *)scratch_of(x, (size_t)(2 * count) * sizeof(uint64_t));
    if (!ranks) return MIXP_ERR_MEMORY;

    /* Sort the pieces. */
    job.to = ranks;
    const unsigned pieces = grid_for(k->rows * ceil_div(k->cols, sort_room), 1);
    mixp_result r =
        on->report("topk", MIXPI_LAUNCH(topk_pieces, pieces, team_threads, 0, on->stream, job));

    /* Merge runs in pairs; the last pass writes the index. */
    for (job.width = sort_room; r == MIXP_OK && job.width < k->cols; job.width *= 2) {
        job.from = job.to;
        job.to = job.from == ranks ? ranks + count : ranks;
        if (2 * job.width >= k->cols) job.to = NULL;
        r = on->report("topk", MIXPI_LAUNCH(topk_merge, grid_for(count, team_threads), team_threads,
                                   0, on->stream, job));
    }
    return r;
}

static mixp_result mixpi_cuda_topk(const mixp_exec *x, const mixp_topk_args *k) {
    Kernel on(x);
    int64_t count = k->rows * k->cols;
    if (!is_real(k->a.dtype)) return MIXP_ERR_DTYPE;
    if (k->k < 1 || k->k > k->cols || k->cols > 0x7FFFFFFF || !k->index) return MIXP_ERR_ARGUMENT;
    if (!on.state) return MIXP_ERR_ORDER;
    if (count <= 0) return MIXP_OK;
    if (k->cols <= topk_short)
        return on.report("topk", MIXPI_LAUNCH(topk_places, grid_for(count, team_threads),
                                     team_threads, 0, on.stream, *k));
    if (!is_topk_sorted(*k)) return mixpi_cuda_merge_topk(&on, x, k);
    return on.report(
        "topk", MIXPI_LAUNCH(topk_sorted, grid_for(k->rows, 1), team_threads, 0, on.stream, *k));
}
