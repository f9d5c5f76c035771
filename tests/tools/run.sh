#!/bin/sh
# run.sh - runs test commands and adds up what they report.
# SPDX-License-Identifier: MIT OR Unlicense
#
#   tests/tools/run.sh [-n] [-t SECONDS] [-j N] COMMAND...
#
# Each COMMAND is one argument and must end its standard output with the line `N passed, N failed, N
# skipped`. The script shows one line per command, and more only if the command failed. N commands
# run at a time (default 1); their reports appear in the order of the arguments. Each of these
# counts as one failure: a crash, a hang past SECONDS (default 600), an exit status that contradicts
# the counts, a missing last line, a command that tested nothing. Exit status 77 is a skip. The last
# line is the sum. The exit status is 1 if anything failed, and with -n also if no test passed. (Hangs
# are detected only if the system has `timeout`.) After a signal the script stops the commands, reports those that
# ended, and counts each of the others as one failure.

seconds=600 jobs=1 needs_pass=
if [ "$1" = -n ]; then needs_pass=1; shift; fi
if [ "$1" = -t ]; then seconds=$2; shift 2; fi
if [ "$1" = -j ]; then jobs=$2; shift 2; fi
guard=; command -v timeout >/dev/null 2>&1 && guard="timeout -k 5 $seconds"

# Threads that wait for each other asleep: spinning ones take a hundred times as long where
# other programs want the cores too.
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"

# What a test frees it asks for again: glibc would give it back to the kernel each time.
export MALLOC_TRIM_THRESHOLD_=1073741824 MALLOC_MMAP_THRESHOLD_=33554432

tmp=$(mktemp -d) || exit 1
workers=
trap 'rm -rf "$tmp"' EXIT
cut=
trap 'cut=1; kill $workers 2>/dev/null' INT TERM

# Runs the commands that no other worker has taken; making a folder is how one is taken. The exit
# status is moved into place last: where it is, the rest is whole.
work() {
    number=0 pid=
    trap 'kill $pid 2>/dev/null; exit 130' INT TERM
    for command; do
        number=$((number + 1)) at=$tmp/$number
        mkdir "$at" 2>/dev/null || continue
        start=$(date +%s)
        $guard sh -c "$command" >"$at/out" 2>"$at/err" </dev/null & pid=$!
        { wait $pid; } 2>/dev/null
        echo "$? $(($(date +%s) - start))" >"$at/unfinished"
        mv "$at/unfinished" "$at/status"
    done
}

# Sleeps for a moment, or for a second where sleep knows no fractions.
nap() { sleep 0.1 2>/dev/null || sleep 1; }

# Sets p, f, s (the counts) and why (text, when the command itself failed).
judge() {
    why= p=0 f=1 s=0
    counts=$(tail -n 1 "$at/out" | tr -d '\r' |
        sed -n 's/^\([0-9][0-9]*\) passed, \([0-9][0-9]*\) failed, \([0-9][0-9]*\) skipped$/p=\1 f=\2 s=\3/p')
    if [ -n "$guard" ] && { [ "$1" = 124 ] || [ "$1" = 137 ]; }; then why="stopped after $seconds s"
    elif [ "$1" -gt 128 ]; then why="killed by signal $(($1 - 128))"
    elif [ "$1" = 77 ]; then f=0 s=1 why=$(tail -n 1 "$at/out" | cut -c 1-110)
    elif [ -z "$counts" ]; then why="exit status $1, and no last line of counts"
    else
        eval "$counts"
        if [ "$1" -ne 0 ] && [ "$f" -eq 0 ]; then f=1 why="exit status $1 without a failed test"
        elif [ "$1" -eq 0 ] && [ "$f" -ne 0 ]; then why="exit status 0 with failed tests"
        elif [ "$((p + f + s))" -eq 0 ]; then f=1 why="no test ran"
        fi
    fi
}

worker=0
while [ $worker -lt "$jobs" ]; do
    work "$@" & workers="$workers $!"
    worker=$((worker + 1))
done

passed=0 failed=0 skipped=0 number=0
for command; do
    number=$((number + 1)) at=$tmp/$number
    while [ ! -e "$at/status" ] && [ -z "$cut" ]; do nap; done
    if [ -e "$at/status" ]; then
        read -r status took <"$at/status"
        judge "$status"
    else p=0 f=1 s=0 took=0 why='not finished: run.sh was stopped'
    fi
    word=ok; [ "$f" -gt 0 ] && word=FAIL
    printf '%-4s %-36s %5d passed, %d failed, %d skipped  (%d s)%s\n' "$word" "$command" \
        "$p" "$f" "$s" "$took" "${why:+: $why}"
    if [ "$f" -gt 0 ]; then
        grep -v -e '^ok ' -e '^skip ' "$at/out" 2>/dev/null | tail -n 60
        tail -n 20 "$at/err" 2>/dev/null
    fi
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
done
none=
[ -z "$needs_pass" ] || [ "$passed" -gt 0 ] || none='no test passed: read why each was skipped'
[ -z "$none" ] || echo "$none"
echo "$passed passed, $failed failed, $skipped skipped"
[ -z "$cut" ] || exit 130
[ "$failed" -eq 0 ] && [ -z "$none" ]
