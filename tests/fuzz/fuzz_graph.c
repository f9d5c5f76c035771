/* fuzz_graph.c - random graphs of operators: loss and gradients against an interpreter in double
 * and its central differences. The interpreter is a plain loop for each operator, and differentiates
 * nothing, so it knows no formula of a gradient. In f16 and bf16 the same graphs must stay finite
 * and give the same bits twice.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include <math.h>
#include "mixprec.h"
#define FUZZ_TRAPS_ON (void)0
#include "fuzz.h"

enum { SIDE = 6, MOST = SIDE * SIDE, LEAVES = 4, STEPS = 12, NODES = LEAVES + STEPS };
static const double largest = 50;       /* beyond it a step is left out: f32 must be able to follow */

typedef enum graph_op {
    G_ADD, G_SUB, G_MUL, G_DIV, G_SCALE, G_RELU, G_GELU, G_GELU_TANH, G_SILU, G_TANH, G_SIGMOID,
    G_SQRT, G_EXP, G_LOG, G_POW, G_SUM, G_MEAN, G_SOFTMAX, G_LOG_SOFTMAX, G_LAYER_NORM,
    G_RMS_NORM, G_MATMUL, G_LINEAR, G_TRANSPOSE, G_RESHAPE, G_CONCAT, G_SLICE, G_EMBEDDING,
    G_CROSS_ENTROPY, G_MSE, G_BCE, G_ATTENTION, G_COUNT
} graph_op;

typedef struct matrix {
    int    rows, cols;
    double v[MOST];
} matrix;

typedef struct graph_step {
    graph_op op;
    int      a, b, attr;        /* nodes before this one; a byte that shapes the operator */
} graph_step;

typedef struct graph {
    int        steps, constant; /* the last leaf is an input without a gradient */
    graph_step step[STEPS];
    matrix     leaf[LEAVES];
} graph;

/* --- the interpreter --------------------------------------------------------------------- */

static double sigmoid(double x) { return 1 / (1 + exp(-x)); }

static double constant_target(int i) { return (double)(i * 7 % 5) / 4; }

static double pair_value(graph_op op, double a, double b) {
    switch (op) {
    case G_ADD: return a + b;
    case G_SUB: return a - b;
    case G_MUL: return a * b;
    default:    return a / exp(tanh(b));
    }
}

static double map_value(graph_op op, double x, int attr) {
    switch (op) {
    case G_SCALE:     return x * ((attr % 9) - 4) / 2;
    case G_RELU:      return x > 0 ? x : 0;
    case G_GELU:      return x * 0.5 * (1 + erf(x / sqrt(2.0)));
    case G_GELU_TANH: return 0.5 * x * (1 + tanh(sqrt(2 / acos(-1.0)) * (x + 0.044715 * x * x * x)));
    case G_SILU:      return x * sigmoid(x);
    case G_TANH:      return tanh(x);
    case G_SIGMOID:   return sigmoid(x);
    case G_SQRT:      return sqrt(exp(tanh(x)));
    case G_EXP:       return exp(tanh(x));
    case G_LOG:       return log(exp(tanh(x)) + 0.0);
    default:          return pow(exp(tanh(x)), (double)(attr % 7 - 3) / 2);
    }
}

static int fits(int a, int b) { return a == b || a == 1 || b == 1; }

static int run_pair(const graph_step *s, const matrix *a, const matrix *b, matrix *y) {
    if (!fits(a->rows, b->rows) || !fits(a->cols, b->cols)) return 0;
    y->rows = a->rows > b->rows ? a->rows : b->rows;
    y->cols = a->cols > b->cols ? a->cols : b->cols;
    for (int r = 0; r < y->rows; r++)
        for (int c = 0; c < y->cols; c++) {
            double left = a->v[(a->rows == 1 ? 0 : r) * a->cols + (a->cols == 1 ? 0 : c)];
            double right = b->v[(b->rows == 1 ? 0 : r) * b->cols + (b->cols == 1 ? 0 : c)];
            y->v[r * y->cols + c] = pair_value(s->op, left, right);
        }
    return 1;
}

static int run_map(const graph_step *s, const matrix *a, matrix *y) {
    y->rows = a->rows;
    y->cols = a->cols;
    for (int i = 0; i < a->rows * a->cols; i++) {
        if (s->op == G_RELU && fabs(a->v[i]) < 1e-3) return 0;  /* no difference over the kink */
        y->v[i] = map_value(s->op, a->v[i], s->attr);
    }
    return 1;
}

/* Sum or mean along rows (attr 0), columns (1) or both (2); the dimension stays, as size 1. */
static int run_reduce(const graph_step *s, const matrix *a, matrix *y) {
    int over_rows = s->attr % 3 != 1, over_cols = s->attr % 3 != 0, r, c;
    double n = (over_rows ? a->rows : 1) * (over_cols ? a->cols : 1);
    y->rows = over_rows ? 1 : a->rows;
    y->cols = over_cols ? 1 : a->cols;
    memset(y->v, 0, sizeof y->v);
    for (r = 0; r < a->rows; r++)
        for (c = 0; c < a->cols; c++)
            y->v[(over_rows ? 0 : r) * y->cols + (over_cols ? 0 : c)] +=
                a->v[r * a->cols + c] / (s->op == G_MEAN ? n : 1);
    return 1;
}

static void softmax_row(const double *x, int n, double *y) {
    double most = x[0], sum = 0;
    for (int i = 1; i < n; i++) if (x[i] > most) most = x[i];
    for (int i = 0; i < n; i++) sum += y[i] = exp(x[i] - most);
    for (int i = 0; i < n; i++) y[i] /= sum;
}

static void norm_row(const double *x, int n, int centred, double *y) {
    double mean = 0, square = 0;
    for (int i = 0; centred && i < n; i++) mean += x[i] / n;
    for (int i = 0; i < n; i++) square += (x[i] - mean) * (x[i] - mean) / n;
    for (int i = 0; i < n; i++) y[i] = (x[i] - mean) / sqrt(square + 0.25);
}

/* gamma and beta are b, of one row as wide as a, or left out. */
static int run_rows(const graph_step *s, const matrix *a, const matrix *b, matrix *y) {
    int affine = b->rows == 1 && b->cols == a->cols, r, c;
    y->rows = a->rows;
    y->cols = a->cols;
    for (r = 0; r < a->rows; r++) {
        const double *x = a->v + r * a->cols;
        double *out = y->v + r * a->cols;
        if (s->op == G_SOFTMAX || s->op == G_LOG_SOFTMAX) softmax_row(x, a->cols, out);
        else norm_row(x, a->cols, s->op == G_LAYER_NORM, out);
        for (c = 0; c < a->cols; c++) {
            if (s->op == G_LOG_SOFTMAX) out[c] = log(out[c]);
            if (s->op >= G_LAYER_NORM && affine) out[c] *= b->v[c];
            if (s->op == G_LAYER_NORM && affine) out[c] += b->v[c];
        }
    }
    return 1;
}

/* attr's two bits transpose; linear is a b' with the first column of b as its bias. */
static int run_product(const graph_step *s, const matrix *a, const matrix *b, matrix *y) {
    int ta = s->op == G_MATMUL && s->attr & 1, tb = s->op == G_LINEAR || s->attr & 2;
    int k = ta ? a->rows : a->cols, r, c, i;
    if (k != (tb ? b->cols : b->rows)) return 0;
    y->rows = ta ? a->cols : a->rows;
    y->cols = tb ? b->rows : b->cols;
    for (r = 0; r < y->rows; r++)
        for (c = 0; c < y->cols; c++) {
            double sum = 0;
            for (i = 0; i < k; i++)
                sum += a->v[ta ? i * a->cols + r : r * a->cols + i] *
                       b->v[tb ? c * b->cols + i : i * b->cols + c];
            y->v[r * y->cols + c] = sum;
        }
    return 1;
}

static int run_concat(const graph_step *s, const matrix *a, const matrix *b, matrix *y) {
    int along = s->attr & 1, r, c;
    if (along ? a->rows != b->rows : a->cols != b->cols) return 0;
    y->rows = along ? a->rows : a->rows + b->rows;
    y->cols = along ? a->cols + b->cols : a->cols;
    if (y->rows > SIDE || y->cols > SIDE) return 0;
    for (r = 0; r < y->rows; r++)
        for (c = 0; c < y->cols; c++) {
            int second = along ? c >= a->cols : r >= a->rows;
            y->v[r * y->cols + c] =
                !second ? a->v[r * a->cols + c]
                        : b->v[(along ? r : r - a->rows) * b->cols + (along ? c - a->cols : c)];
        }
    return 1;
}

/* The middle of a slice: from `first` on, `count` along one dimension. */
static void slice_of(const graph_step *s, const matrix *a, int *along, int *first, int *count) {
    int size = s->attr & 1 ? a->cols : a->rows;
    *along = s->attr & 1;
    *first = (s->attr >> 1) % size;
    *count = 1 + (s->attr >> 4) % (size - *first);
}

static int run_moves(const graph_step *s, const matrix *a, matrix *y) {
    int along, first, count, r, c;
    y->rows = a->cols;
    y->cols = a->rows;
    if (s->op == G_RESHAPE) memcpy(y->v, a->v, sizeof y->v);
    for (r = 0; s->op == G_TRANSPOSE && r < y->rows; r++)
        for (c = 0; c < y->cols; c++) y->v[r * y->cols + c] = a->v[c * a->cols + r];
    if (s->op != G_SLICE) return 1;
    slice_of(s, a, &along, &first, &count);
    y->rows = along ? a->rows : count;
    y->cols = along ? count : a->cols;
    for (r = 0; r < y->rows; r++)
        for (c = 0; c < y->cols; c++)
            y->v[r * y->cols + c] = a->v[(along ? r : r + first) * a->cols + (along ? c + first : c)];
    return 1;
}

static int id_of(const graph_step *s, int i, int below) { return (s->attr + i * i * 3) % below; }

static int run_losses(const graph_step *s, const matrix *a, const matrix *b, matrix *y) {
    int n = a->rows * a->cols, i;
    double row[SIDE];
    y->rows = y->cols = 1;
    y->v[0] = 0;
    if (s->op == G_MSE && (b->rows != a->rows || b->cols != a->cols)) return 0;
    for (i = 0; s->op == G_MSE && i < n; i++)
        y->v[0] += (a->v[i] - b->v[i]) * (a->v[i] - b->v[i]) / n;
    for (i = 0; s->op == G_BCE && i < n; i++) {
        double p = sigmoid(a->v[i]), t = constant_target(i);
        y->v[0] -= (t * log(p) + (1 - t) * log(1 - p)) / n;
    }
    for (i = 0; s->op == G_CROSS_ENTROPY && i < a->rows; i++) {
        softmax_row(a->v + i * a->cols, a->cols, row);
        y->v[0] -= log(row[id_of(s, i, a->cols)]) / a->rows;
    }
    return 1;
}

static int run_embedding(const graph_step *s, const matrix *a, matrix *y) {
    y->rows = 3;
    y->cols = a->cols;
    for (int r = 0; r < y->rows; r++)
        memcpy(y->v + r * a->cols, a->v + id_of(s, r, a->rows) * a->cols,
               (size_t)a->cols * sizeof *y->v);
    return 1;
}

/* Packed q, k, v; one head, or two; attr's lowest bit: causal. */
static int run_attention(const graph_step *s, const matrix *a, matrix *y) {
    int width = a->cols / 3, heads = width % 2 == 0 && s->attr & 2 ? 2 : 1;
    int size = width / heads, causal = s->attr & 1, h, t, u, c;
    if (a->cols % 3) return 0;
    memset(y->v, 0, sizeof y->v);
    y->rows = a->rows;
    y->cols = width;
    for (h = 0; h < heads; h++)
        for (t = 0; t < a->rows; t++) {
            double score[SIDE] = { 0 }, share[SIDE];
            int seen = causal ? t + 1 : a->rows;
            const double *q = a->v + t * a->cols + h * size;
            for (u = 0; u < seen; u++)
                for (c = 0; c < size; c++)
                    score[u] += q[c] * a->v[u * a->cols + width + h * size + c] / sqrt((double)size);
            softmax_row(score, seen, share);
            for (u = 0; u < seen; u++)
                for (c = 0; c < size; c++)
                    y->v[t * width + h * size + c] +=
                        share[u] * a->v[u * a->cols + 2 * width + h * size + c];
        }
    return 1;
}

/* 1: the step can be taken, and y is its value. */
static int run_step(const graph_step *s, const matrix *node, matrix *y) {
    const matrix *a = &node[s->a], *b = &node[s->b];
    if (s->op <= G_DIV) return run_pair(s, a, b, y);
    if (s->op <= G_POW) return run_map(s, a, y);
    if (s->op <= G_MEAN) return run_reduce(s, a, y);
    if (s->op <= G_RMS_NORM) return run_rows(s, a, b, y);
    if (s->op <= G_LINEAR) return run_product(s, a, b, y);
    switch (s->op) {
    case G_CONCAT:    return run_concat(s, a, b, y);
    case G_EMBEDDING: return run_embedding(s, a, y);
    case G_ATTENTION: return run_attention(s, a, y);
    case G_TRANSPOSE:
    case G_RESHAPE:
    case G_SLICE:     return run_moves(s, a, y);
    default:          return run_losses(s, a, b, y);
    }
}

static double weight(int i) { return (double)((i * 5 + 3) % 7 - 3) / 4; }

/* The loss is the weighted mean of the last three nodes, and of one leaf, so that there always is a
 * gradient. */
static int in_loss(const graph *g, int i) { return i == 0 || i >= LEAVES + g->steps - 3; }

/* -1e30 when a step went away. */
static double run_graph(const graph *g, matrix *node) {
    double loss = 0;
    memcpy(node, g->leaf, sizeof g->leaf);
    for (int i = 0; i < g->steps; i++)
        if (!run_step(&g->step[i], node, &node[LEAVES + i])) return -1e30;
    for (int i = 0; i < LEAVES + g->steps; i++) {
        int n = in_loss(g, i) ? node[i].rows * node[i].cols : 0;
        for (int k = 0; k < n; k++) loss += node[i].v[k] * weight(k) / n;
    }
    return loss;
}

/* --- from bytes to a graph --------------------------------------------------------------- */

static void read_leaf(matrix *m, uint8_t shape, const uint8_t *values) {
    m->rows = 1 + shape % SIDE;
    m->cols = 1 + shape / SIDE % SIDE;
    for (int i = 0; i < MOST; i++) m->v[i] = (double)((values[i % 16] + i * 29) % 64 - 32) / 16 + 0.01;
}

static int small(const matrix *m) {
    for (int i = 0; i < m->rows * m->cols; i++)
        if (!(fabs(m->v[i]) <= largest)) return 0;
    return 1;
}

enum { HEAD = 2 + LEAVES * 17 };

static int read_graph(graph *g, const uint8_t *data, size_t size) {
    static matrix node[NODES];
    if (size < HEAD + 4) return 0;
    memset(g, 0, sizeof *g);
    g->constant = data[0] & 1;
    for (int i = 0; i < LEAVES; i++) read_leaf(&g->leaf[i], data[2 + i * 17], data + 3 + i * 17);
    memcpy(node, g->leaf, sizeof g->leaf);
    for (size_t at = HEAD; at + 4 <= size && g->steps < STEPS; at += 4) {
        graph_step *s = &g->step[g->steps];
        int known = LEAVES + g->steps;
        s->op = (graph_op)(data[at] % G_COUNT);
        s->a = known - 1 - data[at + 1] % known;
        s->b = known - 1 - data[at + 2] % known;
        s->attr = data[at + 3];
        if (run_step(s, node, &node[known]) && small(&node[known])) g->steps++;
    }
    return g->steps > 0;
}

/* --- the same graph in mixprec ----------------------------------------------------------- */

static mixp_tensor *ids_of(mixp_context *ctx, const graph_step *s, int n, int below) {
    int32_t id[SIDE];
    int64_t shape[1];
    for (int i = 0; i < n; i++) id[i] = id_of(s, i, below);
    shape[0] = n;
    return mixp_input(ctx, MIXP_I32, 1, shape, id);
}

static mixp_tensor *apply_map(mixp_context *ctx, const graph_step *s, mixp_tensor *x) {
    switch (s->op) {
    case G_SCALE:     return mixp_scale(ctx, x, (float)(s->attr % 9 - 4) / 2);
    case G_RELU:      return mixp_relu(ctx, x);
    case G_GELU:      return mixp_gelu(ctx, x);
    case G_GELU_TANH: return mixp_gelu_tanh(ctx, x);
    case G_SILU:      return mixp_silu(ctx, x);
    case G_TANH:      return mixp_tanh(ctx, x);
    case G_SIGMOID:   return mixp_sigmoid(ctx, x);
    case G_SQRT:      return mixp_sqrt(ctx, mixp_exp(ctx, mixp_tanh(ctx, x)));
    case G_EXP:       return mixp_exp(ctx, mixp_tanh(ctx, x));
    case G_LOG:       return mixp_log(ctx, mixp_exp(ctx, mixp_tanh(ctx, x)));
    default:
        return mixp_pow(ctx, mixp_exp(ctx, mixp_tanh(ctx, x)), (float)(s->attr % 7 - 3) / 2);
    }
}

static mixp_tensor *as_matrix(mixp_context *ctx, mixp_tensor *x, const matrix *like) {
    int64_t shape[2];
    shape[0] = like->rows;
    shape[1] = like->cols;
    return mixp_reshape(ctx, x, 2, shape);
}

static mixp_tensor *as_row(mixp_context *ctx, mixp_tensor *x, const matrix *m) {
    int64_t shape[1];
    shape[0] = m->rows * m->cols;
    return mixp_reshape(ctx, x, 1, shape);
}

static mixp_tensor *apply_rows(mixp_context *ctx, const graph_step *s, mixp_tensor *a,
                               mixp_tensor *b, const matrix *node) {
    const matrix *width = &node[s->a], *affine = &node[s->b];
    mixp_tensor *row = NULL;
    if (s->op == G_SOFTMAX) return mixp_softmax(ctx, a);
    if (s->op == G_LOG_SOFTMAX) return mixp_log_softmax(ctx, a);
    if (affine->rows == 1 && affine->cols == width->cols) row = as_row(ctx, b, affine);
    if (s->op == G_RMS_NORM) return mixp_rms_norm(ctx, a, row, 0.25f);
    return mixp_layer_norm(ctx, a, row, row, 0.25f);
}

static mixp_tensor *apply_reduce(mixp_context *ctx, const graph_step *s, mixp_tensor *a) {
    int dim = s->attr % 3;
    if (s->op == G_SUM && dim < 2) return mixp_sum(ctx, a, dim, 1);
    if (dim < 2) return mixp_mean(ctx, a, dim, 1);
    mixp_tensor *first = s->op == G_SUM ? mixp_sum(ctx, a, MIXP_ALL, 1) : mixp_mean(ctx, a, MIXP_ALL, 1);
    return first;
}

static mixp_tensor *apply_attention(mixp_context *ctx, const graph_step *s, mixp_tensor *a,
                                    const matrix *m) {
    int width = m->cols / 3, heads = width % 2 == 0 && s->attr & 2 ? 2 : 1;
    int64_t shape[3];
    shape[0] = 1;
    shape[1] = m->rows;
    shape[2] = m->cols;
    return mixp_attention(ctx, mixp_reshape(ctx, a, 3, shape), heads, s->attr & 1, 0);
}

static mixp_tensor *apply_slice(mixp_context *ctx, const graph_step *s, mixp_tensor *a,
                                const matrix *m) {
    int along, first, count;
    slice_of(s, m, &along, &first, &count);
    return mixp_slice(ctx, a, along, first, count);
}

static mixp_tensor *apply_bce(mixp_context *ctx, mixp_tensor *a, const matrix *m) {
    float target[MOST];
    int64_t shape[2];
    for (int i = 0; i < m->rows * m->cols; i++) target[i] = (float)constant_target(i);
    shape[0] = m->rows;
    shape[1] = m->cols;
    return mixp_bce_with_logits(ctx, a, mixp_input(ctx, MIXP_F32, 2, shape, target));
}

static mixp_tensor *apply_step(mixp_context *ctx, const graph_step *s, mixp_tensor **t,
                               const matrix *node) {
    mixp_tensor *a = t[s->a], *b = t[s->b], *both[2];
    const matrix *m = &node[s->a];
    both[0] = a;
    both[1] = b;
    if (s->op > G_DIV && s->op <= G_POW) return apply_map(ctx, s, a);
    switch (s->op) {
    case G_ADD:       return mixp_add(ctx, a, b);
    case G_SUB:       return mixp_sub(ctx, a, b);
    case G_MUL:       return mixp_mul(ctx, a, b);
    case G_DIV:       return mixp_div(ctx, a, mixp_exp(ctx, mixp_tanh(ctx, b)));
    case G_SUM:
    case G_MEAN:      return apply_reduce(ctx, s, a);
    case G_MATMUL:    return mixp_matmul(ctx, a, b, s->attr & 1, s->attr >> 1 & 1);
    case G_LINEAR:    return mixp_linear(ctx, a, b, NULL);
    case G_TRANSPOSE: return mixp_transpose(ctx, a, 0, 1);
    case G_RESHAPE:   return a;
    case G_CONCAT:    return mixp_concat(ctx, 2, both, s->attr & 1);
    case G_SLICE:     return apply_slice(ctx, s, a, m);
    case G_EMBEDDING: return mixp_embedding(ctx, a, ids_of(ctx, s, 3, m->rows));
    case G_CROSS_ENTROPY:
        return mixp_cross_entropy(ctx, a, ids_of(ctx, s, m->rows, m->cols), MIXP_IGNORE);
    case G_MSE:       return mixp_mse(ctx, a, b);
    case G_BCE:       return apply_bce(ctx, a, m);
    case G_ATTENTION: return apply_attention(ctx, s, a, m);
    default:          return apply_rows(ctx, s, a, b, node);
    }
}

static mixp_tensor *apply_graph(mixp_context *ctx, const graph *g, mixp_tensor **t,
                                const matrix *node) {
    mixp_tensor *loss = NULL;
    int i, k;
    for (i = 0; i < g->steps; i++)
        t[LEAVES + i] = as_matrix(ctx, apply_step(ctx, &g->step[i], t, node), &node[LEAVES + i]);
    for (i = 0; i < LEAVES + g->steps; i++) {
        int64_t shape[2];
        float weights[MOST];
        mixp_tensor *part;
        if (!in_loss(g, i)) continue;
        shape[0] = node[i].rows;
        shape[1] = node[i].cols;
        for (k = 0; k < MOST; k++) weights[k] = (float)weight(k);
        part = mixp_mul(ctx, t[i], mixp_input(ctx, MIXP_F32, 2, shape, weights));
        part = mixp_mean(ctx, part, MIXP_ALL, 0);
        loss = loss ? mixp_add(ctx, loss, part) : part;
    }
    return loss;
}

/* --- both, compared ---------------------------------------------------------------------- */

typedef struct outcome {
    double loss;
    float  grad[LEAVES][MOST];
} outcome;

static void run_mixprec(const graph *g, const matrix *node, mixp_dtype low, int level, outcome *o) {
    mixp_tensor *t[NODES], *loss = NULL;
    const char *why = "";
    traps_on(1);
    mixp_context *ctx = mixp_context_new(NULL);
    EXPECT(ctx != NULL);
    memset(o, 0, sizeof *o);
    for (int i = 0; i < LEAVES; i++) {
        const matrix *m = &g->leaf[i];
        char name[8];
        int64_t shape[2];
        float v[MOST];
        shape[0] = m->rows;
        shape[1] = m->cols;
        for (int k = 0; k < MOST; k++) v[k] = (float)m->v[k];
        snprintf(name, sizeof name, "p%d", i);
        t[i] = mixp_param(ctx, name, MIXP_F32, 2, shape);
        EXPECT(mixp_write(t[i], v, MIXP_F32, m->rows * m->cols) == MIXP_OK);
    }
    if (g->constant) mixp_tensor_set_requires_grad(t[LEAVES - 1], 0);
    mixp_step_begin(ctx);
    mixp_autocast_set_level(ctx, level);
    if (low == MIXP_F32) loss = apply_graph(ctx, g, t, node);
    else MIXP_AUTOCAST(ctx, low) { loss = apply_graph(ctx, g, t, node); }
    o->loss = mixp_item(loss);
    mixp_backward(ctx, loss);
    for (int i = 0; i < LEAVES; i++) {
        mixp_tensor *grad = t[i]->grad;
        if (grad) EXPECT(mixp_read(grad, o->grad[i], MIXP_F32, g->leaf[i].rows * g->leaf[i].cols) == MIXP_OK);
    }
    if (mixp_context_error(ctx, &why) != MIXP_OK) printf("%s\n", why);
    EXPECT(mixp_context_error(ctx, &why) == MIXP_OK);
    mixp_context_free(ctx);
    traps_off();
}

/* A direction in a leaf: no two elements alike, so that no error of one hides another's. */
static double along(int direction, int k) { return ((k * 37 + direction * 11) % 23 - 11) / 16.0; }

/* The slope of the loss when leaf i moves that way, by a central difference; *usable 0 when a kink
 * lies between. */
static double slope(const graph *g, int i, int direction, int *usable) {
    static matrix node[NODES];
    static graph moved;
    const double h = 1e-5;
    double value[2];
    for (int side = 0; side < 2; side++) {
        moved = *g;
        for (int k = 0; k < MOST; k++)
            moved.leaf[i].v[k] += (side ? -h : h) * along(direction, k);
        value[side] = run_graph(&moved, node);
    }
    *usable = value[0] > -1e29 && value[1] > -1e29;
    return (value[0] - value[1]) / (2 * h);
}

static void check_leaf(const graph *g, const outcome *got, int i) {
    int direction, k, usable;
    for (direction = 0; direction < 2; direction++) {
        double want = slope(g, i, direction, &usable), have = 0, size = 1;
        for (k = 0; k < g->leaf[i].rows * g->leaf[i].cols; k++) {
            have += (double)got->grad[i][k] * along(direction, k);
            size += fabs((double)got->grad[i][k]);
        }
        if (!usable || fabs(want) > 1e4) return;
        if (fabs(have - want) > 1e-3 * size)
            printf("leaf %d: slope %g, by differences %g\n", i, have, want);
        EXPECT(fabs(have - want) <= 1e-3 * size);
    }
}

static void check_f32(const graph *g, const matrix *node, double loss) {
    outcome got;
    run_mixprec(g, node, MIXP_F32, 1, &got);
    EXPECT(fabs(got.loss - loss) <= 1e-4 * (1 + largest));
    for (int i = 0; i < LEAVES - g->constant; i++) check_leaf(g, &got, i);
    for (int k = 0; k < MOST && g->constant; k++) EXPECT(got.grad[LEAVES - 1][k] == 0);
}

static void check_low(const graph *g, const matrix *node, mixp_dtype low, int level) {
    outcome once, twice;
    run_mixprec(g, node, low, level, &once);
    run_mixprec(g, node, low, level, &twice);
    EXPECT(memcmp(&once, &twice, sizeof once) == 0);
    EXPECT(fabs(once.loss) < 1e6);
    for (int i = 0; i < LEAVES; i++)
        for (int k = 0; k < MOST; k++) EXPECT(fabs((double)once.grad[i][k]) < 65504.0);
}

static void fuzz_one(const uint8_t *data, size_t size) {
    static matrix node[NODES];
    static graph g;
    if (!read_graph(&g, data, size)) return;
    double loss = run_graph(&g, node);
    if (data[0] & 2) check_low(&g, node, data[0] & 4 ? MIXP_F16 : MIXP_BF16, data[0] & 8 ? 2 : 1);
    else check_f32(&g, node, loss);
}

/* Each seed begins with another operator, so that each is met; shapes that fit are common. */
static size_t fuzz_seed(int i, uint8_t *out) {
    uint32_t x = (uint32_t)i * 2654435761u + 12345;
    size_t k, n = HEAD + 4 * STEPS * 2;
    if (i >= 2 * G_COUNT) return 0;
    for (k = 0; k < n; k++) {
        x = x * 1664525u + 1013904223u;
        out[k] = (uint8_t)(x >> 24);
    }
    out[0] = (uint8_t)(i < G_COUNT ? i & 1 : 2 + i * 4);
    for (k = 0; k < LEAVES; k++) out[2 + k * 17] = (uint8_t)(i % 3 ? 2 + 2 * SIDE : out[2 + k * 17]);
    if (i % 4 == 0) out[2] = 3 + 5 * SIDE;
    out[HEAD] = (uint8_t)(i % G_COUNT);
    return n;
}
