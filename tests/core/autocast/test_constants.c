/* test_constants.c - scalar constants that a low dtype cannot hold are refused where PyTorch refuses
 * them, and an Inf that the program itself wrote is no overflow for a guard.
 * SPDX-License-Identifier: MIT OR Unlicense */
#include "mixprec.h"
#include "test.h"
#include "reference/constants.h"

static mixp_context *ctx;
static const int64_t three[1] = { 3 };

static mixp_tensor *numbers(mixp_dtype dtype) {
    static const float x[3] = { 1.0f, 2.0f, -3.0f };
    return mixp_cast(ctx, mixp_input(ctx, MIXP_F32, 1, three, x), dtype);
}

/* Are numbers drawn between a and b, or normally of mean a and deviation b, refused in x's dtype? A new
 * tensor and a tensor that is initialised agree, except that mixp_normal takes finite numbers only. */
static int refuses_to_draw(mixp_tensor *x, int normal, double a, double b) {
    const int finite = fabs(a) < HUGE_VAL && fabs(b) < HUGE_VAL;
    const mixp_tensor *y = normal ? mixp_normal(ctx, x->dtype, 1, three, (float)a, (float)b)
                                  : mixp_uniform(ctx, x->dtype, 1, three, (float)a, (float)b);
    CHECK_INT(mixp_context_error(ctx, NULL), y ? MIXP_OK : MIXP_ERR_ARGUMENT);
    mixp_context_clear_error(ctx);
    mixp_result r = normal ? mixp_init_normal(x, a, b) : mixp_init_uniform(x, a, b);
    CHECK((y == NULL) == (r != MIXP_OK) || (normal && !finite && y == NULL));
    return r == MIXP_ERR_ARGUMENT;
}

/* Is the call of one case refused? */
static int refuses(const constant_case *c) {
    static const uint8_t first[3] = { 1, 0, 0 };
    const float v = (float)c->value, inf = HUGE_VALF;
    const mixp_tensor *y = NULL;
    mixp_step_begin(ctx);
    mixp_tensor *x = numbers(c->dtype);
#define IS(text) if (strcmp(c->op, text) == 0)
    IS("masked_fill") y = mixp_masked_fill(ctx, x, mixp_input(ctx, MIXP_U8, 1, three, first), v);
    IS("pad")         y = mixp_pad(ctx, x, 0, 1, 1, v);
    IS("clamp_low")   y = v != v ? NULL : mixp_clamp(ctx, x, v, inf);
    IS("clamp_high")  y = v != v ? NULL : mixp_clamp(ctx, x, -inf, v);
    IS("full")        y = mixp_full(ctx, c->dtype, 1, three, c->value);
    IS("fill")        return mixp_fill(x, c->value) != MIXP_OK;
    IS("uniform_low") return refuses_to_draw(x, 0, c->value, 1);
    IS("uniform_high") return refuses_to_draw(x, 0, 0, c->value);
    IS("normal")      return refuses_to_draw(x, 1, c->value, 1);
    IS("normal_std")  return refuses_to_draw(x, 1, 0, c->value);
    IS("add_scalar")  y = mixp_add_scalar(ctx, x, v);
    IS("rsub")        y = mixp_rsub(ctx, x, v);
    IS("scale")       y = mixp_scale(ctx, x, v);
    IS("leaky_relu")  y = mixp_leaky_relu(ctx, x, v);
#undef IS
    mixp_result r = mixp_context_error(ctx, NULL);
    CHECK((y == NULL) == (r != MIXP_OK) || v != v);
    return r == MIXP_ERR_ARGUMENT;
}

/* Beyond PyTorch, a NaN as a bound of clamp is refused: no such call is made here. */
static void test_constants_are_refused_where_pytorch_refuses_them(void) {
    ctx = mixp_context_new(NULL);
    for (size_t i = 0; i < sizeof constant_cases / sizeof constant_cases[0]; i++) {
        const constant_case *c = &constant_cases[i];
        const int got = refuses(c);
        if (got != c->refused) {
            test_bad++;
            TEST_SHOW("%s of %s by %g: %srefused", c->op, mixp_dtype_name(c->dtype), c->value, got ? "" : "not ");
        }
        mixp_context_clear_error(ctx);
    }
    mixp_context_free(ctx);
}

static void refused(const mixp_tensor *y, const char *says) {
    const char *why = "";
    CHECK(y == NULL);
    CHECK_INT(mixp_context_error(ctx, &why), MIXP_ERR_ARGUMENT);
    CHECK_TEXT(why, says);
    mixp_context_clear_error(ctx);
}

/* Normal numbers beyond the range of a dtype become Inf: torch.normal(1e6, 1.0, (3,), dtype=torch.float16) and
 * torch.nn.init.normal_ give Inf too. */
static void test_normal_numbers_become_inf(void) {
    static const mixp_dtype dtypes[2] = { MIXP_F16, MIXP_BF16 };
    static const double means[2] = { 1e6, -3.4e38 };
    ctx = mixp_context_new(NULL);
    mixp_step_begin(ctx);
    for (int i = 0; i < 2; i++) {
        mixp_tensor *drawn = mixp_normal(ctx, dtypes[i], 1, three, (float)means[i], 1.0f), *x = numbers(dtypes[i]);
        float y[6];
        CHECK_INT(mixp_init_normal(x, means[i], 1.0), MIXP_OK);
        mixp_read(drawn, y, MIXP_F32, 3);
        mixp_read(x, y + 3, MIXP_F32, 3);
        for (int k = 0; k < 6; k++) CHECK(y[k] == (i ? -HUGE_VALF : HUGE_VALF));
    }
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    mixp_context_free(ctx);
}

/* The message names the largest number of the dtype. */
static void test_messages(void) {
    static const uint8_t first[3] = { 1, 0, 0 };
    ctx = mixp_context_new(NULL);
    mixp_step_begin(ctx);
    mixp_tensor *x = numbers(MIXP_F16);
    mixp_tensor *mask = mixp_input(ctx, MIXP_U8, 1, three, first);
    refused(mixp_masked_fill(ctx, x, mask, -1e9f),
            "masked_fill: value is -1e+09, beyond the range of f16, whose largest number is 65504; use a number in "
            "that range, or -INFINITY");
    refused(mixp_pad(ctx, x, 0, 0, 1, 1e5f), "pad: value is 100000, beyond the range of f16");
    refused(mixp_clamp(ctx, x, 0.0f, 1e9f), "clamp: high is 1e+09, beyond the range of f16, whose largest number is 65504");
    refused(mixp_clamp(ctx, x, -1e9f, 0.0f), "-INFINITY for no bound");
    refused(mixp_clamp(ctx, numbers(MIXP_BF16), 0.0f, 3.4e38f), "whose largest number is 3.38953e+38");
    refused(mixp_full(ctx, MIXP_F16, 0, NULL, 70000.0), "mixp_full: 70000 is beyond the range of f16");
    refused(mixp_full(ctx, MIXP_U8, 0, NULL, 256.0), "beyond the range of u8, whose largest number is 255");
    refused(mixp_full(ctx, MIXP_I32, 0, NULL, 3e9), "beyond the range of i32, whose largest number is 2.14748e+09");
    refused(mixp_full(ctx, MIXP_F8_E4M3, 0, NULL, 1e4), "beyond the range of f8_e4m3, whose largest number is 448");
    refused(mixp_uniform(ctx, MIXP_F16, 0, NULL, -1e6f, 0.0f), "in the range of f16");
    CHECK_INT(mixp_init_uniform(x, -1e6, 0.0), MIXP_ERR_ARGUMENT);
    refused(NULL, "mixp_init_uniform: low is -1e+06 and high is 0; both must be finite and in the range of f16");
    CHECK_INT(mixp_init_normal(x, 0.0, -1.0), MIXP_ERR_ARGUMENT);
    refused(NULL, "mixp_init_normal: std is -1; it must be at least 0");
    CHECK(mixp_full(ctx, MIXP_U8, 0, NULL, 255.0) && mixp_full(ctx, MIXP_I32, 0, NULL, -2147483648.0));
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    mixp_context_free(ctx);
}

/* What counts is the dtype of the result, which autocast chooses. */
static void test_under_autocast(void) {
    static const uint8_t first[3] = { 1, 0, 0 };
    mixp_autocast region = { MIXP_F16, 2, NULL };
    ctx = mixp_context_new(NULL);
    mixp_step_begin(ctx);
    mixp_tensor *x = numbers(MIXP_F32);
    mixp_tensor *mask = mixp_input(ctx, MIXP_U8, 1, three, first);
    MIXP_AUTOCAST(ctx, MIXP_F16) { CHECK(mixp_masked_fill(ctx, x, mask, -1e9f) != NULL); }   /* stays f32 */
    CHECK_INT(mixp_autocast_open_with(ctx, &region), 0);
    refused(mixp_masked_fill(ctx, x, mask, -1e9f), "beyond the range of f16");
    refused(mixp_clamp(ctx, x, 0.0f, 1e9f), "beyond the range of f16");
    mixp_autocast_close(ctx, 0);
    mixp_context_free(ctx);
}

/* --- an Inf that the program wrote ------------------------------------------------------------- */

enum { ROWS = 4, COLS = 5 };
typedef enum written { MASKED, CHOSEN, THEN_SCALED, THEN_RESHAPED } written;

typedef struct masks {
    mixp_scaler    *scaler;
    mixp_optimizer *opt;
    mixp_tensor    *w;
    uint8_t         hidden[ROWS * COLS];
    float           x[ROWS * COLS];
} masks;

static masks masks_open(void) {
    static const int64_t shape[2] = { COLS, COLS };
    mixp_guard_desc guard;
    mixp_optimizer_desc sgd = mixp_sgd_defaults();
    masks m;
    memset(&m, 0, sizeof m);
    memset(&guard, 0, sizeof guard);
    guard.every = 1;
    ctx = mixp_context_new(NULL);
    m.scaler = mixp_scaler_new(ctx, NULL);
    m.w = mixp_param(ctx, "w", MIXP_F32, 2, shape);
    mixp_init_uniform(m.w, 0.1, 0.5);
    sgd.lr = 1e-3;
    m.opt = mixp_optimizer_new(ctx, &sgd);
    mixp_optimizer_add(m.opt, m.w, NULL);
    for (int i = 0; i < ROWS * COLS; i++) m.x[i] = (float)(i % 7) / 4.0f;
    CHECK_INT(mixp_guard_start(ctx, &guard), MIXP_OK);
    return m;
}

/* Scores, a mask of -Inf, softmax. A row that is masked whole is NaN. */
static mixp_verdict masks_step(masks *m, written how) {
    static const int64_t shape[2] = { ROWS, COLS }, flat[2] = { 1, ROWS * COLS };
    mixp_tensor *loss = NULL, *s, *hidden;
    mixp_step_begin(ctx);
    mixp_zero_grad(m->opt);
    hidden = mixp_input(ctx, MIXP_U8, 2, shape, m->hidden);
    MIXP_AUTOCAST(ctx, MIXP_F16) {
        s = mixp_linear(ctx, mixp_input(ctx, MIXP_F32, 2, shape, m->x), m->w, NULL);
        if (how == CHOSEN) s = mixp_where(ctx, hidden, mixp_full(ctx, MIXP_F16, 0, NULL, -HUGE_VAL), s);
        else s = mixp_masked_fill(ctx, s, hidden, -HUGE_VALF);
        if (how == THEN_SCALED) s = mixp_scale(ctx, s, 0.5f);
        if (how == THEN_RESHAPED) s = mixp_reshape(ctx, mixp_reshape(ctx, s, 2, flat), 2, shape);
        s = mixp_linear(ctx, mixp_softmax(ctx, s), m->w, NULL);
        loss = mixp_mean(ctx, mixp_square(ctx, s), MIXP_ALL, 0);
    }
    mixp_backward(ctx, mixp_scaler_scale(m->scaler, loss));
    mixp_scaler_step(m->scaler, m->opt);
    mixp_scaler_update(m->scaler);
    return mixp_scaler_verdict(m->scaler);
}

/* Events of this kind. */
static int events(mixp_event_kind kind) {
    mixp_event e;
    int i, n = 0;
    for (i = 0; mixp_guard_event(ctx, i, &e); i++) n += e.kind == kind;
    return n;
}

/* The verdict names softmax, where the NaN begins, and no site falls back: f32 would not help. */
static void test_a_masked_row_is_no_overflow(void) {
    for (int how = MASKED; how <= THEN_RESHAPED; how++) {
        masks m = masks_open();
        const char *why = "";
        for (int i = 0; i < ROWS * COLS; i++) m.hidden[i] = i % COLS > i / COLS;
        for (int i = 0; i < 3; i++) CHECK_INT(masks_step(&m, (written)how).outcome, MIXP_STEP_APPLIED);
        memset(m.hidden, 1, COLS);
        mixp_verdict v = masks_step(&m, (written)how);
        CHECK_INT(v.outcome, MIXP_STEP_SKIPPED);
        CHECK_INT(v.origin, MIXP_ORIGIN_MASK);
        CHECK_TEXT(v.site, "softmax");
        for (int i = 0; i < 60 && !mixp_context_error(ctx, NULL); i++) masks_step(&m, (written)how);
        CHECK_INT(mixp_context_error(ctx, &why), MIXP_ERR_DIVERGED);
        CHECK_TEXT(why, "softmax': an operator read an Inf that the program wrote");
        CHECK_INT(events(MIXP_EVENT_OVERFLOW), 0);
        mixp_context_free(ctx);
    }
}

/* Scores that overflow are still an overflow, though a mask of -Inf lies between them and the loss. */
static void test_an_overflow_before_a_mask(void) {
    for (int how = MASKED; how <= THEN_RESHAPED; how++) {
        masks m = masks_open();
        for (int i = 0; i < ROWS * COLS; i++) m.hidden[i] = i % COLS > i / COLS;
        for (int i = 0; i < 3; i++) CHECK_INT(masks_step(&m, (written)how).outcome, MIXP_STEP_APPLIED);
        for (int i = 0; i < ROWS * COLS; i++) m.x[i] *= 60000.0f;
        mixp_verdict v = masks_step(&m, (written)how);
        CHECK_INT(v.origin, MIXP_ORIGIN_FORWARD);
        CHECK_TEXT(v.site, "linear");
        for (int i = 0; i < 20 && v.outcome != MIXP_STEP_APPLIED; i++) v = masks_step(&m, (written)how);
        CHECK_INT(v.outcome, MIXP_STEP_APPLIED);
        CHECK(events(MIXP_EVENT_OVERFLOW) > 0);
        mixp_context_free(ctx);
    }
}

/* A finite mask near the end of the range is a number of the program's: no site falls back for it. */
static void test_a_finite_mask_is_not_high(void) {
    static const int64_t shape[2] = { ROWS, COLS };
    masks m = masks_open();
    mixp_tensor *loss = NULL, *s;
    for (int i = 0; i < ROWS * COLS; i++) m.hidden[i] = i % COLS > i / COLS;
    for (int i = 0; i < 8; i++) {
        mixp_step_begin(ctx);
        mixp_zero_grad(m.opt);
        MIXP_AUTOCAST(ctx, MIXP_F16) {
            s = mixp_linear(ctx, mixp_input(ctx, MIXP_F32, 2, shape, m.x), m.w, NULL);
            s = mixp_masked_fill(ctx, s, mixp_input(ctx, MIXP_U8, 2, shape, m.hidden), -65000.0f);
            loss = mixp_mean(ctx, mixp_square(ctx, mixp_softmax(ctx, s)), MIXP_ALL, 0);
        }
        mixp_backward(ctx, mixp_scaler_scale(m.scaler, loss));
        mixp_scaler_step(m.scaler, m.opt);
        mixp_scaler_update(m.scaler);
    }
    CHECK_INT(events(MIXP_EVENT_HIGH), 0);
    CHECK_INT(events(MIXP_EVENT_OVERFLOW), 0);
    mixp_context_free(ctx);
}

int main(void) {
    RUN(test_constants_are_refused_where_pytorch_refuses_them);
    RUN(test_normal_numbers_become_inf);
    RUN(test_messages);
    RUN(test_under_autocast);
    RUN(test_a_masked_row_is_no_overflow);
    RUN(test_an_overflow_before_a_mask);
    RUN(test_a_finite_mask_is_not_high);
    return test_report();
}
