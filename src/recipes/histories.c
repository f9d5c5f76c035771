#pragma once
#include "delayed.c"
#include "../files/checkpoint.c"
/* --- recipes: delayed scaling in checkpoints -------------------------------------------------- */

/* The state of delayed scaling: two tensors for each weight. */
static void mixpi_state_add_scaled(mixpi_state *s, mixpi_scaled *scaled) {
    mixpi_state_item item = mixpi_state_array(MIXP_F32, MIXPI_ROLES, scaled->scales);
    item.optional = 1;
    item.on_device = 1;
    item.must = MIXPI_ABOVE_0;
    mixpi_state_add(s, item, "mixprec.recipe.scales.%s", scaled->weight->name);
    item.e.rank = 2;
    item.e.shape[1] = scaled->length;
    item.e.bytes = MIXPI_ROLES * (size_t)scaled->length * sizeof *scaled->history;
    item.memory = scaled->history;
    item.must = MIXPI_AMAX;
    mixpi_state_add(s, item, "mixprec.recipe.amax_history.%s", scaled->weight->name);
}
static void mixpi_scaled_items(mixpi_state *s) {
    mixpi_scaled *scaled = s->ctx->recipes->scaled;
    for (; scaled; scaled = scaled->next) mixpi_state_add_scaled(s, scaled);
}

/* States of delayed scaling that the file lacks start from their beginning. */
static mixp_result mixpi_scaled_reset_missing(mixp_context *ctx) {
    const mixpi_scaled *s = ctx->recipes->scaled;
    mixp_result r = MIXP_OK;
    for (; s && r == MIXP_OK; s = s->next) {
        float scales[MIXPI_ROLES];
        r = mixpi_download(ctx, scales, s->scales, sizeof scales);
        for (int i = 0; i < MIXPI_ROLES && r == MIXP_OK; i++)
            if (!(scales[i] > 0.0f)) scales[i] = 1.0f;
        if (r == MIXP_OK) r = mixpi_upload(ctx, s->scales, scales, sizeof scales);
    }
    return r;
}

/* The recipe of delayed scaling of linears with the weight t; NULL: they have none. */
static const mixp_recipe *mixpi_delayed_of(const mixp_context *ctx, const mixp_tensor *t) {
    const mixp_recipe *r = &ctx->recipes->delayed;
    if (ctx->recipes->n_rules) r = mixpi_rules_recipe(ctx->recipes, t->name);
    return r && r->kind == MIXP_RECIPE_FP8_DELAYED ? r : NULL;
}

/* Makes the states of delayed scaling that the file has and the program's recipe uses: the first
 * step of a program makes them too late. */
static void mixpi_scaled_meet(mixpi_report *r, mixp_context *ctx, const mixp_safetensors *file) {
    static const char prefix[] = "mixprec.recipe.scales.";
    mixp_result made;
    mixp_tensor *t;
    for (size_t i = 0; i < file->n_items; i++) {
        const char *name = file->items[i].e.name;
        if (strncmp(name, prefix, sizeof prefix - 1) != 0) continue;
        for (t = ctx->tensors; t; t = t->own.next)
            if (mixpi_is_weight(t) && strcmp(t->name, name + sizeof prefix - 1) == 0 &&
                mixpi_delayed_of(ctx, t) &&
                !mixpi_scaled_of(ctx, t, mixpi_delayed_of(ctx, t), &made))
                mixpi_report_fail(r, made, "out of memory");
    }
}
