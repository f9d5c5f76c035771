/* test_tokenizer.c - examples/trainer/tokenizer.h splits texts into the same tokens as Hugging
 * Face's tokenizers with the same file, turns the tokens back into the same text, and names the field of a
 * file that it does not know.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#define main trainer_main
#include "../../examples/trainer/trainer.c"
#undef main
#include "reference/tokenizer.h"
#include "test.h"
#include <sys/wait.h>

#define FILE_NAME "tests/reference/tokenizer.json"

static int check_ids(tokenizer *t, const char *text, const int *want, int n) {
    int64_t  got = 0;
    int32_t *ids = encode_text(t, text, (int64_t)strlen(text), &got);
    int      same = got == n;
    for (int i = 0; same && i < n; i++) same = ids[i] == want[i];
    free(ids);
    if (!same) TEST_SHOW("\"%s\" is %lld tokens, not %d, or others", text, (long long)got, n);
    return same;
}

static void texts_are_cut_as_recorded(void) {
    tokenizer *t = read_tokenizer(FILE_NAME, NULL);
    CHECK_INT(t->count, 420);
    for (size_t i = 0; i < sizeof tokenizer_cases / sizeof tokenizer_cases[0]; i++)
        CHECK(check_ids(t, tokenizer_cases[i].text, tokenizer_cases[i].ids, tokenizer_cases[i].n));
    free_tokenizer(t);
}

/* Whatever the bytes, of which some are no UTF-8: the tokens' bytes are the text again. */
static void any_text_comes_back(void) {
    tokenizer *t = read_tokenizer(FILE_NAME, NULL);
    uint32_t   state = 1;
    for (int k = 0; k < 400; k++) {
        char     text[128], back[1024];
        int64_t  n;
        int      length = 1 + k % 100, at = 0;
        for (int i = 0; i < length; i++) {
            state = state * 1664525u + 1013904223u;
            text[i] = (char)(k % 2 ? (state >> 16) % 256 : 32 + (state >> 16) % 95);
        }
        int32_t *ids = encode_text(t, text, length, &n);
        CHECK(n >= 1 && n <= length);
        for (int64_t i = 0; i < n; i++) {
            memcpy(back + at, t->tokens[ids[i]].bytes, (size_t)t->tokens[ids[i]].length);
            at += t->tokens[ids[i]].length;
        }
        CHECK(at == length && memcmp(back, text, (size_t)length) == 0);
        free(ids);
    }
    free_tokenizer(t);
}

/* Lower case of any bytes takes no more room: a byte that is not UTF-8 stays, a letter of two bytes does not. */
static void lower_case_is_not_longer(void) {
    tokenizer *t = read_tokenizer(FILE_NAME, NULL);
    char       text[512], made[1024];
    t->normalizer = NORMALIZE_LOWER;
    for (int byte = 128; byte < 256; byte++) {
        memset(text, byte, 256);
        CHECK_INT(normalize(t, text, 256, made), 256);
        CHECK(memcmp(made, text, 256) == 0);
    }
    for (int i = 0; i < 512; i++) text[i] = (char)(i % 2 ? 'A' + i % 26 : 0x80 + i / 4);
    CHECK_INT(normalize(t, text, 512, made), 512);
    CHECK(normalize(t, "\xC3\x89\xC3", 3, made) == 3 && memcmp(made, "\xC3\xA9\xC3", 3) == 0);
    free_tokenizer(t);
}

/* Merges as older files have them, "a b"; keys that are tokens, too; numbers with gaps. */
static void older_files_are_read(void) {
    static const char json[] =
        "{\"model\": {\"type\": \"BPE\", \"vocab\": {\"vocab\": 9, \"merges\": 8, \"model\": 7, \"a\":0,\n"
        "\"b\": 1, \"ab\" : 3, \"\\u0120\": 4, \"\\u0120ab\": 12, \"\\\"\": 5}, \"merges\": [\"a b\",\n"
        " \"\\u0120 ab\"]}, \"pre_tokenizer\": {\"type\": \"ByteLevel\", \"add_prefix_space\": false}}";
    static const int want[] = {3, 12, 5, 0};
    FILE      *f = fopen("test_tokenizer.tmp", "w");
    CHECK(f && fputs(json, f) >= 0 && fclose(f) == 0);
    tokenizer *t = read_tokenizer("test_tokenizer.tmp", NULL);
    CHECK_INT(t->count, 13);
    CHECK(check_ids(t, "ab ab\"a", want, 4));
    CHECK(!t->tokens[2].bytes);
    free_tokenizer(t);
    remove("test_tokenizer.tmp");
}

/* ---- files that are refused, by the name of the field ---- */

#define BYTES "\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false}"
#define MODEL "\"model\":{\"vocab\":{\"a\":0,\"b\":1,\"ab\":2},\"merges\":[\"a b\"]}"

/* Reads a tokenizer and encodes "ab" in a process of its own. Returns the exit status; said: its stderr. */
static int read_apart(const char *json, char *said, size_t space) {
    FILE  *f = fopen("test_tokenizer.tmp", "w");
    int    status = -1;
    size_t n = 0;
    CHECK(f && fputs(json, f) >= 0 && fclose(f) == 0);
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        int64_t count;
        if (!freopen("test_tokenizer.said", "w", stderr)) _exit(99);
        free(encode_text(read_tokenizer("test_tokenizer.tmp", NULL), "ab", 2, &count));
        exit(0);
    }
    waitpid(child, &status, 0);
    f = fopen("test_tokenizer.said", "r");
    if (f) n = fread(said, 1, space - 1, f);
    said[n] = '\0';
    if (f) fclose(f);
    remove("test_tokenizer.said");
    remove("test_tokenizer.tmp");
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void expect(const char *json, int status, const char *words) {
    char said[1024];
    CHECK_INT(read_apart(json, said, sizeof said), status);
    if (words ? !strstr(said, words) : said[0] != 0) {
        TEST_SHOW("%.60s: \"%s\" lacks \"%s\"", json, said, words ? words : "");
        CHECK(0);
    }
}

static void fields_are_named(void) {
    expect("{" MODEL "," BYTES "}", 0, NULL);
    expect("{" MODEL "," BYTES ",\"normalizer\":null,\"added_tokens\":null}", 0, NULL);
    expect("{" MODEL "}", 1, "its pre_tokenizer is not ByteLevel");
    expect("{" MODEL ",\"pre_tokenizer\":{\"type\":\"Whitespace\"}}", 1, "its pre_tokenizer is Whitespace");
    expect("{" MODEL ",\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Digits\"}]}}", 1, "its pre_tokenizer is not ByteLevel");
    expect("{" MODEL ",\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\",\"pattern\":{\"Regex\":\"[0-9]\"},"
           "\"behavior\":\"Isolated\",\"invert\":false},{\"type\":\"ByteLevel\"}]}}", 1, "its pre_tokenizer has a Split (Isolated) by \"[0-9]\"");
    expect("{" MODEL "," BYTES ",\"normalizer\":{\"type\":\"Prepend\",\"prepend\":\"x\"}}", 1, "its normalizer is Prepend");
    expect("{" MODEL "," BYTES ",\"truncation\":{\"max_length\":4}}", 0, "its truncation is not applied");
    expect("{" MODEL "," BYTES ",\"padding\":{\"length\":4}}", 0, "its padding is not applied");
    expect("{" BYTES "}", 1, "it has no model");
    expect("{" BYTES ",\"model\":{\"type\":\"WordPiece\",\"vocab\":{\"a\":0}}}", 1, "its model is of type \"WordPiece\"");
    expect("{" BYTES ",\"model\":{\"type\":\"Unigram\",\"vocab\":[[\"a\",0]]}}", 1, "its model is of type \"Unigram\"");
    expect("{" BYTES ",\"model\":{\"vocab\":{\"a\":0},\"merges\":[],\"continuing_subword_prefix\":\"##\"}}", 1, "its model has continuing_subword_prefix");
    expect("{" BYTES ",\"model\":{\"vocab\":{\"a\":0},\"merges\":[],\"end_of_word_suffix\":\"</w>\"}}", 1, "its model has end_of_word_suffix");
    expect("{" BYTES ",\"model\":{\"vocab\":{\"a\":0,\"b\":1,\"ab\":2},\"merges\":[\"a b\"],\"dropout\":0.1}}", 0, "its model has dropout");
    expect("{" BYTES ",\"model\":{\"vocab\":{\"a\":0,\"a\":1},\"merges\":[]}}", 1, "tokens 0 and 1 have the same text");
    expect("{" BYTES ",\"model\":{\"vocab\":{\"a\":0,\"b\":0},\"merges\":[]}}", 1, "two tokens have the number 0");
    expect("{" BYTES ",\"model\":{\"vocab\":{\"a\":16777000},\"merges\":[]}}", 1, "a token has the number 16777000, and the numbers of a file of its size end at 4098");
    expect("{" BYTES ",\"model\":{\"vocab\":{\"a\":-1},\"merges\":[]}}", 1, "a token has the number -1");
    expect("{" BYTES ",\"model\":{\"vocab\":{\"a\":1.5},\"merges\":[]}}", 1, "a token has the number 1.5");
    expect("{" BYTES ",\"model\":{\"vocab\":{\"a\":0,\"b\":1},\"merges\":[\"a b\"]}}", 1, "merge 0 is of tokens that its vocab lacks");
    expect("{" BYTES ",\"model\":{\"vocab\":{\"a\":0},\"merges\":[\"ab\"]}}", 1, "merge 0 is malformed");
    expect("{" BYTES ",\"model\":{\"vocab\":{\"a\":0},\"merges\":[[\"a\",\"b\",\"c\"]]}}", 1, "merge 0 is malformed");
    expect("{" MODEL "," BYTES ",\"added_tokens\":[{\"id\":0,\"content\":\"x\"}]}", 1, "added token \"x\" and another token have the number 0");
    expect("{" MODEL "," BYTES ",\"added_tokens\":[{\"id\":3,\"content\":\"x\"},{\"id\":4,\"content\":\"x\"}]}", 1, "have \"x\" twice");
    expect("{" MODEL "," BYTES ",\"added_tokens\":[{\"id\":3}]}", 1, "its added_tokens are malformed");
    expect("{" MODEL "," BYTES ",\"added_tokens\":{}}", 1, "its added_tokens are not a list");
    expect("{" BYTES ",\"model\":{\"vocab\":{\"b\":1},\"merges\":[]}}", 1, "has no token for the byte 0x61");
    expect("{" MODEL "," BYTES ",\"added_tokens\":[{\"id\":3,", 1, "is not whole");
}

/* ---- time ---- */

/* A file of n tokens, n merges and n added tokens, and a word of n letters. Returns seconds. */
static double seconds_of(int n) {
    FILE      *f = fopen("test_tokenizer.tmp", "w");
    char      *word = (char *)malloc((size_t)n);
    clock_t    begin = clock();
    int64_t    count = 0;
    CHECK(f && word);
    fprintf(f, "{\"added_tokens\":[");
    for (int i = 0; i < n; i++) fprintf(f, "%s{\"id\":%d,\"content\":\"<%d>\"}", i ? "," : "", n + 9 + i, i);
    fprintf(f, "]," BYTES ",\"model\":{\"vocab\":{\"a\":0,\"aa\":1,\"b\":2,\"1\":3,\"0\":4");
    for (int i = 0; i < n; i++) fprintf(f, ",\"ab%d\":%d", i, 5 + i);
    fprintf(f, "},\"merges\":[");
    for (int i = 0; i < n; i++) fprintf(f, "%s\"a a\"", i ? "," : "");
    fprintf(f, "]}}");
    fclose(f);
    begin = clock();
    tokenizer *t = read_tokenizer("test_tokenizer.tmp", NULL);
    memset(word, 'a', (size_t)n);
    free(encode_text(t, word, n, &count));
    CHECK_INT(count, n / 2 + n % 2);
    free_tokenizer(t);
    free(word);
    remove("test_tokenizer.tmp");
    return (double)(clock() - begin) / CLOCKS_PER_SEC;
}

/* Sixteen times the file takes about 20 times as long; with a square in it, 256 times. */
static void time_grows_with_the_file(void) {
    double few = seconds_of(5000), many = seconds_of(80000);
    if (many > 64 * few + 0.2) { TEST_SHOW("%.3f s, then %.3f s", few, many); CHECK(0); }
}

/* test_tokenizer --encode FILE TEXT...: the tokens of each text, a line each. */
static int encode_arguments(int argc, char **argv) {
    tokenizer *t = read_tokenizer(argv[2], NULL);
    for (int k = 3; k < argc; k++) {
        int64_t  n = 0;
        int32_t *ids = encode_text(t, argv[k], (int64_t)strlen(argv[k]), &n);
        for (int64_t i = 0; i < n; i++) printf("%s%ld", i ? " " : "", (long)ids[i]);
        printf("\n");
        free(ids);
    }
    free_tokenizer(t);
    return 0;
}

int main(int argc, char **argv) {
    if (argc > 2 && strcmp(argv[1], "--encode") == 0) return encode_arguments(argc, argv);
    RUN(texts_are_cut_as_recorded);
    RUN(any_text_comes_back);
    RUN(lower_case_is_not_longer);
    RUN(older_files_are_read);
    RUN(fields_are_named);
    RUN(time_grows_with_the_file);
    return test_report();
}
