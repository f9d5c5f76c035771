#pragma once
#include "events.c"
/* --- what a sample shows ------------------------------------------------------------------- */

static const mixp_look *mixpi_look_of(const mixpi_watch *w, int number, int which) {
    return &w->seen[MIXPI_ROW_SITES + (number - 1) * MIXPI_LOOKS + which];
}

/* Can the site still store, or read, a wider dtype? */
static int mixpi_site_can_fall(const mixpi_site *site) {
    if (site->pinned) return 0;
    return (site->low != MIXP_F32 && !site->fallen) || (site->casts && site->fallen < 2);
}

/* Is too large a share of the non-zero values flushed, in an array of small numbers? */
static int mixpi_flushes(const mixpi_watch *w, const mixpi_site *site, const mixp_look *look) {
    const int stored_low = mixpi_is_low(site->dtype);
    return look->largest > 0.0f && mixpi_is_small(look, site->low) &&
           mixp_look_flushed(look, stored_low) > (double)w->flushed;
}

/* Is the array all zeros while its neighbour has tiny numbers? Then all values were flushed. */
static int mixpi_has_vanished(const mixp_look *look, const mixp_look *neighbour, mixp_dtype low) {
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
static int mixpi_site_is(const mixpi_site *site, int traits) {
    return (site->traits & traits) != 0;
}

/* Looks at t at once, through a row of device memory. Waits for the device. */
static mixp_result mixpi_look_now(
    const mixp_tensor *t, mixp_dtype low, mixp_look *row, mixp_look *found) {
    mixp_context *ctx = t->ctx;
    const mixp_look_args k = mixpi_look_at(mixpi_tensor_in(t), t->count, low, row);
    MIXPI_TRY(mixpi_device_zero(ctx, row, sizeof *row));
    MIXPI_TRY(mixpi_note_failure(ctx, "look", ctx->device->kernels->look(&ctx->exec, &k)));
    return mixpi_download(ctx, found, row, sizeof *found);
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
static int mixpi_site_has_zero_weight(mixp_context *ctx, const mixpi_site *site) {
    mixp_look *row = &ctx->watch->rows[MIXPI_ROW_WEIGHT], found;
    for (int i = 0; i < 2 && site->read[i]; i++) {
        const mixp_tensor read = mixpi_as_read(site->read[i]);
        if (!mixpi_is_real(read.dtype)) continue;
        if (mixpi_look_now(&read, MIXP_F16, row, &found) != MIXP_OK) return 1;
        if (found.zeros == found.count) return 1;
    }
    return 0;
}

/* Did values vanish between an input and the site, or gradients between the site and an input? */
static void mixpi_judge_vanished(mixp_context *ctx, int number) {
    mixpi_watch *w = ctx->watch;
    mixpi_site *site = mixpi_site_at(ctx, number);
    for (int i = 0; i < MIXPI_SITE_FROM && site->from[i]; i++) {
        mixpi_site *from = mixpi_site_at(ctx, site->from[i]);
        const int value = mixpi_has_vanished(mixpi_look_of(w, number, MIXPI_LOOK_VALUE),
            mixpi_look_of(w, site->from[i], MIXPI_LOOK_VALUE), site->low);
        const int grad = mixpi_has_vanished(mixpi_look_of(w, site->from[i], MIXPI_LOOK_GRAD),
            mixpi_look_of(w, number, MIXPI_LOOK_GRAD), from->low);
        if (!value && !grad) continue;
        if (mixpi_site_is(site, MIXPI_CUTS) || mixpi_site_has_zero_weight(ctx, site)) return;
        if (value) site->verdict |= MIXPI_SAW_NO_VALUE;
        if (grad) from->verdict |= MIXPI_SAW_NO_GRAD;
    }
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

/* Is a weight or a buffer that the site reads not finite? Looks at it at once: only after a
 * failure. */
static int mixpi_site_has_bad_weight(mixp_context *ctx, const mixpi_site *site) {
    mixp_look *row = &ctx->watch->rows[MIXPI_ROW_WEIGHT], found;
    for (int i = 0; i < 2 && site->read[i]; i++) {
        const mixp_tensor read = mixpi_as_read(site->read[i]);
        if (!mixpi_is_real(read.dtype)) continue;
        if (mixpi_look_now(&read, MIXP_F16, row, &found) != MIXP_OK) return 0;
        if (found.nonfinite) return 1;
    }
    return 0;
}

/* Returns the number of a cast or dropout between site `from` and its reader `number` whose result
 * is not finite; 0 = not found. Names and identities of sites ignore casts and dropout. */
static int mixpi_bad_between(const mixp_context *ctx, int from, int number) {
    const mixpi_watch *w = ctx->watch;
    const mixpi_site *reader = mixpi_site_at(ctx, number);
    if (mixpi_site_is(reader, MIXPI_IS_CAST | MIXPI_IS_DROPOUT)) return 0;
    for (int n = 1; n <= w->n_sites; n++) {
        const mixpi_site *site = mixpi_site_at(ctx, n);
        if (site->from[0] != from || !mixpi_look_of(w, n, MIXPI_LOOK_VALUE)->nonfinite) continue;
        if (mixpi_site_is(site, MIXPI_IS_CAST | MIXPI_IS_DROPOUT)) return n;
    }
    return 0;
}

/* Returns a site that `number`, whose result is not finite, reads and whose result is not finite; 0
 * if `number` reads no such site. */
static int mixpi_bad_input(const mixp_context *ctx, int number) {
    const mixpi_site *site = mixpi_site_at(ctx, number);
    int i, bad = 0;
    if (!number) return 0;
    for (i = 0; i < MIXPI_SITE_FROM && site->from[i] && !bad; i++)
        if (mixpi_look_of(ctx->watch, site->from[i], MIXPI_LOOK_VALUE)->nonfinite)
            bad = site->from[i];
    for (i = 0; i < MIXPI_SITE_FROM && site->from[i] && !bad; i++)
        bad = mixpi_bad_between(ctx, site->from[i], number);
    return bad;
}

/* The site of a non-finite loss: the input of the first non-finite product with the loss scale,
 * otherwise the last non-finite scalar; 0 if all losses are finite. */
static int mixpi_bad_loss(const mixp_context *ctx) {
    const mixpi_watch *w = ctx->watch;
    int n, scalar = 0;
    for (n = 1; n <= w->n_sites; n++) {
        const mixpi_site *site = mixpi_site_at(ctx, n);
        const int bad = mixpi_look_of(w, n, MIXPI_LOOK_VALUE)->nonfinite != 0;
        if (mixpi_site_is(site, MIXPI_SCALES_LOSS) &&
            mixpi_look_of(w, n, MIXPI_LOOK_VALUE)->count) {
            const int loss = bad ? mixpi_bad_input(ctx, n) : 0;
            if (loss) return loss;
            scalar = -1;
        }
        if (bad && site->scalar && scalar >= 0 &&
            (!scalar || site->place > mixpi_site_at(ctx, scalar)->place))
            scalar = n;
    }
    return scalar > 0 ? scalar : 0;
}

/* Finds a cast that autocast made for site `number`, that overflowed, and whose input is finite and
 * comes from no site. Returns the number of the cast's site; 0 = not found. Another input of site
 * `number`, such as a mask, may hold Inf. */
static int mixpi_bad_cast(const mixp_context *ctx, int number) {
    const mixpi_watch *w = ctx->watch;
    for (int n = 1; number && n <= w->n_sites; n++)
        if (mixpi_site_number(w, n)->reader == number &&
            mixpi_look_of(w, n, MIXPI_LOOK_VALUE)->nonfinite &&
            !mixpi_look_of(w, n, MIXPI_LOOK_DATA)->nonfinite)
            return n;
    return 0;
}

/* Is the Inf that site `number` stored one that the program wrote? No if a number that the site
 * read was beyond the range of its low dtype, too. */
static int mixpi_inf_was_written(const mixp_context *ctx, int number) {
    const mixpi_site *site = mixpi_site_at(ctx, number);
    if (mixp_bits_of_f32(site->written) != 0x7F800000u ||
        mixpi_look_of(ctx->watch, number, MIXPI_LOOK_DATA)->saturated)
        return 0;
    for (int i = 0; i < MIXPI_SITE_FROM && site->from[i]; i++)
        if (mixpi_look_of(ctx->watch, site->from[i], MIXPI_LOOK_VALUE)->saturated) return 0;
    return 1;
}

/* Finds where the NaN of a loss began: the site whose inputs hold no NaN. The loss itself if that
 * is Inf. */
static int mixpi_trace_nan(const mixp_context *ctx, int loss) {
    int left = ctx->watch->n_sites, at = loss, before = loss;
    while (before && left--) {
        at = before;
        const mixpi_site *site = mixpi_site_at(ctx, at);
        before = 0;
        for (int i = 0; i < MIXPI_SITE_FROM && site->from[i] && !before; i++)
            if (mixpi_look_of(ctx->watch, site->from[i], MIXPI_LOOK_VALUE)->nan)
                before = site->from[i];
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
    if (!mixpi_look_of(w, number, MIXPI_LOOK_VALUE)->nonfinite) return 0;
    if (mixpi_site_is(site, MIXPI_SHRINKS)) return 0;
    if (mixpi_site_is(site, MIXPI_MAY_MEAN) && number != began) return 0;
    if (mixpi_look_of(w, number, MIXPI_LOOK_DATA)->nonfinite) return 0;
    if (mixpi_inf_was_written(ctx, number)) return 0;
    if (mixpi_bad_input(ctx, number) || mixpi_bad_cast(ctx, number)) return 0;
    return !mixpi_site_has_bad_weight(ctx, site);
}

/* The last site, in the order of the step, with a non-finite value in row `which`, or 0. */
static int mixpi_last_bad(const mixp_context *ctx, int which) {
    const mixpi_watch *w = ctx->watch;
    int n, best = 0;
    for (n = 1; n <= w->n_sites; n++) {
        if (!mixpi_look_of(w, n, which)->nonfinite) continue;
        if (!best || mixpi_site_at(ctx, n)->place > mixpi_site_at(ctx, best)->place) best = n;
    }
    return best;
}

/* Did a site with a non-finite scalar result leave the range of a low dtype? Yes if the result is
 * low and the operator is not one, like a division or a logarithm, whose f32 result would not be
 * finite either. */
static int mixpi_site_left_range(const mixpi_watch *w, int number) {
    const mixpi_site *site = mixpi_site_number(w, number);
    return mixpi_is_low(site->dtype) && !mixpi_site_is(site, MIXPI_SHRINKS | MIXPI_MAY_MEAN);
}

static mixp_origin mixpi_forward_origin(mixp_context *ctx, int number) {
    const mixpi_site *site = mixpi_site_at(ctx, number);
    if (mixpi_look_of(ctx->watch, number, MIXPI_LOOK_DATA)->nonfinite) return MIXP_ORIGIN_INPUT;
    if (mixpi_site_has_bad_weight(ctx, site)) return MIXP_ORIGIN_WEIGHT;
    if (!site->scalar || mixpi_site_left_range(ctx->watch, number)) return MIXP_ORIGIN_FORWARD;
    return MIXP_ORIGIN_LOSS;
}

/* Where the first non-finite value of this sample arose, as seen by this rank. loss: the site of a
 * non-finite loss; began: the site where that began; or both are 0. */
static mixp_origin mixpi_judge_origin(mixp_context *ctx, int loss, int began, int *site) {
    const int grad = mixpi_last_bad(ctx, MIXPI_LOOK_GRAD);
    const int leaf = mixpi_last_bad(ctx, MIXPI_LOOK_LEAF);
    *site = began;
    if (began && mixpi_inf_was_written(ctx, began)) {
        *site = mixpi_trace_nan(ctx, loss);
        return MIXP_ORIGIN_MASK;
    }
    if (began) return mixpi_forward_origin(ctx, began);
    *site = grad;
    if (leaf && (!grad || mixpi_site_at(ctx, leaf)->place > mixpi_site_at(ctx, grad)->place))
        *site = leaf;
    return *site ? MIXP_ORIGIN_BACKWARD : MIXP_ORIGIN_UNKNOWN;
}

/* Computes the share of a site's variation that rounding lost. A variation below a millionth of the
 * largest value does not count. */
static void mixpi_judge_precision(const mixpi_watch *w, mixpi_site *site, int number) {
    const mixp_look *row = mixpi_look_of(w, number, MIXPI_LOOK_LOSS);
    const double size = 1e-6 * (double)mixpi_look_of(w, number, MIXPI_LOOK_VALUE)->largest;
    const double lost = (double)row->largest;
    float varied;
    site->lost = 0.0;
    if (mixpi_site_is(site, MIXPI_SCORES)) return; /* its row holds a look */
    memcpy(&varied, &row->nan, sizeof varied);     /* this row holds two floats */
    double all = (double)varied;
    if (!(all > size * size) || !mixpi_f64_is_finite(all) || !mixpi_f64_is_finite(lost)) return;
    site->lost = sqrt(lost / all);
    site->verdict |= MIXPI_SAW_INSPECTED;
    if (site->lost > 0.5 * (double)w->imprecise) site->verdict |= MIXPI_SAW_ROUGH;
    if (site->lost > (double)w->imprecise) site->verdict |= MIXPI_SAW_IMPRECISE;
}

/* Reads what a device measured of a linear's operands, before ranks add the counts of all rows. */
static void mixpi_judge_operands(mixpi_watch *w, mixpi_site *site, int number) {
    mixp_look *row = &w->seen[MIXPI_ROW_SITES + (number - 1) * MIXPI_LOOKS + MIXPI_LOOK_LOSS];
    mixp_losses found;
    if (mixpi_site_is(site, MIXPI_SCORES)) return; /* its row holds a look */
    memcpy(&found, &row->count, sizeof found);
    memset(&row->count, 0, sizeof found);
    for (int i = 0; i < MIXPI_ROLES; i++)
        if (found.seen >> i & 1)
            mixpi_lossy_join(&site->operands[i], found.error[i], found.clipped[i]);
}

/* Did this rank see the gradient of a site? For a cast that was left out, its producer's gradient
 * counts. */
static int mixpi_saw_grad(const mixpi_watch *w, const mixpi_site *site, int number) {
    if (mixpi_look_of(w, number, MIXPI_LOOK_GRAD)->count) return 1;
    if (!mixpi_site_is(site, MIXPI_IS_CAST)) return 0;
    return !site->from[0] || mixpi_look_of(w, site->from[0], MIXPI_LOOK_GRAD)->count;
}

/* Judges the sample on this rank only: other ranks do not know how the sites are connected here. */
static void mixpi_judge(mixp_context *ctx, mixp_origin *origin, int *at) {
    const int loss = mixpi_bad_loss(ctx);
    const int began = loss ? mixpi_trace(ctx, loss) : 0;
    const int known = ctx->watch->n_sites;
    *origin = mixpi_judge_origin(ctx, loss, began, at);
    for (int n = 1; n <= known; n++) mixpi_site_at(ctx, n)->verdict = 0;
    for (int n = 1; n <= known; n++) {
        if (mixpi_site_can_fall(mixpi_site_at(ctx, n)) && mixpi_site_overflowed(ctx, n, began))
            mixpi_site_at(ctx, n)->verdict |= MIXPI_SAW_OVERFLOW;
        if (mixpi_saw_grad(ctx->watch, mixpi_site_at(ctx, n), n))
            mixpi_site_at(ctx, n)->verdict |= MIXPI_SAW_GRAD;
        mixpi_judge_vanished(ctx, n);
        mixpi_judge_precision(ctx->watch, mixpi_site_at(ctx, n), n);
        mixpi_judge_operands(ctx->watch, mixpi_site_at(ctx, n), n);
    }
}
