#!/bin/sh
# metrics.sh - figures of the style of C, C++ and CUDA text. It only reports: if a figure were a
# target, people would squeeze lines.
# SPDX-License-Identifier: MIT OR Unlicense
#
#   tests/tools/metrics.sh                    mixprec's two files and those of other projects
#   tests/tools/metrics.sh FILE...            the figures of any files
#
#   lines       number of lines of the file
#   functions   number of functions; then the median, the 90th percentile and the maximum of their
#               lengths in lines
#   nested      share of functions with statements four deep
#   params      share of functions with eight parameters or more
#   wide        share of code lines over 90 columns
#   joined      share of lines with two or more statements, among lines with a statement
#   comment     share of lines that contain only a comment
#   tokens      average number of tokens of a code line, without preprocessor lines
. tests/support/check.sh

cat >"$tmp/metrics.awk" <<'END_OF_AWK'
BEGIN {
    token = "^([A-Za-z_][A-Za-z0-9_]*|[0-9][A-Za-z0-9_.]*|\"s\"|'s'|::|->|\\+\\+|--|<<=|>>=|<<|>>" \
            "|&&|\\|\\||##|\\.\\.\\.|[-+*/%&|^!=<>]=|[^ \t])"
}
FNR == 1 { pass++ }
pass == 1 { raw[FNR] = $0; lines = FNR; next }          # the file itself, then its code

# Inside a function only the first branch of an #if counts: two would be one statement twice.
{
    if (raw[FNR] ~ /[^ \t]/) {
        filled++
        if ($0 ~ /[^ \t]/) {
            code++
            if (length(raw[FNR]) > 90) wide++
        } else comments++
    }
}
directive || /^[ \t]*#/ {
    if (!directive && /^[ \t]*# *if/) {
        depth_at[++open_ifs] = depth
        other[open_ifs] = 0
    } else if (!directive && /^[ \t]*# *el/) {
        if (depth_at[open_ifs] > 0) other[open_ifs] = 1
        depth = depth_at[open_ifs]
    } else if (!directive && /^[ \t]*# *endif/ && open_ifs) open_ifs--
    directive = /\\$/
    next
}
{ for (i = 1; i <= open_ifs; i++) if (other[i]) next }
# Braces that hold no statements are looked through.
/^[ \t]*(extern *"s"|(inline *)?namespace[A-Za-z0-9_: ]*) *\{/ { next }
!depth && /^[ \t]*\};?[ \t]*$/ { next }
{
    text = $0
    found = ends = 0
    for (;;) {
        sub(/^[ \t]+/, "", text)
        if (!match(text, token)) break
        word[++n] = substr(text, 1, RLENGTH)
        at[n] = FNR
        text = substr(text, RLENGTH + 1)
        found++
        if (word[n] == "(") brackets++
        else if (word[n] == ")" && brackets) brackets--
        else if (word[n] == ";" && !brackets) ends++
        else if (word[n] == "{" || word[n] == "}") {
            brackets = 0
            depth += word[n] == "{" ? 1 : -1
            if (depth < 0) depth = 0
        }
    }
    if (found) { tokens += found; token_lines++ }
    if (ends) ending++
    if (ends > 1) joined++
}

# --- functions, from the tokens -------------------------------------------------------------
function closing(i,    d) {             # of the bracket or brace word[i]
    for (; i <= n; i++) {
        if (word[i] ~ /^[({[]$/) d++
        else if (word[i] ~ /^[])}]$/ && !--d) return i
    }
    return n
}
function opening(i,    d) {
    for (; i > 0; i--) {
        if (word[i] == ")") d++
        else if (word[i] == "(" && !--d) return i
    }
    return 1
}
function skip_brackets() { if (word[now] == "(") now = closing(now) + 1 }
# One statement from `now` on, which it moves behind it. level: how many it stands in.
function statement(level, last,    w) {
    if (level > deepest) deepest = level
    if (now > last) return
    w = word[now]
    if (w == "{") {
        for (now++; now <= last && word[now] != "}";) statement(level, last)
        now++
    } else if (w == "do") {
        now++
        statement(level + 1, last)
    } else if (w ~ /^(for|while|switch|if)$/) {
        now++
        if (word[now] == "constexpr") now++
        skip_brackets()
        statement(level + 1, last)
        while (w == "if" && word[now] == "else") {
            now++
            if (word[now] == "if") { now++; skip_brackets() }
            statement(level + 1, last)
        }
    } else if (w == "case" || w == "default") {
        while (now <= last && word[now] != ":") now++
        now++
    } else if (w ~ /^MIXPI?_/ && word[now + 1] == "(" &&
               word[closing(now + 1) + 1] ~ /^([A-Za-z_]|\{)/) {
        now++                           # a macro that stands for a loop
        skip_brackets()
        statement(level + 1, last)
    } else {
        for (; now <= last && word[now] != "}" && word[now] != ";"; now++)
            if (word[now] ~ /^[({[]$/) now = closing(now)
        if (word[now] == ";") now++
    }
}
# The brackets word[first..last] hold how many parameters?
function parameters(first, last,    i, d, count) {
    if (last == first + 1 || (last == first + 2 && word[first + 1] == "void")) return 0
    for (i = first; i <= last; i++) {
        if (word[i] == "(") d++
        else if (word[i] == ")") d--
        else if (word[i] == "," && d == 1) count++
    }
    return count + 1
}
# The text before the brace word[i] began at word[start]. Is it a function? Then it is counted.
function body(start, i,    j, k, end, equals) {
    for (j = start; j < i; j++) if (word[j] == "=" || word[j] == "typedef") equals = 1
    for (j = i - 1; word[j] ~ /^(const|noexcept|override)$/; j--) {}
    if (equals || j <= start || word[j] != ")") return
    k = opening(j)
    name = word[k - 1]
    if (name == ")") name = word[opening(k - 1) + 1]    # MIXPI_P(name)(...)
    end = closing(i)
    functions++
    size[functions] = at[end] - at[start] + 1
    if (size[functions] > longest) { longest = size[functions]; longest_name = name }
    if (parameters(k, j) >= 8) many++
    now = i
    deepest = 0
    statement(0, end)
    if (deepest >= 4) nested++
}
function share(part, whole) { return whole ? 100 * part / whole : 0 }
END {
    start = 1
    for (i = 1; i <= n; i++) {
        if (word[i] == ";" || word[i] == "}") start = i + 1
        else if (word[i] == "{") {
            body(start, i)
            i = closing(i)
            start = i + 1
        }
    }
    for (i = 1; i <= functions; i++) {                  # sorted, for the median
        for (j = i; j > 1 && size[j - 1] > size[j]; j--) {
            k = size[j]; size[j] = size[j - 1]; size[j - 1] = k
        }
    }
    printf "%s|%d|%d|%d / %d / %d %s|%.1f|%.1f|%.1f|%.1f|%.0f|%.1f\n", file, lines, functions,
        size[int((functions + 1) / 2)], size[int(0.9 * functions + 0.5)], longest, longest_name,
        share(nested, functions), share(many, functions), share(wide, code), share(joined, ending),
        share(comments, filled), token_lines ? tokens / token_lines : 0
}
END_OF_AWK

# figures FILE: its line of the table, in the order of the list above.
figures() {
    awk -f tests/tools/code.awk "$1" >"$tmp/code" &&
        awk -v file="${1##*/}" -f "$tmp/metrics.awk" "$1" "$tmp/code"
}
table() {
    awk -F '|' 'function row(a, b, c, d, e, f, g, h, i, j) {
                    printf "%-18s %6s %9s  %-30s %6s %6s %5s %6s %7s %6s\n",
                           a, b, c, d, e, f, g, h, i, j
                }
                NR == 1 { row("file", "lines", "functions", "median / 90th / longest", "nested",
                              "params", "wide", "joined", "comment", "tokens") }
                { row($1, $2, $3, $4, $5 "%", $6 "%", $7 "%", $8 "%", $9 "%", $10) }'
}

if [ $# -gt 0 ]; then
    for f; do figures "$f"; done | table
    exit
fi

# --- mixprec's files beside others ----------------------------------------------------------
# Others' files by the same rules: github.com/nothings/stb, floooh/sokol, Cyan4973/xxHash,
# erincatto/box2d (all of src/).
for f in mixprec.h mixprec_cuda.cu; do figures "$f"; done >"$tmp/ours"
cat - "$tmp/ours" <<'END_OF_TABLE' | table
stb_image.h|7989|222|11 / 56 / 204 stbi__tga_load|11|1|6|3.1|18|9.0
sokol_gfx.h|28091|981|11 / 42 / 269|2|1|10|1.2|15|7.4
xxhash.h|7089|157|9 / 36 / 126|0|1|6|2.9|51|8.1
box2d v3|38356|1352|8 / 52 / 807 b2Solve|2|0|4|0.0|10|7.1
END_OF_TABLE

# The reader itself: a text whose figures can be counted by hand.
cat >"$tmp/sample.c" <<'END_OF_SAMPLE'
/* six words; of comment; alone */
#define NOT_COUNTED(a, b, c) a; b; c;
static const int row[2] = { 1, 2 };

int two(int a, int b)
{ return a + b; }

static int eight(int a, int b, int c, int d, int e, int f, int g, int (*h)(int, int))  /* past 90 */
{
    int x = 0; int y = 1;
    for (x = 0; x < 3; x++)
        if (a) while (b) { do c--; while (c); }
#if A
    return x + y + d;
#else
    return x; return y;
#endif
}
END_OF_SAMPLE
# Tokens: 14; two: 9 + 7; eight: 36 + 1 + 10 + 13 + 19 + 7 + 1; 117 in 10 lines. 15 lines of code,
# 5 lines with a statement's end.
sample() {
    want='sample.c|18|2|2 / 11 / 11 eight|50.0|50.0|6.7|40.0|6|11.7'
    figures "$tmp/sample.c"
    [ "$(figures "$tmp/sample.c")" = "$want" ]
}
check 'the figures of a sample are as counted by hand' sample
report
