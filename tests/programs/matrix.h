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

/* What became of a program at a dtype and a level. [0]: without the guard, [1]: with it. */
typedef struct row {
    const program *p;
    mixp_dtype     dtype;
    int            level;
    yardstick      y;
    int64_t        applied[2], all_applied[2];
    double         score[2];
    int            events, cells, all_events, false_events, broken;
} row;
enum { ROWS = 512 };
static row rows[ROWS];
static int n_rows;

static row *row_of(const program *p, const mode *how) {
    row *r = rows;
    while (r < rows + n_rows && (r->p != p || r->dtype != how->dtype || r->level != how->level)) r++;
    if (r == rows + ROWS) return NULL;
    if (r == rows + n_rows) n_rows++;
    r->p = p;
    r->dtype = how->dtype;
    r->level = how->level;
    return r;
}

/* Its own columns: the mode without evaluations, micro-batches and retries, at GradScaler's own scale. */
static void table_note(const program *p, const mode *how, const outcome *plain, const outcome *guarded,
                       yardstick y, int broken) {
    row      *r = row_of(p, how);
    const int own = how->guard == 1 && !how->evaluate && !how->parts && !how->retry && !how->rule;
    if (!r) return;
    if (own) memset(r->applied, 0, sizeof r->applied);
    for (int i = 0; i < turns_of(p); i++) {
        r->all_applied[0] += plain->applied[i];
        r->all_applied[1] += guarded->applied[i];
        if (own) r->applied[0] += plain->applied[i];
        if (own) r->applied[1] += guarded->applied[i];
    }
    r->cells++;
    r->all_events += guarded->events;
    r->false_events += guarded->false_events;
    r->broken += broken;
    if (!own) return;
    r->y = y;
    r->score[0] = plain->score;
    r->score[1] = guarded->score;
    r->events = guarded->events;
}

static void table_write(FILE *f) {
    fprintf(f, "%-13s %-5s %5s  %-9s %9s %9s %9s %9s %7s | %5s %-13s %7s %6s %7s\n", "program", "dtype",
            "level", "steps", "loss at 0", "f32", "no guard", "guard", "events", "cells", "steps", "events",
            "false", "broken");
    for (int i = 0; i < n_rows; i++) {
        const row *r = &rows[i];
        fprintf(f, "%-13s %-5s %5d  %4lld,%4lld %9.4g %9.4g %9.4g %9.4g %7d | %5d %6lld,%6lld %7d %6d %7d\n",
                r->p->name, mixp_dtype_name(r->dtype), r->level, (long long)r->applied[0],
                (long long)r->applied[1], r->y.first, r->y.f32, r->score[0], r->score[1], r->events, r->cells,
                (long long)r->all_applied[0], (long long)r->all_applied[1], r->all_events, r->false_events,
                r->broken);
    }
}

/* To the screen, and to the file that MIXPREC_EVERYDAY_TABLE names. */
static void table_print(void) {
    const char *path = getenv("MIXPREC_EVERYDAY_TABLE");
    FILE       *f = path && *path ? fopen(path, "w") : NULL;
    table_write(stdout);
    if (!f) return;
    fprintf(f, "Everyday programs (tests/programs), written by build/long_everyday with MIXPREC_EVERYDAY_TABLE.\n"
               "Pairs are without and with the guard. Left: all defaults; steps applied, the loss in f32 before\n"
               "training and after a run in f32, without and with the guard, and the guard's events. Right: all\n"
               "modes (4 loss-scale rules in fp16, retry, evaluations, micro-batches, 2 guards): cells, steps\n"
               "applied in all, events, events that f32 does not confirm, and laws broken (laws.h).\n\n");
    table_write(f);
    fclose(f);
}

static int hold_pair(const program *p, const mode *how) {
    static outcome guarded;
    yardstick      y = known_yardstick(p, how->parts);
    const outcome *plain = known_plain(p, how);
    run(p, how, &guarded);
    int broken = hold(p, how, plain, &guarded, y);
    table_note(p, how, plain, &guarded, y, broken);
    return broken;
}

static int everyday_report(void) {
    tallies_print();
    return test_report();
}
#endif
