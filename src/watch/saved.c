#pragma once
#include "desk.c"
#include "../files/list.c"
/* --- checkpoints of the guard ----------------------------------------------------------------- */

/* Makes the rows of a file for n sites, at least one row, and clears them. */
static mixp_result mixpi_packed_reach(mixp_context *ctx, int n) {
    mixpi_watch *w = ctx->watch;
    const size_t room = ((size_t)n / MIXPI_SITE_CHUNK + 1) * MIXPI_SITE_CHUNK;
    const size_t wide = MIXPI_SITE_STATES * sizeof *w->states;
    const size_t lossy = MIXPI_ROLES * sizeof *w->operands;

    /* One piece of memory holds the three arrays. */
    w->packed = n > 0 ? n : 1;
    if (w->packed > w->packed_room) {
        if (w->packed_room) mixpi_owned_free(ctx, w->hashes);
        w->packed_room = 0;
        w->hashes = (int64_t *)mixpi_owner_new(ctx, room * (sizeof *w->hashes + wide + lossy));
        if (!w->hashes) return MIXP_ERR_MEMORY;
        w->states = (int32_t *)(void *)(w->hashes + room);
        w->operands = w->states + room * MIXPI_SITE_STATES;
        w->packed_room = (int)room;
    }

    memset(w->hashes, 0, (size_t)w->packed * sizeof *w->hashes);
    memset(w->states, 0, (size_t)w->packed * wide);
    memset(w->operands, 0, (size_t)w->packed * lossy);
    return MIXP_OK;
}

/* The state of an operand in a file: 1 bit, 9 bits, 20 bits. */
static int32_t mixpi_lossy_pack(const mixpi_lossy *o) {
    return o->fallen | o->falls << 1 | (int32_t)mixpi_min(o->clean, MIXPI_LOSSY_CLEAN) << 10;
}

static void mixpi_lossy_unpack(mixpi_lossy *o, int32_t state) {
    o->fallen = state & 1;
    o->falls = state >> 1 & MIXPI_LOSSY_FALLS;
    o->clean = state >> 10;
}

/* Was a guard ever started? Sites that only an observer has seen are not saved. */
static int mixpi_guard_was_on(const mixpi_watch *w) { return w && w->most_sites; }

/* Before saving: settles everything, and packs the sites into the rows of the file. */
MIXPI_SELDOM
static mixp_result mixpi_guard_pack(mixp_context *ctx) {
    mixpi_watch *w = ctx->watch;
    mixp_result r = mixpi_guard_catch_up(ctx);
    if (!mixpi_guard_was_on(w)) return r;
    if (mixpi_packed_reach(ctx, w->n_sites) != MIXP_OK) return MIXP_ERR_MEMORY;
    for (int n = 0; n < w->n_sites; n++) {
        const mixpi_site *site = mixpi_site_number(w, n + 1);
        int32_t *state = &w->states[n * MIXPI_SITE_STATES];
        memcpy(&w->hashes[n], &site->hash, sizeof site->hash);
        state[0] = site->fallen;
        state[1] = site->falls;
        state[2] = site->clean;
        state[3] = site->why;
        for (int i = 0; i < MIXPI_ROLES; i++)
            w->operands[n * MIXPI_ROLES + i] = mixpi_lossy_pack(&site->operands[i]);
    }
    return r;
}

/* Could mixpi_guard_pack have written this row of a file? */
static int mixpi_site_state_is_good(const int32_t *state) {
    for (int i = 0; i < MIXPI_SITE_STATES; i++)
        if (state[i] < 0 || state[i] > MIXPI_SITE_COUNT) return 0;
    return state[0] <= 2 && state[3] <= MIXPI_FELL_ANY;
}

/* Are all rows of a loaded item valid? */
static int mixpi_guard_rows_are_good(const mixpi_state_item *item) {
    const int32_t *state = (const int32_t *)item->e.data;
    for (int64_t n = 0; n < item->e.shape[0]; n++)
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
MIXPI_SELDOM
static int mixpi_guard_items(mixpi_state *s) {
    mixpi_watch *w = s->ctx->watch;
    if (!mixpi_guard_was_on(w)) return 0;

    /* Which sites, by the hash of their names. */
    mixpi_state_item item = mixpi_state_array(MIXP_I64, w->packed, w->hashes);
    item.optional = 1;
    mixpi_state_add(s, item, "mixprec.guard.sites");

    /* Write whether each stores f32, and since when. */
    item.e.dtype = MIXP_I32;
    item.e.rank = 2;
    item.e.shape[1] = MIXPI_SITE_STATES;
    item.e.bytes = (size_t)w->packed * MIXPI_SITE_STATES * sizeof *w->states;
    item.memory = w->states;
    item.is_good = mixpi_guard_rows_are_good;
    mixpi_state_add(s, item, "mixprec.guard.states");

    /* The same for the operands of a recipe. */
    item.e.shape[1] = MIXPI_ROLES;
    item.e.bytes = (size_t)w->packed * MIXPI_ROLES * sizeof *w->operands;
    item.memory = w->operands;
    item.is_good = NULL;
    item.must = MIXPI_LOSSY;
    mixpi_state_add(s, item, "mixprec.guard.operands");

    /* Skips in a row of each optimizer, then the numbers. */
    item.e.rank = 1;
    item.e.shape[0] = MIXPI_OPTIMIZER_BITS;
    item.e.bytes = sizeof w->barren;
    item.memory = w->barren;
    item.must = MIXPI_COUNTER;
    mixpi_state_add(s, item, "mixprec.guard.skips");
    for (size_t i = 0; i < MIXPI_LENGTH(mixpi_guard_fields); i++)
        mixpi_state_add_field(s, &mixpi_guard_fields[i], w, 0, 0);
    return 1;
}

/* Sets the guard's arrays to the file's length. */
static void mixpi_guard_meet(mixpi_state *s, int64_t rows) {
    const mixpi_watch *w = s->ctx->watch;
    if (!mixpi_guard_was_on(w)) return;
    if (rows > w->capacity)
        mixpi_report_fail(s->report, MIXP_ERR_SHAPE,
            "the file has %.0f sites of a guard, and this guard's max_sites is %d: start the guard "
            "of a new context with more max_sites",
            (double)rows, w->capacity);
    else if (mixpi_packed_reach(s->ctx, (int)rows) != MIXP_OK)
        mixpi_report_fail(
            s->report, MIXP_ERR_MEMORY, "no memory for %.0f sites of a guard", (double)rows);
}

/* Makes room for the sites that the file's data has, before anything changes. */
static void mixpi_guard_make_room(const mixpi_state *s) {
    const mixpi_watch *w = s->ctx->watch;
    int64_t hash = 1;
    int n = 0;
    for (size_t i = 0; w->packed_room && i < s->n_items; i++) {
        const mixpi_state_item *item = &s->items[i];
        if (item->absent || item->memory != (const void *)w->hashes) continue;
        for (n = 0; n < w->packed && hash; n += hash != 0)
            memcpy(&hash, (const char *)item->e.data + (size_t)n * sizeof hash, sizeof hash);
        if (mixpi_sites_reach(s->ctx, n) != MIXP_OK)
            mixpi_report_fail(s->report, MIXP_ERR_MEMORY, "no memory for %d sites of a guard", n);
    }
}

/* Forgets all sites, and what the guard saw of steps that the loaded state does not know.
 * Settings, pins and the fields of the file stay. Events are dropped, because they name forgotten
 * sites; their numbering continues. */
static void mixpi_watch_forget(mixpi_watch *w) {
    for (int n = 1; n <= w->room; n++) memset(mixpi_site_number(w, n), 0, sizeof **w->sites);
    memset(w->seen, 0, mixpi_rows_bytes(w->rows_room));
    w->filled = mixpi_rows_to_clear(w);
    w->n_sites = w->full = w->full_reported = w->stored = 0;
    w->sampled = w->probing = w->repeat = w->repeated = 0;
    w->fresh = w->posted = w->fresh_probe = w->posted_probe = 0;
    w->looked = w->whole = w->settled = w->probed = 0;
    w->walked = w->unseen = 0;
    w->found = w->found_site = w->overflowed = w->origin = w->origin_site = 0;
    w->met = 0;
    w->event_step = w->updated_step = 0;
    w->first_event = w->n_events;
    w->posted_scaler = NULL;
}

/* After loading: rebuilds the table from the file. The next step fills in the names. */
MIXPI_SELDOM
static void mixpi_guard_unpack(mixp_context *ctx) {
    mixpi_watch *w = ctx->watch;
    if (!mixpi_guard_was_on(w)) return;
    mixpi_watch_forget(w);
    for (int n = 0; n < w->packed && w->hashes[n]; n++) {
        const int32_t *state = &w->states[n * MIXPI_SITE_STATES];
        uint64_t hash;
        memcpy(&hash, &w->hashes[n], sizeof hash);
        mixpi_site *site =
            mixpi_site_number(w, mixpi_site_new(ctx, hash)); /* there is room for it */

        site->fallen = state[0];
        site->falls = state[1];
        site->clean = state[2];
        site->why = state[3];
        for (int i = 0; i < MIXPI_ROLES; i++)
            mixpi_lossy_unpack(&site->operands[i], w->operands[n * MIXPI_ROLES + i]);
    }
    ctx->capture.sites_moved++;
}
