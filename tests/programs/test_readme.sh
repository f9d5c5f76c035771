#!/bin/sh
# test_readme.sh - every C program in the README, and the one in the header's manual, compiles
# without a warning, runs, and prints the quoted output. The first program compiles its own copy of
# the library, as in the README. The others are linked with the library that make built, if there is
# one.
# SPDX-License-Identifier: MIT OR Unlicense
cd "$(dirname "$0")/../.." || exit 1
. tests/support/check.sh

library=${BUILD:-build}/libmixprec.a
# By hand, without make's word for it: as the library was built.
[ -n "${OPENMP+set}" ] || ! grep -q -s -e -fopenmp "${BUILD:-build}/flags" || OPENMP=-fopenmp
linked="-DMIXPREC_IMPLEMENTATION_DONE $library ${OPENMP-}"
[ -f "$library" ] || linked=

runs() { # NAME PATTERN: $tmp/NAME.c builds, and a line of its output matches
    with=$linked; [ "$1" = readme1 ] && with=
    ${CC:-cc} -std=c99 -O0 -Wall -Wextra -Werror -I. "$tmp/$1.c" $with -o "$tmp/$1" -lm &&
        "$tmp/$1" >"$tmp/$1.out" 2>&1 && cat "$tmp/$1.out" && grep -Eq "$2" "$tmp/$1.out"
}

awk -v dir="$tmp" '/^```c$/ { n++; on = 1; next } /^```$/ { on = 0 } on { print > (dir "/readme" n ".c") }' README.md
awk '/A complete program/ { on = 1; next } /^ \* CONTENTS/ { exit }
     on { sub(/^ \*( {1,5})?/, ""); print }' mixprec.h >"$tmp/manual.c"

# What it prints is in the README, too: each line of it.
prints_what_it_says() {
    runs readme1 '^loss ' >/dev/null && awk '/^```/ { open = !open; on = open && $0 == "```"; next } on && /^(step|loss) /' README.md >"$tmp/said" &&
        test -s "$tmp/said" && diff "$tmp/said" "$tmp/readme1.out"
}
check 'README, the whole loop' prints_what_it_says
check 'README, your own gradients' runs readme2 '^w\[0\] = (0\.9|1\.0)'
# The third is a piece of one, for a GPU: here on a machine that has none.
{ printf '#define MIXPREC_IMPLEMENTATION\n#include "mixprec.h"\n#include <stdio.h>\n'
  echo 'const mixp_device *mixp_cuda(int ordinal, const char **why)'
  echo '{ (void)ordinal; *why = "none here"; return NULL; }'
  echo 'int main(void) {'; cat "$tmp/readme3.c"; echo 'mixp_context_free(ctx); return 0; }'; } >"$tmp/gpu.c"
check 'README, on a GPU' runs gpu '^no GPU: none here$'
check 'README, no program is untested' test ! -f "$tmp/readme4.c"
check 'the manual of mixprec.h' runs manual '^w = (2\.9|3\.0)'
# The loop of the page on recipes, with a model around it.
{ cat <<'END'
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
        w[step] = mixp_param(ctx, step ? "w1" : "w0", MIXP_F32, 2, shape);
        mixp_init_normal(w[step], 0, 0.1);
        mixp_optimizer_add(opt, w[step], NULL);
    }
    {
END
  awk '/A training loop in NVFP4/ { on = 1; next } /Begin with FP8_CURRENT/ { exit } on { sub(/^ \*( {1,5})?/, ""); print }' mixprec.h
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
check 'the page on recipes of mixprec.h' runs recipe '^[1-9][0-9]* quantised, [1-9][0-9]* kept, loss below 1: 1$'
report
