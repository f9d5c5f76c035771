#pragma once
#include "delayed.c"
#include "../tensors/watcher.c"
/* --- recipes: what quantising an operand loses ----------------------------------------------- *
 *
 * The loss is measured in steps that the guard samples; watch/settle.c uses it to decide fallbacks.
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

/* The factor of the row or column of element i. */
static double mixpi_line_factor(const mixp_quantise_args *k, int64_t i) {
    return (double)k->line_scales[k->block_cols == 1 ? i % k->cols : i / k->cols];
}

static void mixpi_loss_of_row(const void *job, int64_t row) {
    const mixpi_losing *l = (const mixpi_losing *)job;
    const mixp_quantise_args *k = l->k;
    mixpi_loss sum = { 0.0, 0, 0 };
    for (int64_t i = row * k->cols; i < (row + 1) * k->cols; i++) {
        const double decode = k->by_lines ? mixpi_line_factor(k, i) : l->decode;
        mixpi_loss_add(&sum, (float)mixp_get(k->x, i), (double)mixp_f32_from_bf16(k->y[i]) * decode,
            (double)k->given, l->beyond);
    }
    l->rows[row] = sum;
}

/* Measures what k has lost, with the same bits at any number of threads. */
static mixp_result mixpi_loss_of(
    mixp_context *ctx, const mixp_quantise_args *k, float decode, mixpi_loss *all) {
    mixpi_losing l;
    l.k = k;
    l.decode = (double)decode;
    l.beyond = mixpi_lossy_beyond(k->element);
    l.rows = (mixpi_loss *)mixpi_scratch(&ctx->exec, (size_t)k->rows * sizeof *l.rows);
    if (!l.rows) return MIXP_ERR_MEMORY;
    mixpi_each_unit(&ctx->exec, k->rows, k->cols, mixpi_loss_of_row, &l);
    memset(all, 0, sizeof *all);
    for (int64_t row = 0; row < k->rows; row++) {
        all->error += l.rows[row].error;
        all->seen += l.rows[row].seen;
        all->clipped += l.rows[row].clipped;
    }
    return MIXP_OK;
}

/* --- blocks --- */

typedef struct mixpi_blocks_job {
    const mixp_quantise_args *k;
    mixpi_grid grid;
    double     decode, beyond;  /* beyond: numbers above it do not round to the largest one */
    int64_t    rows, cols;      /* rows and columns of a block                             */
    mixp_block_look *strips;    /* counts of each strip of blocks                          */
} mixpi_blocks_job;

/* Returns 1 / decode, or the largest f32 where 1 / decode overflows because decode is subnormal. */
static float mixpi_inverse_scale(float decode) {
    const float s = 1.0f / decode;
    return mixp_bits_of_f32(s) == 0x7F800000u ? mixp_f32_of_bits(0x7F7FFFFFu) : s;
}

/* Adds the counts of a part. */
static void mixpi_blocks_add(mixp_block_look *sum, const mixp_block_look *part) {
    const int scaled = part->blocks > part->flushed, before = sum->blocks > sum->flushed;
    if (scaled && (!before || part->least < sum->least)) sum->least = part->least;
    if (scaled && (!before || part->largest > sum->largest)) sum->largest = part->largest;
    sum->blocks += part->blocks;
    sum->clipped += part->clipped;
    sum->flushed += part->flushed;
}

/* 4over6: finds which scales the block has kept: those that reproduce more of its values. */
static mixpi_scales mixpi_block_choice(
    const mixpi_blocks_job *j, int64_t first, mixpi_scales four, mixpi_scales six) {
    const mixp_quantise_args *k = j->k;
    int fours = 0, sixes = 0;
    for (int64_t r = 0; r < j->rows; r++)
        for (int64_t c = 0; c < j->cols; c++) {
            const int64_t at = first + r * k->cols + c;
            const float x = (float)mixp_get(k->x, at), y = mixp_f32_from_bf16(k->y[at]);
            fours += mixpi_4over6_value(&j->grid, four, x) == y;
            sixes += mixpi_4over6_value(&j->grid, six, x) == y;
        }
    return fours > sixes ? four : six;
}

/* Looks at the block whose first element is `first`. */
static mixp_block_look mixpi_block_of(const mixpi_blocks_job *j, int64_t first) {
    const mixp_quantise_args *k = j->k;
    mixp_block_look one = { 0, 0, 0, 0, 0 };
    uint32_t amax = 0, left = 0;
    for (int64_t r = 0; r < j->rows; r++)
        for (int64_t c = 0; c < j->cols; c++) {
            const int64_t at = first + r * k->cols + c;
            const uint32_t a = mixp_bits_of_f32((float)mixp_get(k->x, at)) & 0x7FFFFFFFu;
            if (a > amax) amax = a;
            left |= k->y[at].bits & 0x7FFFu;
        }
    if (!amax || amax >= 0x7F800000u) return one;

    one.blocks = 1;
    one.flushed = !left;
    if (!left) return one;
    const double decode = k->by_lines ? mixpi_line_factor(k, first) : j->decode;
    const float tensor = mixpi_inverse_scale((float)decode);
    mixpi_scales s = mixpi_scales_of(k, &j->grid, tensor, amax);
    if (k->choice) s = mixpi_block_choice(j, first, mixpi_scales_e4m3(tensor, 1.5f, amax), s);
    frexp((double)s.out * decode, &one.least);
    one.largest = --one.least;
    one.clipped = (double)mixp_f32_of_bits(amax) * (double)s.in > j->beyond;
    return one;
}

static void mixpi_blocks_of_strip(const void *job, int64_t strip) {
    const mixpi_blocks_job *j = (const mixpi_blocks_job *)job;
    mixp_block_look sum = { 0, 0, 0, 0, 0 };
    for (int64_t c = 0; c < j->k->cols; c += j->cols) {
        const mixp_block_look one = mixpi_block_of(j, strip * j->rows * j->k->cols + c);
        mixpi_blocks_add(&sum, &one);
    }
    j->strips[strip] = sum;
}

/* Adds the blocks that k has quantised to *all. Host memory. */
static mixp_result mixpi_blocks_look(
    mixp_context *ctx, const mixp_quantise_args *k, float decode, mixp_block_look *all) {
    mixpi_blocks_job j;
    j.k = k;
    j.grid = mixpi_grid_of(k->element);
    j.decode = (double)decode;
    j.beyond = k->element == MIXP_F4_E2M1 ? 7.0 : mixpi_lossy_beyond(k->element);
    j.rows = k->block_rows ? k->block_rows : 1;
    j.cols = k->block_cols ? k->block_cols : k->cols;
    const int64_t strips = k->rows / j.rows;
    j.strips = (mixp_block_look *)mixpi_scratch(&ctx->exec, (size_t)strips * sizeof *j.strips);
    if (!j.strips) return MIXP_ERR_MEMORY;
    mixpi_each_unit(&ctx->exec, strips, j.rows * k->cols, mixpi_blocks_of_strip, &j);
    for (int64_t i = 0; i < strips; i++) mixpi_blocks_add(all, &j.strips[i]);
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
static int mixpi_lossy_has_fallen(const mixpi_lossy *operands) {
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
    mixp_lose_args l = MIXPI_ZERO;
    l.n = k->rows * k->cols;
    l.x = k->x;
    l.y = k->y;
    l.decode = k->own;
    l.line_scales = k->by_lines ? k->line_scales : NULL;
    l.cols = k->cols;
    l.of_columns = k->block_cols == 1;
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
    o->bounds[0] = mixpi_lossy_bound(r->error, mixpi_lossy_error_bound(k->element));
    o->bounds[1] = mixpi_lossy_bound(r->clipped, 0.01);
    if (c->ctx->device->download) return mixpi_lossy_queue(c, role, k);
    if (r->kind == MIXP_RECIPE_FP8_DELAYED && k->given == 1.0f) return MIXP_OK;
    mixp_result result = mixpi_loss_of(c->ctx, k, decode, &all);
    if (!o->seen) memset(&o->blocks, 0, sizeof o->blocks);
    if (result == MIXP_OK) result = mixpi_blocks_look(c->ctx, k, decode, &o->blocks);
    if (result != MIXP_OK) return result;
    mixpi_lossy_join(o, all.seen ? all.error / (double)all.seen : 0.0,
        all.seen ? (double)all.clipped / (double)all.seen : 0.0);
    return MIXP_OK;
}
