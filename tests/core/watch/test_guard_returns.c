/* test_guard_returns.c - every kind of site that fell back to f32 because of a few steps returns to f16, and
 * the events tell each fallback and each return.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "mixprec.h"
#include "test.h"

enum { ROWS = 4, N = 8, BATCH = 64, FIRST = 3, LAST = 6, STEPS = 120, CLEAN = 3, SITES = 64 };

/* In steps FIRST to LAST the input is `large` times as large, and the weight has the value `heavy`. The
 * site whose name ends with `op` then falls back. levels: bits of the levels at which it does; 0: of a
 * test of its own. */
typedef struct row {
    const char *name, *op;
    int         levels;
    float       large, heavy;
} row;

enum {
    LINEAR, CAST_INPUT, MATMUL, ATTENTION, ADD, SUB, MUL, DIV, SCALE, ADD_SCALAR, SQUARE, RELU, RELU_SQUARED,
    GELU, SWIGLU, ROPE, CUMSUM, PROD, MAX, CONCAT, TRANSPOSE, CAST, VAR, NORM, LOGS, SUM, EXP, LAYER_NORM,
    RMS_NORM, EMBEDDING, OWN_LOW, OWN_KEEP, OWN_LOSS, FLUSHED, GRADIENT, GRADIENTS, OFFSET, ROWS_OF_TABLE
};

static const row table[ROWS_OF_TABLE] = {
    [LINEAR] =         { "linear",                      "linear", 6, 1, 20000 },
    [CAST_INPUT] =     { "the cast of an input",        "w: cast of input 0 of linear", 6, 1e5f, 1e-3f },
    [MATMUL] =         { "matmul",                      "matmul", 6, 1000, 1 },
    [ATTENTION] =      { "attention",                   "attention", 6, 20000, 1 },
    [ADD] =            { "add",                         "add", 6, 12000, 1 },
    [SUB] =            { "sub",                         "sub", 6, 12000, 1 },
    [MUL] =            { "mul",                         "mul", 6, 1000, 1 },
    [DIV] =            { "div",                         "div", 4, 1000, 1 },
    [SCALE] =          { "scale",                       "scale", 6, 1000, 1 },
    [ADD_SCALAR] =     { "add_scalar",                  "add_scalar", 6, 15000, 1 },
    [SQUARE] =         { "square",                      "square", 4, 1000, 1 },
    [RELU] =           { "relu",                        "relu", 6, 20000, 1 },
    [RELU_SQUARED] =   { "relu_squared",                "relu_squared", 6, 1000, 1 },
    [GELU] =           { "gelu",                        "gelu", 6, 20000, 1 },
    [SWIGLU] =         { "swiglu",                      "swiglu", 6, 1000, 1 },
    [ROPE] =           { "rope",                        "rope", 6, 20000, 1 },
    [CUMSUM] =         { "cumsum",                      "cumsum", 4, 12000, 1 },
    [PROD] =           { "prod",                        "prod", 4, 20, 1 },
    [MAX] =            { "max",                         "max", 6, 20000, 1 },
    [CONCAT] =         { "concat",                      "concat", 6, 20000, 1 },
    [TRANSPOSE] =      { "transpose",                   "transpose", 6, 20000, 1 },
    [CAST] =           { "a cast of the program",       "cast", 6, 1e5f, 1e-3f },
    [VAR] =            { "var",                         "var", 4, 1000, 1 },
    [NORM] =           { "vector_norm",                 "vector_norm", 4, 12000, 1 },
    [LOGS] =           { "logsumexp",                   "logsumexp", 4, 20000, 1 },
    [SUM] =            { "sum",                         "sum", 4, 12000, 1 },
    [EXP] =            { "exp",                         "exp", 4, 12, 1 },
    [LAYER_NORM] =     { "layer_norm",                  "layer_norm", 4, 1, 30000 },
    [RMS_NORM] =       { "rms_norm",                    "rms_norm", 4, 1, 30000 },
    [EMBEDDING] =      { "embedding",                   "embedding", 4, 1, 1e5f },
    [OWN_LOW] =        { "an own operator, LOW",        "own", 6, 1000, 1 },
    [OWN_KEEP] =       { "an own operator, KEEP",       "own", 6, 1000, 1 },
    [OWN_LOSS] =       { "an own loss, LOW",            "own", 4, 1000, 1 },
    [FLUSHED] =        { "values near 0",               "scale", 6, 1e-6f, 1 },
    [GRADIENT] =       { "gradients near 0",            "linear", 6, 1, 1 },
    [GRADIENTS] =      { "gradients near 0, of a loop", "linear", 0, 1, 1 },
    [OFFSET] =         { "values with a large offset",  "linear", 2, 1, 1 }
};

/* --- an operator of the program: 1000 x --- */

static mixp_result thousandfold(mixp_call *c, mixp_in from, mixp_out to) {
    for (int64_t i = 0; to.data && i < c->out->count; i++) mixp_put(to, i, 1000 * mixp_get(from, i));
    return MIXP_OK;
}
static mixp_result own_infer(mixp_call *c)
{ return mixp_call_output(c, c->in[0]->dtype, c->in[0]->rank, c->in[0]->shape); }
static mixp_result own_forward(mixp_call *c) { return thousandfold(c, mixp_call_x(c, 0), mixp_call_y(c)); }
static mixp_result own_backward(mixp_call *c) { return thousandfold(c, mixp_call_dy(c), mixp_call_dx(c, 0)); }
static const mixp_op own_low = { "own", MIXP_CLASS_LOW, 0, own_infer, own_forward, own_backward, NULL };
/* The mean of 1000 x, which is f32 at level 2; 1000 x is rounded to the dtype of x. */
static mixp_result own_loss_infer(mixp_call *c) { return mixp_call_output(c, MIXP_F32, 0, NULL); }
static mixp_result own_loss_forward(mixp_call *c) {
    mixp_in x = mixp_call_x(c, 0);
    float sum = 0;
    int64_t i, n = c->in[0]->count;
    for (i = 0; i < n; i++) {
        float y = 1000 * mixp_get(x, i);
        sum += x.dtype == MIXP_F16 ? mixp_f32_from_f16(mixp_f16_from_f32(y)) : y;
    }
    mixp_put(mixp_call_y(c), 0, sum / (float)n);
    return MIXP_OK;
}
static mixp_result own_loss_backward(mixp_call *c) {
    mixp_out dx = mixp_call_dx(c, 0);
    int64_t i, n = c->in[0]->count;
    for (i = 0; dx.data && i < n; i++) mixp_put(dx, i, 1000 / (float)n * mixp_get(mixp_call_dy(c), 0));
    return MIXP_OK;
}
static const mixp_op own_loss = { "own", MIXP_CLASS_LOW, 0, own_loss_infer, own_loss_forward, own_loss_backward, NULL };
static const mixp_op own_keep = { "own", MIXP_CLASS_KEEP, 0, own_infer, own_forward, own_backward, NULL };

/* --- a model around one operator --- */

typedef struct model {
    mixp_context   *ctx;
    mixp_tensor    *pass, *w;           /* pass: the unit matrix; w: all elements are alike */
    mixp_optimizer *opt;
    mixp_scaler    *scaler;
    int             which;
} model;

static mixp_tensor *param(model *m, const char *name, int rank) {
    static const int64_t shape[2] = { N, N };
    mixp_tensor *t = mixp_param(m->ctx, name, MIXP_F32, rank, shape);
    mixp_optimizer_add(m->opt, t, NULL);
    return t;
}

/* Each step is sampled. The learning rate moves no weight. */
static model model_open(int which, int level) {
    const int norm = which == LAYER_NORM || which == RMS_NORM;
    mixp_optimizer_desc sgd = mixp_sgd_defaults();
    mixp_scaler_desc rule;
    mixp_guard_desc guard;
    float unit[N * N];
    model m;
    memset(&m, 0, sizeof m);
    memset(&rule, 0, sizeof rule);
    memset(&guard, 0, sizeof guard);
    rule.init_scale = rule.min_scale = rule.max_scale = 1;
    guard.every = 1;
    guard.clean = CLEAN;
    sgd.lr = 0;
    m.which = which;
    m.ctx = mixp_context_new(NULL);
    m.opt = mixp_optimizer_new(m.ctx, &sgd);
    m.scaler = mixp_scaler_new(m.ctx, &rule);
    m.pass = param(&m, "pass", 2);
    m.w = param(&m, "w", norm ? 1 : 2);
    for (int i = 0; i < N * N; i++) unit[i] = i % (N + 1) == 0;
    mixp_write(m.pass, unit, MIXP_F32, N * N);
    mixp_autocast_set_level(m.ctx, level);
    CHECK_INT(mixp_guard_start(m.ctx, &guard), MIXP_OK);
    return m;
}

static mixp_tensor *constant(const model *m, const mixp_tensor *like, float value) {
    float x[BATCH * N];
    for (int i = 0; i < BATCH * N; i++) x[i] = value;
    return mixp_input(m->ctx, MIXP_F32, like->rank, like->shape, x);
}

static mixp_tensor *indices(const model *m) {
    static const int64_t rows[1] = { ROWS };
    static const int32_t ids[ROWS] = { 0, 1, 2, 3 };
    return mixp_input(m->ctx, MIXP_I32, 1, rows, ids);
}

static mixp_tensor *turned(const model *m, mixp_tensor *h) {
    mixp_rope_desc d;
    memset(&d, 0, sizeof d);
    d.head_dim = N;
    return mixp_rope(m->ctx, h, &d);
}

/* The operator, after a product that passes x on in f16. */
static mixp_tensor *applied(const model *m, mixp_tensor *x, mixp_tensor *h) {
    mixp_context *c = m->ctx;
    static const int64_t qkv[3] = { 1, ROWS, 3 * N };
    mixp_tensor *three[3];
    three[0] = three[1] = three[2] = h;
    switch (m->which) {
    case LINEAR: case GRADIENT: return mixp_linear(c, h, m->w, NULL);
    case GRADIENTS: return mixp_linear(c, mixp_linear(c, h, m->w, NULL), m->w, NULL);
    case OFFSET: return h;
    case CAST_INPUT: return mixp_linear(c, x, m->w, NULL);
    case MATMUL: return mixp_matmul(c, h, h, 0, 1);
    case ATTENTION:
        return mixp_attention(c, mixp_reshape(c, mixp_concat(c, 3, three, 1), 3, qkv), 1, 0, 0.0f);
    case ADD: return mixp_add(c, h, h);
    case SUB: return mixp_sub(c, h, mixp_neg(c, h));
    case MUL: return mixp_mul(c, h, h);
    case DIV: return mixp_div(c, h, constant(m, h, 0.01f));
    case SCALE: case FLUSHED: return mixp_scale(c, h, m->which == SCALE ? 100.0f : 0.03f);
    case ADD_SCALAR: return mixp_add_scalar(c, h, 2000);
    case SQUARE: return mixp_square(c, h);
    case RELU: return mixp_relu(c, h);
    case RELU_SQUARED: return mixp_relu_squared(c, h);
    case GELU: return mixp_gelu(c, h);
    case SWIGLU: return mixp_swiglu(c, h, h);
    case ROPE: return turned(m, h);
    case CUMSUM: return mixp_cumsum(c, h, 0);
    case PROD: return mixp_prod(c, h, 0, 0);
    case MAX: return mixp_max(c, h, 0, 0);
    case CONCAT: return mixp_concat(c, 3, three, 0);
    case TRANSPOSE: return mixp_transpose(c, h, 0, 1);
    case CAST: return mixp_linear(c, mixp_cast(c, x, MIXP_F16), m->w, NULL);
    case VAR: return mixp_var(c, h, 0, 1, 0);
    case NORM: return mixp_vector_norm(c, h, 0, 0);
    case LOGS: return mixp_logsumexp(c, h, 0, 0);
    case SUM: return mixp_sum(c, h, 0, 0);
    case EXP: return mixp_exp(c, h);
    case LAYER_NORM: return mixp_layer_norm(c, h, m->w, NULL, 1e-5f);
    case RMS_NORM: return mixp_rms_norm(c, h, m->w, 1e-5f);
    case EMBEDDING: return mixp_embedding(c, m->w, indices(m));
    case OWN_LOW: return mixp_apply(c, &own_low, 1, &h, 1, NULL);
    case OWN_LOSS: return mixp_apply(c, &own_loss, 1, &h, 1, NULL);
    case OWN_KEEP: return mixp_apply(c, &own_keep, 1, &h, 1, NULL);
    default: return h;
    }
}

/* The batch: positive numbers near 1, of which the rows differ by 0.05. OFFSET: by 0.05 in 2023 or in 1. */
static mixp_tensor *batch(const model *m, int large) {
    const int rows = m->which == OFFSET ? BATCH : ROWS;
    float x[BATCH * N];
    int64_t shape[2];
    shape[0] = rows;
    shape[1] = N;
    for (int i = 0; i < rows * N; i++) {
        x[i] = 1 + 0.05f * (float)(i * 7 % 11);
        if (large && m->which == OFFSET) x[i] += 2023;
        else if (large) x[i] *= table[m->which].large;
    }
    return mixp_input(m->ctx, MIXP_F32, 2, shape, x);
}

static void step(model *m, int large) {
    const row *r = &table[m->which];
    const int vanishes = m->which == GRADIENT || m->which == GRADIENTS;
    const float slope = vanishes && large ? 1e-9f : 1.0f;
    const int casts = m->which == CAST_INPUT || m->which == CAST;
    mixp_tensor *x, *h, *y = NULL;
    mixp_fill(m->w, large ? (double)r->heavy : casts ? 1e-3 : 1);
    mixp_step_begin(m->ctx);
    mixp_zero_grad(m->opt);
    x = batch(m, large);
    MIXP_AUTOCAST(m->ctx, MIXP_F16) {
        h = casts ? x : mixp_linear(m->ctx, x, m->pass, NULL);
        y = applied(m, x, h);
    }
    y = mixp_mean(m->ctx, mixp_scale(m->ctx, mixp_cast(m->ctx, y, MIXP_F32), slope), MIXP_ALL, 0);
    CHECK_INT(mixp_backward(m->ctx, mixp_scaler_scale(m->scaler, y)), MIXP_OK);
    CHECK_INT(mixp_scaler_step(m->scaler, m->opt), MIXP_OK);
    CHECK_INT(mixp_scaler_update(m->scaler), MIXP_OK);
}

/* --- what the events say --- */

static int ends_with(const char *name, const char *op) {
    const size_t n = strlen(name), k = strlen(op);
    return n >= k && strcmp(name + n - k, op) == 0;
}

static int is_fall(mixp_event_kind kind) {
    return kind == MIXP_EVENT_OVERFLOW || kind == MIXP_EVENT_HIGH || kind == MIXP_EVENT_FLUSHED ||
           kind == MIXP_EVENT_IMPRECISE;
}

/* The newest of a site's fallbacks and returns: 1 a fallback, 0 a return or none. *falls: its fallbacks. */
static int told(const model *m, const char *name, int *falls) {
    mixp_event e;
    int i, fallen = 0;
    *falls = 0;
    for (i = 0; mixp_guard_event(m->ctx, i, &e); i++) {
        if (strcmp(e.site, name) != 0) continue;
        *falls += is_fall(e.kind);
        if (is_fall(e.kind)) fallen = 1;
        if (e.kind == MIXP_EVENT_BACK) {
            CHECK(fallen);
            CHECK_INT(e.dtype, m->which == OWN_LOSS ? MIXP_F32 : MIXP_F16);
            CHECK_TEXT(e.what, m->which == OWN_LOSS ? "reads its low dtype" : "stores its low dtype");
            fallen = 0;
        }
    }
    return fallen;
}

/* The events say of each site what the site is. */
static void events_are_true(const model *m) {
    mixp_site_info s;
    int i, falls;
    for (i = 0; mixp_site(m->ctx, i, &s); i++) {
        CHECK_INT(told(m, s.name, &falls), s.fallen);
        CHECK_INT(falls, s.falls);
    }
}

static void show(const model *m) {
    mixp_event e;
    char text[512];
    for (int i = 0; mixp_guard_event(m->ctx, i, &e); i++) printf("    %s\n", mixp_event_text(&e, text, sizeof text));
}

/* All sites are in f16 again; the site of the table fell, and no event came in the last 40 steps. */
static void all_returned(const model *m) {
    mixp_site_info s;
    mixp_event e;
    int i, fell = 0;
    for (i = 0; mixp_site(m->ctx, i, &s); i++) {
        CHECK_INT(s.fallen, 0);
        if (s.falls) CHECK_INT(s.dtype, m->which == OWN_LOSS ? MIXP_F32 : MIXP_F16);
        if (ends_with(s.name, table[m->which].op)) fell += s.falls;
    }
    CHECK(fell > 0);
    for (i = 0; mixp_guard_event(m->ctx, i, &e); i++) CHECK(e.step <= STEPS - 40);
}

static void returns(int which, int level) {
    const int bad = test_bad;
    model m = model_open(which, level);
    const char *why = "";
    for (int i = 1; i <= STEPS; i++) {
        step(&m, i >= FIRST && i <= LAST);
        events_are_true(&m);
    }
    all_returned(&m);
    CHECK_INT(mixp_context_error(m.ctx, &why), MIXP_OK);
    if (test_bad != bad || getenv("SHOW")) {
        printf("  %s, level %d %s\n", table[which].name, level, why);
        show(&m);
    }
    mixp_context_free(m.ctx);
}

static void every_site_returns(void) {
    for (int which = 0; which < ROWS_OF_TABLE; which++)
        for (int level = 1; level <= 2; level++)
            if (table[which].levels >> level & 1) returns(which, level);
}

/* Precision is no longer watched: the sites that fell back because of it return, though the offset stays. */
static void sites_return_without_precision(void) {
    model m = model_open(OFFSET, 1);
    mixp_guard_desc guard;
    mixp_site_info s;
    int i, fell = 0, back = 0;
    memset(&guard, 0, sizeof guard);
    guard.every = 1;
    guard.clean = CLEAN;
    for (i = 0; i < 12; i++) step(&m, 1);
    for (i = 0; mixp_site(m.ctx, i, &s); i++) fell += s.fallen;
    CHECK(fell > 0);
    guard.imprecise = -1;
    CHECK_INT(mixp_guard_start(m.ctx, &guard), MIXP_OK);
    for (i = 0; i <= CLEAN; i++) step(&m, 1);
    for (i = 0; mixp_site(m.ctx, i, &s); i++) {
        CHECK_INT(s.fallen, 0);
        back += s.falls;
    }
    CHECK_INT(back, fell);
    events_are_true(&m);
    CHECK_INT(mixp_context_error(m.ctx, NULL), MIXP_OK);
    mixp_context_free(m.ctx);
}

static void evaluation(const model *m) {
    mixp_step_begin(m->ctx);
    mixp_tensor *x = batch(m, 0);
    MIXP_NO_GRAD(m->ctx) MIXP_AUTOCAST(m->ctx, MIXP_F16) {
        x = applied(m, x, mixp_linear(m->ctx, x, m->pass, NULL));
    }
    CHECK(x != NULL);
}

/* A site whose gradient is flushed to zero in training does not return because evaluations, which have no
 * gradient, are in range; nor does a site of the same operator and weight that fell back with it. */
static void evaluations_return_no_gradient_of(int which) {
    model m = model_open(which, 1);
    mixp_site_info s;
    mixp_event e;
    int i, k, fell = 0;
    for (i = 0; i < 12; i++) {
        step(&m, 1);
        for (k = 0; k < CLEAN + 2; k++) evaluation(&m);
    }
    for (i = 0; mixp_guard_event(m.ctx, i, &e); i++) {
        fell += e.kind == MIXP_EVENT_FLUSHED && e.of_gradient;
        CHECK(e.kind != MIXP_EVENT_BACK);
    }
    CHECK(fell > 0);
    for (i = 0; i < 2 * CLEAN; i++) {
        step(&m, 0);
        evaluation(&m);
    }
    for (i = 0; mixp_site(m.ctx, i, &s); i++) CHECK_INT(s.fallen, 0);
    CHECK_INT(mixp_context_error(m.ctx, NULL), MIXP_OK);
    mixp_context_free(m.ctx);
}

static void evaluations_return_no_gradient(void) {
    evaluations_return_no_gradient_of(GRADIENT);
    evaluations_return_no_gradient_of(GRADIENTS);
}

int main(void) {
    RUN(every_site_returns);
    RUN(sites_return_without_precision);
    RUN(evaluations_return_no_gradient);
    return test_report();
}
