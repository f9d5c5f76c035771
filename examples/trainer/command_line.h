/* command_line.h - reads a command line by a table of options, and prints the table: a part of trainer.c
 * and of llama.c
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * Before this file a program defines `config`, and the tables `options`, `other_names` and
 * `option_hints` with their lengths N_OPTIONS, N_OTHER_NAMES and N_HINTS.
 */
#ifndef TRAINER_COMMAND_LINE_H
#define TRAINER_COMMAND_LINE_H

#include <math.h>
#include "option_kinds.h"
#include "terminal.h"

/* The number of edits that turn a into b: for "did you mean". */
static int edits_between(const char *a, const char *b) {
    int row[64], n = (int)strlen(b);
    for (int j = 0; j <= n; j++) row[j] = j;
    for (int i = 1; a[i - 1]; i++) {
        int diagonal = row[0];
        row[0] = i;
        for (int j = 1; j <= n; j++) {
            int least = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            if (row[j - 1] + 1 < least) least = row[j - 1] + 1;
            if (diagonal + 1 < least) least = diagonal + 1;
            row[j] = least;
        }
    }
    return row[n];
}

/* The option that begins with the name, or else the one that the fewest edits reach. For a short name, only few edits
 * count as typing errors: more edits turn any name into any other. */
static const char *nearest_option(const char *name) {
    const char *best = NULL;
    int         least = ((int)strlen(name) + 1) / 3 + 1;
    if (least > 4) least = 4;
    for (int i = 0; i < N_OTHER_NAMES; i++)
        if (strcmp(name, other_names[i][0]) == 0) return other_names[i][1];
    for (int i = 0; i < N_OPTIONS; i++) {
        const char *other = options[i].name;
        int d = !other ? least : name[0] && strncmp(name, other, strlen(name)) == 0 ? 0 : edits_between(name, other);
        if (d < least) { least = d; best = options[i].name; }
    }
    return best;
}

/* The index of the option name[0..length), or -1. */
static int find_option(const char *name, size_t length) {
    for (int i = 0; i < N_OPTIONS; i++) {
        const char *have = options[i].name;
        size_t      k = 0;
        if (!have || strlen(have) != length) continue;
        while (k < length && have[k] == (name[k] == '_' ? '-' : name[k])) k++;
        if (k == length) return i;
    }
    return -1;
}

/* The index of word in "a|b|c", or -1. */
static int64_t find_choice(const char *choices, const char *word) {
    size_t  length = strlen(word);
    int64_t index = 0;
    for (const char *p = choices;; index++) {
        size_t n = strcspn(p, "|");
        if (n == length && strncmp(p, word, n) == 0) return index;
        if (p[n] == '\0') return -1;
        p += n + 1;
    }
}

/* Writes a number without padding in its exponent: 0.1, 1e-6. */
static const char *limit_text(double number, char text[32]) {
    char *e;
    snprintf(text, 32, "%.10g", number);
    e = strchr(text, 'e');
    if (e) snprintf(e + 1, 8, "%d", atoi(e + 1));
    return text;
}

static double parse_number(const option *o, const char *text) {
    char   low[32], high[32];
    char  *end = NULL;
    double value = strtod(text, &end);
    int    is_number = end != text && *end == '\0' && strchr("-.0123456789", text[0]);
    if (!is_number || (o->kind == WHOLE && value != floor(value)))
        die(2, "--%s: \"%s\" is not a %snumber. Give one, such as --%s %g", o->name, text,
            o->kind == WHOLE ? "whole " : "", o->name,
            strcmp(o->initial, "auto") == 0 ? (o->kind == WHOLE ? 100 : 0.1) : atof(o->initial));
    if (!(value >= o->low && value <= o->high))
        die(2, "--%s %s is out of range: pass a number from %s to %s", o->name, text,
            limit_text(o->low, low), limit_text(o->high, high));
    return value;
}

/* Sets one field of c from its text. Defaults, presets, config.json and the command line all use
 * this function. */
static void set_option(config *c, const option *o, const char *text) {
    void   *field = (char *)c + o->offset;
    double  number = AUTO;
    int64_t whole;
    if (o->kind == POINTER) { memcpy(field, &text, sizeof text); return; }
    if (o->kind == TEXT) {
        if (strlen(text) > (size_t)o->high)
            die(2, "--%s is too long: at most %g bytes", o->name, o->high);
        memcpy(field, text, strlen(text) + 1);
        return;
    }
    if (o->kind == CHOICE) number = (double)find_choice(o->choices, text);
    else if (strcmp(text, "auto") != 0 || strcmp(o->initial, "auto") != 0)
        number = parse_number(o, text);
    if (o->kind == CHOICE && number < 0)
        die(2, "--%s: \"%s\" is not one of %s", o->name, text, o->choices);
    whole = (int64_t)number;
    if (o->kind == REAL) memcpy(field, &number, sizeof number);
    else memcpy(field, &whole, sizeof whole);
}

/* Writes the value of an option as a text that set_option reads. */
static inline void option_text(const config *c, const option *o, char *text, size_t space) {
    const char *field = (const char *)c + o->offset, *p = o->choices;
    int64_t     whole;
    double      number;
    memcpy(&whole, field, sizeof whole);
    memcpy(&number, field, sizeof number);
    if (o->kind == POINTER) {
        memcpy(&p, field, sizeof p);
        snprintf(text, space, "%s", p ? p : "");
    } else if (o->kind == TEXT) {
        snprintf(text, space, "%s", field);
    } else if (o->kind == CHOICE) {
        while (whole-- > 0) p += strcspn(p, "|") + 1;
        snprintf(text, space, "%.*s", (int)strcspn(p, "|"), p);
    } else if (o->kind == REAL ? number < 0 : whole < 0) {
        snprintf(text, space, "auto");
    } else if (o->kind == REAL) {
        snprintf(text, space, "%.15g", number);     /* "0.1"; 17 digits if 15 lose bits  */
        if (strtod(text, NULL) != number) snprintf(text, space, "%.17g", number);
    } else {
        snprintf(text, space, "%lld", (long long)whole);
    }
}

enum { HELP_INDENT = 29 };

/* Prints the words of `text` from column HELP_INDENT on, in lines of at most `line_columns`. The first
 * line begins with `left`; if `left` is too long, it gets its own line. A '|' also ends a word; a
 * '\t' is a space that does not end a word. */
static void print_wrapped(const char *left, const char *text) {
    size_t width = (size_t)(line_columns > HELP_INDENT + 16 ? line_columns - HELP_INDENT : 16);
    printf("%-*s", HELP_INDENT, left);
    if (strlen(left) >= HELP_INDENT) printf("\n%*s", HELP_INDENT, "");
    for (size_t n; *text; text += n + strspn(text + n, " ")) {
        n = strlen(text);
        if (n > width) {
            for (n = width; n > 0 && text[n] != ' ' && text[n - 1] != '|'; n--) {}
            if (n == 0) n = width;
        }
        for (size_t i = 0; i < n; i++) putchar(text[i] == '\t' ? ' ' : text[i]);
        putchar('\n');
        if (text[n]) printf("%*s", HELP_INDENT, "");
    }
}

static void print_option(const option *o) {
    int  long_list = o->kind == CHOICE && strlen(o->choices) > 16;
    char left[64], limits[96] = "", text[400], low[32], high[32];
    if (!o->name) { printf("\n%s\n", o->help); return; }
    snprintf(left, sizeof left, "  --%s %s", o->name,
             o->kind == WHOLE ? "N" : o->kind == REAL ? "X" : o->kind == FLAG ? ""
             : long_list ? "NAME" : o->choices);
    if (o->kind == CHOICE || (o->kind == POINTER && o->initial && o->initial[0]))
        snprintf(limits, sizeof limits, " [%s]", o->initial);
    if (o->kind == WHOLE || o->kind == REAL)
        snprintf(limits, sizeof limits, o->high < 1e8 ? " [%s;\t%s\tto\t%s]" : " [%s;\tfrom\t%s]",
                 o->initial, limit_text(o->low, low), limit_text(o->high, high));
    snprintf(text, sizeof text, "%s%s%s%s", o->help, limits, long_list ? ": " : "",
             long_list ? o->choices : "");
    print_wrapped(left, text);
}

static void die_unknown(const char *argument) {
    char        name[64], dashes[64];
    const char *near;
    snprintf(name, sizeof name, "%.*s", (int)strcspn(argument, "="), argument);
    memcpy(dashes, name, sizeof name);
    for (char *p = dashes; *p; p++) if (*p == '_') *p = '-';
    near = nearest_option(dashes);
    if (strncmp(dashes, "wandb", 5) == 0)
        die(2, "unknown option --%s. With --out DIR, DIR/metrics.jsonl has one JSON object a line, "
               "which examples/metrics.py feeds to W&B or TensorBoard", name);
    for (int i = 0; i < N_HINTS; i++)
        if (strcmp(dashes, option_hints[i][0]) == 0) die(2, "unknown option --%s. %s", name, option_hints[i][1]);
    if (near) die(2, "unknown option --%s. Did you mean --%s?", name, near);
    die(2, "unknown option --%s. %s --help lists all of them", name, program_name);
}

/* "steps 10" and "-steps 10" mean --steps. */
static void die_stray(const char *argument) {
    const char *name = argument + (argument[0] == '-');
    int         i = find_option(name, strcspn(name, "="));
    if (i >= 0)
        die(2, "unexpected argument \"%s\". Did you mean --%s? Two dashes begin an option", argument,
            options[i].name);
    die(2, "unexpected argument \"%s\". To train on a file: --data FILE", argument);
}

/* Finds the texts of the options on the command line; the last text of an option counts. *operand: an
 * argument that is no option; operand NULL: such an argument is an error. */
static void parse_command_line(int argc, char **argv, const char **given, const char **operand) {
    for (int a = 1; a < argc; a++) {
        const char *name = strcmp(argv[a], "-h") == 0 ? "--help" : argv[a], *value;
        int         i;
        if (strncmp(name, "--", 2) != 0 && operand && !*operand && name[0] != '-') {
            *operand = name;
            continue;
        }
        if (strncmp(name, "--", 2) != 0) die_stray(name);
        name += 2;
        value = strchr(name, '=');
        i = find_option(name, strcspn(name, "="));
        if (i < 0) die_unknown(name);
        if (options[i].kind == FLAG) {
            if (value) die(2, "--%s takes no value", options[i].name);
            given[i] = "1";
        } else if (value) {
            given[i] = value + 1;
        } else if (a + 1 < argc && strncmp(argv[a + 1], "--", 2) != 0) {
            given[i] = argv[++a];
        } else {
            die(2, "--%s needs a value, as in --%s %s", options[i].name, options[i].name,
                options[i].choices ? options[i].choices : options[i].initial ? options[i].initial : "TEXT");
        }
    }
}

#endif
