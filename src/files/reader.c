#pragma once
#include "disk.c"
/* --- reading a file ------------------------------------------------------------------------ */

/* A file that was read. If reading failed, the file is empty and every query returns nothing. */
struct mixp_safetensors {
    mixp_context  *ctx;         /* owner of the memory; NULL = malloc                      */
    char          *header;      /* names and metadata, decoded in place                    */
    mixpi_st_item *items;       /* sorted by offset; in a checkpoint's load, by name */
    size_t         n_items;
    const mixpi_st_item **names;    /* items sorted by name; NULL except in mixp_safetensors_read */
    mixpi_st_pair *pairs;       /* sorted by key                                           */
    size_t         n_pairs;
    char          *packed;      /* texts of the pairs: key NUL text NUL; NULL = no metadata */
    uint64_t       data_at;     /* file offset of the data                                 */
    char          *data;        /* data of the wanted tensors                              */
};

static void mixpi_st_clear(mixp_safetensors *file) {
    mixp_context *ctx = file->ctx;
    mixpi_st_free(ctx, file->header);
    mixpi_st_free(ctx, file->items);
    mixpi_st_free(ctx, file->names);
    mixpi_st_free(ctx, file->pairs);
    mixpi_st_free(ctx, file->data);
    memset(file, 0, sizeof *file);
    file->ctx = ctx;
}

/* Packs the pairs over the part of the header that was already read. */
static void mixpi_st_read_metadata(mixpi_json *j, mixp_safetensors *file) {
    char *key, *text, *pack;
    int first = 1;
    if (!mixpi_json_need(j, !file->packed, "__metadata__ appears twice")) return;
    file->packed = pack = j->p;
    if (mixpi_json_peek(j) == 'n' && strncmp(j->p, "null", 4) == 0) {
        j->p += 4;
        return;
    }

    /* Keys and texts are packed over the header, where they stood. */
    while ((key = mixpi_json_member(j, &first)) != NULL) {
        text = mixpi_json_string(j, "a metadata value is not a string");
        if (!text) return;
        size_t n = strlen(key) + 1;
        memmove(pack, key, n);
        pack += n;
        n = strlen(text) + 1;
        memmove(pack, text, n);
        pack += n;
        file->n_pairs++;
    }
}

/* Builds the index of the pairs. Each key may appear once. */
static void mixpi_st_index_pairs(mixpi_report *r, mixp_safetensors *file) {
    const char *p = file->packed;
    file->pairs =
        (mixpi_st_pair *)mixpi_st_allocate(r, file->ctx, file->n_pairs, sizeof file->pairs[0]);
    for (size_t i = 0; file->pairs && i < file->n_pairs; i++) {
        file->pairs[i].key = p;
        p += strlen(p) + 1;
        file->pairs[i].text = p;
        p += strlen(p) + 1;
    }
    mixpi_st_sort_pairs(r, file->pairs, file->n_pairs, MIXP_ERR_FORMAT);
}

/* Checks that each name appears once and that the data has no hole, no overlap and no rest.
 * data_bytes UINT64_MAX: a stream, whose rest belongs to the program. */
static void mixpi_st_check_layout(mixpi_report *r, mixp_safetensors *file, uint64_t data_bytes) {
    uint64_t at = 0;
    mixpi_st_sort(r, file->items, file->n_items, MIXP_ERR_FORMAT);
    if (r->result != MIXP_OK) return;
    qsort(file->items, file->n_items, sizeof file->items[0], mixpi_st_by_place);
    for (size_t i = 0; i < file->n_items; i++) {
        const mixpi_st_item *item = &file->items[i];
        if (item->begin != at)
            mixpi_report_fail(r, MIXP_ERR_FORMAT, "tensor '%.60s': its data %s the data before it",
                item->e.name, item->begin < at ? "overlaps" : "leaves a gap after");
        at = item->end;
    }
    if (at != data_bytes && data_bytes != UINT64_MAX)
        mixpi_report_fail(r, MIXP_ERR_FORMAT,
            "the file is %s: its tensors need %.0f bytes, it has %.0f for them",
            at > data_bytes ? "cut short" : "longer than its header states", (double)at,
            (double)data_bytes);
}

/* The header's length, from the first eight bytes of the file; 0 after an error. */
static uint64_t mixpi_st_header_length(mixpi_file *f) {
    char prefix[8] = "";
    uint64_t n = 0;
    if (f->report->result != MIXP_OK) return 0;
    if (f->size < 8) {
        mixpi_report_fail(f->report, MIXP_ERR_FORMAT,
            "this is not a safetensors file: it is shorter than 8 bytes");
        return 0;
    }

    /* Little-endian. */
    mixpi_source_read(f, 0, prefix, 8);
    for (int i = 7; i >= 0; i--) n = n << 8 | (unsigned char)prefix[i];
    if (n >= 2 && n <= MIXPI_ST_MAX_HEADER && n <= f->size - 8) return n;
    if (memcmp(prefix, "PK\003\004", 4) == 0) {
        mixpi_report_fail(f->report, MIXP_ERR_FORMAT,
            "this is a zip file, as torch.save writes them: save with "
            "safetensors.torch.save_file(model.state_dict(), path)");
        return 0;
    }
    if (n >= 2 && n <= MIXPI_ST_MAX_HEADER)
        mixpi_report_fail(f->report, MIXP_ERR_FORMAT,
            "the file is cut short, or is not a safetensors file: its header length is %.0f, but "
            "only %.0f bytes follow",
            (double)n, (double)(f->size - 8));
    else
        mixpi_report_fail(f->report, MIXP_ERR_FORMAT,
            "this is not a safetensors file: its header length is %.0f, which must be 2 to %.0f",
            (double)n, (double)MIXPI_ST_MAX_HEADER);
    return 0;
}

static void mixpi_st_parse(mixpi_report *r, mixp_safetensors *file, uint64_t n) {
    mixpi_json j;
    char *name;
    int first = 1;
    j.report = r;
    j.begin = j.p = file->header;
    j.end = file->header + n;
    j.tensor = NULL;
    *j.end = '\0';
    while ((name = mixpi_json_member(&j, &first)) != NULL)
        if (strcmp(name, "__metadata__") == 0) mixpi_st_read_metadata(&j, file);
        else mixpi_st_read_tensor(&j, name, &file->items[file->n_items++]);
    mixpi_json_need(&j, !mixpi_json_peek(&j) && j.p == j.end, "text after the header's object");
}

/* Reads and checks the header. Allocates memory for the header only; releases it after an error. */
static mixp_result mixpi_st_read_header(mixp_safetensors *file, mixpi_file *f) {
    mixpi_report *r = f->report;
    uint64_t n = mixpi_st_header_length(f);
    uint64_t most = n / MIXPI_ST_MIN_ENTRY + 1; /* including an entry that may be truncated */
    file->header = (char *)mixpi_st_allocate(r, file->ctx, n, 1);
    file->items = (mixpi_st_item *)mixpi_st_allocate(r, file->ctx, most, sizeof file->items[0]);
    mixpi_source_read(f, 8, file->header, n);
    file->data_at = 8 + n;
    if (r->result == MIXP_OK) mixpi_st_parse(r, file, n);
    if (r->result == MIXP_OK)
        mixpi_st_check_layout(r, file, r->stream ? UINT64_MAX : f->size - file->data_at);
    if (r->result == MIXP_OK) mixpi_st_index_pairs(r, file);
    if (r->result != MIXP_OK) mixpi_st_clear(file);
    return r->result;
}

static int mixpi_st_by_begin(const void *a, const void *b) {
    const mixpi_st_item *x = *(const mixpi_st_item *const *)a;
    const mixpi_st_item *y = *(const mixpi_st_item *const *)b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    return (x->end > y->end) - (x->end < y->end);
}

/* Reads the data of the wanted tensors, each at a multiple of 64 bytes. */
static mixp_result mixpi_st_read_data(mixp_safetensors *file, mixpi_file *f) {
    const uint64_t mask = MIXPI_ST_ALIGN - 1;
    uint64_t total = mask;
    for (size_t i = 0; i < file->n_items; i++) {
        mixpi_st_item *item = &file->items[i];
        item->e.bytes = (size_t)(item->end - item->begin);
        if (item->wanted) total += (item->end - item->begin + mask) & ~mask;
    }

    /* One piece of memory holds all that is wanted. */
    char *at = file->data = (char *)mixpi_st_allocate(f->report, file->ctx, total, 1);
    if (at) at += (MIXPI_ST_ALIGN - (uintptr_t)at % MIXPI_ST_ALIGN) % MIXPI_ST_ALIGN;

    /* They are read in the order of the file. */
    mixpi_st_item **order =
        (mixpi_st_item **)mixpi_st_allocate(f->report, file->ctx, file->n_items + 1, sizeof *order);
    for (size_t i = 0; order && i < file->n_items; i++) order[i] = &file->items[i];
    if (order && file->n_items) qsort(order, file->n_items, sizeof *order, mixpi_st_by_begin);
    for (size_t i = 0; at && order && i < file->n_items; i++) {
        mixpi_st_item *item = order[i];
        mixpi_source_read(f, file->data_at + item->begin, at, item->wanted ? item->e.bytes : 0);
        if (!item->wanted) continue;
        item->e.data = at;
        at += (item->e.bytes + mask) & ~mask;
    }
    if (order && file->n_items)
        mixpi_source_read(f, file->data_at + order[file->n_items - 1]->end, at, 0);
    mixpi_st_free(file->ctx, order);

    if (f->report->result != MIXP_OK) mixpi_st_clear(file);
    return f->report->result;
}

static int mixpi_st_by_item_name(const void *a, const void *b) {
    return mixpi_st_by_name(*(const mixpi_st_item *const *)a, *(const mixpi_st_item *const *)b);
}

/* Builds the index of names, for mixp_safetensors_find. */
static void mixpi_st_index_names(mixpi_report *r, mixp_safetensors *file) {
    if (r->result != MIXP_OK) return;
    file->names = (const mixpi_st_item **)mixpi_st_allocate(
        r, file->ctx, file->n_items, sizeof file->names[0]);
    if (!file->names) return;
    for (size_t i = 0; i < file->n_items; i++) file->names[i] = &file->items[i];
    qsort(file->names, file->n_items, sizeof file->names[0], mixpi_st_by_item_name);
}

MIXPI_SELDOM
MIXPREC_API mixp_result mixp_safetensors_read(
    const char *path, mixp_safetensors **out, char *error, size_t error_size) {
    mixpi_report r = mixpi_report_begin(path, error, error_size);
    mixp_safetensors *file;
    mixpi_file f;
    if (out) *out = NULL;
    if (!path || !out) return mixpi_report_fail(&r, MIXP_ERR_ARGUMENT, "path or out is NULL");
    file = (mixp_safetensors *)mixpi_st_allocate(&r, NULL, 1, sizeof *file);
    if (!file) return r.result;
    memset(file, 0, sizeof *file);
    if (mixpi_file_open(&f, &r) == MIXP_OK && mixpi_st_read_header(file, &f) == MIXP_OK)
        mixpi_st_read_data(file, &f);
    mixpi_file_close(&f);
    mixpi_st_index_names(&r, file);
    if (r.result == MIXP_OK) *out = file;
    else mixp_safetensors_free(file);
    return r.result;
}

MIXPREC_API void mixp_safetensors_free(mixp_safetensors *file) {
    if (file) mixpi_st_clear(file);
    free(file);
}

MIXPREC_API int64_t mixp_safetensors_count(const mixp_safetensors *file) {
    return file ? (int64_t)file->n_items : 0;
}

MIXPREC_API const mixp_st_entry *mixp_safetensors_at(const mixp_safetensors *file, int64_t i) {
    return i >= 0 && i < mixp_safetensors_count(file) ? &file->items[i].e : NULL;
}

MIXPREC_API const mixp_st_entry *mixp_safetensors_find(
    const mixp_safetensors *file, const char *name) {
    int64_t n = name ? mixp_safetensors_count(file) : 0;
    if (n && file->names) {
        mixpi_st_item wanted;
        const mixpi_st_item *key = &wanted, **at;
        wanted.e.name = name;
        at = (const mixpi_st_item **)bsearch(
            &key, file->names, (size_t)n, sizeof key, mixpi_st_by_item_name);
        return at ? &(*at)->e : NULL;
    }
    for (int64_t i = 0; i < n; i++)
        if (strcmp(file->items[i].e.name, name) == 0) return &file->items[i].e;
    return NULL;
}

MIXPREC_API const char *mixp_safetensors_metadata(const mixp_safetensors *file, const char *key) {
    mixpi_st_pair wanted;
    if (!file || !key || !file->n_pairs) return NULL;
    wanted.key = key;
    wanted.text = NULL;
    const mixpi_st_pair *pair = (const mixpi_st_pair *)bsearch(
        &wanted, file->pairs, file->n_pairs, sizeof wanted, mixpi_st_by_key);
    return pair ? pair->text : NULL;
}
