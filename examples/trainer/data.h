/* data.h - the data set: texts, tokens, their vocabulary, batches and prompts: a part
 * of trainer.c
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#ifndef TRAINER_DATA_H
#define TRAINER_DATA_H

#include <ctype.h>
#include <fcntl.h>
#include <glob.h>
#include <sys/mman.h>
#include "options.h"
#include "tokenizer.h"

/* One file of the data, mapped into memory: the system reads only the pages in use, and ranks share
 * them. */
typedef struct shard {
    const unsigned char *at;            /* its tokens, the low byte first */
    int                  width;         /* bytes of a token: 1 (a text), 2 or 4 */
    int64_t              first, count;  /* of the tokens of all files */
    char                *path, *memory; /* memory: its address; mapped 0: allocated   */
    size_t               mapped;
} shard;

/* The data set: tokens 0 .. vocab-1. The first `train` tokens are for training, the rest for
 * validation. In a text, a token is the index of a byte among the bytes that occur. */
typedef struct corpus {
    shard        *shards;               /* in order, used as one file                     */
    int64_t       n_shards, count, train, vocab;
    int64_t       rows;                 /* of the token table: vocab, or --vocab */
    int64_t       own;                  /* bytes that were allocated, not mapped */
    int           is_text;
    int           id_of_byte[256];      /* for a text; -1: the byte does not occur */
    unsigned char byte_of_id[256];
    tokenizer    *words;                /* from --tokenizer; NULL: tokens are printed as numbers */
    int64_t       hash;                 /* shows a resumed run whether the data have changed */
} corpus;

/* The default of --data: mixprec.h in the current folder or beside the program. */
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

/* Maps a regular file; reads any other file, for example a pipe that the command line names. */
static const unsigned char *map_file(corpus *d, shard *s, const char *flag, int64_t *size) {
    struct stat info;
    int         file = open(s->path, O_RDONLY);
    if (file < 0 || fstat(file, &info) != 0)
        die(1, "cannot read %s: %s. Check %s", s->path, strerror(errno), flag);
    if (S_ISREG(info.st_mode) && info.st_size > 0) {
        void *map = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_PRIVATE, file, 0);
        if (map == MAP_FAILED) die(1, "cannot map %s: %s", s->path, strerror(errno));
        s->memory = (char *)map;
        s->mapped = (size_t)info.st_size;
        *size = (int64_t)info.st_size;
    } else {
        s->memory = read_to_end(file, (int64_t)1 << 30, size);
        if (!s->memory) die(1, "cannot read %s: %s. Check %s", s->path, read_error(), flag);
        d->own += *size;
    }
    close(file);
    return (const unsigned char *)s->memory;
}

static int32_t little_endian_i32(const unsigned char *b) {
    return (int32_t)(b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 | (uint32_t)b[3] << 24);
}

enum { LLM_HEADER = 1024, LLM_16_BITS = 20240520, LLM_32_BITS = 20240801 };

/* llm.c's format: a header of 256 numbers, which begins with magic, version and count. */
static void take_llm_tokens(shard *s, const unsigned char *bytes, int64_t size) {
    int     wide = little_endian_i32(bytes) == LLM_32_BITS, known = wide ? 7 : 1;
    int32_t version, count;
    if (size < LLM_HEADER) die(1, "%s is cut off within its header: get the whole file", s->path);
    version = little_endian_i32(bytes + 4);
    count = little_endian_i32(bytes + 8);
    s->width = wide ? 4 : 2;
    if (version != known)
        die(1, "%s has version %ld of llm.c's format: of tokens of %d bits only %d can be read",
            s->path, (long)version, 8 * s->width, known);
    if (count < 0 || size != LLM_HEADER + s->width * (int64_t)count)
        die(1, "%s has %lld bytes, but its header promises %ld tokens, which are %lld: get the "
               "whole file", s->path, (long long)size, (long)count,
            LLM_HEADER + s->width * (long long)count);
    s->at = bytes + LLM_HEADER;
    s->count = count;
}

/* Do 32-bit tokens look like 16-bit tokens? Then every second token is nearly 0. */
static int looks_wide(const unsigned char *bytes, int64_t size) {
    int64_t n = size < 65536 ? size : 65536;
    int     even = 0, odd = 0;
    for (int64_t i = 0; i + 3 < n; i += 4) {
        int low = bytes[i] | bytes[i + 1] << 8, high = bytes[i + 2] | bytes[i + 3] << 8;
        if (low > even) even = low;
        if (high > odd) odd = high;
    }
    return size % 4 == 0 && even > 255 && odd < 16;
}

/* nanoGPT's format: no header. The file does not state the width of its tokens. */
static void take_raw_tokens(shard *s, const config *c, const unsigned char *bytes, int64_t size) {
    s->width = c->token_bits == TOKEN_BITS_32 ? 4 : 2;
    if (c->token_bits == TOKEN_BITS_AUTO && looks_wide(bytes, size))
        die(1, "%s has no header, and looks as if its tokens were of 32 bits: add --token-bits 32, or "
               "--token-bits 16 if they are not", s->path);
    if (size % s->width != 0)
        die(1, "%s has %s, %lld: tokens of %d bits were expected. Is it whole? (A text must not be "
               "named .bin)", s->path, s->width == 2 ? "an odd number of bytes" : "a number of bytes",
            (long long)size, 8 * s->width);
    s->at = bytes;
    s->count = size / s->width;
}

static void take_tokens(shard *s, const config *c, const unsigned char *bytes, int64_t size) {
    int32_t magic = size >= 4 ? little_endian_i32(bytes) : 0;
    if (magic == LLM_16_BITS || magic == LLM_32_BITS) take_llm_tokens(s, bytes, size);
    else take_raw_tokens(s, c, bytes, size);
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

/* Reads the vocabulary of an earlier model: "bytes 0a20..." or "tokens 50257". With it, a model can
 * be created without its data. Returns 0 if there is none. */
static int read_vocabulary(corpus *d, const config *c) {
    const char *text = c->vocabulary;
    long        count = 0;
    int         end = 0, good;
    for (int b = 0; b < 256; b++) d->id_of_byte[b] = -1;
    if (!text[0]) return 0;
    d->is_text = strncmp(text, "bytes ", 6) == 0;
    if (d->is_text) good = read_hex_bytes(d, text + 6);
    else {
        good = sscanf(text, "tokens %8ld%n", &count, &end) == 1 && !text[end] &&
               count <= TOKENS_MOST;
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

/* Writes the text that read_vocabulary reads. */
static void vocabulary_text(const corpus *d, char *text, size_t space) {
    if (!d->is_text) { snprintf(text, space, "tokens %lld", (long long)d->vocab); return; }
    text += snprintf(text, space, "bytes ");
    for (int64_t i = 0; i < d->vocab; i++, text += 2) sprintf(text, "%02x", d->byte_of_id[i]);
}

/* --- tokens, wherever they lie --- */

static int32_t token_in(const shard *s, int64_t i) {
    const unsigned char *b = s->at + i * s->width;
    return s->width == 1 ? b[0] : s->width == 2 ? b[0] | b[1] << 8 : little_endian_i32(b);
}

/* The file that contains token i. */
static const shard *shard_with(const corpus *d, int64_t i) {
    int64_t low = 0, high = d->n_shards - 1;
    while (low < high) {
        int64_t middle = low + (high - low + 1) / 2;
        if (d->shards[middle].first <= i) low = middle;
        else high = middle - 1;
    }
    return &d->shards[low];
}

static void die_beyond(const corpus *d, const shard *s, int32_t token) {
    die(1, "%s holds token %ld, beyond those of --vocab %lld: raise it, or leave it out", s->path,
        (long)token, (long long)d->rows);
}

/* The tokens [at, at + n). */
static void copy_tokens(const corpus *d, int64_t at, int64_t n, int32_t *to) {
    while (n > 0) {
        const shard *s = shard_with(d, at);
        int64_t      i = at - s->first, end = s->count - i < n ? s->count : i + n;
        n -= end - i;
        at += end - i;
        for (; i < end; i++) {
            int32_t token = token_in(s, i);
            if (d->is_text) token = d->id_of_byte[token];
            if (token < 0 || token >= d->rows) die_beyond(d, s, token_in(s, i));
            *to++ = token;
        }
    }
}

/* --- what the data hold --- */

/* Above this number of tokens, files are sampled, not read completely. */
#define MANY_TOKENS ((int64_t)1 << 28)
#define SHOWN_EVERY ((int64_t)1 << 22)  /* tokens between two updates of the terminal */

/* Numbers the bytes that occur, in their order; an earlier model keeps its numbers. */
static void number_bytes(corpus *d, const config *c) {
    int known = d->vocab > 0, occurs[256] = {0};
    for (int64_t k = 0; k < d->n_shards; k++)
        for (int64_t i = 0; i < d->shards[k].count; i++) {
            if (i % SHOWN_EVERY == 0) show_work("looking at", d->shards[k].path, i, d->shards[k].count);
            occurs[d->shards[k].at[i]] = 1;
        }
    for (int b = 0; b < 256; b++) {
        if (occurs[b] && known && d->id_of_byte[b] < 0)
            die(1, "%s holds the byte 0x%02x, which the model has never met: take it out of the "
                   "text, or train a new model", c->data, b);
        if (occurs[b] && !known) add_byte(d, b);
    }
}

/* Finds the largest token; it sets the size of the vocabulary if no option does. */
static void find_largest(corpus *d) {
    for (int64_t k = 0; k < d->n_shards; k++) {
        const shard *s = &d->shards[k];
        for (int64_t i = 0; i < s->count; i++) {
            int32_t token = token_in(s, i);
            if (i % SHOWN_EVERY == 0) show_work("looking at", s->path, i, s->count);
            if (token < 0 || (d->rows && token >= d->rows)) die_beyond(d, s, token);
            if (token >= d->vocab) d->vocab = (int64_t)token + 1;
        }
    }
}

/* Finds the vocabulary, and checks that the token table has a row for each token. */
static void make_vocabulary(corpus *d, const config *c) {
    int64_t limit = c->vocab != AUTO ? c->vocab : d->rows;      /* 0 = none */
    d->rows = limit;
    if (d->is_text) number_bytes(d, c);
    else if (!limit || d->count <= MANY_TOKENS) find_largest(d);
    else if (d->vocab == 0) d->vocab = limit;   /* each batch checks its own tokens */
    if (d->vocab < 2)
        die(1, "%s is one %s repeated: nothing to learn", c->data, d->is_text ? "byte" : "token");
    if (d->vocab > TOKENS_MOST)
        die(1, "%s holds token %lld, and tokens up to %d can be learned: is it of --token-bits %s?",
            c->data, (long long)d->vocab - 1, TOKENS_MOST - 1,
            d->shards[0].width == 4 ? "16" : "32");
    if (c->vocab != AUTO && c->vocab < d->vocab)
        die(1, "%s has %lld different bytes: raise --vocab %lld, or leave it out", c->data,
            (long long)d->vocab, (long long)c->vocab);
    d->rows = limit ? limit : d->vocab;
}

static uint64_t hash_tokens(const corpus *d, uint64_t hash, int64_t at, int64_t n) {
    while (n > 0) {
        const shard *s = shard_with(d, at);
        int64_t      i = at - s->first, most = n < SHOWN_EVERY ? n : SHOWN_EVERY;
        int64_t      end = s->count - i < most ? s->count : i + most;
        show_work("reading", s->path, at, d->count);
        n -= end - i;
        at += end - i;
        for (; i < end; i++) hash = (hash ^ (uint32_t)token_in(s, i)) * 1099511628211u;
    }
    return hash;
}

/* Hash of many tokens: their number, and samples of 4096 tokens. */
static int64_t hash_data(const corpus *d) {
    enum { PIECES = 16384, PIECE = 4096 };
    uint64_t hash = 1469598103934665603u;
    if (d->count <= MANY_TOKENS) return (int64_t)hash_tokens(d, hash, 0, d->count);
    hash = (hash ^ (uint64_t)d->count) * 1099511628211u;
    for (int64_t i = 0; i < PIECES; i++)
        hash = hash_tokens(d, hash, (d->count - PIECE) / (PIECES - 1) * i, PIECE);
    return (int64_t)hash;
}

/* --- files --- */

/* Appends a file to d. */
static void add_file(corpus *d, const config *c, const char *path, const char *flag) {
    size_t               space = (size_t)(d->n_shards + 1) * sizeof *d->shards;
    shard               *all = (shard *)realloc(d->shards, space), *s;
    const unsigned char *bytes;
    int64_t              size = 0;
    if (!all) die(1, "out of memory");
    d->shards = all;
    s = &all[d->n_shards++];
    memset(s, 0, sizeof *s);
    s->path = (char *)malloc(strlen(path) + 1);
    if (!s->path) die(1, "out of memory");
    strcpy(s->path, path);
    s->first = d->count;
    if (is_bin(path) == d->is_text)
        die(2, "%s: all of %s must be texts, or all of them tokens (FILE.bin)", path, flag);
    bytes = map_file(d, s, flag, &size);
    if (!d->is_text) take_tokens(s, c, bytes, size);
    else {
        s->at = bytes;
        s->width = 1;
        s->count = size;
    }
    d->count += s->count;
}

/* Opens a file, or all files that match a pattern such as 'dir/train_*.bin', in order of name. */
static void add_files(corpus *d, const config *c, const char *pattern, const char *flag) {
    struct stat info;
    glob_t      found;
    int         wrong;
    if (!pattern[strcspn(pattern, "*?[")] || stat(pattern, &info) == 0) {
        add_file(d, c, pattern, flag);
        return;
    }
    wrong = glob(pattern, 0, NULL, &found);
    if (wrong)
        die(1, "no file matches %s. Check %s", pattern, flag);
    for (size_t i = 0; i < found.gl_pathc; i++) add_file(d, c, found.gl_pathv[i], flag);
    globfree(&found);
}

static void free_corpus(corpus *d) {
    for (int64_t k = 0; k < d->n_shards; k++) {
        shard *s = &d->shards[k];
        if (s->mapped) munmap(s->memory, s->mapped);
        else free(s->memory);
        free(s->path);
    }
    free(d->shards);
    free_tokenizer(d->words);
}

/* Training and validation each need a block and the token after it. */
static void check_length(const corpus *d, const char *path, int64_t have, int64_t least,
                         int64_t block) {
    if (have < least)
        die(1, "%s has %lld %s; --block %lld needs %lld or more: take a longer text or a smaller "
               "--block", path, (long long)have, d->is_text ? "bytes" : "tokens", (long long)block,
            (long long)least);
}

/* If another program truncates a mapped file, reading it raises SIGBUS. */
static void on_lost_file(int number) {
    static const char text[] = "trainer: a file of --data became shorter, or cannot be read any "
                               "more: go on from the last checkpoint with --resume\n";
    (void)number;
    if (write(STDERR_FILENO, text, sizeof text - 1) < 0) _exit(2);
    _exit(1);
}

static void read_corpus(corpus *d, const config *c) {
    int64_t first;
    if (d->vocab > 0 && d->is_text == is_bin(c->data))
        die(2, "%s holds %s, but the model knows %s: name other --data", c->data,
            d->is_text ? "tokens" : "text", d->is_text ? "text" : "tokens");
    d->is_text = !is_bin(c->data);
    if (c->val_data[0] && is_bin(c->val_data) == d->is_text)
        die(2, "--data and --val-data must both be texts, or both be tokens (FILE.bin)");
    signal(SIGBUS, on_lost_file);
    add_files(d, c, c->data, "--data");
    first = d->count;
    if (c->val_data[0]) add_files(d, c, c->val_data, "--val-data");
    d->train = c->val_data[0] ? first : d->count / 10 * 9 + d->count % 10 * 9 / 10;
    check_length(d, c->data, first, (c->val_data[0] ? 1 : 10) * (c->block + 1), c->block);
    if (c->val_data[0])
        check_length(d, c->val_data, d->count - first, c->block + 1, c->block);
    d->hash = hash_data(d);
    make_vocabulary(d, c);
}

/* Where row `row` of batch `step` begins: a pure function of its key, so a resumed run sees the
 * same batches as an uninterrupted run. */
#define STREAM_TRAIN  (((uint64_t)1 << 62) + 1)
#define STREAM_VAL    (((uint64_t)1 << 62) + 2)
#define STREAM_SAMPLE (((uint64_t)1 << 62) + 3)
#define STREAM_EVAL_TRAIN (((uint64_t)1 << 62) + 4)

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
        int64_t from = first + row_start(c, stream, step, row, choices);
        copy_tokens(d, from, c->block, x + row * c->block);
        copy_tokens(d, from + 1, c->block, y + row * c->block);
    }
}

/* --- prompts --- */

/* --tokenizer: prompts and samples of a token model are text. */
static void read_words(corpus *d, const config *c) {
    if (!c->tokenizer[0]) return;
    if (d->is_text)
        die(2, "--tokenizer is for tokens (FILE.bin): this model reads a text byte by byte");
    d->words = read_tokenizer(c->tokenizer);
    if (d->words->count > d->rows)
        die(1, "%s has tokens up to %lld, and the model has %lld: take the one that made its data",
            c->tokenizer, (long long)d->words->count - 1, (long long)d->rows);
}

/* A FILE.bin has no tokenizer: its prompt consists of token numbers. */
static int64_t read_numbers(const config *c, const corpus *d, int32_t *ids) {
    int64_t n = 0;
    for (const char *p = c->prompt; p[strspn(p, " ")];) {
        char *end = NULL;
        long  id = strtol(p, &end, 10);
        if (end == p || (*end && *end != ' ') || id < 0 || id >= d->rows)
            die(2, "--prompt \"%s\": give token numbers below %lld, such as --prompt \"1 0 1\": "
                   "the model knows no text, but with --tokenizer", c->prompt, (long long)d->rows);
        ids[n++] = (int32_t)id;
        p = end;
    }
    return n;
}

/* The prompt as tokens; run before training, to report a bad prompt early. By default, a text
 * begins at the start of a line, and GPT-2's tokens begin with its end-of-text token. */
static int64_t read_prompt(const config *c, const corpus *d, int32_t *ids) {
    enum { END_OF_TEXT = 50256 };
    int64_t n = d->is_text ? 0 : d->words ? encode_text(d->words, c->tokenizer, c->prompt, ids)
                                          : read_numbers(c, d, ids);
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

/* A sample as it is printed. A byte C2 waits for the next byte: C2 80 to C2 9F are control
 * characters. */
typedef struct speaker {
    const corpus *data;
    int           is_first;             /* no token was printed yet */
    char          held[2];              /* the byte that waits, or "" */
} speaker;

static void say_byte(speaker *s, int byte) {
    char text[3] = {s->held[0], (char)byte, '\0'};
    if (!s->held[0]) { text[0] = (char)byte; text[1] = '\0'; }
    s->held[0] = '\0';
    if (byte == 0) text[strlen(text)] = '?';
    if (byte == 0xC2) {
        s->held[0] = (char)byte;
        text[strlen(text) - 1] = '\0';
    }
    say("%s", text);
}

/* Prints a token: its byte for a text, its bytes with a tokenizer, otherwise its number. */
static void say_token(speaker *s, int token) {
    const tokenizer *words = s->data->words;
    const bpe_token *word = words && token < words->count ? &words->tokens[token] : NULL;
    if (s->data->is_text) say_byte(s, s->data->byte_of_id[token]);
    else if (word && word->bytes)
        for (int i = 0; i < word->length; i++) say_byte(s, (unsigned char)word->bytes[i]);
    else say("%s%d", s->is_first ? "" : " ", token);
    s->is_first = 0;
}

static void say_end(speaker *s) { say("%s\n", s->held); }

#endif
