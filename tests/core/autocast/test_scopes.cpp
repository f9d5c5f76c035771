/* test_scopes.cpp - features for C++: autocast and no_grad for the lifetime of a variable, however
 * the lifetime ends, and exceptions that leave on_error, operators and hooks.
 * SPDX-License-Identifier: MIT OR Unlicense */
#include "mixprec.h"
#include "test.h"
#include "new_optimizer.h"
#include <stdexcept>
#include <string>
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

/* --- exceptions ---------------------------------------------------------------------------------- */

static int heard;

static void throws_error(mixp_result, const char *message, void *) {
    heard++;
    throw std::runtime_error(message);
}

enum { WELL, IN_INFER, IN_FORWARD, IN_BACKWARD, CAUGHT_INSIDE, FAILS, PLACES };
static int place;

static mixp_result thrower_infer(mixp_call *c) {
    if (place == IN_INFER) throw 1;
    return mixp_call_output(c, MIXP_F32, c->in[0]->rank, c->in[0]->shape);
}
static mixp_result thrower_forward(mixp_call *c);
static mixp_result thrower_backward(mixp_call *c) {
    mixp_out dx = mixp_call_dx(c, 0);
    if (place == IN_BACKWARD) throw 3;
    for (int64_t i = 0; dx.data && i < c->out->count; i++) mixp_put(dx, i, 2.0f * mixp_get(mixp_call_dy(c), i));
    return MIXP_OK;
}
static const mixp_op thrower = { "thrower", MIXP_CLASS_F32, 0, thrower_infer, thrower_forward,
                                 thrower_backward, NULL };
static mixp_result thrower_forward(mixp_call *c) {
    if (place == IN_FORWARD) throw 2;
    if (place == CAUGHT_INSIDE) {
        place = IN_FORWARD;
        try { mixp_apply(c->ctx, &thrower, 1, c->in, 1, NULL); } catch (int i) { place = WELL + 10 * i; }
    }
    if (place == FAILS) {
        mixp_context_fail(c->ctx, MIXP_ERR_IO, "thrower says so");
        CHECK_INT(heard, 0);                    /* not before the outermost call returns */
        return MIXP_ERR_IO;
    }
    for (int64_t i = 0; i < c->out->count; i++) mixp_put(mixp_call_y(c), i, 2.0f * mixp_get(mixp_call_x(c, 0), i));
    return MIXP_OK;
}

/* The gradient of w of mean(2 w . 2 w): 8 w / 4. */
static void a_good_step(void) {
    float grad[4] = { 0 };
    w->grad = NULL;
    place = WELL;
    CHECK_INT(mixp_step_begin(ctx), MIXP_OK);
    mixp_tensor *y = mixp_apply(ctx, &thrower, 1, &w, 1, NULL);
    CHECK_INT(mixp_backward(ctx, mixp_mean(ctx, mixp_mul(ctx, y, y), MIXP_ALL, 0)), MIXP_OK);
    CHECK(w->grad != NULL);
    if (w->grad) mixp_read(w->grad, grad, MIXP_F32, 4);
    for (int i = 0; i < 4; i++) CHECK_NEAR(grad[i], 1.0, 0.0);
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    CHECK_INT(mixp_autocast_current(ctx).dtype, MIXP_F32);
}

static mixp_context *open_throwing(void) {
    const int64_t shape[2] = { 2, 2 };
    mixp_context_desc d = mixp_context_desc();
    d.on_error = throws_error;
    ctx = mixp_context_new(&d);
    w = mixp_param(ctx, "w", MIXP_F32, 2, shape);
    mixp_fill(w, 0.5);
    heard = 0;
    return ctx;
}

/* One step in which the operator does what `place` says. */
static void a_bad_step(int at) {
    mixp_step_begin(ctx);
    w->grad = NULL;
    place = at;
    mixp_autocast_scope scope(ctx, MIXP_BF16);
    mixp_tensor *y = mixp_apply(ctx, &thrower, 1, &w, 1, NULL);
    mixp_tensor *loss = mixp_mean(ctx, mixp_add(ctx, mixp_mul(ctx, y, y), mixp_mul(ctx, w, w)), MIXP_ALL, 0);
    mixp_backward(ctx, loss);
}

static void test_operators_that_throw(void) {
    for (int at = IN_INFER; at < PLACES; at++)
        for (int twice = 0; twice < 2; twice++) {
            std::string said;
            int thrown = 0;
            open_throwing();
            for (int i = 0; i <= twice; i++) {
                heard = 0;
                try { a_bad_step(at); }
                catch (int number) { thrown = number; }
                catch (const std::exception &e) { said = e.what(); mixp_context_clear_error(ctx); }
            }
            if (at < CAUGHT_INSIDE) CHECK_INT(thrown, at);
            if (at == CAUGHT_INSIDE) CHECK_INT(place, WELL + 20);
            if (at == FAILS) CHECK_TEXT(said.c_str(), "thrower says so");
            CHECK_INT(heard, at == FAILS);
            a_good_step();
            mixp_context_free(ctx);
        }
}

/* An error of each kind of call, whose on_error throws: the step after it is as if nothing had been. */
static void make_error(int kind) {
    const int64_t three[2] = { 2, 3 };
    float x[6] = { 0 };
    mixp_optimizer *opt = NULL;
    mixp_checkpoint what = mixp_checkpoint();
    what.ctx = ctx;
    if (kind > 5) opt = new_sgd(ctx);
    if (kind > 5) mixp_optimizer_add(opt, w, NULL);
    mixp_step_begin(ctx);
    switch (kind) {
    case 0: mixp_linear(ctx, mixp_input(ctx, MIXP_F32, 2, three, x), w, NULL); break;
    case 1: mixp_backward(ctx, mixp_activation(ctx, MIXP_F32, 0, NULL)); break;
    case 2: mixp_read(w, x, MIXP_F32, 3); break;
    case 3: mixp_checkpoint_save("no/such/folder/file.safetensors", &what); break;
    case 4: mixp_checkpoint_load("no/such/folder/file.safetensors", &what); break;
    case 5: mixp_bce(ctx, w, mixp_activation(ctx, MIXP_F32, 2, three)); break;
    case 6: mixp_optimizer_step(opt); break;
    default: mixp_clip_grad_norm(opt, -1.0); break;
    }
}

static void test_on_error_throws(void) {
    for (int kind = 0; kind < 8; kind++)
        for (int cleared = 0; cleared < 2; cleared++) {
            int caught = 0;
            open_throwing();
            try { make_error(kind); } catch (const std::exception &) { caught = 1; }
            CHECK_INT(caught, 1);
            CHECK_INT(heard, 1);
            CHECK(mixp_context_error(ctx, NULL) != MIXP_OK);
            mixp_context_clear_error(ctx);
            a_good_step();
            CHECK_INT(heard, 1);
            mixp_context_free(ctx);
        }
}

/* From deeper on the stack than the operator was, a step cannot know that it is gone, and is refused
 * once. */
static mixp_result begin_at_depth(int depth) {
    volatile char room[4096];
    room[0] = room[4095] = (char)depth;
    mixp_result r = depth ? begin_at_depth(depth - 1) : mixp_step_begin(ctx);
    return room[0] == room[4095] ? r : MIXP_ERR_IO;
}

static void test_steps_from_deep_below(void) {
    const int64_t shape[2] = { 2, 2 };
    ctx = mixp_context_new(NULL);
    w = mixp_param(ctx, "w", MIXP_F32, 2, shape);
    mixp_fill(w, 0.5);
    for (int i = 0; i < 3; i++) {
        try { a_bad_step(IN_FORWARD); } catch (int) { }
        CHECK_INT(begin_at_depth(8), MIXP_ERR_ORDER);
        mixp_context_clear_error(ctx);
        CHECK(mixp_scale(ctx, w, 2.0f) != NULL);
        CHECK_INT(begin_at_depth(8), MIXP_OK);
        CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
        a_good_step();
    }
    mixp_context_free(ctx);
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
    RUN(test_operators_that_throw);
    RUN(test_on_error_throws);
    RUN(test_steps_from_deep_below);
    return test_report();
}
