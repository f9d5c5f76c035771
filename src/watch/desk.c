#pragma once
#include "settle.c"
/* --- on and off ---------------------------------------------------------------------------- */

/* The context's watch, made at the first call without memory for sites. */
static mixpi_watch *mixpi_watch_of(mixp_context *ctx) {
    mixpi_watch *w = ctx->watch;
    if (w) return w;
    w = (mixpi_watch *)mixpi_host_alloc(ctx, sizeof *w);
    if (!w) return NULL;
    return ctx->watch = w;
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
    if (!w->events)
        w->events = (mixpi_happening *)mixpi_owner_new(ctx, MIXPI_FIRST_EVENTS * sizeof *w->events);
    if (!w->events) return MIXP_ERR_MEMORY;
    if (!w->events_room) w->events_room = MIXPI_FIRST_EVENTS;

    if (n < w->n_sites) n = w->n_sites;
    MIXPI_TRY(mixpi_chunks_reach(ctx, n));
    w->capacity = n;
    mixp_result r = mixpi_rows_reach(ctx, 1);

    /* Sends any memory of a scaler's size: the host's copy then has its memory before an update. */
    if (r == MIXP_OK && ctx->device->post && !w->posted_scaler)
        r = mixpi_note_failure(
            ctx, "guard", ctx->device->post(&ctx->exec, 1, w->rows, sizeof(mixp_scaler_state)));

    if (r != MIXP_OK) w->capacity = before;
    else w->full = 0; /* an observer's sites may have found no room */
    return r;
}

/* Returns the description with all defaults filled in. */
static mixp_guard_desc mixpi_guard_resolved(const mixp_guard_desc *desc) {
    mixp_guard_desc d = MIXPI_ZERO;
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
static const char *mixpi_guard_wrong(const mixp_context *ctx, const mixp_guard_desc *d, int asked) {
    const int most = 1 << 20, now = ctx->watch ? ctx->watch->most_sites : 0;
    if (d->every < 1 || d->every > most) return "every must lie in 1 to 2^20";
    if (d->clean < 1 || d->clean > most) return "clean must lie in 1 to 2^20";
    if (!(d->high > 0.0f && d->high < 1.0f)) return "high must lie between 0 and 1";
    if (!(d->low_again > 0.0f && d->low_again < d->high))
        return "low_again must lie between 0 and high";
    if (!(d->flushed > 0.0f && d->flushed <= 1.0f)) return "flushed must be above 0 and at most 1";
    if (!(d->imprecise <= 1.0f)) return "imprecise must be at most 1";
    if (d->max_sites < 1 || d->max_sites > most) return "max_sites must lie in 1 to 2^20";
    if (now && asked && d->max_sites != now)
        return "max_sites cannot change: it was set when the guard was first started";
    return NULL;
}

/* Refuses a change of the guard or the observer inside a region or during a capture. A captured
 * step keeps the guard and the observer that it began with. */
static mixp_result mixpi_check_between_steps(mixp_context *ctx, const char *who) {
    if (mixpi_check_uncaptured(ctx, who) != MIXP_OK) return MIXP_ERR_ORDER;
    if (!mixpi_regions_count(ctx)) return MIXP_OK;
    return mixp_context_fail(ctx, MIXP_ERR_ORDER,
        "%s: a region or a scope is open; change the guard between steps, outside of "
        "MIXP_AUTOCAST, MIXP_NO_GRAD and MIXP_SCOPE",
        who);
}

MIXPI_SELDOM
static mixp_result mixpi_do_guard_start(mixp_context *ctx, const mixp_guard_desc *desc) {
    mixp_guard_desc d = mixpi_guard_resolved(desc);
    if (!ctx) return MIXP_ERR_ARGUMENT;
    if (mixpi_check_between_steps(ctx, "mixp_guard_start") != MIXP_OK) return MIXP_ERR_ORDER;
    const char *wrong = mixpi_guard_wrong(ctx, &d, desc && desc->max_sites);
    if (wrong) return mixp_context_fail(ctx, MIXP_ERR_ARGUMENT, "mixp_guard_start: %s", wrong);

    if (!ctx->device->kernels->look)
        return mixp_context_fail(ctx, MIXP_ERR_DEVICE,
            "mixp_guard_start: the device '%s' has no kernel `look`", ctx->device->name);

    /* All memory comes before the first change. */
    if (!mixpi_watch_of(ctx) ||
        (!ctx->watch->most_sites && mixpi_watch_room(ctx, d.max_sites) != MIXP_OK))
        return MIXP_ERR_MEMORY;

    mixpi_watch *w = ctx->watch;
    w->every = d.every;
    w->clean = d.clean;
    w->high = d.high;
    w->low_again = d.low_again;
    w->flushed = d.flushed;
    w->imprecise = d.imprecise;
    if (!w->on) w->inspect_all = 1;
    w->patience = d.patience;
    w->most_sites = d.max_sites;

    /* A guard that starts samples the first step. */
    if (!w->on) w->since = 2 * w->every; /* sample the first step */
    if (!w->on) ctx->capture.sites_moved++;
    w->on = 1;
    return MIXP_OK;
}

MIXPREC_API mixp_result mixp_guard_start(mixp_context *ctx, const mixp_guard_desc *desc) {
    MIXPI_RETURN_INSIDE(ctx, mixpi_do_guard_start(ctx, desc));
}

MIXPI_SELDOM
MIXPREC_API mixp_result mixp_guard_stop(mixp_context *ctx) {
    mixpi_watch *w = ctx ? ctx->watch : NULL;
    if (!ctx) return MIXP_ERR_ARGUMENT;
    if (mixpi_check_between_steps(ctx, "mixp_guard_stop") != MIXP_OK) return MIXP_ERR_ORDER;
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
    return w && w->on && mixpi_watch_is_due(ctx);
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
static const char *mixpi_pin_wrong(const mixp_context *ctx, const char *pattern, mixp_dtype dtype) {
    mixpi_watch *w = ctx->watch;
    mixpi_pin pin;
    int n = 0;
    if (!pattern || !*pattern) return "the pattern is empty";
    if (strlen(pattern) >= sizeof pin.pattern) return "the pattern has more than 95 characters";
    if (!mixpi_is_real(dtype) && dtype != MIXP_DTYPE_COUNT)
        return "the dtype must be f32, f16, bf16, or MIXP_DTYPE_COUNT to free the sites";
    if (w && mixpi_pins_beside(w, pattern, 0) == MIXPI_MAX_PINS)
        return "64 patterns exist, which is the limit: pass one of them again to replace it, or "
               "'*' with MIXP_DTYPE_COUNT to remove all";

    /* Once the sites are known, a pattern must fit one. */
    if (!w || !w->settled) return NULL;
    memcpy(pin.pattern, pattern, strlen(pattern) + 1);
    while (n < w->n_sites && !mixpi_pin_fits(&pin, mixpi_site_number(w, n + 1)->name)) n++;
    return n < w->n_sites ? NULL : "no site has this name; mixp_site lists the names";
}

MIXPI_SELDOM
MIXPREC_API mixp_result mixp_guard_pin(mixp_context *ctx, const char *pattern, mixp_dtype dtype) {
    if (!ctx) return MIXP_ERR_ARGUMENT;
    if (mixpi_check_between_steps(ctx, "mixp_guard_pin") != MIXP_OK) return MIXP_ERR_ORDER;
    const char *wrong = mixpi_pin_wrong(ctx, pattern, dtype);
    if (wrong)
        return mixp_context_fail(ctx, MIXP_ERR_ARGUMENT, "mixp_guard_pin '%.80s': %s",
            pattern ? pattern : "NULL", wrong);

    /* All memory comes before the first change. */
    mixpi_watch *w = mixpi_watch_of(ctx);
    if (w && !w->pins)
        w->pins = (mixpi_pin *)mixpi_host_alloc(ctx, MIXPI_MAX_PINS * sizeof *w->pins);
    if (!w || !w->pins) return MIXP_ERR_MEMORY;

    /* The last pattern replaces what it covers. */
    mixpi_pins_beside(w, pattern, 1);
    mixpi_pin *pin = &w->pins[w->n_pins++];
    memcpy(pin->pattern, pattern, strlen(pattern) + 1);
    pin->dtype = dtype;
    pin->fits = 0;

    for (int n = 1; n <= w->n_sites; n++) mixpi_site_pin(w, mixpi_site_number(w, n));
    if (w->settled) mixpi_settle_events(ctx);
    ctx->capture.sites_moved++;
    return MIXP_OK;
}

/* --- retry --------------------------------------------------------------------------------- */

/* Was the last update skipped, and could another attempt succeed? */
static int mixpi_retry_helps(mixp_scaler *s) {
    mixp_context *ctx = s->ctx;
    const mixpi_watch *w = ctx->watch;
    mixp_scaler_state state;
    if (mixpi_scaler_get(s, &state) != MIXP_OK || !state.skipped) return 0;
    if (mixpi_guard_catch_up(ctx) != MIXP_OK || ctx->errors.code != MIXP_OK) return 0;
    if (!mixpi_guard_is_on(ctx) || mixpi_world(ctx) > 1) return 1; /* all ranks retry, or none */
    return w->origin != MIXP_ORIGIN_INPUT && w->origin != MIXP_ORIGIN_WEIGHT;
}

MIXPI_SELDOM
MIXPREC_API int mixp_retry(mixp_scaler *scaler, int times) {
    mixp_context *ctx = scaler ? scaler->ctx : NULL;
    if (!scaler) return 0;
    if (times < 1) {
        mixp_context_fail(
            ctx, MIXP_ERR_ARGUMENT, "mixp_retry: times is %d; pass at least 1", times);
        return 0;
    }

    /* One retry for each update, and only if another attempt can differ. */
    const uint64_t update = scaler->epoch + ctx->capture.replays;
    const int updated = update != scaler->retried;
    ctx->buffers.retries = 1;
    scaler->retried = update;
    const int before = mixpi_enter(ctx);
    const int ends =
        !updated || scaler->desc.disabled || scaler->tries >= times || !mixpi_retry_helps(scaler);
    mixpi_leave(ctx, before, MIXP_OK);
    if (ends) {
        scaler->tries = 0;
        return 0;
    }

    /* The random step is again that of the skipped step. */
    scaler->tries++;
    if (ctx->capture.replayed && ctx->step == ctx->capture.replayed) ctx->step -= mixpi_world(ctx);
    else if (scaler->first) ctx->step = scaler->first - mixpi_world(ctx);
    return 1;
}

/* Has this evaluation made an element of a buffer Inf or NaN? Waits for the device. */
static int mixpi_evaluation_is_bad(mixp_context *ctx) {
    uint64_t found = 0, *at = (uint64_t *)mixpi_context_scratch(ctx, sizeof found);
    mixp_result r = at ? mixpi_device_zero(ctx, at, sizeof *at) : MIXP_ERR_MEMORY;
    if (r == MIXP_OK) r = mixpi_backups_check(ctx, at, ctx->generation);
    if (r == MIXP_OK) r = mixpi_download(ctx, &found, at, sizeof found);
    return r == MIXP_OK && found;
}

/* Repeats an evaluation once. Without a guard a repetition would change nothing. */
MIXPI_SELDOM
MIXPREC_API int mixp_retry_loss(mixp_context *ctx, const mixp_tensor *loss) {
    mixpi_watch *w = ctx ? ctx->watch : NULL;
    double value = 0.0;
    if (!loss || !w || !w->on || loss->ctx != ctx || loss->count != 1) return 0;
    int again = !w->repeated && mixpi_check_whole(loss, "mixp_retry_loss") == MIXP_OK &&
                mixp_read(loss, &value, MIXP_F64, 1) == MIXP_OK &&
                (!mixpi_f64_is_finite(value) || mixpi_evaluation_is_bad(ctx));
    if (again && mixpi_backups_rewind(ctx, "mixp_retry_loss") != MIXP_OK) return 0;
    w->repeated = w->repeat = again;
    return again;
}
