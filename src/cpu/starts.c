#pragma once
#include "row_plans.c"
#include "machine.c"
/* --- what a kernel does once a call --------------------------------------------------------- *
 * A kernel checks its arguments, plans its work and runs tasks. Only the tasks differ between
 * instruction sets: mixpi_cpu_NAME is compiled once, and each set's kernel passes its tasks. */

/* The tasks of maps and sums. */
typedef struct mixpi_map_units { mixpi_unit map, sum, join; } mixpi_map_units;

/* y (+)= m's values. */
static mixp_result mixpi_map_run(const mixp_exec *x, mixpi_map *m, mixpi_unit unit) {
    if (!mixpi_map_is_real(m)) return MIXP_ERR_DTYPE;
    mixpi_map_plan(m);
    return mixpi_each_unit(x, m->outputs * m->blocks, mixpi_map_block(m), unit, m);
}

/* y (+)= factor times the sum of the map's values over the axes along which y repeats. */
static mixp_result mixpi_sum_run(const mixp_exec *x, mixpi_sum *s, const mixpi_map_units *units) {
    if (!mixpi_map_is_real(&s->map)) return MIXP_ERR_DTYPE;
    mixpi_sum_plan(s);
    int64_t tiles = s->map.outputs * s->tiles;
    if (tiles == 0) return MIXP_OK;
    if (s->runs > 1) {
        size_t count = (size_t)mixpi_sum_partial(s, s->runs, 0);
        s->partial = (float *)mixpi_scratch(x, count * sizeof(float));
        if (!s->partial) return MIXP_ERR_MEMORY;
    }
    mixpi_each_unit(x, tiles * s->runs, mixpi_sum_unit_work(s), units->sum, s);
    if (s->runs > 1) mixpi_each_unit(x, tiles, s->runs * mixpi_map_block(&s->map), units->join, s);
    return MIXP_OK;
}

static mixp_result mixpi_cpu_unary(
    const mixp_exec *x, const mixp_unary_args *k, const mixpi_map_units *units) {
    mixpi_map m;
    if ((unsigned)k->op >= MIXP_UNARY_COUNT) return MIXP_ERR_ARGUMENT;
    mixpi_map_init(&m, MIXPI_FN_UNARY + (int)k->op, 1, &k->n, k->y);
    mixpi_map_source(&m, k->a, NULL);
    m.p = k->p;
    m.q = k->q;
    return mixpi_map_run(x, &m, units->map);
}

static mixp_result mixpi_cpu_unary_backward(
    const mixp_exec *x, const mixp_unary_backward_args *k, const mixpi_map_units *units) {
    mixpi_map m;
    if ((unsigned)k->op >= MIXP_UNARY_COUNT) return MIXP_ERR_ARGUMENT;
    mixpi_map_init(&m, MIXPI_FN_UNARY_D + (int)k->op, 1, &k->n, k->da);
    mixpi_map_source(&m, k->dy, NULL);
    if (mixpi_slope_reads_result(k->op)) mixpi_map_source(&m, k->y, NULL);
    else if (!mixpi_slope_is_factor(k->op)) mixpi_map_source(&m, k->a, NULL);
    m.p = k->p;
    m.q = k->q;
    return mixpi_map_run(x, &m, units->map);
}

static mixp_result mixpi_cpu_binary(
    const mixp_exec *x, const mixp_binary_args *k, const mixpi_map_units *units) {
    mixpi_map m;
    if (!mixpi_binary_is_valid(k)) return MIXP_ERR_ARGUMENT;
    mixpi_map_init(&m, MIXPI_FN_BINARY + (int)k->op, k->rank, k->shape, k->y);
    mixpi_map_source(&m, k->a, k->a_strides);
    mixpi_map_source(&m, k->b, k->b_strides);
    return mixpi_map_run(x, &m, units->map);
}

static mixp_result mixpi_cpu_binary_backward(
    const mixp_exec *x, const mixp_binary_args *k, const mixpi_map_units *units) {
    mixpi_sum s;
    float sign = k->which && k->op == MIXP_BINARY_SUB ? -1.0f : 1.0f;
    if (!mixpi_binary_is_valid(k)) return MIXP_ERR_ARGUMENT;
    int sums = mixpi_binary_repeats(k);
    mixpi_binary_slope_map(&s.map, k, sums);
    s.map.p = s.factor = sign;
    return sums ? mixpi_sum_run(x, &s, units) : mixpi_map_run(x, &s.map, units->map);
}

static mixp_result mixpi_cpu_reduce(
    const mixp_exec *x, const mixp_reduce_args *k, const mixpi_map_units *units) {
    mixpi_sum s;
    mixpi_reduce_map(&s.map, MIXPI_FN_COPY, k, 0);
    s.factor = k->factor;
    return mixpi_sum_run(x, &s, units);
}

static mixp_result mixpi_cpu_reduce_backward(
    const mixp_exec *x, const mixp_reduce_args *k, const mixpi_map_units *units) {
    mixpi_map m;
    mixpi_reduce_map(&m, MIXPI_FN_UNARY + (int)MIXP_UNARY_SCALE, k, 1);
    m.p = k->factor;
    return mixpi_map_run(x, &m, units->map);
}

static void mixpi_note_bad(const mixp_scale_by_args *k) {
    for (int64_t i = 0; i < k->n; i++) {
        float one = mixp_get(k->a, i);
        if ((mixp_bits_of_f32(one) & 0x7FFFFFFFu) >= 0x7F800000u) *k->bad = 1;
    }
}

static mixp_result mixpi_cpu_scale_by(
    const mixp_exec *x, const mixp_scale_by_args *k, const mixpi_map_units *units) {
    mixpi_map m;
    if (!k->factor) return MIXP_ERR_ARGUMENT;
    mixpi_map_init(&m, MIXPI_FN_UNARY + (int)MIXP_UNARY_SCALE, 1, &k->n, k->y);
    mixpi_map_source(&m, k->a, NULL);
    m.p = k->factor[0];
    if (k->bad && mixpi_map_is_real(&m)) mixpi_note_bad(k);
    return mixpi_map_run(x, &m, units->map);
}

static mixp_result mixpi_cpu_where(
    const mixp_exec *x, const mixp_where_args *k, const mixpi_map_units *units) {
    mixpi_map m;
    if (!mixpi_where_is_valid(k)) return MIXP_ERR_ARGUMENT;
    mixpi_where_map(&m, k);
    return mixpi_map_run(x, &m, units->map);
}

static mixp_result mixpi_cpu_where_backward(
    const mixp_exec *x, const mixp_where_args *k, const mixpi_map_units *units) {
    mixpi_sum s;
    if (k->rank < 0 || k->rank > MIXP_MAX_RANK || !k->mask.data) return MIXP_ERR_ARGUMENT;
    mixpi_where_slope_map(&s.map, k);
    s.factor = 1.0f;
    if (!mixpi_repeats(k->rank, k->shape, k->which ? k->b_strides : k->a_strides))
        return mixpi_map_run(x, &s.map, units->map);
    return mixpi_sum_run(x, &s, units);
}

static mixp_result mixpi_cpu_dropout(
    const mixp_exec *x, const mixp_dropout_args *k, mixpi_unit unit) {
    mixpi_dropout_job d;
    if (!(k->p >= 0.0f && k->p <= 1.0f)) return MIXP_ERR_ARGUMENT;
    if (!mixpi_reads(k->a) || !mixpi_writes(k->y)) return MIXP_ERR_DTYPE;
    mixpi_dropout_plan(&d, k);
    return mixpi_each_unit(x, mixpi_ceil_div(k->n, MIXPI_BLOCK), MIXPI_BLOCK, unit, &d);
}

static mixp_result mixpi_cpu_random(
    const mixp_exec *x, const mixp_random_args *k, mixpi_unit unit) {
    mixpi_random_job d;
    if ((unsigned)k->kind >= MIXP_RANDOM_COUNT || k->y.accumulate || k->n < 0)
        return MIXP_ERR_ARGUMENT;
    if (k->kind == MIXP_RANDOM_BERNOULLI && !(k->at >= 0.0f && k->at <= 1.0f))
        return MIXP_ERR_ARGUMENT;
    if (!mixpi_writes(k->y)) return MIXP_ERR_DTYPE;
    d.k = k;
    d.key = mixp_random_key(k->seed, k->step, k->tensor);
    return mixpi_each_unit(x, mixpi_ceil_div(k->n, MIXPI_BLOCK), 8 * MIXPI_BLOCK, unit, &d);
}

/* --- max, gather, rope --- */

static mixp_result mixpi_cpu_max(const mixp_exec *x, const mixp_max_args *k, mixpi_unit unit) {
    int64_t tiles = mixpi_ceil_div(k->inner, MIXPI_BLOCK);
    if (!mixpi_reads(k->a) || !mixpi_may_write(k->y)) return MIXP_ERR_DTYPE;
    if (k->n < 1 || k->n > 0x7FFFFFFF || !k->index || k->y.accumulate) return MIXP_ERR_ARGUMENT;
    return mixpi_each_unit(x, k->outer * tiles, k->n * mixpi_min(k->inner, MIXPI_BLOCK), unit, k);
}

static mixp_result mixpi_cpu_max_backward(
    const mixp_exec *x, const mixp_max_backward_args *k, mixpi_unit unit) {
    mixpi_lines lines = mixpi_lines_of(k->n, k->inner);
    int64_t each = mixpi_min(lines.length, MIXPI_BLOCK);
    if (!mixpi_reads(k->dy) || !mixpi_writes(k->da) || (k->shared && !mixpi_reads(k->a)))
        return MIXP_ERR_DTYPE;
    if (!k->index || (k->shared && !k->ties)) return MIXP_ERR_ARGUMENT;
    return mixpi_each_unit(x, k->outer * (lines.along_n ? 1 : k->n) * lines.blocks, each, unit, k);
}

static mixp_result mixpi_cpu_gather(
    const mixp_exec *x, const mixp_gather_args *k, mixpi_unit unit) {
    int64_t count = k->outer * k->m * k->inner;
    if (!mixpi_reads(k->a) || !mixpi_writes(k->y)) return MIXP_ERR_DTYPE;
    if (k->y.accumulate || mixpi_bad_id(k->ids, count, k->n, MIXPI_NO_INDEX) >= 0)
        return MIXP_ERR_ARGUMENT;
    return mixpi_each_unit(x, mixpi_ceil_div(count, MIXPI_BLOCK), 4 * MIXPI_BLOCK, unit, k);
}

static mixp_result mixpi_cpu_gather_backward(
    const mixp_exec *x, const mixp_gather_args *k, mixpi_unit unit) {
    int64_t count = k->outer * k->m * k->inner, tiles = mixpi_ceil_div(k->inner, MIXPI_BLOCK);
    if (!mixpi_reads(k->a) || !mixpi_writes(k->y)) return MIXP_ERR_DTYPE;
    if (!k->y.accumulate || mixpi_bad_id(k->ids, count, k->n, MIXPI_NO_INDEX) >= 0)
        return MIXP_ERR_ARGUMENT;
    return mixpi_each_unit(x, k->outer * tiles, k->m * mixpi_min(k->inner, MIXPI_BLOCK), unit, k);
}

static mixp_result mixpi_cpu_rope(const mixp_exec *x, const mixp_rope_args *k, mixpi_unit unit) {
    mixpi_rope_job job = { k, NULL, NULL };
    int64_t pairs = k->t * (k->d / 2);
    int64_t units =
        mixpi_ceil_div(k->t, MIXPI_ROPE_RUN) * mixpi_ceil_div(k->d / 2, MIXPI_ROPE_WIDE);
    if (!mixpi_reads(k->a) || !mixpi_writes(k->y)) return MIXP_ERR_DTYPE;
    if (k->d < 2 || k->d % 2 || !(k->base > 0.0)) return MIXP_ERR_ARGUMENT;
    job.cosine = (float *)mixpi_scratch(x, (size_t)(2 * pairs) * sizeof(float));
    if (!job.cosine) return MIXP_ERR_MEMORY;
    job.sine = job.cosine + pairs;
    mixpi_each_unit(x, units, MIXPI_ROPE_RUN * MIXPI_ROPE_WIDE * 8, mixpi_rope_run, &job);
    return mixpi_each_unit(x, k->rows * k->t, k->heads * k->d, unit, &job);
}

/* --- softmax, norms, embedding --- */

static mixp_result mixpi_cpu_softmax(
    const mixp_exec *x, const mixp_softmax_args *k, mixpi_unit row) {
    if (!mixpi_reads(k->a) || !mixpi_writes(k->y)) return MIXP_ERR_DTYPE;
    if (k->y.accumulate) return MIXP_ERR_ARGUMENT;
    return mixpi_each_unit(x, k->rows, k->cols, row, k);
}

static mixp_result mixpi_cpu_softmax_backward(
    const mixp_exec *x, const mixp_softmax_backward_args *k, mixpi_unit row) {
    if (!mixpi_reads(k->dy) || !mixpi_reads(k->y) || !mixpi_writes(k->da)) return MIXP_ERR_DTYPE;
    return mixpi_each_unit(x, k->rows, k->cols, row, k);
}

static mixp_result mixpi_cpu_norm(const mixp_exec *x, const mixp_norm_args *k, mixpi_unit row) {
    mixp_result r = mixpi_norm_check(k);
    if (r != MIXP_OK) return r;
    return mixpi_each_unit(x, k->rows, k->cols, row, k);
}

static mixp_result mixpi_cpu_add_norm(const mixp_exec *x, const mixp_norm_args *k, mixpi_unit row) {
    mixp_result r = mixpi_norm_check(k);
    if (!mixpi_reads(k->b) || !mixpi_writes(k->sum)) return MIXP_ERR_DTYPE;
    if (r != MIXP_OK || k->sum.accumulate) return r != MIXP_OK ? r : MIXP_ERR_ARGUMENT;
    return mixpi_each_unit(x, k->rows, k->cols, row, k);
}

/* join: adds the tasks' sums of a block of columns. */
static mixp_result mixpi_cpu_norm_backward(
    const mixp_exec *x, const mixp_norm_backward_args *k, mixpi_unit row, mixpi_unit join) {
    mixpi_norm_back_job job = mixpi_norm_back_plan(k);
    mixpi_units units = { row, NULL, k->rows, 1 };
    if (!mixpi_reads(k->dy) || !mixpi_reads(k->a) || !mixpi_may_read(k->gamma) ||
        !mixpi_may_write(k->da) || !mixpi_may_write(k->dgamma) || !mixpi_may_write(k->dbeta) ||
        !mixpi_may_write(k->db))
        return MIXP_ERR_DTYPE;
    if (k->db.data && (!k->da.data || k->da.dtype != MIXP_F32 || k->db.accumulate))
        return MIXP_ERR_ARGUMENT;

    /* The sums for gamma and beta, one row of them for each task. */
    if (k->dgamma.data || k->dbeta.data) {
        size_t count = (size_t)(job.tasks * 2 * job.wide);
        job.sums = (float *)mixpi_scratch(x, count * sizeof(float));
        if (!job.sums) return MIXP_ERR_MEMORY;
    }

    units.job = &job;
    units.per_task = job.per_task;
    mixpi_run_units(x, &units, k->rows * k->cols);
    if (!job.sums) return MIXP_OK;
    return mixpi_each_unit(
        x, mixpi_ceil_div(k->cols, MIXPI_BLOCK), job.tasks * MIXPI_BLOCK, join, &job);
}

static mixp_result mixpi_cpu_embedding(
    const mixp_exec *x, const mixp_embedding_args *k, mixpi_unit row, mixpi_unit bag) {
    const int64_t bags = k->bags.count;
    if (!mixpi_reads(k->table) || !mixpi_writes(k->y) || !mixpi_may_read(k->bags.weights))
        return MIXP_ERR_DTYPE;
    if (k->y.accumulate) return MIXP_ERR_ARGUMENT;
    if (mixpi_bad_embedding(k->ids, k->rows, k->vocab, &k->bags)) return MIXP_ERR_ARGUMENT;
    if (bags) return mixpi_each_unit(x, bags, mixpi_ceil_div(k->rows, bags) * k->cols, bag, k);
    return mixpi_each_unit(x, k->rows, k->cols, row, k);
}

static mixp_result mixpi_cpu_embedding_backward(
    const mixp_exec *x, const mixp_embedding_backward_args *k, mixpi_unit row, mixpi_unit weights) {
    mixpi_embedding_back_job job = { k, NULL, NULL, NULL, NULL };
    const int64_t bags = k->bags.count;
    if (!mixpi_reads(k->dy) || !mixpi_may_write(k->dtable) || !mixpi_may_read(k->bags.weights) ||
        !mixpi_may_read(k->table) || !mixpi_may_write(k->dweights))
        return MIXP_ERR_DTYPE;
    if (mixpi_bad_embedding(k->ids, k->rows, k->vocab, &k->bags)) return MIXP_ERR_ARGUMENT;
    if (k->dweights.data && bags)
        mixpi_each_unit(x, bags, mixpi_ceil_div(k->rows, bags) * k->cols, weights, k);
    if (!k->dtable.data) return MIXP_OK;
    void *memory = mixpi_scratch(x, mixpi_embedding_back_carve(&job, NULL));
    if (!memory) return MIXP_ERR_MEMORY;
    mixpi_embedding_back_carve(&job, memory);
    mixpi_embedding_back_lists(&job);
    return mixpi_each_unit(x, k->vocab, mixpi_embedding_back_work(k), row, &job);
}

/* --- losses --- */

static mixp_result mixpi_cpu_cross_entropy(
    const mixp_exec *x, const mixp_cross_entropy_args *k, mixpi_unit row) {
    mixpi_entropy_job job = { k, NULL };
    if (!mixpi_reads(k->logits)) return MIXP_ERR_DTYPE;
    if (mixpi_bad_id(k->targets, k->rows, k->cols, k->ignore) >= 0) return MIXP_ERR_ARGUMENT;
    job.losses = (double *)mixpi_scratch(x, (size_t)k->rows * sizeof(double));
    if (!job.losses) return MIXP_ERR_MEMORY;
    mixpi_each_unit(x, k->rows, k->cols, row, &job);
    if (k->each) mixpi_entropy_each(&job);
    else mixpi_entropy_mean(&job);
    return MIXP_OK;
}

static mixp_result mixpi_cpu_cross_entropy_backward(
    const mixp_exec *x, const mixp_cross_entropy_backward_args *k, mixpi_unit row) {
    mixpi_entropy_back_job job = { k, 0.0f };
    if (!mixpi_reads(k->dloss) || !mixpi_reads(k->logits) || !mixpi_writes(k->dlogits))
        return MIXP_ERR_DTYPE;
    if (mixpi_bad_id(k->targets, k->rows, k->cols, k->ignore) >= 0) return MIXP_ERR_ARGUMENT;
    if (!k->each) job.factor = mixp_get(k->dloss, 0) / k->counted[0];
    return mixpi_each_unit(x, k->rows, k->cols, row, &job);
}

static mixp_result mixpi_cpu_cross_entropy_both(
    const mixp_exec *x, const mixp_cross_entropy_both_args *k, mixpi_unit row) {
    const mixp_cross_entropy_backward_args back = mixpi_entropy_back_of(k);
    mixpi_entropy_both_job job = { { &k->loss, NULL }, { &back, 0.0f } };
    if (!mixpi_reads(back.logits) || !mixpi_writes(back.dlogits)) return MIXP_ERR_DTYPE;
    if (back.dlogits.accumulate || mixpi_entropy_has_options(&k->loss) ||
        mixpi_bad_id(back.targets, back.rows, back.cols, back.ignore) >= 0)
        return MIXP_ERR_ARGUMENT;
    job.loss.losses = (double *)mixpi_scratch(x, (size_t)back.rows * sizeof(double));
    if (!job.loss.losses) return MIXP_ERR_MEMORY;
    job.back.factor = k->scale[0] * k->share / (float)mixpi_entropy_count(&k->loss);
    mixpi_each_unit(x, back.rows, back.cols, row, &job);
    mixpi_entropy_mean(&job.loss);
    return MIXP_OK;
}

/* The losses of the elements, without their sum. */
static mixp_result mixpi_cpu_loss_each(
    const mixp_exec *x, const mixp_loss_args *k, mixpi_map *m, const mixpi_map_units *units) {
    m->y.data = k->each;
    return mixpi_map_run(x, m, units->map);
}

static mixp_result mixpi_cpu_loss(
    const mixp_exec *x, const mixp_loss_args *k, const mixpi_map_units *units) {
    mixpi_sum s;
    if ((unsigned)k->kind >= MIXP_LOSS_COUNT) return MIXP_ERR_ARGUMENT;
    mixpi_map_init(&s.map, MIXPI_FN_LOSS + (int)k->kind, 1, &k->n, mixpi_out_to(k->y, MIXP_F32, 0));
    mixpi_map_source(&s.map, k->a, NULL);
    mixpi_map_source(&s.map, k->target, NULL);
    s.map.q = k->delta;
    if (k->each) return mixpi_cpu_loss_each(x, k, &s.map, units);
    s.map.axes.s[0][0] = 0;
    s.factor = (float)(1.0 / (double)(k->over ? k->over : k->n));
    return mixpi_sum_run(x, &s, units);
}

static mixp_result mixpi_cpu_loss_backward(
    const mixp_exec *x, const mixp_loss_backward_args *k, const mixpi_map_units *units) {
    mixpi_map m;
    if ((unsigned)k->kind >= MIXP_LOSS_COUNT) return MIXP_ERR_ARGUMENT;
    if (!mixpi_reads(k->dloss)) return MIXP_ERR_DTYPE;
    mixpi_map_init(&m, MIXPI_FN_LOSS_D + (int)k->kind, 1, &k->n, k->da);
    mixpi_map_source(&m, k->a, NULL);
    mixpi_map_source(&m, k->target, NULL);
    m.p = mixp_get(k->dloss, 0) / (float)(k->over ? k->over : k->n);
    m.q = k->delta;
    return mixpi_map_run(x, &m, units->map);
}

/* --- looks --- */

#define MIXPI_CHECK_WORDS 128 /* words of 8 bytes in a block of check_buffers */
#define MIXPI_LOOK_LANES 16
#define MIXPI_EXPONENTS  MIXP_EXPONENTS

/* The result for one piece of an array: how many magnitudes lie below each limit. */
typedef struct mixpi_look_piece {
    int32_t top, nonfinite, nan, zeros, flushed, least, subnormal, past;
    int32_t exponents[MIXPI_EXPONENTS];
} mixpi_look_piece;

typedef struct mixpi_look_job {
    const mixp_look_args *k;
    mixpi_look_limits     at;
    mixpi_look_piece     *pieces;
} mixpi_look_job;

static void mixpi_look_join(mixp_look *to, const mixpi_look_piece *p, int64_t n) {
    float top = mixp_f32_of_bits((uint32_t)p->top);
    if (top > to->largest) to->largest = top;
    to->count += n;
    to->nan |= p->nan;
    to->nonfinite += p->nonfinite;
    to->zeros += p->zeros;
    to->flushed += p->flushed - p->zeros;
    to->least += p->least - p->flushed;
    to->subnormal += p->subnormal - p->flushed;
    to->saturated += p->past;
}

static mixp_result mixpi_cpu_look_at(const mixp_exec *x, const mixp_look_args *k, mixp_task task) {
    int64_t i, n = mixpi_ceil_div(k->n, MIXPI_CHUNK);
    mixpi_look_job job;
    if (!mixpi_reads(k->x)) return MIXP_ERR_DTYPE;
    job.k = k;
    job.at = mixpi_look_limits_of(k->low);
    job.pieces = (mixpi_look_piece *)mixpi_scratch(x, (size_t)n * sizeof *job.pieces);
    if (!job.pieces) return MIXP_ERR_MEMORY;
    mixpi_parallel(x, n, k->n, task, &job);
    for (i = 0; i < n; i++) {
        int64_t count = mixpi_min(MIXPI_CHUNK, k->n - i * MIXPI_CHUNK);
        mixpi_look_join(k->row, &job.pieces[i], count);
        if (k->total) mixpi_look_join(k->total, &job.pieces[i], count);
        for (int e = 0; k->exponents && e < MIXPI_EXPONENTS; e++)
            k->exponents[e] += job.pieces[i].exponents[e];
    }
    return MIXP_OK;
}

#ifndef MIXPREC_NO_RECIPES
/* --- quantise and hadamard --- */

typedef struct mixpi_quantising {
    mixp_quantise_args k;
    mixpi_grid         grid;
    uint64_t           key;     /* key of its random numbers                               */
    float              tensor;  /* scale of the whole array                                */
    float              most;    /* its amax, if its scale comes from that                  */
    uint32_t          *amax;    /* largest magnitude of each row, or column, or NULL       */
} mixpi_quantising;

/* The tasks: the largest magnitude of a row, and of each of 16 columns; a row by the array's scale;
 * blocks of 16 columns or more; blocks of one column. */
typedef struct mixpi_quantise_units {
    mixpi_unit row_amax, column_amax, row, blocks, columns;
} mixpi_quantise_units;

/* The largest magnitude of each row, or with by_lines of each column, in q->amax; and of the array,
 * in *amax. */
static MIXPI_SELDOM mixp_result mixpi_q_amax(
    const mixp_exec *x, mixpi_quantising *q, const mixpi_quantise_units *units, uint32_t *amax) {
    const int down = q->k.by_lines && q->k.block_cols == 1;
    const int64_t n = down ? q->k.cols : q->k.rows;
    q->amax = (uint32_t *)mixpi_scratch(x, (size_t)n * sizeof *q->amax);
    if (!q->amax) return MIXP_ERR_MEMORY;
    if (down) mixpi_each_unit(x, mixpi_ceil_div(n, 16), 16 * q->k.rows, units->column_amax, q);
    else mixpi_each_unit(x, n, q->k.cols, units->row_amax, q);
    *amax = 0;
    for (int64_t i = 0; i < n; i++) *amax = q->amax[i] > *amax ? q->amax[i] : *amax;
    return MIXP_OK;
}

static MIXPI_SELDOM mixp_result mixpi_cpu_quantise(
    const mixp_exec *x, const mixp_quantise_args *k, const mixpi_quantise_units *units) {
    const int64_t rows = k->scale == MIXP_SCALE_TENSOR ? 1 : k->block_rows;
    mixpi_unit unit = k->block_cols == 1 ? units->columns : units->blocks;
    uint32_t amax = 0;
    mixp_result r = mixpi_quantise_wrong(k);
    if (r != MIXP_OK) return r;

    mixpi_quantising q = MIXPI_ZERO;
    q.k = *k;
    q.grid = mixpi_grid_of(k->element);
    q.key = mixp_random_key(k->seed, k->step, k->tensor);
    if (mixpi_needs_amax(k) || k->by_lines) r = mixpi_q_amax(x, &q, units, &amax);
    if (r != MIXP_OK) return r;

    /* The scale of the array, then the codes. */
    q.tensor = k->by_lines ? 1.0f : mixpi_scale_of_array(k, amax);
    q.most = mixp_f32_of_bits(amax);
    for (int64_t i = 0; k->by_lines && i < mixpi_quantise_lines(k); i++)
        k->line_scales[i] = 1.0f / mixpi_scale_of_array(k, q.amax[i]);
    if (k->scale == MIXP_SCALE_TENSOR) unit = units->row;
    mixpi_give_amax(k, amax);
    mixpi_each_unit(x, k->rows / rows, rows * k->cols, unit, &q);

    /* Write the factor by which products undo the scale. */
    if (k->own) *k->own = 1.0f / q.tensor;
    if (k->decode) *k->decode = 1.0f / q.tensor * (k->times ? *k->times : 1.0f);
    return MIXP_OK;
}

static mixp_result mixpi_cpu_hadamard(
    const mixp_exec *x, const mixp_hadamard_args *k, mixpi_unit strip) {
    mixp_result r = mixpi_hadamard_wrong(k);
    if (r != MIXP_OK) return r;
    return mixpi_each_unit(x, k->rows / 16, 16 * k->cols, strip, k);
}
#endif
