/* test_any_batch.c - on a CPU a row's result does not depend on the other rows of its batch, on what
 * follows it, or on a cache of keys and values: training, evaluation and generation have one set of
 * bits, on each instruction set of this machine. tests/cpu/test_amx.c runs the same cases on
 * emulated tiles.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include "test.h"
#include "shared_work.h"
#include "examples/conv.h"
#include "examples/recurrent.h"
#include "operators.h"
#include "any_batch.h"

/* The sets, and the modes in which make test tries them; make test-long tries all modes. */
static const struct { mixp_isa isa; unsigned modes; } sets[] = {
    { MIXP_ISA_SCALAR, 1u | 1u << 5 },
    { MIXP_ISA_AVX2, 1u | 1u << 1 | 1u << 4 },
    { MIXP_ISA_AVX512, 1u | 1u << 2 | 1u << 3 },
    { MIXP_ISA_AVX512_BF16, 1u << 3 | 1u << 4 | 1u << 5 },
    { MIXP_ISA_NEON, 1u | 1u << 1 | 1u << 4 },
    { MIXP_ISA_NEON_F16, 1u << 1 | 1u << 2 },
    { MIXP_ISA_NEON_BF16, 1u << 3 | 1u << 4 | 1u << 5 },
    { MIXP_ISA_AMX, 1u << 2 | 1u << 3 },
    { MIXP_ISA_AMX_F16, 1u << 1 | 1u << 5 }
};
enum { SETS = sizeof sets / sizeof *sets };
/* This does not compile while an instruction set has no line. */
typedef char sets_lack_an_isa[SETS == (int)MIXP_ISA_COUNT ? 1 : -1];

static unsigned modes_of(int set) { return getenv("MIXPREC_TEST_QUICK") ? sets[set].modes : ~0u; }

static void operators_compute_rows_apart(void) {
    ab_compared = 0;
    for (int i = 0; i < SETS; i++) {
        const mixp_device *d = mixp_cpu_with(sets[i].isa);
        if (d) ab_check(d, modes_of(i), 0, 1);
    }
    CHECK(ab_compared > 1000000);
}

/* The comparison sees what depends on the batch: x less its mean over the sequences. */
static mixp_tensor *less_the_mean(ab_net *n)
{ return mixp_sub(n->ctx, n->x, mixp_mean(n->ctx, n->x, 0, 1)); }

static void a_batch_that_matters_is_seen(void) {
    static const ab_case centred = { "less_the_mean", AB_ROW, less_the_mean, NULL };
    static ab_result whole, some;
    ab_net n;
    ab_data();
    ab_open(&n, NULL, &ab_modes[0], 1);
    CHECK(ab_compute(&n, &centred, ab_whole, 1, &whole));
    CHECK(ab_compute(&n, &centred, ab_parts[1], 0, &some));
    CHECK(ab_differing(&whole, &some, ab_parts[1], AB_ROW) > some.count / 2);
    CHECK_INT(ab_differing(&whole, &whole, ab_whole, AB_ROW), 0);
    CHECK_INT(mixp_context_error(n.ctx, NULL), MIXP_OK);
    mixp_context_free(n.ctx);
}

/* --- products of many blocks -------------------------------------------------------------------- */

enum { MANY = 600, WIDE = 530, DEEP = 385 };

static mixp_tensor *product_of(mixp_context *ctx, mixp_dtype dtype, mixp_tensor *w, const float *x, int64_t rows) {
    const int64_t shape[2] = { rows, DEEP };
    mixp_tensor  *y = NULL;
    mixp_step_begin(ctx);
    MIXP_AUTOCAST(ctx, dtype) y = mixp_linear(ctx, mixp_input(ctx, MIXP_F32, 2, shape, x), w, NULL);
    return y;
}

/* Each number of rows is multiplied by tiles of other heights, in other blocks, by other threads. */
static void rows_of_large_products(mixp_context *ctx, mixp_dtype dtype) {
    static const int rows[] = { 1, 2, 3, 5, 9, 11, 13, 16, 29, 85, 257, 513 };
    static float  x[MANY * DEEP];
    static char   all[MANY * WIDE * 4], some[MANY * WIDE * 4];
    const int64_t shape[2] = { WIDE, DEEP };
    mixp_tensor  *w = mixp_param(ctx, NULL, MIXP_F32, 2, shape), *y;
    ab_fill(x, MANY * DEEP);
    mixp_init_normal(w, 0.0, 1.0);
    y = product_of(ctx, dtype, w, x, MANY);
    size_t row = WIDE * mixp_dtype_size(dtype);
    CHECK_INT(mixp_read(y, all, dtype, MANY * WIDE), MIXP_OK);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const int first = (int)(i * 7);
        y = product_of(ctx, dtype, w, x + first * DEEP, rows[i]);
        CHECK_INT(mixp_read(y, some, dtype, rows[i] * WIDE), MIXP_OK);
        CHECK(memcmp(all + (size_t)first * row, some, (size_t)rows[i] * row) == 0);
    }
}

static void products_of_many_blocks(void) {
    for (int i = 1; i < SETS; i++) {
        mixp_context_desc d;
        memset(&d, 0, sizeof d);
        d.device = mixp_cpu_with(sets[i].isa);
        d.threads = 2;
        if (!d.device) continue;
        for (int dtype = MIXP_F32; dtype <= MIXP_BF16; dtype++) {
            mixp_context *ctx = mixp_context_new(&d);
            if (dtype == MIXP_F32 || dtype == MIXP_F16 || dtype == MIXP_BF16)
                rows_of_large_products(ctx, (mixp_dtype)dtype);
            CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
            mixp_context_free(ctx);
        }
    }
}

/* --- a decoder with a cache of keys and values -------------------------------------------------- */

enum { LAYERS = 2, KEPT = AB_WIDTH / 2 };

/* What a decoder keeps of the tokens it has read: keys and values of two heads, as they were stored. */
typedef struct cache {
    mixp_dtype dtype;
    char       keys[AB_BATCH][AB_TIME][KEPT][4], values[AB_BATCH][AB_TIME][KEPT][4];
} cache;
static cache caches[LAYERS];
typedef char kept_row[AB_TIME][KEPT][4];

/* Stores the part's rows behind those before them; returns all of them. */
static mixp_tensor *remember(ab_net *n, kept_row *kept, mixp_tensor *fresh) {
    static char rows[AB_ROWS * KEPT * 4];
    const ab_part p = n->part;
    const int64_t shape[3] = { p.nb, p.t + p.nt, KEPT };
    const size_t  row = KEPT * mixp_dtype_size(fresh->dtype);
    CHECK_INT(mixp_read(fresh, rows, fresh->dtype, fresh->count), MIXP_OK);
    for (int64_t i = 0; i < p.nb * p.nt; i++)
        memcpy((char *)kept[p.b + i / p.nt] + (size_t)(p.t + i % p.nt) * row, rows + (size_t)i * row, row);
    for (int64_t b = 0; b < p.nb; b++)
        memcpy(rows + (size_t)(b * shape[1]) * row, kept[p.b + b], (size_t)shape[1] * row);
    return mixp_input(n->ctx, fresh->dtype, 3, shape, rows);
}

static mixp_tensor *turned(ab_net *n, mixp_tensor *x) {
    mixp_rope_desc d;
    memset(&d, 0, sizeof d);
    d.head_dim = AB_WIDTH / AB_HEADS;
    d.first = n->part.t;
    return mixp_rope(n->ctx, x, &d);
}

static mixp_tensor *decoder_attention(ab_net *n, mixp_tensor *h, cache *kept) {
    mixp_context *c = n->ctx;
    mixp_tensor  *kv = mixp_linear(c, h, n->square, NULL);
    mixp_tensor  *k = turned(n, mixp_slice(c, kv, -1, 0, KEPT)), *v = mixp_slice(c, kv, -1, KEPT, KEPT);
    mixp_attention_desc d;
    memset(&d, 0, sizeof d);
    d.heads = AB_HEADS;
    d.kv_heads = 2;
    d.causal = 1;
    d.past = n->part.t;
    if (kept) {
        k = remember(n, kept->keys, k);
        v = remember(n, kept->values, v);
    }
    return mixp_attention_apply(c, turned(n, mixp_linear(c, h, n->square, n->bias)), k, v, &d);
}

/* Log-probabilities of the next token, [nb, nt, AB_VOCAB]. cache: NULL in training. */
static mixp_tensor *decoder(ab_net *n, cache *kept) {
    mixp_context *c = n->ctx;
    mixp_tensor  *x = mixp_embedding(c, n->table, ab_named(n)), *h = mixp_rms_norm(c, x, n->gain, 1e-6f);
    for (int i = 0; i < LAYERS; i++) {
        h = mixp_linear(c, decoder_attention(n, h, kept ? &kept[i] : NULL), n->square, NULL);
        h = mixp_add_rms_norm(c, x, h, n->gain, 1e-6f, &x);
        h = mixp_linear(c, mixp_swiglu_packed(c, mixp_linear(c, h, n->wide, NULL)), n->square, NULL);
        h = mixp_add_rms_norm(c, x, h, n->gain, 1e-6f, &x);
    }
    return mixp_log_softmax(c, mixp_linear(c, h, n->table, NULL));
}

/* Trains on all sequences at once, without a step of the optimizer; log_p: their log-probabilities. */
static void train_decoder(ab_net *n, mixp_scaler *scaler, float *log_p) {
    mixp_tensor *y = NULL, *loss;
    mixp_step_begin(n->ctx);
    n->part = ab_whole;
    MIXP_AUTOCAST(n->ctx, n->mode->dtype) y = decoder(n, NULL);
    CHECK_INT(mixp_read(y, log_p, MIXP_F32, AB_ROWS * AB_VOCAB), MIXP_OK);
    loss = mixp_nll(n->ctx, y, ab_named(n), MIXP_IGNORE);
    CHECK_INT(mixp_backward(n->ctx, scaler ? mixp_scaler_scale(scaler, loss) : loss), MIXP_OK);
}

/* Reads sequences [b, b + nb) in pieces: a prompt, then a token or a few at a time. */
static int64_t generate(ab_net *n, int64_t b, int64_t nb, int64_t prompt, int64_t step, const float *log_p) {
    static float some[AB_ROWS * AB_VOCAB];
    int64_t bad = 0;
    ab_part p = { b, nb, 0, prompt };
    for (; p.t < AB_TIME; p.t += p.nt, p.nt = step < AB_TIME - p.t ? step : AB_TIME - p.t) {
        mixp_tensor *y = NULL;
        n->part = p;
        mixp_eval_begin(n->ctx);
        MIXP_NO_GRAD(n->ctx) MIXP_AUTOCAST(n->ctx, n->mode->dtype) y = decoder(n, caches);
        CHECK_INT(mixp_read(y, some, MIXP_F32, nb * p.nt * AB_VOCAB), MIXP_OK);
        for (int64_t i = 0; i < nb; i++)
            bad += memcmp(some + i * p.nt * AB_VOCAB, log_p + ((b + i) * AB_TIME + p.t) * AB_VOCAB,
                          (size_t)(p.nt * AB_VOCAB) * sizeof *some) != 0;
    }
    return bad;
}

static void decode(const mixp_device *d, const ab_mode *mode) {
    static float log_p[AB_ROWS * AB_VOCAB];
    ab_net nets[2];
    ab_data();
    for (int i = 0; i < 2; i++) ab_open(&nets[i], d, mode, 2 - i);
    train_decoder(&nets[0], NULL, log_p);
    CHECK_INT(generate(&nets[1], 0, 1, 1, 1, log_p), 0);
    CHECK_INT(generate(&nets[1], 1, 2, 7, 1, log_p), 0);
    CHECK_INT(generate(&nets[0], 0, 3, 33, 5, log_p), 0);
    for (int i = 0; i < 2; i++) {
        CHECK_INT(mixp_context_error(nets[i].ctx, NULL), MIXP_OK);
        mixp_context_free(nets[i].ctx);
    }
}

static void training_equals_generation(void) {
    for (int i = 0; i < SETS; i++) {
        const mixp_device *d = mixp_cpu_with(sets[i].isa);
        for (int m = 0; d && m < AB_MODES; m++)
            if (modes_of(i) >> m & 1) decode(d, &ab_modes[m]);
    }
}

/* --- a guard ------------------------------------------------------------------------------------ */

static int sites_in_f32(mixp_context *ctx) {
    mixp_site_info s;
    int n = 0;
    for (int i = 0; mixp_site(ctx, i, &s); i++) n += s.fallen;
    return n;
}

/* Parts of the batch in an evaluation, without a cache: rows whose log-probabilities differ. */
static int64_t evaluate_parts(ab_net *n, const float *log_p) {
    static float some[AB_ROWS * AB_VOCAB];
    int64_t bad = 0;
    for (int i = 0; i < AB_PREFIXES; i++) {
        const ab_part p = ab_parts[i];
        mixp_tensor *y = NULL;
        n->part = p;
        mixp_eval_begin(n->ctx);
        MIXP_NO_GRAD(n->ctx) MIXP_AUTOCAST(n->ctx, n->mode->dtype) y = decoder(n, NULL);
        CHECK_INT(mixp_read(y, some, MIXP_F32, p.nb * p.nt * AB_VOCAB), MIXP_OK);
        for (int64_t r = 0; r < p.nb * p.nt; r++)
            bad += memcmp(some + r * AB_VOCAB, log_p + ((p.b + r / p.nt) * AB_TIME + r % p.nt) * AB_VOCAB,
                          AB_VOCAB * sizeof *some) != 0;
    }
    return bad;
}

/* The feed-forward layer overflows f16, and the guard lets sites store f32: in training, and in an evaluation of
 * whatever part. Beside a cache, attention reads data in place of the sites that made its keys: it and what follows are
 * other sites, so the manual promises nothing there. */
static void a_site_that_fell_back(void) {
    static float log_p[AB_ROWS * AB_VOCAB];
    mixp_guard_desc g;
    mixp_optimizer_desc sgd = mixp_sgd_defaults();
    ab_net          n;
    memset(&g, 0, sizeof g);
    g.every = 1;
    sgd.lr = 0.0;
    ab_data();
    ab_open(&n, NULL, &ab_modes[1], 2);
    mixp_fill(n.wide, 40.0);
    mixp_optimizer *still = mixp_optimizer_new(n.ctx, &sgd);
    mixp_optimizer_add_all(still, "*");
    mixp_scaler *scaler = mixp_scaler_new(n.ctx, NULL);
    CHECK_INT(mixp_guard_start(n.ctx, &g), MIXP_OK);
    for (int i = 0; i < 8; i++) {
        mixp_zero_grad(still);
        train_decoder(&n, scaler, log_p);
        CHECK_INT(mixp_scaler_step(scaler, still), MIXP_OK);
        CHECK_INT(mixp_scaler_update(scaler), MIXP_OK);
    }
    CHECK(sites_in_f32(n.ctx) > 0);
    CHECK(log_p[0] > -1e9f && log_p[0] <= 0.0f);
    CHECK_INT(evaluate_parts(&n, log_p), 0);
    CHECK_INT(mixp_context_error(n.ctx, NULL), MIXP_OK);
    mixp_context_free(n.ctx);
}

/* --- recipes ------------------------------------------------------------------------------------ */

enum { Q_ROWS = 256, Q_OUT = 128, Q_IN = 128, Q_MOST = Q_ROWS * Q_IN };

/* unit: the rows of a batch must be a multiple of it. holds: 1: ANY BATCH covers the recipe; 0: its scales are
 * made from the batch. */
static const struct { const char *name; int unit, holds; mixp_recipe recipe; } recipes[] = {
    { "fp8_current", 16, 0, { .kind = MIXP_RECIPE_FP8_CURRENT } },
    { "fp8_delayed", 16, 1, { .kind = MIXP_RECIPE_FP8_DELAYED } },
    { "fp8_block", 128, 1, { .kind = MIXP_RECIPE_FP8_BLOCK } },
    { "mxfp8", 32, 1, { .kind = MIXP_RECIPE_MXFP8 } },
    { "nvfp4", 16, 0, { .kind = MIXP_RECIPE_NVFP4 } },
    { "nvfp4, 4over6", 16, 0, { .kind = MIXP_RECIPE_NVFP4, .no_hadamard = 1, .x_4over6 = MIXP_4OVER6_MAE } },
    { "nvfp4 by rows", 16, 1, { .kind = MIXP_RECIPE_NVFP4, .no_hadamard = 1, .row_scaled = 1, .codes = 1 } },
    { "nvfp4 by rows, w 4over6", 16, 1,
      { .kind = MIXP_RECIPE_NVFP4, .no_hadamard = 1, .row_scaled = 1, .w_4over6 = MIXP_4OVER6_MSE, .bound_448 = 1 } },
    { "nvfp4 by rows, 4over6", 16, 1,
      { .kind = MIXP_RECIPE_NVFP4, .wgrad_high = 1, .row_scaled = 1, .x_4over6 = MIXP_4OVER6_MAE,
        .w_4over6 = MIXP_4OVER6_MAE } },
};

/* Rows [first, first + count) of the batch. */
typedef struct q_part { int first, count; } q_part;
static const q_part q_whole = { 0, Q_ROWS };
static const q_part q_parts[] = { { 128, 128 }, { 64, 128 }, { 96, 32 }, { 32, 160 }, { 48, 16 }, { 176, 80 } };

/* Numbers whose size differs from row to row; the last 40 rows have an outlier each. */
static void q_data(float *x) {
    ab_fill(x, Q_MOST);
    for (int i = 0; i < Q_MOST; i++) x[i] = ldexpf(x[i], i / Q_IN % 9 - 4);
    for (int r = Q_ROWS - 40; r < Q_ROWS; r++) x[r * Q_IN + r % Q_IN] = 3000.0f + (float)r;
}

/* The linear's result for a part of the batch, in a step that trains or in an evaluation. */
static void q_compute(mixp_context *ctx, const float *x, q_part p, int training, mixp_bf16 *y) {
    const int64_t shape[2] = { p.count, Q_IN };
    mixp_tensor  *in, *out = NULL;
    if (training) mixp_step_begin(ctx);
    else mixp_eval_begin(ctx);
    in = mixp_input(ctx, MIXP_F32, 2, shape, x + p.first * Q_IN);
    MIXP_AUTOCAST(ctx, MIXP_BF16) out = mixp_linear(ctx, in, mixp_context_find(ctx, "w"), mixp_context_find(ctx, "b"));
    CHECK_INT(mixp_read(out, y, MIXP_BF16, (int64_t)p.count * Q_OUT), MIXP_OK);
}

static mixp_context *q_open(const mixp_device *device, const mixp_recipe *recipe, int threads) {
    const int64_t shape[2] = { Q_OUT, Q_IN };
    mixp_context *ctx = context_on(device, threads);
    mixp_init_normal(mixp_param(ctx, "w", MIXP_F32, 2, shape), 0.0, 1.0);
    mixp_init_normal(mixp_param(ctx, "b", MIXP_F32, 1, shape), 0.0, 1.0);
    CHECK_INT(mixp_autocast_set_recipe(ctx, recipe), MIXP_OK);
    return ctx;
}

/* Elements of the parts that differ from those of the whole batch. */
static int64_t q_differing(const mixp_device *device, const mixp_recipe *recipe, int unit) {
    static float     x[Q_MOST];
    static mixp_bf16 whole[Q_ROWS * Q_OUT], some[Q_ROWS * Q_OUT];
    mixp_context *ctx[2] = { q_open(device, recipe, 2), q_open(device, recipe, 1) };
    int64_t bad = 0, linears = 1;
    q_data(x);
    q_compute(ctx[0], x, q_whole, 1, whole);
    for (size_t i = 0; i < sizeof q_parts / sizeof *q_parts; i++) {
        const q_part p = q_parts[i];
        if (p.count % unit) continue;
        q_compute(ctx[i % 2], x, p, i % 3 == 2, some);
        for (int64_t j = 0; j < (int64_t)p.count * Q_OUT; j++)
            bad += some[j].bits != whole[(int64_t)p.first * Q_OUT + j].bits;
        linears++;
    }
    for (int i = 0; i < 2; i++) {
        linears -= mixp_autocast_recipe_counts(ctx[i]).quantised;
        CHECK_INT(mixp_context_error(ctx[i], NULL), MIXP_OK);
        mixp_context_free(ctx[i]);
    }
    CHECK_INT(linears, 0);
    return bad;
}

static void recipes_scale_rows_apart(void) {
    for (int i = 0; i < SETS; i++) {
        const mixp_device *d = mixp_cpu_with(sets[i].isa);
        for (size_t r = 0; d && r < sizeof recipes / sizeof *recipes; r++) {
            const int64_t bad = q_differing(d, &recipes[r].recipe, recipes[r].unit);
            if ((bad == 0) == recipes[r].holds) continue;
            test_bad++;
            TEST_SHOW("%s, %s: %lld elements differ", recipes[r].name, d->name, (long long)bad);
        }
    }
}

int main(void) {
    RUN(operators_compute_rows_apart);
    RUN(a_batch_that_matters_is_seen);
    RUN(products_of_many_blocks);
    RUN(training_equals_generation);
    RUN(a_site_that_fell_back);
    RUN(recipes_scale_rows_apart);
    return test_report();
}
