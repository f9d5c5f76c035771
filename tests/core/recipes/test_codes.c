/* test_codes.c - recipes that keep the input of a linear as codes: the codes against the formats'
 * tables in double precision, training with codes beside training without them (bits of gradients
 * and weights, memory), which inputs stay, and refusals. Training without codes is the reference.
 * SPDX-License-Identifier: MIT OR Unlicense */
#include "mixprec.h"
#include "test.h"
#include "new_optimizer.h"
#include "numbers.h"

/* --- the kernel ------------------------------------------------------------------------------ */

enum { ROWS = 256, COLS = 48, COUNT = ROWS * COLS };
typedef struct form { mixp_dtype element; mixp_block_scale scale; int rows; mixp_e8m0_rounding e8m0; } form;
static const form forms[] = {
    { MIXP_F8_E4M3, MIXP_SCALE_TENSOR, 0, MIXP_E8M0_RCEIL },
    { MIXP_F8_E4M3, MIXP_SCALE_POWER, 128, MIXP_E8M0_RCEIL },
    { MIXP_F8_E4M3, MIXP_SCALE_E8M0, 32, MIXP_E8M0_RCEIL },
    { MIXP_F8_E4M3, MIXP_SCALE_E8M0, 32, MIXP_E8M0_FLOOR },
    { MIXP_F8_E4M3, MIXP_SCALE_E8M0, 64, MIXP_E8M0_CEIL },
    { MIXP_F8_E4M3, MIXP_SCALE_E8M0, 16, MIXP_E8M0_EVEN },
    { MIXP_F8_E4M3, MIXP_SCALE_E4M3, 16, MIXP_E8M0_RCEIL },
    { MIXP_F4_E2M1, MIXP_SCALE_E4M3, 16, MIXP_E8M0_RCEIL }
};
enum { FORMS = sizeof forms / sizeof *forms, EDGES = 7 };
static float source[COUNT];
static mixp_bf16 values[COUNT], again[COUNT];
static uint8_t codes[COUNT], scales[COUNT], other[COUNT];

static void fill_source(int edge) {
    random_state = 77;
    for (int i = 0; i < COUNT; i++) {
        source[i] = (float)random_value();
        if (edge == 1) source[i] = (float)ldexp((double)source[i], (int)(random_u64() % 60) - 30);
        if (edge == 2 && i < COUNT / 2) source[i] = i % 2 ? 0.0f : -0.0f;
        if (edge == 3) source[i] *= 1e-38f;                 /* subnormals, and scales at their end */
        if (edge == 4) source[i] *= 1e-41f;
    }
    if (edge == 5) source[COUNT / 3] = 3e38f;               /* overflows bf16 in one block */
    if (edge == 6) {
        source[5] = mixp_f32_of_bits(0x7FC00000u);
        source[COUNT - 7] = mixp_f32_of_bits(0xFF800000u);
    }
}

static mixp_exec one_thread(void) {
    mixp_exec x;
    memset(&x, 0, sizeof x);
    x.threads = 1;
    return x;
}

static mixp_recode_args recode_of(const form *f, uint8_t *to) {
    mixp_recode_args k;
    memset(&k, 0, sizeof k);
    k.rows = ROWS;
    k.cols = COLS;
    k.y = values;
    k.codes = to;
    k.element = f->element;
    k.scale = f->scale;
    k.block_rows = f->rows;
    k.scales = f->rows ? scales : NULL;
    return k;
}

static void *scratch_of(void *user, size_t bytes) {
    static uint32_t room[ROWS];
    (void)user;
    return bytes <= sizeof room ? room : NULL;
}

static void quantise(const form *f, const mixp_device *d) {
    mixp_exec x = one_thread();
    mixp_quantise_args k;
    x.scratch = scratch_of;
    memset(&k, 0, sizeof k);
    k.rows = ROWS;
    k.cols = COLS;
    k.x = mixpi_in(source, MIXP_F32);
    k.y = values;
    k.element = f->element;
    k.scale = f->scale;
    k.e8m0 = f->e8m0;
    k.block_rows = f->rows;
    k.block_cols = f->rows ? 1 : 0;
    k.scales = f->rows ? scales : NULL;
    memset(scales, 0x55, sizeof scales);
    CHECK_INT(d->kernels->quantise(&x, &k), MIXP_OK);
}

static int is_nan(mixp_bf16 v) { return (v.bits & 0x7FFF) > 0x7F80; }
static int is_bad(mixp_bf16 v) { return (v.bits & 0x7FFF) >= 0x7F80; }

/* The value of a code by the formats' tables: element times scale, rounded to bf16. */
static int code_is(const form *f, int i, mixp_bf16 want) {
    const int low = f->element == MIXP_F4_E2M1;
    const uint64_t code = low ? (uint64_t)(codes[i / 2] >> 4 * (i % 2)) & 15u : codes[i];
    double v = mixp_decode(f->element, code);
    if (f->rows)
        v *= mixp_decode(f->scale == MIXP_SCALE_E4M3 ? MIXP_F8_E4M3 : MIXP_F8_E8M0,
                         scales[i / COLS / f->rows * COLS + i % COLS]);
    if (is_bad(want)) return v != v;    /* an Inf becomes NaN, too: the element has no Inf */
    return mixp_bf16_from_f64(v).bits == want.bits;
}

static void one_form(const form *f, const mixp_device *d) {
    const mixp_exec x = one_thread();
    mixp_recode_args k = recode_of(f, codes);
    int i, wrong = 0, lost = 0;
    quantise(f, d);
    CHECK_INT(d->kernels->recode(&x, &k), MIXP_OK);
    for (i = 0; i < COUNT; i++) wrong += !code_is(f, i, values[i]);
    CHECK_INT(wrong, 0);
    k.y = again;
    k.decodes = 1;
    CHECK_INT(d->kernels->recode(&x, &k), MIXP_OK);
    for (i = 0; i < COUNT; i++)
        lost += is_bad(values[i]) ? !is_nan(again[i]) : values[i].bits != again[i].bits;
    CHECK_INT(lost, 0);
}

static void codes_are_exact(void) {
    int isa, f, edge, sets = 0;
    for (isa = 0; isa < MIXP_ISA_COUNT; isa++) {
        const mixp_device *d = mixp_cpu_with((mixp_isa)isa);
        if (!d) continue;
        sets++;
        for (edge = 0; edge < EDGES; edge++) {
            fill_source(edge);
            for (f = 0; f < FORMS; f++) one_form(&forms[f], d);
        }
    }
    CHECK(sets > 0);
}

static void same_codes_on_all_sets(void) {
    const mixp_exec x = one_thread();
    const mixp_device *first = mixp_cpu();
    fill_source(1);
    for (int f = 0; f < FORMS; f++)
        for (int isa = 0; isa < MIXP_ISA_COUNT; isa++) {
            const mixp_device *d = mixp_cpu_with((mixp_isa)isa);
            mixp_recode_args a = recode_of(&forms[f], codes), b = recode_of(&forms[f], other);
            if (!d) continue;
            memset(codes, 0, sizeof codes);
            memset(other, 0, sizeof other);
            quantise(&forms[f], first);
            CHECK_INT(first->kernels->recode(&x, &a), MIXP_OK);
            CHECK_INT(d->kernels->recode(&x, &b), MIXP_OK);
            CHECK(memcmp(codes, other, sizeof codes) == 0);
        }
}

static void factor(void) {
    const mixp_exec x = one_thread();
    const float own = 0.25f, times = 3.0f;
    float decode = 0;
    mixp_recode_args k = recode_of(&forms[0], codes);
    memset(codes, 0, sizeof codes);
    k.decodes = 1;
    k.own = &own;
    k.decode = &decode;
    CHECK_INT(mixp_cpu()->kernels->recode(&x, &k), MIXP_OK);
    CHECK(decode == 0.25f);
    k.times = &times;
    CHECK_INT(mixp_cpu()->kernels->recode(&x, &k), MIXP_OK);
    CHECK(decode == 0.75f);
}

static mixp_result recodes(mixp_recode_args k) {
    const mixp_exec x = one_thread();
    return mixp_cpu()->kernels->recode(&x, &k);
}

static void kernel_refuses(void) {
    const mixp_recode_args good = recode_of(&forms[2], codes);
    mixp_recode_args k = good;
    mixp_quantise_args q;
    mixp_exec x = one_thread();
    float decode = 0;
    CHECK_INT(recodes(good), MIXP_OK);
    k.y = NULL; CHECK_INT(recodes(k), MIXP_ERR_ARGUMENT); k = good;
    k.codes = NULL; CHECK_INT(recodes(k), MIXP_ERR_ARGUMENT); k = good;
    k.scales = NULL; CHECK_INT(recodes(k), MIXP_ERR_ARGUMENT); k = good;
    k.rows = 0; CHECK_INT(recodes(k), MIXP_ERR_ARGUMENT); k = good;
    k.element = MIXP_F8_E5M2; CHECK_INT(recodes(k), MIXP_ERR_ARGUMENT); k = good;
    k.element = MIXP_F4_E2M1; CHECK_INT(recodes(k), MIXP_ERR_ARGUMENT); k = good;
    k.scale = MIXP_SCALE_COUNT; CHECK_INT(recodes(k), MIXP_ERR_ARGUMENT); k = good;
    k.decodes = 1; k.decode = &decode; CHECK_INT(recodes(k), MIXP_ERR_ARGUMENT); k = good;
    k.cols = 40; CHECK_INT(recodes(k), MIXP_ERR_SHAPE); k = good;
    k.block_rows = 0; CHECK_INT(recodes(k), MIXP_ERR_SHAPE); k = good;
    k.block_rows = 100; CHECK_INT(recodes(k), MIXP_ERR_SHAPE); k = good;
    k.scale = MIXP_SCALE_TENSOR; CHECK_INT(recodes(k), MIXP_ERR_SHAPE);
    memset(&q, 0, sizeof q);            /* one scale for the array is no code */
    q.rows = q.cols = 32;
    q.x = mixpi_in(source, MIXP_F32);
    q.y = values;
    q.element = MIXP_F8_E4M3;
    q.scale = MIXP_SCALE_TENSOR;
    q.scales = scales;
    CHECK_INT(mixp_quantise(&x, &q, &decode), MIXP_ERR_SHAPE);
}

/* --- the scales of blocks of every shape ------------------------------------------------------- */

typedef struct block_form { mixp_dtype element; mixp_block_scale scale; int rows, cols; } block_form;
static const block_form shapes[] = {
    { MIXP_F8_E4M3, MIXP_SCALE_POWER, 1, 16 },  { MIXP_F8_E4M3, MIXP_SCALE_POWER, 128, 128 },
    { MIXP_F8_E4M3, MIXP_SCALE_POWER, 1, 128 }, { MIXP_F8_E4M3, MIXP_SCALE_E8M0, 1, 32 },
    { MIXP_F8_E4M3, MIXP_SCALE_E8M0, 32, 1 },   { MIXP_F8_E4M3, MIXP_SCALE_E8M0, 64, 64 },
    { MIXP_F4_E2M1, MIXP_SCALE_E4M3, 1, 16 },   { MIXP_F4_E2M1, MIXP_SCALE_E4M3, 16, 16 },
    { MIXP_F4_E2M1, MIXP_SCALE_E4M3, 16, 1 },
};
enum { SHAPES = sizeof shapes / sizeof *shapes, WIDE = 384, TALL = 128 };
static float wide_source[TALL * WIDE];
static mixp_bf16 wide_values[TALL * WIDE];
static uint8_t wide_scales[TALL * WIDE];

/* value_table[low][n]: does the upper half n of an f32 belong to a value of e4m3, or if low of e2m1? By the format's
 * table: each value has at most 8 bits of significand, so the lower half is 0. */
static uint8_t value_table[2][1 << 16];

static void list_values(mixp_dtype element) {
    const int low = element == MIXP_F4_E2M1, count = low ? 16 : 256;
    for (int i = 0; i < count; i++) {
        const uint32_t bits = mixp_bits_of_f32((float)mixp_decode(element, (uint64_t)i));
        CHECK_INT(bits & 0xFFFF, 0);
        value_table[low][bits >> 16] = 1;
    }
}

/* Is v a value of the element? */
static int is_value(mixp_dtype element, double v) {
    const uint32_t bits = mixp_bits_of_f32((float)v);
    return (double)(float)v == v && !(bits & 0xFFFF) && value_table[element == MIXP_F4_E2M1][bits >> 16];
}

/* The block's values over its scale are values of the element. A scale that is a power of two also
 * puts the largest in the upper half of the element's range. */
static void one_block(const block_form *f, int row, int col, int largest) {
    const int at = row / f->rows * (WIDE / f->cols) + col / f->cols;
    const double scale = mixp_decode(f->scale == MIXP_SCALE_E4M3 ? MIXP_F8_E4M3 : MIXP_F8_E8M0,
                                     wide_scales[at]);
    double most = 0;
    int i, j, wrong = 0;
    for (i = row; i < row + f->rows; i++)
        for (j = col; j < col + f->cols; j++) {
            const double v = mixp_f32_from_bf16(wide_values[i * WIDE + j]) / scale;
            wrong += !is_value(f->element, v);
            most = fabs(v) > most ? fabs(v) : most;
        }
    CHECK_INT(wrong, 0);
    CHECK(most <= largest);
    CHECK(f->scale == MIXP_SCALE_E4M3 || most > largest / 2.0 - 8.0);
}

static void one_shape(const block_form *f, const mixp_device *d) {
    mixp_exec x = one_thread();
    mixp_quantise_args k;
    x.scratch = scratch_of;
    memset(&k, 0, sizeof k);
    k.rows = TALL;
    k.cols = WIDE;
    k.x = mixpi_in(wide_source, MIXP_F32);
    k.y = wide_values;
    k.element = f->element;
    k.scale = f->scale;
    k.block_rows = f->rows;
    k.block_cols = f->cols;
    k.scales = wide_scales;
    memset(wide_scales, 0x55, sizeof wide_scales);
    CHECK_INT(d->kernels->quantise(&x, &k), MIXP_OK);
    for (int row = 0; row < TALL; row += f->rows)
        for (int col = 0; col < WIDE; col += f->cols)
            one_block(f, row, col, f->element == MIXP_F4_E2M1 ? 6 : 448);
    CHECK_INT(wide_scales[TALL * WIDE / f->rows / f->cols], 0x55);
}

static void scales_of_every_shape(void) {
    random_state = 5;
    list_values(MIXP_F8_E4M3);
    list_values(MIXP_F4_E2M1);
    for (int i = 0; i < TALL * WIDE; i++) wide_source[i] = (float)random_value();
    for (int isa = 0; isa < MIXP_ISA_COUNT; isa++)
        for (int f = 0; f < SHAPES && mixp_cpu_with((mixp_isa)isa); f++)
            one_shape(&shapes[f], mixp_cpu_with((mixp_isa)isa));
}

/* --- training with codes and without ---------------------------------------------------------- */

enum { LAYERS = 3, WIDTH = 128, BATCH = 2, LENGTH = 64, WEIGHTS = 8, STEPS = 3, TOKENS = BATCH * LENGTH };
static const int64_t x_shape[3] = { BATCH, LENGTH, WIDTH };

typedef struct mode { mixp_recipe recipe; int level, guard, blocks, micro, threads, mlp; } mode;

typedef struct model {
    mixp_context   *ctx;
    mixp_optimizer *opt;
    mixp_tensor    *in, *w[LAYERS][WEIGHTS];
    const mode     *how;
    int             layer;
    size_t          peak;
} model;

static mixp_tensor *param(mixp_context *ctx, const char *name, int64_t rows, int64_t cols) {
    int64_t shape[2];
    shape[0] = rows;
    shape[1] = cols;
    mixp_tensor *t = mixp_param(ctx, name, MIXP_F32, cols ? 2 : 1, shape);
    if (cols) mixp_init_normal(t, 0, 0.1);
    else mixp_fill(t, 1.0);
    return t;
}

static model model_of(const mode *how, int with_codes) {
    static const int rows[WEIGHTS] = { 1, 3, 1, 1, 4, 1, 4, 1 }, cols[WEIGHTS] = { 0, 1, 1, 0, 1, 4, 0, 0 };
    mixp_optimizer_desc adamw = mixp_adamw_defaults();
    mixp_recipe recipe = how->recipe;
    mixp_context_desc d;
    char name[32];
    model m;
    memset(&d, 0, sizeof d);
    memset(&m, 0, sizeof m);
    d.threads = how->threads ? how->threads : 2;
    d.seed = 5;
    m.ctx = mixp_context_new(&d);
    m.how = how;
    m.in = param(m.ctx, "in", WIDTH, 0);
    for (int l = 0; l < LAYERS; l++)
        for (int k = 0; k < WEIGHTS; k++) {
            snprintf(name, sizeof name, "h.%d.%d", l, k);
            m.w[l][k] = param(m.ctx, name, rows[k] * WIDTH, cols[k] * WIDTH);
        }
    m.opt = mixp_optimizer_new(m.ctx, &adamw);
    CHECK_INT(mixp_optimizer_add_all(m.opt, "*"), MIXP_OK);
    recipe.codes = with_codes;
    CHECK_INT(mixp_autocast_set_recipe(m.ctx, &recipe), MIXP_OK);
    CHECK_INT(mixp_autocast_set_level(m.ctx, how->level), MIXP_OK);
    if (how->guard) CHECK_INT(mixp_guard_start(m.ctx, NULL), MIXP_OK);
    return m;
}

/* y, which the next linear reads last. */
static mixp_tensor *last_read(mixp_tensor *y) {
    mixp_tensor_set_disposable(y, 1);
    return y;
}

static mixp_tensor *one_layer(mixp_context *ctx, mixp_tensor *x, void *user) {
    model *m = (model *)user;
    mixp_tensor **w = m->w[m->layer], *h;
    h = mixp_linear(ctx, last_read(mixp_layer_norm(ctx, x, w[0], NULL, 1e-5f)), w[1], NULL);
    h = mixp_attention(ctx, h, 4, 1, 0.0f);
    h = mixp_dropout(ctx, mixp_linear(ctx, h, w[2], w[7]), 0.1f, 1);
    x = mixp_add(ctx, x, h);
    h = last_read(mixp_layer_norm(ctx, x, w[3], NULL, 1e-5f));
    if (m->how->mlp) return mixp_add(ctx, x, mixp_mlp(ctx, h, w[4], w[6], w[5], NULL));
    h = last_read(mixp_gelu_tanh(ctx, mixp_linear(ctx, h, w[4], w[6])));
    return mixp_add(ctx, x, mixp_linear(ctx, h, w[5], w[7]));
}

static mixp_tensor *loss_of(model *m, int t) {
    static float batch[TOKENS * WIDTH];
    mixp_tensor *x, *loss = NULL;
    random_state = (uint64_t)t + 9;
    for (int i = 0; i < TOKENS * WIDTH; i++) batch[i] = (float)random_value();
    x = mixp_input(m->ctx, MIXP_F32, 3, x_shape, batch);
    MIXP_AUTOCAST(m->ctx, MIXP_BF16) {
        x = mixp_mul(m->ctx, x, m->in);
        for (m->layer = 0; m->layer < LAYERS; m->layer++)
            x = m->how->blocks && m->layer == 1 ? mixp_recompute(m->ctx, one_layer, m, x)
                                                : one_layer(m->ctx, x, m);
        loss = mixp_mean(m->ctx, mixp_mul(m->ctx, x, x), MIXP_ALL, 0);
    }
    return loss;
}

static void step(model *m, int t) {
    mixp_step_begin(m->ctx);
    mixp_zero_grad(m->opt);
    for (int i = 0; i <= m->how->micro; i++)
        CHECK_INT(mixp_backward(m->ctx, loss_of(m, 7 * t + i)), MIXP_OK);
    m->peak = mixp_context_memory(m->ctx).peak;
}

static void same_bits(mixp_tensor *a, mixp_tensor *b) {
    static float x[4 * WIDTH * WIDTH], y[4 * WIDTH * WIDTH];
    CHECK(a && b);
    if (!a || !b) return;
    CHECK_INT(mixp_read(a, x, MIXP_F32, a->count), MIXP_OK);
    CHECK_INT(mixp_read(b, y, MIXP_F32, b->count), MIXP_OK);
    CHECK(memcmp(x, y, (size_t)a->count * sizeof *x) == 0);
}

/* Trains two models, with codes and without; returns the bytes that codes have saved at the peak.
 * coded: inputs kept as codes in a forward pass. Under a guard at least so many: autocast then also casts
 * results that the guard has raised to f32. */
static int64_t beside(const mode *how, int64_t coded) {
    model a = model_of(how, 0), b = model_of(how, 1);
    for (int t = 0; t < STEPS; t++) {
        step(&a, t);
        step(&b, t);
        for (int64_t i = 0; mixp_context_param(a.ctx, i); i++) {
            mixp_tensor *p = mixp_context_param(a.ctx, i), *q = mixp_context_param(b.ctx, i);
            if (p->grad) same_bits(p->grad, q->grad);
            else CHECK(!q->grad);
        }
        mixp_optimizer_step(a.opt);
        mixp_optimizer_step(b.opt);
    }
    for (int t = 0; t < LAYERS * WEIGHTS; t++)
        same_bits(a.w[t / WEIGHTS][t % WEIGHTS], b.w[t / WEIGHTS][t % WEIGHTS]);
    CHECK_INT(mixp_autocast_recipe_counts(a.ctx).coded, 0);
    coded *= STEPS * (1 + how->micro);
    if (how->guard) CHECK(mixp_autocast_recipe_counts(b.ctx).coded >= coded);
    else CHECK_INT(mixp_autocast_recipe_counts(b.ctx).coded, coded);
    CHECK_INT(mixp_autocast_recipe_counts(a.ctx).products, mixp_autocast_recipe_counts(b.ctx).products);
    int64_t saved = (int64_t)a.peak - (int64_t)b.peak;
    CHECK_INT(mixp_context_error(a.ctx, NULL), MIXP_OK);
    CHECK_INT(mixp_context_error(b.ctx, NULL), MIXP_OK);
    mixp_context_free(a.ctx);
    mixp_context_free(b.ctx);
    return saved;
}

static mode mode_of(mixp_recipe_kind kind) {
    mode how;
    memset(&how, 0, sizeof how);
    how.recipe.kind = kind;
    how.level = 2;
    return how;
}

/* At level 2 the inputs are bf16: two norms and a GELU in each layer, 6 WIDTH values for each token. The
 * peak falls by what all linears save, less at most the arrays of the layer where it lies. */
static void every_recipe(void) {
    for (int kind = MIXP_RECIPE_NONE + 1; kind < MIXP_RECIPE_COUNT; kind++) {
        static const double bytes[MIXP_RECIPE_COUNT] = { 0, 1, 1, 1 + 1 / 128.0, 1 + 1 / 32.0, 0.5 + 1 / 16.0 };
        mode how = mode_of((mixp_recipe_kind)kind);
        const double each = (2 - bytes[kind]) * 6 * TOKENS * WIDTH;
        double saved = (double)beside(&how, 3 * LAYERS);
        CHECK(saved > (LAYERS - 1) * each && saved <= LAYERS * each);
        how.level = 1;          /* the norms are f32, and autocast casts them: 6 bytes */
        saved = (double)beside(&how, 3 * LAYERS);
        CHECK(saved > (LAYERS - 1) * (each + 2 * 4 * TOKENS * WIDTH));
    }
}

/* Quick: each recipe in two of the four ways. */
static void every_way(void) {
    const int quick = getenv("MIXPREC_TEST_QUICK") != NULL;
    static const mixp_recipe_kind kinds[] = { MIXP_RECIPE_FP8_CURRENT, MIXP_RECIPE_FP8_DELAYED,
                                              MIXP_RECIPE_MXFP8, MIXP_RECIPE_NVFP4 };
    for (int i = 0; i < 4; i++) {
        mode how = mode_of(kinds[i]);
        how.threads = 1;
        if (!quick || i % 2 == 0) beside(&how, 3 * LAYERS);
        how.threads = 3;
        how.micro = 1;          /* gradients of two micro-batches are added */
        how.mlp = 1;
        if (!quick || i % 2) beside(&how, 3 * LAYERS);
        how.guard = 1;
        how.level = 1;
        if (!quick || i % 2 == 0) beside(&how, 3 * LAYERS);
        how.blocks = 1;         /* a layer in a block of mixp_recompute */
        if (!quick || i % 2) beside(&how, 3 * (LAYERS - 1));
    }
    {
        mode how = mode_of(MIXP_RECIPE_NVFP4);
        how.recipe.no_hadamard = how.recipe.no_stochastic = how.recipe.no_2d = 1;
        beside(&how, 3 * LAYERS);
        how.recipe.x_4over6 = MIXP_4OVER6_MAE;
        beside(&how, 3 * LAYERS);
        how.recipe.x_4over6 = MIXP_4OVER6_NONE;
        how.recipe.row_scaled = 1;
        beside(&how, 3 * LAYERS);
        how = mode_of(MIXP_RECIPE_MXFP8);
        how.recipe.e8m0 = MIXP_E8M0_FLOOR;
        beside(&how, 3 * LAYERS);
    }
}

/* The bits do not depend on the number of threads. */
static void threads(void) {
    mode one = mode_of(MIXP_RECIPE_NVFP4), three = one;
    one.threads = 1;
    three.threads = 3;
    model a = model_of(&one, 1);
    model b = model_of(&three, 1);
    step(&a, 0);
    step(&b, 0);
    for (int k = 0; k < LAYERS * WEIGHTS; k++)
        if (a.w[k / WEIGHTS][k % WEIGHTS]->grad)
            same_bits(a.w[k / WEIGHTS][k % WEIGHTS]->grad, b.w[k / WEIGHTS][k % WEIGHTS]->grad);
    mixp_context_free(a.ctx);
    mixp_context_free(b.ctx);
}

/* --- which inputs stay ------------------------------------------------------------------------- */

typedef struct one { mixp_context *ctx; mixp_tensor *w, *u, *p; } one;

static char warned[400];
static void hear(const char *message, void *user) {
    (void)user;
    snprintf(warned, sizeof warned, "%s", message);
}

static one one_of(int codes_on) {
    mixp_context_desc d;
    mixp_recipe r;
    one o;
    memset(&r, 0, sizeof r);
    r.kind = MIXP_RECIPE_MXFP8;
    r.codes = codes_on;
    memset(&d, 0, sizeof d);
    d.on_warning = hear;
    warned[0] = 0;
    o.ctx = mixp_context_new(&d);
    o.w = param(o.ctx, "w", WIDTH, WIDTH);
    o.u = param(o.ctx, "u", WIDTH, WIDTH);
    o.p = param(o.ctx, "p", WIDTH, 0);
    CHECK_INT(mixp_autocast_set_recipe(o.ctx, &r), MIXP_OK);
    CHECK_INT(mixp_autocast_set_level(o.ctx, 2), MIXP_OK);
    mixp_step_begin(o.ctx);
    return o;
}

/* x: WIDTH x WIDTH, the result of mixp_scale, whose gradient does not read it. */
static mixp_tensor *result(one *o) {
    static float x[WIDTH * WIDTH];
    static const int64_t shape[2] = { WIDTH, WIDTH };
    random_state = 4;
    for (int i = 0; i < WIDTH * WIDTH; i++) x[i] = (float)random_value();
    mixp_tensor *t = mixp_input(o->ctx, MIXP_F32, 2, shape, x);
    MIXP_AUTOCAST(o->ctx, MIXP_BF16) t = mixp_scale(o->ctx, mixp_mul(o->ctx, t, o->p), 2.0f);
    return t;
}

/* What stands between x and the linear. */
typedef enum why {
    NOTHING, UNDECLARED, BY_RESULT, SHARED_BEFORE, RESHAPED, VIEWED, WITH_GRAD, AN_INPUT, FROZEN, AS_WEIGHT, WHYS
} why;

static mixp_tensor *applied(one *o, why w) {
    static const int64_t flat = WIDTH * WIDTH;
    mixp_tensor *x = result(o), *y = NULL, *view = NULL;
    MIXP_AUTOCAST(o->ctx, MIXP_BF16) {
        if (w == BY_RESULT) x = mixp_tanh(o->ctx, x);
        if (w == SHARED_BEFORE) y = mixp_linear(o->ctx, x, o->u, NULL);
        if (w == RESHAPED) x = mixp_reshape(o->ctx, x, 2, x->shape);
        if (w == VIEWED) view = mixp_reshape(o->ctx, x, 1, &flat);
        if (w == AN_INPUT) {
            static mixp_bf16 low[WIDTH * WIDTH];
            mixp_read(x, low, MIXP_BF16, x->count);
            x = mixp_input(o->ctx, MIXP_BF16, 2, x->shape, low);
            mixp_tensor_set_requires_grad(x, 1);
        }
        if (w == WITH_GRAD) mixp_tensor_set_requires_grad(x, 1);
        if (w == FROZEN) mixp_tensor_set_requires_grad(o->w, 0);
        if (w != UNDECLARED) mixp_tensor_set_disposable(x, 1);
        if (w == AS_WEIGHT) x = mixp_linear(o->ctx, x, x, NULL);
        else x = mixp_linear(o->ctx, x, o->w, NULL);
        if (y) x = mixp_add(o->ctx, x, y);
        if (view) x = mixp_add(o->ctx, x, mixp_reshape(o->ctx, view, 2, x->shape));
    }
    return mixp_mean(o->ctx, mixp_mul(o->ctx, x, x), MIXP_ALL, 0);
}

/* What the warning says of x, or of "u" beside "w". FROZEN: nothing trains that codes could serve. */
static const char *const reasons[WHYS] = {
    "", "weight 'w': x is not disposable: call mixp_tensor_set_disposable(x, 1)", "another gradient reads x",
    "none of 2 linears kept its input x as codes. The last has the weight 'w': another gradient reads x", "or x shares its memory",
    "or x shares its memory", "x keeps its gradient", "x is not the result of a recorded operator", "", "x is also the weight"
};

static void inputs_that_stay(void) {
    for (int w = NOTHING; w < WHYS; w++) {
        one a = one_of(0), b = one_of(1);
        CHECK_INT(mixp_backward(a.ctx, applied(&a, (why)w)), MIXP_OK);
        CHECK_INT(mixp_backward(b.ctx, applied(&b, (why)w)), MIXP_OK);
        if (w != FROZEN && w != AS_WEIGHT) same_bits(a.w->grad, b.w->grad);
        if (w != AN_INPUT) same_bits(a.p->grad, b.p->grad);
        if (w == SHARED_BEFORE) same_bits(a.u->grad, b.u->grad);
        CHECK_INT(mixp_autocast_recipe_counts(b.ctx).coded, w == NOTHING);
        CHECK_INT(mixp_context_error(b.ctx, NULL), MIXP_OK);
        CHECK(!warned[0]);                      /* not before the step has ended */
        CHECK_INT(mixp_step_begin(a.ctx), MIXP_OK);
        CHECK(!warned[0]);
        CHECK_INT(mixp_step_begin(b.ctx), MIXP_OK);
        if (!reasons[w][0]) CHECK(!warned[0]);
        CHECK_TEXT(warned, reasons[w]);
        CHECK_TEXT(warned, warned[0] ? "the recipe's codes free no memory" : "");
        mixp_context_free(a.ctx);
        mixp_context_free(b.ctx);
    }
}

/* No codes where nothing is walked back. */
static void evaluations(void) {
    one o = one_of(1);
    MIXP_NO_GRAD(o.ctx) CHECK(applied(&o, NOTHING) != NULL);
    mixp_eval_begin(o.ctx);
    CHECK(applied(&o, NOTHING) != NULL);
    CHECK_INT(mixp_autocast_recipe_counts(o.ctx).quantised, 2);
    CHECK_INT(mixp_autocast_recipe_counts(o.ctx).coded, 0);
    CHECK_INT(mixp_context_error(o.ctx, NULL), MIXP_OK);
    mixp_step_begin(o.ctx);
    CHECK(applied(&o, UNDECLARED) != NULL);     /* a forward pass alone */
    mixp_step_begin(o.ctx);
    CHECK(!warned[0]);
    mixp_context_free(o.ctx);
}

/* Two losses of one step walk back through the same linear. */
static void two_walks(void) {
    one o[2];
    for (int i = 0; i < 2; i++) {
        mixp_tensor *x, *y = NULL;
        o[i] = one_of(i);
        x = result(&o[i]);
        mixp_tensor_set_disposable(x, 1);
        MIXP_AUTOCAST(o[i].ctx, MIXP_BF16) y = mixp_linear(o[i].ctx, x, o[i].w, NULL);
        CHECK_INT(mixp_backward(o[i].ctx, mixp_mean(o[i].ctx, y, MIXP_ALL, 0)), MIXP_OK);
        CHECK_INT(mixp_backward(o[i].ctx, mixp_mean(o[i].ctx, mixp_mul(o[i].ctx, y, y), MIXP_ALL, 0)), MIXP_OK);
    }
    CHECK_INT(mixp_autocast_recipe_counts(o[1].ctx).coded, 1);
    same_bits(o[0].w->grad, o[1].w->grad);
    mixp_context_free(o[0].ctx);
    mixp_context_free(o[1].ctx);
}

/* A guard that measures products a second time keeps no codes a second time. */
static void counted_once(void) {
    one o = one_of(1);
    CHECK_INT(mixp_guard_start(o.ctx, NULL), MIXP_OK);
    for (int t = 0; t < 4; t++) {
        mixp_step_begin(o.ctx);
        CHECK_INT(mixp_backward(o.ctx, applied(&o, NOTHING)), MIXP_OK);
    }
    CHECK_INT(mixp_autocast_recipe_counts(o.ctx).quantised, 4);
    CHECK_INT(mixp_autocast_recipe_counts(o.ctx).coded, 4);
    CHECK_INT(mixp_context_error(o.ctx, NULL), MIXP_OK);
    mixp_context_free(o.ctx);
}

/* w's gradient under delayed scaling, of x by the scale 1. between: another optimizer's update moves the
 * scale before backward. */
static one delayed(int with_codes, int between) {
    one o = one_of(with_codes);
    mixp_optimizer *opt = new_sgd(o.ctx);
    mixp_tensor *x, *y = NULL;
    mixp_recipe r;
    memset(&r, 0, sizeof r);
    r.kind = MIXP_RECIPE_FP8_DELAYED;
    r.codes = with_codes;
    CHECK_INT(mixp_autocast_set_recipe(o.ctx, &r), MIXP_OK);
    mixp_optimizer_add(opt, o.u, NULL);
    x = result(&o);
    mixp_tensor_set_disposable(x, 1);
    MIXP_AUTOCAST(o.ctx, MIXP_BF16) y = mixp_linear(o.ctx, x, o.w, NULL);
    if (between) {
        CHECK_INT(mixp_backward(o.ctx, mixp_mean(o.ctx, o.u, MIXP_ALL, 0)), MIXP_OK);
        CHECK_INT(mixp_optimizer_step(opt), MIXP_OK);
    }
    CHECK_INT(mixp_backward(o.ctx, mixp_sum(o.ctx, mixp_mul(o.ctx, y, y), MIXP_ALL, 0)), MIXP_OK);
    CHECK_INT(mixp_context_error(o.ctx, NULL), MIXP_OK);
    return o;
}

/* Codes hold x as forward has quantised it. */
static void update_between(void) {
    static float a[WIDTH * WIDTH], b[WIDTH * WIDTH];
    one coded = delayed(1, 1), undisturbed = delayed(0, 0), rescaled = delayed(0, 1);
    same_bits(coded.w->grad, undisturbed.w->grad);
    mixp_read(rescaled.w->grad, a, MIXP_F32, WIDTH * WIDTH);
    mixp_read(undisturbed.w->grad, b, MIXP_F32, WIDTH * WIDTH);
    CHECK(memcmp(a, b, sizeof a) != 0);
    mixp_context_free(coded.ctx);
    mixp_context_free(undisturbed.ctx);
    mixp_context_free(rescaled.ctx);
}

/* --- refusals ---------------------------------------------------------------------------------- */

static void a_freed_input_is_refused(void) {
    static float values_of[WIDTH * WIDTH];
    one o = one_of(1);
    mixp_tensor *x = result(&o), *y = NULL;
    const char *text;
    mixp_tensor_set_disposable(x, 1);
    MIXP_AUTOCAST(o.ctx, MIXP_BF16) y = mixp_linear(o.ctx, x, o.w, NULL);
    CHECK(y != NULL);
    CHECK_INT(mixp_read(x, values_of, MIXP_F32, x->count), MIXP_ERR_ORDER);
    mixp_context_clear_error(o.ctx);
    CHECK(!mixp_tanh(o.ctx, x));
    CHECK_INT(mixp_context_error(o.ctx, &text), MIXP_ERR_ORDER);
    CHECK_TEXT(text, "mixp_linear under a recipe with codes");
    mixp_context_free(o.ctx);
}

static void refused(mixp_context *ctx, mixp_recipe r, mixp_result want, const char *part) {
    mixp_autocast region;
    const char *text = "";
    memset(&region, 0, sizeof region);
    region.dtype = MIXP_BF16;
    region.level = 1;
    region.recipe = &r;
    CHECK_INT(mixp_autocast_set_recipe(ctx, &r), want);
    CHECK_INT(mixp_context_error(ctx, &text), want);
    CHECK_TEXT(text, part);
    mixp_context_clear_error(ctx);
    CHECK_INT(mixp_autocast_open_with(ctx, &region), -1);
    CHECK_INT(mixp_context_error(ctx, &text), want);
    mixp_context_clear_error(ctx);
}

static mixp_result refuse_copy(const mixp_exec *x, void *host, const void *device, size_t bytes) {
    (void)x;
    memcpy(host, device, bytes);
    return MIXP_OK;
}

static void refusals(void) {
    static mixp_device far_device;
    static mixp_kernels kernels;
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_context_desc d;
    mixp_recipe r;
    memset(&r, 0, sizeof r);
    r.codes = 1;
    refused(ctx, r, MIXP_ERR_ARGUMENT, "codes need a kind");
    r.kind = MIXP_RECIPE_NVFP4;
    r.wgrad_high = 1;
    refused(ctx, r, MIXP_ERR_ARGUMENT, "codes and wgrad_high");
    r.wgrad_high = 0;
    r.codes = 2;
    refused(ctx, r, MIXP_ERR_ARGUMENT, "neither 0 nor 1");
    mixp_context_free(ctx);
    kernels = *mixp_cpu()->kernels;     /* memory of its own, but no kernel */
    kernels.recode = NULL;
    far_device = *mixp_cpu();
    far_device.kernels = &kernels;
    memset(&d, 0, sizeof d);
    d.device = &far_device;
    ctx = mixp_context_new(&d);
    far_device.download = refuse_copy;
    r.codes = 1;
    refused(ctx, r, MIXP_ERR_DEVICE, "cannot keep activations as codes");
    far_device.download = NULL;         /* memory of the host's: the CPU's kernel does the work */
    CHECK_INT(mixp_autocast_set_recipe(ctx, &r), MIXP_OK);
    mixp_context_free(ctx);
}

int main(void) {
    RUN(codes_are_exact);
    RUN(same_codes_on_all_sets);
    RUN(factor);
    RUN(kernel_refuses);
    RUN(scales_of_every_shape);
    RUN(every_recipe);
    RUN_LATER(every_way);
    RUN(threads);
    RUN(inputs_that_stay);
    RUN(evaluations);
    RUN(two_walks);
    RUN(counted_once);
    RUN(update_between);
    RUN(a_freed_input_is_refused);
    RUN(refusals);
    return test_report();
}
