/* test_reference.c - mixprec compared with numbers recorded from PyTorch (tests/reference/).
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include "args.h"
#include "test.h"
#include "new_optimizer.h"
#include "reference/generate.h"
#include "reference/gpt.h"
#include "reference/operators.h"
#include "reference/autocast.h"
#include "reference/optimizers.h"
#include "reference/scaler.h"
#include <stdlib.h>

#define COUNT_OF(a) ((int)(sizeof(a) / sizeof((a)[0])))

static const mixp_device *device;   /* the one under test */

/* Runs fn on the CPU, held to each instruction set that this machine has. */
static void on_each_cpu(void (*fn)(void)) {
    for (int isa = 0; isa < MIXP_ISA_COUNT; isa++) {
        device = mixp_cpu_with((mixp_isa)isa);
        if (device) fn();
    }
}

static mixp_context *context(void) {
    mixp_context_desc d;
    memset(&d, 0, sizeof d);
    d.device = device;
    return mixp_context_new(&d);
}

/* Fails the test, with the message, when the context holds an error. */
static void end_context(mixp_context *ctx) {
    const char *message = "";
    if (mixp_context_error(ctx, &message) != MIXP_OK) {
        test_bad++;
        TEST_SHOW("%s: %s", device->name, message);
    }
    mixp_context_free(ctx);
}

static mixp_tensor *param(mixp_context *ctx, const char *name, mixp_dtype dtype, int rank,
                          const int64_t *shape, const float *values) {
    mixp_tensor *t = mixp_param(ctx, name, dtype, rank, shape);
    if (t) mixp_write(t, values, MIXP_F32, t->count);
    return t;
}

/* ==== operators ========================================================================= */

enum { MAX_VALUES = 128 };

typedef struct op_inputs {
    int          n, wants_grad[3];
    mixp_tensor *t[3];
} op_inputs;

/* One input from its text, "s2,3": see operators.h. Returns where the next one begins. */
static const char *make_input(mixp_context *ctx, const char *text, uint32_t *gen,
                              mixp_dtype dtype, op_inputs *in) {
    float v[MAX_VALUES];
    int32_t ids[MAX_VALUES];
    int64_t shape[MIXP_MAX_RANK];
    mixp_tensor *t;
    int i, rank = 0, n = 1;
    char kind = *text, *end;
    do {
        shape[rank] = strtol(text + 1, &end, 10);
        n *= (int)shape[rank++];
        text = end;
    } while (*text == ',');
    in->wants_grad[in->n] = strchr("spq", kind) != NULL;
    if (kind == 'i' || kind == 'j') {
        gen_ints(gen, OP_VOCAB, ids, n);
        for (i = 0; kind == 'j' && i < n; i += 3) ids[i] = MIXP_IGNORE;
        in->t[in->n++] = mixp_input(ctx, MIXP_I32, rank, shape, ids);
        return text;
    }
    gen_short(gen, v, n);
    for (i = 0; i < n; i++) {
        if (kind == 'p') v[i] = fabsf(v[i]) + 1.0f / 64.0f;
        if (kind == 't' || kind == 'q') v[i] = (v[i] + 2.0f) / 4.0f;
        if (kind == 'q' && v[i] < 0.125f) v[i] = 0.125f;
    }
    if (kind != 't') t = param(ctx, NULL, dtype, rank, shape, v);
    else t = mixp_cast(ctx, mixp_input(ctx, MIXP_F32, rank, shape, v), dtype);
    in->t[in->n++] = t;
    return text;
}

static mixp_tensor *apply(mixp_context *c, const char *name, mixp_tensor *const *t) {
    const int64_t shape_3_4[] = { 3, 4 };
#define IS(text) if (!strcmp(name, text))
    IS("linear")               return mixp_linear(c, t[0], t[1], t[2]);
    IS("linear_no_bias")       return mixp_linear(c, t[0], t[1], NULL);
    IS("matmul")               return mixp_matmul(c, t[0], t[1], 0, 0);
    IS("matmul_trans_a")       return mixp_matmul(c, t[0], t[1], 1, 0);
    IS("matmul_trans_b")       return mixp_matmul(c, t[0], t[1], 0, 1);
    IS("attention_causal")     return mixp_attention(c, t[0], 2, 1, 0.0f);
    IS("attention_full")       return mixp_attention(c, t[0], 2, 0, 0.0f);
    IS("attention_scaled")     return mixp_attention(c, t[0], 2, 1, 0.25f);
    IS("add")                  return mixp_add(c, t[0], t[1]);
    IS("sub")                  return mixp_sub(c, t[0], t[1]);
    IS("mul")                  return mixp_mul(c, t[0], t[1]);
    IS("div")                  return mixp_div(c, t[0], t[1]);
    IS("scale")                return mixp_scale(c, t[0], 0.75f);
    IS("relu")                 return mixp_relu(c, t[0]);
    IS("gelu")                 return mixp_gelu(c, t[0]);
    IS("gelu_tanh")            return mixp_gelu_tanh(c, t[0]);
    IS("silu")                 return mixp_silu(c, t[0]);
    IS("tanh")                 return mixp_tanh(c, t[0]);
    IS("sigmoid")              return mixp_sigmoid(c, t[0]);
    IS("sqrt")                 return mixp_sqrt(c, t[0]);
    IS("exp")                  return mixp_exp(c, t[0]);
    IS("log")                  return mixp_log(c, t[0]);
    IS("pow_3")                return mixp_pow(c, t[0], 3.0f);
    IS("pow_half")             return mixp_pow(c, t[0], 0.5f);
    IS("sum_0")                return mixp_sum(c, t[0], 0, 0);
    IS("sum_keep")             return mixp_sum(c, t[0], 1, 1);
    IS("sum_all")              return mixp_sum(c, t[0], MIXP_ALL, 0);
    IS("mean_last")            return mixp_mean(c, t[0], -1, 0);
    IS("softmax")              return mixp_softmax(c, t[0]);
    IS("log_softmax")          return mixp_log_softmax(c, t[0]);
    IS("layer_norm")           return mixp_layer_norm(c, t[0], t[1], t[2], 1e-5f);
    IS("layer_norm_plain")     return mixp_layer_norm(c, t[0], NULL, NULL, 1e-5f);
    IS("rms_norm")             return mixp_rms_norm(c, t[0], t[1], 1e-5f);
    IS("embedding")            return mixp_embedding(c, t[0], t[1]);
    IS("cross_entropy")        return mixp_cross_entropy(c, t[0], t[1], MIXP_IGNORE);
    IS("cross_entropy_ignore") return mixp_cross_entropy(c, t[0], t[1], MIXP_IGNORE);
    IS("mse")                  return mixp_mse(c, t[0], t[1]);
    IS("bce_with_logits")      return mixp_bce_with_logits(c, t[0], t[1]);
    IS("bce")                  return mixp_bce(c, t[0], t[1]);
    IS("dropout_0")            return mixp_dropout(c, t[0], 0.0f, 1);
    IS("reshape")              return mixp_reshape(c, t[0], 2, shape_3_4);
    IS("transpose")            return mixp_transpose(c, t[0], 0, 2);
    IS("concat")               return mixp_concat(c, 2, t, 1);
#undef IS
    return NULL;
}

/* How far a result of this dtype may lie from the exact value: a few roundings. */
static double tolerance(mixp_dtype dtype, double want) {
    double ulp = dtype == MIXP_F16 ? 1.0 / 1024 : dtype == MIXP_BF16 ? 1.0 / 128 : 1.0 / 1048576;
    return 3.0 * ulp * (fabs(want) > 1.0 ? fabs(want) : 1.0);
}

static void compare(const char *op, const char *what, const mixp_tensor *t, mixp_dtype dtype,
                    const double *want) {
    double got[MAX_VALUES];
    int64_t i;
    if (!t || mixp_read(t, got, MIXP_F64, t->count) != MIXP_OK) {
        test_bad++;
        TEST_SHOW("%s %s: no %s", device->name, op, what);
        return;
    }
    for (i = 0; i < t->count; i++) {
        if (fabs(got[i] - want[i]) <= tolerance(dtype, want[i])) continue;
        test_bad++;
        TEST_SHOW("%s %s in %s: %s[%d] is %.9g, not %.9g", device->name, op,
                  mixp_dtype_name(dtype), what, (int)i, got[i], want[i]);
    }
}

/* Returns how many recorded values the case has. */
static int check_operator(const op_case *c, int index, mixp_dtype dtype, const double *want) {
    static const char *const grad_name[] = { "gradient 0", "gradient 1", "gradient 2" };
    mixp_context *ctx = context();
    op_inputs in;
    float v[MAX_VALUES];
    int i, used = c->count;
    uint32_t gen = gen_start(200u + (uint32_t)index);
    memset(&in, 0, sizeof in);
    mixp_step_begin(ctx);
    for (const char *text = c->inputs; *text; text += *text == ' ')
        text = make_input(ctx, text, &gen, dtype, &in);
    gen_short(&gen, v, c->count);
    mixp_tensor *y = apply(ctx, c->name, in.t);
    if (y) {
        CHECK_INT(y->count, c->count);
        compare(c->name, "result", y, dtype, want);
        mixp_tensor *dy = mixp_input(ctx, MIXP_F32, y->rank, y->shape, v);
        mixp_backward(ctx, mixp_sum(ctx, mixp_mul(ctx, y, dy), MIXP_ALL, 0));
        for (i = 0; i < in.n; i++) {
            if (!in.wants_grad[i]) continue;
            compare(c->name, grad_name[i], in.t[i]->grad, dtype, want + used);
            used += (int)in.t[i]->count;
        }
    }
    end_context(ctx);
    return used;
}

static void operators_here(void) {
    static const mixp_dtype dtypes[] = { MIXP_F32, MIXP_F16, MIXP_BF16 };
    int d, i, at;
    for (d = 0; d < 3; d++) {
        for (i = at = 0; i < OP_CASES; i++)
            at += check_operator(&op_cases[i], i, dtypes[d], op_values + at);
        CHECK_INT(at, COUNT_OF(op_values));
    }
}
static void test_operators(void) { on_each_cpu(operators_here); }

/* ==== autocast ========================================================================== */

static mixp_dtype dtype_of(char letter) {
    return letter == 'h' ? MIXP_F16 : letter == 'b' ? MIXP_BF16 : MIXP_F32;
}

/* One call in a region; want is a letter, or '-' for an error. */
static void check_autocast(const autocast_row *row, const char *letters, mixp_dtype region,
                           char want) {
    mixp_context *ctx = context();
    mixp_tensor *y = NULL;
    op_inputs in;
    const char *text;
    uint32_t gen = gen_start(0);
    memset(&in, 0, sizeof in);
    mixp_step_begin(ctx);
    for (text = row->inputs; *text; text += *text == ' ') {
        int is_id = *text == 'i' || *text == 'j';
        text = make_input(ctx, text, &gen, dtype_of(*letters), &in);
        if (!is_id) letters++;
    }
    MIXP_AUTOCAST(ctx, region) { y = apply(ctx, row->op, in.t); }
    if (want == '-') {
        CHECK(!y && mixp_context_error(ctx, NULL) == MIXP_ERR_BANNED);
        mixp_context_clear_error(ctx);
    } else if (!y || y->dtype != dtype_of(want)) {
        test_bad++;
        TEST_SHOW("%s of %.3s in %s: %s, not %c", row->op, letters - 1, mixp_dtype_name(region),
                  y ? mixp_dtype_name(y->dtype) : "NULL", want);
    }
    end_context(ctx);
}

static void test_autocast_dtypes(void) {
    int i, k;
    device = mixp_cpu();
    for (i = 0; i < AUTOCAST_ROWS; i++) {
        const autocast_row *row = &autocast_rows[i];
        size_t step = strcspn(row->in, " ") + 1;
        for (k = 0; row->f16[k]; k++) {
            check_autocast(row, row->in + (size_t)k * step, MIXP_F16, row->f16[k]);
            check_autocast(row, row->in + (size_t)k * step, MIXP_BF16, row->bf16[k]);
        }
        CHECK_INT((size_t)k * step, strlen(row->in) + 1);
    }
}

/* ==== optimizers ======================================================================== */

static mixp_optimizer *new_optimizer(mixp_context *ctx, const opt_case *c, double max_norm) {
    mixp_optimizer_desc a = mixp_adamw_defaults();
    mixp_optimizer_desc s = mixp_sgd_defaults();
    if (!strcmp(c->kind, "sgd")) {
        s.lr = c->lr;
        s.momentum = c->a;
        s.dampening = c->b;
        s.weight_decay = c->weight_decay;
        s.nesterov = c->nesterov;
        s.max_norm = max_norm;
        return mixp_optimizer_new(ctx, &s);
    }
    a.lr = c->lr;
    a.beta1 = c->a;
    a.beta2 = c->b;
    a.eps = c->eps;
    a.weight_decay = c->weight_decay;
    a.max_norm = max_norm;
    mixp_optimizer_desc adam = args_adam(&a);
    return strcmp(c->kind, "adam") ? mixp_optimizer_new(ctx, &a) : mixp_optimizer_new(ctx, &adam);
}

/* inside 1: clipping by the step itself; 0: by mixp_clip_grad_norm before it. */
static void check_optimizer(int index, int inside) {
    const opt_case *c = &opt_cases[index];
    const double *exact = opt_f64 + index * OPT_STEPS * OPT_COUNT;
    const double *torch = opt_f32 + index * OPT_STEPS * OPT_COUNT;
    const int64_t shape[] = { OPT_COUNT };
    const double allowed = 2.0 * opt_spread[index] + 6e-8;
    mixp_context *ctx = context();
    mixp_optimizer *opt = new_optimizer(ctx, c, inside ? c->max_norm : 0.0);
    uint32_t gen = gen_start(3);
    float v[OPT_COUNT], grad[OPT_COUNT];
    int32_t shift[OPT_COUNT];
    gen_fill(&gen, 1.0f, v, OPT_COUNT);
    memset(grad, 0, sizeof grad);
    mixp_tensor *p = param(ctx, NULL, MIXP_F32, 1, shape, v);
    mixp_tensor *g = mixp_view(ctx, "g", MIXP_F32, 1, shape, grad);
    mixp_optimizer_add(opt, p, g);
    for (int step = 0; step < OPT_STEPS; step++) {
        gen_fill(&gen, 1.0f, grad, OPT_COUNT);
        gen_ints(&gen, 25, shift, OPT_COUNT);
        for (int i = 0; i < OPT_COUNT; i++) grad[i] = ldexpf(grad[i], -shift[i]);
        mixp_step_begin(ctx);
        if (!inside && c->max_norm > 0) mixp_clip_grad_norm(opt, c->max_norm);
        CHECK_INT(mixp_optimizer_step(opt), MIXP_OK);
        mixp_read(p, v, MIXP_F32, OPT_COUNT);
        for (int i = 0; i < OPT_COUNT; i++, exact++, torch++) {
            if (fabs((double)v[i] - *exact) <= allowed && fabs((double)v[i] - *torch) <= allowed)
                continue;
            test_bad++;
            TEST_SHOW("%s %s step %d [%d]: %.9g, not %.9g", device->name, c->name, step, i,
                      (double)v[i], *exact);
        }
    }
    end_context(ctx);
}

static void optimizers_here(void) {
    for (int i = 0; i < OPT_CASES; i++) {
        check_optimizer(i, 1);
        check_optimizer(i, 0);
    }
}
static void test_optimizers(void) { on_each_cpu(optimizers_here); }

static void clip_here(void) {
    const int64_t five[] = { 5 }, three[] = { 3 };
    for (int row = 0; row < OPT_CLIPS; row++) {
        const double *want = opt_clip + row * 10;
        mixp_context *ctx = context();
        mixp_optimizer *opt = new_sgd(ctx);
        mixp_optimizer_desc plain = mixp_sgd_defaults();
        uint32_t gen = gen_start(4);
        float grad[8];
        if (!opt) { mixp_context_clear_error(ctx); opt = mixp_optimizer_new(ctx, &plain); }
        gen_fill(&gen, 1.0f, grad, 5);
        gen_fill(&gen, 1.0f, grad + 5, 3);
        for (int i = 0; i < 8; i++) grad[i] *= (float)want[0];
        mixp_optimizer_add(opt, mixp_param(ctx, "a", MIXP_F32, 1, five),
                           mixp_view(ctx, "da", MIXP_F32, 1, five, grad));
        mixp_optimizer_add(opt, mixp_param(ctx, "b", MIXP_F32, 1, three),
                           mixp_view(ctx, "db", MIXP_F32, 1, three, grad + 5));
        mixp_step_begin(ctx);
        CHECK_INT(mixp_clip_grad_norm(opt, 1.0), MIXP_OK);
        for (int i = 0; i < 8; i++) CHECK_NEAR(grad[i], want[2 + i], 3e-7 * fabs(want[2 + i]));
        mixp_optimizer_step(opt);
        CHECK_NEAR(mixp_optimizer_verdict(opt).grad_norm, want[1], 1e-6 * want[1]);
        end_context(ctx);
    }
}
static void test_clip_grad_norm(void) { on_each_cpu(clip_here); }

/* ==== scaler ============================================================================ */

static void test_scaler_rule(void) {
    int i, at = 0;
    for (i = 0; i < SCALER_RULES; i++) {
        const scaler_rule_case *c = &scaler_rules[i];
        mixp_scaler_desc desc;
        mixp_scaler_rule rule;
        mixp_scaler_state state;
        memset(&desc, 0, sizeof desc);
        memset(&state, 0, sizeof state);
        desc.init_scale = c->scale;
        desc.growth_factor = c->growth;
        desc.backoff_factor = c->backoff;
        desc.growth_interval = c->interval;
        CHECK_INT(mixp_scaler_rule_resolve(&desc, &rule), MIXP_OK);
        state.scale = rule.init_scale;
        state.hysteresis_left = rule.hysteresis;
        for (const char *s = c->steps; *s; s++, at++) {
            mixpi_scaler_advance(&state, &rule, *s == 'x');
            CHECK_INT(mixp_bits_of_f32(state.scale), scaler_bits[at]);
            CHECK_INT(state.growth_tracker, scaler_tracker[at]);
        }
    }
    CHECK_INT(at, COUNT_OF(scaler_bits));
}

/* Two optimizers of one parameter each, under one scaler. Gradients are set, scaled. */
typedef struct pair {
    mixp_context   *ctx;
    mixp_scaler    *scaler;
    mixp_optimizer *opt[2];
    mixp_tensor    *p[2];
    float           grad[2][SCALER_COUNT];
} pair;

static void pair_new(pair *s, const scaler_run *r, uint32_t *gen) {
    static const char *const names[] = { "first", "second" };
    const int64_t shape[] = { SCALER_COUNT };
    mixp_optimizer_desc desc = mixp_adamw_defaults();
    mixp_scaler_desc sd;
    float v[SCALER_COUNT];
    memset(s, 0, sizeof *s);
    memset(&sd, 0, sizeof sd);
    desc.lr = 1e-2;
    desc.weight_decay = 0.1;
    if (!r->unscale_first) desc.max_norm = r->max_norm;
    sd.init_scale = r->init;
    sd.growth_interval = r->interval;
    s->ctx = context();
    s->scaler = mixp_scaler_new(s->ctx, &sd);
    for (int i = 0; i < 2; i++) {
        gen_fill(gen, 1.0f, v, SCALER_COUNT);
        s->p[i] = param(s->ctx, names[i], MIXP_F32, 1, shape, v);
        s->opt[i] = mixp_optimizer_new(s->ctx, &desc);
        mixp_optimizer_add(s->opt[i], s->p[i],
                           mixp_view(s->ctx, "grad", MIXP_F32, 1, shape, s->grad[i]));
    }
}

static void pair_gradients(pair *s, const scaler_run *r, int step, uint32_t *gen) {
    float v[SCALER_COUNT], scale = mixp_scaler_loss_scale(s->scaler);
    for (int i = 0; i < 2; i++) {
        mixp_zero_grad(s->opt[i]);
        for (int batch = 0; batch < r->batches; batch++) {
            gen_fill(gen, 1.0f, v, SCALER_COUNT);
            for (int k = 0; k < SCALER_COUNT; k++) s->grad[i][k] += v[k] * scale;
        }
        if (step == r->bad_step && i == r->bad_in) s->grad[i][2] = mixp_f32_of_bits(0x7F800000u);
    }
}

static void pair_step(pair *s, const scaler_run *r) {
    for (int i = 0; i < 2; i++) {
        if (r->unscale_first) CHECK_INT(mixp_scaler_unscale(s->scaler, s->opt[i]), MIXP_OK);
        if (r->unscale_first && r->max_norm > 0) mixp_clip_grad_norm(s->opt[i], r->max_norm);
    }
    for (int i = 0; i < 2; i++) CHECK_INT(mixp_scaler_step(s->scaler, s->opt[i]), MIXP_OK);
    CHECK_INT(mixp_scaler_update(s->scaler), MIXP_OK);
}

static void check_run(const scaler_run *r) {
    uint32_t gen = gen_start(5);
    mixp_scaler_saved saved;
    float v[2][SCALER_COUNT];
    pair s;
    pair_new(&s, r, &gen);
    for (int step = 0; step < r->steps; step++) {
        mixp_step_begin(s.ctx);
        mixp_read(s.p[r->bad_in], v[0], MIXP_F32, SCALER_COUNT);
        pair_gradients(&s, r, step, &gen);
        pair_step(&s, r);
        mixp_read(s.p[r->bad_in], v[1], MIXP_F32, SCALER_COUNT);
        CHECK((step == r->bad_step) == !memcmp(v[0], v[1], sizeof v[0]));
    }
    CHECK_INT(mixp_scaler_save(s.scaler, &saved), MIXP_OK);
    CHECK_NEAR(saved.scale, r->want[0], 0);
    CHECK_NEAR(saved.growth_tracker, r->want[1], 0);
    for (int i = 0; i < 2; i++) {
        CHECK_NEAR(mixp_optimizer_applied(s.opt[i]), r->want[2 + i], 0);
        mixp_read(s.p[i], v[i], MIXP_F32, SCALER_COUNT);
        for (int k = 0; k < SCALER_COUNT; k++)
            CHECK_NEAR(v[i][k], r->want[4 + i * SCALER_COUNT + k], 3e-7);
    }
    end_context(s.ctx);
}

static void runs_here(void) {
    for (int i = 0; i < SCALER_RUNS; i++) {
        scaler_run r = scaler_runs[i];
        check_run(&r);
        r.unscale_first = !r.unscale_first;     /* with or without: the same result */
        check_run(&r);
    }
}
static void test_scaler_runs(void) { on_each_cpu(runs_here); }

/* ==== GPT =============================================================================== */

enum { GPT_PARAMS = 3 + 6 * GPT_LAYERS, GPT_TOKENS = GPT_BATCH * GPT_BLOCK };

typedef struct gpt_run {
    mixp_dtype region;      /* MIXP_F32: no autocast */
    float      init_scale;  /* 0: no scaler */
    int        lean;        /* 1: clipping inside the step */
    double     loss[GPT_STEPS], norm[GPT_STEPS], scale[GPT_STEPS], final[GPT_PARAMS];
} gpt_run;

/* The same order and sizes as parameters() in record_gpt.py. */
static void gpt_params(mixp_context *ctx, mixp_tensor **p) {
    static const int rows[] = { 1, 3 * GPT_WIDTH, GPT_WIDTH, 1, 4 * GPT_WIDTH, GPT_WIDTH };
    static float v[4 * GPT_WIDTH * GPT_WIDTH];
    uint32_t gen = gen_start(1);
    int i, k, row = 0;
    for (i = 0; i < GPT_PARAMS; i++) {
        int64_t shape[2];
        int is_norm = i >= 2 && ((i - 2) % 3 == 0);
        if (i >= 2 && i < GPT_PARAMS - 1) row = rows[(i - 2) % 6];
        if (i < 2) row = i == 0 ? GPT_VOCAB : GPT_BLOCK;
        shape[0] = is_norm ? GPT_WIDTH : row;
        shape[1] = i >= 2 && (i - 2) % 6 == 5 ? 4 * GPT_WIDTH : GPT_WIDTH;
        if (is_norm) for (k = 0; k < GPT_WIDTH; k++) v[k] = 1.0f;
        else gen_fill(&gen, 0.125f, v, (int)(shape[0] * shape[1]));
        p[i] = param(ctx, NULL, MIXP_F32, is_norm ? 1 : 2, shape, v);
    }
}

static mixp_tensor *gpt_loss(mixp_context *ctx, mixp_tensor **p, const int32_t *text) {
    const int64_t shape[] = { GPT_BATCH, GPT_BLOCK };
    int32_t ids[GPT_TOKENS], targets[GPT_TOKENS];
    mixp_tensor *x, *h;
    for (int b = 0; b < GPT_BATCH; b++)
        for (int i = 0; i < GPT_BLOCK; i++) {
            ids[b * GPT_BLOCK + i] = text[b * (GPT_BLOCK + 1) + i];
            targets[b * GPT_BLOCK + i] = text[b * (GPT_BLOCK + 1) + i + 1];
        }
    x = mixp_add(ctx, mixp_embedding(ctx, p[0], mixp_input(ctx, MIXP_I32, 2, shape, ids)), p[1]);
    for (int i = 2; i < GPT_PARAMS - 1; i += 6) {
        h = mixp_layer_norm(ctx, x, p[i], NULL, 1e-5f);
        h = mixp_attention(ctx, mixp_linear(ctx, h, p[i + 1], NULL), GPT_HEADS, 1, 0.0f);
        x = mixp_add(ctx, x, mixp_linear(ctx, h, p[i + 2], NULL));
        h = mixp_layer_norm(ctx, x, p[i + 3], NULL, 1e-5f);
        h = mixp_gelu(ctx, mixp_linear(ctx, h, p[i + 4], NULL));
        x = mixp_add(ctx, x, mixp_linear(ctx, h, p[i + 5], NULL));
    }
    h = mixp_linear(ctx, mixp_layer_norm(ctx, x, p[GPT_PARAMS - 1], NULL, 1e-5f), p[0], NULL);
    return mixp_cross_entropy(ctx, h, mixp_input(ctx, MIXP_I32, 2, shape, targets), MIXP_IGNORE);
}

/* Weight decay on the matrices only. */
static mixp_optimizer *gpt_optimizer(mixp_context *ctx, mixp_tensor **p, int lean) {
    mixp_optimizer_desc desc = mixp_adamw_defaults();
    mixp_param_group group;
    desc.lr = 1e-3;
    desc.beta2 = 0.99;
    desc.weight_decay = 0.1;
    desc.max_norm = lean ? 1.0 : 0.0;
    mixp_optimizer *opt = mixp_optimizer_new(ctx, &desc);
    for (int i = 0; i < GPT_PARAMS; i++)
        if (p[i]->rank == 2) mixp_optimizer_add(opt, p[i], NULL);
    mixp_optimizer_group(opt, 0, &group);
    group.weight_decay = 0;
    CHECK_INT(mixp_optimizer_add_group(opt, &group), 1);
    for (int i = 0; i < GPT_PARAMS; i++)
        if (p[i]->rank == 1) mixp_optimizer_add(opt, p[i], NULL);
    return opt;
}

static void gpt_step(mixp_context *ctx, gpt_run *run, int step, mixp_tensor **p,
                     const int32_t *text, mixp_optimizer *opt, mixp_scaler *scaler) {
    mixp_tensor *loss = NULL;
    mixp_step_begin(ctx);
    mixp_zero_grad(opt);
    MIXP_AUTOCAST(ctx, run->region) { loss = gpt_loss(ctx, p, text); }
    run->loss[step] = mixp_item(loss);
    mixp_backward(ctx, scaler ? mixp_scaler_scale(scaler, loss) : loss);
    if (scaler && !run->lean) mixp_scaler_unscale(scaler, opt);
    if (!run->lean) mixp_clip_grad_norm(opt, 1.0);
    if (scaler) {
        mixp_scaler_step(scaler, opt);
        mixp_scaler_update(scaler);
        run->scale[step] = mixp_scaler_loss_scale(scaler);
    } else {
        mixp_optimizer_step(opt);
    }
    run->norm[step] = mixp_optimizer_verdict(opt).grad_norm;
}

static void gpt_train(gpt_run *run) {
    static float v[GPT_VOCAB * GPT_WIDTH + 4 * GPT_WIDTH * GPT_WIDTH];
    int32_t text[GPT_BATCHES][GPT_BATCH * (GPT_BLOCK + 1)];
    mixp_context *ctx = context();
    mixp_tensor *p[GPT_PARAMS];
    mixp_scaler *scaler = NULL;
    mixp_scaler_desc desc;
    uint32_t gen = gen_start(2);
    memset(&desc, 0, sizeof desc);
    desc.init_scale = run->init_scale;
    gen_ints(&gen, GPT_VOCAB, text[0], COUNT_OF(text) * COUNT_OF(text[0]));
    gpt_params(ctx, p);
    mixp_optimizer *opt = gpt_optimizer(ctx, p, run->lean);
    if (run->init_scale > 0) scaler = mixp_scaler_new(ctx, &desc);
    for (int i = 0; i < GPT_STEPS; i++) gpt_step(ctx, run, i, p, text[i % GPT_BATCHES], opt, scaler);
    for (int i = 0; i < GPT_PARAMS; i++) {
        run->final[i] = 0;
        mixp_read(p[i], v, MIXP_F32, p[i]->count);
        for (int64_t k = 0; k < p[i]->count; k++) run->final[i] += (double)v[k] * (double)v[k];
    }
    end_context(ctx);
}

static void gpt_f32_here(void) {
    gpt_run run;
    for (int lean = 0; lean < 2; lean++) {
        memset(&run, 0, sizeof run);
        run.lean = lean;
        gpt_train(&run);
        for (int i = 0; i < GPT_STEPS; i++) {
            CHECK_NEAR(run.loss[i], gpt_loss_f64[i], 1e-6 * gpt_loss_f64[i]);
            CHECK_NEAR(run.loss[i], gpt_loss_f32[i], 1e-6 * gpt_loss_f32[i]);
            CHECK_NEAR(run.norm[i], gpt_norm_f64[i], 1e-5 * gpt_norm_f64[i]);
        }
        for (int i = 0; i < GPT_PARAMS; i++)
            CHECK_NEAR(run.final[i], gpt_final_f64[i], 1e-5 * gpt_final_f64[i]);
    }
}
static void test_gpt_f32(void) { on_each_cpu(gpt_f32_here); }

/* Bounds: about three times what PyTorch's own rounding costs in this run. */
static void gpt_low_here(void) {
    gpt_run run;
    for (int lean = 0; lean < 2; lean++) {
        memset(&run, 0, sizeof run);
        run.lean = lean;
        run.region = MIXP_F16;
        run.init_scale = 65536.0f;
        gpt_train(&run);
        for (int i = 0; i < GPT_STEPS; i++) {
            CHECK_NEAR(run.loss[i], gpt_loss_f16[i], 5e-4);
            CHECK_NEAR(run.loss[i], gpt_loss_f64[i], 5e-4);
            CHECK_NEAR(run.norm[i], gpt_norm_f64[i], 3e-3);
            CHECK_NEAR(run.scale[i], gpt_scale_f16[i], 0);
        }
        run.region = MIXP_BF16;
        run.init_scale = 0.0f;
        gpt_train(&run);
        for (int i = 0; i < GPT_STEPS; i++) {
            CHECK_NEAR(run.loss[i], gpt_loss_bf16[i], 2.5e-3);
            CHECK_NEAR(run.loss[i], gpt_loss_f64[i], 2.5e-3);
        }
    }
}
static void test_gpt_autocast(void) { on_each_cpu(gpt_low_here); }

/* From a scale that is far too high: skips that leave the weights alone, then training.
 * PyTorch stores the gradient of the tied weight in f16, where it overflows at 2^20; here
 * it is summed in f32. So 2^28 takes as many skips here as 2^27 there. */
static void gpt_overflow_here(void) {
    gpt_run run;
    memset(&run, 0, sizeof run);
    run.region = MIXP_F16;
    run.init_scale = 268435456.0f;
    gpt_train(&run);
    for (int i = 0; i < GPT_STEPS; i++) {
        CHECK_NEAR(run.scale[i], 2.0 * gpt_scale_overflow[i], 0);
        CHECK_NEAR(run.loss[i], gpt_loss_overflow[i], 5e-4);
        if (i >= GPT_BATCHES && i < 8) CHECK_NEAR(run.loss[i], run.loss[i - GPT_BATCHES], 0);
    }
}
static void test_gpt_overflow(void) { on_each_cpu(gpt_overflow_here); }

int main(void) {
    RUN(test_operators);
    RUN(test_autocast_dtypes);
    RUN(test_optimizers);
    RUN(test_clip_grad_norm);
    RUN(test_scaler_rule);
    RUN(test_scaler_runs);
    RUN(test_gpt_f32);
    RUN(test_gpt_autocast);
    RUN(test_gpt_overflow);
    return test_report();
}
