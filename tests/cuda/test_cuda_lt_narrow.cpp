/* test_cuda_lt_narrow.cpp - cuBLASLt itself, called without mixprec: products of fp8, MXFP8 and
 * NVFP4 codes with random codes and scales against loops in double, and what the library refuses.
 * This file tests the simulated library; on a GPU, the real one, in the modes that the GPU has.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * The scales are packed here in the order of their addresses, as cuBLAS's documentation and
 * torchao (reference/scale_tiles.h) have it. The simulation computes the address of each scale.
 */
#include "companion.h"
#include "test.h"
#include "numbers.h"
#include "reference_formats.h"
#include "reference/scale_tiles.h"
#include <vector>

/* The header's numbers: CUDA 12.0 has no names for all of them. */
enum { SCALAR = 0, VEC16 = 1, VEC32 = 2, OUTER_VEC = 3, VEC128 = 4, BLK128 = 5 };
static const cublasLtMatmulDescAttributes_t A_MODE = (cublasLtMatmulDescAttributes_t)31,
                                            B_MODE = (cublasLtMatmulDescAttributes_t)32;
static cudaDataType_t e2m1(void) { int n = 33; return (cudaDataType_t)n; }
static bool is_e2m1(cudaDataType_t t) { return (int)t == 33; }

static const float ONE = 1.0f, ZERO = 0.0f;

/* The arguments of one product. D and C are m x n, column-major. */
struct Call {
    cudaDataType_t a, b, d, bias_type;
    int            a_mode, b_mode;
    int64_t        m, n, k, lda, ldb, ldc, ldd;
    bool           ta, tb, with_modes, fast, device_factors;
    int            epilogue;
    int32_t        batches;
    cublasComputeType_t compute;
    cudaDataType_t scale_type;
    uint32_t       alignment;
    const void    *A, *B, *C, *a_scales, *b_scales, *bias;
    void          *D;
    const float   *alpha, *beta;
};

static cudaDataType_t type_for_bias(cudaDataType_t d) { return d == CUDA_R_32F ? CUDA_R_16BF : d; }

static Call call_of(cudaDataType_t a, cudaDataType_t b, cudaDataType_t d, int a_mode, int b_mode) {
    Call c;
    memset((void *)&c, 0, sizeof c);
    c.a = a; c.b = b; c.d = d;
    c.bias_type = type_for_bias(d);
    c.a_mode = a_mode; c.b_mode = b_mode;
    c.m = 16; c.n = 24; c.k = 64;
    c.lda = c.ldb = c.k;
    c.ldc = c.ldd = c.m;
    c.ta = c.with_modes = true;
    c.epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    c.batches = 1;
    c.compute = CUBLAS_COMPUTE_32F;
    c.scale_type = CUDA_R_32F;
    c.alignment = 16;
    c.alpha = &ONE;
    c.beta = &ZERO;
    return c;
}

/* --- the library's calls ------------------------------------------------------------------- */

struct Objects {
    cublasLtHandle_t lt;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t A, B, C, D;
    cublasLtMatmulPreference_t prefers;
    cublasStatus_t told;                        /* of setting attributes: the last error     */
};

template <class T> static void tell(Objects *o, cublasLtMatmulDescAttributes_t key, T value) {
    cublasStatus_t s = cublasLtMatmulDescSetAttribute(o->desc, key, &value, sizeof value);
    if (s != CUBLAS_STATUS_SUCCESS) o->told = s;
}

static void layout(cublasLtMatrixLayout_t *l, cudaDataType_t t, int64_t rows, int64_t cols,
                   int64_t ld, int32_t batches) {
    int64_t stride = ld * cols;
    cublasLtMatrixLayoutCreate(l, t, (uint64_t)rows, (uint64_t)cols, ld);
    cublasLtMatrixLayoutSetAttribute(*l, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batches, 4);
    cublasLtMatrixLayoutSetAttribute(*l, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, 8);
}

static void preferences(Objects *o, const Call &c) {
    static const cublasLtMatmulPreferenceAttributes_t keys[] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES };
    uint64_t room = 4u << 20;
    cublasLtMatmulPreferenceCreate(&o->prefers);
    cublasLtMatmulPreferenceSetAttribute(o->prefers, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                         &room, sizeof room);
    for (cublasLtMatmulPreferenceAttributes_t key : keys)
        cublasLtMatmulPreferenceSetAttribute(o->prefers, key, &c.alignment, sizeof c.alignment);
}

static void objects_open(Objects *o, const Call &c) {
    o->told = CUBLAS_STATUS_SUCCESS;
    cublasLtCreate(&o->lt);
    cublasLtMatmulDescCreate(&o->desc, c.compute, c.scale_type);
    layout(&o->A, c.a, c.ta ? c.k : c.m, c.ta ? c.m : c.k, c.lda, c.batches);
    layout(&o->B, c.b, c.tb ? c.n : c.k, c.tb ? c.k : c.n, c.ldb, c.batches);
    layout(&o->C, c.d, c.m, c.n, c.ldc, c.batches);
    layout(&o->D, c.d, c.m, c.n, c.ldd, c.batches);
    tell<int32_t>(o, CUBLASLT_MATMUL_DESC_TRANSA, c.ta ? CUBLAS_OP_T : CUBLAS_OP_N);
    tell<int32_t>(o, CUBLASLT_MATMUL_DESC_TRANSB, c.tb ? CUBLAS_OP_T : CUBLAS_OP_N);
    tell(o, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, c.a_scales);
    tell(o, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, c.b_scales);
    if (c.with_modes) tell<int32_t>(o, A_MODE, c.a_mode);
    if (c.with_modes) tell<int32_t>(o, B_MODE, c.b_mode);
    if (c.fast) tell<int8_t>(o, CUBLASLT_MATMUL_DESC_FAST_ACCUM, 1);
    if (c.device_factors)
        tell<int32_t>(o, CUBLASLT_MATMUL_DESC_POINTER_MODE, CUBLASLT_POINTER_MODE_DEVICE);
    tell<int32_t>(o, CUBLASLT_MATMUL_DESC_EPILOGUE, c.epilogue);
    if (c.bias) {
        tell(o, CUBLASLT_MATMUL_DESC_BIAS_POINTER, c.bias);
        tell<int32_t>(o, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, c.bias_type);
    }
    if (c.epilogue & CUBLASLT_EPILOGUE_GELU_AUX & ~CUBLASLT_EPILOGUE_GELU) {
        tell(o, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, (void *)c.D);
        tell(o, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, c.ldd);
    }
    preferences(o, c);
}

static void objects_close(Objects *o) {
    cublasLtMatmulPreferenceDestroy(o->prefers);
    cublasLtMatrixLayoutDestroy(o->A);
    cublasLtMatrixLayoutDestroy(o->B);
    cublasLtMatrixLayoutDestroy(o->C);
    cublasLtMatrixLayoutDestroy(o->D);
    cublasLtMatmulDescDestroy(o->desc);
    cublasLtDestroy(o->lt);
}

static cublasStatus_t ask(const Call &c, cublasLtMatmulAlgo_t *algo) {
    cublasLtMatmulHeuristicResult_t found;
    Objects o;
    int n = 0;
    memset((void *)&found, 0, sizeof found);
    objects_open(&o, c);
    cublasStatus_t s = o.told != CUBLAS_STATUS_SUCCESS ? o.told
        : cublasLtMatmulAlgoGetHeuristic(o.lt, o.desc, o.A, o.B, o.C, o.D, o.prefers, 1, &found, &n);
    objects_close(&o);
    if (s == CUBLAS_STATUS_SUCCESS && !n) s = CUBLAS_STATUS_NOT_SUPPORTED;
    *algo = found.algo;
    return s;
}

static cublasStatus_t multiply(const Call &c, const cublasLtMatmulAlgo_t *algo) {
    static void *workspace;
    Objects o;
    if (!workspace) cudaMalloc(&workspace, 4u << 20);
    objects_open(&o, c);
    cublasStatus_t s = o.told != CUBLAS_STATUS_SUCCESS ? o.told
        : cublasLtMatmul(o.lt, o.desc, c.alpha, c.A, o.A, c.B, o.B, c.beta, c.C, o.C, c.D, o.D, algo,
                         workspace, 4u << 20, NULL);
    objects_close(&o);
    cudaDeviceSynchronize();
    cudaGetLastError();
    return s;
}

/* --- codes, scales and what they mean ------------------------------------------------------ */

static const ref_table *table_of(cudaDataType_t t) {
    static ref_table tables[3];
    static const mixp_dtype dtypes[] = { MIXP_F8_E4M3, MIXP_F8_E5M2, MIXP_F4_E2M1 };
    int i = t == CUDA_R_8F_E4M3 ? 0 : t == CUDA_R_8F_E5M2 ? 1 : 2;
    for (const ref_format &f : ref_formats)
        if (!tables[i].f && f.dtype == dtypes[i]) tables[i] = ref_make(&f);
    return &tables[i];
}
static double value_of(cudaDataType_t t, unsigned code) {
    double x = NAN;
    return ref_decode(table_of(t), code, &x) ? NAN : x;
}
static unsigned random_code(cudaDataType_t t) {
    for (;;) {
        unsigned code = random_bits() & (is_e2m1(t) ? 15u : 255u);
        double x = value_of(t, code);
        if (fabs(x) <= 448.0) return code;
    }
}

static mixp_dtype dtype_of(cudaDataType_t t)
{ return t == CUDA_R_32F ? MIXP_F32 : t == CUDA_R_16F ? MIXP_F16 : MIXP_BF16; }
static size_t bytes_of(cudaDataType_t t) { return t == CUDA_R_32F ? 4 : 2; }

/* A or B: outer x k values, and beside them the bytes of their codes and scales. */
struct Side {
    std::vector<double>  value, scale;          /* of (outer, l)                             */
    std::vector<uint8_t> codes, scales;
};

/* Adds the bytes of a random scale to `scales`; returns its value. */
static double random_scale(int mode, std::vector<uint8_t> *scales) {
    if (mode == VEC16) {
        unsigned code = 0x28u + random_bits() % 0x20u;
        scales->push_back((uint8_t)(code | (random_bits() & 0x80u)));   /* the sign is ignored */
        return value_of(CUDA_R_8F_E4M3, code);
    }
    if (mode == VEC32) {
        int e = random_to(9) - 4;
        scales->push_back((uint8_t)(127 + e));
        return ldexp(1.0, e);
    }
    float f = (float)(random_value() + (random_bits() & 1u ? 1.5 : -1.5));
    const uint8_t *bytes = (const uint8_t *)&f;
    scales->insert(scales->end(), bytes, bytes + 4);
    return f;
}

static void scale_block(Side *s, int64_t k, int64_t outer, int64_t from, int64_t width, double scale) {
    for (int64_t l = from; l < k && l < from + width; l++) s->scale[(size_t)(outer * k + l)] = scale;
}

/* Tiles of 128 x 4 scales, row after row; in a tile 32 lines of four times four. */
static void scale_tiles(Side *s, int mode, int64_t outers, int64_t k) {
    const int64_t width = mode == VEC16 ? 16 : 32;
    for (int64_t top = 0; top < outers; top += 128)
        for (int64_t left = 0; left * width < k; left += 4)
            for (int64_t line = 0; line < 32; line++)
                for (int64_t quarter = 0; quarter < 4; quarter++)
                    for (int64_t block = left; block < left + 4; block++) {
                        int64_t outer = top + 32 * quarter + line;
                        if (outer >= outers || block * width >= k) s->scales.push_back(0);
                        else scale_block(s, k, outer, block * width, width,
                                         random_scale(mode, &s->scales));
                    }
}

static void scale_side(Side *s, int mode, int64_t outers, int64_t k) {
    const uint8_t unread[4] = { 0, 0, 0xC0, 0x7F };     /* a NaN */
    s->scale.assign((size_t)(outers * k), 1.0);
    if (mode == VEC16 || mode == VEC32) return scale_tiles(s, mode, outers, k);
    if (mode == SCALAR) {
        double scale = random_scale(mode, &s->scales);
        for (int64_t outer = 0; outer < outers; outer++) scale_block(s, k, outer, 0, k, scale);
    }
    if (mode == VEC128)
        for (int64_t from = 0; from < k; from += 128)
            for (int64_t outer = 0; outer < outers; outer++)
                scale_block(s, k, outer, from, 128, random_scale(mode, &s->scales));
    for (int64_t top = 0; mode == BLK128 && top < outers; top += 128) {
        for (int64_t from = 0; from < k; from += 128) {
            double scale = random_scale(mode, &s->scales);
            for (int64_t outer = top; outer < outers && outer < top + 128; outer++)
                scale_block(s, k, outer, from, 128, scale);
        }
        while (s->scales.size() % 16) s->scales.insert(s->scales.end(), unread, unread + 4);
    }
}

/* Random codes; in memory `ld` from one column to the next, the gap filled with ones. */
static void code_side(Side *s, cudaDataType_t t, int64_t outers, int64_t k, bool along_k, int64_t ld) {
    const int64_t columns = along_k ? outers : k, rows = along_k ? k : outers;
    s->value.assign((size_t)(outers * k), 0.0);
    for (int64_t column = 0; column < columns; column++)
        for (int64_t row = 0; row < ld; row++) {
            unsigned code = row < rows ? random_code(t) : 255u;
            int64_t outer = along_k ? column : row, l = along_k ? row : column;
            if (row < rows) s->value[(size_t)(outer * k + l)] = value_of(t, code);
            else if (column == columns - 1) continue;
            if (is_e2m1(t) && row % 2) s->codes.back() = (uint8_t)(s->codes.back() | code << 4);
            else s->codes.push_back((uint8_t)(is_e2m1(t) ? code & 15u : code));
        }
}

/* --- memory of the GPU --------------------------------------------------------------------- */

static std::vector<void *> taken;

static void *device(size_t bytes) {
    void *p = NULL;
    CHECK_INT(cudaMalloc(&p, bytes), cudaSuccess);
    taken.push_back(p);
    return p;
}
static void *device_of(const void *from, size_t bytes) {
    void *p = device(bytes);
    cudaMemcpy(p, from, bytes, cudaMemcpyHostToDevice);
    return p;
}
static void *device_of(const std::vector<uint8_t> &v) { return device_of(v.data(), v.size()); }
static void give_back(void) {
    for (void *p : taken) cudaFree(p);
    taken.clear();
}

static std::vector<uint8_t> random_numbers(cudaDataType_t t, size_t n) {
    std::vector<uint8_t> bytes(n * bytes_of(t));
    for (size_t i = 0; i < n; i++) {
        float f = (float)(8.0 * random_value());
        mixp_convert(&bytes[i * bytes_of(t)], dtype_of(t), &f, MIXP_F32, 1);
    }
    return bytes;
}
static double number_at(const std::vector<uint8_t> &bytes, cudaDataType_t t, size_t i) {
    float f;
    mixp_convert(&f, MIXP_F32, &bytes[i * bytes_of(t)], dtype_of(t), 1);
    return f;
}

/* The capability of the GPU becomes this one; false: it is a real one of another. */
static bool become(int capability) {
    int major = 0, minor = 0;
    if (cudasim::simulated) {
        cudasim::capability_major = capability / 10;
        cudasim::capability_minor = capability % 10;
        return true;
    }
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0);
    return capability == 10 * major + minor;
}
static void become_usual(void) { become(90); }

/* --- numbers ------------------------------------------------------------------------------- */

/* D against loops in double. */
static void compare(const Call &c, const Side &a, const Side &b, const std::vector<uint8_t> &old,
                    const std::vector<uint8_t> &bias, float alpha, float beta) {
    std::vector<uint8_t> got((size_t)(c.ldd * c.n) * bytes_of(c.d));
    cudaMemcpy(got.data(), c.D, got.size(), cudaMemcpyDeviceToHost);
    for (int64_t j = 0; j < c.n; j++)
        for (int64_t i = 0; i < c.m; i++) {
            double sum = 0.0, size = 0.0, want;
            for (int64_t l = 0; l < c.k; l++) {
                size_t at = (size_t)(i * c.k + l), bt = (size_t)(j * c.k + l);
                double term = a.value[at] * a.scale[at] * b.value[bt] * b.scale[bt];
                sum += term;
                size += fabs(term);
            }
            want = alpha * sum + beta * number_at(old, c.d, (size_t)(i + j * c.ldc));
            if (c.bias) want += number_at(bias, c.bias_type, (size_t)i);
            CHECK_NEAR(number_at(got, c.d, (size_t)(i + j * c.ldd)), want,
                       1.01 * half_ulp(dtype_of(c.d), want) + fabs(want) * 1e-7 +
                       (cudasim::simulated && !cudasim::cut_sums ? 0.0 : ldexp(fabs(alpha) * size, -9)));
        }
    for (int64_t at = c.m; at < c.ldd * (c.n - 1); at++)            /* between the columns */
        if (at % c.ldd >= c.m)
            for (size_t byte = 0; byte < bytes_of(c.d); byte++)
                CHECK_INT(got[(size_t)at * bytes_of(c.d) + byte], 0xFF);
}

/* One product of random codes, compared. */
static void number_case(Call c, bool with_bias, float alpha, float beta) {
    Side a, b;
    cublasLtMatmulAlgo_t algo;
    code_side(&a, c.a, c.m, c.k, c.ta, c.lda);
    code_side(&b, c.b, c.n, c.k, !c.tb, c.ldb);
    scale_side(&a, c.a_mode, c.m, c.k);
    scale_side(&b, c.b_mode, c.n, c.k);
    std::vector<uint8_t> old = random_numbers(c.d, (size_t)(c.ldc * c.n));
    std::vector<uint8_t> bias = random_numbers(c.bias_type, (size_t)c.m);
    std::vector<uint8_t> filled((size_t)(c.ldd * c.n) * bytes_of(c.d), 0xFF);
    c.A = device_of(a.codes);
    c.B = device_of(b.codes);
    c.C = device_of(old);
    c.D = device_of(filled);
    c.a_scales = device_of(a.scales);
    c.b_scales = device_of(b.scales);
    if (with_bias) c.bias = device_of(bias);
    if (with_bias) c.epilogue = CUBLASLT_EPILOGUE_BIAS;
    c.alpha = c.device_factors ? (const float *)device_of(&alpha, 4) : &alpha;
    c.beta = c.device_factors ? (const float *)device_of(&beta, 4) : &beta;
    long before = cudasim::count.narrow;
    CHECK_INT(ask(c, &algo), CUBLAS_STATUS_SUCCESS);
    CHECK_INT(multiply(c, &algo), CUBLAS_STATUS_SUCCESS);
    if (cudasim::simulated) CHECK_INT(cudasim::count.narrow - before, 1);
    compare(c, a, b, old, bias, alpha, beta);
    give_back();
}

/* Sizes that are multiples of no tile, and columns that lie apart. */
static Call sized(Call c, int64_t m, int64_t n, int64_t k, int64_t apart) {
    c.m = m; c.n = n; c.k = k;
    c.lda = (c.ta ? k : m) + apart;
    c.ldb = (c.tb ? n : k) + apart;
    c.ldc = m + 8;
    c.ldd = m + 16;
    return c;
}

static void fp8_numbers(int capability) {
    static const cudaDataType_t pairs[3][2] = { { CUDA_R_8F_E4M3, CUDA_R_8F_E4M3 },
        { CUDA_R_8F_E4M3, CUDA_R_8F_E5M2 }, { CUDA_R_8F_E5M2, CUDA_R_8F_E4M3 } };
    static const cudaDataType_t results[] = { CUDA_R_32F, CUDA_R_16BF, CUDA_R_16F };
    if (!become(capability)) SKIP("the GPU is another one");
    for (const cudaDataType_t *pair : pairs)
        for (cudaDataType_t d : results) {
            Call c = call_of(pair[0], pair[1], d, SCALAR, SCALAR);
            number_case(c, false, 0.0009765625f, 0.0f);
            c = sized(c, 40, 9, 80, 16);
            number_case(c, true, 0.0009765625f, 0.5f);
            c.device_factors = c.fast = true;
            number_case(c, true, -0.0009765625f, 2.0f);
        }
    become_usual();
}
static void test_fp8_on_89(void) { fp8_numbers(89); }
static void test_fp8_on_90(void) { fp8_numbers(90); }
static void test_fp8_on_100(void) { fp8_numbers(100); }
static void test_fp8_on_120(void) { fp8_numbers(120); }

/* A NULL scale is 1, and without a mode there is one scale. */
static void test_fp8_without_scales(void) {
    uint8_t one = 0x38;
    std::vector<uint8_t> codes(1024 * 2, one), got(16 * 24 * 4);
    cublasLtMatmulAlgo_t algo;
    if (!become(90)) SKIP("the GPU is another one");
    Call c = call_of(CUDA_R_8F_E4M3, CUDA_R_8F_E4M3, CUDA_R_32F, SCALAR, SCALAR);
    c.A = device_of(codes);
    c.B = device_of(codes);
    c.C = c.D = device_of(got);
    c.with_modes = false;
    CHECK_INT(ask(c, &algo), CUBLAS_STATUS_SUCCESS);
    CHECK_INT(multiply(c, &algo), CUBLAS_STATUS_SUCCESS);
    cudaMemcpy(got.data(), c.D, got.size(), cudaMemcpyDeviceToHost);
    for (size_t i = 0; i < 16 * 24; i++) CHECK(number_at(got, CUDA_R_32F, i) == 64.0);
    give_back();
}

/* All three pairs of the 128-element modes, on 9.0 alone. */
static void test_blocks_of_128(void) {
    static const int modes[3][2] = { { VEC128, VEC128 }, { BLK128, VEC128 }, { VEC128, BLK128 } };
    if (!become(90)) SKIP("the GPU is another one");
    if (cublasLtGetVersion() < 120900) SKIP("the library is older than 12.9");
    for (const int *mode : modes) {
        Call c = call_of(CUDA_R_8F_E4M3, CUDA_R_8F_E4M3, CUDA_R_32F, mode[0], mode[1]);
        number_case(sized(c, 144, 136, 272, 16), false, 0.25f, 0.5f);
        c.d = CUDA_R_16BF;
        c.b = CUDA_R_8F_E5M2;
        number_case(sized(c, 24, 152, 656, 0), true, 1.0f, 0.0f);
        number_case(sized(c, 264, 8, 128, 0), false, 1.0f, 0.0f);
    }
}

static void test_mxfp8(void) {
    static const bool layouts[4][2] = { { true, false }, { false, false }, { false, true },
                                        { true, true } };
    if (!become(100)) SKIP("the GPU is another one");
    for (const bool *t : layouts) {
        Call c = call_of(CUDA_R_8F_E4M3, CUDA_R_8F_E5M2, CUDA_R_16BF, VEC32, VEC32);
        c.ta = t[0];
        c.tb = t[1];
        number_case(sized(c, 144, 160, 272, 32), true, 0.5f, 1.0f);
        c.a_mode = c.b_mode = SCALAR;
        number_case(sized(c, 48, 32, 96, 16), false, 0.5f, 1.0f);
    }
    become(120);
    number_case(call_of(CUDA_R_8F_E4M3, CUDA_R_8F_E4M3, CUDA_R_32F, VEC32, VEC32), false, 1.0f, 0.0f);
    become_usual();
}

static void test_nvfp4(void) {
    int had = 0;
    for (int capability : { 100, 103, 120 }) {
        if (!become(capability)) continue;
        had++;
        Call c = call_of(e2m1(), e2m1(), CUDA_R_32F, VEC16, VEC16);
        number_case(sized(c, 136, 9, 352, 32), true, 0.125f, 1.0f);
        c.d = CUDA_R_16BF;
        c.bias_type = CUDA_R_16BF;
        c.device_factors = true;
        number_case(sized(c, 16, 300, 96, 0), false, 3.0f, 0.0f);
    }
    become_usual();
    if (!had) SKIP("the GPU is another one");
}

/* Scales of two to the s-th at torchao's places; all others are 2^-127. B's column j is 1 in block
 * j, so that D shows the scale of each of A's blocks. */
static void test_places_of_scales(void) {
    const int64_t k = TILED_BLOCKS * 32, n = 16;
    std::vector<uint8_t> ones((size_t)(TILED_OUTERS * k), 0x38), picks((size_t)(n * k), 0);
    std::vector<uint8_t> a(TILED_BYTES, 0), b(4 * 512, 0), got((size_t)(TILED_OUTERS * n) * 4);
    cublasLtMatmulAlgo_t algo;
    int large = 0;
    if (!become(100)) SKIP("the GPU is another one");
    for (int i = 0; i < SCALE_PLACES; i++) a[(size_t)scale_places[i].at] = (uint8_t)(120 + i % 17);
    for (int64_t j = 0; j < TILED_BLOCKS; j++)
        for (int64_t l = 32 * j; l < 32 * j + 32; l++) picks[(size_t)(j * k + l)] = 0x38;
    for (size_t tile = 0; tile < 4; tile++)                 /* 16 outers, 13 blocks: scales of 1 */
        for (size_t at = 0; at < 256; at++)
            if (at % 16 < (tile < 3 ? 4 : 1)) b[512 * tile + at] = 127;
    Call c = sized(call_of(CUDA_R_8F_E4M3, CUDA_R_8F_E4M3, CUDA_R_32F, VEC32, VEC32),
                   TILED_OUTERS, n, k, 0);
    c.ldc = c.ldd = c.m;
    c.A = device_of(ones);
    c.B = device_of(picks);
    c.C = c.D = device_of(got);
    c.a_scales = device_of(a);
    c.b_scales = device_of(b);
    CHECK_INT(ask(c, &algo), CUBLAS_STATUS_SUCCESS);
    CHECK_INT(multiply(c, &algo), CUBLAS_STATUS_SUCCESS);
    cudaMemcpy(got.data(), c.D, got.size(), cudaMemcpyDeviceToHost);
    for (int i = 0; i < SCALE_PLACES; i++) {
        size_t at = (size_t)(scale_places[i].outer + scale_places[i].block * TILED_OUTERS);
        CHECK_NEAR(number_at(got, CUDA_R_32F, at), ldexp(32.0, i % 17 - 7), 0.0);
    }
    for (size_t at = 0; at < got.size() / 4; at++) large += number_at(got, CUDA_R_32F, at) > 1e-9;
    CHECK_INT(large, SCALE_PLACES);
    give_back();
    become_usual();
}

/* --- refusals ------------------------------------------------------------------------------ */

/* A call that is accepted, with enough memory for what the changes below make of it. */
static Call accepted(cudaDataType_t type, int mode, int capability) {
    std::vector<uint8_t> zeros(64 << 10, 0);
    Call c = call_of(type, type, CUDA_R_16BF, mode, mode);
    become(capability);
    c.A = device_of(zeros);
    c.B = device_of(zeros);
    c.C = c.D = device_of(zeros);
    c.a_scales = device_of(zeros);
    c.b_scales = device_of(zeros);
    return c;
}

/* Both the heuristic and the product refuse the changed call; the product gets base's algorithm. */
template <class F> static void refused(const Call &base, cublasStatus_t as, F change) {
    cublasLtMatmulAlgo_t algo, other;
    Call c = base;
    int major = cudasim::capability_major, minor = cudasim::capability_minor;
    size_t version = cudasim::library_version;
    CHECK_INT(ask(base, &algo), CUBLAS_STATUS_SUCCESS);
    CHECK_INT(multiply(base, &algo), CUBLAS_STATUS_SUCCESS);
    change(c);
    long before = cudasim::count.narrow;
    CHECK_INT(ask(c, &other), as);
    CHECK_INT(multiply(c, &algo), as);
    CHECK_INT(cudasim::count.narrow, before);
    cudasim::capability_major = major;
    cudasim::capability_minor = minor;
    cudasim::library_version = version;
}

static const cublasStatus_t UNSUPPORTED = CUBLAS_STATUS_NOT_SUPPORTED,
                            INVALID = CUBLAS_STATUS_INVALID_VALUE;

static void test_refused_types(void) {
    NEEDS_SIMULATION;
    Call c = accepted(CUDA_R_8F_E4M3, SCALAR, 90);
    refused(c, UNSUPPORTED, [](Call &x) { x.a = x.b = CUDA_R_8F_E5M2; });
    refused(c, UNSUPPORTED, [](Call &x) { x.b = CUDA_R_16BF; });
    refused(c, UNSUPPORTED, [](Call &x) { x.a = CUDA_R_16BF; });
    refused(c, UNSUPPORTED, [](Call &x) { x.b = e2m1(); });
    refused(c, UNSUPPORTED, [](Call &x) { x.d = CUDA_R_8F_E4M3; });
    refused(c, UNSUPPORTED, [](Call &x) { x.compute = CUBLAS_COMPUTE_32F_FAST_TF32; });
    refused(c, UNSUPPORTED, [](Call &x) { x.compute = CUBLAS_COMPUTE_16F; });
    refused(c, UNSUPPORTED, [](Call &x) { x.scale_type = CUDA_R_16F; });
    give_back();
    c = accepted(e2m1(), VEC16, 100);
    refused(c, UNSUPPORTED, [](Call &x) { x.d = CUDA_R_16F; });
    refused(c, UNSUPPORTED, [](Call &x) { x.a = CUDA_R_8F_E4M3; });
    give_back();
    become_usual();
}

static void test_refused_modes(void) {
    NEEDS_SIMULATION;
    Call c = accepted(CUDA_R_8F_E4M3, VEC128, 90);
    refused(c, UNSUPPORTED, [](Call &x) { x.a_mode = x.b_mode = BLK128; });
    refused(c, UNSUPPORTED, [](Call &x) { x.b_mode = SCALAR; });
    refused(c, UNSUPPORTED, [](Call &x) { x.a_mode = SCALAR; });
    refused(c, UNSUPPORTED, [](Call &x) { x.a_mode = x.b_mode = VEC32; });
    refused(c, UNSUPPORTED, [](Call &x) { x.a_mode = x.b_mode = VEC16; });
    refused(c, UNSUPPORTED, [](Call &x) { x.a_mode = x.b_mode = OUTER_VEC; });
    refused(c, UNSUPPORTED, [](Call &) { cudasim::library_version = 120899; });
    refused(c, INVALID, [](Call &) { cudasim::library_version = 120799; });
    for (int capability : { 75, 80, 89, 100, 103, 120 })
        refused(c, UNSUPPORTED, [=](Call &) { become(capability); });
    give_back();
    c = accepted(CUDA_R_8F_E4M3, VEC32, 100);
    refused(c, UNSUPPORTED, [](Call &x) { x.b_mode = SCALAR; });
    refused(c, UNSUPPORTED, [](Call &x) { x.a_mode = x.b_mode = VEC16; });
    for (int capability : { 80, 89, 90 })
        refused(c, UNSUPPORTED, [=](Call &) { become(capability); });
    give_back();
    c = accepted(e2m1(), VEC16, 100);
    refused(c, UNSUPPORTED, [](Call &x) { x.a_mode = x.b_mode = SCALAR; });
    refused(c, UNSUPPORTED, [](Call &x) { x.a_mode = x.b_mode = VEC32; });
    refused(c, UNSUPPORTED, [](Call &x) { x.a_mode = x.b_mode = VEC128; });
    refused(c, UNSUPPORTED, [](Call &) { become(90); });
    give_back();
    c = accepted(CUDA_R_8F_E4M3, SCALAR, 89);
    for (int capability : { 75, 80, 86 })
        refused(c, UNSUPPORTED, [=](Call &) { become(capability); });
    c.with_modes = false;                       /* as a library before 12.8 knows it */
    cudasim::library_version = 120600;
    cublasLtMatmulAlgo_t algo;
    CHECK_INT(ask(c, &algo), CUBLAS_STATUS_SUCCESS);
    CHECK_INT(multiply(c, &algo), CUBLAS_STATUS_SUCCESS);
    cudasim::library_version = 130100;
    give_back();
    become_usual();
}

static void test_refused_layouts(void) {
    NEEDS_SIMULATION;
    for (int capability : { 89, 90, 120 }) {
        Call c = accepted(CUDA_R_8F_E4M3, SCALAR, capability);
        c.m = c.n = c.k = c.lda = c.ldb = c.ldc = c.ldd = 64;
        refused(c, UNSUPPORTED, [](Call &x) { x.ta = false; });
        refused(c, UNSUPPORTED, [](Call &x) { x.tb = true; });
        refused(c, UNSUPPORTED, [](Call &x) { x.ta = false; x.tb = true; });
        give_back();
    }
    Call c = accepted(e2m1(), VEC16, 100);
    c.m = c.n = c.k = c.lda = c.ldb = c.ldc = c.ldd = 64;
    refused(c, UNSUPPORTED, [](Call &x) { x.ta = false; });
    refused(c, UNSUPPORTED, [](Call &x) { x.tb = true; });
    give_back();
    become_usual();
}

static void test_refused_sizes(void) {
    NEEDS_SIMULATION;
    Call c = accepted(CUDA_R_8F_E4M3, SCALAR, 90);
    refused(c, UNSUPPORTED, [](Call &x) { x.k = 56; });
    refused(c, UNSUPPORTED, [](Call &x) { x.lda = 72; });
    refused(c, UNSUPPORTED, [](Call &x) { x.ldb = 72; });
    refused(c, UNSUPPORTED, [](Call &x) { x.m = 12; });
    refused(c, UNSUPPORTED, [](Call &x) { x.ldc = 20; });
    refused(c, UNSUPPORTED, [](Call &x) { x.ldd = 20; });
    refused(c, UNSUPPORTED, [](Call &x) { x.d = CUDA_R_32F; x.m = 14; });
    refused(c, UNSUPPORTED, [](Call &x) { x.batches = 2; });
    refused(c, INVALID, [](Call &x) { x.lda = 48; });
    c.m = 12;
    c.ldc = c.ldd = 16;
    c.d = CUDA_R_32F;
    c.n = 7;
    refused(c, UNSUPPORTED, [](Call &x) { x.m = 13; });     /* 12 rows of f32, and any n, pass */
    give_back();
    c = accepted(e2m1(), VEC16, 100);
    refused(c, UNSUPPORTED, [](Call &x) { x.k = 48; });
    refused(c, UNSUPPORTED, [](Call &x) { x.lda = 80; });
    refused(c, UNSUPPORTED, [](Call &x) { x.ldb = 80; });
    give_back();
    c = accepted(CUDA_R_8F_E4M3, VEC128, 90);
    refused(c, UNSUPPORTED, [](Call &x) { x.n = 12; });
    c.b_mode = BLK128;
    c.n = 12;
    refused(c, UNSUPPORTED, [](Call &x) { x.n = 10; });
    give_back();
    c = accepted(CUDA_R_8F_E4M3, VEC32, 100);
    c.m = c.n = c.k = c.lda = c.ldb = c.ldc = c.ldd = 64;
    c.tb = true;
    refused(c, UNSUPPORTED, [](Call &x) { x.n = 56; });
    c.ta = false;
    refused(c, UNSUPPORTED, [](Call &x) { x.k = 56; });
    refused(c, UNSUPPORTED, [](Call &x) { x.m = 56; });
    give_back();
    become_usual();
}

static const void *past(const void *p, int bytes) { return (const char *)p + bytes; }

static void test_refused_pointers(void) {
    NEEDS_SIMULATION;
    static float host;
    cublasLtMatmulAlgo_t algo;
    Call c = accepted(CUDA_R_8F_E4M3, VEC32, 100), x;
    CHECK_INT(ask(c, &algo), CUBLAS_STATUS_SUCCESS);
    refused(c, INVALID, [](Call &y) { y.a_scales = NULL; });
    refused(c, INVALID, [](Call &y) { y.b_scales = NULL; });
    refused(c, UNSUPPORTED, [](Call &y) { y.a_scales = past(y.a_scales, 8); });
    refused(c, UNSUPPORTED, [](Call &y) { y.b_scales = past(y.b_scales, 8); });
    refused(c, UNSUPPORTED, [](Call &y) { y.alignment = 8; y.D = (void *)past(y.D, 8); });
    x = c; x.A = past(c.A, 8); CHECK_INT(multiply(x, &algo), UNSUPPORTED);
    x = c; x.B = past(c.B, 8); CHECK_INT(multiply(x, &algo), UNSUPPORTED);
    x = c; x.C = past(c.C, 8); CHECK_INT(multiply(x, &algo), UNSUPPORTED);
    x = c; x.a_scales = device(511); CHECK_INT(multiply(x, &algo), INVALID);    /* of 512 */
    x = c; x.b_scales = device(511); CHECK_INT(multiply(x, &algo), INVALID);
    x = c; x.A = device(16 * 64 - 1); CHECK_INT(multiply(x, &algo), INVALID);
    x = c; x.B = device(24 * 64 - 1); CHECK_INT(multiply(x, &algo), INVALID);
    x = c; x.C = device(16 * 24 * 2 - 1); CHECK_INT(multiply(x, &algo), INVALID);
    x = c; x.D = device(16 * 24 * 2 - 1); CHECK_INT(multiply(x, &algo), INVALID);
    CHECK_INT(multiply(c, &algo), CUBLAS_STATUS_SUCCESS);
    give_back();
    c = accepted(CUDA_R_8F_E4M3, VEC128, 90);
    c.b_mode = BLK128;
    CHECK_INT(ask(c, &algo), CUBLAS_STATUS_SUCCESS);
    x = c; x.a_scales = device(16 * 4 - 1); CHECK_INT(multiply(x, &algo), INVALID);
    x = c; x.b_scales = device(4 * 4 - 1); CHECK_INT(multiply(x, &algo), INVALID);
    CHECK_INT(multiply(c, &algo), CUBLAS_STATUS_SUCCESS);
    give_back();
    c = accepted(CUDA_R_8F_E4M3, SCALAR, 90);
    CHECK_INT(ask(c, &algo), CUBLAS_STATUS_SUCCESS);
    x = c; x.a_scales = &host; CHECK_INT(multiply(x, &algo), INVALID);
    x = c; x.b_scales = device(3); CHECK_INT(multiply(x, &algo), INVALID);
    refused(c, UNSUPPORTED, [](Call &y) { y.a_scales = past(y.a_scales, 2); });
    give_back();
    become_usual();
}

static void test_refused_epilogues(void) {
    NEEDS_SIMULATION;
    Call c = accepted(CUDA_R_8F_E4M3, SCALAR, 90);
    c.bias = c.a_scales;
    c.epilogue = CUBLASLT_EPILOGUE_BIAS;
    for (int e : { (int)CUBLASLT_EPILOGUE_BGRADB, (int)CUBLASLT_EPILOGUE_GELU_AUX,
                   (int)CUBLASLT_EPILOGUE_GELU_AUX_BIAS, (int)CUBLASLT_EPILOGUE_DGELU,
                   (int)CUBLASLT_EPILOGUE_GELU_BIAS })
        refused(c, UNSUPPORTED, [=](Call &x) { x.epilogue = e; });
    refused(c, UNSUPPORTED, [](Call &x) { x.bias_type = CUDA_R_32F; });
    refused(c, UNSUPPORTED, [](Call &x) { x.d = CUDA_R_16F; });
    c.d = CUDA_R_32F;
    refused(c, UNSUPPORTED, [](Call &x) { x.bias_type = CUDA_R_32F; });
    refused(c, UNSUPPORTED, [](Call &x) { x.bias_type = CUDA_R_16F; });
    give_back();
    become_usual();
}

/* Attributes have one size, those of C and D are not taken, and none goes with an ordinary product. */
static void test_refused_attributes(void) {
    NEEDS_SIMULATION;
    Objects o;
    int64_t wide = 0;
    cublasLtMatmulAlgo_t algo;
    Call c = accepted(CUDA_R_8F_E4M3, SCALAR, 90);
    objects_open(&o, c);
    CHECK_INT(cublasLtMatmulDescSetAttribute(o.desc, A_MODE, &wide, 8), INVALID);
    CHECK_INT(cublasLtMatmulDescSetAttribute(o.desc, B_MODE, &wide, 1), INVALID);
    CHECK_INT(cublasLtMatmulDescSetAttribute(o.desc, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &wide, 4),
              INVALID);
    CHECK_INT(cublasLtMatmulDescSetAttribute(o.desc, CUBLASLT_MATMUL_DESC_FAST_ACCUM, &wide, 4),
              INVALID);
    for (int key : { 19, 20, 33, 34 })          /* scales and modes of C and D */
        for (size_t bytes : { 4, 8 })
            CHECK_INT(cublasLtMatmulDescSetAttribute(o.desc, (cublasLtMatmulDescAttributes_t)key,
                                                     &wide, bytes), INVALID);
    objects_close(&o);
    c.a = c.b = c.d = CUDA_R_16BF;
    CHECK_INT(ask(c, &algo), INVALID);
    c.a_scales = NULL;
    CHECK_INT(ask(c, &algo), INVALID);
    c.b_scales = NULL;
    CHECK_INT(ask(c, &algo), CUBLAS_STATUS_SUCCESS);
    c.b_mode = VEC32;
    CHECK_INT(ask(c, &algo), INVALID);
    give_back();
}

/* An algorithm is for its types and modes. */
static void test_algorithms_of_others(void) {
    NEEDS_SIMULATION;
    cublasLtMatmulAlgo_t wide, one, blocks;
    Call c = accepted(CUDA_R_8F_E4M3, SCALAR, 90), b = c, w = c;
    b.a_mode = b.b_mode = VEC128;
    w.a = w.b = CUDA_R_16BF;
    w.a_scales = w.b_scales = NULL;
    CHECK_INT(ask(c, &one), CUBLAS_STATUS_SUCCESS);
    CHECK_INT(ask(b, &blocks), CUBLAS_STATUS_SUCCESS);
    CHECK_INT(ask(w, &wide), CUBLAS_STATUS_SUCCESS);
    CHECK_INT(multiply(c, &blocks), INVALID);
    CHECK_INT(multiply(c, &wide), INVALID);
    CHECK_INT(multiply(b, &one), INVALID);
    CHECK_INT(multiply(w, &one), INVALID);
    CHECK_INT(multiply(b, &blocks), CUBLAS_STATUS_SUCCESS);
    CHECK_INT(multiply(w, &wide), CUBLAS_STATUS_SUCCESS);
    give_back();
}

/* The switches that a fallback is tested with. */
static void test_switches(void) {
    NEEDS_SIMULATION;
    cublasLtMatmulAlgo_t algo, other;
    Call c = accepted(CUDA_R_8F_E4M3, SCALAR, 90), w = c;
    w.a = w.b = CUDA_R_16BF;
    w.a_scales = w.b_scales = NULL;
    CHECK_INT(ask(c, &algo), CUBLAS_STATUS_SUCCESS);
    cudasim::narrow_products = false;
    CHECK_INT(ask(c, &other), UNSUPPORTED);
    CHECK_INT(ask(w, &other), CUBLAS_STATUS_SUCCESS);
    cudasim::narrow_products = true;
    CHECK_INT(ask(w, &other), CUBLAS_STATUS_SUCCESS);
    cudasim::refused_narrow = 1;
    long before = cudasim::count.narrow, all = cudasim::count.products;
    CHECK_INT(multiply(w, &other), CUBLAS_STATUS_SUCCESS);
    CHECK_INT(multiply(c, &algo), UNSUPPORTED);
    CHECK_INT(cudasim::count.narrow - before, 0);
    CHECK_INT(multiply(c, &algo), CUBLAS_STATUS_SUCCESS);
    CHECK_INT(cudasim::count.narrow - before, 1);
    CHECK_INT(cudasim::count.products - all, 2);
    give_back();
}

int main(void) {
    RUN(test_fp8_on_89);
    RUN(test_fp8_on_90);
    RUN(test_fp8_on_100);
    RUN(test_fp8_on_120);
    RUN(test_fp8_without_scales);
    RUN(test_blocks_of_128);
    RUN(test_mxfp8);
    RUN(test_nvfp4);
    RUN(test_places_of_scales);
    RUN(test_refused_types);
    RUN(test_refused_modes);
    RUN(test_refused_layouts);
    RUN(test_refused_sizes);
    RUN(test_refused_pointers);
    RUN(test_refused_epilogues);
    RUN(test_refused_attributes);
    RUN(test_algorithms_of_others);
    RUN(test_switches);
    return test_report();
}
