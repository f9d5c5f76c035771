#!/bin/sh
# test_parts.sh - mixprec.h compiled in parts (MIXPREC_PART): warnings, names that the linker sees, refusals,
# and programs that link the parts under the options that change them.
# SPDX-License-Identifier: MIT OR Unlicense
. tests/support/check.sh

CC=${CC:-cc}
CXX=${CXX:-c++}
PARTS='host scalar avx2 avx512 neon'
WARN='-Wall -Wextra -Wpedantic -Wconversion -Wsign-conversion -Wshadow -Wundef -Wcast-qual -Werror'

# --- the files -----------------------------------------------------------------------------
lines() {
    for p in $PARTS; do
        name=$(echo "$p" | tr '[:lower:]' '[:upper:]')
        printf '#define MIXPREC_IMPLEMENTATION\n#define MIXPREC_PART MIXPREC_%s\n#include "mixprec.h"\n' "$name" |
            diff - "src/parts/mixprec_$p.c" || return
    done
    [ "$(ls src/parts | wc -l)" -eq 5 ]
}
check 'src/parts has a file for each part'      lines

# quiet COMPILER...: each part compiles without a warning.
quiet() {
    for p in $PARTS; do
        # shellcheck disable=SC2086
        "$@" $WARN -fsyntax-only -I. "src/parts/mixprec_$p.c" || return
    done
}
# (make shows warnings of C99 when it builds the library)
if [ -n "$MIXPREC_TEST_QUICK" ]; then skip 'no part warns: in make test-long'
else
    check 'as C99 no part warns'                    quiet $CC -std=c99 -Wmissing-prototypes
    if command -v "$CXX" >/dev/null; then check 'as C++11 no part warns' quiet "$CXX" -std=c++11 -x c++
    else skip 'as C++11 no part warns (no C++ compiler)'
    fi
fi

# --- names in the objects that make has built ------------------------------------------------
built=${BUILD:-build}
names() { nm "$built/mixprec_$1.o"; }
# What a set shows are its tables, what others call of it, and the known answers of its products.
of_a_set() {
    for p in scalar avx2 avx512 neon; do
        names "$p" | grep ' [A-TVWX] ' |
            grep -Ev " (T mixpi_(convert|quantise|hadamard|recode|(bf16|f16|amx)_answers)|[RD] mixpi_kernels(_(bf16|f16|amx|amx_f16))?)_$p\$" &&
            return 1
    done
    names scalar | grep -q ' [RD] mixpi_kernels_scalar$'
}
of_the_host() {
    names host | grep ' [A-TVWX] ' >"$tmp/host.nm"
    grep -q ' T mixp_' "$tmp/host.nm" && ! grep -vE ' (mixp_|mixpi_(autocast|no_grad|scope)_(enter|leave)$)' "$tmp/host.nm"
}
if [ -f "$built/mixprec_host.o" ] && command -v nm >/dev/null; then
    check 'the host shows mixp_ names only'         of_the_host
    check 'a set shows its tables and what others call' of_a_set
else skip 'names in the parts (not built, or no nm)'
fi

# --- refusals --------------------------------------------------------------------------------
refuses() {
    text=$1; shift
    printf '#define MIXPREC_IMPLEMENTATION\n#include "mixprec.h"\n' >"$tmp/refused.c"
    $CC -std=c99 -fsyntax-only -I. "$@" "$tmp/refused.c" 2>"$tmp/refused.log" && return 1
    grep -q "error.*$text" "$tmp/refused.log" || { cat "$tmp/refused.log"; return 1; }
}
check 'MIXPREC_STATIC with parts is refused'    refuses 'do not define MIXPREC_PART' -DMIXPREC_STATIC -DMIXPREC_PART=MIXPREC_HOST
check 'an unknown part is refused'              refuses 'define it as MIXPREC_HOST' -DMIXPREC_PART=MIXPREC_AVX3

# --- programs ----------------------------------------------------------------------------------
cat >"$tmp/convert.c" <<'END'
#include "mixprec.h"
int main(void) {
    float in[3] = { 1.0f, 65504.0f, 1e-8f }, out[3];
    mixp_f16 half[3];
    mixp_convert(half, MIXP_F16, in, MIXP_F32, 3);
    mixp_convert(out, MIXP_F32, half, MIXP_F16, 3);
    return !(out[0] == 1.0f && out[1] == 65504.0f && out[2] == 0.0f);
}
END
# Each instruction set of the machine multiplies 40 x 40 matrices of small whole numbers, which f32 holds exactly.
cat >"$tmp/products.c" <<'END'
#include "mixprec.h"
#include <stdio.h>
#include <string.h>
enum { N = 40 };
static char memory[1 << 24];
static void *scratch(void *user, size_t bytes) { (void)user; return bytes <= sizeof memory ? memory : NULL; }
static int right(const mixp_device *cpu, mixp_dtype dtype) {
    static float a[N * N], b[N * N], c[N * N];
    static mixp_f16 low_a[N * N], low_b[N * N];
    mixp_gemm_args g;
    mixp_exec x;
    int i, j, k;
    for (i = 0; i < N * N; i++) {
        a[i] = (float)(i % 7 - 3);
        b[i] = (float)(i % 11 - 5);
    }
    mixp_convert_with(cpu, low_a, dtype, a, MIXP_F32, N * N, NULL);
    mixp_convert_with(cpu, low_b, dtype, b, MIXP_F32, N * N, NULL);
    memset(&x, 0, sizeof x);
    x.threads = 1;
    x.scratch = scratch;
    memset(&g, 0, sizeof g);
    g.m = g.n = g.k = g.lda = g.ldb = g.ldc = N;
    g.batch = 1;
    g.alpha = 1.0f;
    g.a.data = low_a;
    g.b.data = low_b;
    g.a.dtype = g.b.dtype = dtype;
    g.c.data = c;
    g.c.dtype = MIXP_F32;
    if (cpu->kernels->gemm(&x, &g) != MIXP_OK) return 0;
    for (i = 0; i < N; i++)
        for (j = 0; j < N; j++) {
            float sum = 0.0f;
            for (k = 0; k < N; k++) sum += a[i * N + k] * b[k * N + j];
            if (c[i * N + j] != sum) return 0;
        }
    return 1;
}
int main(void) {
    int isa, count = 0;
    for (isa = 0; isa < MIXP_ISA_COUNT; isa++) {
        const mixp_device *cpu = mixp_cpu_with((mixp_isa)isa);
        if (!cpu) continue;
        count++;
        if (!right(cpu, MIXP_F16) || !right(cpu, MIXP_BF16)) {
            printf("%s: a product is wrong\n", cpu->name);
            return 1;
        }
    }
    printf("%d instruction sets\n", count);
    return count == 0;
}
END
# links PROGRAM FLAGS...: the five parts and the program, all with these flags, run and agree.
links() {
    program=$1; shift
    for p in $PARTS; do
        $CC -std=c99 -O0 "$@" -I. -c "src/parts/mixprec_$p.c" -o "$tmp/$p.o" || return
    done
    (cd "$tmp" && $CC -std=c99 "$@" -I"$OLDPWD" "$program.c" host.o scalar.o avx2.o avx512.o neon.o -lm -o "$program" && "./$program")
}
# Parts of the same text by a C and by a C++ compiler.
both() {
    $CC -std=c99 -O0 -I. -c src/parts/mixprec_host.c -o "$tmp/host.o" || return
    for p in scalar avx2 avx512 neon; do
        "$CXX" -std=c++11 -O0 -I. -x c++ -c "src/parts/mixprec_$p.c" -o "$tmp/$p.o" || return
    done
    (cd "$tmp" && $CC -std=c99 -I"$OLDPWD" products.c host.o scalar.o avx2.o avx512.o neon.o -lm -o products && ./products)
}
if [ -n "$MIXPREC_TEST_QUICK" ]; then skip 'programs of parts under options: in make test-long'
else
    check 'MIXPREC_ONLY_FORMATS'                links convert -DMIXPREC_ONLY_FORMATS
    check 'no option'                           links products
    check 'MIXPREC_NO_SIMD'                     links products -DMIXPREC_NO_SIMD
    check 'MIXPREC_ALL_ISAS and all guests left out' links products -DMIXPREC_ALL_ISAS -DMIXPREC_NO_RANKS -DMIXPREC_NO_WATCH \
                                                      -DMIXPREC_NO_CHECKPOINT -DMIXPREC_NO_RECIPES
    if $CC -march=native -E - </dev/null >/dev/null 2>&1; then
        check '-march=native'                   links products -march=native
        check '-march=native, MIXPREC_ONLY_FORMATS' links convert -march=native -DMIXPREC_ONLY_FORMATS
    else skip '-march=native (not a flag of this compiler)'
    fi
    if command -v clang >/dev/null; then
        with_clang() ( CC=clang; links "$@" )
        check 'MIXPREC_SMALL by clang'          with_clang products -DMIXPREC_SMALL -O1
    else skip 'MIXPREC_SMALL (no clang)'
    fi
    if command -v "$CXX" >/dev/null; then check 'the host in C, the sets in C++' both
    else skip 'the host in C, the sets in C++ (no C++ compiler)'
    fi
fi
report
