/* test_tokenizer.c - examples/trainer/tokenizer.h splits texts into the same tokens as Hugging
 * Face's tokenizers with the same file, and turns the tokens back into the same text.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#define main trainer_main
#include "../../examples/trainer/trainer.c"
#undef main
#include "reference/tokenizer.h"
#include "test.h"

#define FILE_NAME "tests/reference/tokenizer.json"

static int check_ids(const tokenizer *t, const char *text, const int *want, int n) {
    int32_t ids[1024];
    int64_t got = encode_text(t, FILE_NAME, text, ids);
    int     same = got == n;
    for (int i = 0; same && i < n; i++) same = ids[i] == want[i];
    if (!same) TEST_SHOW("\"%s\" is %lld tokens, not %d, or others", text, (long long)got, n);
    return same;
}

static void texts_are_cut_as_recorded(void) {
    tokenizer *t = read_tokenizer(FILE_NAME);
    CHECK_INT(t->count, 420);
    for (size_t i = 0; i < sizeof tokenizer_cases / sizeof tokenizer_cases[0]; i++)
        CHECK(check_ids(t, tokenizer_cases[i].text, tokenizer_cases[i].ids, tokenizer_cases[i].n));
    free_tokenizer(t);
}

/* Whatever the bytes, of which some are no UTF-8: the tokens' bytes are the text again. */
static void any_text_comes_back(void) {
    tokenizer *t = read_tokenizer(FILE_NAME);
    uint32_t   state = 1;
    for (int k = 0; k < 400; k++) {
        char    text[128], back[1024];
        int32_t ids[128];
        int64_t n;
        int     length = 1 + k % 100, at = 0;
        for (int i = 0; i < length; i++) {
            state = state * 1664525u + 1013904223u;
            text[i] = (char)(k % 2 ? 1 + (state >> 16) % 255 : 32 + (state >> 16) % 95);
        }
        text[length] = '\0';
        n = encode_text(t, FILE_NAME, text, ids);
        CHECK(n >= 1 && n <= length);
        for (int64_t i = 0; i < n; i++) {
            memcpy(back + at, t->tokens[ids[i]].bytes, (size_t)t->tokens[ids[i]].length);
            at += t->tokens[ids[i]].length;
        }
        CHECK(at == length && memcmp(back, text, (size_t)length) == 0);
    }
    free_tokenizer(t);
}

/* Merges as older files have them, "a b"; keys that are tokens, too; numbers with gaps. */
static void older_files_are_read(void) {
    static const char json[] =
        "{\"model\": {\"type\": \"BPE\", \"vocab\": {\"vocab\": 9, \"merges\": 8, \"model\": 7, \"a\":0,\n"
        "\"b\": 1, \"ab\" : 3, \"\\u0120\": 4, \"\\u0120ab\": 12, \"\\\"\": 5}, \"merges\": [\"a b\",\n"
        " \"\\u0120 ab\"]}}";
    static const int want[] = {3, 12, 5, 0};
    FILE      *f = fopen("test_tokenizer.tmp", "w");
    tokenizer *t;
    CHECK(f && fputs(json, f) >= 0 && fclose(f) == 0);
    t = read_tokenizer("test_tokenizer.tmp");
    CHECK_INT(t->count, 13);
    CHECK(check_ids(t, "ab ab\"a", want, 4));
    CHECK(!t->tokens[2].bytes);
    free_tokenizer(t);
    remove("test_tokenizer.tmp");
}

int main(void) {
    RUN(texts_are_cut_as_recorded);
    RUN(any_text_comes_back);
    RUN(older_files_are_read);
    return test_report();
}
