#pragma once
#include "reader.c"
#include "list.c"
/* --- checkpoints: a resume in which parameters were added or removed -------------------------- */

/* Of a parameter's state, "optimizer.3.m.w": the parameter's name, and the length of its prefix,
 * "optimizer.3.". NULL: another name. */
static const char *mixpi_name_of_row(const char *name, size_t *prefix) {
    static const char *const kinds[] = { "m.", "v.", "m_scale.", "v_scale.", "master.", "max_v.",
        "mean.", "ema.", "missed." };
    if (strncmp(name, "optimizer.", 10) != 0) return NULL;
    *prefix = 10 + strspn(name + 10, "0123456789");
    if (name[(*prefix)++] != '.') return NULL;
    for (size_t k = 0; k < MIXPI_LENGTH(kinds); k++)
        if (strncmp(name + *prefix, kinds[k], strlen(kinds[k])) == 0)
            return name + *prefix + strlen(kinds[k]);
    return NULL;
}

/* Is `candidate` the count of missed steps of the parameter whose state is `name`? Each parameter
 * that an optimizer trains has one. */
static int mixpi_is_missed_of(
    const char *candidate, const char *name, size_t prefix, const char *param) {
    return strncmp(candidate, name, prefix) == 0 &&
           strncmp(candidate + prefix, "missed.", 7) == 0 &&
           strcmp(candidate + prefix + 7, param) == 0;
}

/* Is the item, which the file lacks, of a parameter that the program has added? It keeps its value,
 * because the file has nothing of the parameter. */
static int mixpi_item_is_added(const mixpi_state_item *item, const mixp_safetensors *file) {
    size_t prefix;
    const char *param = mixpi_name_of_row(item->e.name, &prefix);
    if (!param) return item->weight != NULL;
    for (size_t k = 0; k < file->n_items; k++)
        if (mixpi_is_missed_of(file->items[k].e.name, item->e.name, prefix, param)) return 0;
    return 1;
}

static int mixpi_has_weight(const mixpi_state *s, const char *name) {
    for (size_t i = 0; i < s->n_items; i++)
        if (s->items[i].weight && strcmp(s->items[i].e.name, name) == 0) return 1;
    return 0;
}

/* Is a tensor, which only the file has, of a parameter that the program has removed? */
static int mixpi_name_is_removed(const char *name, const mixpi_state *s) {
    static const char *const reserved[] = { "optimizer.", "scaler.", "mixprec.", "value." };
    static const char *const recipes[] = { "mixprec.recipe.scales.",
        "mixprec.recipe.amax_history." };
    size_t prefix;
    const char *param = mixpi_name_of_row(name, &prefix);
    for (size_t i = 0; param && i < s->n_items; i++)
        if (mixpi_is_missed_of(s->items[i].e.name, name, prefix, param)) return 0;
    for (size_t k = 0; !param && k < MIXPI_LENGTH(recipes); k++) {
        const size_t n = strlen(recipes[k]);
        if (strncmp(name, recipes[k], n) == 0) return !mixpi_has_weight(s, name + n);
    }
    for (size_t k = 0; !param && k < MIXPI_LENGTH(reserved); k++)
        if (strncmp(name, reserved[k], strlen(reserved[k])) == 0) return 0;
    return 1;
}

/* Keeps what an added parameter has. Its bias correction begins with its first step: it has missed
 * all steps of the file. */
static mixp_result mixpi_item_keep(const mixpi_state *s, const mixpi_state_item *item) {
    if (!item->limit) return MIXP_OK;
    for (size_t i = 0; i < s->n_items; i++)
        if (s->items[i].memory == item->limit && s->items[i].on_device)
            return mixpi_upload(s->ctx, item->memory, s->items[i].e.data, item->e.bytes);
    return MIXP_OK;
}

/* Reports to the program the result for each weight and each state of a parameter. */
static void mixpi_partial_tell(
    const mixpi_state *s, const mixp_safetensors *file, const mixp_checkpoint *what) {
    size_t prefix;
    if (!what->partial || !what->tell) return;
    for (size_t i = 0; i < s->n_items; i++) {
        const mixpi_state_item *item = &s->items[i];
        if (!item->weight && !mixpi_name_of_row(item->e.name, &prefix)) continue;
        what->tell(
            what->user, item->e.name, item->absent ? MIXP_WEIGHT_MISSING : MIXP_WEIGHT_LOADED);
    }
    for (size_t k = 0; k < file->n_items; k++)
        if (!file->items[k].wanted && mixpi_name_is_removed(file->items[k].e.name, s))
            what->tell(what->user, file->items[k].e.name, MIXP_WEIGHT_EXTRA);
}
