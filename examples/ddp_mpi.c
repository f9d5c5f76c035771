/* ddp_mpi.c - ranks over MPI: Open MPI, MPICH and other MPI libraries carry mixprec's sums
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 *     mpicc -O2 -I. train.c -o train -lm -lpthread && mpirun -n 4 ./train
 *
 * Include this file after mixprec.h. Call ddp_mpi before mixp_context_new, and ddp_mpi_end at the
 * end of main. Give each context the threads that a rank may use. A separate thread sends gradients
 * during the backward pass, because MPI engines move data only while they are called. The program's
 * own MPI calls must not run at the same time as mixp_backward. Between ranks of one machine, Open
 * MPI hides sums well only with single copies (btl_vader_single_copy_mechanism cma, the default,
 * which some containers forbid). Without them each small piece waits until both ranks have a core.
 *
 * f16 and bf16, and f32 with ordered 1: each piece goes to one rank, which adds it in f32 in the
 * order of ranks and sends it back. That takes as many bytes as a ring and gives the bits of one
 * rank. f32 with ordered 0: the engine sums in its own order, which suits the network. For a GPU
 * define DDP_MPI_CUDA and use a CUDA-aware engine. Each sum then waits for the stream first, and
 * the engine makes all sums, of f32 and f64 (ddp_nccl.c needs no such waits).
 */
#ifndef MIXPREC_H_INCLUDED
#  include "../mixprec.h"
#endif
#include <mpi.h>
#include <pthread.h>
#include <stdlib.h>
#include <time.h>
#include "ddp_sum.h"
#ifdef DDP_MPI_CUDA
#  include <cuda_runtime.h>
#endif

enum { DDP_MPI_MOST = 1 << 12, DDP_MPI_PIECE = 1 << 20 }; /* queued sums; elements at once */

typedef struct ddp_mpi_job {
    int what, on_gpu;
    char *data;
    int64_t count;
    mixp_dtype dtype;
    double seconds;
} ddp_mpi_job;

static struct ddp_mpi_state {
    pthread_mutex_t lock; /* of the fields below, up to failed */
    pthread_cond_t moved;
    ddp_mpi_job jobs[DDP_MPI_MOST];
    int64_t begun, ended; /* jobs, all time */
    int over, failed;
    pthread_t thread;
    int threaded, ordered, rank, size;
    MPI_Comm world, aside; /* aside: of words about ranks */
    int busy;              /* ranks that have announced that they are busy */
    double seconds, until; /* of the current sum: its time limit, and when that ends */
    double last;           /* when it ends although a rank is busy */
    char *heard;           /* of each rank: 1: it has announced that it waits */
    int *counts;           /* four tables of a number for each rank, for MPI */
    char *pieces;          /* the pieces of all ranks that this rank adds */
    const void **rows;
    char why[MPI_MAX_ERROR_STRING];
} ddp_m;

static const char *ddp_mpi_fail(const char *text, int rank) {
    snprintf(ddp_m.why, sizeof ddp_m.why, text, rank);
    return ddp_m.why;
}
static const char *ddp_mpi_says(int code) {
    int n;
    if (code == MPI_SUCCESS) return NULL;
    return MPI_Error_string(code, ddp_m.why, &n) ? "MPI failed" : ddp_m.why;
}

/* --- what is missing -------------------------------------------------------------------------- */

enum { DDP_MPI_HERE, DDP_MPI_BUSY, DDP_MPI_BACK, DDP_MPI_WORDS };

/* Sends a word to all other ranks, without waiting. */
static void ddp_mpi_tell(int word) {
    static const int words[DDP_MPI_WORDS] = { DDP_MPI_HERE, DDP_MPI_BUSY, DDP_MPI_BACK };
    MPI_Request sent;
    for (int r = 0; r < ddp_m.size; r++) {
        if (r == ddp_m.rank) continue;
        if (MPI_Isend(&words[word], 1, MPI_INT, r, 0, ddp_m.aside, &sent) == MPI_SUCCESS)
            MPI_Request_free(&sent);
    }
}

/* Receives the words of other ranks. Returns 1 when the time of one of them is up. */
static int ddp_mpi_hear(void) {
    int late = 0, word = 0, there = 1;
    while (there) {
        MPI_Status from;
        there = 0;
        if (MPI_Iprobe(MPI_ANY_SOURCE, 0, ddp_m.aside, &there, &from) != MPI_SUCCESS || !there)
            break;
        MPI_Recv(&word, 1, MPI_INT, from.MPI_SOURCE, 0, ddp_m.aside, &from);
        if (word == DDP_MPI_HERE) late = ddp_m.heard[from.MPI_SOURCE] |= 1;
        else ddp_m.busy += word == DDP_MPI_BUSY ? 1 : -1;
    }
    return late;
}

/* The first rank at or after `from` that has not announced that it waits; the number of ranks if
 * all have announced it. */
static int ddp_mpi_silent(int from) {
    while (from < ddp_m.size && (from == ddp_m.rank || ddp_m.heard[from])) from++;
    return from;
}

/* Finds the missing rank. Ranks that wait announce so, and listen for a second, or for up to 20
 * while several ranks are silent: on a busy machine a rank that waits may announce it late.
 * The rank that announces nothing is missing. */
static const char *ddp_mpi_late(void) {
    const struct timespec nap = { 0, 1000000 };
    const double began = MPI_Wtime();
    double waited = 0;
    int missing;
    ddp_mpi_tell(DDP_MPI_HERE);
    while (waited < 1 || (waited < 20 && ddp_mpi_silent(ddp_mpi_silent(0) + 1) < ddp_m.size)) {
        ddp_mpi_hear();
        nanosleep(&nap, NULL);
        waited = MPI_Wtime() - began;
    }
    missing = ddp_mpi_silent(0);
    return ddp_mpi_fail(missing < ddp_m.size ? "rank %d did not answer in time"
                                             : "a sum of %d ranks was not done in time",
                        missing);
}

/* Completes an operation. code: the result of its begin. A wait for a small table polls often at
 * first. The thread sleeps between polls, so that the scheduler wakes it at once beside a computing
 * thread; with yields it made no progress on a machine with few cores. While a rank is busy, the limit is
 * DDP_BUSY_TIMES as long; afterwards the whole limit is left for all operations of the sum. */
static const char *ddp_mpi_finish(int code, MPI_Request *request) {
    const struct timespec nap = { 0, 20000 };
    const int looks = ddp_m.threaded && pthread_equal(pthread_self(), ddp_m.thread) ? 0 : 50;
    int done = code != MPI_SUCCESS;
    for (int turn = 0; !done; turn++) {
        code = MPI_Test(request, &done, MPI_STATUS_IGNORE);
        if (done || code != MPI_SUCCESS) break;
        if (turn % 16 == 15 && ddp_mpi_hear()) return ddp_mpi_late();
        if (ddp_m.busy && MPI_Wtime() < ddp_m.last) ddp_m.until = MPI_Wtime() + ddp_m.seconds;
        if (MPI_Wtime() > ddp_m.until) return ddp_mpi_late();
        if (turn >= looks) nanosleep(&nap, NULL);
    }
    return ddp_mpi_says(code);
}

/* Checks that all ranks ask for the same, by the largest and smallest hash. Otherwise returns a
 * message that says which rank asks for what. */
static const char *ddp_mpi_alike(const ddp_mpi_job *job) {
    const int64_t asked[3] = { job->what, job->count, job->dtype };
    int64_t hash = (asked[1] * 64 + asked[2]) * 4 + asked[0], ends[2], *all;
    MPI_Request request = MPI_REQUEST_NULL;
    const char *why;
    ends[0] = hash, ends[1] = -hash;
    why = ddp_mpi_finish(
        MPI_Iallreduce(MPI_IN_PLACE, ends, 2, MPI_INT64_T, MPI_MAX, ddp_m.world, &request),
        &request);
    if (why || ends[0] == -ends[1]) return why;
    all = malloc((size_t)ddp_m.size * sizeof asked);
    if (!all) return "ranks request different operations";
    why = ddp_mpi_finish(
        MPI_Iallgather(asked, 3, MPI_INT64_T, all, 3, MPI_INT64_T, ddp_m.world, &request), &request);
    for (int r = 0; r < ddp_m.size && !why; r++)
        if (memcmp(all + 3 * r, asked, sizeof asked))
            why = ddp_unlike(ddp_m.why, sizeof ddp_m.why, ddp_m.rank, asked, r, all + 3 * r);
    free(all);
    return why;
}

/* --- sums ------------------------------------------------------------------------------------- */

static MPI_Datatype ddp_mpi_type(mixp_dtype dtype) {
    return dtype == MIXP_F32   ? MPI_FLOAT
           : dtype == MIXP_F64 ? MPI_DOUBLE
           : dtype == MIXP_I32 ? MPI_INT32_T
                               : MPI_UINT16_T;
}

/* A sum by the engine, in its order. */
static const char *ddp_mpi_engine(const ddp_mpi_job *job, char *data, int64_t n, int root) {
    const MPI_Op op = job->what == DDP_MAX ? MPI_MAX : MPI_SUM;
    const MPI_Datatype type = ddp_mpi_type(job->dtype);
    MPI_Request request = MPI_REQUEST_NULL;
    int code;
    if (type == MPI_UINT16_T) return "f16 and bf16 of a GPU: use ddp_nccl.c";
    if (root < 0)
        code = MPI_Iallreduce(MPI_IN_PLACE, data, (int)n, type, op, ddp_m.world, &request);
    else
        code = MPI_Ireduce(root == ddp_m.rank ? MPI_IN_PLACE : data, data, (int)n, type, op, root,
                           ddp_m.world, &request);
    return ddp_mpi_finish(code, &request);
}

/* Piece p of `data` begins at p * apart elements and has min(each, n - p * apart) of them: rank
 * p gets all ranks' pieces p, and adds them to its own. */
static const char *ddp_mpi_fold(const ddp_mpi_job *job, char *data, int64_t apart, int64_t each,
                                int64_t n) {
    const size_t size = mixp_dtype_size(job->dtype);
    const MPI_Datatype type = ddp_mpi_type(job->dtype);
    int *counts = ddp_m.counts, *at = counts + ddp_m.size, *mine = at + ddp_m.size,
        *to = mine + ddp_m.size;
    MPI_Request request = MPI_REQUEST_NULL;
    const char *why;
    for (int p = 0; p < ddp_m.size; p++) {
        const int64_t left = n - p * apart, some = left < each ? left : each;
        counts[p] = some > 0 ? (int)some : 0;
        at[p] = counts[p] ? (int)(p * apart) : 0;
    }
    for (int p = 0; p < ddp_m.size; p++) {
        mine[p] = counts[ddp_m.rank];
        to[p] = p * counts[ddp_m.rank];
        ddp_m.rows[p] = ddp_m.pieces + (size_t)to[p] * size;
    }
    why = ddp_mpi_finish(
        MPI_Ialltoallv(data, counts, at, type, ddp_m.pieces, mine, to, type, ddp_m.world, &request),
        &request);
    if (!why)
        ddp_fold(data + (size_t)at[ddp_m.rank] * size, ddp_m.rows, ddp_m.size, counts[ddp_m.rank],
                 job->dtype, job->what == DDP_MAX);
    return why;
}

/* A sum in the order of ranks: each rank adds a piece and sends it to all. */
static const char *ddp_mpi_in_order(const ddp_mpi_job *job) {
    const size_t size = mixp_dtype_size(job->dtype);
    const MPI_Datatype type = ddp_mpi_type(job->dtype);
    const char *why = NULL;
    for (int64_t done = 0, n; done < job->count && !why; done += n) {
        const int64_t left = job->count - done;
        char *data = job->data + (size_t)done * size;
        MPI_Request request = MPI_REQUEST_NULL;
        int64_t each;
        n = left < DDP_MPI_PIECE ? left : DDP_MPI_PIECE;
        each = (n + ddp_m.size - 1) / ddp_m.size;
        why = ddp_mpi_fold(job, data, each, each, n);
        if (!why)
            why = ddp_mpi_finish(MPI_Iallgatherv(MPI_IN_PLACE, 0, type, data, ddp_m.counts,
                                                 ddp_m.counts + ddp_m.size, type, ddp_m.world,
                                                 &request),
                                 &request);
    }
    return why;
}

/* A scattered sum in the order of ranks: each rank gets only its own piece. */
static const char *ddp_mpi_scatter_in_order(const ddp_mpi_job *job) {
    const int64_t most = DDP_MPI_PIECE / ddp_m.size + 1;
    const char *why = NULL;
    for (int64_t done = 0, each; done < job->count && !why; done += each) {
        each = job->count - done < most ? job->count - done : most;
        why = ddp_mpi_fold(job, job->data + (size_t)done * mixp_dtype_size(job->dtype), job->count,
                           each, job->count * ddp_m.size);
    }
    return why;
}

/* --- jobs ------------------------------------------------------------------------------------- */

static const char *ddp_mpi_do(const ddp_mpi_job *job) {
    const size_t bytes = (size_t)job->count * mixp_dtype_size(job->dtype);
    const int low = ddp_mpi_type(job->dtype) == MPI_UINT16_T;
    MPI_Request request = MPI_REQUEST_NULL;
    const char *why;
    ddp_m.seconds = job->seconds;
    ddp_m.until = MPI_Wtime() + job->seconds;
    ddp_m.last = MPI_Wtime() + job->seconds * DDP_BUSY_TIMES;
    why = ddp_mpi_alike(job);
    if (why) return why;
    if (job->what == DDP_GATHER)
        return ddp_mpi_finish(MPI_Iallgather(MPI_IN_PLACE, 0, MPI_BYTE, job->data, (int)bytes,
                                             MPI_BYTE, ddp_m.world, &request),
                              &request);
    if (!job->on_gpu && job->what == DDP_SCATTER) return ddp_mpi_scatter_in_order(job);
    if (!job->on_gpu && (ddp_m.ordered || low)) return ddp_mpi_in_order(job);
    if (job->what != DDP_SCATTER) return ddp_mpi_engine(job, job->data, job->count, -1);
    for (int r = 0; r < ddp_m.size && !why; r++)
        why = ddp_mpi_engine(job, job->data + (size_t)r * bytes, job->count, r);
    return why;
}

/* The thread that runs the queued jobs, in order. After a failure it runs no more jobs. */
static void *ddp_mpi_work(void *unused) {
    pthread_mutex_lock(&ddp_m.lock);
    for (;;) {
        const char *why = NULL;
        while (ddp_m.begun == ddp_m.ended && !ddp_m.over)
            pthread_cond_wait(&ddp_m.moved, &ddp_m.lock);
        if (ddp_m.begun == ddp_m.ended) break;
        pthread_mutex_unlock(&ddp_m.lock);
        if (!ddp_m.failed) why = ddp_mpi_do(&ddp_m.jobs[ddp_m.ended % DDP_MPI_MOST]);
        pthread_mutex_lock(&ddp_m.lock);
        if (why && why != ddp_m.why) ddp_mpi_fail(why, 0);
        ddp_m.failed |= why != NULL;
        ddp_m.ended++;
        pthread_cond_broadcast(&ddp_m.moved);
    }
    pthread_mutex_unlock(&ddp_m.lock);
    return unused;
}

/* Waits for all queued jobs. Returns NULL, or why they failed. */
static const char *ddp_mpi_wait(void *user, void *stream, double seconds) {
    (void)user, (void)stream, (void)seconds; /* each job has its limit */
    pthread_mutex_lock(&ddp_m.lock);
    while (ddp_m.ended < ddp_m.begun) pthread_cond_wait(&ddp_m.moved, &ddp_m.lock);
    pthread_mutex_unlock(&ddp_m.lock);
    return ddp_m.failed ? ddp_m.why : NULL;
}

/* Queues a job. now: 1: runs the job in this thread, after all queued jobs. */
static const char *ddp_mpi_begin(int what, void *data, int64_t count, mixp_dtype dtype,
                                 void *stream, double seconds, int now) {
    const ddp_mpi_job job = { what, stream != NULL, data, count, dtype, seconds };
    const int full = ddp_m.begun - ddp_m.ended >= DDP_MPI_MOST; /* only this thread adds */
    const char *why = now || full ? ddp_mpi_wait(NULL, NULL, 0) : NULL;
#ifdef DDP_MPI_CUDA
    if (!why && cudaStreamSynchronize((cudaStream_t)stream) != cudaSuccess)
        why = "the GPU has failed";
#else
    if (!why && stream) why = "memory of a GPU: define DDP_MPI_CUDA";
#endif
    if (count * (what == DDP_SCATTER ? ddp_m.size : what == DDP_GATHER ? 8 : 1) > INT32_MAX)
        why = "too much at once for MPI's counts";
    if (why) return why;
    if (now || !ddp_m.threaded) {
        why = ddp_mpi_do(&job);
        ddp_m.failed |= why != NULL;
        if (why && why != ddp_m.why) ddp_mpi_fail(why, 0);
        return why;
    }
    pthread_mutex_lock(&ddp_m.lock);
    ddp_m.jobs[ddp_m.begun++ % DDP_MPI_MOST] = job;
    pthread_cond_broadcast(&ddp_m.moved);
    pthread_mutex_unlock(&ddp_m.lock);
    return NULL;
}

#define DDP_MPI_HOOK(name, what, now)                                                              \
  static const char *name(void *user, void *data, int64_t count, mixp_dtype dtype, void *stream,   \
                          double seconds) {                                                        \
    (void)user;                                                                                    \
    return ddp_mpi_begin(what, data, count, dtype, stream, seconds, now);                          \
  }
DDP_MPI_HOOK(ddp_mpi_sum, DDP_SUM, 1)
DDP_MPI_HOOK(ddp_mpi_max, DDP_MAX, 1)
DDP_MPI_HOOK(ddp_mpi_gather, DDP_GATHER, 1)
DDP_MPI_HOOK(ddp_mpi_scatter, DDP_SCATTER, 1)
DDP_MPI_HOOK(ddp_mpi_begin_sum, DDP_SUM, 0)
DDP_MPI_HOOK(ddp_mpi_begin_scatter, DDP_SCATTER, 0)

/* Announces that this rank is busy. The thread is idle then, because a busy rank awaits no sum. */
static void ddp_mpi_busy(void *user, int on) {
    ddp_mpi_wait(user, NULL, 0);
    ddp_mpi_tell(on ? DDP_MPI_BUSY : DDP_MPI_BACK);
}

/* Makes the memory and the thread. Returns 1 on success. */
static int ddp_mpi_ready(int threads) {
    struct ddp_mpi_state *s = &ddp_m;
    const size_t piece = (size_t)DDP_MPI_PIECE + (size_t)s->size * 2;
    s->heard = calloc((size_t)s->size, 1);
    s->counts = malloc((size_t)s->size * 4 * sizeof *s->counts);
    s->rows = malloc((size_t)s->size * sizeof *s->rows);
    s->pieces = malloc(piece * sizeof(double));
    if (!s->heard || !s->counts || !s->rows || !s->pieces) return 0;
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->moved, NULL);
    s->threaded = threads >= MPI_THREAD_SERIALIZED &&
                  pthread_create(&s->thread, NULL, ddp_mpi_work, NULL) == 0;
    return 1;
}

/* Starts MPI. On failure the size is 0, which mixp_context_new refuses. */
static mixp_ranks_desc ddp_mpi(int *argc, char ***argv, int ordered) {
    mixp_ranks_desc d;
    struct ddp_mpi_state *s = &ddp_m;
    int threads = 0;
    memset(&d, 0, sizeof d);
    if (MPI_Init_thread(argc, argv, MPI_THREAD_SERIALIZED, &threads) != MPI_SUCCESS) return d;
    MPI_Comm_dup(MPI_COMM_WORLD, &s->world);
    MPI_Comm_dup(MPI_COMM_WORLD, &s->aside);
    MPI_Comm_set_errhandler(s->world, MPI_ERRORS_RETURN);
    MPI_Comm_set_errhandler(s->aside, MPI_ERRORS_RETURN);
    MPI_Comm_rank(s->world, &s->rank);
    MPI_Comm_size(s->world, &s->size);
    s->ordered = ordered;
    if (!ddp_mpi_ready(threads)) return d;
    d.rank = s->rank, d.size = s->size, d.max = ddp_mpi_max, d.all_gather = ddp_mpi_gather;
    d.sum = ddp_mpi_sum, d.reduce_scatter = ddp_mpi_scatter;
    d.grad_ready = ddp_mpi_begin_sum, d.grad_wait = ddp_mpi_wait;
    d.scatter_ready = ddp_mpi_begin_scatter, d.busy = ddp_mpi_busy;
    return d;
}

/* A rank that failed ends all others, which may be waiting for it. */
static int ddp_mpi_end(int failed) {
    if (failed) MPI_Abort(MPI_COMM_WORLD, 1);
    pthread_mutex_lock(&ddp_m.lock);
    ddp_m.over = 1;
    pthread_cond_broadcast(&ddp_m.moved);
    pthread_mutex_unlock(&ddp_m.lock);
    if (ddp_m.threaded) pthread_join(ddp_m.thread, NULL);
    MPI_Barrier(ddp_m.world);
    ddp_mpi_hear();
    return MPI_Finalize();
}
