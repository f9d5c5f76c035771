#!/bin/sh
# real_data.sh - twelve data sets that others made, in f32, bf16 and fp16, with and without the guard.
# SPDX-License-Identifier: MIT OR Unlicense
#
#   tests/bench/real_data.sh [SEEDS]        5 seeds; 60 seeds took two minutes
#
# Wants build/bench/real_data, and scikit-learn, vega_datasets and palmerpenguins in PYTHON, which carry
# the data. A set whose package is missing is left out. Ends with 1 if a guarded run trains worse: see
# real_data.c.
build=${BUILD:-build} python=${PYTHON:-python3}
[ -x "$build/bench/real_data" ] || { echo "real_data.sh: run make $build/bench/real_data first" >&2; exit 2; }
sets=$(mktemp -d) || exit 2
trap 'rm -rf "$sets"' EXIT
"$python" tests/bench/real_data.py "$sets" || exit 2
set -- "${1:-5}" "$sets"/*.txt
[ -r "$2" ] || { echo "real_data.sh: no data set is installed for $python" >&2; exit 2; }
seeds=$1
shift
OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive "$build/bench/real_data" -s "$seeds" "$@"
