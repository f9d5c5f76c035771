#pragma once
#include "disk.c"
/* --- writing a file ------------------------------------------------------------------------ */

/* The plan of a file to be written. */
typedef struct mixpi_plan {
    mixp_context  *ctx;         /* owner of memory and device; NULL = malloc               */
    mixpi_st_item *items;       /* in the order of the file                                */
    size_t         n_items;
    const char *const (*metadata)[2];
    int64_t        n_metadata;
    char          *header;      /* the length prefix and the header                        */
    uint64_t       header_size;
} mixpi_plan;

/* A text that grows at `at`. With at NULL, only its length is counted. */
typedef struct mixpi_text { char *at; size_t length; } mixpi_text;

static void mixpi_text_add(mixpi_text *t, const char *s) {
    size_t n = strlen(s);
    if (t->at) memcpy(t->at + t->length, s, n);
    t->length += n;
}

static void mixpi_text_number(mixpi_text *t, const char *before, uint64_t number) {
    char digits[32];
    snprintf(digits, sizeof digits, "%llu", (unsigned long long)number);
    mixpi_text_add(t, before);
    mixpi_text_add(t, digits);
}

static void mixpi_text_byte(mixpi_text *t, char c) {
    if (t->at) t->at[t->length] = c;
    t->length++;
}

/* Adds a string in quotes, with the escapes of the format's own library. */
static void mixpi_text_quote(mixpi_text *t, const char *s) {
    static const char from[] = "\"\\\b\f\n\r\t", to[] = "\"\\bfnrt";
    char code[8];
    mixpi_text_byte(t, '"');
    for (; *s; s++) {
        const char *hit = strchr(from, *s);
        if (hit) {
            mixpi_text_byte(t, '\\');
            mixpi_text_byte(t, to[hit - from]);
        } else if ((unsigned char)*s < 0x20) {
            snprintf(code, sizeof code, "\\u%04x", (unsigned)(unsigned char)*s);
            mixpi_text_add(t, code);
        } else mixpi_text_byte(t, *s);
    }
    mixpi_text_byte(t, '"');
}

static void mixpi_text_tensor(mixpi_text *t, const mixpi_st_item *item) {
    mixpi_text_quote(t, item->e.name);
    mixpi_text_add(t, ":{\"dtype\":\"");
    mixpi_text_add(t, item->type->name);
    mixpi_text_add(t, "\",\"shape\":[");
    for (int d = 0; d < item->e.rank; d++)
        mixpi_text_number(t, d ? "," : "", (uint64_t)item->e.shape[d]);
    mixpi_text_number(t, "],\"data_offsets\":[", item->begin);
    mixpi_text_number(t, ",", item->end);
    mixpi_text_add(t, "]}");
}

/* Adds the header's object, padded with spaces so that the data after it is aligned. */
static void mixpi_text_header(mixpi_text *t, const mixpi_plan *plan) {
    mixpi_text_add(t, "{");
    if (plan->n_metadata) mixpi_text_add(t, "\"__metadata__\":{");
    for (int64_t m = 0; m < plan->n_metadata; m++) {
        if (m) mixpi_text_add(t, ",");
        mixpi_text_quote(t, plan->metadata[m][0]);
        mixpi_text_add(t, ":");
        mixpi_text_quote(t, plan->metadata[m][1]);
    }
    if (plan->n_metadata) mixpi_text_add(t, plan->n_items ? "}," : "}");
    for (size_t i = 0; i < plan->n_items; i++) {
        if (i) mixpi_text_add(t, ",");
        mixpi_text_tensor(t, &plan->items[i]);
    }
    mixpi_text_add(t, "}");
    while (t->length % 8) mixpi_text_add(t, " ");
}

/* Makes the header: a first pass counts, a second pass fills. */
static void mixpi_plan_header(mixpi_report *r, mixpi_plan *plan) {
    mixpi_text text = { NULL, 0 };
    if (r->result != MIXP_OK) return;
    mixpi_text_header(&text, plan);
    uint64_t length = text.length;
    if (length > MIXPI_ST_MAX_HEADER)
        mixpi_report_fail(r, MIXP_ERR_ARGUMENT,
            "the header would need %.0f bytes; the format's limit is %.0f", (double)length,
            (double)MIXPI_ST_MAX_HEADER);
    plan->header_size = 8 + length;
    plan->header = (char *)mixpi_st_allocate(r, plan->ctx, plan->header_size, 1);
    if (!plan->header) return;
    for (int i = 0; i < 8; i++) plan->header[i] = (char)(unsigned char)(length >> 8 * i & 0xFF);
    text.at = plan->header + 8;
    text.length = 0;
    mixpi_text_header(&text, plan);
}

/* Checks that the texts are UTF-8 and that each key appears once. */
static void mixpi_plan_check_metadata(mixpi_report *r, const mixpi_plan *plan) {
    mixpi_st_pair *pairs =
        (mixpi_st_pair *)mixpi_st_allocate(r, plan->ctx, (uint64_t)plan->n_metadata, sizeof *pairs);
    for (int64_t m = 0; pairs && m < plan->n_metadata; m++) {
        pairs[m].key = plan->metadata[m][0];
        pairs[m].text = plan->metadata[m][1];
        if (!mixpi_is_utf8(pairs[m].key) || !mixpi_is_utf8(pairs[m].text))
            mixpi_report_fail(r, MIXP_ERR_ARGUMENT, "a metadata key or value is NULL or not UTF-8");
    }
    mixpi_st_sort_pairs(r, pairs, (size_t)plan->n_metadata, MIXP_ERR_ARGUMENT);
    mixpi_st_free(plan->ctx, pairs);
}

/* Checks an entry and finds its type. */
static mixp_result mixpi_plan_check_entry(mixpi_report *r, mixpi_st_item *item) {
    const mixp_st_entry *e = &item->e;
    uint64_t bytes = e->bytes;
    if (!mixpi_is_utf8(e->name) || strcmp(e->name, "__metadata__") == 0)
        return mixpi_report_fail(r, MIXP_ERR_ARGUMENT,
            "the name '%.60s' is NULL, not UTF-8 or reserved", e->name ? e->name : "");

    /* The type and the rank. */
    item->type = e->type ? mixpi_st_type_named(e->type) : mixpi_st_type_of(e->dtype);
    if (!item->type)
        return mixpi_report_fail(r, MIXP_ERR_DTYPE,
            "tensor '%.60s': safetensors has no dtype for %.60s", e->name,
            e->type ? e->type : mixp_dtype_name(e->dtype));
    if (e->rank < 0 || e->rank > MIXP_MAX_RANK)
        return mixpi_report_fail(r, MIXP_ERR_ARGUMENT, "tensor '%.60s': rank %d is not 0 to %d",
            e->name, e->rank, MIXP_MAX_RANK);

    /* The bytes must be those of the shape. */
    if (bytes > UINT64_MAX / 8 || mixpi_st_bits(item) != bytes * 8 || (bytes && !e->data))
        mixpi_report_fail(r, MIXP_ERR_ARGUMENT,
            "tensor '%.60s': shape, data and %.0f bytes do not fit together", e->name,
            (double)bytes);
    return r->result;
}

/* Checks all entries and assigns the offsets of their data. */
static void mixpi_plan_make(mixpi_report *r, mixpi_plan *plan) {
    uint64_t at = 0;
    mixpi_plan_check_metadata(r, plan);
    for (size_t i = 0; r->result == MIXP_OK && i < plan->n_items; i++)
        mixpi_plan_check_entry(r, &plan->items[i]);
    mixpi_st_sort(r, plan->items, plan->n_items, MIXP_ERR_ARGUMENT);
    if (r->result != MIXP_OK) return;
    qsort(plan->items, plan->n_items, sizeof plan->items[0], mixpi_st_by_type);
    for (size_t i = 0; i < plan->n_items; i++) {
        mixpi_st_item *item = &plan->items[i];
        item->begin = at;
        at += item->e.bytes;
        item->end = at;
    }
    mixpi_plan_header(r, plan);
}

static void mixpi_plan_write(mixpi_report *r, const mixpi_plan *plan) {
    mixpi_save save = MIXPI_ZERO;
    save.report = r;
    save.ctx = plan->ctx;
    save.expected = plan->header_size;
    if (plan->n_items) save.expected += plan->items[plan->n_items - 1].end;
    save.buffer = (char *)mixpi_st_allocate(r, plan->ctx, MIXPI_SAVE_PIECE, 1);
    if (!r->stream) mixpi_save_open(&save);
    mixpi_save_put(&save, plan->header, plan->header_size, 0);
    for (size_t i = 0; i < plan->n_items; i++) {
        const mixpi_st_item *item = &plan->items[i];
        mixpi_save_put(&save, item->e.data, item->e.bytes, item->on_device);
    }
    mixpi_save_end(&save);
    mixpi_st_free(plan->ctx, save.buffer);
}

static mixp_result mixpi_plan_save(mixpi_report *r, mixpi_plan *plan) {
    if (r->result == MIXP_OK) mixpi_plan_make(r, plan);
    if (r->result == MIXP_OK) mixpi_plan_write(r, plan);
    mixpi_st_free(plan->ctx, plan->header);
    mixpi_st_free(plan->ctx, plan->items);
    return r->result;
}

MIXPI_SELDOM
MIXPREC_API mixp_result mixp_safetensors_write(const char *path, const mixp_st_entry *entries,
    int64_t n, const char *const (*metadata)[2], int64_t n_metadata, char *error,
    size_t error_size) {
    mixpi_report r = mixpi_report_begin(path, error, error_size);
    mixpi_plan plan;
    if (!path || n < 0 || n_metadata < 0 || (n && !entries) || (n_metadata && !metadata))
        return mixpi_report_fail(
            &r, MIXP_ERR_ARGUMENT, "a pointer is NULL, or a count is negative");

    /* A plan of a copy of the entries. */
    memset(&plan, 0, sizeof plan);
    plan.metadata = metadata;
    plan.n_metadata = n_metadata;
    plan.n_items = (size_t)n;
    plan.items = (mixpi_st_item *)mixpi_st_allocate(&r, NULL, (uint64_t)n, sizeof plan.items[0]);
    if (!plan.items) return r.result;
    memset(plan.items, 0, plan.n_items * sizeof plan.items[0]);
    for (size_t i = 0; i < plan.n_items; i++) plan.items[i].e = entries[i];
    return mixpi_plan_save(&r, &plan);
}
