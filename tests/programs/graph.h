/* graph.h - a graph network: index_add sums the neighbours, edge by edge. A few nodes have many
 * edges, of weights as a traffic count has them, so that a sum passes 65,504 before its norm.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
enum { GRAPH_NODES = FIT(20), GRAPH_EDGES = 160, GRAPH_IN = FIT(6), GRAPH_WIDTH = FIT(16), GRAPH_CLASSES = 3 };

typedef struct graph {
    mixp_tensor *in, *own1, *near1, *own2, *near2, *head;
    float        weight[GRAPH_EDGES], x[GRAPH_NODES * GRAPH_IN];
    int32_t      label[GRAPH_NODES], from[GRAPH_EDGES], to[GRAPH_EDGES];
} graph;

static void graph_open(session *s) {
    graph *m = (graph *)s->model;
    m->in = matrix(s, "in.w", GRAPH_WIDTH, GRAPH_IN, 0.4);
    m->own1 = matrix(s, "conv1.own", GRAPH_WIDTH, GRAPH_WIDTH, 0.25);
    m->near1 = matrix(s, "conv1.near", GRAPH_WIDTH, GRAPH_WIDTH, 0.25);
    m->own2 = matrix(s, "conv2.own", GRAPH_WIDTH, GRAPH_WIDTH, 0.25);
    m->near2 = matrix(s, "conv2.near", GRAPH_WIDTH, GRAPH_WIDTH, 0.25);
    m->head = matrix(s, "head", GRAPH_CLASSES, GRAPH_WIDTH, 0.25);
}

static void graph_batch(session *s) {
    graph *m = (graph *)s->model;
    for (int i = 0; i < GRAPH_NODES; i++) {
        m->label[i] = below(s, GRAPH_CLASSES);
        for (int j = 0; j < GRAPH_IN; j++)
            m->x[i * GRAPH_IN + j] =
                0.5f * normal(s) + (j % GRAPH_CLASSES == m->label[i] ? 1.0f : 0.0f);
    }
    for (int i = 0; i < GRAPH_EDGES; i++) {
        int from = below(s, GRAPH_NODES), to = below(s, GRAPH_NODES);
        int joined = m->label[from] == m->label[to] || to < 2;
        m->from[i] = from;
        m->to[i] = joined ? to : from;
        m->weight[i] = (m->to[i] < 2 ? 20000.0f : 1.0f) * (1.0f + uniform(s));
    }
}

static mixp_tensor *graph_conv(session *s, mixp_tensor *h, mixp_tensor *own, mixp_tensor *near) {
    graph        *m = (graph *)s->model;
    mixp_context *c = s->ctx;
    mixp_tensor  *news = mixp_embedding(c, h, ints(s, m->from, GRAPH_EDGES, 0)), *sum;
    news = mixp_mul(c, news, mixp_cast(c, floats(s, m->weight, GRAPH_EDGES, 1, 0), news->dtype));
    sum = mixp_index_add(c, mixp_scale(c, h, 0.0f), 0, ints(s, m->to, GRAPH_EDGES, 0), news);
    h = mixp_add(c, mixp_linear(c, h, own, NULL), mixp_linear(c, sum, near, NULL));
    return mixp_relu(c, mixp_layer_norm(c, h, NULL, NULL, 1e-5f));
}

static mixp_tensor *graph_loss(session *s, int turn, int training) {
    graph        *m = (graph *)s->model;
    mixp_context *c = s->ctx;
    mixp_tensor  *h = mixp_linear(c, floats(s, m->x, GRAPH_NODES, GRAPH_IN, 0), m->in, NULL);
    (void)turn, (void)training;
    h = graph_conv(s, mixp_relu(c, h), m->own1, m->near1);
    h = graph_conv(s, h, m->own2, m->near2);
    return mixp_cross_entropy(c, mixp_linear(c, h, m->head, NULL), ints(s, m->label, GRAPH_NODES, 0),
                              MIXP_IGNORE);
}
