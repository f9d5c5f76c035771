/* test_everyday.c - everyday programs (tests/programs) in a few modes: a guard never makes a run
 * worse. Quick: each program in two of four modes. In make test: each in one; every third program is
 * resumed, and run with ranks.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * tests/programs/long_everyday.c runs all modes. MIXPREC_EVERYDAY=mlp runs one program.
 */
#define _POSIX_C_SOURCE 200809L
#include "programs/matrix.h"

static const mode quick_modes[] = {
    /* dtype  level guard retry evaluate parts rule */
    { MIXP_F16, 1, 1, 0, 7, 0, 0, 0, 0, 0, 0, 0 },
    { MIXP_F16, 2, 2, 1, 0, 0, 1, 0, 0, 0, 0, 0 },
    { MIXP_BF16, 1, 1, 0, 7, 3, 0, 0, 0, 0, 0, 0 },
    { MIXP_F16, 3, 1, 1, 7, 0, 2, 0, 0, 0, 0, 0 },
};

static void guards_never_make_worse(void) {
    const int quick = getenv("MIXPREC_TEST_QUICK") != NULL;
    for (int i = 0; i < program_count; i++) {
        if (!asked_for(&programs[i])) continue;
        for (size_t k = 0; k < sizeof quick_modes / sizeof quick_modes[0]; k++)
            if (!quick || (i + (int)k) % (test_later() ? 4 : 2) == 0) hold_pair(&programs[i], &quick_modes[k]);
    }
}

static void resumed_runs_have_the_same_bits(void) {
    for (int i = 0; i < program_count; i += test_later() ? 3 : 1) {
        mode how = quick_modes[i % 4];
        if (asked_for(&programs[i])) hold_resume(&programs[i], &how, 10 + 3 * i % 25);
    }
}

static void ranks_have_the_same_bits(void) {
    for (int i = 0; i < program_count; i += test_later() ? 3 : 1) {
        mode how = mode_of(i % 5 ? MIXP_F16 : MIXP_BF16, 1 + i % 3, i % 2, 1);
        how.evaluate = i % 3 ? 0 : 7;
        if (asked_for(&programs[i])) hold_ranks(&programs[i], &how);
    }
}

/* A few steps of a program. Fills t with what its sites' gradients are, if it has a guard. Returns
 * whether the context has warned. */
static int warns(const program *p, mode how, truths *t) {
    session *s = session_open(p, &how, NULL, NULL);
    memset(t, 0, sizeof *t);
    for (int step = 0; step < 8; step++) {
        walks(s, p, step % turns_of(p), step, 0, 1, 1);
        truths_take(t, s->ctx);
    }
    CHECK_INT(mixp_context_error(s->ctx, NULL), MIXP_OK);
    int warned = *mixp_context_warning(s->ctx) != 0;
    session_close(s);
    return warned;
}

/* The largest share of a gradient that f16 would flush, where that matters, in f32. */
static double flushed_in_f32(const program *p) {
    mode   how = mode_of(MIXP_F32, 0, UNSCALED, 3);
    truths t;
    double most = 0;
    warns(p, how, &t);
    for (int i = 0; i < t.n; i++)
        if (t.site[i].grad < 1.1 * 16 * (double)MIXP_F16_MIN) most = worse(most, t.site[i].grad_flushed);
    return most;
}

/* A warning of gradients that f16 flushes is true in f32, and a scaler leaves no reason for one. */
static void warnings_are_true(void) {
    truths t;
    int    all = 0;
    for (int i = 0; i < program_count; i++) {
        const program *p = &programs[i];
        if (!asked_for(p)) continue;
        for (int level = 1; level <= 2; level++) {
            int warned = warns(p, mode_of(MIXP_F16, level, UNSCALED, 0), &t);
            CHECK(!warned || flushed_in_f32(p) > 0.05);
            CHECK(!warns(p, mode_of(MIXP_F16, level, 0, 0), &t));
            CHECK(!warns(p, mode_of(MIXP_BF16, level, UNSCALED, 0), &t));
            all += warned;
        }
    }
    CHECK(all > 0 || getenv("MIXPREC_EVERYDAY"));
}

int main(void) {
    programs_make();
    RUN(guards_never_make_worse);
    RUN(resumed_runs_have_the_same_bits);
    RUN(ranks_have_the_same_bits);
    RUN(warnings_are_true);
    return everyday_report();
}
