/* test_cuda.cpp - the CUDA table's runtime and elementwise kernels, simulated, compared with the
 * CPU.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "cuda_pair.h"

static const mixp_dtype reals[] = { MIXP_F32, MIXP_F16, MIXP_BF16 };
static const int sizes[] = { 1, 7, 8, 9, 255, 2049, 5003 };

/* A dtype, and whether something is misaligned or accumulates, from a counter. */
static mixp_dtype real_of(int i) { return reals[(unsigned)i % 3]; }

/* --- convert, fill ------------------------------------------------------------------------ */

/* Random codes, and the special ones of every format among them. */
static Pair codes(mixp_dtype dtype, int64_t n, int off) {
    static const double special[] = { 0.0, -0.0, 1.0, 65504.0, 65520.0, 448.0, 464.0, 480.0,
        57344.0, 61440.0, 1e-8, 5e-324, 3.4028235e38, 3.4028236e38, -1e300, 0.1, 127.5, 255.5, -3.7,
        6e9 };
    Pair p = empty(dtype, n, off);
    for (int64_t i = 0; i < n; i++) {
        if (i % 3 == 0) set_code(p, i, random_u64());
        else if (i % 3 == 1) set_value(p, i, special[random_u64() % 20]);
        else set_value(p, i, random_normal() * ldexp(1.0, (int)(random_u64() % 40) - 20));
    }
    return p;
}

static mixp_rounding rounding(int saturate, int stochastic) {
    mixp_rounding r;
    memset(&r, 0, sizeof r);
    r.saturate = saturate; r.stochastic = stochastic;
    r.seed = 7; r.step = 3; r.tensor = 11; r.first = 5;
    return r;
}

static void convert_body(void) {
    for (int to = 0; to < MIXP_DTYPE_COUNT; to++)
        for (int from = 0; from < MIXP_DTYPE_COUNT; from++) {
            int64_t n = 100 + (to * 17 + from) % 9;
            int off = (to + from) % 2;
            mixp_rounding r = rounding((to + from) % 3 == 1, (to + 2 * from) % 4 == 1);
            Pair a = codes((mixp_dtype)from, n, off), y = output((mixp_dtype)to, n, 0, off);
            BOTH(convert(X, args_convert(ON(y), ON(a), n, r.saturate || r.stochastic ? &r : NULL)));
            same_bits(y);
            finish(a);
            finish(y);
        }
}
static void test_convert(void) { in_all_schedules(convert_body); }

/* Every f32 exponent and rounding case of the dtypes that models are made of. */
static void convert_low_body(void) {
    const mixp_dtype low[] = { MIXP_F16, MIXP_BF16, MIXP_F8_E4M3, MIXP_F8_E5M2 };
    for (int i = 0; i < 16; i++) {
        mixp_rounding r = rounding(i / 4 & 1, i / 8);
        Pair a = codes(MIXP_F32, 2000, 0), y = output(low[i % 4], 2000, 0), b;
        BOTH(convert(X, args_convert(ON(y), ON(a), 2000, &r)));
        same_bits(y);
        b = output(MIXP_F32, 2000, 0);
        BOTH(convert(X, args_convert(ON(b), ON(y), 2000, NULL)));
        same_bits(b);
        finish(a);
        finish(b);
        finish(y);
    }
    Pair all = empty(MIXP_F16, 65536, 0), wide = output(MIXP_F32, 65536, 0), back;
    for (int i = 0; i < 65536; i++) set_code(all, i, (uint64_t)i);
    BOTH(convert(X, args_convert(ON(wide), ON(all), 65536, NULL)));
    same_bits(wide);
    back = output(MIXP_F16, 65536, 0);
    BOTH(convert(X, args_convert(ON(back), ON(wide), 65536, NULL)));
    same_bits(back);
    finish(all);
    finish(wide);
    finish(back);
}
static void test_convert_low(void) { in_all_schedules(convert_low_body); }

/* Numbers at which fp8 codes change: every bf16 and f16 number, and every number half way between two neighbours of
 * e4m3 and e5m2, with the f32 numbers around it. NaN with payloads, in both signs. */
static Pair fp8_numbers(void) {
    std::vector<uint32_t> bits;
    for (uint32_t i = 0; i < 65536; i++) bits.push_back(i << 16);
    for (uint32_t i = 0; i < 65536; i++) bits.push_back(mixp_bits_of_f32(mixp_f32_from_f16(mixp_f16_of_bits(i))));
    for (const mixp_dtype d : { MIXP_F8_E4M3, MIXP_F8_E5M2 })
        for (uint32_t code = 0; code < 128; code++) {
            const float a = (float)mixp_decode(d, code), b = (float)mixp_decode(d, code + (code < 127));
            const float half = std::isfinite(b) ? (a + b) / 2.0f : a * 1.125f;
            for (int sign = 0; sign < 2; sign++)
                for (uint32_t near = 0; near < 5; near++)
                    bits.push_back((mixp_bits_of_f32(half) - 2 + near) ^ (uint32_t)sign << 31);
        }
    for (uint32_t payload = 1; payload < 0x800000; payload += payload) bits.push_back(0x7F800000u | payload);
    for (uint32_t payload = 1; payload < 0x800000; payload += payload) bits.push_back(0xFF800000u | payload);
    while (bits.size() % 8 != 3) bits.push_back(0);     /* the last ones go one by one */
    Pair p = empty(MIXP_F32, (int64_t)bits.size(), 0);
    for (size_t i = 0; i < bits.size(); i++) set_code(p, (int64_t)i, bits[i]);
    return p;
}

/* A GPU of 8.9 and up converts to fp8 by an instruction: the codes are the host's, bit for bit. */
static void convert_fp8_body(void) {
    Pair a = fp8_numbers();
    for (int i = 0; i < 8; i++) {
        mixp_rounding r = rounding(i / 2 % 2, 0);
        Pair y = output(i % 2 ? MIXP_F8_E5M2 : MIXP_F8_E4M3, a.n, 0, i / 4);
        BOTH(convert(X, args_convert(ON(y), ON(a), a.n, &r)));
        same_bits(y);
        finish(y);
    }
    finish(a);
}
static void test_convert_fp8(void) { pair_open(); convert_fp8_body(); pair_close(); }

static void convert_in_place_body(void) {
    const mixp_dtype narrower[] = { MIXP_F16, MIXP_BF16, MIXP_F8_E4M3, MIXP_U8 };
    for (int i = 0; i < 4; i++) {
        Pair a = codes(i == 3 ? MIXP_I64 : MIXP_F32, 3001, 0), y = a;
        y.dtype = narrower[i];
        BOTH(convert(X, args_convert(ON(y), ON(a), 3001, NULL)));
        same_bits(y);
        y.dtype = a.dtype;
        y.n = 1;
        finish(y);
    }
    Pair h = codes(MIXP_F16, 77, 1), b = h;
    b.dtype = MIXP_BF16;
    BOTH(convert(X, args_convert(ON(b), ON(h), 77, NULL)));
    same_bits(b);
    finish(b);
}
static void test_convert_in_place(void) { in_all_schedules(convert_in_place_body); }

static void fill_body(void) {
    for (int d = 0; d < MIXP_DTYPE_COUNT; d++)
        for (int i = 0; i < 3; i++) {
            Pair y = output((mixp_dtype)d, 301, 0, i);
            BOTH(fill(X, args_fill(ON(y), 301, i == 0 ? 0.0 : i == 1 ? 1.25 : -3.0)));
            same_bits(y);
            finish(y);
        }
}
static void test_fill(void) { in_all_schedules(fill_body); }

/* --- copy ---------------------------------------------------------------------------------- */

/* A random shape and a random order of axes on each side; sometimes a gap. */
static void copy_one(int round) {
    int rank = round % 5, order[2][8];
    int64_t shape[8], strides[2][8], size[2];
    static const int64_t lengths[] = { 1, 2, 3, 8, 16, 33, 40 };
    for (int i = 0; i < rank; i++) shape[i] = lengths[random_u64() % (rank > 3 ? 4 : 7)];
    for (int k = 0; k < 2; k++) {
        for (int i = 0; i < rank; i++) order[k][i] = i;
        for (int i = rank - 1; i > 0 && (round / 5 + k) % 2; i--) {
            int j = (int)(random_u64() % (uint64_t)(i + 1)), t = order[k][i];
            order[k][i] = order[k][j];
            order[k][j] = t;
        }
        size[k] = 1;
        for (int i = rank - 1; i >= 0; i--) {
            strides[k][order[k][i]] = size[k];
            size[k] *= shape[order[k][i]];
            if (i == rank - 1 && round % 4 == 3) size[k] += k ? 8 : 3;
        }
    }
    const mixp_dtype any[] = { MIXP_F32, MIXP_F16, MIXP_U8, MIXP_I64 };
    int accumulate = round % 3 == 1, mixed = accumulate || round % 7 == 2;
    mixp_dtype to = mixed ? real_of(round) : any[round % 4];
    Pair d = output(to, size[0], accumulate || round % 4 == 3, round % 2);
    Pair s = numbers(mixed ? real_of(round / 2) : to, size[1], 10.0, round % 3 == 0);
    if (to == MIXP_U8 || to == MIXP_I64) for (int64_t i = 0; i < size[0]; i++) set_value(d, i, 9.0);
    BOTH(copy(X, args_copy(rank, shape, ON(d), strides[0], ON(s), strides[1], accumulate)));
    same_bits(d);
    finish(d);
    finish(s);
}
static void copy_body(void) { for (int i = 0; i < 60; i++) copy_one(i); }
static void test_copy(void) { in_all_schedules(copy_body); }

/* By tiles, elements of each size. */
static void transposed_body(void) {
    static const mixp_dtype any[] = { MIXP_U8, MIXP_F16, MIXP_F32, MIXP_I64 };
    const int64_t shape[3] = { 2, 41, 70 }, to[3] = { 41 * 70, 70, 1 }, from[3] = { 41 * 70, 1, 41 };
    for (mixp_dtype dtype : any) {
        Pair d = empty(dtype, 2 * 41 * 70, 0), s = numbers(dtype, 2 * 41 * 70, 40.0, 1);
        BOTH(copy(X, args_copy(3, shape, ON(d), to, ON(s), from, 0)));
        same_bits(d);
        finish(d);
        finish(s);
    }
}
static void transposed(void) { in_all_schedules(transposed_body); }

/* --- unary ---------------------------------------------------------------------------------- */

static const double unary_slack[] = { 0, 1e-6, 2e-6, 1e-6, 1e-6, 1e-6, 1e-6, 1e-6, 0, 3e-6, 0,
                                      0, 0, 1e-6, 1e-6, 2e-6, 0, 0, 1e-6, 1e-6, 1e-6, 1e-6, 0, 1e-6, 0,
                                      1e-6, 1e-6, 1e-6, 1e-6, 1e-6, 1e-6, 1e-6, 1e-6 };
static_assert(sizeof unary_slack / sizeof *unary_slack == MIXP_UNARY_COUNT, "one for each");

static void unary_body(void) {
    int turn = 0;
    for (int op = 0; op < MIXP_UNARY_COUNT; op++)
        for (int s = 0; s < 7; s++, turn++) {
            int n = sizes[s], off = turn % 2;
            bool positive = (op >= MIXP_UNARY_LOG && op <= MIXP_UNARY_POW) || op == MIXP_UNARY_LOG1P ||
                op == MIXP_UNARY_ROOT;
            static const float powers[] = { 2.5f, 2.0f, 3.0f, 0.5f, -1.0f, 1.0f, 0.0f };
            float p = op == MIXP_UNARY_SOFTPLUS ? powers[s] * powers[s] + 0.5f : powers[s];
            Pair a = numbers(real_of(turn), n, s == 3 ? 30.0 : 2.0, off);
            Pair y = output(real_of(turn / 3), n, 0), dy = numbers(real_of(turn / 2), n, 1.0, 0);
            for (int i = 0; positive && i < n; i++)
                set_value(a, i, fabs(value_at(a.cpu, a.dtype, i)) + 0.01);
            BOTH(unary(X, args_unary((mixp_unary)op, n, ON(y), ON(a), p)));
            if (unary_slack[op] == 0.0) same_bits(y);
            else close_to(y, op == MIXP_UNARY_LOG ? 3e-7 : 1e-7, unary_slack[op]);
            Pair da = output(real_of(turn / 5), n, turn % 3 == 0, off);
            for (int i = 0; i < n; i++)         /* both from the same y */
                set_value(y, i, value_at(y.cpu, y.dtype, i));
            BOTH(unary_backward(X,
                    args_unary_backward((mixp_unary)op, n, ON(da), turn % 3 == 0, ON(dy), ON(a),
                        ON(y),
                                p)));
            close_to(da, 1e-5, 4e-6);
            finish(a); finish(y); finish(dy); finish(da);
        }
}
static void test_loss(void);
static void test_unary(void) { in_all_schedules(unary_body); }

/* NaN, Inf, zeros of both signs and the bounds of clamp: what the CPU gives. */
static void unary_special_body(void) {
    static const uint32_t bits[] = { 0x7FC00000u, 0x7F800000u, 0xFF800000u, 0u, 0x80000000u,
                                     0x7F7FFFFFu, 0xFF7FFFFFu, 1u, 0x40000000u, 0x40600000u };
    for (int op = 0; op < MIXP_UNARY_COUNT; op++) {
        Pair a = empty(MIXP_F32, 10, 0), y = output(MIXP_F32, 10, 0), da = output(MIXP_F32, 10, 0);
        Pair dy = numbers(MIXP_F32, 10, 1.0, 0);
        for (int i = 0; i < 10; i++) set_code(a, i, bits[i]);
        BOTH(unary(X, args_unary((mixp_unary)op, 10, ON(y), ON(a), 2.0f)));
        close_to(y, 1e-37, 1e-5);
        BOTH(unary_backward(X,
                args_unary_backward((mixp_unary)op, 10, ON(da), 0, ON(dy), ON(a), ON(y), 2.0f)));
        close_to(da, 1e-6, 1e-5);
        finish(a); finish(y); finish(dy); finish(da);
    }
}
static void test_unary_special(void) { in_all_schedules(unary_special_body); }

/* NaN in a maximum, and where a target is 0 in KL(target || x). */
static void edges_body(void) {
    static const uint32_t first[] = { 0x7FC00000u, 0x3F800000u, 0x7FC00000u, 0x7F800000u, 0u };
    static const uint32_t second[] = { 0x3F800000u, 0x7FC00000u, 0x7FC00000u, 0x7F800000u, 0u };
    const int64_t shape[1] = { 5 }, step[1] = { 1 };
    for (int op : { MIXP_BINARY_MAXIMUM, MIXP_BINARY_MINIMUM })
        for (int which = 0; which < 2; which++) {
            Pair a = empty(MIXP_F32, 5, 0), b = empty(MIXP_F32, 5, 0), d = output(MIXP_F32, 5, 0);
            Pair dy = numbers(MIXP_F32, 5, 1.0, 0);
            for (int i = 0; i < 5; i++) set_code(a, i, first[i]), set_code(b, i, second[i]);
            BOTH(binary_backward(X, args_binary_backward((mixp_binary)op, which, 1, shape, ON(d), 0,
                                                         ON(dy), ON(a), step, ON(b), step)));
            same_bits(d);
            CHECK(value_at(d.gpu, MIXP_F32, 2) == value_at(dy.gpu, MIXP_F32, 2));
            finish(a); finish(b); finish(d); finish(dy);
        }
    for (int i = 0; i < 4; i++) {
        Pair x = empty(MIXP_F32, 1, 0), target = empty(MIXP_F32, 1, 0), y = output(MIXP_F32, 1, 0);
        set_code(x, 0, i < 3 ? first[i + 1] : 0xBF800000u);
        set_code(target, 0, 0);
        BOTH(loss(X, args_loss(MIXP_LOSS_KL, 1, AT(float, y), ON(x), ON(target))));
        WAIT();
        CHECK_INT(std::isnan(value_at(y.gpu, MIXP_F32, 0)), i == 1 || i == 2);
        CHECK_INT(std::isnan(value_at(y.cpu, MIXP_F32, 0)), i == 1 || i == 2);
        finish(x); finish(target); finish(y);
    }
}
static void test_edges(void) { in_all_schedules(edges_body); }

/* NaNs of many payloads: moved and cast, they are the CPU's to the bit; computed with, they are NaNs,
 * and a GPU makes 0x7FFFFFFF of all. */
static void payloads_body(void) {
    static const uint32_t bits[] = { 0x7FC00123u, 0xFFC00001u, 0x7FFFFFFFu, 0xFFFFE000u, 0x7FC02000u,
                                     0x7F812345u, 0xFFA0F000u, 0x7FD55555u, 0x7FC70000u };
    const int n = sizeof bits / sizeof *bits;
    int64_t shape[1] = { n }, one_step[1] = { 1 };
    for (int d = 0; d < 3; d++) {
        Pair a = empty(MIXP_F32, n, 0), low = empty(real_of(d), n, 0), wide = empty(MIXP_F32, n, 0);
        Pair copy = empty(MIXP_F32, n, 0), sum = empty(MIXP_F32, n, 0);
        for (int i = 0; i < n; i++) set_code(a, i, bits[i]);
        BOTH(convert(X, args_convert(ON(low), ON(a), n, NULL)));
        same_bits(low);
        BOTH(convert(X, args_convert(ON(wide), ON(low), n, NULL)));
        same_bits(wide);
        BOTH(copy(X, args_copy(1, shape, ON(copy), one_step, ON(a), one_step, 0)));
        same_bits(copy);
        BOTH(unary(X, args_unary(MIXP_UNARY_SCALE, n, ON(sum), ON(a), 3.0f)));
        close_to(sum, 0.0, 0.0);
        for (int i = 0; cudasim::one_nan && i < n; i++)
            CHECK_INT(((const uint32_t *)sum.gpu)[i], 0x7FFFFFFF);
        finish(a); finish(low); finish(wide); finish(copy); finish(sum);
    }
}
static void test_payloads(void) { in_all_schedules(payloads_body); }

/* What gelu, its tanh form and silu are, and their slopes, in double. */
static double function_of(mixp_unary op, double x, double *slope) {
    double inner = x, d = 1.0, s;
    if (op == MIXP_UNARY_GELU_ERF) {
        double density = exp(-0.5 * x * x) * 0.3989422804014326779;
        s = 0.5 * erfc(-x * 0.70710678118654752440);
        *slope = s + x * density;
        return x * s;
    }
    if (op == MIXP_UNARY_GELU_TANH) {
        inner = x * (1.5957691216057308 + 0.0713548162726009 * x * x);
        d = 1.5957691216057308 + 3.0 * 0.0713548162726009 * x * x;
    }
    s = 1.0 / (1.0 + exp(-inner));
    *slope = s + x * d * s / (1.0 + exp(inner));
    return x * s;
}

/* Every f16 and bf16: what is stored is within a unit in its last place; so is a slope, but near its
 * zero, where it is a difference. */
static void every_low_number(mixp_dtype dtype, mixp_unary op) {
    const int64_t n = 65536;
    Pair a = empty(dtype, n, 0), one = empty(dtype, n, 0), none = nothing_pair();
    Pair y = output(dtype, n, 0), da = output(dtype, n, 0);
    for (int64_t i = 0; i < n; i++) {
        set_code(a, i, (uint64_t)i);
        set_value(one, i, 1.0);
    }
    BOTH(unary(X, args_unary(op, n, ON(y), ON(a), 0.0f)));
    BOTH(unary_backward(X, args_unary_backward(op, n, ON(da), 0, ON(one), ON(a), ON(none), 0.0f)));
    WAIT();
    for (int64_t i = 0; i < n; i++) {
        double x = value_at(a.cpu, dtype, i), slope, want = function_of(op, x, &slope);
        double got = value_at(y.gpu, dtype, i), got_slope = value_at(da.gpu, dtype, i);
        if (!std::isfinite(x)) {
            CHECK(std::isnan(got) == std::isnan(value_at(y.cpu, dtype, i)));
            CHECK(std::isnan(x) == std::isnan(got_slope));
            continue;
        }
        if (fabs(got - want) <= 2.0 * half_ulp(dtype, fabs(want)) &&
            fabs(got_slope - slope) <= 2.0 * half_ulp(dtype, fabs(slope)) + 4e-7) continue;
        test_bad++;
        TEST_SHOW("%s %d of %.9g: %.9g, not %.9g; slope %.9g, not %.9g", mixp_dtype_name(dtype),
                  (int)op, x, got, want, got_slope, slope);
    }
    finish(a); finish(one); finish(y); finish(da);
}

/* Their kernel beside the CPU's where arrays end anywhere, begin anywhere and accumulate. */
static void low_edges(mixp_dtype dtype, mixp_unary op, int turn) {
    int64_t n = sizes[turn % 7];
    Pair a = numbers(dtype, n, 2.0, turn % 2), dy = numbers(dtype, n, 1.0, turn / 2 % 2);
    Pair y = output(dtype, n, turn % 3 == 0), da = output(dtype, n, turn % 3 == 1), none = nothing_pair();
    mixp_unary_args forward;
    BOTH(unary(X, (forward = *args_unary(op, n, ON(y), ON(a), 0.0f),
                   forward.y.accumulate = turn % 3 == 0, &forward)));
    close_to(y, 1e-6, 2e-6);
    BOTH(unary_backward(X, args_unary_backward(op, n, ON(da), turn % 3 == 1, ON(dy), ON(a), ON(none),
                                               0.0f)));
    close_to(da, 1e-5, 4e-6);
    finish(a); finish(dy); finish(y); finish(da);
}

static void low_functions(void) {
    static const mixp_unary ops[] = { MIXP_UNARY_GELU_TANH, MIXP_UNARY_GELU_ERF, MIXP_UNARY_SILU };
    pair_open();
    for (int i = 0; i < 6; i++) every_low_number(i % 2 ? MIXP_F16 : MIXP_BF16, ops[i / 2]);
    for (int i = 0; i < 42; i++) low_edges(i % 2 ? MIXP_F16 : MIXP_BF16, ops[i % 3], i / 2);
    pair_close();
}

/* The bounds leave room for functions that are not the host's. */
static void another_libm(void) {
    NEEDS_SIMULATION;
    cudasim::other_libm = true;
    test_unary();
    test_unary_special();
    low_functions();
    test_loss();
    cudasim::other_libm = false;
}

static void in_place_body(void) {
    Pair a = numbers(MIXP_BF16, 999, 2.0, 0), dy = numbers(MIXP_F16, 999, 1.0, 0);
    BOTH(unary(X, args_unary(MIXP_UNARY_SILU, 999, ON(a), ON(a), 0.0f)));
    close_to(a, 1e-7, 1e-6);
    for (int i = 0; i < 999; i++) set_value(a, i, value_at(a.cpu, a.dtype, i));
    BOTH(unary_backward(X,
            args_unary_backward(MIXP_UNARY_RELU, 999, ON(dy), 0, ON(dy), ON(a), ON(nothing_pair()),
                        0.0f)));
    same_bits(dy);
    finish(a);
    finish(dy);
}
static void test_in_place(void) { in_all_schedules(in_place_body); }

/* --- binary --------------------------------------------------------------------------------- */

struct Broadcast { int rank; int64_t shape[4], a[4], b[4]; };
static const Broadcast broadcasts[] = {
    { 1, { 1000 }, { 1 }, { 1 } },
    { 0, { 0 }, { 0 }, { 0 } },
    { 2, { 70, 64 }, { 64, 1 }, { 0, 1 } },             /* a bias                            */
    { 2, { 70, 33 }, { 33, 1 }, { 0, 1 } },
    { 2, { 7, 5 }, { 5, 1 }, { 1, 0 } },
    { 2, { 40, 70 }, { 1, 0 }, { 70, 1 } },
    { 2, { 130, 40 }, { 0, 1 }, { 1, 0 } },             /* an outer product                  */
    { 3, { 4, 9, 16 }, { 0, 16, 1 }, { 144, 0, 1 } },
    { 3, { 3, 65, 8 }, { 520, 8, 1 }, { 0, 8, 1 } },
    { 4, { 2, 3, 4, 5 }, { 60, 0, 5, 1 }, { 0, 20, 0, 1 } },
    { 2, { 3, 900 }, { 900, 1 }, { 0, 0 } },            /* a scalar                          */
    { 1, { 9000 }, { 1 }, { 0 } },
    { 2, { 1, 24 }, { 24, 1 }, { 24, 1 } },
    { 2, { 6, 8 }, { 1, 6 }, { 8, 1 } },                /* a transposed operand              */
};

static int64_t reach(const Broadcast &c, const int64_t *strides) {
    int64_t n = 1;
    for (int i = 0; i < c.rank; i++) n += (c.shape[i] - 1) * strides[i];
    return n;
}

static void binary_body(void) {
    int turn = 0;
    for (const Broadcast &c : broadcasts)
        for (int op = 0; op < MIXP_BINARY_COUNT; op++, turn++) {
            int64_t n = 1, na = reach(c, c.a), nb = reach(c, c.b);
            for (int i = 0; i < c.rank; i++) n *= c.shape[i];
            int off = turn % 5 == 1, accumulate = turn % 2;
            Pair a = numbers(real_of(turn), na, 1.0, off);
            Pair b = numbers(real_of(turn / 3), nb, 1.0, 0);
            Pair y = output(real_of(turn / 2), n, 0), dy = numbers(real_of(turn / 4), n, 1.0, 0);
            for (int64_t i = 0; i < nb; i++)    /* no divisor near 0 */
                set_value(b, i, value_at(b.cpu, b.dtype, i) < 0 ? -1.5 : 0.75 + (double)(i % 4));
            for (int64_t i = 0; op == MIXP_BINARY_POWER && i < na; i++)
                set_value(a, i, fabs(value_at(a.cpu, a.dtype, i)) + 0.25);
            BOTH(binary(X,
                    args_binary((mixp_binary)op, c.rank, c.shape, ON(y), ON(a), c.a, ON(b), c.b)));
            if (op >= MIXP_BINARY_SWIGLU) close_to(y, 1e-7, 1e-6);
            else same_bits(y);
            bool transposed = c.rank == 2 && c.a[0] == 1 && c.a[1] > 1;
            for (int which = transposed; which < 2; which++) {
                Pair da = output(real_of(turn / 5), which ? nb : na, accumulate, off);
                BOTH(binary_backward(X,
                        args_binary_backward((mixp_binary)op, which, c.rank, c.shape, ON(da),
                            accumulate,
                                     ON(dy), ON(a), c.a, ON(b), c.b)));
                close_to(da, 2e-6 * sqrt((double)n) + 1e-6, 2e-6);
                finish(da);
            }
            finish(a); finish(b); finish(y); finish(dy);
        }
}
static void test_binary(void) { in_all_schedules(binary_body); }

/* Results that are added to what is there; what cannot add says so. */
static void adding_body(void) {
    const int64_t n = 1000, one = 1;
    for (int turn = 0; turn < 3; turn++) {
        Pair a = numbers(MIXP_BF16, n, 1.0, 0), b = numbers(MIXP_F16, n, 1.0, turn == 2);
        Pair y = output(real_of(turn), n, 1), z = output(real_of(turn), n, 1);
        mixp_unary_args u;
        mixp_binary_args k;
        mixp_convert_args c;
        mixp_fill_args f;
        BOTH(unary(X, (u = *args_unary(MIXP_UNARY_SCALE, n, ON(y), ON(a), 0.5f),
                       u.y.accumulate = 1, &u)));
        BOTH(binary(X, (k = *args_binary(MIXP_BINARY_MUL, 1, &n, ON(z), ON(a), &one, ON(b), &one),
                        k.y.accumulate = 1, &k)));
        same_bits(y);
        same_bits(z);
        BOTH(convert(X, (c = *args_convert(ON(y), ON(a), n, NULL), c.dst.accumulate = 1, &c)));
        BOTH(fill(X, (f = *args_fill(ON(y), n, 1.0), f.dst.accumulate = 1, &f)));
        same_bits(y);
        GPU_SAYS(fill(X, &f), MIXP_ERR_ARGUMENT);
        finish(a); finish(b); finish(y); finish(z);
    }
}
static void test_adding(void) { in_all_schedules(adding_body); }

/* Dense sums of the dtypes that residual streams have: the CPU's bits. */
static void dense_sums_body(void) {
    static const mixp_dtype dtypes[][3] = { { MIXP_BF16, MIXP_BF16, MIXP_BF16 },
        { MIXP_F16, MIXP_F16, MIXP_F16 }, { MIXP_F32, MIXP_F32, MIXP_F32 },
        { MIXP_F32, MIXP_BF16, MIXP_F32 }, { MIXP_F32, MIXP_F16, MIXP_F32 } };
    static const int64_t shape[2] = { 37, 72 }, strides[2] = { 72, 1 };
    for (const mixp_dtype *d : dtypes) {
        Pair a = numbers(d[0], 37 * 72, 1.0, 0), b = numbers(d[1], 37 * 72, 1.0, 0);
        Pair y = output(d[2], 37 * 72, 0);
        set_value(a, 3, HUGE_VAL);
        BOTH(binary(X, args_binary(MIXP_BINARY_ADD, 2, shape, ON(y), ON(a), strides, ON(b), strides)));
        same_bits(y);
        BOTH(binary(X, args_binary(MIXP_BINARY_ADD, 2, shape, ON(a), ON(a), strides, ON(b), strides)));
        same_bits(a);
        finish(a); finish(b); finish(y);
    }
}
static void dense_sums(void) { in_all_schedules(dense_sums_body); }

/* --- sums ----------------------------------------------------------------------------------- */

static void reduce_body(void) {
    static const int64_t cases[][3] = { { 1, 1, 1 }, { 5, 7, 1 }, { 3, 70, 40 }, { 1, 300, 64 },
        { 2, 1000, 1 }, { 1, 20000, 1 }, { 4, 129, 3 }, { 1, 2, 5000 }, { 7, 1, 9 }, { 2, 0, 3 },
        { 40, 2048, 1 }, { 1, 150, 33 }, { 1, 5003, 40 },
        { 1, 2200, 264 }, { 2, 2200, 48 }, { 1, 2500, 32 } };
    int turn = 0;
    for (const int64_t *c : cases) {
        int64_t n = c[0] * c[1] * c[2], m = c[0] * c[2];
        int accumulate = turn % 2;
        Pair a = numbers(real_of(turn), n, 1.0, turn % 4 == 1);
        Pair y = output(real_of(turn / 2), m, accumulate);
        Pair dy = numbers(real_of(turn / 3), m, 1.0, 0), da = output(real_of(turn), n, accumulate);
        BOTH(reduce(X, args_reduce(c[0], c[1], c[2], ON(y), accumulate, ON(a), 0.5f)));
        close_to(y, 1e-6 * sqrt((double)c[1] + 1.0), 1e-6);
        BOTH(reduce_backward(X, args_reduce(c[0], c[1], c[2], ON(da), accumulate, ON(dy), 0.5f)));
        same_bits(da);
        finish(a); finish(y); finish(dy); finish(da);
        turn++;
    }
}
static void test_reduce(void) { in_all_schedules(reduce_body); }

static void loss_body(void) {
    int turn = 0;
    for (int kind = 0; kind < MIXP_LOSS_COUNT; kind++)
        for (int s = 0; s < 7; s++, turn++) {
            int n = s == 6 ? 20011 : sizes[s];
            Pair a = numbers(real_of(turn), n, 2.0, turn % 2);
            Pair t = numbers(real_of(turn / 2), n, 1.0, 0);
            Pair y = output(MIXP_F32, 1, 0), dloss = numbers(real_of(turn), 1, 1.0, 0);
            Pair da = output(real_of(turn / 3), n, turn % 2);
            for (int i = 0; i < n && kind; i++) set_value(t, i, (double)(i % 5) / 4.0);
            for (int i = 0; i < n && kind == MIXP_LOSS_BCE; i++)
                set_value(a, i, i % 50 < 2 ? (double)(i % 50) : (double)(i % 97 + 1) / 99.0);
            BOTH(loss(X, args_loss((mixp_loss_kind)kind, n, AT(float, y), ON(a), ON(t))));
            close_to(y, 0.0, 2e-6);
            BOTH(loss_backward(X, args_loss_backward((mixp_loss_kind)kind, n, ON(da), turn % 2,
                ON(dloss), ON(a), ON(t))));
            close_to(da, 1e-7, 3e-6);
            finish(a); finish(t); finish(y); finish(dloss); finish(da);
        }
}
static void test_loss(void) { in_all_schedules(loss_body); }

static void dropout_body(void) {
    for (int s = 0; s < 7; s++) {
        int n = sizes[s], accumulate = s % 2;
        Pair a = numbers(real_of(s), n, 1.0, s % 3 == 1), y = output(real_of(s / 2), n, accumulate);
        float p = s == 2 ? 0.0f : s == 3 ? 1.0f : 0.3f;
        BOTH(dropout(X, args_dropout(n, ON(y), accumulate, ON(a), p, 42, 7, 3)));
        same_bits(y);
        finish(a); finish(y);
    }
}
static void test_dropout(void) { in_all_schedules(dropout_body); }

static void scale_by_body(void) {
    for (int s = 0; s < 7; s++) {
        int n = sizes[s], accumulate = s % 2;
        Pair a = numbers(real_of(s), n, 1.0, s % 3 == 1), y = output(real_of(s / 2), n, accumulate);
        Pair factor = numbers(MIXP_F32, 1, 100.0, 0);
        BOTH(scale_by(X, args_scale_by(n, ON(y), accumulate, ON(a), AT(float, factor))));
        same_bits(y);
        finish(a); finish(y); finish(factor);
    }
}
static void test_scale_by(void) { in_all_schedules(scale_by_body); }

/* Indexes past 2^31 and 2^32, by arithmetic alone. */
static void large_indexes(void) {
#ifdef MIXPREC_CUDASIM      /* functions of the device, called here */
    for (int i = 0; i < 100000; i++) {
        int64_t n = (int64_t)(random_u64() >> (1 + random_u64() % 62)) + 1;
        int64_t a = (int64_t)(random_u64() >> (1 + random_u64() % 62));
        if (i % 4 == 0) a = a / n * n - i % 8 / 4;      /* a multiple, or one less           */
        if (a < 0) a = 0;
        if (inside_quotient(a, n) != a / n) { CHECK(!"over divides"); break; }
    }
    const int64_t shape[3] = { 64, 1024, 50304 }, strides[3] = { 1024ll * 50304, 50304, 0 };
    int64_t at[4] = { 0, 0, 0, 0 };
    CHECK_INT(inside_last(3, shape, strides, at), 2);
    CHECK_INT(at[0], 64ll * 1024 * 50304 - 1);
    CHECK_INT(at[1], 64ll * 1024 * 50304 - 50304);
    CHECK_INT(inside_grid(at[0], 256), 4096);
#else
    NEEDS_SIMULATION;
#endif
}

/* --- arguments ------------------------------------------------------------------------------ */

static void arguments(void) {
    int64_t shape[1] = { 4 }, stride[1] = { 1 };
    test_array bad = { NULL, MIXP_F32 };
    pair_open();
    Pair a = numbers(MIXP_F32, 4, 1.0, 0), i = indexes(4, 9);
    GPU_SAYS(convert(X, args_convert(ON(a), ON(a), -1, NULL)), MIXP_ERR_ARGUMENT);
    GPU_SAYS(convert(X, args_convert(bad, ON(a), 4, NULL)), MIXP_ERR_ARGUMENT);
    bad.dtype = (mixp_dtype)31;            /* what the enum can hold                           */
    GPU_SAYS(convert(X, args_convert(bad, ON(a), 4, NULL)), MIXP_ERR_DTYPE);
    GPU_SAYS(fill(X, args_fill(bad, 4, 1.0)), MIXP_ERR_DTYPE);
    bad.dtype = MIXP_F32;
    GPU_SAYS(fill(X, args_fill(bad, 4, 1.0)), MIXP_ERR_ARGUMENT);
    GPU_SAYS(copy(X, args_copy(9, shape, ON(a), stride, ON(a), stride, 0)), MIXP_ERR_SHAPE);
    GPU_SAYS(copy(X, args_copy(1, shape, ON(a), stride, ON(i), stride, 0)), MIXP_ERR_DTYPE);
    GPU_SAYS(copy(X, args_copy(1, shape, bad, stride, ON(a), stride, 0)), MIXP_ERR_ARGUMENT);
    GPU_SAYS(unary(X, args_unary(MIXP_UNARY_COUNT, 4, ON(a), ON(a), 0.0f)), MIXP_ERR_ARGUMENT);
    GPU_SAYS(unary(X, args_unary(MIXP_UNARY_EXP, 4, ON(i), ON(a), 0.0f)), MIXP_ERR_DTYPE);
    GPU_SAYS(unary(X, args_unary(MIXP_UNARY_EXP, 4, bad, ON(a), 0.0f)), MIXP_ERR_ARGUMENT);
    GPU_SAYS(unary(X, args_unary(MIXP_UNARY_EXP, 0, bad, bad, 0.0f)), MIXP_OK);
    GPU_SAYS(binary(X,
            args_binary(MIXP_BINARY_COUNT, 1, shape, ON(a), ON(a), stride, ON(a), stride)),
             MIXP_ERR_ARGUMENT);
    GPU_SAYS(binary(X, args_binary(MIXP_BINARY_ADD, 1, shape, ON(i), ON(a), stride, ON(a), stride)),
             MIXP_ERR_DTYPE);
    GPU_SAYS(reduce(X, args_reduce(1, 4, 1, bad, 0, ON(a), 1.0f)), MIXP_ERR_ARGUMENT);
    GPU_SAYS(reduce(X, args_reduce(1, 4, 1, ON(i), 0, ON(a), 1.0f)), MIXP_ERR_DTYPE);
    GPU_SAYS(dropout(X, args_dropout(4, ON(a), 0, ON(a), 1.5f, 0, 0, 0)), MIXP_ERR_ARGUMENT);
    GPU_SAYS(loss(X, args_loss(MIXP_LOSS_COUNT, 4, AT(float, a), ON(a), ON(a))), MIXP_ERR_ARGUMENT);
    finish(a);
    finish(i);
    pair_close();
}

/* --- the runtime ---------------------------------------------------------------------------- */

static void test_mixp_cuda(void) {
    NEEDS_SIMULATION;
    const char *why = NULL;
    CHECK(mixp_cuda(0, NULL) && mixp_cuda(0, &why) && !*why);
    CHECK(!mixp_cuda(1, &why));
    CHECK_TEXT(why, "ordinal");
    CHECK(!mixp_cuda(-1, &why));
    cudasim::driver = 0;
    CHECK(!mixp_cuda(0, &why));
    CHECK_TEXT(why, "no NVIDIA driver");
    cudasim::driver = 11000;
    CHECK(!mixp_cuda(0, &why));
    CHECK_TEXT(why, "older than this build's CUDA");
    cudasim::driver = 13000;
    cudasim::devices = 0;
    CHECK(!mixp_cuda(0, &why));
    CHECK_TEXT(why, "CUDA_VISIBLE_DEVICES");
    cudasim::devices = 1;
    cudasim::capability_major = 6;
    cudasim::capability_minor = 2;
    CHECK(!mixp_cuda(0, &why));
    CHECK_TEXT(why, "too old");
    cudasim::capability_major = 7;
    for (int minor : { 0, 2, 5 }) {
        cudasim::capability_minor = minor;
        CHECK(mixp_cuda(0, &why));
    }
    cudasim::capability_major = 9;
    cudasim::capability_minor = 0;
    CHECK_INT(cudaGetLastError(), cudaSuccess);
}

/* Uploads larger than the ring, reused host buffers, peeks of a block without a mirror. */
static void transfers(void) {
    const size_t n = 3u << 20;
    unsigned char *out = (unsigned char *)malloc(n), *back = (unsigned char *)malloc(n);
    pair_open();
    void *p = gpu_device->allocate(&gpu_exec, n);
    for (size_t i = 0; i < n; i++) out[i] = (unsigned char)(i * 7 / 3);
    CHECK_INT(gpu_device->upload(&gpu_exec, p, out, n), MIXP_OK);
    memset(out, 0, n);                      /* ours again as soon as upload is back           */
    CHECK_INT(gpu_device->download(&gpu_exec, back, p, n), MIXP_OK);
    for (size_t i = 0; i < n; i++)
        if (back[i] != (unsigned char)(i * 7 / 3)) { CHECK(!"what was uploaded"); break; }
    CHECK_INT(gpu_device->peek(&gpu_exec, back, p, 100), MIXP_OK);
    CHECK(back[99] == (unsigned char)(99 * 7 / 3));
    CHECK_INT(gpu_device->upload(&gpu_exec, NULL, out, 4), MIXP_ERR_ARGUMENT);
    if (cudasim::simulated) {               /* the pointers say where a copy goes: host memory too */
        back[0] = 1;
        CHECK_INT(gpu_device->upload(&gpu_exec, back, out, 4), MIXP_OK);
        CHECK(back[0] == 0);
    }
    CHECK_INT(gpu_device->download(&gpu_exec, back, NULL, 4), MIXP_ERR_ARGUMENT);
    CHECK_INT(gpu_device->check(&gpu_exec, back, 4), MIXP_ERR_ARGUMENT);
    CHECK_INT(gpu_device->check(&gpu_exec, p, 4), MIXP_OK);
    CHECK_INT(cudaGetLastError(), cudaSuccess);
    WAIT();
    gpu_device->release(&gpu_exec, p);
    pair_close();
    free(out);
    free(back);
}

/* No wait and no allocation in a step's small uploads, as long as the ring is not full. */
static void uploads_do_not_wait(void) {
    int token = 5;
    pair_open();
    void *p = gpu_device->allocate(&gpu_exec, 64);
    WAIT();
    cudasim::Count before = cudasim::count;
    for (int i = 0; i < inside_limits().ring_pieces; i++)
        CHECK_INT(gpu_device->upload(&gpu_exec, p, &token, sizeof token), MIXP_OK);
    CHECK_INT(cudasim::count.waits, before.waits);
    CHECK_INT(cudasim::count.pageable, before.pageable);
    CHECK_INT(cudasim::count.resources, before.resources);
    WAIT();
    gpu_device->release(&gpu_exec, p);
    pair_close();
}

static void peeks(void) {
    uint64_t seen[8], zero[8] = { 0 };
    pair_open();
    uint64_t *p = (uint64_t *)gpu_device->allocate(&gpu_exec, 64);
    gpu_device->upload(&gpu_exec, p, zero, sizeof zero);
    CHECK_INT(gpu_device->peek(&gpu_exec, seen, p, 64), MIXP_OK);
    CHECK(seen[7] == 0);
    inside_add_and_mirror(&gpu_exec, p);
    WAIT();
    inside_add_and_mirror(&gpu_exec, p);
    cudasim::Count before = cudasim::count;
    CHECK_INT(gpu_device->peek(&gpu_exec, seen, p, 64), MIXP_OK);
    if (cudasim::simulated) CHECK(seen[7] == 8 && p[7] == 8);   /* the second has not run      */
    CHECK_INT(gpu_device->peek(&gpu_exec, seen, p + 2, 16), MIXP_OK);
    CHECK(seen[0] == 3 && seen[1] == 4);
    CHECK_INT(cudasim::count.waits, before.waits);
    WAIT();
    CHECK_INT(gpu_device->peek(&gpu_exec, seen, p, 64), MIXP_OK);
    CHECK(seen[7] == 16);
    gpu_device->upload(&gpu_exec, p, zero, sizeof zero);
    WAIT();
    CHECK_INT(gpu_device->peek(&gpu_exec, seen, p, 64), MIXP_OK);
    CHECK(seen[7] == 0);                    /* uploads reach the mirror                       */
    /* Mirrors come back with their memory. */
    for (int i = 0; i < 2 * inside_limits().mirrors; i++) {
        void *q = gpu_device->allocate(&gpu_exec, 64);
        CHECK(inside_has_mirror(&gpu_exec, q, 64));
        gpu_device->release(&gpu_exec, q);
    }
    CHECK(!inside_has_mirror(&gpu_exec, p, inside_limits().mirror_bytes + 4));
    gpu_device->release(&gpu_exec, p);
    pair_close();
}

static void faults(void) {
    int token;
    pair_open();
    void *p = gpu_device->allocate(&gpu_exec, 4);
    inside_bad_target(&gpu_exec, -3);
    CHECK_INT(gpu_device->download(&gpu_exec, &token, p, 4), MIXP_ERR_ARGUMENT);
    CHECK_TEXT(gpu_device->message(&gpu_exec), "cross_entropy: target -3 at row 7 is outside");
    CHECK_INT(gpu_device->download(&gpu_exec, &token, p, 4), MIXP_OK);  /* reported once      */
    CHECK_INT(inside_stops(&gpu_exec), 0);
    /* One is being told when the next is noted: steps wait for that as well. */
    inside_bad_target(&gpu_exec, 5);
    CHECK_INT(cudaStreamSynchronize((cudaStream_t)gpu_exec.stream), cudaSuccess);
    inside_forget_on_host(&gpu_exec);
    inside_bad_target(&gpu_exec, 6);
    inside_forget_on_gpu(&gpu_exec);
    CHECK_INT(cudaStreamSynchronize((cudaStream_t)gpu_exec.stream), cudaSuccess);
    CHECK_INT(inside_stops(&gpu_exec), 1);
    CHECK_INT(gpu_device->wait(&gpu_exec), MIXP_ERR_ARGUMENT);
    CHECK_TEXT(gpu_device->message(&gpu_exec), "target 6 ");
    WAIT();
    CHECK_INT(inside_stops(&gpu_exec), 0);
    gpu_device->release(&gpu_exec, p);
    pair_close();
}

/* An error of a kernel that has run: the next wait says so, and what follows. */
static void asynchronous_error(void) {
    NEEDS_SIMULATION;
    pair_open();
    Pair a = numbers(MIXP_F32, 100, 1.0, 0);
    WAIT();
    cudasim::fault_at = 1;
    GPU_SAYS(unary(X, args_unary(MIXP_UNARY_EXP, 100, ON(a), ON(a), 0.0f)), MIXP_OK);
    CHECK_INT(gpu_device->wait(&gpu_exec), MIXP_ERR_DEVICE);
    CHECK_TEXT(gpu_device->message(&gpu_exec), "illegal memory access");
    CHECK_INT(gpu_device->wait(&gpu_exec), MIXP_ERR_DEVICE);
    CHECK(gpu_device->allocate(&gpu_exec, 4) == NULL);
    cudasim::machine().sticky = cudaSuccess;    /* a new process, as it were                  */
    cudasim::machine().last = cudaSuccess;
    WAIT();
    finish(a);
    pair_close();
}

/* More uploads than the ring holds leave nothing behind for the program's next check. */
static void uploads_leave_no_error(void) {
    int token = 5;
    pair_open();
    void *p = gpu_device->allocate(&gpu_exec, 64);
    for (int i = 0; i < 3 * inside_limits().ring_pieces; i++) {
        CHECK_INT(gpu_device->upload(&gpu_exec, p, &token, sizeof token), MIXP_OK);
        CHECK_INT(cudaGetLastError(), cudaSuccess);
    }
    WAIT();
    gpu_device->release(&gpu_exec, p);
    pair_close();
}

/* An error that the program left for cudaGetLastError is neither ours nor lost. */
static void errors_of_others(void) {
    pair_open();
    Pair a = numbers(MIXP_F32, 100, 1.0, 0);
    cudaFree((void *)&a);
    GPU_SAYS(unary(X, args_unary(MIXP_UNARY_EXP, 100, ON(a), ON(a), 0.0f)), MIXP_OK);
    CHECK_INT(cudaGetLastError(), cudaErrorInvalidValue);
    finish(a);
    cudaFree((void *)&a);                   /* a context that is freed keeps it, too          */
    pair_close();
    CHECK_INT(cudaGetLastError(), cudaErrorInvalidValue);
}

static void out_of_memory(void) {
    NEEDS_SIMULATION;
    mixp_exec x;
    long failures = 0;
    for (long at = 1; at < 40; at++) {
        memset(&x, 0, sizeof x);
        cudasim::fail_at = at;
        if (mixp_cuda(0, NULL)->attach(&x) == MIXP_OK) {
            cudasim::fail_at = 0;
            mixp_cuda(0, NULL)->detach(&x);
            break;
        }
        failures++;
        CHECK(!x.state && !x.stream);
        CHECK_INT(cudasim::leaks(), 0);
        CHECK_INT(cudaGetLastError(), cudaSuccess);
    }
    CHECK_INT(failures, 5 + inside_limits().ring_pieces);
    pair_open();
    cudasim::fail_at = 1;
    CHECK(gpu_device->allocate(&gpu_exec, 100) == NULL);
    CHECK_TEXT(gpu_device->message(&gpu_exec), "out of memory");
    Pair a = numbers(MIXP_F32, 20000, 1.0, 0), y = empty(MIXP_F32, 1, 0);
    WAIT();
    cudasim::fail_at = 1;
    GPU_SAYS(reduce(X, args_reduce(1, 20000, 1, ON(y), 0, ON(a), 1.0f)), MIXP_ERR_MEMORY);
    GPU_SAYS(reduce(X, args_reduce(1, 20000, 1, ON(y), 0, ON(a), 1.0f)), MIXP_OK);
    finish(a);
    finish(y);
    pair_close();
}

static void streams(void) {
    NEEDS_SIMULATION;
    cudaStream_t mine, gone;
    mixp_exec x, z;
    memset(&x, 0, sizeof x);
    cudaStreamCreateWithFlags(&mine, cudaStreamNonBlocking);
    cudaStreamCreateWithFlags(&gone, cudaStreamNonBlocking);
    cudaStreamDestroy(gone);
    x.stream = mine;
    gpu_device = mixp_cuda(0, NULL);
    CHECK_INT(gpu_device->attach(&x), MIXP_OK);
    CHECK(x.stream == (void *)mine);
    z = x;
    z.stream = NULL;
    CHECK_INT(mixp_cuda(0, NULL)->attach(&z), MIXP_OK);       /* a second context               */
    CHECK(z.stream && z.stream != x.stream && z.state != x.state);
    mixp_cuda(0, NULL)->detach(&z);
    mixp_cuda(0, NULL)->detach(&x);
    CHECK(x.stream == (void *)mine);                        /* the user's stays               */
    x.stream = gone;
    CHECK_INT(mixp_cuda(0, NULL)->attach(&x), MIXP_ERR_ARGUMENT);
    cudasim::devices = 2;
    x.stream = mine;
    CHECK_INT(mixp_cuda(1, NULL)->attach(&x), MIXP_ERR_ARGUMENT);     /* of another GPU         */
    x.stream = NULL;
    CHECK_INT(mixp_cuda(1, NULL)->attach(&x), MIXP_OK);
    void *p = mixp_cuda(1, NULL)->allocate(&x, 64);
    test_array a = { p, MIXP_F32 };
    CHECK_INT(mixp_cuda(1, NULL)->kernels->fill(&x, args_fill(a, 16, 1.0)), MIXP_OK);
    CHECK_INT(mixp_cuda(1, NULL)->wait(&x), MIXP_OK);
    CHECK_INT(cudasim::machine().device, 0);                /* the current GPU is as it was   */
    mixp_cuda(1, NULL)->release(&x, p);
    mixp_cuda(1, NULL)->detach(&x);
    cudasim::devices = 1;
    cudaStreamDestroy(mine);
    CHECK_INT(cudasim::leaks(), 0);
    CHECK_INT(cudaGetLastError(), cudaSuccess);
}

/* What cudaSetDevice would leave on a GPU that the program does not use costs half a gigabyte. */
static void no_context_on_other_gpus(void) {
    NEEDS_SIMULATION;
    mixp_exec x;
    cudasim::devices = 3;
    cudasim::machine().contexts.clear();
    for (int used = 0; used < 2; used++) {      /* the program has not touched GPU 0; then it has */
        memset(&x, 0, sizeof x);
        cudasim::machine().device = 0;
        if (used) CHECK_INT(cudaSetDevice(0), cudaSuccess);
        CHECK_INT(mixp_cuda(2, NULL)->attach(&x), MIXP_OK);
        void *p = mixp_cuda(2, NULL)->allocate(&x, 64);
        CHECK(p != NULL);
        mixp_cuda(2, NULL)->release(&x, p);
        mixp_cuda(2, NULL)->detach(&x);
        CHECK_INT(cudasim::machine().contexts.count(0), used);
        CHECK_INT(cudasim::machine().contexts.count(1), 0);
        CHECK_INT(cudasim::machine().contexts.count(2), 1);
        CHECK_INT(cudasim::machine().device, used ? 0 : 2);
    }
    cudasim::machine().device = 0;
    cudasim::devices = 1;
    CHECK_INT(cudasim::leaks(), 0);
}

/* A program that captures its own stream around our calls is told so, and its capture lives. */
static void captures_of_others(void) {
    cudaStream_t mine;
    cudaGraph_t graph = NULL;
    mixp_exec x;
    int token = 5;
    memset(&x, 0, sizeof x);
    CHECK_INT(cudaStreamCreate(&mine), cudaSuccess);
    x.stream = mine;
    CHECK_INT(mixp_cuda(0, NULL)->attach(&x), MIXP_OK);
    void *p = mixp_cuda(0, NULL)->allocate(&x, 64);
    CHECK_INT(cudaStreamBeginCapture(mine, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    CHECK_INT(gpu_device->upload(&x, p, &token, sizeof token), MIXP_ERR_ORDER);
    CHECK_TEXT(gpu_device->message(&x), "mixp_capture_begin");
    CHECK_INT(gpu_device->download(&x, &token, p, sizeof token), MIXP_ERR_ORDER);
    CHECK_INT(gpu_device->wait(&x), MIXP_ERR_ORDER);
    CHECK_INT(gpu_device->post(&x, 0, p, sizeof token), MIXP_ERR_ORDER);
    CHECK_INT(gpu_device->capture_begin(&x), MIXP_ERR_ORDER);
    CHECK_INT(cudaStreamEndCapture(mine, &graph), cudaSuccess);
    cudaGraphDestroy(graph);
    CHECK_INT(gpu_device->upload(&x, p, &token, sizeof token), MIXP_OK);
    CHECK_INT(gpu_device->capture_begin(&x), MIXP_OK);          /* ours, of the same stream               */
    CHECK(x.stream == (void *)mine);
    CHECK_INT(gpu_device->upload(&x, p, &token, sizeof token), MIXP_OK);
    mixp_cuda(0, NULL)->release(&x, p);
    mixp_cuda(0, NULL)->detach(&x);
    cudaStreamDestroy(mine);
    CHECK_INT(cudasim::leaks(), 0);
    CHECK_INT(cudaGetLastError(), cudaSuccess);
}

/* Each replay reads the uploads' host memory anew and draws random numbers of its own step. */
static void captures(void) {
    const int n = 200;
    float batch[n], want[n];
    void *graph = NULL, *other = NULL;
    pair_open();
    Pair a = empty(MIXP_F32, n, 0), y = empty(MIXP_F32, n, 0), h = empty(MIXP_F16, n, 0);
    mixp_rounding r = rounding(0, 1);
    WAIT();
    CHECK_INT(gpu_device->capture_begin(&gpu_exec), MIXP_OK);
    CHECK_INT(gpu_device->capture_begin(&gpu_exec), MIXP_ERR_ORDER);
    CHECK_INT(gpu_device->feed(&gpu_exec, a.gpu, batch, sizeof batch), MIXP_OK);
    GPU_SAYS(dropout(X, args_dropout(n, ON(y), 0, ON(a), 0.5f, 1, 10, 2)), MIXP_OK);
    GPU_SAYS(convert(X, args_convert(ON(h), ON(y), n, &r)), MIXP_OK);
    CHECK_INT(gpu_device->wait(&gpu_exec), MIXP_ERR_ORDER);
    CHECK_INT(gpu_device->download(&gpu_exec, want, y.gpu, 4), MIXP_ERR_ORDER);
    CHECK(gpu_device->allocate(&gpu_exec, 4) == NULL);
    CHECK_INT(gpu_device->capture_end(&gpu_exec, &graph), MIXP_OK);
    CHECK(graph != NULL);
    CHECK_INT(gpu_device->capture_end(&gpu_exec, &other), MIXP_ERR_ORDER);
    for (uint64_t step = 0; step < 3; step++) {
        cudasim::Count before = cudasim::count;
        for (int i = 0; i < n; i++) batch[i] = (float)i + (float)step;
        CHECK_INT(gpu_device->replay(&gpu_exec, graph, step), MIXP_OK);
        memcpy(want, batch, sizeof batch);
        memset(batch, 0, sizeof batch);     /* read when replay is back                       */
        CHECK_INT(cudasim::count.waits, before.waits);
        CHECK_INT(cudasim::count.resources, before.resources);
        WAIT();
        memcpy(a.cpu, want, sizeof want);
        on_gpu = 0;
        cpu_kernels->dropout(X, args_dropout(n, ON(y), 0, ON(a), 0.5f, 1, 10 + step, 2));
        r.step = 3 + step;
        cpu_kernels->convert(X, args_convert(ON(h), ON(y), n, &r));
        same_bits(y);
        same_bits(h);
    }
    gpu_device->graph_free(&gpu_exec, graph);
    on_gpu = 1;
    r.step = 3;
    GPU_SAYS(dropout(X,
            args_dropout(n, ON(y), 0, ON(a), 0.5f, 1, 10, 2)), MIXP_OK);   /* outside: as it says */
    on_gpu = 0;
    cpu_kernels->dropout(X, args_dropout(n, ON(y), 0, ON(a), 0.5f, 1, 10, 2));
    same_bits(y);
    CHECK_INT(gpu_device->capture_begin(&gpu_exec), MIXP_OK);
    cudaDeviceSynchronize();                /* the program breaks the capture                 */
    GPU_SAYS(fill(X, args_fill(ON(y), n, 1.0)), MIXP_ERR_ORDER);
    CHECK_INT(gpu_device->capture_end(&gpu_exec, &graph), MIXP_ERR_ORDER);
    GPU_SAYS(fill(X, args_fill(ON(y), n, 1.0)), MIXP_OK);
    cudaGetLastError();
    WAIT();
    CHECK_INT(gpu_device->capture_begin(&gpu_exec), MIXP_OK);
    CHECK_INT(gpu_device->feed(&gpu_exec, a.gpu, batch, sizeof batch), MIXP_OK);
    CHECK_INT(gpu_device->capture_end(&gpu_exec, &graph), MIXP_OK);
    finish(a); finish(y); finish(h);
    void *own = gpu_exec.stream;
    CHECK_INT(gpu_device->capture_begin(&gpu_exec), MIXP_OK);   /* a graph freed in a capture ends that:  */
    CHECK(gpu_exec.stream != own);                  /* work goes to the context's stream      */
    gpu_device->graph_free(&gpu_exec, graph);
    CHECK(gpu_exec.stream == own);
    CHECK_INT(gpu_device->capture_begin(&gpu_exec), MIXP_OK);   /* the context is freed in one            */
    pair_close();
}

/* A driver before 12.3 loads no kernel in a capture: the one that only captures need is there. */
static void old_drivers(void) {
    NEEDS_SIMULATION;
    uint64_t zero[8] = { 0 };
    void *graph = NULL;
    pair_open();
    uint64_t *p = (uint64_t *)gpu_device->allocate(&gpu_exec, 64);
    inside_add_and_mirror(&gpu_exec, p);
    WAIT();
    cudasim::machine().loaded.clear();
    cudasim::old_loader = true;
    CHECK_INT(gpu_device->capture_begin(&gpu_exec), MIXP_OK);
    CHECK_INT(gpu_device->feed(&gpu_exec, p, zero, sizeof zero), MIXP_OK);
    CHECK_INT(gpu_device->capture_end(&gpu_exec, &graph), MIXP_OK);
    CHECK_INT(gpu_device->replay(&gpu_exec, graph, 0), MIXP_OK);
    cudasim::old_loader = false;
    WAIT();
    gpu_device->graph_free(&gpu_exec, graph);
    gpu_device->release(&gpu_exec, p);
    pair_close();
}

int main(void) {
    RUN(test_convert);
    RUN(test_convert_low);
    RUN(test_convert_fp8);
    RUN(test_convert_in_place);
    RUN(test_fill);
    RUN(test_copy);
    RUN(transposed);
    RUN(test_unary);
    RUN(test_unary_special);
    RUN(test_edges);
    RUN(test_payloads);
    RUN(low_functions);
    RUN_LATER(another_libm);
    RUN(test_in_place);
    RUN(test_binary);
    RUN(test_adding);
    RUN(dense_sums);
    RUN(test_reduce);
    RUN(test_loss);
    RUN(test_dropout);
    RUN(test_scale_by);
    RUN(large_indexes);
    RUN(arguments);
    RUN(test_mixp_cuda);
    RUN(transfers);
    RUN(uploads_do_not_wait);
    RUN(peeks);
    RUN(faults);
    RUN(asynchronous_error);
    RUN(uploads_leave_no_error);
    RUN(errors_of_others);
    RUN(out_of_memory);
    RUN(streams);
    RUN(no_context_on_other_gpus);
    RUN(captures_of_others);
    RUN(captures);
    RUN(old_drivers);
    return test_report();
}
