#pragma once
#include "copy.cu"
/* --- functions of an element -------------------------------------------------------------- */

namespace {

/* The function that a pass computes from up to three sources a, b, c. The sources of a slope are
 * dy, then x or y (see unary_backward). */
constexpr int
    FN_UNARY = 0,                                   /* + mixp_unary                          */
    FN_UNARY_D = FN_UNARY + (int)MIXP_UNARY_COUNT,  /* + mixp_unary                          */
    FN_BINARY = FN_UNARY_D + (int)MIXP_UNARY_COUNT, /* + mixp_binary                         */
    FN_DIVISOR_D = FN_BINARY + (int)MIXP_BINARY_COUNT,  /* dy, a, b: gradient of b in a / b  */
    FN_LARGER_D = FN_DIVISOR_D + 1,                 /* dy, x, y: gradient of x in max(x, y)  */
    FN_GATE_D = FN_LARGER_D + 1,                    /* dy, a, b: gradient of a in silu(a) b  */
    FN_PAIR_D = FN_GATE_D + 1,                      /* dy, a, b: gradient of a in a power, an
                                                       atan2, a prelu (+ 2 each); + 1: of b  */
    FN_WHERE = FN_PAIR_D + 6,                       /* mask, a, b: mask ? a : b              */
    FN_KEPT = FN_WHERE + 1,                         /* mask, a: mask ? a : q                 */
    FN_MASKED = FN_KEPT + 1,                        /* mask, b: mask ? q : b                 */
    FN_LOSS = FN_MASKED + 1,                        /* + mixp_loss_kind                      */
    FN_LOSS_D = FN_LOSS + (int)MIXP_LOSS_COUNT,     /* + mixp_loss_kind                      */
    FN_COPY = FN_LOSS_D + (int)MIXP_LOSS_COUNT;     /* a unchanged, for sums                 */

/* One row for each mixp_unary, in the order of the enum: X(name, value of a, slope of b times g); b
 * is x, or y for functions whose slope needs the result. */
#define MIXPI_CUDA_UNARIES(X)                                                                 \
    X(RELU, larger(0.0f, a), b <= 0.0f ? 0.0f : g)                                            \
    X(GELU_TANH, a * sigmoid(gelu_2u(a, a * a), &t), gelu_tanh_slope(g, b))                   \
    X(GELU_ERF, a * normcdff(clamped(a, MIXPI_ERF_BOUND)), gelu_erf_slope(g, b))              \
    X(SILU, a * sigmoid(a, &t), silu_slope(g, b))                                             \
    X(TANH, tanhf(a), g * fmaf(-b, b, 1.0f))                                                  \
    X(SIGMOID, sigmoid(a, &t), g * fmaf(-b, b, b))                                            \
    X(EXP, expf(a), g * b)                                                                    \
    X(LOG, logf(a), g / b)                                                                    \
    X(SQRT, sqrtf(a), g / (b + b))                                                            \
    X(POW, power(a, p), p == 0.0f ? 0.0f : g * (p * power(b, p - 1.0f)))                      \
    X(SCALE, __fmul_rn(a, p), __fmul_rn(g, p))                                                \
    X(RELU_SQUARED, squared(larger(0.0f, a)), g * twice(larger(0.0f, b)))                     \
    X(ABS, fabsf(a), signed_by(b, g))                                                         \
    X(SIN, sinf(a), g * cosf(b))                                                              \
    X(COS, cosf(a), -(g * sinf(b)))                                                           \
    X(SOFT_CAP, p * tanhf(a / p), soft_cap_slope(g, b, p))                                    \
    X(CLAMP, confined(a, p, q), is_between(b, p, q) ? g : 0.0f)                               \
    X(AFFINE, fmaf(p, a, q), __fmul_rn(g, p))                                                 \
    X(LOG1P, log1pf(a), g / (b + 1.0f))                                                       \
    X(EXPM1, expm1f(a), g * expf(b))                                                          \
    X(ERF, erff(a), erf_slope(g, b))                                                          \
    X(SOFTPLUS, softplus(a, p), g * sigmoid(b * p, &t))                                       \
    X(LEAKY_RELU, a > 0.0f ? a : p * a, b > 0.0f ? g : g * p)                                 \
    X(ELU, a > 0.0f ? a : p * expm1f(a), b <= 0.0f ? g * (p * expf(b)) : g)                   \
    X(ROOT, sqrtf(a), b == 0.0f ? 0.0f : g / (b + b))                                         \
    X(LOG2, log2f(a), g / (b * 0.693147182f))                                                 \
    X(LOG10, log10f(a), g / (b * 2.30258512f))                                                \
    X(ACOS, acosf(a), -arc_slope(g, b))                                                       \
    X(ASIN, asinf(a), arc_slope(g, b))                                                        \
    X(TAN, tanf(a), g * fmaf(b, b, 1.0f))                                                     \
    X(SINH, sinhf(a), g * coshf(b))                                                           \
    X(COSH, coshf(a), g * sinhf(b))                                                           \
    X(ERFINV, erfinvf(a), erfinv_slope(g, b))

/* The others, in the order of the enums. A new one needs a case in value and strided_kernels, or in
 * loss_value, loss_slope and strided_kernels. */
#define MIXPI_CUDA_BINARIES(X) X(ADD) X(SUB) X(MUL) X(DIV) X(MAXIMUM) X(MINIMUM) X(SWIGLU)    \
                               X(POWER) X(ATAN2) X(PRELU)
#define MIXPI_CUDA_LOSSES(X)   X(MSE) X(BCE_LOGITS) X(BCE) X(L1) X(HUBER) X(SMOOTH_L1) X(KL)  \
                               X(KL_LOG)

#define MIXPI_UNARY_NUMBER(op, value, slope) MIXP_UNARY_##op,
#define MIXPI_BINARY_NUMBER(op) MIXP_BINARY_##op,
#define MIXPI_LOSS_NUMBER(kind) MIXP_LOSS_##kind,
constexpr int unary_numbers[] = { MIXPI_CUDA_UNARIES(MIXPI_UNARY_NUMBER) };
constexpr int binary_numbers[] = { MIXPI_CUDA_BINARIES(MIXPI_BINARY_NUMBER) };
constexpr int loss_numbers[] = { MIXPI_CUDA_LOSSES(MIXPI_LOSS_NUMBER) };
#undef MIXPI_UNARY_NUMBER
#undef MIXPI_BINARY_NUMBER
#undef MIXPI_LOSS_NUMBER

/* Are the values 0, 1, ..., count - 1? */
template <int n> constexpr bool all_of(const int (&numbers)[n], int count) {
    for (int i = 0; i < n; i++)
        if (numbers[i] != i) return false;
    return n == count;
}
static_assert(all_of(unary_numbers, MIXP_UNARY_COUNT), "a mixp_unary has no case here");
static_assert(all_of(binary_numbers, MIXP_BINARY_COUNT),
              "a mixp_binary has no case here");
static_assert(all_of(loss_numbers, MIXP_LOSS_COUNT), "a mixp_loss_kind has no case here");

/* The larger of a and b, or b if either is NaN. */
__device__ inline float larger(float a, float b) { return a > b ? a : b; }
/* NaN stays NaN. */
__device__ inline float clamped(float x, float bound) {
    return x > bound ? bound : x < -bound ? -bound : x;
}

/* 1 / (1 + e^-x). *rest: 1 minus the result. Both are accurate in their tails. */
__device__ inline float sigmoid(float x, float *rest) {
    float e = expf(-fabsf(x)), q = 1.0f / (1.0f + e), t = e * q;
    *rest = x > 0.0f ? t : q;
    return x > 0.0f ? q : t;
}

/* The density of the normal distribution; x^2 includes the bits that the rounded product loses. */
__device__ inline float density(float x) {
    float h = x * x, low = fmaf(x, x, -h), e = expf(-0.5f * h);
    return fmaf(e, -0.5f * low, e) * MIXPI_DENSITY;
}

__device__ inline float power(float x, float p) {
    if (p == 1.0f) return x;
    if (p == 2.0f) return x * x;
    if (p == 3.0f) return x * x * x;
    if (p == 0.5f) return sqrtf(x);
    if (p == -1.0f) return 1.0f / x;
    return powf(x, p);
}

/* x (GELU_LINEAR + GELU_CUBIC x^2). */
__device__ inline float gelu_2u(float x, float square) {
    return x * fmaf(square, MIXPI_GELU_CUBIC, MIXPI_GELU_LINEAR);
}

/* x with the sign of s; 0 where s is 0. */
__device__ inline float signed_by(float s, float x) { return s > 0.0f ? x : s < 0.0f ? -x : 0.0f; }

/* max(a, 0) + log(1 + e^-|p a|) / p: never overflows. */
__device__ inline float softplus(float a, float p) {
    return larger(0.0f, a) + log1pf(expf(-(fabsf(a) * p))) / p;
}

__device__ inline float squared(float a) { return a * a; }
__device__ inline float twice(float a) { return a + a; }

/* a, but at least p and at most q. */
__device__ inline float confined(float a, float p, float q) {
    a = a < p ? p : a;
    return a > q ? q : a;
}

/* g sigmoid(2u) + g x sigmoid(2u) (1 - sigmoid(2u)) (2u)'; constant beyond the bound. */
__device__ inline float gelu_tanh_slope(float g, float x) {
    x = clamped(x, MIXPI_GELU_BOUND);
    float rest, square = x * x, s = sigmoid(gelu_2u(x, square), &rest);
    return g * fmaf(s * rest * x, fmaf(square, MIXPI_GELU_SLOPE, MIXPI_GELU_LINEAR), s);
}

__device__ inline float gelu_erf_slope(float g, float x) {
    x = clamped(x, MIXPI_ERF_BOUND);
    return g * fmaf(x, density(x), normcdff(x));
}

__device__ inline float silu_slope(float g, float x) {
    x = clamped(x, MIXPI_SILU_BOUND);
    float rest, s = sigmoid(x, &rest);
    return g * fmaf(s * rest, x, s);
}

/* 2/sqrt(pi) e^(-x^2), times g; x^2 includes the bits that the rounded product loses. */
__device__ inline float erf_slope(float g, float x) {
    x = clamped(x, MIXPI_ERF_BOUND);
    float h = x * x, low = fmaf(x, x, -h), e = expf(-h);
    return g * (fmaf(e, -low, e) * MIXPI_ERF_SLOPE);
}

/* g / sqrt(1 - x^2), exact near 1. */
__device__ inline float arc_slope(float g, float x) { return g / sqrtf((1.0f - x) * (1.0f + x)); }

/* sqrt(pi)/2 e^(y^2), times g, with y = erfinv(x); y^2 includes the bits that the rounded product
 * loses. */
__device__ inline float erfinv_slope(float g, float x) {
    float y = erfinvf(x), h = y * y, e = expf(h);
    if (h < 88.0f) e = fmaf(e, fmaf(y, y, -h), e);
    return g * (e * 0.886226925f);
}

/* Is x above p and below q? An infinite bound does not limit x. */
__device__ inline bool is_between(float x, float p, float q) {
    return (x > p || mixp_bits_of_f32(p) == 0xFF800000u) &&
           (x < q || mixp_bits_of_f32(q) == 0x7F800000u);
}

__device__ inline float soft_cap_slope(float g, float x, float p) {
    float t = tanhf(x / p);
    return g * fmaf(-t, t, 1.0f);
}

#define MIXPI_UNARY_VALUE(op, value, slope) case MIXP_UNARY_##op: return value;
#define MIXPI_UNARY_SLOPE(op, value, slope) case MIXP_UNARY_##op: return slope;
/* clang-format off */
template <mixp_unary op> __device__ inline float unary_value(float a, float p, float q) {
    float t;
    switch (op) {
    MIXPI_CUDA_UNARIES(MIXPI_UNARY_VALUE)
    case MIXP_UNARY_COUNT: break;
    }
    return a;
}
/* clang-format on */

/* g: the incoming gradient. */
template <mixp_unary op> __device__ inline float unary_slope(float g, float b, float p, float q) {
    float t;
    switch (op) {
        MIXPI_CUDA_UNARIES(MIXPI_UNARY_SLOPE)
    case MIXP_UNARY_COUNT: break;
    }
    return g;
}
#undef MIXPI_UNARY_VALUE
#undef MIXPI_UNARY_SLOPE

/* NaN if either is NaN: larger propagates b's NaN, and the product with 0 propagates a's. */
__device__ inline float nan_of(float a, float of_both) {
    return fmaf(clamped(a, 1.0f), 0.0f, of_both);
}

/* clang-format off */
template <mixp_binary op> __device__ inline float binary_value(float a, float b) {
    float t;
    switch (op) {
    case MIXP_BINARY_ADD:   return a + b;
    case MIXP_BINARY_SUB:   return a - b;
    case MIXP_BINARY_MUL:   return __fmul_rn(a, b);
    case MIXP_BINARY_DIV:   return a / b;
    case MIXP_BINARY_MAXIMUM: return nan_of(a, larger(a, b));
    case MIXP_BINARY_MINIMUM: return nan_of(a, a < b ? a : b);
    case MIXP_BINARY_SWIGLU:  return a * sigmoid(a, &t) * b;
    case MIXP_BINARY_POWER:
    case MIXP_BINARY_ATAN2:
    case MIXP_BINARY_PRELU: return mixpi_pair_value(op, a, b);
    case MIXP_BINARY_COUNT: break;
    }
    return a;
}
/* clang-format on */

__device__ inline float bce_log(float log) { return larger(MIXPI_BCE_LOG_LEAST, log); }

/* The loss of a difference: quadratic up to delta, then linear. */
__device__ inline float huber(float d, float delta) {
    d = fabsf(d);
    return d < delta ? 0.5f * d * d : delta * (d - 0.5f * delta);
}

template <mixp_loss_kind kind> __device__ inline float loss_value(float a, float b, float delta) {
    switch (kind) {
    case MIXP_LOSS_MSE: return (a - b) * (a - b);
    case MIXP_LOSS_BCE_LOGITS: return fmaf(-a, b, larger(0.0f, a)) + log1pf(expf(-fabsf(a)));
    case MIXP_LOSS_BCE: return -fmaf(b, bce_log(logf(a)), (1.0f - b) * bce_log(log1pf(-a)));
    case MIXP_LOSS_L1: return fabsf(a - b);
    case MIXP_LOSS_HUBER: return huber(a - b, delta);
    case MIXP_LOSS_SMOOTH_L1: return huber(a - b, delta) / delta;
    case MIXP_LOSS_KL: return b * ((fabsf(b) > 0.0f ? logf(b) : b) - a);
    case MIXP_LOSS_KL_LOG: return expf(b) * (b - a);
    case MIXP_LOSS_COUNT: break;
    }
    return a;
}

template <mixp_loss_kind kind>
__device__ inline float loss_slope(float a, float b, float p, float delta) {
    float s, t;
    switch (kind) {
    case MIXP_LOSS_MSE: return 2.0f * (a - b) * p;
    case MIXP_LOSS_BCE_LOGITS: /* (1-t) s - t (1-s): no cancellation        */
        s = sigmoid(a, &t);
        return fmaf(-b, t, (1.0f - b) * s) * p;
    case MIXP_LOSS_BCE: return (a - b) * p / larger(MIXPI_BCE_LEAST, (1.0f - a) * a);
    case MIXP_LOSS_L1: return signed_by(a - b, p);
    case MIXP_LOSS_HUBER: return clamped(a - b, delta) * p;
    case MIXP_LOSS_SMOOTH_L1: return clamped((a - b) / delta, 1.0f) * p;
    case MIXP_LOSS_KL: return -(b * p);
    case MIXP_LOSS_KL_LOG: return -(expf(b) * p);
    case MIXP_LOSS_COUNT: break;
    }
    return a;
}

/* The gradient of x in max(x, y): half of dy if x and y are equal, all of dy if either is NaN. */
__device__ inline float larger_slope(float g, float x, float y) {
    return x < y ? 0.0f : x == y ? 0.5f * g : g;
}

template <int fn> __device__ inline float value(float a, float b, float c, float p, float q) {
    if constexpr (fn < FN_UNARY_D) return unary_value<(mixp_unary)fn>(a, p, q);
    else if constexpr (fn < FN_BINARY)
        return unary_slope<(mixp_unary)(fn - FN_UNARY_D)>(a, b, p, q);
    else if constexpr (fn < FN_DIVISOR_D) return binary_value<(mixp_binary)(fn - FN_BINARY)>(a, b);
    else if constexpr (fn == FN_DIVISOR_D) return -(a * (b / c) / c);
    else if constexpr (fn == FN_LARGER_D) return larger_slope(a, b, c);
    else if constexpr (fn == FN_GATE_D) return silu_slope(a * c, b);
    else if constexpr (fn < FN_WHERE)
        return mixpi_pair_slope(
            (mixp_binary)(MIXP_BINARY_POWER + (fn - FN_PAIR_D) / 2), (fn - FN_PAIR_D) % 2, a, b, c);
    else if constexpr (fn == FN_WHERE) return fabsf(a) > 0.0f ? b : c;
    else if constexpr (fn == FN_KEPT) return fabsf(a) > 0.0f ? b : q;
    else if constexpr (fn == FN_MASKED) return fabsf(a) > 0.0f ? q : b;
    else if constexpr (fn < FN_LOSS_D) return loss_value<(mixp_loss_kind)(fn - FN_LOSS)>(a, b, q);
    else if constexpr (fn < FN_COPY)
        return loss_slope<(mixp_loss_kind)(fn - FN_LOSS_D)>(a, b, p, q);
    else return a;
}

/* --- maps of dense arrays ------------------------------------------------------------------ */

struct Map {
    mixp_out   out;
    mixp_in    a, b;            /* b: data is NULL if fn has one source                      */
    int64_t    n, over;
    float      p, q;
    const float *factor;        /* p is in device memory                                     */
    mixp_in    dloss;           /* p is dloss / `over`                                       */
    bool       wide;
};

const mixp_in nothing_in = { NULL, MIXP_F32 };

inline Map map_of(const mixp_out &out, const mixp_in &a, const mixp_in &b, int64_t n) {
    Map m;
    memset((void *)&m, 0, sizeof m);
    m.out = out;
    m.a = a;
    m.b = b;
    m.n = n;
    m.wide = is_wide(out) && is_wide(a) && is_wide(b);
    return m;
}

/* Only the slopes of losses divide; in other functions a division would cost registers. */
template <int fn> __device__ inline float map_parameter(const Map &m) {
    if constexpr (fn >= FN_LOSS_D && fn < FN_COPY)
        if (m.dloss.data) return get1(m.dloss, 0) / (float)m.over;
    return m.factor ? *m.factor : m.p;
}

/* The minimum of blocks on a multiprocessor. Without it, nvcc saves registers and spills. */
const int map_blocks = 4;

template <int fn>
__global__ void __launch_bounds__(map_threads, map_blocks)
    map_dense(const __grid_constant__ Map m) {
    float p = map_parameter<fn>(m);
    int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * 8;
    for (; i < m.n; i += (int64_t)gridDim.x * blockDim.x * 8) {
        int n = (int)least(8, m.n - i);
        float a[8], b[8];
        get8_any(m.a, i, n, m.wide, a);
        if (m.b.data) get8_any(m.b, i, n, m.wide, b);
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) a[k] = value<fn>(a[k], m.b.data ? b[k] : 0.0f, 0.0f, p, m.q);
        store8(m.out, i, n, m.wide, a);
    }
}

/* --- gelu and silu of low numbers ----------------------------------------------------------- *
 *
 * If all arrays are f16, or all are bf16, a result has 11 or 8 bits. The exponential, the
 * reciprocal and the normal distribution then do not need 24 exact bits: these versions are
 * accurate to 2^-19. The stored result is within one unit in the last place of the exact result,
 * for every input.
 */

/* e^-h 2^32, over the full range of f32: ex2 by itself gives 0 below 2^-126. */
__device__ inline float exp_raised(float h) { return exp2_approx(fmaf(h, -1.44269504f, 32.0f)); }
constexpr float lowered = 2.3283064365386963e-10f;      /* 2^-32 */

/* 1 / (1 + e^-x). *rest: 1 minus the result. */
__device__ inline float quick_sigmoid(float x, float *rest) {
    float e = exp_raised(fabsf(x)) * lowered, q = rcp_approx(1.0f + e), t = e * q;
    *rest = x > 0.0f ? t : q;
    return x > 0.0f ? q : t;
}

/* The normal distribution at -|x|, divided by e^(-x^2/2), as a polynomial of t = 1 / (1 + p |x|).
 * The polynomial has degree 7 and no constant term; its relative error is below 7e-7 up to
 * MIXPI_ERF_BOUND. Its coefficients are weighted least squares, made minimax by Lawson's weights
 * (1961). *raised: e^(-x^2/2) 2^32. */
__device__ inline float quick_normal(float x, float *raised) {
    float t = rcp_approx(fmaf(0.265f, fabsf(x), 1.0f)), q = -0.0677897678f;
    q = fmaf(q, t, 0.19528336f);
    q = fmaf(q, t, -0.0663783597f);
    q = fmaf(q, t, 0.142505199f);
    q = fmaf(q, t, 0.082941714f);
    q = fmaf(q, t, 0.10783779f);
    q = fmaf(q, t, 0.105599753f) * t * lowered;
    *raised = exp_raised(x * x * 0.5f);
    q *= *raised;
    return x < 0.0f ? q : 1.0f - q;
}

__device__ inline float quick_gelu_tanh_slope(float g, float x) {
    x = clamped(x, MIXPI_GELU_BOUND);
    float rest, square = x * x, s = quick_sigmoid(gelu_2u(x, square), &rest);
    return g * fmaf(s * rest * x, fmaf(square, MIXPI_GELU_SLOPE, MIXPI_GELU_LINEAR), s);
}
__device__ inline float quick_gelu_erf_slope(float g, float x) {
    x = clamped(x, MIXPI_ERF_BOUND);
    float raised, normal = quick_normal(x, &raised);
    return g * fmaf(x * (MIXPI_DENSITY * lowered), raised, normal);
}
__device__ inline float quick_silu_slope(float g, float x) {
    x = clamped(x, MIXPI_SILU_BOUND);
    float rest, s = quick_sigmoid(x, &rest);
    return g * fmaf(s * rest, x, s);
}

/* A function of a; a slope takes g, then a. */
template <int fn> __device__ inline float quick_value(float g, float a) {
    float t;
    switch (fn) {
    case FN_UNARY + MIXP_UNARY_GELU_TANH: return g * quick_sigmoid(gelu_2u(g, g * g), &t);
    case FN_UNARY + MIXP_UNARY_GELU_ERF: return g * quick_normal(clamped(g, MIXPI_ERF_BOUND), &t);
    case FN_UNARY + MIXP_UNARY_SILU: return g * quick_sigmoid(g, &t);
    case FN_UNARY_D + MIXP_UNARY_GELU_TANH: return quick_gelu_tanh_slope(g, a);
    case FN_UNARY_D + MIXP_UNARY_GELU_ERF: return quick_gelu_erf_slope(g, a);
    default: return quick_silu_slope(g, a);
    }
}

template <mixp_dtype D> __device__ inline void add_low(const Map &m, int64_t i, int n, float *v) {
    float old[8];
    plain_get<D>(m.out.data, i, n, m.wide, old);
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) v[k] += old[k];
}

template <int fn, mixp_dtype D>
__global__ void __launch_bounds__(map_threads, map_blocks) map_low(const __grid_constant__ Map m) {
    int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * 8;
    for (; i < m.n; i += (int64_t)gridDim.x * blockDim.x * 8) {
        int n = (int)least(8, m.n - i);
        float a[8], b[8];
        plain_get<D>(m.a.data, i, n, m.wide, a);
        if constexpr (fn >= FN_UNARY_D) plain_get<D>(m.b.data, i, n, m.wide, b);
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) a[k] = quick_value<fn>(a[k], fn >= FN_UNARY_D ? b[k] : 0.0f);
        if (m.out.accumulate) add_low<D>(m, i, n, a);
        plain_put<D>(m.out.data, i, n, m.wide, a);
    }
}

struct Dropout {
    mixp_dropout_args k;
    uint64_t        limit;      /* random numbers below it drop the element                  */
    float           scale;
    Draws           draws;
    bool            wide;
};

__global__ void __launch_bounds__(map_threads) dropout_dense(const __grid_constant__ Dropout d) {
    uint64_t key = key_now(d.draws);
    int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * 8;
    for (; i < d.k.n; i += (int64_t)gridDim.x * blockDim.x * 8) {
        int n = (int)least(8, d.k.n - i);
        float a[8];
        get8_any(d.k.a, i, n, d.wide, a);
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) {
            bool kept = mixp_random_at(key, (uint64_t)(i + k)) >= d.limit;
            a[k] = kept ? __fmul_rn(a[k], d.scale) : 0.0f;
        }
        store8(d.k.y, i, n, d.wide, a);
    }
}

struct RandomJob {
    mixp_random_args k;
    Draws draws;
};

__global__ void __launch_bounds__(map_threads)
    random_elements(const __grid_constant__ RandomJob d) {
    uint64_t key = key_now(d.draws);
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i < d.k.n; i += (int64_t)gridDim.x * blockDim.x)
        put1(d.k.y, i, mixpi_random_value(&d.k, key, i));
}

typedef void (*MapKernel)(Map m);
#define MIXPI_UNARY_MAP(op, value, slope) map_dense<FN_UNARY + MIXP_UNARY_##op>,
#define MIXPI_SLOPE_MAP(op, value, slope) map_dense<FN_UNARY_D + MIXP_UNARY_##op>,
#define MIXPI_LOSS_MAP(kind) map_dense<FN_LOSS_D + MIXP_LOSS_##kind>,
const MapKernel unary_maps[] = { MIXPI_CUDA_UNARIES(MIXPI_UNARY_MAP) };
const MapKernel slope_maps[] = { MIXPI_CUDA_UNARIES(MIXPI_SLOPE_MAP) };
const MapKernel loss_slope_maps[] = { MIXPI_CUDA_LOSSES(MIXPI_LOSS_MAP) };
#undef MIXPI_UNARY_MAP
#undef MIXPI_SLOPE_MAP
#undef MIXPI_LOSS_MAP

/* The kernel for arrays that all have the same low dtype, or NULL. */
template <mixp_dtype D> inline MapKernel low_map(int fn) {
    switch (fn) {
#define MIXPI_LOW(f)                                                                               \
  case f: return map_low<f, D>;
        MIXPI_LOW(FN_UNARY + MIXP_UNARY_GELU_TANH)
        MIXPI_LOW(FN_UNARY + MIXP_UNARY_GELU_ERF)
        MIXPI_LOW(FN_UNARY + MIXP_UNARY_SILU)
        MIXPI_LOW(FN_UNARY_D + MIXP_UNARY_GELU_TANH)
        MIXPI_LOW(FN_UNARY_D + MIXP_UNARY_GELU_ERF)
        MIXPI_LOW(FN_UNARY_D + MIXP_UNARY_SILU)
#undef MIXPI_LOW
    default: return NULL;
    }
}
inline MapKernel map_kernel(int fn, MapKernel any, const Map &m) {
    mixp_dtype d = m.out.dtype;
    MapKernel low = NULL;
    if (m.a.dtype != d || (m.b.data && m.b.dtype != d)) return any;
    if (d == MIXP_F16) low = low_map<MIXP_F16>(fn);
    if (d == MIXP_BF16) low = low_map<MIXP_BF16>(fn);
    return low ? low : any;
}

inline unsigned map_grid(int64_t n) { return grid_for(ceil_div(n, 8), map_threads); }

/* The checks that all maps share, then the launch. */
inline mixp_result run_map(Kernel *k, const char *what, MapKernel kernel, const Map &m) {
    if (!is_real(m.out.dtype) || !is_real(m.a.dtype) || !is_real(m.b.dtype)) return MIXP_ERR_DTYPE;
    if (!k->state) return MIXP_ERR_ORDER;
    if (m.n <= 0) return m.n ? MIXP_ERR_ARGUMENT : MIXP_OK;
    if (!m.out.data || !m.a.data) return MIXP_ERR_ARGUMENT;
    return k->report(what, MIXPI_LAUNCH(kernel, map_grid(m.n), map_threads, 0, k->stream, m));
}

}   /* namespace */

static mixp_result mixpi_cuda_unary(const mixp_exec *x, const mixp_unary_args *k) {
    Kernel kernel(x);
    Map m = map_of(k->y, k->a, nothing_in, k->n);
    if ((unsigned)k->op >= MIXP_UNARY_COUNT) return MIXP_ERR_ARGUMENT;
    m.p = k->p;
    m.q = k->q;
    return run_map(&kernel, "unary", map_kernel(FN_UNARY + k->op, unary_maps[k->op], m), m);
}

static mixp_result mixpi_cuda_unary_backward(
    const mixp_exec *x, const mixp_unary_backward_args *k) {
    Kernel kernel(x);
    const bool alone = mixpi_slope_is_factor(k->op) != 0;
    const mixp_in &source = alone ? nothing_in : mixpi_slope_reads_result(k->op) ? k->y : k->a;
    if ((unsigned)k->op >= MIXP_UNARY_COUNT) return MIXP_ERR_ARGUMENT;
    if (k->n > 0 && !alone && !source.data) return MIXP_ERR_ARGUMENT;

    Map m = map_of(k->da, k->dy, source, k->n);
    m.p = k->p;
    m.q = k->q;
    return run_map(
        &kernel, "unary_backward", map_kernel(FN_UNARY_D + k->op, slope_maps[k->op], m), m);
}

/* Records whether a loss is Inf or NaN; one warp, because the loss is one element. */
static __global__ void note_bad(const mixp_in a, int64_t n, int32_t *bad) {
    for (int64_t i = (int64_t)threadIdx.x; i < n; i += warp_size) {
        float v[8];
        get8_any(a, i, 1, false, v);
        if ((mixp_bits_of_f32(v[0]) & 0x7FFFFFFFu) >= 0x7F800000u) *bad = 1;
    }
}

static mixp_result mixpi_cuda_scale_by(const mixp_exec *x, const mixp_scale_by_args *k) {
    Kernel kernel(x);
    if (!k->factor) return MIXP_ERR_ARGUMENT;

    /* Note whether the loss is Inf or NaN before y may overwrite it. */
    mixp_result r = MIXP_OK;
    if (k->bad && k->a.data && kernel.state && is_real(k->a.dtype))
        r = kernel.report(
            "scale_by", MIXPI_LAUNCH(note_bad, 1, warp_size, 0, kernel.stream, k->a, k->n, k->bad));
    if (r != MIXP_OK) return r;

    Map m = map_of(k->y, k->a, nothing_in, k->n);
    m.factor = k->factor;
    return run_map(&kernel, "scale_by", unary_maps[MIXP_UNARY_SCALE], m);
}

static mixp_result mixpi_cuda_dropout(const mixp_exec *x, const mixp_dropout_args *k) {
    Kernel kernel(x);
    if (!(k->p >= 0.0f && k->p <= 1.0f)) return MIXP_ERR_ARGUMENT;
    if (!is_real(k->y.dtype) || !is_real(k->a.dtype)) return MIXP_ERR_DTYPE;
    if (!kernel.state) return MIXP_ERR_ORDER;
    if (k->n <= 0) return k->n ? MIXP_ERR_ARGUMENT : MIXP_OK;
    if (!k->y.data || !k->a.data) return MIXP_ERR_ARGUMENT;

    /* Drop an element whose random number is below p 2^32; scale the others by 1 / (1 - p). */
    Dropout d;
    memset((void *)&d, 0, sizeof d);
    d.k = *k;
    d.limit = (uint64_t)ceil((double)k->p * 4294967296.0);
    d.scale = k->p < 1.0f ? (float)(1.0 / (1.0 - (double)k->p)) : 0.0f;
    d.draws = draws_of(kernel.state, k->seed, k->step, k->tensor);
    d.wide = is_wide(k->y) && is_wide(k->a);
    return kernel.report(
        "dropout", MIXPI_LAUNCH(dropout_dense, map_grid(k->n), map_threads, 0, kernel.stream, d));
}

static mixp_result mixpi_cuda_random(const mixp_exec *x, const mixp_random_args *k) {
    Kernel on(x);
    if ((unsigned)k->kind >= MIXP_RANDOM_COUNT || k->y.accumulate || k->n < 0)
        return MIXP_ERR_ARGUMENT;
    if (k->kind == MIXP_RANDOM_BERNOULLI && !(k->at >= 0.0f && k->at <= 1.0f))
        return MIXP_ERR_ARGUMENT;
    if (!is_real(k->y.dtype)) return MIXP_ERR_DTYPE;
    if (!on.state) return MIXP_ERR_ORDER;
    if (!k->n) return MIXP_OK;

    RandomJob job;
    memset((void *)&job, 0, sizeof job);
    job.k = *k;
    job.draws = draws_of(on.state, k->seed, k->step, k->tensor);
    return on.report("random",
        MIXPI_LAUNCH(random_elements, grid_for(k->n, map_threads), map_threads, 0, on.stream, job));
}

static mixp_result mixpi_cuda_loss_backward(const mixp_exec *x, const mixp_loss_backward_args *k) {
    Kernel on(x);
    Map m = map_of(k->da, k->a, k->target, k->n);
    if ((unsigned)k->kind >= MIXP_LOSS_COUNT) return MIXP_ERR_ARGUMENT;
    if (!is_real(k->dloss.dtype)) return MIXP_ERR_DTYPE;
    if (k->n > 0 && (!k->dloss.data || !k->target.data)) return MIXP_ERR_ARGUMENT;
    m.dloss = k->dloss;
    m.over = k->over ? k->over : k->n;
    m.q = k->delta;
    return run_map(&on, "loss_backward", loss_slope_maps[k->kind], m);
}
