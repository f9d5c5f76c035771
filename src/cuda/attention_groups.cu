#pragma once
#include "attention.cu"
namespace {

/* --- by warpgroups, on capability 9.0 ----------------------------------------------------- *
 *
 * Code for sm_90a multiplies by wgmma: a warpgroup, which is four warps, multiplies 64 own rows by
 * a tile of the other side. Both lie in shared memory: with own rows in registers the results were
 * wrong on a GPU from the second tile on. Accumulators and left factors have the layout of
 * attention.cu: warp w of a group has rows 16 w to 16 w + 15.
 *
 * A tile is D / 64 halves; a half is rows of 64 elements, 128 bytes, permuted as chunk_at<64>
 * does, which is the 128-byte swizzle of wgmma. Halves begin at multiples of 1024 bytes.
 *
 * The groups of a block walk together, each with 64 own rows. wgmma does not see copies into shared
 * memory by itself: a thread that has waited for its copies calls wgmma_sees_shared before the
 * barrier. Each walk has one barrier a tile. After the barrier every group is done with the tile
 * before, so the copy of the next tile may begin. Other blocks of its SM fill the waits.
 */
#ifndef MIXPREC_CUDASIM
/* groups: warpgroups of a block; blocks: those that share a multiprocessor. Chosen by times on an
 * H200. */
template <int D> struct WideForward {
    static const int groups = 2, keys = D == 64 ? 64 : 128, blocks = D == 64 ? 2 : 1;
    static const int threads = 128 * groups, rows = 64 * groups;
    static const int bytes = (rows + 4 * keys) * D * 2;
};
template <int D, bool keys> struct WideBackward {
    static const int groups = D == 64 && keys ? 1 : 2, blocks = D != 64 ? 1 : keys ? 3 : 2;
    static const int threads = 128 * groups, rows = 64 * groups, others = 64;
    static const int bytes =
        (2 * rows + 4 * others) * D * 2 + (keys ? 4 * others * (int)sizeof(float) : 0);
};

#if MIXPI_WGMMA
/* Where a thread's chunk of a head's rows begins, and the bytes of a row. */
struct WideRows { const unsigned char *from; uint32_t ld; };

template <int D, int threads>
__device__ inline WideRows wide_rows(mixp_in a, int64_t first, const mixp_head_strides &at) {
    const uint16_t *from = (const uint16_t *)a.data + first + (int)threadIdx.x % (D / 8) * 8;
    return { (const unsigned char *)from, (uint32_t)at.row * 2 };
}

/* Starts the copy of rows [first, first + rows) of a head; rows beyond t become 0. */
template <int D, int rows, int threads>
__device__ inline void wide_fetch(uint16_t *tile, const WideRows &a, int first, int t) {
    const int chunks = D / 8, step = threads / chunks;
    int row = (int)threadIdx.x / chunks, chunk = (int)threadIdx.x % chunks, last = max(t - 1, 0);
    tile += chunk / 8 * rows * 64 + chunk_at<64>(row, chunk % 8);
    MIXPI_UNROLL
    for (int e = 0; e < rows; e += step) {
        int there = first + row + e;
        const unsigned char *from = a.from + (uint64_t)(uint32_t)min(there, last) * a.ld;
        if (rows % step == 0 || row + e < rows)
            cp_async_16(tile + e * 64, from, there < t ? 16 : 0);
    }
}

/* s = own x other', 64 x N: a and b describe the rows of own and of other. */
template <int D, int N, bool bf16, int own_rows>
__device__ inline void wide_scores(float (*s)[4], uint64_t a, uint64_t b) {
    MIXPI_UNROLL
    for (int k = 0; k < D / 16; k++)
        wgmma<N, bf16, false>(s, a + (k / 4 * own_rows * 128 + k % 4 * 32) / 16,
            b + (k / 4 * N * 128 + k % 4 * 32) / 16, k > 0);
}

/* sums[64][D] += weights[64][N] x other[N][D] */
template <int D, int N, bool bf16>
__device__ inline void wide_add(float (*sums)[4], const uint32_t (*weights)[4], uint64_t other) {
    MIXPI_UNROLL
    for (int j = 0; j < N / 16; j++) wgmma<D, bf16, true>(sums, weights[j], other + j * 128, 1);
}

template <bool bf16, int N>
__device__ inline void wide_left(uint32_t (*a)[4], const float (*f)[4]) {
    MIXPI_UNROLL
    for (int j = 0; j < N / 16; j++) as_left_factor<bf16>(a[j], f + 2 * j);
}

/* Turns scores into weights; shrink: what the rows' sums so far must be multiplied by. */
template <int D, int N>
__device__ inline void wide_weights(
    float (*s)[4], float *shrink, RowSums<D, 1> &r, const Heads &h, const Place &tile) {
    int lane = (int)threadIdx.x % warp_size;
    Place at = { tile.z, tile.row + lane / 4, tile.column + lane % 4 * 2, tile.end };
    if (tile.column + N > tile.end || tile.column + N - 1 > tile.row + h.ahead)
        hide_keys<N / 8>(s, h.ahead, at);
    MIXPI_UNROLL
    for (int half = 0; half < 2; half++)
        shrink[half] =
            forward_half<false, N / 8>(s, r.top[0][half], r.sum[0][half], half, h.scale * log2_e);
}

/* A factor of 1, the most frequent one, costs no product. */
template <int D> __device__ inline void wide_shrink(float (*o)[4], const float *shrink) {
    if (shrink[0] != 1.0f || shrink[1] != 1.0f) {
        MIXPI_UNROLL
        for (int n = 0; n < D / 8; n++) {
            MIXPI_UNROLL
            for (int e = 0; e < 4; e++) o[n][e] *= shrink[e / 2];
        }
    }
    __syncwarp();
}

/* ptxas moves a wait up, past instructions that need not come first, but never across a branch.
 * This branch, which is never taken, depends on the sums of the weights: the wait stays after
 * them. */
__device__ inline void wide_settle(float sum) {
    if (sum < 0.0f) wgmma_sees_shared();
}
#  endif

/* The scores of tile i are computed while the values of tile i - 1 are added. */
template <int D, bool bf16>
__global__ void __launch_bounds__(MIXPI_WGMMA ? WideForward<D>::threads : warp_size,
    MIXPI_WGMMA ? WideForward<D>::blocks : 1) wide_forward(Heads h) {
#  if MIXPI_WGMMA
    typedef WideForward<D> Shape;
    const int rows = Shape::rows, keys = Shape::keys, threads = Shape::threads;
    MIXPI_SWIZZLED_SHARED(uint16_t, own);
    wgmma_check_base(own);
    uint16_t *tiles_k = own + rows * D, *tiles_v = tiles_k + 2 * keys * D;

    /* The block's queries, the group's, and how many tiles each needs. */
    int group = warp_uniform((int)threadIdx.x / 128), warp = (int)threadIdx.x / warp_size % 4;
    int blocks = (int)ceil_div(h.t, rows);
    int first = (blocks - 1 - (int)(blockIdx.x % blocks)) * rows, low = first + 64 * group;
    int z = (int)(blockIdx.x / blocks), end = keys_of(h, z);
    int tiles = (int)ceil_div(least(end, (int64_t)first + rows + h.ahead), keys);
    int mine = low < h.t ? (int)ceil_div(least(end, (int64_t)low + 64 + h.ahead), keys) : 0;

    /* The arrays, as copies and as products see them. */
    WideRows q = wide_rows<D, threads>(h.q, head_at(h, h.q_at, z), h.q_at);
    WideRows k = wide_rows<D, threads>(h.k, met_at(h, h.k_at, z), h.k_at);
    WideRows v = wide_rows<D, threads>(h.v, met_at(h, h.v_at, z), h.v_at);
    uint64_t own_q = wgmma_matrix(own + group * 64 * 64, rows * 128);
    uint64_t all_k = wgmma_matrix(tiles_k, keys * 128), all_v = wgmma_matrix(tiles_v, keys * 128);
    const int stage = keys * D / 8; /* the bytes of a tile / 16, as descriptors count */

    float s[keys / 8][4], shrink[2];
    uint32_t weights[keys / 16][4];
    RowSums<D, 1> r = {};
    r.top[0][0] = r.top[0][1] = lowest_float;
    Place tile = { z, low + 16 * warp, 0, end };

    /* Waits for keys of tile i and values of tile i - 1, and starts the copies of the next. */
    auto arrive = [&](int i) {
        int next = i + 1;
        cp_async_wait<0>();
        wgmma_sees_shared();
        __syncthreads();
        if (next < tiles)
            wide_fetch<D, keys, threads>(tiles_k + next % 2 * keys * D, k, next * keys, end);
        if (i < tiles) wide_fetch<D, keys, threads>(tiles_v + i % 2 * keys * D, v, i * keys, end);
        cp_async_commit();
    };
    auto scores = [&](int i) {
        wide_scores<D, keys, bf16, rows>(s, own_q, all_k + i % 2 * stage);
        wgmma_commit();
    };
    auto values = [&](int i) {
        wide_add<D, keys, bf16>(r.o[0], weights, all_v + i % 2 * stage);
        wgmma_commit();
    };
    auto soften = [&](int i) {
        wgmma_done<keys / 8>(s);
        tile.column = i * keys;
        wide_weights<D, keys>(s, shrink, r, h, tile);
    };

    /* The scores of the first tile. */
    wide_fetch<D, rows, threads>(own, q, first, h.t);
    wide_fetch<D, keys, threads>(tiles_k, k, 0, end);
    cp_async_commit();
    if (tiles > 0) arrive(0);
    if (mine > 0) {
        wgmma_fence();
        scores(0);
        wgmma_wait<0>();
        soften(0);
        wide_left<bf16, keys>(weights, s);
    }

    /* The softmax of tile i while the values of tile i - 1 are added. */
    for (int i = 1; i <= tiles; i++) {
        arrive(i);
        if (i < mine) {
            wgmma_pin<keys / 16, D / 8>(weights, r.o[0]);
            wgmma_fence();
            scores(i);
            values(i - 1);
            wgmma_wait<1>();
            soften(i);
            wide_settle(fminf(r.sum[0][0], r.sum[0][1]));
            wgmma_wait<0>();
            wgmma_pin<keys / 16, D / 8>(weights, r.o[0]);
            wide_shrink<D>(r.o[0], shrink);
            wide_left<bf16, keys>(weights, s);
        } else if (i == mine) {
            wgmma_pin<keys / 16, D / 8>(weights, r.o[0]);
            wgmma_fence();
            values(i - 1);
            wgmma_wait<0>();
            wgmma_pin<keys / 16, D / 8>(weights, r.o[0]);
        }
    }
    cp_async_wait<0>();
    forward_store<D, false, 1>(r, h, z, low + 16 * warp);
#  else
    (void)h;
#  endif
}

#  if MIXPI_WGMMA
/* Two arrays of one side: k and v, or q and dy. z: the head of q. */
struct WideSide { WideRows rows[2]; };

template <int D, bool of_keys, int threads>
__device__ inline WideSide wide_side(const Heads &h, int z) {
    if (of_keys)
        return { { wide_rows<D, threads>(h.k, met_at(h, h.k_at, z), h.k_at),
            wide_rows<D, threads>(h.v, met_at(h, h.v_at, z), h.v_at) } };
    return { { wide_rows<D, threads>(h.q, head_at(h, h.q_at, z), h.q_at),
        wide_rows<D, threads>(h.dy, head_at(h, h.y_at, z), h.y_at) } };
}

template <int D, int rows, int threads>
__device__ inline void wide_fetch_two(uint16_t *to, const WideSide &a, int first, int end) {
    wide_fetch<D, rows, threads>(to, a.rows[0], first, end);
    wide_fetch<D, rows, threads>(to + rows * D, a.rows[1], first, end);
}

/* Turns scores into weights, then g into their gradients, as backward_weights. */
template <bool keys>
__device__ inline void wide_exp(float (*s)[4], float factor, const float *lse) {
    MIXPI_UNROLL
    for (int n = 0; n < 8; n++) {
        MIXPI_UNROLL
        for (int e = 0; e < 4; e++)
            s[n][e] = exp2_approx(fmaf(s[n][e], factor, -lse[keys ? 8 * n + e % 2 : e / 2]));
    }
}
template <bool keys>
__device__ inline void wide_gradients(const float (*s)[4], float (*g)[4], const float *delta) {
    MIXPI_UNROLL
    for (int n = 0; n < 8; n++) {
        MIXPI_UNROLL
        for (int e = 0; e < 4; e++)
            g[n][e] = s[n][e] * (g[n][e] - delta[keys ? 8 * n + e % 2 : e / 2]);
    }
}

/* Clears elements, as backward_hide. */
template <bool keys>
__device__ inline void wide_hide(float (*f)[4], int ahead, int end, int row, int column) {
    MIXPI_UNROLL
    for (int n = 0; n < 8; n++) {
        MIXPI_UNROLL
        for (int e = 0; e < 4; e++) {
            int i = row + e / 2 * 8, j = column + 8 * n + e % 2;
            if (j >= end || (keys ? j + ahead < i : j > i + ahead)) f[n][e] = 0.0f;
        }
    }
}
#  endif

template <int D, bool bf16, bool keys>
__global__ void __launch_bounds__(MIXPI_WGMMA ? WideBackward<D, keys>::threads : warp_size,
    MIXPI_WGMMA ? WideBackward<D, keys>::blocks : 1) wide_backward(Heads h) {
#  if MIXPI_WGMMA
    typedef WideBackward<D, keys> Shape;
    const int rows = Shape::rows, N = Shape::others, threads = Shape::threads;
    MIXPI_SWIZZLED_SHARED(uint16_t, own);
    wgmma_check_base(own);
    uint16_t *others = own + 2 * rows * D;
    float *statistics = (float *)(void *)(others + 4 * N * D), ahead = 0.0f;

    /* The block's own rows, and the tiles that they meet. */
    int group = warp_uniform((int)threadIdx.x / 128), warp = (int)threadIdx.x / warp_size % 4;
    int lane = (int)threadIdx.x % warp_size, begin = 0, turn = 0;
    int blocks = (int)ceil_div(keys ? h.keys : h.t, rows), block = (int)(blockIdx.x % blocks);
    Own<D, 1> w = {};
    w.first = (keys ? block : blocks - 1 - block) * rows;
    w.row = 64 * group + 16 * warp;
    w.z = (int)(blockIdx.x / blocks) * (keys ? h.group : 1);
    w.end = keys_of(h, w.z);
    int low = w.first + 64 * group, end = keys ? h.t : w.end;
    if (keys && w.first > h.ahead) begin = (w.first - h.ahead) / N;
    int tiles = (int)ceil_div(keys ? h.t : least(w.end, (int64_t)w.first + rows + h.ahead), N);
    if (keys && w.first >= w.end) tiles = 0;
    int count = tiles > begin ? (tiles - begin) * (keys ? h.group : 1) : 0, tile = begin;

    /* The arrays, as products and as copies see them; the first tiles are fetched. */
    uint64_t own0 = wgmma_matrix(own + group * 64 * 64, rows * 128), own1 = own0 + rows * D / 8;
    uint64_t all = wgmma_matrix(others, N * 128);
    uint32_t weights[N / 16][4], weights_v[N / 16][4];
    float sums[keys ? 2 : 1][1][D / 8][4] = {};
    WideSide walked = wide_side<D, !keys, threads>(h, w.z);
    wide_fetch_two<D, rows, threads>(
        own, wide_side<D, keys, threads>(h, w.z), w.first, keys ? w.end : h.t);
    cp_async_commit();
    wide_fetch_two<D, N, threads>(others, walked, begin * N, end);
    cp_async_commit();
    if (keys && threadIdx.x < 128)
        statistics[(int)threadIdx.x] = query_statistic(h, w.z, begin * N);
    if (!keys) own_statistics<D, false, 1>(w, h);
    for (int i = 0; i < count; i++) {
        const int stage = 2 * N * D / 8; /* the bytes of two tiles / 16, as descriptors count */
        uint64_t other0 = all + i % 2 * stage, other1 = other0 + stage / 2;
        int from = tile * N;
        const float *those = statistics + i % 2 * 2 * N + lane % 4 * 2;
        bool meets = from < end && low < (keys ? w.end : h.t) &&
                     !(keys ? from + 63 + h.ahead < low : from > low + 63 + h.ahead);
        if (++tile == tiles) { /* the next head of the group, in the same sequence */
            tile = begin;
            turn++;
            if (keys) walked.rows[0].from += 2 * h.q_at.head;
            if (keys) walked.rows[1].from += 2 * h.y_at.head;
        }

        /* This tile has arrived, every group is done with the one before: the next may come. */
        cp_async_wait<0>();
        wgmma_sees_shared();
        __syncthreads();
        if (i + 1 < count) {
            wide_fetch_two<D, N, threads>(others + (i + 1) % 2 * 2 * N * D, walked, tile * N, end);
            if (keys && threadIdx.x < 128) ahead = query_statistic(h, w.z + turn, tile * N);
        }
        cp_async_commit();
        if (meets) {
            float s[8][4], g[8][4];
            int row = w.first + w.row;
            bool hides =
                from + N > end || (keys ? from + h.ahead < row + 15 : from + N - 1 > row + h.ahead);

            /* Weights, while the second product runs; then their gradients. */
            wgmma_fence();
            wide_scores<D, N, bf16, rows>(s, own0, other0);
            wgmma_commit();
            wide_scores<D, N, bf16, rows>(g, own1, other1);
            wgmma_commit();
            wgmma_wait<1>();
            wgmma_done<8>(s);
            wide_exp<keys>(s, h.scale * log2_e, keys ? those : w.lse[0]);
            if (hides) wide_hide<keys>(s, h.ahead, end, row + lane / 4, from + lane % 4 * 2);
            wgmma_wait<0>();
            wgmma_done<8>(g);
            wide_gradients<keys>(s, g, keys ? those + N : w.delta[0]);
            if (hides) wide_hide<keys>(g, h.ahead, end, row + lane / 4, from + lane % 4 * 2);

            /* Both, as left factors, are multiplied and added. */
            wide_left<bf16, N>(weights, g);
            if (keys) wide_left<bf16, N>(weights_v, s);
            wgmma_pin<N / 16, D / 8>(weights, sums[0][0]);
            if (keys) wgmma_pin<N / 16, D / 8>(weights_v, sums[keys][0]);
            wgmma_fence();
            if (keys) wide_add<D, N, bf16>(sums[keys][0], weights_v, other1);
            wide_add<D, N, bf16>(sums[0][0], weights, other0);
            wgmma_commit();
            wgmma_wait<0>();
            wgmma_pin<N / 16, D / 8>(weights, sums[0][0]);
            if (keys) wgmma_pin<N / 16, D / 8>(weights_v, sums[keys][0]);
        }
        if (keys && threadIdx.x < 128) statistics[(i + 1) % 2 * 2 * N + (int)threadIdx.x] = ahead;
    }
    cp_async_wait<0>();
    backward_finish<D, keys, 1>(sums, h, w);
#  else
    (void)h;
#  endif
}
#endif

}   /* namespace */
