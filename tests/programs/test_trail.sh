#!/bin/sh
# test_trail.sh - examples/trail.h and trail.c: equal runs have equal trails, and the first site in which two
# runs part is named: after a flipped bit in a weight, another flag, another operator. In make test-long also
# a run of another compiler's build.
# SPDX-License-Identifier: MIT OR Unlicense
cd "$(dirname "$0")/../.." || exit 1
. tests/support/check.sh
root=$PWD
build=${BUILD:-build}
case $build in /*) ;; *) build=$root/$build ;; esac
trainer=$build/trainer trail=$build/trail
for p in "$trainer" "$trail"; do
    [ -x "$p" ] || { echo "$p is not built"; echo "0 passed, 1 failed, 0 skipped"; exit 1; }
done
cd "$tmp" || exit 1

# run TRAIL OPTION...: two steps of nanoGPT's shape, at a quarter of its batch
run() {
    to=$1; shift
    "$trainer" --data "$root/mixprec.h" --preset char-cpu --batch 3 --steps 2 --eval-every 1000000 --eval-batches 1 \
        --sample 0 --quiet --threads 1 --trail "$to" "$@" >>log 2>&1
}
compare() { "$trail" "$1" "$2" >out 2>&1; }        # as diff: 0 equal, 1 they part, 2 refused
says()    { grep -q -- "$1" out || { cat out; false; }; }
refused() { compare "$1" "$2"; [ $? = 2 ] && says "$3"; }

check 'a run writes a trail'                     run a
check 'three threads'                            run b --threads 3
check 'they have the same bits'                  compare a b
check 'all records were compared'                says "^equal: $(($(wc -l <a) - 1)) records"
check 'two steps with weights, values, gradients' test "$(awk -F '\t' 'NF == 10 { print $1, $2 }' a | sort -u | tr '\n' ,)" = 'b 1,b 2,f 0,f 1,f 2,w 1,w 2,'

# The lowest bit of one weight in a file: the place of the tensor stands in the file's header.
place() { # TENSOR FILE
    size=$(od -A n -t u4 -N 4 "$2")
    first=$(head -c $((size + 8)) "$2" | tail -c +9 | sed 's/.*"'"$1"'":{[^}]*"data_offsets":\[\([0-9]*\),.*/\1/')
    echo $((size + 8 + first))
}
check 'a run saves its weights'                  run x --out saved
cp saved/best.safetensors flipped.safetensors
cp saved/config.json .
at=$(place transformer.h.1.attn.c_proj.weight flipped.safetensors)
bits=$(od -A n -t u1 -j "$at" -N 1 flipped.safetensors)
printf "\\$(printf %o $((bits % 2 ? bits - 1 : bits + 1)))" | dd of=flipped.safetensors bs=1 seek="$at" conv=notrunc 2>/dev/null
check 'one byte was changed'                     test "$(cmp -l saved/best.safetensors flipped.safetensors | wc -l)" -eq 1
check 'it trains on'                             run c --init saved/best.safetensors
check 'so do weights with a flipped bit'         run d --init flipped.safetensors
check 'its trail parts'                          test "$(compare c d; echo $?)" = 1
check 'at the weight, before a site reads it'    says '^step 1, weight transformer.h.1.attn.c_proj.weight$'
check 'in one of eight parts'                    says 'differ in  *1 of 8 equal parts'

check 'another level'                            run e --level 2
compare a e
check 'the first site that stores another dtype' says 'dtype  *f32 and f16'
check 'another activation'                       run f --activation gelu-tanh
compare a f
check 'the program ran another operator'         says '^where the other has .*gelu_tanh'

sed '$d' a >short
check 'a shorter run'                            test "$(compare a short; echo $?)" = 1
compare a short
check 'is told'                                  says 'the end of short; the other continues with step 2'
{ cat short; printf 'b\t2\tf16'; } >cut
check 'a line without its end does not count'    compare short cut
check 'a file that is no trail'                  refused a log 'log, line 1: .*does not begin with'
{ cat short; printf 'b\t2\tf16\n'; } >cut
check 'a record without fields'                  refused a cut "cut, line $(wc -l <cut | tr -d ' '): a field is missing"
check 'no such file'                             refused a none 'cannot read none'

# Another compiler's build of all of it.
other=clang
"${CC:-cc}" --version 2>/dev/null | grep -qi clang && other=gcc
if [ -n "$MIXPREC_TEST_QUICK" ]; then skip "a build by $other: in make test-long"
elif ! command -v "$other" >/dev/null 2>&1; then skip "a build by $other (not found)"
else
    own='-std=c99 -O0 -pthread -DMIXPREC_THREADS'      # -O0: it compiles and runs in seconds
    check "$other builds the trainer"            "$other" $own -I"$root" "$root/examples/trainer/trainer.c" -o other -lm
    trainer=./other
    check 'it runs'                              run g
    check 'and computes the same bits'           compare a g
fi
report
