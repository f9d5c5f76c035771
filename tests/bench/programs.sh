#!/bin/sh
# programs.sh - programs that others wrote, from checkouts of their public sources, as they are and with mixprec in them:
# the losses that they print, and their CPU time.
#     tests/bench/programs.sh MICROGPT_C       the folder of a checkout of enjector/microgpt-c; nothing is written into it
# Then a chess net whose sparse first layer is made in three ways.
# SPDX-License-Identifier: MIT OR Unlicense
here=$(cd "$(dirname "$0")/../.." && pwd) || exit 1
[ -f "${1:-}/src/microgpt.c" ] || { echo "usage: $0 MICROGPT_C: the folder of its checkout" >&2; exit 2; }
tmp=$(mktemp -d) && trap 'rm -rf "$tmp"' EXIT
CC=${CC:-cc}
library= linked=                        # the library of make, if it is there: compiling the header takes a minute
[ -f "$here/build/libmixprec.a" ] && library="$here/build/libmixprec.a -fopenmp" linked=-DMIXPREC_IMPLEMENTATION_DONE
export OMP_NUM_THREADS=1
cpu() { # PROGRAM...: what it prints, then its CPU time
    { command -p time -p "$@"; } 2>"$tmp/time" || { cat "$tmp/time"; return 1; }
    awk '/^(user|sys)/ { s += $2 } END { printf "  %.2f s of the processor\n", s }' "$tmp/time"
}

# ---- microgpt-c: names by letters, 1,000 steps; and with our adam_step
names=$1/demos/character-level/names
cp "$names/c_names.txt" "$tmp/"
flags="-O3 -ffast-math -funroll-loops -std=gnu11 -w -I$1/src -I$here"
for scalar in float double; do
    define=; [ $scalar = float ] && define=-DMICROGPT_USE_FLOAT=1
    $CC $flags $define "$names/main.c" "$1/src/microgpt.c" -o "$tmp/own" -lm -pthread &&
        $CC $flags $define $linked "$names/main.c" "$here/tests/bench/programs/microgpt_adam.c" $library -o "$tmp/mixed" \
            -lm -pthread || exit 1
    for program in own mixed; do
        echo "microgpt-c, $scalar, $program optimizer"
        (cd "$tmp" && cpu "./$program") >"$tmp/$program.$scalar"
        grep 'loss' "$tmp/$program.$scalar" | tail -n 1
        grep 'processor' "$tmp/$program.$scalar"
    done
    grep -o 'loss[ =:]*[0-9.]*' "$tmp/own.$scalar" >"$tmp/a"
    grep -o 'loss[ =:]*[0-9.]*' "$tmp/mixed.$scalar" >"$tmp/b"
    paste "$tmp/a" "$tmp/b" | awk '{ n++; d = $2 - $4; if (d < 0) d = -d; if (d > most) most = d }
        END { printf "  %d printed losses, largest difference %g\n", n, most }'
done

# ---- a chess net with the shape of AndyGrant/NNTrainer's psqbb, on positions made here
$CC -O2 -std=gnu11 -I"$here" $linked "$here/tests/bench/programs/nnue.c" $library -o "$tmp/nnue" -lm || exit 1
for how in bag rows dense; do for dtype in f32 bf16; do echo "chess net, $how, $dtype"; "$tmp/nnue" $how $dtype 2 | tail -n 1; done; done
