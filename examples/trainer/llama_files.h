/* llama_files.h - opens a model's folder or GGUF file, and saves models, adapters and GGUF: a
 * part of llama.c
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#ifndef TRAINER_LLAMA_FILES_H
#define TRAINER_LLAMA_FILES_H

#include <dirent.h>
#include "llama_usage.h"

/* ==== Opening ======================================================================= */

static char *path_in(const char *folder, const char *file) {
    size_t n = strlen(folder) + strlen(file) + 2;
    char  *path = (char *)rows_memory(NULL, n, 1);
    snprintf(path, n, "%s/%s", folder, file);
    return path;
}

static int is_there(const char *path) {
    struct stat info;
    return stat(path, &info) == 0;
}

static int ends_with(const char *text, const char *end) {
    size_t n = strlen(text), k = strlen(end);
    return n >= k && strcmp(text + n - k, end) == 0;
}

/* The weights of a folder: the one file, or the shards of the index. */
static void open_folder(const char *folder) {
    char *index = path_in(folder, "model.safetensors.index.json"),
         *file = path_in(folder, "model.safetensors");
    if (is_there(index) && is_there(file))
        die(1, "%s and %s are both there: remove the one that does not belong to the model", index,
            file);
    open_weights(&m.files, is_there(index) ? index : file, "MODEL");
    free(index);
    free(file);
}

/* A key of the metadata of GGUF, which begins with the kind of the model. Valid until the eighth call. */
static const char *key_of(const char *name) {
    static char keys[8][64];
    static int  turn_of;
    char       *key = keys[turn_of++ % 8];
    snprintf(key, sizeof keys[0], "%s.%s", cfg.kind, name);
    return key;
}

/* The keys that this program reads, or that change nothing. */
#define GGUF_KEYS                                                                                            \
    "vocab_size context_length embedding_length block_count feed_forward_length attention.head_count "       \
    "attention.head_count_kv attention.key_length attention.value_length attention.causal "                  \
    "attention.layer_norm_rms_epsilon rope.dimension_count rope.freq_base rope.scale_linear "                \
    "rope.scaling.type rope.scaling.factor rope.scaling.attn_factor rope.scaling.original_context_length "   \
    "rope.scaling.finetuned rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow"

/* Opens the files of a folder again that were closed for the training: a save reads their values. */
static void open_again(void) {
    if (!m.gguf && !m.files.n) open_folder(opt.model);
}

/* The scaling of rotary positions of a GGUF file, as a key of config.json, or "". */
static void rope_of_gguf(const gguf *g, char *text, size_t space) {
    double factor = gguf_number(g, key_of("rope.scaling.factor"), 1);
    double scale = gguf_number(g, key_of("rope.scaling.attn_factor"), 1) * (1 + 0.1 * log(factor));
    text[0] = '\0';
    if (gguf_find(g, "rope_freqs.weight"))
        die(1,
            "%s holds rope_freqs.weight, and this program reads GGUF without it: read the model's folder",
            opt.model);
    if (gguf_text_is(g, key_of("rope.scaling.type"), "linear"))
        snprintf(text, space,
                 "  \"rope_scaling\": {\"rope_type\": \"linear\", \"factor\": %.9g},\n", factor);
    else if (gguf_text_is(g, key_of("rope.scaling.type"), "yarn"))
        snprintf(
            text, space,
            "  \"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": %.9g, \"beta_fast\": %.9g, \"beta_slow\": %.9g,\n"
            "    \"attention_factor\": %.9g, \"original_max_position_embeddings\": %.0f},\n",
            factor, gguf_number(g, key_of("rope.scaling.yarn_beta_fast"), 32),
            gguf_number(g, key_of("rope.scaling.yarn_beta_slow"), 1), scale,
            gguf_number(g, key_of("rope.scaling.original_context_length"),
                        gguf_number(g, key_of("context_length"), 0)));
    else if (gguf_pair_of(g, key_of("rope.scaling.type")) &&
             !gguf_text_is(g, key_of("rope.scaling.type"), "none"))
        die(1, "%s: its llama.rope.scaling.type is neither none, linear nor yarn", opt.model);
}

/* Refuses rotary positions of a GGUF file that the config cannot tell: of a part of a head; scaled
 * by the old key; or scaled without a type. */
static void check_gguf_rope(const gguf *g) {
    const int has_type = gguf_pair_of(g, key_of("rope.scaling.type")) != NULL;
    const struct {
        const char *key;
        double      only;
    } keys[] = {
        { key_of("rope.dimension_count"), (double)cfg.head_dim },
        { key_of("attention.value_length"), (double)cfg.head_dim },
        { key_of("attention.causal"), 1 },
        { key_of("rope.scale_linear"), 1 },
        { has_type ? "" : key_of("rope.scaling.factor"), 1 },
    };
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
        double number = gguf_number(g, keys[i].key, keys[i].only);
        if (number == keys[i].only) continue;
        die(1,
            "%s: its %s is %.9g, and this program reads %.9g only: read the model's folder, or "
            "convert it again",
            opt.model, keys[i].key, number, keys[i].only);
    }
}

/* A config.json of the metadata of a GGUF file. */
static char *config_of_gguf(const gguf *g) {
    static const struct {
        const char *key, *of;
    } keys[] = {
        { "num_hidden_layers", "block_count" },
        { "hidden_size", "embedding_length" },
        { "intermediate_size", "feed_forward_length" },
        { "num_attention_heads", "attention.head_count" },
        { "num_key_value_heads", "attention.head_count_kv" },
        { "max_position_embeddings", "context_length" },
        { "head_dim", "attention.key_length" },
        { "rms_norm_eps", "attention.layer_norm_rms_epsilon" },
        { "rope_theta", "rope.freq_base" },
    };
    const mixp_st_entry *tokens = gguf_find(g, "token_embd.weight");
    double               eos = gguf_number(g, "tokenizer.ggml.eos_token_id", -1),
           bos = gguf_number(g, "tokenizer.ggml.bos_token_id", -1);
    char  *text = (char *)rows_memory(NULL, 2048, 1), rope[512];
    size_t n = 0;
#define PUT(...) n += (size_t)snprintf(text + n, 2048 - n, __VA_ARGS__)
    strcpy(cfg.kind, gguf_text_is(g, "general.architecture", "qwen2") ? "qwen2" : "llama");
    if (!gguf_text_is(g, "general.architecture", cfg.kind))
        die(1, "%s: its general.architecture is neither llama nor qwen2", opt.model);
    check_gguf_keys(opt.model, g, cfg.kind, GGUF_KEYS);
    if (!tokens || tokens->rank != 2) die(1, "%s has no matrix token_embd.weight", opt.model);
    rope_of_gguf(g, rope, sizeof rope);
    PUT("{\n  \"architectures\": [\"%sForCausalLM\"],\n  \"model_type\": \"%s\",\n",
        cfg.kind[0] == 'q' ? "Qwen2" : "Llama", cfg.kind);
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
        const char *key = key_of(keys[i].of);
        if (gguf_pair_of(g, key)) PUT("  \"%s\": %.9g,\n", keys[i].key, gguf_number(g, key, 0));
    }
    if (eos >= 0) PUT("  \"eos_token_id\": %.0f,\n", eos);
    if (bos >= 0) PUT("  \"bos_token_id\": %.0f,\n", bos);
    PUT("%s", rope);
    if (cfg.kind[0] == 'l') PUT("  \"attention_bias\": %s,\n  \"mlp_bias\": %s,\n",
        gguf_find(g, "blk.0.attn_q.bias") ? "true" : "false",
        gguf_find(g, "blk.0.ffn_up.bias") ? "true" : "false");
    PUT("  \"vocab_size\": %lld,\n  \"tie_word_embeddings\": %s\n}\n", (long long)tokens->shape[0],
        gguf_find(g, "output.weight") ? "false" : "true");
#undef PUT
    return text;
}

static void open_gguf(void) {
    char error[MIXP_MESSAGE_SIZE];
    if (gguf_read(opt.model, &m.gguf, error, sizeof error) != MIXP_OK)
        die(1, "while reading MODEL: %s", error);
    cfg.path = path_in(opt.model, "metadata");
    cfg.text = config_of_gguf(m.gguf);
}

/* The tokenizer: of --tokenizer, of the folder, or of the GGUF file. It must belong to the
 * config. */
static void open_tokenizer(void) {
    char *path = opt.tokenizer || m.gguf ? copy_text(opt.tokenizer ? opt.tokenizer : opt.model)
                                         : path_in(opt.model, "tokenizer.json");
    if (opt.tokenizer || !m.gguf) data.words = read_tokenizer(path, &data.json);
    else {
        const char *wrong, *root = NULL;
        data.json = gguf_tokenizer_json(m.gguf);
        if (data.json) root = json_check(data.json, (int64_t)strlen(data.json), &wrong);
        if (!root)
            die(1,
                "%s: its tokenizer.ggml.model or .pre is unknown: pass the tokenizer.json "
                "with --tokenizer",
                path);
        data.words = tokenizer_of(path, root, strlen(data.json));
    }
    if (data.words->count > cfg.vocab)
        die(1,
            "%s has %lld tokens, and vocab_size of %s is %lld: the tokenizer does not belong to "
            "the model",
            path, (long long)data.words->count, cfg.path, (long long)cfg.vocab);
    if (cfg.eos >= data.words->count)
        die(1,
            "%s has no token %lld, which is eos_token_id of %s: the tokenizer does not belong to "
            "the model",
            path, (long long)cfg.eos, cfg.path);
    free(path);
}

/* Reads the config and opens the weights, then reads the tokenizer. */
static void open_model(void) {
    const char *ignored;
    if (ends_with(opt.model, ".gguf")) open_gguf();
    else {
        cfg.path = path_in(opt.model, "config.json");
        cfg.text =
            read_json(cfg.path, 1 << 20, ". MODEL is a folder of Hugging Face's files", &ignored);
        open_folder(opt.model);
    }
    read_config();
    if (m.gguf) check_gguf_rope(m.gguf);
    open_tokenizer();
    read_usage(opt.model, m.gguf);
}

/* ==== Loading ====================================================================== */

/* The tensor of the file that has a parameter's name, or NULL. *path, unless path is NULL: the path of its file. */
static const mixp_st_entry *find_entry(const char *parameter, const char **path) {
    static const mixp_st_entry planned = { .dtype = MIXP_BF16 };
    char                       name[GGUF_NAME];
    if (path) *path = opt.model;
    if (!m.gguf && !m.files.n) return &planned; /* tests/bench/llama_memory.c has a config only */
    if (!m.gguf) return find_weight(&m.files, parameter, path);
    return gguf_name(parameter, name) ? gguf_find(m.gguf, name) : NULL;
}

/* Tensor i of the model and its adapters: the matrices that are codes, then the parameters. NULL past the last. */
static mixp_tensor *tensor_at(int64_t i) {
    return i < m.n_coded ? m.coded[i] : mixp_context_param(m.ctx, i - m.n_coded);
}

static mixp_tensor *tensor_named(const char *name) {
    mixp_tensor *t;
    for (int64_t i = 0; (t = tensor_at(i)) != NULL && strcmp(t->name, name) != 0; i++) {}
    return t;
}

/* Is each value of a tensor of the file finite in f16? */
static int fits_f16(const mixp_st_entry *e) {
    size_t      size = mixp_dtype_size(e->dtype);
    const char *p = (const char *)e->data;
    for (size_t at = 0; at < e->bytes; at += size) {
        float value;
        mixp_convert(&value, MIXP_F32, p + at, e->dtype, 1);
        if (!(value < 65520 && value > -65520)) return 0;
    }
    return 1;
}

/* The dtype in which a parameter is stored. Frozen matrices that are only multiplied are stored in the
 * products' dtype, because their casts would be the same in each step; the table of tokens, where its file
 * has that dtype. */
static mixp_dtype dtype_of(const char *name, int is_matrix) {
    const mixp_st_entry *e = find_entry(name, NULL);
    if (opt.level == 3) return m.dtype;
    if (!is_lora() || !is_matrix || !e || opt.level == 0) return MIXP_F32;
    if (e->dtype == m.dtype) return m.dtype;
    if (e->dtype == MIXP_DTYPE_COUNT && m.dtype == MIXP_F16) return MIXP_F32; /* Q8_0 has larger numbers */
    if (strcmp(name, "model.embed_tokens.weight") == 0) return MIXP_F32;
    if (m.dtype == MIXP_F16) return m.is_measured || fits_f16(e) ? MIXP_F16 : MIXP_F32;
    return m.dtype;
}

/* A tensor of the file, which must have this shape. Other dtypes than f32, f16 and bf16 are
 * refused. */
static const mixp_st_entry *entry_of(const mixp_tensor *t, const char **path) {
    const mixp_st_entry *e = find_entry(t->name, path);
    if (!e) die(1, "%s has no tensor %s, which %s asks for", opt.model, t->name, cfg.path);
    if (e->dtype != MIXP_F32 && e->dtype != MIXP_F16 && e->dtype != MIXP_BF16 && !(m.gguf && gguf_has_values(e)))
        die(1, "%s: %s is of dtype %s, and this program reads F32, F16, BF16 and, of GGUF, Q8_0, Q4_0 and Q4_1", *path, e->name,
            e->type);
    if (e->rank != t->rank || e->shape[0] != t->shape[0] ||
        (t->rank > 1 && e->shape[1] != t->shape[1]))
        die(1, "%s: %s is [%lld, %lld], and %s asks for [%lld, %lld]", *path, e->name,
            (long long)e->shape[0], e->rank > 1 ? (long long)e->shape[1] : 1LL, cfg.path,
            (long long)t->shape[0], t->rank > 1 ? (long long)t->shape[1] : 1LL);
    return e;
}

/* Heads whose rows a GGUF file of a Llama stores in another order, for queries and keys; 0: the same order. */
static int64_t turned_heads(const char *name) {
    if (cfg.kind[0] == 'q') return 0;
    return strstr(name, "q_proj") ? cfg.heads : strstr(name, "k_proj") ? cfg.kv_heads : 0;
}

/* The values of a tensor of the file, in f32, in the order of Hugging Face's rows. */
static void read_values(const mixp_tensor *t, float *to) {
    const char          *path;
    const mixp_st_entry *e = entry_of(t, &path);
    float               *turned = NULL;
    if (!m.gguf || !turned_heads(t->name)) {
        gguf_values(e, to, t->count);
        return;
    }
    turned = (float *)rows_memory(NULL, (size_t)t->count, sizeof *turned);
    gguf_values(e, turned, t->count);
    gguf_turn_back(to, turned, t->shape[0], (t->rank > 1 ? (size_t)t->shape[1] : 1) * sizeof *to, turned_heads(t->name));
    free(turned);
}

/* Adds 1,024 bytes of a tensor, from all over it, to the hash that tells one base model from another. */
static void add_to_base_hash(const mixp_st_entry *e) {
    const unsigned char *p = (const unsigned char *)e->data;
    const size_t         most = 1024, n = e->bytes < most ? e->bytes : most;
    for (size_t k = 0; k < n; k++) m.base_hash = (m.base_hash ^ p[e->bytes / n * k]) * 1099511628211u;
}

/* A parameter with the values of the file. cols 0: a vector. */
static mixp_tensor *load(mixp_dtype dtype, int64_t rows, int64_t cols, const char *name) {
    int64_t              shape[2] = { rows, cols };
    const char          *path;
    mixp_tensor         *t = mixp_param(m.ctx, name, dtype, cols ? 2 : 1, shape);
    const mixp_st_entry *e;
    float               *values;
    check("making the model");
    if (m.is_measured) return t;
    e = entry_of(t, &path);
    add_to_base_hash(e);
    if (!m.gguf) {
        mixp_write(t, e->data, e->dtype, t->count);
        return t;
    }
    values = (float *)rows_memory(NULL, (size_t)t->count, sizeof *values);
    read_values(t, values);
    mixp_write_f32(t, values, t->count);
    free(values);
    return t;
}

/* A head that is stored a second time must be the table of tokens, to which the config ties it. */
static void check_tied_head(const char *path, const mixp_st_entry *head) {
    const char          *other;
    const mixp_st_entry *tokens = entry_of(m.tokens, &other);
    if (head->bytes == tokens->bytes && head->dtype == tokens->dtype && memcmp(head->data, tokens->data, head->bytes) == 0)
        return;
    die(1,
        "%s: lm_head.weight differs from model.embed_tokens.weight, and tie_word_embeddings of %s is true: set it to "
        "false for a separate head, or remove lm_head.weight from the file",
        path, cfg.path);
}

/* Reports a tensor of the file that the model does not use. A tied head may be stored a second
 * time; old files hold the frequencies of rotary positions. */
static void check_extra(void) {
    for (uint64_t i = 0; m.gguf && i < m.gguf->n; i++) {
        char    name[GGUF_NAME] = "";
        int64_t k = 0;
        for (mixp_tensor *t; (t = tensor_at(k)) != NULL; k++)
            if (gguf_name(t->name, name) && strcmp(name, m.gguf->entries[i].name) == 0) break;
        if (!tensor_at(k))
            die(1, "%s: %s has no place in the model", opt.model, m.gguf->entries[i].name);
    }
    for (int64_t k = 0; k < m.files.n; k++)
        for (int64_t i = 0; i < mixp_safetensors_count(m.files.files[k]); i++) {
            const char *name = mixp_safetensors_at(m.files.files[k], i)->name;
            if (tensor_named(name) || strstr(name, "rotary_emb.inv_freq")) continue;
            if (cfg.tied && strcmp(name, "lm_head.weight") == 0) {
                check_tied_head(m.files.paths[k], mixp_safetensors_at(m.files.files[k], i));
                continue;
            }
            die(1, "%s: %s has no place in the model of %s", m.files.paths[k], name, cfg.path);
        }
}

/* ==== Saving ======================================================================== */

static void write_text(const char *path, const char *text) {
    if (!replace_file(path, text, strlen(text)))
        die(1, "cannot write %s: %s", path, strerror(errno));
}

/* Does --out get all weights, and not only adapters? */
static int saves_whole(void) { return !is_lora() || opt.merge != 0; }

/* Refuses a folder in which other programs would find these weights beside others: shards, weights of another name,
 * adapters beside a model. */
static void check_other_weights(const char *folder, int whole) {
    DIR *all = opendir(folder);
    for (const struct dirent *e; all && (e = readdir(all)) != NULL;) {
        const char *name = e->d_name;
        int         is_adapter = strncmp(name, "adapter_", 8) == 0, is_weights;
        is_weights = ends_with(name, ".safetensors") || ends_with(name, ".safetensors.index.json") ||
                     (strncmp(name, "pytorch_model", 13) == 0 && strstr(name, ".bin"));
        if (strcmp(name, whole ? "model.safetensors" : "adapter_model.safetensors") == 0) continue;
        if (strcmp(name, CHECKPOINT) == 0) continue; /* of a run: programs do not look for that name */
        if (whole ? is_weights || is_adapter : is_weights)
            die(1,
                "--out %s holds %s, which programs would read beside the new %s: name another folder, or remove "
                "that file",
                folder, name, whole ? "model.safetensors" : "adapters");
    }
    if (all) closedir(all);
}

/* Makes the folder of --out, and refuses before the first step what could not be saved after the last. */
static void check_out(void) {
    static const char *const own[2][3] = { { "adapter_model.safetensors", "adapter_config.json", NULL },
                                           { "model.safetensors", "config.json", "tokenizer.json" } };
    if (opt.gguf_adapter && !is_lora())
        die(2, "--gguf-adapter saves adapters, and there are none: add --lora or --adapter");
    if (opt.gguf) check_target(opt.gguf, "--gguf");
    if (opt.gguf_adapter) check_target(opt.gguf_adapter, "--gguf-adapter");
    if (!opt.out) return;
    if (mkdir(opt.out, 0777) != 0 && errno != EEXIST)
        die(1, "cannot make the folder %s: %s. Check --out", opt.out, strerror(errno));
    check_other_weights(opt.out, saves_whole());
    for (int i = 0; i < 3 + (saves_whole() ? COPIED_FILES : 0); i++) {
        const char *name = i < 3 ? own[saves_whole()][i] : copied_files[i - 3];
        char       *path = name ? path_in(opt.out, name) : NULL;
        if (path) check_target(path, "--out");
        free(path);
    }
}

/* Adds scale b a to w, in f32. */
static void add_adapters(const layer *l, float *w) {
    int64_t rows = l->w->shape[0], cols = l->w->shape[1];
    float  *a = (float *)rows_memory(NULL, (size_t)(m.rank * (rows + cols) + cols), sizeof *a), *b = a + m.rank * cols,
          *sum = b + m.rank * rows;
    mixp_read_f32(l->a, a, l->a->count);
    mixp_read_f32(l->b, b, l->b->count);
    for (int64_t i = 0; i < rows; i++) {
        memset(sum, 0, (size_t)cols * sizeof *sum);
        for (int64_t r = 0; r < m.rank; r++)
            for (int64_t k = 0; k < cols; k++) sum[k] += b[i * m.rank + r] * a[r * cols + k];
        for (int64_t k = 0; k < cols; k++) w[i * cols + k] += m.lora_scale * sum[k];
    }
    free(a);
}

/* What a file of all weights holds of a parameter, in f32: trained values; or the values of the model's own file, which
 * may have been stored in bf16 for the training, with the adapters' sum. Returns 1. */
static int final_values(const mixp_tensor *t, float *to) {
    if (!m.rank) return mixp_read_f32(t, to, t->count) == MIXP_OK;
    read_values(t, to);
    for (int64_t i = 0; i < cfg.layers * LINEARS; i++)
        if (layer_at(i)->w == t && layer_at(i)->a) add_adapters(layer_at(i), to);
    return 1;
}

/* The dtype in which a folder gets a parameter: that of the file. f32 holds all values of Q8_0. */
static mixp_dtype saved_dtype(const mixp_tensor *t) {
    const char          *path;
    const mixp_st_entry *e = entry_of(t, &path);
    return e->dtype == MIXP_DTYPE_COUNT ? MIXP_F32 : e->dtype;
}

/* The parameters without adapters, each in the dtype of the model's file. */
static void save_weights(const char *path) {
    static const char *const pairs[][2] = { { "format", "pt" } };
    char                     error[MIXP_MESSAGE_SIZE], temporary[PATH_SPACE + 8];
    int64_t                  n = 0, i = 0;
    mixp_st_entry           *entries = NULL;
    mixp_tensor             *t;
    while ((t = tensor_at(i++)) != NULL) {
        float     *values;
        void      *rounded;
        mixp_dtype dtype;
        if (strncmp(t->name, PEFT, sizeof PEFT - 1) == 0) continue;
        dtype = saved_dtype(t);
        entries = (mixp_st_entry *)rows_memory(entries, (size_t)n + 1, sizeof *entries);
        values = (float *)rows_memory(NULL, (size_t)t->count, sizeof *values);
        rounded = rows_memory(NULL, (size_t)t->count, mixp_dtype_size(dtype));
        final_values(t, values);
        mixp_convert(rounded, dtype, values, MIXP_F32, t->count);
        free(values);
        memset(&entries[n], 0, sizeof *entries);
        entries[n].name = t->name;
        entries[n].dtype = dtype;
        entries[n].rank = t->rank;
        memcpy(entries[n].shape, t->shape, sizeof entries[n].shape);
        entries[n].data = rounded;
        entries[n++].bytes = (size_t)t->count * mixp_dtype_size(dtype);
    }
    begin_target(path, temporary, sizeof temporary);
    if (mixp_safetensors_write(temporary, entries, n, pairs, 1, error, sizeof error) != MIXP_OK)
        die(1, "while saving: %s", error);
    if (plain_rename(temporary, path, 0)) die(1, "cannot write %s: %s", path, strerror(errno));
    while (n-- > 0) {
        void *values;
        memcpy(&values, &entries[n].data, sizeof values);
        free(values);
    }
    free(entries);
}

/* The model as `transformers` reads it: config and tokenizer are those that were read. */
static void save_model(const char *folder) {
    char                    *path = path_in(folder, "model.safetensors");
    save_weights(path);
    free(path);
    path = path_in(folder, "config.json");
    write_text(path, cfg.text);
    free(path);
    path = path_in(folder, "tokenizer.json");
    write_text(path, data.json);
    free(path);
    for (int i = 0; i < COPIED_FILES; i++) {
        path = path_in(folder, copied_files[i]);
        if (copied_texts[i]) write_text(path, copied_texts[i]);
        free(path);
    }
}

/* Saves only the adapters, as the `peft` library reads them. target_modules lists full names of modules. */
static void save_adapters(const char *folder) {
    char  *path = path_in(folder, "adapter_model.safetensors"), module[96], temporary[PATH_SPACE + 8];
    size_t room = 1024 + 2 * strlen(opt.model) + (size_t)(cfg.layers * LINEARS) * 64, n;
    char  *text = (char *)rows_memory(NULL, room, 1);
    begin_target(path, temporary, sizeof temporary);
    mixp_checkpoint_save_weights_of(temporary, m.ctx, &(mixp_weights_desc){ .pattern = PEFT "*" });
    check("saving adapters");
    if (plain_rename(temporary, path, 0)) die(1, "cannot write %s: %s", path, strerror(errno));
    free(path);
    n = (size_t)snprintf(
        text, room,
        "{\n  \"peft_type\": \"LORA\",\n  \"task_type\": \"CAUSAL_LM\",\n  \"base_model_name_or_path\": \"");
    for (const char *p = opt.model; *p; p++)
        n += (size_t)snprintf(text + n, room - n,
                              *p == '"' || *p == '\\'  ? "\\%c"
                              : (unsigned char)*p < 32 ? "?"
                                                       : "%c",
                              *p);
    n += (size_t)snprintf(
        text + n, room - n,
        "\",\n  \"r\": %lld,\n  \"lora_alpha\": %.9g,\n  \"lora_dropout\": 0.0,\n  \"bias\": \"none\",\n"
        "  \"fan_in_fan_out\": false,\n  \"inference_mode\": true,\n  \"target_modules\": [",
        (long long)m.rank, (double)m.lora_scale * (double)m.rank);
    for (int64_t i = 0, first = 1; i < cfg.layers * LINEARS; i++)
        if (layer_at(i)->a) {
            n += (size_t)snprintf(text + n, room - n, "%s\n    \"%s\"", first ? "" : ",",
                                  module_of(i, module));
            first = 0;
        }
    snprintf(text + n, room - n, "\n  ]\n}\n");
    path = path_in(folder, "adapter_config.json");
    write_text(path, text);
    free(path);
    free(text);
}

/* The keys of llama.cpp for a scaling of rotary positions; factors: room for head_dim / 2 numbers
 * of llama3's. */
static void put_rope(gguf_writer *w, float *factors) {
    gguf_put_float(w, key_of("rope.freq_base"), (float)cfg.theta);
    gguf_put_u32(w, key_of("rope.dimension_count"), (uint32_t)cfg.head_dim);
    switch (cfg.rope_kind) {
    case ROPE_DEFAULT: return;
    case ROPE_DYNAMIC:
        die(1,
            "%s: the rotary positions are dynamic, and GGUF has no such scaling: leave out --gguf",
            cfg.path);
        return;
    case ROPE_LLAMA3:
        for (int64_t i = 0; i < cfg.head_dim / 2; i++)
            factors[i] =
                (float)(pow(cfg.theta, -2.0 * (double)i / (double)cfg.head_dim) / rope_angle(i));
        gguf_put_floats(w, "rope_freqs.weight", factors, cfg.head_dim / 2);
        return;
    case ROPE_YARN:
        if (number_of(cfg.path, cfg.rope, "truncate", 1, 0, 1) == 0)
            die(1, "%s: truncate is false, and GGUF has no such scaling: leave out --gguf",
                cfg.path);
        gguf_put_u32(w, key_of("rope.scaling.original_context_length"), (uint32_t)cfg.rope_context);
        gguf_put_float(w, key_of("rope.scaling.attn_factor"),
                       (float)(cfg.rope_scale / (1 + 0.1 * log(cfg.rope_factor))));
        gguf_put_float(w, key_of("rope.scaling.yarn_beta_fast"), (float)cfg.rope_high);
        gguf_put_float(w, key_of("rope.scaling.yarn_beta_slow"), (float)cfg.rope_low);
        break;
    case ROPE_LINEAR: break;
    }
    gguf_put_text(w, key_of("rope.scaling.type"), cfg.rope_kind == ROPE_YARN ? "yarn" : "linear");
    gguf_put_float(w, key_of("rope.scaling.factor"), (float)cfg.rope_factor);
}

/* The type of matrices in --gguf: --gguf-type, or that of the model's first matrix of a layer. */
static gguf_type gguf_type_of_model(void) {
    const char          *path;
    const mixp_st_entry *e = entry_of(m.blocks[0].linear[Q].w, &path);
    if (opt.gguf_type) return (gguf_type)gguf_type_named(opt.gguf_type);
    return e->dtype == MIXP_F32 ? GGUF_F32 : e->dtype == MIXP_F16 ? GGUF_F16 : e->dtype == MIXP_BF16 ? GGUF_BF16 : GGUF_Q8_0;
}

/* Rounds values as a file will hold them: by the type of GGUF, or, type -1, in the dtype of the model's file. */
static void round_values(const mixp_tensor *t, int type, const float *from, float *to) {
    int64_t        n = t->count;
    mixp_dtype     dtype = type < 0             ? saved_dtype(t)
                           : type == GGUF_F16   ? MIXP_F16
                           : type == GGUF_BF16  ? MIXP_BF16
                                                : MIXP_F32;
    unsigned char *bytes = (unsigned char *)rows_memory(NULL, (size_t)n, 4);
    if (type == GGUF_Q8_0 && t->shape[1] % GGUF_BLOCK == 0) {
        gguf_quantise(bytes, from, n);
        gguf_dequantise(to, bytes, n);
    } else {
        mixp_convert(bytes, dtype, from, MIXP_F32, n);
        mixp_convert(to, MIXP_F32, bytes, dtype, n);
    }
    free(bytes);
}

/* Says how much of the adapters' sum the rounding of a merged file lost: the norm of the difference, as a share of
 * the norm of the change. */
static void say_rounding(const char *what, int type) {
    double lost = 0, change = 0, share;
    for (int64_t i = 0; i < cfg.layers * LINEARS; i++) {
        const layer *l = layer_at(i);
        int64_t      n = l->w->count;
        float       *old = l->a ? (float *)rows_memory(NULL, 3 * (size_t)n, sizeof *old) : NULL;
        if (!old) continue;
        read_values(l->w, old);
        final_values(l->w, old + n);
        round_values(l->w, type, old + n, old + 2 * n);
        for (int64_t k = 0; k < n; k++) {
            double moved = (double)old[n + k] - (double)old[k], off = (double)old[2 * n + k] - (double)old[n + k];
            change += moved * moved;
            lost += off * off;
        }
        free(old);
    }
    share = change > 0 ? sqrt(lost / change) : 0;
    printf("%s: the adapters are added in f32; rounding the sum lost %.2g %% of what they change\n", what, 100 * share);
    if (share > 0.1)
        warn("%s: rounding changes the merged weights by %.0f %% of what the adapters change: keep the adapters apart, "
             "or use --gguf-type f32", what, 100 * share);
}

static void save_gguf(const char *path) {
    static const int file_types[][2] = {
        { GGUF_F32, 0 }, { GGUF_F16, 1 }, { GGUF_Q8_0, 7 }, { GGUF_BF16, 32 }
    };
    char         error[MIXP_MESSAGE_SIZE], name[GGUF_NAME];
    float       *factors = (float *)rows_memory(NULL, (size_t)cfg.head_dim, sizeof *factors);
    gguf_type    type = gguf_type_of_model();
    gguf_writer *w = gguf_new(cfg.kind);
    mixp_tensor *t;
    if (!w) die(1, "out of memory for --gguf");
    w->read = final_values;
    for (int i = 0; i < 4; i++)
        if (file_types[i][0] == (int)type)
            gguf_put_u32(w, "general.file_type", (uint32_t)file_types[i][1]);
    gguf_put_u32(w, key_of("block_count"), (uint32_t)cfg.layers);
    gguf_put_u32(w, key_of("context_length"), (uint32_t)cfg.positions);
    gguf_put_u32(w, key_of("embedding_length"), (uint32_t)cfg.width);
    gguf_put_u32(w, key_of("feed_forward_length"), (uint32_t)cfg.inner);
    gguf_put_u32(w, key_of("attention.head_count"), (uint32_t)cfg.heads);
    gguf_put_u32(w, key_of("attention.head_count_kv"), (uint32_t)cfg.kv_heads);
    gguf_put_u32(w, key_of("attention.key_length"), (uint32_t)cfg.head_dim);
    gguf_put_u32(w, key_of("attention.value_length"), (uint32_t)cfg.head_dim);
    gguf_put_float(w, key_of("attention.layer_norm_rms_epsilon"), (float)cfg.eps);
    gguf_put_u32(w, key_of("vocab_size"), (uint32_t)cfg.vocab);
    put_rope(w, factors);
    gguf_put_tokenizer(w, data.words, data.json, cfg.vocab, usage.bos, usage.eos);
    put_usage(w);
    for (int64_t i = 0; (t = tensor_at(i)) != NULL; i++)
        if (gguf_name(t->name, name)) gguf_put_tensor(w, name, type, t, turned_heads(t->name));
    if (gguf_write(w, path, error, sizeof error) != MIXP_OK) die(1, "%s", error);
    free(factors);
}

/* Writes only the adapters, in f32, with the names of llama.cpp's convert_lora_to_gguf.py. */
static void save_gguf_adapters(const char *path) {
    char         error[MIXP_MESSAGE_SIZE], module[96], name[GGUF_NAME], part[GGUF_NAME];
    gguf_writer *w = gguf_new(cfg.kind);
    if (!w) die(1, "out of memory for --gguf-adapter");
    gguf_put_text(w, "general.type", "adapter");
    gguf_put_u32(w, "general.file_type", 0);
    gguf_put_text(w, "adapter.type", "lora");
    gguf_put_float(w, "adapter.lora.alpha", m.lora_scale * (float)m.rank);
    for (int64_t i = 0; i < cfg.layers * LINEARS; i++) {
        const layer *l = layer_at(i);
        if (!l->a) continue;
        snprintf(part, sizeof part, "%.80s.weight", module_of(i, module));
        gguf_name(part, name);
        snprintf(part, sizeof part, "%.80s.lora_a", name);
        gguf_put_tensor(w, part, GGUF_F32, l->a, 0);
        snprintf(part, sizeof part, "%.80s.lora_b", name);
        gguf_put_tensor(w, part, GGUF_F32, l->b, turned_heads(module));
    }
    if (gguf_write(w, path, error, sizeof error) != MIXP_OK) die(1, "%s", error);
}

#endif
