#pragma once
#include "checkpoint.c"
/* --- only weights --------------------------------------------------------------------------- */

/* Does this name in a checkpoint belong to state, not to a weight? */
static int mixpi_is_state_name(const char *name) {
    static const char *const prefixes[] = { "optimizer.", "scaler.", "mixprec.", "value." };
    for (size_t i = 0; i < MIXPI_LENGTH(prefixes); i++)
        if (strncmp(name, prefixes[i], strlen(prefixes[i])) == 0) return 1;
    return 0;
}

static int mixpi_is_floating(mixp_dtype dtype) {
    return dtype != MIXP_I32 && dtype != MIXP_I64 && dtype != MIXP_U8 && dtype != MIXPI_OPAQUE;
}

/* Pairs a weight with the file's tensor of the same name. */
static void mixpi_weights_pair(
    mixpi_diff *d, mixpi_state_item *here, mixpi_st_item *there, int convert) {
    mixp_dtype to = here->e.dtype, from = there->e.dtype;
    here->from = there;
    if (convert && mixpi_is_floating(to) && mixpi_is_floating(from)) {
        mixp_st_entry same = there->e;
        same.dtype = to;
        mixpi_diff_pair(d, &here->e, &same);
        return;
    }
    mixpi_diff_pair(d, &here->e, &there->e);
    if (!*d->hint && to != from && mixpi_is_floating(to) && mixpi_is_floating(from))
        snprintf(d->hint, sizeof d->hint,
            "; set .convert of mixp_weights_desc to 1 to convert floating-point weights");
}

/* Do the prefix and the pattern of desc exclude this tensor of the file? */
static int mixpi_weight_is_excluded(const mixp_weights_desc *desc, const char *name) {
    size_t n = desc->prefix ? strlen(desc->prefix) : 0;
    return strncmp(name, desc->prefix ? desc->prefix : "", n) != 0 ||
           !mixpi_is_chosen(desc, name + n);
}

/* If a name in the file is one of the program's names with a prefix, suggests that prefix. */
static void mixpi_prefix_hint(mixpi_diff *d, const mixpi_state *s, const char *name) {
    size_t i, length = strlen(name);
    for (i = 0; i < s->n_items && !*d->hint; i++) {
        size_t n = strlen(s->items[i].e.name);
        int ends = length > n && n && strcmp(name + length - n, s->items[i].e.name) == 0;
        if (ends && name[length - n - 1] == '.')
            snprintf(d->hint, sizeof d->hint,
                "; names in the file begin with '%.*s': set .prefix of mixp_weights_desc to this "
                "text",
                (int)mixpi_min(32, (int64_t)(length - n)), name);
    }
}

/* Pairs two lists that are sorted by name. Only the paired tensors of the file stay wanted. */
static void mixpi_weights_match(
    const mixpi_state *s, mixp_safetensors *file, const mixp_weights_desc *desc) {
    int has_state = mixp_safetensors_metadata(file, "mixprec") != NULL;
    size_t i = 0, k = 0;
    mixpi_diff diff = MIXPI_ZERO;

    /* Both lists are sorted by name: they are merged. */
    while (i < s->n_items || k < file->n_items) {
        mixpi_state_item *here = i < s->n_items ? &s->items[i] : NULL;
        mixpi_st_item *there = k < file->n_items ? &file->items[k] : NULL;
        int order = mixpi_merge_order(here ? &here->e : NULL, there ? &there->e : NULL);
        if (order < 0 && !desc->allow_missing)
            mixpi_diff_note(&diff, MIXP_ERR_SHAPE, here->e.name, "missing");
        else if (order == 0) mixpi_weights_pair(&diff, here, there, desc->convert);
        else if (order > 0) {
            int state = (has_state && mixpi_is_state_name(there->e.name)) ||
                        mixpi_weight_is_excluded(desc, there->e.name);
            there->wanted = 0;
            if (!state && !desc->allow_extra)
                mixpi_diff_note(&diff, MIXP_ERR_SHAPE, there->e.name, "in the file only");
            if (!state && !desc->prefix) mixpi_prefix_hint(&diff, s, there->e.name);
        }
        i += order <= 0;
        k += order >= 0;
    }

    mixpi_diff_tell(&diff, s->report);
}

static int mixpi_is_converted(const mixpi_state_item *item) {
    return item->from && item->from->e.dtype != item->e.dtype;
}

/* Prepares each weight's data in the weight's own dtype. Returns the memory of the converted data,
 * which the caller releases. */
static void *mixpi_weights_convert(mixpi_state *s) {
    const uint64_t mask = MIXPI_ST_ALIGN - 1;
    uint64_t total = mask;
    char *at;
    for (size_t i = 0; i < s->n_items; i++)
        if (mixpi_is_converted(&s->items[i])) total += (s->items[i].e.bytes + mask) & ~mask;

    /* One piece of memory holds all that is converted. */
    char *memory = at = (char *)mixpi_st_allocate(s->report, s->ctx, total, 1);
    if (!memory) return NULL;
    at += (MIXPI_ST_ALIGN - (uintptr_t)at % MIXPI_ST_ALIGN) % MIXPI_ST_ALIGN;

    for (size_t i = 0; i < s->n_items; i++) {
        mixpi_state_item *item = &s->items[i];
        int64_t count = (int64_t)(item->e.bytes / mixp_dtype_size(item->e.dtype));
        if (item->from) item->e.data = item->from->e.data;
        if (!mixpi_is_converted(item)) continue;
        if (mixp_convert(at, item->e.dtype, item->from->e.data, item->from->e.dtype, count))
            mixpi_report_fail(
                s->report, MIXP_ERR_DTYPE, "'%.60s' cannot be converted", item->e.name);
        item->e.data = at;
        at += (item->e.bytes + mask) & ~mask;
    }
    return memory;
}

/* Uploads the loaded weights. The other weights stay untouched, because their masters are more
 * precise than they are. */
static void mixpi_weights_apply(mixpi_state *s) {
    mixp_result r = MIXP_OK;
    mixpi_window_new(s->ctx, MIXPI_OUTSIDE);
    for (size_t i = 0; r == MIXP_OK && i < s->n_items; i++) {
        const mixpi_state_item *item = &s->items[i];
        if (!item->from) continue;
        r = mixpi_upload(s->ctx, item->memory, item->e.data, item->e.bytes);
        mixpi_note_load(item->weight, "mixp_checkpoint_load_weights");
    }
    if (r != MIXP_OK)
        mixpi_report_fail(
            s->report, r, "the device failed; the weights are partly overwritten; load them again");
}

static void mixpi_weights_tell(
    const mixpi_state *s, const mixp_safetensors *file, const mixp_weights_desc *desc) {
    int has_state = mixp_safetensors_metadata(file, "mixprec") != NULL;
    for (size_t i = 0; i < s->n_items; i++) {
        const mixpi_state_item *item = &s->items[i];
        mixp_weight_fate fate = !item->from                ? MIXP_WEIGHT_MISSING
                                : mixpi_is_converted(item) ? MIXP_WEIGHT_CONVERTED
                                                           : MIXP_WEIGHT_LOADED;
        desc->tell(desc->user, item->e.name, fate);
    }
    for (size_t i = 0; i < file->n_items; i++) {
        const mixpi_st_item *item = &file->items[i];
        if (!item->wanted && !(has_state && mixpi_is_state_name(item->e.name)) &&
            !mixpi_weight_is_excluded(desc, item->e.name))
            desc->tell(desc->user, item->e.name, MIXP_WEIGHT_EXTRA);
    }
}

/* Works as for a checkpoint: reads the header, then the data, and only then changes the weights. */
static void mixpi_weights_read(
    mixpi_state *s, mixp_safetensors *file, mixpi_file *f, const mixp_weights_desc *desc) {
    mixpi_report *r = s->report;
    if (mixpi_st_read_header(file, f) != MIXP_OK) return;
    mixpi_st_sort(r, file->items, file->n_items, MIXP_ERR_FORMAT);
    mixpi_weights_match(s, file, desc);
    if (r->result != MIXP_OK || mixpi_st_read_data(file, f) != MIXP_OK) return;
    void *converted = mixpi_weights_convert(s);
    if (r->result == MIXP_OK) mixpi_weights_apply(s);
    if (r->result == MIXP_OK) mixpi_warn_of_weights(s, file, "mixp_checkpoint_load_weights");
    mixpi_st_free(s->ctx, converted);
    if (r->result == MIXP_OK && desc->tell) mixpi_weights_tell(s, file, desc);
}

/* Lists the weights that desc selects. */
static void mixpi_weights_choose(
    mixpi_state *s, mixpi_report *r, mixp_context *ctx, const mixp_weights_desc *desc) {
    memset(s, 0, sizeof *s);
    mixpi_state_list(s, r, ctx, NULL, desc);
    if (!s->n_items && desc && desc->pattern)
        mixpi_report_fail(r, MIXP_ERR_ARGUMENT, "no parameter's name fits '%.60s'", desc->pattern);
}

/* Are the arguments valid, and is the context ready? */
static mixp_result mixpi_weights_check(const char *path, mixp_context *ctx, const char *who) {
    if (!ctx) return MIXP_ERR_ARGUMENT;
    if (!path) return mixp_context_fail(ctx, MIXP_ERR_ARGUMENT, "%s: path is NULL", who);
    mixp_result r = mixpi_check_names(ctx, who);
    if (r != MIXP_OK || !ctx->device->wait) return r;
    return mixpi_note_failure(ctx, who, ctx->device->wait(&ctx->exec));
}

MIXPI_SELDOM
static mixp_result mixpi_do_checkpoint_load_weights(
    const char *path, mixp_context *ctx, const mixp_weights_desc *desc) {
    static const char *const who = "mixp_checkpoint_load_weights";
    char error[480];
    mixpi_state state;
    mixpi_file f;
    mixp_result result = mixpi_weights_check(path, ctx, who);
    if (result != MIXP_OK) return result;

    mixp_weights_desc strict = MIXPI_ZERO;
    mixp_safetensors file = MIXPI_ZERO;
    file.ctx = ctx;
    mixpi_report r = mixpi_report_begin(path, error, sizeof error);
    mixpi_weights_choose(&state, &r, ctx, desc);
    if (mixpi_file_open(&f, &r) == MIXP_OK)
        mixpi_weights_read(&state, &file, &f, desc ? desc : &strict);

    /* After success or failure, releases everything. */
    mixpi_file_close(&f);
    mixpi_st_clear(&file);
    mixpi_state_free(&state);
    if (r.result == MIXP_OK) return MIXP_OK;
    return mixp_context_fail(ctx, r.result, "%s: %s", who, error);
}

MIXPREC_API mixp_result mixp_checkpoint_load_weights(
    const char *path, mixp_context *ctx, const mixp_weights_desc *desc) {
    MIXPI_RETURN_INSIDE(ctx, mixpi_do_checkpoint_load_weights(path, ctx, desc));
}

static mixp_result mixpi_do_checkpoint_save_weights(
    const char *path, mixp_context *ctx, const mixp_weights_desc *desc) {
    static const char *const who = "mixp_checkpoint_save_weights";
    static const char *const metadata[1][2] = { { "format", "pt" } };
    char error[MIXP_MESSAGE_SIZE];
    mixpi_state state;
    mixp_result result = mixpi_weights_check(path, ctx, who);
    if (result != MIXP_OK) return result;

    /* List what is saved, by the description. */
    int busy = mixpi_crew_set_busy(ctx, 1); /* other ranks may have to wait for a slow disk */
    mixpi_report r = mixpi_report_begin(path, error, sizeof error);
    mixpi_weights_choose(&state, &r, ctx, desc);

    /* A file of these tensors. */
    mixpi_plan plan = MIXPI_ZERO;
    plan.metadata = metadata;
    plan.n_metadata = 1;
    mixpi_state_plan(&state, &plan);
    mixpi_plan_save(&r, &plan);

    mixpi_state_free(&state);
    mixpi_crew_set_busy(ctx, busy);
    if (r.result == MIXP_OK) return MIXP_OK;
    return mixp_context_fail(ctx, r.result, "%s: %s", who, error);
}

MIXPREC_API mixp_result mixp_checkpoint_save_weights_of(
    const char *path, mixp_context *ctx, const mixp_weights_desc *desc) {
    MIXPI_RETURN_INSIDE(ctx, mixpi_do_checkpoint_save_weights(path, ctx, desc));
}

MIXPREC_API mixp_result mixp_checkpoint_save_weights(const char *path, mixp_context *ctx) {
    return mixp_checkpoint_save_weights_of(path, ctx, NULL);
}
