/* test_cuda_rows.cpp - softmax, norms, embedding and cross entropy on the simulated GPU, compared
 * with the CPU.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "cuda_pair.h"

static const mixp_dtype dtypes[] = { MIXP_F32, MIXP_F16, MIXP_BF16 };
static mixp_dtype any_dtype(void) { return dtypes[random_u64() % 3]; }
static int any(int n) { return (int)(random_u64() % (uint64_t)n); }

/* Rows of a warp and of a block, multiples of 8 and not, none, one. */
struct Size { int64_t rows, cols; };
static const Size sizes[] = { { 9, 1 }, { 5, 8 }, { 3, 37 }, { 11, 96 }, { 2, 264 }, { 1, 1000 },
                              { 2, 1032 }, { 1, 2051 }, { 1, 4104 }, { 0, 8 }, { 3, 0 } };

/* --- softmax ----------------------------------------------------------------------------- */

static void softmax_body(void) {
    for (const Size &z : sizes)
        for (int log_of = 0; log_of < (z.cols > 1100 ? 1 : 2); log_of++) {
            int64_t n = z.rows * z.cols;
            Pair a = numbers(any_dtype(), n, 3.0, any(2)), y = output(any_dtype(), n, 0, any(2));
            BOTH(softmax(X, args_softmax(z.rows, z.cols, log_of, ON(y), ON(a))));
            close_to(y, log_of ? 1e-6 : 1e-9, 2e-6);
            finish(a);
            finish(y);
        }
}
static void softmax(void) { in_all_schedules(softmax_body); }

/* Rows that hold Inf or NaN, or nothing but -Inf; y is a. */
static void softmax_special_body(void) {
    const int64_t lengths[] = { 40, 1100 };
    for (int64_t cols : lengths)
        for (int log_of = 0; log_of < 2; log_of++) {
            Pair a = numbers(MIXP_F16, 7 * cols, 5.0, 0);
            set_value(a, 3, -INFINITY);
            for (int64_t i = 0; i < cols; i++) set_value(a, cols + i, -INFINITY);
            set_value(a, 2 * cols + 1, INFINITY);
            set_value(a, 3 * cols + cols - 1, NAN);
            for (int64_t i = 0; i < cols; i++) set_value(a, 4 * cols + i, NAN);
            for (int64_t i = 0; i + 1 < cols; i++) set_value(a, 5 * cols + i, -INFINITY);
            for (int64_t i = 0; i < cols; i++)
                set_value(a, 6 * cols + i, 60000.0 - 32.0 * (double)(i % 9));
            BOTH(softmax(X, args_softmax(7, cols, log_of, ON(a), ON(a))));
            close_to(a, 1e-6, 2e-6);
            finish(a);
        }
}
static void softmax_special(void) { in_all_schedules(softmax_special_body); }

static void softmax_backward_body(void) {
    for (const Size &z : sizes)
        for (int k = z.cols % 3; k < 4; k += 2) {
            int64_t n = z.rows * z.cols;
            Pair a = numbers(MIXP_F32, n, 2.0, 0), y = output(any_dtype(), n, 0);
            Pair dy = numbers(any_dtype(), n, 1.0, any(2)), da = output(any_dtype(), n, k / 2);
            on_gpu = 0;
            cpu_kernels->softmax(X, args_softmax(z.rows, z.cols, k % 2, ON(y), ON(a)));
            memcpy(y.gpu, y.cpu, (size_t)n * mixp_dtype_size(y.dtype));
            BOTH(softmax_backward(X, args_softmax_backward(z.rows, z.cols, k % 2, ON(da), k / 2,
                ON(dy), ON(y))));
            close_to(da, 3e-6, 3e-6);
            finish(a); finish(y); finish(dy); finish(da);
        }
}
static void softmax_backward(void) { in_all_schedules(softmax_backward_body); }

/* --- norms ------------------------------------------------------------------------------- */

static void norm_body(void) {
    for (const Size &z : sizes)
        for (int k = z.cols % 3; k < 4; k += 2) {
            int64_t n = z.rows * z.cols;
            int rms = k % 2;
            Pair a = numbers(any_dtype(), n, 2.0, any(2)), y = output(any_dtype(), n, 0, any(2));
            Pair gamma = numbers(any_dtype(), z.cols, 1.0, 0);
            Pair beta = numbers(any_dtype(), z.cols, 1.0, 0);
            Pair mean = output(MIXP_F32, z.rows, 0), rstd = output(MIXP_F32, z.rows, 0);
            BOTH(norm(X, args_norm(z.rows, z.cols, rms, 1e-5f, ON(y), ON(a),
                k / 2 ? ON(gamma) : no_array, k < 3 ? ON(beta) : no_array,
                rms ? NULL : AT(float, mean), AT(float, rstd))));
            close_to(rstd, 0.0, 5e-7);
            if (!rms) close_to(mean, 1e-6, 0.0);
            close_to(y, z.cols == 1 ? 1e-3 : 2e-5, 2e-6);
            finish(a); finish(y); finish(gamma); finish(beta); finish(mean); finish(rstd);
        }
}
static void norm(void) { in_all_schedules(norm_body); }

/* A mean far from 0 costs no digits of the variance. */
static void norm_offset_body(void) {
    Pair a = numbers(MIXP_F32, 3 * 520, 1.0, 0), y = output(MIXP_F32, 3 * 520, 0);
    Pair mean = output(MIXP_F32, 3, 0), rstd = output(MIXP_F32, 3, 0);
    for (int64_t i = 0; i < a.n; i++) set_value(a, i, 4096.0 + value_at(a.cpu, MIXP_F32, i));
    BOTH(norm(X, args_norm(3, 520, 0, 1e-5f, ON(y), ON(a), no_array, no_array, AT(float, mean),
        AT(float, rstd))));
    close_to(rstd, 0.0, 1e-6);
    close_to(mean, 0.0, 1.2e-7);
    close_to(y, 1e-3, 0.0);             /* a unit in the last place of the mean */
    finish(a); finish(y); finish(mean); finish(rstd);
}
static void norm_offset(void) { in_all_schedules(norm_offset_body); }

/* With an Inf, with a NaN, of small values: as the CPU's. Then a row whose sum is beyond f32 and whose
 * mean is not, which the CPU has as Inf. */
static void norm_extremes_body(void) {
    for (int64_t cols : { 40, 520, 1501 })
        for (int rms = 0; rms < 2; rms++) {
            Pair a = numbers(MIXP_F32, 3 * cols, 1.0, 0), y = output(MIXP_F32, 3 * cols, 0);
            Pair gamma = numbers(MIXP_F32, cols, 1.0, 0);
            Pair mean = output(MIXP_F32, 3, 0), rstd = output(MIXP_F32, 3, 0);
            set_value(a, 7, INFINITY);
            set_value(a, cols + 9, NAN);
            for (int64_t i = 0; i < cols; i++) set_value(a, 2 * cols + i, 1e-20 * (double)(i % 5));
            BOTH(norm(X, args_norm(3, cols, rms, 1e-5f, ON(y), ON(a), ON(gamma), no_array,
                                   AT(float, mean), AT(float, rstd))));
            close_to(y, 2e-5, 2e-6);
            for (int64_t i = 0; i < cols; i++) set_value(a, i, 3e37);
            on_gpu = 1;
            CHECK_INT(gpu_kernels->norm(X, args_norm(1, cols, 0, 1e-5f, ON(y), ON(a), ON(gamma),
                                                     no_array, AT(float, mean), AT(float, rstd))),
                      MIXP_OK);
            CHECK_INT(gpu_device->wait(&gpu_exec), MIXP_OK);
            CHECK(fabs(value_at(mean.gpu, MIXP_F32, 0) / 3e37 - 1.0) < 1e-6);
            CHECK(value_at(y.gpu, MIXP_F32, 0) == 0.0);
            finish(a); finish(y); finish(gamma); finish(mean); finish(rstd);
        }
}
static void norm_extremes(void) { in_all_schedules(norm_extremes_body); }

/* k: which outputs are wanted, and whether they accumulate. */
static void norm_back_with(int64_t rows, int64_t cols, int rms, int k) {
    int64_t n = rows * cols;
    int add = k >> 3 & 1;
    Pair a = numbers(any_dtype(), n, 2.0, any(2)), y = output(MIXP_F32, n, 0);
    Pair dy = numbers(any_dtype(), n, 1.0, 0), gamma = numbers(any_dtype(), cols, 1.0, 0);
    Pair mean = output(MIXP_F32, rows, 0), rstd = output(MIXP_F32, rows, 0);
    Pair da = output(any_dtype(), n, add), dgamma = output(any_dtype(), cols, add, any(2));
    Pair dbeta = output(any_dtype(), cols, !add);
    bool has_gamma = any(2);
    on_gpu = 0;
    cpu_kernels->norm(X, args_norm(rows, cols, rms, 1e-5f, ON(y), ON(a), no_array, no_array,
        AT(float, mean), AT(float, rstd)));
    memcpy(mean.gpu, mean.cpu, (size_t)rows * 4);
    memcpy(rstd.gpu, rstd.cpu, (size_t)rows * 4);
    BOTH(norm_backward(X, args_norm_backward(rows, cols, rms,
        args_out(k & 1 ? ON(da) : no_array, add), args_out(k & 2 ? ON(dgamma) : no_array, add),
        args_out(k & 4 ? ON(dbeta) : no_array, !add), ON(dy), ON(a),
        has_gamma ? ON(gamma) : no_array, AT(const float, mean), AT(const float, rstd))));
    if (k & 1 && cols > 1) close_to(da, 1e-5, 5e-6);
    if (k & 2) close_to(dgamma, 1e-5, 5e-6);
    if (k & 4) close_to(dbeta, 1e-5, 5e-6);
    finish(da); finish(a); finish(y); finish(dy); finish(gamma); finish(mean); finish(rstd);
    finish(dgamma); finish(dbeta);
}
static void norm_backward_body(void) {
    int k = 0;
    for (const Size &z : sizes)
        for (int i = 0; i < 2; i++, k = (k + 3) % 16) norm_back_with(z.rows, z.cols, k % 3 == 1, k);
    norm_back_with(41, 40, 0, 7);       /* several slices */
    norm_back_with(9, 4100, 0, 15);     /* more columns than threads */
    norm_back_with(5, 4112, 1, 7);
    norm_back_with(1030, 1, 0, 14);
}
static void norm_backward(void) { in_all_schedules(norm_backward_body); }

/* Rows that stay in registers: every pair of dtypes that have a kernel of their own, lengths around
 * the numbers of registers, and with one NaN. */
static void kept_rows_with(int i, int64_t cols) {
    static const mixp_dtype in[] = { MIXP_BF16, MIXP_F16, MIXP_F32, MIXP_F32, MIXP_F32 };
    static const mixp_dtype out[] = { MIXP_BF16, MIXP_F16, MIXP_F32, MIXP_BF16, MIXP_F16 };
    int64_t rows = 3 + cols % 7;
    int rms = (int)(cols / 8 % 2), add = any(2), shifted = any(2);
    Pair a = numbers(in[i], rows * cols, 2.0, 0), y = output(out[i], rows * cols, 0);
    Pair gamma = numbers(MIXP_F32, cols, 1.0, 0), beta = numbers(MIXP_F32, cols, 1.0, 0);
    Pair mean = output(MIXP_F32, rows, 0), rstd = output(MIXP_F32, rows, 0);
    Pair dy = numbers(out[i], rows * cols, 1.0, 0), da = output(in[i], rows * cols, add);
    Pair dgamma = output(MIXP_F32, cols, add), dbeta = output(MIXP_F32, cols, add);
    BOTH(norm(X, args_norm(rows, cols, rms, 1e-5f, ON(y), ON(a), ON(gamma),
                           shifted ? ON(beta) : no_array, AT(float, mean), AT(float, rstd))));
    close_to(rstd, 0.0, 5e-7);
    if (!rms) close_to(mean, 1e-6, 0.0);
    close_to(y, 2e-5, 2e-6);
    for (int64_t r = 0; r < rows; r++) {        /* both from the same statistics */
        set_value(rstd, r, value_at(rstd.cpu, MIXP_F32, r));
        if (!rms) set_value(mean, r, value_at(mean.cpu, MIXP_F32, r));
    }
    if (cols == 264) set_code(dy, 9, dy.dtype == MIXP_F32 ? 0x7FC00000u : 0x7FC0u);
    BOTH(norm_backward(X, args_norm_backward(rows, cols, rms, args_out(ON(da), add),
        args_out(ON(dgamma), add), args_out(ON(dbeta), add), ON(dy), ON(a), ON(gamma),
        AT(const float, mean), AT(const float, rstd))));
    close_to(da, 1e-5, 5e-6);
    close_to(dgamma, 1e-5, 5e-6);
    close_to(dbeta, 1e-5, 5e-6);
    finish(a); finish(y); finish(gamma); finish(beta); finish(mean); finish(rstd);
    finish(dy); finish(da); finish(dgamma); finish(dbeta);
}
static void kept_rows_body(void) {
    static const int64_t lengths[] = { 8, 256, 264, 512, 520, 768, 776, 1024 };
    for (int i = 0; i < 5; i++)
        for (int64_t cols : lengths) kept_rows_with(i, cols);
}
static void kept_rows(void) { in_all_schedules(kept_rows_body); }

/* A sum and its norm. Dtypes of a and the sum, of b and y: those that have a kernel, and others,
 * which go through two. */
static void add_norm_with(int i, int64_t cols) {
    static const mixp_dtype of_sum[] = { MIXP_BF16, MIXP_F16, MIXP_F32, MIXP_F32, MIXP_F32, MIXP_F16 };
    static const mixp_dtype of_b[] = { MIXP_BF16, MIXP_F16, MIXP_BF16, MIXP_F16, MIXP_F32, MIXP_F32 };
    int64_t rows = 3 + cols % 7, n = rows * cols;
    int rms = (int)(cols / 8 % 2), shifted = any(2);
    Pair a = numbers(of_sum[i], n, 2.0, 0), b = numbers(of_b[i], n, 2.0, cols % 8 == 3);
    Pair sum = output(of_sum[i], n, 0), y = output(of_b[i], n, 0);
    Pair gamma = numbers(MIXP_F32, cols, 1.0, 0), beta = numbers(MIXP_F32, cols, 1.0, 0);
    Pair mean = output(MIXP_F32, rows, 0), rstd = output(MIXP_F32, rows, 0);
    BOTH(add_norm(X, args_add_norm(args_norm(rows, cols, rms, 1e-5f, ON(y), ON(a), ON(gamma),
        shifted ? ON(beta) : no_array, AT(float, mean), AT(float, rstd)), ON(sum), ON(b))));
    same_bits(sum);
    close_to(rstd, 0.0, 5e-7);
    if (!rms) close_to(mean, 1e-6, 0.0);
    close_to(y, 2e-5, 2e-6);
    finish(a); finish(b); finish(sum); finish(y); finish(gamma); finish(beta);
    finish(mean); finish(rstd);
}
static void add_norm_body(void) {
    static const int64_t lengths[] = { 3, 8, 256, 512, 520, 768, 776, 1024, 1032, 1283 };
    for (int i = 0; i < 6; i++)
        for (int64_t cols : lengths) add_norm_with(i, cols);
}
static void add_norm(void) { in_all_schedules(add_norm_body); }

/* The gradient once more, as a cast would store it: by both kernels. */
static void norm_db_body(void) {
    static const int64_t lengths[] = { 8, 264, 1024, 1283 };
    static const mixp_dtype low[] = { MIXP_BF16, MIXP_F16 };
    for (int i = 0; i < 8; i++)
        for (int64_t cols : lengths) {
            Pair a = numbers(MIXP_F32, 5 * cols, 2.0, 0), dy = numbers(low[i & 1], 5 * cols, 1.0, 0);
            Pair da = output(MIXP_F32, 5 * cols, i & 4), db = output(low[i >> 1 & 1], 5 * cols, 0);
            Pair mean = numbers(MIXP_F32, 5, 0.1, 0), rstd = numbers(MIXP_F32, 5, 1.0, 0);
            BOTH(norm_backward(X, args_norm_db(args_norm_backward(5, cols, 0,
                args_out(ON(da), i >> 2 & 1), args_out(no_array, 0), args_out(no_array, 0), ON(dy),
                ON(a), no_array, AT(const float, mean), AT(const float, rstd)), ON(db))));
            close_to(da, 1e-5, 5e-6);
            for (int64_t k = 0; k < db.n; k++)
                CHECK(mixp_encode(db.dtype, value_at(da.gpu, MIXP_F32, k), 0) ==
                      mixp_encode(db.dtype, value_at(db.gpu, db.dtype, k), 0));
            finish(a); finish(dy); finish(da); finish(db); finish(mean); finish(rstd);
        }
}
static void norm_db(void) { in_all_schedules(norm_db_body); }

/* --- embedding --------------------------------------------------------------------------- */

static void embedding_body(void) {
    for (const Size &z : sizes) {
        Pair table = numbers(any_dtype(), 13 * z.cols, 1.0, any(2));
        Pair y = output(any(2) ? table.dtype : any_dtype(), z.rows * z.cols, 0, any(2));
        Pair ids = indexes(z.rows, 13);
        if (z.cols > 1 && table.dtype == MIXP_F16) set_code(table, 5, 0x7D01);
        BOTH(embedding(X, args_embedding(z.rows, z.cols, 13, ON(y), ON(table),
            AT(const int32_t, ids))));
        same_bits(y);
        finish(table); finish(y); finish(ids);
    }
}
static void embedding(void) { in_all_schedules(embedding_body); }

static void embedding_bad_body(void) {
    Pair table = numbers(MIXP_F16, 5 * 24, 1.0, 0), y = output(MIXP_F16, 4 * 24, 0);
    Pair ids = indexes(4, 5), dtable = output(MIXP_F32, 5 * 24, 0);
    set_code(ids, 1, 5);
    set_code(ids, 3, (uint32_t)-1);
    GPU_SAYS(embedding(X, args_embedding(4, 24, 5, ON(y), ON(table), AT(const int32_t, ids))),
        MIXP_OK);
    CHECK_INT(gpu_device->wait(&gpu_exec), MIXP_ERR_ARGUMENT);
    CHECK_TEXT(gpu_device->message(&gpu_exec), "embedding: id ");
    CHECK_TEXT(gpu_device->message(&gpu_exec), " is outside [0, vocab)");
    WAIT();
    CHECK(std::isnan(value_at(y.gpu, y.dtype, 24)) && !std::isnan(value_at(y.gpu, y.dtype, 0)));
    CHECK(std::isnan(value_at(y.gpu, y.dtype, 4 * 24 - 1)));
    GPU_SAYS(embedding_backward(X, args_embedding_backward(4, 24, 5, ON(dtable), 0, ON(y),
        AT(const int32_t, ids))),
             MIXP_OK);
    CHECK_INT(gpu_device->wait(&gpu_exec), MIXP_ERR_ARGUMENT);
    WAIT();
    for (int64_t i = 0; i < dtable.n; i++) CHECK(!std::isnan(value_at(dtable.gpu, MIXP_F32, i)));
    GPU_SAYS(embedding(X, args_embedding(4, 24, 0, ON(y), ON(table), AT(const int32_t, ids))),
        MIXP_ERR_ARGUMENT);
    finish(table); finish(y); finish(ids); finish(dtable);
}
static void embedding_bad(void) { in_all_schedules(embedding_bad_body); }

/* The order of sums is the CPU's: the same bits. */
static const mixp_dtype any_kind = MIXP_DTYPE_COUNT;        /* any dtype, aligned or not */
static const mixp_dtype kinds[] = { MIXP_F32, MIXP_F16, MIXP_BF16 };
static void embed_back_with(int64_t rows, int64_t cols, int64_t vocab, int64_t most, int add,
                            mixp_dtype kind = any_kind) {
    Pair dy = numbers(kind == any_kind ? any_dtype() : kind, rows * cols, 1.0, kind == any_kind && any(2));
    Pair dtable = output(any_dtype(), vocab * cols, add, kind == any_kind && any(2)), ids = indexes(rows, most);
    BOTH(embedding_backward(X, args_embedding_backward(rows, cols, vocab, ON(dtable), add, ON(dy),
        AT(const int32_t, ids))));
    same_bits(dtable);
    finish(dy); finish(dtable); finish(ids);
}
static void embedding_backward_body(void) {
    embed_back_with(60, 33, 7, 7, 0);
    embed_back_with(5, 8, 9, 3, 1);
    embed_back_with(0, 8, 3, 1, 0);
    embed_back_with(0, 8, 3, 1, 1);
    embed_back_with(1500, 2, 1, 1, 0);
    embed_back_with(30, 300, 2, 2, 1);
}
static void embedding_backward(void) { in_all_schedules(embedding_backward_body); }

/* Blocks of several ids, most without rows; more rows than a warp reads at a time; more than 8 rows of an
 * id, in vectors of 8 columns. */
static void embedding_sorted_body(void) {
    embed_back_with(300, 1, 513, 400, 1);
    embed_back_with(2100, 1, 257, 2, 0);
    for (mixp_dtype kind : kinds) embed_back_with(60, 264, 3, 3, kind != MIXP_F16, kind);
}
static void embedding_sorted(void) { in_all_schedules(embedding_sorted_body); }

/* --- cross entropy ----------------------------------------------------------------------- */

static void entropy_with(int64_t rows, int64_t cols, int32_t ignore, int add, bool in_place,
                         mixp_dtype kind = any_kind) {
    Pair logits = numbers(kind == any_kind ? any_dtype() : kind, rows * cols, 3.0, kind == any_kind && any(2));
    Pair targets = indexes(rows, cols);
    Pair loss = output(MIXP_F32, 1, 0), stats = output(MIXP_F32, 3 * rows, 0);
    Pair counted = output(MIXP_F32, 1, 0), dloss = numbers(any_dtype(), 1, 100.0, 0);
    Pair d = output(any_dtype(), rows * cols, add);
    for (int64_t i = 0; i < rows; i += 3) set_code(targets, i, (uint32_t)ignore);
    BOTH(cross_entropy(X, args_cross_entropy(rows, cols, ignore, AT(float, loss), AT(float, stats),
        AT(float, counted), ON(logits), AT(const int32_t, targets))));
    same_bits(counted);
    close_to(stats, 1e-6, 1e-6);
    close_to(loss, 1e-6, 1e-6);
    BOTH(cross_entropy_backward(X, args_cross_entropy_backward(rows, cols, ignore,
        args_out(in_place ? ON(logits) : ON(d), add), ON(dloss), ON(logits),
        AT(const int32_t, targets), AT(const float, stats), AT(const float, counted))));
    close_to(in_place ? logits : d, add ? 1e-3 : 1e-5, 4e-6);
    finish(logits); finish(targets); finish(loss); finish(stats); finish(counted);
    finish(dloss); finish(d);
}
static void entropy_body(void) {
    for (const Size &z : sizes) {
        if (z.cols == 0) continue;
        entropy_with(z.rows, z.cols, -100, 0, false);
        if (z.cols % 3 == 0) entropy_with(z.rows, z.cols, 0, 0, true);
        else entropy_with(z.rows, z.cols, -1, 1, false);
    }
    entropy_with(1030, 3, -100, 0, false);
    entropy_with(9, 75, -100, 0, false);        /* a thread's elements lie apart */
    entropy_with(5, 2051, -100, 0, true);
    entropy_with(1, 5, -100, 0, false);         /* no row counts */
    for (mixp_dtype kind : kinds)               /* rows of vectors, by a warp and by a block */
        for (int64_t cols : { 40, 1032 }) entropy_with(4, cols, -100, 0, true, kind);
}
static void cross_entropy(void) { in_all_schedules(entropy_body); }

/* Rows whose targets are ahead of all other columns by 0 to 80: the gradient of the target keeps its
 * digits, also behind log_softmax, and so does a softmax's. */
static void sure_rows_with(int64_t cols, mixp_dtype dtype) {
    const int64_t rows = 9, n = rows * cols;
    Pair logits = numbers(dtype, n, 0.5, 0), targets = indexes(rows, cols);
    Pair loss = output(MIXP_F32, 1, 0), stats = output(MIXP_F32, 3 * rows, 0);
    Pair counted = output(MIXP_F32, 1, 0), one = numbers(MIXP_F32, 1, 0, 0);
    Pair d = output(MIXP_F32, n, 0), y = output(MIXP_F32, n, 0), dy = numbers(MIXP_F32, n, 1.0, 0);
    mixp_cross_entropy_args k;
    set_value(one, 0, 1.0);
    for (int64_t i = 0; i < rows; i++)
        set_value(logits, i * cols + (int64_t)value_at(targets.cpu, MIXP_I32, i), 10.0 * (double)i);
#define LOSS() (k = *args_cross_entropy(rows, cols, -100, AT(float, loss), AT(float, stats), \
        AT(float, counted), ON(logits), AT(const int32_t, targets)), &k)
    BOTH(cross_entropy_both(X, args_cross_entropy_both(LOSS(), ON(d), AT(float, one), 1.0f)));
    close_to(d, 1e-37, 2e-5);
    BOTH(cross_entropy(X, LOSS()));
    close_to(loss, 0, 4e-6);
    close_to(stats, 1e-37, 2e-5);
    BOTH(cross_entropy_backward(X, args_cross_entropy_backward(rows, cols, -100, args_out(ON(d), 0),
        ON(one), ON(logits), AT(const int32_t, targets), AT(const float, stats),
        AT(const float, counted))));
    close_to(d, 1e-37, 2e-5);
#undef LOSS

    /* dy: any numbers for softmax, 1 at the target and 0 elsewhere for its logarithm. */
    for (int log_of = 0; log_of < 2; log_of++) {
        BOTH(softmax(X, args_softmax(rows, cols, log_of, ON(y), ON(logits))));
        close_to(y, 1e-37, 2e-5);
        for (int64_t i = 0; log_of && i < n; i++) {
            const double target = value_at(targets.cpu, MIXP_I32, i / cols);
            set_value(dy, i, i % cols == (int64_t)target);
        }
        BOTH(softmax_backward(X, args_softmax_backward(rows, cols, log_of, ON(d), 0, ON(dy), ON(y))));
        WAIT();
        for (int64_t i = 0; i < rows; i++) {        /* other columns differ by a rounded sum */
            const int64_t at = i * cols + (int64_t)value_at(targets.cpu, MIXP_I32, i);
            const double g = value_at(d.gpu, MIXP_F32, at), c = value_at(d.cpu, MIXP_F32, at);
            if (i) CHECK_NEAR(g, c, 1e-37 + 4e-5 * fabs(c));
        }
    }
    finish(logits); finish(targets); finish(loss); finish(stats); finish(counted); finish(one);
    finish(d); finish(y); finish(dy);
}
static void sure_rows_body(void) {
    static const int64_t lengths[] = { 2, 40, 75, 1032, 2051 };
    for (int64_t cols : lengths) sure_rows_with(cols, cols == 40 ? MIXP_BF16 : MIXP_F32);
}
static void sure_rows(void) { in_all_schedules(sure_rows_body); }

/* With options: 1 = smoothing, 2 = class weights, 4 = log-probabilities, 8 = the sum, 16 = each row. */
static void entropy_options_with(int64_t rows, int64_t cols, int how) {
    Pair logits = numbers(any_dtype(), rows * cols, 3.0, 0), targets = indexes(rows, cols);
    Pair loss = output(MIXP_F32, 1, 0), stats = output(MIXP_F32, 3 * rows, 0), each = output(MIXP_F32, rows, 0);
    Pair counted = output(MIXP_F32, 1, 0), dloss = numbers(MIXP_F32, how & 16 ? rows : 1, 100.0, 0);
    Pair weights = numbers(MIXP_F32, cols + 1, 2.0, 0), d = output(any_dtype(), rows * cols, 0);
    mixp_cross_entropy_args k;
    mixp_cross_entropy_backward_args b;
    double mean = 0;
    for (int64_t i = 1; i < rows; i += 3) set_code(targets, i, (uint32_t)-100);
    for (int64_t i = 0; i < cols; i++) mean += value_at(weights.cpu, MIXP_F32, i) / (double)cols;
    set_value(weights, cols, mean);
#define FORWARD() (k = *args_cross_entropy(rows, cols, -100, AT(float, loss), AT(float, stats), AT(float, counted), \
        ON(logits), AT(const int32_t, targets)), k.smoothing = how & 1 ? 0.125f : 0.0f, \
        k.weights = how & 2 ? AT(const float, weights) : NULL, k.logs = (how & 4) != 0, k.sum = (how & 8) != 0, \
        k.each = how & 16 ? AT(float, each) : NULL, &k)
#define BACKWARD() (b = *args_cross_entropy_backward(rows, cols, -100, args_out(ON(d), 0), ON(dloss), ON(logits), \
        AT(const int32_t, targets), AT(const float, stats), AT(const float, counted)), b.smoothing = k.smoothing, \
        b.weights = how & 2 ? AT(const float, weights) : NULL, b.logs = k.logs, b.each = (how & 16) != 0, &b)
    BOTH(cross_entropy(X, FORWARD()));
    if (!(how & 16)) close_to(counted, 1e-6, 1e-6);
    if (!(how & 16)) close_to(loss, 1e-5, 4e-6);
    if (how & 16) close_to(each, 1e-5, 4e-6);
    if (!(how & 4)) close_to(stats, 1e-6, 1e-6);
    BOTH(cross_entropy_backward(X, BACKWARD()));
    close_to(d, 1e-4, 4e-6);
#undef FORWARD
#undef BACKWARD
    finish(logits); finish(targets); finish(loss); finish(stats); finish(counted); finish(dloss); finish(weights);
    finish(each); finish(d);
}
static void entropy_options_body(void) {
    static const int64_t lengths[] = { 2, 75, 1024, 2051 };
    static const int ways[] = { 2, 3, 6, 8, 10, 16, 17, 19, 22, 20 };
    for (int64_t cols : lengths)
        for (int how : ways) entropy_options_with(5, cols, how);
}
static void cross_entropy_options(void) { in_all_schedules(entropy_options_body); }

/* In one pass, with rows that wait in shared memory and others. how: 1 = over the logits, 2 = smoothed,
 * 4 = one target is bad. */
static void entropy_both_with(mixp_dtype dtype, int64_t rows, int64_t cols, int how) {
    Pair logits = numbers(dtype, rows * cols, 3.0, 0), targets = indexes(rows, cols);
    Pair loss = output(MIXP_F32, 1, 0), stats = output(MIXP_F32, 3 * rows, 0);
    Pair counted = output(MIXP_F32, 1, 0), d = output(cols % 3 ? dtype : MIXP_F32, rows * cols, 0);
    Pair scale = numbers(MIXP_F32, 1, 0, 0);
    mixp_cross_entropy_args k;
    set_value(scale, 0, 4096.0);
    for (int64_t i = 0; i < rows; i += 3) set_code(targets, i, (uint32_t)-100);
#define LOSS() (k = *args_cross_entropy(rows, cols, -100, AT(float, loss), AT(float, stats), \
        AT(float, counted), ON(logits), AT(const int32_t, targets)), \
        k.smoothing = how & 2 ? 0.125f : 0.0f, &k)
    if (how & 4) {
        set_code(targets, 1, (uint64_t)cols);
        GPU_SAYS(cross_entropy_both(X, args_cross_entropy_both(LOSS(), ON(d), AT(float, scale), 0.5f)),
                 MIXP_OK);
        CHECK_INT(gpu_device->wait(&gpu_exec), MIXP_ERR_ARGUMENT);
        CHECK_TEXT(gpu_device->message(&gpu_exec), "cross_entropy: target");
        CHECK(std::isnan(value_at(d.gpu, d.dtype, cols)) && std::isnan(value_at(loss.gpu, MIXP_F32, 0)));
    } else {
        BOTH(cross_entropy_both(X, args_cross_entropy_both(LOSS(), how & 1 ? ON(logits) : ON(d),
                                                           AT(float, scale), 0.5f)));
        same_bits(counted);
        close_to(stats, 1e-6, 1e-6);
        close_to(loss, 1e-6, 1e-6);
        close_to(how & 1 ? logits : d, 1e-2, 4e-6);     /* of 2,048 / counted */
    }
#undef LOSS
    finish(logits); finish(targets); finish(loss); finish(stats); finish(counted);
    finish(d); finish(scale);
}
static void entropy_both_body(void) {
    static const mixp_dtype dtypes[] = { MIXP_F32, MIXP_F16, MIXP_BF16 };
    static const int64_t lengths[] = { 2, 75, 1024, 1027, 1032, 2056, 4200 };
    int how = 0;
    for (mixp_dtype dtype : dtypes)
        for (int64_t cols : lengths) entropy_both_with(dtype, 5, cols, how++ % 4);
    entropy_both_with(MIXP_BF16, 4, 1032, 4);
    for (mixp_dtype dtype : dtypes)             /* a block has several rows in turn */
        for (int over = 0; over < 2; over++)
            entropy_both_with(dtype, cudasim::simulated ? 7 : 700, 2056, over);
    if (!cudasim::simulated) return;
    entropy_both_with(MIXP_F32, 3, 12800, 1);           /* 51 KB: asked for */
    entropy_both_with(MIXP_F32, 3, 12800, 0);
}
/* A row of GPT-2's logits stays in the 99 KB of capabilities 8.6, 8.9 and 12.0. */
static void a_row_of_gpt2_body(void) {
    cudasim::count.shared = 0;
    entropy_both_with(MIXP_BF16, 2, 50304, 1);
    CHECK_INT(cudasim::count.shared, 50304 * 2);
}
static void a_row_of_gpt2_stays(void) {
    NEEDS_SIMULATION;
    int before = cudasim::max_shared;
    cudasim::max_shared = 99 * 1024;
    in_all_schedules(a_row_of_gpt2_body);
    cudasim::max_shared = before;
}

static void cross_entropy_both(void) {
    int before = cudasim::processors;
    cudasim::processors = 1;
    in_all_schedules(entropy_both_body);
    cudasim::processors = before;
}

/* The mean, and the count, of more rows than their one block takes at a time. */
static void entropy_many_body(void) {
    const int64_t rows = 2 * 8192 + 1024 + 77;
    Pair logits = numbers(MIXP_F32, rows * 2, 3.0, 0), targets = indexes(rows, 2);
    Pair loss = output(MIXP_F32, 1, 0), stats = output(MIXP_F32, 3 * rows, 0);
    Pair counted = output(MIXP_F32, 1, 0), d = output(MIXP_F32, rows * 2, 0);
    Pair scale = numbers(MIXP_F32, 1, 0, 0);
    mixp_cross_entropy_args k;
    double sum = 0;
    int64_t count = 0;
    set_value(scale, 0, 1.0);
    for (int64_t i = 5; i < rows; i += 5 + i % 7) set_code(targets, i, (uint32_t)-100);
    for (int64_t i = 0; i < rows; i++) {
        double at = value_at(targets.cpu, MIXP_I32, i), a, b;
        if (at < 0) continue;
        a = value_at(logits.cpu, MIXP_F32, 2 * i + (int64_t)at);
        b = value_at(logits.cpu, MIXP_F32, 2 * i + 1 - (int64_t)at);
        sum += log(1.0 + exp(b - a));
        count++;
    }
    for (int both = 0; both < 2; both++) {
        on_gpu = 1;
        k = *args_cross_entropy(rows, 2, -100, AT(float, loss), AT(float, stats), AT(float, counted),
                                ON(logits), AT(const int32_t, targets));
        if (both) GPU_SAYS(cross_entropy_both(X, args_cross_entropy_both(&k, ON(d), AT(float, scale),
                                                                         1.0f)), MIXP_OK);
        else GPU_SAYS(cross_entropy(X, &k), MIXP_OK);
        WAIT();
        CHECK_NEAR(value_at(counted.gpu, MIXP_F32, 0), count, 0);
        CHECK_NEAR(value_at(loss.gpu, MIXP_F32, 0), sum / (double)count, 2e-6);
    }
    finish(logits); finish(targets); finish(loss); finish(stats); finish(counted);
    finish(d); finish(scale);
}
static void cross_entropy_of_many_rows(void) { in_all_schedules(entropy_many_body); }

/* The same rows in three calls: one loss, of all of them; the second call has none that counts. */
static const mixp_cross_entropy_args *entropy_after(const mixp_cross_entropy_args *k, int64_t before) {
    static mixp_cross_entropy_args part;
    part = *k;
    part.before = before;
    return &part;
}
static void entropy_parts_body(void) {
    const int64_t first[4] = { 0, 70, 75, 110 }, cols = 37;
    Pair logits = numbers(MIXP_F32, 110 * cols, 3.0, 0), targets = indexes(110, cols);
    Pair loss = output(MIXP_F32, 1, 0), stats = output(MIXP_F32, 330, 0), counted = output(MIXP_F32, 1, 0);
    for (int64_t i = 70; i < 75; i++) set_code(targets, i, (uint32_t)-100);
    BOTH(cross_entropy(X, args_cross_entropy(110, cols, -100, AT(float, loss), AT(float, stats),
        AT(float, counted), ON(logits), AT(const int32_t, targets))));
    const double whole = value_at(loss.cpu, MIXP_F32, 0);
    CHECK(whole > 1);
    for (int i = 0; i < 3; i++) {
        int64_t at = first[i];
        BOTH(cross_entropy(X, entropy_after(args_cross_entropy(first[i + 1] - at, cols, -100,
            AT(float, loss), AT(float, stats) + 3 * at, AT(float, counted),
            array_of(AT(float, logits) + at * cols, MIXP_F32), AT(const int32_t, targets) + at), at)));
    }
    CHECK_NEAR(value_at(loss.cpu, MIXP_F32, 0), whole, 1e-6 * whole);
    CHECK_NEAR(value_at(counted.cpu, MIXP_F32, 0), 105, 0);
    same_bits(counted);
    close_to(stats, 1e-6, 1e-6);
    close_to(loss, 1e-6, 1e-6);
    finish(logits); finish(targets); finish(loss); finish(stats); finish(counted);
}
static void cross_entropy_in_parts(void) { in_all_schedules(entropy_parts_body); }

/* Of f32 logits with a large common offset: as exact as without. */
static void entropy_offset_with(int64_t rows, int64_t cols, double offset, bool both) {
    Pair logits = numbers(MIXP_F32, rows * cols, 3.0, 0), targets = indexes(rows, cols);
    Pair loss = output(MIXP_F32, 1, 0), stats = output(MIXP_F32, 3 * rows, 0);
    Pair counted = output(MIXP_F32, 1, 0), one = numbers(MIXP_F32, 1, 0, 0);
    Pair d = output(MIXP_F32, rows * cols, 0);
    mixp_cross_entropy_args k;
    set_value(one, 0, (double)rows);
    for (int64_t i = 0; i < rows * cols; i++)
        set_value(logits, i, offset + value_at(logits.cpu, MIXP_F32, i));
#define LOSS() (k = *args_cross_entropy(rows, cols, -100, AT(float, loss), AT(float, stats), \
        AT(float, counted), ON(logits), AT(const int32_t, targets)))
    if (both) {
        BOTH(cross_entropy_both(X, args_cross_entropy_both((LOSS(), &k), ON(d), AT(float, one), 1)));
    } else {
        BOTH(cross_entropy(X, (LOSS(), &k)));
        BOTH(cross_entropy_backward(X, args_cross_entropy_backward(rows, cols, -100,
            args_out(ON(d), 0), ON(one), ON(logits), AT(const int32_t, targets),
            AT(const float, stats), AT(const float, counted))));
    }
#undef LOSS
    close_to(stats, 0, 1e-6);
    close_to(loss, 1e-6, 1e-6);
    close_to(d, 3e-7, 1e-6);
    finish(logits); finish(targets); finish(loss); finish(stats); finish(counted); finish(one);
    finish(d);
}
static void entropy_offset_body(void) {
    for (double offset : { 0.0, 100.0, 1e4 })
        for (int64_t cols : { 7, 1032 })
            for (bool both : { false, true }) entropy_offset_with(4, cols, offset, both);
}
static void cross_entropy_offset(void) { in_all_schedules(entropy_offset_body); }

static void entropy_bad_body(void) {
    Pair logits = numbers(MIXP_BF16, 3 * 10, 1.0, 0), targets = indexes(3, 10);
    Pair loss = output(MIXP_F32, 1, 0), stats = output(MIXP_F32, 9, 0);
    Pair counted = output(MIXP_F32, 1, 0), dloss = numbers(MIXP_F32, 1, 1.0, 0);
    Pair d = output(MIXP_F32, 3 * 10, 0);
    set_code(targets, 1, 10);
    GPU_SAYS(cross_entropy(X, args_cross_entropy(3, 10, -100, AT(float, loss), AT(float, stats),
        AT(float, counted), ON(logits), AT(const int32_t, targets))), MIXP_OK);
    CHECK_INT(gpu_device->wait(&gpu_exec), MIXP_ERR_ARGUMENT);
    CHECK_TEXT(gpu_device->message(&gpu_exec), "cross_entropy: target 10 at row 1 is outside");
    WAIT();
    CHECK(std::isnan(value_at(loss.gpu, MIXP_F32, 0)));
    GPU_SAYS(cross_entropy_backward(X, args_cross_entropy_backward(3, 10, -100,
        args_out(ON(d), 0), ON(dloss), ON(logits), AT(const int32_t, targets),
        AT(const float, stats), AT(const float, counted))), MIXP_OK);
    CHECK_INT(gpu_device->wait(&gpu_exec), MIXP_ERR_ARGUMENT);
    WAIT();
    CHECK(std::isnan(value_at(d.gpu, MIXP_F32, 15)) && !std::isnan(value_at(d.gpu, MIXP_F32, 5)));
    finish(logits); finish(targets); finish(loss); finish(stats); finish(counted);
    finish(dloss); finish(d);
}
static void cross_entropy_bad(void) { in_all_schedules(entropy_bad_body); }

/* --- refusals ---------------------------------------------------------------------------- */

static void refused_body(void) {
    test_array ints = { NULL, MIXP_I32 };
    BOTH(softmax(X, args_softmax(1, 1, 0, ints, no_array)));
    BOTH(softmax_backward(X, args_softmax_backward(1, 1, 0, no_array, 0, ints, no_array)));
    BOTH(norm(X, args_norm(1, 1, 0, 0.0f, no_array, ints, no_array, no_array, NULL, NULL)));
    BOTH(norm_backward(X, args_norm_backward(1, 1, 0, args_out(no_array, 0),
        args_out(no_array, 0), args_out(no_array, 0), ints, no_array, no_array, NULL, NULL)));
    BOTH(embedding(X, args_embedding(0, 1, 1, no_array, ints, NULL)));
    BOTH(embedding_backward(X, args_embedding_backward(0, 1, 1, ints, 0, no_array, NULL)));
    BOTH(cross_entropy(X, args_cross_entropy(0, 1, 0, NULL, NULL, NULL, ints, NULL)));
}
static void refused(void) { in_all_schedules(refused_body); }

int main(void) {
    RUN(softmax);
    RUN(softmax_special);
    RUN(softmax_backward);
    RUN(norm);
    RUN(norm_offset);
    RUN(norm_extremes);
    RUN(norm_backward);
    RUN(kept_rows);
    RUN(add_norm);
    RUN(norm_db);
    RUN(embedding);
    RUN(embedding_bad);
    RUN(embedding_backward);
    RUN(embedding_sorted);
    RUN(cross_entropy);
    RUN(sure_rows);
    RUN(cross_entropy_options);
    RUN(cross_entropy_both);
    RUN(a_row_of_gpt2_stays);
    RUN_LATER(cross_entropy_of_many_rows);
    RUN(cross_entropy_in_parts);
    RUN(cross_entropy_offset);
    RUN(cross_entropy_bad);
    RUN(refused);
    return test_report();
}
