#pragma once
#include "rules.c"
/* --- recipes: delayed scaling ---------------------------------------------------------------- */

/* State of the linears with one weight. Scales and history lie in the device's memory. */
typedef struct mixpi_scaled {
    struct mixpi_scaled *next;
    mixp_tensor *weight;
    mixp_recipe  recipe;        /* recipe of the last linear that trains                   */
    int          length;        /* length of each operand's history                        */
    float       *history;       /* [MIXPI_ROLES, length]: of the update that is under way first,
                                   then from old to new                                    */
    float       *scales;        /* [MIXPI_ROLES]                                           */
} mixpi_scaled;

/* Does the device have its own memory? */
static int mixpi_has_own_memory(const mixp_context *ctx) { return ctx->device->download != NULL; }

/* Has this context trained a step under delayed scaling? An evaluation does not count, because one
 * rank may run an evaluation by itself. Nor does it change the recipe that ranks compare. */
static int mixpi_scaled_is_on(const mixp_context *ctx) {
    return ctx->recipes->trained.kind != MIXP_RECIPE_NONE;
}

/* The state of the linears with `weight`; NULL: it has none. */
static mixpi_scaled *mixpi_scaled_find(const mixp_context *ctx, const mixp_tensor *weight) {
    mixpi_scaled *s = ctx->recipes->scaled;
    while (s && s->weight != weight) s = s->next;
    return s;
}

/* A state whose scales are 1 and whose history is empty. On an error *r and the context's error are
 * set. */
static mixpi_scaled *mixpi_scaled_new(mixp_context *ctx, int length, mixp_result *r) {
    const size_t ahead = 16; /* room of the scales: the history behind them is aligned */
    const size_t count = ahead + MIXPI_ROLES * (size_t)length;
    mixpi_scaled *s = (mixpi_scaled *)mixpi_host_alloc(ctx, sizeof *s);
    *r = MIXP_ERR_MEMORY;
    if (s) s->scales = (float *)mixpi_device_alloc(ctx, count * sizeof *s->scales);
    if (!s || !s->scales) return NULL;
    s->history = s->scales + ahead;
    s->length = length;
    *r = mixpi_fill_with(ctx, mixpi_out_to(s->scales, MIXP_F32, 0), MIXPI_ROLES, 1.0);
    return s;
}

/* The state of the linears with `weight`, made at the first call with the recipe r. NULL with
 * *result and the error set. */
static mixpi_scaled *mixpi_scaled_of(
    mixp_context *ctx, mixp_tensor *weight, const mixp_recipe *r, mixp_result *result) {
    mixpi_scaled *s = mixpi_scaled_find(ctx, weight);
    *result = MIXP_OK;
    if (s) return s;
    if (ctx->capture.active) {
        *result = mixp_context_fail(ctx, MIXP_ERR_ORDER,
            "mixp_linear '%.63s' has no state of delayed scaling yet, and a captured step cannot "
            "make it; run an ordinary step first",
            weight->name);
        return NULL;
    }

    /* A new state, which the context lists. */
    s = mixpi_scaled_new(ctx, mixpi_recipe_history(r), result);
    if (*result != MIXP_OK) return NULL;
    s->weight = weight;
    s->recipe = *r;
    s->next = ctx->recipes->scaled;
    ctx->low_copies.scaled_made++;
    return ctx->recipes->scaled = s;
}

/* Enters the amax of an operand in its history; a NaN is not larger than any number. */
static void mixpi_scaled_enter(mixpi_scaled *s, mixpi_role role, float amax) {
    float *first = s->history + (int64_t)role * s->length;
    if (amax > *first) *first = amax;
}

/* The largest value of the element in which an operand is quantised. */
static float mixpi_scaled_limit(const mixp_recipe *r, mixpi_role role) {
    return role == MIXPI_ROLE_DY && !r->dy_e4m3 ? MIXP_E5M2_MAX : MIXP_E4M3_MAX;
}

/* Moves a history by one place; the latest amax becomes the last. Returns the largest. */
static float mixpi_history_turn(float *history, int length) {
    const float newest = history[0];
    float largest = newest;
    for (int i = 1; i < length; i++) {
        if (history[i] > largest) largest = history[i];
        history[i - 1] = history[i];
    }
    history[length - 1] = newest;
    history[0] = 0.0f;
    return largest;
}

/* Ends an update of operand i. An operand that no linear has used keeps its state, and so does one
 * with an Inf: in the history, the Inf would keep the scale from following the operand. */
static void mixpi_turn_operand(const mixp_turn_args *k, int i) {
    float *history = k->history + (int64_t)i * k->length;
    const float newest = history[0];
    if (!(newest > 0.0f)) return;
    if (!mixpi_amax_is_usable(mixp_bits_of_f32(newest))) {
        *history = 0.0f;
        return;
    }
    float largest = mixpi_history_turn(history, k->length);
    k->scales[i] = mixpi_delayed_scale(k, i, newest, largest, k->scales[i]);
}

/* Ends an update of the linears with one weight. */
static mixp_result mixpi_scaled_turn(mixp_context *ctx, const mixpi_scaled *s) {
    MIXPI_STATIC_ASSERT(turn_operands, (int)MIXPI_ROLES == (int)MIXP_TURN_OPERANDS);
    mixp_turn_args k = MIXPI_ZERO;
    k.n = MIXPI_ROLES;
    k.length = s->length;
    k.most_recent = s->recipe.most_recent;
    k.history = s->history;
    k.scales = s->scales;
    for (int i = 0; i < MIXPI_ROLES; i++)
        k.limits[i] =
            (float)ldexp((double)mixpi_scaled_limit(&s->recipe, (mixpi_role)i), -s->recipe.margin);
    if (ctx->device->kernels->turn)
        return mixpi_note_failure(ctx, "turn", ctx->device->kernels->turn(&ctx->exec, &k));
    for (int i = 0; i < MIXPI_ROLES; i++) mixpi_turn_operand(&k, i);
    return MIXP_OK;
}

/* --- ranks ---
 * Each rank shares the latest amax of every parameter's linears, in the order in which the
 * parameters were made, which is the same on all ranks. */

static int mixpi_is_scaled_weight(const mixp_tensor *t) {
    return t->own.is_param || t->own.optimizers > 0;
}

static int64_t mixpi_scaled_words(const mixp_context *ctx) {
    const mixp_tensor *t;
    int64_t n = 0;
    for (t = ctx->tensors; t; t = t->own.next) n += mixpi_is_scaled_weight(t);
    return MIXPI_ROLES * n;
}

/* Copies the latest amax of each state to its place in newest[words], or back. All in the device's
 * memory. */
static mixp_result mixpi_scaled_newest(mixp_context *ctx, float *newest, int back) {
    const mixp_tensor *t;
    mixp_result r = MIXP_OK;
    for (t = ctx->tensors; t && r == MIXP_OK; t = t->own.next) {
        if (!mixpi_is_scaled_weight(t)) continue;
        const mixpi_scaled *s = mixpi_scaled_find(ctx, t);

        mixp_copy_args k = MIXPI_ZERO;
        k.rank = 1;
        k.shape[0] = MIXPI_ROLES;
        k.src_strides[0] = k.dst_strides[0] = 1;
        if (s && back) {
            k.src = mixpi_in(newest, MIXP_F32);
            k.dst = mixpi_out_to(s->history, MIXP_F32, 0);
            k.dst_strides[0] = s->length;
        } else if (s) {
            k.src = mixpi_in(s->history, MIXP_F32);
            k.dst = mixpi_out_to(newest, MIXP_F32, 0);
            k.src_strides[0] = s->length;
        }

        /* A weight without a state still has a place. */
        if (s) r = mixpi_note_failure(ctx, "copy", ctx->device->kernels->copy(&ctx->exec, &k));
        newest += MIXPI_ROLES;
    }
    return r;
}

/* Makes the states of linears that only other ranks have met, with the recipe of the last linear
 * that trains. The other states keep theirs. */
static mixp_result mixpi_scaled_meet_all(mixp_context *ctx, const float *newest) {
    mixp_tensor *t;
    mixp_result r = MIXP_OK;
    for (t = ctx->tensors; t && r == MIXP_OK; t = t->own.next) {
        if (!mixpi_is_scaled_weight(t)) continue;
        if ((newest[0] > 0.0f || newest[1] > 0.0f || newest[2] > 0.0f) &&
            !mixpi_scaled_find(ctx, t))
            (void)mixpi_scaled_of(ctx, t, &ctx->recipes->trained, &r);
        newest += MIXPI_ROLES;
    }
    return r;
}

/* newest[words]: amax of this rank; each word becomes the largest of all ranks. table: memory for
 * the words of all ranks. */
static mixp_result mixpi_scaled_join(
    mixp_context *ctx, double *table, float *newest, int64_t words) {
    const int64_t ranks = (int64_t)mixpi_world(ctx);
    memset(table, 0, (size_t)(ranks * words) * sizeof *table);
    for (int64_t i = 0; i < words; i++) table[mixpi_place(ctx) * words + i] = (double)newest[i];
    mixp_result r = mixpi_crew_share(ctx, table, words);
    for (int64_t i = 0; i < words && r == MIXP_OK; i++)
        for (int64_t k = 0; k < ranks; k++)
            if ((float)table[k * words + i] > newest[i]) newest[i] = (float)table[k * words + i];
    return r;
}

/* Sets each state's latest amax to the largest of all ranks. table, newest: host memory. */
static mixp_result mixpi_scaled_exchange(
    mixp_context *ctx, double *table, float *newest, int64_t words) {
    const size_t bytes = (size_t)words * sizeof *newest;
    float *there = (float *)mixpi_context_scratch(ctx, bytes);
    mixp_result r = there ? mixpi_device_zero(ctx, there, bytes) : MIXP_ERR_MEMORY;
    if (r == MIXP_OK) r = mixpi_scaled_newest(ctx, there, 0);
    if (r == MIXP_OK) r = mixpi_download(ctx, newest, there, bytes);
    if (r == MIXP_OK) r = mixpi_scaled_join(ctx, table, newest, words);
    if (r == MIXP_OK) r = mixpi_scaled_meet_all(ctx, newest);
    there = (float *)mixpi_context_scratch(ctx, bytes); /* the exchange has used the scratch */
    if (r == MIXP_OK && !there) r = MIXP_ERR_MEMORY;
    if (r == MIXP_OK) r = mixpi_upload(ctx, there, newest, bytes);
    return r == MIXP_OK ? mixpi_scaled_newest(ctx, there, 1) : r;
}

static mixp_result mixpi_scaled_share(mixp_context *ctx) {
    const int64_t words = mixpi_scaled_words(ctx), ranks = (int64_t)mixpi_world(ctx);
    const size_t bytes = (size_t)(ranks * words) * sizeof(double);
    const size_t own = (size_t)words * sizeof(float);
    if (ctx->capture.active)
        return mixp_context_fail(ctx, MIXP_ERR_ORDER,
            "delayed scaling shares amax between ranks through the host, which a captured step "
            "cannot do; run each step without capturing, or use fp8_current");
    if (!words) return MIXP_OK;
    double *table = (double *)mixpi_host_take(ctx, bytes + own);
    if (!table) return mixpi_out_of_memory(ctx, bytes + own);
    mixp_result r = mixpi_scaled_exchange(ctx, table, (float *)(table + ranks * words), words);
    mixpi_host_free(ctx, table);
    return r;
}

/* After an update of an optimizer, also a skipped one: new scales. */
static mixp_result mixpi_delayed_advance(mixp_context *ctx) {
    const mixpi_scaled *s;
    mixp_result r = MIXP_OK;
    if (!mixpi_scaled_is_on(ctx)) return MIXP_OK;
    if (mixpi_world(ctx) > 1) r = mixpi_crew_stop(ctx, mixpi_scaled_share(ctx));
    for (s = ctx->recipes->scaled; s && r == MIXP_OK; s = s->next) r = mixpi_scaled_turn(ctx, s);
    return r;
}

/* What a step's result depends on, which all ranks must have alike. */
static void mixpi_recipe_words(const mixp_context *ctx, double *row) {
    const mixpi_recipes *s = ctx->recipes;
    const size_t bytes = (size_t)s->n_rules * sizeof *s->rules;
    if (mixpi_scaled_is_on(ctx)) {
        row[0] = (double)mixpi_recipe_history(&s->trained);
        row[1] = (double)s->trained.margin;
        row[2] = (double)s->trained.most_recent;
        row[3] = (double)s->trained.dy_e4m3;
        row[4] = (double)mixpi_scaled_words(ctx);
    }
    if (bytes) row[5] = (double)(mixpi_hash(1469598103934665603u, s->rules, bytes) >> 11);
}
