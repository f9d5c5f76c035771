/* test_gradient_memory.c - gradients that share memory: both terms of a sum read one buffer, a
 * loss overwrites its logits. Whatever the operators read, in any order, the numbers equal those
 * of a walk that copies everything.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include "examples/ops.h"
#include "test.h"

enum { N = 24 };                /* elements of a tensor */

static mixp_context *ctx;

/* A little graph: op k takes two of the values before it. */
typedef struct graph {
    int count, keep;            /* keep: the value whose gradient is kept; -1: none */
    int op[12], a[12], b[12];
} graph;

static uint32_t state = 1;
static int draw(int n) {
    state = state * 1664525u + 1013904223u;
    return (int)((state >> 8) % (uint32_t)n);
}

/* More sums than anything else, of values old and new. */
static graph random_graph(void) {
    graph g;
    g.count = 4 + draw(8);
    g.keep = draw(3) ? -1 : draw(g.count);
    for (int i = 0; i < g.count; i++) {
        g.op[i] = draw(8);
        g.a[i] = draw(i + 2);
        g.b[i] = draw(i + 2);
    }
    return g;
}

/* By hand, in double: values, then the gradient of the sum of all that nobody reads. */
static void by_hand(const graph *g, const float *in, double value[][N], double grad[][N]) {
    memset(grad, 0, 16 * N * sizeof(double));
    for (int i = 0; i < 2 * N; i++) value[i / N][i % N] = (double)in[i];
    for (int k = 0; k < g->count; k++)
        for (int i = 0; i < N; i++) {
            double a = value[g->a[k]][i], b = value[g->b[k]][i];
            value[k + 2][i] = g->op[k] < 5 ? a + b : g->op[k] == 5 ? a - b : g->op[k] == 6 ? a * b : tanh(a);
        }
    for (int i = 0; i < N; i++) grad[g->count + 1][i] = 1.0;
    for (int k = g->count - 1; k >= 0; k--)
        for (int i = 0; i < N; i++) {
            double dy = grad[k + 2][i], a = value[g->a[k]][i], b = value[g->b[k]][i], y = value[k + 2][i];
            int op = g->op[k];
            grad[g->a[k]][i] += op == 6 ? dy * b : op == 7 ? dy * (1.0 - y * y) : dy;
            if (op != 7) grad[g->b[k]][i] += op == 6 ? dy * a : op == 5 ? -dy : dy;
        }
}

static mixp_tensor *apply(int op, mixp_tensor *a, mixp_tensor *b) {
    if (op < 5) return mixp_add(ctx, a, b);
    return op == 5 ? mixp_sub(ctx, a, b) : op == 6 ? mixp_mul(ctx, a, b) : mixp_tanh(ctx, a);
}

static void check_grad(const graph *g, int which, mixp_tensor *t, double grad[][N]) {
    float got[N] = { 0 };
    double zero = 0.0;
    for (int i = 0; i < N; i++) zero += fabs(grad[which][i]);
    if (!t->grad) { CHECK(zero <= 0.0 || which == g->count + 1); return; }
    CHECK_INT(mixp_read(t->grad, got, MIXP_F32, N), MIXP_OK);
    for (int i = 0; i < N; i++)
        CHECK_NEAR(got[i], grad[which][i], 2e-5 * (1.0 + fabs(grad[which][i])));
}

static void run_graph(const graph *g, mixp_tensor *const *params, const float *in) {
    double value[16][N], grad[16][N];
    mixp_tensor *t[16], *loss;
    by_hand(g, in, value, grad);
    mixp_step_begin(ctx);
    for (int i = 0; i < 2; i++) {
        params[i]->grad = NULL;
        /* An activation, whose gradient moves as others' do. */
        t[i] = mixp_scale(ctx, params[i], 1.0f);
    }
    for (int k = 0; k < g->count; k++) t[k + 2] = apply(g->op[k], t[g->a[k]], t[g->b[k]]);
    if (g->keep >= 0) mixp_tensor_set_requires_grad(t[g->keep], 1);
    loss = mixp_sum(ctx, t[g->count + 1], MIXP_ALL, 0);
    CHECK_INT(mixp_backward(ctx, loss), MIXP_OK);
    for (int i = 0; i < 2; i++) check_grad(g, i, params[i], grad);
    if (g->keep >= 0) check_grad(g, g->keep, t[g->keep], grad);
}

static void sums_of_all_kinds_share_their_gradients(void) {
    int64_t shape[1] = { N };
    mixp_tensor *params[2];
    float in[2 * N];
    ctx = mixp_context_new(NULL);
    for (int i = 0; i < 2 * N; i++) in[i] = (float)(draw(2000) - 1000) * 1e-3f;
    params[0] = mixp_param(ctx, "a", MIXP_F32, 1, shape);
    params[1] = mixp_param(ctx, "b", MIXP_F32, 1, shape);
    for (int i = 0; i < 2; i++) mixp_write(params[i], in + i * N, MIXP_F32, N);
    for (int i = 0; i < 3000 && !test_bad; i++) {
        graph g = random_graph();
        run_graph(&g, params, in);
    }
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    mixp_context_free(ctx);
}

/* x reads its own sum's gradient after h's product has: neither sees the other's. And a product that
 * reads the sum's gradient adds to what is the same memory. */
static mixp_tensor *residual(mixp_context *c, void *user) {
    mixp_tensor **p = (mixp_tensor **)user, *h, *x;
    x = mixp_linear(c, p[0], p[1], p[2]);
    x = mixp_add(c, x, mixp_linear(c, x, p[1], p[2]));
    for (int i = 0; i < 2; i++) {
        h = mixp_linear(c, mixp_layer_norm(c, x, p[3], NULL, 1e-5f), p[1], p[2]);
        x = mixp_add(c, x, mixp_gelu(c, h));
    }
    return mixp_mean(c, mixp_mul(c, x, x), MIXP_ALL, 0);
}

static void residual_blocks_have_the_gradients_of_differences(void) {
    int64_t square[2] = { 4, 4 }, row[1] = { 4 };
    mixp_tensor *p[4];
    double worst = 1.0;
    ctx = mixp_context_new(NULL);
    p[0] = mixp_param(ctx, "x", MIXP_F32, 2, square);
    p[1] = mixp_param(ctx, "w", MIXP_F32, 2, square);
    p[2] = mixp_param(ctx, "b", MIXP_F32, 1, row);
    p[3] = mixp_param(ctx, "g", MIXP_F32, 1, row);
    for (int i = 0; i < 4; i++) mixp_init_normal(p[i], 0.2, 0.7);
    CHECK_INT(mixp_check_gradients(ctx, residual, p, 4, p, 0, &worst), MIXP_OK);
    CHECK(worst < 5e-3);
    mixp_context_free(ctx);
}

/* --- logits ------------------------------------------------------------------------------- */

enum { ROWS = 6, WIDTH = 8, VOCAB = 40 };

/* The gradients of x and w; how: 1 = logits are disposable, 2 = read by another operator too, 4 = a
 * gradient of theirs is kept. *over: does the loss's gradient lie over the logits? */
static void head(int how, float *dx, float *dw, int *over) {
    static const int32_t targets[ROWS] = { 3, 0, 39, -100, 7, 7 };
    int64_t rows[1] = { ROWS }, x_shape[2] = { ROWS, WIDTH }, w_shape[2] = { VOCAB, WIDTH };
    mixp_tensor *x, *w, *logits, *loss, *more = NULL;
    ctx = mixp_context_new(NULL);
    x = mixp_param(ctx, "x", MIXP_F32, 2, x_shape);
    w = mixp_param(ctx, "w", MIXP_F32, 2, w_shape);
    mixp_init_normal(x, 0, 1);
    mixp_init_normal(w, 0, 1);
    mixp_step_begin(ctx);
    logits = mixp_linear(ctx, x, w, NULL);
    if (how & 1) CHECK_INT(mixp_tensor_set_disposable(logits, 1), MIXP_OK);
    if (how & 4) mixp_tensor_set_requires_grad(logits, 1);
    if (how & 2) more = mixp_scale(ctx, mixp_mean(ctx, logits, MIXP_ALL, 0), 0.5f);
    loss = mixp_cross_entropy(ctx, logits, mixp_input(ctx, MIXP_I32, 1, rows, targets), MIXP_IGNORE);
    if (more) loss = mixp_add(ctx, loss, more);
    float before = ((const float *)logits->data)[5];
    CHECK_INT(mixp_backward(ctx, loss), MIXP_OK);
    float after = ((const float *)logits->data)[5];
    *over = memcmp(&before, &after, sizeof after) != 0;
    CHECK_INT(mixp_read(x->grad, dx, MIXP_F32, ROWS * WIDTH), MIXP_OK);
    CHECK_INT(mixp_read(w->grad, dw, MIXP_F32, VOCAB * WIDTH), MIXP_OK);
    mixp_context_free(ctx);
}

static void a_loss_writes_over_logits_that_nobody_reads(void) {
    static float dx[8][ROWS * WIDTH], dw[8][VOCAB * WIDTH];
    int over[8];
    for (int how = 0; how < 8; how++) head(how, dx[how], dw[how], &over[how]);
    for (int how = 0; how < 8; how++) {
        CHECK_INT(over[how], how == 1);
        CHECK_INT(memcmp(dx[how], dx[how & 2], sizeof dx[0]), 0);
        CHECK_INT(memcmp(dw[how], dw[how & 2], sizeof dw[0]), 0);
    }
}

static void a_parameter_is_not_disposable(void) {
    int64_t shape[1] = { 3 };
    const char *why = "";
    ctx = mixp_context_new(NULL);
    CHECK_INT(mixp_tensor_set_disposable(NULL, 1), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_tensor_set_disposable(mixp_param(ctx, "bias", MIXP_F32, 1, shape), 1), MIXP_ERR_ARGUMENT);
    mixp_context_error(ctx, &why);
    CHECK_TEXT(why, "'bias': only an activation");
    mixp_context_free(ctx);
}

/* --- norms that write what a product reads ------------------------------------------------- */

/* The loss and the weights' gradients of norm, product, norm, product in bf16 at level 1. */
static float normed(int low_out, float *grads, mixp_dtype *stored) {
    int64_t x_shape[2] = { ROWS, WIDTH }, w_shape[2] = { WIDTH, WIDTH }, row[1] = { WIDTH };
    mixp_tensor *x, *w, *g, *h, *loss = NULL;
    ctx = mixp_context_new(NULL);
    if (low_out) mixp_autocast_override(ctx, mixp_op_builtin(MIXP_OP_LAYER_NORM), MIXP_CLASS_LOW_OUT);
    x = mixp_param(ctx, "x", MIXP_F32, 2, x_shape);
    w = mixp_param(ctx, "w", MIXP_F32, 2, w_shape);
    g = mixp_param(ctx, "g", MIXP_F32, 1, row);
    mixp_init_normal(x, 0, 1);
    mixp_init_normal(w, 0, 1);
    mixp_init_normal(g, 1, 0.1);
    mixp_step_begin(ctx);
    MIXP_AUTOCAST(ctx, MIXP_BF16) {
        h = mixp_layer_norm(ctx, x, g, NULL, 1e-5f);
        *stored = h->dtype;
        x = mixp_add(ctx, x, mixp_linear(ctx, h, w, NULL));
        h = mixp_linear(ctx, mixp_layer_norm(ctx, x, g, NULL, 1e-5f), w, NULL);
        loss = mixp_mean(ctx, mixp_mul(ctx, h, h), MIXP_ALL, 0);
    }
    float value = (float)mixp_item(loss);
    CHECK_INT(mixp_backward(ctx, loss), MIXP_OK);
    CHECK_INT(mixp_read(w->grad, grads, MIXP_F32, WIDTH * WIDTH), MIXP_OK);
    CHECK_INT(mixp_read(g->grad, grads + WIDTH * WIDTH, MIXP_F32, WIDTH), MIXP_OK);
    mixp_context_free(ctx);
    return value;
}

static void norms_that_write_low_give_the_same_bits(void) {
    static float grads[2][WIDTH * WIDTH + WIDTH];
    mixp_dtype stored[2];
    float plain = normed(0, grads[0], &stored[0]), low = normed(1, grads[1], &stored[1]);
    CHECK_INT(stored[0], MIXP_F32);
    CHECK_INT(stored[1], MIXP_BF16);
    CHECK_INT(memcmp(&plain, &low, sizeof low), 0);
    CHECK_INT(memcmp(grads[0], grads[1], sizeof grads[0]), 0);
}

/* An operator of a user's that reads y's gradient from another place than it writes x's, and asks for
 * the former first: y[i] = x[N-1-i]. */
static mixp_result turned_infer(mixp_call *c)
{ return mixp_call_output(c, c->in[0]->dtype, c->in[0]->rank, c->in[0]->shape); }
static mixp_result turn(mixp_in from, mixp_out to) {
    for (int64_t i = 0; i < N; i++) mixp_put(to, i, mixp_get(from, N - 1 - i));
    return MIXP_OK;
}
static mixp_result turned_forward(mixp_call *c) { return turn(mixp_call_x(c, 0), mixp_call_y(c)); }
static mixp_result turned_backward(mixp_call *c) {
    mixp_in dy = mixp_call_dy(c);
    return turn(dy, mixp_call_dx(c, 0));
}
static const mixp_op turned = { "turned", MIXP_CLASS_KEEP, 0, turned_infer, turned_forward, turned_backward, NULL };

/* The sum of w (x + turned x): the gradient is w[i] + w[N-1-i]. */
static void a_users_operator_never_reads_where_it_writes(void) {
    int64_t shape[1] = { N };
    float weights[N], got[N];
    mixp_context *c = mixp_context_new(NULL);
    mixp_tensor *p = mixp_param(c, "p", MIXP_F32, 1, shape), *x, *y;
    for (int i = 0; i < N; i++) weights[i] = (float)(i * i + 1);
    mixp_init_normal(p, 0, 1);
    mixp_step_begin(c);
    x = mixp_scale(c, p, 1.0f);
    y = mixp_add(c, x, mixp_apply(c, &turned, 1, &x, 1, NULL));
    y = mixp_mul(c, y, mixp_input(c, MIXP_F32, 1, shape, weights));
    CHECK_INT(mixp_backward(c, mixp_sum(c, y, MIXP_ALL, 0)), MIXP_OK);
    CHECK_INT(mixp_read(p->grad, got, MIXP_F32, N), MIXP_OK);
    for (int i = 0; i < N; i++) CHECK_NEAR(got[i], weights[i] + weights[N - 1 - i], 0);
    mixp_context_free(c);
}

int main(void) {
    RUN(a_users_operator_never_reads_where_it_writes);
    RUN(sums_of_all_kinds_share_their_gradients);
    RUN(residual_blocks_have_the_gradients_of_differences);
    RUN(a_loss_writes_over_logits_that_nobody_reads);
    RUN(a_parameter_is_not_disposable);
    RUN(norms_that_write_low_give_the_same_bits);
    return test_report();
}
