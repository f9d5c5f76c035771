/* ddp_mpi.c - ranks over MPI: OpenMPI, MPICH and their kin carry mixprec's sums
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 *     mpicc -O2 -I. train.c -o train -lm && mpirun -n 4 ./train
 *
 * Include it behind mixprec.h: ddp_mpi before mixp_context_new, ddp_mpi_end at the end of main.
 * Give each context the threads that a rank may use. While backward goes on, gradients are summed
 * in the background, in the engine's order; ordered 1: in that of ranks, for the bits of one rank,
 * which takes longer. For a GPU define DDP_MPI_CUDA and have an engine that was built to take its
 * memory: then the stream is waited for before each sum (ddp_nccl.c does without).
 */
#ifndef MIXPREC_H_INCLUDED
#  include "../mixprec.h"
#endif
#include <mpi.h>
#include <stdlib.h>
#ifdef DDP_MPI_CUDA
#  include <cuda_runtime.h>
#endif

enum { DDP_MPI_MOST = 1 << 14, DDP_MPI_PIECE = 1 << 20 };  /* sums under way; elements at once */
static struct ddp_mpi_state {
    MPI_Request under_way[DDP_MPI_MOST];
    MPI_Op      add_f16, add_bf16;
    int         n, rank, size;
    char       *all;                    /* a piece of every rank */
    char        why[MPI_MAX_ERROR_STRING];
} ddp_m;

static const char *ddp_mpi_says(int code) {
    int n;
    if (code == MPI_SUCCESS) return NULL;
    return MPI_Error_string(code, ddp_m.why, &n) ? "MPI failed" : ddp_m.why;
}

static void ddp_mpi_add(char *to, const char *from, int64_t n, mixp_dtype dtype) {
    const size_t size = mixp_dtype_size(dtype);
    for (int64_t i = 0; i < n; i++, to += size, from += size) {
        double a, b;
        mixp_convert(&a, MIXP_F64, to, dtype, 1);
        mixp_convert(&b, MIXP_F64, from, dtype, 1);
        a += b;
        mixp_convert(to, dtype, &a, MIXP_F64, 1);
    }
}

/* f16 and bf16 are none of MPI's types. */
#define DDP_MPI_OP(name, dtype)                                                                   \
    static void name(void *from, void *to, int *n, MPI_Datatype *type)                            \
    { (void)type; ddp_mpi_add(to, from, *n, dtype); }
DDP_MPI_OP(ddp_mpi_add_f16, MIXP_F16)
DDP_MPI_OP(ddp_mpi_add_bf16, MIXP_BF16)

static const char *ddp_mpi_ready(void *stream) {
#ifdef DDP_MPI_CUDA
    cudaError_t code = cudaStreamSynchronize((cudaStream_t)stream);
    return code == cudaSuccess ? NULL : cudaGetErrorString(code);
#else
    return stream ? "memory of a GPU: define DDP_MPI_CUDA" : NULL;
#endif
}

static const char *ddp_mpi_wait(void *user, void *stream, double seconds) {
    double until = MPI_Wtime() + seconds;
    int    done = 0, code = MPI_SUCCESS;
    (void)user, (void)stream;
    while (!done && code == MPI_SUCCESS) {
        code = MPI_Testall(ddp_m.n, ddp_m.under_way, &done, MPI_STATUSES_IGNORE);
        if (!done && MPI_Wtime() > until) return "another rank did not come in time";
    }
    ddp_m.n = 0;
    return ddp_mpi_says(code);
}

/* root: the rank that gets the sum; -1: all do. */
static const char *ddp_mpi_begin(void *data, int64_t count, mixp_dtype dtype, MPI_Op op,
                                 void *stream, int root) {
    MPI_Datatype type = dtype == MIXP_F32 ? MPI_FLOAT : dtype == MIXP_F64 ? MPI_DOUBLE
                      : dtype == MIXP_I32 ? MPI_INT32_T : MPI_UINT16_T;
    const char *why = ddp_mpi_ready(stream);
    const void *from = root < 0 || root == ddp_m.rank ? MPI_IN_PLACE : data;
    MPI_Request *next = ddp_m.under_way + ddp_m.n;
    if (why) return why;
    if (type == MPI_UINT16_T && op == MPI_MAX) return "max is of f32, f64 and i32";
    if (type == MPI_UINT16_T) op = dtype == MIXP_F16 ? ddp_m.add_f16 : ddp_m.add_bf16;
    if (ddp_m.n == DDP_MPI_MOST || count > INT32_MAX) return "too much at once";
    ddp_m.n++;
    *next = MPI_REQUEST_NULL;           /* it stays one where the engine refuses the sum */
    if (root < 0) return ddp_mpi_says(MPI_Iallreduce(from, data, (int)count, type, op,
                                                     MPI_COMM_WORLD, next));
    return ddp_mpi_says(MPI_Ireduce(from, data, (int)count, type, op, root, MPI_COMM_WORLD, next));
}

#define DDP_MPI_HOOK(name)                                                                        \
    static const char *name(void *user, void *data, int64_t count, mixp_dtype dtype,              \
                            void *stream, double seconds)

DDP_MPI_HOOK(ddp_mpi_begin_sum)
{ (void)user, (void)seconds; return ddp_mpi_begin(data, count, dtype, MPI_SUM, stream, -1); }

/* Each rank's piece has a root of its own: MPI's scattered sums leave it elsewhere. */
DDP_MPI_HOOK(ddp_mpi_begin_scatter) {
    const size_t bytes = (size_t)count * mixp_dtype_size(dtype);
    const char  *why = NULL;
    (void)user, (void)seconds;
    for (int r = 0; r < ddp_m.size && !why; r++)
        why = ddp_mpi_begin((char *)data + (size_t)r * bytes, count, dtype, MPI_SUM, stream, r);
    return why;
}

DDP_MPI_HOOK(ddp_mpi_sum) {
    const char *why = ddp_mpi_begin_sum(user, data, count, dtype, stream, seconds);
    return why ? why : ddp_mpi_wait(user, stream, seconds);
}
DDP_MPI_HOOK(ddp_mpi_max) {
    const char *why = ddp_mpi_begin(data, count, dtype, MPI_MAX, stream, -1);
    return why ? why : ddp_mpi_wait(user, stream, seconds);
}
DDP_MPI_HOOK(ddp_mpi_scatter) {
    const char *why = ddp_mpi_begin_scatter(user, data, count, dtype, stream, seconds);
    return why ? why : ddp_mpi_wait(user, stream, seconds);
}

DDP_MPI_HOOK(ddp_mpi_gather) {
    const char *why = ddp_mpi_ready(stream);
    int64_t     bytes = count * (int64_t)mixp_dtype_size(dtype);
    if (why) return why;
    if (ddp_m.n == DDP_MPI_MOST || bytes > INT32_MAX) return "too much at once";
    ddp_m.under_way[ddp_m.n] = MPI_REQUEST_NULL;
    why = ddp_mpi_says(MPI_Iallgather(MPI_IN_PLACE, 0, MPI_BYTE, data, (int)bytes, MPI_BYTE,
                                      MPI_COMM_WORLD, &ddp_m.under_way[ddp_m.n++]));
    return why ? why : ddp_mpi_wait(user, stream, seconds);
}

/* Every rank gets the pieces of all, and adds them in the order of ranks. CPUs alone. */
DDP_MPI_HOOK(ddp_mpi_sum_in_order) {
    const char  *why = stream ? "sums in order are for CPUs" : NULL;
    const size_t size = mixp_dtype_size(dtype);
    for (int64_t at = 0, n; at < count && !why; at += n) {
        char *to = (char *)data + (size_t)at * size, *all = ddp_m.all;
        n = count - at < DDP_MPI_PIECE ? count - at : DDP_MPI_PIECE;
        memcpy(all + (size_t)(ddp_m.rank * n) * size, to, (size_t)n * size);
        why = ddp_mpi_gather(user, all, n, dtype, NULL, seconds);
        if (why) break;
        for (int r = 1; r < ddp_m.size; r++)
            ddp_mpi_add(all, all + (size_t)(r * n) * size, n, dtype);
        memcpy(to, all, (size_t)n * size);
    }
    return why;
}

/* All get all: what is another's may be right. */
DDP_MPI_HOOK(ddp_mpi_scatter_in_order)
{ return ddp_mpi_sum_in_order(user, data, count * ddp_m.size, dtype, stream, seconds); }

/* Size 0, which no context takes: MPI could not be started. */
static mixp_ranks_desc ddp_mpi(int *argc, char ***argv, int ordered) {
    mixp_ranks_desc d;
    struct ddp_mpi_state *s = &ddp_m;
    memset(&d, 0, sizeof d);
    if (MPI_Init(argc, argv) != MPI_SUCCESS) return d;
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    MPI_Comm_rank(MPI_COMM_WORLD, &s->rank);
    MPI_Comm_size(MPI_COMM_WORLD, &s->size);
    MPI_Op_create(ddp_mpi_add_f16, 1, &s->add_f16);
    MPI_Op_create(ddp_mpi_add_bf16, 1, &s->add_bf16);
    s->all = ordered ? malloc((size_t)s->size * DDP_MPI_PIECE * sizeof(double)) : NULL;
    if (ordered && !s->all) return d;
    d.rank = s->rank, d.size = s->size, d.max = ddp_mpi_max, d.all_gather = ddp_mpi_gather;
    d.sum = ordered ? ddp_mpi_sum_in_order : ddp_mpi_sum;
    d.reduce_scatter = ordered ? ddp_mpi_scatter_in_order : ddp_mpi_scatter;
    if (ordered) return d;
    d.grad_ready = ddp_mpi_begin_sum, d.grad_wait = ddp_mpi_wait;
    d.scatter_ready = ddp_mpi_begin_scatter;
    return d;
}

/* A rank that failed ends all others, which may be waiting for it. */
static int ddp_mpi_end(int failed) {
    if (failed) MPI_Abort(MPI_COMM_WORLD, 1);
    return MPI_Finalize();
}
