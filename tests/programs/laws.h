/* laws.h - which modes there are, and what must hold in each.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#ifndef PROGRAMS_LAWS_H
#define PROGRAMS_LAWS_H
#include "test.h"
#include "harness.h"
#include <stdarg.h>

static mode mode_of(mixp_dtype dtype, int level, int rule, int guard) {
    mode how;
    memset(&how, 0, sizeof how);
    how.dtype = dtype;
    how.level = level;
    how.rule = rule;
    how.guard = guard;
    return how;
}

static const char *mode_text(const program *p, const mode *how) {
    static char text[160];
    snprintf(text, sizeof text,
             "%s, %s level %d, rule %d, guard %d%s, evaluate %d, parts %d, cut %d%s%s%s", p->name,
             mixp_dtype_name(how->dtype), how->level, how->rule, how->guard,
             how->retry ? ", retry" : "", how->evaluate, how->parts, how->cut,
             how->recipe ? ", " : "", how->recipe ? mixp_recipe_name((mixp_recipe_kind)how->recipe) : "",
             how->codes ? ", codes" : "");
    return text;
}

/* What is held; one line in LAWS for each. */
#define LAWS(X)                                                                                       \
    X(STEPS, "steps")               /* at least those that are applied without a guard            */ \
    X(ERROR, "error")               /* no error that there is not without it                      */ \
    X(WORSE, "no worse")            /* the loss at the end                                        */ \
    X(AS_F32, "as f32")             /* the loss at the end                                        */ \
    X(EVALUATIONS, "evaluations")   /* finite where f32's are                                     */ \
    X(BITS, "bits")                 /* the same with and without, where nothing falls back        */ \
    X(EVENTS, "events")             /* each is true                                               */ \
    X(UNTOUCHED, "untouched")       /* weights and buffers, by a step that is skipped or repeated */ \
    X(FINITE, "finite")             /* buffers where f32's are                                    */ \
    X(RESUME, "resume")             /* the bits of a run without a break                          */ \
    X(RANKS, "ranks")               /* the same bits on both, no error, rank 0 alone evaluates    */ \
    X(PARTS, "parts")               /* one rank with the parts of two has the bits of two         */ \
    X(REPLAY, "replay")             /* the bits of steps one by one                               */ \
    X(LEARNS, "learns")             /* a recipe: the loss at the end, beside bf16's               */ \
    X(CODES, "codes")               /* a recipe: the bits of a run without codes                  */
#define LAW_CONSTANT(constant, text) LAW_##constant,
#define LAW_TEXT(constant, text) text,
enum law { LAWS(LAW_CONSTANT) LAW_COUNT };
static const char *const law_text[] = { LAWS(LAW_TEXT) };

/* Laws that a program is known to break, and that wait for their cure: shown, but no failure. */
typedef struct known_break {
    const char *program;
    enum law    law;
    mixp_dtype  dtype;
    int         rule, level;    /* level 0: each */
} known_break;
static const known_break all_known[] = {
#include "known.h"
    { NULL, LAW_COUNT, MIXP_F32, 0, 0 }
};

static int is_known(const program *p, const mode *how, enum law law) {
    for (const known_break *k = all_known; k->program; k++)
        if (strcmp(k->program, p->name) == 0 && k->law == law && k->dtype == how->dtype &&
            k->rule == how->rule && (k->level == 0 || k->level == how->level))
            return 1;
    return 0;
}

/* How many cells break a law, in how many of them it is known, and the first that is not known, or else
 * the first of all. */
static struct tally { int cells, known; char first[700]; } tallies[MOST_PROGRAMS][LAW_COUNT];

static void broke(const program *p, const mode *how, enum law law, const char *format, ...) {
    struct tally *t = &tallies[p - programs][law];
    va_list       values;
    const int     known = is_known(p, how, law);
    const int     shown = t->cells == 0 || (!known && t->known == t->cells);
    t->cells++;
    t->known += known;
    test_bad += !known;
    if (!shown) return;
    int n = snprintf(t->first, sizeof t->first, "%s: ", mode_text(p, how));
    va_start(values, format);
    vsnprintf(t->first + n, sizeof t->first - (size_t)n, format, values);
    va_end(values);
}

#define LAW(law, condition, ...)                                                                      \
    do { if (!(condition)) { broken++; broke(p, how, LAW_##law, __VA_ARGS__); } } while (0)

static void tallies_print(void) {
    for (int i = 0; i < program_count; i++)
        for (int law = 0; law < LAW_COUNT; law++) {
            const struct tally *t = &tallies[i][law];
            if (t->cells)
                printf("%s '%s' in %d cells, first: %s\n",
                       t->known == t->cells ? "known:" : "BROKEN:", law_text[law],
                       t->cells, t->first);
        }
}

/* How far a program is from what f32 learns, at first and at the end; after how many of f32's steps a
 * buffer was not finite. */
typedef struct yardstick { double first, f32; int bad_buffers; } yardstick;

static yardstick yardstick_of(const program *p, int parts) {
    static outcome o;
    mode           how = mode_of(MIXP_F32, 0, 0, 0);
    yardstick      y;
    how.parts = parts;
    how.steps = -1;
    run(p, &how, &o);
    y.first = o.score;
    how.steps = 0;
    run(p, &how, &o);
    y.f32 = o.score;
    y.bad_buffers = o.bad_buffers;
    return y;
}

/* Have two runs the same weights, loss scales and buffers? */
static int same_bits(const outcome *a, const outcome *b) { return a->bits == b->bits && a->kept == b->kept; }

/* The same run with a guard and without. Returns how many laws it breaks. Where a loss overflowed, a run
 * without a guard lowers its loss scale for it, and may so be spared a skip by a gradient: one is granted.
 * Beside a run without a guard that learns far less, the program's spared steps are granted. Where the
 * guard has found a loss scale with two skips in place of many (a dive), the steps that follow have other
 * bits; and where many skipped steps happen to help a program, it may end as f32 does. */
static int hold(const program *p, const mode *how, const outcome *plain, const outcome *guarded,
                yardstick y) {
    const double way = fabs(y.first - y.f32), near = p->near > 0 ? p->near : 0.15;
    const int    learns = guarded->score < plain->score - 0.5 * way;
    const int    spared = learns && how->dtype == MIXP_F16 ? p->spared : 0;
    int          broken = 0;
    for (int i = 0; i < turns_of(p); i++)
        LAW(STEPS, guarded->applied[i] + (guarded->bad_losses > 0) + spared >= plain->applied[i],
            "network %d: %lld steps applied, %lld without a guard", i, (long long)guarded->applied[i],
            (long long)plain->applied[i]);
    LAW(ERROR, guarded->error == MIXP_OK || plain->error != MIXP_OK, "ends with: %s", guarded->why);
    LAW(WORSE, guarded->score <= plain->score + 0.05 * way ||
               (guarded->dives && guarded->score <= y.f32 + 0.05 * way),
        "ends at %.4g, without a guard at %.4g", guarded->score, plain->score);
    LAW(AS_F32, how->rule || how->level > 2 || guarded->score <= y.f32 + near * way,
        "ends at %.4g, f32 at %.4g", guarded->score, y.f32);
    LAW(EVALUATIONS, guarded->bad_evaluations == 0, "%d of %d are not finite, though f32's are",
        guarded->bad_evaluations, guarded->evaluations);
    LAW(BITS, guarded->falls || how->rule == 2 || guarded->dives || same_bits(guarded, plain),
        "nothing falls back, and they differ from those without a guard");
    LAW(UNTOUCHED, !plain->touched && !guarded->touched,
        "%d skipped steps have changed weights or buffers, %d without a guard", guarded->touched,
        plain->touched);
    LAW(FINITE, !guarded->bad_buffers || y.bad_buffers, "buffers are not finite after %d steps",
        guarded->bad_buffers);
    LAW(EVENTS, guarded->false_events == 0, "%d of %d are false, first: %s", guarded->false_events,
        guarded->events, guarded->first_false);
    return broken;
}

/* A run that is saved and goes on in another context after `cut` steps has the bits of one that is not. */
static int hold_resume(const program *p, mode *how, int cut) {
    static outcome whole, parted;
    int            broken = 0;
    how->cut = 0;
    run(p, how, &whole);
    how->cut = cut;
    run(p, how, &parted);
    LAW(RESUME, parted.error == whole.error, "ends with: %s", parted.why);
    LAW(UNTOUCHED, !parted.touched, "%d skipped steps have changed weights or buffers", parted.touched);
    LAW(RESUME, same_bits(&parted, &whole), "%lld steps applied, %lld without a break: other bits",
        (long long)parted.applied[0], (long long)whole.applied[0]);
    return broken;
}
#endif
