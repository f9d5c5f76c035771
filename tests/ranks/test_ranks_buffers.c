/* test_ranks_buffers.c - gradients of scattered sums: a rank keeps its pieces, and the complete gradients lie in
 * buffers that several of them use in turn. Programs that make that difficult end with the bits of ranks
 * that keep all gradients; and the memory is what the shapes say.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#define _POSIX_C_SOURCE 200809L
#if defined(__GNUC__)
#  pragma GCC diagnostic ignored "-Wunused-function"
#endif
#include "mixprec.h"
#include "../../examples/ddp_threads.c"
#include "test.h"
#include <stdlib.h>

enum { LAYERS = 8, SIDE = 64, ROWS = 4, STEPS = 6, MOST = 4, QUEUE = 64 };
static const size_t layer_bytes = SIDE * SIDE * sizeof(float);

/* How a program uses its weights. */
typedef enum use {
    IN_TURN,            /* each once, in one order */
    REVERSED,           /* in another order in every second step */
    TIED,               /* the first one at both ends: its gradient is there for the whole walk */
    RECURRENT,          /* each of them three times */
    LEFT_OUT,           /* another one is left out in each step; on rank 1 a second one */
    TWO_LOSSES,         /* two walks, of half the weights each */
    USES
} use;

typedef struct program {
    use        how;
    mixp_dtype dtype, wire;
    int        low_sums, scatter, later, hold, apart, overflows, mean;
    int64_t    bucket;
} program;

typedef struct outcome {
    unsigned char weights[LAYERS * SIDE * SIDE * sizeof(float)];
    size_t most;                        /* bytes of the context's memory at their most */
    int    skipped;
} outcome;

typedef struct job {
    const program *p;
    outcome *out;                       /* one for each rank */
} job;

/* --- sums that are begun, and carried out in the wait -------------------------------------------- */

typedef struct sum { void *data; int64_t count; mixp_dtype dtype; int scattered; } sum;
static struct { sum sums[QUEUE]; int n; } queue[MOST];

static const char *later(void *user, void *data, int64_t count, mixp_dtype dtype, int scattered) {
    const int rank = ((ddp_thread *)user)->ranks.rank;
    sum *s = &queue[rank].sums[queue[rank].n];
    if (queue[rank].n == QUEUE) return "too many sums are begun";
    queue[rank].n++;
    s->data = data;
    s->count = count;
    s->dtype = dtype;
    s->scattered = scattered;
    return NULL;
}
static const char *later_sum(void *user, void *data, int64_t count, mixp_dtype dtype, void *stream,
                             double seconds) {
    (void)stream, (void)seconds;
    return later(user, data, count, dtype, 0);
}
static const char *later_scatter(void *user, void *data, int64_t count, mixp_dtype dtype, void *stream,
                                 double seconds) {
    (void)stream, (void)seconds;
    return later(user, data, count, dtype, 1);
}
static const char *now(void *user, void *stream, double seconds) {
    const int rank = ((ddp_thread *)user)->ranks.rank;
    const char *why = NULL;
    int i;
    for (i = 0; i < queue[rank].n && !why; i++) {
        const sum *s = &queue[rank].sums[i];
        why = (s->scattered ? ddp_threads_scatter : ddp_threads_sum)(user, s->data, s->count, s->dtype, stream,
                                                                     seconds);
    }
    queue[rank].n = 0;
    return why;
}

/* --- memory that is counted --------------------------------------------------------------------- */

enum { HEAD = 64 };
typedef struct counter { size_t held, most; } counter;
static void *count_allocate(size_t bytes, void *user) {
    counter *c = user;
    char *p = malloc(bytes + HEAD);
    if (!p) return NULL;
    memcpy(p, &bytes, sizeof bytes);
    c->held += bytes;
    if (c->held > c->most) c->most = c->held;
    return p + HEAD;
}
static void count_release(void *p, void *user) {
    counter *c = user;
    size_t bytes;
    if (!p) return;
    memcpy(&bytes, (char *)p - HEAD, sizeof bytes);
    c->held -= bytes;
    free((char *)p - HEAD);
}

/* --- training ------------------------------------------------------------------------------------ */

/* The layer that place `at` of a step's forward uses; -1: none. */
static int layer_at(const program *p, int rank, int step, int at) {
    if (p->how == REVERSED && step % 2) return LAYERS - 1 - at % LAYERS;
    if (p->how == TIED && at == LAYERS) return 0;
    if (p->how == LEFT_OUT && at == step % LAYERS) return -1;
    if (p->how == LEFT_OUT && rank == 1 && at == (step + 3) % LAYERS) return -1;
    return at % LAYERS;
}
static int places(const program *p)
{ return p->how == RECURRENT ? 3 * LAYERS : p->how == TIED ? LAYERS + 1 : LAYERS; }

static void walk(const program *p, mixp_context *ctx, mixp_scaler *scaler, mixp_tensor **w, int rank, int step,
                 int batch, int first, int end) {
    const int64_t shape[2] = {ROWS, SIDE};
    float x[ROWS * SIDE];
    mixp_tensor *h;
    int i;
    for (i = 0; i < ROWS * SIDE; i++) x[i] = (float)((i * 37 + 11 * rank + 5 * step + 3 * batch) % 101) / 50 - 1;
    if (p->overflows && step == 2 && rank == 1) x[7] = INFINITY;
    h = mixp_input(ctx, MIXP_F32, 2, shape, x);
    for (i = first; i < end; i++) {
        const int layer = layer_at(p, rank, step, i);
        if (layer >= 0) h = mixp_tanh(ctx, mixp_linear(ctx, h, w[layer], NULL));
    }
    mixp_backward(ctx, mixp_scaler_scale(scaler, mixp_sum(ctx, mixp_cast(ctx, h, MIXP_F32), MIXP_ALL, 0)));
}

static void take_step(const program *p, mixp_context *ctx, mixp_scaler *scaler, mixp_optimizer *opt, mixp_tensor **w,
                      int rank, int step) {
    const int half = p->how == TWO_LOSSES ? LAYERS / 2 : places(p);
    int batch;
    mixp_step_begin(ctx);
    mixp_zero_grad(opt);
    for (batch = 0; batch <= p->hold; batch++) {
        mixp_ranks_hold(ctx, batch < p->hold || p->how == TWO_LOSSES);
        walk(p, ctx, scaler, w, rank, step, batch, 0, half);
        mixp_ranks_hold(ctx, batch < p->hold);
        if (p->how == TWO_LOSSES) walk(p, ctx, scaler, w, rank, step, batch, half, LAYERS);
    }
    mixp_scaler_step(scaler, opt);
    mixp_scaler_update(scaler);
}

static int trains(const mixp_ranks_desc *given, void *user) {
    static const char *const names[LAYERS] = {"w0", "w1", "w2", "w3", "w4", "w5", "w6", "w7"};
    const int64_t shape[2] = {SIDE, SIDE};
    const job *j = user;
    const program *p = j->p;
    outcome *out = &j->out[given->rank];
    mixp_ranks_desc ranks = *given;
    mixp_context_desc d;
    mixp_scaler_desc s;
    mixp_tensor *w[LAYERS];
    counter c = {0, 0};
    const char *why = "";
    memset(&d, 0, sizeof d);
    memset(&s, 0, sizeof s);
    ranks.shard = 1;
    ranks.scatter = p->scatter;
    ranks.low_sums = p->low_sums;
    ranks.apart = p->apart;
    ranks.wire = p->wire;
    ranks.bucket_bytes = p->bucket;
    ranks.mean = (mixp_ranks_mean)p->mean;
    ranks.seconds = 120;
    if (p->later) {
        ranks.grad_ready = later_sum;
        ranks.scatter_ready = later_scatter;
        ranks.grad_wait = now;
        queue[ranks.rank].n = 0;
    }
    d.ranks = &ranks;
    d.threads = 1;
    d.allocate = count_allocate;
    d.release = count_release;
    d.user = &c;
    s.init_scale = 256;
    mixp_context *ctx = mixp_context_new(&d);
    mixp_optimizer *opt = mixp_optimizer_new(ctx, NULL);
    mixp_scaler *scaler = mixp_scaler_new(ctx, &s);
    for (int i = 0; i < LAYERS; i++) {
        w[i] = mixp_param(ctx, names[i], p->dtype, 2, shape);
        mixp_init_normal(w[i], 0, 0.15);
        mixp_optimizer_add(opt, w[i], NULL);
    }
    for (int i = 0; i < STEPS; i++) {
        take_step(p, ctx, scaler, opt, w, ranks.rank, i);
        out->skipped += mixp_scaler_verdict(scaler).outcome == MIXP_STEP_SKIPPED;
    }
    for (int i = 0; i < LAYERS; i++)
        memcpy(out->weights + (size_t)i * layer_bytes, w[i]->data, SIDE * SIDE * mixp_dtype_size(p->dtype));
    int r = mixp_context_error(ctx, &why) != MIXP_OK;
    if (r) printf("  rank %d: %s\n", ranks.rank, why);
    out->most = c.most;
    mixp_context_free(ctx);
    return r;
}

static outcome *run(const program *p, int size) {
    static outcome out[2][MOST];
    outcome *to = out[p->scatter];
    job j;
    memset(to, 0, sizeof out[0]);
    j.p = p;
    j.out = to;
    CHECK_INT(ddp_threads(size, trains, &j), 0);
    return to;
}

/* Ranks that scatter sums, and ranks that keep all gradients: the same weights everywhere. */
static void compare(program p, int size, const char *what) {
    p.scatter = 0;
    const outcome *want = run(&p, size);
    p.scatter = 1;
    const outcome *got = run(&p, size);
    for (int r = 0; r < size; r++) {
        int same = memcmp(got[r].weights, want[0].weights, sizeof want[0].weights) == 0;
        CHECK(same);
        CHECK_INT(got[r].skipped, want[0].skipped);
        if (!same)
            printf("  %s, program %d, rank %d of %d, later %d, hold %d\n", what, (int)p.how, r, size, p.later, p.hold);
    }
}

static program program_of(use how) {
    program p;
    memset(&p, 0, sizeof p);
    p.how = how;
    p.dtype = p.wire = MIXP_F32;
    p.bucket = (int64_t)layer_bytes;
    return p;
}

static void programs(void) {
    for (int how = 0; how < USES; how++)
        for (int way = 0; way < 4; way++) {
            program p = program_of((use)how);
            p.later = way % 2;
            p.bucket = way < 2 ? p.bucket : 100;
            compare(p, way == 3 ? 4 : 2, "programs");
        }
}

static void dtypes(void) {
    for (int way = 0; way < 5; way++) {
        program p = program_of(way % 2 ? REVERSED : TIED);
        p.later = way % 2;
        p.dtype = way < 3 ? MIXP_BF16 : MIXP_F32;
        p.wire = way == 3 || way == 1 ? MIXP_BF16 : MIXP_F32;
        p.low_sums = way == 2;
        p.mean = way % 3;
        compare(p, 3, "dtypes");
    }
}

/* Micro-batches: gradients add up over walks before they are summed, or with sums of their own. */
static void accumulated(void) {
    for (int how = IN_TURN; how < USES; how++)
        for (int way = 0; way < 2; way++) {
            program p = program_of((use)how);
            p.hold = 2;
            p.apart = way;
            p.later = !way;
            compare(p, 2, "accumulated");
        }
}

static void overflowed(void) {
    program p = program_of(TIED);
    p.overflows = 1;
    p.later = 1;
    compare(p, 2, "overflowed");
    CHECK_INT(run(&p, 2)[0].skipped, 1);
}

/* Beside shards, scattered sums free LAYERS gradients and keep the pieces and the buffers: one where each sum is
 * awaited at once; otherwise two in flight (2 * bucket_bytes) and the one that is written. The rest,
 * such as tables, is small. */
static void memory(void) {
    for (int size = 2; size <= 4; size += 2)
        for (int way = 0; way < 2; way++) {
            const size_t buffers = way ? 3 : 1;
            const double saved = (double)layer_bytes * (LAYERS - (double)LAYERS / size - (double)buffers);
            program p = program_of(IN_TURN);
            p.later = way;
            p.scatter = 0;
            double all = (double)run(&p, size)[0].most;
            p.scatter = 1;
            double pieces = (double)run(&p, size)[0].most;
            CHECK(all - pieces > saved - 0.5 * (double)layer_bytes);
            if (all - pieces <= saved - 0.5 * (double)layer_bytes)
                printf("  %d ranks, way %d: %.0f bytes less, not %.0f\n", size, way, all - pieces, saved);
        }
}

/* A state that is a frozen parameter, written by each rank for itself: told at the write, and at a save. */
static int keeps_a_state(const mixp_ranks_desc *given, void *user) {
    const int64_t n = 4;
    mixp_ranks_desc ranks = *given;
    mixp_context_desc d;
    mixp_checkpoint all;
    memset(&d, 0, sizeof d);
    memset(&all, 0, sizeof all);
    d.ranks = &ranks;
    d.threads = 1;
    all.ctx = mixp_context_new(&d);
    mixp_tensor *w = mixp_param(all.ctx, "w", MIXP_F32, 1, &n), *s = mixp_param(all.ctx, "s", MIXP_F32, 1, &n);
    mixp_tensor_set_requires_grad(s, 0);
    mixp_step_begin(all.ctx);
    mixp_backward(all.ctx, mixp_sum(all.ctx, mixp_mul(all.ctx, w, s), MIXP_ALL, 0));
    if (*(int *)user) mixp_fill(s, given->rank + 1);
    int told = strstr(mixp_context_warning(all.ctx), "a checkpoint holds the numbers of rank 0") != NULL;
    mixp_context_clear_error(all.ctx);
    if (mixp_checkpoint_save("ranks_state_of_its_own.tmp", &all) != MIXP_OK) told = 2;
    mixp_context_free(all.ctx);
    return told != *(int *)user;
}
static void a_state_in_a_frozen_parameter_is_told(void) {
    for (int writes = 0; writes < 2; writes++) CHECK_INT(ddp_threads(2, keeps_a_state, &writes), 0);
    remove("ranks_state_of_its_own.tmp");
}

int main(void) {
    RUN_LATER(programs);
    RUN(dtypes);
    RUN(accumulated);
    RUN(overflowed);
    RUN(memory);
    RUN(a_state_in_a_frozen_parameter_is_told);
    return test_report();
}
