#!/bin/sh
# test_tile.sh - the inner loop of a product keeps its sums in registers: on AVX2, on AVX-512, and
# on Arm (the assembly of a cross compiler). With gcc -O2, an array of registers indexed by a loop
# goes through the stack: a tile of 6 rows took 250 instructions for 24 multiply-adds.
# SPDX-License-Identifier: MIT OR Unlicense
. tests/support/check.sh
CC=${CC:-cc}

# tile COMPILER SET ROWS VECTORS ATTRIBUTE: the assembly of one tile alone, in $tmp/tile.s.
tile() {
    cat >"$tmp/tile.c" <<END
#define MIXPREC_STATIC
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
$5 void one_tile(const mixpi_tile *t);
void one_tile(const mixpi_tile *t) { mixpi_tile_body_$2(t, $3, $4); }
END
    "$1" -O2 -w -S -I. "$tmp/tile.c" -o "$tmp/tile.s"
}

# loop MULTIPLY-ADD STACK: of the shortest loop of one_tile with the most multiply-adds, "multiply-adds
# instructions moves between registers and stack"; the arguments are regular expressions.
loop() {
    awk -v fma="$1" -v stack="$2" '
        /^one_tile:/ { inside = 1 }
        inside && /^\t\.size/ { exit }
        inside && /^\.L[A-Za-z0-9]+:/ { at[substr($1, 1, length($1) - 1)] = n }
        inside && /^\t[a-z]/ {
            line[++n] = $0
            target = $NF
            if (target ~ /^\.L/ && target in at) consider(at[target] + 1, n)
        }
        function consider(from, to,    i, f, s) {
            for (i = from; i <= to; i++) { f += line[i] ~ fma; s += line[i] ~ stack }
            if (f > most || (f == most && f && to - from + 1 < least)) {
                most = f; least = to - from + 1; moves = s
            }
        }
        END { print most + 0, least + 0, moves + 0 }' "$tmp/tile.s"
}

# Multiply-adds, at most so many instructions, at most so many moves.
holds() {
    read -r fmas instructions moves <<END
$(loop "$1" "$2")
END
    echo "$fmas multiply-adds in $instructions instructions, $moves of them moves to or from the stack"
    [ "$fmas" -eq "$3" ] && [ "$instructions" -le "$4" ] && [ "$moves" -le "$5" ]
}

x86='vmov.*[(]%r[sb]p'
arm='\t(str|stp|ldr|ldp)\t[qvd][0-9]+.*\[(sp|x29)'
if "$CC" --version 2>/dev/null | grep -q -i -e gcc -e 'Free Software' && [ "$(uname -m)" = x86_64 ]; then
    tile "$CC" avx2 6 1 '__attribute__((target("avx2,fma,f16c")))'
    check 'AVX2: 6 rows by 16 columns'       holds '\tvfmadd' "$x86" 12 26 0
    tile "$CC" avx512 14 2 "__attribute__((target(\"avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c\")))"
    check 'AVX-512: 14 rows by 32 columns'   holds '\tvfmadd' "$x86" 28 70 0
else
    skip 'AVX2 and AVX-512: not gcc on x86-64'
fi
if command -v aarch64-linux-gnu-gcc >/dev/null; then
    tile aarch64-linux-gnu-gcc neon 6 1
    check 'NEON: 6 rows by 16 columns'       holds '\tfmla' "$arm" 24 45 8
else
    skip 'NEON: no aarch64-linux-gnu-gcc'
fi
report
