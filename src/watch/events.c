#pragma once
#include "../watch.h"
#include "../scaler.c"
#include "../step/step.c"
#include "share.c"
/* ==== 13. WATCH (implementation) ====================================================== */

/* An event as the watch stores it. site: its number. */
struct mixpi_happening {
    int64_t         step;
    mixp_event_kind kind;
    int             site;
    mixp_dtype      dtype;
    mixp_look       look;
    double          flushed, lost;
    mixp_origin     origin;
    int             of_grad, also;
    int             operand;    /* 0: none; otherwise 1 + mixpi_role */
    double          error, clipped;
};

static const mixp_look mixpi_no_look = { 0.0f, 0, 0, 0, 0, 0, 0, 0, 0 };

/* --- shares ------------------------------------------------------------------------------ */

MIXPREC_API double mixp_look_flushed(const mixp_look *look, int stored_low) {
    if (!look) return 0.0;
    double seen = (double)(look->count - look->zeros - look->nonfinite);
    double lost = stored_low ? 0.5 * (double)look->least : (double)look->flushed;
    if (stored_low) seen += lost; /* flushed values were counted as zeros */
    return seen > 0.0 ? lost / seen : 0.0;
}

/* The largest finite number of a 16-bit dtype. */
static double mixpi_low_largest(mixp_dtype low) {
    return low == MIXP_BF16 ? (double)MIXP_BF16_MAX : (double)MIXP_F16_MAX;
}

/* Do flushed values matter in this array? If the array has a number of at least 16 times the
 * smallest normal number, the flushed values are smaller than the rounding error of f32 on that
 * number: a long tail of tiny values does no harm. */
static int mixpi_is_small(const mixp_look *look, mixp_dtype low) {
    const double normal = low == MIXP_BF16 ? (double)MIXP_BF16_MIN : (double)MIXP_F16_MIN;
    return (double)look->largest < 16.0 * normal;
}

/* --- events ------------------------------------------------------------------------------ */

/* Doubles the memory of events up to the limit. Without memory, the oldest event is overwritten. */
static void mixpi_events_grow(mixp_context *ctx) {
    mixpi_watch *w = ctx->watch;
    const size_t used = (size_t)w->events_room * sizeof *w->events;
    if (w->n_events != w->events_room || w->events_room == MIXPI_MAX_EVENTS) return;
    mixpi_happening *events = (mixpi_happening *)mixpi_owner_new(ctx, 2 * used);
    if (!events) return;
    memcpy(events, w->events, used);
    mixpi_owned_free(ctx, w->events);
    w->events = events;
    w->events_room *= 2;
}

static mixpi_happening *mixpi_event_add(mixp_context *ctx, mixp_event_kind kind, int number,
    const mixp_look *look, mixp_origin origin) {
    mixpi_watch *w = ctx->watch;
    const mixpi_site *site = mixpi_site_at(ctx, number);
    mixpi_events_grow(ctx);
    mixpi_happening *e = &w->events[w->n_events++ % w->events_room];
    e->step = (int64_t)(w->event_step ? w->event_step : ctx->step);
    e->kind = kind;
    e->site = number;
    e->origin = origin;
    e->look = *look;
    e->dtype = site ? (mixpi_site_stays_f32(site) ? MIXP_F32 : site->low) : MIXP_F32;
    e->flushed = site ? mixp_look_flushed(look, site->dtype == site->low) : 0.0;
    e->lost = site ? site->lost : 0.0;
    e->of_grad = e->also = e->operand = 0;
    e->error = e->clipped = 0.0;
    return e;
}

static const char *mixpi_event_what(const mixp_event *e) {
    static const char *const texts[] = { "overflowed: stores f32 now",
        "approached the end of its range: stores f32 now",
        "flushed too much to zero: stores f32 now", "in range again: stores its low dtype",
        "pinned by a pattern", "caused a skipped step",
        "max_sites is reached: new sites are not watched",
        "lost too much by rounding: stores f32 now",
        "lost too much when it was quantised: its products are bf16 now",
        "in range again: is quantised" };
    MIXPI_STATIC_ASSERT(event_texts, sizeof texts / sizeof texts[0] == MIXP_EVENT_COUNT);

    /* Two of them can mean something else. */
    if (e->kind == MIXP_EVENT_SKIP && !e->site[0])
        return "a step that was not sampled was skipped; the next step is sampled";
    if (e->kind == MIXP_EVENT_BACK && e->dtype == MIXP_F32)
        return "in range again: reads its low dtype";
    return texts[e->kind];
}

/* Returns what the user should do about an event. */
static const char *mixpi_event_advice(const mixp_event *e) {
    switch (e->kind) {
    case MIXP_EVENT_OVERFLOW:
    case MIXP_EVENT_HIGH:
    case MIXP_EVENT_FLUSHED:
    case MIXP_EVENT_IMPRECISE:
        return "No action needed: the site returns to its low dtype once its values stay in range";
    case MIXP_EVENT_OPERAND:
        return "No action needed: the operand is quantised again once it loses less";
    case MIXP_EVENT_BACK:
    case MIXP_EVENT_OPERAND_BACK:
        return "No action needed: after another fallback the site needs twice as many clean "
               "samples";
    case MIXP_EVENT_PINNED: return "To free the site, call mixp_guard_pin with MIXP_DTYPE_COUNT";
    case MIXP_EVENT_FULL: return "Set a larger max_sites when you start the guard of a new context";
    default: return "";
    }
}

/* Writes the number that an event reports, in brackets; "" if the event reports none. */
static void mixpi_event_number(const mixp_event *e, char *text, size_t space) {
    *text = 0;
    if (e->kind == MIXP_EVENT_FLUSHED)
        snprintf(text, space, " (%.3g%% of its values)", 100.0 * e->flushed);
    if (e->kind == MIXP_EVENT_OPERAND)
        snprintf(text, space, " (mean relative error %.3g, %.3g%% clipped)", e->error,
            100.0 * e->clipped);
    if (e->kind == MIXP_EVENT_IMPRECISE)
        snprintf(text, space, " (%.3g%% of its variation over the batch)", 100.0 * e->imprecise);
    if (e->kind == MIXP_EVENT_HIGH || e->kind == MIXP_EVENT_BACK ||
        (e->kind == MIXP_EVENT_OVERFLOW && !e->nonfinite))
        snprintf(text, space, " (largest %g)", (double)e->largest);
    else if (e->kind == MIXP_EVENT_OVERFLOW)
        snprintf(text, space, " (%.0f values not finite)", (double)e->nonfinite);
}

/* Why a step was skipped: the words before and after the name of the site, and what to do. */
typedef struct mixpi_skip_words {
    const char *before, *after, *advice;
} mixpi_skip_words;

static const mixpi_skip_words *mixpi_skip_words_of(mixp_origin origin) {
    static const mixpi_skip_words words[] = {
        { "a gradient or a buffer was not finite", NULL,
            "The step was not sampled. The next step is sampled and names the first site" },
        { "the result of ", " overflowed",
            "No site can fall back. If skips continue, the run ends with MIXP_ERR_DIVERGED" },
        { "the gradient of ", " overflowed", "No action needed" },
        { "a gradient overflowed when it was unscaled", NULL,
            "The loss scale is below 1. Look at the learning rate and the gradient norm" },
        { "the loss of ", " is not finite, although all activations are finite",
            "Look at logs and divisions in the loss" },
        { "a weight or a buffer of ", " is not finite",
            "Resume from a checkpoint with a smaller learning rate" },
        { "the batch that ", " reads contains Inf or NaN", "Look at the data" },
        { "the loss is not finite, or a buffer became so", NULL,
            "Turn on a guard to find the first bad site" },
        { "the result of ", " is not finite because the program wrote Inf, such as a mask of -Inf",
            "Leave a score of each row unmasked, or mask with a finite number" },
        { "no value was Inf or NaN", NULL, "No action needed" }
    };
    MIXPI_STATIC_ASSERT(skip_words, sizeof words / sizeof words[0] == MIXP_ORIGIN_COUNT);
    return &words[(unsigned)origin < MIXP_ORIGIN_COUNT ? origin : MIXP_ORIGIN_UNKNOWN];
}

/* The text of a skip. */
static void mixpi_skip_text(const mixp_event *e, char *text, size_t space) {
    const mixpi_skip_words *words = mixpi_skip_words_of(e->origin);
    const char *advice =
        e->also ? "A site stores f32 from now on. No action needed" : words->advice;
    char site[MIXPI_SITE_NAME + 2] = "";
    if (words->after) snprintf(site, sizeof site, *e->site ? "'%.95s'" : "a site%s", e->site);
    snprintf(text, space, "step %.0f: skipped because %s%s%s. %s.", (double)e->step, words->before,
        site, words->after ? words->after : "", advice);
}

MIXPI_SELDOM
MIXPREC_API const char *mixp_event_text(const mixp_event *event, char *text, size_t space) {
    char number[64], others[64] = "", subject[64] = "";
    if (!text || !space) return NULL;
    *text = 0;
    if (!event || (unsigned)event->kind >= MIXP_EVENT_COUNT || !event->site) return text;

    if (event->kind == MIXP_EVENT_SKIP) {
        mixpi_skip_text(event, text, space);
        mixpi_readable(text);
        return text;
    }

    /* The part of the site that the event is about, unless it is about the site's value. */
    if (event->operand && *event->operand)
        snprintf(subject, sizeof subject, "operand %.4s of ", event->operand);
    else if (event->of_gradient) snprintf(subject, sizeof subject, "the gradient of ");

    /* How much, and how many other sites fell back in the same event. */
    mixpi_event_number(event, number, sizeof number);
    if (event->also > 0)
        snprintf(others, sizeof others, ", and %d more sites with this operator and parameter",
            event->also);

    snprintf(text, space, "step %.0f: %s%.95s%s%s%s%s. %s.", (double)event->step, subject,
        event->site, *event->site ? " " : "", mixpi_event_what(event), number, others,
        mixpi_event_advice(event));
    mixpi_readable(text);
    return text;
}

/* The name of an operand; operand: 1 + mixpi_role, 0 = none. */
static const char *mixpi_role_name(int operand) {
    static const char *const names[] = { "", "x", "w", "dy" };
    MIXPI_STATIC_ASSERT(role_names, sizeof names / sizeof names[0] == 1 + MIXPI_ROLES);
    return names[operand];
}

MIXPI_SELDOM
MIXPREC_API int mixp_guard_event(const mixp_context *ctx, int i, mixp_event *out) {
    const mixpi_watch *w = ctx ? ctx->watch : NULL;
    int64_t kept = w ? mixpi_min(w->n_events - w->first_event, w->events_room) : 0, number;
    if (!out || i < 0 || i >= kept) return 0;

    number = w->n_events - kept + i;
    const mixpi_happening *e = &w->events[number % w->events_room];

    memset(out, 0, sizeof *out);
    out->number = number;
    out->step = e->step;
    out->kind = e->kind;
    out->site = e->site ? mixpi_site_at(ctx, e->site)->name : "";
    out->dtype = e->dtype;
    out->largest = e->look.largest;
    out->flushed = e->flushed;
    out->imprecise = e->lost;
    out->operand = mixpi_role_name(e->operand);
    out->error = e->error;
    out->clipped = e->clipped;
    out->nonfinite = e->look.nonfinite;
    out->origin = e->origin;
    out->of_gradient = e->of_grad;
    out->also = e->also;

    /* The sentence needs the rest. */
    out->what = mixpi_event_what(out);
    return 1;
}

/* Clean samples needed for a return: K, doubled with each relapse. */
static int64_t mixpi_clean_needed(const mixpi_watch *w, const mixpi_site *site) {
    int relapses = site->falls > 1 ? site->falls - 1 : 0;
    return (int64_t)w->clean << (relapses < 20 ? relapses : 20);
}

/* The internal number of the site that users call i; 0 if there is no such site. */
static int mixpi_listed_site(const mixpi_watch *w, int i) {
    int n, at = -1;
    for (n = 0; w && n < w->n_sites && at < i; n++) at += mixpi_site_number(w, n + 1)->stores;
    return i < 0 || at < i ? 0 : n;
}

MIXPI_SELDOM
MIXPREC_API int mixp_site(const mixp_context *ctx, int i, mixp_site_info *out) {
    const mixpi_watch *w = ctx ? ctx->watch : NULL;
    const int number = mixpi_listed_site(w, i);
    if (!number || !out) return 0;
    const mixpi_site *site = mixpi_site_at(ctx, number);

    memset(out, 0, sizeof *out);
    out->name = site->name;
    out->op = site->op;
    out->dtype = site->dtype;
    out->fallen = site->fallen != 0;
    out->pinned = site->pinned != 0;

    /* Copy its history. */
    out->falls = site->falls;
    out->clean = site->clean;
    out->clean_needed = (int)mixpi_min(mixpi_clean_needed(w, site), INT32_MAX);
    for (int k = 0; k < MIXPI_ROLES; k++) out->operands |= (site->operands[k].fallen != 0) << k;

    /* Copy what its samples show. */
    out->samples = site->samples;
    out->value = site->value;
    out->grad = site->grad;
    out->scores = site->scores;
    for (int k = 0; k < MIXPI_ROLES; k++) out->blocks[k] = site->operands[k].blocks;
    return 1;
}
