/* ddp_nccl.c - ranks over NCCL: a GPU each, on one machine or many
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * Include it behind mixprec.h: ddp_nccl before mixp_context_new, with rank and size as the launcher
 * gives them and a file that all ranks can see, by which they find each other: rank 0 writes it;
 * none may be there from a run before. Or define DDP_NCCL_MPI: MPI, started by you, does that.
 *
 * Sums run on a stream of their own while backward goes on. Nothing waits on the host, and captured
 * steps may hold them. A thread (-lpthread) watches: when a rank is gone, or a sum is late (but for
 * those of a replay), it ends all; what is on the GPU then is worth nothing, and the next hook says
 * so. Ask ddp_nccl_failed before you save a checkpoint. NCCL itself waits without a limit until all
 * ranks are there: start them by what ends all when one has ended (mpirun, srun).
 */
#ifndef MIXPREC_H_INCLUDED
#  include "../mixprec.h"
#endif
#include <cuda_runtime.h>
#include <nccl.h>
#include <pthread.h>
#include <stdio.h>
#include <time.h>
#ifdef DDP_NCCL_MPI
#  include <mpi.h>
#endif

static struct ddp_nccl_state {
    ncclComm_t   comm;
    cudaStream_t stream;                /* of the sums */
    cudaEvent_t  ready, summed;         /* what they wait for, and what waits for them */
    cudaEvent_t  watched;               /* behind one sum, the next after the last was seen done */
    pthread_t    watch;
    int          rank, device, over;    /* over: the program has ended the world */
    int          watching;              /* 1: watched lies behind a sum; written atomically */
    double       seconds;
    const char  *why;                   /* the world has failed; read and written atomically */
} ddp_n;

static const char *ddp_nccl_says(ncclResult_t code)
{ return code == ncclSuccess || code == ncclInProgress ? NULL : ncclGetErrorString(code); }
static const char *ddp_cuda_says(cudaError_t code)
{ return code == cudaSuccess ? NULL : cudaGetErrorString(code); }
static const char *ddp_nccl_failed(void) { return __atomic_load_n(&ddp_n.why, __ATOMIC_SEQ_CST); }

/* Ends all sums, once: the others learn of it from the engine. why: a constant. */
static void ddp_nccl_fail(const char *why) {
    const char *none = NULL;
    if (__atomic_compare_exchange_n(&ddp_n.why, &none, why, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
        ncclCommAbort(ddp_n.comm);
}
static void ddp_nccl_stop(void *user, const char *why)
{ (void)user, (void)why; ddp_nccl_fail("this rank failed"); }

/* What was put on a stream is watched, unless a sum before it still is: a GPU that is always behind
 * its host is not late. A recorded sum is none that runs. */
static void ddp_nccl_note(cudaStream_t stream) {
    enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    if (__atomic_load_n(&ddp_n.watching, __ATOMIC_SEQ_CST)) return;
    if (cudaStreamIsCapturing(stream, &status) || status != cudaStreamCaptureStatusNone) return;
    if (cudaEventRecord(ddp_n.watched, stream) == cudaSuccess)
        __atomic_store_n(&ddp_n.watching, 1, __ATOMIC_SEQ_CST);
}

/* A look every tenth of a second. */
static void ddp_nccl_look(double *waited) {
    ncclResult_t met = ncclSuccess;
    int          was = __atomic_load_n(&ddp_n.watching, __ATOMIC_SEQ_CST);
    int          late = was && cudaEventQuery(ddp_n.watched) == cudaErrorNotReady;
    *waited = late ? *waited + 0.1 : 0;
    if (was && !late) __atomic_store_n(&ddp_n.watching, 0, __ATOMIC_SEQ_CST);
    ncclCommGetAsyncError(ddp_n.comm, &met);
    if (met != ncclSuccess && met != ncclInProgress) ddp_nccl_fail(ncclGetErrorString(met));
    else if (*waited > ddp_n.seconds) ddp_nccl_fail("another rank did not come in time");
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

/* own: where this rank's piece of data lies. */
#define DDP_NCCL_HOOK(name, how, ...)                                                             \
    static const char *name(void *user, void *data, int64_t count, mixp_dtype dtype,              \
                            void *stream, double seconds) {                                       \
        const char *why = ddp_nccl_failed();                                                      \
        char *own = (char *)data + (size_t)(ddp_n.rank * count) * mixp_dtype_size(dtype);         \
        (void)user, (void)seconds, (void)own;                                                     \
        if (!why) why = ddp_nccl_says(how(__VA_ARGS__, ddp_n.comm, (cudaStream_t)stream));        \
        if (!why) ddp_nccl_note((cudaStream_t)stream);                                            \
        return why;                                                                               \
    }
DDP_NCCL_HOOK(ddp_nccl_sum, ncclAllReduce, data, data, (size_t)count, ddp_nccl_type(dtype), ncclSum)
DDP_NCCL_HOOK(ddp_nccl_max, ncclAllReduce, data, data, (size_t)count, ddp_nccl_type(dtype), ncclMax)
DDP_NCCL_HOOK(ddp_nccl_scatter, ncclReduceScatter, data, own, (size_t)count, ddp_nccl_type(dtype),
              ncclSum)
DDP_NCCL_HOOK(ddp_nccl_gather, ncclAllGather, own, data, (size_t)count, ddp_nccl_type(dtype))

/* Overlap: the stream of the sums goes on from here, beside the context's. */
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
    snprintf(part, sizeof part, "%s.part", path);       /* what stands at path is always whole */
    if (rank == 0 && !why) {
        int bad = !(f = fopen(part, "wb")) || fwrite(id, sizeof *id, 1, f) != 1;
        if (f) bad |= fclose(f);
        return bad || rename(part, path) ? "the file cannot be written" : NULL;
    }
    while (!why && !(f = fopen(path, "rb")) && time(NULL) <= until) nanosleep(&nap, NULL);
    if (!why && (!f || fread(id, sizeof *id, 1, f) != 1)) why = "rank 0 did not write the file";
    if (f) fclose(f);
#endif
    return why;
}
/* On the current GPU. *why NULL, or why there is no world: size 0, which no context takes. */
static mixp_ranks_desc ddp_nccl(int rank, int size, const char *path, double seconds,
                                const char **why) {
    mixp_ranks_desc       d;
    struct ddp_nccl_state *n = &ddp_n;
    ncclUniqueId          id;
    memset(&d, 0, sizeof d);
    *why = ddp_nccl_meet(&id, rank, path, seconds);
    if (!*why) *why = ddp_nccl_says(ncclCommInitRank(&n->comm, size, id, rank));
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
    return d;
}

/* At the end of main, after mixp_context_free. */
static void ddp_nccl_end(void) {
    __atomic_store_n(&ddp_n.over, 1, __ATOMIC_SEQ_CST);
    if (ddp_nccl_failed()) return;
    pthread_join(ddp_n.watch, NULL);            /* it looks at the world until then */
    if (!ddp_nccl_failed()) ncclCommDestroy(ddp_n.comm);
}
