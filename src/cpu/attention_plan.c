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
    int     tiles;              /* do tiles multiply? MIXPI_NO_TILES, ...                  */
    int     parts, score_parts; /* bf16 numbers that make a number; 1 = it is stored so    */
} mixpi_heads;

/* Does an instruction set multiply by Intel's tiles, and how f16? */
enum {
    MIXPI_NO_TILES,
    MIXPI_BY_TILES,             /* bf16; an f16 number is split into two bf16 numbers      */
    MIXPI_BY_TILES_F16          /* the same, but scores of f16 are products of f16         */
};

/* The parts of an instruction set that attention uses. lanes: see mixpi_gemm_shape. */
typedef struct mixpi_attention_set {
    mixpi_pairs have;
    int         tiles;
    int64_t     lanes;
    mixp_task   forward, backward;
} mixpi_attention_set;

static mixpi_heads mixpi_heads_of(const mixp_attention_args *k, int pairs) {
    mixpi_heads h;
    h.t = k->t;
    h.keys = k->keys;
    h.heads = k->heads;
    h.group = k->heads / k->kv_heads;
    h.d = k->d;
    h.wide = (k->d + 15) / 16 * 16;
    h.pairs = pairs;
    h.tiles = MIXPI_NO_TILES;
    h.parts = h.score_parts = 1;
    return h;
}

/* Decides whether tiles multiply q, k, v and `other`, which in the forward pass is one of them. All
 * must be bf16, or all f16. The rule does not depend on a size, so a query's result is
 * bit-identical in each batch and with each number of keys. */
static void mixpi_heads_take_tiles(
    mixpi_heads *h, const mixpi_attention_set *set, const mixp_attention_args *k, mixp_in other) {
    const mixp_dtype dtype = k->q.dtype;
    if (dtype != MIXP_BF16 && dtype != MIXP_F16) return;
    if (k->k.dtype != dtype || k->v.dtype != dtype || other.dtype != dtype) return;
    h->tiles = set->tiles;
    if (dtype == MIXP_F16) h->parts = 2;
    if (dtype == MIXP_F16 && set->tiles != MIXPI_BY_TILES_F16) h->score_parts = 2;
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

/* The first block of queries, from that of query `least` on, that may see a key. */
static int64_t mixpi_first_queries(const mixp_attention_args *k, int64_t key, int64_t least) {
    int64_t from = k->causal ? key - mixpi_keys_before(k) : 0;
    return from > least ? from / MIXPI_QUERIES * MIXPI_QUERIES : least;
}

/* Scores of one query for keys [key, key + n), in a row of MIXPI_KEYS. masked: does a mask change
 * scores of this block? */
typedef struct mixpi_some_scores {
    int64_t head, query, key, n;
    int     masked;
} mixpi_some_scores;

/* A block of queries, to which blocks of keys are added one after another. */
typedef struct mixpi_met_queries {
    int64_t head, q0, rows;
    float  *o;                  /* results of the keys added so far                        */
    float  *scores;             /* scores of the current block of keys, then its weights   */
    float   top[MIXPI_QUERIES], sum[MIXPI_QUERIES];
} mixpi_met_queries;

/* Does a cap or dropout change the scores or the probabilities? */
static int mixpi_attention_modifies(const mixp_attention_args *k) {
    return k->softcap > 0.0f || k->dropout > 0.0f;
}

/* Is y of a row with this sum of weights rounded stochastically? */
static int mixpi_rounds_stochastically(const mixp_attention_args *k, float sum) {
    return k->y.dtype != MIXP_F32 && !k->y.accumulate && mixpi_top_repeats(sum);
}

/* --- what a mask does to a block of scores --- */

enum {
    MIXPI_MASK_ADDS,            /* any numbers                                             */
    MIXPI_MASK_SHOWS,           /* only 0: the mask need not be read again                 */
    MIXPI_MASK_HIDES            /* only -Inf: the scores need not be computed              */
};

/* A mask that several heads share is looked at once a call. */
typedef struct mixpi_masks {
    const mixp_attention_args *k;
    const mixpi_heads *h;
    int64_t  down, across;      /* blocks of queries and of keys                           */
    int64_t  many;              /* masks that several heads share                          */
    uint8_t *kinds;             /* MIXPI_MASK_ADDS, ... for each of their blocks           */
} mixpi_masks;

static mixpi_masks mixpi_masks_of(const mixp_attention_args *k, const mixpi_heads *h) {
    mixpi_masks m;
    m.k = k;
    m.h = h;
    m.down = mixpi_ceil_div(h->t, MIXPI_QUERIES);
    m.across = mixpi_ceil_div(h->keys, MIXPI_KEYS);
    m.many = (k->mask_at.sequence ? k->b : 1) * (k->mask_at.head ? k->heads : 1);
    m.kinds = NULL;
    if (!k->mask.data || m.many == k->b * k->heads) m.many = 0;
    return m;
}

/* What `rows` rows of a mask do, which begin `ld` numbers apart. Whole words are compared: 0 and -0
 * differ only in the sign. */
static int mixpi_mask_rows_do(mixp_in mask, int64_t ld, int64_t rows, int64_t n) {
    const size_t size = mixp_dtype_size(mask.dtype), bytes = (size_t)n * size;
    const char *row = (const char *)mask.data;
    uint64_t lowest = 0xFF800000FF800000u, sign = 0x8000000080000000u, not_zero = 0, not_lowest = 0;
    if (size == 2) sign = 0x8000800080008000u;
    if (mask.dtype == MIXP_BF16) lowest = 0xFF80FF80FF80FF80u;
    if (mask.dtype == MIXP_F16) lowest = 0xFC00FC00FC00FC00u;
    for (; rows > 0 && !(not_zero && not_lowest); rows--, row += (size_t)ld * size) {
        uint64_t word, zeros = 0, lows = lowest;
        size_t i;
        for (i = 0; i + 8 <= bytes; i += 8) {
            memcpy(&word, row + i, 8);
            not_zero |= word & ~sign;
            not_lowest |= word ^ lowest;
        }

        /* The end of a row, filled up with what is sought. */
        memcpy(&zeros, row + i, bytes - i);
        memcpy(&lows, row + i, bytes - i);
        not_zero |= zeros & ~sign;
        not_lowest |= lows ^ lowest;
    }
    if (!not_zero) return MIXPI_MASK_SHOWS;
    return not_lowest ? MIXPI_MASK_ADDS : MIXPI_MASK_HIDES;
}

/* Looks at the mask between `rows` queries and at.n keys. */
static int mixpi_mask_look(const mixpi_masks *m, mixpi_some_scores at, int64_t rows) {
    const mixp_attention_args *k = m->k;
    const mixpi_head head = mixpi_head_at(&k->mask_at, m->h, at.head);
    const int64_t first = head.first + at.query * head.ld + at.key * k->mask_key;
    return mixpi_mask_rows_do(
        mixpi_in_at(k->mask, first), head.ld, head.ld ? rows : 1, k->mask_key ? at.n : 1);
}

/* A task: a block of queries of a mask that several heads share. */
static void mixpi_masks_task(void *arg, int64_t index, int worker) {
    const mixpi_masks *m = (const mixpi_masks *)arg;
    const int64_t mask = index / m->down;
    mixpi_some_scores at;
    (void)worker;
    at.head = m->k->mask_at.head ? mask : mask * m->h->heads;
    at.query = index % m->down * MIXPI_QUERIES;
    for (int64_t block = 0; block < m->across; block++) {
        const int64_t rows = mixpi_min(MIXPI_QUERIES, m->h->t - at.query);
        at.key = block * MIXPI_KEYS;
        at.n = mixpi_min(MIXPI_KEYS, m->h->keys - at.key);
        m->kinds[index * m->across + block] = (uint8_t)mixpi_mask_look(m, at, rows);
    }
}

/* What the mask does between a block of `rows` queries and at.n keys of a block. */
static int mixpi_mask_does(const mixpi_masks *m, mixpi_some_scores at, int64_t rows) {
    const mixp_attention_args *k = m->k;
    int64_t mask = at.head;
    int kind;
    if (!k->mask.data) return MIXPI_MASK_SHOWS;
    if (!m->many) return mixpi_mask_look(m, at, rows);
    if (!k->mask_at.head) mask /= k->heads;
    if (!k->mask_at.sequence) mask %= k->mask_at.head ? k->heads : 1;
    mask = mask * m->down + at.query / MIXPI_QUERIES;
    kind = m->kinds[mask * m->across + at.key / MIXPI_KEYS];

    /* If not all keys of the block count, those that do may be hidden. */
    if (kind != MIXPI_MASK_ADDS || at.n == mixpi_min(MIXPI_KEYS, k->keys - at.key)) return kind;
    return mixpi_mask_look(m, at, rows);
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
    mixpi_masks  masks;
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

static int64_t mixpi_attention_carve(
    mixpi_attention_room *room, const mixpi_heads *h, float *from) {
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
    mixpi_masks  masks;
    mixpi_drops  drops;
    int64_t      chunks;        /* see mixpi_grad_share                                    */
    mixpi_slices slices;
} mixpi_attention_grad_job;

/* What a backward task computes for a head of k and v: dk and dv of keys [k0, k_end), and dq of
 * queries [q0, q_end). With several chunks, a task computes dk and dv of one chunk of the keys, or
 * dq of one chunk of the queries: in the same order, but scores are computed twice. */
typedef struct mixpi_grad_share {
    int64_t head, k0, k_end, q0, q_end;
    int     for_keys, for_queries;
} mixpi_grad_share;

/* The first row of a chunk of n rows. Chunks are whole blocks of MIXPI_KEYS. */
static int64_t mixpi_grad_cut(const mixpi_attention_grad_job *job, int64_t n, int64_t chunk) {
    return mixpi_min(n, mixpi_ceil_div(n, MIXPI_KEYS) * chunk / job->chunks * MIXPI_KEYS);
}

/* The share of a task. The largest chunks of a causal head, first keys and last queries, are
 * first. */
static mixpi_grad_share mixpi_grad_share_of(const mixpi_attention_grad_job *job, int64_t index) {
    const mixp_attention_args *k = &job->k->forward;
    const int64_t tasks = job->chunks > 1 ? 2 * job->chunks : 1, part = index % tasks;
    const int64_t last = tasks - 1 - part;
    mixpi_grad_share s;
    s.head = index / tasks * job->heads.group;
    s.k0 = s.q0 = 0;
    s.k_end = k->keys;
    s.q_end = k->t;
    s.for_keys = part < job->chunks;
    s.for_queries = tasks == 1 || !s.for_keys;
    if (!s.for_queries) {
        s.k0 = mixpi_grad_cut(job, k->keys, part);
        s.k_end = mixpi_grad_cut(job, k->keys, part + 1);
        s.q0 = mixpi_min(mixpi_first_queries(k, s.k0, 0), k->t);
    } else if (!s.for_keys) {
        s.q0 = mixpi_grad_cut(job, k->t, last);
        s.q_end = mixpi_grad_cut(job, k->t, last + 1);
        s.k_end = mixpi_keys_until(k, s.head, s.q_end);
    }
    return s;
}

/* A block of queries and a block of keys. first: how many of the keys row 0 may see. */
typedef struct mixpi_met_block {
    mixpi_some_scores at;
    int64_t rows, first;
} mixpi_met_block;

typedef struct mixpi_attention_grad_room {
    mixpi_grad_share share;
    float *q, *dy, *dq;         /* all rows of each head of the group                      */
    float *score_q, *score_dy;  /* q and dy in the form that scores need                   */
    float *delta;               /* dy . y of each row                                      */
    float *k, *k_columns, *v_columns, *dk, *dv; /* a block of keys                         */
    float *p, *g;               /* probabilities and their gradients, shaped as scores     */
} mixpi_attention_grad_room;

static int64_t mixpi_attention_grad_carve(
    mixpi_attention_grad_room *room, const mixpi_heads *h, float *from) {
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

/* --- by Intel's tiles: see attention_tiles.c --- */

/* A panel: 32 rows of a head in tiles, 32 elements of d after 32. Half a block of keys, or a block
 * of queries. The number of 16-bit codes in a panel whose numbers have `parts` parts. */
static int64_t mixpi_panel_codes(const mixpi_heads *h, int parts) {
    return mixpi_ceil_div(h->d, 32) * 1024 * parts;
}

/* The number of sums of a block of queries: d rounded up to 32 by MIXPI_QUERIES. */
static int64_t mixpi_tiled_sums(const mixpi_heads *h) {
    return mixpi_ceil_div(h->d, 32) * 32 * MIXPI_QUERIES;
}

static uint16_t *mixpi_carve_codes(mixpi_carver *c, int64_t codes) {
    return (uint16_t *)(void *)mixpi_carve(c, codes / 2);
}

/* The scratch memory of a forward task. */
typedef struct mixpi_tiled_room {
    uint16_t *keys, *values;    /* two panels a block of keys; values are transposed       */
    unsigned char *bad;         /* a block of keys: 1 = a key is not finite, 2 = a value is not */
    uint16_t *rows;             /* a panel, before it is transposed                        */
    uint16_t *q;                /* a block of queries, transposed                          */
    uint16_t *weights;          /* weights in 2 parts, before they are transposed; or in f32 */
    float *scores;              /* two blocks: MIXPI_KEYS x MIXPI_QUERIES                  */
    float *rows_of_scores;      /* MIXPI_QUERIES x MIXPI_KEYS, for a cap or dropout; mask rows */
    float *factors;             /* a vector for each query: the factor of its old sums     */
    float *sums;                /* d rounded up to 32 by MIXPI_QUERIES: results            */
    float *o;                   /* a block's product with v, shaped as sums; results by rows */
    float *plain;               /* MIXPI_QUERIES rows of f32 and one more                  */
} mixpi_tiled_room;

static int64_t mixpi_tiled_carve(mixpi_tiled_room *room, const mixpi_heads *h, float *from) {
    const int64_t blocks = mixpi_ceil_div(h->keys, MIXPI_KEYS);
    const int64_t panel = mixpi_panel_codes(h, h->parts);
    mixpi_carver c = { from, 0 };
    room->keys = mixpi_carve_codes(&c, blocks * 2 * mixpi_panel_codes(h, h->score_parts));
    room->values = mixpi_carve_codes(&c, blocks * 2 * panel);
    room->bad = (unsigned char *)mixpi_carve(&c, mixpi_ceil_div(blocks, 4));
    room->rows = mixpi_carve_codes(&c, panel);
    room->q = mixpi_carve_codes(&c, panel);
    room->weights = mixpi_carve_codes(&c, 2 * MIXPI_QUERIES * MIXPI_KEYS);
    room->scores = mixpi_carve(&c, 2 * MIXPI_QUERIES * MIXPI_KEYS);
    room->rows_of_scores = mixpi_carve(&c, MIXPI_QUERIES * MIXPI_KEYS);
    room->factors = mixpi_carve(&c, MIXPI_QUERIES * 16);
    room->sums = mixpi_carve(&c, mixpi_tiled_sums(h));
    room->o = mixpi_carve(&c, mixpi_tiled_sums(h));
    room->plain = mixpi_carve(&c, (MIXPI_QUERIES + 1) * h->wide);
    return c.used;
}

/* The scratch memory of a backward task. A head's queries are counted in blocks. */
typedef struct mixpi_tiled_grad_room {
    uint16_t *q, *dy;           /* each block of queries, transposed: for scores           */
    uint16_t *q_over, *dy_over; /* the same, to be summed over queries: for dk and dv      */
    unsigned char *bad;         /* a block of queries: 1 = q or dy is not finite           */
    float *dq;                  /* each block of queries: mixpi_tiled_sums, transposed     */
    uint16_t *rows;             /* a panel, before it is transposed                        */
    uint16_t *keys, *values;    /* a block of keys, for scores                             */
    uint16_t *keys_over;        /* the same, to be summed over keys: for dq                */
    float *scores, *grads;      /* MIXPI_KEYS x MIXPI_QUERIES: weights, score gradients    */
    uint16_t *p, *g;            /* the same in two parts, to be summed over queries        */
    uint16_t *g_over;           /* g, to be summed over keys                               */
    mixpi_attention_grad_room plain;    /* delta, dk, dv; p and g by rows; all others for blocks
                                           with values that are not finite                 */
} mixpi_tiled_grad_room;

static int64_t mixpi_tiled_grad_carve(
    mixpi_tiled_grad_room *room, const mixpi_heads *h, float *from) {
    const int64_t blocks = h->group * mixpi_ceil_div(h->t, MIXPI_QUERIES);
    const int64_t panel = mixpi_panel_codes(h, h->parts), block = MIXPI_KEYS * h->wide;
    const int64_t scores = MIXPI_QUERIES * MIXPI_KEYS;
    mixpi_attention_grad_room *plain = &room->plain;
    mixpi_carver c = { from, 0 };
    room->q = mixpi_carve_codes(&c, blocks * panel);
    room->dy = mixpi_carve_codes(&c, blocks * panel);
    room->q_over = mixpi_carve_codes(&c, blocks * panel);
    room->dy_over = mixpi_carve_codes(&c, blocks * panel);
    room->bad = (unsigned char *)mixpi_carve(&c, mixpi_ceil_div(blocks, 4));
    room->dq = mixpi_carve(&c, blocks * mixpi_tiled_sums(h));
    room->rows = mixpi_carve_codes(&c, panel);
    room->keys = mixpi_carve_codes(&c, 2 * panel);
    room->values = mixpi_carve_codes(&c, 2 * panel);
    room->keys_over = mixpi_carve_codes(&c, 2 * panel);
    room->scores = mixpi_carve(&c, scores);
    room->grads = mixpi_carve(&c, scores);
    room->p = mixpi_carve_codes(&c, 2 * scores);
    room->g = mixpi_carve_codes(&c, 2 * scores);
    room->g_over = mixpi_carve_codes(&c, 2 * scores);

    plain->q = plain->score_q = mixpi_carve(&c, MIXPI_QUERIES * h->wide);
    plain->dy = plain->score_dy = mixpi_carve(&c, MIXPI_QUERIES * h->wide);
    plain->dq = mixpi_carve(&c, MIXPI_QUERIES * h->wide);
    plain->delta = mixpi_carve(&c, h->group * h->t);
    plain->k = mixpi_carve(&c, block);
    plain->k_columns = mixpi_carve(&c, block);
    plain->v_columns = mixpi_carve(&c, block);
    plain->dk = mixpi_carve(&c, block);
    plain->dv = mixpi_carve(&c, block);
    plain->p = mixpi_carve(&c, scores);
    plain->g = mixpi_carve(&c, scores);
    return c.used;
}

/* The scratch memory of a task, in floats. */
static int64_t mixpi_attention_floats(const mixpi_heads *h) {
    mixpi_attention_room room;
    mixpi_tiled_room tiled;
    if (h->tiles) return mixpi_tiled_carve(&tiled, h, NULL);
    return mixpi_attention_carve(&room, h, NULL);
}
static int64_t mixpi_attention_grad_floats(const mixpi_heads *h) {
    mixpi_attention_grad_room room;
    mixpi_tiled_grad_room tiled;
    if (h->tiles) return mixpi_tiled_grad_carve(&tiled, h, NULL);
    return mixpi_attention_grad_carve(&room, h, NULL);
}

/* The work of forward: two products for each score, and the score itself. Backward has five
 * products. lanes: see mixpi_cpu_gemm. */
static int64_t mixpi_attention_work(const mixp_attention_args *k, int64_t lanes) {
    const int64_t scores = k->b * k->heads * k->t * k->keys;
    return scores * 2 * k->d / lanes + scores;
}

/* mixpi_run_sliced, after a look at masks that several heads share. */
static mixp_result mixpi_run_attention(const mixp_exec *x, int64_t tasks, int64_t work,
    mixp_task task, void *job, mixpi_slices *slices, mixpi_masks *masks) {
    const int64_t workers = tasks > 1 ? mixpi_workers(x, work) : 1;
    const int64_t rows = masks->many * masks->down;
    const size_t bytes = (size_t)(slices->floats * workers) * sizeof(float);
    char *memory = (char *)mixpi_scratch(x, bytes + (size_t)(rows * masks->across));
    if (!memory) return MIXP_ERR_MEMORY;
    slices->first = (float *)(void *)memory;
    masks->kinds = (uint8_t *)memory + bytes;
    mixpi_parallel(x, rows, rows * masks->h->keys * 4, mixpi_masks_task, masks);
    mixpi_parallel(x, tasks, work, task, job);
    return MIXP_OK;
}

static mixp_result mixpi_cpu_attention(
    const mixp_exec *x, const mixp_attention_args *k, const mixpi_attention_set *set) {
    int64_t many = k->b * k->heads;
    const int64_t work = mixpi_attention_work(k, set->lanes);
    mixpi_attention_job job;
    mixp_result r;
    if (mixpi_attention_empty(k)) return MIXP_OK;
    r = mixpi_attention_check(k);
    if (r != MIXP_OK) return r;

    job.k = k;
    job.heads = mixpi_heads_of(k, mixpi_pairs_for(set->have, k->q, k->k));
    mixpi_heads_take_tiles(&job.heads, set, k, k->q);
    job.masks = mixpi_masks_of(k, &job.heads);
    job.drops = mixpi_drops_of(k);
    job.chunks = 1;

    /* Too few heads are cut by queries. */
    int64_t workers = mixpi_workers(x, work);
    if (many < 2 * workers)
        job.chunks =
            mixpi_min(mixpi_ceil_div(2 * workers, many), mixpi_ceil_div(k->t, MIXPI_QUERIES));

    job.slices.floats = mixpi_attention_floats(&job.heads);
    return mixpi_run_attention(
        x, many * job.chunks, work, set->forward, &job, &job.slices, &job.masks);
}

static mixp_result mixpi_cpu_attention_backward(
    const mixp_exec *x, const mixp_attention_backward_args *k, const mixpi_attention_set *set) {
    const mixp_attention_args *forward = &k->forward;
    int64_t tasks = forward->b * forward->kv_heads, work, workers;
    mixpi_attention_grad_job job;
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
    pairs = mixpi_pairs_for(set->have, forward->q, forward->k);
    if (forward->v.dtype != forward->q.dtype) pairs = MIXPI_FLOATS;
    if (k->dy.dtype != forward->q.dtype) pairs = MIXPI_FLOATS;

    job.heads = mixpi_heads_of(forward, pairs);
    mixpi_heads_take_tiles(&job.heads, set, forward, k->dy);
    job.masks = mixpi_masks_of(forward, &job.heads);
    job.drops = mixpi_drops_of(forward);
    job.slices.floats = mixpi_attention_grad_floats(&job.heads);

    /* Heads are cut only if half of the threads would be idle: 7 products replace 5. */
    work = 2 * mixpi_attention_work(forward, set->lanes);
    workers = mixpi_workers(x, work);
    job.chunks = 1;
    if (workers > 2 * tasks)
        job.chunks = mixpi_min(mixpi_ceil_div(2 * workers, tasks),
            mixpi_ceil_div(mixpi_min(forward->t, forward->keys), MIXPI_KEYS));
    if (job.chunks > 1) tasks *= 2 * job.chunks;
    return mixpi_run_attention(x, tasks, work, set->backward, &job, &job.slices, &job.masks);
}
