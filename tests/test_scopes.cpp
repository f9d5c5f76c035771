/* test_scopes.cpp - autocast and no_grad for as long as a C++ variable lives, however that ends.
 * SPDX-License-Identifier: MIT OR Unlicense */
#include "mixprec.h"
#include "test.h"
#include <type_traits>

static mixp_context *ctx;
static mixp_tensor  *w;

static mixp_tensor *product(void) {
    int64_t shape[2] = { 2, 2 };
    float x[4] = { 1, 2, 3, 4 };
    return mixp_matmul(ctx, mixp_input(ctx, MIXP_F32, 2, shape, x), w, 0, 0);
}

/* No region is open: the product is in f32, and is recorded. */
static void check_outside(void) {
    mixp_tensor *y = product();
    CHECK(y && y->dtype == MIXP_F32);
    CHECK_INT(mixp_backward(ctx, mixp_sum(ctx, y, MIXP_ALL, 0)), MIXP_OK);
    CHECK_INT(mixp_autocast_current(ctx).dtype, MIXP_F32);
    CHECK_INT(mixp_step_begin(ctx), MIXP_OK);
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
}

static mixp_tensor *left_by_return(void) {
    mixp_autocast_scope scope(ctx, MIXP_F16);
    return product();
}

static void test_return(void) {
    mixp_tensor *y = left_by_return();
    CHECK(y && y->dtype == MIXP_F16);
    check_outside();
}

static void throws(void) {
    mixp_autocast_scope cast(ctx, MIXP_BF16);
    mixp_no_grad_scope  evaluation(ctx);
    CHECK_INT(product()->dtype, MIXP_BF16);
    MIXP_AUTOCAST(ctx, MIXP_F16) { throw 7; }           /* a block cannot notice; the scope does */
}

static void test_exception(void) {
    int caught = 0;
    try { throws(); } catch (int i) { caught = i; }
    CHECK_INT(caught, 7);
    check_outside();
}

static void test_loops(void) {
    int i, after = 0;
    for (i = 0; i < 3; i++) {
        mixp_no_grad_scope scope(ctx);
        if (i == 0) continue;
        after++;
        if (i == 1) break;
    }
    CHECK_INT(after, 1);
    check_outside();
}

static void test_nested(void) {
    mixp_autocast_scope outer(ctx, MIXP_F16);
    {
        mixp_autocast_scope inner(ctx, MIXP_BF16);
        mixp_no_grad_scope evaluation(ctx);
        CHECK_INT(mixp_step_begin(ctx), MIXP_OK);       /* steps may begin in a scope */
        CHECK_INT(product()->dtype, MIXP_BF16);
        CHECK_INT(mixp_backward(ctx, mixp_sum(ctx, product(), MIXP_ALL, 0)), MIXP_ERR_ORDER);
        mixp_context_clear_error(ctx);
    }
    CHECK_INT(product()->dtype, MIXP_F16);
    CHECK_INT(mixp_backward(ctx, mixp_sum(ctx, product(), MIXP_ALL, 0)), MIXP_OK);
}

static void test_no_context_and_no_copies(void) {
    mixp_autocast_scope none(NULL, MIXP_F16);
    mixp_no_grad_scope  neither(NULL);
    CHECK(!std::is_copy_constructible<mixp_autocast_scope>::value);
    CHECK(!std::is_copy_assignable<mixp_no_grad_scope>::value);
    CHECK((!std::is_convertible<mixp_context *, mixp_no_grad_scope>::value));
}

int main(void) {
    int64_t shape[2] = { 2, 2 };
    ctx = mixp_context_new(NULL);
    w = mixp_param(ctx, "w", MIXP_F32, 2, shape);
    mixp_fill(w, 0.5);
    RUN(test_return);
    RUN(test_exception);
    RUN(test_loops);
    RUN(test_nested);
    check_outside();
    RUN(test_no_context_and_no_copies);
    mixp_context_free(ctx);
    return test_report();
}
