/* test_ranks_apart.c - ranks that diverge get an error; ranks wait for a rank that works alone.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * Two processes train one small model, and rank 1 does something that rank 0 does not. The test
 * expects an error text, or the bits of a run without that action.
 */
#define _POSIX_C_SOURCE 200809L
#include "mixprec.h"
#include "../../examples/ddp_fork.c"
#include "test.h"
#include "leave.h"

enum { HANGS = 200, SIDE = 32, STEPS = 24, EVERY = 8 };

/* A disk that takes its time: the library calls this one. */
static double disk_seconds;
int fsync(int fd) {
    (void)fd;
    if (disk_seconds > 0) poll(NULL, 0, (int)(1000 * disk_seconds));
    return 0;
}

enum { NOTHING, FILL, FLIP, BETA1, BETA2, EPS, DECAY, LIMIT, WINDOW, STATES, SECOND_GROUP, SWAPPED, GROUP_STATES, UPHILL, NO_MASTER, KIND, CLIP, LATER, LOADS, SAVES,
       CHECKS, CHECKS_ON_0, FROM_0, FROM_1, BUSY, SLOW_SAVE, SLOW_WEIGHTS, UNUSED, POSTS, WAYS };

typedef struct outcome {
    mixp_result   code;
    char          text[512];
    int           step;                 /* that failed, or STEPS */
    unsigned char weights[SIDE * SIDE * 4], first[SIDE * SIDE * 4];
    int           calls;
} outcome;

typedef struct run {
    const char *path;                   /* of a checkpoint */
    int         way, shard, far;        /* far: rank 1's device has memory of its own */
    mixp_dtype  dtype;
    const char *name[2];                /* of the ranks' devices; NULL: the CPU's */
    double      seconds;
    int64_t     refused;                /* the allocation of rank 1 that fails, from 1; 0 = none */
} run;

typedef struct net {
    mixp_context   *ctx;
    mixp_tensor    *w;
    mixp_optimizer *opt;
    mixp_scaler    *scaler;
} net;

static long allocations, refused_at;
static void *allocate(size_t bytes, void *user) {
    (void)user;
    return ++allocations == refused_at ? NULL : malloc(bytes);
}
static void give_back(void *p, void *user) { (void)user; free(p); }

/* A device with memory of its own, which hooks can read all the same. */
static void *far_allocate(const mixp_exec *x, size_t bytes) { (void)x; return malloc(bytes); }
static void far_release(const mixp_exec *x, void *p) { (void)x; free(p); }
static mixp_result far_copy(const mixp_exec *x, void *to, const void *from, size_t bytes) {
    (void)x;
    memcpy(to, from, bytes);
    return MIXP_OK;
}

/* What a device posts is collected a step later. */
static char posted[3][1 << 16];
static mixp_result post(const mixp_exec *x, int slot, const void *device, size_t bytes)
{ return far_copy(x, posted[slot], device, bytes); }
static mixp_result collect(const mixp_exec *x, int slot, void *host, size_t bytes)
{ return far_copy(x, host, posted[slot], bytes); }

static mixp_device device_of(const run *r, int rank) {
    mixp_device device = *mixp_cpu();
    if (r->name[rank]) device.name = r->name[rank];
    if (rank == 1 && r->way == POSTS) device.post = post, device.collect = collect;
    if (rank == 0 || !r->far) return device;
    device.allocate = far_allocate;
    device.release = far_release;
    device.upload = device.download = far_copy;
    return device;
}

static mixp_optimizer *optimizer_of(mixp_context *ctx, int way) {
    mixp_optimizer_desc d = mixp_adamw_defaults();
    mixp_optimizer_desc lion = mixp_lion_defaults();
    d.weight_decay = way == DECAY ? 0.02 : 0.01;
    d.beta1 = way == BETA1 ? 0.8 : 0.9;
    d.beta2 = way == BETA2 ? 0.99 : 0.999;
    d.eps = way == EPS ? 1e-7 : 1e-8;
    d.max_norm = way == LIMIT ? 0.5 : way == CLIP ? 0 : 1;
    if (way == WINDOW) d.spike.of = MIXP_SPIKE_NORM;
    if (way == STATES) d.states.m = MIXP_MOMENT_BF16;
    if (way == UPHILL) d.maximize = 1;
    if (way == NO_MASTER) d.no_master = 1;
    if (way == KIND) {
        lion.weight_decay = 0.01;
        return mixp_optimizer_new(ctx, &lion);
    }
    return mixp_optimizer_new(ctx, &d);
}

static net net_open(const run *r, const mixp_ranks_desc *ranks) {
    static const int64_t shape[2] = {SIDE, SIDE};
    const int odd = ranks->rank == 1 || r->way == CLIP ? r->way : NOTHING;
    static mixp_device device;
    mixp_context_desc d;
    mixp_guard_desc guard;
    net n;
    device = device_of(r, ranks->rank);
    memset(&d, 0, sizeof d);
    memset(&guard, 0, sizeof guard);
    d.device = &device;
    d.ranks = ranks;
    d.threads = 1;
    d.allocate = allocate;
    d.release = give_back;
    n.ctx = mixp_context_new(&d);
    n.w = mixp_param(n.ctx, "w", r->dtype, 2, shape);
    mixp_init_normal(n.w, 0, 0.3);
    n.opt = optimizer_of(n.ctx, odd);
    n.scaler = mixp_scaler_new(n.ctx, NULL);
    if (odd == SECOND_GROUP) {
        mixp_param_group g;
        mixp_optimizer_group(n.opt, 0, &g);
        g.lr *= 2;
        mixp_optimizer_add_group(n.opt, &g);
    }
    if (odd == GROUP_STATES) {
        mixp_param_group g;
        mixp_optimizer_group(n.opt, 0, &g);
        g.f32_states = 1;
        CHECK_INT(mixp_optimizer_set_group(n.opt, 0, &g), MIXP_OK);
    }
    if (r->way == SWAPPED) {    /* two parameters in two groups: the first of one rank is the other's second */
        mixp_tensor *v = mixp_param(n.ctx, "v", r->dtype, 2, shape);
        mixp_param_group g;
        mixp_optimizer_add(n.opt, odd == SWAPPED ? n.w : v, NULL);
        mixp_optimizer_group(n.opt, 0, &g);
        mixp_optimizer_add_group(n.opt, &g);
        mixp_optimizer_add(n.opt, odd == SWAPPED ? v : n.w, NULL);
    } else mixp_optimizer_add(n.opt, n.w, NULL);
    if (r->way == POSTS) mixp_guard_start(n.ctx, &guard);
    return n;
}

static mixp_result net_step(const net *n, const run *r, int rank, int step) {
    static const int64_t shape[2] = {4, SIDE};
    float x[4 * SIDE];
    for (int i = 0; i < 4 * SIDE; i++) x[i] = (float)((i * 7 + step * 3 + rank) % 11) / 11;
    mixp_step_begin(n->ctx);
    mixp_zero_grad(n->opt);
    mixp_tensor *y = mixp_linear(n->ctx, mixp_input(n->ctx, MIXP_F32, 2, shape, x), n->w, NULL);
    mixp_backward(n->ctx, mixp_scaler_scale(n->scaler, mixp_mean(n->ctx, mixp_mul(n->ctx, y, y), MIXP_ALL, 0)));
    if (r->way == CLIP) {
        mixp_scaler_unscale(n->scaler, n->opt);
        mixp_clip_grad_norm(n->opt, rank == 1 ? 0.01 : 0.02);
    }
    mixp_scaler_step(n->scaler, n->opt);
    mixp_scaler_update(n->scaler);
    return mixp_context_error(n->ctx, NULL);
}

/* What is done before step 3. */
static void before_step(const net *n, const run *r, int rank) {
    mixp_checkpoint what;
    mixp_optimizer *opt = n->opt;
    mixp_param_group g;
    memset(&what, 0, sizeof what);
    what.ctx = n->ctx;
    what.scaler = n->scaler;
    what.optimizers = &opt;
    what.n_optimizers = 1;
    if (r->way == SAVES) mixp_fill(n->w, rank ? 0.5 : 0.25);
    else if (rank == 1 && r->way != BUSY && r->way != SLOW_SAVE && r->way != SLOW_WEIGHTS) {
        if (r->way == FLIP) ((float *)n->w->data)[5] *= -8, mixp_tensor_touch(n->w);
        else if (r->way == LOADS) mixp_checkpoint_load(r->path, &what);
        else if (r->way == LATER) {
            mixp_optimizer_group(opt, 0, &g);
            g.eps = 1e-6;
            mixp_optimizer_set_group(opt, 0, &g);
        } else if (r->way == FILL || r->way == CHECKS || r->way == FROM_0 || r->way == FROM_1)
            mixp_fill(n->w, 0.5);
    }
    if (r->way == LOADS && rank == 0 && r->seconds < 0) mixp_checkpoint_load(r->path, &what);
    if (r->way == SAVES) mixp_checkpoint_save(r->path, &what);
    if (r->way == CHECKS || (r->way == CHECKS_ON_0 && !rank)) mixp_ranks_check(n->ctx);
    if (r->way == CHECKS_ON_0 && rank) mixp_ranks_from(n->ctx, 0);
    if (r->way == FROM_0 || r->way == FROM_1) mixp_ranks_from(n->ctx, r->way == FROM_1);
    if (rank) return;
    if (r->way == BUSY) {
        mixp_ranks_busy(n->ctx, 1);
        poll(NULL, 0, 2000);
        mixp_ranks_busy(n->ctx, 0);
    }
    disk_seconds = 2;
    if (r->way == SLOW_SAVE && !r->shard) mixp_checkpoint_save(r->path, &what);
    if (r->way == SLOW_WEIGHTS) mixp_checkpoint_save_weights(r->path, n->ctx);
}
static void save_together(const net *n, const run *r) {
    mixp_checkpoint what;
    mixp_optimizer *opt = n->opt;
    memset(&what, 0, sizeof what);
    what.ctx = n->ctx;
    what.scaler = n->scaler;
    what.optimizers = &opt;
    what.n_optimizers = 1;
    if (r->way == SLOW_SAVE && r->shard) mixp_checkpoint_save(r->path, &what);
}

static void train(const run *r, const mixp_ranks_desc *given, outcome *out) {
    mixp_ranks_desc ranks = *given;
    const char *text;
    ranks.seconds = r->seconds > 0 ? r->seconds : HANGS / 2;
    ranks.check_every = EVERY;
    ranks.shard = r->shard;
    ranks.unused = r->way == UNUSED && ranks.rank == 1;
    net n = net_open(r, &ranks);
    if (n.w) memcpy(out->first, n.w->data, sizeof out->first / (r->dtype == MIXP_F32 ? 1 : 2));
    allocations = 0;
    refused_at = ranks.rank == 1 ? r->refused : 0;
    for (out->step = 0; n.w && out->step < STEPS; out->step++) {
        if (out->step == 3) before_step(&n, r, ranks.rank), save_together(&n, r);
        if (mixp_context_error(n.ctx, NULL) != MIXP_OK || net_step(&n, r, ranks.rank, out->step)) break;
    }
    out->code = mixp_context_error(n.ctx, &text);
    snprintf(out->text, sizeof out->text, "%s", text);
    if (n.w) memcpy(out->weights, n.w->data, sizeof out->weights / (r->dtype == MIXP_F32 ? 1 : 2));
    mixp_context_free(n.ctx);
    out->calls = (int)allocations;
}

/* Two ranks; a pointer to both outcomes. */
static outcome *two(const run *r) {
    static outcome *all;
    int status = 0, zero = open("/dev/zero", O_RDWR);
    if (!all) all = mmap(NULL, 2 * sizeof *all, PROT_READ | PROT_WRITE, MAP_SHARED, zero, 0);
    close(zero);
    memset(all, 0, 2 * sizeof *all);
    fflush(stdout);
    pid_t root = fork();
    if (root == 0) {
        mixp_ranks_desc ranks = ddp_fork(2);
        alarm(HANGS);
        train(r, &ranks, &all[ranks.rank]);
        leave(ddp_wait(0));
    }
    CHECK(waitpid(root, &status, 0) > 0);
    CHECK_INT(status, 0);
    return all;
}

static run run_of(int way) {
    run r;
    memset(&r, 0, sizeof r);
    r.way = way;
    return r;
}

static void check_alike(const outcome *out) {
    CHECK_INT(out[0].code, MIXP_OK);
    CHECK_TEXT(out[0].code ? out[0].text : "fine", "fine");
    CHECK_TEXT(out[1].code ? out[1].text : "fine", "fine");
    CHECK_INT(out[0].step, STEPS);
    CHECK(memcmp(out[0].weights, out[1].weights, sizeof out[0].weights) == 0);
}

/* Told on both ranks, in step `step`, by this text. */
static const outcome *check_told(int way, int shard, int step, const char *text) {
    run r = run_of(way);
    const outcome *out;
    int rank;
    r.shard = shard;
    out = two(&r);
    for (rank = 0; rank < 2; rank++) {
        CHECK_INT(out[rank].code, MIXP_ERR_RANKS);
        CHECK_TEXT(out[rank].text, text);
        CHECK_INT(out[rank].step, step);
    }
    return out;
}

/* Hyper-parameters that differ are told at once, and nothing has moved. */
static void settings(void) {
    static const struct { int way, shard; const char *text; } cases[] = {
        {BETA1, 0, "ranks differ: beta1 is 0.9 on rank 0 and 0.8 on rank 1"},
        {BETA2, 0, "ranks differ: beta2 is 0.999 on rank 0 and 0.99 on rank 1"},
        {EPS, 0, "ranks differ: eps is 1e-08 on rank 0 and 1e-07 on rank 1"},
        {DECAY, 1, "ranks differ: weight_decay is 0.01 on rank 0 and 0.02 on rank 1"},
        {LIMIT, 0, "ranks differ: max_norm is 1 on rank 0 and 0.5 on rank 1"},
        {WINDOW, 0, "ranks differ: the setting 'spike.of' is 0 on rank 0 and 1 on rank 1"},
        {STATES, 0, "ranks differ: the setting 'states.m' is 0 on rank 0 and 1 on rank 1"},
        {UPHILL, 0, "ranks differ: the setting 'maximize' is 0 on rank 0 and 1 on rank 1"},
        {NO_MASTER, 0, "ranks differ: the setting 'no_master' is 0 on rank 0 and 1 on rank 1"},
        {SECOND_GROUP, 0, "ranks differ: the setting 'number of groups' is 1 on rank 0 and 2 on rank 1"},
        {GROUP_STATES, 0, "ranks differ: the setting 'f32_states' of group 0 is 0 on rank 0 and 1 on rank 1"},
        {SWAPPED, 0, "ranks differ: an optimizer of rank 1 has other parameters than that of rank 0"},
        {CLIP, 0, "ranks differ: the setting 'max_norm of mixp_clip_grad_norm (-1: no call)' is 0.02 on rank 0 "
                  "and 0.01 on rank 1"},
        {UNUSED, 0, "ranks differ: unused is 0 on rank 0 and 1 on rank 1"},
        {POSTS, 0, "ranks differ: the guard's delay in updates (CPU 0, GPU 1) is 0 on rank 0 and 1 on rank 1"},
    };
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        const outcome *out = check_told(cases[k].way, cases[k].shard, 0, cases[k].text);
        CHECK(memcmp(out[0].weights, out[0].first, sizeof out[0].first) == 0);
        CHECK(memcmp(out[1].weights, out[0].first, sizeof out[0].first) == 0);
    }
    check_told(KIND, 0, 0, "ranks differ: ");
    check_told(LATER, 0, 3, "ranks differ: eps is 1e-08 on rank 0 and 1e-06 on rank 1");
}

/* Ranks on CPUs whose products of f16 and bf16 differ in bits get an error before the first update. Ranks on sets that
 * share bits, and a rank on a GPU beside one on a CPU, train. */
static void instruction_sets(void) {
    static const struct { const char *name[2], *text; } cases[] = {
        {{"cpu avx512", "cpu avx512 amx"}, "the instruction set of rank 0 is 'cpu', that of rank 1 'cpu amx'"},
        {{"cpu avx512 amx f16", "cpu avx512 amx"},
         "the instruction set of rank 0 is 'cpu amx f16', that of rank 1 'cpu amx'"},
        {{"cpu neon", "cpu avx512 amx f16"}, "set portable_bits of mixp_context_desc on all ranks"},
        {{"cpu avx512 amx", "cpu avx512 amx"}, NULL},
        {{"cpu avx512 bf16", "cpu scalar"}, NULL},
        {{"cuda", "cpu avx512 amx"}, NULL},
    };
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        run r = run_of(NOTHING);
        memcpy(r.name, cases[k].name, sizeof r.name);
        const outcome *out = two(&r);
        if (!cases[k].text) check_alike(out);
        for (int rank = 0; rank < 2 && cases[k].text; rank++) {
            CHECK_INT(out[rank].code, MIXP_ERR_RANKS);
            CHECK_TEXT(out[rank].text, cases[k].text);
            CHECK_INT(out[rank].step, 0);
            CHECK(memcmp(out[rank].weights, out[0].first, sizeof out[0].first) == 0);
        }
    }
}

/* Weights that one rank writes are told in the next step that compares, by name. */
static void weights(void) {
    const outcome *out = check_told(FILL, 0, EVERY, "ranks differ: weight 0 is 'w' f32 [32, 32], values ");
    CHECK_TEXT(out[0].text, "on rank 1");
    check_told(FLIP, 0, EVERY, "ranks differ: weight 0 is 'w'");
    check_told(CHECKS, 0, 3, "ranks differ: weight 0 is 'w'");
    check_told(CHECKS, 1, 3, "ranks differ: weight 0 is 'w'");
    check_told(CHECKS_ON_0, 0, 3,
               "ranks differ: rank 0 calls mixp_ranks_check, rank 1 calls mixp_ranks_from(ctx, 0)");
}

/* What one rank wrote is not saved for all; what stood there before stays. */
static void saves(void) {
    run r = run_of(SAVES);
    char path[64];
    FILE *f;
    snprintf(path, sizeof path, "ranks_apart.%d.tmp", (int)getpid());
    r.path = path;
    r.shard = 1;
    outcome *out = two(&r);
    CHECK_INT(out[0].code, MIXP_ERR_RANKS);
    CHECK_INT(out[1].code, MIXP_ERR_RANKS);
    CHECK_TEXT(out[0].text, "ranks differ: weight 0 is 'w'");
    CHECK((f = fopen(path, "rb")) == NULL);
    if (f) fclose(f);
}

/* All take over one's weights: rank 0's are those of a run in which nothing happened. */
static void taken_over(void) {
    static outcome calm, from_0;
    run r = run_of(NOTHING);
    for (int k = 0; k < 4; k++) {
        r.dtype = k % 2 ? MIXP_BF16 : MIXP_F32;
        r.shard = k / 2;
        r.way = NOTHING;
        check_alike(two(&r));
        calm = two(&r)[0];
        r.way = FROM_0;
        check_alike(two(&r));
        from_0 = two(&r)[0];
        if (r.dtype == MIXP_F32) CHECK(memcmp(from_0.weights, calm.weights, sizeof calm.weights) == 0);
        r.way = FROM_1;
        check_alike(two(&r));
        CHECK(memcmp(two(&r)[0].weights, calm.weights, sizeof calm.weights / 2) != 0);
    }
}

/* A checkpoint that one rank alone loads is told in the next step; if all load it, all go on. */
static void loads(void) {
    run r = run_of(SLOW_SAVE);
    char path[64];
    snprintf(path, sizeof path, "ranks_apart.%d.tmp", (int)getpid());
    r.path = path;
    check_alike(two(&r));
    r.way = LOADS;
    outcome *out = two(&r);
    CHECK_TEXT(out[0].text, "ranks differ: rank 1 loaded a checkpoint and rank 0 did not");
    CHECK_TEXT(out[1].text, "ranks differ: rank 1 loaded a checkpoint and rank 0 did not");
    CHECK_INT(out[0].step, 3);
    r.seconds = -1;                     /* rank 0, too */
    check_alike(two(&r));
    remove(path);
}

/* A rank on a CPU and one whose device has memory of its own ask for the same sums, with the bits of two
 * CPUs. Weights that differ are told there, too. */
static void unlike_devices(void) {
    static outcome want;
    run r = run_of(NOTHING);
    const outcome *out;
    for (r.shard = 0; r.shard < 2; r.shard++) {
        r.far = 0;
        want = two(&r)[0];
        r.far = 1;
        out = two(&r);
        check_alike(out);
        CHECK(memcmp(out[0].weights, want.weights, sizeof want.weights) == 0);
    }
    r = run_of(FILL);
    r.far = 1;
    out = two(&r);
    for (int rank = 0; rank < 2; rank++) {
        CHECK_TEXT(out[rank].text, "ranks differ: rank 1 has other weights than rank 0");
        CHECK_INT(out[rank].step, EVERY);
    }
}

/* While rank 0 works alone, or a disk is slow, no time runs. */
static void waits(void) {
    run r = run_of(BUSY);
    char path[64];
    snprintf(path, sizeof path, "ranks_apart.%d.tmp", (int)getpid());
    r.path = path;
    r.seconds = 1;
    check_alike(two(&r));
    r.way = SLOW_SAVE;
    check_alike(two(&r));
    r.shard = 1;
    check_alike(two(&r));
    r.way = SLOW_WEIGHTS;
    check_alike(two(&r));
    remove(path);
}

/* One allocation of rank 1 fails, whichever: the step is whole on both ranks or was not taken. */
static void no_memory(void) {
    static outcome want;
    run r = run_of(NOTHING);
    int shard, told = 0;
    for (shard = 0; shard < 2; shard++) {
        r.shard = shard;
        r.refused = 0;
        want = two(&r)[1];
        for (r.refused = 1; r.refused <= want.calls; r.refused++) {
            const outcome *out = two(&r);
            if (out[1].code == MIXP_OK) continue;       /* freed and asked for again, or not needed */
            told++;
            CHECK_INT(out[1].code, MIXP_ERR_MEMORY);
            CHECK(out[0].code == MIXP_ERR_RANKS || out[0].step == STEPS);
            CHECK(memcmp(out[1].weights, out[0].weights, sizeof out[0].weights) == 0);
        }
    }
    CHECK(told > 20);
}

/* --- parameters that a rank leaves out ----------------------------------------------------------- */

enum { PARTS = 5, LENGTH = 1024, TURNS = 8 };

typedef struct leaving {
    int     size, walks, shard, scatter, two;  /* two: of optimizers, each with walks of its own */
    int64_t bucket;
    unsigned seed;
} leaving;

/* Which parameters the loss of a walk is made from; never none of those in `of`. */
static unsigned mask_of(const leaving *l, int step, int walk, int rank, unsigned of) {
    unsigned x = l->seed * 2654435761u + (unsigned)(step * 8 + walk) * 40503u + (unsigned)rank * 2246822519u;
    x ^= x >> 15;
    x *= 2654435761u;
    x ^= x >> 13;
    x = x >> 7 & of;
    return x ? x : (of & 1) ? 1 : 8;
}

static mixp_tensor *sum_of_some(mixp_context *ctx, mixp_tensor **p, unsigned mask) {
    mixp_tensor *all = NULL;
    for (int i = 0; i < PARTS; i++) {
        if (!(mask >> i & 1)) continue;
        mixp_tensor *one = mixp_sum(ctx, p[i], MIXP_ALL, 0);
        all = all ? mixp_add(ctx, all, one) : one;
    }
    return all;
}

/* Gradients are 1 where a walk uses a parameter: each moves by a half of the mean of that. */
static int leaves_out(const leaving *l, const mixp_ranks_desc *given) {
    static const int64_t shape[1] = {LENGTH};
    mixp_ranks_desc ranks = *given;
    mixp_optimizer_desc sgd = mixp_sgd_defaults();
    double want[PARTS] = {0};
    mixp_optimizer *opt[2];
    mixp_tensor *p[PARTS];
    mixp_context_desc d;
    const char *text;
    float now[LENGTH];
    memset(&d, 0, sizeof d);
    ranks.bucket_bytes = l->bucket;
    ranks.seconds = HANGS / 2;
    ranks.shard = l->shard;
    ranks.scatter = l->scatter;
    d.ranks = &ranks;
    d.threads = 1;
    mixp_context *ctx = mixp_context_new(&d);
    sgd.lr = 0.5;
    opt[0] = mixp_optimizer_new(ctx, &sgd);
    opt[1] = mixp_optimizer_new(ctx, &sgd);
    mixp_scaler *scaler = mixp_scaler_new(ctx, NULL);
    for (int i = 0; i < PARTS; i++) {
        p[i] = mixp_param(ctx, &"a\0b\0c\0d\0e"[2 * i], MIXP_F32, 1, shape);
        mixp_optimizer_add(opt[l->two && i > 2], p[i], NULL);
    }
    for (int step = 0; step < TURNS; step++)
        for (int o = 0; o <= l->two; o++) {
            const unsigned of = !l->two ? 31u : o ? 24u : 7u;
            mixp_zero_grad(opt[o]);
            for (int walk = 0; walk < l->walks; walk++) {
                mixp_step_begin(ctx);
                mixp_ranks_hold(ctx, walk < l->walks - 1);
                mixp_backward(ctx, mixp_scaler_scale(scaler,
                    sum_of_some(ctx, p, mask_of(l, step, walk, ranks.rank, of))));
                for (int r = 0; r < l->size; r++)
                    for (int i = 0; i < PARTS; i++)
                        want[i] -= 0.5 / l->size * (mask_of(l, step, walk, r, of) >> i & 1);
            }
            if (mixp_scaler_step(scaler, opt[o]) != MIXP_OK) break;
            mixp_scaler_update(scaler);
        }
    CHECK_INT(mixp_context_error(ctx, &text), MIXP_OK);
    CHECK_TEXT(text[0] ? text : "fine", "fine");
    for (int i = 0; i < PARTS; i++) {
        mixp_read(p[i], now, MIXP_F32, LENGTH);
        for (int k = 0; k < LENGTH; k++) CHECK_NEAR(now[k], want[i], 0);
    }
    mixp_context_free(ctx);
    return test_bad != 0;
}

/* Each rank leaves out other parameters in each walk, from the first on: with ranges of any size. */
static void left_out(void) {
    static const int64_t buckets[] = {1, 6000, 0};
    leaving l;
    int k, status;
    for (k = 0; k < 36; k++) {
        memset(&l, 0, sizeof l);
        l.bucket = buckets[k % 3];
        l.size = k % 2 ? 4 : 2;
        l.walks = 1 + k / 3 % 2;
        l.shard = k / 6 % 3 > 0;
        l.scatter = k / 6 % 3 > 1;
        l.two = k / 18;
        l.seed = (unsigned)k + 1;
        fflush(stdout);
        if (fork() == 0) {
            mixp_ranks_desc ranks = ddp_fork(l.size);
            alarm(HANGS);
            test_bad = 0;
            leave(ddp_wait(leaves_out(&l, &ranks)));
        }
        CHECK(wait(&status) > 0);
        CHECK_INT(status, 0);
    }
}

int main(void) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    RUN(settings);
    RUN(instruction_sets);
    RUN(weights);
    RUN(saves);
    RUN(taken_over);
    RUN(loads);
    RUN(unlike_devices);
    RUN(waits);
    RUN(no_memory);
    RUN(left_out);
    return test_report();
}
