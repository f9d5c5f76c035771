/* test_everyday_recipes.c - everyday programs (tests/programs) under each recipe below 16 bits.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * A program learns what it learns in bf16; codes keep the bits, and so does a guard where nothing falls
 * back; a resumed run and two ranks have the bits of a plain run. Sizes are multiples of 32, so that most
 * linears fit; long_everyday_blocks.c has those of fp8 in blocks. make test takes one recipe for
 * every third program, make test-long all. MIXPREC_EVERYDAY=mlp runs one program.
 */
#define _POSIX_C_SOURCE 200809L
#ifndef PROGRAMS_UNIT           /* long_everyday_blocks.c defines its own                          */
#  define PROGRAMS_UNIT 32
#  define RECIPES { MIXP_RECIPE_FP8_CURRENT, MIXP_RECIPE_FP8_DELAYED, MIXP_RECIPE_MXFP8, MIXP_RECIPE_NVFP4 }
#  define RECIPE_STEPS 0        /* the program's own number                                        */
#endif
#include "programs/matrix.h"

static const int recipes[] = RECIPES;
enum { N_RECIPES = sizeof recipes / sizeof *recipes };

static mode recipe_mode(int kind) {
    mode how = mode_of(MIXP_BF16, 1 + kind % 2, 0, 0);
    how.recipe = kind;
    how.steps = RECIPE_STEPS;
    return how;
}

/* Delayed scaling begins with the scale 1, which clips the stream of `deep` in its first steps; Adam's
 * second moments remember those gradients. */
static int starts_clipped(const program *p, const mode *how)
{ return how->recipe == MIXP_RECIPE_FP8_DELAYED && strcmp(p->name, "deep") == 0; }

/* What bf16 learns, within a quarter of the way. */
static int hold_learning(const program *p, const mode *how, const outcome *o, const outcome *bf16,
                         yardstick y) {
    int broken = 0;
    LAW(LEARNS, how->steps || starts_clipped(p, how) || o->score <= bf16->score + 0.25 * fabs(y.first - y.f32),
        "ends at %.4g, bf16 at %.4g, f32 at %.4g from %.4g", o->score, bf16->score, y.f32, y.first);
    return broken;
}

static int hold_guard(const program *p, mode *how, const outcome *plain, const outcome *bf16,
                      yardstick y) {
    static outcome guarded;
    int            broken = 0;
    how->guard = 1;
    run(p, how, &guarded);
    LAW(ERROR, guarded.error == plain->error, "ends with: %s", guarded.why);
    LAW(BITS, guarded.falls || same_bits(&guarded, plain),
        "nothing falls back, and they differ from those without a guard");
    broken += hold_learning(p, how, &guarded, bf16, y);
    how->guard = 0;
    return broken;
}

static int hold_codes(const program *p, mode *how, const outcome *plain) {
    static outcome coded;
    int            broken = 0;
    how->codes = 1;
    run(p, how, &coded);
    LAW(CODES, coded.error == plain->error, "ends with: %s", coded.why);
    LAW(CODES, same_bits(&coded, plain), "other bits than without codes");
    how->codes = 0;
    return broken;
}

static int hold_recipe(const program *p, mode *how, yardstick y, const outcome *bf16) {
    static outcome plain;
    int            broken = 0;
    run(p, how, &plain);
    LAW(ERROR, plain.error == MIXP_OK, "ends with: %s", plain.why);
    LAW(UNTOUCHED, !plain.touched, "%d skipped steps have changed weights or buffers", plain.touched);
    LAW(FINITE, !plain.bad_buffers, "buffers are not finite after %d steps", plain.bad_buffers);
    broken += hold_learning(p, how, &plain, bf16, y) + hold_codes(p, how, &plain) +
              hold_guard(p, how, &plain, bf16, y);
    how->codes = how->recipe % 2;
    broken += hold_resume(p, how, how->steps ? how->steps / 2 : 10 + 7 * how->recipe);
    how->cut = 0;
    return broken + hold_ranks(p, how);
}

/* Quick: one recipe for every third program. */
static void every_program_in_every_recipe(void) {
    static outcome bf16;
    const int      quick = getenv("MIXPREC_TEST_QUICK") != NULL, step = quick ? N_RECIPES : 1;
    for (int i = 0; i < program_count; i += quick ? 3 : 1) {
        const program *p = &programs[i];
        const mode     how = mode_of(MIXP_BF16, 1, 0, 0);
        if (!asked_for(p)) continue;
        if (!RECIPE_STEPS) run(p, &how, &bf16);
        for (int k = i % step; k < N_RECIPES; k += step) {
            mode mine = recipe_mode(recipes[k]);
            hold_recipe(p, &mine, RECIPE_STEPS ? (yardstick){ 0, 0, 0 } : known_yardstick(p, 0), &bf16);
        }
    }
}

int main(void) {
    programs_make();
    RUN(every_program_in_every_recipe);
    return everyday_report();
}
