#pragma once
#include "products.c"
#include "elementwise.c"
/* --- softmax, norms -------------------------------------------------------------------- */

static mixp_result mixpi_softmax_forward(mixp_call *c) {
    mixp_softmax_args *k = (mixp_softmax_args *)c->attrs; /* log_of is set already */
    k->rows = mixpi_rows_of(c->out);
    k->cols = mixpi_last_dim(c->out);
    k->a = mixpi_call_x(c, 0);
    k->y = mixpi_call_y(c);
    mixpi_call_reads_all(c, MIXP_READS_RESULT);
    return MIXPI_RUN(c, softmax, k);
}

static mixp_result mixpi_softmax_backward(mixp_call *c) {
    const mixp_softmax_args *forward = (const mixp_softmax_args *)c->attrs;
    mixp_softmax_backward_args k = MIXPI_ZERO;
    k.rows = forward->rows;
    k.cols = forward->cols;
    k.log_of = forward->log_of;
    k.dy = mixpi_call_dy(c);
    k.y = mixpi_tensor_in(c->out);
    k.da = mixpi_call_dx(c, 0);
    return k.da.data ? MIXPI_RUN(c, softmax_backward, &k) : MIXP_OK;
}

static mixp_tensor *mixpi_apply_softmax(
    mixp_context *ctx, mixp_op_id id, mixp_tensor *x, int log_of) {
    mixp_softmax_args k = MIXPI_ZERO;
    k.log_of = log_of;
    return mixpi_apply_one(ctx, id, x, &k);
}

MIXPREC_API mixp_tensor *mixp_softmax(mixp_context *ctx, mixp_tensor *x) {
    return mixpi_apply_softmax(ctx, MIXP_OP_SOFTMAX, x, 0);
}
MIXPREC_API mixp_tensor *mixp_log_softmax(mixp_context *ctx, mixp_tensor *x) {
    return mixpi_apply_softmax(ctx, MIXP_OP_LOG_SOFTMAX, x, 1);
}

/* Has t the shape of the last dimensions of x? */
static int mixpi_is_tail(const mixp_tensor *x, const mixp_tensor *t) {
    if (t->rank < 1 || t->rank > x->rank) return 0;
    return memcmp(t->shape, x->shape + (x->rank - t->rank), (size_t)t->rank * sizeof *t->shape) ==
           0;
}

static mixp_result mixpi_norm_infer(mixp_call *c) {
    const mixp_norm_args *k = (const mixp_norm_args *)c->attrs;
    if (mixpi_need_real(c, 1, 3) != MIXP_OK) return MIXP_ERR_DTYPE;
    if (mixp_bits_of_f32(k->eps) - 1u >= 0x7F7FFFFFu) /* bits: not positive, or not finite */
        return mixp_context_fail(c->ctx, MIXP_ERR_ARGUMENT, "%s: eps is %g; it must be above 0",
            c->op->name, (double)k->eps);
    if (c->in[0]->rank < 1) return mixpi_bad_shapes(c, "x[..., n] needs a last dimension");
    for (int i = 1; i < 3; i++)
        if (c->in[i] && !mixpi_is_tail(c->in[0], c->in[i]))
            return mixpi_bad_shapes(c, "gamma and beta must have the shape of x's last dimensions");
    if (c->in[1] && c->in[2] && c->in[1]->rank != c->in[2]->rank)
        return mixpi_bad_shapes(c, "gamma and beta must have the same shape");
    return mixpi_same_infer(c);
}

/* A norm that computes a sum and runs again (mixp_recompute) finds the arrays in new memory. */
static void mixpi_norm_again(const mixp_call *c, mixp_norm_args *k) {
    const mixpi_tape_entry *sum = k->b.data ? mixpi_entry_before(c) : NULL;
    if (!sum || sum->call.out != c->in[0]) return;
    k->a = mixpi_call_x(&sum->call, 0);
    k->b = mixpi_call_x(&sum->call, 1);
    k->sum = mixpi_tensor_out(c->in[0], 0);
}

static mixp_result mixpi_norm_forward(mixp_call *c) {
    mixp_norm_args *k = (mixp_norm_args *)c->attrs; /* rms and eps are set already */

    /* A row is what gamma or beta covers, otherwise the last dimension. */
    const mixp_tensor *like = c->in[1] ? c->in[1] : c->in[2];
    k->cols = like ? like->count : mixpi_last_dim(c->in[0]);
    k->rows = c->out->count / k->cols;
    if (!mixp_call_save(c, 0, MIXP_F32, 1, &k->rows) ||
        !mixp_call_save(c, 1, MIXP_F32, 1, &k->rows))
        return MIXP_ERR_MEMORY;

    /* The gradient of x reads x and gamma; gamma's reads x, and beta's neither. */
    mixp_call_reads(c, 0, 3u);
    mixp_call_reads(c, 1, 1u);
    mixp_call_reads(c, 2, 0);

    k->gamma = mixpi_call_x(c, 1);
    k->beta = mixpi_call_x(c, 2);
    k->y = mixpi_call_y(c);
    k->mean = mixpi_saved(c, 0);
    k->rstd = mixpi_saved(c, 1);

    /* With a second array, the kernel also adds x. */
    mixpi_norm_again(c, k);
    if (k->b.data) return MIXPI_RUN(c, add_norm, k);
    k->a = mixpi_call_x(c, 0);
    return MIXPI_RUN(c, norm, k);
}

/* The sum that this norm computed, if the gradient of the sum's second term is still to be made and
 * is only a cast of the sum's gradient, which is complete; otherwise NULL. */
static mixp_call *mixpi_norm_sum(const mixp_call *c) {
    const mixp_norm_args *k = (const mixp_norm_args *)c->attrs;
    mixpi_tape_entry *sum = k->b.data ? mixpi_entry_before(c) : NULL;
    if (!sum || sum->call.out != c->in[0] || c->in[0]->dtype != MIXP_F32) return NULL;
    const mixp_tensor *b = sum->call.in[1];
    if (!b->own.from_tape || b->own.pending || b == sum->call.in[0]) return NULL;
    return b->dtype == MIXP_F32 ? NULL : &sum->call;
}

/* A second copy of da, for the second term of that sum. */
static mixp_out mixpi_norm_db(const mixp_call *c) {
    mixp_call *sum = mixpi_norm_sum(c);
    mixp_out db = mixpi_tensor_out(NULL, 0);
    if (sum) db = mixpi_call_dx(sum, 1);
    if (db.data) mixpi_entry(sum)->made = 1 << 1;
    return db;
}

static mixp_result mixpi_norm_backward(mixp_call *c) {
    const mixp_norm_args *forward = (const mixp_norm_args *)c->attrs;
    mixp_norm_backward_args k = MIXPI_ZERO;
    k.rows = forward->rows;
    k.cols = forward->cols;
    k.rms = forward->rms;
    k.dy = mixpi_call_dy(c);
    k.a = mixpi_call_x(c, 0);
    k.gamma = forward->gamma;
    k.mean = forward->mean;
    k.rstd = forward->rstd;
    k.da = mixpi_call_dx(c, 0);
    k.db = mixpi_norm_db(c);
    k.dgamma = mixpi_call_dx(c, 1);
    k.dbeta = mixpi_call_dx(c, 2);
    return MIXPI_RUN(c, norm_backward, &k);
}

static mixp_norm_args mixpi_norm_of(int rms, float eps) {
    mixp_norm_args k = MIXPI_ZERO;
    k.rms = rms;
    k.eps = eps;
    return k;
}

MIXPREC_API mixp_tensor *mixp_layer_norm(
    mixp_context *ctx, mixp_tensor *x, mixp_tensor *gamma, mixp_tensor *beta, float eps) {
    mixp_norm_args k = mixpi_norm_of(0, eps);
    return mixpi_apply_op(ctx, MIXP_OP_LAYER_NORM, 1, x, gamma, beta, &k);
}

MIXPREC_API mixp_tensor *mixp_rms_norm(
    mixp_context *ctx, mixp_tensor *x, mixp_tensor *gamma, float eps) {
    mixp_norm_args k = mixpi_norm_of(1, eps);
    return mixpi_apply_op(ctx, MIXP_OP_RMS_NORM, 1, x, gamma, NULL, &k);
}

/* --- a sum and its norm ---
 *
 * Two operators on the tape that share one kernel where possible: the norm's forward computes the
 * sum. The sum must not be looked at, nor read by a cast, before the norm has run. A guard's looks,
 * observers and inputs of class LOW therefore use separate kernels.
 */
static int mixpi_adds_norm(
    mixp_context *ctx, const mixp_tensor *a, const mixp_tensor *b, mixp_op_id norm) {
    const int watched = mixpi_watched(ctx);
    if (!ctx->device->kernels->add_norm) return 0;
    if (watched & (MIXPI_SAMPLED | MIXPI_OBSERVED)) return 0;
    if (mixpi_class_of(ctx, mixp_op_builtin(MIXP_OP_ADD)) == MIXP_CLASS_LOW ||
        mixpi_class_of(ctx, mixp_op_builtin(norm)) == MIXP_CLASS_LOW)
        return 0;
    if (!mixpi_is_live(a) || !mixpi_is_live(b)) return 0;
    if (a->rank != b->rank || a->rank < 1 || a->count < 1) return 0;
    return memcmp(a->shape, b->shape, (size_t)a->rank * sizeof *a->shape) == 0;
}

/* Records the sum without computing it, and passes its operands to the norm. */
static mixp_tensor *mixpi_sum_before(
    mixp_context *ctx, mixp_tensor *a, mixp_tensor *b, mixp_norm_args *norm) {
    mixp_binary_args k = MIXPI_ZERO;
    k.op = MIXP_BINARY_ADD;
    k.which = MIXPI_SUM_LATER;
    mixp_tensor *sum = mixpi_apply_op(ctx, MIXP_OP_ADD, 2, a, b, NULL, &k);
    if (!sum) return NULL;
    norm->a = mixpi_tensor_in(a);
    norm->b = mixpi_tensor_in(b);
    norm->sum = mixpi_tensor_out(sum, 0);
    return sum;
}

/* Counts the recorded operators that read input i of this call; -1 if no product made the input. A
 * product's backward does not read the product's result. */
static int mixpi_call_readers(const mixp_call *c, int i) {
    const mixp_op *makers[2];
    int readers = 0, made = 0, k;
    makers[0] = mixp_op_builtin(MIXP_OP_LINEAR);
    makers[1] = mixp_op_builtin(MIXP_OP_MATMUL);
    for (const mixpi_tape_entry *e = c->ctx->tape.newest; e; e = e->older) {
        if (e->call.out == c->in[i])
            made =
                e->call.op == makers[0] || e->call.op == makers[1] || e->call.op == &mixpi_mlp_op;
        for (k = 0; k < e->call.n_in; k++) readers += e->call.in[k] == c->in[i];
    }
    return made ? readers : -1;
}

/* Releases a disposable term of the sum that no other operator reads: no gradient needs its
 * values. */
static void mixpi_add_norm_give(mixp_context *ctx, mixp_tensor *term) {
    if (!term->own.disposable || term->own.spent || term->requires_grad) return;
    mixp_call reader = MIXPI_ZERO;
    reader.ctx = ctx;
    reader.in = &term;
    if (mixpi_call_readers(&reader, 0) != 1) return;
    term->own.spent = 1;
    mixpi_arena_free(ctx, &ctx->memory.dev, term->data, mixpi_bytes(term));
}

static mixp_tensor *mixpi_add_norm(
    mixp_context *ctx, mixp_op_id id, mixp_norm_args k, mixp_tensor *const *in, mixp_tensor **sum) {
    if (sum) *sum = NULL;
    if (!ctx) return NULL;
    int joined = mixpi_adds_norm(ctx, in[0], in[1], id);
    mixp_tensor *s = joined ? mixpi_sum_before(ctx, in[0], in[1], &k) : mixp_add(ctx, in[0], in[1]);
    if (!s) return NULL;
    mixp_tensor *y = mixpi_apply_op(ctx, id, 1, s, in[2], in[3], &k);
    if (y && joined && s->own.from_tape) mixpi_add_norm_give(ctx, in[1]);
    if (sum && y) *sum = s;
    return y;
}

MIXPREC_API mixp_tensor *mixp_add_layer_norm(mixp_context *ctx, mixp_tensor *a, mixp_tensor *b,
    mixp_tensor *gamma, mixp_tensor *beta, float eps, mixp_tensor **sum) {
    mixp_tensor *in[4] = { a, b, gamma, beta };
    return mixpi_add_norm(ctx, MIXP_OP_LAYER_NORM, mixpi_norm_of(0, eps), in, sum);
}

MIXPREC_API mixp_tensor *mixp_add_rms_norm(mixp_context *ctx, mixp_tensor *a, mixp_tensor *b,
    mixp_tensor *gamma, float eps, mixp_tensor **sum) {
    mixp_tensor *in[4] = { a, b, gamma, NULL };
    return mixpi_add_norm(ctx, MIXP_OP_RMS_NORM, mixpi_norm_of(1, eps), in, sum);
}
