/* molecules.h - a property of molecules from their atoms and bonds, by a graph network with a weight for each kind of
 * bond (GIN, Xu et al., 2019). No molecule has a bond of the last kind, and one of them has no atom: products, sums
 * and gathers of no elements, whose mean must not become NaN.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
enum { MOL_ATOMS = FIT(16), MOL_GRAPHS = 5, MOL_WIDTH = FIT(12), MOL_HIDDEN = FIT(16), MOL_TYPES = 4, MOL_KINDS = 3 };
enum { MOL_BONDS = 24 };

typedef struct molecules {
    mixp_tensor *atom, *bond[MOL_KINDS], *self, *up, *down, *head;
    float        y[MOL_GRAPHS];
    int32_t      type[MOL_ATOMS], of[MOL_ATOMS], from[MOL_KINDS][MOL_BONDS], to[MOL_KINDS][MOL_BONDS];
} molecules;

/* The last kind has no bonds. */
static int64_t molecules_bonds(int kind) { return kind == MOL_KINDS - 1 ? 0 : MOL_BONDS; }

static void molecules_open(session *s) {
    molecules *m = (molecules *)s->model;
    m->atom = matrix(s, "atom", MOL_TYPES, MOL_WIDTH, 0.7);
    for (int i = 0; i < MOL_KINDS; i++) m->bond[i] = layer(s, i, "bond", MOL_WIDTH, MOL_WIDTH, 0.2);
    m->self = vector(s, "self", 1, 0);
    m->up = matrix(s, "up", MOL_HIDDEN, MOL_WIDTH, 0.3);
    m->down = matrix(s, "down", MOL_WIDTH, MOL_HIDDEN, 0.3);
    m->head = matrix(s, "head", 1, MOL_WIDTH, 0.2);
}

/* The molecule without an atom is graph 2. The property counts bonds of kind 0 that end at an atom of type 1. */
static void molecules_batch(session *s) {
    molecules *m = (molecules *)s->model;
    int        in[MOL_GRAPHS] = { 0 };
    memset(m->y, 0, sizeof m->y);
    for (int i = 0; i < MOL_ATOMS; i++) {
        m->type[i] = below(s, MOL_TYPES);
        m->of[i] = i * (MOL_GRAPHS - 1) / MOL_ATOMS;
        if (m->of[i] >= 2) m->of[i]++;
        in[m->of[i]]++;
    }
    for (int kind = 0; kind < MOL_KINDS; kind++)
        for (int k = 0; k < molecules_bonds(kind); k++) {
            const int at = below(s, MOL_ATOMS);
            int       other = below(s, MOL_ATOMS);
            while (m->of[other] != m->of[at]) other = below(s, MOL_ATOMS);
            m->from[kind][k] = at;
            m->to[kind][k] = other;
            if (kind == 0 && m->type[other] == 1) m->y[m->of[at]] += 1.0f / (float)in[m->of[at]];
        }
}

static mixp_tensor *molecules_loss(session *s, int turn, int training) {
    molecules     *m = (molecules *)s->model;
    mixp_context  *c = s->ctx;
    const int64_t  atoms[2] = { MOL_ATOMS, MOL_WIDTH }, graphs[2] = { MOL_GRAPHS, MOL_WIDTH };
    const int64_t  each[2] = { MOL_ATOMS, 1 }, count[2] = { MOL_GRAPHS, 1 };
    mixp_tensor   *x = mixp_embedding(c, m->atom, ints(s, m->type, MOL_ATOMS, 0)), *of = ints(s, m->of, MOL_ATOMS, 0);
    mixp_tensor   *pool, *size;
    (void)turn, (void)training;
    for (int hop = 0; hop < 2; hop++) {
        mixp_tensor *sum = mixp_full(c, MIXP_F32, 2, atoms, 0);
        for (int kind = 0; kind < MOL_KINDS; kind++) {
            const int64_t n[1] = { molecules_bonds(kind) };
            mixp_tensor  *from = mixp_input(c, MIXP_I32, 1, n, m->from[kind]);
            mixp_tensor  *news = mixp_relu(c, mixp_linear(c, mixp_embedding(c, x, from), m->bond[kind], NULL));
            sum = mixp_index_add(c, sum, 0, mixp_input(c, MIXP_I32, 1, n, m->to[kind]), news);
        }
        x = mixp_add(c, mixp_mul(c, x, mixp_add_scalar(c, m->self, 1)), sum);
        x = mixp_linear(c, mixp_relu(c, mixp_linear(c, x, m->up, NULL)), m->down, NULL);
    }
    pool = mixp_index_add(c, mixp_full(c, MIXP_F32, 2, graphs, 0), 0, of, x);
    size = mixp_index_add(c, mixp_full(c, MIXP_F32, 2, count, 0), 0, of, mixp_full(c, MIXP_F32, 2, each, 1));
    pool = mixp_div(c, pool, mixp_clamp(c, size, 1, INFINITY));
    return mixp_huber(c, mixp_linear(c, pool, m->head, NULL), floats(s, m->y, MOL_GRAPHS, 1, 0), 1);
}
