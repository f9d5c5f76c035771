#pragma once
#include "apply.c"
/* Runs one kernel of the device of x (a call, an optimizer, a scaler). */
#define MIXPI_RUN(x, kernel, ...)                                                         \
    ((x)->ctx->device->kernels->kernel)(&(x)->ctx->exec, __VA_ARGS__)
/* MIXPI_RUN outside of operators. It reports a failure, because the tape reports those of
 * operators only. */
#define MIXPI_STEP_RUN(x, kernel, k) \
    mixpi_note_failure((x)->ctx, #kernel, MIXPI_RUN(x, kernel, k))

/* --- running one operator --------------------------------------------------------------------- */

/* Runs one of the operator's own functions. A function that begins a step frees its call, and
 * fails. */
static MIXPI_APART mixp_result mixpi_run_inside(mixp_call *c, mixp_result (*run)(mixp_call *)) {
    mixp_context *ctx = c->ctx;
    const char *name = c->op->name;
    const uint64_t generation = ctx->generation;
    volatile char here = 0;
    const int before = mixpi_inside_begin(ctx, MIXPI_FRAME(&here));
    mixp_result r = run(c);
    if (ctx->generation != generation)
        return mixp_context_fail(ctx, MIXP_ERR_ORDER,
            "%s: a function of this operator called mixp_step_begin; call mixp_step_begin between "
            "steps only. If another thread called it: a context serves one thread at a time",
            name);
    mixpi_inside_end(ctx, before);
    return r;
}

/* --- handles of the guard's table that read a call; see tensors/watcher.c --- */
static void mixpi_watcher_choose(mixp_call *c) {
    if (mixpi_watcher_of(c->ctx)) c->ctx->watcher->choose(c);
}
static int mixpi_watcher_is_pinned(const mixp_call *c) {
    return mixpi_watcher_of(c->ctx) && c->ctx->watcher->is_pinned(c);
}

/* Shows the guard the result of e, which has a site. given: the inputs before autocast. */
static mixp_result mixpi_watcher_stored(mixpi_tape_entry *e, mixp_tensor *const *given) {
    mixp_context *ctx = e->call.ctx;
    if (!e->site || !e->call.out->count) return MIXP_OK;
    return mixpi_watcher_of(ctx) ? ctx->watcher->stored(e, given) : MIXP_OK;
}

/* Casts the inputs of a LOW operator to the region's dtype: weights to their cached low copies. */
static mixp_result mixpi_cast_inputs(mixp_call *c, mixp_autocast region) {
    const mixpi_watcher *watcher = mixpi_entry(c)->site ? mixpi_watcher_of(c->ctx) : NULL;
    const mixp_dtype low = region.dtype;
    mixp_result r = MIXP_OK;
    if (watcher) watcher->casts(c);
    for (int i = 0; i < c->n_in && r == MIXP_OK; i++) {
        mixp_tensor *t = c->in[i];
        if (!t || !mixpi_is_real(t->dtype) || t->dtype == low) continue;

        /* At level 3 an f32 parameter would silently make it level 2. */
        const int cached = t->dtype == MIXP_F32 && !t->own.generation && t->requires_grad;
        if (cached && region.level >= 3)
            return mixp_context_fail(c->ctx, MIXP_ERR_DTYPE,
                "%s: level 3 needs f16 or bf16 parameters, and '%s' is f32: create it as f16 or "
                "bf16, or choose level 2, which keeps f32 weights",
                c->op->name, t->name);

        if (watcher && watcher->stays_uncast(c, i, cached, low, &r)) continue;
        c->in[i] = cached ? mixpi_low_copy(c->ctx, t, low) : mixpi_cast(c->ctx, t, low);
        if (!cached) mixpi_count_activation_cast(c->ctx);
        if (!c->in[i]) return MIXP_ERR_MEMORY;
        c->in[i]->own.disposable |= !cached;
    }
    return r;
}

/* Casts the inputs of an ALL_F32 operator to f32, inside and outside of regions. */
static mixp_result mixpi_cast_to_f32(mixp_call *c) {
    for (int i = 0; i < c->n_in; i++) {
        mixp_tensor *t = c->in[i];
        if (!t || !mixpi_is_low(t->dtype)) continue;
        c->in[i] = mixpi_cast(c->ctx, t, MIXP_F32);
        mixpi_count_activation_cast(c->ctx);
        if (!c->in[i]) return mixpi_failed(c->ctx);
    }
    return MIXP_OK;
}

/* Allocates memory for the result that infer declared, in the dtype that autocast and the guard
 * choose. */
static mixp_result mixpi_allocate_output(mixp_call *c, mixp_op_class cls, mixp_autocast region) {
    mixpi_tape_entry *e = mixpi_entry(c);
    mixp_tensor *out = c->out;
    if (!out)
        return mixp_context_fail(
            c->ctx, MIXP_ERR_ARGUMENT, "%s: infer declared no result", c->op->name);
    if (e->alias) {
        out->data = c->in[0]->data;
        out->own.origin = mixpi_origin(c->in[0]);
        return MIXP_OK;
    }

    /* Choose its dtype, unless infer has fixed it. The guard may change the dtype of a cast. */
    if (!e->fixed_dtype) {
        const mixp_tensor *first = c->in[0];
        mixp_dtype natural = out->dtype;
        if (cls == MIXP_CLASS_PROMOTE) natural = mixpi_widest(c->n_in, c->in);
        else if (first && first->dtype == natural) natural = mixpi_plain_dtype(first);
        out->dtype = mixpi_result_dtype(region, cls, natural, out->rank);
        mixpi_watcher_choose(c);
    } else if (mixpi_is_cast(c->op)) mixpi_watcher_choose(c);

    out->data = mixpi_data_alloc(out);
    return out->data ? MIXP_OK : MIXP_ERR_MEMORY;
}

/* The operator's own functions may lose the call: see mixpi_run_inside. */
static mixp_result mixpi_run_forward(mixp_call *c) {
    mixp_context *ctx = c->ctx;
    const uint64_t generation = ctx->generation;
    const mixp_autocast region = mixp_autocast_current(ctx);
    const mixp_op_class cls = mixpi_class_of(ctx, c->op);
    if (region.level && cls == MIXP_CLASS_BANNED)
        return mixp_context_fail(c->ctx, MIXP_ERR_BANNED,
            "%s is unsafe in low precision: use %s, or run it in a region of MIXP_F32", c->op->name,
            c->op->instead ? c->op->instead : "another operator");

    /* Autocast: the inputs get the dtype of the operator's class. */
    mixp_result r = MIXP_OK;
    if (cls == MIXP_CLASS_ALL_F32) {
        mixpi_entry(c)->fixed_dtype = 1;
        r = mixpi_cast_to_f32(c);
    }
    if (region.level && cls == MIXP_CLASS_LOW) r = mixpi_cast_inputs(c, region);

    /* infer declares the result's shape; its dtype is that of the class, or of the guard. */
    if (r == MIXP_OK) r = c->op->infer(c);
    if (r != MIXP_OK || ctx->generation != generation) return r;
    r = mixpi_allocate_output(c, cls, region);

    /* A result without elements needs no forward; the walk passes zeros back from it. */
    if (r == MIXP_OK && c->out->count) r = c->op->forward(c);
    if (r != MIXP_OK || ctx->generation != generation) return r;
    if (!mixpi_is_real(c->out->dtype)) return r;
    if (region.level) mixpi_count_lowered(ctx->casting, region, c->op->name, c->out);
    return r;
}

/* Makes an entry. Its memory: the entry; an even number of versions; the inputs, padded to a
 * multiple of four so that operators may read inputs that were left out; the attributes, which have
 * the entry's alignment; then one byte of flags for each input. */
static mixpi_tape_entry *mixpi_entry_new(
    mixp_context *ctx, const mixp_op *op, int n_in, mixp_tensor *const *in, const void *attrs) {
    size_t places = ((size_t)n_in + 3) / 4 * 4, versions = ((size_t)n_in + 2) / 2 * 2;
    mixpi_tape_entry *e = (mixpi_tape_entry *)mixpi_step_alloc(
        ctx, sizeof *e + versions * sizeof *e->versions + places * sizeof *in + op->attrs_size +
                 (size_t)n_in);
    if (!e) return NULL;
    memset(e->reads, 0xFF, sizeof e->reads);
    e->call.ctx = ctx;
    e->call.op = op;
    e->call.n_in = n_in;
    e->tangent_of = ctx->tape.tangent_of;
    e->versions = (uint64_t *)(void *)(e + 1);
    e->call.in = (mixp_tensor **)(void *)(e->versions + versions);
    memcpy(e->call.in, in, (size_t)n_in * sizeof *in);
    if (op->attrs_size) e->call.attrs = memcpy(e->call.in + places, attrs, op->attrs_size);
    e->inputs = (unsigned char *)(e->call.in + places) + op->attrs_size;
    return e;
}

/* Input i of a call; for i = n_in the result. */
static mixp_tensor *mixpi_call_tensor(const mixp_call *c, int i) {
    return i < c->n_in ? c->in[i] : c->out;
}

/* Puts a call on the tape, with the versions of the tensors that it read. */
static void mixpi_record_call(mixpi_tape_entry *e) {
    mixp_context *ctx = e->call.ctx;
    for (int i = 0; i <= e->call.n_in; i++) {
        mixp_tensor *t = mixpi_call_tensor(&e->call, i);
        e->versions[i] = t ? mixpi_origin(t)->version : 0;
    }
    e->call.out->own.from_tape = 1;
    e->older = ctx->tape.newest;
    ctx->tape.newest = e;
}

/* Which inputs need a gradient? Returns 1 if any does. */
static int mixpi_note_inputs(mixpi_tape_entry *e, mixp_tensor *const *given) {
    int grad = 0;
    for (int i = 0; i < e->call.n_in; i++) {
        if (given[i]) mixpi_origin(given[i])->own.read_in = e->call.ctx->generation;
        e->inputs[i] = mixp_call_wants(&e->call, i) ? 0 : MIXPI_INPUT_CONSTANT;
        grad |= !e->inputs[i];
    }
    return grad;
}

static mixp_tensor *mixpi_apply(mixp_context *ctx, const mixp_op *op, int n_in,
    mixp_tensor *const *in, int required, const void *attrs) {
    if (!ctx || mixpi_check_apply(ctx, op, n_in, in, required, attrs) != MIXP_OK) return NULL;
    if (!mixpi_casting_of(ctx)) return NULL;
    const uint64_t reported = ctx->errors.reported;
    mixpi_tape_entry *e = mixpi_entry_new(ctx, op, n_in, in, attrs);
    if (!e) return NULL;
    ctx->tape.calls++;
    e->site = mixpi_watcher_enter(ctx, op, n_in, e->call.in);
    if (ctx->errors.reported != reported) return NULL; /* no memory for the site */

    /* Run it, and show the guard what it stored. */
    mixp_result r = mixpi_run_inside(&e->call, mixpi_run_forward);
    if (mixpi_note_failure_since(ctx, reported, op->name, r) != MIXP_OK) return NULL;
    r = mixpi_watcher_stored(e, in);
    if (mixpi_note_failure_since(ctx, reported, op->name, r) != MIXP_OK) return NULL;

    /* Record it, if a gradient will flow back. Messages name the operator that made the values. */
    mixp_tensor *out = e->call.out;
    const int grad = mixpi_note_inputs(e, in);
    const int copies = e->alias || mixpi_is_cast(op);
    out->own.made = copies ? e->call.in[0]->own.made : op->name;
    if (grad && op->backward && !mixpi_is_no_grad(ctx) && mixpi_is_real(out->dtype)) {
        mixpi_record_call(e);
        return out;
    }

    /* Otherwise name the operator that stops the gradients, for the message of mixp_backward. */
    if (e->alias) mixpi_origin(out)->own.aliased = 1;
    if (grad && !op->backward) out->own.cut = op->name;
    for (int i = 0; i < n_in && !out->own.cut; i++)
        if (e->call.in[i]) out->own.cut = e->call.in[i]->own.cut;

    /* A block under MIXP_NO_GRAD frees its calls' results when it ends. */
    if (ctx->tape.in_block == MIXPI_BLOCK_NO_GRAD) {
        e->older = ctx->tape.unrecorded;
        ctx->tape.unrecorded = e;
    }
    return out;
}

MIXPREC_API mixp_tensor *mixp_apply(mixp_context *ctx, const mixp_op *op, int n_in,
    mixp_tensor *const *in, int required, const void *attrs) {
    const int before = mixpi_enter(ctx);
    mixp_tensor *y = mixpi_apply(ctx, op, n_in, in, required, attrs);
    mixpi_leave(ctx, before, MIXP_OK);
    return y;
}

MIXPREC_API mixp_result mixp_call_output(
    mixp_call *c, mixp_dtype dtype, int rank, const int64_t *shape) {
    c->out = mixpi_tensor_new(c->ctx, "", dtype, rank, shape, 0, 0);
    return c->out ? MIXP_OK : mixpi_failed(c->ctx);
}

/* Like mixp_call_output, for a dtype that autocast must not change. */
static mixp_result mixpi_call_output_fixed(
    mixp_call *c, mixp_dtype dtype, int rank, const int64_t *shape) {
    mixpi_entry(c)->fixed_dtype = 1;
    return mixp_call_output(c, dtype, rank, shape);
}

MIXPREC_API mixp_result mixp_call_alias(mixp_call *c, int rank, const int64_t *shape) {
    mixp_result r = mixpi_call_output_fixed(c, c->in[0]->dtype, rank, shape);
    mixpi_entry(c)->alias = 1;
    if (r == MIXP_OK && c->out->count != c->in[0]->count)
        return mixp_context_fail(c->ctx, MIXP_ERR_SHAPE,
            "%s: %.0f elements do not fit a shape of %.0f elements", c->op->name,
            (double)c->in[0]->count, (double)c->out->count);
    return r;
}

MIXPREC_API void mixp_call_reads(mixp_call *c, int i, uint32_t what) {
    if (i >= 0) mixpi_entry(c)->reads[mixpi_min(i, MIXPI_READS - 1)] = what;
}

/* Sets, for the gradients of all inputs, the tensors that backward reads. */
static void mixpi_call_reads_all(mixp_call *c, uint32_t what) {
    for (int i = 0; i < MIXPI_READS; i++) mixp_call_reads(c, i, what);
}

MIXPREC_API mixp_tensor *mixp_call_save(
    mixp_call *c, int slot, mixp_dtype dtype, int rank, const int64_t *shape) {
    const mixp_tensor *kept = slot >= 0 && slot < MIXP_MAX_SAVED ? c->saved[slot] : NULL;
    if (kept && kept->data && kept->dtype == dtype && kept->rank == rank && /* computed again */
        (!rank || !memcmp(kept->shape, shape, (size_t)rank * sizeof *shape)))
        return c->saved[slot];
    if (slot >= 0 && slot < MIXP_MAX_SAVED)
        return c->saved[slot] = mixp_activation(c->ctx, dtype, rank, shape);
    mixp_context_fail(c->ctx, MIXP_ERR_ARGUMENT,
        "%s: mixp_call_save: slot is %d; the last slot is %d", c->op->name, slot,
        MIXP_MAX_SAVED - 1);
    return NULL;
}
