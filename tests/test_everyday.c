/* test_everyday.c - everyday programs (tests/programs) in a few modes: a guard never makes a run
 * worse.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * tests/long_everyday.c runs all modes. MIXPREC_EVERYDAY=mlp runs one program.
 */
#define _POSIX_C_SOURCE 200809L
#include "programs/matrix.h"

static const mode quick_modes[] = {
    /* dtype  level guard retry evaluate parts rule */
    { MIXP_F16, 1, 1, 0, 7, 0, 0, 0, 0 },
    { MIXP_F16, 2, 2, 1, 0, 0, 1, 0, 0 },
    { MIXP_BF16, 1, 1, 0, 7, 3, 0, 0, 0 },
    { MIXP_F16, 3, 1, 1, 7, 0, 2, 0, 0 },
};

static void guards_never_make_worse(void) {
    for (int i = 0; i < PROGRAMS; i++) {
        if (!asked_for(&programs[i])) continue;
        for (size_t k = 0; k < sizeof quick_modes / sizeof quick_modes[0]; k++)
            hold_pair(&programs[i], &quick_modes[k]);
    }
}

static void resumed_runs_have_the_same_bits(void) {
    for (int i = 0; i < PROGRAMS; i++) {
        mode how = quick_modes[i % 4];
        if (asked_for(&programs[i])) hold_resume(&programs[i], &how, 10 + 3 * i % 25);
    }
}

static void ranks_have_the_same_bits(void) {
    for (int i = 0; i < PROGRAMS; i++) {
        mode how = mode_of(i % 5 ? MIXP_F16 : MIXP_BF16, 1 + i % 3, i % 2, 1);
        how.evaluate = i % 3 ? 0 : 7;
        if (asked_for(&programs[i])) hold_ranks(&programs[i], &how);
    }
}

int main(void) {
    RUN(guards_never_make_worse);
    RUN(resumed_runs_have_the_same_bits);
    RUN(ranks_have_the_same_bits);
    return everyday_report();
}
