/* test_programs.c - first programs of typical users, each complete, and each learns something: a
 * GRU, a vision transformer, attention to another sequence, and two networks with separate
 * optimizers. For a fully connected network see examples/mlp.c; for a user-defined operator
 * examples/own_operator.c; for a block with rotary positions and SwiGLU tests/core/operators/test_modern_block.c.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include "numbers.h"
#include "test.h"

typedef struct program {
    mixp_context   *c;
    mixp_optimizer *opt;
    mixp_scaler    *scaler;
} program;

static mixp_optimizer *adam(program *p, double lr, double beta1) {
    mixp_optimizer_desc d = mixp_adamw_defaults();
    d.lr = lr;
    d.beta1 = beta1;
    d.max_norm = 1;
    return mixp_optimizer_new(p->c, &d);
}

static program begin(double lr) {
    program p;
    p.c = mixp_context_new(NULL);
    p.scaler = mixp_scaler_new(p.c, NULL);
    p.opt = adam(&p, lr, 0.9);
    random_state = 7;
    return p;
}

static void end(program *p) {
    const char *why;
    CHECK_INT(mixp_context_error(p->c, &why), MIXP_OK);
    if (why && *why) printf("  %s\n", why);
    mixp_context_free(p->c);
}

/* A matrix [out, in], or where in is 0 a vector of zeros. */
static mixp_tensor *weight(program *p, mixp_optimizer *opt, const char *name, int64_t out,
                           int64_t in) {
    int64_t shape[2];
    mixp_tensor *t;
    shape[0] = out;
    shape[1] = in;
    t = mixp_param(p->c, name, MIXP_F32, in ? 2 : 1, shape);
    if (in) mixp_init_xavier_uniform(t, 1);
    CHECK_INT(mixp_optimizer_add(opt, t, NULL), MIXP_OK);
    return t;
}

static mixp_tensor *gain(program *p, const char *name, int64_t n) {
    mixp_tensor *t = weight(p, p->opt, name, n, 0);
    mixp_fill(t, 1);
    return t;
}

/* The step's second half; its loss. */
static double learn(program *p, mixp_optimizer *opt, mixp_tensor *loss) {
    CHECK_INT(mixp_backward(p->c, mixp_scaler_scale(p->scaler, loss)), MIXP_OK);
    CHECK_INT(mixp_scaler_step(p->scaler, opt), MIXP_OK);
    CHECK_INT(mixp_scaler_update(p->scaler), MIXP_OK);
    return mixp_item(loss);
}

static void next_step(program *p, mixp_optimizer *opt) {
    mixp_step_begin(p->c);
    mixp_zero_grad(opt);
}

static mixp_tensor *ints(program *p, int64_t n, const int32_t *x)
{ return mixp_input(p->c, MIXP_I32, 1, &n, x); }

/* --- a GRU: which of four symbols came first? ---------------------------------------------- */

enum { SEQUENCES = 32, LENGTH = 8, SYMBOLS = 4, STATE = 24 };

typedef struct gru { mixp_tensor *embed, *of_x, *of_h, *bias, *head; } gru;

/* From h to the next: Cho et al., 2014, with the reset gate behind the product (as cuDNN's). */
static mixp_tensor *gru_cell(program *p, const gru *g, mixp_tensor *x, mixp_tensor *h) {
    mixp_tensor *a[3], *b[3], *reset, *keep, *fresh;
    mixp_split(p->c, mixp_linear(p->c, x, g->of_x, g->bias), 1, 3, a);
    mixp_split(p->c, mixp_linear(p->c, h, g->of_h, NULL), 1, 3, b);
    reset = mixp_sigmoid(p->c, mixp_add(p->c, a[0], b[0]));
    keep = mixp_sigmoid(p->c, mixp_add(p->c, a[1], b[1]));
    fresh = mixp_tanh(p->c, mixp_add(p->c, a[2], mixp_mul(p->c, reset, b[2])));
    return mixp_add(p->c, fresh, mixp_mul(p->c, keep, mixp_sub(p->c, h, fresh)));
}

static mixp_tensor *gru_loss(program *p, const gru *g, int32_t (*ids)[SEQUENCES]) {
    static const float zeros[SEQUENCES * STATE];
    int64_t shape[2] = { SEQUENCES, STATE };
    mixp_tensor *h = mixp_input(p->c, MIXP_F32, 2, shape, zeros);
    for (int t = 0; t < LENGTH; t++)
        h = gru_cell(p, g, mixp_embedding(p->c, g->embed, ints(p, SEQUENCES, ids[t])), h);
    return mixp_cross_entropy(p->c, mixp_linear(p->c, h, g->head, NULL),
                              ints(p, SEQUENCES, ids[0]), MIXP_IGNORE);
}

static void a_gru_remembers(void) {
    program p = begin(1e-2);
    int32_t ids[LENGTH][SEQUENCES];
    double first = 0, last = 0;
    gru g;
    g.embed = weight(&p, p.opt, "embed", SYMBOLS, STATE);
    g.of_x = weight(&p, p.opt, "of_x", 3 * STATE, STATE);
    g.of_h = weight(&p, p.opt, "of_h", 3 * STATE, STATE);
    g.bias = weight(&p, p.opt, "bias", 3 * STATE, 0);
    g.head = weight(&p, p.opt, "head", SYMBOLS, STATE);
    for (int step = 0; step < 120; step++) {
        mixp_tensor *loss = NULL;
        for (int t = 0; t < LENGTH; t++)
            for (int i = 0; i < SEQUENCES; i++) ids[t][i] = (int32_t)random_to(SYMBOLS);
        next_step(&p, p.opt);
        MIXP_AUTOCAST(p.c, MIXP_F16) { loss = gru_loss(&p, &g, ids); }
        last = learn(&p, p.opt, loss);
        if (step == 0) first = last;
    }
    CHECK(first > 1.2);
    CHECK(last < 0.1);
    end(&p);
}

/* --- a vision transformer: lying stripes, standing ones, or a chess board? ------------------- */

enum { IMAGES = 16, SIDE = 12, PATCH = 3, ACROSS = SIDE / PATCH, PATCHES = ACROSS * ACROSS,
       CHANNELS = 32, KINDS = 3 };

typedef struct vit {
    mixp_tensor *patch, *cls, *place, *norm[3], *qkv, *merge, *up, *down, *head;
} vit;

static void draw(float *image, int32_t kind) {
    int shift = random_to(2), y, x;
    for (y = 0; y < SIDE; y++)
        for (x = 0; x < SIDE; x++) {
            int on = kind == 0 ? y / 2 : kind == 1 ? x / 2 : x / 2 + y / 2;
            image[y * SIDE + x] = (float)((on + shift) % 2) + (float)random_value();
        }
}

/* [images, side, side] to [images, patches, pixels of one]: no copy by hand. */
static mixp_tensor *patches_of(program *p, const float *images) {
    int64_t shape[5] = { IMAGES, ACROSS, PATCH, ACROSS, PATCH };
    int64_t tokens[3] = { IMAGES, PATCHES, PATCH * PATCH };
    mixp_tensor *x = mixp_input(p->c, MIXP_F32, 5, shape, images);
    return mixp_reshape(p->c, mixp_transpose(p->c, x, 2, 3), 3, tokens);
}

static mixp_tensor *vit_logits(program *p, const vit *v, const float *images) {
    static const float zeros[IMAGES * CHANNELS];
    int64_t one[3] = { IMAGES, 1, CHANNELS }, flat[2] = { IMAGES, CHANNELS };
    mixp_context *c = p->c;
    mixp_tensor *parts[2], *x, *h;
    parts[0] = mixp_add(c, mixp_input(c, MIXP_F32, 3, one, zeros), v->cls);
    parts[1] = mixp_linear(c, patches_of(p, images), v->patch, NULL);
    x = mixp_add(c, mixp_concat(c, 2, parts, 1), v->place);
    h = mixp_linear(c, mixp_layer_norm(c, x, v->norm[0], NULL, 1e-5f), v->qkv, NULL);
    h = mixp_linear(c, mixp_attention(c, h, 4, 0, 0), v->merge, NULL);
    h = mixp_add_layer_norm(c, x, h, v->norm[1], NULL, 1e-5f, &x);
    h = mixp_linear(c, mixp_gelu(c, mixp_linear(c, h, v->up, NULL)), v->down, NULL);
    x = mixp_layer_norm(c, mixp_add(c, x, h), v->norm[2], NULL, 1e-5f);
    x = mixp_reshape(c, mixp_slice(c, x, 1, 0, 1), 2, flat);    /* of the class token alone */
    return mixp_linear(c, x, v->head, NULL);
}

static vit vit_new(program *p) {
    vit v;
    v.patch = weight(p, p->opt, "patch", CHANNELS, PATCH * PATCH);
    v.cls = weight(p, p->opt, "cls", CHANNELS, 0);
    v.place = weight(p, p->opt, "place", PATCHES + 1, CHANNELS);
    v.norm[0] = gain(p, "norm0", CHANNELS);
    v.norm[1] = gain(p, "norm1", CHANNELS);
    v.norm[2] = gain(p, "norm2", CHANNELS);
    v.qkv = weight(p, p->opt, "qkv", 3 * CHANNELS, CHANNELS);
    v.merge = weight(p, p->opt, "merge", CHANNELS, CHANNELS);
    v.up = weight(p, p->opt, "up", 2 * CHANNELS, CHANNELS);
    v.down = weight(p, p->opt, "down", CHANNELS, 2 * CHANNELS);
    v.head = weight(p, p->opt, "head", KINDS, CHANNELS);
    return v;
}

static void a_vit_tells_patterns_apart(void) {
    static float images[IMAGES * SIDE * SIDE];
    program p = begin(3e-3);
    vit v = vit_new(&p);
    int32_t kind[IMAGES];
    double first = 0, last = 0;
    for (int step = 0; step < 120; step++) {
        mixp_tensor *loss = NULL;
        for (int i = 0; i < IMAGES; i++) {
            kind[i] = (int32_t)random_to(KINDS);
            draw(images + i * SIDE * SIDE, kind[i]);
        }
        next_step(&p, p.opt);
        MIXP_AUTOCAST(p.c, MIXP_BF16) {
            loss = mixp_cross_entropy(p.c, vit_logits(&p, &v, images), ints(&p, IMAGES, kind),
                                      MIXP_IGNORE);
        }
        last = learn(&p, p.opt, loss);
        if (step < 10) first += last / 10;
    }
    CHECK(first > 0.8);
    CHECK(last < 0.2);
    end(&p);
}

/* --- attention to another sequence: look up what belongs to a key ---------------------------- */

enum { LISTS = 16, ASKED = 3, ENTRIES = 6, KEYS = 8, VALUES = 5, WIDTH = 32 };

/* A list holds entries (key, value), each key once; beyond its length stand the same keys with
 * other values, which nobody must see. */
typedef struct lists {
    int32_t key[LISTS * ENTRIES], value[LISTS * ENTRIES], length[LISTS];
    int32_t asked[LISTS * ASKED], answer[LISTS * ASKED];
} lists;

static void make_list(lists *l, int at) {
    int32_t *key = l->key + at * ENTRIES, *value = l->value + at * ENTRIES;
    int from = random_to(KEYS), n = 2 + random_to(ENTRIES - 2), i, one;
    l->length[at] = (int32_t)n;
    for (i = 0; i < ENTRIES; i++) {
        key[i] = (int32_t)((from + 3 * (i < n ? i : i - n)) % KEYS);
        value[i] = (int32_t)random_to(VALUES);
    }
    for (i = 0; i < ASKED; i++) {
        one = random_to(n);
        l->asked[at * ASKED + i] = key[one];
        l->answer[at * ASKED + i] = value[one];
    }
}

typedef struct reader { mixp_tensor *key, *value, *q, *k, *v, *head; } reader;

static mixp_tensor *reader_loss(program *p, const reader *r, const lists *l, int with_lengths) {
    int64_t entries[2] = { LISTS, ENTRIES }, asked[2] = { LISTS, ASKED };
    mixp_context *c = p->c;
    mixp_attention_desc d;
    memset(&d, 0, sizeof d);
    d.heads = 2;
    if (with_lengths) d.lengths = ints(p, LISTS, l->length);
    mixp_tensor *keys = mixp_input(c, MIXP_I32, 2, entries, l->key);
    mixp_tensor *memory = mixp_add(c, mixp_embedding(c, r->key, keys),
                      mixp_embedding(c, r->value, mixp_input(c, MIXP_I32, 2, entries, l->value)));
    mixp_tensor *question = mixp_embedding(c, r->key, mixp_input(c, MIXP_I32, 2, asked, l->asked));
    mixp_tensor *y = mixp_attention_apply(c, mixp_linear(c, question, r->q, NULL),
                             mixp_linear(c, memory, r->k, NULL),
                             mixp_linear(c, memory, r->v, NULL), &d);
    return mixp_cross_entropy(c, mixp_linear(c, y, r->head, NULL),
                              mixp_input(c, MIXP_I32, 2, asked, l->answer), MIXP_IGNORE);
}

static void attention_looks_up(void) {
    program p = begin(5e-3);
    double first = 0, last = 0;
    static lists l;
    reader r;
    r.key = weight(&p, p.opt, "key", KEYS, WIDTH);
    r.value = weight(&p, p.opt, "value", VALUES, WIDTH);
    r.q = weight(&p, p.opt, "q", WIDTH, WIDTH);
    r.k = weight(&p, p.opt, "k", WIDTH, WIDTH);
    r.v = weight(&p, p.opt, "v", WIDTH, WIDTH);
    r.head = weight(&p, p.opt, "head", VALUES, WIDTH);
    for (int step = 0; step < 250; step++) {
        mixp_tensor *loss = NULL;
        for (int i = 0; i < LISTS; i++) make_list(&l, i);
        next_step(&p, p.opt);
        MIXP_AUTOCAST(p.c, MIXP_F16) { loss = reader_loss(&p, &r, &l, 1); }
        last = learn(&p, p.opt, loss);
        if (step == 0) first = last;
    }
    CHECK(first > 1.4);
    CHECK(last < 0.1);
    mixp_step_begin(p.c);       /* and what lies beyond a list's end would mislead */
    MIXP_NO_GRAD(p.c) { CHECK(mixp_item(reader_loss(&p, &r, &l, 0)) > 5 * last + 0.1); }
    end(&p);
}

/* --- two nets, an optimizer each: one makes numbers, one tells them from real ones ------------ */

enum { DRAWS = 64, JUDGE = 16 };

typedef struct gan {
    mixp_optimizer *maker_opt, *judge_opt;
    mixp_tensor *stretch, *shift, *w1, *b1, *w2, *b2;
} gan;

static mixp_tensor *draws(program *p, double mean, double spread) {
    int64_t shape[2] = { DRAWS, 1 };
    float x[DRAWS];
    for (int i = 0; i < DRAWS; i++)
        x[i] = (float)(mean + spread * (random_value() + random_value() + random_value()));
    return mixp_input(p->c, MIXP_F32, 2, shape, x);
}

static mixp_tensor *made(program *p, const gan *g)
{ return mixp_linear(p->c, draws(p, 0, 1), g->stretch, g->shift); }

static mixp_tensor *verdict(program *p, const gan *g, mixp_tensor *x, float is_real) {
    int64_t shape[2] = { DRAWS, 1 };
    float truth[DRAWS];
    for (int i = 0; i < DRAWS; i++) truth[i] = is_real;
    x = mixp_tanh(p->c, mixp_linear(p->c, x, g->w1, g->b1));
    x = mixp_linear(p->c, x, g->w2, g->b2);
    return mixp_bce_with_logits(p->c, x, mixp_input(p->c, MIXP_F32, 2, shape, truth));
}

static void judge_learns(program *p, const gan *g) {
    mixp_tensor *loss = NULL, *fake = NULL;
    next_step(p, g->judge_opt);
    MIXP_NO_GRAD(p->c) { fake = made(p, g); }
    MIXP_AUTOCAST(p->c, MIXP_F16) {
        loss = mixp_add(p->c, verdict(p, g, draws(p, 3, 0.5), 1), verdict(p, g, fake, 0));
    }
    learn(p, g->judge_opt, loss);
}

/* Where the numbers that it makes lie. */
static double maker_learns(program *p, const gan *g) {
    mixp_tensor *loss = NULL, *fake = NULL, *mean;
    next_step(p, g->maker_opt);
    MIXP_AUTOCAST(p->c, MIXP_F16) {
        fake = made(p, g);
        loss = verdict(p, g, fake, 1);
    }
    mean = mixp_mean(p->c, fake, MIXP_ALL, 0);
    learn(p, g->maker_opt, loss);
    return mixp_item(mean);
}

static void two_nets_play(void) {
    program p = begin(1);
    double mean, late = 0;
    gan g;
    g.maker_opt = adam(&p, 1e-2, 0.5);
    g.judge_opt = adam(&p, 1e-2, 0.5);
    g.stretch = weight(&p, g.maker_opt, "stretch", 1, 1);
    g.shift = weight(&p, g.maker_opt, "shift", 1, 0);
    g.w1 = weight(&p, g.judge_opt, "w1", JUDGE, 1);
    g.b1 = weight(&p, g.judge_opt, "b1", JUDGE, 0);
    g.w2 = weight(&p, g.judge_opt, "w2", 1, JUDGE);
    g.b2 = weight(&p, g.judge_opt, "b2", 1, 0);
    for (int step = 0; step < 800; step++) {
        judge_learns(&p, &g);
        mean = maker_learns(&p, &g);
        if (step == 0) CHECK(fabs(mean) < 1);
        if (step >= 600) late += mean / 200;
    }
    if (!(fabs(late - 3) < 0.5)) printf("  the numbers lie at %g\n", late);
    CHECK(fabs(late - 3) < 0.5);
    CHECK(mixp_optimizer_verdict(g.maker_opt).applied > 780);
    CHECK(mixp_optimizer_verdict(g.judge_opt).applied > 780);
    end(&p);
}

int main(void) {
    RUN(a_gru_remembers);
    RUN(a_vit_tells_patterns_apart);
    RUN(attention_looks_up);
    RUN(two_nets_play);
    return test_report();
}
