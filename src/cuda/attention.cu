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
    bool         wide;          /* in f32: each row can be read 16 bytes at a time           */
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
 * Tiles are f32 in shared memory, of 64 columns: wider heads go through them part by part. A block
 * owns 16 M rows, a warp 4 M of them alone, and walks over tiles of 64. A thread has M rows, r,
 * r + 4, ... of its warp, and a column c:
 *
 *     of a tile of scores     columns c, c + 8, ..., c + 56, stored side by side as group c
 *     of a part of the sums   columns 8 c, 8 c + 1, ..., 8 c + 7
 *
 * A group is 8 neighbours in a row: two times 16 bytes, 32 floats apart. Groups are permuted within
 * a row, and bits 0 and 2 of the lane are r, so that lanes served at once meet in no bank.
 */
const int plain_columns = 64, plain_others = 64;

/* Where group `group` of row `row` lies. */
__device__ inline int plain_at(int row, int group) {
    return row * plain_columns + (group ^ (row & 3) * 2 ^ (row >> 2 & 1)) * 4;
}

/* A thread's first row within the block, and its column. */
template <int M> __device__ inline int plain_row() {
    int lane = (int)threadIdx.x % warp_size;
    return (int)threadIdx.x / warp_size * 4 * M + (lane & 1) + (lane >> 1 & 2);
}
__device__ inline int plain_column() {
    int lane = (int)threadIdx.x % warp_size;
    return (lane >> 1 & 1) + (lane >> 2 & 6);
}

/* The maximum and the sum over the 8 threads of a row. */
__device__ inline float row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 2));
    x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 8));
    return fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 16));
}
__device__ inline float row_sum(float x) {
    x += __shfl_xor_sync(0xFFFFFFFFu, x, 2);
    x += __shfl_xor_sync(0xFFFFFFFFu, x, 8);
    return x + __shfl_xor_sync(0xFFFFFFFFu, x, 16);
}

__device__ inline void get4(const float *at, float *v) {
    float4 u = *(const float4 *)(const void *)at;
    v[0] = u.x;
    v[1] = u.y;
    v[2] = u.z;
    v[3] = u.w;
}
__device__ inline void put4(float *at, const float *v) {
    *(float4 *)(void *)at = make_float4(v[0], v[1], v[2], v[3]);
}

/* A head's rows: row i begins at element first + i * ld; rows from `end` on read as 0. */
struct PlainRows { mixp_in a; int64_t first, ld; int end; };

__device__ inline PlainRows query_rows(const Heads &h, mixp_in a, const mixp_head_strides &at,
                                       int z) {
    PlainRows rows = { a, head_at(h, at, z), at.row, h.t };
    return rows;
}
__device__ inline PlainRows key_rows(const Heads &h, mixp_in a, const mixp_head_strides &at, int z,
                                     int end) {
    PlainRows rows = { a, met_at(h, at, z), at.row, end };
    return rows;
}

/* What a thread fetches of a part of a tile: group `group` of every 16th row from `row` on. n: the
 * columns of the group that the head has. */
struct PlainPiece { int row, group, n, first; int64_t at; };

template <int rows>
__device__ inline void fetch_f32(float *tile, const PlainRows &from, const PlainPiece &p) {
    const float *all = (const float *)from.a.data;
    MIXPI_UNROLL
    for (int e = 0; e < rows; e += 16) {
        float *to = tile + plain_at(p.row + e, p.group);
        bool there = p.n > 0 && p.first + p.row + e < from.end;
        const float *at = there ? all + p.at + e * from.ld : all;
        cp_async_16(to, at, there ? 16 : 0);
        cp_async_16(to + 32, there ? at + 4 : all, there ? 16 : 0);
    }
}
template <int rows, mixp_dtype D>
__device__ inline void fetch_low(float *tile, const PlainRows &from, const PlainPiece &p) {
    Raw8<D> raw[rows / 16];
    MIXPI_UNROLL
    for (int e = 0; e < rows / 16; e++) {
        bool there = p.n > 0 && p.first + p.row + 16 * e < from.end;
        raw[e].u[0] = make_uint4(0, 0, 0, 0);
        if (there) raw[e] = raw_get8<D>(from.a.data, p.at + 16 * e * from.ld);
    }
    MIXPI_UNROLL
    for (int e = 0; e < rows / 16; e++) {
        float v[8], *to = tile + plain_at(p.row + 16 * e, p.group);
        plain_values<D>(raw[e], v);
        put4(to, v);
        put4(to + 32, v + 4);
    }
}
template <int rows>
__device__ inline void fetch_any(float *tile, const PlainRows &from, const PlainPiece &p) {
    MIXPI_UNROLL_BY(1)
    for (int e = 0; e < rows; e += 16) {
        float v[8], *to = tile + plain_at(p.row + e, p.group);
        int n = p.first + p.row + e < from.end ? p.n : 0;
        get8_any(from.a, p.at + e * from.ld, n, false, v);
        put4(to, v);
        put4(to + 32, v + 4);
    }
}

/* Starts to fetch rows [first, first + rows) of one part. */
template <int rows>
__device__ inline void plain_fetch(float *tile, const Heads &h, const PlainRows &from, int first,
                                   int part) {
    PlainPiece p = { (int)threadIdx.x / 8, (int)threadIdx.x % 8, 0, first, 0 };
    int column = part * plain_columns + 8 * p.group;
    p.n = (int)least(8, h.d - column);
    p.at = from.first + (first + p.row) * from.ld + column;
    if (!h.wide) fetch_any<rows>(tile, from, p);
    else if (from.a.dtype == MIXP_F32) fetch_f32<rows>(tile, from, p);
    else if (from.a.dtype == MIXP_F16) fetch_low<rows, MIXP_F16>(tile, from, p);
    else fetch_low<rows, MIXP_BF16>(tile, from, p);
}
__device__ inline void plain_arrive() {
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
}

/* s += own x other', over the first `groups` groups of a part. */
template <int M>
__device__ inline void plain_multiply(float (*s)[8], const float *own, const float *other,
                                      int groups) {
    int row = plain_row<M>(), column = plain_column();
    MIXPI_UNROLL_BY(1)
    for (int k = 0; k < groups; k++) {
        MIXPI_UNROLL
        for (int half = 0; half < 64; half += 32) {
            float a[M][4], b[4];
            MIXPI_UNROLL
            for (int i = 0; i < M; i++) get4(own + plain_at(row + 4 * i, k) + half, a[i]);
            MIXPI_UNROLL
            for (int j = 0; j < 8; j++) {
                get4(other + plain_at(column + 8 * j, k) + half, b);
                MIXPI_UNROLL
                for (int e = 0; e < 4 * M; e++)
                    s[e % M][j] = fmaf(a[e % M][e / M], b[e / M], s[e % M][j]);
            }
        }
    }
}

/* sums += weights x other, of a part. */
template <int M>
__device__ inline void plain_add(float (*sums)[8], const float *weights, const float *other) {
    int row = plain_row<M>(), column = plain_column();
    MIXPI_UNROLL_BY(1)
    for (int k = 0; k < 8; k++) {
        MIXPI_UNROLL
        for (int half = 0; half < 64; half += 32) {
            float a[M][4], b[8];
            MIXPI_UNROLL
            for (int i = 0; i < M; i++) get4(weights + plain_at(row + 4 * i, k) + half, a[i]);
            MIXPI_UNROLL
            for (int e = 0; e < 4; e++) {
                const float *at = other + plain_at(k + half + 8 * e, column);
                get4(at, b);
                get4(at + 32, b + 4);
                MIXPI_UNROLL
                for (int n = 0; n < 8 * M; n++)
                    sums[n / 8][n % 8] = fmaf(a[n / 8][e], b[n % 8], sums[n / 8][n % 8]);
            }
        }
    }
}

/* Own rows and a tile of the other side. z: the queries' head. end: the last key + 1. busy:
 * the warp has own rows. In the backward pass gradients of weights lie where own rows lay. */
struct PlainPlace {
    float *own, *other, *weights;
    int z, first, at, end;
    bool busy;
};

template <int M>
__device__ inline PlainPlace plain_place(const Heads &h, float *shared, int z, int first,
                                         bool keys) {
    PlainPlace w = {};
    w.own = shared;
    w.other = w.own + 16 * M * plain_columns;
    w.weights = w.other + plain_others * plain_columns;
    w.z = z;
    w.first = first;
    w.end = keys_of(h, z);
    w.busy = first + (int)threadIdx.x / warp_size * 4 * M < (keys ? w.end : h.t);
    return w;
}
constexpr size_t plain_bytes(int M) {
    return (size_t)(2 * 16 * M + plain_others) * plain_columns * sizeof(float);
}

/* s += own x other'. own_there: the own rows have been fetched before, if they are one part. */
template <int parts, int M>
__device__ inline void plain_scores(float (*s)[8], const Heads &h, const PlainPlace &w,
                                    const PlainRows &own, const PlainRows &other, bool own_there) {
    MIXPI_UNROLL_BY(1)
    for (int part = 0; part * plain_columns < h.d; part++) {
        int columns = (int)least(plain_columns, h.d - part * plain_columns);
        __syncthreads();
        if (parts > 1 || !own_there) plain_fetch<16 * M>(w.own, h, own, w.first, part);
        plain_fetch<plain_others>(w.other, h, other, w.at, part);
        plain_arrive();
        if (w.busy) plain_multiply<M>(s, w.own, w.other, (columns + 7) / 8);
    }
}

/* sums += weights x other. there: the other rows have just been fetched, if they are one part. */
template <int parts, int M>
__device__ inline void plain_sums(float (*sums)[M][8], const float *weights, const Heads &h,
                                  const PlainPlace &w, const PlainRows &other, bool there) {
    __syncwarp();
    MIXPI_UNROLL
    for (int part = 0; part < parts; part++) {
        if (part * plain_columns >= h.d) continue;
        if (parts > 1 || !there) {
            __syncthreads();
            plain_fetch<plain_others>(w.other, h, other, w.at, part);
            plain_arrive();
        }
        if (w.busy) plain_add<M>(sums[part], weights, w.other);
    }
}

/* A thread's scores in shared memory. Rare work on them is a loop there: unrolled in registers it
 * would be 32 copies of it. */
template <int M> __device__ inline void plain_put(float *tile, const float (*s)[8]) {
    MIXPI_UNROLL
    for (int i = 0; i < M; i++) {
        float *at = tile + plain_at(plain_row<M>() + 4 * i, plain_column());
        put4(at, s[i]);
        put4(at + 32, s[i] + 4);
    }
}
template <int M> __device__ inline void plain_get(const float *tile, float (*s)[8]) {
    MIXPI_UNROLL
    for (int i = 0; i < M; i++) {
        const float *at = tile + plain_at(plain_row<M>() + 4 * i, plain_column());
        get4(at, s[i]);
        get4(at + 32, s[i] + 4);
    }
}
/* Score n of a thread: its row, its column within the tile, and where it lies. */
struct PlainScore { int row, column, at; };
template <int M> __device__ inline PlainScore plain_score(int n) {
    int row = plain_row<M>() + n / 8 * 4, j = n % 8;
    PlainScore s = { row, plain_column() + 8 * j, 0 };
    s.at = plain_at(row, plain_column()) + j / 4 * 32 + j % 4;
    return s;
}

/* Bends scores. */
template <int M>
__device__ inline void plain_bend(float (*s)[8], const Heads &h, const PlainPlace &w) {
    plain_put<M>(w.weights, s);
    MIXPI_UNROLL_BY(1)
    for (int n = 0; n < 8 * M; n++) {
        PlainScore one = plain_score<M>(n);
        int query = w.first + one.row, key = w.at + one.column;
        float score = capped(h, w.weights[one.at]);
        if (query < h.t && key < w.end) w.weights[one.at] = score + mask_of(h, w.z, query, key);
    }
    plain_get<M>(w.weights, s);
}

/* Drops weights. */
template <int M> __device__ inline void plain_drop(const Heads &h, const PlainPlace &w) {
    const uint64_t draws = draws_key(h);
    MIXPI_UNROLL_BY(1)
    for (int n = 0; n < 8 * M; n++) {
        PlainScore one = plain_score<M>(n);
        w.weights[one.at] *= kept_of(h, draws, w.z, w.first + one.row, w.at + one.column);
    }
}

/* Sums of a thread's rows over the keys so far, relative to e^top. sum is of the thread's columns
 * alone. */
template <int parts, int M> struct PlainSums { float o[parts][M][8], top[M], sum[M]; };

/* Turns scores into weights, and rescales the rows' sums to their new top. */
template <int parts, int M>
__device__ inline void plain_softmax(float (*s)[8], PlainSums<parts, M> &r, const Heads &h,
                                     const PlainPlace &w) {
    float factor = h.bends ? 1.0f : h.scale;
    MIXPI_UNROLL
    for (int i = 0; i < M; i++) {
        int query = w.first + plain_row<M>() + 4 * i, key = w.at + plain_column();
        int seen = query < h.t ? (int)least(w.end, query + h.ahead + 1) : 0;
        float top = r.top[i], shrink;
        MIXPI_UNROLL
        for (int j = 0; j < 8; j++) {
            s[i][j] = key + 8 * j < seen ? s[i][j] * factor : -INFINITY;
            top = fmaxf(top, s[i][j]);
        }
        top = row_max(top);
        shrink = expf(r.top[i] - top);
        r.top[i] = top;
        r.sum[i] *= shrink;
        MIXPI_UNROLL
        for (int j = 0; j < 8; j++) {
            s[i][j] = expf(s[i][j] - top);
            r.sum[i] += s[i][j];
        }
        MIXPI_UNROLL
        for (int n = 0; n < parts * 8; n++) r.o[n / 8][i][n % 8] *= shrink;
    }
}

template <int parts, int M>
__device__ inline void plain_store(const float (*sums)[M][8], const Heads &h, const GradRows &to,
                                   int first, float factor) {
    if (!to.out.data) return;
    MIXPI_UNROLL
    for (int n = 0; n < parts * M; n++) {
        int part = n / M, i = n % M, own = first + plain_row<M>() + 4 * i;
        int column = part * plain_columns + 8 * plain_column();
        float v[8];
        if (own >= to.rows || column >= h.d) continue;
        MIXPI_UNROLL
        for (int j = 0; j < 8; j++) v[j] = own < to.end ? factor * sums[part][i][j] : 0.0f;
        store8(to.out, to.first + own * to.ld + column, (int)least(8, h.d - column), h.wide, v);
    }
}

template <int parts, int M>
__device__ inline void plain_finish(PlainSums<parts, M> &r, const Heads &h, const PlainPlace &w) {
    GradRows y = { h.out, head_at(h, h.y_at, w.z), h.y_at.row, h.t, h.t };
    MIXPI_UNROLL
    for (int i = 0; i < M; i++) {
        int query = w.first + plain_row<M>() + 4 * i;
        float sum = row_sum(r.sum[i]);
        bool none = h.may_hide && sum <= 0.0f, toss = is_tossed(h, sum);
        if (query < h.t && plain_column() == 0)
            h.lse[(int64_t)w.z * h.t + query] = none ? INFINITY : r.top[i] + logf(sum);
        MIXPI_UNROLL
        for (int n = 0; n < parts * 8; n++) {
            float x = none ? 0.0f : r.o[n / 8][i][n % 8] / sum;
            r.o[n / 8][i][n % 8] = toss ? tossed(h.out.dtype, x) : x;
        }
    }
    plain_store<parts, M>(r.o, h, y, w.first, 1.0f);
}

template <int parts, int M>
__global__ void __launch_bounds__(attention_threads, parts == 1 ? 3 : 2) plain_forward(Heads h) {
    MIXPI_DYNAMIC_SHARED(float, shared);
    int blocks = (int)ceil_div(h.t, 16 * M), block = blocks - 1 - (int)(blockIdx.x % blocks);
    PlainPlace w = plain_place<M>(h, shared, (int)(blockIdx.x / blocks), block * 16 * M, false);
    int end = (int)least(w.end, (int64_t)w.first + 16 * M + h.ahead);
    PlainRows q = query_rows(h, h.q, h.q_at, w.z), k = key_rows(h, h.k, h.k_at, w.z, w.end),
              v = key_rows(h, h.v, h.v_at, w.z, w.end);
    PlainSums<parts, M> r = {};
    MIXPI_UNROLL
    for (int i = 0; i < M; i++) r.top[i] = lowest_float;
    for (; w.at < end; w.at += plain_others) {
        float s[M][8] = {};
        plain_scores<parts, M>(s, h, w, q, k, w.at > 0);
        if (h.bends) plain_bend<M>(s, h, w);
        plain_softmax<parts, M>(s, r, h, w);
        plain_put<M>(w.weights, s);
        if (h.limit) plain_drop<M>(h, w);
        plain_sums<parts, M>(r.o, w.weights, h, w, v, false);
    }
    plain_finish<parts, M>(r, h, w);
}

/* delta of the own queries: dy times y. */
template <int M> __device__ inline void plain_delta(const Heads &h, const PlainPlace &w) {
    MIXPI_UNROLL_BY(1)
    for (int i = 0; i < M; i++) {
        int query = w.first + plain_row<M>() + 4 * i;
        int64_t at = head_at(h, h.y_at, w.z) + query * h.y_at.row;
        float sum = 0.0f, a[8], b[8];
        for (int j = 8 * plain_column(); query < h.t && j < h.d; j += plain_columns) {
            get8_any(h.dy, at + j, (int)least(8, h.d - j), h.wide, a);
            get8_any(h.y, at + j, (int)least(8, h.d - j), h.wide, b);
            MIXPI_UNROLL
            for (int e = 0; e < 8; e++) sum = fmaf(a[e], b[e], sum);
        }
        sum = row_sum(sum);
        if (query < h.t && plain_column() == 0) h.delta[(int64_t)w.z * h.t + query] = sum;
    }
}

/* Is a key of the tile seen by a query, both in range? */
__device__ inline bool is_seen(const Heads &h, const PlainPlace &w, int query, int key) {
    return query < h.t && key < w.end && key <= query + h.ahead;
}

/* Turns scores into weights, and g into their gradients. */
template <bool keys, int M>
__device__ inline void plain_weights(float (*s)[8], float (*g)[8], const Heads &h,
                                     const PlainPlace &w) {
    const int queries = keys ? 8 : M;
    int mine = w.first + plain_row<M>(), that = w.at + plain_column();
    float lse[queries], delta[queries];
    MIXPI_UNROLL
    for (int i = 0; i < queries; i++) {
        int query = keys ? that + 8 * i : mine + 4 * i;
        int64_t at = (int64_t)w.z * h.t + query;
        lse[i] = query < h.t ? h.lse[at] : 0.0f;
        delta[i] = query < h.t ? h.delta[at] : 0.0f;
    }
    MIXPI_UNROLL
    for (int n = 0; n < 8 * M; n++) {
        int i = n / 8, j = n % 8, of = keys ? j : i;
        int query = keys ? that + 8 * j : mine + 4 * i, key = keys ? mine + 4 * i : that + 8 * j;
        bool seen = is_seen(h, w, query, key);
        float weight = expf(fmaf(s[i][j], h.scale, -lse[of]));
        s[i][j] = seen ? weight : 0.0f;
        g[i][j] = seen ? weight * (g[i][j] - delta[of]) : 0.0f;
    }
}

/* The same for bent scores, in shared memory. */
template <bool keys, int M> __device__ inline void plain_bent(const Heads &h, const PlainPlace &w) {
    const uint64_t draws = draws_key(h);
    MIXPI_UNROLL_BY(1)
    for (int n = 0; n < 8 * M; n++) {
        PlainScore one = plain_score<M>(n);
        int mine = w.first + one.row, that = w.at + one.column;
        int query = keys ? that : mine, key = keys ? mine : that;
        int64_t at = (int64_t)w.z * h.t + query;
        float *s = w.weights + one.at, *g = w.own + one.at;
        float score = capped(h, *s), slope = cap_slope(h, score), weight, kept;
        bool seen = is_seen(h, w, query, key);
        *s = seen ? score : 0.0f;
        if (!seen) *g = 0.0f;
        if (!seen) continue;
        weight = expf(score + mask_of(h, w.z, query, key) - h.lse[at]);
        kept = kept_of(h, draws, w.z, query, key);
        *s = weight * kept;
        *g = weight * (*g * kept - h.delta[at]) * slope;
    }
}

template <bool keys, int parts, int M>
__global__ void __launch_bounds__(attention_threads, 2) plain_backward(Heads h) {
    MIXPI_DYNAMIC_SHARED(float, shared);
    int blocks = (int)ceil_div(keys ? h.keys : h.t, 16 * M), block = (int)(blockIdx.x % blocks);
    int z = (int)(blockIdx.x / blocks) * (keys ? h.group : 1), begin = 0;
    PlainPlace w = plain_place<M>(h, shared, z, (keys ? block : blocks - 1 - block) * 16 * M, keys);
    int end = keys ? h.t : (int)least(w.end, (int64_t)w.first + 16 * M + h.ahead);
    float sums[keys ? 2 : 1][parts][M][8] = {};
    if (keys && w.first > h.ahead) begin = (w.first - h.ahead) / plain_others * plain_others;
    if (keys && w.first >= w.end) end = 0;
    if (!keys) plain_delta<M>(h, w);
    PlainRows k = key_rows(h, h.k, h.k_at, z, w.end), v = key_rows(h, h.v, h.v_at, z, w.end);
    for (; w.z < z + (keys ? h.group : 1); w.z++) {
        PlainRows q = query_rows(h, h.q, h.q_at, w.z), dy = query_rows(h, h.dy, h.y_at, w.z);
        for (w.at = begin; w.at < end; w.at += plain_others) {
            float s[M][8] = {}, g[M][8] = {};
            plain_scores<parts, M>(g, h, w, keys ? v : dy, keys ? dy : v, false);
            plain_scores<parts, M>(s, h, w, keys ? k : q, keys ? q : k, false);
            __syncwarp(); /* own rows of the warp have been read */
            if (!h.bends) plain_weights<keys, M>(s, g, h, w);
            plain_put<M>(w.weights, s);
            plain_put<M>(w.own, g);
            if (h.bends) plain_bent<keys, M>(h, w);
            plain_sums<parts, M>(sums[0], w.own, h, w, keys ? q : k, true);
            if (keys) plain_sums<parts, M>(sums[keys], w.weights, h, w, dy, false);
        }
    }
    if (keys) {
        GradRows dk = { h.dk, met_at(h, h.k_at, z), h.k_at.row, h.keys, w.end };
        GradRows dv = { h.dv, met_at(h, h.v_at, z), h.v_at.row, h.keys, w.end };
        plain_store<parts, M>(sums[0], h, dk, w.first, h.scale);
        plain_store<parts, M>(sums[keys], h, dv, w.first, 1.0f);
    } else {
        GradRows dq = { h.out, head_at(h, h.q_at, z), h.q_at.row, h.t, h.t };
        plain_store<parts, M>(sums[0], h, dq, w.first, h.scale);
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

/* Can 16 bytes of a row of D be read at once? Yes for an absent array. */
inline bool is_wide(mixp_in a, const mixp_head_strides &at) {
    return is_wide(a) && (at.sequence | at.head | at.row) % 8 == 0;
}

/* Can each row of each array? */
inline bool is_wide(const Heads &h) {
    return h.d % 8 == 0 && is_wide(h.q, h.q_at) && is_wide(h.k, h.k_at) && is_wide(h.v, h.v_at) &&
           is_wide(h.y) && is_wide(h.dy) && is_wide(h.out) && is_wide(h.dk) && is_wide(h.dv);
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
           (!backward || h.dy.dtype == dtype) && h.scale > 1e-30f && h.scale < 1e30f && is_wide(h);
}

inline bool is_bent(const Heads &h) { return h.mask.data || h.limit || h.softcap > 0.0f; }

template <int parts> inline mixp_result plain_run(Kernel *k, const Heads &h, bool backward) {
    const int M = parts == 4 ? 2 : 4, of_keys = parts == 1 ? 4 : 2;
    mixp_result r;
    if (!backward)
        return attention_launch(k, plain_forward<parts, M>, query_blocks(h, 16 * M), plain_bytes(M),
                                h);
    r = attention_launch(k, plain_backward<false, parts, M>, query_blocks(h, 16 * M),
                         plain_bytes(M), h);
    if (r != MIXP_OK || !wants_keys(h)) return r;
    return attention_launch(k, plain_backward<true, parts, of_keys>, key_blocks(h, 16 * of_keys),
                            plain_bytes(of_keys), h);
}
inline mixp_result plain_run(Kernel *k, Heads &h, bool backward) {
    h.bends = is_bent(h); /* whatever tensor cores have no room for */
    h.wide = is_wide(h);
    return h.d <= plain_columns       ? plain_run<1>(k, h, backward)
           : h.d <= 2 * plain_columns ? plain_run<2>(k, h, backward)
                                      : plain_run<4>(k, h, backward);
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
    h->bends = is_bent(*h);
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
