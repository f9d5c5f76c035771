# slice.awk - mixprec_formats.h, the part of mixprec.h that MIXPREC_ONLY_FORMATS compiles, as a file of its own.
# SPDX-License-Identifier: MIT OR Unlicense
#
#     awk -f packaging/slice.awk mixprec.h                (make dist-files does it)
#
# Takes each #ifdef, #ifndef and #else of MIXPREC_ONLY_FORMATS as if it was defined; other conditions stay.
BEGIN {
    print "/* mixprec_formats.h - the conversions of mixprec.h alone, in a smaller file. A program includes this file or"
    print " * mixprec.h, not both. */"
    print "#ifndef MIXPREC_ONLY_FORMATS"
    print "#  define MIXPREC_ONLY_FORMATS"
    print "#endif"
}

# depth: open conditions. own[d]: the condition at depth d is ours. off[d]: it leaves out the lines that follow.
function is_left_out(    d) {
    for (d = 1; d <= depth; d++) if (off[d]) return 1
    return 0
}

/^[ \t]*#[ \t]*if(n?def[ \t]|[ \t(])/ {
    depth++
    own[depth] = /^[ \t]*#[ \t]*ifn?def[ \t]+MIXPREC_ONLY_FORMATS([ \t]|$)/
    off[depth] = own[depth] && /ifndef/
    if (!own[depth] && !is_left_out()) print
    next
}
/^[ \t]*#[ \t]*(else|elif)/ && own[depth] { off[depth] = !off[depth]; next }
/^[ \t]*#[ \t]*endif/ {
    if (!own[depth] && !is_left_out()) print
    depth--
    next
}
!is_left_out()
END { if (depth) { print "slice.awk: conditions do not end" >"/dev/stderr"; exit 1 } }
