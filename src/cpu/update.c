#pragma once
#include "convert.c"
#include "update_plan.c"
/* --- grad_stats, clip, prepare, update, advance ---------------------------------------- *
 *
 * All active gradients are cut into chunks of a fixed size, across tensors. One parallel loop runs
 * over the chunks, and sums are added in the order of the chunks. So the bits are the same at any
 * number of threads and on any instruction set.
 */

/* How many bytes ahead `stream` prefetches. Far prefetches helped an Intel Xeon; an AMD Zen 4
 * updates a sixth faster without them. */
MIXPI_V int MIXPI_P(ahead)(void) {
#if MIXPI_PASS == 1 || MIXPI_PASS == 2
    if (MIXPI_CPU_IS_AMD()) return 256;
#endif
    return 2048;
}

/* Loads 16 floats, and prefetches later ones. */
MIXPI_V mixpi_v MIXPI_P(stream)(const float *p, int ahead) {
    MIXPI_PREFETCH((const char *)p + ahead);
    return mixpi_vload(p);
}

/* x * factor for n elements, into out unless that is NULL; the sum of squares and the largest
 * magnitude. Inf or NaN anywhere makes the sum Inf or NaN. */
MIXPI_V float MIXPI_P(look)(const float *x, float *out, int n, float factor,
                            float *largest) {
    mixpi_v f = mixpi_vset(factor), top = mixpi_vzero(), s0 = top, s1 = top, a, b;
    const int ahead = MIXPI_P(ahead)();
    int i;

    /* Two sums: an addition need not wait for the one before. */
    for (i = 0; i + 32 <= n; i += 32) {
        a = mixpi_vmul(MIXPI_P(stream)(x + i, ahead), f);
        b = mixpi_vmul(MIXPI_P(stream)(x + i + 16, ahead), f);
        if (out) { mixpi_vstore(out + i, a); mixpi_vstore(out + i + 16, b); }
        s0 = mixpi_vfma(a, a, s0);
        s1 = mixpi_vfma(b, b, s1);
        top = mixpi_vmax(mixpi_vmax(mixpi_vabs(a), mixpi_vabs(b)), top);
    }

    for (; i < n; i += 16) {
        int left = n - i < 16 ? n - i : 16;
        a = mixpi_vmul(mixpi_vload_n(x + i, left), f);
        if (out) mixpi_vstore_n(out + i, a, left);
        s0 = mixpi_vfma(a, a, s0);
        top = mixpi_vmax(mixpi_vabs(a), top);
    }
    *largest = mixpi_vmaxof(top);
    return mixpi_vsum(mixpi_vadd(s0, s1));
}

/* n elements of a chunk of grad_stats or of clip. It looks for Inf and NaN after unscaling: the
 * inverse of a scale is finite and not 0, so Inf and NaN stay. */
MIXPI_V void MIXPI_P(gather_block)(const mixpi_chunk_job *job, mixpi_chunk *c, mixp_out grad,
                                   int64_t i, int n) {
    float buf[MIXPI_BLOCK], largest = 0.0f, factor = job->factor, squares = 0.0f;
    const float *x = MIXPI_P(held)(grad, i, n, buf);
    if (job->write == MIXPI_CHUNK_SCALE) {      /* unused sums are compiled away */
        (void)MIXPI_P(look)(x, MIXPI_P(place)(grad, i, buf), n, factor, &largest);
        MIXPI_P(placed)(grad, i, n, buf);
        return;
    }

    /* Unscaling in place: the statistics are of the values rounded to the gradient's dtype. */
    if (job->write) {
        squares = MIXPI_P(look)(x, MIXPI_P(place)(grad, i, buf), n, factor, &largest);
        MIXPI_P(placed)(grad, i, n, buf);
        x = MIXPI_P(held)(grad, i, n, buf);
        factor = 1.0f;
    }
    if (!job->write || grad.dtype != MIXP_F32)
        squares = MIXPI_P(look)(x, NULL, n, factor, &largest);

    /* The sum is not finite (overflow, Inf, NaN), or has lost small squares. */
    if ((mixp_bits_of_f32(squares) & 0x7FFFFFFFu) >= 0x7F800000u ||
        (largest < MIXPI_SQUARES_LOST && largest > 0.0f)) {
        mixpi_look_closely(c, x, n, factor, i);
        return;
    }
    c->squares += (double)squares;
    if (largest > c->largest) c->largest = largest;
}

/* One chunk of grad_stats or of clip. Padding is 0 while its block is looked at. */
MIXPI_K void MIXPI_P(gather_chunk)(void *arg, int64_t index, int worker) {
    const mixpi_chunk_job *job = (const mixpi_chunk_job *)arg;
    mixpi_chunk *c = &job->chunks[index];
    const mixp_param_row *row = &job->rows[c->row];
    const mixp_out grad = mixpi_out_to(row->grad, row->grad_dtype, 0);
    const int64_t end = mixpi_min(c->first + MIXPI_CHUNK, row->count);
    mixpi_kept kept;
    (void)worker;
    for (int64_t i = c->first; i < end; i += MIXPI_BLOCK) {
        const int n = (int)mixpi_min(MIXPI_BLOCK, end - i);
        if (row->pitch) mixpi_padding_keep(&kept, grad.data, grad.dtype, i, n);
        if (row->pitch) mixpi_padding_put(row, grad.data, grad.dtype, i, n, NULL);
        MIXPI_P(gather_block)(job, c, grad, i, n);
        if (row->pitch) mixpi_padding_put(row, grad.data, grad.dtype, i, n, &kept);
    }
}

MIXPI_KERNEL(grad_stats, mixpi_cpu_grad_stats, mixp_grad_stats_args, MIXPI_P(gather_chunk))
MIXPI_KERNEL(clip, mixpi_cpu_clip, mixp_clip_args, MIXPI_P(gather_chunk))

/* mixpi_decay_of for 16 elements. */
MIXPI_F mixpi_v MIXPI_P(decay)(const mixp_step_scalars *u, int cautious, mixpi_v update,
                               mixpi_v p) {
    mixpi_v none = mixpi_vzero(), decay = mixpi_vset(u->decay);
    if (!cautious) return decay;
    return mixpi_vselect_gt(none, mixpi_vmul(update, p), none, decay);
}

/* 16 elements of mixpi_adam_element, with the same operations in the same order. cautious: that of
 * u, or 0. root: the root of the second moment; 1-byte states store it. */
MIXPI_F mixpi_v MIXPI_P(adam)(const mixp_step_scalars *u, int cautious, mixpi_v g, mixpi_v p,
                              mixpi_v *m, mixpi_v *v, mixpi_v *root) {
    mixpi_v ratio, rate = mixpi_vset(-u->rate), eps = mixpi_vset(u->eps);
    g = mixpi_vfma(mixpi_vset(u->l2), p, mixpi_vmul(g, mixpi_vset(u->factor)));
    *m = mixpi_vfma(mixpi_vset(u->beta1), *m, mixpi_vmul(mixpi_vset(u->rest1), g));
    *v = mixpi_vfma(mixpi_vset(u->beta2), *v, mixpi_vmul(mixpi_vmul(mixpi_vset(u->rest2), g), g));

    /* As PyTorch: corrects the root, and decays the weight before the step. */
    *root = mixpi_vsqrt(*v);
    ratio = mixpi_vdiv(*m, mixpi_vfma(*root, mixpi_vset(u->scale_v), eps));
    p = mixpi_vfma(mixpi_vneg(MIXPI_P(decay)(u, cautious, ratio, p)), p, p);
    return mixpi_vfma(rate, ratio, p);
}

/* roots: stores the root of v in place of v. */
MIXPI_F void MIXPI_P(adam_block)(const mixp_step_scalars *u, int cautious,
                                 const mixpi_stretch *s, const float *g) {
    float *p = s->p, *m = s->m, *v = s->v;
    const int roots = s->roots, n = s->n, ahead = MIXPI_P(ahead)();
    mixpi_v a, b, d, w, root;
    int i;
    for (i = 0; i + 16 <= n; i += 16) {
        a = MIXPI_P(stream)(m + i, ahead);
        b = MIXPI_P(stream)(v + i, ahead);
        d = MIXPI_P(stream)(g + i, ahead);
        w = MIXPI_P(stream)(p + i, ahead);
        w = MIXPI_P(adam)(u, cautious, d, w, &a, &b, &root);
        mixpi_vstore(p + i, w); mixpi_vstore(m + i, a);
        mixpi_vstore(v + i, roots ? root : b);
    }

    /* Fewer than 16 are left. */
    for (; i < n; i++) {
        mixpi_adam_element(u, g[i], p + i, m + i, v + i);
        if (roots) v[i] = sqrtf(v[i]);
    }
}

/* As mixpi_sgd_element; m NULL without momentum. */
MIXPI_RARE void MIXPI_P(sgd_block)(const mixp_step_scalars *u, const float *g, float *p,
                                   float *m, int n) {
    const int ahead = MIXPI_P(ahead)();
    mixpi_v d, w, a;
    int i;
    for (i = 0; i + 16 <= n; i += 16) {
        w = MIXPI_P(stream)(p + i, ahead);
        d = mixpi_vmul(MIXPI_P(stream)(g + i, ahead), mixpi_vset(u->factor));
        d = mixpi_vfma(mixpi_vset(u->l2), w, d);
        if (m) {
            a = mixpi_vmul(mixpi_vset(u->rest1), d);
            a = mixpi_vfma(mixpi_vset(u->beta1), MIXPI_P(stream)(m + i, ahead), a);
            mixpi_vstore(m + i, a);
            d = u->nesterov ? mixpi_vfma(mixpi_vset(u->momentum), a, d) : a;
        }
        mixpi_vstore(p + i, mixpi_vfma(mixpi_vset(-u->rate), d, w));
    }
    for (; i < n; i++) mixpi_sgd_element(u, g[i], p + i, m ? m + i : NULL);
}

/* As mixpi_rmsprop_element. */
MIXPI_RARE void MIXPI_P(rmsprop_block)(const mixp_step_scalars *u, const float *g,
                                       float *p, float *m, float *v, int n) {
    const mixpi_v beta = mixpi_vset(u->beta2), rest = mixpi_vset(u->rest2);
    const mixpi_v eps = mixpi_vset(u->eps);
    mixpi_v d, w, a;
    int i;
    for (i = 0; i + 16 <= n; i += 16) {
        w = mixpi_vload(p + i);
        d = mixpi_vmul(mixpi_vload(g + i), mixpi_vset(u->factor));
        d = mixpi_vfma(mixpi_vset(u->l2), w, d);
        a = mixpi_vmul(mixpi_vmul(rest, d), d);
        a = mixpi_vfma(beta, mixpi_vload(v + i), a);
        mixpi_vstore(v + i, a);
        d = mixpi_vdiv(d, mixpi_vadd(mixpi_vsqrt(a), eps));
        if (m) {
            d = mixpi_vfma(mixpi_vset(u->momentum), mixpi_vload(m + i), d);
            mixpi_vstore(m + i, d);
        }
        mixpi_vstore(p + i, mixpi_vfma(mixpi_vset(-u->rate), d, w));
    }

    /* Fewer than 16 are left. */
    for (; i < n; i++) mixpi_rmsprop_element(u, g[i], p + i, m ? m + i : NULL, v + i);
}

/* As mixpi_lion_element. */
MIXPI_RARE void MIXPI_P(lion_block)(const mixp_step_scalars *u, const float *g, float *p,
                                    float *m, int n) {
    const mixpi_v zero = mixpi_vzero(), one = mixpi_vset(1.0f), less = mixpi_vset(-1.0f);
    mixpi_v d, w, a, blend, sign;
    int i;
    for (i = 0; i + 16 <= n; i += 16) {
        w = mixpi_vload(p + i);
        a = mixpi_vload(m + i);
        d = mixpi_vmul(mixpi_vload(g + i), mixpi_vset(u->factor));
        blend = mixpi_vmul(mixpi_vset(u->rest1), d);
        blend = mixpi_vfma(mixpi_vset(u->beta1), a, blend);
        sign = mixpi_vselect_gt(zero, blend, less, blend);
        sign = mixpi_vselect_gt(blend, zero, one, sign);
        w = mixpi_vfma(mixpi_vneg(MIXPI_P(decay)(u, u->cautious, blend, w)), w, w);
        mixpi_vstore(p + i, mixpi_vfma(mixpi_vset(-u->rate), sign, w));

        /* The moment moves after the weight. */
        d = mixpi_vmul(mixpi_vset(u->rest2), d);
        mixpi_vstore(m + i, mixpi_vfma(mixpi_vset(u->beta2), a, d));
    }

    for (; i < n; i++) mixpi_lion_element(u, g[i], p + i, m + i);
}

/* A stretch of NAdam, Adamax, amsgrad or centered RMSprop, an element at a time. States and weights
 * that are absent are not read. */
MIXPI_FLAT void MIXPI_P(later_block)(const mixpi_stretch *s, mixp_optimizer_kind kind,
                                     const mixp_step_scalars *u, const float *g) {
    float *third = s->row->third ? s->row->third + s->first : s->p;
    float *m = s->m ? s->m : s->p;
    for (int i = 0; i < s->n; i++)
        mixpi_later_element(kind, u, g[i], s->p + i, m + i, s->v + i, third + i);
}
