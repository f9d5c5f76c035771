#pragma once
#include "norms.c"
#include "choosing.c"
/* --- losses ---------------------------------------------------------------------------- */

/* Attributes of cross_entropy and nll, whose inputs are x, the targets and the class weights, which
 * may be missing. */
typedef struct mixpi_entropy {
    mixp_cross_entropy_args k;  /* with `ignore`, `smoothing`, `logs` and `sum`            */
    int none;                   /* 1: the losses of the rows are not reduced               */
} mixpi_entropy;

static mixp_result mixpi_entropy_check(mixp_call *c) {
    const mixp_tensor *logits = c->in[0], *targets = c->in[1];
    if (mixpi_need_indices(c) != MIXP_OK) return MIXP_ERR_DTYPE;
    if (logits->rank < 1 || targets->rank != logits->rank - 1 ||
        targets->count != mixpi_rows_of(logits))
        return mixpi_bad_shapes(c, "x[..., classes] and targets[...]");
    mixpi_warn_of_maker(c);
    return MIXP_OK;
}

static mixp_result mixpi_smoothing_check(mixp_call *c, float smoothing) {
    if (mixp_bits_of_f32(smoothing) <= 0x3F800000u)
        return MIXP_OK; /* NaN, below 0 and above 1 fail */
    return mixp_context_fail(c->ctx, MIXP_ERR_ARGUMENT, "%s: smoothing is %g; it must be in [0, 1]",
        c->op->name, (double)smoothing);
}

static mixp_result mixpi_cross_entropy_infer(mixp_call *c) {
    const mixpi_entropy *p = (const mixpi_entropy *)c->attrs;
    const mixp_tensor *targets = c->in[1];
    MIXPI_TRY(mixpi_smoothing_check(c, p->k.smoothing));
    MIXPI_TRY(mixpi_entropy_check(c));
    mixpi_call_reads_all(c, 7u);
    if (!p->none) return mixpi_call_output_fixed(c, MIXP_F32, 0, NULL);
    return mixpi_call_output_fixed(c, MIXP_F32, targets->rank, targets->shape);
}

/* Allocates the data for backward: three numbers of each row, and the number of rows that count. */
static mixp_result mixpi_entropy_save(mixp_call *c, int64_t rows) {
    int64_t shape[2];
    shape[0] = rows;
    shape[1] = 3;
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
    k->stats = mixpi_saved(c, 0);
    k->counted = mixpi_saved(c, 1);
    return MIXP_OK;
}

/* Does a target count? */
static int mixpi_has_target(const int32_t *targets, int64_t n, int32_t ignore) {
    int64_t i = 0;
    while (i < n && targets[i] == ignore) i++;
    return i < n;
}

/* Warns of a mean over nothing, on the CPU; a GPU would have to be waited for: see
 * mixp_scaler_verdict. */
static void mixpi_warn_unless_counts(mixp_call *c, const mixp_cross_entropy_args *k, int64_t n) {
    if (c->ctx->device->download || *c->ctx->errors.warning || k->sum || k->each) return;
    if (!n || mixpi_has_target(k->targets, n, k->ignore)) return;
    mixpi_warn(c->ctx,
        "mixp_%s: no target counts, because all are equal to `ignore`: the loss is NaN and its "
        "gradients are 0; leave such batches out",
        c->op->name);
}

/* The loss of no elements: the sum is 0, and the mean NaN. */
static mixp_result mixpi_loss_of_nothing(mixp_call *c, int sum) {
    return mixpi_fill_with(
        c->ctx, mixpi_call_y(c), c->out->count, sum ? 0.0 : (double)mixp_f32_of_bits(0x7FC00000u));
}

/* The class weights of input i, followed by their mean, or NULL: see mixpi_class_weights. */
static const float *mixpi_call_weights(const mixp_call *c, int i) {
    return c->in[i] ? (const float *)c->in[i]->data : NULL;
}

static mixp_result mixpi_cross_entropy_forward(mixp_call *c) {
    mixpi_entropy *p = (mixpi_entropy *)c->attrs;
    mixp_cross_entropy_args *k = &p->k;
    MIXPI_TRY(mixpi_cross_entropy_fill(c, k));
    k->weights = c->n_in > 2 ? mixpi_call_weights(c, 2) : NULL;
    if (p->none) k->each = k->loss;
    if (!k->rows) return mixpi_loss_of_nothing(c, k->sum);
    mixpi_warn_unless_counts(c, k, k->rows);
    mixp_result r = MIXPI_RUN(c, cross_entropy, k);
    return r == MIXP_ERR_ARGUMENT ? mixpi_bad_index(c, 1, "target", k->cols, k->ignore) : r;
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
static mixp_result mixpi_check_logits_live(mixp_call *c) {
    if (!c->in[0]->own.spent) return MIXP_OK;
    return mixp_context_fail(c->ctx, MIXP_ERR_ORDER,
        "cross_entropy: the logits are disposable, and an earlier mixp_backward overwrote them "
        "with their gradient; call mixp_backward once, on the sum of the losses, or do not call "
        "mixp_tensor_set_disposable");
}

/* The arguments that backward shares with forward. */
static mixp_cross_entropy_backward_args mixpi_entropy_backward_of(
    const mixp_cross_entropy_args *forward) {
    mixp_cross_entropy_backward_args k = MIXPI_ZERO;
    k.rows = forward->rows;
    k.cols = forward->cols;
    k.ignore = forward->ignore;
    k.smoothing = forward->smoothing;
    k.targets = forward->targets;
    k.logits = forward->logits;
    k.stats = forward->stats;
    k.counted = forward->counted;
    k.weights = forward->weights;
    k.logs = forward->logs;
    k.each = forward->each != NULL;
    return k;
}

static mixp_result mixpi_cross_entropy_backward(mixp_call *c) {
    const mixpi_entropy *p = (const mixpi_entropy *)c->attrs;
    mixp_cross_entropy_backward_args k = mixpi_entropy_backward_of(&p->k);
    MIXPI_TRY(mixpi_check_logits_live(c));
    k.dloss = mixpi_call_dy(c);
    mixpi_call_grad_over(c, 0);
    k.dlogits = mixpi_call_dx(c, 0);
    return k.dlogits.data && k.rows ? MIXPI_RUN(c, cross_entropy_backward, &k) : MIXP_OK;
}

MIXPREC_API mixp_tensor *mixp_cross_entropy(
    mixp_context *ctx, mixp_tensor *logits, mixp_tensor *targets, int32_t ignore) {
    return mixp_cross_entropy_smooth(ctx, logits, targets, ignore, 0.0f);
}

MIXPREC_API mixp_tensor *mixp_cross_entropy_smooth(
    mixp_context *ctx, mixp_tensor *logits, mixp_tensor *targets, int32_t ignore, float smoothing) {
    mixpi_entropy p = MIXPI_ZERO;
    p.k.ignore = ignore;
    p.k.smoothing = mixpi_is_not_0(smoothing) ? smoothing : 0.0f; /* no -0 */
    return mixpi_apply_op(ctx, MIXP_OP_CROSS_ENTROPY, 2, logits, targets, NULL, &p);
}

MIXPREC_API mixp_tensor *mixp_nll(
    mixp_context *ctx, mixp_tensor *x, mixp_tensor *targets, int32_t ignore) {
    mixpi_entropy p = MIXPI_ZERO;
    p.k.ignore = ignore;
    p.k.logs = 1;
    return mixpi_apply_op(ctx, MIXP_OP_NLL, 2, x, targets, NULL, &p);
}

/* --- a product and its cross entropy, some rows at a time --- */

/* Inputs: x, w, the targets, the bias and the class weights; the last two may be missing. */
typedef struct mixpi_chunked {
    mixpi_entropy loss;         /* attributes of the loss of all rows, with logits and
                                   stats of the current chunk                              */
    int64_t chunk, width;       /* rows of a chunk; columns of x and w                     */
    mixp_dtype dtype;           /* dtype of the logits' gradient; the logits are f32       */
    mixp_in x, w, bias;
} mixpi_chunked;

static mixp_result mixpi_chunked_infer(mixp_call *c) {
    const mixpi_chunked *h = (const mixpi_chunked *)c->attrs;
    const mixp_tensor *x = c->in[0], *w = c->in[1], *targets = c->in[2], *bias = c->in[3];
    MIXPI_TRY(mixpi_need_indices_after(c, 2));
    MIXPI_TRY(mixpi_smoothing_check(c, h->loss.k.smoothing));

    /* The shapes of all inputs, and the rows of a chunk. */
    if (x->rank < 1 || w->rank != 2 || w->shape[0] < 1 || w->shape[1] != mixpi_last_dim(x) ||
        targets->count != mixpi_rows_of(x))
        return mixpi_bad_shapes(c, "x[..., in], w[vocab, in] and targets[...]");
    if (bias && (!mixpi_is_real(bias->dtype) || bias->rank != 1 || bias->count != w->shape[0]))
        return mixpi_bad_shapes(c, "the bias must be f32, f16 or bf16 [vocab]");
    mixpi_call_reads_all(c, 31u);
    if (h->chunk < 0)
        return mixp_context_fail(c->ctx, MIXP_ERR_ARGUMENT,
            "linear_cross_entropy: chunk is %.0f rows; it must be at least 1, or 0 for the default",
            (double)h->chunk);

    /* One loss, or one for each target. */
    if (!h->loss.none) return mixpi_call_output_fixed(c, MIXP_F32, 0, NULL);
    return mixpi_call_output_fixed(c, MIXP_F32, targets->rank, targets->shape);
}

/* Rows of the chunk that begins at row `first`. */
static int64_t mixpi_chunked_rows(const mixpi_chunked *h, int64_t first) {
    return mixpi_min(h->chunk, h->loss.k.rows - first);
}

/* Rows [first, ...) of a matrix with `width` columns. */
static mixp_in mixpi_rows_at(mixp_in m, int64_t first, int64_t width) {
    return mixpi_in_at(m, first * width);
}

/* Computes the logits of the chunk that begins at row `first`. */
static mixp_result mixpi_chunked_logits(
    mixp_call *c, const mixpi_chunked *h, int64_t first, mixp_tensor *logits) {
    mixp_in x = mixpi_rows_at(h->x, first, h->width);
    mixp_gemm_args g = mixpi_gemm_of(mixpi_chunked_rows(h, first), h->loss.k.cols, h->width,
        mixpi_stored(x, 0), mixpi_transposed(h->w, 0));
    g.bias = h->bias;
    g.c = mixpi_tensor_out(logits, 0);
    return MIXPI_RUN(c, gemm, &g);
}

/* Memory for one number of each logit of a chunk. */
static mixp_tensor *mixpi_chunked_room(mixp_call *c, const mixpi_chunked *h, mixp_dtype dtype) {
    int64_t count = h->chunk * h->loss.k.cols;
    return mixp_activation(c->ctx, dtype, 1, &count);
}

static void mixpi_chunked_give(mixp_call *c, const mixp_tensor *t) {
    if (t) mixpi_arena_free(c->ctx, &c->ctx->memory.dev, t->data, mixpi_bytes(t));
}

static mixp_result mixpi_chunked_loss(
    mixp_call *c, const mixpi_chunked *h, int64_t first, mixp_tensor *logits) {
    mixp_cross_entropy_args k = h->loss.k;
    k.rows = mixpi_chunked_rows(h, first);
    k.targets += first;
    k.stats += 3 * first;
    k.logits = mixpi_tensor_in(logits);
    k.before = first;
    k.more = first + k.rows < h->loss.k.rows;
    if (k.each) k.each += first;
    return MIXPI_RUN(c, cross_entropy, &k);
}

/* Fills the attributes from the call's inputs. */
static void mixpi_chunked_fill(mixp_call *c, mixpi_chunked *h) {
    mixp_cross_entropy_args *k = &h->loss.k;
    const mixp_tensor *w = c->in[1];
    k->rows = mixpi_rows_of(c->in[0]);
    k->cols = w->shape[0];
    k->targets = (const int32_t *)c->in[2]->data;
    k->weights = mixpi_call_weights(c, 4);
    k->loss = (float *)c->out->data;
    k->each = h->loss.none ? k->loss : NULL;

    /* Rows of a chunk: those asked for, or an eighth, but at least 2^22 logits, for the products'
     * speed. */
    const int64_t eighth = mixpi_ceil_div(k->rows, 8), good = ((int64_t)1 << 22) / k->cols;
    if (!h->chunk) h->chunk = eighth > good ? eighth : good;
    h->chunk = mixpi_min(h->chunk, k->rows);

    h->width = w->shape[1];
    h->dtype = c->in[0]->dtype;
    h->x = mixpi_call_x(c, 0);
    h->w = mixpi_call_x(c, 1);
    h->bias = mixpi_call_x(c, 3);
}

static mixp_result mixpi_chunked_forward(mixp_call *c) {
    mixpi_chunked *h = (mixpi_chunked *)c->attrs;
    mixp_cross_entropy_args *k = &h->loss.k;
    mixp_result r = MIXP_OK;
    mixpi_chunked_fill(c, h);
    if (!k->rows) return mixpi_loss_of_nothing(c, k->sum);
    mixp_tensor *logits = mixpi_chunked_room(c, h, MIXP_F32);
    if (!logits || mixpi_entropy_save(c, k->rows) != MIXP_OK) return MIXP_ERR_MEMORY;
    k->stats = mixpi_saved(c, 0);
    k->counted = mixpi_saved(c, 1);
    mixpi_warn_unless_counts(c, k, k->rows);
    for (int64_t first = 0; first < k->rows && r == MIXP_OK; first += h->chunk) {
        r = mixpi_chunked_logits(c, h, first, logits);
        if (r == MIXP_OK) r = mixpi_chunked_loss(c, h, first, logits);
    }
    mixpi_chunked_give(c, logits);
    return r == MIXP_ERR_ARGUMENT ? mixpi_bad_index(c, 2, "target", k->cols, k->ignore) : r;
}

/* The arrays of a walk over the chunks. dlogits has the dtype of x, which the products read; it
 * is logits where that is f32. */
typedef struct mixpi_chunked_walk {
    const mixpi_chunked *h;
    mixp_tensor *logits, *dlogits;
    mixp_out dx, dw, db;
} mixpi_chunked_walk;

/* Computes the gradient of a chunk's logits, rounded once. */
static mixp_result mixpi_chunked_dlogits(mixp_call *c, const mixpi_chunked_walk *s, int64_t first) {
    mixp_cross_entropy_backward_args k = mixpi_entropy_backward_of(&s->h->loss.k);
    k.rows = mixpi_chunked_rows(s->h, first);
    k.targets += first;
    k.stats += 3 * first;
    k.dloss = k.each ? mixpi_in_at(mixpi_call_dy(c), first) : mixpi_call_dy(c);
    k.logits = mixpi_tensor_in(s->logits);
    k.dlogits = mixpi_tensor_out(s->dlogits, 0);
    return MIXPI_RUN(c, cross_entropy_backward, &k);
}

/* Computes dx of the chunk's rows. */
static mixp_result mixpi_chunked_dx(mixp_call *c, const mixpi_chunked_walk *s, int64_t first) {
    const mixpi_chunked *h = s->h;
    mixp_gemm_args g = mixpi_gemm_of(mixpi_chunked_rows(h, first), h->width, h->loss.k.cols,
        mixpi_stored(mixpi_tensor_in(s->dlogits), 0), mixpi_stored(h->w, 0));
    if (!s->dx.data) return MIXP_OK;
    g.c = mixpi_out_at(s->dx, first * h->width);
    return MIXPI_RUN(c, gemm, &g);
}

/* Adds the chunk's part of dw. */
static mixp_result mixpi_chunked_dw(mixp_call *c, const mixpi_chunked_walk *s, int64_t first) {
    const mixpi_chunked *h = s->h;
    mixp_in x = mixpi_rows_at(h->x, first, h->width);
    mixp_gemm_args g = mixpi_gemm_of(h->loss.k.cols, h->width, mixpi_chunked_rows(h, first),
        mixpi_transposed(mixpi_tensor_in(s->dlogits), 0), mixpi_stored(x, 0));
    if (!s->dw.data) return MIXP_OK;
    g.c = s->dw;
    return MIXPI_RUN(c, gemm, &g);
}

/* Adds the chunk's part of the bias gradient. */
static mixp_result mixpi_chunked_db(mixp_call *c, const mixpi_chunked_walk *s, int64_t first) {
    const mixp_reduce_args k = mixpi_reduce_of(mixpi_tensor_in(s->dlogits),
        mixpi_chunked_rows(s->h, first), s->h->loss.k.cols, 1.0, s->db);
    return k.y.data ? MIXPI_RUN(c, reduce, &k) : MIXP_OK;
}

static mixp_result mixpi_chunked_walk_rows(mixp_call *c, mixpi_chunked_walk s) {
    mixp_result r = MIXP_OK;
    for (int64_t first = 0; first < s.h->loss.k.rows && r == MIXP_OK; first += s.h->chunk) {
        r = mixpi_chunked_logits(c, s.h, first, s.logits);
        if (r == MIXP_OK) r = mixpi_chunked_dlogits(c, &s, first);
        if (r == MIXP_OK) r = mixpi_chunked_dx(c, &s, first);
        if (r == MIXP_OK) r = mixpi_chunked_dw(c, &s, first);
        if (r == MIXP_OK) r = mixpi_chunked_db(c, &s, first);
        s.dw.accumulate = s.db.accumulate = 1;
    }
    return r;
}

/* Can the chunks' parts be added to `to` itself? A low `to` would be rounded with each chunk. */
static int mixpi_chunks_can_add(const mixpi_chunked *h, mixp_out to) {
    return !to.data || to.dtype == MIXP_F32 || h->chunk == h->loss.k.rows;
}

/* Replaces `to` by an f32 sum where the chunks' parts need one. The sum is NULL otherwise. */
static mixp_result mixpi_chunked_sum(
    mixp_call *c, int apart, int64_t count, mixp_out *to, mixp_tensor **sum) {
    *sum = NULL;
    if (!apart) return MIXP_OK;
    *sum = mixp_activation(c->ctx, MIXP_F32, 1, &count);
    if (!*sum) return MIXP_ERR_MEMORY;
    *to = mixpi_tensor_out(*sum, 0);
    return MIXP_OK;
}

/* Rounds the sum into `to`, once. */
static mixp_result mixpi_chunked_round(mixp_call *c, mixp_tensor *sum, mixp_out to) {
    mixp_result r = MIXP_OK;
    if (sum) r = mixpi_add_into(c->ctx, to, mixpi_tensor_in(sum), sum->count);
    mixpi_chunked_give(c, sum);
    return r;
}

/* The gradients of no rows: zeros, unless they accumulate. */
static mixp_result mixpi_chunked_nothing(mixp_call *c, mixp_out to, int64_t count) {
    if (!to.data || to.accumulate) return MIXP_OK;
    return mixpi_fill_with(c->ctx, to, count, 0.0);
}

/* Computes the logits again from x and w. */
static mixp_result mixpi_chunked_backward(mixp_call *c) {
    const mixpi_chunked *h = (const mixpi_chunked *)c->attrs;
    const int64_t cols = h->loss.k.cols, count = cols * h->width;
    mixp_out dx = mixpi_call_dx(c, 0), dw = mixpi_call_dx(c, 1), db = mixpi_call_dx(c, 3);
    mixp_tensor *w_sum, *b_sum;
    mixpi_chunked_walk s = { h, NULL, NULL, dx, dw, db };
    if (!h->loss.k.rows) {
        MIXPI_TRY(mixpi_chunked_nothing(c, dw, count));
        return mixpi_chunked_nothing(c, db, cols);
    }

    /* If x is w, dx must be complete before dw is added. */
    const int twice = dx.data && dx.data == dw.data;
    MIXPI_TRY(mixpi_chunked_sum(c, twice || !mixpi_chunks_can_add(h, dw), count, &s.dw, &w_sum));
    MIXPI_TRY(mixpi_chunked_sum(c, !mixpi_chunks_can_add(h, db), cols, &s.db, &b_sum));
    s.logits = mixpi_chunked_room(c, h, MIXP_F32);
    s.dlogits = h->dtype == MIXP_F32 ? s.logits : mixpi_chunked_room(c, h, h->dtype);
    if (!s.logits || !s.dlogits) return MIXP_ERR_MEMORY;
    mixp_result r = mixpi_chunked_walk_rows(c, s);

    if (s.dlogits != s.logits) mixpi_chunked_give(c, s.dlogits);
    mixpi_chunked_give(c, s.logits);
    if (r == MIXP_OK) r = mixpi_chunked_round(c, b_sum, db);
    return r == MIXP_OK ? mixpi_chunked_round(c, w_sum, dw) : r;
}

MIXPREC_API mixp_tensor *mixp_linear_cross_entropy(mixp_context *ctx, mixp_tensor *x,
    mixp_tensor *w, mixp_tensor *targets, int32_t ignore, int64_t chunk) {
    mixp_tensor *in[5] = { x, w, targets, NULL, NULL };
    mixpi_chunked h = MIXPI_ZERO;
    h.loss.k.ignore = ignore;
    h.chunk = chunk;
    return mixp_apply(ctx, mixp_op_builtin(MIXP_OP_LINEAR_CROSS_ENTROPY), 5, in, 3, &h);
}

/* --- losses of elements --- */

/* Attributes of mse, l1 and the like. */
typedef struct mixpi_compared {
    mixp_loss_args k;
    mixp_reduction reduction;   /* MIXP_REDUCE_BATCHMEAN: the mean over rows               */
} mixpi_compared;

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
        "mixp_kl_div: target is a result of mixp_%s, but log_target is %d: pass log_target %d",
        made, logs, !logs);
}

static mixp_result mixpi_loss_infer(mixp_call *c) {
    const mixpi_compared *p = (const mixpi_compared *)c->attrs;
    const mixp_loss_args *k = &p->k;
    const mixp_tensor *x = c->in[0], *t = c->in[1];
    int bounded = k->kind == MIXP_LOSS_HUBER || k->kind == MIXP_LOSS_SMOOTH_L1;
    if (mixpi_need_real(c, 2, 2) != MIXP_OK) return MIXP_ERR_DTYPE;
    if (!mixpi_shapes_equal(x, t)) return mixpi_bad_shapes(c, "the shapes must be equal");
    mixpi_call_reads_all(c, 3u);
    if (!mixpi_loss_is_even(k->kind)) mixpi_warn_of_maker(c);
    mixpi_warn_of_target(c, k->kind);
    if (bounded && !mixpi_f32_is_positive(k->delta))
        return mixp_context_fail(c->ctx, MIXP_ERR_ARGUMENT,
            "%s: the bound is %g; it must be above 0", c->op->name, (double)k->delta);
    if (p->reduction == MIXP_REDUCE_NONE)
        return mixpi_call_output_fixed(c, MIXP_F32, x->rank, x->shape);
    return mixpi_call_output_fixed(c, MIXP_F32, 0, NULL);
}

static mixp_result mixpi_loss_forward(mixp_call *c) {
    mixpi_compared *p = (mixpi_compared *)c->attrs; /* kind and delta are set already */
    mixp_loss_args *k = &p->k;
    k->n = c->in[0]->count;
    k->over = 1;
    if (p->reduction == MIXP_REDUCE_MEAN) k->over = k->n;
    if (p->reduction == MIXP_REDUCE_BATCHMEAN) k->over = mixpi_rows_of(c->in[0]);
    k->a = mixpi_call_x(c, 0);
    k->target = mixpi_call_x(c, 1);
    k->y = (float *)c->out->data;
    if (p->reduction == MIXP_REDUCE_NONE) k->each = k->y;
    if (!k->n) return mixpi_loss_of_nothing(c, p->reduction == MIXP_REDUCE_SUM);
    return MIXPI_RUN(c, loss, k);
}

/* da (+)= the slopes times the gradients of the elements' losses. */
static mixp_result mixpi_loss_back_each(mixp_call *c, mixp_loss_backward_args k) {
    const mixp_out da = k.da;
    mixp_tensor *one = mixp_activation(c->ctx, MIXP_F32, 0, NULL);
    mixp_tensor *slopes = mixp_activation(c->ctx, MIXP_F32, 1, &k.n);
    if (!one || !slopes) return MIXP_ERR_MEMORY;

    /* The slopes: gradients of losses whose own gradients are 1. */
    k.dloss = mixpi_tensor_in(one);
    k.da = mixpi_tensor_out(slopes, 0);
    mixp_result r = mixpi_fill_with(c->ctx, mixpi_tensor_out(one, 0), 1, 1.0);
    if (r == MIXP_OK) r = MIXPI_RUN(c, loss_backward, &k);

    /* Backward of a product multiplies them by the gradients, and adds to da. */
    const mixp_in slope = mixpi_tensor_in(slopes);
    mixp_binary_args times = mixpi_binary_of(MIXP_BINARY_MUL, slope, slope, da, 1, k.n);
    times.dy = mixpi_call_dy(c);
    times.dx = da;
    if (r == MIXP_OK) r = MIXPI_RUN(c, binary_backward, &times);
    mixpi_chunked_give(c, slopes);
    mixpi_chunked_give(c, one);
    return r;
}

/* The slope by the target, in f32, of a loss that treats x and its target differently. */
static mixp_tensor *mixpi_target_slope(
    mixp_context *ctx, mixp_loss_kind kind, mixp_tensor *x, mixp_tensor *t) {
    const float most = mixp_f32_of_bits(0x7F800000u);
    switch ((int)kind) {
    case MIXP_LOSS_BCE_LOGITS: return mixp_neg(ctx, x);
    case MIXP_LOSS_BCE:
        t = mixp_clamp(ctx, mixp_log1p(ctx, mixp_neg(ctx, x)), MIXPI_BCE_LOG_LEAST, most);
        return mixp_sub(ctx, t, mixp_clamp(ctx, mixp_log(ctx, x), MIXPI_BCE_LOG_LEAST, most));
    case MIXP_LOSS_KL: return mixp_sub(ctx, mixp_add_scalar(ctx, mixp_log(ctx, t), 1.0f), x);
    default:
        x = mixp_add_scalar(ctx, mixp_sub(ctx, t, x), 1.0f);
        return mixp_mul(ctx, mixp_exp(ctx, t), x);
    }
}

/* x in f32. An x that a guard has raised is copied: what reads the copy counts as f32, so that
 * nothing inside a form is low. */
static mixp_tensor *mixpi_as_f32(mixp_context *ctx, mixp_tensor *x) {
    return x && mixpi_plain_dtype(x) != MIXP_F32 ? mixp_cast(ctx, x, MIXP_F32) : x;
}

/* The gradient of the target, by operators: few programs ask for it. */
static mixp_result mixpi_loss_back_target(mixp_call *c) {
    const mixp_loss_args *k = &((const mixpi_compared *)c->attrs)->k;
    const float share = (float)(1.0 / (double)k->over);
    mixp_context *ctx = c->ctx;
    mixp_out dt = mixpi_call_dx(c, 1);
    mixp_tensor *slope;
    if (!dt.data || !k->n) return MIXP_OK;
    const int region = mixpi_open_f32(ctx);
    if (region < 0) return mixpi_failed(ctx);
    slope =
        mixpi_target_slope(ctx, k->kind, mixpi_as_f32(ctx, c->in[0]), mixpi_as_f32(ctx, c->in[1]));
    slope = mixp_mul(ctx, slope, c->out->grad);
    if (k->over != 1) slope = mixp_scale(ctx, slope, share);
    mixp_autocast_close(ctx, region);
    return slope ? mixpi_add_into(ctx, dt, mixpi_tensor_in(slope), k->n) : mixpi_failed(ctx);
}

static mixp_result mixpi_loss_backward(mixp_call *c) {
    const mixpi_compared *p = (const mixpi_compared *)c->attrs;
    const mixp_loss_args *forward = &p->k;
    const int even = mixpi_loss_is_even(forward->kind);
    mixp_result r = MIXP_OK;

    /* An even loss stays the same when its inputs are exchanged: one kernel serves both. */
    for (int i = 0; i <= even && r == MIXP_OK; i++) {
        mixp_loss_backward_args k = MIXPI_ZERO;
        k.kind = forward->kind;
        k.n = forward->n;
        k.over = forward->over;
        k.delta = forward->delta;
        k.dloss = mixpi_call_dy(c);
        k.a = mixpi_call_x(c, i);
        k.target = mixpi_call_x(c, 1 - i);
        k.da = mixpi_call_dx(c, i);
        if (!k.da.data || !k.n) continue;
        r = forward->each ? mixpi_loss_back_each(c, k) : MIXPI_RUN(c, loss_backward, &k);
    }

    /* Other losses make the target's gradient with operators. */
    return even || r != MIXP_OK ? r : mixpi_loss_back_target(c);
}

static mixp_tensor *mixpi_apply_loss(mixp_context *ctx, mixp_op_id id, mixp_loss_kind kind,
    float delta, mixp_tensor *x, mixp_tensor *t, mixp_reduction reduction) {
    mixpi_compared p = MIXPI_ZERO;
    p.k.kind = kind;
    p.k.delta = delta;
    p.reduction = reduction;
    return mixpi_apply_op(ctx, id, 2, x, t, NULL, &p);
}

#define MIXPI_LOSS(name, id, which)                                                           \
    MIXPREC_API mixp_tensor *mixp_##name(mixp_context *ctx, mixp_tensor *x, mixp_tensor *t) { \
        return mixpi_apply_loss(ctx, MIXP_OP_##id, MIXP_LOSS_##which, 0.0f, x, t,             \
                                MIXP_REDUCE_MEAN);                                            \
    }
MIXPI_LOSS(mse, MSE, MSE)
MIXPI_LOSS(bce_with_logits, BCE_WITH_LOGITS, BCE_LOGITS)
MIXPI_LOSS(bce, BCE, BCE)
MIXPI_LOSS(l1, L1, L1)
#undef MIXPI_LOSS

MIXPREC_API mixp_tensor *mixp_huber(
    mixp_context *ctx, mixp_tensor *x, mixp_tensor *target, float delta) {
    return mixpi_apply_loss(
        ctx, MIXP_OP_HUBER, MIXP_LOSS_HUBER, delta, x, target, MIXP_REDUCE_MEAN);
}

MIXPREC_API mixp_tensor *mixp_smooth_l1(
    mixp_context *ctx, mixp_tensor *x, mixp_tensor *target, float beta) {
    int plain = mixp_bits_of_f32(beta) << 1 == 0;
    return mixpi_apply_loss(ctx, MIXP_OP_SMOOTH_L1, plain ? MIXP_LOSS_L1 : MIXP_LOSS_SMOOTH_L1,
        beta, x, target, MIXP_REDUCE_MEAN);
}

MIXPREC_API mixp_tensor *mixp_kl_div(
    mixp_context *ctx, mixp_tensor *x, mixp_tensor *target, int log_target) {
    return mixpi_apply_loss(ctx, MIXP_OP_KL_DIV, log_target ? MIXP_LOSS_KL_LOG : MIXP_LOSS_KL, 0.0f,
        x, target, MIXP_REDUCE_BATCHMEAN);
}
