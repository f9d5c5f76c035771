/* llama_data.h - the rows of a step, from a text or from chats: a part of llama.c
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * A text becomes pieces of --block tokens, in which each token counts in the loss. A chat becomes
 * one row, in which the assistant's words and the token that ends them count. Each part of a chat
 * is cut into tokens for itself.
 */
#ifndef TRAINER_LLAMA_DATA_H
#define TRAINER_LLAMA_DATA_H

#include "known_keys.h"
#include "words.h"

/* x: n tokens; y: the token after each of them, or MIXP_IGNORE where it does not count. */
typedef struct row {
    int32_t *x, *y;
    int64_t  n;
} row;

/* How chats are written: before a role, behind it, and behind its words; `end` ends the words and
 * counts. sign: what templates of this style hold. trims: spaces around the words are left out. */
typedef struct chat_style {
    const char *name, *token, *before, *behind, *end, *gap, *sign;
    int         trims;
} chat_style;
static const chat_style chat_styles[] = {
    { "chatml", "<|im_start|>", "<|im_start|>", "\n", "<|im_end|>", "\n", "<|im_start|>", 0 },
    { "llama3", "<|start_header_id|>", "<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>",
      "", "<|start_header_id|>", 1 },
    { "zephyr", "</s>", "<|", "|>\n", "</s>", "\n", "<|user|>", 0 },
};
enum { CHAT_STYLES = sizeof chat_styles / sizeof chat_styles[0] };

static struct data {
    tokenizer        *words;
    char             *json; /* the text of its file */
    const chat_style *chat; /* NULL: a text */
    row              *rows;
    int64_t           n, counted, cut,
        empty,    /* tokens that count; rows that were cut; chats without a token that counts */
        controls; /* messages with control tokens in their words */
    int32_t *ids; /* the row that is being made: its tokens and whether they count */
    char    *counts;
    int64_t  length, room;
    int      told; /* 1: a key that is not used has been named */
} data;

static void *rows_memory(void *old, size_t count, size_t size) {
    void *memory = realloc(old, (count ? count : 1) * size);
    if (!memory) die(1, "out of memory for the data");
    return memory;
}

/* Is it a special token of the tokenizer, which a text rarely means as words? */
static int is_control(int32_t id) {
    static char *special;
    if (!special) {
        const added_set *sets[2] = { &data.words->raw, &data.words->normal };
        special = (char *)rows_memory(NULL, (size_t)data.words->count, 1);
        memset(special, 0, (size_t)data.words->count);
        for (int s = 0; s < 2; s++)
            for (size_t i = 0; i < sets[s]->count; i++) special[sets[s]->all[i].id] = (char)sets[s]->all[i].special;
    }
    return special[id];
}

/* Is the text one added token of the tokenizer? */
static int has_added(const tokenizer *t, const char *text) {
    const added_set *sets[2] = { &t->raw, &t->normal };
    for (int s = 0; s < 2; s++)
        for (size_t i = 0; i < sets[s]->count; i++) {
            const added_token *a = &sets[s]->all[i];
            if ((size_t)a->length == strlen(text) && memcmp(a->text, text, strlen(text)) == 0)
                return 1;
        }
    return 0;
}

/* The style of this name; "auto": the first whose token the tokenizer has. */
static const chat_style *choose_style(const tokenizer *t, const char *name) {
    for (int i = 0; i < CHAT_STYLES; i++) {
        const chat_style *s = &chat_styles[i];
        if (strcmp(name, "auto") == 0 ? has_added(t, s->token) : strcmp(name, s->name) == 0)
            return s;
    }
    if (strcmp(name, "auto") != 0)
        die(2, "--chat is %s: choose auto, chatml, llama3 or zephyr", name);
    die(1,
        "%s has no token of chats (<|im_start|>, <|start_header_id|> or </s>): choose --chat chatml, llama3 or "
        "zephyr, or pass a text as --data",
        t->path);
    return NULL;
}

/* Appends the tokens of a text to the row that is being made. */
static void put_text(const char *text, int64_t size, int counts) {
    int64_t  n;
    int32_t *ids = encode_text(data.words, text, size, &n);
    if (data.length + n + 1 > data.room) data.room = 2 * (data.length + n + 1);
    data.ids = (int32_t *)rows_memory(data.ids, (size_t)data.room, sizeof *data.ids);
    data.counts = (char *)rows_memory(data.counts, (size_t)data.room, 1);
    if (n) memcpy(data.ids + data.length, ids, (size_t)n * sizeof *ids);
    memset(data.counts + data.length, counts, (size_t)n);
    data.length += n;
    free(ids);
}

static void begin_row(void) {
    data.length = 0;
    put_text("", 0, 0);
    if (data.words->begin < 0) return;
    data.ids[0] = data.words->begin;
    data.counts[0] = 0;
    data.length = 1;
}

/* A row of the tokens [from, from + n] of those that were put, if one of them counts. */
static void end_row(int64_t from, int64_t n) {
    row     r = { NULL, NULL, n };
    int64_t counted = 0;
    for (int64_t i = 0; i < n; i++) counted += data.counts[from + i + 1];
    if (!counted) {
        data.empty++;
        return;
    }
    r.x = (int32_t *)rows_memory(NULL, 2 * (size_t)n, sizeof *r.x);
    r.y = r.x + n;
    for (int64_t i = 0; i < n; i++) {
        r.x[i] = data.ids[from + i];
        r.y[i] = data.counts[from + i + 1] ? data.ids[from + i + 1] : MIXP_IGNORE;
    }
    if ((data.n & (data.n - 1)) == 0)
        data.rows =
            (row *)rows_memory(data.rows, (size_t)(data.n ? 2 * data.n : 1), sizeof *data.rows);
    data.rows[data.n++] = r;
    data.counted += counted;
}

/* The spaces that Python's strip and Jinja's trim take away. */
static int is_trimmed(const char *p, const char *end, int *bytes) {
    unsigned long c = utf8_letter(p, end, bytes);
    return (c >= 0x1C && c <= 0x1F) || IS_IN(space_ranges, c);
}

static void trim(const char **words, int64_t *size) {
    const char *end = *words + *size;
    int         n;
    while (*words < end && is_trimmed(*words, end, &n)) *words += n;
    while (end > *words && is_trimmed(character_before(*words, end), end, &n)) end -= n;
    *size = end - *words;
}

/* Puts one message of a chat; its words count if `counts` is 1. words NULL: only what stands
 * before them. */
static void put_message(const char *role, const char *words, int64_t size, int counts) {
    const chat_style *s = data.chat;
    char              head[256];
    int64_t           from, special = 0;
    snprintf(head, sizeof head, "%s%s%s", s->before, role, s->behind);
    put_text(head, (int64_t)strlen(head), 0);
    if (!words) return;
    if (s->trims) trim(&words, &size);
    from = data.length;
    put_text(words, size, counts);
    for (int64_t i = from; i < data.length; i++) special += is_control(data.ids[i]);
    data.controls += special > 0;
    put_text(s->end, (int64_t)strlen(s->end), counts);
    put_text(s->gap, (int64_t)strlen(s->gap), 0);
}

/* Keys that say what is learnt, and that this program does not follow; and keys of data sets that say nothing of it. */
#define CHAT_REFUSED                                                                                       \
    "tools functions function_call tool_choice tool_calls tool_call_id tool_responses documents system "   \
    "weight train loss mask train_detail chat_template* reasoning* thinking refusal audio image images "   \
    "videos audios prefix"
#define CHAT_HARMLESS                                                                                      \
    "messages role content name id message_id parent_id prompt_id conversation_id prompt source "     \
    "category topic model language lang timestamp date created_at score rating turn index split dataset hash"

/* Refuses or names what a chat or a message says and this program leaves out. own: keys that the caller reads. */
static void check_chat_keys(const char *path, int64_t line, const char *object, const char *own) {
    for (const char *key = json_first(object), *value; key; key = json_next(value)) {
        char name[64];
        value = json_of_key(key);
        if (json_string(key, name, sizeof name) < 0) strcpy(name, "a key of more than 60 bytes");
        if (is_in_list(name, strlen(name), own) || is_unset(name, value)) continue;
        if (is_in_list(name, strlen(name), CHAT_REFUSED))
            die(1,
                "%s, line %lld: \"%s\" changes what is learnt, and this program would leave it out: remove the chat, or "
                "write it as content",
                path, (long long)line, name);
        if (data.told || is_in_list(name, strlen(name), CHAT_HARMLESS)) continue;
        data.told = 1;
        warn("%s, line %lld: the key \"%s\" is not used; further unknown keys are not named", path, (long long)line, name);
    }
}

/* Do the words of a message count? Of the assistant, unless "weight": 0, "train": false or "loss": false exclude them;
 * "train": true includes others. */
static int message_counts(const char *path, int64_t line, const char *message, const char *role) {
    static const char *const flags[] = { "train", "loss" };
    const char              *value = json_find(message, "weight");
    int                      counts = strcmp(role, "assistant") == 0;
    if (value && (*value < '0' || *value > '9' || (atof(value) != 0 && atof(value) != 1)))
        die(1, "%s, line %lld: the weight of a message is %.20s: this program has 0 and 1", path, (long long)line, value);
    for (int i = 0; i < 2; i++) {
        const char *flag = json_find(message, flags[i]);
        if (flag && *flag != 't' && *flag != 'f')
            die(1, "%s, line %lld: \"%s\" of a message must be true or false", path, (long long)line, flags[i]);
        if (flag) counts = *flag == 't';
    }
    return counts && !(value && atof(value) == 0);
}

/* One line of the file: {"messages": [{"role": text, "content": text}, ...]}. */
static void read_chat(const char *path, int64_t line, const char *text, int64_t size,
                      int64_t block) {
    const char *wrong, *root = json_check(text, size, &wrong), *list = json_find(root, "messages");
    if (!root) die(1, "%s, line %lld: malformed at \"%.30s\"", path, (long long)line, wrong);
    if (!list || *list != '[')
        die(1, "%s, line %lld: there is no list \"messages\"", path, (long long)line);
    check_chat_keys(path, line, root, "");
    begin_row();
    for (const char *p = json_first(list); p; p = json_next(p)) {
        char        role[64], *words = (char *)rows_memory(NULL, (size_t)size + 6, 1);
        const char *content;
        int64_t     n;
        if (*p == '{') check_chat_keys(path, line, p, "weight train loss");
        content = json_find(p, "content");
        n = json_string(content, words, (size_t)size + 6);
        if (n < 0 && content && *content == '"')
            die(1, "%s, line %lld: a content holds \\u0000, which no tokenizer has: remove it", path, (long long)line);
        if (json_string(json_find(p, "role"), role, sizeof role) < 1 || n < 0)
            die(1, "%s, line %lld: a message needs a \"role\" and a \"content\", both texts", path,
                (long long)line);
        put_message(role, words, n, message_counts(path, line, p, role));
        free(words);
    }
    data.cut += data.length - 1 > block;
    if (data.length > 1) end_row(0, data.length - 1 < block ? data.length - 1 : block);
}

/* Does the text begin with a byte order mark, as Notepad and PowerShell write it? */
static int has_mark(const char *text) { return strncmp(text, "\xEF\xBB\xBF", 3) == 0; }

static void read_chats(const char *path, char *text, int64_t block) {
    int64_t line = 1;
    for (char *p = text, *end; *p; p = end + 1, line++) {
        end = p + strcspn(p, "\n");
        if (!*end) end[1] = '\0'; /* read_rows made room */
        *end = '\0';
        if (has_mark(p)) p += 3; /* of a file that was appended */
        if (*json_space(p)) read_chat(path, line, p, end - p, block);
    }
}

/* Leaves out a byte order mark, and refuses what is not UTF-8: transformers and peft would not read it either. */
static void check_utf8(const char *path, char *text, int64_t *size) {
    static const unsigned long least[5] = { 0, 0, 0x80, 0x800, 0x10000 }; /* of each length */
    const char                *end = text + *size;
    int                        n;
    if (has_mark(text)) {
        memmove(text, text + 3, (size_t)*size - 2);
        *size -= 3;
        end -= 3;
    }
    for (const char *p = text; p < end; p += n) {
        unsigned long c = utf8_letter(p, end, &n);
        if (n == 1 ? c > 127 : c < least[n] || c > 0x10FFFF || (c >= 0xD800 && c < 0xE000))
            die(1, "%s, line %lld: byte %lld, 0x%02x, is not UTF-8: write the file as UTF-8", path,
                (long long)json_line(text, p), (long long)(p - text) + 1, (unsigned char)*p);
    }
}

/* Reads --data. style: of chats; block: tokens of a row at most. */
static void read_rows(const char *path, const char *style, int64_t block) {
    int64_t size = 0;
    size_t  length = strlen(path);
    char   *text = read_file(path, (int64_t)1 << 30, &size);
    if (!text) die(1, "cannot read %s: %s. Check --data", path, plain_error());
    text = (char *)rows_memory(text, (size_t)size + 2, 1);
    check_utf8(path, text, &size);
    if (length > 6 && strcmp(path + length - 6, ".jsonl") == 0) {
        if ((int64_t)strlen(text) < size)
            die(1, "%s: byte %lld is 0, and JSON has none: write the file as UTF-8 without it",
                path, (long long)strlen(text) + 1);
        data.chat = choose_style(data.words, style);
        read_chats(path, text, block);
    } else {
        begin_row();
        put_text(text, size, 1);
        for (int64_t at = 0; at + 1 < data.length; at += block)
            end_row(at, data.length - 1 - at < block ? data.length - 1 - at : block);
    }
    free(text);
    if (!data.n)
        die(1,
            "%s has no token to train on: it needs a text of two tokens, or a chat in which the assistant speaks",
            path);
    if (data.cut)
        warn("%s: %lld of %lld chats are longer than --block %lld, and were cut", path,
             (long long)data.cut, (long long)(data.n + data.empty), (long long)block);
    if (data.controls)
        warn("%s: %lld messages have control tokens in their words, which become control tokens, as in transformers", path,
             (long long)data.controls);
    if (data.empty)
        warn("%s: %lld chats have no token that counts, and were left out", path,
             (long long)data.empty);
}

#endif
