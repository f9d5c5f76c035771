#pragma once
#include "rows.cu"
/* ==== 5. OPTIMIZERS ================================================== >>optimizers ====
 *
 * The table of parameters is in device memory. The host knows the number of rows, not their
 * lengths. So each block walks through the table, one window of rows at a time with one row per
 * thread, and finds its own chunks. Chunks are numbered through all active rows, independently of
 * the grid.
 */
namespace {

const int     look_threads = 256, bin_count = 1024;
const int64_t chunk_size = 8192;
const int64_t nothing_bad = 0x7FFFFFFFFFFFFFFF;

struct Chunk { int64_t row, first; };       /* row of the table; first element             */

struct Walk {
    const mixp_param_row *rows;
    int64_t count;
    int64_t next;               /* the first row after the window                          */
    int64_t from, to;           /* chunks of the window                                    */
    int64_t row, first, end;    /* this thread's row, and its chunks                       */
};

__device__ inline Walk walk_of(const mixp_param_row *rows, int64_t count) {
    Walk w = { rows, count, 0, 0, 0, 0, 0, 0 };
    return w;
}

__device__ inline void next_window(Walk &w) {
    int64_t chunks = 0, all;
    w.row = w.next + (int64_t)threadIdx.x;
    if (w.row < w.count && w.rows[w.row].active) chunks = ceil_div(w.rows[w.row].count, chunk_size);
    w.from = w.to;
    w.end = w.to + block_scan(chunks, &all);
    w.first = w.end - chunks;
    w.to += all;
    w.next += (int64_t)blockDim.x;
}

/* Finds chunk c, with all threads of a block. Returns false if there are fewer chunks; w.to is then
 * their number. */
__device__ inline bool walk_to(Walk &w, int64_t c, Chunk *found) {
    MIXPI_SHARED(Chunk, here, 1);
    if (c < w.from) w.next = w.from = w.to = 0;
    while (c >= w.to && w.next < w.count) next_window(w);
    if (c >= w.to) return false;
    if (c >= w.first && c < w.end) {
        here->row = w.row;
        here->first = (c - w.first) * chunk_size;
    }
    __syncthreads();
    *found = *here;
    __syncthreads();
    return true;
}
__device__ inline bool is_walked_through(const Walk &w) { return w.next >= w.count; }

__device__ inline int64_t chunk_end(const Chunk &c, int64_t count) {
    return least(c.first + chunk_size, count);
}

inline unsigned blocks_of(const State *s, int each) { return (unsigned)(s->processors * each); }

/* Is element i of a row padding? */
__device__ inline bool is_padding(const mixp_param_row &row, int64_t i) {
    return row.pitch && i % row.pitch >= row.width;
}

/* get8_any of a row's gradient or weight, which may be f64. Padding is 0. */
__device__ inline void get_of_row(
    const mixp_param_row &row, mixp_in a, int64_t i, int n, bool wide, float *v) {
    if (a.dtype == MIXP_F64)
        for (int k = 0; k < 8; k++) v[k] = k < n ? (float)((const double *)a.data)[i + k] : 0.0f;
    else get8_any(a, i, n, wide, v);
    for (int k = 0; row.pitch && k < 8; k++)
        if (is_padding(row, i + k)) v[k] = 0.0f;
}
/* put8_any likewise. Does not write padding. */
__device__ inline void put_of_row(
    const mixp_param_row &row, mixp_out a, int64_t i, int n, bool wide, const float *v) {
    if (!row.pitch && a.dtype != MIXP_F64) {
        put8_any(a, i, n, wide, v);
        return;
    }
    for (int k = 0; k < n; k++) {
        if (is_padding(row, i + k)) continue;
        if (a.dtype == MIXP_F64) ((double *)a.data)[i + k] = (double)v[k];
        else put1(a, i + k, v[k]);
    }
}

/* --- prepare, advance ------------------------------------------------------------------ */

static_assert(MIXP_MAX_GROUPS <= warp_size, "prepare has a thread for each group");

struct Prepare {
    int wanted;
    const int32_t *stop;        /* the flag in the context's Private that stops steps      */
    mixp_scaler_state *scaler;
    Mirrored of_step, of_scaler;
};

/* mixpi_step_prepare with one thread per group, in the only block that writes the step's state. */
__device__ inline void prepare(
    const mixp_step_plan &plan, mixp_step_state *step, const Prepare &p) {
    MIXPI_SHARED(int, due, 1);
    int g = (int)threadIdx.x;
    if (g == 0) {
        step->stopped = *p.stop;
        *due = mixpi_step_decide(&plan, step, p.scaler);
    }
    __syncthreads();
    if (*due && g < plan.n_groups)
        mixpi_step_scalars_of(&plan, step, g, step->applied, &step->update[g]);
    const Mirrored both[2] = { p.of_step, p.of_scaler };
    mirror_store(both);
}

__global__ void prepare_step(
    const __grid_constant__ mixp_step_plan plan, mixp_step_state *step, const Prepare p) {
    prepare(plan, step, p);
}

/* Advances the scale, except after a stopped step, which says nothing about the scale. */
__global__ void advance_scaler(const mixp_scaler_rule rule, mixp_scaler_state *scaler,
    const mixp_look *wide, const mixp_look *narrow, int32_t forgives, int32_t falls,
    const int32_t *stop, const Mirrored mirror) {
    if (threadIdx.x == 0 && *stop) {
        scaler->found_inf = 0;
    } else if (threadIdx.x == 0) {
        if (wide) mixpi_scaler_note_scaled(scaler, wide->largest);
        if (wide && narrow) mixpi_scaler_note_scaled(scaler, narrow->largest);
        mixpi_scaler_advance_guarded(scaler, &rule, forgives, falls, narrow);
    }
    const Mirrored one[1] = { mirror };
    mirror_store(one);
}

/* Puts back the buffers of a skipped step. */
__global__ void restore_parts(const __grid_constant__ mixp_restore_args k) {
    int32_t flag = k.n_flags == 0;
    for (int i = 0; i < k.n_flags; i++) flag |= *k.flags[i];
    if (!flag) return;

    /* Copy each part: 16 bytes at a time while both ends are aligned, then its last bytes. */
    const size_t first = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    const size_t step = (size_t)gridDim.x * blockDim.x;
    for (int p = 0; p < k.n_parts; p++) {
        const mixp_restore_part part = k.parts[p];
        const uintptr_t ends = (uintptr_t)part.to | (uintptr_t)part.from;
        const size_t wide = ends % sizeof(uint4) ? 0 : part.bytes / sizeof(uint4);
        for (size_t i = first; i < wide; i += step)
            static_cast<uint4 *>(part.to)[i] = static_cast<const uint4 *>(part.from)[i];
        for (size_t i = wide * sizeof(uint4) + first; i < part.bytes; i += step)
            static_cast<uint8_t *>(part.to)[i] = static_cast<const uint8_t *>(part.from)[i];
    }
}

/* A word of 8 bytes of an array that has only `bytes` more. */
__device__ inline uint64_t check_word(const char *p, int64_t bytes) {
    uint64_t word = 0;
    if (bytes >= 8) return *reinterpret_cast<const uint64_t *>(p);
    for (int64_t i = 0; i < bytes; i++) word |= (uint64_t)(uint8_t)p[i] << (8 * i);
    return word;
}

/* Finds what a step has made Inf or NaN in its buffers. Threads take the words of 8 bytes in turn,
 * and read what was there before only where a number is bad now. */
__global__ void check_parts(const __grid_constant__ mixp_check_buffers_args k) {
    const int64_t first = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    const int64_t step = (int64_t)gridDim.x * blockDim.x;
    uint64_t found = 0;
    for (int p = 0; p < k.n_parts && !found; p++) {
        const mixp_check_part part = k.parts[p];
        const mixpi_lanes l = mixpi_lanes_of(part.dtype);
        const char *now = static_cast<const char *>(part.now);
        const char *before = static_cast<const char *>(part.before);
        const int64_t bytes = part.count * l.bits / 8;
        for (int64_t i = first; 8 * i < bytes && !found; i += step) {
            const uint64_t is = check_word(now + 8 * i, bytes - 8 * i);
            if (!(mixpi_lanes_carry(&l, is) & l.sign)) continue;
            found = mixpi_lanes_bad(&part, &l, i, is, check_word(before + 8 * i, bytes - 8 * i));
        }
    }
    if (found)
        atomicMax(reinterpret_cast<unsigned long long *>(k.found), (unsigned long long)found);
}

/* The two halves of an agreement, by a warp. A step stopped on one rank is skipped on all ranks. */
__global__ void agree_ranks(
    const __grid_constant__ mixp_step_plan plan, const mixp_agree_args k, const int32_t *stop) {
    /* Read what all ranks wrote. */
    if (k.reads) {
        if (threadIdx.x == 0) mixpi_agree_read(k.table, k.size, k.step, k.scaler);
        return;
    }

    /* Clear the table; thread 0 fills the rank's own row. */
    const int words = k.size * MIXP_AGREE_WORDS;
    for (int i = (int)threadIdx.x; i < words; i += (int)blockDim.x) k.table[i] = 0.0;
    __syncthreads();
    if (threadIdx.x) return;
    double *row = k.table + (int64_t)k.rank * MIXP_AGREE_WORDS;
    mixpi_agree_fill(row, &plan, k.step, k.scaler);
    mixpi_agree_bad(row, k.looks, k.n_looks, k.first_leaf);
    if (k.in_parts) mixpi_agree_part(row, k.step);
    if (*stop) row[MIXP_AGREE_FOUND] = 1.0;
}

/* --- gather ---------------------------------------------------------------------------- *
 *
 * Chunk c belongs to bin c modulo bin_count. A block sums each of its bins in the order of chunks.
 * The last block to finish sums the bins, and prepares the step if requested. So every GPU gives
 * the same bits. Squares are summed in f32 in groups of eight, then in double: the relative error
 * of norm is below 2^-22.
 */

/* The result of a thread, then of a block. bad: twice the place among all chunks, plus 1 if NaN. */
struct Look {
    double  squares;
    int64_t bad;
    float   largest;
};

/* x * factor; a NaN keeps its payload, as on the CPU. */
__device__ inline float scaled(float x, float factor) {
    uint32_t u = mixp_bits_of_f32(x);
    return (u & 0x7FFFFFFFu) > 0x7F800000u ? mixp_f32_of_bits(u | 0x00400000u) : x * factor;
}

/* Finds the Inf or NaN element, and sums squares in double, in whose range 3e38 and 1e-38 stay. */
__device__ inline void look_closely(Look &l, const float *given, const float *v, int64_t place) {
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) {
        uint32_t had = mixp_bits_of_f32(given[k]) & 0x7FFFFFFFu;
        uint32_t has = mixp_bits_of_f32(v[k]) & 0x7FFFFFFFu;
        l.squares += (double)v[k] * (double)v[k];
        if (had < 0x7F800000u && has < 0x7F800000u) {
            l.largest = fmaxf(l.largest, mixp_f32_of_bits(has));
        } else if (l.bad == nothing_bad) {
            l.bad = 2 * (place + k) + ((had >= 0x7F800000u ? had : has) > 0x7F800000u);
        }
    }
}

__device__ inline void look_at(Look &l, const float *given, const float *v, int64_t place) {
    float squares = 0.0f, top = 0.0f;
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) {
        squares = fmaf(v[k], v[k], squares);
        top = fmaxf(top, fabsf(v[k]));
    }
    /* The sum is not finite (overflow, Inf, NaN), or has lost small squares. */
    if ((mixp_bits_of_f32(squares) & 0x7FFFFFFFu) >= 0x7F800000u ||
        (top < MIXPI_SQUARES_LOST && top > 0.0f)) {
        look_closely(l, given, v, place);
    } else {
        l.squares += (double)squares;
        l.largest = fmaxf(l.largest, top);
    }
}

/* One chunk, by a block. place: the place of its first element among all chunks. When unscaling in
 * place, the statistics are of the stored values, rounded to the gradient's dtype. */
__device__ inline void gather_chunk(
    Look &l, const mixp_param_row &row, const Chunk &c, int64_t place, float factor, int unscale) {
    const mixp_out grad = array_at(row.grad, row.grad_dtype);
    const bool wide = is_aligned(grad.data);
    const int64_t end = chunk_end(c, row.count);
    for (int64_t i = c.first + 8 * (int64_t)threadIdx.x; i < end; i += 8 * (int64_t)blockDim.x) {
        /* Read and scale 8 elements. */
        const int n = (int)least(8, end - i);
        float x[8], v[8];
        get_of_row(row, as_in(grad), i, n, wide, x);
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) v[k] = scaled(x[k], factor);

        /* Store them, and look at what was stored. */
        if (unscale) {
            MIXPI_UNROLL
            for (int k = 0; k < 8; k++) {
                if (grad.dtype == MIXP_F16 || grad.dtype == MIXP_BF16)
                    v[k] = low_value(grad.dtype, low_code(grad.dtype, v[k]));
                x[k] = v[k];
            }
            put_of_row(row, grad, i, n, wide, v);
        }
        look_at(l, x, v, place + (i - c.first));
    }
}

/* The joined result of all threads of a block. */
__device__ inline Look block_look(const Look &l) {
    Look all;
    all.squares = block_sum(l.squares);
    all.largest = block_max(l.largest);
    all.bad = block_min(l.bad);
    return all;
}

/* Sums the bins, with one block, when all bins are complete. */
__device__ inline void sum_up(Walk &w, const volatile Look *bins, mixp_step_state *step) {
    Look l = { 0.0, nothing_bad, 0.0f };
    for (int64_t i = (int64_t)threadIdx.x; i < least(bin_count, w.to); i += (int64_t)blockDim.x) {
        l.squares += bins[i].squares;
        l.largest = fmaxf(l.largest, bins[i].largest);
        l.bad = least(l.bad, bins[i].bad);
    }
    l = block_look(l);

    /* Find the chunk of the first Inf or NaN, with all threads. */
    Chunk c = { -1, -1 };
    if (l.bad != nothing_bad) walk_to(w, l.bad / 2 / chunk_size, &c);
    if (threadIdx.x) return;

    /* Write the step's statistics. */
    mixp_grad_stats stats;
    memset((void *)&stats, 0, sizeof stats);
    stats.norm = sqrt(l.squares);
    stats.largest = l.largest;
    stats.found_inf = l.bad != nothing_bad;
    stats.bad_row = c.row;
    stats.bad_element = stats.found_inf ? c.first + l.bad / 2 % chunk_size : -1;
    stats.bad_is_nan = stats.found_inf ? (int32_t)(l.bad % 2) : 0;
    step->stats = stats;
    step->clipped = 1.0f;
}

/* True for all threads of the last block to finish; that block sees the writes of all blocks. */
__device__ inline bool is_last_block(uint32_t *arrived) {
    MIXPI_SHARED(int, last, 1);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) *last = atomicInc(arrived, gridDim.x - 1) == gridDim.x - 1;
    __syncthreads();
    __threadfence();
    return *last != 0;
}

__global__ void __launch_bounds__(look_threads)
    gather_chunks(const mixp_grad_stats_args k, Look *bins, uint32_t *arrived,
        const __grid_constant__ mixp_step_plan plan, const Prepare then) {
    /* Sum the block's bins, each in the order of its chunks. */
    Walk w = walk_of(k.rows, k.count);
    const float factor = k.scale ? mixpi_scaler_inverse(*k.scale) : 1.0f;
    for (int64_t bin = blockIdx.x; bin < bin_count; bin += gridDim.x) {
        Look l = { 0.0, nothing_bad, 0.0f };
        if (is_walked_through(w) && bin >= w.to) break;
        Chunk at;
        for (int64_t c = bin; walk_to(w, c, &at); c += bin_count)
            gather_chunk(l, k.rows[at.row], at, c * chunk_size, factor, k.unscale);
        l = block_look(l);
        if (threadIdx.x == 0) bins[bin] = l;
    }

    /* The last block sums the bins, and prepares the step. */
    if (!is_last_block(arrived)) return;
    sum_up(w, bins, k.step);
    if (then.wanted) prepare(plan, k.step, then);
}

/* --- clip ------------------------------------------------------------------------------ */

__global__ void __launch_bounds__(look_threads, 4) clip_chunks(const mixp_clip_args job) {
    mixp_step_state *step = job.step;
    const float factor = (float)mixpi_clip_coefficient(step->stats.norm, job.max_norm);
    if (step->stats.found_inf || factor >= 1.0f) return;
    if (blockIdx.x == 0 && threadIdx.x == 0) step->clipped = factor;

    const mixp_param_row *rows = job.rows;
    Walk w = walk_of(rows, job.count);
    Chunk at;
    for (int64_t c = blockIdx.x; walk_to(w, c, &at); c += gridDim.x) {
        /* Multiply the chunk by the factor. */
        const mixp_param_row &row = rows[at.row];
        const mixp_out grad = array_at(row.grad, row.grad_dtype);
        const bool wide = is_aligned(grad.data);
        const int64_t end = chunk_end(at, row.count);
        for (int64_t i = at.first + 8 * (int64_t)threadIdx.x; i < end;
             i += 8 * (int64_t)blockDim.x) {
            const int n = (int)least(8, end - i);
            float v[8];
            get_of_row(row, as_in(grad), i, n, wide, v);
            MIXPI_UNROLL
            for (int k = 0; k < 8; k++) v[k] *= factor;
            put_of_row(row, grad, i, n, wide, v);
        }
    }
}

/* --- look ------------------------------------------------------------------------------ */

/* A thread's counts of magnitudes below each limit, counted as on the CPU. */
struct Seen {
    uint32_t top;
    int      nonfinite, nan, zeros, flushed, least, subnormal, past;
};

__device__ inline void look_at_one(Seen &s, const mixpi_look_limits &at, uint32_t v) {
    bool bad = v >= 0x7F800000u;
    if (!bad && v > s.top) s.top = v;
    s.nonfinite += bad;
    s.nan |= v > 0x7F800000u;
    s.zeros += v == 0;
    s.flushed += v <= at.flushed;
    s.least += v < at.least;
    s.subnormal += v < at.subnormal;
    s.past += !bad && v >= at.past;
}

__device__ inline void add_count(int64_t *to, int64_t n) {
    if (n) atomicAdd((unsigned long long *)(void *)to, (unsigned long long)n);
}

/* Joins counts and an integer maximum, which give the same result in any order. */
__device__ inline void join_look(mixp_look *to, const Seen &s, int64_t n) {
    if (!to) return;
    if (s.top) atomicMax((unsigned *)(void *)&to->largest, (unsigned)s.top);
    if (s.nan) atomicMax(&to->nan, 1);
    add_count(&to->count, n);
    add_count(&to->nonfinite, s.nonfinite);
    add_count(&to->zeros, s.zeros);
    add_count(&to->flushed, s.flushed - s.zeros);
    add_count(&to->least, s.least - s.flushed);
    add_count(&to->subnormal, s.subnormal - s.flushed);
    add_count(&to->saturated, s.past);
}

__device__ inline void look_at_some(
    Seen &s, const mixpi_look_limits &at, const float *v, int n, int64_t *exponents) {
    for (int j = 0; j < n; j++) {
        uint32_t bits = mixp_bits_of_f32(v[j]) & 0x7FFFFFFFu;
        look_at_one(s, at, bits);
        if (exponents) add_count(&exponents[bits >> 23], 1);
    }
}

__device__ inline uint32_t warp_top(uint32_t v) {
    MIXPI_UNROLL
    for (int k = 16; k; k /= 2) {
        uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, v, k);
        v = other > v ? other : v;
    }
    return v;
}

/* Elements per block: an int can count them. */
const int64_t look_piece = (int64_t)1 << 16;

__global__ void __launch_bounds__(look_threads)
    look_pieces(const mixp_look_args k, const mixpi_look_limits at) {
    for (int64_t first = blockIdx.x * look_piece; first < k.n; first += gridDim.x * look_piece) {
        /* Count the thread's elements of the piece. */
        const int64_t end = least(first + look_piece, k.n);
        const bool wide = is_aligned(k.x.data);
        Seen s = { 0, 0, 0, 0, 0, 0, 0, 0 };
        for (int64_t i = first + 8 * (int64_t)threadIdx.x; i < end; i += 8 * (int64_t)blockDim.x) {
            float v[8];
            int n = (int)least(8, end - i);
            get8_any(k.x, i, n, wide, v);
            look_at_some(s, at, v, n, k.exponents);
        }

        /* Sum the counts over the warp. */
        s.top = warp_top(s.top);
        s.nonfinite = warp_sum(s.nonfinite);
        s.nan = warp_sum(s.nan);
        s.zeros = warp_sum(s.zeros);
        s.flushed = warp_sum(s.flushed);
        s.least = warp_sum(s.least);
        s.subnormal = warp_sum(s.subnormal);
        s.past = warp_sum(s.past);

        /* Add them to the row and to the total; thread 0 adds the number of elements. */
        if (threadIdx.x % warp_size) continue;
        join_look(k.row, s, threadIdx.x ? 0 : end - first);
        join_look(k.total, s, threadIdx.x ? 0 : end - first);
    }
}

/* --- update ---------------------------------------------------------------------------- *
 *
 * Weights, moments and low copies get the CPU's bits: mixpi_adam_element and its relatives round
 * explicitly, so the compiler has nothing to contract. States of fewer bytes are widened before
 * these functions and narrowed after them. 16 threads share a block of 8-bit states, so all threads
 * of a warp go through a row together; threads past its end have no elements.
 */
static_assert(MIXP_STATE_BLOCK == 16 * 8, "half a warp has a block of states");
static_assert(chunk_size % MIXP_STATE_BLOCK == 0, "a chunk has whole blocks of states");

/* May all arrays of a parameter be read 8 elements at a time? */
__device__ inline bool is_wide_row(const mixp_param_row &row) {
    uintptr_t all = (uintptr_t)row.weight | (uintptr_t)row.master | (uintptr_t)row.grad |
                    (uintptr_t)row.m | (uintptr_t)row.v | (uintptr_t)row.low_f16 |
                    (uintptr_t)row.low_bf16 | (uintptr_t)row.third;
    return all % 16 == 0;
}

/* 8 codes of a state. */
template <class T> struct alignas(8 * sizeof(T)) Eight { T code[8]; };

template <class T>
__device__ inline Eight<T> get_codes(const void *from, int64_t i, int n, bool wide) {
    const T *p = (const T *)from + i;
    Eight<T> e = {};
    if (wide && n == 8) return *(const Eight<T> *)(const void *)p;
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++)
        if (k < n) e.code[k] = p[k];
    return e;
}
template <class T>
__device__ inline void put_codes(void *to, int64_t i, int n, bool wide, const Eight<T> &e) {
    T *p = (T *)to + i;
    if (wide && n == 8) {
        *(Eight<T> *)(void *)p = e;
        return;
    }
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++)
        if (k < n) p[k] = e.code[k];
}

/* 8 elements of a row: their places, their states as f32, and their random numbers. */
struct Cell {
    int64_t  i;
    int      n;
    bool     wide;
    float    rate;              /* of the row                                              */
    float    g[8], p[8], m[8], v[8];
    uint32_t random[8];
};

/* The maximum over the 16 threads that share a block of states. */
__device__ inline uint32_t half_warp_max(uint32_t x) {
    MIXPI_UNROLL
    for (int k = 8; k; k /= 2) {
        uint32_t y = __shfl_xor_sync(0xFFFFFFFFu, x, k);
        x = x > y ? x : y;
    }
    return x;
}
/* The largest finite magnitude of a block. */
__device__ inline uint32_t block_largest(const Cell &c, const float *x) {
    uint32_t largest = 0;
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) {
        uint32_t size = k < c.n ? mixpi_state_size(x[k]) : 0u;
        largest = largest > size ? largest : size;
    }
    return half_warp_max(largest);
}

__device__ inline void get_blocks(const mixp_param_row &row, Cell &c, bool second) {
    const uint8_t *scales = second ? row.v_scale : row.m_scale;
    const Eight<uint8_t> e = get_codes<uint8_t>(second ? row.v : row.m, c.i, c.n, c.wide);
    const uint32_t scale = c.n > 0 ? scales[c.i / MIXP_STATE_BLOCK] : 15u;
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) {
        if (second) c.v[k] = mixpi_state_v_value(e.code[k], scale);
        else c.m[k] = mixpi_state_m_value(e.code[k], scale);
    }
}
__device__ inline void put_m_blocks(const mixp_param_row &row, const Cell &c) {
    const uint32_t scale = mixpi_state_scale_m(block_largest(c, c.m));
    Eight<uint8_t> e;
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++)
        e.code[k] = (uint8_t)mixpi_state_m(c.m[k], scale, mixpi_random_m(c.random[k]));
    put_codes(row.m, c.i, c.n, c.wide, e);
    if (c.n > 0) row.m_scale[c.i / MIXP_STATE_BLOCK] = (uint8_t)scale;
}
__device__ inline void put_v_blocks(const mixp_param_row &row, const Cell &c) {
    /* Scale the roots by the largest of their block. */
    float root[8];
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) root[k] = sqrtf(c.v[k]);
    const uint32_t scale = mixpi_state_scale_v(block_largest(c, root));

    Eight<uint8_t> e;
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++)
        e.code[k] = (uint8_t)mixpi_state_v(root[k], scale, mixpi_random_v(c.random[k]));
    put_codes(row.v, c.i, c.n, c.wide, e);
    if (c.n > 0) row.v_scale[c.i / MIXP_STATE_BLOCK] = (uint8_t)scale;
}

/* Stores as bf16, rounded with the random bits at `shift` in the elements' words. */
__device__ inline void put_bf16(void *to, const Cell &c, const float *x, int shift) {
    Eight<uint16_t> e;
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++)
        e.code[k] = (uint16_t)mixpi_state_bf16(x[k], c.random[k] >> shift & 0xFFFFu);
    put_codes(to, c.i, c.n, c.wide, e);
}

template <bool with_small> __device__ inline void get_moments(const mixp_param_row &row, Cell &c) {
    if (with_small && row.m_scale) get_blocks(row, c, false);
    else if (row.m) get8_any(mixp_in{ row.m, row.m_dtype }, c.i, c.n, c.wide, c.m);
    if (with_small && row.v_scale) get_blocks(row, c, true);
    else if (row.v) get8_any(mixp_in{ row.v, row.v_dtype }, c.i, c.n, c.wide, c.v);
}
template <bool with_small>
__device__ inline void put_moments(const mixp_param_row &row, const Cell &c) {
    if (with_small && row.m_scale) put_m_blocks(row, c);
    else if (with_small && row.m && row.m_dtype == MIXP_BF16) put_bf16(row.m, c, c.m, 0);
    else if (row.m) put8_any(array_at(row.m, MIXP_F32), c.i, c.n, c.wide, c.m);
    if (with_small && row.v_scale) put_v_blocks(row, c);
    else if (with_small && row.v && row.v_dtype == MIXP_BF16) put_bf16(row.v, c, c.v, 16);
    else if (row.v) put8_any(array_at(row.v, MIXP_F32), c.i, c.n, c.wide, c.v);
}

/* Does the row's master hold only the bits that its bf16 weight lacks? */
__device__ inline bool is_split(const mixp_param_row &row) {
    return row.master && row.master_dtype != MIXP_F32;
}

__device__ inline void get_split(const mixp_param_row &row, Cell &c) {
    Eight<uint16_t> w = get_codes<uint16_t>(row.weight, c.i, c.n, c.wide);
    if (row.master_dtype == MIXP_BF16) {
        Eight<uint16_t> rest = get_codes<uint16_t>(row.master, c.i, c.n, c.wide);
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) c.p[k] = mixpi_master_from_16(w.code[k], rest.code[k]);
        return;
    }
    Eight<uint8_t> rest = get_codes<uint8_t>(row.master, c.i, c.n, c.wide);
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) c.p[k] = mixpi_master_from_8(w.code[k], rest.code[k]);
}
__device__ inline void put_split(const mixp_param_row &row, const Cell &c) {
    /* Split each weight into bf16 and the rest, of 16 or 8 bits. */
    Eight<uint16_t> w, wide_rest;
    Eight<uint8_t> rest;
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) {
        uint32_t random = mixpi_random_master(c.random[k]);
        mixpi_master_parts parts = row.master_dtype == MIXP_BF16
                                       ? mixpi_master_to_16(c.p[k])
                                       : mixpi_master_to_8(c.p[k], random);
        w.code[k] = (uint16_t)parts.weight;
        wide_rest.code[k] = (uint16_t)parts.rest;
        rest.code[k] = (uint8_t)parts.rest;
    }

    put_codes(row.weight, c.i, c.n, c.wide, w);
    if (row.master_dtype == MIXP_BF16) put_codes(row.master, c.i, c.n, c.wide, wide_rest);
    else put_codes(row.master, c.i, c.n, c.wide, rest);
}

template <bool with_small> __device__ inline void get_weight(const mixp_param_row &row, Cell &c) {
    mixp_in weight = { row.weight, row.weight_dtype };
    mixp_in master = { row.master, MIXP_F32 };
    if (with_small && is_split(row)) get_split(row, c);
    else get_of_row(row, row.master ? master : weight, c.i, c.n, c.wide, c.p);
}
template <bool with_small>
__device__ inline void put_weight(const mixp_param_row &row, const Cell &c) {
    /* Store the master, or the weight that has none; then the weight beside a whole master. */
    mixp_out weight = array_at(row.weight, row.weight_dtype);
    mixp_out master = array_at(row.master, MIXP_F32);
    if (with_small && is_split(row)) put_split(row, c);
    else put_of_row(row, row.master ? master : weight, c.i, c.n, c.wide, c.p);
    if (row.master && weight.dtype != MIXP_F32 && !(with_small && is_split(row)))
        put_of_row(row, weight, c.i, c.n, c.wide, c.p);

    /* Store the low copies. */
    if (row.low_f16) put8_any(array_at(row.low_f16, MIXP_F16), c.i, c.n, c.wide, c.p);
    if (row.low_bf16) put8_any(array_at(row.low_bf16, MIXP_BF16), c.i, c.n, c.wide, c.p);
}

/* The update of 8 elements by their optimizer. Each case has its own loop: a pointer that may be
 * NULL would move the moments out of the registers. */
__device__ inline void update_sgd(const mixp_step_scalars &u, bool momentum, Cell &c) {
    if (momentum) {
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) mixpi_sgd_element(&u, c.g[k], &c.p[k], &c.m[k]);
    } else {
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) mixpi_sgd_element(&u, c.g[k], &c.p[k], NULL);
    }
}
__device__ inline void update_rms(const mixp_step_scalars &u, bool momentum, Cell &c) {
    if (momentum) {
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) mixpi_rmsprop_element(&u, c.g[k], &c.p[k], &c.m[k], &c.v[k]);
    } else {
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) mixpi_rmsprop_element(&u, c.g[k], &c.p[k], NULL, &c.v[k]);
    }
}
/* The passes of Muon and of averages. */
__device__ inline void update_muon(const mixp_step_scalars &u, mixp_optimizer_kind kind, Cell &c) {
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) {
        if (kind == MIXP_OPTIMIZER_MUON) mixpi_muon_element(&u, c.rate, c.g[k], &c.p[k]);
        else if (kind == MIXP_OPTIMIZER_MUON_UNIT) c.p[k] = c.g[k] * u.factor;
        else if (kind == MIXP_OPTIMIZER_EMA) c.p[k] = mixpi_lerp(c.p[k], c.g[k], c.rate);
        else mixpi_muon_momentum_element(&u, c.g[k], &c.p[k], &c.m[k]);
    }
}
/* NAdam and Adamax, and kinds with a third state. */
__device__ inline void update_later(
    const mixp_step_scalars &u, mixp_optimizer_kind kind, const mixp_param_row &row, Cell &c) {
    float third[8];
    if (row.third) get8_any(mixp_in{ row.third, MIXP_F32 }, c.i, c.n, c.wide, third);
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++)
        mixpi_later_element(kind, &u, c.g[k], &c.p[k], &c.m[k], &c.v[k], &third[k]);
    if (row.third) put8_any(array_at(row.third, MIXP_F32), c.i, c.n, c.wide, third);
}
__device__ inline bool is_later(mixp_optimizer_kind kind, const mixp_param_row &row) {
    return kind == MIXP_OPTIMIZER_NADAM || kind == MIXP_OPTIMIZER_ADAMAX || row.third;
}

/* wide: the table may have small states and any kind; otherwise none of update_later. */
template <bool wide>
__device__ inline void update_elements(
    const mixp_step_scalars &u, mixp_optimizer_kind kind, const mixp_param_row &row, Cell &c) {
    const bool momentum = row.m != NULL;
    if (wide && is_later(kind, row)) update_later(u, kind, row, c);
    else if (kind >= MIXP_OPTIMIZER_MUON) update_muon(u, kind, c);
    else if (kind == MIXP_OPTIMIZER_SGD) update_sgd(u, momentum, c);
    else if (kind == MIXP_OPTIMIZER_RMSPROP || kind == MIXP_OPTIMIZER_ADAGRAD)
        update_rms(u, momentum, c);
    else if (kind == MIXP_OPTIMIZER_LION) {
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) mixpi_lion_element(&u, c.g[k], &c.p[k], &c.m[k]);
    } else {
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) mixpi_adam_element(&u, c.g[k], &c.p[k], &c.m[k], &c.v[k]);
    }
}

__device__ inline void count_lost(
    mixp_dtype low, const float *was, const Cell &c, mixp_lost &lost) {
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) {
        if (k >= c.n || mixp_bits_of_f32(was[k]) == mixp_bits_of_f32(c.p[k])) continue;
        lost.updates++;
        lost.lost += mixpi_update_is_lost(low, was[k], c.p[k]);
    }
}

/* key: for the row's random numbers in this step. with_small: the table may have states of fewer bytes
 * than f32, and be of any kind. counting: counts lost updates. */
template <bool with_small, bool counting>
__device__ inline void update_8(const mixp_step_scalars &u, const mixp_param_row &row,
    mixp_optimizer_kind kind, uint64_t key, Cell &c, mixp_lost &lost) {
    /* Read the gradient, the weight and the moments. */
    get_of_row(row, mixp_in{ row.grad, row.grad_dtype }, c.i, c.n, c.wide, c.g);
    get_weight<with_small>(row, c);
    get_moments<with_small>(row, c);

    /* Update the weight, and count the updates that its low copy loses. */
    float was[8];
    MIXPI_UNROLL
    for (int k = 0; counting && k < 8; k++) was[k] = c.p[k];
    update_elements<with_small>(u, kind, row, c);
    if (counting) count_lost(mixpi_row_low_weight(&row), was, c, lost);

    /* Store the weight and the moments; small states round with random numbers. */
    if (with_small) {
        for (int k = 0; k < 8; k++) c.random[k] = mixpi_state_random(key, (uint64_t)(c.i + k));
    }
    put_weight<with_small>(row, c);
    put_moments<with_small>(row, c);
}

__device__ inline void clear_8(const mixp_param_row &row, const Cell &c) {
    const float zeros[8] = { 0, 0, 0, 0, 0, 0, 0, 0 };
    put_of_row(row, array_at(row.grad, row.grad_dtype), c.i, c.n, c.wide, zeros);
}

/* The scalars of a row's update, with all threads of a block. A row that missed steps has its own
 * bias corrections. */
__device__ inline mixp_step_scalars update_for(
    const mixp_step_plan &plan, const mixp_step_state *step, const mixp_param_row &row) {
    MIXPI_SHARED(mixp_step_scalars, late, 1);
    if (!row.missed || !*row.missed) return step->update[row.group];
    if (threadIdx.x == 0)
        mixpi_step_scalars_of(&plan, step, row.group, step->applied - *row.missed, late);
    __syncthreads();
    return *late;
}

template <bool with_small, bool counting>
__global__ void __launch_bounds__(look_threads, with_small ? 1 : 2)
    update_chunks(const __grid_constant__ mixp_step_plan plan, const mixp_param_row *rows,
        int64_t count, const mixp_step_state *step, mixp_lost *lost) {
    Walk w = walk_of(rows, count);
    Chunk at;
    const bool skip = step->skip != 0;
    for (int64_t c = blockIdx.x; walk_to(w, c, &at); c += gridDim.x) {
        /* Read the chunk's row, and the scalars of its update. */
        const mixp_param_row row = rows[at.row];
        const mixp_step_scalars u = update_for(plan, step, row);
        const uint64_t key = mixpi_state_key(plan.seed, step->applied, row.tensor);
        const int64_t end = chunk_end(at, row.count);
        mixp_lost found = { 0, 0 };
        Cell cell;
        cell.wide = is_wide_row(row);
        cell.rate = row.rate;

        /* Update its elements, unless the step is skipped; clear a gradient that has been used. */
        for (int64_t from = at.first; from < end; from += 8 * (int64_t)blockDim.x) {
            cell.i = from + 8 * (int64_t)threadIdx.x;
            cell.n = (int)(cell.i < end ? least(8, end - cell.i) : 0);
            if (!skip) update_8<with_small, counting>(u, row, plan.kind, key, cell, found);
            if (row.active == 2) clear_8(row, cell);
        }
        if (counting) add_count(&lost[at.row].updates, found.updates);
        if (counting) add_count(&lost[at.row].lost, found.lost);
    }

    /* Count the steps that rows without a gradient have missed. */
    if (blockIdx.x || skip) return;
    for (int64_t i = (int64_t)threadIdx.x; i < count; i += (int64_t)blockDim.x)
        if (!rows[i].active && rows[i].missed) ++*rows[i].missed;
}

inline Prepare prepare_of(State *s, mixp_step_state *step, mixp_scaler_state *scaler) {
    const Mirrored none = { NULL, NULL, NULL, 0, 0 };
    Prepare p = { 1, &s->block->stop, scaler, mirror_of(s, step, sizeof *step),
        scaler ? mirror_of(s, scaler, sizeof *scaler) : none };
    return p;
}

}   /* namespace */

static mixp_result mixpi_cuda_grad_stats(const mixp_exec *x, const mixp_grad_stats_args *args) {
    Kernel k(x);
    if (!k.state) return MIXP_ERR_ORDER;
    Look *bins = (Look *)scratch_of(x, bin_count * sizeof *bins);
    if (!bins) return MIXP_ERR_MEMORY;

    /* The plan is in host memory: the kernel gets a copy. */
    static const mixp_step_plan no_plan = {};
    mixp_grad_stats_args job = *args;
    Prepare then = {};
    if (args->plan) then = prepare_of(k.state, args->step, args->scaler);
    job.plan = NULL;
    return k.report(
        "grad_stats", MIXPI_LAUNCH(gather_chunks, (unsigned)least(bin_count, blocks_of(k.state, 8)),
                          look_threads, 0, k.stream, job, bins, k.state->block->arrived,
                          args->plan ? *args->plan : no_plan, then));
}

static mixp_result mixpi_cuda_clip(const mixp_exec *x, const mixp_clip_args *args) {
    Kernel k(x);
    if (!k.state) return MIXP_ERR_ORDER;
    return k.report(
        "clip", MIXPI_LAUNCH(clip_chunks, blocks_of(k.state, 8), look_threads, 0, k.stream, *args));
}

static mixp_result mixpi_cuda_prepare(const mixp_exec *x, const mixp_prepare_args *args) {
    Kernel k(x);
    if (!k.state) return MIXP_ERR_ORDER;
    return k.report("prepare", MIXPI_LAUNCH(prepare_step, 1, warp_size, 0, k.stream, *args->plan,
                                   args->step, prepare_of(k.state, args->step, args->scaler)));
}

/* Does the table need the kernel for small states and all kinds? */
static bool has_wide_rows(const mixp_step_plan *plan) {
    return plan->small_states || plan->amsgrad || plan->centered ||
           plan->kind == MIXP_OPTIMIZER_NADAM || plan->kind == MIXP_OPTIMIZER_ADAMAX;
}

static mixp_result mixpi_cuda_update(const mixp_exec *x, const mixp_update_args *args) {
    Kernel k(x);
    const bool wide = has_wide_rows(args->plan);
    auto kernel = wide ? update_chunks<true, false> : update_chunks<false, false>;
    if (args->lost) kernel = wide ? update_chunks<true, true> : update_chunks<false, true>;
    if (!k.state) return MIXP_ERR_ORDER;
    return k.report("update", MIXPI_LAUNCH(kernel, blocks_of(k.state, 2), look_threads, 0, k.stream,
                                  *args->plan, args->rows, args->count, args->step, args->lost));
}

static mixp_result mixpi_cuda_advance(const mixp_exec *x, const mixp_advance_args *args) {
    Kernel k(x);
    if (!k.state) return MIXP_ERR_ORDER;
    return k.report("advance",
        MIXPI_LAUNCH(advance_scaler, 1, warp_size, 0, k.stream, *args->rule, args->scaler,
            args->wide, args->narrow, args->forgives, args->falls, &k.state->block->stop,
            mirror_of(k.state, args->scaler, sizeof *args->scaler)));
}

static mixp_result mixpi_cuda_restore(const mixp_exec *x, const mixp_restore_args *args) {
    Kernel k(x);
    if (!k.state) return MIXP_ERR_ORDER;

    /* Launch enough blocks for the largest part. */
    size_t most = 0;
    for (int i = 0; i < args->n_parts; i++)
        if (args->parts[i].bytes > most) most = args->parts[i].bytes;
    const int64_t blocks = ceil_div((int64_t)most, 16 * look_threads);
    const unsigned grid = (unsigned)least(blocks ? blocks : 1, blocks_of(k.state, 2));
    return k.report("restore", MIXPI_LAUNCH(restore_parts, grid, look_threads, 0, k.stream, *args));
}

static mixp_result mixpi_cuda_check_buffers(
    const mixp_exec *x, const mixp_check_buffers_args *args) {
    Kernel k(x);
    if (!k.state) return MIXP_ERR_ORDER;

    /* A thread takes four words of the largest part. */
    int64_t most = 0;
    for (int i = 0; i < args->n_parts; i++)
        most = args->parts[i].count > most ? args->parts[i].count : most;
    const int64_t blocks = ceil_div(most, 8 * look_threads);
    const unsigned grid = (unsigned)least(blocks ? blocks : 1, blocks_of(k.state, 2));
    return k.report(
        "check_buffers", MIXPI_LAUNCH(check_parts, grid, look_threads, 0, k.stream, *args));
}

static mixp_result mixpi_cuda_look(const mixp_exec *x, const mixp_look_args *args) {
    Kernel k(x);
    if (!k.state) return MIXP_ERR_ORDER;
    if (!is_real(args->x.dtype)) return MIXP_ERR_DTYPE;
    if (args->n <= 0) return args->n ? MIXP_ERR_ARGUMENT : MIXP_OK;
    if (!args->x.data || !args->row) return MIXP_ERR_ARGUMENT;
    int64_t pieces = ceil_div(args->n, look_piece), most = blocks_of(k.state, 8);
    return k.report("look", MIXPI_LAUNCH(look_pieces, (unsigned)least(pieces, most), look_threads,
                                0, k.stream, *args, mixpi_look_limits_of(args->low)));
}

static mixp_result mixpi_cuda_agree(const mixp_exec *x, const mixp_agree_args *args) {
    Kernel k(x);
    if (!k.state) return MIXP_ERR_ORDER;
    mixp_agree_args job = *args;
    job.plan = NULL; /* the host's: the kernel gets the plan itself */
    return k.report("agree", MIXPI_LAUNCH(agree_ranks, 1, warp_size, 0, k.stream, *args->plan, job,
                                 &k.state->block->stop));
}
