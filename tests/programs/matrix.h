/* matrix.h - runs cells of the matrix of programs and modes, and keeps a table of what became of them.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#ifndef PROGRAMS_MATRIX_H
#define PROGRAMS_MATRIX_H
#include "many.h"

static int asked_for(const program *p) {
    const char *only = getenv("MIXPREC_EVERYDAY");
    return !only || !*only || strcmp(only, p->name) == 0;
}

/* What a yardstick was, and a run without a guard: the same for the modes that follow. */
static yardstick known_yardstick(const program *p, int parts) {
    static const program *of;
    static yardstick      measured[2];
    static int            have[2];
    const int             i = parts > 0;
    if (of != p) have[0] = have[1] = 0;
    of = p;
    if (!have[i]) measured[i] = yardstick_of(p, parts);
    have[i] = 1;
    return measured[i];
}
static const outcome *known_plain(const program *p, const mode *how) {
    static const program *of;
    static mode           last;
    static outcome        o;
    mode                  plain = *how;
    plain.guard = 0;
    if (of != p || memcmp(&plain, &last, sizeof last)) run(p, &plain, &o);
    of = p;
    last = plain;
    return &o;
}

/* --- the table ------------------------------------------------------------------------------ */

typedef struct row {
    const program *p;
    mode           how;
    yardstick      y;
    int64_t        applied[2];              /* without and with the guard                        */
    double         score[2];
    int            events, false_events, broken;
} row;
enum { ROWS = 512 };
static row rows[ROWS];
static int n_rows;

/* Modes without evaluations, micro-batches and retries, at GradScaler's own scale. */
static void table_note(const program *p, const mode *how, const outcome *plain, const outcome *guarded,
                       yardstick y, int broken) {
    row *r = &rows[n_rows];
    if (n_rows == ROWS || how->guard != 1 || how->evaluate || how->parts || how->retry || how->rule)
        return;
    n_rows++;
    r->p = p;
    r->how = *how;
    r->y = y;
    for (int i = 0; i < turns_of(p); i++) {
        r->applied[0] += plain->applied[i];
        r->applied[1] += guarded->applied[i];
    }
    r->score[0] = plain->score;
    r->score[1] = guarded->score;
    r->events = guarded->events;
    r->false_events = guarded->false_events;
    r->broken = broken;
}

static void table_print(void) {
    printf("\n%-13s %-8s %5s  %-13s %9s %9s %9s %9s  %6s %6s %7s\n", "program", "dtype", "level",
           "steps applied", "loss at 0", "f32", "no guard", "guard", "events", "false", "broken");
    for (int i = 0; i < n_rows; i++) {
        const row *r = &rows[i];
        printf("%-13s %-8s %5d  %5lld, %5lld  %9.4g %9.4g %9.4g %9.4g  %6d %6d %7d\n", r->p->name,
               mixp_dtype_name(r->how.dtype), r->how.level, (long long)r->applied[0],
               (long long)r->applied[1], r->y.first, r->y.f32, r->score[0], r->score[1], r->events,
               r->false_events, r->broken);
    }
    printf("\n");
}

static int hold_pair(const program *p, const mode *how) {
    static outcome guarded;
    yardstick      y = known_yardstick(p, how->parts);
    const outcome *plain = known_plain(p, how);
    int            broken;
    run(p, how, &guarded);
    broken = hold(p, how, plain, &guarded, y);
    table_note(p, how, plain, &guarded, y, broken);
    return broken;
}

static int everyday_report(void) {
    tallies_print();
    return test_report();
}
#endif
