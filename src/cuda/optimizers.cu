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
    if (a.dtype != MIXP_F64) get8_any(a, i, n, wide, v);
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) {
        if (a.dtype == MIXP_F64) v[k] = k < n ? (float)((const double *)a.data)[i + k] : 0.0f;
        if (is_padding(row, i + k)) v[k] = 0.0f;
    }
}
/* put8_any likewise. Does not write padding. */
__device__ inline void put_of_row(
    const mixp_param_row &row, mixp_out a, int64_t i, int n, bool wide, const float *v) {
    if (!row.pitch && a.dtype != MIXP_F64) {
        put8_any(a, i, n, wide, v);
        return;
    }
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) {
        if (k >= n || is_padding(row, i + k)) continue;
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
 * The last block to finish sums the bins, and prepares the step if requested. So all GPUs are
 * bit-identical. Squares are summed in f32 in groups of eight, then in double: the relative error
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

}   /* namespace */
