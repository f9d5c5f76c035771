#!/bin/sh
# test_shared.sh - make shared: the declarations for other languages, what the shared library exports, its SONAME, and
# examples/from_python.py.
# SPDX-License-Identifier: MIT OR Unlicense
. tests/support/check.sh

CC=${CC:-cc}
PYTHON=${PYTHON:-python3}
shared="$tmp/build/shared"
build() { env -u MAKEFLAGS -u MAKELEVEL "${MAKE:-make}" BUILD="$tmp/build" CFLAGS=-O0 "$@"; }

# --- the declarations ----------------------------------------------------------------------
cdef="$shared/libmixprec.cdef"
check 'the declarations are made'                build "$cdef"
# They are C by themselves.
is_c() {
    { printf '#include <stddef.h>\n#include <stdint.h>\n'; cat "$cdef"; } >"$tmp/declared.c"
    $CC -std=c99 -Wall -Wextra -Werror -fsyntax-only "$tmp/declared.c"
}
check 'they are C without the header'            is_c
has() { grep -Fqx "$1" "$cdef"; }
check 'a function'                               has 'void mixp_context_free(mixp_context *ctx);'
check 'an inline function'                       has 'mixp_f16 mixp_f16_from_f32(float x);'
check 'a constant'                               has '#define MIXP_MAX_RANK 8'
check 'no private function'                      sh -c "! grep -E '^[^({]*mixpi_[a-z0-9_]*\(' '$cdef' | grep -v '^typedef'"
declared() { sed -n 's/^[^({]*[ *]\(mixp_[a-z0-9_]*\)(.*/\1/p' "$cdef" | grep -v '^typedef' | LC_ALL=C sort -u; }
# Each public function of the header: one that its text calls MIXPREC_API or MIXPREC_HD. mixp_cuda is the companion's.
in_header() {
    awk '/^ \*  Stop here if you only need the API/ { exit } { print }' mixprec.h >"$tmp/public"
    {
        tr '\n' ' ' <"$tmp/public" | grep -oE '(MIXPREC_API|MIXPREC_HD)[^({;]*[ *]mixp_[a-z0-9_]*\(' |
            sed 's/.*[ *]\(mixp_[a-z0-9_]*\)($/\1/'
        for type in $(sed -n 's/^MIXPI_TYPED(\([a-z0-9]*\),.*/\1/p' "$tmp/public"); do
            grep -oE 'mixp_[a-z_]*##type' "$tmp/public" | sed "s/##type/$type/"
        done
    } | LC_ALL=C sort -u
}
complete() { in_header >"$tmp/in_header"; declared | grep -vx mixp_cuda >"$tmp/declared"; [ -s "$tmp/declared" ] && diff "$tmp/in_header" "$tmp/declared"; }
check 'all of the header, and nothing else'      complete

# --- the library -----------------------------------------------------------------------------
if [ -n "$MIXPREC_TEST_QUICK" ]; then skip 'the shared library: in make test-long'; report; exit; fi
if [ "$(uname -s)" != Linux ]; then skip 'the shared library (not Linux)'; report; exit; fi
check 'make shared'                              build shared
exports() { nm -D --defined-only "$shared/libmixprec.so" | awk '{ print $3 }' | grep -v "^mixpi_" | LC_ALL=C sort -u | diff "$tmp/declared" -; }
check 'it exports what is declared'              exports
# MIXP_AUTOCAST and MIXP_NO_GRAD are macros that call functions of the library.
of_macros() {
    for name in $(awk '/^ \*  Stop here if you only need the API/ { exit } { print }' mixprec.h |
                      grep -oE '^MIXPREC_API [^(]*mixpi_[a-z0-9_]+\(' | sed 's/.*[ *]\(mixpi_[a-z0-9_]*\)($/\1/'); do
        nm -D --defined-only "$shared/libmixprec.so" | grep -q " T $name\$" || { echo "$name is not exported"; return 1; }
        found=$name
    done
    [ -n "$found" ]
}
check 'and what its macros call'                 of_macros
version=$(awk -F '"' '/^#define MIXPREC_VERSION "/ { print $2 }' mixprec.h)
soname() { readelf -d "$shared/libmixprec.so" | grep -F "SONAME" | grep -F "[libmixprec.so.${version%.*}]"; }
check 'its SONAME has the minor version'         soname
# A program with declarations of its own calls functions, inline ones too, of the library.
cat >"$tmp/user.c" <<'END'
#include <stddef.h>
#include <stdint.h>
#include DECLARED
#include <stdio.h>
int main(void) {
    float in[2] = { 65504.0f, 1e-8f }, out[2];
    mixp_f16 half[2];
    half[0] = mixp_f16_from_f32(in[0]);
    half[1] = mixp_f16_from_f32(in[1]);
    mixp_convert(out, MIXP_F32, half, MIXP_F16, 2);
    printf("%g %g\n", (double)out[0], (double)mixp_f32_from_f16(half[1]));
    return 0;
}
END
runs() {
    $CC -std=c99 -DDECLARED="\"$cdef\"" "$tmp/user.c" -L"$shared" -lmixprec -Wl,-rpath,"$shared" -o "$tmp/user" &&
        [ "$("$tmp/user")" = '65504 0' ]
}
check 'a program that includes only the declarations' runs

# --- Python ----------------------------------------------------------------------------------
python_trains() {
    "$PYTHON" examples/from_python.py "$shared" >"$tmp/python" || return
    cat "$tmp/python"
    awk '/^mixprec/ { runs++; if ($6 + 0 > 0.1 || $9 < 95) bad = 1 }
         /^PyTorch fp32/ { if ($9 > 1e-5) bad = 1 }
         END { exit bad || runs != 2 }' "$tmp/python"
}
if "$PYTHON" -c 'import cffi, numpy' 2>/dev/null; then check 'examples/from_python.py trains on arrays of numpy' python_trains
else skip 'examples/from_python.py (no Python with cffi and numpy)'
fi

# PyTorch's own operator database: a few samples of each entry. All of them: tests/tools/opinfo.py by itself.
database() {
    "$PYTHON" tests/tools/opinfo.py --cap 5 "$shared" >"$tmp/opinfo"
    code=$?
    tail -n 1 "$tmp/opinfo"
    return "$code"
}
# Its module database: the recurrent layers.
modules() {
    "$PYTHON" tests/tools/module_db.py "$shared" >"$tmp/modules"
    code=$?
    tail -n 1 "$tmp/modules"
    return "$code"
}
if "$PYTHON" -c 'import cffi, expecttest, torch' 2>/dev/null; then
    check "samples of PyTorch's operator database" database
    check "the recurrent layers of PyTorch's module database" modules
else
    skip "PyTorch's operator database (no Python with cffi, expecttest and torch)"
    skip "PyTorch's module database (no Python with cffi, expecttest and torch)"
fi

# PyTorch's own optimizer configurations, and its schedules: all of them, in 6 s.
optimizers() {
    "$PYTHON" tests/tools/optim_db.py "$shared" >"$tmp/optim"
    code=$?
    grep -v '^ok' "$tmp/optim"
    return "$code"
}
if "$PYTHON" -c 'import cffi, torch' 2>/dev/null; then check "PyTorch's optimizer configurations and schedules" optimizers
else skip "PyTorch's optimizer configurations and schedules (no Python with cffi and torch)"
fi
report
