/* test_own_operators.c - user-defined operators that break their promises: each gives an error that
 * names operator and input. Also: user-defined operators that read float arrays, under autocast.
 * SPDX-License-Identifier: MIT OR Unlicense */
#include "mixprec.h"
#include "test.h"

static mixp_context *ctx;
static mixp_tensor  *w, *v;
static const int64_t square[2] = { 4, 4 };

static void told(mixp_result code, const char *part) {
    const char *text = "";
    CHECK_INT(mixp_context_error(ctx, &text), code);
    CHECK_TEXT(text, part);
    mixp_context_clear_error(ctx);
}

static void open_context(void) {
    float x[16];
    for (int i = 0; i < 16; i++) x[i] = (float)(i % 5) - 1.5f;
    ctx = mixp_context_new(NULL);
    w = mixp_param(ctx, "fc.w", MIXP_F32, 2, square);
    v = mixp_param(ctx, "fc.v", MIXP_F32, 2, square);
    mixp_write(w, x, MIXP_F32, 16);
    mixp_write(v, x, MIXP_F32, 16);
    mixp_step_begin(ctx);
}

/* --- gradients that are wanted ------------------------------------------------------------------ */

/* y = a + b, with a backward pass as `does` says: a digit for each input. */
enum { WRITES, ASKS, NEVER };
typedef struct manner { int a, b; } manner;

static mixp_result sum_infer(mixp_call *c) {
    return mixp_call_output(c, c->in[0]->dtype, c->in[0]->rank, c->in[0]->shape);
}
static mixp_result sum_forward(mixp_call *c) {
    for (int64_t i = 0; i < c->out->count; i++)
        mixp_put(mixp_call_y(c), i, mixp_get(mixp_call_x(c, 0), i) + mixp_get(mixp_call_x(c, 1), i));
    return MIXP_OK;
}
static void give(mixp_call *c, int i, int does) {
    if (does == NEVER) return;
    mixp_out dx = mixp_call_dx(c, i);
    for (int64_t k = 0; does == WRITES && dx.data && k < c->out->count; k++)
        mixp_put(dx, k, mixp_get(mixp_call_dy(c), k));
}
static mixp_result sum_backward(mixp_call *c) {
    const manner *m = (const manner *)c->attrs;
    give(c, 0, m->a);
    give(c, 1, m->b);
    return MIXP_OK;
}
static const mixp_op sum_op = { "my_sum", MIXP_CLASS_KEEP, sizeof(manner), sum_infer, sum_forward,
                                sum_backward, NULL };

static mixp_result walk(mixp_tensor *a, mixp_tensor *b, manner m) {
    mixp_tensor *in[2];
    in[0] = a;
    in[1] = b;
    w->grad = v->grad = NULL;
    return mixp_backward(ctx, mixp_sum(ctx, mixp_apply(ctx, &sum_op, 2, in, 2, &m), MIXP_ALL, 0));
}

static void test_gradients_that_are_not_given(void) {
    manner m;
    for (int low = 0; low < 2; low++)
        for (m.a = WRITES; m.a <= NEVER; m.a++)
            for (m.b = WRITES; m.b <= NEVER; m.b++) {
                int bad = m.a != WRITES ? 0 : 1;
                char part[96];
                open_context();
                mixp_tensor *h = low ? mixp_cast(ctx, w, MIXP_F16) : w;
                mixp_tensor *k = low ? mixp_cast(ctx, v, MIXP_F16) : v;
                if (m.a == WRITES && m.b == WRITES) {
                    CHECK_INT(walk(h, k, m), MIXP_OK);
                    CHECK(w->grad && v->grad);
                } else {
                    CHECK_INT(walk(h, k, m), MIXP_ERR_ARGUMENT);
                    snprintf(part, sizeof part, "my_sum backward: it %s the gradient of input %d%s",
                             (bad ? m.b : m.a) == NEVER ? "did not request" : "requested, but did not write,",
                             bad, low ? "," : bad ? " 'fc.v'" : " 'fc.w'");
                    told(MIXP_ERR_ARGUMENT, part);
                    CHECK(!w->grad && !v->grad);
                }
                mixp_context_free(ctx);
            }
}

/* Legal: what wants none is not asked for; a tensor that is both inputs may get all of it at once; a
 * gradient that others have begun is added to, or left alone. */
static void test_gradients_that_need_not_be_given(void) {
    manner both = { WRITES, WRITES }, first = { WRITES, NEVER }, asks = { ASKS, ASKS };
    mixp_tensor *in[2], *y, *z;
    open_context();
    mixp_tensor_set_requires_grad(v, 0);
    CHECK_INT(walk(w, v, first), MIXP_OK);
    CHECK_INT(walk(w, w, first), MIXP_OK);
    mixp_tensor_set_requires_grad(v, 1);
    in[0] = w;
    in[1] = v;
    for (int i = 0; i < 2; i++) {
        w->grad = v->grad = NULL;
        y = mixp_apply(ctx, &sum_op, 2, in, 2, &asks);      /* walked last: 0 is added */
        z = mixp_apply(ctx, &sum_op, 2, in, 2, &both);
        CHECK_INT(mixp_backward(ctx, mixp_sum(ctx, mixp_add(ctx, y, z), MIXP_ALL, 0)), MIXP_OK);
        mixp_step_begin(ctx);
    }
    told(MIXP_OK, "");
    mixp_context_free(ctx);
}

/* --- float arrays ------------------------------------------------------------------------------- */

static mixp_result floats_infer(mixp_call *c) {
    return mixp_call_output(c, MIXP_F32, c->in[0]->rank, c->in[0]->shape);
}
static mixp_result floats_forward(mixp_call *c) {
    const float *a = (const float *)c->in[0]->data;
    float *y = (float *)c->out->data;
    CHECK_INT(c->in[0]->dtype, MIXP_F32);
    CHECK_INT(c->out->dtype, MIXP_F32);
    for (int64_t i = 0; i < c->out->count; i++) y[i] = 2.0f * a[i];
    return MIXP_OK;
}
static mixp_result floats_backward(mixp_call *c) {
    const float *dy = (const float *)mixp_call_dy(c).data;
    mixp_out dx = mixp_call_dx(c, 0);
    if (!dx.data) return MIXP_OK;
    CHECK_INT(dx.dtype, MIXP_F32);
    for (int64_t i = 0; i < c->out->count; i++)
        ((float *)dx.data)[i] = dx.accumulate ? ((float *)dx.data)[i] + 2.0f * dy[i] : 2.0f * dy[i];
    return MIXP_OK;
}
static const mixp_op floats_op = { "floats", MIXP_CLASS_ALL_F32, 0, floats_infer, floats_forward,
                                   floats_backward, NULL };

/* 2 (x w'), where x and w are ones: 8 everywhere, in all regions, and the gradient of w is 8. */
static void test_float_arrays(void) {
    static const mixp_dtype dtypes[3] = { MIXP_F32, MIXP_F16, MIXP_BF16 };
    float x[16], grad[16];
    for (int i = 0; i < 16; i++) x[i] = 1.0f;
    for (int level = 0; level < 3; level++)
        for (int d = 0; d < 3; d++) {
            mixp_tensor *h, *y = NULL;
            open_context();
            mixp_fill(w, 1.0);
            mixp_autocast_set_level(ctx, level);
            MIXP_AUTOCAST(ctx, dtypes[d]) {
                h = mixp_linear(ctx, mixp_input(ctx, MIXP_F32, 2, square, x), w, NULL);
                CHECK_INT(h->dtype, level ? dtypes[d] : MIXP_F32);
                y = mixp_apply(ctx, &floats_op, 1, &h, 1, NULL);
            }
            CHECK_INT(y->dtype, MIXP_F32);
            CHECK_NEAR(mixp_item(mixp_max(ctx, y, MIXP_ALL, 0)), 8.0, 0.0);
            CHECK_INT(mixp_backward(ctx, mixp_sum(ctx, y, MIXP_ALL, 0)), MIXP_OK);
            CHECK_INT(mixp_read(w->grad, grad, MIXP_F32, 16), MIXP_OK);
            for (int i = 0; i < 16; i++) CHECK_NEAR(grad[i], 8.0, 0.0);
            told(MIXP_OK, "");
            mixp_context_free(ctx);
        }
}

/* A parameter that is low itself, outside of all regions. */
static void test_float_arrays_of_a_low_parameter(void) {
    float grad[16];
    open_context();
    mixp_tensor *p = mixp_param(ctx, "p", MIXP_BF16, 2, square);
    mixp_fill(p, 0.5);
    mixp_tensor *y = mixp_apply(ctx, &floats_op, 1, &p, 1, NULL);
    CHECK_NEAR(mixp_item(mixp_max(ctx, y, MIXP_ALL, 0)), 1.0, 0.0);
    CHECK_INT(mixp_backward(ctx, mixp_sum(ctx, y, MIXP_ALL, 0)), MIXP_OK);
    CHECK_INT(mixp_read(p->grad, grad, MIXP_F32, 16), MIXP_OK);
    CHECK_NEAR(grad[7], 2.0, 0.0);
    mixp_context_free(ctx);
}

/* --- rows and calls that are wrong ---------------------------------------------------------------- */

static void test_rows_that_are_wrong(void) {
    mixp_op row = floats_op;
    open_context();
    row.cls = (mixp_op_class)77;
    CHECK(!mixp_apply(ctx, &row, 1, &w, 1, NULL));
    told(MIXP_ERR_ARGUMENT, "floats: the operator's class is 77");
    CHECK(!mixp_apply(ctx, &floats_op, 1, &w, 0, NULL));
    told(MIXP_ERR_ARGUMENT, "floats: 1 inputs, of which 0 required; at least 1");
    mixp_context_free(ctx);
}

/* Codes outside mixp_result: the call fails with MIXP_ERR_ARGUMENT. */
static mixp_result code_of_forward, code_of_backward;
static mixp_result coded_infer(mixp_call *c) { return mixp_call_output(c, MIXP_F32, 2, square); }
static mixp_result coded_forward(mixp_call *c) {
    mixp_fill(c->out, 1.0);
    return code_of_forward;
}
static mixp_result coded_backward(mixp_call *c) {
    int add;
    mixp_fill(mixp_call_grad(c, 0, &add), 1.0);
    return code_of_backward;
}
static void test_codes_that_do_not_exist(void) {
    static const mixp_op op = { "coded", MIXP_CLASS_KEEP, 0, coded_infer, coded_forward, coded_backward, NULL };
    static const int codes[4] = { -3, 26, MIXP_RESULT_COUNT, 1 << 20 };
    for (int i = 0; i < 4; i++) {
        open_context();
        code_of_forward = (mixp_result)codes[i];
        CHECK(mixp_apply(ctx, &op, 1, &w, 1, NULL) == NULL);
        told(MIXP_ERR_ARGUMENT, "coded");
        code_of_forward = MIXP_OK;
        code_of_backward = (mixp_result)codes[i];
        mixp_tensor *y = mixp_sum(ctx, mixp_apply(ctx, &op, 1, &w, 1, NULL), MIXP_ALL, 0);
        CHECK_INT(mixp_backward(ctx, y), MIXP_ERR_ARGUMENT);
        told(MIXP_ERR_ARGUMENT, "coded");
        CHECK_INT(mixp_context_fail(ctx, (mixp_result)codes[i], "mine"), MIXP_ERR_ARGUMENT);
        told(MIXP_ERR_ARGUMENT, "mine");
        mixp_context_free(ctx);
    }
}

int main(void) {
    RUN(test_gradients_that_are_not_given);
    RUN(test_gradients_that_need_not_be_given);
    RUN(test_float_arrays);
    RUN(test_float_arrays_of_a_low_parameter);
    RUN(test_rows_that_are_wrong);
    RUN(test_codes_that_do_not_exist);
    return test_report();
}
