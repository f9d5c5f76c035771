#!/bin/sh
# linears.sh - the three products of a linear under a recipe beside torch._scaled_mm, torchao's Float8Linear and
# products of torchao's MX tensors: the same operands, within the error of f32 sums.
# SPDX-License-Identifier: MIT OR Unlicense
#
#   tests/bench/linears.sh
#
# PYTHON must have torch and torchao; without them the comparison is skipped, and counted.
. "$(dirname "$0")/../support/check.sh"
python=${PYTHON:-python3} here=$(dirname "$0")

if "$python" -c 'import torchao' 2>/dev/null; then
    ${CC:-cc} -std=c99 -O2 ${CFLAGS-} -I. -shared -fPIC tests/support/quantisers.c -lm -o "$tmp/quantisers.so" || exit 1
    "$python" -W ignore "$here/linears.py" "$tmp/quantisers.so" >"$tmp/rows" 2>"$tmp/errors"
    ended=$?
    cat "$tmp/rows"
    check 'every product lies within the error of f32 sums' test "$ended" -eq 0
    [ "$ended" -eq 0 ] || tail -n 5 "$tmp/errors"
else
    skip 'linears: no torchao'
fi
report
