/* test_report.c - examples/report.h: what is written is read again, what is damaged is told, and
 * the page and the summary show it.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "../examples/report.h"
#include "test.h"

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
    report_file *log;
    report_point p = report_nothing(10);
    report_header(header, sizeof header, "a \"model\" <1>", "cpu");
    log = report_open(LOG, header, 0);
    CHECK(log != NULL);
    p.loss = 4;
    p.scale = 65536;
    report_step(log, &p);
    p.step = 20;
    p.loss = HUGE_VAL;
    report_step(log, &p);
    report_skip(log, 20, "Inf & \"NaN\"\n");
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
    report_total t;
    int          n;
    write_log();
    CHECK_INT(report_read(&d, LOG, error), REPORT_OK);
    CHECK_INT(d.n_points, 3);
    CHECK_TEXT(d.title, "a model <1>");
    CHECK_NEAR(d.points[0].loss, 4, 0);
    CHECK(!report_is_finite(d.points[1].loss) && report_is_there(d.points[1].loss));
    CHECK(!report_is_there(d.points[0].val));
    CHECK(strcmp(report_newest(&d, REPORT_SKIP)->text, "Inf & \"NaN\"\n") == 0);
    CHECK_INT(report_newest(&d, REPORT_EXPONENTS)->first, -23);
    CHECK_INT(report_newest(&d, REPORT_EXPONENTS)->bins, 2);
    CHECK_NEAR(report_newest(&d, REPORT_EXPONENTS)->share[1], 0.75, 1e-9);
    CHECK_NEAR(report_parts_total(&d, REPORT_COST, &n), 4, 0);
    CHECK_INT(n, 2);
    t = report_sum(&d);
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
    size_t i;
    for (i = 0; i < sizeof names / sizeof names[0]; i++) {
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
    size_t n, size;
    write_log();
    size = strlen(slurp(LOG));
    memcpy(whole, text, size);
    for (n = 0; n <= size; n++) {
        int           lines = 0, ends = n > 0 && whole[n - 1] == '\n';
        size_t        i;
        report_result want;
        for (i = 0; i < n; i++) lines += whole[i] == '\n';
        want = lines == 0 ? REPORT_ERR_VERSION : ends ? REPORT_OK : REPORT_ERR_CUT;
        put(whole, n);
        CHECK_INT(report_render(LOG, PAGE, error), want);
        if (want == REPORT_ERR_CUT) CHECK_TEXT(error, "Go on with the run");
        if (want == REPORT_ERR_CUT && n % 97 == 0) CHECK_TEXT(slurp(PAGE), "class=\"cut\"");
    }
}

static void test_damaged(void) {
    static const struct { const char *text; report_result want; const char *says; } cases[] = {
        { "{\"metrics\":\"mixprec\",\"version\":2}\n", REPORT_ERR_VERSION, "is of version 2" },
        { "{\"metrics\":\"other\",\"version\":1}\n", REPORT_ERR_VERSION, "give the metrics.jsonl" },
        { "{\"step\":1}\n", REPORT_ERR_VERSION, "give the metrics.jsonl" },
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
        { "{\"metrics\":\"mixprec\",\"version\":1}\n\n", REPORT_ERR_FORMAT, "take that line out" } };
    size_t i;
    for (i = 0; i < sizeof cases / sizeof cases[0]; i++) {
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
    char *line;
    write_log();
    CHECK_INT(report_summary(LOG, f, error), REPORT_OK);
    fclose(f);
    CHECK_TEXT(slurp(PAGE), "4 -> 2");
    CHECK_TEXT(text, "scale    32768; 1 of 40 steps skipped");
    CHECK_TEXT(text, "sites    h.1: linear: f32 from step 20 to 30");
    CHECK_TEXT(text, "flushes at most 25% of a layer's gradient, in h.0");
    CHECK_TEXT(text, "time     GEMM 75%, the rest 25%");
    CHECK_TEXT(text, "gradients clipped in ");
    CHECK_TEXT(text, "         step 20: Inf & \"NaN\"\n");
    for (line = strtok(text, "\n"); line; line = strtok(NULL, "\n")) CHECK(strlen(line) < 80);
}

/* A long reason is shown whole, in lines that fit. */
static void test_long_reason(void) {
    static const char head[] = "{\"metrics\":\"mixprec\",\"version\":1}\n{\"step\":7,\"skip\":\"";
    char   log[600], why[280];
    size_t i;
    FILE  *f = fopen(PAGE, "wb");
    char  *line;
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
    for (line = strtok(text, "\n"); line; line = strtok(NULL, "\n")) CHECK(strlen(line) < 80);
    CHECK_INT(report_render(LOG, PAGE, error), REPORT_OK);
    CHECK_TEXT(slurp(PAGE), "Step 7 was skipped, the only one: aaaaaaaa bbbbbbbb");
}

int main(void) {
    RUN(test_read_back);
    RUN(test_layers);
    RUN(test_page);
    RUN(test_huge_numbers);
    RUN(test_huge_summary);
    RUN(test_cut);
    RUN(test_damaged);
    RUN(test_summary);
    RUN(test_long_reason);
    remove(LOG);
    remove(PAGE);
    return test_report();
}
