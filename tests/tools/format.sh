#!/bin/sh
# format.sh - every function of the rooms is laid out as .clang-format says. Structs, tables and macros
# are set by hand, in columns, and are left as they are; so are the rooms that MIXPI_P compiles several
# times, because clang-format takes MIXPI_P(name)(x) for a macro before a line. Skips without version 14.
# SPDX-License-Identifier: MIT OR Unlicense
#
#   tests/tools/format.sh                 checks the rooms
#   tests/tools/format.sh --fix           formats them
#   tests/tools/format.sh --fix FILE...   formats these
. tests/support/check.sh

fix=
[ "${1:-}" = --fix ] && { fix=1; shift; }
[ $# -gt 0 ] || set -- $(find src -name '*.c' -o -name '*.cu' | sort)

# `--lines=first:last` for each function: its head begins in the first column, ends with `{`, and its
# last line is `}` in the first column.
functions() {
    awk '/^[A-Za-z_]/ && !/^(typedef|enum|struct|union|namespace|extern "C" \{)/ { head = FNR }
         head && !body && /^\{ .* \}$/ { printf "--lines=%d:%d\n", head, FNR; head = 0 }
         !/^[A-Za-z_ ]/ && !/^}/ { head = 0 }
         head && !body && /\) (const )?\{$/ { body = head }
         /[;{]$/ && !body { head = 0 }
         /^}/ { if (body) printf "--lines=%d:%d\n", body, FNR; head = body = 0 }' "$1"
}

# agrees FILE: its functions are laid out so; otherwise shows the first lines that are not.
agrees() {
    lines=$(functions "$1")
    [ "$lines" ] || return 0
    "$formatter" $lines "$1" >"$tmp/formatted" || return 1
    cmp -s "$tmp/formatted" "$1" && return 0
    if [ "$fix" ]; then cat "$tmp/formatted" >"$1"
    else
        diff "$1" "$tmp/formatted" | head -n 12
        echo "run: tests/tools/format.sh --fix $1"
        return 1
    fi
}

# Other versions lay out a few lines otherwise.
formatter=
for program in clang-format-14 clang-format; do
    "$program" --version 2>/dev/null | grep -q 'version 14\.' && formatter=$program && break
done
if [ "$formatter" ]; then
    for file; do
        grep -q 'MIXPI_P(' "$file" && continue
        check "format of $file" agrees "$file"
    done
else
    skip 'no clang-format 14'
fi
report
