/* differ.h - ranks that differ, hooks that fail and wrong descriptions are refused.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
/* --- ranks that differ ------------------------------------------------------------------------ */

static void differs(int odd, int size, mixp_result code, const char *what, const char *where) {
    plan p = plan_of(4);
    p.odd = odd;
    result *got = run(&p, size);
    for (int r = 0; r < size; r++) {
        CHECK_INT(got[r].done, 1);
        if (odd == ODD_LEAVES_EARLY && r == 1) continue;
        if (odd == ODD_FAILS && r == 1) code = MIXP_ERR_ARGUMENT;
        CHECK_INT(got[r].code, code);
        CHECK_TEXT(got[r].text, what);
        CHECK_TEXT(got[r].text, where);
        if (odd == ODD_FAILS && r == 1) code = MIXP_ERR_RANKS;
    }
}

static void refused_at_the_start(void) {
    differs(ODD_SIZE, 2, MIXP_ERR_RANKS, "the sum of a table: ranks request different operations", "");
    differs(ODD_SEED, 2, MIXP_ERR_RANKS, "seed is 5 on rank 0", "6 on rank 1");
    differs(ODD_MEAN, 4, MIXP_ERR_RANKS, "mean is 0 on rank 0", "2 on rank 1");
    differs(ODD_VALUE, 2, MIXP_ERR_RANKS, "'up.bias' f32 [48], values", "on rank 1");
    differs(ODD_NAME, 2, MIXP_ERR_RANKS, "'gain' f32 [24]", "'profit' f32 [24]");
    differs(ODD_DTYPE, 2, MIXP_ERR_RANKS, "ranks differ: gradient", "on rank 1");
    differs(ODD_SHAPE, 2, MIXP_ERR_RANKS, "'down' f32 [11, 48]", "'down' f32 [12, 48]");
}

static void refused_later(void) {
    differs(ODD_RATE, 2, MIXP_ERR_RANKS, "ranks differ: the learning rate is 0.01 on rank 0 and 0.02 on rank 1; "
            "the step was skipped", "");
    differs(ODD_FAILS, 2, MIXP_ERR_RANKS, "scaler_scale: input 0 is NULL", "");
    differs(ODD_LEAVES_EARLY, 2, MIXP_ERR_RANKS, "rank 0 of 2, the sum of a table: rank 1 is gone", "");
}

/* Two ranks with all that asks something of hooks, a save to path too. */
static plan plan_of_hooks(const char *path) {
    plan p = plan_of(2);
    p.shard = 1;
    p.guard = 2;
    p.bucket = 20000;
    p.checkpoint = path;
    return p;
}

/* Whichever call of a hook fails, and in whatever: both ranks end with an error, soon, and say where. */
static void any_hook_fails(void) {
    static const char *const sites[] = {"the sum of a table", "the sum of gradients",
        "the scattered sum of a gradient", "the wait for gradients", "the sum of the ranks' results",
        "the gather of weights", "the sum of states", "mixp_ranks_sum"};
    enum { SITES = sizeof sites / sizeof *sites };
    int seen[SITES] = {0}, way, i, calls;
    char path[64];
    snprintf(path, sizeof path, "ranks.cut.%d.tmp", (int)getpid());
    plan p = plan_of_hooks(path);
    for (way = 0; way < 3; way++) {
        p.scatter = way;
        p.cut_at = 1 << 20;
        remove(path);
        result *got = run(&p, 2);
        CHECK_TEXT(got[1].code ? got[1].text : "fine", "fine");
        calls = got[1].calls;
        CHECK(calls > 20);
        /* Hooks that begin sums ask for all else, too. */
        for (p.cut_at = 1; p.cut_at <= calls; p.cut_at += way == 2 ? 1 : 3) {
            remove(path);
            got = run(&p, 2);
            CHECK_INT(got[0].code, MIXP_ERR_RANKS);
            CHECK_INT(got[1].code, MIXP_ERR_RANKS);
            CHECK_TEXT(got[0].text, "rank 1 stopped: rank 1 of 2, ");
            CHECK_TEXT(got[1].text, "the cable is cut");
            for (i = 0; i < SITES; i++) seen[i] |= strstr(got[1].text, sites[i]) != NULL;
        }
    }
    remove(path);
    for (i = 0; i < SITES; i++) CHECK_TEXT(seen[i] ? sites[i] : "never seen", sites[i]);
}

/* A rank that is killed at whichever call: the other hears that it is gone, and ends as failed. */
static void dies_at_any_call(void) {
    char path[64];
    snprintf(path, sizeof path, "ranks.dies.%d.tmp", (int)getpid());
    plan p = plan_of_hooks(path);
    for (int way = 0; way < 3; way++) {
        p.scatter = way;
        p.cut_at = 1 << 20;
        p.cut_kills = 0;
        remove(path);
        int calls = run(&p, 2)[1].calls;
        CHECK(calls > 20);
        p.cut_kills = 1;
        for (p.cut_at = 1 + way; p.cut_at <= calls; p.cut_at += 4) {
            result *got = results();
            int status = 0;
            remove(path);
            CHECK(waitpid(start(&p, 2, got), &status, 0) > 0);
            CHECK(WIFEXITED(status));
            CHECK_INT(WEXITSTATUS(status), 1);
            CHECK_INT(got[0].code, MIXP_ERR_RANKS);
            CHECK_TEXT(got[0].text, "rank 1 is gone");
            CHECK_INT(got[1].done, 0);
        }
    }
    remove(path);
}

static void late_rank(void) {
    plan p = plan_of(4);
    p.odd = ODD_SLEEPS;
    p.patience = 0.4;
    result *got = run(&p, 2);
    CHECK_INT(got[0].code, MIXP_ERR_RANKS);
    CHECK_TEXT(got[0].text, "rank 0 of 2, the sum of a table: rank 1 did not answer in time");
    CHECK_TEXT(got[1].text, "rank 1 of 2, the sum of a table: rank 1 did not answer in time");
    p.patience = 0;
    got = run(&p, 2);
    CHECK_INT(got[0].code, MIXP_OK);
    CHECK_INT(got[1].step, 3);
}

/* --- a description that is wrong --------------------------------------------------------------- */

static const char *no_wait(void *user, void *stream, double seconds)
{ (void)user, (void)stream, (void)seconds; return NULL; }

static void refused(const mixp_ranks_desc *ranks, const char *what) {
    mixp_context_desc d;
    const char *why = NULL;
    memset(&d, 0, sizeof d);
    d.ranks = ranks;
    d.why = &why;
    CHECK(mixp_context_new(&d) == NULL);
    CHECK_TEXT(why, what);
}

static void descriptions(void) {
    mixp_ranks_desc good, d;
    memset(&good, 0, sizeof good);
    good.size = 2;
    good.sum = no_hook;
    d = good; d.size = 0;           refused(&d, "size is below 1");
    d = good; d.rank = 2;           refused(&d, "rank must lie in [0, size)");
    d = good; d.rank = -1;          refused(&d, "rank must lie in [0, size)");
    d = good; d.sum = NULL;         refused(&d, "sum is missing");
    d = good; d.grad_ready = no_hook; refused(&d, "both or neither");
    d = good; d.grad_wait = no_wait; refused(&d, "both or neither");
    d = good; d.seconds = -1;       refused(&d, "seconds");
    d = good; d.seconds = NAN;      refused(&d, "seconds");
    d = good; d.bucket_bytes = -1;  refused(&d, "bucket_bytes");
    d = good; d.parts = -1;         refused(&d, "parts");
    d = good; d.shard = 1;          refused(&d, "shard needs all_gather");
    d = good; d.mean = (mixp_ranks_mean)3; refused(&d, "mean");
    d = good; d.scatter_ready = no_hook; refused(&d, "scatter_ready needs grad_wait");
    d = good; d.scatter = 1;        refused(&d, "scatter needs shard");
    d.shard = 1; d.all_gather = no_hook; refused(&d, "scatter needs reduce_scatter");
}

static void failing_hook(void) {
    plan p = plan_of(1);
    mixp_ranks_desc d;
    const char *text;
    model m;
    memset(&d, 0, sizeof d);
    d.size = 2;
    d.rank = 1;
    d.sum = no_hook;
    model_open(&m, &p, &d, ODD_NOT);
    model_add(&m);
    mixp_step_begin(m.ctx);
    CHECK_INT(mixp_backward(m.ctx, model_loss(&m, 0, 0, 4)), MIXP_ERR_RANKS);
    CHECK_INT(mixp_context_error(m.ctx, &text), MIXP_ERR_RANKS);
    CHECK_TEXT(text, "rank 1 of 2, the sum of a table: the cable is cut");
    CHECK(m.p[0]->grad == NULL);
    mixp_context_clear_error(m.ctx);
    CHECK_INT(mixp_ranks_max(m.p[0]), MIXP_ERR_RANKS);
    CHECK_INT(mixp_context_error(m.ctx, &text), MIXP_ERR_RANKS);
    CHECK_TEXT(text, "lacks this hook");
    mixp_context_free(m.ctx);
}

/* The same of gradients that are the program's: the weights are as they were. */
static void failing_view(void) {
    const int64_t shape[1] = {2};
    float w[2] = {1, 2}, g[2] = {3, 4};
    mixp_ranks_desc ranks;
    mixp_context_desc d;
    const char *text;
    memset(&ranks, 0, sizeof ranks);
    memset(&d, 0, sizeof d);
    ranks.size = 2;
    ranks.sum = no_hook;
    d.ranks = &ranks;
    mixp_context *ctx = mixp_context_new(&d);
    mixp_optimizer *opt = new_sgd(ctx);
    mixp_optimizer_add(opt, mixp_view(ctx, "w", MIXP_F32, 1, shape, w), mixp_view(ctx, "g", MIXP_F32, 1, shape, g));
    CHECK_INT(mixp_optimizer_step(opt), MIXP_ERR_RANKS);
    CHECK_INT(mixp_context_error(ctx, &text), MIXP_ERR_RANKS);
    CHECK_TEXT(text, "rank 0 of 2, the sum of a view: the cable is cut");
    CHECK(w[0] == 1 && w[1] == 2);
    mixp_context_free(ctx);
}
