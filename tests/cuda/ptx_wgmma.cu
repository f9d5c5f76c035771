/* ptx_wgmma.cu - products of a warpgroup on the interpreter. Tests only.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 *     ptx_wgmma products      products of every layout against a double loop; small: of 8 columns
 *     ptx_wgmma NAME          launches the kernel NAME, which has one fault
 *
 * tests/cuda/ptx.sh knows what must be said. Kernels whose name begins with "right" have no fault and
 * must end with "done". The host lays the matrices out by its own formula, place(), which follows the
 * figures of "Shared Memory Matrix Layout" in the PTX ISA: pieces of 16 bytes, permuted.
 */
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>
#include <cuda_runtime.h>

/* ---- instructions ----------------------------------------------------------------------- */

__device__ inline void fence_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ inline void fence_registers() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int n> __device__ inline void wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(n) : "memory");
}
__device__ inline unsigned shared_address(const void *p)
{ return (unsigned)__cvta_generic_to_shared(p); }

#define SUMS_0 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21," \
    "%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define SUMS_1 "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50," \
    "%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define SUMS_2 "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82," \
    "%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define SUMS_3 "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111," \
    "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126," \
    "%127"
#define OUT_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define OUT_32(i) OUT_4(i), OUT_4(i + 4), OUT_4(i + 8), OUT_4(i + 12), OUT_4(i + 16), OUT_4(i + 20), \
                  OUT_4(i + 24), OUT_4(i + 28)

/* N, the sums' names, their operands, then the names of up to six operands behind them. */
#define EACH_N(DO, ...)                                                                          \
    if constexpr (N == 8) DO("8", "%0,%1,%2,%3", (OUT_4(0)), "%4", "%5", "%6", "%7", "%8", "%9",  \
                             __VA_ARGS__);                                                       \
    if constexpr (N == 64) DO("64", SUMS_0, (OUT_32(0)), "%32", "%33", "%34", "%35", "%36",      \
                              "%37", __VA_ARGS__);                                               \
    if constexpr (N == 128) DO("128", SUMS_0 "," SUMS_1, (OUT_32(0), OUT_32(32)), "%64", "%65",   \
                               "%66", "%67", "%68", "%69", __VA_ARGS__);                         \
    if constexpr (N == 256) DO("256", SUMS_0 "," SUMS_1 "," SUMS_2 "," SUMS_3,                    \
                               (OUT_32(0), OUT_32(32), OUT_32(64), OUT_32(96)), "%128", "%129",  \
                               "%130", "%131", "%132", "%133", __VA_ARGS__)
#define PLAIN(...) __VA_ARGS__
#define IN_REGISTERS(N, SUMS, OUTS, P0, P1, P2, P3, P4, P5, TYPE, SCALES, TRANS)                 \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " P5 ", 0; wgmma.mma_async.sync.aligned.m64n" N   \
                 "k16.f32." TYPE " {" SUMS "}, {" P0 ", " P1 ", " P2 ", " P3 "}, " P4 ", p, "     \
                 SCALES ", " TRANS ";}"                                                          \
                 : PLAIN OUTS : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds)    \
                 : "memory")
#define IN_MEMORY(N, SUMS, OUTS, P0, P1, P2, P3, P4, P5, TYPE, SCALES, TRANS)                    \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " P2 ", 0; wgmma.mma_async.sync.aligned.m64n" N   \
                 "k16.f32." TYPE " {" SUMS "}, " P0 ", " P1 ", p, " SCALES ", " TRANS ";}"        \
                 : PLAIN OUTS : "l"(a), "l"(b), "r"(adds) : "memory")

/* scales: 0 is 1, 1; 1 is -1, 1; 2 is 1, -1. */
template <int N, bool bf16, bool across_b, int scales>
__device__ inline void product(float *d, const uint32_t *a, uint64_t b, int adds) {
    if constexpr (scales == 1) { EACH_N(IN_REGISTERS, "bf16.bf16", "-1, 1", "0"); }
    else if constexpr (scales == 2) { EACH_N(IN_REGISTERS, "bf16.bf16", "1, -1", "0"); }
    else if constexpr (bf16 && across_b) { EACH_N(IN_REGISTERS, "bf16.bf16", "1, 1", "1"); }
    else if constexpr (bf16) { EACH_N(IN_REGISTERS, "bf16.bf16", "1, 1", "0"); }
    else if constexpr (across_b) { EACH_N(IN_REGISTERS, "f16.f16", "1, 1", "1"); }
    else { EACH_N(IN_REGISTERS, "f16.f16", "1, 1", "0"); }
}
template <int N, bool bf16, bool across_a, bool across_b>
__device__ inline void product(float *d, uint64_t a, uint64_t b, int adds) {
    if constexpr (bf16 && across_a && across_b) { EACH_N(IN_MEMORY, "bf16.bf16", "1, 1", "1, 1"); }
    else if constexpr (bf16 && across_a) { EACH_N(IN_MEMORY, "bf16.bf16", "1, 1", "1, 0"); }
    else if constexpr (bf16 && across_b) { EACH_N(IN_MEMORY, "bf16.bf16", "1, 1", "0, 1"); }
    else if constexpr (bf16) { EACH_N(IN_MEMORY, "bf16.bf16", "1, 1", "0, 0"); }
    else if constexpr (across_a && across_b) { EACH_N(IN_MEMORY, "f16.f16", "1, 1", "1, 1"); }
    else if constexpr (across_a) { EACH_N(IN_MEMORY, "f16.f16", "1, 1", "1, 0"); }
    else if constexpr (across_b) { EACH_N(IN_MEMORY, "f16.f16", "1, 1", "0, 1"); }
    else { EACH_N(IN_MEMORY, "f16.f16", "1, 1", "0, 0"); }
}

/* ---- products of every layout ----------------------------------------------------------- */

/* Images of shared memory, what descriptors hold beside the address, and what they grow by with each
 * 16 elements of k. rows: a as 64 rows of K, for fragments. */
struct Job {
    const uint4 *image;
    int pieces, first_b, steps, adds;
    uint64_t a, b;
    int step_a, step_b;
    const uint16_t *rows;
    float *d;
};

enum Left { from_registers, from_memory, from_memory_across };

template <int N, bool bf16, Left left, bool across_b, int scales> __global__ void multiply(Job j) {
    extern __shared__ __align__(1024) uint4 shared[];
    float d[N / 2];
    int lane = threadIdx.x % 32, row = (int)threadIdx.x / 32 * 16 + lane / 4, K = 16 * j.steps;
    for (int p = threadIdx.x; p < j.pieces; p += 128) shared[p] = j.image[p];
    for (int r = 0; r < N / 2; r++)
        d[r] = j.adds ? j.d[(row + r % 4 / 2 * 8) * N + r / 4 * 8 + lane % 4 * 2 + r % 2] : NAN;
    uint64_t a = j.a | (shared_address(shared) >> 4), b = j.b | (shared_address(shared + j.first_b) >> 4);
    fence_proxy();
    __syncthreads();
    for (int s = 0; s < j.steps; s++) {
        uint32_t f[4];
        for (int r = 0; r < 4; r++)
            f[r] = *(const uint32_t *)(j.rows + (row + r % 2 * 8) * K + 16 * s + r / 2 * 8 + lane % 4 * 2);
        for (int r = 0; r < 4; r++) asm volatile("" : "+r"(f[r])::"memory");
        fence_registers();
        if constexpr (left == from_registers)
            product<N, bf16, across_b, scales>(d, f, b + s * (j.step_b / 16), j.adds || s);
        else
            product<N, bf16, left == from_memory_across, across_b>(d, a + s * (j.step_a / 16),
                                                                  b + s * (j.step_b / 16), j.adds || s);
        commit();
        wait<0>();
    }
    for (int r = 0; r < N / 2; r++)
        j.d[(row + r % 4 / 2 * 8) * N + r / 4 * 8 + lane % 4 * 2 + r % 2] = d[r];
}

/* A matrix of `rows` times K in shared memory: width 16 is without swizzle. */
struct Layout {
    int rows, K, width;
    bool across;
    int stride, leading;
};
/* The byte where an element lies. Of 8 lines of a pattern, line i has its pieces xor i, i / 2, i / 4. */
static int place(const Layout &l, int row, int k) {
    int permuted[] = { 0, 0, 4, 0, 2, 0, 0, 0, 1 }, divisor = permuted[l.width / 16];
    if (l.across && l.width == 16) return k / 8 * l.leading + row / 8 * l.stride + k % 8 * 16 + row % 8 * 2;
    if (l.width == 16) return k / 8 * l.leading + row / 8 * l.stride + row % 8 * 16 + k % 8 * 2;
    int line = l.across ? k % 8 : row % 8, at = l.across ? row % (l.width / 2) : k, piece = at / 8;
    int pattern = l.across ? k / 8 * l.stride + row / (l.width / 2) * l.leading : row / 8 * l.stride;
    return pattern + line * l.width + (piece ^ line / divisor) * 16 + at % 8 * 2;
}
/* gap: patterns stand apart. */
static Layout layout_of(int rows, int K, int width, bool across, bool gap) {
    Layout l = { rows, K, width, across, 0, 0 };
    int pattern = 8 * width * (gap ? 2 : 1), lines = across ? width / 2 : 8;
    if (width > 16 && !across) { l.stride = pattern; l.leading = 16; }
    else if (width > 16) { l.leading = pattern; l.stride = pattern * ((rows + lines - 1) / lines); }
    else { l.stride = gap ? 160 : 128; l.leading = l.stride * (rows / 8) + (gap ? 32 : 0); }
    return l;
}
static int bytes_of(const Layout &l) {
    int end = 0;
    for (int r = 0; r < l.rows; r++)
        for (int k = 0; k < l.K; k++) end = place(l, r, k) + 2 > end ? place(l, r, k) + 2 : end;
    return (end + 1023) / 1024 * 1024;
}
static int step_of(const Layout &l)
{ return l.width > 16 ? l.across ? 2 * l.stride : 32 : 2 * l.leading; }
static uint64_t descriptor_of(const Layout &l) {
    uint64_t mode = l.width == 128 ? 1 : l.width == 64 ? 2 : l.width == 32 ? 3 : 0;
    return mode << 62 | (uint64_t)(l.stride / 16) << 32 | (uint64_t)(l.leading / 16) << 16;
}

/* Eighths from -15/8 to 15/8: every product and sum is exact. */
static double value_at(int seed, int row, int k)
{ return ((row * 37 + k * 101 + seed * 13 + row * k * 7) % 31 - 15) / 8.0; }
/* An exact code of a multiple of 1/8 below 2. */
static uint16_t code_of(double x, bool bf16) {
    int e;
    if (x == 0.0) return 0;
    double m = std::frexp(std::fabs(x), &e) * 2.0 - 1.0;
    int bits = bf16 ? (e + 126) << 7 | (int)(m * 128) : (e + 14) << 10 | (int)(m * 1024);
    return (uint16_t)(bits | (x < 0 ? 0x8000 : 0));
}
template <class T> static T *on_gpu(const std::vector<T> &v) {
    T *p;
    cudaMalloc((void **)&p, v.size() * sizeof(T) + 16);
    cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice);
    return p;
}
static void fill(std::vector<uint16_t> &image, int from, const Layout &l, bool bf16, int seed) {
    for (int r = 0; r < l.rows; r++)
        for (int k = 0; k < l.K; k++)
            image[(size_t)(from + place(l, r, k)) / 2] = code_of(value_at(seed, r, k), bf16);
}

static int tests, failed;

/* What differs from the double loop. */
static int differing(const std::vector<float> &d, int N, int K, bool adds, int sign) {
    int n = 0;
    for (int r = 0; r < 64; r++)
        for (int c = 0; c < N; c++) {
            double sum = adds ? value_at(3, r, c) : 0.0;
            for (int k = 0; k < K; k++) sum += sign * value_at(1, r, k) * value_at(2, c, k);
            n += !(d[(size_t)(r * N + c)] == (float)sum);
        }
    return n;
}
template <int N, bool bf16, Left left, bool across_b, int scales = 0>
static void check(int width_a, int width_b, bool adds) {
    bool in_row_a = left == from_memory && width_a > 16, in_row_b = !across_b && width_b > 16;
    int K = 32;
    if (in_row_a && width_a / 2 < K) K = width_a / 2;
    if (in_row_b && width_b / 2 < K) K = width_b / 2;
    if ((!in_row_a || width_a == 128) && (!in_row_b || width_b == 128)) K = 64;
    Layout a = layout_of(64, K, width_a, left == from_memory_across, adds);
    Layout b = layout_of(N, K, width_b, across_b, adds);
    int first_b = bytes_of(a), bytes = first_b + bytes_of(b);
    std::vector<uint16_t> image((size_t)bytes / 2, 0x7FFF), rows(64 * (size_t)K);
    std::vector<float> d(64 * (size_t)N);
    fill(image, 0, a, bf16, 1);
    fill(image, first_b, b, bf16, 2);
    for (int r = 0; r < 64; r++)
        for (int k = 0; k < K; k++) rows[(size_t)(r * K + k)] = code_of(value_at(1, r, k), bf16);
    for (int r = 0; r < 64; r++)
        for (int c = 0; c < N; c++) d[(size_t)(r * N + c)] = (float)value_at(3, r, c);
    uint16_t *image_there = on_gpu(image), *rows_there = on_gpu(rows);
    float *d_there = on_gpu(d);
    Job j = { (const uint4 *)image_there, bytes / 16, first_b / 16, K / 16, adds, descriptor_of(a),
              descriptor_of(b), step_of(a), step_of(b), rows_there, d_there };
    auto kernel = multiply<N, bf16, left, across_b, scales>;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    kernel<<<1, 128, bytes>>>(j);
    cudaError_t e = cudaMemcpy(d.data(), d_there, d.size() * sizeof(float), cudaMemcpyDeviceToHost);
    int wrong = differing(d, N, K, adds, scales ? -1 : 1);
    tests++;
    failed += e || wrong;
    if (e || wrong)
        std::printf("N %d, %s, left %d, across %d, widths %d and %d, K %d, adds %d: %s, %d of %d differ\n", N,
                    bf16 ? "bf16" : "f16", left, across_b, width_a, width_b, K, adds,
                    cudaGetErrorString(e), wrong, 64 * N);
    cudaFree(image_there);
    cudaFree(rows_there);
    cudaFree(d_there);
}
static const int widths[] = { 16, 32, 64, 128 };

/* The layouts of b; those of a follow at another pace. */
template <int N, bool bf16, Left left, bool across_b> static void check_widths() {
    for (int i = 0; i < 4; i++) {
        check<N, bf16, left, across_b>(widths[(i + 1) % 4], widths[i], i % 2);
        check<N, bf16, left, across_b>(widths[(i + 2) % 4], widths[i], (i + 1) % 2);
        check<N, bf16, left, across_b>(widths[i], widths[i], i % 2);
    }
}
template <int N, bool bf16> static void check_layouts() {
    check_widths<N, bf16, from_registers, false>();
    check_widths<N, bf16, from_registers, true>();
    check_widths<N, bf16, from_memory, false>();
    check_widths<N, bf16, from_memory, true>();
    check_widths<N, bf16, from_memory_across, false>();
    check_widths<N, bf16, from_memory_across, true>();
}
template <int N> static void check_both() {
    check_layouts<N, true>();
    check_layouts<N, false>();
}
/* 1 + 16 terms of 1.5 2^-24 each. In the order of k each term rounds up; rough sums lose all of them. */
static void check_order() {
    Layout b = layout_of(8, 16, 128, false, false);
    std::vector<uint16_t> image(512, 0x3980), rows(64 * 16, 0x39C0);     /* 2^-12, 1.5 2^-12           */
    std::vector<float> d(64 * 8, 1.0f);
    uint16_t *image_there = on_gpu(image), *rows_there = on_gpu(rows);
    float *d_there = on_gpu(d), expected = 1.0f;
    Job j = { (const uint4 *)image_there, 64, 0, 1, 1, 0, descriptor_of(b), 0, 0, rows_there, d_there };
    for (int k = 0; k < 16 && !getenv("PTX_ROUGH"); k++) expected += 1.5f / (1 << 24);
    multiply<8, true, from_registers, false, 0><<<1, 128, 1024>>>(j);
    cudaMemcpy(d.data(), d_there, d.size() * sizeof(float), cudaMemcpyDeviceToHost);
    int wrong = 0;
    for (float x : d) wrong += x != expected;
    tests++;
    failed += wrong != 0;
    if (wrong) std::printf("sums in another order: %.9g, not %.9g\n", d[0], expected);
}
static void check_larger() {
    check_both<64>();
    check_both<128>();
    check_both<256>();
}
static int check_products(bool all) {
    check_both<8>();
    if (all) check_larger();
    check<8, true, from_registers, false, 1>(16, 128, true);
    check<8, true, from_registers, false, 2>(16, 128, true);
    check_order();
    std::printf("%d products, %d wrong\n", tests, failed);
    return failed != 0;
}

/* ---- kernels with one fault each --------------------------------------------------------- */

enum Fault { none, no_proxy_fence, late_proxy_fence, copied, no_barrier, early_sums, early_write, early_factor,
             no_register_fence, late_factor, late_sums, overwritten, other_columns, missing_warp, missing_wait,
             two_descriptors, lane_descriptors, misaligned, leaves_row, beyond, stride, base_offset, unknown_bits,
             unwritten, left_behind, few_warps };

/* b: 8 rows of 64, swizzled by 128 bytes: one pattern. */
__device__ inline uint64_t describe(const void *p)
{ return (uint64_t)1 << 62 | (uint64_t)64 << 32 | (uint64_t)1 << 16 | shared_address(p) >> 4; }

__device__ inline void write_pattern(uint4 *shared, const float *from, bool copied) {
    if (threadIdx.x >= 64) return;
    if (!copied) { shared[threadIdx.x] = uint4{ 0, 0, 0, 0 }; return; }
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared + threadIdx.x)),
                 "l"(from + 4 * threadIdx.x) : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
    asm volatile("cp.async.wait_group 0;" ::: "memory");
}
template <int fault> __global__ void one(float *y) {
    extern __shared__ __align__(1024) uint4 shared[];
    float d[32] = {}, e[4] = {};
    int warp = threadIdx.x / 32;
    uint32_t a[4];
    for (int r = 0; r < 4; r++) a[r] = __float_as_uint(y[threadIdx.x + r]) * 3;
    for (int r = 0; r < 4; r++) asm volatile("" : "+r"(a[r])::"memory");
    if (fault != unwritten) write_pattern(shared, y, fault == copied);
    if (fault != no_proxy_fence && fault != late_proxy_fence && fault != copied) fence_proxy();
    if (fault != no_barrier) __syncthreads();
    if (fault == late_proxy_fence) fence_proxy();
    uint64_t b = describe(shared);
    if (fault == two_descriptors && warp == 2) b += 2;
    if (fault == lane_descriptors && threadIdx.x % 32 == 7) b += 2;
    if (fault == misaligned) b += 16;
    if (fault == leaves_row) b += 7;
    if (fault == beyond) b += 128;
    if (fault == base_offset) b |= (uint64_t)1 << 49;
    if (fault == unknown_bits) b |= (uint64_t)1 << 46;
    if (fault == stride) b ^= (uint64_t)32 << 32;
    if (fault != no_register_fence) fence_registers();
    if (fault == late_factor)
        asm volatile("add.u32 %0, %0, 1;" : "+r"(a[1])::"memory");
    if (fault == late_sums)
        asm volatile("add.f32 %0, %0, %0;" : "+f"(d[1])::"memory");
    if (fault == missing_warp && warp == 3) { y[threadIdx.x] = 1; return; }
    if (fault == stride) product<64, true, true, 0>(d, a, b, 1);
    else product<8, true, false, 0>(d, a, b, 1);
    if (fault == other_columns) product<64, true, false, 0>(d, a, b, 1);
    commit();
    if (fault == early_write) asm volatile("mov.f32 %0, 0f3F800000;" : "+f"(d[2])::"memory");
    if (fault == early_factor) asm volatile("add.u32 %0, %0, 1;" : "+r"(a[1])::"memory");
    if (fault == overwritten) {
        __syncthreads();
        if (threadIdx.x < 64) shared[threadIdx.x] = uint4{ 0, 0, 0, 0 };
    }
    product<8, true, false, 0>(e, a, b, 0);
    commit();
    if (fault == none || fault == missing_wait) {
        wait<1>();
        y[threadIdx.x] = d[0];
    }
    if (fault == early_sums) y[threadIdx.x] = e[0];
    if (fault != left_behind && fault != missing_wait) wait<0>();
    __syncthreads();
    if (fault == none && threadIdx.x < 64) shared[threadIdx.x] = uint4{ 1, 1, 1, 1 };
    y[threadIdx.x] = d[0] + d[1] + d[2] + d[3] + (fault == left_behind ? 0 : e[0] + a[1]);
}
/* Rows of a in memory that only their warp writes: no barrier is needed. */
template <bool met> __global__ void own_rows(float *y) {
    extern __shared__ __align__(1024) uint4 shared[];
    float d[4] = {};
    write_pattern(shared, y, false);
    fence_proxy();
    __syncthreads();
    for (int i = 0; i < 2; i++) {
        for (int p = 0; p < 4; p++) shared[64 + threadIdx.x / 32 * 128 + p * 32 + threadIdx.x % 32] = uint4{};
        fence_proxy();
        if (met) __syncwarp();
        fence_registers();
        product<8, true, false, false>(d, describe(shared + 64), describe(shared), 1);
        commit();
        wait<0>();
    }
    y[threadIdx.x] = d[0];
}
/* Sums go from product to product in flight, while other products come and go. */
__global__ void right_chain(float *y) {
    extern __shared__ __align__(1024) uint4 shared[];
    float d[4] = {}, sum = 0;
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    for (int p = 0; p < 8; p++) write_pattern(shared + 64 * p, y, true);
    asm volatile("fence.proxy.async;" ::: "memory");
    __syncthreads();
    for (int i = 0; i < 5; i++) {
        float e[4];
        fence_registers();
        product<8, true, false, false>(e, describe(shared), describe(shared), 0);
        commit();
        product<8, true, false, false>(d, describe(shared) + 2, describe(shared) + 2, 1);
        commit();
        wait<1>();
        for (int r = 0; r < 4; r++) asm volatile("" : "+f"(e[r])::"memory");
        sum += e[0] + e[3];
    }
    wait<0>();
    for (int r = 0; r < 4; r++) asm volatile("" : "+f"(d[r])::"memory");
    y[threadIdx.x] = d[0] + d[1] + sum;
}

/* ---- main -------------------------------------------------------------------------------- */

struct Entry { const char *name; void (*kernel)(float *); int threads, bytes; };
#define ONE(name) { #name, one<name>, 128, 1024 }
static const Entry entries[] = { { "right_products", one<none>, 128, 1024 },
    { "right_two_groups", one<none>, 256, 1024 }, { "right_own_rows", own_rows<true>, 128, 9216 },
    { "right_chain", right_chain, 128, 8192 + 1024 }, { "rows_alone", own_rows<false>, 128, 9216 },
    ONE(no_proxy_fence), ONE(late_proxy_fence), ONE(copied), ONE(no_barrier), ONE(early_sums), ONE(early_write),
    ONE(early_factor), ONE(no_register_fence), ONE(late_factor), ONE(late_sums), ONE(overwritten),
    { "other_columns", one<other_columns>, 128, 8192 }, ONE(missing_warp), ONE(missing_wait),
    ONE(two_descriptors), ONE(lane_descriptors),
    ONE(misaligned), ONE(leaves_row), ONE(beyond), ONE(stride), ONE(base_offset), ONE(unknown_bits),
    ONE(unwritten), ONE(left_behind), { "few_warps", one<none>, 96, 1024 } };

int main(int argc, char **argv) {
    if (argc > 1 && !std::strcmp(argv[1], "products")) return check_products(true);
    if (argc > 1 && !std::strcmp(argv[1], "small")) return check_products(false);
    for (const Entry &e : entries) {
        float *y;
        if (argc < 2 || std::strcmp(argv[1], e.name)) continue;
        cudaMalloc((void **)&y, 4096);
        cudaMemsetAsync(y, 0, 4096, 0);
        e.kernel<<<1, e.threads, e.bytes>>>(y);
        cudaDeviceSynchronize();
        std::printf("done\n");
        return 0;
    }
    for (const Entry &e : entries) std::printf("%s\n", e.name);
    return 2;
}
