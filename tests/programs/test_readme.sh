#!/bin/sh
# test_readme.sh - every C program in the README, and the one in the header's manual, compiles
# without a warning, runs, and prints the quoted output. The first program compiles its own copy of
# the library, as in the README. The others are linked with the library that make built, if there is
# one.
# SPDX-License-Identifier: MIT OR Unlicense
cd "$(dirname "$0")/../.." || exit 1
. tests/support/check.sh

library=${BUILD:-build}/libmixprec.a
# By hand, without make's word for it: as the library was built.
[ -n "${OPENMP+set}" ] || ! grep -q -s -e -fopenmp "${BUILD:-build}/flags" || OPENMP=-fopenmp
linked="-DMIXPREC_IMPLEMENTATION_DONE $library ${OPENMP-}"
[ -f "$library" ] || linked=

runs() { # NAME PATTERN: $tmp/NAME.c builds, and a line of its output matches
    with=$linked; [ "$1" = readme1 ] && with=
    ${CC:-cc} -std=c99 -O0 -Wall -Wextra -Werror -I. "$tmp/$1.c" $with -o "$tmp/$1" -lm &&
        "$tmp/$1" >"$tmp/$1.out" 2>&1 && cat "$tmp/$1.out" && grep -Eq "$2" "$tmp/$1.out"
}

awk -v dir="$tmp" '/^```c$/ { n++; on = 1; next } /^```$/ { on = 0 } on { print > (dir "/readme" n ".c") }' README.md
awk '/A complete program/ { on = 1; next } /^ \* CONTENTS/ { exit }
     on { sub(/^ \*( {1,5})?/, ""); print }' mixprec.h >"$tmp/manual.c"

# What it prints is in the README, too: each line of it.
prints_what_it_says() {
    runs readme1 '^loss ' >/dev/null && awk '/^```/ { open = !open; on = open && $0 == "```"; next } on && /^(step|loss) /' README.md >"$tmp/said" &&
        test -s "$tmp/said" && diff "$tmp/said" "$tmp/readme1.out"
}
check 'README, the whole loop' prints_what_it_says
check 'README, your own gradients' runs readme2 '^w\[0\] = (0\.9|1\.0)'
# The third is a piece of one, for a GPU: here on a machine that has none.
{ printf '#define MIXPREC_IMPLEMENTATION\n#include "mixprec.h"\n#include <stdio.h>\n'
  echo 'const mixp_device *mixp_cuda(int ordinal, const char **why)'
  echo '{ (void)ordinal; *why = "none here"; return NULL; }'
  echo 'int main(void) {'; cat "$tmp/readme3.c"; echo 'mixp_context_free(ctx); return 0; }'; } >"$tmp/gpu.c"
check 'README, on a GPU' runs gpu '^no GPU: none here$'
check 'README, no program is untested' test ! -f "$tmp/readme4.c"
check 'the manual of mixprec.h' runs manual '^w = (2\.9|3\.0)'
report
