/* ddp_fork.c - many ranks on one machine: fork and shared memory carry mixprec's sums
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * Include it behind mixprec.h; call ddp_fork(4) before mixp_context_new, and before anything uses
 * OpenMP; give each context one thread. Sums are taken in the order of ranks: the bits of one.
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

enum { DDP_SUM, DDP_MAX, DDP_GATHER, DDP_SCATTER, DDP_RANKS = 64, DDP_CHUNK = 1 << 18 /* bytes at once */ };

static struct ddp_board {               /* what all ranks see */
    long long barriers[DDP_RANKS];      /* that each rank has come to, all time */
    int       failed;                   /* whose `why` tells it, from 1: that is whole then */
    char      why[DDP_RANKS][300];      /* each writes its own, before it is known */
    int64_t   asked[DDP_RANKS][3];      /* each rank's operation, count and dtype */
    char      room[];                   /* a chunk for each rank */
} *ddp_board;

static struct ddp_self {                /* what one has of its own */
    int       rank, size, failed, gone[DDP_RANKS];     /* failed: 1: a child has */
    pid_t     first, child[DDP_RANKS];  /* rank 0, and those that it forked */
    char      why[340];
} ddp;

static double ddp_now(void) {
#ifdef CLOCK_MONOTONIC                  /* a clock that nobody sets, where the program may see it */
    struct timespec steady;
    if (clock_gettime(CLOCK_MONOTONIC, &steady) == 0)
        return (double)steady.tv_sec + 1e-9 * (double)steady.tv_nsec;
#endif
    struct timeval t;
    return gettimeofday(&t, NULL) ? 0 : (double)t.tv_sec + 1e-6 * (double)t.tv_usec;
}

static int ddp_failed(void) { return __atomic_load_n(&ddp_board->failed, __ATOMIC_SEQ_CST); }

/* The first who knows tells all. Who dies before it has told has told nothing. */
static void ddp_tell(const char *text, int rank, const char *why) {
    if (ddp_failed()) return;
    snprintf(ddp_board->why[ddp.rank], sizeof ddp_board->why[0], text, rank, why);
    __sync_bool_compare_and_swap(&ddp_board->failed, 0, ddp.rank + 1);
}
static void ddp_stop(void *user, const char *why)
{ (void)user; ddp_tell("rank %d stopped: %s", ddp.rank, why); }

/* Has rank r still to come to this one's barrier? */
static int ddp_lacks(int r) {
    return __atomic_load_n(&ddp_board->barriers[r], __ATOMIC_SEQ_CST) <
           ddp_board->barriers[ddp.rank];
}

/* Rank 0 sees its children die, and they see it die. */
static int ddp_ended(int r) {
    int status = 0;
    if (ddp.rank) return r == 0 && getppid() != ddp.first;
    if (ddp.child[r] <= 0 || waitpid(ddp.child[r], &status, WNOHANG) == 0) return 0;
    ddp.failed |= status != 0;
    ddp.child[r] = 0;                   /* its number may be another's now */
    return 1;
}

/* Who is done has been at this barrier. */
static void ddp_look_for_dead(void) {
    for (int r = 0; r < ddp.size; r++) {
        ddp.gone[r] |= ddp_ended(r);
        if (ddp.gone[r] && ddp_lacks(r)) ddp_tell("rank %d is gone%s", r, "");
    }
}

static const char *ddp_barrier(double until) {
    __atomic_add_fetch(&ddp_board->barriers[ddp.rank], 1, __ATOMIC_SEQ_CST);
    for (int r = 0, turn = 0; r < ddp.size; turn++) {
        while (r < ddp.size && !ddp_lacks(r)) r++;
        if (turn >= 500) poll(NULL, 0, 1);
        else if (turn) sched_yield();
        if (turn % 16 == 15) ddp_look_for_dead();
        if (r < ddp.size && ddp_now() > until) ddp_tell("rank %d did not come in time%s", r, "");
        if (!ddp_failed()) continue;
        snprintf(ddp.why, sizeof ddp.why, "%s", ddp_board->why[ddp_failed() - 1]);
        return ddp.why;
    }
    return NULL;
}

/* to (op)= from, each sum rounded to the dtype, as the engines do. */
static void ddp_add(int what, mixp_dtype dtype, char *to, const char *from, int64_t n) {
    const size_t size = mixp_dtype_size(dtype);
    double       a[256], b[256];        /* two f32 added here and rounded: as by f32's own + */
    for (int64_t m; n > 0; n -= m, to += (size_t)m * size, from += (size_t)m * size) {
        m = n < 256 ? n : 256;
        mixp_convert(a, MIXP_F64, to, dtype, m);
        mixp_convert(b, MIXP_F64, from, dtype, m);
        for (int64_t i = 0; i < m; i++)
            a[i] = what != DDP_MAX ? a[i] + b[i] : b[i] > a[i] ? b[i] : a[i];
        mixp_convert(to, dtype, a, MIXP_F64, m);
    }
}

/* Each puts a chunk on the board, for a scattered sum one of every rank's piece; when all have, each
 * reads all of them, in the order of ranks. */
static const char *ddp_run(int what, char *data, int64_t count, mixp_dtype dtype, double seconds) {
    const int64_t asked[3] = {what, count, dtype};
    const size_t  size = mixp_dtype_size(dtype), total = (size_t)count * size;
    const size_t  mine = (size_t)ddp.rank * total;
    const int     scatters = what == DDP_SCATTER, pieces = scatters ? ddp.size : 1;
    const size_t  step = DDP_CHUNK / (size_t)pieces & ~(size_t)63;
    const char   *own = data + (what == DDP_GATHER ? mine : 0), *why = NULL;
    char         *sum = data + (scatters ? mine : 0);
    double        until = ddp_now() + seconds;
    if (ddp.why[0]) return ddp.why;     /* others may still read what this one asked last */
    memcpy(ddp_board->asked[ddp.rank], asked, sizeof asked);
    for (size_t at = 0; at < total && !why; at += step) {
        size_t bytes = total - at < step ? total - at : step;
        char  *room = ddp_board->room + (size_t)ddp.rank * DDP_CHUNK;
        for (int p = 0; p < pieces; p++)
            memcpy(room + (size_t)p * step, own + (size_t)p * total + at, bytes);
        why = ddp_barrier(until);
        for (int r = 0; r < ddp.size && !why; r++) {
            const char *from = ddp_board->room + (size_t)r * DDP_CHUNK;
            if (scatters) from += (size_t)ddp.rank * step;
            if (memcmp(ddp_board->asked[r], asked, sizeof asked)) why = "ranks do not ask alike";
            else if (what == DDP_GATHER) memcpy(data + (size_t)r * total + at, from, bytes);
            else if (r == 0) memcpy(sum + at, from, bytes);
            else ddp_add(what, dtype, sum + at, from, (int64_t)(bytes / size));
        }
        if (!why) why = ddp_barrier(until);
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

/* Who ignores its children's ends is not told how they ended. */
static void ddp_heed_children(void) {
#ifdef SA_NOCLDSTOP                     /* where the program may see sigaction */
    struct sigaction now;
    if (sigaction(SIGCHLD, NULL, &now) == 0 && now.sa_handler == SIG_IGN) signal(SIGCHLD, SIG_DFL);
#endif
}

/* Makes `size` ranks of this process, then rank 0. Size 0, which no context takes: it could not. */
static mixp_ranks_desc ddp_fork(int size) {
    mixp_ranks_desc d;
    int zero;
    size_t bytes = sizeof *ddp_board + (size_t)size * DDP_CHUNK;
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
    fflush(NULL);                       /* or each would write what is buffered */
    ddp_heed_children();
    for (int r = 1; r < size && !ddp.rank; r++) {
        ddp.child[r] = fork();
        if (ddp.child[r] == 0) ddp.rank = r;
        if (ddp.child[r] < 0) ddp_stop(NULL, "no more processes could be had");
    }
    d.rank = ddp.rank, d.user = &ddp;
    d.sum = ddp_sum, d.max = ddp_max, d.all_gather = ddp_gather, d.reduce_scatter = ddp_scatter;
    d.stop = ddp_stop;
    return d;
}

/* For the end of main: rank 0 waits for the others, and who has failed lets none wait for it. Returns
 * `failed`, or 1 when another has failed. */
static int ddp_wait(int failed) {
    if (failed && ddp.size) ddp_stop(NULL, "its program has ended");
    for (int r = 1; r < ddp.size && !ddp.rank; r++) {   /* for no other child of the program's */
        int status = 0;
        if (ddp.child[r] <= 0) continue;
        while (waitpid(ddp.child[r], &status, 0) < 0 && errno == EINTR) continue;
        ddp.failed |= status != 0;
    }
    return failed ? failed : ddp.failed;
}
