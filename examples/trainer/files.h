/* files.h - configuration, kept checkpoints, first weights and exports of a run: a part of trainer.c
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#ifndef TRAINER_FILES_H
#define TRAINER_FILES_H

static void write_config(const trainer *t) {
    char   path[PATH_SPACE], value[1100], *text = (char *)malloc(1 << 16);
    size_t n = 0;
    if (!text) die(1, "out of memory");
    for (int i = 0; i < N_OPTIONS; i++) {
        const option *o = &options[i];
        if (!o->name || !is_of_experiment(i)) continue;
        option_text(&t->c, o, value, sizeof value);
        if (strcmp(o->name, "vocabulary") == 0) vocabulary_text(&t->data, value, sizeof value);
        n += (size_t)sprintf(text + n, "%s  \"%s\": \"", n ? ",\n" : "{\n", o->name);
        for (const char *p = value; *p; p++)
            if ((unsigned char)*p < 32 || strchr("\"\\", *p))
                n += (size_t)sprintf(text + n, "\\u%04x", (unsigned)*p);
            else text[n++] = *p;
        text[n++] = '"';
    }
    n += (size_t)sprintf(text + n, ",\n  \"ranks\": \"%lld\"\n}\n", (long long)ranks_of(t));
    in_folder(&t->c, "config.json", path);
    if (!replace_file(path, text, n)) die(1, "cannot write %s: %s", path, strerror(errno));
    free(text);
}

/* --- checkpoints that are kept --- */

static int by_size(const void *a, const void *b) {
    long long x, y;
    memcpy(&x, a, sizeof x);
    memcpy(&y, b, sizeof y);
    return (x > y) - (x < y);
}

/* The steps of the kept checkpoints up to this step, in order. *n: their number. The caller frees
 * the array. */
static long long *kept_steps(const trainer *t, size_t *n) {
    DIR           *folder = opendir(t->c.out);
    long long     *steps = NULL, step;
    struct dirent *file;
    char           name[40];
    *n = 0;
    while (folder && (file = readdir(folder)) != NULL) {
        long long *more;
        if (sscanf(file->d_name, "step-%12lld.", &step) != 1 || step > t->run.step) continue;
        snprintf(name, sizeof name, KEPT, step);
        if (strcmp(name, file->d_name) != 0) continue;
        more = (long long *)realloc(steps, (*n + 1) * sizeof *steps);
        if (!more) break;
        steps = more;
        steps[(*n)++] = step;
    }
    if (folder) closedir(folder);
    if (*n) qsort(steps, *n, sizeof *steps, by_size);
    return steps;
}

/* Gives the checkpoint a second name, which stays when the next checkpoint replaces the first name, or
 * copies it. Removes the oldest kept checkpoints. */
static void keep(trainer *t) {
    char       from[PATH_SPACE], to[PATH_SPACE], name[40];
    size_t     n;
    long long *steps;
    if (!t->c.keep || !t->c.out[0] || t->ranks.rank || t->run.save_failed) return;
    snprintf(name, sizeof name, KEPT, (long long)t->run.step);
    in_folder(&t->c, CHECKPOINT, from);
    if (in_folder(&t->c, name, to)) remove(to);
    if (link(from, to) != 0 && !copy_file(from, to)) {      /* some drives have no hard links */
        warn("%s is not kept: %s", to, strerror(errno));
        return;
    }
    steps = kept_steps(t, &n);
    for (size_t i = 0; i + (size_t)t->c.keep < n; i++) {
        snprintf(name, sizeof name, KEPT, steps[i]);
        in_folder(&t->c, name, to);
        remove(to);
    }
    free(steps);
}

/* A damaged checkpoint need not end a run. */
static void load_checkpoint(trainer *t) {
    char        best[PATH_SPACE];
    const char *why = "", *out = t->c.out, *file = checkpoint_name(&t->c);
    if (save_or_load(&t->run, file, 1) != MIXP_ERR_FORMAT) { check(t, "resuming"); return; }
    mixp_context_error(t->ctx, &why);
    if (strcmp(file, BEST) != 0 && in_folder(&t->c, BEST, best))
        die(1, "while resuming: %s. The best one lies beside it: add --from best, "
               "or copy %s to %s/" CHECKPOINT ", or start over with --overwrite", why, best, out);
    die(1, "while resuming: %s. Start over with --overwrite", why);
}

/* Loads weights of GPT-2, from `transformers` or nanoGPT. Returns 0 if the file is the trainer's. */
static int load_others(trainer *t) {
    gpt2_file file;
    if (read_description(t->c.init).is_ours) return 0;
    gpt2_open(&file, t->c.init);
    load_gpt2(&t->model, &file);
    gpt2_close(&file);
    return 1;
}

/* --init: loads weights of any floating-point dtype, by name. */
static void load_weights(trainer *t) {
    mixp_weights_desc desc = {.convert = 1};
    if (!load_others(t)) mixp_checkpoint_load_weights(t->c.init, t->ctx, &desc);
    check(t, "reading --init");
}

static void resume(trainer *t) {
    const config    *c = &t->c;
    mixp_param_group groups[2], matrices;
    for (int g = 0; g < 2; g++) mixp_optimizer_group(t->opt, g, &groups[g]);
    if (t->muon) mixp_optimizer_group(t->muon, 0, &matrices);
    t->run.locked_out = !lock_folder(&t->run, 0);     /* sampling from an active run is fine       */
    note_checkpoint(&t->run, &t->run.loaded);
    load_checkpoint(t);
    /* The checkpoint restored its learning rate; the options override it. */
    for (int g = 0; g < 2; g++) mixp_optimizer_set_group(t->opt, g, &groups[g]);
    if (t->muon) mixp_optimizer_set_group(t->muon, 0, &matrices);
    mixp_scaler_change(t->scaler, &(mixp_scaler_desc){
        .growth_interval = c->growth_interval == AUTO ? 0 : (int)c->growth_interval});
    check(t, "resuming");
}

/* Loads the checkpoint, or makes sure that no checkpoint is overwritten. Creates nothing. */
static void resume_or_begin(trainer *t) {
    const config *c = &t->c;
    char          path[PATH_SPACE];
    int           exists = c->out[0] && in_folder(c, checkpoint_name(c), path);
    if (exists && !c->resume) keep_checkpoint(&t->run);
    if (c->resume && !exists)
        die(1, "no checkpoint in %s%s%s: leave out --resume to begin a run", c->out,
            strcmp(c->from, "last") ? " of --from " : "", strcmp(c->from, "last") ? c->from : "");
    if (c->resume) show_work("loading", path, 0, 0);
    if (c->resume) resume(t);
    if (c->resume && !t->ranks.rank && *mixp_context_warning(t->ctx))
        warn("%s", mixp_context_warning(t->ctx));
    if (c->init[0]) show_work("loading", c->init, 0, 0);
    if (c->init[0]) load_weights(t);
}

/* Reads the data, if they are not loaded yet. A resumed run uses its own data. */
static void read_data(trainer *t) {
    const config *c = &t->c;
    if (t->data.count == 0) {
        find_default_data(t->c.data, sizeof t->c.data, t->program);
        read_corpus(&t->data, c);
    }
    if (t->run.data_hash && t->data.hash != t->run.data_hash)
        die(1, "%s is not the text that this run was trained on: name that one with --data%s",
            c->data, c->val_data[0] ? " and --val-data" : "");
    t->run.data_hash = t->data.hash;
}

static void metrics_header(const trainer *t, char *header, size_t space) {
    const config *c = &t->c;
    const char   *slash = strrchr(c->data, '/');
    char          title[600], precision[48];
    precision_text(c, precision, sizeof precision);
    snprintf(title, sizeof title, "GPT of %lld layers, width %lld, on %.400s, in %s",
             (long long)c->layers, (long long)c->width, slash ? slash + 1 : c->data, precision);
    report_header(header, space, title, t->device_name);
}

static void open_folder(trainer *t) {
    char header[HEADER_SPACE];
    if (!t->c.out[0] || !is_training(t)) return;        /* the run writes nothing */
    metrics_header(t, header, sizeof header);
    open_run(&t->run, header);
    write_config(t);
}

/* Checks before training, because a failure after training would lose the weights. */
static void make_export_folder(const config *c) {
    char path[PATH_SPACE], folder[PATH_SPACE], *slash;
    if (!c->export_to[0]) return;
    export_path(c, path);
    strcpy(folder, path);
    slash = strrchr(folder, '/');
    if (slash && slash != folder) {
        *slash = '\0';
        make_folders(folder, "--export");
    }
    check_target(path, "--export");
    if (is_gguf(path)) return;
    config_beside(path, folder);
    check_target(folder, "--export");
}

/* --export: the weights, with config.json beside them; a GGUF file has everything in itself. */
static void export_weights(trainer *t) {
    char    path[PATH_SPACE], beside[PATH_SPACE], text[2048];
    int64_t n = gpt2_config_text(&t->c, &t->data, text, sizeof text);
    export_path(&t->c, path);
    config_beside(path, beside);
    if (is_gguf(path)) gpt2_write_gguf(&t->model, &t->c, &t->data, path);
    else gpt2_write_weights(&t->model, path);
    check(t, "exporting");
    if (!is_gguf(path) && !replace_file(beside, text, (size_t)n))
        die(1, "cannot write %s: %s", beside, strerror(errno));
    if (!t->c.quiet) say_line("export", "%s, for %s to load", path, is_gguf(path) ? "llama.cpp" : "transformers");
}

/* ==== The report ==================================================================== */

/* Logs where a step spent its time and memory. */
static void write_costs(trainer *t) {
    double step = (double)t->run.step, steps = profile.steps ? (double)profile.steps : 1, calls;
    double rest = profile.wall, seconds;
    int    kernels;
    part   parts[MEMORY_PARTS];
    for (int g = 0; g < PROFILE_GROUPS; g++) {
        seconds = profile_group_seconds(g, &calls, &kernels);
        rest -= seconds;
        if (kernels)
            report_part(t->run.metrics, step, "cost", profile_groups[g], 1e3 * seconds / steps);
    }
    rest -= profile.ranks;
    if (profile.ranks > 0)
        report_part(t->run.metrics, step, "cost", "waiting for ranks", 1e3 * profile.ranks / steps);
    if (profile.steps) report_part(t->run.metrics, step, "cost", "host code", 1e3 * rest / steps);
    memory_parts(t, parts);
    for (int i = 0; i < MEMORY_PARTS; i++)
        if (parts[i].bytes > 0)
            report_part(t->run.metrics, step, "memory", parts[i].name, parts[i].bytes);
}

static void print_report(const trainer *t, const char *log) {
    char error[REPORT_MESSAGE];
    if (t->c.quiet) return;
    say("--- %s/report.html\n", t->c.out);
    report_set_columns(line_columns);
    report_summary(log, stdout, error);
    print_fallen(t);
}

/* Writes the report at the end of training. */
static void end_report(trainer *t) {
    char log[PATH_SPACE];
    if (!t->run.metrics) return;
    write_costs(t);
    write_report(&t->run);
    in_folder(&t->c, "metrics.jsonl", log);
    if (!stop_signal) print_report(t, log);
}

/* --report: writes the report of any run, including killed and active runs. */
static int show_report(trainer *t) {
    char          error[REPORT_MESSAGE] = "", log[PATH_SPACE], page[PATH_SPACE];
    report_result result;
    int           file;
    check_options(&t->c);
    in_folder(&t->c, "metrics.jsonl", log);
    in_folder(&t->c, "report.html", page);
    file = open_regular(log);
    if (file < 0) die(1, "cannot read %s: %s", log, plain_error());
    close(file);
    clear_temporary(page);
    result = report_render(log, page, error);
    if (result != REPORT_OK && result != REPORT_ERR_CUT) die(1, "%s", error);
    if (result == REPORT_ERR_CUT) warn("%s", error);
    write_csv(&t->run, log);
    print_report(t, log);
    return 0;
}

static void free_trainer(trainer *t) {
    report_close(t->run.metrics);
    mixp_trail_close(t->trail);
    if (t->run.lock >= 0) close(t->run.lock);
    mixp_context_free(t->ctx);          /* and everything created from it */
    free(t->model.blocks);
    free(t->model.ramp);
    free_corpus(&t->data);
    free(t->x);
    free(t->y);
    free(t->losses);
}

#endif
