#!/bin/sh
# test_run.sh - tests tests/tools/run.sh with programs that misbehave in every way that run.sh must
# detect.
# SPDX-License-Identifier: MIT OR Unlicense
. tests/support/check.sh

# expect STATUS LAST_LINE COMMAND...: run.sh exits so and ends with that line.
expect() {
    want_status=$1 want_line=$2; shift 2
    tests/tools/run.sh "$@" >"$tmp/log" 2>&1; status=$?
    cat "$tmp/log"
    [ $status -eq "$want_status" ] && [ "$(tail -n 1 "$tmp/log")" = "$want_line" ]
}

# The same with three at a time.
expect_3() {
    want_status=$1 want_line=$2; shift 2
    tests/tools/run.sh -j 3 "$@" >"$tmp/log" 2>&1; status=$?
    [ $status -eq "$want_status" ] && [ "$(tail -n 1 "$tmp/log")" = "$want_line" ]
}
each_once() {
    run="echo x >>$tmp/ran; $good"
    tests/tools/run.sh -j 3 "$run" "$run" "$run" "$run" "$run" >/dev/null
    [ "$(wc -l <"$tmp/ran")" -eq 5 ]
}
in_order() {
    tests/tools/run.sh -j 2 "sleep 0.3; $good" "$good" >"$tmp/log"
    head -n 1 "$tmp/log" | grep -q 'sleep'
}

# A signal stops the second command. The first one's failure is shown, the second is one failure.
stopped() {
    tests/tools/run.sh "$bad" "touch $tmp/begun; exec sleep 60" "$good" >"$tmp/stopped" & stop=$!
    while [ ! -e "$tmp/begun" ]; do sleep 0.1; done
    kill -TERM $stop
    wait $stop
    status=$?
    cat "$tmp/stopped"
    [ $status = 130 ] && grep -q '^detail$' "$tmp/stopped" && grep -q ': not finished: run.sh was stopped$' "$tmp/stopped" &&
        [ "$(tail -n 1 "$tmp/stopped")" = '2 passed, 3 failed, 0 skipped' ]
}

good='echo 3 passed, 0 failed, 1 skipped'

# Programs that hang, and one that does not, which a busy machine may keep waiting: stopped after 8 s,
# beside what follows.
if command -v timeout >/dev/null 2>&1; then
    tests/tools/run.sh -t 8 -j 3 'sleep 600' "$good; sleep 601" "$good" >"$tmp/hangs" & hangs=$!
fi
# hang COMMAND: it was stopped, and counted as one failure.
hang() { cat "$tmp/hangs"; grep -F "$1 " "$tmp/hangs" | grep -q '^FAIL .* 0 passed, 1 failed, 0 skipped .*: stopped after 8 s$'; }
bad='echo detail; echo 2 passed, 1 failed, 0 skipped; exit 1'
shows() { tests/tools/run.sh "$1" | grep -q -e "$2"; }
hides() { ! shows "$@"; }

check 'a good program'            expect 0 '3 passed, 0 failed, 1 skipped' "$good"
check 'lines of Windows'          expect 0 '3 passed, 0 failed, 1 skipped' "printf '3 passed, 0 failed, 1 skipped\\r\\n'"
check 'sums of two'               expect 0 '6 passed, 0 failed, 2 skipped' "$good" "$good"
check 'failures are summed'       expect 1 '5 passed, 1 failed, 1 skipped' "$good" "$bad"
check 'a crash'                   expect 1 '0 passed, 1 failed, 0 skipped' 'kill -SEGV $$'
check 'a crash after the counts'  expect 1 '0 passed, 1 failed, 0 skipped' "$good; kill -ABRT \$\$"
check 'a missing last line'       expect 1 '0 passed, 1 failed, 0 skipped' 'echo fine'
check 'counts before the last'    expect 1 '0 passed, 1 failed, 0 skipped' "$good; echo more"
check 'silence'                   expect 1 '0 passed, 1 failed, 0 skipped' 'true'
check 'no test ran'               expect 1 '0 passed, 1 failed, 0 skipped' 'echo 0 passed, 0 failed, 0 skipped'
check 'failed, yet exit 0'        expect 1 '2 passed, 1 failed, 0 skipped' 'echo 2 passed, 1 failed, 0 skipped'
check 'passed, yet exit 1'        expect 1 '3 passed, 1 failed, 1 skipped' "$good; exit 1"
check 'a missing program'         expect 1 '0 passed, 1 failed, 0 skipped' './no-such-program'
check 'exit 77 is a skip'         expect 0 '0 passed, 0 failed, 1 skipped' 'exit 77'
check 'why it was is shown'       shows 'echo no GPU here; exit 77' '^ok .*: no GPU here$'
check '-n: a pass is needed'      expect 1 '0 passed, 0 failed, 2 skipped' -n 'exit 77' 'exit 77'
check '-n: one is enough'         expect 0 '3 passed, 0 failed, 2 skipped' -n 'exit 77' "$good"
check 'a signal shows the rest'   stopped
check 'others run after a crash'  expect 1 '3 passed, 1 failed, 1 skipped' 'kill -SEGV $$' "$good"
check 'three at a time'           expect_3 1 '8 passed, 1 failed, 2 skipped' "sleep 0.3; $good" "$bad" "$good"
check 'each is run once'          each_once
check 'in their order'            in_order
check 'a failure is shown'        shows "$bad" '^detail$'
check 'a success is not'          hides 'echo detail; echo 1 passed, 0 failed, 0 skipped' '^detail$'
if command -v timeout >/dev/null 2>&1; then
    wait "$hangs"
    check 'a hang'                hang 'sleep 600'
    check 'a hang after counts'   hang "$good; sleep 601"
    check 'others are summed'     [ "$(tail -n 1 "$tmp/hangs")" = '3 passed, 2 failed, 1 skipped' ]
else
    skip 'a hang (no timeout command)'
fi
report
