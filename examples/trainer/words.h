/* words.h - a text as tokens, by a tokenizer.json: a part of trainer.c and of llama.c
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * The stages that tokenizer.h names, in their order. Texts are bytes with a length; bytes that are no UTF-8
 * count as letters of Latin 1.
 */
#ifndef TRAINER_WORDS_H
#define TRAINER_WORDS_H

#include "letters.h"
#include "tokenizer.h"

/* ==== Letters ======================================================================= */

typedef enum letter_kind { LETTER, DIGIT, SPACE, OTHER } letter_kind;

static int is_in(const uint32_t (*ranges)[2], size_t n, unsigned long c) {
    size_t low = 0;
    while (low < n) {
        size_t middle = low + (n - low) / 2;
        if (c > ranges[middle][1]) low = middle + 1;
        else if (c < ranges[middle][0]) n = middle;
        else return 1;
    }
    return 0;
}
#define IS_IN(ranges, c) is_in(ranges, sizeof(ranges) / sizeof(ranges)[0], c)

/* The class of the character at p; *bytes: its length. */
static letter_kind kind_at(const char *p, const char *end, int *bytes) {
    unsigned long c = utf8_letter(p, end, bytes);
    if (c < 128 && ((c | 32) - 'a' < 26)) return LETTER;
    if (c < 128 && c - '0' < 10) return DIGIT;
    if (IS_IN(space_ranges, c)) return SPACE;
    if (c < 128) return OTHER;
    return IS_IN(letter_ranges, c) ? LETTER : IS_IN(number_ranges, c) ? DIGIT : OTHER;
}

/* Does the character belong to a word, as \w in regular expressions? */
static int is_word_letter(unsigned long c) {
    return c == '_' || c == 0x203F || c == 0x2040 || IS_IN(letter_ranges, c) || IS_IN(number_ranges, c) ||
           IS_IN(mark_ranges, c);
}

/* Where the character before p begins. */
static const char *character_before(const char *begin, const char *p) {
    int n = 1;
    while (n < 4 && p - n > begin && ((unsigned char)p[-n] & 0xC0) == 0x80) n++;
    return p - n;
}

static int ends_with_word(const char *begin, const char *p) {
    int length;
    return p > begin && is_word_letter(utf8_letter(character_before(begin, p), p, &length));
}

static int begins_with_word(const char *p, const char *end) {
    int length;
    return p < end && is_word_letter(utf8_letter(p, end, &length));
}

/* ---- normalizer ---- */

/* May NFC change this character, or join it with the one before it? Blocks in which it does neither are
 * known; of all others the answer is yes. */
static int may_compose(unsigned long c) {
    static const uint32_t stable[][2] = {
        {0, 0x2FF}, {0x37B, 0x37D}, {0x388, 0x3FF}, {0x400, 0x482}, {0x48A, 0x52F}, {0x531, 0x58F},
        {0x5D0, 0x5EA}, {0x1E00, 0x1EFF}, {0x2002, 0x20BF}, {0x2190, 0x2328}, {0x232B, 0x2ADB}, {0x2ADD, 0x2BFF},
        {0x3000, 0x3098}, {0x309B, 0x30FF}, {0x3400, 0x4DBF}, {0x4E00, 0x9FFF}, {0xAC00, 0xD7A3},
        {0xFE00, 0xFE0F}, {0xFF01, 0xFFEF}, {0x1F000, 0x1FAFF}, {0x20000, 0x2F7FF}};
    return !IS_IN(stable, c);
}

/* Lower case of a letter of Latin 1 or Cyrillic; *known 0: it may be a letter of another alphabet that
 * has cases. */
static unsigned lower_case(unsigned long c, int *known) {
    *known = 1;
    if ((c >= 'A' && c <= 'Z') || (c >= 0xC0 && c <= 0xDE && c != 0xD7) || (c >= 0x410 && c <= 0x42F))
        return (unsigned)c + 32;
    if (c >= 0x400 && c <= 0x40F) return (unsigned)c + 80;
    *known = c < 0x100 || (c >= 0x430 && c <= 0x45F) || (c >= 0x5D0 && c <= 0x1031) ||
             (c >= 0x2000 && c <= 0x20BF) || (c >= 0x2190 && c <= 0x23FF) || (c >= 0x2500 && c <= 0x2BFF) ||
             (c >= 0x3000 && c <= 0x9FFF) || (c >= 0xAC00 && c <= 0xD7A3) || (c >= 0x1F000 && c <= 0x1FAFF);
    return (unsigned)c;
}

/* Writes the normalized text, which is not longer: a byte above 127 that is not UTF-8 stays as it is. Warns once
 * of characters that it cannot treat. */
static int64_t normalize(tokenizer *t, const char *text, int64_t n, char *to) {
    const char *end = text + n;
    int64_t     made = 0;
    while (text < end) {
        int           length, known = 1;
        unsigned long c = utf8_letter(text, end, &length);
        if ((t->normalizer & NORMALIZE_NFC) && may_compose(c))
            tokenizer_warns(t, 8, "its normalizer NFC may change this text, and this reader does not compose "
                                  "letters: tokens may differ");
        if ((t->normalizer & NORMALIZE_OTHER) && c > 127)
            tokenizer_warns(t, 16, "its normalizer (NFD, NFKC or NFKD) may change this text beyond ASCII, and "
                                   "this reader does not: tokens may differ");
        if (t->normalizer & NORMALIZE_LOWER) {
            unsigned low = lower_case(c, &known);
            if (!known)
                tokenizer_warns(t, 32, "its normalizer Lowercase may change this text, and this reader has lower "
                                       "case of Latin and Cyrillic letters only: tokens may differ");
            if (low != c && (length > 1 || c < 128)) made += (int64_t)put_utf8(to + made, low);
            else { memcpy(to + made, text, (size_t)length); made += length; }
        } else { memcpy(to + made, text, (size_t)length); made += length; }
        text += length;
    }
    return made;
}

/* ==== Cutting into words ============================================================ */

static const char *run_end(const char *p, const char *end, letter_kind kind) {
    int bytes;
    while (p < end && kind_at(p, end, &bytes) == kind) p += bytes;
    return p;
}

/* The end of the spaces at p: all of them at the end of the text; otherwise all but the last, which
 * belongs to the next word; a single one stays. */
static const char *spaces_end(const char *p, const char *end) {
    const char *stop = run_end(p, end, SPACE), *last;
    if (stop == end) return stop;
    last = character_before(p, stop);
    return last > p ? last : stop;
}

/* The end of one of 's 't 're 've 'm 'll 'd at p, or p. any_case: also 'S, and long s. */
static const char *ending_end(const char *p, const char *end, int any_case) {
    static const char *const ends[] = {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"};
    for (size_t i = 0; i < sizeof ends / sizeof ends[0]; i++) {
        size_t n = strlen(ends[i]), k = 0;
        while (k < n && p + k < end && (p[k] == ends[i][k] || (any_case && k && (p[k] | 32) == ends[i][k]))) k++;
        if (k == n) return p + n;
    }
    if (any_case && end - p >= 3 && memcmp(p, "'\xC5\xBF", 3) == 0) return p + 3;
    return p;
}

/* The end of the word at p, as GPT-2 cuts: 's and similar endings; letters, digits or signs, each with an
 * optional leading space; or spaces. */
static const char *gpt2_word_end(const char *p, const char *end) {
    const char *stop = ending_end(p, end, 0), *begin = p + (*p == ' ' && p + 1 < end);
    int         bytes;
    letter_kind kind;
    if (stop > p) return stop;
    kind = kind_at(begin, end, &bytes);
    return kind != SPACE ? run_end(begin, end, kind) : spaces_end(p, end);
}

static int is_line_end(char c) { return c == '\r' || c == '\n'; }

/* The end of the last line break in the spaces at p, or p. */
static const char *lines_end(const char *p, const char *end) {
    const char *stop = run_end(p, end, SPACE);
    while (stop > p && !is_line_end(stop[-1])) stop--;
    return stop;
}

/* The same, as GPT-4 cuts: endings; letters with an optional sign or space before them; up to `digits`
 * digits; signs with an optional space before and line breaks behind them; or spaces. */
static const char *gpt4_word_end(const char *p, const char *end, int digits) {
    const char *stop = ending_end(p, end, 1), *begin;
    int         bytes;
    letter_kind kind = kind_at(p, end, &bytes);
    if (stop > p) return stop;
    begin = p + (kind != LETTER && kind != DIGIT && !is_line_end(*p) ? bytes : 0);
    stop = run_end(begin, end, LETTER);
    if (stop > begin) return stop;
    if (kind == DIGIT) {
        for (stop = p; digits-- > 0 && stop < end && kind_at(stop, end, &bytes) == DIGIT;) stop += bytes;
        return stop;
    }
    begin = p + (*p == ' ');
    stop = run_end(begin, end, OTHER);
    if (stop > begin) {
        while (stop < end && is_line_end(*stop)) stop++;
        return stop;
    }
    stop = lines_end(p, end);
    return stop > p ? stop : spaces_end(p, end);
}

/* The end of the piece at p: one digit (`alone`), a run of digits, or the text up to the next digit. */
static const char *digits_end(const char *p, const char *end, int alone) {
    int bytes, is_digit = kind_at(p, end, &bytes) == DIGIT;
    if (is_digit && alone) return p + bytes;
    while (p < end && (kind_at(p, end, &bytes) == DIGIT) == is_digit) p += bytes;
    return p;
}

static const char *piece_end(cut_kind kind, const char *p, const char *end) {
    switch (kind) {
    case CUT_GPT2: return gpt2_word_end(p, end);
    case CUT_GPT4: return gpt4_word_end(p, end, 3);
    case CUT_GPT4_1: return gpt4_word_end(p, end, 1);
    case CUT_DIGITS: return digits_end(p, end, 1);
    case CUT_DIGIT_RUNS: return digits_end(p, end, 0);
    case CUT_NOT: break;
    }
    return end;
}

/* ==== A text as tokens ============================================================== */

/* A token of a word that is being merged; ends are -1. */
typedef struct bpe_link { int32_t id, before, after; } bpe_link;
typedef struct bpe_candidate { int32_t rank, at, left, right, made; } bpe_candidate;

/* The tokens of a text, and memory for its words. */
typedef struct encoder {
    tokenizer     *t;
    int32_t       *ids;
    int64_t        n, room;
    bpe_link      *links;
    bpe_candidate *heap;
    size_t         heap_n, word_room;
    const char    *text;                /* where the text begins */
    char          *spaced, *normal;     /* a piece with a space before it; a normalized piece */
    size_t         spaced_room, normal_room;
} encoder;

/* Makes room for n elements in an array. */
static void *encoder_room(void *array, size_t *room, size_t n, size_t size) {
    if (n <= *room) return array;
    *room = n > 2 * *room ? n : 2 * *room;
    array = realloc(array, *room * size);
    if (!array) die(1, "out of memory for the tokens of a text");
    return array;
}

static void put_token(encoder *e, int32_t id) {
    size_t room = (size_t)e->room;
    e->ids = (int32_t *)encoder_room(e->ids, &room, (size_t)e->n + 1, sizeof *e->ids);
    e->room = (int64_t)room;
    e->ids[e->n++] = id;
}

static int comes_before(const bpe_candidate *a, const bpe_candidate *b)
{ return a->rank != b->rank ? a->rank < b->rank : a->at < b->at; }

/* Puts the merge of the token `at` with the next one into the heap, if there is such a merge. */
static void push_candidate(encoder *e, int32_t at) {
    int32_t          next = at < 0 ? -1 : e->links[at].after;
    const bpe_merge *m = next < 0 ? NULL : merge_of(e->t, e->links[at].id, e->links[next].id);
    bpe_candidate    c;
    size_t           i = e->heap_n;
    if (!m) return;
    c.rank = m->rank;
    c.at = at;
    c.left = m->left;
    c.right = m->right;
    c.made = m->made;
    e->heap_n++;
    for (; i > 0 && comes_before(&c, &e->heap[(i - 1) / 2]); i = (i - 1) / 2) e->heap[i] = e->heap[(i - 1) / 2];
    e->heap[i] = c;
}

static bpe_candidate pop_candidate(encoder *e) {
    bpe_candidate first = e->heap[0], last = e->heap[--e->heap_n];
    size_t        i = 0;
    for (;;) {
        size_t child = 2 * i + 1;
        if (child >= e->heap_n) break;
        if (child + 1 < e->heap_n && comes_before(&e->heap[child + 1], &e->heap[child])) child++;
        if (!comes_before(&e->heap[child], &last)) break;
        e->heap[i] = e->heap[child];
        i = child;
    }
    if (e->heap_n) e->heap[i] = last;
    return first;
}

/* Applies the merges of a word of n tokens in e->links, highest priority first. */
static void merge_links(encoder *e, int32_t n) {
    e->heap_n = 0;
    for (int32_t i = 0; i + 1 < n; i++) push_candidate(e, i);
    while (e->heap_n) {
        bpe_candidate c = pop_candidate(e);
        bpe_link     *left = &e->links[c.at];
        int32_t       next = left->after;
        if (left->id != c.left || next < 0 || e->links[next].id != c.right) continue;     /* merged since */
        left->id = c.made;
        left->after = e->links[next].after;
        if (left->after >= 0) e->links[left->after].before = c.at;
        e->links[next].id = -1;
        push_candidate(e, left->before);
        push_candidate(e, c.at);
    }
}

/* The first tokens of a word: of its bytes; of pieces, of its characters. Returns their number. */
static size_t first_tokens(encoder *e, const char *word, const char *end) {
    tokenizer *t = e->t;
    size_t     n = 0;
    while (word < end) {
        int     length = 1;
        int32_t piece = -1;
        if (t->has_pieces) {
            utf8_letter(word, end, &length);
            piece = token_of(t, word, length);
        }
        for (int k = 0; k < (piece < 0 ? length : 1); k++, n++) {
            e->links[n].id = piece < 0 ? t->of_byte[(unsigned char)word[k]] : piece;
            if (e->links[n].id < 0) die(1, "%s has no token for the byte 0x%02x", t->path, (unsigned char)word[k]);
        }
        word += length;
    }
    return n;
}

static void encode_word(encoder *e, const char *word, const char *end) {
    tokenizer *t = e->t;
    size_t     n = (size_t)(end - word), heap_room = 3 * e->word_room;
    int32_t    whole = t->ignore_merges && n < TOKEN_SPACE ? token_of(t, word, (int)n) : -1;
    if (whole >= 0) { put_token(e, whole); return; }
    if (n >= (size_t)1 << 30) die(1, "a word of the text is longer than %d bytes", 1 << 30);
    e->heap = (bpe_candidate *)encoder_room(e->heap, &heap_room, 3 * n, sizeof *e->heap);
    e->links = (bpe_link *)encoder_room(e->links, &e->word_room, n, sizeof *e->links);
    n = first_tokens(e, word, end);
    for (size_t i = 0; i < n; i++) {
        e->links[i].before = (int32_t)i - 1;
        e->links[i].after = i + 1 < n ? (int32_t)i + 1 : -1;
    }
    merge_links(e, (int32_t)n);
    for (int32_t i = n ? 0 : -1; i >= 0; i = e->links[i].after) put_token(e, e->links[i].id);
}

/* Cuts a piece by the stages from `stage` on. */
static void encode_piece(encoder *e, int stage, const char *p, const char *end) {
    const cut_stage *cut = &e->t->cuts[stage];
    if (stage == e->t->n_cuts) { encode_word(e, p, end); return; }
    if (cut->prefix && p < end && *p != ' ') {
        e->spaced = (char *)encoder_room(e->spaced, &e->spaced_room, (size_t)(end - p) + 1, 1);
        e->spaced[0] = ' ';
        memcpy(e->spaced + 1, p, (size_t)(end - p));
        end = e->spaced + (end - p) + 1;
        p = e->spaced;
    }
    while (p < end) {
        const char *stop = piece_end(cut->kind, p, end);
        encode_piece(e, stage + 1, p, stop);
        p = stop;
    }
}

/* A part of a text of pieces, with the space that belongs before it. */
static void encode_pieces(encoder *e, const char *begin, const char *end) {
    piece_space space = e->t->space;
    size_t      n = (size_t)(end - begin);
    int         wants;
    e->spaced = (char *)encoder_room(e->spaced, &e->spaced_room, n + 1, 1);
    n = bytes_of_piece(begin, n, e->spaced + 1);
    wants = space == SPACE_EACH || (space != SPACE_NEVER && e->spaced[1] != ' ' && (space == SPACE_MISSING || begin == e->text));
    e->spaced[0] = ' ';
    if (wants) n++;
    else memmove(e->spaced, e->spaced + 1, n);
    /* no merge joins a space to what stands before it, unless a piece has both */
    for (size_t at = 0, stop; at < n; at = stop) {
        for (stop = at + 1; stop < n && (e->t->crosses || e->spaced[stop] != ' ' || e->spaced[stop - 1] == ' ');) stop++;
        encode_word(e, e->spaced + at, e->spaced + stop);
    }
}

/* The longest added token at p, or NULL. */
static const added_token *added_at(const added_set *set, const char *p, const char *end) {
    const added_token *found = NULL;
    size_t             low = 0, high = set->count;
    for (int n = 0; p + n < end && low < high; n++) {
        unsigned char byte = (unsigned char)p[n];
        size_t        a = low, b = high;
        while (a < b) {         /* the first whose byte n is `byte` or higher; a shorter text is lower */
            size_t             middle = a + (b - a) / 2;
            const added_token *token = &set->all[middle];
            if (token->length <= n || (unsigned char)token->text[n] < byte) a = middle + 1;
            else b = middle;
        }
        low = b = a;
        while (b < high) {      /* the first whose byte n is higher */
            size_t middle = b + (high - b) / 2;
            if ((unsigned char)set->all[middle].text[n] <= byte) b = middle + 1;
            else high = middle;
        }
        if (low < high && set->all[low].length == n + 1) found = &set->all[low];
    }
    return found;
}

/* A tokenized text's part: [begin, end) without added tokens. */
static void encode_normal(encoder *e, const char *begin, const char *end) {
    if (e->t->has_pieces) encode_pieces(e, begin, end);
    else encode_piece(e, 0, begin, end);
}

static void encode_unnormalized(encoder *e, const char *begin, const char *end);

/* Finds the added tokens of a set, and calls `rest` for the text between them. */
static void encode_added(encoder *e, const added_set *set, const char *begin, const char *end,
                         void (*rest)(encoder *e, const char *begin, const char *end)) {
    const char *done = begin;
    int         bytes;
    for (const char *p = begin; p < end;) {
        const added_token *token = set->begins[(unsigned char)*p] ? added_at(set, p, end) : NULL;
        const char        *start = p, *stop;
        if (!token) { p++; continue; }
        p = stop = start + token->length;
        if (token->single_word && (ends_with_word(begin, start) || begins_with_word(stop, end))) continue;
        while (token->lstrip && start > done &&
               kind_at(character_before(begin, start), start, &bytes) == SPACE)
            start = character_before(begin, start);
        while (token->rstrip && stop < end && kind_at(stop, end, &bytes) == SPACE) stop += bytes;
        if (start > done) rest(e, done, start);
        put_token(e, token->id);
        done = stop;
    }
    if (end > done) rest(e, done, end);
}

static void encode_unnormalized(encoder *e, const char *begin, const char *end) {
    if (e->t->normalizer) {
        e->normal = (char *)encoder_room(e->normal, &e->normal_room, (size_t)(end - begin), 1);
        end = e->normal + normalize(e->t, begin, end - begin, e->normal);
        begin = e->normal;
    }
    encode_added(e, &e->t->normal, begin, end, encode_normal);
}

/* The tokens of a text of `size` bytes. *n: their number. The caller frees them. */
static int32_t *encode_text(tokenizer *t, const char *text, int64_t size, int64_t *n) {
    encoder e;
    memset(&e, 0, sizeof e);
    e.t = t;
    e.text = text;
    encode_added(&e, &t->raw, text, text + size, encode_unnormalized);
    free(e.links);
    free(e.heap);
    free(e.spaced);
    free(e.normal);
    *n = e.n;
    return e.ids;
}

#endif
