/* long_everyday.c - everyday programs (tests/programs) in every mode; prints a table of the
 * outcomes.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * MIXPREC_EVERYDAY=mlp runs one program.
 */
#define _POSIX_C_SOURCE 200809L
#include "programs/matrix.h"

/* Level x rule x retry x evaluations x micro-batches of one program and dtype, each with two guards. bf16
 * needs no loss scale: it has one rule. */
static void all_modes(const program *p, mixp_dtype dtype) {
    const int rules = dtype == MIXP_F16 ? RULES : 1;
    for (int i = 0; i < 3 * rules * 8; i++) {
        mode how = mode_of(dtype, 1 + i % 3, i / 3 % rules, 1 + i / 2 % 2);
        how.retry = i / (3 * rules) % 2;
        how.evaluate = i / (6 * rules) % 2 ? 7 : 0;
        how.parts = i / (12 * rules) % 2 && !p->state ? 3 : 0;
        hold_pair(p, &how);
        how.guard = 3 - how.guard;
        if (how.parts == 0) hold_pair(p, &how);
    }
}

static void guards_never_make_worse(void) {
    for (int i = 0; i < PROGRAMS; i++) {
        if (!asked_for(&programs[i])) continue;
        all_modes(&programs[i], MIXP_F16);
        all_modes(&programs[i], MIXP_BF16);
    }
}

static void resumed_runs_have_the_same_bits(void) {
    for (int i = 0; i < PROGRAMS; i++)
        for (int k = 0; k < 8 && asked_for(&programs[i]); k++) {
            mode how = mode_of(k == 7 ? MIXP_BF16 : MIXP_F16, 1 + k % 3, k % RULES, k % 3);
            how.retry = k % 2;
            how.evaluate = k % 4 == 3 ? 7 : 0;
            for (int cut = 1 + k % 4; cut < 60; cut += 19) hold_resume(&programs[i], &how, cut);
        }
}

static void ranks_have_the_same_bits(void) {
    for (int i = 0; i < PROGRAMS; i++)
        for (int k = 0; k < 8 && asked_for(&programs[i]); k++) {
            mode how = mode_of(k == 7 ? MIXP_BF16 : MIXP_F16, 1 + k % 3, k % RULES, k % 3);
            how.retry = k % 2;
            how.evaluate = k > 3 ? 7 : 0;
            hold_ranks(&programs[i], &how);
        }
}

int main(void) {
    RUN(guards_never_make_worse);
    RUN(resumed_runs_have_the_same_bits);
    RUN(ranks_have_the_same_bits);
    table_print();
    return everyday_report();
}
