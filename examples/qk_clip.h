/* qk_clip.h - QK-clip: limits attention's scores by rescaling the weights of queries and keys
 * (Kimi K2, arXiv 2507.20534, section 2.1; with Muon it is called MuonClip).
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 *     #include "mixprec.h"
 *     #include "qk_clip.h"
 *
 *     float scores[HEADS];                                     // for each layer
 *     y = mixp_attention(ctx, mixp_linear(ctx, x, qkv, NULL), HEADS, 1, 0);
 *     ...
 *     mixp_optimizer_step(opt);
 *     mixp_attention_scores(y, HEADS, scores);                 // what this step's forward pass saw
 *     qk_clip(&(qk_clip_rows){qkv, NULL, qkv, NULL, 0, HEADS * D, HEADS, HEADS, D}, scores, 100);
 *
 * A head whose score s exceeds tau gets its queries times g / sqrt(m) and its keys times sqrt(m).
 * g = tau / s, and m is the smallest g of the heads that share the keys. So each head's scores are
 * multiplied by its own g; with one head for each head of keys, both factors are sqrt(g), as in the
 * paper. The score is a log-sum-exp, at most ln(keys) above the largest q k'. No score of that batch
 * stays above tau. Biases are multiplied like their rows. RoPE changes nothing; after a norm of q and k (QK-norm) the
 * weights have no effect, and scores are bounded anyway.
 */
#ifndef QK_CLIP_H
#define QK_CLIP_H
#include <math.h>
#include <stdlib.h>

#if defined(QK_CLIP_API)
#elif defined(__GNUC__)
#  define QK_CLIP_API static __attribute__((__unused__))
#else
#  define QK_CLIP_API static
#endif

/* Where queries and keys are made. One tensor may be both weights, as in a packed qkv. */
typedef struct qk_clip_rows {
    mixp_tensor *q, *q_bias;    /* weight [rows, inputs] and bias [rows] of queries; bias: or NULL */
    mixp_tensor *k, *k_bias;    /* the same of keys                                        */
    int64_t      q_row, k_row;  /* first row of head 0                                     */
    int64_t      heads, kv_heads, d;
} qk_clip_rows;

/* Multiplies elements first to first + n of t. */
static mixp_result qk_clip_scale(mixp_tensor *t, int64_t first, int64_t n, double by) {
    const int64_t count = t->count;
    float        *all;
    mixp_result   r;
    if (by == 1.0) return MIXP_OK;
    if (first < 0 || n < 0 || first > count - n) return MIXP_ERR_SHAPE;
    all = (float *)malloc((size_t)count * sizeof *all);
    if (!all) return MIXP_ERR_MEMORY;
    r = mixp_read_f32(t, all, count);
    for (int64_t i = first; i < first + n && r == MIXP_OK; i++) all[i] = (float)((double)all[i] * by);
    if (r == MIXP_OK) r = mixp_write_f32(t, all, count);
    free(all);
    return r;
}

/* Multiplies the d rows from `row` on of a weight, and of its bias. */
static mixp_result qk_clip_head(mixp_tensor *w, mixp_tensor *bias, int64_t row, int64_t d, double by) {
    const int64_t inputs = w->shape[1];
    mixp_result   r = qk_clip_scale(w, row * inputs, d * inputs, by);
    return r == MIXP_OK && bias ? qk_clip_scale(bias, row, d, by) : r;
}

/* The factor of a head's scores. A score that is not above tau, or not finite, leaves the head. */
static double qk_clip_factor(float score, double tau) {
    return (double)score > tau && (double)score < HUGE_VAL ? tau / (double)score : 1.0;
}

/* Clips after an update of the weights, in f32 or at any level. scores[heads]: of
 * mixp_attention_scores; of several micro-batches the larger; with ranks, the largest of all ranks
 * (mixp_ranks_max), so that all ranks clip alike. Moments of the optimizer stay. MIXP_ERR_SHAPE: a
 * tensor has no such rows. MIXP_ERR_ARGUMENT: rows, its q or k, or scores is NULL, kv_heads is below 1, or tau is
 * not above 0 and at most Inf. Otherwise the errors of mixp_read and mixp_write. */
QK_CLIP_API mixp_result qk_clip(const qk_clip_rows *rows, const float *scores, double tau) {
    mixp_result r = MIXP_OK;
    int64_t     shared;
    if (!rows || !rows->q || !rows->k || !scores || mixp_bits_of_f64(tau) - 1 >= 0x7FF0000000000000u || rows->kv_heads < 1)
        return MIXP_ERR_ARGUMENT;
    shared = rows->heads / rows->kv_heads;
    for (int64_t kv = 0; kv < rows->kv_heads && r == MIXP_OK; kv++) {
        double least = 1.0;
        for (int64_t h = kv * shared; h < (kv + 1) * shared; h++)
            least = fmin(least, qk_clip_factor(scores[h], tau));
        for (int64_t h = kv * shared; h < (kv + 1) * shared && r == MIXP_OK; h++)
            r = qk_clip_head(rows->q, rows->q_bias, rows->q_row + h * rows->d, rows->d,
                             qk_clip_factor(scores[h], tau) / sqrt(least));
        if (r == MIXP_OK)
            r = qk_clip_head(rows->k, rows->k_bias, rows->k_row + kv * rows->d, rows->d, sqrt(least));
    }
    return r;
}
#endif
