/* known_keys.h - refuses the keys of other programs' files that are set and that no one here reads: a part of trainer.c
 * and of llama.c
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * A key that this program does not know may change what a model computes (sliding_window, a multiplier, a cap of
 * logits). So each reader lists the keys that it reads and those that are harmless. Any other key is refused, unless it
 * is unset: null, false, 0, empty, or a factor of 1.
 */
#ifndef TRAINER_KNOWN_KEYS_H
#define TRAINER_KNOWN_KEYS_H

#include "../gguf.h"
#include "json_file.h"

/* What Hugging Face's configurations of any model say without changing what the model computes. */
#define COMMON_CONFIG                                                                                        \
    "architectures model_type torch_dtype dtype transformers_version transformers.js_config use_cache "      \
    "bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id decoder_start_token_id tokenizer_* "   \
    "initializer_range output_attentions output_hidden_states return_dict return_dict_in_generate "          \
    "use_return_dict torchscript id2label label2id num_labels problem_type task_specific_params prefix "     \
    "finetuning_task max_length min_length max_new_tokens do_sample early_stopping num_beams "               \
    "num_beam_groups num_return_sequences temperature top_k top_p typical_p diversity_penalty "              \
    "repetition_penalty encoder_no_repeat_ngram_size length_penalty no_repeat_ngram_size bad_words_ids "     \
    "chunk_size_feed_forward gradient_checkpointing name_or_path _name_or_path _commit_hash "                \
    "_attn_implementation* attn_implementation use_flash_attention* _flash_attn_2_enabled unsloth_* "        \
    "is_llama_config model_max_length max_sequence_length max_seq_len* seq_length license base_model "

/* Is the name one of a list of words? A word that ends with * fits all names that begin so. */
static int is_in_list(const char *name, size_t n, const char *list) {
    for (const char *p = list, *end; *p; p = end + (*end == ' ')) {
        size_t length;
        end = p + strcspn(p, " ");
        length = (size_t)(end - p);
        if (length && p[length - 1] == '*' ? n >= length - 1 && strncmp(name, p, length - 1) == 0
                                           : n == length && strncmp(name, p, n) == 0)
            return 1;
    }
    return 0;
}

static int is_factor(const char *name) { return strstr(name, "multiplier") || strstr(name, "scal"); }

/* null, false, 0, "", [], {}, or a factor of 1. */
static int is_unset(const char *name, const char *value) {
    char text[64];
    if (*value == '[' || *value == '{') return !json_first(value);
    if (!json_text(value, text, sizeof text)) return 0;
    if (!*text || strcmp(text, "null") == 0 || strcmp(text, "false") == 0) return 1;
    return *value != '"' && *value != 't' && (atof(text) == 0 || (atof(text) == 1 && is_factor(name)));
}

/* Refuses an unknown key of an object. known, also: lists of words. */
static void check_keys(const char *path, const char *object, const char *known, const char *also) {
    for (const char *key = json_first(object), *value; key; key = json_next(value)) {
        char name[256], text[64] = "an object or a list";
        value = json_of_key(key);
        if (json_string(key, name, sizeof name) < 0) strcpy(name, "a key of more than 250 bytes");
        if (is_in_list(name, strlen(name), known) || is_in_list(name, strlen(name), also)) continue;
        if (is_unset(name, value)) continue;
        json_text(value, text, sizeof text);
        die(1,
            "%s: %s is %s, and this program does not know that key: it may change what the model computes. If it does "
            "not, remove the key from a copy of the file",
            path, name, text);
    }
}

/* The same for the metadata of a GGUF file: keys of the architecture, without its name and dot. Numbers must be
 * numbers. Keys of general., tokenizer. and of other programs do not change the model. */
static void check_gguf_keys(const char *path, const gguf *g, const char *architecture, const char *known) {
    size_t      n = strlen(architecture);
    double      parts = gguf_number(g, "split.count", 0);
    const char *type = gguf_pair_of(g, "general.type") ? "model" : NULL;
    if (type && !gguf_text_is(g, "general.type", type))
        die(1, "%s: its general.type is not model: pass the file of a complete model", path);
    if (parts > 1) die(1, "%s is one of %.0f parts: join them with llama-gguf-split --merge", path, parts);
    for (uint64_t i = 0; i < g->n_pairs; i++) {
        const gguf_pair *p = &g->pairs[i];
        const char      *name = p->key + n + 1;
        char             whole[128];
        int              is_known, is_number = p->kind != GGUF_TEXT && p->kind != GGUF_LIST;
        double           number;
        if (p->key_length <= n + 1 || strncmp(p->key, architecture, n) != 0 || p->key[n] != '.') continue;
        is_known = is_in_list(name, p->key_length - n - 1, known);
        snprintf(whole, sizeof whole, "%.*s", (int)p->key_length, p->key);
        if (is_known && !is_number && !strstr(whole, ".type"))
            die(1, "%s: its %s is not a number: this program reads models whose layers are alike", path, whole);
        number = is_number ? gguf_number(g, whole, 0) : p->count ? 1 : 0;
        if (is_known || number == 0 || (is_number && number == 1 && is_factor(whole))) continue;
        die(1, "%s: it has %s, and this program does not know that key: it may change what the model computes", path,
            whole);
    }
}

#endif
