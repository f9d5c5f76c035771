/* amx_attention.h - attention by AMX: test_amx.c runs these cases on the emulation in amxsim.h. They
 * compare attention with plain double loops, and its bits between threads and parts of a sequence.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * Include it after mixprec.h, test.h and arrays.h. device_of(isa) returns the device or NULL.
 */
#include "attention_problem.h"

/* q, k, v and dy in `low`, results in `results`. */
static attention_problem tiled_problem(const int64_t sizes[6], int what, mixp_dtype low,
                                       mixp_dtype results) {
    mixp_dtype dtypes[ARRAYS];
    for (int i = 0; i < ARRAYS; i++) dtypes[i] = i >= Y ? results : low;
    return attention_problem_of(sizes, what, dtypes);
}

/* Weights and their gradients keep 16 bits, so an element errs by 2^-16 more of its terms' sum. dq
 * and dk are products of a gradient that took the error of a weight with it. */
static void tiled_try(mixp_isa isa, mixp_dtype low, const int64_t sizes[6], int what) {
    const mixp_device *d = device_of(isa);
    const int64_t dots = amxsim_dots;
    uint64_t bits = 0;
    attention_problem s = tiled_problem(sizes, what, low, what % 3 ? MIXP_F32 : low);
    if (what & LENGTHS) s.m.lengths = s.lengths;
    if (what % 16 == 15) s.m.scale = -s.m.scale;
    attention_check(&s, d, d->name, ldexp(1, -16));
    attention_check_bits(&s, d, &bits);
    CHECK(amxsim_dots > dots || what & (LENGTHS | HIDDEN_ROWS));
    CHECK_INT(amxsim_faults, 0);
    CHECK(!amxsim_cpu.configured);
    attention_problem_free(&s);
}

/* Every mix of what there is; one in five with MIXPREC_TEST_QUICK. */
static void tiled_mixes(mixp_isa isa, mixp_dtype low) {
    const int step = getenv("MIXPREC_TEST_QUICK") ? 5 : 1;
    if (!device_of(isa)) SKIP("no AVX-512");
    for (int what = 0; what < 64; what += step) {
        const int64_t kv = 1 + random_to(2), group = 1 + random_to(3);
        const int64_t sizes[6] = { 1 + random_to(2), 1 + random_to(40), 1 + random_to(90), kv * group, kv,
                                   1 + random_to(40) };
        tiled_try(isa, low, sizes, what);
    }
}
static void attention_of_bf16(void)    { tiled_mixes(MIXP_ISA_AMX, MIXP_BF16); }
static void attention_of_split(void)   { tiled_mixes(MIXP_ISA_AMX, MIXP_F16); }
static void attention_of_f16(void)     { tiled_mixes(MIXP_ISA_AMX_F16, MIXP_F16); }

/* Around the edges of blocks of queries and keys and of tiles. */
static void attention_around_edges(void) {
    static const int64_t t[6] = { 1, 16, 17, 32, 33, 65 }, keys[6] = { 130, 16, 64, 33, 65, 65 };
    static const int64_t d[6] = { 128, 16, 17, 64, 32, 80 };
    if (!device_of(MIXP_ISA_AMX)) SKIP("no AVX-512");
    for (int i = 0; i < 6; i++)
        for (int j = 0; j < 3; j++) {
            const int64_t sizes[6] = { 1, t[i], keys[i], 2, 1, d[(i + j) % 6] };
            tiled_try((mixp_isa)(MIXP_ISA_AMX + j / 2), j ? MIXP_F16 : MIXP_BF16, sizes, i % 2 ? CAUSAL : CAUSAL | MASK);
        }
}

/* What tiles do not multiply has AVX-512's bits: operands of different dtypes. */
static void other_attention_is_avx512s(void) {
    static const int64_t sizes[6] = { 1, 35, 70, 2, 1, 20 };
    const mixp_device *d = device_of(MIXP_ISA_AMX), *avx = mixp_cpu_with(MIXP_ISA_AVX512);
    if (!d) SKIP("no AVX-512");
    for (int i = 0; i < 4; i++) {
        const int64_t dots = amxsim_dots;
        uint64_t bits = 0;
        mixp_dtype dtypes[ARRAYS];
        for (int j = 0; j < ARRAYS; j++) dtypes[j] = j == i && i < V ? MIXP_F16 : MIXP_BF16;
        if (i == V) dtypes[V] = MIXP_F32;
        if (i == DY) dtypes[Q] = dtypes[K] = dtypes[V] = MIXP_F32;
        attention_problem s = attention_problem_of(sizes, CAUSAL | DROPOUT, dtypes);
        attention_check_bits(&s, avx, &bits);
        attention_check_bits(&s, d, &bits);
        CHECK_INT(amxsim_dots, dots);
        attention_problem_free(&s);
    }
}

/* --- any part of a sequence --- */

enum { PART_TIME = 71, PART_HEADS = 4, PART_D = 20, PART_ROW = PART_HEADS * PART_D };

/* Queries [first, first + n) of s, with the keys before their end. y: [n, heads, d] in f32. */
static void tiled_part(const mixp_device *dev, const attention_problem *s, int64_t first, int64_t n,
                       int threads, float *y, float *lse) {
    runner    r;
    mixp_exec x = runner_exec(&r, threads);
    mixp_attention_args k = attention_args_of(s);
    k.q.data = (const char *)k.q.data + 2 * first * PART_ROW;
    k.t = n;
    k.keys = first + n;
    k.past = first;
    k.y.data = y;
    k.lse = lse;
    CHECK_INT(dev->kernels->attention(&x, &k), MIXP_OK);
    CHECK(runner_end(&r));
}

/* Sets the numbers of token t in q, k and v. */
static void tiled_spoil(attention_problem *s, int64_t t, double x) {
    for (int which = Q; which <= V; which++)
        for (int64_t c = 0; c < 3; c++)
            array_set(s->a[which], t * s->n[which] / PART_TIME + 7 * c, x);
}

/* A query's bits do not depend on other queries nor on keys behind it, and those may hold anything: the parts are tried
 * from the last to the first. spoilt: a token in between holds Inf, so results from there on are not finite. */
static void tiled_parts(mixp_isa isa, mixp_dtype low, int spoilt) {
    static const int parts[7][2] = { { 0, 1 }, { 3, 2 }, { 0, 33 }, { 31, 11 }, { 13, 51 }, { 65, 1 }, { 70, 1 } };
    static const int64_t sizes[6] = { 1, PART_TIME, PART_TIME, PART_HEADS, 2, PART_D };
    static float all[PART_TIME * PART_ROW], some[PART_TIME * PART_ROW], all_lse[PART_HEADS * PART_TIME],
                 lse[PART_HEADS * PART_TIME];
    const mixp_device *d = device_of(isa);
    int64_t leaked = 0;
    if (!d) SKIP("no AVX-512");
    attention_problem s = tiled_problem(sizes, CAUSAL, low, MIXP_F32);
    if (spoilt) tiled_spoil(&s, 40, INFINITY);
    tiled_part(d, &s, 0, PART_TIME, 3, all, all_lse);
    for (int64_t e = 0; e < 40 * PART_ROW; e++) leaked += !(fabsf(all[e]) < 1e30f);
    CHECK_INT(leaked, 0);
    for (int i = 6; i >= 0; i--) {
        const int64_t first = parts[i][0], n = parts[i][1];
        int64_t bad = 0, odd = 0;
        if (first + n < PART_TIME) tiled_spoil(&s, first + n, i % 2 ? NAN : INFINITY);
        tiled_part(d, &s, first, n, i % 4, some, lse);
        for (int64_t e = 0; e < n * PART_ROW; e++) {
            const float x = some[e], y = all[first * PART_ROW + e];
            odd += !(fabsf(x) < 1e30f);
            bad += mixp_bits_of_f32(x) != mixp_bits_of_f32(y) && !(x != x && y != y);
        }
        for (int64_t h = 0; h < PART_HEADS; h++)
            bad += !spoilt && memcmp(lse + h * n, all_lse + h * PART_TIME + first, (size_t)n * sizeof *lse) != 0;
        CHECK_INT(bad, 0);
        CHECK_INT(odd > 0, spoilt && first + n > 40);
        tiled_part(d, &s, 0, first + n, 2, some, lse);
        if (!spoilt) CHECK(memcmp(some, all, (size_t)((first + n) * PART_ROW) * sizeof *some) == 0);
    }
    CHECK_INT(amxsim_faults, 0);
    CHECK(!amxsim_cpu.configured);
    attention_problem_free(&s);
}
static void attention_of_parts(void) {
    for (int i = 0; i < 6; i++)
        tiled_parts(i % 3 < 2 ? MIXP_ISA_AMX : MIXP_ISA_AMX_F16, i % 3 ? MIXP_F16 : MIXP_BF16, i / 3);
}

/* --- Inf and NaN --- */

static int class_of(test_array a, int64_t i) {
    const double x = array_get(a, i);
    if (x != x) return 3;
    return x == INFINITY ? 1 : x == -INFINITY ? 2 : 0;
}

/* Elements of an array that are finite in one problem only, or Inf, or NaN. */
static int64_t classes_differ(const attention_problem *s, const attention_problem *t, int which) {
    int64_t bad = 0;
    for (int64_t i = 0; i < s->n[which]; i++) bad += class_of(s->a[which], i) != class_of(t->a[which], i);
    return bad;
}

/* A number that is not finite gives Inf and NaN where AVX-512 gives them. */
static void tiled_bad_number(const mixp_device *d, mixp_dtype low, int which, double bad) {
    static const int64_t sizes[6] = { 1, 40, 70, 2, 2, 20 };
    const mixp_device *avx = mixp_cpu_with(MIXP_ISA_AVX512);
    mixp_dtype dtypes[ARRAYS] = { low, low, low, low, MIXP_F32, MIXP_F32, MIXP_F32, MIXP_F32 };
    attention_problem s = attention_problem_of(sizes, 0, dtypes), t = s;
    for (int i = Y; i < ARRAYS; i++) t.a[i] = array_new(MIXP_F32, s.n[i]);
    s.accumulate = t.accumulate = 0;
    array_set(s.a[which], s.n[which] / 2 + 3, bad);
    attention_forward(avx, &s, 0);
    attention_forward(d, &t, 0);
    CHECK_INT(classes_differ(&s, &t, Y), 0);
    attention_forward(avx, &t, 0);          /* lse, and the same y for both */
    attention_backward(avx, &s, 0);
    attention_backward(d, &t, 0);
    for (int i = DQ; i < ARRAYS; i++) CHECK_INT(classes_differ(&s, &t, i), 0);
    for (int i = Y; i < ARRAYS; i++) array_free(t.a[i]);
    attention_problem_free(&s);
    CHECK(!amxsim_cpu.configured);
}
static void attention_of_inf_and_nan(void) {
    static const double bad[3] = { NAN, INFINITY, -INFINITY };
    if (!device_of(MIXP_ISA_AMX)) SKIP("no AVX-512");
    for (int i = 0; i < 36; i++)
        tiled_bad_number(device_of(i / 12 < 2 ? MIXP_ISA_AMX : MIXP_ISA_AMX_F16), i / 12 ? MIXP_F16 : MIXP_BF16,
                         i % 4, bad[i / 4 % 3]);
    CHECK_INT(amxsim_faults, 0);
}

/* --- weights --- */

/* v is the identity, so y is the weights: those that are dropped are AVX-512's. */
static void attention_drops_as_avx512(void) {
    static const int64_t sizes[6] = { 2, 35, 32, 2, 1, 32 };
    const mixp_device *d = device_of(MIXP_ISA_AMX);
    int64_t bad = 0, dropped = 0;
    if (!d) SKIP("no AVX-512");
    attention_problem s = tiled_problem(sizes, DROPOUT, MIXP_BF16, MIXP_F32);
    for (int64_t i = 0; i < s.n[V]; i++) array_set(s.a[V], i, i / 32 % 32 == i % 32);
    attention_forward(mixp_cpu_with(MIXP_ISA_AVX512), &s, 0);
    double *want = attention_decoded(s.a[Y], s.n[Y]);
    attention_forward(d, &s, 0);
    for (int64_t i = 0; i < s.n[Y]; i++) {
        bad += (array_get(s.a[Y], i) == 0) != (want[i] == 0);
        dropped += want[i] == 0;
    }
    CHECK_INT(bad, 0);
    CHECK(dropped > s.n[Y] / 8 && dropped < s.n[Y] / 2);
    free(want);
    attention_problem_free(&s);
}

/* Half of the keys share the largest score, the others a smaller one; all values are negative. If weights were rounded
 * to bf16, all elements would err by up to 2^-9 in one direction. */
static void repeated_maxima_have_no_bias(void) {
    static const int64_t sizes[6] = { 1, 20, 256, 1, 1, 32 };
    const mixp_device *d = device_of(MIXP_ISA_AMX);
    double p[2], mean = 0, most = 0;
    if (!d) SKIP("no AVX-512");
    attention_problem s = tiled_problem(sizes, 0, MIXP_BF16, MIXP_F32);
    for (int64_t i = 0; i < s.n[Q]; i++) array_set(s.a[Q], i, 1);
    for (int64_t i = 0; i < s.n[K]; i++) {
        array_set(s.a[K], i, i / 32 % 2 ? 0.625 : 0.75);
        array_set(s.a[V], i, -0.75 - 0.25 * random_value());
    }
    attention_forward(d, &s, 0);
    p[0] = 1 / (128 * (1 + exp(-4 * s.m.scale)));
    p[1] = 1 / 128.0 - p[0];
    CHECK(fabs((double)mixp_f32_from_bf16(mixp_bf16_from_f32((float)(p[1] / p[0]))) * p[0] / p[1] - 1) > ldexp(1, -11));
    for (int64_t c = 0; c < 32; c++) {
        double want = 0, off;
        for (int64_t j = 0; j < 256; j++) want += p[j % 2] * array_get(s.a[V], 32 * j + c);
        for (int64_t i = 0; i < 20; i++) {
            off = array_get(s.a[Y], 32 * i + c) / want - 1;
            mean += off / (20 * 32);
            most = fabs(off) > most ? fabs(off) : most;
        }
    }
    CHECK(most < ldexp(1, -16));
    CHECK(fabs(mean) < ldexp(1, -17));
    attention_problem_free(&s);
}

/* Scores of about 1e11, whose rounding errors are above 88, the logarithm of the largest number: the key with the largest
 * score has the weight 1. All elements of a query or key are equal, so that sums are exact. */
static void large_scores_have_finite_weights(mixp_isa isa, mixp_dtype low) {
    static const int64_t sizes[6] = { 1, 33, 70, 1, 1, 32 };
    const mixp_device *d = device_of(isa);
    int64_t largest, i, bad = 0;
    if (!d) SKIP("no AVX-512");
    attention_problem s = tiled_problem(sizes, 0, low, MIXP_F32);
    for (int try_number = 0; try_number < 12; try_number++) {
        largest = random_to(70);
        s.m.scale = 1 + random_to(1000) / 1000.0;
        for (i = 0; i < s.n[Q]; i++) array_set(s.a[Q], i, (double)(65280 - 256 * (i / 32 % 40)));
        for (i = 0; i < s.n[K]; i++) array_set(s.a[K], i, i / 32 == largest ? 65280.0 : (double)(32640 - 128 * (i / 32 % 9)));
        attention_forward(d, &s, 0);
        for (i = 0; i < s.n[Y]; i++) {
            double want = array_get(s.a[V], 32 * largest + i % 32);
            bad += !(fabs(array_get(s.a[Y], i) - want) <= ldexp(1, -16) * fabs(want));
        }
        for (i = 0; i < 33; i++) {
            double want = 32 * 65280.0 * array_get(s.a[Q], 32 * i) * (double)(float)s.m.scale;
            bad += !(fabs((double)s.lse[i] - want) <= ldexp(1, -20) * want);
        }
    }
    CHECK_INT(bad, 0);
    attention_problem_free(&s);
}
static void attention_of_large_scores(void) {
    large_scores_have_finite_weights(MIXP_ISA_AMX, MIXP_BF16);
    large_scores_have_finite_weights(MIXP_ISA_AMX, MIXP_F16);
    large_scores_have_finite_weights(MIXP_ISA_AMX_F16, MIXP_F16);
}

/* Scratch memory grows with the length, not with its square. */
static size_t tiled_scratch(const mixp_device *dev, int64_t t, int backward) {
    const int64_t sizes[6] = { 1, t, t, 1, 1, 8 };
    attention_problem s = tiled_problem(sizes, CAUSAL, MIXP_BF16, MIXP_F32);
    mixp_attention_backward_args k;
    runner    r;
    mixp_exec x = runner_exec(&r, 1);
    memset(&k, 0, sizeof k);
    k.forward = attention_args_of(&s);
    k.dy = args_in(s.a[DY]);
    k.dq = args_out(s.a[DQ], 0);
    if (backward) CHECK_INT(dev->kernels->attention_backward(&x, &k), MIXP_OK);
    else CHECK_INT(dev->kernels->attention(&x, &k.forward), MIXP_OK);
    size_t bytes = r.bytes;
    CHECK(runner_end(&r));
    attention_problem_free(&s);
    return bytes;
}
static void attention_scratch_is_linear(void) {
    const mixp_device *d = device_of(MIXP_ISA_AMX);
    if (!d) SKIP("no AVX-512");
    for (int backward = 0; backward < 2; backward++)
        CHECK(tiled_scratch(d, 512, backward) <= 2 * tiled_scratch(d, 256, backward));
}
