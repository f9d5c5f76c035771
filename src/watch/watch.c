#pragma once
#include "../watch.h"
#include "../scaler.c"
#include "../step/step.c"
#include "share.c"
/* ==== 12. WATCH (implementation) ====================================================== */

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
    double seen, lost;
    if (!look) return 0.0;
    seen = (double)(look->count - look->zeros - look->nonfinite);
    lost = stored_low ? 0.5 * (double)look->least : (double)look->flushed;
    if (stored_low) seen += lost;       /* flushed values were counted as zeros */
    return seen > 0.0 ? lost / seen : 0.0;
}

MIXPREC_API double mixp_look_subnormal(const mixp_look *look) {
    int64_t seen = look ? look->count - look->zeros - look->nonfinite : 0;
    return seen > 0 ? (double)look->subnormal / (double)seen : 0.0;
}

/* The largest number, and the smallest normal number, of a low dtype. */
static double mixpi_low_largest(mixp_dtype low)
{ return low == MIXP_BF16 ? (double)MIXP_BF16_MAX : (double)MIXP_F16_MAX; }
static double mixpi_low_normal(mixp_dtype low)
{ return low == MIXP_BF16 ? (double)MIXP_BF16_MIN : (double)MIXP_F16_MIN; }

/* Do flushed values matter in this array? If the array has a number of at least 16 times the
 * smallest normal number, the flushed values are smaller than the rounding error of f32 on that
 * number: a long tail of tiny values does no harm. */
static int mixpi_is_small(const mixp_look *look, mixp_dtype low)
{ return (double)look->largest < 16.0 * mixpi_low_normal(low); }

/* --- events ------------------------------------------------------------------------------ */

/* Doubles the memory of events up to the limit. Without memory, the oldest event is overwritten. */
static void mixpi_events_grow(mixp_context *ctx) {
    mixpi_watch *w = ctx->watch;
    const size_t used = (size_t)w->events_room * sizeof *w->events;
    mixpi_happening *events;
    if (w->n_events != w->events_room || w->events_room == MIXPI_MAX_EVENTS) return;
    events = (mixpi_happening *)mixpi_owner_new(ctx, 2 * used);
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
    mixpi_happening *e;
    mixpi_events_grow(ctx);
    e = &w->events[w->n_events++ % w->events_room];
    e->step = (int64_t)(w->event_step ? w->event_step : ctx->step);
    e->kind = kind;
    e->site = number;
    e->origin = origin;
    e->look = *look;
    e->dtype = site ? (mixpi_site_fell(site) ? MIXP_F32 : site->low) : MIXP_F32;
    e->flushed = site ? mixp_look_flushed(look, site->dtype == site->low) : 0.0;
    e->lost = site ? site->lost : 0.0;
    e->of_grad = e->also = e->operand = 0;
    e->error = e->clipped = 0.0;
    return e;
}

static const char *mixpi_event_what(const mixp_event *e) {
    static const char *const texts[] = {
        "overflowed: stores f32 now", "approached the end of its range: stores f32 now",
        "flushed too much to zero: stores f32 now", "in range again: stores its low dtype",
        "pinned by a pattern", "caused a skipped step",
        "max_sites is reached: new sites are not watched",
        "lost too much by rounding: stores f32 now",
        "lost too much when it was quantised: its products are bf16 now",
        "in range again: is quantised"
    };
    MIXPI_STATIC_ASSERT(event_texts, sizeof texts / sizeof texts[0] == MIXP_EVENT_COUNT);
    if (e->kind == MIXP_EVENT_SKIP && !e->site[0])
        return "a step that was not sampled was skipped; the next step is sampled";
    if (e->kind == MIXP_EVENT_BACK && e->dtype == MIXP_F32)
        return "in range again: reads its low dtype";
    return texts[e->kind];
}

/* What the user should do about an event. */
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
    case MIXP_EVENT_PINNED:
        return "To free the site, call mixp_guard_pin with MIXP_DTYPE_COUNT";
    case MIXP_EVENT_FULL:
        return "Set a larger max_sites when you start the guard of a new context";
    default:
        return "";
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

/* What of the site an event is about; "" for its value. */
static void mixpi_event_subject(const mixp_event *e, char *text, size_t space) {
    snprintf(text, space, "%s", e->of_gradient ? "the gradient of " : "");
    if (e->operand && *e->operand) snprintf(text, space, "operand %.4s of ", e->operand);
}

/* Writes how many other sites fell back in the same event; writes "" if no other site did. */
static void mixpi_event_others(const mixp_event *e, char *text, size_t space) {
    *text = 0;
    if (e->also > 0 && e->kind != MIXP_EVENT_SKIP)
        snprintf(text, space, ", and %d more sites with this operator and parameter", e->also);
}

/* Why a step was skipped: the words before and after the name of the site, and what to do. */
typedef struct mixpi_skip_words {
    const char *before, *after, *advice;
} mixpi_skip_words;

static const mixpi_skip_words *mixpi_skip_words_of(mixp_origin origin) {
    static const mixpi_skip_words words[] = {
        { "a gradient was not finite", NULL,
          "The step was not sampled. The next step is sampled and names the first site" },
        { "the result of ", " overflowed",
          "No site can fall back. If skips continue, the run ends with MIXP_ERR_DIVERGED" },
        { "the gradient of ", " overflowed", "No action needed" },
        { "a gradient overflowed when it was unscaled", NULL,
          "The loss scale is below 1. Look at the learning rate and the gradient norm" },
        { "the loss of ", " is not finite, although all activations are finite",
          "Look at logs and divisions in the loss" },
        { "a weight of ", " is not finite",
          "Resume from a checkpoint with a smaller learning rate" },
        { "the batch that ", " reads holds Inf or NaN", "Look at the data" },
        { "the loss is not finite", NULL, "Turn on a guard to find the first bad site" },
        { "the result of ", " is not finite because the program wrote Inf, such as a mask of -Inf",
          "Leave a score of each row unmasked, or mask with a finite number" }
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
    char number[64], others[64], subject[64];
    if (!text || !space) return NULL;
    *text = 0;
    if (!event || (unsigned)event->kind >= MIXP_EVENT_COUNT || !event->site) return text;
    if (event->kind == MIXP_EVENT_SKIP) {
        mixpi_skip_text(event, text, space);
        return text;
    }
    mixpi_event_number(event, number, sizeof number);
    mixpi_event_others(event, others, sizeof others);
    mixpi_event_subject(event, subject, sizeof subject);
    snprintf(text, space, "step %.0f: %s%.95s%s%s%s%s. %s.", (double)event->step, subject,
             event->site, *event->site ? " " : "",
             mixpi_event_what(event), number, others, mixpi_event_advice(event));
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
    const mixpi_happening *e;
    if (!out || i < 0 || i >= kept) return 0;
    number = w->n_events - kept + i;
    e = &w->events[number % w->events_room];
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
    out->what = mixpi_event_what(out);
    return 1;
}

/* Clean samples needed for a return: K, doubled with each relapse. */
static int64_t mixpi_clean_needed(const mixpi_watch *w, const mixpi_site *site) {
    int relapses = site->falls > 1 ? site->falls - 1 : 0;
    return (int64_t)w->clean << (relapses < 20 ? relapses : 20);
}

/* The internal number of the site that users call i; 0 if there is no such site. */
static int mixpi_site_listed(const mixpi_watch *w, int i) {
    int n, at = -1;
    for (n = 0; w && n < w->n_sites && at < i; n++) at += mixpi_site_number(w, n + 1)->stores;
    return i < 0 || at < i ? 0 : n;
}

MIXPI_SELDOM
MIXPREC_API int mixp_site(const mixp_context *ctx, int i, mixp_site_info *out) {
    const mixpi_watch *w = ctx ? ctx->watch : NULL;
    const int number = mixpi_site_listed(w, i);
    const mixpi_site *site;
    int k;
    if (!number || !out) return 0;
    site = mixpi_site_at(ctx, number);
    memset(out, 0, sizeof *out);
    out->name = site->name;
    out->op = site->op;
    out->dtype = site->dtype;
    out->fallen = site->fallen != 0;
    out->pinned = site->pinned != 0;
    out->falls = site->falls;
    out->clean = site->clean;
    out->clean_needed = (int)mixpi_min(mixpi_clean_needed(w, site), INT32_MAX);
    for (k = 0; k < MIXPI_ROLES; k++) out->operands |= (site->operands[k].fallen != 0) << k;
    out->samples = site->samples;
    out->value = site->value;
    out->grad = site->grad;
    return 1;
}

/* --- deciding ------------------------------------------------------------------------------ */

static const mixp_look *mixpi_seen(const mixpi_watch *w, int number, int which)
{ return &w->seen[MIXPI_ROW_SITES + (number - 1) * MIXPI_LOOKS + which]; }

/* Can the site still store, or read, a wider dtype? */
static int mixpi_site_can_fall(const mixpi_site *site) {
    if (site->pinned) return 0;
    return (site->low != MIXP_F32 && !site->fallen) || (site->casts && site->fallen < 2);
}

/* Lets a site store f32, or, where that is not enough, read f32 too. Where rounding loses too much
 * of a product's inputs or result, rounding its weights loses as much. */
static void mixpi_site_sink(mixp_context *ctx, mixpi_site *site) {
    const int imprecise = site->casts && site->why & MIXPI_FELL_IMPRECISE;
    const int reads = site->fallen || site->low == MIXP_F32 || imprecise;
    site->fallen = reads ? 2 : 1;
    if (site->falls < MIXPI_SITE_COUNT) site->falls++;
    site->clean = 0;
    site->changed = ctx->watch->begun;
}

/* The reason of a fallback, as MIXPI_FELL_... bits. */
static int32_t mixpi_fall_reason(mixp_event_kind kind, int of_grad) {
    if (kind == MIXP_EVENT_IMPRECISE) return MIXPI_FELL_IMPRECISE;
    if (!of_grad) return 0;
    return kind == MIXP_EVENT_FLUSHED ? MIXPI_FELL_GRAD_FLUSHED : MIXPI_FELL_GRAD_LARGE;
}

/* Lets the other sites with the same operator and the same parameters, as in an unrolled loop, fall
 * back as well: they would otherwise follow with one skip each. Returns how many fell back. */
static int mixpi_siblings_fall(mixp_context *ctx, int number) {
    const mixpi_site *first = mixpi_site_at(ctx, number);
    int n, fell = 0;
    for (n = 1; first->weights && n <= ctx->watch->n_sites; n++) {
        mixpi_site *site = mixpi_site_at(ctx, n);
        if (n == number || site->weights != first->weights || site->low != first->low) continue;
        if (site->fallen >= first->fallen || !mixpi_site_can_fall(site)) continue;
        if (mixpi_seen(ctx->watch, n, MIXPI_LOOK_GRAD)->count)
            site->why |= first->why & MIXPI_FELL_GRAD;
        site->why |= first->why & MIXPI_FELL_IMPRECISE;
        mixpi_site_sink(ctx, site);
        fell++;
    }
    return fell;
}

static mixpi_happening *mixpi_site_fall(mixp_context *ctx, int number, mixp_event_kind kind,
                                        const mixp_look *look, int of_grad) {
    mixpi_watch *w = ctx->watch;
    mixpi_happening *e;
    mixpi_site_at(ctx, number)->why |= mixpi_fall_reason(kind, of_grad);
    mixpi_site_sink(ctx, mixpi_site_at(ctx, number));
    w->acted = 1;
    w->falls = (int32_t)(((uint32_t)w->falls + 1u) & 0x7FFFFFFFu);
    ctx->capture.sites_moved++;
    e = mixpi_event_add(ctx, kind, number, look, MIXP_ORIGIN_UNKNOWN);
    e->of_grad = of_grad;
    e->also = mixpi_siblings_fall(ctx, number);
    return e;
}

/* Is too large a share of the non-zero values flushed, in an array of small numbers? */
static int mixpi_flushes(const mixpi_watch *w, const mixpi_site *site, const mixp_look *look) {
    const int stored_low = mixpi_is_low(site->dtype);
    return look->largest > 0.0f && mixpi_is_small(look, site->low) &&
           mixp_look_flushed(look, stored_low) > (double)w->flushed;
}

/* Is the array all zeros while its neighbour has tiny numbers? Then all values were flushed. */
static int mixpi_vanished(const mixp_look *look, const mixp_look *neighbour, mixp_dtype low) {
    if (!mixpi_is_low(low)) return 0;
    return look->count && look->zeros == look->count && neighbour->largest > 0.0f &&
           mixpi_is_small(neighbour, low);
}

/* Does the site store its low dtype, and may this sample make it fall back? */
static int mixpi_site_is_low(const mixpi_site *site, int sample) {
    return site->low != MIXP_F32 && site->dtype == site->low && !site->fallen && !site->pinned &&
           site->changed < sample;
}

/* Has the site's operator one of these traits? */
static int mixpi_site_is(const mixpi_site *site, int traits)
{ return (site->traits & traits) != 0; }

/* Looks at t at once, through a row of device memory. Waits for the device. */
static mixp_result mixpi_look_now(const mixp_tensor *t, mixp_dtype low, mixp_look *row,
                                  mixp_look *found) {
    mixp_context *ctx = t->ctx;
    mixp_look_args k;
    mixp_result r;
    memset(&k, 0, sizeof k);
    k.n = t->count;
    k.x = mixpi_tensor_in(t);
    k.low = low;
    k.row = row;
    r = mixpi_device_zero(ctx, row, sizeof *row);
    if (r == MIXP_OK)
        r = mixpi_noted(ctx, "look", ctx->device->kernels->look(&ctx->exec, &k));
    return r == MIXP_OK ? mixpi_download(ctx, found, row, sizeof *found) : r;
}

/* t with the bytes that the step read: it may have written a buffer since, and the backup has the
 * bytes from before. */
static mixp_tensor mixpi_as_read(const mixp_tensor *t) {
    const mixpi_backup *b = t->own.backup;
    mixp_tensor read = *t;
    if (b && mixpi_backup_is_valid(b)) read.data = b->data;
    return read;
}

/* Is a weight that the site reads all zeros? Its result is then zero for that reason. */
static int mixpi_site_zero_weight(mixp_context *ctx, const mixpi_site *site) {
    mixp_look *row = &ctx->watch->rows[MIXPI_ROW_WEIGHT], found;
    int i;
    for (i = 0; i < 2 && site->read[i]; i++) {
        const mixp_tensor read = mixpi_as_read(site->read[i]);
        if (!mixpi_real(read.dtype)) continue;
        if (mixpi_look_now(&read, MIXP_F16, row, &found) != MIXP_OK) return 1;
        if (found.zeros == found.count) return 1;
    }
    return 0;
}

/* Did values vanish between an input and the site, or gradients between the site and an input? */
static void mixpi_judge_vanished(mixp_context *ctx, int number) {
    mixpi_watch *w = ctx->watch;
    mixpi_site *site = mixpi_site_at(ctx, number);
    int i;
    for (i = 0; i < MIXPI_SITE_FROM && site->from[i]; i++) {
        mixpi_site *from = mixpi_site_at(ctx, site->from[i]);
        const int value = mixpi_vanished(mixpi_seen(w, number, MIXPI_LOOK_VALUE),
                                         mixpi_seen(w, site->from[i], MIXPI_LOOK_VALUE), site->low);
        const int grad = mixpi_vanished(mixpi_seen(w, site->from[i], MIXPI_LOOK_GRAD),
                                        mixpi_seen(w, number, MIXPI_LOOK_GRAD), from->low);
        if (!value && !grad) continue;
        if (mixpi_site_is(site, MIXPI_CUTS) || mixpi_site_zero_weight(ctx, site)) return;
        if (value) site->verdict |= MIXPI_SAW_NO_VALUE;
        if (grad) from->verdict |= MIXPI_SAW_NO_GRAD;
    }
}

static void mixpi_settle_vanished(mixp_context *ctx, int number, int sample) {
    const mixpi_site *site = mixpi_site_at(ctx, number);
    const int value = site->verdict & MIXPI_SAW_NO_VALUE;
    if (!(site->verdict & (MIXPI_SAW_NO_VALUE | MIXPI_SAW_NO_GRAD))) return;
    if (!mixpi_site_is_low(site, sample)) return;
    mixpi_site_fall(ctx, number, MIXP_EVENT_FLUSHED,
                    mixpi_seen(ctx->watch, number, value ? MIXPI_LOOK_VALUE : MIXPI_LOOK_GRAD),
                    !value)->flushed = 1.0;     /* all values: zeros are in no count */
}

/* The largest magnitude of a site's values; 0 if that is a constant which the program wrote, such
 * as a mask: it comes no nearer to the end of the range. */
static double mixpi_site_largest(const mixpi_site *site)
{ return site->value.largest < site->written || site->value.largest > site->written
             ? (double)site->value.largest : 0.0; }

/* Why a site that stores its low dtype must fall back. COUNT: it need not. */
static mixp_event_kind mixpi_site_trouble(const mixpi_watch *w, const mixpi_site *site) {
    const mixp_look *value = &site->value, *grad = &site->grad;
    double high = (double)w->high * mixpi_low_largest(site->low);
    /* The Inf came from another site's overflow: see mixpi_settle_rows. */
    if (value->nonfinite && w->settling_bad) return MIXP_EVENT_COUNT;
    if (mixpi_site_largest(site) > high) return MIXP_EVENT_HIGH;
    /* If the loss is not finite, gradients carry no information. */
    if (mixpi_flushes(w, site, value) || (!w->settling_bad && mixpi_flushes(w, site, grad)))
        return MIXP_EVENT_FLUSHED;
    if (site->verdict & MIXPI_SAW_IMPRECISE && !w->settling_bad) return MIXP_EVENT_IMPRECISE;
    return MIXP_EVENT_COUNT;
}

/* Would a site that has fallen back stay in range in its low dtype? A site whose result is f32 in
 * any case reads the region's low dtype again. */
static int mixpi_site_is_clean(const mixpi_watch *w, const mixpi_site *site) {
    double largest = mixpi_low_largest(mixpi_look_low(site)), low = (double)w->low_again * largest;
    if (site->why & MIXPI_FELL_GRAD_LARGE &&
        (double)site->grad.largest >= (double)w->high * largest) return 0;
    if (site->why & MIXPI_FELL_IMPRECISE && w->imprecise > 0.0f) return 0;
    /* Values that are not finite in f32 are no reason to stay in f32. */
    return mixpi_site_largest(site) < low &&
           !mixpi_flushes(w, site, &site->value) && !mixpi_flushes(w, site, &site->grad);
}

/* Will the site store f32 because of its inputs? The sites before it must be settled. */
static int mixpi_site_follows(const mixp_context *ctx, const mixpi_site *site) {
    int i;
    for (i = 0; site->carries && i < MIXPI_SITE_FROM && site->from[i]; i++) {
        const mixpi_site *from = mixpi_site_at(ctx, site->from[i]);
        if (mixpi_site_fell(from) || (from->verdict & MIXPI_SAW_RAISED)) return 1;
    }
    return 0;
}

/* A probe stored f32, and so shows which sites would leave the range of their low dtype. Such
 * a site falls back unless another site makes it store f32. */
static void mixpi_settle_probed(mixp_context *ctx, int number) {
    const mixpi_watch *w = ctx->watch;
    mixpi_site *site = mixpi_site_at(ctx, number);
    const double most = mixpi_low_largest(site->low);
    const double largest = mixpi_site_largest(site);
    if (mixpi_site_follows(ctx, site)) site->verdict |= MIXPI_SAW_RAISED;
    if (site->fallen || site->verdict & MIXPI_SAW_RAISED) return;
    if (site->dtype != MIXP_F32 || largest <= (double)w->high * most) return;
    mixpi_site_fall(ctx, number, largest > most ? MIXP_EVENT_OVERFLOW : MIXP_EVENT_HIGH,
                    &site->value, 0);
}

/* Did the site fall back because of its gradient, of which the sample says nothing, as that of an
 * evaluation? */
static int mixpi_grad_is_unseen(const mixpi_watch *w, const mixpi_site *site) {
    if (!(site->why & MIXPI_FELL_GRAD)) return 0;
    return w->settling_bad || site->grad.nonfinite || !(site->verdict & MIXPI_SAW_GRAD);
}

/* The readers of a site that no longer rounds may now round instead: measures all sites soon. */
static void mixpi_measure_all(mixpi_watch *w) {
    w->inspect_all = 1;
    w->since = 2 * w->every;
}

static void mixpi_settle_site(mixp_context *ctx, int number, int sample) {
    mixpi_watch *w = ctx->watch;
    mixpi_site *site = mixpi_site_at(ctx, number);
    mixp_event_kind trouble;
    int of_grad;
    if (!mixpi_seen(w, number, MIXPI_LOOK_VALUE)->count) return;
    site->value = *mixpi_seen(w, number, MIXPI_LOOK_VALUE);
    site->grad = *mixpi_seen(w, number, MIXPI_LOOK_GRAD);
    /* A cast that was left out has no gradient of its own; its gradient is the producer's. */
    if (!site->grad.count && site->fallen && site->from[0] && mixpi_site_is(site, MIXPI_IS_CAST))
        site->grad = *mixpi_seen(w, site->from[0], MIXPI_LOOK_GRAD);
    site->samples++;
    if (site->low == MIXP_F32 && site->fallen < 2) return;  /* f32 in any case */
    if (site->pinned || site->changed >= sample) return;
    if (mixpi_site_is_low(site, sample)) {
        trouble = mixpi_site_trouble(w, site);
        of_grad = trouble == MIXP_EVENT_FLUSHED && !mixpi_flushes(w, site, &site->value);
        if (trouble != MIXP_EVENT_COUNT)
            mixpi_site_fall(ctx, number, trouble, of_grad ? &site->grad : &site->value, of_grad);
        if (trouble == MIXP_EVENT_IMPRECISE) mixpi_measure_all(w);
        return;
    }
    if (w->settling_probe) mixpi_settle_probed(ctx, number);
    if ((site->verdict & (MIXPI_SAW_INSPECTED | MIXPI_SAW_ROUGH)) == MIXPI_SAW_INSPECTED)
        site->why &= ~MIXPI_FELL_IMPRECISE;
    if (!site->fallen || mixpi_is_low(site->dtype)) return;
    if (w->settling_bad && site->value.nonfinite) return;  /* its finite values are a part */
    if (mixpi_grad_is_unseen(w, site)) return;
    if (!mixpi_site_is_clean(w, site)) site->clean = 0;
    else if (site->clean < MIXPI_SITE_COUNT) site->clean++;
    if (site->clean < mixpi_clean_needed(w, site)) return;
    site->fallen = site->why = 0;
    site->changed = w->begun;
    ctx->capture.sites_moved++;
    mixpi_event_add(ctx, MIXP_EVENT_BACK, number, &site->value, MIXP_ORIGIN_UNKNOWN);
}

/* An operand of a linear that was measured in this sample: falls back, or returns. */
static void mixpi_settle_operand(mixp_context *ctx, int number, int role) {
    mixpi_watch *w = ctx->watch;
    mixpi_site *site = mixpi_site_at(ctx, number);
    mixpi_lossy *o = &site->operands[role];
    const int relapses = o->falls > 1 ? o->falls - 1 : 0;
    const int64_t needed = mixpi_min((int64_t)w->clean << (relapses < 20 ? relapses : 20),
                                     MIXPI_LOSSY_CLEAN);
    mixpi_happening *e;
    if (o->fallen) {
        o->clean = o->excess <= 0.8 ? o->clean + 1 : 0;
        if (o->clean < needed) return;
    } else if (!(o->excess > 1.0)) return;
    o->fallen = !o->fallen;
    o->clean = 0;
    if (o->fallen && o->falls < MIXPI_LOSSY_FALLS) o->falls++;
    e = mixpi_event_add(ctx, o->fallen ? MIXP_EVENT_OPERAND : MIXP_EVENT_OPERAND_BACK, number,
                        &site->value, MIXP_ORIGIN_UNKNOWN);
    e->operand = 1 + role;
    e->error = o->error;
    e->clipped = o->clipped;
}

/* Settles the operands of a linear, and makes them ready for the next sample. A loss that is not
 * finite says nothing about them. */
static void mixpi_settle_operands(mixp_context *ctx, int number) {
    mixpi_site *site = mixpi_site_at(ctx, number);
    int i;
    for (i = 0; i < MIXPI_ROLES; i++) {
        mixpi_lossy *o = &site->operands[i];
        if (!o->seen) continue;
        if (!ctx->watch->settling_bad) mixpi_settle_operand(ctx, number, i);
        o->seen = 0;
        o->error = o->clipped = o->excess = 0.0;
    }
}

/* Is a weight or a buffer that the site reads not finite? Looks at it at once: only after a
 * failure. */
static int mixpi_site_bad_weight(mixp_context *ctx, const mixpi_site *site) {
    mixp_look *row = &ctx->watch->rows[MIXPI_ROW_WEIGHT], found;
    int i;
    for (i = 0; i < 2 && site->read[i]; i++) {
        const mixp_tensor read = mixpi_as_read(site->read[i]);
        if (!mixpi_real(read.dtype)) continue;
        if (mixpi_look_now(&read, MIXP_F16, row, &found) != MIXP_OK) return 0;
        if (found.nonfinite) return 1;
    }
    return 0;
}

/* A cast or dropout between site `from` and its reader `number` with a non-finite result; 0 if
 * there is none. Names and identities of sites ignore casts and dropout. */
static int mixpi_bad_between(const mixp_context *ctx, int from, int number) {
    const mixpi_watch *w = ctx->watch;
    const mixpi_site *reader = mixpi_site_at(ctx, number);
    int n;
    if (mixpi_site_is(reader, MIXPI_IS_CAST | MIXPI_IS_DROPOUT)) return 0;
    for (n = 1; n <= w->n_sites; n++) {
        const mixpi_site *site = mixpi_site_at(ctx, n);
        if (site->from[0] != from || !mixpi_seen(w, n, MIXPI_LOOK_VALUE)->nonfinite) continue;
        if (mixpi_site_is(site, MIXPI_IS_CAST | MIXPI_IS_DROPOUT)) return n;
    }
    return 0;
}

/* Returns a site that `number`, whose result is not finite, reads and whose result is not finite; 0
 * if `number` reads no such site. The last candidate is a site whose result is not looked at,
 * because it is judged by what it stores inside its call. */
static int mixpi_bad_input(const mixp_context *ctx, int number) {
    const mixpi_site *site = mixpi_site_at(ctx, number);
    int i, bad = 0;
    if (!number) return 0;
    for (i = 0; i < MIXPI_SITE_FROM && site->from[i] && !bad; i++)
        if (mixpi_seen(ctx->watch, site->from[i], MIXPI_LOOK_VALUE)->nonfinite)
            bad = site->from[i];
    for (i = 0; i < MIXPI_SITE_FROM && site->from[i] && !bad; i++)
        bad = mixpi_bad_between(ctx, site->from[i], number);
    for (i = 0; i < MIXPI_SITE_FROM && site->from[i] && !bad; i++)
        if (mixpi_site_at(ctx, site->from[i])->inside) bad = site->from[i];
    return bad;
}

/* The site of a non-finite loss: the input of the first non-finite product with the loss scale,
 * otherwise the last non-finite scalar; 0 if all losses are finite. */
static int mixpi_bad_loss(const mixp_context *ctx) {
    const mixpi_watch *w = ctx->watch;
    int n, scalar = 0;
    for (n = 1; n <= w->n_sites; n++) {
        const mixpi_site *site = mixpi_site_at(ctx, n);
        const int bad = mixpi_seen(w, n, MIXPI_LOOK_VALUE)->nonfinite != 0;
        if (mixpi_site_is(site, MIXPI_SCALES_LOSS) && mixpi_seen(w, n, MIXPI_LOOK_VALUE)->count) {
            const int loss = bad ? mixpi_bad_input(ctx, n) : 0;
            if (loss) return loss;
            scalar = -1;
        }
        if (bad && site->scalar && scalar >= 0 &&
            (!scalar || site->turn > mixpi_site_at(ctx, scalar)->turn)) scalar = n;
    }
    return scalar > 0 ? scalar : 0;
}

/* Finds a cast that autocast made for site `number`, that overflowed, and whose input is finite and
 * comes from no site. Returns the number of the cast's site; 0 = there is none. Another input of
 * site `number`, such as a mask, may hold Inf. */
static int mixpi_bad_cast(const mixp_context *ctx, int number) {
    const mixpi_watch *w = ctx->watch;
    int n;
    for (n = 1; number && n <= w->n_sites; n++)
        if (mixpi_site_number(w, n)->reader == number &&
            mixpi_seen(w, n, MIXPI_LOOK_VALUE)->nonfinite &&
            !mixpi_seen(w, n, MIXPI_LOOK_DATA)->nonfinite) return n;
    return 0;
}

/* Is the Inf that site `number` stored one that the program wrote? No if a number that the site
 * read was beyond the range of its low dtype, too. */
static int mixpi_site_asked(const mixp_context *ctx, int number) {
    const mixpi_site *site = mixpi_site_at(ctx, number);
    int i;
    if (mixp_bits_of_f32(site->written) != 0x7F800000u ||
        mixpi_seen(ctx->watch, number, MIXPI_LOOK_DATA)->saturated) return 0;
    for (i = 0; i < MIXPI_SITE_FROM && site->from[i]; i++)
        if (mixpi_seen(ctx->watch, site->from[i], MIXPI_LOOK_VALUE)->saturated) return 0;
    return 1;
}

/* Finds where the NaN of a loss began: the site whose inputs hold no NaN. The loss itself if that
 * is Inf. */
static int mixpi_trace_nan(const mixp_context *ctx, int loss) {
    int left = ctx->watch->n_sites, at = loss, before = loss;
    while (before && left--) {
        const mixpi_site *site;
        int i;
        at = before;
        site = mixpi_site_at(ctx, at);
        before = 0;
        for (i = 0; i < MIXPI_SITE_FROM && site->from[i] && !before; i++)
            if (mixpi_seen(ctx->watch, site->from[i], MIXPI_LOOK_VALUE)->nan) before = site->from[i];
    }
    return at;
}

/* Finds where a non-finite loss began: follows non-finite results back from the loss, to a site
 * whose inputs are finite. A mask of -Inf that softmax made finite again is not on this path. */
static int mixpi_trace(const mixp_context *ctx, int loss) {
    int left = ctx->watch->n_sites, at = loss, before = loss;
    while (before && left--) {
        at = before;
        before = mixpi_bad_input(ctx, at);
    }
    before = mixpi_bad_cast(ctx, at);
    return before ? before : at;
}

/* Did the site itself make non-finite values from finite ones? began: as in mixpi_judge_origin. */
static int mixpi_site_overflowed(mixp_context *ctx, int number, int began) {
    const mixpi_watch *w = ctx->watch;
    const mixpi_site *site = mixpi_site_at(ctx, number);
    if (!mixpi_seen(w, number, MIXPI_LOOK_VALUE)->nonfinite) return 0;
    if (mixpi_site_is(site, MIXPI_SHRINKS)) return 0;
    if (mixpi_site_is(site, MIXPI_MAY_MEAN) && number != began) return 0;
    if (mixpi_seen(w, number, MIXPI_LOOK_DATA)->nonfinite) return 0;
    if (mixpi_site_asked(ctx, number)) return 0;
    if (mixpi_bad_input(ctx, number) || mixpi_bad_cast(ctx, number)) return 0;
    return !mixpi_site_bad_weight(ctx, site);
}

/* The last site, in the order of the step, with a non-finite value in row `which`, or 0. */
static int mixpi_last_bad(const mixp_context *ctx, int which) {
    const mixpi_watch *w = ctx->watch;
    int n, best = 0;
    for (n = 1; n <= w->n_sites; n++) {
        if (!mixpi_seen(w, n, which)->nonfinite) continue;
        if (!best || mixpi_site_at(ctx, n)->turn > mixpi_site_at(ctx, best)->turn)
            best = n;
    }
    return best;
}

/* Did a site with a non-finite scalar result leave the range of a low dtype? Yes if what it stored
 * inside its call overflowed, or if the result is low and the operator is not one, like a division
 * or a logarithm, whose f32 result would not be finite either. */
static int mixpi_site_left_range(const mixpi_watch *w, int number) {
    const mixpi_site *site = mixpi_site_number(w, number);
    if (site->inside) return mixpi_seen(w, number, MIXPI_LOOK_VALUE)->nonfinite != 0;
    return mixpi_is_low(site->dtype) && !mixpi_site_is(site, MIXPI_SHRINKS | MIXPI_MAY_MEAN);
}

static mixp_origin mixpi_forward_origin(mixp_context *ctx, int number) {
    const mixpi_site *site = mixpi_site_at(ctx, number);
    if (mixpi_seen(ctx->watch, number, MIXPI_LOOK_DATA)->nonfinite)
        return MIXP_ORIGIN_INPUT;
    if (mixpi_site_bad_weight(ctx, site)) return MIXP_ORIGIN_WEIGHT;
    return site->scalar && !mixpi_site_left_range(ctx->watch, number) ? MIXP_ORIGIN_LOSS : MIXP_ORIGIN_FORWARD;
}

/* Where the first non-finite value of this sample arose, as seen by this rank. loss: the site of a
 * non-finite loss; began: the site where that began; or both are 0. */
static mixp_origin mixpi_judge_origin(mixp_context *ctx, int loss, int began, int *site) {
    const int grad = mixpi_last_bad(ctx, MIXPI_LOOK_GRAD);
    const int leaf = mixpi_last_bad(ctx, MIXPI_LOOK_LEAF);
    *site = began;
    if (began && mixpi_site_asked(ctx, began)) {
        *site = mixpi_trace_nan(ctx, loss);
        return MIXP_ORIGIN_MASK;
    }
    if (began) return mixpi_forward_origin(ctx, began);
    *site = grad;
    if (leaf && (!grad || mixpi_site_at(ctx, leaf)->turn > mixpi_site_at(ctx, grad)->turn))
        *site = leaf;
    return *site ? MIXP_ORIGIN_BACKWARD : MIXP_ORIGIN_UNKNOWN;
}

/* Computes the share of a site's variation that rounding lost. A variation below a millionth of the
 * largest value does not count. */
static void mixpi_judge_precision(const mixpi_watch *w, mixpi_site *site, int number) {
    const mixp_look *row = mixpi_seen(w, number, MIXPI_LOOK_LOSS);
    const double size = 1e-6 * (double)mixpi_seen(w, number, MIXPI_LOOK_VALUE)->largest;
    const double lost = (double)row->largest;
    float varied;
    double all;
    site->lost = 0.0;
    memcpy(&varied, &row->nan, sizeof varied);      /* this row holds two floats */
    all = (double)varied;
    if (!(all > size * size) || !mixpi_f64_is_finite(all) || !mixpi_f64_is_finite(lost)) return;
    site->lost = sqrt(lost / all);
    site->verdict |= MIXPI_SAW_INSPECTED;
    if (site->lost > 0.5 * (double)w->imprecise) site->verdict |= MIXPI_SAW_ROUGH;
    if (site->lost > (double)w->imprecise) site->verdict |= MIXPI_SAW_IMPRECISE;
}

/* Takes what a device measured of a linear's operands, before ranks add the counts of all rows. */
static void mixpi_judge_operands(mixpi_watch *w, mixpi_site *site, int number) {
    mixp_look *row = &w->seen[MIXPI_ROW_SITES + (number - 1) * MIXPI_LOOKS + MIXPI_LOOK_LOSS];
    mixp_losses found;
    int i;
    memcpy(&found, &row->count, sizeof found);
    memset(&row->count, 0, sizeof found);
    for (i = 0; i < MIXPI_ROLES; i++)
        if (found.seen >> i & 1)
            mixpi_lossy_join(&site->operands[i], found.error[i], found.clipped[i]);
}

/* Did this rank see the gradient of a site? A cast that was left out has no gradient of its own: it
 * has that of its producer, or none at all. */
static int mixpi_saw_grad(const mixpi_watch *w, const mixpi_site *site, int number) {
    if (mixpi_seen(w, number, MIXPI_LOOK_GRAD)->count) return 1;
    if (!mixpi_site_is(site, MIXPI_IS_CAST)) return 0;
    return !site->from[0] || mixpi_seen(w, site->from[0], MIXPI_LOOK_GRAD)->count;
}

/* Judges the sample on this rank only: other ranks do not know how the sites are connected here. */
static void mixpi_judge(mixp_context *ctx, mixp_origin *origin, int *at) {
    const int loss = mixpi_bad_loss(ctx);
    const int began = loss ? mixpi_trace(ctx, loss) : 0;
    const int known = ctx->watch->n_sites;
    int n;
    *origin = mixpi_judge_origin(ctx, loss, began, at);
    for (n = 1; n <= known; n++) mixpi_site_at(ctx, n)->verdict = 0;
    for (n = 1; n <= known; n++) {
        if (mixpi_site_can_fall(mixpi_site_at(ctx, n)) && mixpi_site_overflowed(ctx, n, began))
            mixpi_site_at(ctx, n)->verdict |= MIXPI_SAW_OVERFLOW;
        if (mixpi_saw_grad(ctx->watch, mixpi_site_at(ctx, n), n))
            mixpi_site_at(ctx, n)->verdict |= MIXPI_SAW_GRAD;
        mixpi_judge_vanished(ctx, n);
        mixpi_judge_precision(ctx->watch, mixpi_site_at(ctx, n), n);
        mixpi_judge_operands(ctx->watch, mixpi_site_at(ctx, n), n);
    }
}

/* Decides, once w->seen holds the rows. origin, at: where the skip began, as all ranks agreed. */
static void mixpi_settle_rows(mixp_context *ctx, int sample, mixp_origin origin, int at) {
    mixpi_watch *w = ctx->watch;
    int n, known = w->n_sites;
    w->settled = 1;
    w->settling_bad = mixpi_began_forward(origin);
    w->inspect_all |= w->settling_bad;
    /* A step that walked nothing back, such as an evaluation, cannot be the skipped one. */
    if (w->seen[MIXPI_ROW_WIDE].count + w->seen[MIXPI_ROW_NARROW].count > 0) {
        w->looked = 1;
        if (!w->found) {
            w->found = (int)origin;
            w->found_site = at;
        }
    }
    for (n = 1; n <= known; n++) {
        const mixpi_site *site = mixpi_site_at(ctx, n);
        if (site->changed >= sample || !(site->verdict & MIXPI_SAW_OVERFLOW)) continue;
        if (mixpi_site_can_fall(site))
            mixpi_site_fall(ctx, n, MIXP_EVENT_OVERFLOW, mixpi_seen(w, n, MIXPI_LOOK_VALUE), 0);
    }
    for (n = 1; n <= known && !w->settling_bad; n++) mixpi_settle_vanished(ctx, n, sample);
    for (n = 1; n <= known; n++) mixpi_settle_site(ctx, n, sample);
    for (n = 1; n <= known; n++) mixpi_settle_operands(ctx, n);
}

/* Adds the events that are reported once: pins that took effect, sites without room. */
static void mixpi_settle_events(mixp_context *ctx) {
    mixpi_watch *w = ctx->watch;
    int n;
    for (n = 1; n <= w->n_sites; n++) {
        mixpi_site *site = mixpi_site_at(ctx, n);
        if (!site->pinned || site->pin_told) continue;
        site->pin_told = 1;
        mixpi_event_add(ctx, MIXP_EVENT_PINNED, n, &site->value, MIXP_ORIGIN_UNKNOWN);
    }
    if (w->full && !w->full_told)
        mixpi_event_add(ctx, MIXP_EVENT_FULL, 0, &mixpi_no_look, MIXP_ORIGIN_UNKNOWN);
    w->full_told = w->full;
}

/* Has every optimizer made an update under the guard? Two networks trained in turn have two kinds
 * of steps, and a pattern may fit a site of either kind. */
static int mixpi_all_updated(const mixp_context *ctx) {
    const mixp_optimizer *opt = (const mixp_optimizer *)ctx->training.optimizers;
    for (; opt; opt = opt->next)
        if (!(ctx->watch->met >> opt->bit & 1)) return 0;
    return 1;
}

/* Reports, once, each pattern that fits no site after complete steps of all optimizers. */
static mixp_result mixpi_settle_pins(mixp_context *ctx) {
    mixpi_watch *w = ctx->watch;
    int i;
    if (!w->settled || !mixpi_all_updated(ctx)) return MIXP_OK;
    for (i = 0; i < w->n_pins; i++) {
        if (w->pins[i].fits) continue;
        w->pins[i].fits = 1;
        return mixp_context_fail(ctx, MIXP_ERR_ARGUMENT,
                                 "mixp_guard_pin '%.80s': no site has this name after a complete "
                                 "step; mixp_site lists the names; the first is '%.90s'",
                                 w->pins[i].pattern,
                                 w->n_sites ? mixpi_site_number(w, 1)->name : "");
    }
    return MIXP_OK;
}

static mixp_result mixpi_settle_now(mixp_context *ctx, int sample, uint64_t step, int probe) {
    mixp_origin origin;
    int at;
    mixp_result r;
    ctx->watch->settling_probe = probe;
    mixpi_judge(ctx, &origin, &at);
    r = mixpi_seen_share(ctx, &origin, &at);
    if (r != MIXP_OK) return r;
    ctx->watch->event_step = step;
    mixpi_settle_rows(ctx, sample, origin, at);
    mixpi_settle_events(ctx);
    return MIXP_OK;
}

/* Bytes of the rows in use. */
static size_t mixpi_rows_used(const mixpi_watch *w) { return mixpi_rows_bytes(w->n_sites); }

/* Settles a sample. If the device can post, the sample is sent first and settled when the step
 * after the next begins, or, with several ranks, at the next update. This delay is constant, so
 * every run makes the same decisions. */
static mixp_result mixpi_guard_settle(mixp_context *ctx) {
    mixpi_watch *w = ctx->watch;
    const mixp_device *d = ctx->device;
    const int posted = w->posted, fresh = w->fresh, probe = w->fresh_probe;
    mixp_result r = MIXP_OK;
    w->posted = w->fresh = w->fresh_probe = 0;
    if (posted || fresh) r = mixpi_rows_reach(ctx, w->n_sites);
    if (posted && r == MIXP_OK) {
        r = mixpi_noted(ctx, "guard", d->collect(&ctx->exec, 0, w->seen, w->posted_bytes));
        if (r == MIXP_OK) r = mixpi_settle_now(ctx, posted, w->posted_step, w->posted_probe);
    }
    if (r != MIXP_OK || !fresh) return r;
    w->posted_bytes = mixpi_rows_used(w);
    w->posted_step = w->rows_step;
    w->posted_probe = probe;
    if (d->post) {
        r = mixpi_noted(ctx, "guard", d->post(&ctx->exec, 0, w->rows, w->posted_bytes));
        w->posted = r == MIXP_OK ? fresh : 0;
        return r;
    }
    r = mixpi_download(ctx, w->seen, w->rows, w->posted_bytes);
    return r == MIXP_OK ? mixpi_settle_now(ctx, fresh, w->rows_step, probe) : r;
}

/* Reports a divergence: step after step is skipped, and no fallback can help. */
static mixp_result mixpi_guard_diverged(mixp_context *ctx, int32_t skips) {
    const mixpi_watch *w = ctx->watch;
    const mixp_origin origin = (mixp_origin)w->origin;
    return mixp_context_fail(
        ctx, MIXP_ERR_DIVERGED,
        "%d steps in a row were skipped because of their forward pass, and no site is left to "
        "fall back. No loss scale prevents this. The first site was '%.90s': %s",
        (int)skips, w->origin_site ? mixpi_site_at(ctx, w->origin_site)->name : "?",
        mixp_origin_text(origin));
}

/* Lets the site of an overflowing gradient fall back if the scale cannot usefully go lower. */
static void mixpi_guard_at_floor(mixp_context *ctx, float scale) {
    const mixpi_watch *w = ctx->watch;
    mixpi_site *site = mixpi_site_at(ctx, w->origin_site);
    if (w->origin != MIXP_ORIGIN_BACKWARD || scale > 1.0f || !site) return;
    /* A gradient of a low parameter overflowed: it stays low whatever the site stores. */
    if (!site->grad.nonfinite) return;
    if (site->low == MIXP_F32 || site->dtype != site->low || !mixpi_site_can_fall(site))
        return;
    mixpi_site_fall(ctx, w->origin_site, MIXP_EVENT_OVERFLOW, &site->grad, 1);
}

/* Bits of the optimizers that a scaler's newest update covered. */
static int32_t mixpi_update_bits(const mixp_scaler *s) {
    const mixp_optimizer *opt = s->checked;
    int32_t bits = 0;
    for (; mixpi_is_checked(s, opt); opt = opt->next_checked) bits |= (int32_t)1 << opt->bit;
    return bits;
}

/* Counts, for each optimizer of the update, the consecutive skips that began in the forward pass
 * and that no fallback ended. Returns the largest count. */
static int32_t mixpi_guard_count(mixpi_watch *w, int32_t bits, int forward, int cured) {
    int32_t most = 0;
    int i;
    for (i = 0; i < MIXPI_OPTIMIZER_BITS; i++) {
        if (!(bits >> i & 1)) continue;
        if (cured) w->barren[i] = 0;
        else if (forward && w->barren[i] < INT32_MAX) w->barren[i]++;
        if (w->barren[i] > most) most = w->barren[i];
    }
    return most;
}

/* The scale of the newest update's gradients. */
static float mixpi_scale_used(const mixp_scaler_state *state)
{ return state->past[0] > 0.0f ? state->past[0] : state->scale; }

/* Notes where the skip of an update began, and forces samples of the optimizers' next steps; these
 * samples are probes if an ordinary sample did not suffice. Returns 1 if the skip began in the
 * forward pass. */
static int mixpi_guard_skipped(mixpi_watch *w, const mixp_scaler_state *state, int32_t bits) {
    int forward, bad;
    if (w->looked && w->whole && !w->origin && mixpi_scale_used(state) < 1.0f)
        w->origin = MIXP_ORIGIN_UNSCALE;
    forward = mixpi_began_forward((mixp_origin)w->origin);
    bad = forward || state->forgiven > 0;
    w->force |= bits;
    w->forced = 0;
    w->probe &= ~bits;
    if (bad && !w->probed) w->probe |= w->deep & bits;
    w->deep = bad ? w->deep | bits : w->deep & ~bits;
    return forward;
}

/* After a scaler's update: records where a skip began, and whether a site fell back for that. */
static mixp_result mixpi_guard_after(mixp_context *ctx, const mixp_scaler_state *state,
                                     int32_t bits) {
    mixpi_watch *w = ctx->watch;
    const int acted = w->acted;
    int32_t barren;
    int forward = 0;
    w->origin = state->skipped ? w->found : MIXP_ORIGIN_UNKNOWN;
    w->origin_site = state->skipped ? w->found_site : 0;
    if (state->skipped) forward = mixpi_guard_skipped(w, state, bits);
    w->found = w->found_site = w->looked = w->acted = w->probed = 0;
    barren = mixpi_guard_count(w, bits, forward, !state->skipped || (forward && acted));
    if (!state->skipped) {
        w->force &= ~bits;
        w->deep &= ~bits;
        w->probe &= ~bits;
        return MIXP_OK;
    }
    w->event_step = w->updated_step;
    mixpi_event_add(ctx, MIXP_EVENT_SKIP, w->origin_site,
                    w->origin_site ? &mixpi_site_at(ctx, w->origin_site)->value
                                   : &mixpi_no_look,
                    (mixp_origin)w->origin)->also = acted;
    mixpi_guard_at_floor(ctx, state->scale);
    if (w->patience < 0 || !forward) return MIXP_OK;
    return barren >= w->patience || w->origin == MIXP_ORIGIN_WEIGHT
         ? mixpi_guard_diverged(ctx, barren) : MIXP_OK;
}

/* An update closes the window of steps that belong to it. */
static void mixpi_guard_turn(mixpi_watch *w) {
    const int seen = w->in_turn && !w->unseen;
    w->missed |= w->in_turn && w->unseen;
    if (!seen && w->since < INT32_MAX) w->since++;
    if (seen) {
        w->since = 1;
        w->drawn = (int32_t)(((uint32_t)w->drawn + 1u) & 0x7FFFFFFFu);
    }
    w->in_turn = w->idle = w->window = w->walked = w->taken = 0;
    if (seen) w->inspect_all = 0;
    w->whole = !w->unseen;
    w->unseen = 0;
    if (!w->force) w->forced = 0;
    else if (w->forced <= 64) w->forced++;
    if (w->forced <= 64) return;
    /* The skipped optimizer makes no more updates. */
    w->force = w->deep = w->probe = w->forced = 0;
}

/* Hook before an update: settles available samples first, so that the scaler forgives skips of the
 * sites that fall back now. With several ranks, samples are always settled here, because ranks make
 * the same updates but not the same steps. A device that posts is waited for only after a skip. */
static mixp_result mixpi_guard_updating(mixp_context *ctx) {
    mixpi_watch *w = ctx->watch;
    const int late = ctx->device->post && mixpi_world(ctx) == 1, waits = w->force && w->fresh;
    mixp_result r;
    mixpi_guard_turn(w);
    if (late && !waits) return MIXP_OK;
    r = mixpi_guard_settle(ctx);
    return late && r == MIXP_OK ? mixpi_guard_settle(ctx) : r;
}

/* After a scaler's update. If the device can post, a step's result arrives one step later. */
static mixp_result mixpi_guard_scaled(mixp_context *ctx, const mixp_scaler *s) {
    mixpi_watch *w = ctx->watch;
    const mixp_device *d = ctx->device;
    mixp_scaler_state state;
    mixp_result r = mixpi_settle_pins(ctx);
    if (!d->post) {
        w->updated_step = ctx->step;
        if (r == MIXP_OK) r = mixpi_scaler_get(s, &state);
        return r == MIXP_OK ? mixpi_guard_after(ctx, &state, mixpi_update_bits(s)) : r;
    }
    if (w->posted_scaler) {
        r = mixpi_noted(ctx, "guard", d->collect(&ctx->exec, 1, &state, sizeof state));
        if (r == MIXP_OK) r = mixpi_guard_after(ctx, &state, w->posted_bits);
    }
    w->updated_step = ctx->step;
    w->posted_scaler = NULL;
    w->posted_bits = mixpi_update_bits(s);
    if (r == MIXP_OK)
        r = mixpi_noted(ctx, "guard", d->post(&ctx->exec, 1, s->state, sizeof state));
    if (r == MIXP_OK) w->posted_scaler = s;
    return r;
}

/* Hook after an update. scaler NULL: a step without a scaler. */
static mixp_result mixpi_guard_updated(mixp_context *ctx, void *scaler) {
    const mixp_scaler *s = (const mixp_scaler *)scaler;
    mixp_result r = MIXP_OK;
    ctx->watch->met |= s ? mixpi_update_bits(s) : INT32_MAX;
    if (s) return mixpi_guard_scaled(ctx, s);
    r = mixpi_guard_updating(ctx);
    return r == MIXP_OK ? mixpi_settle_pins(ctx) : r;
}

/* Settles everything at once, without the usual delay. Waits for the device. */
static mixp_result mixpi_guard_catch_up(mixp_context *ctx) {
    mixpi_watch *w = ctx->watch;
    const mixp_scaler *s;
    mixp_scaler_state state;
    mixp_result r;
    if (!mixpi_guard_on(ctx)) return MIXP_OK;
    /* One rank may save on its own, so it must not ask the others. */
    if (mixpi_world(ctx) > 1) return MIXP_OK;
    r = mixpi_guard_settle(ctx);
    if (r == MIXP_OK && w->posted) r = mixpi_guard_settle(ctx);
    s = (const mixp_scaler *)w->posted_scaler;
    w->posted_scaler = NULL;
    if (r != MIXP_OK || !s) return r;
    r = mixpi_scaler_get(s, &state);
    return r == MIXP_OK ? mixpi_guard_after(ctx, &state, w->posted_bits) : r;
}

/* --- on and off ---------------------------------------------------------------------------- */

/* The context's watch, made at the first call without memory for sites. */
static mixpi_watch *mixpi_watch_of(mixp_context *ctx) {
    mixpi_watch *w = ctx->watch;
    if (w) return w;
    w = (mixpi_watch *)mixpi_host_alloc(ctx, sizeof *w);
    if (!w) return NULL;
    return ctx->watch = w;
}

/* Returns what is wrong with a look, or NULL. */
static const char *mixpi_look_wrong(const mixp_tensor *t, mixp_dtype low, const mixp_look *out) {
    mixp_format f;
    if (!out) return "out is NULL: pass a mixp_look";
    if (!mixpi_real(t->dtype)) return "the tensor must be f32, f16 or bf16";
    if ((unsigned)low >= MIXP_DTYPE_COUNT) return "low is not a mixp_dtype";
    f = mixp_format_of(low);
    if (f.special > MIXP_SPECIAL_FNUZ || low == MIXP_F64)
        return "low must be a floating-point dtype of 8 bits to 32";
    return t->ctx->device->kernels->look ? NULL : "the device has no kernel `look`";
}

MIXPI_SELDOM
MIXPREC_API mixp_result mixp_look_at(const mixp_tensor *t, mixp_dtype low, mixp_look *out) {
    const char *wrong;
    mixpi_watch *w;
    mixp_result r = mixpi_tensor_whole(t, "mixp_look_at");
    if (r != MIXP_OK) return r;
    wrong = mixpi_look_wrong(t, low, out);
    if (wrong)
        return mixp_context_fail(t->ctx, MIXP_ERR_ARGUMENT, "mixp_look_at: %s", wrong);
    w = mixpi_watch_of(t->ctx);
    if (w && !w->row) w->row = (mixp_look *)mixpi_device_alloc(t->ctx, sizeof *w->row);
    if (!w || !w->row) return MIXP_ERR_MEMORY;
    return mixpi_look_now(t, low, w->row, out);
}

/* Makes the list of chunks long enough for n sites. */
static mixp_result mixpi_chunks_reach(mixp_context *ctx, int n) {
    mixpi_watch *w = ctx->watch;
    const size_t chunks = ((size_t)n + MIXPI_SITE_CHUNK - 1) / MIXPI_SITE_CHUNK;
    mixpi_site **sites;
    if (n <= w->capacity) return MIXP_OK;
    sites = (mixpi_site **)mixpi_host_alloc(ctx, chunks * sizeof *sites);
    if (!sites) return MIXP_ERR_MEMORY;
    if (w->room) memcpy(sites, w->sites, (size_t)w->room / MIXPI_SITE_CHUNK * sizeof *sites);
    w->sites = sites;
    return MIXP_OK;
}

/* Allocates the tables for up to n sites, at the first call of an observer and at the first of a
 * guard, whose max_sites replaces the observer's. The tables grow with the sites. */
static mixp_result mixpi_watch_room(mixp_context *ctx, int n) {
    mixpi_watch *w = ctx->watch;
    const int before = w->capacity;
    mixp_result r;
    if (!w->events)
        w->events =
            (mixpi_happening *)mixpi_owner_new(ctx, MIXPI_FIRST_EVENTS * sizeof *w->events);
    if (!w->events) return MIXP_ERR_MEMORY;
    if (!w->events_room) w->events_room = MIXPI_FIRST_EVENTS;
    if (n < w->n_sites) n = w->n_sites;
    r = mixpi_chunks_reach(ctx, n);
    if (r != MIXP_OK) return r;
    w->capacity = n;
    r = mixpi_rows_reach(ctx, 1);
    /* Sends any memory of a scaler's size: the host's copy then has its memory before an update. */
    if (r == MIXP_OK && ctx->device->post && !w->posted_scaler)
        r = mixpi_noted(ctx, "guard",
                        ctx->device->post(&ctx->exec, 1, w->rows, sizeof(mixp_scaler_state)));
    if (r != MIXP_OK) w->capacity = before;
    else w->full = 0;           /* an observer's sites may have found no room */
    return r;
}

/* Returns the description with all defaults filled in. */
static mixp_guard_desc mixpi_guard_resolved(const mixp_guard_desc *desc) {
    mixp_guard_desc d;
    memset(&d, 0, sizeof d);
    if (desc) d = *desc;
    if (!d.every) d.every = 16;
    if (!d.clean) d.clean = 4;
    if (!mixp_bits_of_f32(d.high)) d.high = 0.25f;
    if (!mixp_bits_of_f32(d.low_again)) d.low_again = d.high * 0.25f;
    if (!mixp_bits_of_f32(d.flushed)) d.flushed = 0.02f;
    if (!mixp_bits_of_f32(d.imprecise)) d.imprecise = 0.05f;
    if (!d.patience) d.patience = 20;
    if (!d.max_sites) d.max_sites = 4096;
    return d;
}

/* Returns what is wrong with the description, or NULL. Comparisons are negated so that NaNs
 * fail. */
static const char *mixpi_guard_wrong(const mixp_context *ctx, const mixp_guard_desc *d,
                                     int asked) {
    const int most = 1 << 20, now = ctx->watch ? ctx->watch->most_sites : 0;
    if (d->every < 1 || d->every > most) return "every must lie in 1 to 2^20";
    if (d->clean < 1 || d->clean > most) return "clean must lie in 1 to 2^20";
    if (!(d->high > 0.0f && d->high < 1.0f)) return "high must lie between 0 and 1";
    if (!(d->low_again > 0.0f && d->low_again < d->high))
        return "low_again must lie between 0 and high";
    if (!(d->flushed > 0.0f && d->flushed <= 1.0f))
        return "flushed must be above 0 and at most 1";
    if (!(d->imprecise <= 1.0f)) return "imprecise must be at most 1";
    if (d->max_sites < 1 || d->max_sites > most) return "max_sites must lie in 1 to 2^20";
    if (now && asked && d->max_sites != now)
        return "max_sites cannot change: it was set when the guard was first started";
    return NULL;
}

/* Refuses a change of the guard or the observer inside a region or during a capture. A captured
 * step keeps the guard and the observer that it began with. */
static mixp_result mixpi_guard_between(mixp_context *ctx, const char *who) {
    if (mixpi_check_uncaptured(ctx, who) != MIXP_OK) return MIXP_ERR_ORDER;
    if (!mixpi_regions_open(ctx)) return MIXP_OK;
    return mixp_context_fail(ctx, MIXP_ERR_ORDER,
                             "%s: a region or a scope is open; change the guard between steps, "
                             "outside of MIXP_AUTOCAST, MIXP_NO_GRAD and MIXP_SCOPE",
                             who);
}

MIXPI_SELDOM
static mixp_result mixpi_do_guard_start(mixp_context *ctx, const mixp_guard_desc *desc) {
    mixp_guard_desc d = mixpi_guard_resolved(desc);
    const char *wrong;
    mixpi_watch *w;
    if (!ctx) return MIXP_ERR_ARGUMENT;
    if (mixpi_guard_between(ctx, "mixp_guard_start") != MIXP_OK) return MIXP_ERR_ORDER;
    wrong = mixpi_guard_wrong(ctx, &d, desc && desc->max_sites);
    if (wrong)
        return mixp_context_fail(ctx, MIXP_ERR_ARGUMENT, "mixp_guard_start: %s", wrong);
    if (!ctx->device->kernels->look)
        return mixp_context_fail(ctx, MIXP_ERR_DEVICE,
                                 "mixp_guard_start: the device '%s' has no kernel `look`",
                                 ctx->device->name);
    if (!mixpi_watch_of(ctx) ||
        (!ctx->watch->most_sites && mixpi_watch_room(ctx, d.max_sites) != MIXP_OK))
        return MIXP_ERR_MEMORY;
    w = ctx->watch;
    w->every = d.every;
    w->clean = d.clean;
    w->high = d.high;
    w->low_again = d.low_again;
    w->flushed = d.flushed;
    w->imprecise = d.imprecise;
    if (!w->on) w->inspect_all = 1;
    w->patience = d.patience;
    w->most_sites = d.max_sites;
    if (!w->on) w->since = 2 * w->every;    /* sample the first step */
    if (!w->on) ctx->capture.sites_moved++;
    w->on = 1;
    return MIXP_OK;
}

MIXPREC_API mixp_result mixp_guard_start(mixp_context *ctx, const mixp_guard_desc *desc) {
    const int before = mixpi_enter(ctx);
    return mixpi_leave(ctx, before, mixpi_do_guard_start(ctx, desc));
}

/* Starts the guard unless it was started before. */
static void mixpi_guarded_begin(mixp_context *ctx) {
    const int known = ctx && ctx->watch && ctx->watch->most_sites;
    if (ctx && !known) mixp_guard_start(ctx, NULL);
}

MIXPREC_API int mixp_guarded_enter(mixp_context *ctx, mixp_dtype dtype) {
    mixpi_guarded_begin(ctx);
    return mixp_autocast_enter(ctx, dtype);
}

MIXPREC_API int mixp_guarded_open(mixp_context *ctx, mixp_dtype dtype) {
    mixpi_guarded_begin(ctx);
    return mixp_autocast_open(ctx, dtype);
}

MIXPI_SELDOM
MIXPREC_API mixp_result mixp_guard_stop(mixp_context *ctx) {
    mixpi_watch *w = ctx ? ctx->watch : NULL;
    if (!ctx) return MIXP_ERR_ARGUMENT;
    if (mixpi_guard_between(ctx, "mixp_guard_stop") != MIXP_OK) return MIXP_ERR_ORDER;
    if (!w || !w->on) return MIXP_OK;
    w->on = w->sampled = w->probing = w->fresh = w->posted = 0;
    w->force = w->deep = w->probe = 0;
    w->repeat = w->repeated = 0;
    w->posted_scaler = NULL;
    ctx->capture.sites_moved++;
    return MIXP_OK;
}

MIXPREC_API int mixp_guard_due(const mixp_context *ctx) {
    const mixpi_watch *w = ctx ? ctx->watch : NULL;
    return w && w->on && mixpi_watch_due(ctx);
}

/* Does a newer pattern replace this pin? The same pattern does, and so does "*". first: a pin that
 * only frees sites is also void if it is the first pin, because no older pin holds a site. */
static int mixpi_pin_is_void(const mixpi_pin *pin, const char *newer, int first) {
    if (strcmp(newer, "*") == 0 || strcmp(pin->pattern, newer) == 0) return 1;
    return first && pin->dtype == MIXP_DTYPE_COUNT;
}

/* Returns how many pins stay beside a newer pattern. forget 1: removes the others. */
static int mixpi_pins_beside(mixpi_watch *w, const char *newer, int forget) {
    int i, n = 0;
    for (i = 0; i < w->n_pins; i++) {
        if (mixpi_pin_is_void(&w->pins[i], newer, !n)) continue;
        if (forget && n < i) w->pins[n] = w->pins[i];
        n++;
    }
    if (forget) w->n_pins = n;
    return n;
}

/* Returns what is wrong with a pattern, or NULL. */
static const char *mixpi_pin_wrong(const mixp_context *ctx, const char *pattern,
                                   mixp_dtype dtype) {
    mixpi_watch *w = ctx->watch;
    mixpi_pin pin;
    int n = 0;
    if (!pattern || !*pattern) return "the pattern is empty";
    if (strlen(pattern) >= sizeof pin.pattern) return "the pattern has more than 95 characters";
    if (!mixpi_real(dtype) && dtype != MIXP_DTYPE_COUNT)
        return "the dtype must be f32, f16, bf16, or MIXP_DTYPE_COUNT to free the sites";
    if (w && mixpi_pins_beside(w, pattern, 0) == MIXPI_MAX_PINS)
        return "64 patterns exist, which is the limit: pass one of them again to replace it, or "
               "'*' with MIXP_DTYPE_COUNT to remove all";
    if (!w || !w->settled) return NULL;
    memcpy(pin.pattern, pattern, strlen(pattern) + 1);
    while (n < w->n_sites && !mixpi_pin_fits(&pin, mixpi_site_number(w, n + 1)->name)) n++;
    return n < w->n_sites ? NULL : "no site has this name; mixp_site lists the names";
}

MIXPI_SELDOM
MIXPREC_API mixp_result mixp_guard_pin(mixp_context *ctx, const char *pattern,
                                       mixp_dtype dtype) {
    const char *wrong;
    mixpi_watch *w;
    mixpi_pin *pin;
    int n;
    if (!ctx) return MIXP_ERR_ARGUMENT;
    if (mixpi_guard_between(ctx, "mixp_guard_pin") != MIXP_OK) return MIXP_ERR_ORDER;
    wrong = mixpi_pin_wrong(ctx, pattern, dtype);
    if (wrong)
        return mixp_context_fail(ctx, MIXP_ERR_ARGUMENT, "mixp_guard_pin '%.80s': %s",
                                 pattern ? pattern : "NULL", wrong);
    w = mixpi_watch_of(ctx);
    if (w && !w->pins)
        w->pins = (mixpi_pin *)mixpi_host_alloc(ctx, MIXPI_MAX_PINS * sizeof *w->pins);
    if (!w || !w->pins) return MIXP_ERR_MEMORY;
    mixpi_pins_beside(w, pattern, 1);
    pin = &w->pins[w->n_pins++];
    memcpy(pin->pattern, pattern, strlen(pattern) + 1);
    pin->dtype = dtype;
    pin->fits = 0;
    for (n = 1; n <= w->n_sites; n++) mixpi_site_pin(w, mixpi_site_number(w, n));
    if (w->settled) mixpi_settle_events(ctx);
    ctx->capture.sites_moved++;
    return MIXP_OK;
}

/* --- retry --------------------------------------------------------------------------------- */

/* Sets the random step back to the start of the skipped step. */
static void mixpi_retry_rewind(const mixp_scaler *s) {
    mixp_context *ctx = s->ctx;
    if (ctx->capture.replayed && ctx->step == ctx->capture.replayed) ctx->step -= mixpi_world(ctx);
    else if (s->first) ctx->step = s->first - mixpi_world(ctx);
}

/* Was the newest update skipped, and could another attempt succeed? */
static int mixpi_retry_pays(mixp_scaler *s) {
    mixp_context *ctx = s->ctx;
    const mixpi_watch *w = ctx->watch;
    mixp_scaler_state state;
    if (mixpi_scaler_get(s, &state) != MIXP_OK || !state.skipped) return 0;
    if (mixpi_guard_catch_up(ctx) != MIXP_OK || ctx->errors.code != MIXP_OK) return 0;
    if (!mixpi_guard_on(ctx) || mixpi_world(ctx) > 1) return 1;     /* all ranks retry, or none */
    return w->origin != MIXP_ORIGIN_INPUT && w->origin != MIXP_ORIGIN_WEIGHT;
}

MIXPI_SELDOM
MIXPREC_API int mixp_retry(mixp_scaler *scaler, int times) {
    int updated;
    if (!scaler) return 0;
    if (times < 1) {
        mixp_context_fail(scaler->ctx, MIXP_ERR_ARGUMENT,
                          "mixp_retry: times is %d; pass at least 1", times);
        return 0;
    }
    scaler->ctx->buffers.retries = 1;
    updated = scaler->epoch + scaler->ctx->capture.replays != scaler->retried;
    scaler->retried = scaler->epoch + scaler->ctx->capture.replays;
    if (!updated || scaler->desc.disabled || scaler->tries >= times ||
        !mixpi_retry_pays(scaler)) {
        scaler->tries = 0;
        return 0;
    }
    scaler->tries++;
    mixpi_retry_rewind(scaler);
    return 1;
}

/* An evaluation that is repeated starts from the buffers that it met. */
static mixp_result mixpi_backups_rewind(mixp_context *ctx) {
    mixp_result r = MIXP_OK;
    int64_t i;
    for (i = 0; i < ctx->buffers.all.count && r == MIXP_OK; i++) {
        const mixpi_backup *b = mixpi_backup_at(ctx, i);
        if (!mixpi_backup_is_valid(b) || b->kept_in != ctx->generation) continue;
        mixpi_written(b->buffer, "mixp_retry_loss");
        r = mixpi_copy_bytes(ctx, b->buffer->data, b->data, mixpi_bytes(b->buffer));
    }
    return r;
}

/* Repeats an evaluation once. Without a guard a repetition would change nothing. */
MIXPI_SELDOM
MIXPREC_API int mixp_retry_loss(mixp_context *ctx, const mixp_tensor *loss) {
    mixpi_watch *w = ctx ? ctx->watch : NULL;
    double value = 0.0;
    int again;
    if (!loss || !w || !w->on || loss->ctx != ctx || loss->count != 1) return 0;
    again = !w->repeated && mixpi_tensor_whole(loss, "mixp_retry_loss") == MIXP_OK &&
            mixp_read(loss, &value, MIXP_F64, 1) == MIXP_OK &&
            !mixpi_f64_is_finite(value);
    if (again && mixpi_backups_rewind(ctx) != MIXP_OK) return 0;
    w->repeated = w->repeat = again;
    return again;
}

