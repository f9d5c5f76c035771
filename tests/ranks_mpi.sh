#!/bin/sh
# ranks_mpi.sh - ranks over MPI, with mpirun on this machine: 2 and 4 of them, and one that is killed.
# Without mpicc and mpirun all of it is skipped.
# SPDX-License-Identifier: MIT OR Unlicense
. tests/check.sh

build=${BUILD:-build}
if ! command -v mpicc >/dev/null || ! command -v mpirun >/dev/null; then
    echo '0 passed, 0 failed, 5 skipped'
    exit 0
fi

# OpenMPI alone asks for these: a container's user is root, and cores are few.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
export OMPI_MCA_mpi_yield_when_idle=1 OMPI_MCA_btl_vader_single_copy_mechanism=none

mpicc -std=gnu99 -O1 -Wall -Wno-unused-function -I. -Itests -DMIXPREC_IMPLEMENTATION_DONE \
    tests/ranks_mpi.c "$build/libmixprec.a" ${OPENMP-} -lm -o "$tmp/ranks_mpi" 2>"$tmp/log"
check 'examples/ddp_mpi.c is compiled and linked'  [ -x "$tmp/ranks_mpi" ]
for n in 2 4; do
    ranks() { timeout 120 mpirun -n "$n" "$tmp/ranks_mpi" >"$tmp/log" 2>&1 && grep -q '^4 passed, 0 failed' "$tmp/log"; }
    check "$n ranks: order, overlap, Inf, largest"  ranks
    [ "$failed" = 0 ] || tail -n 20 "$tmp/log"
done
# mpirun ends the others, or they give up: well before their 60 s.
killed() { ! timeout 40 mpirun -n 2 "$tmp/ranks_mpi" kill >"$tmp/log" 2>&1; }
soon=$(date +%s)
check 'a rank that is killed ends all'             killed
check 'and soon'                                   [ $(($(date +%s) - soon)) -lt 30 ]
report
