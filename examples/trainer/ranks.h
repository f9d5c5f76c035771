/* ranks.h - many ranks: a part of trainer.c and of llama.c
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 *     trainer --ranks fork:4             four processes on this machine
 *     trainer --ranks tcp                one of many: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
 *                                         say which, as torchrun and Slurm set them
 *     mpirun -n 4 trainer --ranks mpi    where it was built with mpicc -DTRAINER_MPI
 *     mpirun -n 8 trainer --ranks nccl   a GPU each, built with -DTRAINER_NCCL and -lnccl
 *
 * Every rank reads the same options and trains on its own --batch sequences: N ranks equal one rank
 * with N times --accumulate. With --total-batch a step has the same number of sequences on any number of
 * ranks; with --ordered it also has the same bits. Ranks divide a validation. Only rank 0 prints and
 * writes files. With --shard all ranks take part in a save, and rank 0 writes the same file as a single
 * rank would: the run can resume with any number of ranks.
 */
#ifndef TRAINER_RANKS_H
#define TRAINER_RANKS_H

#include "../ddp_fork.c"
#include "../ddp_tcp.c"
#ifdef TRAINER_MPI
#  include "../ddp_mpi.c"
#endif
#ifdef TRAINER_NCCL
#  include "../ddp_nccl.c"
#endif
#include "terminal.h"

/* The options of ranks. */
typedef struct ranks_options {
    const char *ranks;                  /* fork:N, tcp, mpi or nccl; "" = one process */
    double      seconds;                /* how long ranks wait for a rank that does not answer */
    int         shard, ordered;
    char       *device;                 /* room for 16 characters: nccl writes its rank's GPU there */
} ranks_options;

/* A number that the launcher put into the environment, under OpenMPI's, Slurm's or PyTorch's
 * name. */
static inline int launched_as(const char *mpi, const char *slurm, const char *torch) {
    const char *text = getenv(mpi);
    if (!text) text = getenv(slurm);
    if (!text) text = getenv(torch);
    if (!text) die(2, "--ranks nccl: the launcher sets no rank: start it with mpirun or srun");
    return atoi(text);
}

static inline mixp_ranks_desc start_nccl(const ranks_options *c) {
    mixp_ranks_desc d = {.size = 0};
#ifdef TRAINER_NCCL
    const char *why, *path = getenv("TRAINER_MEET");
    int         gpu = launched_as("OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID", "LOCAL_RANK");
    if (!path) die(2, "--ranks nccl: TRAINER_MEET must name a new file that all ranks can see");
    snprintf(c->device, 16, "cuda:%d", gpu);
    cudaSetDevice(gpu);
    d = ddp_nccl(launched_as("OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "RANK"),
                 launched_as("OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS", "WORLD_SIZE"), path, c->seconds, &why);
    if (why) die(1, "--ranks nccl: %s", why);
#else
    (void)c;
    die(2, "--ranks nccl: this program was built without NCCL: see ranks.h");
#endif
    return d;
}

static mixp_ranks_desc start_tcp(const ranks_options *c) {
    const char     *why;
    mixp_ranks_desc d = ddp_tcp(c->seconds, &why);
    if (why) die(1, "--ranks tcp: %s", why);
    return d;
}

static mixp_ranks_desc start_mpi(int *argc, char ***argv) {
    mixp_ranks_desc d = {.size = 0};
#ifdef TRAINER_MPI
    d = ddp_mpi(argc, argv, 0);
    if (!d.size) die(1, "--ranks mpi: MPI could not be started");
#else
    (void)argc, (void)argv;
    die(2, "--ranks mpi: this program was built without MPI: see ranks.h");
#endif
    return d;
}

/* Rank 0 handles signals and ends the other ranks; the other ranks ignore signals from their
 * start. */
static mixp_ranks_desc fork_ranks(int n) {
    mixp_ranks_desc d;
    sigset_t        stops, before;
    sigemptyset(&stops);
    for (int i = 0; i < STOP_SIGNALS; i++) sigaddset(&stops, stop_signals[i]);
    sigprocmask(SIG_BLOCK, &stops, &before);
    d = ddp_fork(n);
    if (d.rank) ignore_signals();
    sigprocmask(SIG_SETMASK, &before, NULL);
    return d;
}

/* Launchers such as mpirun give their ranks a pseudo-terminal, but the output goes to a log. */
static int under_launcher(const char *ranks) {
    static const char *const signs[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMI_RANK"};
    for (size_t i = 0; i < sizeof signs / sizeof signs[0]; i++) if (getenv(signs[i])) return 1;
    return strcmp(ranks, "mpi") == 0 || strcmp(ranks, "nccl") == 0;
}

/* --ordered: the gradient of a step is ((batch 0 + batch 1) + batch 2) + ..., for any number of
 * ranks. Ranks take the batches in turn, and exchange each: rank 0 sends the sum so far plus its own
 * gradient, the others their own, and the transport adds in the order of ranks. One rank needs no
 * exchange: mixprec adds its batches in this order (`apart`). */
static struct ordered_sums {
    mixp_ranks_desc world;              /* the transport's description */
    float         **totals;             /* rank 0's running sum for each range of gradients       */
    int64_t        *counts;
    int64_t         ranges, next;       /* ranges with a total; the range of the next call */
    int             first, last;        /* 1: this is the first, the last batch of this rank */
} ordered;

/* Called before batch i of n of this rank. */
static void order_batch(int64_t i, int64_t n) {
    ordered.next = 0;
    ordered.first = i == 0;
    ordered.last = i == n - 1;
}

/* The total of the next range; NULL: out of memory, or the ranges have changed. */
static float *ordered_total(int64_t count) {
    const size_t n = (size_t)ordered.next + 1;
    if (ordered.next++ < ordered.ranges)
        return ordered.counts[n - 1] == count ? ordered.totals[n - 1] : NULL;
    float  **totals = (float **)realloc(ordered.totals, n * sizeof *totals);
    if (totals) ordered.totals = totals;
    int64_t *counts = (int64_t *)realloc(ordered.counts, n * sizeof *counts);
    if (counts) ordered.counts = counts;
    if (!totals || !counts) return NULL;
    totals[n - 1] = (float *)calloc((size_t)count, sizeof **totals);
    counts[n - 1] = count;
    if (totals[n - 1]) ordered.ranges++;
    return totals[n - 1];
}

static const char *ordered_sum(void *user, void *data, int64_t count, mixp_dtype dtype, void *stream,
                               double seconds) {
    const int   keeps = ordered.world.rank == 0 && !(ordered.first && ordered.last);
    float      *total = NULL, *sum = (float *)data;
    const char *why;
    if (stream || dtype != MIXP_F32) return "--ordered adds only f32, and only on CPUs";
    if (keeps) total = ordered_total(count);
    if (keeps && !total) return "--ordered: out of memory, or other gradients than before";
    for (int64_t i = 0; total && !ordered.first && i < count; i++) sum[i] += total[i];
    why = ordered.world.sum(user, data, count, dtype, stream, seconds);
    if (total && !why) memcpy(total, sum, (size_t)count * sizeof *sum);
    return why;
}

static const char *ordered_wait(void *user, void *stream, double seconds) {
    (void)user;                         /* ordered_sum has completed already   */
    (void)stream;
    (void)seconds;
    return NULL;
}

static mixp_ranks_desc order_ranks(mixp_ranks_desc d) {
    ordered.world = d;
    d.mean = MIXP_MEAN_NONE;            /* the loss is divided by all batches of a step */
    if (d.size > 1) {
        d.grad_ready = ordered_sum;
        d.grad_wait = ordered_wait;
        return d;
    }
    d.size = d.apart = 1;
    return d;
}

/* Size 0 means no ranks. */
static mixp_ranks_desc start_world(const ranks_options *c, int *argc, char ***argv) {
    mixp_ranks_desc d = {.size = 0};
    char            rest;
    int             n = 0;
    if (!c->ranks[0]) return d;
    if (sscanf(c->ranks, "fork:%4d%c", &n, &rest) == 1 && n >= 1 && n <= DDP_RANKS) {
        d = fork_ranks(n);
        if (!d.size) die(1, "--ranks %s: cannot get shared memory", c->ranks);
    } else if (strcmp(c->ranks, "mpi") == 0) d = start_mpi(argc, argv);
    else if (strcmp(c->ranks, "nccl") == 0) d = start_nccl(c);
    else if (strcmp(c->ranks, "tcp") == 0) d = start_tcp(c);
    else die(2, "--ranks \"%s\" is not one of fork:N (N from 1 to %d), tcp, mpi, nccl", c->ranks, DDP_RANKS);
    d.seconds = c->seconds;
    d.shard = c->shard > 0;
    d.scatter = c->shard > 1;
    if (d.rank == 0) return d;
    ignore_signals();
    if (!freopen("/dev/null", "w", stdout) || !freopen("/dev/null", "w", stderr)) _exit(1);
    return d;
}

static mixp_ranks_desc start_ranks(const ranks_options *c, int *argc, char ***argv) {
    mixp_ranks_desc d = start_world(c, argc, argv);
    return c->ordered ? order_ranks(d) : d;
}

/* Why the data on the GPU is invalid, or NULL. Only NCCL can fail without an error here. */
static const char *ranks_failed(const mixp_ranks_desc *d) {
#ifdef TRAINER_NCCL
    if (d->sum == ddp_nccl_sum) return ddp_nccl_failed();
#endif
    (void)d;
    return NULL;
}

/* Rank 0 waits for the others. failed: a failed rank publishes its failure, so no rank waits for
 * it. */
static int end_ranks(const char *ranks, const mixp_ranks_desc *d, int failed) {
    if (!d->size) return failed;
#ifdef TRAINER_MPI
    if (strcmp(ranks, "mpi") == 0) ddp_mpi_end(failed);
#endif
#ifdef TRAINER_NCCL
    if (strcmp(ranks, "nccl") == 0 && failed) ddp_nccl_stop(NULL, "this rank failed");
    if (strcmp(ranks, "nccl") == 0) ddp_nccl_end();
#endif
    if (strcmp(ranks, "tcp") == 0) return ddp_tcp_end(failed);
    return strncmp(ranks, "fork:", 5) == 0 ? ddp_wait(failed) : failed;
}

#endif
