/* ranking.h - learning to rank: documents of a query, best first. Its loss is the likelihood of the right
 * order (ListMLE, Xia et al., 2008) by sort, flip and cumsum, and that of each pair (RankNet), discounted
 * by the place of the better one. Queries whose best document leads already weigh half.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
enum { RANKING_QUERIES = FIT(6), RANKING_DOCS = 7, RANKING_IN = FIT(6), RANKING_WIDTH = FIT(16) };

typedef struct ranking {
    mixp_tensor *in, *bias, *out;
    float        x[RANKING_QUERIES * RANKING_DOCS * RANKING_IN], grade[RANKING_QUERIES * RANKING_DOCS];
    int32_t      place[RANKING_DOCS];
} ranking;

static void ranking_open(session *s) {
    ranking *m = (ranking *)s->model;
    m->in = matrix(s, "in.w", RANKING_WIDTH, RANKING_IN, 0.4);
    m->bias = vector(s, "in.b", RANKING_WIDTH, 0);
    m->out = matrix(s, "out", 1, RANKING_WIDTH, 0.3);
    for (int i = 0; i < RANKING_DOCS; i++) m->place[i] = i + 1;
}

static void ranking_batch(session *s) {
    ranking *m = (ranking *)s->model;
    for (int i = 0; i < RANKING_QUERIES * RANKING_DOCS; i++) {
        float *x = m->x + i * RANKING_IN;
        for (int j = 0; j < RANKING_IN; j++) x[j] = normal(s);
        m->grade[i] = floorf(2.0f + x[0] - x[1] + 0.5f * x[2] * x[2]);
    }
}

/* The documents with the highest grades first. */
static mixp_tensor *ranking_list(session *s, mixp_tensor *score, mixp_tensor *order) {
    mixp_context *c = s->ctx;
    score = mixp_gather(c, score, 1, order);
    mixp_tensor *rest = mixp_exp(c, mixp_sub(c, score, mixp_detach(c, mixp_max(c, score, 1, 1))));
    rest = mixp_flip(c, mixp_cumsum(c, mixp_flip(c, rest, 1), 1), 1);
    rest = mixp_add(c, mixp_log(c, rest), mixp_detach(c, mixp_max(c, score, 1, 1)));
    return mixp_mean(c, mixp_sub(c, rest, score), 1, 0);
}

static mixp_tensor *ranking_pairs(session *s, mixp_tensor *score, mixp_tensor *grade) {
    ranking      *m = (ranking *)s->model;
    mixp_context *c = s->ctx;
    mixp_tensor  *better = mixp_gt(c, mixp_unsqueeze(c, grade, 2), mixp_unsqueeze(c, grade, 1)), *gap, *place;
    gap = mixp_sub(c, mixp_unsqueeze(c, score, 2), mixp_unsqueeze(c, score, 1));
    gap = mixp_softplus(c, mixp_neg(c, gap), 1);
    place = mixp_cast(c, ints(s, m->place, 1, RANKING_DOCS), MIXP_F32);
    place = mixp_unsqueeze(c, mixp_reciprocal(c, mixp_log1p(c, place)), 2);
    gap = mixp_mul(c, mixp_mul(c, gap, mixp_cast(c, better, MIXP_F32)), place);
    return mixp_mean(c, mixp_sum(c, gap, -1, 0), 1, 0);
}

static mixp_tensor *ranking_loss(session *s, int turn, int training) {
    ranking      *m = (ranking *)s->model;
    mixp_context *c = s->ctx;
    mixp_tensor  *x = floats(s, m->x, RANKING_QUERIES, RANKING_DOCS, RANKING_IN), *order, *score, *weight;
    mixp_tensor  *grade = floats(s, m->grade, RANKING_QUERIES, RANKING_DOCS, 0);
    (void)turn, (void)training;
    score = mixp_tanh(c, mixp_linear(c, x, m->in, m->bias));
    score = mixp_squeeze(c, mixp_linear(c, score, m->out, NULL), -1);
    mixp_sort(c, grade, -1, 1, &order);
    weight = mixp_eq(c, mixp_argmax(c, score, 1, 0), mixp_argmax(c, grade, 1, 0));
    weight = mixp_rsub(c, mixp_scale(c, mixp_cast(c, weight, MIXP_F32), 0.5f), 1);
    score = mixp_add(c, ranking_list(s, score, order), ranking_pairs(s, score, grade));
    return mixp_mean(c, mixp_mul(c, score, weight), MIXP_ALL, 0);
}
