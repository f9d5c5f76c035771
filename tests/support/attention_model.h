/* attention_model.h - attention of any kind in plain double loops, for tests on every device.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * Arrays are dense: q, y, dy [b, t, heads, d]; k, v [b, keys, kv_heads, d]; mask [b, heads, t,
 * keys]. For each result the model also keeps the sum of the absolute values of its terms.
 */
#ifndef ATTENTION_MODEL_H
#define ATTENTION_MODEL_H
#include "mixprec.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct attention_model {
    int64_t  b, t, keys, heads, kv_heads, d, past;
    int      causal;
    double   scale, softcap, dropout;
    uint64_t seed, step, tensor;
    const double  *q, *k, *v, *dy, *mask;       /* mask NULL: none                            */
    const int32_t *lengths;
    double *y, *lse, *dq, *dk, *dv;
    double *y_size, *dq_size, *dk_size, *dv_size;
    unsigned char *tossed;                      /* rows of lse whose y may be rounded up or down, not to nearest:
                                                   their largest score repeats              */
    double  largest;                            /* of a score's sum of absolute terms         */
} attention_model;

static inline int64_t model_q(const attention_model *m, int64_t s, int64_t h, int64_t i)
{ return ((s * m->t + i) * m->heads + h) * m->d; }
static inline int64_t model_k(const attention_model *m, int64_t s, int64_t h, int64_t j)
{ return ((s * m->keys + j) * m->kv_heads + h / (m->heads / m->kv_heads)) * m->d; }

static inline int model_sees(const attention_model *m, int64_t s, int64_t i, int64_t j) {
    if (m->lengths && j >= m->lengths[s]) return 0;
    return !m->causal || j - i <= m->past;
}

/* The factor of a probability: 0, or 1 / (1 - dropout). */
static inline double model_kept(const attention_model *m, int64_t s, int64_t h, int64_t i, int64_t j) {
    uint64_t element = (uint64_t)(((s * m->heads + h) * m->t + i) * m->keys + j);
    uint32_t random = mixp_random_u32(m->seed, m->step, m->tensor, element);
    if ((double)random < m->dropout * 4294967296.0) return 0;
    return 1 / (1 - m->dropout);
}

static inline double model_dot(const double *a, const double *b, int64_t n, double *size) {
    double  sum = 0;
    *size = 0;
    for (int64_t e = 0; e < n; e++) {
        sum += a[e] * b[e];
        *size += fabs(a[e] * b[e]);
    }
    return sum;
}

/* The score of a query and a key before the mask, and how it grows with q k'. */
static inline double model_score(attention_model *m, const double *q, const double *k, double *slope) {
    double size, s = m->scale * model_dot(q, k, m->d, &size), t;
    if (size * fabs(m->scale) > m->largest) m->largest = size * fabs(m->scale);
    *slope = 1;
    if (m->softcap <= 0) return s;
    t = tanh(s / m->softcap);
    *slope = 1 - t * t;
    return m->softcap * t;
}

/* What a query passes back, once its probabilities are known. */
static inline void model_row_grads(attention_model *m, int64_t s, int64_t h, int64_t i, const double *p,
                                   const double *slope) {
    int64_t q = model_q(m, s, h, i), j, e;
    double  size, delta = model_dot(m->dy + q, m->y + q, m->d, &size), delta_size = size;
    for (j = 0; j < m->keys; j++) {
        int64_t k = model_k(m, s, h, j);
        double  kept = m->dropout > 0 ? model_kept(m, s, h, i, j) : 1;
        double  dp = model_dot(m->dy + q, m->v + k, m->d, &size) * kept;
        double  g = p[j] * (dp - delta) * slope[j] * m->scale;
        double  g_size = p[j] * (size * kept + delta_size) * fabs(m->scale);
        if (!model_sees(m, s, i, j)) continue;
        for (e = 0; e < m->d; e++) {
            m->dq[q + e] += g * m->k[k + e];
            m->dk[k + e] += g * m->q[q + e];
            m->dv[k + e] += p[j] * kept * m->dy[q + e];
            m->dq_size[q + e] += g_size * fabs(m->k[k + e]);
            m->dk_size[k + e] += g_size * fabs(m->q[q + e]);
            m->dv_size[k + e] += p[j] * kept * fabs(m->dy[q + e]);
        }
    }
}

static inline void model_row(attention_model *m, int64_t s, int64_t h, int64_t i, double *p,
                             double *slope) {
    int64_t q = model_q(m, s, h, i), row = (s * m->heads + h) * m->t + i, j, e;
    double  top = -INFINITY, sum = 0;
    for (j = 0; j < m->keys; j++) {
        p[j] = -INFINITY;
        slope[j] = 0;
        if (!model_sees(m, s, i, j)) continue;
        p[j] = model_score(m, m->q + q, m->k + model_k(m, s, h, j), &slope[j]);
        if (m->mask) p[j] += m->mask[row * m->keys + j];
        top = p[j] > top ? p[j] : top;
    }
    for (j = 0; j < m->keys; j++) sum += p[j] = top > -INFINITY ? exp(p[j] - top) : 0;
    m->lse[row] = sum > 0 ? top + log(sum) : INFINITY;
    m->tossed[row] = sum > 1.4 && sum < 8.6 && fabs(sum - rint(sum)) < 0.00026;
    for (j = 0; j < m->keys; j++) {
        double kept = m->dropout > 0 ? model_kept(m, s, h, i, j) : 1;
        p[j] = sum > 0 ? p[j] / sum : 0;
        for (e = 0; p[j] > 0 && e < m->d; e++) {
            double term = p[j] * kept * m->v[model_k(m, s, h, j) + e];
            m->y[q + e] += term;
            m->y_size[q + e] += fabs(term);
        }
    }
}

static inline double *model_zeros(int64_t n) {
    double *p = (double *)calloc((size_t)n + 1, sizeof(double));
    if (!p) exit(2);
    return p;
}

/* y given: the gradients start from that y, as a kernel's do; NULL: from the model's own. */
static inline void model_run(attention_model *m, const double *y) {
    int64_t nq = m->b * m->t * m->heads * m->d, nk = m->b * m->keys * m->kv_heads * m->d;
    double *p = model_zeros(m->keys), *slope = model_zeros(m->keys), *keep = model_zeros(nq);
    memset(m->y, 0, (size_t)nq * sizeof(double));
    memset(m->y_size, 0, (size_t)nq * sizeof(double));
    memset(m->dq, 0, (size_t)nq * sizeof(double));
    memset(m->dq_size, 0, (size_t)nq * sizeof(double));
    memset(m->dk, 0, (size_t)nk * sizeof(double));
    memset(m->dk_size, 0, (size_t)nk * sizeof(double));
    memset(m->dv, 0, (size_t)nk * sizeof(double));
    memset(m->dv_size, 0, (size_t)nk * sizeof(double));
    for (int64_t s = 0; s < m->b; s++)
        for (int64_t h = 0; h < m->heads; h++)
            for (int64_t i = 0; i < m->t; i++) {
                int64_t q = model_q(m, s, h, i);
                model_row(m, s, h, i, p, slope);
                memcpy(keep + q, m->y + q, (size_t)m->d * sizeof(double));
                if (y) memcpy(m->y + q, y + q, (size_t)m->d * sizeof(double));
                if (m->dy) model_row_grads(m, s, h, i, p, slope);
                memcpy(m->y + q, keep + q, (size_t)m->d * sizeof(double));
            }
    free(p);
    free(slope);
    free(keep);
}

/* Room for the results. */
static inline void model_open(attention_model *m) {
    int64_t nq = m->b * m->t * m->heads * m->d, nk = m->b * m->keys * m->kv_heads * m->d;
    m->y = model_zeros(nq);
    m->y_size = model_zeros(nq);
    m->lse = model_zeros(m->b * m->heads * m->t);
    m->tossed = (unsigned char *)model_zeros(m->b * m->heads * m->t);
    m->dq = model_zeros(nq);
    m->dq_size = model_zeros(nq);
    m->dk = model_zeros(nk);
    m->dk_size = model_zeros(nk);
    m->dv = model_zeros(nk);
    m->dv_size = model_zeros(nk);
}

static inline void model_close(attention_model *m) {
    free(m->y);
    free(m->y_size);
    free(m->lse);
    free(m->tossed);
    free(m->dq);
    free(m->dq_size);
    free(m->dk);
    free(m->dk_size);
    free(m->dv);
    free(m->dv_size);
}

#endif
