#!/bin/sh
# gpu_sanitizer.sh - the CUDA tests on a real GPU under the tools of compute-sanitizer. Skipped if
# compute-sanitizer is not installed or there is no GPU.
# SPDX-License-Identifier: MIT OR Unlicense
#
#   tests/cuda/gpu_sanitizer.sh PROGRAM...       (CUDA; TOOLS, by default all four; LIMIT per run)
. tests/support/check.sh

sanitizer=$(command -v compute-sanitizer || echo "${CUDA:-/usr/local/cuda}/bin/compute-sanitizer")
if [ ! -x "$sanitizer" ]; then
    skip compute-sanitizer
    report
    exit
fi
export MIXPREC_TEST_QUICK=1
guard=; command -v timeout >/dev/null 2>&1 && guard="timeout -k 5 ${LIMIT:-90}"

# Exit status 77 of a program, even of one without a test to run, says that there is no GPU.
if [ $# -gt 0 ]; then
    MIXPREC_TEST_ONLY=none "$1" >/dev/null 2>&1
    if [ $? = 77 ]; then
        skip 'compute-sanitizer (no GPU)'
        report
        exit
    fi
fi

# under TOOL PROGRAM. Errors of API calls are not reported: the tests make some on purpose, and look
# at each. What takes too long under a tool is cut and counted as a skip: it found nothing so far.
under() {
    options="--tool $1"
    [ "$1" = memcheck ] && options="$options --report-api-errors no"
    # shellcheck disable=SC2086
    $guard "$sanitizer" $options --error-exitcode 9 --log-file "$tmp/sanitizer" "$2" >"$tmp/out" 2>&1
    status=$?
    tail -n 5 "$tmp/out"
    [ "$status" = 0 ] || tail -n 30 "$tmp/sanitizer" 2>/dev/null
    return $status
}
for tool in ${TOOLS:-memcheck racecheck synccheck initcheck}; do
    for program; do
        what="$tool: $(basename "$program")"
        under "$tool" "$program" >"$tmp/under" 2>&1
        status=$?
        if [ $status = 124 ] || [ $status = 137 ]; then skip "$what (cut after ${LIMIT:-90} s)"
        else check "$what" sh -c 'cat "$1"; exit "$2"' sh "$tmp/under" $status; fi
    done
done
report
