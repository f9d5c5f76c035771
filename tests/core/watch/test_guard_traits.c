/* test_guard_traits.c - what the guard knows of each built-in operator (src/watch/traits.c), beside what the
 * operator does: every operator of the table is applied.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "internals.h"
#include "test.h"
#include "operators.h"

enum { ROWS = 32, COLS = 8, N = ROWS * COLS };

static mixp_context *c;

static const int64_t shape[2] = { ROWS, COLS };

static mixp_tensor *array(mixp_dtype dtype, const float *x) {
    mixp_tensor *t = mixp_input(c, MIXP_F32, 2, shape, x);
    return dtype == MIXP_F32 ? t : mixp_cast(c, t, dtype);
}
static mixp_tensor *all(mixp_dtype dtype, double value) { return mixp_full(c, dtype, 2, shape, value); }

static int traits(mixp_op_id id) { return mixpi_traits_of(mixp_op_builtin(id)); }

/* The traits of a row's letters. */
static int traits_of_letters(const char *letters) {
    static const struct { char letter; int trait; } known[] = {
        { 'C', MIXPI_CUTS }, { 'R', MIXPI_ROUNDS }, { 'M', MIXPI_MAY_MEAN }, { 'S', MIXPI_SHRINKS },
        { 'D', MIXPI_IS_DROPOUT }, { 'A', MIXPI_SCORES }
    };
    int is = 0;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (strchr(letters, known[i].letter)) is |= known[i].trait;
    return is;
}

static void wrong(mixp_op_id id, const char *why) {
    test_bad++;
    TEST_SHOW("'%s' %s; its traits are %d", op_name(id), why, traits(id));
}

/* The operator of a row on x, beside operands that are all y. k: its number. */
static mixp_tensor *applied(const op_row *r, mixp_tensor *x, double y, float k) {
    static const int64_t square[2] = { COLS, COLS }, row[1] = { COLS };
    int32_t ids[N];
    uint8_t mask[N];
    op_in   o;
    for (int i = 0; i < N; i++) ids[i] = i % COLS, mask[i] = 1;
    memset(&o, 0, sizeof o);
    o.c = c;
    o.x = x;
    o.y = o.z = all(x->dtype, y);
    o.w = mixp_full(c, x->dtype, 2, square, y);
    o.v = mixp_full(c, x->dtype, 1, row, y);
    o.u = mixp_full(c, x->dtype, 1, row, 0.0);
    o.i = o.j = mixp_input(c, MIXP_I32, 1, row, ids);
    o.a = mixp_input(c, MIXP_I32, 2, shape, ids);
    o.m = mixp_input(c, MIXP_U8, 2, shape, mask);
    o.k = k;
    return r->run(&o);
}

static int is_judged(const op_row *r) { return !strchr(r->traits, 'O'); }

/* The library has the traits of the list. */
static void the_list_has_its_traits(void) {
    /* The library recognises cast by the address of its row. This program compiles a second such row, so cast is left
     * out. */
    for (int i = 0; i < MIXP_OP_COUNT; i++)
        if (i != MIXP_OP_CAST && traits((mixp_op_id)i) != traits_of_letters(op_row_of((mixp_op_id)i)->traits))
            wrong((mixp_op_id)i, "has other traits in src/watch/traits.c than in tests/support/operators.h");
}

static int any_bad(const mixp_tensor *t) {
    static double v[2 * N];
    if (!t || t->count > 2 * N || mixp_read(t, v, MIXP_F64, t->count) != MIXP_OK) return 0;
    for (int64_t i = 0; i < t->count; i++)
        if (!(fabs(v[i]) < HUGE_VAL)) return 1;
    return 0;
}

/* A loss whose gradient at y is 0 only where y is. */
static mixp_tensor *cubes(mixp_tensor *y) { return mixp_sum(c, mixp_mul(c, y, mixp_mul(c, y, y)), MIXP_ALL, 0); }

/* How many of t's numbers are 0. */
static int64_t zeros(const mixp_tensor *t) {
    static double v[2 * N];
    int64_t n = 0;
    if (!t || t->count > 2 * N || mixp_read(t, v, MIXP_F64, t->count) != MIXP_OK) return 0;
    for (int64_t i = 0; i < t->count; i++) n += v[i] == 0;
    return n;
}

/* What an operator does in f32 to numbers that are not 0: ALL or SOME results or gradients are 0. */
enum { NONE, SOME, ALL };
static int cuts(const op_row *r, double value, double y) {
    const int one_is_top = r->id == MIXP_OP_SOFTMAX || r->id == MIXP_OP_LOG_SOFTMAX;
    float v[N];
    int found = NONE;
    mixp_step_begin(c);
    for (int i = 0; i < N; i++) v[i] = (float)(value * (1.0 + 0.01 * (i % COLS)));
    for (int i = 0; i < N && one_is_top; i++) v[i] *= i % COLS ? -1.0f : 1.0f;
    mixp_tensor *x = mixp_input(c, MIXP_F32, 2, shape, v);
    mixp_tensor_set_requires_grad(x, 1);
    mixp_tensor *result = applied(r, x, r->id == MIXP_OP_PRELU ? 0.0 : y, r->k < -1.0f ? 0.0f : r->k);
    CHECK(result != NULL);
    if (zeros(result)) found = zeros(result) == result->count ? ALL : SOME;
    if (any_bad(result) || mixp_backward(c, cubes(result)) != MIXP_OK || !zeros(x->grad)) return found;
    return zeros(x->grad) == x->grad->count ? ALL : found ? found : SOME;
}

/* The trait means that zeros are no sign of underflow. So it is there where all is cut, and only where something is. */
static void what_cuts_says_so(void) {
    static const double values[5] = { 200.0, -200.0, 1.25, -1.25, 1.5 };
    c = mixp_context_new(NULL);
    for (int i = 0; i < MIXP_OP_COUNT; i++) {
        const op_row *r = op_row_of((mixp_op_id)i);
        int most = NONE;
        for (int k = 0; k < 5 && is_judged(r); k++) {
            const int found = cuts(r, values[k], 1.5);
            most = found > most ? found : most;
        }
        if (!is_judged(r)) continue;
        if (most == ALL && !(traits(r->id) & MIXPI_CUTS)) wrong(r->id, "makes zeros");
        if (most == NONE && traits(r->id) & MIXPI_CUTS) wrong(r->id, "makes no zeros");
    }
    CHECK_INT(mixp_context_error(c, NULL), MIXP_OK);
    mixp_context_free(c);
}

/* Inf and NaN of small numbers, in f32: f32 would not help. Only such an operator has a trait of these; and one that
 * shrinks makes numbers that f16 holds of all others that f16 holds. */
static void what_makes_inf_says_so(void) {
    static const double values[] = { 0.0, -1.0, -2.0, 1.0, 6e-8, 1e-4, -1e-4, 65504.0, -65504.0, 0.5, -0.5, 0.9, -0.9, 1.6 };
    c = mixp_context_new(NULL);
    for (int i = 0; i < MIXP_OP_COUNT; i++) {
        const op_row *r = op_row_of((mixp_op_id)i);
        int bad = 0, large = 0;
        for (size_t k = 0; k < sizeof values / sizeof *values && is_judged(r); k++) {
            mixp_step_begin(c);
            mixp_tensor *y = applied(r, all(MIXP_F32, values[k]), -1.5, r->k);
            if (k < 4) bad |= any_bad(y);
            if (!any_bad(y)) large |= any_bad(mixp_cast(c, y, MIXP_F16));
        }
        if (!is_judged(r)) continue;
        /* A border and a number may be Inf. */
        if (r->id == MIXP_OP_ADD_SCALAR || r->id == MIXP_OP_RSUB || r->id == MIXP_OP_WHERE)
            bad |= any_bad(applied(r, all(MIXP_F32, 1.0), -HUGE_VAL, -(float)HUGE_VAL));
        if (bad && !(traits(r->id) & (MIXPI_MAY_MEAN | MIXPI_SHRINKS))) wrong(r->id, "makes Inf or NaN");
        if (!bad && traits(r->id) & (MIXPI_MAY_MEAN | MIXPI_SHRINKS)) wrong(r->id, "makes no Inf and no NaN");
        if (large && traits(r->id) & MIXPI_SHRINKS) wrong(r->id, "makes large numbers");
    }
    CHECK_INT(mixp_context_error(c, NULL), MIXP_OK);
    mixp_context_free(c);
}

/* Inputs that f16 holds, and a result whose variation it does not hold: an event names the operator. */
static double input_of(mixp_op_id id, int i) {
    const int k = i / COLS;
    switch ((int)id) {
    case MIXP_OP_ADD: case MIXP_OP_SUB: case MIXP_OP_ADD_SCALAR: case MIXP_OP_RSUB:
    case MIXP_OP_SCATTER_ADD: case MIXP_OP_INDEX_ADD:
        return (double)(k % 8) / 8;
    case MIXP_OP_MEAN:  return 2023.0 + (double)(k * 5 % 8 > (i % COLS) % 5);
    case MIXP_OP_PRELU: return -1.25 - (double)(k % 2) / 1024;
    case MIXP_OP_SWIGLU_PACKED:
        return i % COLS < COLS / 2 ? 1.0 : 1.25 + (double)(k % 2) / 1024;  /* gates first */
    default: return 1.25 + (double)(k % 2) / 1024;
    }
}
static float offset_of(mixp_op_id id) { return input_of(id, COLS) < 1.0 && id != MIXP_OP_PRELU ? 2023.0f : 0.7001953125f; }
static int imprecise_events(const char *op) {
    mixp_event e;
    size_t n = strlen(op);
    int i, found = 0;
    for (i = 0; mixp_guard_event(c, i, &e); i++) {
        const size_t length = strlen(e.site);
        if (e.kind != MIXP_EVENT_IMPRECISE || length < n) continue;
        found += strcmp(e.site + length - n, op) == 0;
    }
    return found;
}
static void what_rounds_is_measured(void) {
    static const int64_t one[2] = { 1, 1 };
    for (int id = 0; id < MIXP_OP_COUNT; id++) {
        const op_row *r = op_row_of((mixp_op_id)id);
        float v[N];
        if (!is_judged(r) || !(traits(r->id) & MIXPI_ROUNDS)) continue;
        c = mixp_context_new(NULL);
        mixp_optimizer *opt = mixp_optimizer_new(c, NULL);
        mixp_tensor *p = mixp_param(c, "p", MIXP_F32, 2, one);
        mixp_fill(p, 1.0);
        mixp_optimizer_add(opt, p, NULL);
        for (int i = 0; i < N; i++) v[i] = (float)input_of(r->id, i);
        CHECK_INT(mixp_guard_start(c, NULL), MIXP_OK);
        for (int i = 0; i < 3; i++) {
            mixp_step_begin(c);
            MIXP_AUTOCAST(c, MIXP_F16) {
                mixp_tensor *y = applied(r, array(MIXP_F16, v), (double)offset_of(r->id), offset_of(r->id));
                mixp_backward(c, mixp_sum(c, mixp_mul(c, mixp_cast(c, y, MIXP_F32), p), MIXP_ALL, 0));
            }
            mixp_optimizer_step(opt);
        }
        if (!imprecise_events(op_name(r->id))) wrong(r->id, "rounds, and no event says so");
        CHECK_INT(mixp_context_error(c, NULL), MIXP_OK);
        mixp_context_free(c);
    }
}

/* A border of -Inf, as before a maximum, is no overflow. */
static void a_border_of_inf_is_no_event(void) {
    static const int64_t square[2] = { COLS, COLS };
    mixp_tensor *w, *loss = NULL;
    mixp_scaler_desc rule;
    mixp_event e;
    char text[512];
    c = mixp_context_new(NULL);
    w = mixp_param(c, "w", MIXP_F32, 2, square);
    mixp_init_normal(w, 0, 0.5);
    mixp_optimizer *opt = mixp_optimizer_new(c, NULL);
    memset(&rule, 0, sizeof rule);
    rule.init_scale = 256.0f;
    mixp_scaler *scaler = mixp_scaler_new(c, &rule);
    mixp_optimizer_add(opt, w, NULL);
    CHECK_INT(mixp_guard_start(c, NULL), MIXP_OK);
    for (int step = 0; step < 40; step++) {
        mixp_step_begin(c);
        mixp_zero_grad(opt);
        MIXP_AUTOCAST(c, MIXP_F16) {
            mixp_tensor *y = mixp_linear(c, all(MIXP_F32, 0.5 + 0.01 * step), w, NULL);
            y = mixp_add_scalar(c, mixp_pad(c, y, 1, 1, 1, -(float)INFINITY), 1.0f);
            loss = mixp_mean(c, mixp_max(c, y, 1, 0), MIXP_ALL, 0);
        }
        mixp_backward(c, mixp_scaler_scale(scaler, loss));
        mixp_scaler_step(scaler, opt);
        mixp_scaler_update(scaler);
    }
    CHECK_INT(mixp_optimizer_verdict(opt).applied, 40);
    CHECK_INT(mixp_guard_event(c, 0, &e), 0);
    if (mixp_guard_event(c, 0, &e)) TEST_SHOW("%s", mixp_event_text(&e, text, sizeof text));
    CHECK_INT(mixp_context_error(c, NULL), MIXP_OK);
    mixp_context_free(c);
}

int main(void) {
    RUN(the_list_has_its_traits);
    RUN(what_cuts_says_so);
    RUN(what_makes_inf_says_so);
    RUN(what_rounds_is_measured);
    RUN(a_border_of_inf_is_no_event);
    return test_report();
}
