#!/bin/sh
# test_platform_macros.sh - both halves of the header, and the add-ons, compile behind headers that define plain words
# as macros (tests/support/platform_macros.h); and strict warnings that the header does not avoid are quiet with -isystem.
# SPDX-License-Identifier: MIT OR Unlicense
. tests/support/check.sh

CC=${CC:-cc} CXX=${CXX:-c++}
include='-I. -Iexamples -Itests/support'
head='#include "platform_macros.h"'
half='-DMIXPREC_NO_SIMD'        # make test: the words of one instruction set
[ "$MIXPREC_TEST_QUICK" ] || half=

printf '%s\n' "$head" '#include "mixprec.h"' >"$tmp/declared.c"
printf '%s\n' "$head" '#define MIXPREC_IMPLEMENTATION' '#include "mixprec.h"' >"$tmp/implemented.c"
{ cat "$tmp/declared.c"; for f in conv ops recurrent compare trail qk_clip report; do echo "#include \"$f.h\""; done; } >"$tmp/added.c"
for f in declared implemented added; do cp "$tmp/$f.c" "$tmp/$f.cpp"; done

c() { $CC -std=gnu99 $OPENMP -fsyntax-only $include "$@"; }
cpp() { $CXX -std=c++11 $OPENMP -fsyntax-only $include "$@"; }
check 'declarations in C'                  c -DPLATFORM_TERM "$tmp/declared.c"
check 'add-ons in C'                       c "$tmp/added.c"
check 'implementation in C'                c $half -DMIXPREC_THREADS "$tmp/implemented.c"
if command -v "$CXX" >/dev/null 2>&1; then
    check 'declarations in C++'            cpp -DPLATFORM_TERM "$tmp/declared.cpp"
    check 'add-ons in C++'                 cpp "$tmp/added.cpp"
    check 'implementation in C++'          cpp $half "$tmp/implemented.cpp"
    printf '#define MIXPREC_IMPLEMENTATION\n#include "mixprec.h"\n' >"$tmp/strict.cpp"
    strict() { $CXX -std=c++11 -fsyntax-only -Wswitch-enum -Wfloat-equal -Wold-style-cast -Werror -DMIXPREC_NO_SIMD "$@" "$tmp/strict.cpp"; }
    check 'strict warnings with -isystem'  strict -isystem .
else
    skip 'the header behind macros in C++ (no C++ compiler)'
fi
# A word that is used is noticed.
used() { echo 'int f(int small); int f(int small) { return small; }' >>"$tmp/declared.c"; ! c "$tmp/declared.c" 2>"$tmp/log" && grep -q small "$tmp/log"; }
check 'a plain word is noticed'            used
report
