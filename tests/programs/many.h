/* many.h - an everyday program on two ranks, which are processes, and what both must agree on.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#ifndef PROGRAMS_MANY_H
#define PROGRAMS_MANY_H
#include "../../examples/ddp_fork.c"
#include "laws.h"
#include "leave.h"

/* What the ranks have to tell, in memory that both see. */
static outcome *shared_outcomes(void) {
    int   zero = open("/dev/zero", O_RDWR);
    if (zero < 0) return NULL;
    void *at = mmap(NULL, 2 * sizeof(outcome), PROT_READ | PROT_WRITE, MAP_SHARED, zero, 0);
    close(zero);
    return at == MAP_FAILED ? NULL : (outcome *)at;
}

/* The parts [first, last) of each step, on one rank of many or on the only one. Rank 0 alone evaluates. */
static void run_rank(const program *p, const mode *how, const mixp_ranks_desc *ranks, int first,
                     int last, outcome *o) {
    static float before[BLOCK];
    session     *s = session_open(p, how, NULL, ranks);
    mixp_verdict verdict;
    memset(o, 0, sizeof *o);
    s->apart = last - first > 1;
    for (int step = 0; step < steps_of(p, how); step++) {
        for (int turn = 0; turn < turns_of(p); turn++) {
            do {
                state_read(s, before);
                walks(s, p, turn, step, first, last, 1);
                verdict = mixp_scaler_verdict(scaler_at(s, p, turn));
                note_state(o, s, before, verdict.outcome == MIXP_STEP_SKIPPED);
            } while (how->retry && mixp_retry(scaler_at(s, p, turn), 3));
            if (p->after) p->after(s, turn);
        }
        if (how->evaluate && !first && step % how->evaluate == how->evaluate - 1)
            evaluate(s, p, o, step);
        if (mixp_context_error(s->ctx, NULL) != MIXP_OK) break;
    }
    events_take(o, s, NULL, 0);
    outcome_take(o, s, p, 0);
    session_close(s);
}

static void run_two(const program *p, const mode *how, outcome *both) {
    mixp_ranks_desc ranks = ddp_fork(2);
    ranks.seconds = 60;
    run_rank(p, how, &ranks, ranks.rank, ranks.rank + 1, &both[ranks.rank]);
    if (ranks.rank) leave(0);
    ddp_wait(0);
    munmap(ddp_board, sizeof *ddp_board + 2 * DDP_CHUNK);
}

/* One rank with the parts of two, added as those of two are. */
static void run_apart(const program *p, const mode *how, outcome *o) {
    mixp_ranks_desc alone;
    memset(&alone, 0, sizeof alone);
    alone.size = 1;
    alone.parts = 2;
    alone.apart = 1;
    alone.sum = ddp_sum;
    run_rank(p, how, &alone, 0, 2, o);
}

static int hold_ranks(const program *p, const mode *how) {
    static outcome *both, one;
    int             broken = 0;
    if (!both) both = shared_outcomes();
    if (!both) return 0;
    run_two(p, how, both);
    for (int r = 0; r < 2; r++)
        LAW(RANKS, both[r].error == (how->guard ? MIXP_OK : both[0].error), "rank %d ends with: %s", r, both[r].why);
    LAW(RANKS, both[0].bits == both[1].bits && both[0].shared == both[1].shared,
        "the ranks end with other bits");
    LAW(UNTOUCHED, !both[0].touched && !both[1].touched,
        "%d and %d skipped steps of the ranks have changed weights or buffers", both[0].touched,
        both[1].touched);
    if (p->mixes || how->evaluate) return broken;
    run_apart(p, how, &one);
    LAW(PARTS, (how->rule == 2 && how->guard) || (one.bits == both[0].bits && one.error == both[0].error),
        "%lld steps applied by two ranks, %lld by one with their parts: other bits",
        (long long)both[0].applied[0], (long long)one.applied[0]);
    return broken;
}
#endif
