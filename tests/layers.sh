#!/bin/sh
# layers.sh - proves that no section of mixprec.h uses a later one: by name, whether function, type,
# constant or macro. (Calls through a table of functions have no name, and are the design.)
# SPDX-License-Identifier: MIT OR Unlicense
#
#   tests/layers.sh [-v]                -v: shows every upward use with its line
. tests/check.sh

# --- where each name is at home, and who uses it from an earlier section ------------------
# Reads the file for its banners, then its code twice. Declarations at the top level start in the
# first column and bodies are indented; that is how the file is written.
cat >"$tmp/layers.awk" <<'END_OF_AWK'
BEGIN { any = "(mixpi?_|MIXPI?_)[A-Za-z0-9_]+" }

function settle(name) { if (name != "" && !(name in home)) home[name] = room }
function last_name(text) { return match(text, any "$") ? substr(text, RSTART) : "" }
function settle_all(text) {
    while (match(text, any)) {
        settle(substr(text, RSTART, RLENGTH))
        text = substr(text, RSTART + RLENGTH)
    }
}
# The name before the last pair of brackets; MIXPI_P(name) is one name.
function function_name(text,    i, depth, c) {
    for (i = length(text); i; i--) {
        c = substr(text, i, 1)
        if (c == ")") depth++
        else if (c == "(" && !--depth) break
    }
    text = substr(text, 1, i - 1)
    return match(text, /MIXPI_P\([a-z0-9_]+\)$/) ? substr(text, RSTART) : last_name(text)
}
# text: a declaration at the top level, up to its first ; or {, which is `end`.
function declared(text, end,    name) {
    sub(/ *[;{]$/, "", text)
    if (text ~ /^(typedef|struct|enum|union|class)/ && end == "{") settle(last_name(text))
    else if (text ~ /^typedef .*\(\*/) {
        match(text, "\\(\\*" any)
        settle(substr(text, RSTART + 2, RLENGTH - 2))
    } else if (text ~ /^typedef/) settle(last_name(text))
    else if (text ~ /=/ || text !~ /\)$/) {             # data
        sub(/ *(\[.*)?(=.*)?$/, "", text)
        settle(last_name(text))
    } else {
        name = function_name(text)
        if (name == "") return
        if (end == ";") { if (!(name in promised)) promised[name] = room; return }
        functions++
        if (!(name in defined) || defined[name] < room) defined[name] = room
    }
}

FNR == 1 { pass++; room = 0; text = "" }
pass == 1 && /^\/\* ==== [0-9]+\. / {
    banner[FNR] = $3 + 0
    sections++
    if (match($0, />>[a-z]+/)) title[$3 + 0] = substr($0, RSTART + 2, RLENGTH - 2)
}
pass == 1 && /^\/\* =====/ { banner[FNR] = 0 }            # between the halves: no section
pass == 1 { next }
FNR in banner { room = banner[FNR] }

pass == 2 && /^ *# *define / { settle($2 == "define" ? bare($3) : bare($2)) }
function bare(name) { sub(/\(.*/, "", name); return name }
pass == 2 && (macro || /^ *#/) { macro = /\\$/; next }
pass == 2 && members { settle_all($0); if (/\}/) members = 0 }
pass == 2 && /^(typedef .*)?\} *mixp[a-z0-9_]+;$/ {       # typedef struct { ... } name;
    line = $0
    sub(/;$/, "", line)
    settle(last_name(line))
}
pass == 2 {
    if (text != "") text = text " " $0
    else if (/^[A-Za-z]/ && !/^(extern *"s" *\{|public:|private:)/) text = $0
    if (text == "" || !match(text, /[;{]/)) next
    if (text ~ /^(typedef )?enum[^;]*\{/) {
        settle_all(substr(text, RSTART))
        members = text !~ /\}/
        match(text, /[;{]/)
    }
    declared(substr(text, 1, RSTART), substr(text, RSTART, 1))
    text = ""
}
pass == 2 { next }

FNR == 1 {
    for (name in defined) home[name] = defined[name]
    for (name in promised)
        if (promised[name] && name in defined && defined[name] > promised[name])
            print title[promised[name]], name, "declared here, defined in", title[defined[name]]
}
{
    line = $0
    while (match(line, "MIXPI_P\\([a-z0-9_]+\\)|" any)) {
        name = substr(line, RSTART, RLENGTH)
        line = substr(line, RSTART + RLENGTH)
        uses++
        if (room && name in home && home[name] > room &&
            !(name in promised && promised[name] == room && /^[A-Za-z]/))
            print title[room], name, "of", title[home[name]] ", line " FNR
    }
}
END { print sections + 0, functions + 0, uses + 0 >counts }
END_OF_AWK

# upward FILE: its upward uses, each `section name ...`; $tmp/counts: sections, functions, names.
upward() {
    awk -f tests/code.awk "$1" >"$tmp/code" &&
        awk -v counts="$tmp/counts" -f "$tmp/layers.awk" "$1" "$tmp/code" "$tmp/code"
}

# --- the reader itself: each kind of upward use is found, and nothing else ----------------
cat >"$tmp/sample.h" <<'END_OF_SAMPLE'
/* ==== 1. LOW ============================================================ >>low ==== */
typedef struct mixp_later mixp_later;   /* a name of its own, for pointers */
#define MIXPI_LOW(x) mixpi_high_call(x)
int mixp_low(mixp_later *t);
int mixp_late(int x);
/* ==== 2. HIGH ========================================================== >>high ==== */
typedef enum mixp_choice {
    MIXP_CHOICE_A,              /* mixp_low */
    MIXP_CHOICE_B
} mixp_choice;
struct mixp_later { int x; };
typedef struct { int x; } mixp_plain;
#define MIXPI_HIGH 3
/* ==== 1. LOW (implementation) ======================================================= */
static int MIXPI_P(low)(mixp_later *t) { return t->x; }
int mixp_low(mixp_later *t) {
    mixp_choice c = MIXP_CHOICE_B;
    mixp_plain p;
    const char *text = "mixpi_high_call(\" */ MIXPI_HIGH";
    return mixpi_table[MIXPI_HIGH] + MIXPI_P(high)(1) + MIXPI_P(low)(t);  /* MIXP_CHOICE_A */
}
/* ==== 2. HIGH (implementation) ====================================================== */
static const int mixpi_table[3] = { 1, 2, 3 };
static int MIXPI_P(high)(int x)
{ return x; }
static int mixpi_high_call(int x,
                           int (*by)(int)) {
    return mixp_low(0) + MIXPI_LOW(x) + by(x);
}
int mixp_late(int x) { return x; }
END_OF_SAMPLE
cat >"$tmp/expected" <<'END_OF_LIST'
low MIXPI_HIGH
low MIXPI_P(high)
low MIXP_CHOICE_B
low mixp_choice
low mixp_late
low mixp_plain
low mixpi_high_call
low mixpi_table
END_OF_LIST
names() { awk 'NF { print $1, $2 }' | LC_ALL=C sort -u; }
sample() { upward "$tmp/sample.h" | names | diff "$tmp/expected" -; }
check 'every kind of upward use is found'       sample

# --- mixprec.h ----------------------------------------------------------------------------
upward mixprec.h >"$tmp/upward"
[ "$1" = -v ] && cat "$tmp/upward"
read -r sections functions uses <"$tmp/counts"
banners=$(grep -c '^/\* ==== [0-9]*\. ' mixprec.h)
check "$sections banners are read"              [ "$sections" -eq "$banners" ]
check "$functions functions are found"          [ "$functions" -ge 500 ]
check "$uses uses of names are read"            [ "$uses" -ge 5000 ]
none() { head -n 20 "$tmp/upward"; [ ! -s "$tmp/upward" ]; }
check 'no section uses a later one'             none
report
