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
check 'compare.h is there'            cmp examples/compare.h "$root/include/mixprec/compare.h"
if [ -f mixprec_cuda.cu ]; then
    check 'the CUDA companion is there'   cmp mixprec_cuda.cu "$root/share/mixprec/mixprec_cuda.cu"
fi
check 'mixprec.pc has the version'    grep -x "Version: $version" "$pc"
check 'mixprec.pc has the prefix'     grep -x "prefix=$prefix" "$pc"
check 'and not the staging directory' sh -c "! grep -F '$tmp' '$pc'"

# A program built with nothing but what was installed; its own copy, so that little is compiled.
cat >"$tmp/user.c" <<'END'
#define MIXPREC_STATIC
#define MIXPREC_IMPLEMENTATION
#include <mixprec.h>
#include <mixprec/compare.h>
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
if command -v pkg-config >/dev/null 2>&1; then
    check 'pkg-config knows the version'  [ "$(flags --modversion)" = "$version" ]
else
    skip 'pkg-config knows the version (no pkg-config)'
fi

# A release, made twice.
dist() { run_make dist BUILD="$tmp/$1" >/dev/null && (cd "$tmp/$1/dist/mixprec-$version" && sha256sum -c SHA256SUMS); }
same() { dist again && cmp "$tmp/dist/dist/mixprec-$version.tar.gz" "$tmp/again/dist/mixprec-$version.tar.gz"; }
if tar --version 2>/dev/null | grep -q GNU && command -v sha256sum >/dev/null; then
    check 'make dist, and its checksums'  dist dist
    check 'it is the same each time'      same
else skip 'make dist (no GNU tar or no sha256sum)'
fi

nothing_left() { [ -z "$(find "$dest" ! -type d)" ]; }
check 'make uninstall'                run_make uninstall
check 'nothing is left'               nothing_left
check 'a second uninstall is no error' run_make uninstall
report
