#pragma once
#include "list.c"
/* --- checkpoints: which parameters a group has ------------------------------------------------ *
 *
 * A group of an optimizer is known by its parameters, because programs make groups in any order. A
 * checkpoint lists them in its metadata, for each optimizer with several groups: "0 1 4 wte.;" says
 * that parameter "wte.", a name of 4 bytes, is in group 1 of optimizer 0. The length comes first,
 * because a name may hold any character.
 */
static const char mixpi_groups_key[] = "mixprec.groups";

/* One record of the text. */
typedef struct mixpi_member {
    int         optimizer, group;
    const char *name;           /* not terminated                                          */
    size_t      length;
} mixpi_member;

/* Reads one number of at most 9 digits and the space behind it. Returns the rest, or NULL. */
static const char *mixpi_member_number(const char *at, size_t *number) {
    size_t n = 0;
    const char *first = at;
    for (; *at >= '0' && *at <= '9' && n < (size_t)1 << 24; at++) n = 10 * n + (size_t)(*at - '0');
    *number = n;
    return at > first && *at == ' ' ? at + 1 : NULL;
}

/* Reads the record at `at`. Returns the rest; NULL: the text ends, or is not a record. */
static const char *mixpi_member_next(const char *at, mixpi_member *m) {
    size_t optimizer, group = 0;
    if (at) at = mixpi_member_number(at, &optimizer);
    if (at) at = mixpi_member_number(at, &group);
    if (at) at = mixpi_member_number(at, &m->length);
    if (!at || memchr(at, '\0', m->length) || at[m->length] != ';') return NULL;
    m->optimizer = (int)optimizer;
    m->group = (int)group;
    m->name = at;
    return at + m->length + 1;
}

/* The records of all optimizers with several groups. The caller releases the text. NULL after an
 * error. */
static char *mixpi_checkpoint_groups(const mixp_checkpoint *what, mixpi_report *r) {
    size_t size = 1;
    char *to;
    for (int o = 0; o < what->n_optimizers; o++)
        for (int64_t i = 0; i < what->optimizers[o]->count; i++)
            size += strlen(what->optimizers[o]->slot[i].param->name) + 64;
    char *text = to = (char *)mixpi_st_allocate(r, what->ctx, size, 1);
    if (!text) return NULL;
    *to = '\0';
    for (int o = 0; o < what->n_optimizers; o++) {
        const mixp_optimizer *opt = what->optimizers[o];
        for (int64_t i = 0; opt->plan.n_groups > 1 && i < opt->count; i++) {
            const char *name = opt->slot[i].param->name;
            to += snprintf(to, size - (size_t)(to - text), "%d %d %.0f %s;", o, opt->rows[i].group,
                (double)strlen(name), name);
        }
    }
    return text;
}

/* Finds the record of `like`'s optimizer and parameter. *cursor: where to begin, because both texts
 * mostly have one order. */
static int mixpi_member_find(
    const char *text, const char **cursor, const mixpi_member *like, mixpi_member *found) {
    const char *from = *cursor, *at = from;
    int wrapped = 0;
    for (;;) {
        const char *next = mixpi_member_next(at, found);
        if (!next && wrapped++) return 0;
        at = next ? next : text;
        if (!next) continue;
        if (found->optimizer == like->optimizer && found->length == like->length &&
            memcmp(found->name, like->name, like->length) == 0) {
            *cursor = at;
            return 1;
        }
        if (wrapped && at > from) return 0;
    }
}

/* "a.w, b.w; c.w": the parameters of an optimizer's groups, as many as there is room for. */
static void mixpi_groups_show(const char *text, int optimizer, char *to, size_t room) {
    int group, most = 0;
    size_t used = 0;
    *to = '\0';
    for (group = 0; group <= most && used < room; group++) {
        const char *at = text, *gap = group ? "; " : "";
        mixpi_member m;
        while ((at = mixpi_member_next(at, &m)) != NULL) {
            if (m.optimizer != optimizer) continue;
            if (m.group > most && m.group < MIXP_MAX_GROUPS) most = m.group;
            if (m.group != group || used >= room) continue;
            used += (size_t)snprintf(to + used, room - used, "%s%.*s", gap, (int)m.length, m.name);
            gap = ", ";
        }
    }
    if (used >= room) memcpy(to + room - 4, "...", 4);
    if (!used) snprintf(to, room, "one group, or groups without a list");
}

/* How many groups does optimizer `number` of the file have? */
static int mixpi_groups_of_file(const mixp_safetensors *file, int number) {
    char name[64];
    int n = 0;
    do snprintf(name, sizeof name, "optimizer.%d.group.%d.lr", number, n++);
    while (n <= MIXP_MAX_GROUPS && mixp_safetensors_find(file, name));
    return n - 1;
}

static void mixpi_groups_refuse(
    mixpi_report *r, int optimizer, const char *there, const char *here) {
    char theirs[120], ours[120];
    mixpi_groups_show(there, optimizer, theirs, sizeof theirs);
    mixpi_groups_show(here, optimizer, ours, sizeof ours);
    mixpi_report_fail(r, MIXP_ERR_SHAPE,
        "optimizer %d has other groups: the file has '%s', the program '%s'; put the same "
        "parameters together, or load only the weights with mixp_checkpoint_load_weights",
        optimizer, theirs, ours);
}

/* Finds the file's group of each group of the program. map: MIXP_MAX_GROUPS numbers for each
 * optimizer, -1 at first. Returns the number of an optimizer whose groups differ, or -1. */
static int mixpi_groups_match(const char *here, const char *there, int *map) {
    const char *at = here, *cursor = there;
    mixpi_member m, other;
    while ((at = mixpi_member_next(at, &m)) != NULL) {
        int *group = map + m.optimizer * MIXP_MAX_GROUPS, g;
        if (!mixpi_member_find(there, &cursor, &m, &other)) continue;
        if (other.group >= MIXP_MAX_GROUPS) return m.optimizer;
        for (g = 0; g < MIXP_MAX_GROUPS; g++)
            if ((g == m.group) ? group[g] >= 0 && group[g] != other.group : group[g] == other.group)
                return m.optimizer;
        group[m.group] = other.group;
    }
    return -1;
}

/* Assigns the remaining numbers to groups without a parameter, in their order. */
static void mixpi_groups_fill(int *group) {
    int taken[MIXP_MAX_GROUPS] = { 0 }, g, next = 0;
    for (g = 0; g < MIXP_MAX_GROUPS; g++)
        if (group[g] >= 0) taken[group[g]] = 1;
    for (g = 0; g < MIXP_MAX_GROUPS; g++) {
        if (group[g] >= 0) continue;
        while (taken[next]) next++;
        group[g] = next++;
    }
}

/* The file's number of each group of each optimizer of the program. Fails if a group has other
 * parameters in the file. The groups of a file without the records, of an early version, are
 * matched by number. The caller releases the numbers. */
static int *mixpi_groups_meet(
    mixpi_report *r, const mixp_safetensors *file, const mixp_checkpoint *what) {
    const char *there = mixp_safetensors_metadata(file, mixpi_groups_key);
    const int numbers = what->n_optimizers * MIXP_MAX_GROUPS;
    int *map = (int *)mixpi_st_allocate(r, what->ctx, (uint64_t)numbers, sizeof *map);
    char *here = mixpi_checkpoint_groups(what, r);
    int o, bad = -1;
    for (o = 0; map && o < numbers; o++) map[o] = -1;
    if (map && here && there) bad = mixpi_groups_match(here, there, map);
    for (o = 0; map && here && bad < 0 && o < what->n_optimizers; o++) {
        const int n = mixpi_groups_of_file(file, o);
        if (n && n != what->optimizers[o]->plan.n_groups) bad = o;
        mixpi_groups_fill(map + o * MIXP_MAX_GROUPS);
    }
    if (bad >= 0) mixpi_groups_refuse(r, bad, there ? there : "", here);
    mixpi_st_free(what->ctx, here);
    return map;
}
