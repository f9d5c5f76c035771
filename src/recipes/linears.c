#pragma once
#include "lossy.c"
#include "../operators/products.c"
/* --- recipes: which operand of a linear layer is quantised how ------------------------------ */

/* Uses the best instruction set: all are bit-identical. */
MIXPREC_API mixp_result mixp_quantise(
    const mixp_exec *x, const mixp_quantise_args *k, float *decode) {
    if (!x || !k || !decode) return MIXP_ERR_ARGUMENT;
    mixp_quantise_args own = *k;
    own.decode = decode;
    own.times = NULL;
    const mixpi_float_mode mode = mixpi_float_calm();
    const mixp_result r = mixpi_cpu_portable()->kernels->quantise(x, &own);
    mixpi_float_leave(mode);
    return r;
}

MIXPREC_API mixp_result mixp_hadamard(
    const mixp_exec *x, int64_t rows, int64_t cols, mixp_in a, mixp_bf16 *y) {
    mixp_hadamard_args k;
    k.rows = rows;
    k.cols = cols;
    k.a = a;
    k.y = y;
    return x ? mixpi_cpu_portable()->kernels->hadamard(x, &k) : MIXP_ERR_ARGUMENT;
}

/* How a recipe quantises one linear layer, decided by its first forward; mixp_recompute runs
 * forward again. step, call: the key of its random numbers. */
typedef struct mixpi_recipe_call {
    mixp_recipe recipe;
    uint64_t    step, call;
    mixpi_lossy *lossy;         /* loss of the operands, under a guard; otherwise NULL     */
    int         fallen;         /* bits of the operands whose products are bf16            */
    int         enters;         /* 1: the amax of operands enters the history              */
    int         coded;          /* 1: x is kept as codes for the gradient of the weight    */
    float       decode;         /* factor of the codes; set only in host memory            */
    mixpi_scaled *scaled;       /* state of delayed scaling, or NULL                       */
} mixpi_recipe_call;

/* A quantised operand, in the arena or of a weight, and the factor for its product. factor: the
 * device's kernel wrote the factor there, times that of the product's other operand, if quantised
 * before. high: the product is bf16, and does not read the operand. lent: another product reads it
 * too, and the caller frees it. how, scales: set if narrow products run. lines: a factor for each
 * row of the product's result, or NULL. down: lines has a factor for each column instead. kept:
 * lines is saved for backward. */
typedef struct mixpi_quantised {
    mixp_tensor *y, *factor, *scales, *lines;
    mixp_narrow  how;
    float        decode;
    int          high, lent, down, kept;
} mixpi_quantised;

/* An operand that is not yet quantised, of the product of the operands a and b. */
static mixpi_quantised mixpi_recipe_empty(const mixpi_recipe_call *rc, mixpi_role a, mixpi_role b) {
    mixpi_quantised q = MIXPI_ZERO;
    q.decode = 1.0f;
    q.high = (rc->fallen >> a | rc->fallen >> b) & 1;
    return q;
}

static const float *mixpi_recipe_factor(const mixpi_quantised *q) {
    return q->factor && !q->high ? (const float *)q->factor->data : NULL;
}

/* The number of which each size of a linear must be a multiple. */
static int64_t mixpi_recipe_unit(mixp_recipe_kind kind) {
    return kind == MIXP_RECIPE_FP8_BLOCK ? 128 : kind == MIXP_RECIPE_MXFP8 ? 32 : 16;
}

/* The parameter that a linear multiplies by; NULL: its weight is the result of an operator. */
static mixp_tensor *mixpi_recipe_weight(const mixp_call *c) {
    mixp_tensor *w = mixpi_lasting(c->in[1]);
    return w && (w->own.is_param || w->own.optimizers > 0) ? w : NULL;
}

/* Counts a linear whose sizes do not fit. The first one is kept, and warned of, by name. */
static void mixpi_recipe_unfit(const mixp_call *c, const mixp_recipe *r) {
    const mixp_gemm_args *g = &((const mixpi_product *)c->attrs)->g;
    const int64_t sizes[3] = { g->m, g->n, g->k };
    mixp_recipe_counts *counts = &c->ctx->casting->recipes;
    if (counts->unfit++) return;
    snprintf(counts->unfit_name, sizeof counts->unfit_name, "%.63s", c->in[1]->name);
    memcpy(counts->unfit_sizes, sizes, sizeof counts->unfit_sizes);
    mixpi_warn(c->ctx,
        "mixp_linear '%.63s' stays bf16: its rows, outputs and inputs, %.0f, %.0f and %.0f, are "
        "not all multiples of %d, as the recipe %s needs. Pad them, or keep this linear out with "
        "mixp_autocast_set_recipes or mixp_guard_pin",
        counts->unfit_name, (double)sizes[0], (double)sizes[1], (double)sizes[2],
        (int)mixpi_recipe_unit(r->kind), mixp_recipe_name(r->kind));
}

/* Does a linear train, rather than evaluate or compare? */
static int mixpi_recipe_trains(const mixp_context *ctx) {
    return !mixpi_is_no_grad(ctx) && !ctx->evaluates && !(mixpi_watched(ctx) & MIXPI_TRIAL);
}

/* Uses the recipe r for a linear. enters: the amax of its operands enters the history. */
static mixp_result mixpi_recipe_take(mixp_call *c, const mixp_recipe *r, int enters) {
    mixpi_product *p = (mixpi_product *)c->attrs;
    mixpi_recipe_call *rc = (mixpi_recipe_call *)mixpi_step_alloc(c->ctx, sizeof *rc);
    if (!rc) return MIXP_ERR_MEMORY;
    if (r->kind == MIXP_RECIPE_FP8_DELAYED) {
        mixp_result made;
        rc->scaled = mixpi_scaled_of(c->ctx, mixpi_recipe_weight(c), r, &made);
        if (!rc->scaled) return made;
        if (enters) rc->scaled->recipe = *r;
    }
    rc->enters = enters;
    rc->lossy = mixpi_lossy_of(c);
    rc->fallen = mixpi_lossy_has_fallen(rc->lossy);
    rc->recipe = *r;
    rc->step = mixpi_random_step(c->ctx);
    rc->call = (uint64_t)c->ctx->recipes->quantised++;
    c->ctx->casting->recipes.quantised++;
    p->recipe = rc;
    return MIXP_OK;
}

/* The recipe of a linear with this weight by the rules; NULL: it multiplies in bf16. */
static const mixp_recipe *mixpi_recipe_by_rules(const mixp_context *ctx, mixp_tensor *weight) {
    const mixp_tensor *w = mixpi_lasting(weight);
    return mixpi_rules_recipe(ctx->recipes, w ? w->name : "");
}

/* Do the rules leave both linears in bf16? Counts them if so. */
static int mixpi_recipe_leaves(mixp_context *ctx, mixp_tensor *up, mixp_tensor *down) {
    const mixp_recipe *r = mixp_autocast_current(ctx).recipe;
    if (!r) return 1;
    if (!mixpi_recipe_is_rules(ctx, r)) return 0;
    if (mixpi_recipe_by_rules(ctx, up) || mixpi_recipe_by_rules(ctx, down)) return 0;
    ctx->casting->recipes.kept += 2;
    return 1;
}

/* The recipe of a linear; NULL: it multiplies in bf16, as the products of tangents do, which
 * therefore change no scale of delayed scaling. */
static const mixp_recipe *mixpi_recipe_now(const mixp_call *c) {
    const mixp_recipe *r = mixp_autocast_current(c->ctx).recipe;
    if (c->ctx->tape.tangent_of) return NULL;
    if (!mixpi_recipe_is_rules(c->ctx, r)) return r;
    r = mixpi_recipe_by_rules(c->ctx, c->in[1]);
    if (!r) c->ctx->casting->recipes.kept++;
    return r;
}

/* Decides for a linear, and counts the decision. */
static mixp_result mixpi_recipe_decide(mixp_call *c) {
    mixpi_product *p = (mixpi_product *)c->attrs;
    mixpi_recipes *s = c->ctx->recipes;
    mixp_recipe_counts *counts = &c->ctx->casting->recipes;
    const mixp_gemm_args *g = &p->g;
    if (p->asked) return MIXP_OK;
    p->asked = 1;
    const mixp_recipe *r = mixpi_recipe_now(c);
    if (!r) return MIXP_OK;

    const int enters = mixpi_recipe_trains(c->ctx);
    if (enters && r->kind == MIXP_RECIPE_FP8_DELAYED) {
        s->trained = *r;
        s->trained_in = c->ctx->generation;
    }

    /* Kept in 16 bits, of a size that does not fit, or quantised. */
    int64_t unit = mixpi_recipe_unit(r->kind);
    int kept = c->out->dtype != MIXP_BF16 || mixpi_watcher_is_pinned(c);
    kept |= c->in[0]->dtype != MIXP_BF16 || c->in[1]->dtype != MIXP_BF16;
    kept |= r->kind == MIXP_RECIPE_FP8_DELAYED && !mixpi_recipe_weight(c);
    if (kept) counts->kept++;
    else if (g->m % unit || g->n % unit || g->k % unit || !g->m || !g->k) mixpi_recipe_unfit(c, r);
    else return mixpi_recipe_take(c, r, enters);
    return MIXP_OK;
}

/* How a recipe quantises an operand for a product that sums over its rows, or its columns. */
static void mixpi_recipe_plan(
    const mixp_recipe *r, mixpi_role role, int rows, mixp_quantise_args *k) {
    const int64_t n = mixpi_recipe_unit(r->kind);
    k->element = MIXP_F8_E4M3;
    k->scale = MIXP_SCALE_TENSOR;

    /* One factor for the array. */
    if (r->kind == MIXP_RECIPE_FP8_CURRENT || r->kind == MIXP_RECIPE_FP8_DELAYED) {
        if (role == MIXPI_ROLE_DY && !r->dy_e4m3) k->element = MIXP_F8_E5M2;
        k->power = r->kind == MIXP_RECIPE_FP8_CURRENT && r->power_2;
        return;
    }

    /* One for each block of 1 x n along the sum: along the columns or, for the gradient of a
     * weight, the rows. A weight may have squares. */
    k->block_rows = rows ? n : 1;
    k->block_cols = rows ? 1 : n;
    k->e8m0 = r->e8m0;
    if (role == MIXPI_ROLE_W && r->kind != MIXP_RECIPE_MXFP8 && !r->no_2d)
        k->block_rows = k->block_cols = n;
    if (r->kind == MIXP_RECIPE_FP8_BLOCK) k->scale = MIXP_SCALE_POWER;
    if (r->kind == MIXP_RECIPE_MXFP8) k->scale = MIXP_SCALE_E8M0;

    if (r->kind != MIXP_RECIPE_NVFP4) return;
    k->element = MIXP_F4_E2M1;
    k->scale = MIXP_SCALE_E4M3;
    k->stochastic = role == MIXPI_ROLE_DY && !r->no_stochastic;
    if (role == MIXPI_ROLE_W) k->choice = r->w_4over6;
    if (role == MIXPI_ROLE_X) k->choice = r->x_4over6;
    k->bound_448 = r->bound_448;
    k->by_lines = role == MIXPI_ROLE_X && r->row_scaled;
}

static void mixpi_recipe_free(mixp_context *ctx, mixp_tensor *t) {
    if (t && t->own.generation) mixpi_arena_free(ctx, &ctx->memory.dev, t->data, mixpi_bytes(t));
}

/* Writes the Hadamard transform of k->x to a new array of the arena, and sets k->x to that. */
static mixp_result mixpi_recipe_transform(
    mixp_call *c, mixp_quantise_args *k, mixp_tensor **transformed) {
    const int64_t count = k->rows * k->cols;
    mixp_hadamard_args h;
    *transformed = mixp_activation(c->ctx, MIXP_BF16, 1, &count);
    if (!*transformed) return MIXP_ERR_MEMORY;
    h.rows = k->rows;
    h.cols = k->cols;
    h.a = k->x;
    h.y = (mixp_bf16 *)(*transformed)->data;
    k->x = mixpi_tensor_in(*transformed);
    if (c->ctx->device->kernels->hadamard) return MIXPI_RUN(c, hadamard, &h);
    return mixp_hadamard(&c->ctx->exec, h.rows, h.cols, h.a, h.y);
}

/* Quantises k->x into q->y. Where memory is the host's, the factor is in q->decode. */
static mixp_result mixpi_recipe_quantise(mixp_call *c, mixp_quantise_args *k, mixpi_quantised *q) {
    const mixp_device *device = c->ctx->device;
    const int64_t two = 2;
    k->y = (mixp_bf16 *)q->y->data;
    if (!device->kernels->quantise) return mixp_quantise(&c->ctx->exec, k, &q->decode);
    if (!device->download) k->decode = &q->decode;
    else if (mixpi_has_scale_of_array(k->scale)) {
        q->factor = mixp_activation(c->ctx, MIXP_F32, 1, &two);
        if (!q->factor) return MIXP_ERR_MEMORY;
        k->decode = (float *)q->factor->data;
        k->own = k->decode + 1;
    }
    return MIXPI_RUN(c, quantise, k);
}

/* --- quantised values of weights ---
 * They last as long as the weight's tensor, and are made again when the weight was written or
 * another recipe reads it. On a device a graph would write them unseen by the host: there they are
 * made for each product. */

typedef struct mixpi_weight_copy {
    mixp_tensor       *y;
    mixp_quantise_args plan;    /* what y was made by                                      */
    uint64_t           versions[2];     /* versions of the weight read; 0: y holds nothing */
    float              decode, amax;
} mixpi_weight_copy;

/* The versions of the values that a linear reads: of the tensor, and of the master weight from
 * which the tensor was cast. */
static void mixpi_weight_versions(const mixp_tensor *w, uint64_t versions[2]) {
    const mixp_tensor *master = w->own.master;
    versions[0] = w->version + 1;
    versions[1] = master ? master->own.low_version[w->dtype == MIXP_BF16] : 0;
}

/* The place of a weight's quantised values; NULL: they are made for each product, or *r is an
 * error. */
static mixpi_weight_copy *mixpi_weight_place(
    mixp_call *c, const mixp_quantise_args *k, int rows, mixp_result *r) {
    mixp_tensor *owner = mixpi_lasting(c->in[1]), *y;
    mixpi_weight_copy *copy;
    if (!owner || c->ctx->device->download) return NULL;
    mixpi_weight_copy **place = &owner->own.quantised[rows && k->block_rows != k->block_cols];
    if (*place) return *place;
    copy = (mixpi_weight_copy *)mixpi_host_alloc(c->ctx, sizeof *copy);
    y = copy ? mixpi_twin(owner, MIXP_BF16) : NULL;
    if (y) y->data = mixpi_data_alloc(y);
    if (!y || !y->data) {
        *r = MIXP_ERR_MEMORY;
        return NULL;
    }
    copy->y = y;
    return *place = copy;
}

static int mixpi_weight_is_fresh(
    const mixpi_weight_copy *copy, const mixp_quantise_args *k, const uint64_t versions[2]) {
    const mixp_quantise_args *p = &copy->plan;
    return memcmp(copy->versions, versions, sizeof copy->versions) == 0 && p->x.data == k->x.data &&
           p->element == k->element && p->scale == k->scale && p->e8m0 == k->e8m0 &&
           p->choice == k->choice && p->bound_448 == k->bound_448 && p->power == k->power &&
           p->block_rows == k->block_rows && p->block_cols == k->block_cols && p->given == k->given;
}

/* Sets q to the weight's quantised values, quantised again if stale. */
static mixp_result mixpi_weight_quantise(
    mixp_call *c, mixpi_weight_copy *copy, mixp_quantise_args *k, mixpi_quantised *q) {
    uint64_t versions[2];
    mixpi_weight_versions(c->in[1], versions);
    q->y = copy->y;
    q->decode = copy->decode;
    k->y = (mixp_bf16 *)copy->y->data;

    /* The copy of this version serves again. */
    if (mixpi_weight_is_fresh(copy, k, versions)) {
        if (k->amax) *k->amax = copy->amax;
        return MIXP_OK;
    }

    /* Otherwise it is made, and has no version until it is complete. */
    memset(copy->versions, 0, sizeof copy->versions);
    MIXPI_TRY(mixpi_recipe_quantise(c, k, q));
    copy->plan = *k;
    copy->plan.decode = copy->plan.amax = NULL;
    copy->decode = q->decode;
    copy->amax = k->amax ? *k->amax : 0.0f;
    memcpy(copy->versions, versions, sizeof versions);
    return MIXP_OK;
}

/* If narrow products run: notes how k quantises, and allocates memory for the scales of blocks,
 * unless k has some for codes. */
static mixp_result mixpi_recipe_scales(mixp_call *c, mixp_quantise_args *k, mixpi_quantised *q) {
    int64_t count;
    if (!c->ctx->products.narrow) return MIXP_OK;
    if (k->scale != MIXP_SCALE_TENSOR && !k->scales) {
        count = k->rows / k->block_rows * (k->cols / k->block_cols);
        q->scales = mixp_activation(c->ctx, MIXP_U8, 1, &count);
        if (!q->scales) return MIXP_ERR_MEMORY;
        k->scales = (uint8_t *)q->scales->data;
    }
    const mixp_narrow how = { k->element, k->scale, k->block_rows, k->block_cols, k->scales };
    q->how = how;
    return MIXP_OK;
}

/* Allocates memory for k's factors of lines. */
static mixp_result mixpi_recipe_lines(mixp_call *c, mixp_quantise_args *k, mixpi_quantised *q) {
    const int64_t count = mixpi_quantise_lines(k);
    q->down = k->block_cols == 1;
    q->lines = mixp_activation(c->ctx, MIXP_F32, 1, &count);
    if (!q->lines) return MIXP_ERR_MEMORY;
    k->line_scales = (float *)q->lines->data;
    return MIXP_OK;
}

/* Quantises an operand into an array of the arena. transformed: computes its Hadamard transform
 * first, into *transformed, which the caller frees; NULL: no transform. */
static mixp_result mixpi_recipe_once(
    mixp_call *c, mixp_tensor **transformed, mixp_quantise_args *k, mixpi_quantised *q) {
    const int64_t count = k->rows * k->cols;
    q->y = mixp_activation(c->ctx, MIXP_BF16, 1, &count);
    if (!q->y) return MIXP_ERR_MEMORY;
    mixp_result r = mixpi_recipe_scales(c, k, q);
    if (k->by_lines && r == MIXP_OK) r = mixpi_recipe_lines(c, k, q);
    if (transformed && r == MIXP_OK) r = mixpi_recipe_transform(c, k, transformed);
    return r == MIXP_OK ? mixpi_recipe_quantise(c, k, q) : r;
}

/* The scale of an operand under delayed scaling, and where its amax goes: to *amax, or on a device
 * to the history. */
static void mixpi_recipe_delayed(const mixp_context *ctx, const mixpi_recipe_call *rc,
    mixpi_role role, float *amax, mixp_quantise_args *k) {
    const mixpi_scaled *s = rc->scaled;
    if (!mixpi_has_own_memory(ctx)) {
        k->given = s->scales[role];
        k->amax = amax;
        return;
    }
    k->given_at = s->scales + role;
    k->amax = rc->enters ? s->history + (int64_t)role * s->length : NULL;
    k->amax_joins = 1;
}

/* Quantises an operand x[rows, cols] in the role `role`. over_rows: the product sums over its
 * rows. Free q->y with mixpi_recipe_free. */
static mixp_result mixpi_recipe_operand(mixp_call *c, const mixpi_recipe_call *rc, mixpi_role role,
    int over_rows, mixp_quantise_args *k, mixpi_quantised *q) {
    const int transforms = rc->recipe.kind == MIXP_RECIPE_NVFP4 && !rc->recipe.no_hadamard &&
                           over_rows && role != MIXPI_ROLE_W;
    mixpi_weight_copy *copy = NULL;
    mixp_tensor *transformed = NULL;
    mixp_result r = MIXP_OK;
    float amax = 0.0f;
    if (q->high && !rc->scaled && !mixpi_lossy_watches(c, rc->lossy)) return MIXP_OK;

    /* How it is quantised, and its random numbers. */
    mixpi_recipe_plan(&rc->recipe, role, over_rows, k);
    k->seed = c->ctx->seed ^ 0x7265636970657321u;
    k->step = rc->step;
    k->tensor = 2u * rc->call + (uint64_t)over_rows;
    if (rc->scaled) mixpi_recipe_delayed(c->ctx, rc, role, &amax, k);

    /* A weight is quantised once for each version, other operands in each step. */
    if (role == MIXPI_ROLE_W) copy = mixpi_weight_place(c, k, over_rows, &r);
    if (copy) r = mixpi_weight_quantise(c, copy, k, q);
    else if (r == MIXP_OK) r = mixpi_recipe_once(c, transforms ? &transformed : NULL, k, q);

    if (r == MIXP_OK && mixpi_lossy_watches(c, rc->lossy))
        r = mixpi_lossy_measure(c, &rc->recipe, rc->lossy, role, k, q->decode);
    mixpi_recipe_free(c->ctx, transformed);
    if (k->amax == &amax && rc->enters && r == MIXP_OK) mixpi_scaled_enter(rc->scaled, role, amax);
    return r;
}

/* The arguments that say which array is quantised. */
static mixp_quantise_args mixpi_recipe_of(mixp_in x, int64_t rows, int64_t cols) {
    mixp_quantise_args k = MIXPI_ZERO;
    k.x = x;
    k.rows = rows;
    k.cols = cols;
    return k;
}

/* Frees what a product quantised for itself. */
static void mixpi_quantised_free(mixp_context *ctx, const mixpi_quantised *q) {
    if (q->lent) return;
    mixpi_recipe_free(ctx, q->y);
    mixpi_recipe_free(ctx, q->factor);
    mixpi_recipe_free(ctx, q->scales);
    if (!q->kept) mixpi_recipe_free(ctx, q->lines);
}

/* Are the values of an operand the same along its rows and its columns? */
static int mixpi_recipe_has_one_scale(const mixpi_recipe_call *rc) {
    return rc->recipe.kind == MIXP_RECIPE_FP8_CURRENT || rc->recipe.kind == MIXP_RECIPE_FP8_DELAYED;
}

/* Warns, once a context, of a product that stays bf16 although narrow products were asked for. */
static void mixpi_recipe_wide(const mixp_call *c, const mixp_gemm_narrow_args *k) {
    if (c->ctx->recipes->wide_reported) return;
    c->ctx->recipes->wide_reported = 1;
    mixpi_warn(c->ctx,
        "narrow_products: the GPU's library has no product of %s and %s codes of %.0f x %.0f x "
        "%.0f for mixp_linear '%.63s', because of the GPU's capability, the library's version or "
        "the sizes. It stays a bf16 product. mixp_context_gemm_count counts both kinds; see NARROW "
        "PRODUCTS at mixp_context_desc",
        mixp_dtype_name(k->a.element), mixp_dtype_name(k->b.element), (double)k->gemm.m,
        (double)k->gemm.n, (double)k->gemm.k, c->in[1]->name);
}

/* Runs g. one, other: its quantised operands a and b, in either order. */
static mixp_result mixpi_recipe_product(mixp_call *c, const mixp_gemm_args *g,
    const mixpi_quantised *one, const mixpi_quantised *other) {
    mixp_gemm_narrow_args k;
    if (one->high || !c->ctx->products.narrow) return MIXPI_RUN(c, gemm, g);
    int first = g->a.data == one->y->data;
    k.gemm = *g;
    k.a = first ? one->how : other->how;
    k.b = first ? other->how : one->how;
    int64_t before = mixp_context_gemm_count(c->ctx).narrow;
    MIXPI_TRY(MIXPI_RUN(c, gemm_narrow, &k));
    if (mixp_context_gemm_count(c->ctx).narrow == before) mixpi_recipe_wide(c, &k);
    return MIXP_OK;
}

/* y = t times q's factors of lines, or t + bias, element by element; t[m, n] is f32. */
static mixp_result mixpi_recipe_outer(mixp_call *c, const mixp_gemm_args *g, mixp_binary op,
    mixp_in t, mixp_in b, int down, mixp_out y) {
    mixp_binary_args k = mixpi_binary_of(op, t, b, y, g->m, g->n);
    k.b_strides[0] = !down;
    k.b_strides[1] = down;
    return MIXPI_RUN(c, binary, &k);
}

/* Runs g into f32, then applies the factors of x's lines and the bias. x: one of the operands. */
static mixp_result mixpi_recipe_by_lines(mixp_call *c, const mixp_gemm_args *g,
    const mixpi_quantised *a, const mixpi_quantised *b, const mixpi_quantised *x) {
    const int64_t count = g->m * g->n;
    const mixp_in lines = mixpi_tensor_in(x->lines);
    mixp_tensor *sums = mixp_activation(c->ctx, MIXP_F32, 1, &count);
    mixp_gemm_args plain = *g;
    if (!sums) return MIXP_ERR_MEMORY;

    /* The product, without the bias. */
    mixp_in from = mixpi_tensor_in(sums);
    mixp_out to = mixpi_out_to(sums->data, MIXP_F32, 0);
    plain.c = to;
    plain.ldc = g->n;
    memset(&plain.bias, 0, sizeof plain.bias);
    mixp_result r = mixpi_recipe_product(c, &plain, a, b);

    if (r == MIXP_OK)
        r = mixpi_recipe_outer(
            c, g, MIXP_BINARY_MUL, from, lines, x->down, g->bias.data ? to : g->c);
    if (r == MIXP_OK && g->bias.data)
        r = mixpi_recipe_outer(c, g, MIXP_BINARY_ADD, from, g->bias, 1, g->c);
    mixpi_recipe_free(c->ctx, sums);
    return r;
}

/* Runs g with its two operands already in place, a quantised before b, and frees the quantised
 * operands. */
static mixp_result mixpi_recipe_run(mixp_call *c, mixp_gemm_args *g, mixp_result r,
    const mixpi_quantised *a, const mixpi_quantised *b) {
    mixp_recipe_counts *counts = &c->ctx->casting->recipes;
    if (r == MIXP_OK) {
        g->alpha = a->high ? 1.0f : a->decode * b->decode;
        g->alpha_at = mixpi_recipe_factor(b);
        const mixpi_quantised *x = a->lines ? a : b;
        r = x->lines && !a->high ? mixpi_recipe_by_lines(c, g, a, b, x)
                                 : mixpi_recipe_product(c, g, a, b);
    }
    if (r == MIXP_OK) ++*(a->high ? &counts->fallen : &counts->products);
    mixpi_quantised_free(c->ctx, a);
    mixpi_quantised_free(c->ctx, b);
    return r;
}
