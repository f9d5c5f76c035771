/* long_everyday.c - everyday programs (tests/programs) in every mode; prints a table of the
 * outcomes.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * MIXPREC_EVERYDAY=mlp runs one program. MIXPREC_EVERYDAY_TABLE=FILE writes the table to a file.
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
        how.parts = i / (12 * rules) % 2 ? 3 : 0;
        hold_pair(p, &how);
        how.guard = 3 - how.guard;
        if (how.parts == 0) hold_pair(p, &how);
    }
}

static void guards_never_make_worse(void) {
    for (int i = 0; i < program_count; i++) {
        if (!asked_for(&programs[i])) continue;
        all_modes(&programs[i], MIXP_F16);
        all_modes(&programs[i], MIXP_BF16);
    }
}

static void resumed_runs_have_the_same_bits(void) {
    for (int i = 0; i < program_count; i++)
        for (int k = 0; k < 8 && asked_for(&programs[i]); k++) {
            mode how = mode_of(k == 7 ? MIXP_BF16 : MIXP_F16, 1 + k % 3, k % RULES, k % 3);
            how.retry = k % 2;
            how.evaluate = k % 4 == 3 ? 7 : 0;
            for (int cut = 1 + k % 4; cut < 60; cut += 19) hold_resume(&programs[i], &how, cut);
        }
}

static void ranks_have_the_same_bits(void) {
    for (int i = 0; i < program_count; i++)
        for (int k = 0; k < 8 && asked_for(&programs[i]); k++) {
            mode how = mode_of(k == 7 ? MIXP_BF16 : MIXP_F16, 1 + k % 3, k % RULES, k % 3);
            how.retry = k % 2;
            how.evaluate = k > 3 ? 7 : 0;
            hold_ranks(&programs[i], &how);
        }
}

/* Rounding does no harm to a clean vision transformer: no site falls back for it. */
static void no_site_is_imprecise(const program *p, mode how, int steps) {
    session    *s = session_open(p, &how, NULL, NULL);
    mixp_event  e;
    char        text[420];
    int64_t     next = 0;
    for (int step = 0; step < steps; step++) {
        walks(s, p, 0, step, 0, 1, 1);
        for (int i = 0; mixp_guard_event(s->ctx, i, &e); i++) {
            if (e.number < next) continue;
            next = e.number + 1;
            CHECK(e.kind != MIXP_EVENT_IMPRECISE);
            if (e.kind == MIXP_EVENT_IMPRECISE) printf("  %s\n", mixp_event_text(&e, text, sizeof text));
        }
    }
    CHECK_INT(mixp_context_error(s->ctx, NULL), MIXP_OK);
    CHECK(mixp_optimizer_verdict(s->opt[0]).applied > steps - 20);
    session_close(s);
}

static void a_clean_vit_is_precise(void) {
    for (int i = 0; i < program_count; i++) {
        if (strcmp(programs[i].name, "vit") || !asked_for(&programs[i])) continue;
        for (int k = 0; k < 8; k++)     /* sampled in one step of 16, and in each step */
            no_site_is_imprecise(&programs[i], mode_of(k & 1 ? MIXP_BF16 : MIXP_F16, 1 + (k >> 1 & 1), 0,
                                                       k & 4 ? 3 : 1), 300);
    }
}

int main(void) {
    programs_make();
    RUN(guards_never_make_worse);
    RUN(resumed_runs_have_the_same_bits);
    RUN(ranks_have_the_same_bits);
    RUN(a_clean_vit_is_precise);
    table_print();
    return everyday_report();
}
