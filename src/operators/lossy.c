#pragma once
#include "delayed.c"
#include "../tensors/watcher.c"
/* --- recipes: what quantising an operand loses ----------------------------------------------- *
 *
 * In steps that the guard samples. watch/watch.c decides by it.
 */
typedef struct mixpi_loss { double error; int64_t seen, clipped; } mixpi_loss;

typedef struct mixpi_losing {
    const mixp_quantise_args *k;
    double      decode, beyond; /* beyond: numbers above it do not round to the largest one */
    mixpi_loss *rows;           /* of each row                                             */
} mixpi_losing;

static void mixpi_loss_add(const mixpi_losing *l, int64_t i, mixpi_loss *sum) {
    const double x = (double)mixp_get(l->k->x, i), size = fabs(x);
    const double y = (double)mixp_f32_from_bf16(l->k->y[i]) * l->decode;
    if (!(size > 0.0)) return;      /* 0 or NaN */
    sum->seen++;
    if (mixpi_f64_is_finite(size)) {
        sum->error += fabs(y - x) / size;
        sum->clipped += l->k->given > 0.0f && size * (double)l->k->given > l->beyond;
    } else {
        sum->error += 1.0;
        sum->clipped++;
    }
}

static void mixpi_loss_of_row(const void *job, int64_t row) {
    const mixpi_losing *l = (const mixpi_losing *)job;
    mixpi_loss sum = { 0.0, 0, 0 };
    int64_t i;
    for (i = row * l->k->cols; i < (row + 1) * l->k->cols; i++) mixpi_loss_add(l, i, &sum);
    l->rows[row] = sum;
}

/* What k has lost, with the same bits at any number of threads. */
static mixp_result mixpi_loss_of(mixp_context *ctx, const mixp_quantise_args *k, float decode,
                                 mixpi_loss *all) {
    mixpi_losing l;
    int64_t row;
    l.k = k;
    l.decode = (double)decode;
    l.beyond = k->element == MIXP_F8_E5M2 ? 61440.0 : 464.0;
    l.rows = (mixpi_loss *)mixpi_scratch(&ctx->exec, (size_t)k->rows * sizeof *l.rows);
    if (!l.rows) return MIXP_ERR_MEMORY;
    mixpi_each_unit(&ctx->exec, k->rows, k->cols, mixpi_loss_of_row, &l);
    memset(all, 0, sizeof *all);
    for (row = 0; row < k->rows; row++) {
        all->error += l.rows[row].error;
        all->seen += l.rows[row].seen;
        all->clipped += l.rows[row].clipped;
    }
    return MIXP_OK;
}

/* A loss as a share of its bound; 0: the bound is never. */
static double mixpi_loss_excess(double loss, float given, double usual) {
    const double bound = given > 0.0f ? (double)given : usual;
    return given < 0.0f ? 0.0 : loss / bound;
}

static double mixpi_lossy_error_bound(mixp_dtype element)
{ return element == MIXP_F8_E4M3 ? 0.1 : element == MIXP_F8_E5M2 ? 0.15 : 0.6; }

/* The operands of a linear, one for each mixpi_role, as a guard knows them; NULL: no guard is on,
 * or it has no room for the site. */
static mixpi_lossy *mixpi_lossy_of(const mixp_call *c) {
    const mixpi_watcher *watcher = mixpi_watcher_of(c->ctx);
    return mixpi_watched(c->ctx) & MIXPI_WATCHED ? watcher->operands(c) : NULL;
}

/* Bits of the operands that have fallen back. */
static int mixpi_lossy_fallen(const mixpi_lossy *operands) {
    int i, bits = 0;
    for (i = 0; operands && i < MIXPI_ROLES; i++) bits |= operands[i].fallen << i;
    return bits;
}

/* Does this step measure the operands? */
static int mixpi_lossy_watches(const mixp_call *c, const mixpi_lossy *operands) {
    const int flags = mixpi_watched(c->ctx);
    return operands && flags & MIXPI_WATCHED && flags & MIXPI_SAMPLED && !c->ctx->device->download;
}

/* After k has quantised operand o. */
static mixp_result mixpi_lossy_measure(mixp_call *c, const mixp_recipe *r, mixpi_lossy *o,
                                       const mixp_quantise_args *k, float decode) {
    mixpi_loss all;
    double error, clipped, excess;
    const mixp_result result = mixpi_loss_of(c->ctx, k, decode, &all);
    if (result != MIXP_OK) return result;
    error = all.seen ? all.error / (double)all.seen : 0.0;
    clipped = all.seen ? (double)all.clipped / (double)all.seen : 0.0;
    excess = fmax(mixpi_loss_excess(error, r->error, mixpi_lossy_error_bound(k->element)),
                  mixpi_loss_excess(clipped, r->clipped, 0.01));
    o->seen = 1;
    o->error = fmax(o->error, error);
    o->clipped = fmax(o->clipped, clipped);
    o->excess = fmax(o->excess, excess);
    return MIXP_OK;
}
