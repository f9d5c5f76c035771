#pragma once
#include "reader.c"
#include "writer.c"
#include "sound.c"
#include "partial.c"
/* --- checkpoints: saving -------------------------------------------------------------------- */

/* Returns what is wrong with a value, or NULL. */
static const char *mixpi_value_wrong(const mixp_checkpoint_value *value) {
    if (!value->name || !value->data) return "a value or its name is NULL";
    if (value->count < 1) return "a value's count is below 1";
    if (!mixpi_st_type_of(value->dtype)) return "a value has a dtype that safetensors lacks";
    if ((uint64_t)value->count > (uint64_t)PTRDIFF_MAX / mixp_dtype_size(value->dtype))
        return "a value is larger than memory can be";
    return NULL;
}

/* Returns what is wrong with the description of a checkpoint, or NULL. */
static const char *mixpi_checkpoint_wrong(const mixp_checkpoint *what) {
    const char *wrong = NULL;
    if (what->n_optimizers < 0 || what->n_values < 0 || what->n_metadata < 0)
        return "a count is negative";
    if (what->n_optimizers && !what->optimizers)
        return "an array is NULL although its count is not 0";
    if ((what->n_values && !what->values) || (what->n_metadata && !what->metadata))
        return "an array is NULL although its count is not 0";
    if (what->scaler && what->scaler->ctx != what->ctx)
        return "the scaler belongs to another context";
    for (int i = 0; !wrong && i < what->n_values; i++) wrong = mixpi_value_wrong(&what->values[i]);
    for (int i = 0; !wrong && i < what->n_optimizers; i++)
        if (!what->optimizers[i] || what->optimizers[i]->ctx != what->ctx)
            wrong = "an optimizer is NULL, or belongs to another context";
    return wrong;
}

/* Fails unless every parameter, and each view that an optimizer trains, has a name. */
static mixp_result mixpi_check_names(mixp_context *ctx, const char *who) {
    for (const mixp_tensor *t = ctx->tensors; t; t = t->own.next)
        if (mixpi_is_weight(t) && !t->name[0])
            return mixp_context_fail(ctx, MIXP_ERR_ARGUMENT,
                "%s: a %s has no name (%s, %.0f elements); name each parameter and buffer", who,
                t->own.backup ? "buffer" : "parameter", mixp_dtype_name(t->dtype),
                (double)t->count);
    return MIXP_OK;
}

static const char mixpi_who_saves[] = "mixp_checkpoint_save";
static const char mixpi_who_loads[] = "mixp_checkpoint_load";

/* Are the arguments complete, and is the context between two steps? */
static mixp_result mixpi_checkpoint_check(
    const char *path, const mixp_checkpoint *what, const char *who) {
    mixp_context *ctx;
    if (!what || !what->ctx) return MIXP_ERR_ARGUMENT;
    ctx = what->ctx;
    const int is_stream =
        who == mixpi_who_loads ? what->read_bytes != NULL : what->write_bytes != NULL;
    const char *wrong = path || is_stream ? mixpi_checkpoint_wrong(what)
                                          : "path is NULL, and so is the function for a stream";
    if (wrong) return mixp_context_fail(ctx, MIXP_ERR_ARGUMENT, "%s: %s", who, wrong);

    /* Is a step complete, with the trained weights in place? */
    for (int i = 0; i < what->n_optimizers; i++) {
        const mixp_optimizer *opt = what->optimizers[i];
        if (mixpi_stage(opt) != MIXPI_READY)
            return mixp_context_fail(ctx, MIXP_ERR_ORDER,
                "%s: optimizer %d is in the middle of a step; call mixp_scaler_update first", who,
                i);
        if (opt->swapped) return mixpi_need_weights(opt, who);
    }
    if (what->scaler && !what->scaler->desc.disabled &&
        what->scaler->checked_epoch == what->scaler->epoch)
        return mixp_context_fail(ctx, MIXP_ERR_ORDER,
            "%s: the scaler is in the middle of a step; call mixp_scaler_update first", who);

    /* Are the names unique? Then the device must finish. */
    MIXPI_TRY(mixpi_check_names(ctx, who));
    if (ctx->device->wait) MIXPI_TRY(mixpi_note_failure(ctx, who, ctx->device->wait(&ctx->exec)));
    return MIXP_OK;
}

/* Recomputes masters from weights that the program wrote since the last step. */
static mixp_result mixpi_checkpoint_sync(const mixp_checkpoint *what) {
    const mixpi_watcher *watcher = mixpi_watcher_of(what->ctx);
    mixp_result r = watcher ? watcher->pack(what->ctx) : MIXP_OK;
    for (int i = 0; i < what->n_optimizers; i++) {
        mixp_optimizer *opt = what->optimizers[i];
        for (int64_t k = 0; r == MIXP_OK && k < opt->count; k++)
            if (opt->slot[k].version != opt->slot[k].param->version) r = mixpi_master_sync(opt, k);
    }
    return r;
}

/* Turns the list into the plan of a file. */
static void mixpi_state_plan(const mixpi_state *s, mixpi_plan *plan) {
    plan->ctx = s->ctx;
    plan->n_items = s->n_items;
    plan->items =
        (mixpi_st_item *)mixpi_st_allocate(s->report, s->ctx, s->n_items, sizeof plan->items[0]);
    if (!plan->items) return;
    memset(plan->items, 0, s->n_items * sizeof plan->items[0]);
    for (size_t i = 0; i < s->n_items; i++) {
        plan->items[i].e = s->items[i].e;
        plan->items[i].on_device = s->items[i].on_device;
    }
}

/* The table of the ranks if they shard the states; otherwise NULL. */
static const mixpi_crew *mixpi_states_crew(const mixp_checkpoint *what) {
    const int sharded = what->n_optimizers > 0 && mixpi_is_sharded(what->ctx);
    return sharded ? mixpi_crew_of(what->ctx) : NULL;
}

/* The metadata key that holds the kinds of the optimizers. */
static const char mixpi_kinds_key[] = "mixprec.optimizers";

/* The kinds of the optimizers, each followed by ';': "Muon;AdamW;". The caller releases the text.
 * NULL after an error. */
static char *mixpi_checkpoint_kinds(const mixp_checkpoint *what, mixpi_report *r) {
    char *text = (char *)mixpi_st_allocate(r, what->ctx, (uint64_t)what->n_optimizers, 32);
    char *to = text;
    if (!text) return NULL;
    *to = '\0';
    for (int i = 0; i < what->n_optimizers; i++) {
        const mixp_step_plan *plan = &what->optimizers[i]->plan;
        const char *form = plan->amsgrad ? " amsgrad" : plan->centered ? " centered" : "";
        to += snprintf(to, 32, "%s%s;", mixpi_kind_of(plan->kind)->name, form);
    }
    return text;
}

/* The metadata key that holds the bits of the CPU's products of f16 and bf16. */
static const char mixpi_cpu_key[] = "mixprec.cpu";

/* The text of mixpi_cpu_key. NULL: on a GPU, or where no region of f16 or bf16 was opened, so that
 * no such product counts. */
static const char *mixpi_checkpoint_cpu(const mixp_context *ctx) {
    const mixpi_bits bits = mixpi_bits_of(ctx->device);
    return bits != MIXPI_BITS_OTHER && ctx->low_copies.regions ? mixpi_bits_names[bits] : NULL;
}

typedef const char *mixpi_text_pair[2];      /* a metadata key and its text */

/* Appends a pair to the metadata of a plan. */
static void mixpi_checkpoint_pair(
    mixpi_text_pair *pairs, mixpi_plan *plan, const char *key, const char *text) {
    pairs[plan->n_metadata][0] = key;
    pairs[plan->n_metadata++][1] = text;
}

/* The metadata of a checkpoint: our pairs, then the program's. The caller releases the pairs. */
static mixpi_text_pair *mixpi_checkpoint_metadata(const mixp_checkpoint *what, mixpi_report *r,
    mixpi_plan *plan, const char *kinds, const char *groups) {
    mixpi_text_pair *pairs = (mixpi_text_pair *)mixpi_st_allocate(
        r, what->ctx, (uint64_t)what->n_metadata + 5, sizeof *pairs);
    const char *cpu = mixpi_checkpoint_cpu(what->ctx);
    plan->metadata = (const char *const(*)[2])pairs;
    if (!pairs) return NULL;

    /* mixprec's own metadata. */
    mixpi_checkpoint_pair(pairs, plan, "format", "pt");
    mixpi_checkpoint_pair(pairs, plan, "mixprec", "1");
    if (what->n_optimizers) mixpi_checkpoint_pair(pairs, plan, mixpi_kinds_key, kinds);
    if (groups && *groups) mixpi_checkpoint_pair(pairs, plan, mixpi_groups_key, groups);
    if (cpu) mixpi_checkpoint_pair(pairs, plan, mixpi_cpu_key, cpu);

    /* The program's metadata. */
    for (int i = 0; i < what->n_metadata; i++) {
        const char *key = what->metadata[i][0];
        if (key && strncmp(key, "mixprec", 7) == 0)
            mixpi_report_fail(
                r, MIXP_ERR_ARGUMENT, "the metadata key '%.60s' is mixprec's: choose another", key);
        mixpi_checkpoint_pair(pairs, plan, key, what->metadata[i][1]);
    }
    return pairs;
}

/* Writes the file. own: the other ranks' own buffers, or NULL. Warns the other ranks that this may
 * take long. */
static void mixpi_checkpoint_write(const mixp_checkpoint *what, mixpi_report *r, char *own) {
    const int busy = mixpi_crew_set_busy(what->ctx, 1);
    char *kinds = mixpi_checkpoint_kinds(what, r);
    char *groups = mixpi_checkpoint_groups(what, r);

    /* List the items of the file. */
    mixpi_state state = MIXPI_ZERO;
    state.own = own;
    mixpi_state_list(&state, r, what->ctx, what, NULL);
    mixpi_plan plan = MIXPI_ZERO;
    mixpi_text_pair *pairs = mixpi_checkpoint_metadata(what, r, &plan, kinds, groups);
    mixpi_state_plan(&state, &plan);

    mixpi_plan_save(r, &plan);

    mixpi_state_free(&state);
    mixpi_st_free(what->ctx, pairs);
    mixpi_st_free(what->ctx, kinds);
    mixpi_st_free(what->ctx, groups);
    mixpi_crew_set_busy(what->ctx, busy);
}

/* Collects the ranks' own buffers on rank 0, in memory that the caller releases. */
static char *mixpi_own_collect(mixp_context *ctx, mixpi_report *r) {
    const uint64_t ranks = mixpi_world(ctx) - 1;
    char *own = NULL;
    if (mixpi_place(ctx) == 0) own = (char *)mixpi_st_allocate(r, ctx, ranks, mixpi_own_bytes(ctx));
    if (mixpi_crew_of(ctx)->collect_buffers(ctx, own) != MIXP_OK)
        mixpi_report_fail(r, MIXP_ERR_RANKS, "ranks did not send their buffers");
    return own;
}

/* Warns of a frozen parameter whose numbers differ between ranks: the file has one copy. */
static void mixpi_warn_of_one_copy(mixp_context *ctx) {
    if (!ctx->buffers.unbuffered) return;
    mixpi_warn(ctx,
        "mixp_checkpoint_save: steps wrote the frozen parameter '%.60s', and the file holds the "
        "numbers of rank 0 for all ranks; make '%.60s' with mixp_buffer",
        ctx->buffers.unbuffered->name, ctx->buffers.unbuffered->name);
}

/* Warns of gradients that wait for the other micro-batches of their update. */
static void mixpi_warn_of_gradients(const mixp_checkpoint *what) {
    mixp_context *ctx = what->ctx;
    const mixp_tensor *waits = NULL;
    if (ctx->walk.walked_in <= ctx->training.updated_in) return;
    for (int o = 0; o < what->n_optimizers; o++) {
        const mixp_optimizer *opt = what->optimizers[o];
        for (int64_t k = 0; k < opt->count && !waits; k++)
            if (!opt->slot[k].grad && opt->slot[k].param->grad) waits = opt->slot[k].param;
    }
    if (!waits) return;
    mixpi_warn(ctx,
        "mixp_checkpoint_save: since the last update, mixp_backward has filled gradients, of "
        "'%.60s' for example, which a checkpoint does not hold. If an accumulation is under way, "
        "save after its update: a resumed run would lack these micro-batches. Otherwise call "
        "mixp_zero_grad before you save",
        waits->name);
}

MIXPI_SELDOM
static mixp_result mixpi_do_checkpoint_save(const char *path, const mixp_checkpoint *what) {
    mixp_result result = mixpi_checkpoint_check(path, what, mixpi_who_saves);
    char error[MIXP_MESSAGE_SIZE];
    if (result != MIXP_OK) return mixpi_crew_stop_alone(what ? what->ctx : NULL, result);
    mixpi_warn_of_gradients(what);
    mixpi_warn_of_one_copy(what->ctx);
    const mixpi_crew *crew = mixpi_states_crew(what);
    const int owned = mixpi_own_bytes(what->ctx) > 0;
    mixpi_report r = mixpi_report_begin(path ? path : "a stream", error, sizeof error);
    if (!path) r.stream = what;
    result = mixpi_checkpoint_sync(what);
    if (result != MIXP_OK) mixpi_report_fail(&r, result, "the device failed");

    /* Where each rank has a part of the state, all ranks are here, and rank 0 writes. */
    const int writes = (!crew && !owned) || mixpi_place(what->ctx) == 0;
    void *borrowed = NULL;
    char *own = NULL;
    result = crew ? (crew->check)(what->ctx) : MIXP_OK;
    if (result != MIXP_OK) return result;
    if (crew && writes) borrowed = crew->borrow(what, &r, 0);
    if (crew) result = crew->collect(what);
    if (result != MIXP_OK) mixpi_report_fail(&r, result, "ranks did not send their states");
    if (owned && result == MIXP_OK) own = mixpi_own_collect(what->ctx, &r);

    if (writes) mixpi_checkpoint_write(what, &r, own);
    if (crew) crew->give_back(what, borrowed);
    mixpi_st_free(what->ctx, own);
    if (r.result != MIXP_OK)
        mixp_context_fail(what->ctx, r.result, "mixp_checkpoint_save: %s", error);
    if (!crew && !owned) return r.result;
    return mixpi_crew_of(what->ctx)->saved(what, r.result);
}

MIXPREC_API mixp_result mixp_checkpoint_save(const char *path, const mixp_checkpoint *what) {
    MIXPI_RETURN_INSIDE(what ? what->ctx : NULL, mixpi_do_checkpoint_save(path, what));
}

/* --- checkpoints: loading ------------------------------------------------------------------- */

/* The differences between a file and the program; the message shows the first three. */
typedef struct mixpi_diff {
    mixp_result result;
    int         n;
    char        text[320];
    char        hint[160];      /* what to do, if known                                    */
} mixpi_diff;

/* "f32 [2, 3]" */
static const char *mixpi_describe(char *text, size_t room, const mixp_st_entry *e) {
    const char *dtype = e->dtype == MIXPI_OPAQUE ? e->type : mixp_dtype_name(e->dtype);
    int n = snprintf(text, room, "%s ", dtype);
    mixpi_shape_text(e->rank, e->shape, text + n, room - (size_t)n);
    return text;
}

MIXPI_PRINTF(4, 5)
static void mixpi_diff_note(
    mixpi_diff *d, mixp_result code, const char *name, const char *format, ...) {
    size_t used = strlen(d->text);
    va_list args;
    if (d->result != MIXP_ERR_SHAPE) d->result = code;
    if (d->n++ >= 3) return;
    used += (size_t)snprintf(d->text + used, sizeof d->text - used, "; '%.60s' is ", name);
    if (used >= sizeof d->text) return;
    va_start(args, format);
    vsnprintf(d->text + used, sizeof d->text - used, format, args);
    va_end(args);
}

static int mixpi_same_shape(const mixp_st_entry *a, const mixp_st_entry *b) {
    if (a->rank != b->rank) return 0;
    for (int i = 0; i < a->rank; i++)
        if (a->shape[i] != b->shape[i]) return 0;
    return 1;
}

static int mixpi_is_transpose(const mixp_st_entry *a, const mixp_st_entry *b) {
    return a->rank == 2 && b->rank == 2 && a->shape[0] == b->shape[1] && a->shape[1] == b->shape[0];
}

static int mixpi_same_type(const mixp_st_entry *a, const mixp_st_entry *b) {
    if (a->dtype != b->dtype) return 0;
    return a->dtype != MIXPI_OPAQUE || strcmp(a->type, b->type) == 0;
}

static void mixpi_diff_pair(mixpi_diff *d, const mixp_st_entry *here, const mixp_st_entry *file) {
    char here_text[256], file_text[256];
    int same = mixpi_same_shape(here, file);
    if (same && mixpi_same_type(here, file)) return;
    mixpi_diff_note(d, same ? MIXP_ERR_DTYPE : MIXP_ERR_SHAPE, file->name, "%.80s, not %.80s",
        mixpi_describe(file_text, sizeof file_text, file),
        mixpi_describe(here_text, sizeof here_text, here));
    if (!*d->hint && !same && mixpi_is_transpose(here, file))
        snprintf(d->hint, sizeof d->hint,
            "; the file has the transpose: a weight of mixp_linear is [out, in]");
}

/* Does the description's optimizer of this state, "optimizer.3.", train parameters? Each of them
 * has the state `missed`. */
static int mixpi_state_trains(const mixpi_state *s, const char *name) {
    const size_t length = strcspn(name + strlen("optimizer."), ".") + strlen("optimizer.") + 1;
    for (size_t i = 0; i < s->n_items; i++) {
        const char *here = s->items[i].e.name;
        if (strncmp(here, name, length) == 0 && strncmp(here + length, "missed.", 7) == 0) return 1;
    }
    return 0;
}

/* Suggests the part of the description whose state the file has and the description lacks. */
static void mixpi_state_hint(mixpi_diff *d, const mixpi_state *s, const char *name) {
    const char *hint = "";
    if (strncmp(name, "scaler.", 7) == 0) hint = "; the file has a scaler's state: set .scaler";
    if (strncmp(name, "optimizer.", 10) == 0)
        hint = mixpi_state_trains(s, name)
                   ? "; in the file this optimizer trains other parameters: build the same model, "
                     "and set .optimizers in the order in which they were saved"
                   : "; the file has an optimizer's state: call mixp_optimizer_add first, and set "
                     ".optimizers";
    if (strncmp(name, "mixprec.recipe.", 15) == 0)
        hint = s->ctx->quantiser
                   ? "; the file has the state of the recipe fp8_delayed: call "
                     "mixp_autocast_set_recipe first"
                   : "; the file has the state of the recipe fp8_delayed, and this build has no "
                     "recipes: compile without MIXPREC_NO_RECIPES";
    if (mixpi_is_rank_name(name))
        hint = "; in the file this buffer is each rank's own: make the same buffers with the same "
               "mixp_buffer_set_ranks";
    if (!*d->hint) snprintf(d->hint, sizeof d->hint, "%s", hint);
}

/* Suggests how to load if the file lacks a state. */
static void mixpi_missing_hint(mixpi_diff *d, const char *name) {
    if (*d->hint || strncmp(name, "optimizer.", 10) != 0) return;
    if (strncmp(name + 10 + strspn(name + 10, "0123456789"), ".ema.", 5) == 0)
        snprintf(d->hint, sizeof d->hint,
            "; the file has no averages: call mixp_optimizer_set_ema after the load");
}

static void mixpi_diff_tell(mixpi_diff *d, mixpi_report *r) {
    if (d->n)
        mixpi_report_fail(r, d->result, "%d tensor%s not fit%s%s%s", d->n,
            d->n == 1 ? " does" : "s do", d->text, d->n > 3 ? "; ..." : "", d->hint);
}

/* Order of a merge. -1: a comes first, or b has ended; 1: b comes first; 0: the names are equal. */
static int mixpi_merge_order(const mixp_st_entry *a, const mixp_st_entry *b) {
    return !b ? -1 : !a ? 1 : strcmp(a->name, b->name);
}

/* Compares two lists sorted by name. Optional items that only one list has are left out of it. */
static void mixpi_state_compare(mixpi_state *s, mixp_safetensors *file) {
    size_t i = 0, k = 0;
    mixpi_diff diff = MIXPI_ZERO;

    /* Both lists are sorted by name: they are merged. */
    while (i < s->n_items || k < file->n_items) {
        const mixp_st_entry *here = i < s->n_items ? &s->items[i].e : NULL;
        const mixp_st_entry *there = k < file->n_items ? &file->items[k].e : NULL;
        int order = mixpi_merge_order(here, there);
        if (order < 0 && s->items[i].optional) s->items[i].absent = 1;
        else if (order < 0 && s->partial && mixpi_item_is_added(&s->items[i], file))
            s->items[i].absent = s->items[i].added = 1;
        else if (order < 0) {
            mixpi_diff_note(&diff, MIXP_ERR_SHAPE, here->name, "missing");
            mixpi_missing_hint(&diff, here->name);
        } else if (order > 0 && (mixpi_is_optional_name(there->name) ||
                                    (s->partial && mixpi_name_is_removed(there->name, s)) ||
                                    (s->fresh && mixpi_is_private_name(s->ctx, there->name))))
            file->items[k].wanted = 0;
        else if (order > 0) {
            mixpi_diff_note(&diff, MIXP_ERR_SHAPE, there->name, "in the file only");
            mixpi_state_hint(&diff, s, there->name);
        } else mixpi_diff_pair(&diff, here, there);
        i += order <= 0;
        k += order >= 0;
    }

    mixpi_diff_tell(&diff, s->report);
}

/* Tells the guard how many sites the file has. */
static void mixpi_state_meet_sites(mixpi_state *s, const mixp_safetensors *file) {
    const mixpi_watcher *watcher = mixpi_watcher_of(s->ctx);
    int64_t rows = 0;
    for (size_t i = 0; i < file->n_items; i++) {
        const mixp_st_entry *e = &file->items[i].e;
        if (e->rank == 1 && strcmp(e->name, "mixprec.guard.sites") == 0) rows = e->shape[0];
    }
    if (watcher) watcher->meet(s, rows);
}

/* Can a save have written the number x? */
static int mixpi_number_is_good(mixpi_must must, double x) {
    const double most = 4611686018427387904.0; /* 2^62 */
    switch (must) {
    case MIXPI_FINITE: return mixpi_f64_is_finite(x);
    case MIXPI_AT_LEAST_0: return mixpi_is_at_least_0(x);
    case MIXPI_BETA: return mixpi_is_beta(x);
    case MIXPI_SCALE: return mixpi_scale_is_usable((float)x);
    case MIXPI_SCALE_OR_0:
        return mixp_bits_of_f32((float)x) == 0 || mixpi_scale_is_usable((float)x);
    case MIXPI_COUNTER: return x >= 0.0 && x <= most;
    case MIXPI_FLAG: return x >= 0.0 && x <= 1.0;
    case MIXPI_LOSSY: return x >= 0.0 && x < 1073741824.0;
    case MIXPI_AMAX: return x >= 0.0;
    case MIXPI_ABOVE_0: return x > 0.0 && mixpi_f64_is_finite(x);
    default: return 0;
    }
}

/* Is every number of the item valid? */
static int mixpi_item_is_good(const mixpi_state_item *item) {
    const size_t size = mixp_dtype_size(item->e.dtype);
    const char *data = (const char *)item->e.data;
    double x = 0.0;
    if (item->is_good) return item->is_good(item);
    if (item->must == MIXPI_ANY) return 1;
    for (size_t at = 0; at < item->e.bytes; at += size) {
        mixp_convert(&x, MIXP_F64, data + at, item->e.dtype, 1);
        if (!mixpi_number_is_good(item->must, x)) return 0;
    }
    return 1;
}

/* Returns the group that the file describes; the caller checks its numbers together. */
static mixp_param_group mixpi_group_loaded(const mixpi_state *s, const mixp_param_group *now) {
    const uintptr_t begin = (uintptr_t)now;
    mixp_param_group group = *now;
    for (size_t i = 0; i < s->n_items; i++) {
        const mixpi_state_item *item = &s->items[i];
        uintptr_t at = (uintptr_t)item->memory;
        if (!item->on_device && at >= begin && at < begin + sizeof group)
            memcpy((char *)&group + (at - begin), item->e.data, item->e.bytes);
    }
    return group;
}

/* The item of the count that is stored at `memory`. */
static const mixpi_state_item *mixpi_state_at(const mixpi_state *s, const void *memory) {
    size_t i = 0;
    while (s->items[i].memory != memory || !s->items[i].on_device) i++;
    return &s->items[i];
}

/* The value of a count in the file. */
static int64_t mixpi_item_count(const mixpi_state_item *item) {
    int64_t wide = 0;
    int32_t narrow = 0;
    if (item->e.dtype == MIXP_I64) memcpy(&wide, item->e.data, sizeof wide);
    else memcpy(&narrow, item->e.data, sizeof narrow);
    return wide + narrow;
}

/* Fails if a count exceeds the count that limits it. */
static void mixpi_state_check_limits(const mixpi_state *s) {
    const mixpi_state_item *all = NULL;
    for (size_t i = 0; i < s->n_items; i++) {
        const mixpi_state_item *part = &s->items[i];
        if (part->absent || !part->limit) continue;
        if (!all || all->memory != part->limit) all = mixpi_state_at(s, part->limit);
        if (mixpi_item_count(part) > mixpi_item_count(all))
            mixpi_report_fail(s->report, MIXP_ERR_FORMAT,
                "'%.60s' is %.0f, more than '%.60s', which is %.0f", part->e.name,
                (double)mixpi_item_count(part), all->e.name, (double)mixpi_item_count(all));
    }
}

/* Fails unless every step was either applied or skipped. */
static void mixpi_state_check_steps(const mixpi_state *s, const mixp_checkpoint *what) {
    for (int i = 0; i < what->n_optimizers; i++) {
        const mixp_step_state *at = what->optimizers[i]->state;
        const mixpi_state_item *steps = mixpi_state_at(s, &at->steps);
        int64_t applied = mixpi_item_count(mixpi_state_at(s, &at->applied));
        int64_t skipped = mixpi_item_count(mixpi_state_at(s, &at->skipped));
        uint64_t sum = (uint64_t)applied + (uint64_t)skipped;
        if ((uint64_t)mixpi_item_count(steps) != sum)
            mixpi_report_fail(s->report, MIXP_ERR_FORMAT,
                "'%.60s' is %.0f, but the file counts %.0f applied and %.0f skipped steps",
                steps->e.name, (double)mixpi_item_count(steps), (double)applied, (double)skipped);
    }
}

static void mixpi_state_check_groups(const mixpi_state *s, const mixp_checkpoint *what) {
    for (int i = 0; i < what->n_optimizers; i++) {
        const mixp_step_plan *plan = &what->optimizers[i]->plan;
        for (int g = 0; g < plan->n_groups; g++) {
            mixp_param_group group = mixpi_group_loaded(s, &plan->groups[g]);
            const char *wrong = mixpi_group_wrong(plan->kind, &group);
            if (wrong)
                mixpi_report_fail(
                    s->report, MIXP_ERR_FORMAT, "group %d of optimizer %d: %s", g, i, wrong);
        }
    }
}

/* Assigns the file's data to the items and checks the numbers. Apart from items left out, both
 * lists have the same names in the same order. */
static mixp_result mixpi_state_take(
    mixpi_state *s, const mixp_safetensors *file, const mixp_checkpoint *what) {
    size_t i, k = 0;
    if (s->report->result != MIXP_OK) return s->report->result;
    for (i = 0; i < s->n_items; i++) {
        if (s->items[i].absent) continue;
        while (!file->items[k].wanted) k++;
        s->items[i].e.data = file->items[k++].e.data;
        if (!mixpi_item_is_good(&s->items[i]))
            mixpi_report_fail(
                s->report, MIXP_ERR_FORMAT, "'%.60s' is out of range", s->items[i].e.name);
    }
    if (s->report->result != MIXP_OK) return s->report->result;
    mixpi_state_check_limits(s);
    mixpi_state_check_steps(s, what);
    mixpi_state_check_groups(s, what);
    return s->report->result;
}

/* After a load: earlier gradients can no longer be unscaled, no earlier step can be retried, and
 * what passes have found since the last update does not belong to the loaded state. `load` is the
 * result so far: after an error nothing is uploaded. */
static mixp_result mixpi_scaler_forget(mixp_scaler *s, mixp_result load) {
    const int32_t none = 0;
    s->epoch++;
    s->scales += MIXP_PAST_SCALES + 1;
    s->began = s->first = 0;
    s->retried = s->epoch + s->ctx->capture.replays;
    s->ctx->capture.replayed = 0;
    if (load == MIXP_OK) load = mixpi_upload(s->ctx, &s->state->found_inf, &none, sizeof none);
    if (load == MIXP_OK) load = mixpi_upload(s->ctx, &s->state->buffer_bad, &none, sizeof none);
    if (load != MIXP_OK) return load;
    return mixpi_upload(s->ctx, &s->state->loss_bad, &none, sizeof none);
}

/* The number of ranks whose own buffers the file holds. */
static int mixpi_file_ranks(const mixp_safetensors *file) {
    const size_t n = sizeof mixpi_rank_prefix - 1;
    int most = 0;
    for (size_t i = 0; i < file->n_items; i++) {
        const char *name = file->items[i].e.name;
        const long rank = strncmp(name, mixpi_rank_prefix, n) == 0 ? strtol(name + n, NULL, 10) : 0;
        if (rank > most && rank < INT32_MAX) most = (int)rank;
    }
    return most + 1;
}

/* Own buffers of another number of ranks belong to no rank of this run. */
static void mixpi_checkpoint_meet_ranks(
    mixpi_state *s, const mixp_safetensors *file, const mixp_checkpoint *what) {
    const int there = mixpi_file_ranks(file), here = (int)mixpi_world(s->ctx);
    const mixp_tensor *t = NULL;
    for (int64_t i = 0; i < s->ctx->buffers.all.count && !t; i++)
        if (mixpi_is_private(s->ctx->buffers.all.made[i])) t = s->ctx->buffers.all.made[i];
    if (!t || there == here) return;
    s->fresh = what->fresh_buffers != 0;
    if (s->fresh) return;
    mixpi_report_fail(s->report, MIXP_ERR_SHAPE,
        "the file holds the own buffers of %d rank%s, '%.60s' among them, and this run has %d: run "
        "as many ranks, or set .fresh_buffers to keep the current buffers",
        there, there > 1 ? "s" : "", t->name, here);
}

/* Changes the state. From here on only the device can fail. */
static void mixpi_state_apply(mixpi_state *s, const mixp_checkpoint *what) {
    mixp_context *ctx = s->ctx;
    const mixpi_quantiser *quantiser = mixpi_quantiser_of(ctx);
    const mixpi_watcher *watcher = mixpi_watcher_of(ctx);
    int64_t made = ctx->tensors_made, k;
    mixp_result r = MIXP_OK;

    /* An added parameter keeps what the program wrote into it: its master follows. */
    for (int o = 0; what->partial && o < what->n_optimizers; o++)
        for (k = 0; r == MIXP_OK && k < what->optimizers[o]->count; k++) {
            const mixpi_slot *slot = &what->optimizers[o]->slot[k];
            if (slot->version != slot->param->version)
                r = mixpi_master_sync(what->optimizers[o], k);
        }

    /* The bytes, each to its place. */
    for (size_t i = 0; r == MIXP_OK && i < s->n_items; i++) {
        const mixpi_state_item *item = &s->items[i];
        if (item->elsewhere) continue;
        if (item->added) r = mixpi_item_keep(s, item);
        else if (item->lent) r = mixpi_crew_of(ctx)->load(item);
        else if (item->absent && item->on_device)
            r = mixpi_device_zero(ctx, item->memory, item->e.bytes);
        else if (item->absent) memset(item->memory, 0, item->e.bytes);
        else if (item->on_device) r = mixpi_upload(ctx, item->memory, item->e.data, item->e.bytes);
        else memcpy(item->memory, item->e.data, item->e.bytes);
    }

    /* Low copies, gradients and windows of buffers that knew the old weights are void. Gradients
     * in views are the program's. */
    mixpi_crew_forget(ctx);
    for (mixp_tensor *t = ctx->tensors; t; t = t->own.next) t->grad = NULL;
    if (ctx->tensors_made < made) ctx->tensors_made = made; /* ids stay unique */
    mixpi_window_new(ctx, MIXPI_OUTSIDE);
    for (mixp_tensor *t = ctx->tensors; t; t = t->own.next)
        if (mixpi_is_weight(t)) mixpi_note_load(t, "mixp_checkpoint_load");
    for (int o = 0; o < what->n_optimizers; o++) /* weights and masters match already */
        for (k = 0; k < what->optimizers[o]->count; k++) {
            mixpi_slot *slot = &what->optimizers[o]->slot[k];
            slot->version = slot->param->version;
        }
    for (int o = 0; o < what->n_optimizers; o++) {
        what->optimizers[o]->clipped = 0;
        what->optimizers[o]->issued = -1;
        what->optimizers[o]->ema_begun = what->optimizers[o]->ema_count;
    }

    /* The scaler, the recipes and the guard continue from the loaded state. */
    if (what->scaler) r = mixpi_scaler_forget(what->scaler, r);
    if (r == MIXP_OK && quantiser) r = quantiser->loaded(ctx);
    if (watcher) watcher->unpack(ctx);
    if (r != MIXP_OK)
        mixpi_report_fail(s->report, r,
            "the device failed; the state is partly overwritten; load the checkpoint again");
}

static void mixpi_checkpoint_schema(mixpi_report *r, const mixp_safetensors *file) {
    const char *schema = mixp_safetensors_metadata(file, "mixprec");
    if (!schema)
        mixpi_report_fail(r, MIXP_ERR_FORMAT,
            "not a mixprec checkpoint: to load weights only, call mixp_checkpoint_load_weights");
    else if (strcmp(schema, "1") != 0)
        mixpi_report_fail(r, MIXP_ERR_FORMAT,
            "saved by another version of mixprec: the file has layout '%.20s', this version reads "
            "'1'",
            schema);
}

/* Fails if an optimizer of the file has another kind than the program's optimizer of its number:
 * several kinds have the same states. Files of early versions do not name the kinds. */
static void mixpi_checkpoint_meet_kinds(
    mixpi_report *r, const mixp_safetensors *file, const mixp_checkpoint *what) {
    const char *there = mixp_safetensors_metadata(file, mixpi_kinds_key);
    size_t n;
    int i = 0;
    if (!there) return;
    char *here = mixpi_checkpoint_kinds(what, r);
    if (!here) return;
    for (n = 0; here[n] && here[n] == there[n]; n++) i += here[n] == ';';
    if (here[n] && there[n])
        mixpi_report_fail(r, MIXP_ERR_SHAPE,
            "optimizer %d has another kind: the file's optimizers are '%.60s', the program's "
            "'%.60s'; make the same kinds, or load only the weights with "
            "mixp_checkpoint_load_weights",
            i, there, here);
    mixpi_st_free(what->ctx, here);
}

/* Warns if the file's products of f16 and bf16 had other bits than this CPU's. Files of early
 * versions do not say. Regions before the save count as this context's: the next save says so. */
static void mixpi_warn_of_cpu(mixp_context *ctx, const mixp_safetensors *file) {
    const mixpi_bits bits = mixpi_bits_of(ctx->device);
    const char *there = mixp_safetensors_metadata(file, mixpi_cpu_key);
    if (there && !ctx->low_copies.regions) ctx->low_copies.regions = 1;
    if (!there || bits == MIXPI_BITS_OTHER || strcmp(there, mixpi_bits_names[bits]) == 0) return;
    mixpi_warn(ctx,
        "mixp_checkpoint_load: the file was saved with the instruction set '%.40s', and this "
        "context has '%s': training continues, but products of f16 and bf16 round differently. For "
        "the same bits select that set with mixp_cpu_with, or train with portable_bits of "
        "mixp_context_desc from the start",
        there, mixpi_bits_names[bits]);
}

/* Reads the header and compares it with the program's state. The data is read only if the header
 * fits, and changes the state only if all of it was read and is in range. */
static void mixpi_checkpoint_read(
    mixpi_state *s, mixp_safetensors *file, mixpi_file *f, const mixp_checkpoint *what) {
    const mixpi_quantiser *quantiser = mixpi_quantiser_of(s->ctx);
    const mixpi_watcher *watcher = mixpi_watcher_of(s->ctx);
    mixpi_report *r = s->report;
    if (mixpi_st_read_header(file, f) != MIXP_OK) return;

    /* Does the file fit? Each part of the program meets its part of the header. */
    mixpi_checkpoint_schema(r, file);
    mixpi_st_sort(r, file->items, file->n_items, MIXP_ERR_FORMAT);
    if (r->result == MIXP_OK) mixpi_checkpoint_meet_kinds(r, file, what);
    if (r->result == MIXP_OK) s->groups = mixpi_groups_meet(r, file, what);
    if (r->result == MIXP_OK) mixpi_state_meet_sites(s, file);
    if (r->result == MIXP_OK) mixpi_checkpoint_meet_ranks(s, file, what);
    if (r->result == MIXP_OK && quantiser) quantiser->meet(r, s->ctx, file);
    if (r->result == MIXP_OK) mixpi_state_list(s, r, s->ctx, what, NULL);
    if (r->result == MIXP_OK) mixpi_state_compare(s, file);

    /* Read the data, check it, allocate memory, and only then change the state. */
    if (r->result == MIXP_OK) mixpi_st_read_data(file, f);
    if (mixpi_state_take(s, file, what) == MIXP_OK && watcher) watcher->make_room(s);
    if (r->result == MIXP_OK) mixpi_state_apply(s, what);

    if (r->result == MIXP_OK) mixpi_warn_of_weights(s, NULL, "mixp_checkpoint_load");
    if (r->result == MIXP_OK) mixpi_warn_of_cpu(s->ctx, file);
    if (r->result == MIXP_OK) mixpi_partial_tell(s, file, what);
}

MIXPI_SELDOM
static mixp_result mixpi_do_checkpoint_load(const char *path, const mixp_checkpoint *what) {
    mixp_result result = mixpi_checkpoint_check(path, what, mixpi_who_loads);
    char error[480]; /* three differences need more room than other messages */
    mixpi_file f;
    if (result != MIXP_OK) return result;
    const mixpi_crew *crew = mixpi_states_crew(what);

    mixp_safetensors file = MIXPI_ZERO;
    file.ctx = what->ctx;
    mixpi_report r = mixpi_report_begin(path ? path : "a stream", error, sizeof error);
    if (!path) r.stream = what;
    void *borrowed = crew ? crew->borrow(what, &r, 1) : NULL;

    mixpi_state state = MIXPI_ZERO;
    state.report = &r;
    state.ctx = what->ctx;
    state.partial = what->partial != 0;
    if (mixpi_source_open(&f, &r) == MIXP_OK) mixpi_checkpoint_read(&state, &file, &f, what);

    /* After success or failure, releases everything. */
    mixpi_file_close(&f);
    mixpi_st_clear(&file);
    mixpi_state_free(&state);
    for (int o = 0; r.result == MIXP_OK && o < what->n_optimizers; o++)
        what->optimizers[o]->loaded = 1;
    if (crew) crew->give_back(what, borrowed);
    if (r.result == MIXP_OK) return MIXP_OK;
    return mixp_context_fail(what->ctx, r.result, "mixp_checkpoint_load: %s", error);
}

MIXPREC_API mixp_result mixp_checkpoint_load(const char *path, const mixp_checkpoint *what) {
    MIXPI_RETURN_INSIDE(what ? what->ctx : NULL, mixpi_do_checkpoint_load(path, what));
}
