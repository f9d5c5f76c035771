#!/bin/sh
# test_real_data.sh - raw columns that somebody published: bf16 loses what f32 learns, and the guard
# brings it back. All twelve sets: tests/bench/real_data.sh.
# SPDX-License-Identifier: MIT OR Unlicense
. tests/support/check.sh
program=${BUILD:-build}/bench/real_data python=${PYTHON:-python3}
export OMP_NUM_THREADS=1

ran()       { "$program" -s 20 "$tmp"/us_employment_raw.txt >"$tmp/out"; }
# apart ROW: how far its loss is above f32's, in percent
apart()     { awk -v row="$1" 'substr($0, 3, 12) ~ "^" row " *$"' "$tmp/out" | sed 's/.* \([-+][0-9.]*\) +- .*/\1/'; }
above()     { awk -v a="$(apart "$1")" -v least="$2" 'BEGIN { exit !(a != "" && a > least) }'; }
near()      { awk -v a="$(apart "$1")" 'BEGIN { exit !(a != "" && a < 2) }'; }

if [ ! -x "$program" ]; then skip "$program is not built"
elif ! "$python" tests/bench/real_data.py "$tmp" 2>/dev/null || [ ! -r "$tmp/us_employment_raw.txt" ]; then
    skip "$python has no vega_datasets"
else
    check 'no guarded way ends above f32'       ran
    check 'bf16 without a guard does'           above bf16 15
    check 'with a guard it ends as f32 does'    near 'bf16, guard'
fi
report
