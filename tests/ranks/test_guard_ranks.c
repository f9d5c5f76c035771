/* test_guard_ranks.c - a guard in programs whose ranks act differently: only rank 0 evaluates, a
 * rank takes another branch, the ranks' guards have different settings.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "mixprec.h"
#include "../../examples/ddp_fork.c"
#include "test.h"
#include <sys/mman.h>

enum { RANKS = 2, N = 16, MOST = 24, STEPS = 24 };

/* What a rank tells, in memory that all share. */
typedef struct told {
    mixp_result code;
    char        why[512];
    char        fell[MOST][96];         /* names of sites that fell back */
    int         fallen, steps, finite;
    char        imprecise[400];         /* text of the first event of that kind */
    float       w[2][N * N];
} told;

static told *tell;

typedef enum mode { SAME, EVALUATES, EVALUATES_OTHERWISE, BRANCHES, LEAVES_OUT, ROUNDS, OTHER_EVERY,
                    GUARD_ON_ONE, STARTED_LATER } mode;

typedef struct rank {
    mixp_context   *ctx;
    mixp_optimizer *opt;
    mixp_scaler    *scaler;
    mixp_tensor    *w[2];
    int             rank;
} rank;

static mixp_tensor *batch(const rank *m, int step) {
    static const int64_t shape[2] = { 4, N };
    float x[4 * N];
    for (int i = 0; i < 4 * N; i++) x[i] = (float)((i * 7 + step * 3 + m->rank) % 11) / 11;
    return mixp_input(m->ctx, MIXP_F32, 2, shape, x);
}

/* Rank 0 alone evaluates, for some steps in a row, by the operators of training or by others. */
static int evaluate(const rank *m, mode how, int step) {
    mixp_tensor *y = NULL;
    int k, finite = 1;
    for (k = 0; k < 3; k++) {
        mixp_step_begin(m->ctx);
        MIXP_NO_GRAD(m->ctx) {
            MIXP_AUTOCAST(m->ctx, MIXP_F16) {
                y = mixp_linear(m->ctx, batch(m, step + k), m->w[0], NULL);
                if (how == EVALUATES_OTHERWISE) y = mixp_softmax(m->ctx, y);
                y = mixp_mean(m->ctx, mixp_mul(m->ctx, y, y), MIXP_ALL, 0);
            }
        }
        finite &= mixp_item(y) < 1e30;
    }
    return finite;
}

/* The loss of a step: at `big` expert A's product passes 65504. The other rank takes expert B, or
 * leaves one out, at some steps. */
static mixp_tensor *loss_of(const rank *m, mode how, int step, int big) {
    const int other = how == BRANCHES && step % 5 == 1;
    const int out = how == LEAVES_OUT && m->rank == 1 && step % 3 == 1;
    mixp_tensor *x = batch(m, step), *h = NULL, *g;
    if (!other || m->rank == 0) {
        h = mixp_linear(m->ctx, mixp_scale(m->ctx, x, big ? 60000.0f : 1.0f), m->w[0], NULL);
        h = mixp_scale(m->ctx, h, big ? 1.0f / 60000 : 1.0f);
    }
    if (!out && (!other || m->rank == 1)) {
        g = mixp_linear(m->ctx, x, m->w[1], NULL);
        h = h ? mixp_add(m->ctx, h, g) : g;
    }
    return mixp_mean(m->ctx, mixp_mul(m->ctx, h, h), MIXP_ALL, 0);
}

/* Rank 1's features lie between 2023 and 2024, which f16 rounds to 2023 or 2024; rank 0's are all 1. */
static mixp_tensor *rounded_loss(const rank *m, int step) {
    static const int64_t shape[2] = { 16, N };
    float x[16 * N];
    for (int i = 0; i < 16 * N; i++) x[i] = m->rank ? 2023 + (float)((i * 7 + step) % 11) / 11 : 1.0f;
    mixp_tensor *h = mixp_linear(m->ctx, mixp_input(m->ctx, MIXP_F32, 2, shape, x), m->w[0], NULL);
    return mixp_scale(m->ctx, mixp_mean(m->ctx, h, MIXP_ALL, 0), 1e-3f);
}

static void open_rank(rank *m, const mixp_ranks_desc *d, mode how) {
    static const int64_t shape[2] = { N, N };
    mixp_context_desc c;
    mixp_optimizer_desc sgd = mixp_sgd_defaults();
    mixp_scaler_desc rule;
    mixp_guard_desc guard;
    memset(m, 0, sizeof *m);
    memset(&c, 0, sizeof c);
    memset(&rule, 0, sizeof rule);
    memset(&guard, 0, sizeof guard);
    m->rank = d->rank;
    c.threads = 1;
    c.ranks = d;
    rule.init_scale = 16;
    sgd.lr = 0.01;
    m->ctx = mixp_context_new(&c);
    m->w[0] = mixp_param(m->ctx, "expert.A", MIXP_F32, 2, shape);
    m->w[1] = mixp_param(m->ctx, "expert.B", MIXP_F32, 2, shape);
    m->opt = mixp_optimizer_new(m->ctx, &sgd);
    m->scaler = mixp_scaler_new(m->ctx, &rule);
    mixp_init_normal(m->w[0], 0, 0.2);
    mixp_init_normal(m->w[1], 0, 0.2);
    mixp_optimizer_add(m->opt, m->w[0], NULL);
    mixp_optimizer_add(m->opt, m->w[1], NULL);
    guard.every = how == OTHER_EVERY && d->rank ? 8 : 4;
    if ((how != GUARD_ON_ONE && how != STARTED_LATER) || !d->rank) mixp_guard_start(m->ctx, &guard);
}

static void tell_all(const rank *m, told *to) {
    const char *why = "";
    mixp_site_info s;
    mixp_event e;
    to->code = mixp_context_error(m->ctx, &why);
    snprintf(to->why, sizeof to->why, "%s", why);
    for (int i = 0; mixp_site(m->ctx, i, &s); i++)
        if (s.fallen && to->fallen < MOST) snprintf(to->fell[to->fallen++], 96, "%s", s.name);
    for (int i = 0; mixp_guard_event(m->ctx, i, &e) && !*to->imprecise; i++)
        if (e.kind == MIXP_EVENT_IMPRECISE) mixp_event_text(&e, to->imprecise, sizeof to->imprecise);
    for (int k = 0; k < 2; k++) memcpy(to->w[k], m->w[k]->data, sizeof to->w[k]);
}

static int train(const mixp_ranks_desc *d, mode how) {
    rank m;
    told *to = &tell[d->rank];
    open_rank(&m, d, how);
    to->finite = 1;
    for (int step = 0; step < STEPS && !mixp_context_error(m.ctx, NULL); step++) {
        mixp_tensor *loss = NULL;
        if (how == STARTED_LATER && !d->rank && step == 0) mixp_guard_stop(m.ctx);
        if (how == STARTED_LATER && !d->rank && step == 3) mixp_guard_start(m.ctx, NULL);
        mixp_step_begin(m.ctx);
        mixp_zero_grad(m.opt);
        MIXP_AUTOCAST(m.ctx, MIXP_F16) {
            loss = how == ROUNDS ? rounded_loss(&m, step) : loss_of(&m, how, step, step >= 12);
        }
        mixp_backward(m.ctx, mixp_scaler_scale(m.scaler, loss));
        mixp_scaler_step(m.scaler, m.opt);
        mixp_scaler_update(m.scaler);
        if ((how == EVALUATES || how == EVALUATES_OTHERWISE) && !d->rank && step % 2)
            to->finite &= evaluate(&m, how, step);
        to->steps++;
    }
    tell_all(&m, to);
    int failed = to->code != MIXP_OK;
    if (!failed) mixp_context_free(m.ctx);
    return failed;
}

/* Trains with two ranks, in processes of their own. */
static void run(mode how) {
    int status = 0;
    memset(tell, 0, RANKS * sizeof *tell);
    fflush(stdout);
    pid_t child = fork();
    if (!child) {
        mixp_ranks_desc d = ddp_fork(RANKS);
        d.seconds = 10;
        int failed = train(&d, how);
        fclose(stderr);
        _exit(ddp_wait(failed));
    }
    waitpid(child, &status, 0);
}

/* Whatever the ranks do apart: they train on, with the same weights, and the same sites fell back. */
static void ranks_may_part(void) {
    for (int how = SAME; how <= LEAVES_OUT; how++) {
        run((mode)how);
        CHECK_TEXT(tell[0].code ? tell[0].why : "fine", "fine");
        CHECK_TEXT(tell[1].code ? tell[1].why : "fine", "fine");
        CHECK_INT(tell[0].steps, STEPS);
        CHECK_INT(tell[1].steps, STEPS);
        CHECK(memcmp(tell[0].w, tell[1].w, sizeof tell[0].w) == 0);
        CHECK(tell[0].fallen >= 1);
        CHECK_TEXT(tell[0].fell[0], "expert.A");
        CHECK_TEXT(tell[1].fell[0], "expert.A");
        if (how == SAME) CHECK_INT(tell[1].fallen, tell[0].fallen);
        CHECK_INT(tell[0].finite, 1);
    }
}

/* The loss that only rank 1 can see is reported on both ranks, with the same share. A spacing of 1 beside
 * eleven values in 0 to 1: more than half of the variation. */
static void a_loss_on_one_rank(void) {
    run(ROUNDS);
    CHECK_TEXT(tell[0].code ? tell[0].why : "fine", "fine");
    CHECK_TEXT(tell[0].imprecise, tell[1].imprecise);
    const char *at = strchr(tell[0].imprecise, '(');
    CHECK(at && atof(at + 1) > 50);
}

/* Guards that differ are told, by what differs, at the first step. */
static void guards_must_be_alike(void) {
    run(OTHER_EVERY);
    for (int r = 0; r < RANKS; r++) {
        CHECK_INT(tell[r].code, MIXP_ERR_RANKS);
        CHECK_TEXT(tell[r].why, "ranks differ: the guard's every is 4 on rank 0 and 8 on rank 1");
    }
    run(GUARD_ON_ONE);
    for (int r = 0; r < RANKS; r++) {
        CHECK_INT(tell[r].code, MIXP_ERR_RANKS);
        CHECK_TEXT(tell[r].why, "ranks differ: the guard is 1 on rank 0 and 0 on rank 1");
    }
}

/* One that is started later is told of at its first step, which is skipped by all. */
static void guards_started_later(void) {
    run(STARTED_LATER);
    for (int r = 0; r < RANKS; r++) {
        CHECK_INT(tell[r].code, MIXP_ERR_RANKS);
        CHECK_TEXT(tell[r].why, "ranks differ: the guard of rank 1 differs");
        CHECK_INT(tell[r].steps, 4);
    }
}

/* --- as many ranks as a large machine has -------------------------------------------------------- */

/* A world in which all ranks are as rank 0: the other rows of a table are rank 0's. */
static int64_t many, largest_piece;
static const char *sum_alike(void *user, void *data, int64_t count, mixp_dtype dtype, void *stream, double seconds) {
    double *table = (double *)data;
    const int64_t words = count / many;
    int64_t i;
    (void)user, (void)stream, (void)seconds;
    for (i = words; dtype == MIXP_F64 && i < count; i++) table[i] = table[i % words];
    return NULL;
}
static void *note_piece(size_t bytes, void *user) {
    (void)user;
    if ((int64_t)bytes > largest_piece) largest_piece = (int64_t)bytes;
    return malloc(bytes);
}
static void free_piece(void *p, void *user) {
    (void)user;
    free(p);
}

enum { DEEP = 40, WIDE = 8 };
/* The sites that a guard has seen in three steps of a deep network with `size` ranks. */
static int seen_by(int size, mixp_site_info *sites) {
    static const int64_t shape[2] = { WIDE, WIDE };
    mixp_ranks_desc ranks;
    mixp_context_desc d;
    mixp_guard_desc guard;
    mixp_tensor *w[DEEP], *h = NULL;
    float x[WIDE * WIDE];
    char name[16];
    int i, step, n = 0;
    memset(&ranks, 0, sizeof ranks);
    memset(&d, 0, sizeof d);
    memset(&guard, 0, sizeof guard);
    many = ranks.size = size;
    ranks.sum = sum_alike;
    ranks.mean = MIXP_MEAN_NONE;
    ranks.check_every = -1;
    d.ranks = &ranks;
    d.threads = 1;
    d.allocate = note_piece;
    d.release = free_piece;
    guard.every = 1;
    largest_piece = 0;
    mixp_context *ctx = mixp_context_new(&d);
    mixp_optimizer *opt = mixp_optimizer_new(ctx, NULL);
    mixp_scaler *scaler = mixp_scaler_new(ctx, NULL);
    for (i = 0; i < DEEP; i++) {
        sprintf(name, "w%d", i);
        w[i] = mixp_param(ctx, name, MIXP_F32, 2, shape);
        mixp_init_normal(w[i], 0, 0.3);
        mixp_optimizer_add(opt, w[i], NULL);
    }
    mixp_guard_start(ctx, &guard);
    for (i = 0; i < WIDE * WIDE; i++) x[i] = (float)(i % 5) - 2;
    for (step = 0; step < 3; step++) {
        mixp_step_begin(ctx);
        mixp_zero_grad(opt);
        MIXP_AUTOCAST(ctx, MIXP_F16) {
            h = mixp_input(ctx, MIXP_F32, 2, shape, x);
            for (i = 0; i < DEEP; i++) h = mixp_add(ctx, h, mixp_tanh(ctx, mixp_linear(ctx, h, w[i], NULL)));
            h = mixp_mean(ctx, h, MIXP_ALL, 0);
        }
        mixp_backward(ctx, mixp_scaler_scale(scaler, h));
        mixp_scaler_step(scaler, opt);
        mixp_scaler_update(scaler);
    }
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    while (n < 4 * DEEP && mixp_site(ctx, n, &sites[n])) n++;
    mixp_context_free(ctx);
    return n;
}

/* What 1,024 ranks have seen goes in tables of half a MiB, not in one that grows with the ranks; and it
 * is all there. */
static void many_ranks(void) {
    static mixp_site_info few[4 * DEEP], all[4 * DEEP];
    const int n = seen_by(2, few);
    CHECK(n >= DEEP);
    CHECK_INT(seen_by(1024, all), n);
    CHECK(largest_piece <= 2 << 20);
    for (int i = 0; i < n; i++) {
        CHECK_NEAR(all[i].value.largest, few[i].value.largest, 0);
        CHECK_INT(all[i].value.count, 512 * few[i].value.count);
        CHECK_INT(all[i].grad.count, 512 * few[i].grad.count);
        CHECK_INT(all[i].samples, few[i].samples);
        CHECK(few[i].value.count > 0);
    }
}

int main(void) {
    tell = (told *)mmap(NULL, RANKS * sizeof *tell, PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    RUN(ranks_may_part);
    RUN(a_loss_on_one_rank);
    RUN(guards_must_be_alike);
    RUN(guards_started_later);
    RUN(many_ranks);
    return test_report();
}
