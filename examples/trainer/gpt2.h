/* gpt2.h - weights from GPT-2's files, and to them: a part of trainer.c
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * `transformers` names GPT-2's tensors as nanoGPT does, with or without the prefix "transformer.", and
 * behind the prefixes of wrappers, such as "module." and "_orig_mod.".
 * It stores the matrices of its blocks transposed, [in, out]; the first matrix, [width, 3 width],
 * shows this. Its old files also contain attention's causal masks, which are not weights. A head
 * that is tied to the token table may be stored a second time.
 */
#ifndef TRAINER_GPT2_H
#define TRAINER_GPT2_H

#include "config.h"
#include "data.h"
#include "gguf_tokenizer.h"
#include "model.h"
#include "weights.h"

#define PREFIX "transformer."
enum { PREFIX_LENGTH = (int)sizeof PREFIX - 1, NAME_SPACE = 96 };

/* Is t a matrix of a block? These all belong to linear layers. */
static int is_linear(const mixp_tensor *t) { return t->rank == 2 && strstr(t->name, ".h."); }

/* to[cols, rows] = from[rows, cols]' */
static void turn(float *to, const float *from, int64_t rows, int64_t cols) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < cols; j++) to[j * rows + i] = from[i * cols + j];
}

/* ==== Reading ======================================================================= */

typedef struct gpt2_file {
    weight_files       weights;
    gguf              *gguf;                /* instead of weights */
    const char        *path;
    char               body[NAME_SPACE];    /* before "wte.weight" in the file: "transformer.", "", ... */
    char               root[NAME_SPACE];    /* the same without "transformer." */
    int                is_turned;
} gpt2_file;

/* The file's version of our tensor, or NULL. */
static const mixp_st_entry *gpt2_find(const gpt2_file *f, const mixp_tensor *t) {
    char name[2 * NAME_SPACE];
    int  is_body;
    if (f->gguf) return gguf_name(t->name, name) ? gguf_find(f->gguf, name) : NULL;
    is_body = strncmp(t->name, PREFIX, PREFIX_LENGTH) == 0;
    snprintf(name, sizeof name, "%s%s", is_body ? f->body : f->root, t->name + (is_body ? PREFIX_LENGTH : 0));
    return find_weight(&f->weights, name, NULL);
}

/* Finds what stands before the names of tensors. Wrappers add to it: DistributedDataParallel "module.",
 * torch.compile "_orig_mod.". */
static void gpt2_find_prefix(gpt2_file *f) {
    static const char table[] = "wte.weight";
    const size_t      end = sizeof table - 1;
    for (int64_t k = 0; k < f->weights.n; k++)
        for (int64_t i = 0; i < mixp_safetensors_count(f->weights.files[k]); i++) {
            const char *name = mixp_safetensors_at(f->weights.files[k], i)->name;
            size_t      n = strlen(name), whole = n - end;
            if (n < end || strcmp(name + whole, table) != 0 || whole >= NAME_SPACE) continue;
            if (whole && name[whole - 1] != '.') continue;
            snprintf(f->body, sizeof f->body, "%.*s", (int)whole, name);
            if (whole >= PREFIX_LENGTH && strcmp(f->body + whole - PREFIX_LENGTH, PREFIX) == 0)
                whole -= PREFIX_LENGTH;
            snprintf(f->root, sizeof f->root, "%.*s", (int)whole, name);
            return;
        }
}

static void gpt2_close(gpt2_file *f) {
    close_weights(&f->weights);
    gguf_free(f->gguf);
}

static void gpt2_open(gpt2_file *f, const char *path) {
    memset(f, 0, sizeof *f);
    f->path = path;
    if (is_gguf(path)) f->gguf = read_gguf(path);
    else open_weights(&f->weights, path, "--init");
}

/* A table of positions may be longer than ours: its first rows are used. */
static int gpt2_fits(const gpt2_file *f, const gpt *m, const mixp_tensor *t,
                     const mixp_st_entry *e) {
    int turned = f->is_turned && is_linear(t);
    if (e->rank != t->rank) return 0;
    if (t == m->positions) return e->shape[0] >= t->shape[0] && e->shape[1] == t->shape[1];
    if (t->rank == 1) return e->shape[0] == t->shape[0];
    return e->shape[turned] == t->shape[0] && e->shape[!turned] == t->shape[1];
}

static int is_float(mixp_dtype d)
{ return d == MIXP_F32 || d == MIXP_F16 || d == MIXP_BF16 || d == MIXP_F64; }

static const char *gpt2_first(const gpt2_file *f) {
    if (f->gguf) return f->gguf->n ? f->gguf->entries[0].name : "none";
    return mixp_safetensors_count(f->weights.files[0]) ? mixp_safetensors_at(f->weights.files[0], 0)->name : "none";
}

static void gpt2_check(const gpt2_file *f, const gpt *m, const mixp_tensor *t) {
    const mixp_st_entry *e = gpt2_find(f, t);
    if (!e)
        die(1, "%s lacks %s, which this model has: check --layers and --bias. The file's first tensor is %s",
            f->path, t->name, gpt2_first(f));
    if (!is_float(e->dtype) && !(f->gguf && gguf_has_values(e)))
        die(1, "%s: %s is of dtype %s, and weights are F32, F16, BF16 or F64", f->path, e->name,
            e->type);
    if (gpt2_fits(f, m, t, e)) return;
    die(1, "%s: %s is [%lld, %lld], which does not fit this model's [%lld, %lld]: check --width, "
           "--block and --vocab", f->path, e->name, (long long)e->shape[0],
        e->rank > 1 ? (long long)e->shape[1] : 1LL, (long long)t->shape[0],
        t->rank > 1 ? (long long)t->shape[1] : 1LL);
}

/* Is it a mask that older versions saved? */
static int is_mask(const char *name) {
    size_t n = strlen(name);
    return (n > 10 && strcmp(name + n - 10, ".attn.bias") == 0) ||
           (n > 17 && strcmp(name + n - 17, ".attn.masked_bias") == 0);
}

/* Is it a second copy of the token table, which a tied head may leave? */
static int is_copy_of_tokens(const gpt2_file *f, const gpt *m, const mixp_st_entry *e) {
    const mixp_st_entry *tokens = gpt2_find(f, m->tokens);
    size_t               root = strlen(f->root);
    return strncmp(e->name, f->root, root) == 0 && strcmp(e->name + root, "lm_head.weight") == 0 && e->bytes == tokens->bytes &&
           memcmp(e->data, tokens->data, e->bytes) == 0;
}

/* Reports a tensor of the file that the model does not use, for example one layer too many. Looks
 * up each tensor of the model once, because a file may have a million masks. */
static void gpt2_check_extra(const gpt2_file *f, const gpt *m, mixp_tensor *const *all, int64_t n) {
    const mixp_st_entry **taken = (const mixp_st_entry **)malloc((size_t)n * sizeof *taken);
    if (!taken) die(1, "out of memory");
    for (int64_t k = 0; k < n; k++) taken[k] = gpt2_find(f, all[k]);
    for (int64_t s = 0; s < f->weights.n; s++)
        for (int64_t i = 0; i < mixp_safetensors_count(f->weights.files[s]); i++) {
            const mixp_st_entry *e = mixp_safetensors_at(f->weights.files[s], i);
            int64_t              k = 0;
            while (k < n && taken[k] != e) k++;
            if (k < n || is_mask(e->name) || is_copy_of_tokens(f, m, e)) continue;
            die(1, "%s: %s has no place in this model: check --layers, --bias and --head", f->path,
                e->name);
        }
    for (uint64_t i = 0; f->gguf && i < f->gguf->n; i++) {
        int64_t k = 0;
        while (k < n && taken[k] != &f->gguf->entries[i]) k++;
        if (k == n) die(1, "%s: %s has no place in this model", f->path, f->gguf->entries[i].name);
    }
    free(taken);
}

/* Rounded to the dtype of the model's weights, once. */
static void gpt2_load(const gpt2_file *f, mixp_tensor *t, const char **wrong) {
    const mixp_st_entry *e = gpt2_find(f, t);
    float *values = (float *)malloc((size_t)t->count * 2 * sizeof *values), *from = values;
    if (!values) { *wrong = "out of memory"; return; }
    if (f->gguf) gguf_values(e, values, t->count);
    else mixp_convert(values, MIXP_F32, e->data, e->dtype, t->count);
    if (f->is_turned && is_linear(t)) {
        from = values + t->count;
        turn(from, values, t->shape[1], t->shape[0]);
    }
    mixp_write_f32(t, from, t->count);
    free(values);
}

/* Checks the complete file before it changes the model. */
static void load_gpt2(const gpt *m, gpt2_file *f) {
    mixp_tensor **all = (mixp_tensor **)malloc((size_t)most_tensors(m) * sizeof(mixp_tensor *));
    const mixp_st_entry *first;
    const char   *wrong = NULL;
    int64_t       n;
    if (!all) die(1, "out of memory");
    n = model_tensors(m, all);
    gpt2_find_prefix(f);
    first = gpt2_find(f, m->blocks[0].qkv.w);
    f->is_turned = first && first->rank == 2 && first->shape[1] == 3 * first->shape[0];
    for (int64_t i = 0; i < n; i++) gpt2_check(f, m, all[i]);
    gpt2_check_extra(f, m, all, n);
    for (int64_t i = 0; i < n && !wrong; i++) gpt2_load(f, all[i], &wrong);
    free(all);
    if (wrong) die(1, "while reading --init: %s", wrong);
}

/* ==== Writing ======================================================================= */

typedef struct gpt2_writer {
    mixp_st_entry *entries;
    float         *values, *spare;      /* values: all tensors in order; spare: one tensor */
    int64_t        n;
    char         (*names)[NAME_SPACE];
} gpt2_writer;

static mixp_st_entry *gpt2_entry(gpt2_writer *w, const char *name, int64_t rows, int64_t cols) {
    mixp_st_entry *e = &w->entries[w->n];
    snprintf(w->names[w->n], NAME_SPACE, "%s", name);
    e->name = w->names[w->n++];
    e->dtype = MIXP_F32;
    e->rank = cols ? 2 : 1;
    e->shape[0] = rows;
    e->shape[1] = cols;
    e->data = w->values;
    e->bytes = (size_t)(rows * (cols ? cols : 1)) * sizeof(float);
    w->values += e->bytes / sizeof(float);
    return e;
}

/* Writes a bias of zeros for a weight without a bias, because GPT-2 has biases. */
static void gpt2_put_no_bias(gpt2_writer *w, const mixp_tensor *t) {
    char name[NAME_SPACE];
    snprintf(name, sizeof name, "%.*sbias", (int)(strlen(t->name) - strlen("weight")), t->name);
    memset(w->values, 0, (size_t)t->shape[0] * sizeof(float));
    gpt2_entry(w, name, t->shape[0], 0);
}

static void gpt2_put(gpt2_writer *w, const mixp_tensor *t) {
    float *to = w->values;
    int    turned = is_linear(t);
    int64_t rows = t->shape[0], cols = t->rank == 2 ? t->shape[1] : 0;
    mixp_read_f32(t, turned ? w->spare : to, t->count);
    if (turned) turn(to, w->spare, rows, cols);
    gpt2_entry(w, t->name, turned ? cols : rows, turned ? rows : cols);
}

static void gpt2_put_layer(gpt2_writer *w, layer l) {
    gpt2_put(w, l.w);
    if (l.b) gpt2_put(w, l.b);
    else gpt2_put_no_bias(w, l.w);
}

static void gpt2_put_all(gpt2_writer *w, const gpt *m) {
    gpt2_put(w, m->tokens);
    gpt2_put(w, m->positions);
    for (int i = 0; i < m->layers; i++) {
        layer six[BLOCK_LAYERS];
        block_layers(&m->blocks[i], six);
        for (int k = 0; k < BLOCK_LAYERS; k++) gpt2_put_layer(w, six[k]);
    }
    gpt2_put_layer(w, m->norm);
    if (m->head != m->tokens) gpt2_put(w, m->head);
}

/* The floats of all tensors, with biases everywhere: a block's biases have 3, 1, 1, 4, 1 and 1
 * widths. */
static int64_t gpt2_floats(const gpt *m) {
    int64_t width = m->tokens->shape[1];
    return m->n_parameters + (m->bias ? 0 : (11 * (int64_t)m->layers + 1) * width);
}

static void gpt2_write_weights(const gpt *m, const char *path) {
    static const char *const pairs[][2] = {{"format", "pt"}};
    int64_t     most = most_tensors(m), floats = gpt2_floats(m);
    char        error[MIXP_MESSAGE_SIZE], temporary[PATH_SPACE + 8];
    gpt2_writer w = {NULL, NULL, NULL, 0, NULL};
    float      *values = (float *)malloc((size_t)floats * sizeof *values);
    w.entries = (mixp_st_entry *)calloc((size_t)most, sizeof *w.entries);
    w.names = (char (*)[NAME_SPACE])malloc((size_t)most * NAME_SPACE);
    w.spare = (float *)malloc((size_t)m->blocks[0].up.w->count * sizeof *w.spare);
    if (!values || !w.entries || !w.names || !w.spare) die(1, "out of memory for --export");
    w.values = values;
    gpt2_put_all(&w, m);
    begin_target(path, temporary, sizeof temporary);
    if (mixp_safetensors_write(temporary, w.entries, w.n, pairs, 1, error, sizeof error) != MIXP_OK)
        die(1, "while exporting: %s", error);
    if (plain_rename(temporary, path, 0)) die(1, "cannot write %s: %s", path, strerror(errno));
    free(values);
    free(w.entries);
    free(w.names);
    free(w.spare);
}

static void gpt2_gguf_layer(gguf_writer *w, gguf_type type, layer l, const float *zeros) {
    char name[GGUF_NAME], bias[NAME_SPACE];
    if (gguf_name(l.w->name, name)) gguf_put_tensor(w, name, type, l.w, 0);
    snprintf(bias, sizeof bias, "%.*sbias", (int)(strlen(l.w->name) - strlen("weight")), l.w->name);
    if (!gguf_name(bias, name)) return;
    if (l.b) gguf_put_tensor(w, name, type, l.b, 0);
    else gguf_put_floats(w, name, zeros, l.w->shape[0]);
}

/* --export FILE.gguf. A bias of zeros stands for a bias that the model lacks. */
static void gpt2_write_gguf(const gpt *m, const config *c, const corpus *d, const char *path) {
    static const gguf_type types[] = {GGUF_F32, GGUF_F16, GGUF_BF16, GGUF_Q8_0};
    static const uint32_t  file_types[] = {0, 1, 32, 7};
    gguf_type    type = types[c->export_type];
    char         error[MIXP_MESSAGE_SIZE];
    float       *zeros = (float *)calloc((size_t)(4 * c->width), sizeof *zeros);
    gguf_writer *w = gguf_new("gpt2");
    const char  *root;
    char        *json;
    int64_t      end = -1;              /* of GPT-2: before a text, and behind it */
    if (!w || !zeros) die(1, "out of memory for --export");
    gguf_put_u32(w, "general.file_type", file_types[c->export_type]);
    gguf_put_u32(w, "gpt2.block_count", (uint32_t)c->layers);
    gguf_put_u32(w, "gpt2.context_length", (uint32_t)c->block);
    gguf_put_u32(w, "gpt2.embedding_length", (uint32_t)c->width);
    gguf_put_u32(w, "gpt2.feed_forward_length", (uint32_t)(4 * c->width));
    gguf_put_u32(w, "gpt2.attention.head_count", (uint32_t)c->heads);
    gguf_put_float(w, "gpt2.attention.layer_norm_epsilon", 1e-5f);
    json = read_json(c->tokenizer, TOKENIZER_MOST_BYTES, "", &root);
    for (int64_t id = 0; id < d->words->count; id++) {
        const added_token *a = added_of(d->words, id);
        if (a && a->length == 13 && memcmp(a->text, "<|endoftext|>", 13) == 0) end = id;
    }
    gguf_put_tokenizer(w, d->words, json, d->rows, end, end);
    free(json);
    gguf_put_tensor(w, "token_embd.weight", type, m->tokens, 0);
    gguf_put_tensor(w, "position_embd.weight", type, m->positions, 0);
    for (int i = 0; i < m->layers; i++) {
        layer six[BLOCK_LAYERS];
        block_layers(&m->blocks[i], six);
        for (int k = 0; k < BLOCK_LAYERS; k++) gpt2_gguf_layer(w, type, six[k], zeros);
    }
    gpt2_gguf_layer(w, type, m->norm, zeros);
    if (m->head != m->tokens) gguf_put_tensor(w, "output.weight", type, m->head, 0);
    if (gguf_write(w, path, error, sizeof error) != MIXP_OK) die(1, "while exporting: %s", error);
    free(zeros);
}

/* Writes the keys that `transformers` needs, and the vocabulary of a text for --init. */
static int64_t gpt2_config_text(const config *c, const corpus *d, char *text, size_t space) {
    enum { END_OF_TEXT = 50256 };
    static const char *const activations[] = {"gelu", "gelu_new"};
    char vocabulary[600] = "", end[16] = "null";
    if (d->is_text) vocabulary_text(d, vocabulary, sizeof vocabulary);
    if (d->rows > END_OF_TEXT) snprintf(end, sizeof end, "%d", END_OF_TEXT);
    return snprintf(text, space,
        "{\n  \"architectures\": [\"GPT2LMHeadModel\"],\n  \"model_type\": \"gpt2\",\n"
        "  \"n_layer\": %lld,\n  \"n_head\": %lld,\n  \"n_embd\": %lld,\n  \"n_positions\": %lld,\n"
        "  \"n_ctx\": %lld,\n  \"vocab_size\": %lld,\n  \"activation_function\": \"%s\",\n"
        "  \"layer_norm_epsilon\": 1e-05,\n  \"embd_pdrop\": %g,\n  \"resid_pdrop\": %g,\n"
        "  \"attn_pdrop\": 0,\n  \"tie_word_embeddings\": %s,\n  \"torch_dtype\": \"float32\",\n"
        "  \"bos_token_id\": %s,\n  \"eos_token_id\": %s,\n  \"vocabulary\": \"%s\"\n}\n",
        (long long)c->layers, (long long)c->heads, (long long)c->width, (long long)c->block,
        (long long)c->block, (long long)d->rows, activations[c->activation], c->dropout, c->dropout,
        c->head == HEAD_OWN ? "false" : "true", end, end, vocabulary);
}

/* The file that --export writes: FILE.safetensors, FILE.gguf, or a folder's model.safetensors. */
static void export_path(const config *c, char *path) {
    size_t n = strlen(c->export_to);
    int    is_file = is_gguf(c->export_to) || (n > 12 && strcmp(c->export_to + n - 12, ".safetensors") == 0);
    snprintf(path, PATH_SPACE, is_file ? "%s" : "%s/model.safetensors", c->export_to);
}

/* Checks before training what would otherwise fail after it. */
static void check_export_path(const config *c) {
    char        path[PATH_SPACE], beside[PATH_SPACE];
    struct stat info;
    if (!c->export_to[0]) return;
    export_path(c, path);
    if (!is_gguf(path) && config_beside(path, beside) == CONFIG_OURS)
        die(1, "%s is the configuration of a run, which --export would replace: name another "
               "folder", beside);
    if (is_link(path))
        die(1, "%s is a symbolic link, and --export writes through none: remove it, or name another folder", path);
    if (stat(path, &info) == 0 && !c->overwrite)
        die(1, "%s is there already: name another --export, or replace it with --overwrite", path);
}

#endif
