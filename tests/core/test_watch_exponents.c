/* test_watch_exponents.c - counts, by exponent, of the values that sites store, compared with
 * frexp of the values given.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
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

/* y = x * w elementwise, then its mean: two sites, of N values and of one. */
static void step(mixp_context *ctx, mixp_tensor *w) {
    static const int64_t n[1] = { N };
    mixp_tensor *product;
    mixp_step_begin(ctx);
    product = mixp_mul(ctx, mixp_input(ctx, MIXP_F32, 1, n, x), w);
    mixp_read(product, y, MIXP_F32, N);
    CHECK_INT(mixp_backward(ctx, mixp_mean(ctx, product, MIXP_ALL, 0)), MIXP_OK);
    CHECK_INT(mixp_optimizer_step(still), MIXP_OK);
}

static int site_named(mixp_context *ctx, const char *op) {
    mixp_site_info s;
    int i;
    for (i = 0; mixp_site(ctx, i, &s); i++)
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
    mixp_context *ctx;
    int i;
    memset(&c, 0, sizeof c);
    memset(&d, 0, sizeof d);
    c.allocate = spoiled;
    c.release = freed;
    ctx = mixp_context_new(&c);
    d.every = every;
    d.exponents = 1;
    *w = mixp_param(ctx, "w", MIXP_F32, 1, n);
    mixp_fill(*w, 3.0);
    sgd.lr = 0;
    still = mixp_optimizer_new(ctx, &sgd);
    CHECK_INT(mixp_optimizer_add(still, *w, NULL), MIXP_OK);
    for (i = 0; i < N; i++) x[i] = i % 7 ? ldexpf(1.0f + (float)(i % 5) / 8.0f, i % 40 - 20) : 0.0f;
    for (i = 0; i < N; i += 3) x[i] = -x[i];
    CHECK_INT(mixp_guard_start(ctx, &d), MIXP_OK);
    return ctx;
}

/* Each value in its bin; of all sites, the mean's one value beside them; anew in each sample. */
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
        CHECK_INT(mixp_site_exponents(ctx, site_named(ctx, "mul"), counts), 1);
        CHECK(memcmp(counts, want, sizeof want) == 0);
        CHECK_INT(mixp_site_exponents(ctx, -1, all), 1);
        want[bin_of((float)mean)]++;
        CHECK(memcmp(all, want, sizeof want) == 0);
    }
    for (i = 0; i < MIXP_EXPONENTS; i++) sum += all[i];
    CHECK_INT(sum, N + 1);
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
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
    CHECK_INT(mixp_site_exponents(ctx, -1, before), 1);
    mixp_eval_begin(ctx);
    for (i = 0; i < 100; i++) {
        snprintf(scope, sizeof scope, "s%d", i);
        MIXP_SCOPE(ctx, scope) mixp_relu(ctx, mixp_input(ctx, MIXP_F32, 1, n, x));
    }
    for (i = 2; i < 102; i++) {
        CHECK_INT(mixp_site_exponents(ctx, i, counts), 1);
        CHECK(memcmp(counts, none, sizeof none) == 0);
    }
    CHECK_INT(mixp_site_exponents(ctx, i, counts), 0);
    CHECK_INT(mixp_site_exponents(ctx, -1, counts), 1);
    CHECK(memcmp(counts, before, sizeof before) == 0);
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    mixp_context_free(ctx);
}

/* Not asked for, no such site, nowhere to write, another value of the setting. */
static void test_refused(void) {
    mixp_tensor *w;
    mixp_context *ctx = open_with(1, &w), *plain = mixp_context_new(NULL);
    int64_t counts[MIXP_EXPONENTS], allocations;
    mixp_guard_desc d;
    const char *why = "";
    int i;
    memset(&d, 0, sizeof d);
    CHECK_INT(mixp_site_exponents(ctx, -1, NULL), 0);
    CHECK_INT(mixp_site_exponents(ctx, 0, counts), 0);      /* no step yet */
    step(ctx, w);
    CHECK_INT(mixp_site_exponents(ctx, 2, counts), 0);
    CHECK_INT(mixp_site_exponents(ctx, -2, counts), 0);
    CHECK_INT(mixp_site_exponents(NULL, 0, counts), 0);
    CHECK_INT(mixp_guard_start(plain, NULL), MIXP_OK);
    CHECK_INT(mixp_site_exponents(plain, -1, counts), 0);
    step(ctx, w);
    allocations = mixp_context_memory(ctx).allocations;
    for (i = 0; i < 5; i++) step(ctx, w);
    CHECK_INT(mixp_context_memory(ctx).allocations, allocations);
    d.exponents = 0;
    CHECK_INT(mixp_guard_start(ctx, &d), MIXP_OK);
    CHECK_INT(mixp_site_exponents(ctx, 0, counts), 0);      /* counted no more */
    d.exponents = 2;
    CHECK_INT(mixp_guard_start(ctx, &d), MIXP_ERR_ARGUMENT);
    mixp_context_error(ctx, &why);
    CHECK_TEXT(why, "exponents must be 0 or 1");
    mixp_context_free(plain);
    mixp_context_free(ctx);
}

int main(void) {
    RUN(test_bins);
    RUN(test_unsampled);
    RUN(test_refused);
    return test_report();
}
