#pragma once
#include "../checkpoint.h"
#include "../tensors/errors.c"
#include "../tensors/memory.c"
/* ==== 12. CHECKPOINT (implementation) ================================================= */

#define MIXPI_ST_MAX_HEADER 100000000u      /* the format's own limit, in bytes            */
#define MIXPI_ST_MIN_ENTRY  49u             /* "":{"dtype":"U8","shape":[],"data_offsets":[0,0]} */
#define MIXPI_ST_ALIGN      64u             /* alignment of each tensor's data in memory   */
#define MIXPI_SAVE_PIECE    ((size_t)1 << 20)
#define MIXPI_IO_MOST       ((size_t)1 << 30)   /* most bytes in one system call */
#define MIXPI_OPAQUE        MIXP_DTYPE_COUNT
#define MIXPI_LENGTH(array) (sizeof(array) / sizeof((array)[0]))

/* --- errors, memory ------------------------------------------------------------------------ */

/* Receives the first error of a call. Later calls with a failed report do nothing, so callers need
 * not check each time. */
typedef struct mixpi_report {
    mixp_result result;
    const char *path;           /* path of the file, for messages                          */
    char       *text;           /* the caller's buffer, or NULL                            */
    size_t      text_size;
    const mixp_checkpoint *stream;  /* its functions read or write; NULL: files do         */
} mixpi_report;

/* Writes the message, followed by the path. Callers limit names in the message to %.60s. */
MIXPI_PRINTF(3, 4)
static mixp_result mixpi_report_fail(mixpi_report *r, mixp_result code, const char *format, ...) {
    va_list args;
    if (r->result != MIXP_OK) return r->result;
    r->result = code;
    if (!r->text || !r->text_size) return code;
    va_start(args, format);
    vsnprintf(r->text, r->text_size, format, args);
    va_end(args);
    size_t n = strlen(r->text);
    snprintf(r->text + n, r->text_size - n, " (%s)", r->path ? r->path : "no path");
    mixpi_readable(r->text);
    return code;
}

/* Reports a failed system call. errno, which must come from that call, has the reason. */
static mixp_result mixpi_report_system(mixpi_report *r, const char *what) {
    const char *why = errno ? strerror(errno) : "the system gives no reason";
    return mixpi_report_fail(r, MIXP_ERR_IO, "%s: %s", what, why);
}

/* Starts a report. Fails on big-endian machines: little-endian files are copied to memory
 * unchanged. */
static mixpi_report mixpi_report_begin(const char *path, char *text, size_t text_size) {
    const uint16_t one = 1;
    mixpi_report r;
    r.result = MIXP_OK;
    r.path = path;
    r.text = text;
    r.text_size = text_size;
    r.stream = NULL;
    if (text && text_size) text[0] = '\0';
    if (!*(const char *)&one) mixpi_report_fail(&r, MIXP_ERR_DEVICE, "this machine is big-endian");
    return r;
}

/* Allocates memory from the context, or with malloc if ctx is NULL. Returns NULL after an error.
 * Sizes come from files and therefore have 64 bits. */
static void *mixpi_st_allocate(mixpi_report *r, mixp_context *ctx, uint64_t count, size_t size) {
    void *p = NULL;
    if (r->result != MIXP_OK) return NULL;
    if (count < (uint64_t)PTRDIFF_MAX / size) {
        size_t n = (size_t)count * size + 1; /* space for a NUL, and never 0 bytes */
        p = ctx ? mixpi_host_take(ctx, n) : malloc(n);
    }
    if (!p)
        mixpi_report_fail(
            r, MIXP_ERR_MEMORY, "out of memory: %.0f bytes", (double)count * (double)size);
    return p;
}

static void mixpi_st_free(mixp_context *ctx, void *p) {
    if (p && ctx) mixpi_host_free(ctx, p);
    else free(p);
}

/* --- what a file holds --------------------------------------------------------------------- */

/* The format's dtypes in its library's order. The writer sorts tensors in the reverse order. */
typedef struct mixpi_st_type { const char *name; mixp_dtype dtype; int bits; } mixpi_st_type;
#define MIXPI_ST_HAS(name, bits)  { #name, MIXP_##name, bits }
#define MIXPI_ST_PASS(name, bits) { #name, MIXPI_OPAQUE, bits }
static const mixpi_st_type mixpi_st_types[] = {
    MIXPI_ST_PASS(BOOL, 8),
    MIXPI_ST_PASS(F4, 4),
    MIXPI_ST_PASS(F6_E2M3, 6),
    MIXPI_ST_PASS(F6_E3M2, 6),
    MIXPI_ST_HAS(U8, 8),
    MIXPI_ST_PASS(I8, 8),
    MIXPI_ST_HAS(F8_E5M2, 8),
    MIXPI_ST_HAS(F8_E4M3, 8),
    MIXPI_ST_HAS(F8_E8M0, 8),
    MIXPI_ST_HAS(F8_E4M3FNUZ, 8),
    MIXPI_ST_HAS(F8_E5M2FNUZ, 8),
    MIXPI_ST_PASS(I16, 16),
    MIXPI_ST_PASS(U16, 16),
    MIXPI_ST_HAS(F16, 16),
    MIXPI_ST_HAS(BF16, 16),
    MIXPI_ST_HAS(I32, 32),
    MIXPI_ST_PASS(U32, 32),
    MIXPI_ST_HAS(F32, 32),
    MIXPI_ST_PASS(C64, 64),
    MIXPI_ST_HAS(F64, 64),
    MIXPI_ST_HAS(I64, 64),
    MIXPI_ST_PASS(U64, 64)
};
#undef MIXPI_ST_HAS
#undef MIXPI_ST_PASS

static const mixpi_st_type *mixpi_st_type_named(const char *name) {
    for (size_t i = 0; i < MIXPI_LENGTH(mixpi_st_types); i++)
        if (strcmp(mixpi_st_types[i].name, name) == 0) return &mixpi_st_types[i];
    return NULL;
}

static const mixpi_st_type *mixpi_st_type_of(mixp_dtype dtype) {
    for (size_t i = 0; i < MIXPI_LENGTH(mixpi_st_types) && dtype != MIXPI_OPAQUE; i++)
        if (mixpi_st_types[i].dtype == dtype) return &mixpi_st_types[i];
    return NULL;
}

/* A tensor in a file. */
typedef struct mixpi_st_item {
    mixp_st_entry        e;
    const mixpi_st_type *type;
    uint64_t             begin, end;    /* range of its data, relative to the first data byte */
    int                  on_device;     /* writing: e.data is device memory                */
    int                  wanted;        /* reading: read its data                          */
} mixpi_st_item;

typedef struct mixpi_st_pair { const char *key, *text; } mixpi_st_pair;     /* metadata */

static int mixpi_st_by_name(const void *a, const void *b) {
    const mixpi_st_item *x = (const mixpi_st_item *)a, *y = (const mixpi_st_item *)b;
    return strcmp(x->e.name, y->e.name);
}

static int mixpi_st_by_place(const void *a, const void *b) {
    const mixpi_st_item *x = (const mixpi_st_item *)a, *y = (const mixpi_st_item *)b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    if (x->end != y->end) return x->end < y->end ? -1 : 1;
    return mixpi_st_by_name(a, b);
}

/* The writer's order: large elements first, so that all data is aligned, then by name. */
static int mixpi_st_by_type(const void *a, const void *b) {
    const mixpi_st_item *x = (const mixpi_st_item *)a, *y = (const mixpi_st_item *)b;
    if (x->type != y->type) return x->type > y->type ? -1 : 1;
    return mixpi_st_by_name(a, b);
}

static int mixpi_st_by_key(const void *a, const void *b) {
    return strcmp(((const mixpi_st_pair *)a)->key, ((const mixpi_st_pair *)b)->key);
}

/* Sorts items by name. Fails with `code` if a name appears twice. */
static void mixpi_st_sort(mixpi_report *r, mixpi_st_item *items, size_t n, mixp_result code) {
    if (r->result != MIXP_OK) return;
    qsort(items, n, sizeof items[0], mixpi_st_by_name);
    for (size_t i = 1; i < n; i++)
        if (mixpi_st_by_name(&items[i - 1], &items[i]) == 0)
            mixpi_report_fail(r, code, "two tensors have the name '%.60s'", items[i].e.name);
}

/* Sorts pairs by key. Fails with `code` if a key appears twice. */
static void mixpi_st_sort_pairs(mixpi_report *r, mixpi_st_pair *pairs, size_t n, mixp_result code) {
    if (r->result != MIXP_OK) return;
    qsort(pairs, n, sizeof pairs[0], mixpi_st_by_key);
    for (size_t i = 1; i < n; i++)
        if (mixpi_st_by_key(&pairs[i - 1], &pairs[i]) == 0)
            mixpi_report_fail(r, code, "the metadata key '%.60s' appears twice", pairs[i].key);
}

/* Bits of a tensor of this shape. UINT64_MAX if the product overflows or a dimension is negative.
 * The other dimensions of an empty tensor must fit as well, wherever the 0 is. */
static uint64_t mixpi_st_bits(const mixpi_st_item *item) {
    uint64_t bits = (uint64_t)item->type->bits;
    int i, empty = 0;
    for (i = 0; i < item->e.rank; i++) {
        uint64_t d = (uint64_t)item->e.shape[i];
        if (d > (uint64_t)INT64_MAX) return UINT64_MAX;
        if (d == 0) {
            empty = 1;
            continue;
        }
        if (bits > (UINT64_MAX - 1) / d) return UINT64_MAX;
        bits *= d;
    }
    return empty ? 0 : bits;
}

/* Length of the UTF-8 character at text, of which `left` bytes exist; 0 if it is invalid. */
static size_t mixpi_utf8(const char *text, size_t left) {
    static const uint32_t least[5] = { 0, 0, 0x80, 0x800, 0x10000 }; /* smaller: overlong */
    const unsigned char *byte = (const unsigned char *)text;
    size_t n;
    if (left == 0) return 0;
    if (byte[0] < 0x80) return 1;

    /* The first byte says how many follow. */
    if ((byte[0] & 0xE0) == 0xC0) n = 2;
    else if ((byte[0] & 0xF0) == 0xE0) n = 3;
    else if ((byte[0] & 0xF8) == 0xF0) n = 4;
    else return 0;
    if (n > left) return 0;

    /* Each that follows has six bits. */
    uint32_t code = byte[0] & (0x7Fu >> n);
    for (size_t i = 1; i < n; i++) {
        if ((byte[i] & 0xC0) != 0x80) return 0;
        code = code << 6 | (byte[i] & 0x3Fu);
    }
    if (code < least[n] || code > 0x10FFFF) return 0;
    return code >= 0xD800 && code < 0xE000 ? 0 : n; /* half a surrogate pair */
}

static int mixpi_is_utf8(const char *s) {
    size_t n;
    if (!s) return 0;
    for (size_t left = strlen(s); left > 0; left -= n) {
        n = mixpi_utf8(s, left);
        if (n == 0) return 0;
        s += n;
    }
    return 1;
}

/* --- the header: exactly the format's grammar, and no deeper, so nothing recurses ---------- */

/* A header being read. After an error the cursor moves to the end and stays there. */
typedef struct mixpi_json {
    mixpi_report *report;
    char         *begin, *p, *end;      /* *end is NUL                                     */
    const char   *tensor;               /* the tensor being read, for messages; or NULL    */
} mixpi_json;

static void mixpi_json_fail(mixpi_json *j, mixp_result code, const char *what) {
    double at = (double)(j->p - j->begin);
    if (j->tensor)
        mixpi_report_fail(
            j->report, code, "header byte %.0f: %s in tensor '%.60s'", at, what, j->tensor);
    else mixpi_report_fail(j->report, code, "header byte %.0f: %s", at, what);
    j->p = j->end;
}

/* Fails unless `good`. Returns 0 after this or any earlier error. */
static int mixpi_json_need(mixpi_json *j, int good, const char *what) {
    if (j->report->result != MIXP_OK) return 0;
    if (!good) mixpi_json_fail(j, MIXP_ERR_FORMAT, what);
    return good;
}

/* The next character that is not a space; NUL at the end. */
static char mixpi_json_peek(mixpi_json *j) {
    j->p += strspn(j->p, " \t\n\r");
    return *j->p;
}

static int mixpi_json_expect(mixpi_json *j, char c, const char *what) {
    int good = mixpi_json_need(j, mixpi_json_peek(j) == c, what);
    j->p += good;
    return good;
}

/* Reads \uXXXX. */
static int mixpi_json_hex(mixpi_json *j, uint32_t *u) {
    char digits[5] = "";
    if (j->p[0] != '\\' || j->p[1] != 'u') return 0;
    strncpy(digits, j->p + 2, 4);
    if (strspn(digits, "0123456789abcdefABCDEF") != 4) return 0;
    *u = (uint32_t)strtoul(digits, NULL, 16);
    j->p += 6;
    return 1;
}

/* Writes a code point as UTF-8. Returns the end of the written text. */
static char *mixpi_utf8_append(char *out, uint32_t code) {
    static const unsigned char lead[5] = { 0, 0, 0xC0, 0xE0, 0xF0 };
    int i, n = code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    for (i = n - 1; i > 0; i--) {
        out[i] = (char)(unsigned char)(0x80 | (code & 0x3F));
        code >>= 6;
    }
    out[0] = (char)(unsigned char)(lead[n] | code);
    return out + n;
}

/* Decodes the escape at the cursor. Returns the end of the written text, or NULL if invalid. */
static char *mixpi_json_escape(mixpi_json *j, char *out) {
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    const char *hit = j->p[1] ? strchr(from, j->p[1]) : NULL;
    uint32_t code = 0, low = 0;
    if (hit) {
        *out = to[hit - from];
        j->p += 2;
        return out + 1;
    }
    if (!mixpi_json_need(j, mixpi_json_hex(j, &code), "invalid escape")) return NULL;
    if (!mixpi_json_need(j, code != 0, "NUL (\\u0000) in a string")) return NULL;
    if (code >= 0xD800 && code < 0xE000) {
        int pair = code < 0xDC00 && mixpi_json_hex(j, &low) && low >= 0xDC00 && low < 0xE000;
        if (!mixpi_json_need(j, pair, "half a surrogate pair")) return NULL;
        code = 0x10000 + ((code & 0x3FF) << 10) + (low & 0x3FF);
    }
    return mixpi_utf8_append(out, code);
}

/* Copies the character at the cursor. Returns the end of the written text, or NULL if invalid. */
static char *mixpi_json_character(mixpi_json *j, char *out) {
    size_t n = mixpi_utf8(j->p, (size_t)(j->end - j->p));
    int control = n == 1 && (unsigned char)*j->p < 0x20;
    if (!mixpi_json_need(j, n > 0, "invalid UTF-8")) return NULL;
    if (!mixpi_json_need(j, !control, "control character in a string")) return NULL;
    memmove(out, j->p, n);
    j->p += n;
    return out + n;
}

/* Decodes a string in place (it never grows) and terminates it with NUL. NULL if it is invalid. */
static char *mixpi_json_string(mixpi_json *j, const char *expected) {
    char *out;
    if (!mixpi_json_expect(j, '"', expected)) return NULL;
    char *text = out = j->p;
    while (j->p < j->end && *j->p != '"') {
        out = *j->p == '\\' ? mixpi_json_escape(j, out) : mixpi_json_character(j, out);
        if (!out) return NULL;
    }
    if (!mixpi_json_need(j, j->p < j->end, "unterminated string")) return NULL;
    j->p++;
    *out = '\0';
    return text;
}

/* Moves to the next member of an object; with *first, starts before the object's '{'. Returns
 * the member's name, with the cursor before its value, or NULL at the object's end or after an
 * error. */
static char *mixpi_json_member(mixpi_json *j, int *first) {
    if (*first && !mixpi_json_expect(j, '{', "expected '{'")) return NULL;
    if (mixpi_json_peek(j) == '}') {
        j->p++;
        return NULL;
    }
    if (!*first && !mixpi_json_expect(j, ',', "expected ',' or '}'")) return NULL;
    *first = 0;
    char *name = mixpi_json_string(j, "expected a name in double quotes");
    return name && mixpi_json_expect(j, ':', "expected ':'") ? name : NULL;
}

/* A plain decimal number; returns 0 and reports an error for anything else. */
static uint64_t mixpi_json_number(mixpi_json *j) {
    mixpi_json_peek(j);
    size_t digits = strspn(j->p, "0123456789");
    int plain = digits == 1 || (digits > 1 && *j->p != '0');
    if (!mixpi_json_need(j, plain, "expected a plain decimal number")) return 0;
    errno = 0;
    uint64_t value = strtoull(j->p, &j->p, 10);
    return mixpi_json_need(j, errno == 0, "number beyond 2^64-1") ? value : 0;
}

/* An array of numbers. Keeps the first `room` numbers; returns the number of elements. */
static uint64_t mixpi_json_numbers(mixpi_json *j, uint64_t *values, uint64_t room) {
    uint64_t n, value;
    if (!mixpi_json_expect(j, '[', "expected '['")) return 0;
    for (n = 0; mixpi_json_peek(j) != ']'; n++) {
        if (n > 0 && !mixpi_json_expect(j, ',', "expected ',' or ']'")) return 0;
        value = mixpi_json_number(j);
        if (j->report->result != MIXP_OK) return 0;
        if (n < room) values[n] = value;
    }
    j->p++;
    return n;
}

/* A tensor's members in the header, not yet checked. */
typedef struct mixpi_st_members {
    const char *type;
    uint64_t    shape[MIXP_MAX_RANK], rank;
    uint64_t    span[2], n_span;
} mixpi_st_members;

enum { MIXPI_ST_DTYPE = 1, MIXPI_ST_SHAPE = 2, MIXPI_ST_SPAN = 4, MIXPI_ST_ALL = 7 };

static unsigned mixpi_st_member_of(const char *key) {
    if (strcmp(key, "dtype") == 0) return MIXPI_ST_DTYPE;
    if (strcmp(key, "shape") == 0) return MIXPI_ST_SHAPE;
    return strcmp(key, "data_offsets") == 0 ? MIXPI_ST_SPAN : 0;
}

/* Reads the three members of a tensor: any order, each exactly once. */
static int mixpi_st_read_members(mixpi_json *j, mixpi_st_members *m) {
    unsigned seen = 0, member;
    const char *key;
    int first = 1;
    memset(m, 0, sizeof *m);
    while ((key = mixpi_json_member(j, &first)) != NULL) {
        member = mixpi_st_member_of(key);
        if (!mixpi_json_need(j, member != 0, "unknown key")) return 0;
        if (!mixpi_json_need(j, !(seen & member), "a key appears twice")) return 0;
        seen |= member;
        if (member == MIXPI_ST_DTYPE) m->type = mixpi_json_string(j, "dtype is not a string");
        else if (member == MIXPI_ST_SHAPE) m->rank = mixpi_json_numbers(j, m->shape, MIXP_MAX_RANK);
        else m->n_span = mixpi_json_numbers(j, m->span, 2);
    }
    return mixpi_json_need(j, seen == MIXPI_ST_ALL, "dtype, shape or data_offsets is missing") &&
           mixpi_json_need(j, m->n_span == 2, "data_offsets are not two numbers");
}

static void mixpi_st_read_tensor(mixpi_json *j, const char *name, mixpi_st_item *item) {
    char unknown[96];
    mixpi_st_members m;
    memset(item, 0, sizeof *item);
    j->tensor = name;
    if (!mixpi_st_read_members(j, &m)) return;

    item->type = mixpi_st_type_named(m.type);
    if (!item->type) {
        snprintf(unknown, sizeof unknown, "unknown dtype '%.60s'", m.type);
        mixpi_json_fail(j, MIXP_ERR_DTYPE, unknown);
        return;
    }
    if (m.rank > MIXP_MAX_RANK) {
        mixpi_json_fail(j, MIXP_ERR_SHAPE, "rank above 8");
        return;
    }

    for (uint64_t i = 0; i < m.rank; i++) item->e.shape[i] = (int64_t)m.shape[i];
    item->e.name = name;
    item->e.type = item->type->name;
    item->e.dtype = item->type->dtype;
    item->e.rank = (int)m.rank;
    item->begin = m.span[0];
    item->end = m.span[1];
    item->wanted = 1;

    /* Do shape, dtype and place agree? */
    uint64_t bits = mixpi_st_bits(item);
    mixpi_json_need(j, bits != UINT64_MAX, "shape too large for 64 bits");
    mixpi_json_need(j, bits % 8 == 0, "packed elements that do not fill whole bytes");
    mixpi_json_need(j, item->begin <= item->end, "data_offsets end before they begin");
    mixpi_json_need(
        j, item->end - item->begin == bits / 8, "data_offsets do not fit shape and dtype");
    j->tensor = NULL;
}
