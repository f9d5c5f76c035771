/* page.c - what index.html calls: a tiny GPT learns names in fp16 in a browser, with scaler and guard
 * SPDX-License-Identifier: MIT OR Unlicense
 *   make web      (clang, wasm-ld and wasi-libc: Debian's clang, lld, wasi-libc, libclang-rt-14-dev-wasm32) */
#define MIXPREC_IMPLEMENTATION
#define MIXPREC_STATIC
#define MIXPREC_SMALL
#define MIXPREC_NO_RANKS
#define MIXPREC_NO_CHECKPOINT
#include "mixprec.h"
#include "../names.h"

#ifdef __clang__        /* this code takes little time: optimise for size */
#  pragma clang attribute push(__attribute__((minsize)), apply_to = function)
#endif
#ifdef __wasm__
#  define EXPORT(name) __attribute__((export_name(#name)))
#else
#  define EXPORT(name)
#endif

enum { END = 0, LETTERS = 27, T = 16, C = 16, HEADS = 4, BATCH = 16, INVENTED = 8 };

static struct page {
    mixp_context   *ctx;
    mixp_scaler    *scaler;
    mixp_optimizer *opt;
    mixp_tensor    *wte, *wpe, *qkv, *out, *up, *down, *head;
    float           inner;          /* factor inside the MLP; its end divides by it again */
    double          loss;
    unsigned long long random;
    char            text[512];
} page;

static double random_number(void) {                 /* in [0, 1) */
    page.random = page.random * 6364136223846793005ull + 1442695040888963407ull;
    return (double)(page.random >> 11) / 9007199254740992.0;
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

static mixp_tensor *weight(const char *name, int64_t rows, int64_t cols) {
    const int64_t shape[2] = { rows, cols };
    mixp_tensor  *w = mixp_param(page.ctx, name, MIXP_F32, 2, shape);
    mixp_init_normal(w, 0.0, 0.08);
    return w;
}

static void make_model(void) {
    page.wte = weight("wte", LETTERS, C);
    page.wpe = weight("wpe", T, C);
    page.qkv = weight("attention.qkv", 3 * C, C);
    page.out = weight("attention.out", C, C);
    page.up = weight("mlp.up", 4 * C, C);
    page.down = weight("mlp.down", C, 4 * C);
    page.head = weight("head", LETTERS, C);
}

static mixp_tensor *mlp(mixp_context *c, mixp_tensor *x) {
    mixp_tensor *h = mixp_linear(c, mixp_rms_norm(c, x, NULL, 1e-5f), page.up, NULL);
    h = mixp_relu(c, mixp_scale(c, h, page.inner));
    return mixp_scale(c, mixp_linear(c, h, page.down, NULL), 1.0f / page.inner);
}

/* Logits [rows, T, LETTERS] of the letter after each of ids[rows, T]. */
static mixp_tensor *logits_of(const int32_t *ids, int64_t rows) {
    const int64_t shape[2] = { rows, T };
    mixp_context *c = page.ctx;
    mixp_tensor  *x = mixp_embedding(c, page.wte, mixp_input_i32(c, 2, shape, ids)), *h;
    x = mixp_rms_norm(c, mixp_add(c, x, page.wpe), NULL, 1e-5f);
    h = mixp_attention(c, mixp_linear(c, mixp_rms_norm(c, x, NULL, 1e-5f), page.qkv, NULL), HEADS, 1, 0);
    x = mixp_add(c, x, mixp_linear(c, h, page.out, NULL));
    x = mixp_add(c, x, mlp(c, x));
    return mixp_linear(c, x, page.head, NULL);
}

/* Begins a training. The scale grows every 200 clean steps, so that its limit shows. */
EXPORT(page_start) int page_start(void) {
    mixp_scaler_desc how = { .growth_interval = 200 };
    mixp_optimizer_desc adam = mixp_adam_defaults();
    adam.lr = 0.01;
    mixp_context_free(page.ctx);
    memset(&page, 0, sizeof page);
    page.inner = 1.0f;
    page.random = 42;
    page.ctx = mixp_context_new(NULL);
    if (names.count == 0) find_names(bundled_names);
    make_model();
    page.scaler = mixp_scaler_new(page.ctx, &how);
    page.opt = mixp_optimizer_new(page.ctx, &adam);
    mixp_optimizer_add_all(page.opt, "*");
    mixp_guard_start(page.ctx, NULL);
    return mixp_context_error(page.ctx, NULL) == MIXP_OK;
}

/* Takes one step in fp16, with retries. Returns 0 on an error: see page_error. */
EXPORT(page_step) int page_step(void) {
    const int64_t shape[2] = { BATCH, T };
    int32_t       x[BATCH * T], y[BATCH * T];
    mixp_tensor  *loss = NULL;
    for (int row = 0; row < BATCH; row++) one_name(x + row * T, y + row * T);
    do {
        mixp_step_begin(page.ctx);
        mixp_zero_grad(page.opt);
        MIXP_AUTOCAST(page.ctx, MIXP_F16)
            loss = mixp_cross_entropy(page.ctx, logits_of(x, BATCH), mixp_input_i32(page.ctx, 2, shape, y),
                                      MIXP_IGNORE);
        mixp_backward(page.ctx, mixp_scaler_scale(page.scaler, loss));
        mixp_scaler_step(page.scaler, page.opt);
        mixp_scaler_update(page.scaler);
    } while (mixp_retry(page.scaler, 3));
    page.loss = mixp_item(loss);
    return mixp_context_error(page.ctx, NULL) == MIXP_OK;
}

EXPORT(page_loss) double page_loss(void) { return page.loss; }
EXPORT(page_scale) double page_scale(void) { return (double)mixp_scaler_loss_scale(page.scaler); }
EXPORT(page_skipped) int page_skipped(void) { return (int)mixp_scaler_verdict(page.scaler).skipped; }
/* With 1e5 the MLP's inner values pass fp16's 65,504, and the function stays the same. */
EXPORT(page_set_inner) void page_set_inner(double factor) { page.inner = (float)factor; }

/* Sentence of event i, "" past the last. */
EXPORT(page_event) const char *page_event(int i) {
    mixp_event e;
    page.text[0] = 0;
    return mixp_guard_event(page.ctx, i, &e) ? mixp_event_text(&e, page.text, sizeof page.text) : page.text;
}

EXPORT(page_error) const char *page_error(void) {
    const char *why;
    mixp_context_error(page.ctx, &why);
    return why;
}

static int32_t draw(const float *logits) {          /* from softmax(logits / 0.5) */
    double p[LETTERS], sum = 0.0, r;
    for (int i = 0; i < LETTERS; i++) sum += p[i] = exp((double)logits[i] / 0.5);
    r = random_number() * sum;
    for (int32_t i = 0; i < LETTERS; i++)
        if ((r -= p[i]) < 0.0) return i;
    return END;
}

/* Invents names, separated by spaces. The batches to come do not depend on it. */
EXPORT(page_names) const char *page_names(void) {
    static float out[INVENTED][T][LETTERS];
    int32_t      ids[INVENTED * T] = { END };
    char        *to = page.text;
    unsigned long long kept = page.random;
    for (int t = 0; t + 1 < T; t++) {
        mixp_step_begin(page.ctx);
        MIXP_NO_GRAD(page.ctx) MIXP_AUTOCAST(page.ctx, MIXP_F16)
            mixp_read_f32(logits_of(ids, INVENTED), out, INVENTED * T * LETTERS);
        for (int i = 0; i < INVENTED; i++)
            if (t == 0 || ids[i * T + t] != END) ids[i * T + t + 1] = draw(out[i][t]);
    }
    for (int i = 0; i < INVENTED; i++) {
        for (int t = 1; t < T && ids[i * T + t] != END; t++) *to++ = (char)('a' + ids[i * T + t] - 1);
        *to++ = ' ';
    }
    *to = 0;
    page.random = kept;
    return page.text;
}

#ifdef __clang__
#  pragma clang attribute pop
#endif
