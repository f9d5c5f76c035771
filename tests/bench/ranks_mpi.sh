#!/bin/sh
# ranks_mpi.sh - how much of the sums of gradients over MPI backward hides, 2 ranks on this machine
# SPDX-License-Identifier: MIT OR Unlicense
#
#   tests/bench/ranks_mpi.sh [WIDTH 1024] [LAYERS 6] [ROUNDS 15]
#
# Steps of three kinds take turns in one run, and medians are compared: without sums, with sums that are
# awaited one by one, and with sums that ddp_mpi.c's thread carries while backward goes on. Over OpenMPI
# and MPICH, as Debian names them. On a machine with as many cores as ranks, where a sum is work of the
# same cores, no time can be hidden, but the waits for the other rank can. OpenMPI runs twice: with copies
# that one rank makes alone (cma, its default, which a container may forbid), and without them (none): then a
# sum moves in small pieces, each of which waits until both ranks have a core.
set -eu
tmp=$(mktemp -d) && trap 'rm -rf "$tmp"' EXIT
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
export OMPI_MCA_mpi_yield_when_idle=1
cat >"$tmp/overlap.c" <<'END_OF_PROGRAM'
#define _POSIX_C_SOURCE 200809L
#include "mixprec.h"
#include "examples/ddp_mpi.c"

enum { NONE, AT_ONCE, BEHIND, KINDS, MOST = 64 };
static int    kind;
static double summed, awaited;          /* seconds of this step */

static const char *begin(void *user, void *data, int64_t count, mixp_dtype dtype, void *stream, double seconds) {
    const double began = MPI_Wtime();
    const char *why = NULL;
    if (kind == AT_ONCE) why = ddp_mpi_sum(user, data, count, dtype, stream, seconds);
    if (kind == BEHIND) why = ddp_mpi_begin_sum(user, data, count, dtype, stream, seconds);
    summed += MPI_Wtime() - began;
    return why;
}
static const char *await(void *user, void *stream, double seconds) {
    const double began = MPI_Wtime();
    const char *why = ddp_mpi_wait(user, stream, seconds);
    awaited += MPI_Wtime() - began;
    return why;
}
static int by_size(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}
static double median(double *x, int n) { qsort(x, (size_t)n, sizeof *x, by_size); return 1e3 * x[n / 2]; }

/* 32 MiB whose sum is begun, then two seconds of other work: what is left to wait for, beside the whole. */
static void carried_alone(const char *engine) {
    const int64_t n = 8 << 20;
    float *x = calloc((size_t)n, sizeof *x);
    double at_once = 0, left = 0, began;
    volatile double work = 0;
    for (int turn = 0; turn < 2; turn++) {              /* the first warms up */
        MPI_Barrier(MPI_COMM_WORLD);
        began = MPI_Wtime();
        ddp_mpi_sum(NULL, x, n, MIXP_F32, NULL, 60);
        at_once = MPI_Wtime() - began;
        ddp_mpi_begin_sum(NULL, x, n, MIXP_F32, NULL, 60);
        for (began = MPI_Wtime(); MPI_Wtime() - began < 2;) work += 1;
        began = MPI_Wtime();
        ddp_mpi_wait(NULL, NULL, 60);
        left = MPI_Wtime() - began;
    }
    if (ddp_m.rank == 0)
        printf("%s: a sum of 32 MiB takes %.0f ms; begun two seconds of work before, %.1f ms are left\n", engine,
               1e3 * at_once, 1e3 * left);
    free(x);
}

int main(int argc, char **argv) {
    static double took[KINDS][1000], sums[KINDS][1000], waits[KINDS][1000];
    const int width = atoi(argv[1]), layers = atoi(argv[2]), rounds = atoi(argv[3]), rows = 256;
    const int64_t shape[2] = {width, width}, batch[2] = {rows, width};
    float *x = malloc((size_t)(rows * width) * sizeof *x);
    mixp_ranks_desc ranks = ddp_mpi(&argc, &argv, atoi(argv[4]));
    mixp_context_desc d;
    mixp_tensor *w[MOST];
    memset(&d, 0, sizeof d);
    carried_alone(argv[5]);
    ranks.grad_ready = begin, ranks.grad_wait = await, ranks.bucket_bytes = 4 << 20, ranks.mean = MIXP_MEAN_NONE;
    d.ranks = &ranks, d.threads = 1;
    mixp_context *ctx = mixp_context_new(&d);
    mixp_optimizer_desc sgd = mixp_sgd_defaults();
    mixp_optimizer *opt = mixp_optimizer_new(ctx, &sgd);
    for (int i = 0; i < rows * width; i++) x[i] = (float)(i * 37 % 101) / 50 - 1;   /* alike on all ranks */
    for (int i = 0; i < layers; i++) {
        char name[16];
        snprintf(name, sizeof name, "w%d", i);
        w[i] = mixp_param(ctx, name, MIXP_F32, 2, shape);
        mixp_init_normal(w[i], 0, 0.03);
        mixp_optimizer_add(opt, w[i], NULL);
    }
    for (int step = -KINDS; step < rounds * KINDS; step++) {
        kind = (step + KINDS) % KINDS;
        summed = awaited = 0;
        MPI_Barrier(MPI_COMM_WORLD);
        const double began = MPI_Wtime();
        mixp_step_begin(ctx);
        mixp_zero_grad(opt);
        mixp_tensor *h = mixp_input(ctx, MIXP_F32, 2, batch, x);
        for (int i = 0; i < layers; i++) h = mixp_relu(ctx, mixp_linear(ctx, h, w[i], NULL));
        mixp_backward(ctx, mixp_mean(ctx, h, MIXP_ALL, 0));
        const double all = MPI_Wtime() - began;
        if (step < 0) continue;
        took[kind][step / KINDS] = all, sums[kind][step / KINDS] = summed, waits[kind][step / KINDS] = awaited;
    }
    const char *why;
    if (mixp_context_error(ctx, &why)) printf("an error, the figures mean nothing: %s\n", why);
    const double none = median(took[NONE], rounds), once = median(took[AT_ONCE], rounds), behind = median(took[BEHIND], rounds);
    const double carried = median(sums[AT_ONCE], rounds), left = median(waits[BEHIND], rounds);
    if (ranks.rank == 0)
        printf("%s%s: forward and backward %.0f ms; with sums one by one %.0f (%.0f of it in them), with sums behind %.0f "
               "(%.0f in the wait)\n  left to wait for %.0f %% of the sums; of the time that they add %.0f %% is hidden\n",
               argv[5], ranks.rank ? "" : ddp_m.ordered ? ", in the order of ranks" : ", in the engine's order", none, once,
               carried, behind, left, 100 * left / carried, 100 * (1 - (behind - none) / (once - none)));
    mixp_context_free(ctx);
    return ddp_mpi_end(0);
}
END_OF_PROGRAM
printf '#define MIXPREC_IMPLEMENTATION\n#include "mixprec.h"\n' >"$tmp/library.c"
${CC:-cc} -std=gnu99 -O2 -I. -c "$tmp/library.c" -o "$tmp/library.o"
for engine in openmpi mpich; do
    command -v "mpicc.$engine" >/dev/null || { echo "$engine: not there"; continue; }
    "mpicc.$engine" -std=gnu99 -O2 -w -I. "$tmp/overlap.c" "$tmp/library.o" -lm -lpthread -o "$tmp/overlap"
    for copies in cma none; do
        export OMPI_MCA_btl_vader_single_copy_mechanism=$copies
        [ "$engine $copies" != 'mpich none' ] || continue       # a word for OpenMPI alone
        for ordered in 0 1; do
            "mpirun.$engine" -n 2 "$tmp/overlap" "${1:-1024}" "${2:-6}" "${3:-15}" "$ordered" "$engine, $copies"
        done
    done
done
