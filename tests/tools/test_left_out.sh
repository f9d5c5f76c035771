#!/bin/sh
# test_left_out.sh - builds that leave a room out, and one for size: each compiles without a warning, trains, refuses what it lacks by
# name, declares none of the room's functions, and contains none of the room's code.
# SPDX-License-Identifier: MIT OR Unlicense
. tests/support/check.sh
CC=${CC:-cc}
warn='-Wall -Wextra -Wpedantic -Wconversion -Wsign-conversion -Wshadow -Wundef -Wcast-qual -Wpointer-arith'
warn="$warn -Wwrite-strings -Wcast-align -Wstrict-prototypes -Wmissing-prototypes -Werror"

# A weight of 3 times an input of 2: the gradient is 2, and a step of SGD with lr 0.25 leaves 2.5. The step writes 5 into a
# buffer. A second step, whose input is Inf, is skipped: the 9 that it writes does not stay.
cat >"$tmp/train.h" <<'END'
static int trained(void) {
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_optimizer_desc sgd = mixp_sgd_defaults();
    int64_t one = 1;
    float input[2] = { 2.0f, HUGE_VALF };
    mixp_tensor *w = mixp_param(ctx, "w", MIXP_F32, 1, &one), *x;
    mixp_tensor *b = mixp_buffer(ctx, "b", MIXP_F32, 1, &one);
    mixp_scaler *scaler = mixp_scaler_new(ctx, NULL);
    mixp_optimizer *opt;
    double now, state;
    int step;
    sgd.lr = 0.25;
    opt = mixp_optimizer_new(ctx, &sgd);
    mixp_fill(w, 3.0);
    mixp_optimizer_add(opt, w, NULL);
    mixp_buffer_set_ranks(b, MIXP_BUFFER_MEAN);
    for (step = 0; step < 2; step++) {
        mixp_step_begin(ctx);
        mixp_zero_grad(opt);
        x = mixp_input(ctx, MIXP_F32, 1, &one, &input[step]);
        mixp_backward(ctx, mixp_scaler_scale(scaler, mixp_mul(ctx, w, x)));
        mixp_fill(b, 5.0 + 4.0 * step);
        mixp_scaler_step(scaler, opt);
        mixp_scaler_update(scaler);
    }
    now = mixp_item(w);
    state = mixp_item(b);
    if (mixp_context_error(ctx, NULL) != MIXP_OK || now < 2.5 || now > 2.5) return 0;
    if (state < 5.0 || state > 5.0) return 0;
    mixp_context_free(ctx);
    return 1;
}
END

# build OPTION [FLAG]: compiles "$tmp/OPTION.c" with the option. Without vectors half the time is saved.
source_of() { printf '#define MIXPREC_IMPLEMENTATION\n#include "mixprec.h"\n#include "train.h"\n' | cat - "$tmp/$1.main" >"$tmp/$1.c"; }
build() {
    source_of "$1"
    # shellcheck disable=SC2086
    $CC -std=c99 -O0 $warn "-D$1" $2 -I. -I"$tmp" "$tmp/$1.c" -lm -o "$tmp/$1"
}
# calls OPTION CALL: does a file with the option still compile when it calls a function?
calls() {
    printf '#include "mixprec.h"\nvoid f(void);\nvoid f(void) { (void)%s; }\n' "$2" >"$tmp/call.c"
    $CC -std=c99 $1 -I. -fsyntax-only -Werror=implicit-function-declaration "$tmp/call.c" 2>"$tmp/call.log"
}
lacks() { calls '' "$2" && ! calls "-D$1" "$2" && grep -q "${2%%(*}" "$tmp/call.log"; }
# No function of the room's files is in the program.
gone() {
    sed -n 's/^\(static\|MIXPREC_API\) .*[ *]\(mixpi*_[a-z0-9_]*\)(.*/\2/p' src/$2/*.c | sort -u >"$tmp/of_room"
    [ "$(wc -l <"$tmp/of_room")" -gt 20 ] || return 1
    nm "$tmp/$1" >"$tmp/symbols" && grep -q mixp_backward "$tmp/symbols" || return 1
    awk '{ print $NF }' "$tmp/symbols" | sort -u | comm -12 - "$tmp/of_room" >"$tmp/there"
    cat "$tmp/there"
    [ ! -s "$tmp/there" ]
}
no_kernels() { ! nm "$tmp/$1" | grep -E ' mixpi_((quantise|hadamard|recode)_scalar|cpu_quantise)$'; }
opens() { nm "$tmp/$1" | grep -E ' U (open|fopen|rename|unlink)(64)?(@|$)'; }
opens_none() { ! opens "$1"; }

echo 'int main(void) { return !trained(); }' | tee "$tmp/MIXPREC_NO_WATCH.main" "$tmp/together.main" >"$tmp/MIXPREC_NO_CHECKPOINT.main"
cat >"$tmp/MIXPREC_NO_RANKS.main" <<'END'
int main(void) {
    const char *why = "";
    mixp_context_desc d;
    mixp_ranks_desc ranks;
    memset(&d, 0, sizeof d);
    memset(&ranks, 0, sizeof ranks);
    ranks.size = 1;
    d.ranks = &ranks;
    d.why = &why;
    return !trained() || mixp_context_new(&d) || !strstr(why, "MIXPREC_NO_RANKS");
}
END

cat >"$tmp/MIXPREC_NO_RECIPES.main" <<'END'
int main(void) {
    mixp_context *ctx = mixp_context_new(NULL);
    const char *why = "";
    mixp_autocast region;
    mixp_recipe recipe;
    memset(&region, 0, sizeof region);
    memset(&recipe, 0, sizeof recipe);
    region.dtype = MIXP_BF16;
    region.level = 1;
    region.recipe = &recipe;
    if (!trained() || mixp_autocast_open_with(ctx, &region) != 0) return 1;
    recipe.kind = MIXP_RECIPE_MXFP8;
    return mixp_autocast_open_with(ctx, &region) != -1 || mixp_context_error(ctx, &why) != MIXP_ERR_ARGUMENT ||
           !strstr(why, "compile without MIXPREC_NO_RECIPES");
}
END

each_alone() {
    check 'MIXPREC_NO_RANKS compiles'                           build MIXPREC_NO_RANKS
    check '  a step is as ever, and ranks are refused by name'  "$tmp/MIXPREC_NO_RANKS"
    for call in 'mixp_ranks_sum(0)' 'mixp_ranks_max(0)' 'mixp_ranks_check(0)' 'mixp_ranks_from(0, 0)' \
                'mixp_ranks_busy(0, 0)' 'mixp_ranks_hold(0, 0)'; do
        check "  ${call%%(*} is not declared"                   lacks MIXPREC_NO_RANKS "$call"
    done
    check '  no code of src/ranks is there'                     gone MIXPREC_NO_RANKS ranks
    check '  other builds open files'                           opens MIXPREC_NO_RANKS

    # clang alone takes MIXPREC_SMALL; its attribute must agree with those of the vector kernels. Optimised, as it is
    # used: tests/tools/compile_matrix.sh.
    if command -v clang >/dev/null; then
        cp "$tmp/MIXPREC_NO_WATCH.main" "$tmp/MIXPREC_SMALL.main"
        small() { (CC=clang && build MIXPREC_SMALL); }
        check 'MIXPREC_SMALL compiles with clang'               small
        check '  a step is as ever'                             "$tmp/MIXPREC_SMALL"
    else skip 'MIXPREC_SMALL (no clang)'; fi
    check 'MIXPREC_NO_WATCH compiles'                           build MIXPREC_NO_WATCH -DMIXPREC_NO_SIMD
    check '  a step is as ever'                                 "$tmp/MIXPREC_NO_WATCH"
    for call in 'mixp_guard_start(0, 0)' 'mixp_guard_stop(0)' 'mixp_retry(0, 0)' 'mixp_look_flushed(0, 0)' \
                'mixp_observe(0, 0, 0)'; do
        check "  ${call%%(*} is not declared"                   lacks MIXPREC_NO_WATCH "$call"
    done
    check '  no code of src/watch is there'                     gone MIXPREC_NO_WATCH watch

    check 'MIXPREC_NO_RECIPES compiles'                         build MIXPREC_NO_RECIPES -DMIXPREC_NO_SIMD
    check '  a step is as ever, and recipes are refused by name' "$tmp/MIXPREC_NO_RECIPES"
    for call in 'mixp_autocast_set_recipe(0, 0)' 'mixp_autocast_set_recipes(0, 0, 0)' 'mixp_autocast_recipe_counts(0)' \
                'mixp_recipe_name(MIXP_RECIPE_MXFP8)' 'mixp_quantise(0, 0, 0)'; do
        check "  ${call%%(*} is not declared"                   lacks MIXPREC_NO_RECIPES "$call"
    done
    check '  no code of src/recipes is there'                   gone MIXPREC_NO_RECIPES recipes
    check '  nor of the kernels'                                no_kernels MIXPREC_NO_RECIPES

    check 'MIXPREC_NO_CHECKPOINT compiles'                      build MIXPREC_NO_CHECKPOINT -DMIXPREC_NO_SIMD
    check '  a step is as ever'                                 "$tmp/MIXPREC_NO_CHECKPOINT"
    for call in 'mixp_checkpoint_save(0, 0)' 'mixp_checkpoint_load(0, 0)' 'mixp_checkpoint_load_weights(0, 0, 0)' \
                'mixp_checkpoint_save_weights(0, 0)' 'mixp_safetensors_count(0)'; do
        check "  ${call%%(*} is not declared"                   lacks MIXPREC_NO_CHECKPOINT "$call"
    done
    check '  no code of src/files is there'                     gone MIXPREC_NO_CHECKPOINT files
    check '  it opens no file'                                  opens_none MIXPREC_NO_CHECKPOINT
}
if [ -z "$MIXPREC_TEST_QUICK" ]; then each_alone
else skip 'MIXPREC_SMALL and each room left out alone: in make test-long'
fi

# All rooms left out at once.
together() {
    source_of together
    # shellcheck disable=SC2086
    $CC -std=c99 -O0 $warn -DMIXPREC_NO_RANKS -DMIXPREC_NO_WATCH -DMIXPREC_NO_CHECKPOINT -DMIXPREC_NO_RECIPES -DMIXPREC_NO_SIMD -I. -I"$tmp" \
        "$tmp/together.c" -lm -o "$tmp/together"
}
check 'all four compile'                                    together
check '  a step is as ever'                                 "$tmp/together"
for room in ranks watch files recipes; do
    check "  no code of src/$room is there"                 gone together "$room"
done

check '  it opens no file'                                  opens_none together
report
