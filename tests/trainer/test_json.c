/* test_json.c - examples/trainer/json.h: what RFC 8259 calls JSON is read, everything else is refused,
 * and time grows with the text.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "../../examples/trainer/json.h"
#include "test.h"
#include <time.h>

static int accepts(const char *text) {
    const char *wrong = NULL;
    return json_check(text, (int64_t)strlen(text), &wrong) != NULL;
}

static void json_is_accepted(void) {
    static const char *const texts[] = {
        "null", "true", " false\n", "0", "-0", "12", "-1.5e+10", "1E5", "0.0001", "\"\"", "\"a b\"", "[]", "{}", "[ ]",
        "{ }", "[1, 2,3]", "[[],[[]]]", "{\"a\":1}", "{\"a\":{\"b\":[true,null]},\"c\":\"d\"}", "\t[\r\n1]",
        "\"\\\"\\\\\\/\\b\\f\\n\\r\\t\\u0041\"", "\"\\ud83d\\ude00\"", "\"\\uFFFF\"", "{\"a\":1,\"a\":2}", "\"\x7f\xc3\xa9\"" };
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++)
        if (!accepts(texts[i])) { TEST_SHOW("refused: %s", texts[i]); CHECK(0); }
}

static void all_else_is_refused(void) {
    static const char *const texts[] = {
        "", " ", "nul", "True", "nulll", "+1", "01", "-", ".5", "1.", "1e", "1e+", "0x10", "NaN", "Infinity", "1 2", "'a'",
        "\"", "\"a", "\"\\x\"", "\"\\u12\"", "\"\\u12g4\"", "\"\\ud800\"", "\"\\ud800x\"", "\"\\ud800\\u0041\"", "\"\\udc00\"",
        "\"\n\"", "\"\t\"", "\"\x01\"", "[", "]", "[1", "[1,", "[1,]", "[,1]", "[1 2]", "[1]]", "{", "}", "{\"a\"", "{\"a\":", "{\"a\":1",
        "{\"a\":1,", "{\"a\":1,}", "{a:1}", "{1:1}", "{\"a\" 1}", "{\"a\":1 \"b\":2}", "{:1}", "[1}", "{\"a\":1]", "{} x", "[1],",
        "/* a */ 1", "1 // a", "\xef\xbb\xbf{}" };
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++)
        if (accepts(texts[i])) { TEST_SHOW("accepted: %s", texts[i]); CHECK(0); }
}

/* A zero byte ends no text. */
static void a_zero_byte_is_refused(void) {
    const char *wrong = NULL;
    CHECK(!json_check("{}\0{}", 5, &wrong));
    CHECK(!json_check("\"a\0\"", 4, &wrong));
}

static void values_are_found(void) {
    static const char text[] =
        "{ \"a\\u0062\": [10, \"\\ud83d\\ude00\\u00e9\", null], \"n\": null, \"twice\": 1, \"twice\" : 2, \"in\": {\"n\": 4},\n"
        "  \"zero\": \"a\\u0000\", \"t\": true, \"f\": 1.50 }";
    const char *wrong, *root = json_check(text, (int64_t)sizeof text - 1, &wrong), *list;
    char        out[16];
    CHECK(root != NULL);
    list = json_get(root, "ab");
    CHECK(list && *list == '[');
    list = json_first(list);
    CHECK_INT(json_count(list), 10);
    list = json_next(list);
    CHECK_INT(json_string(list, out, sizeof out), 6);
    CHECK(strcmp(out, "\xf0\x9f\x98\x80\xc3\xa9") == 0);
    CHECK_INT(json_string(list, out, 6), -1);           /* no room */
    list = json_next(list);
    CHECK(list && *list == 'n' && json_next(list) == NULL);
    CHECK(json_get(root, "n") && !json_find(root, "n"));
    CHECK_INT(json_count(json_get(root, "twice")), 2);
    CHECK_INT(json_count(json_get(json_get(root, "in"), "n")), 4);
    CHECK_INT(json_string(json_get(root, "zero"), out, sizeof out), -1);
    CHECK(json_text(json_get(root, "f"), out, sizeof out) && strcmp(out, "1.50") == 0);
    CHECK_INT(json_count(json_get(root, "f")), -1);
    CHECK(!json_get(root, "nosuch") && !json_first(json_check("{}", 2, &wrong)));
}

static void places_are_named(void) {
    static const char text[] = "{\n  \"a\": 1,\n  \"b\": tru\n}";
    const char *wrong = NULL;
    CHECK(!json_check(text, (int64_t)sizeof text - 1, &wrong));
    CHECK_INT(json_line(text, wrong), 3);
    CHECK(strncmp(wrong, "tru", 3) == 0);
}

/* Depth is limited, and does not use the stack. */
static void depth_is_limited(void) {
    static char text[4096];
    for (int depth = JSON_DEPTH - 1; depth <= JSON_DEPTH + 1; depth++) {
        memset(text, '[', (size_t)depth);
        memset(text + depth, ']', (size_t)depth);
        text[2 * depth] = '\0';
        CHECK_INT(accepts(text), depth <= JSON_DEPTH);
    }
}

/* Every front of a text is refused, and so is nearly every change of a byte: none may read beyond the end. */
static void damage_is_refused_or_read(void) {
    static const char whole[] = "{\"a\":[1.5e3,\"\\u00e9\\n\",{\"b\":null,\"c\":[true,false]}],\"d\":\"\\ud83d\\ude00\"}";
    const size_t size = sizeof whole - 1;
    int accepted = 0;
    for (size_t n = 0; n < size; n++) {
        char *text = (char *)malloc(n + 1);
        CHECK(text != NULL);
        memcpy(text, whole, n);
        text[n] = '\0';
        CHECK(!accepts(text));
        free(text);
    }
    for (size_t i = 0; i < size; i++)
        for (int byte = 0; byte < 256; byte++) {
            const char *wrong = NULL;
            char *text = (char *)malloc(size + 1);
            CHECK(text != NULL);
            memcpy(text, whole, size + 1);
            text[i] = (char)byte;
            accepted += json_check(text, (int64_t)size, &wrong) != NULL;
            CHECK(wrong >= text && wrong <= text + size);
            free(text);
        }
    CHECK(accepted > (int)size && accepted < 256 * (int)size / 2);
}

static double seconds_of(int64_t n) {
    char       *text = (char *)malloc((size_t)(4 * n + 8));
    const char *wrong;
    int64_t     size = 0, found = 0;
    text[size++] = '[';
    for (int64_t i = 0; i < n; i++) {
        memcpy(text + size, i ? ",\"a\"" : "\"ab\"", 4);
        size += 4;
    }
    text[size++] = ']';
    text[size] = '\0';
    clock_t begin = clock();
    for (const char *p = json_first(json_check(text, size, &wrong)); p; p = json_next(p)) found++;
    CHECK_INT(found, n);
    free(text);
    return (double)(clock() - begin) / CLOCKS_PER_SEC;
}

/* Eight times the text may take 32 times as long on a busy machine, not 64. */
static void time_grows_with_the_text(void) {
    const double one = seconds_of(250000), eight = seconds_of(2000000);
    if (eight > 32 * one + 0.1) { TEST_SHOW("%.3f s, then %.3f s", one, eight); CHECK(0); }
}

int main(void) {
    RUN(json_is_accepted);
    RUN(all_else_is_refused);
    RUN(a_zero_byte_is_refused);
    RUN(values_are_found);
    RUN(places_are_named);
    RUN(depth_is_limited);
    RUN(damage_is_refused_or_read);
    RUN(time_grows_with_the_text);
    return test_report();
}
