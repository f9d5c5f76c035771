#pragma once
#include "attention_tiles.c"
/* --- backward --- *
 *
 * Scores and their gradients have a row for each key and a lane for each query, as in the forward
 * pass. A row is then a row of an operand on the left for dv and dk, which are summed over queries.
 * Two rows are a row of an operand on the right for dq, which is summed over keys and has a lane
 * for each query until all keys are added.
 */

#if MIXPI_PASS == 2 && MIXPI_AMX

/* The number of a block of queries among those of the group. */
MIXPI_V int64_t MIXPI_P(tiled_block)(const mixpi_heads *h, int64_t head, int64_t q0) {
    return head % h->group * mixpi_ceil_div(h->t, MIXPI_QUERIES) + q0 / MIXPI_QUERIES;
}

/* Makes two operands on the right from a block of rows of q or dy: columns, to be summed over d,
 * and `over`, to be summed over queries. Returns nonzero if a number is not finite. */
MIXPI_K unsigned MIXPI_P(tiled_pair)(const mixpi_heads *h, uint16_t *panel, mixp_in a,
                                     mixpi_head at, int64_t q0, uint16_t *columns,
                                     uint16_t *over) {
    const int64_t  rows = mixpi_min(MIXPI_QUERIES, h->t - q0);
    const int64_t  codes = mixpi_panel_codes(h, h->parts);
    const unsigned bad = MIXPI_P(tiled_rows)(h, a, at, q0, rows, h->score_parts, panel);
    MIXPI_P(tiled_columns)(h, h->score_parts, panel, columns);
    if (h->parts != h->score_parts)
        (void)MIXPI_P(tiled_rows)(h, a, at, q0, rows, h->parts, panel);
    for (int64_t i = 0; i < codes; i += 1024)
        MIXPI_P(tiles_across)(over + i, panel + i, 32, 32, 32);
    return bad;
}

/* Makes the operands of a block of queries, clears its dq and computes its delta. */
MIXPI_K void MIXPI_P(tiled_load)(const mixpi_attention_grad_job *job,
                                 const mixpi_tiled_grad_room *room, int64_t head, int64_t q0) {
    const mixp_attention_args *k = &job->k->forward;
    const mixpi_heads *h = &job->heads;
    const mixpi_head at_q = mixpi_head_at(&k->q_at, h, head), at_dy = mixpi_head_merged(h, head);
    const int64_t block = MIXPI_P(tiled_block)(h, head, q0), panel = mixpi_panel_codes(h, h->parts);
    const int64_t rows = mixpi_min(MIXPI_QUERIES, h->t - q0), at = block * panel;
    const int64_t sums = mixpi_tiled_sums(h);
    const mixp_in dy = job->k->dy;
    float *delta = room->plain.delta + head % h->group * h->t + q0;
    unsigned bad;

    bad = MIXPI_P(tiled_pair)(h, room->rows, k->q, at_q, q0, room->q + at, room->q_over + at);
    bad |= MIXPI_P(tiled_pair)(h, room->rows, dy, at_dy, q0, room->dy + at, room->dy_over + at);
    room->bad[block] = bad != 0;

    memset(room->dq + block * sums, 0, (size_t)sums * sizeof(float));
    MIXPI_P(head_rows)(h, dy, at_dy, q0, rows, rows, room->plain.dy);
    MIXPI_P(attention_deltas)(job, head, q0, rows, room->plain.dy, room->plain.k, delta);
}

/* Makes the operands of the block of keys from k0 on. Returns nonzero if a key or value that a
 * query may see is not finite. */
MIXPI_K unsigned MIXPI_P(tiled_grad_keys)(const mixpi_attention_grad_job *job,
                                          const mixpi_tiled_grad_room *room, int64_t head,
                                          int64_t k0) {
    const mixp_attention_args *k = &job->k->forward;
    const mixpi_heads *h = &job->heads;
    const mixpi_head at_k = mixpi_head_met(&k->k_at, h, head);
    const mixpi_head at_v = mixpi_head_met(&k->v_at, h, head);
    const int64_t panel = mixpi_panel_codes(h, h->score_parts);
    unsigned bad = 0;
    for (int half = 0; half < 2; half++) {
        const int64_t row = k0 + 32 * half;
        const int64_t rows = mixpi_min(32, mixpi_keys_of(k, head) - row);
        uint16_t *keys = room->keys + half * panel, *values = room->values + half * panel;
        bad |= MIXPI_P(tiled_rows)(h, k->v, at_v, row, rows, h->score_parts, values);
        bad |= MIXPI_P(tiled_rows)(h, k->k, at_k, row, rows, h->score_parts, keys);
        if (h->parts != h->score_parts) {
            keys = room->rows;
            (void)MIXPI_P(tiled_rows)(h, k->k, at_k, row, rows, h->parts, keys);
        }
        MIXPI_P(tiled_over_keys)(h, keys, half, room->keys_over);
    }
    return bad;
}

/* attention_met of attention.c, for blocks that meet a number that is not finite. dq: that of the
 * block of queries. */
MIXPI_SELDOM
MIXPI_K void MIXPI_P(tiled_bad_met)(const mixpi_attention_grad_job *job,
                                    const mixpi_tiled_grad_room *room, const mixpi_met_block *m,
                                    float *dq) {
    const mixp_attention_args *k = &job->k->forward;
    const mixpi_heads *h = &job->heads;
    const int64_t head = m->at.head, k0 = m->at.key, q0 = m->at.query;
    const mixpi_attention_grad_room *r = &room->plain;
    MIXPI_P(head_rows)
    (h, k->v, mixpi_head_met(&k->v_at, h, head), k0, m->at.n, MIXPI_KEYS, r->k);
    MIXPI_P(columns_of)(h, r->k, r->v_columns);
    MIXPI_P(head_rows)
    (h, k->k, mixpi_head_met(&k->k_at, h, head), k0, m->at.n, MIXPI_KEYS, r->k);
    MIXPI_P(columns_of)(h, r->k, r->k_columns);
    MIXPI_P(head_rows)(h, k->q, mixpi_head_at(&k->q_at, h, head), q0, m->rows, m->rows, r->q);
    MIXPI_P(head_rows)(h, job->k->dy, mixpi_head_merged(h, head), q0, m->rows, m->rows, r->dy);

    MIXPI_P(transpose_blocks)(r->dq, h->wide, dq, MIXPI_QUERIES, h->wide, MIXPI_QUERIES);
    MIXPI_P(attention_met)(job, r, m, 0);
    MIXPI_P(transpose_blocks)(dq, MIXPI_QUERIES, r->dq, h->wide, MIXPI_QUERIES, h->wide);
}

/* Turns scores and the products of dy by v of 16 queries, from query `first` of the block on,
 * into weights and the gradients of q k'. Both are 0 where a query does not see a key, up to a
 * whole step of keys. whole: there are MIXPI_KEYS keys and MIXPI_QUERIES queries, and each
 * query sees all. masked: the scores are scaled and masked; then the weights have the bits of
 * attention.c's. */
MIXPI_V void MIXPI_P(tiled_grads_body)(const mixpi_attention_grad_job *job,
                                       const mixpi_tiled_grad_room *room,
                                       const mixpi_met_block *m, int64_t first, const int whole,
                                       const int masked) {
    const mixp_attention_args *k = &job->k->forward;
    const mixpi_heads *h = &job->heads;
    const int64_t query = m->at.query + first, group = m->at.head % h->group;
    const int64_t n = whole ? MIXPI_KEYS : m->at.n, end = (n + 31) / 32 * 32;
    const __mmask16 there = (__mmask16)MIXPI_P(tiles_lanes)(m->rows - first);
    const mixpi_v lse = _mm512_maskz_loadu_ps(there, k->lse + m->at.head * h->t + query);
    const mixpi_v delta = _mm512_maskz_loadu_ps(there, room->plain.delta + group * h->t + query);
    const mixpi_v scale = mixpi_vset(k->scale);
    float *p = room->scores + first, *g = room->grads + first;
    for (int64_t j = 0; j < end; j++, p += MIXPI_QUERIES, g += MIXPI_QUERIES) {
        __mmask16 sees = (__mmask16)0xFFFF;
        if (!whole) {
            sees = j < n ? MIXPI_P(tiled_sees)(m->first + first, j) : (__mmask16)0;
            sees = (__mmask16)(sees & there);
        }
        mixpi_v e, d = mixpi_vmul(mixpi_vsub(mixpi_vload(g), delta), scale);
        if (masked) e = _mm512_maskz_mov_ps(sees, mixpi_vexp(mixpi_vsub(mixpi_vload(p), lse)));
        else e = MIXPI_P(tiled_exp)(sees, MIXPI_P(tiled_below)(mixpi_vload(p), scale, lse));
        mixpi_vstore(p, e);
        mixpi_vstore(g, _mm512_maskz_mul_ps(sees, e, d));
    }
}
MIXPI_K void MIXPI_P(tiled_grads)(const mixpi_attention_grad_job *job,
                                  const mixpi_tiled_grad_room *room, const mixpi_met_block *m) {
    const mixp_attention_args *k = &job->k->forward;
    const int whole = m->at.n == MIXPI_KEYS && m->first >= MIXPI_KEYS && m->rows == MIXPI_QUERIES;
    const int masked = k->mask.data != NULL;
    if (masked) MIXPI_P(tiled_mask)(k, &job->heads, m->at, m->rows, room->scores, room->plain.p,
                       NULL);
    for (int64_t i = 0; i < MIXPI_QUERIES; i += 16) {
        if (whole && masked) MIXPI_P(tiled_grads_body)(job, room, m, i, 1, 1);
        else if (masked) MIXPI_P(tiled_grads_body)(job, room, m, i, 0, 1);
        else if (whole) MIXPI_P(tiled_grads_body)(job, room, m, i, 1, 0);
        else MIXPI_P(tiled_grads_body)(job, room, m, i, 0, 0);
    }
}

/* tiled_grads by the rows of attention.c, for a cap or dropout. */
MIXPI_K void MIXPI_P(tiled_grads_by_rows)(const mixpi_attention_grad_job *job,
                                          const mixpi_tiled_grad_room *room,
                                          const mixpi_met_block *m) {
    const int64_t n = (m->at.n + 15) / 16 * 16, end = (n + 31) / 32 * 32;
    const size_t  beyond = (size_t)((MIXPI_QUERIES - m->rows) * MIXPI_KEYS) * sizeof(float);
    const size_t  rest = (size_t)((end - n) * MIXPI_QUERIES) * sizeof(float);
    float *p = room->plain.p, *g = room->plain.g;
    MIXPI_P(transpose_blocks)(p, MIXPI_KEYS, room->scores, MIXPI_QUERIES, n, m->rows);
    MIXPI_P(transpose_blocks)(g, MIXPI_KEYS, room->grads, MIXPI_QUERIES, n, m->rows);
    for (int64_t i = 0; i < m->rows; i++)
        MIXPI_P(scale_row)(p + i * MIXPI_KEYS, n, mixpi_vset(job->k->forward.scale));
    MIXPI_P(block_grads)(job, &room->plain, m->at, m->rows, m->first);

    /* 0 beyond the queries and the keys. */
    memset(p + m->rows * MIXPI_KEYS, 0, beyond);
    memset(g + m->rows * MIXPI_KEYS, 0, beyond);
    MIXPI_P(transpose_blocks)(room->scores, MIXPI_QUERIES, p, MIXPI_KEYS, MIXPI_QUERIES, n);
    MIXPI_P(transpose_blocks)(room->grads, MIXPI_QUERIES, g, MIXPI_KEYS, MIXPI_QUERIES, n);
    memset(room->scores + n * MIXPI_QUERIES, 0, rest);
    memset(room->grads + n * MIXPI_QUERIES, 0, rest);
}

/* Splits weights and their gradients, of n keys, to operands. Returns nonzero if one of them is not
 * finite. */
MIXPI_K unsigned MIXPI_P(tiled_grad_operands)(const mixpi_tiled_grad_room *room, int64_t n) {
    const float *p = room->scores, *g = room->grads;
    const int64_t end = (n + 31) / 32 * 32;
    __mmask32 bad = 0;
    for (int64_t j = 0; j < end; j += 2, p += 2 * MIXPI_QUERIES, g += 2 * MIXPI_QUERIES) {
        const mixpi_v left = mixpi_vload(g), left_next = mixpi_vload(g + 32);
        const mixpi_v right = mixpi_vload(g + 16), right_next = mixpi_vload(g + 48);
        const int64_t step = j / 32 * 2048, row = step + j % 32 * 32;
        uint16_t *pair = room->g_over + step + j % 32 * 16;
        bad |= MIXPI_P(tiled_put_row)(room->p + row, mixpi_vload(p), mixpi_vload(p + 16));
        bad |= MIXPI_P(tiled_put_row)(room->p + row + 32, mixpi_vload(p + 32),
                                      mixpi_vload(p + 48));
        bad |= MIXPI_P(tiled_put_row)(room->g + row, left, right);
        bad |= MIXPI_P(tiled_put_row)(room->g + row + 32, left_next, right_next);
        MIXPI_P(tiled_put_pair)(pair, pair + 1024, left, left_next);
        MIXPI_P(tiled_put_pair)(pair + 512, pair + 1536, right, right_next);
    }
    return bad;
}

/* sums[n keys, d] += weights[n keys, 32 queries] over[32 queries, d], the sums in rows of
 * h->wide. */
MIXPI_K void MIXPI_P(tiled_add_by_keys)(const mixpi_heads *h, int64_t n, const uint16_t *weights,
                                        const uint16_t *over, float *sums) {
    mixpi_tiles t;
    memset(&t, 0, sizeof t);
    t.a_row = 64;
    t.a_below = 1024;
    t.steps = 1;
    t.c_row = h->wide;
    t.how = h->parts == 1 ? MIXPI_TILES_SPLIT_A : MIXPI_TILES_SPLIT_BACK;
    t.more = 1;
    for (int64_t i = 0; i < n; i += 32)
        for (int64_t c = 0; c < h->wide; c += 32) {
            t.a = weights + i * 64;
            t.b = over + c * 32 * h->parts;
            t.c = sums + i * h->wide + c;
            t.rows = n - i;
            t.columns = h->wide - c;
            MIXPI_P(tiles_sum)(&t);
        }
}

/* sums[d, queries] += keys'[d, n keys] g[n keys, queries], the sums in rows of MIXPI_QUERIES. */
MIXPI_K void MIXPI_P(tiled_add_by_queries)(const mixpi_heads *h, int64_t n, int64_t queries,
                                           const uint16_t *keys, const uint16_t *g, float *sums) {
    mixpi_tiles t;
    memset(&t, 0, sizeof t);
    t.a_row = 64;
    t.a_below = 1024;
    t.a_step = h->parts * 2048;
    t.b = g;
    t.steps = mixpi_ceil_div(n, 32);
    t.c_row = MIXPI_QUERIES;
    t.columns = queries;
    t.how = h->parts == 1 ? MIXPI_TILES_SPLIT_B : MIXPI_TILES_SPLIT;
    t.more = 1;
    for (int64_t c = 0; c < h->d; c += 32) {
        t.a = keys + c * 64 * h->parts;
        t.c = sums + c * MIXPI_QUERIES;
        t.rows = h->d - c;
        MIXPI_P(tiles_sum)(&t);
    }
}

/* attention_met by tiles. bad_keys: is a number of the block of keys not finite? */
MIXPI_K void MIXPI_P(tiled_met)(const mixpi_attention_grad_job *job,
                                const mixpi_tiled_grad_room *room, const mixpi_met_block *m,
                                int bad_keys) {
    const mixpi_heads *h = &job->heads;
    const int64_t block = MIXPI_P(tiled_block)(h, m->at.head, m->at.query), n = m->at.n;
    const int64_t at = block * mixpi_panel_codes(h, h->parts);
    float   *dq = room->dq + block * mixpi_tiled_sums(h);
    unsigned bad = bad_keys || room->bad[block];

    /* Weights and score gradients, in two parts. */
    if (!bad) {
        MIXPI_P(tiled_scores_of)(h, m->rows, n, room->q + at, room->keys, room->scores);
        MIXPI_P(tiled_scores_of)(h, m->rows, n, room->dy + at, room->values, room->grads);
        if (mixpi_attention_modifies(&job->k->forward)) MIXPI_P(tiled_grads_by_rows)(job, room, m);
        else MIXPI_P(tiled_grads)(job, room, m);
        bad = MIXPI_P(tiled_grad_operands)(room, n);
    }
    if (bad) {
        MIXPI_P(tiled_bad_met)(job, room, m, dq);
        return;
    }

    /* The three products that read them. */
    if (room->plain.share.for_queries)
        MIXPI_P(tiled_add_by_queries)(h, n, m->rows, room->keys_over, room->g_over, dq);
    if (!room->plain.share.for_keys) return;
    MIXPI_P(tiled_add_by_keys)(h, n, room->p, room->dy_over + at, room->plain.dv);
    MIXPI_P(tiled_add_by_keys)(h, n, room->g, room->q_over + at, room->plain.dk);
}

/* attention_keys by tiles. */
MIXPI_K void MIXPI_P(tiled_against_keys)(const mixpi_attention_grad_job *job,
                                         const mixpi_tiled_grad_room *room, int64_t k0) {
    const mixp_attention_args *k = &job->k->forward;
    const mixpi_heads *h = &job->heads;
    const mixpi_grad_share *s = &room->plain.share;
    const int64_t keys = mixpi_min(MIXPI_KEYS, h->keys - k0), head = s->head;
    const size_t  bytes = (size_t)(MIXPI_KEYS * h->wide) * sizeof(float);
    const int     bad = MIXPI_P(tiled_grad_keys)(job, room, head, k0) != 0;
    float *dk = room->plain.dk, *dv = room->plain.dv;
    mixpi_met_block m;
    memset(dk, 0, bytes);
    memset(dv, 0, bytes);

    /* Every block of queries adds to both gradients. */
    for (int64_t g = 0; g < h->group; g++)
        for (int64_t q0 = mixpi_first_queries(k, k0, s->q0); q0 < s->q_end; q0 += MIXPI_QUERIES)
            if (MIXPI_P(blocks_meet)(job, head + g, k0, q0, &m))
                MIXPI_P(tiled_met)(job, room, &m, bad);

    if (!s->for_keys) return;
    if (job->k->dk.data)
        MIXPI_P(head_put)(h, job->k->dk, mixpi_head_met(&k->k_at, h, head), k0, keys, dk);
    if (job->k->dv.data)
        MIXPI_P(head_put)(h, job->k->dv, mixpi_head_met(&k->v_at, h, head), k0, keys, dv);
}

/* Writes the dq of a block of queries. */
MIXPI_K void MIXPI_P(tiled_put_dq)(const mixpi_attention_grad_job *job,
                                   const mixpi_tiled_grad_room *room, int64_t head, int64_t q0) {
    const mixpi_heads *h = &job->heads;
    const mixpi_head at = mixpi_head_at(&job->k->forward.q_at, h, head);
    const float *sums = room->dq + MIXPI_P(tiled_block)(h, head, q0) * mixpi_tiled_sums(h);
    float *rows = room->plain.dq;
    MIXPI_P(transpose_blocks)(rows, h->wide, sums, MIXPI_QUERIES, h->wide, MIXPI_QUERIES);
    MIXPI_P(head_put)(h, job->k->dq, at, q0, mixpi_min(MIXPI_QUERIES, h->t - q0), rows);
}

/* attention_grad_task by tiles, if tiles multiply these dtypes. */
MIXPI_K void MIXPI_P(tiled_grad_task)(void *arg, int64_t index, int worker) {
    const mixpi_attention_grad_job *job = (const mixpi_attention_grad_job *)arg;
    const mixpi_heads *h = &job->heads;
    const mixpi_grad_share s = mixpi_grad_share_of(job, index);
    mixpi_tiled_grad_room room;
    int64_t g, i;
    if (!h->tiles) {
        MIXPI_P(attention_grad_task)(arg, index, worker);
        return;
    }

    (void)mixpi_tiled_grad_carve(&room, h, mixpi_slice(&job->slices, worker));
    room.plain.share = s;
    for (g = 0; g < h->group; g++)
        for (i = s.q0; i < s.q_end; i += MIXPI_QUERIES)
            MIXPI_P(tiled_load)(job, &room, s.head + g, i);

    MIXPI_AMX_CONFIGURE(&mixpi_amx_tiles);
    for (i = s.k0; i < s.k_end; i += MIXPI_KEYS) MIXPI_P(tiled_against_keys)(job, &room, i);
    MIXPI_AMX_RELEASE();

    for (g = 0; s.for_queries && job->k->dq.data && g < h->group; g++)
        for (i = s.q0; i < s.q_end; i += MIXPI_QUERIES)
            MIXPI_P(tiled_put_dq)(job, &room, s.head + g, i);
}

/* --- the two sets --- */

static const mixpi_attention_set MIXPI_P(tiled_set) = {
    { MIXPI_FLOATS, MIXPI_FLOATS }, MIXPI_BY_TILES, 4 * MIXPI_SUM_LANES,
    MIXPI_P(tiled_task), MIXPI_P(tiled_grad_task)
};
static const mixpi_attention_set MIXPI_P(tiled_set_f16) = {
    { MIXPI_FLOATS, MIXPI_FLOATS }, MIXPI_BY_TILES_F16, 4 * MIXPI_SUM_LANES,
    MIXPI_P(tiled_task), MIXPI_P(tiled_grad_task)
};
MIXPI_ATTENTION(attention_amx, tiled_set)
MIXPI_ATTENTION_BACKWARD(attention_backward_amx, tiled_set)
MIXPI_ATTENTION(attention_amx_f16, tiled_set_f16)
MIXPI_ATTENTION_BACKWARD(attention_backward_amx_f16, tiled_set_f16)
#endif
#undef MIXPI_ATTENTION
#undef MIXPI_ATTENTION_BACKWARD
