/* test_groups.c - an optimizer's groups in a checkpoint are known by their parameters; SECURITY.md lists
 * every entry that a save writes.
 * SPDX-License-Identifier: MIT OR Unlicense */
#include "mixprec.h"
#include "test.h"
#include <unistd.h>

enum { PARAMS = 4, ELEMENTS = 4096 };
static const char *const names[PARAMS] = { "wte.weight", "h; 0 1 2 x", "a", "head 1;0" };
static char path[64];

typedef struct net {
    mixp_context   *ctx;
    mixp_tensor    *p[PARAMS];
    mixp_optimizer *opt;
} net;

/* A description of groups: the digit of parameter i is its group; groups without a parameter are
 * counted, too. The lr of a group is 1 / (2 + the number of its first parameter), or as `shift` says. */
static void net_open(net *n, const char *groups, int count, mixp_moment_kind states, double shift) {
    static const int64_t shape[2] = { 64, 64 };
    mixp_optimizer_desc d = mixp_adamw_defaults();
    memset(n, 0, sizeof *n);
    d.states.m = d.states.v = states;
    n->ctx = mixp_context_new(NULL);
    for (int i = 0; i < PARAMS; i++) n->p[i] = mixp_param(n->ctx, names[i], MIXP_F32, 2, shape);
    for (int i = 0; i < PARAMS; i++) mixp_init_normal(n->p[i], 0.0, 1.0);
    n->opt = mixp_optimizer_new(n->ctx, &d);
    for (int g = 0; g < count; g++) {
        mixp_param_group group;
        const char *first = strchr(groups, '0' + g);
        mixp_optimizer_group(n->opt, 0, &group);
        group.lr = first ? 1.0 / (2.0 + (double)(first - groups)) + shift : 0.25 + shift;
        group.weight_decay = group.lr / 8.0;
        if (g) CHECK_INT(mixp_optimizer_add_group(n->opt, &group), g);
        else CHECK_INT(mixp_optimizer_set_group(n->opt, 0, &group), MIXP_OK);
        for (int i = 0; i < PARAMS; i++)
            if (groups[i] == '0' + g) CHECK_INT(mixp_optimizer_add(n->opt, n->p[i], NULL), MIXP_OK);
    }
}

static int only_trained;

static mixp_result net_file(net *n, int save) {
    mixp_checkpoint what;
    memset(&what, 0, sizeof what);
    what.only_trained = only_trained;
    what.ctx = n->ctx;
    what.optimizers = &n->opt;
    what.n_optimizers = 1;
    return save ? mixp_checkpoint_save(path, &what) : mixp_checkpoint_load(path, &what);
}

static void net_step(net *n) {
    mixp_tensor *loss = NULL;
    mixp_step_begin(n->ctx);
    mixp_zero_grad(n->opt);
    for (int i = 0; i < PARAMS; i++) {
        mixp_tensor *part = mixp_mean(n->ctx, mixp_square(n->ctx, n->p[i]), MIXP_ALL, 0);
        loss = loss ? mixp_add(n->ctx, loss, part) : part;
    }
    CHECK_INT(mixp_backward(n->ctx, loss), MIXP_OK);
    CHECK_INT(mixp_optimizer_step(n->opt), MIXP_OK);
}

/* The lr of the group that has parameter i. */
static double lr_of(const net *n, const char *groups, int i) {
    mixp_param_group g;
    CHECK_INT(mixp_optimizer_group(n->opt, groups[i] - '0', &g), MIXP_OK);
    return g.lr;
}

typedef struct pair { const char *saved; int n_saved; const char *loaded; int n_loaded; } pair;

/* Each parameter has its own group's settings again, and training goes on with the same bits. */
static void test_groups_in_another_order(void) {
    static const pair pairs[] = {
        { "0101", 2, "0101", 2 }, { "0101", 2, "1010", 2 }, { "0123", 4, "3120", 4 }, { "0122", 3, "2011", 3 },
        { "1122", 3, "2211", 3 }, { "1122", 3, "0011", 3 }, { "0011", 3, "2200", 3 }, { "0000", 1, "0000", 1 },
    };
    static const mixp_moment_kind states[2] = { MIXP_MOMENT_F32, MIXP_MOMENT_8BIT };
    for (size_t k = 0; k < sizeof pairs / sizeof pairs[0]; k++)
        for (int s = 0; s < 2; s++) {
            static float a[ELEMENTS], b[ELEMENTS];
            net from, to;
            net_open(&from, pairs[k].saved, pairs[k].n_saved, states[s], 0.0);
            net_step(&from);
            CHECK_INT(net_file(&from, 1), MIXP_OK);
            net_open(&to, pairs[k].loaded, pairs[k].n_loaded, states[s], 0.125);
            CHECK_INT(net_file(&to, 0), MIXP_OK);
            for (int i = 0; i < PARAMS; i++)
                CHECK_NEAR(lr_of(&to, pairs[k].loaded, i), lr_of(&from, pairs[k].saved, i), 0);
            for (int i = 0; i < 3; i++) {
                net_step(&from);
                net_step(&to);
            }
            for (int i = 0; i < PARAMS; i++) {
                mixp_read(from.p[i], a, MIXP_F32, ELEMENTS);
                mixp_read(to.p[i], b, MIXP_F32, ELEMENTS);
                CHECK(memcmp(a, b, sizeof a) == 0);
            }
            mixp_context_free(from.ctx);
            mixp_context_free(to.ctx);
        }
}

/* Settings of a group with other parameters are refused with both lists, and nothing has changed. */
static void test_other_groups(void) {
    static const struct { pair p; const char *theirs, *ours; } cases[] = {
        { { "0011", 2, "0111", 2 }, "'wte.weight, h; 0 1 2 x; a, head 1;0'", "'wte.weight; h; 0 1 2 x, a, head 1;0'" },
        { { "0011", 2, "0101", 2 }, "'wte.weight, h; 0 1 2 x; a, head 1;0'", "'wte.weight, a; h; 0 1 2 x, head 1;0'" },
        { { "0011", 2, "0012", 3 }, "'wte.weight, h; 0 1 2 x; a, head 1;0'", "'wte.weight, h; 0 1 2 x; a; head 1;0'" },
        { { "0012", 3, "0011", 2 }, "'wte.weight, h; 0 1 2 x; a; head 1;0'", "'wte.weight, h; 0 1 2 x; a, head 1;0'" },
        { { "0000", 1, "0001", 2 }, "'one group, or groups without a list'", "'wte.weight, h; 0 1 2 x, a; head 1;0'" },
        { { "0001", 2, "0000", 1 }, "'wte.weight, h; 0 1 2 x, a; head 1;0'", "'one group, or groups without a list'" },
        { { "0022", 3, "0012", 3 }, "'wte.weight, h; 0 1 2 x; a, head 1;0'", "'wte.weight, h; 0 1 2 x; a; head 1;0'" },
    };
    for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
        const pair *p = &cases[k].p;
        const char *why = "";
        static float a[ELEMENTS], b[ELEMENTS];
        net from, to;
        net_open(&from, p->saved, p->n_saved, MIXP_MOMENT_F32, 0.0);
        net_step(&from);
        CHECK_INT(net_file(&from, 1), MIXP_OK);
        net_open(&to, p->loaded, p->n_loaded, MIXP_MOMENT_F32, 0.125);
        mixp_read(to.p[0], a, MIXP_F32, ELEMENTS);
        CHECK_INT(net_file(&to, 0), MIXP_ERR_SHAPE);
        CHECK_INT(mixp_context_error(to.ctx, &why), MIXP_ERR_SHAPE);
        CHECK_TEXT(why, "optimizer 0 has other groups");
        CHECK_TEXT(why, cases[k].theirs);
        CHECK_TEXT(why, cases[k].ours);
        mixp_read(to.p[0], b, MIXP_F32, ELEMENTS);
        CHECK(memcmp(a, b, sizeof a) == 0);
        for (int i = 0; i < PARAMS; i++) {
            const char *first = strchr(p->loaded, p->loaded[i]);
            CHECK_NEAR(lr_of(&to, p->loaded, i), 1.0 / (2.0 + (double)(first - p->loaded)) + 0.125, 0);
        }
        mixp_context_free(from.ctx);
        mixp_context_free(to.ctx);
    }
}

/* Replaces a text in the file by another one of the same length. */
static void patch(const char *old, const char *new_text) {
    static char bytes[1 << 20];
    FILE *f = fopen(path, "rb");
    size_t n, i, length = strlen(old);
    int found = 0;
    CHECK(f != NULL && strlen(new_text) == length);
    if (!f) return;
    n = fread(bytes, 1, sizeof bytes, f);
    fclose(f);
    for (i = 0; i + length <= n; i++)
        if (memcmp(bytes + i, old, length) == 0) {
            memcpy(bytes + i, new_text, length);
            found = 1;
        }
    CHECK(found);
    f = fopen(path, "wb");
    CHECK(f && fwrite(bytes, 1, n, f) == n);
    if (f) fclose(f);
}

/* A file of a version that did not record the members is taken by number; damaged records lead nowhere. */
static void test_files_without_records(void) {
    static const char *const bad[][2] = {
        { "0 1 1 a;", "0 9 1 a;" }, { "0 1 1 a;", "0 1 9 a;" }, { "0 1 1 a;", "0 1 1 aa" }, { "0 1 1 a;", "x 1 1 a;" },
        { "0 1 1 a;", "7 1 1 a;" }, { "0 1 1 a;", "0 1 0 a;" }, { "0 1 1 a;", "99999999" }, { "0 1 1 a;", "0 -1 1 a" },
    };
    net from, to;
    net_open(&from, "0011", 2, MIXP_MOMENT_F32, 0.0);
    CHECK_INT(net_file(&from, 1), MIXP_OK);
    patch("mixprec.groups", "mixprec.unread");
    net_open(&to, "1100", 2, MIXP_MOMENT_F32, 0.125);
    CHECK_INT(net_file(&to, 0), MIXP_OK);
    CHECK_NEAR(lr_of(&to, "1100", 2), lr_of(&from, "0011", 0), 0);     /* by number */
    for (size_t k = 0; k < sizeof bad / sizeof bad[0]; k++) {
        CHECK_INT(net_file(&from, 1), MIXP_OK);
        patch(bad[k][0], bad[k][1]);
        mixp_context_clear_error(to.ctx);
        mixp_result r = net_file(&to, 0);
        CHECK(r == MIXP_OK || r == MIXP_ERR_SHAPE);
    }
    mixp_context_free(from.ctx);
    mixp_context_free(to.ctx);
}

/* --- the table of SECURITY.md ------------------------------------------------------------------- */

enum { ENTRIES = 256, LONGEST = 96 };
typedef struct list { char text[ENTRIES][LONGEST]; int n, used[ENTRIES]; } list;

static int list_find(const list *l, const char *text) {
    int i;
    for (i = 0; i < l->n && strcmp(l->text[i], text) != 0; i++) {}
    return i < l->n ? i : -1;
}

static void list_add(list *l, const char *text) {
    if (list_find(l, text) >= 0 || l->n == ENTRIES) return;
    snprintf(l->text[l->n++], LONGEST, "%s", text);
}

/* The names of the table's first column. `.x.y` stands for the name before it with other last parts. */
static void table_read(list *l) {
    static char line[4096];
    FILE *f = fopen("SECURITY.md", "r");
    int inside = 0;
    CHECK(f != NULL);
    while (f && fgets(line, sizeof line, f)) {
        char *cell = line + 2, *end = strstr(cell, " | "), *at, last[LONGEST] = "";
        if (strncmp(line, "| entry |", 9) == 0) inside = 1;
        else if (inside && line[0] != '|') inside = 0;
        if (!inside || line[2] == '-' || !end) continue;
        *end = 0;
        for (at = strchr(cell, '`'); at; at = strchr(at + 1, '`')) {
            char name[LONGEST], *close = strchr(at + 1, '`'), *dot;
            if (!close) break;
            snprintf(name, sizeof name, "%.*s", (int)(close - at - 1), at + 1);
            if (name[0] == '.') {
                char whole[LONGEST];
                for (const char *p = name; *p; p++)
                    if (*p == '.' && (dot = strrchr(last, '.')) != NULL) *dot = 0;
                snprintf(whole, sizeof whole, "%.46s%.46s", last, name);
                snprintf(name, sizeof name, "%s", whole);
            }
            snprintf(last, sizeof last, "%s", name);
            list_add(l, name);
            at = close;
        }
    }
    if (f) fclose(f);
}

/* "optimizer.0.m.w" to "optimizer.N.m.NAME", and so on. */
static void entry_name(const char *name, char *to, size_t room) {
    static const char *const kinds[] = { "m", "v", "m_scale", "v_scale", "master", "ema", "missed", "max_v", "mean", NULL };
    char kind[32];
    int number, group, used = 0, i;
    if (sscanf(name, "optimizer.%d.group.%d.%n", &number, &group, &used) == 2 && used) {
        snprintf(to, room, "optimizer.N.group.G.%s", name + used);
        return;
    }
    used = 0;
    if (sscanf(name, "optimizer.%d.%31[a-z_].%n", &number, kind, &used) == 2 && used)
        for (i = 0; kinds[i]; i++)
            if (strcmp(kinds[i], kind) == 0) {
                snprintf(to, room, "optimizer.N.%s.NAME", kind);
                return;
            }
    used = 0;
    if (sscanf(name, "optimizer.%d.%n", &number, &used) == 1 && used) snprintf(to, room, "optimizer.N.%s", name + used);
    else if (strncmp(name, "mixprec.recipe.scales.", 22) == 0) snprintf(to, room, "mixprec.recipe.scales.NAME");
    else if (strncmp(name, "mixprec.recipe.amax_history.", 28) == 0) snprintf(to, room, "mixprec.recipe.amax_history.NAME");
    else if (strncmp(name, "value.", 6) == 0) snprintf(to, room, "value.NAME");
    else snprintf(to, room, "%s", name);
}

/* The kinds of optimizers come before the passes of Muon. */
enum { KINDS = MIXP_OPTIMIZER_MUON + 1, FLAGS = 4 };

static mixp_optimizer_desc (*const defaults[])(void) = {
    mixp_adam_defaults, mixp_adamw_defaults, mixp_sgd_defaults, mixp_rmsprop_defaults, mixp_adagrad_defaults,
    mixp_adamax_defaults, mixp_nadam_defaults, mixp_radam_defaults, mixp_lion_defaults, mixp_muon_defaults
};
typedef char one_for_each_kind[sizeof defaults / sizeof *defaults == KINDS ? 1 : -1];

/* A program that uses everything that a checkpoint can hold. */
static void save_everything(void) {
    static const int64_t shape[2] = { 128, 128 };
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_tensor *w = mixp_param(ctx, "w", MIXP_F32, 2, shape), *v = mixp_param(ctx, "v", MIXP_BF16, 2, shape);
    mixp_recipe recipe;
    mixp_optimizer_desc d = mixp_adamw_defaults();
    mixp_scaler_desc s;
    mixp_checkpoint_value value;
    mixp_checkpoint what;
    mixp_optimizer *opt[2 + KINDS * FLAGS];
    double number = 1.0;
    int kind, flags, n = 2;
    unsigned made = 0;
    memset(&recipe, 0, sizeof recipe);
    recipe.kind = MIXP_RECIPE_FP8_DELAYED;
    memset(&s, 0, sizeof s);
    memset(&value, 0, sizeof value);
    memset(&what, 0, sizeof what);
    mixp_init_normal(w, 0.0, 0.1);
    mixp_init_normal(v, 0.0, 0.1);
    s.rule = MIXP_RULE_PREDICTIVE;
    mixp_scaler *scaler = mixp_scaler_new(ctx, &s);
    d.spike.of = MIXP_SPIKE_NORM;
    opt[0] = mixp_optimizer_new(ctx, &d);
    mixp_optimizer_add(opt[0], w, NULL);
    CHECK_INT(mixp_optimizer_set_ema(opt[0], 0.99), MIXP_OK);
    d = mixp_adamw_defaults();
    d.states.m = d.states.v = MIXP_MOMENT_8BIT;
    d.states.master = MIXP_MASTER_16BIT;
    opt[1] = mixp_optimizer_new(ctx, &d);
    mixp_optimizer_add(opt[1], v, NULL);

    /* One optimizer of each kind, with each flag that it has. */
    for (kind = 0; kind < KINDS; kind++)
        for (flags = 0; flags < FLAGS; flags++) {
            d = defaults[kind]();
            CHECK_INT(d.kind, kind);
            if (kind == MIXP_OPTIMIZER_SGD) d.momentum = 0.9;
            d.amsgrad = flags & 1;
            d.centered = flags >> 1 & 1;
            opt[n] = mixp_optimizer_new(ctx, &d);
            mixp_context_clear_error(ctx);
            if (!opt[n]) continue;
            CHECK_INT(mixp_optimizer_add(opt[n], mixp_param_named(ctx, MIXP_F32, 2, shape, "p%d", n), NULL), MIXP_OK);
            made |= 1u << kind;
            n++;
        }
    CHECK_INT(made, (1u << KINDS) - 1);
    CHECK_INT(mixp_autocast_set_recipe(ctx, &recipe), MIXP_OK);
    CHECK_INT(mixp_guard_start(ctx, NULL), MIXP_OK);
    mixp_step_begin(ctx);
    MIXP_AUTOCAST(ctx, MIXP_BF16) {
        mixp_tensor *x = mixp_full(ctx, MIXP_F32, 2, shape, 0.5);
        x = mixp_linear(ctx, mixp_linear(ctx, x, w, NULL), v, NULL);
        mixp_backward(ctx, mixp_scaler_scale(scaler, mixp_mean(ctx, mixp_square(ctx, x), MIXP_ALL, 0)));
    }
    mixp_scaler_step(scaler, opt[0]);
    mixp_scaler_step(scaler, opt[1]);
    mixp_scaler_update(scaler);
    value.name = "loss";
    value.dtype = MIXP_F64;
    value.count = 1;
    value.data = &number;
    what.ctx = ctx;
    what.optimizers = opt;
    what.n_optimizers = n;
    what.scaler = scaler;
    what.values = &value;
    what.n_values = 1;
    CHECK_INT(mixp_checkpoint_save(path, &what), MIXP_OK);
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    mixp_context_free(ctx);
}

/* The metadata's keys, from the bytes of the file: each must be in the table. */
static void metadata_is_listed(list *table) {
    static char bytes[1 << 20];
    FILE *f = fopen(path, "rb");
    char *at, *end;
    int keys = 0;
    CHECK(f && fread(bytes, 1, sizeof bytes - 1, f) > 8);
    if (f) fclose(f);
    at = strstr(bytes + 8, "\"__metadata__\":{");
    for (at = at ? at + 16 : NULL; at && (end = strchr(at + 1, '"')) != NULL; keys++) {
        *end = 0;
        if (list_find(table, at + 1) < 0) { test_bad++; TEST_SHOW("SECURITY.md lacks `%s` of the metadata", at + 1); }
        at = strchr(end + 3, '"');      /* the end of the text */
        at = at && at[1] == ',' ? at + 2 : NULL;
    }
    CHECK(keys >= 2);
}

/* The table has every entry that a save writes, and no other. */
static void test_the_table_of_entries(void) {
    static list table;
    mixp_safetensors *file = NULL;
    char name[LONGEST];
    int k;
    table_read(&table);
    CHECK(table.n > 30);
    save_everything();
    metadata_is_listed(&table);
    CHECK_INT(mixp_safetensors_read(path, &file, NULL, 0), MIXP_OK);
    for (int64_t i = 0; i < mixp_safetensors_count(file); i++) {
        const char *own = mixp_safetensors_at(file, i)->name;
        if (strcmp(own, "w") == 0 || strcmp(own, "v") == 0 || (own[0] == 'p' && own[1] <= '9')) continue;
        entry_name(own, name, sizeof name);
        k = list_find(&table, name);
        if (k >= 0) table.used[k] = 1;
        else {
            test_bad++;
            TEST_SHOW("SECURITY.md lacks `%s`", name);
        }
    }
    for (k = 0; k < table.n; k++) {
        if (mixp_safetensors_metadata(file, table.text[k])) continue;
        if (table.used[k] || strcmp(table.text[k], "mixprec.groups") == 0) continue;
        if (strcmp(table.text[k], "mixprec.rank.R.NAME") == 0) continue;    /* tests/ranks/test_ranks_state.c */
        test_bad++;
        TEST_SHOW("no save writes `%s`, which SECURITY.md lists", table.text[k]);
    }
    mixp_safetensors_free(file);
}

/* only_trained: parameters without an optimizer are neither saved nor changed by a load, and training goes on with the
 * same bits. A file of the other kind is refused. */
static void test_only_trained(void) {
    enum { FROZEN = 2 };
    static float before[ELEMENTS], after[ELEMENTS];
    char         error[MIXP_MESSAGE_SIZE];
    mixp_safetensors *file = NULL;
    net n, m;
    net_open(&n, "00.0", 1, MIXP_MOMENT_F32, 0);
    net_open(&m, "00.0", 1, MIXP_MOMENT_F32, 0);
    mixp_tensor_set_requires_grad(n.p[FROZEN], 0);
    mixp_tensor_set_requires_grad(m.p[FROZEN], 0);
    mixp_fill(m.p[FROZEN], 7.0);
    net_step(&n);
    only_trained = 1;
    CHECK_INT(net_file(&n, 1), MIXP_OK);
    CHECK_INT(mixp_safetensors_read(path, &file, error, sizeof error), MIXP_OK);
    CHECK(!mixp_safetensors_find(file, names[FROZEN]) && mixp_safetensors_find(file, names[0]));
    mixp_safetensors_free(file);
    CHECK_INT(net_file(&m, 0), MIXP_OK);
    CHECK_INT(mixp_read(m.p[FROZEN], after, MIXP_F32, ELEMENTS), MIXP_OK);
    CHECK(after[0] == 7 && after[ELEMENTS - 1] == 7);
    mixp_copy(m.p[FROZEN], n.p[FROZEN]);
    net_step(&n);
    net_step(&m);
    for (int i = 0; i < PARAMS; i++) {
        CHECK_INT(mixp_read(n.p[i], before, MIXP_F32, ELEMENTS), MIXP_OK);
        CHECK_INT(mixp_read(m.p[i], after, MIXP_F32, ELEMENTS), MIXP_OK);
        if (i != FROZEN) CHECK(memcmp(before, after, sizeof before) == 0);
    }
    only_trained = 0;
    CHECK_INT(net_file(&m, 0), MIXP_ERR_SHAPE);     /* the file lacks the frozen one */
    mixp_context_free(m.ctx);
    net_open(&m, "00.0", 1, MIXP_MOMENT_F32, 0);
    CHECK_INT(net_file(&m, 1), MIXP_OK);
    only_trained = 1;
    CHECK_INT(net_file(&n, 0), MIXP_ERR_SHAPE);     /* the file has it */
    only_trained = 0;
    mixp_context_free(n.ctx);
    mixp_context_free(m.ctx);
}

int main(void) {
    snprintf(path, sizeof path, "/tmp/mixprec_groups_%ld.st", (long)getpid());
    RUN(test_groups_in_another_order);
    RUN(test_other_groups);
    RUN(test_files_without_records);
    RUN(test_the_table_of_entries);
    RUN(test_only_trained);
    remove(path);
    return test_report();
}
