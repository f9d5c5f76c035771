#!/bin/sh
# gpu_sanitizer.sh - the CUDA tests on a real GPU under the tools of compute-sanitizer. Skipped
# where it is not installed.
# SPDX-License-Identifier: MIT OR Unlicense
#
#   tests/gpu_sanitizer.sh PROGRAM...       (CUDA; TOOLS, by default all four)
. tests/check.sh

sanitizer=$(command -v compute-sanitizer || echo "${CUDA:-/usr/local/cuda}/bin/compute-sanitizer")
if [ ! -x "$sanitizer" ]; then
    skip compute-sanitizer
    report
    exit
fi
export MIXPREC_TEST_QUICK=1

# under TOOL PROGRAM: 77 when there is no GPU.
under() {
    "$sanitizer" --tool "$1" --error-exitcode 9 --log-file "$tmp/sanitizer" "$2" >"$tmp/out" 2>&1
    status=$?
    tail -n 5 "$tmp/out"
    [ "$status" = 0 ] || [ "$status" = 77 ] || tail -n 30 "$tmp/sanitizer"
    return $status
}
for tool in ${TOOLS:-memcheck racecheck synccheck initcheck}; do
    for program; do
        "$program" >/dev/null 2>&1
        if [ $? = 77 ]; then skip "$tool: $(basename "$program") (no GPU)"; continue; fi
        check "$tool: $(basename "$program")" under "$tool" "$program"
    done
done
report
