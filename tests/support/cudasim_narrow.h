/* cudasim_narrow.h - cuBLASLt's products of fp8, MXFP8 and NVFP4 codes: tests only, a part of
 * cudasim.h, which reads this file inside its namespace.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * What is accepted follows cuBLAS's documentation of release 13: "Narrow Precision Data Types
 * Usage", the tables of cublasLtMatmul, and "Tensor Core Usage". Three refusals have other sources:
 * with VEC128_32F on B, n must be a multiple of 8 (observed by TransformerEngine); codes of e2m1 have
 * no f16 results; no product is a batch. Column-major throughout: A has m "outers", B has n.
 */
#ifndef CUDASIM_NARROW_H
#define CUDASIM_NARROW_H

inline bool is_narrow(const Product &p) { return code_bits(p.A.type) || code_bits(p.B.type); }

inline int scaling_of(const Desc &d, bool b)
{ return attribute<int32_t>(d, b ? b_scale_mode : a_scale_mode, one_scale); }
inline const void *scales_of(const Desc &d, bool b) {
    return attribute<const void *>(d, b ? CUBLASLT_MATMUL_DESC_B_SCALE_POINTER
                                        : CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, nullptr);
}
inline bool has_scales(const Desc &d) {
    return scales_of(d, false) || scales_of(d, true) || scaling_of(d, false) || scaling_of(d, true);
}

/* What an algorithm is chosen for besides sizes; 0: an ordinary product. */
inline uint64_t narrow_kind(const Product &p) {
    if (!is_narrow(p)) return 0;
    return (uint64_t)p.A.type << 24 | (uint64_t)p.B.type << 16 | (uint64_t)p.D.type << 32 |
           (uint64_t)scaling_of(p.d, false) << 8 | (uint64_t)scaling_of(p.d, true);
}

/* ---- what is supported ------------------------------------------------------------------ */

inline bool narrow_types(const Product &p) {
    bool four = is_e2m1(p.A.type);
    if (code_bits(p.A.type) != code_bits(p.B.type) || p.C.type != p.D.type) return false;
    if (p.A.type == CUDA_R_8F_E5M2 && p.B.type == CUDA_R_8F_E5M2) return false;
    return p.D.type == CUDA_R_32F || p.D.type == CUDA_R_16BF || (p.D.type == CUDA_R_16F && !four);
}

/* The type of the bias beside D: an f32 result takes bf16. */
inline cudaDataType_t narrow_bias(const Product &p)
{ return p.D.type == CUDA_R_32F ? CUDA_R_16BF : p.D.type; }

/* Do this GPU and this library have the two modes, for these codes? */
inline bool has_scalings(const Product &p) {
    int a = scaling_of(p.d, false), b = scaling_of(p.d, true);
    int capability = 10 * capability_major + capability_minor;
    if (is_e2m1(p.A.type)) return a == by_16 && b == by_16 && capability >= 100;
    if (a == one_scale && b == one_scale) return capability >= 89;
    if (a == by_32 && b == by_32) return capability >= 100;
    return (a == by_128 || a == by_128x128) && (b == by_128 || b == by_128x128) &&
           !(a == by_128x128 && b == by_128x128) && capability == 90 && library_version >= 120900;
}

/* A transposed, B not: always for e2m1; for fp8 on all but 10.x and 11.0. */
inline bool has_layout(const Product &p) {
    bool any = !is_e2m1(p.A.type) && (capability_major == 10 || capability_major == 11);
    return any || (p.ta && !p.tb);
}

/* Columns that begin and end at multiples of 16 bytes. */
inline bool is_even(const Layout &l) {
    uint64_t bits = code_bits(l.type) ? (uint64_t)code_bits(l.type) : 8 * type_bytes(l.type);
    return l.rows * bits % 128 == 0 && (uint64_t)l.ld * bits % 128 == 0;
}
inline bool has_sizes(const Product &p) {
    int a = scaling_of(p.d, false), b = scaling_of(p.d, true);
    if (p.k * (uint64_t)code_bits(p.A.type) % 128) return false;
    if ((a >= by_128 || b >= by_128) && (p.m % 4 || p.n % (b == by_128 ? 8 : 4))) return false;
    return is_even(p.A) && is_even(p.B) && is_even(p.C) && is_even(p.D) && batch_of(p.D) == 1;
}

inline cublasStatus_t check_narrow(const Product &p) {
    if (!has_scalings(p) || !has_layout(p) || !has_sizes(p) ||
        (p.epilogue != CUBLASLT_EPILOGUE_DEFAULT && p.epilogue != CUBLASLT_EPILOGUE_BIAS))
        return CUBLAS_STATUS_NOT_SUPPORTED;
    for (int b = 0; b < 2; b++) {
        bool blocks = scaling_of(p.d, b) != one_scale;
        if (blocks && !scales_of(p.d, b)) return CUBLAS_STATUS_INVALID_VALUE;
        if ((uintptr_t)scales_of(p.d, b) % (blocks ? 16 : 4)) return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    return CUBLAS_STATUS_SUCCESS;
}

/* ---- where codes and scales lie --------------------------------------------------------- */

struct Operand {        /* A or B */
    const void *codes, *scales;
    cudaDataType_t type;
    int      scaling;
    bool     along_k;                       /* neighbours in memory are neighbours along k   */
    uint64_t outers, k, ld;
};

inline Operand operand(const Product &p, bool b) {
    const Layout &l = b ? p.B : p.A;
    return { b ? p.b : p.a, scales_of(p.d, b), l.type, scaling_of(p.d, b), b ? !p.tb : p.ta,
             b ? p.n : p.m, p.k, (uint64_t)l.ld };
}

inline uint64_t ceil_div(uint64_t x, uint64_t by) { return (x + by - 1) / by; }

inline uint64_t block_width(const Operand &o) {
    return o.scaling == by_16 ? 16 : o.scaling == by_32 ? 32 : o.scaling == one_scale ? o.k : 128;
}
inline uint64_t blocks_of(const Operand &o) { return ceil_div(o.k, block_width(o)); }
inline bool is_tiled(const Operand &o) { return o.scaling == by_16 || o.scaling == by_32; }

/* Bytes of all scales, padding included. */
inline uint64_t scale_bytes(const Operand &o) {
    if (is_tiled(o)) return ceil_div(o.outers, 128) * ceil_div(blocks_of(o), 4) * 512;
    return o.scaling == by_128       ? o.outers * blocks_of(o) * 4
         : o.scaling == by_128x128 ? ceil_div(o.outers, 128) * ceil_div(blocks_of(o), 4) * 16 : 4;
}

/* The index of the scale of an outer's block. */
inline uint64_t scale_index(const Operand &o, uint64_t outer, uint64_t block) {
    if (o.scaling == by_128) return block * o.outers + outer;
    if (o.scaling == by_128x128) return outer / 128 * (ceil_div(blocks_of(o), 4) * 4) + block;
    if (o.scaling == one_scale) return 0;
    uint64_t tile = outer / 128 * ceil_div(blocks_of(o), 4) + block / 4;
    return tile * 512 + outer % 32 * 16 + outer / 32 % 4 * 4 + block % 4;
}

/* Bytes from the first to the last element. */
inline uint64_t extent(const Layout &l, uint64_t bits)
{ return ((l.cols - 1) * (uint64_t)l.ld + l.rows) * bits / 8; }

/* Is everything that the product reads and writes in the GPU's memory? */
inline cublasStatus_t check_narrow_memory(const Product &p) {
    uint64_t bits = 8 * type_bytes(p.D.type);
    for (int b = 0; b < 2; b++) {
        const Operand o = operand(p, b);
        if (o.scales && !on_device(o.scales, scale_bytes(o))) return CUBLAS_STATUS_INVALID_VALUE;
        if (!on_device(o.codes, extent(b ? p.B : p.A, (uint64_t)code_bits(o.type))))
            return CUBLAS_STATUS_INVALID_VALUE;
    }
    return on_device(p.c, extent(p.C, bits)) && on_device(p.out, extent(p.D, bits))
         ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
}

/* ---- values of codes and scales --------------------------------------------------------- */

inline double code_value(cudaDataType_t t, unsigned code) {
    int digits = t == CUDA_R_8F_E4M3 ? 3 : t == CUDA_R_8F_E5M2 ? 2 : 1;
    int bias = t == CUDA_R_8F_E4M3 ? 7 : t == CUDA_R_8F_E5M2 ? 15 : 1;
    unsigned sign = 1u << (code_bits(t) - 1), magnitude = code & (sign - 1);
    int exponent = (int)(magnitude >> digits), fraction = (int)magnitude & ((1 << digits) - 1);
    double x = std::ldexp(fraction + (exponent ? 1 << digits : 0),
                          (exponent ? exponent : 1) - bias - digits);
    if (t == CUDA_R_8F_E4M3 && magnitude == 0x7F) x = NAN;
    if (t == CUDA_R_8F_E5M2 && magnitude >= 0x7C) x = magnitude == 0x7C ? HUGE_VAL : NAN;
    return code & sign ? -x : x;
}

inline unsigned code_at(const Operand &o, uint64_t outer, uint64_t l) {
    uint64_t at = o.along_k ? l + outer * o.ld : outer + l * o.ld;
    const uint8_t *codes = (const uint8_t *)o.codes;
    return is_e2m1(o.type) ? codes[at / 2] >> 4 * (at % 2) & 15u : codes[at];
}

/* outers x k. */
inline std::vector<double> code_values(const Operand &o) {
    std::vector<double> values;
    for (uint64_t outer = 0; outer < o.outers; outer++)
        for (uint64_t l = 0; l < o.k; l++)
            values.push_back(code_value(o.type, code_at(o, outer, l)));
    return values;
}

/* UE8M0 is an exponent; UE4M3 is e4m3 without its sign. */
inline double scale_value(const Operand &o, uint64_t i) {
    if (!o.scales) return 1.0;
    if (!is_tiled(o)) return get(o.scales, CUDA_R_32F, (int64_t)i);
    unsigned code = ((const uint8_t *)o.scales)[i];
    if (o.scaling == by_16) return code_value(CUDA_R_8F_E4M3, code & 0x7Fu);
    return code == 255 ? (double)NAN : std::ldexp(1.0, (int)code - 127);
}

/* Scales in the padding must be 0. */
inline void check_padding(const Operand &o) {
    for (uint64_t outer = 0; outer < ceil_div(o.outers, 128) * 128; outer++)
        for (uint64_t block = 0; block < ceil_div(blocks_of(o), 4) * 4; block++) {
            uint64_t i = scale_index(o, outer, block);
            if ((outer >= o.outers || block >= blocks_of(o)) && ((const uint8_t *)o.scales)[i])
                fatal("cublasLtMatmul: byte %llu of the scales is padding and not 0",
                      (unsigned long long)i);
        }
}

/* outers x blocks. */
inline std::vector<double> scale_values(const Operand &o) {
    std::vector<double> values;
    if (is_tiled(o)) check_padding(o);
    for (uint64_t outer = 0; outer < o.outers; outer++)
        for (uint64_t block = 0; block < blocks_of(o); block++)
            values.push_back(scale_value(o, scale_index(o, outer, block)));
    return values;
}

#endif  /* CUDASIM_NARROW_H */
