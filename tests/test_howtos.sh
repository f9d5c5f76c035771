#!/bin/sh
# test_howtos.sh - the numbered examples: each is short, builds as its comment says, and prints the
# output that is quoted at its end.
# SPDX-License-Identifier: MIT OR Unlicense
cd "$(dirname "$0")/.." || exit 1
. tests/check.sh

build=${BUILD:-build}
case $build in /*) ;; *) build=$PWD/$build ;; esac

# howto NAME: its output is the comment `prints:` at its end.
howto() {
    awk '/^\*\/$/ { on = 0 } on { print } /^\/\* prints:$/ { on = 1 }' "examples/$1.c" >"$tmp/want"
    [ -s "$tmp/want" ] && (cd "$tmp" && "$build/$1") >"$tmp/got" 2>&1
    code=$?
    diff "$tmp/want" "$tmp/got" && [ "$code" -eq 0 ]
}
short() { [ "$(awk '/^\/\* prints:$/ { exit } { n++ } END { print n }' "examples/$1.c")" -le 60 ]; }

n=0
for f in examples/[0-9][0-9]_*.c; do
    name=$(basename "$f" .c)
    n=$((n + 1))
    check "$name is short"       short "$name"
    check "its number is $n"     [ "${name%%_*}" = "$(printf %02d $n)" ]
    if [ -x "$build/$name" ]; then check "$name prints what it says" howto "$name"
    else skip "$name is not built (make examples)"; fi
done
check 'there are some' [ "$n" -ge 5 ]
report
