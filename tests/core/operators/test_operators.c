/* test_operators.c - operators through the tape: gradients of operands that are used twice, that broadcast and that are
 * parts of others, compared with finite differences (each operator by itself: test_every_operator.c); shapes, errors,
 * accumulation, several losses, a user-defined operator.
 * SPDX-License-Identifier: MIT OR Unlicense */
#include "mixprec.h"
#include "examples/ops.h"
#include "test.h"
#include "shared_b.h"

static mixp_context *ctx;
static mixp_tensor *p[4];       /* the parameters of the running check */

/* Parameters without a name: the tests share a context, and a name is used once. */
static mixp_tensor *param2(int64_t a, int64_t b) {
    int64_t shape[2];
    shape[0] = a;
    shape[1] = b;
    mixp_tensor *t = mixp_param(ctx, NULL, MIXP_F32, 2, shape);
    mixp_init_uniform(t, -1.0, 1.0);
    return t;
}

/* A weighted sum, so that every element of x has a gradient of its own. */
static mixp_tensor *weigh(mixp_context *c, mixp_tensor *x) {
    static float weight[4096];
    for (int64_t i = 0; i < x->count; i++) weight[i] = 0.25f + 0.5f * (float)((i * 37 + 11) % 19) / 19.0f;
    return mixp_sum(c, mixp_mul(c, x, mixp_input(c, MIXP_F32, x->rank, x->shape, weight)), MIXP_ALL, 0);
}

/* Away from kinks and out of the domain's border. */
static mixp_tensor *positive(mixp_context *c, mixp_tensor *x) {
    float two = 2.0f;
    return mixp_add(c, x, mixp_input(c, MIXP_F32, 0, NULL, &two));
}

static int32_t ids[6] = { 2, 0, 2, 1, 3, 2 };
static int64_t six[1] = { 6 };

#define FORM(name, expression)                                                            \
    static mixp_tensor *name(mixp_context *c, void *user) { (void)user; return (expression); }
FORM(f_matmul, weigh(c, mixp_matmul(c, p[0], p[1], 0, 1)))
FORM(f_matmul_tn, weigh(c, mixp_matmul(c, p[0], p[0], 1, 0)))
FORM(f_add, weigh(c, mixp_add(c, p[0], mixp_add(c, p[0], p[2]))))
FORM(f_sub, weigh(c, mixp_sub(c, p[2], p[0])))
FORM(f_mul, weigh(c, mixp_mul(c, mixp_mul(c, p[0], p[2]), p[0])))
FORM(f_div, weigh(c, mixp_div(c, p[0], positive(c, p[2]))))
FORM(f_mean, mixp_mean(c, mixp_mul(c, p[0], p[0]), MIXP_ALL, 0))
FORM(f_transpose, weigh(c, mixp_mul(c, mixp_transpose(c, p[0], 0, -1), mixp_transpose(c, p[0], 1, 0))))
static mixp_tensor *f_reshape(mixp_context *c, void *user) {
    int64_t shape[3] = { 2, -1, 3 };
    (void)user;
    return weigh(c, mixp_mul(c, mixp_reshape(c, p[0], 3, shape), mixp_reshape(c, p[0], 3, shape)));
}
static mixp_tensor *f_concat(mixp_context *c, void *user) {
    mixp_tensor *x[3];
    (void)user;
    x[0] = p[0];
    x[1] = mixp_scale(c, p[1], 2.0f);
    x[2] = p[0];
    return weigh(c, mixp_concat(c, 3, x, 1));
}
static mixp_tensor *f_slice(mixp_context *c, void *user) {
    mixp_tensor *rows = mixp_slice(c, p[0], 0, 1, 4), *cols = mixp_slice(c, p[0], -1, -2, 2);
    (void)user;     /* rows of columns, columns of rows, and all of it */
    rows = mixp_mul(c, mixp_slice(c, rows, 1, 0, 3), mixp_slice(c, rows, 1, 2, 3));
    cols = mixp_mul(c, cols, mixp_slice(c, mixp_slice(c, p[0], 0, 0, 6), 1, 0, 2));
    return mixp_add(c, weigh(c, rows), weigh(c, cols));
}
static mixp_tensor *f_concat_many(mixp_context *c, void *user) {
    mixp_tensor *x[70];
    (void)user;
    for (int i = 0; i < 70; i++) x[i] = i % 3 ? p[0] : mixp_scale(c, p[1], 0.125f * (float)(i % 7));
    return weigh(c, mixp_concat(c, 70, x, 0));
}
static mixp_tensor *f_attention(mixp_context *c, void *user) {
    int64_t shape[3] = { 2, 3, 12 };
    return weigh(c, mixp_attention(c, mixp_reshape(c, p[0], 3, shape), 2, *(int *)user, 0.0f));
}

/* Runs one check on parameters p[0..n-1]; tolerance covers f32 rounding over a step of 1e-2. */
static void check(const char *name, mixp_tensor *(*fn)(mixp_context *, void *), void *user, int n) {
    double worst = 1e9;
    mixp_result r = mixp_check_gradients(ctx, fn, user, n, p, 1e-2, &worst);
    const char *why = "";
    mixp_context_error(ctx, &why);
    if (r != MIXP_OK || !(worst < 2e-3)) {
        test_bad++;
        TEST_SHOW("%s: result %d, worst %.3g, %s", name, (int)r, worst, why);
    }
    mixp_context_clear_error(ctx);
}

static void test_gradients(void) {
    int causal = 1, full = 0;
    int64_t five[1] = { 5 };
    p[0] = param2(6, 5);
    p[1] = param2(4, 5);
    p[2] = mixp_param(ctx, NULL, MIXP_F32, 1, five);
    mixp_init_uniform(p[2], -1.0, 1.0);
    check("matmul", f_matmul, NULL, 2);
    check("matmul_tn", f_matmul_tn, NULL, 1);
    check("mean", f_mean, NULL, 1);
    check("transpose", f_transpose, NULL, 1);
    check("reshape", f_reshape, NULL, 1);
    check("add", f_add, NULL, 3);
    check("sub", f_sub, NULL, 3);
    check("mul", f_mul, NULL, 3);
    check("div", f_div, NULL, 3);
    p[1] = param2(6, 5);
    check("concat", f_concat, NULL, 2);
    check("concat of 70", f_concat_many, NULL, 2);
    check("slice", f_slice, NULL, 1);
    p[0] = param2(6, 12);
    check("attention causal", f_attention, &causal, 1);
    check("attention full", f_attention, &full, 1);
}

/* The checker itself: an operator whose gradient is wrong by 1 % must be seen. */
static mixp_result cube_infer(mixp_call *c) {
    return mixp_call_output(c, c->in[0]->dtype, c->in[0]->rank, c->in[0]->shape);
}
static mixp_result cube_forward(mixp_call *c) {
    const float *x = (const float *)c->in[0]->data;
    float *y = (float *)c->out->data;
    CHECK_INT(c->n_in, 1);
    for (int64_t i = 0; i < c->out->count; i++) y[i] = x[i] * x[i] * x[i];
    return MIXP_OK;
}
static mixp_result cube_backward(mixp_call *c) {
    float factor = *(const float *)c->attrs, *dx;
    const float *x = (const float *)c->in[0]->data, *dy = (const float *)c->out->grad->data;
    int add = 0;
    mixp_tensor *g = mixp_call_grad(c, 0, &add);
    if (!g) return MIXP_OK;
    dx = (float *)g->data;
    for (int64_t i = 0; i < c->out->count; i++) dx[i] = (add ? dx[i] : 0.0f) + factor * 3.0f * x[i] * x[i] * dy[i];
    return MIXP_OK;
}
static const mixp_op cube = { "cube", MIXP_CLASS_F32, sizeof(float), cube_infer, cube_forward, cube_backward, NULL };

static mixp_tensor *f_cube(mixp_context *c, void *user) {
    return weigh(c, mixp_apply(c, &cube, 1, p, 1, user));
}

static void test_own_operator_and_the_checker(void) {
    float right = 1.0f, wrong = 1.05f;
    double worst = 0;
    p[0] = param2(3, 4);
    CHECK_INT(mixp_check_gradients(ctx, f_cube, &right, 1, p, 1e-2, &worst), MIXP_OK);
    CHECK(worst < 2e-3);
    CHECK_INT(mixp_check_gradients(ctx, f_cube, &wrong, 1, p, 1e-2, &worst), MIXP_OK);
    CHECK(worst > 1e-2);
}

/* An operator that passes its gradient on as it is leaves the one that was asked for. */
static void test_a_kept_gradient_is_not_handed_on(void) {
    mixp_tensor *x = param2(2, 3), *flat;
    float got[6];
    flat = mixp_reshape(ctx, mixp_scale(ctx, x, 2.0f), 1, six);
    CHECK_INT(mixp_tensor_set_requires_grad(flat, 1), MIXP_OK);
    CHECK_INT(mixp_backward(ctx, mixp_sum(ctx, mixp_scale(ctx, flat, 3.0f), MIXP_ALL, 0)), MIXP_OK);
    CHECK(flat->grad && flat->grad->data);
    if (flat->grad && flat->grad->data) {
        CHECK_INT(mixp_read(flat->grad, got, MIXP_F32, 6), MIXP_OK);
        for (int i = 0; i < 6; i++) CHECK(got[i] == 3.0f);
    }
    CHECK_INT(mixp_read(x->grad, got, MIXP_F32, 6), MIXP_OK);
    for (int i = 0; i < 6; i++) CHECK(got[i] == 6.0f);
}

static void test_gradients_accumulate_until_zeroed(void) {
    float g1[12], g2[12];
    mixp_tensor *x = param2(3, 4), *loss;
    p[0] = x;
    mixp_step_begin(ctx);
    loss = mixp_mean(ctx, mixp_mul(ctx, x, x), MIXP_ALL, 0);
    CHECK(x->grad == NULL);
    CHECK_INT(mixp_backward(ctx, loss), MIXP_OK);
    CHECK(x->grad != NULL);
    mixp_read(x->grad, g1, MIXP_F32, 12);
    for (int i = 0; i < 12; i++) CHECK_NEAR(g1[i], 2.0f * ((float *)x->data)[i] / 12.0f, 1e-6);
    mixp_step_begin(ctx);
    mixp_backward(ctx, mixp_mean(ctx, mixp_mul(ctx, x, x), MIXP_ALL, 0));
    mixp_read(x->grad, g2, MIXP_F32, 12);
    for (int i = 0; i < 12; i++) CHECK_NEAR(g2[i], 2.0f * g1[i], 1e-6);
}

static void test_two_losses_share_a_trunk(void) {
    float g[12];
    mixp_tensor *x = param2(3, 4), *h, *a, *b;
    mixp_step_begin(ctx);
    h = mixp_mul(ctx, x, x);
    mixp_tensor_set_requires_grad(h, 1);
    a = mixp_sum(ctx, h, MIXP_ALL, 0);
    b = mixp_sum(ctx, mixp_scale(ctx, h, 3.0f), MIXP_ALL, 0);
    CHECK_INT(mixp_backward(ctx, a), MIXP_OK);
    CHECK_INT(mixp_backward(ctx, b), MIXP_OK);
    mixp_read(x->grad, g, MIXP_F32, 12);
    for (int i = 0; i < 12; i++) CHECK_NEAR(g[i], 8.0f * ((float *)x->data)[i], 1e-5);
    CHECK(h->grad != NULL);                 /* kept, and summed: 1 + 3 */
    if (h->grad) { mixp_read(h->grad, g, MIXP_F32, 12); CHECK_NEAR(g[5], 4.0, 1e-6); }
}

/* A loss that holds a gradient norm would train as if that were a constant: refused, wherever the
 * gradient comes from. What is computed with it under MIXP_NO_GRAD is a constant by name. */
static void test_no_double_backward(void) {
    mixp_tensor *x = param2(3, 4), *h, *norm = NULL, *loss;
    const char *why = "";
    mixp_step_begin(ctx);
    h = mixp_mul(ctx, x, x);
    mixp_tensor_set_requires_grad(h, 1);
    CHECK_INT(mixp_backward(ctx, mixp_sum(ctx, h, MIXP_ALL, 0)), MIXP_OK);
    CHECK(x->grad && h->grad);
    CHECK(mixp_mul(ctx, x->grad, x->grad) == NULL);
    CHECK_INT(mixp_context_error(ctx, &why), MIXP_ERR_ORDER);
    CHECK_TEXT(why, "mul: input 0");
    CHECK_TEXT(why, "no double backward");
    mixp_context_clear_error(ctx);
    CHECK(mixp_add(ctx, x, h->grad) == NULL);                           /* a kept one */
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_ERR_ORDER);
    mixp_context_clear_error(ctx);
    MIXP_NO_GRAD(ctx) { norm = mixp_sum(ctx, mixp_mul(ctx, x->grad, x->grad), MIXP_ALL, 0); }
    CHECK(norm != NULL);
    loss = mixp_add(ctx, mixp_sum(ctx, x, MIXP_ALL, 0), norm);
    CHECK_INT(mixp_backward(ctx, loss), MIXP_OK);
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
}

/* Values that every dtype holds. */
static float part_value(int i) { return (float)((i * 29 + 5) % 61 - 30); }

/* x[A][B][C], its slice [first, first + count) along dim, and the slice's gradient. */
static void slice_case(mixp_dtype dtype, int dim, int first, int count) {
    enum { A = 3, B = 7, C = 20 };
    const int64_t shape[3] = { A, B, C };
    int i, n = 0, at[3], axis = dim < 0 ? dim + 3 : dim;
    int from = first < 0 ? first + (int)shape[axis] : first;
    static float v[A * B * C], want[A * B * C], got[A * B * C], grad[A * B * C], dy[A * B * C];
    mixp_step_begin(ctx);
    for (i = 0; i < A * B * C; i++) {
        v[i] = part_value(i);
        at[0] = i / (B * C);
        at[1] = i / C % B;
        at[2] = i % C;
        grad[i] = 0.0f;
        if (at[axis] < from || at[axis] >= from + count) continue;
        want[n] = v[i];
        grad[i] = dy[n] = part_value(7 * n + 1);
        n++;
    }
    mixp_tensor *x = mixp_param(ctx, NULL, dtype, 3, shape);
    mixp_write(x, v, MIXP_F32, A * B * C);
    mixp_tensor *y = mixp_slice(ctx, x, dim, first, count);
    CHECK(y && y->count == n && y->dtype == dtype && y->rank == 3 && y->shape[axis] == count);
    if (!y || y->count != n) return;
    mixp_read(y, got, MIXP_F32, n);
    CHECK(!memcmp(got, want, (size_t)n * sizeof *got));
    y = mixp_mul(ctx, y, mixp_cast(ctx, mixp_input(ctx, MIXP_F32, 3, y->shape, dy), dtype));
    CHECK_INT(mixp_backward(ctx, mixp_sum(ctx, y, MIXP_ALL, 0)), MIXP_OK);
    mixp_read(x->grad, got, MIXP_F32, A * B * C);
    for (i = 0; i < A * B * C; i++) CHECK_NEAR(got[i], grad[i], 0.0);
}

static void test_slice_values(void) {
    static const mixp_dtype dtypes[3] = { MIXP_F32, MIXP_F16, MIXP_BF16 };
    for (int d = 0; d < 3; d++) {
        slice_case(dtypes[d], 0, 0, 1);
        slice_case(dtypes[d], 0, 1, 2);
        slice_case(dtypes[d], 1, 2, 4);
        slice_case(dtypes[d], -2, -1, 1);
        slice_case(dtypes[d], 2, 0, 17);
        slice_case(dtypes[d], -1, -3, 3);
        slice_case(dtypes[d], 2, 0, 20);
    }
}

/* A slice of ids is one of ids, in any region. */
static void test_slice_of_ids(void) {
    const int64_t shape[2] = { 2, 3 };
    int32_t got[2] = { 9, 9 };
    mixp_tensor *y = NULL;
    mixp_step_begin(ctx);
    mixp_autocast_set_level(ctx, 2);
    MIXP_AUTOCAST(ctx, MIXP_F16) {
        y = mixp_slice(ctx, mixp_input(ctx, MIXP_I32, 2, shape, ids), 1, 1, 1);
    }
    mixp_autocast_set_level(ctx, 1);
    CHECK(y && y->dtype == MIXP_I32);
    mixp_read(y, got, MIXP_I32, 2);
    CHECK_INT(got[0], ids[1]);
    CHECK_INT(got[1], ids[4]);
}

/* A GRU's gates: three parts of one activation, of which one is used twice, and a column that
 * nobody uses. What the memory of its gradient held before must not be seen. */
static void test_slices_of_one_tensor(void) {
    enum { R = 4, C = 7 };
    mixp_tensor *x = param2(R, C), *h, *r, *z, *n, *again;
    float got[R * C], v[R * C];
    mixp_read(x, v, MIXP_F32, R * C);
    for (int step = 1; step <= 3; step++) {
        mixp_step_begin(ctx);
        h = mixp_scale(ctx, x, 2.0f);
        r = mixp_slice(ctx, h, 1, 0, 2);
        z = mixp_slice(ctx, h, 1, 2, 2);
        n = mixp_slice(ctx, h, 1, 4, 2);
        again = mixp_slice(ctx, h, -1, 0, 2);
        h = mixp_add(ctx, mixp_mul(ctx, r, z), mixp_add(ctx, n, mixp_scale(ctx, again, 3.0f)));
        CHECK_INT(mixp_backward(ctx, mixp_sum(ctx, h, MIXP_ALL, 0)), MIXP_OK);
    }
    mixp_read(x->grad, got, MIXP_F32, R * C);   /* three steps' sum */
    for (int i = 0; i < R * C; i++) {
        double want = 2.0;
        int col = i % C;
        if (col < 2) want = 4.0 * (double)v[i + 2] + 6.0;
        else if (col < 4) want = 4.0 * (double)v[i - 2];
        else if (col == 6) want = 0.0;
        CHECK_NEAR(got[i], 3.0 * want, 1e-5);
    }
}

/* A slice's gradient in f16 goes into a parameter's in f32. */
static void test_slice_into_another_dtype(void) {
    mixp_tensor *x = param2(4, 6), *y = NULL;
    float got[24];
    mixp_step_begin(ctx);
    mixp_autocast_set_level(ctx, 2);
    MIXP_AUTOCAST(ctx, MIXP_F16) {
        y = mixp_add(ctx, mixp_slice(ctx, x, 1, 0, 2), mixp_slice(ctx, x, 1, 1, 2));
        CHECK_INT(y->dtype, MIXP_F16);
    }
    mixp_autocast_set_level(ctx, 1);
    CHECK_INT(mixp_backward(ctx, mixp_sum(ctx, y, MIXP_ALL, 0)), MIXP_OK);
    CHECK_INT(x->grad->dtype, MIXP_F32);
    mixp_read(x->grad, got, MIXP_F32, 24);
    for (int i = 0; i < 24; i++) CHECK_NEAR(got[i], i % 6 == 1 ? 2.0 : i % 6 < 3, 0.0);
}

/* What is joined is what was split, forward and back. */
static void test_split_and_concat(void) {
    enum { PARTS = 65, R = 3, C = 2 * PARTS };
    static float v[R * C], got[R * C];
    mixp_tensor *x = param2(R, C), *parts[PARTS], *y;
    mixp_read(x, v, MIXP_F32, R * C);
    mixp_step_begin(ctx);
    CHECK_INT(mixp_split(ctx, x, -1, PARTS, parts), MIXP_OK);
    for (int i = 0; i < PARTS; i++) CHECK(parts[i] && parts[i]->shape[0] == R && parts[i]->shape[1] == 2);
    y = mixp_concat(ctx, PARTS, parts, 1);
    mixp_read(y, got, MIXP_F32, R * C);
    CHECK(!memcmp(got, v, sizeof v));
    CHECK_INT(mixp_backward(ctx, mixp_sum(ctx, mixp_mul(ctx, y, y), MIXP_ALL, 0)), MIXP_OK);
    mixp_read(x->grad, got, MIXP_F32, R * C);
    for (int i = 0; i < R * C; i++) CHECK_NEAR(got[i], 2.0f * v[i], 0.0);
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
}

/* x^2 of 12 elements, whose backward is made of operators: dx = 2 x dy. */
static mixp_result square_infer(mixp_call *c)
{ return mixp_call_output(c, MIXP_F32, c->in[0]->rank, c->in[0]->shape); }
static mixp_result square_forward(mixp_call *c) {
    float v[12];
    mixp_read(c->in[0], v, MIXP_F32, 12);
    for (int i = 0; i < 12; i++) v[i] *= v[i];
    return mixp_write(c->out, v, MIXP_F32, 12);
}
static mixp_result square_backward(mixp_call *c) {
    float v[12], old[12];
    int i, accumulate = 0;
    mixp_tensor *g = mixp_call_grad(c, 0, &accumulate);
    mixp_tensor *slope = mixp_scale(c->ctx, mixp_mul(c->ctx, c->out->grad, c->in[0]), 2.0f);
    if (!g || !slope) return MIXP_ERR_ORDER;
    mixp_read(slope, v, MIXP_F32, 12);
    mixp_read(g, old, MIXP_F32, 12);
    for (i = 0; accumulate && i < 12; i++) v[i] += old[i];
    return mixp_write(g, v, MIXP_F32, 12);
}

/* The walk back is itself a place without gradients: who writes a backward may apply operators. */
static void test_backward_by_operators(void) {
    static const mixp_op square = { "square", MIXP_CLASS_F32, 0, square_infer, square_forward,
                                    square_backward, NULL };
    mixp_tensor *x = param2(3, 4), *y;
    float g[12];
    mixp_step_begin(ctx);
    y = mixp_mul(ctx, mixp_apply(ctx, &square, 1, &x, 1, NULL), x);     /* x^3 */
    CHECK_INT(mixp_backward(ctx, mixp_sum(ctx, y, MIXP_ALL, 0)), MIXP_OK);
    CHECK(x->grad != NULL);
    if (!x->grad) return;
    mixp_read(x->grad, g, MIXP_F32, 12);
    for (int i = 0; i < 12; i++) {
        float v = ((float *)x->data)[i];
        CHECK_NEAR(g[i], 3.0f * v * v, 1e-5 * (1.0 + 3.0 * v * v));
    }
    CHECK(mixp_mul(ctx, x->grad, x->grad) == NULL);                     /* and ends with it */
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_ERR_ORDER);
    mixp_context_clear_error(ctx);
}

static void test_no_grad_records_nothing(void) {
    mixp_tensor *x = param2(3, 4), *loss = NULL;
    mixp_step_begin(ctx);
    MIXP_NO_GRAD(ctx) { loss = mixp_mean(ctx, x, MIXP_ALL, 0); }
    CHECK(loss != NULL);
    CHECK_INT(mixp_backward(ctx, loss), MIXP_ERR_ORDER);
    mixp_context_clear_error(ctx);
    mixp_step_begin(ctx);
    CHECK_INT(mixp_backward(ctx, mixp_mean(ctx, x, MIXP_ALL, 0)), MIXP_OK);
}

static mixp_tensor *step_of_everything(mixp_tensor *x, mixp_tensor *w, mixp_tensor *b) {
    mixp_tensor *h = mixp_linear(ctx, x, w, b);
    h = mixp_dropout(ctx, mixp_gelu(ctx, mixp_layer_norm(ctx, h, NULL, NULL, 1e-5f)), 0.1f, 1);
    h = mixp_add(ctx, h, mixp_softmax(ctx, h));
    return mixp_mean(ctx, mixp_mul(ctx, h, h), MIXP_ALL, 0);
}

static void test_nothing_is_allocated_after_the_first_step(void) {
    int64_t four[1] = { 4 };
    mixp_tensor *x = param2(6, 5), *w = param2(4, 5), *b = mixp_param(ctx, NULL, MIXP_F32, 1, four);
    int64_t first = 0;
    for (int step = 0; step < 6; step++) {
        mixp_tensor *loss = NULL;
        mixp_step_begin(ctx);
        MIXP_AUTOCAST(ctx, MIXP_F16) { loss = step_of_everything(x, w, b); }
        CHECK_INT(mixp_backward(ctx, loss), MIXP_OK);
        mixp_tensor_touch(w);
        if (step == 0) first = mixp_context_memory(ctx).allocations;
    }
    CHECK_INT(mixp_context_memory(ctx).allocations, first);
}

/* What a program drops and draws in its first step. Casts stand between the draws: the linear casts x, and a
 * softmax's f32 result is cast for the next linear. v has a row of ones a key, so that the result of attention
 * is 0 where a weight was dropped. */
enum { DROPPED_N = 32, DROPPED_ALL = 4 * DROPPED_N * DROPPED_N };
static void dropped(const mixp_autocast *region, int more, float *out) {
    const int64_t shape[3] = { 1, DROPPED_N, DROPPED_N };
    mixp_context *c = mixp_context_new(NULL);
    mixp_attention_desc how;
    static float one[DROPPED_N * DROPPED_N];
    mixp_tensor *w, *x, *v, *h, *drawn[4];
    for (int i = 0; i < DROPPED_N; i++) one[i * DROPPED_N + i] = 1.0f;
    memset(&how, 0, sizeof how);
    how.heads = how.kv_heads = 1;
    how.dropout = 0.4f;
    w = mixp_param(c, "w", MIXP_F32, 2, shape + 1);
    mixp_write(w, one, MIXP_F32, DROPPED_N * DROPPED_N);
    mixp_step_begin(c);
    if (region) mixp_autocast_open_with(c, region);
    x = mixp_full(c, MIXP_F32, 3, shape, 0.5);
    v = mixp_input(c, MIXP_F32, 3, shape, one);
    if (more) mixp_gelu(c, mixp_linear(c, x, w, NULL));
    h = mixp_linear(c, x, w, NULL);
    drawn[0] = mixp_dropout(c, mixp_softmax(c, h), 0.3f, 1);
    h = mixp_linear(c, drawn[0], w, NULL);
    drawn[1] = mixp_uniform(c, MIXP_F32, 3, shape, 0.0f, 1.0f);
    h = mixp_linear(c, mixp_softmax(c, h), w, NULL);
    drawn[2] = mixp_attention_apply(c, h, h, v, &how);
    drawn[3] = mixp_bernoulli(c, MIXP_F32, 3, shape, 0.5f);
    for (int i = 0; i < 4; i++) {
        float *y = out + i * DROPPED_N * DROPPED_N;
        CHECK_INT(mixp_read(drawn[i], y, MIXP_F32, DROPPED_N * DROPPED_N), MIXP_OK);
        for (int k = 0; i != 1 && k < DROPPED_N * DROPPED_N; k++) y[k] = y[k] != 0.0f;
    }
    mixp_autocast_close(c, 0);
    CHECK_INT(mixp_context_error(c, NULL), MIXP_OK);
    mixp_context_free(c);
}

static void test_dropout_is_the_same_at_every_level(void) {
    static const mixp_autocast regions[] = { { MIXP_F16, 1, NULL }, { MIXP_BF16, 1, NULL }, { MIXP_F16, 2, NULL },
                                             { MIXP_BF16, 2, NULL } };
    static float plain[DROPPED_ALL], low[DROPPED_ALL];
    double kept[4] = { 0, 0, 0, 0 };
    dropped(NULL, 0, plain);
    for (int i = 0; i < DROPPED_ALL; i++) kept[i / (DROPPED_N * DROPPED_N)] += (double)plain[i];
    for (int i = 0; i < 4; i++) CHECK_NEAR(kept[i] / (DROPPED_N * DROPPED_N), i == 0 ? 0.7 : i == 2 ? 0.6 : 0.5, 0.08);
    dropped(NULL, 1, low);
    CHECK_INT(memcmp(plain, low, sizeof low), 0); /* operators that draw nothing do not count */
    for (int i = 0; i < 4; i++) {
        dropped(&regions[i], i % 2, low);
        CHECK_INT(memcmp(plain, low, sizeof low), 0);
    }
}

static void test_dropout_is_keyed_and_scaled(void) {
    enum { N = 100 * 100 };
    static float a[N], b[N];
    mixp_tensor *x = param2(100, 100), *y;
    int i, zeros = 0;
    mixp_fill(x, 1.0);
    mixp_step_begin(ctx);
    y = mixp_dropout(ctx, x, 0.25f, 1);
    mixp_read(y, a, MIXP_F32, N);
    mixp_read(mixp_dropout(ctx, x, 0.25f, 1), b, MIXP_F32, N);
    CHECK(memcmp(a, b, sizeof a) != 0);     /* another call, another mask */
    for (i = 0; i < N; i++) { zeros += a[i] == 0.0f; CHECK(a[i] == 0.0f || fabsf(a[i] - 4.0f / 3.0f) < 1e-6f); }
    CHECK_NEAR(zeros / (double)N, 0.25, 5.0 * sqrt(0.25 * 0.75 / N));
    CHECK_INT(mixp_backward(ctx, mixp_sum(ctx, y, MIXP_ALL, 0)), MIXP_OK);
    mixp_read(x->grad, b, MIXP_F32, N);
    CHECK(!memcmp(a, b, sizeof a));         /* the same mask and factor on the way back */
    CHECK(mixp_dropout(ctx, x, 0.5f, 0) == x);
    CHECK(mixp_dropout(ctx, x, 1.0001f, 1) == NULL);
    mixp_context_clear_error(ctx);
}

#define REFUSED(call, code)                                                               \
    do { const char *why_ = ""; mixp_context_clear_error(ctx); CHECK((call) == NULL);     \
         CHECK_INT(mixp_context_error(ctx, &why_), (code)); CHECK(strlen(why_) > 20); } while (0)

static void test_bad_slices(mixp_tensor *x) {       /* [6, 5] */
    mixp_tensor *named, *parts[4];
    const int64_t six_five[2] = { 6, 5 };
    const char *why = "";
    named = mixp_param(ctx, "sliced", MIXP_F32, 2, six_five);
    REFUSED(mixp_slice(ctx, NULL, 0, 0, 1), MIXP_ERR_ARGUMENT);
    REFUSED(mixp_slice(ctx, x, 2, 0, 1), MIXP_ERR_SHAPE);
    mixp_context_error(ctx, &why);
    CHECK_TEXT(why, "slice: 2 is not a dimension of x [6, 5]");
    REFUSED(mixp_slice(ctx, x, -3, 0, 1), MIXP_ERR_SHAPE);
    REFUSED(mixp_slice(ctx, x, 0, 0, -1), MIXP_ERR_SHAPE);
    REFUSED(mixp_slice(ctx, x, 0, 0, 7), MIXP_ERR_SHAPE);
    REFUSED(mixp_slice(ctx, x, 0, 6, 1), MIXP_ERR_SHAPE);
    REFUSED(mixp_slice(ctx, x, 0, -7, 1), MIXP_ERR_SHAPE);
    REFUSED(mixp_slice(ctx, x, 0, INT64_MAX, INT64_MAX), MIXP_ERR_SHAPE);
    REFUSED(mixp_slice(ctx, x, 0, INT64_MIN, INT64_MAX), MIXP_ERR_SHAPE);
    REFUSED(mixp_slice(ctx, x, 0, INT64_MIN, INT64_MIN), MIXP_ERR_SHAPE);
    REFUSED(mixp_slice(ctx, named, 1, 3, 4), MIXP_ERR_SHAPE);
    mixp_context_error(ctx, &why);
    CHECK_TEXT(why, "slice: count 4 from index 3 along dim 1 of x 'sliced' [6, 5]");
    mixp_context_clear_error(ctx);
    CHECK(mixp_slice(ctx, x, 0, 5, 1) && mixp_slice(ctx, x, 0, -6, 6));
    parts[0] = parts[1] = parts[2] = parts[3] = x;
    CHECK_INT(mixp_split(ctx, named, 0, 4, parts), MIXP_ERR_SHAPE);
    CHECK(!parts[0] && !parts[1] && !parts[2] && !parts[3]);
    mixp_context_error(ctx, &why);
    CHECK_TEXT(why, "mixp_split: x 'sliced' [6, 5] has no dim 0 that is a multiple of 4");
    CHECK_INT(mixp_split(ctx, x, 2, 1, parts), MIXP_ERR_SHAPE);
    CHECK_INT(mixp_split(ctx, x, 0, 0, parts), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_split(ctx, x, 0, 2, NULL), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_split(NULL, x, 0, 2, parts), MIXP_ERR_ARGUMENT);
    mixp_context_clear_error(ctx);
    parts[0] = parts[1] = x;
    CHECK_INT(mixp_split(ctx, NULL, 0, 2, parts), MIXP_ERR_ARGUMENT);
    CHECK(!parts[0] && !parts[1]);
    mixp_context_clear_error(ctx);
}

/* The one of many that does not fit is named, with its number. */
static void test_bad_concat(mixp_tensor *x, mixp_tensor *w) {
    mixp_tensor *many[70];
    const char *why = "";
    for (int i = 0; i < 70; i++) many[i] = x;
    many[66] = w;
    REFUSED(mixp_concat(ctx, 70, many, 0), MIXP_ERR_SHAPE);
    mixp_context_error(ctx, &why);
    CHECK_TEXT(why, "concat: input 0 [6, 5] and input 66 [4, 3] do not fit");
    many[66] = x;
    many[69] = NULL;
    REFUSED(mixp_concat(ctx, 70, many, 0), MIXP_ERR_ARGUMENT);
    mixp_context_error(ctx, &why);
    CHECK_TEXT(why, "concat: input 69 is NULL");
}

static void test_bad_inputs_name_the_rule(void) {
    int64_t five[1] = { 5 }, bad_reshape[2] = { 7, -1 }, minus[2] = { -1, -1 }, wraps[3] = { 4, INT64_C(1) << 62, -1 }, three[3] = { 2, 3, 5 };
    int32_t out_of_range[6] = { 0, 1, 2, 3, 4, 6 };
    mixp_tensor *x = param2(6, 5), *w = param2(4, 3), *b = mixp_param(ctx, NULL, MIXP_F32, 1, five), *i32, *off;
    mixp_tensor *both[2], *none[2] = { NULL, NULL };
    const char *why = "";
    mixp_step_begin(ctx);
    i32 = mixp_input(ctx, MIXP_I32, 1, six, ids);
    off = mixp_input(ctx, MIXP_I32, 1, six, out_of_range);
    both[0] = x;
    both[1] = b;
    REFUSED(mixp_linear(ctx, x, w, NULL), MIXP_ERR_SHAPE);
    REFUSED(mixp_linear(ctx, x, NULL, NULL), MIXP_ERR_ARGUMENT);
    REFUSED(mixp_linear(ctx, i32, w, NULL), MIXP_ERR_DTYPE);
    REFUSED(mixp_matmul(ctx, x, w, 0, 0), MIXP_ERR_SHAPE);
    REFUSED(mixp_matmul(ctx, b, x, 0, 0), MIXP_ERR_SHAPE);
    REFUSED(mixp_add(ctx, x, w), MIXP_ERR_SHAPE);
    REFUSED(mixp_add(ctx, x, i32), MIXP_ERR_DTYPE);
    REFUSED(mixp_attention(ctx, x, 2, 1, 0.0f), MIXP_ERR_SHAPE);
    REFUSED(mixp_attention(ctx, mixp_activation(ctx, MIXP_F32, 3, three), 0, 1, 0.0f), MIXP_ERR_SHAPE);
    REFUSED(mixp_sum(ctx, x, 2, 0), MIXP_ERR_SHAPE);
    REFUSED(mixp_layer_norm(ctx, x, w, NULL, 1e-5f), MIXP_ERR_SHAPE);
    REFUSED(mixp_layer_norm(ctx, x, NULL, NULL, 0.0f), MIXP_ERR_ARGUMENT);
    REFUSED(mixp_layer_norm(ctx, x, NULL, NULL, (float)NAN), MIXP_ERR_ARGUMENT);
    REFUSED(mixp_embedding(ctx, x, b), MIXP_ERR_DTYPE);
    REFUSED(mixp_embedding(ctx, x, off), MIXP_ERR_ARGUMENT);
    mixp_context_error(ctx, &why);
    CHECK_TEXT(why, "embedding: id 6 at row 5 is outside [0, 6)");
    REFUSED(mixp_cross_entropy(ctx, x, off, -100), MIXP_ERR_ARGUMENT);
    mixp_context_error(ctx, &why);
    CHECK_TEXT(why, "cross_entropy: target 6 at row 5 is outside [0, 5)");
    REFUSED(mixp_cross_entropy(ctx, x, b, -100), MIXP_ERR_DTYPE);
    REFUSED(mixp_mse(ctx, x, b), MIXP_ERR_SHAPE);
    REFUSED(mixp_cast(ctx, x, MIXP_I32), MIXP_ERR_DTYPE);
    REFUSED(mixp_reshape(ctx, x, 2, bad_reshape), MIXP_ERR_SHAPE);
    REFUSED(mixp_reshape(ctx, x, 2, minus), MIXP_ERR_SHAPE);
    REFUSED(mixp_reshape(ctx, x, 3, wraps), MIXP_ERR_SHAPE);     /* 2^64 elements are not 0 */
    REFUSED(mixp_reshape(ctx, x, 9, minus), MIXP_ERR_SHAPE);
    REFUSED(mixp_transpose(ctx, x, 0, 2), MIXP_ERR_SHAPE);
    REFUSED(mixp_concat(ctx, 2, both, 0), MIXP_ERR_SHAPE);
    REFUSED(mixp_concat(ctx, 2, none, 0), MIXP_ERR_ARGUMENT);
    REFUSED(mixp_concat(ctx, 0, both, 0), MIXP_ERR_ARGUMENT);
    REFUSED(mixp_concat(ctx, MIXP_MAX_INPUTS + 1, both, 0), MIXP_ERR_ARGUMENT);
    mixp_context_error(ctx, &why);
    CHECK_TEXT(why, "concat: 65537 inputs");
    CHECK_TEXT(why, "at most 65536");
    test_bad_slices(x);
    test_bad_concat(x, w);
    REFUSED(mixp_dropout(ctx, x, (float)NAN, 1), MIXP_ERR_ARGUMENT);
    REFUSED(mixp_apply(ctx, NULL, 1, both, 1, NULL), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_backward(ctx, NULL), MIXP_ERR_ARGUMENT);
    mixp_context_clear_error(ctx);
    CHECK_INT(mixp_backward(ctx, x), MIXP_ERR_SHAPE);
    mixp_context_clear_error(ctx);
    CHECK(mixp_op_builtin((mixp_op_id)1000) == NULL);
}

static mixp_tensor *named(mixp_context *c, const char *name, int64_t a, int64_t b) {
    int64_t shape[2];
    shape[0] = a;
    shape[1] = b;
    return mixp_param(c, name, MIXP_F32, 2, shape);
}

#define SAYS(expression, text) do {                                                       \
        const char *why_ = "";                                                            \
        CHECK((expression) == NULL);                                                      \
        mixp_context_error(c, &why_);                                                     \
        CHECK_TEXT(why_, text);                                                           \
        mixp_context_clear_error(c);                                                      \
    } while (0)

static void test_messages_name_the_tensors(void) {
    mixp_context *c = mixp_context_new(NULL);
    mixp_tensor *x = named(c, "x0", 8, 4), *w = named(c, "h.3.attn.w", 4, 2), *h, *plain, *rows;
    mixp_tensor *five[5];
    int64_t shape[2] = { 8, 4 }, four = 4;
    mixp_tensor *b = mixp_param(c, "h.3.attn.b", MIXP_F32, 1, &four);
    static float data[32];
    mixp_step_begin(c);
    SAYS(mixp_linear(c, x, w, NULL),
         "linear: x 'x0' [8, 4] and w 'h.3.attn.w' [4, 2] do not fit: x[..., in], w[out, in], b[out]");
    SAYS(mixp_linear(c, x, named(c, "v", 3, 4), b),
         "linear: x 'x0' [8, 4] and w 'v' [3, 4] and b 'h.3.attn.b' [4] do not fit");
    h = mixp_gelu(c, mixp_linear(c, x, named(c, "h.2.w", 4, 4), NULL));
    SAYS(mixp_linear(c, h, w, NULL), "linear: x [8, 4] of gelu and w 'h.3.attn.w' [4, 2] do not fit");
    h = mixp_linear(c, x, named(c, "h.4.w", 5, 4), NULL);
    SAYS(mixp_matmul(c, h, w, 0, 0),
         "matmul: a [8, 5] of linear('x0') and b 'h.3.attn.w' [4, 2] do not fit");
    plain = mixp_input(c, MIXP_F32, 2, shape, data);
    SAYS(mixp_add(c, plain, w), "add: a [8, 4] and b 'h.3.attn.w' [4, 2] do not fit");
    SAYS(mixp_sum(c, x, 2, 0), "sum: x 'x0' [8, 4] does not fit: dim must be one of x's dimensions");
    five[0] = x;
    five[1] = w;
    SAYS(mixp_concat(c, 2, five, 0),
         "concat: input 0 'x0' [8, 4] and input 1 'h.3.attn.w' [4, 2] do not fit");
    rows = mixp_view(c, "ids", MIXP_I32, 2, shape, data);
    SAYS(mixp_add(c, x, rows), "add: input 1 'ids' is i32; it must be");
    SAYS(mixp_embedding(c, x, w), "embedding: input 1 'h.3.attn.w' is f32; indices must be i32");
    MIXP_AUTOCAST(c, MIXP_F16) {     /* low copies and casts do not hide names */
        h = mixp_gelu(c, x);
        SAYS(mixp_linear(c, x, w, NULL), "linear: x 'x0' [8, 4] and w 'h.3.attn.w' [4, 2] do not fit");
        SAYS(mixp_linear(c, h, w, NULL), "linear: x [8, 4] of gelu('x0') and w 'h.3.attn.w' [4, 2]");
    }
    mixp_context_free(c);
}

static void test_null_flows_and_the_first_error_stays(void) {
    const char *why = "";
    mixp_tensor *x = param2(6, 5), *w = param2(4, 3), *h;
    mixp_step_begin(ctx);
    h = mixp_relu(ctx, mixp_linear(ctx, mixp_gelu(ctx, x), w, NULL));
    CHECK(h == NULL);
    CHECK(mixp_backward(ctx, h) != MIXP_OK);
    CHECK_INT(mixp_context_error(ctx, &why), MIXP_ERR_SHAPE);
    CHECK_TEXT(why, "linear");
    mixp_context_clear_error(ctx);
}

static void test_attention_scale(void) {
    static const uint32_t bad[] = { 0xBF800000u, 0x7F800000u, 0x7FC00000u };    /* -1, Inf, NaN */
    const int64_t shape[3] = { 1, 2, 12 };
    float data[24] = { 0 }, scale;
    mixp_context *c = mixp_context_new(NULL);
    mixp_step_begin(c);
    for (size_t i = 0; i < 3; i++) {
        memcpy(&scale, &bad[i], sizeof scale);
        CHECK(!mixp_attention(c, mixp_input(c, MIXP_F32, 3, shape, data), 2, 1, scale));
        CHECK_INT(mixp_context_error(c, NULL), MIXP_ERR_ARGUMENT);
        mixp_context_clear_error(c);
    }
    CHECK(mixp_attention(c, mixp_input(c, MIXP_F32, 3, shape, data), 2, 1, 0) != NULL);
    mixp_context_free(c);
}

static void test_gradient_of_a_shared_b_is_rounded_once(void) {
    for (int isa = 0; isa < MIXP_ISA_COUNT; isa++)
        if (mixp_cpu_with((mixp_isa)isa)) shared_b_everywhere(mixp_cpu_with((mixp_isa)isa));
    shared_b_ones(mixp_cpu(), MIXP_BF16, 4096);
    shared_b_ones(mixp_cpu(), MIXP_F16, 4096);
}

/* A batch of none beside a shared operand: the result has that batch, and the shared operand's gradient is 0. */
static void test_products_of_an_empty_batch(void) {
    const int64_t none[3] = { 0, 3, 3 };
    float         got[9] = { 0 };
    for (int i = 0; i < 16; i++) {
        mixp_tensor *w = param2(3, 3), *x, *y, *shared = w;
        const int    first = i & 1, one = i & 8;
        const int64_t ones[3] = { 1, 3, 3 };
        mixp_step_begin(ctx);
        x = mixp_input(ctx, MIXP_F32, 3, none, got);
        mixp_tensor_set_requires_grad(x, 1);
        if (one) shared = mixp_reshape(ctx, w, 3, ones);
        y = mixp_matmul(ctx, first ? shared : x, first ? x : shared, i >> 1 & 1, i >> 2 & 1);
        CHECK(y && y->rank == 3 && y->shape[0] == 0 && y->shape[1] == 3 && y->shape[2] == 3);
        CHECK_INT(mixp_backward(ctx, mixp_sum(ctx, y, MIXP_ALL, 0)), MIXP_OK);
        CHECK_INT(mixp_read(w->grad, got, MIXP_F32, 9), MIXP_OK);
        for (int k = 0; k < 9; k++) CHECK_NEAR((double)got[k], 0, 0);
    }
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
}

int main(void) {
    ctx = mixp_context_new(NULL);
    RUN(test_gradients);
    RUN(test_own_operator_and_the_checker);
    RUN(test_a_kept_gradient_is_not_handed_on);
    RUN(test_gradients_accumulate_until_zeroed);
    RUN(test_two_losses_share_a_trunk);
    RUN(test_no_double_backward);
    RUN(test_slice_values);
    RUN(test_slice_of_ids);
    RUN(test_slices_of_one_tensor);
    RUN(test_slice_into_another_dtype);
    RUN(test_split_and_concat);
    RUN(test_backward_by_operators);
    RUN(test_no_grad_records_nothing);
    RUN(test_nothing_is_allocated_after_the_first_step);
    RUN(test_dropout_is_keyed_and_scaled);
    RUN(test_dropout_is_the_same_at_every_level);
    RUN(test_bad_inputs_name_the_rule);
    RUN(test_messages_name_the_tensors);
    RUN(test_products_of_an_empty_batch);
    RUN(test_null_flows_and_the_first_error_stays);
    mixp_context_free(ctx);
    RUN(test_attention_scale);
    RUN(test_gradient_of_a_shared_b_is_rounded_once);
    return test_report();
}
