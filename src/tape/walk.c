#pragma once
#include "run.c"
/* --- marks of gradients ---------------------------------------------------------------- *
 *
 * A mark says by which factor a gradient is multiplied. A walk begins with a true gradient, a
 * scaler's operator changes the mark, and each operator passes the mark on to the gradients of its
 * inputs.
 */
enum {
    MIXPI_MARK_NONE,            /* unknown: zeros, or filled by the user                   */
    MIXPI_MARK_TRUE,            /* gradient of the loss itself                             */
    MIXPI_MARK_SCALED,
    MIXPI_MARK_UNSCALED,        /* unscaled: true again                                    */
    MIXPI_MARK_MIXED,           /* a sum over two scales: no factor makes it true          */
    MIXPI_MARK_LOST             /* scaled by a scaler that was freed                       */
};

/* Updates the mark of a gradient to which another gradient was written or added. */
static void mixpi_mark_add(mixpi_mark *to, const mixpi_mark *from, int accumulate) {
    int same = to->kind == from->kind && to->by == from->by && to->at == from->at;
    int both_true = to->kind == MIXPI_MARK_UNSCALED && from->kind == MIXPI_MARK_TRUE;
    if (!accumulate || to->kind == MIXPI_MARK_NONE || same) *to = *from;
    else if (!both_true) to->kind = MIXPI_MARK_MIXED;
}

/* Removes the scaler `by`, about to be freed, from a mark. */
static void mixpi_mark_lose(mixpi_mark *m, const void *by) {
    if (m->by != by) return;
    m->by = NULL;
    m->seen = 0;
    if (m->kind == MIXPI_MARK_SCALED) m->kind = MIXPI_MARK_LOST;
    if (m->kind != MIXPI_MARK_UNSCALED) return;
    m->kind = MIXPI_MARK_TRUE;
    m->at = 0;
}

/* Removes `by` from the marks of a tensor and of its gradients. */
static void mixpi_tensor_lose(mixp_tensor *t, const void *by) {
    if (!t) return;
    mixpi_mark_lose(&t->own.mark, by);
    if (t->own.grad) mixpi_mark_lose(&t->own.grad->own.mark, by);
    if (t->own.kept) mixpi_mark_lose(&t->own.kept->own.mark, by);
}

/* Removes the scaler `by`, about to be freed, from all marks of the context and of this step. */
static void mixpi_context_lose(mixp_context *ctx, const void *by) {
    const mixpi_crew *crew = mixpi_crew_of(ctx);
    mixpi_tape_entry *e;
    mixp_tensor *t;
    int i;
    for (t = ctx->tensors; t; t = t->own.next) mixpi_tensor_lose(t, by);
    for (e = ctx->tape; e; e = e->older) {
        mixpi_tensor_lose(e->call.out, by);
        for (i = 0; i < e->call.n_in; i++) mixpi_tensor_lose(e->call.in[i], by);
    }
    if (crew) crew->lose(ctx, by);
}

/* --- walking back ---------------------------------------------------------------------- *
 *
 * own.grad is a tensor's gradient buffer. The gradient of a leaf is permanent, and in use while
 * t->grad is set. The gradient of an activation comes from the arena when its first consumer writes
 * it, and goes back once the activation's own operator has been walked, so that few gradients exist
 * at a time.
 */

/* The record of t's gradient, perhaps without data. */
static mixp_tensor *mixpi_grad_record(mixp_tensor *t) {
    if (t->own.grad) return t->own.grad;
    t->own.grad = mixpi_twin(t, t->dtype);
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

/* Copies a borrowed gradient into memory of its own. */
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

/* --- is a gradient that was asked for written? ---
 *
 * Where the host can look, its first and last element are made a signalling NaN, which no
 * arithmetic gives.
 */
static size_t mixpi_probe_of(mixp_dtype dtype, unsigned char probe[4]) {
    const uint32_t f32 = 0x7FA1D5C3u;
    const uint16_t low = dtype == MIXP_F16 ? 0x7D5Bu : 0x7FA5u;
    if (dtype == MIXP_F32) memcpy(probe, &f32, 4);
    else memcpy(probe, &low, 2);
    return dtype == MIXP_F32 ? 4 : 2;
}

static void mixpi_probe_set(const mixp_tensor *g) {
    unsigned char probe[4];
    size_t size = mixpi_probe_of(g->dtype, probe);
    memcpy(g->data, probe, size);
    memcpy((char *)g->data + mixpi_bytes(g) - size, probe, size);
}

static int mixpi_probe_is_there(const mixp_tensor *g) {
    unsigned char probe[4];
    size_t size = mixpi_probe_of(g->dtype, probe);
    return memcmp(g->data, probe, size) == 0 &&
           memcmp((char *)g->data + mixpi_bytes(g) - size, probe, size) == 0;
}

MIXPREC_API mixp_tensor *mixp_call_grad(mixp_call *c, int i, int *accumulate) {
    const mixpi_crew *crew = mixpi_crew_of(c->ctx);
    mixp_tensor *t = mixpi_grad_owner(c, i), *g = NULL;
    mixp_result r = MIXP_OK;
    int laid;
    if (!c->out || !c->out->own.grad) {
        mixp_context_fail(c->ctx, MIXP_ERR_ORDER,
                          "%s: mixp_call_grad and mixp_call_dx work only in an operator's backward",
                          c->op->name);
        return NULL;
    }
    if (!mixp_call_wants(c, i)) return NULL;
    laid = t->own.from_tape && t->own.grad && t->own.grad->data;    /* backward has set it */
    if (crew && !t->own.from_tape && !t->grad) r = crew->walk_opens(c->ctx, t);
    if (r == MIXP_OK) g = mixpi_grad_buffer(t);
    if (r == MIXP_OK) r = g ? mixpi_grad_settle(g) : MIXP_ERR_MEMORY;
    if (r != MIXP_OK) {
        mixpi_entry(c)->lacks = r;
        return NULL;
    }
    *accumulate = t->own.from_tape ? t->own.pending : t->grad != NULL;
    mixpi_entry(c)->inputs[i] |= MIXPI_INPUT_ASKED;
    if (!*accumulate && !laid && !c->ctx->device->download) {
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

/* Can input i's gradient take over the memory of the incoming gradient? Only if it is the input's
 * first gradient, with the same dtype and count. */
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

MIXPREC_API mixp_in mixp_call_x(const mixp_call *c, int i)
{ return mixpi_tensor_in(i >= 0 && i < c->n_in ? c->in[i] : NULL); }
MIXPREC_API mixp_out mixp_call_y(const mixp_call *c) { return mixpi_tensor_out(c->out, 0); }
MIXPREC_API mixp_in  mixp_call_dy(const mixp_call *c)
{ return mixpi_tensor_in(c->out ? c->out->grad : NULL); }
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
static mixp_result mixpi_add_into(mixp_context *ctx, mixp_out grad, mixp_in src,
                                  int64_t count) {
    mixp_copy_args k;
    if (!grad.accumulate) return mixpi_convert_to(ctx, grad, src, count);
    memset(&k, 0, sizeof k);
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
        return mixpi_add_into(t->ctx, mixpi_tensor_out(kept, 1), mixpi_tensor_in(g),
                              g->count);
    t->own.kept = g; t->own.grad = NULL;
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
    int i;
    for (i = 0; i < c->n_in && g->own.borrowed && r == MIXP_OK; i++) {
        mixp_tensor *t = mixpi_grad_owner(c, i);
        if (t && t->own.grad && t->own.grad->own.lent == g)
            r = mixpi_grad_settle(t->own.grad);
    }
    return r;
}

/* The tensors that the gradients still wanted are made from, as a set of mixp_call_reads. */
static uint32_t mixpi_call_read_set(const mixp_call *c) {
    const mixpi_tape_entry *e = mixpi_entry_of(c);
    uint32_t what = 0;
    int i;
    for (i = 0; i < c->n_in; i++)
        if (mixp_call_wants(c, i)) what |= e->reads[mixpi_min(i, MIXPI_READS - 1)];
    return what;
}

static mixp_result mixpi_was_written(const mixp_call *c, int i) {
    mixp_tensor *t = mixpi_call_tensor(c, i), *origin = mixpi_origin(t);
    char which[MIXPI_QUOTED], shape[224];
    if (i == c->n_in) snprintf(which, sizeof which, "its result");
    else if (!*mixpi_quoted(origin, which)) snprintf(which, sizeof which, "its input %d", i);
    return mixp_context_fail(c->ctx, MIXP_ERR_ORDER,
                             "mixp_backward:%s%s %s was written%s%s since %s read it, so gradients "
                             "would be wrong: call mixp_backward before the write, or run forward "
                             "again",
                             *which == ' ' ? "" : " ", which,
                             mixpi_shape_text(t->rank, t->shape, shape, sizeof shape),
                             origin->own.writer ? " by " : "",
                             origin->own.writer ? origin->own.writer : "", c->op->name);
}

/* A walk reads what forward read: fails if any of it was written since. */
static mixp_result mixpi_check_unwritten(const mixp_call *c) {
    const uint32_t what = mixpi_call_read_set(c);
    const mixpi_tape_entry *e = mixpi_entry_of(c);
    int i;
    for (i = 0; i <= c->n_in && what; i++) {
        mixp_tensor *t = mixpi_call_tensor(c, i);
        uint32_t bit = i == c->n_in ? MIXP_READS_RESULT : i < 31 ? 1u << i : 0u;
        if (!t || !(what == MIXP_READS_ALL || (what & bit))) continue;
        if (mixpi_origin(t)->version != e->versions[i]) return mixpi_was_written(c, i);
    }
    return MIXP_OK;
}

/* Has backward asked for the gradient of input i, or of another input that is the same tensor? */
static int mixpi_was_asked(const mixp_call *c, int i) {
    const mixpi_tape_entry *e = mixpi_entry_of(c);
    int j;
    if (e->inputs[i] & MIXPI_INPUT_ASKED) return 1;
    for (j = 0; j < c->n_in; j++)
        if (e->inputs[j] & MIXPI_INPUT_ASKED && mixpi_grad_owner(c, j) == mixpi_grad_owner(c, i))
            return 1;
    return 0;
}

/* How backward failed to give the gradient of input i; NULL: it gave the gradient. */
static const char *mixpi_not_given(const mixp_call *c, int i) {
    const int flags = mixpi_entry_of(c)->inputs[i];
    if (!mixp_call_wants(c, i)) return NULL;
    if (!mixpi_was_asked(c, i)) return "did not request";
    if (!(flags & MIXPI_INPUT_PROBED)) return NULL;
    if (!mixpi_probe_is_there(mixpi_grad_owner(c, i)->own.grad)) return NULL;
    return "requested, but did not write,";
}

/* After an operator's backward: fails unless backward has given every gradient that is wanted. */
static mixp_result mixpi_check_given(mixp_call *c) {
    mixpi_tape_entry *e = mixpi_entry(c);
    const char *wrong = NULL;
    char quoted[MIXPI_QUOTED];
    int i;
    for (i = 0; i < c->n_in && !wrong; i++) wrong = mixpi_not_given(c, i);
    if (wrong)
        return mixp_context_fail(c->ctx, MIXP_ERR_ARGUMENT,
                                 "%s backward: it %s the gradient of input %d%s, which is needed: "
                                 "write to the tensor of mixp_call_dx; write zeros if the gradient "
                                 "is 0",
                                 c->op->name, wrong, i - 1,
                                 mixpi_quoted(mixpi_grad_owner(c, i - 1), quoted));
    for (i = 0; i < c->n_in; i++) e->inputs[i] &= MIXPI_INPUT_CONSTANT;
    return MIXP_OK;
}

/* --- unscaled gradients in f16 ---
 *
 * Without a loss scale, small f16 gradients become 0, and no error reports it. A few early walks
 * count them, and the context warns once.
 */
enum { MIXPI_UNSCALED_WALKS = 64 };

/* Decides whether the walk that begins counts. A guard deals with flushed gradients itself. */
static void mixpi_unscaled_begin(mixp_context *ctx) {
    mixpi_unscaled *u = &ctx->unscaled;
    const int number = u->walks + 1;
    u->met = 0;
    u->values = u->flushed = 0.0;
    u->counts = number <= MIXPI_UNSCALED_WALKS && (number & (number - 1)) == 0 &&
                !*ctx->warning && !ctx->capturing && ctx->device->kernels->look &&
                !(mixpi_watched(ctx) & (MIXPI_WATCHED | MIXPI_TRIAL));
}

/* Looks at g at once. On a device that the host cannot read, waits for it. */
static mixp_result mixpi_unscaled_look(mixp_context *ctx, const mixp_tensor *g, mixp_look *found) {
    mixpi_arena *a = &ctx->dev;
    const int far = ctx->device->download != NULL;
    mixp_look *row = far ? (mixp_look *)mixpi_arena_take(ctx, a, sizeof *row) : found;
    mixp_look_args k;
    mixp_result r = row ? mixpi_device_zero(ctx, row, sizeof *row) : MIXP_ERR_MEMORY;
    if (r != MIXP_OK) return r;
    memset(&k, 0, sizeof k);
    k.n = g->count;
    k.x = mixpi_tensor_in(g);
    k.low = MIXP_F16;
    k.row = row;
    r = mixpi_noted(ctx, "look", ctx->device->kernels->look(&ctx->exec, &k));
    if (!far) return r;
    if (r == MIXP_OK) r = mixpi_download(ctx, found, row, sizeof *row);
    mixpi_arena_give(ctx, a, row, sizeof *row);
    return r;
}

/* Counts g, the gradient of an activation. Beside values of at least 16 times the smallest normal
 * number, flushed ones are less than a rounding: they do not count. */
static mixp_result mixpi_unscaled_count(mixp_context *ctx, const mixp_tensor *g) {
    mixpi_unscaled *u = &ctx->unscaled;
    mixp_look found;
    mixp_result r;
    if (g->dtype != MIXP_F16 || g->own.mark.kind != MIXPI_MARK_TRUE) return MIXP_OK;
    u->met = 1;
    if (!u->counts) return MIXP_OK;
    r = mixpi_unscaled_look(ctx, g, &found);
    if (r != MIXP_OK) return r;
    u->values += (double)(found.count - found.zeros);
    if (found.largest < 16.0f * 6.103515625e-05f) u->flushed += 0.5 * (double)found.least;
    return MIXP_OK;
}

/* After a walk: warns if more than 5 % of the gradients were flushed. A few elements are no
 * estimate. */
static void mixpi_unscaled_end(mixp_context *ctx) {
    mixpi_unscaled *u = &ctx->unscaled;
    const double all = u->values + u->flushed;
    if (u->met && u->walks < MIXPI_UNSCALED_WALKS) u->walks++;
    if (u->flushed < 8.0 || u->flushed <= 0.05 * all) return;
    mixpi_warn(ctx,
               "mixp_backward: about %.0f %% of the f16 gradients became 0 in step %.0f, because "
               "no loss scale multiplies them: call mixp_backward on mixp_scaler_scale(scaler, "
               "loss) and step with mixp_scaler_step, or use bf16",
               100.0 * u->flushed / all, (double)ctx->step);
}

static mixp_result mixpi_walk_entry(mixp_call *c) {
    mixp_context *ctx = c->ctx;
    mixp_tensor *out = c->out, *g = out->own.grad;
    const int site = mixpi_entry(c)->site;
    const mixpi_watcher *watcher = site ? mixpi_watcher_of(ctx) : NULL;
    const uint64_t told = ctx->told, generation = ctx->generation;
    mixp_result r = mixpi_check_unwritten(c);
    if (r == MIXP_OK) r = mixpi_settle_inputs(c);
    out->grad = g; out->own.pending = 0;
    if (r == MIXP_OK && watcher) r = watcher->gradient(ctx, site, g);
    if (r == MIXP_OK) r = mixpi_unscaled_count(ctx, g);
    if (r == MIXP_OK) r = mixpi_run_inside(c, c->op->backward);
    if (ctx->generation != generation) return r;
    if (r == MIXP_OK) r = mixpi_entry(c)->lacks;
    if (r == MIXP_OK) r = mixpi_check_given(c);
    if (r == MIXP_OK && watcher) r = watcher->leaves(c, site);
    out->grad = NULL;
    if (r != MIXP_OK && ctx->told == told)
        mixp_context_fail(ctx, r, "%s backward: %s", c->op->name, mixpi_why(ctx, r));
    if (r != MIXP_OK) return r;
    if (out->requires_grad) return mixpi_keep_grad(out);
    if (mixpi_forget_loan(g)) return MIXP_OK;
    r = mixpi_grad_settle(g);
    if (g->data) mixpi_arena_give(ctx, &ctx->dev, g->data, mixpi_bytes(g));
    g->data = NULL;
    return r;
}

/* Clears all pending gradients. A failed walk drops the gradients that it wrote, which are
 * incomplete. */
static void mixpi_walk_end(mixp_context *ctx, int failed) {
    mixpi_tape_entry *e;
    int i;
    for (e = ctx->tape; e; e = e->older) {
        e->call.out->own.pending = e->told = 0;
        e->lacks = MIXP_OK;
        for (i = 0; i < e->call.n_in; i++) e->inputs[i] &= MIXPI_INPUT_CONSTANT;
        mixpi_forget_loan(e->call.out->own.grad);
        for (i = 0; i < e->call.n_in; i++) {
            mixp_tensor *t = mixpi_grad_owner(&e->call, i);
            if (!t || t->own.from_tape || !t->own.pending) continue;
            t->own.pending = 0;
            if (failed) t->grad = NULL;
        }
    }
}

