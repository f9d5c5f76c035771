#pragma once
#include "tape.h"
#include "tensors/params.c"
/* ==== 6. AUTOCAST (implementation) ==================================================== */

#define MIXPI_MAX_REGIONS   64
#define MIXPI_REGIONS_ROOM  (MIXPI_MAX_REGIONS + 1)     /* one extra for a walk back */
#define MIXPI_MAX_OVERRIDES 64
#define MIXPI_SCOPE_ROOM    201
#define MIXPI_MAX_RULES     64

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
    mixp_recipe       recipe;   /* cast.recipe points here, or is NULL                     */
} mixpi_region;

/* A rule of mixp_autocast_set_recipes. */
typedef struct mixpi_rule {
    char        pattern[96];
    mixp_recipe recipe;
} mixpi_rule;

typedef struct mixpi_override { const mixp_op *op; mixp_op_class cls; } mixpi_override;

struct mixpi_casting {
    mixpi_region    regions[MIXPI_REGIONS_ROOM];
    mixpi_override  overrides[MIXPI_MAX_OVERRIDES];
    int             n_regions;  /* includes regions refused for lack of room               */
    int             n_overrides;
    int             block_level;
    mixp_cast_count casts;
    mixp_recipe     block_recipe;       /* recipe of the block form                        */
    mixp_recipe     by_rules;   /* kind NONE. A region's recipe points here: see rules     */
    mixpi_rule     *rules;      /* [MIXPI_MAX_RULES], or NULL                              */
    int             n_rules;    /* 0: the block form uses block_recipe                     */
    mixp_recipe_counts recipes;
    int             lowerable;  /* operators of this step that ran in regions of f16 or bf16 */
    int             lowered;    /* how many of those store f16, bf16, or what the guard raised */
    mixp_dtype      low;        /* dtype of the step's last region of f16 or bf16          */
    const char     *unlowered;  /* name of the last of those operators that kept f32       */
    int             coded;      /* linears of this step that keep their input as codes     */
    int             uncoded;    /* linears of this step that should do so, but cannot      */
    char            uncoded_name[64];   /* weight of the last uncoded linear               */
    const char     *uncoded_why;    /* why the last uncoded linear cannot                  */
    mixp_recipe     delayed;    /* last recipe of delayed scaling; kind NONE: none was set */
    mixp_recipe     trained;    /* recipe of the last linear that trains; without one, of the
                                   step's last region. Ranks compare it                    */
    mixp_recipe     opened;     /* recipe of the last region outside of evaluations        */
    uint64_t        trained_in, opened_in;      /* generations in which those were set     */
    struct mixpi_scaled *scaled;    /* states of delayed scaling; see recipes/delayed.c    */
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

/* Ends a step: warns if it trained in regions of f16 or bf16 that stored nothing low, or under a
 * recipe with codes, but no linear kept codes. */
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
    if (c->low != MIXP_F32 && !c->lowerable && trained)
        mixpi_warn(ctx,
            "no operator of a training step ran in its regions of autocast to %s: call the model "
            "inside. A semicolon after MIXP_AUTOCAST(...) ends the region at once",
            mixp_dtype_name(c->low));
    if (c->uncoded && !c->coded && trained)
        mixpi_warn(ctx,
            "the recipe's codes free no memory: none of %d linears kept its input x as codes. The "
            "last has the weight '%s': %s. See CODES at mixp_recipe, or set codes to 0",
            c->uncoded, c->uncoded_name, c->uncoded_why);
    c->coded = c->uncoded = c->lowerable = c->lowered = 0;
    c->low = MIXP_F32;
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

/* The length of the history of amax. */
static int mixpi_recipe_history(const mixp_recipe *r) { return r->history ? r->history : 1024; }

/* Is each switch of a recipe 0 or 1? */
static int mixpi_recipe_has_flags(const mixp_recipe *r) {
    const int flags[] = { r->dy_e4m3, r->power_2, r->no_stochastic, r->no_hadamard, r->no_2d,
        r->wgrad_high, r->most_recent, r->codes, r->bound_448, r->row_scaled };
    for (size_t i = 0; i < sizeof flags / sizeof flags[0]; i++)
        if (flags[i] != 0 && flags[i] != 1) return 0;
    return 1;
}

/* Returns what is wrong with NVFP4's fields of blocks and rows, or NULL. */
static const char *mixpi_nvfp4_wrong(const mixp_recipe *r) {
    if ((unsigned)r->x_4over6 >= MIXP_4OVER6_COUNT || (unsigned)r->w_4over6 >= MIXP_4OVER6_COUNT)
        return "the recipe's x_4over6 or w_4over6 is not a mixp_4over6; set the recipe to zeros "
               "first";
    if (r->kind != MIXP_RECIPE_NVFP4) return NULL;
    if ((r->x_4over6 || r->row_scaled) && !r->no_hadamard && !r->wgrad_high)
        return "the recipe's x_4over6 and row_scaled do not go with the Hadamard transform of x: "
               "set no_hadamard, or wgrad_high";
    if (r->row_scaled && r->x_4over6 && !r->wgrad_high)
        return "the recipe's row_scaled and x_4over6 go together only in forward: set wgrad_high";
    return NULL;
}

/* Returns what is wrong with the fields of a recipe, or NULL. */
static const char *mixpi_recipe_fields_wrong(const mixp_recipe *r) {
    if ((unsigned)r->kind >= MIXP_RECIPE_COUNT)
        return "the recipe's kind is not a mixp_recipe_kind";
    if (!mixpi_recipe_has_flags(r))
        return "a switch of the recipe is neither 0 nor 1; set the recipe to zeros first";
    if (r->history < 0 || r->history > 1 << 20)
        return "the recipe's history must lie in 1 to 2^20, or be 0 for 1024";
    if (!(r->error <= 1.0f) || !(r->clipped <= 1.0f))
        return "the recipe's error and clipped must be at most 1; negative means never";
    if (r->codes && r->wgrad_high)
        return "the recipe's codes and wgrad_high exclude each other: with wgrad_high the gradient "
               "of the weight reads the input itself, which has no codes";
    if (r->margin < 0 || r->margin > 100) return "the recipe's margin must lie in 0 to 100";
    if ((unsigned)r->e8m0 >= MIXP_E8M0_COUNT)
        return "the recipe's e8m0 is not a mixp_e8m0_rounding; set the recipe to zeros first";
    return mixpi_nvfp4_wrong(r);
}

/* Returns what is wrong with a recipe of delayed scaling in this context, or NULL. */
static const char *mixpi_delayed_wrong(
    const mixp_context *ctx, const mixp_recipe *r, mixp_result *code) {
    const mixpi_casting *c = ctx->casting;
    if (r->kind != MIXP_RECIPE_FP8_DELAYED) return NULL;
    *code = MIXP_ERR_DEVICE;
    if (ctx->device->download && !ctx->device->kernels->turn)
        return "this device cannot keep the history of delayed scaling; use fp8_current";
    *code = MIXP_ERR_ARGUMENT;
    if (!c || !c->scaled || mixpi_recipe_history(&c->delayed) == mixpi_recipe_history(r))
        return NULL;
    return "the recipe's history differs from the context's earlier one; make a new context";
}

/* Does a region's recipe represent the rules of mixp_autocast_set_recipes? */
static int mixpi_recipe_is_rules(const mixpi_casting *c, const mixp_recipe *r) {
    return c && r == &c->by_rules;
}

/* The recipe of the rules for linears with a weight of this name; NULL: bf16. */
static const mixp_recipe *mixpi_rules_recipe(const mixpi_casting *c, const char *name) {
    for (int i = 0; i < c->n_rules; i++) {
        const mixp_recipe *r = &c->rules[i].recipe;
        if (!mixpi_pattern_fits(c->rules[i].pattern, name, strlen(name))) continue;
        return r->kind == MIXP_RECIPE_NONE ? NULL : r;
    }
    return NULL;
}

/* The recipe of delayed scaling that linears in a region may use; NULL: none. All rules of delayed
 * scaling have the same. */
static const mixp_recipe *mixpi_region_delayed(const mixpi_casting *c, const mixp_recipe *r) {
    if (!mixpi_recipe_is_rules(c, r)) return r && r->kind == MIXP_RECIPE_FP8_DELAYED ? r : NULL;
    for (int i = 0; i < c->n_rules; i++)
        if (c->rules[i].recipe.kind == MIXP_RECIPE_FP8_DELAYED) return &c->rules[i].recipe;
    return NULL;
}

/* Returns what is wrong with a recipe in a region of this dtype, or NULL. *code: the error. */
static const char *mixpi_recipe_wrong(
    const mixp_context *ctx, mixp_dtype dtype, const mixp_recipe *r, mixp_result *code) {
    const char *wrong;
    *code = MIXP_ERR_ARGUMENT;
    if (r && r->kind == MIXP_RECIPE_NONE && r->codes)
        return "the recipe's codes need a kind: without one nothing is quantised";
    const int rules = mixpi_recipe_is_rules(ctx->casting, r);
    *code = MIXP_OK;
    if (!r || (r->kind == MIXP_RECIPE_NONE && !rules)) return NULL;
    *code = MIXP_ERR_ARGUMENT;

    /* The recipe by itself. */
    const mixpi_float_mode mode = mixpi_float_calm();
    wrong = mixpi_recipe_fields_wrong(r);
    mixpi_float_leave(mode);
    if (!wrong) wrong = mixpi_delayed_wrong(ctx, r, code);
    if (wrong) return wrong;

    /* The region. */
    *code = MIXP_ERR_DTYPE;
    if (dtype != MIXP_BF16)
        return "a recipe needs a bf16 region: bf16 holds every decoded value exactly, and f16 has "
               "too small a range; use MIXP_BF16";

    /* The device. */
    *code = ctx->device->download ? MIXP_ERR_DEVICE : MIXP_OK;
    if (!rules && ctx->device->download && !ctx->device->kernels->quantise)
        return "this device cannot quantise for a recipe; use the CPU or mixp_cuda";
    if (r->codes && ctx->device->download && !ctx->device->kernels->recode)
        return "this device cannot keep activations as codes; set the recipe's codes to 0";
    *code = MIXP_OK;
    return NULL;
}

/* Gives a region its own copy of its recipe. */
static void mixpi_region_recipe(mixpi_casting *c, mixpi_region *region) {
    const mixp_recipe *r = region->cast.recipe;
    if (mixpi_recipe_is_rules(c, r)) return;
    region->cast.recipe = NULL;
    if (!r || r->kind == MIXP_RECIPE_NONE) return;
    region->recipe = *r;
    region->cast.recipe = &region->recipe;
    if (r->kind == MIXP_RECIPE_FP8_DELAYED) c->delayed = *r;
}

/* Before a walk back: a rank whose step has met no linear under delayed scaling uses the region's
 * recipe, because the other ranks may have met one. */
static void mixpi_regions_lend_recipe(const mixp_context *ctx) {
    mixpi_casting *c = ctx->casting;
    if (!c || c->opened_in != ctx->generation || c->trained_in == ctx->generation) return;
    if (c->opened.kind == MIXP_RECIPE_FP8_DELAYED) c->trained = c->opened;
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
    else wrong = mixpi_recipe_wrong(ctx, cast.dtype, cast.recipe, &r);

    /* Count a region of f16 or bf16 that differs from the region around it. */
    const int low = cast.dtype == MIXP_F16 || cast.dtype == MIXP_BF16;
    if (kind != MIXPI_REGION_IN_WALK && cast.level && low) {
        ctx->low_copies.regions += cast.dtype != now.dtype || cast.level != now.level;
        c->low = cast.dtype;
    }

    /* A refused region casts as the one around it. */
    if (c->n_regions < MIXPI_REGIONS_ROOM) {
        mixpi_region *region = &c->regions[c->n_regions];
        (void)mixpi_scope_now(ctx, &region->scope);
        region->cast = wrong ? now : cast;
        mixpi_region_recipe(c, region);
        region->kind = kind;
        region->no_grad = no_grad || mixpi_is_no_grad(ctx);

        /* Note the recipe of delayed scaling of a region that may train. */
        const mixp_recipe *delayed = mixpi_region_delayed(c, region->cast.recipe);
        if (delayed && !ctx->evaluates && !region->no_grad) {
            c->opened = *delayed;
            c->opened_in = ctx->generation;
        }
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
    if (c && dtype != MIXP_F32) cast.recipe = c->n_rules ? &c->by_rules : &c->block_recipe;
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

MIXPREC_API mixp_result mixp_autocast_set_recipe(mixp_context *ctx, const mixp_recipe *recipe) {
    mixp_recipe none;
    mixp_result r;
    if (!ctx) return MIXP_ERR_ARGUMENT;
    memset(&none, 0, sizeof none);
    const char *wrong = mixpi_recipe_wrong(ctx, MIXP_BF16, recipe, &r);
    if (wrong) return mixp_context_fail(ctx, r, "mixp_autocast_set_recipe: %s", wrong);
    if (!mixpi_casting_of(ctx)) return MIXP_ERR_MEMORY;
    ctx->casting->block_recipe = recipe ? *recipe : none;
    ctx->casting->n_rules = 0;
    if (recipe && recipe->kind == MIXP_RECIPE_FP8_DELAYED) ctx->casting->delayed = *recipe;
    return MIXP_OK;
}

/* Does the pattern fit the name of a permanent tensor, or any name? */
static int mixpi_pattern_is_used(const mixp_context *ctx, const char *pattern) {
    const mixp_tensor *t = ctx->tensors;
    if (strspn(pattern, "*") == strlen(pattern)) return 1;
    while (t && !(*t->name && mixpi_pattern_fits(pattern, t->name, strlen(t->name))))
        t = t->own.next;
    return t != NULL;
}

/* Returns what is wrong with a rule, or NULL. *code: the error. delayed: the recipe of delayed
 * scaling of an earlier rule, or NULL. */
static const char *mixpi_rule_wrong(const mixp_context *ctx, const mixp_recipe_rule *rule,
    const mixp_recipe *delayed, mixp_result *code) {
    const mixp_recipe *r = rule->recipe;
    *code = MIXP_ERR_ARGUMENT;
    if (!rule->pattern || !*rule->pattern) return "the pattern is empty";
    if (strlen(rule->pattern) > 95) return "the pattern has more than 95 characters";
    if (!mixpi_pattern_is_used(ctx, rule->pattern))
        return "the pattern fits no tensor's name; call the function after parameters are made";
    if (r && delayed && r->kind == MIXP_RECIPE_FP8_DELAYED && memcmp(r, delayed, sizeof *r) != 0)
        return "two rules have different recipes of delayed scaling; use the same fields in both";
    return mixpi_recipe_wrong(ctx, MIXP_BF16, r, code);
}

/* Checks all rules. *delayed: their recipe of delayed scaling, or NULL. */
static mixp_result mixpi_rules_check(
    mixp_context *ctx, const mixp_recipe_rule *rules, int n, const mixp_recipe **delayed) {
    *delayed = NULL;
    if (mixpi_region_now(ctx))
        return mixp_context_fail(ctx, MIXP_ERR_ORDER,
            "mixp_autocast_set_recipes: a region or a scope is open; call the function between "
            "steps");
    if (n < 0 || n > MIXPI_MAX_RULES || (n && !rules))
        return mixp_context_fail(ctx, MIXP_ERR_ARGUMENT,
            "mixp_autocast_set_recipes: %s; pass 0 to 64 rules",
            n && !rules ? "rules is NULL" : "the number of rules is wrong");
    for (int i = 0; i < n; i++) {
        const mixp_recipe *r = rules[i].recipe;
        mixp_result code;
        const char *wrong = mixpi_rule_wrong(ctx, &rules[i], *delayed, &code);
        if (wrong)
            return mixp_context_fail(ctx, code,
                "mixp_autocast_set_recipes: rule %d, pattern '%.95s': %s", i,
                rules[i].pattern ? rules[i].pattern : "NULL", wrong);
        if (r && r->kind == MIXP_RECIPE_FP8_DELAYED) *delayed = r;
    }
    return MIXP_OK;
}

MIXPI_SELDOM
MIXPREC_API mixp_result mixp_autocast_set_recipes(
    mixp_context *ctx, const mixp_recipe_rule *rules, int n) {
    const mixp_recipe *delayed;
    mixpi_casting *c;
    if (!ctx) return MIXP_ERR_ARGUMENT;
    MIXPI_TRY(mixpi_rules_check(ctx, rules, n, &delayed));

    /* All memory comes before the first change. */
    c = mixpi_casting_of(ctx);
    if (c && n && !c->rules)
        c->rules = (mixpi_rule *)mixpi_host_alloc(ctx, MIXPI_MAX_RULES * sizeof *c->rules);
    if (!c || (n && !c->rules)) return MIXP_ERR_MEMORY;

    memset(&c->block_recipe, 0, sizeof c->block_recipe);
    c->n_rules = n;
    for (int i = 0; i < n; i++) {
        memset(&c->rules[i], 0, sizeof c->rules[i]);
        memcpy(c->rules[i].pattern, rules[i].pattern, strlen(rules[i].pattern));
        if (rules[i].recipe) c->rules[i].recipe = *rules[i].recipe;
    }
    if (delayed) c->delayed = *delayed;
    return MIXP_OK;
}

MIXPREC_API mixp_recipe_counts mixp_autocast_recipe_counts(const mixp_context *ctx) {
    mixp_recipe_counts none;
    memset(&none, 0, sizeof none);
    return ctx && ctx->casting ? ctx->casting->recipes : none;
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

/* Is it the tape's own cast operator, which operators/cast.c defines? */
static int mixpi_is_cast(const mixp_op *op);

/* A cast keeps its class, whatever class the user set: the other classes cast inputs by it. */
static mixp_op_class mixpi_class_of(const mixp_context *ctx, const mixp_op *op) {
    const mixpi_casting *c = mixpi_is_cast(op) ? NULL : ctx->casting;
    for (int i = 0; c && i < c->n_overrides; i++)
        if (c->overrides[i].op == op) return c->overrides[i].cls;
    return op->cls;
}

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
    mixpi_casting *c, mixp_autocast region, const mixp_op *op, const mixp_tensor *out) {
    if (!mixpi_is_low(region.dtype)) return;
    c->lowerable++;
    if (mixpi_is_low(mixpi_plain_dtype(out))) c->lowered++;
    else c->unlowered = op->name;
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
    mixp_tensor *low;
    if (!mixpi_is_tensor(t)) return NULL;
    if (!mixpi_is_low(dtype)) wrong = "a low copy must be f16 or bf16";
    else if (t->dtype == dtype) return t;
    else if (t->dtype != MIXP_F32) wrong = "only an f32 tensor has low copies";
    else if (t->own.generation) wrong = "an activation has no low copies; use mixp_cast";
    if (wrong)
        mixp_context_fail(t->ctx, MIXP_ERR_DTYPE, "mixp_tensor_low '%s': %s",
            t->own.generation ? "" : t->name, wrong);
    low = wrong ? NULL : mixpi_low_copy(t->ctx, t, dtype);
    return low;
}
