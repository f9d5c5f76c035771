/* config.h - config.json, of a run or of a GPT-2, and what a checkpoint says of its model: a part of trainer.c
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * Options come from their defaults, then presets, then a config.json, then the command line. The sizes of a
 * model that is loaded come from the config.json beside it, and are compared with what its checkpoint says.
 */
#ifndef TRAINER_CONFIG_H
#define TRAINER_CONFIG_H

#include "known_keys.h"
#include "options.h"

/* The values used from a config.json. A model's vocabulary is that of its own data. */
typedef enum config_part { CONFIG_ALL, CONFIG_EXPERIMENT, CONFIG_MODEL } config_part;

static const char *const sizes[] = {"layers", "heads", "width", "block", "bias", "activation",
                                    "norm", "positions", "qk-norm", "head"};
enum { N_SIZES = (int)(sizeof sizes / sizeof sizes[0]) };

static int is_wanted(config_part part, const char *name) {
    int is_vocabulary = strcmp(name, "vocabulary") == 0;
    if (part != CONFIG_MODEL) return part == CONFIG_ALL || !is_vocabulary;
    for (int i = 0; i < N_SIZES; i++) if (strcmp(name, sizes[i]) == 0) return 1;
    return is_vocabulary || strcmp(name, "vocab") == 0;
}

/* Does config.json hold this option? It holds the options before the group "Running": a foreign
 * file describes an experiment, but must not name a folder to write to. */
static int is_of_experiment(int option_number) {
    for (int i = 0; i < option_number; i++)
        if (!options[i].name && strcmp(options[i].help, "Running") == 0) return 0;
    return 1;
}

/* The option of a key in a config.json. */
static const option *option_of_key(const char *path, const char *key) {
    char name[64] = "";
    int  i = json_string(key, name, sizeof name) < 0 ? -1 : find_option(name, strlen(name));
    if (i < 0) die(1, "%s: \"%.40s\" is not the name of an option", path, name[0] ? name : key);
    if (strcmp(options[i].name, "ranks") != 0 && !is_of_experiment(i))
        die(1, "%s names --%s, which a config.json cannot choose: set it on the command line, and "
               "remove that line", path, options[i].name);
    return &options[i];
}

/* The text of a value in a config.json: other programs may write numbers, true and false for strings. */
static void config_text(const char *path, const option *o, const char *value, char *text, size_t space) {
    int is_word = *value == 't' || *value == 'f';
    if (*value == 'n' || !json_text(value, text, space))
        die(1, "%s: the value of \"%s\" is not a text, a number, true or false that fits", path, o->name);
    if (is_word && o->kind == FLAG) strcpy(text, *value == 't' ? "1" : "0");
    if (is_word && o->kind == CHOICE) strcpy(text, *value == 't' ? "on" : "off");
}

/* Reads the file that write_config wrote, however it is laid out. */
static void apply_config_file(config *c, const char *path, config_part part) {
    char        value[6 * 1024], seen[N_OPTIONS] = {0};
    const char *root;
    char       *text = read_json(path, 1 << 20, "", &root);
    if (*root != '{') die(1, "%s is not an object of options: it does not begin with {", path);
    for (const char *key = json_first(root); key; key = json_next(json_of_key(key))) {
        const option *o = option_of_key(path, key);
        if (seen[o - options]++) die(1, "%s names \"%s\" twice: remove one of them", path, o->name);
        config_text(path, o, json_of_key(key), value, sizeof value);
        if (strcmp(o->name, "ranks") == 0) {            /* the number of ranks: not an option here */
            if (part == CONFIG_ALL) c->ranks_before = atol(value);
        } else if (is_wanted(part, o->name)) set_option(c, o, value);
    }
    if (part == CONFIG_ALL && c->ranks_before < 1) c->ranks_before = 1;
    if (part == CONFIG_ALL) c->total_before = c->batch * c->accumulate * c->ranks_before;
    free(text);
}

/* The kinds of config.json beside a file of weights: none, a run's, GPT-2's, anything else. A GGUF file has its own. */
typedef enum config_kind { CONFIG_NONE, CONFIG_OURS, CONFIG_GPT2, CONFIG_GGUF, CONFIG_OTHER } config_kind;

static config_kind kind_of_config(const char *text, int64_t size) {
    const char *wrong, *root = json_check(text, size, &wrong);
    char        type[64];
    if (!root) return CONFIG_OTHER;
    if (json_get(root, "layers") && json_get(root, "heads")) return CONFIG_OURS;
    if (!json_text(json_get(root, "model_type"), type, sizeof type)) return CONFIG_OTHER;
    return strcmp(type, "gpt2") == 0 ? CONFIG_GPT2 : CONFIG_OTHER;
}

/* The kind of the config.json beside a file; *path: its path. */
static config_kind config_beside(const char *file, char *path) {
    const char *slash = strrchr(file, '/');
    int64_t     size = 0;
    config_kind kind;
    char       *text;
    snprintf(path, PATH_SPACE, "%.*sconfig.json", slash ? (int)(slash - file + 1) : 0, file);
    text = read_file(path, 1 << 20, &size);
    if (!text) return errno == ENOENT || errno == ENOTDIR ? CONFIG_NONE : CONFIG_OTHER;
    kind = kind_of_config(text, size);
    free(text);
    return kind;
}

/* Writes the path of a file in --out. Returns 1 if the file exists. */
static int in_folder(const config *c, const char *file, char *path) {
    struct stat info;
    snprintf(path, PATH_SPACE, "%s/%s", c->out, file);
    return stat(path, &info) == 0;
}

/* Does the command line change an option of c? was, is: its value in c and there, of 32 bytes each. */
static int is_changed(const config *c, const char *const *given, const char *name, char *was, char *is) {
    int    i = find_option(name, strlen(name));
    config other = *c;
    if (!given[i]) return 0;
    set_option(&other, &options[i], given[i]);
    option_text(&other, &options[i], is, 32);
    option_text(c, &options[i], was, 32);
    return strcmp(is, was) != 0;
}

/* A model keeps its original sizes; c holds them, from the config.json at path. */
static void check_sizes(const config *c, const char *const *given, const char *path) {
    char was[32], is[32];
    for (int k = 0; k < N_SIZES; k++)
        if (is_changed(c, given, sizes[k], was, is))
            die(2, "--%s is %s in %s: a model keeps its sizes. Leave out --%s %s, or begin another "
                   "run", sizes[k], was, path, sizes[k], is);
}

static const char *weights_dtype(const config *c) {
    return c->level != 3 || c->dtype == DTYPE_FP32 ? "f32" : c->dtype == DTYPE_FP16 ? "f16" : "bf16";
}

/* A checkpoint holds states of the optimizer, and weights of one dtype; c has the options that made them. */
static void check_states(const config *c, const char *const *given, const char *path) {
    static const char *const states[] = {"optimizer", "moments", "masters", "no-master"};
    static const char *const stored[] = {"level", "dtype"};
    char   was[32], is[32];
    config other = *c;
    for (size_t k = 0; k < sizeof states / sizeof states[0]; k++)
        if (is_changed(c, given, states[k], was, is))
            die(2, "--%s is %s in %s: a run keeps the states of its optimizer. Leave out --%s %s, or begin another "
                   "run with --init", states[k], was, path, states[k], is);
    for (int k = 0; k < 2; k++) {
        int i = find_option(stored[k], strlen(stored[k]));
        if (given[i]) set_option(&other, &options[i], given[i]);
    }
    if (strcmp(weights_dtype(c), weights_dtype(&other)) == 0) return;
    for (int k = 0; k < 2; k++)
        if (is_changed(c, given, stored[k], was, is))
            die(2, "--%s is %s in %s: a run keeps the dtype of its weights, %s. Leave out --%s %s, or begin another "
                   "run with --init", stored[k], was, path, weights_dtype(c), stored[k], is);
}

/* Sizes missing in a config.json have the fixed values of older versions. */
static void forget_sizes(config *c) {
    for (int k = 0; k < N_SIZES; k++) {
        const option *o = &options[find_option(sizes[k], strlen(sizes[k]))];
        set_option(c, o, o->initial);
    }
}

static void set_by_name(config *c, const char *name, const char *text)
{ set_option(c, &options[find_option(name, strlen(name))], text); }

/* Rejects a key whose value differs from `must`: the trainer's GPT-2 supports no other value. */
static void need_gpt2(const char *path, const char *root, const char *key, const char *must) {
    char        text[64];
    const char *value = json_find(root, key);
    if (!value || (json_text(value, text, sizeof text) && strcmp(text, must) == 0)) return;
    if (!json_text(value, text, sizeof text)) strcpy(text, "a list");
    if (atof(must) == 0 || atof(text) != atof(must))        /* 1e-05 is 1e-5 */
        die(1, "%s: %s is %s, and the trainer's GPT-2 has %s only", path, key, text, must);
}

static const char *gpt2_activation(const char *path, const char *root) {
    char        name[64];
    const char *value = json_find(root, "activation_function");
    if (!value) return "gelu-tanh";
    if (!json_text(value, name, sizeof name)) strcpy(name, "no text");
    if (strcmp(name, "gelu_new") == 0 || strcmp(name, "gelu_pytorch_tanh") == 0) return "gelu-tanh";
    if (strcmp(name, "gelu") != 0)
        die(1, "%s: activation_function is %s, and the trainer has gelu and gelu_new", path, name);
    return "gelu";
}

/* The keys of a GPT-2 that are read here, and those that change only the training, or the sums of other programs. */
#define GPT2_KEYS                                                                                     \
    "n_layer n_head n_embd n_positions n_ctx n_inner vocab_size activation_function vocabulary "      \
    "layer_norm_epsilon scale_attn_weights scale_attn_by_inverse_layer_idx tie_word_embeddings "      \
    "embd_pdrop resid_pdrop attn_pdrop reorder_and_upcast_attn summary_*"

/* Reads the sizes of a GPT-2 from the keys of `transformers`. */
static void apply_gpt2_config(config *c, const char *path) {
    static const char *const keys[][2] = {{"n_layer", "layers"}, {"n_head", "heads"},
                                          {"n_embd", "width"}, {"n_positions", "block"},
                                          {"vocab_size", "vocab"}};
    char        value[600];
    const char *root;
    char       *text = read_json(path, 1 << 20, "", &root);
    check_keys(path, root, COMMON_CONFIG, GPT2_KEYS);
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
        if (!json_text(json_find(root, keys[i][0]), value, sizeof value))
            die(1, "%s has no %s: use the one of the weights", path, keys[i][0]);
        set_by_name(c, keys[i][1], value);
    }
    set_by_name(c, "bias", "on");
    set_by_name(c, "activation", gpt2_activation(path, root));
    if (json_text(json_find(root, "tie_word_embeddings"), value, sizeof value) && strcmp(value, "false") == 0)
        set_by_name(c, "head", "own");
    snprintf(value, sizeof value, "%lld", 4 * (long long)c->width);
    need_gpt2(path, root, "n_inner", value);
    need_gpt2(path, root, "layer_norm_epsilon", "1e-5");
    need_gpt2(path, root, "scale_attn_weights", "true");
    need_gpt2(path, root, "scale_attn_by_inverse_layer_idx", "false");
    /* "vocabulary" is written by trainer --export */
    if (!json_text(json_find(root, "vocabulary"), value, sizeof value) || !value[0])
        snprintf(value, sizeof value, "tokens %lld", (long long)c->vocab);
    set_by_name(c, "vocabulary", value);
    free(text);
}

static gguf *read_gguf(const char *path) {
    char  error[MIXP_MESSAGE_SIZE];
    gguf *g;
    if (gguf_read(path, &g, error, sizeof error) != MIXP_OK) die(1, "while reading --init: %s", error);
    if (!gguf_text_is(g, "general.architecture", "gpt2"))
        die(1, "%s: its general.architecture is not gpt2, which is what the trainer reads", path);
    return g;
}

/* Reads the sizes of a GPT-2 from the metadata of a GGUF file. */
static void apply_gguf(config *c, const char *path) {
    static const char *const keys[][2] = {{"gpt2.block_count", "layers"}, {"gpt2.attention.head_count", "heads"},
                                          {"gpt2.embedding_length", "width"}, {"gpt2.context_length", "block"}};
    char                 value[32];
    gguf                *g = read_gguf(path);
    const mixp_st_entry *tokens = gguf_find(g, "token_embd.weight");
    double               eps = gguf_number(g, "gpt2.attention.layer_norm_epsilon", 1e-5);
    check_gguf_keys(path, g, "gpt2",
                    "context_length embedding_length feed_forward_length block_count attention.head_count "
                    "attention.layer_norm_epsilon vocab_size");
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
        if (!gguf_pair_of(g, keys[i][0])) die(1, "%s has no %s", path, keys[i][0]);
        snprintf(value, sizeof value, "%.0f", gguf_number(g, keys[i][0], 0));
        set_by_name(c, keys[i][1], value);
    }
    if (!tokens || tokens->rank != 2) die(1, "%s has no matrix token_embd.weight", path);
    if (fabs(eps - 1e-5) > 1e-9)
        die(1, "%s: gpt2.attention.layer_norm_epsilon is %g, and the trainer's GPT-2 has 1e-5 only", path, eps);
    snprintf(value, sizeof value, "%lld", (long long)tokens->shape[0]);
    set_by_name(c, "vocab", value);
    set_by_name(c, "bias", "on");
    set_by_name(c, "activation", "gelu-tanh");
    if (gguf_find(g, "output.weight")) set_by_name(c, "head", "own");
    snprintf(value, sizeof value, "tokens %lld", (long long)tokens->shape[0]);
    set_by_name(c, "vocabulary", value);
    gguf_free(g);
}

/* Reads the sizes from the config.json at `path`, beside the weights of --init, or from the GGUF file there. */
static void apply_model_config(config *c, const char *path, config_kind kind,
                               const char *const *given) {
    int    block = find_option("block", 5);
    config shorter = *c;
    if (kind == CONFIG_GGUF) apply_gguf(c, path);
    else if (kind == CONFIG_GPT2) apply_gpt2_config(c, path);
    else apply_config_file(c, path, CONFIG_MODEL);
    if (kind != CONFIG_OURS && given[block]) {      /* the first positions suffice    */
        set_option(&shorter, &options[block], given[block]);
        if (shorter.block < c->block) c->block = shorter.block;
    }
    check_sizes(c, given, path);
}

/* ==== What a checkpoint says of its model =========================================== */

/* The metadata of a checkpoint: the sizes as in a preset, "layers=4 heads=8 ...", and the vocabulary. */
#define MODEL_KEY      "trainer.model"
#define VOCABULARY_KEY "trainer.vocabulary"
enum { MODEL_SPACE = 512, VOCABULARY_SPACE = 600 };

typedef struct description {
    int  is_ours;                       /* 1: a checkpoint of mixprec */
    char model[MODEL_SPACE], vocabulary[VOCABULARY_SPACE];  /* "": the file does not say */
} description;

/* rows: of the token table. */
static void describe_model(const config *c, int64_t rows, char *text) {
    char   value[32];
    size_t n = (size_t)snprintf(text, MODEL_SPACE, "vocab=%lld", (long long)rows);
    for (int k = 0; k < N_SIZES; k++) {
        option_text(c, &options[find_option(sizes[k], strlen(sizes[k]))], value, sizeof value);
        n += (size_t)snprintf(text + n, MODEL_SPACE - n, " %s=%s", sizes[k], value);
    }
}

static description read_description(const char *path) {
    description d;
    int64_t     size = 0;
    char       *header = read_header(path, &size);
    const char *wrong, *pairs = NULL;
    memset(&d, 0, sizeof d);
    if (header) pairs = json_get(json_check(header, size, &wrong), "__metadata__");
    d.is_ours = json_get(pairs, "mixprec") != NULL;
    if (json_string(json_get(pairs, MODEL_KEY), d.model, sizeof d.model) < 0) d.model[0] = '\0';
    if (json_string(json_get(pairs, VOCABULARY_KEY), d.vocabulary, sizeof d.vocabulary) < 0) d.vocabulary[0] = '\0';
    free(header);
    return d;
}

/* Sets the sizes of a description in c. */
static void apply_description(config *c, const char *path, const description *d) {
    char word[64];
    for (const char *p = d->model; *p;) {
        int    n = (int)strcspn(p, " "), i;
        size_t key;
        snprintf(word, sizeof word, "%.*s", n, p);
        key = strcspn(word, "=");
        i = find_option(word, key);
        if (i < 0 || !word[key] || !is_wanted(CONFIG_MODEL, options[i].name))
            die(1, "%s describes its model by \"%s\", which this version does not know", path, word);
        set_option(c, &options[i], word + key + 1);
        p += n + (p[n] == ' ');
    }
    if (d->vocabulary[0]) set_by_name(c, "vocabulary", d->vocabulary);
}

/* Do the config.json at `path` and the checkpoint beside it describe one model? c: as read from the
 * former. */
static void compare_description(const config *c, const char *path, const char *checkpoint,
                                const description *d) {
    config other = *c;
    char   is[32], was[32];
    if (!d->model[0]) return;
    apply_description(&other, checkpoint, d);
    for (int k = 0; k < N_SIZES; k++) {
        const option *o = &options[find_option(sizes[k], strlen(sizes[k]))];
        option_text(c, o, is, sizeof is);
        option_text(&other, o, was, sizeof was);
        if (strcmp(is, was) == 0) continue;
        die(1, "%s says --%s %s, and %s beside it was made with --%s %s: one of them is another run's. Put "
               "the right config.json there, or remove it", path, o->name, is, checkpoint, o->name, was);
    }
    if (d->vocabulary[0] && c->vocabulary[0] && strcmp(d->vocabulary, c->vocabulary) != 0)
        die(1, "%s has another vocabulary than %s beside it: one of them is another run's. Put the right "
               "config.json there, or remove it", path, checkpoint);
}

/* Weights without a description: what their shapes do not show must be given. */
static void need_sizes(const config *c, const char *path, const char *beside, const char *const *given) {
    static const char *const unseen[] = {"heads", "activation", "norm", "positions", "qk-norm"};
    char   missing[128] = "";
    if (c->preset[0] || c->config[0]) return;
    for (size_t k = 0; k < sizeof unseen / sizeof unseen[0]; k++)
        if (!given[find_option(unseen[k], strlen(unseen[k]))])
            sprintf(missing + strlen(missing), "%s --%s", missing[0] ? "," : "", unseen[k]);
    if (missing[0])
        die(1, "%s does not say how its model computes, and there is no %s: put the model's config.json "
               "there, or give%s", path, beside, missing);
}

/* The sizes of the model whose weights are read from `weights`: of the config.json beside them, of their
 * own description, or of the command line. */
static void find_sizes(config *c, const char *weights, const char *const *given) {
    char        path[PATH_SPACE];
    config_kind kind = config_beside(weights, path);
    description d = read_description(weights);
    const char *root;
    if (is_gguf(weights)) {
        forget_sizes(c);
        apply_model_config(c, weights, CONFIG_GGUF, given);
        return;
    }
    if (kind == CONFIG_OTHER) free(read_json(path, 1 << 20, "", &root));    /* may say why */
    if (kind == CONFIG_OTHER)
        die(1, "%s is neither the config.json of a run nor that of a GPT-2 model: put the config.json of "
            "%s there, or remove it", path, weights);
    if (kind == CONFIG_GPT2 && d.model[0])
        die(1, "%s is the config.json of a GPT-2 model, and %s beside it is a run's checkpoint: put the "
            "run's config.json there, or remove it", path, weights);
    if (kind == CONFIG_NONE && !d.model[0]) {
        if (access(weights, F_OK) == 0) need_sizes(c, weights, path, given);
        return;
    }
    forget_sizes(c);
    if (kind == CONFIG_NONE) {
        apply_description(c, weights, &d);
        check_sizes(c, given, weights);
    } else {
        apply_model_config(c, path, kind, given);
        compare_description(c, path, weights, &d);
    }
}

/* A resumed run: its config.json, compared with its checkpoint. */
static void find_run(config *c, const char *const *given) {
    char        path[PATH_SPACE], checkpoint[PATH_SPACE];
    int         has_config = in_folder(c, "config.json", path);
    description d;
    if (!in_folder(c, checkpoint_name(c), checkpoint)) checkpoint[0] = '\0';
    d = read_description(checkpoint);
    if (has_config) {
        apply_config_file(c, path, CONFIG_ALL);
        compare_description(c, path, checkpoint, &d);
    } else if (d.model[0]) {
        forget_sizes(c);
        apply_description(c, checkpoint, &d);
        warn("there is no %s: the sizes are those of %s, every other option is the default or given here",
             path, checkpoint);
    }
    if (has_config || d.model[0]) check_sizes(c, given, has_config ? path : checkpoint);
    if (has_config) check_states(c, given, path);
}

/* For a folder, --init uses the file that transformers writes there; for large models, that is an
 * index of several files. */
static void name_weights(config *c) {
    struct stat info;
    size_t      n = strlen(c->init);
    if (!n || stat(c->init, &info) != 0 || !S_ISDIR(info.st_mode)) return;
    if (n + 32 > sizeof c->init) die(2, "--init is too long");
    strcpy(c->init + n, "/model.safetensors.index.json");
    if (stat(c->init, &info) == 0) return;
    strcpy(c->init + n, "/model.safetensors");
}

/* Applies defaults, then presets, then config.json, then the command line. */
static void read_options(config *c, int argc, char **argv) {
    const char *given[N_OPTIONS] = {NULL};
    memset(c, 0, sizeof *c);
    parse_command_line(argc, argv, given, NULL);
    for (int i = 0; i < N_OPTIONS; i++)
        if (options[i].name) set_option(c, &options[i], options[i].initial);
    for (int pass = 0; pass < 2; pass++) {
        for (int i = 0; i < N_OPTIONS; i++)
            if (given[i]) set_option(c, &options[i], given[i]);
        name_weights(c);
        if (pass == 1 || c->help || c->version) return;
        apply_presets(c, c->preset);
        if (c->config[0]) apply_config_file(c, c->config, CONFIG_EXPERIMENT);
        if (c->resume) find_run(c, given);
        else if (c->init[0]) find_sizes(c, c->init, given);
    }
}

#endif
