/* gguf_tokenizer.h - a tokenizer.json in the metadata of a GGUF file: a part of trainer.c and of
 * llama.c
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * The keys of the specification: tokenizer.ggml.tokens, .token_type, .merges, and .pre, the name
 * by which llama.cpp knows how a text is cut into words. tokenizer.huggingface.json holds the
 * whole file, for readers of that format.
 */
#ifndef TRAINER_GGUF_TOKENIZER_H
#define TRAINER_GGUF_TOKENIZER_H

#include "../gguf.h"
#include "words.h"

/* Types of tokens: of the model; unknown; special; added, but not special; a row of the table
 * without a token; a byte. */
enum { GGUF_NORMAL = 1, GGUF_UNKNOWN, GGUF_CONTROL, GGUF_USER_DEFINED, GGUF_UNUSED, GGUF_BYTE };

/* The name of a way to cut texts in llama.cpp, or NULL. */
static const char *gguf_pre(const tokenizer *t) {
    static const struct {
        const char *name;
        cut_kind    cuts[2];
        int         n;
    } known[] = {
        { "gpt-2", { CUT_GPT2, CUT_NOT }, 1 },
        { "smollm", { CUT_DIGITS, CUT_GPT2 }, 2 },
        { "llama-bpe", { CUT_GPT4, CUT_NOT }, 2 },
        { "qwen2", { CUT_GPT4_1, CUT_NOT }, 2 },
    };
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        int same = t->n_cuts == known[i].n;
        for (int k = 0; same && k < t->n_cuts; k++)
            same = t->cuts[k].kind == known[i].cuts[k] && !t->cuts[k].prefix;
        if (same) return known[i].name;
    }
    return NULL;
}

/* Puts the text of a token as the file has it: bytes as letters; of pieces, spaces as U+2581. */
static size_t gguf_letters(const tokenizer *t, int64_t id, char *to) {
    const bpe_token *token = &t->tokens[id];
    size_t           n = 0;
    if (t->has_pieces && t->of_byte[(unsigned char)token->bytes[0]] == id)
        return (size_t)snprintf(to, 8, "<0x%02X>", (unsigned char)token->bytes[0]);
    for (int i = 0; i < token->length; i++) {
        unsigned char byte = (unsigned char)token->bytes[i];
        if (!t->has_pieces) n += put_utf8(to + n, letter_of_byte(byte));
        else if (byte == ' ') n += put_utf8(to + n, 0x2581);
        else to[n++] = (char)byte;
    }
    return n;
}

/* The added token of a number, or NULL. */
static const added_token *added_of(const tokenizer *t, int64_t id) {
    const added_set *sets[2] = { &t->raw, &t->normal };
    for (int s = 0; s < 2; s++)
        for (size_t i = 0; i < sets[s]->count; i++)
            if (sets[s]->all[i].id == id) return &sets[s]->all[i];
    return NULL;
}

static uint32_t gguf_token_type(const tokenizer *t, int64_t id) {
    const added_token *added = added_of(t, id);
    if (added && t->has_pieces && added->length == 5 && memcmp(added->text, "<unk>", 5) == 0)
        return GGUF_UNKNOWN;
    if (added) return added->special ? GGUF_CONTROL : GGUF_USER_DEFINED;
    if (id >= t->count || !t->tokens[id].bytes) return GGUF_UNUSED;
    if (t->has_pieces && t->of_byte[(unsigned char)t->tokens[id].bytes[0]] == id) return GGUF_BYTE;
    return GGUF_NORMAL;
}

static void gguf_put_tokens(gguf_writer *w, const tokenizer *t, int64_t rows) {
    char text[4 * TOKEN_SPACE];
    gguf_put_list(w, "tokenizer.ggml.tokens", GGUF_TEXT, (uint64_t)rows);
    for (int64_t id = 0; id < rows; id++) {
        const bpe_token *token = id < t->count && t->tokens[id].bytes ? &t->tokens[id] : NULL;
        if (!token)
            gguf_text_n(w, text, (size_t)snprintf(text, sizeof text, "[PAD%lld]", (long long)id));
        else if (added_of(t, id)) gguf_text_n(w, token->bytes, (size_t)token->length);
        else gguf_text_n(w, text, gguf_letters(t, id, text));
    }
    gguf_put_list(w, "tokenizer.ggml.token_type", GGUF_I32, (uint64_t)rows);
    for (int64_t id = 0; id < rows; id++) gguf_u32(w, gguf_token_type(t, id));
}

static int by_rank(const void *a, const void *b) {
    bpe_merge x, y;
    memcpy(&x, a, sizeof x);
    memcpy(&y, b, sizeof y);
    return (x.rank > y.rank) - (x.rank < y.rank);
}

/* "left right", the first merge first. */
static void gguf_put_merges(gguf_writer *w, const tokenizer *t) {
    int64_t    n = t->first_merge[t->count];
    bpe_merge *merges = (bpe_merge *)tokenizer_memory((size_t)n, sizeof *merges);
    char       text[5 * TOKEN_SPACE];
    memcpy(merges, t->merges, (size_t)n * sizeof *merges);
    qsort(merges, (size_t)n, sizeof *merges, by_rank);
    gguf_put_list(w, "tokenizer.ggml.merges", GGUF_TEXT, (uint64_t)n);
    for (int64_t i = 0; i < n; i++) {
        size_t length = gguf_letters(t, merges[i].left, text);
        text[length++] = ' ';
        length += gguf_letters(t, merges[i].right, text + length);
        gguf_text_n(w, text, length);
    }
    free(merges);
}

/* Of pieces: llama.cpp joins the two whose sum has the highest score: that of the earliest merge. */
static void gguf_put_scores(gguf_writer *w, const tokenizer *t, int64_t rows) {
    float *scores = (float *)tokenizer_memory((size_t)rows, sizeof *scores);
    for (int64_t i = 0, n = t->first_merge[t->count]; i < n; i++) {
        float *score = &scores[t->merges[i].made];
        if (*score == 0 || *score < -1 - (float)t->merges[i].rank)
            *score = -1 - (float)t->merges[i].rank;
    }
    gguf_put_list(w, "tokenizer.ggml.scores", GGUF_FLOAT, (uint64_t)rows);
    gguf_bytes(w, scores, (size_t)rows * sizeof *scores);
    free(scores);
}

/* What llama.cpp must know to cut texts as the tokenizer does. */
static void gguf_put_cuts(gguf_writer *w, tokenizer *t, int64_t rows) {
    const char *pre = gguf_pre(t);
    gguf_put_text(w, "tokenizer.ggml.model", t->has_pieces ? "llama" : "gpt2");
    if (t->has_pieces) {
        if (t->space == SPACE_FIRST)
            tokenizer_warns(t, 64,
                            "llama.cpp puts the first space of a text behind special tokens too");
        gguf_put_text(w, "tokenizer.ggml.pre", "default");
        gguf_put_bool(w, "tokenizer.ggml.add_space_prefix", t->space != SPACE_NEVER);
        gguf_put_scores(w, t, rows);
        return;
    }
    if (!pre)
        die(1,
            "%s: its pre_tokenizer is not that of GPT-2, SmolLM, Llama 3 or Qwen 2, and GGUF has "
            "no name for another",
            t->path);
    gguf_put_text(w, "tokenizer.ggml.pre", pre);
    gguf_put_merges(w, t);
}

/* Puts the tokenizer of a model whose table of tokens has `rows` rows; json: the text of its
 * file. bos, eos: numbers of tokens, or -1. Dies if the tokenizer has more tokens than rows. */
static void gguf_put_tokenizer(gguf_writer *w, tokenizer *t, const char *json, int64_t rows,
                               int64_t bos, int64_t eos) {
    if (t->count > rows)
        die(1,
            "%s has %lld tokens, and the model has rows for %lld, while GGUF needs a row for each "
            "token: use the tokenizer of the model, or train one with --vocab %lld",
            t->path, (long long)t->count, (long long)rows, (long long)t->count);
    gguf_put_cuts(w, t, rows);
    gguf_put_tokens(w, t, rows);
    if (bos < 0) bos = t->begin;
    if (bos >= 0) gguf_put_u32(w, "tokenizer.ggml.bos_token_id", (uint32_t)bos);
    if (eos >= 0) gguf_put_u32(w, "tokenizer.ggml.eos_token_id", (uint32_t)eos);
    gguf_put_bool(w, "tokenizer.ggml.add_bos_token", t->begin >= 0);
    gguf_put_text(w, "tokenizer.huggingface.json", json);
}

#endif
