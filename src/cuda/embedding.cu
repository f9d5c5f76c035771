#pragma once
#include "rows.cu"
namespace {

/* --- embedding ------------------------------------------------------------------------- */

struct EmbeddingJob : mixp_embedding_args {
    FaultFlag fault;
    bool      wide;
};
struct EmbeddingBackJob : mixp_embedding_backward_args {
    FaultFlag fault;
    int32_t  *bag;              /* of bags: the bag of each id, and its factor             */
    float    *factor;
    bool      wide;
};

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
    const int lane = (int)threadIdx.x % warp_size;
    for (int64_t r = team_first<warp_size>(); r < s.rows; r += team_step<warp_size>()) {
        const int32_t id = s.ids[r];
        const bool good = is_id(id, s.vocab);
        if (!good && lane == 0) note_fault(s.fault, FAULT_EMBEDDING_ID, r, id);

        /* Copy the bits of a row of the same dtype. */
        if (good && s.y.dtype == s.table.dtype) {
            copy_row(s, r * s.cols, id * s.cols, lane);
            continue;
        }

        /* Convert the row; an id out of range gives NaN. */
        Part p;
        MIXPI_PARTS(p, s.cols, warp_size, lane) {
            float v[8];
            if (good) get_part(s.table, id * s.cols, p, s.wide, 0.0f, v);
            MIXPI_UNROLL
            for (int k = 0; k < 8; k++)
                if (!good) v[k] = not_a_number();
            put_part(s.y, r * s.cols, p, s.wide, v);
        }
    }
}

/* --- bags --- */

struct BagRange { int64_t first, end; };

/* The ids of a bag. Notes an offset that falls or is out of range; the bag then has no ids. */
__device__ inline BagRange bag_range(
    const mixp_bags &b, int64_t rows, int64_t bag, const FaultFlag &fault, bool *good) {
    BagRange r = { bag * b.width, (bag + 1) * b.width };
    *good = true;
    if (!b.offsets) return r;
    r.first = b.offsets[bag];
    r.end = bag + 1 < b.count ? b.offsets[bag + 1] : rows;
    *good = r.first >= 0 && r.first <= rows && r.end >= r.first && r.end <= rows &&
            (bag || r.first == 0);
    if (*good) return r;
    note_fault(fault, FAULT_BAG_OFFSET, bag, (int32_t)r.first);
    r.first = r.end = 0;
    return r;
}

__device__ inline bool is_nan_bits(float x) {
    return (mixp_bits_of_f32(x) & 0x7FFFFFFFu) > 0x7F800000u;
}

/* One column of a bag: its sum, or its maximum with its place. */
__device__ inline float bag_column(const EmbeddingJob &s, BagRange r, int64_t bag, int64_t col) {
    const mixp_bags &b = s.bags;
    int32_t *at = b.largest ? b.largest + bag * s.cols + col : NULL;
    int32_t place = -1;
    float y = 0.0f;
    if (at && b.follow)
        return *at >= 0 && is_id(s.ids[*at], s.vocab)
                   ? get1(s.table, (int64_t)s.ids[*at] * s.cols + col)
                   : 0.0f;
    for (int64_t j = r.first; j < r.end; j++) {
        const int32_t id = s.ids[j];
        if (id == b.padding) continue;
        const float x =
            is_id(id, s.vocab) ? get1(s.table, (int64_t)id * s.cols + col) : not_a_number();
        if (!at) y = b.weights.data ? fmaf(get1(b.weights, j), x, y) : __fadd_rn(y, x);
        else if (place < 0 || (!is_nan_bits(y) && (is_nan_bits(x) || x > y))) {
            y = x;
            place = (int32_t)j;
        }
    }
    if (at) *at = place;
    return y;
}

/* A warp computes a bag, a column in each lane, with the CPU's bits. */
__global__ void __launch_bounds__(team_threads, 4)
    embedding_bags(const __grid_constant__ EmbeddingJob s) {
    const mixp_bags &b = s.bags;
    const int lane = (int)threadIdx.x % warp_size;
    for (int64_t bag = team_first<warp_size>(); bag < b.count; bag += team_step<warp_size>()) {
        bool good;
        int64_t counted = 0;
        const BagRange r = bag_range(b, s.rows, bag, s.fault, &good);
        for (int64_t j = r.first; j < r.end; j++) {
            const int32_t id = s.ids[j];
            if (id != b.padding && !is_id(id, s.vocab) && lane == 0)
                note_fault(s.fault, FAULT_EMBEDDING_ID, j, id);
            counted += id != b.padding;
        }
        for (int64_t col = lane; col < s.cols; col += warp_size) {
            float y = good ? bag_column(s, r, bag, col) : not_a_number();
            if (b.mode == MIXP_BAG_MEAN && counted) y = __fdiv_rn(y, (float)counted);
            put1(s.y, bag * s.cols + col, y);
        }
    }
}

/* Where a bag's gradient goes: the bag and the factor of each id; the bag is -1 where no bag has
 * the id. */
__global__ void __launch_bounds__(team_threads)
    embedding_bag_ids(const __grid_constant__ EmbeddingBackJob s) {
    const mixp_bags &b = s.bags;
    int64_t bag = (int64_t)blockIdx.x * team_threads + threadIdx.x;
    for (; bag < b.count; bag += (int64_t)gridDim.x * team_threads) {
        bool good;
        int64_t counted = 0;
        const BagRange r = bag_range(b, s.rows, bag, s.fault, &good);
        for (int64_t j = r.first; j < r.end; j++) counted += s.ids[j] != b.padding;
        const float n = b.mode == MIXP_BAG_MEAN ? (float)counted : 1.0f;
        for (int64_t j = r.first; j < r.end; j++) {
            s.bag[j] = (int32_t)bag;
            s.factor[j] = b.weights.data ? get1(b.weights, j) : __fdiv_rn(1.0f, n);
        }
    }
}

/* The gradients of the weights, a warp for each id. Sums differ from the CPU's in their order. */
__global__ void __launch_bounds__(team_threads)
    embedding_bag_weights(const __grid_constant__ EmbeddingBackJob s) {
    const int lane = (int)threadIdx.x % warp_size;
    for (int64_t j = team_first<warp_size>(); j < s.rows; j += team_step<warp_size>()) {
        const int32_t id = s.ids[j], bag = s.bag[j];
        float sum = 0.0f;
        if (bag >= 0 && id != s.bags.padding && is_id(id, s.vocab))
            for (int64_t c = lane; c < s.cols; c += warp_size)
                sum = fmaf(get1(s.table, (int64_t)id * s.cols + c),
                    get1(s.dy, (int64_t)bag * s.cols + c), sum);
        sum = warp_sum(sum);
        if (lane == 0) store_real(s.dweights, j, sum);
    }
}

/* Adds to a sum what id i of a bag adds to column col of its row. */
__device__ inline float add_of_bag(const EmbeddingBackJob &s, int64_t i, int64_t col, float sum) {
    const int64_t at = (int64_t)s.bag[i] * s.cols + col;
    if (!s.bags.largest) return fmaf(s.factor[i], get1(s.dy, at), sum);
    return s.bags.largest[at] == i ? __fadd_rn(sum, get1(s.dy, at)) : sum;
}

/* The backward pass sorts the rows of dy by their id, stably, then adds the rows of each id in
 * order, in f32, and rounds once.
 *
 * The sort: a block owns up to 256 consecutive ids, [low, high), and each of its warps a share of
 * all rows. A warp counts the rows of each id in its share, which gives the places where they
 * begin. Then it places them, 32 rows at a time. No block waits for another. */
struct Sorted {
    int64_t *order;             /* rows, by id                                             */
    int64_t *start;             /* vocab + 1: where an id's rows begin in `order`          */
};
const int64_t id_blocks = 256;
const int     sort_warps = team_threads / warp_size;
const int     ids_ahead = 8;    /* ids that a thread loads at a time                       */

/* The ids of rows i, i + 32, ... before `end`; -1: there is no such row, or it adds to no id. */
__device__ inline void read_ids(const EmbeddingBackJob &s, int64_t i, int64_t end, int32_t *id) {
    MIXPI_UNROLL
    for (int k = 0; k < ids_ahead; k++)
        id[k] = i + k * warp_size < end ? s.ids[i + k * warp_size] : -1;
    if (!s.bag) return;
    MIXPI_UNROLL
    for (int k = 0; k < ids_ahead; k++) {
        const int64_t row = i + k * warp_size;
        if (row < end && (s.bag[row] < 0 || id[k] == s.bags.padding)) id[k] = -1;
    }
}

/* Counts the ids of the block in rows [first, end) of a warp: `own` has a number per id. Returns
 * the number of rows with smaller ids in the thread's lane. */
__device__ inline int64_t count_ids(const EmbeddingBackJob &s, int64_t low, int64_t high,
    int64_t first, int64_t end, int32_t *own) {
    int64_t below = 0;
    int32_t id[ids_ahead];
    for (int64_t i = first + (int)threadIdx.x % warp_size; i < end; i += ids_ahead * warp_size) {
        read_ids(s, i, end, id);
        MIXPI_UNROLL
        for (int k = 0; k < ids_ahead; k++) {
            const int64_t row = i + k * warp_size;
            if (blockIdx.x == 0 && row < end && !is_id(id[k], s.vocab) && (!s.bag || id[k] >= 0))
                note_fault(s.fault, FAULT_EMBEDDING_ID, row, id[k]);
            below += id[k] >= 0 && id[k] < low;
            if (id[k] >= low && id[k] < high) atomicAdd(own + (id[k] - low), 1);
        }
    }
    return below;
}

/* Places a row in each lane of a warp, in the order of the lanes; an id of -1 has no row. next:
 * where the next row of each id goes. */
__device__ inline void place_rows(int64_t *order, int32_t *next, int32_t id, int64_t row) {
    const int lane = (int)threadIdx.x % warp_size;
    int before = 0, same = 0;
    MIXPI_UNROLL_BY(4)
    for (int k = 0; k < warp_size; k++) {
        const bool is = __shfl_sync(0xFFFFFFFFu, id, k) == id;
        before += is && k < lane;
        same += is;
    }
    const int32_t at = id >= 0 ? next[id] + before : 0;
    if (id >= 0) order[at] = row;
    __syncwarp();
    if (id >= 0 && before == 0) next[id] = at + same;
    __syncwarp();
}

__global__ void __launch_bounds__(team_threads)
    embedding_sort(const __grid_constant__ EmbeddingBackJob s, const Sorted to, int64_t each) {
    MIXPI_SHARED(int32_t, next, sort_warps * team_threads);
    const int me = (int)threadIdx.x, lane = me % warp_size, warp = me / warp_size;
    const int64_t low = (int64_t)blockIdx.x * each, high = least(low + each, s.vocab);
    const int64_t share = ceil_div(s.rows, sort_warps), first = warp * share;
    const int64_t end = least(first + share, s.rows);

    /* Count each warp's rows by id, and the rows with ids below the block's. */
    for (int k = me; k < sort_warps * team_threads; k += team_threads) next[k] = 0;
    __syncthreads();
    const int64_t below =
        block_sum(count_ids(s, low, high, first, end, next + warp * team_threads));

    /* Thread t finds where the rows of id low + t begin, and those of each warp among them. */
    int32_t mine = 0, all;
    for (int w = 0; w < sort_warps; w++) mine += next[w * team_threads + me];
    int32_t at = block_scan(mine, &all) - mine;
    if (low + me < high) to.start[low + me] = below + at;
    if (high == s.vocab && me == 0) to.start[s.vocab] = below + all;
    for (int w = 0; w < sort_warps; w++) {
        const int32_t count = next[w * team_threads + me];
        next[w * team_threads + me] = at;
        at += count;
    }
    __syncthreads();

    /* Place the rows, 32 at a time where any of them has an id of the block. Byte k of `found`
     * counts those of the k-th 32. */
    int32_t id[ids_ahead];
    for (int64_t i = first; i < end; i += ids_ahead * warp_size) {
        uint64_t found = 0;
        read_ids(s, i + lane, end, id);
        MIXPI_UNROLL
        for (int k = 0; k < ids_ahead; k++) {
            id[k] = id[k] >= low && id[k] < high ? (int32_t)(id[k] - low) : -1;
            found |= (uint64_t)(id[k] >= 0) << 8 * k;
        }
        found = warp_sum(found);
        MIXPI_UNROLL
        for (int k = 0; k < ids_ahead; k++)
            if (found >> 8 * k & 255)
                place_rows(
                    to.order + below, next + warp * team_threads, id[k], i + lane + k * warp_size);
    }
}

/* Adds the columns p of row i of dy to a sum, or what id i of a bag adds. */
template <mixp_dtype D>
__device__ inline void add_row(const EmbeddingBackJob &s, int64_t i, const Part &p, float *sum) {
    float v[8];
    if (!s.bag) typed_get_part<D>(s.dy, i * s.cols, p, s.wide, 0.0f, v);
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) {
        if (!s.bag) sum[k] += v[k];
        else if (k < p.n) sum[k] = add_of_bag(s, i, p.col + k * p.step, sum[k]);
    }
}

/* Each thread computes up to 8 columns of an id's row. Where 8 rows of vectors follow, it loads its
 * parts of them before it adds them. */
const int rows_ahead = 8;

template <mixp_dtype D>
__global__ void __launch_bounds__(team_threads)
    embedding_sums(const __grid_constant__ EmbeddingBackJob s, const Sorted by) {
    const int64_t panel = 8 * (int64_t)blockDim.x, panels = ceil_div(s.cols, panel);
    for (int64_t unit = blockIdx.x; unit < s.vocab * panels; unit += gridDim.x) {
        const int64_t id = unit / panels, to = id * s.cols, start = unit % panels * panel;
        const Part p = typed_part<D>(s.cols, start, (int)blockDim.x, (int)threadIdx.x);
        int64_t i = by.start[id], end = by.start[id + 1];
        if (p.col >= s.cols || (i == end && s.dtable.accumulate)) continue;
        float sum[8] = { 0 };
        if (s.dtable.accumulate) get_part(as_in(s.dtable), to, p, s.wide, 0.0f, sum);

        for (; D != any_real && i + rows_ahead <= end; i += rows_ahead) {
            Raw8<D> row[rows_ahead];
            float v[8];
            MIXPI_UNROLL
            for (int r = 0; r < rows_ahead; r++)
                row[r] = raw_get8<D>(s.dy.data, by.order[i + r] * s.cols + p.col);
            MIXPI_UNROLL
            for (int r = 0; r < rows_ahead; r++) {
                plain_values<D>(row[r], v);
                MIXPI_UNROLL
                for (int k = 0; k < 8; k++) sum[k] += v[k];
            }
        }
        for (; i < end; i++) add_row<D>(s, by.order[i], p, sum);
        put_part(s.dtable, to, p, s.wide, sum);
    }
}

/* --- gather ------------------------------------------------------------------------ */

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

/* Gradients of rows from which many elements were taken, as a sort does: a warp keeps a row of y in
 * shared memory. Its first thread adds, in increasing order, 32 elements that the warp has read. */
const int gather_row_bytes = 48 * 1024;

inline int64_t gather_row_size(const mixp_gather_args &k) {
    return (int64_t)sizeof(float) * (k.n + warp_size) + (int64_t)sizeof(int32_t) * warp_size;
}
inline bool is_kept_gather(const mixp_gather_args &k) {
    bool many = k.m >= 8 && k.m < 1 << 30 && k.n <= 4 * k.m;
    return k.inner == 1 && many && gather_row_size(k) <= gather_row_bytes;
}

__device__ inline float rounded_to(mixp_dtype d, float x) {
    return d == MIXP_F32 ? x : low_value(d, low_code(d, x));
}

__global__ void __launch_bounds__(team_threads)
    gather_back_rows(const __grid_constant__ GatherJob s) {
    /* A warp's part of shared memory: the row's sums, then 32 values and their ids. */
    MIXPI_DYNAMIC_SHARED(float, shared);
    int warps = (int)blockDim.x / warp_size, lane = (int)threadIdx.x % warp_size;
    const int n = (int)s.n, m = (int)s.m;
    float *sums = shared + (int)threadIdx.x / warp_size * (n + 2 * warp_size);
    float *values = sums + n;
    int32_t *ids = (int32_t *)(void *)(values + warp_size);

    int64_t o = (int64_t)blockIdx.x * warps + (int)threadIdx.x / warp_size;
    for (; o < s.outer; o += (int64_t)gridDim.x * warps) {
        for (int j = lane; j < n; j += warp_size) sums[j] = get1(as_in(s.y), o * n + j);
        for (int first = 0; first < m; first += warp_size) {
            /* Read 32 values and their ids, one in each lane. */
            int64_t from = o * m + first + lane;
            bool there = first + lane < m;
            ids[lane] = there ? s.ids[from] : -1;
            values[lane] = there ? get1(s.a, from) : 0.0f;
            if (there && !is_id(ids[lane], n))
                note_fault(s.fault, FAULT_GATHER_ID, from, ids[lane]);
            __syncwarp();

            /* Add them in order, with lane 0. */
            MIXPI_UNROLL_BY(4)
            for (int i = 0; lane == 0 && i < warp_size; i++)
                if (is_id(ids[i], n))
                    sums[ids[i]] = rounded_to(s.y.dtype, __fadd_rn(sums[ids[i]], values[i]));
            __syncwarp();
        }
        for (int j = lane; j < n; j += warp_size) put1(s.y, o * n + j, sums[j]);
        __syncwarp();
    }
}

/* --- rotary embeddings ------------------------------------------------------------- */

struct RopeJob : mixp_rope_args { float *cosine, *sine; };

__global__ void __launch_bounds__(team_threads) rope_angles(const __grid_constant__ RopeJob s) {
    int64_t half = s.d / 2, i = (int64_t)blockIdx.x * team_threads + threadIdx.x;
    for (; i < s.t * half; i += (int64_t)gridDim.x * team_threads) {
        double step =
            s.scaled ? s.frequency[i % half] : pow(s.base, -2.0 * (double)(i % half) / (double)s.d);
        double sine, cosine; /* by sincospi: sin and cos would need a stack           */
        sincospi((double)(s.first + i / half) * step * 0.31830988618379067154, &sine, &cosine);
        s.cosine[i] = (float)(s.scaled ? cosine * s.scale : cosine);
        s.sine[i] = (float)(s.scaled ? sine * s.scale : sine);
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

/* Rotates the pair (p, q) by angle k of those at `row`. */
__device__ inline void rotate_pair(const RopeJob &s, int64_t row, int k, float *p, float *q) {
    float c = s.cosine[row + k], w = s.back ? -s.sine[row + k] : s.sine[row + k];
    float turned = fmaf(*p, c, -__fmul_rn(*q, w));
    *q = fmaf(*q, c, __fmul_rn(*p, w));
    *p = turned;
}

/* One thread per 8 pairs: their elements are two groups of eight. */
__global__ void __launch_bounds__(team_threads) rope_eights(const __grid_constant__ RopeJob s) {
    int64_t half = s.d / 2, i = (int64_t)blockIdx.x * team_threads + threadIdx.x;
    for (; i < s.rows * s.t * s.heads * (half / 8); i += (int64_t)gridDim.x * team_threads) {
        /* Read both eights. */
        int64_t head = i / (half / 8), pair = i % (half / 8) * 8;
        int64_t row = head / s.heads % s.t * half + pair;
        int64_t first = head * s.d + (s.interleaved ? 2 * pair : pair);
        int64_t second = first + (s.interleaved ? 8 : half);
        float a[8], b[8];
        get8(s.a, first, a);
        get8(s.a, second, b);

        /* Rotate the pairs: neighbours in an eight, or the same place in both eights. */
        if (s.interleaved) {
            MIXPI_UNROLL
            for (int k = 0; k < 4; k++) {
                rotate_pair(s, row, k, a + 2 * k, a + 2 * k + 1);
                rotate_pair(s, row, k + 4, b + 2 * k, b + 2 * k + 1);
            }
        } else {
            MIXPI_UNROLL
            for (int k = 0; k < 8; k++) rotate_pair(s, row, k, a + k, b + k);
        }

        store8(s.y, first, 8, true, a);
        store8(s.y, second, 8, true, b);
    }
}

}   /* namespace */

static mixp_result mixpi_cuda_embedding(const mixp_exec *x, const mixp_embedding_args *k) {
    Kernel on(x);
    EmbeddingJob job = mixpi_cuda_job<EmbeddingJob>(*k);
    job.fault = fault_flag(on.state);
    job.wide = is_wide(k->y) && is_wide(k->table);
    if (!on.state) return MIXP_ERR_ORDER;
    if (!is_real(k->y.dtype) || !is_real(k->table.dtype)) return MIXP_ERR_DTYPE;
    if (k->y.accumulate || (k->rows > 0 && k->vocab <= 0)) return MIXP_ERR_ARGUMENT;
    if (k->bags.count > 0)
        return on.report("embedding",
            MIXPI_LAUNCH(embedding_bags, grid_for(k->bags.count * warp_size, team_threads),
                team_threads, 0, on.stream, job));
    if (k->rows <= 0) return MIXP_OK;
    return on.report(
        "embedding", MIXPI_LAUNCH(embedding_rows, grid_for(k->rows * warp_size, team_threads),
                         team_threads, 0, on.stream, job));
}

/* Lays the lists out in memory, unless memory is NULL. Returns the bytes that they need. */
static size_t mixpi_cuda_carve_sorted(Sorted *to, EmbeddingBackJob *job, void *memory) {
    const int64_t sorted = job->rows + job->vocab + 1, bags = job->bags.count ? job->rows : 0;
    if (memory) {
        to->order = (int64_t *)memory;
        to->start = to->order + job->rows;
        if (bags) job->bag = (int32_t *)(void *)(to->order + sorted);
        if (bags) job->factor = (float *)(void *)(job->bag + bags);
    }
    return (size_t)sorted * sizeof(int64_t) + (size_t)bags * (sizeof(int32_t) + sizeof(float));
}

/* Finds the bag of each id, and the gradients of the weights. */
static mixp_result mixpi_cuda_bags_back(Kernel &on, const EmbeddingBackJob &job) {
    mixp_result r = on.report("embedding_backward",
        cudaMemsetAsync(job.bag, 0xFF, (size_t)job.rows * sizeof *job.bag, on.stream));
    if (r == MIXP_OK)
        r = on.report("embedding_backward",
            MIXPI_LAUNCH(embedding_bag_ids, grid_for(job.bags.count, team_threads), team_threads, 0,
                on.stream, job));
    if (r != MIXP_OK || !job.dweights.data) return r;
    return on.report("embedding_backward",
        MIXPI_LAUNCH(embedding_bag_weights, grid_for(job.rows * warp_size, team_threads),
            team_threads, 0, on.stream, job));
}

static mixp_result mixpi_cuda_embedding_backward(
    const mixp_exec *x, const mixp_embedding_backward_args *k) {
    Kernel on(x);
    if (!on.state) return MIXP_ERR_ORDER;
    if ((k->dtable.data && !is_real(k->dtable.dtype)) || !is_real(k->dy.dtype))
        return MIXP_ERR_DTYPE;
    if (k->rows > 0 && k->vocab <= 0) return MIXP_ERR_ARGUMENT;
    if (k->vocab <= 0) return MIXP_OK;
    if (!k->dtable.data && (!k->bags.count || k->rows <= 0)) return MIXP_OK;

    /* Allocate memory for the sorted rows. */
    Sorted to = { NULL, NULL };
    EmbeddingBackJob job = mixpi_cuda_job<EmbeddingBackJob>(*k);
    job.fault = fault_flag(on.state);
    job.wide = is_wide(k->dtable) && is_wide(k->dy);
    void *memory = scratch_of(x, mixpi_cuda_carve_sorted(&to, &job, NULL));
    if (!memory) return MIXP_ERR_MEMORY;
    mixpi_cuda_carve_sorted(&to, &job, memory);
    if (job.bag && k->rows > 0) {
        const mixp_result found = mixpi_cuda_bags_back(on, job);
        if (found != MIXP_OK || !k->dtable.data) return found;
    }

    /* Sort the rows of dy by their id. */
    const int64_t each = least(ceil_div(k->vocab, id_blocks), team_threads);
    mixp_result r = on.report(
        "embedding_backward", MIXPI_LAUNCH(embedding_sort, (unsigned)ceil_div(k->vocab, each),
                                  team_threads, 0, on.stream, job, to, each));
    if (r != MIXP_OK || k->cols <= 0) return r;

    /* Add the rows of each id. */
    const mixp_dtype typed = typed_rows(job.wide && !job.bag, k->cols, k->dy.dtype);
    auto sums = typed == MIXP_F16    ? embedding_sums<MIXP_F16>
                : typed == MIXP_BF16 ? embedding_sums<MIXP_BF16>
                : typed == MIXP_F32  ? embedding_sums<MIXP_F32>
                                     : embedding_sums<any_real>;
    const int64_t threads = least(round_up(ceil_div(k->cols, 8), warp_size), team_threads);
    const unsigned grid = grid_for(k->vocab * ceil_div(k->cols, 8 * threads), 1);
    return on.report(
        "embedding_backward", MIXPI_LAUNCH(sums, grid, (unsigned)threads, 0, on.stream, job, to));
}

static mixp_result mixpi_cuda_gather(const mixp_exec *x, const mixp_gather_args *k) {
    Kernel on(x);
    GatherJob job = mixpi_cuda_job<GatherJob>(*k);
    int64_t count = k->outer * k->m * k->inner;
    if (!on.state) return MIXP_ERR_ORDER;
    if (!is_real(k->a.dtype) || !is_real(k->y.dtype)) return MIXP_ERR_DTYPE;
    if (k->y.accumulate || (count > 0 && k->n <= 0)) return MIXP_ERR_ARGUMENT;
    if (count <= 0) return MIXP_OK;
    job.fault = fault_flag(on.state);
    return on.report("gather", MIXPI_LAUNCH(gather_elements, grid_for(count, team_threads),
                                   team_threads, 0, on.stream, job));
}

static mixp_result mixpi_cuda_gather_backward(const mixp_exec *x, const mixp_gather_args *k) {
    Kernel on(x);
    GatherJob job = mixpi_cuda_job<GatherJob>(*k);
    int64_t columns = k->outer * k->inner;
    if (!on.state) return MIXP_ERR_ORDER;
    if (!is_real(k->a.dtype) || !is_real(k->y.dtype)) return MIXP_ERR_DTYPE;
    if (!k->y.accumulate) return MIXP_ERR_ARGUMENT;
    if (columns <= 0 || k->m <= 0) return MIXP_OK;
    job.fault = fault_flag(on.state);
    if (is_kept_gather(*k)) {
        int64_t warps = least(team_threads / warp_size, gather_row_bytes / gather_row_size(*k));
        return on.report("gather_backward",
            MIXPI_LAUNCH(gather_back_rows, grid_for(ceil_div(k->outer, warps), 1),
                (unsigned)(warps * warp_size), (size_t)(warps * gather_row_size(*k)), on.stream,
                job));
    }
    return on.report("gather_backward", MIXPI_LAUNCH(gather_back, grid_for(columns, team_threads),
                                            team_threads, 0, on.stream, job));
}

static mixp_result mixpi_cuda_rope(const mixp_exec *x, const mixp_rope_args *k) {
    Kernel on(x);
    if (!on.state) return MIXP_ERR_ORDER;
    if (!is_real(k->a.dtype) || !is_real(k->y.dtype)) return MIXP_ERR_DTYPE;
    if (k->d < 2 || k->d % 2 || !(k->base > 0.0)) return MIXP_ERR_ARGUMENT;
    const int64_t angles = k->t * (k->d / 2), pairs = k->rows * k->heads * angles;
    if (pairs <= 0) return MIXP_OK;

    /* Compute the angles' cosines and sines. */
    RopeJob job = mixpi_cuda_job<RopeJob>(*k);
    job.cosine = (float *)scratch_of(x, (size_t)(2 * angles) * sizeof(float));
    if (!job.cosine) return MIXP_ERR_MEMORY;
    job.sine = job.cosine + angles;
    mixp_result r = on.report("rope",
        MIXPI_LAUNCH(rope_angles, grid_for(angles, team_threads), team_threads, 0, on.stream, job));
    if (r != MIXP_OK) return r;

    /* Rotate the pairs, 8 a thread where addresses allow it. */
    if (k->d % 16 == 0 && is_wide(k->a) && is_wide(k->y))
        return on.report("rope", MIXPI_LAUNCH(rope_eights, grid_for(pairs / 8, team_threads),
                                     team_threads, 0, on.stream, job));
    return on.report("rope",
        MIXPI_LAUNCH(rope_pairs, grid_for(pairs, team_threads), team_threads, 0, on.stream, job));
}
/* The macros of rows.cu: no later room computes rows. */
#undef MIXPI_ROWS
#undef MIXPI_TYPED_ROWS
#undef MIXPI_PARTS
#undef MIXPI_TYPED_PARTS
