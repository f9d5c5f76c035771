/* attention_problem.h - an attention of any kind for tests of kernels: random arrays, the arguments
 * of a kernel, and the comparison of its results with the model of attention_model.h.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * Include it after mixprec.h, test.h and arrays.h.
 */
#ifndef ATTENTION_PROBLEM_H
#define ATTENTION_PROBLEM_H
#include "attention_model.h"

enum { Q, K, V, DY, Y, DQ, DK, DV, ARRAYS };

typedef struct attention_problem {
    attention_model m;
    test_array a[ARRAYS], old[3], mask;
    int64_t    n[ARRAYS];
    int        mask_axes[4];            /* 1: the mask has this one of b, heads, t, keys      */
    float     *lse;
    double    *values[4], *mask_values, error;
    int32_t    lengths[4];
    int        accumulate;
} attention_problem;

/* What a problem has. */
enum { MASK = 1, LENGTHS = 2, CAP = 4, DROPOUT = 8, CAUSAL = 16, HIDDEN_ROWS = 32 };

static inline test_array attention_random(mixp_dtype dtype, int64_t n, double range) {
    test_array a = array_new(dtype, n);
    for (int64_t i = 0; i < n; i++) array_set(a, i, range * random_value());
    return a;
}

static inline double *attention_decoded(test_array a, int64_t n) {
    double *p = model_zeros(n);
    for (int64_t i = 0; i < n; i++) p[i] = array_get(a, i);
    return p;
}

/* A mask over some of the axes, with -Inf here and there: over a whole row where rows are hidden. Two masks in three have only
 * 0 and -Inf: documents of equal length, of which every other one is hidden, or none. */
static inline void attention_problem_mask(attention_problem *s, int what) {
    attention_model *m = &s->m;
    int64_t full[4], i, at[4], n = 1, stride[4];
    full[0] = m->b; full[1] = m->heads; full[2] = m->t; full[3] = m->keys;
    for (int axis = 3; axis >= 0; axis--) {
        s->mask_axes[axis] = random_to(3) > 0;
        stride[axis] = s->mask_axes[axis] ? n : 0;
        n *= s->mask_axes[axis] ? full[axis] : 1;
    }
    s->mask = attention_random(random_dtype(), n, 2);
    const int64_t length = 1 + random_to(100), kind = random_to(3);
    for (i = 0; i < n; i++) {
        const int64_t row = s->mask_axes[3] ? i / m->keys : i, key = s->mask_axes[3] ? i % m->keys : 1;
        if (kind) array_set(s->mask, i, kind == 1 && key / length % 2 ? -INFINITY : 0);
        else if (random_to(4) == 0 && s->mask_axes[3]) array_set(s->mask, i, -INFINITY);
        if (!kind && key == 0) array_set(s->mask, i, 0.5);
        if (what & HIDDEN_ROWS && row % 3 == 1) array_set(s->mask, i, -INFINITY);
    }
    s->mask_values = model_zeros(m->b * m->heads * m->t * m->keys);
    for (i = 0; i < m->b * m->heads * m->t * m->keys; i++) {
        int64_t from = 0, rest = i;
        for (int axis = 3; axis >= 0; axis--) {
            at[axis] = rest % full[axis];
            rest /= full[axis];
            from += at[axis] * stride[axis];
        }
        s->mask_values[i] = array_get(s->mask, from);
    }
    m->mask = s->mask_values;
}

/* dtypes: of q, k, v, dy, y, dq, dk and dv. sizes: b, t, keys, heads, kv_heads, d. */
static inline attention_problem attention_problem_of(const int64_t sizes[6], int what,
                                                     const mixp_dtype dtypes[ARRAYS]) {
    attention_problem s;
    attention_model *m = &s.m;
    int i;
    memset(&s, 0, sizeof s);
    m->b = sizes[0];
    m->t = sizes[1];
    m->keys = sizes[2];
    m->heads = sizes[3];
    m->kv_heads = sizes[4];
    m->d = sizes[5];
    m->causal = (what & CAUSAL) != 0;
    m->past = m->causal ? random_to(3) * random_to(70) : 0;
    m->scale = (double)(1.3f / sqrtf((float)m->d));
    m->softcap = what & CAP ? 1.5 : 0;
    m->dropout = what & DROPOUT ? 0.25 : 0;
    m->seed = 7;
    m->step = 11;
    m->tensor = 13;
    s.accumulate = random_to(2);
    s.n[Q] = s.n[DY] = s.n[Y] = s.n[DQ] = m->b * m->t * m->heads * m->d;
    s.n[K] = s.n[V] = s.n[DK] = s.n[DV] = m->b * m->keys * m->kv_heads * m->d;
    for (i = 0; i < ARRAYS; i++) s.a[i] = attention_random(dtypes[i], s.n[i], 1.5);
    for (i = 0; i < 4; i++) s.values[i] = attention_decoded(s.a[i], s.n[i]);
    for (i = 0; i < 3; i++) {
        s.old[i] = array_new(s.a[DQ + i].dtype, s.n[DQ + i]);
        memcpy(s.old[i].data, s.a[DQ + i].data,
               (size_t)s.n[DQ + i] * mixp_dtype_size(s.old[i].dtype));
    }
    m->q = s.values[Q];
    m->k = s.values[K];
    m->v = s.values[V];
    m->dy = s.values[DY];
    s.lse = (float *)array_new(MIXP_F32, m->b * m->heads * m->t).data;
    if (what & MASK) attention_problem_mask(&s, what);
    for (i = 0; i < 4; i++) s.lengths[i] = i % 2 ? (int32_t)m->keys : random_to((int)m->keys + 1);
    if (what & HIDDEN_ROWS) s.lengths[0] = 0;
    model_open(m);
    return s;
}

static inline attention_problem attention_problem_new(const int64_t sizes[6], int what) {
    mixp_dtype dtypes[ARRAYS];
    for (int i = 0; i < ARRAYS; i++) dtypes[i] = random_dtype();
    return attention_problem_of(sizes, what, dtypes);
}

static inline void attention_problem_free(attention_problem *s) {
    for (int i = 0; i < ARRAYS; i++) array_free(s->a[i]);
    for (int i = 0; i < 3; i++) array_free(s->old[i]);
    for (int i = 0; i < 4; i++) free(s->values[i]);
    if (s->mask.data) array_free(s->mask);
    free(s->mask_values);
    free((char *)s->lse - ARRAY_GUARD);
    model_close(&s->m);
}

static inline mixp_head_strides attention_dense(int64_t rows, int64_t heads, int64_t d) {
    mixp_head_strides at;
    at.head = d;
    at.row = heads * d;
    at.sequence = rows * at.row;
    return at;
}

static inline mixp_attention_args attention_args_of(const attention_problem *s) {
    const attention_model *m = &s->m;
    mixp_attention_args k;
    int64_t step = 1;
    memset(&k, 0, sizeof k);
    k.b = m->b;
    k.t = m->t;
    k.keys = m->keys;
    k.heads = m->heads;
    k.kv_heads = m->kv_heads;
    k.d = m->d;
    k.causal = m->causal;
    k.past = m->past;
    k.scale = (float)m->scale;
    k.softcap = (float)m->softcap;
    k.dropout = (float)m->dropout;
    k.seed = m->seed;
    k.step = m->step;
    k.tensor = m->tensor;
    k.q = args_in(s->a[Q]);
    k.k = args_in(s->a[K]);
    k.v = args_in(s->a[V]);
    k.q_at = attention_dense(m->t, m->heads, m->d);
    k.k_at = k.v_at = attention_dense(m->keys, m->kv_heads, m->d);
    k.lengths = m->lengths;
    k.y = args_out(s->a[Y], 0);
    k.lse = s->lse;
    if (!s->mask.data) return k;
    k.mask = args_in(s->mask);
    k.mask_key = s->mask_axes[3];
    step = s->mask_axes[3] ? m->keys : 1;
    k.mask_at.row = s->mask_axes[2] ? step : 0;
    step *= s->mask_axes[2] ? m->t : 1;
    k.mask_at.head = s->mask_axes[1] ? step : 0;
    step *= s->mask_axes[1] ? m->heads : 1;
    k.mask_at.sequence = s->mask_axes[0] ? step : 0;
    return k;
}

static inline void attention_forward(const mixp_device *dev, const attention_problem *s,
                                     int threads) {
    runner    r;
    mixp_exec x = runner_exec(&r, threads);
    mixp_attention_args k = attention_args_of(s);
    CHECK_INT(dev->kernels->attention(&x, &k), MIXP_OK);
    CHECK(runner_end(&r));
}

static inline void attention_backward(const mixp_device *dev, const attention_problem *s,
                                      int threads) {
    runner    r;
    mixp_exec x = runner_exec(&r, threads);
    mixp_attention_backward_args k;
    int64_t i;
    int     g;
    memset(&k, 0, sizeof k);
    k.forward = attention_args_of(s);
    k.dy = args_in(s->a[DY]);
    for (g = 0; g < 3; g++) {
        memcpy(s->a[DQ + g].data, s->old[g].data,
               (size_t)s->n[DQ + g] * mixp_dtype_size(s->old[g].dtype));
        for (i = 0; !s->accumulate && i < s->n[DQ + g]; i++) array_set(s->a[DQ + g], i, NAN);
    }
    k.dq = args_out(s->a[DQ], s->accumulate);
    k.dk = args_out(s->a[DK], s->accumulate);
    k.dv = args_out(s->a[DV], s->accumulate);
    CHECK_INT(dev->kernels->attention_backward(&x, &k), MIXP_OK);
    CHECK(runner_end(&r));
}

/* How many halves of a unit in the last place storing element i of an array may be off. */
static inline int attention_halves(const attention_problem *s, int which, int64_t i) {
    const attention_model *m = &s->m;
    const int64_t at = i / m->d / m->heads, h = i / m->d % m->heads;
    if (which != Y || s->a[which].dtype == MIXP_F32) return 1;
    return m->tossed[(at / m->t * m->heads + h) * m->t + at % m->t] ? 2 : 1;
}

static inline void attention_close_to(const attention_problem *s, const char *who, int which,
                                      const double *want, const double *size) {
    int64_t i;
    for (i = 0; i < s->n[which]; i++) {
        int    adds = which >= DQ && s->accumulate;
        double old = adds ? array_get(s->old[which - DQ], i) : 0, v = array_get(s->a[which], i);
        double w = want[i] + old;
        double bound = s->error * (size[i] + fabs(old)) +
                       attention_halves(s, which, i) * half_ulp(s->a[which].dtype, w);
        if (fabs(v - w) <= bound) continue;
        test_bad++;
        TEST_SHOW("%s b%d t%d keys%d heads%d/%d d%d: array %d [%d] %.9g not %.9g +- %.2g", who,
                  (int)s->m.b, (int)s->m.t, (int)s->m.keys, (int)s->m.heads, (int)s->m.kv_heads,
                  (int)s->m.d, which, (int)i, v, w, bound);
        return;
    }
    CHECK(array_guarded(s->a[which], s->n[which]));
}

/* The largest size of a score, and of an lse. */
static inline double attention_largest_of(const attention_problem *s, double *lse) {
    double  most = 1 + s->m.largest;
    int64_t i, n = s->m.b * s->m.heads * s->m.t;
    *lse = 0;
    for (i = 0; i < n; i++)
        if (s->m.lse[i] < INFINITY && fabs(s->m.lse[i]) > *lse) *lse = fabs(s->m.lse[i]);
    return s->mask.data ? most + 2 : most;
}

/* The error of a forward pass, as a part of the sums of absolute terms: see test_attention.c. */
static inline double attention_problem_error(const attention_problem *s) {
    double lse, largest = attention_largest_of(s, &lse);
    return ldexp(4 * (2 * (double)s->m.d + 8) * largest + 4 * (double)s->m.keys + 64, -24);
}

/* Runs both passes and compares them with the model. rounded: a further error of weights. */
static inline void attention_check(attention_problem *s, const mixp_device *dev, const char *who,
                                   double rounded) {
    attention_model *m = &s->m;
    double *y, lse;
    int64_t i, rows = m->b * m->heads * m->t;
    attention_forward(dev, s, 0);
    y = attention_decoded(s->a[Y], s->n[Y]);
    model_run(m, y);
    (void)attention_largest_of(s, &lse);
    s->error = attention_problem_error(s) + rounded;
    attention_close_to(s, who, Y, m->y, m->y_size);
    for (i = 0; i < rows; i++)
        CHECK(s->lse[i] == m->lse[i] ||
              fabs((double)s->lse[i] - m->lse[i]) <= s->error * (1 + fabs(m->lse[i])));
    s->error += ldexp(2 * lse, -24);
    attention_backward(dev, s, 0);
    attention_close_to(s, who, DQ, m->dq, m->dq_size);
    attention_close_to(s, who, DK, m->dk, m->dk_size);
    attention_close_to(s, who, DV, m->dv, m->dv_size);
    free(y);
}

/* Any threads, the same bits; and the same as `bits` when that is given, which they are put in. */
static inline void attention_check_bits(const attention_problem *s, const mixp_device *dev,
                                        uint64_t *bits) {
    static const int threads[3] = { 0, 3, 8 };
    int i, which;
    for (i = 0; i < 3; i++) {
        uint64_t hash = 14695981039346656037u;
        attention_forward(dev, s, threads[i]);
        attention_backward(dev, s, threads[i]);
        for (which = Y; which < ARRAYS; which++) {
            const unsigned char *p = (const unsigned char *)s->a[which].data;
            size_t n = (size_t)s->n[which] * mixp_dtype_size(s->a[which].dtype), j;
            for (j = 0; j < n; j++) hash = (hash ^ p[j]) * 1099511628211u;
        }
        CHECK(!*bits || *bits == hash);
        *bits = hash;
    }
}

#endif
