#pragma once
#include "sums.cu"
/* ==== 6. GEMM ============================================================== >>gemm ====
 *
 * cuBLASLt is column-major. The row-major c = op(a) op(b) is its column-major product
 * c' = op(b)' op(a)': the operands change places and nothing is transposed.
 *
 * cuBLASLt takes a and b of one dtype, c of that dtype or f32, and a bias of c's dtype. Other
 * operands are packed first: copied to scratch memory, widened, dense and aligned. If c is of
 * another kind, its sums go through f32 scratch memory. If cuBLASLt still refuses the product, our
 * own tiled kernel computes the product.
 *
 * A plan (descriptors and algorithm) is made once per shape; later calls neither allocate nor query
 * cuBLASLt. Products are summed in f32, never tf32; partial sums of a split k are f32 as well.
 * Algorithms come from cuBLASLt's heuristic, from a text that an earlier context wrote, or from
 * measurements.
 *
 * An epilogue is a second operation in a product's pass: column sums of dy, or GELU (tanh form). If
 * cuBLASLt lacks the epilogue, two kernels do the work, and mixp_gemm_count.apart counts the call.
 */
namespace {

/* --- a product of any kind ------------------------------------------------------------- *
 *
 * A block of 256 threads computes 64 x 64 elements of c, 4 x 4 per thread, in steps of 16 of k.
 * Each element is one chain of multiply-adds in increasing k.
 */
const int tile_side = 64, tile_depth = 16, tile_pitch = tile_side + 4, tile_threads = 256;

/* Loads op(a)[i0 .., p0 ..] or op(b)'[j0 .., p0 ..] to tile[p * pitch + i]; 0 beyond rows and k. */
__device__ inline void tile_load(float *tile, mixp_in a, int64_t first, int64_t step_i,
    int64_t step_p, int64_t rows, int64_t depth) {
    MIXPI_UNROLL
    for (int e = 0; e < tile_side * tile_depth / tile_threads; e++) {
        int at = (int)threadIdx.x + e * tile_threads;
        int i = step_i == 1 ? at % tile_side : at / tile_depth;
        int p = step_i == 1 ? at / tile_side : at % tile_depth;
        tile[p * tile_pitch + i] =
            i < rows && p < depth ? get1(a, first + i * step_i + p * step_p) : 0.0f;
    }
}

/* sums += the product of two tiles. */
__device__ inline void tile_multiply(float (*sums)[4], const float *a, const float *b) {
    int row = (int)threadIdx.x / 16 * 4, column = (int)threadIdx.x % 16 * 4;
    MIXPI_UNROLL
    for (int p = 0; p < tile_depth; p++) {
        float4 u = *(const float4 *)(const void *)(a + p * tile_pitch + row);
        float4 v = *(const float4 *)(const void *)(b + p * tile_pitch + column);
        float x[4] = { u.x, u.y, u.z, u.w }, y[4] = { v.x, v.y, v.z, v.w };
        MIXPI_UNROLL
        for (int i = 0; i < 4; i++) {
            MIXPI_UNROLL
            for (int j = 0; j < 4; j++) sums[i][j] = fmaf(x[i], y[j], sums[i][j]);
        }
    }
}

__device__ inline void tile_store(
    const mixp_gemm_args &g, int64_t z, int64_t i, int64_t j, const float (*sums)[4]) {
    float alpha = mixpi_gemm_alpha(&g);
    MIXPI_UNROLL
    for (int r = 0; r < 4; r++) {
        MIXPI_UNROLL
        for (int s = 0; s < 4; s++) {
            int64_t at = z * g.stride_c + (i + r) * g.ldc + j + s;
            if (i + r >= g.m || j + s >= g.n) continue;
            float y = fmaf(alpha, sums[r][s], g.bias.data ? get1(g.bias, j + s) : 0.0f);
            put1(g.c, at, g.c.accumulate ? y + get1(as_in(g.c), at) : y);
        }
    }
}

__global__ void __launch_bounds__(tile_threads) gemm_tiles(mixp_gemm_args g) {
    MIXPI_SHARED(float, a, tile_depth *tile_pitch);
    MIXPI_SHARED(float, b, tile_depth *tile_pitch);
    int64_t across = ceil_div(g.n, tile_side), down = ceil_div(g.m, tile_side);
    int64_t ai = g.trans_a ? 1 : g.lda, ap = g.trans_a ? g.lda : 1;
    int64_t bj = g.trans_b ? g.ldb : 1, bp = g.trans_b ? 1 : g.ldb;
    for (int64_t t = blockIdx.x; t < g.batch * down * across; t += gridDim.x) {
        int64_t i = t / across % down * tile_side, j = t % across * tile_side;
        int64_t z = t / across / down;

        /* Walk along k: load a tile of a and one of b, and add their product. */
        float sums[4][4] = {};
        for (int64_t p = 0; p < g.k; p += tile_depth) {
            tile_load(a, g.a, z * g.stride_a + i * ai + p * ap, ai, ap, g.m - i, g.k - p);
            tile_load(b, g.b, z * g.stride_b + j * bj + p * bp, bj, bp, g.n - j, g.k - p);
            __syncthreads();
            tile_multiply(sums, a, b);
            __syncthreads();
        }

        tile_store(g, z, i + (int)threadIdx.x / 16 * 4, j + (int)threadIdx.x % 16 * 4, sums);
    }
}

/* --- copies for cuBLASLt --------------------------------------------------------------- */

/* Matrices of rows x cols elements as stored: rows are `ld` apart, matrices `stride`. */
struct Matrix {
    mixp_in at;
    int64_t rows, cols, ld, stride, count;
};

inline Matrix matrix_a(const mixp_gemm_args &g) {
    return Matrix{ g.a, g.trans_a ? g.k : g.m, g.trans_a ? g.m : g.k, g.lda, g.stride_a,
        g.stride_a ? g.batch : 1 };
}
inline Matrix matrix_b(const mixp_gemm_args &g) {
    return Matrix{ g.b, g.trans_b ? g.n : g.k, g.trans_b ? g.k : g.n, g.ldb, g.stride_b,
        g.stride_b ? g.batch : 1 };
}
inline Matrix matrix_c(const mixp_gemm_args &g) {
    return Matrix{ as_in(g.c), g.m, g.n, g.ldc, g.stride_c, g.batch };
}
inline Matrix matrix_bias(const mixp_gemm_args &g) { return Matrix{ g.bias, 1, g.n, g.n, 0, 1 }; }

inline bool has_aligned_start(const Matrix &m) {
    return is_wide(m.at) && (m.count == 1 || m.stride * dtype_bytes(m.at.dtype) % 16 == 0);
}
/* Can the matrix's rows be read 8 elements at a time? */
inline bool has_aligned_rows(const Matrix &m) {
    return is_wide(m.at) && (m.rows == 1 || m.ld % 8 == 0) && (m.count == 1 || m.stride % 8 == 0);
}

/* Copies src to `to`, laid out as dst: aligned, full rows. Columns beyond src's width become 0. */
__global__ void gemm_pack(mixp_out to, Matrix dst, Matrix src, bool wide) {
    int64_t across = dst.ld / 8, n = dst.count * dst.rows * across;
    int64_t step = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        int64_t row = i / across % dst.rows, z = i / across / dst.rows, j = i % across * 8;
        float v[8];
        get8_any(src.at, z * src.stride + row * src.ld + j, (int)least(8, src.cols - j), wide, v);
        put8(to, z * dst.stride + row * dst.ld + j, v);
    }
}

/* to (+)= sums + bias; `to` is laid out as c. */
__global__ void gemm_finish(mixp_out to, Matrix c, Matrix sums, mixp_in bias, bool wide) {
    int64_t across = ceil_div(c.cols, 8), n = c.count * c.rows * across;
    int64_t step = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        int64_t row = i / across % c.rows, z = i / across / c.rows, j = i % across * 8;
        int64_t at = z * c.stride + row * c.ld + j;
        int many = (int)least(8, c.cols - j);
        float v[8], add[8] = {}, old[8] = {};
        get8(sums.at, z * sums.stride + row * sums.ld + j, v);
        if (bias.data) get8_any(bias, j, many, false, add);
        if (to.accumulate) get8_any(c.at, at, many, wide, old);
        MIXPI_UNROLL
        for (int e = 0; e < 8; e++) v[e] = v[e] + add[e] + old[e];
        put8_any(to, at, many, wide, v);
    }
}

/* --- queries to cuBLASLt ---------------------------------------------------------------- */

/* A product whose operands cuBLASLt takes: the given operands, or packed copies. */
struct Product {
    mixp_gemm_args g;
    bool      pack_a, pack_b, pack_bias, finish;
    size_t    at_a, at_b, at_bias, at_c, bytes;     /* offsets in, and size of, scratch memory */
    cublasLtEpilogue_t epilogue;
    void     *sums, *before;                        /* for an epilogue; otherwise NULL       */
    const void *scales_a, *scales_b;                /* of a narrow product; otherwise NULL   */
    int32_t   mode_a, mode_b;                       /* cuBLASLt's modes of them; 0: none     */
};

/* Must the operand be copied to get this dtype (strict: and alignment)? */
inline bool is_pack_needed(const Matrix &m, mixp_dtype dtype, bool strict) {
    return m.at.dtype != dtype || (m.rows > 1 && m.ld < m.cols) || m.stride < 0 ||
           (strict && !has_aligned_start(m));
}

/* Room for m as a dense matrix of this dtype, its rows padded to 8 elements. */
inline size_t pack_room(
    Product *p, const Matrix &m, mixp_dtype dtype, int64_t *ld, int64_t *stride) {
    size_t start = p->bytes;
    *ld = round_up(m.cols, 8);
    *stride = m.count > 1 ? m.rows * *ld : 0;
    p->bytes += (size_t)round_up(m.count * m.rows * *ld * dtype_bytes(dtype), 256);
    return start;
}

/* A matrix of one row may have any ld, but cuBLASLt requires ld >= the width. */
inline int64_t row_pitch(const Matrix &m) { return m.rows == 1 && m.ld < m.cols ? m.cols : m.ld; }

/* strict: for the second attempt; packs unaligned operands and adds the bias in a kernel. */
inline Product product_of(const mixp_gemm_args &g, bool strict) {
    const Matrix a = matrix_a(g), b = matrix_b(g), c = matrix_c(g), bias = matrix_bias(g);
    Product p;
    memset((void *)&p, 0, sizeof p);
    p.g = g;
    p.g.lda = row_pitch(a);
    p.g.ldb = row_pitch(b);
    p.g.ldc = row_pitch(c);

    /* Which operands does cuBLASLt not accept unchanged? */
    const mixp_dtype dtype = g.a.dtype == g.b.dtype ? g.a.dtype : MIXP_F32;
    p.pack_a = is_pack_needed(a, dtype, strict);
    p.pack_b = is_pack_needed(b, dtype, strict);
    p.finish = is_pack_needed(c, c.at.dtype == dtype ? dtype : MIXP_F32, strict) ||
               (g.bias.data && (strict || (g.bias.dtype != g.c.dtype && g.c.dtype != MIXP_F32)));
    p.pack_bias = g.bias.data && !p.finish && is_pack_needed(bias, g.c.dtype, true);

    /* Give their packed copies room in scratch memory. */
    if (p.pack_a) {
        p.g.a.dtype = dtype;
        p.at_a = pack_room(&p, a, dtype, &p.g.lda, &p.g.stride_a);
    }
    if (p.pack_b) {
        p.g.b.dtype = dtype;
        p.at_b = pack_room(&p, b, dtype, &p.g.ldb, &p.g.stride_b);
    }
    if (p.pack_bias) {
        int64_t ld, stride;
        p.g.bias.dtype = g.c.dtype;
        p.at_bias = pack_room(&p, bias, g.c.dtype, &ld, &stride);
    }

    /* A product that a kernel finishes is summed in f32, without a bias. */
    p.epilogue = g.bias.data && !p.finish ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
    if (!p.finish) return p;
    p.at_c = pack_room(&p, c, MIXP_F32, &p.g.ldc, &p.g.stride_c);
    p.g.c.dtype = MIXP_F32;
    p.g.c.accumulate = 0;
    p.g.bias.data = NULL;
    return p;
}

/* --- plans ----------------------------------------------------------------------------- */

const int plan_lists = 256, most_plans = 4096, most_algorithms = 24;
/* Matrices that cuBLASLt accepts in one call. */
const int64_t most_batch = 65535;

/* The properties that choose an algorithm. flags: which of a, b and c are unaligned, and whether
 * alpha is in device memory. modes: of the scales of a, and 16 times those of b. No padding,
 * because keys are compared as bytes. */
const int32_t unaligned_a = 1, unaligned_b = 2, unaligned_c = 4, alpha_on_device = 8;
struct PlanKey {
    int64_t m, n, k, lda, ldb, ldc, batch, stride_a, stride_b, stride_c;
    int32_t trans_a, trans_b, dtype_a, dtype_b, dtype_c, epilogue, flags, modes;
};

struct Plan {
    PlanKey                key;
    cublasLtMatmulDesc_t   product;
    cublasLtMatrixLayout_t a, b, c;
    cublasLtMatmulAlgo_t   algorithms[most_algorithms];
    int                    count, at;   /* at: the one in use; at = count: none is usable    */
    bool                   given;       /* chosen by the program's choices                   */
    bool                   measured;    /* the algorithms were timed, or will not be         */
    Plan                  *next;
};

/* A line of the program's choices. */
struct Choice {
    PlanKey              key;
    bool                 none;          /* cuBLASLt has no algorithm for the product         */
    cublasLtMatmulAlgo_t algorithm;
};

struct Plans {
    Plan *first[plan_lists];
    int   count;
};

inline void plan_free(State *s, Plan *p) {
    if (p->product) cublasLtMatmulDescDestroy(p->product);
    if (p->a) cublasLtMatrixLayoutDestroy(p->a);
    if (p->b) cublasLtMatrixLayoutDestroy(p->b);
    if (p->c) cublasLtMatrixLayoutDestroy(p->c);
    host_free(s->host, p);
}

inline void plans_clear(State *s) {
    for (int i = 0; i < plan_lists; i++)
        while (s->plans->first[i]) {
            Plan *p = s->plans->first[i];
            s->plans->first[i] = p->next;
            plan_free(s, p);
        }
    s->plans->count = 0;
}

inline void plans_free(State *s) {
    plans_clear(s);
    host_free(s->host, s->plans);
}

inline PlanKey plan_key(const Product &p) {
    /* The shapes; the strides of a single matrix do not count. */
    const mixp_gemm_args &g = p.g;
    const bool many = g.batch > 1;
    PlanKey key;
    memset((void *)&key, 0, sizeof key);
    key.m = g.m;
    key.n = g.n;
    key.k = g.k;
    key.batch = g.batch;
    key.lda = g.lda;
    key.ldb = g.ldb;
    key.ldc = g.ldc;
    key.stride_a = many ? g.stride_a : 0;
    key.stride_b = many ? g.stride_b : 0;
    key.stride_c = many ? g.stride_c : 0;

    /* The kind of product. */
    key.trans_a = g.trans_a != 0;
    key.trans_b = g.trans_b != 0;
    key.dtype_a = g.a.dtype;
    key.dtype_b = g.b.dtype;
    key.dtype_c = g.c.dtype;
    key.epilogue = p.epilogue;
    key.modes = p.mode_a + 16 * p.mode_b;

    /* Where its operands begin. Packed copies are aligned. */
    if (!p.pack_a && !has_aligned_start(matrix_a(g))) key.flags |= unaligned_a;
    if (!p.pack_b && !has_aligned_start(matrix_b(g))) key.flags |= unaligned_b;
    if (!p.finish && !has_aligned_start(matrix_c(g))) key.flags |= unaligned_c;
    if (g.alpha_at) key.flags |= alpha_on_device;
    return key;
}

inline unsigned plan_list(const PlanKey &key) {
    uint64_t words[sizeof key / 8], h = 14695981039346656037u;
    memcpy(words, (const void *)&key, sizeof key);
    for (uint64_t w : words) h = (h ^ w ^ w >> 29) * 1099511628211u;
    return (unsigned)(h >> 40) % plan_lists;
}

inline cudaDataType_t library_type(int32_t dtype) {
    switch (dtype) {
    case MIXP_F16: return CUDA_R_16F;
    case MIXP_BF16: return CUDA_R_16BF;
    case MIXP_F8_E4M3: return CUDA_R_8F_E4M3;
    case MIXP_F8_E5M2: return CUDA_R_8F_E5M2;
#if CUBLAS_VERSION >= 120800
    case MIXP_F4_E2M1: return CUDA_R_4F_E2M1;
#endif
    default: return CUDA_R_32F;
    }
}

/* The layout of a row-major matrix for cuBLASLt, in which rows are columns. */
inline bool layout_make(cublasLtMatrixLayout_t *layout, int32_t dtype, int64_t rows, int64_t cols,
    int64_t ld, int64_t batch, int64_t stride) {
    int32_t count = (int32_t)batch;
    return cublasLtMatrixLayoutCreate(layout, library_type(dtype), (uint64_t)cols, (uint64_t)rows,
               ld) == CUBLAS_STATUS_SUCCESS &&
           cublasLtMatrixLayoutSetAttribute(*layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count,
               sizeof count) == CUBLAS_STATUS_SUCCESS &&
           cublasLtMatrixLayoutSetAttribute(*layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
               &stride, sizeof stride) == CUBLAS_STATUS_SUCCESS;
}

inline bool plan_set(Plan *p, cublasLtMatmulDescAttributes_t what, const void *value, size_t size) {
    return cublasLtMatmulDescSetAttribute(p->product, what, value, size) == CUBLAS_STATUS_SUCCESS;
}

/* Does the epilogue have a bias or sums? Does it read or write the values before GELU? */
inline bool has_vector(int epilogue) {
    return epilogue == CUBLASLT_EPILOGUE_BIAS || epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS ||
           epilogue == CUBLASLT_EPILOGUE_BGRADB;
}
inline bool has_before(int epilogue) {
    return epilogue == CUBLASLT_EPILOGUE_GELU_AUX || epilogue == CUBLASLT_EPILOGUE_DGELU ||
           epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
}

/* at: a sample address of the bias and of the values before GELU; the heuristic reads its
 * alignment. */
inline bool plan_set_epilogue(Plan *p, const void *at) {
    const PlanKey &k = p->key;
    cublasLtEpilogue_t epilogue = (cublasLtEpilogue_t)k.epilogue;
    cudaDataType_t type = library_type(k.dtype_c);
    if (epilogue == CUBLASLT_EPILOGUE_DEFAULT) return true;
    return plan_set(p, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue) &&
           (!has_vector(epilogue) ||
               (plan_set(p, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &type, sizeof type) &&
                   plan_set(p, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &at, sizeof at))) &&
           (!has_before(epilogue) ||
               (plan_set(p, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &k.n, sizeof k.n) &&
                   plan_set(p, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &at, sizeof at)));
}

inline bool plan_set_alpha(Plan *p) {
    int32_t mode = CUBLASLT_POINTER_MODE_DEVICE;
    return !(p->key.flags & alpha_on_device) ||
           plan_set(p, CUBLASLT_MATMUL_DESC_POINTER_MODE, &mode, sizeof mode);
}

/* cuBLASLt's modes of block scales; 0: its header is too old. */
#if CUBLAS_VERSION >= 120800
const int32_t scales_of_16 = CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3,
              scales_of_32 = CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0;
#else
const int32_t scales_of_16 = 0, scales_of_32 = 0;
#endif
#if CUBLAS_VERSION >= 120900
const int32_t scales_of_128 = CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F,
              scales_of_squares = CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
#else
const int32_t scales_of_128 = 0, scales_of_squares = 0;
#endif

/* Sets the addresses of the scales. cuBLASLt's A is our b. */
inline bool plan_set_scales(Plan *p, const void *of_a, const void *of_b) {
    return (p->key.modes % 16 == 0 ||
               plan_set(p, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &of_a, sizeof of_a)) &&
           (p->key.modes / 16 == 0 ||
               plan_set(p, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &of_b, sizeof of_b));
}

/* Sets the modes of scales. at: a sample of their addresses, until a product sets its own. */
inline bool plan_set_modes(Plan *p, const void *at) {
    int32_t of_a = p->key.modes % 16, of_b = p->key.modes / 16;
    if (!p->key.modes) return true;
#if CUBLAS_VERSION >= 120800
    return plan_set(p, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &of_a, sizeof of_a) &&
           plan_set(p, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &of_b, sizeof of_b) &&
           plan_set_scales(p, at, at);
#else
    (void)of_a, (void)of_b, (void)at;
    return false;
#endif
}

inline bool plan_describe(Plan *p, const void *at) {
    const PlanKey &k = p->key;
    cublasOperation_t first = k.trans_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasOperation_t second = k.trans_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    return cublasLtMatmulDescCreate(&p->product, CUBLAS_COMPUTE_32F, CUDA_R_32F) ==
               CUBLAS_STATUS_SUCCESS &&
           layout_make(&p->a, k.dtype_a, k.trans_a ? k.k : k.m, k.trans_a ? k.m : k.k, k.lda,
               k.batch, k.stride_a) &&
           layout_make(&p->b, k.dtype_b, k.trans_b ? k.n : k.k, k.trans_b ? k.k : k.n, k.ldb,
               k.batch, k.stride_b) &&
           layout_make(&p->c, k.dtype_c, k.m, k.n, k.ldc, k.batch, k.stride_c) &&
           plan_set(p, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first) &&
           plan_set(p, CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof second) && plan_set_alpha(p) &&
           plan_set_modes(p, at) && plan_set_epilogue(p, at);
}

/* Declares an address's alignment: 16 bytes, or one element. Never more, so that the algorithm does
 * not depend on where the allocator happened to place an array. */
inline bool prefer_aligned(cublasLtMatmulPreference_t p, cublasLtMatmulPreferenceAttributes_t what,
    bool aligned, int32_t dtype) {
    uint32_t bytes = aligned ? 16 : (uint32_t)dtype_bytes((mixp_dtype)dtype);
    return cublasLtMatmulPreferenceSetAttribute(p, what, &bytes, sizeof bytes) ==
           CUBLAS_STATUS_SUCCESS;
}

inline bool prefer_all(cublasLtMatmulPreference_t p, const PlanKey &key) {
    /* Partial sums of a split k are f32: in the workspace, or in c if c is f32. cuBLASLt adds the
     * parts in c in order (counters in the workspace). */
    uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    if (key.dtype_c == MIXP_F32) reductions |= CUBLASLT_REDUCTION_SCHEME_INPLACE;

    /* cuBLASLt's A is our b. */
    const int off = key.flags;
    return cublasLtMatmulPreferenceSetAttribute(p, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
               &workspace_bytes, sizeof workspace_bytes) == CUBLAS_STATUS_SUCCESS &&
           cublasLtMatmulPreferenceSetAttribute(p, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
               &reductions, sizeof reductions) == CUBLAS_STATUS_SUCCESS &&
           prefer_aligned(
               p, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, !(off & unaligned_b), key.dtype_b) &&
           prefer_aligned(
               p, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, !(off & unaligned_a), key.dtype_a) &&
           prefer_aligned(
               p, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, !(off & unaligned_c), key.dtype_c) &&
           prefer_aligned(
               p, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, !(off & unaligned_c), key.dtype_c);
}

/* Does the status mean that cuBLASLt does not support this product? Any other error may be
 * temporary. */
inline bool is_refusal(cublasStatus_t e) {
    return e == CUBLAS_STATUS_NOT_SUPPORTED || e == CUBLAS_STATUS_INVALID_VALUE ||
           e == CUBLAS_STATUS_ARCH_MISMATCH;
}

/* Reports a failure. An earlier CUDA error, if any, is more precise than cuBLASLt's status. */
inline mixp_result report_failure(State *s, cublasStatus_t e) {
    cudaError_t before = cudaGetLastError();
    if (e == CUBLAS_STATUS_ALLOC_FAILED)
        return say(s, MIXP_ERR_MEMORY, "cuBLASLt", "out of memory");
    if (before != cudaSuccess) return report_error(s, before, "cuBLASLt");
    return say(s, MIXP_ERR_DEVICE, "cuBLASLt", cublasLtGetStatusString(e));
}

/* After a refusal by cuBLASLt, which is no error: clears the CUDA error that it left, unless there
 * was an error before. */
inline void clear_refusal(cudaError_t before) {
    if (before == cudaSuccess) cudaGetLastError();
}

inline bool is_usable(const Plan *p) { return p->at < p->count; }

/* Keeps the algorithms of cuBLASLt's list that fit the workspace, in the list's order. The first
 * that cuBLASLt then accepts computes every product of this kind. Timing chooses only if the
 * program asks for it, because timing would make two runs differ. */
inline void plan_keep(Plan *p, const cublasLtMatmulHeuristicResult_t *list, int found) {
    for (int i = 0; i < found; i++)
        if (list[i].state == CUBLAS_STATUS_SUCCESS && list[i].workspaceSize <= workspace_bytes)
            p->algorithms[p->count++] = list[i].algo;
}

inline mixp_result refuse_choice(State *s) {
    return say(s, MIXP_ERR_DEVICE, "gemm_choices",
        "cuBLASLt refuses an algorithm in this text; omit gemm_choices, run a step, and save the "
        "text again");
}

/* Does cuBLASLt accept the algorithm of this choice, for this product and in our workspace? */
inline mixp_result choice_check(State *s, const Plan *p, const Choice &c) {
    cublasLtMatmulHeuristicResult_t about;
    const cudaError_t before = cudaPeekAtLastError();
    cublasStatus_t e =
        cublasLtMatmulAlgoCheck(s->lt, p->product, p->b, p->a, p->c, p->c, &c.algorithm, &about);
    if (e != CUBLAS_STATUS_SUCCESS && !is_refusal(e)) return report_failure(s, e);
    if (e == CUBLAS_STATUS_SUCCESS && about.workspaceSize <= workspace_bytes) return MIXP_OK;
    clear_refusal(before);
    return refuse_choice(s);
}

/* Uses the algorithm that the program's choices name for this product. If they name none, p->given
 * stays false. */
inline mixp_result plan_take(State *s, Plan *p) {
    for (int i = 0; i < s->choice_count; i++) {
        const Choice &c = s->choices[i];
        if (memcmp((const void *)&c.key, (const void *)&p->key, sizeof c.key) != 0) continue;
        p->algorithms[0] = c.algorithm;
        p->count = !c.none;
        p->given = true;
        return c.none ? MIXP_OK : choice_check(s, p, c);
    }
    return MIXP_OK;
}

inline mixp_result plan_ask(State *s, Plan *p) {
    /* Ask cuBLASLt's heuristic for algorithms. */
    const cudaError_t before = cudaPeekAtLastError();
    cublasLtMatmulPreference_t preference = NULL;
    cublasLtMatmulHeuristicResult_t list[most_algorithms];
    int found = 0;
    cublasStatus_t e = cublasLtMatmulPreferenceCreate(&preference);
    if (e == CUBLAS_STATUS_SUCCESS && !prefer_all(preference, p->key))
        e = CUBLAS_STATUS_ALLOC_FAILED;
    if (e == CUBLAS_STATUS_SUCCESS)
        e = cublasLtMatmulAlgoGetHeuristic(
            s->lt, p->product, p->b, p->a, p->c, p->c, preference, most_algorithms, list, &found);
    if (preference) cublasLtMatmulPreferenceDestroy(preference);
    if (e != CUBLAS_STATUS_SUCCESS && !is_refusal(e)) return report_failure(s, e);

    /* Keep those that fit. A plan without any is no error. */
    if (e == CUBLAS_STATUS_SUCCESS) plan_keep(p, list, found);
    if (!is_usable(p)) clear_refusal(before);
    return MIXP_OK;
}

inline mixp_result plan_choose(State *s, Plan *p) {
    mixp_result r = plan_take(s, p);
    return r != MIXP_OK || p->given ? r : plan_ask(s, p);
}

/* A new plan, in the list that its key belongs to. */
inline mixp_result plan_new(State *s, const PlanKey &key, Plan **made) {
    /* cuBLASLt 13.3 has no heuristics during a capture, and a recorded step has run before. */
    if (s->capture) return refuse_in_capture(s, "a product of a shape that no step had before");
    mixp_result r = MIXP_OK;
    if (key.flags & alpha_on_device)
        r = report_error(s, MIXPI_LAUNCH(set_betas, 1, 1, 0, s->stream, s->block->betas), "gemm");
    if (r != MIXP_OK) return r;
    if (s->plans->count >= most_plans) plans_clear(s);
    Plan *p = (Plan *)host_new(s->host, sizeof *p);
    if (!p) return say(s, MIXP_ERR_MEMORY, "gemm", "out of memory");

    /* Describe the product. A bias is aligned to only 16 bytes; the workspace's own address would
     * promise more. */
    p->key = key;
    r = plan_describe(p, (char *)s->workspace + 16)
            ? plan_choose(s, p)
            : say(s, MIXP_ERR_MEMORY, "gemm", "out of memory");
    if (r != MIXP_OK) {
        plan_free(s, p);
        return r;
    }

    /* Keep the plan in the list of its key. */
    const unsigned list = plan_list(key);
    p->next = s->plans->first[list];
    s->plans->first[list] = *made = p;
    s->plans->count++;
    return MIXP_OK;
}

inline mixp_result plan_of(State *s, const Product &product, Plan **found) {
    if (!s->plans) {
        s->plans = (Plans *)host_new(s->host, sizeof *s->plans);
        s->free_plans = plans_free;
        if (!s->plans) return say(s, MIXP_ERR_MEMORY, "gemm", "out of memory");
    }
    const PlanKey key = plan_key(product);
    for (Plan *p = s->plans->first[plan_list(key)]; p; p = p->next)
        if (memcmp((const void *)&p->key, (const void *)&key, sizeof key) == 0) {
            *found = p;
            return MIXP_OK;
        }
    return plan_new(s, key, found);
}

/* --- a call ---------------------------------------------------------------------------- */

/* Packs an operand into scratch memory, and points `to` at the copy. */
inline mixp_result pack_operand(
    Kernel *k, const Matrix &from, mixp_in *to, int64_t ld, void *copy) {
    mixp_out out = { copy, to->dtype, 0 };
    Matrix dst = from;
    to->data = copy;
    dst.at = *to;
    dst.ld = ld;
    dst.stride = from.rows * ld;
    return k->report("gemm", MIXPI_LAUNCH(gemm_pack, grid_for(dst.count * dst.rows * ld / 8, 256),
                                 256, 0, k->stream, out, dst, from, has_aligned_rows(from)));
}

inline mixp_result product_pack(Kernel *k, const mixp_gemm_args &g, Product *p, char *scratch) {
    mixp_result r = MIXP_OK;
    if (p->pack_a) r = pack_operand(k, matrix_a(g), &p->g.a, p->g.lda, scratch + p->at_a);
    if (p->pack_b && r == MIXP_OK)
        r = pack_operand(k, matrix_b(g), &p->g.b, p->g.ldb, scratch + p->at_b);
    if (p->pack_bias && r == MIXP_OK)
        r = pack_operand(k, matrix_bias(g), &p->g.bias, round_up(g.n, 8), scratch + p->at_bias);
    if (p->finish) p->g.c.data = scratch + p->at_c;
    return r;
}

/* Sets the addresses of this call's bias or sums, of the values before GELU, and of scales. */
inline bool product_point(const Product &p, Plan *plan) {
    const void *vector = p.sums ? p.sums : p.g.bias.data;
    return plan_set_scales(plan, p.scales_a, p.scales_b) &&
           (!has_vector(p.epilogue) ||
               plan_set(plan, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &vector, sizeof vector)) &&
           (!has_before(p.epilogue) || plan_set(plan, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER,
                                           &p.before, sizeof p.before));
}

/* Runs the product with the plan's algorithm `which`. */
inline cublasStatus_t product_call(Kernel *k, const Product &p, Plan *plan, int which) {
    State *s = k->state;
    const mixp_gemm_args &g = p.g;
    float one = g.c.accumulate ? 1.0f : 0.0f;
    const float *alpha = g.alpha_at ? g.alpha_at : &g.alpha;
    const float *beta = g.alpha_at ? &s->block->betas[g.c.accumulate != 0] : &one;
    return cublasLtMatmul(s->lt, plan->product, alpha, g.b.data, plan->b, g.a.data, plan->a, beta,
        g.c.data, plan->c, g.c.data, plan->c, &plan->algorithms[which], s->workspace,
        workspace_bytes, k->stream);
}

/* Runs the product. If cuBLASLt refuses an algorithm that it offered, drops the algorithm for good
 * and tries the next of the list. When the list is exhausted, the plan is unusable. */
inline mixp_result product_run(Kernel *k, const Product &p, Plan *plan) {
    State *s = k->state;
    cudaError_t before = cudaPeekAtLastError();
    cublasStatus_t e = product_point(p, plan) ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
    for (; e == CUBLAS_STATUS_SUCCESS && is_usable(plan); plan->at++) {
        e = product_call(k, p, plan, plan->at);
        if (e == CUBLAS_STATUS_SUCCESS) return MIXP_OK;
        if (!is_refusal(e)) return report_failure(s, e);

        /* Go on to the next algorithm, unless the program has chosen this one. */
        clear_refusal(before);
        if (plan->given) return refuse_choice(s);
        e = CUBLAS_STATUS_SUCCESS;
    }
    plan->at = plan->count;
    return MIXP_OK;
}

}   /* namespace */
