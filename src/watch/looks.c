#pragma once
#include "looks_memory.c"
#include "precision.c"
/* --- looks ----------------------------------------------------------------------------- */

/* Row `which` of a site, in device memory. */
static mixp_look *mixpi_look_row(const mixpi_watch *w, int number, int which) {
    return &w->rows[MIXPI_ROW_SITES + (number - 1) * MIXPI_LOOKS + which];
}

/* The dtype whose range judges a site: its low dtype, or the region's if it stores f32 in any
 * case. */
static mixp_dtype mixpi_look_low(const mixpi_site *site) {
    if (site->low != MIXP_F32) return site->low;
    return mixpi_is_low(site->around) ? site->around : MIXP_F16;
}

/* Looks at t for a row of a site; at a gradient also for the row of all such gradients. */
static mixp_result mixpi_look(mixp_context *ctx, int number, int which, const mixp_tensor *t) {
    const int is_grad = which == MIXPI_LOOK_GRAD || which == MIXPI_LOOK_LEAF;
    const int total = mixpi_is_low(t->dtype) ? MIXPI_ROW_NARROW : MIXPI_ROW_WIDE;
    if (mixpi_rows_reach(ctx, number) != MIXP_OK) return MIXP_ERR_MEMORY;
    mixp_look_args k = mixpi_look_at(mixpi_tensor_in(t), t->count,
        mixpi_look_low(mixpi_site_at(ctx, number)), mixpi_look_row(ctx->watch, number, which));
    k.total = is_grad ? &ctx->watch->rows[total] : NULL;
    return mixpi_note_failure(ctx, "look", ctx->device->kernels->look(&ctx->exec, &k));
}

/* Is t the batch, that is, neither a parameter, nor a buffer, nor the result of a site? */
static int mixpi_is_data(const mixp_tensor *t) {
    if (!t || !mixpi_is_real(t->dtype) || t->requires_grad || t->own.master) return 0;
    if (t->own.generation) return !t->own.watch.site && !t->own.from_tape;
    return !t->own.is_param && !t->own.backup;
}

/* In a sampled step looks at t, an input of a site, if t is the batch. */
static mixp_result mixpi_look_data(mixp_context *ctx, int number, const mixp_tensor *t) {
    if (!mixpi_context_is_sampled(ctx) || !mixpi_is_data(t)) return MIXP_OK;
    if (mixp_bits_of_f32(t->own.watch.written) == 0x7F800000u) return MIXP_OK; /* mixp_full */
    return mixpi_look(ctx, number, MIXPI_LOOK_DATA, t);
}

/* Shows t to the observer: what a site stored, or the gradient of that. */
static void mixpi_site_show(mixp_context *ctx, int number, const mixp_tensor *t, int backward) {
    const mixpi_watch *w = ctx->watch;
    const mixpi_site *site = mixpi_site_at(ctx, number);
    mixp_sight sight;
    if (!w->observer.see || ctx->capture.active) return;
    sight.site = number;
    sight.name = site->name;
    sight.op = site->op;
    sight.reads = site->from;
    sight.tensor = t;
    sight.backward = backward;
    sight.sample = w->sampled ? w->begun : 0;
    sight.draws = ctx->tape.drawn;
    w->observer.see(ctx, &sight, w->observer.user);
}

/* After an operator: records which dtype its site stored, and in a sampled step looks at the
 * values. t: the result, or the input of a cast that was left out. */
static mixp_result mixpi_site_note_stored(
    mixp_context *ctx, int number, const mixp_tensor *t, mixp_dtype low) {
    mixpi_site *site = mixpi_site_at(ctx, number);
    mixpi_watch *w = ctx->watch;
    site->stores = 1;
    site->scalar = t->count == 1;
    site->dtype = t->dtype;
    site->low = low;
    site->around = mixp_autocast_current(ctx).dtype;
    mixpi_site_show(ctx, number, t, 0);
    if (!w->sampled) return MIXP_OK;
    site->place = ++w->stored;
    return mixpi_look(ctx, number, MIXPI_LOOK_VALUE, t);
}

/* Does the result count as its input when sites are identified? True for casts, which a fallback
 * adds and removes, for reshapes of the same memory, and for dropout, which evaluations leave
 * out. */
static int mixpi_is_seen_through(const mixpi_tape_entry *e) {
    return e->alias || mixpi_is_cast(e->call.op) || e->call.op == mixp_op_builtin(MIXP_OP_DROPOUT);
}

/* Notes the largest constant that the program wrote: into the result, or into an input that no site
 * made. */
static void mixpi_note_constant(const mixpi_tape_entry *e, mixp_tensor *const *given) {
    mixpi_site *site = mixpi_site_at(e->call.ctx, e->site);
    float written = e->call.out->own.watch.written;
    for (int i = 0; i < e->call.n_in; i++)
        if (given[i] && !given[i]->own.watch.site && given[i]->own.watch.written > written)
            written = given[i]->own.watch.written;
    site->written = written;
}

/* x where x is above 0, else 0, in an array of the arena; NULL: an error, in *r. */
static mixp_tensor *mixpi_above_zero(mixp_context *ctx, const mixp_tensor *x, mixp_result *r) {
    mixp_tensor *y = mixp_activation(ctx, MIXP_F32, x->rank, x->shape);
    *r = MIXP_ERR_MEMORY;
    if (!y) return NULL;
    const mixp_unary_args k =
        mixpi_unary_of(MIXP_UNARY_RELU, 0.0f, mixpi_tensor_in(x), mixpi_tensor_out(y, 0), x->count);
    *r = mixpi_note_failure(ctx, "look", ctx->device->kernels->unary(&ctx->exec, &k));
    return y;
}

/* In a sampled step looks at the log-sum-exp of attention's scores. Those below 0 do not count: a
 * query whose keys are all hidden by a finite mask, such as -1e30, has the mask's value. */
static mixp_result mixpi_look_scores(const mixpi_tape_entry *e) {
    mixp_context *ctx = e->call.ctx;
    const mixp_tensor *lse = e->call.saved[0];
    mixp_result r;
    if (!mixpi_context_is_sampled(ctx) || !lse || !lse->data) return MIXP_OK;
    if (!(mixpi_site_at(ctx, e->site)->traits & MIXPI_SCORES)) return MIXP_OK;
    mixp_tensor *counts = mixpi_above_zero(ctx, lse, &r);
    if (r == MIXP_OK) r = mixpi_look(ctx, e->site, MIXPI_LOOK_LOSS, counts);
    if (counts) mixpi_arena_free(ctx, &ctx->memory.dev, counts->data, mixpi_bytes(counts));
    return r;
}

/* After the forward pass of a call. */
static mixp_result mixpi_look_forward(mixpi_tape_entry *e, mixp_tensor *const *given) {
    mixp_context *ctx = e->call.ctx;
    mixp_tensor *out = e->call.out;
    const int through = mixpi_is_seen_through(e);

    /* The result carries its site. Behind an alias, a cast or a dropout it carries that of the
     * input. */
    out->own.watch.site = through ? given[0]->own.watch.site : e->site;
    out->own.watch.seen = through ? mixpi_seen_as(given[0]) : NULL;
    if (mixpi_is_cast(e->call.op) && !out->own.watch.site) out->own.watch.site = e->site;
    if (e->alias) out->own.watch.raised = given[0]->own.watch.raised;
    if (through) out->own.watch.written = given[0]->own.watch.written;
    mixpi_note_constant(e, given);
    if (e->alias) e->site = 0; /* its memory has been looked at already */
    if (e->alias || !mixpi_is_real(out->dtype)) return MIXP_OK;

    /* Look at what was stored, what it was made from, and the result that f32 would have. */
    const mixp_dtype plain = mixpi_plain_dtype(out);
    MIXPI_TRY(mixpi_site_note_stored(ctx, e->site, out, mixpi_is_low(plain) ? plain : MIXP_F32));
    if (mixpi_inspects(ctx, e->site, out))
        MIXPI_TRY(mixpi_is_cast(e->call.op) /* which still has its unrounded input */
                      ? mixpi_inspect(ctx, e->site, given[0], out, 0)
                      : mixpi_inspect_again(e, given, mixpi_run_inside));
    MIXPI_TRY(mixpi_look_scores(e));
    for (int i = 0; i < e->call.n_in; i++) MIXPI_TRY(mixpi_look_data(ctx, e->site, given[i]));
    return MIXP_OK;
}

/* Before an operator is walked back: looks at the gradient of its result. */
static mixp_result mixpi_look_backward(mixp_context *ctx, int number, const mixp_tensor *g) {
    mixpi_site_show(ctx, number, g, 1);
    if (!mixpi_context_is_sampled(ctx)) return MIXP_OK;
    return mixpi_look(ctx, number, MIXPI_LOOK_GRAD, g);
}

/* The site of a call whose dtypes the guard decides; NULL: none, as while only an observer sees. */
static const mixpi_site *mixpi_guarded_site(const mixp_call *c) {
    return mixpi_guard_is_on(c->ctx) ? mixpi_site_at(c->ctx, mixpi_entry_of(c)->site) : NULL;
}

/* Does a product read input i without a cast? Yes if the guard raised the input to f32, since a
 * cast would overflow again; if the cast itself overflowed; and if the product still overflowed
 * with an f32 result. */
static int mixpi_stays_uncast(mixp_call *c, int i, int cached, mixp_dtype low, mixp_result *r) {
    mixp_context *ctx = c->ctx;
    mixp_tensor *t = c->in[i];
    const mixpi_site *reader = mixpi_guarded_site(c);

    if (reader && t->own.watch.raised != MIXP_F32) return 1;
    if (cached) return reader && reader->fallen == 2;

    /* Is the cast left out? Then the cast still has its own site. */
    ctx->watch->reader = mixpi_entry(c)->site;
    ctx->watch->input = i;
    if (!reader) return 0;
    int n = mixpi_cast_site(ctx, t, 0);
    if (reader->fallen != 2 && !mixpi_site_holds_f32(ctx, mixpi_site_at(ctx, n))) return 0;
    n = mixpi_cast_site(ctx, t, 1);

    if (!n) return 1;
    *r = mixpi_site_note_stored(ctx, n, t, low);
    if (*r == MIXP_OK) *r = mixpi_look_data(ctx, n, t);
    if (*r == MIXP_OK && mixpi_inspects(ctx, n, t)) *r = mixpi_inspect(ctx, n, t, t, 0);
    return 1;
}

/* Looks at the gradients of parameters and views that c wrote, after its backward. */
static mixp_result mixpi_look_leaves(const mixp_call *c, int number) {
    mixp_context *ctx = c->ctx;
    mixp_result r = MIXP_OK;
    if (!mixpi_context_is_sampled(ctx)) return MIXP_OK;
    for (int i = 0; i < c->n_in && r == MIXP_OK; i++) {
        mixp_tensor *t = mixpi_grad_owner(c, i);
        if (!t || t->own.from_tape || !t->grad || !mixp_call_wants(c, i)) continue;
        r = mixpi_look(ctx, number, MIXPI_LOOK_LEAF, t->grad);
    }
    return r;
}

/* Sets the dtype of a result for which autocast has chosen a dtype. */
static void mixpi_site_choose(mixp_call *c) {
    const mixp_op_class cls = mixpi_class_of(c->ctx, c->op);
    mixpi_site *site = mixpi_site_at(c->ctx, mixpi_entry(c)->site);
    mixp_tensor *out = c->out;
    const mixp_dtype plain = out->dtype;
    if (!mixpi_guard_is_on(c->ctx)) return;
    if (site) site->carries = mixpi_class_carries(cls);
    out->dtype = mixpi_guarded_dtype(c->ctx, site, cls, c->n_in, c->in, plain);
    if (out->dtype != plain) out->own.watch.raised = plain;
}

static void mixpi_site_casts(mixp_call *c) {
    mixpi_site_at(c->ctx, mixpi_entry(c)->site)->casts = 1;
}

static int mixpi_site_is_pinned(const mixp_call *c) {
    const mixpi_site *site = mixpi_guarded_site(c);
    return site && site->pinned;
}

/* Where a device adds what quantising a sampled site's operands loses: behind the two floats of the
 * row MIXPI_LOOK_LOSS. */
static mixp_losses *mixpi_site_losses(const mixp_call *c) {
    const int number = mixpi_entry_of(c)->site;
    MIXPI_STATIC_ASSERT(
        losses, sizeof(mixp_losses) == sizeof(mixp_look) - offsetof(mixp_look, count));
    if (mixpi_rows_reach(c->ctx, number) != MIXP_OK) return NULL;
    return (mixp_losses *)(void *)&mixpi_look_row(c->ctx->watch, number, MIXPI_LOOK_LOSS)->count;
}

static mixpi_lossy *mixpi_site_operands(const mixp_call *c) {
    mixpi_site *site = mixpi_site_at(c->ctx, mixpi_entry_of(c)->site);
    return site ? site->operands : NULL;
}
