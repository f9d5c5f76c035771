/* test_delayed.c - delayed scaling (MIXP_RECIPE_FP8_DELAYED): scales, histories and the three
 * products of a linear layer against a second writing of TransformerEngine's arithmetic in double
 * precision; micro-batches, skipped steps, evaluations, Inf; resume; two ranks beside one;
 * refusals.
 * SPDX-License-Identifier: MIT OR Unlicense */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "mixprec.h"
#include "new_optimizer.h"
#include "test.h"
#include "find.h"
#ifndef _WIN32
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include "../../../examples/ddp_fork.c"
#endif

/* --- the emulation -------------------------------------------------------------------------- */

enum { M = 32, N = 48, K = 64, MOST = 16 };     /* rows of x, outputs, inputs; longest history */

static double f32(double x) { return (double)(float)x; }

/* x on e4m3's or e5m2's grid: the nearest value, the even one on a tie, at most the largest. */
static double on_grid(double x, int e5m2) {
    const int mantissa = e5m2 ? 2 : 3, least = e5m2 ? -14 : -6;
    const double max = e5m2 ? 57344.0 : 448.0;
    double a = fabs(x) > max ? max : fabs(x), step, whole, rest;
    int e = 0;
    frexp(a, &e);
    e = e - 1 < least ? least : e - 1;
    step = ldexp(1.0, e - mantissa);
    whole = floor(a / step);
    rest = a / step - whole;
    if (rest > 0.5 || (rest == 0.5 && fmod(whole, 2.0) == 1.0)) whole += 1.0;
    return x < 0 ? -whole * step : whole * step;
}

typedef struct operand { double scale, max, past[MOST], now; } operand;     /* past: old to new */
typedef struct rule { int history, most_recent, margin; } rule;

/* The end of an update of one operand. */
static void turn(operand *o, rule r) {
    const double now = o->now;
    double amax = now;
    o->now = 0;
    if (amax == 0 || isinf(amax)) return;       /* an Inf enters nothing */
    for (int i = 0; i < r.history - 1 && !r.most_recent; i++) amax = fmax(amax, o->past[i]);
    for (int i = 0; i + 1 < r.history - 1; i++) o->past[i] = o->past[i + 1];
    if (r.history > 1) o->past[r.history - 2] = now;
    if (isfinite(amax)) o->scale = f32(o->max / pow(2, r.margin) / amax);
}

static double in_bf16(double x) { return (double)mixp_f32_from_bf16(mixp_bf16_from_f32((float)x)); }

/* Quantises n values with the scale of o, which meets them if `enters`. */
static void quantise(operand *o, const float *x, int n, int enters, double *q) {
    for (int i = 0; i < n; i++) {
        const double v = in_bf16((double)x[i]);
        q[i] = on_grid(f32(v * o->scale), o->max > 1000) / o->scale;
        if (enters && fabs(v) > o->now) o->now = fabs(v);
    }
}

/* The largest error of y[rows, cols] against the sum over n of a's and b's products, as a share of
 * the sum of their magnitudes; low: of what exceeds one rounding to bf16. a_step, b_step: elements
 * between neighbours of the sum. */
static double error_of(const double *a, int a_step, int a_row, const double *b, int b_step, int b_row,
                       const float *y, int rows, int cols, int n, int low) {
    double worst = 0;
    int i, j, s;
    for (i = 0; i < rows; i++)
        for (j = 0; j < cols; j++) {
            double sum = 0, size = 1e-30;
            for (s = 0; s < n; s++) {
                const double p = a[i * a_row + s * a_step] * b[j * b_row + s * b_step];
                sum += p;
                size += fabs(p);
            }
            sum = fabs((double)y[i * cols + j] - sum) - (low ? ldexp(fabs(sum), -8) : 0.0);
            worst = fmax(worst, sum / size);
        }
    return worst;
}

/* --- one linear ----------------------------------------------------------------------------- */

typedef struct layer {
    mixp_context   *ctx;
    mixp_scaler    *scaler;
    mixp_optimizer *opt;
    mixp_tensor    *w;
} layer;

static mixp_recipe recipe_of(rule r) {
    mixp_recipe recipe;
    memset(&recipe, 0, sizeof recipe);
    recipe.kind = MIXP_RECIPE_FP8_DELAYED;
    recipe.history = r.history;
    recipe.most_recent = r.most_recent;
    recipe.margin = r.margin;
    return recipe;
}

static void fill(float *x, int n, uint64_t key, double size) {
    for (int i = 0; i < n; i++)
        x[i] = (float)(((double)mixp_random_at(mixp_random_key(9, key, 1), (uint64_t)i) / 4294967296.0 - 0.5) * size);
}

static layer layer_new(const mixp_recipe *recipe, const mixp_ranks_desc *ranks) {
    const int64_t shape[2] = { N, K };
    static float start[N * K];
    mixp_context_desc desc;
    mixp_scaler_desc scaling;
    mixp_optimizer_desc sgd = mixp_sgd_defaults();
    layer l;
    memset(&desc, 0, sizeof desc);
    memset(&scaling, 0, sizeof scaling);
    desc.threads = 2;
    desc.ranks = ranks;
    scaling.rule = MIXP_RULE_STATIC;
    scaling.init_scale = 1.0f;
    sgd.lr = 0.25;
    l.ctx = mixp_context_new(&desc);
    l.w = mixp_param(l.ctx, "w", MIXP_F32, 2, shape);
    fill(start, N * K, 1, 0.2);
    mixp_write(l.w, start, MIXP_F32, N * K);
    l.opt = mixp_optimizer_new(l.ctx, &sgd);
    l.scaler = mixp_scaler_new(l.ctx, &scaling);
    if (recipe) CHECK_INT(mixp_autocast_set_recipe(l.ctx, recipe), MIXP_OK);
    return l;
}

/* y = x w', and backward of sum(y dy) unless dy is NULL. */
static mixp_tensor *walk(layer *l, const float *x, const float *dy, mixp_tensor **at) {
    const int64_t xs[2] = { M, K }, ys[2] = { M, N }, all = M * N;
    mixp_tensor *y = NULL, *loss;
    mixp_step_begin(l->ctx);
    *at = mixp_input(l->ctx, MIXP_F32, 2, xs, x);
    mixp_tensor_set_requires_grad(*at, 1);
    if (!dy) {
        MIXP_NO_GRAD(l->ctx) MIXP_AUTOCAST(l->ctx, MIXP_BF16) y = mixp_linear(l->ctx, *at, l->w, NULL);
        return y;
    }
    MIXP_AUTOCAST(l->ctx, MIXP_BF16) y = mixp_linear(l->ctx, *at, l->w, NULL);
    loss = mixp_mul(l->ctx, y, mixp_input(l->ctx, MIXP_F32, 2, ys, dy));
    loss = mixp_sum(l->ctx, mixp_reshape(l->ctx, loss, 1, &all), 0, 0);
    mixp_backward(l->ctx, mixp_scaler_scale(l->scaler, loss));
    return y;
}

/* The tensor NAME of a checkpoint, as f32. */
static void read_state(const char *path, const char *name, float *to, int64_t count) {
    mixp_safetensors *file = NULL;
    CHECK_INT(mixp_safetensors_read(path, &file, NULL, 0), MIXP_OK);
    const mixp_st_entry *e = file ? mixp_safetensors_find(file, name) : NULL;
    CHECK(e && e->dtype == MIXP_F32 && e->bytes == (size_t)count * sizeof *to);
    if (e && e->bytes == (size_t)count * sizeof *to) memcpy(to, e->data, e->bytes);
    mixp_safetensors_free(file);
}

static mixp_checkpoint checkpoint_of(layer *l) {
    mixp_checkpoint c;
    memset(&c, 0, sizeof c);
    c.ctx = l->ctx;
    c.scaler = l->scaler;
    c.optimizers = &l->opt;
    c.n_optimizers = 1;
    return c;
}

static const char *path_of(const char *name) {
    static char path[64];
    snprintf(path, sizeof path, "/tmp/mixprec_%s.%d", name, (int)getpid());
    return path;
}

/* The states in a checkpoint are those of the emulation. */
static void check_states(layer *l, const operand *o, rule r) {
    float history[3 * MOST], scales[3];
    const mixp_checkpoint c = checkpoint_of(l);
    const char *path = path_of("delayed");
    CHECK_INT(mixp_checkpoint_save(path, &c), MIXP_OK);
    read_state(path, "mixprec.recipe.scales.w", scales, 3);
    read_state(path, "mixprec.recipe.amax_history.w", history, 3 * r.history);
    remove(path);
    for (int i = 0; i < 3; i++) {
        CHECK((double)scales[i] == o[i].scale);
        CHECK((double)history[i * r.history] == o[i].now);
        for (int k = 1; k < r.history; k++) CHECK((double)history[i * r.history + k] == o[i].past[k - 1]);
    }
}

/* One walk beside the emulation: the three products. before: sum of the gradients so far. */
static void walk_beside(layer *l, operand *o, uint64_t key, double size, double *before) {
    static float x[M * K], dy[M * N], w[N * K], y[M * N], dx[M * K], dw[N * K];
    static double qx[M * K], qw[N * K], qdy[M * N], sum[N * K];
    mixp_tensor *at;
    fill(x, M * K, key, size);
    fill(dy, M * N, key + 1, 0.01 * size);
    mixp_read(l->w, w, MIXP_F32, N * K);
    mixp_read(walk(l, x, dy, &at), y, MIXP_F32, M * N);
    mixp_read(at->grad, dx, MIXP_F32, M * K);
    mixp_read(l->w->grad, dw, MIXP_F32, N * K);
    quantise(&o[0], x, M * K, 1, qx);
    quantise(&o[1], w, N * K, 1, qw);
    quantise(&o[2], dy, M * N, 1, qdy);
    CHECK(error_of(qx, 1, K, qw, 1, K, y, M, N, K, 1) < 1e-6);      /* y and dx are bf16 */
    CHECK(error_of(qdy, 1, N, qw, K, 1, dx, M, K, N, 1) < 1e-6);
    for (int i = 0; i < N * K; i++) sum[i] = (double)dw[i] - before[i];
    for (int i = 0; i < N * K; i++) before[i] = (double)dw[i];
    for (int i = 0; i < N * K; i++) dw[i] = (float)sum[i];
    CHECK(error_of(qdy, N, 1, qx, K, 1, dw, N, K, M, 0) < 1e-5);
}

/* Ten updates whose x and dy grow and shrink by powers of two and more: values are clipped. */
static void emulate(rule r) {
    static double sum[N * K];
    static float eval[M * K], dy[M * N];
    mixp_recipe recipe = recipe_of(r);
    layer l = layer_new(&recipe, NULL);
    operand o[3];
    mixp_tensor *at;
    memset(o, 0, sizeof o);
    for (int i = 0; i < 3; i++) o[i].scale = 1.0;
    o[0].max = o[1].max = 448.0;
    o[2].max = 57344.0;
    mixp_optimizer_add(l.opt, l.w, NULL);
    for (int step = 0; step < 10; step++) {
        const double size = pow(7.0, (double)(step * step % 5));
        mixp_zero_grad(l.opt);
        memset(sum, 0, sizeof sum);
        walk_beside(&l, o, (uint64_t)(10 * step), size, sum);
        if (step % 3 == 1) walk_beside(&l, o, (uint64_t)(10 * step + 5), 5 * size, sum);
        if (step == 2) {            /* an evaluation with larger values enters nothing */
            fill(eval, M * K, 77, 1e6);
            walk(&l, eval, NULL, &at);
        }
        if (step == 5 || step == 7) {       /* NaN or Inf in dy: a skipped step, which enters neither */
            fill(eval, M * K, 78, 3.0);
            fill(dy, M * N, 79, 1.0);
            dy[5] = mixp_f32_of_bits(step == 5 ? 0x7FC00000u : 0x7F800000u);
            walk(&l, eval, dy, &at);
            for (int i = 0; i < M * K; i++) o[0].now = fmax(o[0].now, fabs(in_bf16((double)eval[i])));
            if (step == 7) o[2].now = HUGE_VAL;
        }
        CHECK_INT(mixp_scaler_step(l.scaler, l.opt), MIXP_OK);
        CHECK_INT(mixp_scaler_update(l.scaler), MIXP_OK);
        CHECK_INT(mixp_scaler_verdict(l.scaler).outcome, step == 5 || step == 7 ? MIXP_STEP_SKIPPED : MIXP_STEP_APPLIED);
        for (int i = 0; i < 3; i++) turn(&o[i], r);
        check_states(&l, o, r);
    }
    CHECK_INT(mixp_context_error(l.ctx, NULL), MIXP_OK);
    CHECK_INT(mixp_autocast_recipe_counts(l.ctx).kept, 0);
    mixp_context_free(l.ctx);
}

static void against_emulation(void) {
    const rule rules[] = { { 4, 0, 0 }, { 4, 1, 2 }, { 1, 0, 0 }, { 1, 1, 1 }, { 16, 0, 1 }, { 2, 1, 0 } };
    for (size_t i = 0; i < sizeof rules / sizeof rules[0]; i++) emulate(rules[i]);
}

/* --- without a scaler, and what does not enter ------------------------------------------------ */

/* mixp_optimizer_step ends an update; a disabled scaler ends it once; a NaN enters nothing; zeros
 * leave the state; a linear whose weight is the result of an operator stays bf16. */
static void other_updates(void) {
    static float x[M * K], dy[M * N];
    const rule r = { 3, 0, 0 };
    mixp_recipe recipe = recipe_of(r);
    layer l = layer_new(&recipe, NULL);
    operand o[3];
    mixp_scaler_desc off;
    mixp_tensor *at, *y = NULL;
    int i;
    memset(&off, 0, sizeof off);
    off.disabled = 1;
    mixp_scaler *disabled = mixp_scaler_new(l.ctx, &off);
    memset(o, 0, sizeof o);
    for (i = 0; i < 3; i++) o[i].scale = 1.0;
    o[0].max = o[1].max = 448.0;
    o[2].max = 57344.0;
    mixp_optimizer_add(l.opt, l.w, NULL);
    memset(x, 0, sizeof x);
    memset(dy, 0, sizeof dy);
    x[0] = 3.0f;
    dy[1] = 2.0f;
    mixp_zero_grad(l.opt);
    l.scaler = disabled;
    walk(&l, x, dy, &at);
    for (i = 0; i < N * K; i++) o[1].now = fmax(o[1].now, fabs(in_bf16((double)mixp_get(mixpi_in(l.w->data, MIXP_F32), i))));
    o[0].now = 3.0;
    o[2].now = 2.0;
    CHECK_INT(mixp_scaler_step(disabled, l.opt), MIXP_OK);
    CHECK_INT(mixp_scaler_update(disabled), MIXP_OK);
    for (i = 0; i < 3; i++) turn(&o[i], r);
    check_states(&l, o, r);
    x[0] = 0.0f;            /* zeros, and a NaN */
    dy[7] = mixp_f32_of_bits(0x7FC00000u);
    mixp_zero_grad(l.opt);
    walk(&l, x, dy, &at);
    for (i = 0; i < N * K; i++) o[1].now = fmax(o[1].now, fabs(in_bf16((double)mixp_get(mixpi_in(l.w->data, MIXP_F32), i))));
    CHECK_INT(mixp_optimizer_step(l.opt), MIXP_OK);
    for (i = 0; i < 3; i++) turn(&o[i], r);
    check_states(&l, o, r);
    CHECK_INT(mixp_autocast_recipe_counts(l.ctx).kept, 0);
    mixp_step_begin(l.ctx);
    MIXP_AUTOCAST(l.ctx, MIXP_BF16) {
        const int64_t xs[2] = { M, K };
        y = mixp_linear(l.ctx, mixp_input(l.ctx, MIXP_F32, 2, xs, x), mixp_scale(l.ctx, l.w, 2.0f), NULL);
    }
    CHECK(y != NULL);
    CHECK_INT(mixp_autocast_recipe_counts(l.ctx).kept, 1);
    mixp_context_free(l.ctx);
}

/* --- resume --------------------------------------------------------------------------------- */

static void train(layer *l, int from, int to) {
    static float x[M * K], dy[M * N];
    mixp_tensor *at;
    for (int step = from; step < to; step++) {
        mixp_zero_grad(l->opt);
        fill(x, M * K, (uint64_t)(2 * step), pow(3.0, step % 4));
        fill(dy, M * N, (uint64_t)(2 * step + 1), 0.01);
        walk(l, x, dy, &at);
        mixp_scaler_step(l->scaler, l->opt);
        mixp_scaler_update(l->scaler);
    }
    CHECK_INT(mixp_context_error(l->ctx, NULL), MIXP_OK);
}

/* Bytes of a saved state. */
static size_t saved(layer *l, char *bytes, size_t room) {
    const mixp_checkpoint c = checkpoint_of(l);
    const char *path = path_of("bytes");
    FILE *f;
    size_t n = 0;
    CHECK_INT(mixp_checkpoint_save(path, &c), MIXP_OK);
    f = fopen(path, "rb");
    if (f) n = fread(bytes, 1, room, f);
    if (f) fclose(f);
    remove(path);
    return n;
}

static void refuses_state(const mixp_recipe *recipe, const char *path, const char *why) {
    layer l = layer_new(recipe, NULL);
    const mixp_checkpoint c = checkpoint_of(&l);
    static char before[1 << 16], after[1 << 16];
    const char *message = "";
    mixp_optimizer_add(l.opt, l.w, NULL);
    size_t n = saved(&l, before, sizeof before);
    CHECK_INT(mixp_checkpoint_load(path, &c), MIXP_ERR_SHAPE);
    CHECK_INT(mixp_context_error(l.ctx, &message), MIXP_ERR_SHAPE);
    CHECK_TEXT(message, why);
    mixp_context_clear_error(l.ctx);
    if (!recipe) {          /* the weights can be had without the state */
        CHECK(saved(&l, after, sizeof after) == n && memcmp(before, after, n) == 0);
        CHECK_INT(mixp_checkpoint_load_weights(path, l.ctx, NULL), MIXP_OK);
    }
    mixp_context_free(l.ctx);
}

static void resume(void) {
    const rule r = { 5, 0, 0 }, longer = { 6, 0, 0 };
    mixp_recipe recipe = recipe_of(r), other = recipe_of(longer), mx;
    static char one[1 << 17], two[1 << 17];
    char path[80];
    layer l = layer_new(&recipe, NULL);
    mixp_checkpoint c = checkpoint_of(&l);
    snprintf(path, sizeof path, "%s", path_of("resume"));
    mixp_optimizer_add(l.opt, l.w, NULL);
    train(&l, 0, 4);
    CHECK_INT(mixp_checkpoint_save(path, &c), MIXP_OK);
    train(&l, 4, 9);
    size_t n = saved(&l, one, sizeof one);
    CHECK(n > 0);
    mixp_context_free(l.ctx);
    l = layer_new(&recipe, NULL);
    mixp_optimizer_add(l.opt, l.w, NULL);
    train(&l, 20, 21);              /* a state of its own, which the file replaces */
    c = checkpoint_of(&l);
    CHECK_INT(mixp_checkpoint_load(path, &c), MIXP_OK);
    train(&l, 4, 9);
    CHECK(saved(&l, two, sizeof two) == n && memcmp(one, two, n) == 0);
    mixp_context_free(l.ctx);
    l = layer_new(&recipe, NULL);
    mixp_optimizer_add(l.opt, l.w, NULL);
    c = checkpoint_of(&l);
    CHECK_INT(mixp_checkpoint_load(path, &c), MIXP_OK);
    train(&l, 4, 9);
    memset(two, 0, sizeof two);
    CHECK(saved(&l, two, sizeof two) == n && memcmp(one, two, n) == 0);
    mixp_context_free(l.ctx);
    refuses_state(NULL, path, "call mixp_autocast_set_recipe first");
    memset(&mx, 0, sizeof mx);
    mx.kind = MIXP_RECIPE_MXFP8;
    refuses_state(&mx, path, "the file has the state of the recipe fp8_delayed");
    refuses_state(&other, path, "f32 [3, 5], not f32 [3, 6]");
    l = layer_new(NULL, NULL);      /* a bf16 checkpoint: the state starts from its beginning */
    mixp_optimizer_add(l.opt, l.w, NULL);
    train(&l, 0, 2);
    c = checkpoint_of(&l);
    CHECK_INT(mixp_checkpoint_save(path, &c), MIXP_OK);
    mixp_context_free(l.ctx);
    l = layer_new(&recipe, NULL);
    mixp_optimizer_add(l.opt, l.w, NULL);
    train(&l, 0, 2);
    c = checkpoint_of(&l);
    CHECK_INT(mixp_checkpoint_load(path, &c), MIXP_OK);
    {
        operand o[3];
        memset(o, 0, sizeof o);
        for (int i = 0; i < 3; i++) o[i].scale = 1.0;
        check_states(&l, o, r);
    }
    mixp_context_free(l.ctx);
    remove(path);
}

/* Delayed scaling by a rule: the state is kept and resumed as under one recipe; a rule that leaves the weight in bf16
 * has no use for the file's state. */
static void resume_by_rules(void) {
    const rule r = { 5, 0, 0 };
    const mixp_recipe recipe = recipe_of(r);
    mixp_recipe mx;
    const mixp_recipe_rule rules[2] = { { "w", &recipe }, { "*", NULL } };
    static char one[1 << 17], two[1 << 17];
    char path[80];
    mixp_checkpoint c;
    const char *message = "";
    size_t n = 0;
    int way;
    memset(&mx, 0, sizeof mx);
    snprintf(path, sizeof path, "%s", path_of("by_rules"));
    for (way = 0; way < 3; way++) {     /* 0: one recipe, nine steps; 1: rules, nine steps; 2: rules, resumed after four */
        layer l = layer_new(way ? NULL : &recipe, NULL);
        if (way) CHECK_INT(mixp_autocast_set_recipes(l.ctx, rules, 2), MIXP_OK);
        mixp_optimizer_add(l.opt, l.w, NULL);
        c = checkpoint_of(&l);
        if (way == 2) CHECK_INT(mixp_checkpoint_load(path, &c), MIXP_OK);
        else train(&l, 0, 4);
        if (way == 1) CHECK_INT(mixp_checkpoint_save(path, &c), MIXP_OK);
        train(&l, 4, 9);
        if (!way) n = saved(&l, one, sizeof one);
        else CHECK(n > 0 && saved(&l, two, sizeof two) == n && memcmp(one, two, n) == 0);
        mixp_context_free(l.ctx);
    }
    {
        layer l = layer_new(NULL, NULL);
        const mixp_recipe_rule other[3] = { { "w", &mx }, { "?", NULL }, { "*", &recipe } };
        CHECK_INT(mixp_autocast_set_recipes(l.ctx, other, 3), MIXP_OK);
        mixp_optimizer_add(l.opt, l.w, NULL);
        c = checkpoint_of(&l);
        CHECK_INT(mixp_checkpoint_load(path, &c), MIXP_ERR_SHAPE);
        mixp_context_error(l.ctx, &message);
        CHECK_TEXT(message, "the file has the state of the recipe fp8_delayed");
        mixp_context_free(l.ctx);
    }
    remove(path);
}

/* A file whose state no update can have written. */
static void bad_numbers(void) {
    const rule r = { 3, 0, 0 };
    mixp_recipe recipe = recipe_of(r);
    const float bad[4] = { -1.0f, 0.0f, mixp_f32_of_bits(0x7F800000u), mixp_f32_of_bits(0x7FC00000u) };
    static char bytes[1 << 16];
    char path[80];
    layer l = layer_new(&recipe, NULL);
    mixp_checkpoint c = checkpoint_of(&l);
    snprintf(path, sizeof path, "%s", path_of("bad"));
    mixp_optimizer_add(l.opt, l.w, NULL);
    train(&l, 0, 2);
    for (int k = 0; k < 2; k++)
        for (int i = 0; i < 4; i++) {
            const char *name = k ? "mixprec.recipe.scales.w" : "mixprec.recipe.amax_history.w";
            const int good = !k && (i == 1 || i == 2);      /* an amax may be 0 or Inf */
            const size_t n = saved(&l, bytes, sizeof bytes);
            char *at = find_bytes(bytes, n, name, strlen(name)), *offset;
            uint64_t header = 0;
            FILE *f = fopen(path, "wb");
            memcpy(&header, bytes, 8);
            offset = at ? strstr(at, "\"data_offsets\":[") : NULL;
            CHECK(f && offset);
            if (!f || !offset) return;
            memcpy(bytes + 8 + header + strtoull(offset + 16, NULL, 10), &bad[i], 4);
            fwrite(bytes, 1, n, f);
            fclose(f);
            CHECK_INT(mixp_checkpoint_load(path, &c), good ? MIXP_OK : MIXP_ERR_FORMAT);
            mixp_context_clear_error(l.ctx);
        }
    remove(path);
    mixp_context_free(l.ctx);
}

/* --- ranks ---------------------------------------------------------------------------------- */

enum { RANKS = 2, STEPS = 8 };
typedef struct outcome { float w[N * K]; char why[256]; int done; size_t n; char state[1 << 15]; } outcome;

/* A rank's part of step `step`; the parts differ in size. */
static void part_of(int step, int part, float *x, float *dy) {
    fill(x, M * K, (uint64_t)(100 * step + part), pow(3.0, (step + 2 * part) % 4));
    fill(dy, M * N, (uint64_t)(100 * step + part + 50), 0.01 * (1 + part));
}

static void take(layer *l, outcome *out, int has_state) {
    const char *why = "";
    const mixp_checkpoint c = checkpoint_of(l);
    char path[80];
    snprintf(path, sizeof path, "%s", path_of("rank"));
    mixp_context_error(l->ctx, &why);
    snprintf(out->why, sizeof out->why, "%s", why ? why : "");
    mixp_read(l->w, out->w, MIXP_F32, N * K);
    if (has_state && mixp_checkpoint_save(path, &c) == MIXP_OK) {
        read_state(path, "mixprec.recipe.scales.w", (float *)(void *)out->state, 3);
        read_state(path, "mixprec.recipe.amax_history.w", (float *)(void *)out->state + 3, 3 * 4);
    }
    remove(path);
    out->done = 1;
}

/* A region with another recipe, in which no linear runs. */
static void pass_region(mixp_context *ctx, mixp_recipe other) {
    mixp_autocast region;
    memset(&region, 0, sizeof region);
    other.margin += 3;
    region.dtype = MIXP_BF16;
    region.level = 1;
    region.recipe = &other;
    const int opened = mixp_autocast_open_with(ctx, &region);
    CHECK(opened >= 0);
    mixp_autocast_close(ctx, opened);
}

/* Evaluates under another recipe: with no_grad inside the region, around it, or after
 * mixp_eval_begin. */
static void evaluate(layer *l, mixp_recipe other, int how) {
    static float x[M * K];
    const int64_t xs[2] = { M, K };
    mixp_autocast region;
    mixp_tensor *y = NULL, *in;
    memset(&region, 0, sizeof region);
    other.margin += 5;
    region.dtype = MIXP_BF16;
    region.level = 1;
    region.recipe = &other;
    fill(x, M * K, 99, 1e5);
    if (how == 2) CHECK_INT(mixp_eval_begin(l->ctx), MIXP_OK);
    else mixp_step_begin(l->ctx);
    in = mixp_input(l->ctx, MIXP_F32, 2, xs, x);
    if (how == 1) CHECK_INT(mixp_no_grad_open(l->ctx), 0);
    CHECK_INT(mixp_autocast_open_with(l->ctx, &region), how == 1);
    if (how == 0) MIXP_NO_GRAD(l->ctx) y = mixp_linear(l->ctx, in, l->w, NULL);
    if (how != 0) y = mixp_linear(l->ctx, in, l->w, NULL);
    CHECK(y != NULL);
    mixp_autocast_close(l->ctx, 0);
}

#ifdef _WIN32
static void ranks(void) { SKIP("no fork"); }
#else
/* A step whose forward opens a region and applies no linear. */
static void walk_past(layer *l) {
    const int64_t all = N * K;
    mixp_tensor *y = NULL;
    mixp_step_begin(l->ctx);
    MIXP_AUTOCAST(l->ctx, MIXP_BF16) y = mixp_cast(l->ctx, mixp_mul(l->ctx, l->w, l->w), MIXP_F32);
    y = mixp_sum(l->ctx, mixp_reshape(l->ctx, y, 1, &all), 0, 0);
    mixp_backward(l->ctx, mixp_scaler_scale(l->scaler, y));
}

/* differs: 1: rank 1 has another margin; 2: training is bf16; 3: rank 1 has no linear in its first
 * step, nor in the one in which all ranks change the margin; 4: the same, under rules; 5: rank 1 has another rule. Rank 0
 * alone evaluates under other recipes. */
static void rank_trains(const mixp_ranks_desc *ranks, int differs, outcome *out) {
    static float x[M * K], dy[M * N];
    const rule r = { 4, 0, differs == 1 || differs == 2 ? ranks->rank : 0 };
    mixp_recipe recipe = recipe_of(r);
    const mixp_recipe_rule one = { differs == 5 && ranks->rank ? "w*" : "w", &recipe };
    const int late = differs == 3 || differs == 4;
    layer l = layer_new(differs == 2 ? NULL : &recipe, ranks);
    mixp_tensor *at;
    mixp_optimizer_add(l.opt, l.w, NULL);
    for (int step = 0; step < STEPS && mixp_context_error(l.ctx, NULL) == MIXP_OK; step++) {
        mixp_zero_grad(l.opt);
        part_of(step, ranks->rank, x, dy);
        if (late && step == 5) recipe.margin = 2;
        if (differs == 3 && step == 5) CHECK_INT(mixp_autocast_set_recipe(l.ctx, &recipe), MIXP_OK);
        if (differs > 3 && step % 5 == 0) CHECK_INT(mixp_autocast_set_recipes(l.ctx, &one, 1), MIXP_OK);
        if (late && ranks->rank == 1 && step % 5 == 0) walk_past(&l);
        else walk(&l, x, dy, &at);
        pass_region(l.ctx, recipe);
        if (ranks->rank == 0 && step == 3) walk(&l, x, NULL, &at);
        if (ranks->rank == 0 && step > 3) evaluate(&l, recipe, step % 3);
        mixp_scaler_step(l.scaler, l.opt);
        mixp_scaler_update(l.scaler);
    }
    take(&l, out, differs != 2);
    mixp_context_free(l.ctx);
}

static outcome *trained(int differs) {
    outcome *all = (outcome *)mmap(NULL, RANKS * sizeof *all, PROT_READ | PROT_WRITE,
                                   MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int status = 0;
    fflush(stdout);
    pid_t child = fork();
    if (!child) {
        mixp_ranks_desc ranks = ddp_fork(RANKS);
        ranks.seconds = 20;
        alarm(60);
        rank_trains(&ranks, differs, &all[ranks.rank]);
        fflush(stdout);
        fclose(stderr);
        _exit(ddp_wait(test_bad != 0));
    }
    waitpid(child, &status, 0);
    if (differs != 1 && differs != 5) CHECK_INT(status, 0);
    return all;
}

/* One process walks the parts in turn, as micro-batches, and gives their sum as a view. */
static void one_trains(outcome *out) {
    static float x[M * K], dy[M * N], sum[N * K], one[N * K];
    const int64_t shape[2] = { N, K };
    const rule r = { 4, 0, 0 };
    mixp_recipe recipe = recipe_of(r);
    layer l = layer_new(&recipe, NULL);
    mixp_optimizer *forget = new_sgd(l.ctx);
    mixp_tensor *at;
    mixp_optimizer_add(l.opt, l.w, mixp_view(l.ctx, "", MIXP_F32, 2, shape, sum));
    mixp_optimizer_add(forget, l.w, NULL);
    for (int step = 0; step < STEPS; step++) {
        for (int part = 0; part < RANKS; part++) {
            mixp_zero_grad(forget);
            part_of(step, part, x, dy);
            walk(&l, x, dy, &at);
            mixp_read(l.w->grad, one, MIXP_F32, N * K);
            for (int i = 0; i < N * K; i++) sum[i] = part ? sum[i] + one[i] : one[i];
        }
        for (int i = 0; i < N * K; i++) sum[i] *= 1.0f / RANKS;
        CHECK_INT(mixp_scaler_step(l.scaler, l.opt), MIXP_OK);
        CHECK_INT(mixp_scaler_update(l.scaler), MIXP_OK);
    }
    take(&l, out, 1);
    mixp_context_free(l.ctx);
}

static void ranks(void) {
    static outcome one;
    outcome *all = trained(0), *late, *ruled;
    int r;
    one_trains(&one);
    CHECK_TEXT(one.why, "");
    for (r = 0; r < RANKS; r++) {
        CHECK_INT(all[r].done, 1);
        if (*all[r].why) printf("  rank %d: %s\n", r, all[r].why);
        CHECK(!*all[r].why);
        CHECK(memcmp(all[r].w, one.w, sizeof one.w) == 0);
        CHECK(memcmp(all[r].state, one.state, sizeof one.state) == 0);
    }
    munmap(all, RANKS * sizeof *all);
    all = trained(1);
    for (r = 0; r < RANKS; r++) CHECK_TEXT(all[r].why, "the setting 'recipe.margin' is 0 on rank 0 and 1 on rank 1");
    munmap(all, RANKS * sizeof *all);
    all = trained(2);
    for (r = 0; r < RANKS; r++) {
        if (*all[r].why) printf("  rank %d: %s\n", r, all[r].why);
        CHECK(all[r].done && !*all[r].why);
        CHECK(memcmp(all[r].w, all[0].w, sizeof one.w) == 0);
    }
    munmap(all, RANKS * sizeof *all);
    late = trained(3);
    ruled = trained(4);
    for (r = 0; r < RANKS; r++) {
        if (*late[r].why) printf("  rank %d: %s\n", r, late[r].why);
        CHECK(late[r].done && !*late[r].why);
        CHECK(memcmp(late[r].w, late[0].w, sizeof one.w) == 0);
        CHECK(memcmp(late[r].state, late[0].state, sizeof one.state) == 0);
        CHECK(ruled[r].done && !*ruled[r].why);
        CHECK(memcmp(ruled[r].w, late[0].w, sizeof one.w) == 0);
        CHECK(memcmp(ruled[r].state, late[0].state, sizeof one.state) == 0);
    }
    munmap(late, RANKS * sizeof *late);
    munmap(ruled, RANKS * sizeof *ruled);
    all = trained(5);
    for (r = 0; r < RANKS; r++) CHECK_TEXT(all[r].why, "the setting 'the hash of the rules of mixp_autocast_set_recipes' is");
    munmap(all, RANKS * sizeof *all);
}
#endif

/* --- refusals ------------------------------------------------------------------------------- */

#define REFUSED(change, text)                                                                     \
    do { const char *why_ = ""; recipe = recipe_of(r); change;                                      \
         CHECK_INT(mixp_autocast_set_recipe(l.ctx, &recipe), MIXP_ERR_ARGUMENT);                    \
         mixp_context_error(l.ctx, &why_); CHECK_TEXT(why_, text);                                  \
         mixp_context_clear_error(l.ctx); } while (0)

static void refused(void) {
    static float x[M * K], dy[M * N];
    const rule r = { 4, 0, 0 };
    mixp_recipe recipe = recipe_of(r);
    layer l = layer_new(&recipe, NULL);
    mixp_quantise_args k;
    mixp_bf16 y[4];
    float amax = -1.0f, decode = -1.0f;
    mixp_tensor *at;
    REFUSED(recipe.history = -1, "history must lie in 1 to 2^20");
    REFUSED(recipe.history = (1 << 20) + 1, "history must lie in 1 to 2^20");
    REFUSED(recipe.margin = -1, "margin must lie in 0 to 100");
    REFUSED(recipe.margin = 101, "margin must lie in 0 to 100");
    REFUSED(recipe.most_recent = 2, "neither 0 nor 1");
    REFUSED(recipe.no_2d = -1, "neither 0 nor 1");
    mixp_optimizer_add(l.opt, l.w, NULL);
    recipe = recipe_of(r);
    recipe.history = 9;             /* may change as long as no linear has used it */
    CHECK_INT(mixp_autocast_set_recipe(l.ctx, &recipe), MIXP_OK);
    fill(x, M * K, 1, 1.0);
    fill(dy, M * N, 2, 1.0);
    walk(&l, x, dy, &at);
    REFUSED(recipe.history = 4, "history differs from the context's earlier one");
    mixp_context_free(l.ctx);
    l = layer_new(NULL, NULL);
    memset(&k, 0, sizeof k);
    k.rows = 1;
    k.cols = 4;
    k.x = mixpi_in(x, MIXP_F32);
    k.y = y;
    k.element = MIXP_F8_E4M3;
    k.amax = &amax;
    k.given = -1.0f;
    CHECK_INT(mixp_quantise(mixp_context_exec(l.ctx), &k, &decode), MIXP_ERR_ARGUMENT);
    k.given = mixp_f32_of_bits(0x7FC00000u);
    CHECK_INT(mixp_quantise(mixp_context_exec(l.ctx), &k, &decode), MIXP_ERR_ARGUMENT);
    CHECK(amax == -1.0f && decode == -1.0f);
    CHECK_TEXT(mixp_recipe_name(MIXP_RECIPE_FP8_DELAYED), "fp8_delayed");
    mixp_context_free(l.ctx);
}

int main(void) {
    RUN(against_emulation);
    RUN(other_updates);
    RUN(resume);
    RUN(resume_by_rules);
    RUN(bad_numbers);
    RUN(ranks);
    RUN(refused);
    return test_report();
}
