#pragma once
#include "seams.cu"
namespace {

/* --- numbers in registers -------------------------------------------------------------- *
 *
 * One kernel serves every mix of f32, f16 and bf16. It tests the dtype where it loads or stores 8
 * elements, with the same branch for all threads. The processor's f16 conversions give the header's
 * results, except that they lose the payload of a NaN.
 */
const int warp_size = 32;

__host__ __device__ inline bool is_real(mixp_dtype d) {
    return d == MIXP_F32 || d == MIXP_F16 || d == MIXP_BF16;
}

/* sizeof one element, on host and device. */
__host__ __device__ inline int dtype_bytes(mixp_dtype d) {
    switch (d) {
    case MIXP_F64:
    case MIXP_I64: return 8;
    case MIXP_F32:
    case MIXP_I32: return 4;
    case MIXP_F16:
    case MIXP_BF16: return 2;
    default: return 1;
    }
}

/* 0 for an unknown dtype. With MIXPREC_STATIC the header's function is static in another file. */
inline size_t size_of_dtype(mixp_dtype d) {
    return (unsigned)d < MIXP_DTYPE_COUNT ? (size_t)dtype_bytes(d) : 0;
}

__host__ __device__ inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
/* The least multiple of b that is not below a. */
__host__ __device__ inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }
__host__ __device__ inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

__host__ __device__ inline char *bytes_of(void *p) { return (char *)p; }
__host__ __device__ inline const char *bytes_of(const void *p) { return (const char *)p; }

/* The address of element i of an array, a mixp_in or a mixp_out. */
template <class A> __host__ __device__ inline auto byte_at(const A &a, int64_t i) {
    return bytes_of(a.data) + i * dtype_bytes(a.dtype);
}

__device__ inline uint32_t f16_code(float x) {
    __half h = __float2half_rn(x);
    uint32_t u = mixp_bits_of_f32(x);
    uint16_t bits;
    memcpy(&bits, &h, 2);
    return (u & 0x7FFFFFFFu) > 0x7F800000u ? mixpi_f16_of_f32(u) : bits;
}
__device__ inline float f16_value(uint32_t code) {
    uint16_t bits = (uint16_t)code;
    __half h;
    memcpy((void *)&h, &bits, 2);
    return (code & 0x7FFFu) > 0x7C00u ? mixp_f32_of_bits(mixpi_f32_of_f16(code)) : __half2float(h);
}
__device__ inline uint32_t bf16_code(float x) { return mixpi_bf16_of_f32(mixp_bits_of_f32(x)); }
__device__ inline float bf16_value(uint32_t code) { return mixp_f32_of_bits(code << 16); }

__device__ inline uint32_t low_code(mixp_dtype d, float x) {
    return d == MIXP_F16 ? f16_code(x) : bf16_code(x);
}
__device__ inline float low_value(mixp_dtype d, uint32_t code) {
    return d == MIXP_F16 ? f16_value(code) : bf16_value(code);
}

/* Element i of a real array. */
__device__ inline float get1(mixp_in a, int64_t i) {
    if (a.dtype == MIXP_F32) return ((const float *)a.data)[i];
    return low_value(a.dtype, ((const uint16_t *)a.data)[i]);
}
__device__ inline void put1(mixp_out a, int64_t i, float x) {
    if (a.dtype == MIXP_F32) ((float *)a.data)[i] = x;
    else ((uint16_t *)a.data)[i] = (uint16_t)low_code(a.dtype, x);
}

/* Elements [i, i+8) of a real array; their address is aligned to 16 bytes. */
__device__ inline void get8(mixp_in a, int64_t i, float *v) {
    /* Two loads of 16 bytes for f32. */
    if (a.dtype == MIXP_F32) {
        const float4 *p = (const float4 *)(const void *)((const float *)a.data + i);
        float4 lo = p[0], hi = p[1];
        v[0] = lo.x;
        v[1] = lo.y;
        v[2] = lo.z;
        v[3] = lo.w;
        v[4] = hi.x;
        v[5] = hi.y;
        v[6] = hi.z;
        v[7] = hi.w;
        return;
    }

    /* One load of 16 bytes for f16 and bf16. */
    uint4 u = *(const uint4 *)(const void *)((const uint16_t *)a.data + i);
    v[0] = low_value(a.dtype, u.x & 0xFFFFu);
    v[1] = low_value(a.dtype, u.x >> 16);
    v[2] = low_value(a.dtype, u.y & 0xFFFFu);
    v[3] = low_value(a.dtype, u.y >> 16);
    v[4] = low_value(a.dtype, u.z & 0xFFFFu);
    v[5] = low_value(a.dtype, u.z >> 16);
    v[6] = low_value(a.dtype, u.w & 0xFFFFu);
    v[7] = low_value(a.dtype, u.w >> 16);
}
__device__ inline uint32_t low_pair(mixp_dtype d, float lo, float hi) {
    return low_code(d, lo) | low_code(d, hi) << 16;
}
__device__ inline void put8(mixp_out a, int64_t i, const float *v) {
    if (a.dtype == MIXP_F32) {
        float4 *p = (float4 *)(void *)((float *)a.data + i);
        p[0] = make_float4(v[0], v[1], v[2], v[3]);
        p[1] = make_float4(v[4], v[5], v[6], v[7]);
    } else {
        uint4 u = make_uint4(low_pair(a.dtype, v[0], v[1]), low_pair(a.dtype, v[2], v[3]),
            low_pair(a.dtype, v[4], v[5]), low_pair(a.dtype, v[6], v[7]));
        *(uint4 *)(void *)((uint16_t *)a.data + i) = u;
    }
}

/* get8 for n elements (the others read as 0), aligned or not. */
__device__ inline void get8_any(mixp_in a, int64_t i, int n, bool wide, float *v) {
    if (wide && n == 8) {
        get8(a, i, v);
        return;
    }
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) v[k] = k < n ? get1(a, i + k) : 0.0f;
}
__device__ inline void put8_any(mixp_out a, int64_t i, int n, bool wide, const float *v) {
    if (wide && n == 8) {
        put8(a, i, v);
        return;
    }
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++)
        if (k < n) put1(a, i + k, v[k]);
}

/* --- numbers of arithmetic ------------------------------------------------------------- *
 *
 * Loads and stores of numbers used in arithmetic, where the compiler knows the dtype and a NaN may
 * change its payload: the processor's own conversions, two elements at a time. get8 and put8 test
 * the dtype at each turn, which also keeps the compiler from loading ahead: 21 instructions instead
 * of 8 for 8 bf16, 66 for 8 f16.
 */
template <mixp_dtype D> __device__ inline void plain_two(uint32_t codes, float *v) {
    if constexpr (D == MIXP_BF16) {
        v[0] = mixp_f32_of_bits(codes << 16);
        v[1] = mixp_f32_of_bits(codes & 0xFFFF0000u);
    } else {
        __half2 pair;
        memcpy((void *)&pair, &codes, 4);
        v[0] = __low2float(pair);
        v[1] = __high2float(pair);
    }
}
template <mixp_dtype D> __device__ inline uint32_t plain_code(float lo, float hi) {
    uint32_t codes;
    if constexpr (D == MIXP_BF16) {
        __nv_bfloat162 pair = __floats2bfloat162_rn(lo, hi);
        memcpy(&codes, (void *)&pair, 4);
    } else {
        __half2 pair = __floats2half2_rn(lo, hi);
        memcpy(&codes, (void *)&pair, 4);
    }
    return codes;
}

/* Eight elements as stored. Elements loaded ahead are converted only when needed, because a
 * conversion waits for the load. */
template <mixp_dtype D> struct Raw8 { uint4 u[D == MIXP_F32 ? 2 : 1]; };

template <mixp_dtype D> __device__ inline Raw8<D> raw_get8(const void *data, int64_t i) {
    const uint4 *p = (const uint4 *)(const void *)((const char *)data + i * dtype_bytes(D));
    Raw8<D> raw;
    raw.u[0] = p[0];
    if constexpr (D == MIXP_F32) raw.u[1] = p[1];
    return raw;
}
template <mixp_dtype D> __device__ inline void plain_values(const Raw8<D> &raw, float *v) {
    MIXPI_UNROLL
    for (int k = 0; k < (int)(sizeof raw.u / sizeof *raw.u); k++) {
        const uint4 &u = raw.u[k];
        if constexpr (D == MIXP_F32) {
            v[4 * k] = mixp_f32_of_bits(u.x);
            v[4 * k + 1] = mixp_f32_of_bits(u.y);
            v[4 * k + 2] = mixp_f32_of_bits(u.z);
            v[4 * k + 3] = mixp_f32_of_bits(u.w);
        } else {
            plain_two<D>(u.x, v);
            plain_two<D>(u.y, v + 2);
            plain_two<D>(u.z, v + 4);
            plain_two<D>(u.w, v + 6);
        }
    }
}
template <mixp_dtype D> __device__ inline void plain_get8(const void *data, int64_t i, float *v) {
    plain_values<D>(raw_get8<D>(data, i), v);
}
/* One 16-byte store: the compiler would merge a plain store with the scalar path's stores. */
template <mixp_dtype D> __device__ inline void plain_put8(void *data, int64_t i, const float *v) {
    if constexpr (D == MIXP_F32) {
        float4 *p = (float4 *)(void *)((float *)data + i);
        __stwb(p, make_float4(v[0], v[1], v[2], v[3]));
        __stwb(p + 1, make_float4(v[4], v[5], v[6], v[7]));
    } else {
        __stwb((uint4 *)(void *)((uint16_t *)data + i),
            make_uint4(plain_code<D>(v[0], v[1]), plain_code<D>(v[2], v[3]),
                plain_code<D>(v[4], v[5]), plain_code<D>(v[6], v[7])));
    }
}

/* Rounds eight elements as a store would. */
template <mixp_dtype D> __device__ inline void plain_round(float *v) {
    MIXPI_UNROLL
    for (int k = 0; k < 8; k += 2)
        if constexpr (D != MIXP_F32) plain_two<D>(plain_code<D>(v[k], v[k + 1]), v + k);
}

/* Loads n elements, wide or not; the others read as 0. */
template <mixp_dtype D>
__device__ inline void plain_get(const void *data, int64_t i, int n, bool wide, float *v) {
    if (wide && n == 8) plain_get8<D>(data, i, v);
    else get8_any(mixpi_in(data, D), i, n, false, v);
}
template <mixp_dtype D>
__device__ inline void plain_put(void *data, int64_t i, int n, bool wide, const float *v) {
    if (wide && n == 8) plain_put8<D>(data, i, v);
    else put8_any(mixpi_out_to(data, D, 0), i, n, false, v);
}

/* --- fp8 codes -------------------------------------------------------------------------- *
 *
 * GPUs of capability 8.9 and up convert two numbers by one instruction: 3 instructions for a number
 * instead of 30. mixpi_round_f32's codes differ for a NaN, whose sign and payload it keeps, and,
 * without saturation, for numbers beyond the format. The simulated GPU has the instruction as well.
 */
#ifndef MIXPI_FP8_NATIVE
template <mixp_dtype D> __device__ inline uint32_t fp8_one(float x) {
    const uint32_t u = mixp_bits_of_f32(x);
    return (u & 0x7FFFFFFFu) > 0x7F800000u ? 0x7Fu : mixpi_round_f32(D, u, 1, 0, 0);
}
template <mixp_dtype D> __device__ inline uint32_t fp8_pair(float lo, float hi) {
    return fp8_one<D>(lo) | fp8_one<D>(hi) << 8;
}
template <mixp_dtype D> __device__ inline void fp8_values(uint32_t codes, float *v) {
    for (int k = 0; k < 2; k++) {
        const uint32_t code = codes >> 8 * k & 0xFFu;
        v[k] = D == MIXP_F8_E4M3 ? mixp_f32_of_bits(mixpi_f32_of_e4m3(code)) : f16_value(code << 8);
    }
}
#endif
#if defined(MIXPI_FP8_NATIVE) || defined(MIXPREC_CUDASIM)
constexpr bool fp8_is_native = true;
#else
constexpr bool fp8_is_native = false;
#endif

/* Does x round to no finite code? e4m3: above 464, which is half way to the next number and rounds
 * to 448; e5m2: from 61440 on, which rounds to 65536. */
template <mixp_dtype D> __device__ inline bool is_beyond_fp8(float x) {
    const uint32_t a = mixp_bits_of_f32(x) & 0x7FFFFFFFu;
    return D == MIXP_F8_E4M3 ? a > 0x43E80000u : a >= 0x47700000u;
}
/* The code of a number beyond the format, or of a NaN. */
template <mixp_dtype D> __device__ inline uint32_t fp8_beyond(float x, bool saturate) {
    const uint32_t u = mixp_bits_of_f32(x), sign = u >> 24 & 0x80u;
    const bool nan = (u & 0x7FFFFFFFu) > 0x7F800000u;
    if (D == MIXP_F8_E4M3) return sign | (saturate && !nan ? 0x7Eu : 0x7Fu);
    if (nan) return sign | 0x7Eu | (u >> 21 & 1u);
    return sign | (saturate ? 0x7Bu : 0x7Cu);
}

/* mixpi_round_f32's codes of 4 N numbers, 4 in a word, the first in the lowest byte. */
template <mixp_dtype D, int N>
__device__ inline void fp8_codes(const float *v, bool saturate, uint32_t *words) {
    if constexpr (!fp8_is_native) {
        MIXPI_UNROLL
        for (int w = 0; w < N; w++) words[w] = 0;
        MIXPI_UNROLL
        for (int k = 0; k < 4 * N; k++)
            words[k / 4] |= mixpi_round_f32(D, mixp_bits_of_f32(v[k]), saturate, 0, 0)
                            << 8 * (k % 4);
        return;
    }

    /* Only a code from the largest finite one on may differ: adding to_80 carries it to 0x80. */
    const uint32_t to_80 = D == MIXP_F8_E4M3 ? 0x02020202u : 0x05050505u;
    uint32_t large = 0;
    MIXPI_UNROLL
    for (int w = 0; w < N; w++) {
        const float *x = v + 4 * w;
        words[w] = fp8_pair<D>(x[0], x[1]) | fp8_pair<D>(x[2], x[3]) << 16;
        large |= (words[w] & 0x7F7F7F7Fu) + to_80;
    }
    if ((large & 0x80808080u) == 0) return;

    /* Correct the codes of numbers beyond the format. */
    MIXPI_UNROLL
    for (int k = 0; k < 4 * N; k++)
        if (is_beyond_fp8<D>(v[k])) {
            const int at = 8 * (k % 4);
            words[k / 4] &= ~(0xFFu << at);
            words[k / 4] |= fp8_beyond<D>(v[k], saturate) << at;
        }
}

/* The e2m1 code of x / s, where x is s times a number of e2m1. The quotient is off by a few units
 * in the last place, and mixpi_e2m1_code drops low bits: half of the last bit that it reads is
 * added. */
__device__ inline uint32_t e2m1_code_of(float x, float s) {
    const float ratio = __fmul_rn(x, rcp_approx(s));
    return mixpi_e2m1_code(mixp_f32_of_bits(mixp_bits_of_f32(ratio) + 0x200000u));
}

/* Can a be read 8 elements at a time from a multiple of 8 on? Yes for an absent array. */
inline bool is_wide(const void *p) { return (uintptr_t)p % 16 == 0; }
inline bool is_wide(mixp_in a) { return is_wide(a.data); }
inline bool is_wide(mixp_out a) { return is_wide(a.data); }
__host__ __device__ inline bool is_aligned(const void *p) { return (uintptr_t)p % 16 == 0; }

/* An output as an input. */
__host__ __device__ inline mixp_in as_in(mixp_out y) {
    mixp_in a = { y.data, y.dtype };
    return a;
}

/* An array that a step updates in place. */
__device__ inline mixp_out array_at(void *data, mixp_dtype dtype) {
    mixp_out a = { data, dtype, 0 };
    return a;
}

/* Number of blocks for n threads, limited: a grid-stride loop does the rest. */
inline unsigned grid_for(int64_t n, int threads) {
    int64_t blocks = ceil_div(n, threads);
    return (unsigned)(blocks < 1 ? 1 : blocks > 4096 ? 4096 : blocks);
}

/* --- sums over a warp and a block, in a fixed tree ------------------------------------- */

template <class T> __device__ inline T warp_sum(T v) {
    MIXPI_UNROLL
    for (int k = 16; k; k /= 2) v += __shfl_xor_sync(0xFFFFFFFFu, v, k);
    return v;
}
/* The maximum over a warp. May miss a NaN. */
__device__ inline float warp_max(float v) {
    MIXPI_UNROLL
    for (int k = 16; k; k /= 2) v = fmaxf(v, __shfl_xor_sync(0xFFFFFFFFu, v, k));
    return v;
}
/* Over all threads of a one-dimensional block of whole warps; every thread gets the sum. */
template <class T> __device__ inline T block_sum(T v) {
    MIXPI_SHARED(T, part, 32);
    int lane = (int)threadIdx.x % warp_size, warp = (int)threadIdx.x / warp_size;
    v = warp_sum(v);
    if (lane == 0) part[warp] = v;
    __syncthreads();
    v = lane < (int)blockDim.x / warp_size ? part[lane] : (T)0;
    v = warp_sum(v);
    __syncthreads();
    return v;
}
__device__ inline float block_max(float v) {
    MIXPI_SHARED(float, part, 32);
    int lane = (int)threadIdx.x % warp_size, warp = (int)threadIdx.x / warp_size;
    v = warp_max(v);
    if (lane == 0) part[warp] = v;
    __syncthreads();
    v = part[lane < (int)blockDim.x / warp_size ? lane : 0];
    v = warp_max(v);
    __syncthreads();
    return v;
}

/* The sum of v over this thread and all earlier threads. *all: the sum over the block. */
template <class T> __device__ inline T block_scan(T v, T *all) {
    MIXPI_SHARED(T, part, 32);
    int lane = (int)threadIdx.x % warp_size, warp = (int)threadIdx.x / warp_size;

    /* Scan each warp; its last lane has the warp's sum. */
    for (int k = 1; k < warp_size; k *= 2) {
        T u = __shfl_up_sync(0xFFFFFFFFu, v, (unsigned)k);
        if (lane >= k) v += u;
    }
    if (lane == warp_size - 1) part[warp] = v;
    __syncthreads();

    /* Add the sums of earlier warps. */
    T before = 0, sum = 0;
    for (int i = 0; i < (int)blockDim.x / warp_size; i++) {
        if (i < warp) before += part[i];
        sum += part[i];
    }
    __syncthreads();
    *all = sum;
    return before + v;
}

/* The minimum over the block. */
template <class T> __device__ inline T block_min(T v) {
    MIXPI_SHARED(T, part, 32);
    int lane = (int)threadIdx.x % warp_size, warp = (int)threadIdx.x / warp_size;
    for (int k = 16; k; k /= 2) {
        T u = __shfl_xor_sync(0xFFFFFFFFu, v, k);
        v = u < v ? u : v;
    }
    if (lane == 0) part[warp] = v;
    __syncthreads();
    for (int i = 0; i < (int)blockDim.x / warp_size; i++) v = part[i] < v ? part[i] : v;
    __syncthreads();
    return v;
}

}   /* namespace */

