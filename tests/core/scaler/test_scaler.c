/* test_scaler.c - the scaler: its rules compared with plain models, its stages, its errors.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include "test.h"
#include "new_optimizer.h"
#include "numbers.h"

/* --- the rule alone ----------------------------------------------------------------- */

static mixp_scaler_rule rule_of(mixp_scaler_desc d) {
    mixp_scaler_rule r;
    memset(&r, 0, sizeof r);
    CHECK_INT(mixp_scaler_rule_resolve(&d, &r), MIXP_OK);
    return r;
}

static mixp_scaler_state begin(const mixp_scaler_rule *r) {
    mixp_scaler_state s;
    memset(&s, 0, sizeof s);
    s.scale = r->init_scale;
    s.hysteresis_left = r->hysteresis;
    return s;
}

static mixp_scaler_desc desc_zero(void) {
    mixp_scaler_desc d;
    memset(&d, 0, sizeof d);
    return d;
}

static void test_torch_defaults(void) {
    mixp_scaler_rule r;
    CHECK_INT(mixp_scaler_rule_resolve(NULL, &r), MIXP_OK);
    CHECK(r.init_scale == 65536.0f && r.growth_factor == 2.0 && r.backoff_factor == 0.5);
    CHECK_INT(r.growth_interval, 2000);
    CHECK_INT(mixp_scaler_rule_resolve(NULL, NULL), MIXP_ERR_ARGUMENT);
}

/* s=4 g=2 b=.25 n=2: clean, clean, overflow -> (4,1) (8,0) (2,0). */
static void test_torch_table(void) {
    static const struct { int bad; float scale; int tracker; } want[] = {
        { 0, 4.0f, 1 }, { 0, 8.0f, 0 }, { 1, 2.0f, 0 }, { 0, 2.0f, 1 }, { 1, 0.5f, 0 },
        { 0, 0.5f, 1 }, { 0, 1.0f, 0 }, { 0, 1.0f, 1 }, { 0, 2.0f, 0 }
    };
    mixp_scaler_desc d = desc_zero();
    d.init_scale = 4.0f;
    d.backoff_factor = 0.25;
    d.growth_interval = 2;
    mixp_scaler_rule r = rule_of(d);
    mixp_scaler_state s = begin(&r);
    for (size_t i = 0; i < sizeof want / sizeof *want; i++) {
        mixpi_scaler_advance(&s, &r, want[i].bad);
        CHECK(s.scale == want[i].scale);
        CHECK_INT(s.growth_tracker, want[i].tracker);
    }
    CHECK_INT(s.updates, 9);
    CHECK_INT(s.skips, 2);
}

/* s=128 n=1, one skip in 4 updates at any position: 128 * 8 / 2. */
static void test_torch_one_skip(void) {
    mixp_scaler_desc d = desc_zero();
    d.init_scale = 128.0f;
    d.growth_interval = 1;
    mixp_scaler_rule r = rule_of(d);
    for (int at = 0; at < 4; at++) {
        mixp_scaler_state s = begin(&r);
        for (int i = 0; i < 4; i++) mixpi_scaler_advance(&s, &r, i == at);
        CHECK(s.scale == 512.0f);
    }
}

/* s=1e38 g=16 n=1: growth is not finite, so the scale stays and the tracker restarts. */
static void test_growth_leaves_range(void) {
    mixp_scaler_desc d = desc_zero();
    d.growth_factor = 16.0;
    d.growth_interval = 1;
    mixp_scaler_rule r = rule_of(d);
    mixp_scaler_state s = begin(&r);
    s.scale = 1e38f;
    mixpi_scaler_advance(&s, &r, 0);
    CHECK(s.scale == 1e38f);
    CHECK_INT(s.growth_tracker, 0);
    d.growth_factor = 2.0;
    r = rule_of(d);
    s = begin(&r);
    { int i; for (i = 0; i < 400; i++) mixpi_scaler_advance(&s, &r, 0); }
    CHECK(s.scale == ldexpf(1.0f, 126));
    CHECK(mixpi_scaler_inverse(s.scale) == ldexpf(1.0f, -126));
}

/* PyTorch's scale reaches 0 after 166 overflows; this one keeps a normal reciprocal. */
static void test_backoff_stops(void) {
    mixp_scaler_rule r = rule_of(desc_zero());
    mixp_scaler_state s = begin(&r);
    for (int i = 1; i <= 400; i++) {
        mixpi_scaler_advance(&s, &r, 1);
        CHECK(s.scale == ldexpf(1.0f, i < 142 ? 16 - i : -126));
        CHECK_INT(s.floor_skips, i <= 142 ? 0 : i - 142);
    }
    CHECK(mixpi_scaler_inverse(s.scale) == ldexpf(1.0f, 126));
    mixpi_scaler_advance(&s, &r, 0);
    CHECK_INT(s.floor_skips, 0);
}

static void test_interval_below_tracker(void) {
    mixp_scaler_desc d = desc_zero();
    mixp_scaler_rule r = rule_of(d);
    mixp_scaler_state s = begin(&r);
    for (int i = 0; i < 8; i++) mixpi_scaler_advance(&s, &r, 0);
    CHECK_INT(s.growth_tracker, 8);
    d.growth_interval = 5;
    r = rule_of(d);
    mixpi_scaler_advance(&s, &r, 0);
    CHECK(s.scale == 131072.0f);
    CHECK_INT(s.growth_tracker, 0);
    s.growth_tracker = INT32_MAX;
    mixpi_scaler_advance(&s, &r, 0);
    CHECK_INT(s.growth_tracker, 0);
}

/* The product is taken in double and rounded once more to float: with these factors a float
 * product differs now and then, so both are counted. */
static void test_product_bits(void) {
    mixp_scaler_desc d = desc_zero();
    int i, differs = 0;
    d.growth_factor = 1.1;
    d.backoff_factor = 0.7;
    d.growth_interval = 1;
    mixp_scaler_rule r = rule_of(d);
    for (i = 0; i < 20000; i++) {
        float start = bits_f32(0x30000000u + random_bits() % 0x30000000u);
        volatile double g = 1.1, b = 0.7;
        volatile float up = (float)((double)start * g), down = (float)((double)start * b);
        mixp_scaler_state s = begin(&r);
        s.scale = start;
        mixpi_scaler_advance(&s, &r, 0);
        CHECK(s.scale == up);
        s.scale = start;
        mixpi_scaler_advance(&s, &r, 1);
        CHECK(s.scale == down);
        differs += up != start * 1.1f || down != start * 0.7f;
    }
    CHECK(differs > 100);
    CHECK(mixpi_scaler_inverse(3.0f) == (float)(1.0 / 3.0));
}

/* --- other systems' rules, each as a little model in its own words ------------------ */

typedef struct model { double scale; int good, bad, last, iter, h; } model;
typedef void (*model_step)(model *m, int inf, int window);

static double at_least(double x, double floor) { return x < floor ? floor : x; }
static double at_most(double x, double ceiling) { return x > ceiling ? ceiling : x; }

static void model_apex(model *m, int inf, int window) {
    if (inf) { m->scale /= 2; m->good = 0; } else m->good++;
    if (m->good == window) { m->scale = at_most(m->scale * 2, 16777216.0); m->good = 0; }
}

static void model_apex_hysteresis(model *m, int inf, int window)   /* hysteresis 2 */
{
    if (inf && --m->h > 0) { m->good = 0; return; }
    if (inf) { m->scale *= 0.5; m->good = 0; }
    else if (m->good + 1 == window) { m->scale *= 2; m->good = 0; }
    else m->good++;
    if (!inf) m->h = 2;
}

/* DeepSpeed from 0.17.1 on, and its FP16_Optimizer always; delayed_shift 1. */
static void model_deepspeed(model *m, int inf, int window) {
    if (inf) {
        m->scale = at_least(m->scale / 2, 1);
        m->last = m->iter;
    } else {
        int stable_interval = m->iter - m->last - 1;
        if (stable_interval > 0 && stable_interval % window == 0) m->scale *= 2;
    }
    m->iter++;
}

static void model_deepspeed2(model *m, int inf, int window)     /* delayed_shift 2 */
{
    if (inf) {
        if (m->h == 1) m->scale = at_least(m->scale / 2, 1); else m->h--;
        m->last = m->iter;
    } else {
        int stable_interval = m->iter - m->last - 1;
        if (stable_interval > 0 && stable_interval % window == 0) { m->h = 2; m->scale *= 2; }
    }
    m->iter++;
}

/* scale_factor 4, for both directions. */
static void model_deepspeed4(model *m, int inf, int window) {
    if (inf) {
        m->scale = at_least(m->scale / 4, 1);
        m->last = m->iter;
    } else {
        int stable_interval = m->iter - m->last - 1;
        if (stable_interval > 0 && stable_interval % window == 0) m->scale *= 4;
    }
    m->iter++;
}

static void model_megatron(model *m, int inf, int window) {
    if (inf) {
        m->good = 0;
        if (--m->h <= 0) m->scale = at_least(m->scale * 0.5, 1);
    } else if (++m->good == window) { m->good = 0; m->h = 2; m->scale *= 2; }
}

static void model_colossal(model *m, int inf, int window) {
    model_megatron(m, inf, window);
    if (m->scale > 4294967296.0) m->scale = 4294967296.0;
}

static void model_tensorflow(model *m, int inf, int window) {
    if (inf) { m->good = 0; m->scale = at_least(m->scale / 2, 1); }
    else if (m->good + 1 >= window) { m->good = 0; m->scale *= 2; }
    else m->good++;
}

static void model_keras(model *m, int inf, int window) {
    if (inf) { m->good = 0; m->scale /= 2; }
    else if (m->good == window - 1) { m->good = 0; m->scale *= 2; }
    else m->good++;
}

static void model_paddle(model *m, int inf, int window)         /* decr_every_n 2 */
{
    if (inf) {
        m->good = 0;
        if (++m->bad == 2) { m->scale *= 0.5; m->bad = 0; }
    } else {
        m->bad = 0;
        if (++m->good == window) { m->scale *= 2; m->good = 0; }
    }
}

static void model_jmp(model *m, int inf, int window) {
    if (inf) m->scale = at_least(m->scale / 2, 1);
    else if (m->good == window - 1) m->scale *= 2;
    m->good = inf ? 0 : (m->good + 1) % window;
}

static void model_modulus(model *m, int inf, int window) {
    int interval = m->scale <= 64.0 ? 100 : window;
    if (inf) { m->scale *= 0.5; m->good = 0; }
    else if (++m->good >= interval) { m->scale = at_most(m->scale * 2, 1073741824.0); m->good = 0; }
}

static void model_torch(model *m, int inf, int window) {
    if (inf) { m->scale *= 0.5; m->good = 0; }
    else if (++m->good == window) { m->scale *= 2; m->good = 0; }
}

static void model_static(model *m, int inf, int window) { (void)m; (void)inf; (void)window; }

static void against_model(mixp_scaler_preset rule, int hysteresis, double init, int window, model_step step)
{
    int round, i, k;
    for (round = 0; round < 6; round++) {
        mixp_scaler_desc d = desc_zero();
        model m;
        int own_window = round & 1 ? window : 120;  /* the rule's own, or a short one */
        uint32_t often = (uint32_t)(round < 2 ? 997 : round < 4 ? 150 : 40);
        d.rule = rule;
        d.hysteresis = hysteresis > 1 ? hysteresis : 0;
        d.growth_interval = round & 1 ? 0 : 120;
        mixp_scaler_rule r = rule_of(d);
        CHECK_INT(r.growth_interval, own_window);
        mixp_scaler_state s = begin(&r);
        memset(&m, 0, sizeof m);
        m.scale = init;
        m.h = hysteresis;
        m.last = -1;
        CHECK((double)s.scale == init);
        for (i = 0; i < 30000; i++) {
            int burst = random_bits() % often == 0 ? 1 + (int)(random_bits() % 4) : 0;
            if (m.scale > 1e30) burst = 40;     /* keep both far from the ends of f32 */
            if (m.scale < 1e-20) burst = 0;
            for (k = 0; k < burst; k++) { step(&m, 1, own_window); mixpi_scaler_advance(&s, &r, 1); }
            step(&m, 0, own_window);
            mixpi_scaler_advance(&s, &r, 0);
            if ((double)s.scale != m.scale) break;
        }
        CHECK_INT(i, 30000);
    }
}

static void test_presets(void) {
    against_model(MIXP_RULE_TORCH, 1, 65536, 2000, model_torch);
    against_model(MIXP_RULE_STATIC, 1, 65536, 2000, model_static);
    against_model(MIXP_RULE_APEX, 1, 65536, 2000, model_apex);
    against_model(MIXP_RULE_APEX_HYSTERESIS, 2, 65536, 2000, model_apex_hysteresis);
    against_model(MIXP_RULE_DEEPSPEED, 1, 4294967296.0, 1000, model_deepspeed);
    against_model(MIXP_RULE_DEEPSPEED, 2, 4294967296.0, 1000, model_deepspeed2);
    against_model(MIXP_RULE_MEGATRON, 2, 4294967296.0, 1000, model_megatron);
    against_model(MIXP_RULE_TENSORFLOW, 1, 32768, 2000, model_tensorflow);
    against_model(MIXP_RULE_KERAS, 1, 32768, 2000, model_keras);
    against_model(MIXP_RULE_PADDLE, 2, 65536, 2000, model_paddle);
    against_model(MIXP_RULE_JMP, 1, 32768, 2000, model_jmp);
    against_model(MIXP_RULE_MODULUS, 1, 65536, 2000, model_modulus);
    against_model(MIXP_RULE_COLOSSALAI, 2, 65536, 1000, model_colossal);
}

/* --- factors that are no powers of two: f32 in these systems ------------------------- */

static const float up_f32 = 1.3f, down_f32 = 0.7f;

static double times_f32(double scale, float factor) {
    volatile float product = (float)scale * factor;
    return (double)product;
}
static double over_f32(double scale, float factor) {
    volatile float quotient = (float)scale / factor;
    return (double)quotient;
}

static void f32_megatron(model *m, int inf, int window) {
    if (inf) {
        m->good = 0;
        if (--m->h <= 0) m->scale = at_least(times_f32(m->scale, down_f32), 1);
    } else if (++m->good == window) {
        m->good = 0;
        m->h = 2;
        m->scale = times_f32(m->scale, up_f32);
    }
}

static void f32_colossal(model *m, int inf, int window) {
    f32_megatron(m, inf, window);
    m->scale = at_most(m->scale, 4294967296.0);
}

static void f32_paddle(model *m, int inf, int window) {
    if (inf) {
        m->good = 0;
        if (++m->bad == 2) { m->scale = times_f32(m->scale, down_f32); m->bad = 0; }
    } else {
        m->bad = 0;
        if (++m->good == window) { m->scale = times_f32(m->scale, up_f32); m->good = 0; }
    }
}

static void f32_modulus(model *m, int inf, int window) {
    int interval = m->scale <= 64.0 ? 100 : window;
    if (inf) {
        m->scale = times_f32(m->scale, down_f32);
        m->good = 0;
    } else if (++m->good >= interval) {
        m->scale = at_most(times_f32(m->scale, up_f32), 1073741824.0);
        m->good = 0;
    }
}

static void f32_tensorflow(model *m, int inf, int window) {     /* one multiplier */
    if (inf) { m->good = 0; m->scale = at_least(over_f32(m->scale, up_f32), 1); }
    else if (m->good + 1 >= window) { m->good = 0; m->scale = times_f32(m->scale, up_f32); }
    else m->good++;
}

static void f32_jmp(model *m, int inf, int window) {            /* one factor */
    if (inf) m->scale = at_least(over_f32(m->scale, up_f32), 1);
    else if (m->good == window - 1) m->scale = times_f32(m->scale, up_f32);
    m->good = inf ? 0 : (m->good + 1) % window;
}

/* growth 1.3, and backoff 0.7 where there are two; the scale's bits after each of 30000 updates. */
static void against_factors(mixp_scaler_desc d, int hysteresis, model_step step) {
    model m;
    int i, changes = 0;
    d.growth_interval = 7;
    d.hysteresis = hysteresis > 1 ? hysteresis : 0;
    d.init_scale = 1000.0f;
    mixp_scaler_rule r = rule_of(d);
    mixp_scaler_state s = begin(&r);
    memset(&m, 0, sizeof m);
    m.scale = 1000.0;
    m.h = hysteresis;
    m.last = -1;
    for (i = 0; i < 30000; i++) {
        int inf = (random_bits() % 12 == 0 && m.scale >= 1.0) || m.scale > 1e9;
        double before = m.scale;
        step(&m, inf, 7);
        mixpi_scaler_advance(&s, &r, inf);
        changes += m.scale < before || m.scale > before;
        if ((double)s.scale != m.scale) break;
    }
    CHECK_INT(i, 30000);
    CHECK(changes > 300);
}

static void test_preset_factors(void) {
    mixp_scaler_desc d = desc_zero();
    if (FAST_MATH) SKIP("fast-math multiplies by a reciprocal");
    d.growth_factor = 1.3;
    d.backoff_factor = 0.7;
    d.rule = MIXP_RULE_MEGATRON;
    against_factors(d, 2, f32_megatron);
    d.rule = MIXP_RULE_COLOSSALAI;
    against_factors(d, 2, f32_colossal);
    d.rule = MIXP_RULE_PADDLE;
    against_factors(d, 2, f32_paddle);
    d.rule = MIXP_RULE_MODULUS;
    against_factors(d, 1, f32_modulus);
    d.backoff_factor = 0.0;             /* growth alone is both */
    d.rule = MIXP_RULE_TENSORFLOW;
    against_factors(d, 1, f32_tensorflow);
    d.rule = MIXP_RULE_JMP;
    against_factors(d, 1, f32_jmp);
    d.rule = MIXP_RULE_DEEPSPEED;
    d.growth_factor = 4.0;
    against_factors(d, 1, model_deepspeed4);
}

/* Paddle's kernel of static graphs: never below 1. */
static void static_paddle(model *m, int inf, int window) {
    model_paddle(m, inf, window);
    if (m->scale < 1.0) m->scale = 1.0;
}

static void test_preset_paddle_floors(void) {
    model_step rules[2] = { model_paddle, static_paddle };
    for (int k = 0; k < 2; k++) {
        mixp_scaler_desc d = desc_zero();
        model m;
        d.rule = MIXP_RULE_PADDLE;
        d.hysteresis = 2;
        d.growth_interval = 5;
        d.min_scale = k ? 1.0f : 0.0f;
        mixp_scaler_rule r = rule_of(d);
        mixp_scaler_state s = begin(&r);
        memset(&m, 0, sizeof m);
        m.scale = 65536.0;
        for (int i = 0; i < 200; i++) {
            int inf = i < 80 || random_bits() % 3 == 0;
            rules[k](&m, inf, 5);
            mixpi_scaler_advance(&s, &r, inf);
            CHECK((double)s.scale == m.scale);
            if (i == 79) CHECK_NEAR(m.scale, k ? 1.0 : ldexp(1.0, -24), 0);
        }
    }
}

/* While the scale is low it grows sooner: Modulus' rule, in other numbers. */
static void test_recovery(void) {
    static const mixp_scaler_preset rules[2] = { MIXP_RULE_MODULUS, MIXP_RULE_TORCH };
    for (int k = 0; k < 2; k++) {
        mixp_scaler_desc d = desc_zero();
        d.rule = rules[k];
        d.init_scale = 4.0f;
        d.growth_interval = 10;
        mixp_scaler_rule r = rule_of(d);
        r.recovery_interval = 3;
        r.recovery_scale = 8.0f;
        mixp_scaler_state s = begin(&r);
        for (int i = 1; i <= 26; i++) {     /* 4 -> 8 after 3, 16 after 6, then every 10 */
            mixpi_scaler_advance(&s, &r, 0);
            CHECK_NEAR(s.scale, i < 3 ? 4 : i < 6 ? 8 : i < 16 ? 16 : i < 26 ? 32 : 64, 0);
        }
    }
}

/* Counters stop at their ends, also where a file says that they are there. */
static void test_counters_at_their_ends(void) {
    mixp_scaler_desc d = desc_zero();
    d.rule = MIXP_RULE_DEEPSPEED;
    d.init_scale = 1.0f;
    d.growth_interval = INT32_MAX - 1;
    d.hysteresis = INT32_MAX;
    mixp_scaler_rule r = rule_of(d);
    mixp_scaler_state s = begin(&r);
    s.floor_skips = s.hysteresis_left = INT32_MAX;
    mixpi_scaler_advance(&s, &r, 1);
    CHECK_INT(s.floor_skips, INT32_MAX);
    CHECK_INT(s.hysteresis_left, INT32_MAX - 1);
    s.growth_tracker = INT32_MAX;
    mixpi_scaler_advance(&s, &r, 0);
    CHECK_NEAR(s.scale, 2, 0);
    CHECK_INT(s.growth_tracker, 1);
    d.growth_interval = INT32_MAX;
    CHECK_INT(mixp_scaler_rule_resolve(&d, &r), MIXP_ERR_ARGUMENT);
}

/* --- a scaler at work --------------------------------------------------------------- */

enum { N = 40 };

typedef struct rig {
    mixp_context *ctx;
    mixp_scaler *scaler;
    mixp_optimizer *opt[2];
    float w[2][N], g[2][N];
} rig;

static mixp_optimizer *sgd_over(mixp_context *ctx, const char *name, float *w, float *g) {
    static const int64_t shape[1] = { N };
    mixp_optimizer_desc d = mixp_sgd_defaults();
    d.lr = 1.0;
    mixp_optimizer *opt = mixp_optimizer_new(ctx, &d);
    for (int i = 0; i < N; i++) { w[i] = 1.0f; g[i] = 0.0f; }
    CHECK_INT(mixp_optimizer_add(opt, mixp_view(ctx, name, MIXP_F32, 1, shape, w),
                                 mixp_view(ctx, "grad", MIXP_F32, 1, shape, g)), MIXP_OK);
    return opt;
}

static rig *rig_open(const mixp_scaler_desc *desc) {
    static rig r;
    memset(&r, 0, sizeof r);
    r.ctx = mixp_context_new(NULL);
    r.scaler = mixp_scaler_new(r.ctx, desc);
    CHECK(mixp_scaler_loss_scale(r.scaler) > 0.0f);     /* whoever multiplies by it asks */
    r.opt[0] = sgd_over(r.ctx, "a", r.w[0], r.g[0]);
    r.opt[1] = sgd_over(r.ctx, "b", r.w[1], r.g[1]);
    return &r;
}

static void set(float *x, float value) { int i; for (i = 0; i < N; i++) x[i] = value; }
static int all(const float *x, float value) {
    int i, ok = 1;
    for (i = 0; i < N; i++) ok &= x[i] == value;
    return ok;
}

/* The last error, forgotten so that the next can be seen. */
static const char *take_error(mixp_context *ctx, mixp_result want) {
    static char text[512];
    const char *message;
    CHECK_INT(mixp_context_error(ctx, &message), want);
    snprintf(text, sizeof text, "%s", message);
    mixp_context_clear_error(ctx);
    return text;
}

static mixp_scaler_desc desc_128(void) {
    mixp_scaler_desc d = desc_zero();
    d.init_scale = 128.0f;
    d.growth_interval = 1;
    return d;
}

static void test_step_and_skip(void) {
    mixp_scaler_desc d = desc_128();
    rig *r = rig_open(&d);
    float inf = bits_f32(0x7F800000u), before[N];
    CHECK_INT(mixp_scaler_verdict(r->scaler).outcome, MIXP_STEP_NONE);
    set(r->g[0], 128.0f * 0.25f);
    CHECK_INT(mixp_scaler_step(r->scaler, r->opt[0]), MIXP_OK);
    CHECK_INT(mixp_scaler_update(r->scaler), MIXP_OK);
    CHECK(all(r->w[0], 0.75f));
    CHECK(all(r->g[0], 32.0f));         /* the lean way does not rewrite gradients */
    CHECK(mixp_scaler_loss_scale(r->scaler) == 256.0f);
    mixp_verdict v = mixp_scaler_verdict(r->scaler);
    CHECK_INT(v.outcome, MIXP_STEP_APPLIED);
    CHECK(v.scale == 128.0f && v.largest == 0.25f && v.bad_tensor == NULL);
    CHECK_NEAR(v.grad_norm, 0.25 * sqrt((double)N), 1e-6);

    memcpy(before, r->w[0], sizeof before);
    r->g[0][N - 3] = inf;
    CHECK_INT(mixp_scaler_step(r->scaler, r->opt[0]), MIXP_OK);
    CHECK_INT(mixp_scaler_update(r->scaler), MIXP_OK);
    CHECK(memcmp(before, r->w[0], sizeof before) == 0);
    CHECK(mixp_scaler_loss_scale(r->scaler) == 128.0f);
    v = mixp_scaler_verdict(r->scaler);
    CHECK_INT(v.outcome, MIXP_STEP_SKIPPED);
    CHECK_TEXT(v.bad_tensor, "a");
    CHECK_INT(v.bad_element, N - 3);
    CHECK_INT(v.bad_is_nan, 0);
    CHECK_INT(v.applied, 1);
    CHECK_INT(v.skipped, 1);
    CHECK_INT(v.step, 2);
    mixp_context_free(r->ctx);
}

/* PyTorch's table of misuse. After each the scaler goes on as if nothing had been asked. */
static void test_order_errors(void) {
    rig *r = rig_open(NULL);
    mixp_scaler *other = mixp_scaler_new(r->ctx, NULL);
    mixp_optimizer *empty = new_sgd(r->ctx);
    set(r->g[0], 65536.0f);
    CHECK_INT(mixp_scaler_update(r->scaler), MIXP_ERR_ORDER);
    CHECK_TEXT(take_error(r->ctx, MIXP_ERR_ORDER), "mixp_scaler_step first");
    CHECK_INT(mixp_scaler_step(r->scaler, empty), MIXP_ERR_ORDER);
    CHECK_TEXT(take_error(r->ctx, MIXP_ERR_ORDER), "no parameter was added");
    CHECK_INT(mixp_scaler_unscale(r->scaler, empty), MIXP_ERR_ORDER);
    take_error(r->ctx, MIXP_ERR_ORDER);
    CHECK_INT(mixp_scaler_update(r->scaler), MIXP_ERR_ORDER);   /* failed calls count as none */
    take_error(r->ctx, MIXP_ERR_ORDER);

    CHECK_INT(mixp_scaler_unscale(r->scaler, r->opt[0]), MIXP_OK);
    CHECK(all(r->g[0], 1.0f));
    CHECK_INT(mixp_scaler_unscale(r->scaler, r->opt[0]), MIXP_ERR_ORDER);
    CHECK_TEXT(take_error(r->ctx, MIXP_ERR_ORDER), "mixp_scaler_unscale was called already");
    CHECK(all(r->g[0], 1.0f));
    CHECK_INT(mixp_scaler_unscale(other, r->opt[0]), MIXP_ERR_ORDER);
    CHECK_TEXT(take_error(r->ctx, MIXP_ERR_ORDER), "another scaler");
    CHECK_INT(mixp_scaler_step(other, r->opt[0]), MIXP_ERR_ORDER);
    take_error(r->ctx, MIXP_ERR_ORDER);
    CHECK_INT(mixp_scaler_step(r->scaler, r->opt[0]), MIXP_OK);
    CHECK(all(r->w[0], 0.0f));
    CHECK_INT(mixp_scaler_step(r->scaler, r->opt[0]), MIXP_ERR_ORDER);
    CHECK_TEXT(take_error(r->ctx, MIXP_ERR_ORDER), "mixp_scaler_step was called already");
    CHECK_INT(mixp_scaler_unscale(r->scaler, r->opt[0]), MIXP_ERR_ORDER);
    take_error(r->ctx, MIXP_ERR_ORDER);
    CHECK(all(r->w[0], 0.0f));
    CHECK_INT(mixp_scaler_update(r->scaler), MIXP_OK);
    CHECK_INT(mixp_scaler_update(r->scaler), MIXP_ERR_ORDER);
    take_error(r->ctx, MIXP_ERR_ORDER);
    CHECK_INT(mixp_scaler_step(other, r->opt[0]), MIXP_OK);     /* free again */
    CHECK_INT(mixp_scaler_update(other), MIXP_OK);
    /* Unscaled and then left: update speaks for it and makes it ready. */
    set(r->g[0], bits_f32(0x7FC00000u));
    CHECK_INT(mixp_scaler_unscale(r->scaler, r->opt[0]), MIXP_OK);
    CHECK_INT(mixp_scaler_update(r->scaler), MIXP_OK);
    CHECK(mixp_scaler_loss_scale(r->scaler) == 32768.0f);
    set(r->g[0], 0.0f);
    CHECK_INT(mixp_scaler_step(r->scaler, r->opt[0]), MIXP_OK); /* the old NaN is forgotten */
    CHECK_INT(mixp_scaler_verdict(r->scaler).outcome, MIXP_STEP_APPLIED);
    CHECK_INT(mixp_scaler_update(r->scaler), MIXP_OK);
    CHECK(mixp_scaler_loss_scale(r->scaler) == 32768.0f);
    CHECK_INT(mixp_scaler_step(NULL, r->opt[0]), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_scaler_step(r->scaler, NULL), MIXP_ERR_ARGUMENT);
    mixp_context_free(r->ctx);
}

/* A saved state of a rule of one factor goes on dividing by it, where a product rounds otherwise. */
static void test_one_factor_is_restored(void) {
    mixp_scaler_desc d = desc_zero();
    mixp_scaler_saved saved;
    int i, differs = 0;
    if (FAST_MATH) SKIP("fast-math multiplies by a reciprocal");
    d.rule = MIXP_RULE_TENSORFLOW;
    d.growth_factor = 1.3;
    rig *r = rig_open(&d);
    CHECK_INT(mixp_scaler_save(r->scaler, &saved), MIXP_OK);
    CHECK_INT(mixp_scaler_load(r->scaler, &saved), MIXP_OK);
    for (i = 0; i < 200; i++) {
        float scale = 1000.0f + (float)i;
        double want = over_f32((double)scale, up_f32);
        volatile float product = (float)((double)scale * (1.0 / 1.3));
        CHECK_INT(mixp_scaler_update_to(r->scaler, scale), MIXP_OK);
        r->g[0][0] = bits_f32(0x7FC00000u);
        CHECK_INT(mixp_scaler_step(r->scaler, r->opt[0]), MIXP_OK);
        CHECK_INT(mixp_scaler_update(r->scaler), MIXP_OK);
        CHECK_NEAR(mixp_scaler_loss_scale(r->scaler), want, 0);
        differs += (double)product < want || (double)product > want;
    }
    CHECK(differs > 0);
    mixp_context_free(r->ctx);
}

static void overflow(rig *r) {
    r->g[0][0] = bits_f32(0x7FC00000u);
    CHECK_INT(mixp_scaler_step(r->scaler, r->opt[0]), MIXP_OK);
    CHECK_INT(mixp_scaler_update(r->scaler), MIXP_OK);
}

/* Of three overflows that back off, one was before the saving; the second, after it, is undone. */
static void test_hysteresis_is_restored(void) {
    mixp_scaler_desc d = desc_128();
    mixp_scaler_saved saved;
    d.hysteresis = 3;
    rig *r = rig_open(&d);
    overflow(r);
    CHECK_INT(mixp_scaler_save(r->scaler, &saved), MIXP_OK);
    CHECK_INT(saved.hysteresis_left, 2);
    overflow(r);
    CHECK_INT(mixp_scaler_load(r->scaler, &saved), MIXP_OK);
    overflow(r);
    CHECK(mixp_scaler_loss_scale(r->scaler) == 128.0f);
    overflow(r);
    CHECK(mixp_scaler_loss_scale(r->scaler) == 64.0f);
    mixp_context_free(r->ctx);
}

/* A step whose gradient, multiplied by the loss scale, is `scaled`. */
static float clean_step(rig *r, float scaled) {
    set(r->g[0], scaled);
    CHECK_INT(mixp_scaler_step(r->scaler, r->opt[0]), MIXP_OK);
    CHECK_INT(mixp_scaler_update(r->scaler), MIXP_OK);
    return mixp_scaler_loss_scale(r->scaler);
}

/* A predicting scaler that is saved in its interval goes on as one that is not: what it knows of the
 * gradients is saved too. 16 steps an interval; the gradients shrink. */
static void test_prediction_is_restored(void) {
    mixp_scaler_desc d = desc_zero();
    mixp_scaler_saved saved;
    float want[64];
    d.rule = MIXP_RULE_PREDICTIVE;
    rig *r = rig_open(&d);
    for (int i = 0; i < 5; i++) clean_step(r, 8.0f);
    CHECK_INT(mixp_scaler_save(r->scaler, &saved), MIXP_OK);
    for (int i = 0; i < 64; i++) want[i] = clean_step(r, 0.001f);
    CHECK(want[0] < want[31] && want[31] < want[63]);
    mixp_context_free(r->ctx);
    r = rig_open(&d);
    CHECK_INT(mixp_scaler_load(r->scaler, &saved), MIXP_OK);
    for (int i = 0; i < 64; i++) CHECK_NEAR(clean_step(r, 0.001f), want[i], 0);
    mixp_context_free(r->ctx);
}

/* Two optimizers, one overflows in one iteration of four: each decides alone, one backoff. */
static void test_two_optimizers(void) {
    mixp_scaler_desc d = desc_128();
    rig *r = rig_open(&d);
    for (int explicit0 = 0; explicit0 < 2; explicit0++) {
        CHECK_INT(mixp_scaler_update_to(r->scaler, 128.0f), MIXP_OK);
        set(r->w[0], 1.0f);
        set(r->w[1], 1.0f);
        for (int k = 0; k < 4; k++) {
            float scale = mixp_scaler_loss_scale(r->scaler);
            set(r->g[0], scale * 0.125f);
            set(r->g[1], scale * 0.125f);
            if (k == 2) r->g[1][5] = bits_f32(0xFF800000u);
            if (explicit0) CHECK_INT(mixp_scaler_unscale(r->scaler, r->opt[0]), MIXP_OK);
            CHECK_INT(mixp_scaler_step(r->scaler, r->opt[0]), MIXP_OK);
            CHECK_INT(mixp_scaler_step(r->scaler, r->opt[1]), MIXP_OK);
            CHECK_INT(mixp_scaler_update(r->scaler), MIXP_OK);
            CHECK_INT(mixp_optimizer_verdict(r->opt[0]).outcome, MIXP_STEP_APPLIED);
            CHECK_INT(mixp_scaler_verdict(r->scaler).outcome,
                      k == 2 ? MIXP_STEP_SKIPPED : MIXP_STEP_APPLIED);
            if (k == 2) CHECK_TEXT(mixp_scaler_verdict(r->scaler).bad_tensor, "b");
        }
        CHECK(mixp_scaler_loss_scale(r->scaler) == 512.0f);
        CHECK(all(r->w[0], 0.5f));
        CHECK(all(r->w[1], 0.625f));
    }
    /* Both overflow: still one backoff, both skip. */
    set(r->g[0], bits_f32(0x7F800000u));
    set(r->g[1], bits_f32(0x7F800000u));
    CHECK_INT(mixp_scaler_step(r->scaler, r->opt[0]), MIXP_OK);
    CHECK_INT(mixp_scaler_step(r->scaler, r->opt[1]), MIXP_OK);
    CHECK_INT(mixp_scaler_update(r->scaler), MIXP_OK);
    CHECK(mixp_scaler_loss_scale(r->scaler) == 256.0f);
    CHECK(all(r->w[0], 0.5f) && all(r->w[1], 0.625f));
    mixp_context_free(r->ctx);
}

/* Two of four batches accumulate, a step every second: 128 -> 512. */
static void test_accumulation(void) {
    mixp_scaler_desc d = desc_128();
    rig *r = rig_open(&d);
    for (int batch = 0; batch < 4; batch++) {
        float scale = mixp_scaler_loss_scale(r->scaler);
        for (int i = 0; i < N; i++) r->g[0][i] += scale * 0.0625f;
        if (batch % 2 == 0) continue;
        CHECK_INT(mixp_scaler_step(r->scaler, r->opt[0]), MIXP_OK);
        CHECK_INT(mixp_scaler_update(r->scaler), MIXP_OK);
        CHECK_INT(mixp_zero_grad(r->opt[0]), MIXP_OK);
        CHECK(all(r->g[0], 0.0f));
    }
    CHECK(mixp_scaler_loss_scale(r->scaler) == 512.0f);
    CHECK(all(r->w[0], 0.75f));
    mixp_context_free(r->ctx);
}

static void test_disabled(void) {
    mixp_scaler_desc d = desc_128();
    mixp_scaler_saved saved;
    d.disabled = 1;
    rig *r = rig_open(&d);
    CHECK(mixp_scaler_loss_scale(r->scaler) == 1.0f);
    set(r->g[0], 0.5f);
    CHECK_INT(mixp_scaler_unscale(r->scaler, r->opt[0]), MIXP_OK);
    CHECK_INT(mixp_scaler_unscale(r->scaler, r->opt[0]), MIXP_OK);
    CHECK(all(r->g[0], 0.5f));
    CHECK_INT(mixp_scaler_step(r->scaler, r->opt[0]), MIXP_OK);
    CHECK_INT(mixp_scaler_step(r->scaler, r->opt[0]), MIXP_OK);
    CHECK(all(r->w[0], 0.0f));
    CHECK_INT(mixp_scaler_update(r->scaler), MIXP_OK);
    CHECK_INT(mixp_scaler_update_to(r->scaler, 4.0f), MIXP_OK);
    CHECK(mixp_scaler_loss_scale(r->scaler) == 1.0f);
    CHECK_INT(mixp_scaler_save(r->scaler, &saved), MIXP_OK);
    CHECK(saved.scale == 0.0f && saved.growth_factor == 0.0);
    CHECK_INT(mixp_scaler_load(r->scaler, &saved), MIXP_OK);
    set(r->g[0], bits_f32(0x7F800000u));        /* applied all the same, as in PyTorch */
    CHECK_INT(mixp_scaler_step(r->scaler, r->opt[0]), MIXP_OK);
    CHECK_INT(mixp_optimizer_verdict(r->opt[0]).outcome, MIXP_STEP_APPLIED);
    { mixp_tensor *loss = mixp_activation(r->ctx, MIXP_F32, 0, NULL);
      CHECK(mixp_scaler_scale(r->scaler, loss) == loss); }
    mixp_context_free(r->ctx);
}

/* (6, 7, .8, 1, tracker 7) loads (3, 4, .5, 2, tracker 0). */
static void test_save_load_change(void) {
    mixp_scaler_desc d = desc_zero(), change = desc_zero();
    mixp_scaler_saved saved, bad;
    d.init_scale = 6.0f;
    d.growth_factor = 7.0;
    d.backoff_factor = 0.8;
    d.growth_interval = 10;
    rig *r = rig_open(&d);
    for (int i = 0; i < 7; i++) {
        CHECK_INT(mixp_scaler_step(r->scaler, r->opt[0]), MIXP_OK);
        CHECK_INT(mixp_scaler_update(r->scaler), MIXP_OK);
    }
    CHECK_INT(mixp_scaler_save(r->scaler, &saved), MIXP_OK);
    CHECK(saved.scale == 6.0f && saved.growth_factor == 7.0 && saved.backoff_factor == 0.8);
    CHECK_INT(saved.growth_interval, 10);
    CHECK_INT(saved.growth_tracker, 7);
    CHECK(saved.largest == 0.0f && saved.peak == 0.0f);     /* this rule does not predict */
    memset(&saved, 0, sizeof saved);
    CHECK_INT(mixp_scaler_load(r->scaler, &saved), MIXP_ERR_ARGUMENT);
    CHECK_TEXT(take_error(r->ctx, MIXP_ERR_ARGUMENT), "disabled");
    saved.scale = 3.0f;
    saved.growth_factor = 4.0;
    saved.backoff_factor = 0.5;
    saved.growth_interval = 2;
    for (int i = 0; i < 5; i++) {
        bad = saved;
        if (i == 0) bad.scale = bits_f32(0x7FC00000u);
        if (i == 1) bad.growth_factor = 0.5;
        if (i == 2) bad.growth_interval = -3;
        if (i == 3) bad.growth_tracker = -1;
        if (i == 4) bad.hysteresis_left = -1;
        CHECK_INT(mixp_scaler_load(r->scaler, &bad), MIXP_ERR_ARGUMENT);
        take_error(r->ctx, MIXP_ERR_ARGUMENT);
        CHECK(mixp_scaler_loss_scale(r->scaler) == 6.0f);    /* as it was */
    }
    CHECK_INT(mixp_scaler_load(r->scaler, &saved), MIXP_OK);
    CHECK(mixp_scaler_loss_scale(r->scaler) == 3.0f);
    for (int i = 0; i < 2; i++) {
        CHECK_INT(mixp_scaler_step(r->scaler, r->opt[0]), MIXP_OK);
        CHECK_INT(mixp_scaler_update(r->scaler), MIXP_OK);
    }
    CHECK(mixp_scaler_loss_scale(r->scaler) == 12.0f);
    change.growth_interval = 1;
    change.growth_factor = 1.5;
    CHECK_INT(mixp_scaler_change(r->scaler, &change), MIXP_OK);
    CHECK_INT(mixp_scaler_step(r->scaler, r->opt[0]), MIXP_OK);
    CHECK_INT(mixp_scaler_update(r->scaler), MIXP_OK);
    CHECK(mixp_scaler_loss_scale(r->scaler) == 18.0f);
    change = desc_zero();
    change.backoff_factor = 2.0;
    CHECK_INT(mixp_scaler_change(r->scaler, &change), MIXP_ERR_ARGUMENT);
    take_error(r->ctx, MIXP_ERR_ARGUMENT);
    change = desc_zero();
    change.max_scale = 20.0f;
    CHECK_INT(mixp_scaler_change(r->scaler, &change), MIXP_OK);
    CHECK_INT(mixp_scaler_step(r->scaler, r->opt[0]), MIXP_OK);
    CHECK_INT(mixp_scaler_update(r->scaler), MIXP_OK);
    CHECK(mixp_scaler_loss_scale(r->scaler) == 20.0f);
    CHECK_INT(mixp_scaler_update_to(r->scaler, 0.0f), MIXP_ERR_ARGUMENT);
    take_error(r->ctx, MIXP_ERR_ARGUMENT);
    /* update_to sets the scale, keeps the tracker, clears stages. */
    change = desc_zero();
    change.growth_interval = 50;
    CHECK_INT(mixp_scaler_change(r->scaler, &change), MIXP_OK);
    CHECK_INT(mixp_scaler_step(r->scaler, r->opt[0]), MIXP_OK);
    CHECK_INT(mixp_scaler_update(r->scaler), MIXP_OK);
    CHECK_INT(mixp_scaler_step(r->scaler, r->opt[0]), MIXP_OK);
    CHECK_INT(mixp_scaler_update_to(r->scaler, 5.0f), MIXP_OK);
    CHECK_INT(mixp_scaler_save(r->scaler, &saved), MIXP_OK);
    CHECK(saved.scale == 5.0f);
    CHECK_INT(saved.growth_tracker, 1);
    CHECK_INT(mixp_scaler_step(r->scaler, r->opt[0]), MIXP_OK);
    mixp_context_free(r->ctx);
}

/* At the floor, 20 skips in a row are no scaling problem, and the message says where to look. */
static void test_diverged(void) {
    mixp_scaler_desc d = desc_zero();
    for (int k = 0; k < 3; k++) {
        d = desc_zero();
        d.min_scale = 16384.0f;
        if (k == 1) { d.rule = MIXP_RULE_STATIC; d.max_floor_skips = 3; d.min_scale = 0.0f; }
        if (k == 2) d.max_floor_skips = -1;
        rig *r = rig_open(&d);
        r->g[1][7] = bits_f32(0x7FC00000u);
        for (int i = 1; i < 40; i++) {
            int hopeless = (k == 0 && i >= 22) || (k == 1 && i >= 3);
            mixp_result want = hopeless ? MIXP_ERR_DIVERGED : MIXP_OK;
            CHECK_INT(mixp_scaler_step(r->scaler, r->opt[0]), MIXP_OK);
            CHECK_INT(mixp_scaler_step(r->scaler, r->opt[1]), MIXP_OK);
            CHECK_INT(mixp_scaler_update(r->scaler), want);
            if (want == MIXP_OK) continue;
            CHECK_TEXT(take_error(r->ctx, MIXP_ERR_DIVERGED), "NaN of 'b' at element 7");
        }
        mixp_context_free(r->ctx);
    }
}

/* How many skips that takes from 65536: the README's numbers. */
static void test_skips_to_diverge(void) {
    static const int skips[2] = { 162, 36 };
    for (int k = 0; k < 2; k++) {
        mixp_scaler_desc d = desc_zero();
        mixp_result result = MIXP_OK;
        int i = 0;
        d.min_scale = k ? 1.0f : 0.0f;
        rig *r = rig_open(&d);
        r->g[0][0] = bits_f32(0x7FC00000u);
        for (; result == MIXP_OK && i < 1000; i++) {
            mixp_scaler_step(r->scaler, r->opt[0]);
            result = mixp_scaler_update(r->scaler);
        }
        CHECK_INT(i, skips[k]);
        CHECK_TEXT(take_error(r->ctx, MIXP_ERR_DIVERGED), "20 steps in a row");
        mixp_context_free(r->ctx);
    }
}

/* Finite as scaled, infinite as unscaled: PyTorch steps with it, this does not. */
static void test_overflow_by_unscaling(void) {
    mixp_scaler_desc d = desc_zero();
    for (int explicit_unscale = 0; explicit_unscale < 2; explicit_unscale++) {
        d.init_scale = ldexpf(1.0f, -20);
        rig *r = rig_open(&d);
        r->g[0][11] = 1e37f;
        if (explicit_unscale) CHECK_INT(mixp_scaler_unscale(r->scaler, r->opt[0]), MIXP_OK);
        CHECK_INT(mixp_scaler_step(r->scaler, r->opt[0]), MIXP_OK);
        CHECK(all(r->w[0], 1.0f));
        CHECK_INT(mixp_scaler_verdict(r->scaler).outcome, MIXP_STEP_SKIPPED);
        CHECK_INT(mixp_scaler_verdict(r->scaler).bad_element, 11);
        mixp_context_free(r->ctx);
    }
}

/* Gradients that turn bad between unscale and step are caught; those that were bad stay so. */
static void test_changed_after_unscale(void) {
    rig *r = rig_open(NULL);
    CHECK_INT(mixp_scaler_unscale(r->scaler, r->opt[0]), MIXP_OK);
    r->g[0][0] = bits_f32(0x7F800000u);
    CHECK_INT(mixp_scaler_step(r->scaler, r->opt[0]), MIXP_OK);
    CHECK(all(r->w[0], 1.0f));
    CHECK_INT(mixp_scaler_update(r->scaler), MIXP_OK);
    CHECK(mixp_scaler_loss_scale(r->scaler) == 32768.0f);
    CHECK_INT(mixp_scaler_unscale(r->scaler, r->opt[0]), MIXP_OK);
    r->g[0][0] = 0.0f;
    CHECK_INT(mixp_scaler_step(r->scaler, r->opt[0]), MIXP_OK);
    CHECK_INT(mixp_scaler_verdict(r->scaler).outcome, MIXP_STEP_SKIPPED);
    CHECK_INT(mixp_scaler_verdict(r->scaler).bad_element, 0);
    CHECK_INT(mixp_scaler_update(r->scaler), MIXP_OK);
    mixp_context_free(r->ctx);
}

/* 20 x 20 gradients of 4.0 and scale 4: all 1.0, in any mix of dtypes; Inf or NaN at [2,2]. */
static void test_unscale_dtypes(void) {
    static const mixp_dtype dtypes[3] = { MIXP_F32, MIXP_F16, MIXP_BF16 };
    static const int64_t shape[2] = { 20, 20 };
    static float w[2][400], g[2][400], out[400];
    mixp_scaler_desc d = desc_zero();
    int a, b, bad, i, k;
    d.init_scale = 4.0f;
    for (a = 0; a < 3; a++) for (b = 0; b < 3; b++) for (bad = 0; bad < 5; bad++) {
        mixp_context *ctx = mixp_context_new(NULL);
        mixp_scaler *scaler = mixp_scaler_new(ctx, &d);
        mixp_optimizer *opt = mixp_optimizer_new(ctx, NULL);
        mixp_tensor *grad[2];
        for (k = 0; k < 2; k++) {
            grad[k] = mixp_view(ctx, "g", dtypes[k ? b : a], 2, shape, g[k]);
            CHECK_INT(mixp_optimizer_add(opt, mixp_view(ctx, k ? "second" : "first", MIXP_F32, 2,
                                                        shape, w[k]), grad[k]), MIXP_OK);
            for (i = 0; i < 400; i++) out[i] = 4.0f;
            if (bad == 1 + k) out[42] = bits_f32(0xFF800000u);
            if (bad == 3 + k) out[42] = bits_f32(0x7FC00000u);
            CHECK_INT(mixp_write(grad[k], out, MIXP_F32, 400), MIXP_OK);
        }
        CHECK_INT(mixp_scaler_unscale(scaler, opt), MIXP_OK);
        for (k = 0; k < 2 && !bad; k++) {
            CHECK_INT(mixp_read(grad[k], out, MIXP_F32, 400), MIXP_OK);
            for (i = 0; i < 400; i++) CHECK(out[i] == 1.0f);
        }
        CHECK_INT(mixp_scaler_step(scaler, opt), MIXP_OK);
        CHECK_INT(mixp_scaler_verdict(scaler).outcome, bad ? MIXP_STEP_SKIPPED : MIXP_STEP_APPLIED);
        if (bad) {
            CHECK_TEXT(mixp_scaler_verdict(scaler).bad_tensor, bad % 2 ? "first" : "second");
            CHECK_INT(mixp_scaler_verdict(scaler).bad_element, 42);
            CHECK_INT(mixp_scaler_verdict(scaler).bad_is_nan, bad > 2);
        }
        mixp_context_free(ctx);
    }
}

/* --- on the tape -------------------------------------------------------------------- */

static void test_scale_on_tape(void) {
    static const int64_t shape[1] = { 4 };
    static const float values[4] = { 1.0f, -2.0f, 3.0f, 0.5f };
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_scaler_desc d = desc_128();
    mixp_scaler *scaler = mixp_scaler_new(ctx, &d);
    mixp_optimizer *opt = new_sgd(ctx);
    mixp_tensor *w = mixp_param(ctx, "w", MIXP_F32, 1, shape), *loss, *scaled;
    float grad[4];
    CHECK_INT(mixp_write(w, values, MIXP_F32, 4), MIXP_OK);
    CHECK_INT(mixp_optimizer_add(opt, w, NULL), MIXP_OK);
    CHECK_INT(mixp_step_begin(ctx), MIXP_OK);
    loss = mixp_sum(ctx, mixp_mul(ctx, w, w), MIXP_ALL, 0);
    scaled = mixp_scaler_scale(scaler, loss);
    CHECK(scaled && scaled->dtype == MIXP_F32);
    CHECK_NEAR(mixp_item(scaled), 128.0 * 14.25, 0);
    CHECK_INT(mixp_backward(ctx, scaled), MIXP_OK);
    CHECK_INT(mixp_read(w->grad, grad, MIXP_F32, 4), MIXP_OK);
    for (int i = 0; i < 4; i++) CHECK(grad[i] == 256.0f * values[i]);
    /* Scaled gradients may neither be clipped nor stepped without the scaler. */
    CHECK_INT(mixp_clip_grad_norm(opt, 1.0), MIXP_ERR_ORDER);
    CHECK_TEXT(take_error(ctx, MIXP_ERR_ORDER), "mixp_scaler_unscale first");
    CHECK_INT(mixp_optimizer_step(opt), MIXP_ERR_ORDER);
    CHECK_TEXT(take_error(ctx, MIXP_ERR_ORDER), "mixp_scaler_step instead");
    CHECK_INT(mixp_scaler_unscale(scaler, opt), MIXP_OK);
    CHECK_INT(mixp_clip_grad_norm(opt, 1e9), MIXP_OK);
    CHECK_INT(mixp_scaler_step(scaler, opt), MIXP_OK);
    CHECK_INT(mixp_scaler_update(scaler), MIXP_OK);
    CHECK_INT(mixp_clip_grad_norm(opt, 1e9), MIXP_OK);  /* not scaled any more */
    CHECK_INT(mixp_zero_grad(opt), MIXP_OK);
    CHECK(w->grad == NULL);
    CHECK_INT(mixp_scaler_step(scaler, opt), MIXP_ERR_ORDER);
    take_error(ctx, MIXP_ERR_ORDER);
    CHECK(mixp_scaler_scale(scaler, NULL) == NULL);
    mixp_context_free(ctx);
}

/* --- misuse: never a silently wrong step -------------------------------------------------- */

typedef struct misuse {
    mixp_context   *ctx;
    mixp_scaler    *scaler;
    mixp_optimizer *opt;
    mixp_tensor    *w;
} misuse;

/* w = 0, SGD with rate 1: a true step of the loss sum(w) gives -1. */
static misuse misuse_open(void) {
    const int64_t one[1] = { 1 };
    mixp_optimizer_desc d = mixp_sgd_defaults();
    misuse m;
    d.lr = 1.0;
    m.ctx = mixp_context_new(NULL);
    m.scaler = mixp_scaler_new(m.ctx, NULL);
    m.opt = mixp_optimizer_new(m.ctx, &d);
    m.w = mixp_param(m.ctx, "w", MIXP_F32, 1, one);
    CHECK_INT(mixp_optimizer_add(m.opt, m.w, NULL), MIXP_OK);
    return m;
}
static void scaled_backward(misuse *m) {
    mixp_step_begin(m->ctx);
    mixp_backward(m->ctx, mixp_scaler_scale(m->scaler, mixp_sum(m->ctx, m->w, MIXP_ALL, 0)));
}
/* The call said that the order was wrong, and w is as it was. */
static void misuse_close(misuse *m, mixp_result got, double w) {
    const char *why = "";
    CHECK_INT(got, MIXP_ERR_ORDER);
    CHECK_NEAR(mixp_item(m->w), w, 0);
    mixp_context_error(m->ctx, &why);
    CHECK(*why);
    mixp_context_free(m->ctx);
}

static void test_no_wrong_step(void) {
    const int64_t one[1] = { 1 };
    misuse m = misuse_open();
    scaled_backward(&m);
    CHECK_INT(mixp_scaler_step(m.scaler, m.opt), MIXP_OK);
    CHECK_INT(mixp_clip_grad_norm(m.opt, 1.0), MIXP_ERR_ORDER);
    misuse_close(&m, mixp_optimizer_step(m.opt), -1);       /* the gradients are still scaled */

    m = misuse_open();
    scaled_backward(&m);
    CHECK_INT(mixp_scaler_unscale(m.scaler, m.opt), MIXP_OK);
    CHECK_INT(mixp_scaler_update(m.scaler), MIXP_OK);
    misuse_close(&m, mixp_scaler_step(m.scaler, m.opt), 0);     /* would unscale twice */

    m = misuse_open();
    mixp_tensor *late = mixp_param(m.ctx, "late", MIXP_F32, 1, one);
    scaled_backward(&m);
    CHECK_INT(mixp_scaler_unscale(m.scaler, m.opt), MIXP_OK);
    misuse_close(&m, mixp_optimizer_add(m.opt, late, NULL), 0);

    m = misuse_open();                                      /* the loss itself was walked back */
    mixp_step_begin(m.ctx);
    CHECK_INT(mixp_backward(m.ctx, mixp_sum(m.ctx, m.w, MIXP_ALL, 0)), MIXP_OK);
    misuse_close(&m, mixp_scaler_step(m.scaler, m.opt), 0);

    m = misuse_open();                                      /* the scaled loss was forgotten */
    mixp_step_begin(m.ctx);
    mixp_tensor *loss = mixp_sum(m.ctx, m.w, MIXP_ALL, 0);
    CHECK(mixp_scaler_scale(m.scaler, loss) != NULL);
    CHECK_INT(mixp_backward(m.ctx, loss), MIXP_OK);
    misuse_close(&m, mixp_scaler_step(m.scaler, m.opt), 0);

    m = misuse_open();                                      /* gradients cleared late */
    mixp_step_begin(m.ctx);
    loss = mixp_scaler_scale(m.scaler, mixp_sum(m.ctx, m.w, MIXP_ALL, 0));
    CHECK_INT(mixp_zero_grad(m.opt), MIXP_OK);
    CHECK_INT(mixp_backward(m.ctx, loss), MIXP_OK);
    misuse_close(&m, mixp_optimizer_step(m.opt), 0);
}

/* Backward multiplies by the scale of its own time: an update before it does no harm. */
static void test_scale_changed_before_the_walk(void) {
    misuse m = misuse_open();
    mixp_step_begin(m.ctx);
    mixp_tensor *loss = mixp_scaler_scale(m.scaler, mixp_sum(m.ctx, m.w, MIXP_ALL, 0));
    CHECK_INT(mixp_scaler_update_to(m.scaler, 4.0f), MIXP_OK);
    CHECK_INT(mixp_backward(m.ctx, loss), MIXP_OK);
    CHECK_NEAR(mixp_item(m.w->grad), 4, 0);
    CHECK_INT(mixp_scaler_step(m.scaler, m.opt), MIXP_OK);
    CHECK_NEAR(mixp_item(m.w), -1, 0);
    mixp_context_free(m.ctx);
}

/* A static scale is chosen for its finite check alone: a loss need not go through it. */
static void test_static_scale_of_an_unscaled_loss(void) {
    misuse m = misuse_open();
    mixp_scaler_desc d = desc_zero();
    d.rule = MIXP_RULE_STATIC;
    d.init_scale = 1.0f;
    m.scaler = mixp_scaler_new(m.ctx, &d);
    mixp_step_begin(m.ctx);
    CHECK_INT(mixp_backward(m.ctx, mixp_sum(m.ctx, m.w, MIXP_ALL, 0)), MIXP_OK);
    CHECK_INT(mixp_scaler_step(m.scaler, m.opt), MIXP_OK);
    CHECK_NEAR(mixp_item(m.w), -1, 0);
    mixp_context_free(m.ctx);
}

static void test_gradients_changed_after_clipping(void) {
    misuse m = misuse_open();
    const float nan = bits_f32(0x7FC00000u);
    scaled_backward(&m);
    CHECK_INT(mixp_scaler_unscale(m.scaler, m.opt), MIXP_OK);
    CHECK_INT(mixp_clip_grad_norm(m.opt, 1.0), MIXP_OK);
    CHECK_INT(mixp_write(m.w->grad, &nan, MIXP_F32, 1), MIXP_OK);
    CHECK_INT(mixp_scaler_step(m.scaler, m.opt), MIXP_OK);
    CHECK_INT(mixp_optimizer_verdict(m.opt).outcome, MIXP_STEP_SKIPPED);
    CHECK_NEAR(mixp_item(m.w), 0, 0);
    mixp_context_free(m.ctx);
}

/* A loop that unscales, looks, and gives the step up. */
static void test_a_step_given_up(void) {
    misuse m = misuse_open();
    for (int i = 0; i < 3; i++) {
        scaled_backward(&m);
        CHECK_INT(mixp_scaler_unscale(m.scaler, m.opt), MIXP_OK);
        CHECK_INT(mixp_zero_grad(m.opt), MIXP_OK);
    }
    scaled_backward(&m);
    CHECK_INT(mixp_scaler_step(m.scaler, m.opt), MIXP_OK);
    CHECK_INT(mixp_scaler_verdict(m.scaler).outcome, MIXP_STEP_APPLIED);
    CHECK_INT(mixp_scaler_update(m.scaler), MIXP_OK);
    CHECK_NEAR(mixp_item(m.w), -1, 0);
    mixp_context_free(m.ctx);
}

static void test_disabled_checks_contexts(void) {
    misuse a = misuse_open(), b = misuse_open();
    mixp_scaler_desc d = desc_zero();
    d.disabled = 1;
    scaled_backward(&b);
    CHECK_INT(mixp_scaler_step(mixp_scaler_new(a.ctx, &d), b.opt), MIXP_ERR_ARGUMENT);
    CHECK_NEAR(mixp_item(b.w), 0, 0);
    mixp_context_free(a.ctx);
    mixp_context_free(b.ctx);
}

/* A walk back that fails forgets what it touched; a loss is walked once. */
static mixp_result failing_infer(mixp_call *c) { return mixp_call_output(c, MIXP_F32, 0, NULL); }
static mixp_result failing_forward(mixp_call *c) { return mixp_fill(c->out, 1.0); }
static mixp_result failing_backward(mixp_call *c) { (void)c; return MIXP_ERR_DEVICE; }
static void test_failed_backward(void) {
    static const mixp_op op = { "failing", MIXP_CLASS_KEEP, 0, failing_infer, failing_forward,
                                failing_backward, NULL };
    misuse m = misuse_open();
    mixp_step_begin(m.ctx);
    mixp_tensor *h = mixp_scale(m.ctx, m.w, 1.0f);
    mixp_tensor *other = mixp_sum(m.ctx, h, MIXP_ALL, 0);
    mixp_tensor *bad = mixp_apply(m.ctx, &op, 1, &m.w, 1, NULL);
    mixp_tensor *loss = mixp_add(m.ctx, bad, mixp_sum(m.ctx, mixp_scale(m.ctx, h, 1000.0f), MIXP_ALL, 0));
    CHECK_INT(mixp_backward(m.ctx, loss), MIXP_ERR_DEVICE);
    CHECK(m.w->grad == NULL);
    CHECK_INT(mixp_optimizer_step(m.opt), MIXP_ERR_ORDER);
    mixp_context_clear_error(m.ctx);
    CHECK_INT(mixp_backward(m.ctx, other), MIXP_OK);
    CHECK_NEAR(mixp_item(m.w->grad), 1, 0);
    CHECK_INT(mixp_backward(m.ctx, other), MIXP_ERR_ORDER);
    CHECK_NEAR(mixp_item(m.w->grad), 1, 0);
    mixp_context_free(m.ctx);
}

/* --- a guard that sees the gradients --------------------------------------------------- */

/* Updates until one is clean, for gradients up to `gradient` before scaling. Returns the skips. */
static int skips_until_clean(mixp_scaler_state *s, const mixp_scaler_rule *r, double gradient, int seen,
                             int loss_bad) {
    int skips = 0, bad = 1;
    while (bad && skips < 200) {
        const double scaled = gradient * (double)s->scale;
        mixp_look look;
        memset(&look, 0, sizeof look);
        bad = scaled > 65504.0;
        look.count = 100;
        look.nonfinite = bad;
        look.largest = bad ? 60000.0f : (float)scaled;
        s->found_inf = bad;
        s->loss_bad = bad && loss_bad;
        mixpi_scaler_advance_guarded(s, r, 1, 0, seen ? &look : NULL);
        skips += bad;
    }
    return skips;
}

/* The size of an overflow is unknown. Two skips in a row suffice for scales up to 2^16 too large: the
 * second goes far below, and the clean step returns to where backoffs one by one would have led, with the
 * largest gradient at most half of f16's largest number. */
static void test_two_skips_find_the_scale(void) {
    const mixp_scaler_rule r = rule_of(desc_zero());
    for (int needed = 0; needed <= 15; needed++) {
        const double gradient = ldexp(0.9, needed);     /* 65536 >> needed is the first that fits */
        mixp_scaler_state s = begin(&r), unseen = begin(&r);
        double at = 65536.0 / (needed < 2 ? 1 << needed : 4);
        while (needed > 1 && at > 2 && gradient * at > 32752.0) at /= 2;
        CHECK_INT(skips_until_clean(&s, &r, gradient, 1, 0), needed < 2 ? needed : 2);
        CHECK_NEAR(s.scale, at, 0);
        CHECK_INT(skips_until_clean(&unseen, &r, gradient, 0, 0), needed);
        CHECK_NEAR(unseen.scale, ldexp(65536.0, -needed), 0);
        CHECK(!(s.ahead > 0.0f) && !(unseen.ahead > 0.0f));
    }
}

/* Not below 2; not for a loss that overflowed; not under a constant scale; not beyond the rule's floor. */
static void test_limits_of_the_second_skip(void) {
    const mixp_scaler_rule torch = rule_of(desc_zero());
    mixp_scaler_desc d = desc_zero();
    mixp_scaler_state s = begin(&torch);
    CHECK_INT(skips_until_clean(&s, &torch, 65504.0, 1, 0), 3);     /* 32768; 2; 1 */
    CHECK_NEAR(s.scale, 1, 0);
    s = begin(&torch);
    CHECK_INT(skips_until_clean(&s, &torch, 512.0, 1, 1), 11);      /* one is forgiven; 64 fits */
    d.min_scale = 1024.0f;
    mixp_scaler_rule r = rule_of(d);
    s = begin(&r);
    CHECK_INT(skips_until_clean(&s, &r, 60.0, 1, 0), 2);
    CHECK_NEAR(s.scale, 1024, 0);
    d = desc_zero();
    d.rule = MIXP_RULE_STATIC;
    r = rule_of(d);
    s = begin(&r);
    CHECK_INT(skips_until_clean(&s, &r, 60.0, 1, 0), 200);
    CHECK_NEAR(s.scale, 65536, 0);
}

/* A clean step that was not seen leaves the low scale; the next that is seen returns. */
static void test_an_unseen_clean_step_waits(void) {
    const mixp_scaler_rule r = rule_of(desc_zero());
    mixp_scaler_state s = begin(&r);
    mixp_look look;
    memset(&look, 0, sizeof look);
    look.count = look.nonfinite = 1;
    s.found_inf = 1;
    mixpi_scaler_advance_guarded(&s, &r, 1, 0, &look);
    s.found_inf = 1;
    mixpi_scaler_advance_guarded(&s, &r, 1, 0, &look);
    CHECK_NEAR(s.scale, 2, 0);
    CHECK_NEAR(s.ahead, 16384, 0);
    mixpi_scaler_advance_guarded(&s, &r, 1, 0, NULL);
    CHECK_NEAR(s.scale, 2, 0);
    look.nonfinite = 0;
    look.largest = 8.0f;                /* 4 before scaling: 8192 times 4 is above half of 65504 */
    mixpi_scaler_advance_guarded(&s, &r, 1, 0, &look);
    CHECK_NEAR(s.scale, 4096, 0);
    CHECK(!(s.ahead > 0.0f));
}

int main(void) {
    RUN(test_torch_defaults);
    RUN(test_two_skips_find_the_scale);
    RUN(test_limits_of_the_second_skip);
    RUN(test_an_unseen_clean_step_waits);
    RUN(test_torch_table);
    RUN(test_torch_one_skip);
    RUN(test_growth_leaves_range);
    RUN(test_backoff_stops);
    RUN(test_interval_below_tracker);
    RUN(test_product_bits);
    RUN(test_presets);
    RUN(test_preset_factors);
    RUN(test_preset_paddle_floors);
    RUN(test_recovery);
    RUN(test_counters_at_their_ends);
    RUN(test_step_and_skip);
    RUN(test_order_errors);
    RUN(test_one_factor_is_restored);
    RUN(test_hysteresis_is_restored);
    RUN(test_prediction_is_restored);
    RUN(test_two_optimizers);
    RUN(test_accumulation);
    RUN(test_disabled);
    RUN(test_save_load_change);
    RUN(test_diverged);
    RUN(test_skips_to_diverge);
    RUN(test_overflow_by_unscaling);
    RUN(test_changed_after_unscale);
    RUN(test_unscale_dtypes);
    RUN(test_scale_on_tape);
    RUN(test_no_wrong_step);
    RUN(test_scale_changed_before_the_walk);
    RUN(test_static_scale_of_an_unscaled_loss);
    RUN(test_gradients_changed_after_clipping);
    RUN(test_a_step_given_up);
    RUN(test_disabled_checks_contexts);
    RUN(test_failed_backward);
    return test_report();
}
