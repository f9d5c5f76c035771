/* test_float_mode.c - hosts with another floating-point mode: exceptions that trap, other roundings,
 * subnormals flushed. No program dies, and any number of threads gives the same bits.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#define _GNU_SOURCE         /* feenableexcept */
#include <signal.h>
#include <unistd.h>
#include "test.h"
#include "shared_work.h"
#include "programs/harness.h"
#include "../../examples/ops.h"
#include "traps.h"

#if CAN_TRAP && defined(__SSE__)
static void set_flush(unsigned bits) { __builtin_ia32_ldmxcsr((__builtin_ia32_stmxcsr() & ~0x8040u) | bits); }
#else
static void set_flush(unsigned bits) { (void)bits; }
#endif

static const char *doing = "";

static void died(int signal) {
    (void)signal;
    if (write(1, "  a floating-point exception: ", 30) < 0 || write(1, doing, strlen(doing)) < 0 || write(1, "\n", 1) < 0)
        _exit(3);
    _exit(2);
}

/* --- exceptions that trap ------------------------------------------------------------------------ */

static const mode trapped_modes[] = {
    /* dtype  level guard retry evaluate parts rule */
    { MIXP_F16, 1, 0, 0, 3, 0, 1, 0, 0, 0, 0, 0 },      /* its first scales overflow every gradient */
    { MIXP_F16, 2, 3, 1, 3, 0, 1, 0, 0, 0, 0, 0 },
    { MIXP_F16, 3, 0, 0, 0, 2, 3, 0, 0, 0, 0, 0 },
    { MIXP_BF16, 1, 2, 1, 3, 0, 2, 0, 0, 0, 0, 0 },
};

/* Some steps, among them evaluations, a clip, a save and a load. Returns a hash of the state. */
static uint64_t run_of(const program *p, const mode *how, int trapped) {
    static float state[BLOCK];
    char path[64];
    mixp_checkpoint what;
    uint64_t h = 14695981039346656037u;
    doing = p->name;
    if (trapped) traps_on(0);
    session *s = session_open(p, how, NULL, NULL);
    memset(&what, 0, sizeof what);
    what.ctx = s->ctx;
    what.scaler = s->scaler[0];
    what.optimizers = s->opt;
    what.n_optimizers = turns_of(p);
    snprintf(path, sizeof path, "/tmp/mixprec_float_%ld.st", (long)getpid());
    for (int step = 0; step < 8; step++) {
        const int turn = step % turns_of(p), parts = how->parts ? how->parts : p->parts ? p->parts : 1;
        mixp_scaler *scaler = scaler_at(s, p, turn);
        if (trapped) traps_on(0);
        do {
            walks(s, p, turn, step, 0, parts, parts);
        } while (how->retry && mixp_retry(scaler, 3));
        if (p->after) p->after(s, turn);
        if (how->evaluate && step % how->evaluate == 2) {
            mixp_eval_begin(s->ctx);
            fill_batch(s, p, 1000 + step, 0);
            mixp_item(forward(s, p, turn, 0));
        }
        mixp_scaler_verdict(scaler);
        mixp_optimizer_lr(s->opt[turn], 0);
        if (step == 4) CHECK_INT(mixp_checkpoint_save(path, &what), MIXP_OK);
        if (step == 5) CHECK_INT(mixp_checkpoint_load(path, &what), MIXP_OK);
        if (trapped && CAN_TRAP) CHECK_INT(traps_off() & (FE_INVALID | FE_OVERFLOW), FE_INVALID | FE_OVERFLOW);
    }
    CHECK_INT(mixp_context_error(s->ctx, NULL), MIXP_OK);
    int n = state_read(s, state);
    for (int i = 0; i < n; i++) h = (h ^ mixp_bits_of_f32(state[i])) * 1099511628211u;
    session_close(s);
    remove(path);
    return h;
}

static void programs_under_traps(void) {
    if (!CAN_TRAP) SKIP("this system lets no exception trap");
    for (int i = 0; i < program_count; i++)
        for (size_t k = 0; k < sizeof trapped_modes / sizeof trapped_modes[0]; k++) {
            const uint64_t calm = run_of(&programs[i], &trapped_modes[k], 0);
            CHECK(run_of(&programs[i], &trapped_modes[k], 1) == calm);
        }
}

/* Calls without a step: conversions, a product, filling and reading tensors, the self-check. */
static void calls_under_traps(void) {
    static const double wide[8] = { 1e300, -1e300, 1e-320, 0, 1e38, 70000, -70000, 1e-8 };
    static const uint16_t nans[4] = { 0x7C01, 0x7E00, 0xFC00, 0x7C00 };     /* the first is signalling */
    static const mixp_dtype dtypes[6] = { MIXP_F32, MIXP_F16, MIXP_BF16, MIXP_F8_E4M3, MIXP_F8_E5M2, MIXP_F64 };
    static const int64_t four[1] = { 4 }, square[2] = { 2, 2 };
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_tensor *t = mixp_param(ctx, "t", MIXP_F16, 1, four), *a = mixp_param(ctx, "a", MIXP_F32, 2, square);
    float big[4] = { 3e38f, 3e38f, 3e38f, -3e38f }, sum[4], back[8];
    double held[8];
    mixp_gemm_args k;
    char message[MIXP_MESSAGE_SIZE];
    if (!CAN_TRAP) SKIP("this system lets no exception trap");
    doing = "calls";
    memset(&k, 0, sizeof k);
    k.m = k.n = k.k = k.lda = k.ldb = k.ldc = 2;
    k.batch = 1;
    k.alpha = 1.0f;
    k.a.data = k.b.data = big;
    k.c.data = sum;
    traps_on(0);
    for (int isa = 0; isa < MIXP_ISA_COUNT; isa++) {
        const mixp_device *d = mixp_cpu_with((mixp_isa)isa);
        for (int i = 0; d && i < 6; i++) {
            CHECK_INT(mixp_convert_with(d, held, dtypes[i], wide, MIXP_F64, 8, NULL), MIXP_OK);
            for (int j = 0; j < 5; j++)
                CHECK_INT(mixp_convert_with(d, back, dtypes[j], held, dtypes[i], mixp_dtype_size(dtypes[j]) > 4 ? 4 : 8, NULL), MIXP_OK);
            CHECK_INT(mixp_convert_with(d, held, dtypes[i], nans, MIXP_F16, 4, NULL), MIXP_OK);
            CHECK_INT(mixp_convert_with(d, held, dtypes[i], nans, MIXP_BF16, 4, NULL), MIXP_OK);
        }
    }
    CHECK_INT(mixp_gemm(ctx, &k), MIXP_OK);
    CHECK_INT(mixp_write(t, nans, MIXP_F16, 4), MIXP_OK);
    CHECK_INT(mixp_read(t, held, MIXP_F64, 4), MIXP_OK);
    CHECK_INT(mixp_write(t, big, MIXP_F32, 4), MIXP_OK);
    CHECK_INT(mixp_read(t, back, MIXP_F32, 4), MIXP_OK);
    CHECK_INT(mixp_copy(t, t), MIXP_OK);
    CHECK_INT(mixp_write(a, big, MIXP_F32, 4), MIXP_OK);
    CHECK_INT(mixp_init_normal(a, 0, 1e38), MIXP_OK);
    CHECK_INT(mixp_init_uniform(a, -3e38, 3e38), MIXP_OK);
    CHECK_INT(mixp_init_xavier_normal(a, 1), MIXP_OK);
    CHECK_INT(mixp_fill(t, (double)INFINITY), MIXP_OK);
    CHECK_INT(mixp_self_check(message, sizeof message), MIXP_OK);
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    mixp_context_free(ctx);
    CHECK(traps_off() & FE_INVALID);
}

/* What the programs above do not do: recipes, Muon, averages of weights, dropout, random tensors, a
 * derivative along a direction, a check of gradients, operators of Inf and NaN. */
static mixp_tensor *checked_loss(mixp_context *ctx, void *user) {
    mixp_tensor *w = ((mixp_tensor **)user)[0];
    return mixp_mean(ctx, mixp_square(ctx, mixp_matmul(ctx, w, w, 0, 0)), MIXP_ALL, 0);
}

static void features_under_traps(void) {
    static const mixp_recipe_kind kinds[5] = { MIXP_RECIPE_FP8_CURRENT, MIXP_RECIPE_FP8_DELAYED,
                                               MIXP_RECIPE_FP8_BLOCK, MIXP_RECIPE_MXFP8, MIXP_RECIPE_NVFP4 };
    static const int64_t square[2] = { 128, 128 }, small[2] = { 4, 4 };
    static float x[128 * 128];
    if (!CAN_TRAP) SKIP("this system lets no exception trap");
    for (int i = 0; i < 128 * 128; i++) x[i] = i % 97 ? (float)(i % 31 - 15) : i % 2 ? INFINITY : 3e38f;
    for (int k = 0; k < 5; k++) {
        mixp_context *ctx = mixp_context_new(NULL);
        mixp_tensor *w = mixp_param(ctx, "w", MIXP_F32, 2, square), *v = mixp_param(ctx, "v", MIXP_F32, 2, small), *y;
        mixp_optimizer_desc muon = mixp_muon_defaults();
        mixp_scaler *scaler = mixp_scaler_new(ctx, NULL);
        mixp_optimizer *opt = mixp_optimizer_new(ctx, &muon);
        mixp_recipe recipe;
        double worst;
        doing = "features";
        memset(&recipe, 0, sizeof recipe);
        recipe.kind = kinds[k];
        mixp_autocast_set_recipe(ctx, &recipe);
        mixp_init_all(ctx, "*", mixp_init_kaiming_normal, 1.0);
        mixp_optimizer_add(opt, w, NULL);
        mixp_tensor_set_requires_grad(v, 0);
        traps_on(0);
        mixp_guard_start(ctx, NULL);
        mixp_optimizer_set_ema(opt, 0.9);
        for (int i = 0; i < 4; i++) {
            mixp_step_begin(ctx);
            mixp_zero_grad(opt);
            mixpi_autocast_enter(ctx, MIXP_BF16);
            y = mixp_linear(ctx, mixp_input(ctx, MIXP_F32, 2, square, x), w, NULL);
            y = mixp_dropout(ctx, mixp_tanh(ctx, mixp_mul(ctx, y, y)), 0.25f, 1);
            mixpi_autocast_leave(ctx);
            y = mixp_log(ctx, mixp_mean(ctx, mixp_exp(ctx, y), MIXP_ALL, 0));
            mixp_backward(ctx, mixp_scaler_scale(scaler, y));
            mixp_clip_grad_norm(opt, 1.0);
            mixp_context_clear_error(ctx);
            mixp_scaler_step(scaler, opt);
            mixp_scaler_update(scaler);
            mixp_scaler_verdict(scaler);
        }
        mixp_optimizer_swap_ema(opt);
        mixp_optimizer_swap_ema(opt);
        mixp_step_begin(ctx);
        mixp_tensor_set_requires_grad(v, 1);
        mixp_check_gradients(ctx, checked_loss, &v, 1, &v, 1e-3, &worst);
        traps_off();
        mixp_context_free(ctx);
    }
}

/* --- threads --------------------------------------------------------------------------------------- */

enum { ROWS = 24, WIDTH = 96 };

/* Weights after steps of which all but the first run in another mode, which the threads were not
 * started in. */
static uint64_t trained_in(int rounding, unsigned flush, int traps, int threads) {
    static const int64_t square[2] = { WIDTH, WIDTH }, line[1] = { WIDTH }, batch[2] = { ROWS, WIDTH };
    static float x[ROWS * WIDTH], w[WIDTH * WIDTH];
    mixp_context_desc d;
    uint64_t h = 14695981039346656037u;
    memset(&d, 0, sizeof d);
    d.threads = threads;
    mixp_context *ctx = mixp_context_new(&d);
    share_all_work(ctx);
    mixp_tensor *a = mixp_param(ctx, "a", MIXP_F32, 2, square);
    mixp_tensor *b = mixp_param(ctx, "b", MIXP_F32, 2, square);
    mixp_tensor *gamma = mixp_param(ctx, "gamma", MIXP_F32, 1, line);
    mixp_init_all(ctx, "?", mixp_init_kaiming_normal, 1.0);
    mixp_fill(gamma, 1.0);
    mixp_optimizer *opt = mixp_optimizer_new(ctx, NULL);
    mixp_optimizer_add_all(opt, "*");
    mixp_scaler *scaler = mixp_scaler_new(ctx, NULL);
    for (int i = 0; i < ROWS * WIDTH; i++) x[i] = (float)((i * 37 + 11) % 101 - 50) / 37.0f;
    for (int step = 0; step < 4; step++) {
        if (step == 1) {
            fesetround(rounding);
            set_flush(flush);
            if (traps) traps_on(0);
        }
        mixp_step_begin(ctx);
        mixp_zero_grad(opt);
        mixpi_autocast_enter(ctx, MIXP_F16);
        mixp_tensor *y = mixp_gelu(ctx, mixp_linear(ctx, mixp_input(ctx, MIXP_F32, 2, batch, x), a, NULL));
        y = mixp_layer_norm(ctx, mixp_linear(ctx, y, b, NULL), gamma, NULL, 1e-5f);
        y = mixp_softmax(ctx, mixp_scale(ctx, y, 20.0f));       /* small values are subnormal in f16 */
        mixpi_autocast_leave(ctx);
        mixp_backward(ctx, mixp_scaler_scale(scaler, mixp_mean(ctx, mixp_square(ctx, y), MIXP_ALL, 0)));
        mixp_scaler_step(scaler, opt);
        mixp_scaler_update(scaler);
    }
    if (traps) traps_off();
    fesetround(FE_TONEAREST);
    set_flush(0);
    for (int i = 0; i < 2; i++) {
        mixp_read(i ? b : a, w, MIXP_F32, WIDTH * WIDTH);
        for (int k = 0; k < WIDTH * WIDTH; k++) h = (h ^ mixp_bits_of_f32(w[k])) * 1099511628211u;
    }
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    mixp_context_free(ctx);
    return h;
}

static void threads_take_the_mode(void) {
    static const int roundings[4] = { FE_TONEAREST, FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO };
    static const unsigned flushes[4] = { 0, 0x8000u, 0x0040u, 0x8040u };        /* FTZ, DAZ, both */
    uint64_t nearest = trained_in(FE_TONEAREST, 0, 0, 1);
    int i, k, traps, other = 0;
    doing = "threads";
    for (i = 0; i < 4; i++)
        for (k = 0; k < 4; k++)
            for (traps = 0; traps < 2; traps++) {
                const uint64_t one = trained_in(roundings[i], flushes[k], traps, 1);
                CHECK(trained_in(roundings[i], flushes[k], traps, 2) == one);
                CHECK(trained_in(roundings[i], flushes[k], traps, 3) == one);
                if (i || k) other += one != nearest;
                else CHECK(one == nearest);
            }
    printf("  %d of 30 modes give other bits than the usual one\n", other);
}

/* A host may set DAZ. Numbers that an operator gives and rounds to bf16 then have the same bits in each instruction
 * set: subnormals stay, although an instruction for bf16 would take them for 0. */
static void subnormals_under_daz(void) {
    enum { N = 64 };
    static const int64_t shape[1] = { N };
    static const mixp_isa sets[3] = { MIXP_ISA_AVX2, MIXP_ISA_AVX512, MIXP_ISA_AVX512_BF16 };
    float a[N], b[N], got[N];
    for (int i = 0; i < N; i++) {               /* the smallest normal number * (1 + i/64), less the smallest */
        a[i] = (float)ldexp(1.0 + i / 64.0, -126);
        b[i] = (float)ldexp(-1.0, -126);
    }
    for (int k = 0; k < 3; k++) {
        mixp_context_desc desc;
        memset(&desc, 0, sizeof desc);
        desc.device = mixp_cpu_with(sets[k]);
        if (!desc.device) continue;
        mixp_context *ctx = mixp_context_new(&desc);
        mixp_step_begin(ctx);
        mixp_tensor *x = mixp_cast(ctx, mixp_input(ctx, MIXP_F32, 1, shape, a), MIXP_BF16);
        mixp_tensor *y = mixp_cast(ctx, mixp_input(ctx, MIXP_F32, 1, shape, b), MIXP_BF16);
        set_flush(0x0040u);
        y = mixp_add(ctx, x, y);
        set_flush(0);
        CHECK_INT(mixp_read(y, got, MIXP_F32, N), MIXP_OK);
        for (int i = 0; i < N; i++) CHECK(got[i] == (float)ldexp(i / 64.0, -126));
        mixp_context_free(ctx);
    }
}

int main(void) {
    programs_make();
#if CAN_TRAP
    signal(SIGFPE, died);
#endif
    RUN(threads_take_the_mode);
    RUN(subnormals_under_daz);
    RUN(calls_under_traps);
    RUN(programs_under_traps);
    RUN(features_under_traps);
    return test_report();
}
