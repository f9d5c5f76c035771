/* test_cuda_attention_apart.cpp - attention of the CUDA table, simulated, with separate q, k and
 * v, other lengths, grouped heads, masks, lengths, a cap and dropout, compared with plain loops
 * and the CPU.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "cuda_pair.h"
#include "attention_model.h"
#include <vector>

enum { MASK = 1, LENGTHS = 2, CAP = 4, DROPOUT = 8, CAUSAL = 16 };

/* What a test asks for. */
struct Case {
    int64_t    b, t, keys, heads, kv_heads, d, past;
    int        what, accumulate;
    mixp_dtype dtype;
};

static Case case_of(mixp_dtype dtype, int64_t t, int64_t keys, int64_t d, int what) {
    Case c = { 1, t, keys, 2, 1, d, 0, what, 0, dtype };
    return c;
}

struct Arrays { Pair q, k, v, dy, y, lse, dq, dk, dv, mask, lengths; };

/* Bytes of all, equal on both sides, and what the model reads of them. */
struct Problem {
    Case c;
    Arrays a;
    std::vector<double> q, k, v, dy, mask, old[3];
    std::vector<int32_t> lengths;
    attention_model m;
};

static std::vector<double> decoded(const Pair &p) {
    std::vector<double> v((size_t)p.n);
    for (int64_t i = 0; i < p.n; i++) v[(size_t)i] = value_at(p.cpu, p.dtype, i);
    return v;
}

/* Of b and keys; some are hidden, all of the second query's included. */
static void make_mask(Problem &p) {
    const Case &c = p.c;
    p.a.mask = numbers(c.dtype, c.b * c.t * c.keys, 1.0, 0);
    for (int64_t i = 0; i < p.a.mask.n; i++)
        if (i % 7 == 3 || i / c.keys % c.t == 1) set_value(p.a.mask, i, -INFINITY);
    for (int64_t i = 0; i < c.b * c.heads * c.t * c.keys; i++) {
        int64_t row = i / c.keys, from = row / c.t / c.heads * c.t + row % c.t;
        p.mask.push_back(value_at(p.a.mask.cpu, c.dtype, from * c.keys + i % c.keys));
    }
    p.m.mask = p.mask.data();
}

static void make_lengths(Problem &p) {
    p.a.lengths = empty(MIXP_I32, p.c.b, 0);
    for (int64_t i = 0; i < p.c.b; i++) {
        p.lengths.push_back((int32_t)(i == 1 ? 0 : p.c.keys - p.c.keys / 3));
        set_code(p.a.lengths, i, (uint64_t)(uint32_t)p.lengths.back());
    }
    p.m.lengths = p.lengths.data();
}

static void make(Problem &p, const Case &c) {
    int64_t nq = c.b * c.t * c.heads * c.d, nk = c.b * c.keys * c.kv_heads * c.d;
    attention_model &m = p.m;
    p.c = c;
    p.a.q = numbers(c.dtype, nq, 1.0, 0);
    p.a.k = numbers(c.dtype, nk, 1.0, 0);
    p.a.v = numbers(c.dtype, nk, 1.0, 0);
    p.a.dy = numbers(c.dtype, nq, 1.0, 0);
    p.a.y = output(c.dtype, nq, 0);
    p.a.lse = output(MIXP_F32, c.b * c.heads * c.t, 0);
    p.a.dq = output(c.dtype, nq, c.accumulate);
    p.a.dk = output(c.dtype, nk, c.accumulate);
    p.a.dv = output(c.dtype, nk, c.accumulate);
    p.a.mask = p.a.lengths = nothing_pair();
    p.q = decoded(p.a.q);
    p.k = decoded(p.a.k);
    p.v = decoded(p.a.v);
    p.dy = decoded(p.a.dy);
    p.old[0] = decoded(p.a.dq);
    p.old[1] = decoded(p.a.dk);
    p.old[2] = decoded(p.a.dv);
    memset(&m, 0, sizeof m);
    m.b = c.b; m.t = c.t; m.keys = c.keys; m.heads = c.heads; m.kv_heads = c.kv_heads; m.d = c.d;
    m.causal = (c.what & CAUSAL) != 0;
    m.past = c.past;
    m.scale = (double)(float)(1.0 / sqrt((double)c.d));
    m.softcap = c.what & CAP ? 2.0 : 0.0;
    m.dropout = c.what & DROPOUT ? 0.25 : 0.0;
    m.seed = 5; m.step = 6; m.tensor = 7;
    m.q = p.q.data(); m.k = p.k.data(); m.v = p.v.data(); m.dy = p.dy.data();
    if (c.what & MASK) make_mask(p);
    if (c.what & LENGTHS) make_lengths(p);
    model_open(&m);
    model_run(&m, NULL);
}

static void end(Problem &p) {
    Pair *all[] = { &p.a.q, &p.a.k, &p.a.v, &p.a.dy, &p.a.y, &p.a.lse, &p.a.dq, &p.a.dk, &p.a.dv };
    for (Pair *pair : all) finish(*pair);
    if (p.a.mask.n) finish(p.a.mask);
    if (p.a.lengths.n) finish(p.a.lengths);
    model_close(&p.m);
}

static mixp_head_strides dense(int64_t rows, int64_t heads, int64_t d) {
    mixp_head_strides at = { rows * heads * d, d, heads * d };
    return at;
}

/* On the side that ON means. */
static mixp_attention_args forward_of(const Problem &p) {
    const Case &c = p.c;
    mixp_attention_args k;
    memset((void *)&k, 0, sizeof k);
    k.b = c.b;
    k.t = c.t;
    k.keys = c.keys;
    k.heads = c.heads;
    k.kv_heads = c.kv_heads;
    k.d = c.d;
    k.causal = p.m.causal;
    k.past = c.past;
    k.scale = (float)p.m.scale;
    k.softcap = (float)p.m.softcap;
    k.dropout = (float)p.m.dropout;
    k.seed = p.m.seed;
    k.step = p.m.step;
    k.tensor = p.m.tensor;
    k.q = args_in(ON(p.a.q));
    k.k = args_in(ON(p.a.k));
    k.v = args_in(ON(p.a.v));
    k.q_at = dense(c.t, c.heads, c.d);
    k.k_at = k.v_at = dense(c.keys, c.kv_heads, c.d);
    k.y = args_out(ON(p.a.y), 0);
    k.lse = AT(float, p.a.lse);
    if (p.a.lengths.n) k.lengths = AT(const int32_t, p.a.lengths);
    if (!p.a.mask.n) return k;
    k.mask = args_in(ON(p.a.mask));
    k.mask_at = dense(c.t, 1, c.keys);
    k.mask_at.head = 0;
    k.mask_key = 1;
    return k;
}
static mixp_attention_backward_args backward_of(const Problem &p) {
    mixp_attention_backward_args k;
    memset((void *)&k, 0, sizeof k);
    k.forward = forward_of(p);
    k.dy = args_in(ON(p.a.dy));
    k.dq = args_out(ON(p.a.dq), p.c.accumulate);
    k.dk = args_out(ON(p.a.dk), p.c.accumulate);
    k.dv = args_out(ON(p.a.dv), p.c.accumulate);
    return k;
}

static void run_both(const Problem &p, bool back) {
    for (on_gpu = 1; on_gpu >= 0; on_gpu--) {
        const mixp_kernels *table = on_gpu ? gpu_kernels : cpu_kernels;
        mixp_attention_args forward = forward_of(p);
        mixp_attention_backward_args backward = backward_of(p);
        CHECK_INT(back ? table->attention_backward(X, &backward) : table->attention(X, &forward),
                  MIXP_OK);
    }
}

/* got within `one` of each sum of absolute terms, and a rounding. */
static void near_model(const Pair &got, const double *want, const double *size, double one,
                       const std::vector<double> *old) {
    WAIT();
    for (int64_t i = 0; i < got.n; i++) {
        double w = want[i] + (old ? (*old)[(size_t)i] : 0.0), g = value_at(got.gpu, got.dtype, i);
        double bound = one * (size[i] + 1e-3) + one_rounding(got.dtype, fabs(w) + one * size[i]) +
                       (got.dtype == MIXP_F32 ? 2e-6 * (fabs(w) + 1) : 0.0);
        if (fabs(g - w) <= bound) continue;
        test_bad++;
        TEST_SHOW("%s element %lld of %lld is %.9g, not %.9g (bound %.3g)", mixp_dtype_name(got.dtype),
                  (long long)i, (long long)got.n, g, w, bound);
        return;
    }
}

/* A weight and its gradient are rounded once on tensor cores, and y once before delta: each is a
 * share of the absolute terms. f32 kernels round nothing on the way. */
static void run_case(const Case &c) {
    Problem p;
    bool tensor = c.dtype != MIXP_F32 && (c.d == 32 || c.d == 64 || c.d == 128);
    double one = c.dtype == MIXP_F16 ? 1.0 / 1024.0 : c.dtype == MIXP_BF16 ? 1.0 / 128.0 : 4e-6;
    bool takes;
    make(p, c);
    on_gpu = 1;
    CHECK_INT(inside_tensor_takes(&gpu_exec, backward_of(p), &takes), MIXP_OK);
    int capability = inside_capability(&gpu_exec);      /* 7.0: none; 7.5: no bf16, and too little shared memory */
    CHECK_INT(takes, tensor && capability >= 75 && !(capability < 80 && (c.dtype == MIXP_BF16 || c.d == 128)));
    run_both(p, false);
    near_model(p.a.y, p.m.y, p.m.y_size, one, NULL);
    for (int64_t i = 0; i < p.a.lse.n; i++) {
        double got = value_at(p.a.lse.gpu, MIXP_F32, i), want = p.m.lse[i];
        CHECK(got == want || fabs(got - want) <= 4e-6 * (1.0 + fabs(want)));
    }
    run_both(p, true);
    near_model(p.a.dq, p.m.dq, p.m.dq_size, one, c.accumulate ? &p.old[0] : NULL);
    near_model(p.a.dk, p.m.dk, p.m.dk_size, one, c.accumulate ? &p.old[1] : NULL);
    near_model(p.a.dv, p.m.dv, p.m.dv_size, one, c.accumulate ? &p.old[2] : NULL);
    end(p);
}

/* --- tensor cores ------------------------------------------------------------------------ */

/* All mixes of what changes scores, and of what hides them. */
static void mixes_body(void) {
    for (int what = 0; what < 32; what++) {
        Case c = case_of(what % 2 ? MIXP_F16 : MIXP_BF16, 33 + what, 70 - what, 32, what);
        c.past = what % 3 * 20;
        c.b = 1 + what % 2;
        if (getenv("MIXPREC_TEST_QUICK") && what % 3) continue;
        run_case(c);
    }
}
static void test_mixes(void) { in_all_schedules(mixes_body); }

static void wide_body(void) {
    run_case(case_of(MIXP_F16, 65, 7, 64, MASK | DROPOUT));
    run_case(case_of(MIXP_BF16, 7, 130, 64, LENGTHS | CAP));
    run_case(case_of(MIXP_F16, 7, 65, 128, CAUSAL | MASK | CAP));
    run_case(case_of(MIXP_BF16, 65, 66, 128, CAUSAL));
    run_case(case_of(MIXP_F16, 1, 1, 64, MASK));
}
static void test_wide(void) { in_all_schedules(wide_body); }

/* Several heads share keys, over more blocks than one; sums are added to. */
static void grouped_body(void) {
    Case c = case_of(MIXP_F16, 140, 150, 32, CAUSAL);
    c.past = 10;
    c.heads = 4;
    c.kv_heads = 2;
    c.accumulate = 1;
    run_case(c);
    c.what = LENGTHS;
    c.b = 2;
    c.t = 40;
    c.heads = 3;
    c.kv_heads = 1;
    run_case(c);
}
static void test_grouped(void) { in_all_schedules(grouped_body); }

/* --- f32 --------------------------------------------------------------------------------- */

static void plain_body(void) {
    for (int what = 0; what < 32; what++) {
        Case c = case_of(what % 3 ? MIXP_F32 : MIXP_F16, 3 + what, 40 - what, 8 + what % 2 * 72, what);
        c.past = what % 3 * 9;
        c.b = 1 + what % 2;
        c.heads = 4;
        c.kv_heads = 1 << what % 3;
        c.accumulate = what / 2 % 2;
        if (getenv("MIXPREC_TEST_QUICK") && what % 3) continue;
        run_case(c);
    }
    /* Several blocks, tiles of keys and tiles of queries. */
    Case c = case_of(MIXP_F32, 70, 140, 24, CAUSAL | MASK | CAP | DROPOUT);
    c.past = 30;
    run_case(c);
}
static void test_plain(void) { in_all_schedules(plain_body); }

/* --- edges ------------------------------------------------------------------------------- */

/* What a query cannot see for want of length is not read, were it NaN; its gradient is 0. */
static void padding_body(void) {
    for (int64_t d = 8; d <= 32; d += 24) {
        Case c = case_of(MIXP_F16, 20, 90, d, LENGTHS);
        Problem p;
        c.b = 2;                        /* the second has none at all */
        make(p, c);
        for (int64_t i = 0; i < p.a.k.n; i++)
            if (i / c.d >= p.lengths[0]) {
                set_value(p.a.k, i, NAN);
                set_value(p.a.v, i, NAN);
            }
        run_both(p, false);
        run_both(p, true);
        near_model(p.a.y, p.m.y, p.m.y_size, 1.0 / 1024.0, NULL);
        near_model(p.a.dq, p.m.dq, p.m.dq_size, 1.0 / 1024.0, NULL);
        near_model(p.a.dk, p.m.dk, p.m.dk_size, 1.0 / 1024.0, NULL);
        for (int64_t i = p.lengths[0] * c.d; i < p.a.dv.n; i++)
            CHECK(value_at(p.a.dv.gpu, c.dtype, i) == 0.0);
        end(p);
    }
}
static void test_padding(void) { in_all_schedules(padding_body); }

/* Gradients that nobody wants are left out; the others have the same bits. */
static void some_wanted_body(void) {
    for (int64_t d = 8; d <= 32; d += 24) {
        Case c = case_of(MIXP_F16, 20, 30, d, 0);
        Problem p;
        std::vector<double> all;
        make(p, c);
        run_both(p, false);
        run_both(p, true);
        WAIT();
        for (int64_t i = 0; i < p.a.dk.n; i++) all.push_back(value_at(p.a.dk.gpu, c.dtype, i));
        for (int64_t i = 0; i < p.a.dk.n; i++) set_value(p.a.dk, i, NAN);
        for (int64_t i = 0; i < p.a.dq.n; i++) set_value(p.a.dq, i, 3.0);
        on_gpu = 1;
        mixp_attention_backward_args k = backward_of(p);
        k.dq.data = k.dv.data = NULL;
        CHECK_INT(gpu_kernels->attention_backward(X, &k), MIXP_OK);
        WAIT();
        for (int64_t i = 0; i < p.a.dk.n; i++)
            CHECK(value_at(p.a.dk.gpu, c.dtype, i) == all[(size_t)i]);
        for (int64_t i = 0; i < p.a.dq.n; i++) CHECK(value_at(p.a.dq.gpu, c.dtype, i) == 3.0);
        end(p);
    }
}
static void test_some_wanted(void) { in_all_schedules(some_wanted_body); }

/* A length outside is told by the next call that waits; the CPU refuses it at once. */
static void lengths_body(void) {
    Case c = case_of(MIXP_F16, 5, 6, 32, LENGTHS);
    Problem p;
    make(p, c);
    set_code(p.a.lengths, 0, 7);
    on_gpu = 0;
    mixp_attention_args k = forward_of(p);
    CHECK_INT(cpu_kernels->attention(X, &k), MIXP_ERR_ARGUMENT);
    on_gpu = 1;
    k = forward_of(p);
    CHECK_INT(gpu_kernels->attention(X, &k), MIXP_OK);
    CHECK_INT(gpu_device->wait(&gpu_exec), MIXP_ERR_ARGUMENT);
    CHECK_TEXT(gpu_device->message(&gpu_exec), "length 7 at row 0 is outside [0, keys]");
    WAIT();
    k.kv_heads = 3;
    CHECK_INT(gpu_kernels->attention(X, &k), MIXP_ERR_ARGUMENT);
    k = forward_of(p);
    k.mask = args_in(ON(p.a.lengths));
    CHECK_INT(gpu_kernels->attention(X, &k), MIXP_ERR_DTYPE);
    k = forward_of(p);
    k.keys = (int64_t)1 << 31;
    CHECK_INT(gpu_kernels->attention(X, &k), MIXP_ERR_SHAPE);
    end(p);
}
static void test_lengths(void) { in_all_schedules(lengths_body); }

/* A mask may put scores as far from 0 as f32 goes: the first tile of keys, and all of a query's. */
static void far_problem(Problem &p, const Case &c, double low) {
    make(p, c);
    finish(p.a.mask);
    p.mask.clear();
    p.a.mask = numbers(MIXP_F32, c.t * c.keys, 1.0, 0);
    for (int64_t i = 0; i < p.a.mask.n; i++)
        if (i % c.keys < 70 || i / c.keys == 1) set_value(p.a.mask, i, low);
    for (int64_t i = 0; i < c.heads * c.t * c.keys; i++)
        p.mask.push_back(value_at(p.a.mask.cpu, MIXP_F32, i % p.a.mask.n));
    for (int64_t i = c.heads * c.d; i < 2 * c.heads * c.d; i++) {
        set_value(p.a.dy, i, 0.0);      /* its lse cannot hold the logarithm of how many there are */
        p.dy[(size_t)i] = 0.0;
    }
    p.m.mask = p.mask.data();
    model_run(&p.m, NULL);
}
static void far_body(void) {
    for (int i = 0; i < 4; i++) {
        Case c = case_of(i % 2 ? MIXP_F16 : MIXP_BF16, 20, 150, i / 2 ? 128 : 32, MASK);
        double one = i % 2 ? 1.0 / 1024.0 : 1.0 / 128.0;
        Problem p;
        far_problem(p, c, i == 1 || i == 2 ? -3.4028234663852886e38 : -1e20);
        run_both(p, false);
        near_model(p.a.y, p.m.y, p.m.y_size, one, NULL);
        for (int64_t j = 0; j < p.a.lse.n; j++)
            CHECK(fabs(value_at(p.a.lse.gpu, MIXP_F32, j) - p.m.lse[j]) <=
                  4e-6 * (1.0 + fabs(p.m.lse[j])));
        run_both(p, true);
        near_model(p.a.dq, p.m.dq, p.m.dq_size, one, NULL);
        near_model(p.a.dk, p.m.dk, p.m.dk_size, one, NULL);
        near_model(p.a.dv, p.m.dv, p.m.dv_size, one, NULL);
        end(p);
    }
}
static void test_far(void) { in_all_schedules(far_body); }

int main(void) {
    cudasim::max_shared = 99 * 1024;        /* of 8.6, 8.9 and 12.0: the least there is */
    RUN(test_mixes);
    RUN(test_wide);
    RUN(test_grouped);
    RUN(test_plain);
    RUN(test_padding);
    RUN(test_some_wanted);
    RUN(test_lengths);
    RUN(test_far);
    return test_report();
}
