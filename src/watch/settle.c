#pragma once
#include "judge.c"
/* --- what is decided ----------------------------------------------------------------------- */

/* Lets a site store f32, or, where that is not enough, read f32 too. Where rounding loses too much
 * of a product's inputs or result, rounding its weights loses as much. */
static void mixpi_site_raise(mixp_context *ctx, mixpi_site *site) {
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
        if (mixpi_look_of(ctx->watch, n, MIXPI_LOOK_GRAD)->count)
            site->why |= first->why & MIXPI_FELL_GRAD;
        site->why |= first->why & MIXPI_FELL_IMPRECISE;
        mixpi_site_raise(ctx, site);
        fell++;
    }
    return fell;
}

static mixpi_happening *mixpi_site_fall(
    mixp_context *ctx, int number, mixp_event_kind kind, const mixp_look *look, int of_grad) {
    mixpi_watch *w = ctx->watch;
    mixpi_site_at(ctx, number)->why |= mixpi_fall_reason(kind, of_grad);
    mixpi_site_raise(ctx, mixpi_site_at(ctx, number));
    w->acted = 1;
    w->falls = (int32_t)(((uint32_t)w->falls + 1u) & 0x7FFFFFFFu);
    ctx->capture.sites_moved++;
    mixpi_happening *e = mixpi_event_add(ctx, kind, number, look, MIXP_ORIGIN_UNKNOWN);
    e->of_grad = of_grad;
    e->also = mixpi_siblings_fall(ctx, number);
    return e;
}

static void mixpi_settle_vanished(mixp_context *ctx, int number, int sample) {
    const mixpi_site *site = mixpi_site_at(ctx, number);
    const int value = site->verdict & MIXPI_SAW_NO_VALUE;
    if (!(site->verdict & (MIXPI_SAW_NO_VALUE | MIXPI_SAW_NO_GRAD))) return;
    if (!mixpi_site_is_low(site, sample)) return;
    mixpi_site_fall(ctx, number, MIXP_EVENT_FLUSHED,
        mixpi_look_of(ctx->watch, number, value ? MIXPI_LOOK_VALUE : MIXPI_LOOK_GRAD), !value)
        ->flushed = 1.0; /* all values were flushed: no count has them, for they are zeros now */
}

/* Would a site that has fallen back stay in range in its low dtype? A site whose result is f32 in
 * any case reads the region's low dtype again. */
static int mixpi_site_is_clean(const mixpi_watch *w, const mixpi_site *site) {
    double largest = mixpi_low_largest(mixpi_look_low(site)), low = (double)w->low_again * largest;
    if (site->why & MIXPI_FELL_GRAD_LARGE &&
        (double)site->grad.largest >= (double)w->high * largest)
        return 0;
    if (site->why & MIXPI_FELL_IMPRECISE && w->imprecise > 0.0f) return 0;
    /* Values that are not finite in f32 are no reason to stay in f32. */
    return mixpi_site_largest(site) < low && !mixpi_flushes(w, site, &site->value) &&
           !mixpi_flushes(w, site, &site->grad);
}

/* Will the site store f32 because of its inputs? The sites before it must be settled. */
static int mixpi_site_follows(const mixp_context *ctx, const mixpi_site *site) {
    for (int i = 0; site->carries && i < MIXPI_SITE_FROM && site->from[i]; i++) {
        const mixpi_site *from = mixpi_site_at(ctx, site->from[i]);
        if (mixpi_site_stays_f32(from) || (from->verdict & MIXPI_SAW_RAISED)) return 1;
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
    mixpi_site_fall(
        ctx, number, largest > most ? MIXP_EVENT_OVERFLOW : MIXP_EVENT_HIGH, &site->value, 0);
}

/* Did the site fall back because of its gradient, although this sample (an evaluation, say) saw
 * none? */
static int mixpi_grad_is_unseen(const mixpi_watch *w, const mixpi_site *site) {
    if (!(site->why & MIXPI_FELL_GRAD)) return 0;
    return w->settling_bad || site->grad.nonfinite || !(site->verdict & MIXPI_SAW_GRAD);
}

static void mixpi_settle_site(mixp_context *ctx, int number, int sample) {
    mixpi_watch *w = ctx->watch;
    mixpi_site *site = mixpi_site_at(ctx, number);
    if (!mixpi_look_of(w, number, MIXPI_LOOK_VALUE)->count) return;

    /* Copy what the sample saw. */
    site->value = *mixpi_look_of(w, number, MIXPI_LOOK_VALUE);
    site->grad = *mixpi_look_of(w, number, MIXPI_LOOK_GRAD);
    if (mixpi_site_is(site, MIXPI_SCORES))
        site->scores = mixpi_look_of(w, number, MIXPI_LOOK_LOSS)->largest;
    /* A cast that was left out has no own gradient: its gradient is the producer's. */
    if (!site->grad.count && site->fallen && site->from[0] && mixpi_site_is(site, MIXPI_IS_CAST))
        site->grad = *mixpi_look_of(w, site->from[0], MIXPI_LOOK_GRAD);

    site->samples++;

    /* A site that stores low falls back if it is in trouble. */
    if (site->low == MIXP_F32 && site->fallen < 2) return; /* stores f32 in any case */
    if (site->pinned || site->changed >= sample) return;
    if (mixpi_site_is_low(site, sample)) {
        mixp_event_kind trouble = mixpi_site_trouble(w, site);
        int of_grad = trouble == MIXP_EVENT_FLUSHED && !mixpi_flushes(w, site, &site->value);
        if (trouble != MIXP_EVENT_COUNT)
            mixpi_site_fall(ctx, number, trouble, of_grad ? &site->grad : &site->value, of_grad);
        if (trouble != MIXP_EVENT_IMPRECISE) return;

        /* The readers of a site that no longer rounds may now round instead: measure all soon. */
        w->inspect_all = 1;
        w->since = 2 * w->every;
        return;
    }

    /* A site that fell back returns after enough clean samples. */
    if (w->settling_probe) mixpi_settle_probed(ctx, number);
    if ((site->verdict & (MIXPI_SAW_INSPECTED | MIXPI_SAW_ROUGH)) == MIXPI_SAW_INSPECTED)
        site->why &= ~MIXPI_FELL_IMPRECISE;
    if (!site->fallen || mixpi_is_low(site->dtype)) return;
    if (w->settling_bad && site->value.nonfinite) return; /* the finite values are only a part */
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
    const int64_t needed =
        mixpi_min((int64_t)w->clean << (relapses < 20 ? relapses : 20), MIXPI_LOSSY_CLEAN);

    /* Bad once: it falls. Good long enough: it returns. */
    if (o->fallen) {
        o->clean = o->excess <= 0.8 ? o->clean + 1 : 0;
        if (o->clean < needed) return;
    } else if (!(o->excess > 1.0)) return;

    o->fallen = !o->fallen;
    o->clean = 0;
    if (o->fallen && o->falls < MIXPI_LOSSY_FALLS) o->falls++;

    /* The event shows how bad it was. */
    mixpi_happening *e =
        mixpi_event_add(ctx, o->fallen ? MIXP_EVENT_OPERAND : MIXP_EVENT_OPERAND_BACK, number,
            &site->value, MIXP_ORIGIN_UNKNOWN);
    e->operand = 1 + role;
    e->error = o->error;
    e->clipped = o->clipped;
}

/* Settles the operands of a linear, and makes them ready for the next sample. A loss that is not
 * finite shows nothing about them. */
static void mixpi_settle_operands(mixp_context *ctx, int number) {
    mixpi_site *site = mixpi_site_at(ctx, number);
    for (int i = 0; i < MIXPI_ROLES; i++) {
        mixpi_lossy *o = &site->operands[i];
        if (!o->seen) continue;
        if (!ctx->watch->settling_bad) mixpi_settle_operand(ctx, number, i);
        o->seen = 0;
        o->error = o->clipped = o->excess = 0.0;
    }
}

/* The first site, in the order of the step, that made non-finite values from finite ones, or 0. */
static int mixpi_first_overflow(const mixpi_watch *w) {
    int first = 0;
    for (int n = 1; n <= w->n_sites; n++) {
        const mixpi_site *site = mixpi_site_number(w, n);
        if (!(site->verdict & MIXPI_SAW_OVERFLOW)) continue;
        if (!first || site->place < mixpi_site_number(w, first)->place) first = n;
    }
    return first;
}

/* Decides, once w->seen holds the rows. origin, at: where the skip began, as all ranks agreed. */
static void mixpi_settle_rows(mixp_context *ctx, int sample, mixp_origin origin, int at) {
    mixpi_watch *w = ctx->watch;
    int n, known = w->n_sites;
    w->settled = 1;
    w->settling_bad = mixpi_began_forward(origin);
    if (!w->overflowed) w->overflowed = mixpi_first_overflow(w);
    w->inspect_all |= w->settling_bad;

    /* A step that walked nothing back, such as an evaluation, cannot be the skipped one. */
    if (w->seen[MIXPI_ROW_WIDE].count + w->seen[MIXPI_ROW_NARROW].count > 0) {
        w->looked = 1;
        if (!w->found) {
            w->found = (int)origin;
            w->found_site = at;
        }
    }

    /* Sites fall back, or return, in the order in which they ran. */
    for (n = 1; n <= known; n++) {
        const mixpi_site *site = mixpi_site_at(ctx, n);
        if (site->changed >= sample || !(site->verdict & MIXPI_SAW_OVERFLOW)) continue;
        if (mixpi_site_can_fall(site))
            mixpi_site_fall(ctx, n, MIXP_EVENT_OVERFLOW, mixpi_look_of(w, n, MIXPI_LOOK_VALUE), 0);
    }
    for (n = 1; n <= known && !w->settling_bad; n++) mixpi_settle_vanished(ctx, n, sample);
    for (n = 1; n <= known; n++) mixpi_settle_site(ctx, n, sample);
    for (n = 1; n <= known; n++) mixpi_settle_operands(ctx, n);
}

/* Adds the events that are reported once: pins that took effect, sites without room. */
static void mixpi_settle_events(mixp_context *ctx) {
    mixpi_watch *w = ctx->watch;
    for (int n = 1; n <= w->n_sites; n++) {
        mixpi_site *site = mixpi_site_at(ctx, n);
        if (!site->pinned || site->pin_reported) continue;
        site->pin_reported = 1;
        mixpi_event_add(ctx, MIXP_EVENT_PINNED, n, &site->value, MIXP_ORIGIN_UNKNOWN);
    }
    if (w->full && !w->full_reported)
        mixpi_event_add(ctx, MIXP_EVENT_FULL, 0, &mixpi_no_look, MIXP_ORIGIN_UNKNOWN);
    w->full_reported = w->full;
}

/* Has every optimizer made an update under the guard? Two networks that train alternately have two
 * kinds of steps, and a pattern may fit a site of either kind. */
static int mixpi_all_have_updated(const mixp_context *ctx) {
    const mixp_optimizer *opt = (const mixp_optimizer *)ctx->training.optimizers;
    for (; opt; opt = opt->next)
        if (!(ctx->watch->met >> opt->bit & 1)) return 0;
    return 1;
}

/* Reports, once, each pattern that fits no site after complete steps of all optimizers. */
static mixp_result mixpi_settle_pins(mixp_context *ctx) {
    mixpi_watch *w = ctx->watch;
    if (!w->settled || !mixpi_all_have_updated(ctx)) return MIXP_OK;
    for (int i = 0; i < w->n_pins; i++) {
        if (w->pins[i].fits) continue;
        w->pins[i].fits = 1;
        return mixp_context_fail(ctx, MIXP_ERR_ARGUMENT,
            "mixp_guard_pin '%.80s': no site has this name after a complete step; mixp_site lists "
            "the names; the first is '%.90s'",
            w->pins[i].pattern, w->n_sites ? mixpi_site_number(w, 1)->name : "");
    }
    return MIXP_OK;
}

static mixp_result mixpi_settle_now(mixp_context *ctx, int sample, uint64_t step, int probe) {
    mixp_origin origin;
    int at;
    ctx->watch->settling_probe = probe;
    mixpi_judge(ctx, &origin, &at);
    MIXPI_TRY(mixpi_seen_share(ctx, &origin, &at));

    ctx->watch->event_step = step;
    mixpi_settle_rows(ctx, sample, origin, at);
    mixpi_settle_events(ctx);
    return MIXP_OK;
}

/* Settles a sample. If the device can post, the sample is sent first and settled when the step
 * after the next begins, or, with several ranks, at the next update. This delay is constant, so
 * every run makes the same decisions.
 *
 *     step           n               n + 1             n + 2
 *     the device     fills the rows  runs on           runs on
 *     the host                       posts them as     collects and settles them as it
 *                                    it begins         begins: sites fall back from here on
 *
 * On the CPU, which cannot post, both happen as n + 1 begins. */
static mixp_result mixpi_guard_settle(mixp_context *ctx) {
    mixpi_watch *w = ctx->watch;
    const mixp_device *d = ctx->device;
    const int posted = w->posted, fresh = w->fresh, probe = w->fresh_probe;
    mixp_result r = MIXP_OK;

    w->posted = w->fresh = w->fresh_probe = 0;
    if (posted || fresh) r = mixpi_rows_reach(ctx, w->n_sites);

    /* The sample that was sent before arrives. */
    if (posted && r == MIXP_OK) {
        r = mixpi_note_failure(ctx, "guard", d->collect(&ctx->exec, 0, w->seen, w->posted_bytes));
        if (r == MIXP_OK) r = mixpi_settle_now(ctx, posted, w->posted_step, w->posted_probe);
    }
    if (r != MIXP_OK || !fresh) return r;

    /* The new one is sent, or settled if the device cannot post. */
    w->posted_bytes = mixpi_rows_bytes(w->n_sites);
    w->posted_step = w->rows_step;
    w->posted_probe = probe;
    if (d->post) {
        r = mixpi_note_failure(ctx, "guard", d->post(&ctx->exec, 0, w->rows, w->posted_bytes));
        w->posted = r == MIXP_OK ? fresh : 0;
        return r;
    }
    MIXPI_TRY(mixpi_download(ctx, w->seen, w->rows, w->posted_bytes));
    return mixpi_settle_now(ctx, fresh, w->rows_step, probe);
}

/* Reports a divergence: step after step is skipped, and no fallback can help. */
static mixp_result mixpi_guard_report_divergence(mixp_context *ctx, int32_t skips) {
    const mixpi_watch *w = ctx->watch;
    const mixp_origin origin = (mixp_origin)w->origin;
    return mixp_context_fail(ctx, MIXP_ERR_DIVERGED,
        "%d steps in a row were skipped because of their forward pass, and no site is left to fall "
        "back. No loss scale prevents this. The first site was '%.90s': %s",
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
    if (site->low == MIXP_F32 || site->dtype != site->low || !mixpi_site_can_fall(site)) return;
    mixpi_site_fall(ctx, w->origin_site, MIXP_EVENT_OVERFLOW, &site->grad, 1);
}

/* Bits of the optimizers that a scaler's last update covered. */
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
    for (int i = 0; i < MIXPI_OPTIMIZER_BITS; i++) {
        if (!(bits >> i & 1)) continue;
        if (cured) w->barren[i] = 0;
        else if (forward && w->barren[i] < INT32_MAX) w->barren[i]++;
        if (w->barren[i] > most) most = w->barren[i];
    }
    return most;
}

/* After a scaler's update: records where a skip began, and whether a site fell back for that. */
static mixp_result mixpi_guard_settle_update(
    mixp_context *ctx, const mixp_scaler_state *state, int32_t bits) {
    mixpi_watch *w = ctx->watch;
    const int acted = w->acted, probed = w->probed;

    /* Where did the skip begin? If all looks were finite, and the scale of the gradients was below
     * 1, their unscaling has overflowed. */
    const float scale = state->past[0] > 0.0f ? state->past[0] : state->scale;
    w->origin = state->skipped ? w->found : MIXP_ORIGIN_UNKNOWN;
    w->origin_site = state->skipped ? w->found_site : 0;
    /* Loss and gradients were finite, but a site overflowed: its values have reached a buffer. */
    if (state->skipped && !w->origin && w->overflowed) {
        w->origin = MIXP_ORIGIN_FORWARD;
        w->origin_site = w->overflowed;
    }
    if (state->skipped && w->looked && w->whole && !w->origin && scale < 1.0f)
        w->origin = MIXP_ORIGIN_UNSCALE;
    const int forward = state->skipped && mixpi_began_forward((mixp_origin)w->origin);

    w->found = w->found_site = w->overflowed = w->looked = w->acted = w->probed = 0;
    int32_t barren = mixpi_guard_count(w, bits, forward, !state->skipped || (forward && acted));

    /* An applied update needs no more samples than usual. */
    if (!state->skipped) {
        w->force &= ~bits;
        w->deep &= ~bits;
        w->probe &= ~bits;
        return MIXP_OK;
    }

    /* After a skip the optimizers' next steps are sampled; the samples are probes if an ordinary
     * sample saw nothing. */
    const int bad = forward || state->forgiven > 0;
    w->force |= bits;
    w->forced = 0;
    w->probe &= ~bits;
    if (bad && !probed) w->probe |= w->deep & bits;
    w->deep = bad ? w->deep | bits : w->deep & ~bits;

    /* A skip is an event, and the end if nothing can fall back. */
    w->event_step = w->updated_step;
    mixpi_event_add(ctx, MIXP_EVENT_SKIP, w->origin_site,
        w->origin_site ? &mixpi_site_at(ctx, w->origin_site)->value : &mixpi_no_look,
        (mixp_origin)w->origin)
        ->also = acted;
    mixpi_guard_at_floor(ctx, state->scale);
    if (w->patience < 0 || !forward) return MIXP_OK;
    const int diverged = barren >= w->patience || w->origin == MIXP_ORIGIN_WEIGHT;
    return diverged ? mixpi_guard_report_divergence(ctx, barren) : MIXP_OK;
}

/* An update closes the window of steps that belong to it. */
static void mixpi_window_close(mixpi_watch *w) {
    const int seen = w->update_due && !w->unseen;
    w->missed |= w->update_due && w->unseen;
    if (!seen && w->since < INT32_MAX) w->since++;
    if (seen) {
        w->since = 1;
        w->drawn = (int32_t)(((uint32_t)w->drawn + 1u) & 0x7FFFFFFFu);
    }

    /* A new window begins. */
    w->update_due = w->idle = w->window = w->walked = w->taken = 0;
    if (seen) w->inspect_all = 0;
    w->whole = !w->unseen;
    w->unseen = 0;

    /* Forced samples end when the skipped optimizer makes no more updates. */
    if (!w->force) w->forced = 0;
    else if (w->forced <= 64) w->forced++;
    if (w->forced > 64) w->force = w->deep = w->probe = w->forced = 0;
}

/* Hook before an update: settles available samples first, so that the scaler forgives skips of the
 * sites that fall back now. With several ranks, samples are always settled here, because ranks make
 * the same updates but not the same steps. A device that posts is waited for only after a skip. */
static mixp_result mixpi_guard_updating(mixp_context *ctx) {
    mixpi_watch *w = ctx->watch;
    const int late = ctx->device->post && mixpi_world(ctx) == 1, waits = w->force && w->fresh;
    mixpi_window_close(w);
    if (late && !waits) return MIXP_OK;
    mixp_result r = mixpi_guard_settle(ctx);
    return late && r == MIXP_OK ? mixpi_guard_settle(ctx) : r;
}

/* After a scaler's update. If the device can post, a step's result arrives one step later. */
static mixp_result mixpi_guard_take_state(mixp_context *ctx, const mixp_scaler *s) {
    mixpi_watch *w = ctx->watch;
    const mixp_device *d = ctx->device;
    mixp_scaler_state state;
    mixp_result r = mixpi_settle_pins(ctx);

    /* A device that cannot post reports at once. */
    if (!d->post) {
        w->updated_step = ctx->step;
        if (r == MIXP_OK) r = mixpi_scaler_get(s, &state);
        return r == MIXP_OK ? mixpi_guard_settle_update(ctx, &state, mixpi_update_bits(s)) : r;
    }

    /* The state that was sent before arrives; the new one is sent. */
    if (w->posted_scaler) {
        r = mixpi_note_failure(ctx, "guard", d->collect(&ctx->exec, 1, &state, sizeof state));
        if (r == MIXP_OK) r = mixpi_guard_settle_update(ctx, &state, w->posted_bits);
    }
    w->updated_step = ctx->step;
    w->posted_scaler = NULL;
    w->posted_bits = mixpi_update_bits(s);
    if (r == MIXP_OK)
        r = mixpi_note_failure(ctx, "guard", d->post(&ctx->exec, 1, s->state, sizeof state));
    if (r == MIXP_OK) w->posted_scaler = s;
    return r;
}

/* Hook after an update. scaler NULL: a step without a scaler. */
static mixp_result mixpi_guard_updated(mixp_context *ctx, void *scaler) {
    const mixp_scaler *s = (const mixp_scaler *)scaler;
    ctx->watch->met |= s ? mixpi_update_bits(s) : INT32_MAX;
    if (s) return mixpi_guard_take_state(ctx, s);
    MIXPI_TRY(mixpi_guard_updating(ctx));
    return mixpi_settle_pins(ctx);
}

/* Settles everything at once, without the usual delay. Waits for the device. */
static mixp_result mixpi_guard_catch_up(mixp_context *ctx) {
    mixpi_watch *w = ctx->watch;
    mixp_scaler_state state;
    if (!mixpi_guard_is_on(ctx)) return MIXP_OK;
    /* One rank may save on its own, so it must not ask the others. */
    if (mixpi_world(ctx) > 1) return MIXP_OK;
    mixp_result r = mixpi_guard_settle(ctx);
    if (r == MIXP_OK && w->posted) r = mixpi_guard_settle(ctx);
    const mixp_scaler *s = (const mixp_scaler *)w->posted_scaler;
    w->posted_scaler = NULL;
    if (r != MIXP_OK || !s) return r;
    MIXPI_TRY(mixpi_scaler_get(s, &state));
    return mixpi_guard_settle_update(ctx, &state, w->posted_bits);
}
