/* long_worlds.c - random worlds of 2 and 3 ranks, over shared memory and over sockets: all ranks end with
 * the same weights, both transports with the same ones, and one rank that takes all batches as well.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * A world is random in its parameters, their dtypes and uses on each rank, in buckets, sharding, dtype in
 * transit, micro-batches, optimizers, guard, and in batches that overflow. It runs once over ddp_fork, once
 * over ddp_tcp, and, where mixprec promises the same bits, once in one process with `apart`.
 * MIXPREC_SEED=N repeats a run, whose seed is printed. It ends after SECONDS seconds.
 */
#define _POSIX_C_SOURCE 200809L
#include "mixprec.h"
#include "../../examples/ddp_fork.c"
#include "../../examples/ddp_tcp.c"
#include "test.h"
#include "leave.h"

enum { SECONDS = 40, WORLDS = 1000, HANGS = 60, MOST_RANKS = 3, MOST_LAYERS = 6, MOST_SIDE = 48, ROWS = 4 };
static const double patience = 20;

/* ==== Worlds ======================================================================== */

static uint64_t drawn;          /* state of the generator */
static uint64_t mixed(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}
static int draw(int n) { return (int)(mixed(drawn += 0x9E3779B97F4A7C15u) % (uint64_t)n); }

enum { ADAMW, SGD, LION, TWO, OPTIMIZERS };     /* TWO: AdamW and SGD, with every second parameter each */
typedef enum layer_kind { SQUARE, PAIR, TIED, LAYER_KINDS } layer_kind;

typedef struct world {
    uint64_t seed;
    int      size, side, layers, steps, batches, optimizer, moments, clips, guard, often_unused, bad_every;
    layer_kind kind[MOST_LAYERS];
    int      wide[MOST_LAYERS], has_bias[MOST_LAYERS], is_low[MOST_LAYERS];
    mixp_dtype dtype;           /* of the autocast region, and of low weights */
    float    scale;
    int      is_promised;       /* 1: one rank that takes all batches has the same bits */
    mixp_ranks_desc ranks;      /* options without hooks */
} world;

static void draw_ranks(mixp_ranks_desc *d) {
    static const int64_t buckets[] = { 0, 1, 300, 2000, 9000 };
    d->bucket_bytes = buckets[draw(5)];
    d->mean = (mixp_ranks_mean)draw(3);
    d->low_sums = draw(4) == 0;
    d->wire = draw(4) ? MIXP_F32 : MIXP_BF16;
    d->apart = draw(3) == 0;
    d->shard = draw(2);
    d->scatter = d->shard && draw(2);
    d->check_every = draw(2) ? 1 : -1;
}

static world draw_world(uint64_t seed) {
    static const mixp_dtype dtypes[] = { MIXP_F32, MIXP_F16, MIXP_BF16 };
    world w;
    memset(&w, 0, sizeof w);
    drawn = w.seed = seed;
    w.size = 2 + draw(2);
    w.side = 1 + draw(MOST_SIDE);
    w.layers = 1 + draw(MOST_LAYERS);
    w.steps = 3 + draw(6);
    w.batches = 1 + draw(3);
    w.optimizer = draw(OPTIMIZERS);
    w.moments = draw(3);
    w.clips = draw(2);
    w.guard = draw(3) == 0;
    w.often_unused = draw(3);
    w.bad_every = draw(2) ? 0 : 3;
    w.dtype = dtypes[draw(3)];
    w.scale = draw(2) ? 1024.0f : 1e30f;
    for (int i = 0; i < w.layers; i++) {
        w.kind[i] = (layer_kind)draw(i ? LAYER_KINDS : TIED);
        w.wide[i] = 1 + draw(2 * MOST_SIDE);
        w.has_bias[i] = draw(2);
        w.is_low[i] = draw(2);
    }
    w.has_bias[0] |= w.optimizer == TWO;        /* then each has a parameter that all ranks use */
    draw_ranks(&w.ranks);
    w.is_promised = w.batches == 1 && !w.guard && w.ranks.wire == MIXP_F32 && !w.ranks.low_sums &&
                    !(w.ranks.scatter && w.clips);
    return w;
}

/* ==== A rank ======================================================================== */

typedef struct outcome {        /* of a rank, in memory that all share */
    mixp_result code;
    char        text[340];
    uint64_t    before, after;  /* hashes of all weights */
    int         ended, applied, skipped;
} outcome;

typedef struct net {
    const world    *w;
    int             rank, n_all;
    mixp_context   *ctx;
    mixp_tensor    *up[MOST_LAYERS], *down[MOST_LAYERS], *bias[MOST_LAYERS], *all[3 * MOST_LAYERS];
    mixp_optimizer *opt[2];     /* opt[1]: NULL, or has every second parameter */
    mixp_scaler    *scaler;
} net;

static mixp_tensor *net_param(net *n, mixp_dtype dtype, int rows, int cols) {
    char    name[24];
    int64_t shape[2];
    shape[0] = rows;
    shape[1] = cols;
    sprintf(name, "p%d", n->n_all);
    mixp_tensor *t = mixp_param(n->ctx, name, dtype, cols ? 2 : 1, shape);
    mixp_init_normal(t, 0, 0.4);
    return n->all[n->n_all++] = t;
}

static void net_layer(net *n, int i) {
    const world *w = n->w;
    const mixp_dtype dtype = w->is_low[i] ? w->dtype : MIXP_F32;
    const int wide = w->kind[i] == PAIR ? w->wide[i] : w->side;
    if (w->kind[i] == TIED) n->up[i] = n->up[0];
    else n->up[i] = net_param(n, dtype, wide, w->side);
    if (w->kind[i] == PAIR) n->down[i] = net_param(n, dtype, w->side, wide);
    if (w->kind[i] == TIED && w->kind[0] == PAIR) n->down[i] = n->down[0];
    if (w->has_bias[i]) n->bias[i] = net_param(n, MIXP_F32, w->side, 0);
}

static mixp_optimizer *net_optimizer(const net *n, int second) {
    static const mixp_moment_kind kinds[] = { MIXP_MOMENT_F32, MIXP_MOMENT_BF16, MIXP_MOMENT_8BIT };
    const world *w = n->w;
    mixp_optimizer_desc adamw = mixp_adamw_defaults();
    mixp_optimizer_desc sgd = mixp_sgd_defaults();
    mixp_optimizer_desc lion = mixp_lion_defaults();
    adamw.lr = sgd.lr = 0.02;
    lion.lr = 0.01;
    sgd.momentum = 0.9;
    adamw.max_norm = sgd.max_norm = lion.max_norm = w->clips ? 0.5 : 0;
    adamw.states.m = adamw.states.v = kinds[w->moments];
    if (w->optimizer == SGD || second) return mixp_optimizer_new(n->ctx, &sgd);
    if (w->optimizer == LION) return mixp_optimizer_new(n->ctx, &lion);
    return mixp_optimizer_new(n->ctx, &adamw);
}

static net net_open(const world *w, const mixp_ranks_desc *ranks) {
    net n;
    mixp_context_desc d;
    mixp_scaler_desc scaler;
    mixp_guard_desc guard;
    memset(&n, 0, sizeof n);
    memset(&d, 0, sizeof d);
    memset(&scaler, 0, sizeof scaler);
    memset(&guard, 0, sizeof guard);
    n.w = w;
    n.rank = ranks->rank;
    d.ranks = ranks;
    d.threads = 1;
    d.seed = w->seed;
    n.ctx = mixp_context_new(&d);
    for (int i = 0; i < w->layers; i++) net_layer(&n, i);
    n.opt[0] = net_optimizer(&n, 0);
    if (w->optimizer == TWO) n.opt[1] = net_optimizer(&n, 1);
    for (int i = 0; i < n.n_all; i++) mixp_optimizer_add(n.opt[n.opt[1] ? i % 2 : 0], n.all[i], NULL);
    scaler.init_scale = w->scale;
    scaler.backoff_factor = 1e-9;            /* four skips bring 1e30 to where all fits */
    scaler.min_scale = 1;                    /* below it, all f16 gradients flush to zero: no weight moves */
    scaler.max_floor_skips = -1;
    n.scaler = mixp_scaler_new(n.ctx, &scaler);
    guard.every = 2;
    if (w->guard) mixp_guard_start(n.ctx, &guard);
    return n;
}

/* Does this rank use layer i in this walk? All ranks use the first. A parameter that no rank uses has a
 * gradient of zeros where ranks laid it out, and none where one rank has not met it. */
static int net_uses(const net *n, int i, int walk) {
    const uint64_t h = mixed(n->w->seed + (uint64_t)(1000 * walk + 10 * i + n->rank) * 0x9E3779B97F4A7C15u);
    if (n->w->is_promised && (walk + i) % n->w->size == n->rank) return 1;
    return i == 0 || (int)(h % 4) >= n->w->often_unused;
}

static mixp_tensor *net_forward(net *n, mixp_tensor *h, int walk) {
    for (int i = 0; i < n->w->layers; i++) {
        if (!net_uses(n, i, walk)) continue;
        mixp_tensor *y = mixp_linear(n->ctx, h, n->up[i], NULL);
        if (n->down[i]) y = mixp_linear(n->ctx, mixp_tanh(n->ctx, y), n->down[i], NULL);
        if (n->bias[i]) y = mixp_add(n->ctx, y, n->bias[i]);
        h = mixp_add(n->ctx, h, mixp_tanh(n->ctx, y));
    }
    return mixp_mean(n->ctx, mixp_mul(n->ctx, h, h), MIXP_ALL, 0);
}

/* A batch of this rank's own. Every `bad_every`th walk one rank's holds Inf. */
static void net_batch(const net *n, int walk, float *x) {
    const int count = ROWS * n->w->side, bad = n->w->bad_every;
    for (int i = 0; i < count; i++)
        x[i] = (float)((int)(mixed(n->w->seed ^ (uint64_t)(walk * 4000 + n->rank * 1000 + i)) % 2001) - 1000) / 1000.0f;
    if (bad && walk % bad == bad - 1 && n->rank == walk % n->w->size) x[0] = INFINITY;
}

static void net_walk(net *n, int walk, int holds) {
    const world *w = n->w;
    float x[ROWS * MOST_SIDE];
    int64_t shape[2];
    mixp_tensor *loss = NULL;
    shape[0] = ROWS;
    shape[1] = w->side;
    net_batch(n, walk, x);
    mixp_step_begin(n->ctx);
    MIXP_AUTOCAST(n->ctx, w->dtype) { loss = net_forward(n, mixp_input(n->ctx, MIXP_F32, 2, shape, x), walk); }
    mixp_ranks_hold(n->ctx, holds);
    mixp_backward(n->ctx, mixp_scaler_scale(n->scaler, loss));
}

/* alone: one rank takes the batches of all. */
static void net_step(net *n, int step, int alone, outcome *o) {
    const int batches = alone ? n->w->size : n->w->batches;
    for (int i = 0; i < 2; i++) if (n->opt[i]) mixp_zero_grad(n->opt[i]);
    for (int i = 0; i < batches; i++) {
        if (alone) n->rank = i;
        net_walk(n, alone ? step : step * batches + i, i < batches - 1);
    }
    for (int i = 0; i < 2; i++) if (n->opt[i]) mixp_scaler_step(n->scaler, n->opt[i]);
    mixp_scaler_update(n->scaler);
    o->applied += mixp_scaler_verdict(n->scaler).outcome == MIXP_STEP_APPLIED;
    o->skipped += mixp_scaler_verdict(n->scaler).outcome == MIXP_STEP_SKIPPED;
}

static uint64_t net_hash(const net *n) {
    static float values[2 * MOST_SIDE * MOST_SIDE];
    const unsigned char *bytes = (const unsigned char *)values;
    uint64_t h = 1469598103934665603u;
    for (int i = 0; i < n->n_all; i++) {
        const size_t count = (size_t)n->all[i]->count;
        mixp_read(n->all[i], values, MIXP_F32, (int64_t)count);
        for (size_t k = 0; k < count * sizeof values[0]; k++) h = (h ^ bytes[k]) * 1099511628211u;
    }
    return h;
}

static void run_net(const world *w, const mixp_ranks_desc *d, outcome *o) {
    const char *why = "";
    net n = net_open(w, d);
    o->before = net_hash(&n);
    for (int step = 0; step < w->steps; step++) net_step(&n, step, d->size == 1, o);
    mixp_ranks_check(n.ctx);
    o->after = net_hash(&n);
    o->code = mixp_context_error(n.ctx, &why);
    snprintf(o->text, sizeof o->text, "%s", why);
    o->ended = 1;
    mixp_context_free(n.ctx);
}

static void run_rank(const world *w, mixp_ranks_desc hooks, outcome *all) {
    mixp_ranks_desc d = w->ranks;
    d.rank = hooks.rank, d.size = hooks.size, d.user = hooks.user, d.seconds = patience;
    d.sum = hooks.sum, d.max = hooks.max, d.all_gather = hooks.all_gather;
    d.reduce_scatter = hooks.reduce_scatter, d.stop = hooks.stop, d.busy = hooks.busy;
    run_net(w, &d, &all[d.rank]);
}

static outcome run_alone(const world *w) {
    mixp_ranks_desc d = w->ranks;
    outcome o;
    memset(&o, 0, sizeof o);
    d.size = d.apart = 1;
    d.parts = w->size;
    d.shard = d.scatter = 0;
    run_net(w, &d, &o);
    return o;
}

/* ==== Two transports ================================================================ */

static outcome *shared_outcomes(void) {
    static outcome *all;
    const size_t bytes = MOST_RANKS * sizeof *all;
    const int zero = all ? -1 : open("/dev/zero", O_RDWR);
    if (!all) all = (outcome *)mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, zero, 0);
    if (zero >= 0) close(zero);
    memset(all, 0, bytes);
    return all;
}

static void over_fork(const world *w, outcome *all) {
    fflush(stdout);
    if (fork() == 0) {
        alarm(HANGS);
        mixp_ranks_desc d = ddp_fork(w->size);
        run_rank(w, d, all);
        leave(d.rank ? 0 : ddp_wait(0));
    }
    wait(NULL);
}

/* A port that was free a moment ago, below those that the system gives to connections. */
static int free_port(void) {
    static int turn;
    struct sockaddr_in at;
    int s = -1, n = 0;
    while (s < 0) {
        n = 10000 + (int)((getpid() * 37L + turn++) % 20000);
        s = ddp_tcp_listen(n, &at);
    }
    close(s);
    return n;
}

static void set_number(const char *name, int n) {
    char text[16];
    sprintf(text, "%d", n);
    setenv(name, text, 1);
}

static void over_tcp(const world *w, outcome *all) {
    const int port = free_port();
    fflush(stdout);
    for (int r = 0; r < w->size; r++)
        if (fork() == 0) {
            const char *why;
            alarm(HANGS);
            set_number("RANK", r);
            set_number("WORLD_SIZE", w->size);
            set_number("MASTER_PORT", port);
            setenv("MASTER_ADDR", "127.0.0.1", 1);
            mixp_ranks_desc d = ddp_tcp(patience, &why);
            if (why) snprintf(all[r].text, sizeof all[r].text, "%s", why);
            else run_rank(w, d, all);
            leave(ddp_tcp_end(why != NULL));
        }
    for (int r = 0; r < w->size; r++) wait(NULL);
}

static void tell_world(const world *w) {
    printf("  world %.0f: %d ranks, side %d, layers %d, steps %d of %d, %s, bucket %.0f, mean %d, low_sums %d, wire "
           "%s, apart %d, shard %d, scatter %d, optimizer %d, guard %d\n", (double)w->seed, w->size, w->side,
           w->layers, w->steps, w->batches, mixp_dtype_name(w->dtype), (double)w->ranks.bucket_bytes,
           (int)w->ranks.mean, w->ranks.low_sums, mixp_dtype_name(w->ranks.wire), w->ranks.apart, w->ranks.shard,
           w->ranks.scatter, w->optimizer, w->guard);
}

/* All ranks have ended, without an error, as rank 0 has. Returns rank 0's outcome. */
static outcome check_world(const world *w, const outcome *all) {
    const int bad = test_bad;
    for (int r = 0; r < w->size; r++) {
        CHECK_INT(all[r].ended, 1);
        CHECK_INT(all[r].code, MIXP_OK);
        CHECK(all[r].before == all[0].before);
        CHECK(all[r].after == all[0].after);
        CHECK_INT(all[r].applied, all[0].applied);
        CHECK_INT(all[r].skipped, all[0].skipped);
        CHECK_INT(all[r].applied + all[r].skipped, w->steps);
        if (all[r].applied) CHECK(all[r].after != all[r].before);
        else if (w->optimizer != TWO) CHECK(all[r].after == all[r].before);     /* else one may apply alone */
        if (all[r].text[0]) printf("  rank %d: %s\n", r, all[r].text);
    }
    if (test_bad > bad) tell_world(w);
    return all[0];
}

static void check_alone(const world *w, const outcome *ranks) {
    const outcome o = run_alone(w);
    const int bad = test_bad;
    CHECK_TEXT(o.text[0] ? o.text : "fine", "fine");
    CHECK_INT(o.applied, ranks->applied);
    CHECK(o.before == ranks->before);
    CHECK(o.after == ranks->after);
    if (test_bad > bad) tell_world(w);
}

static void worlds(void) {
    const char *given = getenv("MIXPREC_SEED");
    const uint64_t seed = given ? strtoull(given, NULL, 10) : (uint64_t)time(NULL);
    const double until = ddp_now() + SECONDS;
    int i, applied = 0, skipped = 0, promised = 0;
    for (i = 0; i < WORLDS && ddp_now() < until && test_bad < 20; i++) {
        const world w = draw_world(seed + (uint64_t)i);
        outcome *all = shared_outcomes(), forked;
        over_fork(&w, all);
        forked = check_world(&w, all);
        all = shared_outcomes();
        over_tcp(&w, all);
        CHECK(check_world(&w, all).after == forked.after);
        if (w.is_promised) check_alone(&w, &forked);
        promised += w.is_promised;
        applied += forked.applied;
        skipped += forked.skipped;
    }
    printf("  MIXPREC_SEED=%.0f: %d worlds, %d of them beside one rank, %d steps applied, %d skipped\n",
           (double)seed, i, promised, applied, skipped);
    CHECK(i >= 5 && applied > 0);
}

int main(void) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    RUN(worlds);
    return test_report();
}
