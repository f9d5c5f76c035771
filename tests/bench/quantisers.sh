#!/bin/sh
# quantisers.sh - the CPU's quantiser of recipes beside torchao's and TransformerEngine's, bit for bit.
# SPDX-License-Identifier: MIT OR Unlicense
#
#   tests/bench/quantisers.sh [MILLIONS [TRANSFORMER_ENGINE]]
#
# MILLIONS of values for each kind (4). PYTHON must have torch and torchao. TRANSFORMER_ENGINE is a checkout
# whose references in Python are to run too.
python=${PYTHON:-python3} here=$(dirname "$0")
"$python" -c 'import torchao' 2>/dev/null || { echo 'skip quantisers: no torchao'; exit 0; }
tmp=$(mktemp -d) && trap 'rm -rf "$tmp"' EXIT
${CC:-cc} -std=c99 -O2 -I. -shared -fPIC tests/support/quantisers.c -lm -o "$tmp/quantisers.so" &&
    "$python" -W ignore "$here/quantisers.py" "$tmp/quantisers.so" "${1:-4}" ${2:+"$2"}
