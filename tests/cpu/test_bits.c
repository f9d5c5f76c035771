/* test_bits.c - the manual's table SAME BITS: every operator, forward and backward, in every
 * dtype, on every instruction set of this machine, with one thread and with three.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * (tests/cuda/test_cuda*.cpp compare CPU and CUDA.)
 */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include "test.h"
#include "shared_work.h"
#include <float.h>

enum { MAX_BYTES = 1 << 20 };

/* What one operator wrote: its result and its inputs' gradients, one after another. */
typedef struct record { size_t n; unsigned char byte[MAX_BYTES]; } record;
static record first, again;

typedef struct bench { mixp_context *ctx; mixp_dtype dtype; uint64_t random; record *to; } bench;

static float number(bench *b, float low, float high) {
    b->random = b->random * 6364136223846793005u + 1442695040888963407u;
    return low + (high - low) * (float)(b->random >> 40) / 16777216.0f;
}

static mixp_tensor *values(bench *b, int64_t rows, int64_t cols, float low, float high) {
    static float wide[MAX_BYTES / 4];
    static float narrow[MAX_BYTES / 4];
    int64_t shape[2], i;
    shape[0] = rows;
    shape[1] = cols;
    for (i = 0; i < rows * cols; i++) wide[i] = number(b, low, high);
    CHECK_INT(mixp_convert(narrow, b->dtype, wide, MIXP_F32, rows * cols), MIXP_OK);
    mixp_tensor *t = mixp_input(b->ctx, b->dtype, 2, shape, narrow);
    CHECK(t != NULL);
    mixp_tensor_set_requires_grad(t, 1);
    return t;
}

static void note(record *r, const mixp_tensor *t) {
    size_t bytes = t ? (size_t)t->count * mixp_dtype_size(t->dtype) : 0;
    CHECK(t != NULL);
    if (!t || r->n + bytes > MAX_BYTES) return;
    memcpy(r->byte + r->n, t->data, bytes);
    r->n += bytes;
}

/* Notes y, walks back from its weighted sum, notes the gradients of a, b and c. */
static void both_ways(bench *b, mixp_tensor *y, mixp_tensor *a, mixp_tensor *q, mixp_tensor *c) {
    mixp_tensor *of[3], *loss = y;
    of[0] = a;
    of[1] = q;
    of[2] = c;
    note(b->to, y);
    if (y && y->count > 1) {
        mixp_tensor *w = values(b, 1, y->shape[y->rank - 1], -1.0f, 1.0f);
        loss = mixp_sum(b->ctx, mixp_mul(b->ctx, y, w), MIXP_ALL, 0);
    }
    CHECK_INT(mixp_backward(b->ctx, loss), MIXP_OK);
    for (int i = 0; i < 3; i++) if (of[i]) note(b->to, of[i]->grad);
}

static void elementwise(bench *b) {
    mixp_tensor *(*const one[])(mixp_context *, mixp_tensor *) = {
        mixp_relu, mixp_gelu, mixp_gelu_tanh, mixp_silu, mixp_tanh, mixp_sigmoid, mixp_sqrt,
        mixp_exp, mixp_log, mixp_softmax, mixp_log_softmax
    };
    mixp_tensor *(*const two[])(mixp_context *, mixp_tensor *, mixp_tensor *) = {
        mixp_add, mixp_sub, mixp_mul, mixp_div
    };
    for (size_t i = 0; i < sizeof one / sizeof one[0]; i++) {
        mixp_tensor *a = values(b, 11, 67, i == 6 || i == 8 ? 0.01f : -9.0f, 9.0f);
        both_ways(b, one[i](b->ctx, a), a, NULL, NULL);
    }
    for (size_t i = 0; i < sizeof two / sizeof two[0]; i++) {
        mixp_tensor *a = values(b, 11, 67, -2.0f, 2.0f), *c = values(b, 1, 67, 0.5f, 2.0f);
        both_ways(b, two[i](b->ctx, a, c), a, c, NULL);
    }
}

static void rows(bench *b) {
    mixp_tensor *a = values(b, 13, 1029, -3.0f, 3.0f), *gamma, *beta, *target;
    gamma = mixp_reshape(b->ctx, values(b, 1, 1029, -1.0f, 1.0f), 1, &a->shape[1]);
    beta = mixp_reshape(b->ctx, values(b, 1, 1029, -1.0f, 1.0f), 1, &a->shape[1]);
    both_ways(b, mixp_layer_norm(b->ctx, a, gamma, beta, 1e-5f), a, NULL, NULL);
    a = values(b, 13, 1029, -3.0f, 3.0f);
    both_ways(b, mixp_rms_norm(b->ctx, a, gamma, 1e-5f), a, NULL, NULL);
    a = values(b, 13, 1029, -3.0f, 3.0f);
    both_ways(b, mixp_mean(b->ctx, a, 0, 0), a, NULL, NULL);
    a = values(b, 13, 1029, -3.0f, 3.0f);
    both_ways(b, mixp_dropout(b->ctx, a, 0.3f, 1), a, NULL, NULL);
    a = values(b, 13, 129, -3.0f, 3.0f);
    target = values(b, 13, 129, 0.0f, 1.0f);
    mixp_tensor_set_requires_grad(target, 0);
    both_ways(b, mixp_bce_with_logits(b->ctx, a, target), a, NULL, NULL);
    a = values(b, 13, 129, -3.0f, 3.0f);
    both_ways(b, mixp_mse(b->ctx, a, target), a, NULL, NULL);
}

/* Losses with options: class weights and smoothing, each row, log-probabilities, each element. */
static void losses(bench *b) {
    static const int64_t row[1] = { 13 };
    int32_t ids[13];
    mixp_loss_desc d;
    mixp_tensor *a, *targets;
    for (int i = 0; i < 13; i++) ids[i] = i % 5 ? i * 9 : MIXP_IGNORE;
    targets = mixp_input(b->ctx, MIXP_I32, 1, row, ids);
    for (int i = 0; i < 6; i++) {
        memset(&d, 0, sizeof d);
        d.reduction = (mixp_reduction)(i % 3);
        d.smoothing = i < 3 ? 0.1f : 0.0f;
        a = values(b, 1, 129, 0.5f, 2.0f);
        mixp_tensor_set_requires_grad(a, 0);
        d.weight = mixp_reshape(b->ctx, a, 1, &a->shape[1]);
        a = values(b, 13, 129, -9.0f, 0.0f);
        both_ways(b, mixp_loss_apply(b->ctx, i < 3 ? MIXP_OP_CROSS_ENTROPY : MIXP_OP_NLL, a, targets, &d), a, NULL, NULL);
    }
    memset(&d, 0, sizeof d);
    d.reduction = MIXP_REDUCE_NONE;
    for (int i = 0; i < 3; i++) {
        static const mixp_op_id of[3] = { MIXP_OP_MSE, MIXP_OP_HUBER, MIXP_OP_BCE_WITH_LOGITS };
        mixp_tensor *t = values(b, 13, 129, 0.0f, 1.0f);
        a = values(b, 13, 129, -3.0f, 3.0f);
        both_ways(b, mixp_loss_apply(b->ctx, of[i], a, t, &d), a, t, NULL);
    }
}

static void products(bench *b) {
    mixp_tensor *a = values(b, 53, 131, -1.0f, 1.0f), *w = values(b, 37, 131, -1.0f, 1.0f);
    both_ways(b, mixp_linear(b->ctx, a, w, NULL), a, w, NULL);
    a = values(b, 131, 53, -1.0f, 1.0f);
    w = values(b, 131, 37, -1.0f, 1.0f);
    both_ways(b, mixp_matmul(b->ctx, a, w, 1, 0), a, w, NULL);
}

static void attention(bench *b) {
    int64_t shape[3] = { 2, 45, 96 };
    mixp_tensor *flat = values(b, 90, 96, -2.0f, 2.0f);
    mixp_tensor *qkv = mixp_reshape(b->ctx, flat, 3, shape);
    both_ways(b, mixp_attention(b->ctx, qkv, 2, 1, 0.0f), flat, NULL, NULL);
}

/* Three steps of Adam, scaled, clipped; the weights after them. */
static void steps(bench *b) {
    int64_t n = 5003;
    mixp_scaler_desc rule;
    mixp_optimizer_desc desc = mixp_adamw_defaults();
    mixp_tensor *w = mixp_param(b->ctx, "w", b->dtype, 1, &n);
    memset(&rule, 0, sizeof rule);
    rule.init_scale = 1024.0f;
    mixp_scaler *scaler = mixp_scaler_new(b->ctx, &rule);
    desc.max_norm = 0.01;
    mixp_optimizer *opt = mixp_optimizer_new(b->ctx, &desc);
    mixp_init_uniform(w, -1.0, 1.0);
    mixp_optimizer_add(opt, w, NULL);
    for (int i = 0; i < 3; i++) {
        mixp_step_begin(b->ctx);
        mixp_zero_grad(opt);
        mixp_backward(b->ctx, mixp_scaler_scale(scaler,
                      mixp_mean(b->ctx, mixp_mul(b->ctx, w, w), MIXP_ALL, 0)));
        mixp_scaler_step(scaler, opt);
        mixp_scaler_update(scaler);
    }
    CHECK_INT(mixp_optimizer_applied(opt), 3);
    note(b->to, w);
}

static void record_on(const mixp_device *device, int threads, mixp_dtype dtype,
                      void (*body)(bench *), record *to) {
    mixp_context_desc desc;
    const char *why;
    bench b;
    memset(&desc, 0, sizeof desc);
    desc.device = device;
    desc.threads = threads;
    desc.seed = 5;
    b.ctx = mixp_context_new(&desc);
    share_all_work(b.ctx);
    b.dtype = dtype;
    b.random = 1;
    b.to = to;
    to->n = 0;
    mixp_step_begin(b.ctx);
    body(&b);
    CHECK_INT(mixp_context_error(b.ctx, &why), MIXP_OK);
    CHECK_TEXT(why, "");
    CHECK(to->n > 0);
    mixp_context_free(b.ctx);
}

static int equal(void)
{ return first.n == again.n && memcmp(first.byte, again.byte, first.n) == 0; }

/* Products of this dtype by itself have other bits there: see SAME BITS in mixprec.h. */
static int own_products(int isa, mixp_dtype dtype) {
    return dtype != MIXP_F32 && (isa == MIXP_ISA_AMX || isa == MIXP_ISA_AMX_F16);
}

/* Threads never change a bit; instruction sets do not, but for plain C where `simd_alone`. */
static void compare(void (*body)(bench *), mixp_dtype dtype, int simd_alone) {
    const mixp_device *to = NULL;
    for (int isa = simd_alone ? MIXP_ISA_SCALAR + 1 : MIXP_ISA_SCALAR; isa < MIXP_ISA_COUNT; isa++) {
        const mixp_device *device = mixp_cpu_with((mixp_isa)isa);
        if (!device || own_products(isa, dtype)) continue;
        if (!to) record_on(to = device, 1, dtype, body, &first);
        record_on(device, 1, dtype, body, &again);
        CHECK(equal());
        record_on(device, 3, dtype, body, &again);
        CHECK(equal());
    }
    if (!simd_alone) return;
    record_on(mixp_cpu_with(MIXP_ISA_SCALAR), 1, dtype, body, &first);
    record_on(mixp_cpu_with(MIXP_ISA_SCALAR), 3, dtype, body, &again);
    CHECK(equal());
}
static void compare_all(void (*body)(bench *), int simd_alone) {
    compare(body, MIXP_F32, simd_alone);
    compare(body, MIXP_F16, simd_alone);
    compare(body, MIXP_BF16, simd_alone);
}

static void test_elementwise(void) { compare_all(elementwise, 0); }
static void test_rows(void)        { compare_all(rows, 0); }
static void test_losses(void)      { compare_all(losses, 0); }
static void test_steps(void)       { compare_all(steps, 0); }
static void test_attention(void)   { compare_all(attention, 1); }
static void test_products(void) {
    compare(products, MIXP_F32, 1);
    compare(products, MIXP_F16, 0);
    compare(products, MIXP_BF16, 0);
}

/* --- a product and a sum, rounded once --------------------------------------------------------- */
#ifdef __MINGW32__
#  define FUSED_TWICE 1         /* its own fmaf is the reason for this one */
#else
#  define FUSED_TWICE 0
#endif

#if !defined(__FAST_MATH__)
static uint32_t draw(uint32_t *s) { return *s = *s * 1664525u + 1013904223u; }

static void fused_is(float x, float y, float z, float want) {
    const float got = mixpi_fmaf_by_hand(x, y, z);
    const uint32_t found = mixp_bits_of_f32(got), right = mixp_bits_of_f32(want);
    if (isnan(got) && isnan(want)) return;
    if (found == right) return;
    test_bad++;
    TEST_SHOW("%a * %a + %a is %a, not %a", (double)x, (double)y, (double)z, (double)got,
              (double)want);
}
#endif

/* Sums that rounding twice gets wrong, and any bits; terms of like size, and far apart. */
static void test_fused(void) {
#if defined(__FAST_MATH__)
    SKIP("fast-math leaves no bits to promise");
#else
    uint32_t s = 5;
    fused_is(0x1.195b74p+0f, -0x1.ef1c68p+0f, -0x1.ff138p-1f, -0x1.8fd866p+1f);
    fused_is(0x1.73779p-2f, -0x1.0f4844p+0f, 0x1.718c6p+0f, 0x1.0f2344p+0f);
    fused_is(0x1.000002p+0f, 0x1p-24f, 1.0f, 0x1.000002p+0f);       /* 2^-47 past a tie */
    fused_is(0x1.fffffep-1f, 0x1p-24f, 1.0f, 1.0f);                 /* and before it */
    fused_is(0x1.000002p+0f, 0x1p-24f, 0x1.000002p+0f, 0x1.000004p+0f);
    fused_is(0x1.8p+0f, 0x1p-149f, 0x1p-149f, 0x1p-148f);           /* 2.5 of the least: even */
    fused_is(0x1.800002p+0f, 0x1p-149f, 0x1p-149f, 0x1.8p-148f);
    fused_is(FLT_MAX, 1.0f, 0x1p+103f, HUGE_VALF);                  /* half a last place past it */
    fused_is(FLT_MAX, 2.0f, -FLT_MAX, FLT_MAX);
    fused_is(1.0f, -1.0f, 1.0f, 0.0f);
    fused_is(-0.0f, 1.0f, -0.0f, -0.0f);
    fused_is(HUGE_VALF, 0.0f, 1.0f, NAN);
    fused_is(HUGE_VALF, 1.0f, -1.0f, HUGE_VALF);
    for (int i = 0; i < 300000 && !FUSED_TWICE; i++) {
        float x = mixp_f32_of_bits(draw(&s)), y = mixp_f32_of_bits(draw(&s));
        float z = mixp_f32_of_bits(draw(&s));
        fused_is(x, y, z, fmaf(x, y, z));
        z = mixp_f32_of_bits((mixp_bits_of_f32(x * y) & 0xFF800000u) + (draw(&s) >> 4));
        fused_is(x, y, z, fmaf(x, y, z));
    }
#endif
}

#if !defined(__FAST_MATH__) && !defined(__FP_FAST_FMA)
static void fused_double_is(double x, double y, double z, double want) {
    const double got = mixpi_fma_by_hand(x, y, z);
    if (mixp_bits_of_f64(got) == mixp_bits_of_f64(want)) return;
    test_bad++;
    TEST_SHOW("%a * %a + %a is %a, not %a", x, y, z, got, want);
}
/* A number of either sign, of 2^-range to 2^range. */
static double draw_double(uint32_t *s, int range) {
    const uint64_t fraction = (uint64_t)draw(s) << 20 ^ draw(s) >> 4, sign = draw(s) >> 31;
    const int exponent = (int)(draw(s) >> 8) % (2 * range + 1) - range;
    return mixp_f64_of_bits(sign << 63 | (uint64_t)(1023 + exponent) << 52 | fraction);
}
#endif

/* The same of doubles; and what schedules and spikes take is rounded once on each machine. */
static void test_fused_doubles(void) {
#if defined(__FAST_MATH__)
    SKIP("fast-math leaves no bits to promise");
#elif defined(__FP_FAST_FMA)
    SKIP("products may be joined with sums in what this machine does not need");
#else
    uint32_t s = 5;
    fused_double_is(0x1.0000000000001p+0, 0x1.0000000000001p+0, -0x1.0000000000002p+0, 0x1p-104);
    fused_double_is(0x1.0000000000001p+0, 0x1p-53, 1.0, 0x1.0000000000001p+0);  /* past a tie */
    fused_double_is(0x1.fffffffffffffp-1, 0x1p-53, 1.0, 1.0);                   /* before it */
    fused_double_is(0x1.0000000000001p+0, 0x1p-53, 0x1.0000000000001p+0, 0x1.0000000000002p+0);
    fused_double_is(0x1.8p+0, 0x1p-53, -1.0, -0x1.ffffffffffffep-1);         /* to even */
    fused_double_is(3.0, -1.0, 3.0, 0.0);
    fused_double_is(0.0, 5.0, 1.5, 1.5);
    for (int i = 0; i < 200000; i++) {
        double x = draw_double(&s, 40), y = draw_double(&s, 40), z;
        if (i % 4 == 0) x = (double)(float)x, y = (double)(float)y;     /* many products are ties */
        z = i % 8 == 1 ? -x * y : x * y * draw_double(&s, 60);
        fused_double_is(x, y, z, mixpi_fma(x, y, z));
        if (!FUSED_TWICE) fused_double_is(x, y, z, fma(x, y, z));
    }
#endif
}

int main(void) {
    RUN(test_fused);
    RUN(test_fused_doubles);
    RUN(test_elementwise);
    RUN(test_rows);
    RUN(test_losses);
    RUN(test_products);
    RUN(test_attention);
    RUN(test_steps);
    return test_report();
}
