#!/bin/sh
# ranks_gloo.sh - sums of f32 over 2 ranks of this machine: the adapters in examples/ beside PyTorch's gloo
# SPDX-License-Identifier: MIT OR Unlicense
#
#   tests/bench/ranks_gloo.sh [ROUNDS 3]
#
# In each round every transport sums arrays of five sizes, one transport after the other; a figure is the
# least time of all sums, so that a busy machine counts less. PYTHON names a Python with torch
# (default: python3); without torch, and without OpenMPI, their columns are left out. MPI: in the order
# of ranks, and in the engine's order.
set -eu
tmp=$(mktemp -d) && trap 'rm -rf "$tmp"' EXIT
rounds=${1:-3} python=${PYTHON:-python3}
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
export OMPI_MCA_mpi_yield_when_idle=1
export OMP_NUM_THREADS=1 MASTER_ADDR=127.0.0.1 WORLD_SIZE=2
cat >"$tmp/sums.c" <<'END_OF_PROGRAM'
#define _POSIX_C_SOURCE 200809L
#include "mixprec.h"
#ifdef WITH_MPI
#  include "examples/ddp_mpi.c"
#else
#  include "examples/ddp_fork.c"
#  include "examples/ddp_tcp.c"
#endif
static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
/* Rank 0 prints the least time of a size's sums, in microseconds. All elements are 1 before each sum. */
static int sums(const char *name, const mixp_ranks_desc *d) {
    int failed = 0;
    for (int64_t n = 256; n <= (int64_t)1 << 24; n *= 16) {
        const int turns = n < 1 << 20 ? 60 : n < 1 << 22 ? 15 : 5;
        double least = 1e9;
        float *x = malloc((size_t)n * sizeof *x);
        for (int turn = -2; turn < turns && !failed; turn++) {
            double began, took;
            for (int64_t i = 0; i < n; i++) x[i] = 1;
            began = now();
            failed = d->sum(d->user, x, n, MIXP_F32, NULL, 60) != NULL || x[n - 1] != (float)d->size;
            took = 1e6 * (now() - began);
            if (turn >= 0 && took < least) least = took;
        }
        if (d->rank == 0 && !failed) printf("%s %lld %.1f\n", name, (long long)n, least);
        free(x);
    }
    fflush(stdout);
    return failed;
}
int main(int argc, char **argv) {
    const char *name = argv[1];
    mixp_ranks_desc d;
#ifdef WITH_MPI
    d = ddp_mpi(&argc, &argv, strcmp(name, "mpi-order") == 0);
    return ddp_mpi_end(sums(name, &d));
#else
    const char *why = NULL;
    (void)argc;
    if (strcmp(name, "fork") == 0) {
        d = ddp_fork(2);
        return ddp_wait(sums(name, &d));
    }
    d = ddp_tcp(60, &why);
    if (why) fprintf(stderr, "%s\n", why);
    return ddp_tcp_end(why ? 1 : sums(name, &d));
#endif
}
END_OF_PROGRAM
printf '#define MIXPREC_IMPLEMENTATION\n#include "mixprec.h"\n' >"$tmp/library.c"
${CC:-cc} -std=gnu99 -O0 -I. -c "$tmp/library.c" -o "$tmp/library.o"
${CC:-cc} -std=gnu99 -O2 -w -I. "$tmp/sums.c" "$tmp/library.o" -lm -lpthread -o "$tmp/sums"
mpi= gloo=
for name in .openmpi ''; do
    [ -z "$mpi" ] && command -v "mpicc$name" >/dev/null && command -v "mpirun$name" >/dev/null && mpi=mpirun$name &&
        "mpicc$name" -std=gnu99 -O2 -w -I. -DWITH_MPI "$tmp/sums.c" "$tmp/library.o" -lm -lpthread -o "$tmp/sums_mpi"
done
"$python" -c 'import torch.distributed as d; assert d.is_gloo_available()' 2>/dev/null && gloo=1
[ "$gloo" ] || echo "gloo: left out, $python has no torch"
[ "$mpi" ] || echo "MPI: left out, not there"

# two COMMAND...: the command as ranks 0 and 1, which meet at a port.
two() {
    MASTER_PORT=$((10000 + ($$ * 7 + turn) % 20000)) && turn=$((turn + 1)) && export MASTER_PORT
    RANK=1 "$@" & other=$!
    RANK=0 "$@" && wait $other
}
turn=0
for round in $(seq "$rounds"); do
    "$tmp/sums" fork
    two "$tmp/sums" tcp
    [ -z "$mpi" ] || "$mpi" -n 2 "$tmp/sums_mpi" mpi-order
    [ -z "$mpi" ] || "$mpi" -n 2 "$tmp/sums_mpi" mpi-engine
    [ -z "$gloo" ] || two "$python" tests/bench/ranks_gloo.py
done >"$tmp/all"
awk -v rounds="$rounds" '
    { key = $1 " " $2; if (!(key in least) || $3 + 0 < least[key]) least[key] = $3 + 0
      if (!($2 in seen)) { seen[$2] = 1; sizes[++n_sizes] = $2 }
      if (!($1 in there)) { there[$1] = 1; ways[++n_ways] = $1 } }
    END { printf "microseconds of a sum of f32 over 2 ranks, the least of %d rounds\n%12s", rounds, "bytes"
          for (w = 1; w <= n_ways; w++) printf " %11s", ways[w]
          for (s = 1; s <= n_sizes; s++) { printf "\n%12d", 4 * sizes[s]
              for (w = 1; w <= n_ways; w++) printf " %11.1f", least[ways[w] " " sizes[s]] }
          printf "\n" }' "$tmp/all"
