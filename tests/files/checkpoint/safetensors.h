/* safetensors.h - what a safetensors file holds: golden bytes, a round trip of each dtype, refusals.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
/* --- safetensors ------------------------------------------------------------------------------ */

static mixp_st_entry entry(const char *name, const char *type, mixp_dtype dtype, int rank, int64_t d0,
                           int64_t d1, const void *data, size_t bytes) {
    mixp_st_entry e;
    memset(&e, 0, sizeof e);
    e.name = name;
    e.type = type;
    e.dtype = dtype;
    e.rank = rank;
    e.shape[0] = d0;
    e.shape[1] = d1;
    e.data = data;
    e.bytes = bytes;
    return e;
}

/* The bytes of a tiny file, by hand from the format's description: the length, the header with
 * metadata first, larger elements before smaller ones, spaces up to a multiple of 8, the data. */
static void test_golden_bytes(void) {
    static const char text[] =
        "{\"__metadata__\":{\"format\":\"pt\"},"
        "\"w\":{\"dtype\":\"F32\",\"shape\":[1,2],\"data_offsets\":[0,8]},"
        "\"b\\\"\\n\\u0001\xC3\xA9\":{\"dtype\":\"BF16\",\"shape\":[],\"data_offsets\":[8,10]},"
        "\"e\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[10,10]}}";
    static const unsigned char data[10] = { 0, 0, 0x80, 0x3F, 0, 0, 0x20, 0xC0, 0x49, 0x40 };
    static const char *const metadata[1][2] = { { "format", "pt" } };
    const float w[2] = { 1.0f, -2.5f };
    const uint16_t b = 0x4049;
    unsigned char want[512];
    size_t n = sizeof text - 1;
    mixp_st_entry e[3];
    mixp_safetensors *f = NULL;
    char error[MIXP_MESSAGE_SIZE];
    e[0] = entry("e", NULL, MIXP_U8, 1, 0, 0, NULL, 0);
    e[1] = entry("b\"\n\x01\xC3\xA9", NULL, MIXP_BF16, 0, 0, 0, &b, 2);
    e[2] = entry("w", NULL, MIXP_F32, 2, 1, 2, w, 8);
    memset(want, 0, 8);
    memcpy(want + 8, text, n);
    while (n % 8) want[8 + n++] = ' ';
    want[0] = (unsigned char)n;     /* 200..255: one byte is enough */
    CHECK(n > 199 && n < 256);
    memcpy(want + 8 + n, data, sizeof data);
    CHECK_INT(mixp_safetensors_write("g.safetensors", e, 3, metadata, 1, error, MIXP_MESSAGE_SIZE), MIXP_OK);
    CHECK(file_is("g.safetensors", want, 8 + n + sizeof data));
    CHECK_INT(mixp_safetensors_read("g.safetensors", &f, error, MIXP_MESSAGE_SIZE), MIXP_OK);
    CHECK_INT(mixp_safetensors_count(f), 3);
    CHECK(mixp_safetensors_find(f, "b\"\n\x01\xC3\xA9") == mixp_safetensors_at(f, 1));
    CHECK(mixp_safetensors_at(f, 3) == NULL && mixp_safetensors_at(f, -1) == NULL);
    CHECK(mixp_safetensors_find(f, "no") == NULL);
    CHECK_TEXT(mixp_safetensors_metadata(f, "format"), "pt");
    CHECK(mixp_safetensors_metadata(f, "other") == NULL);
    mixp_safetensors_free(f);
}

static const struct { const char *name; mixp_dtype dtype; size_t bits; } types[] = {
    { "F64", MIXP_F64, 64 }, { "F32", MIXP_F32, 32 }, { "F16", MIXP_F16, 16 }, { "BF16", MIXP_BF16, 16 },
    { "F8_E4M3", MIXP_F8_E4M3, 8 }, { "F8_E5M2", MIXP_F8_E5M2, 8 }, { "F8_E8M0", MIXP_F8_E8M0, 8 },
    { "F8_E4M3FNUZ", MIXP_F8_E4M3FNUZ, 8 }, { "F8_E5M2FNUZ", MIXP_F8_E5M2FNUZ, 8 },
    { "I64", MIXP_I64, 64 }, { "I32", MIXP_I32, 32 }, { "U8", MIXP_U8, 8 },
    { "BOOL", MIXP_DTYPE_COUNT, 8 }, { "I8", MIXP_DTYPE_COUNT, 8 }, { "I16", MIXP_DTYPE_COUNT, 16 },
    { "U16", MIXP_DTYPE_COUNT, 16 }, { "U32", MIXP_DTYPE_COUNT, 32 }, { "U64", MIXP_DTYPE_COUNT, 64 },
    { "C64", MIXP_DTYPE_COUNT, 64 }, { "F4", MIXP_DTYPE_COUNT, 4 }, { "F6_E2M3", MIXP_DTYPE_COUNT, 6 },
    { "F6_E3M2", MIXP_DTYPE_COUNT, 6 }
};
#define N_TYPES (sizeof types / sizeof types[0])

/* Every dtype with every byte pattern, NaN payloads among them, comes back as it went. The ones
 * that mixprec has are written by their dtype, the others by the format's word. */
static void test_round_trip(void) {
    unsigned char data[2048 + N_TYPES];
    char name[N_TYPES][32], error[MIXP_MESSAGE_SIZE];
    mixp_st_entry e[N_TYPES];
    mixp_safetensors *f = NULL;
    for (size_t i = 0; i < sizeof data; i++) data[i] = (unsigned char)(i * 167u + i / 256u);
    for (size_t i = 0; i < N_TYPES; i++) {
        snprintf(name[i], sizeof name[i], "t.%d", (int)i);
        e[i] = entry(name[i], types[i].dtype == MIXP_DTYPE_COUNT ? types[i].name : NULL, types[i].dtype,
                     2, 8, 32, data + i, 256 * types[i].bits / 8);
    }
    CHECK_INT(mixp_safetensors_write("r.safetensors", e, N_TYPES, NULL, 0, error, MIXP_MESSAGE_SIZE), MIXP_OK);
    CHECK_INT(mixp_safetensors_read("r.safetensors", &f, error, MIXP_MESSAGE_SIZE), MIXP_OK);
    CHECK_INT(mixp_safetensors_count(f), N_TYPES);
    for (size_t i = 0; i < N_TYPES; i++) {
        const mixp_st_entry *got = mixp_safetensors_find(f, name[i]);
        CHECK(got != NULL);
        if (!got) continue;
        CHECK_INT(got->dtype, types[i].dtype);
        CHECK(strcmp(got->type, types[i].name) == 0);
        CHECK(got->rank == 2 && got->shape[0] == 8 && got->shape[1] == 32);
        CHECK_INT(got->bytes, e[i].bytes);
        CHECK(memcmp(got->data, e[i].data, e[i].bytes) == 0);
    }
    for (size_t i = 0; i < N_TYPES; i++) {     /* every element is aligned, for larger ones come first */
        const char *start = (const char *)mixp_safetensors_at(f, 0)->data;
        const mixp_st_entry *got = mixp_safetensors_find(f, name[i]);
        CHECK(types[i].bits < 8 || ((const char *)got->data - start) % (int)(types[i].bits / 8) == 0);
    }
    mixp_safetensors_free(f);
}

static void test_write_refuses(void) {
    static const char *const nothing[1][2] = { { "k", NULL } };
    static const char *const not_utf8[1][2] = { { "k", "\xC0\x80" } };
    static const char *const twice[3][2] = { { "k", "1" }, { "j", "1" }, { "k", "2" } };
    const double d = 1.0;
    char error[MIXP_MESSAGE_SIZE];
    mixp_st_entry e[2], good = entry("x", NULL, MIXP_F64, 0, 0, 0, &d, 8);
    static const mixp_dtype none[] = { MIXP_F8_E3M4, MIXP_F8_E4M3B11FNUZ, MIXP_F6_E3M2, MIXP_F6_E2M3,
                                       MIXP_F4_E2M1, MIXP_DTYPE_COUNT };
    static const char *const bad_name[] = { NULL, "__metadata__", "\xED\xA0\x80", "\xF4\x90\x80\x80",
                                            "\xE0\x80\x80", "a\xFF", "\xC3" };
    put_file("keep", "old", 3);
#define REFUSES(n, code, part) do { error[0] = 0;                                                 \
        CHECK_INT(mixp_safetensors_write("keep", e, n, NULL, 0, error, MIXP_MESSAGE_SIZE), code); CHECK_TEXT(error, part); \
    } while (0)
    for (size_t i = 0; i < sizeof none / sizeof none[0]; i++) {
        e[0] = good;
        e[0].dtype = none[i];
        REFUSES(1, MIXP_ERR_DTYPE, "'x': safetensors has no dtype for");
    }
    e[0] = good; e[0].type = "F33"; REFUSES(1, MIXP_ERR_DTYPE, "F33");
    for (size_t i = 0; i < sizeof bad_name / sizeof bad_name[0]; i++) {
        e[0] = good;
        e[0].name = bad_name[i];
        REFUSES(1, MIXP_ERR_ARGUMENT, "name");
    }
    e[0] = e[1] = good; REFUSES(2, MIXP_ERR_ARGUMENT, "two tensors have the name 'x'");
    e[0] = good; e[0].bytes = 7; REFUSES(1, MIXP_ERR_ARGUMENT, "do not fit");
    e[0] = good; e[0].data = NULL; REFUSES(1, MIXP_ERR_ARGUMENT, "do not fit");
    e[0] = good; e[0].rank = 9; REFUSES(1, MIXP_ERR_ARGUMENT, "rank 9");
    e[0] = good; e[0].rank = -1; REFUSES(1, MIXP_ERR_ARGUMENT, "rank -1");
    e[0] = good; e[0].rank = 1; e[0].shape[0] = -1; REFUSES(1, MIXP_ERR_ARGUMENT, "do not fit");
    e[0] = good; e[0].rank = 2; e[0].shape[0] = e[0].shape[1] = INT64_C(1) << 32;
    e[0].bytes = 0; REFUSES(1, MIXP_ERR_ARGUMENT, "do not fit");   /* 2^64 elements wrap to 0 */
    e[0] = good; e[0].type = "F4"; e[0].rank = 1; e[0].shape[0] = 3; e[0].bytes = 1;
    REFUSES(1, MIXP_ERR_ARGUMENT, "do not fit");
    e[0] = good;
    CHECK_INT(mixp_safetensors_write("keep", e, 1, nothing, 1, error, MIXP_MESSAGE_SIZE), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_safetensors_write("keep", e, 1, not_utf8, 1, NULL, 0), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_safetensors_write("keep", e, 1, twice, 3, error, sizeof error), MIXP_ERR_ARGUMENT);
    CHECK_TEXT(error, "'k' appears twice");
    CHECK_INT(mixp_safetensors_write(NULL, e, 1, NULL, 0, error, MIXP_MESSAGE_SIZE), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_safetensors_write("keep", NULL, 1, NULL, 0, error, MIXP_MESSAGE_SIZE), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_safetensors_write("keep", e, -1, NULL, 0, error, MIXP_MESSAGE_SIZE), MIXP_ERR_ARGUMENT);
    CHECK(file_is("keep", "old", 3));
}
