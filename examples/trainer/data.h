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
#include "token_files.h"
#include "words.h"

/* The data set: tokens 0 .. vocab-1. The first `train` tokens are for training, the rest for
 * validation. In a text, a token is the index of a byte among the bytes that occur. */
typedef struct corpus {
    shard        *shards;               /* in order, used as one file                     */
    int64_t       n_shards, count, train, vocab;
    int64_t       rows;                 /* of the token table: vocab, or --vocab */
    int64_t       own;                  /* bytes that were allocated, not mapped */
    int           has_tokens;           /* 1: the files hold tokens, not text */
    int           is_text;              /* 1: a token is a byte; 0: the model knows tokens */
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
    die(1, "no text to train on: mixprec.h is neither in this folder nor beside the program. "
           "Name a file with --data FILE");
}

/* Maps a regular file; reads a pipe that the command line names. */
static const unsigned char *map_file(corpus *d, shard *s, const char *flag, int64_t *size) {
    struct stat info;
    int         file = plain_descriptor(s->path, O_RDONLY, S_IFIFO);
    if (file < 0 || fstat(file, &info) != 0)
        die(1, "cannot read %s: %s. Check %s", s->path, plain_error(), flag);
    if (S_ISREG(info.st_mode) && info.st_size > 0) {
        void *map = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_PRIVATE, file, 0);
        if (map == MAP_FAILED) die(1, "cannot map %s: %s", s->path, strerror(errno));
        s->memory = (char *)map;
        s->mapped = (size_t)info.st_size;
        *size = (int64_t)info.st_size;
    } else {
        s->memory = read_to_end(file, (int64_t)1 << 30, size);
        if (!s->memory) die(1, "cannot read %s: %s. Check %s", s->path, plain_error(), flag);
        d->own += *size;
    }
    close(file);
    return (const unsigned char *)s->memory;
}

/* A text as tokens of --tokenizer. */
static void take_words(corpus *d, shard *s, const unsigned char *bytes, int64_t size) {
    int64_t        n = 0;
    int32_t       *ids;
    unsigned char *at;
    show_work("cutting into tokens", s->path, 0, 0);
    ids = encode_text(d->words, (const char *)bytes, size, &n);
    if (s->mapped) munmap(s->memory, s->mapped);
    else free(s->memory);
    d->own += n * (int64_t)sizeof *ids - (s->mapped ? 0 : size);
    s->mapped = 0;
    s->memory = (char *)ids;
    s->at = at = (unsigned char *)ids;
    for (int64_t i = 0; i < n; i++, at += 4) {          /* the low byte first, on every machine */
        uint32_t id = (uint32_t)ids[i];
        at[0] = (unsigned char)id;
        at[1] = (unsigned char)(id >> 8);
        at[2] = (unsigned char)(id >> 16);
        at[3] = (unsigned char)(id >> 24);
    }
    s->width = 4;
    s->count = n;
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
 * be created without its data. Returns 0 if c has no vocabulary. */
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
               "\"tokens\" with their number: use the one of the model's config.json", text);
    d->rows = c->vocab == AUTO ? d->vocab : c->vocab;
    if (d->rows < d->vocab)
        die(2, "--vocab %lld is less than the vocabulary of %lld: raise it, or leave out --vocab",
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
    if (token < 0) die(1, "%s holds a number that is not a token: it is negative, or 2^31 and more", s->path);
    if (d->words && d->rows == d->words->count)
        die(1, "%s holds token %ld, and the %lld tokens of --tokenizer end before it: use the one that "
               "made the data", s->path, (long)token, (long long)d->rows);
    die(1, "%s holds token %ld, beyond those of --vocab %lld: raise it, or leave out --vocab", s->path,
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
            die(1, "%s holds the byte 0x%02x, which the model does not know: remove it from the "
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

/* Refuses, before training, an --export of GGUF that has no row for some of its tokens. */
static void check_gguf_rows(const corpus *d, const config *c) {
    if (!is_gguf(c->export_to) || !d->words || d->words->count <= d->rows) return;
    die(1, "--export FILE.gguf needs a row for each token: %s has %lld tokens, and the model has %lld "
           "rows. Raise --vocab to %lld, or leave out --vocab", c->tokenizer, (long long)d->words->count,
        (long long)d->rows, (long long)d->words->count);
}

/* Finds the vocabulary, and checks that the token table has a row for each token. */
static void make_vocabulary(corpus *d, const config *c) {
    int64_t limit = c->vocab != AUTO ? c->vocab : d->rows;      /* 0 = none */
    int     is_new = d->vocab == 0;
    if (!limit && d->words) limit = d->words->count;
    d->rows = limit;
    if (d->is_text) number_bytes(d, c);
    else if (!limit || d->count <= MANY_TOKENS) find_largest(d);
    else if (d->vocab == 0) d->vocab = limit;   /* each batch checks its own tokens */
    if (is_new && d->words) d->vocab = d->words->count < limit ? d->words->count : limit;
    if (d->vocab < 2)
        die(1, "%s is one %s repeated: nothing to learn", c->data, d->is_text ? "byte" : "token");
    if (d->vocab > TOKENS_MOST)
        die(1, "%s holds token %lld, and tokens up to %d can be learned: is it of --token-bits %s?",
            c->data, (long long)d->vocab - 1, TOKENS_MOST - 1,
            d->shards[0].width == 4 ? "16" : "32");
    if (c->vocab != AUTO && c->vocab < d->vocab)
        die(1, "%s has %lld different bytes: raise --vocab %lld, or leave out --vocab", c->data,
            (long long)d->vocab, (long long)c->vocab);
    d->rows = limit ? limit : d->vocab;
    check_gguf_rows(d, c);
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
    if (holds_tokens(path) != d->has_tokens)
        die(2, "%s: all of %s must be texts, or all of them tokens (FILE.bin)", path, flag);
    bytes = map_file(d, s, flag, &size);
    if (!d->has_tokens) refuse_foreign(path, bytes, size, 1);
    if (d->has_tokens) take_tokens(s, c, bytes, size);
    else if (d->words) take_words(d, s, bytes, size);
    else {
        s->at = bytes;
        s->width = 1;
        s->count = size;
    }
    d->count += s->count;
}

/* The pattern with a backslash before each special character of its folder, if there is a folder of that
 * name. The caller frees it. */
static char *plain_folder(const char *pattern) {
    const char *slash = strrchr(pattern, '/');
    char       *text = (char *)malloc(2 * strlen(pattern) + 1), *to = text;
    struct stat info;
    int         is_folder = 0;
    if (!text) die(1, "out of memory");
    if (slash) {
        sprintf(text, "%.*s", (int)(slash - pattern), pattern);
        is_folder = stat(text, &info) == 0 && S_ISDIR(info.st_mode);
    }
    for (const char *p = pattern; *p; p++) {
        if (is_folder && p < slash && strchr("*?[\\", *p)) *to++ = '\\';
        *to++ = *p;
    }
    *to = '\0';
    return text;
}

/* The files that match a pattern such as 'dir/train_*.bin', in order of name. None: it is a name. */
static glob_t find_data(const char *pattern, const char *flag) {
    struct stat info;
    glob_t      found;
    int         is_name = !pattern[strcspn(pattern, "*?[")] || stat(pattern, &info) == 0;
    char       *text = is_name ? NULL : plain_folder(pattern);
    memset(&found, 0, sizeof found);
    if (!is_name && glob(text, 0, NULL, &found) != 0) die(1, "no file matches %s. Check %s", pattern, flag);
    free(text);
    return found;
}

/* Opens a file, or all files that match a pattern. */
static void add_files(corpus *d, const config *c, const char *pattern, const char *flag) {
    glob_t found = find_data(pattern, flag);
    if (!found.gl_pathc) add_file(d, c, pattern, flag);
    for (size_t i = 0; i < found.gl_pathc; i++) add_file(d, c, found.gl_pathv[i], flag);
    globfree(&found);
}

/* Does the first file of a pattern hold tokens? */
static int data_hold_tokens(const char *pattern, const char *flag) {
    glob_t found = find_data(pattern, flag);
    int    tokens = holds_tokens(found.gl_pathc ? found.gl_pathv[0] : pattern);
    globfree(&found);
    return tokens;
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
        die(1, "%s has %lld %s; --block %lld needs %lld or more: use a longer text or a smaller "
               "--block", path, (long long)have, d->is_text ? "bytes" : "tokens", (long long)block,
            (long long)least);
}

/* If another program truncates a mapped file, reading it raises SIGBUS. */
static void on_lost_file(int number) {
    static const char text[] = "trainer: a file of --data became shorter, or cannot be read any "
                               "more: continue from the last checkpoint with --resume\n";
    (void)number;
    if (write(STDERR_FILENO, text, sizeof text - 1) < 0) _exit(2);
    _exit(1);
}

static void read_corpus(corpus *d, const config *c) {
    int64_t first;
    int     bytes;
    d->has_tokens = data_hold_tokens(c->data, "--data");
    bytes = !d->has_tokens && !d->words;
    if (d->vocab > 0 && d->is_text != bytes)
        die(2, "%s holds %s, but the model knows %s: name other --data%s", c->data,
            d->is_text ? "tokens" : "text", d->is_text ? "text" : "tokens",
            d->is_text ? "" : ", or add the --tokenizer of the model");
    d->is_text = bytes;
    if (c->val_data[0] && data_hold_tokens(c->val_data, "--val-data") != d->has_tokens)
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

/* --tokenizer: texts become tokens; prompts and samples of a token model are text. */
static void read_words(corpus *d, const config *c) {
    if (!c->tokenizer[0]) return;
    if (d->vocab > 0 && d->is_text)
        die(2, "--tokenizer is for tokens: this model reads a text byte by byte");
    d->words = read_tokenizer(c->tokenizer, NULL);
}

/* The tokens of a prompt. A tokenizer may have more tokens than the model, for example one that its data
 * do not hold. */
static int64_t read_prompt_words(const config *c, const corpus *d, int32_t *ids) {
    int64_t  n = 0;
    int32_t *all = encode_text(d->words, c->prompt, (int64_t)strlen(c->prompt), &n);
    for (int64_t i = 0; i < n; i++) {
        const bpe_token *word = &d->words->tokens[all[i]];
        if (all[i] >= d->rows)
            die(1, "--prompt holds \"%.*s\", token %ld of %s, and the model has %lld tokens: leave out --prompt, or "
                   "use the tokenizer that made the model's data", word->length, word->bytes, (long)all[i],
                c->tokenizer, (long long)d->rows);
        ids[i] = all[i];
    }
    free(all);
    return n;
}

/* A FILE.bin has no tokenizer: its prompt consists of token numbers. */
static int64_t read_numbers(const config *c, const corpus *d, int32_t *ids) {
    int64_t n = 0;
    for (const char *p = c->prompt; p[strspn(p, " ")];) {
        char *end = NULL;
        long  id = strtol(p, &end, 10);
        if (end == p || (*end && *end != ' ') || id < 0 || id >= d->rows)
            die(2, "--prompt \"%s\": pass token numbers below %lld, such as --prompt \"1 0 1\": "
                   "the model knows no text, but with --tokenizer", c->prompt, (long long)d->rows);
        ids[n++] = (int32_t)id;
        p = end;
    }
    return n;
}

/* Tokens of the longest prompt: a tokenizer may begin words with a space. */
enum { PROMPT_TOKENS = 2 * (int)sizeof(((config *)0)->prompt) };

/* What a sample without a prompt begins with: a text after a line break; tokens after the token between
 * texts, by its name in the tokenizer, or GPT-2's number. */
static int32_t first_token(const corpus *d) {
    static const char *const names[] = {"<|endoftext|>", "<|begin_of_text|>", "<|end_of_text|>", "<s>", "</s>"};
    enum { END_OF_TEXT = 50256 };
    if (d->is_text) return d->id_of_byte['\n'];
    for (size_t i = 0; d->words && i < sizeof names / sizeof names[0]; i++) {
        const char        *end = names[i] + strlen(names[i]);
        const added_token *token = added_at(&d->words->raw, names[i], end);
        if (token && token->length == end - names[i]) return token->id;
    }
    return d->words ? d->words->of_byte['\n'] : END_OF_TEXT;
}

/* The prompt as tokens; run before training, to report a bad prompt early. */
static int64_t read_prompt(const config *c, const corpus *d, int32_t *ids) {
    int64_t n = d->is_text ? 0 : d->words ? read_prompt_words(c, d, ids)
                                          : read_numbers(c, d, ids);
    for (const char *p = c->prompt; d->is_text && *p; p++) {
        int byte = (unsigned char)*p, id = d->id_of_byte[byte];
        if (id < 0)
            die(2, "--prompt holds the byte 0x%02x '%c', which does not occur in the text", byte,
                byte >= 32 && byte < 127 ? byte : '?');
        ids[n++] = id;
    }
    if (n == 0) {
        int32_t first = first_token(d);
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
