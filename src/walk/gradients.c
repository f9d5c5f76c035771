#pragma once
#include "marks.c"
#include "probes.c"
/* --- buffers of gradients --------------------------------------------------------------- *
 *
 * own.grad is a tensor's gradient buffer. The gradient of a leaf is permanent, and in use while
 * t->grad is set. The gradient of an activation comes from the arena when its first consumer writes
 * it, and goes back once the activation's own operator has been walked, so that few gradients exist
 * at a time.
 */

/* The record of t's gradient, perhaps without data. */
static mixp_tensor *mixpi_grad_record(mixp_tensor *t) {
    if (t->own.grad) return t->own.grad;
    t->own.grad = mixpi_twin(t, mixpi_grad_dtype(t));
    if (t->own.grad) t->own.grad->own.is_grad = 1;
    return t->own.grad;
}

static mixp_tensor *mixpi_grad_buffer(mixp_tensor *t) {
    mixp_tensor *g = mixpi_grad_record(t);
    if (g && !g->data) g->data = mixpi_data_alloc(g);
    return g && g->data ? g : NULL;
}

/* The tensor that receives input i's gradient: the parameter itself if the input is a low copy. */
static mixp_tensor *mixpi_grad_owner(const mixp_call *c, int i) {
    mixp_tensor *t = i >= 0 && i < c->n_in ? c->in[i] : NULL;
    return t && t->own.master ? t->own.master : t;
}

/* An input needs a gradient only if it needed one at recording and still does: parameters frozen
 * since then get no gradient. */
MIXPREC_API int mixp_call_wants(const mixp_call *c, int i) {
    const mixpi_tape_entry *e = (const mixpi_tape_entry *)(const void *)c;
    const mixp_tensor *t = mixpi_grad_owner(c, i);
    return mixpi_wants_grad(t) && !(e->inputs[i] & MIXPI_INPUT_CONSTANT);
}

/* Copies a borrowed gradient into its own memory. */
static mixp_result mixpi_end_loan(mixp_tensor *b) {
    mixp_in held = mixpi_tensor_in(b);
    if (!b->own.borrowed) return MIXP_OK;
    b->own.borrowed = 0;
    b->data = mixpi_data_alloc(b);
    if (!b->data) return MIXP_ERR_MEMORY;
    return mixpi_convert_to(b->ctx, mixpi_tensor_out(b, 0), held, b->count);
}

/* Ends all loans of g before g changes or its memory is released: g then owns its memory, and no
 * other gradient uses it. */
static mixp_result mixpi_grad_settle(mixp_tensor *g) {
    mixp_tensor *b = g->own.lent;
    mixp_result r = mixpi_end_loan(g);
    g->own.lent = NULL;
    return r == MIXP_OK && b ? mixpi_end_loan(b) : r;
}

MIXPREC_API mixp_tensor *mixp_call_grad(mixp_call *c, int i, int *accumulate) {
    mixp_tensor *t = mixpi_grad_owner(c, i), *g = NULL;
    if (!c->out || !c->out->own.grad) {
        mixp_context_fail(c->ctx, MIXP_ERR_ORDER,
            "%s: mixp_call_grad and mixp_call_dx work only in an operator's backward", c->op->name);
        return NULL;
    }
    if (!mixp_call_wants(c, i)) return NULL;

    /* Memory of its own. The ranks assign a parameter's gradient its place at the first write. */
    const int laid = t->own.from_tape && t->own.grad && t->own.grad->data; /* set by backward */
    mixp_result r = MIXP_OK;
    if (!t->own.from_tape && !t->grad) r = MIXPI_CREW(c->ctx, walk_opens(c->ctx, t));
    if (r == MIXP_OK) g = mixpi_grad_buffer(t);
    if (r == MIXP_OK) r = g ? mixpi_grad_settle(g) : MIXP_ERR_MEMORY;
    if (r != MIXP_OK) {
        mixpi_entry(c)->lacks = r;
        return NULL;
    }

    /* In host memory a probe shows afterwards whether backward has written it. */
    *accumulate = t->own.from_tape ? t->own.pending : t->grad != NULL;
    mixpi_entry(c)->inputs[i] |= MIXPI_INPUT_ASKED;
    if (!*accumulate && !laid && g->count && !c->ctx->device->download) {
        mixpi_probe_set(g);
        mixpi_entry(c)->inputs[i] |= MIXPI_INPUT_PROBED;
    }

    mixpi_mark_add(&g->own.mark, &c->out->own.grad->own.mark, *accumulate);
    t->own.pending = 1;
    if (t->own.from_tape) return g;
    t->grad = g;
    g->version++;
    g->own.walks++;
    return g;
}

/* Can input i's gradient reuse the memory of the incoming gradient? Only if it is the input's first
 * gradient, with the same dtype and count. */
static int mixpi_call_can_take(const mixp_call *c, int i) {
    const mixp_tensor *t = mixpi_grad_owner(c, i);
    if (c->out->requires_grad || c->out->own.grad->own.borrowed) return 0;
    if (!t || !t->own.from_tape || t->own.pending) return 0;
    if (t->own.grad && t->own.grad->data) return 0;
    return t->dtype == c->out->dtype && t->count == c->out->count;
}

/* Lets input i's gradient share the memory of the incoming gradient. NULL: out of memory. */
static mixp_tensor *mixpi_call_share_grad(mixp_call *c, int i) {
    mixp_tensor *t = mixpi_grad_owner(c, i), *g = mixpi_grad_record(t);
    if (!g) return NULL;
    mixpi_entry(c)->inputs[i] |= MIXPI_INPUT_ASKED;
    g->data = c->out->own.grad->data;
    g->own.mark = c->out->own.grad->own.mark;
    t->own.pending = 1;
    return g;
}

MIXPREC_API mixp_in mixp_call_x(const mixp_call *c, int i) {
    return mixpi_tensor_in(i >= 0 && i < c->n_in ? c->in[i] : NULL);
}
MIXPREC_API mixp_out mixp_call_y(const mixp_call *c) { return mixpi_tensor_out(c->out, 0); }
MIXPREC_API mixp_in mixp_call_dy(const mixp_call *c) {
    return mixpi_tensor_in(c->out ? c->out->grad : NULL);
}
MIXPREC_API mixp_out mixp_call_dx(mixp_call *c, int i) {
    int accumulate = 0;
    const mixp_tensor *grad = mixp_call_grad(c, i, &accumulate);
    return mixpi_tensor_out(grad, accumulate);
}

/* Moves the incoming gradient's buffer, unread, to input i if no other reader needs the buffer: the
 * gradient of a sum is the gradient of both terms. Call it after all other reads of the buffer.
 * Returns 0 if impossible: the caller must copy. */
static int mixpi_call_move_grad(mixp_call *c, int i) {
    mixp_tensor *from = c->out->own.grad, *g;
    if (!mixpi_call_can_take(c, i)) return 0;
    g = mixpi_call_share_grad(c, i);
    if (!g) return 0;
    g->own.lent = from->own.lent;
    from->own.lent = NULL;
    from->data = NULL;
    return 1;
}

/* Lends the buffer to input i before input `owner` receives it. As a rule, i's gradient is read
 * before more is added to the owner's gradient; otherwise i gets a copy then. 0: impossible. */
static int mixpi_call_lend_grad(mixp_call *c, int i, int owner) {
    const mixp_tensor *t = mixpi_grad_owner(c, i), *other = mixpi_grad_owner(c, owner);
    mixp_tensor *from = c->out->own.grad, *g;
    if (t == other || !mixpi_call_can_take(c, i) || !mixpi_call_can_take(c, owner)) return 0;
    if (t->requires_grad || from->own.lent) return 0;
    g = mixpi_call_share_grad(c, i);
    if (!g) return 0;
    g->own.borrowed = 1;
    from->own.lent = g;
    return 1;
}

/* grad (+)= src: any real dtypes, same count. */
static mixp_result mixpi_add_into(mixp_context *ctx, mixp_out grad, mixp_in src, int64_t count) {
    if (!grad.accumulate) return mixpi_convert_to(ctx, grad, src, count);
    mixp_copy_args k = MIXPI_ZERO;
    k.rank = 1;
    k.shape[0] = count;
    k.src = src;
    k.dst = grad;
    k.src_strides[0] = k.dst_strides[0] = 1;
    return ctx->device->kernels->copy(&ctx->exec, &k);
}

/* Keeps a gradient that the user asked for, summed over the losses of a step. */
static mixp_result mixpi_keep_grad(mixp_tensor *t) {
    mixp_tensor *g = t->own.grad, *kept = t->own.kept;
    t->grad = kept ? kept : g;
    if (kept)
        return mixpi_add_into(t->ctx, mixpi_tensor_out(kept, 1), mixpi_tensor_in(g), g->count);
    t->own.kept = g;
    t->own.grad = NULL;
    return MIXP_OK;
}

/* Drops a loan that g no longer needs. Returns 0 if g owns its memory. */
static int mixpi_forget_loan(mixp_tensor *g) {
    int borrowed = g && g->own.borrowed;
    if (!borrowed) return 0;
    g->own.borrowed = 0;
    g->data = NULL;
    return 1;
}

/* Called before c is walked: ends loans that would make c read the memory it writes. */
static mixp_result mixpi_settle_inputs(mixp_call *c) {
    const mixp_tensor *g = c->out->own.grad;
    mixp_result r = MIXP_OK;
    for (int i = 0; i < c->n_in && g->own.borrowed && r == MIXP_OK; i++) {
        mixp_tensor *t = mixpi_grad_owner(c, i);
        if (t && t->own.grad && t->own.grad->own.lent == g) r = mixpi_grad_settle(t->own.grad);
    }
    return r;
}
