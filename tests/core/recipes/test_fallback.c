/* test_fallback.c - operands that a recipe quantises badly fall back to bf16 under a guard, one by
 * one: a layer with outlier channels of 10^4, the error in the event beside loops in double and beside
 * counts, return and relapse, clipped values of delayed scaling, resume, two ranks, refusals.
 * SPDX-License-Identifier: MIT OR Unlicense */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "mixprec.h"
#include "test.h"
#include "find.h"
#include "lossy.h"
#ifndef _WIN32
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include "../../../examples/ddp_fork.c"
#endif

enum { ROWS = 128, WIDTH = 128, STEPS = 200 };

typedef struct net {
    mixp_context   *ctx;
    mixp_optimizer *opt;
    mixp_tensor    *w[2];
    float           loss;
} net;

typedef struct plan {
    mixp_recipe recipe;
    int         guarded, every, first_only;     /* first_only: the recipe is only for w0 */
    float       outlier;        /* of every 16th column of x */
    float       usual;          /* of the others */
} plan;

static double unit(uint64_t key, int i)
{ return (double)mixp_random_at(mixp_random_key(3, key, 1), (uint64_t)i) / 4294967296.0 - 0.5; }

/* A network whose first weights read nothing from the outlier columns. */
static net net_new(const plan *p, const mixp_ranks_desc *ranks) {
    const int64_t shape[2] = { WIDTH, WIDTH };
    static float start[WIDTH * WIDTH];
    mixp_optimizer_desc adamw = mixp_adamw_defaults();
    mixp_context_desc desc;
    mixp_guard_desc guard;
    mixp_recipe_rule rule = { "w0", NULL };
    net n;
    memset(&desc, 0, sizeof desc);
    memset(&guard, 0, sizeof guard);
    desc.threads = 2;
    desc.seed = 5;
    desc.ranks = ranks;
    adamw.lr = 0.01;
    n.ctx = mixp_context_new(&desc);
    n.opt = mixp_optimizer_new(n.ctx, &adamw);
    n.w[0] = mixp_param(n.ctx, "w0", MIXP_F32, 2, shape);
    n.w[1] = mixp_param(n.ctx, "w1", MIXP_F32, 2, shape);
    for (int i = 0; i < WIDTH * WIDTH; i++) start[i] = i % 16 ? (float)(unit(1, i) * 0.3 / (double)p->usual) : 0.0f;
    mixp_write(n.w[0], start, MIXP_F32, WIDTH * WIDTH);
    for (int i = 0; i < WIDTH * WIDTH; i++) start[i] = (float)(unit(2, i) * 0.3);
    mixp_write(n.w[1], start, MIXP_F32, WIDTH * WIDTH);
    for (int i = 0; i < 2; i++) mixp_optimizer_add(n.opt, n.w[i], NULL);
    guard.every = p->every;
    guard.clean = 2;
    guard.imprecise = -1.0f;        /* measuring precision computes products again, which are counted */
    if (p->guarded) CHECK_INT(mixp_guard_start(n.ctx, &guard), MIXP_OK);
    rule.recipe = &p->recipe;
    if (p->first_only) CHECK_INT(mixp_autocast_set_recipes(n.ctx, &rule, 1), MIXP_OK);
    else CHECK_INT(mixp_autocast_set_recipe(n.ctx, &p->recipe), MIXP_OK);
    return n;
}

/* The columns of the outliers stay 0 in the first weights. */
static void net_ignore(net *n) {
    static float w[WIDTH * WIDTH];
    mixp_read(n->w[0], w, MIXP_F32, WIDTH * WIDTH);
    for (int i = 0; i < WIDTH * WIDTH; i += 16) w[i] = 0.0f;
    mixp_write(n->w[0], w, MIXP_F32, WIDTH * WIDTH);
}

static void fill_x(float *x, float outlier, float usual, uint64_t key) {
    for (int i = 0; i < ROWS * WIDTH; i++)
        x[i] = i % 16 ? (float)(2 * unit(key, i)) * usual : unit(key, i) < 0 ? -outlier : outlier;
}

/* One step on 128 rows, the same in all steps. */
static void net_step(net *n, const plan *p, float outlier, uint64_t key) {
    const int64_t shape[2] = { ROWS, WIDTH };
    static float x[ROWS * WIDTH], y[ROWS * WIDTH];
    mixp_tensor *h = NULL;
    fill_x(x, outlier, p->usual, key);
    for (int i = 0; i < ROWS * WIDTH; i++) y[i] = i % 16 ? sinf(2 * x[i] / p->usual) : 0.0f;
    mixp_step_begin(n->ctx);
    mixp_zero_grad(n->opt);
    MIXP_AUTOCAST(n->ctx, MIXP_BF16) {
        h = mixp_linear(n->ctx, mixp_input(n->ctx, MIXP_F32, 2, shape, x), n->w[0], NULL);
        h = mixp_linear(n->ctx, mixp_gelu_tanh(n->ctx, h), n->w[1], NULL);
        h = mixp_mse(n->ctx, h, mixp_input(n->ctx, MIXP_F32, 2, shape, y));
    }
    mixp_backward(n->ctx, h);
    mixp_optimizer_step(n->opt);
    net_ignore(n);
    n->loss = (float)mixp_item(h);
}

/* Event number i of a kind; 0: there are fewer. */
static int event_of(const net *n, mixp_event_kind kind, int i, mixp_event *e) {
    for (int k = 0; mixp_guard_event(n->ctx, k, e); k++)
        if (e->kind == kind && !i--) return 1;
    return 0;
}

/* The same for the operand x of the first layer. */
static int x_event_of(const net *n, mixp_event_kind kind, int i, mixp_event *e) {
    for (int k = 0; mixp_guard_event(n->ctx, k, e); k++)
        if (e->kind == kind && strcmp(e->operand, "x") == 0 && strncmp(e->site, "w0", 2) == 0 && !i--) return 1;
    return 0;
}

static plan plan_of(mixp_recipe_kind kind, int guarded) {
    plan p;
    memset(&p, 0, sizeof p);
    p.recipe.kind = kind;
    p.guarded = guarded;
    p.every = 4;
    p.outlier = 1e4f;
    p.usual = 0.02f;
    return p;
}

/* --- a layer made to break fp8 ---------------------------------------------------------------- */

static float trained(const plan *p, int64_t *fallen) {
    net n = net_new(p, NULL);
    mixp_event e;
    char text[400];
    int step, i;
    for (step = 0; step < STEPS; step++) net_step(&n, p, p->outlier, 7);
    CHECK_INT(mixp_context_error(n.ctx, NULL), MIXP_OK);
    *fallen = mixp_autocast_recipe_counts(n.ctx).fallen;
    if (p->guarded && p->recipe.kind != MIXP_RECIPE_NONE) {
        CHECK(event_of(&n, MIXP_EVENT_OPERAND, 0, &e));
        CHECK_TEXT(e.site, "w0: linear");
        CHECK(strcmp(e.operand, "x") == 0);
        CHECK(e.error > 0.5 && e.error < 1.0 && e.clipped == 0 && e.step == 1);
        CHECK_TEXT(mixp_event_text(&e, text, sizeof text), "step 1: operand x of w0: linear lost too much when it was quantised: its products are bf16 now (mean relative error 0.");
        for (i = 1; event_of(&n, MIXP_EVENT_OPERAND, i, &e); i++) CHECK(strcmp(e.operand, "x") != 0);
        CHECK(!event_of(&n, MIXP_EVENT_OPERAND_BACK, 0, &e));
    }
    i = 0;
    for (step = 0; p->guarded; step++) {
        mixp_site_info site;
        if (!mixp_site(n.ctx, step, &site)) break;
        i |= site.operands << (strncmp(site.name, "w0", 2) ? 3 : 0);
    }
    CHECK_INT(i, p->guarded && p->recipe.kind != MIXP_RECIPE_NONE ? 1 : 0);
    mixp_context_free(n.ctx);
    return n.loss;
}

static void outliers(void) {
    const mixp_recipe_kind kinds[3] = { MIXP_RECIPE_FP8_CURRENT, MIXP_RECIPE_MXFP8, MIXP_RECIPE_NVFP4 };
    plan p = plan_of(MIXP_RECIPE_NONE, 1);
    int64_t fallen;
    float bf16 = trained(&p, &fallen);
    CHECK_INT(fallen, 0);
    printf("  bf16 %.4f\n", (double)bf16);
    for (int i = 0; i < 3; i++) {
        p = plan_of(kinds[i], 0);
        p.first_only = kinds[i] == MIXP_RECIPE_NVFP4;   /* its second layer would cost more than 0.01 */
        float without = trained(&p, &fallen);
        CHECK_INT(fallen, 0);
        p.guarded = 1;
        float with = trained(&p, &fallen);
        CHECK_INT(fallen, 2 * (STEPS - 1));     /* the products for y and dw, after the first step */
        printf("  %s without %.4f, with fallback %.4f\n", mixp_recipe_name(kinds[i]), (double)without, (double)with);
        CHECK_NEAR(with, bf16, 0.01);
        CHECK(without > bf16 + 0.1f);
    }
}

/* Bounds that say never, and a guard that is off. */
static void never(void) {
    plan p = plan_of(MIXP_RECIPE_FP8_CURRENT, 1);
    mixp_event e;
    mixp_guard_desc guard;
    memset(&guard, 0, sizeof guard);
    guard.imprecise = -1.0f;
    p.recipe.error = -1.0f;
    net n = net_new(&p, NULL);
    for (int step = 0; step < 12; step++) net_step(&n, &p, p.outlier, 7);
    CHECK(!event_of(&n, MIXP_EVENT_OPERAND, 0, &e));
    CHECK_INT(mixp_autocast_recipe_counts(n.ctx).fallen, 0);
    mixp_context_free(n.ctx);
    p.recipe.error = 0.99f;         /* a bound above what is lost */
    p.usual = 2.0f;
    n = net_new(&p, NULL);
    for (int step = 0; step < 12; step++) net_step(&n, &p, p.outlier, 7);
    CHECK(!event_of(&n, MIXP_EVENT_OPERAND, 0, &e));
    mixp_context_free(n.ctx);
    p = plan_of(MIXP_RECIPE_FP8_CURRENT, 1);
    n = net_new(&p, NULL);
    net_step(&n, &p, p.outlier, 7);
    net_step(&n, &p, p.outlier, 7);
    CHECK_INT(mixp_autocast_recipe_counts(n.ctx).fallen, 2);
    CHECK_INT(mixp_guard_stop(n.ctx), MIXP_OK);
    net_step(&n, &p, p.outlier, 7);
    CHECK_INT(mixp_autocast_recipe_counts(n.ctx).fallen, 2);
    CHECK_INT(mixp_guard_start(n.ctx, &guard), MIXP_OK);
    net_step(&n, &p, p.outlier, 7);
    CHECK_INT(mixp_autocast_recipe_counts(n.ctx).fallen, 4);
    mixp_context_free(n.ctx);
}

/* --- the numbers of an event ------------------------------------------------------------------ */

static void numbers(void) {
    static float x[ROWS * WIDTH];
    plan p = plan_of(MIXP_RECIPE_FP8_CURRENT, 1);
    net n = net_new(&p, NULL);
    double error, clipped;
    mixp_event e;
    net_step(&n, &p, p.outlier, 7);
    fill_x(x, p.outlier, p.usual, 7);
    lose_at(x, ROWS * WIDTH, (double)(448.0f / (float)in_bf16(1e4)), &error, &clipped);
    CHECK(event_of(&n, MIXP_EVENT_OPERAND, 0, &e));
    CHECK_NEAR(e.error, error, 1e-9);
    CHECK(e.clipped == 0);
    mixp_context_free(n.ctx);
    p = plan_of(MIXP_RECIPE_FP8_DELAYED, 1);    /* x grows by 100: most of it is clipped */
    p.recipe.most_recent = 1;
    p.every = 1;
    n = net_new(&p, NULL);
    net_step(&n, &p, 0.02f, 7);
    net_step(&n, &p, 0.02f, 7);
    CHECK(!x_event_of(&n, MIXP_EVENT_OPERAND, 0, &e));
    fill_x(x, 0.02f, p.usual, 7);
    p.usual = 2.0f;
    net_step(&n, &p, 2.0f, 7);
    fill_x(x, 2.0f, 2.0f, 7);
    lose_at(x, ROWS * WIDTH, (double)(448.0f / (float)in_bf16(0.02)), &error, &clipped);
    CHECK(x_event_of(&n, MIXP_EVENT_OPERAND, 0, &e));
    CHECK_NEAR(e.error, error, 1e-9);
    CHECK_NEAR(e.clipped, clipped, 1e-12);
    CHECK(e.clipped > 0.9);
    mixp_context_free(n.ctx);
}

/* --- one linear whose losses are counted ------------------------------------------------------- */

/* A step of sum(linear(x, w) dy) with weights of 1; *e: the event of an operand. 0: there is none. */
static int loses_in(const plan *p, const float *x, const float *dy, const char *operand, mixp_event *e) {
    const int64_t shape[2] = { ROWS, WIDTH };
    net n = net_new(p, NULL);
    mixp_tensor *y = NULL;
    int k, found = 0;
    mixp_fill(n.w[0], 1.0);
    mixp_step_begin(n.ctx);
    mixp_zero_grad(n.opt);
    y = mixp_input(n.ctx, MIXP_F32, 2, shape, x);
    mixp_tensor_set_requires_grad(y, 1);
    MIXP_AUTOCAST(n.ctx, MIXP_BF16) y = mixp_linear(n.ctx, y, n.w[0], NULL);
    y = mixp_mul(n.ctx, y, mixp_input(n.ctx, MIXP_F32, 2, shape, dy));
    CHECK_INT(mixp_backward(n.ctx, mixp_sum(n.ctx, y, MIXP_ALL, 0)), MIXP_OK);
    CHECK_INT(mixp_optimizer_step(n.opt), MIXP_OK);
    for (k = 0; !found && mixp_guard_event(n.ctx, k, e); k++)
        found = e->kind == MIXP_EVENT_OPERAND && strcmp(e->operand, operand) == 0;
    mixp_context_free(n.ctx);
    return found;
}
static int loses(mixp_recipe_kind kind, const float *x, const float *dy, const char *operand, mixp_event *e) {
    const plan p = plan_of(kind, 1);
    return loses_in(&p, x, dy, operand, e);
}

/* The largest number of the element, which gives a scale of 1, and `lost` numbers that become 0; the others
 * are on the grid. */
static void fill_exact(float *x, float largest, float tiny, int lost) {
    for (int i = 0; i < ROWS * WIDTH; i++) x[i] = i % 16 == 0 ? largest : 1.0f;
    for (int i = 0; lost; i++)
        if (i % 16) {
            x[i] = tiny;
            lost--;
        }
}

/* Just below the usual bound of an element there is no event; just above it the event has the share. */
static void bounds(void) {
    static const struct { mixp_recipe_kind kind; const char *operand; float largest, tiny; double bound; } cases[] = {
        { MIXP_RECIPE_FP8_CURRENT, "x", 448.0f, 1e-6f, 0.1 },
        { MIXP_RECIPE_FP8_CURRENT, "dy", 57344.0f, 1e-7f, 0.15 },
        { MIXP_RECIPE_NVFP4, "x", 6.0f, 0.1f, 0.6 }
    };
    static float x[ROWS * WIDTH], dy[ROWS * WIDTH];
    for (int i = 0; i < 3; i++)
        for (int above = 0; above < 2; above++) {
            const int lost = (int)(cases[i].bound * ROWS * WIDTH) + (above ? 20 : -20);
            const int is_x = *cases[i].operand == 'x';
            mixp_event e;
            fill_exact(x, 1.0f, 0.0f, 0);
            fill_exact(dy, 1.0f, 0.0f, 0);
            fill_exact(is_x ? x : dy, cases[i].largest, cases[i].tiny, lost);
            CHECK_INT(loses(cases[i].kind, x, dy, cases[i].operand, &e), above);
            if (!above) continue;
            CHECK_NEAR(e.error, (double)lost / (ROWS * WIDTH), 1e-6);
            CHECK(e.clipped == 0);
        }
}

/* One row of x is 2^20 times the others: without row_scaled NVFP4 loses the others. With it nothing is lost, but what
 * is below the steps of its own row. */
static void scales_of_rows(void) {
    static float x[ROWS * WIDTH], dy[ROWS * WIDTH];
    const int lost = (int)(0.65 * ROWS * WIDTH);
    plan p = plan_of(MIXP_RECIPE_NVFP4, 1);
    mixp_event e;
    p.recipe.wgrad_high = 1;                    /* whose quantised x would have columns */
    fill_exact(dy, 1.0f, 0.0f, 0);
    for (int turn = 0; turn < 3; turn++) {
        fill_exact(x, 6.0f, 0.1f, turn == 2 ? lost : 0);
        for (int i = 0; i < WIDTH; i++) x[i] *= 1048576.0f;
        p.recipe.row_scaled = turn > 0;
        CHECK_INT(loses_in(&p, x, dy, "x", &e), turn != 1);
        if (turn != 1) CHECK_NEAR(e.error, turn ? (double)lost / (ROWS * WIDTH) : (ROWS - 1.0) / ROWS, 1e-6);
    }
}

/* Zeros and NaN do not count; an Inf counts as lost and as clipped. An Inf passes a quantiser and skips the
 * step, and a guard judges no operand of a step whose forward met Inf or NaN, so both are shown to the sum
 * itself. */
static void odd_values(void) {
    static float x[ROWS * WIDTH], dy[ROWS * WIDTH];
    const int count = ROWS * WIDTH, lost = 2000;
    mixpi_loss sum = { 0.0, 0, 0 };
    mixp_event e;
    fill_exact(dy, 1.0f, 0.0f, 0);
    for (int i = 0; i < count; i++) x[i] = i % 2 ? (i % 4 == 1 ? 0.0f : -0.0f) : 448.0f;
    for (int i = 0; i < lost; i++) x[2 * i] = i % 2 ? 1e-6f : -1e-6f;
    CHECK(loses(MIXP_RECIPE_FP8_CURRENT, x, dy, "x", &e));
    CHECK_NEAR(e.error, (double)lost / (count / 2), 1e-9);
    CHECK(e.clipped == 0);
    mixpi_loss_add(&sum, mixp_f32_of_bits(0x7FC00000u), 1.0, 1.0, 464.0);
    mixpi_loss_add(&sum, mixp_f32_of_bits(0xFF800001u), 1.0, 1.0, 464.0);
    CHECK(sum.error == 0 && sum.seen == 0 && sum.clipped == 0);
    mixpi_loss_add(&sum, mixp_f32_of_bits(0xFF800000u), 448.0, 1.0, 464.0);
    CHECK(sum.error == 1 && sum.seen == 1 && sum.clipped == 1);
}

/* --- return and relapse ----------------------------------------------------------------------- */

/* Every step is sampled; clean is 2. Outliers at steps 0 and 5: back after 2 clean samples, then
 * after 4. */
static void returns(void) {
    plan p = plan_of(MIXP_RECIPE_FP8_CURRENT, 1);
    const int64_t fallen[14] = { 0, 2, 4, 4, 4, 4, 6, 8, 10, 12, 12, 12, 12, 12 };
    mixp_event e;
    p.every = 1;
    net n = net_new(&p, NULL);
    for (int step = 0; step < 14; step++) {
        net_step(&n, &p, step == 0 || step == 5 ? 1e4f : 0.02f, 7);
        CHECK_INT(mixp_autocast_recipe_counts(n.ctx).fallen, fallen[step]);
    }
    CHECK(event_of(&n, MIXP_EVENT_OPERAND, 0, &e) && e.step == 1);
    CHECK(event_of(&n, MIXP_EVENT_OPERAND, 1, &e) && e.step == 6);
    CHECK(!event_of(&n, MIXP_EVENT_OPERAND, 2, &e));
    CHECK(event_of(&n, MIXP_EVENT_OPERAND_BACK, 0, &e) && e.step == 3 && strcmp(e.operand, "x") == 0);
    CHECK(event_of(&n, MIXP_EVENT_OPERAND_BACK, 1, &e) && e.step == 10);
    mixp_context_free(n.ctx);
}

/* --- checkpoints ------------------------------------------------------------------------------ */

static mixp_checkpoint checkpoint_of(net *n) {
    mixp_checkpoint c;
    memset(&c, 0, sizeof c);
    c.ctx = n->ctx;
    c.optimizers = &n->opt;
    c.n_optimizers = 1;
    return c;
}

/* The state of the first site's x in a file becomes `state`. */
static void change(const char *path, int32_t state) {
    static char bytes[1 << 20];
    FILE *f = fopen(path, "r+b");
    const size_t n = f ? fread(bytes, 1, sizeof bytes, f) : 0;
    char *at = find_bytes(bytes, n, "mixprec.guard.operands", 22), *offset;
    uint64_t header = 0;
    offset = at ? strstr(at, "\"data_offsets\":[") : NULL;
    CHECK(offset != NULL);
    if (f && offset) {
        memcpy(&header, bytes, 8);
        fseek(f, (long)(8 + header + strtoull(offset + 16, NULL, 10)), SEEK_SET);
        fwrite(&state, 1, 4, f);
    }
    if (f) fclose(f);
}

/* An evaluation with large values; returns the products of it that fell back. */
static int64_t evaluate(net *n) {
    static float x[ROWS * WIDTH];
    const int64_t shape[2] = { ROWS, WIDTH }, fallen = mixp_autocast_recipe_counts(n->ctx).fallen;
    fill_x(x, 1e6f, 1e3f, 5);
    CHECK_INT(mixp_eval_begin(n->ctx), MIXP_OK);
    MIXP_AUTOCAST(n->ctx, MIXP_BF16)
        CHECK(mixp_linear(n->ctx, mixp_input(n->ctx, MIXP_F32, 2, shape, x), n->w[0], NULL) != NULL);
    return mixp_autocast_recipe_counts(n->ctx).fallen - fallen;
}

static void resume_of(mixp_recipe_kind kind) {
    plan p = plan_of(kind, 1);
    static float one[WIDTH * WIDTH], two[WIDTH * WIDTH];
    char path[64];
    int64_t fallen, evaluated = 0;
    int step;
    p.recipe.most_recent = 1;
    net n = net_new(&p, NULL);
    mixp_checkpoint c = checkpoint_of(&n);
    snprintf(path, sizeof path, "/tmp/mixprec_fallback.%d", (int)getpid());
    for (step = 0; step < 9; step++) net_step(&n, &p, p.outlier, 7);
    CHECK_INT(mixp_checkpoint_save(path, &c), MIXP_OK);
    fallen = mixp_autocast_recipe_counts(n.ctx).fallen;
    for (; step < 40; step++) net_step(&n, &p, 0.02f, 7);
    fallen = mixp_autocast_recipe_counts(n.ctx).fallen - fallen;
    CHECK(fallen > 0 && fallen < 2 * 31);       /* it returned */
    mixp_read(n.w[0], one, MIXP_F32, WIDTH * WIDTH);
    mixp_context_free(n.ctx);
    n = net_new(&p, NULL);
    c = checkpoint_of(&n);
    CHECK_INT(mixp_checkpoint_load(path, &c), MIXP_OK);
    for (step = 9; step < 40; step++) {
        net_step(&n, &p, 0.02f, 7);
        if (step % 7 == 0) evaluated += evaluate(&n);   /* changes no bit of the training */
    }
    CHECK_INT(mixp_autocast_recipe_counts(n.ctx).fallen - evaluated, fallen);
    mixp_read(n.w[0], two, MIXP_F32, WIDTH * WIDTH);
    CHECK(memcmp(one, two, sizeof one) == 0);
    change(path, 1 << 30);
    CHECK_INT(mixp_checkpoint_load(path, &c), MIXP_ERR_FORMAT);
    mixp_context_clear_error(n.ctx);
    change(path, -1);
    CHECK_INT(mixp_checkpoint_load(path, &c), MIXP_ERR_FORMAT);
    mixp_context_clear_error(n.ctx);
    change(path, (1 << 30) - 1);
    CHECK_INT(mixp_checkpoint_load(path, &c), MIXP_OK);
    net_step(&n, &p, p.outlier, 7);
    CHECK_INT(mixp_context_error(n.ctx, NULL), MIXP_OK);
    mixp_context_free(n.ctx);
    remove(path);
}

/* With delayed scaling, the scales of an operand that has fallen back are resumed as well. */
static void resume(void) {
    resume_of(MIXP_RECIPE_FP8_CURRENT);
    resume_of(MIXP_RECIPE_FP8_DELAYED);
}

/* --- ranks ------------------------------------------------------------------------------------ */

#ifdef _WIN32
static void ranks(void) { SKIP("no fork"); }
#else
enum { RANKS = 2 };
typedef struct told { float w[WIDTH * WIDTH]; int64_t fallen; int done, error, alone; char site[96]; } told;

/* Only rank 1 meets outliers. */
static void rank_trains(const mixp_ranks_desc *ranks, told *out) {
    plan p = plan_of(MIXP_RECIPE_FP8_CURRENT, 1);
    net n = net_new(&p, ranks);
    mixp_event e;
    for (int step = 0; step < 12; step++)
        net_step(&n, &p, ranks->rank ? p.outlier : 0.02f, 7 + (uint64_t)ranks->rank);
    out->error = (int)mixp_context_error(n.ctx, NULL);
    out->fallen = mixp_autocast_recipe_counts(n.ctx).fallen;
    if (event_of(&n, MIXP_EVENT_OPERAND, 0, &e)) snprintf(out->site, sizeof out->site, "%s of %s", e.operand, e.site);
    out->alone = !event_of(&n, MIXP_EVENT_OPERAND, 1, &e);
    mixp_read(n.w[0], out->w, MIXP_F32, WIDTH * WIDTH);
    out->done = 1;
    mixp_context_free(n.ctx);
}

static void ranks(void) {
    told *all = (told *)mmap(NULL, RANKS * sizeof *all, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int status = 0, r;
    fflush(stdout);
    pid_t child = fork();
    if (!child) {
        mixp_ranks_desc d = ddp_fork(RANKS);
        d.seconds = 20;
        alarm(60);
        rank_trains(&d, &all[d.rank]);
        _exit(ddp_wait(test_bad != 0));
    }
    waitpid(child, &status, 0);
    CHECK_INT(status, 0);
    for (r = 0; r < RANKS; r++) {
        CHECK_INT(all[r].done, 1);
        CHECK_INT(all[r].error, MIXP_OK);
        CHECK_INT(all[r].fallen, 2 * 11);
        CHECK_TEXT(all[r].site, "x of w0: linear");
        CHECK_INT(all[r].alone, 1);
    }
    CHECK(memcmp(all[0].w, all[1].w, sizeof all[0].w) == 0);
    munmap(all, RANKS * sizeof *all);
}
#endif

/* --- refusals --------------------------------------------------------------------------------- */

static void refused(void) {
    const float bad[2] = { 1.5f, mixp_f32_of_bits(0x7FC00000u) };
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_recipe r;
    const char *why = "";
    for (int i = 0; i < 4; i++) {
        memset(&r, 0, sizeof r);
        r.kind = MIXP_RECIPE_MXFP8;
        *(i / 2 ? &r.clipped : &r.error) = bad[i % 2];
        CHECK_INT(mixp_autocast_set_recipe(ctx, &r), MIXP_ERR_ARGUMENT);
        mixp_context_error(ctx, &why);
        CHECK_TEXT(why, "error and clipped must be at most 1");
        mixp_context_clear_error(ctx);
    }
    mixp_context_free(ctx);
}

/* --- blocks --------------------------------------------------------------------------------- */

enum { TILE = 32, TILES = WIDTH / TILE };

/* Tiles of 32 x 32: all values of tile (i, j) are 1.25 * 2^(e + i - j), or 0 on the last tile. */
static void fill_tiles(float *x, int e) {
    for (int i = 0; i < WIDTH * WIDTH; i++) {
        const int row = i / WIDTH / TILE, col = i % WIDTH / TILE;
        const double a = ldexp(1.25, e + row - col);
        x[i] = row == TILES - 1 && col == TILES - 1 ? 0.0f : (float)(i % 3 ? a : -a);
    }
}

/* The blocks of a linear's operands after one sample. x, w and dy are what fill_tiles gives for e[], each then with
 * element `at` of it replaced by `value`, if that is not 0. */
static void blocks_of(mixp_recipe recipe, const int e[3], int at, float value, mixp_block_look out[3]) {
    static float x[3][WIDTH * WIDTH];
    const int64_t shape[2] = { WIDTH, WIDTH }, all = WIDTH * WIDTH;
    mixp_optimizer_desc sgd = mixp_sgd_defaults();
    mixp_context_desc desc;
    mixp_guard_desc guard;
    mixp_tensor *w, *y = NULL;
    mixp_site_info s;
    memset(&desc, 0, sizeof desc);
    desc.threads = 2;
    mixp_context *ctx = mixp_context_new(&desc);
    sgd.lr = 0;
    mixp_optimizer *opt = mixp_optimizer_new(ctx, &sgd);
    w = mixp_param(ctx, "w", MIXP_F32, 2, shape);
    for (int i = 0; i < 3; i++) {
        fill_tiles(x[i], e[i]);
        if (value != 0) x[i][at] = value;
    }
    mixp_write(w, x[1], MIXP_F32, WIDTH * WIDTH);
    mixp_optimizer_add(opt, w, NULL);
    recipe.error = recipe.clipped = -1;             /* nothing falls back */
    CHECK_INT(mixp_autocast_set_recipe(ctx, &recipe), MIXP_OK);
    memset(&guard, 0, sizeof guard);
    guard.imprecise = -1;                           /* no reruns */
    CHECK_INT(mixp_guard_start(ctx, &guard), MIXP_OK);
    mixp_step_begin(ctx);
    MIXP_AUTOCAST(ctx, MIXP_BF16) {
        mixp_tensor *in = mixp_input(ctx, MIXP_F32, 2, shape, x[0]);
        mixp_tensor_set_requires_grad(in, 1);
        y = mixp_linear(ctx, in, w, NULL);
    }
    y = mixp_mul(ctx, mixp_cast(ctx, y, MIXP_F32), mixp_input(ctx, MIXP_F32, 2, shape, x[2]));
    mixp_backward(ctx, mixp_sum(ctx, mixp_reshape(ctx, y, 1, &all), 0, 0));
    mixp_optimizer_step(opt);
    mixp_step_begin(ctx);
    memset(out, 0, 3 * sizeof *out);
    for (int i = 0; mixp_site(ctx, i, &s); i++) {
        if (strcmp(s.name, "w: linear") == 0) memcpy(out, s.blocks, sizeof s.blocks);
        else CHECK(s.blocks[0].blocks + s.blocks[1].blocks + s.blocks[2].blocks == 0);
    }
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    mixp_context_free(ctx);
}

/* Exponents by hand, for amax = 1.25 * 2^e: the scales are amax / 448 = 1.43 * 2^(e - 9) (fp8); that, rounded up to
 * 2^(e - 8) (MXFP8, fp8 in blocks); amax / 6 = 1.67 * 2^(e - 3) (NVFP4). dy in e5m2: amax / 57344 = 1.43 * 2^(e - 16). */
static void blocks_are_told(void) {
    static const struct { mixp_recipe_kind kind; int below, below_dy, one, unit; } rows[4] = {
        { MIXP_RECIPE_FP8_CURRENT, 9, 16, 1, WIDTH }, { MIXP_RECIPE_MXFP8, 8, 8, 0, 32 },
        { MIXP_RECIPE_FP8_BLOCK, 8, 8, 0, 128 }, { MIXP_RECIPE_NVFP4, 3, 3, 0, 16 } };
    static const int e[3] = { 2, -3, -20 }, tiny[3] = { -125, -3, -20 };
    mixp_block_look b[3];
    mixp_recipe r;
    for (int i = 0; i < 4; i++) {
        memset(&r, 0, sizeof r);
        r.kind = rows[i].kind;
        r.no_hadamard = r.no_stochastic = 1;
        blocks_of(r, e, 0, 0.0f, b);
        for (int k = 0; k < 3; k++) {
            const int below = k == 2 ? rows[i].below_dy : rows[i].below, largest = e[k] + TILES - 1 - below;
            CHECK(b[k].blocks > 0);
            CHECK_INT(b[k].largest, largest);
            if (rows[i].one) CHECK_INT(b[k].least, largest);
            else if (rows[i].kind != MIXP_RECIPE_FP8_BLOCK) CHECK_INT(b[k].least, e[k] - (TILES - 1) - below);
            CHECK_INT(b[k].clipped, 0);
            CHECK_INT(b[k].flushed, 0);
        }

        /* x in two directions: rows of an array; or blocks but those of the zero tile. */
        if (rows[i].kind == MIXP_RECIPE_FP8_CURRENT) CHECK_INT(b[0].blocks, 2 * WIDTH);
        else if (rows[i].unit <= TILE) CHECK_INT(b[0].blocks, 2 * (TILES * TILES - 1) * TILE * TILE / rows[i].unit);
        else CHECK_INT(b[0].blocks, 2 * WIDTH);
    }

    /* FLOOR clips a value of 1.9 in a block whose scale is its power of two: two blocks of x, a row and a column. */
    memset(&r, 0, sizeof r);
    r.kind = MIXP_RECIPE_MXFP8;
    r.e8m0 = MIXP_E8M0_FLOOR;
    blocks_of(r, e, 5, 1.9f * 16.0f, b);
    CHECK_INT(b[0].clipped, 2);
    r.e8m0 = MIXP_E8M0_RCEIL;
    blocks_of(r, e, 5, 1.9f * 16.0f, b);
    CHECK_INT(b[0].clipped, 0);

    /* amax is 1.25 * 2^-122: 448 / amax is beyond f32. Values are multiplied by the largest f32, and none is clipped. */
    memset(&r, 0, sizeof r);
    r.kind = MIXP_RECIPE_FP8_CURRENT;
    blocks_of(r, tiny, 0, 0.0f, b);
    CHECK_INT(b[0].blocks, 2 * WIDTH);
    CHECK_INT(b[0].clipped, 0);
    CHECK_INT(b[0].flushed, 0);
    CHECK_INT(b[0].least, -128);
    CHECK_INT(b[0].largest, -128);

    /* NVFP4: beside 2^60 every other block is flushed, whose e4m3 scale becomes 0; those of the value's own row and
     * column hold that value. */
    memset(&r, 0, sizeof r);
    r.kind = MIXP_RECIPE_NVFP4;
    r.no_hadamard = r.no_stochastic = r.no_2d = 1;
    blocks_of(r, e, 5, ldexpf(1.0f, 60), b);
    CHECK_INT(b[0].blocks, 2 * (TILES * TILES - 1) * TILE * TILE / 16);
    CHECK_INT(b[0].flushed, b[0].blocks - 2);
    CHECK_INT(b[0].least, 57);
    CHECK_INT(b[0].largest, 57);

    /* With scales of rows only the others of the value's own row and column are flushed. */
    r.row_scaled = 1;
    blocks_of(r, e, 5, ldexpf(1.0f, 60), b);
    CHECK_INT(b[0].blocks, 2 * (TILES * TILES - 1) * TILE * TILE / 16);
    CHECK_INT(b[0].flushed, 2 * (WIDTH / 16 - 1));
    CHECK_INT(b[0].least, e[0] - (TILES - 1) - 3);
    CHECK_INT(b[0].largest, 57);

    /* 4over6: beside 8 times its value, 1.25 * 2^k becomes 1/2 where the largest value becomes 4. Where that becomes 6,
     * it lies between 1/2 and 1. The scale is amax / 4. dy keeps amax / 6. */
    memset(&r, 0, sizeof r);
    r.kind = MIXP_RECIPE_NVFP4;
    r.no_hadamard = r.no_stochastic = 1;
    for (int i = 0; i < 3; i++) {
        static const int even[3] = { 2, 2, 2 };
        const int largest = even[0] + TILES - 1 + 3;
        r.x_4over6 = (mixp_4over6)i;
        r.w_4over6 = (mixp_4over6)((i + 1) % 3);
        blocks_of(r, even, (TILES - 1) * TILE * WIDTH, ldexpf(1.25f, largest), b);
        CHECK_INT(b[0].largest, r.x_4over6 ? largest - 2 : largest - 3);
        CHECK_INT(b[1].largest, r.w_4over6 ? largest - 2 : largest - 3);
        CHECK_INT(b[2].largest, largest - 3);
        CHECK_INT(b[0].clipped + b[1].clipped, 0);
    }
    memset(&r, 0, sizeof r);
    blocks_of(r, e, 0, 0.0f, b);
    CHECK(b[0].blocks + b[1].blocks + b[2].blocks == 0);
}

int main(void) {
    RUN(outliers);
    RUN(never);
    RUN(numbers);
    RUN(bounds);
    RUN(scales_of_rows);
    RUN(odd_values);
    RUN(returns);
    RUN(resume);
    RUN(ranks);
    RUN(refused);
    RUN(blocks_are_told);
    return test_report();
}
