#pragma once
#include "updates.h"

/* x * y + z, rounded once: the product is exact in f64. */
MIXPREC_HD float mixpi_fmaf_by_hand(float x, float y, float z) {
    double lost;
    const double sum = mixpi_sum_and_lost((double)x * (double)y, (double)z, &lost);
    return (float)mixpi_sum_odd(sum, lost);
}
MIXPREC_HD float mixpi_fmaf(float x, float y, float z) {
#if defined(__MINGW32__) && !defined(__FMA__)
    return mixpi_fmaf_by_hand(x, y, z);         /* MinGW's fmaf rounds twice */
#else
    return MIXPI_LIBM(fmaf)(x, y, z);
#endif
}

/* One element of Adam or AdamW, with a fixed order of roundings. p: the master weight. m, v: the
 * moments. grad: the gradient as stored. */
MIXPREC_HD void mixpi_adam_element(const mixp_step_scalars *u, float grad, float *p,
                                  float *m, float *v) {
    float g = mixpi_fmaf(u->l2, *p, grad * u->factor), ratio, decay;
    *m = mixpi_fmaf(u->beta1, *m, u->rest1 * g);
    *v = mixpi_fmaf(u->beta2, *v, (u->rest2 * g) * g);
    ratio = *m / mixpi_fmaf(MIXPI_LIBM(sqrtf)(*v), u->scale_v, u->eps);
    decay = mixpi_decay_of(u, ratio, *p);
    *p = mixpi_fmaf(-decay, *p, *p);
    *p = mixpi_fmaf(-u->rate, ratio, *p);
}

/* One element of SGD. m: NULL without momentum. */
MIXPREC_HD void mixpi_sgd_element(const mixp_step_scalars *u, float grad, float *p,
                                 float *m) {
    float g = mixpi_fmaf(u->l2, *p, grad * u->factor);
    if (m) {
        *m = mixpi_fmaf(u->beta1, *m, u->rest1 * g);
        g = u->nesterov ? mixpi_fmaf(u->momentum, *m, g) : *m;
    }
    *p = mixpi_fmaf(-u->rate, g, *p);
}

/* One element of RMSprop, in PyTorch's order. m: NULL without momentum. */
MIXPREC_HD void mixpi_rmsprop_element(const mixp_step_scalars *u, float grad, float *p,
                                     float *m, float *v) {
    float g = mixpi_fmaf(u->l2, *p, grad * u->factor), step;
    *v = mixpi_fmaf(u->beta2, *v, (u->rest2 * g) * g);
    step = g / (MIXPI_LIBM(sqrtf)(*v) + u->eps);
    if (m) {
        step = mixpi_fmaf(u->momentum, *m, step);
        *m = step;
    }
    *p = mixpi_fmaf(-u->rate, step, *p);
}

/* a - b * b, rounded once, and at least 0. NaN stays. */
MIXPREC_HD float mixpi_variance(float a, float b) {
    const float left = mixpi_fmaf(-b, b, a);
    return 0.0f > left ? 0.0f : left;
}

/* One element of centered RMSprop. g: the gradient with its decay. third: the mean gradient. m: not
 * read without momentum. */
MIXPREC_HD void mixpi_rmsprop_centered(const mixp_step_scalars *u, float g, float *p, float *m,
                                       float *v, float *third) {
    float step;
    *v = mixpi_fmaf(u->beta2, *v, (u->rest2 * g) * g);
    *third = mixpi_fmaf(u->rest2, g - *third, *third);
    step = g / (MIXPI_LIBM(sqrtf)(mixpi_variance(*v, *third)) + u->eps);
    if (u->momentum > 0.0f) {
        step = mixpi_fmaf(u->momentum, *m, step);
        *m = step;
    }
    *p = mixpi_fmaf(-u->rate, step, *p);
}

/* Adamax (Kingma and Ba, "Adam", 2015). v: a decaying maximum of |gradient| + eps. */
MIXPREC_HD void mixpi_adamax(const mixp_step_scalars *u, float g, float *p, float m, float *v) {
    const float held = u->beta2 * *v, now = MIXPI_LIBM(fabsf)(g) + u->eps;
    *v = held > now ? held : now;
    *p = mixpi_fmaf(-u->rate, m / *v, *p);
}

/* One element of centered RMSprop, of Adamax, of NAdam (Dozat, "Incorporating Nesterov Momentum
 * into Adam", 2016), and of Adam or AdamW with amsgrad, in PyTorch's order. third: see
 * mixp_param_row; NAdam and Adamax do not read it. */
MIXPREC_HD void mixpi_later_element(mixp_optimizer_kind kind, const mixp_step_scalars *u,
                                    float grad, float *p, float *m, float *v, float *third) {
    const float g = mixpi_fmaf(u->l2, *p, grad * u->factor);
    float top, ratio;
    if (kind == MIXP_OPTIMIZER_RMSPROP) {
        mixpi_rmsprop_centered(u, g, p, m, v, third);
        return;
    }
    *m = mixpi_fmaf(u->beta1, *m, u->rest1 * g);
    if (kind == MIXP_OPTIMIZER_ADAMAX) {
        mixpi_adamax(u, g, p, *m, v);
        return;
    }
    *v = mixpi_fmaf(u->beta2, *v, (u->rest2 * g) * g);

    /* amsgrad divides by the largest second moment so far. */
    top = *v;
    if (kind != MIXP_OPTIMIZER_NADAM) {
        top = *third > top ? *third : top;
        *third = top;
    }
    ratio = mixpi_fmaf(u->scale_m, *m, u->scale_g * g);     /* amsgrad: scale_g is 0 */
    ratio = ratio / mixpi_fmaf(MIXPI_LIBM(sqrtf)(top), u->scale_v, u->eps);
    *p = mixpi_fmaf(-mixpi_decay_of(u, ratio, *p), *p, *p);
    *p = mixpi_fmaf(-u->rate, ratio, *p);
}

/* One element of Lion, in the order of its authors: the sign of a blend moves the weight, and then
 * the gradient joins the momentum (Chen et al., "Symbolic Discovery of Optimization Algorithms",
 * 2023). */
MIXPREC_HD void mixpi_lion_element(const mixp_step_scalars *u, float grad, float *p,
                                  float *m) {
    float g = grad * u->factor, blend = mixpi_fmaf(u->beta1, *m, u->rest1 * g);
    float sign = blend > 0.0f ? 1.0f : 0.0f > blend ? -1.0f : blend;    /* NaN stays NaN */
    *p = mixpi_fmaf(-mixpi_decay_of(u, blend, *p), *p, *p);
    *p = mixpi_fmaf(-u->rate, sign, *p);
    *m = mixpi_fmaf(u->beta2, *m, u->rest2 * g);
}

/* x * y, rounded before use: a compiler may contract a plain product and a difference to an fma. */
MIXPREC_HD float mixpi_rounded_product(float x, float y) {
#if defined(__CUDA_ARCH__)
    return __fmul_rn(x, y);
#else
    return mixpi_fmaf(x, y, -0.0f);
#endif
}

/* a + (b - a) w, rounded as in PyTorch. */
MIXPREC_HD float mixpi_lerp(float a, float b, float w) {
    float way = b - a;
    return w < 0.5f ? mixpi_fmaf(w, way, a) : mixpi_fmaf(w - 1.0f, way, b);
}

/* One element of Muon's first pass: momentum m, and the direction before it is made orthogonal. */
MIXPREC_HD void mixpi_muon_momentum_element(const mixp_step_scalars *u, float grad,
                                           float *direction, float *m) {
    float g = mixpi_rounded_product(grad, u->factor);
    *m = mixpi_lerp(*m, g, u->rest1);
    *direction = u->nesterov ? mixpi_lerp(g, *m, u->momentum) : *m;
}

/* One element of Muon's last pass. shape: the factor of the rate for the matrix's shape. */
MIXPREC_HD void mixpi_muon_element(const mixp_step_scalars *u, float shape,
                                  float direction, float *p) {
    float rate = u->rate * shape;
    *p = mixpi_fmaf(-mixpi_decay_of(u, direction, *p), *p, *p);
    *p = mixpi_fmaf(-rate, direction, *p);
}
