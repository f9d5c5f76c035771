/* test_cuda_narrow.cpp - products of quantised values in cuBLASLt's fp8 and fp4: compared with a loop in
 * double over the values, on each capability, and with what cuBLASLt refuses.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "cuda_pair.h"

/* How a recipe quantises the operands of a product: blocks of `unit` along the sum, or squares. */
struct Kind {
    const char      *name;
    mixp_dtype       a, b;
    mixp_block_scale scale;
    int64_t          unit;
    bool             square;        /* b's blocks                                            */
    int              least, most;   /* capabilities that have it                             */
};
static const Kind kinds[] = {
    { "fp8", MIXP_F8_E4M3, MIXP_F8_E4M3, MIXP_SCALE_TENSOR, 0, false, 89, 999 },
    { "fp8, e5m2 first", MIXP_F8_E5M2, MIXP_F8_E4M3, MIXP_SCALE_TENSOR, 0, false, 89, 999 },
    { "fp8, e5m2 second", MIXP_F8_E4M3, MIXP_F8_E5M2, MIXP_SCALE_TENSOR, 0, false, 89, 999 },
    { "fp8 in blocks", MIXP_F8_E4M3, MIXP_F8_E4M3, MIXP_SCALE_POWER, 128, false, 90, 90 },
    { "fp8 in blocks and squares", MIXP_F8_E4M3, MIXP_F8_E4M3, MIXP_SCALE_POWER, 128, true, 90, 90 },
    { "mxfp8", MIXP_F8_E4M3, MIXP_F8_E4M3, MIXP_SCALE_E8M0, 32, false, 100, 999 },
    { "nvfp4", MIXP_F4_E2M1, MIXP_F4_E2M1, MIXP_SCALE_E4M3, 16, false, 100, 999 },
    { "nvfp4 with squares", MIXP_F4_E2M1, MIXP_F4_E2M1, MIXP_SCALE_E4M3, 16, true, 100, 999 },
    { "mxfp8 with squares", MIXP_F8_E4M3, MIXP_F8_E4M3, MIXP_SCALE_E8M0, 32, true, 100, 999 },
    { "mxfp8, e5m2 first", MIXP_F8_E5M2, MIXP_F8_E4M3, MIXP_SCALE_E8M0, 32, false, 100, 999 },
    { "fp8 in blocks, e5m2 first", MIXP_F8_E5M2, MIXP_F8_E4M3, MIXP_SCALE_POWER, 128, true, 90, 90 },
};

struct Sizes { int64_t m, n, k; };

/* A quantised operand, stored as rows x cols. over_rows: the sum runs over its rows. */
struct Operand {
    Pair        x, y, scales, factor;
    int64_t     rows, cols;
    mixp_narrow how;
};

static int y_off;               /* elements between the quantised values and an aligned address */

static Operand operand(const Kind &t, bool second, int64_t outer, int64_t sum, bool over_rows) {
    Operand o;
    o.rows = over_rows ? sum : outer;
    o.cols = over_rows ? outer : sum;
    o.how.element = second ? t.b : t.a;
    o.how.scale = t.scale;
    o.how.block_rows = over_rows ? t.unit : t.unit != 0;
    o.how.block_cols = over_rows ? t.unit != 0 : t.unit;
    if (second && t.square) o.how.block_rows = o.how.block_cols = t.unit;
    o.x = empty(MIXP_BF16, o.rows * o.cols, 0);
    for (int64_t i = 0; i < o.x.n; i++)         /* each block has a scale of its own */
        set_value(o.x, i, ldexp(random_normal(), (int)((i / o.cols / 16 * 5 + i % o.cols / 16 * 3) % 7) - 3));
    o.y = empty(MIXP_BF16, o.x.n, y_off);
    o.scales = empty(MIXP_U8, t.unit ? o.x.n / (o.how.block_rows * o.how.block_cols) : 1, 0);
    o.factor = empty(MIXP_F32, 2, 0);
    o.how.scales = t.unit ? (const uint8_t *)o.scales.gpu : NULL;
    return o;
}

/* times: the factor of the product's other operand, or NULL. */
static void quantise(const Operand &o, const float *times) {
    mixp_quantise_args k;
    memset((void *)&k, 0, sizeof k);
    k.rows = o.rows;
    k.cols = o.cols;
    k.x = mixpi_in(o.x.gpu, MIXP_BF16);
    k.y = (mixp_bf16 *)o.y.gpu;
    k.element = o.how.element;
    k.scale = o.how.scale;
    k.block_rows = o.how.block_rows;
    k.block_cols = o.how.block_cols;
    k.scales = (uint8_t *)const_cast<uint8_t *>(o.how.scales);
    k.times = times;
    k.decode = (float *)o.factor.gpu;
    CHECK_INT(gpu_kernels->quantise(&gpu_exec, &k), MIXP_OK);
}

static void finish_operand(Operand &o) {
    Pair *all[] = { &o.x, &o.y, &o.scales, &o.factor };
    for (Pair *p : all) finish(*p);
}

/* A product and its operands. */
struct Call {
    Operand a, b;
    Pair    c, bias;
    mixp_gemm_narrow_args k;
};

/* Numbers that a format rounds to others, or does not hold, in the first rows. */
static void odd_values(Operand &o) {
    const double odd[] = { NAN, INFINITY, -INFINITY, 3e38, 1e-40, -0.0 };
    for (int row = 0; row < 6; row++) set_value(o.x, row * o.cols + 5 * row, odd[row]);
    for (int64_t i = 8 * o.cols; i < 10 * o.cols; i++) set_value(o.x, i, 0.0);
    for (int64_t i = 10 * o.cols; i < 11 * o.cols; i++) set_value(o.x, i, 1e-39);
}

static bool odd;                /* the first operands of the calls to come have odd values   */

static Call call_of(const Kind &t, Sizes s, int trans_a, int trans_b, mixp_dtype dtype) {
    Call r;
    mixp_gemm_args &g = r.k.gemm;
    r.a = operand(t, false, s.m, s.k, trans_a != 0);
    r.b = operand(t, true, s.n, s.k, trans_b == 0);
    r.c = numbers(dtype, s.m * s.n, 1.0, 0);
    r.bias = numbers(MIXP_BF16, s.n, 1.0, 0);
    if (odd) odd_values(r.a);
    quantise(r.a, NULL);
    quantise(r.b, (const float *)r.a.factor.gpu);
    memset((void *)&r.k, 0, sizeof r.k);
    g.m = s.m;
    g.n = s.n;
    g.k = s.k;
    g.batch = 1;
    g.trans_a = trans_a;
    g.trans_b = trans_b;
    g.a = mixpi_in(r.a.y.gpu, MIXP_BF16);
    g.b = mixpi_in(r.b.y.gpu, MIXP_BF16);
    g.lda = r.a.cols;
    g.ldb = r.b.cols;
    g.ldc = s.n;
    g.c = mixpi_out_to(r.c.gpu, dtype, 0);
    g.alpha = t.scale == MIXP_SCALE_TENSOR || t.scale == MIXP_SCALE_E4M3 ? -77.0f : 1.0f;
    if (g.alpha < 0) g.alpha_at = (const float *)r.b.factor.gpu;
    r.k.a = r.a.how;
    r.k.b = r.b.how;
    return r;
}

static void finish_call(Call &r) {
    finish_operand(r.a);
    finish_operand(r.b);
    finish(r.c);
    finish(r.bias);
}

/* The error of a sum, relative to its terms' sizes. Tensor cores keep about 14 bits of fp8 sums and cut the rest
 * of each term, 32 terms a time: an H100 was off by 2^-9.8 at most. worst: the largest error of a kind so far. */
static double sum_error(int64_t k) { return cudasim::simulated ? (double)(k + 4) * 6e-8 : ldexp(1.0, -9); }
static double worst;
static bool within(double error, double size, int64_t k, double rounding) {
    if (error > rounding && size > 0.0) worst = fmax(worst, (error - rounding) / size);
    return error <= sum_error(k) * size + rounding;
}
static void show_worst(const Kind &t) {
    if (!cudasim::simulated) printf("  %s: sums are off by at most 2^%.1f of their terms\n", t.name, log2(worst));
    worst = 0.0;
}

/* The values of o as outer x sum: one row for each row or column of c. */
static std::vector<double> values_of(const Operand &o, bool over_rows) {
    const int64_t outer = over_rows ? o.cols : o.rows, sum = over_rows ? o.rows : o.cols;
    std::vector<double> v((size_t)(outer * sum));
    for (int64_t i = 0; i < outer; i++)
        for (int64_t p = 0; p < sum; p++)
            v[(size_t)(i * sum + p)] = value_at(o.y.gpu, MIXP_BF16, over_rows ? p * o.cols + i : i * o.cols + p);
    return v;
}

/* Is element (i, j) of c near the sum of n terms a b, in double? */
static bool near_the_sum(const Call &r, int64_t i, int64_t j, const double *a, const double *b) {
    const mixp_gemm_args &g = r.k.gemm;
    const double alpha = g.alpha_at ? (double)*g.alpha_at : (double)g.alpha;
    const double add = (g.bias.data ? value_at(g.bias.data, g.bias.dtype, j) : 0.0) +
                       (g.c.accumulate ? value_at(r.c.cpu, r.c.dtype, i * g.ldc + j) : 0.0);
    double sum = 0, size = 0;
    for (int64_t p = 0; p < g.k; p++) {
        sum += a[p] * b[p];
        size += fabs(a[p] * b[p]);
    }
    size = size * fabs(alpha) + fabs(add);
    const double want = sum * alpha + add, slack = sum_error(g.k) * size;
    const double got = value_at(g.c.data, r.c.dtype, i * g.ldc + j);
    const double rounding = one_rounding(r.c.dtype, fabs(want) + slack) +
                            lost_before_adding(r.c.dtype, g.c.accumulate, fabs(sum * alpha) + slack);
    if (within(fabs(got - want), size, g.k, rounding)) return true;
    test_bad++;
    TEST_SHOW("c[%lld, %lld] of %lld x %lld x %lld, trans %d %d: %.9g, not %.9g", (long long)i, (long long)j,
              (long long)g.m, (long long)g.n, (long long)g.k, g.trans_a, g.trans_b, got, want);
    return false;
}

static void near_the_values(const Call &r, const char *name) {
    const mixp_gemm_args &g = r.k.gemm;
    WAIT();
    const std::vector<double> a = values_of(r.a, g.trans_a != 0), b = values_of(r.b, g.trans_b == 0);
    for (int64_t i = 0; i < g.m; i++)
        for (int64_t j = 0; j < g.n; j++)
            if (!near_the_sum(r, i, j, &a[(size_t)(i * g.k)], &b[(size_t)(j * g.k)])) {
                printf("  %s\n", name);
                return;
            }
}

static mixp_gemm_count ways(void) { return gpu_device->gemm_count(&gpu_exec); }

/* Runs the product; did cuBLASLt multiply codes? */
static bool runs(const Call &r) {
    const int64_t before = ways().narrow;
    CHECK_INT(gpu_kernels->gemm_narrow(&gpu_exec, &r.k), MIXP_OK);
    CHECK_INT(cudaPeekAtLastError(), cudaSuccess);
    return ways().narrow > before;
}

static int capability(void) {
    int major = 0, minor = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0);
    return major * 10 + minor;
}

/* Does cuBLASLt have such products on this GPU? */
static bool has(const Kind &t) { return capability() >= t.least && capability() <= t.most; }

/* A real cuBLASLt may choose otherwise: that is printed, and is no failure. */
static void went(const Kind &t, const Call &r, bool narrow) {
    const bool want = has(t);
    if (cudasim::simulated) CHECK_INT(narrow, want);
    else if (narrow != want)
        printf("  %s, %lld x %lld x %lld: %s codes\n", t.name, (long long)r.k.gemm.m, (long long)r.k.gemm.n,
               (long long)r.k.gemm.k, narrow ? "multiplies" : "does not multiply");
}

/* Sizes with scales of one tile and of several, whole and in part. */
static const Sizes sizes[] = { { 32, 160, 96 }, { 160, 32, 288 } };
static const Sizes sizes_of_blocks[] = { { 128, 128, 128 }, { 128, 256, 384 } };

static void one_product(const Kind &t, Sizes s, int trans_a, int trans_b, int how) {
    Call r = call_of(t, s, trans_a, trans_b, how % 2 ? MIXP_F32 : MIXP_BF16);
    r.k.gemm.c.accumulate = how / 2;
    if (how == 2) r.k.gemm.bias = mixpi_in(r.bias.gpu, MIXP_BF16);
    went(t, r, runs(r));
    near_the_values(r, t.name);
    finish_call(r);
}

/* Every kind; the three products of a linear; into bf16 and f32, with a bias, and added to an old c. */
static void products_body(void) {
    int turn = 0;
    for (const Kind &t : kinds)
        for (int i = 0; i < 2 && has(t); i++, turn++) {
            const Sizes s = t.unit == 128 ? sizes_of_blocks[i] : sizes[i];
            one_product(t, s, 0, 1, turn % 4);
            one_product(t, s, 0, 0, (turn + 1) % 4);
            one_product(t, s, 1, 0, (turn + 2) % 4);
            show_worst(t);
        }
}

static void on_capability(int value, void (*body)(void)) {
    const int major = cudasim::capability_major, minor = cudasim::capability_minor;
    cudasim::capability_major = value / 10;
    cudasim::capability_minor = value % 10;
    body();
    cudasim::capability_major = major;
    cudasim::capability_minor = minor;
}

static void products_all(void) { in_all_schedules(products_body); }
static void products(void) {
    if (!cudasim::simulated) products_all();
    else if (test_later()) on_capability(100, products_all);
    else for (int value : { 90, 100 }) on_capability(value, products_all);
}

/* Every kind on every capability: the numbers are the same where cuBLASLt has no such product. */
static void everywhere_body(void) {
    for (const Kind &t : kinds) one_product(t, { 128, 128, 128 }, 0, 1, 1);
}
static void everywhere_all(void) { in_all_schedules(everywhere_body); }
static void everywhere(void) {
    NEEDS_SIMULATION;
    for (int value : { 80, 89, 90, 100, 120 }) on_capability(value, everywhere_all);
}

/* Operands and results that cuBLASLt does not take as codes: the bf16 product, with its numbers. */
static void other_scales(Call &r) { r.k.a.scale = MIXP_SCALE_POWER; }
static void no_scales(Call &r) { r.k.a.scales = NULL; }
static void other_blocks(Call &r) { r.k.a.block_cols = 32; }
static void f32_bias(Call &r) { r.k.gemm.bias = mixpi_in(r.bias.gpu, MIXP_F32); }
static void unaligned(Call &r) {
    r.k.gemm.c.data = (char *)r.c.gpu + mixp_dtype_size(r.c.dtype);
    r.k.gemm.n--;
}
static void as_it_is(Call &) {}

struct Unfit { int kind; Sizes s; mixp_dtype dtype; void (*change)(Call &r); };
static const Unfit unfit_calls[] = {
    { 0, { 32, 48, 64 }, MIXP_BF16, other_scales },  { 0, { 32, 48, 64 }, MIXP_F16, as_it_is },
    { 0, { 32, 48, 64 }, MIXP_BF16, f32_bias },      { 0, { 32, 48, 64 }, MIXP_BF16, unaligned },
    { 6, { 32, 48, 64 }, MIXP_BF16, no_scales },     { 6, { 32, 48, 64 }, MIXP_BF16, other_blocks },
    { 6, { 32, 48, 48 }, MIXP_BF16, as_it_is },
};

static void unfit_body(void) {
    for (const Unfit &u : unfit_calls) {
        Call r = call_of(kinds[u.kind], u.s, 0, 1, u.dtype);
        if (u.change == f32_bias) {
            finish(r.bias);
            r.bias = numbers(MIXP_F32, u.s.n, 1.0, 0);
        }
        u.change(r);
        CHECK(!runs(r));
        near_the_values(r, "unfit");
        finish_call(r);
    }

    /* Operands that the kernels cannot read 8 elements, or two columns, at a time. */
    for (int how = 0; how < 4; how++) {
        y_off = how % 2;
        Call r = call_of(kinds[0], { how % 2 ? 32 : 33, 48, 64 }, how / 2, 1, MIXP_BF16);
        y_off = 0;
        CHECK(!runs(r));
        near_the_values(r, "unfit for the kernels");
        finish_call(r);
    }
}
static void unfit_all(void) { in_all_schedules(unfit_body); }
static void unfit(void) {
    if (!cudasim::simulated) unfit_all();
    else on_capability(100, unfit_all);
}

/* A GPU multiplies a block's sum of codes, up to 448 x 448 a term, by one scale after the other: may that overflow
 * where the result does not? */
static bool may_overflow(double size) { return !cudasim::simulated && size > ldexp(1.0, 128 - 18); }

/* The same elements as in the bf16 product are not finite. */
static void odd_body(void) {
    for (const Kind &t : kinds) {
        odd = true;
        Call r = call_of(t, { 128, 128, 128 }, 0, 1, MIXP_F32);
        odd = false;
        Pair c = empty(MIXP_F32, r.c.n, 0);
        mixp_gemm_args g = r.k.gemm;
        g.c.data = c.gpu;
        CHECK_INT(gpu_kernels->gemm(&gpu_exec, &g), MIXP_OK);
        went(t, r, runs(r));
        WAIT();
        const double alpha = fabs(g.alpha_at ? (double)*g.alpha_at : (double)g.alpha);
        const std::vector<double> a = values_of(r.a, false), b = values_of(r.b, false);
        int wrong = 0;
        for (int64_t i = 0; i < c.n; i++) {
            const double want = ((float *)c.gpu)[i], got = ((float *)r.c.gpu)[i];
            double size = 0.0;
            for (int64_t p = 0; p < g.k; p++)
                size += fabs(alpha * a[(size_t)(i / g.n * g.k + p)] * b[(size_t)(i % g.n * g.k + p)]);
            if (!std::isfinite(want)) wrong += std::isfinite(got);
            else if (std::isfinite(got) || !may_overflow(size))
                wrong += !within(fabs(want - got), size, 2 * g.k, 0.0);
        }
        show_worst(t);
        if (wrong) printf("  %s: %d elements\n", t.name, wrong);
        CHECK_INT(wrong, 0);
        finish(c);
        finish_call(r);
    }
}
static void odd_all(void) { in_all_schedules(odd_body); }
static void odd_numbers(void) {
    if (!cudasim::simulated) odd_all();
    else for (int value : { 90, 100 }) on_capability(value, odd_all);
}

/* An empty product, alpha 0, and no context. */
static void edges_body(void) {
    Call r = call_of(kinds[0], { 32, 48, 64 }, 0, 1, MIXP_F32);
    mixp_exec none = gpu_exec;
    none.state = NULL;
    CHECK_INT(gpu_kernels->gemm_narrow(&none, &r.k), MIXP_ERR_ORDER);
    r.k.gemm.alpha_at = NULL;
    r.k.gemm.alpha = 0.0f;
    CHECK(!runs(r));
    near_the_values(r, "alpha 0");
    r.k.gemm.m = 0;
    CHECK(!runs(r));
    finish_call(r);
}
static void edges(void) { in_all_schedules(edges_body); }

/* --- what goes wrong --- */

static void (*body_alone)(void);
static void open_and_close(void) {
    pair_open();
    body_alone();
    pair_close();
}
static void alone(int value, void (*body)(void)) {
    body_alone = body;
    on_capability(value, open_and_close);
}

/* cuBLASLt has no algorithm, or refuses the one that it offered, or is too old: the bf16 product. It is
 * asked once for each kind and shape. */
static void refusing_body(void) {
    for (int how = 0; how < 3; how++) {
        Call r = call_of(kinds[6], sizes[how % 2], 0, how == 2, MIXP_F32);
        cudasim::narrow_products = how != 0;
        cudasim::refused_narrow = how == 1 ? 3 : 0;
        const size_t version = cudasim::library_version;
        if (how == 2) cudasim::library_version = 120700;
        CHECK(!runs(r));
        near_the_values(r, "refused");
        const long asked = cudasim::count.heuristics;
        CHECK(!runs(r));
        CHECK_INT(cudasim::count.heuristics, asked);
        cudasim::library_version = version;
        cudasim::narrow_products = true;
        cudasim::refused_narrow = 0;
        finish_call(r);
    }
    CHECK_INT(ways().direct, 6);
}
static void refusing(void) { NEEDS_SIMULATION; alone(100, refusing_body); }

/* Each request for memory and each CUDA call of a product fails once: a typed error, and the next product
 * is right. */
static void failing_body(void) {
    for (int which : { 0, 4, 7 }) {
        Call r = call_of(kinds[which], sizes_of_blocks[0], 0, 1, MIXP_F32);
        for (long at = 1; at < 100; at++) {
            cudasim::fail_at = at;
            const mixp_result got = gpu_kernels->gemm_narrow(&gpu_exec, &r.k);
            const bool reached = cudasim::fail_at == 0;
            cudasim::fail_at = 0;
            if (!reached) {
                CHECK_INT(got, MIXP_OK);
                break;
            }
            CHECK(at < 99);
            CHECK_INT(cudaPeekAtLastError(), cudaSuccess);
        }
        CHECK(runs(r) == has(kinds[which]));
        near_the_values(r, "after failures");
        finish_call(r);
    }
}
static void failing(void) {
    NEEDS_SIMULATION;
    alone(90, failing_body);
    alone(100, failing_body);
}

/* The choices as text name narrow products as well; the next context asks nothing. */
static std::string text_of_choices;
static void saving_body(void) {
    Call r = call_of(kinds[5], sizes[0], 0, 1, MIXP_F32);
    CHECK(runs(r));
    text_of_choices.resize(gpu_device->gemm_choices(&gpu_exec, NULL, 0));
    gpu_device->gemm_choices(&gpu_exec, &text_of_choices[0], text_of_choices.size());
    finish_call(r);
}
static void loading_body(void) {
    gpu_device->detach(&gpu_exec);
    gpu_exec.gemm_choices = text_of_choices.c_str();
    CHECK_INT(gpu_device->attach(&gpu_exec), MIXP_OK);
    Call r = call_of(kinds[5], sizes[0], 0, 1, MIXP_F32);
    const long asked = cudasim::count.heuristics;
    CHECK(runs(r));
    CHECK_INT(cudasim::count.heuristics, asked);
    near_the_values(r, "chosen");
    finish_call(r);
}
static void choices(void) {
    NEEDS_SIMULATION;
    alone(100, saving_body);
    alone(100, loading_body);
}

int main(void) {
    RUN(refusing);
    RUN(failing);
    RUN(choices);
    RUN(products);
    RUN_LATER(everywhere);
    RUN(unfit);
    RUN_LATER(odd_numbers);
    RUN(edges);
    return test_report();
}
