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
 * Separate kernels change scores (a cap, a mask, dropout), with half as many rows, because they
 * have no registers for more.
 */
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
    bool         modified, may_hide;               /* may_hide: a query may see no key          */
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
    return get1(
        h.mask, head_at(h, h.mask_at, z) + query * h.mask_at.row + (int64_t)key * h.mask_key);
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
    ldmatrix_x4<false>(
        b, tile + fragment_at<D>(row, lane % 8 + lane / 16 * 8, 2 * k ^ lane / 8 % 2));
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
__device__ inline void add_weighted(
    float (*sums)[D / 8][4], const uint32_t (*weights)[4], const uint16_t *tile, int row) {
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

/* Is each element of y rounded at random, in a row with this sum? */
__device__ inline bool is_stochastic(const Heads &h, float sum) {
    return h.out.dtype != MIXP_F32 && !h.out.accumulate && mixpi_top_repeats(sum);
}

/* --- forward on tensor cores ------------------------------------------------------------ */

template <int D, bool modified> struct Forward {
    static const int M = D == 128 || modified ? 1 : 2, rows = 64 * M,
                     keys = D == 128 ? 32 : 64;
    static const int bytes = (rows + 4 * keys) * D * 2;
};

/* A warp's state for its rows: sums over the keys so far, relative to 2^top. */
template <int D, int M> struct RowSums { float o[M][D / 8][4], top[M][2], sum[M][2]; };

/* s = queries x keys' */
template <int D, bool bf16, int M, int N>
__device__ inline void forward_scores(
    float (*s)[N / 8][4], const uint32_t (*q)[D / 16][4], const uint16_t *keys) {
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

/* Changes scores of a fragment: by the cap and the mask. */
template <int N>
__device__ inline void forward_modify(float (*s)[4], const Heads &h, const Place &at) {
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
__device__ inline void forward_drop(
    float (*s)[4], const Heads &h, uint64_t draws, const Place &at) {
    MIXPI_UNROLL
    for (int n = 0; n < N; n++) {
        MIXPI_UNROLL
        for (int e = 0; e < 4; e++)
            s[n][e] *= kept_of(h, draws, at.z, at.row + e / 2 * 8, at.column + 8 * n + e % 2);
    }
}

/* e^(s - top), for a score and its row's top. A mask can put changed scores far from 0, so their
 * difference is computed first: a product would round off more than the difference. */
template <bool modified> __device__ inline float exp_from(float s, float top, float factor) {
    return exp2_approx(modified ? (s - top) * log2_e : fmaf(s, factor, -top));
}

/* Turns the scores of half the rows of a fragment into weights. Returns what the rows' sums must be
 * multiplied by, for their new top. top is the maximum of changed scores; otherwise of scores times
 * factor, where factor is scale log2 e. */
template <bool modified, int N>
__device__ inline float forward_half(
    float (*s)[4], float &top_so_far, float &sum_so_far, int half, float factor) {
    float most = -INFINITY, top, shrink, sum = 0.0f;

    /* Find the row's new top, over the four threads that share the row. */
    MIXPI_UNROLL
    for (int n = 0; n < N; n++) most = fmaxf(most, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
    most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, 1));
    most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, 2));
    top = fmaxf(top_so_far, modified ? most : most * factor);
    shrink = exp2_approx((top_so_far - top) * (modified ? log2_e : 1.0f));
    top_so_far = top;

    /* Turn scores into weights, and add them. */
    MIXPI_UNROLL
    for (int n = 0; n < N; n++) {
        MIXPI_UNROLL
        for (int e = 2 * half; e < 2 * half + 2; e++) {
            s[n][e] = exp_from<modified>(s[n][e], top, factor);
            sum += s[n][e];
        }
    }

    sum_so_far = fmaf(sum_so_far, shrink, sum);
    return shrink;
}

/* Turns scores into weights, and rescales the rows' sums to their new top. */
template <int D, bool modified, int M, int N>
__device__ inline void forward_softmax(float (*s)[4], RowSums<D, M> &r, int m, float factor) {
    MIXPI_UNROLL
    for (int half = 0; half < 2; half++) {
        float shrink = forward_half<modified, N>(s, r.top[m][half], r.sum[m][half], half, factor);
        MIXPI_UNROLL
        for (int n = 0; n < D / 8; n++) {
            r.o[m][n][2 * half] *= shrink;
            r.o[m][n][2 * half + 1] *= shrink;
        }
    }
}

/* Processes one tile of keys and values. q: the warp's queries; the first is tile.row. */
template <int D, bool bf16, bool modified, int M>
__device__ inline void forward_tile(RowSums<D, M> &r, const Heads &h, uint64_t draws,
    const uint32_t (*q)[D / 16][4], const uint16_t *keys, const Place &tile) {
    const int N = Forward<D, modified>::keys;
    int lane = (int)threadIdx.x % warp_size, end = tile.end;
    float s[M][N / 8][4] = {};

    /* Compute the scores. */
    forward_scores<D, bf16, M, N>(s, q, keys);

    /* Turn them into weights: changed, hidden, dropped. */
    MIXPI_UNROLL
    for (int m = 0; m < M; m++) {
        int query = tile.row + 16 * m, key = tile.column;
        Place at = { tile.z, query + lane / 4, key + lane % 4 * 2, end };
        if (modified) forward_modify<N / 8>(s[m], h, at);
        if (key + N > end || key + N - 1 > query + h.ahead) hide_keys<N / 8>(s[m], h.ahead, at);
        forward_softmax<D, modified, M, N / 8>(s[m], r, m, h.scale * log2_e);
        if (modified && h.limit) forward_drop<N / 8>(s[m], h, draws, at);
    }

    if (modified) __syncwarp(); /* products need all threads of the warp together */

    /* Add the weighted values. */
    MIXPI_UNROLL
    for (int j = 0; j < N / 16; j++) {
        uint32_t weights[M][4];
        MIXPI_UNROLL
        for (int m = 0; m < M; m++) as_left_factor<bf16>(weights[m], s[m] + 2 * j);
        add_weighted<D, M, bf16>(r.o, weights, keys + N * D, 16 * j);
    }
}

template <int D, bool modified, int M>
__device__ inline void forward_store(const RowSums<D, M> &r, const Heads &h, int z, int row) {
    int lane = (int)threadIdx.x % warp_size;
    MIXPI_UNROLL
    for (int i = 0; i < 2 * M; i++) {
        int m = i / 2, half = i % 2, query = row + 16 * m + 8 * half + lane / 4;
        int64_t at = head_at(h, h.y_at, z) + query * h.y_at.row + lane % 4 * 2;

        /* Join the row's sum. A row that sees no key has none, and is 0. */
        float sum = r.sum[m][half], top = r.top[m][half], inverse;
        sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
        sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 2);
        bool none = h.may_hide && sum <= 0.0f;
        inverse = none ? 0.0f : 1.0f / sum;
        bool stochastic = is_stochastic(h, sum);

        /* Store the logarithm of the sum, which the backward pass reads. */
        if (query >= h.t) continue;
        if (lane % 4 == 0)
            h.lse[(int64_t)z * h.t + query] = none       ? INFINITY
                                              : modified ? top + log2f(sum) * ln_2
                                                         : (top + log2f(sum)) * ln_2;

        /* Store the row. */
        MIXPI_UNROLL
        for (int n = 0; n < D / 8; n++) {
            float x = r.o[m][n][2 * half] * inverse, y = r.o[m][n][2 * half + 1] * inverse;
            put_pair(h.out, at + 8 * n, stochastic ? mixpi_round_stochastically(h.out.dtype, x) : x,
                stochastic ? mixpi_round_stochastically(h.out.dtype, y) : y);
        }
    }
}

/* Causal: a head's last queries go first, because they see the most keys. */
template <int D, bool bf16, bool modified>
__global__ void __launch_bounds__(attention_threads, 2) attention_forward(Heads h) {
    typedef Forward<D, modified> Shape;
    const int M = Shape::M, rows = Shape::rows, keys = Shape::keys;
    MIXPI_DYNAMIC_SHARED(uint16_t, own);
    uint16_t *others = own + rows * D;

    /* Find the block's queries, its head, and the tiles of keys that they see. */
    int blocks = (int)ceil_div(h.t, rows), row = (int)threadIdx.x / warp_size * 16 * M;
    int first = (blocks - 1 - (int)(blockIdx.x % blocks)) * rows;
    int z = (int)(blockIdx.x / blocks), end = keys_of(h, z);
    int tiles = (int)ceil_div(least(end, (int64_t)first + rows + h.ahead), keys);
    const uint16_t *q = (const uint16_t *)h.q.data + head_at(h, h.q_at, z);
    const uint16_t *k = (const uint16_t *)h.k.data + met_at(h, h.k_at, z);
    const uint16_t *v = (const uint16_t *)h.v.data + met_at(h, h.v_at, z);
    int ld_k = (int)h.k_at.row, ld_v = (int)h.v_at.row;

    /* The sums are empty: no key has been seen. */
    const uint64_t draws = modified ? draws_key(h) : 0;
    uint32_t held[M][D / 16][4];
    RowSums<D, M> r = {};
    MIXPI_UNROLL
    for (int i = 0; i < 2 * M; i++) r.top[i / 2][i % 2] = lowest_float;

    /* Fetch the queries, then the first tile; hold the queries in registers. */
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

    /* Walk over the tiles: fetch the next one while this one is computed. */
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
            forward_tile<D, bf16, modified, M>(r, h, draws, held, now, tile);
        __syncthreads();
    }

    cp_async_wait<0>(); /* without any tile the first copy is still in flight */
    forward_store<D, modified, M>(r, h, z, first + row);
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
template <int D, bool modified> struct Backward {
    static const int M = D == 128 || modified ? 1 : 2, rows = 64 * M, others = 64,
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
    float lse[M][2], delta[M][2];       /* statistics of own queries                         */
    uint32_t dy[D / 16][M][4];          /* dy of own queries, as left factors                */
};

/* s += a x other' for 32 columns, a: 16 of D. */
template <int D, bool bf16, int M>
__device__ inline void add_products(
    float (*s)[4][4], const uint32_t (*a)[4], const uint16_t *other, int column, int k) {
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
__device__ inline void backward_scores(
    float (*s)[4][4], float (*g)[4][4], const Own<D, M> &w, const uint16_t *other, int column) {
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
__device__ inline void backward_weights(
    float (*s)[4], float (*g)[4], float factor, const float *lse, const float *delta) {
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

/* backward_weights for changed scores: those with a cap, a mask or dropout. */
template <bool keys>
__device__ inline void backward_modified(float (*s)[4], float (*g)[4], const Heads &h,
    uint64_t draws, const Place &p, const float *lse, const float *delta) {
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
__device__ inline void backward_hide(
    float (*s)[4], float (*g)[4], int ahead, int end, int row, int column) {
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
template <int D, bool bf16, bool keys, bool modified, int M>
__device__ inline void backward_columns(float (*sums)[M][D / 8][4], const Heads &h,
    const Own<D, M> &w, const uint16_t *other, const float *statistics, int at, int column) {
    int lane = (int)threadIdx.x % warp_size, low = w.first + w.row, from = at + column;
    int end = keys ? h.t : w.end, own_end = keys ? w.end : h.t;
    float s[M][4][4] = {}, g[M][4][4] = {};
    const float *those = statistics + column + lane % 4 * 2;

    /* Does no pair of these queries and keys count? */
    if (from >= end || low >= own_end ||
        (keys ? from + 31 + h.ahead < low : from > low + 16 * M - 1 + h.ahead))
        return;

    /* Compute the scores and their gradients; hidden pairs have none. */
    backward_scores<D, bf16, keys, M>(s, g, w, other, column);
    MIXPI_UNROLL
    for (int m = 0; m < M; m++) {
        Place p = { w.z, low + 16 * m + lane / 4, from + lane % 4 * 2, w.end };
        const float *lse = keys ? those : w.lse[m], *delta = keys ? those + 64 : w.delta[m];
        if (modified) backward_modified<keys>(s[m], g[m], h, w.draws, p, lse, delta);
        else backward_weights<keys>(s[m], g[m], h.scale * log2_e, lse, delta);
        if (from + 32 > end ||
            (keys ? from + h.ahead < low + 16 * M - 1 : from + 31 > low + h.ahead))
            backward_hide<keys>(s[m], g[m], h.ahead, end, p.row, p.column);
    }

    if (modified) __syncwarp();

    /* Add the gradients of 32 columns to the sums, and for keys the weighted dy. */
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
__device__ inline void backward_store(
    const float (*sums)[D / 8][4], const GradRows &to, int row, float factor) {
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

/* The reference of weights: lse log2e, or lse itself for changed scores. */
__device__ inline float lse_of(const Heads &h, int64_t at) {
    return h.modified ? h.lse[at] : h.lse[at] * log2_e;
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
 * and dV. is_fetched: the own tile of dy is in shared memory; otherwise the array is read. */
template <int D, bool is_fetched, int M>
__device__ inline void own_statistics(Own<D, M> &w, const Heads &h) {
    int lane = (int)threadIdx.x % warp_size;
    mixp_in dy = { w.own + 64 * M * D, h.dy.dtype };
    MIXPI_UNROLL
    for (int i = 0; i < 2 * M; i++) {
        int own = w.row + 8 * i + lane / 4, query = w.first + own;
        int64_t at = (int64_t)w.z * h.t + query;
        int64_t y = head_at(h, h.y_at, w.z) + query * h.y_at.row;
        bool there = query < h.t;

        /* Compute dy . y of the row, with four threads. */
        float sum = 0.0f, a[8], b[8];
        for (int chunk = lane % 4; there && chunk < D / 8; chunk += 4) {
            if (is_fetched) get8_any(dy, chunk_at<D>(own, chunk), 8, true, a);
            else get8_any(h.dy, y + 8 * chunk, 8, true, a);
            get8_any(h.y, y + 8 * chunk, 8, true, b);
            MIXPI_UNROLL
            for (int e = 0; e < 8; e++) sum = fmaf(a[e], b[e], sum);
        }
        sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
        sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 2);

        /* Keep delta and lse in registers; store delta for dK and dV. */
        w.delta[i / 2][i % 2] = sum;
        w.lse[i / 2][i % 2] = there ? lse_of(h, at) : 0.0f;
        if (there && lane % 4 == 0) h.delta[at] = sum;
    }
}

/* Keys: sums[0] is for dk, sums[1] for dv. */
template <int D, bool keys, int M>
__device__ inline void backward_finish(
    const float (*sums)[M][D / 8][4], const Heads &h, const Own<D, M> &w) {
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
__device__ inline void walk_fetch(
    uint16_t *to, const Heads &h, int z, int turn, int tile, int end) {
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

template <int D, bool bf16, bool keys, bool modified>
__global__ void __launch_bounds__(attention_threads, 2) attention_backward(Heads h) {
    typedef Backward<D, modified> Shape;
    const int M = Shape::M, rows = Shape::rows, N = Shape::others;
    MIXPI_DYNAMIC_SHARED(uint16_t, own);
    uint16_t *others = own + 2 * rows * D;
    float *statistics = (float *)(void *)(others + 4 * N * D), ahead = 0.0f;
    int blocks = (int)ceil_div(keys ? h.keys : h.t, rows), block = (int)(blockIdx.x % blocks),
        begin = 0, tiles, count, z;

    /* Find the block's own rows, and its head. */
    float sums[keys ? 2 : 1][M][D / 8][4] = {};
    Own<D, M> w = {};
    w.own = own;
    if (modified) w.draws = draws_key(h);
    w.row = (int)threadIdx.x / warp_size * 16 * M;
    w.first = (keys ? block : blocks - 1 - block) * rows;
    z = (int)(blockIdx.x / blocks) * (keys ? h.group : 1);
    w.z = z;
    w.end = keys_of(h, z);

    /* Find the tiles that its rows meet: in keys, for each head of the group. */
    if (keys && w.first > h.ahead) begin = (w.first - h.ahead) / N;
    tiles = (int)ceil_div(keys ? h.t : least(w.end, (int64_t)w.first + rows + h.ahead), N);
    if (keys && w.first >= w.end) tiles = 0;
    tiles = tiles > begin ? tiles - begin : 0; /* of a head */
    count = tiles * (keys ? h.group : 1);

    /* Fetch the own rows, then the first tile. */
    own_fetch<D, keys, rows>(own, h, z, w.first, keys ? w.end : h.t);
    cp_async_commit();
    walk_fetch<D, keys>(others, h, z, 0, begin, keys ? h.t : w.end);
    cp_async_commit();
    if (keys) statistics[(int)threadIdx.x] = query_statistic(h, z, begin * N);

    /* Compute the statistics of own queries, and hold their dy in registers. */
    if (!keys) {
        cp_async_wait<1>();
        __syncthreads();
        own_statistics<D, true, M>(w, h);
        __syncwarp();
        MIXPI_UNROLL
        for (int i = 0; i < M * (D / 16); i++)
            left_factor<D>(w.dy[i / M][i % M], own + rows * D, w.row + 16 * (i % M), i / M);
    }

    /* Walk over the tiles: fetch the next one while this one is computed. */
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
            backward_columns<D, bf16, keys, modified, M>(sums, h, w, now,
                statistics + i % 2 * 2 * N, (begin + (keys ? i % tiles : i)) * N, column);
        if (keys) statistics[(i + 1) % 2 * 2 * N + (int)threadIdx.x] = ahead;
        __syncthreads();
    }

    /* Store the sums. */
    cp_async_wait<0>();
    w.z = z;
    backward_finish<D, keys, M>(sums, h, w);
}

}   /* namespace */
