/* test_guard.c - a guard: what it looks at, what falls back and comes back, where a skip began.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * A small GPT learns which token follows which. One token is planted: for it a hidden unit of the
 * middle block fires, and the second product of that block passes the largest f16.
 */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include "test.h"

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
    mixp_tensor *t;
    shape[0] = rows;
    shape[1] = cols;
    t = mixp_param(g->ctx, name, MIXP_F32, cols ? 2 : 1, shape);
    if (cols) mixp_init_normal(t, 0.0, std);
    else mixp_fill(t, 1.0);
    mixp_optimizer_add(g->opt, t, NULL);
    return t;
}

static const mixp_device *device_of_tests;

static gpt gpt_open(double lr) {
    mixp_context_desc c;
    mixp_adamw_desc adam = mixp_adamw_defaults();
    mixp_scaler_desc rule;
    gpt g;
    int l, k;
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
    g.opt = mixp_adamw_new(g.ctx, &adam);
    g.wte = weight(&g, "wte", VOCAB, WIDTH, 0.5);
    g.wpe = weight(&g, "wpe", TIME, WIDTH, 0.1);
    for (l = 0; l < LAYERS; l++)
        for (k = 0; k < WEIGHTS; k++) {
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
    int i;
    for (i = 0; i < BATCH * TIME; i++) {
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
    mixp_tensor *x, *ids, *targets;
    int l;
    for (l = 0; l < TIME; l++) place[l] = l;
    ids = mixp_input(ctx, MIXP_I32, 2, shape, g->in);
    targets = mixp_input(ctx, MIXP_I32, 2, shape, g->out);
    x = mixp_add(ctx, mixp_embedding(ctx, g->wte, ids),
                 mixp_embedding(ctx, g->wpe, mixp_input(ctx, MIXP_I32, 1, places, place)));
    for (l = 0; l < LAYERS; l++) {
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
    double value;
    mixp_step_begin(g->ctx);
    mixp_zero_grad(g->opt);
    MIXP_AUTOCAST(g->ctx, dtype) { loss = gpt_loss(g); }
    mixp_backward(g->ctx, mixp_scaler_scale(g->scaler, loss));
    mixp_scaler_step(g->scaler, g->opt);
    value = mixp_item(loss);
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

/* Nothing but the embedding of tokens writes to channel 0 of t: its first row, or its first column. */
static void spare_channel(mixp_tensor *t, int column) {
    float w[HIDDEN * WIDTH];
    int64_t cols = t->shape[1], i, n = column ? t->shape[0] : cols;
    mixp_read(t, w, MIXP_F32, t->count);
    for (i = 0; i < n; i++) w[column ? i * cols : i] = 0.0f;
    mixp_write(t, w, MIXP_F32, t->count);
}

/* Makes the middle block's second product `height` large, for token 0: its hidden unit 0 reads the
 * embedding's channel 0, in which that token stands alone, and channel 1 of the result is its own. */
static void plant(gpt *g, double height) {
    float wte[VOCAB * WIDTH], fc[HIDDEN * WIDTH], proj[WIDTH * HIDDEN], found = 0.0f;
    static float all[BATCH * TIME * WIDTH];
    int i;
    spare_channel(g->wpe, 1);
    spare_channel(g->w[0][OUT], 0);
    spare_channel(g->w[0][PROJ], 0);
    spare_channel(g->w[1][OUT], 0);
    mixp_read(g->wte, wte, MIXP_F32, VOCAB * WIDTH);
    mixp_read(g->w[1][FC], fc, MIXP_F32, HIDDEN * WIDTH);
    mixp_read(g->w[1][PROJ], proj, MIXP_F32, WIDTH * HIDDEN);
    for (i = 0; i < VOCAB; i++) wte[i * WIDTH] = i ? -4.0f : 4.0f;
    for (i = 0; i < WIDTH; i++) fc[i] = i ? 0.0f : 4.0f;
    for (i = 0; i < WIDTH; i++) proj[i * HIDDEN] = 0.0f;
    for (i = 0; i < HIDDEN; i++) proj[HIDDEN + i] = i ? 0.0f : 1.0f;
    mixp_write(g->wte, wte, MIXP_F32, VOCAB * WIDTH);
    mixp_write(g->w[1][FC], fc, MIXP_F32, HIDDEN * WIDTH);
    mixp_write(g->w[1][PROJ], proj, MIXP_F32, WIDTH * HIDDEN);
    next_batch(g);
    g->batch--;
    mixp_step_begin(g->ctx);
    MIXP_AUTOCAST(g->ctx, MIXP_F16) { (void)gpt_loss(g); }
    mixp_read(g->proj, all, MIXP_F32, BATCH * TIME * WIDTH);
    for (i = 0; i < BATCH * TIME; i++)
        if (all[i * WIDTH + 1] > found) found = all[i * WIDTH + 1];
    CHECK(found > 1.0f);
    proj[HIDDEN] = (float)(height / (double)found);
    mixp_write(g->w[1][PROJ], proj, MIXP_F32, WIDTH * HIDDEN);
}

static mixp_site_info site_named(const mixp_context *ctx, const char *name) {
    mixp_site_info s;
    int i;
    memset(&s, 0, sizeof s);
    for (i = 0; mixp_site(ctx, i, &s); i++)
        if (strcmp(s.name, name) == 0) return s;
    memset(&s, 0, sizeof s);
    CHECK(!"such a site");
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
    int i;
    if (!getenv("SHOW")) return;
    for (i = 0; mixp_guard_event(ctx, i, &e); i++)
        printf("  step %lld: %s %s, largest %g, flushed %.3f, non-finite %lld: %s\n",
               (long long)e.step, e.site, e.what, (double)e.largest, e.flushed,
               (long long)e.nonfinite, mixp_origin_text(e.origin));
    for (i = 0; mixp_site(ctx, i, &s); i++)
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

static void test_off_and_on_are_equal(void) {
    int level;
    for (level = 1; level <= 2; level++) {
        gpt off = gpt_open(3e-3), on = gpt_open(3e-3);
        mixp_guard_desc d;
        mixp_event e;
        int i;
        memset(&d, 0, sizeof d);
        d.every = 1;
        off.dropout = on.dropout = 0.1;
        mixp_autocast_set_level(off.ctx, level);
        mixp_autocast_set_level(on.ctx, level);
        CHECK_INT(mixp_guard_start(on.ctx, &d), MIXP_OK);
        for (i = 0; i < 40; i++) {
            double a = gpt_train(&off, MIXP_F16), b = gpt_train(&on, MIXP_F16);
            CHECK(memcmp(&a, &b, sizeof a) == 0);
        }
        CHECK_INT(mixp_guard_event(on.ctx, 0, &e), 0);
        show(on.ctx);
        gpt_close(&off);
        gpt_close(&on);
    }
}

int main(void) {
    RUN(test_planted_overflow);
    RUN(test_off_and_on_are_equal);
    return test_report();
}
