#pragma once
#include "captures.cu"
/* ==== 3. ELEMENTWISE ================================================= >>elementwise ====
 *
 * A thread works on 8 elements at a time (16 bytes of f16 or bf16) if addresses allow it. Sums
 * are cut into runs that depend only on shapes. One thread or one block adds a run in f32, in a
 * fixed order; then the runs are added in double. A result may differ from the CPU's by the order
 * of its sum, and by a few units in the last place of exp, log, tanh and pow.
 */
namespace {

const int map_threads = 256;

/* --- convert ---------------------------------------------------------------------------- */

struct Conversion {
    mixp_convert_args k;
    Draws             draws;
    bool              wide;
};

__device__ inline uint64_t load_code(const mixp_in &a, int64_t i) {
    switch (dtype_bytes(a.dtype)) {
    case 1: return ((const uint8_t *)a.data)[i];
    case 2: return ((const uint16_t *)a.data)[i];
    case 4: return ((const uint32_t *)a.data)[i];
    default: return ((const uint64_t *)a.data)[i];
    }
}
__device__ inline void store_code(const mixp_out &a, int64_t i, uint64_t code) {
    switch (dtype_bytes(a.dtype)) {
    case 1: ((uint8_t *)a.data)[i] = (uint8_t)code; break;
    case 2: ((uint16_t *)a.data)[i] = (uint16_t)code; break;
    case 4: ((uint32_t *)a.data)[i] = (uint32_t)code; break;
    default: ((uint64_t *)a.data)[i] = code;
    }
}

/* The random number of element i, or 0. */
__device__ inline uint32_t draw(const mixp_rounding &r, uint64_t key, int64_t i) {
    return r.stochastic ? mixp_random_at(key, (uint64_t)(r.first + i)) : 0u;
}

__device__ inline uint64_t rounding_key(const Conversion &c) {
    return c.k.rounding.stochastic ? key_now(c.draws) : 0;
}

/* Converts any dtype to any dtype. */
__global__ void convert_each(const __grid_constant__ Conversion c) {
    const mixp_rounding &r = c.k.rounding;
    mixp_format to = mixp_format_of(c.k.dst.dtype), from = mixp_format_of(c.k.src.dtype);
    uint64_t key = rounding_key(c);
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i < c.k.n; i += (int64_t)gridDim.x * blockDim.x) {
        mixpi_number x = mixpi_unpack(from, load_code(c.k.src, i));
        store_code(c.k.dst, i, mixpi_pack(to, x, r.saturate, r.stochastic, draw(r, key, i)));
    }
}

__host__ __device__ inline bool is_f8(mixp_dtype d) {
    return d == MIXP_F8_E4M3 || d == MIXP_F8_E5M2;
}
/* The dtypes that convert through f32. */
__host__ __device__ inline bool is_by_f32(mixp_dtype d) { return is_real(d) || is_f8(d); }

__device__ inline float f8_value(mixp_dtype d, uint32_t code) {
    return d == MIXP_F8_E4M3 ? mixp_f32_of_bits(mixpi_f32_of_e4m3(code)) : f16_value(code << 8);
}

__device__ inline void widen8(const mixp_in &a, int64_t i, int n, bool wide, float *v) {
    if (!is_f8(a.dtype)) {
        get8_any(a, i, n, wide, v);
        return;
    }

    /* Read 8 codes of one byte each. */
    const uint8_t *p = (const uint8_t *)a.data + i;
    uint2 u = make_uint2(0, 0);
    if (wide && n == 8) u = *(const uint2 *)(const void *)p;
    else {
        MIXPI_UNROLL
        for (int k = 0; k < 4; k++) {
            u.x |= k < n ? (uint32_t)p[k] << 8 * k : 0u;
            u.y |= k + 4 < n ? (uint32_t)p[k + 4] << 8 * k : 0u;
        }
    }

    MIXPI_UNROLL
    for (int k = 0; k < 8; k++)
        v[k] = f8_value(a.dtype, (k < 4 ? u.x : u.y) >> 8 * (k % 4) & 0xFFu);
}

__device__ inline uint32_t narrow1(
    mixp_dtype d, const mixp_rounding &r, uint64_t key, int64_t i, float x) {
    if (!is_f8(d) && !r.saturate && !r.stochastic) return low_code(d, x);
    return mixpi_round_f32(d, mixp_bits_of_f32(x), r.saturate, r.stochastic, draw(r, key, i));
}

/* The fp8 codes of 8 numbers, rounded to nearest. */
__device__ inline uint2 f8_codes(mixp_dtype d, const float *v, bool saturate) {
    uint32_t words[2];
    if (d == MIXP_F8_E4M3) fp8_codes<MIXP_F8_E4M3, 2>(v, saturate, words);
    else fp8_codes<MIXP_F8_E5M2, 2>(v, saturate, words);
    return make_uint2(words[0], words[1]);
}

__device__ inline void narrow8(
    const Conversion &c, uint64_t key, int64_t i, int n, const float *v) {
    const mixp_out &dst = c.k.dst;
    if (dst.dtype == MIXP_F32) {
        put8_any(dst, i, n, c.wide, v);
        return;
    }

    /* Round the elements to codes. */
    uint32_t u[8];
    if (is_f8(dst.dtype) && !c.k.rounding.stochastic) {
        const uint2 words = f8_codes(dst.dtype, v, c.k.rounding.saturate != 0);
        if (c.wide && n == 8) {
            *(uint2 *)(void *)((uint8_t *)dst.data + i) = words;
            return;
        }
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) u[k] = (k < 4 ? words.x : words.y) >> 8 * (k % 4) & 0xFFu;
    } else {
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) u[k] = narrow1(dst.dtype, c.k.rounding, key, i + k, v[k]);
    }

    /* Store 8 codes at once, of one byte or two; otherwise one by one. */
    if (c.wide && n == 8 && is_f8(dst.dtype)) {
        *(uint2 *)(void *)((uint8_t *)dst.data + i) = make_uint2(
            u[0] | u[1] << 8 | u[2] << 16 | u[3] << 24, u[4] | u[5] << 8 | u[6] << 16 | u[7] << 24);
    } else if (c.wide && n == 8) {
        *(uint4 *)(void *)((uint16_t *)dst.data + i) =
            make_uint4(u[0] | u[1] << 16, u[2] | u[3] << 16, u[4] | u[5] << 16, u[6] | u[7] << 16);
    } else {
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++)
            if (k < n) store_code(dst, i + k, u[k]);
    }
}

__global__ void __launch_bounds__(map_threads) convert_real(const __grid_constant__ Conversion c) {
    uint64_t key = rounding_key(c);
    int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * 8;
    for (; i < c.k.n; i += (int64_t)gridDim.x * blockDim.x * 8) {
        float v[8];
        int n = (int)least(8, c.k.n - i);
        widen8(c.k.src, i, n, c.wide, v);
        narrow8(c, key, i, n, v);
    }
}

inline mixp_result launch_convert(Kernel &kernel, const Conversion &c) {
    int64_t n = c.k.n;
    if (is_by_f32(c.k.dst.dtype) && is_by_f32(c.k.src.dtype))
        return kernel.report(
            "convert", MIXPI_LAUNCH(convert_real, grid_for(ceil_div(n, 8), map_threads),
                           map_threads, 0, kernel.stream, c));
    return kernel.report("convert",
        MIXPI_LAUNCH(convert_each, grid_for(n, map_threads), map_threads, 0, kernel.stream, c));
}

inline mixp_result copy_bytes(Kernel &kernel, void *dst, const void *src, size_t bytes) {
    return kernel.report(
        "convert", cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, kernel.stream));
}

}   /* namespace */

static mixp_result mixpi_cuda_convert(const mixp_exec *x, const mixp_convert_args *k) {
    Kernel kernel(x);
    const size_t out = size_of_dtype(k->dst.dtype), in = size_of_dtype(k->src.dtype);
    if (!kernel.state) return MIXP_ERR_ORDER;
    if (!out || !in) return MIXP_ERR_DTYPE;
    if (k->n < 0 || k->dst.accumulate || (k->n && (!k->dst.data || !k->src.data)))
        return MIXP_ERR_ARGUMENT;

    /* Copy the bytes of an array of the same dtype. */
    const bool in_place = k->dst.data == k->src.data, same = k->dst.dtype == k->src.dtype;
    const size_t bytes = (size_t)k->n * out;
    if (k->n == 0 || (same && in_place)) return MIXP_OK;
    if (same) return copy_bytes(kernel, k->dst.data, k->src.data, bytes);

    /* Convert. In place and to another width, a thread would overwrite values that other threads
     * still read: the result goes to scratch memory first. */
    Conversion c;
    memset((void *)&c, 0, sizeof c);
    c.k = *k;
    c.draws = draws_of(kernel.state, k->rounding.seed, k->rounding.step, k->rounding.tensor);
    if (in_place && out != in) c.k.dst.data = scratch_of(x, bytes);
    if (!c.k.dst.data) return MIXP_ERR_MEMORY;
    c.wide = is_wide(c.k.dst) && is_wide(c.k.src);
    mixp_result r = launch_convert(kernel, c);
    if (r != MIXP_OK || c.k.dst.data == k->dst.data) return r;
    return copy_bytes(kernel, k->dst.data, c.k.dst.data, bytes);
}

/* --- fill --------------------------------------------------------------------------------- */

namespace {

/* n elements; pattern: the element's code, repeated to fill 8 bytes. */
__global__ void fill_codes(mixp_out dst, int64_t n, uint64_t pattern, bool wide) {
    int per = 16 / dtype_bytes(dst.dtype);
    int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * per;
    for (; i < n; i += (int64_t)gridDim.x * blockDim.x * per) {
        if (wide && i + per <= n) {
            uint32_t lo = (uint32_t)pattern, hi = (uint32_t)(pattern >> 32);
            *(uint4 *)(void *)byte_at(dst, i) = make_uint4(lo, hi, lo, hi);
        } else
            for (int64_t j = i; j < i + per && j < n; j++) store_code(dst, j, pattern);
    }
}

}   /* namespace */

static mixp_result mixpi_cuda_fill(const mixp_exec *x, const mixp_fill_args *k) {
    Kernel kernel(x);
    const size_t size = size_of_dtype(k->dst.dtype), bytes = (size_t)k->n * size;
    if (!kernel.state) return MIXP_ERR_ORDER;
    if (!size) return MIXP_ERR_DTYPE;
    if (k->n < 0 || k->dst.accumulate || (k->n && !k->dst.data)) return MIXP_ERR_ARGUMENT;
    if (k->n == 0) return MIXP_OK;

    /* Repeat the element's code to fill 8 bytes. */
    uint64_t pattern = mixp_encode(k->dst.dtype, k->value, 0);
    for (size_t bits = 8 * size; bits < 64; bits *= 2)
        pattern = (pattern & (((uint64_t)1 << bits) - 1u)) | pattern << bits;

    if (pattern == 0)
        return kernel.report("fill", cudaMemsetAsync(k->dst.data, 0, bytes, kernel.stream));
    const unsigned grid = grid_for(ceil_div((int64_t)bytes, 16), map_threads);
    return kernel.report("fill", MIXPI_LAUNCH(fill_codes, grid, map_threads, 0, kernel.stream,
                                     k->dst, k->n, pattern, is_wide(k->dst)));
}
