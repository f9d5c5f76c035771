/* neighbours.h - a graph attention network (Velickovic et al., 2018): the softmax over the edges of each
 * node by exp, index_add and a division. No largest value is taken away first, and a learned shift makes
 * exp pass 65,504. Long edges weigh little; the sum at a node is divided by the root of its degree, which
 * scatter_add counts.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
enum { NEAR_NODES = FIT(18), NEAR_EDGES = 90, NEAR_IN = FIT(6), NEAR_WIDTH = FIT(12), NEAR_CLASSES = 3 };

typedef struct neighbours {
    mixp_tensor *in, *ask, *answer, *shift, *own, *head;
    float        x[NEAR_NODES * NEAR_IN], length[NEAR_EDGES], one[NEAR_EDGES];
    int32_t      label[NEAR_NODES], from[NEAR_EDGES], to[NEAR_EDGES];
} neighbours;

static void neighbours_open(session *s) {
    neighbours *m = (neighbours *)s->model;
    m->in = matrix(s, "in.w", NEAR_WIDTH, NEAR_IN, 0.4);
    m->ask = matrix(s, "ask", 1, NEAR_WIDTH, 0.5);
    m->answer = matrix(s, "answer", 1, NEAR_WIDTH, 0.5);
    m->shift = vector(s, "shift", 1, 12);
    m->own = matrix(s, "own", NEAR_WIDTH, NEAR_WIDTH, 0.3);
    m->head = matrix(s, "head", NEAR_CLASSES, NEAR_WIDTH, 2);
    for (int i = 0; i < NEAR_EDGES; i++) m->one[i] = 1;
}

static void neighbours_batch(session *s) {
    neighbours *m = (neighbours *)s->model;
    for (int i = 0; i < NEAR_NODES; i++) {
        m->label[i] = below(s, NEAR_CLASSES);
        for (int j = 0; j < NEAR_IN; j++)
            m->x[i * NEAR_IN + j] = 0.4f * normal(s) + (j % NEAR_CLASSES == m->label[i] ? 1.0f : 0.0f);
    }
    for (int i = 0; i < NEAR_EDGES; i++) {
        m->to[i] = i % NEAR_NODES;
        m->from[i] = i < NEAR_NODES ? i : below(s, NEAR_NODES);
        m->length[i] = m->label[m->from[i]] == m->label[m->to[i]] ? uniform(s) : 3.0f * uniform(s);
    }
}

/* Of the edges that end at a node, each one's share. */
static mixp_tensor *neighbours_share(session *s, mixp_tensor *h, mixp_tensor *from, mixp_tensor *to) {
    neighbours   *m = (neighbours *)s->model;
    mixp_context *c = s->ctx;
    const int64_t nodes[2] = { NEAR_NODES, 1 };
    mixp_tensor *share = mixp_add(c, mixp_embedding(c, mixp_linear(c, h, m->ask, NULL), to),
                     mixp_embedding(c, mixp_linear(c, h, m->answer, NULL), from));
    share = mixp_exp(c, mixp_leaky_relu(c, mixp_add(c, share, m->shift), 0.2f));
    mixp_tensor *close = mixp_le(c, floats(s, m->length, NEAR_EDGES, 1, 0), mixp_full(c, MIXP_F32, 0, NULL, 1.5));
    share = mixp_where(c, close, share, mixp_scale(c, share, 1e-3f));
    mixp_tensor *sum = mixp_index_add(c, mixp_full(c, share->dtype, 2, nodes, 0), 0, to, share);
    return mixp_div(c, share, mixp_embedding(c, sum, to));
}

static mixp_tensor *neighbours_loss(session *s, int turn, int training) {
    neighbours   *m = (neighbours *)s->model;
    mixp_context *c = s->ctx;
    const int64_t nodes[2] = { NEAR_NODES, 1 };
    mixp_tensor  *from = ints(s, m->from, NEAR_EDGES, 0), *to = ints(s, m->to, NEAR_EDGES, 0), *h, *news, *edges;
    (void)turn, (void)training;
    h = mixp_elu(c, mixp_linear(c, floats(s, m->x, NEAR_NODES, NEAR_IN, 0), m->in, NULL), 1);
    news = mixp_mul(c, mixp_embedding(c, h, from), neighbours_share(s, h, from, to));
    edges = mixp_full(c, MIXP_F32, 2, nodes, 0);
    edges = mixp_scatter_add(c, edges, 0, ints(s, m->to, NEAR_EDGES, 1), floats(s, m->one, NEAR_EDGES, 1, 0));
    news = mixp_index_add(c, mixp_linear(c, h, m->own, NULL), 0, to, news);
    news = mixp_div(c, news, mixp_sqrt(c, mixp_squeeze(c, mixp_unsqueeze(c, edges, 1), 1)));
    news = mixp_div(c, news, mixp_clamp(c, mixp_vector_norm(c, news, 1, 1), 1e-3f, HUGE_VALF));
    return mixp_cross_entropy(c, mixp_linear(c, news, m->head, NULL), ints(s, m->label, NEAR_NODES, 0),
                              MIXP_IGNORE);
}
