/* jvp_cases.h - mixp_jvp on the device of `case_context`: derivatives, their gradients and second
 * derivatives beside PyTorch's in f64; in f16 and bf16; finite differences in double; refusals.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "examples/ops.h"
#include "../reference/generate.h"
#include "../reference/jvp.h"

enum { JVP_ROOM = 512, JVP_VOCAB = 6 };
static const mixp_dtype jvp_dtypes[3] = { MIXP_F32, MIXP_F16, MIXP_BF16 };

typedef struct jvp_inputs {
    int          n, real[4];            /* real: it has a direction                              */
    mixp_tensor *t[4], *d[4];
} jvp_inputs;

/* One input of kind s, q or t in [0, 1) without a gradient. */
static mixp_tensor *jvp_real(mixp_context *c, char kind, uint32_t *gen, int rank, const int64_t *shape, int n) {
    float v[JVP_ROOM];
    mixp_tensor *t = kind == 't' ? mixp_activation(c, MIXP_F32, rank, shape)
                                 : mixp_param(c, NULL, MIXP_F32, rank, shape);
    gen_short(gen, v, n);
    for (int i = 0; kind != 's' && i < n; i++) v[i] = (v[i] + 2.0f) / 4.0f;
    for (int i = 0; kind == 'q' && i < n; i++) v[i] = v[i] < 0.125f ? 0.125f : v[i];
    CHECK_INT(mixp_write(t, v, MIXP_F32, n), MIXP_OK);
    return t;
}

static const char *jvp_input(mixp_context *c, const char *text, uint32_t *gen, jvp_inputs *in) {
    int64_t shape[MIXP_MAX_RANK];
    int32_t ids[JVP_ROOM];
    int rank = 0, n = 1;
    char kind = *text, *end;
    do {
        shape[rank] = strtol(text + 1, &end, 10);
        n *= (int)shape[rank++];
        text = end;
    } while (*text == ',');
    in->real[in->n] = kind == 's' || kind == 'q';
    if (kind == 'i') gen_ints(gen, JVP_VOCAB, ids, n);
    in->t[in->n++] = kind == 'i' ? mixp_input(c, MIXP_I32, rank, shape, ids) : jvp_real(c, kind, gen, rank, shape, n);
    return text;
}

static mixp_tensor *jvp_direction(mixp_context *c, uint32_t *gen, const mixp_tensor *like) {
    float v[JVP_ROOM];
    gen_short(gen, v, (int)like->count);
    return mixp_input(c, MIXP_F32, like->rank, like->shape, v);
}

/* --- the functions of record_jvp.py ----------------------------------------------------------------- */

#define IS(text) if (strcmp(name, text) == 0)

static mixp_tensor *jvp_unary(mixp_context *c, const char *name, mixp_tensor *x) {
    IS("tanh")          return mixp_tanh(c, x);
    IS("sigmoid")       return mixp_sigmoid(c, x);
    IS("silu")          return mixp_silu(c, x);
    IS("gelu")          return mixp_gelu(c, x);
    IS("gelu_tanh")     return mixp_gelu_tanh(c, x);
    IS("exp")           return mixp_exp(c, x);
    IS("expm1")         return mixp_expm1(c, x);
    IS("log")           return mixp_log(c, x);
    IS("log1p")         return mixp_log1p(c, x);
    IS("sqrt")          return mixp_sqrt(c, x);
    IS("square")        return mixp_square(c, x);
    IS("cube")          return mixp_pow(c, x, 3.0f);
    IS("power")         return mixp_pow(c, x, 1.5f);
    IS("reciprocal")    return mixp_reciprocal(c, x);
    IS("sin")           return mixp_sin(c, x);
    IS("cos")           return mixp_cos(c, x);
    IS("erf")           return mixp_erf(c, x);
    IS("softplus")      return mixp_softplus(c, x, 2.0f);
    IS("soft_cap")      return mixp_soft_cap(c, x, 1.5f);
    IS("relu")          return mixp_relu(c, x);
    IS("relu_squared")  return mixp_relu_squared(c, x);
    IS("leaky_relu")    return mixp_leaky_relu(c, x, 0.125f);
    IS("elu")           return mixp_elu(c, x, 1.5f);
    IS("abs")           return mixp_abs(c, x);
    IS("clamp")         return mixp_clamp(c, x, -0.5f, 1.0f);
    IS("scale")         return mixp_scale(c, x, 1.25f);
    IS("neg")           return mixp_neg(c, x);
    IS("add_scalar")    return mixp_add_scalar(c, x, 2.0f);
    IS("rsub")          return mixp_rsub(c, x, 2.0f);
    IS("log2")          return mixp_log2(c, x);
    IS("log10")         return mixp_log10(c, x);
    IS("acos")          return mixp_acos(c, mixp_scale(c, x, 0.25f));
    IS("asin")          return mixp_asin(c, mixp_scale(c, x, 0.25f));
    IS("tan")           return mixp_tan(c, mixp_scale(c, x, 0.25f));
    IS("sinh")          return mixp_sinh(c, x);
    IS("cosh")          return mixp_cosh(c, x);
    IS("erfinv")        return mixp_erfinv(c, mixp_scale(c, x, 0.25f));
    return NULL;
}

static mixp_tensor *jvp_pair(mixp_context *c, const char *name, mixp_tensor *a, mixp_tensor *b, mixp_tensor *bias) {
    IS("add")           return mixp_add(c, a, b);
    IS("sub")           return mixp_sub(c, a, b);
    IS("mul")           return mixp_mul(c, a, b);
    IS("mul_itself")    return mixp_mul(c, mixp_mul(c, a, a), a);
    IS("div")           return mixp_div(c, a, b);
    IS("maximum")       return mixp_maximum(c, a, b);
    IS("minimum")       return mixp_minimum(c, a, b);
    IS("swiglu")        return mixp_swiglu(c, a, b);
    IS("linear")        return mixp_linear(c, a, b, bias);
    IS("linear_bare")   return mixp_linear(c, a, b, NULL);
    IS("matmul")        return mixp_matmul(c, a, b, 0, 0);
    IS("matmul_a")      return mixp_matmul(c, a, b, 1, 0);
    IS("matmul_b")      return mixp_matmul(c, a, b, 0, 1);
    IS("matmul_vector") return mixp_matmul(c, a, b, 0, 0);
    IS("power_pair")    return mixp_power(c, a, b);
    IS("atan2")         return mixp_atan2(c, a, b);
    IS("prelu")         return mixp_prelu(c, a, b);
    IS("einsum")        return mixp_einsum(c, "ij,kj->ki", a, b);
    return NULL;
}

static mixp_tensor *jvp_half(mixp_context *c) { return mixp_full(c, MIXP_F32, 0, NULL, 0.5); }

static mixp_tensor *jvp_view(mixp_context *c, const char *name, mixp_tensor *const *t) {
    mixp_tensor *x = t[0];
    int64_t two_by_six[2] = { 2, 6 }, wide[3] = { 2, 3, 4 };
    int dims[3] = { 1, 2, 0 };
    IS("sum")           return mixp_sum(c, x, MIXP_ALL, 0);
    IS("sum_first")     return mixp_sum(c, x, 0, 1);
    IS("mean")          return mixp_mean(c, x, -1, 0);
    IS("reshape")       x = mixp_reshape(c, x, 2, two_by_six);
    IS("transpose")     x = mixp_transpose(c, x, 0, 2);
    IS("permute")       x = mixp_permute(c, x, 3, dims);
    dims[0] = 0;        /* the operator must not read the caller's array later */
    IS("flip")          x = mixp_flip(c, x, 1);
    IS("expand")        return mixp_expand(c, mixp_square(c, x), 3, wide);
    IS("pad")           x = mixp_pad(c, x, 1, 1, 2, 3.0f);
    IS("concat")        x = mixp_concat(c, 3, t, 1);
    IS("stack")         x = mixp_stack(c, 2, t, 1);
    IS("slice")         x = mixp_slice(c, x, 1, 2, 3);
    IS("where")         return mixp_where(c, mixp_gt(c, x, jvp_half(c)), mixp_mul(c, x, t[1]), t[1]);
    IS("masked_fill")   return mixp_masked_fill(c, mixp_square(c, x), mixp_gt(c, x, jvp_half(c)), 7.0f);
    IS("gather")        return mixp_gather(c, mixp_square(c, x), 0, t[1]);
    IS("embedding")     x = mixp_embedding(c, x, t[1]);
    IS("scatter_add")   return mixp_scatter_add(c, mixp_square(c, x), 0, t[1], mixp_square(c, t[2]));
    IS("index_add")     return mixp_index_add(c, mixp_square(c, x), 0, t[1], mixp_square(c, t[2]));
    IS("cumsum")        return mixp_cumsum(c, mixp_square(c, x), 1);
    IS("detach")        return mixp_mul(c, x, mixp_detach(c, x));
    IS("var")           return mixp_var(c, x, -1, 1, 0);
    IS("std")           return mixp_std(c, x, -1, 1, 0);
    IS("norm")          return mixp_vector_norm(c, x, -1, 0);
    IS("logsumexp")     return mixp_logsumexp(c, x, -1, 0);
    IS("cumprod")       return mixp_cumprod(c, x, 1);
    IS("norm_3")        return mixp_norm(c, x, 3.0f, -1, 0);
    IS("triu")          return mixp_triu(c, mixp_square(c, x), 1);
    IS("unused")        return mixp_tanh(c, x);
    IS("softmax")       return mixp_softmax(c, x);
    IS("log_softmax")   return mixp_log_softmax(c, x);
    IS("cross_entropy") return mixp_cross_entropy(c, x, t[1], MIXP_IGNORE);
    IS("cross_entropy_smooth") return mixp_cross_entropy_smooth(c, x, t[1], 2, 0.25f);
    IS("mse")           return mixp_mse(c, x, t[1]);
    IS("huber")         return mixp_huber(c, x, t[1], 0.75f);
    IS("smooth_l1")     return mixp_smooth_l1(c, x, t[1], 0.75f);
    IS("bce_with_logits") return mixp_bce_with_logits(c, x, t[1]);
    return x == t[0] && strncmp(name, "mlp", 3) == 0 ? NULL : mixp_square(c, x);
}

static mixp_tensor *jvp_function(mixp_context *c, const char *name, mixp_tensor *const *t) {
    mixp_tensor *y = jvp_unary(c, name, t[0]);
    if (!y) y = jvp_pair(c, name, t[0], t[1], t[2]);
    if (!y) y = jvp_view(c, name, t);
    if (y) return y;
    y = mixp_linear(c, t[0], t[1], t[2]);
    IS("mlp_tanh") y = mixp_tanh(c, y);
    IS("mlp_gelu") y = mixp_gelu(c, y);
    IS("mlp_silu") y = mixp_silu(c, y);
    return mixp_linear(c, y, t[3], NULL);
}
#undef IS

/* --- beside PyTorch ----------------------------------------------------------------------------------- */

/* The sum over the inputs of y's derivatives along their directions. */
static mixp_tensor *jvp_total(mixp_context *c, mixp_tensor *y, const jvp_inputs *in) {
    mixp_tensor *sum = NULL;
    for (int i = 0; i < in->n; i++) {
        mixp_tensor *d = in->real[i] ? mixp_jvp(c, y, in->t[i], in->d[i]) : NULL;
        if (d) CHECK(d->dtype == y->dtype && d->rank == y->rank && d->count == y->count);
        if (d) sum = sum ? mixp_add(c, sum, d) : d;
    }
    return sum;
}

/* Each number of t against `want`, beside the largest of them. */
static void jvp_compare(const char *name, const char *what, const mixp_tensor *t, const double *want, int n,
                        double share) {
    double got[JVP_ROOM], most = 1.0;
    int i;
    memset(got, 0, sizeof got);
    if (t) CHECK(t->count == n);
    if (t) CHECK_INT(mixp_read(t, got, MIXP_F64, n), MIXP_OK);
    for (i = 0; i < n; i++) most = fabs(want[i]) > most ? fabs(want[i]) : most;
    for (i = 0; i < n; i++) {
        if (fabs(got[i] - want[i]) <= share * most) continue;
        test_bad++;
        TEST_SHOW("%s, %s, element %d: %.9g, not %.9g", name, what, i, got[i], want[i]);
        return;
    }
}

/* Returns how many recorded values the case has. mode: 0 in f32, 1 in a region of f16, 2 of bf16. */
static int jvp_one(mixp_context *c, int index, int mode, const double *want) {
    static const double shares[3] = { 4e-6, 6e-3, 5e-2 };
    const jvp_case *k = &jvp_cases[index];
    mixp_tensor *y, *first = NULL, *second = NULL, *w;
    uint32_t gen = gen_start(900u + (uint32_t)index);
    int i, at = k->count;
    jvp_inputs in;
    memset(&in, 0, sizeof in);
    CHECK_INT(mixp_step_begin(c), MIXP_OK);
    for (const char *text = k->inputs; *text; text += *text == ' ') text = jvp_input(c, text, &gen, &in);
    for (i = 0; i < in.n; i++) in.d[i] = in.real[i] ? jvp_direction(c, &gen, in.t[i]) : NULL;
    MIXP_AUTOCAST(c, jvp_dtypes[mode]) {
        y = jvp_function(c, k->name, in.t);
        first = jvp_total(c, y, &in);
        w = jvp_direction(c, &gen, y);
        if (first && first->own.from_tape) {
            second = jvp_total(c, first, &in);
            first = mixp_mul(c, first, mixp_full(c, MIXP_F32, 0, NULL, 1.0));   /* it stays as it is */
            CHECK_INT(mixp_backward(c, mixp_sum(c, mixp_mul(c, first, w), MIXP_ALL, 0)), MIXP_OK);
        }
    }
    CHECK(first != NULL);
    jvp_compare(k->name, "tangent", first, want, k->count, shares[mode]);
    for (i = 0; i < in.n; i++) {
        if (!in.real[i]) continue;
        jvp_compare(k->name, "gradient", in.t[i]->grad, want + at, (int)in.t[i]->count, shares[mode]);
        at += (int)in.t[i]->count;
    }
    jvp_compare(k->name, "second", second, want + at, k->count, shares[mode]);
    return at + k->count;
}

static void test_jvp_beside_pytorch(void) {
    const char *why = "";
    int mode, i, at;
    for (mode = 0; mode < 3; mode++) {
        mixp_context *c = case_context();
        for (i = at = 0; i < JVP_CASES; i++) at += jvp_one(c, i, mode, jvp_values + at);
        CHECK_INT(at, sizeof jvp_values / sizeof *jvp_values);
        if (mixp_context_error(c, &why) != MIXP_OK) { test_bad++; TEST_SHOW("%s", why); }
        mixp_context_free(c);
    }
}

/* --- beside finite differences in double -------------------------------------------------------------- */

static double jvp_sigmoid(double x) { return 1.0 / (1.0 + exp(-x)); }
static double jvp_gelu(double x) { return 0.5 * x * erfc(-x / sqrt(2.0)); }

/* A function of x[5] and b: each kind of operator once. */
static double jvp_double(const double *x, double b) {
    double sum = 0.0, h;
    for (int i = 0; i < 5; i++) {
        h = tanh(x[i] * b + 0.25) + sin(x[i]) * exp(-x[i]);
        sum += jvp_gelu(h) / (1.5 + cos(x[(i + 1) % 5])) + jvp_sigmoid(h * h) * b;
    }
    return sum / 5.0;
}

static mixp_tensor *jvp_same(mixp_context *c, mixp_tensor *x, mixp_tensor *b) {
    mixp_tensor *h = mixp_tanh(c, mixp_add_scalar(c, mixp_mul(c, x, b), 0.25f)), *turned[2], *gelu;
    h = mixp_add(c, h, mixp_mul(c, mixp_sin(c, x), mixp_exp(c, mixp_neg(c, x))));
    turned[0] = mixp_slice(c, x, 0, 1, 4);
    turned[1] = mixp_slice(c, x, 0, 0, 1);
    gelu = mixp_div(c, mixp_gelu(c, h), mixp_add_scalar(c, mixp_cos(c, mixp_concat(c, 2, turned, 0)), 1.5f));
    return mixp_mean(c, mixp_add(c, gelu, mixp_mul(c, mixp_sigmoid(c, mixp_square(c, h)), b)), MIXP_ALL, 0);
}

static double jvp_moved(const float *x, float b, const float *d, double db, double by) {
    double at[5];
    for (int i = 0; i < 5; i++) at[i] = (double)x[i] + by * (double)d[i];
    return jvp_double(at, (double)b + by * db);
}

static void test_jvp_beside_differences(void) {
    static const float v[5] = { 0.5f, -1.25f, 0.75f, 2.0f, -0.125f }, d[5] = { 1.0f, -0.5f, 0.25f, 2.0f, -1.5f };
    const float b = 0.75f;
    const int64_t five = 5;
    mixp_context *c = case_context();
    mixp_tensor *x = mixp_param(c, NULL, MIXP_F32, 1, &five), *t = mixp_param(c, NULL, MIXP_F32, 0, NULL), *y, *dx, *dt;
    double up, down, at = jvp_moved(v, b, d, 1.0, 0.0);
    mixp_write(x, v, MIXP_F32, 5);
    mixp_fill(t, (double)b);
    mixp_step_begin(c);
    y = jvp_same(c, x, t);
    CHECK_NEAR(mixp_item(y), at, 1e-6);
    dx = mixp_input(c, MIXP_F32, 1, &five, d);
    dt = mixp_add(c, mixp_jvp(c, y, x, dx), mixp_jvp(c, y, t, NULL));       /* NULL: ones */
    up = jvp_moved(v, b, d, 1.0, 1e-5);
    down = jvp_moved(v, b, d, 1.0, -1e-5);
    CHECK_NEAR(mixp_item(dt), (up - down) / 2e-5, 2e-6);
    dt = mixp_add(c, mixp_jvp(c, dt, x, dx), mixp_jvp(c, dt, t, NULL));
    up = jvp_moved(v, b, d, 1.0, 1e-3);
    down = jvp_moved(v, b, d, 1.0, -1e-3);
    CHECK_NEAR(mixp_item(dt), (up - 2.0 * at + down) / 1e-6, 5e-5);
    mixp_context_free(c);
}

/* --- what a caller may do, and may not ---------------------------------------------------------------- */

static void jvp_refused(mixp_context *c, const mixp_tensor *y, mixp_result result, const char *says) {
    const char *why = "";
    CHECK(y == NULL);
    CHECK_INT(mixp_context_error(c, &why), result);
    CHECK_TEXT(why, says);
    mixp_context_clear_error(c);
}

/* A tangent with 1 in one column gives the partial derivative by that column. */
static void test_jvp_of_a_column(void) {
    static const float v[4] = { 2.0f, 3.0f, 5.0f, 7.0f }, d[2] = { 0.0f, 1.0f };
    const int64_t row[2] = { 1, 2 }, all[2] = { 2, 2 };
    mixp_context *c = case_context();
    float got[4];
    mixp_step_begin(c);
    mixp_tensor *xt = mixp_input(c, MIXP_F32, 2, all, v);
    mixp_tensor_set_requires_grad(xt, 1);
    mixp_tensor *u = mixp_square(c, xt);
    mixp_tensor *by_t = mixp_expand(c, mixp_input(c, MIXP_F32, 2, row, d), 2, all);
    mixp_read(mixp_jvp(c, u, xt, by_t), got, MIXP_F32, 4);
    CHECK_NEAR(got[0], 0.0, 0.0);
    CHECK_NEAR(got[1], 6.0, 0.0);
    CHECK_NEAR(got[2], 0.0, 0.0);
    CHECK_NEAR(got[3], 14.0, 0.0);
    mixp_context_free(c);
}

/* x itself, an activation, an input that requires gradients, dtypes of a tangent. */
static void test_jvp_of_little(void) {
    static const float v[3] = { 1.0f, 2.0f, -3.0f };
    const int64_t three = 3, one = 1;
    mixp_context *c = case_context();
    float got[3];
    mixp_step_begin(c);
    mixp_tensor *x = mixp_input(c, MIXP_F32, 1, &three, v);
    mixp_tensor_set_requires_grad(x, 1);
    mixp_tensor *h = mixp_scale(c, x, 3.0f);
    mixp_tensor *y = mixp_square(c, h);
    mixp_tensor *d = mixp_jvp(c, x, x, NULL);
    mixp_read(d, got, MIXP_F32, 3);
    CHECK_NEAR(got[0], 1.0, 0.0);
    mixp_read(mixp_jvp(c, y, h, mixp_full(c, MIXP_F16, 1, &three, 0.5)), got, MIXP_F32, 3);
    CHECK_NEAR(got[2], -9.0, 0.0);                      /* 2 h / 2 */
    mixp_read(mixp_jvp(c, mixp_scale(c, x, 2.0f), h, NULL), got, MIXP_F32, 3);
    CHECK_NEAR(got[1], 0.0, 0.0);                       /* it does not depend on h */
    CHECK_NEAR(mixp_item(mixp_jvp(c, mixp_vector_norm(c, mixp_sub(c, x, x), 0, 0), x, NULL)), 0.0, 0.0);
    y = mixp_square(c, x);                              /* derivatives 2 x, 2, 0 and 0 */
    y = mixp_jvp(c, mixp_jvp(c, y, x, NULL), x, NULL);
    mixp_read(y, got, MIXP_F32, 3);
    CHECK_NEAR(got[2], 2.0, 0.0);
    y = mixp_jvp(c, y, x, NULL);
    CHECK(y != NULL);
    if (y) mixp_read(mixp_jvp(c, y, x, NULL), got, MIXP_F32, 3);
    CHECK_NEAR(got[2], 0.0, 0.0);
    y = mixp_square(c, h);
    CHECK_INT(mixp_context_error(c, NULL), MIXP_OK);
    jvp_refused(c, mixp_jvp(c, y, x, mixp_full(c, MIXP_F32, 1, &one, 1.0)), MIXP_ERR_SHAPE,
                "the tangent is [1], x is [3]: they must be equal");
    jvp_refused(c, mixp_jvp(c, y, x, mixp_full(c, MIXP_I32, 1, &three, 1.0)), MIXP_ERR_DTYPE, "tangent");
    mixp_context_free(c);
}

static void test_jvp_refused(void) {
    static const float v[4] = { 1.0f, 2.0f, -3.0f, 0.5f };
    const int64_t shape[2] = { 2, 2 };
    mixp_context *c = case_context(), *other = case_context();
    mixp_tensor *x, *w = mixp_param(c, "w", MIXP_F32, 2, shape), *y = NULL, *h, *foreign = mixp_param(other, "o", MIXP_F32, 2, shape);
    mixp_fill(w, 0.5);
    mixp_step_begin(c);
    x = mixp_input(c, MIXP_F32, 2, shape, v);
    h = mixp_matmul(c, x, w, 0, 0);
    CHECK(mixp_jvp(NULL, h, x, NULL) == NULL);
    jvp_refused(c, mixp_jvp(c, NULL, w, NULL), MIXP_ERR_ARGUMENT, "jvp of y: input 0 is NULL");
    jvp_refused(c, mixp_jvp(c, h, NULL, NULL), MIXP_ERR_ARGUMENT, "jvp by x: input 0 is NULL");
    jvp_refused(c, mixp_jvp(c, h, foreign, NULL), MIXP_ERR_ARGUMENT, "another context");
    jvp_refused(c, mixp_jvp(c, h, x, NULL), MIXP_ERR_ORDER, "x requires no gradient; call mixp_tensor_set_requires_grad");
    mixp_tensor_set_requires_grad(x, 1);                /* too late */
    jvp_refused(c, mixp_jvp(c, h, x, NULL), MIXP_ERR_ORDER, "x required no gradient when matmul read it");
    jvp_refused(c, mixp_jvp(c, mixp_layer_norm(c, h, NULL, NULL, 1e-5f), w, NULL), MIXP_ERR_ARGUMENT,
                "no tangent of layer_norm");
    CHECK(mixp_jvp(c, h, w, NULL) != NULL);             /* what failed has left nothing behind */
    MIXP_NO_GRAD(c) y = mixp_scale(c, w, 2.0f);
    jvp_refused(c, mixp_jvp(c, y, w, NULL), MIXP_ERR_ORDER, "nothing was recorded for y");
    jvp_refused(c, mixp_jvp(c, y, w, NULL), MIXP_ERR_ORDER, "call mixp_tensor_set_requires_grad(x, 1) before");
    y = mixp_square(c, w);
    MIXP_NO_GRAD(c) y = mixp_jvp(c, y, w, NULL);        /* 2 w is no constant */
    CHECK(y != NULL);
    jvp_refused(c, mixp_jvp(c, y, w, NULL), MIXP_ERR_ORDER, "nothing was recorded for y");
    h = mixp_square(c, w);
    mixp_fill(w, 0.25);
    jvp_refused(c, mixp_jvp(c, h, w, NULL), MIXP_ERR_ORDER, "mixp_jvp: 'w' [2, 2] was written by mixp_fill since square");
    mixp_step_begin(c);
    jvp_refused(c, mixp_jvp(c, h, w, NULL), MIXP_ERR_ORDER, "jvp of y: input 0");
    mixp_context_free(other);
    mixp_context_free(c);
}

static mixp_tensor *jvp_block_w;
static mixp_tensor *jvp_block(mixp_context *c, mixp_tensor *x, void *user) {
    mixp_tensor *y = mixp_linear(c, mixp_tanh(c, mixp_linear(c, x, jvp_block_w, NULL)), jvp_block_w, NULL);
    return user ? mixp_jvp(c, y, x, NULL) : y;
}

/* A block of mixp_recompute may call mixp_jvp, with the same bits; it cannot be followed from outside. */
static void test_jvp_and_blocks(void) {
    static const float v[4] = { 0.5f, -1.0f, 0.25f, 2.0f };
    const int64_t shape[2] = { 2, 2 };
    float grad[2][4];
    mixp_context *c = case_context();
    mixp_tensor *x, *y;
    jvp_block_w = mixp_param(c, "w", MIXP_F32, 2, shape);
    mixp_write(jvp_block_w, v, MIXP_F32, 4);
    for (int again = 0; again < 2; again++) {
        mixp_step_begin(c);
        jvp_block_w->grad = NULL;
        x = mixp_input(c, MIXP_F32, 2, shape, v);
        mixp_tensor_set_requires_grad(x, 1);
        y = again ? mixp_recompute(c, jvp_block, c, x) : jvp_block(c, x, c);
        CHECK_INT(mixp_backward(c, mixp_sum(c, mixp_square(c, y), MIXP_ALL, 0)), MIXP_OK);
        CHECK_INT(mixp_read(jvp_block_w->grad, grad[again], MIXP_F32, 4), MIXP_OK);
    }
    CHECK(memcmp(grad[0], grad[1], sizeof grad[0]) == 0);
    mixp_step_begin(c);
    x = mixp_input(c, MIXP_F32, 2, shape, v);
    mixp_tensor_set_requires_grad(x, 1);
    y = mixp_recompute(c, jvp_block, NULL, x);
    jvp_refused(c, mixp_jvp(c, y, x, NULL), MIXP_ERR_ORDER, "made in a block of mixp_recompute");
    mixp_context_free(c);
}

enum { RECIPE_WIDTH = 32, RECIPE_LINEARS = 3 };

/* A net of linears. Bit i of the result: linear i was quantised. */
static int recipe_net(mixp_context *c, mixp_tensor **x, mixp_tensor *const *w) {
    int i, quantised = 0;
    for (i = 0; i < RECIPE_LINEARS; i++) {
        const int64_t before = mixp_autocast_recipe_counts(c).quantised;
        *x = mixp_tanh(c, mixp_linear(c, *x, w[i], NULL));
        if (mixp_autocast_recipe_counts(c).quantised > before) quantised |= 1 << i;
    }
    return quantised;
}

/* The loss after three steps. With derivatives of the net, whose tangents belong to no loss. */
static double recipe_run(mixp_recipe r, int derivatives) {
    static const char *const name[RECIPE_LINEARS] = { "w0", "w1", "w2" };
    const int64_t shape[2] = { RECIPE_WIDTH, RECIPE_WIDTH };
    float data[RECIPE_WIDTH * RECIPE_WIDTH];
    mixp_context *c = case_context();
    mixp_scaler *scaler = mixp_scaler_new(c, NULL);
    mixp_optimizer *opt = mixp_optimizer_new(c, NULL);
    mixp_tensor *w[RECIPE_LINEARS], *x, *y, *z, *loss = NULL;
    for (int i = 0; i < RECIPE_LINEARS; i++) w[i] = mixp_param(c, name[i], MIXP_F32, 2, shape);
    CHECK_INT(mixp_init_all(c, "*", mixp_init_xavier_normal, 1.0), MIXP_OK);
    CHECK_INT(mixp_optimizer_add_all(opt, "*"), MIXP_OK);
    CHECK_INT(mixp_autocast_set_recipe(c, &r), MIXP_OK);
    for (int i = 0; i < RECIPE_WIDTH * RECIPE_WIDTH; i++) data[i] = (float)((i * 37) % 64 - 32) / 16.0f;
    for (int i = 0; i < 3; i++) {
        mixp_step_begin(c);
        mixp_zero_grad(opt);
        MIXP_AUTOCAST(c, MIXP_BF16) {
            x = y = z = mixp_input(c, MIXP_F32, 2, shape, data);
            mixp_tensor_set_requires_grad(x, 1);
            CHECK_INT(recipe_net(c, &y, w), 7);
            for (int k = 0; k < derivatives; k++) CHECK(mixp_jvp(c, y, x, NULL) != NULL);
            CHECK_INT(recipe_net(c, &z, w), 7);
            loss = mixp_mse(c, mixp_add(c, y, z), mixp_detach(c, x));
        }
        CHECK_INT(mixp_backward(c, mixp_scaler_scale(scaler, loss)), MIXP_OK);
        CHECK_INT(mixp_scaler_step(scaler, opt), MIXP_OK);
        CHECK_INT(mixp_scaler_update(scaler), MIXP_OK);
    }
    double last = mixp_item(loss);
    CHECK_INT(mixp_context_error(c, NULL), MIXP_OK);
    mixp_context_free(c);
    return last;
}

/* Tangents are no linears of a recipe: delayed scales and losses stay. */
static void test_jvp_under_recipes(void) {
    for (int kind = 1; kind < MIXP_RECIPE_COUNT; kind++) {
        mixp_recipe r;
        memset(&r, 0, sizeof r);
        r.kind = (mixp_recipe_kind)kind;
        if (r.kind == MIXP_RECIPE_FP8_BLOCK) continue;      /* needs multiples of 128 */
        if (r.kind == MIXP_RECIPE_NVFP4) r.no_stochastic = r.no_hadamard = 1;
        for (int derivatives = 1; derivatives < 3; derivatives++)
            CHECK_NEAR(recipe_run(r, derivatives), recipe_run(r, 0), 0.0);
    }
}

static void jvp_run_cases(void) {
    RUN(test_jvp_beside_pytorch);
    RUN(test_jvp_beside_differences);
    RUN(test_jvp_of_a_column);
    RUN(test_jvp_of_little);
    RUN(test_jvp_refused);
    RUN(test_jvp_and_blocks);
    RUN(test_jvp_under_recipes);
}
