/* report.h - the log of a training run, metrics.jsonl, and a page drawn from the log, report.html
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * Works in any program, in C99 or C++11, with plain_file.h beside it. If it is included after mixprec.h, it also logs the
 * state of a scaler, an optimizer and a guard:
 *
 *     char         header[REPORT_MESSAGE], error[REPORT_MESSAGE];
 *     report_file *log;
 *     report_header(header, sizeof header, "my model", "cpu");
 *     log = report_open("run/metrics.jsonl", header, 0);
 *     for (step = 1; step <= steps; step++) {
 *         if (step % 50 == 0) mixp_optimizer_sample(opt);
 *         ...train...
 *         report_training(log, step, loss, REPORT_NONE, scaler);
 *         report_guard(log, step, ctx);              sites that fell back since the last call
 *         if (step % 50 == 0) report_watching(log, step, ctx, opt);
 *     }
 *     if (report_close(log)) fprintf(stderr, "the log is incomplete\n");
 *     if (report_render("run/metrics.jsonl", "run/report.html", error)) fprintf(stderr, "%s\n", error);
 *     report_summary("run/metrics.jsonl", stdout, error);
 *
 * The first line of the log is its header, {"metrics":"mixprec","version":1,...}. Every other line
 * is one object and begins with {"step":N:
 *
 *     "loss" "val" "train" "norm" "clip" "lr" "scale" "skipped"          a step; null: not finite.
 *     "tokens" "ms" "mfu" "mem" "seconds" "time"                         train: loss of training
 *                                                                        data, taken as val is; mfu:
 *                                                                        share of the device's peak;
 *                                                                        seconds of training, time
 *                                                                        since 1970
 *     "skip": why                                                        a skipped step; again,
 *                                                                        once its origin is known
 *     "event": what, "site", "dtype", "largest", "flushed"               of the guard
 *     "exponents": [share of each], "first": exponent of the first       of all gradients, scaled
 *     "param": name, "flushed", "subnormal"                              of its gradient, scaled
 *     "cost": what, "ms"     "memory": what, "bytes"                     of a step
 *     "run": command, "parameters"                                       a process that trains from here
 *
 * Numbers have a '.' in every locale. A log is a regular file, not a symbolic link.
 *
 * To export the functions from a library, define REPORT_API as what declares them, such as
 * __attribute__((visibility("default"))) or extern "C", before one file of the library includes this file. Its users
 * define the same REPORT_API and REPORT_NO_IMPLEMENTATION.
 *
 * The page is one file, without scripts, for phones and desktops, light and dark. If the log is
 * truncated (the run was killed or is still running), the page shows the complete lines.
 */
#ifndef MIXPREC_REPORT_H
#define MIXPREC_REPORT_H

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "plain_file.h"

#define REPORT_VERSION 1
#define REPORT_MESSAGE 400              /* room for any message */
#define REPORT_NONE    (-1e300)         /* a missing number */
#define REPORT_MOST_STEPS 9007199254740992.0    /* 2^53: doubles above it are not exact counts */

typedef enum report_result {
    REPORT_OK,
    REPORT_ERR_IO,
    REPORT_ERR_MEMORY,
    REPORT_ERR_VERSION,                 /* not a log of mixprec, or of another version */
    REPORT_ERR_FORMAT,                  /* a malformed line */
    REPORT_ERR_CUT                      /* the last line is incomplete; all before it counts */
} report_result;

#if defined(__GNUC__)
#  define REPORT_UNUSED __attribute__((__unused__))
#  define REPORT_PRINTS(format, first) __attribute__((__format__(__printf__, format, first)))
#else
#  define REPORT_UNUSED
#  define REPORT_PRINTS(format, first)
#endif
#ifndef REPORT_API
#  define REPORT_API REPORT_UNUSED static
#endif

/* ==== The API ======================================================================= */

typedef struct report_file report_file;

/* The numbers of a step; REPORT_NONE = unknown. */
typedef struct report_point {
    double step, loss, val, train, norm, clip, lr, scale, skipped;
    double tokens;                      /* seen so far, or samples */
    double ms, mem;
    double mfu;                         /* model FLOPs utilization: 1 = the device's peak */
    double seconds, time;               /* of training so far; since 1970 */
} report_point;

REPORT_API void report_header(char *line, size_t space, const char *title, const char *device);
REPORT_API report_file *report_open(const char *path, const char *header, int append);
REPORT_API int report_close(report_file *log);
REPORT_API void report_run(report_file *log, double step, const char *command, double parameters);
REPORT_API report_point report_nothing(double step);
REPORT_API void report_step(report_file *log, const report_point *p);
REPORT_API void report_skip(report_file *log, double step, const char *why);
REPORT_API void report_event(report_file *log, double step, const char *what, const char *site,
                             const char *dtype, double largest, double flushed);
REPORT_API void report_exponents(report_file *log, double step, int first, const double *count, int
                                 n);
REPORT_API void report_param(report_file *log, double step, const char *name, double flushed, double
                             subnormal);
REPORT_API void report_part(report_file *log, double step, const char *kind, const char *what,
                            double amount);
REPORT_API report_result report_render(const char *path, const char *html, char *error);
REPORT_API report_result report_csv(const char *path, const char *csv, char *error);
REPORT_API report_result report_summary(const char *path, FILE *out, char *error);
REPORT_API void report_set_columns(int columns);
#ifdef MIXPREC_H_INCLUDED
REPORT_API void report_verdict(report_file *log, double step, const mixp_verdict *v);
REPORT_API void report_training(report_file *log, double step, double loss, double val, const
                                mixp_scaler *scaler);
REPORT_API void report_guard(report_file *log, double step, const mixp_context *ctx);
REPORT_API void report_watching(report_file *log, double step, const mixp_context *ctx,
                                mixp_optimizer *opt);
#endif

#ifndef REPORT_NO_IMPLEMENTATION

/* ==== Texts and numbers =============================================================
 *
 * A program may have called setlocale. printf then writes 1,5 and strtod reads it. The log, the CSV and the drawings
 * have 1.5, so all formats go through report_vformat, and numbers are read by report_number_at. */

/* What this program's locale puts between 0 and 5. */
static const char *report_separator(char room[16]) {
    snprintf(room, 16, "%.1f", 0.5);
    room[strlen(room) - 1] = '\0';
    return room + 1;
}

/* Puts '.' into a number that printf has written. */
static void report_set_point(char *number) {
    char        room[16];
    const char *separator = report_separator(room);
    char       *at = strcmp(separator, ".") == 0 ? NULL : strstr(number, separator);
    if (!at) return;
    *at = '.';
    memmove(at + 1, at + strlen(separator), strlen(at + strlen(separator)) + 1);
}

/* Reads a number of JSON. Returns the first character after it, or NULL: not a number. */
static const char *report_number_at(const char *text, double *value) {
    char        number[512], room[16], *end;
    const char *separator = report_separator(room), *point;
    size_t      n = strspn(text, "+-.0123456789eE"), before;
    if (n == 0 || n + strlen(separator) >= sizeof number) return NULL;
    point = (const char *)memchr(text, '.', n);
    before = point ? (size_t)(point - text) : n;
    memcpy(number, text, before);
    number[before] = '\0';
    if (point) sprintf(number + before, "%s%.*s", separator, (int)(n - before - 1), point + 1);
    *value = strtod(number, &end);
    return *end ? NULL : text + n;
}

/* How many bytes of a text stay if `most` may: no part of a letter in UTF-8. */
static size_t report_fit(const char *text, size_t most) {
    size_t n = 0;
    while (n < most && text[n]) n++;
    while (n == most && n > 0 && ((unsigned char)text[n] & 0xC0) == 0x80) most = --n;
    return n;
}

typedef struct report_args { va_list list; } report_args;

/* The conversion at format, with each * as a number. Returns the first character after it. */
static const char *report_spec(const char *format, report_args *args, char spec[64]) {
    size_t n = 0;
    do {
        if (*format == '*') n += (size_t)sprintf(spec + n, "%d", va_arg(args->list, int));
        else spec[n++] = *format;
    } while (!strchr("%diuxcsefg", *++format) && n < 40);
    spec[n] = *format;
    spec[n + 1] = '\0';
    return format + 1;
}

static void report_convert_text(char *to, size_t space, const char *spec, const char *text) {
    const char *precision = strchr(spec, '.');
    int         width = atoi(spec + 1);
    size_t      n = precision ? report_fit(text, (size_t)atoi(precision + 1)) : strlen(text);
    snprintf(to, space, "%*.*s", width, (int)n, text);
}

/* vsnprintf for %s, %d, %x, %ld, %e, %f, %g and %%, with '.' in every locale. */
static void report_vformat(char *to, size_t space, const char *format, va_list list) {
    report_args args;
    size_t      n = 0;
    va_copy(args.list, list);
    to[0] = '\0';
    while (*format && n + 1 < space) {
        char spec[64], kind;
        to[n] = *format;
        to[n + 1] = '\0';
        if (*format != '%') {
            format++;
            n++;
            continue;
        }
        format = report_spec(format, &args, spec);
        kind = format[-1];
        if (kind == 's') report_convert_text(to + n, space - n, spec, va_arg(args.list, const char *));
        else if (kind != '%' && strchr("efg", kind)) {
            snprintf(to + n, space - n, spec, va_arg(args.list, double));
            report_set_point(to + n);
        } else if (kind != '%' && strchr(spec, 'l')) snprintf(to + n, space - n, spec, va_arg(args.list, long));
        else if (kind != '%') snprintf(to + n, space - n, spec, va_arg(args.list, int));
        n += strlen(to + n);
    }
    va_end(args.list);
}

static void report_format(char *to, size_t space, const char *format, ...) REPORT_PRINTS(3, 4);
static void report_format(char *to, size_t space, const char *format, ...) {
    va_list args;
    va_start(args, format);
    report_vformat(to, space, format, args);
    va_end(args);
}

static int report_print(FILE *f, const char *format, ...) REPORT_PRINTS(2, 3);
static int report_print(FILE *f, const char *format, ...) {
    char    text[4096];
    va_list args;
    va_start(args, format);
    report_vformat(text, sizeof text, format, args);
    va_end(args);
    fputs(text, f);
    return (int)strlen(text);
}

static report_result report_fail(char *error, report_result result, const char *format, ...) {
    va_list args;
    va_start(args, format);
    if (error) report_vformat(error, REPORT_MESSAGE, format, args);
    va_end(args);
    return result;
}

/* ==== Writing ======================================================================= */

struct report_file {
    FILE     *f;
    long long skipped;                  /* the last step that was logged as skipped */
    double    open;                     /* that step in the log's count, while its loss was not
                                           finite and its origin is unknown; 0 = none */
    long long events;                   /* number of the guard's events logged so far */
    int       failed;
};

static void report_string(FILE *f, const char *text) {
    fputc('"', f);
    for (; *text; text++) {
        unsigned char c = (unsigned char)*text;
        if (c < 32 || c == '"' || c == '\\') report_print(f, "\\u%04x", c);
        else fputc(c, f);
    }
    fputc('"', f);
}

static void report_text(FILE *f, const char *key, const char *text) {
    report_print(f, ",\"%s\":", key);
    report_string(f, text);
}

/* JSON has no NaN and no Inf. */
static void report_number(FILE *f, const char *key, double value) {
    if (value <= REPORT_NONE && value >= REPORT_NONE) return;
    if (value - value == 0) report_print(f, ",\"%s\":%.9g", key, value);
    else report_print(f, ",\"%s\":null", key);
}

/* A count, to its last digit. */
static void report_whole(FILE *f, const char *key, double value) {
    if (value > REPORT_NONE) report_print(f, ",\"%s\":%.0f", key, value);
}

/* Copies plain text, without characters that JSON would escape. */
static void report_plain(char *to, size_t space, const char *text) {
    size_t n = 0;
    for (; *text && n + 1 < space; text++)
        if ((unsigned char)*text >= 32 && *text != '"' && *text != '\\') to[n++] = *text;
    to[n] = '\0';
}

/* The first line of a log, for report_open. */
REPORT_API void report_header(char *line, size_t space, const char *title, const char *device) {
    char t[200], d[100];            /* with the text around them shorter than REPORT_MESSAGE */
    report_plain(t, sizeof t, title);
    report_plain(d, sizeof d, device);
    report_format(line, space, "{\"metrics\":\"mixprec\",\"version\":%d,\"device\":\"%s\",\"title\":\"%s\"}\n",
             REPORT_VERSION, d, t);
}

/* ---- files ---- */

/* Opens a log. append 1: continues an existing log. Returns NULL with errno set on failure, also if path is a symbolic
 * link or no regular file. */
REPORT_API report_file *report_open(const char *path, const char *header, int append) {
    report_file *log = (report_file *)calloc(1, sizeof *log);
    if (!log) return NULL;
    log->f = plain_log(path, append);
    if (!log->f) { free(log); return NULL; }
    if (!append) fputs(header, log->f);
    return log;
}

/* Ends a line and writes it to disk before the next line begins. */
static void report_line_end(report_file *log) {
    fputs("}\n", log->f);
    if (fflush(log->f) != 0) log->failed = 1;
}

/* Returns 0, or 1 if a write failed. */
REPORT_API int report_close(report_file *log) {
    int failed;
    if (!log) return 0;
    failed = log->failed || ferror(log->f);
    failed = fclose(log->f) != 0 || failed;
    free(log);
    return failed;
}

REPORT_API report_point report_nothing(double step) {
    report_point p;
    p.step = step;
    p.loss = p.val = p.train = p.norm = p.clip = p.lr = p.scale = p.skipped = REPORT_NONE;
    p.tokens = p.ms = p.mfu = p.mem = p.seconds = p.time = REPORT_NONE;
    return p;
}

REPORT_API void report_step(report_file *log, const report_point *p) {
    if (!log) return;
    report_print(log->f, "{\"step\":%.0f", p->step);
    report_number(log->f, "loss", p->loss);
    report_number(log->f, "val", p->val);
    report_number(log->f, "train", p->train);
    report_number(log->f, "norm", p->norm);
    report_number(log->f, "clip", p->clip);
    report_number(log->f, "lr", p->lr);
    report_number(log->f, "scale", p->scale);
    report_number(log->f, "skipped", p->skipped);
    report_whole(log->f, "tokens", p->tokens);
    report_number(log->f, "ms", p->ms);
    report_number(log->f, "mfu", p->mfu);
    report_number(log->f, "mem", p->mem);
    report_number(log->f, "seconds", p->seconds);
    report_whole(log->f, "time", p->time);
    report_line_end(log);
}

/* A process begins to train after `step`: its command, and how many weights it trains. */
REPORT_API void report_run(report_file *log, double step, const char *command, double parameters) {
    if (!log) return;
    report_print(log->f, "{\"step\":%.0f", step);
    report_text(log->f, "run", command);
    report_whole(log->f, "parameters", parameters);
    report_line_end(log);
}

REPORT_API void report_skip(report_file *log, double step, const char *why) {
    if (!log) return;
    report_print(log->f, "{\"step\":%.0f", step);
    report_text(log->f, "skip", why);
    report_line_end(log);
}

REPORT_API void report_event(report_file *log, double step, const char *what, const char *site,
                             const char *dtype, double largest, double flushed) {
    if (!log) return;
    report_print(log->f, "{\"step\":%.0f", step);
    report_text(log->f, "event", what);
    report_text(log->f, "site", site);
    report_text(log->f, "dtype", dtype);
    report_number(log->f, "largest", largest);
    report_number(log->f, "flushed", flushed);
    report_line_end(log);
}

/* count[i] values have the exponent first + i. Zero counts at either end are left out. */
REPORT_API void report_exponents(report_file *log, double step, int first, const double *count, int
                                 n) {
    double total = 0;
    int    i, low = 0;
    if (!log) return;
    while (low < n && count[low] <= 0) low++;
    while (n > low && count[n - 1] <= 0) n--;
    for (i = low; i < n; i++) total += count[i];
    report_print(log->f, "{\"step\":%.0f,\"exponents\":[", step);
    for (i = low; i < n; i++) report_print(log->f, "%s%.3g", i > low ? "," : "", count[i] / total);
    report_print(log->f, "],\"first\":%d", first + low);
    report_line_end(log);
}

/* The shares of a gradient's values that fp16 would flush to zero, and hold with fewer bits. */
REPORT_API void report_param(report_file *log, double step, const char *name, double flushed, double
                             subnormal) {
    if (!log) return;
    report_print(log->f, "{\"step\":%.0f", step);
    report_text(log->f, "param", name);
    report_print(log->f, ",\"flushed\":%.4g,\"subnormal\":%.4g", flushed, subnormal);
    report_line_end(log);
}

/* Where a step's time, or memory, went: `kind` is "cost" in ms or "memory" in bytes. */
REPORT_API void report_part(report_file *log, double step, const char *kind, const char *what,
                            double amount) {
    if (!log) return;
    report_print(log->f, "{\"step\":%.0f", step);
    report_text(log->f, kind, what);
    report_number(log->f, kind[0] == 'c' ? "ms" : "bytes", amount);
    report_line_end(log);
}

/* ==== Reading ======================================================================= */

/* The kinds of lines, other than a step's numbers. */
typedef enum report_kind {
    REPORT_SKIP, REPORT_EVENT, REPORT_EXPONENTS, REPORT_PARAM, REPORT_COST, REPORT_MEMORY, REPORT_RUN,
    REPORT_KINDS, REPORT_POINT = REPORT_KINDS
} report_kind;

typedef struct report_note {
    report_kind kind;
    double step;
    char  *text, *site;                 /* in the text of the file */
    double largest, flushed, subnormal, amount;
    int    first, bins;                 /* of exponents */
    double *share;
    int    begins;                      /* 1: with this event a low site falls back */
    double end;                         /* step at which the site returns to low; -1: never */
} report_note;

typedef struct report_data {
    char         *memory;               /* the file's text, which holds the strings */
    const char   *title, *device;
    report_point *points;
    report_note  *notes;
    int           n_points, n_notes;
    int           last_skip;            /* number of its note, from 1; 0 = none */
    int           is_cut;
    double        last;                 /* step */
} report_data;

static void report_free(report_data *d) {
    int i;
    for (i = 0; i < d->n_notes; i++) free(d->notes[i].share);
    free(d->memory);
    free(d->points);
    free(d->notes);
    memset(d, 0, sizeof *d);
}

/* The parser of one line. Its cursor becomes NULL at a malformed line. */
typedef struct report_parser {
    char *p;
    report_point point;
    report_note  note;
    const char  *title, *device, *metrics;
    double       version;
    int          has_step;
} report_parser;

/* Replaces DEL, and U+0080 to U+009F in UTF-8: one of them is ESC [ to a terminal. */
static void report_tame(char *text) {
    for (; *text; text++) {
        if (*text == 127) *text = '?';
        if ((unsigned char)text[0] == 0xC2 && (text[1] & 0xE0) == 0x80) text[0] = text[1] = '?';
    }
}

/* The character to show for an escape. A newline becomes a space, so that no text begins a line. */
static unsigned report_shown(unsigned code) {
    if (code == '\n') return ' ';
    return code < 32 || (code >= 127 && code < 160) ? '?' : code;
}

/* A string, decoded in place; NULL if malformed. */
static char *report_parse_string(report_parser *r) {
    char *start = r->p + 1, *to = start, *from = start;
    if (*r->p != '"') return NULL;
    for (; *from != '"'; from++) {
        unsigned code = (unsigned char)*from;
        if (code < 32) return NULL;     /* includes the end of the line */
        if (code == '\\' && (from[1] == '"' || from[1] == '\\')) code = (unsigned char)*++from;
        else if (code == '\\') {
            int is_whole = from[1] == 'u' && strspn(from + 2, "0123456789abcdefABCDEF") >= 4;
            if (!is_whole || sscanf(from + 2, "%4x", &code) != 1 || code > 255) return NULL;
            code = report_shown(code);
            from += 5;
        }
        *to++ = (char)code;
    }
    r->p = from + 1;
    *to = '\0';
    report_tame(start);
    return start;
}

/* A number; null = not finite. */
static int report_parse_number(report_parser *r, double *value) {
    const char *end;
    if (strncmp(r->p, "null", 4) == 0) {
        *value = HUGE_VAL;
        r->p += 4;
        return 1;
    }
    if (!strchr("-0123456789", *r->p)) return 0;
    end = report_number_at(r->p, value);
    if (!end) return 0;
    r->p += end - r->p;
    return 1;
}

static int report_parse_array(report_parser *r) {
    enum { MOST = 4096 };
    double *share = (double *)calloc(MOST, sizeof *share);
    int     n = 0, good;
    free(r->note.share);
    r->note.share = share;
    r->p++;
    good = share != NULL;
    while (good && *r->p != ']') {
        good = n < MOST && report_parse_number(r, &share[n++]);
        if (good && *r->p == ',') r->p++;
        else if (*r->p != ']') good = 0;
    }
    r->note.bins = n;
    r->p += good;
    share = (double *)realloc(r->note.share, (n ? (size_t)n : 1) * sizeof *share);
    if (share) r->note.share = share;
    return good;
}

/* Where the number of a key is stored; NULL: ignored. */
static double *report_place(report_parser *r, const char *key) {
    if (strcmp(key, "step") == 0) { r->has_step = 1; return &r->point.step; }
    if (strcmp(key, "version") == 0) return &r->version;
    if (strcmp(key, "loss") == 0) return &r->point.loss;
    if (strcmp(key, "val") == 0) return &r->point.val;
    if (strcmp(key, "train") == 0) return &r->point.train;
    if (strcmp(key, "tokens") == 0) return &r->point.tokens;
    if (strcmp(key, "seconds") == 0) return &r->point.seconds;
    if (strcmp(key, "time") == 0) return &r->point.time;
    if (strcmp(key, "norm") == 0) return &r->point.norm;
    if (strcmp(key, "clip") == 0) return &r->point.clip;
    if (strcmp(key, "lr") == 0) return &r->point.lr;
    if (strcmp(key, "scale") == 0) return &r->point.scale;
    if (strcmp(key, "skipped") == 0) return &r->point.skipped;
    if (strcmp(key, "ms") == 0) return &r->point.ms;
    if (strcmp(key, "mfu") == 0) return &r->point.mfu;
    if (strcmp(key, "mem") == 0) return &r->point.mem;
    if (strcmp(key, "bytes") == 0 || strcmp(key, "parameters") == 0) return &r->note.amount;
    if (strcmp(key, "largest") == 0) return &r->note.largest;
    if (strcmp(key, "flushed") == 0) return &r->note.flushed;
    if (strcmp(key, "subnormal") == 0) return &r->note.subnormal;
    return NULL;
}

static void report_take_text(report_parser *r, const char *key, char *text) {
    static const char *const kinds[REPORT_KINDS] = {
        "skip", "event", "exponents", "param", "cost", "memory", "run" };
    int i;
    if (strcmp(key, "metrics") == 0) r->metrics = text;
    if (strcmp(key, "title") == 0) r->title = text;
    if (strcmp(key, "device") == 0) r->device = text;
    if (strcmp(key, "site") == 0) r->note.site = text;
    for (i = 0; i < REPORT_KINDS; i++)
        if (strcmp(key, kinds[i]) == 0) {
            r->note.kind = (report_kind)i;
            r->note.text = text;
        }
}

/* The value after a key: text, an array, a number. */
static int report_parse_value(report_parser *r, const char *key) {
    double  value, *place;
    char   *text;
    if (*r->p == '"') {
        text = report_parse_string(r);
        if (text) report_take_text(r, key, text);
        return text != NULL;
    }
    if (*r->p == '[') {
        r->note.kind = REPORT_EXPONENTS;
        return report_parse_array(r);
    }
    if (!report_parse_number(r, &value)) return 0;
    place = report_place(r, key);
    if (place) *place = value;
    else if (strcmp(key, "first") == 0 && fabs(value) < 10000) r->note.first = (int)value;
    return 1;
}

/* {"key":value,...}; unknown keys are ignored. */
static int report_parse(report_parser *r, char *line) {
    char *key;
    memset(r, 0, sizeof *r);
    r->p = line;
    r->point = report_nothing(0);
    r->note.kind = REPORT_POINT;
    r->note.text = r->note.site = line + strlen(line);
    if (*r->p != '{') return 0;
    do {
        r->p++;
        key = report_parse_string(r);
        if (!key || *r->p++ != ':' || !report_parse_value(r, key)) return 0;
    } while (*r->p == ',');
    if (r->p[0] != '}' || r->p[1] != '\0') return 0;
    if (!(r->point.step >= 0 && r->point.step <= REPORT_MOST_STEPS)) return 0;
    if (r->point.step > floor(r->point.step)) return 0;
    r->note.step = r->point.step;
    if (r->note.kind == REPORT_COST) r->note.amount = r->point.ms;
    return 1;
}

/* Room for one more of `n`; the array grows by doubling. */
static void *report_grow(void *array, int n, size_t size) {
    if (n && (n & (n - 1))) return array;
    return realloc(array, (n ? 2 * (size_t)n : 1) * size);
}

/* A skip whose origin was found later has a second line, which replaces the first. */
static int report_is_told_again(const report_data *d, const report_parser *r) {
    double before = d->last_skip ? d->notes[d->last_skip - 1].step : -1;
    return r->note.kind == REPORT_SKIP && r->note.step >= before && r->note.step <= before;
}

static report_result report_keep(report_data *d, report_parser *r) {
    if (r->note.kind == REPORT_POINT) {
        report_point *points =
            (report_point *)report_grow(d->points, d->n_points, sizeof *points);
        if (!points) return REPORT_ERR_MEMORY;
        d->points = points;
        d->points[d->n_points++] = r->point;
    } else if (report_is_told_again(d, r)) {
        d->notes[d->last_skip - 1].text = r->note.text;
    } else {
        report_note *notes = (report_note *)report_grow(d->notes, d->n_notes, sizeof *notes);
        if (!notes) return REPORT_ERR_MEMORY;
        d->notes = notes;
        d->notes[d->n_notes++] = r->note;
        if (r->note.kind == REPORT_SKIP) d->last_skip = d->n_notes;
        r->note.share = NULL;           /* the stored note owns it now */
    }
    if (r->point.step > d->last) d->last = r->point.step;
    return REPORT_OK;
}

/* --- sites that fell back --- */

/* Does the site store f32 after this event? */
static int report_is_fall(const report_note *n)
{ return n->kind == REPORT_EVENT && n->site[0] && n->largest >= 0 && strncmp(n->text, "back", 4); }

/* Does the site return to its low dtype with this event? */
static int report_is_back(const report_note *n)
{ return n->kind == REPORT_EVENT && strncmp(n->text, "back", 4) == 0; }

/* Orders by site, then by place in the log. All notes are in one array, so a later note in the log has
 * a higher address. */
static int report_by_site(const void *a, const void *b) {
    const report_note *x, *y;
    int                order;
    memcpy(&x, a, sizeof x);
    memcpy(&y, b, sizeof y);
    order = strcmp(x->site, y->site);
    return order ? order : (x > y) - (x < y);
}

/* Marks which of one site's n events begin a fall, and where each fall ends. */
static void report_site_falls(report_note *const *event, int n) {
    double end = -1;
    int    i, was_low = 1;
    for (i = 0; i < n; i++) {
        event[i]->begins = was_low && report_is_fall(event[i]);
        if (report_is_fall(event[i])) was_low = 0;
        if (report_is_back(event[i])) was_low = 1;
    }
    for (i = n - 1; i >= 0; i--) {
        event[i]->end = end;
        if (report_is_back(event[i])) end = event[i]->step;
    }
}

/* Sorted by site once: a log may have a million events. */
static report_result report_find_falls(report_data *d) {
    report_note **event = (report_note **)malloc(((size_t)d->n_notes + 1) * sizeof *event);
    int           i, n = 0, k;
    if (!event) return REPORT_ERR_MEMORY;
    for (i = 0; i < d->n_notes; i++)
        if (d->notes[i].kind == REPORT_EVENT) event[n++] = &d->notes[i];
    qsort(event, (size_t)n, sizeof *event, report_by_site);
    for (i = 0; i < n; i = k) {
        for (k = i + 1; k < n && strcmp(event[k]->site, event[i]->site) == 0; k++) {}
        report_site_falls(event + i, k - i);
    }
    free(event);
    return REPORT_OK;
}

/* --- a log --- */

/* Reads a header: the first line, and again where a run continued on another device. */
static report_result report_take_header(report_data *d, const report_parser *r, const char *path,
                                        char *error) {
    if (!r->metrics || strcmp(r->metrics, "mixprec") != 0)
        return report_fail(error, REPORT_ERR_VERSION, "%s does not begin as a log of metrics: pass "
                           "the metrics.jsonl of a run", path);
    if (r->version < REPORT_VERSION || r->version > REPORT_VERSION)
        return report_fail(error, REPORT_ERR_VERSION, "%s is of version %g, and this program reads "
                           "%d: use the program that wrote it", path, r->version, REPORT_VERSION);
    d->title = r->title ? r->title : "";
    d->device = r->device ? r->device : "";
    return REPORT_OK;
}

static report_result report_read_line(report_data *d, char *line, long number, const char *path,
                                      char *error) {
    report_parser r;
    report_result result = REPORT_OK;
    int           good = report_parse(&r, line);
    if (!good)
        result = report_fail(error, REPORT_ERR_FORMAT, "%s, line %ld is malformed: remove that "
                             "line, or continue the run, which repairs its log", path, number);
    else if (!r.has_step) result = report_take_header(d, &r, path, error);
    else result = report_keep(d, &r);
    if (result == REPORT_ERR_MEMORY) report_fail(error, result, "%s: out of memory", path);
    free(r.note.share);
    return result;
}

/* Reads a file and appends '\0'. Returns NULL with errno set on failure. */
static char *report_load(const char *path, size_t *size) {
    FILE  *f = plain_open(path);
    size_t room = 1 << 16, n = 0, got = 1;
    char  *text = NULL, *bigger;
    while (f && got) {
        bigger = (char *)realloc(text, room + 1);
        if (!bigger) break;
        text = bigger;
        got = fread(text + n, 1, room - n, f);
        n += got;
        if (n == room) room *= 2;
    }
    if (!f || got || ferror(f)) {
        free(text);
        text = NULL;
    }
    if (f) fclose(f);
    if (text) text[n] = '\0';
    *size = n;
    return text;
}

/* Reads a log into *d, which report_free frees. REPORT_ERR_CUT: all but the last line was read. */
static report_result report_read(report_data *d, const char *path, char *error) {
    report_result result = REPORT_OK;
    size_t        size = 0;
    long          number = 0;
    char         *line, *end;
    memset(d, 0, sizeof *d);
    d->memory = report_load(path, &size);
    if (!d->memory) return report_fail(error, REPORT_ERR_IO, "cannot read %s: %s", path,
                                       errno ? strerror(errno) : "no file");
    for (line = d->memory; line < d->memory + size && result == REPORT_OK; line = end + 1) {
        number++;
        end = (char *)memchr(line, '\n', (size_t)(d->memory + size - line));
        if (!end) break;
        *end = '\0';
        if (strlen(line) != (size_t)(end - line))
            return report_fail(error, REPORT_ERR_FORMAT, "%s, line %ld holds a zero byte, as after a "
                               "power cut: remove that line, or continue the run, which repairs "
                               "its log", path, number);
        if (number == 1 && strncmp(line, "{\"metrics\":", 11) != 0)
            return report_fail(error, REPORT_ERR_VERSION, "%s does not begin as a log of metrics: "
                               "pass the metrics.jsonl of a run", path);
        result = report_read_line(d, line, number, path, error);
    }
    if (result != REPORT_OK) return result;
    if (number == 0 || (number == 1 && !d->title))
        return report_fail(error, REPORT_ERR_VERSION, "%s has no complete line: pass the "
                           "metrics.jsonl of a run", path);
    if (report_find_falls(d) != REPORT_OK)
        return report_fail(error, REPORT_ERR_MEMORY, "%s: out of memory", path);
    d->is_cut = line != d->memory + size;
    if (!d->is_cut) return REPORT_OK;
    return report_fail(error, REPORT_ERR_CUT, "%s ends within line %ld: all before it is shown. "
                       "Continue the run, or remove that line", path, number);
}

/* ==== The page ======================================================================
 *
 * Drawings are 400 units wide, the width of a phone and a third of a desktop's, so text has the same
 * size on both. A shape, a place or a number repeats the information of each colour.
 */
enum { REPORT_LEFT = 46, REPORT_RIGHT = 390, REPORT_COLUMNS = 48, REPORT_SHADES = 8 };

/* A drawing that is being written: its frame, and the range of its axes. */
typedef struct report_axes {
    FILE  *f;
    double x_last, top, bottom, low, high;
} report_axes;

static int report_is_there(double v) { return v > REPORT_NONE || v < REPORT_NONE; }
/* The difference of two numbers beyond REPORT_NONE may overflow, so they count as not finite. */
static int report_is_finite(double v) { return fabs(v) < -REPORT_NONE; }

static double report_value(const report_point *p, size_t field) {
    double v;
    memcpy(&v, (const char *)p + field, sizeof v);
    return v;
}

#define REPORT_FIELD(name) offsetof(report_point, name)

static double report_x(const report_axes *a, double step) {
    double last = a->x_last > 0 ? a->x_last : 1;
    return (double)REPORT_LEFT + (double)(REPORT_RIGHT - REPORT_LEFT) * step / last;
}

static double report_y(const report_axes *a, double value) {
    double range = a->high > a->low ? a->high - a->low : 1;
    if (value > a->high) value = a->high;
    if (value < a->low) value = a->low;
    return a->bottom - (a->bottom - a->top) * (value - a->low) / range;
}

static void report_escape(FILE *f, const char *text) {
    for (; *text; text++) {
        if (*text == '<') fputs("&lt;", f);
        else if (*text == '>') fputs("&gt;", f);
        else if (*text == '&') fputs("&amp;", f);
        else if (*text == '"') fputs("&quot;", f);
        else fputc(*text, f);
    }
}

static void report_label(const report_axes *a, double x, double y, const char *anchor,
                         const char *format, ...) {
    char    text[200];
    va_list args;
    va_start(args, format);
    report_vformat(text, sizeof text, format, args);
    va_end(args);
    report_print(a->f, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\">", x, y, anchor);
    report_escape(a->f, text);
    fputs("</text>", a->f);
}

/* Writes 1.5e4 as 15k, because labels have little space. */
static const char *report_short(double v, char *text) {
    if (fabs(v) >= 1e9 || (v > 0 && v < 1e-3)) report_format(text, 24, "%.1e", v);
    else if (fabs(v) >= 1e6) report_format(text, 24, "%.4gM", v / 1e6);
    else if (fabs(v) >= 1e4) report_format(text, 24, "%.4gk", v / 1e3);
    else report_format(text, 24, "%.4g", v);
    return text;
}

/* A round distance of marks: 1, 2 or 5 times a power of ten. */
static double report_mark_distance(double range, int marks) {
    double raw = range / marks, power;
    if (!(raw > 0)) return 1;
    power = pow(10, floor(log10(raw)));
    if (raw <= power) return power;
    if (raw <= 2 * power) return 2 * power;
    return raw <= 5 * power ? 5 * power : 10 * power;
}

/* Axis titles: above the axis of values, below the axis of steps. */
static void report_y_title(const report_axes *a, const char *title)
{ report_label(a, 4, a->top - 11, "start", "%s", title); }

static void report_x_title(const report_axes *a)
{ report_label(a, (REPORT_LEFT + REPORT_RIGHT) / 2.0, a->bottom + 32, "middle", "step of training"); }

static void report_x_marks(const report_axes *a) {
    double each = report_mark_distance(a->x_last, 4), at;
    char   text[24];
    for (at = 0; at <= a->x_last; at += each)
        report_label(a, report_x(a, at), a->bottom + 16, at > 0.95 * a->x_last ? "end" : "middle",
                     "%s", report_short(at, text));
    report_x_title(a);
    report_print(a->f, "<path class=\"axis\" d=\"M%d %.1fH%d\"/>", REPORT_LEFT, a->bottom, REPORT_RIGHT);
}

static void report_y_mark(const report_axes *a, double value, const char *text) {
    double y = report_y(a, value);
    report_print(a->f, "<path class=\"grid\" d=\"M%d %.1fH%d\"/>", REPORT_LEFT, y, REPORT_RIGHT);
    report_label(a, REPORT_LEFT - 5, y + 4, "end", "%s", text);
}

static void report_y_marks(const report_axes *a, int marks) {
    double each = report_mark_distance(a->high - a->low, marks), first = ceil(a->low / each), at;
    char   text[24];
    int    i;
    /* Counts marks: between huge values, the next mark may be the same double. */
    for (i = 0; i <= 3 * marks; i++) {
        at = (first + i) * each;
        if (!(at <= a->high + 1e-9 * each)) break;
        report_y_mark(a, at, report_short(fabs(at) < each / 2 ? 0 : at, text));
    }
}

/* Marks at powers of two or ten on a logarithmic axis. */
static void report_power_marks(const report_axes *a, int base, int marks) {
    int each = (int)ceil((a->high - a->low) / marks), at;
    if (each < 1) each = 1;
    for (at = (int)ceil(a->low); at <= a->high; at += each) {
        double y = report_y(a, at);
        report_print(a->f, "<path class=\"grid\" d=\"M%d %.1fH%d\"/>", REPORT_LEFT, y, REPORT_RIGHT);
        report_print(a->f, "<text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">%d<tspan dy=\"-5\" "
                "font-size=\"9\">%d</tspan></text>", REPORT_LEFT - 5, y + 4, base, at);
    }
}

/* The position of a value on the axis: the value, or its logarithm. */
static double report_measure(double v, int base)
{ return base == 0 ? v : v > 0 ? log(v) / log((double)base) : -1000; }

static void report_range(const report_data *d, report_axes *a, size_t field, int base) {
    int i;
    for (i = 0; i < d->n_points; i++) {
        double v = report_value(&d->points[i], field);
        if (!report_is_finite(v) || (base && v <= 0)) continue;
        v = report_measure(v, base);
        if (v < a->low) a->low = v;
        if (v > a->high) a->high = v;
    }
}

/* A line through a field's values. Values at the same place are drawn as their minimum and maximum.
 * A non-finite value breaks the line. Powers of two are drawn as steps. */
static void report_line(const report_data *d, const report_axes *a, size_t field, int base,
                        const char *style) {
    const char *pen = "M";
    int         i;
    report_print(a->f, "<path class=\"%s\" d=\"", style);
    for (i = 0; i < d->n_points;) {
        double x = report_x(a, d->points[i].step), least = HUGE_VAL, most = -HUGE_VAL;
        int    broken = 0;
        for (; i < d->n_points && report_x(a, d->points[i].step) < x + 0.7; i++) {
            double v = report_value(&d->points[i], field);
            if (!report_is_there(v)) continue;
            if (!report_is_finite(v)) { broken = 1; continue; }
            v = report_measure(v, base);
            if (v < least) least = v;
            if (v > most) most = v;
        }
        if (broken) pen = "M";
        if (least > most) continue;
        if (base == 2 && *pen == 'L') report_print(a->f, "H%.1f", x);    /* the value holds until then */
        report_print(a->f, "%s%.1f %.1f", pen, x, report_y(a, least));
        if (report_y(a, least) - report_y(a, most) > 0.5)
            report_print(a->f, "L%.1f %.1f", x, report_y(a, most));
        pen = "L";
    }
    fputs("\"/>", a->f);
}

/* A diamond on the upper edge where a value was Inf or NaN, at most one per place. */
static void report_nan_marks(const report_data *d, const report_axes *a, size_t field) {
    double before = -10;
    int    i;
    fputs("<path class=\"gap\" d=\"", a->f);
    for (i = 0; i < d->n_points; i++) {
        double v = report_value(&d->points[i], field), x = report_x(a, d->points[i].step);
        if (!report_is_there(v) || report_is_finite(v) || x < before + 5) continue;
        report_print(a->f, "M%.1f %.1fl4.5 4.5l-4.5 4.5l-4.5 -4.5z", x, a->top - 4.5);
        before = x;
    }
    fputs("\"/>", a->f);
}

static int report_count_nan(const report_data *d, size_t field) {
    int i, n = 0;
    for (i = 0; i < d->n_points; i++) {
        double v = report_value(&d->points[i], field);
        n += report_is_there(v) && !report_is_finite(v);
    }
    return n;
}

/* The legend of the diamonds, if there is one. */
static const char *report_nan_key(int n, char *text, size_t space) {
    text[0] = '\0';
    if (n)
        report_format(text, space, " &nbsp; <svg class=\"box\" viewBox=\"0 0 13 10\"><path class=\"gap\" "
                 "d=\"M6.5 0l5 5-5 5-5-5z\"/></svg> Inf or NaN (%d)", n);
    return text;
}

/* Every value of a field, as a dot. */
static void report_dots(const report_data *d, const report_axes *a, size_t field,
                        const char *style) {
    int i, n = 0, each;
    for (i = 0; i < d->n_points; i++)
        n += report_is_finite(report_value(&d->points[i], field));
    each = n / 60 + 1;
    for (i = n = 0; i < d->n_points; i++) {
        double v = report_value(&d->points[i], field);
        if (!report_is_finite(v) || n++ % each) continue;
        report_print(a->f, "<circle class=\"%s\" cx=\"%.1f\" cy=\"%.1f\" r=\"2.6\"/>", style,
                report_x(a, d->points[i].step), report_y(a, v));
    }
}

static int report_count(const report_data *d, report_kind kind) {
    int i, n = 0;
    for (i = 0; i < d->n_notes; i++) n += d->notes[i].kind == kind;
    return n;
}

static const report_note *report_newest(const report_data *d, report_kind kind) {
    int i;
    for (i = d->n_notes - 1; i >= 0; i--)
        if (d->notes[i].kind == kind) return &d->notes[i];
    return NULL;
}

/* A cross over each skipped step, at most one per place. */
static void report_skip_marks(const report_data *d, const report_axes *a) {
    double before = -10;
    int    i;
    fputs("<path class=\"skip\" d=\"", a->f);
    for (i = 0; i < d->n_notes; i++) {
        double x = report_x(a, d->notes[i].step), y = a->top - 8;
        if (d->notes[i].kind != REPORT_SKIP || x < before + 3) continue;
        report_print(a->f, "M%.1f %.1fl7 7m0-7l-7 7M%.1f %.1fV%.1f", x - 3.5, y - 3.5, x, y + 6,
                a->bottom);
        before = x;
    }
    fputs("\"/>", a->f);
}

/* --- panels --- */

static void report_panel(FILE *f, const char *title, const char *key, int height,
                         const char *alt) {
    report_print(f, "<section><h2>%s</h2><p>%s</p><svg viewBox=\"0 0 400 %d\" role=\"img\" "
            "aria-label=\"%s\">", title, key, height, alt);
}

static void report_panel_end(FILE *f) { fputs("</svg></section>\n", f); }

static void report_empty(FILE *f, const char *title, const char *why) {
    report_print(f, "<section><h2>%s</h2><p class=\"none\">%s</p></section>\n", title, why);
}

static report_axes report_frame(const report_data *d, FILE *f, double top, double bottom) {
    report_axes a;
    a.f = f;
    a.x_last = d->last;
    a.top = top;
    a.bottom = bottom;
    a.low = HUGE_VAL;
    a.high = -HUGE_VAL;
    return a;
}

static void report_pad(report_axes *a) {
    double range;
    if (a->low > a->high) a->low = a->high = 0;
    range = a->high - a->low;
    if (!(range > 0)) range = fabs(a->high) > 0 ? fabs(a->high) : 1;
    a->low -= 0.05 * range;
    a->high += 0.05 * range;
}

static void report_draw_loss(const report_data *d, FILE *f) {
    report_axes a = report_frame(d, f, 28, 200);
    int         bad = report_count_nan(d, REPORT_FIELD(loss)) + report_count_nan(d, REPORT_FIELD(val));
    char        key[600], nan[200];
    report_format(key, sizeof key, "<svg class=\"key\" viewBox=\"0 0 26 10\"><path class=\"one\" d=\"M0 "
             "5H26\"/></svg> training &nbsp; <svg class=\"key\" viewBox=\"0 0 26 10\"><path "
             "class=\"two\" d=\"M0 5H26\"/><circle class=\"dot\" cx=\"13\" cy=\"5\" "
             "r=\"2.6\"/></svg> validation%s", report_nan_key(bad, nan, sizeof nan));
    report_panel(f, "Loss", key, 240, "Training and validation loss by step");
    report_y_title(&a, "loss");
    report_range(d, &a, REPORT_FIELD(loss), 0);
    report_range(d, &a, REPORT_FIELD(val), 0);
    report_pad(&a);
    report_y_marks(&a, 4);
    report_x_marks(&a);
    report_line(d, &a, REPORT_FIELD(loss), 0, "one");
    report_line(d, &a, REPORT_FIELD(val), 0, "two");
    report_dots(d, &a, REPORT_FIELD(val), "dot");
    report_nan_marks(d, &a, REPORT_FIELD(loss));
    report_nan_marks(d, &a, REPORT_FIELD(val));
    report_panel_end(f);
}

static void report_draw_scale(const report_data *d, FILE *f) {
    report_axes a = report_frame(d, f, 34, 200);
    int         skips = report_count(d, REPORT_SKIP);
    char        key[200];
    report_format(key, sizeof key, "<svg class=\"key\" viewBox=\"0 0 26 10\"><path class=\"one\" "
             "d=\"M0 5H26\"/></svg> scale &nbsp; <svg class=\"key\" viewBox=\"0 0 26 10\"><path "
             "class=\"skip\" d=\"M9 1l8 8m0-8l-8 8\"/></svg> skipped step (%d)", skips);
    report_range(d, &a, REPORT_FIELD(scale), 2);
    if (a.low > a.high) { report_empty(f, "Loss scale", "No loss scale was used."); return; }
    report_panel(f, "Loss scale", key, 240, "Loss scale by step, with skipped steps marked");
    report_label(&a, 4, 14, "start", "factor, powers of 2");
    a.low = floor(a.low) - 1;
    a.high = ceil(a.high) + 1;
    report_power_marks(&a, 2, 6);
    report_x_marks(&a);
    report_line(d, &a, REPORT_FIELD(scale), 2, "one");
    report_skip_marks(d, &a);
    report_panel_end(f);
}

static void report_draw_norm(const report_data *d, FILE *f) {
    report_axes a = report_frame(d, f, 28, 128), clip = report_frame(d, f, 164, 200);
    char        key[300], nan[200];
    report_range(d, &a, REPORT_FIELD(norm), 10);
    if (a.low > a.high) { report_empty(f, "Gradient norm", "No norm was logged."); return; }
    report_format(key, sizeof key, "above: the norm before clipping &nbsp; below: the factor of clipping"
                  "%s", report_nan_key(report_count_nan(d, REPORT_FIELD(norm)), nan, sizeof nan));
    report_panel(f, "Gradient norm and clipping", key, 240, "Gradient norm and clip coefficient by step");
    report_y_title(&a, "L2 norm, powers of 10");
    report_y_title(&clip, "clip coefficient, 1 = unclipped");
    a.low = floor(a.low);
    a.high = ceil(a.high);
    if (a.high <= a.low) a.high = a.low + 1;
    report_power_marks(&a, 10, 4);
    report_line(d, &a, REPORT_FIELD(norm), 10, "one");
    report_nan_marks(d, &a, REPORT_FIELD(norm));
    clip.low = 0;
    clip.high = 1.05;
    report_y_mark(&clip, 0, "0");
    report_y_mark(&clip, 1, "1");
    report_x_marks(&clip);
    report_line(d, &clip, REPORT_FIELD(clip), 0, "two");
    report_panel_end(f);
}

/* --- heat maps: rows of cells; a larger share is darker (on a dark page: lighter) --- */

/* The shade of a share: 1 for 0.03 %, 8 for 100 %. */
static int report_shade(double share) {
    double shade = 8.5 + 2 * log10(share > 0 ? share : 1e-9);
    if (!(share >= 3e-4)) return 0;
    return shade > (double)REPORT_SHADES ? REPORT_SHADES : shade < 1 ? 1 : (int)shade;
}

/* Cells as one path for each shade: cell[column * rows + row] are shares. */
static void report_cells(const report_axes *a, const double *cell, int columns, int rows) {
    double w = (double)(REPORT_RIGHT - REPORT_LEFT - 44) / columns, h = (a->bottom - a->top) / rows;
    int    shade, c, r;
    for (shade = 1; shade <= REPORT_SHADES; shade++) {
        report_print(a->f, "<path class=\"heat\" fill-opacity=\"%.2f\" d=\"",
                0.05 + 0.95 * pow((double)shade / (double)REPORT_SHADES, 1.3));
        for (c = 0; c < columns; c++)
            for (r = 0; r < rows; r++)
                if (report_shade(cell[c * rows + r]) == shade)
                    report_print(a->f, "M%.1f %.1fh%.1fv%.1fh-%.1fz", (double)REPORT_LEFT + c * w,
                            a->top + r * h, w + 0.1, h + 0.1, w + 0.1);
        fputs("\"/>", a->f);
    }
}

#define REPORT_HEAT_BOX(opacity) \
    "<svg class=\"box\" viewBox=\"0 0 13 10\"><path class=\"heat\" fill-opacity=\"" opacity \
    "\" d=\"M0 0h13v10h-13z\"/></svg> "
#define REPORT_HEAT_KEY \
    REPORT_HEAT_PAIR(".2", "0.1%") " " REPORT_HEAT_PAIR(".44", "1%") " " \
    REPORT_HEAT_PAIR(".7", "10%")
/* Keeps a colour and its label on one line. */
#define REPORT_HEAT_PAIR(opacity, text) \
    "<span class=\"pair\">" REPORT_HEAT_BOX(opacity) text "</span>"

/* The steps under the first column and the last. */
static void report_heat_steps(const report_axes *a, double first, double last) {
    char text[24];
    report_label(a, REPORT_LEFT, a->bottom + 16, "start", "step %s", report_short(first, text));
    report_label(a, REPORT_RIGHT - 44, a->bottom + 16, "end", "step %s", report_short(last, text));
    report_label(a, (REPORT_LEFT + REPORT_RIGHT - 44) / 2.0, a->bottom + 16, "middle", "of training");
}

enum { REPORT_LOWEST = -44, REPORT_HIGHEST = 19, REPORT_ROWS = REPORT_HIGHEST - REPORT_LOWEST + 1 };

static void report_add_exponents(double *column, const report_note *n, double weight) {
    int i;
    for (i = 0; i < n->bins; i++) {
        int e = n->first + i;
        if (e < REPORT_LOWEST) e = REPORT_LOWEST;
        if (e > REPORT_HIGHEST) e = REPORT_HIGHEST;
        column[REPORT_HIGHEST - e] += report_is_finite(n->share[i]) ? weight * n->share[i] : 0;
    }
}

/* Where a power of two lies on the map: the lower edge of its row. */
static double report_exponent_y(const report_axes *a, int e)
{ return a->top + (a->bottom - a->top) * (REPORT_HIGHEST - e + 1) / (double)REPORT_ROWS; }

/* Text on top of cells. */
static void report_halo(const report_axes *a, double x, double y, const char *text)
{ report_print(a->f, "<text class=\"on\" x=\"%.1f\" y=\"%.1f\">%s</text>", x, y, text); }

static void report_half_range(const report_axes *a) {
    static const struct { int e; const char *name; } lines[] = {
        { 16, "65504" }, { -14, "6e-5" }, { -24, "6e-8" } };
    double right = REPORT_RIGHT - 44;
    int    i;
    report_print(a->f, "<path class=\"out\" d=\"M%d %.1fH%.1fV%.1fH%dzM%d %.1fH%.1fV%.1fH%dz\"/>",
            REPORT_LEFT, a->top, right, report_exponent_y(a, 16), REPORT_LEFT, REPORT_LEFT,
            report_exponent_y(a, -24), right, a->bottom, REPORT_LEFT);
    for (i = 0; i < 3; i++) {
        double y = report_exponent_y(a, lines[i].e);
        report_print(a->f, "<path class=\"limit\" d=\"M%d %.1fH%.1f\"/>", REPORT_LEFT, y, right + 4);
        report_label(a, right + 6, y + 4, "start", "%s", lines[i].name);
    }
    report_halo(a, REPORT_LEFT + 5, report_exponent_y(a, 16) - 3, "overflows");
    report_halo(a, REPORT_LEFT + 5, report_exponent_y(a, -19) + 4, "loses bits");
    report_halo(a, REPORT_LEFT + 5, report_exponent_y(a, -30) + 4, "becomes zero");
    for (i = -40; i <= 10; i += 10)
        report_print(a->f, "<text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">2<tspan dy=\"-5\" "
                "font-size=\"9\">%d</tspan></text>", REPORT_LEFT - 5, report_exponent_y(a, i) + 4,
                i);
}

static void report_draw_exponents(const report_data *d, FILE *f) {
    report_axes a = report_frame(d, f, 24, 276);
    int         n = report_count(d, REPORT_EXPONENTS), i, k = 0;
    int         columns = n < REPORT_COLUMNS ? n : REPORT_COLUMNS;
    double     *cell, first = 0, last = 0;
    if (n == 0) {
        report_empty(f, "Gradients by magnitude", "No exponents were counted.");
        return;
    }
    cell = (double *)calloc((size_t)columns * REPORT_ROWS, sizeof *cell);
    if (!cell) return;
    for (i = 0; i < d->n_notes; i++) {
        const report_note *note = &d->notes[i];
        int                c = (int)((double)k * columns / n), next;
        if (note->kind != REPORT_EXPONENTS) continue;
        next = (n + columns - 1) / columns;
        report_add_exponents(cell + c * REPORT_ROWS, note, 1.0 / next);
        if (k++ == 0) first = note->step;
        last = note->step;
    }
    report_panel(f, "Gradients by magnitude", "gradients times the loss scale; share of values: "
                 REPORT_HEAT_KEY, 300, "Histogram of the exponents of gradients over time, with "
                 "the range of fp16");
    report_y_title(&a, "size of a gradient, powers of 2");
    report_cells(&a, cell, columns, REPORT_ROWS);
    report_half_range(&a);
    report_heat_steps(&a, first, last);
    report_panel_end(f);
    free(cell);
}

/* --- underflow by layer --- */

enum { REPORT_LAYERS = 40, REPORT_NAME = 24 };

/* "transformer.h.3.mlp.w" belongs to layer h.3, "transformer.wte.weight" to wte. */
static void report_layer_of(const char *name, char *layer) {
    const char *part = name, *before = name, *last = strrchr(name, '.');
    for (; part; before = part, part = strchr(part, '.') ? strchr(part, '.') + 1 : NULL) {
        size_t n = strspn(part, "0123456789");
        if (n > 0 && (part[n] == '.' || part[n] == '\0')) {
            report_format(layer, REPORT_NAME, "%.*s", (int)(part + n - before), before);
            return;
        }
    }
    for (part = name, before = name; last && part < last; part++)
        if (*part == '.') before = part + 1;
    report_format(layer, REPORT_NAME, "%.*s", last ? (int)(last - before) : 23, before);
}

/* The layers in the order of the log, and the flushed share of each layer at each sample. */
typedef struct report_layers {
    char    name[REPORT_LAYERS][REPORT_NAME];
    double *steps, *share;              /* share[sample * REPORT_LAYERS + layer]: largest */
    int     n, samples;
} report_layers;

static int report_find_layer(report_layers *l, const char *parameter) {
    char name[REPORT_NAME];
    int  i;
    report_layer_of(parameter, name);
    for (i = 0; i < l->n; i++)
        if (strcmp(l->name[i], name) == 0) return i;
    if (l->n == REPORT_LAYERS) return REPORT_LAYERS - 1;
    memcpy(l->name[l->n], name, sizeof name);
    return l->n++;
}

static void report_layers_free(report_layers *l) {
    free(l->steps);
    free(l->share);
}

static int report_layers_read(report_layers *l, const report_data *d) {
    int i, k, n = report_count(d, REPORT_PARAM);
    memset(l, 0, sizeof *l);
    l->steps = (double *)calloc((size_t)n + 1, sizeof *l->steps);
    l->share = (double *)calloc(((size_t)n + 1) * REPORT_LAYERS, sizeof *l->share);
    if (!l->steps || !l->share) n = 0;
    for (i = 0; n && i < d->n_notes; i++) {
        const report_note *note = &d->notes[i];
        double            *at;
        if (note->kind != REPORT_PARAM) continue;
        if (!l->samples || l->steps[l->samples - 1] < note->step)
            l->steps[l->samples++] = note->step;
        k = report_find_layer(l, note->text);
        at = &l->share[(l->samples - 1) * REPORT_LAYERS + k];
        if (note->flushed > *at) *at = note->flushed;
    }
    return n > 0;
}

static void report_draw_layers(const report_layers *l, report_axes *a) {
    int     columns = l->samples < REPORT_COLUMNS ? l->samples : REPORT_COLUMNS, c, r;
    double *cell = (double *)calloc((size_t)(columns * l->n), sizeof *cell), most = 0, share;
    for (c = 0; cell && c < l->samples; c++)
        for (r = 0; r < l->n; r++) {
            double *to = &cell[(int)((double)c * columns / l->samples) * l->n + r];
            double  v = l->share[c * REPORT_LAYERS + r];
            if (v > *to) *to = v;
            if (v > most) most = v;
        }
    if (cell) report_cells(a, cell, columns, l->n);
    if (most < 5e-5)
        report_label(a, (REPORT_LEFT + REPORT_RIGHT - 44) / 2.0, (a->top + a->bottom) / 2 + 4,
                     "middle", "nothing was flushed to zero");
    for (r = 0; r < l->n; r++) {
        double y = a->top + (r + 0.5) * (a->bottom - a->top) / l->n + 4;
        report_label(a, REPORT_LEFT - 5, y, "end", "%.6s", l->name[r]);
        share = 100 * l->share[(l->samples - 1) * REPORT_LAYERS + r];
        report_label(a, REPORT_RIGHT, y, "end", share > 0 && share < 0.1 ? "<0.1%%" : "%.2g%%",
                     share);
    }
    free(cell);
}

static void report_draw_underflow(const report_data *d, FILE *f) {
    report_axes   a = report_frame(d, f, 24, 0);
    report_layers l;
    if (!report_layers_read(&l, d)) {
        report_empty(f, "Underflow by layer", "No gradients were counted.");
        report_layers_free(&l);
        return;
    }
    a.bottom = a.top + (l.n < 8 ? 22 : 16) * l.n;
    report_panel(f, "Underflow by layer", "share of a layer's worst gradient that becomes 0 in fp16: "
                 REPORT_HEAT_KEY "; right: the last sample", (int)a.bottom + 24,
                 "Share of gradients flushed to zero, by layer and step");
    report_y_title(&a, "layer");
    report_label(&a, REPORT_RIGHT, a.top - 11, "end", "newest");
    report_print(f, "<path class=\"frame\" d=\"M%d %.1fH%dV%.1fH%dz\"/>", REPORT_LEFT, a.top,
            REPORT_RIGHT - 44, a.bottom, REPORT_LEFT);
    report_draw_layers(&l, &a);
    report_heat_steps(&a, l.steps[0], l.steps[l.samples - 1]);
    report_panel_end(f);
    report_layers_free(&l);
}

/* --- sites that fell back --- */

static void report_draw_fall(const report_data *d, const report_axes *a, int i, double y) {
    const report_note *n = &d->notes[i];
    double             end = n->end, x0 = report_x(a, n->step);
    double             x1 = report_x(a, end < 0 ? d->last : end), wide;
    char               step[24], text[120];
    if (x1 < x0 + 3) x1 = x0 + 3;
    report_label(a, 4, y, "start", "%.56s", n->site);
    report_print(a->f, "<path class=\"fall\" d=\"M%.1f %.1fH%.1fv9H%.1fz\"/>", x0, y + 7, x1, x0);
    report_print(a->f, "<path class=\"mark\" d=\"M%.1f %.1fl-5 9h10z\"/>", x0, y + 7);
    report_format(text, sizeof text, "%.60s at step %s%s", n->text, report_short(n->step, step),
             end < 0 ? "; still f32" : "");
    wide = 7.0 * (double)strlen(text);          /* at most, at this size of type */
    if (x0 + 8 + wide > (double)REPORT_RIGHT)
        x0 = x0 - wide - 8 < 4 ? (double)REPORT_RIGHT - wide - 8 : x0 - wide - 16;
    report_label(a, x0 + 8, y + 30, "start", "%s", text);
}

static void report_draw_sites(const report_data *d, FILE *f) {
    enum { MOST = 12, ROW = 50 };
    report_axes a = report_frame(d, f, 0, 0);
    int         i, n = 0, more = 0;
    for (i = 0; i < d->n_notes; i++) n += d->notes[i].begins;
    if (n == 0) {
        report_empty(f, "Sites that fell back", "None: every site stored the dtype of autocast.");
        return;
    }
    more = n > MOST ? n - MOST : 0;
    a.bottom = 10 + ROW * (n - more);
    report_panel(f, "Sites that fell back", "values that do not fit fp16 are stored in f32 until they fit "
                 "&nbsp; bar: in f32 &nbsp; triangle: where that began",
                 (int)a.bottom + (more ? 66 : 50), "Sites that fell back to f32, and when");
    for (i = n = 0; i < d->n_notes && n < MOST; i++)
        if (d->notes[i].begins) report_draw_fall(d, &a, i, 16 + ROW * n++);
    if (more) report_label(&a, 4, a.bottom + 52, "start", "and %d more", more);
    report_x_marks(&a);
    report_panel_end(f);
}

/* --- time and memory --- */

static double report_parts_total(const report_data *d, report_kind kind, int *n) {
    const report_note *newest = report_newest(d, kind);
    double             total = 0;
    int                i;
    *n = 0;
    for (i = 0; newest && i < d->n_notes; i++)
        if (d->notes[i].kind == kind && d->notes[i].step >= newest->step) {
            total += d->notes[i].amount;
            ++*n;
        }
    return total;
}

/* Time in ms, memory in MiB or GiB. */
static void report_amount(report_kind kind, double amount, char *text, size_t space) {
    if (kind == REPORT_COST) report_format(text, space, "%.4g ms", amount);
    else if (amount < 1e10) report_format(text, space, "%.4g MiB", amount / 1048576);
    else report_format(text, space, "%.4g GiB", amount / 1073741824);
}

static double report_draw_parts(const report_data *d, const report_axes *a, report_kind kind,
                                double y) {
    int    i, n;
    double total = report_parts_total(d, kind, &n), step = n ? report_newest(d, kind)->step : 0;
    double most = 0;
    char   text[32];
    if (n == 0) return y;
    for (i = 0; i < d->n_notes; i++)
        if (d->notes[i].kind == kind && d->notes[i].step >= step && d->notes[i].amount > most)
            most = d->notes[i].amount;
    report_amount(kind, total, text, sizeof text);
    report_label(a, 4, y + 12, "start", "%s: %s", kind == REPORT_COST ? "a step" : "memory", text);
    y += 20;
    for (i = 0; i < d->n_notes; i++) {
        const report_note *p = &d->notes[i];
        double             w = most > 0 ? 160 * p->amount / most : 0;
        if (p->kind != kind || p->step < step) continue;
        report_label(a, 150, y + 12, "end", "%.*s", (int)strcspn(p->text, ","), p->text);
        report_print(a->f, "<path class=\"part\" d=\"M156 %.1fh%.1fv13h-%.1fz\"/>", y + 1.5, w, w);
        if (kind == REPORT_MEMORY) report_amount(kind, p->amount, text, sizeof text);
        else report_format(text, sizeof text, "%.0f%%", 100 * p->amount / (total > 0 ? total : 1));
        report_label(a, 162 + w, y + 12, "start", "%s", text);
        y += 19;
    }
    return y + 8;
}

static void report_draw_cost(const report_data *d, FILE *f) {
    report_axes a = report_frame(d, f, 0, 0);
    int         times, parts;
    double      y;
    report_parts_total(d, REPORT_COST, &times);
    report_parts_total(d, REPORT_MEMORY, &parts);
    if (times + parts == 0) {
        report_empty(f, "Where a step went", "Time and memory are written when a run ends.");
        return;
    }
    report_panel(f, "Where a step went", "time, and memory at its peak",
                 19 * (times + parts) + 28 * 2, "Time and memory of a step by part");
    y = report_draw_parts(d, &a, REPORT_COST, 0);
    report_draw_parts(d, &a, REPORT_MEMORY, y);
    report_panel_end(f);
}

/* --- a run's results --- */

typedef struct report_total {
    double first, loss, val, best, best_step, scale, ms, skipped, last_skip, worst;
    double begun, tokens, seconds;      /* the first time since 1970; tokens, and seconds of training */
    char   worst_layer[REPORT_NAME];
    const report_note *run;             /* the last process; NULL: not logged */
    const char *why;                    /* of the last skip */
    const char *ended;                  /* by which error; "" for a run that did not fail */
    double ended_at;                    /* the step of that error */
    int    is_bad;                      /* 1: the last loss is Inf or NaN */
    int    fell, still;                 /* sites */
    double clipped, factor;             /* share of the steps that were logged; mean factor of those */
} report_total;

static void report_add_point(report_total *t, const report_point *p) {
    if (report_is_there(p->loss)) t->is_bad = !report_is_finite(p->loss);
    if (report_is_finite(p->loss)) {
        if (!report_is_there(t->first)) t->first = p->loss;
        t->loss = p->loss;
    }
    if (report_is_finite(p->val)) {
        t->val = p->val;
        if (!report_is_there(t->best) || p->val < t->best) {
            t->best = p->val;
            t->best_step = p->step;
        }
    }
    if (report_is_finite(p->scale)) t->scale = p->scale;
    if (report_is_finite(p->skipped)) t->skipped = p->skipped;
    if (report_is_finite(p->ms) && p->ms > 0) t->ms = p->ms;
    if (report_is_finite(p->time) && !report_is_there(t->begun)) t->begun = p->time;
    if (report_is_finite(p->tokens)) t->tokens = p->tokens;
    if (report_is_finite(p->seconds)) t->seconds = p->seconds;
}

static report_total report_sum(const report_data *d) {
    report_total  t;
    report_layers l;
    int           i, norms = 0, clipped = 0;
    double        powers = 0;
    memset(&t, 0, sizeof t);
    t.first = t.loss = t.val = t.best = t.scale = t.ms = t.worst = t.begun = t.tokens = t.seconds = REPORT_NONE;
    t.why = t.ended = "";
    for (i = 0; i < d->n_points; i++) {
        report_add_point(&t, &d->points[i]);
        norms += report_is_finite(d->points[i].clip);
        if (!report_is_finite(d->points[i].clip) || d->points[i].clip >= 1) continue;
        clipped++;
        powers -= log(d->points[i].clip > 1e-30 ? d->points[i].clip : 1e-30);
    }
    t.clipped = norms ? (double)clipped / norms : 0;
    t.factor = clipped ? exp(powers / clipped) : 1;
    for (i = 0; i < d->n_notes; i++) {
        if (d->notes[i].kind == REPORT_SKIP) {
            t.last_skip = d->notes[i].step;
            t.why = d->notes[i].text;
        }
        if (d->notes[i].kind == REPORT_EVENT && strcmp(d->notes[i].text, "ended") == 0 && d->notes[i].step >= d->last) {
            t.ended = d->notes[i].site;
            t.ended_at = d->notes[i].step;
        }
        if (d->notes[i].kind == REPORT_RUN) t.run = &d->notes[i];
        t.fell += d->notes[i].begins;
        t.still += d->notes[i].begins && d->notes[i].end < 0;
    }
    if (report_newest(d, REPORT_COST)) t.ms = report_parts_total(d, REPORT_COST, &i);
    if (t.skipped < report_count(d, REPORT_SKIP)) t.skipped = report_count(d, REPORT_SKIP);
    if (report_layers_read(&l, d))
        for (i = 0; i < l.n; i++) {
            double v = l.share[(l.samples - 1) * REPORT_LAYERS + i];
            if (v <= t.worst) continue;
            t.worst = v;
            memcpy(t.worst_layer, l.name[i], REPORT_NAME);
        }
    report_layers_free(&l);
    return t;
}

static void report_tile(FILE *f, const char *what, const char *format, ...) {
    char    text[200];
    va_list args;
    va_start(args, format);
    report_vformat(text, sizeof text, format, args);
    va_end(args);
    report_print(f, "<div><dt>%s</dt><dd>", what);
    report_escape(f, text);
    fputs("</dd></div>", f);
}

/* What was run: when it began, the weights, the tokens and their rate. */
static void report_tiles_of_run(const report_total *t, FILE *f) {
    char   text[24];
    time_t begun = (time_t)(report_is_there(t->begun) && fabs(t->begun) < 1e11 ? t->begun : 0);
    if (begun && strftime(text, sizeof text, "%Y-%m-%d %H:%M", gmtime(&begun))) report_tile(f, "begun, UTC", "%s", text);
    if (t->run && report_is_there(t->run->amount)) report_tile(f, "weights", "%s", report_short(t->run->amount, text));
    if (report_is_there(t->tokens)) report_tile(f, "tokens", "%s", report_short(t->tokens, text));
    if (report_is_there(t->tokens) && t->seconds > 0)
        report_tile(f, "tokens a second", "%s", report_short(t->tokens / t->seconds, text));
}

static void report_tiles(const report_data *d, FILE *f) {
    report_total t = report_sum(d);
    char         text[24];
    if (t.run) {
        fputs("<p class=\"run\"><code>", f);
        report_escape(f, t.run->text);
        fputs("</code></p>\n", f);
    }
    if (t.ended[0]) {
        report_print(f, "<p class=\"cut\">Ended by an error at step %.0f: ", t.ended_at);
        report_escape(f, t.ended);
        fputs("</p>\n", f);
    }
    fputs("<dl>", f);
    report_tile(f, "steps", "%s", report_short(d->last, text));
    if (t.is_bad && report_is_there(t.loss)) report_tile(f, "loss", "not finite; before: %.4g", t.loss);
    else if (t.is_bad) report_tile(f, "loss", "not finite");
    else if (report_is_there(t.loss)) report_tile(f, "loss", "%.4g", t.loss);
    if (report_is_there(t.best)) report_tile(f, "best validation", "%.4g", t.best);
    if (report_is_there(t.scale)) report_tile(f, "loss scale", "%.8g", t.scale);
    report_tile(f, "skipped", "%.0f (%.2g%%)", t.skipped,
                d->last > 0 ? 100 * t.skipped / d->last : 0);
    report_tile(f, "sites fell back", t.still ? "%d, of which %d store f32 now" : "%d", t.fell,
                t.still);
    if (report_is_there(t.worst))
        report_tile(f, "underflow, worst layer", t.worst < 5e-5 ? "none" : "%.2g%% %s",
                    100 * t.worst, t.worst_layer);
    if (report_is_there(t.ms)) report_tile(f, "a step", "%.4g ms", t.ms);
    report_tiles_of_run(&t, f);
    fputs("</dl>\n", f);
    if (!t.why[0]) return;
    report_print(f, "<p class=\"note\">Step %.0f was skipped, %s: ", t.last_skip,
            t.skipped > 1 ? "the newest of them" : "the only one");
    report_escape(f, t.why);
    fputs("</p>\n", f);
}

/* --- the numbers as a table, also for screen readers --- */

static void report_cell(FILE *f, double v, const char *format) {
    char text[40] = "";
    if (report_is_there(v)) report_format(text, sizeof text, report_is_finite(v) ? format : "Inf or NaN", v);
    report_print(f, "<td>%s</td>", text);
}

static void report_table_row(FILE *f, const report_point *p) {
    report_print(f, "<tr><th scope=\"row\">%.0f</th>", p->step);
    report_cell(f, p->loss, "%.5g");
    report_cell(f, p->val, "%.5g");
    report_cell(f, p->norm, "%.4g");
    report_cell(f, p->clip, "%.3g");
    report_cell(f, p->lr, "%.3g");
    report_cell(f, p->scale, "%.8g");
    report_cell(f, p->skipped, "%.0f");
    report_cell(f, p->ms, "%.4g");
    fputs("</tr>\n", f);
}

/* Rows chosen evenly; they include the last row. */
static void report_table(const report_data *d, FILE *f) {
    enum { ROWS = 60 };
    static const char *const heads[] = { "step", "training loss", "validation loss", "gradient norm",
        "clip coefficient", "learning rate", "loss scale", "skipped so far", "ms a step" };
    int i, n = d->n_points, each = (n + ROWS - 1) / ROWS;
    if (n == 0) return;
    fputs("<details><summary>The figures as a table</summary><div class=\"wide\"><table>\n"
          "<caption>What was logged", f);
    if (each > 1) report_print(f, ": one row of %d, and the last", each);
    fputs("</caption><thead><tr>", f);
    for (i = 0; i < 9; i++) report_print(f, "<th scope=\"col\">%s</th>", heads[i]);
    fputs("</tr></thead><tbody>\n", f);
    for (i = 0; i < n; i++)
        if (i % each == 0 || i == n - 1) report_table_row(f, &d->points[i]);
    fputs("</tbody></table></div></details>\n", f);
}

static void report_style(FILE *f) {
    fputs("<style>\n:root{color-scheme:light dark;--back:#fcfcfa;--card:#fff;--ink:#1d1d1b;"
          "--soft:#5d5d58;--line:#dededa;--one:#1f5fae;--two:#b4540a;--bad:#b3261e;"
          "--heat:#123f78}\n", f);
    fputs("@media(prefers-color-scheme:dark){:root{--back:#151517;--card:#1e1e21;--ink:#ececea;"
          "--soft:#a5a5a0;--line:#3a3a3e;--one:#7db4f5;--two:#f0a35e;--bad:#ff8a80;"
          "--heat:#9cc9ff}}\n", f);
    fputs("*{box-sizing:border-box}body{margin:0;padding:16px;background:var(--back);"
          "color:var(--ink);font:15px/1.45 system-ui,sans-serif}\n"
          "h1{font-size:1.3rem;margin:0}h2{font-size:1rem;margin:0}\n"
          "p{margin:2px 0 6px;color:var(--soft);font-size:.84rem}"
          "p.run{overflow-wrap:anywhere}p.note{font-size:.9rem;margin:0 0 12px}p.none{padding:24px 0}.pair{white-space:nowrap}\n"
          "p.cut{border:2px dashed var(--bad);padding:8px 12px;color:var(--ink);margin:8px 0}\n", f);
    fputs("main{columns:3 360px;column-gap:14px}\n"
          "section{break-inside:avoid;margin:0 0 14px;background:var(--card);border:1px solid var(--line);border-radius:8px;"
          "padding:10px 12px}\n"
          "dl{display:grid;gap:8px 16px;margin:12px 0;grid-template-columns:"
          "repeat(auto-fit,minmax(132px,1fr))}\n"
          "dl div{border-left:3px solid var(--one);padding-left:8px}"
          "dt{color:var(--soft);font-size:.8rem}dd{margin:0;font-size:1.05rem;"
          "font-variant-numeric:tabular-nums}\n", f);
    fputs("svg{display:block;width:100%;height:auto}svg.key{display:inline-block;width:26px;"
          "height:10px;vertical-align:baseline}svg.box{display:inline-block;width:13px;height:10px}\n"
          "text{fill:var(--soft);font:13px system-ui,sans-serif}text.on{fill:var(--ink);"
          "stroke:var(--card);stroke-width:3.5px;paint-order:stroke}\n"
          ".axis,.frame{stroke:var(--soft);fill:none}.grid{stroke:var(--line);fill:none}\n"
          ".one,.two{fill:none;stroke-width:1.8;stroke-linejoin:round}.one{stroke:var(--one)}"
          ".two{stroke:var(--two);stroke-dasharray:5 3}.dot{fill:var(--two)}\n"
          ".gap{fill:var(--bad)}details{margin:4px 0 14px}summary{cursor:pointer}.wide{overflow-x:auto}"
          "table{border-collapse:collapse;font-size:.84rem;font-variant-numeric:tabular-nums}"
          "caption{text-align:left;color:var(--soft);padding:6px 0}"
          "th,td{border-bottom:1px solid var(--line);padding:3px 10px;text-align:right}\n"
          ".skip{stroke:var(--bad);fill:none;stroke-width:1.3}.heat{fill:var(--heat)}"
          ".limit{stroke:var(--ink);stroke-dasharray:4 3;fill:none}.out{fill:url(#hatch)}"
          ".fall{fill:url(#stripe);stroke:var(--two)}.mark{fill:var(--bad)}"
          ".part{fill:var(--one)}\n</style>\n", f);
}

/* Patterns, which repeat the information of colours. */
static void report_patterns(FILE *f) {
    fputs("<svg width=\"0\" height=\"0\" style=\"position:absolute\" aria-hidden=\"true\"><defs>"
          "<pattern id=\"hatch\" width=\"7\" height=\"7\" patternUnits=\"userSpaceOnUse\" "
          "patternTransform=\"rotate(45)\"><path d=\"M0 0V7\" stroke=\"var(--soft)\" "
          "stroke-opacity=\".35\" stroke-width=\"1.6\"/></pattern>"
          "<pattern id=\"stripe\" width=\"5\" height=\"5\" patternUnits=\"userSpaceOnUse\" "
          "patternTransform=\"rotate(45)\"><path d=\"M0 0V5\" stroke=\"var(--two)\" "
          "stroke-width=\"3\"/></pattern></defs></svg>\n", f);
}

static void report_page(const report_data *d, FILE *f, const char *cut) {
    fputs("<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n"
          "<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\n<title>", f);
    report_escape(f, d->title[0] ? d->title : "A training run");
    fputs("</title>\n", f);
    report_style(f);
    fputs("</head><body>\n", f);
    report_patterns(f);
    fputs("<h1>", f);
    report_escape(f, d->title[0] ? d->title : "A training run");
    fputs("</h1><p>", f);
    report_escape(f, d->device);
    fputs("</p>\n", f);
    if (cut[0]) {
        fputs("<p class=\"cut\">Not whole: ", f);
        report_escape(f, cut);
        fputs("</p>\n", f);
    }
    report_tiles(d, f);
    fputs("<main>\n", f);
    report_draw_loss(d, f);
    report_draw_scale(d, f);
    report_draw_norm(d, f);
    report_draw_exponents(d, f);
    report_draw_underflow(d, f);
    report_draw_sites(d, f);
    report_draw_cost(d, f);
    fputs("</main>\n", f);
    report_table(d, f);
    fputs("</body></html>\n", f);
}

/* Writes a complete file beside `to`, then renames it to `to`. */
typedef void (*report_writer)(const report_data *d, FILE *f, const char *cut);

static report_result report_replace(const report_data *d, const char *to, const char *cut,
                                    report_writer write, char *error) {
    char  temporary[2048];
    FILE *f = plain_begin(to, temporary, sizeof temporary);
    if (f) write(d, f, cut);
    if (f && plain_end(f, temporary, to) == 0) return REPORT_OK;
    report_fail(error, REPORT_ERR_IO, "cannot write %s: %s", to, plain_error());
    return REPORT_ERR_IO;
}

static report_result report_convert(const char *path, const char *to, report_writer write,
                                    char *error) {
    char          message[REPORT_MESSAGE] = "";
    report_data   d;
    report_result result = report_read(&d, path, message), written = REPORT_OK;
    if (error) memcpy(error, message, sizeof message);
    if (result == REPORT_OK || result == REPORT_ERR_CUT)
        written = report_replace(&d, to, message, write, error);
    report_free(&d);
    return written != REPORT_OK ? written : result;
}

/* Renders the log at `path` as the page `html`, which is replaced atomically. REPORT_ERR_CUT: the
 * page is written from the complete lines of the log. Any other error: the page is not written. */
REPORT_API report_result report_render(const char *path, const char *html, char *error)
{ return report_convert(path, html, report_page, error); }

static void report_csv_table(const report_data *d, FILE *f, const char *cut) {
    static const char   names[] = "step,time,seconds,tokens,loss,val,train,norm,clip,lr,scale,skipped,ms,mem,mfu";
    static const size_t fields[] = { REPORT_FIELD(time), REPORT_FIELD(seconds), REPORT_FIELD(tokens),
        REPORT_FIELD(loss), REPORT_FIELD(val), REPORT_FIELD(train), REPORT_FIELD(norm),
        REPORT_FIELD(clip), REPORT_FIELD(lr), REPORT_FIELD(scale), REPORT_FIELD(skipped),
        REPORT_FIELD(ms), REPORT_FIELD(mem), REPORT_FIELD(mfu) };
    size_t k;
    int    i;
    (void)cut;
    report_print(f, "%s\n", names);
    for (i = 0; i < d->n_points; i++) {
        report_print(f, "%.0f", d->points[i].step);
        for (k = 0; k < sizeof fields / sizeof fields[0]; k++) {
            double v = report_value(&d->points[i], fields[k]);
            if (!report_is_there(v)) fputc(',', f);
            else if (report_is_finite(v)) report_print(f, ",%.15g", v);
            else fputs(",nan", f);
        }
        fputc('\n', f);
    }
}

/* Writes the steps of the log at `path` as the table `csv`. The first row has the names. An unknown
 * number is an empty field; Inf and NaN are nan. Errors: as report_render. */
REPORT_API report_result report_csv(const char *path, const char *csv, char *error)
{ return report_convert(path, csv, report_csv_table, error); }

/* ==== The same in a terminal ======================================================== */

/* The columns of report_summary's lines. */
static int report_columns = 79;

REPORT_API void report_set_columns(int columns)
{ report_columns = columns < 40 ? 40 : columns > 79 ? 79 : columns; }

/* Draws the latest values of a field, one character each, from '_' (smallest) to '#' (largest). */
static void report_spark(const report_data *d, size_t field, char *text, int width) {
    static const char marks[] = "_.:-=+*#";
    report_axes       a = report_frame(d, NULL, 0, 7.99);
    int               i, at;
    memset(text, ' ', (size_t)width);
    text[width] = '\0';
    report_range(d, &a, field, 0);
    for (i = 0; i < d->n_points && a.low < a.high; i++) {
        double v = report_value(&d->points[i], field);
        at = d->last > 0 ? (int)((width - 1) * d->points[i].step / d->last) : 0;
        if (report_is_finite(v)) text[at] = marks[(int)(7.99 - report_y(&a, v))];
        else if (report_is_there(v)) text[at] = '!';
    }
    for (i = 1; i < width; i++)
        if (text[i] == ' ') text[i] = text[i - 1];
}

static void report_say_parts(const report_data *d, report_kind kind, FILE *out) {
    int    i, n, used = 0;
    double total = report_parts_total(d, kind, &n), step = n ? report_newest(d, kind)->step : 0;
    if (n == 0) return;
    report_print(out, "%-9s", kind == REPORT_COST ? "time" : "memory");
    for (i = 0; i < d->n_notes; i++) {
        const report_note *p = &d->notes[i];
        char               part[64];
        if (p->kind != kind || p->step < step) continue;
        report_format(part, sizeof part, "%.*s %.0f%%", (int)strcspn(p->text, ","), p->text,
                 100 * p->amount / (total > 0 ? total : 1));
        if (used && used + (int)strlen(part) > report_columns - 13) { report_print(out, ",\n         "); used = 0; }
        used += report_print(out, "%s%s", used ? ", " : "", part);
    }
    fputc('\n', out);
}

static void report_say_sites(const report_data *d, FILE *out) {
    int i, n = 0;
    for (i = 0; i < d->n_notes; i++) {
        const report_note *p = &d->notes[i];
        double             end = p->end;
        if (!p->begins || n++ >= 8) continue;
        report_print(out, "%-9s%.*s: f32 from step %.0f", n == 1 ? "sites" : "", report_columns - 31, p->site, p->step);
        if (end >= 0) report_print(out, " to %.0f", end);
        report_print(out, "\n");
    }
    if (n > 8) report_print(out, "         and %d more\n", n - 8);
}

/* Prints how many steps were clipped, and whether this is usual: with a limit of 1, gradients of norm 1 to
 * 10 are clipped in nearly every step, which only sets the length of the steps. */
static void report_say_clipping(const report_total *t, FILE *out) {
    const double usual = 10;
    report_print(out, "         gradients clipped in %.0f%% of steps", 100 * t->clipped);
    if (t->factor > 1) report_print(out, ",\n         by a factor of %.2g", t->factor);
    if (t->clipped > 0.2)
        report_print(out, t->factor <= usual ? ": usual" : "\n         more than usual: lower the learning rate");
    report_print(out, "\n");
}

/* Prints the last skip and its reason, with line breaks between words. */
static void report_say_skip(const report_total *t, FILE *out) {
    const size_t width = (size_t)report_columns - 9;
    char         line[REPORT_MESSAGE];
    const char  *at = line;
    if (!t->why[0]) return;
    report_format(line, sizeof line, "step %.0f: %.300s", t->last_skip, t->why);
    while (*at) {
        size_t n = strlen(at);
        if (n > width) {
            for (n = width; n > 0 && at[n] != ' '; n--) {}
            if (n == 0) n = width;
        }
        report_print(out, "         %.*s\n", (int)n, at);
        at += n;
        while (*at == ' ') at++;
    }
}

/* Prints the content of the page in lines of at most 79 columns, or as many as report_set_columns says (40 to
 * 79). */
REPORT_API report_result report_summary(const char *path, FILE *out, char *error) {
    report_data   d;
    report_total  t;
    char          spark[64], a[24], b[24];
    int           wide;
    report_result result = report_read(&d, path, error);
    if (result == REPORT_OK || result == REPORT_ERR_CUT) {
        t = report_sum(&d);
        wide = report_columns < 70 ? report_columns - 30 : 40;
        report_spark(&d, REPORT_FIELD(loss), spark, wide);
        if (report_is_there(t.loss))
            report_print(out, "loss     %s  %.4g -> %.4g\n", spark, t.first, t.loss);
        report_spark(&d, REPORT_FIELD(norm), spark, wide);
        report_print(out, "norm     %s  of all gradients\n", spark);
        report_print(out, "         # is high, _ is low\n");
        report_say_clipping(&t, out);
        report_format(a, sizeof a, "%.8g", t.scale);
        report_print(out, "scale    %s; %.0f of %s steps skipped\n",
                report_is_there(t.scale) ? a : "none", t.skipped,
                report_short(d.last, b));
        report_say_skip(&t, out);
        if (report_is_there(t.worst) && t.worst < 5e-5)
            report_print(out, "fp16     flushes no gradient to zero\n");
        else if (report_is_there(t.worst))
            report_print(out, "fp16     flushes at most %.2g%% of a layer's gradient, in%s%s\n",
                    100 * t.worst, report_columns < 79 ? "\n         " : " ", t.worst_layer);
        report_say_sites(&d, out);
        report_say_parts(&d, REPORT_COST, out);
        report_say_parts(&d, REPORT_MEMORY, out);
    }
    report_free(&d);
    return result;
}

/* ==== The state of mixprec ========================================================== */
#ifdef MIXPREC_H_INCLUDED

/* Writes why a step was skipped, and what to do, or that no action is needed. */
static void report_why(const mixp_verdict *v, char *text, size_t space) {
    const char *gradient = v->bad_tensor ? v->bad_tensor : "a parameter";
    const int   at = v->site && v->site[0];
    if (v->reason == MIXP_SKIP_SPIKE_NORM || v->reason == MIXP_SKIP_SPIKE_LOSS)
        report_format(text, space, "a spike of the %s, %.1f standard deviations off. It changed no "
                 "weight. No action needed",
                 v->reason == MIXP_SKIP_SPIKE_LOSS ? "loss" : "gradient norm", v->spike_z);
    else if (v->reason == MIXP_SKIP_BUFFER && !at)
        report_format(text, space, "%s in the buffer %.100s: a number left the range of its dtype in the forward "
                 "pass. No loss scale prevents that. A guard looks for the site in the next step",
                 v->bad_is_nan ? "NaN" : "Inf", gradient);
    else if (v->origin == MIXP_ORIGIN_FORWARD && at)
        report_format(text, space, "%.100s made a number outside the range of its dtype. If the guard "
                 "lets the site store f32, no action is needed", v->site);
    else if (v->origin == MIXP_ORIGIN_BACKWARD && at)
        report_format(text, space, "a gradient of %.100s overflowed. The loss scale was too large and "
                 "was lowered. No action needed", v->site);
    else if (v->origin != MIXP_ORIGIN_UNKNOWN)
        report_format(text, space, "%s%s%.100s", mixp_origin_text(v->origin), at ? "; it began at " : "",
                 at ? v->site : "");
    else
        report_format(text, space, "%s in the gradient of %.120s. A dynamic loss scale causes "
                 "occasional skips. No action needed", v->bad_is_nan ? "NaN" : "Inf", gradient);
}

/* Logs a skip with a non-finite loss again when the guard has found its origin: at the next step, or,
 * on a GPU, a few steps later. */
static void report_skip_again(report_file *log, double step, const char *site) {
    const double late = 8;
    char why[300];
    if (log->open <= 0 || step > log->open + late || !site || !site[0]) return;
    report_format(why, sizeof why, "the loss was not finite: %.100s made a number outside the range of "
             "its dtype. The guard lets the site store f32. No action needed", site);
    report_skip(log, log->open, why);
    log->open = 0;
}

/* Logs a skipped step once. On a GPU the verdict may belong to an earlier step. */
REPORT_API void report_verdict(report_file *log, double step, const mixp_verdict *v) {
    char why[300];
    int  is_next;
    if (!log || v->outcome != MIXP_STEP_SKIPPED || v->step == log->skipped) return;
    is_next = v->step == log->skipped + 1;
    log->skipped = v->step;
    if (is_next && v->origin == MIXP_ORIGIN_FORWARD) report_skip_again(log, step, v->site);
    report_why(v, why, sizeof why);
    report_skip(log, step, why);
    log->open = v->origin == MIXP_ORIGIN_NO_GUARD && v->loss_bad ? step : 0;
}

/* Logs a training step with the scaler's verdict. */
REPORT_API void report_training(report_file *log, double step, double loss, double val, const
                                mixp_scaler *scaler) {
    mixp_verdict v = mixp_scaler_verdict(scaler);
    report_point p = report_nothing(step);
    p.loss = loss;
    p.val = val;
    p.scale = (double)mixp_scaler_loss_scale(scaler);
    if (v.outcome != MIXP_STEP_NONE) {
        p.norm = v.grad_norm;
        p.clip = v.outcome == MIXP_STEP_SKIPPED ? REPORT_NONE : (double)v.clip;
        p.lr = v.lr;
        p.scale = (double)v.scale;
        p.skipped = (double)v.skipped;
    }
    report_verdict(log, step, &v);
    report_step(log, &p);
}

/* Logs the guard's events since the last call. */
REPORT_API void report_guard(report_file *log, double step, const mixp_context *ctx) {
    static const char *const words[MIXP_EVENT_COUNT] = {
        "overflow", "near overflow", "flushed", "back to low", "pinned", "skip", "full",
        "imprecise", "operand", "operand back" };
    mixp_event e;
    int        i = 0;
    if (!log || !mixp_guard_event(ctx, 0, &e)) return;
    if (log->events > e.number) i = (int)(log->events - e.number);
    for (; mixp_guard_event(ctx, i, &e); i++) {
        log->events = e.number + 1;
        if (!e.site[0] || e.kind == MIXP_EVENT_SKIP) continue;
        if (e.kind == MIXP_EVENT_OVERFLOW) report_skip_again(log, step, e.site);
        report_event(log, step, words[e.kind], e.site, mixp_dtype_name(e.dtype),
                     (double)e.largest, e.flushed);
    }
}

/* Logs the exponents of all gradients, and, for fp16, the flushed share of each parameter. */
static void report_gradients(report_file *log, double step, mixp_optimizer *opt) {
    mixp_underflow u;
    double         counts[MIXP_EXPONENTS];
    int64_t        i;
    int            e;
    if (!mixp_optimizer_underflow(opt, -1, &u) || u.step < 0) return;
    for (e = 1; e < MIXP_EXPONENTS - 1; e++) counts[e] = (double)u.exponents[e];
    report_exponents(log, step, 1 - 127, counts + 1, MIXP_EXPONENTS - 2);
    for (i = 0; u.low == MIXP_F16 && mixp_optimizer_underflow(opt, i, &u); i++)
        if (u.step >= 0) report_param(log, step, u.name, u.flushed, u.subnormal);
}

/* Logs guard and gradients. Call mixp_optimizer_sample(opt) before the step. Waits for the device. */
REPORT_API void report_watching(report_file *log, double step, const mixp_context *ctx,
                                mixp_optimizer *opt) {
    if (!log) return;
    report_guard(log, step, ctx);
    report_gradients(log, step, opt);
}

#endif  /* MIXPREC_H_INCLUDED */
#endif  /* REPORT_NO_IMPLEMENTATION */
#endif  /* MIXPREC_REPORT_H */
