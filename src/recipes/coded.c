#pragma once
#include "linears.c"
/* --- recipes: the input of a linear kept as codes -------------------------------------------- *
 *
 * Forward quantises x as the gradient of the weight needs x, and keeps the codes; mixp_linear then
 * frees x. Backward turns the codes into values again.
 */
/* The tensors that a linear saves. */
enum { MIXPI_CODES, MIXPI_CODE_SCALES, MIXPI_CODE_FACTOR, MIXPI_CODE_LINES };

/* Does any gradient of e's inputs read t? Inputs that are frozen now count. */
static int mixpi_entry_reads(const mixpi_tape_entry *e, const mixp_tensor *t) {
    const mixp_call *c = &e->call;
    uint32_t what = 0, bits = c->out == t ? MIXP_READS_RESULT : 0u;
    for (int i = 0; i < c->n_in; i++) {
        if (!(e->inputs[i] & MIXPI_INPUT_CONSTANT)) what |= e->reads[mixpi_min(i, MIXPI_READS - 1)];
        if (c->in[i] == t) bits |= i < 31 ? 1u << i : MIXP_READS_ALL;
    }
    return (what & bits) != 0;
}

/* The recorded operator that made t, if t is disposable, owns its memory, and is read by no
 * gradient of a recorded operator; otherwise NULL. */
static const mixpi_tape_entry *mixpi_unread_maker(const mixp_context *ctx, const mixp_tensor *t) {
    const mixpi_tape_entry *e;
    if (!t->own.disposable || t->own.spent || t->requires_grad) return NULL;
    if (!t->own.from_tape || t->own.origin || t->own.aliased) return NULL;
    for (e = ctx->tape.newest; e; e = e->older) {
        if (e->block || mixpi_entry_reads(e, t)) return NULL;
        if (e->alias && e->call.out->own.origin == t) return NULL;
        if (e->call.out == t) return e;
    }
    return NULL;
}

/* Why the input x of a linear cannot be kept as codes; NULL: it can. */
static const char *mixpi_coded_hindrance(const mixp_call *c) {
    const mixp_tensor *x = c->in[0];
    if (c->ctx->tape.in_block) return "x is in a block of mixp_recompute";
    for (int i = 1; i < c->n_in; i++)
        if (c->in[i] && mixpi_origin(c->in[i]) == x) return "x is also the weight or the bias";
    if (mixpi_unread_maker(c->ctx, x)) return NULL;
    if (!x->own.from_tape) return "x is not the result of a recorded operator";
    if (!x->own.disposable)
        return "x is not disposable: call mixp_tensor_set_disposable(x, 1) before the last "
               "mixp_linear that reads it";
    if (x->requires_grad) return "x keeps its gradient (mixp_tensor_set_requires_grad)";
    return "another gradient reads x, or x shares its memory";
}

/* Is x kept as codes for the gradient of the weight? Notes the linear if x cannot be kept. */
static int mixpi_wants_codes(const mixp_call *c, const mixpi_recipe_call *rc) {
    const int fallen = rc->fallen >> MIXPI_ROLE_DY | rc->fallen >> MIXPI_ROLE_X;
    mixpi_recipes *s = c->ctx->recipes;
    if (!rc->recipe.codes || !rc->enters || fallen & 1) return 0;
    if (rc->coded) return 0; /* kept already: a guard measures the product a second time */
    if (mixpi_entry_of(c)->again || !mixp_call_wants(c, 1)) return 0;
    const char *why = mixpi_coded_hindrance(c);
    if (!why) return 1;
    s->uncoded++;
    s->uncoded_why = why;
    snprintf(s->uncoded_name, sizeof s->uncoded_name, "%.63s", c->in[1]->name);
    return 0;
}

static mixp_result mixpi_coded_run(mixp_call *c, const mixp_recode_args *k) {
    const mixp_context *ctx = c->ctx;
    if (ctx->device->kernels->recode) return MIXPI_RUN(c, recode, k);
    return mixpi_cpu_portable()->kernels->recode(&ctx->exec, k);
}

/* How the codes of x[rows, cols] lie in what the linear has saved. */
static mixp_recode_args mixpi_coded_args(
    const mixp_call *c, const mixpi_recipe_call *rc, const mixp_quantise_args *x) {
    mixp_quantise_args plan = *x;
    mixpi_recipe_plan(&rc->recipe, MIXPI_ROLE_X, 1, &plan);
    mixp_recode_args k = MIXPI_ZERO;
    k.rows = x->rows;
    k.cols = x->cols;
    k.element = plan.element;
    k.scale = plan.scale;
    k.block_rows = plan.block_rows;
    k.codes = (uint8_t *)c->saved[MIXPI_CODES]->data;
    if (c->saved[MIXPI_CODE_SCALES]) k.scales = (const uint8_t *)c->saved[MIXPI_CODE_SCALES]->data;
    return k;
}

/* Memory for the codes of x and the scales of their blocks. */
static mixp_result mixpi_coded_save(
    mixp_call *c, const mixpi_recipe_call *rc, const mixp_quantise_args *x) {
    const int64_t count = x->rows * x->cols;
    const int64_t bytes = rc->recipe.kind == MIXP_RECIPE_NVFP4 ? count / 2 : count;
    const int64_t scales = count / mixpi_recipe_unit(rc->recipe.kind);
    if (!mixp_call_save(c, MIXPI_CODES, MIXP_U8, 1, &bytes)) return MIXP_ERR_MEMORY;
    if (mixpi_recipe_has_one_scale(rc)) return MIXP_OK;
    return mixp_call_save(c, MIXPI_CODE_SCALES, MIXP_U8, 1, &scales) ? MIXP_OK : MIXP_ERR_MEMORY;
}

/* Keeps the codes of x. q: forward's quantised x, if the gradient of the weight has the same;
 * otherwise q->y is NULL and x is quantised here. The caller frees q->y. */
static mixp_result mixpi_coded_keep(
    mixp_call *c, mixpi_recipe_call *rc, mixp_quantise_args *x, mixpi_quantised *q) {
    mixp_result r = mixpi_coded_save(c, rc, x);
    if (r != MIXP_OK) return r;

    /* The codes, and from them the values that forward reads. */
    mixp_recode_args k = mixpi_coded_args(c, rc, x);
    if (c->saved[MIXPI_CODE_SCALES]) x->scales = (uint8_t *)c->saved[MIXPI_CODE_SCALES]->data;
    if (!q->y) r = mixpi_recipe_operand(c, rc, MIXPI_ROLE_X, 1, x, q);
    if (r != MIXP_OK) return r;
    k.y = (mixp_bf16 *)q->y->data;
    r = mixpi_coded_run(c, &k);

    /* Backward reads the codes; x itself is no longer needed. */
    rc->decode = q->decode;
    c->saved[MIXPI_CODE_FACTOR] = q->factor;
    c->saved[MIXPI_CODE_LINES] = q->lines;
    rc->coded = r == MIXP_OK;
    if (!rc->coded) return r;
    mixp_call_reads(c, 1, 0);
    c->ctx->casting->recipes.coded++;
    c->ctx->recipes->coded++;
    return MIXP_OK;
}

/* The values of x from the codes, into q->y. */
static mixp_result mixpi_coded_values(
    mixp_call *c, const mixpi_recipe_call *rc, const mixp_quantise_args *x, mixpi_quantised *q) {
    const mixp_tensor *factor = c->saved[MIXPI_CODE_FACTOR];
    const int64_t count = x->rows * x->cols, two = 2;
    mixp_recode_args k = mixpi_coded_args(c, rc, x);
    const mixp_narrow how = { k.element, k.scale, k.block_rows, k.block_rows ? 1 : 0, k.scales };

    q->how = how;
    q->lines = c->saved[MIXPI_CODE_LINES];
    q->down = q->kept = 1;
    q->y = mixp_activation(c->ctx, MIXP_BF16, 1, &count);
    if (q->y && factor) q->factor = mixp_activation(c->ctx, MIXP_F32, 1, &two);
    if (!q->y || (factor && !q->factor)) return MIXP_ERR_MEMORY;

    /* The kernel decodes with the factor of those codes. */
    q->decode = rc->decode;
    k.y = (mixp_bf16 *)q->y->data;
    k.decodes = 1;
    if (factor) {
        k.own = (const float *)factor->data + 1;
        k.times = x->times;
        k.decode = (float *)q->factor->data;
    }
    return mixpi_coded_run(c, &k);
}

/* Frees the input of the linear that was recorded last, if codes replace it; of a cast, also the
 * cast's input. */
static void mixpi_coded_free(mixp_context *ctx, const mixp_tensor *x) {
    const mixpi_tape_entry *maker = mixpi_unread_maker(ctx, x);
    while (maker) {
        mixp_tensor *freed = maker->call.out;
        const int cast = mixpi_is_cast(maker->call.op);
        maker = cast ? mixpi_unread_maker(ctx, maker->call.in[0]) : NULL;
        freed->own.spent = 1;
        mixpi_arena_free(ctx, &ctx->memory.dev, freed->data, mixpi_bytes(freed));
    }
}
