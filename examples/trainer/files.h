/* files.h - the folder of a run: its lock, configuration, checkpoints and metrics: a part
 * of trainer.c
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#ifndef TRAINER_FILES_H
#define TRAINER_FILES_H

#define LOCK       ".lock"              /* the file stays when the lock is released */

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

/* Are the run's numbers, loaded from a checkpoint, in range? */
static mixp_result check_loaded(const trainer *t) {
    const int64_t most = (int64_t)1 << 53;
    int counts = t->step >= 0 && t->step <= most && t->last_skip >= 0 && t->last_skip <= most;
    if (counts && t->best_step >= 0 && t->best_step <= t->step && !isnan(t->best_val))
        return MIXP_OK;
    return mixp_context_fail(t->ctx, MIXP_ERR_FORMAT,
                             "no run can have saved these values: step %lld, last_skip %lld, best_step %lld, "
                             "best_val %g", (long long)t->step, (long long)t->last_skip,
                             (long long)t->best_step, t->best_val);
}

/* The list of all state that the next step depends on. */
static mixp_result save_or_load(trainer *t, const char *file, int load) {
    char                  path[PATH_SPACE];
    mixp_result           result;
    mixp_optimizer       *optimizers[2] = {t->opt, t->muon};
    mixp_checkpoint_value values[] = {
        {"step", MIXP_I64, 1, &t->step}, {"last_skip", MIXP_I64, 1, &t->last_skip},
        {"best_val", MIXP_F64, 1, &t->best_val}, {"best_step", MIXP_I64, 1, &t->best_step},
        {"text_hash", MIXP_I64, 1, &t->trained_hash}};
    char model[MODEL_SPACE], vocabulary[VOCABULARY_SPACE];
    const char *const pairs[][2] = {{MODEL_KEY, model}, {VOCABULARY_KEY, vocabulary}};
    mixp_checkpoint what = {
        .ctx = t->ctx, .scaler = t->scaler, .optimizers = optimizers,
        .n_optimizers = t->muon ? 2 : 1,
        .values = values, .n_values = (int)(sizeof values / sizeof values[0]),
        .metadata = pairs, .n_metadata = 2};
    describe_model(&t->c, t->data.rows, model);
    vocabulary_text(&t->data, vocabulary, sizeof vocabulary);
    in_folder(&t->c, file, path);
    if (!load) return mixp_checkpoint_save(path, &what);
    result = mixp_checkpoint_load(path, &what);
    if (result == MIXP_OK) return check_loaded(t);
    if (result != MIXP_ERR_SHAPE) return result;
    values[2].name = "best_bits";       /* version 0.1's name for the bits of this double */
    values[2].dtype = MIXP_I64;
    if (mixp_checkpoint_load(path, &what) != MIXP_OK) return result;
    mixp_context_clear_error(t->ctx);
    return check_loaded(t);
}

/* A full disk must not end a long training run: the next save may succeed. */
static void save(trainer *t, const char *file) {
    const char *why = "", *lost = ranks_failed(&t->ranks);
    if (!t->saves) return;
    if (lost) die(1, "a rank has failed: %s. Go on from the last checkpoint with --resume", lost);
    t->save_failed = save_or_load(t, file, 0) != MIXP_OK;
    if (!t->save_failed) return;
    mixp_context_error(t->ctx, &why);
    tell("%s was not saved: %s", file, why);
    mixp_context_clear_error(t->ctx);
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
        if (sscanf(file->d_name, "step-%12lld.", &step) != 1 || step > t->step) continue;
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
    if (!t->c.keep || !t->c.out[0] || t->ranks.rank || t->save_failed) return;
    snprintf(name, sizeof name, KEPT, (long long)t->step);
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

/* The step of a line of the metrics; -1 for any other line. */
static int64_t step_of_line(const char *line) {
    static const char before[] = "{\"step\":";
    return strncmp(line, before, sizeof before - 1) == 0 ? json_count(line + sizeof before - 1) : -1;
}

/* Is a line of n bytes one JSON value and a newline? Ends it with '\0' for the other functions. */
static int is_whole_line(char *line, size_t n) {
    const char *wrong;
    if (line[n - 1] != '\n') return 0;
    line[n - 1] = '\0';
    return json_check(line, (int64_t)n - 1, &wrong) != NULL;
}

/* Does a whole line stay when the run resumes at `step`? Lines of time and memory are written again at
 * its end. */
static int line_stays(const char *line, int64_t step) {
    int64_t of = step_of_line(line);
    return of >= 0 && of <= step && !json_get(line, "cost") && !json_get(line, "memory");
}

/* The number of a key in a whole line; `otherwise` if the key is missing. */
static double number_in_line(const char *line, const char *key, double otherwise) {
    const char *value = json_find(line, key);
    return value ? strtod(value, NULL) : otherwise;
}

/* Time and tokens continue from the last line that stays. */
static void go_on_from_line(trainer *t, const char *line) {
    double tokens = number_in_line(line, "tokens", ABSENT);
    double steps = (double)(t->step - step_of_line(line));
    if (tokens == ABSENT) return;
    t->tokens = tokens + steps * (double)(total_batch(t) * t->c.block);
    t->seconds_before = number_in_line(line, "seconds", 0);
}

/* A killed run may have logged steps after its last checkpoint; these steps run again. The log
 * begins with `header`, and repeats it where another device continued the run. */
static void trim_metrics(trainer *t, const char *path, const char *header) {
    int64_t size = 0;
    size_t  length = strlen(header), kept = length, newest = 0, n;
    int64_t damaged = 0;
    char   *text = read_file(path, (int64_t)1 << 30, &size);
    char   *all = text ? (char *)malloc((size_t)size + 2 * length) : NULL;
    if (!text && errno != ENOENT) die(1, "cannot read %s: %s", path, read_error());
    if (text && !all) die(1, "out of memory: %s has %lld bytes", path, (long long)size);
    if (!text) { all = (char *)malloc(2 * length); if (!all) die(1, "out of memory"); }
    memcpy(all, header, length);
    for (char *line = text; line && line < text + size; line += n) {
        const char *end = (const char *)memchr(line, '\n', (size_t)(text + size - line));
        int         is_header = strncmp(line, "{\"metrics\":", 11) == 0, is_whole;
        n = end ? (size_t)(end + 1 - line) : (size_t)(text + size - line);
        is_whole = is_whole_line(line, n);
        damaged += !is_whole && end;
        if (is_header && is_whole && kept == length) kept = 0;
        if (!is_whole || !(is_header || line_stays(line, t->step))) continue;
        if (is_header) newest = kept;
        else go_on_from_line(t, line);
        line[n - 1] = '\n';
        memcpy(all + kept, line, n);
        kept += n;
    }
    if (kept - newest < length || memcmp(all + newest, header, length) != 0) {
        memcpy(all + kept, header, length);
        kept += length;
    }
    if (damaged)
        warn("%s: %lld line%s no JSON, as after a power cut, and %s left out", path, (long long)damaged,
             damaged == 1 ? " is" : "s are", damaged == 1 ? "is" : "are");
    if (!replace_file(path, all, kept)) die(1, "cannot write %s: %s", path, strerror(errno));
    free(text);
    free(all);
}

/* A damaged checkpoint need not end a run. */
static void load_checkpoint(trainer *t) {
    char        best[PATH_SPACE];
    const char *why = "", *out = t->c.out, *file = checkpoint_name(&t->c);
    if (save_or_load(t, file, 1) != MIXP_ERR_FORMAT) { check(t, "resuming"); return; }
    mixp_context_error(t->ctx, &why);
    if (strcmp(file, BEST) != 0 && in_folder(&t->c, BEST, best))
        die(1, "while resuming: %s. The best one lies beside it: add --from best, "
               "or copy %s to %s/" CHECKPOINT ", or start over with --overwrite", why, best, out);
    die(1, "while resuming: %s. Start over with --overwrite", why);
}

/* Takes the lock of the folder; returns 0 if another run has it. The system releases the lock when
 * the process ends in any way. On a disk that is read-only or has no locks, runs without a lock. */
static int lock_folder(trainer *t, int create) {
    struct flock whole;
    char         path[PATH_SPACE];
    if (t->lock >= 0 || t->ranks.rank) return 1;      /* rank 0 holds it for all */
    in_folder(&t->c, LOCK, path);
    t->lock = open(path, O_RDWR | O_NOFOLLOW | O_NONBLOCK | (create ? O_CREAT : 0), 0666);
    if (t->lock < 0) return 1;
    memset(&whole, 0, sizeof whole);
    whole.l_type = F_WRLCK;
    whole.l_whence = SEEK_SET;
    if (fcntl(t->lock, F_SETLK, &whole) == 0 || (errno != EACCES && errno != EAGAIN)) return 1;
    close(t->lock);
    t->lock = -1;
    return 0;
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

/* Identifies the file that the run resumes from, to detect its replacement. */
static void note_checkpoint(const trainer *t, struct stat *info) {
    char path[PATH_SPACE];
    memset(info, 0, sizeof *info);
    if (in_folder(&t->c, checkpoint_name(&t->c), path) && stat(path, info) != 0)
        memset(info, 0, sizeof *info);
}

static int same_file(const struct stat *a, const struct stat *b) {
    return a->st_dev == b->st_dev && a->st_ino == b->st_ino && a->st_size == b->st_size &&
           a->st_mtime == b->st_mtime;
}

static void resume(trainer *t) {
    const config    *c = &t->c;
    mixp_param_group groups[2], matrices;
    for (int g = 0; g < 2; g++) mixp_optimizer_group(t->opt, g, &groups[g]);
    if (t->muon) mixp_optimizer_group(t->muon, 0, &matrices);
    t->locked_out = !lock_folder(t, 0);     /* sampling from an active run is fine       */
    note_checkpoint(t, &t->loaded);
    load_checkpoint(t);
    /* The checkpoint restored its learning rate; the options override it. */
    for (int g = 0; g < 2; g++) mixp_optimizer_set_group(t->opt, g, &groups[g]);
    if (t->muon) mixp_optimizer_set_group(t->muon, 0, &matrices);
    mixp_scaler_change(t->scaler, &(mixp_scaler_desc){
        .growth_interval = c->growth_interval == AUTO ? 0 : (int)c->growth_interval});
    check(t, "resuming");
}

/* Makes sure that no run is overwritten. Runs before and after the folder is locked, because
 * another run may have used the folder in between. */
static void keep_checkpoint(const trainer *t) {
    const config *c = &t->c;
    struct stat   now;
    char          path[PATH_SPACE];
    if (c->resume) note_checkpoint(t, &now);
    if (c->resume && !same_file(&now, &t->loaded))
        die(1, "another trainer has trained in %s meanwhile: run the command again to continue from its checkpoint",
            c->out);
    if (!c->resume && !c->overwrite && !only_looks(t) && in_folder(c, CHECKPOINT, path))
        die(1, "%s holds a checkpoint: continue it with --resume, choose another --out, or "
               "replace it with --overwrite", c->out);
}

/* Loads the checkpoint, or makes sure that no checkpoint is overwritten. Creates nothing. */
static void resume_or_begin(trainer *t) {
    const config *c = &t->c;
    char          path[PATH_SPACE];
    int           exists = c->out[0] && in_folder(c, checkpoint_name(c), path);
    if (exists && !c->resume) keep_checkpoint(t);
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
    if (t->trained_hash && t->data.hash != t->trained_hash)
        die(1, "%s is not the text that this run was trained on: name that one with --data%s",
            c->data, c->val_data[0] ? " and --val-data" : "");
    t->trained_hash = t->data.hash;
}

/* Creates the folder and its missing parents. */
static void make_folders(const char *folder, const char *flag) {
    char        path[PATH_SPACE];
    struct stat info;
    for (size_t n = 1; n <= strlen(folder); n++) {
        if (folder[n] != '/' && folder[n] != '\0') continue;
        snprintf(path, sizeof path, "%.*s", (int)n, folder);
        if (stat(path, &info) != 0 && mkdir(path, 0777) != 0 && errno != EEXIST)
            die(1, "cannot make the folder %s: %s. Choose another %s", path, strerror(errno), flag);
    }
}

enum { HEADER_SPACE = 1400 };

static void metrics_header(const trainer *t, char *header, size_t space) {
    const config *c = &t->c;
    const char   *slash = strrchr(c->data, '/');
    char          title[600], precision[48];
    precision_text(c, precision, sizeof precision);
    snprintf(title, sizeof title, "GPT of %lld layers, width %lld, on %.400s, in %s",
             (long long)c->layers, (long long)c->width, slash ? slash + 1 : c->data, precision);
    report_header(header, space, title, t->device_name);
}

/* The library saves through a link, and the folder of a run may come from elsewhere. */
static void refuse_links(const trainer *t) {
    static const char *const names[] = {CHECKPOINT, BEST, LOCK};
    char path[PATH_SPACE];
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        in_folder(&t->c, names[i], path);
        if (is_link(path))
            die(1, "%s is a symbolic link, and a run writes through none: put the file itself there, or "
                   "remove the link", path);
    }
}

static void open_folder(trainer *t) {
    const config *c = &t->c;
    char          path[PATH_SPACE], header[HEADER_SPACE];
    if (!c->out[0] || !is_training(t)) return;          /* the run writes nothing  */
    make_folders(c->out, "--out");
    if (access(c->out, R_OK | W_OK | X_OK) != 0)
        die(1, "the folder %s cannot be read and written: %s. A save flushes it, which takes both. "
               "Choose another --out, or chmod u+rwx", c->out, strerror(errno));
    refuse_links(t);
    if (t->locked_out || !lock_folder(t, 1))
        die(1, "another trainer is training in %s: wait until it is done, or choose another "
               "--out", c->out);
    keep_checkpoint(t);
    in_folder(c, "metrics.jsonl", path);
    metrics_header(t, header, sizeof header);
    t->tokens = (double)(t->step * total_batch(t) * c->block);
    if (c->resume) trim_metrics(t, path, header);
    else if (!replace_file(path, header, strlen(header)))
        die(1, "cannot write %s: %s. Choose another --out", path, strerror(errno));
    t->metrics = report_open(path, header, 1);
    if (!t->metrics) die(1, "cannot write %s: %s. Choose another --out", path, strerror(errno));
    write_config(t);
}

/* Checks before training, because a failure after training would lose the weights. */
static void make_export_folder(const config *c) {
    char path[PATH_SPACE], *slash;
    if (!c->export_to[0]) return;
    export_path(c, path);
    slash = strrchr(path, '/');
    if (!slash || slash == path) return;
    *slash = '\0';
    make_folders(path, "--export");
}

/* --export: the weights, with config.json beside them; a GGUF file has everything in itself. */
static void export_weights(const trainer *t) {
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

static int stop_status(void)
{ return output_error && output_error != EPIPE ? 1 : 128 + stop_signal; }

/* The last message of a run that was stopped. Returns its exit status. */
static int report_stop(const trainer *t, int trained) {
    const config *c = &t->c;
    const char   *why = output_error ? strerror(output_error) : strsignal(stop_signal);
    char          next[PATH_SPACE + 1200] = "No step was trained, and nothing is changed";
    if (trained && c->out[0] && !t->save_failed)
        snprintf(next, sizeof next, "Go on with: %.1000s --out %s --resume", t->program, c->out);
    else if (trained)
        snprintf(next, sizeof next, "Nothing is saved%s", c->out[0] ? "" : ": there was no --out DIR");
    if (trained && c->out[0] && !t->save_failed && t->best_step == 0 && !c->init[0])
        strcat(next, ". " BEST " is still the untrained model of step 0");
    tell("stopped after step %lld: %s. %s", (long long)t->step, why, next);
    return stop_status();
}

/* ==== The report ==================================================================== */

/* The interval, in steps, that samples the gradients about a hundred times in a run. */
static int64_t watch_every(const config *c) {
    int64_t rows = c->steps / c->log_every;
    return c->log_every * (rows > 100 ? rows / 100 : 1);
}

/* report.h writes a temporary file beside `path`: in a foreign folder a link or a pipe may have its name. */
static void clear_temporary(const char *path) {
    char temporary[PATH_SPACE + 8];
    snprintf(temporary, sizeof temporary, "%s.tmp", path);
    unlink(temporary);
}

static void write_csv(const trainer *t, const char *log) {
    char error[REPORT_MESSAGE] = "", table[PATH_SPACE];
    if (!t->c.csv) return;
    in_folder(&t->c, "metrics.csv", table);
    clear_temporary(table);
    if (report_csv(log, table, error) == REPORT_ERR_IO) warn("%s", error);
}

static void write_report(trainer *t) {
    char error[REPORT_MESSAGE] = "", log[PATH_SPACE], page[PATH_SPACE];
    if (!t->metrics) return;
    in_folder(&t->c, "metrics.jsonl", log);
    in_folder(&t->c, "report.html", page);
    clear_temporary(page);
    if (report_render(log, page, error) != REPORT_OK) warn("%s", error);
    write_csv(t, log);
}

/* Logs where a step spent its time and memory. */
static void write_costs(trainer *t) {
    double step = (double)t->step, steps = profile.steps ? (double)profile.steps : 1, calls;
    double rest = profile.wall, seconds;
    int    kernels;
    part   parts[MEMORY_PARTS];
    for (int g = 0; g < PROFILE_GROUPS; g++) {
        seconds = profile_group_seconds(g, &calls, &kernels);
        rest -= seconds;
        if (kernels)
            report_part(t->metrics, step, "cost", profile_groups[g], 1e3 * seconds / steps);
    }
    rest -= profile.ranks;
    if (profile.ranks > 0)
        report_part(t->metrics, step, "cost", "waiting for ranks", 1e3 * profile.ranks / steps);
    if (profile.steps) report_part(t->metrics, step, "cost", "host code", 1e3 * rest / steps);
    memory_parts(t, parts);
    for (int i = 0; i < MEMORY_PARTS; i++)
        if (parts[i].bytes > 0)
            report_part(t->metrics, step, "memory", parts[i].name, parts[i].bytes);
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
    if (!t->metrics) return;
    write_costs(t);
    write_report(t);
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
    if (file < 0) die(1, "cannot read %s: %s", log, read_error());
    close(file);
    clear_temporary(page);
    result = report_render(log, page, error);
    if (result != REPORT_OK && result != REPORT_ERR_CUT) die(1, "%s", error);
    if (result == REPORT_ERR_CUT) warn("%s", error);
    write_csv(t, log);
    print_report(t, log);
    return 0;
}

static void free_trainer(trainer *t) {
    report_close(t->metrics);
    mixp_trail_close(t->trail);
    if (t->lock >= 0) close(t->lock);
    mixp_context_free(t->ctx);          /* and everything created from it */
    free(t->model.blocks);
    free(t->model.ramp);
    free_corpus(&t->data);
    free(t->x);
    free(t->y);
    free(t->losses);
}

#endif
