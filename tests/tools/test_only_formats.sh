#!/bin/sh
# test_only_formats.sh - MIXPREC_ONLY_FORMATS compiles without a warning, converts arrays, and
# contains nothing else.
# SPDX-License-Identifier: MIT OR Unlicense
. tests/support/check.sh
CC=${CC:-cc} CXX=${CXX:-c++}

cat >"$tmp/only.c" <<'END'
#define MIXPREC_ONLY_FORMATS
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
/* 1, 1/3 rounded to even, the largest f16 and what rounds to Inf, along whole vectors and beyond. */
enum { COUNT = 1003 };
int main(void) {
    static const float from[4] = { 1.0f, 0.333333343f, -65504.0f, 65520.0f };
    static const uint16_t f16[4] = { 0x3C00, 0x3555, 0xFBFF, 0x7C00 }, bf16[4] = { 0x3F80, 0x3EAB, 0xC780, 0x4780 };
    static float x[COUNT], back[COUNT];
    static mixp_f16 h[COUNT];
    static mixp_bf16 b[COUNT];
    int i, wrong = 0;
    for (i = 0; i < COUNT; i++) x[i] = from[i % 4];
    wrong += mixp_convert(h, MIXP_F16, x, MIXP_F32, COUNT) != MIXP_OK;
    wrong += mixp_convert(b, MIXP_BF16, x, MIXP_F32, COUNT) != MIXP_OK;
    wrong += mixp_convert(back, MIXP_F32, b, MIXP_BF16, COUNT) != MIXP_OK;
    for (i = 0; i < COUNT; i++)
        wrong += h[i].bits != f16[i % 4] || b[i].bits != bf16[i % 4] ||
                 mixp_bits_of_f32(back[i]) != (uint32_t)bf16[i % 4] << 16;
    return wrong != 0;
}
END
cp "$tmp/only.c" "$tmp/only.cpp"
W='-Wall -Wextra -Wpedantic -Wconversion -Wsign-conversion -Wshadow -Wundef -Wcast-qual -Werror'

converts() { "$@" $W -I. -lm -o "$tmp/only" && "$tmp/only"; }
check 'C'                     converts "$CC" -std=c99 -O1 "$tmp/only.c"
nothing_else() { ! nm "$tmp/only" | grep -i ' t mixp_\(context\|tensor\|linear\|optimizer\)'; }
check 'holds nothing else'    nothing_else
# The release's file of the formats alone: a fifth of the text at most, the same conversions, nothing else.
awk -f packaging/slice.awk mixprec.h >"$tmp/mixprec_formats.h"
sed '1d; s/mixprec\.h/mixprec_formats.h/' "$tmp/only.c" >"$tmp/slice.c"
is_small() { [ $((5 * $(wc -l <"$tmp/mixprec_formats.h"))) -lt "$(wc -l <mixprec.h)" ]; }
check 'mixprec_formats.h is small'       is_small
check 'mixprec_formats.h, C'             converts "$CC" -std=c99 -O1 -I"$tmp" "$tmp/slice.c"
check 'mixprec_formats.h holds nothing else' nothing_else
cp "$tmp/slice.c" "$tmp/slice.cpp"
# The other compilations take most of the time.
if [ -n "$MIXPREC_TEST_QUICK" ]; then
    skip 'static, without vectors, for this machine, C++, clang-cl: in make test-long'
    report
    exit
fi
check 'C, all static'         converts "$CC" -std=c99 -O1 -DMIXPREC_STATIC "$tmp/only.c"
check 'without vectors'       converts "$CC" -std=c99 -O1 -DMIXPREC_NO_SIMD "$tmp/only.c"
native() { "$CC" -march=native -x c -fsyntax-only /dev/null 2>/dev/null; }
if native; then check 'for this machine alone' converts "$CC" -O1 -march=native "$tmp/only.c"
else skip 'for this machine alone'
fi
if command -v "$CXX" >/dev/null; then
    check 'C++'                    converts "$CXX" -std=c++11 -O1 "$tmp/only.cpp"
    check 'mixprec_formats.h, C++' converts "$CXX" -std=c++11 -O1 -I"$tmp" "$tmp/slice.cpp"
else skip 'C++'
fi
# clang-cl's rules, with mingw's headers in place of Microsoft's: see tests/tools/clang_cl.sh.
windows() {
    clang --target=x86_64-pc-windows-msvc -fms-compatibility-version=19.30 -isystem /usr/x86_64-w64-mingw32/include \
        -include tests/support/msvc.h -std=c99 -I. -fsyntax-only "$@"
}
echo '#include <stdio.h>' >"$tmp/probe.c"
if windows "$tmp/probe.c" 2>/dev/null; then check 'clang-cl' windows -Werror=unused-function "$tmp/only.c"
else skip 'clang-cl'
fi
check 'C++ holds nothing else' nothing_else
report
