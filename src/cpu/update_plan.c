#pragma once
#include "starts.c"
/* --- update: what is planned once a call: see update.c --------------------------------------- */

#define MIXPI_CHUNK_SCALE 2     /* `write` of a job that only multiplies, without statistics  */

typedef struct mixpi_chunk {
    int64_t row, first;         /* row of the table; first element                         */
    double  squares;
    int64_t bad_element;        /* -1 = none                                               */
    float   largest;
    int32_t bad_is_nan;
    int32_t updates, lost;      /* see mixp_lost                                        */
} mixpi_chunk;

typedef struct mixpi_chunk_job {
    const mixp_param_row  *rows;
    const mixp_step_plan  *plan;
    const mixp_step_state *step;
    mixpi_chunk *chunks;
    int64_t      count;         /* number of chunks                                        */
    float        factor;
    int          write;
    int          counting;      /* 1: counts lost updates                               */
} mixpi_chunk_job;

/* Buffers of a stretch are full cache lines. Equal places in two buffers are never a multiple of 4
 * KB apart: a load waits for an earlier store at such a distance (4K aliasing), and then every 16
 * elements would wait for the quotient of the previous 16. */
enum { MIXPI_STRETCH_BUFFERS = 5, MIXPI_STRETCH_ROOM = MIXPI_BLOCK + 208 };
typedef struct mixpi_stretch_room {
    float f[MIXPI_STRETCH_BUFFERS * MIXPI_STRETCH_ROOM + 16];
} mixpi_stretch_room;

/* A stretch of a row whose states are f32 during its update: in place, or widened into the buffers,
 * which are 0 after the last element. m or v NULL: the row has no such moment. */
typedef struct mixpi_stretch {
    const mixp_param_row *row;
    int64_t  first;             /* element, a multiple of MIXPI_BLOCK                      */
    int      n;
    uint64_t key;               /* key of its random numbers                               */
    float   *p, *m, *v;
    int      roots;             /* 1: v holds its roots, which the update computed anyway  */
    uint32_t closed;            /* a bit per block: its codes are written already          */
    float   *g_buffer, *p_buffer, *m_buffer, *v_buffer;
    float   *word;              /* the bits of its random words                            */
} mixpi_stretch;

static void mixpi_stretch_carve(mixpi_stretch *s, mixpi_stretch_room *room) {
    const uintptr_t past = (uintptr_t)room->f % 64u;
    float *f = room->f + (past ? (64u - past) / sizeof(float) : 0u);
    s->g_buffer = f;
    s->p_buffer = f + MIXPI_STRETCH_ROOM;
    s->m_buffer = f + 2 * MIXPI_STRETCH_ROOM;
    s->v_buffer = f + 3 * MIXPI_STRETCH_ROOM;
    s->word = f + 4 * MIXPI_STRETCH_ROOM;
}

/* The addresses of a full block of codes. For a block cut short by the row's end they point to a
 * copy, padded with 0. rest: the master's bits besides the bf16 weight. NULL if a state is f32 or
 * absent. */
typedef struct mixpi_small {
    char    *m, *v, *weight, *rest;
    int      m_size, v_size, rest_size;     /* bytes of a code                             */
    int64_t  first;                         /* element                                     */
    int      n;                             /* that the row has                            */
} mixpi_small;

typedef struct mixpi_small_copy {
    char m[2 * MIXP_STATE_BLOCK], v[2 * MIXP_STATE_BLOCK];
    char weight[2 * MIXP_STATE_BLOCK], rest[2 * MIXP_STATE_BLOCK];
} mixpi_small_copy;

static char *mixpi_small_codes(const mixpi_small *b, void *state, int size, char *copy) {
    if (!state || size == 4) return NULL;
    char *codes = (char *)state + b->first * size;
    if (b->n == MIXP_STATE_BLOCK) return codes;
    memset(copy, 0, 2 * MIXP_STATE_BLOCK);
    memcpy(copy, codes, (size_t)b->n * (size_t)size);
    return copy;
}
static mixpi_small mixpi_small_of(
    const mixp_param_row *row, int64_t first, int n, mixpi_small_copy *copy) {
    mixpi_small b;
    b.first = first;
    b.n = n;
    b.m_size = (int)mixp_dtype_size(row->m_dtype);
    b.v_size = (int)mixp_dtype_size(row->v_dtype);
    b.rest_size = (int)mixp_dtype_size(row->master_dtype);
    b.m = mixpi_small_codes(&b, row->m, b.m_size, copy->m);
    b.v = mixpi_small_codes(&b, row->v, b.v_size, copy->v);
    b.rest = mixpi_small_codes(&b, row->master, b.rest_size, copy->rest);
    b.weight = b.rest ? mixpi_small_codes(&b, row->weight, 2, copy->weight) : NULL;
    return b;
}

/* After the codes are written: copies the codes of a block cut short back to the row. */
static void mixpi_small_put_back(const mixpi_small *b, void *state, int size, const char *codes) {
    if (codes) memcpy((char *)state + b->first * size, codes, (size_t)b->n * (size_t)size);
}
static void mixpi_small_done(const mixpi_small *b, const mixp_param_row *row) {
    if (b->n == MIXP_STATE_BLOCK) return;
    mixpi_small_put_back(b, row->m, b->m_size, b->m);
    mixpi_small_put_back(b, row->v, b->v_size, b->v);
    mixpi_small_put_back(b, row->weight, 2, b->weight);
    mixpi_small_put_back(b, row->master, b->rest_size, b->rest);
}

/* How many of the stretch's elements lie in the block that begins at i. */
static int mixpi_stretch_block(const mixpi_stretch *s, int i) {
    return (int)mixpi_min(MIXP_STATE_BLOCK, s->n - i);
}

static int mixpi_row_is_split(const mixp_param_row *row) {
    return row->master && row->master_dtype != MIXP_F32;
}

/* Does the row have states that are not f32? */
static int mixpi_row_is_coded(const mixp_param_row *row) {
    return mixpi_row_is_split(row) || (row->m && row->m_dtype != MIXP_F32) ||
           (row->v && row->v_dtype != MIXP_F32);
}

/* The most bytes of scratch memory that a kernel of this file needs for rows[count]. */
static size_t mixpi_chunk_room(const mixp_param_row *rows, int64_t count) {
    int64_t i, n = 0;
    for (i = 0; i < count; i++) n += mixpi_ceil_div(rows[i].count, MIXPI_CHUNK);
    return (size_t)n * sizeof(mixpi_chunk);
}

/* Cuts the active rows into chunks, in scratch memory, and runs task over them. */
static mixp_result mixpi_each_chunk(const mixp_exec *x, mixpi_chunk_job *job,
    const mixp_param_row *rows, int64_t count, mixp_task task) {
    int64_t i, first, n = 0, work = 0;
    for (i = 0; i < count; i++) {
        if (!rows[i].active) continue;
        n += mixpi_ceil_div(rows[i].count, MIXPI_CHUNK);
        work += rows[i].count;
    }

    job->rows = rows;
    job->count = n;
    job->chunks = (mixpi_chunk *)mixpi_scratch(x, (size_t)n * sizeof *job->chunks);
    if (!job->chunks) return MIXP_ERR_MEMORY;

    /* Each chunk is a part of one parameter. */
    for (n = 0, i = 0; i < count; i++)
        for (first = 0; rows[i].active && first < rows[i].count; first += MIXPI_CHUNK, n++) {
            const mixpi_chunk fresh = { i, first, 0.0, -1, 0.0f, 0, 0, 0 };
            job->chunks[n] = fresh;
        }

    mixpi_parallel(x, n, work, task, job);
    return MIXP_OK;
}

/* The slow look at a block: finds the Inf or NaN element, and sums squares in double, whose range
 * holds the squares of 3e38 and 1e-38. */
static void mixpi_look_closely(mixpi_chunk *c, const float *x, int n, float factor, int64_t first) {
    for (int i = 0; i < n; i++) {
        float v = x[i] * factor;
        uint32_t raw = mixp_bits_of_f32(x[i]) & 0x7FFFFFFFu, a = mixp_bits_of_f32(v) & 0x7FFFFFFFu;
        c->squares += (double)v * (double)v;
        if (raw < 0x7F800000u && a < 0x7F800000u) {
            if (mixp_f32_of_bits(a) > c->largest) c->largest = mixp_f32_of_bits(a);
        } else if (c->bad_element < 0) {
            c->bad_element = first + i;
            c->bad_is_nan = (raw >= 0x7F800000u ? raw : a) > 0x7F800000u;
        }
    }
}

/* Room for the bytes of a block, of any dtype. */
typedef struct mixpi_kept { char bytes[MIXPI_BLOCK * sizeof(double)]; } mixpi_kept;

/* Keeps n elements of an array of a row with padding, from `first` on. */
static void mixpi_padding_keep(
    mixpi_kept *kept, const void *array, mixp_dtype dtype, int64_t first, int64_t n) {
    const size_t size = mixp_dtype_size(dtype);
    memcpy(kept->bytes, (const char *)array + (size_t)first * size, (size_t)n * size);
}

/* Writes the padding among n elements of an array: what was kept, or zeros. */
static void mixpi_padding_put(const mixp_param_row *row, void *array, mixp_dtype dtype,
    int64_t first, int64_t n, const mixpi_kept *kept) {
    const size_t size = mixp_dtype_size(dtype);
    for (int64_t i = 0; i < n; i++) {
        char *to = (char *)array + (size_t)(first + i) * size;
        if ((first + i) % row->pitch < row->width) continue;
        if (kept) memcpy(to, kept->bytes + (size_t)i * size, size);
        else memset(to, 0, size);
    }
}

/* Clears a piece of a gradient after its last read. */
static void mixpi_clear_grad(const mixp_param_row *row, int64_t first, int64_t n) {
    const size_t size = mixp_dtype_size(row->grad_dtype);
    char *from = (char *)row->grad + (size_t)first * size;
    if (row->active != 2) return;
    if (!row->pitch) memset(from, 0, (size_t)n * size);
    for (int64_t i = 0; row->pitch && i < n; i++)
        if ((first + i) % row->pitch < row->width) memset(from + (size_t)i * size, 0, size);
}

static void mixpi_sum_up(const mixpi_chunk_job *job, mixp_step_state *step) {
    mixp_grad_stats *s = &step->stats;
    double squares = 0.0;
    memset(s, 0, sizeof *s);
    s->bad_row = s->bad_element = -1;
    for (int64_t i = 0; i < job->count; i++) {
        const mixpi_chunk *c = &job->chunks[i];
        squares += c->squares;
        if (c->largest > s->largest) s->largest = c->largest;
        if (c->bad_element < 0 || s->found_inf) continue;
        s->found_inf = 1;
        s->bad_row = c->row;
        s->bad_element = c->bad_element;
        s->bad_is_nan = c->bad_is_nan;
    }
    s->norm = sqrt(squares);
    step->clipped = 1.0f;
}

/* factor: of the gradients. write: 1 also unscales them in place; MIXPI_CHUNK_SCALE only
 * multiplies. */
static mixpi_chunk_job mixpi_look_job_of(float factor, int write) {
    mixpi_chunk_job job = MIXPI_ZERO;
    job.factor = factor;
    job.write = write;
    return job;
}

static mixp_result mixpi_cpu_grad_stats(
    const mixp_exec *x, const mixp_grad_stats_args *k, mixp_task task) {
    const float factor = k->scale ? mixpi_scaler_inverse(*k->scale) : 1.0f;
    mixpi_chunk_job job = mixpi_look_job_of(factor, k->unscale != 0);
    mixp_result r = mixpi_each_chunk(x, &job, k->rows, k->count, task);
    if (r != MIXP_OK) return r;
    mixpi_sum_up(&job, k->step);
    if (k->plan) mixpi_step_prepare(k->plan, k->step, k->scaler);
    return MIXP_OK;
}

static mixp_result mixpi_cpu_clip(const mixp_exec *x, const mixp_clip_args *k, mixp_task task) {
    const float factor = (float)mixpi_clip_coefficient(k->step->stats.norm, k->max_norm);
    mixpi_chunk_job job = mixpi_look_job_of(factor, MIXPI_CHUNK_SCALE);
    if (k->step->stats.found_inf || factor >= 1.0f) return MIXP_OK;
    mixp_result r = mixpi_each_chunk(x, &job, k->rows, k->count, task);
    if (r == MIXP_OK) k->step->clipped = factor;
    return r;
}

static mixp_result mixpi_prepare(const mixp_exec *x, const mixp_prepare_args *k) {
    (void)x;
    mixpi_step_prepare(k->plan, k->step, k->scaler);
    return MIXP_OK;
}

static mixp_result mixpi_advance(const mixp_exec *x, const mixp_advance_args *k) {
    (void)x;
    if (k->wide) mixpi_scaler_note_scaled(k->scaler, k->wide->largest);
    if (k->wide && k->narrow) mixpi_scaler_note_scaled(k->scaler, k->narrow->largest);
    mixpi_scaler_advance_guarded(k->scaler, k->rule, k->forgives, k->falls, k->narrow);
    return MIXP_OK;
}

static mixp_result mixpi_cpu_restore(const mixp_exec *x, const mixp_restore_args *k) {
    int32_t flag = k->n_flags == 0;
    (void)x;
    for (int i = 0; i < k->n_flags; i++) flag |= *k->flags[i];
    for (int i = 0; i < k->n_parts && flag; i++)
        memcpy(k->parts[i].to, k->parts[i].from, k->parts[i].bytes);
    return MIXP_OK;
}

static mixp_result mixpi_agree(const mixp_exec *x, const mixp_agree_args *k) {
    double *row = k->table + (int64_t)k->rank * MIXP_AGREE_WORDS;
    size_t bytes = (size_t)k->size * MIXP_AGREE_WORDS * sizeof *row;
    (void)x;
    if (k->reads) {
        mixpi_agree_read(k->table, k->size, k->step, k->scaler);
        return MIXP_OK;
    }
    memset(k->table, 0, bytes);
    mixpi_agree_fill(row, k->plan, k->step, k->scaler);
    mixpi_agree_bad(row, k->looks, k->n_looks, k->first_leaf);
    if (k->in_parts) mixpi_agree_part(row, k->step);
    return MIXP_OK;
}

static mixp_result mixpi_cpu_update(const mixp_exec *x, const mixp_update_args *k, mixp_task task) {
    mixpi_chunk_job job = MIXPI_ZERO;
    job.plan = k->plan;
    job.step = k->step;
    job.counting = k->lost != NULL;
    mixp_result r = mixpi_each_chunk(x, &job, k->rows, k->count, task);
    if (r != MIXP_OK || k->step->skip) return r;
    for (int64_t i = 0; k->lost && i < job.count; i++) {
        k->lost[job.chunks[i].row].updates += job.chunks[i].updates;
        k->lost[job.chunks[i].row].lost += job.chunks[i].lost;
    }
    for (int64_t i = 0; i < k->count; i++)
        if (!k->rows[i].active && k->rows[i].missed) ++*k->rows[i].missed;
    return MIXP_OK;
}
