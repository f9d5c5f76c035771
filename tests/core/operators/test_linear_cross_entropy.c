/* test_linear_cross_entropy.c - a product and its cross entropy, some rows at a time, compared
 * with a plain double loop and with the two operators that store all logits.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "mixprec.h"
#include "test.h"

enum { ROWS = 11, WIDTH = 5, VOCAB = 13 };
static float x_data[ROWS * WIDTH], w_data[VOCAB * WIDTH];
static const int32_t some[ROWS] = { 3, 0, 12, -100, 7, 7, -100, -100, 1, 2, 5 };
static const int32_t none[ROWS] = { -100, -100, -100, -100, -100, -100, -100, -100, -100, -100, -100 };

static void fill_data(void) {
    for (int i = 0; i < ROWS * WIDTH; i++) x_data[i] = (float)(i * 37 % 29 - 14) / 9;
    for (int i = 0; i < VOCAB * WIDTH; i++) w_data[i] = (float)(i * 53 % 31 - 15) / 11;
}

/* --- the reference ------------------------------------------------------------------------ */

/* from, rounded to dtype */
static void rounded(double *to, const float *from, mixp_dtype dtype, int n) {
    unsigned char low[4 * VOCAB * WIDTH];
    mixp_convert(low, dtype, from, MIXP_F32, n);
    mixp_convert(to, MIXP_F64, low, dtype, n);
}

typedef struct outcome { double loss, dx[ROWS * WIDTH], dw[VOCAB * WIDTH]; } outcome;

/* Of inputs that are rounded to dtype. */
static void reference(const int32_t *targets, mixp_dtype dtype, outcome *o) {
    static double x[ROWS * WIDTH], w[VOCAB * WIDTH];
    double p[VOCAB], n = 0;
    memset(o, 0, sizeof *o);
    rounded(x, x_data, dtype, ROWS * WIDTH);
    rounded(w, w_data, dtype, VOCAB * WIDTH);
    for (int r = 0; r < ROWS; r++) n += targets[r] != -100;
    for (int r = 0; r < ROWS; r++) {
        double sum = 0;
        if (targets[r] == -100) continue;
        for (int v = 0; v < VOCAB; v++) {
            double dot = 0;
            for (int k = 0; k < WIDTH; k++)
                dot += x[r * WIDTH + k] * w[v * WIDTH + k];
            sum += p[v] = exp(dot);
        }
        o->loss -= log(p[targets[r]] / sum) / n;
        for (int v = 0; v < VOCAB; v++) {
            double d = (p[v] / sum - (v == targets[r])) / n;
            for (int k = 0; k < WIDTH; k++) {
                o->dx[r * WIDTH + k] += d * w[v * WIDTH + k];
                o->dw[v * WIDTH + k] += d * x[r * WIDTH + k];
            }
        }
    }
}

/* --- mixprec's -------------------------------------------------------------------------- */

typedef struct setting {
    mixp_dtype params, region;  /* of the parameters; F32: no autocast                     */
    int64_t    chunk;           /* negative: the two operators                             */
    const int32_t *targets;
    int        twice;           /* a second loss of the same parameters is added           */
} setting;

static mixp_tensor *loss_of(mixp_context *ctx, const setting *s, mixp_tensor *x, mixp_tensor *w) {
    const int64_t rows[1] = { ROWS };
    mixp_tensor *targets = mixp_input(ctx, MIXP_I32, 1, rows, s->targets);
    if (s->chunk >= 0) return mixp_linear_cross_entropy(ctx, x, w, targets, MIXP_IGNORE, s->chunk);
    return mixp_cross_entropy(ctx, mixp_linear(ctx, x, w, NULL), targets, MIXP_IGNORE);
}

static void run(const setting *s, outcome *o) {
    const int64_t x_shape[2] = { ROWS, WIDTH }, w_shape[2] = { VOCAB, WIDTH };
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_tensor *x = mixp_param(ctx, "x", s->params, 2, x_shape), *loss = NULL;
    mixp_tensor *w = mixp_param(ctx, "w", s->params, 2, w_shape);
    memset(o, 0, sizeof *o);
    CHECK_INT(mixp_write(x, x_data, MIXP_F32, ROWS * WIDTH), MIXP_OK);
    CHECK_INT(mixp_write(w, w_data, MIXP_F32, VOCAB * WIDTH), MIXP_OK);
    mixp_step_begin(ctx);
    if (s->region == MIXP_F32) {
        loss = loss_of(ctx, s, x, w);
        if (s->twice) loss = mixp_add(ctx, loss, loss_of(ctx, s, x, w));
    } else {
        MIXP_AUTOCAST(ctx, s->region) { loss = loss_of(ctx, s, x, w); }
    }
    o->loss = mixp_item(loss);
    CHECK_INT(loss ? loss->dtype : MIXP_I32, MIXP_F32);
    CHECK_INT(mixp_backward(ctx, loss), MIXP_OK);
    CHECK_INT(mixp_read(x->grad, o->dx, MIXP_F64, ROWS * WIDTH), MIXP_OK);
    CHECK_INT(mixp_read(w->grad, o->dw, MIXP_F64, VOCAB * WIDTH), MIXP_OK);
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    mixp_context_free(ctx);
}

static void check_near(const outcome *got, const outcome *want, double times, double tolerance) {
    CHECK_NEAR(got->loss, times * want->loss, tolerance * times);
    for (int i = 0; i < ROWS * WIDTH; i++) CHECK_NEAR(got->dx[i], times * want->dx[i], tolerance);
    for (int i = 0; i < VOCAB * WIDTH; i++) CHECK_NEAR(got->dw[i], times * want->dw[i], tolerance);
}

static void any_chunk_has_the_loss_and_gradients_of_a_loop(void) {
    static outcome want, got;
    setting s = { MIXP_F32, MIXP_F32, 0, some, 0 };
    reference(some, MIXP_F32, &want);
    CHECK(want.loss > 0.5);
    for (s.chunk = 0; s.chunk <= ROWS + 2; s.chunk++) {     /* 2: a chunk without a counted row */
        run(&s, &got);
        check_near(&got, &want, 1, 1e-6);
    }
    s.chunk = 4;
    s.twice = 1;
    run(&s, &got);
    check_near(&got, &want, 2, 2e-6);
}

static void no_counted_row_is_nan_as_in_pytorch(void) {
    static outcome got;
    setting s = { MIXP_F32, MIXP_F32, 4, none, 0 };
    run(&s, &got);
    CHECK(got.loss != got.loss);
}

/* The logits of low inputs are f32, so the loss is that of a loop over the rounded inputs. Gradients of
 * logits are rounded once, and low gradients once more. */
static void low_inputs_have_f32_logits(void) {
    static const mixp_dtype low[2] = { MIXP_F16, MIXP_BF16 };
    static outcome want, got;
    for (int d = 0; d < 2; d++)
        for (int p = 0; p < 4; p++) {
            setting s = { p & 1 ? low[d] : MIXP_F32, low[d], p & 2 ? 3 : ROWS, some, 0 };
            double ulp = low[d] == MIXP_F16 ? 1.0 / 1024 : 1.0 / 128;
            reference(some, low[d], &want);
            run(&s, &got);
            CHECK_NEAR(got.loss, want.loss, 1e-6);
            for (int i = 0; i < ROWS * WIDTH; i++) CHECK_NEAR(got.dx[i], want.dx[i], ulp * (fabs(want.dx[i]) + 0.02));
            for (int i = 0; i < VOCAB * WIDTH; i++) CHECK_NEAR(got.dw[i], want.dw[i], ulp * (fabs(want.dw[i]) + 0.05));
        }
}

/* A loss that lies in what bf16 rounds away from its logits, which are as large as 400: it is that of the
 * loop, and the loss of the two operators, which round, is not. */
static void a_small_loss_of_large_logits(void) {
    static outcome want, got, apart;
    setting s = { MIXP_BF16, MIXP_BF16, 4, some, 0 };
    for (int i = 0; i < VOCAB * WIDTH; i++) w_data[i] *= 77;
    reference(some, MIXP_BF16, &want);
    run(&s, &got);
    s.chunk = -1;
    run(&s, &apart);
    CHECK_NEAR(got.loss, want.loss, 1e-5 * want.loss);
    double off = fabs(apart.loss - want.loss);
    CHECK(off > 1e-4 * want.loss);
    fill_data();
}

/* --- memory ----------------------------------------------------------------------------- */

static size_t taken, most;
static void *counted_allocate(size_t bytes, void *user) {
    char *p = (char *)malloc(bytes + 64);
    (void)user;
    if (!p) return NULL;
    memcpy(p, &bytes, sizeof bytes);
    taken += bytes;
    if (taken > most) most = taken;
    return p + 64;
}
static void counted_release(void *p, void *user) {
    size_t bytes;
    (void)user;
    if (!p) return;
    memcpy(&bytes, (char *)p - 64, sizeof bytes);
    taken -= bytes;
    free((char *)p - 64);
}

enum { MANY = 512, WORDS = 3001, NARROW = 8 };

static size_t memory_of(int64_t chunk) {
    static float x[MANY * NARROW];
    static int32_t id[MANY];
    const int64_t x_shape[2] = { MANY, NARROW }, w_shape[2] = { WORDS, NARROW }, rows[1] = { MANY };
    mixp_context_desc d;
    mixp_tensor *w, *in, *targets, *loss;
    memset(&d, 0, sizeof d);
    d.allocate = counted_allocate;
    d.release = counted_release;
    taken = most = 0;
    mixp_context *ctx = mixp_context_new(&d);
    w = mixp_param(ctx, "w", MIXP_F32, 2, w_shape);
    mixp_fill(w, 0.01);
    mixp_step_begin(ctx);
    in = mixp_input(ctx, MIXP_F32, 2, x_shape, x);
    targets = mixp_input(ctx, MIXP_I32, 1, rows, id);
    if (chunk) loss = mixp_linear_cross_entropy(ctx, in, w, targets, MIXP_IGNORE, chunk);
    else loss = mixp_cross_entropy(ctx, mixp_linear(ctx, in, w, NULL), targets, MIXP_IGNORE);
    CHECK_INT(mixp_backward(ctx, loss), MIXP_OK);
    CHECK_NEAR(mixp_item(loss), log(WORDS), 1e-4);
    mixp_context_free(ctx);
    CHECK_INT(taken, 0);
    return most;
}

/* Logits and their gradient are 12.3 MB; a chunk of 32 rows is 0.4 MB. */
static void memory_is_that_of_one_chunk(void) {
    const double logits = 4.0 * MANY * WORDS, chunk = 4.0 * 32 * WORDS;
    double all = (double)memory_of(0), some_rows = (double)memory_of(32);
    CHECK(all > 2 * logits);
    CHECK(all - some_rows > 2 * logits - 6 * chunk);
}

/* --- bad input -------------------------------------------------------------------------- */

static mixp_context *ctx;
static mixp_tensor *sized(mixp_dtype dtype, int64_t rows, int64_t cols) {
    static const float zeros[200];
    int64_t shape[2];
    shape[0] = rows;
    shape[1] = cols;
    return mixp_input(ctx, dtype, cols ? 2 : 1, shape, zeros);
}

static void refused(mixp_tensor *x, mixp_tensor *w, mixp_tensor *targets, int64_t chunk,
                    mixp_result code, const char *part) {
    const char *why = "";
    CHECK(mixp_linear_cross_entropy(ctx, x, w, targets, MIXP_IGNORE, chunk) == NULL);
    CHECK_INT(mixp_context_error(ctx, &why), code);
    CHECK_TEXT(why, part);
    mixp_context_clear_error(ctx);
}

static void bad_input_is_told(void) {
    static const int32_t outside[4] = { 0, 1, 6, 2 };
    const int64_t four[1] = { 4 };
    ctx = mixp_context_new(NULL);
    mixp_step_begin(ctx);
    mixp_tensor *x = sized(MIXP_F32, 4, 3);
    mixp_tensor *w = sized(MIXP_F32, 6, 3);
    mixp_tensor *t = sized(MIXP_I32, 4, 0);
    refused(x, sized(MIXP_F32, 6, 2), t, 0, MIXP_ERR_SHAPE, "x[..., in], w[vocab, in] and targets[...]");
    refused(x, w, sized(MIXP_I32, 5, 0), 0, MIXP_ERR_SHAPE, "targets [5]");
    refused(x, sized(MIXP_F32, 6, 0), t, 0, MIXP_ERR_SHAPE, "w [6]");
    refused(x, w, sized(MIXP_F32, 4, 0), 0, MIXP_ERR_DTYPE, "indices must be i32");
    refused(sized(MIXP_I32, 4, 3), w, t, 0, MIXP_ERR_DTYPE, "linear_cross_entropy");
    refused(x, w, t, -1, MIXP_ERR_ARGUMENT, "chunk is -1 rows");
    refused(x, w, mixp_input(ctx, MIXP_I32, 1, four, outside), 2, MIXP_ERR_ARGUMENT,
            "target 6 at row 2 is outside [0, 6)");
    CHECK(mixp_linear_cross_entropy(ctx, x, NULL, t, MIXP_IGNORE, 0) == NULL);
    mixp_context_free(ctx);
}

int main(void) {
    fill_data();
    RUN(any_chunk_has_the_loss_and_gradients_of_a_loop);
    RUN(no_counted_row_is_nan_as_in_pytorch);
    RUN(low_inputs_have_f32_logits);
    RUN(a_small_loss_of_large_logits);
    RUN(memory_is_that_of_one_chunk);
    RUN(bad_input_is_told);
    return test_report();
}
