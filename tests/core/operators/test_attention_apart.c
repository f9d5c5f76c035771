/* test_attention_apart.c - attention with separate q, k and v, other lengths, grouped heads,
 * masks, lengths, caps and dropout. Kernels of every instruction set are compared with plain
 * double loops. The operator is compared with finite differences, with its packed form and with
 * PyTorch.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * The bounds are those of test_attention.c: E = u (4 (2d + 8) max(1, S) + 4 keys + 64) of the sums
 * of absolute terms, with u = 2^-24 and S the largest score, mask included; backward adds 2u
 * |lse|.
 */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include "examples/ops.h"
#include "test.h"
#include "arrays.h"
#include "attention_problem.h"
#include "reference/attention.h"
#include "reference/generate.h"
#include "../../../examples/qk_clip.h"

/* --- kernels against the model ------------------------------------------------------------ */

/* SIMD sets agree with each other; plain C rounds products and sums apart. AVX512_BF16 flushes
 * subnormals. Tiles add in another order and keep 16 bits of a weight. */
static void try_problem(attention_problem *s) {
    uint64_t simd = 0, plain = 0;
    for (int isa = 0; isa < MIXP_ISA_COUNT; isa++) {
        const mixp_device *dev = mixp_cpu_with((mixp_isa)isa);
        const int tiles = isa == MIXP_ISA_AMX || isa == MIXP_ISA_AMX_F16;
        uint64_t own = 0, *bits = tiles || isa == MIXP_ISA_AVX512_BF16 ? &own : &simd;
        if (!dev) continue;
        attention_check(s, dev, isa_names[isa], tiles ? ldexp(1, -16) : 0);
        attention_check_bits(s, dev, isa == MIXP_ISA_SCALAR ? &plain : bits);
    }
}

static void try_everywhere(const int64_t sizes[6], int what) {
    attention_problem s = attention_problem_new(sizes, what);
    if (what & LENGTHS) s.m.lengths = s.lengths;
    try_problem(&s);
    attention_problem_free(&s);
}

/* Every mix of what there is, at sizes of no pattern. */
static void any_mix(void) {
    for (int what = 0; what < 64; what++) {
        int64_t kv = 1 + random_to(2), group = 1 + random_to(3);
        int64_t sizes[6];
        sizes[0] = 1 + random_to(3);
        sizes[1] = 1 + random_to(40);
        sizes[2] = 1 + random_to(90);
        sizes[3] = kv * group;
        sizes[4] = kv;
        sizes[5] = 1 + random_to(24);
        try_everywhere(sizes, what);
    }
}

static void odd_sizes(void) {
    static const int64_t lengths[4] = { 1, 7, 65, 130 }, d[4] = { 32, 64, 80, 128 };
    for (int i = 0; i < 16; i++) {
        int64_t sizes[6];
        sizes[0] = 1;
        sizes[1] = lengths[i % 4];
        sizes[2] = lengths[i / 4];
        sizes[3] = 2;
        sizes[4] = 1 + i % 2;
        sizes[5] = d[(i + i / 4) % 4];
        try_everywhere(sizes, i % 3 ? (i * 7) % 32 : CAUSAL);
    }
}

/* The first queries of a block may end before a block of keys that its last ones see: what a mask has
 * of these keys is not theirs. */
static void blocks_that_some_queries_see(void) {
    static const int64_t sizes[6] = { 1, 64, 130, 2, 1, 32 };
    for (int64_t past = 3; past < 64; past += 12) {
        attention_problem s = attention_problem_new(sizes, MASK | CAUSAL);
        while (!s.mask_axes[3]) {       /* one that differs from key to key */
            attention_problem_free(&s);
            s = attention_problem_new(sizes, MASK | CAUSAL);
        }
        s.m.past = past;
        try_problem(&s);
        attention_problem_free(&s);
    }
}

/* However many keys lie before the first query's own: more than all are all. */
static void all_keys_may_lie_before(void) {
    static const int64_t sizes[6] = { 1, 33, 70, 2, 1, 16 };
    attention_problem s = attention_problem_new(sizes, CAUSAL);
    s.m.past = INT64_MAX;
    try_problem(&s);
    attention_problem_free(&s);
}

/* The model's own gradient, against central differences of its forward pass. */
static void model_gradient_is_a_gradient(void) {
    static const int64_t sizes[6] = { 2, 3, 5, 4, 2, 3 };
    attention_problem s = attention_problem_new(sizes, MASK | LENGTHS | CAP | DROPOUT | CAUSAL);
    attention_model *m = &s.m;
    double *grads[3], *values[3];
    m->lengths = s.lengths;
    m->past = 1;
    values[0] = s.values[Q];
    values[1] = s.values[K];
    values[2] = s.values[V];
    model_run(m, NULL);
    for (int which = 0; which < 3; which++) {
        grads[which] = model_zeros(s.n[Q + which]);
        memcpy(grads[which], which == 0 ? m->dq : which == 1 ? m->dk : m->dv,
               (size_t)s.n[Q + which] * sizeof(double));
    }
    for (int which = 0; which < 3; which++)
        for (int64_t i = 0; i < s.n[Q + which]; i++) {
            double v = values[which][i], sum = 0;
            for (int side = -1; side <= 1; side += 2) {
                values[which][i] = v + side * 1e-4;
                model_run(m, NULL);
                for (int64_t j = 0; j < s.n[Y]; j++) sum += side * m->y[j] * s.values[DY][j];
            }
            values[which][i] = v;
            CHECK_NEAR(sum / 2e-4, grads[which][i], 1e-6);
        }
    for (int which = 0; which < 3; which++) free(grads[which]);
    attention_problem_free(&s);
}

static void kernels_refuse(void) {
    static const int64_t sizes[6] = { 2, 3, 5, 2, 2, 4 };
    attention_problem s = attention_problem_new(sizes, 0);
    runner    r;
    mixp_exec x = runner_exec(&r, 1);
    const mixp_kernels *table = mixp_cpu()->kernels;
    mixp_attention_args k = attention_args_of(&s), bad;
    s.lengths[0] = 5;
    s.lengths[1] = 6;
    bad = k;
    bad.lengths = s.lengths;
    CHECK_INT(table->attention(&x, &bad), MIXP_ERR_ARGUMENT);
    s.lengths[1] = -1;
    CHECK_INT(table->attention(&x, &bad), MIXP_ERR_ARGUMENT);
    bad = k;
    bad.kv_heads = 3;
    CHECK_INT(table->attention(&x, &bad), MIXP_ERR_ARGUMENT);
    bad = k;
    bad.dropout = 1;
    CHECK_INT(table->attention(&x, &bad), MIXP_ERR_ARGUMENT);
    bad = k;
    bad.past = -1;
    CHECK_INT(table->attention(&x, &bad), MIXP_ERR_ARGUMENT);
    bad = k;
    bad.v.dtype = MIXP_I32;
    CHECK_INT(table->attention(&x, &bad), MIXP_ERR_DTYPE);
    CHECK(runner_end(&r));
    attention_problem_free(&s);
}

/* --- the operator ------------------------------------------------------------------------- */

static float noise(int64_t i) { return (float)((i * 2654435761u >> 7) % 2048) / 1024.0f - 1.0f; }

static mixp_tensor *param(mixp_context *c, const char *name, mixp_dtype dtype, int rank,
                          const int64_t *shape) {
    mixp_tensor *t = mixp_param(c, name, dtype, rank, shape);
    float  *v;
    int64_t i;
    if (!t) return NULL;
    v = (float *)malloc((size_t)t->count * sizeof(float));
    if (!v) exit(2);
    for (i = 0; i < t->count; i++) v[i] = noise(i + 77 * (int64_t)strlen(name) + name[0]);
    mixp_write(t, v, MIXP_F32, t->count);
    free(v);
    return t;
}

/* [b, t, 3, heads, d] cut into three, or the other way. */
static void cut(const float *packed, float *apart[3], int64_t rows, int64_t part) {
    for (int64_t i = 0; i < rows; i++)
        for (int which = 0; which < 3; which++)
            for (int64_t j = 0; j < part; j++)
                apart[which][i * part + j] = packed[(i * 3 + which) * part + j];
}

static void same_floats(mixp_tensor *t, const float *want) {
    float *v = (float *)malloc((size_t)t->count * sizeof(float));
    if (!v) exit(2);
    CHECK_INT(mixp_read(t, v, MIXP_F32, t->count), MIXP_OK);
    CHECK(memcmp(v, want, (size_t)t->count * sizeof(float)) == 0);
    free(v);
}

enum { B = 2, T = 37, H = 3, D = 8, C = H * D };

static void packed_and_apart_are_one_of(mixp_context *c, mixp_dtype dtype, int what) {
    static const int64_t wide[3] = { B, T, 3 * C }, narrow[3] = { B, T, C }, four[4] = { B, T, H, D };
    static float all[B * T * 3 * C], parts[3][B * T * C];
    static float y[B * T * C], grads[3][B * T * C];
    float *pieces[3], *grad_pieces[3];
    mixp_tensor *qkv, *p[3], *out;
    mixp_attention_desc d;
    char name[2] = "q";
    memset(&d, 0, sizeof d);
    d.heads = H;
    d.causal = what & 1;
    d.softcap = what & 2 ? 2.0f : 0.0f;
    for (int i = 0; i < 3; i++) {
        pieces[i] = parts[i];
        grad_pieces[i] = grads[i];
    }
    qkv = param(c, "qkv", dtype, 3, wide);
    mixp_read(qkv, all, MIXP_F32, qkv->count);
    cut(all, pieces, B * T, C);
    mixp_step_begin(c);
    out = what ? mixp_attention_apply(c, qkv, NULL, NULL, &d) : mixp_attention(c, qkv, H, 0, 0.0f);
    mixp_read(out, y, MIXP_F32, out->count);
    CHECK_INT(mixp_backward(c, mixp_sum(c, mixp_mul(c, out, out), MIXP_ALL, 0)), MIXP_OK);
    mixp_read(qkv->grad, all, MIXP_F32, qkv->count);
    cut(all, grad_pieces, B * T, C);
    for (int i = 0; i < 3; i++, name[0]++) {
        p[i] = i % 2 ? param(c, name, dtype, 4, four) : param(c, name, dtype, 3, narrow);
        mixp_write(p[i], parts[i], MIXP_F32, p[i]->count);
    }
    mixp_step_begin(c);
    out = mixp_attention_apply(c, p[0], p[1], p[2], &d);
    same_floats(out, y);
    CHECK_INT(mixp_backward(c, mixp_sum(c, mixp_mul(c, out, out), MIXP_ALL, 0)), MIXP_OK);
    for (int i = 0; i < 3; i++) same_floats(p[i]->grad, grads[i]);
}

static mixp_context *context_on(const mixp_device *dev) {
    mixp_context_desc d;
    memset(&d, 0, sizeof d);
    d.device = dev;
    return mixp_context_new(&d);
}

static void packed_and_apart_are_one(void) {
    static const mixp_dtype dtypes[3] = { MIXP_F32, MIXP_F16, MIXP_BF16 };
    for (int isa = 0; isa < MIXP_ISA_COUNT; isa++)
        for (int i = 0; i < 3 && mixp_cpu_with((mixp_isa)isa); i++)
            for (int what = 0; what < 4; what++) {
                mixp_context *c = context_on(mixp_cpu_with((mixp_isa)isa));
                packed_and_apart_are_one_of(c, dtypes[i], what);
                CHECK_INT(mixp_context_error(c, NULL), MIXP_OK);
                mixp_context_free(c);
            }
}

/* What gradient checks are made of; mask and lengths are inputs of each step. */
typedef struct checked {
    mixp_tensor *p[3];
    mixp_attention_desc d;
    int masks, same;
} checked;

static mixp_tensor *checked_loss(mixp_context *c, void *user) {
    static const int64_t mask_shape[4] = { 2, 1, 1, 5 }, length_shape[1] = { 2 };
    static const int32_t lengths[2] = { 4, 5 };
    static float mask[10];
    checked *s = (checked *)user;
    mixp_attention_desc d = s->d;
    for (int i = 0; i < 10; i++) mask[i] = i % 4 == 1 ? -INFINITY : 0.1f * (float)i;
    if (s->masks & 1) d.mask = mixp_input(c, MIXP_F32, 4, mask_shape, mask);
    if (s->masks & 2) d.lengths = mixp_input(c, MIXP_I32, 1, length_shape, lengths);
    mixp_tensor *y = mixp_attention_apply(c, s->p[0], s->same ? s->p[0] : s->p[1],
                             s->same ? s->p[0] : s->p[2], &d);
    return mixp_sum(c, mixp_mul(c, y, mixp_tanh(c, y)), MIXP_ALL, 0);
}

static void gradients_are_differences(void) {
    static const int64_t q[3] = { 2, 3, 8 }, k[3] = { 2, 5, 4 }, self[3] = { 2, 5, 8 };
    for (int what = 0; what < 16; what++) {
        mixp_context *c = context_on(NULL);
        checked s;
        double  worst = 1;
        memset(&s, 0, sizeof s);
        s.same = what >= 12;
        s.d.heads = 2 + 2 * (what % 2);
        s.d.kv_heads = s.same ? 0 : s.d.heads / 2;
        s.d.causal = what / 4 % 2;
        s.d.past = what % 3;
        s.d.softcap = what % 4 == 3 ? 0.7f : 0.0f;
        s.masks = s.same ? 2 * (what % 2) : what % 4;
        s.p[0] = param(c, "q", MIXP_F32, 3, s.same ? self : q);
        s.p[1] = param(c, "k", MIXP_F32, 3, k);
        s.p[2] = param(c, "v", MIXP_F32, 3, k);
        CHECK_INT(mixp_check_gradients(c, checked_loss, &s, s.same ? 1 : 3, s.p, 0, &worst), MIXP_OK);
        CHECK(worst < 2e-3);
        mixp_context_free(c);
    }
}

/* A mask of causal form has the bits of `causal`, whichever blocks are left out. */
static void a_causal_mask_is_causal(void) {
    enum { N = 150 };
    static const int64_t shape[3] = { 1, N, 16 }, square[2] = { N, N };
    static float mask[N * N], y[2][N * 16], grads[2][3][N * 16];
    for (int i = 0; i < N * N; i++) mask[i] = i % N > i / N ? -INFINITY : 0.0f;
    for (int isa = 0; isa < MIXP_ISA_COUNT; isa++) {
        const mixp_device *dev = mixp_cpu_with((mixp_isa)isa);
        for (int which = 0; which < 2 && dev; which++) {
            mixp_context *c = context_on(dev);
            mixp_tensor  *p[3], *out;
            mixp_attention_desc d;
            memset(&d, 0, sizeof d);
            d.heads = 2;
            p[0] = param(c, "q", MIXP_F32, 3, shape);
            p[1] = param(c, "k", MIXP_F32, 3, shape);
            p[2] = param(c, "v", MIXP_F32, 3, shape);
            mixp_step_begin(c);
            if (which) d.mask = mixp_input(c, MIXP_F32, 2, square, mask);
            d.causal = !which;
            out = mixp_attention_apply(c, p[0], p[1], p[2], &d);
            mixp_read(out, y[which], MIXP_F32, out->count);
            mixp_backward(c, mixp_sum(c, mixp_mul(c, out, out), MIXP_ALL, 0));
            for (int i = 0; i < 3; i++) mixp_read(p[i]->grad, grads[which][i], MIXP_F32, p[i]->count);
            CHECK_INT(mixp_context_error(c, NULL), MIXP_OK);
            mixp_context_free(c);
        }
        CHECK(memcmp(y[0], y[1], sizeof y[0]) == 0);
        CHECK(memcmp(grads[0], grads[1], sizeof grads[0]) == 0);
    }
}

/* A query that sees nothing, by its mask or its length: zeros, and gradients of zero. */
static void what_sees_nothing_is_zero(void) {
    static const int64_t shape[3] = { 2, 3, 8 }, mask_shape[2] = { 3, 1 }, length_shape[1] = { 2 };
    static const int32_t lengths[2] = { 0, 2 };
    static const float   mask[3] = { 0, -INFINITY, 0 };
    for (int by = 0; by < 2; by++) {
        mixp_context *c = context_on(NULL);
        mixp_tensor  *p[3], *y;
        mixp_attention_desc d;
        float v[48], g[48];
        memset(&d, 0, sizeof d);
        d.heads = 2;
        p[0] = param(c, "q", MIXP_F32, 3, shape);
        p[1] = param(c, "k", MIXP_F32, 3, shape);
        p[2] = param(c, "v", MIXP_F32, 3, shape);
        mixp_step_begin(c);
        if (by) d.lengths = mixp_input(c, MIXP_I32, 1, length_shape, lengths);
        else d.mask = mixp_input(c, MIXP_F32, 2, mask_shape, mask);
        y = mixp_attention_apply(c, p[0], p[1], p[2], &d);
        CHECK_INT(mixp_read(y, v, MIXP_F32, 48), MIXP_OK);
        CHECK_INT(mixp_backward(c, mixp_sum(c, y, MIXP_ALL, 0)), MIXP_OK);
        CHECK_INT(mixp_read(p[0]->grad, g, MIXP_F32, 48), MIXP_OK);
        for (int i = 0; i < 48; i++) {
            int hidden = by ? i < 24 : i / 8 % 3 == 1;
            if (hidden) CHECK(v[i] == 0.0f && g[i] == 0.0f);
            else CHECK(v[i] != 0.0f && fabsf(v[i]) < 2);
        }
        for (int n = 1; n < 3; n++) {
            CHECK_INT(mixp_read(p[n]->grad, g, MIXP_F32, 48), MIXP_OK);
            for (int i = 0; i < 48; i++) CHECK(fabsf(g[i]) < 10);
            /* Keys that are padding: the whole first sequence, the last key of the second. */
            for (int i = 0; by && i < 48; i++) CHECK(i >= 24 && i < 40 ? 1 : g[i] == 0.0f);
        }
        mixp_context_free(c);
    }
}

/* Padding that is not a number reaches nobody. */
static void padding_may_hold_anything(void) {
    static const int64_t shape[3] = { 1, 70, 32 }, length_shape[1] = { 1 };
    static const int32_t length = 66;
    mixp_context *c = context_on(NULL);
    mixp_tensor  *q = param(c, "q", MIXP_F32, 3, shape), *k = param(c, "k", MIXP_F32, 3, shape), *y;
    mixp_attention_desc d;
    static float  v[70 * 32];
    memset(&d, 0, sizeof d);
    d.heads = 1;
    mixp_read(k, v, MIXP_F32, k->count);
    for (int i = 66 * 32; i < 70 * 32; i++) v[i] = NAN;
    mixp_write(k, v, MIXP_F32, k->count);
    mixp_step_begin(c);
    d.lengths = mixp_input(c, MIXP_I32, 1, length_shape, &length);
    y = mixp_attention_apply(c, q, k, k, &d);
    mixp_read(y, v, MIXP_F32, y->count);
    for (int i = 0; i < 70 * 32; i++) CHECK(fabsf(v[i]) < 2);
    mixp_backward(c, mixp_sum(c, y, MIXP_ALL, 0));
    mixp_read(q->grad, v, MIXP_F32, q->count);
    for (int i = 0; i < 70 * 32; i++) CHECK(fabsf(v[i]) < 10);
    mixp_read(k->grad, v, MIXP_F32, k->count);
    for (int i = 0; i < 70 * 32; i++) CHECK(i < 66 * 32 ? fabsf(v[i]) < 70 : v[i] == 0.0f);
    mixp_context_free(c);
}

/* With values of 1 a result is the share of probabilities that were kept: 1 on average. Another
 * call, and another step, drop others. */
static void dropout_keeps_the_mean(void) {
    static const int64_t shape[3] = { 4, 64, 32 };
    mixp_context *c = context_on(NULL);
    mixp_tensor  *q = param(c, "q", MIXP_F32, 3, shape), *ones = mixp_param(c, "v", MIXP_F32, 3, shape);
    mixp_attention_desc d;
    static float  v[3][4 * 64 * 32];
    double sum = 0;
    memset(&d, 0, sizeof d);
    d.heads = 4;
    d.dropout = 0.5f;
    mixp_fill(ones, 1.0);
    mixp_step_begin(c);
    mixp_read(mixp_attention_apply(c, q, q, ones, &d), v[0], MIXP_F32, q->count);
    mixp_read(mixp_attention_apply(c, q, q, ones, &d), v[1], MIXP_F32, q->count);
    mixp_step_begin(c);
    mixp_read(mixp_attention_apply(c, q, q, ones, &d), v[2], MIXP_F32, q->count);
    for (int i = 0; i < 4 * 64 * 32; i += 8) sum += (double)v[0][i];
    CHECK_NEAR(sum / 1024, 1, 0.02);            /* deviation of a row's share: 1/8            */
    CHECK(memcmp(v[0], v[1], sizeof v[0]) != 0 && memcmp(v[0], v[2], sizeof v[0]) != 0);
    mixp_context_free(c);
}

/* Of fp16 under autocast, whose cast copies' gradients go to the parameters. */
static void autocast_casts_all_three(void) {
    static const int64_t shape[3] = { 2, 9, 16 };
    mixp_context *c = context_on(NULL);
    mixp_tensor  *p = param(c, "x", MIXP_F32, 3, shape), *y = NULL;
    mixp_attention_desc d;
    memset(&d, 0, sizeof d);
    d.heads = 2;
    d.causal = 1;
    mixp_step_begin(c);
    MIXP_AUTOCAST(c, MIXP_F16) { y = mixp_attention_apply(c, p, p, p, &d); }
    CHECK_INT(y->dtype, MIXP_F16);
    CHECK_INT(mixp_backward(c, mixp_sum(c, y, MIXP_ALL, 0)), MIXP_OK);
    CHECK(p->grad != NULL);
    mixp_context_free(c);
}

/* --- messages ----------------------------------------------------------------------------- */

static void refused(mixp_context *c, const mixp_tensor *y, mixp_result result, const char *text) {
    const char *why = "";
    CHECK(y == NULL);
    CHECK_INT(mixp_context_error(c, &why), result);
    CHECK_TEXT(why, text);
    mixp_context_clear_error(c);
}

static void messages_name_tensors(void) {
    static const int64_t q_shape[3] = { 2, 3, 8 }, k_shape[3] = { 2, 5, 8 }, odd[3] = { 2, 5, 6 },
                         other[3] = { 3, 5, 8 }, square[2] = { 4, 4 }, two[1] = { 2 }, three[1] = { 3 };
    static const float   mask[16] = { 0 };
    static const int32_t lengths[3] = { 1, 2, 3 }, outside[2] = { 5, 6 };
    mixp_context *c = context_on(NULL);
    mixp_tensor  *q = param(c, "h.q", MIXP_F32, 3, q_shape), *k = param(c, "h.k", MIXP_F32, 3, k_shape);
    mixp_tensor  *narrow = param(c, "h.odd", MIXP_F32, 3, odd), *far = param(c, "h.far", MIXP_F32, 3, other);
    mixp_tensor  *bias = param(c, "h.bias", MIXP_F32, 1, three);
    mixp_attention_desc d, bad;
    mixp_step_begin(c);
    memset(&d, 0, sizeof d);
    d.heads = 2;
    refused(c, mixp_attention_apply(c, q, narrow, narrow, &d), MIXP_ERR_SHAPE,
            "q 'h.q' [2, 3, 8] and k 'h.odd' [2, 5, 6] do not fit");
    refused(c, mixp_attention_apply(c, q, k, far, &d), MIXP_ERR_SHAPE,
            "q 'h.q' [2, 3, 8] and v 'h.far' [3, 5, 8] do not fit");
    refused(c, mixp_attention_apply(c, q, NULL, NULL, &d), MIXP_ERR_SHAPE, "'h.q' [2, 3, 8] does not fit");
    refused(c, mixp_attention_apply(c, q, k, NULL, &d), MIXP_ERR_ARGUMENT, "v is NULL");
    refused(c, mixp_attention_apply(c, q, k, k, NULL), MIXP_ERR_ARGUMENT, "the description is NULL");
    bad = d;
    bad.heads = 3;
    refused(c, mixp_attention_apply(c, q, k, k, &bad), MIXP_ERR_SHAPE, "q 'h.q' [2, 3, 8] does not fit");
    bad = d;
    bad.heads = 0;
    refused(c, mixp_attention_apply(c, q, k, k, &bad), MIXP_ERR_SHAPE, "q[b, t, heads, d]");
    bad = d;
    bad.heads = 4;
    bad.kv_heads = 3;
    refused(c, mixp_attention_apply(c, q, k, k, &bad), MIXP_ERR_SHAPE, "a multiple of kv_heads");
    bad = d;
    bad.kv_heads = -1;
    refused(c, mixp_attention_apply(c, q, k, k, &bad), MIXP_ERR_ARGUMENT, "kv_heads is -1");
    bad = d;
    bad.mask = mixp_input(c, MIXP_F32, 2, square, mask);
    refused(c, mixp_attention_apply(c, q, k, k, &bad), MIXP_ERR_SHAPE, "mask [4, 4] do not fit");
    bad.mask = bias;
    refused(c, mixp_attention_apply(c, q, q, q, &bad), MIXP_ERR_ARGUMENT, "the mask 'h.bias' requires");
    bad = d;
    bad.lengths = mixp_input(c, MIXP_I32, 1, three, lengths);
    refused(c, mixp_attention_apply(c, q, k, k, &bad), MIXP_ERR_SHAPE, "lengths [3] do not fit");
    bad.lengths = mixp_input(c, MIXP_F32, 1, two, mask);
    refused(c, mixp_attention_apply(c, q, k, k, &bad), MIXP_ERR_DTYPE, "lengths is f32; it must be i32");
    bad.lengths = mixp_input(c, MIXP_I32, 1, two, lengths + 1);
    CHECK(mixp_attention_apply(c, k, q, q, &bad) != NULL);
    bad.lengths = mixp_input(c, MIXP_I32, 1, two, outside);
    refused(c, mixp_attention_apply(c, q, k, k, &bad), MIXP_ERR_ARGUMENT,
            "length 6 of sequence 1 is outside [0, 5]");
    bad = d;
    bad.scale = -1;
    refused(c, mixp_attention_apply(c, q, k, k, &bad), MIXP_ERR_ARGUMENT, "scale is -1");
    bad = d;
    bad.softcap = NAN;
    refused(c, mixp_attention_apply(c, q, k, k, &bad), MIXP_ERR_ARGUMENT, "softcap is");
    bad = d;
    bad.dropout = 1;
    refused(c, mixp_attention_apply(c, q, k, k, &bad), MIXP_ERR_ARGUMENT, "dropout is 1");
    bad = d;
    bad.past = -2;
    refused(c, mixp_attention_apply(c, q, k, k, &bad), MIXP_ERR_ARGUMENT, "past is -2");
    mixp_context_free(c);
}

/* --- PyTorch ------------------------------------------------------------------------------ */

/* A recorded case: its inputs, and what came out of it. */
typedef struct recorded {
    float  *in[4], *mask, *out[4];              /* q, k, v, dy; y, dq, dk, dv                 */
    int64_t n[4], mask_shape[4], masks;         /* of inputs; of outputs they are n[3], n[0..2] */
} recorded;

static float *generated(uint32_t *gen, int64_t n) {
    float *v = (float *)malloc((size_t)n * sizeof(float));
    if (!v) exit(2);
    gen_short(gen, v, (int)n);
    return v;
}

static recorded recorded_new(const attention_case *k, int index) {
    static const char axes[] = "bhtk";
    uint32_t gen = gen_start(500u + (uint32_t)index);
    recorded r;
    int64_t  full[4], i;
    full[0] = k->b; full[1] = k->heads; full[2] = k->t; full[3] = k->keys;
    r.n[0] = r.n[3] = (int64_t)k->b * k->t * k->heads * k->d;
    r.n[1] = r.n[2] = (int64_t)k->b * k->keys * k->kv_heads * k->d;
    for (int a = 0; a < 4; a++) {
        r.in[a] = generated(&gen, r.n[a]);
        r.out[a] = (float *)malloc((size_t)r.n[(a + 3) % 4] * sizeof(float));
        if (!r.out[a]) exit(2);
    }
    r.masks = 1;
    for (int a = 0; a < 4; a++) r.masks *= r.mask_shape[a] = strchr(k->mask, axes[a]) ? full[a] : 1;
    r.mask = generated(&gen, r.masks);
    for (i = 0; i < r.masks; i++) {
        int64_t row = i / r.mask_shape[3] % r.mask_shape[2];
        if (i % 5 == 3 || (strchr(k->mask, '!') && row == 1)) r.mask[i] = -INFINITY;
    }
    return r;
}

static void recorded_free(recorded *r) {
    for (int a = 0; a < 4; a++) {
        free(r->in[a]);
        free(r->out[a]);
    }
    free(r->mask);
}

static void recorded_run(const attention_case *k, recorded *r, mixp_dtype dtype) {
    static const char *const names[3] = { "q", "k", "v" };
    mixp_context *c = context_on(mixp_cpu());
    mixp_attention_desc d;
    mixp_tensor *p[3], *y, *dy;
    int64_t shape[4], two = 2;
    int32_t lengths[2];
    memset(&d, 0, sizeof d);
    shape[0] = k->b;
    shape[3] = k->d;
    for (int a = 0; a < 3; a++) {
        shape[1] = a ? k->keys : k->t;
        shape[2] = a ? k->kv_heads : k->heads;
        p[a] = mixp_param(c, names[a], dtype, 4, shape);
        mixp_write(p[a], r->in[a], MIXP_F32, r->n[a]);
    }
    mixp_step_begin(c);
    d.causal = k->causal;
    d.past = k->past;
    d.softcap = (float)k->softcap;
    if (*k->mask) d.mask = mixp_input(c, MIXP_F32, 4, r->mask_shape, r->mask);
    for (int a = 0; a < 2; a++) lengths[a] = k->lengths[a];
    if (k->lengths[0] >= 0) d.lengths = mixp_input(c, MIXP_I32, 1, &two, lengths);
    y = mixp_attention_apply(c, p[0], p[1], p[2], &d);
    dy = mixp_input(c, MIXP_F32, 4, p[0]->shape, r->in[3]);
    CHECK_INT(mixp_backward(c, mixp_sum(c, mixp_mul(c, y, dy), MIXP_ALL, 0)), MIXP_OK);
    CHECK_INT(mixp_read(y, r->out[0], MIXP_F32, r->n[3]), MIXP_OK);
    for (int a = 0; a < 3; a++) CHECK_INT(mixp_read(p[a]->grad, r->out[1 + a], MIXP_F32, r->n[a]), MIXP_OK);
    mixp_context_free(c);
}

/* The model's results for it. */
static void recorded_model(const attention_case *k, const recorded *r, attention_model *m) {
    static const double none[1] = { 0 };
    double *mask = NULL;
    int64_t i, all = (int64_t)k->b * k->heads * k->t * k->keys;
    double *in[4];
    int32_t lengths[2];
    memset(m, 0, sizeof *m);
    m->b = k->b; m->t = k->t; m->keys = k->keys; m->heads = k->heads; m->kv_heads = k->kv_heads;
    m->d = k->d; m->causal = k->causal; m->past = k->past; m->softcap = k->softcap;
    m->scale = 1 / sqrt((double)k->d);
    for (int a = 0; a < 4; a++) {
        in[a] = model_zeros(r->n[a]);
        for (i = 0; i < r->n[a]; i++) in[a][i] = (double)r->in[a][i];
    }
    for (int a = 0; a < 2; a++) lengths[a] = k->lengths[a];
    m->lengths = k->lengths[0] >= 0 ? lengths : NULL;
    if (*k->mask) mask = model_zeros(all);
    for (i = 0; mask && i < all; i++) {
        int64_t at[4], rest = i, from = 0;
        at[3] = rest % k->keys; rest /= k->keys;
        at[2] = rest % k->t; rest /= k->t;
        at[1] = rest % k->heads;
        at[0] = rest / k->heads;
        for (int a = 0; a < 4; a++) from = from * r->mask_shape[a] + at[a] % r->mask_shape[a];
        mask[i] = (double)r->mask[from];
    }
    m->mask = mask;
    m->q = in[0]; m->k = in[1]; m->v = in[2]; m->dy = in[3];
    model_open(m);
    model_run(m, NULL);
    m->q = m->k = m->v = m->dy = none;
    m->mask = NULL;
    m->lengths = NULL;
    for (int a = 0; a < 4; a++) free(in[a]);
    free(mask);
}

static double square_error(const float *got, const double *want, int64_t n) {
    double  sum = 0;
    for (int64_t i = 0; i < n; i++) sum += ((double)got[i] - want[i]) * ((double)got[i] - want[i]);
    return sum;
}

/* Its root mean square errors: of few values, or f32's, that differ by chance, within twice. */
static void check_rms(const attention_case *k, const recorded *r, const attention_model *m, int dtype) {
    static const char *const names[3] = { "f32", "f16", "bf16" };
    double own[2], most = k->values || dtype == 0 ? 2 : 1.1;
    own[0] = sqrt(square_error(r->out[0], m->y, r->n[3]) / (double)r->n[3]);
    own[1] = square_error(r->out[1], m->dq, r->n[0]) + square_error(r->out[2], m->dk, r->n[1]);
    own[1] += square_error(r->out[3], m->dv, r->n[2]);
    own[1] = sqrt(own[1] / (double)(r->n[0] + r->n[1] + r->n[2]));
    for (int i = 0; i < 2; i++) {
        double theirs = k->rms[dtype][i];
        if (getenv("MIXPREC_TEST_SHOW"))
            printf("%-16s %-5s %s: %.3g, PyTorch's %.3g\n", k->name, names[dtype],
                   i ? "gradients" : "y", own[i], theirs);
        if (theirs <= 0 || own[i] <= most * theirs) continue;
        test_bad++;
        TEST_SHOW("%s, %s: rms error %d is %.3g, PyTorch's %.3g", k->name, names[dtype], i, own[i],
                  theirs);
    }
}

static void errors_are_no_larger_than_pytorchs(void) {
    static const mixp_dtype dtypes[3] = { MIXP_F32, MIXP_F16, MIXP_BF16 };
    for (int i = 0; i < ATTENTION_CASES; i++) {
        const attention_case *k = &attention_cases[i];
        recorded r = recorded_new(k, i);
        attention_model m;
        recorded_model(k, &r, &m);
        for (int d = 0; d < 3; d++) {
            recorded_run(k, &r, dtypes[d]);
            check_rms(k, &r, &m, d);
        }
        model_close(&m);
        recorded_free(&r);
    }
}

/* In f32, and PyTorch's in float64. */
static void values_are_pytorchs(void) {
    const double *want = attention_values;
    for (int i = 0; i < ATTENTION_CASES; i++) {
        const attention_case *k = &attention_cases[i];
        recorded r = recorded_new(k, i);
        if (k->values) recorded_run(k, &r, MIXP_F32);
        for (int a = 0; k->values && a < 4; a++) {
            int64_t n = r.n[(a + 3) % 4];
            for (int64_t j = 0; j < n; j++) CHECK_NEAR((double)r.out[a][j], want[j], 2e-6);
            want += n;
        }
        recorded_free(&r);
    }
    CHECK(want == attention_values + sizeof attention_values / sizeof *attention_values);
}

/* --- scores ------------------------------------------------------------------------------- */

enum { S_B = 2, S_T = 7, S_KEYS = 9, S_HEADS = 4, S_KV = 2, S_D = 6, S_IN = 10 };

/* q = x wq' + bq and k = x2 wk' + bk, in double. */
static void project(const float *x, const float *w, const float *bias, int64_t rows, int64_t outs, double *y) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < outs; j++) {
            y[i * outs + j] = (double)bias[j];
            for (int64_t c = 0; c < S_IN; c++) y[i * outs + j] += (double)x[i * S_IN + c] * (double)w[j * S_IN + c];
        }
}

/* For each head, the largest log-sum-exp and the largest score, by loops over queries and keys. hidden: query 0 of
 * each sequence sees no key. */
static void scores_by_loops(const double *q, const double *k, const int32_t *lengths, double *lse, double *top) {
    for (int64_t h = 0; h < S_HEADS; h++) lse[h] = top[h] = -HUGE_VAL;
    for (int64_t b = 0; b < S_B; b++)
        for (int64_t h = 0; h < S_HEADS; h++)
            for (int64_t i = 0; i < S_T; i++) {
                double sum = 0, most = -HUGE_VAL, s[S_KEYS];
                const int64_t seen = lengths[b] < i + 1 + S_KEYS - S_T ? lengths[b] : i + 1 + S_KEYS - S_T;
                for (int64_t j = 0; j < seen; j++) {
                    s[j] = 0;
                    for (int64_t c = 0; c < S_D; c++)
                        s[j] += q[((b * S_T + i) * S_HEADS + h) * S_D + c] *
                                k[((b * S_KEYS + j) * S_KV + h / (S_HEADS / S_KV)) * S_D + c];
                    s[j] /= sqrt((double)S_D);
                    most = fmax(most, s[j]);
                }
                for (int64_t j = 0; j < seen; j++) sum += exp(s[j] - most);
                if (seen) lse[h] = fmax(lse[h], most + log(sum));
                top[h] = fmax(top[h], most);
            }
}

typedef struct scored {
    mixp_context *ctx;
    mixp_tensor *w[2], *bias[2];            /* of q and of k */
    float x[2][S_B * S_KEYS * S_IN];
    int32_t lengths[S_B];
} scored;

static void scored_new(scored *s, double size) {
    const int64_t of_q[2] = { S_HEADS * S_D, S_IN }, of_k[2] = { S_KV * S_D, S_IN };
    mixp_context_desc desc;
    static float from[S_HEADS * S_D * S_IN];
    memset(&desc, 0, sizeof desc);
    s->ctx = mixp_context_new(&desc);
    s->lengths[0] = 0;                      /* no query of sequence 0 sees a key */
    s->lengths[1] = 8;
    for (int i = 0; i < 2; i++) {
        const int64_t *shape = i ? of_k : of_q;
        s->w[i] = mixp_param(s->ctx, i ? "k" : "q", MIXP_F32, 2, shape);
        s->bias[i] = mixp_param(s->ctx, i ? "kb" : "qb", MIXP_F32, 1, shape);
        for (int j = 0; j < shape[0] * S_IN; j++) from[j] = (float)(size * random_value());
        mixp_write(s->w[i], from, MIXP_F32, shape[0] * S_IN);
        mixp_write(s->bias[i], from, MIXP_F32, shape[0]);
        for (int j = 0; j < S_B * S_KEYS * S_IN; j++) s->x[i][j] = (float)random_value();
    }
}

/* Attention of two projections; turned: in PyTorch's layout. */
static mixp_tensor *scored_apply(scored *s, int turned) {
    const int64_t of_x[3] = { S_B, S_T, S_IN }, of_k[3] = { S_B, S_KEYS, S_IN }, n = S_B;
    const int64_t heads_q[4] = { S_B, S_T, S_HEADS, S_D }, heads_k[4] = { S_B, S_KEYS, S_KV, S_D };
    mixp_tensor *q = mixp_linear(s->ctx, mixp_input(s->ctx, MIXP_F32, 3, of_x, s->x[0]), s->w[0], s->bias[0]);
    mixp_tensor *k = mixp_linear(s->ctx, mixp_input(s->ctx, MIXP_F32, 3, of_k, s->x[1]), s->w[1], s->bias[1]);
    mixp_attention_desc a;
    memset(&a, 0, sizeof a);
    a.heads = S_HEADS;
    a.kv_heads = S_KV;
    a.causal = 1;
    a.past = S_KEYS - S_T;
    a.lengths = mixp_input(s->ctx, MIXP_I32, 1, &n, s->lengths);
    if (turned) {
        q = mixp_transpose(s->ctx, mixp_reshape(s->ctx, q, 4, heads_q), 1, 2);
        k = mixp_transpose(s->ctx, mixp_reshape(s->ctx, k, 4, heads_k), 1, 2);
        a.heads = a.kv_heads = 0;
        return mixp_scaled_dot_product_attention(s->ctx, q, k, k, &a);
    }
    return mixp_attention_apply(s->ctx, q, k, k, &a);
}

/* The scores of the weights that s has now, by loops. */
static void scored_loops(scored *s, double *lse, double *top) {
    static float w[2][S_HEADS * S_D * S_IN], bias[2][S_HEADS * S_D];
    static double q[S_B * S_T * S_HEADS * S_D], k[S_B * S_KEYS * S_KV * S_D];
    for (int i = 0; i < 2; i++) {
        mixp_read(s->w[i], w[i], MIXP_F32, s->w[i]->count);
        mixp_read(s->bias[i], bias[i], MIXP_F32, s->bias[i]->count);
    }
    project(s->x[0], w[0], bias[0], S_B * S_T, S_HEADS * S_D, q);
    project(s->x[1], w[1], bias[1], S_B * S_KEYS, S_KV * S_D, k);
    scores_by_loops(q, k, s->lengths, lse, top);
}

static void scores_are_told(void) {
    static scored s;
    double lse[S_HEADS], top[S_HEADS], all = 0;
    float most[S_HEADS], twice[S_HEADS];
    mixp_site_info info;
    mixp_optimizer_desc sgd = mixp_sgd_defaults();
    int turned, h, i, seen = 0;
    scored_new(&s, 1.0);
    sgd.lr = 0;
    mixp_optimizer *opt = mixp_optimizer_new(s.ctx, &sgd);
    CHECK_INT(mixp_optimizer_add_all(opt, "*"), MIXP_OK);
    CHECK_INT(mixp_guard_start(s.ctx, NULL), MIXP_OK);
    scored_loops(&s, lse, top);
    for (turned = 0; turned < 2; turned++) {
        const int64_t count = S_B * S_T * S_HEADS * S_D;
        mixp_step_begin(s.ctx);
        mixp_tensor *y = scored_apply(&s, turned);
        CHECK_INT(mixp_attention_scores(y, S_HEADS, most), MIXP_OK);
        for (h = 0; h < S_HEADS; h++) {
            CHECK_NEAR((double)most[h], lse[h], 1e-5 * fabs(lse[h]) + 1e-5);
            CHECK((double)most[h] > top[h] - 1e-4 && (double)most[h] < top[h] + log((double)S_KEYS) + 1e-4);
        }
        mixp_backward(s.ctx, mixp_sum(s.ctx, mixp_reshape(s.ctx, y, 1, &count), 0, 0));
        CHECK_INT(mixp_optimizer_step(opt), MIXP_OK);
        CHECK_INT(mixp_attention_scores(y, S_HEADS, twice), MIXP_OK);
        CHECK(memcmp(most, twice, sizeof most) == 0);
    }

    /* The guard's number: of all heads, and of no other site. The sample settles at the next step. */
    for (h = 0; h < S_HEADS; h++) all = fmax(all, (double)most[h]);
    mixp_step_begin(s.ctx);
    for (i = 0; mixp_site(s.ctx, i, &info); i++) {
        if (strcmp(info.op, "attention") != 0) CHECK(info.scores == 0);
        else if (info.samples) {
            CHECK_NEAR((double)info.scores, all, 1e-6 * all);
            CHECK(!info.fallen && info.operands == 0);
            seen++;
        }
    }
    CHECK(seen > 0);
    mixp_context_free(s.ctx);
}

static void scores_are_refused(void) {
    static scored s;
    float most[S_HEADS] = { 7, 7, 7, 7 };
    const char *why;
    scored_new(&s, 1.0);
    CHECK_INT(mixp_attention_scores(NULL, S_HEADS, most), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_attention_scores(s.w[0], S_HEADS, most), MIXP_ERR_ORDER);
    mixp_context_error(s.ctx, &why);
    CHECK_TEXT(why, "y is not a recorded result of attention");
    mixp_context_clear_error(s.ctx);
    mixp_step_begin(s.ctx);
    mixp_tensor *y = scored_apply(&s, 0);
    CHECK_INT(mixp_attention_scores(y, S_KV, most), MIXP_ERR_ARGUMENT);
    mixp_context_error(s.ctx, &why);
    CHECK_TEXT(why, "heads is wrong; the attention has 4 heads");
    mixp_context_clear_error(s.ctx);
    CHECK_INT(mixp_attention_scores(y, S_HEADS, NULL), MIXP_ERR_ARGUMENT);
    mixp_context_clear_error(s.ctx);
    CHECK_INT(mixp_attention_scores(mixp_neg(s.ctx, y), S_HEADS, most), MIXP_ERR_ORDER);
    mixp_context_clear_error(s.ctx);
    MIXP_NO_GRAD(s.ctx) y = scored_apply(&s, 0);
    CHECK_INT(mixp_attention_scores(y, S_HEADS, most), MIXP_ERR_ORDER);
    mixp_context_clear_error(s.ctx);
    CHECK(most[0] == 7 && most[3] == 7);
    s.lengths[1] = 0;
    CHECK_INT(mixp_attention_scores(scored_apply(&s, 0), S_HEADS, most), MIXP_OK);
    CHECK(most[0] < 0 && mixp_bits_of_f32(most[0]) == 0xFF800000u);
    mixp_context_free(s.ctx);
}

/* An empty batch, and no queries: no query counts. */
static void scores_of_nothing(void) {
    static scored s;
    scored_new(&s, 1.0);
    CHECK_INT(mixp_guard_start(s.ctx, NULL), MIXP_OK);
    for (int no_queries = 0; no_queries < 2; no_queries++) {
        const int64_t of_q[3] = { no_queries ? 2 : 0, no_queries ? 0 : S_T, S_IN };
        const int64_t of_k[3] = { no_queries ? 2 : 0, S_KEYS, S_IN };
        float most[S_HEADS] = { 7, 7, 7, 7 };
        mixp_attention_desc a;
        memset(&a, 0, sizeof a);
        a.heads = S_HEADS;
        a.kv_heads = S_KV;
        mixp_step_begin(s.ctx);
        mixp_tensor *q = mixp_linear(s.ctx, mixp_input(s.ctx, MIXP_F32, 3, of_q, s.x[0]), s.w[0], s.bias[0]);
        mixp_tensor *k = mixp_linear(s.ctx, mixp_input(s.ctx, MIXP_F32, 3, of_k, s.x[1]), s.w[1], s.bias[1]);
        mixp_tensor *y = mixp_attention_apply(s.ctx, q, k, k, &a);
        CHECK(y && y->count == 0);
        CHECK_INT(mixp_attention_scores(y, S_HEADS, most), MIXP_OK);
        for (int h = 0; h < S_HEADS; h++) CHECK_INT(mixp_bits_of_f32(most[h]), 0xFF800000u);
        MIXP_NO_GRAD(s.ctx) y = mixp_attention_apply(s.ctx, q, k, k, &a);
        CHECK_INT(mixp_attention_scores(y, S_HEADS, most), MIXP_ERR_ORDER);
        mixp_context_clear_error(s.ctx);
    }
    mixp_context_free(s.ctx);
}

/* What the guard saw of the attention's scores. A mask adds `hides` to all scores of the first queries, and `shifts`
 * to the others. *all: the largest of mixp_attention_scores. */
static float scores_under_a_mask(float hides, float shifts, double *all) {
    static scored s;
    const int64_t of_q[3] = { S_B, S_T, S_IN }, of_k[3] = { S_B, S_KEYS, S_IN }, of_mask[2] = { S_T, S_KEYS };
    float mask[S_T * S_KEYS], most[S_HEADS], seen = -1;
    mixp_attention_desc a;
    mixp_site_info info;
    int i;
    scored_new(&s, 1.0);
    memset(&a, 0, sizeof a);
    a.heads = S_HEADS;
    a.kv_heads = S_KV;
    CHECK_INT(mixp_guard_start(s.ctx, NULL), MIXP_OK);
    for (i = 0; i < S_T * S_KEYS; i++) mask[i] = i < 2 * S_KEYS ? hides : shifts;
    mixp_step_begin(s.ctx);
    mixp_tensor *q = mixp_linear(s.ctx, mixp_input(s.ctx, MIXP_F32, 3, of_q, s.x[0]), s.w[0], s.bias[0]);
    mixp_tensor *k = mixp_linear(s.ctx, mixp_input(s.ctx, MIXP_F32, 3, of_k, s.x[1]), s.w[1], s.bias[1]);
    a.mask = mixp_input(s.ctx, MIXP_F32, 2, of_mask, mask);
    mixp_tensor *y = mixp_attention_apply(s.ctx, q, k, k, &a);
    CHECK_INT(mixp_attention_scores(y, S_HEADS, most), MIXP_OK);
    for (*all = (double)most[0], i = 1; i < S_HEADS; i++) *all = fmax(*all, (double)most[i]);
    mixp_step_begin(s.ctx);
    for (i = 0; mixp_site(s.ctx, i, &info); i++)
        if (strcmp(info.op, "attention") == 0) seen = info.scores;
    mixp_context_free(s.ctx);
    return seen;
}

/* A finite mask that hides all keys of a query is no score; without it, the number is the same. */
static void a_finite_mask_is_no_score(void) {
    static const float hides[] = { -1e30f, -3.4e38f, -65504.0f, -1e4f, -INFINITY };
    double all, masked;
    const float seen = scores_under_a_mask(0, 0, &all);
    CHECK_NEAR((double)seen, all, 1e-6 * all);
    CHECK(all > 1);
    for (size_t i = 0; i < sizeof hides / sizeof *hides; i++) {
        const float one = scores_under_a_mask(hides[i], 0, &masked);
        CHECK(masked > 1);
        CHECK_NEAR((double)one, masked, 1e-6 * masked);
    }
    CHECK(scores_under_a_mask(0, 90, &masked) > 90 && masked > 90);
    CHECK(scores_under_a_mask(-90, -90, &masked) == 0 && masked < 0);
}

/* QK-clip: each head's scores are multiplied by its own factor; none stays above tau. */
static void clipped_scores(void) {
    static scored s;
    double lse[S_HEADS], top[S_HEADS], after_lse[S_HEADS], after[S_HEADS], tau;
    float most[S_HEADS];
    qk_clip_rows rows;
    int h, clipped = 0, left = 0;
    scored_new(&s, 4.0);
    memset(&rows, 0, sizeof rows);
    rows.q = s.w[0];
    rows.q_bias = s.bias[0];
    rows.k = s.w[1];
    rows.k_bias = s.bias[1];
    rows.heads = S_HEADS;
    rows.kv_heads = S_KV;
    rows.d = S_D;
    scored_loops(&s, lse, top);
    mixp_step_begin(s.ctx);
    CHECK_INT(mixp_attention_scores(scored_apply(&s, 0), S_HEADS, most), MIXP_OK);
    tau = (double)most[0];
    for (h = 1; h < S_HEADS; h++) tau = fmin(tau, (double)most[h]);
    tau *= 1.01;                            /* one head is below */
    CHECK_INT(qk_clip(&rows, most, tau), MIXP_OK);
    scored_loops(&s, after_lse, after);
    for (h = 0; h < S_HEADS; h++) {
        const double factor = (double)most[h] > tau ? tau / (double)most[h] : 1.0;
        CHECK_NEAR(after[h], top[h] * factor, 1e-5 * fabs(top[h]));
        CHECK(after[h] <= tau * (1 + 1e-6));
        clipped += factor < 1;
        left += factor == 1;
    }
    CHECK(clipped > 0 && left == 1);
    rows.q_row = 1;
    for (h = 0; h < S_HEADS; h++) most[h] = (float)tau * 2;
    CHECK_INT(qk_clip(&rows, most, tau), MIXP_ERR_SHAPE);
    most[1] = mixp_f32_of_bits(0x7F800000u);
    CHECK(qk_clip_factor(most[1], tau) == 1.0 && qk_clip_factor(mixp_f32_of_bits(0x7FC00000u), tau) == 1.0);
    mixp_context_free(s.ctx);
}

int main(void) {
    (void)gen_fill;
    (void)gen_ints;
    RUN(values_are_pytorchs);
    RUN(errors_are_no_larger_than_pytorchs);
    RUN(model_gradient_is_a_gradient);
    RUN(any_mix);
    RUN(odd_sizes);
    RUN(blocks_that_some_queries_see);
    RUN(all_keys_may_lie_before);
    RUN(kernels_refuse);
    RUN(packed_and_apart_are_one);
    RUN(gradients_are_differences);
    RUN(a_causal_mask_is_causal);
    RUN(what_sees_nothing_is_zero);
    RUN(padding_may_hold_anything);
    RUN(dropout_keeps_the_mean);
    RUN(autocast_casts_all_three);
    RUN(messages_name_tensors);
    RUN(scores_are_told);
    RUN(scores_are_refused);
    RUN(scores_of_nothing);
    RUN(a_finite_mask_is_no_score);
    RUN(clipped_scores);
    return test_report();
}
