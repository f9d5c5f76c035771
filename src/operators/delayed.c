#pragma once
#include "shared.c"
#include "../tensors/crew.c"
#include "../tensors/watcher.c"
/* --- recipes: delayed scaling ---------------------------------------------------------------- */

/* State of the linears with one weight. */
typedef struct mixpi_scaled {
    struct mixpi_scaled *next;
    mixp_tensor *weight;
    mixp_recipe  recipe;        /* of the newest linear                                    */
    int          length;        /* of the history of each operand                          */
    float       *history;       /* [MIXPI_ROLES, length]: of the update that is under way first,
                                   then from old to new                                    */
    float        scales[MIXPI_ROLES];
} mixpi_scaled;

/* Was a recipe of delayed scaling set in this context? */
static int mixpi_scaled_on(const mixp_context *ctx)
{ return ctx->casting && ctx->casting->delayed.kind != MIXP_RECIPE_NONE; }

/* The state of the linears with `weight`; NULL: it has none. */
static mixpi_scaled *mixpi_scaled_find(const mixp_context *ctx, const mixp_tensor *weight) {
    mixpi_scaled *s = ctx->casting->scaled;
    while (s && s->weight != weight) s = s->next;
    return s;
}

/* The state of the linears with `weight`, made at the first call. NULL with the error set: out of
 * memory. */
static mixpi_scaled *mixpi_scaled_of(mixp_context *ctx, mixp_tensor *weight,
                                     const mixp_recipe *r) {
    const int length = mixpi_recipe_history(r);
    mixpi_scaled *s = mixpi_scaled_find(ctx, weight);
    int i;
    if (s) s->recipe = *r;
    if (s) return s;
    s = (mixpi_scaled *)mixpi_host_alloc(ctx, sizeof *s);
    if (!s) return NULL;
    s->history = (float *)mixpi_host_alloc(ctx, MIXPI_ROLES * (size_t)length * sizeof(float));
    if (!s->history) return NULL;
    s->weight = weight;
    s->recipe = *r;
    s->length = length;
    for (i = 0; i < MIXPI_ROLES; i++) s->scales[i] = 1.0f;
    s->next = ctx->casting->scaled;
    return ctx->casting->scaled = s;
}

/* Enters the amax of an operand in its history; a NaN is not larger than any number. */
static void mixpi_scaled_enter(mixpi_scaled *s, mixpi_role role, float amax) {
    float *first = s->history + (int64_t)role * s->length;
    if (amax > *first) *first = amax;
}

/* The largest value of the element in which an operand is quantised. */
static float mixpi_scaled_limit(const mixp_recipe *r, mixpi_role role)
{ return role == MIXPI_ROLE_DY && !r->dy_e4m3 ? MIXP_E5M2_MAX : MIXP_E4M3_MAX; }

/* Moves a history by one place; the newest amax becomes the last. Returns the largest. */
static float mixpi_history_turn(float *history, int length) {
    const float newest = history[0];
    float largest = newest;
    int i;
    for (i = 1; i < length; i++) {
        if (history[i] > largest) largest = history[i];
        history[i - 1] = history[i];
    }
    history[length - 1] = newest;
    history[0] = 0.0f;
    return largest;
}

/* Ends an update of one operand. An operand that no linear has used keeps its state. */
static void mixpi_scaled_turn(mixpi_scaled *s, mixpi_role role) {
    float *history = s->history + (int64_t)role * s->length, amax = history[0], largest;
    const float limit = (float)ldexp((double)mixpi_scaled_limit(&s->recipe, role),
                                     -s->recipe.margin);
    if (!(amax > 0.0f)) return;
    largest = mixpi_history_turn(history, s->length);
    if (!s->recipe.most_recent) amax = largest;
    if (mixpi_amax_usable(mixp_bits_of_f32(amax)))
        s->scales[role] = mixpi_scale_to(limit, mixp_bits_of_f32(amax));
}

/* --- ranks ---
 * Each rank shares the newest amax of every parameter's linears, in the order in which the
 * parameters were made, which is the same on all ranks. */

static int mixpi_is_scaled_weight(const mixp_tensor *t)
{ return t->own.is_param || t->own.optimizers > 0; }

static int64_t mixpi_scaled_words(const mixp_context *ctx) {
    const mixp_tensor *t;
    int64_t n = 0;
    for (t = ctx->tensors; t; t = t->own.next) n += mixpi_is_scaled_weight(t);
    return MIXPI_ROLES * n;
}

/* Writes this rank's newest amax, for each parameter and operand. */
static void mixpi_scaled_to_words(const mixp_context *ctx, double *words) {
    const mixp_tensor *t;
    int i;
    for (t = ctx->tensors; t; t = t->own.next) {
        const mixpi_scaled *s;
        if (!mixpi_is_scaled_weight(t)) continue;
        s = mixpi_scaled_find(ctx, t);
        for (i = 0; s && i < MIXPI_ROLES; i++)
            words[i] = (double)s->history[(int64_t)i * s->length];
        words += MIXPI_ROLES;
    }
}

/* Enters a rank's words. A linear that this rank has not met gets a state; the others keep the
 * recipe of their newest linear. */
static mixp_result mixpi_scaled_from_words(mixp_context *ctx, const double *words) {
    mixp_tensor *t;
    int i;
    for (t = ctx->tensors; t; t = t->own.next) {
        mixpi_scaled *s;
        if (!mixpi_is_scaled_weight(t)) continue;
        s = mixpi_scaled_find(ctx, t);
        for (i = 0; i < MIXPI_ROLES; i++) {
            if (!(words[i] > 0.0)) continue;
            if (!s) s = mixpi_scaled_of(ctx, t, &ctx->casting->delayed);
            if (!s) return MIXP_ERR_MEMORY;
            mixpi_scaled_enter(s, (mixpi_role)i, (float)words[i]);
        }
        words += MIXPI_ROLES;
    }
    return MIXP_OK;
}

static mixp_result mixpi_scaled_share(mixp_context *ctx) {
    const int64_t words = mixpi_scaled_words(ctx), ranks = (int64_t)mixpi_world(ctx);
    const size_t bytes = (size_t)(ranks * words) * sizeof(double);
    double *table = (double *)mixpi_host_take(ctx, bytes);
    mixp_result r;
    int64_t i;
    if (!table) return mixpi_out_of_memory(ctx, bytes);
    memset(table, 0, bytes);
    mixpi_scaled_to_words(ctx, table + mixpi_place(ctx) * words);
    r = mixpi_crew_share(ctx, table, words);
    for (i = 0; i < ranks && r == MIXP_OK; i++)
        r = mixpi_scaled_from_words(ctx, table + i * words);
    mixpi_host_put(ctx, table);
    return r;
}

/* After an update of an optimizer, also a skipped one: new scales. */
static mixp_result mixpi_scaled_update(mixp_context *ctx) {
    mixpi_scaled *s;
    mixp_result r = MIXP_OK;
    int i;
    if (!mixpi_scaled_on(ctx)) return MIXP_OK;
    if (mixpi_world(ctx) > 1) r = mixpi_crew_stop(ctx, mixpi_scaled_share(ctx));
    for (s = ctx->casting->scaled; s && r == MIXP_OK; s = s->next)
        for (i = 0; i < MIXPI_ROLES; i++) mixpi_scaled_turn(s, (mixpi_role)i);
    return r;
}
