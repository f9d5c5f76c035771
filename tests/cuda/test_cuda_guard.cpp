/* test_cuda_guard.cpp - a guard on a GPU: the looking kernel gives the CPU's bits; and training
 * with a planted overflow, where the findings arrive two steps late.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "cuda_pair.h"
#include "examples/compare.h"

static bool quick(void) { return getenv("MIXPREC_TEST_QUICK") != NULL; }

/* --- the kernel ---------------------------------------------------------------------- */

static Pair zeros(int64_t n) {
    Pair p = empty(MIXP_I64, n, 0);
    for (int64_t i = 0; i < n; i++) set_code(p, i, 0);
    return p;
}

/* Powers of two from far below the smallest subnormal to Inf, with zeros and NaN. */
static Pair spread(mixp_dtype dtype, int64_t n, int off) {
    Pair p = empty(dtype, n, off);
    for (int64_t i = 0; i < n; i++) {
        uint64_t r = random_u64();
        double x = ldexp(1.0 + (double)(r >> 40) / 16777216.0, (int)(r % 170) - 150);
        if (r % 37 == 0) x = 0.0;
        if (r % 41 == 0) x = NAN;
        if (r % 43 == 0) x = INFINITY;
        set_value(p, i, r & 1024 ? -x : x);
    }
    return p;
}

/* Where rounding to `low` turns: halves of its smallest number, and their neighbours in f32. */
static void set_ties(Pair &p, mixp_dtype low) {
    const float half = (float)(0.5 * mixp_decode(low, 1));
    for (int i = 0; i < 12 && 3 * i < p.n; i++) {
        float tie = half * (float)(i / 3 + 1);
        float to[3] = { tie, nextafterf(tie, 0.0f), nextafterf(tie, INFINITY) };
        set_value(p, 3 * i, (double)to[i % 3]);
    }
}

static void look_body(void) {
    const mixp_dtype dtypes[3] = { MIXP_F32, MIXP_F16, MIXP_BF16 };
    const int64_t counts[6] = { 1, 7, 64, 1001, 65536, 65577 };
    const int64_t words = (int64_t)(sizeof(mixp_look) / 8);
    for (int d = 0; d < 3; d++)
        for (int c = 0; c < (d == 1 ? 6 : 4); c++) {
            Pair x = spread(dtypes[d], counts[c], c % 2), row = zeros(words), total = zeros(words);
            Pair bins = zeros(256);
            const mixp_dtype low = c == 1 ? MIXP_F8_E4M3 : c % 3 ? MIXP_F16 : MIXP_BF16;
            set_ties(x, low);
            for (int twice = 0; twice < 2; twice++) {       /* joins what is there */
                mixp_look_args k[2];
                for (on_gpu = 0; on_gpu < 2; on_gpu++) {
                    memset((void *)&k[on_gpu], 0, sizeof k[on_gpu]);
                    k[on_gpu].n = counts[c];
                    k[on_gpu].x.data = ON(x).data;
                    k[on_gpu].x.dtype = dtypes[d];
                    k[on_gpu].low = low;
                    k[on_gpu].row = AT(mixp_look, row);
                    k[on_gpu].total = twice ? AT(mixp_look, total) : NULL;
                    k[on_gpu].exponents = d == 2 ? NULL : AT(int64_t, bins);
                }
                BOTH(look(X, &k[on_gpu]));
            }
            WAIT();
            CHECK_INT(((mixp_look *)row.gpu)->count, 2 * counts[c]);
            same_bits(row);
            same_bits(total);
            same_bits(bins);
            finish(x);
            finish(row);
            finish(total);
            finish(bins);
        }
}
static void look(void) { in_all_schedules(look_body); }

/* A loss that is not finite is noted, and then a skip leaves the scale alone. */
static void forgive_body(void) {
    for (int bad = 0; bad < 3; bad++) {
        Pair loss = empty(MIXP_F32, 1, 0), y = empty(MIXP_F32, 1, 0);
        Pair factor = empty(MIXP_F32, 1, 0);
        Pair note = empty(MIXP_I32, 1, 0);
        int64_t words = (int64_t)(sizeof(mixp_scaler_state) / 4);
        Pair state = empty(MIXP_I32, words, 0);
        mixp_scale_by_args s[2];
        mixp_scaler_rule rule;
        mixp_advance_args a[2];
        set_value(loss, 0, bad == 2 ? NAN : bad ? INFINITY : 2.5);
        set_value(factor, 0, 1024.0);
        set_code(note, 0, 0);
        mixp_scaler_rule_resolve(NULL, &rule);
        for (int64_t i = 0; i < words; i++) set_code(state, i, 0);
        for (on_gpu = 0; on_gpu < 2; on_gpu++) {
            memset((void *)&s[on_gpu], 0, sizeof s[on_gpu]);
            s[on_gpu].n = 1;
            s[on_gpu].factor = AT(float, factor);
            s[on_gpu].a.data = ON(loss).data;
            s[on_gpu].y.data = ON(y).data;
            s[on_gpu].bad = AT(int32_t, note);
        }
        BOTH(scale_by(X, &s[on_gpu]));
        WAIT();
        CHECK_INT(*(int32_t *)note.gpu, bad != 0);
        same_bits(note);
        for (on_gpu = 0; on_gpu < 2; on_gpu++) {
            mixp_scaler_state *st = AT(mixp_scaler_state, state);
            st->scale = 1024.0f;
            st->hysteresis_left = 1;
            st->found_inf = 1;
            st->loss_bad = bad != 0;
            memset((void *)&a[on_gpu], 0, sizeof a[on_gpu]);
            a[on_gpu].rule = &rule;
            a[on_gpu].scaler = st;
            a[on_gpu].forgives = 1;
        }
        BOTH(advance(X, &a[on_gpu]));
        WAIT();
        CHECK_NEAR(((mixp_scaler_state *)state.gpu)->scale, bad ? 1024.0 : 512.0, 0);
        CHECK_INT(((mixp_scaler_state *)state.gpu)->skipped, 1);
        same_bits(state);
        finish(loss); finish(y); finish(factor); finish(note); finish(state);
    }
}
static void forgive(void) { in_all_schedules(forgive_body); }

/* The scale after each update of a sequence. b: a skip with a loss that is not finite; g: a skip for a
 * gradient; '.': no skip. A capital letter, or ':': a site has fallen back since. */
static void expect_scales(const char *what, int forgives, const double *scales) {
    int64_t words = (int64_t)(sizeof(mixp_scaler_state) / 4);
    Pair state = empty(MIXP_I32, words, 0);
    mixp_scaler_rule rule;
    mixp_advance_args a[2];
    mixp_scaler_rule_resolve(NULL, &rule);
    for (int64_t i = 0; i < words; i++) set_code(state, i, 0);
    for (on_gpu = 0; on_gpu < 2; on_gpu++) {
        AT(mixp_scaler_state, state)->scale = 1024.0f;
        AT(mixp_scaler_state, state)->hysteresis_left = 1;
    }
    for (int i = 0, falls = 0; what[i]; i++) {
        const char step = what[i];
        falls += step == 'B' || step == 'G' || step == ':';
        for (on_gpu = 0; on_gpu < 2; on_gpu++) {
            mixp_scaler_state *st = AT(mixp_scaler_state, state);
            st->loss_bad = step == 'b' || step == 'B';
            st->found_inf = st->loss_bad || step == 'g' || step == 'G';
            memset((void *)&a[on_gpu], 0, sizeof a[on_gpu]);
            a[on_gpu].rule = &rule;
            a[on_gpu].scaler = st;
            a[on_gpu].forgives = forgives;
            a[on_gpu].falls = falls;
        }
        BOTH(advance(X, &a[on_gpu]));
        WAIT();
        CHECK_NEAR(((mixp_scaler_state *)state.gpu)->scale, scales[i], 0);
        same_bits(state);
    }
    finish(state);
}

/* One skip in a row is forgiven; after a fallback, one more. */
static void forgiven_in_a_row_body(void) {
    const double row[7] = { 1024, 512, 256, 128, 128, 128, 64 }, falls[5] = { 1024, 512, 512, 256, 256 };
    const double unguarded[4] = { 512, 256, 128, 128 }, mixed[4] = { 1024, 512, 256, 256 };
    expect_scales("bbbb.bb", 1, row);
    expect_scales("bbBb:", 1, falls);
    expect_scales("bbB.", 0, unguarded);
    expect_scales("bgb.", 1, mixed);
}
static void forgiven_in_a_row(void) { in_all_schedules(forgiven_in_a_row_body); }

/* --- training ------------------------------------------------------------------------ */

enum { ROWS = 4, WIDTH = 8, HIDDEN = 16, CLASSES = 5 };

struct Net {
    mixp_context   *ctx;
    mixp_scaler    *scaler;
    mixp_optimizer *opt;
    mixp_tensor    *fc, *proj, *ln, *head;
    float           x[ROWS * WIDTH];
    int32_t         ids[ROWS];
};

static mixp_tensor *param(Net &n, const char *name, int rows, int cols, double value, int normal) {
    int64_t shape[2] = { rows, cols };
    mixp_tensor *t = mixp_param(n.ctx, name, MIXP_F32, cols ? 2 : 1, shape);
    if (normal) mixp_init_normal(t, 0.0, value);
    else mixp_fill(t, value);
    mixp_optimizer_add(n.opt, t, NULL);
    return t;
}

static Net net_open(const mixp_device *device) {
    mixp_context_desc c;
    mixp_optimizer_desc sgd = mixp_sgd_defaults();
    mixp_scaler_desc d;
    Net n;
    memset((void *)&c, 0, sizeof c);
    memset((void *)&d, 0, sizeof d);
    memset((void *)&n, 0, sizeof n);
    c.device = device;
    c.threads = 1;
    d.init_scale = 16.0f;
    sgd.lr = 0.01;
    n.ctx = mixp_context_new(&c);
    n.scaler = mixp_scaler_new(n.ctx, &d);
    n.opt = mixp_optimizer_new(n.ctx, &sgd);
    n.fc = param(n, "fc.w", HIDDEN, WIDTH, 1.0, 0);
    n.proj = param(n, "proj.w", WIDTH, HIDDEN, 1.0, 1);
    n.ln = param(n, "ln.w", WIDTH, 0, 1.0, 0);
    n.head = param(n, "head.w", CLASSES, WIDTH, 0.3, 1);
    for (int i = 0; i < ROWS * WIDTH; i++) n.x[i] = (float)((i * 7) % 5) - 1.0f;
    for (int i = 0; i < ROWS; i++) n.ids[i] = i;
    return n;
}

/* The product of proj passes 65504 once x is multiplied by 4000. */
static double net_step(Net &n, int read) {
    const int64_t shape[2] = { ROWS, WIDTH }, ids[1] = { ROWS };
    mixp_context *ctx = n.ctx;
    mixp_tensor *loss = NULL, *x, *y, *targets;
    mixp_step_begin(ctx);
    mixp_zero_grad(n.opt);
    MIXP_AUTOCAST(ctx, MIXP_F16) {
        x = mixp_input(ctx, MIXP_F32, 2, shape, n.x);
        targets = mixp_input(ctx, MIXP_I32, 1, ids, n.ids);
        y = mixp_linear(ctx, mixp_relu(ctx, mixp_linear(ctx, x, n.fc, NULL)), n.proj, NULL);
        y = mixp_layer_norm(ctx, mixp_add(ctx, x, y), n.ln, NULL, 1e-5f);
        loss = mixp_cross_entropy(ctx, mixp_linear(ctx, y, n.head, NULL), targets, -100);
    }
    mixp_backward(ctx, mixp_scaler_scale(n.scaler, loss));
    mixp_scaler_step(n.scaler, n.opt);
    mixp_scaler_update(n.scaler);
    return read ? mixp_item(loss) : 0.0;
}

static void net_close(Net &n) {
    const char *why = "";
    CHECK_INT(mixp_context_error(n.ctx, &why), MIXP_OK);
    if (*why) printf("  %s\n", why);
    mixp_context_free(n.ctx);
}

static mixp_site_info site_of(const Net &n, const char *name) {
    mixp_site_info s;
    for (int i = 0; mixp_site(n.ctx, i, &s); i++)
        if (strcmp(s.name, name) == 0) return s;
    memset((void *)&s, 0, sizeof s);
    CHECK(!"such a site");
    return s;
}

static const mixp_device *gpu(void) { return mixp_cuda(0, NULL); }

/* With a retry, which waits, a GPU decides when the CPU does. */
static void a_retry_settles_at_once(void) {
    Net n[2] = { net_open(mixp_cpu()), net_open(gpu()) };
    for (int k = 0; k < 2; k++) CHECK_INT(mixp_guard_start(n[k].ctx, NULL), MIXP_OK);
    for (int step = 0; step < 8; step++) {
        double loss[2] = { 0, 0 };
        int tries[2] = { 0, 0 };
        for (int k = 0; k < 2; k++) {
            if (step == 3)
                for (int i = 0; i < ROWS * WIDTH; i++) n[k].x[i] *= 4000.0f;
            do {
                loss[k] = net_step(n[k], 1);
                tries[k]++;
            } while (mixp_retry(n[k].scaler, 3));
        }
        CHECK_INT(tries[1], tries[0]);
        CHECK_NEAR(loss[1], loss[0], 2e-3);
    }
    for (int i = 0;; i++) {
        mixp_event a, b;
        int more = mixp_guard_event(n[0].ctx, i, &a);
        CHECK_INT(mixp_guard_event(n[1].ctx, i, &b), more);
        if (!more) { CHECK(i >= 2); break; }
        CHECK_TEXT(b.site, a.site);
        CHECK_INT(b.kind, a.kind);
        CHECK_INT(b.step, a.step);
    }
    CHECK_INT(site_of(n[1], "proj.w: linear").fallen, 1);
    CHECK_NEAR(mixp_scaler_loss_scale(n[1].scaler), 16.0, 0);
    net_close(n[0]);
    net_close(n[1]);
    CHECK_INT(cudasim::leaks(), 0);
}

/* Without one, no step waits for the device but for a copy of two steps ago, and for its own after a
 * skip. Twice the same run falls back in the same step. */
static void what_was_found_arrives_late(void) {
    int fell[2] = { 0, 0 };
    for (int run = 0; run < 2; run++) {
        Net n = net_open(gpu());
        mixp_guard_desc d;
        cudasim::Count before = cudasim::count;
        memset((void *)&d, 0, sizeof d);
        d.every = 4;
        CHECK_INT(mixp_guard_start(n.ctx, &d), MIXP_OK);
        for (int i = 0; i < 6; i++) net_step(n, 0);
        for (int i = 0; i < ROWS * WIDTH; i++) n.x[i] *= 4000.0f;
        for (int i = 0; i < 14; i++) {
            mixp_event e;
            if (i == 9) before = cudasim::count;    /* new products were prepared before */
            net_step(n, 0);
            for (int k = 0; !fell[run] && mixp_guard_event(n.ctx, k, &e); k++)
                if (e.kind == MIXP_EVENT_OVERFLOW) fell[run] = i + 1;
        }
        CHECK_INT(cudasim::count.resources, before.resources);
        CHECK(fell[run] > 0);
        CHECK_INT(site_of(n, "proj.w: linear").dtype, MIXP_F32);
        CHECK_INT(mixp_scaler_verdict(n.scaler).outcome, MIXP_STEP_APPLIED);
        CHECK_NEAR(mixp_scaler_loss_scale(n.scaler), 8.0, 0);
        net_close(n);
    }
    CHECK_INT(fell[0], fell[1]);
    CHECK_INT(cudasim::leaks(), 0);
}

/* Bad data, for which no site falls back: the scale falls from the second skip on, and events are those
 * of the CPU. The newest may still be on its way. */
static void bad_data_lowers_the_scale(void) {
    Net n[2] = { net_open(mixp_cpu()), net_open(gpu()) };
    for (int k = 0; k < 2; k++) CHECK_INT(mixp_guard_start(n[k].ctx, NULL), MIXP_OK);
    for (int i = 0; i < 16; i++)
        for (int k = 0; k < 2; k++) {
            if (i == 5) n[k].x[3] = INFINITY;
            if (i == 11) n[k].x[3] = 1.0f;
            net_step(n[k], 0);
            if (i == 10) CHECK_NEAR(mixp_scaler_loss_scale(n[k].scaler), ldexp(16.0, -5), 0);
        }
    for (int k = 0; k < 2; k++) {
        mixp_event e;
        int events = 0;
        for (; mixp_guard_event(n[k].ctx, events, &e); events++) {
            CHECK_INT(e.kind, MIXP_EVENT_SKIP);
            CHECK_INT(e.step, 6 + events);
        }
        CHECK_INT(events, 6);
        net_close(n[k]);
    }
    CHECK_INT(cudasim::leaks(), 0);
}

/* The host learns of the first skip after the second, and samples the third: the second lowers the scale. */
static void a_late_fallback_finds_a_lower_scale(void) {
    for (int before = 5; before < 12; before++) {
        Net n = net_open(gpu());
        CHECK_INT(mixp_guard_start(n.ctx, NULL), MIXP_OK);
        for (int i = 0; i < before; i++) net_step(n, 0);
        for (int i = 0; i < ROWS * WIDTH; i++) n.x[i] *= 4000.0f;
        for (int i = 0; i < 12; i++) net_step(n, 0);
        int64_t skipped = mixp_scaler_verdict(n.scaler).skipped;
        CHECK_INT(skipped, 3);
        CHECK_NEAR(mixp_scaler_loss_scale(n.scaler), 8.0, 0);
        CHECK_INT(site_of(n, "proj.w: linear").fallen, 1);
        net_close(n);
    }
    CHECK_INT(cudasim::leaks(), 0);
}

/* A recorded step is stale once a site has fallen back; the guard says when it wants to look. */
static void graphs(void) {
    Net n = net_open(gpu());
    mixp_guard_desc d;
    memset((void *)&d, 0, sizeof d);
    d.every = 5;
    CHECK_INT(mixp_guard_start(n.ctx, &d), MIXP_OK);
    for (int i = 0; i < 3; i++) net_step(n, 0);
    CHECK_INT(mixp_capture_begin(n.ctx), MIXP_OK);
    net_step(n, 0);
    mixp_graph *graph = mixp_capture_end(n.ctx);
    CHECK(graph != NULL);
    if (!graph) { net_close(n); return; }
    CHECK_INT(mixp_graph_stale(graph), 0);
    CHECK_INT(mixp_guard_due(n.ctx), 0);
    CHECK_INT(mixp_replay(graph), MIXP_OK);
    CHECK_INT(mixp_replay(graph), MIXP_OK);
    CHECK_INT(mixp_guard_due(n.ctx), 1);
    for (int i = 0; i < ROWS * WIDTH; i++) n.x[i] *= 4000.0f;
    net_step(n, 0);
    CHECK_INT(mixp_retry(n.scaler, 2), 1);
    CHECK_INT(mixp_graph_stale(graph), 1);
    net_step(n, 0);
    CHECK_INT(mixp_retry(n.scaler, 2), 0);
    CHECK_INT(mixp_scaler_verdict(n.scaler).outcome, MIXP_STEP_APPLIED);
    CHECK_INT(mixp_capture_begin(n.ctx), MIXP_OK);
    net_step(n, 0);
    graph = mixp_capture_end(n.ctx);
    CHECK_INT(mixp_graph_stale(graph), 0);
    CHECK_INT(mixp_replay(graph), MIXP_OK);
    net_close(n);
    CHECK_INT(cudasim::leaks(), 0);
}

/* Updates after values left their range until the site stores f32: steps one by one, or replays wherever
 * the guard allows them. */
static int updates_until_fallen(int replays, int before, int every) {
    Net n = net_open(gpu());
    mixp_guard_desc d;
    mixp_graph *graph = NULL;
    int updates = 0;
    memset((void *)&d, 0, sizeof d);
    d.every = every;
    CHECK_INT(mixp_guard_start(n.ctx, &d), MIXP_OK);
    for (int i = 0; i < 4; i++) net_step(n, 0);
    CHECK_INT(mixp_capture_begin(n.ctx), MIXP_OK);
    net_step(n, 0);
    graph = mixp_capture_end(n.ctx);
    CHECK(graph != NULL);
    for (int i = 0; i < before; i++) net_step(n, 0);
    for (int i = 0; i < ROWS * WIDTH; i++) n.x[i] *= 4000.0f;
    for (; updates < 100 && !mixp_graph_stale(graph); updates++) {
        if (replays && !mixp_guard_due(n.ctx)) CHECK_INT(mixp_replay(graph), MIXP_OK);
        else net_step(n, 0);
    }
    CHECK_INT(site_of(n, "proj.w: linear").fallen, 1);
    net_step(n, 0);
    net_step(n, 0);
    CHECK_INT(mixp_scaler_verdict(n.scaler).outcome, MIXP_STEP_APPLIED);
    net_close(n);
    return updates;
}

/* One by one, a skip forces the next sample. A replay tells the host nothing: the guard learns of its
 * skips at the next sample on schedule, at most a quarter more than `every` updates later. */
static void replays_are_learned_of_late(void) {
    const int every = 16, late = 4;     /* late: from a sample's step to the fallback */
    for (int before = 0; before < 16; before += quick() ? 9 : 3) {
        const int eager = updates_until_fallen(0, before, every);
        const int replayed = updates_until_fallen(1, before, every);
        CHECK(eager <= 2 + late);
        CHECK(replayed >= eager - 2 && replayed <= every + every / 4 + late);
    }
    CHECK_INT(cudasim::leaks(), 0);
}

/* A captured step has not run: the sample of the update after it still counts as complete, so that
 * the guard does not ask for the same sample again. */
static void a_capture_spoils_no_sample(void) {
    for (int captures = 0; captures < 2; captures++) {
        Net n = net_open(gpu());
        mixp_guard_desc d;
        memset((void *)&d, 0, sizeof d);
        d.every = 3;
        CHECK_INT(mixp_guard_start(n.ctx, &d), MIXP_OK);
        do net_step(n, 0); while (!mixp_guard_due(n.ctx));
        for (int i = 0; i < captures; i++) {
            CHECK_INT(mixp_capture_begin(n.ctx), MIXP_OK);
            net_step(n, 0);
            CHECK(mixp_capture_end(n.ctx) != NULL);
        }
        CHECK_INT(mixp_guard_due(n.ctx), 1);
        net_step(n, 0);
        CHECK_INT(mixp_guard_due(n.ctx), 0);
        net_close(n);
    }
    CHECK_INT(cudasim::leaks(), 0);
}

/* Rows grow at the first look at a new site, while kernels that write the old rows are on their way, and
 * never in a captured step, whose sites get rows at the next sample. */
enum { LINKS = 70 };
static double factor(int i) { return i % 10 < 5 ? 2.0 : 0.5; }
static void chain_step(Net &n, int links) {
    mixp_tensor *y = n.ln;
    mixp_step_begin(n.ctx);
    mixp_zero_grad(n.opt);
    for (int i = 0; i < links; i++) y = mixp_scale(n.ctx, y, (float)factor(i));
    mixp_backward(n.ctx, mixp_sum(n.ctx, y, MIXP_ALL, 0));
}
/* Each link's values, powers of 2, in the bin of their exponent: the sample's steps are alike. */
static void check_counts(const mixp_exponents *counted, mixp_context *ctx) {
    static int64_t counts[MIXP_EXPONENTS];
    mixp_site_info s;
    double value = 1.0;
    int link = 0;
    for (int i = 0; link < LINKS && mixp_site(ctx, i, &s); i++) {
        if (strcmp(s.op, "scale") != 0) continue;
        value *= factor(link++);
        CHECK_INT(mixp_site_exponents(counted, i, counts), 1);
        CHECK(counts[127 + ilogb(value)] > 0);
        counts[127 + ilogb(value)] = 0;
        for (int e = 0; e < MIXP_EXPONENTS; e++) CHECK_INT(counts[e], 0);
    }
}

static void rows_grow(void) {
    Net n = net_open(gpu());
    mixp_guard_desc d;
    mixp_site_info s;
    double before = 1.0, after = 1.0;
    int link = 0;
    memset((void *)&d, 0, sizeof d);
    d.every = 1;
    CHECK_INT(mixp_guard_start(n.ctx, &d), MIXP_OK);
    mixp_exponents *counted = mixp_exponents_new(n.ctx);
    CHECK(counted != NULL);
    chain_step(n, 5);
    chain_step(n, 20);
    CHECK_INT(mixp_capture_begin(n.ctx), MIXP_OK);
    chain_step(n, 40);
    mixp_graph *graph = mixp_capture_end(n.ctx);
    CHECK(graph != NULL);
    if (graph) CHECK_INT(mixp_replay(graph), MIXP_OK);
    for (int i = 0; i < 70; i++)        /* a window of 64 steps without an update ends */
        chain_step(n, quick() && i < 60 ? 5 : LINKS);
    for (int i = 0; i < LINKS; i++) after *= factor(i);
    for (int i = 0; link < LINKS && mixp_site(n.ctx, i, &s); i++) {
        if (strcmp(s.op, "scale") != 0) continue;
        before *= factor(link);
        after /= factor(link++);
        CHECK_NEAR(s.value.largest, before, 0);
        CHECK_INT(s.value.count % WIDTH, 0);
        CHECK_NEAR(s.grad.largest, after, 0);
    }
    CHECK_INT(link, LINKS);
    check_counts(counted, n.ctx);
    mixp_exponents_free(counted);
    net_close(n);
    CHECK_INT(cudasim::leaks(), 0);
}

int main(void) {
    cudasim::processors = 2;
    RUN(look);
    RUN(forgive);
    RUN(forgiven_in_a_row);
    RUN(bad_data_lowers_the_scale);
    RUN_LATER(a_late_fallback_finds_a_lower_scale);
    RUN(a_retry_settles_at_once);
    RUN(what_was_found_arrives_late);
    RUN(graphs);
    RUN(a_capture_spoils_no_sample);
    RUN(rows_grow);
    RUN_LATER(replays_are_learned_of_late);
    return test_report();
}
