#pragma once
#include "../walk/begin.c"
/* --- recipes: which recipe a region has ------------------------------------------------------- */

#define MIXPI_MAX_RULES 64

/* A rule of mixp_autocast_set_recipes. */
typedef struct mixpi_rule {
    char        pattern[96];
    mixp_recipe recipe;
} mixpi_rule;

/* The state of recipes, made when the first one is set. */
struct mixpi_recipes {
    mixp_recipe  block;         /* recipe of the block form, without rules                 */
    mixp_recipe  by_rules;      /* kind NONE. A region's recipe points here: see rules     */
    mixpi_rule  *rules;         /* [MIXPI_MAX_RULES], or NULL                              */
    int          n_rules;
    mixp_recipe  of_region[MIXPI_REGIONS_ROOM];     /* a region's recipe points here       */
    int          quantised;     /* linears quantised in this step: the next one's key of random
                                   numbers, the same at each level and in each dtype       */
    int          wide_reported; /* 1: a warning has said that a narrow product stays bf16  */

    /* codes: linears of this step that keep their input as codes, and that cannot */
    int          coded, uncoded;
    char         uncoded_name[64];  /* weight of the last uncoded linear                   */
    const char  *uncoded_why;   /* why the last uncoded linear cannot                      */

    /* delayed scaling */
    mixp_recipe  delayed;       /* the last recipe; kind NONE: none was set                */
    mixp_recipe  trained;       /* recipe of the last linear that trains; without one, of the step's
                                   last region. Ranks compare it                           */
    mixp_recipe  opened;        /* recipe of the last region outside of evaluations        */
    uint64_t     trained_in, opened_in;     /* generations in which those were set         */
    struct mixpi_scaled *scaled;            /* states; see delayed.c                       */
};

MIXPREC_API const char *mixp_recipe_name(mixp_recipe_kind kind) {
    static const char *const names[] = { "none", "fp8_current", "fp8_delayed", "fp8_block", "mxfp8",
        "nvfp4" };
    MIXPI_STATIC_ASSERT(recipe_names, sizeof names / sizeof names[0] == MIXP_RECIPE_COUNT);
    return (unsigned)kind < MIXP_RECIPE_COUNT ? names[kind] : "?";
}

/* The state of recipes, made at the first call. NULL with the error set: out of memory. */
static mixpi_recipes *mixpi_recipes_of(mixp_context *ctx) {
    if (!ctx->recipes) ctx->recipes = (mixpi_recipes *)mixpi_host_alloc(ctx, sizeof *ctx->recipes);
    return ctx->recipes;
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
    const mixpi_recipes *s = ctx->recipes;
    if (r->kind != MIXP_RECIPE_FP8_DELAYED) return NULL;
    *code = MIXP_ERR_DEVICE;
    if (ctx->device->download && !ctx->device->kernels->turn)
        return "this device cannot keep the history of delayed scaling; use fp8_current";
    *code = MIXP_ERR_ARGUMENT;
    if (!s || !s->scaled || mixpi_recipe_history(&s->delayed) == mixpi_recipe_history(r))
        return NULL;
    return "the recipe's history differs from the context's earlier one; make a new context";
}

/* Does a region's recipe represent the rules of mixp_autocast_set_recipes? */
static int mixpi_recipe_is_rules(const mixp_context *ctx, const mixp_recipe *r) {
    return ctx->recipes && r == &ctx->recipes->by_rules;
}

/* The recipe of the rules for linears with a weight of this name; NULL: bf16. */
static const mixp_recipe *mixpi_rules_recipe(const mixpi_recipes *s, const char *name) {
    for (int i = 0; i < s->n_rules; i++) {
        const mixp_recipe *r = &s->rules[i].recipe;
        if (!mixpi_pattern_fits(s->rules[i].pattern, name, strlen(name))) continue;
        return r->kind == MIXP_RECIPE_NONE ? NULL : r;
    }
    return NULL;
}

/* Returns why a region of this dtype cannot have the recipe r, or NULL: then the context has a
 * state of recipes, unless r is none. *code: the error. */
static const char *mixpi_recipe_refuses(
    mixp_context *ctx, mixp_dtype dtype, const mixp_recipe *r, mixp_result *code) {
    *code = MIXP_ERR_ARGUMENT;
    if (r && r->kind == MIXP_RECIPE_NONE && r->codes)
        return "the recipe's codes need a kind: without one nothing is quantised";
    const int rules = mixpi_recipe_is_rules(ctx, r);
    *code = MIXP_OK;
    if (!r || (r->kind == MIXP_RECIPE_NONE && !rules)) return NULL;
    *code = MIXP_ERR_ARGUMENT;

    /* The recipe by itself. */
    const mixpi_float_mode mode = mixpi_float_calm();
    const char *wrong = mixpi_recipe_fields_wrong(r);
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

    *code = mixpi_recipes_of(ctx) ? MIXP_OK : MIXP_ERR_MEMORY;
    return *code == MIXP_OK ? NULL : "out of memory";
}

/* The recipe of delayed scaling that linears in a region may use; NULL: none. All rules of delayed
 * scaling have the same. */
static const mixp_recipe *mixpi_region_delayed(const mixp_context *ctx, const mixp_recipe *r) {
    const mixpi_recipes *s = ctx->recipes;
    if (!mixpi_recipe_is_rules(ctx, r)) return r && r->kind == MIXP_RECIPE_FP8_DELAYED ? r : NULL;
    for (int i = 0; i < s->n_rules; i++)
        if (s->rules[i].recipe.kind == MIXP_RECIPE_FP8_DELAYED) return &s->rules[i].recipe;
    return NULL;
}

/* Copies the recipe of a region. Returns the copy; NULL: the region has none. */
static const mixp_recipe *mixpi_region_recipe(mixp_context *ctx, const mixp_recipe *r, int number) {
    mixpi_recipes *s = ctx->recipes;
    if (mixpi_recipe_is_rules(ctx, r)) return r;
    if (!r || r->kind == MIXP_RECIPE_NONE) return NULL;
    s->of_region[number] = *r;
    if (r->kind == MIXP_RECIPE_FP8_DELAYED) s->delayed = *r;
    return &s->of_region[number];
}

/* Opens a region with its recipe, and notes the recipe of delayed scaling if it may train. */
static const mixp_recipe *mixpi_recipe_open(
    mixp_context *ctx, const mixp_recipe *r, int number, int no_grad) {
    const mixp_recipe *copy = mixpi_region_recipe(ctx, r, number);
    const mixp_recipe *delayed = mixpi_region_delayed(ctx, copy);
    if (!delayed || ctx->evaluates || no_grad) return copy;
    ctx->recipes->opened = *delayed;
    ctx->recipes->opened_in = ctx->generation;
    return copy;
}

/* Before a walk back: a rank whose step has met no linear under delayed scaling uses the region's
 * recipe, because the other ranks may have met one. */
static void mixpi_recipe_walk_begin(mixp_context *ctx) {
    mixpi_recipes *s = ctx->recipes;
    if (s->opened_in != ctx->generation || s->trained_in == ctx->generation) return;
    if (s->opened.kind == MIXP_RECIPE_FP8_DELAYED) s->trained = s->opened;
}

/* A step begins: warns if the step before trained under a recipe with codes, but no linear kept
 * codes. */
static void mixpi_recipe_begin(mixp_context *ctx) {
    mixpi_recipes *s = ctx->recipes;
    if (s->uncoded && !s->coded && ctx->walk.walked_in == ctx->generation)
        mixpi_warn(ctx,
            "the recipe's codes free no memory: none of %d linears kept its input x as codes. The "
            "last has the weight '%s': %s. See CODES at mixp_recipe, or set codes to 0",
            s->uncoded, s->uncoded_name, s->uncoded_why);
    s->quantised = s->coded = s->uncoded = 0;
}

MIXPREC_API mixp_result mixp_autocast_set_recipe(mixp_context *ctx, const mixp_recipe *recipe) {
    mixp_result r;
    if (!ctx) return MIXP_ERR_ARGUMENT;
    const char *wrong = mixpi_recipe_refuses(ctx, MIXP_BF16, recipe, &r);
    if (wrong) return mixp_context_fail(ctx, r, "mixp_autocast_set_recipe: %s", wrong);
    mixpi_recipes *s = mixpi_recipes_of(ctx);
    mixpi_casting *c = mixpi_casting_of(ctx);
    if (!s || !c) return MIXP_ERR_MEMORY;
    memset(&s->block, 0, sizeof s->block);
    if (recipe) s->block = *recipe;
    s->n_rules = 0;
    c->block_recipe = &s->block;
    if (s->block.kind == MIXP_RECIPE_FP8_DELAYED) s->delayed = s->block;
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
static const char *mixpi_rule_wrong(mixp_context *ctx, const mixp_recipe_rule *rule,
    const mixp_recipe *delayed, mixp_result *code) {
    const mixp_recipe *r = rule->recipe;
    *code = MIXP_ERR_ARGUMENT;
    if (!rule->pattern || !*rule->pattern) return "the pattern is empty";
    if (strlen(rule->pattern) > 95) return "the pattern has more than 95 characters";
    if (!mixpi_pattern_is_used(ctx, rule->pattern))
        return "the pattern fits no tensor's name; call the function after parameters are made";
    if (r && delayed && r->kind == MIXP_RECIPE_FP8_DELAYED && memcmp(r, delayed, sizeof *r) != 0)
        return "two rules have different recipes of delayed scaling; use the same fields in both";
    return mixpi_recipe_refuses(ctx, MIXP_BF16, r, code);
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

MIXPREC_API mixp_result mixp_autocast_set_recipes(
    mixp_context *ctx, const mixp_recipe_rule *rules, int n) {
    const mixp_recipe *delayed;
    if (!ctx) return MIXP_ERR_ARGUMENT;
    MIXPI_TRY(mixpi_rules_check(ctx, rules, n, &delayed));

    /* All memory comes before the first change. */
    mixpi_recipes *s = mixpi_recipes_of(ctx);
    mixpi_casting *c = mixpi_casting_of(ctx);
    if (s && n && !s->rules)
        s->rules = (mixpi_rule *)mixpi_host_alloc(ctx, MIXPI_MAX_RULES * sizeof *s->rules);
    if (!s || !c || (n && !s->rules)) return MIXP_ERR_MEMORY;

    memset(&s->block, 0, sizeof s->block);
    s->n_rules = n;
    c->block_recipe = n ? &s->by_rules : &s->block;
    for (int i = 0; i < n; i++) {
        memset(&s->rules[i], 0, sizeof s->rules[i]);
        memcpy(s->rules[i].pattern, rules[i].pattern, strlen(rules[i].pattern));
        if (rules[i].recipe) s->rules[i].recipe = *rules[i].recipe;
    }
    if (delayed) s->delayed = *delayed;
    return MIXP_OK;
}

MIXPREC_API mixp_recipe_counts mixp_autocast_recipe_counts(const mixp_context *ctx) {
    mixp_recipe_counts none = MIXPI_ZERO;
    return ctx && ctx->casting ? ctx->casting->recipes : none;
}
