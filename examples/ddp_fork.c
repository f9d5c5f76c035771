/* ddp_fork.c - many ranks on one machine: fork and shared memory carry mixprec's sums
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * Include this file after mixprec.h. Call ddp_fork(4) before mixp_context_new and before anything
 * uses OpenMP. Give each context one thread. Sums are added in the order of ranks, so they have the
 * bits of one rank. Each rank adds its share of a sum (ddp_sum.h), and all ranks copy the shares. A
 * rank that has waited for a while polls every millisecond.
 */
#ifndef MIXPREC_H_INCLUDED
#  include "../mixprec.h"
#endif
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include "ddp_sum.h"

enum { DDP_RANKS = 64, DDP_CHUNK = 1 << 18 /* bytes at once */ };
#ifndef DDP_LINGER
#  define DDP_LINGER 10.0   /* seconds that a rank may take to end after another has failed */
#endif

static struct ddp_board {               /* what all ranks see */
    long long barriers[DDP_RANKS];      /* number of barriers that each rank has reached */
    int       failed;                   /* the rank that failed, plus 1; its `why` is complete */
    int       busy;                     /* ranks that work on their own: the limit is longer */
    char      why[DDP_RANKS][300];      /* each rank writes its own, before it sets `failed` */
    int64_t   asked[2][DDP_RANKS][3];   /* each rank's operation, count and dtype */
    char      room[];                   /* two chunks for each rank: one is filled while others may
                                           still read the other */
} *ddp_board;

static struct ddp_self {                /* a rank's own state */
    int       rank, size, failed, gone[DDP_RANKS];     /* failed: 1: a child has */
    int       turn;                     /* which of the two chunks is next */
    pid_t     first, child[DDP_RANKS];  /* rank 0, and the ranks that it forked */
    char      why[340];
} ddp;

static double ddp_now(void) {
#ifdef CLOCK_MONOTONIC                  /* a monotonic clock, where it is declared */
    struct timespec steady;
    if (clock_gettime(CLOCK_MONOTONIC, &steady) == 0)
        return (double)steady.tv_sec + 1e-9 * (double)steady.tv_nsec;
#endif
    struct timeval t;
    return gettimeofday(&t, NULL) ? 0 : (double)t.tv_sec + 1e-6 * (double)t.tv_usec;
}

static int ddp_failed(void) { return __atomic_load_n(&ddp_board->failed, __ATOMIC_SEQ_CST); }

/* Publishes a failure; the first rank to do so wins. A rank that dies earlier publishes nothing. */
static void ddp_tell(const char *text, int rank, const char *why) {
    if (ddp_failed()) return;
    snprintf(ddp_board->why[ddp.rank], sizeof ddp_board->why[0], text, rank, why);
    __sync_bool_compare_and_swap(&ddp_board->failed, 0, ddp.rank + 1);
}
static void ddp_stop(void *user, const char *why)
{ (void)user; ddp_tell("rank %d stopped: %s", ddp.rank, why); }

static void ddp_busy(void *user, int on)
{ (void)user; __atomic_add_fetch(&ddp_board->busy, on ? 1 : -1, __ATOMIC_SEQ_CST); }

/* Has rank r not reached this rank's barrier yet? */
static int ddp_lacks(int r) {
    return __atomic_load_n(&ddp_board->barriers[r], __ATOMIC_SEQ_CST) <
           ddp_board->barriers[ddp.rank];
}

/* Has rank r died? Rank 0 can see its children die; the children can see rank 0 die. */
static int ddp_ended(int r) {
    int status = 0;
    if (ddp.rank) return r == 0 && getppid() != ddp.first;
    if (ddp.child[r] <= 0 || waitpid(ddp.child[r], &status, WNOHANG) == 0) return 0;
    ddp.failed |= status != 0;
    ddp.child[r] = 0;                   /* the system may reuse the process's number */
    return 1;
}

/* Looks for ranks that died before this barrier. A rank that is done has reached it. */
static void ddp_look_for_dead(void) {
    for (int r = 0; r < ddp.size; r++) {
        ddp.gone[r] |= ddp_ended(r);
        if (ddp.gone[r] && ddp_lacks(r)) ddp_tell("rank %d is gone%s", r, "");
    }
}

/* Why the world has failed. */
static const char *ddp_told(void) {
    snprintf(ddp.why, sizeof ddp.why, "%s", ddp_board->why[ddp_failed() - 1]);
    return ddp.why;
}

static const char *ddp_barrier(double seconds) {
    const double last = ddp_now() + seconds * DDP_BUSY_TIMES;
    double until = ddp_now() + seconds;
    __atomic_add_fetch(&ddp_board->barriers[ddp.rank], 1, __ATOMIC_SEQ_CST);
    for (int r = 0, turn = 0; r < ddp.size; turn++) {
        while (r < ddp.size && !ddp_lacks(r)) r++;
        if (r == ddp.size) break;       /* all have come, even if one has died since */
        if (turn >= 500) poll(NULL, 0, 1);
        else if (turn) sched_yield();
        if (turn % 16 == 15) ddp_look_for_dead();
        if (__atomic_load_n(&ddp_board->busy, __ATOMIC_SEQ_CST)) until = ddp_now() + seconds;
        if (ddp_now() > last) ddp_tell("rank %d is busy, and did not return in time%s", r, "");
        else if (ddp_now() > until) ddp_tell("rank %d did not answer in time%s", r, "");
        if (!ddp_failed()) continue;
        return ddp_told();
    }
    return NULL;
}

/* Rank r's chunk of this turn. */
static char *ddp_room(int r)
{ return ddp_board->room + (size_t)((ddp.turn & 1) * ddp.size + r) * DDP_CHUNK; }

/* Do all ranks ask for the same? */
static const char *ddp_alike(const int64_t asked[3]) {
    for (int r = 0; r < ddp.size; r++) {
        const int64_t *its = ddp_board->asked[ddp.turn & 1][r];
        if (memcmp(its, asked, sizeof *its * 3))
            return ddp_unlike(ddp.why, sizeof ddp.why, ddp.rank, asked, r, its);
    }
    return NULL;
}

/* The sum of all ranks' elements of [at, at + bytes) of their chunks, into this rank's own. */
static void ddp_fold_share(int what, mixp_dtype dtype, size_t at, size_t bytes) {
    const void *rows[DDP_RANKS];
    for (int r = 0; r < ddp.size; r++) rows[r] = ddp_room(r) + at;
    ddp_fold(ddp_room(ddp.rank) + at, rows, ddp.size, (int64_t)(bytes / mixp_dtype_size(dtype)),
             dtype, what == DDP_MAX);
}

/* A chunk of `bytes` lies in every room: its sum, to `to`. Each rank adds an equal share. */
static const char *ddp_sum_chunk(int what, mixp_dtype dtype, char *to, size_t bytes,
                                 double seconds) {
    const size_t share = (bytes / (size_t)ddp.size & ~(size_t)63) + 64;
    const char  *why;
    for (int r = 0; r < ddp.size; r++) {
        const size_t at = (size_t)r * share, end = at + share < bytes ? at + share : bytes;
        if (r == ddp.rank && at < end) ddp_fold_share(what, dtype, at, end - at);
    }
    why = ddp_barrier(seconds);
    for (size_t at = 0, r = 0; at < bytes && !why; at += share, r++)
        memcpy(to + at, ddp_room((int)r) + at, bytes - at < share ? bytes - at : share);
    return why;
}

/* Takes the result of a chunk that all ranks have put on the board. `at`: the chunk's place in the
 * data, which has `total` bytes a piece. */
static const char *ddp_take(int what, mixp_dtype dtype, char *data, size_t at, size_t bytes,
                            size_t total, double seconds) {
    const size_t mine = (size_t)ddp.rank * total;
    const size_t step = DDP_CHUNK / (size_t)ddp.size & ~(size_t)63;
    if (what == DDP_SCATTER) {
        ddp_fold_share(what, dtype, (size_t)ddp.rank * step, bytes);
        memcpy(data + mine + at, ddp_room(ddp.rank) + (size_t)ddp.rank * step, bytes);
        return NULL;
    }
    if (what != DDP_GATHER) return ddp_sum_chunk(what, dtype, data + at, bytes, seconds);
    for (int r = 0; r < ddp.size; r++) memcpy(data + (size_t)r * total + at, ddp_room(r), bytes);
    return NULL;
}

/* Each rank puts a chunk on the board (for a scattered sum, a chunk of every rank's piece). When
 * all ranks have done so, each takes its part. */
static const char *ddp_run(int what, char *data, int64_t count, mixp_dtype dtype, double seconds) {
    const int64_t asked[3] = {what, count, dtype};
    const size_t  total = (size_t)count * mixp_dtype_size(dtype);
    const int     pieces = what == DDP_SCATTER ? ddp.size : 1;
    const size_t  step = DDP_CHUNK / (size_t)pieces & ~(size_t)63;
    const char   *own = data + (what == DDP_GATHER ? (size_t)ddp.rank * total : 0), *why = NULL;
    if (ddp.why[0]) return ddp.why;     /* others may still read this rank's last request */
    if (ddp_failed()) return ddp_told();
    for (size_t at = 0; at < total && !why; at += step, ddp.turn++) {
        size_t bytes = total - at < step ? total - at : step;
        memcpy(ddp_board->asked[ddp.turn & 1][ddp.rank], asked, sizeof asked);
        for (int p = 0; p < pieces; p++)
            memcpy(ddp_room(ddp.rank) + (size_t)p * step, own + (size_t)p * total + at, bytes);
        why = ddp_barrier(seconds);
        if (!why) why = ddp_alike(asked);
        if (!why) why = ddp_take(what, dtype, data, at, bytes, total, seconds);
    }
    return why;
}

#define DDP_HOOK(name, what)                                                                      \
    static const char *name(void *user, void *data, int64_t count, mixp_dtype dtype,              \
                            void *stream, double seconds)                                         \
    { return user && !stream ? ddp_run(what, data, count, dtype, seconds) : "for CPUs alone"; }
DDP_HOOK(ddp_sum, DDP_SUM)
DDP_HOOK(ddp_max, DDP_MAX)
DDP_HOOK(ddp_gather, DDP_GATHER)
DDP_HOOK(ddp_scatter, DDP_SCATTER)

/* Restores the default for SIGCHLD: a process that ignores SIGCHLD gets no exit status of its
 * children. */
static void ddp_heed_children(void) {
#ifdef SA_NOCLDSTOP                     /* where the program may see sigaction */
    struct sigaction now;
    if (sigaction(SIGCHLD, NULL, &now) == 0 && now.sa_handler == SIG_IGN) signal(SIGCHLD, SIG_DFL);
#endif
}

/* Forks this process, which becomes rank 0, into `size` ranks. On failure the size is 0, which
 * mixp_context_new refuses. */
static mixp_ranks_desc ddp_fork(int size) {
    mixp_ranks_desc d;
    int zero;
    size_t bytes = sizeof *ddp_board + (size_t)size * 2 * DDP_CHUNK;
    memset(&d, 0, sizeof d);
    memset(&ddp, 0, sizeof ddp);
    if (size < 1 || size > DDP_RANKS) return d;
    zero = open("/dev/zero", O_RDWR);
    if (zero < 0) return d;
    ddp_board = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, zero, 0);
    close(zero);
    if (ddp_board == MAP_FAILED) return d;
    ddp.size = d.size = size;
    ddp.first = getpid();
    fflush(NULL);                       /* otherwise each rank would write the buffer */
    ddp_heed_children();
    for (int r = 1; r < size && !ddp.rank; r++) {
        ddp.child[r] = fork();
        if (ddp.child[r] == 0) ddp.rank = r;
        if (ddp.child[r] < 0) ddp_stop(NULL, "cannot start another process");
    }
    d.rank = ddp.rank, d.user = &ddp;
    d.sum = ddp_sum, d.max = ddp_max, d.all_gather = ddp_gather, d.reduce_scatter = ddp_scatter;
    d.stop = ddp_stop, d.busy = ddp_busy;
    return d;
}

/* Waits until child r has ended. After the world has failed, kills a child that does not end within
 * DDP_LINGER seconds, and gives up after another DDP_LINGER seconds. */
static void ddp_wait_for(int r) {
    double kill_at = 0, now;
    int    status = 0;
    while (ddp.child[r] > 0) {
        const pid_t ended = waitpid(ddp.child[r], &status, WNOHANG);
        if (ended == ddp.child[r] || (ended < 0 && errno != EINTR)) break;
        now = ddp_now();
        if (ddp_failed() && !(kill_at > 0)) kill_at = now + DDP_LINGER;
        if (kill_at > 0 && now > kill_at) status = kill(ddp.child[r], SIGKILL) == 0;
        if (kill_at > 0 && now > kill_at + DDP_LINGER) break;
        poll(NULL, 0, 1);
    }
    if (ddp.child[r] > 0) ddp.failed |= status != 0;
    ddp.child[r] = 0;
}

/* For the end of main: rank 0 waits for the others. A rank that failed publishes its failure, so no
 * rank waits for it. Returns `failed`, or 1 when another rank has failed. */
static int ddp_wait(int failed) {
    if (failed && ddp.size) ddp_stop(NULL, "its program has ended");
    for (int r = 1; r < ddp.size && !ddp.rank; r++) ddp_wait_for(r);    /* for no other child */
    return failed ? failed : ddp.failed;
}
