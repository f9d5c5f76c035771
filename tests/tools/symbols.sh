#!/bin/sh
# symbols.sh - checks the effects of mixprec.h on an includer: names, data, macros, warnings; and
# the file's statements about itself: sections, length, version. Each of two compilations of the
# implementation serves several checks.
# SPDX-License-Identifier: MIT OR Unlicense
. tests/support/check.sh

CC=${CC:-cc}
compile() { $CC -std=c99 -I. $OPENMP "$@"; }
# none PATTERN FILE: no line matches; those that do are shown.
none() { ! grep -E "$1" "$2"; }
some() { grep -E "$1" "$2"; }

printf '#define MIXPREC_IMPLEMENTATION\n#include "mixprec.h"\n' >"$tmp/i.c"
printf '#define MIXPREC_STATIC\n' | cat - "$tmp/i.c" >"$tmp/s.c"

# --- warnings, and an object ---------------------------------------------------------------
# Code with a warning of each kind warns after the implementation as it does without it. The code before it is one
# file of a user's program, which includes the header several times.
. tests/support/user_program.sh
cat >"$tmp/warns.c" <<'END'
static int user_unused(int x) { return x; }
int user_warns(const char *text, double d, int i);
int user_warns(const char *text, double d, int i)
{
    int n = d, x, *p = (int *)text;
    short s = n;
    unsigned u = i;
    { int i = n; n += i; }
    switch (n) { case 1: n++; case 2: n--; }
#if USER_UNDEFINED
#endif
    return n + s + (int)u + x + *p + (n & 1 == 0);
}
END
cat "$tmp/a.c" "$tmp/warns.c" >"$tmp/w.c"
warn='-Wall -Wextra -Wpedantic -Wconversion -Wsign-conversion -Wshadow -Wundef -Wcast-qual -Wdouble-promotion'
warn="$warn -Wpointer-arith -Wwrite-strings -Wcast-align -Wstrict-prototypes -Wmissing-prototypes"
# A file that includes the header before it defines MIXPREC_IMPLEMENTATION: in C, gcc then searches long for lines, five times
# as long as it parses the file (src/base.h).
warn="$warn -Wno-misleading-indentation"
# Vectors take half the time: tests/tools/test_parts.sh looks at the names of their objects.
[ -z "$MIXPREC_TEST_QUICK" ] || warn="$warn -DMIXPREC_NO_SIMD"
# compiled SOURCE OBJECT: the names of its warnings are in OBJECT.w. Position-dependent code, so that constant tables of
# pointers are plain read-only data; a position-independent build has to put them in .data.rel.ro, which is read-only as well.
compiled() {
    compile $warn -O0 -fno-pie -I"$tmp" -c "$1" -o "$2" 2>"$2.log" || { cat "$2.log"; return 1; }
    sed -n 's/.*warning:.*\[\(-W[a-z-]*\).*/\1/p' "$2.log" | sort >"$2.w"
}
same_warnings() {
    compiled "$tmp/warns.c" "$tmp/warns.o" && [ "$(wc -l <"$tmp/warns.o.w")" -ge 6 ] || return
    diff "$tmp/warns.o.w" "$tmp/i.o.w" || { cat "$tmp/i.o.log"; return 1; }
}
# With its other file, the program runs.
user_runs() { compile $warn -Werror -fno-pie -no-pie -I"$tmp" "$tmp/b.c" "$tmp/i.o" -lm -o "$tmp/user" && "$tmp/user"; }

# In other files gcc finds the lines fast, and still warns of misleading indentation behind the header.
printf 'int user_f(int i)\n{\n    if (i)\n        i++;\n        i++;\n    return i;\n}\n' | cat "$tmp/i.c" - >"$tmp/indent.c"
cpu_of() {
    ( compile -fsyntax-only -Wall "$@" "$tmp/indent.c" 2>"$tmp/indent.log" && times ) |
        awk 'NR == 2 { split($1, part, "[ms]"); print 60 * part[1] + part[2] }'
}
lines_are_found() {
    without=$(cpu_of -Wno-misleading-indentation) && none Wmisleading-indentation "$tmp/indent.log" || return 1
    with=$(cpu_of) && some Wmisleading-indentation "$tmp/indent.log" || return 1
    echo "$with CPU seconds with -Wmisleading-indentation, $without without"
    awk "BEGIN { exit !($without > 0 && $with < 2 * $without) }"
}

check 'the implementation compiles'              compiled "$tmp/w.c" "$tmp/i.o"
check 'warnings are as before after the header'  same_warnings
check 'a program of two files, C99 at -O0'       user_runs
if [ -n "$MIXPREC_TEST_QUICK" ]; then skip 'indentation is checked fast: in make test-long'
else check 'indentation is checked fast' lines_are_found; fi

# --- names and data in the object --------------------------------------------------------
# A program that only converts: with MIXPREC_STATIC, -O2 drops static functions that it does not call; an external name
# or its data would stay.
{ cat "$tmp/s.c"
  echo 'int main(void) { mixp_f16 h[8]; float f[8] = { 1.0f }; return mixp_convert(h, MIXP_F16, f, MIXP_F32, 8); }'
} >"$tmp/only.c"
only() { compile -O2 -fno-pie -c "$tmp/only.c" -o "$tmp/s.o"; }

check 'with MIXPREC_STATIC it compiles'          only
if command -v nm >/dev/null 2>&1 && [ -f "$tmp/i.o" ] && [ -f "$tmp/s.o" ]; then
    nm "$tmp/i.o" | grep -v ' user_' >"$tmp/i.nm"
    nm "$tmp/s.o" | grep -v ' T main$' >"$tmp/s.nm"
    grep ' [A-TV-Z] ' "$tmp/i.nm" | grep -vE ' (mixp_|mixpi_(autocast|no_grad|scope)_(enter|leave)$)' >"$tmp/foreign"
    check 'external names exist'              some ' T mixp_' "$tmp/i.nm"
    check 'external names start with mixp_, but for what blocks expand to' none . "$tmp/foreign"
    check 'no writable data'                  none ' [BbCDdGgSs] ' "$tmp/i.nm"
    check 'MIXPREC_STATIC leaves no external' none ' [A-TVWX] ' "$tmp/s.nm"
    check 'MIXPREC_STATIC: no writable data'  none ' [BbCDdGgSs] ' "$tmp/s.nm"
    check 'no printing, no exit'              none ' U (printf|vprintf|puts|putchar|stdout|stderr|perror|exit|_exit|abort|__assert_fail)$' "$tmp/i.nm"
    # The companion, as the tests' simulation of CUDA has it: inline functions of others are weak.
    if [ -f "${BUILD:-build}/cudasim_plain.o" ]; then
        nm "${BUILD:-build}/cudasim_plain.o" | grep ' [TDBRSGC] ' | grep -v '[0-9]inside_' >"$tmp/c.nm"
        check 'the companion shows mixp_cuda'     some ' T mixp_cuda$' "$tmp/c.nm"
        check 'and nothing else'                  [ "$(wc -l <"$tmp/c.nm")" -eq 1 ]
    else skip 'symbols of the companion (not built)'; fi
else
    skip 'symbols (no nm)'
fi

# --- size --------------------------------------------------------------------------------
# A program that only converts has the conversions of each instruction set, and no other kernel.
most_text() { compile -no-pie "$tmp/s.o" -lm -o "$tmp/only" && [ "$(size "$tmp/only" | awk 'NR == 2 { print $1 }')" -lt "$1" ]; }
if command -v size >/dev/null 2>&1; then
    check 'formats alone, with MIXPREC_STATIC: less than 80,000 bytes' most_text 80000
else
    skip 'size of formats alone (no size)'
fi

# The parts of the implementation, if make has built them by gcc 12 or later for x86-64 at -O2. Compiled in one piece
# the implementation is 90,000 bytes smaller: each part has a copy of what all sets share.
library=${BUILD:-build}/libmixprec.a
measured() {
    [ -f "${BUILD:-build}/mixprec_host.o" ] && command -v size >/dev/null 2>&1 && grep -q -- '-O2' "${BUILD:-build}/flags" &&
        echo 'x __GNUC__ __clang__ __x86_64__ __GNUC_MINOR__' | $CC -E -P - | grep -Eq '^x (1[2-9]|[2-9][0-9]) __clang__ 1 '
}
text_of() { size "$@" | awk 'NR > 1 { sum += $1 } END { print sum }'; }
if measured; then
    check 'the parts: less than 1,100,000 bytes' [ "$(text_of "$library")" -lt 1100000 ]
else
    skip 'size of the implementation (not gcc 12 at -O2 on x86-64, or not built)'
fi

# --- macros and pragmas ------------------------------------------------------------------
# new_macros SOURCE PRELUDE: the names SOURCE defines and PRELUDE alone does not.
new_macros() {
    compile -dM -E "$1" | sed 's/^#define \([A-Za-z0-9_]*\).*/\1/' | sort >"$tmp/with"
    compile -dM -E "$2" | sed 's/^#define \([A-Za-z0-9_]*\).*/\1/' | sort >"$tmp/without"
    comm -23 "$tmp/with" "$tmp/without"
}
# The system headers the library names, without the library.
{ echo '#include <omp.h>' | compile -E - >/dev/null 2>&1 && [ -n "$OPENMP" ] && echo '#include <omp.h>'
  uname -m | grep -q x86_64 && echo '#include <immintrin.h>'
  uname -m | grep -q aarch64 && echo '#include <arm_neon.h>'
  sed -n 's/^ *# *include *\(<[a-z/]*\.h>\).*/\1/p' mixprec.h | sort -u | grep -v -e immintrin -e arm_neon -e omp -e cuda -e windows -e '<io' -e direct |
      sed 's/.*/#include &/'
} >"$tmp/system.c"
echo '#include "mixprec.h"' >"$tmp/public.c"
cat "$tmp/system.c" "$tmp/public.c" >"$tmp/p.c"
cat "$tmp/system.c" "$tmp/i.c" >"$tmp/m.c"
new_macros "$tmp/p.c" "$tmp/system.c" >"$tmp/public"
new_macros "$tmp/m.c" "$tmp/system.c" >"$tmp/all"
check 'the header defines macros'                some '^MIXPREC_VERSION$' "$tmp/public"
# (MIXPI_: what other macros consist of, and constants that the companion shares)
grep -v -E '^MIXP(REC|I)?_' "$tmp/public" >"$tmp/foreign"
check 'macros of the API are MIXP, MIXPREC, MIXPI'  none . "$tmp/foreign"
grep -v -i -E '^MIXP(REC|I)?_' "$tmp/all" >"$tmp/foreign"
check 'those of the implementation MIXPI_ too'     none . "$tmp/foreign"
# (the define is undone, so that a later include in the same file is only the API)
check 'MIXPREC_IMPLEMENTATION is undone'         none '^MIXPREC_IMPLEMENTATION$' "$tmp/all"

# A pragma that changes warnings, targets or arithmetic stands between a push and its pop.
pragmas() {
    awk '/pragma/ && /push/ { depth++ }
         /pragma/ && /(ignored|disable|GCC (target|optimize)|STDC|float_control|fp_contract)/ && !depth { print; bad = 1 }
         /pragma/ && /pop/ { depth-- }
         END { exit bad || depth != 0 }' mixprec.h
}
check 'pragmas are popped'                       pragmas

# --- C++: what the API includes ----------------------------------------------------------
CXX=${CXX:-c++}
# The C++ library's <math.h> takes longer to compile than the API.
includes() { "$CXX" -std=c++17 -I. -E -x c++ "$tmp/public.c" >"$tmp/public.ii" && some '/string\.h"' "$tmp/public.ii"; }
if command -v "$CXX" >/dev/null 2>&1; then
    check 'the API as C++ includes system headers'   includes
    check 'and <math.h> is none of them'             none '/c?math(\.h)?"' "$tmp/public.ii"
else
    skip 'the API in C++ (no C++ compiler)'
fi

# --- C++: a region that would end at once ------------------------------------------------
unnamed() {
    printf '%s\n' '#include "mixprec.h"' 'void f(mixp_context *ctx) {' \
        '    { mixp_autocast_scope named(ctx, MIXP_F16); mixp_no_grad_scope too(ctx); }' \
        "    $1" '}' >"$tmp/unnamed.cpp"
    "$CXX" -std=c++17 -Wall -Wextra -Werror -I. -fsyntax-only "$tmp/unnamed.cpp" 2>"$tmp/unnamed.log"
}
warned() { ! unnamed "$1" && some nodiscard "$tmp/unnamed.log"; }
if printf '%s\n' 'struct s { [[nodiscard]] s(int) {} ~s() {} };' 'void f() { s(1); }' >"$tmp/knows.cpp" &&
    "$CXX" -std=c++17 -fsyntax-only "$tmp/knows.cpp" 2>&1 | grep -q nodiscard; then
    check 'regions with a name are quiet'            unnamed ''
    check 'a region without a name is warned of'     warned 'mixp_autocast_scope(ctx, MIXP_F16);'
    check 'one without gradients as well'            warned 'mixp_no_grad_scope{ctx};'
else
    skip 'C++ regions without a name (the compiler does not warn of them)'
fi

# --- what the file says about itself -----------------------------------------------------
banner='^\/\* ==== \([0-9]*\)\. .* >>\([a-z]*\) =*\( \*\/\)*$'
sed -n "s/$banner/\2/p" mixprec.h >"$tmp/banners"
sed -n "s/$banner/\1/p" mixprec.h >"$tmp/numbers"
sed -n '/CONTENTS/,/\*\//s/.*>>\([a-z]*\).*/\1/p' mixprec.h >"$tmp/contents"
same() { diff "$1" "$2"; }
in_order() { seq "$(wc -l <"$tmp/numbers")" | diff - "$tmp/numbers"; }
once() { sort "$tmp/banners" | uniq -d >"$tmp/twice" && none . "$tmp/twice"; }
check 'the sections have banners'                [ "$(wc -l <"$tmp/banners")" -ge 11 ]
check 'each >>mark is on one banner'             once
check 'they are numbered in order'               in_order
check 'the contents list has the same marks'     same "$tmp/contents" "$tmp/banners"
check 'no line past 100 columns'                 none '.{101}' mixprec.h
check 'no tab, no space at the end of a line'    none "$(printf '\t')| \$" mixprec.h
grep -n -P '[^\x00-\x7F]' mixprec.h >"$tmp/foreign" 2>/dev/null
check 'plain ASCII'                              none . "$tmp/foreign"

# --- what it says of its operators -------------------------------------------------------
# Each id of mixp_op_id has a function, a place in the table at the head of OPERATORS, and PyTorch's name, unless
# PyTorch has no such function. DIRECTORY: with operators.h and pytorch_names.txt.
listed() {
    awk -v no_name=' relu_squared soft_cap swiglu swiglu_packed rope ' '
        FILENAME ~ /txt$/ {
            for (n = split($0, word, /[^a-z0-9_]+/); n; n--) if (word[n] ~ /^mixp_/) named[substr(word[n], 6)] = 1
            next
        }
        /class +inputs/ { table = 1 }
        /^ \*\// { table = 0 }
        table { for (n = split(substr($0, 4, 30), word, /[^a-z0-9_]+/); n; n--) shown[word[n]] = 1 }
        match($0, /mixp_[a-z0-9_]+\(/) { declared[substr($0, RSTART + 5, RLENGTH - 6)] = 1 }
        /typedef enum mixp_op_id/ { ids = 1 }
        /mixp_op_id;/ { ids = 0 }
        ids { for (n = split($0, word, /[^A-Z0-9_]+/); n; n--)
                  if (word[n] ~ /^MIXP_OP_/ && word[n] != "MIXP_OP_COUNT") all[tolower(substr(word[n], 9))] = 1 }
        END { for (op in all) {
                  count++
                  if (!(op in declared)) { print op ": no function in src/operators.h"; bad = 1 }
                  if (!(op in shown)) { print op ": not in the table of src/operators.h"; bad = 1 }
                  if (!(op in named) && !index(no_name, " " op " ")) { print op ": not in src/pytorch_names.txt"; bad = 1 }
              }
              exit bad || count < 90 }' "$1/pytorch_names.txt" "$1/operators.h"
}
check 'each operator is declared, listed and has its PyTorch name' listed src
# forgotten WHAT SED: the list without one place is refused.
forgotten() {
    mkdir -p "$tmp/ops" && sed "$2" src/operators.h >"$tmp/ops/operators.h" && sed "$2" src/pytorch_names.txt >"$tmp/ops/pytorch_names.txt" &&
        ! listed "$tmp/ops" >"$tmp/forgotten.log" && [ "$(cat "$tmp/forgotten.log")" = "erfinv: $1" ]
}
check 'a forgotten function is noticed'          forgotten 'no function in src/operators.h' '/mixp_erfinv(/d'
check 'a forgotten place in the table as well'   forgotten 'not in the table of src/operators.h' 's/ erfinv  / /'
check "a forgotten name of PyTorch's as well"    forgotten 'not in src/pytorch_names.txt' '/| mixp_erfinv |/d'

# Each operator has values that it did not compute itself: a formula in double in test_kernels.c, numbers recorded from
# PyTorch under its name, or a loop in double in a file of cases.
with_values() {
    for op in $(sed -n '/typedef enum mixp_op_id/,/mixp_op_id;/s/MIXP_OP_/\n&/gp' "$1" | sed -n 's/^MIXP_OP_\([A-Z0-9_]*\).*/\1/p'); do
        name=$(echo "$op" | tr 'A-Z' 'a-z')
        case $name in count) continue ;; argmax) name=argmin ;; esac
        grep -qE "case MIXP_UNARY_$op:|MIXP_BINARY_$op\)" tests/cpu/test_kernels.c ||
            grep -qE "\"!?$name(_[a-z0-9_]+)?\"" tests/reference/*.h || grep -q "mixp_$name(" tests/support/*_cases.h || { echo "$name has no values"; return 1; }
    done
}
check 'each operator has values of another source' with_values src/operators.h
sed 's/    MIXP_OP_COUNT/    MIXP_OP_ODD,\n&/' src/operators.h >"$tmp/odd.h"
check 'an operator without values is noticed'    eval '[ "$(with_values "$tmp/odd.h")" = "odd has no values" ]'

# Each function of operators.h that makes a tensor, and each field of its descriptions, is in the lists over which the tests
# of every operator run: by its name, or a loss by its id. Not random numbers, nor embedding_padded, whose tangent follows
# the padding row as PyTorch's does.
with_laws() {
    awk -v none=' uniform normal bernoulli embedding_padded count dropout grouped ' '
        FNR == NR || FILENAME ~ /any_batch/ { text = text $0 "\n"; next }
        match($0, /^MIXPREC_API mixp_tensor \*mixp_[a-z0-9_]+/) {
            name = substr($0, 31, RLENGTH - 30); functions++
            if (!index(none, " " name " ") && !index(text, "mixp_" name "(") && !index(text, "MIXP_OP_" toupper(name) ",")) {
                print name ": no row in tests/support/operators.h"; bad = 1 }
        }
        /^typedef struct mixp_[a-z]+_desc/ { desc = 1 }
        /^} mixp_[a-z]+_desc/ { desc = 0 }
        desc && match($0, /[a-z_]+;/) {
            name = substr($0, RSTART, RLENGTH - 1); fields++
            if (!index(none, " " name " ") && !index(text, "d." name " = ")) {
                print "field " name ": not set in tests/support/operators.h"; bad = 1 }
        }
        END { exit bad || functions < 90 || fields < 15 }' tests/support/operators.h tests/support/any_batch.h "$1"
}
check 'each function of tensors, and each field of its options, has its laws' with_laws src/operators.h
{ cat src/operators.h; echo 'MIXPREC_API mixp_tensor *mixp_lawless(mixp_context *ctx);'; } >"$tmp/lawless.h"
check 'a function without laws is noticed'       eval '! with_laws "$tmp/lawless.h"'

# --- what users may name has a test ---------------------------------------------------------
# Each public function is called by a test, each constant of a public enum is named by one (or a test runs up to its
# COUNT), and each field of a description or a report is used by one. Headers for authors of devices are left out, and
# what only a device knows: a state's number, and a step that an index out of range stopped.
without_comments() { for f in "$@"; do compile -fpreprocessed -dD -E -P "$f" 2>/dev/null; done; }
users="autocast checkpoint optimizer operators ranks recipe results scaler step tape tensors watch"
without_comments $(find tests -name '*.[ch]' -o -name '*.cpp' -path 'tests/*' | grep -v -e /bench/ -e /cuda/inside) |
    tr -cs 'A-Za-z0-9_' '\n' | sort -u >"$tmp/words"
without_comments $(for f in $users; do ls src/"$f"*.h; done) >"$tmp/users.h"
untested() {
    awk -v elsewhere=' MIXP_SKIP_STOPPED forgiven_at ' '
        function lost(name) { return !(name in named) && !index(elsewhere, " " name " ") }
        FNR == NR { named[$1] = 1; next }
        match($0, /MIXPREC_API .*mixp_[a-z0-9_]+\(/) { name = substr($0, 1, RSTART + RLENGTH - 2); sub(/.*[ *]/, "", name)
            functions++; if (lost(name)) { print name; bad = 1 } }
        /^typedef (enum|struct)/ { kind = $2; depth = 0; held = "" }
        kind == "enum" { held = held " " $0 }
        kind == "enum" && /} mixp_[a-z0-9_]+;/ {
            whole = 0; n = split(held, word, /[^A-Z0-9_a-z]+/)
            for (i = 1; i <= n; i++) if (word[i] ~ /^MIXP_.*_COUNT$/ && word[i] in named) whole = 1
            for (i = 1; i <= n; i++) if (word[i] ~ /^MIXP_[A-Z0-9_]+$/) { constants++
                if (!whole && lost(word[i])) { print word[i]; bad = 1 } }
            kind = "" }
        kind == "struct" && /^} / { kind = "" }
        kind == "struct" && /;/ { line = $0; gsub(/\[[^]]*\]/, "", line)
            if (match(line, /\(\*[a-z_0-9]+\)/)) { line = substr(line, RSTART + 2, RLENGTH - 3) ";" }
            n = split(line, word, /[,;]/)
            for (i = 1; i < n; i++) { sub(/.*[ *]/, "", word[i]); if (word[i] !~ /^[a-z_0-9]+$/) continue
                fields++; if (lost(word[i])) { print "field " word[i]; bad = 1 } } }
        END { exit bad || functions < 200 || constants < 100 || fields < 200 }' "$tmp/words" "$1"
}
check 'each public function, constant and field has a test' untested "$tmp/users.h"
{ cat "$tmp/users.h"; echo 'typedef enum mixp_odd { MIXP_ODD_ONE } mixp_odd;'; } >"$tmp/more.h"
check 'a constant without a test is noticed'     eval '[ "$(untested "$tmp/more.h")" = MIXP_ODD_ONE ]'

# test_every_optimizer.c tries each option of an optimizer and each schedule; lr, betas and eps are numbers that all have.
optimizer_laws() {
    for name in $(without_comments "$1" src/arithmetic.h |
                      sed -n '/^typedef struct mixp_optimizer_\(desc\|states\) {/,/^}/p; /^typedef enum mixp_schedule_kind/,/^}/p' |
                      grep -oE '[a-z_0-9]+ *[,;]|MIXP_SCHEDULE_[A-Z_]+' | tr -d ' ,;'); do
        case $name in lr | beta[12] | eps | kind | MIXP_SCHEDULE_CONSTANT | mixp_*) continue ;; esac
        grep -qE "(->|\.)$name\b|$name\b" tests/core/optimizers/test_every_optimizer.c || { echo "$name has no row"; return 1; }
    done
}
check 'each option of optimizers and each schedule has its laws' optimizer_laws src/optimizers.h
sed 's/^} mixp_optimizer_desc;/    double odd_one;\n&/' src/optimizers.h >"$tmp/odd.h"
check 'an option without laws is noticed'        eval '[ "$(optimizer_laws "$tmp/odd.h")" = "odd_one has no row" ]'

part() { awk -v name="MIXPREC_VERSION_$1" '$1 == "#define" && $2 == name { print $3 }' mixprec.h; }
version=$(awk -F '"' '/^#define MIXPREC_VERSION "/ { print $2 }' mixprec.h)
newest=$(sed -n 's/^## \[\([0-9][0-9.]*\)\].*/\1/p' CHANGELOG.md | head -n 1)
check "version $version is its three parts"      [ "$version" = "$(part MAJOR).$(part MINOR).$(part PATCH)" ]
check "version $version is CHANGELOG's newest"   [ "$version" = "$newest" ]
report
