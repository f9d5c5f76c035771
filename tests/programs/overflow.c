/* overflow.c - an activation above the largest number of fp16, with the guard and without.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 *     make build/overflow && build/overflow [planted|growth|logits]
 *
 * The values are planted; test_overflow.sh checks the table. `make show` has models that overflow by
 * themselves.
 * planted: a small GPT in which the second product of the middle feed-forward block is 66246, a value
 * observed in T5 (see plant.h). f32 stores the value. fp16 stores Inf, in each step and at any loss
 * scale: PyTorch's GradScaler skips all steps until its scale is at the floor. A guard finds the site
 * at the first sampled step, and the site stores f32 from then on.
 * growth: one element of that block's first product is 1035 at first and grows to twice 66246 from
 * step 200 to 340. A guard sees the element approach the end of the range.
 * logits: q of the middle block grows in the same way, and the logits of attention grow to 47,000.
 *
 *     overflow planted --export DIR   also writes DIR/weights.safetensors, batches.bin, grown.bin and
 *                                     case.txt, from which tests/bench/torch_overflow.py trains PyTorch
 *
 * Exit status: 0 if the guarded runs end within 0.01 of f32's loss and the unguarded run does not.
 */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include "../../examples/plant.h"

#include <stdio.h>

enum { LAYERS = 3, WIDTH = 32, HEADS = 2, HIDDEN = 4 * WIDTH, VOCAB = 32, LENGTH = 16, BATCH = 16,
       TOKENS = BATCH * LENGTH, STEPS = 600, MIDDLE = LAYERS / 2, LAST = 50 };

typedef struct layer { mixp_tensor *w, *b; } layer;
typedef struct block { layer norm1, qkv, out, norm2, up, down; } block;
typedef struct gpt { mixp_context *ctx; mixp_tensor *tokens, *places; block blocks[LAYERS]; layer norm; } gpt;

/* What overflows. */
typedef enum plant { PLANTED, GROWTH, LOGITS, PLANTS } plant;
static const char *const plant_names[PLANTS] = {"planted", "growth", "logits"};

/* How a run is made, and what came of it. */
typedef struct run {
    const char *name;
    plant       what;
    mixp_dtype  dtype;
    int         level, guarded;
    double      loss;                   /* the mean of the last 50 steps' */
    mixp_verdict verdict;
    int         in_f32;                 /* sites that fell back */
    char        sites[400];
    double      largest;                /* that the first of them stores */
} run;

/* --- the model --- */

static layer make_layer(gpt *m, const char *name, int64_t rows, int64_t cols, double std) {
    int64_t shape[2];
    char    full[64];
    layer   l;
    shape[0] = rows;
    shape[1] = cols;
    snprintf(full, sizeof full, "%s.w", name);
    l.w = mixp_param(m->ctx, full, MIXP_F32, cols ? 2 : 1, shape);
    if (cols) mixp_init_normal(l.w, 0, std);
    else mixp_fill(l.w, 1);
    snprintf(full, sizeof full, "%s.b", name);
    l.b = mixp_param(m->ctx, full, MIXP_F32, 1, shape);
    return l;
}

static mixp_tensor *make_table(gpt *m, const char *name, int64_t rows) {
    int64_t      shape[2] = {0, WIDTH};
    shape[0] = rows;
    mixp_tensor *t = mixp_param(m->ctx, name, MIXP_F32, 2, shape);
    mixp_init_normal(t, 0, 0.02);
    return t;
}

static layer make_in(gpt *m, int i, const char *name, int64_t rows, int64_t cols) {
    char full[64];
    snprintf(full, sizeof full, "h.%d.%s", i, name);
    return make_layer(m, full, rows, cols, 0.05);
}

static void make_gpt(gpt *m, mixp_context *ctx) {
    m->ctx = ctx;
    m->tokens = make_table(m, "tokens", VOCAB);
    m->places = make_table(m, "places", LENGTH);
    for (int i = 0; i < LAYERS; i++) {
        block *b = &m->blocks[i];
        b->norm1 = make_in(m, i, "norm1", WIDTH, 0);
        b->qkv = make_in(m, i, "attn.qkv", 3 * WIDTH, WIDTH);
        b->out = make_in(m, i, "attn.out", WIDTH, WIDTH);
        b->norm2 = make_in(m, i, "norm2", WIDTH, 0);
        b->up = make_in(m, i, "mlp.up", HIDDEN, WIDTH);
        b->down = make_in(m, i, "mlp.down", WIDTH, HIDDEN);
    }
    m->norm = make_layer(m, "norm", WIDTH, 0, 0);
}

static mixp_tensor *linear(const gpt *m, mixp_tensor *x, layer l)
{ return mixp_linear(m->ctx, x, l.w, l.b); }

static mixp_tensor *norm(const gpt *m, mixp_tensor *x, layer l)
{ return mixp_layer_norm(m->ctx, x, l.w, l.b, 1e-5f); }

static mixp_tensor *block_forward(const gpt *m, const block *b, mixp_tensor *x) {
    mixp_tensor *h = mixp_attention(m->ctx, linear(m, norm(m, x, b->norm1), b->qkv), HEADS, 1, 0);
    x = mixp_add(m->ctx, x, linear(m, h, b->out));
    h = mixp_gelu(m->ctx, linear(m, norm(m, x, b->norm2), b->up));
    return mixp_add(m->ctx, x, linear(m, h, b->down));
}

static mixp_tensor *gpt_loss(const gpt *m, const int32_t *ids, const int32_t *next) {
    mixp_context *ctx = m->ctx;
    int64_t       shape[2] = {BATCH, LENGTH}, length = LENGTH;
    int32_t       ramp[LENGTH];
    for (int i = 0; i < LENGTH; i++) ramp[i] = i;
    mixp_tensor *x = mixp_embedding(ctx, m->tokens, mixp_input(ctx, MIXP_I32, 2, shape, ids));
    mixp_tensor *y = mixp_embedding(ctx, m->places, mixp_input(ctx, MIXP_I32, 1, &length, ramp));
    x = mixp_add(ctx, x, y);
    for (int i = 0; i < LAYERS; i++) x = block_forward(m, &m->blocks[i], x);
    y = mixp_linear(ctx, norm(m, x, m->norm), m->tokens, NULL);
    return mixp_cross_entropy(ctx, y, mixp_input(ctx, MIXP_I32, 2, shape, next), MIXP_IGNORE);
}

/* Each token follows from the two before it, but for one random bit: no loss is below ln 2. */
static void make_batch(int step, int32_t *ids, int32_t *next) {
    for (int row = 0; row < BATCH; row++) {
        int a = 0, b = (int)(mixp_random_u32(1, (uint64_t)step, (uint64_t)row, 0) % VOCAB);
        for (int i = 0; i < LENGTH; i++) {
            int c = (5 * b + 3 * (a & 1) + 1) % VOCAB;
            c ^= (int)(mixp_random_u32(2, (uint64_t)step, (uint64_t)row, (uint64_t)i) & 1);
            ids[row * LENGTH + i] = b;
            next[row * LENGTH + i] = c;
            a = b;
            b = c;
        }
    }
}

/* --- what is planted --- */

/* What grows, as a multiple of what it is at first sight: of 66246. */
static float grown(plant what, int step) {
    int n = step < 200 ? 0 : step < 340 ? step - 200 : 140;
    return what == PLANTED ? 1.0f : (float)exp2((n - 120) / 20.0);
}

/* Channel 0 of a norm's result is cut off from the rest, and is `bias` for every token. */
static int plant_channel(layer norm, float bias)
{ return plant_some(norm.w, 0, 1, 1, 0) && plant_some(norm.b, 0, 1, 1, bias); }

/* Row `at` of a product reads that channel alone, multiplied by `weight`. */
static int plant_row(layer l, int64_t at, float weight) {
    return plant_some(l.w, at * WIDTH, 1, (at + 1) * WIDTH, 0) && plant_some(l.b, at, 1, at + 1, 0) &&
           plant_some(l.w, at * WIDTH, 1, at * WIDTH + 1, weight);
}

/* Of gradients all is 0. Growth: the last hidden unit is the large one, and adds little to what all
 * channels are. Logits: q's first element is large, and k's 181/128, for every token: each logit grows
 * by as much as all others, which softmax does not see. */
static int plant_block(const block *b, plant what, int weights, float f) {
    const float bias = weights ? PLANT_BIAS : 0, large = weights ? PLANT_WEIGHT * f : 0;
    if (what == PLANTED) return plant_three(b->up.w, b->up.b, b->down.w, bias, large);
    if (what == GROWTH)
        return plant_channel(b->norm2, bias) && plant_values(b->up.w, 0, WIDTH, 0) &&
               plant_row(b->up, HIDDEN - 1, large) &&
               plant_values(b->down.w, HIDDEN - 1, HIDDEN, weights ? 1.0f / 16384 : 0);
    return plant_channel(b->norm1, bias) && plant_values(b->qkv.w, 0, WIDTH, 0) &&
           plant_row(b->qkv, 0, large) && plant_row(b->qkv, WIDTH, weights ? 1.0f / 128 : 0);
}

/* The weights that this step is to see. */
static int plant_step(const block *b, plant what, int step) {
    const float f = grown(what, step), before = grown(what, step ? step - 1 : 0);
    return (step > 0 && memcmp(&f, &before, sizeof f) == 0) || plant_block(b, what, 1, f);
}

static layer gradients(layer l) {
    layer g;
    g.w = l.w->grad;
    g.b = l.b->grad;
    return g;
}

/* What was planted is not trained. */
static int plant_hold(const block *b, plant what) {
    block g = *b;
    g.norm1 = gradients(b->norm1);
    g.norm2 = gradients(b->norm2);
    g.qkv = gradients(b->qkv);
    g.up = gradients(b->up);
    g.down = gradients(b->down);
    return plant_block(&g, what, 0, 0);
}

/* --- training --- */

static mixp_optimizer *make_optimizer(gpt *m) {
    mixp_optimizer_desc d = mixp_adamw_defaults();
    d.lr = 3e-3;
    d.weight_decay = 0;
    d.max_norm = 1;
    d.schedule.kind = MIXP_SCHEDULE_LINEAR;
    d.schedule.total = STEPS;
    d.schedule.min_factor = 0.01;
    mixp_optimizer *opt = mixp_optimizer_new(m->ctx, &d);
    mixp_optimizer_add(opt, m->tokens, NULL);
    mixp_optimizer_add(opt, m->places, NULL);
    for (int i = 0; i < LAYERS; i++) {
        const block *b = &m->blocks[i];
        const layer  all[] = {b->norm1, b->qkv, b->out, b->norm2, b->up, b->down};
        for (int k = 0; k < 6; k++) {
            mixp_optimizer_add(opt, all[k].w, NULL);
            mixp_optimizer_add(opt, all[k].b, NULL);
        }
    }
    mixp_optimizer_add(opt, m->norm.w, NULL);
    mixp_optimizer_add(opt, m->norm.b, NULL);
    return opt;
}

static double train_step(gpt *m, const run *r, mixp_optimizer *opt, mixp_scaler *scaler, int step) {
    int32_t      ids[TOKENS], next[TOKENS];
    block       *b = &m->blocks[MIDDLE];
    mixp_tensor *loss = NULL;
    plant_step(b, r->what, step);
    make_batch(step, ids, next);
    mixp_zero_grad(opt);
    mixp_step_begin(m->ctx);
    MIXP_AUTOCAST(m->ctx, r->dtype) { loss = gpt_loss(m, ids, next); }
    mixp_backward(m->ctx, mixp_scaler_scale(scaler, loss));
    double value = mixp_item(loss);
    plant_hold(b, r->what);
    mixp_scaler_step(scaler, opt);
    mixp_scaler_update(scaler);
    return value;
}

static void note_sites(run *r, mixp_context *ctx) {
    mixp_site_info s;
    size_t         used = 0;
    for (int i = 0; mixp_site(ctx, i, &s); i++) {
        if (!s.fallen) continue;
        if (r->in_f32++ == 0) r->largest = (double)s.value.largest;
        if (used < sizeof r->sites)
            used += (size_t)snprintf(r->sites + used, sizeof r->sites - used, "%s%s",
                                     used ? ", " : "", s.name);
    }
}

static FILE *open_in(const char *folder, const char *name) {
    char path[1024];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return fopen(path, "wb");
}

/* What PyTorch needs to do the same. */
static mixp_result export_run(mixp_context *ctx, plant planted, const char *folder) {
    mixp_checkpoint what;
    char            path[1024];
    int32_t         ids[TOKENS], next[TOKENS];
    size_t          written = 0;
    FILE           *f = open_in(folder, "case.txt");
    if (!f || fputs(plant_names[planted], f) < 0 || fclose(f) != 0) return MIXP_ERR_IO;
    f = open_in(folder, "grown.bin");
    for (int step = 0; f && step < STEPS; step++) {
        float now = grown(planted, step);
        written += fwrite(&now, sizeof now, 1, f);
    }
    if (!f || fclose(f) != 0 || written != STEPS) return MIXP_ERR_IO;
    f = open_in(folder, "batches.bin");
    for (int step = 0; f && step < STEPS; step++) {
        make_batch(step, ids, next);
        written += fwrite(ids, sizeof ids, 1, f) + fwrite(next, sizeof next, 1, f);
    }
    if (!f || fclose(f) != 0 || written != 3 * STEPS) return MIXP_ERR_IO;
    memset(&what, 0, sizeof what);
    what.ctx = ctx;
    snprintf(path, sizeof path, "%s/weights.safetensors", folder);
    return mixp_checkpoint_save(path, &what);
}

static int train(run *r, const char *folder) {
    mixp_context_desc desc;
    const char       *why = "";
    gpt               m;
    memset(&desc, 0, sizeof desc);
    desc.seed = 1337;
    desc.threads = 1;
    mixp_context *ctx = mixp_context_new(&desc);
    mixp_autocast_set_level(ctx, r->level);
    if (r->guarded) mixp_guard_start(ctx, NULL);
    make_gpt(&m, ctx);
    plant_step(&m.blocks[MIDDLE], r->what, 0);
    if (folder && export_run(ctx, r->what, folder) != MIXP_OK) {
        fprintf(stderr, "cannot write into %s\n", folder);
        return 0;
    }
    mixp_optimizer *opt = make_optimizer(&m);
    mixp_scaler *scaler = mixp_scaler_new(ctx, NULL);        /* PyTorch's rule */
    for (int step = 0; step < STEPS; step++) {
        double loss;
        do loss = train_step(&m, r, opt, scaler, step);     /* the same batch, site by site */
        while (r->guarded && mixp_retry(scaler, 3));
        if (step >= STEPS - LAST) r->loss += loss / LAST;
        if (mixp_context_error(ctx, NULL) != MIXP_OK) break;
    }
    r->verdict = mixp_scaler_verdict(scaler);
    note_sites(r, ctx);
    mixp_result result = mixp_context_error(ctx, &why);
    if (result == MIXP_ERR_DIVERGED) r->loss = HUGE_VAL;
    if (result != MIXP_OK) fprintf(stderr, "%s: %s\n", r->name, why);
    mixp_context_free(ctx);
    return result == MIXP_OK || result == MIXP_ERR_DIVERGED;
}

/* --- the table --- */

static void print_run(const run *r) {
    char loss[24];
    if (r->loss - r->loss == 0) snprintf(loss, sizeof loss, "%.4f", r->loss);
    else snprintf(loss, sizeof loss, "not finite");
    printf("%-30s %10s %8lld %10lld %12g\n", r->name, loss, (long long)r->verdict.applied,
           (long long)r->verdict.skipped, (double)r->verdict.scale);
    if (r->in_f32)
        printf("    in f32: %s\n    which stores numbers up to %.0f\n", r->sites, r->largest);
}

/* f32, GradScaler's rule, and a guard at two levels. 1: as it should be; 0: not; -1: an error. */
static int show(plant what, const char *folder) {
    run runs[] = {
        {"f32", what, MIXP_F32, 0, 0, 0, {0}, 0, "", 0},
        {"fp16, GradScaler's rule", what, MIXP_F16, 1, 0, 0, {0}, 0, "", 0},
        {"fp16, guarded, level 1", what, MIXP_F16, 1, 1, 0, {0}, 0, "", 0},
        {"fp16, guarded, level 2", what, MIXP_F16, 2, 1, 0, {0}, 0, "", 0}};
    int good = 1;
    printf("%-30s %10s %8s %10s %12s\n", plant_names[what], "loss", "applied", "skipped", "scale");
    for (int i = 0; i < 4; i++) {
        if (!train(&runs[i], i ? NULL : folder)) return -1;
        print_run(&runs[i]);
        double off = fabs(runs[i].loss - runs[0].loss);
        if (runs[i].guarded) good = good && off <= 0.01;
        else if (i) good = good && !(off <= 0.01);
    }
    printf(good ? "guarded fp16 ends within 0.01 of f32, and names what it needed\n\n"
                : "NOT as it should be: see the table\n\n");
    return good;
}

int main(int argc, char **argv) {
    const char *folder = NULL;
    int         which = PLANTED;
    if (argc > 1 && argv[1][0] != '-') {
        for (which = 0; which < PLANTS && strcmp(argv[1], plant_names[which]); which++) continue;
        argc--, argv++;
    }
    if (argc == 3 && strcmp(argv[1], "--export") == 0) folder = argv[2];
    if (which == PLANTS || (argc > 1 && !folder)) {
        fprintf(stderr, "usage: overflow [planted|growth|logits] [--export DIR]\n");
        return 2;
    }
    return show((plant)which, folder) != 1;
}
