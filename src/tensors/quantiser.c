#pragma once
#include "structs.c"
#include "../recipe.h"
/* --- the table of the recipes' functions ---------------------------------------------------- *
 *
 * The rooms of the loop call recipes only through this table, and only after a recipe was set or a
 * region with a recipe was opened. recipes/door.c fills the table. Without recipes in the build,
 * the table is never there, and the compiler drops the calls.
 */
struct mixp_call;
struct mixp_safetensors;
struct mixpi_report;
struct mixpi_state;

struct mixpi_quantiser {
    /* autocast */
    const char *(*refuses)(mixp_context *ctx, mixp_dtype dtype, const mixp_recipe *r,
                           mixp_result *code);
    const mixp_recipe *(*opens)(mixp_context *ctx, const mixp_recipe *r, int number, int no_grad);
    /* linear layers: call->attrs is a mixpi_product */
    int         (*leaves)(mixp_context *ctx, mixp_tensor *up, mixp_tensor *down);
    mixp_result (*decide)(struct mixp_call *c);
    mixp_result (*forward)(struct mixp_call *c);    /* of a product whose recipe is set */
    mixp_result (*backward)(struct mixp_call *c);   /* likewise */
    void        (*recorded)(struct mixp_call *c);
    /* steps */
    void        (*begin)(mixp_context *ctx);        /* a step begins */
    void        (*walk_begin)(mixp_context *ctx);
    mixp_result (*advance)(mixp_context *ctx);      /* after an update, also a skipped one */
    void        (*words)(const mixp_context *ctx, double *row);     /* what all ranks must have
                                                                       alike                 */
    /* checkpoints */
    void        (*meet)(struct mixpi_report *r, mixp_context *ctx,
                        const struct mixp_safetensors *file);
    void        (*items)(struct mixpi_state *s);
    mixp_result (*loaded)(mixp_context *ctx);
};

/* The table; NULL: no recipe was ever set. */
static const mixpi_quantiser *mixpi_quantiser_of(const mixp_context *ctx) {
#ifdef MIXPREC_NO_RECIPES
    (void)ctx;
    return NULL;
#else
    return ctx->recipes ? ctx->quantiser : NULL;
#endif
}

/* Calls a function of the table; MIXP_OK without a recipe: MIXPI_QUANTISER(ctx, decide(c)). */
#define MIXPI_QUANTISER(ctx, call) (mixpi_quantiser_of(ctx) ? (ctx)->quantiser->call : MIXP_OK)

/* Returns why a region of this dtype cannot have the recipe r, with the error in *code. NULL: it
 * can. */
static const char *mixpi_quantiser_refuses(
    mixp_context *ctx, mixp_dtype dtype, const mixp_recipe *r, mixp_result *code) {
    *code = MIXP_OK;
    if (!r) return NULL;
    if (ctx->quantiser) return ctx->quantiser->refuses(ctx, dtype, r, code);
    if (r->kind == MIXP_RECIPE_NONE) return NULL;
    *code = MIXP_ERR_ARGUMENT;
    return "this build has no recipes: compile without MIXPREC_NO_RECIPES";
}

/* Copies the recipe r of the region `number`, which is about to open. Returns the copy; NULL: the
 * region has no recipe. */
static const mixp_recipe *mixpi_quantiser_opens(
    mixp_context *ctx, const mixp_recipe *r, int number, int no_grad) {
    return mixpi_quantiser_of(ctx) ? ctx->quantiser->opens(ctx, r, number, no_grad) : NULL;
}

/* Do recipes leave two linear layers with these weights in bf16? Counts them if so. */
static int mixpi_quantiser_leaves(mixp_context *ctx, mixp_tensor *up, mixp_tensor *down) {
    return !mixpi_quantiser_of(ctx) || ctx->quantiser->leaves(ctx, up, down);
}
