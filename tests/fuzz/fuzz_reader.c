/* fuzz_reader.c - any bytes as a safetensors file: refused with a reason, or read, and then every
 * byte is there, and what is written again reads the same.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "memory_disk.h"
#include "fuzz.h"

static uint64_t bits_of(const mixp_st_entry *e) {
    static const struct { const char *name; uint64_t bits; } types[] = {
        { "BOOL", 8 }, { "F4", 4 }, { "F6_E2M3", 6 }, { "F6_E3M2", 6 }, { "U8", 8 }, { "I8", 8 },
        { "F8_E5M2", 8 }, { "F8_E4M3", 8 }, { "F8_E8M0", 8 }, { "F8_E4M3FNUZ", 8 }, { "F8_E5M2FNUZ", 8 },
        { "I16", 16 }, { "U16", 16 }, { "F16", 16 }, { "BF16", 16 }, { "I32", 32 }, { "U32", 32 },
        { "F32", 32 }, { "C64", 64 }, { "F64", 64 }, { "I64", 64 }, { "U64", 64 } };
    uint64_t bits = 0;
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++)
        if (strcmp(types[i].name, e->type) == 0) bits = types[i].bits;
    EXPECT(bits > 0);
    for (int k = 0; k < e->rank; k++) bits *= (uint64_t)e->shape[k];
    return bits;
}

/* Every entry is whole, and has a name of its own. */
static void look_at(const mixp_safetensors *f, size_t file_size) {
    int64_t i, n = mixp_safetensors_count(f);
    unsigned sum = 0;
    size_t k, total = 0;
    for (i = 0; i < n; i++) {
        const mixp_st_entry *e = mixp_safetensors_at(f, i);
        EXPECT(e->rank >= 0 && e->rank <= MIXP_MAX_RANK);
        EXPECT(bits_of(e) == (uint64_t)e->bytes * 8);
        for (k = 0; k < e->bytes; k++) sum += ((const unsigned char *)e->data)[k];
        EXPECT((uintptr_t)e->data % 64 == 0);
        if (n < 100) EXPECT(mixp_safetensors_find(f, e->name) == e);
        total += e->bytes;
    }
    EXPECT(total <= file_size && sum < UINT32_MAX);
    mixp_safetensors_metadata(f, "format");
    mixp_safetensors_metadata(f, "");
}

static void fuzz_one(const uint8_t *data, size_t size) {
    char error[MIXP_MESSAGE_SIZE];
    mixp_safetensors *f, *again;
    mixp_st_entry *entries;
    disk_put("in", data, size);
    if (mixp_safetensors_read("in", &f, error, sizeof error) != MIXP_OK) {
        EXPECT(!f && error[0]);
        return;
    }
    EXPECT(error[0] == '\0');
    look_at(f, size);
    int64_t n = mixp_safetensors_count(f);
    entries = (mixp_st_entry *)malloc((size_t)n * sizeof *entries + 1);
    for (int64_t i = 0; i < n; i++) entries[i] = *mixp_safetensors_at(f, i);
    EXPECT(mixp_safetensors_write("out", entries, n, NULL, 0, error, sizeof error) == MIXP_OK);
    EXPECT(mixp_safetensors_read("out", &again, error, sizeof error) == MIXP_OK);
    EXPECT(mixp_safetensors_count(again) == n);
    for (int64_t i = 0; i < n && n < 100; i++) {
        const mixp_st_entry *e = mixp_safetensors_find(again, entries[i].name);
        EXPECT(e && e->bytes == entries[i].bytes && e->rank == entries[i].rank);
        EXPECT(!memcmp(e->data, entries[i].data, e->bytes) && strcmp(e->type, entries[i].type) == 0);
    }
    free(entries);
    mixp_safetensors_free(f);
    mixp_safetensors_free(again);
    disk_remove("out");
}

static size_t file_of(const char *header, size_t n_data, uint8_t *out) {
    size_t i, n = strlen(header);
    for (i = 0; i < 8; i++) out[i] = (uint8_t)((uint64_t)n >> 8 * i & 0xFF);
    memcpy(out + 8, header, n);
    for (i = 0; i < n_data; i++) out[8 + n + i] = (uint8_t)(i * 37);
    return 8 + n + n_data;
}

static size_t fuzz_seed(int i, uint8_t *out) {
    static const struct { const char *header; size_t data; } seeds[] = {
        { "{}", 0 },
        { "{\"__metadata__\":{\"format\":\"pt\",\"k\":\"v\\n\"},\"a\\u00e9\":{\"dtype\":\"F32\",\"shape\":[1,2],"
          "\"data_offsets\":[0,8]},\"b\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[8,9]}} ", 9 },
        { "{\"x\":{\"dtype\":\"F4\",\"shape\":[6],\"data_offsets\":[0,3]},\"__metadata__\":null}", 3 },
        { "{\"e\":{\"shape\":[0,3],\"data_offsets\":[4,4],\"dtype\":\"F64\"},\"\\ud83d\\ude00\\\"\\\\\":"
          "{\"dtype\":\"I8\",\"shape\":[2,2],\"data_offsets\":[0,4]}}", 4 },
        { "{\"__metadata__\":{},\"__metadata__\":{}}", 0 },
        { "{\"a\":{\"dtype\":\"C64\",\"shape\":[1,1,1,1,1,1,1,1],\"data_offsets\":[0,8]},\"b\":{\"dtype\":\"BF16\","
          "\"shape\":[4611686018427387904,2,0],\"data_offsets\":[8,8]}}", 8 } };
    if (i >= (int)(sizeof seeds / sizeof seeds[0])) return 0;
    return file_of(seeds[i].header, seeds[i].data, out);
}
