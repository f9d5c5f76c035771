# code.awk - the code of a C file, line for line, without comments: comments become blanks, and
# quoted text becomes "s" or 's'. metrics.sh runs it.
# SPDX-License-Identifier: MIT OR Unlicense
{
    out = ""
    while (length($0)) {
        if (comment) {
            at = index($0, "*/")
            if (!at) break
            $0 = substr($0, at + 2)
            comment = 0
            out = out " "
        } else if (!match($0, /\/\*|\/\/|"|'/)) {
            out = out $0
            break
        } else {
            mark = substr($0, RSTART, RLENGTH)
            digits = mark == "'" && RSTART > 1 && substr($0, RSTART - 1, 1) ~ /[0-9]/   # 1'000
            out = out substr($0, 1, RSTART - 1)
            $0 = substr($0, RSTART + RLENGTH)
            if (mark == "//") break
            if (mark == "/*") comment = 1
            else if (!digits) {
                out = out mark "s" mark
                $0 = behind(mark, $0)
            }
        }
    }
    print out
}
function behind(mark, text) {           # what follows the closing quote
    if (mark == "'") match(text, /^([^'\\]|\\.)*'/)
    else match(text, /^([^"\\]|\\.)*"/)
    return RSTART ? substr(text, RLENGTH + 1) : ""
}
