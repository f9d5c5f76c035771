#!/bin/sh
# test_howtos.sh - the numbered examples, and those of examples/amp: each is short, builds as its comment
# says, prints the output that is quoted at its end, and, in examples/amp, stands in the page.
# SPDX-License-Identifier: MIT OR Unlicense
cd "$(dirname "$0")/../.." || exit 1
. tests/support/check.sh

build=${BUILD:-build}
case $build in /*) ;; *) build=$PWD/$build ;; esac

# howto NAME: its output is the comment `prints:` at its end.
howto() {
    awk '/^\*\/$/ { on = 0 } on { print } /^\/\* prints:$/ { on = 1 }' "examples/$1.c" >"$tmp/want"
    [ -s "$tmp/want" ] && (cd "$tmp" && "$build/$1") >"$tmp/got" 2>&1
    code=$?
    diff "$tmp/want" "$tmp/got" && [ "$code" -eq 0 ]
}
# short NAME: 60 lines; 120 for the whole program of several epochs.
short() { most=60; [ "$1" = 10_epochs ] && most=120
          [ "$(awk '/^\/\* prints:$/ { exit } { n++ } END { print n }' "examples/$1.c")" -le $most ]; }

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

# The page has a row for each section of PyTorch's page, and a program for each row or a reason.
page=examples/amp/README.md
sections() {
    cat <<END
Typical Mixed Precision Training
Gradient clipping
Gradient accumulation
Gradient penalty
Working with Multiple Models, Losses, and Optimizers
DataParallel in a single process
DistributedDataParallel
Functions with Multiple Inputs or Autocastable Ops
Functions that Need a Particular dtype
END
}
all_sections() { sections | while read -r s; do grep -q "^| $s" "$page" || { echo "no row: $s"; exit 1; }; done; }
links()        { sed -n 's/.*](\([a-z_.\/]*\.c\)).*/\1/p' "$page" | while read -r f; do
                     [ -f "examples/amp/$f" ] || { echo "no file: $f"; exit 1; }; done; }
for f in examples/amp/*.c; do
    name=amp/$(basename "$f" .c)
    check "$name is short"                 short "$name"
    check "$name stands in the page"       grep -q "(${f##*/})" "$page"
    if [ -x "$build/$name" ]; then check "$name prints what it says" howto "$name"
    else skip "$name is not built (make examples)"; fi
done
check "the page has every section of PyTorch's page" all_sections
check 'its links lead to files'                      links
report
