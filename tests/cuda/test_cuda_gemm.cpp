/* test_cuda_gemm.cpp - products of the CUDA table, simulated, compared with the CPU and a plain
 * loop.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "cuda_pair.h"

/* One product; offsets and extra row lengths in elements. */
struct Case {
    int64_t    m, n, k, batch;
    int        trans_a, trans_b, accumulate, bias;
    float      alpha;
    mixp_dtype a, b, c, bias_dtype;
    int        off_a, off_b, off_c, off_bias, more_a, more_b, more_c, share_a, share_b;
};

/* alpha: with alpha_at, where each side reads it. */
struct Operands { Pair a, b, c, bias, alpha; mixp_gemm_args g; bool alpha_at; };

static Operands operands_of(const Case &t) {
    Operands o;
    mixp_gemm_args &g = o.g;
    int64_t rows_a = t.trans_a ? t.k : t.m, rows_b = t.trans_b ? t.n : t.k;
    memset(&g, 0, sizeof g);
    g.m = t.m; g.n = t.n; g.k = t.k; g.batch = t.batch;
    g.trans_a = t.trans_a; g.trans_b = t.trans_b; g.c.accumulate = t.accumulate; g.alpha = t.alpha;
    g.lda = (t.trans_a ? t.m : t.k) + t.more_a;
    g.ldb = (t.trans_b ? t.k : t.n) + t.more_b;
    g.ldc = t.n + t.more_c;
    g.stride_a = t.share_a ? 0 : rows_a * g.lda;
    g.stride_b = t.share_b ? 0 : rows_b * g.ldb;
    g.stride_c = t.m * g.ldc;
    o.a = numbers(t.a, rows_a * g.lda * (t.share_a ? 1 : t.batch), 1.0, t.off_a);
    o.b = numbers(t.b, rows_b * g.ldb * (t.share_b ? 1 : t.batch), 1.0, t.off_b);
    o.c = numbers(t.c, t.m * g.ldc * t.batch, 1.0, t.off_c);
    o.bias = numbers(t.bias_dtype, t.n, 1.0, t.off_bias);
    o.alpha = empty(MIXP_F32, 1, 0);
    set_value(o.alpha, 0, t.alpha);
    o.alpha_at = (t.m + t.n + t.k) % 2 != 0;
    return o;
}

static void finish_operands(Operands &o) {
    Pair *all[] = { &o.a, &o.b, &o.c, &o.bias, &o.alpha };
    for (Pair *p : all) finish(*p);
}

static const mixp_gemm_args *on_side(Operands &o, int bias) {
    o.g.a = args_in(ON(o.a));
    o.g.b = args_in(ON(o.b));
    o.g.c = args_out(ON(o.c), o.g.c.accumulate);
    o.g.bias = args_in(ON(o.bias));
    if (!bias) o.g.bias.data = NULL;
    static mixp_gemm_args call;
    call = o.g;
    if (o.alpha_at) {
        call.alpha = -77.0f;
        call.alpha_at = AT(float, o.alpha);
    }
    return &call;
}

/* Element (i, j) of matrix z in double, and the sum of its terms' sizes. */
static double plain_element(const Operands &o, const Pair &old, int bias, int64_t z, int64_t i,
                            int64_t j, double *size) {
    const mixp_gemm_args &g = o.g;
    double sum = 0.0, add, held;
    *size = 0.0;
    for (int64_t p = 0; p < g.k; p++) {
        int64_t ai = z * g.stride_a + (g.trans_a ? p * g.lda + i : i * g.lda + p);
        int64_t bi = z * g.stride_b + (g.trans_b ? j * g.ldb + p : p * g.ldb + j);
        double term = value_at(o.a.cpu, o.a.dtype, ai) * value_at(o.b.cpu, o.b.dtype, bi);
        sum += term;
        *size += fabs(term);
    }
    add = bias ? value_at(o.bias.cpu, o.bias.dtype, j) : 0.0;
    held = g.c.accumulate ? value_at(old.cpu, old.dtype, z * g.stride_c + i * g.ldc + j) : 0.0;
    *size = fabs(g.alpha) * *size + fabs(add) + fabs(held);
    return sum * g.alpha + add + held;
}

static double largest(const Pair &p) {
    double most = 0.0;
    for (int64_t i = 0; i < p.n; i++) most = fmax(most, fabs(value_at(p.cpu, p.dtype, i)));
    return most;
}

/* Bound: (k + 4) roundings to f32 of the terms' sizes, and one rounding to c's dtype. */
static void near_plain(const Operands &o, const Pair &old, int bias) {
    const mixp_gemm_args &g = o.g;
    WAIT();
    for (int64_t z = 0; z < g.batch; z++)
        for (int64_t i = 0; i < g.m; i++)
            for (int64_t j = 0; j < g.n; j++) {
                int64_t at = z * g.stride_c + i * g.ldc + j;
                double size, want = plain_element(o, old, bias, z, i, j, &size);
                double slack = (double)(g.k + 4) * 6e-8 * size;
                double held = g.c.accumulate ? value_at(old.cpu, old.dtype, at) : 0.0;
                double add = bias ? value_at(o.bias.cpu, o.bias.dtype, j) : 0.0;
                double most = fabs(want) + fabs(held) + fabs(add) + slack;
                slack += (1 + bias) * lost_before_adding(o.c.dtype, g.c.accumulate, most);
                double got = value_at(o.c.gpu, o.c.dtype, at);
                if (fabs(got - want) <= slack + one_rounding(o.c.dtype, fabs(want) + slack)) continue;
                test_bad++;
                TEST_SHOW("c[%lld,%lld,%lld] of %lld x %lld x %lld is %.9g, not %.9g", (long long)z,
                          (long long)i, (long long)j, (long long)g.m, (long long)g.n,
                          (long long)g.k, got, want);
                return;
            }
}

/* What lies between the rows of c must stay. */
static void gaps_untouched(const Operands &o, const Pair &old) {
    const mixp_gemm_args &g = o.g;
    size_t size = mixp_dtype_size(o.c.dtype);
    for (int64_t i = 0; i < o.c.n; i++)
        if (i % g.ldc >= g.n && memcmp((char *)o.c.gpu + (size_t)i * size,
                                       (char *)old.cpu + (size_t)i * size, size)) {
            test_bad++;
            TEST_SHOW("element %lld between the rows of c was written", (long long)i);
            return;
        }
}

static void run_case(const Case &t) {
    Operands o = operands_of(t);
    Pair old = empty(t.c, o.c.n, 0);
    memcpy(old.cpu, o.c.cpu, (size_t)o.c.n * mixp_dtype_size(t.c));
    memcpy(old.gpu, o.c.cpu, (size_t)o.c.n * mixp_dtype_size(t.c));
    BOTH(gemm(X, on_side(o, t.bias)));
    double absolute = (double)(t.k + 4) * 1.2e-7 * ((double)t.k * 8.0 * fabs(t.alpha) + 8.0);
    double most = largest(o.c) + largest(old) + (t.bias ? largest(o.bias) : 0.0);
    close_to(o.c, absolute + (1 + t.bias) * lost_before_adding(t.c, t.accumulate, most), 0.0);
    near_plain(o, old, t.bias);
    gaps_untouched(o, old);
    finish_operands(o);
    finish(old);
}

static Case plain_case(int64_t m, int64_t n, int64_t k, mixp_dtype in, mixp_dtype out) {
    Case t;
    memset(&t, 0, sizeof t);
    t.m = m; t.n = n; t.k = k; t.batch = 1; t.alpha = 1.0f;
    t.a = t.b = in;
    t.c = t.bias_dtype = out;
    return t;
}

static int pick(int n) { return (int)(random_u64() % (uint64_t)n); }
static mixp_dtype pick_dtype(void) {
    static const mixp_dtype real[3] = { MIXP_F32, MIXP_F16, MIXP_BF16 };
    return real[pick(3)];
}

/* Which ways the pair's products went. On a GPU that is cuBLASLt's to say: only none may be missing,
 * and what went another way is told. */
static mixp_gemm_count ways(void) { return gpu_device->gemm_count(&gpu_exec); }
static void went(int64_t direct, int64_t packed, int64_t plain) {
    mixp_gemm_count n = ways();
    if (!cudasim::simulated) {
        CHECK_INT(n.direct + n.packed + n.plain, direct + packed + plain);
        if (n.packed != packed || n.plain != plain)
            printf("  products: %lld as they are (%lld in the simulation), %lld packed (%lld), "
                   "%lld without tensor cores (%lld)\n", (long long)n.direct, (long long)direct,
                   (long long)n.packed, (long long)packed, (long long)n.plain, (long long)plain);
        return;
    }
    CHECK_INT(n.direct, direct);
    CHECK_INT(n.packed, packed);
    CHECK_INT(n.plain, plain);
}

/* --- what cuBLASLt takes as it is -------------------------------------------------------- */

static void direct_body(void) {
    static const mixp_dtype dtypes[3] = { MIXP_F32, MIXP_F16, MIXP_BF16 };
    for (int i = 0; i < 24; i++) {
        Case t = plain_case(8 << i % 3, 16, 24, dtypes[i % 3], dtypes[i / 3 % 2 ? i % 3 : 0]);
        t.trans_a = i & 1; t.trans_b = i >> 1 & 1; t.accumulate = i >> 2 & 1; t.bias = i >> 3 & 1;
        t.alpha = i % 5 ? 1.0f : -0.5f;
        t.off_bias = t.bias_dtype == MIXP_F32 ? 4 : 8;      /* aligned to 16 bytes, not more */
        run_case(t);
    }
    went(24, 0, 0);
}
static void test_direct(void) { in_all_schedules(direct_body); }

/* --- any mix ----------------------------------------------------------------------------- */

static void any_body(void) {
    static const int64_t sizes[] = { 1, 2, 3, 7, 8, 16, 17, 33 };
    for (int i = 0; i < 80; i++) {
        Case t = plain_case(sizes[pick(8)], sizes[pick(8)], sizes[pick(8)], MIXP_F32, MIXP_F32);
        t.a = pick_dtype(); t.b = pick_dtype(); t.c = pick_dtype(); t.bias_dtype = pick_dtype();
        t.trans_a = pick(2); t.trans_b = pick(2); t.accumulate = pick(2); t.bias = pick(2);
        t.alpha = pick(3) ? 1.0f : 0.37f;
        t.batch = pick(3) ? 1 : 3;
        t.off_a = pick(2); t.off_b = pick(2); t.off_c = pick(2); t.off_bias = pick(2);
        t.more_a = pick(3) * 4; t.more_b = pick(3) * 4; t.more_c = pick(3);
        t.share_a = pick(4) == 0; t.share_b = pick(4) == 0;
        run_case(t);
    }
}
static void test_any_mix(void) { in_all_schedules(any_body); }

/* --- the tiled kernel --------------------------------------------------------------------- */

static void tiles_body(void) {
    static const int64_t sizes[] = { 1, 15, 64, 65 };
    for (int i = 0; i < 16; i++) {
        Case t = plain_case(sizes[pick(4)], sizes[pick(4)], sizes[pick(4)] / 2, MIXP_F16, MIXP_F32);
        t.b = pick_dtype(); t.c = pick_dtype(); t.bias_dtype = pick_dtype();
        t.trans_a = i & 1; t.trans_b = i >> 1 & 1; t.accumulate = i >> 2 & 1; t.bias = pick(2);
        t.batch = 1 + pick(2);
        t.off_a = t.off_b = t.off_c = 1;
        t.more_a = pick(2); t.more_c = pick(2);
        Operands o = operands_of(t);
        Pair old = empty(t.c, o.c.n, 0);
        memcpy(old.cpu, o.c.cpu, (size_t)o.c.n * mixp_dtype_size(t.c));
        memset(old.gpu, 0, (size_t)o.c.n * mixp_dtype_size(t.c));
        on_gpu = 1;
        CHECK_INT(inside_product_by_tiles(&gpu_exec, *on_side(o, t.bias)), MIXP_OK);
        near_plain(o, old, t.bias);
        gaps_untouched(o, old);
        finish_operands(o);
        finish(old);
    }
}
static void test_tiles(void) { in_all_schedules(tiles_body); }

/* --- edges -------------------------------------------------------------------------------- */

static void edges_body(void) {
    Case t = plain_case(5, 9, 0, MIXP_F16, MIXP_BF16);
    run_case(t);                                    /* k 0: c is 0 */
    t.bias = 1;
    run_case(t);
    t.accumulate = 1;
    run_case(t);
    t = plain_case(5, 9, 3, MIXP_F16, MIXP_F16);
    t.alpha = 0.0f;
    run_case(t);
    t = plain_case(1, 8, 8, MIXP_F32, MIXP_F32);    /* one row: its ld says nothing */
    Operands o = operands_of(t);
    o.g.lda = o.g.ldc = 0;
    BOTH(gemm(X, on_side(o, 0)));
    close_to(o.c, 1e-4, 0.0);
    finish_operands(o);
    o = operands_of(plain_case(4, 8, 8, MIXP_F32, MIXP_F32));
    o.g.lda = 0;                                    /* every row of a is the same */
    BOTH(gemm(X, on_side(o, 0)));
    close_to(o.c, 1e-4, 0.0);
    o.g.lda = 8;
    o.g.m = 0;
    BOTH(gemm(X, on_side(o, 0)));
    o.g.m = 4; o.g.n = 0;
    BOTH(gemm(X, on_side(o, 0)));
    o.g.n = 8; o.g.batch = 0;
    BOTH(gemm(X, on_side(o, 0)));
    o.g.batch = 1;
    on_gpu = 1;
    on_side(o, 0);
    o.g.a.dtype = MIXP_I32;
    CHECK_INT(gpu_kernels->gemm(X, &o.g), MIXP_ERR_DTYPE);
    finish_operands(o);
}
static void test_edges(void) { in_all_schedules(edges_body); }

/* Garbage in c is not read without accumulate; NaN and Inf in operands arrive. */
static void garbage_body(void) {
    static const mixp_dtype dtypes[3] = { MIXP_F32, MIXP_F16, MIXP_BF16 };
    for (int i = 0; i < 6; i++) {
        Operands o = operands_of(plain_case(8, 8, 8, dtypes[i % 3], dtypes[(i + i / 3) % 3]));
        finish(o.c);
        o.c = output(dtypes[(i + i / 3) % 3], 64, 0);
        set_value(o.a, 9, INFINITY);
        set_value(o.b, 3, NAN);
        BOTH(gemm(X, on_side(o, 0)));
        close_to(o.c, 1e-4, 0.0);
        finish_operands(o);
    }
}
static void test_garbage(void) { in_all_schedules(garbage_body); }

/* --- plans -------------------------------------------------------------------------------- */

static void plans_body(void) {
    Case t = plain_case(8, 16, 8, MIXP_F16, MIXP_F16);  /* cuBLASLt multiplies bf16 from 8.0 on */
    t.bias = 1;
    Operands o = operands_of(t), p = operands_of(t);
    BOTH(gemm(X, on_side(o, 1)));
    CHECK_INT(inside_plans(&gpu_exec), 1);
    long resources = cudasim::count.resources, handles = cudasim::machine().handles;
    long waits = cudasim::count.waits;
    BOTH(gemm(X, on_side(p, 1)));                   /* other arrays, the same plan */
    CHECK_INT(inside_plans(&gpu_exec), 1);
    CHECK_INT(cudasim::count.resources, resources);
    CHECK_INT(cudasim::machine().handles, handles);
    CHECK_INT(cudasim::count.waits, waits);
    close_to(o.c, 1e-5, 0.0);
    close_to(p.c, 1e-5, 0.0);
    o.g.alpha = 2.0f;                               /* nor do alpha and accumulate need one */
    o.g.c.accumulate = 1;
    BOTH(gemm(X, on_side(o, 1)));
    CHECK_INT(inside_plans(&gpu_exec), 1);
    o.g.trans_b = 1;
    o.g.ldb = 8;
    BOTH(gemm(X, on_side(o, 1)));
    CHECK_INT(inside_plans(&gpu_exec), 2);
    /* Two products of 8 terms, times 2, were added. */
    double most = 16.0 * largest(o.a) * largest(o.b) + largest(o.bias);
    close_to(o.c, 1e-5 + 2.0 * lost_before_adding(MIXP_F16, 1, most), 0.0);
    finish_operands(o);
    finish_operands(p);
}
static void test_plans(void) { in_all_schedules(plans_body); }

/* More shapes than are kept. */
static void test_many_plans(void) {
    pair_open();
    Operands o = operands_of(plain_case(1, 8, 8, MIXP_F32, MIXP_F32));
    on_gpu = 1;
    on_side(o, 0);
    for (int64_t i = 0; i < inside_limits().plans + 10; i++) {
        o.g.stride_c = i;
        o.g.lda = 8 + i;
        CHECK_INT(gpu_kernels->gemm(&gpu_exec, &o.g), MIXP_OK);
        if (i % 512 == 0) WAIT();
    }
    CHECK(inside_plans(&gpu_exec) <= inside_limits().plans);
    finish_operands(o);
    pair_close();
}

/* A captured product needs nothing that a capture forbids. */
static void capture_body(void) {
    Case t = plain_case(8, 16, 8, MIXP_F16, MIXP_F32);
    t.b = MIXP_BF16;                                /* packed: kernels of ours around */
    Operands o = operands_of(t);
    cudaStream_t stream = (cudaStream_t)gpu_exec.stream;
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    BOTH(gemm(X, on_side(o, 0)));
    WAIT();
    memset(o.c.gpu, 0, (size_t)o.c.n * 4);
    on_gpu = 1;
    on_side(o, 0);
    void *kept = scratch_memory[1];                 /* a context's scratch grows before */
    scratch_memory[1] = NULL;
    gpu_exec.scratch = [](void *, size_t) { return scratch_memory[0]; };
    void *host = scratch_memory[0];
    scratch_memory[0] = kept;
    CHECK_INT(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    CHECK_INT(gpu_kernels->gemm(&gpu_exec, &o.g), MIXP_OK);
    CHECK_INT(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    CHECK_INT(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
    CHECK_INT(cudaGraphLaunch(exec, stream), cudaSuccess);
    close_to(o.c, 1e-4, 0.0);
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
    scratch_memory[0] = host;
    scratch_memory[1] = kept;
    gpu_exec.scratch = test_scratch;
    finish_operands(o);
}
static void test_capture(void) { in_all_schedules(capture_body); }

/* --- refusals ------------------------------------------------------------------------------ */

/* What cuBLASLt takes back is done by the next algorithm of its three, then in the next way that there
 * is, and remembered. */
static void refused_body(void) {
    for (int refusals = 0; refusals < 8; refusals++) {
        int way = refusals / 3;
        Operands o = operands_of(plain_case(8, 16, 24 + 8 * refusals, MIXP_BF16, MIXP_F32));
        mixp_gemm_count n = ways();
        if (refusals % 2) cudaFree((void *)&o);     /* an error of the program's stays, ours goes */
        for (int again = 0; again < 2; again++) {
            cudasim::refused_products = again ? 0 : refusals;
            on_gpu = 1;             /* each way may ask for scratch memory of its own */
            CHECK_INT(gpu_kernels->gemm(X, on_side(o, 1)), MIXP_OK);
            on_gpu = 0;
            CHECK_INT(cpu_kernels->gemm(X, on_side(o, 1)), MIXP_OK);
            close_to(o.c, 1e-4, 0.0);
        }
        went(n.direct + 2 * (way == 0), n.packed + 2 * (way == 1), n.plain + 2 * (way == 2));
        CHECK_INT(cudaGetLastError(), refusals % 2 ? cudaErrorInvalidValue : cudaSuccess);
        finish_operands(o);
    }
}
static void test_refused(void) {
    NEEDS_SIMULATION;
    in_all_schedules(refused_body);
}

/* Algorithms for 16 bytes and more only: what is not aligned is packed. */
static void unaligned_body(void) {
    for (int has = 0; has < 2; has++) {
        Case t = plain_case(8, 16, 24, MIXP_F16, MIXP_F16);
        t.off_a = t.off_c = 1;
        t.bias = 1;
        cudasim::unaligned_algorithms = has;
        mixp_gemm_count n = ways();
        t.k += 8 * has;
        run_case(t);
        went(n.direct + has, n.packed + !has, n.plain);
    }
    cudasim::unaligned_algorithms = true;
}
static void test_unaligned(void) {
    NEEDS_SIMULATION;
    in_all_schedules(unaligned_body);
}

/* A failure is an error of this product, and says nothing of the next. */
static void test_failures(void) {
    NEEDS_SIMULATION;
    pair_open();
    Operands o = operands_of(plain_case(8, 16, 8, MIXP_F16, MIXP_F32));
    on_gpu = 1;
    on_side(o, 0);
    cudasim::heuristic_says = CUBLAS_STATUS_INTERNAL_ERROR;
    CHECK_INT(gpu_kernels->gemm(&gpu_exec, &o.g), MIXP_ERR_DEVICE);
    CHECK_TEXT(gpu_device->message(&gpu_exec), "cuBLASLt: CUBLAS_STATUS_INTERNAL_ERROR");
    cudasim::heuristic_says = CUBLAS_STATUS_SUCCESS;
    cudasim::refused_products = 1;
    cudasim::refused_with = CUBLAS_STATUS_INTERNAL_ERROR;
    CHECK_INT(gpu_kernels->gemm(&gpu_exec, &o.g), MIXP_ERR_DEVICE);
    cudasim::refused_with = CUBLAS_STATUS_NOT_SUPPORTED;
    BOTH(gemm(X, on_side(o, 0)));
    close_to(o.c, 1e-4, 0.0);
    went(1, 0, 0);
    finish_operands(o);
    pair_close();
}

/* A shape that is new in a capture: there are no heuristics then. The next step takes it well. */
static void test_new_in_capture(void) {
    void *graph = NULL;
    pair_open();
    Operands o = operands_of(plain_case(8, 16, 8, MIXP_F16, MIXP_F16));
    Operands later = operands_of(plain_case(8, 16, 16, MIXP_F16, MIXP_F16));
    BOTH(gemm(X, on_side(o, 0)));
    on_gpu = 1;
    on_side(o, 0);
    on_side(later, 0);
    CHECK_INT(gpu_device->capture_begin(&gpu_exec), MIXP_OK);
    CHECK_INT(gpu_kernels->gemm(&gpu_exec, &o.g), MIXP_OK);
    CHECK_INT(gpu_kernels->gemm(&gpu_exec, &later.g), MIXP_ERR_ORDER);
    CHECK_TEXT(gpu_device->message(&gpu_exec), "a shape that no step had before");
    CHECK_INT(gpu_device->capture_end(&gpu_exec, &graph), MIXP_OK);
    gpu_device->graph_free(&gpu_exec, graph);
    BOTH(gemm(X, on_side(later, 0)));
    close_to(later.c, 1e-2, 0.0);
    went(3, 0, 0);
    finish_operands(o);
    finish_operands(later);
    pair_close();
}

/* cuBLASLt takes 65,535 matrices at a time. */
static void test_large_batch(void) {
    Case t = plain_case(1, 2, 2, MIXP_F32, MIXP_F32);
    t.batch = 70000;
    pair_open();
    run_case(t);
    t.share_b = t.accumulate = 1;
    run_case(t);
    went(4, 0, 0);
    pair_close();
}

/* Every allocation fails once: an error or the right product, and nothing leaks. */
static void test_no_memory(void) {
    NEEDS_SIMULATION;
    for (long n = 1; n < 16; n++) {
        pair_open();
        Case t = plain_case(8, 16, 8, MIXP_F16, MIXP_F32);
        t.b = MIXP_BF16;
        Operands o = operands_of(t);
        on_gpu = 1;
        on_side(o, 0);
        cudasim::fail_at = n;
        mixp_result r = gpu_kernels->gemm(&gpu_exec, &o.g);
        CHECK(r == MIXP_OK || r == MIXP_ERR_MEMORY || r == MIXP_ERR_DEVICE);
        cudasim::fail_at = 0;
        BOTH(gemm(X, on_side(o, 0)));
        close_to(o.c, 1e-4, 0.0);
        finish_operands(o);
        pair_close();
    }
}

/* Sums cut off as tensor cores cut them, and products rounded before an old c is added, as cuBLASLt rounds them
 * on an H100: the bounds allow both. */
static void test_cut_sums(void) {
    NEEDS_SIMULATION;
    cudasim::cut_sums = cudasim::rounds_first = true;
    test_direct();
    test_any_mix();
    test_plans();
    cudasim::cut_sums = cudasim::rounds_first = false;
}

int main(void) {
    RUN(test_direct);
    RUN(test_any_mix);
    RUN(test_tiles);
    RUN(test_edges);
    RUN(test_garbage);
    RUN(test_plans);
    RUN(test_many_plans);
    RUN(test_capture);
    RUN(test_refused);
    RUN(test_unaligned);
    RUN(test_failures);
    RUN(test_new_in_capture);
    RUN(test_large_batch);
    RUN(test_no_memory);
    RUN(test_cut_sums);
    return test_report();
}
