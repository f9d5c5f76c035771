#pragma once
#include "watch.c"
#include "../files/list.c"
/* --- checkpoints of the guard ----------------------------------------------------------------- */

/* Before saving: settles everything, and packs the sites into the rows of the file. */
static mixp_result mixpi_guard_pack(mixp_context *ctx) {
    mixpi_watch *w = ctx->watch;
    mixp_result r = mixpi_guard_catch_up(ctx);
    int n;
    for (n = 0; w && n < w->n_sites; n++) {
        const mixpi_site *site = &w->sites[n];
        int32_t *state = &w->states[n * MIXPI_SITE_STATES];
        memcpy(&w->hashes[n], &site->hash, sizeof site->hash);
        state[0] = site->fallen;
        state[1] = site->falls;
        state[2] = site->clean;
        state[3] = site->for_grad | site->imprecise << 1;
    }
    return r;
}

/* Could mixpi_guard_pack have written this row of a file? */
static int mixpi_site_state_is_good(const int32_t *state) {
    int i;
    for (i = 0; i < MIXPI_SITE_STATES; i++)
        if (state[i] < 0 || state[i] > MIXPI_SITE_COUNT) return 0;
    return state[0] <= 2 && state[3] <= 3;
}

/* Are all rows of a loaded item valid? */
static int mixpi_guard_rows_are_good(const mixpi_state_item *item) {
    const int32_t *state = (const int32_t *)item->e.data;
    int64_t n;
    for (n = 0; n < item->e.shape[0]; n++)
        if (!mixpi_site_state_is_good(&state[n * MIXPI_SITE_STATES])) return 0;
    return 1;
}

/* The guard's numbers in a checkpoint. */
#define MIXPI_FIELD_WATCH(member, must) \
    { MIXPI_OF_WATCH, "mixprec.guard." #member, offsetof(mixpi_watch, member), MIXP_I32, must, 0 }
static const mixpi_field mixpi_guard_fields[] = {
    MIXPI_FIELD_WATCH(since, MIXPI_COUNTER),
    MIXPI_FIELD_WATCH(window, MIXPI_COUNTER),
    MIXPI_FIELD_WATCH(idle, MIXPI_COUNTER),
    MIXPI_FIELD_WATCH(taken, MIXPI_FLAG),
    MIXPI_FIELD_WATCH(missed, MIXPI_FLAG),
    MIXPI_FIELD_WATCH(drawn, MIXPI_COUNTER),
    MIXPI_FIELD_WATCH(inspect_all, MIXPI_FLAG),
    MIXPI_FIELD_WATCH(falls, MIXPI_COUNTER),
    MIXPI_FIELD_WATCH(force, MIXPI_COUNTER),
    MIXPI_FIELD_WATCH(forced, MIXPI_COUNTER),
    MIXPI_FIELD_WATCH(deep, MIXPI_COUNTER),
    MIXPI_FIELD_WATCH(probe, MIXPI_COUNTER),
    MIXPI_FIELD_WATCH(acted, MIXPI_FLAG)
};
#undef MIXPI_FIELD_WATCH

/* Adds the guard's numbers, and the state of its sites, one row for each. Returns 0 if none was
 * ever started. */
static int mixpi_guard_items(mixpi_state *s) {
    mixpi_watch *w = s->ctx->watch;
    mixpi_state_item item;
    size_t i;
    if (!w->capacity) return 0;
    memset(&item, 0, sizeof item);
    item.optional = 1;
    item.e.dtype = MIXP_I64;
    item.e.rank = 1;
    item.e.shape[0] = w->capacity;
    item.e.bytes = (size_t)w->capacity * sizeof *w->hashes;
    item.memory = w->hashes;
    mixpi_state_add(s, item, "mixprec.guard.sites");
    item.e.dtype = MIXP_I32;
    item.e.rank = 2;
    item.e.shape[1] = MIXPI_SITE_STATES;
    item.e.bytes = (size_t)w->capacity * MIXPI_SITE_STATES * sizeof *w->states;
    item.memory = w->states;
    item.is_good = mixpi_guard_rows_are_good;
    mixpi_state_add(s, item, "mixprec.guard.states");
    item.e.rank = 1;
    item.e.shape[0] = MIXPI_OPTIMIZER_BITS;
    item.e.bytes = sizeof w->barren;
    item.memory = w->barren;
    item.is_good = NULL;
    item.must = MIXPI_COUNTER;
    mixpi_state_add(s, item, "mixprec.guard.skips");
    for (i = 0; i < MIXPI_LENGTH(mixpi_guard_fields); i++)
        mixpi_state_add_field(s, &mixpi_guard_fields[i], w, 0, 0);
    return 1;
}

/* Forgets all sites, and what the guard saw of steps that the loaded state does not know.
 * Settings, pins and the fields of the file stay. Events are dropped, because they name forgotten
 * sites; their numbers go on. */
static void mixpi_watch_forget(mixpi_watch *w) {
    memset(w->sites, 0, (size_t)w->capacity * sizeof *w->sites);
    memset(w->buckets, 0, (size_t)w->n_buckets * sizeof *w->buckets);
    memset(w->seen, 0, mixpi_rows_used(w));
    w->filled = mixpi_rows_filled(w);
    w->n_sites = w->full = w->full_told = w->turns = 0;
    w->sampled = w->probing = w->repeat = w->repeated = 0;
    w->fresh = w->posted = w->fresh_probe = w->posted_probe = 0;
    w->looked = w->whole = w->settled = w->probed = 0;
    w->walked = w->unseen = 0;
    w->found = w->found_site = w->origin = w->origin_site = 0;
    w->met = 0;
    w->event_step = w->updated_step = 0;
    w->first_event = w->n_events;
    w->posted_scaler = NULL;
}

/* After loading: rebuilds the table from the file. The next step fills in the names. */
static void mixpi_guard_unpack(mixp_context *ctx) {
    mixpi_watch *w = ctx->watch;
    int n, number;
    if (!w || !w->capacity) return;
    mixpi_watch_forget(w);
    for (n = 0; n < w->capacity && w->hashes[n]; n++) {
        const int32_t *state = &w->states[n * MIXPI_SITE_STATES];
        uint64_t hash;
        memcpy(&hash, &w->hashes[n], sizeof hash);
        number = mixpi_site_new(ctx, hash);
        w->sites[number - 1].fallen = state[0];
        w->sites[number - 1].falls = state[1];
        w->sites[number - 1].clean = state[2];
        w->sites[number - 1].for_grad = state[3] & 1;
        w->sites[number - 1].imprecise = state[3] >> 1;
    }
    ctx->sites_moved++;
}

