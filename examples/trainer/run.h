/* run.h - the folder of a run: its lock, its checkpoints, its log and report: a part of trainer.c and of
 * llama.c
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * A program fills the first fields of `run`, loads or begins (resume_or_begin is the program's), and calls
 * open_run before its first step, save_run and write_report at its validations, report_stop at a signal.
 * Each program saves what it trains under save_run's file; `pairs` are its own words in the file.
 */
#ifndef TRAINER_RUN_H
#define TRAINER_RUN_H

#include <dirent.h>
#include <fcntl.h>
#include "../report.h"
#include "disk.h"
#include "json.h"
#include "ranks.h"
#include "terminal.h"

#define CHECKPOINT "checkpoint.safetensors"
#define BEST       "best.safetensors"
#define KEPT       "step-%09lld.safetensors"
#define LOCK       ".lock"              /* the file stays when the lock is released */

typedef struct run {
    /* of the program and its options */
    const char     *out;                /* the folder; "" = the run writes nothing */
    const char     *from;               /* the file in it that --resume loads */
    const char     *go_on;              /* the command that continues the run */
    const char     *advice;             /* what to try if the run diverges */
    int             resume, overwrite, quiet, csv, only_looks;
    int             saves;              /* 1: this rank takes part in saves */
    int             tells_best;         /* 1: says that the best one is untrained */
    int             guarded;
    int             rank;
    const mixp_ranks_desc *ranks;       /* size 0: one process without ranks */
    double          step_tokens;        /* tokens of a step of all ranks */
    double          token_flops, peak_flops;    /* of a token; of all devices a second, 0 = unknown */
    mixp_context   *ctx;
    mixp_scaler    *scaler;
    mixp_optimizer *optimizers[2];      /* the second NULL: there is one */
    const char *const (*pairs)[2];      /* words of the program in the checkpoint */
    int             n_pairs;
    int             only_trained;       /* 1: the checkpoint lacks the frozen weights */
    /* saved in the checkpoint */
    int64_t         step, last_skip;    /* steps done; newest skipped step, 0 = none */
    double          best_val;           /* the lowest validation loss */
    int64_t         best_step;
    int64_t         data_hash;          /* of the training data */
    /* of this process */
    report_file    *metrics;
    int             lock;               /* descriptor of the folder's lock; -1 = none */
    int             locked_out;         /* 1: another run had locked the folder when this run began */
    struct stat     loaded;             /* the checkpoint that was loaded */
    int             save_failed, best_failed;   /* 1: newest save failed; save of the best failed */
    int64_t         applied, streak;    /* steps applied; first step of a streak of skips */
    int             warned;             /* 1: divergence was reported in this streak */
    double          seconds;            /* seconds of training since the last log line */
    int64_t         timed_steps;        /* steps in them */
    double          seconds_before, tokens; /* seconds before that line; tokens seen so far */
    double          began;              /* time at which training began, for the log */
    double          train_loss;         /* newest loss of --eval-train; ABSENT = none */
    int64_t         rows;               /* lines of the log so far */
    int64_t         events, events_told;    /* the guard's events: read; printed */
} run;

/* Writes the path of a file in the folder. Returns 1 if the file exists. */
static int in_run(const run *r, const char *file, char *path) {
    struct stat info;
    snprintf(path, PATH_SPACE, "%s/%s", r->out, file);
    return stat(path, &info) == 0;
}

/* ==== Checkpoints =================================================================== */

/* Are the run's numbers, loaded from a checkpoint, in range? */
static mixp_result check_loaded(const run *r) {
    const int64_t most = (int64_t)1 << 53;
    int counts = r->step >= 0 && r->step <= most && r->last_skip >= 0 && r->last_skip <= most;
    if (counts && r->best_step >= 0 && r->best_step <= r->step && !isnan(r->best_val))
        return MIXP_OK;
    return mixp_context_fail(r->ctx, MIXP_ERR_FORMAT,
                             "no run can have saved these values: step %lld, last_skip %lld, best_step %lld, "
                             "best_val %g", (long long)r->step, (long long)r->last_skip,
                             (long long)r->best_step, r->best_val);
}

/* The list of all state that the next step depends on. */
static mixp_result save_or_load(run *r, const char *file, int load) {
    char                  path[PATH_SPACE];
    mixp_result           result;
    mixp_checkpoint_value values[] = {
        {"step", MIXP_I64, 1, &r->step}, {"last_skip", MIXP_I64, 1, &r->last_skip},
        {"best_val", MIXP_F64, 1, &r->best_val}, {"best_step", MIXP_I64, 1, &r->best_step},
        {"text_hash", MIXP_I64, 1, &r->data_hash}};
    mixp_checkpoint what = {
        .ctx = r->ctx, .scaler = r->scaler, .optimizers = r->optimizers,
        .n_optimizers = r->optimizers[1] ? 2 : 1,
        .values = values, .n_values = (int)(sizeof values / sizeof values[0]),
        .metadata = r->pairs, .n_metadata = r->n_pairs, .only_trained = r->only_trained};
    in_run(r, file, path);
    if (!load) return mixp_checkpoint_save(path, &what);
    result = mixp_checkpoint_load(path, &what);
    if (result == MIXP_OK) return check_loaded(r);
    if (result != MIXP_ERR_SHAPE) return result;
    values[2].name = "best_bits";       /* version 0.1's name for the bits of this double */
    values[2].dtype = MIXP_I64;
    if (mixp_checkpoint_load(path, &what) != MIXP_OK) return result;
    mixp_context_clear_error(r->ctx);
    return check_loaded(r);
}

/* A full disk must not end a long training run: the next save may succeed. */
static void save_run(run *r, const char *file) {
    const char *why = "", *lost = ranks_failed(r->ranks);
    if (!r->saves) return;
    if (lost) die(1, "a rank has failed: %s. Go on from the last checkpoint with --resume", lost);
    r->save_failed = save_or_load(r, file, 0) != MIXP_OK;
    if (!r->save_failed) return;
    mixp_context_error(r->ctx, &why);
    tell("%s was not saved: %s", file, why);
    mixp_context_clear_error(r->ctx);
}

/* Takes the lock of the folder; returns 0 if another run has it. The system releases the lock when
 * the process ends in any way. On a disk that is read-only or has no locks, runs without a lock. */
static int lock_folder(run *r, int create) {
    struct flock whole;
    char         path[PATH_SPACE];
    if (r->lock >= 0 || r->rank) return 1;      /* rank 0 holds it for all */
    in_run(r, LOCK, path);
    r->lock = plain_descriptor(path, O_RDWR | O_NOFOLLOW | (create ? O_CREAT : 0), 0);
    if (r->lock < 0) return 1;
    memset(&whole, 0, sizeof whole);
    whole.l_type = F_WRLCK;
    whole.l_whence = SEEK_SET;
    if (fcntl(r->lock, F_SETLK, &whole) == 0 || (errno != EACCES && errno != EAGAIN)) return 1;
    close(r->lock);
    r->lock = -1;
    return 0;
}

/* Identifies the file that the run resumes from, to detect its replacement. */
static void note_checkpoint(const run *r, struct stat *info) {
    char path[PATH_SPACE];
    memset(info, 0, sizeof *info);
    if (in_run(r, r->from, path) && stat(path, info) != 0)
        memset(info, 0, sizeof *info);
}

static int same_file(const struct stat *a, const struct stat *b) {
    return a->st_dev == b->st_dev && a->st_ino == b->st_ino && a->st_size == b->st_size &&
           a->st_mtime == b->st_mtime;
}

/* Makes sure that no run is overwritten. Runs before and after the folder is locked, because
 * another run may have used the folder in between. */
static void keep_checkpoint(const run *r) {
    struct stat   now;
    char          path[PATH_SPACE];
    if (r->resume) note_checkpoint(r, &now);
    if (r->resume && !same_file(&now, &r->loaded))
        die(1, "another %s has trained in %s meanwhile: run the command again to continue from its checkpoint",
            program_name, r->out);
    if (!r->resume && !r->overwrite && !r->only_looks && in_run(r, CHECKPOINT, path))
        die(1, "%s holds a checkpoint: continue it with --resume, choose another --out, or "
               "replace it with --overwrite", r->out);
}

/* ==== The log ======================================================================= */

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
static void go_on_from_line(run *r, const char *line) {
    double tokens = number_in_line(line, "tokens", ABSENT);
    double steps = (double)(r->step - step_of_line(line));
    if (tokens == ABSENT) return;
    r->tokens = tokens + steps * r->step_tokens;
    r->seconds_before = number_in_line(line, "seconds", 0);
}

/* A killed run may have logged steps after its last checkpoint; these steps run again. The log
 * begins with `header`, and repeats it where another device continued the run. */
static void trim_metrics(run *r, const char *path, const char *header) {
    int64_t size = 0;
    size_t  length = strlen(header), kept = length, newest = 0, n;
    int64_t damaged = 0;
    char   *text = read_file(path, (int64_t)1 << 30, &size);
    char   *all = text ? (char *)malloc((size_t)size + 2 * length) : NULL;
    if (!text && errno != ENOENT) die(1, "cannot read %s: %s", path, plain_error());
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
        if (!is_whole || !(is_header || line_stays(line, r->step))) continue;
        if (is_header) newest = kept;
        else go_on_from_line(r, line);
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

/* The command line as a shell reads it, without --overwrite and --resume. */
static char command_line[4096];

static void keep_command_line(int argc, char **argv) {
    size_t n = 0, room = sizeof command_line;
    for (int i = 0; i < argc && n < room; i++) {
        int plain = argv[i][0] && !argv[i][strcspn(argv[i], " \t\n'\"\\$`*?[](){}<>|&;!#~")];
        if (strcmp(argv[i], "--overwrite") == 0 || strcmp(argv[i], "--resume") == 0) continue;
        n += (size_t)snprintf(command_line + n, room - n, plain ? "%s%s" : "%s'%s'", i ? " " : "", argv[i]);
    }
}

/* How many weights the run trains. */
static double trained_weights(const mixp_context *ctx) {
    double count = 0;
    for (int64_t i = 0; mixp_context_param(ctx, i); i++)
        if (mixp_context_param(ctx, i)->requires_grad) count += (double)mixp_context_param(ctx, i)->count;
    return count;
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

/* The library saves through a link, and the folder of a run may come from elsewhere. What no file can replace is
 * refused before the training. */
static void refuse_names(const run *r) {
    static const char *const names[] = {CHECKPOINT, BEST, LOCK, "config.json", "metrics.jsonl", "metrics.csv",
                                        "report.html"};
    char path[PATH_SPACE];
    for (int i = 0; i < (int)(sizeof names / sizeof names[0]); i++) {
        in_run(r, names[i], path);
        if (!plain_may_replace(path))
            die(1, "cannot write %s: %s. Take it away, or choose another --out", path, plain_error());
        if (i < 3 && is_link(path))
            die(1, "%s is a symbolic link, and a run writes through none: put the file itself there, or "
                   "remove the link", path);
    }
}

/* Removes the temporary files of saves that were killed (.best.safetensors.PID.0.tmp). The folder's lock is held, so
 * none of them is being written. */
static void clear_killed_saves(const run *r) {
    static const char *const names[2] = {"." CHECKPOINT ".", "." BEST "."};
    DIR *folder = opendir(r->out);
    for (struct dirent *e; folder && (e = readdir(folder)) != NULL;)
        for (int i = 0; i < 2; i++) {
            const size_t length = strlen(names[i]);
            int  end = 0;
            char path[PATH_SPACE];
            if (strncmp(e->d_name, names[i], length) != 0) continue;
            if (sscanf(e->d_name + length, "%*d.%*d.tmp%n", &end), !end || e->d_name[length + (size_t)end]) continue;
            in_run(r, e->d_name, path);
            unlink(path);
        }
    if (folder) closedir(folder);
}

/* Opens the folder and the log of a run that trains, which begins with `header`. */
static void open_run(run *r, const char *header) {
    char path[PATH_SPACE];
    if (!r->out[0]) return;             /* the run writes nothing */
    make_folders(r->out, "--out");
    if (access(r->out, R_OK | W_OK | X_OK) != 0)
        die(1, "the folder %s cannot be read and written: %s. A save flushes it, which needs both. "
               "Choose another --out, or chmod u+rwx", r->out, strerror(errno));
    refuse_names(r);
    if (r->locked_out || !lock_folder(r, 1))
        die(1, "another %s is training in %s: wait until it is done, or choose another --out",
            program_name, r->out);
    clear_killed_saves(r);
    keep_checkpoint(r);
    in_run(r, "metrics.jsonl", path);
    r->tokens = (double)r->step * r->step_tokens;
    if (r->resume) trim_metrics(r, path, header);
    else if (!replace_file(path, header, strlen(header)))
        die(1, "cannot write %s: %s. Choose another --out", path, strerror(errno));
    r->metrics = report_open(path, header, 1);
    if (!r->metrics) die(1, "cannot write %s: %s. Choose another --out", path, strerror(errno));
    report_run(r->metrics, (double)r->step, command_line, trained_weights(r->ctx));
}

/* ==== The end ======================================================================= */

static int stop_status(void)
{ return output_error && output_error != EPIPE ? 1 : 128 + stop_signal; }

/* The last message of a run that was stopped. Returns its exit status. */
static int report_stop(const run *r, int trained) {
    const char   *why = output_error ? strerror(output_error) : strsignal(stop_signal);
    char          next[PATH_SPACE + 2200] = "No step was trained, and nothing is changed";
    if (trained && r->out[0] && !r->save_failed)
        snprintf(next, sizeof next, "Go on with: %.2000s", r->go_on);
    else if (trained)
        snprintf(next, sizeof next, "Nothing is saved%s", r->out[0] ? "" : ": there was no --out DIR");
    if (trained && r->out[0] && !r->save_failed && r->best_step == 0 && r->tells_best)
        strcat(next, ". " BEST " is still the untrained model of step 0");
    tell("stopped after step %lld: %s. %s", (long long)r->step, why, next);
    return stop_status();
}

/* report.h writes a temporary file beside `path`: in a foreign folder a link or a pipe may have its name. */
static void clear_temporary(const char *path) {
    char temporary[PATH_SPACE + 8];
    snprintf(temporary, sizeof temporary, "%s.tmp", path);
    unlink(temporary);
}

static void write_csv(const run *r, const char *log) {
    char error[REPORT_MESSAGE] = "", table[PATH_SPACE];
    if (!r->csv) return;
    in_run(r, "metrics.csv", table);
    clear_temporary(table);
    if (report_csv(log, table, error) == REPORT_ERR_IO) warn("%s", error);
}

static void write_report(run *r) {
    char error[REPORT_MESSAGE] = "", log[PATH_SPACE], page[PATH_SPACE];
    if (!r->metrics) return;
    in_run(r, "metrics.jsonl", log);
    in_run(r, "report.html", page);
    clear_temporary(page);
    if (report_render(log, page, error) != REPORT_OK) warn("%s", error);
    write_csv(r, log);
}

/* The page of a run that an error ends shows its last numbers, and why it ended. */
static void end_by_error(run *r, const char *why) {
    if (!r->metrics) return;
    report_event(r->metrics, (double)r->step, "ended", why, "", REPORT_NONE, REPORT_NONE);
    write_report(r);
}

#endif
