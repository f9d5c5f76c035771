#!/bin/sh
# ranks_cost.sh - what the hooks of many machines cost a program that sets none: instructions of a step of
# a small model (4 layers of 64 x 64, 64 rows, one thread), as callgrind counts them, beside those of a
# copy of the header in which every question after ranks has a constant answer, so that a compiler leaves
# their code out. Counts do not depend on how busy the machine is. Needs valgrind, awk, sed.
# SPDX-License-Identifier: MIT OR Unlicense
set -eu
tmp=$(mktemp -d) && trap 'rm -rf "$tmp"' EXIT
mkdir "$tmp/with" "$tmp/without"
cp mixprec.h "$tmp/with"
sed -e 's/\([a-z]*->\)*ctx->ranks\.size/0/g' -e 's/\(mixpi_exchange \*d = \)[a-z>-]*exchange;/\1NULL;/' \
    mixprec.h >"$tmp/without/mixprec.h"
echo "places where a question was answered: $(diff "$tmp/with/mixprec.h" "$tmp/without/mixprec.h" | grep -c '^>')"

# steps WHICH N: instructions of N steps and all that is around them.
steps() {
    valgrind --tool=callgrind --callgrind-out-file=/dev/null "$tmp/$1/bench" "$2" "$3" 2>&1 |
        awk '/Collected/ { print $NF }'
}
a_step() { echo $((($(steps "$1" "$2" 30) - $(steps "$1" "$2" 10)) / 20)); }

for which in with without; do
    ${CC:-cc} -std=gnu99 -O2 -w -DMIXPREC_IMPLEMENTATION -I"$tmp/$which" -Itests -Itests/support tests/bench/bench_ranks.c \
        -lm -o "$tmp/$which/bench"
done
with=$(a_step with none) without=$(a_step without none) one=$(a_step with one)
echo "instructions a step: without the code $without, hooks unset $with, a world of one $one"
echo "$with $without $one" | awk '{
    printf "hooks unset %+.4f %%, a world of one %+.4f %%\n", 100 * ($1 / $2 - 1), 100 * ($3 / $2 - 1) }'
