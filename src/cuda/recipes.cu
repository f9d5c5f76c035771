#pragma once
#include "sums.cu"
namespace {

/* --- recipes: the quantiser ------------------------------------------------------------- *
 *
 * The CPU's numbers: magnitudes are compared as bits, and each element is computed by the functions
 * that the CPU uses. First comes the array's amax, if its scale needs one: each thread block writes
 * the largest magnitude of its part, and each block of the next kernel reads them all.
 */
const int quantise_threads = 256, most_parts = 256, column_tile = 8 * warp_size;

struct Quantising {
    mixp_quantise_args k;
    mixpi_grid grid;
    Draws      draws;
    uint32_t  *parts;           /* the largest magnitude of each part of the array; or NULL.
                                   by_lines: of each row, or column                          */
    int        part_count;
    int        team;            /* threads that share a block: 2 to 32, or a thread block    */
    bool       wide;
};

/* The largest over teams of 2 to 32 threads of a warp. */
__device__ inline uint32_t team_most(uint32_t v, int team) {
    for (int k = team / 2; k; k /= 2) {
        uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, v, k);
        v = other > v ? other : v;
    }
    return v;
}
/* Over all threads of a block of whole warps; every thread gets the largest. */
__device__ inline uint32_t block_most(uint32_t v) {
    MIXPI_SHARED(uint32_t, part, 32);
    int lane = (int)threadIdx.x % warp_size, warp = (int)threadIdx.x / warp_size;
    v = team_most(v, warp_size);
    if (lane == 0) part[warp] = v;
    __syncthreads();
    v = team_most(lane < (int)blockDim.x / warp_size ? part[lane] : 0u, warp_size);
    __syncthreads();
    return v;
}

/* The largest magnitude of n elements from element i on, as bits; at least `most`. */
__device__ inline uint32_t look8(const Quantising &q, int64_t i, int n, uint32_t most) {
    float v[8];
    get8_any(q.k.x, i, n, q.wide, v);
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) {
        uint32_t a = mixp_bits_of_f32(v[k]) & 0x7FFFFFFFu;
        most = a > most ? a : most;
    }
    return most;
}

/* Element i, which is x, on the grid and back. An Inf or NaN of x stays: see mixpi_grid_keep. */
__device__ inline float put_on_grid(
    const Quantising &q, uint64_t key, int64_t i, float x, mixpi_scales s) {
    const float scaled = __fmul_rn(x, s.in);
    if ((mixp_bits_of_f32(x) & 0x7FFFFFFFu) >= 0x7F800000u) return __fmul_rn(scaled, s.out);
    uint32_t v = mixp_bits_of_f32(scaled), a = v & 0x7FFFFFFFu;
    uint32_t r = q.k.stochastic ? mixpi_grid_random(&q.grid, a, mixp_random_at(key, (uint64_t)i))
                                : mixpi_grid_round(&q.grid, a);
    return __fmul_rn(mixp_f32_of_bits(r | (v & 0x80000000u)), s.out);
}

/* The same for 8 elements of an fp8 format, by the processor's codes: they saturate as the grid
 * does. */
template <mixp_dtype D>
__device__ inline void put_on_grid_of(float *v, const float *in, const float *out) {
    MIXPI_UNROLL
    for (int k = 0; k < 8; k += 2) {
        const float scaled[2] = { __fmul_rn(v[k], in[k]), __fmul_rn(v[k + 1], in[k + 1]) };
        float number[2];
        fp8_values<D>(fp8_pair<D>(scaled[0], scaled[1]), number);
        MIXPI_UNROLL
        for (int j = 0; j < 2; j++) {
            const bool finite = (mixp_bits_of_f32(v[k + j]) & 0x7FFFFFFFu) < 0x7F800000u;
            v[k + j] = __fmul_rn(finite ? number[j] : scaled[j], out[k + j]);
        }
    }
}

/* The same for 8 elements from element i on. in, out: their scales. */
__device__ inline void put8_on_grid(
    const Quantising &q, uint64_t key, int64_t i, float *v, const float *in, const float *out) {
    if (fp8_is_native && q.k.element == MIXP_F8_E4M3)
        return put_on_grid_of<MIXP_F8_E4M3>(v, in, out);
    if (fp8_is_native && q.k.element == MIXP_F8_E5M2)
        return put_on_grid_of<MIXP_F8_E5M2>(v, in, out);
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) {
        const mixpi_scales s = { in[k], out[k] };
        v[k] = put_on_grid(q, key, i + k, v[k], s);
    }
}

/* Quantises n elements from element i on, with one pair of scales. */
__device__ inline void quantise8(
    const Quantising &q, uint64_t key, int64_t i, int n, mixpi_scales s) {
    float v[8], in[8], out[8];
    get8_any(q.k.x, i, n, q.wide, v);
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) {
        in[k] = s.in;
        out[k] = s.out;
    }
    put8_on_grid(q, key, i, v, in, out);
    plain_put<MIXP_BF16>(q.k.y, i, n, q.wide, v);
}

__device__ inline uint64_t quantise_key(const Quantising &q) {
    return q.k.stochastic ? key_now(q.draws) : 0;
}

/* The array's scale and amax. */
struct Whole { float scale, amax; };

/* All threads call it; one writes the product's factor, and the amax if wanted. */
__device__ inline Whole array_scale(const Quantising &q) {
    /* Join the parts' largest magnitudes. */
    uint32_t most = 0;
    if (q.part_count) {
        for (int i = (int)threadIdx.x; i < q.part_count; i += (int)blockDim.x)
            most = q.parts[i] > most ? q.parts[i] : most;
        most = block_most(most);
    }

    /* Write what the caller wants of the scale, with one thread. */
    const float scale = q.k.by_lines ? 1.0f : mixpi_scale_of_array(&q.k, most);
    const Whole whole = { scale, mixp_f32_of_bits(most) };
    if (blockIdx.x || threadIdx.x) return whole;
    mixpi_give_amax(&q.k, most);
    if (q.k.own) *q.k.own = 1.0f / scale;
    if (q.k.decode) *q.k.decode = __fmul_rn(1.0f / scale, q.k.times ? *q.k.times : 1.0f);
    return whole;
}

/* The same of a row or column, which quantise_rows_amax or quantise_columns_amax has looked at. */
__device__ inline Whole line_scale(const Quantising &q, const Whole &whole, int64_t line) {
    if (!q.k.by_lines) return whole;
    const Whole own = { mixpi_scale_of_array(&q.k, q.parts[line]),
        mixp_f32_of_bits(q.parts[line]) };
    return own;
}

__device__ inline void keep_line(const Quantising &q, int64_t line, uint32_t most) {
    q.parts[line] = most;
    q.k.line_scales[line] = 1.0f / mixpi_scale_of_array(&q.k, most);
}

/* by_lines: the largest magnitude of each row. */
__global__ void __launch_bounds__(quantise_threads)
    quantise_rows_amax(const __grid_constant__ Quantising q) {
    for (int64_t row = blockIdx.x; row < q.k.rows; row += gridDim.x) {
        uint32_t most = 0;
        int64_t c = (int64_t)threadIdx.x * 8;
        for (; c < q.k.cols; c += (int64_t)blockDim.x * 8)
            most = look8(q, row * q.k.cols + c, (int)least(8, q.k.cols - c), most);
        most = block_most(most);
        if (threadIdx.x == 0) keep_line(q, row, most);
    }
}

/* by_lines: of each column. A thread block takes 32 columns, a warp every eighth row. */
__global__ void __launch_bounds__(quantise_threads)
    quantise_columns_amax(const __grid_constant__ Quantising q) {
    MIXPI_SHARED(uint32_t, found, quantise_threads);
    const int lane = (int)threadIdx.x % warp_size, warps = quantise_threads / warp_size;
    const int64_t col = (int64_t)blockIdx.x * warp_size + lane;
    uint32_t most = 0;
    int64_t r = (int)threadIdx.x / warp_size;
    for (; col < q.k.cols && r < q.k.rows; r += warps) {
        const uint32_t a = mixp_bits_of_f32(get1(q.k.x, r * q.k.cols + col)) & 0x7FFFFFFFu;
        most = a > most ? a : most;
    }
    found[threadIdx.x] = most;
    __syncthreads();
    if ((int)threadIdx.x >= warp_size || col >= q.k.cols) return;
    for (int w = 1; w < warps; w++) {
        const uint32_t a = found[w * warp_size + lane];
        most = a > most ? a : most;
    }
    keep_line(q, col, most);
}

__global__ void __launch_bounds__(quantise_threads)
    quantise_amax(const __grid_constant__ Quantising q) {
    int64_t n = q.k.rows * q.k.cols;
    int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * 8;
    uint32_t most = 0;
    for (; i < n; i += (int64_t)gridDim.x * blockDim.x * 8)
        most = look8(q, i, (int)least(8, n - i), most);
    most = block_most(most);
    if (threadIdx.x == 0) q.parts[blockIdx.x] = most;
}

/* One scale for the whole array. */
__global__ void __launch_bounds__(quantise_threads)
    quantise_whole(const __grid_constant__ Quantising q) {
    uint64_t key = quantise_key(q);
    int64_t n = q.k.rows * q.k.cols;
    int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * 8;
    mixpi_scales s = mixpi_scales_of(&q.k, &q.grid, array_scale(q).scale, 0);
    for (; i < n; i += (int64_t)gridDim.x * blockDim.x * 8)
        quantise8(q, key, i, (int)least(8, n - i), s);
}

/* The first element of block b; blocks of one row follow each other. */
__device__ inline int64_t block_start(const mixp_quantise_args &k, int64_t b) {
    int64_t wide = k.cols / k.block_cols;
    if (k.block_rows == 1) return b * k.block_cols;
    return b / wide * k.block_rows * k.cols + b % wide * k.block_cols;
}
/* Where the e-th 8 elements of a block begin, from its first element on. */
__device__ inline int64_t eight_at(const mixp_quantise_args &k, int64_t e) {
    int64_t across = k.block_cols / 8;
    return k.block_rows == 1 ? e * 8 : e / across * k.cols + e % across * 8;
}

/* --- 4over6: see mixp_4over6 --- */

/* The errors of 16 elements from `at` on, `step` apart, with the scales for 4 and for 6. */
struct Errors { float four, six; };
__device__ inline Errors errors16(const Quantising &q, const Whole &whole, mixpi_scales four,
    mixpi_scales six, int64_t at, int64_t step) {
    Errors e = { 0.0f, 0.0f };
    for (int i = 0; i < 16; i++) {
        const float x = get1(q.k.x, at + i * step);
        e.four = __fadd_rn(e.four, mixpi_4over6_error(&q.k, &q.grid, whole.amax, four, x));
        e.six = __fadd_rn(e.six, mixpi_4over6_error(&q.k, &q.grid, whole.amax, six, x));
    }
    return e;
}

/* The scales that a block keeps. Each of 16 neighbouring threads has the errors of one row: they
 * are added over rows 8, 4, 2 and 1 apart. down: each thread has a block. */
__device__ inline mixpi_scales keep_smaller(
    Errors e, mixpi_scales four, mixpi_scales six, bool down) {
    for (int k = 8; k && !down; k /= 2) {
        e.four = __fadd_rn(e.four, __shfl_xor_sync(0xFFFFFFFFu, e.four, k));
        e.six = __fadd_rn(e.six, __shfl_xor_sync(0xFFFFFFFFu, e.six, k));
    }
    const float errors[2] = { e.four, e.six };
    return mixpi_4over6_choose(errors, four, six);
}

/* The scales of the block of 16 columns that begins at `at`. All threads of a warp call it; a team
 * past the last block (there: 0) has no elements. */
__device__ inline mixpi_scales choose_block(
    const Quantising &q, const Whole &whole, uint32_t most, int64_t at, bool there) {
    const mixpi_scales six = mixpi_scales_of(&q.k, &q.grid, whole.scale, most);
    if (!q.k.choice) return six;
    const mixpi_scales four = mixpi_scales_e4m3(whole.scale, 1.5f, most);
    const bool squares = q.k.block_rows > 1;
    const int64_t row = squares ? threadIdx.x % 16 : 0;
    Errors e = { 0.0f, 0.0f };
    if (there) e = errors16(q, whole, four, six, at + row * q.k.cols, 1);
    return keep_smaller(e, four, six, !squares);
}

/* Of a block of one column. */
__device__ inline mixpi_scales choose_column(
    const Quantising &q, const Whole &whole, uint32_t most, int64_t at, bool there) {
    const mixpi_scales six = mixpi_scales_of(&q.k, &q.grid, whole.scale, most);
    if (!q.k.choice || !there) return six;
    const mixpi_scales four = mixpi_scales_e4m3(whole.scale, 1.5f, most);
    return keep_smaller(errors16(q, whole, four, six, at, q.k.cols), four, six, true);
}

/* Blocks whose rows are multiples of 16 elements; a team of threads shares a block. */
__global__ void __launch_bounds__(quantise_threads)
    quantise_blocks(const __grid_constant__ Quantising q) {
    const int64_t eights = q.k.block_rows * q.k.block_cols / 8;
    const int64_t count = q.k.rows * q.k.cols / 8 / eights;
    const int teams = quantise_threads / q.team, own = (int)threadIdx.x / q.team;
    const int rank = (int)threadIdx.x % q.team;
    const Whole whole = array_scale(q);
    for (int64_t b = (int64_t)blockIdx.x * teams; b < count; b += (int64_t)gridDim.x * teams) {
        /* Find the block's largest magnitude; a team past the last block has no elements. */
        const int64_t at = block_start(q.k, b + own), end = b + own < count ? eights : 0;
        uint32_t most = 0;
        for (int64_t e = rank; e < end; e += q.team)
            most = look8(q, at + eight_at(q.k, e), 8, most);
        most = q.team > warp_size ? block_most(most) : team_most(most, q.team);

        /* Store the block's scale. */
        const int64_t row = end ? (b + own) * q.k.block_cols / q.k.cols : 0;
        const mixpi_scales s = choose_block(q, line_scale(q, whole, row), most, at, end > 0);
        if (q.k.scales && rank == 0 && end)
            q.k.scales[b + own] = mixpi_scale_code(q.k.scale, s.out);

        /* Quantise the block. */
        const uint64_t key = quantise_key(q);
        for (int64_t e = rank; e < end; e += q.team) quantise8(q, key, at + eight_at(q.k, e), 8, s);
    }
}

/* The largest magnitudes of 8 columns, over every eighth row of a block from `row` on. */
__device__ inline void look_down(const Quantising &q, int64_t at, int n, int row, uint32_t *most) {
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) most[k] = 0;
    for (int64_t r = row; n > 0 && r < q.k.block_rows; r += quantise_threads / warp_size) {
        float v[8];
        get8_any(q.k.x, at + r * q.k.cols, n, q.wide, v);
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) {
            uint32_t a = mixp_bits_of_f32(v[k]) & 0x7FFFFFFFu;
            most[k] = a > most[k] ? a : most[k];
        }
    }
}

/* Quantises the same elements. in, out: the scales of the 8 columns, in shared memory. */
__device__ inline void quantise_down(
    const Quantising &q, int64_t at, int n, int row, const float *in, const float *out) {
    uint64_t key = quantise_key(q);
    for (int64_t r = row; n > 0 && r < q.k.block_rows; r += quantise_threads / warp_size) {
        int64_t i = at + r * q.k.cols;
        float v[8];
        get8_any(q.k.x, i, n, q.wide, v);
        put8_on_grid(q, key, i, v, in, out);
        plain_put<MIXP_BF16>(q.k.y, i, n, q.wide, v);
    }
}

/* Blocks of one column. A thread block takes 256 columns of a row of blocks: a warp every eighth
 * row, a thread 8 columns; then each thread computes the scales of one column. */
__global__ void __launch_bounds__(quantise_threads)
    quantise_columns(const __grid_constant__ Quantising q) {
    MIXPI_SHARED(uint32_t, found, quantise_threads / warp_size * column_tile);
    MIXPI_SHARED(float, in, column_tile);
    MIXPI_SHARED(float, out, column_tile);
    const unsigned across = (unsigned)ceil_div(q.k.cols, column_tile);
    const int lane = (int)threadIdx.x % warp_size, warp = (int)threadIdx.x / warp_size;
    const int64_t col = (int64_t)(blockIdx.x % across) * column_tile + lane * 8;
    const int64_t at = blockIdx.x / across * q.k.block_rows * q.k.cols + col;
    const int n = col < q.k.cols ? (int)least(8, q.k.cols - col) : 0;
    const Whole whole = array_scale(q);

    /* Find the largest magnitudes of the columns in each warp's rows. */
    uint32_t most[8];
    look_down(q, at, n, warp, most);
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) found[warp * column_tile + lane * 8 + k] = most[k];
    __syncthreads();

    /* Join the warps, with a thread for each column, and compute the column's scales. */
    uint32_t all = 0;
    for (int w = 0; w < quantise_threads / warp_size; w++) {
        uint32_t a = found[w * column_tile + (int)threadIdx.x];
        all = a > all ? a : all;
    }
    const int64_t strip = blockIdx.x / across;
    const int64_t own = (int64_t)(blockIdx.x % across) * column_tile + threadIdx.x;
    const Whole of = line_scale(q, whole, own < q.k.cols ? own : 0);
    const mixpi_scales s =
        choose_column(q, of, all, strip * q.k.block_rows * q.k.cols + own, own < q.k.cols);
    in[threadIdx.x] = s.in;
    out[threadIdx.x] = s.out;
    if (q.k.scales && own < q.k.cols)
        q.k.scales[strip * q.k.cols + own] = mixpi_scale_code(q.k.scale, s.out);
    __syncthreads();

    quantise_down(q, at, n, warp, in + lane * 8, out + lane * 8);
}

/* Threads for each block: a power of two, at most one for 8 elements. */
inline int quantise_team(int64_t elements) {
    int team = 2;
    if (elements > 64 * warp_size) return quantise_threads;
    while (team < warp_size && team * 16 <= elements) team *= 2;
    return team;
}

typedef void (*QuantiseKernel)(Quantising q);

/* The kernel for these blocks; sets q->team and *grid. */
inline QuantiseKernel quantise_kernel(Quantising *q, unsigned *grid) {
    const mixp_quantise_args &k = q->k;
    if (k.scale == MIXP_SCALE_TENSOR) {
        *grid = grid_for(ceil_div(k.rows * k.cols, 8), quantise_threads);
        return quantise_whole;
    }
    if (k.block_cols == 1) {
        *grid = (unsigned)(k.rows / k.block_rows * ceil_div(k.cols, column_tile));
        return quantise_columns;
    }
    const int64_t elements = k.block_rows * k.block_cols;
    q->team = quantise_team(elements);
    *grid = grid_for(k.rows * k.cols / elements * q->team, quantise_threads);
    return quantise_blocks;
}

/* by_lines: the largest magnitude of each row or column, in scratch memory. */
inline mixp_result quantise_look_at_lines(const mixp_exec *x, Kernel *on, Quantising *q) {
    const bool down = q->k.block_cols == 1;
    const int64_t lines = mixpi_quantise_lines(&q->k);
    const int64_t blocks = down ? ceil_div(lines, warp_size) : least(lines, 65535);
    q->parts = (uint32_t *)scratch_of(x, (size_t)lines * sizeof *q->parts);
    if (!q->parts) return MIXP_ERR_MEMORY;
    return on->report("quantise", MIXPI_LAUNCH(down ? quantise_columns_amax : quantise_rows_amax,
                                      (unsigned)blocks, quantise_threads, 0, on->stream, *q));
}

/* The largest magnitudes of parts of the array, in scratch memory. */
inline mixp_result quantise_look(const mixp_exec *x, Kernel *on, Quantising *q) {
    int64_t threads = ceil_div(q->k.rows * q->k.cols, 8);
    if (q->k.by_lines) return quantise_look_at_lines(x, on, q);
    if (!mixpi_needs_amax(&q->k)) return MIXP_OK;
    q->part_count = (int)least(most_parts, ceil_div(threads, quantise_threads));
    q->parts = (uint32_t *)scratch_of(x, (size_t)q->part_count * sizeof *q->parts);
    if (!q->parts) return MIXP_ERR_MEMORY;
    return on->report("quantise",
        MIXPI_LAUNCH(quantise_amax, (unsigned)q->part_count, quantise_threads, 0, on->stream, *q));
}

/* --- recode --- */

struct Recoding {
    mixp_recode_args k;
    bool wide, wide_scales;
    uint64_t per_row, per_block;    /* inverses of k.cols, and of the elements of a row of blocks */
};
/* 1 / the scale of a code, exact, where scales are powers of two. 255, which is NaN, stays 255. */
__device__ inline float inverse_scale_of_code(mixp_block_scale kind, uint8_t code) {
    return mixpi_scale_of_code(kind, (uint8_t)(254 - code));
}

/* The codes of 8 elements; those of e2m1 fill lo. */
struct Codes8 { uint32_t lo, hi; };

/* The codes of the scales of 8 elements from element i on, one in each byte. Block row r has its
 * scales from r * cols on, one for each column. */
__device__ inline Codes8 scales8(const Recoding &q, int64_t i) {
    const int64_t row = over(i, q.k.cols, q.per_row);
    const int64_t blocks = over(i, q.k.block_rows * q.k.cols, q.per_block);
    const uint8_t *p = q.k.scales + blocks * q.k.cols + (i - row * q.k.cols);
    Codes8 c = { 0, 0 };
    if (q.wide_scales) {
        const uint2 u = *(const uint2 *)(const void *)p;
        c.lo = u.x;
        c.hi = u.y;
        return c;
    }
    MIXPI_UNROLL
    for (int j = 0; j < 4; j++) {
        c.lo |= (uint32_t)p[j] << 8 * j;
        c.hi |= (uint32_t)p[j + 4] << 8 * j;
    }
    return c;
}

/* Are x / s and x * (1 / s) the same, for every scale s? */
__device__ inline bool has_powers(const mixp_recode_args &k) { return k.scale != MIXP_SCALE_E4M3; }

/* The factors of 8 elements from element i on: by which a value is multiplied, or its code. In the
 * first case a scale that is not a power of two is itself, because the value is divided by it. */
__device__ inline void factors8(const Recoding &q, int64_t i, float *s) {
    MIXPI_UNROLL
    for (int j = 0; j < 8; j++) s[j] = 1.0f;
    if (!q.k.block_rows) return;

    const Codes8 c = scales8(q, i);
    const bool inverse = !q.k.decodes && has_powers(q.k);
    MIXPI_UNROLL
    for (int j = 0; j < 8; j++) {
        const uint8_t code = (uint8_t)((j < 4 ? c.lo : c.hi) >> 8 * (j % 4));
        s[j] =
            inverse ? inverse_scale_of_code(q.k.scale, code) : mixpi_scale_of_code(q.k.scale, code);
    }
}

__device__ inline bool is_e2m1(const mixp_recode_args &k) { return k.element == MIXP_F4_E2M1; }

__device__ inline uint8_t *codes_at(const mixp_recode_args &k, int64_t i) {
    return k.codes + (is_e2m1(k) ? i / 2 : i);
}

__device__ inline void put_codes8(const Recoding &q, int64_t i, Codes8 c) {
    uint8_t *p = codes_at(q.k, i);
    bool narrow = is_e2m1(q.k);
    if (q.wide && narrow) *(uint32_t *)(void *)p = c.lo;
    else if (q.wide) *(uint2 *)(void *)p = make_uint2(c.lo, c.hi);
    if (q.wide) return;
    MIXPI_UNROLL
    for (int j = 0; j < 4; j++) {
        p[j] = (uint8_t)(c.lo >> 8 * j);
        if (!narrow) p[j + 4] = (uint8_t)(c.hi >> 8 * j);
    }
}

__device__ inline Codes8 get_codes8(const Recoding &q, int64_t i) {
    const uint8_t *p = codes_at(q.k, i);
    bool narrow = is_e2m1(q.k);
    Codes8 c = { 0, 0 };
    if (q.wide) {
        c.lo = *(const uint32_t *)(const void *)p;
        if (!narrow) c.hi = *(const uint32_t *)(const void *)(p + 4);
        return c;
    }
    MIXPI_UNROLL
    for (int j = 0; j < 4; j++) {
        c.lo |= (uint32_t)p[j] << 8 * j;
        if (!narrow) c.hi |= (uint32_t)p[j + 4] << 8 * j;
    }
    return c;
}

__device__ inline void encode8(const Recoding &q, int64_t i, const float *s) {
    float v[8];
    plain_get<MIXP_BF16>(q.k.y, i, 8, q.wide, v);

    /* Pack their codes: 4 bits each, or 8. */
    Codes8 c = { 0, 0 };
    if (is_e2m1(q.k)) {
        MIXPI_UNROLL
        for (int j = 0; j < 8; j++) c.lo |= e2m1_code_of(v[j], s[j]) << 4 * j;
    } else {
        const bool powers = has_powers(q.k);
        uint32_t words[2];
        MIXPI_UNROLL
        for (int j = 0; j < 8; j++) v[j] = powers ? __fmul_rn(v[j], s[j]) : v[j] / s[j];
        fp8_codes<MIXP_F8_E4M3, 2>(v, false, words);
        c.lo = words[0];
        c.hi = words[1];
    }
    put_codes8(q, i, c);
}

__device__ inline void decode8(const Recoding &q, int64_t i, const float *s) {
    Codes8 c = get_codes8(q, i);
    float v[8];
    if (is_e2m1(q.k)) {
        MIXPI_UNROLL
        for (int j = 0; j < 8; j++) v[j] = mixpi_e2m1_value(c.lo >> 4 * j);
    } else {
        MIXPI_UNROLL
        for (int j = 0; j < 8; j += 2)
            fp8_values<MIXP_F8_E4M3>((j < 4 ? c.lo : c.hi) >> 8 * (j % 4) & 0xFFFFu, v + j);
    }
    MIXPI_UNROLL
    for (int j = 0; j < 8; j++) v[j] = __fmul_rn(v[j], s[j]);
    plain_put<MIXP_BF16>(q.k.y, i, 8, q.wide, v);
}

/* 8 elements of a row in each thread. */
__global__ void __launch_bounds__(quantise_threads)
    recode_eights(const __grid_constant__ Recoding q) {
    int64_t n = q.k.rows * q.k.cols;
    int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * 8;
    if (i == 0 && q.k.decodes && q.k.decode)
        *q.k.decode = __fmul_rn(*q.k.own, q.k.times ? *q.k.times : 1.0f);
    for (; i < n; i += (int64_t)gridDim.x * blockDim.x * 8) {
        float s[8];
        factors8(q, i, s);
        if (q.k.decodes) decode8(q, i, s);
        else encode8(q, i, s);
    }
}

/* --- what quantising has lost --- */

const int lose_threads = 256;

struct Losing {
    mixp_lose_args k;
    mixpi_loss    *parts;
    int            part_count;
    bool           wide;
};

/* The sum over the threads of a block, as a tree; in thread 0. */
__device__ inline mixpi_loss block_loss(mixpi_loss v) {
    MIXPI_SHARED(double, error, lose_threads);
    MIXPI_SHARED(int64_t, seen, lose_threads);
    MIXPI_SHARED(int64_t, clipped, lose_threads);
    const int t = (int)threadIdx.x;
    error[t] = v.error;
    seen[t] = v.seen;
    clipped[t] = v.clipped;

    /* Add the upper half of the threads to the lower half, until one is left. */
    for (int k = lose_threads / 2; k; k /= 2) {
        __syncthreads();
        if (t >= k) continue;
        error[t] += error[t + k];
        seen[t] += seen[t + k];
        clipped[t] += clipped[t + k];
    }

    v.error = error[t];
    v.seen = seen[t];
    v.clipped = clipped[t];
    return v;
}

/* The factor of element i. */
__device__ inline double factor_of(const mixp_lose_args &k, int64_t i, double decode) {
    if (!k.line_scales) return decode;
    return (double)k.line_scales[k.of_columns ? i % k.cols : i / k.cols];
}

__global__ void __launch_bounds__(lose_threads) lose_parts(const __grid_constant__ Losing q) {
    double decode = q.k.decode ? (double)*q.k.decode : 1.0;
    double scale = q.k.scale ? (double)*q.k.scale : 0.0;
    const mixp_in from_y = mixpi_in(q.k.y, MIXP_BF16);

    /* Add the losses of the thread's elements. */
    mixpi_loss sum = { 0.0, 0, 0 };
    int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * 8;
    for (; i < q.k.n; i += (int64_t)gridDim.x * blockDim.x * 8) {
        const int n = (int)least(8, q.k.n - i);
        float v[8], y[8];
        get8_any(q.k.x, i, n, q.wide, v);
        get8_any(from_y, i, n, q.wide, y);
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++)
            if (k < n)
                mixpi_loss_add(
                    &sum, v[k], (double)y[k] * factor_of(q.k, i + k, decode), scale, q.k.beyond);
    }

    sum = block_loss(sum);
    if (threadIdx.x == 0) q.parts[blockIdx.x] = sum;
}

/* One thread block joins the parts to the operand's loss. */
__global__ void __launch_bounds__(lose_threads) lose_join(const __grid_constant__ Losing q) {
    mixpi_loss sum = { 0.0, 0, 0 };
    if ((int)threadIdx.x < q.part_count) sum = q.parts[threadIdx.x];
    sum = block_loss(sum);
    if (threadIdx.x || (q.k.scale && *q.k.scale == 1.0f)) return;

    /* Keep the operand's largest error and clipping. */
    double n = sum.seen ? (double)sum.seen : 1.0, error = sum.error / n;
    double clipped = (double)sum.clipped / n;
    mixp_losses *out = q.k.out;
    if (error > out->error[q.k.operand]) out->error[q.k.operand] = error;
    if (clipped > out->clipped[q.k.operand]) out->clipped[q.k.operand] = clipped;
    out->seen |= (int64_t)1 << q.k.operand;
}

const int turn_threads = 256;

/* Moves a history by one place; the latest amax becomes the last. Returns, in each thread, the
 * largest magnitude as bits. Each round has read its part before it writes the part one place
 * earlier. */
__device__ inline uint32_t turn_history(float *history, int length, float newest) {
    uint32_t most = mixp_bits_of_f32(newest);
    for (int64_t first = 1; first < length; first += blockDim.x) {
        int64_t i = first + threadIdx.x;
        float v = i < length ? history[i] : 0.0f;
        uint32_t a = mixp_bits_of_f32(v);
        most = a > most ? a : most;
        __syncthreads();
        if (i < length) history[i - 1] = v;
    }
    __syncthreads();
    return block_most(most);
}

/* One thread block for each operand. */
__global__ void __launch_bounds__(turn_threads)
    turn_histories(const __grid_constant__ mixp_turn_args k) {
    int i = (int)blockIdx.x;
    float *history = k.history + (int64_t)i * k.length, newest = history[0];
    if (!(newest > 0.0f)) return;
    if (!mixpi_amax_is_usable(mixp_bits_of_f32(newest))) {
        __syncthreads();
        if (!threadIdx.x) history[0] = 0.0f;
        return;
    }
    float largest = mixp_f32_of_bits(turn_history(history, k.length, newest));
    if (threadIdx.x) return;
    history[k.length - 1] = newest;
    history[0] = 0.0f;
    k.scales[i] = mixpi_delayed_scale(&k, i, newest, largest, k.scales[i]);
}

/* Each thread transforms one column of 16 rows. */
__global__ void hadamard_columns(const __grid_constant__ mixp_hadamard_args k) {
    const int64_t n = k.rows / 16 * k.cols;
    int64_t t = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (; t < n; t += (int64_t)gridDim.x * blockDim.x) {
        /* Read 16 rows of the column, with their signs. */
        int64_t at = t / k.cols * 16 * k.cols + t % k.cols;
        float v[16];
        MIXPI_UNROLL
        for (int i = 0; i < 16; i++)
            v[i] = __fmul_rn(get1(k.a, at + i * k.cols), mixpi_hadamard_sign(i));

        /* Transform them: sums and differences of pairs 1, 2, 4 and 8 rows apart. */
        MIXPI_UNROLL
        for (int step = 1; step < 16; step *= 2) {
            MIXPI_UNROLL
            for (int i = 0; i < 16; i++) {
                if (i & step) continue;
                float a = v[i], b = v[i | step];
                v[i] = a + b;
                v[i | step] = a - b;
            }
        }

        /* Write them, divided by the root of 16. */
        MIXPI_UNROLL
        for (int i = 0; i < 16; i++)
            put1(mixpi_out_to(k.y, MIXP_BF16, 0), at + i * k.cols, v[i] * 0.25f);
    }
}

}   /* namespace */

static mixp_result mixpi_cuda_quantise(const mixp_exec *x, const mixp_quantise_args *k) {
    Kernel on(x);
    mixp_result r = mixpi_quantise_wrong(k);
    if (r != MIXP_OK) return r;
    if (!on.state) return MIXP_ERR_ORDER;

    /* Fill the job, and choose the kernel. */
    Quantising q;
    memset((void *)&q, 0, sizeof q);
    q.k = *k;
    q.grid = mixpi_grid_of(k->element);
    q.draws = draws_of(on.state, k->seed, k->step, k->tensor);
    q.wide = is_wide(k->x) && is_wide(k->y) && (k->scale == MIXP_SCALE_TENSOR || k->cols % 8 == 0);
    unsigned grid;
    QuantiseKernel kernel = quantise_kernel(&q, &grid);

    /* Find the array's amax, if its scale needs one; then quantise. */
    r = quantise_look(x, &on, &q);
    if (r != MIXP_OK) return r;
    return on.report("quantise", MIXPI_LAUNCH(kernel, grid, quantise_threads, 0, on.stream, q));
}

static mixp_result mixpi_cuda_recode(const mixp_exec *x, const mixp_recode_args *k) {
    Kernel on(x);
    mixp_result r = mixpi_recode_wrong(k);
    if (r != MIXP_OK) return r;
    if (!on.state) return MIXP_ERR_ORDER;

    Recoding q;
    memset((void *)&q, 0, sizeof q);
    q.k = *k;
    q.wide = is_wide(k->y) && is_wide(k->codes);
    q.wide_scales = (uintptr_t)k->scales % 8 == 0;
    q.per_row = inverse_of(k->cols);
    q.per_block = inverse_of(k->block_rows * k->cols);
    return on.report(
        "recode", MIXPI_LAUNCH(recode_eights, grid_for(k->rows * k->cols / 8, quantise_threads),
                      quantise_threads, 0, on.stream, q));
}

static mixp_result mixpi_cuda_hadamard(const mixp_exec *x, const mixp_hadamard_args *k) {
    Kernel on(x);
    mixp_result r = mixpi_hadamard_wrong(k);
    if (r != MIXP_OK) return r;
    if (!on.state) return MIXP_ERR_ORDER;
    return on.report("hadamard", MIXPI_LAUNCH(hadamard_columns,
                                     grid_for(k->rows / 16 * k->cols, 256), 256, 0, on.stream, *k));
}

static mixp_result mixpi_cuda_turn(const mixp_exec *x, const mixp_turn_args *k) {
    Kernel on(x);
    if (!k->history || !k->scales || k->length < 1) return MIXP_ERR_ARGUMENT;
    if (k->n < 1 || k->n > MIXP_TURN_OPERANDS) return MIXP_ERR_ARGUMENT;
    if (!on.state) return MIXP_ERR_ORDER;
    return on.report(
        "turn", MIXPI_LAUNCH(turn_histories, (unsigned)k->n, turn_threads, 0, on.stream, *k));
}

static mixp_result mixpi_cuda_lose(const mixp_exec *x, const mixp_lose_args *k) {
    Kernel on(x);
    if (!k->x.data || !k->y || !k->out || k->n < 1) return MIXP_ERR_ARGUMENT;
    if (k->operand < 0 || k->operand > 2) return MIXP_ERR_ARGUMENT;
    if (k->x.dtype != MIXP_F32 && k->x.dtype != MIXP_BF16) return MIXP_ERR_DTYPE;
    if (!on.state) return MIXP_ERR_ORDER;

    /* Add the losses of each part of the array. */
    Losing q;
    memset((void *)&q, 0, sizeof q);
    q.k = *k;
    q.wide = is_wide(k->x) && is_wide(k->y);
    q.part_count = (int)least(lose_threads, ceil_div(ceil_div(k->n, 8), lose_threads));
    q.parts = (mixpi_loss *)scratch_of(x, (size_t)q.part_count * sizeof *q.parts);
    if (!q.parts) return MIXP_ERR_MEMORY;
    mixp_result r = on.report(
        "lose", MIXPI_LAUNCH(lose_parts, (unsigned)q.part_count, lose_threads, 0, on.stream, q));
    if (r != MIXP_OK) return r;

    /* Join the parts. */
    return on.report("lose", MIXPI_LAUNCH(lose_join, 1, lose_threads, 0, on.stream, q));
}
