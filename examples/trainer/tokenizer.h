/* tokenizer.h - reads a tokenizer.json, of a BPE of bytes or of pieces: a part of trainer.c and of llama.c
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * words.h applies it. With --tokenizer, texts become tokens, and prompts and samples of a token model are text. A text passes
 * these stages, in the order of the `tokenizers` library:
 *
 *     added tokens    a text such as <|endoftext|> is one token, wherever it stands
 *     normalizer      changes letters
 *     pre_tokenizer   cuts the text into words, and writes each byte as one of 256 letters
 *     model           begins with the tokens of a word's bytes, and applies the merges, pairs of tokens
 *                     that make another token, in order of priority
 *
 * A BPE of pieces (Llama 2, TinyLlama: SentencePiece's) cuts no words, begins with characters, or with the bytes
 * of those that it lacks, and writes a space as U+2581. Here its texts have spaces.
 *
 * What a file asks for is done as the library does it, or refused by the name of its field, or there is a
 * warning with that name. Special tokens that a post_processor adds around a text are not added; `begin` is
 * the one before it.
 */
#ifndef TRAINER_TOKENIZER_H
#define TRAINER_TOKENIZER_H

#include "json_file.h"

enum { TOKENIZER_MOST_BYTES = 1 << 26, TOKEN_SPACE = 1024 /* of one token's text, in UTF-8 */ };
enum { TOKENIZER_MOST = 1 << 24 };      /* tokens */

typedef struct bpe_token {
    const char *bytes;                  /* NULL: no token has this number */
    int         length;
} bpe_token;

typedef struct bpe_name {               /* a token of the model, to be found by its bytes */
    const char *bytes;
    int         length;
    int32_t     id;
} bpe_name;

typedef struct bpe_merge { int32_t left, right, made, rank; } bpe_merge;

typedef struct added_token {
    const char *text;
    int         length;
    int32_t     id;
    int         single_word, lstrip, rstrip, special;
} added_token;

/* Added tokens in order of text. */
typedef struct added_set {
    added_token *all;
    size_t       count;
    char         begins[256];           /* 1: an added token begins with this byte */
} added_set;

enum { NORMALIZE_NFC = 1, NORMALIZE_OTHER = 2, NORMALIZE_LOWER = 4 };

/* The space before a text of pieces: none; before each part between added tokens; the same, unless one is there;
 * the same at the beginning of a text only. */
typedef enum piece_space { SPACE_NEVER, SPACE_EACH, SPACE_MISSING, SPACE_FIRST } piece_space;

/* How a stage of the pre_tokenizer cuts; CUT_GPT4_1: numbers of one digit each. */
typedef enum cut_kind { CUT_GPT2, CUT_GPT4, CUT_GPT4_1, CUT_DIGITS, CUT_DIGIT_RUNS, CUT_NOT } cut_kind;
typedef struct cut_stage { cut_kind kind; int prefix; } cut_stage;
enum { CUT_STAGES = 8 };

typedef struct tokenizer {
    char       *path;
    bpe_token  *tokens;
    int64_t     count, most;            /* largest number + 1; its limit */
    char       *pool;                   /* the texts of all tokens */
    size_t      pooled;
    bpe_name   *names;                  /* in order of bytes */
    int64_t     n_names;
    bpe_merge  *merges;                 /* in order of left, then of right */
    int32_t    *first_merge;            /* of each left token; [count]: the number of merges */
    int32_t     of_byte[256];           /* the token of a single byte, or -1 */
    int         normalizer;             /* NORMALIZE_, or 0 */
    added_set   raw, normal;            /* found before and after the normalizer */
    cut_stage   cuts[CUT_STAGES];
    int         n_cuts, has_bytes, ignore_merges;   /* has_bytes: ByteLevel is among the cuts */
    int         has_pieces, crosses;    /* 1: a BPE of pieces; 1: some have a space behind another character */
    piece_space space;                  /* of pieces */
    int32_t     begin;                  /* the token that the post_processor puts before a text, or -1 */
    int         warned;                 /* bits of the warnings that were given */
} tokenizer;

/* ==== The alphabet ================================================================== */

/* Printable bytes keep their number; the others are numbered from 256, in order. */
static int is_own_letter(int b) { return (b > 32 && b < 127) || (b > 160 && b != 173); }

static unsigned letter_of_byte(int byte) {
    unsigned next = 256;
    if (is_own_letter(byte)) return (unsigned)byte;
    for (int b = 0; b < byte; b++) next += !is_own_letter(b);
    return next;
}

/* The byte of a letter, or -1. */
static int byte_of_letter(unsigned long letter) {
    unsigned long next = 256;
    if (letter < 256) return is_own_letter((int)letter) ? (int)letter : -1;
    for (int b = 0; b < 256; b++)
        if (!is_own_letter(b) && next++ == letter) return b;
    return -1;
}

/* The code point of the UTF-8 character at p, or else the first byte. *bytes: its length. */
static unsigned long utf8_letter(const char *at, const char *end, int *bytes) {
    const unsigned char *p = (const unsigned char *)at;
    int           more = p[0] >= 0xF0 ? 3 : p[0] >= 0xE0 ? 2 : p[0] >= 0xC2 ? 1 : 0;
    unsigned long letter = more ? p[0] & (0x3Fu >> more) : p[0];
    for (int i = 1; i <= more; i++) {
        if (at + i >= end || (p[i] & 0xC0) != 0x80) { *bytes = 1; return p[0]; }
        letter = letter << 6 | (p[i] & 0x3Fu);
    }
    *bytes = more + 1;
    return letter;
}

/* Converts a token's n bytes of letters to the bytes that they mean. Returns their number, or -1 if a
 * letter is not in the alphabet. */
static int bytes_of_letters(const char *text, int n, char *to) {
    const char *end = text + n;
    int         made = 0, length;
    while (text < end) {
        int byte = byte_of_letter(utf8_letter(text, end, &length));
        if (byte < 0) return -1;
        text += length;
        to[made++] = (char)byte;
    }
    return made;
}

/* Is the text that writes these bytes in letters this one? */
static int letters_are(const bpe_token *token, const char *text, int n) {
    char letter[4];
    for (int i = 0; i < token->length; i++) {
        int length = (int)put_utf8(letter, letter_of_byte((unsigned char)token->bytes[i]));
        if (length > n || memcmp(text, letter, (size_t)length) != 0) return 0;
        text += length;
        n -= length;
    }
    return n == 0;
}

/* ==== Reading the file ============================================================== */

static void *tokenizer_memory(size_t count, size_t size) {
    void *memory = calloc(count ? count : 1, size);
    if (!memory) die(1, "out of memory for --tokenizer");
    return memory;
}

/* Copies a text into the pool, which has room for all texts of the file. */
static const char *pool_text(tokenizer *t, const char *text, int n) {
    char *to = t->pool + t->pooled;
    memcpy(to, text, (size_t)n);
    t->pooled += (size_t)n;
    return to;
}

/* Warns once for each bit. */
static void tokenizer_warns(tokenizer *t, int bit, const char *what) {
    if (!(t->warned & bit)) warn("%s: %s", t->path, what);
    t->warned |= bit;
}

static void set_token(tokenizer *t, int64_t id, const char *bytes, int n) {
    if (id >= t->count) t->count = id + 1;
    t->tokens[id].bytes = bytes;
    t->tokens[id].length = n;
}

/* The number of a token, which the size of the file limits. */
static int64_t token_number(const tokenizer *t, const char *value) {
    int64_t id = json_count(value);
    if (id < 0 || id >= t->most)
        die(1, "%s: a token has the number %.*s, and the numbers of a file of its size end at %lld", t->path,
            value ? (int)strcspn(value, ",} \r\n") % 40 : 4, value ? value : "none", (long long)t->most);
    return id;
}

static int64_t count_items(const char *container) {
    int64_t n = 0;
    if (!container || (*container != '{' && *container != '[')) return 0;
    for (const char *p = json_first(container); p; n++)
        p = json_next(*container == '{' ? json_of_key(p) : p);
    return n;
}

/* The bytes of a piece: U+2581 is a space. Returns their number. */
static size_t bytes_of_piece(const char *text, size_t n, char *to) {
    size_t made = 0;
    for (size_t i = 0; i < n; i++) {
        int is_space = i + 2 < n && memcmp(text + i, "\xE2\x96\x81", 3) == 0;
        to[made++] = is_space ? ' ' : text[i];
        i += is_space ? 2 : 0;
    }
    return made;
}

/* The byte that <0x41> stands for, or -1. */
static int byte_of_piece(const char *text, int n) {
    char *end;
    long  byte = n == 6 && memcmp(text, "<0x", 3) == 0 && text[5] == '>' ? strtol(text + 3, &end, 16) : -1;
    return byte >= 0 && end == text + 5 ? (int)byte : -1;
}

static int bytes_of_text(const tokenizer *t, const char *text, int n, char *to)
{ return t->has_pieces ? (int)bytes_of_piece(text, (size_t)n, to) : bytes_of_letters(text, n, to); }

/* Is there a space behind another character? */
static int has_later_space(const char *text, int n) {
    for (int i = 1; i < n; i++) if (text[i] == ' ' && text[i - 1] != ' ') return 1;
    return 0;
}

/* A token of one byte, for characters that are no piece. */
static void set_byte(tokenizer *t, int64_t id, int byte) {
    char bytes = (char)byte;
    set_token(t, id, pool_text(t, &bytes, 1), 1);
    t->of_byte[byte] = (int32_t)id;
}

/* "vocab": {"text": number, ...} */
static void read_bpe_tokens(tokenizer *t, const char *vocab) {
    char text[TOKEN_SPACE], bytes[TOKEN_SPACE];
    for (const char *key = json_first(vocab); key; key = json_next(json_of_key(key))) {
        int64_t     length = json_string(key, text, sizeof text), id = token_number(t, json_of_key(key));
        int         n = length > 0 ? bytes_of_text(t, text, (int)length, bytes) : -1;
        int         byte = t->has_pieces ? byte_of_piece(text, (int)length) : -1;
        bpe_name   *name = &t->names[t->n_names];
        const char *pooled;
        if (length < 0) die(1, "%s: the text of token %lld is too long", t->path, (long long)id);
        if (t->tokens[id].bytes) die(1, "%s: two tokens have the number %lld", t->path, (long long)id);
        if (byte >= 0) { set_byte(t, id, byte); continue; }
        /* a text of other letters is no word's, but may be an added token's */
        pooled = n > 0 ? pool_text(t, bytes, n) : pool_text(t, text, (int)length);
        set_token(t, id, pooled, n > 0 ? n : (int)length);
        if (n < 1) continue;
        t->crosses |= has_later_space(pooled, n);
        name->bytes = pooled;
        name->length = n;
        name->id = (int32_t)id;
        t->n_names++;
    }
}

static int compare_bytes(const char *a, int n, const char *b, int m) {
    int order = memcmp(a, b, (size_t)(n < m ? n : m));
    return order ? order : (n > m) - (n < m);
}

static int by_bytes(const void *a, const void *b) {
    bpe_name x, y;
    memcpy(&x, a, sizeof x);
    memcpy(&y, b, sizeof y);
    return compare_bytes(x.bytes, x.length, y.bytes, y.length);
}

/* The number of the model's token that has these bytes, or -1. */
static int32_t token_of(const tokenizer *t, const char *bytes, int n) {
    int64_t low = 0, high = t->n_names;
    while (low < high) {
        int64_t         middle = low + (high - low) / 2;
        const bpe_name *name = &t->names[middle];
        int             order = compare_bytes(name->bytes, name->length, bytes, n);
        if (order == 0) return name->id;
        if (order < 0) low = middle + 1;
        else high = middle;
    }
    return -1;
}

static void index_tokens(tokenizer *t) {
    qsort(t->names, (size_t)t->n_names, sizeof *t->names, by_bytes);
    for (int64_t i = 0; i + 1 < t->n_names; i++)
        if (by_bytes(&t->names[i], &t->names[i + 1]) == 0)
            die(1, "%s: tokens %ld and %ld have the same text", t->path, (long)t->names[i].id,
                (long)t->names[i + 1].id);
    for (int b = 0; b < 256 && !t->has_pieces; b++) {
        char byte = (char)b;
        t->of_byte[b] = token_of(t, &byte, 1);
    }
}

/* Splits a merge, "a b" or ["a", "b"], into its two texts. Returns 0 if it is malformed. */
static int bpe_pair(const char *value, char *left, char *right) {
    char *space;
    if (*value == '[') {
        const char *a = json_first(value), *b = a ? json_next(a) : NULL;
        return a && b && !json_next(b) && json_string(a, left, TOKEN_SPACE) > 0 &&
               json_string(b, right, TOKEN_SPACE) > 0;
    }
    if (json_string(value, left, TOKEN_SPACE) < 3) return 0;
    space = strchr(left, ' ');
    if (!space || space == left || !space[1] || strchr(space + 1, ' ')) return 0;
    strcpy(right, space + 1);
    *space = '\0';
    return 1;
}

static bpe_merge read_merge(const tokenizer *t, const char *value, int32_t rank) {
    char      left[TOKEN_SPACE], right[TOKEN_SPACE], both[2 * TOKEN_SPACE];
    int       a, b;
    bpe_merge m = {-1, -1, -1, rank};
    if (!bpe_pair(value, left, right)) die(1, "%s: merge %ld is malformed", t->path, (long)rank);
    a = bytes_of_text(t, left, (int)strlen(left), both);
    b = a < 0 ? -1 : bytes_of_text(t, right, (int)strlen(right), both + a);
    if (b < 0) die(1, "%s: merge %ld is not of bytes", t->path, (long)rank);
    m.left = token_of(t, both, a);
    m.right = token_of(t, both + a, b);
    m.made = token_of(t, both, a + b);
    if (m.left < 0 || m.right < 0 || m.made < 0)
        die(1, "%s: merge %ld is of tokens that its vocab lacks", t->path, (long)rank);
    return m;
}

static int by_pair(const void *a, const void *b) {
    bpe_merge x, y;
    memcpy(&x, a, sizeof x);
    memcpy(&y, b, sizeof y);
    if (x.left != y.left) return x.left < y.left ? -1 : 1;
    if (x.right != y.right) return x.right < y.right ? -1 : 1;
    return (x.rank > y.rank) - (x.rank < y.rank);
}

/* "merges": the first merge has the highest priority. Of two merges of one pair the later counts. */
static void read_bpe_merges(tokenizer *t, const char *merges) {
    int64_t n = 0, kept = 0;
    t->merges = (bpe_merge *)tokenizer_memory((size_t)count_items(merges), sizeof *t->merges);
    for (const char *p = json_first(merges); p; p = json_next(p), n++)
        t->merges[n] = read_merge(t, p, (int32_t)n);
    qsort(t->merges, (size_t)n, sizeof *t->merges, by_pair);
    for (int64_t i = 0; i < n; i++) {
        const bpe_merge *next = i + 1 < n ? &t->merges[i + 1] : NULL;
        if (next && next->left == t->merges[i].left && next->right == t->merges[i].right) continue;
        t->merges[kept++] = t->merges[i];
    }
    t->first_merge = (int32_t *)tokenizer_memory((size_t)t->count + 1, sizeof *t->first_merge);
    for (int64_t id = 0, at = 0; id <= t->count; id++) {
        while (at < kept && t->merges[at].left < id) at++;
        t->first_merge[id] = (int32_t)at;
    }
}

/* The merge of two tokens, or NULL. */
static const bpe_merge *merge_of(const tokenizer *t, int32_t left, int32_t right) {
    int32_t low = t->first_merge[left], high = t->first_merge[left + 1];
    while (low < high) {
        int32_t middle = low + (high - low) / 2;
        if (t->merges[middle].right == right) return &t->merges[middle];
        if (t->merges[middle].right < right) low = middle + 1;
        else high = middle;
    }
    return NULL;
}

/* ---- normalizer and pre_tokenizer ---- */

/* The type of a part of the file, in `type`, which has 64 bytes. */
static const char *type_of(const char *part, char *type) {
    if (json_string(json_find(part, "type"), type, 64) < 0) strcpy(type, "without a type");
    return type;
}

/* A part of the file, or each part of a Sequence. Calls `read` for each, in order. */
static void read_parts(tokenizer *t, const char *part, const char *list,
                       void (*read_part)(tokenizer *t, const char *part)) {
    char type[64];
    if (!part) return;
    if (strcmp(type_of(part, type), "Sequence") != 0) { read_part(t, part); return; }
    part = json_find(part, list);
    if (!part || *part != '[') die(1, "%s: a Sequence has no %s", t->path, list);
    for (part = json_first(part); part; part = json_next(part)) read_part(t, part);
}

/* Does a key of a part have this text? */
static int part_is(const char *part, const char *key, const char *text) {
    char found[64];
    return json_string(json_find(part, key), found, sizeof found) >= 0 && strcmp(found, text) == 0;
}

/* Of pieces: a space before each part, and spaces as U+2581. Returns 0 if the part is another. */
static int read_piece_normalizer(tokenizer *t, const char *part, const char *type) {
    if (!t->has_pieces) return 0;
    if (strcmp(type, "Prepend") == 0 && part_is(part, "prepend", "\xE2\x96\x81")) { t->space = SPACE_EACH; return 1; }
    return strcmp(type, "Replace") == 0 && part_is(part, "content", "\xE2\x96\x81") &&
           part_is(json_find(part, "pattern"), "String", " ");
}

static void read_normalizer(tokenizer *t, const char *part) {
    char type[64];
    type_of(part, type);
    if (read_piece_normalizer(t, part, type)) return;
    if (strcmp(type, "NFC") == 0) t->normalizer |= NORMALIZE_NFC;
    else if (strcmp(type, "NFD") == 0 || strcmp(type, "NFKC") == 0 || strcmp(type, "NFKD") == 0)
        t->normalizer |= NORMALIZE_OTHER;
    else if (strcmp(type, "Lowercase") == 0) t->normalizer |= NORMALIZE_LOWER;
    else die(1, "%s: its normalizer is %s, and this reader has NFC, NFD, NFKC, NFKD and Lowercase",
             t->path, type);
}

#define GPT4_ENDS  "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|"
#define GPT4_SIGNS "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"

/* The patterns of a Split that are known. */
static const struct { const char *pattern; cut_kind kind; } known_cuts[] = {
    {GPT4_ENDS "\\p{N}{1,3}" GPT4_SIGNS, CUT_GPT4},         /* GPT-4, Llama 3 */
    {GPT4_ENDS "\\p{N}" GPT4_SIGNS, CUT_GPT4_1},            /* Qwen 2 */
    {"'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+", CUT_GPT2},
    {"'(?:[sdmt]|ll|ve|re)| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+", CUT_GPT2},
};
enum { KNOWN_CUTS = (int)(sizeof known_cuts / sizeof known_cuts[0]) };

static cut_kind read_split(const tokenizer *t, const char *part) {
    char        pattern[512] = "", behavior[32] = "";
    const char *inverted = json_find(part, "invert");
    int         is_inverted = inverted && *inverted == 't';
    json_string(json_find(json_find(part, "pattern"), "Regex"), pattern, sizeof pattern);
    json_string(json_find(part, "behavior"), behavior, sizeof behavior);
    for (int i = 0; i < KNOWN_CUTS; i++)
        if (strcmp(pattern, known_cuts[i].pattern) == 0 &&
            strcmp(behavior, is_inverted ? "Removed" : "Isolated") == 0) return known_cuts[i].kind;
    die(1, "%s: its pre_tokenizer has a Split (%.24s) by \"%.80s\", and this reader knows those of GPT-2, "
           "GPT-4, Llama 3 and Qwen 2", t->path, behavior, pattern);
    return CUT_NOT;
}

static void read_cut(tokenizer *t, const char *part) {
    char        type[64];
    const char *flag;
    cut_stage   cut = {CUT_NOT, 0};
    if (t->n_cuts == CUT_STAGES) die(1, "%s: its pre_tokenizer has too many parts", t->path);
    type_of(part, type);
    if (strcmp(type, "ByteLevel") == 0) {
        flag = json_find(part, "add_prefix_space");
        cut.prefix = !flag || *flag == 't';
        flag = json_find(part, "use_regex");
        cut.kind = !flag || *flag == 't' ? CUT_GPT2 : CUT_NOT;
    } else if (strcmp(type, "Split") == 0) cut.kind = read_split(t, part);
    else if (strcmp(type, "Digits") == 0) {
        flag = json_find(part, "individual_digits");
        cut.kind = flag && *flag == 't' ? CUT_DIGITS : CUT_DIGIT_RUNS;
    } else
        die(1, "%s: its pre_tokenizer is %s, and this reader has ByteLevel, Split and Digits", t->path, type);
    if (t->has_bytes)
        die(1, "%s: its pre_tokenizer has %s after ByteLevel, and this reader reads no such order", t->path,
            type);
    t->has_bytes = strcmp(type, "ByteLevel") == 0;
    t->cuts[t->n_cuts++] = cut;
}

/* Metaspace: the space before a text of pieces. Pieces that are cut at spaces are refused. */
static void read_metaspace(tokenizer *t, const char *part) {
    char        type[64], scheme[32] = "always";
    const char *flag = json_find(part, "split"), *value = json_find(part, "prepend_scheme");
    if (strcmp(type_of(part, type), "Metaspace") != 0)
        die(1, "%s: its pre_tokenizer is %s, and this reader has Metaspace for pieces", t->path, type);
    if (!part_is(part, "replacement", "\xE2\x96\x81") || !flag || *flag != 'f')
        die(1, "%s: its pre_tokenizer Metaspace has another replacement than U+2581, or splits, and this reader has neither",
            t->path);
    if (value) json_string(value, scheme, sizeof scheme);
    t->space = strcmp(scheme, "first") == 0 ? SPACE_FIRST : strcmp(scheme, "never") == 0 ? SPACE_NEVER : SPACE_MISSING;
}

static void read_pre_tokenizer(tokenizer *t, const char *part) {
    if (t->has_pieces) {
        if (part) read_metaspace(t, part);
        return;
    }
    read_parts(t, part, "pretokenizers", read_cut);
    if (!t->has_bytes)
        die(1, "%s: its pre_tokenizer is not ByteLevel, and this reader reads tokens of bytes only", t->path);
}

/* ---- added tokens ---- */

static int is_set(const char *object, const char *key) {
    const char *value = json_find(object, key);
    return value && *value == 't';
}

static int by_text(const void *a, const void *b) {
    added_token x, y;
    memcpy(&x, a, sizeof x);
    memcpy(&y, b, sizeof y);
    return compare_bytes(x.text, x.length, y.text, y.length);
}

static void index_added(tokenizer *t, added_set *set) {
    qsort(set->all, set->count, sizeof *set->all, by_text);
    for (size_t i = 0; i < set->count; i++) {
        if (i && by_text(&set->all[i - 1], &set->all[i]) == 0)
            die(1, "%s: its added_tokens have \"%.*s\" twice", t->path, set->all[i].length, set->all[i].text);
        set->begins[(unsigned char)set->all[i].text[0]] = 1;
    }
}

static int64_t normalize(tokenizer *t, const char *text, int64_t n, char *to);

/* "added_tokens": [{"id": number, "content": "text", "special": true, ...}, ...] */
static void read_added(tokenizer *t, const char *list) {
    char    text[TOKEN_SPACE], changed[TOKEN_SPACE];
    int64_t count = count_items(list);
    t->raw.all = (added_token *)tokenizer_memory((size_t)count, sizeof *t->raw.all);
    t->normal.all = (added_token *)tokenizer_memory((size_t)count, sizeof *t->normal.all);
    for (const char *p = count ? json_first(list) : NULL; p; p = json_next(p)) {
        int64_t      n = json_string(json_find(p, "content"), text, sizeof text);
        int64_t      id = token_number(t, json_find(p, "id"));
        int          is_normal = is_set(p, "normalized");
        added_set   *set = is_normal ? &t->normal : &t->raw;
        added_token *token = &set->all[set->count];
        const char  *bytes;
        if (n < 1) die(1, "%s: its added_tokens are malformed at \"%.40s\"", t->path, p);
        if (t->tokens[id].bytes && (t->tokens[id].length != n || memcmp(t->tokens[id].bytes, text, (size_t)n)) &&
            !letters_are(&t->tokens[id], text, (int)n))
            die(1, "%s: added token \"%s\" and another token have the number %lld", t->path, text,
                (long long)id);
        bytes = pool_text(t, text, (int)n);
        set_token(t, id, bytes, (int)n);
        set->count++;
        token->id = (int32_t)id;
        token->single_word = is_set(p, "single_word");
        token->lstrip = is_set(p, "lstrip");
        token->rstrip = is_set(p, "rstrip");
        token->special = is_set(p, "special");
        token->length = (int)n;
        token->text = bytes;
        if (is_normal && t->normalizer) {
            token->length = (int)normalize(t, text, n, changed);
            token->text = pool_text(t, changed, token->length);
        }
    }
    index_added(t, &t->raw);
    index_added(t, &t->normal);
}

/* Of {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": text}}, ...], "special_tokens":
 * {text: {"ids": [number]}}}: the token before a text. */
static void read_template(tokenizer *t, const char *part) {
    char        text[TOKEN_SPACE];
    const char *single = json_find(part, "single"), *ids;
    if (strcmp(type_of(part, text), "TemplateProcessing") != 0 || !count_items(single)) return;
    if (json_string(json_find(json_find(json_first(single), "SpecialToken"), "id"), text, sizeof text) < 1) return;
    ids = json_find(json_find(json_find(part, "special_tokens"), text), "ids");
    if (!count_items(ids)) die(1, "%s: its post_processor has no number for \"%s\"", t->path, text);
    t->begin = (int32_t)token_number(t, json_first(ids));
}

/* What a model other than GPT-2's would need. */
static void check_model(tokenizer *t, const char *model) {
    static const char *const none[] = {"continuing_subword_prefix", "end_of_word_suffix"};
    char        text[64];
    const char *value = json_find(model, "type");
    if (value && (json_string(value, text, sizeof text) < 0 || strcmp(text, "BPE") != 0))
        die(1, "%s: its model is of type %.20s, and this reader reads BPE", t->path, value);
    for (size_t i = 0; i < sizeof none / sizeof none[0]; i++)
        if (json_find(model, none[i]) && json_string(json_find(model, none[i]), text, sizeof text) != 0)
            die(1, "%s: its model has %s, and a model of bytes has none", t->path, none[i]);
    value = json_find(model, "dropout");
    if (value && strtod(value, NULL) != 0)
        tokenizer_warns(t, 1, "its model has dropout, which is not applied: the likeliest tokens are taken");
    t->ignore_merges = is_set(model, "ignore_merges");
    t->has_pieces = is_set(model, "byte_fallback");
    for (int b = 0; b < 256; b++) t->of_byte[b] = -1;
}

static void free_tokenizer(tokenizer *t) {
    if (!t) return;
    free(t->tokens);
    free(t->pool);
    free(t->names);
    free(t->merges);
    free(t->first_merge);
    free(t->raw.all);
    free(t->normal.all);
    free(t->path);
    free(t);
}

/* The tokenizer of a tokenizer.json that was read from path: `size` bytes with the value root. Memory is in
 * proportion to the file, and time nearly so: texts are sorted. */
static tokenizer *tokenizer_of(const char *path, const char *root, size_t size) {
    tokenizer  *t = (tokenizer *)tokenizer_memory(1, sizeof *t);
    const char *model, *vocab, *merges, *added;
    int64_t     entries;
    t->path = (char *)tokenizer_memory(strlen(path) + 1, 1);
    memcpy(t->path, path, strlen(path) + 1);
    model = json_find(root, "model");
    if (!model || *model != '{') die(1, "%s is not a tokenizer.json: it has no model", path);
    check_model(t, model);
    vocab = json_find(model, "vocab");
    merges = json_find(model, "merges");
    added = json_find(root, "added_tokens");
    if (!vocab || *vocab != '{') die(1, "%s is not a tokenizer.json of GPT-2's kind: its model has no vocab", path);
    if (!merges || *merges != '[') die(1, "%s is not a tokenizer.json of GPT-2's kind: its model has no merges", path);
    if (added && *added != '[') die(1, "%s: its added_tokens are not a list", path);
    if (json_find(root, "truncation")) tokenizer_warns(t, 2, "its truncation is not applied");
    if (json_find(root, "padding")) tokenizer_warns(t, 4, "its padding is not applied");

    /* numbers may have gaps, but not many */
    entries = count_items(vocab) + count_items(added);
    t->most = 2 * entries + 4096 < TOKENIZER_MOST ? 2 * entries + 4096 : TOKENIZER_MOST;
    t->tokens = (bpe_token *)tokenizer_memory((size_t)t->most, sizeof *t->tokens);
    t->names = (bpe_name *)tokenizer_memory((size_t)entries, sizeof *t->names);
    t->pool = (char *)tokenizer_memory(2 * size + 1, 1);

    read_parts(t, json_find(root, "normalizer"), "normalizers", read_normalizer);
    read_pre_tokenizer(t, json_find(root, "pre_tokenizer"));
    read_bpe_tokens(t, vocab);
    index_tokens(t);
    read_added(t, added);
    read_bpe_merges(t, merges); /* its index covers the added tokens' numbers too */
    t->begin = -1;
    read_parts(t, json_find(root, "post_processor"), "processors", read_template);
    return t;
}

/* Reads a tokenizer.json, as `transformers` and `tokenizers` write it. *json, unless json is NULL: its text,
 * which the caller frees. */
static tokenizer *read_tokenizer(const char *path, char **json) {
    const char *root;
    char       *text = read_json(path, TOKENIZER_MOST_BYTES, ". Check --tokenizer", &root);
    tokenizer  *t = tokenizer_of(path, root, strlen(text));
    if (json) *json = text;
    else free(text);
    return t;
}

#endif
