/* tiny_gpt_data.h - what is learned: texts, tokens, their vocabulary, batches and prompts: a part
 * of tiny_gpt.c
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#ifndef TINY_GPT_DATA_H
#define TINY_GPT_DATA_H

#include <ctype.h>
#include "tiny_gpt_options.h"

/* What is learned: tokens 0 .. vocab-1, the first `train` of them to train on, the rest to
 * validate. Of a text, a token is the number of a byte among those that occur. */
typedef struct corpus {
    uint16_t     *tokens;
    int64_t       count, train, vocab;
    int64_t       rows;                 /* of the token table: vocab, or --vocab */
    int           is_text;
    int           id_of_byte[256];      /* of a text; -1: does not occur */
    unsigned char byte_of_id[256];
    int64_t       hash;                 /* tells a resumed run that the data have changed */
} corpus;

/* Without --data: mixprec.h, looked for in the current folder and beside the program. */
static void find_default_data(char *path, size_t space, const char *program) {
    static const char *const places[] = {"", "../", "../../"};
    const char *slash = strrchr(program, '/');
    if (path[0]) return;
    for (int beside = 0; beside < 2; beside++)
        for (int i = 0; i < 3; i++) {
            struct stat info;
            int folder = beside && slash ? (int)(slash - program + 1) : 0;
            snprintf(path, space, "%.*s%smixprec.h", folder, program, places[i]);
            if (stat(path, &info) == 0) return;
        }
    die(1, "no text to train on: mixprec.h is not here nor beside the program. "
           "Name a file with --data FILE");
}

/* Room for `more` tokens after those that d has. */
static uint16_t *more_tokens(corpus *d, int64_t more, const char *path) {
    size_t    bytes = (size_t)(d->count + more + 1) * sizeof *d->tokens;
    uint16_t *bigger = (uint16_t *)realloc(d->tokens, bytes);
    if (!bigger) die(1, "out of memory: %s has %lld tokens", path, (long long)more);
    d->tokens = bigger;
    return bigger + d->count;
}

/* A text's bytes, for the moment as they are. */
static void append_text(corpus *d, const char *path, const char *flag) {
    int64_t   n = 0;
    char     *text = read_file(path, (int64_t)1 << 30, &n);
    uint16_t *to;
    if (!text) die(1, "cannot read %s: %s. Check %s", path, strerror(errno), flag);
    to = more_tokens(d, n, path);
    for (int64_t i = 0; i < n; i++) to[i] = (unsigned char)text[i];
    d->count += n;
    free(text);
}

static int32_t little_endian_i32(const unsigned char *b) {
    return (int32_t)(b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 | (uint32_t)b[3] << 24);
}

/* The number of tokens in a FILE.bin of `size` bytes, f at the first of them. llm.c writes a
 * header of 256 numbers: magic, version, count. nanoGPT writes none. */
static int64_t begin_tokens(FILE *f, const char *path, int64_t size) {
    enum { MAGIC = 20240520, MAGIC_32_BITS = 20240801, HEADER = 1024 };
    unsigned char header[HEADER] = {0};
    int32_t       magic, version, count;
    size_t        got = fread(header, 1, HEADER, f);
    magic = little_endian_i32(header);
    version = little_endian_i32(header + 4);
    count = little_endian_i32(header + 8);
    if (magic == MAGIC_32_BITS)
        die(1, "%s holds tokens of 32 bits: only those of 16 bits can be read", path);
    if (magic != MAGIC) {
        if (size % 2 != 0)
            die(1, "%s has an odd number of bytes, %lld: tokens of 16 bits were expected. Is it "
                   "whole? (A text must not be named .bin)", path, (long long)size);
        rewind(f);
        return size / 2;
    }
    if (got < HEADER) die(1, "%s is cut off within its header: get the whole file", path);
    if (version != 1) die(1, "%s has version %ld of llm.c's format: only 1 can be read", path,
                          (long)version);
    if (count < 0 || size != HEADER + 2 * (int64_t)count)
        die(1, "%s has %lld bytes, but its header promises %ld tokens, which are %lld: get the "
               "whole file", path, (long long)size, (long)count, HEADER + 2 * (long long)count);
    return count;
}

/* The tokens of a FILE.bin: 16 bits each, the low byte first. */
static void append_tokens(corpus *d, const char *path, const char *flag) {
    struct stat info;
    FILE       *f = fopen(path, "rb");
    int64_t     n = 0;
    uint16_t   *to;
    if (!f || fstat(fileno(f), &info) != 0)
        die(1, "cannot read %s: %s. Check %s", path, strerror(errno), flag);
    n = begin_tokens(f, path, (int64_t)info.st_size);
    to = more_tokens(d, n, path);
    if (fread(to, sizeof *to, (size_t)n, f) != (size_t)n)
        die(1, "cannot read %s: %s", path, ferror(f) ? strerror(errno) : "it became shorter");
    fclose(f);
    for (int64_t i = 0; i < n; i++) {
        unsigned char b[2];
        memcpy(b, to + i, 2);
        to[i] = (uint16_t)(b[0] | b[1] << 8);
    }
    d->count += n;
}

static int is_bin(const char *path) {
    size_t n = strlen(path);
    return n > 4 && strcmp(path + n - 4, ".bin") == 0;
}

/* --- vocabulary --- */

static void add_byte(corpus *d, int byte) {
    d->byte_of_id[d->vocab] = (unsigned char)byte;
    d->id_of_byte[byte] = (int)d->vocab++;
}

static int read_hex_bytes(corpus *d, const char *hex) {
    for (; hex[0]; hex += 2) {
        unsigned byte;
        if (!isxdigit((unsigned char)hex[0]) || !isxdigit((unsigned char)hex[1])) return 0;
        sscanf(hex, "%2x", &byte);
        if (d->id_of_byte[byte] >= 0) return 0;
        add_byte(d, (int)byte);
    }
    return 1;
}

/* The vocabulary of a model made before: "bytes 0a20..." or "tokens 50257". With it, a model can
 * be made without its data. 0: there is none. */
static int read_vocabulary(corpus *d, const config *c) {
    const char *text = c->vocabulary;
    long        count = 0;
    int         end = 0, good;
    for (int b = 0; b < 256; b++) d->id_of_byte[b] = -1;
    if (!text[0]) return 0;
    d->is_text = strncmp(text, "bytes ", 6) == 0;
    if (d->is_text) good = read_hex_bytes(d, text + 6);
    else {
        good = sscanf(text, "tokens %6ld%n", &count, &end) == 1 && !text[end] && count <= 65536;
        d->vocab = count;
    }
    if (!good || d->vocab < 2)
        die(2, "--vocabulary \"%.40s\" is neither \"bytes\" with two hex digits for each nor "
               "\"tokens\" with their number: take the one of the model's config.json", text);
    d->rows = c->vocab == AUTO ? d->vocab : c->vocab;
    if (d->rows < d->vocab)
        die(2, "--vocab %lld is less than the vocabulary of %lld: raise it, or leave it out",
            (long long)d->rows, (long long)d->vocab);
    return 1;
}

/* What read_vocabulary reads. */
static void vocabulary_text(const corpus *d, char *text, size_t space) {
    if (!d->is_text) { snprintf(text, space, "tokens %lld", (long long)d->vocab); return; }
    text += snprintf(text, space, "bytes ");
    for (int64_t i = 0; i < d->vocab; i++, text += 2) sprintf(text, "%02x", d->byte_of_id[i]);
}

/* Numbers the bytes that occur, in their order; a model made before has numbered them. */
static void number_bytes(corpus *d, const config *c) {
    int known = d->vocab > 0;
    for (int64_t i = 0; i < d->count; i++) {
        int *id = &d->id_of_byte[d->tokens[i]];
        if (known && *id < 0)
            die(1, "%s holds the byte 0x%02x, which the model has never met: take it out of the "
                   "text, or train a new model", c->data, d->tokens[i]);
        if (!known) *id = 0;
    }
    for (int b = 0; b < 256 && !known; b++)
        if (d->id_of_byte[b] == 0) add_byte(d, b);
    for (int64_t i = 0; i < d->count; i++) d->tokens[i] = (uint16_t)d->id_of_byte[d->tokens[i]];
}

/* Finds the vocabulary, and that the token table has a row for each of it. */
static void make_vocabulary(corpus *d, const config *c) {
    int64_t limit = c->vocab != AUTO ? c->vocab : d->rows;      /* 0 = none */
    if (d->is_text) number_bytes(d, c);
    for (int64_t i = 0; i < d->count; i++) {
        if (limit && d->tokens[i] >= limit && !d->is_text)
            die(1, "%s holds token %d, beyond those of --vocab %lld: raise it, or leave it out",
                i < d->train || !c->val_data[0] ? c->data : c->val_data, d->tokens[i],
                (long long)limit);
        if (d->tokens[i] >= d->vocab) d->vocab = d->tokens[i] + 1;
    }
    if (d->vocab < 2)
        die(1, "%s is one %s repeated: nothing to learn", c->data, d->is_text ? "byte" : "token");
    if (c->vocab != AUTO && c->vocab < d->vocab)
        die(1, "%s has %lld different bytes: raise --vocab %lld, or leave it out", c->data,
            (long long)d->vocab, (long long)c->vocab);
    d->rows = limit ? limit : d->vocab;
}

/* Training and validation need a block each, and the token after it. */
static void check_length(const corpus *d, const char *path, int64_t have, int64_t least,
                         int64_t block) {
    if (have < least)
        die(1, "%s has %lld %s; --block %lld needs %lld or more: take a longer text or a smaller "
               "--block", path, (long long)have, d->is_text ? "bytes" : "tokens", (long long)block,
            (long long)least);
}

static void read_corpus(corpus *d, const config *c) {
    void  (*append)(corpus *, const char *, const char *);
    int64_t first;
    if (d->vocab > 0 && d->is_text == is_bin(c->data))
        die(2, "%s holds %s, but the model knows %s: name other --data", c->data,
            d->is_text ? "tokens" : "text", d->is_text ? "text" : "tokens");
    d->is_text = !is_bin(c->data);
    append = d->is_text ? append_text : append_tokens;
    if (c->val_data[0] && is_bin(c->val_data) == d->is_text)
        die(2, "--data and --val-data must both be texts, or both be tokens (FILE.bin)");
    append(d, c->data, "--data");
    first = d->count;
    if (c->val_data[0]) append(d, c->val_data, "--val-data");
    d->train = c->val_data[0] ? first : d->count * 9 / 10;
    check_length(d, c->data, first, (c->val_data[0] ? 1 : 10) * (c->block + 1), c->block);
    if (c->val_data[0])
        check_length(d, c->val_data, d->count - first, c->block + 1, c->block);
    d->hash = 1469598103934665603;
    for (int64_t i = 0; i < d->count; i++)
        d->hash = (int64_t)(((uint64_t)d->hash ^ d->tokens[i]) * 1099511628211u);
    make_vocabulary(d, c);
}

/* Where row `row` of batch `step` begins is a pure function of its key: a resumed run sees
 * the batches that an uninterrupted one would have seen. */
#define STREAM_TRAIN  (((uint64_t)1 << 62) + 1)
#define STREAM_VAL    (((uint64_t)1 << 62) + 2)
#define STREAM_SAMPLE (((uint64_t)1 << 62) + 3)

static int64_t row_start(const config *c, uint64_t stream, int64_t step, int64_t row,
                         uint64_t choices) {
    uint64_t seed = (uint64_t)c->seed, r, low;
    r = mixp_random_u32(seed, (uint64_t)step, stream, (uint64_t)row);
    if (choices >> 32 == 0) return (int64_t)((r * choices) >> 32);
    low = mixp_random_u32(seed, (uint64_t)step, stream, (uint64_t)row + ((uint64_t)1 << 32));
    return (int64_t)((r << 32 | low) % choices);
}

static void fill_batch(const corpus *d, const config *c, uint64_t stream, int64_t step,
                       int32_t *x, int32_t *y) {
    int64_t  first = stream == STREAM_VAL ? d->train : 0;
    int64_t  last = stream == STREAM_VAL ? d->count : d->train;
    uint64_t choices = (uint64_t)(last - first - c->block);
    for (int64_t row = 0; row < c->batch; row++) {
        const uint16_t *from = d->tokens + first + row_start(c, stream, step, row, choices);
        for (int64_t i = 0; i < c->block; i++) {
            x[row * c->block + i] = from[i];
            y[row * c->block + i] = from[i + 1];
        }
    }
}

/* --- prompts --- */

/* A FILE.bin comes without a tokenizer: its prompt is token numbers. */
static int64_t read_numbers(const config *c, const corpus *d, int32_t *ids) {
    int64_t n = 0;
    for (const char *p = c->prompt; p[strspn(p, " ")];) {
        char *end = NULL;
        long  id = strtol(p, &end, 10);
        if (end == p || (*end && *end != ' ') || id < 0 || id >= d->rows)
            die(2, "--prompt \"%s\": give token numbers below %lld, such as --prompt \"1 0 1\": "
                   "the model knows no text", c->prompt, (long long)d->rows);
        ids[n++] = (int32_t)id;
        p = end;
    }
    return n;
}

/* The prompt as tokens, so that a bad one is known before training. Without one: a text begins
 * at a line's start, GPT-2's tokens at its end of a text. */
static int64_t read_prompt(const config *c, const corpus *d, int32_t *ids) {
    enum { END_OF_TEXT = 50256 };
    int64_t n = d->is_text ? 0 : read_numbers(c, d, ids);
    for (const char *p = c->prompt; d->is_text && *p; p++) {
        int byte = (unsigned char)*p, id = d->id_of_byte[byte];
        if (id < 0)
            die(2, "--prompt holds the byte 0x%02x '%c', which does not occur in the text", byte,
                byte >= 32 && byte < 127 ? byte : '?');
        ids[n++] = id;
    }
    if (n == 0) {
        int first = d->is_text ? d->id_of_byte['\n'] : END_OF_TEXT;
        ids[n++] = first >= 0 && first < d->vocab ? first : 0;
    }
    return n;
}

/* A text's token as its byte, where it could not do anything to the terminal; else a number. */
static void say_token(const corpus *d, int token, int is_first) {
    int byte = d->is_text ? d->byte_of_id[token] : 0;
    if (!d->is_text) say("%s%d", is_first ? "" : " ", token);
    else say("%c", (byte < 32 && byte != '\n' && byte != '\t') || byte == 127 ? '?' : byte);
}

#endif
