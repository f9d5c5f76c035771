/* trail.c - names the first site in which two runs differ. Compares two files of trail.h record by record.
 * SPDX-License-Identifier: MIT OR Unlicense
 *   cc -O2 examples/trail.c -I. -lm -o trail && ./trail a.trail b.trail
 *
 * Prints the first record that differs, by how much, and how many others of its step do. Exit status: 0 the files are
 * equal, 1 they differ, 2 a file cannot be read or is no trail. A last line without its end, of a run that was killed,
 * does not count. Hashes are of bytes: compare machines of one byte order. */
#define _POSIX_C_SOURCE 200809L
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include "trail.h"

enum { LINE_MOST = 1 << 14 };           /* a name has at most 255 bytes */

typedef struct trail_file {
    const char *path;
    FILE       *file;
    int64_t     line;
    char        text[LINE_MOST];        /* the line; its tabs become ends */
    char       *field[TRAIL_FIELDS];
} trail_file;
enum { KIND, STEP, DTYPE, SHAPE, HASHES, LARGEST, MEAN, ZEROS, BAD, NAME };

static void refuse(const trail_file *f, const char *what) {
    fprintf(stderr, "trail: %s, line %" PRId64 ": %s\n", f->path, f->line, what);
    exit(2);
}

/* Reads a whole line, in which control characters that a terminal would obey become question marks; 0 at the end, or
 * at a line that has no end. */
static int read_line(trail_file *f) {
    int n = 0, before = 0;
    for (int c; (c = fgetc(f->file)) != EOF; before = c) {
        if (c == '\n') {
            f->text[n] = '\0';
            f->line++;
            return 1;
        }
        if (n + 1 == LINE_MOST) refuse(f, "a line has more than 16,383 bytes; this file is not a trail");
        if ((c < ' ' && c != '\t') || c == 127 || (before == 0xC2 && c >= 0x80 && c < 0xA0)) c = '?';
        f->text[n++] = (char)c;
    }
    return 0;
}

static int is_hex(const char *s, size_t n)
{ return strlen(s) == n && strspn(s, "0123456789abcdef") == n; }

/* Splits a record into its fields; 0 at the end of the file. */
static int read_record(trail_file *f) {
    char *p;
    if (!read_line(f)) return 0;
    p = f->text;
    for (int i = 0; i < TRAIL_FIELDS; i++) {
        f->field[i] = p;
        p = strchr(p, '\t');
        if (i + 1 == TRAIL_FIELDS) break;
        if (!p) refuse(f, "a field is missing; write the file again with mixp_trail_open");
        *p++ = '\0';
    }
    if (!is_hex(f->field[HASHES], 16 * TRAIL_PARTS) || !is_hex(f->field[LARGEST], 8) || !is_hex(f->field[MEAN], 8))
        refuse(f, "a hash or a magnitude is not in hexadecimal digits; write the file again with mixp_trail_open");
    return 1;
}

static void open_trail(trail_file *f, const char *path) {
    memset(f, 0, sizeof *f);
    f->path = path;
    f->file = plain_open(path);
    if (!f->file) {
        fprintf(stderr, "trail: cannot read %s: %s\n", path, plain_error());
        exit(2);
    }
    if (!read_line(f) || strcmp(f->text, TRAIL_HEAD)) refuse(f, "the file does not begin with \"" TRAIL_HEAD "\"");
}

/* The same array of the same step? */
static int same_place(const trail_file *a, const trail_file *b) {
    return !strcmp(a->field[KIND], b->field[KIND]) && !strcmp(a->field[STEP], b->field[STEP]) &&
           !strcmp(a->field[NAME], b->field[NAME]);
}
static int same_values(const trail_file *a, const trail_file *b) {
    for (int i = DTYPE; i < NAME; i++)
        if (strcmp(a->field[i], b->field[i])) return 0;
    return 1;
}

static double number(const char *bits) { return (double)mixp_f32_of_bits((uint32_t)strtoul(bits, NULL, 16)); }

static const char *kind_of(const trail_file *f)
{ return *f->field[KIND] == 'w' ? "weight" : *f->field[KIND] == 'f' ? "values of" : "gradient of"; }

static int parts_that_differ(const trail_file *a, const trail_file *b) {
    int n = 0;
    for (int i = 0; i < TRAIL_PARTS; i++) n += strncmp(a->field[HASHES] + 16 * i, b->field[HASHES] + 16 * i, 16) != 0;
    return n;
}

static void show_pair(const char *what, const char *a, const char *b)
{ printf("  %-18s %s%s%s\n", what, a, strcmp(a, b) ? " and " : "", strcmp(a, b) ? b : ""); }

static void show_numbers(const char *what, const char *a, const char *b) {
    const double x = number(a), y = number(b);
    printf("  %-18s %.9g", what, x);
    if (strcmp(a, b)) printf(" and %.9g (%+.2g of the first)", y, x > 0.0 ? (y - x) / x : 0.0);
    printf("\n");
}

/* The first record that differs. */
static void show_difference(const trail_file *a, const trail_file *b) {
    printf("step %s, %s %s\n", a->field[STEP], kind_of(a), a->field[NAME]);
    show_pair("dtype", a->field[DTYPE], b->field[DTYPE]);
    show_pair("shape", a->field[SHAPE], b->field[SHAPE]);
    if (!strcmp(a->field[DTYPE], b->field[DTYPE]) && !strcmp(a->field[SHAPE], b->field[SHAPE]))
        printf("  %-18s %d of %d equal parts of the array\n", "differ in", parts_that_differ(a, b), TRAIL_PARTS);
    show_numbers("largest magnitude", a->field[LARGEST], b->field[LARGEST]);
    show_numbers("mean magnitude", a->field[MEAN], b->field[MEAN]);
    show_pair("zeros", a->field[ZEROS], b->field[ZEROS]);
    show_pair("Inf and NaN", a->field[BAD], b->field[BAD]);
}

/* Counts the rest of the step of the first difference. */
static void show_rest(trail_file *a, trail_file *b) {
    const int64_t step = strtoll(a->field[STEP], NULL, 10);
    int64_t all = 0, differ = 0;
    while (read_record(a) && read_record(b) && strtoll(a->field[STEP], NULL, 10) == step && same_place(a, b)) {
        all++;
        differ += !same_values(a, b);
    }
    printf("  of the %" PRId64 " records of the step that follow, %" PRId64 " differ\n", all, differ);
}

int main(int argc, char **argv) {
    static trail_file a, b;
    int64_t    equal = 0;
    if (argc != 3) {
        fprintf(stderr, "usage: trail A B      two files that mixp_trail_open of examples/trail.h wrote\n");
        return 2;
    }
    open_trail(&a, argv[1]);
    open_trail(&b, argv[2]);
    for (int more_a, more_b;; equal++) {
        more_a = read_record(&a);
        more_b = read_record(&b);
        if (!more_a && !more_b) {
            printf("equal: %" PRId64 " records\n", equal);
            return 0;
        }
        if (more_a && more_b && same_place(&a, &b) && same_values(&a, &b)) continue;
        printf("%" PRId64 " records are equal; the runs first differ at\n", equal);
        if (more_a != more_b) {
            printf("the end of %s; the other continues with step %s, %s %s\n", more_a ? b.path : a.path,
                   (more_a ? a : b).field[STEP], kind_of(more_a ? &a : &b), (more_a ? a : b).field[NAME]);
        } else if (!same_place(&a, &b)) {
            printf("step %s, %s %s\nwhere the other has step %s, %s %s\n", a.field[STEP], kind_of(&a), a.field[NAME],
                   b.field[STEP], kind_of(&b), b.field[NAME]);
        } else {
            show_difference(&a, &b);
            show_rest(&a, &b);
        }
        return 1;
    }
}
