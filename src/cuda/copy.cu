#pragma once
#include "convert.cu"
/* --- shapes ------------------------------------------------------------------------------- *
 *
 * The axes of a shape, and the stride of each axis in up to four arrays. Array 0 is the output.
 */
namespace {

struct Axes {
    int      rank;
    int64_t  n[8], s[4][8];
    uint64_t inverse[8];        /* inverses of n, for over()                                 */
};

/* The factor by which over() multiplies instead of dividing by n, because a GPU divides 64 bits
 * by a function call. */
inline uint64_t inverse_of(int64_t n) { return n > 0 ? ~(uint64_t)0 / (uint64_t)n : 0; }

/* a / n for a >= 0: the product is exact or one too small. */
__device__ inline int64_t over(int64_t a, int64_t n, uint64_t inverse) {
    int64_t q = (int64_t)__umul64hi((uint64_t)a, inverse);
    return a - q * n >= n ? q + 1 : q;
}

inline int64_t count_of(const Axes &x) {
    int64_t n = 1;
    for (int i = 0; i < x.rank; i++) n *= x.n[i];
    return n;
}

inline void set_length(Axes *x, int axis, int64_t n) {
    x->n[axis] = n;
    x->inverse[axis] = inverse_of(n);
}

inline void append(Axes *to, const Axes &from, int axis) {
    int r = to->rank++;
    set_length(to, r, from.n[axis]);
    for (int k = 0; k < 4; k++) to->s[k][r] = from.s[k][axis];
}

/* Axis i of x; by default dense for all arrays. */
inline Axes dense_axes(int rank, const int64_t *shape) {
    Axes x;
    int64_t step = 1;
    memset(&x, 0, sizeof x);
    x.rank = rank;
    for (int i = rank - 1; i >= 0; step *= shape[i--]) {
        set_length(&x, i, shape[i]);
        for (int k = 0; k < 4; k++) x.s[k][i] = step;
    }
    return x;
}

/* Drops axes of one element, and merges neighbours that all arrays step through evenly. */
inline Axes merge_axes(const Axes &x) {
    Axes m;
    memset(&m, 0, sizeof m);
    for (int i = 0; i < x.rank; i++) {
        if (x.n[i] == 1) continue;
        const int last = m.rank - 1;
        bool joins = last >= 0;
        for (int k = 0; k < 4; k++) joins = joins && m.s[k][last] == x.s[k][i] * x.n[i];
        if (!joins) {
            append(&m, x, i);
            continue;
        }

        /* Lengthen the last axis by the neighbour, and step by the neighbour's strides. */
        set_length(&m, last, m.n[last] * x.n[i]);
        for (int k = 0; k < 4; k++) m.s[k][last] = x.s[k][i];
    }
    return m;
}

/* Adds to at[] the offset of the index-th point of the axes in each array. */
__device__ inline void locate(const Axes &x, int64_t index, int64_t *at) {
    for (int axis = x.rank - 1; axis >= 0; axis--) {
        int64_t q = axis ? over(index, x.n[axis], x.inverse[axis]) : 0, i = index - q * x.n[axis];
        MIXPI_UNROLL
        for (int k = 0; k < 4; k++) at[k] += i * x.s[k][axis];
        index = q;
    }
}

/* --- copy --------------------------------------------------------------------------------- */

const int tile = 32;

struct Copy {
    Axes       axes;            /* array 0: dst, 1: src; the last axis is densest in dst     */
    mixp_out   dst;
    mixp_in    src;
    int64_t    units;           /* total number of units; a thread moves one at a time       */
    int        width;           /* elements of a unit; of real arrays                        */
};

/* Swaps two axes. */
inline void swap_axes(Axes *x, int i, int j) {
    Axes was = *x;
    set_length(x, i, was.n[j]);
    set_length(x, j, was.n[i]);
    for (int k = 0; k < 4; k++) {
        x->s[k][i] = was.s[k][j];
        x->s[k][j] = was.s[k][i];
    }
}

inline int64_t magnitude(int64_t a) { return a < 0 ? -a : a; }

/* Sorted by dst's strides, then merged. */
inline Axes copy_axes(const mixp_copy_args *k) {
    Axes x = dense_axes(k->rank, k->shape);
    for (int i = 0; i < k->rank; i++) {
        x.s[0][i] = x.s[2][i] = x.s[3][i] = k->dst_strides[i];
        x.s[1][i] = k->src_strides[i];
    }
    for (int i = 1; i < k->rank; i++)
        for (int j = i; j > 0 && magnitude(x.s[0][j - 1]) < magnitude(x.s[0][j]); j--)
            swap_axes(&x, j, j - 1);
    return merge_axes(x);
}

/* Copies elements of 16, 8, 4, 2 or 1 bytes as bits. */
template <class T> __global__ void copy_bits(const __grid_constant__ Copy c) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i < c.units; i += (int64_t)gridDim.x * blockDim.x) {
        int64_t at[4] = { 0, 0, 0, 0 };
        locate(c.axes, i, at);
        ((T *)c.dst.data)[at[0]] = ((const T *)c.src.data)[at[1]];
    }
}

__device__ inline void store_real(const mixp_out &a, int64_t i, float x) {
    put1(a, i, a.accumulate ? __fadd_rn(get1(as_in(a), i), x) : x);
}

/* out[i, i+n) (+)= v. */
__device__ inline void store8(const mixp_out &out, int64_t i, int n, bool wide, float *v) {
    float old[8];
    if (out.accumulate) {
        get8_any(as_in(out), i, n, wide, old);
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) v[k] = __fadd_rn(old[k], v[k]);
    }
    put8_any(out, i, n, wide, v);
}
__global__ void copy_real(const __grid_constant__ Copy c) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i < c.units; i += (int64_t)gridDim.x * blockDim.x) {
        int64_t at[4] = { 0, 0, 0, 0 };
        float v[8];
        locate(c.axes, i, at);
        if (c.width == 8) {
            get8(c.src, at[1] * 8, v);
            store8(c.dst, at[0] * 8, 8, true, v);
        } else store_real(c.dst, at[0], get1(c.src, at[1]));
    }
}

/* Copies the last two axes in tiles: src is read along the second to last axis, dst is written
 * along the last. outer: the axes, with the last two counted in tiles. */
template <class T> __device__ inline T tile_load(const Copy &c, int64_t i) {
    return ((const T *)c.src.data)[i];
}
template <> __device__ inline float tile_load<float>(const Copy &c, int64_t i) {
    return get1(c.src, i);
}
template <class T> __device__ inline void tile_store(const Copy &c, int64_t i, T v) {
    ((T *)c.dst.data)[i] = v;
}
template <> __device__ inline void tile_store<float>(const Copy &c, int64_t i, float v) {
    store_real(c.dst, i, v);
}

template <class T>
__global__ void __launch_bounds__(map_threads)
    copy_tiles(const __grid_constant__ Copy c, const __grid_constant__ Axes outer, int64_t tiles) {
    MIXPI_SHARED(T, part, tile * (tile + 1));
    const int a = c.axes.rank - 2, b = a + 1, r = outer.rank - 2;
    const int64_t rows = c.axes.n[a], cols = c.axes.n[b];
    const int u = (int)threadIdx.x % tile, v = (int)threadIdx.x / tile, step = map_threads / tile;
    for (int64_t t = blockIdx.x; t < tiles; t += gridDim.x) {
        /* Find the tile: its row and column, and where it begins in both arrays. */
        const int64_t above = over(t, outer.n[r + 1], outer.inverse[r + 1]);
        const int64_t rest = over(above, outer.n[r], outer.inverse[r]);
        const int64_t col = (t - above * outer.n[r + 1]) * tile;
        const int64_t row = (above - rest * outer.n[r]) * tile;
        int64_t at[4] = { 0, 0, 0, 0 };
        locate(outer, t, at);

        /* Read it along axis a. */
        for (int j = v; j < tile; j += step)
            if (row + u < rows && col + j < cols)
                part[j * (tile + 1) + u] =
                    tile_load<T>(c, at[1] + u * c.axes.s[1][a] + j * c.axes.s[1][b]);
        __syncthreads();

        /* Write it along axis b. */
        for (int j = v; j < tile; j += step)
            if (row + j < rows && col + u < cols)
                tile_store<T>(
                    c, at[0] + j * c.axes.s[0][a] + u * c.axes.s[0][b], part[u * (tile + 1) + j]);
        __syncthreads();
    }
}

/* Groups elements by `width` along the last axis, if strides, addresses and lengths allow it. */
inline bool group_elements(Copy *c, int width, uintptr_t bytes) {
    Axes &x = c->axes;
    const int last = x.rank - 1;
    if (last < 0 || x.s[0][last] != 1 || x.s[1][last] != 1 || x.n[last] % width) return false;
    if ((uintptr_t)c->dst.data % bytes || (uintptr_t)c->src.data % bytes) return false;
    for (int i = 0; i < last; i++)
        if (x.s[0][i] % width || x.s[1][i] % width) return false;

    /* Count strides and the last axis in groups. */
    for (int i = 0; i < last; i++) {
        x.s[0][i] /= width;
        x.s[1][i] /= width;
    }
    set_length(&x, last, x.n[last] / width);
    return true;
}

inline cudaError_t launch_bits(Copy *c, cudaStream_t stream) {
    /* Move the widest units that the copy allows. */
    const int size = dtype_bytes(c->dst.dtype);
    int unit = 16;
    while (unit > size && !group_elements(c, unit / size, (uintptr_t)unit)) unit /= 2;
    c->units = count_of(c->axes);

    const unsigned grid = grid_for(c->units, map_threads);
    return unit == 16  ? MIXPI_LAUNCH(copy_bits<uint4>, grid, map_threads, 0, stream, *c)
           : unit == 8 ? MIXPI_LAUNCH(copy_bits<uint2>, grid, map_threads, 0, stream, *c)
           : unit == 4 ? MIXPI_LAUNCH(copy_bits<uint32_t>, grid, map_threads, 0, stream, *c)
           : unit == 2 ? MIXPI_LAUNCH(copy_bits<uint16_t>, grid, map_threads, 0, stream, *c)
                       : MIXPI_LAUNCH(copy_bits<uint8_t>, grid, map_threads, 0, stream, *c);
}

inline cudaError_t launch_real(Copy *c, cudaStream_t stream) {
    c->width = group_elements(c, 8, 16) ? 8 : 1;
    c->units = count_of(c->axes);
    return MIXPI_LAUNCH(copy_real, grid_for(c->units, map_threads), map_threads, 0, stream, *c);
}

/* Does the copy transpose, that is: is dst dense along the last axis and src along another axis? If
 * so, moves src's dense axis to second to last. */
inline bool find_transpose(Copy *c) {
    Axes &x = c->axes;
    const int last = x.rank - 1;
    if (last < 1 || x.s[0][last] != 1 || x.s[1][last] == 1) return false;
    int best = -1;
    for (int i = 0; i < last; i++)
        if (x.s[1][i] == 1) best = i;
    if (best < 0 || x.n[best] < 8 || x.n[last] < 8) return false;
    if (best != last - 1) swap_axes(&x, best, last - 1);
    return true;
}

inline cudaError_t launch_tiles(const Copy &c, int bits, cudaStream_t stream) {
    /* Count the last two axes in tiles. */
    Axes outer = c.axes;
    const int last = c.axes.rank - 1;
    for (int i = last - 1; i <= last; i++) {
        set_length(&outer, i, ceil_div(c.axes.n[i], tile));
        for (int k = 0; k < 4; k++) outer.s[k][i] *= tile;
    }

    const int64_t tiles = count_of(outer);
    const int size = dtype_bytes(c.dst.dtype);
    const unsigned grid = grid_for(tiles, 1), n = map_threads;
    return !bits       ? MIXPI_LAUNCH(copy_tiles<float>, grid, n, 0, stream, c, outer, tiles)
           : size == 8 ? MIXPI_LAUNCH(copy_tiles<uint64_t>, grid, n, 0, stream, c, outer, tiles)
           : size == 4 ? MIXPI_LAUNCH(copy_tiles<uint32_t>, grid, n, 0, stream, c, outer, tiles)
           : size == 2 ? MIXPI_LAUNCH(copy_tiles<uint16_t>, grid, n, 0, stream, c, outer, tiles)
                       : MIXPI_LAUNCH(copy_tiles<uint8_t>, grid, n, 0, stream, c, outer, tiles);
}

}   /* namespace */

static mixp_result mixpi_cuda_copy(const mixp_exec *x, const mixp_copy_args *k) {
    Kernel kernel(x);
    if (!kernel.state) return MIXP_ERR_ORDER;
    const bool bits = k->dst.dtype == k->src.dtype && !k->dst.accumulate;
    if (!size_of_dtype(k->dst.dtype) || !size_of_dtype(k->src.dtype)) return MIXP_ERR_DTYPE;
    if (!bits && !(is_real(k->dst.dtype) && is_real(k->src.dtype))) return MIXP_ERR_DTYPE;
    if (k->rank < 0 || k->rank > MIXP_MAX_RANK) return MIXP_ERR_SHAPE;

    /* An array without elements needs no addresses. */
    bool empty = false;
    for (int i = 0; i < k->rank; i++) {
        if (k->shape[i] < 0) return MIXP_ERR_SHAPE;
        empty = empty || k->shape[i] == 0;
    }
    if (empty) return MIXP_OK;
    if (!k->dst.data || !k->src.data) return MIXP_ERR_ARGUMENT;

    /* Copy a transpose in tiles, and other arrays in the order of dst. */
    Copy c;
    memset((void *)&c, 0, sizeof c);
    c.axes = copy_axes(k);
    c.dst = k->dst;
    c.src.data = k->src.data;
    c.src.dtype = k->src.dtype;
    if (find_transpose(&c)) return kernel.report("copy", launch_tiles(c, bits, kernel.stream));
    return kernel.report(
        "copy", bits ? launch_bits(&c, kernel.stream) : launch_real(&c, kernel.stream));
}
