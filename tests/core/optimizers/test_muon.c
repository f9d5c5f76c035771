/* test_muon.c - Muon and RMSprop compared with PyTorch's; loss scaling, skips, states of every
 * kind, checkpoints, memory, errors. Runs on every instruction set.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "mixprec.h"
#include "args.h"
#include "test.h"
#include "new_optimizer.h"
#include "numbers.h"
#include "each_isa.h"
#include "reference/generate.h"
#include "reference/muon.h"
#include <unistd.h>

/* --- against PyTorch ----------------------------------------------------------------------- */

static mixp_tensor *matrix(mixp_context *ctx, const char *name, int k) {
    int64_t shape[2];
    shape[0] = muon_shapes[k][0];
    shape[1] = muon_shapes[k][1];
    return mixp_param(ctx, name, MIXP_F32, 2, shape);
}

/* 100 steps, as record_muon.py takes them; all weights, one after the other. */
static void run_muon(mixp_context *ctx, const muon_case *c, int f32, float *out) {
    static const char *const names[MUON_SHAPES][2] = { { "a", "ga" }, { "b", "gb" }, { "c", "gc" } };
    static const mixp_muon_rate rates[3] = { MIXP_MUON_RATE_ORIGINAL, MIXP_MUON_RATE_MATCH_RMS_ADAMW,
                                             MIXP_MUON_RATE_SPECTRAL_UNCLAMPED };
    mixp_optimizer_desc d = mixp_muon_defaults();
    mixp_tensor *w[MUON_SHAPES], *g[MUON_SHAPES];
    float values[256];
    uint32_t x = gen_start(7);
    d.lr = c->lr;
    d.momentum = c->momentum;
    d.weight_decay = c->decay;
    d.nesterov = c->nesterov;
    d.muon.rate = rates[c->rate];
    d.muon.f32 = f32;
    mixp_optimizer *opt = mixp_optimizer_new(ctx, &d);
    for (int k = 0; k < MUON_SHAPES; k++) {
        w[k] = matrix(ctx, names[k][0], k);
        g[k] = matrix(ctx, names[k][1], k);
        gen_fill(&x, 1.0f, values, (int)w[k]->count);
        CHECK_INT(mixp_write(w[k], values, MIXP_F32, w[k]->count), MIXP_OK);
        CHECK_INT(mixp_optimizer_add(opt, w[k], g[k]), MIXP_OK);
    }
    for (int t = 0; t < MUON_STEPS; t++) {
        for (int k = 0; k < MUON_SHAPES; k++) {
            gen_fill(&x, 1.0f, values, (int)w[k]->count);
            CHECK_INT(mixp_write(g[k], values, MIXP_F32, w[k]->count), MIXP_OK);
        }
        CHECK_INT(mixp_optimizer_step(opt), MIXP_OK);
    }
    for (int k = 0; k < MUON_SHAPES; out += w[k++]->count)
        CHECK_INT(mixp_read(w[k], out, MIXP_F32, w[k]->count), MIXP_OK);
}

static double most_apart(const float *a, const double *b) {
    double most = 0;
    for (int i = 0; i < MUON_ALL; i++) {
        double d = fabs((double)a[i] - b[i]);
        if (!(d <= most)) most = d;
    }
    return most;
}

static void test_f32_as_pytorch(void) {
    mixp_context *ctx;
    int isa, c;
    for (c = 0; c < MUON_CASES; c++) EACH_ISA(isa, ctx) {
        float got[MUON_ALL];
        run_muon(ctx, &muon_cases[c], 1, got);
        CHECK_NEAR(most_apart(got, muon_f32 + c * MUON_ALL), 0, 1e-5);
        mixp_context_free(ctx);
    }
}

/* In bf16 the two may differ by as much as PyTorch's own rounding makes of its weights. */
static void test_bf16_within_its_rounding(void) {
    mixp_context *ctx;
    int isa, c, i;
    for (c = 0; c < MUON_CASES; c++) EACH_ISA(isa, ctx) {
        const double *bf16 = muon_bf16 + c * MUON_ALL, *f32 = muon_f32 + c * MUON_ALL;
        double apart = 0, rounding = 0;
        float got[MUON_ALL];
        run_muon(ctx, &muon_cases[c], 0, got);
        for (i = 0; i < MUON_ALL; i++) {
            apart += pow((double)got[i] - bf16[i], 2);
            rounding += pow(f32[i] - bf16[i], 2);
        }
        if (!isa) printf("  %s: %.2g from PyTorch's bf16, which is %.2g from its f32\n",
                         muon_cases[c].name, sqrt(apart / MUON_ALL), sqrt(rounding / MUON_ALL));
        CHECK(apart <= rounding);
        CHECK_NEAR(most_apart(got, f32), 0, 1e-2);
        mixp_context_free(ctx);
    }
}

static void test_rmsprop_as_pytorch(void) {
    const int64_t n = RMS_COUNT;
    mixp_context *ctx;
    int isa, c, i, t;
    for (c = 0; c < RMS_CASES; c++) EACH_ISA(isa, ctx) {
        mixp_optimizer_desc d = mixp_rmsprop_defaults();
        uint32_t x = gen_start(9);
        float w[RMS_COUNT], g[RMS_COUNT];
        d.lr = rms_cases[c].lr;
        d.beta2 = rms_cases[c].alpha;
        d.eps = rms_cases[c].eps;
        d.weight_decay = rms_cases[c].decay;
        d.momentum = rms_cases[c].momentum;
        mixp_optimizer *opt = mixp_optimizer_new(ctx, &d);
        gen_fill(&x, 1.0f, w, RMS_COUNT);
        CHECK_INT(mixp_optimizer_add(opt, mixp_view(ctx, "w", MIXP_F32, 1, &n, w),
                                     mixp_view(ctx, "g", MIXP_F32, 1, &n, g)), MIXP_OK);
        for (t = 0; t < RMS_STEPS; t++) {
            gen_fill(&x, 1.0f, g, RMS_COUNT);
            CHECK_INT(mixp_optimizer_step(opt), MIXP_OK);
        }
        for (i = 0; i < RMS_COUNT; i++)
            CHECK_NEAR(w[i], rms_after[c * RMS_COUNT + i], 2e-6);
        mixp_context_free(ctx);
    }
}

/* --- scaling, skips, states ------------------------------------------------------------------ */

static const int64_t shape[2] = { 96, 64 }, wide_shape[2] = { 33, 140 };
enum { COUNT = 96 * 64, WIDE = 33 * 140 };
static float numbers[COUNT];

typedef struct model {
    mixp_context   *ctx;
    mixp_optimizer *opt;
    mixp_scaler    *scaler;
    mixp_tensor    *w[2], *g[2];
} model;

static model model_of(const mixp_optimizer_desc *d, mixp_dtype dtype) {
    model m;
    m.ctx = mixp_context_new(NULL);
    m.scaler = mixp_scaler_new(m.ctx, NULL);
    m.opt = mixp_optimizer_new(m.ctx, d);
    m.w[0] = mixp_param(m.ctx, "tall", dtype, 2, shape);
    m.w[1] = mixp_param(m.ctx, "wide", dtype, 2, wide_shape);
    m.g[0] = mixp_param(m.ctx, "g0", MIXP_F32, 2, shape);
    m.g[1] = mixp_param(m.ctx, "g1", MIXP_F32, 2, wide_shape);
    random_state = 5;
    for (int k = 0; k < 2; k++) {
        for (int i = 0; i < COUNT; i++) numbers[i] = (float)random_value();
        CHECK_INT(mixp_write(m.w[k], numbers, MIXP_F32, m.w[k]->count), MIXP_OK);
        CHECK_INT(mixp_optimizer_add(m.opt, m.w[k], m.g[k]), MIXP_OK);
    }
    return m;
}

/* Steps with gradients times `scale`; bad: one of them is NaN. */
static void train(model *m, int steps, float scale, int bad) {
    while (steps--) {
        for (int k = 0; k < 2; k++) {
            for (int i = 0; i < COUNT; i++) numbers[i] = scale * (float)random_value();
            if (bad && k) numbers[77] = bits_f32(0x7FC00000u);
            CHECK_INT(mixp_write(m->g[k], numbers, MIXP_F32, m->g[k]->count), MIXP_OK);
        }
        if (scale > 1.0f) {
            CHECK(mixp_scaler_loss_scale(m->scaler) > 0.0f);    /* whoever multiplies by it asks */
            CHECK_INT(mixp_scaler_step(m->scaler, m->opt), MIXP_OK);
            CHECK_INT(mixp_scaler_update(m->scaler), MIXP_OK);
        } else CHECK_INT(mixp_optimizer_step(m->opt), MIXP_OK);
    }
}

static char path[64];
static mixp_checkpoint checkpoint_of(const model *m) {
    mixp_checkpoint c;
    memset(&c, 0, sizeof c);
    c.ctx = m->ctx;
    c.optimizers = &m->opt;
    c.n_optimizers = 1;
    sprintf(path, "/tmp/mixprec_muon_%ld.safetensors", (long)getpid());
    return c;
}
static mixp_safetensors *saved(const model *m) {
    mixp_checkpoint c = checkpoint_of(m);
    mixp_safetensors *file = NULL;
    CHECK_INT(mixp_checkpoint_save(path, &c), MIXP_OK);
    CHECK_INT(mixp_safetensors_read(path, &file, NULL, 0), MIXP_OK);
    return file;
}
/* Tensors of a name with `part` are the same in both files, which are freed. */
static void same(mixp_safetensors *a, mixp_safetensors *b, const char *part) {
    int n = 0;
    for (int64_t i = 0; i < mixp_safetensors_count(a); i++) {
        const mixp_st_entry *x = mixp_safetensors_at(a, i);
        const mixp_st_entry *y = mixp_safetensors_find(b, x->name);
        if (!strstr(x->name, part)) continue;
        CHECK(y && x->bytes == y->bytes && memcmp(x->data, y->data, x->bytes) == 0);
        n++;
    }
    CHECK(n > 0);
    mixp_safetensors_free(a);
    mixp_safetensors_free(b);
}

/* Scaled by a power of two and not at all: the same bits. */
static void test_scaled(void) {
    model a = model_of(NULL, MIXP_F32), b;
    train(&a, 4, 65536.0f, 0);
    b = model_of(NULL, MIXP_F32);
    train(&b, 4, 1.0f, 0);
    same(saved(&a), saved(&b), "tall");
    same(saved(&a), saved(&b), "wide");
    mixp_context_free(a.ctx);
    mixp_context_free(b.ctx);
    remove(path);
}

static void test_skipped_means_untouched(void) {
    model m = model_of(NULL, MIXP_BF16);
    train(&m, 2, 65536.0f, 0);
    mixp_safetensors *before = saved(&m);
    train(&m, 1, 65536.0f, 1);
    CHECK_INT(mixp_scaler_verdict(m.scaler).outcome, MIXP_STEP_SKIPPED);
    CHECK_TEXT(mixp_scaler_verdict(m.scaler).bad_tensor, "wide");
    same(before, saved(&m), "tall");
    before = saved(&m);
    train(&m, 1, 32768.0f, 1);
    same(before, saved(&m), "wide");
    train(&m, 2, 16384.0f, 0);
    CHECK_INT(mixp_optimizer_applied(m.opt), 4);
    mixp_context_free(m.ctx);
    remove(path);
}

static void test_resume(void) {
    for (int kind = 0; kind < 3; kind++) {
        mixp_optimizer_desc d = mixp_muon_defaults();
        d.states.m = (mixp_moment_kind)kind;
        d.states.master = (mixp_master_kind)kind;
        model a = model_of(&d, MIXP_BF16);
        train(&a, 3, 1.0f, 0);
        mixp_safetensors_free(saved(&a));
        model b = model_of(&d, MIXP_BF16);
        mixp_checkpoint c = checkpoint_of(&b);
        CHECK_INT(mixp_checkpoint_load(path, &c), MIXP_OK);
        random_state = 9;
        train(&a, 3, 1.0f, 0);
        random_state = 9;
        train(&b, 3, 1.0f, 0);
        same(saved(&a), saved(&b), "");
        mixp_context_free(a.ctx);
        mixp_context_free(b.ctx);
    }
    remove(path);
}

/* Weights after 30 steps with other states stay near those with f32, in learning rates. */
static void test_states(void) {
    static float f32[COUNT], small[COUNT];
    for (int kind = 0; kind < 3; kind++) {
        mixp_optimizer_desc d = mixp_muon_defaults();
        double apart = 0, moved = 0;
        d.states.m = (mixp_moment_kind)kind;
        d.states.master = (mixp_master_kind)kind;
        d.lr = 0.02;
        model m = model_of(&d, MIXP_BF16);
        train(&m, 30, 1.0f, 0);
        CHECK_INT(mixp_read(m.w[0], small, MIXP_F32, COUNT), MIXP_OK);
        if (!kind) memcpy(f32, small, sizeof f32);
        mixp_context_free(m.ctx);
        m = model_of(&d, MIXP_BF16);
        CHECK_INT(mixp_read(m.w[0], numbers, MIXP_F32, COUNT), MIXP_OK);
        for (int i = 0; i < COUNT; i++) {
            apart += pow((double)(small[i] - f32[i]), 2);
            moved += pow((double)(numbers[i] - f32[i]), 2);
        }
        CHECK(moved > 0 && sqrt(apart / moved) < 0.2);
        mixp_context_free(m.ctx);
    }
}

/* Momentum of clipped gradients, whose factor is no power of two, bit by bit: a product that feeds a
 * difference is rounded by itself, whatever compiler, flags and instructions there are. */
static void test_momentum_to_the_bit(void) {
    static float g[COUNT], want[COUNT], got[COUNT];
    const float rest = (float)(1.0 - 0.95);
    mixp_context *ctx;
    int isa, i, step;
    EACH_ISA(isa, ctx) {
        mixp_optimizer_desc d = mixp_muon_defaults();
        mixp_tensor *w = mixp_param(ctx, "w", MIXP_F32, 2, shape), *grad = mixp_param(ctx, "g", MIXP_F32, 2, shape);
        d.max_norm = 1;
        d.muon.iterations = 1;
        mixp_optimizer *opt = mixp_optimizer_new(ctx, &d);
        CHECK_INT(mixp_optimizer_add(opt, w, grad), MIXP_OK);
        memset(want, 0, sizeof want);
        random_state = 3;
        for (step = 0; step < 3; step++) {
            for (i = 0; i < COUNT; i++) g[i] = (float)random_value();
            CHECK_INT(mixp_write(grad, g, MIXP_F32, COUNT), MIXP_OK);
            CHECK_INT(mixp_optimizer_step(opt), MIXP_OK);
            float factor = mixp_optimizer_verdict(opt).clip;
            CHECK(factor < 0.1f && factor > 0.001f);
            for (i = 0; i < COUNT; i++) {
                const volatile float product = g[i] * factor;
                const volatile float way = product - want[i];
                want[i] = mixpi_fmaf(rest, way, want[i]);
            }
        }
        CHECK_INT(mixp_optimizer_read(opt, w, MIXP_STATE_M, got, COUNT), MIXP_OK);
        if (!FAST_MATH) CHECK(memcmp(got, want, sizeof got) == 0);
        mixp_context_free(ctx);
    }
}

/* --- memory, errors ---------------------------------------------------------------------------- */

static void test_steps_allocate_nothing(void) {
    model m = model_of(NULL, MIXP_BF16);
    train(&m, 1, 65536.0f, 0);
    int64_t before = mixp_context_memory(m.ctx).allocations;
    train(&m, 4, 65536.0f, 0);
    train(&m, 1, 65536.0f, 1);
    CHECK_INT(mixp_context_memory(m.ctx).allocations, before);
    mixp_context_free(m.ctx);
}

/* A matrix without a gradient is left alone, the others are not. */
static void test_missing_gradient(void) {
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_optimizer *opt = new_muon(ctx);
    mixp_tensor *a = mixp_param(ctx, "a", MIXP_F32, 2, wide_shape);
    mixp_tensor *b = mixp_param(ctx, "b", MIXP_F32, 2, wide_shape);
    mixp_tensor *g = mixp_param(ctx, "g", MIXP_F32, 2, wide_shape);
    for (int i = 0; i < WIDE; i++) numbers[i] = (float)random_value();
    CHECK_INT(mixp_write(g, numbers, MIXP_F32, WIDE), MIXP_OK);
    CHECK_INT(mixp_optimizer_add(opt, a, NULL), MIXP_OK);
    CHECK_INT(mixp_optimizer_add(opt, b, g), MIXP_OK);
    CHECK_INT(mixp_optimizer_step(opt), MIXP_OK);
    CHECK_INT(mixp_read(a, numbers, MIXP_F32, WIDE), MIXP_OK);
    for (int i = 0; i < WIDE; i++) CHECK(numbers[i] == 0.0f);
    CHECK_INT(mixp_read(b, numbers, MIXP_F32, WIDE), MIXP_OK);
    CHECK(numbers[5] != 0.0f);
    mixp_context_free(ctx);
}

static mixp_context *errors;
static void refused(const mixp_optimizer_desc *d, const char *why) {
    const char *message = "";
    CHECK(mixp_optimizer_new(errors, d) == NULL);
    CHECK_INT(mixp_context_error(errors, &message), MIXP_ERR_ARGUMENT);
    CHECK_TEXT(message, why);
    mixp_context_clear_error(errors);
}

static void test_errors(void) {
    mixp_optimizer_desc d = mixp_muon_defaults();
    const char *message = "";
    errors = mixp_context_new(NULL);
    d.muon.iterations = 100;
    refused(&d, "muon.iterations must lie in [1, 99]");
    d = mixp_muon_defaults();
    d.eps = 0;
    refused(&d, "eps must be above 0");
    d = mixp_muon_defaults();
    d.muon.b = HUGE_VAL;
    refused(&d, "muon.a, muon.b and muon.c must be finite");
    d = mixp_muon_defaults();
    d.muon.rate = (mixp_muon_rate)3;
    refused(&d, "muon.rate is not a mixp_muon_rate");
    d = mixp_muon_defaults();
    d.momentum = -0.5;
    refused(&d, "mixp_optimizer_new: Muon: momentum must be finite and at least 0");
    CHECK_INT(mixp_optimizer_add(new_muon(errors),
                                 mixp_param(errors, "bias", MIXP_F32, 1, shape), NULL),
              MIXP_ERR_SHAPE);
    mixp_context_error(errors, &message);
    CHECK_TEXT(message, "'bias' is not a matrix, and Muon trains only matrices: add it to an AdamW");
    mixp_context_free(errors);
}

int main(void) {
    RUN(test_f32_as_pytorch);
    RUN(test_bf16_within_its_rounding);
    RUN(test_rmsprop_as_pytorch);
    RUN(test_scaled);
    RUN(test_skipped_means_untouched);
    RUN(test_resume);
    RUN(test_states);
    RUN(test_momentum_to_the_bit);
    RUN(test_steps_allocate_nothing);
    RUN(test_missing_gradient);
    RUN(test_errors);
    return test_report();
}
