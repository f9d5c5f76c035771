#!/bin/sh
# clang_cl.sh - a C compiler with the rules of clang-cl (_MSC_VER, no __GNUC__), and mingw's headers and
# libraries in place of Microsoft's, which are not free.
# SPDX-License-Identifier: MIT OR Unlicense
#
#   CC=tests/tools/clang_cl.sh      as gcc: -c FILE.c -o FILE.o, or sources and objects to a program
here=$(cd "$(dirname "$0")/../support" && pwd)
temp=$(mktemp -d) || exit 1
trap 'rm -rf "$temp"' EXIT

compile() {
    clang --target=x86_64-pc-windows-msvc -fms-compatibility-version=19.30 \
        -isystem /usr/x86_64-w64-mingw32/include -include "$here/msvc.h" "$@" \
        -Wno-unused-function
}

# What MSVC's libraries have and mingw's lack.
cat >"$temp/runtime.s" <<'END'
.globl _fltused
.globl __chkstk
.data
_fltused: .long 0x9875
.text
__chkstk: jmp ___chkstk_ms
END

only=0 out=a.exe flags= sources= objects=
while [ $# -gt 0 ]; do
    case $1 in
    -c) only=1 ;;
    -o) out=$2; shift ;;
    *.c) sources="$sources $1" ;;
    *.o | *.a | -l*) objects="$objects $1" ;;
    -static) ;;
    *) flags="$flags $1" ;;
    esac
    shift
done
if [ $only = 1 ]; then
    compile $flags -c $sources -o "$out"
    exit
fi
number=0 made=
for source in $sources; do
    number=$((number + 1))
    compile $flags -c "$source" -o "$temp/$number.o" || exit 1
    made="$made $temp/$number.o"
done
# Inline functions of mingw's headers stand in every object file; the first one counts.
x86_64-w64-mingw32-gcc $made $objects "$temp/runtime.s" -static -Wl,--allow-multiple-definition -o "$out"
