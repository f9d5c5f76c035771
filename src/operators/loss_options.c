#pragma once
#include "composed.c"
/* --- losses with options ------------------------------------------------------------------- */

/* The options of a loss, as a set. */
enum {
    MIXPI_OPTION_WEIGHT = 1,
    MIXPI_OPTION_POS_WEIGHT = 2,
    MIXPI_OPTION_SMOOTHING = 4,
    MIXPI_OPTION_IGNORE = 8,
    MIXPI_OPTION_BOUND = 16,
    MIXPI_OPTION_LOG_TARGET = 32,
    MIXPI_OPTION_BIAS = 64,
    MIXPI_OPTION_CHUNK = 128,
    MIXPI_OPTION_BATCHMEAN = 256
};

static const char *const mixpi_option_names[] = {
    "weight", "pos_weight", "smoothing", "ignore", "bound", "log_target", "bias", "chunk",
    "MIXP_REDUCE_BATCHMEAN"
};

/* The options that a description sets. */
static unsigned mixpi_options_set(const mixp_loss_desc *d) {
    const int set[] = { d->weight != NULL, d->pos_weight != NULL, mixpi_is_not_0(d->smoothing),
        d->ignores, mixpi_is_not_0(d->bound), d->log_target, d->bias != NULL, d->chunk != 0,
        d->reduction == MIXP_REDUCE_BATCHMEAN };
    unsigned options = 0;
    for (size_t i = 0; i < sizeof set / sizeof set[0]; i++) options |= (set[i] != 0 ? 1u : 0u) << i;
    return options;
}

/* Copies desc, or zeros for NULL. Fails if it sets an option that the loss does not have. */
static mixp_result mixpi_options_of(mixp_context *ctx, const char *loss, unsigned has,
    const mixp_loss_desc *desc, mixp_loss_desc *d) {
    int i = 0;
    memset(d, 0, sizeof *d);
    if (desc) *d = *desc;
    if ((unsigned)d->reduction >= MIXP_REDUCE_COUNT)
        return mixp_context_fail(ctx, MIXP_ERR_ARGUMENT,
            "%s: reduction is %d; pass MIXP_REDUCE_MEAN, MIXP_REDUCE_SUM or MIXP_REDUCE_NONE", loss,
            (int)d->reduction);
    unsigned more = mixpi_options_set(d) & ~has;
    if (!more) return MIXP_OK;
    while (!(more >> i & 1u)) i++;
    return mixp_context_fail(ctx, MIXP_ERR_ARGUMENT,
        "%s: this loss has no option %s; leave the field 0, or reduce with MIXP_REDUCE_NONE and "
        "apply operators to the result",
        loss, mixpi_option_names[i]);
}

/* --- class weights --- */

static mixp_result mixpi_class_weights_infer(mixp_call *c) {
    const int64_t count = c->in[0]->count + 1;
    return mixpi_call_output_fixed(c, MIXP_I32, 1, &count);
}

/* The weights in f32, then their mean. */
static mixp_result mixpi_class_weights_forward(mixp_call *c) {
    const int64_t classes = c->in[0]->count;
    float *to = (float *)c->out->data;
    const mixp_reduce_args k = mixpi_reduce_of(mixpi_in(to, MIXP_F32), classes, 1,
        1.0 / (double)classes, mixpi_out_to(to + classes, MIXP_F32, 0));
    MIXPI_TRY(mixpi_convert_to(c->ctx, mixpi_out_to(to, MIXP_F32, 0), mixpi_call_x(c, 0), classes));
    return MIXPI_RUN(c, reduce, &k);
}

/* The array of weights that the kernels of cross entropy read. It is f32, in a tensor of i32, so
 * that autocast does not round it. */
static mixp_tensor *mixpi_class_weights(
    mixp_context *ctx, const char *loss, mixp_tensor *weight, int64_t classes) {
    static const mixp_op op = { "class_weights", MIXP_CLASS_KEEP, 0, mixpi_class_weights_infer,
        mixpi_class_weights_forward, NULL, NULL };
    mixpi_outer o;
    mixp_call *c = mixpi_outer_call(&o, ctx, loss, 1, weight, NULL, NULL);
    if (!c) return NULL;

    /* One weight for each class; class weights do not train. */
    if (!mixpi_is_real(weight->dtype) || weight->rank != 1 || weight->count != classes) {
        char text[224];
        mixpi_shape_text(weight->rank, weight->shape, text, sizeof text);
        mixp_context_fail(ctx, MIXP_ERR_SHAPE,
            "%s: weight is %s %s; it must be f32, f16 or bf16 [%.0f], a weight for each class",
            loss, mixp_dtype_name(weight->dtype), text, (double)classes);
        return NULL;
    }
    if (mixpi_wants_grad(weight) && !mixpi_is_no_grad(ctx)) {
        mixp_context_fail(ctx, MIXP_ERR_ARGUMENT,
            "%s: weight requires a gradient, and class weights get none: pass mixp_detach of it",
            loss);
        return NULL;
    }
    return mixp_apply(ctx, &op, 1, &weight, 1, NULL);
}

/* --- reductions --- */

/* Reduces y, as desc says, in f32. */
static mixp_tensor *mixpi_reduced_loss(mixp_context *ctx, mixp_tensor *y, const mixp_loss_desc *d) {
    const double first = y && y->rank ? (double)y->shape[0] : 1.0;
    if (d->reduction == MIXP_REDUCE_NONE) return y;
    if (d->reduction == MIXP_REDUCE_MEAN) return mixp_mean(ctx, y, MIXP_ALL, 0);
    y = mixp_sum(ctx, y, MIXP_ALL, 0);
    return d->reduction == MIXP_REDUCE_SUM ? y : mixp_scale(ctx, y, (float)(1.0 / first));
}

/* The loss of elements, times the elements' weights. */
static mixp_tensor *mixpi_form_weighted(mixp_context *ctx, mixp_tensor *y, const mixpi_form *p) {
    if (p->desc->weight) y = mixp_mul(ctx, y, p->desc->weight);
    return mixpi_reduced_loss(ctx, y, p->desc);
}

static mixp_tensor *mixpi_apply_loss_form(mixp_context *ctx, mixp_tensor *x, mixp_tensor *t,
    const mixp_loss_desc *d,
    mixp_tensor *(*of)(mixp_context *, mixp_tensor *, const mixpi_form *)) {
    mixpi_form p = MIXPI_ZERO;
    p.desc = d;
    p.target = t;
    p.of = of;
    return x ? mixpi_apply_form(ctx, x, &p) : NULL;
}

/* --- cross entropy --- */

/* -(the sum over the classes of weight target' log softmax x), target' smoothed. */
static mixp_tensor *mixpi_form_soft_entropy(
    mixp_context *ctx, mixp_tensor *x, const mixpi_form *p) {
    const float share = p->desc->smoothing;
    mixp_loss_desc d = *p->desc;
    mixp_tensor *t = p->target, *y = mixp_log_softmax(ctx, x);
    const double rows = (double)mixpi_rows_of(x);
    if (share > 0.0f)
        t = mixpi_apply_unary_by(ctx, MIXP_OP_ADD_SCALAR, MIXP_UNARY_AFFINE, mixpi_as_f32(ctx, t),
            1.0f - share, share / (float)mixpi_last_dim(x));
    y = mixp_mul(ctx, y, t);
    if (d.weight) y = mixp_mul(ctx, y, d.weight);
    if (d.reduction == MIXP_REDUCE_NONE) return mixp_neg(ctx, mixp_sum(ctx, y, -1, 0));
    y = mixp_neg(ctx, mixp_sum(ctx, y, MIXP_ALL, 0));
    if (d.reduction == MIXP_REDUCE_SUM) return y;
    return mixp_scale(ctx, y, (float)(1.0 / rows));
}

/* Cross entropy of targets that are probabilities. */
static mixp_tensor *mixpi_soft_entropy(
    mixp_context *ctx, mixp_tensor *x, mixp_tensor *t, const mixp_loss_desc *d) {
    mixpi_outer o;
    mixp_call *c = mixpi_outer_call(&o, ctx, "cross_entropy", 2, x, t, NULL);
    if (!c || mixpi_need_real(c, 2, 2) != MIXP_OK) return NULL;
    if (mixpi_smoothing_check(c, d->smoothing) != MIXP_OK) return NULL;

    /* The options must fit targets that are probabilities of x's shape. */
    if (d->ignores) {
        mixp_context_fail(ctx, MIXP_ERR_ARGUMENT,
            "cross_entropy: targets that are probabilities have no option ignore; reduce with "
            "MIXP_REDUCE_NONE and mask the rows");
        return NULL;
    }
    if (x->rank < 1 || !mixpi_shapes_equal(x, t)) {
        mixpi_bad_shapes(c, "targets are i32 indices [...], or probabilities of x's shape");
        return NULL;
    }

    /* Weights that do not fit: class_weights says why. */
    if (d->weight && (d->weight->rank != 1 || d->weight->count != mixpi_last_dim(x))) {
        mixpi_class_weights(ctx, "cross_entropy", d->weight, mixpi_last_dim(x));
        return NULL;
    }

    mixpi_warn_of_maker(c);
    return mixpi_apply_loss_form(ctx, x, t, d, mixpi_form_soft_entropy);
}

/* The attributes of a cross entropy with these options. */
static mixpi_entropy mixpi_entropy_of(const mixp_loss_desc *d, int logs) {
    mixpi_entropy p = MIXPI_ZERO;
    p.k.ignore = d->ignores ? d->ignore : MIXP_IGNORE;
    p.k.smoothing = mixpi_is_not_0(d->smoothing) ? d->smoothing : 0.0f; /* no -0 */
    p.k.logs = logs;
    p.k.sum = d->reduction == MIXP_REDUCE_SUM;
    p.none = d->reduction == MIXP_REDUCE_NONE;
    return p;
}

static mixp_tensor *mixpi_apply_entropy(
    mixp_context *ctx, mixp_op_id id, mixp_tensor *x, mixp_tensor *t, const mixp_loss_desc *d) {
    const mixp_op *op = mixp_op_builtin(id);
    const mixpi_entropy p = mixpi_entropy_of(d, id == MIXP_OP_NLL);
    mixp_tensor *weights = NULL;
    if (id == MIXP_OP_CROSS_ENTROPY && mixpi_is_live(t) && mixpi_is_real(t->dtype))
        return mixpi_soft_entropy(ctx, x, t, d);
    if (mixpi_check_input(ctx, op, 0, 1, x) != MIXP_OK) return NULL;
    if (d->weight) weights = mixpi_class_weights(ctx, op->name, d->weight, mixpi_last_dim(x));
    if (d->weight && !weights) return NULL;
    return mixpi_apply_op(ctx, id, 2, x, t, weights, &p);
}

MIXPREC_API mixp_tensor *mixp_linear_cross_entropy_apply(mixp_context *ctx, mixp_tensor *x,
    mixp_tensor *w, mixp_tensor *targets, const mixp_loss_desc *desc) {
    const mixp_op *op = mixp_op_builtin(MIXP_OP_LINEAR_CROSS_ENTROPY);
    const unsigned has = MIXPI_OPTION_WEIGHT | MIXPI_OPTION_SMOOTHING | MIXPI_OPTION_IGNORE |
                         MIXPI_OPTION_BIAS | MIXPI_OPTION_CHUNK;
    mixp_tensor *in[5] = { x, w, targets, NULL, NULL };
    mixp_loss_desc d;
    if (!ctx || mixpi_options_of(ctx, op->name, has, desc, &d) != MIXP_OK) return NULL;
    if (mixpi_check_input(ctx, op, 1, 2, w) != MIXP_OK) return NULL;
    in[3] = d.bias;
    if (d.weight) in[4] = mixpi_class_weights(ctx, op->name, d.weight, w->rank ? w->shape[0] : 1);
    if (d.weight && !in[4]) return NULL;
    mixpi_chunked h = MIXPI_ZERO;
    h.loss = mixpi_entropy_of(&d, 0);
    h.chunk = d.chunk;
    return mixp_apply(ctx, op, 5, in, 3, &h);
}

/* --- losses of elements --- */

/* A loss of elements, for mixp_loss_apply. */
typedef struct mixpi_loss_row {
    mixp_op_id     id;
    mixp_loss_kind kind;
    unsigned       has;         /* set of its options                                      */
} mixpi_loss_row;

/* t pos_weight log(1 + e^-x) + (1 - t) log(1 + e^x): nothing cancels. */
static mixp_tensor *mixpi_form_pos_weight(mixp_context *ctx, mixp_tensor *x, const mixpi_form *p) {
    mixp_tensor *t = mixpi_as_f32(ctx, p->target), *y;
    y = mixp_mul(
        ctx, mixp_mul(ctx, t, p->desc->pos_weight), mixp_softplus(ctx, mixp_neg(ctx, x), 1.0f));
    t = mixp_mul(ctx, mixp_rsub(ctx, t, 1.0f), mixp_softplus(ctx, x, 1.0f));
    return mixpi_form_weighted(ctx, mixp_add(ctx, y, t), p);
}

/* Do weights of elements repeat to x's shape, without making it larger? */
static mixp_result mixpi_weights_fit(mixp_call *c, mixp_tensor *w, const char *name) {
    const mixp_tensor *x = c->in[0];
    int fits = !w || (mixpi_is_live(w) && mixpi_is_real(w->dtype) && w->rank <= x->rank);
    for (int i = 1; w && fits && i <= w->rank; i++)
        fits = w->shape[w->rank - i] == 1 || w->shape[w->rank - i] == x->shape[x->rank - i];
    if (fits) return MIXP_OK;
    return mixp_context_fail(c->ctx, MIXP_ERR_SHAPE,
        "%s: %s does not fit x; it must be f32, f16 or bf16 of this step, and aligned at the right "
        "its dimensions must be 1, or equal to x's",
        c->op->name, name);
}

static mixp_tensor *mixpi_apply_compared(mixp_context *ctx, const mixpi_loss_row *l, mixp_tensor *x,
    mixp_tensor *t, const mixp_loss_desc *d) {
    const float bound = mixpi_is_not_0(d->bound) ? d->bound : 1.0f;
    mixp_loss_kind kind = d->log_target ? MIXP_LOSS_KL_LOG : l->kind;
    mixpi_outer o;
    if (!d->weight && !d->pos_weight && d->reduction != MIXP_REDUCE_BATCHMEAN)
        return mixpi_apply_loss(ctx, l->id, kind, bound, x, t, d->reduction);
    mixp_call *c = mixpi_outer_call(&o, ctx, mixp_op_builtin(l->id)->name, 2, x, t, NULL);
    if (!c || mixpi_weights_fit(c, d->weight, "weight") != MIXP_OK) return NULL;
    if (mixpi_weights_fit(c, d->pos_weight, "pos_weight") != MIXP_OK) return NULL;

    /* Without weights of positive targets, the losses of the elements are one operator. */
    if (!d->pos_weight) {
        x = mixpi_apply_loss(ctx, l->id, kind, bound, x, t, MIXP_REDUCE_NONE);
        return mixpi_apply_loss_form(ctx, x, NULL, d, mixpi_form_weighted);
    }
    if (mixpi_need_real(c, 2, 2) != MIXP_OK) return NULL;
    if (!mixpi_shapes_equal(x, t)) {
        mixpi_bad_shapes(c, "the shapes must be equal");
        return NULL;
    }
    mixpi_warn_of_maker(c);
    return mixpi_apply_loss_form(ctx, x, t, d, mixpi_form_pos_weight);
}

MIXPREC_API mixp_tensor *mixp_loss_apply(mixp_context *ctx, mixp_op_id loss, mixp_tensor *x,
    mixp_tensor *target, const mixp_loss_desc *desc) {
    static const mixpi_loss_row kinds[] = { { MIXP_OP_CROSS_ENTROPY, MIXP_LOSS_COUNT,
                                                MIXPI_OPTION_WEIGHT | MIXPI_OPTION_SMOOTHING |
                                                    MIXPI_OPTION_IGNORE },
        { MIXP_OP_NLL, MIXP_LOSS_COUNT, MIXPI_OPTION_WEIGHT | MIXPI_OPTION_IGNORE },
        { MIXP_OP_MSE, MIXP_LOSS_MSE, 0 }, { MIXP_OP_L1, MIXP_LOSS_L1, 0 },
        { MIXP_OP_SMOOTH_L1, MIXP_LOSS_SMOOTH_L1, MIXPI_OPTION_BOUND },
        { MIXP_OP_HUBER, MIXP_LOSS_HUBER, MIXPI_OPTION_BOUND },
        { MIXP_OP_BCE, MIXP_LOSS_BCE, MIXPI_OPTION_WEIGHT },
        { MIXP_OP_BCE_WITH_LOGITS, MIXP_LOSS_BCE_LOGITS,
            MIXPI_OPTION_WEIGHT | MIXPI_OPTION_POS_WEIGHT },
        { MIXP_OP_KL_DIV, MIXP_LOSS_KL, MIXPI_OPTION_LOG_TARGET | MIXPI_OPTION_BATCHMEAN } };
    const size_t n = sizeof kinds / sizeof kinds[0];
    mixp_loss_desc d;
    size_t i = 0;
    if (!ctx) return NULL;

    /* The row of the loss says which options it has. */
    while (i < n && kinds[i].id != loss) i++;
    if (i == n) {
        mixp_context_fail(ctx, MIXP_ERR_ARGUMENT,
            "mixp_loss_apply: %d is not the id of a loss of two tensors; pass such an id, for "
            "example MIXP_OP_CROSS_ENTROPY",
            (int)loss);
        return NULL;
    }
    if (mixpi_options_of(ctx, mixp_op_builtin(loss)->name, kinds[i].has, desc, &d) != MIXP_OK)
        return NULL;

    if (kinds[i].kind == MIXP_LOSS_COUNT) return mixpi_apply_entropy(ctx, loss, x, target, &d);
    return mixpi_apply_compared(ctx, &kinds[i], x, target, &d);
}
