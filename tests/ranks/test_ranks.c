/* test_ranks.c - training on several ranks, which are processes forked by ddp_fork.c.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * The test compares the results of 2 and 4 ranks bit by bit with sums that it computes itself from
 * the gradients of a context without ranks. An Inf on one rank skips the step on all. Ranks that
 * differ are refused. If a rank is killed, the others end, and training resumes with the bits of
 * an uninterrupted run.
 */
#define _POSIX_C_SOURCE 200809L         /* kill */
#include "mixprec.h"
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>

/* What the adapter writes texts by: a rank may be killed in the middle of one. */
static int dies_writing;
static int write_text(char *to, size_t room, const char *format, ...) {
    va_list values;
    va_start(values, format);
    int n = vsnprintf(to, dies_writing ? room / 20 : room, format, values);
    va_end(values);
    if (dies_writing) raise(SIGKILL);
    return n;
}
static double linger = 10;
#define DDP_LINGER linger
#undef snprintf
#define snprintf write_text
#include "../../examples/ddp_fork.c"
#undef snprintf

#include "test.h"
#include "new_optimizer.h"
#include "leave.h"

enum { VOCAB = 11, WIDTH = 24, ROWS = 16, PARAMS = 6, MOST = 4, STEPS = 5 };

/* Seconds that a rank waits for others, and the test for ranks: far more than a busy machine keeps a
 * process waiting. Who hangs is ended after the second. */
enum { PATIENCE = 120, HANGS = 300 };

/* Waits for what other processes do. */
#define AWAIT(event)                                                                                  \
    do {                                                                                              \
        long await_turns;                                                                             \
        for (await_turns = 0; await_turns < 1000L * PATIENCE && !(event); await_turns++)              \
            poll(NULL, 0, 1);                                                                         \
    } while (0)

#include "worlds/model.h"
#include "worlds/bits.h"
#include "worlds/bad.h"
#include "worlds/differ.h"
#include "worlds/two.h"
#include "worlds/end.h"

#ifndef RANKS_MPI           /* ranks_mpi.c has its own */
int main(void) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    RUN(two_ranks);
    RUN(four_ranks);
    RUN(ways_to_sum);
    RUN(narrow_wire);
    RUN(held_walks);
    RUN(recomputed);
    RUN(held_walks_that_differ);
    RUN(sharded);
    RUN(sharded_averages);
    RUN(sharded_evenly);
    RUN(sharded_load_memory);
    RUN(sharded_muon);
    RUN(sharded_forms);
    RUN(sharded_checkpoints);
    RUN(scattered);
    RUN(scattered_and_clipped);
    RUN(scattered_inf);
    RUN(planted_inf);
    RUN(spikes);
    RUN(own_gradients);
    RUN(guarded_sites);
    RUN(guarded_skips);
    RUN(guarded_to_the_end);
    RUN(refused_at_the_start);
    RUN(refused_later);
    RUN(any_hook_fails);
    RUN(dies_at_any_call);
    RUN(late_rank);
    RUN(descriptions);
    RUN(failing_hook);
    RUN(failing_view);
    RUN(norms_that_are_nearly_alike);
    RUN(buckets);
    RUN(wide_sums);
    RUN(other_version);
    RUN(unused_parameter);
    RUN(in_pieces);
    RUN(sums_of_yours);
    RUN(ends);
    RUN(asks_no_more);
    RUN(dies_telling);
    RUN(stands_still);
    RUN_LATER(long_sums);
    RUN(ignored_children);
    RUN(children_of_the_program);
    RUN(other_parameters);
    RUN(frozen_on_one);
    RUN(a_step_that_fails);
    RUN(killed_rank);
    return test_report();
}
#endif
