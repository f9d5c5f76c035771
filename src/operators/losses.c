#pragma once
#include "norms.c"
#include "choosing.c"
/* --- losses ---------------------------------------------------------------------------- */

static mixp_result mixpi_cross_entropy_infer(mixp_call *c) {
    mixp_tensor *logits = c->in[0], *targets = c->in[1];
    const mixp_cross_entropy_args *k = (const mixp_cross_entropy_args *)c->attrs;
    if (mixpi_need_indices(c) != MIXP_OK) return MIXP_ERR_DTYPE;
    if (mixp_bits_of_f32(k->smoothing) > 0x3F800000u) /* bits: NaN, below 0 or above 1 */
        return mixp_context_fail(c->ctx, MIXP_ERR_ARGUMENT,
                                 "cross_entropy: smoothing is %g; it must be in [0, 1]",
                                 (double)k->smoothing);
    if (logits->rank < 1 || targets->rank != logits->rank - 1 ||
        targets->count != mixpi_rows_of(logits))
        return mixpi_bad_shapes(c, "logits[..., vocab] and targets[...]");
    mixpi_warn_of_maker(c);
    mixpi_call_reads_all(c, 3u);
    return mixpi_call_output_fixed(c, MIXP_F32, 0, NULL);
}

/* Allocates the data for backward: two numbers of each row, and the number of rows that count. */
static mixp_result mixpi_entropy_save(mixp_call *c, int64_t rows) {
    int64_t shape[2];
    shape[0] = rows;
    shape[1] = 2;
    if (!mixp_call_save(c, 0, MIXP_F32, 2, shape)) return MIXP_ERR_MEMORY;
    return mixp_call_save(c, 1, MIXP_F32, 0, NULL) ? MIXP_OK : MIXP_ERR_MEMORY;
}

static mixp_result mixpi_cross_entropy_fill(mixp_call *c, mixp_cross_entropy_args *k) {
    k->rows = mixpi_rows_of(c->in[0]);
    k->cols = mixpi_last_dim(c->in[0]);
    if (mixpi_entropy_save(c, k->rows) != MIXP_OK) return MIXP_ERR_MEMORY;
    k->targets = (const int32_t *)c->in[1]->data;
    k->logits = mixpi_call_x(c, 0);
    k->loss = (float *)c->out->data;
    k->top_rsum = mixpi_saved(c, 0);
    k->counted = mixpi_saved(c, 1);
    return MIXP_OK;
}

/* Does a target count? */
static int mixpi_any_counts(const int32_t *targets, int64_t n, int32_t ignore) {
    int64_t i = 0;
    while (i < n && targets[i] == ignore) i++;
    return i < n;
}

static void mixpi_warn_of_nothing(mixp_context *ctx, const char *loss) {
    mixpi_warn(ctx,
               "mixp_%s: no target counts, because all are equal to `ignore`: the loss is NaN "
               "and its gradients are 0; leave such batches out",
               loss);
}

/* Warns on the CPU; a GPU would have to be waited for: see mixp_scaler_verdict. */
static void mixpi_warn_unless_counts(mixp_call *c, const mixp_cross_entropy_args *k, int64_t n) {
    if (c->ctx->device->download || *c->ctx->errors.warning) return;
    if (!mixpi_any_counts(k->targets, n, k->ignore)) mixpi_warn_of_nothing(c->ctx, c->op->name);
}

static mixp_result mixpi_cross_entropy_forward(mixp_call *c) {
    mixp_cross_entropy_args *k = (mixp_cross_entropy_args *)c->attrs; /* with `ignore` */
    mixp_result r = mixpi_cross_entropy_fill(c, k);
    if (r == MIXP_OK) mixpi_warn_unless_counts(c, k, k->rows);
    if (r == MIXP_OK) r = MIXPI_RUN(c, cross_entropy, k);
    return r == MIXP_ERR_ARGUMENT ? mixpi_bad_index(c, "target", k->cols, k->ignore) : r;
}

/* Lets the gradient of input i overwrite its values if nothing reads them again. */
static void mixpi_call_grad_over(mixp_call *c, int i) {
    mixp_tensor *t = c->in[i], *g;
    if (!t->own.disposable || t->requires_grad || mixpi_call_readers(c, i) != 1) return;
    g = t->own.pending ? NULL : mixpi_grad_record(t);
    if (!g || g->data) return;
    g->data = t->data;
    t->own.spent = 1;
}

/* Fails if an earlier walk has overwritten disposable logits. */
static mixp_result mixpi_entropy_there(mixp_call *c) {
    if (!c->in[0]->own.spent) return MIXP_OK;
    return mixp_context_fail(c->ctx, MIXP_ERR_ORDER,
                             "cross_entropy: the logits are disposable, and an earlier "
                             "mixp_backward overwrote them with their gradient; call mixp_backward "
                             "once, on the sum of the losses, or do not call "
                             "mixp_tensor_set_disposable");
}

static mixp_result mixpi_cross_entropy_backward(mixp_call *c) {
    const mixp_cross_entropy_args *forward = (const mixp_cross_entropy_args *)c->attrs;
    mixp_cross_entropy_backward_args k;
    mixp_result r = mixpi_entropy_there(c);
    if (r != MIXP_OK) return r;
    memset(&k, 0, sizeof k);
    k.rows = forward->rows;
    k.cols = forward->cols;
    k.ignore = forward->ignore;
    k.smoothing = forward->smoothing;
    k.targets = forward->targets;
    k.dloss = mixpi_call_dy(c);
    k.logits = forward->logits;
    k.top_rsum = forward->top_rsum;
    k.counted = forward->counted;
    mixpi_call_grad_over(c, 0);
    k.dlogits = mixpi_call_dx(c, 0);
    return k.dlogits.data ? MIXPI_RUN(c, cross_entropy_backward, &k) : MIXP_OK;
}

MIXPREC_API mixp_tensor *mixp_cross_entropy(mixp_context *ctx, mixp_tensor *logits,
                                            mixp_tensor *targets, int32_t ignore) {
    return mixp_cross_entropy_smooth(ctx, logits, targets, ignore, 0.0f);
}

MIXPREC_API mixp_tensor *mixp_cross_entropy_smooth(mixp_context *ctx, mixp_tensor *logits,
                                                   mixp_tensor *targets, int32_t ignore,
                                                   float smoothing) {
    mixp_cross_entropy_args k;
    memset(&k, 0, sizeof k);
    k.ignore = ignore;
    k.smoothing = smoothing + 0.0f; /* -0 becomes 0 */
    return mixpi_apply_op(ctx, MIXP_OP_CROSS_ENTROPY, 2, logits, targets, NULL, &k);
}

/* --- a product and its cross entropy, some rows at a time --- */

typedef struct mixpi_chunked {
    mixp_cross_entropy_args k;  /* of all rows; logits and top_rsum of the current chunk   */
    int64_t chunk, width;       /* rows of a chunk; columns of x and w                     */
    mixp_dtype dtype;           /* of the logits                                           */
    mixp_in x, w;
} mixpi_chunked;

static mixp_result mixpi_chunked_infer(mixp_call *c) {
    const mixpi_chunked *h = (const mixpi_chunked *)c->attrs;
    const mixp_tensor *x = c->in[0], *w = c->in[1], *targets = c->in[2];
    if (mixpi_need_indices_after(c, 2) != MIXP_OK) return MIXP_ERR_DTYPE;
    if (x->rank < 1 || w->rank != 2 || w->shape[1] != mixpi_last_dim(x) ||
        targets->count != mixpi_rows_of(x))
        return mixpi_bad_shapes(c, "x[..., in], w[vocab, in] and targets[...]");
    mixpi_call_reads_all(c, 7u);
    if (h->chunk < 0)
        return mixp_context_fail(c->ctx, MIXP_ERR_ARGUMENT,
                                 "linear_cross_entropy: chunk is %.0f rows; it must be at least 1, "
                                 "or 0 for the default",
                                 (double)h->chunk);
    return mixpi_call_output_fixed(c, MIXP_F32, 0, NULL);
}

/* Rows of a chunk: an eighth of all rows, but at least 2^22 logits, for the products' speed. */
static int64_t mixpi_chunked_chunk(int64_t asked, int64_t rows, int64_t vocab) {
    int64_t eighth = mixpi_ceil_div(rows, 8), good = ((int64_t)1 << 22) / vocab;
    if (asked) return mixpi_min(asked, rows);
    return mixpi_min(eighth > good ? eighth : good, rows);
}

/* Rows [first, ...) of a matrix with `width` columns. */
static mixp_in mixpi_rows_at(mixp_in m, int64_t first, int64_t width) {
    return mixpi_in_at(m, first * width);
}

/* Computes the logits of the chunk that begins at row `first`. */
static mixp_result mixpi_chunked_logits(mixp_call *c, const mixpi_chunked *h, int64_t first,
                                        mixp_tensor *logits) {
    mixp_in x = mixpi_rows_at(h->x, first, h->width);
    mixp_gemm_args g = mixpi_gemm_of(mixpi_min(h->chunk, h->k.rows - first), h->k.cols, h->width,
                                     mixpi_stored(x, 0), mixpi_turned(h->w, 0));
    g.c = mixpi_tensor_out(logits, 0);
    return MIXPI_RUN(c, gemm, &g);
}

/* Allocates the logits of one chunk. */
static mixp_tensor *mixpi_chunked_room(mixp_call *c, const mixpi_chunked *h) {
    int64_t count = h->chunk * h->k.cols;
    return mixp_activation(c->ctx, h->dtype, 1, &count);
}

static mixp_result mixpi_chunked_loss(mixp_call *c, const mixpi_chunked *h, int64_t first,
                                      mixp_tensor *logits) {
    mixp_cross_entropy_args k = h->k;
    k.rows = mixpi_min(h->chunk, h->k.rows - first);
    k.targets += first;
    k.top_rsum += 2 * first;
    k.logits = mixpi_tensor_in(logits);
    k.before = first;
    return MIXPI_RUN(c, cross_entropy, &k);
}

static mixp_result mixpi_chunked_forward(mixp_call *c) {
    mixpi_chunked *h = (mixpi_chunked *)c->attrs;
    mixp_tensor *logits;
    mixp_result r = MIXP_OK;
    h->k.rows = mixpi_rows_of(c->in[0]);
    h->k.cols = c->in[1]->shape[0];
    h->width = c->in[1]->shape[1];
    h->chunk = mixpi_chunked_chunk(h->chunk, h->k.rows, h->k.cols);
    h->x = mixpi_call_x(c, 0);
    h->w = mixpi_call_x(c, 1);
    h->k.targets = (const int32_t *)c->in[2]->data;
    /* The dtype of a product's result, or f32 if the guard's site fell back. */
    h->dtype = mixpi_call_is_wide(c) ? MIXP_F32 : c->in[0]->dtype;
    logits = mixpi_chunked_room(c, h);
    if (!logits || mixpi_entropy_save(c, h->k.rows) != MIXP_OK) return MIXP_ERR_MEMORY;
    h->k.loss = (float *)c->out->data;
    h->k.top_rsum = mixpi_saved(c, 0);
    h->k.counted = mixpi_saved(c, 1);
    mixpi_warn_unless_counts(c, &h->k, h->k.rows);
    for (int64_t first = 0; first < h->k.rows && r == MIXP_OK; first += h->chunk) {
        r = mixpi_chunked_logits(c, h, first, logits);
        if (r == MIXP_OK) r = mixpi_call_stored(c, logits);
        if (r == MIXP_OK) r = mixpi_chunked_loss(c, h, first, logits);
    }
    mixpi_arena_give(c->ctx, &c->ctx->memory.dev, logits->data, mixpi_bytes(logits));
    return r == MIXP_ERR_ARGUMENT ? mixpi_bad_index(c, "target", h->k.cols, h->k.ignore) : r;
}

/* Computes the gradient of a chunk's logits in place of the logits. */
static mixp_result mixpi_chunked_dlogits(mixp_call *c, const mixpi_chunked *h, int64_t first,
                                         mixp_tensor *logits) {
    mixp_cross_entropy_backward_args k;
    memset(&k, 0, sizeof k);
    k.rows = mixpi_min(h->chunk, h->k.rows - first);
    k.cols = h->k.cols;
    k.ignore = h->k.ignore;
    k.targets = h->k.targets + first;
    k.dloss = mixpi_call_dy(c);
    k.logits = mixpi_tensor_in(logits);
    k.top_rsum = h->k.top_rsum + 2 * first;
    k.counted = h->k.counted;
    k.dlogits = mixpi_tensor_out(logits, 0);
    return MIXPI_RUN(c, cross_entropy_backward, &k);
}

/* Computes dx of the chunk's rows, and adds the chunk's part of dw. */
static mixp_result mixpi_chunked_products(mixp_call *c, const mixpi_chunked *h, int64_t first,
                                          mixp_in dlogits, mixp_out dx, mixp_out dw) {
    int64_t rows = mixpi_min(h->chunk, h->k.rows - first);
    mixp_in x = mixpi_rows_at(h->x, first, h->width);
    mixp_gemm_args g =
        mixpi_gemm_of(rows, h->width, h->k.cols, mixpi_stored(dlogits, 0), mixpi_stored(h->w, 0));
    mixp_result r = MIXP_OK;
    g.c = dx;
    if (dx.data) {
        g.c.data = (char *)dx.data + (size_t)(first * h->width) * mixp_dtype_size(dx.dtype);
        r = MIXPI_RUN(c, gemm, &g);
    }
    if (!dw.data || r != MIXP_OK) return r;
    g = mixpi_gemm_of(h->k.cols, h->width, rows, mixpi_turned(dlogits, 0), mixpi_stored(x, 0));
    g.c = dw;
    return MIXPI_RUN(c, gemm, &g);
}

/* Sums over the chunks in f32; a low dw is rounded once, at the end. */
static mixp_result mixpi_chunked_walk(mixp_call *c, const mixpi_chunked *h, mixp_tensor *logits,
                                      mixp_out dx, mixp_out dw) {
    mixp_result r = MIXP_OK;
    int64_t first;
    for (first = 0; first < h->k.rows && r == MIXP_OK; first += h->chunk) {
        r = mixpi_chunked_logits(c, h, first, logits);
        if (r == MIXP_OK) r = mixpi_chunked_dlogits(c, h, first, logits);
        if (r == MIXP_OK) r = mixpi_chunked_products(c, h, first, mixpi_tensor_in(logits), dx, dw);
        dw.accumulate = 1;
    }
    return r;
}

/* Computes the logits again from x and w. */
static mixp_result mixpi_chunked_backward(mixp_call *c) {
    const mixpi_chunked *h = (const mixpi_chunked *)c->attrs;
    mixp_tensor *logits = mixpi_chunked_room(c, h), *sums = NULL;
    mixp_out dx = mixpi_call_dx(c, 0), dw = mixpi_call_dx(c, 1);
    int at_once = dw.dtype == MIXP_F32 || h->chunk == h->k.rows;
    int64_t count = h->k.cols * h->width;
    mixp_result r;
    if (dx.data == dw.data) at_once = 0; /* x is w: dx must be complete before dw is added */
    if (!logits) return MIXP_ERR_MEMORY;
    if (!dw.data || at_once) {
        r = mixpi_chunked_walk(c, h, logits, dx, dw);
    } else {
        sums = mixp_activation(c->ctx, MIXP_F32, 1, &count);
        if (!sums) return MIXP_ERR_MEMORY;
        r = mixpi_chunked_walk(c, h, logits, dx, mixpi_tensor_out(sums, 0));
        if (r == MIXP_OK) r = mixpi_add_into(c->ctx, dw, mixpi_tensor_in(sums), count);
        mixpi_arena_give(c->ctx, &c->ctx->memory.dev, sums->data, mixpi_bytes(sums));
    }
    mixpi_arena_give(c->ctx, &c->ctx->memory.dev, logits->data, mixpi_bytes(logits));
    return r;
}

MIXPREC_API mixp_tensor *mixp_linear_cross_entropy(mixp_context *ctx, mixp_tensor *x,
                                                   mixp_tensor *w, mixp_tensor *targets,
                                                   int32_t ignore, int64_t chunk) {
    mixpi_chunked h;
    memset(&h, 0, sizeof h);
    h.k.ignore = ignore;
    h.chunk = chunk;
    return mixpi_apply_op(ctx, MIXP_OP_LINEAR_CROSS_ENTROPY, 3, x, w, targets, &h);
}

/* Does the loss depend only on the difference of its inputs? Exchanging the inputs then changes
 * neither the loss nor the formula of the gradient, so the target may have a gradient. */
static int mixpi_loss_is_even(mixp_loss_kind kind) {
    return kind == MIXP_LOSS_MSE || kind == MIXP_LOSS_L1 || kind == MIXP_LOSS_HUBER ||
           kind == MIXP_LOSS_SMOOTH_L1;
}

/* Warns of log-probabilities that are given as the probabilities of mixp_kl_div, or the reverse. */
static void mixpi_warn_of_target(mixp_call *c, mixp_loss_kind kind) {
    const char *made = c->in[1]->own.made;
    const int logs = kind == MIXP_LOSS_KL_LOG;
    if ((kind != MIXP_LOSS_KL && !logs) || !made) return;
    if (strcmp(made, logs ? "softmax" : "log_softmax") != 0) return;
    mixpi_warn(c->ctx,
               "mixp_kl_div: target is a result of mixp_%s, but log_target is %d: pass "
               "log_target %d",
               made, logs, !logs);
}

static mixp_result mixpi_loss_infer(mixp_call *c) {
    const mixp_loss_args *k = (const mixp_loss_args *)c->attrs;
    const mixp_tensor *x = c->in[0], *t = c->in[1];
    int bounded = k->kind == MIXP_LOSS_HUBER || k->kind == MIXP_LOSS_SMOOTH_L1;
    if (mixpi_need_real(c, 2, 2) != MIXP_OK) return MIXP_ERR_DTYPE;
    if (x->rank != t->rank || memcmp(x->shape, t->shape, sizeof x->shape))
        return mixpi_bad_shapes(c, "the shapes must be equal");
    mixpi_call_reads_all(c, 3u);
    if (!mixpi_loss_is_even(k->kind)) mixpi_warn_of_maker(c);
    mixpi_warn_of_target(c, k->kind);
    if (!mixpi_loss_is_even(k->kind) && mixpi_wants_grad(t) && !mixpi_no_grad_now(c->ctx))
        return mixp_context_fail(c->ctx, MIXP_ERR_ARGUMENT,
                                 "%s: the target cannot have a gradient; only "
                                 "mse, l1, smooth_l1 and huber give one",
                                 c->op->name);
    if (bounded && !mixpi_is_positive(k->delta))
        return mixp_context_fail(c->ctx, MIXP_ERR_ARGUMENT,
                                 "%s: the bound is %g; it must be above 0", c->op->name,
                                 (double)k->delta);
    return mixpi_call_output_fixed(c, MIXP_F32, 0, NULL);
}

static mixp_result mixpi_loss_forward(mixp_call *c) {
    mixp_loss_args *k = (mixp_loss_args *)c->attrs; /* kind and delta are set already */
    int by_rows = k->kind == MIXP_LOSS_KL || k->kind == MIXP_LOSS_KL_LOG;
    k->n = c->in[0]->count;
    k->over = by_rows ? mixpi_rows_of(c->in[0]) : k->n;
    k->a = mixpi_call_x(c, 0);
    k->target = mixpi_call_x(c, 1);
    k->y = (float *)c->out->data;
    return MIXPI_RUN(c, loss, k);
}

static mixp_result mixpi_loss_backward(mixp_call *c) {
    const mixp_loss_args *forward = (const mixp_loss_args *)c->attrs;
    mixp_result r = MIXP_OK;
    for (int i = 0; i < 2 && r == MIXP_OK; i++) {
        mixp_loss_backward_args k;
        memset(&k, 0, sizeof k);
        k.kind = forward->kind;
        k.n = forward->n;
        k.over = forward->over;
        k.delta = forward->delta;
        k.dloss = mixpi_call_dy(c);
        k.a = mixpi_call_x(c, i);
        k.target = mixpi_call_x(c, 1 - i);
        k.da = mixpi_call_dx(c, i);
        if (k.da.data) r = MIXPI_RUN(c, loss_backward, &k);
    }
    return r;
}

static mixp_tensor *mixpi_apply_loss(mixp_context *ctx, mixp_op_id id, mixp_loss_kind kind,
                                     float delta, mixp_tensor *x, mixp_tensor *t) {
    mixp_loss_args k;
    memset(&k, 0, sizeof k);
    k.kind = kind;
    k.delta = delta;
    return mixpi_apply_op(ctx, id, 2, x, t, NULL, &k);
}

#define MIXPI_LOSS(name, id, which)                                                       \
    MIXPREC_API mixp_tensor *mixp_##name(mixp_context *ctx, mixp_tensor *x, mixp_tensor *t) \
    { return mixpi_apply_loss(ctx, MIXP_OP_##id, MIXP_LOSS_##which, 0.0f, x, t); }
MIXPI_LOSS(mse, MSE, MSE)
MIXPI_LOSS(bce_with_logits, BCE_WITH_LOGITS, BCE_LOGITS)
MIXPI_LOSS(bce, BCE, BCE)
MIXPI_LOSS(l1, L1, L1)
#undef MIXPI_LOSS

MIXPREC_API mixp_tensor *mixp_huber(mixp_context *ctx, mixp_tensor *x, mixp_tensor *target,
                                    float delta) {
    return mixpi_apply_loss(ctx, MIXP_OP_HUBER, MIXP_LOSS_HUBER, delta, x, target);
}

MIXPREC_API mixp_tensor *mixp_smooth_l1(mixp_context *ctx, mixp_tensor *x, mixp_tensor *target,
                                        float beta) {
    int plain = mixp_bits_of_f32(beta) << 1 == 0;
    return mixpi_apply_loss(ctx, MIXP_OP_SMOOTH_L1, plain ? MIXP_LOSS_L1 : MIXP_LOSS_SMOOTH_L1,
                            beta, x, target);
}

MIXPREC_API mixp_tensor *mixp_kl_div(mixp_context *ctx, mixp_tensor *x, mixp_tensor *target,
                                     int log_target) {
    return mixpi_apply_loss(ctx, MIXP_OP_KL_DIV, log_target ? MIXP_LOSS_KL_LOG : MIXP_LOSS_KL, 0.0f,
                            x, target);
}
