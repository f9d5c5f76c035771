/* test_guard.c - a guard: which values it looks at, which sites fall back to f32 and return to
 * f16, and where a skip began.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * A small GPT learns which token follows which. One token is planted: it activates a hidden unit
 * of the middle block, and the second product of that block exceeds the largest f16.
 */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include "examples/compare.h"
#include "test.h"
#include <unistd.h>

enum { LAYERS = 3, WIDTH = 16, HIDDEN = 32, HEADS = 2, VOCAB = 12, TIME = 8, BATCH = 4 };
enum { LN1, QKV, OUT, LN2, FC, PROJ, WEIGHTS };
static const int rows_of[WEIGHTS] = { WIDTH, 3 * WIDTH, WIDTH, WIDTH, HIDDEN, WIDTH };
static const int cols_of[WEIGHTS] = { 0, WIDTH, WIDTH, 0, WIDTH, HIDDEN };
static const char *const names_of[WEIGHTS] = { "ln_1.w",   "attn.qkv.w", "attn.proj.w",
                                               "ln_2.w", "mlp.fc.w", "mlp.proj.w" };

typedef struct gpt {
    mixp_context   *ctx;
    mixp_scaler    *scaler;
    mixp_optimizer *opt;
    mixp_tensor    *wte, *wpe, *w[LAYERS][WEIGHTS], *ln_f;
    int32_t         in[BATCH * TIME], out[BATCH * TIME];
    double          dropout;
    int             scopes, detour;     /* detour: a block of the program that comes and goes */
    uint64_t        batch;
    mixp_tensor    *proj;               /* the planted product's result, in the newest pass */
} gpt;

static mixp_tensor *weight(gpt *g, const char *name, int rows, int cols, double std) {
    int64_t shape[2];
    shape[0] = rows;
    shape[1] = cols;
    mixp_tensor *t = mixp_param(g->ctx, name, MIXP_F32, cols ? 2 : 1, shape);
    if (cols) mixp_init_normal(t, 0.0, std);
    else mixp_fill(t, 1.0);
    mixp_optimizer_add(g->opt, t, NULL);
    return t;
}

static const mixp_device *device_of_tests;

static gpt gpt_open(double lr) {
    mixp_context_desc c;
    mixp_optimizer_desc adam = mixp_adamw_defaults();
    mixp_scaler_desc rule;
    gpt g;
    memset(&g, 0, sizeof g);
    memset(&c, 0, sizeof c);
    c.seed = 3;
    c.threads = 1;
    c.device = device_of_tests;
    adam.lr = lr;
    g.ctx = mixp_context_new(&c);
    memset(&rule, 0, sizeof rule);
    rule.init_scale = 64.0f;
    g.scaler = mixp_scaler_new(g.ctx, &rule);
    g.opt = mixp_optimizer_new(g.ctx, &adam);
    g.wte = weight(&g, "wte", VOCAB, WIDTH, 0.5);
    g.wpe = weight(&g, "wpe", TIME, WIDTH, 0.1);
    for (int l = 0; l < LAYERS; l++)
        for (int k = 0; k < WEIGHTS; k++) {
            char name[64];
            snprintf(name, sizeof name, "h.%d.%s", l, names_of[k]);
            g.w[l][k] = weight(&g, name, rows_of[k], cols_of[k], 0.15);
        }
    g.ln_f = weight(&g, "ln_f.w", WIDTH, 0, 0.0);
    return g;
}

static void gpt_close(gpt *g) {
    const char *why;
    CHECK_INT(mixp_context_error(g->ctx, &why), MIXP_OK);
    if (*why) printf("  %s\n", why);
    mixp_context_free(g->ctx);
}

/* The next batch: token 5 x + 1 follows x, with one in eight drawn at random; 0 comes first. */
static void next_batch(gpt *g) {
    for (int i = 0; i < BATCH * TIME; i++) {
        uint32_t r = (uint32_t)((g->batch * 77 + (uint64_t)i + 11) * 2654435761u >> 7);
        int32_t from = i % TIME ? g->out[i - 1] : i ? (int32_t)(r % VOCAB) : 0;
        g->in[i] = from;
        g->out[i] = r % 8 ? (5 * from + 1) % VOCAB : (int32_t)(r / 8 % VOCAB);
    }
    g->batch++;
}

static mixp_tensor *block(gpt *g, mixp_tensor *x, int l) {
    mixp_context *ctx = g->ctx;
    mixp_tensor *const *w = g->w[l], *y;
    y = mixp_layer_norm(ctx, x, w[LN1], NULL, 1e-5f);
    y = mixp_attention(ctx, mixp_linear(ctx, y, w[QKV], NULL), HEADS, 1, 0.0f);
    x = mixp_add(ctx, x, mixp_linear(ctx, y, w[OUT], NULL));
    y = mixp_layer_norm(ctx, x, w[LN2], NULL, 1e-5f);
    y = mixp_gelu_tanh(ctx, mixp_linear(ctx, y, w[FC], NULL));
    y = mixp_linear(ctx, y, w[PROJ], NULL);
    if (l == 1) g->proj = y;
    if (g->dropout > 0.0) y = mixp_dropout(ctx, y, (float)g->dropout, 1);
    return mixp_add(ctx, x, y);
}

static mixp_tensor *gpt_loss(gpt *g) {
    static const int64_t shape[2] = { BATCH, TIME }, places[1] = { TIME };
    mixp_context *ctx = g->ctx;
    int32_t place[TIME];
    for (int l = 0; l < TIME; l++) place[l] = l;
    mixp_tensor *ids = mixp_input(ctx, MIXP_I32, 2, shape, g->in);
    mixp_tensor *targets = mixp_input(ctx, MIXP_I32, 2, shape, g->out);
    mixp_tensor *x = mixp_add(ctx, mixp_embedding(ctx, g->wte, ids),
                 mixp_embedding(ctx, g->wpe, mixp_input(ctx, MIXP_I32, 1, places, place)));
    for (int l = 0; l < LAYERS; l++) {
        char scope[16];
        snprintf(scope, sizeof scope, "h.%d", l);
        if (g->scopes) {
            MIXP_SCOPE(ctx, scope) { x = block(g, x, l); }
        } else x = block(g, x, l);
    }
    if (g->detour) x = mixp_scale(ctx, x, 1.0f);
    x = mixp_layer_norm(ctx, x, g->ln_f, NULL, 1e-5f);
    return mixp_cross_entropy(ctx, mixp_linear(ctx, x, g->wte, NULL), targets, -100);
}

/* One step on the batch in place; its loss. */
static double gpt_step(gpt *g, mixp_dtype dtype) {
    mixp_tensor *loss = NULL;
    mixp_step_begin(g->ctx);
    mixp_zero_grad(g->opt);
    MIXP_AUTOCAST(g->ctx, dtype) { loss = gpt_loss(g); }
    mixp_backward(g->ctx, mixp_scaler_scale(g->scaler, loss));
    mixp_scaler_step(g->scaler, g->opt);
    double value = mixp_item(loss);
    mixp_scaler_update(g->scaler);
    return value;
}

/* The same, tried again while it pays. */
static double gpt_train(gpt *g, mixp_dtype dtype) {
    double loss;
    next_batch(g);
    do loss = gpt_step(g, dtype);
    while (mixp_retry(g->scaler, 4));
    return loss;
}

/* Nothing but the embedding of tokens writes to channel 0 of t: its first row, or column. */
static void spare_channel(mixp_tensor *t, int column) {
    float w[HIDDEN * WIDTH];
    int64_t cols = t->shape[1], i, n = column ? t->shape[0] : cols;
    mixp_read(t, w, MIXP_F32, t->count);
    for (i = 0; i < n; i++) w[column ? i * cols : i] = 0.0f;
    mixp_write(t, w, MIXP_F32, t->count);
}

/* Makes the middle block's second product `height` large, for token 0: its hidden unit 0 reads the
 * embedding's channel 0, in which that token stands alone; channel 1 of the result is its own. */
static void plant(gpt *g, double height) {
    float wte[VOCAB * WIDTH], fc[HIDDEN * WIDTH], proj[WIDTH * HIDDEN], found = 0.0f;
    static float all[BATCH * TIME * WIDTH];
    spare_channel(g->wpe, 1);
    spare_channel(g->w[0][OUT], 0);
    spare_channel(g->w[0][PROJ], 0);
    spare_channel(g->w[1][OUT], 0);
    mixp_read(g->wte, wte, MIXP_F32, VOCAB * WIDTH);
    mixp_read(g->w[1][FC], fc, MIXP_F32, HIDDEN * WIDTH);
    mixp_read(g->w[1][PROJ], proj, MIXP_F32, WIDTH * HIDDEN);
    for (int i = 0; i < VOCAB; i++) wte[i * WIDTH] = i ? -4.0f : 4.0f;
    for (int i = 0; i < WIDTH; i++) fc[i] = i ? 0.0f : 4.0f;
    for (int i = 0; i < WIDTH; i++) proj[i * HIDDEN] = 0.0f;
    for (int i = 0; i < HIDDEN; i++) proj[HIDDEN + i] = i ? 0.0f : 1.0f;
    mixp_write(g->wte, wte, MIXP_F32, VOCAB * WIDTH);
    mixp_write(g->w[1][FC], fc, MIXP_F32, HIDDEN * WIDTH);
    mixp_write(g->w[1][PROJ], proj, MIXP_F32, WIDTH * HIDDEN);
    next_batch(g);
    g->batch--;
    mixp_step_begin(g->ctx);
    MIXP_AUTOCAST(g->ctx, MIXP_F16) { (void)gpt_loss(g); }
    mixp_read(g->proj, all, MIXP_F32, BATCH * TIME * WIDTH);
    for (int i = 0; i < BATCH * TIME; i++)
        if (all[i * WIDTH + 1] > found) found = all[i * WIDTH + 1];
    CHECK(found > 1.0f);
    proj[HIDDEN] = (float)(height / (double)found);
    mixp_write(g->w[1][PROJ], proj, MIXP_F32, WIDTH * HIDDEN);
}

static mixp_site_info site_named(const mixp_context *ctx, const char *name) {
    mixp_site_info s;
    memset(&s, 0, sizeof s);
    for (int i = 0; mixp_site(ctx, i, &s); i++)
        if (strcmp(s.name, name) == 0) return s;
    memset(&s, 0, sizeof s);
    CHECK(0 && "such a site");
    return s;
}

static int events_of(const mixp_context *ctx, mixp_event_kind kind, mixp_event *last) {
    mixp_event e;
    int i, n = 0;
    for (i = 0; mixp_guard_event(ctx, i, &e); i++)
        if (e.kind == kind) {
            n++;
            *last = e;
        }
    return n;
}

static void show(const mixp_context *ctx) {
    mixp_event e;
    mixp_site_info s;
    if (!getenv("SHOW")) return;
    for (int i = 0; mixp_guard_event(ctx, i, &e); i++)
        printf("  step %lld: %s %s, largest %g, flushed %.3f, non-finite %lld: %s\n",
               (long long)e.step, e.site, e.what, (double)e.largest, e.flushed,
               (long long)e.nonfinite, mixp_origin_text(e.origin));
    for (int i = 0; mixp_site(ctx, i, &s); i++)
        printf("  %-32s %-5s fallen %d falls %d clean %d of %d, largest %g, gradient %g\n", s.name,
               mixp_dtype_name(s.dtype), s.fallen, s.falls, s.clean, s.clean_needed,
               (double)s.value.largest, (double)s.grad.largest);
}

static const char planted[] = "h.1.mlp.proj.w: linear";

/* --- the planted overflow --- */

/* Guarded f16 beside f32 on the same weights and batches, and PyTorch's rule beside both. */
static void overflow_at(int level, double *late) {
    gpt f32 = gpt_open(3e-3), low = gpt_open(3e-3), torch = gpt_open(3e-3);
    mixp_event e;
    mixp_site_info s;
    double worst = 0.0;
    int i, fallen = 0;
    mixp_autocast_set_level(f32.ctx, level);
    mixp_autocast_set_level(low.ctx, level);
    mixp_autocast_set_level(torch.ctx, level);
    plant(&f32, 66246.0);
    plant(&low, 66246.0);
    plant(&torch, 66246.0);
    CHECK_INT(mixp_guard_start(low.ctx, NULL), MIXP_OK);
    for (i = 0; i < 30; i++) {
        double a = gpt_train(&f32, MIXP_F32), b = gpt_train(&low, MIXP_F16), off = fabs(a - b);
        if (!(off <= worst)) worst = off;
        *late = a;
        next_batch(&torch);
        (void)gpt_step(&torch, MIXP_F16);
        if (!i) CHECK_NEAR(site_named(low.ctx, planted).value.largest, 66246.0, 70.0);
    }
    CHECK(worst <= 0.01);
    if (!(worst <= 0.01)) printf("  level %d: worst %g\n", level, worst);
    show(low.ctx);
    CHECK_INT(mixp_scaler_verdict(torch.scaler).applied, 0);
    CHECK_INT(mixp_optimizer_applied(low.opt), 30);
    CHECK_NEAR(mixp_scaler_loss_scale(low.scaler), 64.0, 0);
    CHECK_NEAR(mixp_scaler_loss_scale(torch.scaler), ldexp(64.0, -30), 0);
    for (i = 0; mixp_site(low.ctx, i, &s); i++) {
        fallen += s.fallen;
        if (s.fallen) CHECK_TEXT(s.name, planted);
        if (s.dtype == MIXP_F32 && level == 2 && s.value.count > 1 && strcmp(s.name, planted))
            CHECK_TEXT(s.op, "add");
    }
    CHECK_INT(fallen, 1);
    CHECK_INT(events_of(low.ctx, MIXP_EVENT_OVERFLOW, &e), 1);
    CHECK_TEXT(e.site, planted);
    CHECK(e.nonfinite > 0);
    CHECK_INT(events_of(low.ctx, MIXP_EVENT_SKIP, &e), 1);
    CHECK_INT(e.origin, MIXP_ORIGIN_FORWARD);
    CHECK_TEXT(e.site, planted);
    gpt_close(&f32);
    gpt_close(&low);
    mixp_context_free(torch.ctx);
}

static void test_planted_overflow(void) {
    double first = 0.0, late = 0.0;
    gpt g = gpt_open(3e-3);
    plant(&g, 66246.0);
    first = gpt_train(&g, MIXP_F32);
    gpt_close(&g);
    overflow_at(1, &late);
    CHECK(late < first - 0.3);          /* it does learn meanwhile */
    overflow_at(2, &late);
}

/* --- nothing falls back: not a bit is other --- */

static void off_and_on_at(mixp_dtype dtype, int level) {
    gpt off = gpt_open(3e-3), on = gpt_open(3e-3);
    mixp_guard_desc d;
    mixp_event e;
    memset(&d, 0, sizeof d);
    d.every = 1;
    off.dropout = on.dropout = 0.1;
    mixp_autocast_set_level(off.ctx, level);
    mixp_autocast_set_level(on.ctx, level);
    CHECK_INT(mixp_guard_start(on.ctx, &d), MIXP_OK);
    for (int i = 0; i < 40; i++) {
        double a = gpt_train(&off, dtype), b = gpt_train(&on, dtype);
        CHECK(memcmp(&a, &b, sizeof a) == 0);
    }
    CHECK_INT(mixp_guard_event(on.ctx, 0, &e), 0);
    show(on.ctx);
    gpt_close(&off);
    gpt_close(&on);
}

static void test_off_and_on_are_equal(void) {
    for (int level = 1; level <= 2; level++) {
        off_and_on_at(MIXP_F16, level);
        off_and_on_at(MIXP_BF16, level);
    }
    off_and_on_at(MIXP_F32, 1);
}

/* --- the kernel, beside a loop in double --- */

static double magnitude_of(const void *data, mixp_dtype dtype, int64_t i) {
    double x;
    mixp_convert(&x, MIXP_F64, (const char *)data + i * (int64_t)mixp_dtype_size(dtype), dtype, 1);
    return fabs(x);
}

/* Formats by their definitions: exponent of the smallest normal number, bits of mantissa, and the
 * first magnitude that is past the largest: as the tie goes to the even one, that tie or, with
 * `after`, what lies behind it. e4m3: 448 is even, 464 the tie; e5m2: 57344 is odd, 61440. */
typedef struct looked_format { mixp_dtype low; int normal, bits, after; double past; } looked_format;
static const looked_format looked[] = {
    { MIXP_F16, -14, 10, 0, 65520.0 },     { MIXP_BF16, -126, 7, 0, 3.3961775292304601e+38 },
    { MIXP_F8_E4M3, -6, 3, 1, 464.0 },     { MIXP_F8_E5M2, -14, 2, 0, 61440.0 },
    { MIXP_F8_E4M3FNUZ, -7, 3, 0, 248.0 }, { MIXP_F8_E5M2FNUZ, -15, 2, 0, 61440.0 },
};
enum { LOOKED = sizeof looked / sizeof looked[0] };

/* What rounding to a low format makes of x, told by exact numbers: a tie goes to the even one. */
static mixp_look look_slowly(const void *data, mixp_dtype dtype, int64_t n, mixp_dtype low,
                             int64_t *exponents) {
    const looked_format *f = looked;
    double normal, tiny;
    mixp_look l;
    int64_t i;
    while (f->low != low) f++;
    normal = ldexp(1, f->normal);
    tiny = ldexp(1, f->normal - f->bits);
    memset(&l, 0, sizeof l);
    l.count = n;
    for (i = 0; i < n; i++) {
        double x = magnitude_of(data, dtype, i);
        int e = 0;
        if (x != x) l.nan = 1;
        if (!(x <= 3.5e38)) { l.nonfinite++; exponents[255]++; continue; }
        if (x > (double)l.largest) l.largest = (float)x;
        l.saturated += f->after ? x > f->past : x >= f->past;
        if (x >= ldexp(1, -126)) { frexp(x, &e); exponents[e + 126]++; } else exponents[0]++;
        if (!(x > 0)) l.zeros++;
        else if (x <= tiny / 2) l.flushed++;
        else if (x < normal - tiny / 2) {
            l.subnormal++;
            l.least += x < 1.5 * tiny;
        }
    }
    return l;
}

static void check_look(mixp_context *ctx, const void *data, mixp_dtype dtype, int64_t n,
                       mixp_dtype low) {
    static int64_t got_e[256], want_e[256];
    mixp_look_args k;
    mixp_look row, total, want;
    memset(&k, 0, sizeof k);
    memset(&row, 0, sizeof row);
    memset(&total, 0, sizeof total);
    memset(got_e, 0, sizeof got_e);
    memset(want_e, 0, sizeof want_e);
    total.largest = 1e38f;
    total.zeros = 3;
    k.n = n;
    k.x.data = data;
    k.x.dtype = dtype;
    k.low = low;
    k.row = &row;
    k.total = &total;
    k.exponents = got_e;
    want = look_slowly(data, dtype, n, low, want_e);
    CHECK_INT(mixp_context_device(ctx)->kernels->look(mixp_context_exec(ctx), &k), MIXP_OK);
    CHECK_NEAR(row.largest, want.largest, 0);
    CHECK_INT(row.count, n);
    CHECK_INT(row.nonfinite, want.nonfinite);
    CHECK_INT(row.nan, want.nan);
    CHECK_INT(total.nan, want.nan);
    CHECK_INT(row.zeros, want.zeros);
    CHECK_INT(row.flushed, want.flushed);
    CHECK_INT(row.least, want.least);
    CHECK_INT(row.subnormal, want.subnormal);
    CHECK_INT(row.saturated, want.saturated);
    CHECK_INT(total.zeros, want.zeros + 3);
    CHECK_INT(total.subnormal, want.subnormal);
    CHECK_NEAR(total.largest, want.largest > 1e38f ? want.largest : 1e38f, 0);
    CHECK(memcmp(got_e, want_e, sizeof got_e) == 0);
}

/* Every code of f16 and of bf16, and every magnitude near where rounding takes another course. */
static void test_look(void) {
    static uint16_t codes[65536];
    static float near[4096 + 512];
    static const double at[] = { -25, -24.415037499278846, -24, -14, -134, -133, -126, 127 };
    mixp_context_desc c;
    int isa, i;
    for (i = 0; i < 65536; i++) codes[i] = (uint16_t)i;
    for (i = 0; i < 4096; i++) {
        float x = (float)exp2(at[i / 512]);
        near[i] = mixp_f32_of_bits(mixp_bits_of_f32(x) + (uint32_t)(i % 512) - 256u);
        if (i % 3 == 1) near[i] = -near[i];
    }
    for (i = 0; i < 512; i++) {         /* about where each format ends */
        float x = (float)looked[i / 64 % LOOKED].past;
        near[4096 + i] = mixp_f32_of_bits(mixp_bits_of_f32(x) + (uint32_t)(i % 64) - 32u);
    }
    for (isa = 0; isa < MIXP_ISA_COUNT; isa++) {
        memset(&c, 0, sizeof c);
        c.device = mixp_cpu_with((mixp_isa)isa);
        if (!c.device) continue;
        mixp_context *ctx = mixp_context_new(&c);
        for (int low = 0; low < LOOKED; low++) {
            mixp_dtype to = looked[low].low;
            check_look(ctx, codes, MIXP_F16, 65536, to);
            check_look(ctx, codes, MIXP_BF16, 65536, to);
            check_look(ctx, near, MIXP_F32, 4096 + 512, to);
            for (i = 1; i < 40; i++) check_look(ctx, near + 7 * i, MIXP_F32, i, to);
            for (i = 0x7BF0; i < 0x7C20; i++) check_look(ctx, codes + 0x7BF0, MIXP_F16, i - 0x7BEF, to);   /* Inf, then NaN */
        }
        mixp_context_free(ctx);
    }
}

/* Casts to fp8 that a program makes itself: what saturates is what the conversion cuts off. */
static void test_look_at(void) {
    static float x[5000];
    static const int64_t shape[2] = { 100, 50 };
    static const mixp_dtype to[] = { MIXP_F8_E4M3, MIXP_F8_E5M2, MIXP_F16 };
    static const float most[] = { 448.0f, 57344.0f, 65504.0f };
    mixp_context *ctx = mixp_context_new(NULL);
    for (int i = 0; i < 5000; i++) x[i] = (float)ldexp(1.0 + i * 37 % 1000 / 1000.0, i * 7 % 40 - 20);
    mixp_tensor *t = mixp_param(ctx, "x", MIXP_F32, 2, shape);
    mixp_write(t, x, MIXP_F32, 5000);
    for (int k = 0; k < 3; k++) {
        int64_t cut = 0, zeros = 0;
        mixp_look look;
        for (int i = 0; i < 5000; i++) {
            double wide = mixp_decode(to[k], mixp_encode(to[k], (double)x[i], 0));
            cut += !(wide <= (double)most[k]);  /* Inf, or e4m3's NaN */
            zeros += wide <= 0;
        }
        mixp_look_args look_args;
        memset(&look, 0, sizeof look);
        memset(&look_args, 0, sizeof look_args);
        look_args.n = t->count;
        look_args.x.data = t->data;
        look_args.x.dtype = t->dtype;
        look_args.low = to[k];
        look_args.row = &look;
        CHECK_INT(mixp_context_device(ctx)->kernels->look(mixp_context_exec(ctx), &look_args), MIXP_OK);
        CHECK_INT(look.saturated, cut);
        CHECK_INT(look.flushed, zeros);
        CHECK_INT(look.count, 5000);
        CHECK(cut > 50);
    }
    mixp_context_free(ctx);
}

/* --- growth in the middle of training: near the end of the range is soon enough --- */

static void raise_proj(gpt *g, float factor) {
    float w[WIDTH * HIDDEN];
    mixp_read(g->w[1][PROJ], w, MIXP_F32, WIDTH * HIDDEN);
    w[HIDDEN] *= factor;
    mixp_write(g->w[1][PROJ], w, MIXP_F32, WIDTH * HIDDEN);
}

static void test_growth(void) {
    for (int level = 1; level <= 2; level++) {
        gpt f32 = gpt_open(1e-3), low = gpt_open(1e-3);
        mixp_guard_desc d;
        mixp_event e;
        double worst = 0.0;
        memset(&d, 0, sizeof d);
        d.every = 4;
        mixp_autocast_set_level(low.ctx, level);
        plant(&f32, 1000.0);
        plant(&low, 1000.0);
        CHECK_INT(mixp_guard_start(low.ctx, &d), MIXP_OK);
        for (int i = 0; i < 30; i++) {
            if (i >= 5 && i < 25) {
                raise_proj(&f32, 1.25f);
                raise_proj(&low, 1.25f);
            }
            double off = fabs(gpt_train(&f32, MIXP_F32) - gpt_train(&low, MIXP_F16));
            if (!(off <= worst)) worst = off;
        }
        show(low.ctx);
        CHECK(worst <= 0.01);
        CHECK_INT(mixp_scaler_verdict(low.scaler).skipped, 0);
        CHECK(events_of(low.ctx, MIXP_EVENT_HIGH, &e) >= 1);
        CHECK(e.largest > 16376.0f);
        CHECK(site_named(low.ctx, planted).value.largest > 65504.0f);
        CHECK_INT(site_named(low.ctx, planted).dtype, MIXP_F32);
        gpt_close(&f32);
        gpt_close(&low);
    }
}

/* --- back to low, and ever later --- */

static void test_relapse(void) {
    gpt g = gpt_open(0.0);
    mixp_guard_desc d;
    mixp_event e;
    int i, round, needed = 2;
    memset(&d, 0, sizeof d);
    d.every = 1;
    d.clean = 2;
    plant(&g, 40000.0);
    CHECK_INT(mixp_guard_start(g.ctx, &d), MIXP_OK);
    for (round = 0; round < 4; round++) {
        if (round) raise_proj(&g, 16.0f);
        gpt_train(&g, MIXP_F16);
        CHECK_INT(site_named(g.ctx, planted).fallen, 1);
        CHECK_INT(site_named(g.ctx, planted).falls, round + 1);
        CHECK_INT(site_named(g.ctx, planted).clean_needed, needed);
        raise_proj(&g, 0.0625f);        /* 2500: below 65504 / 16 */
        for (i = 0; i < needed; i++) {
            CHECK_INT(site_named(g.ctx, planted).fallen, 1);
            gpt_train(&g, MIXP_F16);
        }
        CHECK_INT(site_named(g.ctx, planted).fallen, 0);
        CHECK_INT(events_of(g.ctx, MIXP_EVENT_BACK, &e), round + 1);
        gpt_train(&g, MIXP_F16);
        CHECK_INT(site_named(g.ctx, planted).dtype, MIXP_F16);
        needed *= 2;
    }
    show(g.ctx);
    gpt_close(&g);
}

/* --- by hand --- */

static void refuse(mixp_context *ctx, mixp_result got, mixp_result want, const char *part) {
    const char *why = "";
    CHECK_INT(got, want);
    mixp_context_error(ctx, &why);
    CHECK_TEXT(why, part);
    mixp_context_clear_error(ctx);
}

static void test_pins(void) {
    gpt g = gpt_open(1e-3);
    mixp_site_info s;
    mixp_event e;
    plant(&g, 66246.0);
    CHECK_INT(mixp_guard_pin(g.ctx, "h.?.mlp.proj*", MIXP_F32), MIXP_OK);
    CHECK_INT(mixp_guard_start(g.ctx, NULL), MIXP_OK);
    for (int i = 0; i < 3; i++) gpt_train(&g, MIXP_F16);
    CHECK_INT(mixp_scaler_verdict(g.scaler).skipped, 0);
    for (int i = 0; mixp_site(g.ctx, i, &s); i++) {
        int proj = strstr(s.name, "mlp.proj.w") != NULL;
        CHECK_INT(s.pinned, proj);
        if (proj) CHECK_INT(s.dtype, MIXP_F32);
        CHECK_INT(s.fallen, 0);
    }
    CHECK_INT(events_of(g.ctx, MIXP_EVENT_PINNED, &e), 3);
    CHECK_INT(mixp_guard_pin(g.ctx, "h.2.mlp.proj.w", MIXP_DTYPE_COUNT), MIXP_OK);
    CHECK_INT(mixp_guard_pin(g.ctx, "h.0.attn*: linear", MIXP_F32), MIXP_OK);
    gpt_train(&g, MIXP_F16);
    CHECK_INT(site_named(g.ctx, "h.2.mlp.proj.w: linear").dtype, MIXP_F16);
    CHECK_INT(site_named(g.ctx, "h.0.attn.qkv.w: linear").dtype, MIXP_F32);
    CHECK_INT(site_named(g.ctx, "h.0.attn.qkv.w: attention").dtype, MIXP_F16);
    CHECK_INT(site_named(g.ctx, planted).dtype, MIXP_F32);
    refuse(g.ctx, mixp_guard_pin(g.ctx, "h.*.mlp.pro", MIXP_F32), MIXP_ERR_ARGUMENT, "no site");
    refuse(g.ctx, mixp_guard_pin(g.ctx, "h*", MIXP_I32), MIXP_ERR_ARGUMENT, "dtype");
    refuse(g.ctx, mixp_guard_pin(g.ctx, "", MIXP_F32), MIXP_ERR_ARGUMENT, "empty");
    gpt_close(&g);
}

/* With a cast left out, dropout draws what it would have drawn. */
static void test_pinned_cast(void) {
    gpt pinned = gpt_open(1e-3), plain = gpt_open(1e-3);
    pinned.dropout = plain.dropout = 0.3;
    CHECK_INT(mixp_guard_pin(pinned.ctx, "h.0.ln_?.w: cast", MIXP_F32), MIXP_OK);
    CHECK_INT(mixp_guard_start(pinned.ctx, NULL), MIXP_OK);
    for (int i = 0; i < 5; i++)
        CHECK_NEAR(gpt_train(&pinned, MIXP_F16), gpt_train(&plain, MIXP_F16), 2e-3);
    CHECK_INT(site_named(pinned.ctx, "h.0.ln_1.w: cast").dtype, MIXP_F32);
    gpt_close(&pinned);
    gpt_close(&plain);
}

/* Held low, the planted site overflows for good, and the guard says so. Nothing falls back, so that
 * one skip is forgiven and the others lower the scale. */
static void test_pinned_low(void) {
    gpt g = gpt_open(1e-3);
    mixp_guard_desc d;
    const char *why;
    memset(&d, 0, sizeof d);
    d.patience = 5;
    plant(&g, 66246.0);
    CHECK_INT(mixp_guard_start(g.ctx, &d), MIXP_OK);
    CHECK_INT(mixp_guard_pin(g.ctx, "h.1.mlp.proj.w", MIXP_F16), MIXP_OK);
    next_batch(&g);
    for (int i = 0; i < 5; i++) {
        CHECK_INT(mixp_context_error(g.ctx, NULL), MIXP_OK);
        gpt_step(&g, MIXP_F16);
        mixp_verdict v = mixp_scaler_verdict(g.scaler);
        CHECK_INT(v.outcome, MIXP_STEP_SKIPPED);
        CHECK_INT(v.origin, MIXP_ORIGIN_FORWARD);
        CHECK_TEXT(v.site, planted);
    }
    CHECK_INT(mixp_context_error(g.ctx, &why), MIXP_ERR_DIVERGED);
    CHECK_TEXT(why, "5 steps in a row");
    CHECK_TEXT(why, planted);
    CHECK_NEAR(mixp_scaler_loss_scale(g.scaler), 64.0 / 16, 0);     /* the first is forgiven */
    mixp_context_free(g.ctx);
}

/* A product of w with the batch, another of `far` with other data, and a product of the first with a matrix of
 * the batch. An input of 70,000 makes Inf in its cast alone: with the small numbers that it meets, the products
 * are at most 4,480. The events name the input that overflowed: the cast falls back, and what reads it does not. */
enum { FIRST_TOWER, SECOND_TOWER, SECOND_FACTOR, OVERFLOWING };
static void casts_of_the_batch(int which, const char *name) {
    const int64_t sx[2] = { 8, 16 }, sw[2] = { 4, 16 };
    static float x[OVERFLOWING][8 * 16];
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_tensor *w = mixp_param(ctx, "w", MIXP_F32, 2, sw), *far = mixp_param(ctx, "far", MIXP_F32, 2, sw);
    mixp_tensor *a, *b = NULL, *y, *loss = NULL;
    mixp_optimizer *opt = mixp_optimizer_new(ctx, NULL);
    mixp_scaler_desc one;
    mixp_guard_desc d;
    mixp_site_info s;
    mixp_event e;
    memset(&d, 0, sizeof d);
    memset(&one, 0, sizeof one);
    one.init_scale = 1;
    mixp_scaler *scaler = mixp_scaler_new(ctx, &one);
    d.every = 1;
    for (int k = 0; k < OVERFLOWING; k++)
        for (int i = 0; i < 8 * 16; i++) x[k][i] = k == which ? 70000.0f : 1.0f;
    mixp_fill(w, 0.001);
    mixp_fill(far, 0.001);
    mixp_optimizer_add(opt, w, NULL);
    mixp_optimizer_add(opt, far, NULL);
    CHECK_INT(mixp_guard_start(ctx, &d), MIXP_OK);
    for (int i = 0; i < 3; i++) {
        mixp_step_begin(ctx);
        mixp_zero_grad(opt);
        MIXP_AUTOCAST(ctx, MIXP_F16) {
            a = mixp_linear(ctx, mixp_input(ctx, MIXP_F32, 2, sx, x[FIRST_TOWER]), w, NULL);
            MIXP_SCOPE(ctx, "tower")
                b = mixp_linear(ctx, mixp_input(ctx, MIXP_F32, 2, sx, x[SECOND_TOWER]), far, NULL);
            y = mixp_matmul(ctx, a, mixp_input(ctx, MIXP_F32, 2, sw, x[SECOND_FACTOR]), 0, 0);
            loss = mixp_add(ctx, mixp_mean(ctx, mixp_cast(ctx, mixp_add(ctx, a, b), MIXP_F32), MIXP_ALL, 0),
                            mixp_mean(ctx, mixp_cast(ctx, y, MIXP_F32), MIXP_ALL, 0));
        }
        mixp_backward(ctx, mixp_scaler_scale(scaler, loss));
        mixp_scaler_step(scaler, opt);
        mixp_scaler_update(scaler);
        CHECK_INT(mixp_scaler_verdict(scaler).outcome, i ? MIXP_STEP_APPLIED : MIXP_STEP_SKIPPED);
    }
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    CHECK_INT(events_of(ctx, MIXP_EVENT_SKIP, &e), 1);
    CHECK_INT(e.origin, MIXP_ORIGIN_FORWARD);
    CHECK_TEXT(e.site, name);
    CHECK_INT(events_of(ctx, MIXP_EVENT_OVERFLOW, &e), 1);
    CHECK(strcmp(e.site, name) == 0);
    for (int i = 0; mixp_site(ctx, i, &s); i++) CHECK_INT(s.fallen, strcmp(s.name, name) == 0);
    mixp_context_free(ctx);
}

static void test_cast_of_the_batch(void) {
    casts_of_the_batch(SECOND_TOWER, "tower.far: cast of input 0 of linear");
    casts_of_the_batch(SECOND_FACTOR, "w: cast of input 1 of matmul");
}

/* Attention to values of the batch, of which one input holds 70,000 and the mask -Inf, as it should. The skip
 * names the cast of the values, and does not say that the batch holds Inf. */
static void test_cast_beside_a_mask(void) {
    const int64_t sq[3] = { 1, 4, 8 }, sw[2] = { 8, 8 }, sm[2] = { 4, 4 };
    static float x[4 * 8], v[4 * 8], mask[4 * 4];
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_tensor *w = mixp_param(ctx, "w", MIXP_F32, 2, sw), *y, *loss = NULL;
    mixp_optimizer *opt = mixp_optimizer_new(ctx, NULL);
    mixp_scaler *scaler = mixp_scaler_new(ctx, NULL);
    mixp_attention_desc a;
    mixp_event e;
    memset(&a, 0, sizeof a);
    a.heads = 1;
    for (int i = 0; i < 4 * 8; i++) x[i] = (float)(i % 5) - 2;
    for (int i = 0; i < 4 * 8; i++) v[i] = i == 3 ? 70000.0f : 1.0f;
    for (int i = 0; i < 4 * 4; i++) mask[i] = i % 4 > i / 4 ? mixp_f32_of_bits(0xFF800000u) : 0;
    mixp_fill(w, 0.01);
    mixp_optimizer_add(opt, w, NULL);
    CHECK_INT(mixp_guard_start(ctx, NULL), MIXP_OK);
    mixp_step_begin(ctx);
    MIXP_AUTOCAST(ctx, MIXP_F16) {
        y = mixp_linear(ctx, mixp_input(ctx, MIXP_F32, 3, sq, x), w, NULL);
        a.mask = mixp_input(ctx, MIXP_F32, 2, sm, mask);
        y = mixp_attention_apply(ctx, y, mixp_input(ctx, MIXP_F32, 3, sq, x),
                                 mixp_input(ctx, MIXP_F32, 3, sq, v), &a);
        loss = mixp_mean(ctx, mixp_scale(ctx, mixp_cast(ctx, y, MIXP_F32), 1e-4f), MIXP_ALL, 0);
    }
    mixp_backward(ctx, mixp_scaler_scale(scaler, loss));
    mixp_scaler_step(scaler, opt);
    mixp_scaler_update(scaler);
    CHECK_INT(mixp_scaler_verdict(scaler).outcome, MIXP_STEP_SKIPPED);
    CHECK_INT(mixp_scaler_verdict(scaler).origin, MIXP_ORIGIN_FORWARD);
    CHECK_TEXT(mixp_scaler_verdict(scaler).site, "w: cast of input 2 of attention");
    CHECK_INT(events_of(ctx, MIXP_EVENT_OVERFLOW, &e), 1);
    CHECK_TEXT(e.site, "w: cast of input 2 of attention");
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    mixp_context_free(ctx);
}

/* A weight that is not trained is no batch: its cast has its name. */
static void test_cast_of_a_frozen_weight(void) {
    const int64_t sx[2] = { 8, 16 }, sw[2] = { 4, 16 };
    static float x[8 * 16];
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_tensor *w = mixp_param(ctx, "base.w", MIXP_F32, 2, sw), *y = NULL;
    mixp_event e;
    for (int i = 0; i < 8 * 16; i++) x[i] = 0.001f;
    mixp_fill(w, 70000.0);
    mixp_tensor_set_requires_grad(w, 0);
    CHECK_INT(mixp_guard_start(ctx, NULL), MIXP_OK);
    for (int i = 0; i < 2; i++) {
        mixp_step_begin(ctx);
        MIXP_AUTOCAST(ctx, MIXP_F16) {
            y = mixp_linear(ctx, mixp_input(ctx, MIXP_F32, 2, sx, x), w, NULL);
        }
    }
    CHECK(y != NULL);
    CHECK_INT(events_of(ctx, MIXP_EVENT_OVERFLOW, &e), 1);
    CHECK_TEXT(e.site, "base.w: cast");
    CHECK(strstr(e.site, "input") == NULL);
    mixp_context_free(ctx);
}

static void test_bad_input(void) {
    gpt g = gpt_open(1e-3);
    MIXP_AUTOCAST(g.ctx, MIXP_F16) {
        refuse(g.ctx, mixp_guard_start(g.ctx, NULL), MIXP_ERR_ORDER, "region");
        refuse(g.ctx, mixp_guard_pin(g.ctx, "h*", MIXP_F32), MIXP_ERR_ORDER, "region");
        refuse(g.ctx, mixp_guard_stop(g.ctx), MIXP_ERR_ORDER, "region");
    }
    CHECK_INT(mixp_guard_pin(g.ctx, "nothing.of.the.kind", MIXP_F32), MIXP_OK);
    CHECK_INT(mixp_guard_start(g.ctx, NULL), MIXP_OK);
    gpt_train(&g, MIXP_F16);
    refuse(g.ctx, mixp_context_error(g.ctx, NULL), MIXP_ERR_ARGUMENT, "nothing.of.the.kind");
    CHECK_INT(mixp_scope_open(g.ctx, ""), -1);
    refuse(g.ctx, mixp_context_error(g.ctx, NULL), MIXP_ERR_ARGUMENT, "empty");
    CHECK_INT(mixp_retry(g.scaler, 0), 0);
    refuse(g.ctx, mixp_context_error(g.ctx, NULL), MIXP_ERR_ARGUMENT, "at least 1");
    gpt_close(&g);
}

/* --- sites --- */

static int sites_of(const mixp_context *ctx) {
    mixp_site_info s;
    int n = 0;
    while (mixp_site(ctx, n, &s)) n++;
    return n;
}

/* An operator that comes and goes changes what lies behind it, and nothing before. */
static void test_control_flow(void) {
    gpt g = gpt_open(1e-3);
    mixp_guard_desc d;
    memset(&d, 0, sizeof d);
    d.every = 1;
    CHECK_INT(mixp_guard_start(g.ctx, &d), MIXP_OK);
    gpt_train(&g, MIXP_F16);
    int straight = sites_of(g.ctx);
    g.detour = 1;
    gpt_train(&g, MIXP_F16);
    int both = sites_of(g.ctx);
    CHECK_INT(both - straight, 6);      /* scale, norm, cast, product, loss, its scale */
    for (int i = 0; i < 6; i++) {
        g.detour = i % 3 == 0;
        gpt_train(&g, MIXP_F16);
    }
    CHECK_INT(sites_of(g.ctx), both);
    CHECK_INT(site_named(g.ctx, planted).samples, 8);
    CHECK_INT(site_named(g.ctx, "ln_f.w: layer_norm").samples, 5);
    CHECK_INT(site_named(g.ctx, "ln_f.w: layer_norm #2").samples, 3);
    gpt_close(&g);
}

/* Two micro-batches of one step are the same sites, whether walked back in between or not. */
static void test_two_passes(void) {
    for (int together = 0; together < 2; together++) {
        gpt g = gpt_open(1e-3);
        mixp_tensor *loss[2] = { NULL, NULL };
        CHECK_INT(mixp_guard_start(g.ctx, NULL), MIXP_OK);
        gpt_train(&g, MIXP_F16);
        int sites = sites_of(g.ctx);
        mixp_step_begin(g.ctx);
        mixp_zero_grad(g.opt);
        for (int k = 0; k < 2; k++) {
            next_batch(&g);
            MIXP_AUTOCAST(g.ctx, MIXP_F16) { loss[k] = gpt_loss(&g); }
            if (!together) mixp_backward(g.ctx, mixp_scaler_scale(g.scaler, loss[k]));
        }
        for (int k = 0; together && k < 2; k++)
            mixp_backward(g.ctx, mixp_scaler_scale(g.scaler, loss[k]));
        mixp_scaler_step(g.scaler, g.opt);
        mixp_scaler_update(g.scaler);
        CHECK_INT(sites_of(g.ctx), sites);
        gpt_close(&g);
    }
}

static void test_scopes(void) {
    gpt g = gpt_open(1e-3);
    g.scopes = 1;
    CHECK_INT(mixp_guard_start(g.ctx, NULL), MIXP_OK);
    gpt_train(&g, MIXP_F16);
    CHECK_TEXT(site_named(g.ctx, "h.1: add").op, "add");
    CHECK_TEXT(site_named(g.ctx, "h.1: add #2").op, "add");
    CHECK_TEXT(site_named(g.ctx, "h.2: attention").op, "attention");
    CHECK_TEXT(site_named(g.ctx, planted).op, "linear");
    mixpi_scope_enter(g.ctx, "left");
    refuse(g.ctx, mixp_step_begin(g.ctx), MIXP_ERR_ORDER, "still open");
    gpt_close(&g);
}

static void test_full(void) {
    gpt g = gpt_open(1e-3), free_of = gpt_open(1e-3);
    mixp_guard_desc d;
    mixp_event e;
    memset(&d, 0, sizeof d);
    d.max_sites = 5;
    d.every = 1;
    CHECK_INT(mixp_guard_start(g.ctx, &d), MIXP_OK);
    for (int i = 0; i < 3; i++) {
        double a = gpt_train(&g, MIXP_F16), b = gpt_train(&free_of, MIXP_F16);
        CHECK(memcmp(&a, &b, sizeof a) == 0);
    }
    CHECK_INT(sites_of(g.ctx), 5);
    CHECK_INT(events_of(g.ctx, MIXP_EVENT_FULL, &e), 1);
    d.max_sites = 6;
    refuse(g.ctx, mixp_guard_start(g.ctx, &d), MIXP_ERR_ARGUMENT, "max_sites");
    gpt_close(&g);
    gpt_close(&free_of);
}

/* --- what it costs to have it, and not to use it --- */

static void test_memory(void) {
    gpt off = gpt_open(1e-3), on = gpt_open(1e-3);
    mixp_guard_desc d;
    memset(&d, 0, sizeof d);
    d.every = 2;
    for (int i = 0; i < 3; i++) gpt_train(&off, MIXP_F16);
    for (int i = 0; i < 3; i++) gpt_train(&on, MIXP_F16);
    CHECK_INT(mixp_context_memory(off.ctx).allocations, mixp_context_memory(on.ctx).allocations);
    CHECK_INT(mixp_guard_start(on.ctx, &d), MIXP_OK);
    gpt_train(&on, MIXP_F16);
    int64_t before = mixp_context_memory(on.ctx).allocations;
    for (int i = 0; i < 6; i++) gpt_train(&on, MIXP_F16);
    CHECK_INT(mixp_context_memory(on.ctx).allocations, before);
    CHECK_INT(mixp_guard_stop(on.ctx), MIXP_OK);
    gpt_close(&off);
    gpt_close(&on);
}

/* --- where a skip began --- */

/* y = x w, of a batch of floats; what comes behind it, and its loss. */
typedef struct small {
    mixp_context   *ctx;
    mixp_scaler    *scaler;
    mixp_optimizer *opt;
    mixp_tensor    *w;
    float           x[8];
    int             bad_loss;
} small;

static small small_open(float scale, float value) {
    static const int64_t shape[2] = { 2, 4 };
    mixp_scaler_desc d;
    mixp_optimizer_desc sgd = mixp_sgd_defaults();
    small m;
    memset(&m, 0, sizeof m);
    memset(&d, 0, sizeof d);
    d.init_scale = scale;
    m.ctx = mixp_context_new(NULL);
    m.scaler = mixp_scaler_new(m.ctx, &d);
    m.w = mixp_param(m.ctx, "w", MIXP_F32, 2, shape);
    m.opt = mixp_optimizer_new(m.ctx, &sgd);
    mixp_fill(m.w, (double)value);
    mixp_optimizer_add(m.opt, m.w, NULL);
    for (int i = 0; i < 8; i++) m.x[i] = 1.0f;
    CHECK_INT(mixp_guard_start(m.ctx, NULL), MIXP_OK);
    return m;
}

/* The loss is the mean of y^2; or the root of minus that, which is no number. */
static mixp_verdict small_step(small *m) {
    static const int64_t shape[2] = { 2, 4 };
    mixp_tensor *loss = NULL, *y;
    mixp_step_begin(m->ctx);
    mixp_zero_grad(m->opt);
    MIXP_AUTOCAST(m->ctx, MIXP_F16) {
        y = mixp_linear(m->ctx, mixp_input(m->ctx, MIXP_F32, 2, shape, m->x), m->w, NULL);
        loss = mixp_mean(m->ctx, mixp_mul(m->ctx, y, y), MIXP_ALL, 0);
        if (m->bad_loss) loss = mixp_sqrt(m->ctx, mixp_scale(m->ctx, loss, -1.0f));
    }
    mixp_backward(m->ctx, mixp_scaler_scale(m->scaler, loss));
    mixp_scaler_step(m->scaler, m->opt);
    mixp_scaler_update(m->scaler);
    return mixp_scaler_verdict(m->scaler);
}

static void test_origins(void) {
    small m = small_open(1024.0f, 1.0f);
    mixp_verdict v = small_step(&m);
    CHECK_INT(v.outcome, MIXP_STEP_APPLIED);
    CHECK_INT(v.origin, MIXP_ORIGIN_NONE);
    m.x[5] = mixp_f32_of_bits(0x7F800000u);             /* not sampled: nobody knows yet */
    v = small_step(&m);
    CHECK_INT(v.outcome, MIXP_STEP_SKIPPED);
    CHECK_INT(v.origin, MIXP_ORIGIN_NO_GUARD);
    CHECK_INT(mixp_retry(m.scaler, 2), 1);
    v = small_step(&m);
    CHECK_INT(v.origin, MIXP_ORIGIN_INPUT);
    CHECK_INT(mixp_retry(m.scaler, 2), 0);              /* it stays what it is */
    CHECK_NEAR(mixp_scaler_loss_scale(m.scaler), 512.0, 0);
    m.x[5] = 1.0f;
    CHECK_INT(small_step(&m).outcome, MIXP_STEP_APPLIED);
    m.bad_loss = 1;
    small_step(&m);
    v = small_step(&m);
    CHECK_INT(v.origin, MIXP_ORIGIN_LOSS);
    CHECK_TEXT(v.site, "sqrt");
    CHECK_NEAR(mixp_scaler_loss_scale(m.scaler), 256.0, 0);     /* one skip in a row is forgiven */
    CHECK_INT(mixp_context_error(m.ctx, NULL), MIXP_OK);
    m.bad_loss = 0;
    CHECK_INT(small_step(&m).outcome, MIXP_STEP_APPLIED);
    mixp_fill(m.w, (double)mixp_f32_of_bits(0x7FC00000u));
    small_step(&m);
    v = small_step(&m);
    CHECK_INT(v.origin, MIXP_ORIGIN_WEIGHT);
    CHECK_TEXT(v.site, "w: linear");
    refuse(m.ctx, mixp_context_error(m.ctx, NULL), MIXP_ERR_DIVERGED, "a weight or a buffer is not finite");
    CHECK_NEAR(mixp_scaler_loss_scale(m.scaler), 128.0, 0);
    mixp_context_free(m.ctx);

    m = small_open(16777216.0f, 1.0f);                  /* the mean is f16 */
    v = small_step(&m);
    CHECK_INT(v.origin, MIXP_ORIGIN_BACKWARD);
    CHECK_TEXT(v.site, "w: mean");
    CHECK_NEAR(mixp_scaler_loss_scale(m.scaler), 8388608.0, 0);
    mixp_context_free(m.ctx);
}

/* A loss of f16, 1,000,000, is not finite because f16 is too small: it is no finite activation's division
 * or logarithm. */
static void test_origin_of_a_loss(void) {
    static const int64_t shape[2] = { 2, 4 };
    small m = small_open(1024.0f, 1.0f);
    mixp_tensor *loss = NULL, *x;
    mixp_event e;
    mixp_step_begin(m.ctx);
    MIXP_AUTOCAST(m.ctx, MIXP_F16) {
        x = mixp_input(m.ctx, MIXP_F32, 2, shape, m.x);
        loss = mixp_scale(m.ctx, mixp_mean(m.ctx, mixp_linear(m.ctx, x, m.w, NULL), MIXP_ALL, 0), 250000);
    }
    mixp_backward(m.ctx, mixp_scaler_scale(m.scaler, loss));
    mixp_scaler_step(m.scaler, m.opt);
    mixp_scaler_update(m.scaler);
    mixp_verdict v = mixp_scaler_verdict(m.scaler);
    CHECK_INT(v.outcome, MIXP_STEP_SKIPPED);
    CHECK_INT(v.origin, MIXP_ORIGIN_FORWARD);
    CHECK_TEXT(v.site, "w: scale");
    CHECK_INT(events_of(m.ctx, MIXP_EVENT_SKIP, &e), 1);
    CHECK_INT(e.origin, MIXP_ORIGIN_FORWARD);
    CHECK_INT(mixp_context_error(m.ctx, NULL), MIXP_OK);
    mixp_context_free(m.ctx);
}

/* Adds 3e38, times the scale, to w's gradient. */
static void back_from_3e38(mixp_scaler *scaler, mixp_tensor *w) {
    mixp_tensor *sum = mixp_sum(w->ctx, w, MIXP_ALL, 0);
    mixp_backward(w->ctx, mixp_scaler_scale(scaler, mixp_scale(w->ctx, sum, 3e38f)));
}

/* Only when they are divided by a scale far below 1 do these gradients pass the range of f32. */
static void test_unscale_origin(void) {
    static const int64_t one[1] = { 1 };
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_optimizer_desc sgd = mixp_sgd_defaults();
    mixp_scaler_desc d;
    memset(&d, 0, sizeof d);
    d.init_scale = 1.0f / 1024.0f;
    mixp_scaler *scaler = mixp_scaler_new(ctx, &d);
    sgd.lr = 0.0;
    mixp_tensor *w = mixp_param(ctx, "w", MIXP_F32, 1, one);
    mixp_optimizer *opt = mixp_optimizer_new(ctx, &sgd);
    mixp_fill(w, 1.0);
    mixp_optimizer_add(opt, w, NULL);
    CHECK_INT(mixp_guard_start(ctx, NULL), MIXP_OK);
    mixp_step_begin(ctx);
    back_from_3e38(scaler, w);
    mixp_scaler_step(scaler, opt);
    mixp_scaler_update(scaler);
    mixp_verdict v = mixp_scaler_verdict(scaler);
    CHECK_INT(v.outcome, MIXP_STEP_APPLIED);            /* 3e38 is a number still */
    mixp_step_begin(ctx);
    mixp_zero_grad(opt);
    back_from_3e38(scaler, w);
    back_from_3e38(scaler, w);
    mixp_scaler_step(scaler, opt);
    mixp_scaler_update(scaler);
    CHECK_INT(mixp_scaler_verdict(scaler).outcome, MIXP_STEP_SKIPPED);
    CHECK_INT(mixp_retry(scaler, 1), 1);
    mixp_step_begin(ctx);
    mixp_zero_grad(opt);
    back_from_3e38(scaler, w);
    back_from_3e38(scaler, w);
    mixp_scaler_step(scaler, opt);
    mixp_scaler_update(scaler);
    v = mixp_scaler_verdict(scaler);
    CHECK_INT(v.outcome, MIXP_STEP_SKIPPED);
    CHECK_INT(v.origin, MIXP_ORIGIN_UNSCALE);
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    mixp_context_free(ctx);
}

/* --- attention logits that grow --- */

/* q of the middle block grows until it passes 65504 itself, k shrinks, but less: the logits grow.
 * The product stores f32 then, and attention reads it as it is. */
static void grow_logits(gpt *g) {
    float w[3 * WIDTH * WIDTH];
    mixp_read(g->w[1][QKV], w, MIXP_F32, 3 * WIDTH * WIDTH);
    for (int i = 0; i < 2 * WIDTH * WIDTH; i++) w[i] *= i < WIDTH * WIDTH ? 1.5f : 0.69f;
    mixp_write(g->w[1][QKV], w, MIXP_F32, 3 * WIDTH * WIDTH);
}

static void test_growing_logits(void) {
    gpt f32 = gpt_open(0.0), low = gpt_open(0.0);     /* nothing else moves the weights */
    mixp_guard_desc d;
    mixp_site_info s;
    double worst = 0.0;
    memset(&d, 0, sizeof d);
    d.every = 2;
    CHECK_INT(mixp_guard_start(low.ctx, &d), MIXP_OK);
    for (int i = 0; i < 40; i++) {
        if (i < 30) grow_logits(&f32);
        if (i < 30) grow_logits(&low);
        double off = fabs(gpt_train(&f32, MIXP_F32) - gpt_train(&low, MIXP_F16));
        if (!(off <= worst)) worst = off;
    }
    show(low.ctx);
    for (int i = 0; mixp_site(low.ctx, i, &s); i++)         /* no operator casts the result back */
        CHECK(strcmp(s.op, "cast") != 0 || !strstr(s.name, "qkv"));
    s = site_named(low.ctx, "h.1.attn.qkv.w: linear");
    CHECK(s.value.largest > 65504.0f);
    CHECK_INT(s.fallen, 1);
    CHECK_INT(mixp_scaler_verdict(low.scaler).outcome, MIXP_STEP_APPLIED);
    CHECK(worst <= 0.01);
    if (worst > 0.01) printf("  logits: worst %g\n", worst);
    gpt_close(&f32);
    gpt_close(&low);
}

/* --- trying again --- */

/* Dropout draws what it drew, so the forward pass of a retry is that of the first try. */
static void test_retry(void) {
    gpt g = gpt_open(1e-3), plain = gpt_open(1e-3);
    int i, tries = 0;
    double first, loss;
    g.dropout = plain.dropout = 0.2;
    mixp_scaler_update_to(g.scaler, 1073741824.0f);
    next_batch(&g);
    next_batch(&plain);
    first = loss = gpt_step(&g, MIXP_F16);
    uint64_t step = mixp_context_steps(g.ctx);
    while (mixp_retry(g.scaler, 30)) {
        loss = gpt_step(&g, MIXP_F16);
        CHECK_INT(mixp_context_steps(g.ctx), step);
        CHECK(memcmp(&first, &loss, sizeof first) == 0);
        tries++;
    }
    CHECK(tries > 5);
    mixp_scaler_update_to(plain.scaler, mixp_scaler_loss_scale(g.scaler));
    loss = gpt_step(&plain, MIXP_F16);
    CHECK(memcmp(&first, &loss, sizeof first) == 0);
    for (i = 0; i < 5; i++) {           /* and goes on as if there had been no skip */
        double a = gpt_train(&g, MIXP_F16), b = gpt_train(&plain, MIXP_F16);
        CHECK(memcmp(&a, &b, sizeof a) == 0);
    }
    mixp_scaler_update_to(g.scaler, 1e30f);
    next_batch(&g);
    tries = 0;
    do {
        gpt_step(&g, MIXP_F16);
        tries++;
    } while (mixp_retry(g.scaler, 3));
    CHECK_INT(tries, 4);
    gpt_close(&g);
    gpt_close(&plain);
}

/* --- resumed, to the bit --- */

static char path[64];           /* of the checkpoint: this process's own */

static mixp_result checkpoint(gpt *g, int save) {
    mixp_checkpoint what;
    memset(&what, 0, sizeof what);
    what.ctx = g->ctx;
    what.scaler = g->scaler;
    what.optimizers = &g->opt;
    what.n_optimizers = 1;
    snprintf(path, sizeof path, "/tmp/mixprec_guard_%ld.safetensors", (long)getpid());
    return save ? mixp_checkpoint_save(path, &what) : mixp_checkpoint_load(path, &what);
}

static void test_resume(void) {
    gpt on = gpt_open(1e-3), again = gpt_open(1e-3);
    mixp_guard_desc d;
    mixp_site_info a, b;
    int i, k;
    memset(&d, 0, sizeof d);
    d.every = 3;
    d.clean = 2;
    plant(&on, 66246.0);
    plant(&again, 66246.0);
    CHECK_INT(mixp_guard_start(on.ctx, &d), MIXP_OK);
    CHECK_INT(mixp_guard_start(again.ctx, &d), MIXP_OK);
    for (i = 0; i < 7; i++) gpt_train(&on, MIXP_F16);
    CHECK_INT(checkpoint(&on, 1), MIXP_OK);
    CHECK_INT(checkpoint(&again, 0), MIXP_OK);
    again.batch = on.batch;
    for (i = 0; i < 14; i++) {
        if (i == 3) raise_proj(&on, 0.02f);
        if (i == 3) raise_proj(&again, 0.02f);
        double x = gpt_train(&on, MIXP_F16);
        double y = gpt_train(&again, MIXP_F16);
        CHECK(memcmp(&x, &y, sizeof x) == 0);
        CHECK_INT(site_named(on.ctx, planted).dtype, site_named(again.ctx, planted).dtype);
    }
    CHECK_INT(site_named(on.ctx, planted).fallen, 0);           /* it came back, in both */
    for (k = 0; mixp_site(on.ctx, k, &a) && mixp_site(again.ctx, k, &b); k++) {
        CHECK_TEXT(a.name, b.name);
        CHECK_INT(a.falls, b.falls);
        CHECK_INT(a.clean, b.clean);
    }
    CHECK(k > 40);
    gpt_close(&on);
    gpt_close(&again);
    remove(path);
}

static void gpt_evaluate(gpt *g, int batches) {
    while (batches-- > 0) {
        next_batch(g);
        mixp_step_begin(g->ctx);
        MIXP_NO_GRAD(g->ctx) MIXP_AUTOCAST(g->ctx, MIXP_F16) gpt_loss(g);
    }
}

/* A run saved after an evaluation, which may have taken the sample of its window, samples the steps
 * that it samples without a break. */
static void resumed_after(int steps, int batches) {
    gpt on = gpt_open(1e-3), again = gpt_open(1e-3);
    mixp_guard_desc d;
    mixp_site_info a, b;
    memset(&d, 0, sizeof d);
    d.every = 3;
    CHECK_INT(mixp_guard_start(on.ctx, &d), MIXP_OK);
    CHECK_INT(mixp_guard_start(again.ctx, &d), MIXP_OK);
    for (int i = 0; i < steps; i++) gpt_train(&on, MIXP_F16);
    gpt_evaluate(&on, batches);
    CHECK_INT(checkpoint(&on, 1), MIXP_OK);
    CHECK_INT(checkpoint(&again, 0), MIXP_OK);
    again.batch = on.batch;
    for (int i = 0; i < 8; i++) {
        CHECK_INT(mixp_guard_due(again.ctx), mixp_guard_due(on.ctx));
        if (i == 5) gpt_evaluate(&on, 4);
        if (i == 5) gpt_evaluate(&again, 4);
        gpt_train(&on, MIXP_F16);
        gpt_train(&again, MIXP_F16);
    }
    CHECK_INT(mixp_site(on.ctx, 0, &a) && mixp_site(again.ctx, 0, &b), 1);
    CHECK_INT(a.fallen, b.fallen);
    gpt_close(&on);
    gpt_close(&again);
    remove(path);
}

static void test_resume_after_an_evaluation(void) {
    for (int steps = 0; steps < 6; steps++) {
        resumed_after(steps, 1);
        resumed_after(steps, 2);
        resumed_after(steps, 5);
    }
}

/* What belongs to no saved state: evaluations, a walk without an update, a loss that is repeated. */
static void wander(gpt *g) {
    const float bad = NAN;
    const int64_t one[1] = { 1 };
    mixp_tensor *loss = NULL;
    for (int i = 0; i < 5; i++) gpt_train(g, MIXP_F16);
    gpt_evaluate(g, 3);
    mixp_step_begin(g->ctx);
    MIXP_AUTOCAST(g->ctx, MIXP_F16) { loss = gpt_loss(g); }
    CHECK_INT(mixp_backward(g->ctx, loss), MIXP_OK);
    mixp_zero_grad(g->opt);
    mixp_step_begin(g->ctx);
    mixp_retry_loss(g->ctx, mixp_input(g->ctx, MIXP_F32, 1, one, &bad));
}

/* Four runs go on from one state: the run that saved the state, after an evaluation; a new one; one that
 * saw other steps before; and one that did so twice. All sample the same steps and have the same bits. */
static void test_loads_leave_nothing_behind(void) {
    enum { RUNS = 4 };
    gpt run[RUNS];
    mixp_guard_desc d;
    mixp_event e;
    int64_t number = -1;
    int at, i, k;
    memset(&d, 0, sizeof d);
    d.every = 4;
    for (at = 0; at < 6; at++) {        /* wherever the state was saved */
        for (k = 0; k < RUNS; k++) {
            run[k] = gpt_open(1e-3);
            CHECK_INT(mixp_guard_start(run[k].ctx, &d), MIXP_OK);
        }
        for (i = 0; i < 4 + at; i++) gpt_train(&run[0], MIXP_F16);
        gpt_evaluate(&run[0], 1);
        CHECK_INT(checkpoint(&run[0], 1), MIXP_OK);
        for (k = 1; k < RUNS; k++) {
            for (i = 1; i < k; i++) wander(&run[k]);
            CHECK_INT(checkpoint(&run[k], 0), MIXP_OK);
            run[k].batch = run[0].batch;
        }
        for (i = 0; i < 12; i++)
            for (k = 0; k < RUNS; k++) {
                static double first;
                static int due;
                const double loss = gpt_train(&run[k], MIXP_F16);
                if (!k) first = loss, due = mixp_guard_due(run[0].ctx);
                CHECK(memcmp(&first, &loss, sizeof loss) == 0);
                CHECK_INT(mixp_guard_due(run[k].ctx), due);
            }
        for (k = 0; k < RUNS; k++) gpt_close(&run[k]);
    }
    /* Events are numbered on; a pattern may be given before the next step has named the sites. */
    run[0] = gpt_open(1e-3);
    plant(&run[0], 66246.0);
    CHECK_INT(mixp_guard_start(run[0].ctx, &d), MIXP_OK);
    for (i = 0; i < 8; i++) gpt_train(&run[0], MIXP_F16);
    for (i = 0; mixp_guard_event(run[0].ctx, i, &e); i++) number = e.number;
    CHECK(i > 0);
    CHECK_INT(checkpoint(&run[0], 1), MIXP_OK);
    CHECK_INT(checkpoint(&run[0], 0), MIXP_OK);
    CHECK_INT(mixp_guard_event(run[0].ctx, 0, &e), 0);
    CHECK_INT(mixp_guard_pin(run[0].ctx, "h.0.*", MIXP_F32), MIXP_OK);
    for (i = 0; i < 8; i++) gpt_train(&run[0], MIXP_F16);
    CHECK_INT(mixp_guard_event(run[0].ctx, 0, &e), 1);
    CHECK_INT(e.number, number + 1);
    CHECK_INT(e.kind, MIXP_EVENT_PINNED);
    gpt_close(&run[0]);
    remove(path);
}

/* --- underflow: a scale of 1, forgotten --- */

static double whispered(gpt *g, mixp_dtype dtype) {
    mixp_tensor *loss = NULL;
    next_batch(g);
    mixp_step_begin(g->ctx);
    mixp_zero_grad(g->opt);
    MIXP_AUTOCAST(g->ctx, dtype) { loss = gpt_loss(g); }
    mixp_backward(g->ctx, mixp_scale(g->ctx, loss, 1e-6f));
    mixp_optimizer_step(g->opt);
    double value = mixp_item(loss);
    return value;
}

static void test_underflow(void) {
    gpt f32 = gpt_open(3e-3), low = gpt_open(3e-3), bare = gpt_open(3e-3);
    mixp_guard_desc d;
    mixp_event e;
    double a = 0, b = 0, c = 0;
    memset(&d, 0, sizeof d);
    d.every = 1;
    CHECK_INT(mixp_guard_start(low.ctx, &d), MIXP_OK);
    for (int i = 0; i < 250; i++) {
        const double part = i < 220 ? 0.0 : 1.0 / 30.0;
        a += part * whispered(&f32, MIXP_F32);
        b += part * whispered(&low, MIXP_F16);
        c += part * whispered(&bare, MIXP_F16);
    }
    show(low.ctx);
    CHECK(events_of(low.ctx, MIXP_EVENT_FLUSHED, &e) > 0);
    if (getenv("SHOW")) printf("  f32 %g, guarded %g, bare %g\n", a, b, c);
    CHECK(fabs(a - b) < 0.01);
    CHECK(fabs(a - c) > 0.02);
    gpt_close(&f32);
    gpt_close(&low);
    gpt_close(&bare);
}

/* --- comparing --- */

static mixp_tensor *loss_again(mixp_context *ctx, void *user) {
    (void)ctx;
    return gpt_loss((gpt *)user);
}

static void test_compare(void) {
    static float low[BATCH * TIME * WIDTH], full[BATCH * TIME * WIDTH];
    static mixp_difference rows[200];
    gpt g = gpt_open(1e-3);
    mixp_compare_desc d;
    double off = 0, norm = 0, largest = 0, ab = 0, aa = 0;
    int64_t n, i, at = -1;
    memset(&d, 0, sizeof d);
    d.a.dtype = MIXP_F16;
    d.a.level = 1;
    d.fn = loss_again;
    d.user = &g;
    d.scale = 64.0f;
    gpt_train(&g, MIXP_F16);
    uint64_t step = mixp_context_steps(g.ctx);
    CHECK_INT(mixp_compare(g.ctx, &d, rows, 200, &n), MIXP_OK);
    CHECK_INT(mixp_context_steps(g.ctx), step);
    CHECK_INT(n, 37);           /* operators of a forward pass; casts are in one run only */
    for (i = 1; i < n; i++) CHECK(rows[i - 1].added >= rows[i].added);
    for (i = 0; i < n; i++)
        if (strcmp(rows[i].site, planted) == 0) at = i;
    mixp_step_begin(g.ctx);
    MIXP_AUTOCAST(g.ctx, MIXP_F16) { (void)gpt_loss(&g); }
    mixp_read(g.proj, low, MIXP_F32, BATCH * TIME * WIDTH);
    mixp_step_begin(g.ctx);
    (void)gpt_loss(&g);
    mixp_read(g.proj, full, MIXP_F32, BATCH * TIME * WIDTH);
    for (i = 0; i < BATCH * TIME * WIDTH; i++) {
        double x = (double)low[i], y = (double)full[i];
        off += (x - y) * (x - y);
        norm += y * y;
        aa += x * x;
        ab += x * y;
        largest = fabs(x - y) > largest ? fabs(x - y) : largest;
    }
    CHECK(at >= 0);
    if (at < 0) return;
    CHECK_NEAR(rows[at].relative, sqrt(off / norm), 1e-12);
    CHECK_NEAR(rows[at].largest, largest, 0);
    CHECK_NEAR(rows[at].cosine, ab / sqrt(aa * norm), 1e-12);
    CHECK_INT(rows[at].dtype_a, MIXP_F16);
    CHECK_INT(rows[at].dtype_b, MIXP_F32);
    CHECK_INT(rows[at].has_grad, 1);
    CHECK(rows[at].grad_relative > 0.0 && rows[at].grad_relative < 0.02);
    CHECK(rows[at].grad_cosine > 0.9995);
    d.a = d.b;
    CHECK_INT(mixp_compare(g.ctx, &d, rows, 2, &n), MIXP_OK);
    CHECK_INT(n, 37);
    CHECK_NEAR(rows[0].relative, 0, 0);
    CHECK_NEAR(rows[0].grad_largest, 0, 0);
    g.dropout = 0.1;
    refuse(g.ctx, mixp_compare(g.ctx, &d, rows, 2, &n), MIXP_ERR_ORDER, "dropout");
    refuse(g.ctx, mixp_compare(g.ctx, &d, rows, 0, &n), MIXP_ERR_ARGUMENT, "room");
    g.dropout = 0.0;
    MIXP_NO_GRAD(g.ctx) {
        refuse(g.ctx, mixp_compare(g.ctx, &d, rows, 2, &n), MIXP_ERR_ORDER, "region");
    }
    gpt_train(&g, MIXP_F16);
    gpt_close(&g);
}

/* A year is rounded by the first scope, which is seen where the second subtracts 2000. */
static mixp_tensor *years_apart(mixp_context *ctx, void *w) {
    static const int64_t shape[2] = { 32, 2 }, one[2] = { 1, 1 };
    const float base = 2000;
    mixp_tensor *h = NULL;
    float x[64];
    for (int i = 0; i < 64; i++) x[i] = 2000.0f + (float)(i * 7 % 32) / 16.0f;
    MIXP_SCOPE(ctx, "cause") { h = mixp_scale(ctx, mixp_input(ctx, MIXP_F32, 2, shape, x), 1.0f); }
    MIXP_SCOPE(ctx, "symptom") { h = mixp_sub(ctx, h, mixp_input(ctx, MIXP_F32, 2, one, &base)); }
    MIXP_SCOPE(ctx, "later") { h = mixp_linear(ctx, h, (mixp_tensor *)w, NULL); }
    return mixp_mean(ctx, h, MIXP_ALL, 0);
}

/* In 1024 to 2048 f16 is spaced by 1, so that the expected error is that of whole numbers. */
static void test_compare_names_the_cause(void) {
    static const int64_t shape[2] = { 2, 2 };
    mixp_difference rows[8];
    mixp_compare_desc d;
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_tensor *w = mixp_param(ctx, "w", MIXP_F32, 2, shape);
    double off = 0, all = 0, mean[2][2] = { { 0 } };
    int64_t n;
    memset(&d, 0, sizeof d);
    mixp_fill(w, 1);
    d.a.dtype = MIXP_F16;
    d.a.level = 2;
    d.fn = years_apart;
    d.user = w;
    CHECK_INT(mixp_compare(ctx, &d, rows, 8, &n), MIXP_OK);
    for (int turn = 0; turn < 2; turn++)
        for (int i = 0; i < 64; i++) {
            const double x = (double)(i * 7 % 32) / 16.0, e = nearbyint(x) - x;     /* ties to even */
            if (!turn) mean[0][i % 2] += x / 32, mean[1][i % 2] += e / 32;
            else all += (x - mean[0][i % 2]) * (x - mean[0][i % 2]), off += (e - mean[1][i % 2]) * (e - mean[1][i % 2]);
        }
    CHECK(n >= 3);
    CHECK_TEXT(rows[0].site, "cause");
    CHECK_NEAR(rows[0].varied, sqrt(off / all), 1e-9);
    CHECK_NEAR(rows[0].added, rows[0].varied, 0);
    for (int i = 1; i < (int)n; i++) CHECK(rows[i].added < 0.5 * rows[0].added);
    for (int i = 1; i < (int)n; i++)
        if (strstr(rows[i].site, "symptom")) CHECK(rows[i].relative > 100 * rows[0].relative);
    mixp_context_free(ctx);
}

/* The sum of w, four times over: its gradient is 4. */
static mixp_tensor *four_times(mixp_context *ctx, void *w)
{ return mixp_scale(ctx, mixp_sum(ctx, (mixp_tensor *)w, MIXP_ALL, 0), 4.0f); }

/* Gradients that mixp_ranks_hold kept back are forgotten like all others, and a comparison keeps
 * none of its own. */
static void test_compare_forgets(void) {
    static const int64_t shape[1] = { 6 };
    static mixp_difference rows[8];
    mixp_ranks_desc ranks;
    mixp_context_desc desc;
    mixp_compare_desc d;
    float g[6];
    int64_t n;
    memset(&ranks, 0, sizeof ranks);
    memset(&desc, 0, sizeof desc);
    memset(&d, 0, sizeof d);
    ranks.size = ranks.apart = 1;
    desc.ranks = &ranks;
    mixp_context *ctx = mixp_context_new(&desc);
    mixp_tensor *w = mixp_param(ctx, "w", MIXP_F32, 1, shape);
    d.a.dtype = MIXP_F16;
    d.a.level = 1;
    d.fn = four_times;
    d.user = w;
    mixp_ranks_hold(ctx, 1);
    mixp_step_begin(ctx);
    CHECK_INT(mixp_backward(ctx, four_times(ctx, w)), MIXP_OK);
    CHECK_INT(mixp_compare(ctx, &d, rows, 8, &n), MIXP_OK);
    mixp_ranks_hold(ctx, 0);
    mixp_step_begin(ctx);
    CHECK_INT(mixp_backward(ctx, four_times(ctx, w)), MIXP_OK);
    CHECK_INT(mixp_read(w->grad, g, MIXP_F32, 6), MIXP_OK);
    CHECK_NEAR(g[5], 4.0, 0);
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    mixp_context_free(ctx);
}

/* "mixprec.guard.acted" of the file at path; -1: it has none. */
static int acted_in_file(void) {
    mixp_safetensors *f = NULL;
    int32_t acted = -1;
    CHECK_INT(mixp_safetensors_read(path, &f, NULL, 0), MIXP_OK);
    const mixp_st_entry *e = mixp_safetensors_find(f, "mixprec.guard.acted");
    if (e) memcpy(&acted, e->data, sizeof acted);
    mixp_safetensors_free(f);
    return (int)acted;
}

/* Writes that file anew, and 1 there. */
static void act_in_file(void) {
    static const char *const metadata[1][2] = { { "mixprec", "1" } };
    static const int32_t one = 1;
    static mixp_st_entry e[256];
    mixp_safetensors *f = NULL;
    int64_t i, n;
    CHECK_INT(mixp_safetensors_read(path, &f, NULL, 0), MIXP_OK);
    n = mixp_safetensors_count(f);
    CHECK(n <= 256);
    for (i = 0; i < n && i < 256; i++) {
        e[i] = *mixp_safetensors_at(f, i);
        if (strcmp(e[i].name, "mixprec.guard.acted") == 0) e[i].data = &one;
    }
    CHECK_INT(mixp_safetensors_write(path, e, i, metadata, 1, NULL, 0), MIXP_OK);
    mixp_safetensors_free(f);
}

/* A site fell back for its gradient just before the save: the next skip knows it, resumed or not. */
static void test_what_was_done_is_saved(void) {
    gpt g = gpt_open(1e-3);
    CHECK_INT(mixp_guard_start(g.ctx, NULL), MIXP_OK);
    gpt_train(&g, MIXP_F16);
    CHECK_INT(checkpoint(&g, 1), MIXP_OK);
    CHECK_INT(acted_in_file(), 0);
    act_in_file();
    CHECK_INT(checkpoint(&g, 0), MIXP_OK);
    CHECK_INT(checkpoint(&g, 1), MIXP_OK);
    CHECK_INT(acted_in_file(), 1);
    remove(path);
    gpt_close(&g);
}

int main(void) {
    RUN(test_look);
    RUN(test_look_at);
    RUN(test_growth);
    RUN(test_relapse);
    RUN(test_pins);
    RUN(test_pinned_low);
    RUN(test_pinned_cast);
    RUN(test_cast_of_the_batch);
    RUN(test_cast_beside_a_mask);
    RUN(test_cast_of_a_frozen_weight);
    RUN(test_bad_input);
    RUN(test_control_flow);
    RUN(test_two_passes);
    RUN(test_scopes);
    RUN(test_full);
    RUN(test_memory);
    RUN(test_origins);
    RUN(test_origin_of_a_loss);
    RUN(test_unscale_origin);
    RUN(test_growing_logits);
    RUN(test_retry);
    RUN(test_resume);
    RUN(test_resume_after_an_evaluation);
    RUN(test_loads_leave_nothing_behind);
    RUN(test_underflow);
    RUN(test_compare);
    RUN(test_compare_names_the_cause);
    RUN(test_compare_forgets);
    RUN(test_what_was_done_is_saved);
    RUN(test_planted_overflow);
    RUN(test_off_and_on_are_equal);
    return test_report();
}
