/* token_files.h - files of tokens, of nanoGPT, llm.c and numpy, and what is none of them: a part of trainer.c
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * A file's content shows its kind. What can be read is read; the rest is refused by name, because any bytes
 * can be learned as if they were tokens or a text.
 */
#ifndef TRAINER_TOKEN_FILES_H
#define TRAINER_TOKEN_FILES_H

#include <strings.h>
#include "options.h"

/* One file of the data, mapped into memory: the system reads only the pages in use, and ranks share
 * them. */
typedef struct shard {
    const unsigned char *at;            /* its tokens, the low byte first */
    int                  width;         /* bytes of a token: 1 (a text), 2, 4 or 8 */
    int                  is_signed;     /* 1: negative numbers are possible, and refused */
    int64_t              first, count;  /* of the tokens of all files */
    char                *path, *memory; /* memory: its address; mapped 0: allocated   */
    size_t               mapped;
} shard;

static int32_t little_endian_i32(const unsigned char *b) {
    return (int32_t)(b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 | (uint32_t)b[3] << 24);
}

/* Token i; -1: no number from 0 to 2^31. */
static int32_t token_in(const shard *s, int64_t i) {
    const unsigned char *b = s->at + i * s->width;
    if (s->is_signed && b[s->width - 1] > 127) return -1;
    if (s->width < 4) return s->width == 1 ? b[0] : b[0] | b[1] << 8;
    if (b[3] > 127 || (s->width == 8 && little_endian_i32(b + 4) != 0)) return -1;
    return little_endian_i32(b);
}

/* ==== What is neither text nor tokens =============================================== */

/* Files of other programs, by their first bytes. in_tokens 1: these bytes begin no file of tokens. */
static const struct { const char *bytes; int n, in_tokens; const char *what; } foreign_files[] = {
    {"\x1f\x8b\x08", 3, 1, "compressed by gzip: decompress it first"},
    {"PK\3\4", 4, 1, "a zip file: unpack it first"},
    {"\x28\xb5\x2f\xfd", 4, 1, "compressed by zstd: decompress it first"},
    {"\xfd" "7zXZ\0", 6, 1, "compressed by xz: decompress it first"},
    {"BZh", 3, 0, "compressed by bzip2: decompress it first"},
    {"ARROW1", 6, 1, "an Arrow file: write its text to a file first"},
    {"PAR1", 4, 1, "a Parquet file: write its text to a file first"},
    {"\x89HDF\r\n", 6, 1, "an HDF5 file: write its text to a file first"},
    {"\xff\xfe\0\0", 4, 0, "UTF-32: convert it to UTF-8 first, as iconv does"},
    {"\xff\xfe", 2, 0, "UTF-16: convert it to UTF-8 first, as iconv does"},
    {"\xfe\xff", 2, 0, "UTF-16: convert it to UTF-8 first, as iconv does"},
};
enum { FOREIGN_FILES = (int)(sizeof foreign_files / sizeof foreign_files[0]) };

enum { SAMPLED = 1 << 16 };             /* bytes that show a file's kind */

/* Has a text zeros in every second byte, as UTF-16 of Latin letters without a mark? */
static int looks_like_utf16(const unsigned char *bytes, int64_t size) {
    int64_t n = (size < SAMPLED ? size : SAMPLED) / 2, even = 0, odd = 0;
    for (int64_t i = 0; i < n; i++) {
        even += bytes[2 * i] == 0;
        odd += bytes[2 * i + 1] == 0;
    }
    return n > 8 && (even > n / 2 || odd > n / 2);
}

static void refuse_foreign(const char *path, const unsigned char *bytes, int64_t size, int is_text) {
    for (int i = 0; i < FOREIGN_FILES; i++)
        if ((is_text || foreign_files[i].in_tokens) && size >= foreign_files[i].n &&
            memcmp(bytes, foreign_files[i].bytes, (size_t)foreign_files[i].n) == 0)
            die(1, "%s is %s", path, foreign_files[i].what);
    if (is_text && looks_like_utf16(bytes, size))
        die(1, "%s has zeros in every second byte, as UTF-16 or numbers of 16 bits: convert a text to UTF-8 "
               "first; name a file of tokens FILE.bin", path);
}

/* ==== Tokens without a header, as nanoGPT writes them =============================== */

/* What the first numbers of a file look like. A word has 32 bits. Words are counted, so that a few
 * numbers that are no tokens, such as -1 or -100, hide nothing. */
typedef struct number_look {
    int64_t words;                      /* that were looked at */
    int64_t pairs;                      /* of two words, that were looked at */
    int64_t little, big;                /* the largest number of 16 bits; and if its high byte comes first */
    int64_t low;                        /* the largest first half of a word */
    int64_t low_byte;                   /* the largest low byte of a number of 16 bits */
    int64_t narrow, nearly_narrow;      /* words whose second half extends the sign; is below 16 */
    int64_t long_pairs;                 /* pairs whose second word extends the sign */
    int64_t filled_pairs;               /* pairs whose first word is not 0 */
    int64_t floats, doubles;            /* words and pairs that are whole floating-point numbers */
} number_look;

/* Is a floating-point number a token? */
static int is_whole_token(double value) { return value >= 0 && value < TOKENS_MOST && value == floor(value); }

static void raise_to(int64_t *most, int64_t value) { if (value > *most) *most = value; }

static void look_at_word(number_look *look, const unsigned char *b) {
    int64_t low = b[0] | b[1] << 8, high = b[2] | b[3] << 8;
    float   single;
    raise_to(&look->low, low);
    raise_to(&look->little, low > high ? low : high);
    raise_to(&look->low_byte, b[0] > b[2] ? b[0] : b[2]);
    raise_to(&look->big, b[0] << 8 | b[1]);
    raise_to(&look->big, b[2] << 8 | b[3]);
    look->narrow += high == 0 || high == 65535;
    look->nearly_narrow += high < 16 || high == 65535;
    memcpy(&single, b, sizeof single);
    look->floats += is_whole_token((double)single);
}

static void look_at_pair(number_look *look, const unsigned char *b) {
    int32_t first = little_endian_i32(b), second = little_endian_i32(b + 4);
    double  number;
    look->filled_pairs += first != 0;
    look->long_pairs += second == 0 || second == -1;
    memcpy(&number, b, sizeof number);
    look->doubles += is_whole_token(number);
}

static number_look look_at_numbers(const unsigned char *bytes, int64_t size) {
    number_look look;
    memset(&look, 0, sizeof look);
    look.words = (size < SAMPLED ? size : SAMPLED) / 4;
    look.pairs = look.words / 2;
    for (int64_t i = 0; i < look.words; i++) look_at_word(&look, bytes + 4 * i);
    for (int64_t i = 0; i < look.pairs; i++) look_at_pair(&look, bytes + 8 * i);
    return look;
}

/* Are there enough numbers to tell, and 99 % of them of a kind? */
static int nearly_all(int64_t n, int64_t of) { return of >= 4 && n >= of - of / 100; }

static int looks_of_floats(const number_look *look, int64_t size)
{ return size % 4 == 0 && look->little > 0 && nearly_all(look->floats, look->words); }

static int looks_of_doubles(const number_look *look, int64_t size)
{ return size % 8 == 0 && look->little > 0 && nearly_all(look->doubles, look->pairs); }

/* Do tokens of 64 bits lie there? Then every second word is 0. */
static int looks_of_64(const number_look *look, int64_t size)
{ return size % 8 == 0 && look->filled_pairs > 0 && nearly_all(look->long_pairs, look->pairs); }

/* Or of 32 bits? Then every second half of a word is 0, or nearly 0 if there are many tokens. */
static int looks_of_32(const number_look *look, int64_t size) {
    if (size % 4 != 0) return 0;
    return (look->low > 0 && nearly_all(look->narrow, look->words)) ||
           (look->low > 255 && nearly_all(look->nearly_narrow, look->words));
}

/* Or of 16 bits, with the high byte first? Then they are smaller in that order. */
static int looks_big_endian(const number_look *look)
{ return look->words >= 512 && look->little > 1024 && 5 * look->big < 4 * look->little; }

/* Or bytes, of a text in ASCII or of a small vocabulary? More than 256 tokens use each low byte. */
static int looks_of_8(const number_look *look)
{ return look->words >= 512 && look->little > 255 && look->low_byte < 128; }

/* Refuses numbers that are no tokens of `width` bytes. asked 1: --token-bits says the width. */
static void refuse_numbers(const char *path, const unsigned char *bytes, int64_t size, int width, int asked) {
    number_look look = look_at_numbers(bytes, size);
    int         singles = looks_of_floats(&look, size);
    if (singles || looks_of_doubles(&look, size))
        die(1, "%s holds floating-point numbers of %d bits: write tokens as whole numbers of 16 or 32 bits",
            path, singles ? 32 : 64);
    if (width < 8 && looks_of_64(&look, size) && (!asked || width == 4))
        die(1, "%s has no header, and looks as if its tokens were of 64 bits, numpy's default: add "
               "--token-bits 64", path);
    if (asked) return;
    if (looks_of_32(&look, size))
        die(1, "%s has no header, and looks as if its tokens were of 32 bits: add --token-bits 32, or "
               "--token-bits 16 if they are not", path);
    if (looks_big_endian(&look))
        die(1, "%s has no header, and looks as if the high bytes of its tokens came first: write the low "
               "bytes first, as numpy's '<u2', or add --token-bits 16 if they do", path);
    if (looks_of_8(&look))
        die(1, "%s has no header, and looks like a text, or as if its tokens were of 8 bits: name a text .txt, "
               "write tokens with 16 bits, or add --token-bits 16 if they have 16", path);
}

static void take_raw_tokens(shard *s, const config *c, const unsigned char *bytes, int64_t size) {
    static const int widths[] = {2, 2, 4, 8};
    s->width = widths[c->token_bits];
    refuse_numbers(s->path, bytes, size, s->width, c->token_bits != TOKEN_BITS_AUTO);
    if (size % s->width != 0)
        die(1, "%s has %s, %lld: tokens of %d bits were expected. Is it whole? (A text must not be "
               "named .bin)", s->path, s->width == 2 ? "an odd number of bytes" : "a number of bytes",
            (long long)size, 8 * s->width);
    s->at = bytes;
    s->count = size / s->width;
}

/* ==== Tokens with a header ========================================================== */

enum { LLM_HEADER = 1024, LLM_16_BITS = 20240520, LLM_32_BITS = 20240801 };

/* llm.c's format: a header of 256 numbers, which begins with magic, version and count. */
static void take_llm_tokens(shard *s, const unsigned char *bytes, int64_t size) {
    int     wide = little_endian_i32(bytes) == LLM_32_BITS, known = wide ? 7 : 1;
    int32_t version, count;
    if (size < LLM_HEADER) die(1, "%s is cut off within its header: get the complete file", s->path);
    version = little_endian_i32(bytes + 4);
    count = little_endian_i32(bytes + 8);
    s->width = wide ? 4 : 2;
    if (version != known)
        die(1, "%s has version %ld of llm.c's format: of tokens of %d bits only %d can be read",
            s->path, (long)version, 8 * s->width, known);
    if (count < 0 || size != LLM_HEADER + s->width * (int64_t)count)
        die(1, "%s has %lld bytes, but its header promises %ld tokens, which are %lld: get the "
               "complete file", s->path, (long long)size, (long)count,
            LLM_HEADER + s->width * (long long)count);
    s->at = bytes + LLM_HEADER;
    s->count = count;
}

#define NPY_MAGIC "\x93NUMPY"
enum { NPY_MAGIC_BYTES = 6, NPY_FRONT = 12, NPY_HEADER = 256 };

static int is_npy(const unsigned char *bytes, int64_t size)
{ return size >= NPY_FRONT && memcmp(bytes, NPY_MAGIC, NPY_MAGIC_BYTES) == 0; }

/* The text of an array's header, {'descr': '<u2', 'fortran_order': False, 'shape': (60000,), }. Returns
 * where its data begin. */
static int64_t npy_header(const shard *s, const unsigned char *bytes, int64_t size, char *header) {
    int     front = bytes[6] == 1 ? 10 : 12;
    int64_t length = bytes[8] | bytes[9] << 8;
    if (front == 12) length |= (int64_t)bytes[10] << 16 | (int64_t)bytes[11] << 24;
    if (bytes[6] < 1 || bytes[6] > 3 || length >= NPY_HEADER || front + length > size)
        die(1, "%s: the header of its array is damaged, or of a version that the trainer does not know", s->path);
    memcpy(header, bytes + front, (size_t)length);
    header[length] = '\0';
    return front + length;
}

/* The type of an array's numbers: sets width and sign. */
static void npy_type(shard *s, const char *header) {
    char        order = 0, kind = 0;
    int         width = 0, end = 0;
    const char *type = strstr(header, "'descr': '");
    if (type) sscanf(type, "'descr': '%c%c%1d'%n", &order, &kind, &width, &end);
    if (!end || (kind != 'u' && kind != 'i') || (width != 1 && width != 2 && width != 4 && width != 8))
        die(1, "%s: its array has numbers of type %.6s: write tokens as whole numbers of 16 or 32 bits",
            s->path, type ? type + strlen("'descr': ") : "none");
    if (order == '>')
        die(1, "%s: the high bytes of its numbers come first: write the low bytes first, as numpy's '<u2'",
            s->path);
    s->width = width;
    s->is_signed = kind == 'i';
}

/* numpy's format, as build-nanogpt writes it: one dimension of whole numbers, the low byte first. */
static void take_npy_tokens(shard *s, const unsigned char *bytes, int64_t size) {
    char        header[NPY_HEADER];
    int64_t     begin = npy_header(s, bytes, size, header);
    long long   count = -1;
    int         end = 0;
    const char *shape = strstr(header, "'shape': (");
    npy_type(s, header);
    if (shape) sscanf(shape, "'shape': (%15lld,)%n", &count, &end);
    if (!end || count < 0)
        die(1, "%s: its array has the shape %.*s, and tokens have one dimension: write it flat", s->path,
            shape ? (int)strcspn(shape, ")") - 8 : 4, shape ? shape + 9 : "none");
    if (size - begin != count * s->width)
        die(1, "%s has %lld bytes after its header, which promises %lld tokens of %d bytes: get the "
               "complete file", s->path, (long long)(size - begin), count, s->width);
    s->at = bytes + begin;
    s->count = count;
}

static void take_tokens(shard *s, const config *c, const unsigned char *bytes, int64_t size) {
    int32_t magic = size >= 4 ? little_endian_i32(bytes) : 0;
    refuse_foreign(s->path, bytes, size, 0);
    if (magic == LLM_16_BITS || magic == LLM_32_BITS) take_llm_tokens(s, bytes, size);
    else if (is_npy(bytes, size)) take_npy_tokens(s, bytes, size);
    else take_raw_tokens(s, c, bytes, size);
}

/* Does a file hold tokens? It is named FILE.bin, or is an array of numpy. */
static int holds_tokens(const char *path) {
    size_t        n = strlen(path);
    unsigned char front[NPY_FRONT];
    int           file, is_array;
    if (n > 4 && strcasecmp(path + n - 4, ".bin") == 0) return 1;
    file = open_regular(path);
    if (file < 0) return 0;
    is_array = read(file, front, sizeof front) == (ssize_t)sizeof front && is_npy(front, NPY_FRONT);
    close(file);
    return is_array;
}

#endif
