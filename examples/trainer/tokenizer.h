/* tokenizer.h - text and tokens of a byte-level BPE, read from GPT-2's tokenizer.json: a part of
 * trainer.c
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * Lets a token model use text for prompts and samples. The file holds the bytes of each token, written in
 * an alphabet of 256 letters without spaces, and the merges: pairs of tokens that make another token, in
 * order of priority. A text is cut into words; in each word the merge of highest priority is applied until
 * none applies. Beyond ASCII, letters are recognised approximately: some words may be cut differently than
 * in `transformers`, which gives other tokens for the same text.
 */
#ifndef TRAINER_TOKENIZER_H
#define TRAINER_TOKENIZER_H
#define HEX_DIGITS "0123456789abcdefABCDEF"

#include <ctype.h>
#include "options.h"

enum { TOKENIZER_MOST_BYTES = 1 << 26, TOKEN_SPACE = 1024 /* of one token's text, in UTF-8 */ };

typedef struct bpe_token {
    char *bytes;                        /* NULL: no token has this number */
    int   length, is_special;           /* special: never the result of a merge, for example <|endoftext|> */
} bpe_token;

typedef struct bpe_merge {
    int32_t left, right, made, rank;    /* left -1: free slot         */
} bpe_merge;

typedef struct tokenizer {
    bpe_token *tokens;
    int64_t    count, most;             /* largest number + 1; its limit                        */
    int32_t   *by_text;                 /* a hash table of numbers; -1: free slot */
    bpe_merge *merges;                  /* a hash table      */
    uint32_t   text_mask, merge_mask;   /* sizes of the tables - 1; sizes are powers of two */
    int32_t    of_byte[256];            /* the token of a single byte, or -1 */
} tokenizer;

/* ==== The alphabet ================================================================== */

/* Printable bytes keep their number; the others are numbered from 256, in order. */
static int is_own_letter(int b) { return (b > 32 && b < 127) || (b > 160 && b != 173); }

/* The byte of a letter, or -1. */
static int byte_of_letter(unsigned long letter) {
    unsigned long next = 256;
    if (letter < 256) return is_own_letter((int)letter) ? (int)letter : -1;
    for (int b = 0; b < 256; b++)
        if (!is_own_letter(b) && next++ == letter) return b;
    return -1;
}

/* The code point of a UTF-8 character, or else the first byte. *bytes: its length. */
static unsigned long utf8_letter(const unsigned char *p, int *bytes) {
    int more = p[0] >= 0xF0 ? 3 : p[0] >= 0xE0 ? 2 : p[0] >= 0xC2 ? 1 : 0;
    unsigned long letter = more ? p[0] & (0x3Fu >> more) : p[0];
    for (int i = 1; i <= more; i++) {
        if ((p[i] & 0xC0) != 0x80) { *bytes = 1; return p[0]; }
        letter = letter << 6 | (p[i] & 0x3Fu);
    }
    *bytes = more + 1;
    return letter;
}

/* Converts a token's text to its bytes, in place. Returns the length, or -1 if a letter is not in
 * the alphabet. */
static int bytes_of_letters(char *text) {
    unsigned char *from = (unsigned char *)text;
    int            n = 0, length;
    while (*from) {
        int byte = byte_of_letter(utf8_letter(from, &length));
        if (byte < 0) return -1;
        from += length;
        text[n++] = (char)byte;
    }
    return n;
}

/* ==== Reading JSON ================================================================== */

static const char *skip_space(const char *p) { return p + strspn(p, " \t\r\n,:"); }

static int bpe_put_utf8(char *to, unsigned code) {
    if (code < 0x80) { to[0] = (char)code; return 1; }
    if (code < 0x800) {
        to[0] = (char)(0xC0 | code >> 6);
        to[1] = (char)(0x80 | (code & 0x3F));
        return 2;
    }
    to[0] = (char)(0xE0 | code >> 12);
    to[1] = (char)(0x80 | (code >> 6 & 0x3F));
    to[2] = (char)(0x80 | (code & 0x3F));
    return 3;
}

/* Reads the string at p, without quotes and escapes. Returns its end, or NULL. */
static const char *bpe_json_string(const char *p, char *to, size_t space) {
    static const char escapes[] = "\"\\/bfnrt", meant[] = "\"\\/\b\f\n\r\t";
    size_t n = 0;
    p = skip_space(p);
    if (*p++ != '"') return NULL;
    for (; *p != '"'; p++) {
        const char *escape;
        unsigned    code = 0;
        if (!*p || n + 4 > space) return NULL;
        if (*p != '\\') { to[n++] = *p; continue; }
        escape = p[1] ? strchr(escapes, p[1]) : NULL;
        if (escape) to[n++] = meant[escape - escapes];
        else if (p[1] == 'u' && strspn(p + 2, HEX_DIGITS) >= 4 && sscanf(p + 2, "%4x", &code) == 1 && code) {
            n += (size_t)bpe_put_utf8(to + n, code);
            p += 4;
        } else return NULL;
        p++;
    }
    to[n] = '\0';
    return p + 1;
}

/* The value of a key after p, or NULL. The value must begin with one of `first`, because a token
 * may have the same name as the key. */
static const char *bpe_json_find(const char *p, const char *quoted_key, const char *first) {
    size_t n = strlen(quoted_key);
    for (p = p ? strstr(p, quoted_key) : NULL; p; p = strstr(p + 1, quoted_key)) {
        const char *value = p + n + strspn(p + n, " \t\r\n");
        if (*value != ':') continue;
        value = skip_space(value);
        if (*value && strchr(first, *value)) return value;
    }
    return NULL;
}

/* ==== Its two tables ================================================================ */

static uint32_t hash_bytes(const char *bytes, int n) {
    uint32_t hash = 2166136261u;
    for (int i = 0; i < n; i++) hash = (hash ^ (unsigned char)bytes[i]) * 16777619u;
    return hash;
}

static uint32_t table_mask(int64_t n) {
    uint32_t size = 16;
    while ((int64_t)size < 2 * n) size *= 2;
    return size - 1;
}

/* The number of the token that has these bytes, or -1. */
static int32_t token_of(const tokenizer *t, const char *bytes, int n) {
    for (uint32_t at = hash_bytes(bytes, n);; at++) {
        int32_t id = t->by_text[at & t->text_mask];
        if (id < 0) return -1;
        if (t->tokens[id].length == n && memcmp(t->tokens[id].bytes, bytes, (size_t)n) == 0) return id;
    }
}

static bpe_merge *merge_place(const tokenizer *t, int32_t left, int32_t right) {
    uint32_t at = (uint32_t)left * 2654435761u ^ (uint32_t)right * 40503u;
    for (at ^= at >> 15;; at++) {
        bpe_merge *m = &t->merges[at & t->merge_mask];
        if (m->left < 0 || (m->left == left && m->right == right)) return m;
    }
}

static void tokenizer_add(tokenizer *t, const char *path, int64_t id, const char *bytes, int n, int special) {
    bpe_token *token;
    if (id < 0 || id >= t->most) die(1, "%s: a token has the number %lld", path, (long long)id);
    if (id >= t->count) {
        int64_t    room = id + 1 > 2 * t->count ? id + 1024 : 2 * t->count;
        bpe_token *more = (bpe_token *)realloc(t->tokens, (size_t)room * sizeof *more);
        if (!more) die(1, "out of memory");
        memset(more + t->count, 0, (size_t)(room - t->count) * sizeof *more);
        t->tokens = more;
        t->count = room;
    }
    token = &t->tokens[id];
    free(token->bytes);
    token->bytes = (char *)malloc((size_t)n + 1);
    if (!token->bytes) die(1, "out of memory");
    memcpy(token->bytes, bytes, (size_t)n);
    token->length = n;
    token->is_special = special;
}

/* "vocab": {"text": number, ...} */
static void read_bpe_tokens(tokenizer *t, const char *path, const char *p) {
    char text[TOKEN_SPACE];
    if (!p) die(1, "%s is no tokenizer.json of GPT-2's kind: its model has no vocab", path);
    for (p = skip_space(p + 1); *p != '}'; p = skip_space(p)) {
        const char *next = bpe_json_string(p, text, sizeof text);
        char       *end = NULL;
        long long   id = next ? strtoll(skip_space(next), &end, 10) : -1;
        int         n = next ? bytes_of_letters(text) : -1;
        if (!next || end == skip_space(next))
            die(1, "%s: its vocab is malformed at %.40s", path, p);
        if (n < 1) die(1, "%s is not byte-level: token %lld has other letters than bytes have", path, id);
        tokenizer_add(t, path, id, text, n, 0);
        p = end;
    }
}

/* "added_tokens": [{"id": number, ..., "content": "text", ...}, ...], as <|endoftext|>: not in letters. */
static void read_bpe_specials(tokenizer *t, const char *path, const char *p) {
    char text[TOKEN_SPACE];
    const char *end = p ? strchr(p, ']') : NULL;
    while (end && (p = strchr(p, '{')) != NULL && p < end) {
        const char *id = bpe_json_find(p, "\"id\"", "0123456789"), *content = bpe_json_find(p, "\"content\"", "\"");
        if (!id || !content || !bpe_json_string(content, text, sizeof text) || !text[0])
            die(1, "%s: its added_tokens are malformed", path);
        tokenizer_add(t, path, strtoll(id, NULL, 10), text, (int)strlen(text), 1);
        p = strchr(p, '}');
        if (!p) return;
        end = strchr(p, ']');
    }
}

/* Reads the two halves of the merge at p, "a b" or ["a", "b"], into text, one after the other.
 * Returns its end. */
static const char *bpe_pair(const char *p, char *left, char *right) {
    char *space;
    int   is_list = *p == '[';
    p = bpe_json_string(p + is_list, left, TOKEN_SPACE);
    if (p && is_list) {
        p = bpe_json_string(p, right, TOKEN_SPACE);
        return p && *skip_space(p) == ']' ? skip_space(p) + 1 : NULL;
    }
    space = p ? strchr(left, ' ') : NULL;
    if (!space) return NULL;
    strcpy(right, space + 1);
    *space = '\0';
    return p;
}

static int64_t count_merges(const char *p) {
    char    left[TOKEN_SPACE], right[TOKEN_SPACE];
    int64_t n = 0;
    for (p = skip_space(p + 1); p && *p && *p != ']'; n++) {
        p = bpe_pair(p, left, right);
        if (p) p = skip_space(p);
    }
    return p && *p ? n : -1;
}

/* "merges": the first merge has the highest priority. */
static void read_bpe_merges(tokenizer *t, const char *path, const char *p) {
    char    left[TOKEN_SPACE], both[2 * TOKEN_SPACE];
    int64_t n = p ? count_merges(p) : -1;
    if (n < 0) die(1, "%s: its model has no merges, or they are malformed", path);
    t->merge_mask = table_mask(n);
    t->merges = (bpe_merge *)malloc(((size_t)t->merge_mask + 1) * sizeof *t->merges);
    if (!t->merges) die(1, "out of memory");
    for (uint32_t i = 0; i <= t->merge_mask; i++) t->merges[i].left = -1;
    p = skip_space(p + 1);
    for (int32_t rank = 0; rank < n; rank++) {
        char       right[TOKEN_SPACE];
        int        a, b;
        bpe_merge  m;
        bpe_merge *place;
        p = skip_space(bpe_pair(p, left, right));
        a = bytes_of_letters(left);
        b = bytes_of_letters(right);
        if (a < 1 || b < 1) die(1, "%s: merge %ld is not of bytes", path, (long)rank);
        memcpy(both, left, (size_t)a);
        memcpy(both + a, right, (size_t)b);
        m.left = token_of(t, left, a);
        m.right = token_of(t, right, b);
        m.made = token_of(t, both, a + b);
        m.rank = rank;
        if (m.left < 0 || m.right < 0 || m.made < 0)
            die(1, "%s: merge %ld is of tokens that its vocab lacks", path, (long)rank);
        place = merge_place(t, m.left, m.right);
        if (place->left < 0) *place = m;
    }
}

static void index_tokens(tokenizer *t) {
    while (t->count > 0 && !t->tokens[t->count - 1].bytes) t->count--;
    t->text_mask = table_mask(t->count);
    t->by_text = (int32_t *)malloc(((size_t)t->text_mask + 1) * sizeof *t->by_text);
    if (!t->by_text) die(1, "out of memory");
    for (uint32_t i = 0; i <= t->text_mask; i++) t->by_text[i] = -1;
    for (int64_t id = 0; id < t->count; id++) {
        const bpe_token *token = &t->tokens[id];
        uint32_t         at = token->bytes ? hash_bytes(token->bytes, token->length) : 0;
        if (!token->bytes || token->is_special) continue;
        while (t->by_text[at & t->text_mask] >= 0) at++;
        t->by_text[at & t->text_mask] = (int32_t)id;
    }
    for (int b = 0; b < 256; b++) {
        char byte = (char)b;
        t->of_byte[b] = token_of(t, &byte, 1);
    }
}

static void free_tokenizer(tokenizer *t) {
    if (!t) return;
    for (int64_t i = 0; i < t->count; i++) free(t->tokens[i].bytes);
    free(t->tokens);
    free(t->by_text);
    free(t->merges);
    free(t);
}

/* Reads the tokenizer.json of a byte-level BPE, as written by `transformers` and `tokenizers`. */
static tokenizer *read_tokenizer(const char *path) {
    int64_t     size = 0;
    char       *text = read_file(path, TOKENIZER_MOST_BYTES, &size);
    tokenizer  *t = (tokenizer *)calloc(1, sizeof *t);
    const char *model;
    if (!text) die(1, "cannot read %s: %s. Check --tokenizer", path, read_error());
    if (!t) die(1, "out of memory");
    t->most = size < TOKENS_MOST ? size : TOKENS_MOST;
    model = bpe_json_find(text, "\"model\"", "{");
    if (!model) die(1, "%s is no tokenizer.json: it has no model", path);
    read_bpe_tokens(t, path, bpe_json_find(model, "\"vocab\"", "{"));
    read_bpe_specials(t, path, bpe_json_find(text, "\"added_tokens\"", "["));
    index_tokens(t);
    read_bpe_merges(t, path, bpe_json_find(model, "\"merges\"", "["));
    free(text);
    return t;
}

/* ==== A text as tokens ============================================================== */

typedef enum letter_kind { LETTER, DIGIT, SPACE, OTHER } letter_kind;

/* The class of the character at p; *bytes: its length. Beyond ASCII, blocks decide what are spaces,
 * punctuation and signs; all other characters are letters. */
static letter_kind kind_at(const char *p, int *bytes) {
    unsigned long c = utf8_letter((const unsigned char *)p, bytes);
    if (c < 128)
        return isalpha((int)c) ? LETTER : isdigit((int)c) ? DIGIT : isspace((int)c) ? SPACE : OTHER;
    if (c == 0x85 || c == 0xA0 || (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 ||
        c == 0x202F || c == 0x3000) return SPACE;
    if (c == 0xB2 || c == 0xB3 || c == 0xB9 || (c >= 0xBC && c <= 0xBE)) return DIGIT;
    if (c == 0xAA || c == 0xB5 || c == 0xBA) return LETTER;
    if (c < 0xC0 || c == 0xD7 || c == 0xF7) return OTHER;
    if ((c >= 0x2010 && c <= 0x2BFF) || (c >= 0x3001 && c <= 0x3004) || (c >= 0x3008 && c <= 0x3020) ||
        (c >= 0xFE10 && c <= 0xFE6F) || (c >= 0xFF01 && c <= 0xFF0F) || (c >= 0x1F000 && c <= 0x1FAFF))
        return OTHER;
    return LETTER;
}

static int run_length(const char *p, letter_kind kind) {
    int n = 0, bytes;
    while (p[n] && kind_at(p + n, &bytes) == kind) n += bytes;
    return n;
}

/* The bytes of the next word, split as in GPT-2: 's and similar endings; letters, digits or signs,
 * each with an optional leading space; or spaces, of which the last belongs to the next word. */
static int word_length(const char *p) {
    static const char *const ends[] = {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"};
    int         lead = p[0] == ' ' && p[1], bytes, n, last = 0;
    letter_kind kind;
    for (size_t i = 0; i < sizeof ends / sizeof ends[0]; i++)
        if (strncmp(p, ends[i], strlen(ends[i])) == 0) return (int)strlen(ends[i]);
    kind = kind_at(p + lead, &bytes);
    if (kind != SPACE) return lead + run_length(p + lead, kind);
    n = run_length(p, SPACE);
    for (int i = 0; i < n; i += bytes) { kind_at(p + i, &bytes); last = bytes; }
    return p[n] && n > last ? n - last : n;
}

/* Merges a word's tokens by priority. Returns how many remain. */
static int merge_word(const tokenizer *t, int32_t *ids, int n) {
    for (;;) {
        const bpe_merge *best = NULL;
        int              to = 0;
        for (int i = 0; i + 1 < n; i++) {
            const bpe_merge *m = merge_place(t, ids[i], ids[i + 1]);
            if (m->left >= 0 && (!best || m->rank < best->rank)) best = m;
        }
        if (!best) return n;
        for (int i = 0; i < n; i++, to++) {
            int fits = i + 1 < n && ids[i] == best->left && ids[i + 1] == best->right;
            ids[to] = fits ? best->made : ids[i];
            i += fits;
        }
        n = to;
    }
}

/* The special token at the start of the text, or -1. */
static int32_t special_at(const tokenizer *t, const char *text) {
    for (int64_t id = t->count - 1; id >= 0; id--) {
        const bpe_token *token = &t->tokens[id];
        if (token->is_special && strncmp(text, token->bytes, (size_t)token->length) == 0) return (int32_t)id;
    }
    return -1;
}

/* Writes the tokens of a text, at most one per byte. Returns their number. */
static int64_t encode_text(const tokenizer *t, const char *path, const char *text, int32_t *ids) {
    int64_t n = 0;
    while (*text) {
        int32_t special = special_at(t, text);
        int     length = word_length(text);
        if (special >= 0) {
            ids[n++] = special;
            text += t->tokens[special].length;
            continue;
        }
        for (int i = 1; i < length; i++)
            if (special_at(t, text + i) >= 0) length = i;
        for (int i = 0; i < length; i++) {
            ids[n + i] = t->of_byte[(unsigned char)text[i]];
            if (ids[n + i] < 0) die(1, "%s has no token for the byte 0x%02x", path, (unsigned char)text[i]);
        }
        n += merge_word(t, ids + n, length);
        text += length;
    }
    return n;
}

#endif
