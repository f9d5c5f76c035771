#!/bin/sh
# msvc.sh - the C tests by Microsoft's compiler, which compiles plain C only. It needs `cl` and `lib` in the path (the
# x64 Native Tools Command Prompt) and a shell, such as Git's. It has not run on Windows yet.
# SPDX-License-Identifier: MIT OR Unlicense
#
#   tests/tools/msvc.sh [TEST...]        all tests, or test_gemm test_step ...
CL=${CL_COMMAND:-cl}
LIB_COMMAND=${LIB_COMMAND:-lib}
build=${BUILD:-build}/msvc
command -v "$CL" >/dev/null 2>&1 || { echo 'no cl'; echo '0 passed, 0 failed, 1 skipped'; exit; }
mkdir -p "$build/include" || exit 1
awk -v lines=1 -f src/pack.awk src/mixprec.h >"$build/include/mixprec.h" || exit 1

# Options begin with -, because Git's shell takes a word that begins with / for a path.
FLAGS="-nologo -std:c11 -W3 -O2 -fp:precise -D_CRT_SECURE_NO_WARNINGS -I$build/include -I. -Itests -Itests/support"

# Tests of POSIX, as tests/tools/variant.sh leaves them out for mingw.
posix='^test_(checkpoint.*|.*ranks.*|everyday.*|threads|gpt2|tokenizer|refused|amx|cpuid|block)$'

# The library, of the parts that MSVC has.
objects=
for part in host scalar; do
    # shellcheck disable=SC2086
    "$CL" $FLAGS -c "src/parts/mixprec_$part.c" -Fo"$build/mixprec_$part.obj" || exit 1
    objects="$objects $build/mixprec_$part.obj"
done
# shellcheck disable=SC2086
"$LIB_COMMAND" -nologo -out:"$build/mixprec.lib" $objects || exit 1

set -- $([ $# -gt 0 ] && printf '%s\n' "$@" || for t in tests/*/test_*.c tests/*/*/test_*.c; do basename "$t" .c; done)
skipped=0 commands=
for name; do
    source=$(ls tests/*/"$name".c tests/*/*/"$name".c 2>/dev/null | head -n 1)
    if [ -z "$source" ] || echo "$name" | grep -Eq "$posix"; then skipped=$((skipped + 1)); continue; fi
    # shellcheck disable=SC2086
    if "$CL" $FLAGS -DMIXPREC_IMPLEMENTATION_DONE "$source" "$build/mixprec.lib" -Fo"$build/$name.obj" -Fe"$build/$name.exe" >"$build/$name.log" 2>&1
    then commands="$commands $build/$name.exe"
    else echo "$name:"; head -n 5 "$build/$name.log"; commands="$commands false"
    fi
done
# shellcheck disable=SC2086
tests/tools/run.sh -t 900 $commands "echo 0 passed, 0 failed, $skipped skipped"
