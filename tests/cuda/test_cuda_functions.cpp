/* test_cuda_functions.cpp - where, max, gather, rope and smoothed cross entropy on a GPU, compared
 * with the CPU; and the operators that use them, through the tape.
 * SPDX-License-Identifier: MIT OR Unlicense */
#include "cuda_pair.h"
#include <algorithm>
#include <cmath>
#include <vector>

static mixp_dtype real_of(int i) {
    static const mixp_dtype real[3] = { MIXP_F32, MIXP_F16, MIXP_BF16 };
    return real[i % 3];
}

/* --- where ------------------------------------------------------------------------------------ */

struct Select { int rank; int64_t shape[3], mask[3], a[3], b[3]; };
static const Select choices[] = {
    { 1, { 1000 }, { 1 }, { 1 }, { 1 } },
    { 2, { 70, 64 }, { 0, 1 }, { 64, 1 }, { 1, 0 } },
    { 2, { 33, 40 }, { 40, 1 }, { 0, 1 }, { 0, 0 } },
    { 2, { 40, 70 }, { 70, 1 }, { 1, 0 }, { 0, 1 } },
    { 3, { 4, 9, 16 }, { 9, 1, 0 }, { 0, 16, 1 }, { 144, 16, 1 } },
    { 0, { 0 }, { 0 }, { 0 }, { 0 } },
};

static int64_t reach(const Select &c, const int64_t *strides) {
    int64_t n = 1;
    for (int i = 0; i < c.rank; i++) n += (c.shape[i] - 1) * strides[i];
    return n;
}

/* constant: 1: a is the value, 2: b is. */
static mixp_where_args where_of(const Select &c, const Pair &mask, const Pair &a, const Pair &b,
                                int constant) {
    mixp_where_args k;
    memset((void *)&k, 0, sizeof k);
    k.rank = c.rank;
    for (int i = 0; i < c.rank; i++) {
        k.shape[i] = c.shape[i];
        k.mask_strides[i] = c.mask[i];
        k.a_strides[i] = c.a[i];
        k.b_strides[i] = c.b[i];
    }
    k.value = 7.5f;
    k.mask = args_in(ON(mask));
    if (constant != 1) k.a = args_in(ON(a));
    if (constant != 2) k.b = args_in(ON(b));
    return k;
}

static void where_body() {
    int turn = 0;
    for (const Select &c : choices)
        for (int constant = 0; constant < 3; constant++, turn++) {
            int64_t n = 1;
            for (int i = 0; i < c.rank; i++) n *= c.shape[i];
            Pair mask = numbers(MIXP_BF16, reach(c, c.mask), 1.0, turn % 2);
            Pair a = numbers(real_of(turn), reach(c, c.a), 1.0, 0);
            Pair b = numbers(real_of(turn / 2), reach(c, c.b), 1.0, 0);
            Pair y = output(real_of(turn / 3), n, turn % 2), dy = numbers(real_of(turn), n, 1.0, 0);
            mixp_where_args k;
            for (int64_t i = 0; i < mask.n; i++) if (i % 3) set_value(mask, i, 0.0);
            BOTH(where(X, (k = where_of(c, mask, a, b, constant), k.y = args_out(ON(y), turn % 2),
                           &k)));
            same_bits(y);
            for (int which = 0; which < 2; which++) {
                Pair dx = output(real_of(turn + which), which ? b.n : a.n, turn % 2);
                BOTH(where_backward(X, (k = where_of(c, mask, a, b, 0), k.which = which,
                    k.dy = args_in(ON(dy)), k.dx = args_out(ON(dx), turn % 2), &k)));
                close_to(dx, 2e-6 * sqrt((double)n), 2e-6);
                finish(dx);
            }
            finish(mask); finish(a); finish(b); finish(y); finish(dy);
        }
}
static void test_where() { in_all_schedules(where_body); }

/* --- max ---------------------------------------------------------------------------------------- */

static mixp_max_args max_of(const int64_t *c, const Pair &a, const Pair &y, const Pair &index,
                            const Pair &ties) {
    mixp_max_args k;
    memset((void *)&k, 0, sizeof k);
    k.outer = c[0];
    k.n = c[1];
    k.inner = c[2];
    k.a = args_in(ON(a));
    k.y = args_out(ON(y), 0);
    k.index = AT(int32_t, index);
    k.ties = AT(int32_t, ties);
    return k;
}

static mixp_max_backward_args max_back_of(const int64_t *c, int shared, const Pair &a, const Pair &dy,
                                          const Pair &index, const Pair &ties, mixp_out da) {
    mixp_max_backward_args k;
    memset((void *)&k, 0, sizeof k);
    k.outer = c[0];
    k.n = c[1];
    k.inner = c[2];
    k.shared = shared;
    k.a = args_in(ON(a));
    k.dy = args_in(ON(dy));
    k.index = AT(int32_t, index);
    k.ties = AT(int32_t, ties);
    k.da = da;
    return k;
}

static void max_body() {
    static const int64_t cases[][3] = { { 1, 1, 1 }, { 5, 70, 1 }, { 3, 7, 40 }, { 1, 5000, 1 },
        { 2, 1, 9 }, { 1, 3, 1500 }, { 600, 33, 1 }, { 1, 40, 5000 } };
    int turn = 0;
    for (const int64_t *c : cases) {
        int64_t n = c[0] * c[1] * c[2], m = c[0] * c[2];
        Pair a = numbers(real_of(turn), n, 2.0, turn % 2), y = output(real_of(turn / 2), m, 0);
        Pair index = output(MIXP_I32, m, 0), ties = output(MIXP_I32, m, 0);
        Pair dy = numbers(real_of(turn), m, 1.0, 0);
        mixp_max_args k;
        mixp_max_backward_args back;
        for (int64_t i = 0; i < n; i++)                     /* many ties, and a few NaN */
            set_value(a, i, turn % 4 == 3 && i % 1013 == 7 ? NAN : floor(2.0 * value_at(a.cpu, a.dtype, i)));
        BOTH(max(X, (k = max_of(c, a, y, index, ties), &k)));
        same_bits(index);
        same_bits(ties);
        close_to(y, 0.0, 0.0);
        for (int shared = 0; shared < 2; shared++) {
            Pair da = output(real_of(turn + shared), n, turn % 2);
            BOTH(max_backward(X, (back = max_back_of(c, shared, a, dy, index, ties,
                                                     args_out(ON(da), turn % 2)), &back)));
            same_bits(da);
            finish(da);
        }
        BOTH(max(X, (k = max_of(c, a, y, index, ties), k.y.data = NULL, k.ties = NULL, &k)));
        same_bits(index);
        GPU_SAYS(max(X, (k = max_of(c, a, y, index, ties), k.n = 0, &k)), MIXP_ERR_ARGUMENT);
        finish(a); finish(y); finish(index); finish(ties); finish(dy);
        turn++;
    }
}
static void test_max() { in_all_schedules(max_body); }

/* --- gather -------------------------------------------------------------------------------------- */

static mixp_gather_args gather_of(const int64_t *c, const Pair &ids, const Pair &a, mixp_out y) {
    mixp_gather_args k;
    memset((void *)&k, 0, sizeof k);
    k.outer = c[0];
    k.n = c[1];
    k.m = c[2];
    k.inner = c[3];
    k.ids = AT(const int32_t, ids);
    k.a = args_in(ON(a));
    k.y = y;
    return k;
}

static void gather_body() {
    static const int64_t cases[][4] = { { 1, 1, 1, 1 }, { 70, 300, 1, 1 }, { 3, 5, 9, 40 },
        { 1, 7, 2000, 1 }, { 2, 4, 3, 1500 }, { 21, 33, 45, 1 }, { 3, 9000, 2300, 1 }, { 9, 1, 8, 1 } };
    int turn = 0;
    for (const int64_t *c : cases) {
        int64_t n = c[0] * c[1] * c[3], m = c[0] * c[2] * c[3];
        Pair a = numbers(real_of(turn), n, 1.0, turn % 2), y = output(real_of(turn / 2), m, 0);
        Pair ids = indexes(m, c[1]), dy = numbers(real_of(turn), m, 1.0, 0);
        Pair da = output(real_of(turn + 1), n, 1);
        mixp_gather_args k;
        BOTH(gather(X, (k = gather_of(c, ids, a, args_out(ON(y), 0)), &k)));
        same_bits(y);
        BOTH(gather_backward(X, (k = gather_of(c, ids, dy, args_out(ON(da), 1)), &k)));
        same_bits(da);
        BOTH(gather(X, (k = gather_of(c, ids, a, args_out(ON(y), 1)), &k)));
        BOTH(gather_backward(X, (k = gather_of(c, ids, dy, args_out(ON(da), 0)), &k)));
        same_bits(da);
        finish(a); finish(y); finish(ids); finish(dy); finish(da);
        turn++;
    }
}
static void test_gather() { in_all_schedules(gather_body); }

/* --- comparisons, topk, random numbers -------------------------------------------------------- */

static void compare_body() {
    for (int how = 0; how < MIXP_COMPARE_COUNT; how++) {
        int64_t rows = 7 + how, cols = how % 2 ? 300 : 1, n = 3 * rows * cols;
        Pair a = numbers(real_of(how), 3 * rows, 1.0, how % 2), b = numbers(real_of(how / 2), 3 * cols, 1.0, 0);
        Pair ids = indexes(3 * rows, 5), y = output(MIXP_U8, n, 0);
        mixp_compare_args k;
        memset((void *)&k, 0, sizeof k);
        k.how = (mixp_comparison)how;
        k.rank = 3;
        k.shape[0] = 3; k.shape[1] = rows; k.shape[2] = cols;
        k.a_strides[0] = rows; k.a_strides[1] = 1;
        k.b_strides[0] = cols; k.b_strides[2] = 1;
        BOTH(compare(X, (k.a = args_in(ON(a)), k.b = args_in(ON(b)), k.y = AT(uint8_t, y), &k)));
        same_bits(y);
        BOTH(compare(X, (k.a = args_in(ON(ids)), k.b = args_in(ON(b)), k.y = AT(uint8_t, y), &k)));
        same_bits(y);
        k.how = MIXP_COMPARE_COUNT;
        GPU_SAYS(compare(X, &k), MIXP_ERR_ARGUMENT);
        k.how = MIXP_COMPARE_EQ;
        k.a.dtype = MIXP_F64;
        GPU_SAYS(compare(X, &k), MIXP_ERR_DTYPE);
        finish(a); finish(b); finish(ids); finish(y);
    }
}
static void test_compare() { in_all_schedules(compare_body); }

static void topk_body() {
    static const int64_t cases[][3] = { { 1, 1, 1 }, { 40, 8, 2 }, { 3, 700, 5 }, { 2, 65, 65 }, { 2, 2048, 2048 },
                                        { 1, 2049, 1024 }, { 2, 5000, 1 }, { 1, 2049, 1025 } };
    int turn = 0;
    for (const int64_t *c : cases)
        for (int smallest = 0; smallest < 2; smallest++, turn++) {
            Pair a = numbers(real_of(turn), c[0] * c[1], 1.0, turn % 2), index = output(MIXP_I32, c[0] * c[2], 0);
            mixp_topk_args k;
            for (int64_t i = 0; i < c[0] * c[1] && c[1] > 8; i++) {
                static const double odd[5] = { NAN, INFINITY, -INFINITY, 0.0, -0.0 };
                if (i % 13 < 5) set_value(a, i, odd[i % 13]);
            }
            memset((void *)&k, 0, sizeof k);
            k.rows = c[0]; k.cols = c[1]; k.k = c[2];
            k.smallest = smallest;
            BOTH(topk(X, (k.a = args_in(ON(a)), k.index = AT(int32_t, index), &k)));
            same_bits(index);
            k.k = c[1] + 1;
            GPU_SAYS(topk(X, &k), MIXP_ERR_ARGUMENT);
            finish(a); finish(index);
        }
}
static void test_topk_kernel() { in_all_schedules(topk_body); }

/* The definition of the order, on the numbers: NaN is above all, equal elements keep their order. */
static std::vector<int32_t> sorted_places(const std::vector<double> &x, int smallest) {
    std::vector<int32_t> places(x.size());
    for (size_t i = 0; i < x.size(); i++) places[i] = (int32_t)i;
    std::stable_sort(places.begin(), places.end(), [&](int32_t i, int32_t j) {
        const double a = x[(size_t)i], b = x[(size_t)j];
        const bool above = std::isnan(a) ? !std::isnan(b) : a > b;
        const bool below = std::isnan(b) ? !std::isnan(a) : a < b;
        return smallest ? below : above;
    });
    return places;
}

/* Rows around one and several pieces of 2,048 elements: the places are those of std::stable_sort. */
static void long_sort_one(int64_t rows, int64_t cols, int64_t most, int turn) {
    Pair a = numbers(real_of(turn), rows * cols, 1.0, turn % 2), index = output(MIXP_I32, rows * most, 0);
    std::vector<double> x((size_t)(rows * cols));
    mixp_topk_args k;
    for (int64_t i = 0; i < rows * cols; i++) {
        static const double odd[5] = { NAN, INFINITY, -INFINITY, 0.0, -0.0 };
        const int64_t at = i * 7919 % 101;
        x[(size_t)i] = at < 5 ? odd[at] : (double)(i * 40503 % 3001 - 1500) * 0.25;    /* many are equal */
        if (real_of(turn) == MIXP_BF16 && at >= 5) x[(size_t)i] = (double)(i * 40503 % 251 - 125);
        set_value(a, i, x[(size_t)i]);
    }
    memset((void *)&k, 0, sizeof k);
    k.rows = rows; k.cols = cols; k.k = most;
    k.smallest = turn / 3 % 2;
    BOTH(topk(X, (k.a = args_in(ON(a)), k.index = AT(int32_t, index), &k)));
    same_bits(index);
    for (int64_t r = 0; r < rows; r++) {
        std::vector<double> row(x.begin() + r * cols, x.begin() + (r + 1) * cols);
        std::vector<int32_t> want = sorted_places(row, k.smallest);
        CHECK(memcmp(want.data(), (const int32_t *)index.cpu + r * most, (size_t)most * 4) == 0);
    }
    finish(a); finish(index);
}
static void long_sort_body() {
    static const int64_t cases[][3] = { { 2, 2047, 2047 }, { 1, 2048, 2048 }, { 3, 2049, 2049 }, { 1, 4096, 4096 },
                                        { 2, 5000, 5000 }, { 2, 5000, 1025 }, { 1, 6145, 6144 } };
    int turn = 0;
    for (const int64_t *c : cases)
        for (int smallest = 0; smallest < 2; smallest++, turn++) long_sort_one(c[0], c[1], c[2], 3 * smallest + turn % 3);
    long_sort_one(1, 65537, 65537, 3);
}
static void test_long_sort() { in_all_schedules(long_sort_body); }

static void random_body() {
    for (int turn = 0; turn < 9; turn++) {
        int64_t n = turn % 2 ? 1 : 5003;
        Pair y = output(real_of(turn / 3), n, 0);
        mixp_random_args k;
        memset((void *)&k, 0, sizeof k);
        k.kind = (mixp_random_kind)(turn % 3);
        k.n = n;
        k.at = 0.25f;
        k.by = turn % 2 ? 1.0f : 3.7f;
        k.seed = 1; k.step = 2; k.tensor = 3;
        BOTH(random(X, (k.y = args_out(ON(y), 0), &k)));
        same_bits(y);
        k.kind = MIXP_RANDOM_COUNT;
        GPU_SAYS(random(X, &k), MIXP_ERR_ARGUMENT);
        finish(y);
    }
}
static void test_random() { in_all_schedules(random_body); }

/* --- rope ----------------------------------------------------------------------------------------- */

static void rope_body() {
    static const int64_t cases[][4] = { { 1, 1, 1, 2 }, { 2, 300, 3, 16 }, { 3, 9, 2, 130 },
        { 1, 513, 1, 64 } };
    int turn = 0;
    for (const int64_t *c : cases)
        for (int kind = 0; kind < 4; kind++, turn++) {
            int64_t n = c[0] * c[1] * c[2] * c[3];
            Pair a = numbers(real_of(turn), n, 1.0, turn % 2), y = output(real_of(turn / 2), n, turn % 3 == 1);
            mixp_rope_args k;
            memset((void *)&k, 0, sizeof k);
            k.rows = c[0];
            k.t = c[1];
            k.heads = c[2];
            k.d = c[3];
            k.first = turn;
            k.base = 10000.0;
            k.interleaved = kind % 2;
            k.back = kind / 2;
            k.scaled = turn % 2;
            k.scale = 1.5;
            for (int i = 0; i < c[3] / 2; i++) k.frequency[i] = 1.0 / (2 + i);
            BOTH(rope(X, (k.a = args_in(ON(a)), k.y = args_out(ON(y), turn % 3 == 1), &k)));
            close_to(y, 1e-6, 1e-6);
            BOTH(rope(X, (k.a = args_in(ON(a)), k.y = args_out(ON(a), 0), &k)));     /* in place */
            close_to(a, 1e-6, 1e-6);
            k.d = 3;
            GPU_SAYS(rope(X, &k), MIXP_ERR_ARGUMENT);
            finish(a); finish(y);
        }
}
static void test_rope() { in_all_schedules(rope_body); }

/* --- cross entropy, smoothed --------------------------------------------------------------------- */

static void smooth_body() {
    static const int64_t cases[][2] = { { 5, 6 }, { 33, 130 }, { 3, 2000 }, { 9, 1025 } };
    int turn = 0;
    for (const int64_t *c : cases) {
        Pair logits = numbers(real_of(turn), c[0] * c[1], 3.0, turn % 2);
        Pair targets = indexes(c[0], c[1]), loss = output(MIXP_F32, 1, 0), stats = output(MIXP_F32, 3 * c[0], 0);
        Pair counted = output(MIXP_F32, 1, 0), dloss = numbers(MIXP_F32, 1, 1.0, 0);
        Pair d = output(real_of(turn + 1), c[0] * c[1], turn % 2);
        mixp_cross_entropy_args k;
        mixp_cross_entropy_backward_args back;
        set_code(targets, 2, (uint64_t)(uint32_t)-100);
        BOTH(cross_entropy(X, (k = *args_cross_entropy(c[0], c[1], -100, AT(float, loss),
            AT(float, stats), AT(float, counted), ON(logits), AT(const int32_t, targets)),
            k.smoothing = 0.1f, &k)));
        close_to(loss, 1e-6, 2e-6);
        close_to(stats, 1e-6, 2e-6);
        BOTH(cross_entropy_backward(X, (back = *args_cross_entropy_backward(c[0], c[1], -100,
            args_out(ON(d), turn % 2), ON(dloss), ON(logits), AT(const int32_t, targets),
            AT(const float, stats), AT(const float, counted)), back.smoothing = 0.1f, &back)));
        close_to(d, 2e-7, 6e-6);
        finish(logits); finish(targets); finish(loss); finish(stats); finish(counted); finish(dloss);
        finish(d);
        turn++;
    }
}
static void test_smooth() { in_all_schedules(smooth_body); }

/* --- through the tape ----------------------------------------------------------------------------- */

/* A small model of the new operators: its loss, and the sum of its weight's gradient. */
static void model_on(const mixp_device *device, double *loss, double *sum) {
    static float v[4 * 24];
    const int64_t shape[3] = { 2, 2, 24 };
    const uint8_t mask[2] = { 1, 0 };
    const int64_t masked[2] = { 2, 1 };
    int32_t ids[4] = { 3, 0, 11, 7 };
    const int64_t four[2] = { 4, 1 }, flat[2] = { 4, 12 };
    mixp_context_desc desc;
    mixp_rope_desc turn;
    memset(&desc, 0, sizeof desc);
    memset(&turn, 0, sizeof turn);
    turn.head_dim = 8;
    desc.device = device;
    mixp_context *c = mixp_context_new(&desc);
    for (int i = 0; i < 96; i++) v[i] = (float)((i * 37) % 64 - 32) / 16.0f;
    mixp_tensor *w = mixp_param(c, "w", MIXP_F32, 3, shape), *h, *y;
    mixp_write(w, v, MIXP_F32, 96);
    mixp_step_begin(c);
    h = mixp_rope(c, w, &turn);
    h = mixp_masked_fill(c, h, mixp_input(c, MIXP_U8, 2, masked, mask), 0.5f);
    h = mixp_swiglu_packed(c, mixp_soft_cap(c, h, 2.0f));
    h = mixp_add(c, h, mixp_max(c, h, -1, 1));
    y = mixp_reshape(c, h, 2, flat);
    y = mixp_gather(c, mixp_log_softmax(c, y), 1, mixp_input(c, MIXP_I32, 2, four, ids));
    y = mixp_add(c, mixp_mean(c, y, MIXP_ALL, 0), mixp_max(c, h, MIXP_ALL, 0));
    CHECK_INT(mixp_backward(c, y), MIXP_OK);
    *loss = mixp_item(y);
    *sum = 0.0;
    CHECK_INT(mixp_read(w->grad, v, MIXP_F32, 96), MIXP_OK);
    for (int i = 0; i < 96; i++) *sum += fabs(v[i]);
    CHECK_INT(mixp_context_error(c, NULL), MIXP_OK);
    mixp_context_free(c);
}

static void test_tape() {
    const char *why = "";
    double loss[2], sum[2];
    model_on(mixp_cuda(0, &why), &loss[0], &sum[0]);
    model_on(mixp_cpu(), &loss[1], &sum[1]);
    CHECK_NEAR(loss[0], loss[1], 1e-5);
    CHECK_NEAR(sum[0], sum[1], 1e-4);
}

/* Gates and ups of one element each: neighbours in x, but two steps apart from row to row. */
static void test_two_columns() {
    const int64_t shape[2] = { 3, 2 };
    const float x[6] = { 1.0f, 2.0f, -3.0f, 4.0f, 0.5f, -6.0f };
    const char *why = "";
    float slope[6];
    mixp_context_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.device = mixp_cuda(0, &why);
    mixp_context *c = mixp_context_new(&desc);
    mixp_tensor *w = mixp_param(c, "w", MIXP_F32, 2, shape);
    mixp_write(w, x, MIXP_F32, 6);
    mixp_step_begin(c);
    CHECK_INT(mixp_backward(c, mixp_sum(c, mixp_swiglu_packed(c, w), MIXP_ALL, 0)), MIXP_OK);
    mixp_read(w->grad, slope, MIXP_F32, 6);
    for (int i = 0; i < 6; i += 2) {
        double s = 1.0 / (1.0 + exp(-x[i]));
        CHECK_NEAR(slope[i], x[i + 1] * (s + x[i] * s * (1.0 - s)), 1e-6);
        CHECK_NEAR(slope[i + 1], x[i] * s, 1e-6);
    }
    mixp_context_free(c);
}

/* An id out of range is told with the next call that waits, and names the operator. */
static void test_bad_id() {
    const int64_t shape[2] = { 2, 3 }, one[2] = { 2, 1 };
    const int32_t ids[2] = { 1, 3 };
    const char *why = "";
    float y[2];
    mixp_context_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.device = mixp_cuda(0, &why);
    mixp_context *c = mixp_context_new(&desc);
    mixp_tensor *x = mixp_param(c, "x", MIXP_F32, 2, shape), *g;
    mixp_step_begin(c);
    g = mixp_gather(c, x, 1, mixp_input(c, MIXP_I32, 2, one, ids));
    CHECK_INT(mixp_read(g, y, MIXP_F32, 2), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_context_error(c, &why), MIXP_ERR_ARGUMENT);
    CHECK_TEXT(why, "gather");
    CHECK_TEXT(why, "id 3 at row 1");
    mixp_context_free(c);
}

int main() {
    RUN(test_where);
    RUN(test_max);
    RUN(test_gather);
    RUN(test_compare);
    RUN(test_topk_kernel);
    RUN(test_long_sort);
    RUN(test_random);
    RUN(test_rope);
    RUN(test_smooth);
    RUN(test_tape);
    RUN(test_two_columns);
    RUN(test_bad_id);
    return test_report();
}
