#pragma once
#include "recipes.cu"
#include "gemm.cu"
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
    const int64_t across = e.cols / e.how.block_cols;
    return e.how.scales[row / e.how.block_rows * across + col / e.how.block_cols];
}

/* Inf, which only MXFP8 has, becomes NaN: e4m3 has no Inf, and its largest value would hide it. */
__device__ inline uint32_t narrow_code(mixp_dtype element, float x) {
    return element == MIXP_F4_E2M1 ? mixpi_e2m1_code(x)
                                   : mixpi_round_f32(element, mixp_bits_of_f32(x), 0, 0, 0);
}

/* Each thread encodes 16 elements along the sum. Neighbouring threads read neighbours in y. */
__global__ void __launch_bounds__(encode_threads) narrow_codes(const __grid_constant__ Encoding e) {
    const int64_t outer = outer_of(e), sum = sum_of(e), n = outer * sum / codes_each;
    int64_t step = e.over_rows ? e.cols : 1;
    const bool four = e.how.element == MIXP_F4_E2M1;
    int64_t t = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (; t < n; t += (int64_t)gridDim.x * blockDim.x) {
        /* Find the thread's elements, which are under one scale. */
        const int64_t o = e.over_rows ? t % outer : t / (sum / codes_each);
        const int64_t s = (e.over_rows ? t / outer : t % (sum / codes_each)) * codes_each;
        const int64_t at = e.over_rows ? s * e.cols + o : o * e.cols + s;
        float scale = e.how.scales ? mixpi_scale_of_code(e.how.scale, scale_at(e, o, s)) : 1.0f;

        /* Pack their codes, of 4 bits or 8. */
        uint32_t bytes[4] = {}, halves[2] = {};
        MIXPI_UNROLL
        for (int i = 0; i < codes_each; i++) {
            uint32_t code =
                narrow_code(e.how.element, get1(mixpi_in(e.y, MIXP_BF16), at + i * step) / scale);
            if (four) halves[i / 8] |= code << i % 8 * 4;
            else bytes[i / 4] |= code << i % 4 * 8;
        }

        /* Store them at once. */
        int64_t to = o * sum + s;
        if (four) *(uint2 *)(void *)(e.codes + to / 2) = make_uint2(halves[0], halves[1]);
        else *(uint4 *)(void *)(e.codes + to) = make_uint4(bytes[0], bytes[1], bytes[2], bytes[3]);
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
    if (m.at.dtype != MIXP_BF16 || m.ld != m.cols || sum_of(e) % codes_each) return false;
    if (e.how.scale == MIXP_SCALE_TENSOR) return e.how.element != MIXP_F4_E2M1;
    return e.how.scales && e.mode && m.rows % e.how.block_rows == 0 &&
           m.cols % e.how.block_cols == 0;
}

inline Encoding encoding_of(const Matrix &m, const mixp_narrow &how, bool over_rows) {
    Encoding e = { (const mixp_bf16 *)m.at.data, how, m.rows, m.cols, over_rows, 0, NULL, NULL };
    e.mode = mode_of(e);
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

/* Writes the operand's codes and scales to *room, and moves *room behind them. */
inline mixp_result encode(Kernel *k, Encoding *e, char **room) {
    e->codes = (uint8_t *)*room;
    e->scales = e->mode ? *room + codes_room(*e) : NULL;
    *room += codes_room(*e) + scales_room(*e);
    const unsigned grid = grid_for(e->rows * e->cols / codes_each, encode_threads);
    mixp_result r =
        k->report("gemm", MIXPI_LAUNCH(narrow_codes, grid, encode_threads, 0, k->stream, *e));
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
inline mixp_result run_codes(Kernel *k, Product p, Plan *plan, Encoding *a, Encoding *b,
                             char *room) {
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
inline mixp_result try_codes(const mixp_exec *x, Kernel *k, const mixp_gemm_narrow_args &n,
                             bool *done) {
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
