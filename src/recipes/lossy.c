#pragma once
#include "delayed.c"
#include "../tensors/watcher.c"
/* --- recipes: what quantising an operand loses ----------------------------------------------- *
 *
 * In steps that the guard samples. watch/settle.c decides by it.
 */
typedef struct mixpi_losing {
    const mixp_quantise_args *k;
    double      decode, beyond; /* beyond: numbers above it do not round to the largest one */
    mixpi_loss *rows;           /* loss of each row                                        */
} mixpi_losing;

/* A finite value is clipped if its magnitude, times the scale, is above this bound: below the bound
 * it rounds to the element's largest number at most. */
static double mixpi_lossy_beyond(mixp_dtype element) {
    return element == MIXP_F8_E5M2 ? 61440.0 : 464.0;
}

static void mixpi_loss_of_row(const void *job, int64_t row) {
    const mixpi_losing *l = (const mixpi_losing *)job;
    mixpi_loss sum = { 0.0, 0, 0 };
    for (int64_t i = row * l->k->cols; i < (row + 1) * l->k->cols; i++)
        mixpi_loss_add(&sum, (float)mixp_get(l->k->x, i),
                       (double)mixp_f32_from_bf16(l->k->y[i]) * l->decode, (double)l->k->given,
                       l->beyond);
    l->rows[row] = sum;
}

/* What k has lost, with the same bits at any number of threads. */
static mixp_result mixpi_loss_of(mixp_context *ctx, const mixp_quantise_args *k, float decode,
                                 mixpi_loss *all) {
    mixpi_losing l;
    int64_t row;
    l.k = k;
    l.decode = (double)decode;
    l.beyond = mixpi_lossy_beyond(k->element);
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

/* The bound that a field of mixp_recipe sets; 0 = never. */
static double mixpi_lossy_bound(float given, double usual) {
    return given < 0.0f ? 0.0 : given > 0.0f ? (double)given : usual;
}

static double mixpi_lossy_error_bound(mixp_dtype element) {
    return element == MIXP_F8_E4M3 ? 0.1 : element == MIXP_F8_E5M2 ? 0.15 : 0.6;
}

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
    const mixp_device *device = c->ctx->device;
    if (device->download && !device->kernels->lose) return 0;
    return operands && flags & MIXPI_WATCHED && flags & MIXPI_SAMPLED;
}

/* On a device: the losses travel to the guard with the rows of the sample. */
static mixp_result mixpi_lossy_queue(mixp_call *c, mixpi_role role, const mixp_quantise_args *k) {
    const mixpi_watcher *watcher = mixpi_watcher_of(c->ctx);
    mixp_lose_args l;
    memset(&l, 0, sizeof l);
    l.n = k->rows * k->cols;
    l.x = k->x;
    l.y = k->y;
    l.decode = k->own;
    l.scale = k->given_at;
    l.beyond = mixpi_lossy_beyond(k->element);
    l.operand = (int)role;
    l.out = watcher ? watcher->losses(c) : NULL;
    return l.out ? MIXPI_RUN(c, lose, &l) : MIXP_ERR_MEMORY;
}

/* Measures what k lost, after k has quantised the operand. The first scale of delayed scaling, 1,
 * is not judged. */
static mixp_result mixpi_lossy_measure(mixp_call *c, const mixp_recipe *r, mixpi_lossy *operands,
                                       mixpi_role role, const mixp_quantise_args *k, float decode) {
    mixpi_lossy *o = &operands[role];
    mixpi_loss all;
    mixp_result result;
    o->bounds[0] = mixpi_lossy_bound(r->error, mixpi_lossy_error_bound(k->element));
    o->bounds[1] = mixpi_lossy_bound(r->clipped, 0.01);
    if (c->ctx->device->download) return mixpi_lossy_queue(c, role, k);
    if (r->kind == MIXP_RECIPE_FP8_DELAYED && k->given == 1.0f) return MIXP_OK;
    result = mixpi_loss_of(c->ctx, k, decode, &all);
    if (result != MIXP_OK) return result;
    mixpi_lossy_join(o, all.seen ? all.error / (double)all.seen : 0.0,
                     all.seen ? (double)all.clipped / (double)all.seen : 0.0);
    return MIXP_OK;
}
