/* gguf_words.h - a tokenizer.json from the metadata of a GGUF file: a part of llama.c
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * The file itself, where the metadata hold it; otherwise one that is made of their tokens and
 * merges.
 */
#ifndef TRAINER_GGUF_WORDS_H
#define TRAINER_GGUF_WORDS_H

#include "gguf_tokenizer.h"

/* A text that grows. */
typedef struct gguf_json {
    char  *text;
    size_t n, room;
} gguf_json;

static void json_bytes(gguf_json *j, const char *bytes, size_t n) {
    if (j->n + n + 1 > j->room) {
        j->room = 2 * (j->n + n + 1);
        j->text = (char *)realloc(j->text, j->room);
        if (!j->text) die(1, "out of memory for a tokenizer");
    }
    memcpy(j->text + j->n, bytes, n);
    j->n += n;
    j->text[j->n] = '\0';
}

static void json_put(gguf_json *j, const char *text) { json_bytes(j, text, strlen(text)); }

/* A string of n bytes, in quotes. */
static void json_quoted(gguf_json *j, const char *text, size_t n) {
    char escape[8];
    json_put(j, "\"");
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)text[i];
        int           escapes = c < 32 || c == '"' || c == '\\';
        if (escapes) json_bytes(j, escape, (size_t)snprintf(escape, sizeof escape, "\\u%04x", c));
        else json_bytes(j, text + i, 1);
    }
    json_put(j, "\"");
}

/* The next text of a list of texts. */
static const char *gguf_next_text(const unsigned char **at, size_t *n) {
    uint64_t    length;
    const char *text = (const char *)*at + 8;
    memcpy(&length, *at, 8);
    *n = (size_t)length;
    *at += 8 + length;
    return text;
}

/* Appends ,"added_tokens":[...], or ,"vocab":{...} of all tokens of a list. */
static void json_tokens(gguf_json *j, const gguf_pair *tokens, const gguf_pair *types, int added) {
    const unsigned char *at = tokens->value;
    char                 number[64];
    int                  any = 0;
    json_put(j, added ? ", \"added_tokens\": [" : ", \"vocab\": {");
    for (uint64_t id = 0; id < tokens->count; id++) {
        uint32_t    type;
        size_t      n;
        const char *text = gguf_next_text(&at, &n);
        memcpy(&type, types->value + 4 * id, 4);
        if (type == GGUF_UNUSED || added != (type == GGUF_CONTROL || type == GGUF_USER_DEFINED))
            continue;
        if (any++) json_put(j, ", ");
        if (added) json_put(j, "{\"content\": ");
        json_quoted(j, text, n);
        snprintf(number, sizeof number, added ? ", \"special\": %s, \"id\": %lld}" : ": %s%lld",
                 !added                 ? ""
                 : type == GGUF_CONTROL ? "true"
                                        : "false",
                 (long long)id);
        json_put(j, number);
    }
    json_put(j, added ? "]" : "}");
}

/* The pre_tokenizer of a name of llama.cpp, with the flag that belongs to its model; NULL:
 * unknown. */
static const char *json_of_pre(const gguf *g) {
#define SPLIT(digits, last)                                                                                 \
  "{\"type\": \"Sequence\", \"pretokenizers\": [{\"type\": \"Split\", \"behavior\": \"Isolated\", "         \
  "\"pattern\": {\"Regex\": \"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\\\r\\\\n\\\\p{L}\\\\p{N}]?\\\\p{L}+|" digits \
  "| ?[^\\\\s\\\\p{L}\\\\p{N}]+[\\\\r\\\\n]*|\\\\s*[\\\\r\\\\n]+|\\\\s+(?!\\\\S)|\\\\s+\"}}, "              \
  "{\"type\": \"ByteLevel\", \"add_prefix_space\": false, \"use_regex\": false}]}" last
#define BYTES "{\"type\": \"ByteLevel\", \"add_prefix_space\": false}"
    static const char *const known[][2] = {
        { "gpt-2", BYTES },
        { "smollm", "{\"type\": \"Sequence\", \"pretokenizers\": "
                    "[{\"type\": \"Digits\", \"individual_digits\": true}, " BYTES "]}" },
        { "llama-bpe", SPLIT("\\\\p{N}{1,3}", "") },
        { "qwen2", SPLIT("\\\\p{N}", "") },
    };
#undef SPLIT
#undef BYTES
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++)
        if (gguf_text_is(g, "tokenizer.ggml.pre", known[i][0])) return known[i][1];
    return NULL;
}

/* The token before each text: of add_bos_token, which llama.cpp takes as true for Llama 3's way to cut texts. */
static void json_first_token(gguf_json *j, const gguf *g, const gguf_pair *tokens) {
    const unsigned char *at = tokens->value;
    double               bos = gguf_number(g, "tokenizer.ggml.bos_token_id", -1);
    const char          *text = NULL;
    char                 ids[64];
    size_t               n = 0;
    if (gguf_number(g, "tokenizer.ggml.add_bos_token", gguf_text_is(g, "tokenizer.ggml.pre", "llama-bpe")) == 0) return;
    if (bos < 0 || bos >= (double)tokens->count) return;
    for (double i = 0; i <= bos; i++) text = gguf_next_text(&at, &n);
    json_put(j, ", \"post_processor\": {\"type\": \"TemplateProcessing\", \"single\": [{\"SpecialToken\": {\"id\": ");
    json_quoted(j, text, n);
    json_put(j, "}}], \"special_tokens\": {");
    json_quoted(j, text, n);
    snprintf(ids, sizeof ids, ": {\"ids\": [%.0f]}}}", bos);
    json_put(j, ids);
}

/* A tokenizer.json of the metadata: the file itself, or one made of tokens and merges. NULL: the
 * file has no tokenizer that this reader knows. The caller frees it. */
static char *gguf_tokenizer_json(const gguf *g) {
    const gguf_pair     *tokens = gguf_pair_of(g, "tokenizer.ggml.tokens");
    const gguf_pair     *types = gguf_pair_of(g, "tokenizer.ggml.token_type");
    const gguf_pair     *merges = gguf_pair_of(g, "tokenizer.ggml.merges");
    const char          *pre = json_of_pre(g);
    size_t               n;
    const char          *whole = gguf_text(g, "tokenizer.huggingface.json", &n);
    const unsigned char *at;
    gguf_json            j = { NULL, 0, 0 };
    if (whole) {
        json_bytes(&j, whole, n);
        return j.text;
    }
    if (!pre || !tokens || tokens->of != GGUF_TEXT || !types || types->of != GGUF_I32 ||
        types->count != tokens->count || !merges || merges->of != GGUF_TEXT)
        return NULL;
    json_put(&j, "{\"pre_tokenizer\": ");
    json_put(&j, pre);
    json_tokens(&j, tokens, types, 1);
    json_first_token(&j, g, tokens);
    json_put(&j, ", \"model\": {\"type\": \"BPE\", \"ignore_merges\": ");
    json_put(&j, gguf_text_is(g, "tokenizer.ggml.pre", "llama-bpe") ? "true" : "false");
    json_tokens(&j, tokens, types, 0);
    json_put(&j, ", \"merges\": [");
    at = merges->value;
    for (uint64_t i = 0; i < merges->count; i++) {
        const char *text = gguf_next_text(&at, &n);
        if (i) json_put(&j, ", ");
        json_quoted(&j, text, n);
    }
    json_put(&j, "]}}");
    return j.text;
}

#endif
