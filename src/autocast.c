#pragma once
#include "autocast.h"
#include "tensors/params.c"
#include "tensors/quantiser.c"
/* ==== 6. AUTOCAST (implementation) ==================================================== */

#define MIXPI_MAX_REGIONS   64
#define MIXPI_REGIONS_ROOM  (MIXPI_MAX_REGIONS + 1)     /* one extra for a walk back */
#define MIXPI_MAX_OVERRIDES 64
#define MIXPI_SCOPE_ROOM    201

/* Kinds of regions, by what ends them: mixp_autocast_close, the end of a block, or the end of a
 * walk. */
typedef enum mixpi_region_kind {
    MIXPI_REGION_OPENED,
    MIXPI_REGION_IN_BLOCK,
    MIXPI_REGION_IN_WALK
} mixpi_region_kind;

typedef struct mixpi_region {
    mixp_autocast     cast;
    mixpi_region_kind kind;
    int               no_grad;  /* 1: operators in the region are not recorded             */
    int               scope;    /* characters of the scopes' text that name the region */
} mixpi_region;

typedef struct mixpi_override { const mixp_op *op; mixp_op_class cls; } mixpi_override;

struct mixpi_casting {
    mixpi_region    regions[MIXPI_REGIONS_ROOM];
    mixpi_override  overrides[MIXPI_MAX_OVERRIDES];
    int             n_regions;  /* includes regions refused for lack of room               */
    int             n_overrides;
    int             block_level;
    const mixp_recipe *block_recipe;    /* of the block form; NULL: none was ever set      */
    mixp_cast_count casts;
    mixp_recipe_counts recipes;
    int             lowerable;  /* operators of this step that ran in regions of f16 or bf16 */
    int             lowered;    /* how many of those store f16, bf16, or what the guard raised */
    mixp_dtype      low;        /* dtype of the last of those regions                      */
    const char     *unlowered;  /* name of the last of those operators that kept f32       */
    char            scope[MIXPI_SCOPE_ROOM];    /* "h.3.mlp": names of scopes, joined */
};

/* The context's state of autocast, made at the first call. NULL with the error set: out of
 * memory. */
static mixpi_casting *mixpi_casting_of(mixp_context *ctx) {
    if (ctx->casting) return ctx->casting;
    ctx->casting = (mixpi_casting *)mixpi_host_alloc(ctx, sizeof *ctx->casting);
    if (ctx->casting) ctx->casting->block_level = 1;
    return ctx->casting;
}

/* Ends a step: warns if it trained in regions of f16 or bf16 that stored nothing low. */
static void mixpi_casting_turn(mixp_context *ctx) {
    mixpi_casting *c = ctx->casting;
    const int trained = ctx->walk.walked_in == ctx->generation;
    if (!c) return;
    if (c->lowerable && !c->lowered && trained)
        mixpi_warn(ctx,
            "autocast to %s stored nothing in %s: the %d operators in its regions keep the f32 of "
            "their inputs (the last is '%s'). Cast an input with mixp_cast(ctx, t, %s), or leave "
            "out the region",
            mixp_dtype_name(c->low), mixp_dtype_name(c->low), c->lowerable, c->unlowered,
            c->low == MIXP_F16 ? "MIXP_F16" : "MIXP_BF16");
    c->lowerable = c->lowered = 0;
}

/* --- regions --------------------------------------------------------------------------- */

/* The innermost region; NULL outside of all regions. */
static const mixpi_region *mixpi_region_now(const mixp_context *ctx) {
    const mixpi_casting *c = ctx ? ctx->casting : NULL;
    if (!c || !c->n_regions) return NULL;
    return &c->regions[mixpi_min(c->n_regions, MIXPI_REGIONS_ROOM) - 1];
}

MIXPREC_API mixp_autocast mixp_autocast_current(const mixp_context *ctx) {
    const mixp_autocast off = { MIXP_F32, 0, NULL };
    const mixpi_region *region = mixpi_region_now(ctx);
    if (!region || region->cast.dtype == MIXP_F32 || !region->cast.level) return off;
    return region->cast;
}

static int mixpi_is_no_grad(const mixp_context *ctx) {
    const mixpi_region *region = mixpi_region_now(ctx);
    return region && region->no_grad;
}

/* Sets whether the innermost region records. Returns what it was. */
static int mixpi_no_grad_set(mixp_context *ctx, int no_grad) {
    mixpi_casting *c = ctx->casting;
    if (!c || !c->n_regions) return 0;
    mixpi_region *region = &c->regions[mixpi_min(c->n_regions, MIXPI_REGIONS_ROOM) - 1];
    int was = region->no_grad;
    region->no_grad = no_grad;
    return was;
}

/* The names of the open scopes. *length: the valid characters. */
static const char *mixpi_scope_now(const mixp_context *ctx, int *length) {
    const mixpi_region *region = mixpi_region_now(ctx);
    *length = region ? region->scope : 0;
    return region ? ctx->casting->scope : "";
}

/* Opens a region. A refused block opens a region as well, without effect, because its end will
 * close one. */
static mixp_result mixpi_region_open(
    mixp_context *ctx, mixp_autocast cast, mixpi_region_kind kind, int no_grad) {
    mixpi_casting *c = mixpi_casting_of(ctx);
    const int most = kind == MIXPI_REGION_IN_WALK ? MIXPI_REGIONS_ROOM : MIXPI_MAX_REGIONS;
    const char *wrong = NULL;
    const mixp_autocast now = mixp_autocast_current(ctx);
    mixp_result r = MIXP_ERR_ARGUMENT;
    if (!c) return MIXP_ERR_MEMORY;

    if (!mixpi_is_real(cast.dtype)) wrong = "the dtype must be f16, bf16 or f32 (off)";
    else if (cast.level < 0 || cast.level > 3) wrong = "the level must be 0 to 3";
    else if (c->n_regions >= most)
        wrong = "too many nested regions and scopes: 64 are open; close each one that you open";
    else wrong = mixpi_quantiser_refuses(ctx, cast.dtype, cast.recipe, &r);

    /* Count a region of f16 or bf16 that differs from the region around it. */
    const int low = cast.dtype == MIXP_F16 || cast.dtype == MIXP_BF16;
    if (kind != MIXPI_REGION_IN_WALK && cast.level && low)
        ctx->low_copies.regions += cast.dtype != now.dtype || cast.level != now.level;

    /* A refused region casts as the one around it. */
    if (c->n_regions < MIXPI_REGIONS_ROOM) {
        mixpi_region *region = &c->regions[c->n_regions];
        (void)mixpi_scope_now(ctx, &region->scope);
        region->cast = wrong ? now : cast;
        region->kind = kind;
        region->no_grad = no_grad || mixpi_is_no_grad(ctx);
        region->cast.recipe =
            mixpi_quantiser_opens(ctx, region->cast.recipe, c->n_regions, region->no_grad);
    }
    /* on_error may close regions, so it is called last. */
    if (!wrong || kind == MIXPI_REGION_IN_BLOCK) c->n_regions++;
    return !wrong ? MIXP_OK
                  : mixp_context_fail(ctx, r, "autocast to %s at level %d: %s",
                        mixp_dtype_name(cast.dtype), cast.level, wrong);
}

/* Opens a region with the level for blocks. */
static mixp_result mixpi_region_open_at(
    mixp_context *ctx, mixp_dtype dtype, mixpi_region_kind kind) {
    mixpi_casting *c = mixpi_casting_of(ctx);
    mixp_autocast cast = { MIXP_F32, 0, NULL };
    cast.dtype = dtype;
    if (c) cast.level = c->block_level;
    if (c && dtype != MIXP_F32) cast.recipe = c->block_recipe;
    return mixpi_region_open(ctx, cast, kind, 0);
}

MIXPREC_API mixp_result mixp_autocast_set_level(mixp_context *ctx, int level) {
    if (!ctx || level < 0 || level > 3)
        return mixp_context_fail(
            ctx, MIXP_ERR_ARGUMENT, "mixp_autocast_set_level: %d is not 0 to 3", level);
    if (!mixpi_casting_of(ctx)) return MIXP_ERR_MEMORY;
    ctx->casting->block_level = level;
    return MIXP_OK;
}

MIXPREC_API int mixpi_autocast_enter(mixp_context *ctx, mixp_dtype dtype) {
    if (ctx) mixpi_region_open_at(ctx, dtype, MIXPI_REGION_IN_BLOCK);
    return 1;
}

MIXPREC_API int mixpi_no_grad_enter(mixp_context *ctx) {
    if (ctx) mixpi_region_open(ctx, mixp_autocast_current(ctx), MIXPI_REGION_IN_BLOCK, 1);
    return 1;
}

/* Closes the innermost block, and all regions that were pushed and not popped in it. */
MIXPREC_API int mixpi_autocast_leave(mixp_context *ctx) {
    mixpi_casting *c = ctx ? ctx->casting : NULL;
    if (!c) return 0;
    if (c->n_regions > MIXPI_REGIONS_ROOM) {
        c->n_regions--;
        return 0;
    }
    for (int i = c->n_regions; i > 0; i--) {
        if (c->regions[i - 1].kind != MIXPI_REGION_IN_BLOCK) continue;
        c->n_regions = i - 1;
        break;
    }
    return 0;
}

MIXPREC_API int mixpi_no_grad_leave(mixp_context *ctx) { return mixpi_autocast_leave(ctx); }

static int mixpi_regions_count(const mixp_context *ctx) {
    return ctx->casting ? ctx->casting->n_regions : 0;
}

/* Opens a region that only adds a name to the operators applied in it. */
static mixp_result mixpi_scope_open(mixp_context *ctx, const char *name, mixpi_region_kind kind) {
    MIXPI_TRY(mixpi_region_open(ctx, mixp_autocast_current(ctx), kind, 0));
    mixpi_casting *c = ctx->casting;
    mixpi_region *region = &c->regions[c->n_regions - 1];
    int n = region->scope;
    if (!*name) return MIXP_OK;
    snprintf(c->scope + n, sizeof c->scope - (size_t)n, n ? ".%s" : "%s", name);
    region->scope = (int)strlen(c->scope);
    return MIXP_OK;
}

MIXPREC_API int mixpi_scope_enter(mixp_context *ctx, const char *name) {
    if (ctx) mixpi_scope_open(ctx, name ? name : "", MIXPI_REGION_IN_BLOCK);
    return 1;
}
MIXPREC_API int mixpi_scope_leave(mixp_context *ctx) { return mixpi_autocast_leave(ctx); }

/* The number of the region that r opened last, or -1 if r is an error. */
static int mixpi_region_number(const mixp_context *ctx, mixp_result r) {
    return r == MIXP_OK ? mixpi_regions_count(ctx) - 1 : -1;
}

MIXPREC_API int mixp_autocast_open(mixp_context *ctx, mixp_dtype dtype) {
    if (!ctx) return -1;
    return mixpi_region_number(ctx, mixpi_region_open_at(ctx, dtype, MIXPI_REGION_OPENED));
}

MIXPREC_API int mixp_autocast_open_with(mixp_context *ctx, const mixp_autocast *region) {
    if (!ctx || !region) {
        mixp_context_fail(ctx, MIXP_ERR_ARGUMENT, "mixp_autocast_open_with: region is NULL");
        return -1;
    }
    return mixpi_region_number(ctx, mixpi_region_open(ctx, *region, MIXPI_REGION_OPENED, 0));
}

MIXPREC_API int mixp_no_grad_open(mixp_context *ctx) {
    if (!ctx) return -1;
    const mixp_autocast now = mixp_autocast_current(ctx);
    return mixpi_region_number(ctx, mixpi_region_open(ctx, now, MIXPI_REGION_OPENED, 1));
}

MIXPREC_API int mixp_scope_open(mixp_context *ctx, const char *name) {
    if (!ctx || !name || !*name) {
        mixp_context_fail(ctx, MIXP_ERR_ARGUMENT,
            "mixp_scope_open: the name is %s; pass a name, for example \"h.3\"",
            name ? "empty" : "NULL");
        return -1;
    }
    return mixpi_region_number(ctx, mixpi_scope_open(ctx, name, MIXPI_REGION_OPENED));
}

MIXPREC_API void mixp_autocast_close(mixp_context *ctx, int opened) {
    if (ctx && opened >= 0 && opened < mixpi_regions_count(ctx)) ctx->casting->n_regions = opened;
}

/* Closes the region of an abandoned walk, and all regions opened in it. */
static void mixpi_regions_of_walk(mixp_context *ctx) {
    int i = 0, open = (int)mixpi_min(mixpi_regions_count(ctx), MIXPI_REGIONS_ROOM);
    while (i < open && ctx->casting->regions[i].kind != MIXPI_REGION_IN_WALK) i++;
    if (i < open) ctx->casting->n_regions = i;
}

/* Closes blocks that were left by return, goto, break or continue, and reports them. */
static mixp_result mixpi_regions_check(mixp_context *ctx) {
    int i = 0, open = (int)mixpi_min(mixpi_regions_count(ctx), MIXPI_REGIONS_ROOM);
    while (i < open && ctx->casting->regions[i].kind != MIXPI_REGION_IN_BLOCK) i++;
    if (i == open) return MIXP_OK;
    ctx->casting->n_regions = i;
    return mixp_context_fail(ctx, MIXP_ERR_ORDER,
        "mixp_step_begin: a MIXP_AUTOCAST or MIXP_NO_GRAD block is still open; begin steps outside "
        "of such blocks, and do not leave a block by return, goto, break or an exception (in C++, "
        "use mixp_autocast_scope); around a loop of steps, use mixp_no_grad_open or "
        "mixp_autocast_open");
}

/* --- policy ---------------------------------------------------------------------------- */

MIXPREC_API mixp_result mixp_autocast_override(
    mixp_context *ctx, const mixp_op *op, mixp_op_class cls) {
    mixpi_casting *c = ctx ? mixpi_casting_of(ctx) : NULL;
    int i = 0;
    if (ctx && !c) return MIXP_ERR_MEMORY;
    if (!ctx || !op || (unsigned)cls >= MIXP_CLASS_COUNT)
        return mixp_context_fail(ctx, MIXP_ERR_ARGUMENT, "mixp_autocast_override: %s",
            !op ? "op is NULL" : "cls is not a mixp_op_class");
    while (i < c->n_overrides && c->overrides[i].op != op) i++;
    if (i == MIXPI_MAX_OVERRIDES)
        return mixp_context_fail(ctx, MIXP_ERR_ARGUMENT,
            "mixp_autocast_override: %d operators have an override already, which is the limit",
            MIXPI_MAX_OVERRIDES);
    if (i == c->n_overrides) c->n_overrides++;
    c->overrides[i].op = op;
    c->overrides[i].cls = cls;
    return MIXP_OK;
}

/* The dtype in which a result is stored. natural: the operator's own result dtype. */
static mixp_dtype mixpi_result_dtype(
    mixp_autocast region, mixp_op_class cls, mixp_dtype natural, int rank) {
    if (region.level == 0 || !mixpi_is_real(natural)) return natural;
    if (region.level >= 2) return rank == 0 ? MIXP_F32 : region.dtype;
    if (cls == MIXP_CLASS_LOW || cls == MIXP_CLASS_LOW_OUT) return region.dtype;
    return cls == MIXP_CLASS_F32 || cls == MIXP_CLASS_F32_OUT ? MIXP_F32 : natural;
}

/* The dtype that t would have without a guard. */
static mixp_dtype mixpi_plain_dtype(const mixp_tensor *t) {
    return t->own.watch.raised != MIXP_F32 ? t->own.watch.raised : t->dtype;
}

/* The widest dtype of the inputs, as they would be without a guard. f16 with bf16 gives f32,
 * because neither can represent the other's values. mixpi_guarded_dtype decides for the guard. */
static mixp_dtype mixpi_widest(int n, mixp_tensor *const *t) {
    mixp_dtype d = MIXP_DTYPE_COUNT;
    for (int i = 0; i < n; i++) {
        mixp_dtype one = t[i] ? mixpi_plain_dtype(t[i]) : MIXP_F32;
        if (!t[i] || !mixpi_is_real(one)) continue;
        d = d == MIXP_DTYPE_COUNT || d == one ? one : MIXP_F32;
    }
    return d == MIXP_DTYPE_COUNT ? MIXP_F32 : d;
}

static int mixpi_is_low(mixp_dtype dtype) { return dtype == MIXP_F16 || dtype == MIXP_BF16; }

/* --- counts ---------------------------------------------------------------------------- */

/* Counts a result in a region, for the warning of mixpi_casting_turn. */
static void mixpi_count_lowered(
    mixpi_casting *c, mixp_autocast region, const char *op, const mixp_tensor *out) {
    if (!mixpi_is_low(region.dtype)) return;
    c->lowerable++;
    c->low = region.dtype;
    if (mixpi_is_low(mixpi_plain_dtype(out))) c->lowered++;
    else c->unlowered = op;
}

static void mixpi_count_activation_cast(mixp_context *ctx) {
    ctx->casting->casts.activation_casts++;
}

MIXPREC_API mixp_cast_count mixp_autocast_casts(const mixp_context *ctx) {
    const mixp_cast_count none = { 0, 0, 0 };
    return ctx && ctx->casting ? ctx->casting->casts : none;
}

MIXPREC_API void mixp_autocast_reset_counts(mixp_context *ctx) {
    mixpi_casting *c = ctx ? ctx->casting : NULL;
    if (!c) return;
    memset(&c->casts, 0, sizeof c->casts);
    memset(&c->recipes, 0, sizeof c->recipes);
}

/* --- cast cache ------------------------------------------------------------------------ */

/* Returns the up-to-date low copy of a permanent tensor. There is one copy for each dtype, which
 * lasts as long as the tensor. */
static mixp_tensor *mixpi_low_copy(mixp_context *ctx, mixp_tensor *t, mixp_dtype dtype) {
    const int which = dtype == MIXP_BF16;
    mixp_tensor *low = t->own.low[which];
    const int fresh = low && t->own.low_version[which] == t->version;
    if (!low) {
        low = mixpi_twin(t, dtype);
        if (low) low->data = mixpi_data_alloc(low);
        if (!low || !low->data) return NULL;
        low->own.master = t;
        t->own.low[which] = low;
        ctx->low_copies.made++;
    }
    MIXPI_ASSERT(low->dtype == dtype && low->count == t->count && low->own.master == t);
    MIXPI_ASSERT(t->own.low_version[which] <= t->version);
    low->requires_grad = t->requires_grad;

    mixpi_casting *c = mixpi_casting_of(ctx);
    if (c && fresh) c->casts.weight_hits++;
    else if (c) c->casts.weight_casts++;
    if (fresh) return low;

    /* The weight was written since: convert it again. */
    ctx->capture.cast_recorded |= ctx->capture.active;
    const mixp_result r =
        mixpi_convert_to(ctx, mixpi_tensor_out(low, 0), mixpi_tensor_in(t), t->count);
    if (r != MIXP_OK) return NULL;
    t->own.low_version[which] = t->version;
    return low;
}

MIXPREC_API mixp_tensor *mixp_tensor_low(mixp_tensor *t, mixp_dtype dtype) {
    const char *wrong = NULL;
    if (!mixpi_is_tensor(t)) return NULL;
    if (!mixpi_is_low(dtype)) wrong = "a low copy must be f16 or bf16";
    else if (t->dtype == dtype) return t;
    else if (t->dtype != MIXP_F32) wrong = "only an f32 tensor has low copies";
    else if (t->own.generation) wrong = "an activation has no low copies; use mixp_cast";
    if (wrong)
        mixp_context_fail(t->ctx, MIXP_ERR_DTYPE, "mixp_tensor_low '%s': %s",
            t->own.generation ? "" : t->name, wrong);
    mixp_tensor *low = wrong ? NULL : mixpi_low_copy(t->ctx, t, dtype);
    return low;
}
