/* test_functions.c - the operators that a plain GPT does not use: maximum, swiglu, rope, max,
 * gather, where, products that broadcast, more losses, initialisers. They are compared with
 * numbers recorded from PyTorch, finite differences and double loops; the bits are the same on
 * every instruction set and thread count.
 * SPDX-License-Identifier: MIT OR Unlicense */
#include "mixprec.h"
#include "examples/ops.h"
#include "test.h"
#include "shared_work.h"
#include "against_torch.h"
#include "reference/functions.h"

static const mixp_dtype reals[3] = { MIXP_F32, MIXP_F16, MIXP_BF16 };

/* --- against PyTorch ---------------------------------------------------------------------- */

static mixp_tensor *rope(mixp_context *ctx, mixp_tensor *x, int head_dim, int first,
                         int interleaved) {
    mixp_rope_desc d;
    memset(&d, 0, sizeof d);
    d.head_dim = head_dim;
    d.first = first;
    d.interleaved = interleaved;
    return mixp_rope(ctx, x, &d);
}

static mixp_tensor *apply(mixp_context *c, const char *name, mixp_tensor *const *t) {
    const int64_t two_by_five[2] = { 2, 5 };
    static const float zeros[10];
#define IS(text) if (!strcmp(name, text))
    IS("maximum")                     return mixp_maximum(c, t[0], t[1]);
    IS("minimum")                     return mixp_minimum(c, t[0], t[1]);
    IS("maximum_of_equals")           return mixp_maximum(c, t[0], mixp_scale(c, t[0], 1.0f));
    IS("swiglu")                      return mixp_swiglu(c, t[0], t[1]);
    IS("swiglu_broadcast")            return mixp_swiglu(c, t[0], t[1]);
    IS("swiglu_packed")               return mixp_swiglu_packed(c, t[0]);
    IS("neg")                         return mixp_neg(c, t[0]);
    IS("abs")                         return mixp_abs(c, t[0]);
    IS("sin")                         return mixp_sin(c, t[0]);
    IS("cos")                         return mixp_cos(c, t[0]);
    IS("clamp")                       return mixp_clamp(c, t[0], -0.5f, 0.75f);
    IS("relu_squared")                return mixp_relu_squared(c, t[0]);
    IS("soft_cap")                    return mixp_soft_cap(c, t[0], 1.5f);
    IS("l1")                          return mixp_l1(c, t[0], t[1]);
    IS("smooth_l1")                   return mixp_smooth_l1(c, t[0], t[1], 0.5f);
    IS("huber")                       return mixp_huber(c, t[0], t[1], 0.75f);
    IS("kl_div")                      return mixp_kl_div(c, t[0], t[1], 0);
    IS("kl_div_log")                  return mixp_kl_div(c, t[0], t[1], 1);
    IS("max_0")                       return mixp_max(c, t[0], 0, 0);
    IS("max_last")                    return mixp_max(c, t[0], -1, 1);
    IS("max_middle")                  return mixp_max(c, t[0], 1, 0);
    IS("max_all")                     return mixp_max(c, t[0], MIXP_ALL, 0);
    IS("max_of_equals") {
        mixp_tensor *zero = mixp_cast(c, mixp_input(c, MIXP_F32, 2, two_by_five, zeros), t[0]->dtype);
        return mixp_max(c, mixp_add(c, t[0], zero), MIXP_ALL, 0);
    }
    IS("gather_0")                    return mixp_gather(c, t[0], 0, t[1]);
    IS("gather_1")                    return mixp_gather(c, t[0], 1, t[1]);
    IS("gather_one")                  return mixp_gather(c, t[0], -1, t[1]);
    IS("where")                       return mixp_where(c, t[0], t[1], t[2]);
    IS("where_column")                return mixp_where(c, t[0], t[1], t[2]);
    IS("masked_fill")                 return mixp_masked_fill(c, t[0], t[1], -2.5f);
    IS("rope")                        return rope(c, t[0], 4, 0, 0);
    IS("rope_interleaved")            return rope(c, t[0], 8, 7, 1);
    IS("cross_entropy_smooth")
        return mixp_cross_entropy_smooth(c, t[0], t[1], MIXP_IGNORE, 0.125f);
    IS("cross_entropy_smooth_ignore")
        return mixp_cross_entropy_smooth(c, t[0], t[1], MIXP_IGNORE, 0.25f);
    if (!strncmp(name, "matmul", 6))  return mixp_matmul(c, t[0], t[1], 0, 0);
#undef IS
    return NULL;
}

/* The largest |got - want| / max(1, |want|). */
static double far_off(const mixp_tensor *t, const double *want) {
    double got[MAX_VALUES], most = 0.0;
    if (!t || mixp_read(t, got, MIXP_F64, t->count) != MIXP_OK) return HUGE_VAL;
    for (int64_t i = 0; i < t->count; i++) {
        double off = fabs(got[i] - want[i]) / (fabs(want[i]) > 1.0 ? fabs(want[i]) : 1.0);
        if (!(off <= most)) most = off;
    }
    return most;
}

/* At most 1.1 times as far from the truth as PyTorch, or, where that was lucky, a unit in the last
 * place of f32, half of one of f16 and bf16; the recorded numbers have nine digits. */
static void not_worse(const function_case *k, mixp_dtype dtype, const char *what, double off,
                      double torch) {
    double rounding = dtype == MIXP_F16 ? 1.0 / 2048 : dtype == MIXP_BF16 ? 1.0 / 256 : 1.0 / 8388608;
    double most = 1.1 * torch > rounding ? 1.1 * torch : rounding;
    if (off <= most + 1e-9) return;
    test_bad++;
    TEST_SHOW("%s in %s: %s is %.3g off, PyTorch's %.3g", k->name, mixp_dtype_name(dtype), what, off,
              torch);
}

/* Returns how many recorded values the case has. */
static int against_torch(mixp_context *ctx, int index, int d, const double *want) {
    const function_case *k = &function_cases[index];
    uint32_t gen = gen_start(400u + (uint32_t)index);
    float v[MAX_VALUES];
    double off = 0.0;
    inputs in;
    int i, used = k->count;
    memset(&in, 0, sizeof in);
    mixp_step_begin(ctx);
    for (const char *text = k->inputs; *text; text += *text == ' ')
        text = make_input(ctx, text, &gen, reals[d], &in);
    gen_short(&gen, v, k->count);
    mixp_tensor *y = apply(ctx, k->name, in.t);
    CHECK(y && y->count == k->count);
    if (!y || y->count != k->count) return used;
    not_worse(k, reals[d], "the result", far_off(y, want), k->off[d][0]);
    mixp_tensor *dy = mixp_input(ctx, MIXP_F32, y->rank, y->shape, v);
    CHECK_INT(mixp_backward(ctx, mixp_sum(ctx, mixp_mul(ctx, y, dy), MIXP_ALL, 0)), MIXP_OK);
    for (i = 0; i < in.n; i++) {
        if (!in.has_grad[i]) continue;
        double here = far_off(in.t[i]->grad, want + used);
        if (here > off) off = here;
        used += (int)in.t[i]->count;
    }
    not_worse(k, reals[d], "a gradient", off, k->off[d][1]);
    return used;
}

static void test_against_torch(void) {
    int isa, d, i, at;
    for (isa = 0; isa < MIXP_ISA_COUNT; isa++) {
        const mixp_device *device = mixp_cpu_with((mixp_isa)isa);
        for (d = 0; device && d < 3; d++) {
            mixp_context *ctx = context_on(device, 1);
            const char *why = "";
            for (i = at = 0; i < FUNCTION_CASES; i++)
                at += against_torch(ctx, i, d, function_values + at);
            CHECK_INT(at, sizeof function_values / sizeof *function_values);
            if (mixp_context_error(ctx, &why) != MIXP_OK) { test_bad++; TEST_SHOW("%s", why); }
            mixp_context_free(ctx);
        }
    }
}

/* --- finite differences -------------------------------------------------------------------- */

static mixp_context *ctx;
static mixp_tensor *p[3];

static mixp_tensor *param(int rank, int64_t a, int64_t b, int64_t c, int64_t d) {
    int64_t shape[4];
    shape[0] = a;
    shape[1] = b;
    shape[2] = c;
    shape[3] = d;
    mixp_tensor *t = mixp_param(ctx, NULL, MIXP_F32, rank, shape);
    mixp_init_uniform(t, -1.0, 1.0);
    return t;
}

static mixp_tensor *numbers(mixp_context *c, int rank, const int64_t *shape) {
    static float v[4096];
    for (int i = 0; i < 4096; i++) v[i] = 0.25f + 0.5f * (float)((i * 37 + 11) % 19) / 19.0f;
    return mixp_input(c, MIXP_F32, rank, shape, v);
}

/* A weighted sum, so that every element of x has a gradient of its own. */
static mixp_tensor *weigh(mixp_context *c, mixp_tensor *x) {
    if (!x) return NULL;
    return mixp_sum(c, mixp_mul(c, x, numbers(c, x->rank, x->shape)), MIXP_ALL, 0);
}

static mixp_tensor *ints(mixp_context *c, mixp_dtype dtype, int64_t rows, int64_t cols, int below) {
    int64_t shape[2];
    int32_t v[64];
    uint8_t u[64];
    shape[0] = rows;
    shape[1] = cols;
    for (int i = 0; i < 64; i++) {
        v[i] = (i * 7 + 3) % 11 % below;
        u[i] = (uint8_t)v[i];
    }
    return mixp_input(c, dtype, 2, shape, dtype == MIXP_U8 ? (const void *)u : (const void *)v);
}

static mixp_tensor *rope_scaled(mixp_context *c, mixp_tensor *x, int head_dim) {
    static const double frequencies[129] = { 1.5, 0.25, 0.125 };
    mixp_rope_desc d;
    memset(&d, 0, sizeof d);
    d.head_dim = head_dim;
    d.first = 2;
    d.frequencies = frequencies;
    d.scale = 0.75;
    return mixp_rope(c, x, &d);
}
static mixp_tensor *product_weighed(mixp_context *c, void *user) {
    (void)user;
    return weigh(c, mixp_matmul(c, p[0], p[1], 0, 0));
}

/* The tolerance covers f32 rounding over a step of 1e-2. */
static void check(const char *name) {
    double worst = 1e9;
    mixp_result r = mixp_check_gradients(ctx, product_weighed, NULL, 2, p, 1e-2, &worst);
    const char *why = "";
    mixp_context_error(ctx, &why);
    if (r != MIXP_OK || !(worst < 2e-3)) {
        test_bad++;
        TEST_SHOW("%s: result %d, worst %.3g, %s", name, (int)r, worst, why);
    }
    mixp_context_clear_error(ctx);
}

/* Products of vectors; of matrices: test_products. Other operators: test_every_operator.c. */
static void test_gradients(void) {
    p[0] = param(4, 2, 1, 3, 4);
    p[1] = param(1, 4, 1, 1, 1);
    check("matmul by a vector");
    p[0] = param(1, 4, 1, 1, 1);
    check("matmul of vectors");
    p[1] = param(3, 3, 4, 2, 1);
    check("matmul of a vector");
}

/* --- products ------------------------------------------------------------------------------- */

/* Sizes of leading dimension i, of `rank`, and how far a step along it goes: 0 where it repeats. */
static int64_t lead(const mixp_tensor *t, int rank, int i, int64_t *step) {
    int own = i - (rank - (t->rank - 2)), k;
    *step = 1;
    if (own < 0) return *step = 0, 1;
    for (k = own + 1; k < t->rank; k++) *step *= t->shape[k];
    if (t->shape[own] == 1) *step = 0;
    return t->shape[own];
}

/* y = a b by loops in double, and the gradients of sum(y dy). */
static void product_by_loops(const mixp_tensor *a, const mixp_tensor *b, const double *va,
                             const double *vb, const double *dy, int rank, double *y, double *da,
                             double *db) {
    int64_t m = a->shape[a->rank - 2], k = a->shape[a->rank - 1], n = b->shape[b->rank - 1];
    int64_t batches = 1, batch, i, j, l;
    int axis;
    for (axis = 0; axis < rank; axis++) {
        int64_t s, na = lead(a, rank, axis, &s), nb = lead(b, rank, axis, &s);
        batches *= na > nb ? na : nb;
    }
    for (batch = 0; batch < batches; batch++) {
        int64_t at_a = 0, at_b = 0, rest = batch;
        for (axis = rank - 1; axis >= 0; axis--) {
            int64_t sa, sb, na = lead(a, rank, axis, &sa), nb = lead(b, rank, axis, &sb);
            int64_t size = na > nb ? na : nb;
            at_a += rest % size * sa;
            at_b += rest % size * sb;
            rest /= size;
        }
        for (i = 0; i < m; i++) for (j = 0; j < n; j++) {
            int64_t at = (batch * m + i) * n + j;
            y[at] = 0.0;
            for (l = 0; l < k; l++) {
                y[at] += va[at_a + i * k + l] * vb[at_b + l * n + j];
                da[at_a + i * k + l] += dy[at] * vb[at_b + l * n + j];
                db[at_b + l * n + j] += dy[at] * va[at_a + i * k + l];
            }
        }
    }
}

/* Values that are exact in every dtype, whose products and sums are exact in f32. */
static void exact_values(mixp_tensor *t, double *v, int seed) {
    float f[4096];
    for (int64_t i = 0; i < t->count; i++) v[i] = f[i] = (float)((i * 13 + seed) % 9 - 4) / 4.0f;
    mixp_write(t, f, MIXP_F32, t->count);
}

static void close_to(const char *what, const mixp_tensor *t, const double *want, double most) {
    static double got[4096];
    CHECK(t != NULL);
    if (!t || mixp_read(t, got, MIXP_F64, t->count) != MIXP_OK) return;
    for (int64_t i = 0; i < t->count; i++) {
        if (fabs(got[i] - want[i]) <= most * (fabs(want[i]) > 1.0 ? fabs(want[i]) : 1.0)) continue;
        test_bad++;
        TEST_SHOW("%s[%d] is %.9g, not %.9g", what, (int)i, got[i], want[i]);
        return;
    }
}

static void product_case(mixp_dtype dtype, int ra, const int64_t *sa, int rb, const int64_t *sb) {
    static double va[4096], vb[4096], dy[4096], y[4096], da[4096], db[4096];
    mixp_tensor *a = mixp_param(ctx, NULL, dtype, ra, sa), *b = mixp_param(ctx, NULL, dtype, rb, sb);
    /* rounded once, the gradients' sums too */
    double most = dtype == MIXP_F32 ? 0.0 : dtype == MIXP_F16 ? 1.0 / 2048 : 1.0 / 256;
    int leads = (ra > rb ? ra : rb) - 2;
    exact_values(a, va, 3);
    exact_values(b, vb, 5);
    memset(da, 0, sizeof da);
    memset(db, 0, sizeof db);
    mixp_step_begin(ctx);
    mixp_tensor *out = mixp_matmul(ctx, a, b, 0, 0);
    CHECK(out && out->rank == leads + 2);
    if (!out) return;
    mixp_tensor *weight = mixp_activation(ctx, MIXP_F32, out->rank, out->shape);
    exact_values(weight, dy, 1);
    product_by_loops(a, b, va, vb, dy, leads, y, da, db);
    close_to("product", out, y, most);
    CHECK_INT(mixp_backward(ctx, mixp_sum(ctx, mixp_mul(ctx, out, weight), MIXP_ALL, 0)), MIXP_OK);
    close_to("da", a->grad, da, most);
    close_to("db", b->grad, db, most);
}

static void test_products(void) {
    static const struct { int ra; int64_t a[5]; int rb; int64_t b[5]; } cases[] = {
        { 2, { 3, 4 }, 2, { 4, 5 } },             { 4, { 2, 3, 4, 5 }, 2, { 5, 3 } },
        { 2, { 4, 5 }, 4, { 2, 3, 5, 3 } },       { 4, { 2, 3, 4, 5 }, 3, { 3, 5, 2 } },
        { 3, { 3, 4, 5 }, 4, { 2, 3, 5, 2 } },    { 4, { 2, 1, 3, 4 }, 4, { 1, 3, 4, 2 } },
        { 5, { 2, 1, 3, 2, 4 }, 4, { 2, 1, 4, 3 } }, { 3, { 1, 3, 4 }, 3, { 6, 4, 2 } },
        { 5, { 2, 3, 1, 2, 4 }, 5, { 1, 3, 2, 4, 3 } }, { 3, { 1, 3, 4 }, 3, { 1, 4, 2 } },
        { 4, { 2, 3, 4, 5 }, 4, { 2, 3, 5, 3 } }
    };
    for (int d = 0; d < 3; d++)
        for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
            product_case(reals[d], cases[i].ra, cases[i].a, cases[i].rb, cases[i].b);
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
}

/* --- what ties, ids and masks do -------------------------------------------------------------- */

static void gradient_is(mixp_tensor *x, mixp_tensor *y, const float *dy, const float *want) {
    float got[64];
    CHECK(y != NULL);
    if (!y) return;
    y = mixp_mul(ctx, y, mixp_input(ctx, MIXP_F32, y->rank, y->shape, dy));
    CHECK_INT(mixp_backward(ctx, mixp_sum(ctx, y, MIXP_ALL, 0)), MIXP_OK);
    CHECK_INT(mixp_read(x->grad, got, MIXP_F32, x->count), MIXP_OK);
    for (int64_t i = 0; i < x->count; i++) CHECK_NEAR(got[i], want[i], 0.0);
    mixp_context_clear_error(ctx);
}

static mixp_tensor *matrix(const float *v, int64_t rows, int64_t cols) {
    mixp_tensor *t = param(2, rows, cols, 1, 1);
    mixp_write(t, v, MIXP_F32, rows * cols);
    mixp_step_begin(ctx);
    return t;
}

/* A dimension's gradient goes to the first; that of the whole array is shared. */
static void test_ties(void) {
    const float nan = mixp_f32_of_bits(0x7FC00000u);
    const float v[8] = { 3, 5, 5, 1, 5, 2, 5, 5 }, dy[4] = { 4, 8, 16, 32 };
    const float first[8] = { 0, 4, 0, 0, 8, 0, 0, 0 }, down[8] = { 0, 8, 16, 0, 4, 0, 0, 32 };
    const float shared[8] = { 0, 0.8f, 0.8f, 0, 0.8f, 0, 0.8f, 0.8f };
    const float bad[4] = { 1, nan, 7, nan };
    int32_t at[4];
    float most = 0.0f;
    mixp_tensor *x = matrix(v, 2, 4);
    gradient_is(x, mixp_max(ctx, x, 1, 0), dy, first);
    x = matrix(v, 2, 4);
    gradient_is(x, mixp_max(ctx, x, -2, 1), dy, down);
    x = matrix(v, 2, 4);
    gradient_is(x, mixp_max(ctx, x, MIXP_ALL, 0), dy, shared);
    x = matrix(v, 2, 4);
    CHECK_INT(mixp_read(mixp_argmax(ctx, x, 0, 0), at, MIXP_I32, 4), MIXP_OK);
    CHECK(at[0] == 1 && at[1] == 0 && at[2] == 0 && at[3] == 1);
    CHECK_INT(mixp_read(mixp_argmax(ctx, x, 1, 1), at, MIXP_I32, 2), MIXP_OK);
    CHECK(at[0] == 1 && at[1] == 0);
    CHECK_INT(mixp_read(mixp_argmax(ctx, x, MIXP_ALL, 0), at, MIXP_I32, 1), MIXP_OK);
    CHECK(at[0] == 1);
    x = matrix(bad, 1, 4);
    CHECK_INT(mixp_read(mixp_argmax(ctx, x, 1, 0), at, MIXP_I32, 1), MIXP_OK);
    CHECK(at[0] == 1);
    CHECK_INT(mixp_read(mixp_max(ctx, x, 1, 0), &most, MIXP_F32, 1), MIXP_OK);
    CHECK(mixp_bits_of_f32(most) << 1 > 0xFF000000u);
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
}

/* Long lines, and columns of several blocks: against a loop. */
static void test_max_of_many(void) {
    static float v[3 * 2500], best[3 * 2500];
    static int32_t at[3 * 2500], want[3 * 2500];
    int64_t shape[3] = { 3, 1, 2500 };
    mixp_tensor *x = mixp_param(ctx, NULL, MIXP_BF16, 3, shape);
    for (int i = 0; i < 7500; i++) v[i] = (float)((i * 7919) % 251 - 125);
    mixp_write(x, v, MIXP_F32, 7500);
    mixp_step_begin(ctx);
    for (int i = 0; i < 3; i++)
        for (int j = want[i] = 0; j < 2500; j++) if (v[i * 2500 + j] > v[i * 2500 + want[i]]) want[i] = j;
    CHECK_INT(mixp_read(mixp_argmax(ctx, x, 2, 0), at, MIXP_I32, 3), MIXP_OK);
    for (int i = 0; i < 3; i++) CHECK_INT(at[i], want[i]);
    for (int j = 0; j < 2500; j++)
        for (int i = want[j] = 0; i < 3; i++) if (v[i * 2500 + j] > v[want[j] * 2500 + j]) want[j] = i;
    CHECK_INT(mixp_read(mixp_argmax(ctx, x, 0, 0), at, MIXP_I32, 2500), MIXP_OK);
    CHECK_INT(mixp_read(mixp_max(ctx, x, 0, 0), best, MIXP_F32, 2500), MIXP_OK);
    for (int j = 0; j < 2500; j++) CHECK(at[j] == want[j] && best[j] == v[want[j] * 2500 + j]);
}

/* Ids that meet add up in order, in f32, rounded once. */
static void test_gather_sums(void) {
    enum { M = 600 };
    static float dy[M], got[4];
    static int32_t ids[M];
    int64_t shape[1] = { 4 }, many[1] = { M };
    double want[4] = { 0, 0, 0, 0 };
    mixp_tensor *x = mixp_param(ctx, NULL, MIXP_BF16, 1, shape), *y;
    for (int i = 0; i < M; i++) {
        ids[i] = i % 7 % 3;
        dy[i] = 1.0f + (float)(i % 5) / 4.0f;
        want[ids[i]] += dy[i];
    }
    mixp_step_begin(ctx);
    y = mixp_gather(ctx, x, 0, mixp_input(ctx, MIXP_I32, 1, many, ids));
    y = mixp_mul(ctx, y, mixp_input(ctx, MIXP_F32, 1, many, dy));
    CHECK_INT(mixp_backward(ctx, mixp_sum(ctx, y, MIXP_ALL, 0)), MIXP_OK);
    CHECK_INT(mixp_read(x->grad, got, MIXP_F32, 4), MIXP_OK);
    for (int i = 0; i < 4; i++) CHECK_NEAR(got[i], want[i], want[i] / 256.0);
}

/* where and masked_fill against a loop; what the mask hides may be NaN. */
static void test_masks(void) {
    const float nan = mixp_f32_of_bits(0x7FC00000u), v[6] = { 1, nan, 3, nan, 5, 6 };
    const float up[3] = { 10, 20, 30 };
    const uint8_t mask[6] = { 1, 0, 255, 0, 1, 1 };
    const int32_t wide[2] = { -7, 0 };
    int64_t shape[2] = { 2, 3 }, row[1] = { 3 }, column[2] = { 2, 1 };
    float got[6];
    mixp_tensor *x = matrix(v, 2, 3), *m = mixp_input(ctx, MIXP_U8, 2, shape, mask);
    mixp_tensor *u = mixp_input(ctx, MIXP_F32, 1, row, up);
    CHECK_INT(mixp_read(mixp_where(ctx, m, x, u), got, MIXP_F32, 6), MIXP_OK);
    CHECK(got[0] == 1 && got[1] == 20 && got[2] == 3 && got[3] == 10 && got[4] == 5 && got[5] == 6);
    m = mixp_input(ctx, MIXP_I32, 2, column, wide);
    CHECK_INT(mixp_read(mixp_masked_fill(ctx, x, m, -1.0f), got, MIXP_F32, 6), MIXP_OK);
    CHECK(got[0] == -1 && got[1] == -1 && got[2] == -1 && got[4] == 5 && got[5] == 6);
    CHECK(mixp_bits_of_f32(got[3]) << 1 > 0xFF000000u);
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
}

/* Far positions, with the base's frequencies and with others: as the formula says in double, and turned back exactly
 * as far. */
static void test_rope_far(void) {
    enum { T = 300, D = 64, FIRST = 100000 };
    static float v[T * D], y[T * D];
    static double own[D / 2];
    int64_t shape[2] = { T, D };
    mixp_rope_desc d;
    mixp_tensor *x = mixp_param(ctx, NULL, MIXP_F32, 2, shape);
    for (int i = 0; i < T * D; i++) v[i] = (float)((i * 31) % 64 - 32) / 32.0f;
    for (int i = 0; i < D / 2; i++) own[i] = 1.0 / (3.0 + i * i);
    mixp_write(x, v, MIXP_F32, T * D);
    for (int kind = 0; kind < 4; kind++) {
        double scale = kind > 1 ? 1.25 : 1.0;
        memset(&d, 0, sizeof d);
        d.head_dim = D;
        d.first = FIRST;
        d.base = 500000.0;
        d.frequencies = kind % 2 ? own : NULL;
        d.scale = kind > 1 ? scale : 0.0;
        mixp_step_begin(ctx);
        CHECK_INT(mixp_read(mixp_rope(ctx, x, &d), y, MIXP_F32, T * D), MIXP_OK);
        for (int t = 0; t < T; t++)
            for (int i = 0; i < D / 2; i++) {
                double angle = (FIRST + t) * (kind % 2 ? own[i] : pow(500000.0, -2.0 * i / D));
                double a = scale * v[t * D + i], b = scale * v[t * D + D / 2 + i];
                CHECK_NEAR(y[t * D + i], a * cos(angle) - b * sin(angle), 4e-7);
                CHECK_NEAR(y[t * D + D / 2 + i], b * cos(angle) + a * sin(angle), 4e-7);
            }
    }
}

/* --- an operator of one's own, by mixp_get and mixp_put ----------------------------------------- */

static mixp_result halve_infer(mixp_call *c)
{ return mixp_call_output(c, c->in[0]->dtype, c->in[0]->rank, c->in[0]->shape); }
static mixp_result halve(mixp_call *c, mixp_in from, mixp_out to) {
    for (int64_t i = 0; to.data && i < c->out->count; i++) mixp_put(to, i, 0.5f * mixp_get(from, i));
    return MIXP_OK;
}
static mixp_result halve_forward(mixp_call *c) {
    CHECK(!mixp_call_x(c, 1).data && !mixp_call_x(c, -1).data);
    return halve(c, mixp_call_x(c, 0), mixp_call_y(c));
}
static mixp_result halve_backward(mixp_call *c)
{ return halve(c, mixp_call_dy(c), mixp_call_dx(c, 0)); }
static const mixp_op halve_row = { "halve", MIXP_CLASS_KEEP, 0, halve_infer, halve_forward,
                                   halve_backward, NULL };

/* Applied twice to one tensor: the second walk adds. */
static void test_own_operator(void) {
    const float v[6] = { 1, -2, 3.5f, 0, 8, 0.25f };
    int64_t shape[2] = { 2, 3 };
    float got[6];
    for (int d = 0; d < 3; d++) {
        mixp_tensor *x = mixp_param(ctx, NULL, reals[d], 2, shape), *y, *z;
        mixp_write(x, v, MIXP_F32, 6);
        mixp_step_begin(ctx);
        y = mixp_apply(ctx, &halve_row, 1, &x, 1, NULL);
        z = mixp_apply(ctx, &halve_row, 1, &x, 1, NULL);
        CHECK_INT(mixp_read(y, got, MIXP_F32, 6), MIXP_OK);
        for (int i = 0; i < 6; i++) CHECK(got[i] == 0.5f * v[i]);
        y = mixp_add(ctx, y, mixp_scale(ctx, z, 4.0f));
        CHECK_INT(mixp_backward(ctx, mixp_sum(ctx, y, MIXP_ALL, 0)), MIXP_OK);
        CHECK_INT(mixp_read(x->grad, got, MIXP_F32, 6), MIXP_OK);
        for (int i = 0; i < 6; i++) CHECK(got[i] == 2.5f);
    }
}

/* Against mixp_convert, for every dtype. */
static void test_get_and_put(void) {
    const float v[7] = { 1.0f, -2.625f, 0.0f, 300.7f, -0.3f, 1e-3f, 1e6f };
    for (int dtype = 0; dtype < MIXP_DTYPE_COUNT; dtype++) {
        double room[2][8];
        float want[7];
        mixp_out y;
        mixp_in x;
        memset(room, 0, sizeof room);
        y.data = room[0];
        y.dtype = x.dtype = (mixp_dtype)dtype;
        y.accumulate = 0;
        x.data = room[0];
        for (int i = 0; i < 7; i++) mixp_put(y, i, v[i]);
        CHECK_INT(mixp_convert(room[1], (mixp_dtype)dtype, v, MIXP_F32, 7), MIXP_OK);
        CHECK(!memcmp(room[0], room[1], sizeof room[0]));
        CHECK_INT(mixp_convert(want, MIXP_F32, room[1], (mixp_dtype)dtype, 7), MIXP_OK);
        for (int i = 0; i < 7; i++)
            CHECK(mixp_bits_of_f32(mixp_get(x, i)) == mixp_bits_of_f32(want[i]) || want[i] != want[i]);
        y.accumulate = 1;
        mixp_put(y, 0, 2.0f);
        if (dtype <= MIXP_BF16) CHECK(mixp_get(x, 0) == 3.0f);
    }
}

/* Where f32 cannot hold what is there, a sum in f32 would lose it. */
static void test_put_adds_in_double(void) {
    double  d[2] = { 1.0 + 1.0 / 1099511627776.0, 5.0 };
    int32_t small[2] = { 16777217, 2147483646 };
    int64_t large[2] = { 9007199254740989, -3 };
    mixp_put(mixpi_out_to(d, MIXP_F64, 1), 0, 2.0f);
    CHECK(d[0] == 3.0 + 1.0 / 1099511627776.0);
    mixp_put(mixpi_out_to(d, MIXP_F64, 0), 1, -0.0f);
    CHECK(mixp_bits_of_f64(d[1]) == 0x8000000000000000u);
    mixp_put(mixpi_out_to(small, MIXP_I32, 1), 0, 1.75f);
    CHECK(small[0] == 16777218);
    mixp_put(mixpi_out_to(small, MIXP_I32, 1), 1, 7.0f);
    CHECK(small[1] == 2147483647);
    mixp_put(mixpi_out_to(large, MIXP_I64, 1), 0, 2.0f);
    CHECK(large[0] == 9007199254740991);
    mixp_put(mixpi_out_to(large, MIXP_I64, 1), 1, 0.5f);
    CHECK(large[1] == -2);
}

/* --- refusals ---------------------------------------------------------------------------------- */

static void refused(const mixp_tensor *y, mixp_result code, const char *part) {
    const char *why = "";
    CHECK(y == NULL);
    CHECK_INT(mixp_context_error(ctx, &why), code);
    CHECK_TEXT(why, part);
    mixp_context_clear_error(ctx);
}

static void test_refusals(void) {
    int64_t row[1] = { 3 }, shape[2] = { 2, 3 }, one[2] = { 2, 1 }, wide_head[2] = { 2, 2 * MIXP_ROPE_PAIRS + 2 };
    int32_t ids[2] = { 1, 3 };
    p[0] = param(2, 2, 3, 1, 1);
    mixp_step_begin(ctx);
    mixp_tensor *x = p[0];
    mixp_tensor *v = numbers(ctx, 1, row);
    mixp_tensor *i = mixp_input(ctx, MIXP_I32, 2, one, ids);
    mixp_tensor *mask = ints(ctx, MIXP_U8, 2, 3, 2);
    refused(mixp_triplet_margin(ctx, x, x, x, -1.0f, 0, MIXP_REDUCE_MEAN), MIXP_ERR_ARGUMENT, "triplet_margin: the margin must be finite and above 0");
    refused(mixp_triplet_margin(ctx, x, x, x, 0.0f, 0, MIXP_REDUCE_MEAN), MIXP_ERR_ARGUMENT, "margin must be finite");
    refused(mixp_triplet_margin(ctx, x, x, x, NAN, 0, MIXP_REDUCE_MEAN), MIXP_ERR_ARGUMENT, "margin must be finite");
    {   /* a low bound above the high one: all become the high one, as in PyTorch, and no gradient passes */
        float y[6];
        mixp_tensor *t = mixp_clamp(ctx, x, 1.0f, 0.5f);
        CHECK_INT(mixp_read(t, y, MIXP_F32, 6), MIXP_OK);
        for (int e = 0; e < 6; e++) CHECK(y[e] == 0.5f);
    }
    refused(mixp_clamp(ctx, x, NAN, 0.5f), MIXP_ERR_ARGUMENT, "clamp: low is nan and high is 0.5");
    refused(mixp_soft_cap(ctx, x, 0.0f), MIXP_ERR_ARGUMENT, "cap is 0; it must be above 0");
    refused(mixp_huber(ctx, x, x, -1.0f), MIXP_ERR_ARGUMENT, "huber: the bound is -1");
    refused(mixp_l1(ctx, x, v), MIXP_ERR_SHAPE, "l1: x [2, 3] and target [3] do not fit");
    refused(mixp_swiglu_packed(ctx, x), MIXP_ERR_SHAPE, "even last dimension");
    refused(mixp_swiglu(ctx, x, NULL), MIXP_ERR_ARGUMENT, "swiglu: input 1 is NULL");
    refused(mixp_maximum(ctx, x, numbers(ctx, 2, one)) ? NULL : x, MIXP_OK, "");
    refused(mixp_gather(ctx, x, 1, i), MIXP_ERR_ARGUMENT, "gather: id 3 at row 1 is outside [0, 3)");
    refused(mixp_gather(ctx, x, 2, i), MIXP_ERR_SHAPE, "dim must be one of their dimensions");
    refused(mixp_gather(ctx, x, 0, i), MIXP_ERR_ARGUMENT, "gather: id 3 at row 1 is outside [0, 2)");
    refused(mixp_gather(ctx, x, 0, x), MIXP_ERR_DTYPE, "indices must be i32");
    refused(mixp_where(ctx, x, x, x), MIXP_ERR_DTYPE, "where: the mask is f32; it must be u8 or i32");
    refused(mixp_where(ctx, mask, mask, x), MIXP_ERR_DTYPE, "where: input 1 is u8");
    refused(mixp_where(ctx, mask, x, NULL), MIXP_ERR_ARGUMENT, "where: input 2 is NULL");
    refused(mixp_masked_fill(ctx, v, numbers(ctx, 1, row), 0.0f), MIXP_ERR_DTYPE, "the mask is f32");
    refused(mixp_masked_fill(ctx, mixp_reshape(ctx, x, 1, (shape[0] = 6, shape)), mask, 0.0f),
            MIXP_ERR_SHAPE, "dimensions must be equal or 1");
    refused(rope(ctx, x, 3, 0, 0), MIXP_ERR_SHAPE, "multiple of head_dim, which is even");
    refused(rope(ctx, v, 2, 0, 0), MIXP_ERR_SHAPE, "x[..., t, c]");
    refused(mixp_rope(ctx, x, NULL), MIXP_ERR_SHAPE, "head_dim");
    refused(rope_scaled(ctx, numbers(ctx, 2, wide_head), 2 * MIXP_ROPE_PAIRS + 2), MIXP_ERR_ARGUMENT, "up to 256 elements");
    refused(rope(ctx, numbers(ctx, 2, one), 1, -1, 0), MIXP_ERR_SHAPE, "head_dim");
    refused(mixp_cross_entropy_smooth(ctx, x, i, MIXP_IGNORE, 1.5f), MIXP_ERR_ARGUMENT,
            "smoothing is 1.5; it must be in [0, 1]");
    refused(mixp_max(ctx, x, 2, 0), MIXP_ERR_SHAPE, "dim must be one of x's dimensions");
    refused(mixp_max(ctx, i, 0, 0), MIXP_ERR_DTYPE, "max: input 0 is i32");
    refused(mixp_matmul(ctx, x, x, 0, 0), MIXP_ERR_SHAPE, "do not fit: a[..., m, k] and b[..., k, n]");
    refused(mixp_matmul(ctx, v, x, 0, 0), MIXP_ERR_SHAPE, "a [3]");
    refused(mixp_linear(ctx, x, v, NULL), MIXP_ERR_SHAPE, "w[out, in]");
}

/* Norms of 0 elements, as torch.linalg.vector_norm: 0 for orders from 0 on, an error for negative orders and Inf. */
static void test_norms_of_nothing(void) {
    static const float orders[] = { 0.0f, 0.5f, 1.0f, 2.0f, 3.0f }, without[] = { -0.5f, -1.0f, -2.0f, -INFINITY, INFINITY };
    static const int64_t none[1] = { 0 }, wide[2] = { 0, 3 };
    mixp_step_begin(ctx);
    mixp_tensor *x = mixp_full(ctx, MIXP_F32, 1, none, 1.0);
    mixp_tensor *rows = mixp_full(ctx, MIXP_F32, 2, wide, 1.0);
    for (int i = 0; i < 5; i++) {
        float three[3] = { 7, 7, 7 };
        mixp_tensor *y = mixp_norm(ctx, rows, orders[i], 0, 0);
        CHECK(mixp_item(mixp_norm(ctx, x, orders[i], MIXP_ALL, 0)) == 0);
        CHECK_INT(mixp_read(y, three, MIXP_F32, 3), MIXP_OK);
        for (int k = 0; k < 3; k++) CHECK(three[k] == 0);
        refused(mixp_norm(ctx, x, without[i], MIXP_ALL, 0), MIXP_ERR_SHAPE, "needs at least one element");
        refused(mixp_norm(ctx, rows, without[i], 0, 0), MIXP_ERR_SHAPE, "needs at least one element");
        y = mixp_norm(ctx, rows, without[i], 1, 0);
        CHECK(y && y->count == 0);
    }
    refused(mixp_norm(ctx, x, -2.0f, 1, 0), MIXP_ERR_SHAPE, "norm: ");
    refused(mixp_norm(ctx, NULL, -2.0f, 1, 0), MIXP_ERR_ARGUMENT, "norm: ");
    CHECK(mixp_norm(NULL, x, -2.0f, 1, 0) == NULL);
}

/* --- initialisers ------------------------------------------------------------------------------- */

/* The mean of squares, and the largest, of 40,000 values. */
static void spread_of(const mixp_tensor *t, double *square, double *most) {
    static float v[40000];
    *square = *most = 0.0;
    CHECK_INT(mixp_read(t, v, MIXP_F32, t->count), MIXP_OK);
    for (int64_t i = 0; i < t->count; i++) {
        *square += (double)v[i] * v[i] / (double)t->count;
        if (fabs(v[i]) > *most) *most = fabs(v[i]);
    }
}

static void test_initialisers(void) {
    mixp_tensor *t = param(3, 50, 200, 4, 1);   /* fan_in 800, fan_out 200 */
    const double xavier = 4.0 * 2.0 / 1000.0, kaiming = 2.0 / 800.0;
    double square, most;
    const char *why = "";
    CHECK_INT(mixp_init_xavier_normal(t, 2.0), MIXP_OK);
    spread_of(t, &square, &most);
    CHECK_NEAR(square, xavier, 0.03 * xavier);
    CHECK(most > 3.0 * sqrt(xavier));
    CHECK_INT(mixp_init_xavier_uniform(t, 2.0), MIXP_OK);
    spread_of(t, &square, &most);
    CHECK_NEAR(square, xavier, 0.03 * xavier);
    CHECK(most <= sqrt(3.0 * xavier) * 1.000001 && most > 0.999 * sqrt(3.0 * xavier));
    CHECK_INT(mixp_init_kaiming_normal(t, sqrt(2.0)), MIXP_OK);
    spread_of(t, &square, &most);
    CHECK_NEAR(square, kaiming, 0.03 * kaiming);
    CHECK_INT(mixp_init_kaiming_uniform(t, sqrt(2.0)), MIXP_OK);
    spread_of(t, &square, &most);
    CHECK_NEAR(square, kaiming, 0.03 * kaiming);
    CHECK(most <= sqrt(3.0 * kaiming) * 1.000001 && most > 0.999 * sqrt(3.0 * kaiming));
    CHECK_INT(mixp_init_kaiming_normal(param(1, 8, 1, 1, 1), 1.0), MIXP_ERR_SHAPE);
    CHECK_INT(mixp_context_error(ctx, &why), MIXP_ERR_SHAPE);
    CHECK_TEXT(why, "need weights [out, in, ...]");
    mixp_context_clear_error(ctx);
    CHECK_INT(mixp_init_xavier_normal(NULL, 1.0), MIXP_ERR_ARGUMENT);
}

/* --- the same bits everywhere ----------------------------------------------------------------- */

static uint64_t hash_of(uint64_t hash, const mixp_tensor *t) {
    const unsigned char *byte = (const unsigned char *)t->data;
    size_t i, bytes = (size_t)t->count * mixp_dtype_size(t->dtype);
    for (i = 0; i < bytes; i++) hash = (hash ^ byte[i]) * 1099511628211u;
    return hash;
}

/* Every new operator on arrays of several blocks and tasks, in all dtypes; the bits of the results
 * and of the gradients. */
static uint64_t bits_on(const mixp_device *device, int threads, mixp_dtype dtype) {
    enum { ROWS = 70, COLS = 1300 };
    static const int64_t wide[2] = { ROWS, COLS }, row[1] = { COLS }, one[2] = { ROWS, 1 };
    static uint8_t mask[ROWS * COLS];
    static int32_t ids[ROWS];
    mixp_context *c = context_on(device, threads);
    mixp_tensor *x = mixp_param(c, "x", dtype, 2, wide), *y = mixp_param(c, "y", dtype, 2, wide);
    mixp_tensor *b = mixp_param(c, "b", dtype, 1, row), *out[16], *loss = NULL;
    uint64_t hash = 14695981039346656037u;
    int i, n = 0;
    for (i = 0; i < ROWS * COLS; i++) mask[i] = (uint8_t)(i * 7 % 3);
    for (i = 0; i < ROWS; i++) ids[i] = i * 97 % COLS;
    mixp_init_normal(x, 0.0, 1.5);
    mixp_init_normal(y, 0.0, 1.5);
    mixp_init_kaiming_uniform(y, 10.0);
    mixp_init_normal(b, 0.0, 1.0);
    mixp_step_begin(c);
    {
        mixp_tensor *m = mixp_input(c, MIXP_U8, 2, wide, mask), *t = mixp_input(c, MIXP_I32, 2, one, ids);
        out[n++] = mixp_maximum(c, x, b);
        out[n++] = mixp_minimum(c, b, y);
        out[n++] = mixp_swiglu(c, x, b);
        out[n++] = mixp_swiglu_packed(c, y);
        out[n++] = mixp_soft_cap(c, mixp_sin(c, x), 0.5f);
        out[n++] = mixp_relu_squared(c, mixp_cos(c, y));
        out[n++] = mixp_clamp(c, mixp_abs(c, x), 0.5f, 1.0f);
        out[n++] = mixp_where(c, m, x, b);
        out[n++] = mixp_masked_fill(c, y, m, 1.0f);
        out[n++] = rope(c, x, COLS / 2, 5, 0);
        out[n++] = rope(c, y, COLS / 5, 0, 1);
        out[n++] = mixp_max(c, x, 0, 0);
        out[n++] = mixp_max(c, y, 1, 0);
        out[n++] = mixp_gather(c, x, 1, t);
        out[n++] = mixp_cross_entropy_smooth(c, y, mixp_reshape(c, t, 1, one), MIXP_IGNORE, 0.1f);
    }
    for (i = 0; i < n; i++) {
        mixp_tensor *sum = mixp_mean(c, out[i], MIXP_ALL, 0);
        CHECK(out[i] != NULL);
        if (!out[i]) return 0;
        hash = hash_of(hash, out[i]);
        loss = loss ? mixp_add(c, loss, sum) : sum;
    }
    loss = mixp_add(c, loss, mixp_add(c, mixp_huber(c, x, y, 1.0f), mixp_l1(c, y, x)));
    CHECK_INT(mixp_backward(c, mixp_scale(c, loss, 1024.0f)), MIXP_OK);
    hash = hash_of(hash_of(hash_of(hash_of(hash, x->grad), y->grad), b->grad), loss);
    CHECK_INT(mixp_context_error(c, NULL), MIXP_OK);
    mixp_context_free(c);
    return hash;
}

static void test_same_bits(void) {
    for (int d = 0; d < 3; d++) {
        uint64_t want = bits_on(mixp_cpu_with(MIXP_ISA_SCALAR), 1, reals[d]);
        for (int isa = 0; isa < MIXP_ISA_COUNT; isa++)
            for (int threads = 1; threads <= 3 && mixp_cpu_with((mixp_isa)isa); threads += 2)
                CHECK(bits_on(mixp_cpu_with((mixp_isa)isa), threads, reals[d]) == want);
    }
}

int main(void) {
    (void)gen_fill;             /* of other tests */
    ctx = context_on(NULL, 1);
    RUN(test_against_torch);
    RUN(test_gradients);
    RUN(test_products);
    RUN(test_ties);
    RUN(test_max_of_many);
    RUN(test_gather_sums);
    RUN(test_masks);
    RUN(test_rope_far);
    RUN(test_own_operator);
    RUN(test_get_and_put);
    RUN(test_put_adds_in_double);
    RUN(test_refusals);
    RUN(test_norms_of_nothing);
    RUN(test_initialisers);
    RUN(test_same_bits);
    mixp_context_free(ctx);
    return test_report();
}
