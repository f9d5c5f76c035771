#pragma once
#include "attention_groups.cu"
namespace {

/* --- in f32, any dtypes ------------------------------------------------------------------ *
 *
 * Tiles are f32 in shared memory, of 64 columns: wider heads go through them part by part. A block
 * owns 16 M rows, of which each warp owns 4 M, and walks over tiles of 64. A thread has M rows, r,
 * r + 4, ... of its warp, and a column c:
 *
 *     of a tile of scores     columns c, c + 8, ..., c + 56, stored side by side as group c
 *     of a part of the sums   columns 8 c, 8 c + 1, ..., 8 c + 7
 *
 * A group is 8 neighbours in a row: two times 16 bytes, 32 floats apart. Groups are permuted within
 * a row, and bits 0 and 2 of the lane are r, so that lanes served at once meet in no bank.
 */
const int plain_columns = 64, plain_others = 64;

/* The place of group `group` of row `row` in shared memory. */
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

__device__ inline PlainRows query_rows(
    const Heads &h, mixp_in a, const mixp_head_strides &at, int z) {
    PlainRows rows = { a, head_at(h, at, z), at.row, h.t };
    return rows;
}
__device__ inline PlainRows key_rows(
    const Heads &h, mixp_in a, const mixp_head_strides &at, int z, int end) {
    PlainRows rows = { a, met_at(h, at, z), at.row, end };
    return rows;
}

/* The piece of a tile that a thread fetches: the columns of group `group`, in every 16th row from
 * `row` on. n: how many of these columns the head has. */
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
__device__ inline void plain_fetch(
    float *tile, const Heads &h, const PlainRows &from, int first, int part) {
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
__device__ inline void plain_multiply(
    float (*s)[8], const float *own, const float *other, int groups) {
    int row = plain_row<M>(), column = plain_column();
    MIXPI_UNROLL_BY(1)
    for (int k = 0; k < groups; k++) {
        MIXPI_UNROLL
        for (int half = 0; half < 64; half += 32) {
            float a[M][4], b[4];

            /* Read 4 columns of the thread's own rows. */
            MIXPI_UNROLL
            for (int i = 0; i < M; i++) get4(own + plain_at(row + 4 * i, k) + half, a[i]);

            /* Multiply them by those of 8 other rows. */
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

            /* Read 4 weights of each of the thread's rows. */
            MIXPI_UNROLL
            for (int i = 0; i < M; i++) get4(weights + plain_at(row + 4 * i, k) + half, a[i]);

            /* Add the rows that they weigh. */
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
 * the warp has own rows. In the backward pass the gradients of weights overwrite own rows. */
struct PlainPlace {
    float *own, *other, *weights;
    int z, first, at, end;
    bool busy;
};

template <int M>
__device__ inline PlainPlace plain_place(
    const Heads &h, float *shared, int z, int first, bool keys) {
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
/* Score n of a thread: its row, its column within the tile, and its address. */
struct PlainScore { int row, column, at; };
template <int M> __device__ inline PlainScore plain_score(int n) {
    int row = plain_row<M>() + n / 8 * 4, j = n % 8;
    PlainScore s = { row, plain_column() + 8 * j, 0 };
    s.at = plain_at(row, plain_column()) + j / 4 * 32 + j % 4;
    return s;
}

/* Changes scores: by the cap and the mask. */
template <int M>
__device__ inline void plain_modify(float (*s)[8], const Heads &h, const PlainPlace &w) {
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

/* Sums of a thread's rows over the keys so far, relative to e^top. sum covers only the
 * thread's columns. */
template <int parts, int M> struct PlainSums { float o[parts][M][8], top[M], sum[M]; };

/* Turns scores into weights, and rescales the rows' sums to their new top. */
template <int parts, int M>
__device__ inline void plain_softmax(
    float (*s)[8], PlainSums<parts, M> &r, const Heads &h, const PlainPlace &w) {
    float factor = h.modified ? 1.0f : h.scale;
    MIXPI_UNROLL
    for (int i = 0; i < M; i++) {
        int query = w.first + plain_row<M>() + 4 * i, key = w.at + plain_column();
        int seen = query < h.t ? (int)least(w.end, query + h.ahead + 1) : 0;

        /* Hide keys that the query does not see, and find the row's new top. */
        float top = r.top[i], shrink;
        MIXPI_UNROLL
        for (int j = 0; j < 8; j++) {
            s[i][j] = key + 8 * j < seen ? s[i][j] * factor : -INFINITY;
            top = fmaxf(top, s[i][j]);
        }
        top = row_max(top);

        /* Rescale the sum to it, and add the new weights. */
        shrink = expf(r.top[i] - top);
        r.top[i] = top;
        r.sum[i] *= shrink;
        MIXPI_UNROLL
        for (int j = 0; j < 8; j++) {
            s[i][j] = expf(s[i][j] - top);
            r.sum[i] += s[i][j];
        }

        /* Rescale the weighted values. */
        MIXPI_UNROLL
        for (int n = 0; n < parts * 8; n++) r.o[n / 8][i][n % 8] *= shrink;
    }
}

template <int parts, int M>
__device__ inline void plain_store(
    const float (*sums)[M][8], const Heads &h, const GradRows &to, int first, float factor) {
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
        bool none = h.may_hide && sum <= 0.0f, stochastic = is_stochastic(h, sum);
        if (query < h.t && plain_column() == 0)
            h.lse[(int64_t)w.z * h.t + query] = none ? INFINITY : r.top[i] + logf(sum);
        MIXPI_UNROLL
        for (int n = 0; n < parts * 8; n++) {
            float x = none ? 0.0f : r.o[n / 8][i][n % 8] / sum;
            r.o[n / 8][i][n % 8] = stochastic ? mixpi_round_stochastically(h.out.dtype, x) : x;
        }
    }
    plain_store<parts, M>(r.o, h, y, w.first, 1.0f);
}

template <int parts, int M>
__global__ void __launch_bounds__(attention_threads, parts == 1 ? 3 : 2) plain_forward(Heads h) {
    MIXPI_DYNAMIC_SHARED(float, shared);

    /* Find the block's queries, and the keys that they see. */
    int blocks = (int)ceil_div(h.t, 16 * M), block = blocks - 1 - (int)(blockIdx.x % blocks);
    PlainPlace w = plain_place<M>(h, shared, (int)(blockIdx.x / blocks), block * 16 * M, false);
    int end = (int)least(w.end, (int64_t)w.first + 16 * M + h.ahead);
    PlainRows q = query_rows(h, h.q, h.q_at, w.z), k = key_rows(h, h.k, h.k_at, w.z, w.end),
              v = key_rows(h, h.v, h.v_at, w.z, w.end);

    /* The sums are empty: no key has been seen. */
    PlainSums<parts, M> r = {};
    MIXPI_UNROLL
    for (int i = 0; i < M; i++) r.top[i] = lowest_float;

    /* Walk over the tiles of keys: scores, weights, weighted values. */
    for (; w.at < end; w.at += plain_others) {
        float s[M][8] = {};
        plain_scores<parts, M>(s, h, w, q, k, w.at > 0);
        if (h.modified) plain_modify<M>(s, h, w);
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
__device__ inline void plain_weights(
    float (*s)[8], float (*g)[8], const Heads &h, const PlainPlace &w) {
    const int queries = keys ? 8 : M;
    int mine = w.first + plain_row<M>(), that = w.at + plain_column();

    /* Read the queries' statistics. */
    float lse[queries], delta[queries];
    MIXPI_UNROLL
    for (int i = 0; i < queries; i++) {
        int query = keys ? that + 8 * i : mine + 4 * i;
        int64_t at = (int64_t)w.z * h.t + query;
        lse[i] = query < h.t ? h.lse[at] : 0.0f;
        delta[i] = query < h.t ? h.delta[at] : 0.0f;
    }

    /* Compute the weights, and the gradients of their scores; hidden pairs have none. */
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

/* The weights and gradients of changed scores (with a cap, a mask or dropout), in shared memory. */
template <bool keys, int M>
__device__ inline void plain_modified(const Heads &h, const PlainPlace &w) {
    const uint64_t draws = draws_key(h);
    MIXPI_UNROLL_BY(1)
    for (int n = 0; n < 8 * M; n++) {
        PlainScore one = plain_score<M>(n);
        int mine = w.first + one.row, that = w.at + one.column;
        int query = keys ? that : mine, key = keys ? mine : that;
        int64_t at = (int64_t)w.z * h.t + query;

        /* Cap the score. A hidden pair has no weight and no gradient. */
        float *s = w.weights + one.at, *g = w.own + one.at;
        float score = capped(h, *s), slope = cap_slope(h, score), weight, kept;
        bool seen = is_seen(h, w, query, key);
        *s = seen ? score : 0.0f;
        if (!seen) *g = 0.0f;
        if (!seen) continue;

        /* Compute the weight, and the gradient of the score. */
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

    /* Find the tiles that the own rows meet; compute delta of own queries. */
    float sums[keys ? 2 : 1][parts][M][8] = {};
    if (keys && w.first > h.ahead) begin = (w.first - h.ahead) / plain_others * plain_others;
    if (keys && w.first >= w.end) end = 0;
    if (!keys) plain_delta<M>(h, w);

    /* Walk over them: in keys, for each head of the group. */
    PlainRows k = key_rows(h, h.k, h.k_at, z, w.end), v = key_rows(h, h.v, h.v_at, z, w.end);
    for (; w.z < z + (keys ? h.group : 1); w.z++) {
        PlainRows q = query_rows(h, h.q, h.q_at, w.z), dy = query_rows(h, h.dy, h.y_at, w.z);
        for (w.at = begin; w.at < end; w.at += plain_others) {
            float s[M][8] = {}, g[M][8] = {};

            /* Compute the scores and their gradients. */
            plain_scores<parts, M>(g, h, w, keys ? v : dy, keys ? dy : v, false);
            plain_scores<parts, M>(s, h, w, keys ? k : q, keys ? q : k, false);
            __syncwarp(); /* own rows of the warp have been read */
            if (!h.modified) plain_weights<keys, M>(s, g, h, w);
            plain_put<M>(w.weights, s);
            plain_put<M>(w.own, g);
            if (h.modified) plain_modified<keys, M>(h, w);

            /* Add them to the sums. */
            plain_sums<parts, M>(sums[0], w.own, h, w, keys ? q : k, true);
            if (keys) plain_sums<parts, M>(sums[keys], w.weights, h, w, dy, false);
        }
    }

    /* Store the sums. */
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

}   /* namespace */
