/* bench_ranks.c - what summing gradients over ranks costs, and what each way of it loses
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 *   bench_ranks [width, 384] [layers, 8] [rounds, 5]     all of it
 *   bench_ranks none|one [STEPS]                         steps of one side of 4, for callgrind
 *   bench_ranks losses|predictions|counted               1, 3 or 6, which depend on no machine
 *   bench_ranks additions                                5
 *
 * 1. Loss: the mean of 2, 4 and 8 ranks' gradients by each setting, against double.
 * 2. Overlap: training steps with an engine that carries nothing, but takes as long as a ring of 8
 *    over a line of a given bandwidth and latency would: how much of that does backward hide, and how
 *    much could it, if every gradient were there, and on its way, as soon as backward begins?
 * 3. Prediction: the same line of events for GPT-2 on machines that are not here.
 * 4. One rank: steps without ranks, and with a world of one whose hooks are not there, in turns.
 * 5. Additions: what one core takes for the sum of two ranks' elements (examples/ddp_sum.h).
 * 6. Counted: bytes, messages and memory of rank 0 of 2, 4, 8 and 1,024, for each way to sum.
 */
#define _POSIX_C_SOURCE 199309L
#include "mixprec.h"
#include "numbers.h"
#include "../../examples/ddp_sum.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* --- 1. what is lost ------------------------------------------------------------------------ */

enum { RANKS = 8, NUMBERS = 20000 };

static double rounded(mixp_dtype dtype, double x) { return mixp_decode(dtype, mixp_encode(dtype, x, 0)); }

/* A gradient: normal numbers, whose sizes spread over a few powers of two. */
static double gradient(double size) {
    double x = -6.0;
    for (int i = 0; i < 12; i++) x += (double)(random_u64() >> 11) / 9007199254740992.0;
    return x * size * exp2((double)(random_u64() % 9) - 4.0);
}

/* The mean of n numbers of a dtype; wide: summed in f32. */
static double mean_of(const double *g, int n, mixp_dtype dtype, int wide, int before) {
    mixp_dtype sum_dtype = wide ? MIXP_F32 : dtype;
    double sum = 0;
    for (int r = 0; r < n; r++) {
        double x = before ? rounded(sum_dtype, g[r] / n) : g[r];
        sum = rounded(sum_dtype, sum + x);
    }
    return rounded(dtype, before ? sum : rounded(sum_dtype, sum / n));
}

typedef struct lost { double error; int flushed, overflowed; } lost;

static lost lost_by(mixp_dtype dtype, double size, int n, int wide, int before) {
    double total = 0, g[RANKS], want, got;
    lost l = {0, 0, 0};
    random_state = 88172645463325252u;
    for (int i = 0; i < NUMBERS; i++) {
        want = 0;
        for (int r = 0; r < n; r++) {
            g[r] = rounded(dtype, gradient(size));
            want += g[r] / n;
        }
        got = mean_of(g, n, dtype, wide, before);
        l.overflowed += !(fabs(got) < 1e39) || (dtype == MIXP_F16 && fabs(got) > 65504);
        if (!(fabs(got) <= 65504) || !(fabs(want) <= 65504)) continue;
        l.flushed += got == 0 && want != 0;
        l.error += (got - want) * (got - want);
        total += want * want;
    }
    l.error = sqrt(l.error / total);
    return l;
}

static void losses(void) {
    static const double sizes[3] = {1e-6, 1e-2, 3e3};
    static const mixp_dtype dtypes[2] = {MIXP_BF16, MIXP_F16};
    printf("the mean of ranks' gradients beside double's: error (rms, of the mean itself), %% that became 0, %% "
           "that overflowed\n%-5s %6s %5s", "grads", "size", "ranks");
    for (int way = 0; way < 4; way++)
        printf("  %4s, %-6s %5s %5s", way & 2 ? "own" : "f32", way & 1 ? "after" : "before", "to 0", "over");
    for (int d = 0; d < 2; d++)
        for (int s = 0; s < 3; s++)
            for (int n = 2; n <= RANKS; n *= 2) {
                printf("\n%-5s %6.0e %5d", mixp_dtype_name(dtypes[d]), sizes[s], n);
                for (int way = 0; way < 4; way++) {
                    lost l = lost_by(dtypes[d], sizes[s], n, !(way & 2), !(way & 1));
                    printf("  %12.2e %5.2f %5.2f", l.error, 100.0 * l.flushed / NUMBERS, 100.0 * l.overflowed / NUMBERS);
                }
            }
    printf("\n");
}

/* --- a line of events: buckets that become ready, and go over the line one after the other -------- */

typedef struct line { double bytes_per_second, latency; int ranks; } line;

/* A ring: each rank sends 2 (n-1)/n of the bytes, in 2 (n-1) messages. */
static double line_seconds(const line *l, double bytes) {
    double hops = 2.0 * (l->ranks - 1);
    return hops * l->latency + hops / l->ranks * bytes / l->bytes_per_second;
}

/* --- 2. overlap, measured -------------------------------------------------------------------- */

typedef struct engine { line l; double walk_began, busy_until, carried, waited, could; int buckets; } engine;

static const char *no_sum(void *user, void *data, int64_t count, mixp_dtype dtype, void *stream, double seconds) {
    (void)user, (void)stream, (void)seconds;
    if (dtype == MIXP_F64) {            /* a table: the others are as this one */
        double *t = data;
        int64_t words = count / RANKS;
        for (int64_t i = words; i < count; i++) t[i] = t[i % words];
    }
    return NULL;
}
static const char *begin(void *user, void *data, int64_t count, mixp_dtype dtype, void *stream, double seconds) {
    engine *e = user;
    double at = now(), takes = line_seconds(&e->l, (double)count * (double)mixp_dtype_size(dtype));
    (void)data, (void)stream, (void)seconds;
    e->busy_until = (e->busy_until > at ? e->busy_until : at) + takes;
    e->carried += takes;
    e->buckets++;
    return NULL;
}
static const char *wait_for(void *user, void *stream, double seconds) {
    engine *e = user;
    double at = now();
    (void)stream, (void)seconds;
    if (e->busy_until > at) e->waited += e->busy_until - at;
    e->could += at - e->walk_began;
    e->busy_until = at;                 /* nobody really waits: a busy machine would add its own */
    return NULL;
}

typedef struct net {
    mixp_context *ctx;
    mixp_optimizer *opt;
    mixp_tensor *w[64];
    int width, layers;
    double *walk_began;                 /* NULL: nobody asks */
} net;

static net net_open(int width, int layers, const mixp_ranks_desc *ranks) {
    const int64_t shape[2] = {width, width};
    mixp_context_desc d;
    net n;
    memset(&d, 0, sizeof d);
    memset(&n, 0, sizeof n);
    d.ranks = ranks;
    n.ctx = mixp_context_new(&d);
    n.opt = mixp_optimizer_new(n.ctx, NULL);
    n.width = width;
    n.layers = layers;
    for (int i = 0; i < layers; i++) {
        char name[16];
        snprintf(name, sizeof name, "w%d", i);
        n.w[i] = mixp_param(n.ctx, name, MIXP_F32, 2, shape);
        mixp_init_normal(n.w[i], 0, 0.05);
        mixp_optimizer_add(n.opt, n.w[i], NULL);
    }
    return n;
}

static void net_step(const net *n, const float *x) {
    const int64_t batch[2] = {64, n->width};
    mixp_step_begin(n->ctx);
    mixp_zero_grad(n->opt);
    mixp_tensor *h = mixp_input(n->ctx, MIXP_F32, 2, batch, x);
    for (int i = 0; i < n->layers; i++) h = mixp_relu(n->ctx, mixp_linear(n->ctx, h, n->w[i], NULL));
    h = mixp_mean(n->ctx, h, MIXP_ALL, 0);
    if (n->walk_began) *n->walk_began = now();
    mixp_backward(n->ctx, h);
    mixp_optimizer_step(n->opt);
}

static double overlap(int width, int layers, int rounds, int64_t bucket_bytes, const line *l) {
    float *x = calloc((size_t)(64 * width), sizeof *x);
    mixp_ranks_desc ranks;
    engine e;
    memset(&ranks, 0, sizeof ranks);
    memset(&e, 0, sizeof e);
    e.l = *l;
    ranks.size = RANKS;
    ranks.sum = no_sum;
    ranks.grad_ready = begin;
    ranks.grad_wait = wait_for;
    ranks.user = &e;
    ranks.mean = MIXP_MEAN_NONE;
    ranks.bucket_bytes = bucket_bytes;
    net n = net_open(width, layers, &ranks);
    n.walk_began = &e.walk_began;
    for (int i = 0; i < 64 * width; i++) x[i] = (float)gradient(0.1);
    double began = now();
    for (int round = -1; round < rounds; round++) {     /* one to warm up */
        if (round == 0) {
            began = now();
            e.carried = e.waited = e.could = 0;
            e.buckets = 0;
        }
        net_step(&n, x);
    }
    double all = (now() - began) / rounds;
    if (mixp_context_error(n.ctx, NULL) != MIXP_OK) printf("an error: the figures mean nothing\n");
    printf("%9.2f GB/s %6.0f us %8.2f MB %4d %9.2f ms %9.2f ms %9.2f ms %8.1f%% %8.1f%%\n",
           l->bytes_per_second * 1e-9, l->latency * 1e6, (double)bucket_bytes * 1e-6, e.buckets / rounds, 1e3 * all,
           1e3 * e.carried / rounds, 1e3 * e.waited / rounds, 100 * (1 - e.waited / e.carried),
           100 * (e.could < e.carried ? e.could / e.carried : 1));
    mixp_context_free(n.ctx);
    free(x);
    return all;
}

static void overlaps(int width, int layers, int rounds) {
    static const double gigabytes[3] = {0.5, 2, 8};
    printf("\noverlap: %d layers of %d x %d, 64 rows, an engine that only takes its time\n", layers, width, width);
    printf("%14s %9s %11s %4s %12s %12s %12s %9s %9s\n", "line", "latency", "bucket", "n", "a step", "carrying",
           "to wait", "hidden", "at most");
    for (int g = 0; g < 3; g++)
        for (int64_t bucket = 1 << 18; bucket <= 1 << 24; bucket <<= 3) {
            line l = {1e9 * gigabytes[g], 20e-6, RANKS};
            overlap(width, layers, rounds, bucket, &l);
        }
}

/* --- 3. prediction --------------------------------------------------------------------------- */

/* GPT-2. The embedding is the output's matrix as well: its gradient is final when backward ends. */
typedef struct model { const char *name; double parameters, embedding; } model;

typedef enum way { ALL_GET_ALL, SHARDED, SCATTERED } way;

/* A step of a transformer: 6 flops for each parameter and token, two thirds of them in backward, which
 * ends its gradients but the embedding's at an even pace. Sharded: weights in bf16 are gathered after it,
 * with nothing to hide behind. Most of what backward could hide: all of it that fits into it. */
static void predict(const model *m, double tokens, double flops, const char *where, line l, double bytes_each,
                    way how) {
    static const char *const names[] = {"all get all", "sharded", "scattered"};
    double step = 6 * m->parameters * tokens / flops, backward = step * 2 / 3, bucket = 25.0 * (1 << 20);
    double bytes = (m->parameters - m->embedding) * bytes_each, carried = 0, free_at = 0, tail, gather;
    double share = how == SCATTERED ? 0.5 : 1, last = m->embedding * bytes_each, most;
    for (double sent = 0; sent < bytes; sent += bucket) {
        double n = bytes - sent < bucket ? bytes - sent : bucket;
        double ready = backward * (sent + n) / bytes, takes = share * line_seconds(&l, n);
        free_at = (free_at > ready ? free_at : ready) + takes;
        carried += takes;
    }
    free_at = (free_at > backward ? free_at : backward) + share * line_seconds(&l, last);
    carried += share * line_seconds(&l, last);
    tail = free_at - backward + line_seconds(&l, 128.0 * l.ranks);  /* and the table of what ranks found */
    most = (carried < backward ? carried : backward) / carried;
    gather = how == ALL_GET_ALL ? 0 : 0.5 * line_seconds(&l, m->parameters * 2);
    printf("%-11s %-25s %-5s %-11s %9.1f %9.1f %9.1f %9.1f %7.1f%% %7.1f%% %10.3f\n", m->name, where,
           bytes_each > 2 ? "f32" : "bf16", names[how], 1e3 * step, 1e3 * carried, 1e3 * gather,
           1e3 * (tail + gather), 100 * (1 - (tail < carried ? tail : carried) / carried), 100 * most,
           step / (step + tail + gather));
}

static void predictions(void) {
    const line nvlink = {450e9, 5e-6, 8};               /* 900 GB/s: 450 each way */
    const line ethernet = {12.5e9, 20e-6, 16};          /* 100 Gbit/s */
    const model small = {"GPT-2 124M", 124e6, 50257 * 768.0}, large = {"GPT-2 1.5B", 1558e6, 50257 * 1600.0};
    printf("\nprediction: ranges of 25 MiB; 400 Tflop/s sustained on a GPU, 3 Tflop/s on a machine without; 65,536 "
           "tokens a\nrank of 124M, 32,768 of 1.5B, 8,192 on a CPU; ms; weights are bf16\n");
    printf("%-11s %-25s %-5s %-11s %9s %9s %9s %9s %8s %8s %10s\n", "model", "machines", "sums", "way", "a step",
           "sums take", "gathering", "added", "hidden", "at most", "efficiency");
    for (int low = 0; low < 2; low++)
        for (way how = ALL_GET_ALL; how <= SCATTERED; how = (way)(how + 1)) {
            double bytes = low ? 2 : 4;
            predict(&small, 65536, 400e12, "8 GPUs, 900 GB/s", nvlink, bytes, how);
            predict(&large, 32768, 400e12, "8 GPUs, 900 GB/s", nvlink, bytes, how);
            predict(&small, 65536, 400e12, "16 GPUs, 100 Gbit/s each", ethernet, bytes, how);
            predict(&large, 32768, 400e12, "16 GPUs, 100 Gbit/s each", ethernet, bytes, how);
            predict(&small, 8192, 3e12, "16 CPUs, 100 Gbit/s each", ethernet, bytes, how);
        }
}

/* --- 4. one rank ---------------------------------------------------------------------------- */

static double seconds_of(const net *n, const float *x, int steps) {
    double began = now();
    for (int i = 0; i < steps; i++) net_step(n, x);
    return now() - began;
}

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

enum { TURNS = 41, TURN_STEPS = 10 };

/* which NULL: both in turns. A small model: what does not depend on its size shows most. */
static void one_rank(const char *which, int steps) {
    static float x[64 * 64];
    mixp_ranks_desc ranks;
    double ratio[TURNS], least = 1e9;
    memset(&ranks, 0, sizeof ranks);
    ranks.size = 1;
    net without = net_open(64, 4, NULL);
    net with = net_open(64, 4, &ranks);
    for (int i = 0; i < 64 * 64; i++) x[i] = (float)gradient(0.1);
    if (which) seconds_of(strcmp(which, "one") ? &without : &with, x, steps);
    for (int i = -2; i < TURNS && !which; i++) {        /* two to warm up */
        double a = seconds_of(&without, x, TURN_STEPS), b = seconds_of(&with, x, TURN_STEPS);
        if (i >= 0) ratio[i] = b / a;
        if (a < least) least = a;
    }
    if (!which) qsort(ratio, TURNS, sizeof *ratio, by_size);
    if (!which)
        printf("\none rank: a step of 4 layers of 64 x 64 takes %.1f us; with a world of one %+.2f%% (median "
               "of %d turns, from %+.2f%% to %+.2f%%)\n", 1e6 * least / TURN_STEPS,
               100 * (ratio[TURNS / 2] - 1), TURNS, 100 * (ratio[0] - 1), 100 * (ratio[TURNS - 1] - 1));
    mixp_context_free(without.ctx);
    mixp_context_free(with.ctx);
}

/* --- 5. additions ---------------------------------------------------------------------------- */

/* The CPU's time, for the machine may be busy; the least of 40 turns. */
static double addition(mixp_dtype dtype, void *a, const void *b, int64_t n) {
    const void *rows[2] = {a, b};
    double least = HUGE_VAL;
    for (int turn = 0; turn < 40; turn++) {
        struct timespec from, to;
        clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &from);
        ddp_fold(a, rows, 2, n, dtype, 0);
        clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &to);
        double took = (double)(to.tv_sec - from.tv_sec) + 1e-9 * (double)(to.tv_nsec - from.tv_nsec);
        if (took < least) least = took;
    }
    return 1e9 * least / (double)n;
}

static void additions(void) {
    static const mixp_dtype dtypes[] = {MIXP_F32, MIXP_BF16, MIXP_F16, MIXP_F64, MIXP_I32};
    const int64_t n = 1 << 20;
    char *a = calloc((size_t)n, 8), *b = calloc((size_t)n, 8);
    for (size_t k = 0; a && b && k < sizeof dtypes / sizeof *dtypes; k++)
        printf("the sum of two ranks, %-4s: %.2f ns an element\n", mixp_dtype_name(dtypes[k]),
               addition(dtypes[k], a, b, n));
    free(a);
    free(b);
}

/* --- 6. counted ------------------------------------------------------------------------------ */

/* What the hooks of rank 0 of a world were asked for: all other ranks are as rank 0. */
typedef struct counts {
    int    ranks, calls;
    double gradients, weights, tables;  /* bytes that a ring sends */
    double messages;                    /* of a ring */
    double held, most;                  /* bytes of memory: now, and at most */
} counts;

static void count_ring(counts *c, double *of, double bytes, double turns) {
    const double hops = turns * (c->ranks - 1);
    *of += hops / c->ranks * bytes;
    c->messages += hops;
    c->calls++;
}
static const char *count_sum(void *user, void *data, int64_t count, mixp_dtype dtype, void *stream, double seconds) {
    counts *c = user;
    double *table = data;
    const int64_t words = count / c->ranks;
    (void)stream, (void)seconds;
    for (int64_t i = words; dtype == MIXP_F64 && i < count; i++) table[i] = table[i % words];
    count_ring(c, dtype == MIXP_F64 ? &c->tables : &c->gradients, (double)count * (double)mixp_dtype_size(dtype), 2);
    return NULL;
}
static const char *count_scatter(void *user, void *data, int64_t count, mixp_dtype dtype, void *stream,
                                 double seconds) {
    counts *c = user;
    (void)data, (void)stream, (void)seconds;
    count_ring(c, &c->gradients, (double)count * c->ranks * (double)mixp_dtype_size(dtype), 1);
    return NULL;
}
static const char *count_gather(void *user, void *data, int64_t count, mixp_dtype dtype, void *stream,
                                double seconds) {
    counts *c = user;
    (void)data, (void)stream, (void)seconds;
    count_ring(c, &c->weights, (double)count * c->ranks * (double)mixp_dtype_size(dtype), 1);
    return NULL;
}

enum { HEAD = 64 };     /* bytes before each piece of memory, which hold its size */
static void *count_allocate(size_t bytes, void *user) {
    counts *c = user;
    char *p = malloc(bytes + HEAD);
    if (!p) return NULL;
    memcpy(p, &bytes, sizeof bytes);
    c->held += (double)bytes;
    if (c->held > c->most) c->most = c->held;
    return p + HEAD;
}
static void count_release(void *p, void *user) {
    counts *c = user;
    size_t bytes;
    if (!p) return;
    memcpy(&bytes, (char *)p - HEAD, sizeof bytes);
    c->held -= (double)bytes;
    free((char *)p - HEAD);
}

typedef struct counted_way {
    const char *name;
    mixp_dtype  dtype, wire;            /* of parameters, and of gradients in transit */
    int         low_sums, shard, scatter, guard;
} counted_way;

enum { COUNTED_LAYERS = 8, COUNTED_WIDTH = 1024, COUNTED_STEPS = 4 };

static void counted_steps(const counted_way *w, mixp_context *ctx, counts *c, counts *start) {
    const int64_t shape[2] = {COUNTED_WIDTH, COUNTED_WIDTH}, batch[2] = {1, COUNTED_WIDTH};
    mixp_tensor *weight[COUNTED_LAYERS];
    mixp_optimizer *opt = mixp_optimizer_new(ctx, NULL);
    mixp_guard_desc guard;
    static float x[COUNTED_WIDTH];
    memset(&guard, 0, sizeof guard);
    guard.every = 1;
    for (int i = 0; i < COUNTED_LAYERS; i++) {
        char name[16];
        snprintf(name, sizeof name, "w%d", i);
        weight[i] = mixp_param(ctx, name, w->dtype, 2, shape);
        mixp_init_normal(weight[i], 0, 0.03);
        mixp_optimizer_add(opt, weight[i], NULL);
    }
    if (w->guard) mixp_guard_start(ctx, &guard);
    for (int i = 0; i < COUNTED_WIDTH; i++) x[i] = (float)(i % 7) - 3;
    for (int step = 0; step < COUNTED_STEPS; step++) {
        mixp_tensor *h = NULL;
        if (step == 1) {
            *start = *c;
            c->calls = 0;
            c->gradients = c->weights = c->tables = c->messages = 0;
        }
        mixp_step_begin(ctx);
        mixp_zero_grad(opt);
        MIXP_AUTOCAST(ctx, MIXP_BF16) {
            h = mixp_input(ctx, MIXP_F32, 2, batch, x);
            for (int i = 0; i < COUNTED_LAYERS; i++) h = mixp_tanh(ctx, mixp_linear(ctx, h, weight[i], NULL));
            h = mixp_mean(ctx, h, MIXP_ALL, 0);
        }
        mixp_backward(ctx, h);
        mixp_optimizer_step(opt);
    }
}

static void count_way(const counted_way *w, int ranks) {
    const double steps = COUNTED_STEPS - 1;
    mixp_context_desc d;
    mixp_ranks_desc r;
    counts c, start;
    memset(&c, 0, sizeof c);
    start = c;
    memset(&d, 0, sizeof d);
    memset(&r, 0, sizeof r);
    c.ranks = r.size = ranks;
    r.user = d.user = &c;
    r.sum = count_sum, r.all_gather = count_gather, r.reduce_scatter = count_scatter;
    r.wire = w->wire, r.low_sums = w->low_sums, r.shard = w->shard, r.scatter = w->scatter;
    r.bucket_bytes = 4 << 20, r.check_every = -1;
    d.allocate = count_allocate, d.release = count_release;
    d.ranks = &r;
    d.threads = 1;
    mixp_context *ctx = mixp_context_new(&d);
    counted_steps(w, ctx, &c, &start);
    if (mixp_context_error(ctx, NULL) != MIXP_OK) printf("an error: the figures mean nothing\n");
    printf("%-30s %5d %6.1f %9.0f %10.2f %9.2f %9.2f %9.2f %9.2f\n", w->name, ranks, c.calls / steps,
           c.messages / steps, 1e-6 * c.gradients / steps, 1e-6 * c.weights / steps, 1e-6 * c.tables / steps,
           1e-6 * start.tables, 1e-6 * c.most);
    mixp_context_free(ctx);
}

static void counted(void) {
    static const int sizes[] = {2, 4, 8, 1024};
    static const counted_way ways[] = {
        {"f32, all get all", MIXP_F32, MIXP_F32, 0, 0, 0, 0}, {"f32, bf16 on the wire", MIXP_F32, MIXP_BF16, 0, 0, 0, 0},
        {"f32, sharded", MIXP_F32, MIXP_F32, 0, 1, 0, 0}, {"f32, scattered", MIXP_F32, MIXP_F32, 0, 1, 1, 0},
        {"f32, scattered, bf16 wire", MIXP_F32, MIXP_BF16, 0, 1, 1, 0},
        {"bf16, all get all", MIXP_BF16, MIXP_F32, 0, 0, 0, 0}, {"bf16, low_sums", MIXP_BF16, MIXP_F32, 1, 0, 0, 0},
        {"bf16, scattered, low_sums", MIXP_BF16, MIXP_F32, 1, 1, 1, 0},
        {"f32, all get all, guarded", MIXP_F32, MIXP_F32, 0, 0, 0, 1}
    };
    printf("counted: rank 0 of a world, a step; %d weights of %d x %d (%.1f million), AdamW, buckets of 4 MiB; MB that\n"
           "this rank sends by a ring, 2 (N-1) messages a sum and N-1 a scattered sum or a gathering\n",
           COUNTED_LAYERS, COUNTED_WIDTH, COUNTED_WIDTH, 1e-6 * COUNTED_LAYERS * COUNTED_WIDTH * COUNTED_WIDTH);
    printf("%-30s %5s %6s %9s %10s %9s %9s %9s %9s\n", "parameters, way", "ranks", "calls", "messages", "gradients",
           "weights", "tables", "at start", "memory");
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++)
        for (size_t n = 0; n < sizeof sizes / sizeof *sizes; n++) count_way(&ways[i], sizes[n]);
}

int main(int argc, char **argv) {
    int width = argc > 1 ? atoi(argv[1]) : 384, layers = argc > 2 ? atoi(argv[2]) : 8;
    int rounds = argc > 3 ? atoi(argv[3]) : 5;
    if (argc > 1 && (strcmp(argv[1], "none") == 0 || strcmp(argv[1], "one") == 0)) {
        one_rank(argv[1], argc > 2 ? layers : 10);
        return 0;
    }
    if (argc > 1 && strcmp(argv[1], "losses") == 0) {
        losses();
        return 0;
    }
    if (argc > 1 && strcmp(argv[1], "predictions") == 0) {
        predictions();
        return 0;
    }
    if (argc > 1 && strcmp(argv[1], "counted") == 0) {
        counted();
        return 0;
    }
    if (argc > 1 && strcmp(argv[1], "additions") == 0) {
        additions();
        return 0;
    }
    if (width < 16 || layers < 1 || layers > 64 || rounds < 1) {
        fprintf(stderr, "usage: bench_ranks [width >= 16] [layers, 1 to 64] [rounds >= 1]\n");
        return 2;
    }
    losses();
    overlaps(width, layers, rounds);
    predictions();
    one_rank(NULL, 0);
    additions();
    counted();
    return 0;
}
