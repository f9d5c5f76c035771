#!/bin/sh
# run.sh - what `make bench` runs: conversions, the optimizer phase, products, training, each
# beside the peers that are installed; then a step by number of threads. Run it on a machine that does nothing else.
# SPDX-License-Identifier: MIT OR Unlicense
#
#   tests/bench/run.sh [TEXT]        TEXT: what the small GPT is trained on [mixprec.h]
here=$(dirname "$0") build=${BUILD:-build} python=${PYTHON:-python3} text=${1:-$(dirname "$0")/../../mixprec.h}
if "$python" -c '' 2>/dev/null; then
    "$python" "$here/peers.py" "$build/bench/libpeers.so" || exit 1
    "$python" "$here/peers.py" "$build/bench/libpeers.so" optimizer gemm attention --threads 2 || exit 1
else
    echo "Python: missing; conversions, optimizer and products run only beside it"
fi
echo
echo "Training nanoGPT's CPU configuration"
PYTHON="$python" BUILD="$build" "$here/train.sh" "$text" 3 2 100 || exit 1
echo
echo "A step's kernels by number of threads"
"$build/bench/bench_threads"
