/* ddp_nccl.c - ranks over NCCL: a GPU each, on one machine or many
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * Include this file after mixprec.h. Call ddp_nccl before mixp_context_new, with the launcher's
 * rank and size, and the path of a file that all ranks see. The ranks find each other by that file:
 * rank 0 writes the file, and removes it when all ranks have met. With a stale file of an earlier
 * run the ranks do not meet, which is reported after `seconds`. Or define DDP_NCCL_MPI: the ranks
 * then meet by MPI, which you start. Needs NCCL 2.14.
 *
 * Sums run on a separate stream during the backward pass. The host never waits for them, and
 * captured steps may contain them. A thread (-lpthread) watches: if a rank is gone, or a sum or a
 * replay is late, the thread aborts all sums. The data on the GPU is then invalid, and the next
 * hook fails. Call ddp_nccl_failed before you save a checkpoint.
 *
 * NCCL has three rules. Two threads must not use a communicator at once: a lock guards each use. A
 * communicator must not be used after its abort: the world is marked as failed first. A call must
 * not block for ever: the communicator is non-blocking, and each call is polled until its time is
 * up.
 */
#ifndef MIXPREC_H_INCLUDED
#  include "../mixprec.h"
#endif
#include <cuda_runtime.h>
#include <nccl.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/stat.h>
#include <time.h>
#include "plain_file.h"
#ifdef DDP_NCCL_MPI
#  include <mpi.h>
#endif

static pthread_mutex_t ddp_nccl_lock = PTHREAD_MUTEX_INITIALIZER;      /* of comm */

static struct ddp_nccl_state {
    ncclComm_t   comm;                  /* NULL: not made yet, or aborted */
    cudaStream_t stream;                /* of the sums */
    cudaEvent_t  ready, summed;         /* what they wait for, and what waits for them */
    cudaEvent_t  watched;               /* after one sum; moves on when that sum is complete */
    pthread_t    watch;
    int          rank, device, over;    /* over: the program has ended the world */
    int          watching;              /* 1: `watched` is recorded; written atomically */
    char         busy[512];             /* a file that exists while a rank is busy; "": none */
    double       seconds;
    const char  *why;                   /* the world has failed; read and written atomically */
} ddp_n;

static const char *ddp_nccl_says(ncclResult_t code)
{ return code == ncclSuccess || code == ncclInProgress ? NULL : ncclGetErrorString(code); }
static const char *ddp_cuda_says(cudaError_t code)
{ return code == cudaSuccess ? NULL : cudaGetErrorString(code); }
static const char *ddp_nccl_failed(void) { return __atomic_load_n(&ddp_n.why, __ATOMIC_SEQ_CST); }

static double ddp_nccl_now(void) {
    struct timespec t;
    return clock_gettime(CLOCK_MONOTONIC, &t) ? 0 : (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Aborts all sums, once; the other ranks learn of the abort from NCCL. why: a constant. Users of
 * the communicator hold the lock, and do not start after the world has failed. */
static void ddp_nccl_fail(const char *why) {
    const char *none = NULL;
    if (!__atomic_compare_exchange_n(&ddp_n.why, &none, why, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
        return;
    pthread_mutex_lock(&ddp_nccl_lock);
    if (ddp_n.comm) ncclCommAbort(ddp_n.comm);
    ddp_n.comm = NULL;
    pthread_mutex_unlock(&ddp_nccl_lock);
}

/* The communicator's state: ncclInProgress while a call is in progress. */
static ncclResult_t ddp_nccl_state_now(void) {
    ncclResult_t met = ncclSuccess, asked = ncclSuccess;
    pthread_mutex_lock(&ddp_nccl_lock);
    if (ddp_n.comm) asked = ncclCommGetAsyncError(ddp_n.comm, &met);
    pthread_mutex_unlock(&ddp_nccl_lock);
    return asked == ncclSuccess ? met : asked;
}

/* Waits until a call is no longer in progress. Returns NULL, or why the call failed. */
static const char *ddp_nccl_settle(double seconds) {
    const struct timespec nap = {0, 20000};
    const double          until = ddp_nccl_now() + seconds;
    ncclResult_t          met;
    while ((met = ddp_nccl_state_now()) == ncclInProgress && !ddp_nccl_failed()) {
        if (ddp_nccl_now() > until) ddp_nccl_fail("another rank did not answer in time");
        else nanosleep(&nap, NULL);
    }
    if (met != ncclSuccess && met != ncclInProgress) ddp_nccl_fail(ncclGetErrorString(met));
    return ddp_nccl_failed();
}

static void ddp_nccl_stop(void *user, const char *why)
{ (void)user, (void)why; ddp_nccl_fail("this rank failed"); }

/* Watches the newest sum of a stream, unless an earlier sum is still watched: a GPU that always
 * lags behind its host is not late. A captured sum does not run, so it is not watched. */
static void ddp_nccl_note(cudaStream_t stream) {
    enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    if (__atomic_load_n(&ddp_n.watching, __ATOMIC_SEQ_CST)) return;
    if (cudaStreamIsCapturing(stream, &status) || status != cudaStreamCaptureStatusNone) return;
    if (cudaEventRecord(ddp_n.watched, stream) == cudaSuccess)
        __atomic_store_n(&ddp_n.watching, 1, __ATOMIC_SEQ_CST);
}

/* A busy rank creates a file beside the key's file; no time limit runs while that file exists. */
static void ddp_nccl_busy(void *user, int on) {
    FILE *f;
    (void)user;
    if (!ddp_n.busy[0]) return;
    if (!on) remove(ddp_n.busy);
    else if ((f = plain_new(ddp_n.busy))) fclose(f);
}
static int ddp_nccl_some_busy(void) {
    struct stat s;
    return ddp_n.busy[0] && stat(ddp_n.busy, &s) == 0;
}

/* The watching thread's check, every tenth of a second. */
static void ddp_nccl_look(double *waited) {
    ncclResult_t met = ddp_nccl_state_now();
    int          was = __atomic_load_n(&ddp_n.watching, __ATOMIC_SEQ_CST);
    int          late = was && cudaEventQuery(ddp_n.watched) == cudaErrorNotReady;
    *waited = late && !ddp_nccl_some_busy() ? *waited + 0.1 : 0;
    if (was && !late) __atomic_store_n(&ddp_n.watching, 0, __ATOMIC_SEQ_CST);
    if (met != ncclSuccess && met != ncclInProgress) ddp_nccl_fail(ncclGetErrorString(met));
    else if (*waited > ddp_n.seconds) ddp_nccl_fail("another rank did not answer in time");
}

static void *ddp_nccl_watch(void *unused) {
    const struct timespec nap = {0, 100000000};
    double                waited = 0;
    cudaSetDevice(ddp_n.device);
    while (!__atomic_load_n(&ddp_n.over, __ATOMIC_SEQ_CST) && !ddp_nccl_failed()) {
        ddp_nccl_look(&waited);
        nanosleep(&nap, NULL);
    }
    return unused;
}

static ncclDataType_t ddp_nccl_type(mixp_dtype dtype) {
    return dtype == MIXP_F16 ? ncclFloat16 : dtype == MIXP_BF16 ? ncclBfloat16
         : dtype == MIXP_F64 ? ncclFloat64 : dtype == MIXP_I32 ? ncclInt32 : ncclFloat32;
}

/* own: the address of this rank's piece of data. */
#define DDP_NCCL_HOOK(name, how, ...)                                                             \
    static const char *name(void *user, void *data, int64_t count, mixp_dtype dtype,              \
                            void *stream, double seconds) {                                       \
        const char *why;                                                                          \
        char *own = (char *)data + (size_t)(ddp_n.rank * count) * mixp_dtype_size(dtype);         \
        (void)user, (void)own;                                                                    \
        pthread_mutex_lock(&ddp_nccl_lock);                                                       \
        why = ddp_nccl_failed();                                                                  \
        if (!why) why = ddp_nccl_says(how(__VA_ARGS__, ddp_n.comm, (cudaStream_t)stream));        \
        pthread_mutex_unlock(&ddp_nccl_lock);                                                     \
        if (!why) why = ddp_nccl_settle(seconds);                                                 \
        if (!why) ddp_nccl_note((cudaStream_t)stream);                                            \
        return why;                                                                               \
    }
DDP_NCCL_HOOK(ddp_nccl_sum, ncclAllReduce, data, data, (size_t)count, ddp_nccl_type(dtype), ncclSum)
DDP_NCCL_HOOK(ddp_nccl_max, ncclAllReduce, data, data, (size_t)count, ddp_nccl_type(dtype), ncclMax)
DDP_NCCL_HOOK(ddp_nccl_scatter, ncclReduceScatter, data, own, (size_t)count, ddp_nccl_type(dtype),
              ncclSum)
DDP_NCCL_HOOK(ddp_nccl_gather, ncclAllGather, own, data, (size_t)count, ddp_nccl_type(dtype))

/* Overlap: the stream of the sums waits for the context's stream, then runs beside it. */
#define DDP_NCCL_BEGIN(name, hook)                                                                \
    static const char *name(void *user, void *data, int64_t count, mixp_dtype dtype,              \
                            void *stream, double seconds) {                                       \
        const char *why = ddp_cuda_says(cudaEventRecord(ddp_n.ready, (cudaStream_t)stream));      \
        if (!why) why = ddp_cuda_says(cudaStreamWaitEvent(ddp_n.stream, ddp_n.ready, 0));         \
        return why ? why : hook(user, data, count, dtype, ddp_n.stream, seconds);                 \
    }
DDP_NCCL_BEGIN(ddp_nccl_begin, ddp_nccl_sum)
DDP_NCCL_BEGIN(ddp_nccl_begin_scatter, ddp_nccl_scatter)
static const char *ddp_nccl_wait(void *user, void *stream, double seconds) {
    const char *why = ddp_cuda_says(cudaEventRecord(ddp_n.summed, ddp_n.stream));
    (void)user, (void)seconds;
    return why ? why : ddp_cuda_says(cudaStreamWaitEvent((cudaStream_t)stream, ddp_n.summed, 0));
}

/* Watches a replay, whose sums call no hook. */
static const char *ddp_nccl_replayed(void *user, void *stream) {
    const char *why = ddp_nccl_failed();
    (void)user;
    if (!why) ddp_nccl_note((cudaStream_t)stream);
    return why;
}

/* The file at path. NULL while the file is missing, or if it is too old to be of this run. */
static FILE *ddp_nccl_key(const char *path, double seconds) {
    struct stat s;
    if (stat(path, &s) || difftime(time(NULL), s.st_mtime) > 2 * seconds + 60) return NULL;
    return plain_open(path);
}

/* The key by which ranks find each other, from rank 0 to all. */
static const char *ddp_nccl_meet(ncclUniqueId *id, int rank, const char *path, double seconds) {
    const char *why = rank ? NULL : ddp_nccl_says(ncclGetUniqueId(id));
#ifdef DDP_NCCL_MPI
    (void)path, (void)seconds;
    if (MPI_Bcast(id, (int)sizeof *id, MPI_BYTE, 0, MPI_COMM_WORLD)) why = "MPI_Bcast failed";
#else
    const struct timespec nap = {0, 10000000};
    char   part[512];
    time_t until = time(NULL) + (time_t)seconds;
    FILE  *f = NULL;
    snprintf(part, sizeof part, "%s.part", path);       /* the file at path is always complete */
    if (rank == 0 && !why) {
        remove(path);                                   /* of an earlier run */
        int bad = !(f = plain_new(part)) || fwrite(id, sizeof *id, 1, f) != 1;
        if (f) bad |= fclose(f);
        return bad || rename(part, path) ? "the file cannot be written" : NULL;
    }
    while (!why && !(f = ddp_nccl_key(path, seconds)) && time(NULL) <= until) nanosleep(&nap, NULL);
    if (!why && (!f || fread(id, sizeof *id, 1, f) != 1)) why = "rank 0 did not write the file";
    if (f) fclose(f);
#endif
    return why;
}
/* All ranks have met, or why not. */
static const char *ddp_nccl_join(const ncclUniqueId *id, int rank, int size, double seconds) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    const char  *why;
    config.blocking = 0;
    pthread_mutex_lock(&ddp_nccl_lock);
    why = ddp_nccl_says(ncclCommInitRankConfig(&ddp_n.comm, size, *id, rank, &config));
    pthread_mutex_unlock(&ddp_nccl_lock);
    if (why || !(why = ddp_nccl_settle(seconds))) return why;
    return strstr(why, "in time") ? "the ranks did not meet in time: is one missing, or the file of an "
                                    "earlier run?" : why;
}

/* Joins the world on the current GPU. seconds: the limit of one sum or replay; 0 = 600. *why: NULL,
 * or why it failed; the size is then 0, which mixp_context_new refuses. */
static mixp_ranks_desc ddp_nccl(int rank, int size, const char *path, double seconds,
                                const char **why) {
    mixp_ranks_desc       d;
    struct ddp_nccl_state *n = &ddp_n;
    ncclUniqueId          id;
    memset(&d, 0, sizeof d);
    if (!(seconds > 0)) seconds = 600;
    if (path) snprintf(n->busy, sizeof n->busy, "%s.busy", path);
    if (rank == 0) ddp_nccl_busy(NULL, 0);              /* of an earlier run */
    *why = ddp_nccl_meet(&id, rank, path, seconds);
    if (!*why) *why = ddp_nccl_join(&id, rank, size, seconds);
    if (rank == 0 && path) remove(path);                /* all ranks have read it, or will not */
    if (!*why) *why = ddp_cuda_says(cudaGetDevice(&n->device));
    if (!*why) *why = ddp_cuda_says(cudaStreamCreateWithFlags(&n->stream, cudaStreamNonBlocking));
    if (!*why) *why = ddp_cuda_says(cudaEventCreateWithFlags(&n->ready, cudaEventDisableTiming));
    if (!*why) *why = ddp_cuda_says(cudaEventCreateWithFlags(&n->summed, cudaEventDisableTiming));
    if (!*why) *why = ddp_cuda_says(cudaEventCreateWithFlags(&n->watched, cudaEventDisableTiming));
    n->seconds = seconds;
    if (!*why && pthread_create(&n->watch, NULL, ddp_nccl_watch, NULL)) *why = "no thread to watch";
    if (*why) return d;
    d.rank = n->rank = rank, d.size = size, d.seconds = seconds;
    d.sum = ddp_nccl_sum, d.max = ddp_nccl_max, d.all_gather = ddp_nccl_gather;
    d.grad_ready = ddp_nccl_begin, d.grad_wait = ddp_nccl_wait, d.stop = ddp_nccl_stop;
    d.reduce_scatter = ddp_nccl_scatter, d.scatter_ready = ddp_nccl_begin_scatter;
    d.busy = ddp_nccl_busy, d.replayed = ddp_nccl_replayed;
    return d;
}

/* At the end of main, after mixp_context_free. */
static void ddp_nccl_end(void) {
    __atomic_store_n(&ddp_n.over, 1, __ATOMIC_SEQ_CST);
    pthread_join(ddp_n.watch, NULL);            /* it uses the world until then */
    if (ddp_nccl_failed()) return;
    pthread_mutex_lock(&ddp_nccl_lock);
    ncclCommFinalize(ddp_n.comm);
    pthread_mutex_unlock(&ddp_nccl_lock);
    if (ddp_nccl_settle(ddp_n.seconds)) return;
    ncclCommDestroy(ddp_n.comm);
    ddp_n.comm = NULL;
}
