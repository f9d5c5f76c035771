#pragma once
#include "rows.cu"
/* ==== 7. ATTENTION ==================================================== >>attention ====
 *
 * Flash attention: scores are computed one tile at a time and never stored. q, k and v are read in
 * place, packed or separate. A block owns some rows of one head ("own") and walks over tiles of the
 * other side. Forward and dQ own queries and walk over keys; dK and dV own keys and walk over
 * queries, of all heads that share the keys. No two blocks add to the same element, so the bits
 * never vary. dQ runs first and stores delta for dK and dV.
 *
 * Tensor cores compute f16 and bf16 at d of 32, 64 and 128. Everything else, d up to 256, and all
 * of capability 7.0, whose tensor cores want other fragments, uses f32 kernels with the same walk.
 * Separate kernels bend scores (a cap, a mask, dropout), with half as many rows, because they have
 * no registers for more.
 */
#ifdef MIXPREC_CUDASIM
#  define MIXPI_UNROLL_BY(n)
#else
#  define MIXPI_PRAGMA(x) _Pragma(#x)
#  define MIXPI_UNROLL_BY(n) MIXPI_PRAGMA(unroll n)     /* fewer loads ahead, fewer registers */
#endif

namespace {

const int   attention_threads = 128, attention_most_d = 256;
constexpr float log2_e = 1.4426950408889634f, ln_2 = 0.6931471805599453f;
constexpr float lowest_float = -3.402823466e+38f;

struct Heads {
    int64_t      b;
    int          t, keys, heads, group, d;      /* group: heads of q for one of k and v      */
    int          ahead;         /* query i sees keys up to i + ahead                         */
    float        scale;
    mixp_in      q, k, v, y, dy;                /* y and dy: read in the backward pass       */
    mixp_head_strides q_at, k_at, v_at, y_at;
    mixp_out     out, dk, dv;   /* out: y, or the gradient of q                              */
    float       *lse;           /* written by the forward pass, read by the backward pass    */
    float       *delta;         /* dy . y of each row, laid out as lse                       */
    const int32_t *lengths;     /* keys of each sequence, or NULL                            */
    FaultFlag    fault;
    mixp_in      mask;
    mixp_head_strides mask_at;
    int          mask_key;
    bool         bends, may_hide;               /* may_hide: a query may see no key          */
    float        softcap, kept; /* kept: the factor of weights that dropout keeps            */
    Draws        draws;
    uint64_t     limit;         /* random numbers below it drop; 0: nothing is dropped       */
};

const int most_ahead = 0x3FFFFFFF, most_rows = 0x3FFFFF00;      /* their sum is an int       */

/* The first element of head z of q, counted through all sequences; of the head of k or v that head
 * z of q uses; and of head z of k or v. */
__device__ inline int64_t head_at(const Heads &h, const mixp_head_strides &at, int z) {
    return z / h.heads * at.sequence + z % h.heads * at.head;
}
__device__ inline int64_t met_at(const Heads &h, const mixp_head_strides &at, int z) {
    int met = z % h.heads / h.group;
    return z / h.heads * at.sequence + met * at.head;
}

/* How many keys head z sees at most; later keys are padding. */
__device__ inline int keys_of(const Heads &h, int z) {
    int sequence = z / h.heads, length;
    if (!h.lengths) return h.keys;
    length = h.lengths[sequence];
    if ((length < 0 || length > h.keys) && threadIdx.x == 0)
        note_fault(h.fault, FAULT_LENGTH, sequence, length);
    return (int)least(length < 0 ? 0 : length, h.keys);
}

/* --- what may stand between scores and weights ----------------------------------------- */

/* A score, times scale and capped. */
__device__ inline float capped(const Heads &h, float s) {
    return h.softcap > 0.0f ? h.softcap * tanhf(s * h.scale / h.softcap) : s * h.scale;
}

/* The slope of the cap. */
__device__ inline float cap_slope(const Heads &h, float s) {
    float part = h.softcap > 0.0f ? s / h.softcap : 0.0f;
    return fmaf(-part, part, 1.0f);
}

/* The mask's value for a query and a key, both in range. */
__device__ inline float mask_of(const Heads &h, int z, int query, int key) {
    if (!h.mask.data) return 0.0f;
    return get1(h.mask,
                head_at(h, h.mask_at, z) + query * h.mask_at.row + (int64_t)key * h.mask_key);
}

/* The key of dropout's random numbers; 0 without dropout. */
__device__ inline uint64_t draws_key(const Heads &h) { return h.limit ? key_now(h.draws) : 0; }

/* The factor of a weight: 0 where it is dropped. */
__device__ inline float kept_of(const Heads &h, uint64_t draws, int z, int query, int key) {
    int64_t at = ((int64_t)z * h.t + query) * h.keys + key;
    if (!h.limit) return 1.0f;
    return mixp_random_at(draws, (uint64_t)at) >= h.limit ? h.kept : 0.0f;
}

/* --- tiles for tensor cores ------------------------------------------------------------ *
 *
 * A tile is rows of D 2-byte elements in shared memory. Its 16-byte chunks are permuted within
 * a row, so that 8 rows of one matrix for ldmatrix lie in different banks.
 *
 * A warp multiplies fragments: M tiles of 16 own rows, in registers. In an accumulator f[4] a
 * thread has row lane / 4 (f[0], f[1]) and row lane / 4 + 8 (f[2], f[3]), at columns
 * lane % 4 * 2 and the next:
 *
 *     columns    0, 1      2, 3      4, 5      6, 7
 *     row 0      lane 0    lane 1    lane 2    lane 3       f[0], f[1]
 *     row 1      lane 4    lane 5    lane 6    lane 7
 *     ...                                      lane 31
 *     row 8      lane 0    lane 1    lane 2    lane 3       f[2], f[3]
 */
template <int D> __device__ inline int chunk_at(int row, int chunk) {
    return row * D + (chunk ^ (D == 32 ? row >> 1 & 3 : row & 7)) * 8;
}

/* Starts the copy of rows [first, first + rows) of a head; rows beyond t become 0. */
template <int D, int rows>
__device__ inline void tile_fetch(uint16_t *tile, const uint16_t *from, int ld, int first, int t) {
    const int step = attention_threads / (D / 8);
    int row = (int)threadIdx.x / (D / 8), chunk = (int)threadIdx.x % (D / 8);
    const uint16_t *at = from + (int64_t)(first + row) * ld + chunk * 8;
    tile += chunk_at<D>(row, chunk);
    MIXPI_UNROLL
    for (int e = 0; e < rows; e += step) {
        bool there = first + row + e < t;
        cp_async_16(tile + e * D, there ? at : from, there ? 16 : 0);
        at += (int64_t)step * ld;
    }
}

/* chunk_at for row `row` + `within`. row is a multiple of 16, so row does not permute chunks. */
template <int D> __device__ inline int fragment_at(int row, int within, int chunk) {
    return row * D + chunk_at<D>(within, chunk);
}

/* The left factor: rows [row, row+16), columns [16 k, 16 k + 16). */
template <int D>
__device__ inline void left_factor(uint32_t *a, const uint16_t *tile, int row, int k) {
    int lane = (int)threadIdx.x % warp_size;
    ldmatrix_x4<false>(a, tile + fragment_at<D>(row, lane % 16, 2 * k ^ lane / 16));
}
/* The right factor of own x other': 16 rows of the tile are 16 columns of the product. */
template <int D>
__device__ inline void right_rows(uint32_t *b, const uint16_t *tile, int row, int k) {
    int lane = (int)threadIdx.x % warp_size;
    ldmatrix_x4<false>(b,
                       tile + fragment_at<D>(row, lane % 8 + lane / 16 * 8, 2 * k ^ lane / 8 % 2));
}
/* The right factor of scores x other: 16 rows are summed over, 16 columns stay. */
template <int D>
__device__ inline void right_columns(uint32_t *b, const uint16_t *tile, int row, int k) {
    int lane = (int)threadIdx.x % warp_size;
    ldmatrix_x4<true>(b, tile + fragment_at<D>(row, lane % 16, 2 * k ^ lane / 16));
}

template <bool bf16> __device__ inline uint32_t pair_code(float lo, float hi) {
    uint32_t bits;
    if (bf16) {
        __nv_bfloat162 pair = __floats2bfloat162_rn(lo, hi);
        memcpy(&bits, (void *)&pair, 4);
    } else {
        __half2 pair = __floats2half2_rn(lo, hi);
        memcpy(&bits, (void *)&pair, 4);
    }
    return bits;
}

/* Turns two accumulators side by side into a left factor of 16 columns, within their registers. */
template <bool bf16> __device__ inline void as_left_factor(uint32_t *a, const float (*f)[4]) {
    a[0] = pair_code<bf16>(f[0][0], f[0][1]);
    a[1] = pair_code<bf16>(f[0][2], f[0][3]);
    a[2] = pair_code<bf16>(f[1][0], f[1][1]);
    a[3] = pair_code<bf16>(f[1][2], f[1][3]);
}

/* sums[M][D] += weights[M][16] x rows [row, row+16) of the tile */
template <int D, int M, bool bf16>
__device__ inline void add_weighted(float (*sums)[D / 8][4], const uint32_t (*weights)[4],
                                    const uint16_t *tile, int row) {
    MIXPI_UNROLL
    for (int n = 0; n < D / 16; n++) {
        uint32_t b[4];
        right_columns<D>(b, tile, row, n);
        MIXPI_UNROLL
        for (int m = 0; m < M; m++) {
            mma_16816<bf16>(sums[m][2 * n], weights[m], b);
            mma_16816<bf16>(sums[m][2 * n + 1], weights[m], b + 2);
        }
    }
}

/* Stores or adds two neighbours. */
__device__ inline void put_pair(mixp_out a, int64_t i, float x, float y) {
    if (a.dtype == MIXP_F32) {
        float2 *p = (float2 *)(void *)((float *)a.data + i);
        float2 old = a.accumulate ? *p : make_float2(0.0f, 0.0f);
        *p = a.accumulate ? make_float2(old.x + x, old.y + y) : make_float2(x, y);
    } else {
        uint32_t *p = (uint32_t *)(void *)((uint16_t *)a.data + i);
        uint32_t old = a.accumulate ? *p : 0;
        if (a.accumulate) x += low_value(a.dtype, old & 0xFFFFu);
        if (a.accumulate) y += low_value(a.dtype, old >> 16);
        *p = low_pair(a.dtype, x, y);
    }
}

/* --- rows whose largest score repeats --------------------------------------------------- *
 *
 * Two keys of equal score, the others far below: y is the mean of two values of 8 or 11 bits, half
 * the time halfway between two numbers, plus dust. Rounding to nearest follows the dust, which may
 * have one sign in many rows: y is biased by up to a quarter of a unit, and so is delta = dy . y,
 * which pulls the gradient of q in one direction until training fails (arXiv 2510.04212; there the
 * sum is stored before its division, with the same effect). Weights in bf16 are not the cause: they
 * are rounded without bias and summed in f32. So y of such a row is rounded up or down with the
 * probabilities that make its mean right, by a hash of its own bits: no row depends on another.
 */

/* Is the sum of a row's weights, of which the largest is 1, a small number of ones and dust? More
 * dust than 2^-12 moves y off the half. Of rows whose weights are spread, one in 2,000 has such a
 * sum by chance. */
__device__ inline bool top_repeats(float sum) {
    float dust = fabsf(sum - rintf(sum));
    return sum > 1.5f && sum < 8.5f && dust > 0.0f && dust < 0.000244140625f;
}
/* Does storing y of this row toss a coin for each element? */
__device__ inline bool is_tossed(const Heads &h, float sum) {
    return h.out.dtype != MIXP_F32 && !h.out.accumulate && top_repeats(sum);
}
/* A number of f16 or bf16 next to x, by a coin. A large x stays, to be rounded as others are. */
__device__ inline float tossed(mixp_dtype dtype, float x) {
    uint32_t bits = mixp_bits_of_f32(x), cut = dtype == MIXP_BF16 ? 0xFFFFu : 0x1FFFu;
    uint32_t coin = (bits ^ bits >> 15) * 0x2C1B3C6Du;
    coin = (coin ^ coin >> 12) * 0x297A2D39u;
    if (!(fabsf(x) < 32768.0f)) return x;
    return mixp_f32_of_bits((bits + ((coin ^ coin >> 15) & cut)) & ~cut);
}

/* --- forward on tensor cores ------------------------------------------------------------ */

template <int D, bool bends> struct Forward {
    static const int M = D == 128 || bends ? 1 : 2, rows = 64 * M,
                     keys = D == 128 ? 32 : 64;
    static const int bytes = (rows + 4 * keys) * D * 2;
};

/* A warp's state for its rows: sums over the keys so far, relative to 2^top. */
template <int D, int M> struct RowSums { float o[M][D / 8][4], top[M][2], sum[M][2]; };

/* s = queries x keys' */
template <int D, bool bf16, int M, int N>
__device__ inline void forward_scores(float (*s)[N / 8][4], const uint32_t (*q)[D / 16][4],
                                      const uint16_t *keys) {
    MIXPI_UNROLL
    for (int k = 0; k < D / 16; k++) {
        MIXPI_UNROLL
        for (int n = 0; n < N / 16; n++) {
            uint32_t b[4];
            right_rows<D>(b, keys, 16 * n, k);
            MIXPI_UNROLL
            for (int m = 0; m < M; m++) {
                mma_16816<bf16>(s[m][2 * n], q[m][k], b);
                mma_16816<bf16>(s[m][2 * n + 1], q[m][k], b + 2);
            }
        }
    }
}

/* The place of the first element of a fragment or a tile. z: the head of q. end: the end of its
 * keys. */
struct Place { int z, row, column, end; };

/* Hides keys from `end` on, and keys too far ahead of their query. */
template <int N> __device__ inline void hide_keys(float (*s)[4], int ahead, const Place &at) {
    MIXPI_UNROLL
    for (int n = 0; n < N; n++) {
        MIXPI_UNROLL
        for (int e = 0; e < 4; e++) {
            int k = at.column + 8 * n + e % 2, row = at.row + e / 2 * 8;
            if (k >= at.end || k > row + ahead) s[n][e] = -INFINITY;
        }
    }
}

/* Bends scores of a fragment. */
template <int N>
__device__ inline void forward_bend(float (*s)[4], const Heads &h, const Place &at) {
    MIXPI_UNROLL
    for (int n = 0; n < N; n++) {
        MIXPI_UNROLL
        for (int e = 0; e < 4; e++) {
            int query = at.row + e / 2 * 8, k = at.column + 8 * n + e % 2;
            s[n][e] = capped(h, s[n][e]);
            if (query < h.t && k < at.end) s[n][e] += mask_of(h, at.z, query, k);
        }
    }
}

/* Drops weights of a fragment. */
template <int N>
__device__ inline void forward_drop(float (*s)[4], const Heads &h, uint64_t draws,
                                    const Place &at) {
    MIXPI_UNROLL
    for (int n = 0; n < N; n++) {
        MIXPI_UNROLL
        for (int e = 0; e < 4; e++)
            s[n][e] *= kept_of(h, draws, at.z, at.row + e / 2 * 8, at.column + 8 * n + e % 2);
    }
}

/* e^(s - top), for a score and its row's top. A mask can put bent scores far from 0, so their
 * difference is computed first: a product would round off more than the difference. */
template <bool bends> __device__ inline float exp_from(float s, float top, float factor) {
    return exp2_approx(bends ? (s - top) * log2_e : fmaf(s, factor, -top));
}

/* Turns scores into weights, and rescales the rows' sums to their new top. top is the maximum of
 * bent scores; otherwise of scores times factor, where factor is scale log2 e. */
template <int D, bool bends, int M, int N>
__device__ inline void forward_softmax(float (*s)[4], RowSums<D, M> &r, int m, float factor) {
    MIXPI_UNROLL
    for (int half = 0; half < 2; half++) {
        float most = -INFINITY, top, shrink, sum = 0.0f;
        MIXPI_UNROLL
        for (int n = 0; n < N; n++) most = fmaxf(most, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
        most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, 1));
        most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, 2));
        top = fmaxf(r.top[m][half], bends ? most : most * factor);
        shrink = exp2_approx((r.top[m][half] - top) * (bends ? log2_e : 1.0f));
        r.top[m][half] = top;
        MIXPI_UNROLL
        for (int n = 0; n < N; n++) {
            MIXPI_UNROLL
            for (int e = 2 * half; e < 2 * half + 2; e++) {
                s[n][e] = exp_from<bends>(s[n][e], top, factor);
                sum += s[n][e];
            }
        }
        r.sum[m][half] = fmaf(r.sum[m][half], shrink, sum);
        MIXPI_UNROLL
        for (int n = 0; n < D / 8; n++) {
            r.o[m][n][2 * half] *= shrink;
            r.o[m][n][2 * half + 1] *= shrink;
        }
    }
}

/* Processes one tile of keys and values. q: the warp's queries; the first is tile.row. */
template <int D, bool bf16, bool bends, int M>
__device__ inline void forward_tile(RowSums<D, M> &r, const Heads &h, uint64_t draws,
                                    const uint32_t (*q)[D / 16][4], const uint16_t *keys,
                                    const Place &tile) {
    const int N = Forward<D, bends>::keys;
    int lane = (int)threadIdx.x % warp_size, end = tile.end;
    float s[M][N / 8][4] = {};
    forward_scores<D, bf16, M, N>(s, q, keys);
    MIXPI_UNROLL
    for (int m = 0; m < M; m++) {
        int query = tile.row + 16 * m, key = tile.column;
        Place at = { tile.z, query + lane / 4, key + lane % 4 * 2, end };
        if (bends) forward_bend<N / 8>(s[m], h, at);
        if (key + N > end || key + N - 1 > query + h.ahead) hide_keys<N / 8>(s[m], h.ahead, at);
        forward_softmax<D, bends, M, N / 8>(s[m], r, m, h.scale * log2_e);
        if (bends && h.limit) forward_drop<N / 8>(s[m], h, draws, at);
    }
    if (bends) __syncwarp(); /* products need all threads of the warp together */
    MIXPI_UNROLL
    for (int j = 0; j < N / 16; j++) {
        uint32_t weights[M][4];
        MIXPI_UNROLL
        for (int m = 0; m < M; m++) as_left_factor<bf16>(weights[m], s[m] + 2 * j);
        add_weighted<D, M, bf16>(r.o, weights, keys + N * D, 16 * j);
    }
}

template <int D, bool bends, int M>
__device__ inline void forward_store(const RowSums<D, M> &r, const Heads &h, int z, int row) {
    int lane = (int)threadIdx.x % warp_size;
    MIXPI_UNROLL
    for (int i = 0; i < 2 * M; i++) {
        int m = i / 2, half = i % 2, query = row + 16 * m + 8 * half + lane / 4;
        int64_t at = head_at(h, h.y_at, z) + query * h.y_at.row + lane % 4 * 2;
        float sum = r.sum[m][half], top = r.top[m][half], inverse;
        bool none, toss;
        sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
        sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 2);
        none = h.may_hide && sum <= 0.0f;
        inverse = none ? 0.0f : 1.0f / sum;
        toss = is_tossed(h, sum);
        if (query >= h.t) continue;
        if (lane % 4 == 0)
            h.lse[(int64_t)z * h.t + query] = none    ? INFINITY
                                              : bends ? top + log2f(sum) * ln_2
                                                      : (top + log2f(sum)) * ln_2;
        MIXPI_UNROLL
        for (int n = 0; n < D / 8; n++) {
            float x = r.o[m][n][2 * half] * inverse, y = r.o[m][n][2 * half + 1] * inverse;
            put_pair(h.out, at + 8 * n, toss ? tossed(h.out.dtype, x) : x,
                     toss ? tossed(h.out.dtype, y) : y);
        }
    }
}

/* Causal: a head's last queries go first, because they see the most keys. */
template <int D, bool bf16, bool bends>
__global__ void __launch_bounds__(attention_threads, 2) attention_forward(Heads h) {
    typedef Forward<D, bends> Shape;
    const int M = Shape::M, rows = Shape::rows, keys = Shape::keys;
    MIXPI_DYNAMIC_SHARED(uint16_t, own);
    uint16_t *others = own + rows * D;
    int blocks = (int)ceil_div(h.t, rows), row = (int)threadIdx.x / warp_size * 16 * M;
    int first = (blocks - 1 - (int)(blockIdx.x % blocks)) * rows;
    int z = (int)(blockIdx.x / blocks), end = keys_of(h, z);
    int tiles = (int)ceil_div(least(end, (int64_t)first + rows + h.ahead), keys);
    const uint16_t *q = (const uint16_t *)h.q.data + head_at(h, h.q_at, z);
    const uint16_t *k = (const uint16_t *)h.k.data + met_at(h, h.k_at, z);
    const uint16_t *v = (const uint16_t *)h.v.data + met_at(h, h.v_at, z);
    int ld_k = (int)h.k_at.row, ld_v = (int)h.v_at.row;
    const uint64_t draws = bends ? draws_key(h) : 0;
    uint32_t held[M][D / 16][4];
    RowSums<D, M> r = {};
    MIXPI_UNROLL
    for (int i = 0; i < 2 * M; i++) r.top[i / 2][i % 2] = lowest_float;
    tile_fetch<D, rows>(own, q, (int)h.q_at.row, first, h.t);
    cp_async_commit();
    tile_fetch<D, keys>(others, k, ld_k, 0, end);
    tile_fetch<D, keys>(others + keys * D, v, ld_v, 0, end);
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();
    MIXPI_UNROLL
    for (int i = 0; i < M * (D / 16); i++)
        left_factor<D>(held[i % M][i / M], own, row + 16 * (i % M), i / M);
    for (int i = 0; i < tiles; i++) {
        uint16_t *now = others + i % 2 * 2 * keys * D, *next = others + (i + 1) % 2 * 2 * keys * D;
        if (i + 1 < tiles) {
            tile_fetch<D, keys>(next, k, ld_k, (i + 1) * keys, end);
            tile_fetch<D, keys>(next + keys * D, v, ld_v, (i + 1) * keys, end);
        }
        cp_async_commit();
        cp_async_wait<1>();
        __syncthreads();
        Place tile = { z, first + row, i * keys, end };
        if (tile.row < h.t && tile.column < tile.row + 16 * M + h.ahead)
            forward_tile<D, bf16, bends, M>(r, h, draws, held, now, tile);
        __syncthreads();
    }
    cp_async_wait<0>(); /* without any tile the first copy is still in flight */
    forward_store<D, bends, M>(r, h, z, first + row);
}

/* --- backward on tensor cores ----------------------------------------------------------- *
 *
 * With weights p = 2^(scale log2e q k' - lse log2e) and g = p * (dy v' - delta):
 * dv = p' dy, dk = scale g' q, dq = scale g k. One kernel for both walks:
 *
 *              own[0]  own[1]  other[0]  other[1]    sums[0]   sums[1]
 *     keys     k       v       q         dy          dk / scale   dv
 *     queries  q       dy      k         v           dq / scale   -
 *
 * scores own[0] x other[0]', their gradients from own[1] x other[1]'; sums[0] += g x other[0],
 * sums[1] += p x other[1].
 */
template <int D, bool bends> struct Backward {
    static const int M = D == 128 || bends ? 1 : 2, rows = 64 * M, others = 64,
                     columns = 32;
    static const int bytes =
        (2 * rows + 4 * others) * D * 2 + 4 * others * (int)sizeof(float);
};

/* A thread's constants during the walk. */
template <int D, int M> struct Own {
    const uint16_t *own;        /* in shared memory: own[0], followed by own[1]              */
    int   z, row, first, end;   /* z: the queries' head; row: the warp's first own row within
                                   the block; end: the last key + 1                          */
    uint64_t draws;             /* the key of dropout's random numbers                       */
    float lse[M][2], delta[M][2];       /* of own queries                                    */
    uint32_t dy[D / 16][M][4];          /* of own queries, as left factors                   */
};

/* s += a x other' for 32 columns, a: 16 of D. */
template <int D, bool bf16, int M>
__device__ inline void add_products(float (*s)[4][4], const uint32_t (*a)[4], const uint16_t *other,
                                    int column, int k) {
    MIXPI_UNROLL
    for (int n = 0; n < 2; n++) {
        uint32_t b[4];
        right_rows<D>(b, other, column + 16 * n, k);
        MIXPI_UNROLL
        for (int m = 0; m < M; m++) {
            mma_16816<bf16>(s[m][2 * n], a[m], b);
            mma_16816<bf16>(s[m][2 * n + 1], a[m], b + 2);
        }
    }
}

/* Two products at once: s = own[0] x other[0]', g = own[1] x other[1]'. The walk that owns queries
 * keeps own[1] (dy) in registers. The walk that owns keys has no registers left and reads own[1]
 * again. */
template <int D, bool bf16, bool keys, int M>
__device__ inline void backward_scores(float (*s)[4][4], float (*g)[4][4], const Own<D, M> &w,
                                       const uint16_t *other, int column) {
    MIXPI_UNROLL_BY((keys ? 2 : D / 16))
    for (int k = 0; k < D / 16; k++) {
        uint32_t a[M][4], c[M][4];
        MIXPI_UNROLL
        for (int m = 0; m < M; m++) {
            left_factor<D>(a[m], w.own, w.row + 16 * m, k);
            if (keys) left_factor<D>(c[m], w.own + 64 * M * D, w.row + 16 * m, k);
        }
        add_products<D, bf16, M>(s, a, other, column, k);
        add_products<D, bf16, M>(g, keys ? c : w.dy[k], other + 64 * D, column, k);
    }
}

/* Turns scores into weights, and g into their gradients. lse and delta belong to columns (keys) or
 * to rows (queries). */
template <bool keys>
__device__ inline void backward_weights(float (*s)[4], float (*g)[4], float factor,
                                        const float *lse, const float *delta) {
    MIXPI_UNROLL
    for (int n = 0; n < 4; n++) {
        MIXPI_UNROLL
        for (int e = 0; e < 4; e++) {
            int at = keys ? 8 * n + e % 2 : e / 2;
            s[n][e] = exp2_approx(fmaf(s[n][e], factor, -lse[at]));
            g[n][e] = s[n][e] * (g[n][e] - delta[at]);
        }
    }
}

/* The same for bent scores. */
template <bool keys>
__device__ inline void backward_bent(float (*s)[4], float (*g)[4], const Heads &h, uint64_t draws,
                                     const Place &p, const float *lse, const float *delta) {
    MIXPI_UNROLL
    for (int n = 0; n < 4; n++) {
        MIXPI_UNROLL
        for (int e = 0; e < 4; e++) {
            int at = keys ? 8 * n + e % 2 : e / 2;
            int row = p.row + e / 2 * 8, column = p.column + 8 * n + e % 2;
            int query = keys ? column : row, key = keys ? row : column;
            float score = capped(h, s[n][e]), weight, kept, slope = cap_slope(h, score);
            if (query < h.t && key < p.end) score += mask_of(h, p.z, query, key);
            weight = exp2_approx((score - lse[at]) * log2_e);
            kept = kept_of(h, draws, p.z, query, key);
            g[n][e] = weight * (g[n][e] * kept - delta[at]) * slope;
            s[n][e] = weight * kept;
        }
    }
}

/* Clears the weights of elements beyond the end and of keys too far ahead of their query, even if
 * the weights are NaN. (In the forward pass, as in other flash attentions, a NaN or Inf in the
 * values of a later key does reach earlier queries of its tile, because 0 times it is NaN.) */
template <bool keys>
__device__ inline void backward_hide(float (*s)[4], float (*g)[4], int ahead, int end, int row,
                                     int column) {
    MIXPI_UNROLL
    for (int n = 0; n < 4; n++) {
        MIXPI_UNROLL
        for (int e = 0; e < 4; e++) {
            int i = row + e / 2 * 8, j = column + 8 * n + e % 2;
            if (j >= end || (keys ? j + ahead < i : j > i + ahead)) s[n][e] = g[n][e] = 0.0f;
        }
    }
}

/* Processes 32 columns of a tile that begins at `at`. */
template <int D, bool bf16, bool keys, bool bends, int M>
__device__ inline void backward_columns(float (*sums)[M][D / 8][4], const Heads &h,
                                        const Own<D, M> &w, const uint16_t *other,
                                        const float *statistics, int at, int column) {
    int lane = (int)threadIdx.x % warp_size, low = w.first + w.row, from = at + column;
    int end = keys ? h.t : w.end, own_end = keys ? w.end : h.t;
    float s[M][4][4] = {}, g[M][4][4] = {};
    const float *those = statistics + column + lane % 4 * 2;
    if (from >= end || low >= own_end ||
        (keys ? from + 31 + h.ahead < low : from > low + 16 * M - 1 + h.ahead))
        return;
    backward_scores<D, bf16, keys, M>(s, g, w, other, column);
    MIXPI_UNROLL
    for (int m = 0; m < M; m++) {
        Place p = { w.z, low + 16 * m + lane / 4, from + lane % 4 * 2, w.end };
        const float *lse = keys ? those : w.lse[m], *delta = keys ? those + 64 : w.delta[m];
        if (bends) backward_bent<keys>(s[m], g[m], h, w.draws, p, lse, delta);
        else backward_weights<keys>(s[m], g[m], h.scale * log2_e, lse, delta);
        if (from + 32 > end ||
            (keys ? from + h.ahead < low + 16 * M - 1 : from + 31 > low + h.ahead))
            backward_hide<keys>(s[m], g[m], h.ahead, end, p.row, p.column);
    }
    if (bends) __syncwarp();
    MIXPI_UNROLL
    for (int j = 0; j < 2; j++) {
        uint32_t weights[M][4];
        MIXPI_UNROLL
        for (int m = 0; m < M; m++) as_left_factor<bf16>(weights[m], g[m] + 2 * j);
        add_weighted<D, M, bf16>(sums[0], weights, other, column + 16 * j);
        if (keys) {
            MIXPI_UNROLL
            for (int m = 0; m < M; m++) as_left_factor<bf16>(weights[m], s[m] + 2 * j);
            add_weighted<D, M, bf16>(sums[keys], weights, other + 64 * D, column + 16 * j);
        }
    }
}

/* Where a head's gradients go: row i begins at element first + i * ld; rows from `end` on get 0. */
struct GradRows { mixp_out out; int64_t first, ld; int rows, end; };

template <int D, int M>
__device__ inline void backward_store(const float (*sums)[D / 8][4], const GradRows &to, int row,
                                      float factor) {
    int lane = (int)threadIdx.x % warp_size;
    if (!to.out.data) return;
    MIXPI_UNROLL
    for (int i = 0; i < 2 * M; i++) {
        int m = i / 2, half = i % 2, own = row + 16 * m + 8 * half + lane / 4;
        int64_t at = to.first + own * to.ld + lane % 4 * 2;
        bool there = own < to.end;
        if (own >= to.rows) continue;
        MIXPI_UNROLL
        for (int n = 0; n < D / 8; n++)
            put_pair(to.out, at + 8 * n, there ? factor * sums[m][n][2 * half] : 0.0f,
                     there ? factor * sums[m][n][2 * half + 1] : 0.0f);
    }
}

/* The reference of weights: lse log2e, or lse itself for bent scores. */
__device__ inline float lse_of(const Heads &h, int64_t at) {
    return h.bends ? h.lse[at] : h.lse[at] * log2_e;
}

/* A thread's piece of the statistics of 64 queries: lse, then delta. */
__device__ inline float query_statistic(const Heads &h, int z, int first) {
    int query = first + (int)threadIdx.x % 64;
    int64_t at = (int64_t)z * h.t + query;
    if (query >= h.t) return 0.0f;
    return threadIdx.x < 64 ? lse_of(h, at) : h.delta[at];
}

/* The statistics of a warp's own queries. delta is dy . y, which the softmax gradient of a row
 * subtracts. The four threads that share a row in an accumulator compute delta and store it for dK
 * and dV. */
template <int D, int M> __device__ inline void own_statistics(Own<D, M> &w, const Heads &h) {
    int lane = (int)threadIdx.x % warp_size;
    mixp_in dy = { w.own + 64 * M * D, h.dy.dtype };
    MIXPI_UNROLL
    for (int i = 0; i < 2 * M; i++) {
        int own = w.row + 8 * i + lane / 4, query = w.first + own;
        int64_t at = (int64_t)w.z * h.t + query;
        int64_t y = head_at(h, h.y_at, w.z) + query * h.y_at.row;
        bool there = query < h.t;
        float sum = 0.0f, a[8], b[8];
        for (int chunk = lane % 4; there && chunk < D / 8; chunk += 4) {
            get8_any(dy, chunk_at<D>(own, chunk), 8, true, a);
            get8_any(h.y, y + 8 * chunk, 8, true, b);
            MIXPI_UNROLL
            for (int e = 0; e < 8; e++) sum = fmaf(a[e], b[e], sum);
        }
        sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
        sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 2);
        w.delta[i / 2][i % 2] = sum;
        w.lse[i / 2][i % 2] = there ? lse_of(h, at) : 0.0f;
        if (there && lane % 4 == 0) h.delta[at] = sum;
    }
}

/* Keys: sums[0] is for dk, sums[1] for dv. */
template <int D, bool keys, int M>
__device__ inline void backward_finish(const float (*sums)[M][D / 8][4], const Heads &h,
                                       const Own<D, M> &w) {
    int row = w.first + w.row;
    if (keys) {
        GradRows dk = { h.dk, met_at(h, h.k_at, w.z), h.k_at.row, h.keys, w.end };
        GradRows dv = { h.dv, met_at(h, h.v_at, w.z), h.v_at.row, h.keys, w.end };
        backward_store<D, M>(sums[0], dk, row, h.scale);
        backward_store<D, M>(sums[keys], dv, row, 1.0f);
    } else {
        GradRows dq = { h.out, head_at(h, h.q_at, w.z), h.q_at.row, h.t, h.t };
        backward_store<D, M>(sums[0], dq, row, h.scale);
    }
}

/* Starts the copy of tile `tile` of the side that a block walks over. keys: the tile belongs to
 * head z + `turn` of q, where z is the group's first head. */
template <int D, bool keys>
__device__ inline void walk_fetch(uint16_t *to, const Heads &h, int z, int turn, int tile,
                                  int end) {
    const int N = 64;
    const mixp_head_strides &at0 = keys ? h.q_at : h.k_at, &at1 = keys ? h.y_at : h.v_at;
    const uint16_t *other0 = (const uint16_t *)(keys ? h.q.data : h.k.data);
    const uint16_t *other1 = (const uint16_t *)(keys ? h.dy.data : h.v.data);
    other0 += keys ? head_at(h, at0, z + turn) : met_at(h, at0, z);
    other1 += keys ? head_at(h, at1, z + turn) : met_at(h, at1, z);
    tile_fetch<D, N>(to, other0, (int)at0.row, tile * N, end);
    tile_fetch<D, N>(to + N * D, other1, (int)at1.row, tile * N, end);
}

/* Loads a block's own rows. */
template <int D, bool keys, int rows>
__device__ inline void own_fetch(uint16_t *own, const Heads &h, int z, int first, int end) {
    const mixp_head_strides &at0 = keys ? h.k_at : h.q_at, &at1 = keys ? h.v_at : h.y_at;
    const uint16_t *own0 = (const uint16_t *)(keys ? h.k.data : h.q.data);
    const uint16_t *own1 = (const uint16_t *)(keys ? h.v.data : h.dy.data);
    own0 += keys ? met_at(h, at0, z) : head_at(h, at0, z);
    own1 += keys ? met_at(h, at1, z) : head_at(h, at1, z);
    tile_fetch<D, rows>(own, own0, (int)at0.row, first, end);
    tile_fetch<D, rows>(own + rows * D, own1, (int)at1.row, first, end);
}

template <int D, bool bf16, bool keys, bool bends>
__global__ void __launch_bounds__(attention_threads, 2) attention_backward(Heads h) {
    typedef Backward<D, bends> Shape;
    const int M = Shape::M, rows = Shape::rows, N = Shape::others;
    MIXPI_DYNAMIC_SHARED(uint16_t, own);
    uint16_t *others = own + 2 * rows * D;
    float *statistics = (float *)(void *)(others + 4 * N * D), ahead = 0.0f;
    int blocks = (int)ceil_div(keys ? h.keys : h.t, rows), block = (int)(blockIdx.x % blocks),
        begin = 0, tiles, count, z;
    float sums[keys ? 2 : 1][M][D / 8][4] = {};
    Own<D, M> w = {};
    w.own = own;
    if (bends) w.draws = draws_key(h);
    w.row = (int)threadIdx.x / warp_size * 16 * M;
    w.first = (keys ? block : blocks - 1 - block) * rows;
    z = (int)(blockIdx.x / blocks) * (keys ? h.group : 1);
    w.z = z;
    w.end = keys_of(h, z);
    if (keys && w.first > h.ahead) begin = (w.first - h.ahead) / N;
    tiles = (int)ceil_div(keys ? h.t : least(w.end, (int64_t)w.first + rows + h.ahead), N);
    if (keys && w.first >= w.end) tiles = 0;
    tiles = tiles > begin ? tiles - begin : 0; /* of a head */
    count = tiles * (keys ? h.group : 1);
    own_fetch<D, keys, rows>(own, h, z, w.first, keys ? w.end : h.t);
    cp_async_commit();
    walk_fetch<D, keys>(others, h, z, 0, begin, keys ? h.t : w.end);
    cp_async_commit();
    if (keys) statistics[(int)threadIdx.x] = query_statistic(h, z, begin * N);
    if (!keys) {
        cp_async_wait<1>();
        __syncthreads();
        own_statistics<D, M>(w, h);
        __syncwarp();
        MIXPI_UNROLL
        for (int i = 0; i < M * (D / 16); i++)
            left_factor<D>(w.dy[i / M][i % M], own + rows * D, w.row + 16 * (i % M), i / M);
    }
    for (int i = 0; i < count; i++) {
        uint16_t *now = others + i % 2 * 2 * N * D, *next = others + (i + 1) % 2 * 2 * N * D;
        if (i + 1 < count) {
            int turn = keys ? (i + 1) / tiles : 0, tile = begin + (i + 1) - turn * tiles;
            walk_fetch<D, keys>(next, h, z, turn, tile, keys ? h.t : w.end);
            if (keys) ahead = query_statistic(h, z + turn, tile * N);
        }
        cp_async_commit();
        cp_async_wait<1>();
        __syncthreads();
        if (keys) w.z = z + i / tiles;
        for (int column = 0; column < N; column += Shape::columns)
            backward_columns<D, bf16, keys, bends, M>(sums, h, w, now, statistics + i % 2 * 2 * N,
                                                      (begin + (keys ? i % tiles : i)) * N, column);
        if (keys) statistics[(i + 1) % 2 * 2 * N + (int)threadIdx.x] = ahead;
        __syncthreads();
    }
    cp_async_wait<0>();
    w.z = z;
    backward_finish<D, keys, M>(sums, h, w);
}

/* --- in f32, any dtypes ------------------------------------------------------------------ *
 *
 * Tiles of 16 rows in f32, padded with zeros to a multiple of 8 columns; rows are an odd number of
 * floats apart. Thread i has row i / 8, and columns i % 8, i % 8 + 8, and so on.
 */
const int plain_rows = 16, plain_pitch = plain_rows + 1,
          plain_parts = attention_most_d / 8;

__host__ __device__ inline int plain_width(int64_t d) { return (int)(d + 7) / 8 * 8 + 1; }

/* Bytes of shared memory for `rows` rows in all tiles. */
inline size_t plain_bytes(int rows, int scores, int64_t d) {
    return (size_t)(rows * plain_width(d) + scores * plain_rows * plain_pitch) * sizeof(float);
}

template <int rows>
__device__ inline void plain_fetch(float *tile, const Heads &h, mixp_in a, int64_t at, int64_t ld,
                                   int first, int end) {
    int width = plain_width(h.d);
    for (int i = (int)threadIdx.x; i < rows * width; i += attention_threads) {
        int row = i / width, j = i % width;
        tile[i] = first + row < end && j < h.d ? get1(a, at + (first + row) * ld + j) : 0.0f;
    }
}

__device__ inline float plain_dot(const float *a, const float *b, int d) {
    float sum = 0.0f;
    for (int j = 0; j < d; j++) sum = fmaf(a[j], b[j], sum);
    return sum;
}

/* sums += the row's weights x the tile */
template <int rows>
__device__ inline void plain_add(float *sums, const float *weights, const float *tile, int d) {
    int lane = (int)threadIdx.x % 8;
    for (int i = 0; i < rows; i++) {
        MIXPI_UNROLL
        for (int j = 0; j < plain_parts; j++)
            if (8 * j < d)
                sums[j] = fmaf(weights[i], tile[i * plain_width(d) + lane + 8 * j], sums[j]);
    }
}

/* The maximum over the 8 threads of a row. */
__device__ inline float row_max(float x) {
    MIXPI_UNROLL
    for (int k = 4; k; k /= 2) x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, k));
    return x;
}
__device__ inline float row_sum(float x) {
    MIXPI_UNROLL
    for (int k = 4; k; k /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, k);
    return x;
}

__device__ inline void plain_put(mixp_out a, int64_t i, float x) {
    put1(a, i, a.accumulate ? get1(as_in(a), i) + x : x);
}

/* A score in range, bent if needed. *slope: the factor of its gradient. */
__device__ inline float plain_score(const Heads &h, float s, int z, int query, int key,
                                    float *slope) {
    *slope = 1.0f;
    if (!h.bends) return s * h.scale;
    s = capped(h, s);
    *slope = cap_slope(h, s);
    return s + mask_of(h, z, query, key);
}

__global__ void __launch_bounds__(attention_threads, 2) plain_forward(Heads h) {
    MIXPI_DYNAMIC_SHARED(float, own);
    int pitch = plain_width(h.d), row = (int)threadIdx.x / 8, lane = (int)threadIdx.x % 8;
    float *other = own + plain_rows * pitch;
    float *weights = other + plain_rows * pitch + row * plain_pitch;
    int blocks = (int)ceil_div(h.t, plain_rows);
    int first = (blocks - 1 - (int)(blockIdx.x % blocks)) * plain_rows, query = first + row;
    int z = (int)(blockIdx.x / blocks), keys = keys_of(h, z);
    int64_t end = least(keys, (int64_t)first + plain_rows + h.ahead);
    int64_t k_at = met_at(h, h.k_at, z), v_at = met_at(h, h.v_at, z);
    float o[plain_parts] = {}, top = lowest_float, sum = 0.0f;
    const uint64_t draws = draws_key(h);
    bool none, toss;
    plain_fetch<plain_rows>(own, h, h.q, head_at(h, h.q_at, z), h.q_at.row, first, h.t);
    for (int key = 0; key < end; key += plain_rows) {
        float s[2], most, shrink, slope;
        __syncthreads();
        plain_fetch<plain_rows>(other, h, h.k, k_at, h.k_at.row, key, keys);
        __syncthreads();
        MIXPI_UNROLL
        for (int j = 0; j < 2; j++) {
            int at = key + lane + 8 * j;
            bool seen = query < h.t && at < keys && at <= query + h.ahead;
            s[j] = plain_dot(own + row * pitch, other + (lane + 8 * j) * pitch, h.d);
            s[j] = seen ? plain_score(h, s[j], z, query, at, &slope) : -INFINITY;
        }
        most = fmaxf(top, row_max(fmaxf(s[0], s[1])));
        shrink = expf(top - most);
        top = most;
        s[0] = expf(s[0] - top);
        s[1] = expf(s[1] - top);
        sum = sum * shrink + row_sum(s[0] + s[1]);
        weights[lane] = s[0] * kept_of(h, draws, z, query, key + lane);
        weights[lane + 8] = s[1] * kept_of(h, draws, z, query, key + lane + 8);
        MIXPI_UNROLL
        for (int j = 0; j < plain_parts; j++) o[j] *= shrink;
        __syncthreads();
        plain_fetch<plain_rows>(other, h, h.v, v_at, h.v_at.row, key, keys);
        __syncthreads();
        plain_add<plain_rows>(o, weights, other, h.d);
    }
    if (query >= h.t) return;
    none = h.may_hide && sum <= 0.0f;
    if (lane == 0) h.lse[(int64_t)z * h.t + query] = none ? INFINITY : top + logf(sum);
    toss = is_tossed(h, sum);
    MIXPI_UNROLL
    for (int j = 0; j < plain_parts; j++) {
        float y = none ? 0.0f : o[j] / sum;
        if (lane + 8 * j < h.d)
            plain_put(h.out, head_at(h, h.y_at, z) + query * h.y_at.row + lane + 8 * j,
                      toss ? tossed(h.out.dtype, y) : y);
    }
}

/* there: 0 for padding, whose gradient is 0. */
__device__ inline void plain_store(const float *sums, mixp_out out, int d, int64_t at, float factor,
                                   bool there) {
    int lane = (int)threadIdx.x % 8;
    if (!out.data) return;
    MIXPI_UNROLL
    for (int j = 0; j < plain_parts; j++) {
        int64_t i = at + lane + 8 * j;
        float x = there ? factor * sums[j] : 0.0f;
        if (lane + 8 * j < d) plain_put(out, i, x);
    }
}

/* Own rows and a tile of the other side. z: the queries' head. end: the last key + 1. draws:
 * dropout's key. */
struct PlainPlace { int z, first, at, end; uint64_t draws; };

/* Weights and their gradients between own row `row` and every eighth row of the other tile. */
template <bool keys, int others>
__device__ inline void plain_weights(float *p, float *g, const Heads &h, const float *own,
                                     const float *other, const PlainPlace &w) {
    int pitch = plain_width(h.d), row = (int)threadIdx.x / 8;
    MIXPI_UNROLL
    for (int j = 0; j < others / 8; j++) {
        int column = (int)threadIdx.x % 8 + 8 * j;
        int query = keys ? w.at + column : w.first + row,
            key = keys ? w.first + row : w.at + column;
        int64_t at = (int64_t)w.z * h.t + query;
        const float *a = own + row * pitch, *b = other + column * pitch;
        float s = plain_dot(a, b, h.d), slope, weight, kept;
        float dp = plain_dot(a + plain_rows * pitch, b + others * pitch, h.d);
        p[column] = g[column] = 0.0f;
        if (query >= h.t || key >= w.end || key > query + h.ahead) continue;
        weight = expf(plain_score(h, s, w.z, query, key, &slope) - h.lse[at]);
        kept = kept_of(h, w.draws, w.z, query, key);
        p[column] = weight * kept;
        g[column] = weight * (dp * kept - h.delta[at]) * slope;
    }
}

/* delta of the own queries: dy, which lies in shared memory, times y. */
__device__ inline void plain_delta(const Heads &h, const float *dy, int z, int query) {
    int lane = (int)threadIdx.x % 8;
    int64_t y = head_at(h, h.y_at, z) + query * h.y_at.row;
    float sum = 0.0f;
    for (int j = lane; query < h.t && j < h.d; j += 8) sum = fmaf(dy[j], get1(h.y, y + j), sum);
    sum = row_sum(sum);
    if (query < h.t && lane == 0) h.delta[(int64_t)z * h.t + query] = sum;
}

template <bool keys, int rows>
__device__ inline void plain_fetch_two(float *tile, const Heads &h, int z, int first, int end) {
    float *second = tile + rows * plain_width(h.d);
    if (keys) {
        plain_fetch<rows>(tile, h, h.k, met_at(h, h.k_at, z), h.k_at.row, first, end);
        plain_fetch<rows>(second, h, h.v, met_at(h, h.v_at, z), h.v_at.row, first, end);
    } else {
        plain_fetch<rows>(tile, h, h.q, head_at(h, h.q_at, z), h.q_at.row, first, h.t);
        plain_fetch<rows>(second, h, h.dy, head_at(h, h.y_at, z), h.y_at.row, first, h.t);
    }
}

/* others: rows of a tile of the other side, 16 or 8. Both sum in the same order: the same bits. */
template <bool keys, int others>
__global__ void __launch_bounds__(attention_threads, 2) plain_backward(Heads h) {
    MIXPI_DYNAMIC_SHARED(float, own);
    int tile = plain_rows * plain_width(h.d), row = (int)threadIdx.x / 8;
    float *other = own + 2 * tile, *dy_or_v = other + others * plain_width(h.d);
    float *p = dy_or_v + others * plain_width(h.d) + row * plain_pitch;
    float *g = p + plain_rows * plain_pitch;
    int blocks = (int)ceil_div(keys ? h.keys : h.t, plain_rows), block = (int)(blockIdx.x % blocks),
        mine, begin = 0;
    int first = (keys ? block : blocks - 1 - block) * plain_rows;
    int z = (int)(blockIdx.x / blocks) * (keys ? h.group : 1), keys_end = keys_of(h, z);
    int64_t end = keys ? h.t : least(keys_end, (int64_t)first + plain_rows + h.ahead);
    float sums[plain_parts] = {}, sums_v[plain_parts] = {};
    PlainPlace w = { z, first, 0, keys_end, draws_key(h) };
    if (keys && first > h.ahead) begin = (first - h.ahead) / plain_rows * plain_rows;
    plain_fetch_two<keys, plain_rows>(own, h, z, first, keys_end);
    __syncthreads();
    if (!keys) plain_delta(h, own + tile + row * plain_width(h.d), z, first + row);
    for (; w.z < z + (keys ? h.group : 1); w.z++)
        for (w.at = begin; w.at < end; w.at += others) {
            __syncthreads();
            plain_fetch_two<!keys, others>(other, h, w.z, w.at, keys_end);
            __syncthreads();
            plain_weights<keys, others>(p, g, h, own, other, w);
            __syncthreads();
            plain_add<others>(sums, g, other, h.d);
            if (keys) plain_add<others>(sums_v, p, dy_or_v, h.d);
        }
    mine = first + row;
    if (mine >= (keys ? h.keys : h.t)) return;
    if (keys) {
        plain_store(sums, h.dk, h.d, met_at(h, h.k_at, z) + mine * h.k_at.row, h.scale,
                    mine < keys_end);
        plain_store(sums_v, h.dv, h.d, met_at(h, h.v_at, z) + mine * h.v_at.row, 1.0f,
                    mine < keys_end);
    } else {
        plain_store(sums, h.out, h.d, head_at(h, h.q_at, z) + mine * h.q_at.row, h.scale, true);
    }
}

/* --- calls ------------------------------------------------------------------------------- */

inline int64_t query_blocks(const Heads &h, int rows) {
    return ceil_div(h.t, rows) * h.b * h.heads;
}
inline int64_t key_blocks(const Heads &h, int rows) {
    return ceil_div(h.keys, rows) * h.b * (h.heads / h.group);
}

inline mixp_result attention_launch(Kernel *k, void (*kernel)(Heads), int64_t blocks, size_t bytes,
                                    const Heads &h) {
    cudaError_t e = cudaSuccess;
    if (blocks > 0x7FFFFFFF)
        return say(k->state, MIXP_ERR_SHAPE, "attention",
                   "more rows than the grid of a kernel can hold; split the batch");
    e = make_room(k->state, (const void *)kernel, bytes);
    if (e == cudaSuccess)
        e = MIXPI_LAUNCH(kernel, (unsigned)blocks, attention_threads, bytes, k->stream, h);
    return k->launched("attention", e);
}

inline bool wants_keys(const Heads &h) { return h.dk.data || h.dv.data; }

template <int D, bool bf16, bool bends>
mixp_result tensor_run(Kernel *k, const Heads &h, bool backward) {
    typedef Forward<D, bends> Ahead;
    typedef Backward<D, bends> Back;
    mixp_result r;
    if (!backward)
        return attention_launch(k, attention_forward<D, bf16, bends>, query_blocks(h, Ahead::rows),
                                Ahead::bytes, h);
    r = attention_launch(k, attention_backward<D, bf16, false, bends>, query_blocks(h, Back::rows),
                         Back::bytes, h);
    if (r != MIXP_OK || !wants_keys(h)) return r;
    return attention_launch(k, attention_backward<D, bf16, true, bends>, key_blocks(h, Back::rows),
                            Back::bytes, h);
}

template <int D> mixp_result tensor_by_dtype(Kernel *k, const Heads &h, bool backward) {
    if (h.q.dtype == MIXP_BF16)
        return h.bends ? tensor_run<D, true, true>(k, h, backward)
                       : tensor_run<D, true, false>(k, h, backward);
    return h.bends ? tensor_run<D, false, true>(k, h, backward)
                   : tensor_run<D, false, false>(k, h, backward);
}

inline mixp_result tensor_run(Kernel *k, const Heads &h, bool backward) {
    switch (h.d) {
    case 32: return tensor_by_dtype<32>(k, h, backward);
    case 64: return tensor_by_dtype<64>(k, h, backward);
    default: return tensor_by_dtype<128>(k, h, backward);
    }
}

template <int others> inline mixp_result plain_back(Kernel *k, const Heads &h) {
    size_t bytes = plain_bytes(2 * plain_rows + 2 * others, 2, h.d);
    mixp_result r =
        attention_launch(k, plain_backward<false, others>, query_blocks(h, plain_rows), bytes, h);
    if (r != MIXP_OK || !wants_keys(h)) return r;
    return attention_launch(k, plain_backward<true, others>, key_blocks(h, plain_rows), bytes, h);
}

/* Four tiles of 16 rows do not fit the 64 KB of capability 7.5 if heads are wider than 240. */
inline mixp_result plain_run(Kernel *k, const Heads &h, bool backward) {
    bool roomy = plain_bytes(4 * plain_rows, 2, h.d) <= (size_t)k->state->most_shared;
    if (!backward)
        return attention_launch(k, plain_forward, query_blocks(h, plain_rows),
                                plain_bytes(2 * plain_rows, 1, h.d), h);
    return roomy ? plain_back<plain_rows>(k, h) : plain_back<8>(k, h);
}

/* Can 16 bytes of a row of D be read at once? Yes for an absent array. */
inline bool is_wide(mixp_in a, const mixp_head_strides &at) {
    return is_wide(a) && (at.sequence | at.head | at.row) % 8 == 0;
}

/* Does the GPU have the tensor cores and the shared memory? */
template <int D> inline int tensor_bytes(const Heads &h, bool backward) {
    if (backward) return h.bends ? Backward<D, true>::bytes : Backward<D, false>::bytes;
    return h.bends ? Forward<D, true>::bytes : Forward<D, false>::bytes;
}
inline int tensor_bytes(const Heads &h, bool backward) {
    return h.d == 32   ? tensor_bytes<32>(h, backward)
           : h.d == 64 ? tensor_bytes<64>(h, backward)
                       : tensor_bytes<128>(h, backward);
}
/* Kernels that bend scores have fewer rows per block, so they fit where the others do not. */
inline bool tensor_can(const State *s, Heads &h, bool backward) {
    if (s->capability < 75 || (s->capability < 80 && h.q.dtype != MIXP_F16)) return false;
    if (tensor_bytes(h, backward) > s->most_shared) h.bends = true;
    return tensor_bytes(h, backward) <= s->most_shared;
}

/* Can tensor cores compute it? */
inline bool tensor_takes(const State *s, Heads &h, bool backward) {
    mixp_dtype dtype = h.q.dtype;
    return tensor_can(s, h, backward) && (h.d == 32 || h.d == 64 || h.d == 128) &&
           dtype != MIXP_F32 && h.k.dtype == dtype && h.v.dtype == dtype &&
           (!backward || h.dy.dtype == dtype) && h.scale > 1e-30f && h.scale < 1e30f &&
           is_wide(h.q, h.q_at) && is_wide(h.k, h.k_at) && is_wide(h.v, h.v_at) && is_wide(h.y) &&
           is_wide(h.dy) && is_wide(h.out) && is_wide(h.dk) && is_wide(h.dv);
}

inline bool attends_nothing(const mixp_attention_args &args) {
    return args.b <= 0 || args.t <= 0 || args.keys <= 0 || args.heads <= 0 || args.d <= 0;
}

inline bool short_row(const mixp_head_strides &at) { return at.row <= 0x7FFFFFFF; }

/* Reports a call that the kernels do not support; otherwise MIXP_OK. */
inline mixp_result attention_check(const Kernel &k, const mixp_attention_args &args) {
    if (args.d > attention_most_d)
        return say(k.state, MIXP_ERR_SHAPE, "attention",
                   "a head is wider than 256; use more heads");
    if (args.t > most_rows || args.keys > most_rows || args.heads > 0x1FFFFF ||
        !short_row(args.q_at) || !short_row(args.k_at) || !short_row(args.v_at))
        return say(k.state, MIXP_ERR_SHAPE, "attention",
                   "a sequence, a head count or a row stride exceeds the kernel's limit; use "
                   "shorter sequences");
    if (!is_real(args.q.dtype) || !is_real(args.k.dtype) || !is_real(args.v.dtype) ||
        !is_real(args.y.dtype) || (args.mask.data && !is_real(args.mask.dtype)))
        return MIXP_ERR_DTYPE;
    if (args.kv_heads < 1 || args.heads % args.kv_heads || args.past < 0 ||
        !(args.softcap >= 0.0f) || !(args.dropout >= 0.0f && args.dropout < 1.0f))
        return MIXP_ERR_ARGUMENT;
    return MIXP_OK;
}

/* Sets the fields that bend scores: cap, mask, dropout. */
inline void heads_bend(Heads *h, const mixp_attention_args &args) {
    h->lengths = args.lengths;
    h->mask = args.mask;
    h->mask_at = args.mask_at;
    h->mask_key = (int)args.mask_key;
    h->softcap = args.softcap;
    h->limit = (uint64_t)ceil((double)args.dropout * 4294967296.0);
    h->kept = (float)(1.0 / (1.0 - (double)args.dropout));
    h->bends = h->mask.data || h->limit || h->softcap > 0.0f;
    h->may_hide = h->mask.data || h->lengths;
}

inline mixp_result heads_make(const Kernel &k, const mixp_attention_args &args, Heads *h) {
    mixp_result r = attention_check(k, args);
    if (r != MIXP_OK) return r;
    memset((void *)h, 0, sizeof *h);
    h->b = args.b;
    h->t = (int)args.t;
    h->keys = (int)args.keys;
    h->heads = (int)args.heads;
    h->group = (int)(args.heads / args.kv_heads);
    h->d = (int)args.d;
    h->ahead = args.causal ? (int)least(args.past, most_ahead) : most_ahead;
    h->scale = args.scale;
    h->q = args.q;
    h->k = args.k;
    h->v = args.v;
    h->q_at = args.q_at;
    h->k_at = args.k_at;
    h->v_at = args.v_at;
    h->y_at.head = args.d;
    h->y_at.row = args.heads * args.d;
    h->y_at.sequence = args.t * h->y_at.row;
    h->out = args.y;
    h->lse = args.lse;
    h->fault = fault_flag(k.state);
    h->draws = draws_of(k.state, args.seed, args.step, args.tensor);
    heads_bend(h, args);
    return MIXP_OK;
}

inline bool writes(mixp_out a) { return !a.data || is_real(a.dtype); }

inline mixp_result heads_make(const Kernel &k, const mixp_attention_backward_args &args, Heads *h) {
    mixp_result r = heads_make(k, args.forward, h);
    if (r != MIXP_OK) return r;
    if (!is_real(args.dy.dtype) || !writes(args.dq) || !writes(args.dk) || !writes(args.dv))
        return MIXP_ERR_DTYPE;
    h->y = as_in(args.forward.y);
    h->dy = args.dy;
    h->out = args.dq;
    h->dk = args.dk;
    h->dv = args.dv;
    return MIXP_OK;
}

}   /* namespace */

static mixp_result mixpi_cuda_attention(const mixp_exec *x, const mixp_attention_args *args) {
    Kernel k(x);
    Heads h;
    mixp_result r;
    if (!k.state) return MIXP_ERR_ORDER;
    if (attends_nothing(*args)) return MIXP_OK;
    r = heads_make(k, *args, &h);
    if (r != MIXP_OK) return r;
    return tensor_takes(k.state, h, false) ? tensor_run(&k, h, false) : plain_run(&k, h, false);
}

static mixp_result mixpi_cuda_attention_backward(const mixp_exec *x,
                                                 const mixp_attention_backward_args *args) {
    Kernel k(x);
    Heads h;
    mixp_result r;
    if (!k.state) return MIXP_ERR_ORDER;
    if (attends_nothing(args->forward)) return MIXP_OK;
    r = heads_make(k, *args, &h);
    if (r != MIXP_OK) return r;
    h.delta = (float *)scratch_of(x, (size_t)(h.b * h.heads * h.t) * sizeof(float));
    if (!h.delta) return MIXP_ERR_MEMORY;
    return tensor_takes(k.state, h, true) ? tensor_run(&k, h, true) : plain_run(&k, h, true);
}
