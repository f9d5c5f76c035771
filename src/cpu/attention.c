#pragma once
#include "elementwise.c"
#include "gemm.c"
#include "attention_plan.c"
/* --- attention -------------------------------------------------------------------------- *
 *
 * A forward task computes some queries of one head of one sequence. A backward task computes one
 * head of k and v with every head of q that uses it. A task widens its inputs to f32 and computes
 * blocks of MIXPI_QUERIES x MIXPI_KEYS scores with gemm's tiles. Blocks start at multiples of their
 * size and sums run in a fixed order, so the bits do not depend on how tasks are distributed.
 */

/* Computes c[m, n] by tiles. n is whole vectors; `all` has the three matrices and their strides. */
MIXPI_K void MIXPI_P(product)(const mixpi_tile *all, int64_t m, int64_t n) {
    int64_t panels = mixpi_ceil_div(m, MIXPI_MR), i, j;
    mixpi_tile t = *all;
    for (i = 0; i < panels; i++)
        for (j = 0; j < n; j += MIXPI_NR) {
            int64_t row = MIXPI_P(panel_row)(m, i, panels);
            t.a = all->a + row * t.a_row;
            t.b = all->b + j;
            t.c = all->c + row * t.c_row + j;
            t.cols = (int)mixpi_min(MIXPI_NR, n - j);
            t.ask = (uintptr_t)t.a;
            MIXPI_P(tile_run)(&t, MIXPI_P(panel_row)(m, i + 1, panels) - row);
        }
}

/* scores[rows, n] = scale * q k', with the keys as columns; n is whole vectors. */
MIXPI_K void MIXPI_P(scores)(const mixpi_heads *h, int64_t rows, int64_t n, float scale,
                             const float *q, const float *columns, float *scores) {
    mixpi_tile t;
    memset(&t, 0, sizeof t);
    t.depth = h->pairs ? (h->d + 1) / 2 : h->d;
    t.pairs = h->pairs;
    t.a = q;
    t.a_row = h->wide;
    t.a_step = 1;
    t.b = columns;
    t.b_step = MIXPI_KEYS;
    t.c = scores;
    t.c_row = MIXPI_KEYS;
    t.alpha = scale;
    MIXPI_P(product)(&t, rows, n);
}

/* A tile that adds `depth` rows of b, weighted by p, to `sums`. p is shaped as scores. */
MIXPI_V mixpi_tile MIXPI_P(weighted)(const mixpi_heads *h, int64_t depth, const float *p,
                                     const float *b, float *sums) {
    mixpi_tile t;
    memset(&t, 0, sizeof t);
    t.depth = depth;
    t.a = p;
    t.b = b;
    t.b_step = h->wide;
    t.c = sums;
    t.c_row = h->wide;
    t.alpha = 1.0f;
    t.add = 1;
    return t;
}

/* sums[rows] += p[rows, keys] b[keys]. */
MIXPI_K void MIXPI_P(add_by_queries)(const mixpi_heads *h, int64_t rows, int64_t keys,
                                     const float *p, const float *b, float *sums) {
    mixpi_tile t = MIXPI_P(weighted)(h, keys, p, b, sums);
    t.a_row = MIXPI_KEYS;
    t.a_step = 1;
    MIXPI_P(product)(&t, rows, h->wide);
}

/* sums[keys] += p'[keys, rows] b[rows]. */
MIXPI_K void MIXPI_P(add_by_keys)(const mixpi_heads *h, int64_t rows, int64_t keys,
                                  const float *p, const float *b, float *sums) {
    mixpi_tile t = MIXPI_P(weighted)(h, rows, p, b, sums);
    t.a_row = 1;
    t.a_step = MIXPI_KEYS;
    MIXPI_P(product)(&t, keys, h->wide);
}

/* Copies rows [row, row+rows) of a head to f32 rows of length `wide`, with zeros beyond d. Rows of
 * zeros follow, up to `total` rows. */
MIXPI_K void MIXPI_P(head_rows)(const mixpi_heads *h, mixp_in a, mixpi_head at,
                                int64_t row, int64_t rows, int64_t total, float *dst) {
    int64_t wide = h->wide, i, j;
    MIXPI_P(widen_rows)
    (dst, wide, mixpi_source_of(a, at.first + row * at.ld, at.ld), rows, (int)h->d);
    for (i = 0; i < rows; i++)
        for (j = h->d; j < wide; j++) dst[i * wide + j] = 0.0f;
    memset(dst + rows * wide, 0, (size_t)((total - rows) * wide) * sizeof(float));
}

/* head_rows for scores, which are summed along rows: writes pairs if h->pairs is set. */
MIXPI_K void MIXPI_P(score_rows)(const mixpi_heads *h, mixp_in a, mixpi_head at,
                                 int64_t row, int64_t rows, int64_t total, float *dst) {
    mixpi_source from = mixpi_source_of(a, at.first + row * at.ld, at.ld);
    if (!h->pairs) {
        MIXPI_P(head_rows)(h, a, at, row, rows, total, dst);
        return;
    }
    MIXPI_P(load_along)(dst, h->wide, from, rows, (int)h->d, 1);
    memset(dst + rows * h->wide, 0, (size_t)((total - rows) * h->wide) * sizeof(float));
}

/* head_put for a y of dtype `to`, which is a constant at each call: whole vectors here, the rest of
 * a row by `write`. */
MIXPI_V void MIXPI_P(head_put_as)(const mixp_dtype to, const mixpi_heads *h, mixp_out y,
                                  int64_t first, int64_t ld, int64_t rows, float *src) {
    const int64_t size = MIXPI_P(size)(to), whole = h->d / 16 * 16;
    for (; rows > 0; rows--, src += h->wide, first += ld) {
        char *p = (char *)y.data + first * size;
        for (int64_t j = 0; j < whole; j += 16) {
            mixpi_v x = mixpi_vload(src + j);
            if (y.accumulate) x = mixpi_vadd(x, mixpi_vget(to, p + j * size));
            mixpi_vput(to, p + j * size, x, 0);
        }
        if (whole < h->d) MIXPI_P(write)(y, first + whole, h->d - whole, src + whole);
    }
}

/* Stores rows of length `wide` to a head of y, or adds them if y accumulates. */
MIXPI_K void MIXPI_P(head_put)(const mixpi_heads *h, mixp_out y, mixpi_head at,
                               int64_t row, int64_t rows, float *src) {
    const int64_t first = at.first + row * at.ld, ld = at.ld;
    if (y.dtype == MIXP_F32) MIXPI_P(head_put_as)(MIXP_F32, h, y, first, ld, rows, src);
    else if (y.dtype == MIXP_F16) MIXPI_P(head_put_as)(MIXP_F16, h, y, first, ld, rows, src);
    else MIXPI_P(head_put_as)(MIXP_BF16, h, y, first, ld, rows, src);
}

/* dst[wide, MIXPI_KEYS] = the transpose of rows[MIXPI_KEYS, wide], only the part scores need. */
MIXPI_K void MIXPI_P(columns_of)(const mixpi_heads *h, const float *rows, float *dst) {
    int64_t wide = h->wide, steps = h->pairs ? (h->d + 1) / 2 : h->d, i, j;
    for (i = 0; i < MIXPI_KEYS; i += 16)
        for (j = 0; j < steps; j += 16)
            MIXPI_P(transpose16)
            (dst + j * MIXPI_KEYS + i, MIXPI_KEYS, rows + i * wide + j, wide);
}

/* x in the lanes j + lane < n, y in the others. */
MIXPI_V mixpi_v MIXPI_P(below)(int64_t n, int64_t j, mixpi_v x, mixpi_v y) {
    if (j + 16 <= n) return x;
    return mixpi_vselect_gt(mixpi_vset((float)(n - j)), mixpi_vload(mixpi_lane_numbers),
                            x, y);
}

/* Multiplies row[0 .. n) by factor; n is whole vectors. */
MIXPI_V void MIXPI_P(scale_row)(float *row, int64_t n, mixpi_v factor) {
    for (int64_t j = 0; j < n; j += 16)
        mixpi_vstore(row + j, mixpi_vmul(mixpi_vload(row + j), factor));
}

/* The lane maxima of `most` and of s[from .. min(n, seen)). */
MIXPI_V mixpi_v MIXPI_P(most_of)(const float *s, int64_t from, int64_t n, int64_t seen,
                                 mixpi_v most) {
    mixpi_v lowest = mixpi_vset(MIXPI_LOWEST);
    int64_t j;
    for (j = from; j < n; j += 16)
        most = mixpi_vmax(MIXPI_P(below)(seen, j, mixpi_vload(s + j), lowest), most);
    return most;
}

/* Turns a row of n scores into exp(score - max), and into 0 from `seen` on. max is the largest of
 * the scores and of *top, the largest score so far. *sum and o belong to the old *top; they are
 * rescaled to the new one. *top starts at MIXPI_LOWEST, so a row that contains only -Inf gets a sum
 * of 0, and in the end NaN. */
MIXPI_V void MIXPI_P(softmax_block)(float *s, int64_t n, int64_t seen, float max, float *top,
                                    float *sum, float *o, int64_t wide) {
    mixpi_v add = mixpi_vzero();
    int64_t j;
    if (max > *top && *sum > 0.0f) {
        mixpi_v factor = mixpi_vexp(mixpi_vset(*top - max));
        *sum *= mixpi_vmaxof(factor);
        MIXPI_P(scale_row)(o, wide, factor);
    }
    *top = max;
    for (j = 0; j < n; j += 16) {
        mixpi_v e = mixpi_vexp(mixpi_vsub(mixpi_vload(s + j), mixpi_vset(max)));
        e = MIXPI_P(below)(seen, j, e, mixpi_vzero());
        mixpi_vstore(s + j, e);
        add = mixpi_vadd(add, e);
    }
    *sum += mixpi_vsum(add);
}

/* --- what may stand between scores and probabilities: a cap, a mask, dropout --- */

/* s = softcap * tanh(s / softcap), in whole vectors. */
MIXPI_K void MIXPI_P(cap_scores)(float *s, int64_t n, float softcap) {
    mixpi_v by = mixpi_vset(1.0f / softcap), cap = mixpi_vset(softcap);
    for (int64_t j = 0; j < n; j += 16)
        mixpi_vstore(s + j,
                     mixpi_vmul(mixpi_vtanh(mixpi_vmul(mixpi_vload(s + j), by)), cap));
}

/* slopes = the derivative of the cap at capped scores s: 1 - (s / softcap)^2. */
MIXPI_K void MIXPI_P(cap_slopes)(float *slopes, const float *s, int64_t n, float softcap) {
    mixpi_v by = mixpi_vset(1.0f / softcap), one = mixpi_vset(1.0f);
    for (int64_t j = 0; j < n; j += 16) {
        mixpi_v part = mixpi_vmul(mixpi_vload(s + j), by);
        mixpi_vstore(slopes + j, mixpi_vfma(mixpi_vneg(part), part, one));
    }
}

/* Adds a row of a mask, which begins at `at`, to s[0 .. n), in whole vectors. Returns the lane
 * maxima of `most` and of the new scores. Rows are `row` bytes apart. The processor cannot predict
 * where the next rows begin, so the function prefetches the eighth row ahead. dtype is a constant
 * at each call. */
MIXPI_V mixpi_v MIXPI_P(add_mask_of)(mixp_dtype dtype, float *s, const char *at, int64_t row,
                                     int64_t n, mixpi_v most) {
    int64_t size = MIXPI_P(size)(dtype), j;
    uintptr_t ahead = (uintptr_t)at + (uintptr_t)(8 * row);
    for (j = 0; j < n; j += 16) {
        mixpi_v x = mixpi_vadd(mixpi_vload(s + j), mixpi_vget(dtype, at + j * size));
        MIXPI_PREFETCH((const char *)(ahead + (uintptr_t)(j * size)));
        mixpi_vstore(s + j, x);
        most = mixpi_vmax(x, most);
    }
    return most;
}

/* add_mask_of for a mask of any dtype. */
MIXPI_K mixpi_v MIXPI_P(add_mask)(float *s, mixp_in mask, int64_t first, int64_t ld,
                                  int64_t n, mixpi_v most) {
    int64_t size = MIXPI_P(size)(mask.dtype), row = ld * size;
    const char *at = (const char *)mask.data + first * size;
    if (mask.dtype == MIXP_F32) return MIXPI_P(add_mask_of)(MIXP_F32, s, at, row, n, most);
    if (mask.dtype == MIXP_F16) return MIXPI_P(add_mask_of)(MIXP_F16, s, at, row, n, most);
    return MIXPI_P(add_mask_of)(MIXP_BF16, s, at, row, n, most);
}

/* Adds the mask to these scores. Returns how many of the first scores *most now includes: whole
 * vectors below `seen`. *most holds the largest score so far on entry. `seen` is negative if a
 * causal query ends before this block. */
MIXPI_V int64_t MIXPI_P(mask_scores)(const mixp_attention_args *k, const mixpi_heads *h,
                                     const mixpi_some_scores *at, int64_t seen, float *s,
                                     mixpi_v *most) {
    mixpi_head head = mixpi_head_at(&k->mask_at, h, at->head);
    int64_t first = head.first + at->query * head.ld + at->key * k->mask_key, j = 0;
    int64_t whole = seen > 0 ? mixpi_min(seen, at->n) & ~(int64_t)15 : 0;
    if (k->mask_key) {
        *most = MIXPI_P(add_mask)(s, k->mask, first, head.ld, whole, *most);
        for (j = whole; j < at->n; j++) s[j] += MIXPI_P(read_one)(k->mask, first + j);
        return whole;
    }
    for (j = 0; j < at->n; j++) s[j] += MIXPI_P(read_one)(k->mask, first);
    return 0;
}

/* The random numbers of these probabilities. */
MIXPI_K void MIXPI_P(draw)(const mixpi_drops *drops, const mixpi_heads *h,
                           const mixpi_some_scores *at, uint32_t *random) {
    uint64_t first = (uint64_t)((at->head * h->t + at->query) * h->keys + at->key);
    int64_t  j;
    for (j = 0; j < at->n; j += 16)
        mixpi_vrandom(drops->key, first + (uint64_t)j, random + j);
}

MIXPI_K void MIXPI_P(drop)(const mixpi_drops *drops, const uint32_t *random, int64_t n,
                           float *p) {
    int64_t j;
    for (j = 0; j < n; j++) p[j] = random[j] >= drops->limit ? p[j] * drops->scale : 0.0f;
}

/* --- forward --- */

/* Turns a row of sums into results; returns the row's lse. If a mask or lengths hide every key of
 * a query, its results are 0 and its lse is +Inf. */
MIXPI_V float MIXPI_P(attention_end)(const mixp_attention_args *k, float *o, int64_t wide,
                                     float top, float sum) {
    if (sum <= 0.0f && (k->mask.data || k->lengths)) {
        memset(o, 0, (size_t)wide * sizeof(float));
        return mixp_f32_of_bits(0x7F800000u);
    }
    MIXPI_P(scale_row)(o, wide, mixpi_vset(1.0f / sum));
    for (int64_t j = 0; j < wide && mixpi_rounds_stochastically(k, sum); j++)
        o[j] = mixpi_round_stochastically(k->y.dtype, o[j]);
    return top + logf(sum);
}

/* Turns a row of scores into weights and updates *top, *sum and o. seen: how many keys, from the
 * block's first, the query may see. */
MIXPI_V void MIXPI_P(attention_row)(const mixpi_attention_job *job,
                                    const mixpi_some_scores *at, int64_t seen, float *s,
                                    float *top, float *sum, float *o) {
    const mixp_attention_args *k = job->k;
    int64_t  n = (at->n + 15) / 16 * 16, done = 0;
    mixpi_v  most = mixpi_vset(*top);
    uint32_t random[MIXPI_KEYS];
    if (k->softcap > 0.0f) MIXPI_P(cap_scores)(s, at->n, k->softcap);
    if (at->masked) done = MIXPI_P(mask_scores)(k, &job->heads, at, seen, s, &most);
    most = MIXPI_P(most_of)(s, done, n, seen, most);
    MIXPI_P(softmax_block)(s, n, seen, mixpi_vmaxof(most), top, sum, o, job->heads.wide);
    if (!job->drops.limit) return;
    MIXPI_P(draw)(&job->drops, &job->heads, at, random);
    MIXPI_P(drop)(&job->drops, random, at->n, s);
}

/* Begins a block of queries, which have seen nothing yet. */
MIXPI_K void MIXPI_P(queries_begin)(const mixpi_attention_job *job, mixpi_met_queries *s) {
    s->rows = mixpi_min(MIXPI_QUERIES, job->heads.t - s->q0);
    memset(s->o, 0, (size_t)(s->rows * job->heads.wide) * sizeof(float));
    for (int64_t r = 0; r < s->rows; r++) {
        s->top[r] = MIXPI_LOWEST;
        s->sum[r] = 0.0f;
    }
}

/* The scores that the queries have with the next block of keys that the mask does not hide, from
 * key k0 on. Only the keys before `last` count. The result's n is 0 if the mask hides all. */
MIXPI_K mixpi_some_scores MIXPI_P(queries_meet)(const mixpi_attention_job *job,
                                                const mixpi_met_queries *s, int64_t k0,
                                                int64_t last) {
    mixpi_some_scores at;
    memset(&at, 0, sizeof at);
    at.head = s->head;
    at.query = s->q0;
    for (; k0 < last; k0 += MIXPI_KEYS) {
        at.key = k0;
        at.n = mixpi_min(MIXPI_KEYS, last - k0);
        const int mask = mixpi_mask_does(&job->masks, at, s->rows);
        at.masked = mask == MIXPI_MASK_ADDS;
        if (mask != MIXPI_MASK_HIDES) return at;
    }
    at.n = 0;
    return at;
}

/* How many keys of a block, counted from its first, row 0 of the queries may see. */
MIXPI_V int64_t MIXPI_P(queries_reach)(const mixp_attention_args *k, mixpi_some_scores at) {
    int64_t q0 = at.query, k0 = at.key, reach = at.n;
    if (k->causal) reach = q0 + mixpi_keys_before(k) - k0 + 1;
    return reach;
}

/* Turns the scores of a block into weights. */
MIXPI_K void MIXPI_P(queries_weigh)(const mixpi_attention_job *job, mixpi_met_queries *s,
                                    mixpi_some_scores at) {
    const int64_t reach = MIXPI_P(queries_reach)(job->k, at);
    for (int64_t r = 0; r < s->rows; r++) {
        at.query = s->q0 + r;
        MIXPI_P(attention_row)(job, &at, mixpi_min(at.n, reach + r), s->scores + r * MIXPI_KEYS,
                               &s->top[r], &s->sum[r], s->o + r * job->heads.wide);
    }
}

/* Writes the results of a block of queries. */
MIXPI_K void MIXPI_P(queries_end)(const mixpi_attention_job *job, mixpi_met_queries *s) {
    const mixpi_heads *h = &job->heads;
    float *lse = job->k->lse + s->head * h->t + s->q0, *o = s->o;
    for (int64_t r = 0; r < s->rows; r++, o += h->wide)
        lse[r] = MIXPI_P(attention_end)(job->k, o, h->wide, s->top[r], s->sum[r]);
    MIXPI_P(head_put)
    (h, job->k->y, mixpi_head_merged(h, s->head), s->q0, s->rows, s->o);
}

/* Forward of up to MIXPI_QUERIES queries from q0 on. The room already holds the keys' columns and
 * the values. */
MIXPI_K void MIXPI_P(attention_queries)(const mixpi_attention_job *job,
                                        const mixpi_attention_room *room, int64_t head,
                                        int64_t q0) {
    const mixp_attention_args *k = job->k;
    const mixpi_heads *h = &job->heads;
    int64_t last;
    mixpi_some_scores at;
    mixpi_met_queries s;
    s.head = head;
    s.q0 = q0;
    s.o = room->o;
    s.scores = room->scores;
    MIXPI_P(queries_begin)(job, &s);
    MIXPI_P(score_rows)
    (h, k->q, mixpi_head_at(&k->q_at, h, head), q0, s.rows, s.rows, room->q);

    /* Block by block of keys: scores, the running largest and sum, then values. */
    last = mixpi_keys_until(k, head, q0 + s.rows);
    at = MIXPI_P(queries_meet)(job, &s, 0, last);
    for (; at.n; at = MIXPI_P(queries_meet)(job, &s, at.key + MIXPI_KEYS, last)) {
        const int64_t first = at.key * h->wide, n = (at.n + 15) / 16 * 16;
        MIXPI_P(scores)(h, s.rows, n, k->scale, room->q, room->columns + first, s.scores);
        MIXPI_P(queries_weigh)(job, &s, at);
        MIXPI_P(add_by_queries)(h, s.rows, at.n, s.scores, room->v + first, s.o);
    }
    MIXPI_P(queries_end)(job, &s);
}

/* The forward task: some blocks of queries of one head. */
MIXPI_K void MIXPI_P(attention_task)(void *arg, int64_t index, int worker) {
    const mixpi_attention_job *job = (const mixpi_attention_job *)arg;
    const mixp_attention_args *k = job->k;
    const mixpi_heads *h = &job->heads;
    int64_t head = index / job->chunks, chunk = index % job->chunks, i, k0;
    int64_t blocks = mixpi_ceil_div(h->t, MIXPI_QUERIES);
    int64_t first = blocks * chunk / job->chunks,
            end = blocks * (chunk + 1) / job->chunks;
    int64_t last = mixpi_keys_until(k, head, mixpi_min(h->t, end * MIXPI_QUERIES));
    mixpi_head keys = mixpi_head_met(&k->k_at, h, head);
    mixpi_attention_room room;

    /* The head's keys as columns and its values as rows serve all its queries. */
    (void)mixpi_attention_carve(&room, h, mixpi_slice(&job->slices, worker));
    for (k0 = 0; k0 < last; k0 += MIXPI_KEYS) {
        int64_t rows = mixpi_min(MIXPI_KEYS, last - k0);
        MIXPI_P(score_rows)(h, k->k, keys, k0, rows, MIXPI_KEYS, room.rows);
        MIXPI_P(columns_of)(h, room.rows, room.columns + k0 * h->wide);
    }
    MIXPI_P(head_rows)(h, k->v, mixpi_head_met(&k->v_at, h, head), 0, last, last, room.v);

    for (i = first; i < end; i++)
        MIXPI_P(attention_queries)(job, &room, head, i * MIXPI_QUERIES);
}

/* --- backward --- */

/* delta[i] = dy[i] . y[i], which is the sum over keys of each probability times its gradient, for
 * `rows` queries from q0 on. y: scratch for MIXPI_KEYS rows. */
MIXPI_K void MIXPI_P(attention_deltas)(const mixpi_attention_grad_job *job, int64_t head,
                                       int64_t q0, int64_t rows, const float *dy, float *y,
                                       float *delta) {
    const mixpi_heads *h = &job->heads;
    const mixp_in from = mixpi_in(job->k->forward.y.data, job->k->forward.y.dtype);
    for (int64_t i = 0; i < rows; i++, dy += h->wide) {
        const float *row = y + i % MIXPI_KEYS * h->wide;
        const int64_t some = mixpi_min(MIXPI_KEYS, rows - i);
        mixpi_v sum = mixpi_vzero();
        if (row == y)
            MIXPI_P(head_rows)(h, from, mixpi_head_merged(h, head), q0 + i, some, some, y);
        for (int64_t j = 0; j < h->wide; j += 16)
            sum = mixpi_vfma(mixpi_vload(dy + j), mixpi_vload(row + j), sum);
        delta[i] = mixpi_vsum(sum);
    }
}

/* Turns scores p into probabilities, and their gradients g into the gradients of q k'. */
MIXPI_V void MIXPI_P(score_grads)(float *p, float *g, int64_t n, int64_t seen, float lse,
                                  float delta, float scale) {
    int64_t j;
    for (j = 0; j < n; j += 16) {
        mixpi_v e = mixpi_vexp(mixpi_vsub(mixpi_vload(p + j), mixpi_vset(lse)));
        mixpi_v d = mixpi_vmul(mixpi_vsub(mixpi_vload(g + j), mixpi_vset(delta)),
                               mixpi_vset(scale));
        mixpi_vstore(p + j, MIXPI_P(below)(seen, j, e, mixpi_vzero()));
        mixpi_vstore(g + j, MIXPI_P(below)(seen, j, mixpi_vmul(e, d), mixpi_vzero()));
    }
}

/* score_grads with a cap, a mask or dropout. The dropped probabilities in p become 0 last. */
MIXPI_K void MIXPI_P(modified_grads)(const mixpi_attention_grad_job *job,
                                 const mixpi_some_scores *at, int64_t seen, float *p,
                                 float *g, float lse, float delta) {
    const mixp_attention_args *k = &job->k->forward;
    int64_t  n = (at->n + 15) / 16 * 16, j;
    uint32_t random[MIXPI_KEYS];
    float    slopes[MIXPI_KEYS];
    mixpi_v  most = mixpi_vzero();      /* unused here */

    /* Forward again: cap, mask, dropout. */
    if (k->softcap > 0.0f) {
        MIXPI_P(cap_scores)(p, at->n, k->softcap);
        MIXPI_P(cap_slopes)(slopes, p, at->n, k->softcap);
    }
    if (at->masked) MIXPI_P(mask_scores)(k, &job->heads, at, seen, p, &most);
    if (job->drops.limit) {
        MIXPI_P(draw)(&job->drops, &job->heads, at, random);
        MIXPI_P(drop)(&job->drops, random, at->n, g);
    }

    /* Back through the softmax, then through what changed the scores. */
    MIXPI_P(score_grads)(p, g, n, seen, lse, delta, k->scale);
    for (j = 0; k->softcap > 0.0f && j < seen; j++) g[j] *= slopes[j];
    if (job->drops.limit) MIXPI_P(drop)(&job->drops, random, at->n, p);
}

/* Computes the probabilities of one block of scores and the gradients of the scores. */
MIXPI_K void MIXPI_P(block_grads)(const mixpi_attention_grad_job *job,
                                  const mixpi_attention_grad_room *room,
                                  mixpi_some_scores at, int64_t rows, int64_t first) {
    const mixp_attention_args *k = &job->k->forward;
    int64_t n = (at.n + 15) / 16 * 16, t = job->heads.t, r;
    const float *lse = k->lse + at.head * t;
    const float *delta = room->delta + at.head % job->heads.group * t;
    const int modified = mixpi_attention_modifies(k) || at.masked;
    for (r = 0; r < rows; r++, at.query++) {
        float  *p = room->p + r * MIXPI_KEYS, *g = room->g + r * MIXPI_KEYS;
        int64_t seen = mixpi_min(at.n, first + r);
        if (modified)
            MIXPI_P(modified_grads)(job, &at, seen, p, g, lse[at.query], delta[at.query]);
        else
            MIXPI_P(score_grads)(p, g, n, seen, lse[at.query], delta[at.query], k->scale);
    }
}

/* Finds the scores that the block of queries from q0 on has with the block of keys from k0 on.
 * Returns 0 if it has none. */
MIXPI_K int MIXPI_P(blocks_meet)(const mixpi_attention_grad_job *job, int64_t head, int64_t k0,
                                 int64_t q0, mixpi_met_block *m) {
    const mixp_attention_args *k = &job->k->forward;
    const mixpi_heads *h = &job->heads;
    int64_t rows = mixpi_min(MIXPI_QUERIES, h->t - q0);
    int64_t reach = mixpi_keys_until(k, head, q0 + rows) - k0;
    int64_t first = MIXPI_KEYS;     /* keys row 0 may see */
    int     mask;

    /* Does a query of the block see a key of the block? */
    if (k->causal) first = q0 + mixpi_keys_before(k) - k0 + 1;
    reach = mixpi_min(reach, MIXPI_KEYS);
    if (reach <= 0) return 0;

    m->rows = rows;
    m->first = first;
    m->at.head = head;
    m->at.query = q0;
    m->at.key = k0;
    m->at.n = reach;
    mask = mixpi_mask_does(&job->masks, m->at, rows);
    m->at.masked = mask == MIXPI_MASK_ADDS;
    return mask != MIXPI_MASK_HIDES;
}

/* Backward of a block of queries, which is `row` floats into the room's rows, and a block of keys:
 * adds to dq, dk and dv. */
MIXPI_K void MIXPI_P(attention_met)(const mixpi_attention_grad_job *job,
                                    const mixpi_attention_grad_room *room,
                                    const mixpi_met_block *m, int64_t row) {
    const mixpi_heads *h = &job->heads;
    const int64_t rows = m->rows, reach = m->at.n, n = (reach + 15) / 16 * 16;
    const float *q = room->q + row, *dy = room->dy + row;
    MIXPI_P(scores)
    (h, rows, n, job->k->forward.scale, room->score_q + row, room->k_columns, room->p);
    MIXPI_P(scores)(h, rows, n, 1.0f, room->score_dy + row, room->v_columns, room->g);

    /* Weights and score gradients, then the three products that read them. */
    MIXPI_P(block_grads)(job, room, m->at, rows, m->first);
    if (room->share.for_queries)
        MIXPI_P(add_by_queries)(h, rows, reach, room->g, room->k, room->dq + row);
    if (!room->share.for_keys) return;
    MIXPI_P(add_by_keys)(h, rows, reach, room->p, dy, room->dv);
    MIXPI_P(add_by_keys)(h, rows, reach, room->g, q, room->dk);
}

/* attention_met for the block of queries from q0 on and the block of keys from k0 on. */
MIXPI_K void MIXPI_P(attention_meet)(const mixpi_attention_grad_job *job,
                                     const mixpi_attention_grad_room *room, int64_t head,
                                     int64_t k0, int64_t q0) {
    const mixpi_heads *h = &job->heads;
    mixpi_met_block m;
    if (!MIXPI_P(blocks_meet)(job, head, k0, q0, &m)) return;
    MIXPI_P(attention_met)(job, room, &m, (head % h->group * h->t + q0) * h->wide);
}

/* Backward of one block of keys against all queries of the task's share. */
MIXPI_K void MIXPI_P(attention_keys)(const mixpi_attention_grad_job *job,
                                     const mixpi_attention_grad_room *room, int64_t k0) {
    const mixp_attention_args *k = &job->k->forward;
    const mixpi_heads *h = &job->heads;
    const mixpi_grad_share *s = &room->share;
    const int64_t head = s->head;
    mixpi_head at_k = mixpi_head_met(&k->k_at, h, head);
    mixpi_head at_v = mixpi_head_met(&k->v_at, h, head);
    int64_t keys = mixpi_min(MIXPI_KEYS, h->keys - k0), g, q0;
    size_t  bytes = (size_t)(MIXPI_KEYS * h->wide) * sizeof(float);

    /* Keys and values as columns. */
    MIXPI_P(score_rows)(h, k->v, at_v, k0, keys, MIXPI_KEYS, room->k);
    MIXPI_P(columns_of)(h, room->k, room->v_columns);
    MIXPI_P(score_rows)(h, k->k, at_k, k0, keys, MIXPI_KEYS, room->k);
    MIXPI_P(columns_of)(h, room->k, room->k_columns);
    if (h->pairs) MIXPI_P(head_rows)(h, k->k, at_k, k0, keys, MIXPI_KEYS, room->k);

    /* Every block of queries adds to both gradients. */
    memset(room->dk, 0, bytes);
    memset(room->dv, 0, bytes);
    for (g = 0; g < h->group; g++)
        for (q0 = mixpi_first_queries(k, k0, s->q0); q0 < s->q_end; q0 += MIXPI_QUERIES)
            MIXPI_P(attention_meet)(job, room, head + g, k0, q0);

    if (!s->for_keys) return;
    if (job->k->dk.data) MIXPI_P(head_put)(h, job->k->dk, at_k, k0, keys, room->dk);
    if (job->k->dv.data) MIXPI_P(head_put)(h, job->k->dv, at_v, k0, keys, room->dv);
}

/* Loads q and dy of the share's queries of one head into its part of the group's rows, clears their
 * dq, computes their delta. */
MIXPI_K void MIXPI_P(attention_load)(const mixpi_attention_grad_job *job,
                                     const mixpi_attention_grad_room *room,
                                     int64_t head) {
    const mixp_attention_args *k = &job->k->forward;
    const mixpi_heads *h = &job->heads;
    mixp_in dy = job->k->dy;
    mixpi_head at_q = mixpi_head_at(&k->q_at, h, head),
               at_y = mixpi_head_merged(h, head);
    int64_t q0 = room->share.q0, n = room->share.q_end - q0;
    int64_t first = head % h->group * h->t + q0, row = first * h->wide;
    MIXPI_P(head_rows)(h, k->q, at_q, q0, n, n, room->q + row);
    MIXPI_P(head_rows)(h, dy, at_y, q0, n, n, room->dy + row);
    if (h->pairs) {
        MIXPI_P(score_rows)(h, k->q, at_q, q0, n, n, room->score_q + row);
        MIXPI_P(score_rows)(h, dy, at_y, q0, n, n, room->score_dy + row);
    }
    memset(room->dq + row, 0, (size_t)(n * h->wide) * sizeof(float));
    MIXPI_P(attention_deltas)(job, head, q0, n, room->dy + row, room->k, room->delta + first);
}

/* The backward task: a share of one head of k and v, with all heads of q that use it. */
MIXPI_K void MIXPI_P(attention_grad_task)(void *arg, int64_t index, int worker) {
    const mixpi_attention_grad_job *job = (const mixpi_attention_grad_job *)arg;
    const mixp_attention_args *k = &job->k->forward;
    const mixpi_heads *h = &job->heads;
    const mixpi_grad_share s = mixpi_grad_share_of(job, index);
    mixpi_attention_grad_room room;
    int64_t g, k0;
    (void)mixpi_attention_grad_carve(&room, h, mixpi_slice(&job->slices, worker));
    room.share = s;
    for (g = 0; g < h->group; g++) MIXPI_P(attention_load)(job, &room, s.head + g);
    for (k0 = s.k0; k0 < s.k_end; k0 += MIXPI_KEYS) MIXPI_P(attention_keys)(job, &room, k0);
    for (g = 0; s.for_queries && job->k->dq.data && g < h->group; g++)
        MIXPI_P(head_put)(h, job->k->dq, mixpi_head_at(&k->q_at, h, s.head + g), s.q0,
                          s.q_end - s.q0, room.dq + (g * h->t + s.q0) * h->wide);
}

/* Attention and its backward pass as a set computes them. */
#define MIXPI_ATTENTION(name, set)                                                        \
    MIXPI_K mixp_result MIXPI_P(name)(const mixp_exec *x, const mixp_attention_args *k)   \
    { return mixpi_cpu_attention(x, k, &MIXPI_P(set)); }
#define MIXPI_ATTENTION_BACKWARD(name, set)                                               \
    MIXPI_K mixp_result MIXPI_P(name)(const mixp_exec *x,                                 \
                                      const mixp_attention_backward_args *k)              \
    { return mixpi_cpu_attention_backward(x, k, &MIXPI_P(set)); }
static const mixpi_attention_set MIXPI_P(attention_set) = {
    { MIXPI_FLOATS, MIXPI_FLOATS }, MIXPI_NO_TILES, MIXPI_SUM_LANES,
    MIXPI_P(attention_task), MIXPI_P(attention_grad_task)
};
MIXPI_ATTENTION(attention, attention_set)
MIXPI_ATTENTION_BACKWARD(attention_backward, attention_set)

/* gemm, attention and its backward with pairs, for a separate table. */
#define MIXPI_WITH_PAIRS(name, for_bf16, for_f16)                                         \
    static const mixpi_pairs MIXPI_P(name) = { for_bf16, for_f16 };                       \
    static const mixpi_attention_set MIXPI_P(attention_set_##name) = {                    \
        { for_bf16, for_f16 }, MIXPI_NO_TILES, MIXPI_SUM_LANES,                                   \
        MIXPI_P(attention_task), MIXPI_P(attention_grad_task)                             \
    };                                                                                    \
    MIXPI_K mixp_result MIXPI_P(gemm_##name)(const mixp_exec *x, const mixp_gemm_args *g) \
    { return mixpi_cpu_gemm(x, g, MIXPI_P(name), &MIXPI_P(gemm_shape), NULL); }           \
    MIXPI_ATTENTION(attention_##name, attention_set_##name)                               \
    MIXPI_ATTENTION_BACKWARD(attention_backward_##name, attention_set_##name)
#if MIXPI_PASS == 2 && MIXPI_BF16
MIXPI_WITH_PAIRS(bf16, MIXPI_PAIRS_BF16, MIXPI_FLOATS)
#endif
#if MIXPI_PASS == 3 && MIXPI_ARM_PAIRS
MIXPI_WITH_PAIRS(f16, MIXPI_FLOATS, MIXPI_PAIRS_F16)
MIXPI_WITH_PAIRS(bf16, MIXPI_PAIRS_BF16, MIXPI_PAIRS_F16)
#endif
#undef MIXPI_WITH_PAIRS

