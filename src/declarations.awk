# declarations.awk - the public half of mixprec.h as plain C declarations, for readers of C such as Python's cffi.
# SPDX-License-Identifier: MIT OR Unlicense
#
#     echo '#include "mixprec.h"' | cc -E -dD -DMIXPREC_API= -DMIXPREC_HD=MIXPREC_INLINE '-D__attribute__(x)=' -I. -x c - |
#         awk -f src/declarations.awk
#
# What remains: types, functions, inline functions without their bodies, and integer constants; nothing private, but
# for the types that public types contain.

# Depth of braces after the line.
function braces(line,    opened, closed) {
    opened = gsub(/\{/, "{", line)
    closed = gsub(/\}/, "}", line)
    return opened - closed
}

# One declaration or definition of depth 0.
function statement(text,    end) {
    while ((end = match(text, /\} *MIXPREC_INLINE /)) > 0) {    # several of one macro
        statement(substr(text, 1, end))
        text = substr(text, end + 1)
    }
    gsub(/[ \t]+/, " ", text)
    sub(/^ /, "", text)
    if (text ~ /^MIXPREC_INLINE /) {
        sub(/^MIXPREC_INLINE /, "", text)
        sub(/ ?\{.*/, ";", text)
    }
    sub(/^extern /, "", text)
    if (text ~ /\(/ && text ~ /^[^({]*mixpi_[a-z0-9_]*\(/ && text !~ /^typedef/) return
    if (text ~ /^(static|struct mixpi_static)/ || text ~ /^;?$/) return
    print text
}

/^# [0-9]+ "/ { ours = $3 ~ /mixprec\.h"$/; next }
!ours { next }
/^#define MIXP(REC)?_[A-Z0-9_]+ \(?-?(0x)?[0-9A-Fa-f]+\)?[uU]?$/ && $2 !~ /^MIXPREC_(API|HD)$/ {
    gsub(/[()]/, "", $3)
    print "#define " $2 " " $3
    next
}
/^#/ { next }
/^[ \t]*$/ { next }
{
    text = text " " $0
    depth += braces($0)
    if (depth == 0 && (text ~ /;[ \t]*$/ || (text ~ /^ *MIXPREC_INLINE / && text ~ /\}[ \t]*$/))) {
        statement(text)
        text = ""
    }
}
END { if (text !~ /^[ \t]*$/) { print "declarations.awk: no end of" text >"/dev/stderr"; exit 1 } }
