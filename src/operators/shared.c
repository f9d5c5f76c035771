#pragma once
#include "../operators.h"
#include "cast.c"
/* ==== 8. OPERATORS (implementation) =================================================== */

/* --- small helpers --------------------------------------------------------------------- */

/* Is x above 0 and finite? */
static int mixpi_f32_is_positive(float x) { return mixp_bits_of_f32(x) - 1u < 0x7F7FFFFFu; }

/* Is x neither 0 nor -0? */
static int mixpi_is_not_0(float x) { return mixp_bits_of_f32(x) << 1 != 0; }

static int64_t mixpi_last_dim(const mixp_tensor *t) { return t->rank ? t->shape[t->rank - 1] : 1; }
static int64_t mixpi_rows_of(const mixp_tensor *t) {
    int64_t rows = 1;
    for (int i = 0; i + 1 < t->rank; i++) rows *= t->shape[i];
    return rows;
}

/* Applies a built-in operator to up to three inputs. Fails if one of the first `required` is
 * NULL. */
static mixp_tensor *mixpi_apply_op(mixp_context *ctx, mixp_op_id id, int required, mixp_tensor *a,
    mixp_tensor *b, mixp_tensor *c, const void *attrs) {
    mixp_tensor *in[3] = { a, b, c };
    return mixp_apply(ctx, mixp_op_builtin(id), 3, in, required, attrs);
}

static mixp_tensor *mixpi_apply_one(
    mixp_context *ctx, mixp_op_id id, mixp_tensor *x, const void *attrs) {
    return mixpi_apply_op(ctx, id, 1, x, NULL, NULL, attrs);
}

/* Arguments of an operator's kernels: input i, the result and, in backward, the result's gradient
 * and the gradient of input i. data NULL: the tensor is missing, or the gradient is not wanted. */
static mixp_in mixpi_call_x(const mixp_call *c, int i) { return mixpi_tensor_in(c->in[i]); }
static mixp_in mixpi_call_dy(const mixp_call *c) { return mixpi_tensor_in(c->out->grad); }
static mixp_out mixpi_call_y(const mixp_call *c) { return mixpi_tensor_out(c->out, 0); }
static mixp_out mixpi_call_dx(mixp_call *c, int i) {
    int accumulate = 0;
    const mixp_tensor *grad = mixp_call_grad(c, i, &accumulate);
    return mixpi_tensor_out(grad, accumulate);
}

/* For operators whose single function passes values forward and gradients back: from the input to
 * the result, or, once the result has a gradient, from that gradient to the input's gradient. */
static mixp_in mixpi_call_from(const mixp_call *c) {
    return c->out->grad ? mixpi_call_dy(c) : mixpi_call_x(c, 0);
}
static mixp_out mixpi_call_to(mixp_call *c) {
    return c->out->grad ? mixpi_call_dx(c, 0) : mixpi_call_y(c);
}

/* An f32 array that forward saved for backward. */
static float *mixpi_saved(const mixp_call *c, int slot) { return (float *)c->saved[slot]->data; }

/* Says how to convert data of a dtype with which no operator computes. */
static const char *mixpi_real_cure(mixp_dtype dtype) {
    if (mixpi_is_buffer_dtype(dtype)) return "; convert it with mixp_cast";
    return "; convert the data with mixp_convert before mixp_input";
}

/* Fails if one of the first `required` of `count` inputs is missing, or an input is not real. */
static mixp_result mixpi_need_real(mixp_call *c, int required, int count) {
    char quoted[MIXPI_QUOTED];
    for (int i = 0; i < count; i++) {
        const mixp_tensor *t = c->in[i];
        if (!t && i < required)
            return mixp_context_fail(
                c->ctx, MIXP_ERR_ARGUMENT, "%s: input %d is NULL", c->op->name, i);
        if (t && !mixpi_is_real(t->dtype))
            return mixp_context_fail(c->ctx, MIXP_ERR_DTYPE,
                "%s: input %d%s is %s; it must be f32, f16 or bf16%s", c->op->name, i,
                mixpi_quoted(t, quoted), mixp_dtype_name(t->dtype), mixpi_real_cure(t->dtype));
    }
    return MIXP_OK;
}

/* Checks that the inputs before `which` are real and that input `which` holds i32 indices. */
static mixp_result mixpi_need_indices_after(mixp_call *c, int which) {
    if (which == 1 && c->in[0] && c->in[1] && c->in[0]->dtype == MIXP_I32 &&
        mixpi_is_real(c->in[1]->dtype))
        return mixp_context_fail(c->ctx, MIXP_ERR_DTYPE,
            "%s: input 0 is i32 and input 1 is %s: the two are swapped. Values (logits, a table) "
            "come first, i32 indices second",
            c->op->name, mixp_dtype_name(c->in[1]->dtype));
    mixp_result r = mixpi_need_real(c, which, which);
    const mixp_tensor *ids = c->in[which];
    char quoted[MIXPI_QUOTED];
    if (r != MIXP_OK || (ids && ids->dtype == MIXP_I32)) return r;
    return mixp_context_fail(c->ctx, MIXP_ERR_DTYPE,
        "%s: input %d%s is %s; indices must be i32, one for each row (not one-hot); convert them "
        "with mixp_convert",
        c->op->name, which, ids ? mixpi_quoted(ids, quoted) : "",
        ids ? mixp_dtype_name(ids->dtype) : "NULL");
}

static mixp_result mixpi_need_indices(mixp_call *c) { return mixpi_need_indices_after(c, 1); }

/* Fails if a finite constant of the call becomes Inf in the dtype of its result. That dtype is the
 * one without a guard's fallback: whether a program is right must not depend on the guard's state.
 * A site that the user pinned stores the dtype of the pin. */
static mixp_result mixpi_constant_fits(
    const mixp_call *c, const char *name, float value, const char *instead) {
    const mixp_dtype dtype = mixpi_watcher_is_pinned(c) ? c->out->dtype : mixpi_plain_dtype(c->out);
    if (!mixpi_overflows(dtype, (double)value)) return MIXP_OK;
    return mixp_context_fail(c->ctx, MIXP_ERR_ARGUMENT,
        "%s: %s is %g, beyond the range of %s, whose largest number is %g; use a number in that "
        "range, or %s",
        c->op->name, name, (double)value, mixp_dtype_name(dtype), mixpi_largest(dtype), instead);
}

/* Notes that the program itself wrote the constant `value` into t: a guard does not count its Inf
 * as an overflow, nor its size as the size of computed values. */
static void mixpi_note_written(mixp_tensor *t, double value) {
    double low = 0.0; /* memory for any dtype */
    mixp_convert(&low, t->dtype, &value, MIXP_F64, 1);
    mixp_convert(&t->own.watch.written, MIXP_F32, &low, t->dtype, 1);
    t->own.watch.written = mixp_f32_of_bits(mixp_bits_of_f32(t->own.watch.written) & 0x7FFFFFFFu);
}

/* The name of the first named input of a call; low copies and gradients have a tensor's name. */
static const char *mixpi_call_first_name(const mixp_call *c) {
    for (int i = 0; i < c->n_in; i++)
        if (c->in[i] && *c->in[i]->name) return c->in[i]->name;
    return "";
}

/* The operator on the tape that made t, or the tensor of which t is a cast; NULL if none did. */
static const mixp_call *mixpi_maker(const mixp_tensor *t) {
    const mixpi_tape_entry *e = t->own.generation ? t->ctx->tape.newest : NULL;
    for (; e; e = e->older) {
        if (e->call.out != t) continue;
        if (e->call.op != &mixpi_cast_op || *e->call.in[0]->name) return &e->call;
        t = e->call.in[0];
    }
    return NULL;
}

/* The key of the random numbers of an operator with dropout. */
static uint64_t mixpi_dropout_key(mixp_context *ctx) {
    if (ctx->evaluates)
        mixpi_warn(ctx,
            "dropout is on in a step of mixp_eval_begin: pass training 0 to mixp_dropout and "
            "set attention's dropout to 0, unless you average several random evaluations");
    return (uint64_t)ctx->tape.drawn++;
}

/* Do the values of an operator's input reach its result unchanged, in another shape or order? */
static int mixpi_only_rearranges(const mixp_call *c) {
    return strcmp(c->op->name, "reshape") == 0 || strcmp(c->op->name, "transpose") == 0 ||
           strcmp(c->op->name, "permute") == 0;
}

/* Is the maker the operator of this name, or, if name is NULL, an activation of hidden layers? */
static int mixpi_is_made_by(const mixp_call *maker, const char *name) {
    static const char activations[] =
        " softmax sigmoid relu tanh gelu gelu_tanh silu elu leaky_relu prelu softplus ";
    char word[64];
    if (name) return strcmp(maker->op->name, name) == 0;
    snprintf(word, sizeof word, " %s ", maker->op->name);
    return strstr(activations, word) != NULL;
}

/* A loss, an operator (NULL: each activation) whose results it does not accept, and what it
 * accepts. */
typedef struct mixpi_mistaken { const char *loss, *maker, *takes; } mixpi_mistaken;

/* Warns if x of a loss comes from an operator whose results are of the wrong kind: the loss would
 * be finite, but wrong. */
static void mixpi_warn_of_maker(mixp_call *c) {
    static const char logs[] = "log-probabilities: use mixp_log_softmax";
    static const char any[] = "logits of either sign and any size: leave out the activation";
    static const mixpi_mistaken rows[] = { { "cross_entropy", "softmax",
                                               "logits: it computes the softmax itself" },
        { "bce_with_logits", "sigmoid", "logits: it computes the sigmoid itself" },
        { "cross_entropy", NULL, any }, { "bce_with_logits", NULL, any }, { "nll", "linear", logs },
        { "nll", NULL, logs }, { "kl_div", "linear", logs }, { "kl_div", NULL, logs } };
    const mixp_call *maker = *c->ctx->errors.warning ? NULL : mixpi_maker(c->in[0]);
    while (maker && mixpi_only_rearranges(maker)) maker = mixpi_maker(maker->in[0]);
    if (!maker) return;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        if (strcmp(rows[i].loss, c->op->name) == 0 && mixpi_is_made_by(maker, rows[i].maker))
            mixpi_warn(c->ctx, "mixp_%s: x is a result of mixp_%s, but mixp_%s expects %s",
                rows[i].loss, rows[i].maker, rows[i].loss, rows[i].takes);
}

/* "x 'h.3.ln_1' [8, 4]", or "x [8, 4] of gelu('h.3.w')" for the result of an operator. */
static void mixpi_input_text(const mixp_tensor *t, const char *letter, char *text, size_t room) {
    const mixp_call *maker = *t->name ? NULL : mixpi_maker(t);
    const char *of = maker ? mixpi_call_first_name(maker) : "";
    char shape[224], made[96] = "";
    mixpi_shape_text(t->rank, t->shape, shape, sizeof shape);
    if (maker)
        snprintf(
            made, sizeof made, *of ? " of %.24s('%.60s')" : " of %.24s%s", maker->op->name, of);
    if (*t->name) snprintf(text, room, "%.24s '%.60s' %s", letter, t->name, shape);
    else snprintf(text, room, "%.24s %s%s", letter, shape, made);
}

/* The declared names of the inputs of operators with several inputs. */
static const char *const mixpi_input_names[][4] = {
    { "linear", "x", "w", "b" },
    { "matmul", "a", "b", "" },
    { "add", "a", "b", "" },
    { "sub", "a", "b", "" },
    { "mul", "a", "b", "" },
    { "div", "a", "b", "" },
    { "maximum", "a", "b", "" },
    { "minimum", "a", "b", "" },
    { "swiglu", "gate", "up", "" },
    { "power", "a", "b", "" },
    { "atan2", "a", "b", "" },
    { "prelu", "x", "w", "" },
    { "layer_norm", "x", "gamma", "beta" },
    { "rms_norm", "x", "gamma", "" },
    { "embedding", "table", "ids", "" },
    { "embedding_bag", "table", "ids", "offsets" },
    { "cross_entropy", "logits", "targets", "" },
    { "linear_cross_entropy", "x", "w", "targets" },
    { "mse", "x", "target", "" },
    { "bce_with_logits", "x", "target", "" },
    { "bce", "x", "target", "" },
    { "l1", "x", "target", "" },
    { "smooth_l1", "x", "target", "" },
    { "huber", "x", "target", "" },
    { "kl_div", "x", "target", "" },
    { "gather", "x", "ids", "" },
    { "where", "mask", "a", "b" },
    { "masked_fill", "x", "mask", "" },
    { "eq", "a", "b", "" }, { "ne", "a", "b", "" }, { "gt", "a", "b", "" },
    { "ge", "a", "b", "" }, { "lt", "a", "b", "" }, { "le", "a", "b", "" },
    { "one_hot", "ids", "", "" },
    { "scatter_add", "x", "src", "ids" },
    { "index_add", "x", "src", "ids" },
    { "nll", "x", "targets", "" }
};

static const char *mixpi_input_name(const mixp_call *c, int i, char number[24]) {
    const size_t rows = sizeof mixpi_input_names / sizeof mixpi_input_names[0];
    size_t k = 0;
    while (k < rows && strcmp(mixpi_input_names[k][0], c->op->name) != 0) k++;
    if (k < rows && i < 3) return mixpi_input_names[k][1 + i];
    if (c->n_in < 2 || !c->in[1]) return "x";
    snprintf(number, 24, "input %d", i);
    return number;
}

/* Reports the inputs with names and shapes, and the rule that they break. */
static mixp_result mixpi_bad_shapes(mixp_call *c, const char *rule) {
    char text[4][352], number[24];
    int i, n = 0;
    memset(text, 0, sizeof text);
    for (i = 0; i < c->n_in && n < 4; i++) {
        const char *name = mixpi_input_name(c, i, number);
        if (c->in[i]) mixpi_input_text(c->in[i], name, text[n++], sizeof text[0]);
    }
    return mixp_context_fail(c->ctx, MIXP_ERR_SHAPE, "%s: %s%s%s%s%s%s%s %s not fit: %s",
        c->op->name, text[0], n > 1 ? " and " : "", text[1], n > 2 ? " and " : "", text[2],
        n > 3 ? " and " : "", text[3], n > 1 ? "do" : "does", rule);
}

static void mixpi_dense_strides(int rank, const int64_t *shape, int64_t *strides) {
    int64_t step = 1;
    for (int i = rank - 1; i >= 0; i--) {
        strides[i] = step;
        step *= shape[i];
    }
}

static int mixpi_shapes_equal(const mixp_tensor *a, const mixp_tensor *b) {
    return a->rank == b->rank && memcmp(a->shape, b->shape, sizeof a->shape) == 0;
}

/* Converts dim to an index from the front; -1 if it is out of range. A scalar counts as a vector of
 * one element, as in PyTorch; shape[0] of a scalar is 1. */
static int mixpi_axis(int dim, int rank) {
    if (!rank) rank = 1;
    if (dim < 0) dim += rank;
    return dim >= 0 && dim < rank ? dim : -1;
}

static mixp_result mixpi_same_infer(mixp_call *c) {
    if (mixpi_need_real(c, 1, 1) != MIXP_OK) return MIXP_ERR_DTYPE;
    return mixp_call_output(c, c->in[0]->dtype, c->in[0]->rank, c->in[0]->shape);
}

/* Opens a region of f32, in which operators compute and store f32 whatever region is open. Returns
 * the region's number, or -1. */
static int mixpi_open_f32(mixp_context *ctx) {
    mixp_autocast off = MIXPI_ZERO;
    off.dtype = MIXP_F32;
    off.level = 1;
    return mixp_autocast_open_with(ctx, &off);
}

/* --- functions made of other operators ---
 *
 * Inside, operators with other names run. So the inputs are checked first, under the name of the
 * function that the user called.
 */
typedef struct mixpi_outer {
    mixp_op      op;
    mixp_call    call;
    mixp_tensor *in[4];
} mixpi_outer;

/* A call by this name of a, b and c, for functions that check. NULL: an input is not usable, or one
 * of the first `required` is NULL. */
static mixp_call *mixpi_outer_call(mixpi_outer *o, mixp_context *ctx, const char *name,
    int required, mixp_tensor *a, mixp_tensor *b, mixp_tensor *c) {
    if (!ctx) return NULL;
    memset(o, 0, sizeof *o);
    o->op.name = name;
    o->in[0] = a;
    o->in[1] = b;
    o->in[2] = c;
    o->call.ctx = ctx;
    o->call.op = &o->op;
    o->call.in = o->in;
    o->call.n_in = 3;
    for (int i = 0; i < 3; i++)
        if (mixpi_check_input(ctx, &o->op, i, required, o->in[i]) != MIXP_OK) return NULL;
    return &o->call;
}
