#pragma once
#include "convert.c"
#include "starts.c"
/* --- elementwise, reductions, dropout -------------------------------------------------- */
/* NaN stays NaN. */
MIXPI_V mixpi_v mixpi_vclamp(mixpi_v x, float low, float high)
{ return mixpi_vmin(mixpi_vset(high), mixpi_vmax(mixpi_vset(low), x)); }

/* Four steps of a polynomial in x: from p to (((p x + a) x + b) x + c) x + d. */
MIXPI_F mixpi_v mixpi_vpoly(mixpi_v p, mixpi_v x, float a, float b, float c, float d) {
    p = mixpi_vfma(mixpi_vfma(p, x, mixpi_vset(a)), x, mixpi_vset(b));
    return mixpi_vfma(mixpi_vfma(p, x, mixpi_vset(c)), x, mixpi_vset(d));
}

/* For x in [-104, 89] or NaN: e^x = 2^n (1 + the result), with an integer n. */
MIXPI_F mixpi_v mixpi_vexpm1_part(mixpi_v x, mixpi_v *n) {
    *n = mixpi_vfma(x, mixpi_vset(1.44269504f), mixpi_vset(-0.0f));
#if MIXPI_PASS == 2
    *n = mixpi_vsub(mixpi_vadd(*n, mixpi_vset(12582912.0f)), mixpi_vset(12582912.0f));
#else                                   /* a NaN would become an integer */
    *n = mixpi_vround(mixpi_vmax(*n, mixpi_vset(-151.0f)));
#endif
    mixpi_v r = mixpi_vfma(*n, mixpi_vset(-0.693147182f), x);
    r = mixpi_vfma(*n, mixpi_vset(1.90465430e-9f), r);
    mixpi_v p = mixpi_vpoly(mixpi_vset(0.001395077975f), r,
                            0.008369072816f, 0.04166620157f, 0.1666651731f, 0.5000000096f);
    return mixpi_vfma(mixpi_vmul(r, r), p, r);
}

/* e^x to about 1 ulp, with 0, Inf and subnormals; NaN stays NaN. The power of two is applied at
 * once or in two halves, so only the last step can round or overflow. At and below -104 the
 * factor is 0, because a product that underflows takes 100 times as long. */
MIXPI_F mixpi_v mixpi_vexp(mixpi_v x) {
    const mixpi_v least = mixpi_vset(-104.0f), one = mixpi_vset(1.0f);
    mixpi_v n;
#if MIXPI_PASS == 2
    const __mmask16 there = _mm512_cmp_ps_mask(x, least, _CMP_NLE_UQ);
    x = mixpi_vexpm1_part(mixpi_vmin(mixpi_vset(89.0f), x), &n);
    return _mm512_maskz_scalef_ps(there, mixpi_vadd(x, one), n);
#else
    mixpi_v p = mixpi_vexpm1_part(mixpi_vclamp(x, -104.0f, 89.0f), &n);
    mixpi_v half = mixpi_vround(mixpi_vmul(n, mixpi_vset(0.5f)));
    n = mixpi_vselect_gt(x, least, mixpi_vsub(n, half), mixpi_vset(-127.0f));
    return mixpi_vldexp(mixpi_vldexp(mixpi_vadd(p, one), half), n);
#endif
}

/* Natural logarithm to about 1 ulp: -Inf at 0, NaN below. x = 2^e (1 + f), -0.293 < f < 0.415. */
MIXPI_V mixpi_v MIXPI_P(log_of)(mixpi_v x) {
    const mixpi_v  inf = mixpi_vset(mixp_f32_of_bits(0x7F800000u));
    const mixpi_v  tiny = mixpi_vset(1.17549435e-38f);
    const uint32_t base = 0x3F3504F3u;

    /* e and f; a subnormal is multiplied by 2^23 first. */
    mixpi_v f = mixpi_vselect_gt(tiny, x, mixpi_vmul(x, mixpi_vset(8388608.0f)), x), e = f;
    MIXPI_EACH({
        const mixpi_vbits v = mixpi_rbits(MIXPI_R(f, i)) + (0x3F800000u - base);
        MIXPI_R(e, i) = mixpi_vbits_times((v >> 23) - 127u, 1.0f);
        MIXPI_R(f, i) = mixpi_rof((v & 0x7FFFFFu) + base);
    })
    e = mixpi_vsub(e, mixpi_vselect_gt(tiny, x, mixpi_vset(23.0f), mixpi_vzero()));
    f = mixpi_vsub(f, mixpi_vset(1.0f));

    /* The polynomial of log(1 + f), and e log 2 in two parts. */
    mixpi_v q = mixpi_vpoly(mixpi_vset(-0.07873066208f), f,
                            0.1289963641f, -0.1313190387f, 0.141788926f, -0.166240422f);
    q = mixpi_vpoly(q, f, 0.200023723f, -0.2500082519f, 0.3333331583f, -0.5f);
    q = mixpi_vfma(mixpi_vmul(f, f), q, mixpi_vmul(e, mixpi_vset(-1.90465430e-9f)));
    q = mixpi_vfma(e, mixpi_vset(0.693147182f), mixpi_vadd(q, f));

    /* Inf, 0, negative numbers and NaN. */
    q = mixpi_vselect_gt(x, mixpi_vset(3.40282347e38f), x, q);
    mixpi_v bad = mixpi_vselect_gt(mixpi_vzero(), x, mixpi_vset(mixp_f32_of_bits(0x7FC00000u)),
                                   mixpi_vsub(x, inf));     /* 0 gives -Inf, NaN stays NaN */
    return mixpi_vselect_gt(x, mixpi_vzero(), q, bad);
}

/* A function that is called gets several registers in memory: gcc copies a structure that is passed
 * by value in pieces of 16 bytes, and the load of a whole register that follows waits for them. */
#if MIXPI_REGS == 1
MIXPI_RARE mixpi_v mixpi_vlog(mixpi_v x) { return MIXPI_P(log_of)(x); }
#else
MIXPI_RARE void MIXPI_P(log_16)(float *x) { mixpi_vstore(x, MIXPI_P(log_of)(mixpi_vload(x))); }
MIXPI_V mixpi_v mixpi_vlog(mixpi_v x) {
    float t[16];
    mixpi_vstore(t, x);
    MIXPI_P(log_16)(t);
    return mixpi_vload(t);
}
#endif

/* log(1 + u) for u >= -1, accurate for small u: c restores the rounding error of 1 + u. */
MIXPI_F mixpi_v mixpi_vlog1p(mixpi_v u) {
    mixpi_v one = mixpi_vset(1.0f), w = mixpi_vadd(one, u);
    mixpi_v c = mixpi_vsub(u, mixpi_vsub(w, one));
    return mixpi_vadd(mixpi_vlog(w), mixpi_vdiv(c, mixpi_vmax(w, mixpi_vset(1e-30f))));
}

/* e^2|x| - 1 without cancellation; |x| is limited to 10, whose tanh is 1. */
MIXPI_V mixpi_v MIXPI_P(vexpm1_twice)(mixpi_v x) {
    mixpi_v a = mixpi_vabs(x), n, s, m;
    m = mixpi_vexpm1_part(mixpi_vclamp(mixpi_vadd(a, a), 0.0f, 20.0f), &n);
    s = mixpi_vldexp(mixpi_vset(1.0f), n);
    return mixpi_vfma(m, s, mixpi_vsub(s, mixpi_vset(1.0f)));
}

/* (e^2|x| - 1) / (e^2|x| + 1) with the sign of x, to 2.4 ulp. The form without |x| would pass on
 * the full error of e^2x - 1 near -1, and would give +0 at -0. */
MIXPI_F mixpi_v mixpi_vtanh(mixpi_v x) {
    mixpi_v m = MIXPI_P(vexpm1_twice)(x);
    m = mixpi_vdiv(m, mixpi_vadd(m, mixpi_vset(2.0f)));
    m = mixpi_vselect_gt(x, mixpi_vzero(), m, mixpi_vneg(m));
    return mixpi_vselect_gt(mixpi_vabs(x), mixpi_vzero(), m, x);
}

/* 1 / (1 + e^-x). *rest: 1 minus the result. Both are accurate in their tails. */
MIXPI_F mixpi_v mixpi_vsigmoid(mixpi_v x, mixpi_v *rest) {
    mixpi_v e = mixpi_vexp(mixpi_vneg(mixpi_vabs(x)));
    mixpi_v q = mixpi_vdiv(mixpi_vset(1.0f), mixpi_vadd(e, mixpi_vset(1.0f)));
    mixpi_v t = mixpi_vmul(e, q);
    *rest = mixpi_vselect_gt(x, mixpi_vzero(), t, q);
    return mixpi_vselect_gt(x, mixpi_vzero(), q, t);
}

/* The cumulative normal distribution at x, and its *density at x. The tail beyond |x| is e^(-x^2/2)
 * w P(w) with w = 1 / (1 + |x|/4); x^2 includes the bits that the rounded product loses. */
MIXPI_F mixpi_v mixpi_vnormal(mixpi_v x, mixpi_v *density) {
    mixpi_v a = mixpi_vabs(x), h = mixpi_vmul(a, a),
            low = mixpi_vfma(a, a, mixpi_vneg(h));
    mixpi_v e = mixpi_vexp(mixpi_vmul(h, mixpi_vset(-0.5f))), w, t;
    e = mixpi_vfma(e, mixpi_vmul(low, mixpi_vset(-0.5f)), e);
    w = mixpi_vdiv(mixpi_vset(1.0f), mixpi_vfma(a, mixpi_vset(0.25f), mixpi_vset(1.0f)));
    t = mixpi_vfma(mixpi_vset(0.01689220812f), w, mixpi_vset(-0.06453599243f));
    t = mixpi_vpoly(t, w, 0.05587645189f, 0.022615288f, 0.01773075942f, 0.08385351653f);
    t = mixpi_vpoly(t, w, 0.07301195564f, 0.0952880527f, 0.09952143354f, 0.0997463309f);
    t = mixpi_vmul(mixpi_vmul(t, w), e);
    *density = mixpi_vmul(e, mixpi_vset(MIXPI_DENSITY));
    return mixpi_vselect_gt(x, mixpi_vzero(), mixpi_vsub(mixpi_vset(1.0f), t), t);
}

MIXPI_RARE void MIXPI_P(pow_16)(float *x, float p) {
    for (int i = 0; i < 16; i++) x[i] = powf(x[i], p);
}
MIXPI_F mixpi_v mixpi_vpow(mixpi_v x, float p) {
    float t[16];
    if (p == 1.0f) return x;
    if (p == 2.0f) return mixpi_vmul(x, x);
    if (p == 3.0f) return mixpi_vmul(mixpi_vmul(x, x), x);
    if (p == 0.5f) return mixpi_vsqrt(x);
    if (p == -1.0f) return mixpi_vdiv(mixpi_vset(1.0f), x);
    mixpi_vstore(t, x);
    MIXPI_P(pow_16)(t, p);
    return mixpi_vload(t);
}

/* The larger or the smaller; NaN if either is NaN: vmax and vmin propagate b's NaN, and the product
 * with 0 propagates a's. */
MIXPI_F mixpi_v mixpi_vlarger(mixpi_v a, mixpi_v b)
{ return mixpi_vfma(mixpi_vclamp(a, -1.0f, 1.0f), mixpi_vzero(), mixpi_vmax(a, b)); }
MIXPI_F mixpi_v mixpi_vsmaller(mixpi_v a, mixpi_v b)
{ return mixpi_vfma(mixpi_vclamp(a, -1.0f, 1.0f), mixpi_vzero(), mixpi_vmin(a, b)); }

/* x with the sign of s; 0 where s is 0. */
MIXPI_V mixpi_v mixpi_vsign(mixpi_v s, mixpi_v x) {
    mixpi_v below = mixpi_vselect_gt(mixpi_vzero(), s, mixpi_vneg(x), mixpi_vzero());
    return mixpi_vselect_gt(s, mixpi_vzero(), x, below);
}

/* As mixpi_vtanh, for |x| >= 0.6. *rest: the rounding errors of the sum and the division. */
MIXPI_V mixpi_v MIXPI_P(tanh_far)(mixpi_v x, mixpi_v *rest) {
    mixpi_v two = mixpi_vset(2.0f), m = MIXPI_P(vexpm1_twice)(x), q, t, low;
    q = mixpi_vadd(m, two);
    t = mixpi_vdiv(m, q);
    low = mixpi_vsub(two, mixpi_vsub(q, m));    /* q + low is m + 2: here m is more than 2 */
    low = mixpi_vfma(mixpi_vneg(t), low, mixpi_vfma(mixpi_vneg(t), q, m));
    low = mixpi_vdiv(low, q);
    *rest = mixpi_vselect_gt(x, mixpi_vzero(), low, mixpi_vneg(low));
    return mixpi_vselect_gt(x, mixpi_vzero(), t, mixpi_vneg(t));
}

/* tanh x = the result + *rest. Below 0.6 the result is a polynomial. */
MIXPI_V mixpi_v MIXPI_P(tanh_of)(mixpi_v x, mixpi_v *rest) {
    mixpi_v z = mixpi_vmul(x, x), q = mixpi_vset(0.002231052844f), near_0, low, outer;
    q = mixpi_vpoly(q, z, -0.008267078549f, 0.02173443511f, -0.05395247415f, 0.133332476f);
    q = mixpi_vmul(mixpi_vfma(q, z, mixpi_vset(-0.3333333135f)), z);
    near_0 = mixpi_vfma(q, x, x);
    low = mixpi_vfma(q, x, mixpi_vsub(x, near_0));
    outer = MIXPI_P(tanh_far)(x, rest);
    *rest = mixpi_vselect_gt(mixpi_vset(0.36f), z, low, *rest);
    return mixpi_vselect_gt(mixpi_vset(0.36f), z, near_0, outer);
}
#if MIXPI_REGS == 1
MIXPI_RARE mixpi_v MIXPI_P(tanh_parts)(mixpi_v x, mixpi_v *rest) {
    return MIXPI_P(tanh_of)(x, rest);
}
#else
MIXPI_RARE void MIXPI_P(tanh_16)(float *x, float *low) {
    mixpi_v rest;
    mixpi_vstore(x, MIXPI_P(tanh_of)(mixpi_vload(x), &rest));
    mixpi_vstore(low, rest);
}
MIXPI_V mixpi_v MIXPI_P(tanh_parts)(mixpi_v x, mixpi_v *rest) {
    float t[16], low[16];
    mixpi_vstore(t, x);
    MIXPI_P(tanh_16)(t, low);
    *rest = mixpi_vload(low);
    return mixpi_vload(t);
}
#endif

/* tanh x, correctly rounded or off by one unit in the last place. */
MIXPI_V mixpi_v MIXPI_P(tanh_near)(mixpi_v x) {
    mixpi_v rest, t = MIXPI_P(tanh_parts)(x, &rest);
    return mixpi_vselect_gt(mixpi_vabs(x), mixpi_vzero(), mixpi_vadd(t, rest), x);
}

/* tanh(x / p) = the result + *rest. *rest includes the rounding error of the division, because a
 * capped logit is p times the result. */
MIXPI_V mixpi_v mixpi_vtanh_of(mixpi_v x, float p, mixpi_v *rest) {
    mixpi_v by = mixpi_vset(p), u = mixpi_vdiv(x, by), low, q;
    mixpi_v t = MIXPI_P(tanh_parts)(u, &low);
    q = mixpi_vdiv(mixpi_vfma(mixpi_vneg(u), by, x), by);       /* u + q is x / p */
    low = mixpi_vfma(q, mixpi_vfma(mixpi_vneg(t), t, mixpi_vset(1.0f)), low);
    *rest = mixpi_vselect_gt(mixpi_vset(20.0f), mixpi_vabs(u), low, mixpi_vzero());
    return t;
}

MIXPI_V mixpi_v mixpi_vwhere(mixpi_v mask, mixpi_v a, mixpi_v b)
{ return mixpi_vselect_gt(mixpi_vabs(mask), mixpi_vzero(), a, b); }

/* x (GELU_LINEAR + GELU_CUBIC x^2). */
MIXPI_V mixpi_v MIXPI_P(gelu_2u)(mixpi_v x, mixpi_v square) {
    const mixpi_v linear = mixpi_vset(MIXPI_GELU_LINEAR),
                  cubic = mixpi_vset(MIXPI_GELU_CUBIC);
    return mixpi_vmul(x, mixpi_vfma(square, cubic, linear));
}

MIXPI_V mixpi_v MIXPI_P(relu)(mixpi_v a) { return mixpi_vmax(mixpi_vzero(), a); }
MIXPI_V mixpi_v MIXPI_P(relu_squared)(mixpi_v a) {
    a = MIXPI_P(relu)(a);
    return mixpi_vmul(a, a);
}

/* a (1 + tanh u) / 2 = a sigmoid(2u) */
MIXPI_F mixpi_v MIXPI_P(gelu_tanh)(mixpi_v a) {
    mixpi_v t = MIXPI_P(gelu_2u)(a, mixpi_vmul(a, a));
    return mixpi_vmul(a, mixpi_vsigmoid(t, &t));
}

MIXPI_F mixpi_v MIXPI_P(gelu_erf)(mixpi_v a) {
    mixpi_v t = mixpi_vclamp(a, -MIXPI_ERF_BOUND, MIXPI_ERF_BOUND);
    return mixpi_vmul(a, mixpi_vnormal(t, &t));
}

MIXPI_F mixpi_v MIXPI_P(silu)(mixpi_v a) {
    mixpi_v rest;
    return mixpi_vmul(a, mixpi_vsigmoid(a, &rest));
}

/* log(1 + x) for every x, including Inf and -0; the sum 1 + x would lose -0. */
MIXPI_V mixpi_v MIXPI_P(log1p)(mixpi_v x) {
    mixpi_v y = mixpi_vselect_gt(x, mixpi_vset(3.40282347e38f), x, mixpi_vlog1p(x));
    return mixpi_vselect_gt(mixpi_vabs(x), mixpi_vzero(), y, x);
}

/* e^x - 1 without cancellation. Above 60, the result equals e^x; below -30, it equals -1. */
MIXPI_V mixpi_v MIXPI_P(expm1)(mixpi_v x) {
    mixpi_v n, s, m = mixpi_vexpm1_part(mixpi_vclamp(x, -30.0f, 60.0f), &n);
    s = mixpi_vldexp(mixpi_vset(1.0f), n);
    m = mixpi_vfma(m, s, mixpi_vsub(s, mixpi_vset(1.0f)));
    m = mixpi_vselect_gt(x, mixpi_vset(60.0f), mixpi_vexp(x), m);
    return mixpi_vselect_gt(mixpi_vabs(x), mixpi_vzero(), m, x);
}

/* Up to 0.5, the Taylor series, with a relative error of 8e-10; beyond, 1 minus twice the tail of
 * the normal distribution at sqrt(2) |x|. */
MIXPI_V mixpi_v MIXPI_P(erf)(mixpi_v x) {
    x = mixpi_vclamp(x, -MIXPI_ERF_BOUND, MIXPI_ERF_BOUND);
    mixpi_v z = mixpi_vmul(x, x);
    mixpi_v q = mixpi_vpoly(mixpi_vset(1.205532e-4f), z,
                            -8.548327e-4f, 5.223977629e-3f, -2.686617064e-2f, 0.1128379167f);
    q = mixpi_vfma(q, z, mixpi_vset(-0.3761263890f));
    mixpi_v near_0 = mixpi_vfma(x, mixpi_vfma(q, z, mixpi_vset(MIXPI_ERF_SLOPE - 1.0f)), x);
    mixpi_v outer = mixpi_vnormal(mixpi_vmul(mixpi_vabs(x), mixpi_vset(-1.41421356f)), &q);
    outer = mixpi_vfma(mixpi_vset(-2.0f), outer, mixpi_vset(1.0f));
    outer = mixpi_vselect_gt(x, mixpi_vzero(), outer, mixpi_vneg(outer));
    return mixpi_vselect_gt(mixpi_vabs(x), mixpi_vset(0.5f), outer, near_0);
}

/* max(x, 0) + log(1 + e^-|p x|) / p: never overflows. */
MIXPI_V mixpi_v MIXPI_P(softplus)(mixpi_v x, float p) {
    mixpi_v e = mixpi_vexp(mixpi_vmul(mixpi_vabs(x), mixpi_vset(-p)));
    e = mixpi_vdiv(mixpi_vlog1p(e), mixpi_vset(p));
    return mixpi_vadd(mixpi_vmax(mixpi_vzero(), x), e);
}

/* `above` if x > 0, otherwise `below`, also for a NaN. */
MIXPI_V mixpi_v MIXPI_P(above_0)(mixpi_v x, mixpi_v above, mixpi_v below)
{ return mixpi_vselect_gt(x, mixpi_vzero(), above, below); }

MIXPI_V mixpi_v MIXPI_P(soft_cap)(mixpi_v a, float p) {
    mixpi_v rest, t = mixpi_vtanh_of(a, p, &rest);
    return mixpi_vfma(mixpi_vset(p), t, mixpi_vmul(mixpi_vset(p), rest));
}

/* x <= 0 ? 0 : dy; if x is NaN, dy passes. */
MIXPI_V mixpi_v MIXPI_P(relu_slope)(mixpi_v dy, mixpi_v x) {
    const mixpi_v zero = mixpi_vzero(), one = mixpi_vset(1.0f);
    return mixpi_vselect_gt(mixpi_vmin(x, one), zero, dy, zero);
}

MIXPI_V mixpi_v MIXPI_P(relu_squared_slope)(mixpi_v dy, mixpi_v x) {
    x = MIXPI_P(relu)(x);
    return mixpi_vmul(dy, mixpi_vadd(x, x));
}

/* dy sigmoid(2u) + dy x sigmoid(2u) (1 - sigmoid(2u)) (2u)'; constant beyond the bound. */
MIXPI_F mixpi_v MIXPI_P(gelu_tanh_slope)(mixpi_v dy, mixpi_v x) {
    const mixpi_v linear = mixpi_vset(MIXPI_GELU_LINEAR),
                  cubic = mixpi_vset(MIXPI_GELU_SLOPE);
    mixpi_v square, s, rest, t;
    x = mixpi_vclamp(x, -MIXPI_GELU_BOUND, MIXPI_GELU_BOUND);
    square = mixpi_vmul(x, x);
    s = mixpi_vsigmoid(MIXPI_P(gelu_2u)(x, square), &rest);
    t = mixpi_vmul(mixpi_vmul(s, rest), x);
    return mixpi_vmul(dy, mixpi_vfma(t, mixpi_vfma(square, cubic, linear), s));
}

MIXPI_F mixpi_v MIXPI_P(gelu_erf_slope)(mixpi_v dy, mixpi_v x) {
    mixpi_v up_to, density;
    x = mixpi_vclamp(x, -MIXPI_ERF_BOUND, MIXPI_ERF_BOUND);
    up_to = mixpi_vnormal(x, &density);
    return mixpi_vmul(dy, mixpi_vfma(x, density, up_to));
}

MIXPI_F mixpi_v MIXPI_P(silu_slope)(mixpi_v dy, mixpi_v x) {
    mixpi_v s, rest;
    x = mixpi_vclamp(x, -MIXPI_SILU_BOUND, MIXPI_SILU_BOUND);
    s = mixpi_vsigmoid(x, &rest);
    return mixpi_vmul(dy, mixpi_vfma(mixpi_vmul(s, rest), x, s));
}

/* 1 - tanh^2(x / p), times dy. */
MIXPI_V mixpi_v MIXPI_P(soft_cap_slope)(mixpi_v dy, mixpi_v x, float p) {
    mixpi_v rest, t = mixpi_vtanh_of(x, p, &rest), s;
    s = mixpi_vfma(mixpi_vneg(t), t, mixpi_vset(1.0f));
    return mixpi_vmul(dy, mixpi_vfma(mixpi_vmul(mixpi_vset(-2.0f), t), rest, s));
}

/* dy if x lies strictly between p and q, otherwise 0. An infinite bound does not limit x. */
MIXPI_V mixpi_v MIXPI_P(clamp_slope)(mixpi_v dy, mixpi_v x, float p, float q) {
    if (mixp_bits_of_f32(p) != 0xFF800000u)
        dy = mixpi_vselect_gt(x, mixpi_vset(p), dy, mixpi_vzero());
    if (mixp_bits_of_f32(q) != 0x7F800000u)
        dy = mixpi_vselect_gt(mixpi_vset(q), x, dy, mixpi_vzero());
    return dy;
}

/* 2/sqrt(pi) e^(-x^2), times dy; x^2 includes the bits that the rounded product loses. */
MIXPI_V mixpi_v MIXPI_P(erf_slope)(mixpi_v dy, mixpi_v x) {
    x = mixpi_vclamp(x, -MIXPI_ERF_BOUND, MIXPI_ERF_BOUND);
    mixpi_v h = mixpi_vmul(x, x);
    mixpi_v low = mixpi_vfma(x, x, mixpi_vneg(h));
    mixpi_v e = mixpi_vexp(mixpi_vneg(h));
    e = mixpi_vfma(e, mixpi_vneg(low), e);
    return mixpi_vmul(dy, mixpi_vmul(e, mixpi_vset(MIXPI_ERF_SLOPE)));
}

/* p e^x up to 0 and 1 above, times dy; if x is NaN, dy passes. */
MIXPI_V mixpi_v MIXPI_P(elu_slope)(mixpi_v dy, mixpi_v x, float p) {
    mixpi_v below = mixpi_vmul(dy, mixpi_vmul(mixpi_vset(p), mixpi_vexp(x)));
    return MIXPI_P(above_0)(mixpi_vmin(x, mixpi_vset(1.0f)), dy, below);
}

MIXPI_V mixpi_v MIXPI_P(softplus_slope)(mixpi_v dy, mixpi_v x, float p) {
    mixpi_v rest;
    return mixpi_vmul(dy, mixpi_vsigmoid(mixpi_vmul(x, mixpi_vset(p)), &rest));
}

/* p x^(p - 1), times dy. */
MIXPI_V mixpi_v MIXPI_P(pow_slope)(mixpi_v dy, mixpi_v x, float p) {
    if (p == 0.0f) return mixpi_vzero();
    return mixpi_vmul(dy, mixpi_vmul(mixpi_vset(p), mixpi_vpow(x, p - 1.0f)));
}

/* dy / (2 y); 0 where y is 0, NaN where y is NaN. */
MIXPI_V mixpi_v MIXPI_P(root_slope)(mixpi_v dy, mixpi_v y) {
    const mixpi_v some = mixpi_vdiv(dy, mixpi_vadd(y, y));
    return MIXPI_P(above_0)(mixpi_vmin(y, mixpi_vset(1.0f)), some, mixpi_vzero());
}

/* One row for each mixp_unary that mixpi_library_value lacks, X(name, value of a, slope of b times
 * dy); b is x, or y where mixpi_slope_reads_result says so. LOOP: functions that dominate a step,
 * or are short, with a loop of their own in MIXPI_P(values). CALL: all others. */
#define MIXPI_UNARIES(LOOP, CALL)                                                             \
    LOOP(RELU, MIXPI_P(relu)(a), MIXPI_P(relu_slope)(dy, b))                                  \
    LOOP(GELU_TANH, MIXPI_P(gelu_tanh)(a), MIXPI_P(gelu_tanh_slope)(dy, b))                   \
    LOOP(GELU_ERF, MIXPI_P(gelu_erf)(a), MIXPI_P(gelu_erf_slope)(dy, b))                      \
    LOOP(SILU, MIXPI_P(silu)(a), MIXPI_P(silu_slope)(dy, b))                                  \
    LOOP(SCALE, mixpi_vmul(a, mixpi_vset(p)), mixpi_vmul(dy, mixpi_vset(p)))                  \
    LOOP(RELU_SQUARED, MIXPI_P(relu_squared)(a), MIXPI_P(relu_squared_slope)(dy, b))          \
    CALL(TANH, MIXPI_P(tanh_near)(a),                                                         \
         mixpi_vmul(dy, mixpi_vfma(mixpi_vneg(b), b, mixpi_vset(1.0f))))                      \
    CALL(SIGMOID, mixpi_vsigmoid(a, &rest), mixpi_vmul(dy, mixpi_vfma(mixpi_vneg(b), b, b)))  \
    CALL(EXP, mixpi_vexp(a), mixpi_vmul(dy, b))                                               \
    CALL(LOG, mixpi_vlog(a), mixpi_vdiv(dy, b))                                               \
    CALL(SQRT, mixpi_vsqrt(a), mixpi_vdiv(dy, mixpi_vadd(b, b)))                              \
    CALL(ROOT, mixpi_vsqrt(a), MIXPI_P(root_slope)(dy, b))                                    \
    CALL(POW, mixpi_vpow(a, p), MIXPI_P(pow_slope)(dy, b, p))                                 \
    CALL(ABS, mixpi_vabs(a), mixpi_vsign(b, dy))                                              \
    CALL(SOFT_CAP, MIXPI_P(soft_cap)(a, p), MIXPI_P(soft_cap_slope)(dy, b, p))                \
    CALL(CLAMP, mixpi_vclamp(a, p, q), MIXPI_P(clamp_slope)(dy, b, p, q))                     \
    CALL(AFFINE, mixpi_vfma(mixpi_vset(p), a, mixpi_vset(q)), mixpi_vmul(dy, mixpi_vset(p)))  \
    CALL(LOG1P, MIXPI_P(log1p)(a), mixpi_vdiv(dy, mixpi_vadd(b, mixpi_vset(1.0f))))           \
    CALL(EXPM1, MIXPI_P(expm1)(a), mixpi_vmul(dy, mixpi_vexp(b)))                             \
    CALL(ERF, MIXPI_P(erf)(a), MIXPI_P(erf_slope)(dy, b))                                     \
    CALL(SOFTPLUS, MIXPI_P(softplus)(a, p), MIXPI_P(softplus_slope)(dy, b, p))                \
    CALL(LEAKY_RELU, MIXPI_P(above_0)(a, a, mixpi_vmul(mixpi_vset(p), a)),                    \
         MIXPI_P(above_0)(b, dy, mixpi_vmul(dy, mixpi_vset(p))))                              \
    CALL(ELU, MIXPI_P(above_0)(a, a, mixpi_vmul(mixpi_vset(p), MIXPI_P(expm1)(a))),           \
         MIXPI_P(elu_slope)(dy, b, p))

#define MIXPI_ROW_NONE(op, value, slope)
#define MIXPI_ROW_ONE(op, value, slope)   + 1
/* Every 16 of n elements, n a multiple of 16: y = value, of a, or of a and b. */
#define MIXPI_EACH_16_OF_1(value)                                                         \
    for (j = 0; j < n; j += 16) {                                                         \
        const mixpi_v a = mixpi_vload(from_a + j);                                        \
        mixpi_vstore(y + j, value);                                                       \
    }                                                                                     \
    break;
#define MIXPI_EACH_16_OF_2(first, value)                                                  \
    for (j = 0; j < n; j += 16) {                                                         \
        const mixpi_v first = mixpi_vload(from_a + j), b = mixpi_vload(from_b + j);       \
        (void)first;                                                                      \
        (void)b;                                                                          \
        mixpi_vstore(y + j, value);                                                       \
    }                                                                                     \
    break;
#define MIXPI_ROW_VALUE(op, value, slope) case MIXP_UNARY_##op: MIXPI_EACH_16_OF_1(value)
#define MIXPI_ROW_SLOPE(op, value, slope) case MIXP_UNARY_##op: MIXPI_EACH_16_OF_2(dy, slope)

/* The values of a function without a loop in MIXPI_P(values). The loop stands inside the switch:
 * a call for each 16 elements would pass them through memory where they are two registers. */
MIXPI_RARE void MIXPI_P(unary_value)(mixp_unary op, float p, float q, float *y,
                                     const float *from_a, int64_t n) {
    mixpi_v rest;
    int64_t j;
    MIXPI_STATIC_ASSERT(every_unary_has_a_case,
                        (int)MIXP_UNARY_COUNT - MIXPI_LIBRARY_UNARIES ==
                            MIXPI_UNARIES(MIXPI_ROW_ONE, MIXPI_ROW_ONE));
    switch ((int)op) {
    MIXPI_UNARIES(MIXPI_ROW_NONE, MIXPI_ROW_VALUE)
    default: break;
    }
}

/* y = dy times op's slopes at b. */
MIXPI_RARE void MIXPI_P(unary_slope)(mixp_unary op, float p, float q, float *y,
                                     const float *const *s, int64_t n) {
    const float *from_a = s[0], *from_b = s[1];
    int64_t j;
    switch ((int)op) {
    MIXPI_UNARIES(MIXPI_ROW_NONE, MIXPI_ROW_SLOPE)
    default: break;
    }
}

/* The gradient of b in a / b: -dy a / b^2. */
MIXPI_F mixpi_v MIXPI_P(divisor_slope)(mixpi_v dy, mixpi_v a, mixpi_v b)
{ return mixpi_vneg(mixpi_vdiv(mixpi_vmul(dy, mixpi_vdiv(a, b)), b)); }

/* The gradient of x in max(x, y): half of dy if x and y are equal, all of dy if either is NaN. */
MIXPI_F mixpi_v MIXPI_P(larger_slope)(mixpi_v dy, mixpi_v x, mixpi_v y) {
    mixpi_v half = mixpi_vmul(dy, mixpi_vset(0.5f)), below = mixpi_vset(-1.0f);
    half = mixpi_vselect_gt(mixpi_vabs(x), below, half, dy);
    half = mixpi_vselect_gt(mixpi_vabs(y), below, half, dy);
    half = mixpi_vselect_gt(y, x, mixpi_vzero(), half);
    return mixpi_vselect_gt(x, y, dy, half);
}

/* The logarithm of a probability, at least -100. */
MIXPI_V mixpi_v MIXPI_P(bce_log)(mixpi_v log)
{ return mixpi_vmax(mixpi_vset(MIXPI_BCE_LOG_LEAST), log); }

/* The loss of a difference d: quadratic up to delta, then linear. */
MIXPI_V mixpi_v MIXPI_P(huber_value)(mixpi_v d, float delta) {
    mixpi_v half = mixpi_vset(0.5f), bound = mixpi_vset(delta), outer;
    d = mixpi_vabs(d);
    outer = mixpi_vmul(bound, mixpi_vsub(d, mixpi_vmul(half, bound)));
    return mixpi_vselect_gt(bound, d, mixpi_vmul(mixpi_vmul(half, d), d), outer);
}

/* The KL loss of x against its target. A target of 0 contributes 0, but propagates NaN and Inf from
 * x, as in PyTorch. */
MIXPI_V mixpi_v MIXPI_P(kl_value)(mixpi_v x, mixpi_v target) {
    mixpi_v t = mixpi_vmul(target, mixpi_vsub(mixpi_vlog(target), x));
    mixpi_v none = mixpi_vmul(target, mixpi_vsub(target, x));
    return mixpi_vselect_gt(mixpi_vabs(target), mixpi_vzero(), t, none);
}

MIXPI_V mixpi_v MIXPI_P(mse)(mixpi_v d) { return mixpi_vmul(d, d); }

MIXPI_V mixpi_v MIXPI_P(bce_logits)(mixpi_v x, mixpi_v target) {
    mixpi_v t = mixpi_vlog1p(mixpi_vexp(mixpi_vneg(mixpi_vabs(x))));
    mixpi_v s = mixpi_vfma(mixpi_vneg(x), target, mixpi_vmax(mixpi_vzero(), x));
    return mixpi_vadd(s, t);
}
/* (1-t) s - t (1-s): no cancellation */
MIXPI_V mixpi_v MIXPI_P(bce_logits_slope)(mixpi_v x, mixpi_v target) {
    mixpi_v t, s = mixpi_vsigmoid(x, &t);
    s = mixpi_vmul(mixpi_vsub(mixpi_vset(1.0f), target), s);
    return mixpi_vfma(mixpi_vneg(target), t, s);
}

MIXPI_V mixpi_v MIXPI_P(bce)(mixpi_v x, mixpi_v target) {
    mixpi_v s = MIXPI_P(bce_log)(mixpi_vlog(x));
    mixpi_v t = MIXPI_P(bce_log)(mixpi_vlog1p(mixpi_vneg(x)));
    t = mixpi_vmul(mixpi_vsub(mixpi_vset(1.0f), target), t);
    return mixpi_vneg(mixpi_vfma(target, s, t));
}
MIXPI_V mixpi_v MIXPI_P(bce_slope)(mixpi_v x, mixpi_v target, mixpi_v by) {
    mixpi_v s = mixpi_vmul(mixpi_vsub(x, target), by);
    mixpi_v t = mixpi_vmul(mixpi_vsub(mixpi_vset(1.0f), x), x);
    return mixpi_vdiv(s, mixpi_vmax(mixpi_vset(MIXPI_BCE_LEAST), t));
}

/* One row for each mixp_loss_kind, X(name, loss of a against its target b, its slope times p). */
#define MIXPI_LOSSES(X)                                                                       \
    X(MSE, MIXPI_P(mse)(mixpi_vsub(a, b)),                                                    \
      mixpi_vmul(mixpi_vmul(mixpi_vset(2.0f), mixpi_vsub(a, b)), mixpi_vset(p)))              \
    X(BCE_LOGITS, MIXPI_P(bce_logits)(a, b),                                                  \
      mixpi_vmul(MIXPI_P(bce_logits_slope)(a, b), mixpi_vset(p)))                             \
    X(BCE, MIXPI_P(bce)(a, b), MIXPI_P(bce_slope)(a, b, mixpi_vset(p)))                       \
    X(L1, mixpi_vabs(mixpi_vsub(a, b)), mixpi_vsign(mixpi_vsub(a, b), mixpi_vset(p)))         \
    X(HUBER, MIXPI_P(huber_value)(mixpi_vsub(a, b), q),                                       \
      mixpi_vmul(mixpi_vclamp(mixpi_vsub(a, b), -q, q), mixpi_vset(p)))                       \
    X(SMOOTH_L1, mixpi_vdiv(MIXPI_P(huber_value)(mixpi_vsub(a, b), q), mixpi_vset(q)),        \
      mixpi_vmul(mixpi_vclamp(mixpi_vdiv(mixpi_vsub(a, b), mixpi_vset(q)), -1.0f, 1.0f),      \
                 mixpi_vset(p)))                                                              \
    X(KL, MIXPI_P(kl_value)(a, b), mixpi_vneg(mixpi_vmul(b, mixpi_vset(p))))                  \
    X(KL_LOG, mixpi_vmul(mixpi_vexp(b), mixpi_vsub(b, a)),                                    \
      mixpi_vneg(mixpi_vmul(mixpi_vexp(b), mixpi_vset(p))))

#define MIXPI_ROW_LOSS(kind, value, slope)   case MIXP_LOSS_##kind: MIXPI_EACH_16_OF_2(a, value)
#define MIXPI_ROW_LOSS_D(kind, value, slope) case MIXP_LOSS_##kind: MIXPI_EACH_16_OF_2(a, slope)

/* The losses of elements against their targets. */
MIXPI_RARE void MIXPI_P(loss_value)(mixp_loss_kind kind, float q, float *y,
                                    const float *const *s, int64_t n) {
    const float *from_a = s[0], *from_b = s[1];
    int64_t j;
    MIXPI_STATIC_ASSERT(every_loss_has_a_case, MIXP_LOSS_COUNT == MIXPI_LOSSES(MIXPI_ROW_ONE));
    switch ((int)kind) {
    MIXPI_LOSSES(MIXPI_ROW_LOSS)
    default: break;
    }
}

/* p times their slopes. */
MIXPI_RARE void MIXPI_P(loss_slope)(mixp_loss_kind kind, float p, float q, float *y,
                                    const float *const *s, int64_t n) {
    const float *from_a = s[0], *from_b = s[1];
    int64_t j;
    switch ((int)kind) {
    MIXPI_LOSSES(MIXPI_ROW_LOSS_D)
    default: break;
    }
}

/* y = fn over n floats, n a multiple of 16, for functions without a loop in MIXPI_P(values). */
MIXPI_RARE void MIXPI_P(value)(int fn, float p, float q, float *y, const float *const *s,
                               int64_t n) {
    if (fn < MIXPI_FN_UNARY_D)
        MIXPI_P(unary_value)((mixp_unary)(fn - MIXPI_FN_UNARY), p, q, y, s[0], n);
    else if (fn < MIXPI_FN_BINARY)
        MIXPI_P(unary_slope)((mixp_unary)(fn - MIXPI_FN_UNARY_D), p, q, y, s, n);
    else if (fn < MIXPI_FN_LOSS_D)
        MIXPI_P(loss_value)((mixp_loss_kind)(fn - MIXPI_FN_LOSS), q, y, s, n);
    else MIXPI_P(loss_slope)((mixp_loss_kind)(fn - MIXPI_FN_LOSS_D), p, q, y, s, n);
}

/* y = fn over n floats. The elements after the last full 16 go through t. */
#define MIXPI_CASE(fn, value)                                                             \
    case fn:                                                                              \
        for (j = 0; j < full; j += 16) mixpi_vstore(y + j, value);                        \
        break;
#define MIXPI_A mixpi_vload(from_a + j)
#define MIXPI_B mixpi_vload(from_b + j)
#define MIXPI_C mixpi_vload(from_c + j)
#define MIXPI_CASE_BINARY(op, value)  MIXPI_CASE(MIXPI_FN_BINARY + (int)MIXP_BINARY_##op, value)
#define MIXPI_ROW_LOOPS(op, value, slope)                                                 \
    case MIXPI_FN_UNARY + (int)MIXP_UNARY_##op:                                           \
        for (j = 0; j < full; j += 16) {                                                  \
            const mixpi_v a = MIXPI_A;                                                    \
            mixpi_vstore(y + j, value);                                                   \
        }                                                                                 \
        break;                                                                            \
    case MIXPI_FN_UNARY_D + (int)MIXP_UNARY_##op:                                         \
        for (j = 0; j < full; j += 16) {                                                  \
            const mixpi_v dy = MIXPI_A, b = MIXPI_B;                                      \
            (void)b;                                                                      \
            mixpi_vstore(y + j, slope);                                                   \
        }                                                                                 \
        break;
MIXPI_K void MIXPI_P(values)(int fn, float p, float q, float *y, const float *const *s,
                             int64_t n) {
    const float *from_a = s[0], *from_b = s[1], *from_c = s[2], *tail[3];
    float t[4][16];
    int64_t j, full = n & ~(int64_t)15;
    size_t left = (size_t)(n - full) * sizeof(float);
    switch (fn) {
    MIXPI_UNARIES(MIXPI_ROW_LOOPS, MIXPI_ROW_NONE)
    MIXPI_CASE_BINARY(ADD, mixpi_vadd(MIXPI_A, MIXPI_B))
    MIXPI_CASE_BINARY(SUB, mixpi_vsub(MIXPI_A, MIXPI_B))
    MIXPI_CASE_BINARY(MUL, mixpi_vmul(MIXPI_A, MIXPI_B))
    MIXPI_CASE_BINARY(DIV, mixpi_vdiv(MIXPI_A, MIXPI_B))
    MIXPI_CASE_BINARY(MAXIMUM, mixpi_vlarger(MIXPI_A, MIXPI_B))
    MIXPI_CASE_BINARY(MINIMUM, mixpi_vsmaller(MIXPI_A, MIXPI_B))
    MIXPI_CASE_BINARY(SWIGLU, mixpi_vmul(MIXPI_P(silu)(MIXPI_A), MIXPI_B))
    MIXPI_CASE(MIXPI_FN_DIVISOR_D, MIXPI_P(divisor_slope)(MIXPI_A, MIXPI_B, MIXPI_C))
    MIXPI_CASE(MIXPI_FN_LARGER_D, MIXPI_P(larger_slope)(MIXPI_A, MIXPI_B, MIXPI_C))
    MIXPI_CASE(MIXPI_FN_GATE_D,
               MIXPI_P(silu_slope)(mixpi_vmul(MIXPI_A, MIXPI_C), MIXPI_B))
    MIXPI_CASE(MIXPI_FN_WHERE, mixpi_vwhere(MIXPI_A, MIXPI_B, MIXPI_C))
    MIXPI_CASE(MIXPI_FN_KEPT, mixpi_vwhere(MIXPI_A, MIXPI_B, mixpi_vset(q)))
    MIXPI_CASE(MIXPI_FN_MASKED, mixpi_vwhere(MIXPI_A, mixpi_vset(q), MIXPI_B))
    default: MIXPI_P(value)(fn, p, q, y, s, full);
    }

    /* The last elements, with zeros behind them. */
    if (left == 0) return;
    memset(t, 0, sizeof t);
    for (j = 0; j < 3; j++) {
        memcpy(t[j], s[j] + full, left);
        tail[j] = t[j];
    }
    MIXPI_P(values)(fn, p, q, t[3], tail, 16);
    memcpy(y + full, t[3], left);
}

/* Fills buf with n elements by repeating its beginning. */
MIXPI_K void MIXPI_P(repeat)(float *buf, int64_t period, int64_t n) {
    for (int64_t have = period; have < n; have += have)
        memcpy(buf + have, buf, (size_t)mixpi_min(n - have, have) * sizeof(float));
}

/* Elements [j, j+n) along the last axis of source k as floats; at: where its row starts. */
MIXPI_K const float *MIXPI_P(map_source)(const mixpi_map *m, int k, int64_t at, int64_t j,
                                         int64_t n, float *buf) {
    mixp_in a = m->a[k];
    int64_t i, step = m->axes.s[k + 1][m->axes.rank - 1];
    if (step == 1) return MIXPI_P(read)(a, at + j, n, buf);
    if (m->periodic[k + 1]) {
        const float *p = MIXPI_P(read)(a, at, m->period, buf);
        if (p != buf) memcpy(buf, p, (size_t)m->period * sizeof(float));
        MIXPI_P(repeat)(buf, m->period, n);
    } else if (step == 0) {
        mixpi_v v = mixpi_vset(MIXPI_P(read_one)(a, at));
        for (i = 0; i < n; i += 16) mixpi_vstore(buf + i, v);
    } else {
        for (i = 0; i < n; i++) buf[i] = MIXPI_P(read_one)(a, at + (j + i) * step);
    }
    return buf;
}

/* Elements [j, j+n) of the row at off[] as floats: in y, or in place if they are floats already. */
MIXPI_K const float *MIXPI_P(map_block)(const mixpi_map *m, const int64_t *off, int64_t j,
                                        int64_t n, float *y) {
    float buf[3][MIXPI_BLOCK];
    const float *s[3] = { NULL, NULL, NULL };
    int k;
    if (m->fn == MIXPI_FN_COPY) return MIXPI_P(map_source)(m, 0, off[1], j, n, y);
    for (k = 0; k < m->sources; k++)
        s[k] = MIXPI_P(map_source)(m, k, off[k + 1], j, n, buf[k]);
    for (; k < 3; k++) s[k] = s[0];         /* not used by functions of fewer sources */
    if (m->each) m->each(m->fn, y, s, n);
    else MIXPI_P(values)(m->fn, m->p, m->q, y, s, n);
    return y;
}

/* One block of a map. */
MIXPI_K void MIXPI_P(map_unit)(const void *job, int64_t unit) {
    const mixpi_map *m = (const mixpi_map *)job;
    float buf[MIXPI_BLOCK], *y = buf;
    int64_t off[4] = { 0, 0, 0, 0 }, j = unit % m->blocks * m->width;
    int64_t n = mixpi_min(m->width, m->cols - j);
    mixpi_map_offsets(m, 0, unit / m->blocks, off);
    if (!m->y.accumulate) y = MIXPI_P(place)(m->y, off[0] + j, buf);
    MIXPI_P(map_block)(m, off, j, n, y);
    if (y == buf) MIXPI_P(write)(m->y, off[0] + j, n, y);
}

/* --- sums --- */

/* acc[i] = sum of acc[i], acc[i + period], ... below n. */
MIXPI_K void MIXPI_P(sum_fold)(float *acc, int64_t n, int64_t period) {
    if (period == 1) {
        acc[0] = MIXPI_P(floats_sum)(acc, n);
        return;
    }
    int64_t i = 0;
    for (; i + 16 <= period; i += 16) {
        double t[16] = { 0.0 };
        for (int64_t k = i; k < n; k += period)
            for (int lane = 0; lane < 16; lane++) t[lane] += (double)acc[k + lane];
        for (int lane = 0; lane < 16; lane++) acc[i + lane] = (float)t[lane];
    }
    for (; i < period; i++) {
        double t = 0.0;
        for (int64_t k = i; k < n; k += period) t += (double)acc[k];
        acc[i] = (float)t;
    }
}

/* acc[0, n) = the sum of a run of rows of the tile that starts at column j, at base[]. */
MIXPI_K void MIXPI_P(sum_rows)(const mixpi_sum *s, const int64_t *base, int64_t run,
                               int64_t j, int64_t n, float *acc) {
    const mixpi_map *m = &s->map;
    int64_t row = run * s->run, end = mixpi_min(row + s->run, s->rows), off[4];
    float y[MIXPI_BLOCK];
    memset(acc, 0, (size_t)n * sizeof *acc);
    for (; row < end; row++) {
        int64_t outer = row, count;
        if (s->fold) {
            outer = row / m->blocks;
            j = row % m->blocks * m->width;
        }
        memcpy(off, base, sizeof off);
        mixpi_map_offsets(m, 1, outer, off);
        count = mixpi_min(n, m->cols - j);
        MIXPI_P(floats_add)(acc, acc, MIXPI_P(map_block)(m, off, j, count, y), count);
    }
}

/* One run of rows of one tile of the output. */
MIXPI_K void MIXPI_P(sum_unit)(const void *job, int64_t unit) {
    const mixpi_sum *s = (const mixpi_sum *)job;
    const mixpi_map *m = &s->map;
    float acc[MIXPI_BLOCK];
    int64_t run = unit % s->runs, j = unit / s->runs % s->tiles * m->width;
    int64_t output = unit / s->runs / s->tiles, n = mixpi_min(m->width, m->cols - j), i;
    int64_t off[4] = { 0, 0, 0, 0 };
    mixpi_map_offsets(m, 0, output, off);
    MIXPI_P(sum_rows)(s, off, run, j, n, acc);
    if (s->fold) {
        MIXPI_P(sum_fold)(acc, n, s->out_cols);
        n = s->out_cols;
    }

    /* One of several runs leaves its sums to sum_join. */
    if (s->runs > 1) {
        float *to = s->partial + mixpi_sum_partial(s, run, output) + j;
        memcpy(to, acc, (size_t)n * sizeof *acc);
        return;
    }

    for (i = 0; i < n; i++) acc[i] *= s->factor;
    MIXPI_P(write)(m->y, off[0] + j, n, acc);
}

/* The runs of one tile of the output, added in order. */
MIXPI_K void MIXPI_P(sum_join)(const void *job, int64_t unit) {
    const mixpi_sum *s = (const mixpi_sum *)job;
    const mixpi_map *m = &s->map;
    int64_t output = unit / s->tiles, j = unit % s->tiles * m->width;
    int64_t i, run, n = mixpi_min(m->width, s->out_cols - j), off[4] = { 0, 0, 0, 0 };
    float acc[MIXPI_BLOCK];
    for (i = 0; i < n; i++) {
        double t = 0.0;
        for (run = 0; run < s->runs; run++)
            t += (double)s->partial[mixpi_sum_partial(s, run, output) + j + i];
        acc[i] = (float)(t * (double)s->factor);
    }
    mixpi_map_offsets(m, 0, output, off);
    MIXPI_P(write)(m->y, off[0] + j, n, acc);
}

/* --- the kernels themselves --- */

static const mixpi_map_units MIXPI_P(map_units) =
    { MIXPI_P(map_unit), MIXPI_P(sum_unit), MIXPI_P(sum_join) };
MIXPI_KERNEL(unary, mixpi_cpu_unary, mixp_unary_args, &MIXPI_P(map_units))
MIXPI_KERNEL(unary_backward, mixpi_cpu_unary_backward, mixp_unary_backward_args,
             &MIXPI_P(map_units))
MIXPI_KERNEL(binary, mixpi_cpu_binary, mixp_binary_args, &MIXPI_P(map_units))
MIXPI_KERNEL(binary_backward, mixpi_cpu_binary_backward, mixp_binary_args, &MIXPI_P(map_units))
MIXPI_KERNEL(reduce, mixpi_cpu_reduce, mixp_reduce_args, &MIXPI_P(map_units))
MIXPI_KERNEL(reduce_backward, mixpi_cpu_reduce_backward, mixp_reduce_args, &MIXPI_P(map_units))
MIXPI_KERNEL(scale_by, mixpi_cpu_scale_by, mixp_scale_by_args, &MIXPI_P(map_units))
MIXPI_KERNEL(where, mixpi_cpu_where, mixp_where_args, &MIXPI_P(map_units))
MIXPI_KERNEL(where_backward, mixpi_cpu_where_backward, mixp_where_args, &MIXPI_P(map_units))

/* One block. */
MIXPI_K void MIXPI_P(dropout_unit)(const void *job, int64_t unit) {
    const mixpi_dropout_job *d = (const mixpi_dropout_job *)job;
    const mixp_dropout_args *k = d->k;
    float buf[MIXPI_BLOCK], out[MIXPI_BLOCK], *y = out;
    uint32_t random[MIXPI_BLOCK];
    int64_t i, first = unit * MIXPI_BLOCK, n = mixpi_min(MIXPI_BLOCK, k->n - first);
    const float *a = MIXPI_P(read)(k->a, first, n, buf);
    if (!k->y.accumulate) y = MIXPI_P(place)(k->y, first, out);
    for (i = 0; i < n; i += 16) mixpi_vrandom(d->key, (uint64_t)(first + i), random + i);
    for (i = 0; i < n; i++) y[i] = random[i] >= d->limit ? a[i] * d->scale : 0.0f;
    if (y == out) MIXPI_P(write)(k->y, first, n, out);
}

MIXPI_KERNEL(dropout, mixpi_cpu_dropout, mixp_dropout_args, MIXPI_P(dropout_unit))

/* One block. */
MIXPI_FLAT void MIXPI_P(random_unit)(const void *job, int64_t unit) {
    const mixpi_random_job *d = (const mixpi_random_job *)job;
    int64_t i, first = unit * MIXPI_BLOCK, n = mixpi_min(MIXPI_BLOCK, d->k->n - first);
    float out[MIXPI_BLOCK];
    for (i = 0; i < n; i++) out[i] = mixpi_random_value(d->k, d->key, first + i);
    MIXPI_P(write)(d->k->y, first, n, out);
}

MIXPI_KERNEL(random, mixpi_cpu_random, mixp_random_args, MIXPI_P(random_unit))
