/* test_bad_input.c - rare and hostile calls: parameters added late, allocations that fail in the
 * middle of a call, numbers at the limits of their types, files that no save has written.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * The test's allocator checks the bytes after each block, fails on demand, and counts the blocks
 * that are not freed.
 */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include "examples/compare.h"
#include "test.h"
#include "new_optimizer.h"
#include <limits.h>
#include <unistd.h>

/* --- memory ------------------------------------------------------------------------------- */

enum { BEHIND = 1 << 16, BEFORE = 64 };     /* watched bytes behind a piece; its size, before it */

static long requests_left = -1;         /* until one fails; -1: none does */
static long pieces, overruns;

static void *watched_allocate(size_t bytes, void *user) {
    (void)user;
    if (requests_left == 0) {
        requests_left = -1;
        return NULL;
    }
    if (requests_left > 0) requests_left--;
    unsigned char *p = malloc(BEFORE + bytes + BEHIND);
    if (!p) return NULL;
    memcpy(p, &bytes, sizeof bytes);
    memset(p + BEFORE + bytes, 0xA5, BEHIND);
    pieces++;
    return p + BEFORE;
}

static void watched_release(void *memory, void *user) {
    unsigned char *p = memory;
    size_t bytes, i;
    (void)user;
    if (!p) return;
    p -= BEFORE;
    memcpy(&bytes, p, sizeof bytes);
    for (i = 0; i < BEHIND && p[BEFORE + bytes + i] == 0xA5; i++) { }
    overruns += i < BEHIND;
    pieces--;
    free(p);
}

static mixp_context *context_of(const mixp_ranks_desc *ranks) {
    mixp_context_desc d;
    memset(&d, 0, sizeof d);
    d.allocate = watched_allocate;
    d.release = watched_release;
    d.threads = 1;
    d.ranks = ranks;
    return mixp_context_new(&d);
}

/* Frees it, and sees that nothing was written behind its memory, or kept. */
static void context_close(mixp_context *ctx) {
    overruns = 0;
    requests_left = -1;
    mixp_context_free(ctx);
    CHECK_INT(overruns, 0);
    CHECK_INT(pieces, 0);
}

/* --- steps -------------------------------------------------------------------------------- */

static mixp_tensor *matrix(mixp_context *ctx, const char *name, int64_t rows, int64_t cols) {
    int64_t shape[2];
    shape[0] = rows;
    shape[1] = cols;
    mixp_tensor *t = mixp_param(ctx, name, MIXP_F32, 2, shape);
    mixp_init_normal(t, 0, 0.1);
    return t;
}

/* A step whose loss is the sum of the squares of n parameters. */
static mixp_result step(mixp_context *ctx, mixp_optimizer *opt, mixp_tensor **p, int n) {
    mixp_tensor *loss = NULL;
    mixp_step_begin(ctx);
    mixp_zero_grad(opt);
    for (int i = 0; i < n; i++) {
        mixp_tensor *sum = mixp_sum(ctx, mixp_mul(ctx, p[i], p[i]), MIXP_ALL, 0);
        loss = loss ? mixp_add(ctx, loss, sum) : sum;
    }
    if (mixp_backward(ctx, loss) != MIXP_OK) return mixp_context_error(ctx, NULL);
    return mixp_optimizer_step(opt);
}

/* --- ranks: this process is rank 0 of two, and the other does what it does ----------------- */

static const char *same_sum(void *user, void *data, int64_t count, mixp_dtype dtype, void *stream,
                            double seconds) {
    double *table = data;
    (void)user; (void)stream; (void)seconds;
    if (dtype == MIXP_F64) memcpy(table + count / 2, table, (size_t)(count / 2) * sizeof *table);
    return NULL;
}

static const char *same_gather(void *user, void *data, int64_t count, mixp_dtype dtype, void *stream,
                               double seconds) {
    size_t bytes = (size_t)count * mixp_dtype_size(dtype);
    (void)user; (void)stream; (void)seconds;
    memcpy((char *)data + bytes, data, bytes);
    return NULL;
}

static mixp_ranks_desc two_ranks(void) {
    mixp_ranks_desc r;
    memset(&r, 0, sizeof r);
    r.size = 2;
    r.sum = same_sum;
    r.all_gather = same_gather;
    r.shard = 1;
    return r;
}

/* A parameter that comes after a step makes the slices longer. */
static void sharded_and_late(void) {
    mixp_ranks_desc ranks = two_ranks();
    mixp_context *ctx = context_of(&ranks);
    mixp_optimizer *opt = mixp_optimizer_new(ctx, NULL);
    mixp_tensor *p[2];
    p[0] = matrix(ctx, "a", 8, 8);
    CHECK_INT(mixp_optimizer_add(opt, p[0], NULL), MIXP_OK);
    CHECK_INT(step(ctx, opt, p, 1), MIXP_OK);
    p[1] = matrix(ctx, "b", 70, 90);
    CHECK_INT(mixp_optimizer_add(opt, p[1], NULL), MIXP_OK);
    CHECK_INT(step(ctx, opt, p, 2), MIXP_OK);
    context_close(ctx);
}

/* A parameter that could not be added has no owner: added again, it has the one that it would have
 * had, whose states take memory here. */
static void sharded_and_failed(void) {
    mixp_ranks_desc ranks = two_ranks();
    mixp_context *ctx = context_of(&ranks);
    mixp_optimizer *opt = mixp_optimizer_new(ctx, NULL);
    mixp_tensor *a = matrix(ctx, "a", 64, 64);
    size_t before;
    mixp_result r;
    long k;
    for (k = 0, r = MIXP_ERR_MEMORY; r == MIXP_ERR_MEMORY && k < 50; k++) {
        before = mixp_context_memory(ctx).used;
        requests_left = k;
        r = mixp_optimizer_add(opt, a, NULL);
        requests_left = -1;
        mixp_context_clear_error(ctx);
    }
    CHECK_INT(r, MIXP_OK);
    CHECK(k > 3);
    CHECK(mixp_context_memory(ctx).used >= before + 64 * 64 * sizeof(float));   /* half of two */
    context_close(ctx);
}

/* A save without the memory for what the other rank has is an error, and no crash. */
static void sharded_save_without_memory(void) {
    mixp_ranks_desc ranks = two_ranks();
    mixp_context *ctx = context_of(&ranks);
    mixp_optimizer *opt = mixp_optimizer_new(ctx, NULL);
    mixp_checkpoint what;
    mixp_tensor *p[2];
    char path[64];
    long k, failed = 0;
    snprintf(path, sizeof path, "/tmp/mixprec_bad_%ld.st", (long)getpid());
    p[0] = matrix(ctx, "a", 8, 8);
    p[1] = matrix(ctx, "b", 8, 8);
    mixp_optimizer_add(opt, p[0], NULL);
    mixp_optimizer_add(opt, p[1], NULL);
    CHECK_INT(step(ctx, opt, p, 2), MIXP_OK);
    memset(&what, 0, sizeof what);
    what.ctx = ctx;
    what.optimizers = &opt;
    what.n_optimizers = 1;
    for (k = 0; k < 20; k++) {
        requests_left = k;
        failed += mixp_checkpoint_save(path, &what) == MIXP_ERR_MEMORY;
        requests_left = -1;
        mixp_context_clear_error(ctx);
    }
    CHECK(failed > 2);
    CHECK_INT(mixp_checkpoint_save(path, &what), MIXP_OK);
    remove(path);
    context_close(ctx);
}

/* --- parameters and memory ------------------------------------------------------------------ */

/* More parameters than there was room to count when a sample was asked for. */
static void sample_then_add(void) {
    enum { N = 40 };
    mixp_context *ctx = context_of(NULL);
    mixp_optimizer *opt = mixp_optimizer_new(ctx, NULL);
    mixp_tensor *p[N];
    mixp_underflow u;
    char name[16];
    for (int i = 0; i < N; i++) {
        snprintf(name, sizeof name, "p%d", i);
        p[i] = matrix(ctx, name, 2, 2);
        mixp_optimizer_add(opt, p[i], NULL);
        if (i == 0) CHECK_INT(mixp_optimizer_sample(opt), MIXP_OK);
    }
    CHECK_INT(step(ctx, opt, p, N), MIXP_OK);
    CHECK_INT(mixp_optimizer_underflow(opt, -1, &u), 1);
    CHECK_INT(u.look.count, 4 * N);
    CHECK_INT(mixp_optimizer_underflow(opt, N, &u), 0);
    CHECK_INT(mixp_optimizer_underflow(opt, -2, &u), 0);
    CHECK_INT(mixp_optimizer_underflow(opt, INT64_MAX, &u), 0);
    CHECK_INT(mixp_optimizer_underflow(opt, INT64_MIN, &u), 0);
    context_close(ctx);
}

static mixp_optimizer *optimizer_of(mixp_context *ctx, int muon)
{ return muon ? new_muon(ctx) : mixp_optimizer_new(ctx, NULL); }

/* The first weights after two steps; between them the request number `fails` for the parameter
 * number `n` fails (-1: nobody adds one). Returns whether it failed. */
static int add_fails(int muon, int n, int64_t side, long fails, float *weights) {
    mixp_context *ctx = context_of(NULL);
    mixp_optimizer *opt = optimizer_of(ctx, muon);
    mixp_tensor *p[40];
    mixp_result r = MIXP_OK;
    char name[16];
    for (int i = 0; i <= n; i++) {
        snprintf(name, sizeof name, "p%d", i);
        p[i] = matrix(ctx, name, i == n ? side : 3, 4);
        if (i < n) mixp_optimizer_add(opt, p[i], NULL);
    }
    CHECK_INT(step(ctx, opt, p, n), MIXP_OK);
    requests_left = fails;
    if (fails >= 0) r = mixp_optimizer_add(opt, p[n], NULL);
    requests_left = -1;
    mixp_context_clear_error(ctx);
    if (r != MIXP_OK || fails < 0) CHECK_INT(step(ctx, opt, p, n), MIXP_OK);
    for (int i = 0; i < n; i++) mixp_read(p[i], weights + 12 * i, MIXP_F32, 12);
    if (r != MIXP_OK) {
        CHECK_INT(r, MIXP_ERR_MEMORY);
        CHECK_INT(mixp_optimizer_add(opt, p[n], NULL), MIXP_OK);
        CHECK_INT(step(ctx, opt, p, n + 1), MIXP_OK);
    }
    context_close(ctx);
    return r != MIXP_OK;
}

/* Whatever request fails: the optimizer goes on as if nobody had tried. */
static void adding_fails(int muon, int n, int64_t side) {
    static float expected[12 * 40], got[12 * 40];
    long k = 0;
    add_fails(muon, n, side, -1, expected);
    while (add_fails(muon, n, side, k, got)) {
        CHECK(memcmp(expected, got, sizeof(float) * 12 * (size_t)n) == 0);
        k++;
    }
    CHECK(k > 0);
}
static void adding_fails_in_a_full_table(void) {
    adding_fails(0, 32, 300);
    adding_fails(1, 32, 300);
}
static void adding_fails_for_a_larger_matrix(void) { adding_fails(1, 1, 200); }

/* --- numbers at the ends ------------------------------------------------------------------- */

/* An eps of 0 would make NaN of a gradient of zeros. */
static void muon_without_eps(void) {
    mixp_context *ctx = context_of(NULL);
    mixp_optimizer *opt = new_muon(ctx);
    mixp_param_group group;
    const char *why;
    CHECK_INT(mixp_optimizer_group(opt, 0, &group), MIXP_OK);
    group.eps = 0.0;
    CHECK_INT(mixp_optimizer_add_group(opt, &group), -1);
    CHECK_INT(mixp_context_error(ctx, &why), MIXP_ERR_ARGUMENT);
    CHECK_TEXT(why, "eps must be above 0");
    CHECK_INT(mixp_optimizer_set_group(opt, 0, &group), MIXP_ERR_ARGUMENT);
    context_close(ctx);
}

static void slice_of_any_number(void) {
    static const int64_t ends[4] = { INT64_MIN, INT64_MAX, -INT64_MAX, 0 };
    mixp_context *ctx = context_of(NULL);
    mixp_tensor *x = matrix(ctx, "x", 4, 4);
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 4; k++) {
            const int from_0 = ends[i] == 0 && ends[k] == 0;    /* no elements */
            CHECK_INT(mixp_slice(ctx, x, 0, ends[i], ends[k]) != NULL, from_0);
            CHECK_INT(mixp_context_error(ctx, NULL), from_0 ? MIXP_OK : MIXP_ERR_SHAPE);
            mixp_context_clear_error(ctx);
        }
    context_close(ctx);
}

/* A cast that is given another class casts no input of its own, by a cast, and so on. */
static void cast_of_another_class(void) {
    mixp_context *ctx = context_of(NULL);
    mixp_tensor *x = matrix(ctx, "x", 4, 4), *y = NULL;
    for (int cls = 0; cls < MIXP_CLASS_COUNT; cls++) {
        mixp_autocast_override(ctx, mixp_op_builtin(MIXP_OP_CAST), (mixp_op_class)cls);
        mixp_step_begin(ctx);
        MIXP_AUTOCAST(ctx, MIXP_F16) {
            y = mixp_linear(ctx, mixp_mul(ctx, x, x), x, NULL);
        }
        CHECK(y && y->dtype == MIXP_F16);
        y = mixp_cast(ctx, y, MIXP_BF16);
        CHECK(y && y->dtype == MIXP_BF16);
    }
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    context_close(ctx);
}

/* --- the guard ------------------------------------------------------------------------------ */

static mixp_tensor *left_by_return(mixp_context *ctx, void *user) {
    mixp_tensor **p = user;
    MIXP_AUTOCAST(ctx, MIXP_F16) return mixp_sum(ctx, p[0], MIXP_ALL, 0);
    return NULL;
}

/* Nothing stays open, and the step count as it was, whatever fn does. */
static void compare_of_a_bad_function(void) {
    mixp_context *ctx = context_of(NULL);
    mixp_tensor *p = matrix(ctx, "p", 4, 4);
    mixp_compare_desc d;
    mixp_difference rows[4];
    mixp_guard_desc guard;
    const char *why;
    int64_t n;
    memset(&d, 0, sizeof d);
    memset(&guard, 0, sizeof guard);
    d.a.dtype = MIXP_F16;
    d.a.level = 1;
    d.b.dtype = MIXP_F32;
    d.fn = left_by_return;
    d.user = &p;
    CHECK_INT(mixp_compare(ctx, &d, rows, 4, &n), MIXP_ERR_ORDER);
    mixp_context_error(ctx, &why);
    CHECK_TEXT(why, "fn has opened a region");
    mixp_context_clear_error(ctx);
    CHECK_INT(mixp_context_steps(ctx), 0);
    CHECK_INT(mixp_step_begin(ctx), MIXP_OK);
    guard.max_sites = 100;
    CHECK_INT(mixp_guard_start(ctx, &guard), MIXP_OK);  /* an observer's limit is not the guard's */
    guard.max_sites = 101;
    CHECK_INT(mixp_guard_start(ctx, &guard), MIXP_ERR_ARGUMENT);
    mixp_context_error(ctx, &why);
    CHECK_TEXT(why, "max_sites cannot change");
    context_close(ctx);
}

/* What a pinned cast stores in the first step, and in the first after a resume, is what it stores
 * in all others. */
static void pinned_cast_of_the_first_step(void) {
    mixp_context *ctx = context_of(NULL);
    mixp_autocast region = { MIXP_F16, 1, NULL };
    int64_t shape[2] = { 4, 4 };
    mixp_tensor *w = mixp_param(ctx, "w", MIXP_BF16, 2, shape);
    mixp_dtype stored[3];
    mixp_site_info site;
    mixp_init_normal(w, 0, 0.1);
    mixp_guard_start(ctx, NULL);
    CHECK_INT(mixp_guard_pin(ctx, "w: cast", MIXP_F32), MIXP_OK);
    for (int i = 0; i < 3; i++) {
        mixp_step_begin(ctx);
        mixp_autocast_open_with(ctx, &region);
        mixp_tensor *x = mixp_activation(ctx, MIXP_F16, 2, shape);
        mixp_fill(x, 1);
        CHECK(mixp_linear(ctx, x, w, NULL) != NULL);
        mixp_autocast_close(ctx, 0);
        stored[i] = MIXP_DTYPE_COUNT;
        for (int k = 0; mixp_site(ctx, k, &site); k++)
            if (strcmp(site.name, "w: cast") == 0) stored[i] = site.dtype;
    }
    CHECK_INT(stored[0], MIXP_BF16);
    CHECK_INT(stored[1], MIXP_BF16);
    CHECK_INT(stored[2], MIXP_BF16);
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    context_close(ctx);
}

/* Copies a checkpoint, with the largest number there is for each count of the guard's sites. */
static void save_with_large_counts(const char *path, int32_t count) {
    static const char *const metadata[2][2] = { { "format", "pt" }, { "mixprec", "1" } };
    mixp_safetensors *file;
    mixp_st_entry *all;
    char error[MIXP_MESSAGE_SIZE];
    CHECK_INT(mixp_safetensors_read(path, &file, error, sizeof error), MIXP_OK);
    int64_t n = mixp_safetensors_count(file);
    all = calloc((size_t)n, sizeof *all);
    int32_t *states = NULL;
    for (int64_t i = 0; i < n; i++) {
        all[i] = *mixp_safetensors_at(file, i);
        if (strcmp(all[i].name, "mixprec.guard.states") != 0) continue;
        states = malloc(all[i].bytes);
        memcpy(states, all[i].data, all[i].bytes);
        for (int64_t k = 0; k < all[i].shape[0]; k++)
            states[k * all[i].shape[1] + 1] = states[k * all[i].shape[1] + 2] = count;
        all[i].data = states;
    }
    CHECK(states != NULL);
    CHECK_INT(mixp_safetensors_write(path, all, n, metadata, 2, error, sizeof error), MIXP_OK);
    mixp_safetensors_free(file);
    free(states);
    free(all);
}

/* No save writes more than 2^30: refused, and a site goes on with what it was. With as much as that
 * it falls once more, and its count stays a count. */
static void guard_counts_of_a_file(void) {
    mixp_context *ctx = context_of(NULL);
    mixp_tensor *w = matrix(ctx, "w", 4, 4);
    mixp_autocast region = { MIXP_F16, 1, NULL };
    int64_t shape[2] = { 4, 4 };
    mixp_guard_desc guard;
    mixp_checkpoint what;
    mixp_site_info site;
    char path[64];
    snprintf(path, sizeof path, "/tmp/mixprec_bad_%ld.st", (long)getpid());
    memset(&guard, 0, sizeof guard);
    memset(&what, 0, sizeof what);
    guard.every = 1;
    what.ctx = ctx;
    mixp_guard_start(ctx, &guard);
    for (int i = 0; i < 5; i++) {
        mixp_step_begin(ctx);
        if (i == 2) {
            CHECK_INT(mixp_checkpoint_save(path, &what), MIXP_OK);
            save_with_large_counts(path, INT32_MAX);
            CHECK_INT(mixp_checkpoint_load(path, &what), MIXP_ERR_FORMAT);
            mixp_context_clear_error(ctx);
            save_with_large_counts(path, 1 << 30);
            CHECK_INT(mixp_checkpoint_load(path, &what), MIXP_OK);
            mixp_step_begin(ctx);
        }
        mixp_autocast_open_with(ctx, &region);
        mixp_tensor *x = mixp_activation(ctx, MIXP_F16, 2, shape);
        mixp_fill(x, i < 2 ? 1 : 6e4);
        mixp_fill(w, i < 2 ? 0.1 : 10);
        mixp_linear(ctx, x, w, NULL);
        mixp_autocast_close(ctx, 0);
    }
    mixp_step_begin(ctx);
    CHECK_INT(mixp_site(ctx, 0, &site), 1);
    CHECK_INT(site.fallen, 1);
    CHECK_INT(site.falls, 1 << 30);
    CHECK(site.clean >= 0 && site.clean <= 5);
    remove(path);
    context_close(ctx);
}

/* The message names how many operators hold memory. It does not claim that mixp_step_begin was
 * forgotten, because a large model applies as many in one step. */
static void message_of_many_operators(void) {
    static const int64_t shape[1] = { 1000 };
    mixp_context *ctx = context_of(NULL);
    mixp_tensor  *w = mixp_param(ctx, "w", MIXP_F32, 1, shape);
    const char   *message;
    CHECK_INT(mixp_step_begin(ctx), MIXP_OK);
    for (int i = 0; i < 70; i++) CHECK(mixp_scale(ctx, w, 2.0f) != NULL);
    requests_left = 0;
    for (int i = 0; i < 10000 && mixp_scale(ctx, w, 2.0f); i++) continue;
    requests_left = -1;
    CHECK_INT(mixp_context_error(ctx, &message), MIXP_ERR_MEMORY);
    CHECK_TEXT(message, " operators were applied since mixp_step_begin: if they are of several steps");
    context_close(ctx);
}

/* mixp_nll of low log-probabilities takes memory for an f32 copy and for several results. */
static void nll_without_memory(void) {
    static const int64_t shape[2] = { 256, 512 };
    static mixp_bf16 x[256 * 512];
    static int32_t   targets[256];
    mixp_tensor *y = NULL;
    int at;
    for (at = 0; !y; at++) {
        mixp_context *ctx = context_of(NULL);
        CHECK_INT(mixp_step_begin(ctx), MIXP_OK);
        mixp_tensor *in = mixp_input(ctx, MIXP_BF16, 2, shape, x);
        mixp_tensor *ids = mixp_input(ctx, MIXP_I32, 1, shape, targets);
        requests_left = at;
        y = mixp_nll(ctx, in, ids, MIXP_IGNORE);
        requests_left = -1;
        CHECK_INT(mixp_context_error(ctx, NULL), y ? MIXP_OK : MIXP_ERR_MEMORY);
        CHECK_INT(mixp_autocast_current(ctx).level, 0);
        context_close(ctx);
    }
    CHECK(at > 1);
}

/* The first operator takes memory for the table of counts. Without it the operator has no result: a
 * result and an error at once would stop a program that is well. */
static void first_operator_without_memory(void) {
    static const int64_t shape[1] = { 4 };
    mixp_tensor *y = NULL;
    int at;
    for (at = 0; !y && at < 20; at++) {
        mixp_context *ctx = context_of(NULL);
        mixp_tensor *w = mixp_param(ctx, "w", MIXP_F32, 1, shape);
        requests_left = at;
        y = mixp_scale(ctx, w, 2.0f);
        requests_left = -1;
        CHECK_INT(mixp_context_error(ctx, NULL), y ? MIXP_OK : MIXP_ERR_MEMORY);
        context_close(ctx);
    }
    CHECK(y && at > 2);
}

/* --- weights and steps of a failed call ------------------------------------------------------ */

static float low_grad[4];

/* A bf16 weight "low" of 1, 2, 3 and 4, trained by SGD of rate 1. */
static mixp_tensor *low_weight(mixp_context *ctx, mixp_optimizer **opt) {
    static const float start[4] = { 1, 2, 3, 4 };
    static const int64_t shape[1] = { 4 };
    mixp_optimizer_desc sgd = mixp_sgd_defaults();
    mixp_tensor *low = mixp_param(ctx, "low", MIXP_BF16, 1, shape);
    sgd.lr = 1;
    *opt = mixp_optimizer_new(ctx, &sgd);
    mixp_write(low, start, MIXP_F32, 4);
    CHECK_INT(mixp_optimizer_add(*opt, low, mixp_view(ctx, "grad", MIXP_F32, 1, shape, low_grad)), MIXP_OK);
    return low;
}

/* A step that subtracts 1 / 4096 of each master, which no weight shows. Two ranks take their mean of a
 * gradient and of the other rank's, here 0. */
static void low_step(mixp_optimizer *opt, int ranks) {
    for (int i = 0; i < 4; i++) low_grad[i] = (float)ranks / 4096;
    CHECK_INT(mixp_optimizer_step(opt), MIXP_OK);
}

/* So many such steps have changed the masters. */
static void masters_are(const mixp_optimizer *opt, const mixp_tensor *low, int steps) {
    float master[4];
    CHECK_INT(mixp_optimizer_read(opt, low, MIXP_STATE_MASTER, master, 4), MIXP_OK);
    for (int i = 0; i < 4; i++) CHECK_NEAR(master[i], (float)(i + 1) - (float)steps / 4096, 0);
}

/* A written low weight needs memory for its master once: without it the step says so. */
static void written_weight_without_memory(void) {
    static const float same[4] = { 1, 2, 3, 4 };
    mixp_context *ctx = context_of(NULL);
    mixp_optimizer *opt;
    mixp_tensor *low = low_weight(ctx, &opt);
    CHECK_INT(mixp_write(low, same, MIXP_F32, 4), MIXP_OK);
    requests_left = 0;
    CHECK_INT(mixp_optimizer_step(opt), MIXP_ERR_MEMORY);
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_ERR_MEMORY);
    mixp_context_clear_error(ctx);
    low_step(opt, 1);
    masters_are(opt, low, 1);
    context_close(ctx);
}

/* Weights that come from a file or from another rank are the file's or that rank's in each digit,
 * wherever the run was before: masters keep none of their own. */
static void loaded_weights_have_their_digits(void) {
    const mixp_ranks_desc ranks = two_ranks();
    char path[64];
    snprintf(path, sizeof path, "/tmp/mixprec_bad_input_%ld.safetensors", (long)getpid());
    for (int way = 0; way < 4; way++) {
        mixp_ranks_desc own = ranks;
        mixp_optimizer *opt;
        mixp_checkpoint all;
        own.shard = 0;
        mixp_context *ctx = context_of(way == 3 ? &own : NULL);
        mixp_tensor *low = low_weight(ctx, &opt);
        memset(&all, 0, sizeof all);
        all.ctx = ctx;
        if (way == 1) CHECK_INT(mixp_checkpoint_save_weights(path, ctx), MIXP_OK);
        if (way == 2) CHECK_INT(mixp_checkpoint_save(path, &all), MIXP_OK);
        low_step(opt, way == 3 ? 2 : 1);
        masters_are(opt, low, 1);
        if (way == 1) CHECK_INT(mixp_checkpoint_load_weights(path, ctx, NULL), MIXP_OK);
        if (way == 2) CHECK_INT(mixp_checkpoint_load(path, &all), MIXP_OK);
        if (way == 3) CHECK_INT(mixp_ranks_from(ctx, 0), MIXP_OK);
        masters_are(opt, low, way ? 0 : 1);
        low_step(opt, way == 3 ? 2 : 1);
        masters_are(opt, low, way ? 1 : 2);
        CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
        context_close(ctx);
        remove(path);
    }
}

static int cable_is_cut;
static const char *cut_sum(void *user, void *data, int64_t count, mixp_dtype dtype, void *stream,
                           double seconds) {
    return cable_is_cut ? "the cable is cut" : same_sum(user, data, count, dtype, stream, seconds);
}

/* A step fails after it has found Inf in a buffer. The next step makes no Inf: it is applied. */
static void failed_step_of_a_bad_buffer(void) {
    static const int64_t shape[1] = { 4 };
    static const float bad[4] = { 1, INFINITY, 1, 1 }, good[4] = { 1, 2, 3, 4 };
    mixp_ranks_desc ranks = two_ranks();
    float held[4];
    ranks.shard = 0;
    ranks.sum = cut_sum;
    mixp_context *ctx = context_of(&ranks);
    mixp_scaler *scaler = mixp_scaler_new(ctx, NULL);
    mixp_optimizer *opt = mixp_optimizer_new(ctx, NULL);
    mixp_tensor *w = matrix(ctx, "w", 2, 2);
    mixp_tensor *h = mixp_buffer(ctx, "h", MIXP_F32, 1, shape);
    CHECK_INT(mixp_optimizer_add(opt, w, NULL), MIXP_OK);
    for (int fails = 1; fails >= 0; fails--) {
        mixp_step_begin(ctx);
        mixp_zero_grad(opt);
        CHECK_INT(mixp_backward(ctx, mixp_scaler_scale(scaler, mixp_sum(ctx, w, MIXP_ALL, 0))), MIXP_OK);
        CHECK_INT(mixp_copy(h, mixp_input(ctx, MIXP_F32, 1, shape, fails ? bad : good)), MIXP_OK);
        cable_is_cut = fails;
        CHECK_INT(mixp_scaler_step(scaler, opt), fails ? MIXP_ERR_RANKS : MIXP_OK);
        cable_is_cut = 0;
        mixp_context_clear_error(ctx);
    }
    CHECK_INT(mixp_scaler_update(scaler), MIXP_OK);
    CHECK_INT(mixp_scaler_verdict(scaler).outcome, MIXP_STEP_APPLIED);
    CHECK_INT(mixp_scaler_verdict(scaler).reason, MIXP_SKIP_NONE);
    CHECK_INT(mixp_read(h, held, MIXP_F32, 4), MIXP_OK);
    CHECK(memcmp(held, good, sizeof good) == 0);
    context_close(ctx);
}

int main(void) {
    RUN(sharded_and_late);
    RUN(sharded_and_failed);
    RUN(sharded_save_without_memory);
    RUN(sample_then_add);
    RUN(adding_fails_in_a_full_table);
    RUN(adding_fails_for_a_larger_matrix);
    RUN(muon_without_eps);
    RUN(slice_of_any_number);
    RUN(nll_without_memory);
    RUN(first_operator_without_memory);
    RUN(message_of_many_operators);
    RUN(cast_of_another_class);
    RUN(compare_of_a_bad_function);
    RUN(pinned_cast_of_the_first_step);
    RUN(guard_counts_of_a_file);
    RUN(written_weight_without_memory);
    RUN(loaded_weights_have_their_digits);
    RUN(failed_step_of_a_bad_buffer);
    return test_report();
}
