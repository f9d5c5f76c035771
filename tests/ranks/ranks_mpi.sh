#!/bin/sh
# ranks_mpi.sh - ranks over MPI, on this machine: 2 and 4 ranks, and a rank that is killed. It uses OpenMPI and
# MPICH under Debian's names (mpicc.openmpi, mpicc.mpich), otherwise the plain mpicc and mpiexec. MPICC and MPIEXEC
# name one other MPI: `make test-long MPICC=mpicc.mpich MPIEXEC=mpiexec.mpich`. A missing MPI is skipped.
# SPDX-License-Identifier: MIT OR Unlicense
. tests/support/check.sh

build=${BUILD:-build}

# OpenMPI alone asks for these: a container's user is root, and cores are few.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
export OMPI_MCA_mpi_yield_when_idle=1 OMPI_MCA_btl_vader_single_copy_mechanism=none

# there MPICC MPIEXEC
there() { command -v "$1" >/dev/null && command -v "$2" >/dev/null; }
# The limits end a hang alone: beside 8 busy programs on 2 cores, 4 ranks took two minutes in place of ten seconds.
ranks() {
    timeout 1200 "$mpiexec" -n "$1" "$program" >"$tmp/log" 2>&1 &&
        grep -q '^9 passed, 0 failed' "$tmp/log"
}
# mpiexec ends the others, or they give up after 5 s.
killed() {
    timeout 600 "$mpiexec" -n 2 "$program" kill >"$tmp/log" 2>&1
    killed=$?
    [ -x "$program" ] && [ "$killed" -ne 0 ]
}

named() {
    timeout 600 "$mpiexec" -n 3 "$program" late >"$tmp/log" 2>&1
    grep -q named "$tmp/log" && ! grep -q 'does not contain' "$tmp/log"
}

# over ENGINE MPICC MPIEXEC: all tests.
over() {
    engine=$1 mpicc=$2 mpiexec=$3 program=$tmp/ranks_$1
    if ! there "$mpicc" "$mpiexec"; then
        for what in compiled trainer '2 ranks' '4 ranks' killed soon late; do skip "$engine: $what"; done
        return
    fi
    check "$engine: examples/ddp_mpi.c is compiled and linked" \
        "$mpicc" -std=gnu99 -O1 -Wall -Wextra -Wno-unused-function -I. -Itests -Itests/support -DMIXPREC_IMPLEMENTATION_DONE \
        tests/ranks/ranks_mpi.c "$build/libmixprec.a" ${OPENMP-} -lm -lpthread -o "$program"
    check "$engine: so are the trainer and llama with it" \
        "$mpicc" -std=gnu99 -Wall -Wextra -Wno-unused-function -I. -DTRAINER_MPI -fsyntax-only examples/trainer/trainer.c examples/llama.c
    for n in 2 4; do
        check "$engine, $n ranks: order, overlap, shards, scattered sums, Inf, all dtypes, unlike and busy ranks"  ranks "$n"
        [ "$failed" = 0 ] || tail -n 20 "$tmp/log"
    done
    check "$engine: a rank that is killed ends all"  killed
    check "$engine: and soon"                        [ "$killed" -ne 124 ]
    check "$engine: a rank that comes late is named"  named
}

if [ -n "${MPICC-}${MPIEXEC-}" ]; then over mpi "${MPICC:-mpicc}" "${MPIEXEC:-mpiexec}"
elif there mpicc.openmpi mpiexec.openmpi || there mpicc.mpich mpiexec.mpich; then
    over openmpi mpicc.openmpi mpiexec.openmpi
    over mpich mpicc.mpich mpiexec.mpich
else over mpi mpicc mpiexec
fi
report
