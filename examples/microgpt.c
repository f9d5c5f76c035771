/* microgpt.c - a GPT of 4,192 weights learns what given names look like, in fp16 with a loss scaler
 * and a guard, then invents some. The model is that of A. Karpathy's microgpt.py (2026): one block,
 * 16 channels, 4 heads, RMSNorm, no biases.
 * SPDX-License-Identifier: MIT OR Unlicense
 *   cc -O2 examples/microgpt.c -I. -lm && ./a.out [fp16|bf16|fp32 [names.txt]] */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include "names.h"
#include <math.h>
#include <stdio.h>
#include <time.h>

enum { END = 0, LETTERS = 27, T = 16, C = 16, HEADS = 4, STEPS = 1000, BATCH = 16, INVENTED = 16 };

static unsigned long long random_state = 42;

static double random_number(void) {                 /* in [0, 1) */
    random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
    return (double)(random_state >> 11) / 9007199254740992.0;
}

/* Fills a row of a batch with a random name. Letters are 1 to 26. x: END and the letters. y, one
 * place ahead: the letters and END. */
static void one_name(int32_t *x, int32_t *y) {
    const char *name = names.first[(int)(random_number() * names.count)];
    int         n = 0;
    while (n < T - 1 && is_letter(name[n])) n++;
    for (int t = 0; t < T; t++) {
        x[t] = t > 0 && t <= n ? name[t - 1] - 'a' + 1 : END;
        y[t] = t < n ? name[t] - 'a' + 1 : t == n ? END : MIXP_IGNORE;
    }
}

static mixp_tensor *weight(mixp_context *ctx, const char *name, int64_t rows, int64_t cols) {
    const int64_t shape[2] = { rows, cols };
    mixp_tensor  *w = mixp_param(ctx, name, MIXP_F32, 2, shape);
    mixp_init_normal(w, 0.0, 0.08);
    return w;
}

static struct { mixp_tensor *wte, *wpe, *qkv, *out, *up, *down, *head; } model;

static void make_model(mixp_context *ctx) {
    model.wte = weight(ctx, "wte", LETTERS, C);
    model.wpe = weight(ctx, "wpe", T, C);
    model.qkv = weight(ctx, "attention.qkv", 3 * C, C);
    model.out = weight(ctx, "attention.out", C, C);
    model.up = weight(ctx, "mlp.up", 4 * C, C);
    model.down = weight(ctx, "mlp.down", C, 4 * C);
    model.head = weight(ctx, "head", LETTERS, C);
}

/* Logits [rows, T, LETTERS] of the letter after each of ids[rows, T]. */
static mixp_tensor *logits_of(mixp_context *ctx, const int32_t *ids, int64_t rows) {
    const int64_t shape[2] = { rows, T };
    mixp_tensor  *x = mixp_embedding(ctx, model.wte, mixp_input_i32(ctx, 2, shape, ids)), *h;
    x = mixp_rms_norm(ctx, mixp_add(ctx, x, model.wpe), NULL, 1e-5f);
    h = mixp_linear(ctx, mixp_rms_norm(ctx, x, NULL, 1e-5f), model.qkv, NULL);
    x = mixp_add(ctx, x, mixp_linear(ctx, mixp_attention(ctx, h, HEADS, 1, 0), model.out, NULL));
    h = mixp_relu(ctx, mixp_linear(ctx, mixp_rms_norm(ctx, x, NULL, 1e-5f), model.up, NULL));
    x = mixp_add(ctx, x, mixp_linear(ctx, h, model.down, NULL));
    return mixp_linear(ctx, x, model.head, NULL);
}

/* Takes one step on BATCH names and returns the loss. A skipped step is repeated with the same names. */
static double train_step(mixp_context *ctx, mixp_dtype dtype, mixp_optimizer *opt, mixp_scaler *scaler) {
    int32_t       x[BATCH * T], y[BATCH * T];
    const int64_t shape[2] = { BATCH, T };
    mixp_tensor  *loss = NULL;
    for (int row = 0; row < BATCH; row++) one_name(x + row * T, y + row * T);
    do {
        mixp_step_begin(ctx);
        mixp_zero_grad(opt);
        MIXP_AUTOCAST(ctx, dtype)
            loss = mixp_cross_entropy(ctx, logits_of(ctx, x, BATCH), mixp_input_i32(ctx, 2, shape, y),
                                      MIXP_IGNORE);
        mixp_backward(ctx, mixp_scaler_scale(scaler, loss));
        mixp_scaler_step(scaler, opt);
        mixp_scaler_update(scaler);
    } while (mixp_retry(scaler, 3));
    return mixp_item(loss);
}

static int32_t draw(const float *logits) {          /* from softmax(logits / 0.5) */
    double p[LETTERS], sum = 0.0, r;
    for (int i = 0; i < LETTERS; i++) sum += p[i] = exp((double)logits[i] / 0.5);
    r = random_number() * sum;
    for (int32_t i = 0; i < LETTERS; i++)
        if ((r -= p[i]) < 0.0) return i;
    return END;
}

static void invent(mixp_context *ctx, mixp_dtype dtype) {
    static float out[INVENTED][T][LETTERS];
    int32_t      ids[INVENTED * T] = { END };
    for (int t = 0; t + 1 < T; t++) {
        mixp_step_begin(ctx);
        MIXP_NO_GRAD(ctx) MIXP_AUTOCAST(ctx, dtype)
            mixp_read(logits_of(ctx, ids, INVENTED), out, MIXP_F32, INVENTED * T * LETTERS);
        for (int i = 0; i < INVENTED; i++)
            if (t == 0 || ids[i * T + t] != END) ids[i * T + t + 1] = draw(out[i][t]);
    }
    for (int i = 0; i < INVENTED; i++) {
        for (int t = 1; t < T && ids[i * T + t] != END; t++) putchar('a' + ids[i * T + t] - 1);
        putchar(i % 8 == 7 ? '\n' : ' ');
    }
}

static mixp_optimizer *make_optimizer(mixp_context *ctx) {
    mixp_optimizer_desc adam = mixp_adam_defaults();
    adam.lr = 0.01;
    adam.beta1 = 0.85;
    adam.beta2 = 0.99;
    adam.schedule.kind = MIXP_SCHEDULE_LINEAR;
    adam.schedule.total = STEPS;
    return mixp_optimizer_new(ctx, &adam);
}

int main(int argc, char **argv) {
    const char     *in = argc > 1 ? argv[1] : "fp16", *why;
    mixp_dtype      dtype = !strcmp(in, "fp32") ? MIXP_F32 : !strcmp(in, "bf16") ? MIXP_BF16 : MIXP_F16;
    mixp_context   *ctx = mixp_context_new(NULL);
    mixp_scaler    *scaler = mixp_scaler_new(ctx, NULL);
    mixp_optimizer *opt;
    double          sum = 0.0;
    clock_t         begin = clock();
    if (dtype == MIXP_F16 && strcmp(in, "fp16")) { fprintf(stderr, "microgpt: no dtype %s\n", in); return 1; }
    find_names(argc > 2 ? read_names(argv[2]) : bundled_names);
    if (names.count == 0) { fprintf(stderr, "microgpt: no names in %s\n", argv[2]); return 1; }
    make_model(ctx);
    opt = make_optimizer(ctx);
    mixp_optimizer_add_all(opt, "*");
    mixp_guard_start(ctx, NULL);
    printf("%d names, %s\n", names.count, in);
    for (int step = 1; step <= STEPS; step++) {
        sum += train_step(ctx, dtype, opt, scaler);
        if (mixp_context_error(ctx, &why)) { fprintf(stderr, "%s\n", why); return 1; }
        if (step == 1 || step % 100 == 0) printf("step %4d  loss %.3f\n", step, step == 1 ? sum : sum / 100.0);
        sum *= step % 100 != 0;
    }
    printf("loss scale %g, %d steps skipped, %.2f s of CPU time\n", (double)mixp_scaler_loss_scale(scaler),
           (int)mixp_scaler_verdict(scaler).skipped, (double)(clock() - begin) / CLOCKS_PER_SEC);
    invent(ctx, dtype);
    mixp_context_free(ctx);
    return 0;
}
