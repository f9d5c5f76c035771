/* test_report.c - examples/report.h: a report that was written is read again, damage is reported,
 * and the page and the summary show the report.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#define _POSIX_C_SOURCE 200809L
#include <time.h>
#include "../../examples/report.h"
#include "test.h"
#include "comma.h"

#define LOG  "test_report.jsonl.tmp"
#define PAGE "test_report.html.tmp"

static char error[REPORT_MESSAGE];
static char text[1 << 20];

static const char *slurp(const char *path) {
    FILE  *f = fopen(path, "rb");
    size_t n = f ? fread(text, 1, sizeof text - 1, f) : 0;
    if (f) fclose(f);
    text[n] = '\0';
    return text;
}

static void put(const char *what, size_t n) {
    FILE *f = fopen(LOG, "wb");
    CHECK(f && fwrite(what, 1, n, f) == n && fclose(f) == 0);
}

/* Losses 4, not finite, 2; one skip; a site that falls at 20 and is back at 30; shares of a gradient. */
static void write_log(void) {
    static const double counts[5] = { 0, 1, 3, 0, 0 };
    char         header[REPORT_MESSAGE];
    report_point p = report_nothing(10);
    report_header(header, sizeof header, "a \"model\" <1>", "cpu");
    report_file *log = report_open(LOG, header, 0);
    CHECK(log != NULL);
    p.loss = 4;
    p.scale = 65536;
    report_step(log, &p);
    p.step = 20;
    p.loss = HUGE_VAL;
    report_step(log, &p);
    report_skip(log, 20, "Inf &\n\"NaN\"");
    report_event(log, 20, "overflow", "h.1: linear", "f32", 66246, 0);
    report_event(log, 30, "back to low", "h.1: linear", "f16", 10, 0);
    report_exponents(log, 30, -24, counts, 5);
    report_param(log, 30, "transformer.h.0.mlp.w", 0.25, 0.5);
    report_param(log, 30, "transformer.h.0.norm.w", 0.125, 0.5);
    report_param(log, 30, "wte.weight", 0, 0);
    p.step = 40;
    p.loss = 2;
    p.val = 1.5;
    p.scale = 32768;
    report_step(log, &p);
    report_part(log, 40, "cost", "GEMM", 3);
    report_part(log, 40, "cost", "the rest", 1);
    report_part(log, 40, "memory", "weights", 2097152);
    CHECK_INT(report_close(log), 0);
}

static void test_read_back(void) {
    report_data  d;
    int          n;
    write_log();
    CHECK_INT(report_read(&d, LOG, error), REPORT_OK);
    CHECK_INT(d.n_points, 3);
    CHECK_TEXT(d.title, "a model <1>");
    CHECK_NEAR(d.points[0].loss, 4, 0);
    CHECK(!report_is_finite(d.points[1].loss) && report_is_there(d.points[1].loss));
    CHECK(!report_is_there(d.points[0].val));
    CHECK(strcmp(report_newest(&d, REPORT_SKIP)->text, "Inf & \"NaN\"") == 0);
    CHECK_INT(report_newest(&d, REPORT_EXPONENTS)->first, -23);
    CHECK_INT(report_newest(&d, REPORT_EXPONENTS)->bins, 2);
    CHECK_NEAR(report_newest(&d, REPORT_EXPONENTS)->share[1], 0.75, 1e-9);
    CHECK_NEAR(report_parts_total(&d, REPORT_COST, &n), 4, 0);
    CHECK_INT(n, 2);
    report_total t = report_sum(&d);
    CHECK_NEAR(t.first, 4, 0);
    CHECK_NEAR(t.loss, 2, 0);
    CHECK_NEAR(t.best_step, 40, 0);
    CHECK_INT(t.fell, 1);
    CHECK_INT(t.still, 0);
    CHECK_NEAR(t.worst, 0.25, 0);
    CHECK_TEXT(t.worst_layer, "h.0");
    report_free(&d);
}

static void test_layers(void) {
    static const char *const names[][2] = {
        { "transformer.h.3.mlp.w", "h.3" }, { "transformer.wte.weight", "wte" }, { "w", "w" },
        { "layers.12", "layers.12" }, { "norm.w", "norm" }, { "", "" }, { "3.w", "3" } };
    char layer[REPORT_NAME];
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        report_layer_of(names[i][0], layer);
        if (strcmp(layer, names[i][1]) != 0) TEST_SHOW("%s gives %s", names[i][0], layer);
        CHECK(strcmp(layer, names[i][1]) == 0);
    }
}

static void test_page(void) {
    write_log();
    CHECK_INT(report_render(LOG, PAGE, error), REPORT_OK);
    CHECK_TEXT(slurp(PAGE), "<title>a model &lt;1&gt;</title>");
    CHECK_TEXT(text, "Inf &amp; &quot;NaN&quot;");
    CHECK_TEXT(text, "overflow at step 20");
    CHECK_TEXT(text, "</html>");
    CHECK(!strstr(text, "<script") && !strstr(text, "nan") && !strstr(text, "class=\"cut\""));
}

static int times(const char *in, const char *part) {
    int n = 0;
    for (in = strstr(in, part); in; in = strstr(in + 1, part)) n++;
    return n;
}

/* Axes have titles, a value that was none has a mark, and the figures can be read as text. */
static void test_figures(void) {
    write_log();
    CHECK_INT(report_render(LOG, PAGE, error), REPORT_OK);
    slurp(PAGE);
    CHECK_INT(times(text, ">step of training</text>"), 3);
    CHECK_TEXT(text, ">loss</text>");
    CHECK_TEXT(text, ">factor, powers of 2</text>");
    CHECK_TEXT(text, "Inf or NaN (1)");
    const char *gap = strstr(text, "<path class=\"gap\" d=\"M218.0 23.5l");     /* step 20 of 40, between 46 and 390 */
    CHECK(gap != NULL);
    CHECK_INT(times(text, "<th scope=\"row\">"), 3);
    CHECK_TEXT(text, "<tr><th scope=\"row\">20</th><td>Inf or NaN</td><td></td>");
    CHECK_TEXT(text, "<tr><th scope=\"row\">40</th><td>2</td><td>1.5</td>");
    CHECK_INT(times(text, "<th scope=\"col\">"), 9);
}

/* The time of a step is one number, wherever it stands: that which its parts add up to. */
static void test_one_time(void) {
    static const char log[] = "{\"metrics\":\"mixprec\",\"version\":1}\n"
        "{\"step\":1,\"loss\":4,\"ms\":7}\n{\"step\":2,\"loss\":4,\"ms\":5}\n"
        "{\"step\":2,\"cost\":\"a\",\"ms\":3.5}\n{\"step\":2,\"cost\":\"b\",\"ms\":2.75}\n";
    put(log, sizeof log - 1);
    CHECK_INT(report_render(LOG, PAGE, error), REPORT_OK);
    CHECK_TEXT(slurp(PAGE), "<dt>a step</dt><dd>6.25 ms</dd>");
    CHECK_TEXT(text, "a step: 6.25 ms");
}

/* An axis ends, however large the numbers on it, and however near to each other. */
static void test_huge_numbers(void) {
    static const char near[] = "{\"metrics\":\"mixprec\",\"version\":1}\n{\"step\":1,\"loss\":1e299}\n"
                               "{\"step\":9007199254740992,\"loss\":1.0000000000000002e299}\n";
    static const char far[] = "{\"metrics\":\"mixprec\",\"version\":1}\n{\"step\":1,\"loss\":-1e308,"
                              "\"norm\":5e-324}\n{\"step\":2,\"val\":1e308,\"norm\":1e308}\n";
    put(near, sizeof near - 1);
    CHECK_INT(report_render(LOG, PAGE, error), REPORT_OK);
    CHECK_TEXT(slurp(PAGE), "</html>");
    put(far, sizeof far - 1);
    CHECK_INT(report_render(LOG, PAGE, error), REPORT_OK);
    CHECK_TEXT(slurp(PAGE), "</html>");
    CHECK(!strstr(text, "nan"));
}

/* So does the line of characters, which numbers beyond 1e300 are no part of. What a log says does
 * nothing to the terminal. */
static void test_huge_summary(void) {
    static const char far[] = "{\"metrics\":\"mixprec\",\"version\":1}\n{\"step\":1,\"loss\":-1e308}\n"
                              "{\"step\":2,\"loss\":1e308}\n{\"step\":3,\"loss\":-9e299}\n"
                              "{\"step\":4,\"loss\":9e299,\"skip\":\"\\u001b[2J\"}\n"
                              "{\"step\":4,\"loss\":9e299}\n";
    FILE *f = fopen(PAGE, "wb");
    put(far, sizeof far - 1);
    CHECK_INT(report_summary(LOG, f, error), REPORT_OK);
    fclose(f);
    CHECK_TEXT(slurp(PAGE), "_#  -9e+299 -> 9e+299\n");
    CHECK_TEXT(text, "step 4: ?[2J");
}

/* At whatever byte a log ends, what is whole is shown, or it is said that nothing is. */
static void test_cut(void) {
    static char whole[1 << 16];
    write_log();
    size_t size = strlen(slurp(LOG));
    memcpy(whole, text, size);
    for (size_t n = 0; n <= size; n++) {
        int           lines = 0, ends = n > 0 && whole[n - 1] == '\n';
        for (size_t i = 0; i < n; i++) lines += whole[i] == '\n';
        report_result want = lines == 0 ? REPORT_ERR_VERSION : ends ? REPORT_OK : REPORT_ERR_CUT;
        put(whole, n);
        CHECK_INT(report_render(LOG, PAGE, error), want);
        if (want == REPORT_ERR_CUT) CHECK_TEXT(error, "Continue the run");
        if (want == REPORT_ERR_CUT && n % 97 == 0) CHECK_TEXT(slurp(PAGE), "class=\"cut\"");
    }
}

static void test_damaged(void) {
    static const struct { const char *text; report_result want; const char *says; } cases[] = {
        { "{\"metrics\":\"mixprec\",\"version\":2}\n", REPORT_ERR_VERSION, "is of version 2" },
        { "{\"metrics\":\"other\",\"version\":1}\n", REPORT_ERR_VERSION, "pass the metrics.jsonl" },
        { "{\"step\":1}\n", REPORT_ERR_VERSION, "pass the metrics.jsonl" },
        { "{\"metrics\":\"mixprec\",\"version\":1}\n{\"step\":1,}\n", REPORT_ERR_FORMAT, "line 2" },
        { "{\"metrics\":\"mixprec\",\"version\":1}\n{\"step\":1\n", REPORT_ERR_FORMAT, "line 2" },
        { "{\"metrics\":\"mixprec\",\"version\":1}\n{\"step\":[1,\n", REPORT_ERR_FORMAT, "line 2" },
        { "{\"metrics\":\"mixprec\",\"version\":1}\n{\"step\":null}\n", REPORT_ERR_FORMAT, "line 2" },
        { "{\"metrics\":\"mixprec\",\"version\":1}\n{\"step\":-1}\n", REPORT_ERR_FORMAT, "line 2" },
        { "{\"metrics\":\"mixprec\",\"version\":1}\n{\"step\":11e308,\"loss\":2.5}\n",
          REPORT_ERR_FORMAT, "line 2" },
        { "{\"metrics\":\"mixprec\",\"version\":1}\n{\"step\":2e-323,\"loss\":1}\n",
          REPORT_ERR_FORMAT, "line 2" },
        { "{\"metrics\":\"mixprec\",\"version\":1}\n{\"step\":1,\"skip\":\"\\u1\n\"}\n",
          REPORT_ERR_FORMAT, "line 2" },
        { "{\"metrics\":\"mixprec\",\"version\":1}\n{\"step\":1,\"skip\":\"\\u 01b\"}\n",
          REPORT_ERR_FORMAT, "line 2" },
        { "{\"metrics\":\"mixprec\",\"version\":1}\n\n", REPORT_ERR_FORMAT, "remove that line" } };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        put(cases[i].text, strlen(cases[i].text));
        remove(PAGE);
        CHECK_INT(report_render(LOG, PAGE, error), cases[i].want);
        CHECK_TEXT(error, cases[i].says);
        CHECK_INT(strlen(slurp(PAGE)), 0);
    }
    CHECK_INT(report_render("no such file", PAGE, error), REPORT_ERR_IO);
    CHECK_TEXT(error, "cannot read no such file");
    write_log();
    CHECK_INT(report_render(LOG, "no/such/folder/x.html", error), REPORT_ERR_IO);
}

static void test_summary(void) {
    FILE *f = fopen(PAGE, "wb");
    write_log();
    CHECK_INT(report_summary(LOG, f, error), REPORT_OK);
    fclose(f);
    CHECK_TEXT(slurp(PAGE), "4 -> 2");
    CHECK_TEXT(text, "scale    32768; 1 of 40 steps skipped");
    CHECK_TEXT(text, "sites    h.1: linear: f32 from step 20 to 30");
    CHECK_TEXT(text, "flushes at most 25% of a layer's gradient, in h.0");
    CHECK_TEXT(text, "time     GEMM 75%, the rest 25%");
    CHECK_TEXT(text, "         gradients clipped in ");
    CHECK_TEXT(text, "         step 20: Inf & \"NaN\"\n");
    for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n")) CHECK(strlen(line) < 80);
}

/* A long reason is shown whole, in lines that fit. */
static void test_long_reason(void) {
    static const char head[] = "{\"metrics\":\"mixprec\",\"version\":1}\n{\"step\":7,\"skip\":\"";
    char   log[600], why[280];
    size_t i;
    FILE  *f = fopen(PAGE, "wb");
    for (i = 0; i + 1 < sizeof why; i++) why[i] = i % 9 == 8 ? ' ' : (char)('a' + i / 9 % 26);
    why[i] = '\0';
    snprintf(log, sizeof log, "%s%s\"}\n", head, why);
    put(log, strlen(log));
    CHECK_INT(report_summary(LOG, f, error), REPORT_OK);
    fclose(f);
    slurp(PAGE);
    for (i = 0; i < 30; i++) {
        char word[9];
        memset(word, (int)('a' + i % 26), 8);
        word[8] = '\0';
        CHECK_TEXT(text, word);
    }
    for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n")) CHECK(strlen(line) < 80);
    CHECK_INT(report_render(LOG, PAGE, error), REPORT_OK);
    CHECK_TEXT(slurp(PAGE), "Step 7 was skipped, the only one: aaaaaaaa bbbbbbbb");
}

/* What a log says begins no line of the summary, and does nothing to the terminal. */
static void test_spoofed_summary(void) {
    static const char log[] =
        "{\"metrics\":\"mixprec\",\"version\":1}\n{\"step\":1,\"loss\":4}\n"
        "{\"step\":2,\"event\":\"overflow\",\"site\":\"a\\u000aloss     9\\u007f\177\",\"largest\":1}\n"
        "{\"step\":2,\"skip\":\"b\\u000aloss     8\"}\n{\"step\":2,\"param\":\"c\\u000aloss     7\",\"flushed\":1}\n"
        "{\"step\":2,\"cost\":\"d\\u000aloss     6\",\"ms\":1}\n{\"step\":2,\"loss\":2}\n";
    FILE *f = fopen(PAGE, "wb");
    int   losses = 0;
    put(log, sizeof log - 1);
    CHECK_INT(report_summary(LOG, f, error), REPORT_OK);
    fclose(f);
    CHECK(!strchr(slurp(PAGE), 127));
    CHECK_TEXT(text, "sites    a loss     9??: f32 from step 2");
    for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n"))
        losses += strncmp(line, "loss", 4) == 0;
    CHECK_INT(losses, 1);
}

/* The falls of a site as a reader would find them: line by line, for each of them. */
static int falls(const report_note *n) { return strcmp(n->text, "back to low") != 0; }

static void check_fall(const report_data *d, int i) {
    double end = -1;
    int    k, begins = falls(&d->notes[i]);
    for (k = 0; k < i; k++)
        if (strcmp(d->notes[k].site, d->notes[i].site) == 0)
            begins = falls(&d->notes[i]) && !falls(&d->notes[k]);
    for (k = d->n_notes - 1; k > i; k--)
        if (strcmp(d->notes[k].site, d->notes[i].site) == 0 && !falls(&d->notes[k]))
            end = d->notes[k].step;
    CHECK_INT(d->notes[i].begins, begins);
    CHECK_NEAR(d->notes[i].end, end, 0);
}

static void write_events(int n, int sites) {
    report_file *log = report_open(LOG, "{\"metrics\":\"mixprec\",\"version\":1}\n", 0);
    unsigned     state = 1;
    for (int i = 0; i < n; i++) {
        char site[32];
        state = state * 1103515245u + 12345u;
        snprintf(site, sizeof site, "site %u", (state >> 16) % (unsigned)sites);
        report_event(log, 1 + i / 4, state >> 30 ? "overflow" : "back to low", site, "f32", 1, 0);
    }
    CHECK_INT(report_close(log), 0);
}

static void test_falls(void) {
    report_data d;
    write_events(500, 7);
    CHECK_INT(report_read(&d, LOG, error), REPORT_OK);
    CHECK_INT(d.n_notes, 500);
    for (int i = 0; i < d.n_notes; i++) check_fall(&d, i);
    report_free(&d);
}

/* A log of 100,000 events is drawn in time that grows with their number, not with its square, which took
 * minutes: processor time, for the machine may be busy. */
static void test_many_events(void) {
    write_events(100000, 50000);
    clock_t began = clock();
    CHECK_INT(report_render(LOG, PAGE, error), REPORT_OK);
    CHECK((double)(clock() - began) / CLOCKS_PER_SEC < 20);
    CHECK_TEXT(slurp(PAGE), "</html>");
}

/* A line with a zero byte is told of, and so is all that stands behind it. */
static void test_zero_byte(void) {
    static const char log[] = "{\"metrics\":\"mixprec\",\"version\":1}\n{\"step\":1,\"loss\":4}\n"
                              "\0\0\0\n{\"step\":2,\"loss\":2}\n";
    put(log, sizeof log - 1);
    CHECK_INT(report_render(LOG, PAGE, error), REPORT_ERR_FORMAT);
    CHECK_TEXT(error, "line 3 holds a zero byte");
}

/* The second line of a skip says what was found later; the step was skipped once. */
static void test_told_again(void) {
    report_data d;
    FILE       *f;
    static const char log[] = "{\"metrics\":\"mixprec\",\"version\":1}\n"
        "{\"step\":7,\"skip\":\"the first\"}\n{\"step\":9,\"skip\":\"unknown\"}\n"
        "{\"step\":9,\"skip\":\"h.1 overflowed\"}\n{\"step\":10,\"loss\":2}\n";
    put(log, sizeof log - 1);
    CHECK_INT(report_read(&d, LOG, error), REPORT_OK);
    CHECK_INT(report_count(&d, REPORT_SKIP), 2);
    report_free(&d);
    f = fopen(PAGE, "wb");
    CHECK_INT(report_summary(LOG, f, error), REPORT_OK);
    fclose(f);
    CHECK_TEXT(slurp(PAGE), "step 9: h.1 overflowed");
    CHECK_TEXT(text, "2 of 10 steps skipped");
}

/* --- other locales ------------------------------------------------------------------------------- */

typedef struct written { char *log, *page, *csv, *summary; } written;

static char *copy_of(const char *path) {
    const char *whole = slurp(path);
    char *copy = (char *)malloc(strlen(whole) + 1);
    return strcpy(copy, whole);
}

/* All that report.h writes, in the program's locale. Numbers of all sizes. */
static written write_all(void) {
    written w;
    report_point p = report_nothing(50);
    FILE *out;
    write_log();
    report_file *log = report_open(LOG, NULL, 1);
    p.loss = 1.25;
    p.val = 1e-12;
    p.norm = 123456.789;
    p.lr = 6e-4;
    p.scale = 1.5e38;
    p.ms = 12.345;
    p.clip = 0.5;
    p.tokens = 1e9;
    p.seconds = 3.75;
    report_step(log, &p);
    CHECK_INT(report_close(log), 0);
    CHECK_INT(report_render(LOG, PAGE, error), REPORT_OK);
    w.log = copy_of(LOG);
    w.page = copy_of(PAGE);
    CHECK_INT(report_csv(LOG, PAGE, error), REPORT_OK);
    w.csv = copy_of(PAGE);
    out = fopen(PAGE, "wb");
    CHECK_INT(report_summary(LOG, out, error), REPORT_OK);
    fclose(out);
    w.summary = copy_of(PAGE);
    return w;
}

static void free_all(written *w) {
    free(w->log);
    free(w->page);
    free(w->csv);
    free(w->summary);
}

/* The bytes of files and summary do not depend on the locale; a log of another program is read. */
static void test_decimal_comma(void) {
    written here = write_all(), there;
    report_data d;
    if (!comma_begin()) {
        free_all(&here);
        SKIP(COMMA_SKIP);
    }
    there = write_all();
    CHECK(strcmp(here.log, there.log) == 0);
    CHECK(strcmp(here.page, there.page) == 0);
    CHECK(strcmp(here.csv, there.csv) == 0);
    CHECK(strcmp(here.summary, there.summary) == 0);
    CHECK_INT(report_read(&d, LOG, error), REPORT_OK);
    CHECK_NEAR(d.points[d.n_points - 1].norm, 123456.789, 0);
    CHECK_NEAR(d.points[d.n_points - 1].val, 1e-12, 0);
    report_free(&d);
    comma_end();
    free_all(&here);
    free_all(&there);
}

/* Each conversion that report.h uses beside snprintf's, and texts cut between letters of UTF-8. */
static void test_formats(void) {
    char got[200], want[200];
    static const double values[6] = { 0, 1.5, -2.25e-7, 123456789, 1e300, 0.1 };
    for (int i = 0; i < 6; i++) {
        report_format(got, sizeof got, "%.9g|%.1f|%.0f|%.1e|%8.3g|%-9.2g|%%", values[i], values[i], values[i], values[i],
                      values[i], values[i]);
        snprintf(want, sizeof want, "%.9g|%.1f|%.0f|%.1e|%8.3g|%-9.2g|%%", values[i], values[i], values[i], values[i],
                 values[i], values[i]);
        CHECK(strcmp(got, want) == 0);
    }
    report_format(got, sizeof got, "%d,%5d,%-5d,%04x,%ld,%s,%-9s,%.3s,%.*s,%*d", 7, -8, 9, 10, 11L, "a,b", "cd", "efgh", 2,
                  "ijk", 4, 5);
    CHECK(strcmp(got, "7,   -8,9    ,000a,11,a,b,cd       ,efg,ij,   5") == 0);
    report_format(got, sizeof got, "%.4s|%.5s|%.6s|%.1s", "a\xC3\xA9\xE2\x82\xAC", "a\xC3\xA9\xE2\x82\xAC",
                  "a\xC3\xA9\xE2\x82\xAC", "\xF0\x9F\x98\x80");
    CHECK(strcmp(got, "a\xC3\xA9|a\xC3\xA9|a\xC3\xA9\xE2\x82\xAC|") == 0);
    report_format(got, 6, "%s%d", "abc", 123456);
    CHECK(strcmp(got, "abc12") == 0);
}

/* --- links and pipes in a folder from elsewhere -------------------------------------------------- */

#define VICTIM "test_report.victim.tmp"

static void put_victim(void) {
    FILE *f = fopen(VICTIM, "wb");
    CHECK(f && fputs("precious", f) >= 0 && fclose(f) == 0);
}

static void test_links(void) {
    write_log();
    put_victim();
    remove(PAGE);
    remove(PAGE ".tmp");
    CHECK(symlink(VICTIM, PAGE ".tmp") == 0);
    CHECK_INT(report_render(LOG, PAGE, error), REPORT_OK);
    CHECK(strcmp(slurp(VICTIM), "precious") == 0);
    CHECK_TEXT(slurp(PAGE), "<svg");
    remove(PAGE);
    CHECK(symlink(VICTIM, PAGE) == 0 && symlink(VICTIM, PAGE ".tmp") == 0);
    CHECK_INT(report_csv(LOG, PAGE, error), REPORT_OK);
    CHECK(strcmp(slurp(VICTIM), "precious") == 0);
    remove(LOG);
    CHECK(symlink(VICTIM, LOG) == 0);
    for (int append = 0; append < 2; append++) {
        report_file *log = report_open(LOG, "header\n", append);
        CHECK(log == NULL);
        CHECK(strcmp(slurp(VICTIM), "precious") == 0);
        report_close(log);
    }
    remove(LOG);
    remove(PAGE);
    remove(VICTIM);
}

static void test_pipes(void) {
    write_log();
    alarm(60);                      /* a call that waits for the other end of the pipe */
    remove(PAGE ".tmp");
    CHECK(mkfifo(PAGE ".tmp", 0666) == 0);
    CHECK_INT(report_render(LOG, PAGE, error), REPORT_OK);
    remove(LOG);
    CHECK(mkfifo(LOG, 0666) == 0);
    for (int append = 0; append < 2; append++) {
        report_file *log = report_open(LOG, "header\n", append);
        CHECK(log == NULL);
        report_close(log);
    }
    CHECK_INT(report_render(LOG, PAGE, error), REPORT_ERR_IO);
    CHECK_INT(report_summary(LOG, stdout, error), REPORT_ERR_IO);
    alarm(0);
    remove(LOG);
    remove(PAGE);
}

int main(void) {
    RUN(test_read_back);
    RUN(test_layers);
    RUN(test_page);
    RUN(test_figures);
    RUN(test_one_time);
    RUN(test_huge_numbers);
    RUN(test_huge_summary);
    RUN(test_cut);
    RUN(test_damaged);
    RUN(test_summary);
    RUN(test_long_reason);
    RUN(test_spoofed_summary);
    RUN(test_falls);
    RUN(test_many_events);
    RUN(test_zero_byte);
    RUN(test_told_again);
    RUN(test_formats);
    RUN_LATER(test_decimal_comma);
    RUN(test_links);
    RUN(test_pipes);
    remove(LOG);
    remove(PAGE);
    return test_report();
}
