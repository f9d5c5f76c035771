/* malformed.h - every class of malformed file is refused: by rule, truncated, with changed bytes, deep, with many entries.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
/* --- malformed files, class by class -------------------------------------------------------- */

#define BAD MIXP_ERR_FORMAT
#define A   "\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}"
#define T(dtype, shape, offsets) \
    "{\"a\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" offsets "}}"
#define NAME(name) "{\"" name "\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}"
#define TWO(a, b) "{\"a\":{\"dtype\":\"U8\",\"shape\":" a "},\"b\":{\"dtype\":\"U8\",\"shape\":" b "}}"
#define AT(b, e) ",\"data_offsets\":[" #b "," #e "]"

static const struct { const char *header; size_t data; mixp_result want; const char *part; } rows[] = {
    /* accepted */
    { "{" A "}", 8, MIXP_OK, "" },
    { " \t\r\n{" A "} \n\t\r ", 8, MIXP_OK, "" },
    { "{ \"a\" : { \"shape\" : [ 2 ] ,\"data_offsets\":[ 0 , 8 ],\"dtype\":\"F32\" } }", 8, MIXP_OK, "" },
    { "{}", 0, MIXP_OK, "" },
    { "{\"__metadata__\":{}}", 0, MIXP_OK, "" },
    { "{\"__metadata__\":null," A "}", 8, MIXP_OK, "" },
    { "{" A ",\"__metadata__\":{\"x\":\"y\"}}", 8, MIXP_OK, "" },
    { NAME(""), 8, MIXP_OK, "" }, { NAME("../x/y"), 8, MIXP_OK, "" },
    { NAME("\xF0\x9F\x98\x80\xEF\xBF\xBF\xED\x9F\xBF\xF4\x8F\xBF\xBF"), 8, MIXP_OK, "" },
    { NAME("\\ud83D\\uDe00\\u00e9\\/\\b\\f\\n\\r\\t\\\"\\\\"), 8, MIXP_OK, "" },
    { T("F32", "[2,0]", "[0,0]"), 0, MIXP_OK, "" }, { T("F32", "[]", "[0,4]"), 4, MIXP_OK, "" },
    { T("F64", "[1,1,1,1,1,1,1,1]", "[0,8]"), 8, MIXP_OK, "" },
    { T("F4", "[6]", "[0,3]"), 3, MIXP_OK, "" }, { T("F6_E2M3", "[4]", "[0,3]"), 3, MIXP_OK, "" },
    { TWO("[3]" AT(0,3), "[0]" AT(3,3)), 3, MIXP_OK, "" }, { TWO("[0]" AT(0,0), "[3]" AT(0,3)), 3, MIXP_OK, "" },
    { TWO("[1]" AT(3,4), "[3]" AT(0,3)), 4, MIXP_OK, "" },     /* not in the header's order */
    /* encoding */
    { "\xEF\xBB\xBF{" A "}", 8, BAD, "byte 0" }, { "{" A "}\x01", 8, BAD, "text after" },
    { NAME("\xC0\x80"), 8, BAD, "UTF-8" }, { NAME("\xE0\x9F\xBF"), 8, BAD, "UTF-8" },
    { NAME("\xF0\x8F\xBF\xBF"), 8, BAD, "UTF-8" }, { NAME("\xF4\x90\x80\x80"), 8, BAD, "UTF-8" },
    { NAME("\xED\xA0\x80"), 8, BAD, "UTF-8" }, { NAME("\x80"), 8, BAD, "UTF-8" },
    { NAME("\xC3"), 8, BAD, "UTF-8" }, { NAME("\xFF"), 8, BAD, "UTF-8" },
    { NAME("a\nb"), 8, BAD, "control" }, { NAME("a\x1F"), 8, BAD, "control" },
    { NAME("\\ud800"), 8, BAD, "surrogate" }, { NAME("\\udc00"), 8, BAD, "surrogate" },
    { NAME("\\ud800\\u0041"), 8, BAD, "surrogate" }, { NAME("\\ud800x"), 8, BAD, "surrogate" },
    { NAME("\\x41"), 8, BAD, "escape" }, { NAME("\\u12g4"), 8, BAD, "escape" }, { NAME("\\'"), 8, BAD, "escape" },
    { NAME("\\u 123"), 8, BAD, "escape" }, { NAME("\\U0041"), 8, BAD, "escape" },
    { NAME("a\\u0000b"), 8, BAD, "NUL" }, { "{\"__metadata__\":{\"k\":\"\\u0000\"}}", 0, BAD, "NUL" },
    /* the shape of the text */
    { "[]", 0, BAD, "byte 0" }, { "\"x\"", 0, BAD, "'{'" }, { "12", 0, BAD, "'{'" }, { "null", 0, BAD, "'{'" },
    { "  ", 0, BAD, "'{'" }, { "{} x", 0, BAD, "text after" }, { "{}{}", 0, BAD, "text after" },
    { "{" A ",}", 8, BAD, "name" }, { "{," A "}", 8, BAD, "name" }, { "{" A "," A, 8, BAD, "" },
    { "{" A, 8, BAD, "'}'" }, { "{/**/" A "}", 8, BAD, "" }, { "{" A "}//", 8, BAD, "text after" },
    { "{'a':{}}", 0, BAD, "double quotes" }, { "{a:{}}", 0, BAD, "double quotes" }, { "{\"a", 0, BAD, "unterminated" },
    { "{\"a\\", 0, BAD, "escape" }, { "{\"a\\u12", 0, BAD, "escape" }, { "{\"a\"}", 0, BAD, "':'" },
    { "{\"a\":}", 0, BAD, "'{'" }, { "{\"a\":NaN}", 0, BAD, "'{'" }, { "{\"a\":null}", 0, BAD, "'{'" },
    { "{\"a\":[{}]}", 0, BAD, "'{'" }, { "{\"a\" {}}", 0, BAD, "':'" },
    { T("F32", "[2,]", "[0,8]"), 8, BAD, "number" }, { T("F32", "[,2]", "[0,8]"), 8, BAD, "number" },
    { T("F32", "[[2]]", "[0,8]"), 8, BAD, "number" }, { T("F32", "[2", "[0,8]"), 8, BAD, "" },
    /* numbers */
    { T("F32", "[-2]", "[0,8]"), 8, BAD, "decimal" }, { T("F32", "[-0]", "[0,0]"), 0, BAD, "decimal" },
    { T("F32", "[2.0]", "[0,8]"), 8, BAD, "']'" }, { T("F32", "[2.9]", "[0,8]"), 8, BAD, "']'" },
    { T("F32", "[2e0]", "[0,8]"), 8, BAD, "']'" }, { T("F32", "[02]", "[0,8]"), 8, BAD, "decimal" },
    { T("F32", "[+2]", "[0,8]"), 8, BAD, "decimal" }, { T("F32", "[0x2]", "[0,8]"), 8, BAD, "']'" },
    { T("F32", "[00]", "[0,0]"), 0, BAD, "decimal" }, { T("F32", "[\"2\"]", "[0,8]"), 8, BAD, "decimal" },
    { T("F32", "[true]", "[0,8]"), 8, BAD, "decimal" }, { T("F32", "[null]", "[0,8]"), 8, BAD, "decimal" },
    { T("F32", "[Infinity]", "[0,8]"), 8, BAD, "decimal" }, { T("F32", "[2 2]", "[0,8]"), 8, BAD, "']'" },
    { T("U8", "[18446744073709551616]", "[0,0]"), 0, BAD, "2^64" },
    { T("U8", "[99999999999999999999999]", "[0,0]"), 0, BAD, "2^64" },
    { T("U8", "[9007199254740993]", "[0,9007199254740992]"), 8, BAD, "do not fit" },   /* exact past 2^53 */
    { T("U8", "[9007199254740993]", "[0,9007199254740993]"), 8, BAD, "cut short" },
    { T("F32", "[2]", "[0.0,8]"), 8, BAD, "','" }, { T("F32", "[2]", "[-0,8]"), 8, BAD, "decimal" },
    /* the tensor's members */
    { "{\"a\":{}}", 0, BAD, "missing" }, { "{\"a\":{\"shape\":[2],\"data_offsets\":[0,8]}}", 8, BAD, "missing" },
    { "{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,8]}}", 8, BAD, "missing" },
    { "{\"a\":{\"dtype\":\"F32\",\"shape\":[2]}}", 8, BAD, "missing" },
    { "{\"a\":{\"dtype\":\"F32\",\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8, BAD, "twice" },
    { "{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"shape\":[2],\"data_offsets\":[0,8]}}", 8, BAD, "twice" },
    { "{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8],\"data_offsets\":[0,8]}}", 8, BAD, "twice" },
    { "{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8],\"x\":1}}", 8, BAD, "unknown key" },
    { "{\"a\":{\"dtype\":32,\"shape\":[2],\"data_offsets\":[0,8]}}", 8, BAD, "dtype is not a string" },
    { "{\"a\":{\"dtype\":null,\"shape\":[2],\"data_offsets\":[0,8]}}", 8, BAD, "dtype is not a string" },
    { T("F32", "2", "[0,8]"), 8, BAD, "'['" }, { T("F32", "null", "[0,8]"), 8, BAD, "'['" },
    { T("F32", "{}", "[0,8]"), 8, BAD, "'['" }, { T("F32", "[2]", "8"), 8, BAD, "'['" },
    { T("F32", "[2]", "[]"), 8, BAD, "two numbers" }, { T("F32", "[2]", "[0]"), 8, BAD, "two numbers" },
    { T("F32", "[2]", "[0,8,8]"), 8, BAD, "two numbers" }, { T("F33", "[2]", "[0,8]"), 8, MIXP_ERR_DTYPE, "'F33'" },
    { T("f32", "[2]", "[0,8]"), 8, MIXP_ERR_DTYPE, "unknown dtype 'f32' in tensor 'a'" }, { T("", "[2]", "[0,8]"), 8, MIXP_ERR_DTYPE, "''" },
    { T("F64", "[1,1,1,1,1,1,1,1,1]", "[0,8]"), 8, MIXP_ERR_SHAPE, "rank above 8" },
    /* names */
    { "{" A "," A "}", 8, BAD, "two tensors have the name 'a'" },
    { "{" A ",\"\\u0061\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[8,8]}}", 8, BAD, "two tensors have the name 'a'" },
    { "{\"__metadata__\":{}," A ",\"__metadata__\":{}}", 8, BAD, "twice" },
    { "{\"__metadata__\":null,\"__metadata__\":{}}", 0, BAD, "twice" },
    { "{\"__metadata__\":{\"a\":\"1\",\"b\":\"2\",\"\\u0061\":\"1\"}}", 0, BAD, "key 'a' appears twice" },
    /* offsets */
    { T("F32", "[2]", "[8,0]"), 8, BAD, "before they begin" }, { T("F32", "[2]", "[4,12]"), 12, BAD, "gap" },
    { TWO("[3]" AT(0,3), "[3]" AT(4,7)), 7, BAD, "'b': its data leaves a gap" },
    { TWO("[3]" AT(0,3), "[3]" AT(2,5)), 5, BAD, "'b': its data overlaps the data before" },
    { TWO("[3]" AT(0,3), "[3]" AT(0,3)), 3, BAD, "overlaps" }, { TWO("[3]" AT(0,3), "[0]" AT(1,1)), 3, BAD, "overlaps" },
    { TWO("[3]" AT(0,3), "[0]" AT(5,5)), 3, BAD, "gap" },
    { T("F32", "[2]", "[0,8]"), 7, BAD, "cut short" }, { T("F32", "[2]", "[0,8]"), 0, BAD, "cut short" },
    { T("F32", "[2]", "[0,8]"), 9, BAD, "longer" }, { T("F32", "[2]", "[0,8]"), 99, BAD, "longer" }, { "{}", 1, BAD, "longer" },
    { T("U8", "[18446744073709551615]", "[0,18446744073709551615]"), 8, BAD, "too large" },
    /* sizes */
    { T("F32", "[2,18446744073709551614]", "[0,8]"), 8, BAD, "too large" },
    { T("F32", "[2,9223372036854775807]", "[0,8]"), 8, BAD, "too large" },
    { T("U8", "[4611686018427387904,2,2]", "[0,0]"), 0, BAD, "too large" },
    { T("U8", "[9223372036854775808,2,0]", "[0,0]"), 0, BAD, "too large" },
    { T("U8", "[0,9223372036854775808]", "[0,0]"), 0, BAD, "too large" },     /* no int64_t holds it */
    { T("U8", "[0,9223372036854775807]", "[0,0]"), 0, BAD, "too large" },     /* 8 * (2^63-1) bits */
    { T("U8", "[0,4611686018427387904,2]", "[0,0]"), 0, BAD, "too large" },   /* wherever the 0 stands */
    { T("U8", "[4611686018427387904,0,2]", "[0,0]"), 0, BAD, "too large" },
    { T("U8", "[4611686018427387904,2,0]", "[0,0]"), 0, BAD, "too large" },
    { T("U8", "[0,1152921504606846976]", "[0,0]"), 0, MIXP_OK, "" },
    { T("U8", "[1152921504606846976,0]", "[0,0]"), 0, MIXP_OK, "" },
    { T("F64", "[2305843009213693952]", "[0,0]"), 0, BAD, "too large" },
    { T("F32", "[3]", "[0,8]"), 8, BAD, "do not fit" }, { T("F64", "[2]", "[0,8]"), 8, BAD, "do not fit" },
    { T("F4", "[3]", "[0,1]"), 1, BAD, "whole bytes" }, { T("F6_E3M2", "[3]", "[0,2]"), 2, BAD, "whole bytes" },
    /* metadata */
    { "{\"__metadata__\":{\"k\":1}}", 0, BAD, "not a string" }, { "{\"__metadata__\":{\"k\":null}}", 0, BAD, "not a string" },
    { "{\"__metadata__\":{\"k\":{}}}", 0, BAD, "not a string" }, { "{\"__metadata__\":[]}", 0, BAD, "'{'" },
    { "{\"__metadata__\":\"x\"}", 0, BAD, "'{'" }, { "{\"__metadata__\":nul}", 0, BAD, "'{'" }
};

static void test_malformed_rows(void) {
    unsigned char bytes[1024];
    char error[MIXP_MESSAGE_SIZE];
    size_t i;
    for (i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        size_t n = make(bytes, rows[i].header, strlen(rows[i].header), rows[i].data);
        mixp_safetensors *f = NULL;
        mixp_result r = read_bytes(bytes, n, &f, error);
        if (r != rows[i].want || !strstr(error, rows[i].part)) printf("  row %s: %s\n", rows[i].header, error);
        CHECK_INT(r, rows[i].want);
        CHECK_TEXT(error, rows[i].part);
        CHECK((f != NULL) == (r == MIXP_OK));
        if (r != MIXP_OK) CHECK_TEXT(error, "(x.safetensors)");
        mixp_safetensors_free(f);
    }
    printf("  %d files\n", (int)i);
}

/* A NUL as padding, the eight bytes of the length, names decoded, an odd offset. */
static void test_malformed_bytes(void) {
    static const uint64_t lengths[] = { 0, 1, 11, 100000001, UINT64_C(1) << 31, UINT64_C(1) << 63,
                                        UINT64_MAX, UINT64_MAX - 7, UINT64_MAX - 8 };
    static const char odd[] = "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
                              "\"b\":{\"dtype\":\"F64\",\"shape\":[],\"data_offsets\":[1,9]}}";
    unsigned char bytes[1024];
    char error[MIXP_MESSAGE_SIZE];
    mixp_safetensors *f;
    size_t i, k, n = make(bytes, "{}\0\0", 4, 0);
    CHECK_INT(read_bytes(bytes, n, &f, error), MIXP_ERR_FORMAT);
    for (i = 0; i < 8; i++) CHECK_INT(read_bytes(bytes, i, &f, error), MIXP_ERR_FORMAT);
    for (i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        n = make(bytes, "{}        ", 10, 0);
        for (k = 0; k < 8; k++) bytes[k] = (unsigned char)(lengths[i] >> 8 * k & 0xFF);
        CHECK_INT(read_bytes(bytes, n, &f, error), MIXP_ERR_FORMAT);
        CHECK_TEXT(error, "header length");
    }
    n = make(bytes, NAME("\\ud83d\\ude00\\u00e9\\u20aC\\/\\b\\t"), strlen(NAME("\\ud83d\\ude00\\u00e9\\u20aC\\/\\b\\t")), 8);
    CHECK_INT(read_bytes(bytes, n, &f, error), MIXP_OK);
    CHECK(mixp_safetensors_find(f, "\xF0\x9F\x98\x80\xC3\xA9\xE2\x82\xAC/\b\t") != NULL);
    mixp_safetensors_free(f);
    n = make(bytes, odd, sizeof odd - 1, 9);
    CHECK_INT(read_bytes(bytes, n, &f, error), MIXP_OK);
    CHECK(memcmp(mixp_safetensors_find(f, "b")->data, "\1\2\3\4\5\6\7\10", 8) == 0);
    mixp_safetensors_free(f);
    CHECK_INT(mixp_safetensors_read(NULL, &f, error, MIXP_MESSAGE_SIZE), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_safetensors_read("x.safetensors", NULL, NULL, 0), MIXP_ERR_ARGUMENT);
    CHECK(mixp_safetensors_count(NULL) == 0 && !mixp_safetensors_at(NULL, 0));
    CHECK(!mixp_safetensors_find(NULL, "a") && !mixp_safetensors_metadata(NULL, "a"));
    mixp_safetensors_free(NULL);
}

static const char small[] = "{\"__metadata__\":{\"k\":\"v\\n\"},\"a\\u00e9\":{\"dtype\":\"F32\",\"shape\":[1,2],"
                            "\"data_offsets\":[0,8]},\"b\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[8,9]}} ";

/* Cut at every byte: always an error. */
static void test_truncated(void) {
    unsigned char bytes[1024];
    char error[MIXP_MESSAGE_SIZE];
    size_t i, n = make(bytes, small, sizeof small - 1, 9);
    mixp_safetensors *f;
    for (i = 0; i < n; i++) {
        CHECK_INT(read_bytes(bytes, i, &f, error), MIXP_ERR_FORMAT);
        CHECK(error[0] && !f);
    }
    CHECK_INT(read_bytes(bytes, n, &f, error), MIXP_OK);
    mixp_safetensors_free(f);
    printf("  %d lengths\n", (int)n);
}

static void put_byte(const char *path, size_t at, int byte) {
    FILE *f = fopen(path, "r+b");
    CHECK(f && fseek(f, (long)at, SEEK_SET) == 0 && fputc(byte, f) == byte && fclose(f) == 0);
}

/* Every byte of the header changed in 14 ways: what still reads must be whole. */
static void test_flipped(void) {
    static const char other[] = "\"\\{}[9";
    unsigned char bytes[1024];
    char error[MIXP_MESSAGE_SIZE];
    size_t i, k, e, n = make(bytes, small, sizeof small - 1, 9), total;
    mixp_safetensors *f;
    int64_t t;
    put_file("flip", bytes, n);
    for (i = 0; i < n - 9; i++)
        for (k = 0; k < 14; k++) {
            put_byte("flip", i, k < 8 ? bytes[i] ^ 1 << k : other[k - 8]);
            mixp_result r = mixp_safetensors_read("flip", &f, error, MIXP_MESSAGE_SIZE);
            put_byte("flip", i, bytes[i]);
            CHECK((r == MIXP_OK) == (f != NULL) && (r == MIXP_OK) == (error[0] == 0));
            for (t = 0, total = 0; t < mixp_safetensors_count(f); t++) {
                const unsigned char *data = (const unsigned char *)mixp_safetensors_at(f, t)->data;
                for (e = 0; e < mixp_safetensors_at(f, t)->bytes; e++) total += data[e] == total;
            }
            if (f) CHECK_INT(total, 9);
            mixp_safetensors_free(f);
        }
    printf("  %d files\n", (int)(n - 9) * 14);
}

/* 100 000 entries, and names that begin alike: n log n, not n squared. */
static void test_many_entries(void) {
    enum { N = 100000 };
    mixp_st_entry *e = (mixp_st_entry *)calloc(N, sizeof *e);
    char (*name)[80] = (char (*)[80])malloc((size_t)N * 80), error[MIXP_MESSAGE_SIZE];
    mixp_safetensors *f = NULL;
    static const char *const absent[4] = { "", "a", "transformer.a.common.beginning.of.some.length.", "z" };
    const unsigned char byte = 7;
    int i, right = 0;
    CHECK(e && name);
    if (!e || !name) return;
    for (i = 0; i < N; i++) {
        snprintf(name[i], 80, "transformer.a.common.beginning.of.some.length.%d", (int)((long)i * 7919 % N));
        e[i] = entry(name[i], NULL, MIXP_U8, 0, 0, 0, &byte, 1);
    }
    CHECK_INT(mixp_safetensors_write("many", e, N, NULL, 0, error, MIXP_MESSAGE_SIZE), MIXP_OK);
    CHECK_INT(mixp_safetensors_read("many", &f, error, MIXP_MESSAGE_SIZE), MIXP_OK);
    CHECK_INT(mixp_safetensors_count(f), N);
    for (i = 0; i < N; i++) {
        const mixp_st_entry *found = mixp_safetensors_find(f, name[i]);
        right += found && strcmp(found->name, name[i]) == 0 && found->bytes == 1;
    }
    CHECK_INT(right, N);        /* each in turn: a search from the beginning took half a minute */
    for (i = 0; i < 4; i++) CHECK(mixp_safetensors_find(f, absent[i]) == NULL);
    mixp_safetensors_free(f);
    free(e);
    free(name);
    remove("many");
}

/* The deepest nesting that fits: no recursion, so no overflow of the stack. */
static void test_deep_nesting(void) {
    size_t n = 1000000, i;
    unsigned char *bytes = (unsigned char *)malloc(n + 8);
    char *text = (char *)malloc(n), error[MIXP_MESSAGE_SIZE];
    mixp_safetensors *f;
    static const char *const open[] = { "[", "{\"a\":", "{\"a\":{\"shape\":[" };
    CHECK(bytes && text);
    if (!bytes || !text) return;
    for (size_t k = 0; k < 3; k++) {
        for (i = 0; i < n; i++) text[i] = open[k][i % strlen(open[k])];
        CHECK_INT(read_bytes(bytes, make(bytes, text, n, 0), &f, error), MIXP_ERR_FORMAT);
    }
    memset(text, ' ', n);
    CHECK_INT(read_bytes(bytes, make(bytes, text, n, 0), &f, error), MIXP_ERR_FORMAT);
    free(bytes);
    free(text);
    remove("x.safetensors");
}
