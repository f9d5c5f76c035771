/* test_observe.c - counts of examples/compare.h, by exponent, of the values that sites store,
 * compared with frexp of the values given; and what an observer sees, and when.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include "examples/compare.h"
#include "examples/trail.h"
#include "test.h"

enum { N = 4096 };

static float x[N], y[N];

/* The bin of a value: its exponent as f32, 0 for zeros. */
static int bin_of(float v) {
    int e;
    if (!(v < 0.0f) && !(v > 0.0f)) return 0;
    (void)frexp((double)v, &e);
    return e - 1 + 127;
}

static mixp_optimizer *still;           /* of a rate of 0: a guard counts updates */
static mixp_exponents *counted;

/* y = x * w elementwise, then its mean: two sites, of N values and of one. */
static void step(mixp_context *ctx, mixp_tensor *w) {
    static const int64_t n[1] = { N };
    mixp_step_begin(ctx);
    mixp_tensor *product = mixp_mul(ctx, mixp_input(ctx, MIXP_F32, 1, n, x), w);
    mixp_read(product, y, MIXP_F32, N);
    CHECK_INT(mixp_backward(ctx, mixp_mean(ctx, product, MIXP_ALL, 0)), MIXP_OK);
    CHECK_INT(mixp_optimizer_step(still), MIXP_OK);
}

static int site_named(mixp_context *ctx, const char *op) {
    mixp_site_info s;
    for (int i = 0; mixp_site(ctx, i, &s); i++)
        if (strcmp(s.op, op) == 0) return i;
    return -2;
}

/* Memory with other bytes than 0 behind each piece. */
enum { BEHIND = 1 << 18 };
static void *spoiled(size_t bytes, void *user) {
    char *p = (char *)malloc(bytes + BEHIND);
    (void)user;
    if (p) memset(p + bytes, 0x11, BEHIND);
    return p;
}
static void freed(void *p, void *user) {
    (void)user;
    free(p);
}

static mixp_context *open_with(int every, mixp_tensor **w) {
    static const int64_t n[1] = { N };
    mixp_context_desc c;
    mixp_guard_desc d;
    mixp_optimizer_desc sgd = mixp_sgd_defaults();
    memset(&c, 0, sizeof c);
    memset(&d, 0, sizeof d);
    c.allocate = spoiled;
    c.release = freed;
    mixp_context *ctx = mixp_context_new(&c);
    d.every = every;
    *w = mixp_param(ctx, "w", MIXP_F32, 1, n);
    mixp_fill(*w, 3.0);
    sgd.lr = 0;
    still = mixp_optimizer_new(ctx, &sgd);
    CHECK_INT(mixp_optimizer_add(still, *w, NULL), MIXP_OK);
    for (int i = 0; i < N; i++) x[i] = i % 7 ? ldexpf(1.0f + (float)(i % 5) / 8.0f, i % 40 - 20) : 0.0f;
    for (int i = 0; i < N; i += 3) x[i] = -x[i];
    CHECK_INT(mixp_guard_start(ctx, &d), MIXP_OK);
    counted = mixp_exponents_new(ctx);
    CHECK(counted != NULL);
    return ctx;
}

/* The counter puts each value into the bin of its exponent. Without a name it counts all sites, so the
 * value of the mean comes in. It begins at 0 in each sample. */
static void test_bins(void) {
    mixp_tensor *w;
    mixp_context *ctx = open_with(2, &w);
    int64_t counts[MIXP_EXPONENTS], want[MIXP_EXPONENTS], all[MIXP_EXPONENTS], sum = 0;
    double mean = 0.0;
    int i, round;
    for (round = 0; round < 3; round++) {
        if (round == 2) for (i = 0; i < N; i++) x[i] *= 4.0f;
        step(ctx, w);
        if (round == 1) continue;           /* no sampled one: the counts are the first step's */
        memset(want, 0, sizeof want);
        for (i = 0, mean = 0.0; i < N; i++) {
            want[bin_of(y[i])]++;
            mean += (double)y[i] / N;
        }
        CHECK_INT(mixp_site_exponents(counted, site_named(ctx, "mul"), counts), 1);
        CHECK(memcmp(counts, want, sizeof want) == 0);
        CHECK_INT(mixp_site_exponents(counted, -1, all), 1);
        want[bin_of((float)mean)]++;
        CHECK(memcmp(all, want, sizeof want) == 0);
    }
    for (i = 0; i < MIXP_EXPONENTS; i++) sum += all[i];
    CHECK_INT(sum, N + 1);
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    mixp_exponents_free(counted);
    mixp_context_free(ctx);
}

/* Sites that only a step without a sample has met have no counts. */
static void test_unsampled(void) {
    static const int64_t n[1] = { N };
    mixp_tensor *w;
    mixp_context *ctx = open_with(64, &w);
    int64_t counts[MIXP_EXPONENTS], before[MIXP_EXPONENTS], none[MIXP_EXPONENTS];
    char scope[16];
    int i;
    memset(none, 0, sizeof none);
    step(ctx, w);
    step(ctx, w);
    CHECK_INT(mixp_site_exponents(counted, -1, before), 1);
    mixp_eval_begin(ctx);
    for (i = 0; i < 100; i++) {
        snprintf(scope, sizeof scope, "s%d", i);
        MIXP_SCOPE(ctx, scope) mixp_relu(ctx, mixp_input(ctx, MIXP_F32, 1, n, x));
    }
    for (i = 2; i < 102; i++) {
        CHECK_INT(mixp_site_exponents(counted, i, counts), 1);
        CHECK(memcmp(counts, none, sizeof none) == 0);
    }
    CHECK_INT(mixp_site_exponents(counted, i, counts), 0);
    CHECK_INT(mixp_site_exponents(counted, -1, counts), 1);
    CHECK(memcmp(counts, before, sizeof before) == 0);
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    mixp_exponents_free(counted);
    mixp_context_free(ctx);
}

/* No such site, nowhere to write, nothing sampled, and no memory after the first sample. */
static void test_refused(void) {
    mixp_tensor *w;
    mixp_context *ctx = open_with(1, &w);
    int64_t counts[MIXP_EXPONENTS], allocations;
    CHECK_INT(mixp_site_exponents(counted, -1, NULL), 0);
    CHECK_INT(mixp_site_exponents(counted, 0, counts), 0);      /* no step yet */
    step(ctx, w);
    CHECK_INT(mixp_site_exponents(counted, 2, counts), 0);
    CHECK_INT(mixp_site_exponents(counted, -2, counts), 0);
    CHECK_INT(mixp_site_exponents(NULL, 0, counts), 0);
    allocations = mixp_context_memory(ctx).allocations;
    for (int i = 0; i < 5; i++) step(ctx, w);
    CHECK_INT(mixp_context_memory(ctx).allocations, allocations);
    CHECK(mixp_exponents_new(NULL) == NULL);
    mixp_exponents_free(NULL);
    MIXP_NO_GRAD(ctx) { CHECK(mixp_exponents_new(ctx) == NULL); }
    mixp_context_error(ctx, NULL);
    mixp_exponents_free(counted);
    mixp_context_free(ctx);
}

/* Counts go on if they cannot be freed: in a scope, and while an observer that calls them is there. */
static void test_freed_in_order(void) {
    mixp_tensor *w;
    mixp_context *ctx = open_with(1, &w);
    mixp_exponents *newer = mixp_exponents_new(ctx);
    int64_t counts[MIXP_EXPONENTS], sum = 0;
    mixp_exponents_free(counted);
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_ERR_ORDER);
    mixp_context_clear_error(ctx);
    step(ctx, w);
    CHECK_INT(mixp_site_exponents(newer, -1, counts), 1);
    for (int i = 0; i < MIXP_EXPONENTS; i++) sum += counts[i];
    CHECK_INT(sum, N + 1);
    CHECK_INT(mixp_site_exponents(counted, -1, counts), 1);
    for (int i = 0; i < MIXP_EXPONENTS; i++) sum -= counts[i];
    CHECK_INT(sum, 0);
    mixp_exponents_free(newer);
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    MIXP_SCOPE(ctx, "s") { mixp_exponents_free(counted); }
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_ERR_ORDER);
    mixp_context_clear_error(ctx);
    step(ctx, w);
    mixp_exponents_free(counted);
    step(ctx, w);
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    mixp_context_free(ctx);
}

/* --- the observer ------------------------------------------------------------------------------ */

/* Sights, one behind the other: the operator, and '<' before that of a gradient. */
typedef struct diary {
    char          text[256];
    float         first;                /* element 0 of the newest tensor */
    int           sites[16], samples, reads, n;
    int64_t       draws;
    mixp_observer next;                 /* is called as well */
} diary;

static void write_down(mixp_context *ctx, const mixp_sight *s, void *user) {
    diary *d = (diary *)user;
    static float values[N];
    if (d->next.see) d->next.see(ctx, s, d->next.user);
    strcat(d->text, s->backward ? "<" : " ");
    strcat(d->text, s->op);
    CHECK_INT(mixp_read(s->tensor, values, MIXP_F32, s->tensor->count), MIXP_OK);
    d->first = values[0];
    d->sites[d->n++ % 16] = s->site;
    d->samples += s->sample != 0;
    d->reads = s->reads[0];
    d->draws = s->draws;
}

static mixp_observer writer(diary *d, int trial) {
    mixp_observer o;
    memset(d, 0, sizeof *d);
    o.see = write_down;
    o.user = d;
    o.trial = trial;
    return o;
}

/* The mean of 3 x for N elements x of 2: the values are 6 and 6, the gradients 1 and 1 / N. */
static mixp_tensor *mean_of_three(mixp_context *ctx, mixp_tensor *w) {
    static const int64_t all[1] = { N };
    return mixp_mean(ctx, mixp_reshape(ctx, mixp_scale(ctx, w, 3.0f), 1, all), MIXP_ALL, 0);
}

static mixp_context *bare_context(mixp_tensor **w) {
    static const int64_t n[1] = { N };
    mixp_context *ctx = mixp_context_new(NULL);
    *w = mixp_param(ctx, "w", MIXP_F32, 1, n);
    mixp_fill(*w, 2.0);
    return ctx;
}

/* Each site once forward and once backward, in these orders; a reshape is none. Needs no guard, and
 * leaves the gradient's bits as they are. */
static void test_sights(void) {
    mixp_tensor *w;
    mixp_context *ctx = bare_context(&w);
    mixp_observer o, before;
    float grads[2][N];
    diary d;
    for (int seen = 0; seen < 2; seen++) {
        o = writer(&d, 0);
        if (seen) CHECK_INT(mixp_observe(ctx, &o, &before), MIXP_OK);
        mixp_step_begin(ctx);
        w->grad = NULL;
        CHECK_INT(mixp_backward(ctx, mean_of_three(ctx, w)), MIXP_OK);
        CHECK_INT(mixp_read(w->grad, grads[seen], MIXP_F32, N), MIXP_OK);
    }
    CHECK(!before.see && !before.user && !before.trial);
    CHECK_TEXT(d.text, " scale mean<mean<scale");
    CHECK(strlen(d.text) == strlen(" scale mean<mean<scale"));
    CHECK_INT(d.n, 4);
    CHECK_INT(d.sites[0], d.sites[3]);
    CHECK_INT(d.sites[1], d.sites[2]);
    CHECK(d.sites[0] != d.sites[1]);
    CHECK_NEAR(d.first, 1.0 / N, 0);            /* of the newest: scale's gradient */
    CHECK_INT(d.reads, 0);                      /* scale reads a parameter */
    CHECK_INT(d.samples, 0);
    CHECK_INT(d.draws, 0);
    CHECK(memcmp(grads[0], grads[1], sizeof grads[0]) == 0);
    CHECK_INT(mixp_observe(ctx, NULL, &before), MIXP_OK);
    CHECK(before.see == write_down && before.user == &d);
    mixp_step_begin(ctx);
    mean_of_three(ctx, w);
    CHECK_INT(d.n, 4);                          /* the removed observer is not called */
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    mixp_context_free(ctx);
}

/* The second site reads the first; a draw counts from the operator on that draws. */
static void test_reads_and_draws(void) {
    mixp_tensor *w;
    mixp_context *ctx = bare_context(&w);
    diary d;
    mixp_observer o = writer(&d, 0);
    CHECK_INT(mixp_observe(ctx, &o, NULL), MIXP_OK);
    mixp_step_begin(ctx);
    w = mixp_scale(ctx, w, 3.0f);
    CHECK_NEAR(d.first, 6.0, 0);
    w = mixp_relu(ctx, w);
    CHECK_INT(d.reads, d.sites[0]);
    CHECK_INT(d.draws, 0);
    mixp_dropout(ctx, w, 0.5f, 1);
    CHECK_INT(d.draws, 1);
    mixp_step_begin(ctx);
    mixp_relu(ctx, mixp_context_find(ctx, "w"));
    CHECK_INT(d.draws, 0);
    mixp_context_free(ctx);
}

/* A trial leaves the step count and forgets gradients; a replaced observer may be called, and comes
 * back. */
static void test_trials(void) {
    mixp_tensor *w;
    mixp_context *ctx = bare_context(&w);
    diary a, b;
    mixp_observer outer = writer(&a, 0);
    CHECK_INT(mixp_observe(ctx, &outer, NULL), MIXP_OK);
    mixp_step_begin(ctx);
    CHECK_INT(mixp_backward(ctx, mean_of_three(ctx, w)), MIXP_OK);
    CHECK_INT(a.n, 4);
    uint64_t steps = mixp_context_steps(ctx);
    mixp_observer inner = writer(&b, 1);
    CHECK_INT(mixp_observe(ctx, &inner, &b.next), MIXP_OK);
    for (int i = 0; i < 3; i++) {
        CHECK_INT(mixp_step_begin(ctx), MIXP_OK);
        CHECK(w->grad == NULL);
        CHECK_INT(mixp_context_steps(ctx), steps + 1);
        CHECK_INT(mixp_backward(ctx, mean_of_three(ctx, w)), MIXP_OK);
        CHECK(w->grad != NULL);
    }
    CHECK_INT(mixp_observe(ctx, &b.next, NULL), MIXP_OK);
    CHECK(w->grad == NULL);
    CHECK_INT(mixp_context_steps(ctx), steps);
    CHECK_INT(b.n, 12);
    CHECK_INT(a.n, 16);                         /* 4 of its own, 12 that the inner one passed on */
    mixp_step_begin(ctx);
    mean_of_three(ctx, w);
    CHECK_INT(a.n, 18);
    MIXP_NO_GRAD(ctx) { CHECK_INT(mixp_observe(ctx, NULL, NULL), MIXP_ERR_ORDER); }
    mixp_context_free(ctx);
}

/* A scaled loss of Inf in a trial is no loss of the next update: after a gradient of Inf, whose loss
 * is finite, the scale is halved under a guard. */
static void test_trial_of_a_scaled_loss(void) {
    static const double from = 65536.0;
    mixp_tensor *w;
    mixp_context *ctx = bare_context(&w);
    mixp_optimizer *opt = mixp_optimizer_new(ctx, NULL);
    mixp_scaler *scaler = mixp_scaler_new(ctx, NULL);
    diary d;
    mixp_observer o = writer(&d, 1);
    CHECK_INT(mixp_optimizer_add(opt, w, NULL), MIXP_OK);
    CHECK_INT(mixp_guard_start(ctx, NULL), MIXP_OK);
    CHECK_INT(mixp_observe(ctx, &o, NULL), MIXP_OK);
    mixp_step_begin(ctx);
    mixp_scaler_scale(scaler, mixp_scale(ctx, mean_of_three(ctx, w), 1e38f));
    CHECK_INT(mixp_observe(ctx, NULL, NULL), MIXP_OK);
    CHECK_NEAR(mixp_scaler_loss_scale(scaler), from, 0);
    mixp_step_begin(ctx);
    CHECK_INT(mixp_backward(ctx, mixp_scaler_scale(scaler, mean_of_three(ctx, w))), MIXP_OK);
    CHECK_INT(mixp_fill(w->grad, (double)INFINITY), MIXP_OK);
    mixp_scaler_step(scaler, opt);
    mixp_scaler_update(scaler);
    CHECK_NEAR(mixp_scaler_loss_scale(scaler), from / 2.0, 0);
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    mixp_context_free(ctx);
}

/* With a guard that was stopped, an observer changes no dtype: pins and fallbacks do not apply. */
static void test_stopped_guard(void) {
    mixp_tensor *w, *twice = NULL;
    mixp_context *ctx = bare_context(&w);
    diary d;
    mixp_observer o = writer(&d, 0);
    CHECK_INT(mixp_guard_start(ctx, NULL), MIXP_OK);
    CHECK_INT(mixp_guard_pin(ctx, "*", MIXP_F32), MIXP_OK);
    CHECK_INT(mixp_guard_stop(ctx), MIXP_OK);
    CHECK_INT(mixp_observe(ctx, &o, NULL), MIXP_OK);
    mixp_step_begin(ctx);
    mixp_autocast_set_level(ctx, 2);
    MIXP_AUTOCAST(ctx, MIXP_F16) { twice = mixp_scale(ctx, mixp_scale(ctx, w, 2.0f), 2.0f); }
    CHECK_INT(twice->dtype, MIXP_F16);
    CHECK(d.n >= 2);
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    mixp_context_free(ctx);
}

/* A guard that follows an observer sets a limit of its own, above and below what was seen. */
static void test_limits(void) {
    static const int limits[2] = { 1, 5000 };
    mixp_guard_desc g;
    diary d;
    int i, k;
    memset(&g, 0, sizeof g);
    g.every = 1;
    for (i = 0; i < 2; i++) {
        mixp_tensor *w, *last;
        mixp_context *ctx = bare_context(&w);
        mixp_site_info site;
        mixp_observer o = writer(&d, 0);
        CHECK_INT(mixp_observe(ctx, &o, NULL), MIXP_OK);
        mixp_step_begin(ctx);
        mean_of_three(ctx, w);
        CHECK_INT(mixp_observe(ctx, NULL, NULL), MIXP_OK);
        g.max_sites = limits[i];
        CHECK_INT(mixp_guard_start(ctx, &g), MIXP_OK);
        mixp_step_begin(ctx);
        for (k = 0, last = w; k < 4200 && last; k++) last = mixp_scale(ctx, last, 1.0f);
        CHECK_INT(mixp_site(ctx, limits[i] == 1 ? 2 : 4200, &site), limits[i] != 1);
        CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
        mixp_context_free(ctx);
    }
}

static void see_nothing(mixp_context *ctx, const mixp_sight *s, void *user) {
    (void)ctx;
    (void)s;
    (void)user;
}

/* Sites that found no room beside an observer find it beside a guard of more: no event tells of
 * them. */
static void test_room_again(void) {
    mixp_tensor *w, *last;
    mixp_context *ctx = bare_context(&w);
    mixp_guard_desc g;
    mixp_observer o;
    mixp_event e;
    int i, round, k;
    memset(&o, 0, sizeof o);
    o.see = see_nothing;
    memset(&g, 0, sizeof g);
    g.every = 1;
    g.max_sites = 5000;
    CHECK_INT(mixp_observe(ctx, &o, NULL), MIXP_OK);
    for (round = 0; round < 4; round++) {
        mixp_step_begin(ctx);
        for (k = 0, last = w; k < 4200 && last; k++) last = mixp_scale(ctx, last, 1.0f);
        if (!round) CHECK_INT(mixp_guard_start(ctx, &g), MIXP_OK);
    }
    for (i = 0; mixp_guard_event(ctx, i, &e); i++) CHECK(e.kind != MIXP_EVENT_FULL);
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    mixp_context_free(ctx);
}

/* --- trails ------------------------------------------------------------------------------------ */

/* Lines of a file that begin so. */
static int lines_with(const char *path, const char *start) {
    char  line[512];
    int   n = 0;
    FILE *f = fopen(path, "r");
    while (f && fgets(line, sizeof line, f)) n += strncmp(line, start, strlen(start)) == 0;
    if (f) fclose(f);
    return n;
}

/* A step has a record of its weight, and two of each site; an observer that was there before sees as much as ever. */
static void test_trail(void) {
    static const char path[] = "test_observe.trail";
    mixp_tensor *w;
    mixp_context *ctx = open_with(1, &w);
    mixp_trail *trail = mixp_trail_open(ctx, path);
    int64_t counts[MIXP_EXPONENTS], sum = 0;
    CHECK(trail != NULL);
    step(ctx, w);
    CHECK_INT(mixp_trail_step(trail), MIXP_OK);
    step(ctx, w);
    CHECK_INT(mixp_trail_close(trail), MIXP_OK);
    step(ctx, w);
    CHECK_INT(lines_with(path, "mixprec trail 1"), 1);
    CHECK_INT(lines_with(path, "w\t1\tf32\t4096\t"), 1);
    CHECK_INT(lines_with(path, "f\t0\tf32\t4096\t"), 1);
    CHECK_INT(lines_with(path, "f\t1\tf32\t"), 2);
    CHECK_INT(lines_with(path, "b\t1\tf32\t"), 2);
    CHECK_INT(mixp_site_exponents(counted, -1, counts), 1);
    for (int i = 0; i < MIXP_EXPONENTS; i++) sum += counts[i];
    CHECK_INT(sum, N + 1);
    mixp_exponents_free(counted);
    mixp_context_free(ctx);
    remove(path);
}

static void test_trail_refused(void) {
    static const char path[] = "test_observe.trail";
    mixp_tensor *w;
    mixp_context *ctx = open_with(1, &w);
    CHECK(mixp_trail_open(NULL, path) == NULL);
    CHECK(mixp_trail_open(ctx, NULL) == NULL);
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_ERR_ARGUMENT);
    mixp_context_clear_error(ctx);
    CHECK(mixp_trail_open(ctx, "no/such/folder/trail") == NULL);
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_ERR_IO);
    mixp_context_clear_error(ctx);
    CHECK_INT(mixp_trail_step(NULL), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_trail_close(NULL), MIXP_OK);
    mixp_trail *older = mixp_trail_open(ctx, path);
    mixp_trail *newer = mixp_trail_open(ctx, "test_observe.newer");
    CHECK_INT(mixp_trail_close(older), MIXP_ERR_ORDER);
    mixp_context_clear_error(ctx);
    CHECK_INT(mixp_trail_close(newer), MIXP_OK);
    CHECK_INT(mixp_trail_close(older), MIXP_OK);
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    remove(path);
    remove("test_observe.newer");
    mixp_exponents_free(counted);
    mixp_context_free(ctx);
}

int main(void) {
    RUN(test_bins);
    RUN(test_unsampled);
    RUN(test_refused);
    RUN(test_freed_in_order);
    RUN(test_sights);
    RUN(test_reads_and_draws);
    RUN(test_trials);
    RUN(test_trial_of_a_scaled_loss);
    RUN(test_stopped_guard);
    RUN(test_limits);
    RUN(test_room_again);
    RUN(test_trail);
    RUN(test_trail_refused);
    return test_report();
}
