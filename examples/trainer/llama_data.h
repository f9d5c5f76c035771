/* llama_data.h - the rows of a step, from a text or from chats: a part of llama.c
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * A text becomes pieces of --block tokens, in which each token counts in the loss. A chat becomes
 * one row, in which the assistant's words and the token that ends them count. Each part of a chat
 * is cut into tokens for itself.
 */
#ifndef TRAINER_LLAMA_DATA_H
#define TRAINER_LLAMA_DATA_H

#include "words.h"

/* x: n tokens; y: the token after each of them, or MIXP_IGNORE where it does not count. */
typedef struct row {
    int32_t *x, *y;
    int64_t  n;
} row;

/* How chats are written: before a role, behind it, and behind its words; `end` ends the words and
 * counts. */
typedef struct chat_style {
    const char *name, *token, *before, *behind, *end, *gap;
} chat_style;
static const chat_style chat_styles[] = {
    { "chatml", "<|im_start|>", "<|im_start|>", "\n", "<|im_end|>", "\n" },
    { "llama3", "<|start_header_id|>", "<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>",
      "" },
    { "zephyr", "</s>", "<|", "|>\n", "</s>", "\n" },
};
enum { CHAT_STYLES = sizeof chat_styles / sizeof chat_styles[0] };

static struct data {
    tokenizer        *words;
    char             *json; /* the text of its file */
    const chat_style *chat; /* NULL: a text */
    row              *rows;
    int64_t           n, counted, cut,
        empty;    /* tokens that count; rows that were cut; chats without a token that counts */
    int32_t *ids; /* the row that is being made: its tokens and whether they count */
    char    *counts;
    int64_t  length, room;
} data;

static void *rows_memory(void *old, size_t count, size_t size) {
    void *memory = realloc(old, (count ? count : 1) * size);
    if (!memory) die(1, "out of memory for the data");
    return memory;
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
        "zephyr, or give a text as --data",
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

/* Puts one message of a chat; its words count if `counts` is 1. words NULL: only what stands
 * before them. */
static void put_message(const char *role, const char *words, int64_t size, int counts) {
    const chat_style *s = data.chat;
    char              head[256];
    snprintf(head, sizeof head, "%s%s%s", s->before, role, s->behind);
    put_text(head, (int64_t)strlen(head), 0);
    if (!words) return;
    put_text(words, size, counts);
    put_text(s->end, (int64_t)strlen(s->end), counts);
    put_text(s->gap, (int64_t)strlen(s->gap), 0);
}

/* One line of the file: {"messages": [{"role": text, "content": text}, ...]}. */
static void read_chat(const char *path, int64_t line, const char *text, int64_t size,
                      int64_t block) {
    const char *wrong, *root = json_check(text, size, &wrong), *list = json_find(root, "messages");
    if (!root) die(1, "%s, line %lld: malformed at \"%.30s\"", path, (long long)line, wrong);
    if (!list || *list != '[')
        die(1, "%s, line %lld: there is no list \"messages\"", path, (long long)line);
    begin_row();
    for (const char *p = json_first(list); p; p = json_next(p)) {
        char    role[64], *words = (char *)rows_memory(NULL, (size_t)size + 6, 1);
        int64_t n = json_string(json_find(p, "content"), words, (size_t)size + 6);
        if (json_string(json_find(p, "role"), role, sizeof role) < 1 || n < 0)
            die(1, "%s, line %lld: a message needs a \"role\" and a \"content\", both texts", path,
                (long long)line);
        put_message(role, words, n, strcmp(role, "assistant") == 0);
        free(words);
    }
    data.cut += data.length - 1 > block;
    if (data.length > 1) end_row(0, data.length - 1 < block ? data.length - 1 : block);
}

static void read_chats(const char *path, char *text, int64_t block) {
    int64_t line = 1;
    for (char *p = text, *end; *p; p = end + 1, line++) {
        end = p + strcspn(p, "\n");
        if (!*end) end[1] = '\0'; /* read_rows made room */
        *end = '\0';
        if (*json_space(p)) read_chat(path, line, p, end - p, block);
    }
}

/* Reads --data. style: of chats; block: tokens of a row at most. */
static void read_rows(const char *path, const char *style, int64_t block) {
    int64_t size = 0;
    size_t  length = strlen(path);
    char   *text = read_file(path, (int64_t)1 << 30, &size);
    if (!text) die(1, "cannot read %s: %s. Check --data", path, plain_error());
    text = (char *)rows_memory(text, (size_t)size + 2, 1);
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
    if (data.empty)
        warn("%s: %lld chats have no token that counts, and were left out", path,
             (long long)data.empty);
}

#endif
