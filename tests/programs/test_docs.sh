#!/bin/sh
# test_docs.sh - the README, the pages of docs/ and the manual of mixprec.h do what they say:
#   - a program in C compiles without a warning, runs, and prints the output that is quoted below it;
#   - a fragment in C does so inside fragment.c;
#   - both compile as C++, and so does each example, unless its page says "C only";
#   - a block of shell runs, as a reader pastes it, in a folder like a fresh clone.
# A line of shell whose comment says `needs` (需要) or `minutes` is counted as skipped, and make only looks its
# targets up. Under MIXPREC_TEST_QUICK the compiler links the library that make built; in make test-long it
# compiles the commands word for word.
# Links lead somewhere, no example is left out, and the Chinese pages have the English programs and figures.
# SPDX-License-Identifier: MIT OR Unlicense
cd "$(dirname "$0")/../.." || exit 1
. tests/support/check.sh

here=$PWD
build=${BUILD:-build}
case $build in /*) ;; *) build=$here/$build ;; esac
library=$build/libmixprec.a
# By hand, without make's word for it: as the library was built.
[ -n "${OPENMP+set}" ] || ! grep -q -s -e -fopenmp "$build/flags" || OPENMP=-fopenmp
linked="-DMIXPREC_IMPLEMENTATION_DONE $library ${OPENMP-}"
[ -f "$library" ] || linked=
pages="README.md $(ls README.zh.md docs/*.md examples/README.md 2>/dev/null)"

# ---- the blocks of a page: NAME-n.c, NAME-n.sh; NAME-n.out is a block without a language that follows on
# "prints": what block n prints.
blocks() { # PAGE NAME
    awk -v base="$tmp/$2-" '
        /^```/ && open { open = 0; close(file); next }
        /^```/ { open = 1; lang = substr($0, 4); sub(/ .*/, "", lang); file = "/dev/null"
                 if ($0 ~ /C only/) { print >(base (n + 1) ".c_only") }
                 if (lang == "c" || lang == "sh") { file = base (++n) "." lang; said = 0 }
                 else if (lang == "" && said) { file = base n ".out"; said = 0 }
                 next }
        open { print >file; next }
        /prints|打印|输出/ { said = 1 }' "$1"
}
name_of() { echo "$1" | sed 's#docs/##; s#/#_#g; s#\.md$##'; }

compiles() { # PROGRAM FLAGS...: into $tmp/a.out
    program=$1; shift
    ${CC:-cc} -std=c99 -O0 -Wall -Wextra -Werror -I. -Iexamples "$@" "$program" $linked -o "$tmp/a.out" -lm
}
prints() { # BLOCK: what it prints is quoted, if the page quotes something
    (cd "$tmp" && ./a.out >"$tmp/got") && { [ ! -f "$1.out" ] || diff "$1.out" "$tmp/got"; }
}
program()  { compiles "$1.c" && prints "$1"; }
fragment() { compiles tests/programs/fragment.c -Wno-unused -DFRAGMENT="\"$1.c\"" && prints "$1"; }
# As C++: C++20 has the designated initialisers of these pages. The implementation is left out.
is_cpp() { # FILE FLAGS...
    [ "$CXX" ] || return 0
    file=$1; shift
    $CXX -x c++ -std=c++20 -fsyntax-only -Wall -Werror -Wno-unused -Wno-deprecated-enum-float-conversion \
        -DMIXPREC_IMPLEMENTATION_DONE -I. -Iexamples "$@" "$file"
}
is_gnu_cpp() { echo 'int main() { return 0; }' >"$tmp/probe.cpp" && $1 -x c++ -std=c++20 -fsyntax-only "$tmp/probe.cpp"; }
CXX=${CXX-c++}
is_gnu_cpp "$CXX" 2>/dev/null || { CXX=; skip 'the programs as C++ (no compiler for C++20)'; }
at_file_scope() { { echo '#include "mixprec.h"'; cat "$1.c"; } >"$tmp/scope.c" && compiles "$tmp/scope.c" -Wno-unused -c; }

# ---- a folder like a fresh clone, with programs that replace make, and in quick tests cc
clone=$tmp/clone
mkdir -p "$clone" "$tmp/bin"
for f in "$here"/*; do [ "$f" = "$here/build" ] || ln -s "$f" "$clone/"; done
ln -s "$build" "$clone/build"
cat >"$tmp/bin/make" <<END
#!/bin/sh
for target; do case \$target in build/*) [ -x "\$target" ] || exit 1 ;; esac; done
exec $(command -v ${MAKE:-make}) --no-print-directory -s -n OPENMP='${OPENMP-}' "\$@" >/dev/null
END
if [ -n "${MIXPREC_TEST_QUICK-}" ] && [ -n "$linked" ]; then quick="-O0 $linked -lm"; else quick=; fi
compiler=$(command -v ${CC:-cc} | head -n 1)     # not the cc below
printf '#!/bin/sh\nexec %s "$@" %s\n' "$compiler" "$quick" >"$tmp/bin/cc"
chmod +x "$tmp/bin/make" "$tmp/bin/cc"

# Lines that a test cannot run are left out, and counted. `sh -e` does not stop at a failure in a list of &&.
cannot_run='#.*(needs |minutes|hours|需要)'
shell() { # BLOCK
    awk -v no="$cannot_run" '$0 ~ no && !/^make / { next }
        { sub(/(^|[ \t]+)#.*/, ""); print $0 (/&&/ && !/\\$/ ? " || exit 1" : "") }' "$1.sh" >"$tmp/run.sh"
    (cd "$clone" && PATH=$tmp/bin:$PATH sh -e "$tmp/run.sh") >"$tmp/got" 2>&1 || { cat "$tmp/got"; return 1; }
    [ ! -f "$1.out" ] || diff "$1.out" "$tmp/got"
}

for page in $pages; do
    name=$(name_of "$page")
    blocks "$page" "$name"
    case ${MIXPREC_TEST_QUICK:+quick}$page in
    quickREADME.md) ;;
    quick*) skip "the programs of $page: in make test-long"; continue ;;
    esac
    for f in "$tmp/$name"-*.c; do
        [ -f "$f" ] || continue
        block=${f%.c} what="$page, block ${f#"$tmp/$name"-}"
        if grep -q 'int main(' "$f"; then check "$what" program "$block"; set -- "$f"
        elif grep -Eq '^(static|#include|#define|typedef)' "$f"; then
            check "$what" at_file_scope "$block"; set -- "$tmp/scope.c"
        else check "$what" fragment "$block"; set -- tests/programs/fragment.c "-DFRAGMENT=\"$f\""; fi
        case ${MIXPREC_TEST_QUICK:+quick}$page in
        quickREADME.md | [!q]*) [ -f "$block.c_only" ] || check "$what, as C++" is_cpp "$@" ;;
        esac
    done
    for f in "$tmp/$name"-*.sh; do
        [ -f "$f" ] || continue
        needed=$(grep -o '^build/[a-z_0-9/]*' "$f" | head -n 1)
        if [ -n "$needed" ] && [ ! -x "$clone/$needed" ]; then skip "$page: $needed is not built"; continue; fi
        check "$page, block ${f#"$tmp/$name"-}" shell "${f%.sh}"
        grep -E "$cannot_run" "$f" | grep -v '^make ' >"$tmp/left"
        while read -r line; do skip "$page: $line"; done <"$tmp/left"
    done
done

# ---- the examples as C++; examples/README.md names those that are C only
if [ -z "${MIXPREC_TEST_QUICK-}" ]; then
    for f in examples/*.c examples/*.cpp examples/amp/*.c; do
        if ! grep -q "C only.*](${f#examples/})" examples/README.md; then check "$f, as C++" is_cpp "$f"; fi
    done
    check 'examples/cpp.cpp runs' eval "$CXX -std=c++17 -O0 -I. -DMIXPREC_IMPLEMENTATION_DONE examples/cpp.cpp $library ${OPENMP-} -lm \
        -o $tmp/cpp && $tmp/cpp | grep -q '^caught: linear: x \[21, 3\]'"
fi

# ---- CMake's lines of the README, in a project beside this folder; tests/tools/test_cmake.sh builds those of docs/embedding.md
cmake_takes_it() {
    mkdir "$tmp/cmake" && ln -s "$here" "$tmp/cmake/mixprec" && echo 'int main(void) { return 0; }' >"$tmp/cmake/main.c"
    { printf 'cmake_minimum_required(VERSION 3.10)\nproject(readme C)\nadd_executable(my_program main.c)\n'
      awk '/^```cmake$/ { on = 1; next } /^```$/ { on = 0 } on' README.md; } >"$tmp/cmake/CMakeLists.txt"
    [ "$(wc -l <"$tmp/cmake/CMakeLists.txt")" -gt 3 ] && cmake -S "$tmp/cmake" -B "$tmp/cmake/build"
}
if command -v cmake >/dev/null 2>&1; then check "CMake takes the README's lines" cmake_takes_it
else skip "the README's lines for CMake (no cmake)"; fi

# ---- the manual of mixprec.h
manual_program() {
    awk '/A complete program/ { on = 1; next } /^ \* CONTENTS/ { exit }
         on { sub(/^ \*( {1,5})?/, ""); print }' mixprec.h >"$tmp/manual.c"
    compiles "$tmp/manual.c" && (cd "$tmp" && ./a.out) | grep -Eq '^w = (2\.9|3\.0)'
}
check 'the manual of mixprec.h' manual_program
# The loop of the page on recipes, with a model around it.
recipe_program() {
    {
        cat <<'END'
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include <stdio.h>
static mixp_context *ctx;
static mixp_tensor *w[2];
static mixp_tensor *batch(int step) {
    const int64_t shape[2] = { 32, 32 };
    static float x[32 * 32];
    for (int i = 0; i < 32 * 32; i++) x[i] = (float)((i * 37 + step) % 17 - 8) / 8.0f;
    return mixp_input(ctx, MIXP_F32, 2, shape, x);
}
static mixp_tensor *model(mixp_context *c, mixp_tensor *x)
{ return mixp_mse(c, mixp_linear(c, mixp_relu(c, mixp_linear(c, x, w[0], NULL)), w[1], NULL), x); }
int main(void) {
    const int64_t shape[2] = { 32, 32 };
    mixp_optimizer *opt;
    mixp_tensor *loss = NULL;
    int step;
    ctx = mixp_context_new(NULL);
    opt = mixp_optimizer_new(ctx, NULL);
    for (step = 0; step < 2; step++) {
        w[step] = mixp_param(ctx, step ? "h.1.w" : "h.0.w", MIXP_F32, 2, shape);
        mixp_init_normal(w[step], 0, 0.1);
        mixp_optimizer_add(opt, w[step], NULL);
    }
    {
END
        awk '/A training loop in NVFP4/ { on = 1; next } /Begin with FP8_CURRENT/ { exit }
             on { sub(/^ \*( {1,5})?/, ""); print }' mixprec.h
        cat <<'END'
    }
    {
        const mixp_recipe_counts n = mixp_autocast_recipe_counts(ctx);
        printf("%d quantised, %d kept, loss below 1: %d\n", (int)n.quantised, (int)n.kept, mixp_item(loss) < 1);
    }
    mixp_context_free(ctx);
    return 0;
}
END
    } >"$tmp/recipe.c"
    compiles "$tmp/recipe.c" && (cd "$tmp" && ./a.out) | grep -Eq '^[1-9][0-9]* quantised, [1-9][0-9]* kept, loss below 1: 1$'
}
check 'the page on recipes of mixprec.h' recipe_program

# ---- what pages say of other files
check 'README.md has at most 250 lines' [ "$(wc -l <README.md)" -le 250 ]

# Links to files of this project and to headings, which GitHub makes from their words.
anchors() { sed -n 's/^##* //p' "$1" | tr 'A-Z' 'a-z' | sed 's/[][`*_,.:;?!()/"'\''#]//g; s/ /-/g'; }
links_lead_somewhere() {
    for page in $pages CONTRIBUTING.md src/README.md tests/README.md examples/amp/README.md; do
        awk '/^```/ { on = !on } !on' "$page" | grep -o '](\([^)]*\))' | sed 's/^](//; s/)$//' | grep -v '^https*:' |
        while read -r link; do
            file=$(dirname "$page")/${link%%#*}
            case $link in '#'*) file=$page ;; esac
            [ -e "$file" ] || { echo "$page: $link"; continue; }
            case $link in *'#'*) anchors "$file" | grep -Fqx "${link#*#}" || echo "$page: $link: no such heading" ;; esac
        done
    done >"$tmp/broken"
    cat "$tmp/broken"
    [ ! -s "$tmp/broken" ]
}
check 'every link leads somewhere' links_lead_somewhere

every_example() {
    for f in examples/*; do
        f=${f#examples/}
        grep -q "[(\`]$f" examples/README.md || grep -q "]([./a-z]*$f" examples/README.md || echo "examples/README.md does not name $f"
    done | grep -v 'name README.md' >"$tmp/left"
    cat "$tmp/left"
    [ ! -s "$tmp/left" ]
}
check 'examples/README.md names every example' every_example

names_table() { awk -f src/names.awk mixprec.h src/pytorch_names.txt docs/pytorch.md | diff - docs/pytorch.md; }
check 'docs/pytorch.md has the names of src/pytorch_names.txt (make pack)' names_table

# The Chinese pages have the programs of the English ones, but for comments, and the figures of their tables. The guide
# has all of them, README.zh.md the first screens.
code_of()    { for f in "$tmp/$1"-*.c; do [ -f "$f" ] && sed 's#/\*.*\*/##; s/ *$//' "$f"; done; }
figures_of() { grep '^|' "$1" | grep -o '[0-9][0-9.,]*[0-9]' | sort | uniq; }
twin() { # ENGLISH CHINESE: into $tmp/en and $tmp/zh
    { code_of "$(name_of "$1")"; figures_of "$1"; } >"$tmp/en"
    { code_of "$(name_of "$2")"; figures_of "$2"; } >"$tmp/zh"
}
same_guide()    { twin docs/guide.md docs/guide.zh.md && diff "$tmp/en" "$tmp/zh"; }
part_of_readme() { twin README.md README.zh.md && ! grep -vxFf "$tmp/en" "$tmp/zh"; }
check 'docs/guide.zh.md has the programs and figures of docs/guide.md' same_guide
check 'README.zh.md has no program or figure but those of README.md'   part_of_readme
report
