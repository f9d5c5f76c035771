/* test_cuda_everyday.cpp - everyday programs on the simulated GPU: graphs replay their steps.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * A twin runs its steps one by one. Both end with the same bits without a guard, and with a guard
 * if no site falls back. A step runs eagerly if the guard is to look, and is captured again if a
 * site has changed the dtype that it stores.
 */
#include "companion.h"
#include <unistd.h>
#include "programs/laws.h"
#include "gpu_context.h"

enum { STEPS = 8 };

static void fine(const session *s, const char *name) {
    const char *why;
    if (mixp_context_error(s->ctx, &why) == MIXP_OK) return;
    test_bad++;
    TEST_SHOW("%s: %s", name, why);
}

/* The loss that training would have on the batch of a step. */
static double loss_after(session *s, const program *p, int turn, int step) {
    double loss = 0;
    mixp_eval_begin(s->ctx);
    fill_batch(s, p, step, 0);
    MIXP_NO_GRAD(s->ctx) loss = mixp_item(forward(s, p, turn, 1));
    return loss;
}

/* What is behind a step: the program's own writes, and without a guard a loss between two steps. */
static void behind(session *s, const program *p, int turn, int step, double *seen) {
    if (p->after) p->after(s, turn);
    if (!s->how.guard && step % 2 == 0) *seen += loss_after(s, p, turn, step);
}

/* Steps one by one, or replays, as the guard allows. Returns how many were replayed. */
static int replay(session *s, const program *p, double *seen) {
    mixp_graph  *graph[TURNS] = { NULL, NULL };
    int          played = 0;
    for (int step = 0; step < STEPS; step++)
        for (int turn = 0; turn < turns_of(p); turn++) {
            if (step < 3 || mixp_guard_due(s->ctx)) {
                walks(s, p, turn, step, 0, 1, 1);
            } else {
                fill_batch(s, p, step, 0);
                s->filled = 1;
                if (graph[turn] && mixp_graph_stale(graph[turn])) {
                    mixp_graph_free(graph[turn]);
                    graph[turn] = NULL;
                }
                if (!graph[turn] && mixp_capture_begin(s->ctx) == MIXP_OK) {
                    walks(s, p, turn, step, 0, 1, 1);
                    graph[turn] = mixp_capture_end(s->ctx);
                }
                s->filled = 0;
                played += mixp_replay(graph[turn]) == MIXP_OK;
            }
            behind(s, p, turn, step, seen);
        }
    fine(s, p->name);
    return played;
}

static void twins(const program *p, const mode *how) {
    static outcome a, b;
    session       *one = session_open(p, how, gpu(), NULL), *two = session_open(p, how, gpu(), NULL);
    double         seen[2] = { 0, 0 };
    int            played = replay(two, p, &seen[1]), broken = 0;
    for (int step = 0; step < STEPS; step++)
        for (int turn = 0; turn < turns_of(p); turn++) {
            walks(one, p, turn, step, 0, 1, 1);
            behind(one, p, turn, step, &seen[0]);
        }
    fine(one, p->name);
    memset(&a, 0, sizeof a);
    memset(&b, 0, sizeof b);
    outcome_take(&a, one, p, 0);
    outcome_take(&b, two, p, 0);
    events_take(&a, one, NULL, 0);
    LAW(REPLAY, a.falls || same_bits(&a, &b), "%d of %d steps replayed: other bits than one by one",
        played, STEPS * turns_of(p));
    LAW(REPLAY, memcmp(&seen[0], &seen[1], sizeof seen[0]) == 0,
        "losses between the steps are %.17g, between replays %.17g", seen[0], seen[1]);
    if (!how->guard) CHECK(played == (STEPS - 3) * turns_of(p));
    session_close(one);
    session_close(two);
}

/* Quick: every seventh, and those that carry a state (make test: every 21st, and each third of those); of the wide
 * programs of test_cuda_everyday_recipes.cpp every tenth. MIXPREC_EVERYDAY=mlp runs one program. */
static int is_due(int i) {
    const char *only = getenv("MIXPREC_EVERYDAY");
    if (only && *only) return strcmp(only, programs[i].name) == 0;
    if (!getenv("MIXPREC_TEST_QUICK")) return 1;
    if (test_later()) return i % 21 == 0 || (programs[i].carry && i % 3 == 0);
    return PROGRAMS_UNIT > 1 ? i % 10 == 0 : i % 7 == 0 || programs[i].carry;
}

static void graphs_replay_every_program(void) {
    for (int i = 0; i < program_count; i++) {
        mode how = mode_of(i % 4 == 3 ? MIXP_BF16 : MIXP_F16, 1 + i % 2, i % 3 == 0, i % 3);
        how.parts = 1;
        if (PROGRAMS_UNIT > 1) {
            how.dtype = MIXP_BF16;
            how.recipe = 1 + (i + i / 5) % (MIXP_RECIPE_COUNT - 1);
            how.codes = i % 2;
            how.narrow = 1;
        }
        if (is_due(i)) twins(&programs[i], &how);
        if (!how.rule && !how.guard) continue;
        how.rule = how.guard = 0;           /* applies steps from the first on */
        if (is_due(i) && (programs[i].carry || programs[i].after)) twins(&programs[i], &how);
    }
    if (cudasim::simulated && PROGRAMS_UNIT > 1) CHECK(cudasim::count.narrow > 0);
}

int main(void) {
    programs_make();
    if (PROGRAMS_UNIT > 1) cudasim::capability_major = 10;      /* has every format but blocks of 128 */
    RUN(graphs_replay_every_program);
    tallies_print();
    return test_report();
}
