/* test_optim_db.c - the configurations of PyTorch's own optimizer tests: PyTorch's f64 weights after 20
 * steps, and the kinds and forms they need (Adagrad, Adamax, NAdam, RAdam, amsgrad, centered, maximize,
 * lr_decay, initial_sum): their elements, states of fewer bytes, masters, skips, checkpoints, averages.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "internals.h"      /* the struct of an optimizer */
#include "test.h"
#include "numbers.h"
#include "each_isa.h"
#include "reference/generate.h"
#include "reference/optim_db.h"
#include <unistd.h>

static mixp_optimizer_desc defaults_of(const char *kind) {
    static const struct { const char *name; mixp_optimizer_desc (*make)(void); } kinds[] = {
        { "Adam", mixp_adam_defaults },       { "AdamW", mixp_adamw_defaults },
        { "SGD", mixp_sgd_defaults },         { "RMSprop", mixp_rmsprop_defaults },
        { "Adagrad", mixp_adagrad_defaults }, { "Adamax", mixp_adamax_defaults },
        { "NAdam", mixp_nadam_defaults },     { "RAdam", mixp_radam_defaults }
    };
    size_t i = 0;
    while (strcmp(kinds[i].name, kind)) i++;
    return kinds[i].make();
}

static mixp_optimizer_desc desc_of(const db_case *c) {
    mixp_optimizer_desc d = defaults_of(c->kind);
    d.lr = c->lr;
    d.beta1 = c->beta1;
    d.beta2 = c->beta2;
    d.eps = c->eps;
    d.weight_decay = c->weight_decay;
    d.momentum = c->momentum;
    d.dampening = c->dampening;
    d.nesterov = c->nesterov;
    d.maximize = c->maximize;
    d.amsgrad = c->amsgrad;
    d.centered = c->centered;
    d.decoupled = c->decoupled;
    d.lr_decay = c->lr_decay;
    d.initial_sum = c->initial_sum;
    d.momentum_decay = c->momentum_decay;
    return d;
}

/* The forms that are not in other tests, one configuration each. */
typedef struct form {
    const char *kind, *name;
    int amsgrad, centered, decoupled;
    double momentum;
} form;
enum { FORMS = 9 };
static const form forms[FORMS] = {
    { "Adagrad", "Adagrad", 0, 0, 0, 0 },         { "Adamax", "Adamax", 0, 0, 0, 0 },
    { "NAdam", "NAdam", 0, 0, 0, 0 },             { "NAdam", "NAdam decoupled", 0, 0, 1, 0 },
    { "RAdam", "RAdam", 0, 0, 0, 0 },             { "Adam", "Adam amsgrad", 1, 0, 0, 0 },
    { "AdamW", "AdamW amsgrad", 1, 0, 0, 0 },     { "RMSprop", "RMSprop centered", 0, 1, 0, 0 },
    { "RMSprop", "RMSprop centered, momentum", 0, 1, 0, 0.9 }
};
static mixp_optimizer_desc form_desc(const form *f) {
    mixp_optimizer_desc d = defaults_of(f->kind);
    d.amsgrad = f->amsgrad;
    d.centered = f->centered;
    d.decoupled = f->decoupled;
    d.momentum = f->momentum;
    d.weight_decay = 0.05;
    return d;
}

static mixp_tensor *view1(mixp_context *ctx, const char *name, int64_t n, float *data)
{ return mixp_view(ctx, name, MIXP_F32, 1, &n, data); }

/* --- PyTorch's weights --------------------------------------------------------------------------- */

/* As record_optim_db.py: the second vector joins after DB_JOINS steps. */
static void run_case(mixp_context *ctx, const db_case *c, float w[2 * DB_COUNT]) {
    mixp_optimizer_desc d = desc_of(c);
    mixp_optimizer *opt = mixp_optimizer_new(ctx, &d);
    uint32_t x = gen_start(11);
    float g[2 * DB_COUNT];
    int32_t shift[DB_COUNT];
    for (int k = 0; k < 2; k++) gen_fill(&x, 1.0f, w + k * DB_COUNT, DB_COUNT);
    CHECK_INT(mixp_optimizer_add(opt, view1(ctx, "a", DB_COUNT, w), view1(ctx, "ga", DB_COUNT, g)),
              MIXP_OK);
    for (int step = 0; step < DB_STEPS; step++) {
        if (step == DB_JOINS)
            CHECK_INT(mixp_optimizer_add(opt, view1(ctx, "b", DB_COUNT, w + DB_COUNT),
                                         view1(ctx, "gb", DB_COUNT, g + DB_COUNT)), MIXP_OK);
        for (int k = 0; k < 2; k++) {
            gen_fill(&x, 1.0f, g + k * DB_COUNT, DB_COUNT);
            gen_ints(&x, 25, shift, DB_COUNT);
            for (int i = 0; i < DB_COUNT; i++)
                g[k * DB_COUNT + i] = ldexpf(g[k * DB_COUNT + i], -shift[i]);
        }
        CHECK_INT(mixp_optimizer_step(opt), MIXP_OK);
    }
}

/* The distance from f64 is at most twice that of PyTorch's own f32. */
static void test_recorded(void) {
    mixp_context *ctx;
    int isa, c, i;
    EACH_ISA(isa, ctx) {
        for (c = 0; c < DB_CASES; c++) {
            const double *exact = db_f64 + c * 2 * DB_COUNT;
            float w[2 * DB_COUNT];
            double most = 0.0;
            run_case(ctx, &db_cases[c], w);
            for (i = 0; i < 2 * DB_COUNT; i++) {
                const double away = fabs((double)w[i] - exact[i]);
                if (!(away <= most)) most = away;
            }
            if (most <= 2.0 * db_spread[c] + 6e-8) continue;
            test_bad++;
            TEST_SHOW("%s, %s: %.2g from f64; PyTorch's f32 is %.2g", db_cases[c].kind,
                      db_cases[c].name, most, db_spread[c]);
        }
        mixp_context_free(ctx);
    }
}

/* --- elements ------------------------------------------------------------------------------------ */

static void element_of(const mixp_step_plan *plan, const mixp_step_scalars *u, float g, float *p,
                       float *m, float *v, float *third) {
    if (plan->kind == MIXP_OPTIMIZER_ADAGRAD) mixpi_rmsprop_element(u, g, p, NULL, v);
    else if (plan->kind == MIXP_OPTIMIZER_RADAM) mixpi_adam_element(u, g, p, m, v);
    else mixpi_later_element(plan->kind, u, g, p, m, v, third);
}

/* Each instruction set against the one-element functions, through tails of every length, with Inf and NaN. */
static void test_element_bits(void) {
    enum { MOST = 40, STEPS = 7 };
    mixp_context *ctx;
    int isa, f, n, i, t;
    if (FAST_MATH) SKIP("fast-math leaves no bits to promise");
    EACH_ISA(isa, ctx) {
        for (f = 0; f < FORMS; f++) for (n = 1; n < MOST; n++) {
            float w[MOST], g[MOST], p[MOST], m[MOST] = { 0 }, v[MOST] = { 0 }, third[MOST] = { 0 };
            mixp_optimizer_desc d = form_desc(&forms[f]);
            d.maximize = f % 2;
            mixp_optimizer *opt = mixp_optimizer_new(ctx, &d);
            for (i = 0; i < MOST; i++) p[i] = w[i] = (float)random_value();
            CHECK_INT(mixp_optimizer_add(opt, view1(ctx, "w", n, w), view1(ctx, "g", n, g)), MIXP_OK);
            for (t = 0; t < STEPS; t++) {
                for (i = 0; i < n; i++)
                    g[i] = (float)ldexp(random_value(), (int)(random_bits() % 60) - 40);
                if (t == STEPS - 1 && n > 8) {
                    g[3] = bits_f32(0x7F800000u);
                    g[n - 1] = bits_f32(0x7FC00000u);
                }
                CHECK_INT(mixp_optimizer_step(opt), MIXP_OK);
                for (i = 0; i < n; i++)
                    element_of(&opt->plan, &opt->state->update[0], g[i], p + i, m + i, v + i, third + i);
            }
            for (i = 0; i < n; i++) {
                const mixp_param_row *row = &opt->rows[0];
                const float *rm = (const float *)row->m, *rv = (const float *)row->v;
                CHECK(f32_bits(p[i]) == f32_bits(w[i]) || (p[i] != p[i] && w[i] != w[i]));
                CHECK(!rm || f32_bits(m[i]) == f32_bits(rm[i]) || m[i] != m[i]);
                CHECK(f32_bits(v[i]) == f32_bits(rv[i]) || v[i] != v[i]);
                CHECK(!row->third || f32_bits(third[i]) == f32_bits(row->third[i]) || third[i] != third[i]);
            }
            CHECK(n <= 8 || w[n - 1] != w[n - 1]);      /* NaN reaches the weight */
        }
        mixp_context_free(ctx);
    }
}

/* What rounding makes of the variance of equal gradients is 0, not the root of a negative number. */
static void test_centered_variance(void) {
    mixp_context *ctx;
    int isa, t;
    EACH_ISA(isa, ctx) {
        mixp_optimizer_desc d = mixp_rmsprop_defaults();
        float w = 1.0f, g = 0.1f;
        d.centered = 1;
        d.beta2 = 0.5;
        d.lr = 1e-9;
        mixp_optimizer *opt = mixp_optimizer_new(ctx, &d);
        CHECK_INT(mixp_optimizer_add(opt, view1(ctx, "w", 1, &w), view1(ctx, "g", 1, &g)), MIXP_OK);
        for (t = 0; t < 200; t++) {
            g = 0.1f + (float)(t % 3) * 1e-8f;
            CHECK_INT(mixp_optimizer_step(opt), MIXP_OK);
        }
        CHECK(w == w);
        mixp_context_free(ctx);
    }
}

/* NAdam's scalars against a loop with pow over all momentums. */
static void test_scalars_of_many_steps(void) {
    static const double betas[] = { 0.9, 0.0, 0.999 }, decays[] = { 4e-3, 0.0, 1.0 };
    int b, k, t;
    for (b = 0; b < 3; b++) for (k = 0; k < 3; k++) {
        double product = 1.0;
        mixp_step_plan plan;
        mixp_step_state state;
        mixp_step_scalars u;
        memset(&plan, 0, sizeof plan);
        memset(&state, 0, sizeof state);
        plan.kind = MIXP_OPTIMIZER_NADAM;
        plan.groups[0].beta1 = betas[b];
        plan.groups[0].beta2 = 0.999;
        plan.groups[0].momentum_decay = decays[k];
        for (t = 1; t <= 3000; t++) {
            const double mu = betas[b] * (1 - 0.5 * pow(0.96, t * decays[k]));
            const double next = betas[b] * (1 - 0.5 * pow(0.96, (t + 1) * decays[k]));
            product *= mu;
            state.applied = t;
            mixpi_step_scalars_of(&plan, &state, 0, t, &u);
            CHECK_NEAR(u.scale_g, (1 - mu) / (1 - product), 1e-7 * (1 - mu) / (1 - product));
            CHECK_NEAR(u.scale_m, next / (1 - product * next), 1e-7 * next / (1 - product * next));
        }
    }
}

/* --- states, skips, checkpoints -------------------------------------------------------------------- */

enum { ROWS_OF = 80, COLS_OF = 70, COUNT = ROWS_OF * COLS_OF };      /* above MIXP_STATE_SMALL */
typedef struct model {
    mixp_context   *ctx;
    mixp_scaler    *scaler;
    mixp_optimizer *opt;
    mixp_tensor    *w[2], *g[2];
} model;
static float numbers[COUNT];

static model model_of(const mixp_optimizer_desc *d, mixp_dtype dtype) {
    static const int64_t shape[2] = { ROWS_OF, COLS_OF };
    static const char *const names[2][2] = { { "a", "ga" }, { "b", "gb" } };
    model m;
    m.ctx = mixp_context_new(NULL);
    m.scaler = mixp_scaler_new(m.ctx, NULL);
    m.opt = mixp_optimizer_new(m.ctx, d);
    random_state = 5;
    for (int k = 0; k < 2; k++) {
        mixp_param_group group;
        m.w[k] = mixp_param(m.ctx, names[k][0], dtype, 2, shape);
        m.g[k] = mixp_param(m.ctx, names[k][1], MIXP_F32, 2, shape);
        for (int i = 0; i < COUNT; i++) numbers[i] = (float)random_value();
        CHECK_INT(mixp_write(m.w[k], numbers, MIXP_F32, COUNT), MIXP_OK);
        CHECK_INT(mixp_optimizer_group(m.opt, 0, &group), MIXP_OK);
        group.lr *= 0.5;
        if (k) CHECK_INT(mixp_optimizer_add_group(m.opt, &group), 1);
        CHECK_INT(mixp_optimizer_add(m.opt, m.w[k], m.g[k]), MIXP_OK);
    }
    CHECK_INT(mixp_optimizer_set_ema(m.opt, 0.75), MIXP_OK);
    return m;
}

/* Steps with gradients times the scale; bad: one of them is Inf. */
static void train(model *m, int steps, int bad) {
    while (steps--) {
        const float scale = mixp_scaler_loss_scale(m->scaler);
        for (int k = 0; k < 2; k++) {
            for (int i = 0; i < COUNT; i++) numbers[i] = scale * (float)random_value();
            if (bad && k) numbers[COUNT - 1] = bits_f32(0x7F800000u);
            CHECK_INT(mixp_write(m->g[k], numbers, MIXP_F32, COUNT), MIXP_OK);
        }
        CHECK_INT(mixp_scaler_step(m->scaler, m->opt), MIXP_OK);
        CHECK_INT(mixp_scaler_update(m->scaler), MIXP_OK);
    }
}

static char path[64];
static mixp_checkpoint checkpoint_of(const model *m) {
    mixp_checkpoint c;
    memset(&c, 0, sizeof c);
    c.ctx = m->ctx;
    c.optimizers = &m->opt;
    c.n_optimizers = 1;
    sprintf(path, "/tmp/mixprec_optim_db_%ld.safetensors", (long)getpid());
    return c;
}
static mixp_safetensors *saved(const model *m) {
    mixp_checkpoint c = checkpoint_of(m);
    mixp_safetensors *file = NULL;
    CHECK_INT(mixp_checkpoint_save(path, &c), MIXP_OK);
    CHECK_INT(mixp_safetensors_read(path, &file, NULL, 0), MIXP_OK);
    return file;
}
/* All tensors but counts are the same in both files, which are freed. Returns how many. */
static int same(mixp_safetensors *a, mixp_safetensors *b) {
    int n = 0;
    for (int64_t i = 0; i < mixp_safetensors_count(a); i++) {
        const mixp_st_entry *x = mixp_safetensors_at(a, i);
        const mixp_st_entry *y = mixp_safetensors_find(b, x->name);
        if (x->rank < 2 || strstr(x->name, "g")== x->name) continue;
        CHECK(y && x->bytes == y->bytes && memcmp(x->data, y->data, x->bytes) == 0);
        n++;
    }
    mixp_safetensors_free(a);
    mixp_safetensors_free(b);
    return n;
}

static mixp_optimizer_desc with_states(mixp_optimizer_desc d, int kind) {
    d.states.m = (mixp_moment_kind)kind;
    d.states.v = d.centered ? MIXP_MOMENT_F32 : (mixp_moment_kind)kind;
    d.states.master = (mixp_master_kind)kind;
    if (d.kind == MIXP_OPTIMIZER_ADAGRAD) d.states.m = MIXP_MOMENT_F32;
    return d;
}

/* How many states a parameter has beside its average. */
static int states_of(const form *f) {
    const int moments = !strcmp(f->kind, "Adagrad") ? 1 : f->centered && !(f->momentum > 0) ? 1 : 2;
    return moments + (f->amsgrad || f->centered) + 1;       /* and the master */
}

/* A skipped step changes no state. A resumed run has the bits of one that was not stopped. */
static void test_skip_and_resume(void) {
    int f, kind;
    for (f = 0; f < FORMS; f++) for (kind = 0; kind < 3; kind++) {
        mixp_optimizer_desc d = with_states(form_desc(&forms[f]), kind);
        model a = model_of(&d, MIXP_BF16), b;
        train(&a, 3, 0);
        mixp_safetensors *before = saved(&a);
        train(&a, 1, 1);
        CHECK_INT(mixp_scaler_verdict(a.scaler).outcome, MIXP_STEP_SKIPPED);
        CHECK_INT(same(before, saved(&a)), 2 * (2 + states_of(&forms[f])));
        d.lr = 7.0;             /* the file's groups count */
        b = model_of(&d, MIXP_BF16);
        mixp_checkpoint c = checkpoint_of(&b);
        CHECK_INT(mixp_checkpoint_load(path, &c), MIXP_OK);
        random_state = 9;
        train(&a, 3, 0);
        random_state = 9;
        train(&b, 3, 0);
        same(saved(&a), saved(&b));
        mixp_context_free(a.ctx);
        mixp_context_free(b.ctx);
    }
    remove(path);
}

/* Weights after 30 steps with other states stay near those with f32, in learning rates. */
static void test_states_follow(void) {
    static float exact[COUNT], got[COUNT];
    int f, kind, i;
    for (f = 0; f < FORMS; f++) for (kind = 0; kind < 3; kind++) {
        mixp_optimizer_desc d = with_states(form_desc(&forms[f]), kind);
        double sum = 0.0, moved = 0.0;
        d.states.master = MIXP_MASTER_F32;
        model m = model_of(&d, MIXP_F32);
        CHECK_INT(mixp_read(m.w[0], kind ? numbers : exact, MIXP_F32, COUNT), MIXP_OK);
        memcpy(got, kind ? numbers : exact, sizeof got);
        random_state = 3;
        for (i = 0; i < COUNT; i++) numbers[i] = got[i];
        train(&m, 30, 0);
        CHECK_INT(mixp_read(m.w[0], kind ? numbers : exact, MIXP_F32, COUNT), MIXP_OK);
        for (i = 0; kind && i < COUNT; i++) {
            sum += pow((double)numbers[i] - (double)exact[i], 2);
            moved += pow((double)exact[i] - (double)got[i], 2);
        }
        if (kind && !(sqrt(sum / moved) < (kind == 1 ? 0.02 : 0.12))) {
            test_bad++;
            TEST_SHOW("%s, states %d: %.3g of the way", forms[f].name, kind, sqrt(sum / moved));
        }
        mixp_context_free(m.ctx);
    }
}

/* Adagrad's sums begin at initial_sum in every form. */
static void test_initial_sum(void) {
    for (int kind = 0; kind < 3; kind++) {
        mixp_optimizer_desc d = with_states(mixp_adagrad_defaults(), kind);
        d.initial_sum = 0.25;
        model m = model_of(&d, MIXP_BF16);
        CHECK_INT(mixp_optimizer_read(m.opt, m.w[1], MIXP_STATE_V, numbers, COUNT), MIXP_OK);
        for (int i = 0; i < COUNT; i++) CHECK_NEAR(numbers[i], 0.25, 0.0);
        mixp_context_free(m.ctx);
    }
}

/* The third state is read by name; kinds without one say so. */
static void test_third_state(void) {
    mixp_optimizer_desc d = form_desc(&forms[5]);
    static float third[COUNT];
    model m = model_of(&d, MIXP_F32);
    const char *why = "";
    train(&m, 5, 0);
    CHECK_INT(mixp_optimizer_read(m.opt, m.w[0], MIXP_STATE_V, numbers, COUNT), MIXP_OK);
    CHECK_INT(mixp_optimizer_read(m.opt, m.w[0], MIXP_STATE_THIRD, third, COUNT), MIXP_OK);
    for (int i = 0; i < COUNT; i++) CHECK(third[i] >= numbers[i]);
    mixp_context_free(m.ctx);
    m = model_of(NULL, MIXP_F32);
    CHECK_INT(mixp_optimizer_read(m.opt, m.w[0], MIXP_STATE_THIRD, third, COUNT), MIXP_ERR_ARGUMENT);
    mixp_context_error(m.ctx, &why);
    CHECK_TEXT(why, "this kind of optimizer does not have this state");
    mixp_context_free(m.ctx);
}

static void refused(const mixp_optimizer_desc *d, const char *part) {
    mixp_context *ctx = mixp_context_new(NULL);
    const char *why = "";
    CHECK(mixp_optimizer_new(ctx, d) == NULL);
    CHECK_INT(mixp_context_error(ctx, &why), MIXP_ERR_ARGUMENT);
    CHECK_TEXT(why, part);
    mixp_context_free(ctx);
}
static void test_refused(void) {
    const double nan = (double)bits_f32(0x7FC00000u);
    mixp_optimizer_desc d;
    d = mixp_radam_defaults(), d.amsgrad = 1, refused(&d, "RAdam has no amsgrad");
    d = mixp_adamw_defaults(), d.centered = 1, refused(&d, "AdamW has no centered");
    d = mixp_adamw_defaults(), d.decoupled = 1, refused(&d, "AdamW has no decoupled");
    d = mixp_rmsprop_defaults(), d.centered = 1, d.states.v = MIXP_MOMENT_BF16, refused(&d, "states.v");
    d = mixp_adagrad_defaults(), d.eps = 0.0, refused(&d, "Adagrad's eps");
    d = mixp_adagrad_defaults(), d.lr_decay = -0.5, refused(&d, "lr_decay");
    d = mixp_adagrad_defaults(), d.initial_sum = -1.0, refused(&d, "initial_sum");
    d = mixp_adagrad_defaults(), d.initial_sum = 1e39, refused(&d, "initial_sum");
    d = mixp_adagrad_defaults(), d.beta1 = 0.9, refused(&d, "Adagrad has no beta1");
    d = mixp_adam_defaults(), d.lr_decay = 0.1, refused(&d, "Adam has no lr_decay");
    d = mixp_adam_defaults(), d.initial_sum = 0.1, refused(&d, "Adam has no initial_sum");
    d = mixp_adam_defaults(), d.momentum_decay = 0.1, refused(&d, "Adam has no momentum_decay");
    d = mixp_nadam_defaults(), d.momentum_decay = nan, refused(&d, "momentum_decay");
    d = mixp_nadam_defaults(), d.beta2 = d.eps = 0.0, refused(&d, "beta2 and eps are 0");
    d = mixp_nadam_defaults(), d.beta1 = 1.0, refused(&d, "beta1 must lie");
    d = mixp_adamax_defaults(), d.momentum = 0.9, refused(&d, "Adamax has no momentum");
}

int main(void) {
    RUN(test_recorded);
    RUN(test_element_bits);
    RUN(test_centered_variance);
    RUN(test_scalars_of_many_steps);
    RUN(test_skip_and_resume);
    RUN(test_states_follow);
    RUN(test_initial_sum);
    RUN(test_third_state);
    RUN(test_refused);
    return test_report();
}
