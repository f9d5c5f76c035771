#!/bin/sh
# test_typed.sh - a pointer of another type in a typed entry is a warning in C and an error in C++; each entry of each
# type gives the dtype in its name. A semicolon after a block's macro is a warning.
# SPDX-License-Identifier: MIT OR Unlicense
cd "$(dirname "$0")/../.." || exit 1
. tests/support/check.sh

CC=${CC:-cc} CXX=${CXX:-c++}
entries='view:float:c,"w",1,&n,p input:float:c,1,&n,p input_view:float:c,1,&n,p read:float:t,p,n write:float:t,p,n'
types='f32:float f64:double f16:mixp_f16 bf16:mixp_bf16 i32:int32_t i64:int64_t u8:uint8_t'
program() { # ENTRY TYPE POINTER ARGUMENTS
    printf '#include "mixprec.h"\nvoid use(mixp_context *c, mixp_tensor *t, int64_t n, %s *p);\n' "$3"
    printf 'void use(mixp_context *c, mixp_tensor *t, int64_t n, %s *p) { (void)c; (void)t; mixp_%s_%s(%s); }\n' "$3" "$1" "$2" "$4"
}
c_says()   { $CC -std=c99 -I. -fsyntax-only "$tmp/p.c" 2>"$tmp/said"; grep -q 'incompatible' "$tmp/said"; }
cxx_says() { ! $CXX -std=c++11 -I. -fsyntax-only "$tmp/p.cpp" 2>"$tmp/said" && grep -q 'cannot convert\|cannot initialize\|no matching' "$tmp/said"; }
c_quiet()   { $CC -std=c99 -Wall -Wextra -Werror -I. -fsyntax-only "$tmp/p.c"; }
cxx_quiet() { $CXX -std=c++11 -Wall -Wextra -Werror -I. -fsyntax-only "$tmp/p.cpp"; }
# in_cxx NAME COMMAND...: a check, or a skip where no C++ compiler is.
in_cxx() { if command -v "$CXX" >/dev/null 2>&1; then check "$@"; else skip 'no C++ compiler'; fi; }

# Every entry of f32 and i32 with another pointer; every type of every entry with its own.
for entry in $entries; do
    name=${entry%%:*} arguments=${entry##*:}
    for wrong in f32:double i32:float f64:float u8:int32_t; do
        program "$name" "${wrong%:*}" "${wrong#*:}" "$arguments" >"$tmp/p.c"
        cp "$tmp/p.c" "$tmp/p.cpp"
        check "C warns of mixp_${name}_${wrong%:*} of ${wrong#*:} *" c_says
        in_cxx "C++ refuses it" cxx_says
    done
    : >"$tmp/all"
    for type in $types; do program "$name" "${type%:*}" "${type#*:}" "$arguments" | sed "s/use/use_${type%:*}/g" >>"$tmp/all"; done
    cp "$tmp/all" "$tmp/p.c"
    cp "$tmp/all" "$tmp/p.cpp"
    check  "mixp_${name}_... of the right type: no word" c_quiet
    in_cxx "nor in C++" cxx_quiet
done

# clang warns by itself (-Wempty-body), gcc with -Wall (-Wmisleading-indentation).
block_says() { $CC -std=c99 -Wall -I. -fsyntax-only "$tmp/p.c" 2>"$tmp/said"; grep -q 'empty-body\|misleading-indentation' "$tmp/said"; }
for block in 'MIXP_AUTOCAST(c, MIXP_F16)' 'MIXP_NO_GRAD(c)' 'MIXP_SCOPE(c, "h")'; do
    printf '#include "mixprec.h"\nvoid f(mixp_context *c);\nvoid f(mixp_context *c) {\n    %s;\n    { f(c); }\n}\n' "$block" >"$tmp/p.c"
    check "the compiler warns of $block;" block_says
done
report
