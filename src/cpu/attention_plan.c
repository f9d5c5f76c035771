#pragma once
#include "gemm_plan.c"
/* --- attention: what is planned once a call: see attention.c --------------------------------- */

#define MIXPI_QUERIES 32
#define MIXPI_KEYS 64
#define MIXPI_LOWEST (-3.402823466e+38f)
static const float mixpi_lane_numbers[16] = { 0, 1, 2,  3,  4,  5,  6,  7,
                                              8, 9, 10, 11, 12, 13, 14, 15 };

/* The sizes of one problem. group: heads of q for one head of k and v. wide: d rounded up to whole
 * vectors, the row length of copies. pairs: how q meets k, and dy meets v: MIXPI_FLOATS, ... */
typedef struct mixpi_heads {
    int64_t t, keys, heads, group, d, wide;
    int     pairs;
} mixpi_heads;

static mixpi_heads mixpi_heads_of(const mixp_attention_args *k, int pairs) {
    mixpi_heads h;
    h.t = k->t;
    h.keys = k->keys;
    h.heads = k->heads;
    h.group = k->heads / k->kv_heads;
    h.d = k->d;
    h.wide = (k->d + 15) / 16 * 16;
    h.pairs = pairs;
    return h;
}

/* Where the rows of one head lie in an array: row i begins at element first + i * ld. */
typedef struct mixpi_head { int64_t first, ld; } mixpi_head;

/* A head's rows in q or in a mask. `head` counts through all sequences, here and below. */
static mixpi_head mixpi_head_at(const mixp_head_strides *at, const mixpi_heads *h, int64_t head) {
    mixpi_head to;
    to.first = head / h->heads * at->sequence + head % h->heads * at->head;
    to.ld = at->row;
    return to;
}

/* A head's rows in k or v: those of the head of k and v that head `head` of q uses. */
static mixpi_head mixpi_head_met(const mixp_head_strides *at, const mixpi_heads *h, int64_t head) {
    mixpi_head to;
    int64_t met = head % h->heads / h->group;
    to.first = head / h->heads * at->sequence + met * at->head;
    to.ld = at->row;
    return to;
}

/* A head's rows in y and in the gradient of y. */
static mixpi_head mixpi_head_merged(const mixpi_heads *h, int64_t head) {
    mixpi_head at;
    at.ld = h->heads * h->d;
    at.first = head / h->heads * h->t * at.ld + head % h->heads * h->d;
    return at;
}

/* The number of keys a head may see. The keys after them are padding. */
static int64_t mixpi_keys_of(const mixp_attention_args *k, int64_t head) {
    return k->lengths ? k->lengths[head / k->heads] : k->keys;
}

/* The number of keys before the first query's own key: past, at most all keys. */
static int64_t mixpi_keys_before(const mixp_attention_args *k) {
    return mixpi_min(k->past, k->keys);
}

/* The number of keys that the queries before `end` may see. */
static int64_t mixpi_keys_until(const mixp_attention_args *k, int64_t head, int64_t end) {
    int64_t keys = mixpi_keys_of(k, head);
    return k->causal ? mixpi_min(keys, end + mixpi_keys_before(k)) : keys;
}

/* The first block of queries that may see a key. */
static int64_t mixpi_first_queries(const mixp_attention_args *k, int64_t key) {
    int64_t from = k->causal ? key - mixpi_keys_before(k) : 0;
    return from > 0 ? from / MIXPI_QUERIES * MIXPI_QUERIES : 0;
}

/* Scores of one query for keys [key, key + n), in a row of MIXPI_KEYS. */
typedef struct mixpi_some_scores { int64_t head, query, key, n; } mixpi_some_scores;

/* Does a cap, a mask or dropout change the scores or the probabilities? */
static int mixpi_attention_bends(const mixp_attention_args *k) {
    return k->softcap > 0.0f || k->mask.data || k->dropout > 0.0f;
}

/* Checks a problem's dtypes and sizes. Returns MIXP_OK, MIXP_ERR_DTYPE or MIXP_ERR_ARGUMENT. */
static mixp_result mixpi_attention_check(const mixp_attention_args *k) {
    if (!mixpi_reads(k->q) || !mixpi_reads(k->k) || !mixpi_reads(k->v) ||
        !mixpi_may_read(k->mask) || !mixpi_writes(k->y))
        return MIXP_ERR_DTYPE;
    if (k->kv_heads < 1 || k->heads % k->kv_heads || k->past < 0 || !(k->softcap >= 0.0f) ||
        !(k->dropout >= 0.0f && k->dropout < 1.0f))
        return MIXP_ERR_ARGUMENT;
    for (int64_t i = 0; k->lengths && i < k->b; i++)
        if (k->lengths[i] < 0 || k->lengths[i] > k->keys) return MIXP_ERR_ARGUMENT;
    return MIXP_OK;
}

static int mixpi_attention_empty(const mixp_attention_args *k) {
    return k->b <= 0 || k->t <= 0 || k->keys <= 0 || k->heads <= 0 || k->d <= 0;
}

/* Which probabilities are dropped: see mixpi_dropout_plan. limit 0 = drop none. */
typedef struct mixpi_drops { uint64_t key, limit; float scale; } mixpi_drops;

static mixpi_drops mixpi_drops_of(const mixp_attention_args *k) {
    mixpi_drops drops;
    drops.key = mixp_random_key(k->seed, k->step, k->tensor);
    drops.limit = (uint64_t)ceil((double)k->dropout * 4294967296.0);
    drops.scale = (float)(1.0 / (1.0 - (double)k->dropout));
    return drops;
}

typedef struct mixpi_attention_job {
    const mixp_attention_args *k;
    mixpi_heads  heads;
    mixpi_drops  drops;
    int64_t      chunks;        /* tasks per head                                          */
    mixpi_slices slices;
} mixpi_attention_job;

/* The scratch memory of a forward task. */
typedef struct mixpi_attention_room {
    float *columns;             /* blocks of MIXPI_KEYS keys, transposed                   */
    float *v;                   /* rows of values                                          */
    float *rows;                /* a block of keys, before it is transposed                */
    float *q, *o;               /* a block of queries and their results                    */
    float *scores;              /* MIXPI_QUERIES x MIXPI_KEYS                              */
} mixpi_attention_room;

static int64_t mixpi_attention_carve(mixpi_attention_room *room, const mixpi_heads *h,
                                     float *from) {
    int64_t blocks = mixpi_ceil_div(h->keys, MIXPI_KEYS);
    mixpi_carver c = { from, 0 };
    room->columns = mixpi_carve(&c, blocks * MIXPI_KEYS * h->wide);
    room->v = mixpi_carve(&c, h->keys * h->wide);
    room->rows = mixpi_carve(&c, MIXPI_KEYS * h->wide);
    room->q = mixpi_carve(&c, MIXPI_QUERIES * h->wide);
    room->o = mixpi_carve(&c, MIXPI_QUERIES * h->wide);
    room->scores = mixpi_carve(&c, MIXPI_QUERIES * MIXPI_KEYS);
    return c.used;
}

typedef struct mixpi_attention_grad_job {
    const mixp_attention_backward_args *k;
    mixpi_heads  heads;
    mixpi_drops  drops;
    mixpi_slices slices;
} mixpi_attention_grad_job;

typedef struct mixpi_attention_grad_room {
    float *q, *dy, *dq;         /* all rows of each head of the group                      */
    float *score_q, *score_dy;  /* q and dy in the form that scores need                   */
    float *delta;               /* dy . y of each row                                      */
    float *k, *k_columns, *v_columns, *dk, *dv; /* a block of keys                         */
    float *p, *g;               /* probabilities and their gradients, shaped as scores     */
} mixpi_attention_grad_room;

static int64_t mixpi_attention_grad_carve(mixpi_attention_grad_room *room, const mixpi_heads *h,
                                          float *from) {
    int64_t all = h->group * h->t * h->wide, block = MIXPI_KEYS * h->wide;
    mixpi_carver c = { from, 0 };
    room->q = mixpi_carve(&c, all);
    room->dy = mixpi_carve(&c, all);
    room->dq = mixpi_carve(&c, all);
    room->score_q = h->pairs ? mixpi_carve(&c, all) : room->q;
    room->score_dy = h->pairs ? mixpi_carve(&c, all) : room->dy;
    room->delta = mixpi_carve(&c, h->group * h->t);
    room->k = mixpi_carve(&c, block);
    room->k_columns = mixpi_carve(&c, block);
    room->v_columns = mixpi_carve(&c, block);
    room->dk = mixpi_carve(&c, block);
    room->dv = mixpi_carve(&c, block);
    room->p = mixpi_carve(&c, MIXPI_QUERIES * MIXPI_KEYS);
    room->g = mixpi_carve(&c, MIXPI_QUERIES * MIXPI_KEYS);
    return c.used;
}

/* The work of forward: two products for each score, and the score itself. Backward has five
 * products. lanes: see mixpi_cpu_gemm. */
static int64_t mixpi_attention_work(const mixp_attention_args *k, int64_t lanes) {
    const int64_t scores = k->b * k->heads * k->t * k->keys;
    return scores * 2 * k->d / lanes + scores;
}

static mixp_result mixpi_cpu_attention(const mixp_exec *x, const mixp_attention_args *k,
                                       mixpi_pairs have, int64_t lanes, mixp_task task) {
    int64_t many = k->b * k->heads;
    const int64_t work = mixpi_attention_work(k, lanes);
    mixpi_attention_job job;
    mixpi_attention_room room;
    mixp_result r;
    if (mixpi_attention_empty(k)) return MIXP_OK;
    r = mixpi_attention_check(k);
    if (r != MIXP_OK) return r;

    job.k = k;
    job.heads = mixpi_heads_of(k, mixpi_pairs_for(have, k->q, k->k));
    job.drops = mixpi_drops_of(k);
    job.chunks = 1;

    /* Too few heads are cut by queries. */
    int64_t workers = mixpi_workers(x, work);
    if (many < 2 * workers)
        job.chunks =
            mixpi_min(mixpi_ceil_div(2 * workers, many), mixpi_ceil_div(k->t, MIXPI_QUERIES));

    job.slices.floats = mixpi_attention_carve(&room, &job.heads, NULL);
    return mixpi_run_sliced(x, many * job.chunks, work, task, &job, &job.slices);
}

static mixp_result mixpi_cpu_attention_backward(const mixp_exec *x,
                                                const mixp_attention_backward_args *k,
                                                mixpi_pairs have, int64_t lanes, mixp_task task) {
    const mixp_attention_args *forward = &k->forward;
    mixpi_attention_grad_job job;
    mixpi_attention_grad_room room;
    mixp_result r;
    int pairs;
    if (mixpi_attention_empty(forward)) return MIXP_OK;
    r = mixpi_attention_check(forward);
    if (r != MIXP_OK) return r;
    if (!mixpi_reads(k->dy) || !mixpi_may_write(k->dq) || !mixpi_may_write(k->dk) ||
        !mixpi_may_write(k->dv))
        return MIXP_ERR_DTYPE;

    /* Pairs only if all four operands have the same dtype. */
    job.k = k;
    pairs = mixpi_pairs_for(have, forward->q, forward->k);
    if (forward->v.dtype != forward->q.dtype) pairs = MIXPI_FLOATS;
    if (k->dy.dtype != forward->q.dtype) pairs = MIXPI_FLOATS;

    job.heads = mixpi_heads_of(forward, pairs);
    job.drops = mixpi_drops_of(forward);
    job.slices.floats = mixpi_attention_grad_carve(&room, &job.heads, NULL);
    return mixpi_run_sliced(x, forward->b * forward->kv_heads,
                            2 * mixpi_attention_work(forward, lanes), task, &job, &job.slices);
}
