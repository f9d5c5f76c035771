#!/bin/sh
# install.sh - tests make install and uninstall in a scratch directory.
# SPDX-License-Identifier: MIT OR Unlicense
. tests/support/check.sh

CC=${CC:-cc}
dest="$tmp/a root" prefix=/opt/mixprec
root="$dest$prefix"
pc="$root/share/pkgconfig/mixprec.pc"
version=$(awk -F '"' '/^#define MIXPREC_VERSION "/ { print $2 }' mixprec.h)
run_make() { env -u MAKEFLAGS -u MAKELEVEL "${MAKE:-make}" "$@" DESTDIR="$dest" PREFIX="$prefix"; }

first_line() { run_make -n always BUILD="$tmp/build" | head -n 1; }
check 'make says which version it builds' sh -c 'case $1 in "mixprec $2: "*) ;; *) echo "$1"; exit 1 ;; esac' \
                                      - "$(first_line)" "$version"
check 'make install'                  run_make install
check 'the header is there'           cmp mixprec.h "$root/include/mixprec.h"
addons() { for h in compare conv ops recurrent report trail; do cmp "examples/$h.h" "$root/include/mixprec/$h.h" || return; done; }
check 'the add-ons are there'         addons
sources() { for f in mixprec_cuda.cu LICENSE src/parts/*.c; do cmp "$f" "$root/share/mixprec/$(basename "$f")" || return; done; }
check 'the companion, the parts and the licence are there' sources
check 'mixprec.pc says what to define' grep -q '^Description: .*MIXPREC_IMPLEMENTATION before the include' "$pc"
check 'mixprec.pc has the version'    grep -x "Version: $version" "$pc"
check 'mixprec.pc has the prefix'     grep -x "prefix=$prefix" "$pc"
check 'and not the staging directory' sh -c "! grep -F '$tmp' '$pc'"

# A program built with nothing but what was installed; its own copy, so that little is compiled.
cat >"$tmp/user.c" <<'END'
#define MIXPREC_STATIC
#define MIXPREC_IMPLEMENTATION
#include <mixprec.h>
#include <mixprec/compare.h>
#include <mixprec/conv.h>
#include <mixprec/recurrent.h>
#include <mixprec/report.h>
#include <stdio.h>
int main(void) { return puts(mixp_version()) < 0; }
END
# The root of a staged install has a space in it, so the flags are asked for an unstaged copy.
flags() {
    if command -v pkg-config >/dev/null 2>&1; then
        PKG_CONFIG_PATH="$tmp/copy/share/pkgconfig" pkg-config "$@" mixprec
    else
        echo "-I$tmp/copy/include -lm"
    fi
}
builds() {
    env -u MAKEFLAGS -u MAKELEVEL "${MAKE:-make}" install PREFIX="$tmp/copy" DESTDIR= &&
    (cd "$tmp" && $CC -O1 user.c $(flags --cflags --libs) -o user) && [ "$("$tmp/user")" = "$version" ]
}
check 'a program builds against it'   builds
# Formats only, which compile in a second.
parts() {
    sources=$(flags --variable=sources) || return
    printf '#include <mixprec.h>\nint main(void) { return (int)mixp_dtype_size(MIXP_F16) - 2; }\n' >"$tmp/uses_parts.c"
    (cd "$tmp" && $CC -DMIXPREC_ONLY_FORMATS $(flags --cflags) uses_parts.c "$sources"/mixprec_*.c $(flags --libs) -o uses_parts && ./uses_parts)
}
if command -v pkg-config >/dev/null 2>&1; then
    check 'pkg-config knows the version'  [ "$(flags --modversion)" = "$version" ]
    if [ -n "$MIXPREC_TEST_QUICK" ]; then skip 'pkg-config knows where the parts are: in make test-long'
    else check 'it knows where the parts are, and they build a program' parts
    fi
else
    skip 'pkg-config knows the version, and the parts (no pkg-config)'
fi

# A release, made twice; once with the library of this machine.
dist() { run_make dist-files BUILD="$tmp/$1" >/dev/null && (cd "$tmp/$1/dist/mixprec-$version" && sha256sum -c SHA256SUMS); }
same() { dist again && cmp "$tmp/dist/dist/mixprec-$version.tar.gz" "$tmp/again/dist/mixprec-$version.tar.gz"; }
if tar --version 2>/dev/null | grep -q GNU && command -v sha256sum >/dev/null; then
    check 'make dist, and its checksums'  dist dist
    check 'it is the same each time'      same
    contents() { tar tzf "$tmp/dist/dist/mixprec-$version.tar.gz" | sed 's,.*/,,' | LC_ALL=C sort | tr '\n' ' ' >"$tmp/contents"; cat "$tmp/contents"
        page=; ! command -v "${PYTHON:-python3}" >/dev/null || page=' reference.html'
        [ "$(cat "$tmp/contents")" = " CHANGELOG.md LICENSE SECURITY.md SHA256SUMS compare.h conv.h gguf.h mixprec.h mixprec.spdx \
mixprec_avx2.c mixprec_avx512.c mixprec_cuda.cu mixprec_formats.h mixprec_host.c mixprec_neon.c mixprec_scalar.c ops.h plain_file.h profile.h \
recurrent.h$page report.h trail.h " ]
    }
    check 'it has the files that users copy' contents
    library() (
        run_make dist BUILD="$tmp/library" CFLAGS=-O0 OPENMP="$OPENMP" && cd "$tmp/library/dist/" && tar xzf mixprec-"$version"-*.tar.gz &&
            cd mixprec-"$version"-*/ && sha256sum -c SHA256SUMS && cp "$tmp/uses_parts.c" . &&
            $CC uses_parts.c -I. libmixprec.a -lm $OPENMP -o uses && ./uses
    )
    if [ -n "$MIXPREC_TEST_QUICK" ]; then skip 'the library of this machine in a release: in make test-long'
    else check 'the library of this machine is in it' library
    fi
else skip 'make dist (no GNU tar or no sha256sum)'
fi

nothing_left() { [ -z "$(find "$dest" ! -type d)" ]; }
check 'make uninstall'                run_make uninstall
check 'nothing is left'               nothing_left
check 'a second uninstall is no error' run_make uninstall
report
