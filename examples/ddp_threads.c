/* ddp_threads.c - threads of one process as ranks, one context each: no network, no copies
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 *     int train(const mixp_ranks_desc *ranks, void *user);     one rank; returns 0 on success
 *     return ddp_threads(4, train, NULL);
 *
 * Include this file after mixprec.h, and link with -pthread. train makes its context with `ranks`
 * and one thread, and writes nothing that another rank reads. Sums are added in the order of ranks
 * (ddp_sum.h), so they have the bits of one rank. Each rank reads the other ranks' gradients in
 * place, and adds its share. For CPUs only. A crash ends all ranks; ddp_fork.c keeps them apart.
 */
#ifndef MIXPREC_H_INCLUDED
#  include "../mixprec.h"
#endif
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include "ddp_sum.h"

enum { DDP_THREADS_MOST = 64 };
typedef int ddp_threads_fn(const mixp_ranks_desc *ranks, void *user);

typedef struct ddp_thread {             /* a rank */
    struct ddp_threads_world *world;
    mixp_ranks_desc ranks;
    int64_t   met, asked[3];            /* its meetings; its operation, count and dtype */
    int       ended, failed;
    char     *data;
} ddp_thread;

typedef struct ddp_threads_world {
    pthread_mutex_t lock;               /* of everything below */
    pthread_cond_t  moved;
    ddp_threads_fn *fn;
    void           *user;
    int             size, busy;         /* busy: ranks that work on their own */
    char            why[340];           /* why the world has failed; "": it has not */
    ddp_thread      rank[DDP_THREADS_MOST];
} ddp_threads_world;

static double ddp_threads_now(void) {
    struct timespec t;
    return clock_gettime(CLOCK_MONOTONIC, &t) ? 0 : (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Under the lock: the world fails; the first reason stays. */
static void ddp_threads_tell(ddp_threads_world *w, const char *text, int rank, const char *more) {
    if (!w->why[0]) snprintf(w->why, sizeof w->why, text, rank, more);
    pthread_cond_broadcast(&w->moved);
}

/* Under the lock: the first rank that has not come to this rank's meeting, or -1. */
static int ddp_threads_late(const ddp_thread *t) {
    for (int r = 0; r < t->world->size; r++)
        if (t->world->rank[r].met < t->met) return r;
    return -1;
}

/* Under the lock: waits for at most a tenth of a second. */
static void ddp_threads_doze(ddp_threads_world *w) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    if (t.tv_nsec < 900000000) t.tv_nsec += 100000000;
    else t.tv_sec++, t.tv_nsec -= 900000000;
    pthread_cond_timedwait(&w->moved, &w->lock, &t);
}

/* Waits until all ranks have come. Returns NULL on all of them, or why the world has failed on all
 * of them. asked: the operation that begins; NULL = all ranks are in one, and end it. */
static const char *ddp_threads_meet(ddp_thread *t, const int64_t *asked, char *data,
                                    double seconds) {
    ddp_threads_world *w = t->world;
    const double last = ddp_threads_now() + seconds * DDP_BUSY_TIMES;
    double until = ddp_threads_now() + seconds;
    int    late, failed;
    pthread_mutex_lock(&w->lock);
    failed = asked && w->why[0];        /* then others may still read this rank's last request */
    t->met += !failed;
    if (!failed && asked) memcpy(t->asked, asked, sizeof t->asked), t->data = data;
    if (ddp_threads_late(t) < 0) pthread_cond_broadcast(&w->moved);
    while (!failed && (late = ddp_threads_late(t)) >= 0) {
        if (w->busy && ddp_threads_now() < last) until = ddp_threads_now() + seconds;
        if (asked && w->rank[late].ended) ddp_threads_tell(w, "rank %d is gone%s", late, "");
        else if (asked && ddp_threads_now() > until)
            ddp_threads_tell(w, "rank %d did not answer in time%s", late, "");
        failed = asked && w->why[0];
        if (!failed) ddp_threads_doze(w);
    }
    pthread_mutex_unlock(&w->lock);
    return failed ? w->why : NULL;
}

/* Do all ranks ask for the same? All of them find it when they do not. */
static const char *ddp_threads_alike(ddp_thread *t) {
    ddp_threads_world *w = t->world;
    int r = 0;
    while (r < w->size && !memcmp(w->rank[r].asked, t->asked, sizeof t->asked)) r++;
    if (r == w->size) return NULL;
    pthread_mutex_lock(&w->lock);
    if (!w->why[0]) ddp_unlike(w->why, sizeof w->why, t->ranks.rank, t->asked, r, w->rank[r].asked);
    pthread_mutex_unlock(&w->lock);
    return w->why;
}

/* The elements of share r, of `all` that are cut at every `share`. */
static int64_t ddp_threads_cut(int r, int64_t share, int64_t all)
{ return all < r * share ? 0 : all - r * share < share ? all - r * share : share; }

/* All ranks have given their data: each adds its share or piece of all, where only this rank reads
 * or writes meanwhile; then all copy the others' shares. */
static void ddp_threads_work(ddp_thread *t, int64_t share, int64_t all) {
    const ddp_threads_world *w = t->world;
    const int        rank = t->ranks.rank, what = (int)t->asked[0];
    const mixp_dtype dtype = (mixp_dtype)t->asked[2];
    const size_t     each = (size_t)share * mixp_dtype_size(dtype), own = (size_t)rank * each;
    const int64_t    n = ddp_threads_cut(rank, share, all);
    const void      *rows[DDP_THREADS_MOST];
    for (int r = 0; r < w->size; r++) rows[r] = w->rank[r].data + (n ? own : 0);
    if (what != DDP_GATHER && n) ddp_fold(t->data + own, rows, w->size, n, dtype, what == DDP_MAX);
    if (what != DDP_GATHER) ddp_threads_meet(t, NULL, NULL, 0);
    for (int r = 0; r < w->size && what != DDP_SCATTER; r++) {
        const size_t its = (size_t)ddp_threads_cut(r, share, all) * mixp_dtype_size(dtype);
        if (r != rank && its)
            memcpy(t->data + (size_t)r * each, w->rank[r].data + (size_t)r * each, its);
    }
    if (what != DDP_SCATTER) ddp_threads_meet(t, NULL, NULL, 0);
}
static const char *ddp_threads_run(ddp_thread *t, int what, char *data, int64_t count,
                                   mixp_dtype dtype, double seconds) {
    const int     sums = what == DDP_SUM || what == DDP_MAX, size = t->world->size;
    const int64_t asked[3] = {what, count, dtype};
    const char   *why = ddp_threads_meet(t, asked, data, seconds);
    if (!why) why = ddp_threads_alike(t);
    if (!why)
        ddp_threads_work(t, sums ? (count + size - 1) / size : count, sums ? count : size * count);
    return why;
}
#define DDP_THREADS_HOOK(name, what)                                                              \
    static const char *name(void *user, void *data, int64_t count, mixp_dtype dtype,              \
                            void *stream, double seconds) {                                       \
        if (stream) return "CPUs only: use ddp_nccl.c for GPUs";                                  \
        return ddp_threads_run((ddp_thread *)user, what, (char *)data, count, dtype, seconds);    \
    }
DDP_THREADS_HOOK(ddp_threads_sum, DDP_SUM)
DDP_THREADS_HOOK(ddp_threads_max, DDP_MAX)
DDP_THREADS_HOOK(ddp_threads_gather, DDP_GATHER)
DDP_THREADS_HOOK(ddp_threads_scatter, DDP_SCATTER)

static void ddp_threads_stop(void *user, const char *why) {
    ddp_thread *t = (ddp_thread *)user;
    pthread_mutex_lock(&t->world->lock);
    ddp_threads_tell(t->world, "rank %d stopped: %s", t->ranks.rank, why);
    pthread_mutex_unlock(&t->world->lock);
}
static void ddp_threads_busy(void *user, int on) {
    ddp_thread *t = (ddp_thread *)user;
    pthread_mutex_lock(&t->world->lock);
    t->world->busy += on ? 1 : -1;
    pthread_mutex_unlock(&t->world->lock);
}
static void *ddp_threads_rank(void *user) {
    ddp_thread *t = (ddp_thread *)user;
    t->failed = t->world->fn(&t->ranks, t->world->user);
    if (t->failed) ddp_threads_stop(t, "its function has failed");
    pthread_mutex_lock(&t->world->lock);
    t->ended = 1;
    pthread_cond_broadcast(&t->world->moved);
    pthread_mutex_unlock(&t->world->lock);
    return NULL;
}

/* Runs fn on `size` ranks, from 1 to 64; rank 0 is the calling thread. Returns 0 when all ranks
 * have returned 0, else 1. Worlds are independent: two may run at once. */
static int ddp_threads(int size, ddp_threads_fn *fn, void *user) {
    ddp_threads_world w;
    pthread_t         thread[DDP_THREADS_MOST];
    int               n, failed = 0;
    if (size < 1 || size > DDP_THREADS_MOST) return 1;
    memset(&w, 0, sizeof w);
    w.size = size, w.fn = fn, w.user = user;
    if (pthread_mutex_init(&w.lock, NULL) || pthread_cond_init(&w.moved, NULL)) return 1;
    for (int r = 0; r < size; r++) {
        mixp_ranks_desc *d = &w.rank[r].ranks;
        w.rank[r].world = &w;
        d->rank = r, d->size = size, d->user = &w.rank[r];
        d->sum = ddp_threads_sum, d->max = ddp_threads_max, d->all_gather = ddp_threads_gather;
        d->reduce_scatter = ddp_threads_scatter, d->stop = ddp_threads_stop;
        d->busy = ddp_threads_busy;
    }
    for (n = 1; n < size && !failed; n++)
        failed = pthread_create(&thread[n], NULL, ddp_threads_rank, &w.rank[n]) != 0;
    if (failed) n--, ddp_threads_stop(&w.rank[0], "cannot start all threads");
    else ddp_threads_rank(&w.rank[0]);
    for (int r = 1; r < n; r++) pthread_join(thread[r], NULL);
    for (int r = 0; r < size; r++) failed |= w.rank[r].failed != 0;
    pthread_cond_destroy(&w.moved), pthread_mutex_destroy(&w.lock);
    return failed;
}
