#pragma once
#include "recipes.cu"
#include "gemm_measuring.cu"
/* --- narrow products ---------------------------------------------------------------------- *
 *
 * cuBLASLt multiplies fp8 and fp4 codes. Kernels write the codes of the quantised bf16 values to
 * scratch memory, so that the sum runs along the rows: the only layout that every GPU takes. The
 * scales of blocks are written in cuBLASLt's order. A product that cuBLASLt refuses stays a bf16
 * product.
 */
namespace {

const int encode_threads = 256;
const int64_t codes_each = 16;  /* elements of a thread: along the sum, in one block         */

/* One operand: y[rows, cols] becomes codes[outer, sum]. over_rows: the sum runs over rows. */
struct Encoding {
    const mixp_bf16 *y;
    mixp_narrow      how;
    int64_t          rows, cols;
    bool             over_rows;
    int32_t          mode;          /* cuBLASLt's mode of its scales; 0: it needs none       */
    uint8_t         *codes;
    void            *scales;
    uint64_t         per_row;       /* inverse of the threads of a row of y: see over()      */
    uint64_t         per_block[2];  /* inverses of block_rows and block_cols                 */
};

__host__ __device__ inline int64_t outer_of(const Encoding &e) {
    return e.over_rows ? e.cols : e.rows;
}
__host__ __device__ inline int64_t sum_of(const Encoding &e) {
    return e.over_rows ? e.rows : e.cols;
}

/* The code of the scale at place s of the sum. */
__device__ inline uint8_t scale_at(const Encoding &e, int64_t outer, int64_t s) {
    int64_t row = e.over_rows ? s : outer, col = e.over_rows ? outer : s;
    const int64_t across = over(e.cols, e.how.block_cols, e.per_block[1]);
    return e.how.scales[over(row, e.how.block_rows, e.per_block[0]) * across +
                        over(col, e.how.block_cols, e.per_block[1])];
}

/* Stores the codes of 16 values v, which share one scale, from element `to` on: 4 bits each, or
 * 8. Scales of fp8 are powers of two. Inf, which only MXFP8 has, becomes NaN: e4m3 has no Inf, and
 * its largest value would hide it. */
__device__ inline void encode16(const Encoding &e, int64_t to, float *v, uint8_t scale) {
    if (e.how.element == MIXP_F4_E2M1) {
        const float s = mixpi_scale_of_code(e.how.scale, scale);
        uint32_t halves[2] = {};
        MIXPI_UNROLL
        for (int i = 0; i < codes_each; i++) halves[i / 8] |= e2m1_code_of(v[i], s) << i % 8 * 4;
        *(uint2 *)(void *)(e.codes + to / 2) = make_uint2(halves[0], halves[1]);
        return;
    }

    uint32_t bytes[4];
    const float in = e.how.scales ? inverse_scale_of_code(e.how.scale, scale) : 1.0f;
    MIXPI_UNROLL
    for (int i = 0; i < codes_each; i++) v[i] = __fmul_rn(v[i], in);
    if (e.how.element == MIXP_F8_E5M2) fp8_codes<MIXP_F8_E5M2, 4>(v, false, bytes);
    else fp8_codes<MIXP_F8_E4M3, 4>(v, false, bytes);
    *(uint4 *)(void *)(e.codes + to) = make_uint4(bytes[0], bytes[1], bytes[2], bytes[3]);
}

/* The sum runs along the rows of y, so y and the codes have the same order. Each thread encodes 16
 * elements. */
__global__ void __launch_bounds__(encode_threads)
    narrow_codes_along(const __grid_constant__ Encoding e) {
    const int64_t n = e.rows * e.cols / codes_each, each_row = e.cols / codes_each;
    int64_t t = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (; t < n; t += (int64_t)gridDim.x * blockDim.x) {
        float v[codes_each];
        plain_get8<MIXP_BF16>(e.y, t * codes_each, v);
        plain_get8<MIXP_BF16>(e.y, t * codes_each + 8, v + 8);

        /* Find the scale of the elements. */
        uint8_t scale = 0;
        if (e.how.scales) {
            const int64_t row = over(t, each_row, e.per_row);
            scale = scale_at(e, row, (t - row * each_row) * codes_each);
        }
        encode16(e, t * codes_each, v, scale);
    }
}

/* The sum runs down the columns of y. Each thread encodes 16 rows of two columns, which it reads at
 * once. Neighbouring threads read neighbours in y. */
__global__ void __launch_bounds__(encode_threads)
    narrow_codes_across(const __grid_constant__ Encoding e) {
    const int64_t across = e.cols / 2, n = across * (e.rows / codes_each);
    int64_t t = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (; t < n; t += (int64_t)gridDim.x * blockDim.x) {
        const int64_t strip = over(t, across, e.per_row), o = (t - strip * across) * 2;
        const int64_t s = strip * codes_each;
        uint32_t pairs[codes_each];
        MIXPI_UNROLL
        for (int i = 0; i < codes_each; i++)
            pairs[i] = *(const uint32_t *)(const void *)(e.y + (s + i) * e.cols + o);

        /* Encode the columns one after the other; the first is in the lower halves. */
        for (int c = 0; c < 2; c++) {
            float v[codes_each];
            MIXPI_UNROLL
            for (int i = 0; i < codes_each; i++)
                v[i] = mixp_f32_of_bits(c ? pairs[i] & 0xFFFF0000u : pairs[i] << 16);
            encode16(e, (o + c) * e.rows + s, v, e.how.scales ? scale_at(e, o + c, s) : (uint8_t)0);
        }
    }
}

/* --- the order of scales in memory ---
 * Source: cuBLAS documentation, the sections on the layouts of block scaling factors. */

/* Blocks of 16 or 32: bytes, in tiles of 128 x 4; in a tile, rows 32 apart are neighbours. */
const int64_t tile_outer = 128, tile_blocks = 4;

/* A mode that cuBLASLt's header does not have is 0. */
inline bool is_in_tiles(int32_t mode) {
    return mode && (mode == scales_of_16 || mode == scales_of_32);
}

/* Writes the tiles, with 0 beyond the operand. block: elements of the sum under one scale. */
__global__ void __launch_bounds__(encode_threads)
    narrow_tiles(const __grid_constant__ Encoding e, int64_t block) {
    int64_t outer = outer_of(e), blocks = sum_of(e) / block;
    int64_t across = ceil_div(blocks, tile_blocks), size = tile_outer * tile_blocks;
    int64_t n = ceil_div(outer, tile_outer) * across * size;
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i < n; i += (int64_t)gridDim.x * blockDim.x) {
        int64_t in = i % size, tile = i / size;
        int64_t o = tile / across * tile_outer + in / 4 % 4 * 32 + in / 16;
        int64_t b = tile % across * tile_blocks + in % 4;
        bool there = o < outer && b < blocks;
        ((uint8_t *)e.scales)[i] = there ? scale_at(e, o, b * block) : (uint8_t)0;
    }
}

/* Writes the scales of blocks of 128, as f32. Blocks of one row: all rows for the first block of
 * the sum, then for the second, and so on. Squares: for each 128 rows all blocks of the sum, padded
 * to a multiple of 4. */
__global__ void __launch_bounds__(encode_threads)
    narrow_floats(const __grid_constant__ Encoding e, bool squares) {
    int64_t rows = squares ? outer_of(e) / 128 : outer_of(e), blocks = sum_of(e) / 128;
    int64_t pitch = round_up(blocks, 4), n = squares ? rows * pitch : rows * blocks;
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i < n; i += (int64_t)gridDim.x * blockDim.x) {
        int64_t o = squares ? i / pitch * 128 : i % rows, b = squares ? i % pitch : i / rows;
        ((float *)e.scales)[i] =
            b < blocks ? mixpi_scale_of_code(e.how.scale, scale_at(e, o, b * 128)) : 0.0f;
    }
}

/* --- a call --- */

/* The mode of an operand's scales; 0: one scale for the array, or cuBLASLt has no such mode. */
inline int32_t mode_of(const Encoding &e) {
    int64_t along = e.over_rows ? e.how.block_rows : e.how.block_cols;
    int64_t across = e.over_rows ? e.how.block_cols : e.how.block_rows;
    bool four = e.how.element == MIXP_F4_E2M1;
    if (cublasLtGetVersion() < 120800) return 0;
    if (e.how.scale == MIXP_SCALE_E4M3) return four && along == 16 ? scales_of_16 : 0;
    if (e.how.scale == MIXP_SCALE_E8M0) return !four && along == 32 ? scales_of_32 : 0;
    if (e.how.scale != MIXP_SCALE_POWER || four || along != 128) return 0;
    if (cublasLtGetVersion() < 120900) return 0;
    return across == 128 ? scales_of_squares : across == 1 ? scales_of_128 : 0;
}

/* Can the kernels turn the operand into codes? */
inline bool is_encodable(const Encoding &e, const Matrix &m) {
    if (m.at.dtype != MIXP_BF16 || m.ld != m.cols || !is_wide(m.at)) return false;
    if (sum_of(e) % codes_each || outer_of(e) % 2) return false;
    if (e.how.scale == MIXP_SCALE_TENSOR) return e.how.element != MIXP_F4_E2M1;
    return e.how.scales && e.mode && m.rows % e.how.block_rows == 0 &&
           m.cols % e.how.block_cols == 0;
}

inline Encoding encoding_of(const Matrix &m, const mixp_narrow &how, bool over_rows) {
    Encoding e;
    memset((void *)&e, 0, sizeof e);
    e.y = (const mixp_bf16 *)m.at.data;
    e.how = how;
    e.rows = m.rows;
    e.cols = m.cols;
    e.over_rows = over_rows;
    e.mode = mode_of(e);
    e.per_row = inverse_of(e.cols / (over_rows ? 2 : codes_each));
    e.per_block[0] = inverse_of(how.block_rows);
    e.per_block[1] = inverse_of(how.block_cols);
    return e;
}

/* Bytes for the codes; a multiple of 256, so that what follows is aligned. */
inline size_t codes_room(const Encoding &e) {
    int64_t n = e.rows * e.cols;
    return (size_t)round_up(e.how.element == MIXP_F4_E2M1 ? n / 2 : n, 256);
}

/* Bytes for the scales, a multiple of 256; 0 where one scale is the product's alpha. */
inline size_t scales_room(const Encoding &e) {
    if (!e.mode) return 0;
    const int64_t blocks = sum_of(e) / (e.over_rows ? e.how.block_rows : e.how.block_cols);
    if (is_in_tiles(e.mode))
        return (size_t)(round_up(outer_of(e), tile_outer) * round_up(blocks, tile_blocks));
    return (size_t)round_up(outer_of(e) * round_up(blocks, 4) * 4, 256);
}

/* Writes the operand's scales in the order of their mode. */
inline mixp_result lay_scales(Kernel *k, const Encoding &e) {
    if (!e.mode) return MIXP_OK;
    const bool tiles = is_in_tiles(e.mode);
    const unsigned grid = grid_for((int64_t)scales_room(e) / (tiles ? 1 : 4), encode_threads);
    if (tiles)
        return k->report("gemm", MIXPI_LAUNCH(narrow_tiles, grid, encode_threads, 0, k->stream, e,
                                     e.mode == scales_of_16 ? (int64_t)16 : 32));
    return k->report("gemm", MIXPI_LAUNCH(narrow_floats, grid, encode_threads, 0, k->stream, e,
                                 e.mode == scales_of_squares));
}

/* Writes the operand's codes and scales to *room, and moves *room past them. */
inline mixp_result encode(Kernel *k, Encoding *e, char **room) {
    e->codes = (uint8_t *)*room;
    e->scales = e->mode ? *room + codes_room(*e) : NULL;
    *room += codes_room(*e) + scales_room(*e);
    const int64_t each = codes_each * (e->over_rows ? 2 : 1);
    const unsigned grid = grid_for(e->rows * e->cols / each, encode_threads);
    const mixp_result r =
        k->report("gemm", MIXPI_LAUNCH(e->over_rows ? narrow_codes_across : narrow_codes_along,
                              grid, encode_threads, 0, k->stream, *e));
    return r == MIXP_OK ? lay_scales(k, *e) : r;
}

/* The product of the codes, for cuBLASLt. run_codes sets the addresses of codes and scales. */
inline Product product_of_codes(const mixp_gemm_args &g, const Encoding &a, const Encoding &b) {
    Product p;
    memset((void *)&p, 0, sizeof p);
    p.g = g;
    p.g.a = mixpi_in(NULL, a.how.element);
    p.g.b = mixpi_in(NULL, b.how.element);
    p.g.trans_a = 0;
    p.g.trans_b = 1;
    p.g.lda = p.g.ldb = g.k;
    p.mode_a = a.mode;
    p.mode_b = b.mode;
    p.epilogue = g.bias.data ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
    return p;
}

/* Can cuBLASLt write the result, and add the bias? */
inline bool is_writable(const mixp_gemm_args &g) {
    if (g.batch != 1 || g.m <= 0 || g.n <= 0 || g.k <= 0) return false;
    if (g.alpha == 0.0f && !g.alpha_at) return false;
    if (!is_wide(as_in(g.c)) || g.ldc < g.n) return false;
    if (g.bias.data) return g.c.dtype == MIXP_BF16 && g.bias.dtype == MIXP_BF16 && is_wide(g.bias);
    return g.c.dtype == MIXP_BF16 || g.c.dtype == MIXP_F32;
}

/* Encodes both operands in room, and multiplies their codes. */
inline mixp_result run_codes(
    Kernel *k, Product p, Plan *plan, Encoding *a, Encoding *b, char *room) {
    mixp_result r = encode(k, a, &room);
    if (r == MIXP_OK) r = encode(k, b, &room);
    p.g.a.data = a->codes;
    p.g.b.data = b->codes;
    p.scales_a = a->scales;
    p.scales_b = b->scales;
    if (r == MIXP_OK) r = product_measure(k, p, plan);
    return r == MIXP_OK ? product_run(k, p, plan) : r;
}

/* Sets *done if cuBLASLt multiplied the codes. */
inline mixp_result try_codes(
    const mixp_exec *x, Kernel *k, const mixp_gemm_narrow_args &n, bool *done) {
    Encoding a = encoding_of(matrix_a(n.gemm), n.a, n.gemm.trans_a != 0);
    Encoding b = encoding_of(matrix_b(n.gemm), n.b, n.gemm.trans_b == 0);
    if (!is_writable(n.gemm) || !is_encodable(a, matrix_a(n.gemm)) ||
        !is_encodable(b, matrix_b(n.gemm)))
        return MIXP_OK;

    /* Ask cuBLASLt for a plan of the product of the codes. */
    const Product p = product_of_codes(n.gemm, a, b);
    Plan *plan = NULL;
    mixp_result r = open_products(k->state);
    if (r == MIXP_OK) r = plan_of(k->state, p, &plan);
    if (r != MIXP_OK || !is_usable(plan)) return r;

    /* Encode both operands, and multiply. */
    char *room =
        (char *)scratch_of(x, codes_room(a) + scales_room(a) + codes_room(b) + scales_room(b));
    if (!room) return MIXP_ERR_MEMORY;
    r = run_codes(k, p, plan, &a, &b, room);
    *done = r == MIXP_OK && is_usable(plan);
    return r;
}

}   /* namespace */

static mixp_result mixpi_cuda_gemm_narrow(const mixp_exec *x, const mixp_gemm_narrow_args *n) {
    Kernel k(x);
    if (!k.state) return MIXP_ERR_ORDER;
    bool done = false;
    mixp_result r = try_codes(x, &k, *n, &done);
    if (r != MIXP_OK) return r;
    if (!done) return mixpi_cuda_gemm(x, &n->gemm);
    k.state->products.narrow++;
    return MIXP_OK;
}
