/* llama_usage.h - how other programs use a model: its first and last tokens and its template of chats, as the files of
 * the model say them and as a training on chats changes them: a part of llama.c
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * Tokens are those of tokenizer_config.json; otherwise of generation_config.json; otherwise of config.json. A GGUF file
 * has them as keys. After a training on chats the token that ends an answer is among the last tokens, and the
 * template is the one that was trained.
 */
#ifndef TRAINER_LLAMA_USAGE_H
#define TRAINER_LLAMA_USAGE_H

#include "gguf_words.h"

enum { MOST_ENDS = 16 };
static struct usage {
    int64_t bos, eos, eot, pad; /* numbers of tokens, or -1 */
    int64_t ends[MOST_ENDS];    /* each of them ends an answer */
    int     n_ends;
    char   *chat_template; /* Jinja, or NULL */
} usage;

/* ==== Files that are copied ========================================================= */

enum { TOKENIZER_CONFIG, SPECIAL_TOKENS, GENERATION_CONFIG, CHAT_TEMPLATE, COPIED_FILES };
static const char *const copied_files[COPIED_FILES] = { "tokenizer_config.json", "special_tokens_map.json",
                                                        "generation_config.json", "chat_template.jinja" };
static char *copied_texts[COPIED_FILES]; /* NULL: the model has no such file */

/* Reads them before the training: a file that cannot be read must not cost a run. Returns the value of a JSON file,
 * or NULL. */
static const char *read_copied(const char *folder, int which) {
    char        path[PATH_SPACE];
    const char *root = NULL;
    struct stat info;
    snprintf(path, sizeof path, "%s/%s", folder, copied_files[which]);
    if (stat(path, &info) != 0) return NULL;
    if (which == CHAT_TEMPLATE) {
        int64_t size;
        copied_texts[which] = read_file(path, 1 << 24, &size);
        if (!copied_texts[which]) die(1, "cannot read %s: %s", path, plain_error());
    } else copied_texts[which] = read_json(path, 1 << 26, "", &root);
    return root && *root == '{' ? root : NULL;
}

/* The text of an object without a key, with one more pair, or with "". The caller frees it. */
static char *object_with(const char *object, const char *without, const char *pair) {
    gguf_json   j = { NULL, 0, 0 };
    const char *wrong;
    int         any = *pair != 0;
    json_put(&j, "{\n  ");
    json_put(&j, pair);
    for (const char *key = object ? json_first(object) : NULL, *value; key; key = json_next(value)) {
        char name[64];
        value = json_of_key(key);
        if (json_string(key, name, sizeof name) >= 0 && strcmp(name, without) == 0) continue;
        if (any++) json_put(&j, ",\n  ");
        json_bytes(&j, key, (size_t)(json_pass(value, &wrong) - key));
    }
    json_put(&j, "\n}\n");
    return j.text;
}

/* ==== Reading ======================================================================= */

/* The number of an added token, or -1. */
static int64_t number_of_added(const char *text) {
    const added_set *sets[2] = { &data.words->raw, &data.words->normal };
    for (int s = 0; s < 2; s++)
        for (size_t i = 0; i < sets[s]->count; i++) {
            const added_token *a = &sets[s]->all[i];
            if ((size_t)a->length == strlen(text) && memcmp(a->text, text, strlen(text)) == 0) return a->id;
        }
    return -1;
}

static void add_end(int64_t id) {
    for (int i = 0; i < usage.n_ends; i++)
        if (usage.ends[i] == id) return;
    if (id >= 0 && id < data.words->count && usage.n_ends < MOST_ENDS) usage.ends[usage.n_ends++] = id;
}

static int is_end(int64_t id) {
    for (int i = 0; i < usage.n_ends; i++)
        if (usage.ends[i] == id) return 1;
    return 0;
}

/* The numbers of a key: a number or a list. Returns the first, or -1. */
static int64_t add_ends(const char *value) {
    if (!value || *value != '[') {
        add_end(json_count(value));
        return json_count(value);
    }
    for (const char *p = json_first(value); p; p = json_next(p)) add_end(json_count(p));
    return json_count(json_first(value));
}

/* A token of tokenizer_config.json, a text or an object with its content, or else the number of other files. */
static int64_t usage_token(const char *words, const char *key, const char *generation, const char *id_key) {
    char        text[TOKEN_SPACE];
    const char *value = json_find(words, key), *other = json_find(generation, id_key);
    int64_t     id = -1;
    if (value && *value == '{') value = json_find(value, "content");
    if (json_string(value, text, sizeof text) > 0) id = number_of_added(text);
    if (id < 0 && other) id = json_count(*other == '[' ? json_first(other) : other);
    other = json_find(cfg.root, id_key);
    if (id < 0 && other) id = json_count(*other == '[' ? json_first(other) : other);
    return id < data.words->count ? id : -1;
}

/* The template of tokenizer_config.json: a text, or a list of {"name", "template"}, of which "default" counts. */
static char *template_of(const char *words) {
    const char *value = json_find(words, "chat_template"), *wrong;
    char        name[64], *text;
    size_t      space;
    for (const char *p = value && *value == '[' ? json_first(value) : NULL; p; p = json_next(p))
        if (json_string(json_find(p, "name"), name, sizeof name) > 0 && strcmp(name, "default") == 0)
            value = json_find(p, "template");
    if (!value || *value != '"') return NULL;
    space = (size_t)(json_pass(value, &wrong) - value) + 8;
    text = (char *)rows_memory(NULL, space, 1);
    if (json_string(value, text, space) >= 0) return text;
    free(text);
    return NULL;
}

static void read_usage_of_gguf(const gguf *g) {
    size_t      n;
    const char *text = gguf_text(g, "tokenizer.chat_template", &n);
    usage.bos = (int64_t)gguf_number(g, "tokenizer.ggml.bos_token_id", -1);
    usage.eos = (int64_t)gguf_number(g, "tokenizer.ggml.eos_token_id", -1);
    usage.eot = (int64_t)gguf_number(g, "tokenizer.ggml.eot_token_id", -1);
    usage.pad = (int64_t)gguf_number(g, "tokenizer.ggml.padding_token_id", -1);
    add_end(usage.eos);
    add_end(usage.eot);
    if (!text) return;
    usage.chat_template = (char *)rows_memory(NULL, n + 1, 1);
    memcpy(usage.chat_template, text, n);
    usage.chat_template[n] = '\0';
    copied_texts[CHAT_TEMPLATE] = usage.chat_template;
}

/* Reads it from the folder of the model, or from a GGUF file. The tokenizer has been read. */
static void read_usage(const char *folder, const gguf *g) {
    static const char *const turns[] = { "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>" };
    const char              *words, *generation;
    usage.eot = -1;
    if (g) {
        read_usage_of_gguf(g);
        return;
    }
    words = read_copied(folder, TOKENIZER_CONFIG);
    read_copied(folder, SPECIAL_TOKENS);
    generation = read_copied(folder, GENERATION_CONFIG);
    read_copied(folder, CHAT_TEMPLATE);
    usage.bos = usage_token(words, "bos_token", generation, "bos_token_id");
    usage.eos = usage_token(words, "eos_token", generation, "eos_token_id");
    usage.pad = usage_token(words, "pad_token", generation, "pad_token_id");
    add_end(usage.eos);
    add_ends(json_find(cfg.root, "eos_token_id"));
    add_ends(json_find(generation, "eos_token_id"));
    for (size_t i = 0; i < sizeof turns / sizeof turns[0] && usage.eot < 0; i++)
        if (is_end(number_of_added(turns[i]))) usage.eot = number_of_added(turns[i]);
    usage.chat_template = copied_texts[CHAT_TEMPLATE] ? copied_texts[CHAT_TEMPLATE] : template_of(words);
}

/* ==== After a training on chats ===================================================== */

/* Puts a text as a string of Jinja. */
static void put_jinja(gguf_json *j, const char *text) {
    json_put(j, "'");
    for (; *text; text++) {
        if (*text == '\n') json_put(j, "\\n");
        else {
            if (*text == '\'' || *text == '\\') json_put(j, "\\");
            json_bytes(j, text, 1);
        }
    }
    json_put(j, "'");
}

/* The template that writes chats as put_message does. */
static char *template_of_style(const chat_style *s) {
    gguf_json          j = { NULL, 0, 0 };
    const added_token *first = data.words->begin >= 0 ? added_of(data.words, data.words->begin) : NULL;
    char               text[TOKEN_SPACE];
    if (first) {
        snprintf(text, sizeof text, "%.*s", first->length, first->text);
        json_put(&j, "{{ ");
        put_jinja(&j, text);
        json_put(&j, " }}");
    }
    json_put(&j, "{% for message in messages %}{{ ");
    put_jinja(&j, s->before);
    json_put(&j, " + message['role'] + ");
    put_jinja(&j, s->behind);
    json_put(&j, s->trims ? " + message['content'] | trim + " : " + message['content'] + ");
    put_jinja(&j, s->end);
    if (*s->gap) json_put(&j, " + ");
    if (*s->gap) put_jinja(&j, s->gap);
    json_put(&j, " }}{% endfor %}{% if add_generation_prompt %}{{ ");
    snprintf(text, sizeof text, "%sassistant%s", s->before, s->behind);
    put_jinja(&j, text);
    json_put(&j, " }}{% endif %}");
    return j.text;
}

/* Names the end of an answer among the last tokens, and keeps the model's template if it writes this style. */
static void use_style(const chat_style *s) {
    int64_t     end = number_of_added(s->end);
    gguf_json   j = { NULL, 0, 0 };
    const char *wrong, *root;
    char        number[32];
    if (end >= 0 && !is_end(end)) {
        json_put(&j, "\"eos_token_id\": [");
        snprintf(number, sizeof number, "%lld", (long long)end);
        json_put(&j, number);
        for (int i = 0; i < usage.n_ends; i++) {
            snprintf(number, sizeof number, ", %lld", (long long)usage.ends[i]);
            json_put(&j, number);
        }
        json_put(&j, "]");
        root = copied_texts[GENERATION_CONFIG];
        if (root) root = json_check(root, (int64_t)strlen(root), &wrong);
        copied_texts[GENERATION_CONFIG] = object_with(root, "eos_token_id", j.text);
        free(j.text);
        add_end(end);
    }
    if (end >= 0) usage.eos = usage.eot = end;
    if (usage.chat_template && strstr(usage.chat_template, s->sign)) return;
    if (usage.chat_template)
        warn("the model's chat template does not write %s, which was trained: the saved template is that of %s", s->name,
             s->name);
    usage.chat_template = copied_texts[CHAT_TEMPLATE] = template_of_style(s);
    root = copied_texts[TOKENIZER_CONFIG];
    if (root) root = json_check(root, (int64_t)strlen(root), &wrong);
    copied_texts[TOKENIZER_CONFIG] =
        object_with(root, "chat_template", root ? "" : "\"tokenizer_class\": \"PreTrainedTokenizerFast\"");
}

/* The metadata of GGUF besides gguf_put_tokenizer's. */
static void put_usage(gguf_writer *w) {
    if (usage.eot >= 0) gguf_put_u32(w, "tokenizer.ggml.eot_token_id", (uint32_t)usage.eot);
    if (usage.pad >= 0) gguf_put_u32(w, "tokenizer.ggml.padding_token_id", (uint32_t)usage.pad);
    if (usage.chat_template) gguf_put_text(w, "tokenizer.chat_template", usage.chat_template);
}

#endif
