#!/bin/sh
# ranks_nccl.sh - compiles and links examples/ddp_nccl.c if NCCL and CUDA are installed. It does not
# run the program, which needs two GPUs. NCCL=dir names a folder with include/nccl.h and
# lib/libnccl.so.2, for example site-packages/nvidia/nccl of PyPI's package nvidia-nccl-cu13.
# SPDX-License-Identifier: MIT OR Unlicense
. tests/support/check.sh

cuda=${CUDA:-/usr/local/cuda}
header=$(ls ${NCCL:+"$NCCL/include/nccl.h"} "$cuda/include/nccl.h" /usr/include/nccl.h 2>/dev/null | head -n 1)
if [ -z "$header" ] || [ ! -r "$cuda/include/cuda_runtime.h" ]; then
    echo '0 passed, 0 failed, 4 skipped'
    exit 0
fi
library=$(ls ${NCCL:+"$NCCL"/lib/libnccl.so*} "$cuda"/lib64/libnccl.so* /usr/lib/*/libnccl.so* 2>/dev/null | head -n 1)

cat >"$tmp/nccl.c" <<'END_OF_PROGRAM'
#include "mixprec.h"
#include "examples/ddp_nccl.c"
int main(int argc, char **argv) {
    const char *why;
    mixp_ranks_desc d = ddp_nccl(argc, argc + 1, argv[0], 1, &why);
    if (d.size) ddp_nccl_end();
    return why != NULL;
}
END_OF_PROGRAM
warnings='-Wall -Wextra -Werror -Wno-unused-function'
check 'examples/ddp_nccl.c is compiled' ${CC:-cc} -std=gnu99 $warnings -I. -isystem "$cuda/include" \
    -isystem "$(dirname "$header")" -c "$tmp/nccl.c" -o "$tmp/nccl.o"
check 'so are the trainer and llama with it' ${CC:-cc} -std=gnu99 $warnings -I. -isystem "$cuda/include" \
    -isystem "$(dirname "$header")" -DTRAINER_NCCL -DTRAINER_CUDA -DMIXPREC_IMPLEMENTATION_DONE \
    -fsyntax-only examples/trainer/trainer.c examples/llama.c
if [ -n "$library" ]; then
    check 'and linked' ${CC:-cc} "$tmp/nccl.o" "${BUILD:-build}/libmixprec.a" "$library" \
        -L"$cuda/lib64" -lcudart ${OPENMP-} -lpthread -lm -o "$tmp/nccl"
else skip 'and linked'
fi
if [ -n "$library" ] && command -v mpicc >/dev/null; then
    check 'and linked where MPI starts it' mpicc -std=gnu99 $warnings -DDDP_NCCL_MPI -I. \
        -isystem "$cuda/include" -isystem "$(dirname "$header")" "$tmp/nccl.c" \
        "${BUILD:-build}/libmixprec.a" "$library" -L"$cuda/lib64" -lcudart ${OPENMP-} -lpthread -lm \
        -o "$tmp/nccl_mpi"
else skip 'and linked where MPI starts it'
fi
report
