#pragma once
#include "shared.c"
#include "../tensors/quantiser.c"
/* --- linear and matmul: one product ----------------------------------------------------- */

/* Attributes of a product, set by infer. linear: a weight w[out, in] and a bias. g holds the batch
 * of one kernel call, which is the last of the batch axes. Arrays of these axes: c, a, b. */
typedef struct mixpi_product {
    int            linear;
    mixp_gemm_args g;
    mixpi_axes     batches;
    int            asked;       /* 1: it is decided whether a recipe quantises a linear    */
    struct mixpi_recipe_call *recipe;   /* how it does; NULL: it does not                  */
} mixpi_product;

/* The shape of an operand as matrices. A vector is one row of a, or one column of b. */
typedef struct mixpi_matrices {
    int     rank, vector;
    int64_t rows, cols;         /* rows and columns as stored, before a transposition      */
} mixpi_matrices;

static mixpi_matrices mixpi_matrices_of(const mixp_tensor *t, int column) {
    mixpi_matrices m;
    m.vector = t->rank == 1;
    m.rank = m.vector ? 2 : t->rank;
    m.rows = m.vector ? (column ? t->shape[0] : 1) : t->shape[t->rank - 2];
    m.cols = m.vector ? (column ? 1 : t->shape[0]) : t->shape[t->rank - 1];
    return m;
}

/* Size of batch axis i (of `rank`) in one operand; 1 if the operand repeats. Like
 * mixpi_broadcast_axis. */
static int64_t mixpi_batch_axis(
    const mixp_tensor *t, int rank, int i, int64_t *step, int64_t *stride) {
    int own = i - (rank - (t->rank > 2 ? t->rank - 2 : 0));
    int64_t n = own < 0 ? 1 : t->shape[own];
    *stride = n == 1 ? 0 : *step;
    *step *= n;
    return n;
}

/* Broadcasts the batch axes of a and b. Returns 0 if they do not fit. */
static int mixpi_product_batches(mixpi_product *p, const mixp_tensor *a, const mixp_tensor *b) {
    mixpi_axes *x = &p->batches;
    int64_t step[3];
    int i, most = a->rank > b->rank ? a->rank : b->rank;
    step[0] = p->g.m * p->g.n;
    step[1] = p->g.m * p->g.k;
    step[2] = p->g.k * p->g.n;
    x->rank = most > 2 ? most - 2 : 0;
    x->arrays = 3;
    for (i = x->rank - 1; i >= 0; i--) {
        int64_t na = mixpi_batch_axis(a, x->rank, i, &step[1], &x->s[1][i]);
        int64_t nb = mixpi_batch_axis(b, x->rank, i, &step[2], &x->s[2][i]);
        if (na != nb && na != 1 && nb != 1) return 0;
        x->n[i] = na == 1 ? nb : na;
        x->s[0][i] = step[0];
        step[0] *= x->n[i];
    }
    return 1;
}

/* Sets m, n, k and the batch axes. Returns 0 if the operands do not fit. */
static int mixpi_product_sizes(mixpi_product *p, mixp_tensor *const *in) {
    mixp_gemm_args *g = &p->g;
    mixpi_matrices a = mixpi_matrices_of(in[0], 0), b = mixpi_matrices_of(in[1], 1);
    g->trans_a = g->trans_a && !a.vector;
    g->trans_b = g->trans_b && !b.vector;
    g->m = g->trans_a ? a.cols : a.rows;
    g->k = g->trans_a ? a.rows : a.cols;
    g->n = g->trans_b ? b.rows : b.cols;
    if (g->k != (g->trans_b ? b.cols : b.rows)) return 0;
    if (in[2] && (in[2]->rank != 1 || in[2]->count != g->n)) return 0;
    return mixpi_product_batches(p, in[0], in[1]);
}

/* Joins the batch axes; the last joined axis becomes the kernel's batch. */
static void mixpi_product_plan(mixpi_product *p) {
    mixp_gemm_args *g = &p->g;
    mixpi_axes *x = &p->batches;
    mixpi_axes_join(x);
    int last = x->rank - 1;
    g->batch = x->n[last];
    g->stride_a = g->batch > 1 ? x->s[1][last] : 0;
    g->stride_b = g->batch > 1 ? x->s[2][last] : 0;
    g->stride_c = g->m * g->n;
    if (g->stride_b || g->trans_a) return;
    g->m *= g->batch; /* one tall product instead of many small ones */
    g->stride_a = g->m * g->k;
    g->batch = 1;
}

static mixp_result mixpi_product_infer(mixp_call *c) {
    mixpi_product *p = (mixpi_product *)c->attrs;
    const mixp_tensor *a = c->in[0], *b = c->in[1];
    int64_t shape[MIXP_MAX_RANK];
    const char *rule =
        p->linear ? "x[..., in], w[out, in], b[out]"
                  : "a[..., m, k] and b[..., k, n]; leading dimensions must be equal, 1 or absent";
    if (mixpi_need_real(c, 2, 3) != MIXP_OK) return MIXP_ERR_DTYPE;
    if (a->rank < 1 || b->rank < 1 || (p->linear && b->rank != 2) || !mixpi_product_sizes(p, c->in))
        return mixpi_bad_shapes(c, rule);

    /* The result: the batches, then the rows of a and the columns of b where they exist. */
    int rank = p->batches.rank;
    memcpy(shape, p->batches.n, sizeof shape);
    if (a->rank > 1) shape[rank++] = p->g.m;
    if (b->rank > 1) shape[rank++] = p->g.n;
    mixpi_product_plan(p);

    /* An operand's gradient is made from the other operand, a bias's from neither. */
    mixp_call_reads(c, 0, 1u << 1);
    mixp_call_reads(c, 1, 1u << 0);
    mixp_call_reads(c, 2, 0);
    return mixp_call_output(c, a->dtype, rank, shape);
}

/* A matrix as stored, or its transpose. stride: elements from one matrix of a batch to the next. */
typedef struct mixpi_operand { mixp_in at; int64_t stride; int trans; } mixpi_operand;

static mixpi_operand mixpi_stored(mixp_in at, int64_t stride) {
    mixpi_operand o = { at, stride, 0 };
    return o;
}
static mixpi_operand mixpi_transposed(mixp_in at, int64_t stride) {
    mixpi_operand o = { at, stride, 1 };
    return o;
}

/* c[m, n] = op(a) op(b) for dense matrices. The caller sets c. */
static mixp_gemm_args mixpi_gemm_of(
    int64_t m, int64_t n, int64_t k, mixpi_operand a, mixpi_operand b) {
    mixp_gemm_args g = MIXPI_ZERO;
    g.m = m;
    g.n = n;
    g.k = k;
    g.batch = 1;
    g.alpha = 1.0f;

    /* The leading dimension is that of the array as it lies in memory. */
    g.a = a.at;
    g.b = b.at;
    g.trans_a = a.trans;
    g.trans_b = b.trans;
    g.lda = a.trans ? m : k;
    g.ldb = b.trans ? k : n;
    g.ldc = n;
    g.stride_a = a.stride;
    g.stride_b = b.stride;
    return g;
}

/* Number of kernel calls that the batches need. */
static int64_t mixpi_product_calls(const mixpi_axes *x) {
    int64_t calls = 1;
    for (int i = 0; i < x->rank - 1; i++) calls *= x->n[i];
    return calls;
}

/* Finds the offset of a call's matrices in each array. *again: 1 if an earlier call used the same
 * matrix of `array`. */
static void mixpi_product_at(
    const mixpi_axes *x, int64_t call, int array, int64_t at[3], int *again) {
    at[0] = at[1] = at[2] = 0;
    *again = 0;
    for (int i = x->rank - 2; i >= 0; i--) {
        int64_t index = call % x->n[i];
        for (int k = 0; k < 3; k++) at[k] += index * x->s[k][i];
        if (index > 0 && x->s[array][i] == 0) *again = 1;
        call /= x->n[i];
    }
}

static mixp_result mixpi_product_forward(mixp_call *c) {
    mixpi_product *p = (mixpi_product *)c->attrs;
    mixp_gemm_args *g = &p->g;
    mixp_result r = MIXP_OK;
    g->alpha = 1.0f;
    g->lda = g->trans_a ? g->m : g->k;
    g->ldb = g->trans_b ? g->k : g->n;
    g->ldc = g->n;
    g->a = mixpi_call_x(c, 0);
    g->b = mixpi_call_x(c, 1);
    g->bias = mixpi_call_x(c, 2);
    g->c = mixpi_call_y(c);

    /* A recipe may quantise a linear; one that runs again keeps the answer. */
    if (p->linear && !mixpi_entry_of(c)->again) MIXPI_TRY(MIXPI_QUANTISER(c->ctx, decide(c)));
    if (p->recipe) return c->ctx->quantiser->forward(c);

    /* Multiply the batches that do not fit into one call of the kernel. */
    const int64_t calls = mixpi_product_calls(&p->batches);
    for (int64_t i = 0; i < calls && r == MIXP_OK; i++) {
        int64_t at[3];
        int again;
        mixpi_product_at(&p->batches, i, 0, at, &again);
        mixp_gemm_args one = *g;
        one.c = mixpi_out_at(g->c, at[0]);
        one.a = mixpi_in_at(g->a, at[1]);
        one.b = mixpi_in_at(g->b, at[2]);
        r = MIXPI_RUN(c, gemm, &one);
    }
    return r;
}

/* The gradient of a in a's stored shape: m x k, or k x m if trans_a. */
static mixp_gemm_args mixpi_product_da(const mixp_gemm_args *g, mixp_in dy) {
    mixpi_operand dc = mixpi_stored(dy, g->stride_c),
                  dc_transposed = mixpi_transposed(dy, g->stride_c);
    mixpi_operand b = mixpi_stored(g->b, g->stride_b),
                  b_transposed = mixpi_transposed(g->b, g->stride_b);
    switch ((g->trans_a ? 2 : 0) + (g->trans_b ? 1 : 0)) {
    case 0: return mixpi_gemm_of(g->m, g->k, g->n, dc, b_transposed);             /* c = a b   */
    case 1: return mixpi_gemm_of(g->m, g->k, g->n, dc, b);                        /* c = a b'  */
    case 2: return mixpi_gemm_of(g->k, g->m, g->n, b, dc_transposed);             /* c = a' b  */
    default: return mixpi_gemm_of(g->k, g->m, g->n, b_transposed, dc_transposed); /* c = a' b' */
    }
}

/* The gradient of b in b's stored shape: k x n, or n x k if trans_b. */
static mixp_gemm_args mixpi_product_db(const mixp_gemm_args *g, mixp_in dy) {
    mixpi_operand dc = mixpi_stored(dy, g->stride_c),
                  dc_transposed = mixpi_transposed(dy, g->stride_c);
    mixpi_operand a = mixpi_stored(g->a, g->stride_a),
                  a_transposed = mixpi_transposed(g->a, g->stride_a);
    switch ((g->trans_a ? 2 : 0) + (g->trans_b ? 1 : 0)) {
    case 0: return mixpi_gemm_of(g->k, g->n, g->m, a_transposed, dc);             /* c = a b   */
    case 1: return mixpi_gemm_of(g->n, g->k, g->m, dc_transposed, a);             /* c = a b'  */
    case 2: return mixpi_gemm_of(g->k, g->n, g->m, a, dc);                        /* c = a' b  */
    default: return mixpi_gemm_of(g->n, g->k, g->m, dc_transposed, a_transposed); /* c = a' b' */
    }
}

/* Adds the products of a batch whose result all elements share: one product after another, in f32.
 * A low result is rounded once, at the end. */
static mixp_result mixpi_product_sum(mixp_call *c, mixp_gemm_args *g, int64_t batch) {
    mixp_context *ctx = c->ctx;
    mixp_out out = g->c;
    mixp_tensor *sums = NULL;
    int64_t count = g->m * g->n;
    mixp_result r = MIXP_OK;

    /* A sum of many for a low result needs memory for f32. */
    if (batch > 1 && out.dtype != MIXP_F32) {
        sums = mixp_activation(ctx, MIXP_F32, 1, &count);
        if (!sums) return MIXP_ERR_MEMORY;
        g->c = mixpi_tensor_out(sums, 0);
    }

    /* Each product is added to those before it. */
    for (; batch > 0 && r == MIXP_OK; batch--) {
        r = MIXPI_RUN(c, gemm, g);
        g->a = mixpi_in_at(g->a, g->stride_a);
        g->b = mixpi_in_at(g->b, g->stride_b);
        g->c.accumulate = 1;
    }

    if (!sums) return r;
    if (r == MIXP_OK) r = mixpi_add_into(ctx, out, mixpi_tensor_in(sums), count);
    mixpi_arena_free(ctx, &ctx->memory.dev, sums->data, mixpi_bytes(sums));
    return r;
}

/* One call's contribution to the gradient of an operand. stride: elements between its matrices; 0:
 * the batch shares one matrix. */
static mixp_result mixpi_product_into(mixp_call *c, mixp_gemm_args *g, int64_t stride) {
    const mixpi_product *p = (const mixpi_product *)c->attrs;
    if (!stride) return mixpi_product_sum(c, g, p->g.batch);
    g->batch = p->g.batch;
    g->stride_c = stride;
    return MIXPI_RUN(c, gemm, g);
}

/* Adds the gradient of operand i to `to`, call by call. */
static mixp_result mixpi_product_walk(mixp_call *c, int i, mixp_out to) {
    const mixpi_product *p = (const mixpi_product *)c->attrs;
    int64_t calls = mixpi_product_calls(&p->batches), call, at[3];
    mixp_result r = MIXP_OK;
    int again;
    for (call = 0; call < calls && r == MIXP_OK; call++) {
        mixp_gemm_args g = p->g, part;
        mixpi_product_at(&p->batches, call, 1 + i, at, &again);
        mixp_in dy = mixpi_in_at(mixpi_call_dy(c), at[0]);
        g.a = mixpi_in_at(g.a, at[1]);
        g.b = mixpi_in_at(g.b, at[2]);
        part = i ? mixpi_product_db(&g, dy) : mixpi_product_da(&g, dy);
        part.c = mixpi_out_at(to, at[1 + i]);
        part.c.accumulate |= again;
        r = mixpi_product_into(c, &part, i ? g.stride_b : g.stride_a);
    }
    return r;
}

/* If several calls add to the same matrix, the sum is f32 and is rounded once, at the end. */
static mixp_result mixpi_product_grad(mixp_call *c, int i) {
    const mixpi_product *p = (const mixpi_product *)c->attrs;
    mixp_out to = mixpi_call_dx(c, i);
    int64_t count = c->in[i]->count;
    if (!to.data) return MIXP_OK;
    /* A batch of none adds nothing to an operand that it shares. */
    if (!c->out->count) return to.accumulate ? MIXP_OK : mixpi_fill_with(c->ctx, to, count, 0.0);
    if (to.dtype == MIXP_F32 || mixpi_product_calls(&p->batches) == 1)
        return mixpi_product_walk(c, i, to);
    mixp_tensor *sums = mixp_activation(c->ctx, MIXP_F32, 1, &count);
    if (!sums) return MIXP_ERR_MEMORY;
    mixp_result r = mixpi_product_walk(c, i, mixpi_tensor_out(sums, 0));
    if (r == MIXP_OK) r = mixpi_add_into(c->ctx, to, mixpi_tensor_in(sums), count);
    mixpi_arena_free(c->ctx, &c->ctx->memory.dev, sums->data, mixpi_bytes(sums));
    return r;
}

/* The gradient of a bias, which every row adds: the sum over the rows of dy. */
static mixp_result mixpi_product_dbias(
    mixp_call *c, const mixp_gemm_args *g, mixp_in dy, int bias) {
    const mixp_reduce_args k = mixpi_reduce_of(dy, g->m, g->n, 1.0, mixpi_call_dx(c, bias));
    return k.y.data ? MIXPI_RUN(c, reduce, &k) : MIXP_OK;
}

/* Are the gradients of weight and bias both wanted, and can the device make them in one pass? */
static int mixpi_product_joins(const mixp_call *c, int weight, int bias) {
    return (c->ctx->products.epilogues & MIXP_EPILOGUES_BIAS) &&
           c->ctx->device->kernels->gemm_epilogue && c->in[bias] && mixp_call_wants(c, weight) &&
           mixp_call_wants(c, bias);
}

/* The gradients of a linear layer's weight and bias in one pass. g: the layer's forward product. */
static mixp_result mixpi_product_join(
    mixp_call *c, const mixp_gemm_args *g, mixp_in dy, int weight, int bias) {
    mixp_gemm_epilogue_args k = MIXPI_ZERO;
    k.kind = MIXP_EPILOGUE_ROW_SUMS;
    k.gemm = mixpi_product_db(g, dy);
    k.gemm.c = mixpi_call_dx(c, weight);
    k.sums = mixpi_call_dx(c, bias);
    return k.gemm.c.data && k.sums.data ? MIXPI_RUN(c, gemm_epilogue, &k) : MIXP_OK;
}

static mixp_result mixpi_product_backward(mixp_call *c) {
    const mixpi_product *p = (const mixpi_product *)c->attrs;
    if (p->recipe) return c->ctx->quantiser->backward(c);
    MIXPI_TRY(mixpi_product_grad(c, 0));
    if (p->linear && p->g.batch == 1 && mixpi_product_joins(c, 1, 2))
        return mixpi_product_join(c, &p->g, mixpi_call_dy(c), 1, 2);
    MIXPI_TRY(mixpi_product_grad(c, 1));
    return mixpi_product_dbias(c, &p->g, mixpi_call_dy(c), 2);
}

MIXPREC_API mixp_tensor *mixp_linear(
    mixp_context *ctx, mixp_tensor *x, mixp_tensor *w, mixp_tensor *b) {
    mixpi_product p = MIXPI_ZERO;
    p.linear = 1;
    p.g.trans_b = 1;
    mixp_tensor *y = mixpi_apply_op(ctx, MIXP_OP_LINEAR, 2, x, w, b, &p);
    if (y && y->own.from_tape && mixpi_quantiser_of(ctx))
        ctx->quantiser->recorded(&ctx->tape.newest->call);
    return y;
}

MIXPREC_API mixp_tensor *mixp_matmul(
    mixp_context *ctx, mixp_tensor *a, mixp_tensor *b, int trans_a, int trans_b) {
    mixpi_product p = MIXPI_ZERO;
    p.g.trans_a = trans_a != 0;
    p.g.trans_b = trans_b != 0;
    return mixpi_apply_op(ctx, MIXP_OP_MATMUL, 2, a, b, NULL, &p);
}

/* --- two linear layers with GELU between them ------------------------------------------- *
 *
 * A single operator if the description asks for it and the device supports it; otherwise three
 * operators. A single operator hides its intermediate values, so a guard keeps the three operators.
 */
enum {
    MIXPI_MLP_X, MIXPI_MLP_UP, MIXPI_MLP_DOWN, MIXPI_MLP_UP_BIAS, MIXPI_MLP_DOWN_BIAS,
    MIXPI_MLP_INPUTS,
    MIXPI_MLP_BEFORE = 0, MIXPI_MLP_AFTER       /* saved: input and output of GELU         */
};

/* c = a w': a layer without its bias. */
static mixp_gemm_args mixpi_layer_of(const mixp_tensor *a, const mixp_tensor *w, int64_t rows) {
    return mixpi_gemm_of(rows, w->shape[0], w->shape[1], mixpi_stored(mixpi_tensor_in(a), 0),
        mixpi_transposed(mixpi_tensor_in(w), 0));
}

static int64_t mixpi_mlp_rows(const mixp_call *c) { return mixpi_rows_of(c->in[MIXPI_MLP_X]); }

/* Declares what the gradients are made from, as for three operators. */
static void mixpi_mlp_reads(mixp_call *c) {
    const uint32_t down = 1u << MIXPI_MLP_DOWN;
    mixp_call_reads(c, MIXPI_MLP_X, 1u << MIXPI_MLP_UP | down);
    mixp_call_reads(c, MIXPI_MLP_UP, 1u << MIXPI_MLP_X | down);
    mixp_call_reads(c, MIXPI_MLP_DOWN, 0);
    mixp_call_reads(c, MIXPI_MLP_UP_BIAS, down);
    mixp_call_reads(c, MIXPI_MLP_DOWN_BIAS, 0);
}

static mixp_result mixpi_mlp_infer(mixp_call *c) {
    const mixp_tensor *x = c->in[MIXPI_MLP_X];
    int64_t shape[MIXP_MAX_RANK];
    memcpy(shape, x->shape, sizeof shape);
    shape[x->rank - 1] = c->in[MIXPI_MLP_DOWN]->shape[0];
    return mixp_call_output(c, x->dtype, x->rank, shape);
}

static mixp_result mixpi_mlp_up(mixp_call *c, mixp_tensor *before, mixp_tensor *after) {
    mixp_gemm_epilogue_args k = MIXPI_ZERO;
    k.kind = MIXP_EPILOGUE_GELU;
    k.gemm = mixpi_layer_of(c->in[MIXPI_MLP_X], c->in[MIXPI_MLP_UP], mixpi_mlp_rows(c));
    k.gemm.bias = mixpi_call_x(c, MIXPI_MLP_UP_BIAS);
    k.gemm.c = mixpi_tensor_out(after, 0);
    k.before = mixpi_tensor_out(before, 0);
    return MIXPI_RUN(c, gemm_epilogue, &k);
}

static mixp_result mixpi_mlp_forward(mixp_call *c) {
    int64_t shape[2];
    shape[0] = mixpi_mlp_rows(c);
    shape[1] = c->in[MIXPI_MLP_UP]->shape[0];
    mixpi_mlp_reads(c);
    mixp_tensor *before = mixp_call_save(c, MIXPI_MLP_BEFORE, c->out->dtype, 2, shape);
    mixp_tensor *after = mixp_call_save(c, MIXPI_MLP_AFTER, c->out->dtype, 2, shape);
    if (!before || !after) return MIXP_ERR_MEMORY;
    MIXPI_TRY(mixpi_mlp_up(c, before, after));
    mixp_gemm_args down = mixpi_layer_of(after, c->in[MIXPI_MLP_DOWN], shape[0]);
    down.bias = mixpi_call_x(c, MIXPI_MLP_DOWN_BIAS);
    down.c = mixpi_call_y(c);
    return MIXPI_RUN(c, gemm, &down);
}

/* The gradients of a layer's weight and bias. */
static mixp_result mixpi_mlp_weights(
    mixp_call *c, const mixp_gemm_args *g, mixp_in dy, int weight, int bias) {
    mixp_result r = MIXP_OK;
    if (mixpi_product_joins(c, weight, bias)) return mixpi_product_join(c, g, dy, weight, bias);
    mixp_gemm_args k = mixpi_product_db(g, dy);
    k.c = mixpi_call_dx(c, weight);
    if (k.c.data) r = MIXPI_RUN(c, gemm, &k);
    return r == MIXP_OK && c->in[bias] ? mixpi_product_dbias(c, g, dy, bias) : r;
}

/* dz: the gradient of GELU's input. */
static mixp_result mixpi_mlp_dz(mixp_call *c, const mixp_gemm_args *down, mixp_tensor *dz) {
    mixp_gemm_epilogue_args k = MIXPI_ZERO;
    k.kind = MIXP_EPILOGUE_GELU_BACK;
    k.gemm = mixpi_product_da(down, mixpi_call_dy(c));
    k.gemm.c = mixpi_tensor_out(dz, 0);
    k.before = mixpi_tensor_out(c->saved[MIXPI_MLP_BEFORE], 0);
    return MIXPI_RUN(c, gemm_epilogue, &k);
}

static mixp_result mixpi_mlp_walk(mixp_call *c, const mixp_gemm_args *down, mixp_tensor *dz) {
    mixp_gemm_args up = mixpi_layer_of(c->in[MIXPI_MLP_X], c->in[MIXPI_MLP_UP], mixpi_mlp_rows(c)),
                   dx;
    mixp_result r = mixpi_mlp_dz(c, down, dz);
    if (r != MIXP_OK) return r;
    dx = mixpi_product_da(&up, mixpi_tensor_in(dz));
    dx.c = mixpi_call_dx(c, MIXPI_MLP_X);
    if (dx.c.data) r = MIXPI_RUN(c, gemm, &dx);
    return r == MIXP_OK
               ? mixpi_mlp_weights(c, &up, mixpi_tensor_in(dz), MIXPI_MLP_UP, MIXPI_MLP_UP_BIAS)
               : r;
}

static mixp_result mixpi_mlp_backward(mixp_call *c) {
    mixp_tensor *before = c->saved[MIXPI_MLP_BEFORE], *dz;
    mixp_gemm_args down =
        mixpi_layer_of(c->saved[MIXPI_MLP_AFTER], c->in[MIXPI_MLP_DOWN], mixpi_mlp_rows(c));
    MIXPI_TRY(mixpi_mlp_weights(c, &down, mixpi_call_dy(c), MIXPI_MLP_DOWN, MIXPI_MLP_DOWN_BIAS));
    dz = mixp_activation(c->ctx, before->dtype, 2, before->shape);
    if (!dz) return MIXP_ERR_MEMORY;
    mixp_result r = mixpi_mlp_walk(c, &down, dz);
    mixpi_arena_free(c->ctx, &c->ctx->memory.dev, dz->data, mixpi_bytes(dz));
    return r;
}

static const mixp_op mixpi_mlp_op = {
    "mlp", MIXP_CLASS_LOW, 0, mixpi_mlp_infer,
    mixpi_mlp_forward, mixpi_mlp_backward, NULL
};

static int mixpi_layer_fits(const mixp_tensor *w, const mixp_tensor *b, int64_t width) {
    if (!mixpi_is_live(w) || (b && !mixpi_is_live(b))) return 0;
    return w->rank == 2 && mixpi_is_real(w->dtype) && w->shape[1] == width &&
           (!b || (b->rank == 1 && b->count == w->shape[0] && mixpi_is_real(b->dtype)));
}

/* Does the product compute GELU in its own pass, for an x of this dtype? */
static int mixpi_gelu_is_wanted(const mixp_context *ctx, const mixp_tensor *x) {
    mixp_dtype low = mixp_autocast_current(ctx).dtype;
    if (ctx->products.epilogues & MIXP_EPILOGUES_GELU) return 1;
    if (!(ctx->products.epilogues & MIXP_EPILOGUES_GELU_BF16)) return 0;
    return (low == MIXP_F32 ? x->dtype : low) == MIXP_BF16;
}

/* Can the three operators be joined? If an input does not fit, the separate operator reports it. */
static int mixpi_mlp_joins(mixp_context *ctx, mixp_tensor *const *in) {
    const mixp_tensor *x = in[MIXPI_MLP_X], *up = in[MIXPI_MLP_UP];
    if (!ctx || !mixpi_is_live(x) || !mixpi_gelu_is_wanted(ctx, x)) return 0;
    if (!ctx->device->kernels->gemm_epilogue || mixpi_is_seen(ctx)) return 0;
    if (mixpi_class_of(ctx, mixp_op_builtin(MIXP_OP_LINEAR)) != MIXP_CLASS_LOW ||
        mixpi_class_of(ctx, mixp_op_builtin(MIXP_OP_GELU_TANH)) != MIXP_CLASS_KEEP)
        return 0;
    return x->rank >= 1 && mixpi_is_real(x->dtype) &&
           mixpi_layer_fits(up, in[MIXPI_MLP_UP_BIAS], mixpi_last_dim(x)) &&
           mixpi_layer_fits(in[MIXPI_MLP_DOWN], in[MIXPI_MLP_DOWN_BIAS], up->shape[0]) &&
           mixpi_quantiser_leaves(ctx, in[MIXPI_MLP_UP], in[MIXPI_MLP_DOWN]);
}

MIXPREC_API mixp_tensor *mixp_mlp(mixp_context *ctx, mixp_tensor *x, mixp_tensor *up,
    mixp_tensor *up_bias, mixp_tensor *down, mixp_tensor *down_bias) {
    mixp_tensor *in[MIXPI_MLP_INPUTS];
    in[MIXPI_MLP_X] = x;
    in[MIXPI_MLP_UP] = up;
    in[MIXPI_MLP_DOWN] = down;
    in[MIXPI_MLP_UP_BIAS] = up_bias;
    in[MIXPI_MLP_DOWN_BIAS] = down_bias;

    if (mixpi_mlp_joins(ctx, in))
        return mixp_apply(ctx, &mixpi_mlp_op, MIXPI_MLP_INPUTS, in, 3, NULL);

    x = mixp_linear(ctx, x, up, up_bias);
    if (x) x = mixp_gelu_tanh(ctx, x);
    if (x) x->own.disposable = 1;
    return x ? mixp_linear(ctx, x, down, down_bias) : NULL;
}
